/* A block's threads as fibers on the calling thread of the system. Whoever waits, yields or ends hands over to a
 * thread drawn from those that can go on, so a seed gives one order. Locks are not needed. */
#include "ops/cuda/host/run.h"

#if defined(CG_HOST_TSAN)
#include <sanitizer/tsan_interface.h>
#endif

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#else
#define __sanitizer_start_switch_fiber(keep, bottom, bytes) ((void)(keep), (void)(bottom), (void)(bytes))
#define __sanitizer_finish_switch_fiber(kept, bottom, bytes) ((void)(kept), (void)(bottom), (void)(bytes))
#endif

const char *const cg_host_mode = "fibers";

#if defined(__x86_64__) && !defined(CG_HOST_UCONTEXT)

/* Where a stack was left: all that a function call keeps lies on it. */
struct context {
    void *top;
};

/* Leaves the running stack and goes on where `to` was left. */
extern "C" void cg_host_switch(context *from, const context *to);
asm(R"(
.text
.globl cg_host_switch
.type cg_host_switch, @function
cg_host_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq (%rsi), %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size cg_host_switch, . - cg_host_switch
)");

/* As if `start` had been called from nowhere and had called cg_host_switch at once. */
static void context_make(context *c, unsigned char *stack, size_t bytes, void (*start)(void)) {
    void **top = (void **)(stack + bytes);
    *--top = NULL; /* its return address, where walks over the stack end */
    *--top = (void *)start;
    for (int kept = 0; kept < 6; kept++) *--top = NULL;
    c->top = top;
}

#else /* any processor, slower: every switch asks the system for the signal mask */

#include <ucontext.h>

typedef ucontext_t context;

static void cg_host_switch(context *from, const context *to) { swapcontext(from, to); }

static void context_make(context *c, unsigned char *stack, size_t bytes, void (*start)(void)) {
    getcontext(c);
    c->uc_stack.ss_sp = stack;
    c->uc_stack.ss_size = bytes;
    makecontext(c, start, 0);
}

#endif

namespace {

const size_t stack_bytes = 256 << 10;

struct fiber {
    cg_host_thread *thread;
    const unsigned char *stack; /* its lowest byte */
    size_t bytes;
    context left; /* while another runs */
    void *fake;   /* AddressSanitizer's own stack */
    void *tsan;   /* what ThreadSanitizer takes for a thread */
};

/* One more than a block has threads. CUDA thread i of the k-th block runs on fiber i + k modulo their number: threads of
 * the same number in two blocks would otherwise be one thread to ThreadSanitizer, and their races invisible. */
fiber fibers[1025], caller; /* caller: of cg_host_run_block */
unsigned n_fibers, first;
fiber *ready[1024]; /* can go on, in no order */
unsigned n_ready;
fiber *running;

fiber *fiber_of(const cg_host_thread *thread) { return &fibers[(thread->number + first) % n_fibers]; }

fiber *draw_ready() {
    size_t i = cg_host_draw(n_ready);
    fiber *next = ready[i];
    ready[i] = ready[--n_ready];
    return next;
}

/* From fiber to fiber; returns when somebody comes back, which nobody does after the `last` time. The switch itself
 * orders no memory. */
__attribute__((no_sanitize("address"))) void go_to(fiber *next, bool last) {
    fiber *me = running;
    running = next;
    __sanitizer_start_switch_fiber(last ? NULL : &me->fake, next->stack, next->bytes);
#if defined(CG_HOST_TSAN)
    __tsan_switch_to_fiber(next->tsan, __tsan_switch_to_fiber_no_sync);
#endif
    cg_host_switch(&me->left, &next->left);
    __sanitizer_finish_switch_fiber(me->fake, NULL, NULL);
}

/* Where a fiber begins, anew for every block. AddressSanitizer is not to guard variables here: a frame that is never
 * left would leave its guards to whatever lies there next time. */
__attribute__((no_sanitize("address"))) void fiber_main() {
    const void *bottom = NULL;
    size_t bytes = 0;
    __sanitizer_finish_switch_fiber(NULL, &bottom, &bytes);
    if (!caller.stack) { /* the first fiber of a block is told where it came from */
        caller.stack = (const unsigned char *)bottom;
        caller.bytes = bytes;
    }
    cg_host_thread_body(running->thread);
    go_to(n_ready > 0 ? draw_ready() : &caller, true);
}

void make_fiber(fiber *f) {
    size_t guard = (size_t)sysconf(_SC_PAGESIZE);
    unsigned char *p = (unsigned char *)mmap(NULL, guard + stack_bytes, PROT_READ | PROT_WRITE,
                                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED || mprotect(p, guard, PROT_NONE) != 0) {
        perror("cuda_host: memory for the stacks of fibers");
        exit(EXIT_FAILURE);
    }
    f->stack = p + guard;
    f->bytes = stack_bytes;
#if defined(CG_HOST_TSAN)
    f->tsan = __tsan_create_fiber(0);
#endif
}

} // namespace

__attribute__((no_sanitize("address"))) void cg_host_run_block(cg_host_thread *threads, unsigned n,
                                                               int64_t block) {
    while (n_fibers < n + 1) make_fiber(&fibers[n_fibers++]);
    first = (unsigned)(block % n_fibers);
    n_ready = 0;
    for (unsigned i = 0; i < n; i++) {
        fiber *f = fiber_of(&threads[i]);
        f->thread = &threads[i];
        f->fake = NULL;
        context_make(&f->left, (unsigned char *)f->stack, f->bytes, fiber_main);
        ready[n_ready++] = f;
    }
    caller = {};
#if defined(CG_HOST_TSAN)
    caller.tsan = __tsan_get_current_fiber();
#endif
    running = &caller;
    go_to(draw_ready(), false);
}

void cg_host_lock(void) {}
void cg_host_unlock(void) {}

void cg_host_wake(cg_host_thread *thread) { ready[n_ready++] = fiber_of(thread); }

void cg_host_sleep(cg_host_thread *) {
    fiber *next = draw_ready();
    if (next != running) go_to(next, false);
}

void cg_host_yield(cg_host_thread *thread) {
    cg_host_wake(thread);
    cg_host_sleep(thread);
}
