/* What barriers, warp functions, shared memory, copies and launches mean, and what of them is an error. The same for
 * fibers and for threads of the system; run.h has what differs.
 *
 * Compiled without ThreadSanitizer on purpose: what this file does to keep its books must not count as order between
 * the kernel's threads. With CG_HOST_TSAN it tells ThreadSanitizer which order there is (order_before, order_after). */
#include "ops/cuda/host/run.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(p, n) ((void)(p), (void)(n))
#define ASAN_UNPOISON_MEMORY_REGION(p, n) ((void)(p), (void)(n))
#endif

#if defined(CG_HOST_TSAN)
#include <sanitizer/tsan_interface.h>
#endif

__thread uint3 threadIdx, blockIdx, blockDim, gridDim;
__thread cg_host_thread *cg_host_this_thread;

namespace {

/* What this thread did so far comes before what any thread does after order_after of the same address. */
void order_before(const void *address) {
#if defined(CG_HOST_TSAN)
    __tsan_release((void *)address);
#endif
    (void)address;
}
void order_after(const void *address) {
#if defined(CG_HOST_TSAN)
    __tsan_acquire((void *)address);
#endif
    (void)address;
}

/* To ThreadSanitizer the blocks of a launch are in no order, so each needs shared memory that no other one had. */
#if defined(CG_HOST_TSAN)
const bool fresh_shared_memory = true;
#else
const bool fresh_shared_memory = false;
#endif

enum { WARP = 32, MAX_THREADS = 1024, MAX_STATIC = 48 << 10, MAX_SHARED = 227 << 10 };

/* One shared array of the running block. */
struct shared_array {
    const void *place; /* in the source; the dynamic array has its own */
    const char *name;
    unsigned char *data;
    size_t bytes;
};

/* Lanes of a warp that wait at warp functions or have ended. */
struct warp_state {
    unsigned waiting, ended;
};

/* The launch and its running block. One launch at a time: tests are sequential. */
struct {
    const char *kernel;
    void (*run)(const void *);
    const void *call;
    uint3 grid, dim;
    size_t dynamic_bytes;
    cg_error *error;
    bool failed; /* threads end at their next call of this file */

    uint3 block;
    std::vector<cg_host_thread> threads;
    unsigned n, n_running, n_ended;
    warp_state warps[MAX_THREADS / WARP];

    struct {                      /* the barrier that some threads wait at */
        unsigned arrived, passed; /* passed: barriers that all have left behind */
        cg_host_barrier_kind kind;
        int any, all, count;
        const cg_host_thread *first;
    } barrier;
    /* addresses, for order_before and order_after */
    char begin_order, end_order; /* of the launch */
    char barrier_order[2];       /* two, so that a fast thread's next barrier is not a slow one's last */
    char warp_order[1024];       /* of warp functions, taken in turn */
    size_t warp_functions;

