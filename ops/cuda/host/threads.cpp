/* A block's threads as threads of the system, which run at once on all processors. For ThreadSanitizer, which must not
 * see how they wait for each other: a lock that it knew would order accesses that the kernel does not order. So locks
 * and waiting are futexes, in code that it does not instrument.
 *
 * The threads are kept from launch to launch, one more than a block needs; CUDA thread i of the k-th block is run by
 * thread i + k modulo their number, for the reason given in fibers.cpp. */
#include "ops/cuda/host/run.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

const char *const cg_host_mode = "threads";

namespace {

/* Sleeps while *word is `value`; may return early. */
void futex_wait(const uint32_t *word, uint32_t value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL);
}
void futex_wake(const uint32_t *word, int n) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, n); }

/* A word that counts events, and waiting for one more than were seen. */
uint32_t seen(const uint32_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
void count(uint32_t *word) {
    __atomic_add_fetch(word, 1, __ATOMIC_ACQ_REL);
    futex_wake(word, INT_MAX);
}
void wait_beyond(const uint32_t *word, uint32_t value) {
    while (seen(word) == value) futex_wait(word, value);
}

struct worker {
    uint32_t blocks;        /* counts the blocks that it was given a part of */
    cg_host_thread *thread; /* its part */
};

worker workers[1025];
unsigned n_workers;
uint32_t wakes[1024]; /* by number of the CUDA thread */
uint32_t done;        /* counts ended blocks */
unsigned left;        /* threads of the block that have not ended */
uint32_t lock_state;  /* 0 free, 1 held, 2 held and wanted */

void *work(void *p) {
    worker *me = (worker *)p;
    for (uint32_t blocks = 0;; blocks++) {
        wait_beyond(&me->blocks, blocks);
        cg_host_thread_body(me->thread);
        bool last = --left == 0;
        cg_host_unlock();
        if (last) count(&done);
    }
    return NULL;
}

} // namespace

void cg_host_run_block(cg_host_thread *threads, unsigned n, int64_t block) {
    while (n_workers < n + 1) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, work, &workers[n_workers]) != 0 || pthread_detach(thread) != 0) {
            perror("cuda_host: a thread of the system");
            exit(EXIT_FAILURE);
        }
        n_workers++;
    }
    left = n;
    uint32_t before = seen(&done);
    for (unsigned i = 0; i < n; i++) {
        worker *w = &workers[(i + (uint64_t)block) % n_workers];
        w->thread = &threads[i];
        count(&w->blocks);
    }
    wait_beyond(&done, before);
}

void cg_host_lock(void) {
    uint32_t state = 0;
    if (__atomic_compare_exchange_n(&lock_state, &state, 1, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) return;
    while (__atomic_exchange_n(&lock_state, 2, __ATOMIC_ACQUIRE) != 0) futex_wait(&lock_state, 2);
}

void cg_host_unlock(void) {
    if (__atomic_exchange_n(&lock_state, 0, __ATOMIC_RELEASE) == 2) futex_wake(&lock_state, 1);
}

void cg_host_wake(cg_host_thread *thread) { count(&wakes[thread->number]); }

void cg_host_sleep(cg_host_thread *thread) {
    uint32_t before = seen(&wakes[thread->number]);
    cg_host_unlock();
    wait_beyond(&wakes[thread->number], before);
}

void cg_host_yield(cg_host_thread *) {}
