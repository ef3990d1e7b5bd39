/* What cuda_host.cpp, the meaning of every function, asks of fibers.cpp or threads.cpp, the way threads run. */
#ifndef TESTS_CUDA_HOST_RUN_H
#define TESTS_CUDA_HOST_RUN_H

#include "ops/cuda/host/cuda_host.h"

/* One CUDA thread of the block that runs. */
struct cg_host_thread {
    enum cg_host_state { RUNS, AT_BARRIER, AT_WARP, ENDED } state;
    unsigned number; /* x fastest, then y, then z */
    uint3 index;

    /* what it waits for */
    const char *what, *file;
    int line;
    unsigned mask;        /* of a warp function */
    void *payload;        /* what a warp function gives, then gets */
    int result;           /* of a barrier */
    const void *ordering; /* where ThreadSanitizer learns what is ordered before this thread goes on */

    /* cp.async: copies in order, each with the number of its group. In place, since memory that one thread of the
     * system allocates and another frees would be a race to ThreadSanitizer. */
    struct copy {
        cg_host_copy places;
        int64_t group;
    } copies[64];
    unsigned n_copies, copied; /* issued, and of these done */
    int64_t groups;            /* committed so far */
    bool unfenced; /* has written to a tile, or had copied to one, behind its last cg_host_fence_tiles */
};

/* Provided by cuda_host.cpp. */

extern __thread cg_host_thread *cg_host_this_thread;

/* Sets threadIdx and the rest on this thread of the system. */
void cg_host_enter(cg_host_thread *thread);

/* The kernel as this CUDA thread, from its first to its last line or to the fault of any thread. Returns with the lock
 * held and the thread's end noted. */
void cg_host_thread_body(cg_host_thread *thread);

/* A number below n, drawn from the seed. Not for concurrent use. */
size_t cg_host_draw(size_t n);

/* Provided by fibers.cpp or threads.cpp. */

/* Runs cg_host_thread_body for each of the n threads; returns when all have ended. `block` counts from 0 within the
 * launch. */
void cg_host_run_block(cg_host_thread *threads, unsigned n, int64_t block);

/* Exclude each other; all state of the block is changed under this lock. */
void cg_host_lock(void);
void cg_host_unlock(void);

/* The calling thread has been marked as waiting: returns, unlocked, after cg_host_wake for it. */
void cg_host_sleep(cg_host_thread *thread);

/* Lets a waiting thread go on. The lock is held. */
void cg_host_wake(cg_host_thread *thread);

/* Perhaps lets another thread go on first. */
void cg_host_yield(cg_host_thread *thread);

#endif