    shared_array arrays[64];
    unsigned n_arrays;
    size_t static_bytes;
} now;

uint64_t random_state = 3; /* of seed 1 */

/* Thrown through a kernel's frames to end a thread when its launch has failed. */
struct launch_failed {};

struct sentence {
    char text[CG_ERROR_TEXT];
};

sentence say(const char *format, ...) __attribute__((format(printf, 1, 2)));
sentence say(const char *format, ...) {
    sentence s;
    va_list args;
    va_start(args, format);
    vsnprintf(s.text, sizeof s.text, format, args);
    va_end(args);
    return s;
}

sentence name_of(const cg_host_thread &t) { return say("thread (%u,%u,%u)", t.index.x, t.index.y, t.index.z); }

/* The same text; mostly the same literal. */
bool same(const char *a, const char *b) { return a == b || strcmp(a, b) == 0; }

const char *file_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

sentence place_of(const cg_host_thread &t) {
    switch (t.state) {
    case cg_host_thread::RUNS:
        return say("runs");
    case cg_host_thread::ENDED:
        return say("has ended");
    default:
        return say("waits at %s (%s:%d)", t.what, file_name(t.file), t.line);
    }
}

void wake(cg_host_thread &t) {
    if (t.state == cg_host_thread::AT_WARP) now.warps[t.number / WARP].waiting &= ~(1u << t.number % WARP);
    t.state = cg_host_thread::RUNS;
    now.n_running++;
    cg_host_wake(&t);
}

/* The lock is held. Every waiting thread is woken to find that the launch has failed. */
void fail(const sentence &why) {
    if (now.failed) return;
    now.failed = true;
    cg_fail(now.error, CG_FAILED, "kernel %s, block (%u,%u,%u): %s", now.kernel, now.block.x, now.block.y,
            now.block.z, why.text);
    for (cg_host_thread &t : now.threads)
        if (t.state == cg_host_thread::AT_BARRIER || t.state == cg_host_thread::AT_WARP) wake(t);
}

[[noreturn]] void leave() {
    cg_host_unlock();
    throw launch_failed();
}

/* Why, when nobody runs and somebody waits: a named lane or a thread of the block does not come. */
sentence stuck() {
    for (const cg_host_thread &t : now.threads) {
        if (t.state != cg_host_thread::AT_WARP) continue;
        for (unsigned lane = 0; lane < WARP; lane++) {
            if (!(t.mask >> lane & 1)) continue;
            const cg_host_thread &other = now.threads[t.number / WARP * WARP + lane];
            if (other.state != cg_host_thread::AT_WARP || other.mask != t.mask)
                return say("%s %s with mask 0x%08x for lane %u, which %s", name_of(t).text, place_of(t).text,
                           t.mask, lane, place_of(other).text);
        }
    }
    return say("no thread can go on");
}

/* The lock is held; returns without it, or throws. */
void wait(cg_host_thread &me, cg_host_thread::cg_host_state state) {
    me.state = state;
    if (now.n_running == 1) {
        sentence why = stuck();
        me.state = cg_host_thread::RUNS;
        fail(why);
        leave();
    }
    now.n_running--;
    cg_host_sleep(&me);
    cg_host_enter(&me);
    if (now.failed) throw launch_failed();
}

} // namespace

void cg_host_enter(cg_host_thread *thread) {
    cg_host_this_thread = thread;
    threadIdx = thread->index;
    blockIdx = now.block;
    blockDim = now.dim;
    gridDim = now.grid;
}

void cg_host_thread_body(cg_host_thread *thread) {
    cg_host_enter(thread);
    cg_host_thread &me = *thread;
    order_after(&now.begin_order);
    try {
        if (!now.failed) now.run(now.call);
    } catch (const launch_failed &) {
    }
    cg_host_lock();
    me.state = cg_host_thread::ENDED;
    now.n_running--;
    now.n_ended++;
    if (now.barrier.arrived > 0)
        fail(say("%s ended while %s %s, as do %u more; every thread of the block has to come", name_of(me).text,
                 name_of(*now.barrier.first).text, place_of(*now.barrier.first).text, now.barrier.arrived - 1));
    warp_state &warp = now.warps[me.number / WARP];
    warp.ended |= 1u << me.number % WARP;
    for (unsigned lanes = warp.waiting; lanes; lanes &= lanes - 1) {
        const cg_host_thread &other = now.threads[me.number / WARP * WARP + (unsigned)__builtin_ctz(lanes)];
        if (other.mask >> me.number % WARP & 1)
            fail(say("%s ended while %s %s with a mask that names it, 0x%08x", name_of(me).text,
                     name_of(other).text, place_of(other).text, other.mask));
    }
    if (!now.failed && me.copied < me.n_copies)
        fail(say("%s ended with %u copies of cp.async that no wait covered", name_of(me).text,
                 me.n_copies - me.copied));
    if (now.n_running == 0 && now.n_ended < now.n) fail(stuck());
    order_before(&now.end_order); /* and not before the next block */
    cg_host_this_thread = NULL;
}

void cg_host_fault(const char *file, int line, const char *format, ...) {
    sentence what;
    va_list args;
    va_start(args, format);
    vsnprintf(what.text, sizeof what.text, format, args);
    va_end(args);
    cg_host_lock();
    fail(say("%s: %s (%s:%d)", name_of(*cg_host_this_thread).text, what.text, file_name(file), line));
    leave();
}

