#define _GNU_SOURCE /* sched_getaffinity */
#include "core/base/threads.h"

#include <omp.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <unistd.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
static int slots;
static atomic_int in_use;

/* The affinity mask, not the number of processors of the machine: a container or taskset gives fewer. */
static int count_processors(void) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0) return CPU_COUNT(&set);
    long online = sysconf(_SC_NPROCESSORS_ONLN); /* more processors than a cpu_set_t holds */
    return online > 0 && online < 1 << 16 ? (int)online : 1;
}

static void init(void) {
    slots = count_processors();
    int n = omp_get_max_threads(); /* OMP_NUM_THREADS, or all processors */
    n = n < 1 ? 1 : n > slots ? slots : n;
    omp_set_dynamic(0); /* a region must get the threads it asks for, or measured times mean nothing */
    omp_set_num_threads(n);
    atomic_store(&in_use, n);
}

int cg_thread_slots(void) {
    pthread_once(&once, init);
    return slots;
}

int cg_threads(void) {
    pthread_once(&once, init);
    return atomic_load(&in_use);
}

bool cg_threads_set(int n, cg_error *error) {
    pthread_once(&once, init);
    if (n < 1 || n > slots)
        return cg_fail(error, CG_BAD_INPUT, "threads: %d asked for, this process may use 1 to %d", n, slots);
    omp_set_num_threads(n);
    atomic_store(&in_use, n);
    return true;
}

int cg_thread_slot(void) { return omp_get_thread_num(); }
