/* A block's threads as fibers on the calling thread of the system. Whoever waits, yields or ends hands over to a
 * thread drawn from those that can go on, so a seed gives one order. Locks are not needed. */
#include "tests/cuda_host/run.h"

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
const bool cg_host_fresh_shared = false;

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
    unsigned char *stack; /* its lowest byte; a page without access lies below */
    context left;         /* while another runs */
    void *fake;           /* AddressSanitizer's own stack */
};

fiber fibers[1024];
unsigned n_fibers;
fiber *ready[1024]; /* can go on, in no order */
unsigned n_ready;
fiber *running;

/* The caller of cg_host_run_block. */
context main_left;
void *main_fake;
const void *main_bottom;
size_t main_bytes;

fiber *draw_ready() {
    size_t i = cg_host_draw(n_ready);
    fiber *next = ready[i];
    ready[i] = ready[--n_ready];
    return next;
}

/* On the new stack. The frames below never return, so AddressSanitizer is not to guard variables in them. */
__attribute__((noreturn, no_sanitize("address", "undefined"))) void fiber_main() {
    fiber *me = running;
    const void *bottom = NULL;
    size_t bytes = 0;
    __sanitizer_finish_switch_fiber(NULL, &bottom, &bytes);
    if (!main_bottom) main_bottom = bottom, main_bytes = bytes;
    cg_host_thread_body(me->thread);
    __builtin_unreachable();
}

/* Leaves the running fiber for another; for the last time when `keep` is NULL. */
__attribute__((no_sanitize("address"))) void go_to(fiber *me, fiber *next, void **keep) {
    running = next;
    __sanitizer_start_switch_fiber(keep, next->stack, stack_bytes);
    cg_host_switch(&me->left, &next->left);
    __sanitizer_finish_switch_fiber(me->fake, NULL, NULL);
}

void make_stack(fiber *f) {
    size_t guard = (size_t)sysconf(_SC_PAGESIZE);
    unsigned char *p = (unsigned char *)mmap(NULL, guard + stack_bytes, PROT_READ | PROT_WRITE,
                                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED || mprotect(p, guard, PROT_NONE) != 0) {
        perror("cuda_host: memory for the stacks of fibers");
        exit(EXIT_FAILURE);
    }
    f->stack = p + guard;
}

} // namespace

__attribute__((no_sanitize("address"))) void cg_host_run_block(cg_host_thread *threads, unsigned n, int64_t) {
    while (n_fibers < n) make_stack(&fibers[n_fibers++]);
    n_ready = 0;
    for (unsigned i = 0; i < n; i++) {
        fiber *f = &fibers[i];
        f->thread = &threads[i];
        f->fake = NULL;
        context_make(&f->left, f->stack, stack_bytes, fiber_main);
        ready[n_ready++] = f;
    }
    running = draw_ready();
    main_bottom = NULL;
    __sanitizer_start_switch_fiber(&main_fake, running->stack, stack_bytes);
    cg_host_switch(&main_left, &running->left);
    __sanitizer_finish_switch_fiber(main_fake, NULL, NULL);
}

void cg_host_launch_ends(void) {}
void cg_host_lock(void) {}
void cg_host_unlock(void) {}
void cg_host_order_before(const void *) {}
void cg_host_order_after(const void *) {}

void cg_host_wake(cg_host_thread *thread) { ready[n_ready++] = &fibers[thread->number]; }

void cg_host_sleep(cg_host_thread *thread) {
    fiber *me = &fibers[thread->number], *next = draw_ready();
    if (next != me) go_to(me, next, &me->fake);
}

void cg_host_yield(cg_host_thread *thread) {
    cg_host_wake(thread);
    cg_host_sleep(thread);
}

__attribute__((no_sanitize("address"))) void cg_host_ended(cg_host_thread *thread) {
    fiber *me = &fibers[thread->number];
    if (n_ready > 0) go_to(me, draw_ready(), NULL);
    __sanitizer_start_switch_fiber(NULL, main_bottom, main_bytes);
    cg_host_switch(&me->left, &main_left);
    __builtin_unreachable();
}