/* The sanitizers call these when they report, and know nothing of CUDA threads. */
static void print_place(void) {
    if (!cg_host_this_thread) return;
    fprintf(stderr, "(in kernel %s, block (%u,%u,%u), %s)\n", now.kernel, now.block.x, now.block.y, now.block.z,
            name_of(*cg_host_this_thread).text);
}
extern "C" void __asan_on_error(void) { print_place(); }
extern "C" void __tsan_on_report(void *) { print_place(); }

void cg_host_pause(void) {
    cg_host_thread *me = cg_host_this_thread;
    cg_host_yield(me);
    cg_host_enter(me);
    if (now.failed) throw launch_failed();
}

void cg_host_fence(void) {
    static const char fences = 0;
    order_after(&fences);
    order_before(&fences);
}

/* ---- barriers ---- */

int cg_host_barrier(cg_host_barrier_kind kind, int predicate, const char *file, int line) {
    static const char *const names[] = {"__syncthreads", "__syncthreads_or", "__syncthreads_and",
                                        "__syncthreads_count"};
    cg_host_thread &me = *cg_host_this_thread;
    char *order = &now.barrier_order[now.barrier.passed % 2];
    order_before(order);
    cg_host_lock();
    if (now.failed) leave();
    auto &barrier = now.barrier;
    me.what = names[kind], me.file = file, me.line = line;
    if (now.n_ended > 0) {
        for (const cg_host_thread &t : now.threads)
            if (t.state == cg_host_thread::ENDED) {
                fail(say("%s came to %s (%s:%d) after %s had ended; every thread of the block has to come",
                         name_of(me).text, me.what, file_name(file), line, name_of(t).text));
                leave();
            }
    }
    if (barrier.arrived == 0) {
        barrier.first = &me;
        barrier.kind = kind;
        barrier.any = barrier.count = 0;
        barrier.all = 1;
    } else if (barrier.kind != kind || barrier.first->line != line || !same(barrier.first->file, file)) {
        fail(say("%s came to %s (%s:%d) while %s %s; all threads of a block have to come to the same one",
                 name_of(me).text, me.what, file_name(file), line, name_of(*barrier.first).text,
                 place_of(*barrier.first).text));
        leave();
    }
    barrier.any |= predicate != 0;
    barrier.all &= predicate != 0;
    barrier.count += predicate != 0;
    if (++barrier.arrived < now.n) {
        wait(me, cg_host_thread::AT_BARRIER);
    } else {
        barrier.arrived = 0;
        barrier.passed++;
        int result = kind == CG_HOST_OR ? barrier.any : kind == CG_HOST_AND ? barrier.all : barrier.count;
        for (cg_host_thread &t : now.threads) {
            t.result = result;
            if (t.state == cg_host_thread::AT_BARRIER) wake(t);
        }
        cg_host_unlock();
        cg_host_pause();
    }
    order_after(order);
    return me.result;
}

/* ---- warp functions ---- */

namespace {

unsigned lane_of(const cg_host_thread &t) { return t.number % WARP; }

/* Why the thread cannot join the lanes that it names at a warp function; false: it can. */
bool refused(const cg_host_thread &me, const cg_host_thread *warp, sentence *why) {
    const warp_state &state = now.warps[me.number / WARP];
    unsigned first = me.number / WARP * WARP, lanes = now.n - first < WARP ? (1u << (now.n - first)) - 1 : ~0u;
    sentence fault;
    if (!(me.mask >> lane_of(me) & 1))
        fault = say("the mask does not name the lane that calls, %u", lane_of(me));
    else if (me.mask & ~lanes)
        fault = say("the mask names lane %d, and the block's last warp has only %u",
                    __builtin_ctz(me.mask & ~lanes), now.n - first);
    else if (me.mask & state.ended)
        fault =
            say("the mask names %s, which has ended", name_of(warp[__builtin_ctz(me.mask & state.ended)]).text);
    else {
        /* One waiting lane is looked at until all have come; then each is. */
        unsigned waiting = me.mask & state.waiting;
        const bool all = waiting == (me.mask & ~(1u << lane_of(me)));
        const cg_host_thread *other = NULL;
        for (; waiting && !other; waiting = all ? waiting & (waiting - 1) : 0) {
            const cg_host_thread &t = warp[__builtin_ctz(waiting)];
            if (t.mask != me.mask || t.line != me.line || !same(t.what, me.what) || !same(t.file, me.file))
                other = &t;
        }
        if (!other) return false;
        fault = say("named lane %u %s with mask 0x%08x", lane_of(*other), place_of(*other).text, other->mask);
    }
    *why = say("%s at %s (%s:%d) with mask 0x%08x: %s", name_of(me).text, me.what, file_name(me.file), me.line,
               me.mask, fault.text);
    return true;
}

/* Waits for all lanes that the mask names; the last one calls combine(payloads by lane). Returns when that is done;
 * the payload is the caller's again. `ordered`: memory is ordered too, which only __syncwarp does. */
template <typename P, typename F>
void meet(const char *what, unsigned mask, P *payload, const char *file, int line, bool ordered, F combine) {
    cg_host_thread &me = *cg_host_this_thread;
    if (ordered) order_before(&me.ordering);
    cg_host_lock();
    if (now.failed) leave();
    cg_host_thread *warp = &now.threads[me.number / WARP * WARP];
    me.what = what, me.file = file, me.line = line, me.mask = mask, me.payload = payload;
    sentence why;
    if (refused(me, warp, &why)) {
        fail(why);
        leave();
    }
    warp_state &state = now.warps[me.number / WARP];
    if (mask & ~(state.waiting | 1u << lane_of(me))) {
        state.waiting |= 1u << lane_of(me);
        wait(me, cg_host_thread::AT_WARP);
    } else {
        P *payloads[WARP] = {};
        for (unsigned lanes = mask; lanes; lanes &= lanes - 1) {
            int lane = __builtin_ctz(lanes);
            payloads[lane] = (P *)warp[lane].payload;
        }
        combine(payloads);
        const char *order = &now.warp_order[now.warp_functions++ % sizeof now.warp_order];
        for (unsigned lanes = mask; lanes; lanes &= lanes - 1) {
            cg_host_thread &t = warp[__builtin_ctz(lanes)];
            if (ordered) order_after(&t.ordering);
            t.ordering = order;
        }
        if (ordered) order_before(order);
        for (unsigned lanes = mask & state.waiting; lanes; lanes &= lanes - 1) wake(warp[__builtin_ctz(lanes)]);
        cg_host_unlock();
        cg_host_pause();
    }
    if (ordered) order_after(me.ordering);
}

} // namespace

void cg_host_syncwarp(unsigned mask, const char *file, int line) {
    char nothing = 0;
    meet("__syncwarp", mask, &nothing, file, line, true, [](char **) {});
}

unsigned cg_host_ballot(const char *what, unsigned mask, bool predicate, const char *file, int line) {
    unsigned votes = predicate;
    meet(what, mask, &votes, file, line, false, [](unsigned **lanes) {
        unsigned all = 0;
        for (unsigned lane = 0; lane < WARP; lane++)
            if (lanes[lane]) all |= *lanes[lane] << lane;
        for (unsigned lane = 0; lane < WARP; lane++)
            if (lanes[lane]) *lanes[lane] = all;
    });
    return votes;
}

uint64_t cg_host_shuffle(cg_host_shuffle_kind kind, unsigned mask, uint64_t bits, int by, int width,
                         const char *file, int line) {
    static const char *const names[] = {"__shfl_sync", "__shfl_up_sync", "__shfl_down_sync", "__shfl_xor_sync"};
    if (width < 1 || width > WARP || (width & (width - 1)) != 0)
        cg_host_fault(file, line, "%s: the width is %d, expected a power of two up to 32", names[kind], width);
    /* Lanes form groups of `width`. A source beyond the own group is the caller itself; going by __shfl_sync, it is
     * taken within the group; by __shfl_xor_sync, groups before the own one may be read. */
    int lane = (int)lane_of(*cg_host_this_thread), first = lane & ~(width - 1), last = first | (width - 1);
    int from = lane;
    switch (kind) {
    case CG_HOST_IDX:
        from = first | (by & (width - 1));
        break;
    case CG_HOST_UP:
        from = lane - by >= first ? lane - by : lane;
        break;
    case CG_HOST_DOWN:
        from = by <= last - lane ? lane + by : lane;
        break;
    case CG_HOST_XOR:
        from = (lane ^ by) <= last ? lane ^ by : lane;
        break;
    }
    if (from < 0 || from >= WARP || !(mask >> from & 1))
        cg_host_fault(file, line, "%s takes the value of lane %d, which the mask 0x%08x does not name",
                      names[kind], from, mask);
    struct exchange {
        uint64_t given, taken;
        int from;
    } mine = {bits, 0, from};
    meet(names[kind], mask, &mine, file, line, false, [](exchange **lanes) {
        for (unsigned to = 0; to < WARP; to++)
            if (lanes[to]) lanes[to]->taken = lanes[lanes[to]->from]->given;
    });
    return mine.taken;
}

void cg_host_gather(const char *what, const void *mine, const void *all[32], const char *file, int line) {
    struct gather {
        const void *mine, **all;
    } own = {mine, all};
    meet(what, 0xffffffffu, &own, file, line, false, [](gather **lanes) {
        for (unsigned to = 0; to < WARP; to++)
            for (unsigned lane = 0; lane < WARP; lane++) lanes[to]->all[lane] = lanes[lane]->mine;
    });
}

void cg_host_mma(float d[4], const uint32_t a[4], const uint32_t b[2], const char *file, int line) {
    struct fragments {
        float *d;
        const uint32_t *a, *b;
    } own = {d, a, b};
    meet("cg_mma_bf16_16x8x16", 0xffffffffu, &own, file, line, false, [](fragments **lanes) {
        auto element = [](uint32_t pair, int half) {
            return (double)cg_bf16_to_float({(uint16_t)(half ? pair >> 16 : pair)});
        };
        double left[16][16], right[16][8];
        for (int lane = 0; lane < WARP; lane++)
            for (int half = 0; half < 2; half++) {
                int g = lane / 4, k = lane % 4 * 2 + half;
                for (int part = 0; part < 4; part++)
                    left[g + part % 2 * 8][k + part / 2 * 8] = element(lanes[lane]->a[part], half);
                for (int part = 0; part < 2; part++)
                    right[k + part * 8][g] = element(lanes[lane]->b[part], half);
            }
        for (int lane = 0; lane < WARP; lane++)
            for (int part = 0; part < 4; part++) {
                int row = lane / 4 + part / 2 * 8, column = lane % 4 * 2 + part % 2;
                double sum = lanes[lane]->d[part];
                for (int k = 0; k < 16; k++) sum += left[row][k] * right[k][column];
                lanes[lane]->d[part] = (float)sum;
            }
    });
}

/* ---- asynchronous copies ---- */

void cg_host_copy_issue(cg_host_copy copy, const char *file, int line) {
    cg_host_thread &me = *cg_host_this_thread;
    const unsigned room = sizeof me.copies / sizeof *me.copies;
    if (me.n_copies - me.copied == room)
        cg_host_fault(file, line, "more than %u copies of cp.async wait at once", room);
    me.copies[me.n_copies++ % room] = {copy, me.groups};
}

void cg_host_copy_commit(void) { cg_host_this_thread->groups++; }

bool cg_host_copy_due(int groups_left, cg_host_copy *copy) {
    cg_host_thread &me = *cg_host_this_thread;
    const cg_host_thread::copy &next = me.copies[me.copied % (sizeof me.copies / sizeof *me.copies)];
    if (me.copied == me.n_copies || next.group >= me.groups - groups_left) return false;
    *copy = next.places;
    me.copied++;
    me.unfenced = true;
    return true;
}

void cg_host_wrote_tile(void) { cg_host_this_thread->unfenced = true; }
void cg_host_fence_tiles(void) { cg_host_this_thread->unfenced = false; }
bool cg_host_tiles_are_fenced(void) { return !cg_host_this_thread->unfenced; }

/* ---- shared memory ---- */

namespace {

size_t most_shared;
void note_shared(size_t bytes) {
    if (bytes > most_shared) most_shared = bytes;
}

/* Memory that shared arrays are cut from, in order; between them lie guards. */
enum { GUARD = 64, GUARD_BYTE = 0xa5 };
const size_t chunk_bytes = (size_t)1 << 20;
std::vector<unsigned char *> chunks;
size_t chunk, chunk_used;

/* Plain loops: memset would be seen by the sanitizers as an access of the calling thread, and reading guards is
 * what this file alone may do. */
__attribute__((no_sanitize("address"))) void fill(unsigned char *p, size_t n, unsigned char value) {
    for (size_t i = 0; i < n; i++) ((volatile unsigned char *)p)[i] = value;
}

__attribute__((no_sanitize("address"))) bool still(const unsigned char *p, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (((const volatile unsigned char *)p)[i] != GUARD_BYTE) return false;
    return true;
}

/* An array, aligned to `align` and, so that no kernel relies on more, not to twice that. */
unsigned char *cut(size_t bytes, size_t align) {
    size_t most = GUARD + 2 * align + bytes + GUARD;
    if (chunk_used + most > chunk_bytes || chunks.empty()) {
        if (!chunks.empty()) chunk++;
        chunk_used = 0;
        if (chunk >= chunks.size()) {
            /* Past ThreadSanitizer, which would see a write of the thread that happens to come first. */
            void *p = (void *)syscall(SYS_mmap, NULL, chunk_bytes, PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (p == MAP_FAILED) {
                perror("cuda_host: mmap");
                exit(EXIT_FAILURE);
            }
            chunks.push_back((unsigned char *)p);
            ASAN_POISON_MEMORY_REGION(p, chunk_bytes);
        }
    }
    size_t start = (chunk_used + GUARD + align - 1) & ~(align - 1);
    if (start % (2 * align) == 0) start += align;
    unsigned char *data = chunks[chunk] + start;
    fill(data - GUARD, GUARD, GUARD_BYTE);
    fill(data, bytes, 0xff);
    fill(data + bytes, GUARD, GUARD_BYTE);
    ASAN_UNPOISON_MEMORY_REGION(data, bytes);
    chunk_used = start + bytes + GUARD;
    return data;
}

void release_arrays() {
    for (unsigned i = 0; i < now.n_arrays; i++) {
        const shared_array &array = now.arrays[i];
        if (!still(array.data - GUARD, GUARD) || !still(array.data + array.bytes, GUARD))
            fail(
                say("bytes beside the shared array %s of %zu bytes were overwritten", array.name, array.bytes));
        ASAN_POISON_MEMORY_REGION(array.data, array.bytes);
    }
    now.n_arrays = 0;
    now.static_bytes = 0;
    if (!fresh_shared_memory) chunk = chunk_used = 0;
}

} // namespace

void *cg_host_shared(const void *place, const char *name, size_t bytes, size_t align) {
    cg_host_lock();
    if (now.failed) leave();
    unsigned char *data = NULL;
    for (unsigned i = 0; i < now.n_arrays; i++)
        if (now.arrays[i].place == place) data = now.arrays[i].data;
    if (!data) {
        if (now.n_arrays == sizeof now.arrays / sizeof *now.arrays) {
            fail(say("%s is one shared array more than this emulation keeps", name));
            leave();
        }
        now.static_bytes += bytes;
        note_shared(now.static_bytes + now.dynamic_bytes);
        if (now.static_bytes > MAX_STATIC || now.static_bytes + now.dynamic_bytes > MAX_SHARED) {
            fail(say("with %s the block has %zu bytes of static and %zu of dynamic shared memory; at most %d "
                     "static, "
                     "%d in all",
                     name, now.static_bytes, now.dynamic_bytes, MAX_STATIC, MAX_SHARED));
            leave();
        }
        data = cut(bytes, align > 16 ? align : 16);
        now.arrays[now.n_arrays++] = {place, name, data, bytes};
    }
    cg_host_unlock();
    return data;
}

void *cg_host_dynamic_shared(void) { return now.arrays[0].data; }

bool cg_host_is_shared(const void *p, size_t bytes) {
    cg_host_lock();
    bool inside = false;
    for (unsigned i = 0; i < now.n_arrays; i++)
        inside |= (const unsigned char *)p >= now.arrays[i].data &&
                  (const unsigned char *)p + bytes <= now.arrays[i].data + now.arrays[i].bytes;
    cg_host_unlock();
    return inside;
}

/* ---- launches ---- */

void cg_host_seed(uint64_t seed) { random_state = seed * 2 + 1; }

/* splitmix64 */
size_t cg_host_draw(size_t n) {
    uint64_t z = random_state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    z ^= z >> 31;
    return (size_t)((unsigned __int128)z * n >> 64);
}

namespace {

size_t common_divisor(size_t a, size_t b) { return b == 0 ? a : common_divisor(b, a % b); }

bool run_block(int64_t number, uint3 index) {
    now.block = index;
    now.n_running = now.n;
    now.n_ended = 0;
    now.barrier = {};
    memset(now.warps, 0, sizeof now.warps);
    static const char dynamic_place = 0;
    now.arrays[now.n_arrays++] = {&dynamic_place, "of the launch", cut(now.dynamic_bytes, 1024),
                                  now.dynamic_bytes};
    for (unsigned i = 0; i < now.n; i++) {
        cg_host_thread &t = now.threads[i];
        t.state = cg_host_thread::RUNS;
        t.number = i;
        t.index = {i % now.dim.x, i / now.dim.x % now.dim.y, i / now.dim.x / now.dim.y};
        t.n_copies = t.copied = 0;
        t.unfenced = false;
        t.groups = 0;
    }
    cg_host_run_block(now.threads.data(), now.n, number);
    release_arrays();
    return !now.failed;
}

} // namespace

size_t cg_host_most_shared(void) {
    const size_t most = most_shared;
    most_shared = 0;
    return most;
}

bool cg_host_run(const char *kernel, dim3 grid, dim3 block, size_t shared_bytes, void (*run)(const void *),
                 const void *call, cg_error *error) {
    uint64_t threads = (uint64_t)block.x * block.y * block.z, blocks = (uint64_t)grid.x * grid.y * grid.z;
    if (block.x > MAX_THREADS || block.y > MAX_THREADS || block.z > 64 || threads > MAX_THREADS || threads == 0)
        return cg_fail(error, CG_FAILED,
                       "kernel %s: a block of %u x %u x %u threads; expected 1 to 1024, and at most 64 in z",
                       kernel, block.x, block.y, block.z);
    if (grid.x > INT32_MAX || grid.y > 65535 || grid.z > 65535)
        return cg_fail(
            error, CG_FAILED,
            "kernel %s: a grid of %u x %u x %u blocks; expected at least 1, at most 2147483647 in x and "
            "65535 in y and z",
            kernel, grid.x, grid.y, grid.z);
    if (shared_bytes > MAX_SHARED)
        return cg_fail(error, CG_FAILED, "kernel %s: %zu bytes of shared memory; a block has at most %d",
                       kernel, shared_bytes, MAX_SHARED);
    note_shared(shared_bytes);
    if (blocks == 0) return true;
    now.kernel = kernel;
    now.run = run;
    now.call = call;
    now.grid = {grid.x, grid.y, grid.z};
    now.dim = {block.x, block.y, block.z};
    now.dynamic_bytes = shared_bytes;
    now.error = error;
    now.failed = false;
    now.n = (unsigned)threads;
    now.threads.resize(now.n);
    /* Each block once, in the order start, start + stride, ... modulo their number. */
    size_t start = cg_host_draw(blocks), stride = blocks > 2 ? 1 + cg_host_draw(blocks - 1) : 1;
    while (common_divisor(stride, blocks) != 1) stride = stride % blocks + 1;
    chunk = chunk_used = 0;
    order_before(&now.begin_order);
    bool fine = true;
    for (uint64_t i = 0; fine && i < blocks; i++) {
        uint64_t b = (uint64_t)(((unsigned __int128)i * stride + start) % blocks);
        fine = run_block((int64_t)i, {(unsigned)(b % grid.x), (unsigned)(b / grid.x % grid.y),
                                      (unsigned)(b / grid.x / grid.y)});
    }
    order_after(&now.end_order);
    for (size_t i = 1; i < chunks.size(); i++) syscall(SYS_munmap, chunks[i], chunk_bytes);
    if (chunks.size() > 1) chunks.resize(1);
    return fine;
}
