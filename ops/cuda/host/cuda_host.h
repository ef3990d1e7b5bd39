/* CUDA kernels on the processor, for tests on machines without a GPU.
 *
 * ops/cuda/kernel.cuh includes this header instead of CUDA's when CG_CUDA_HOST is defined; a .cu file is then
 * ordinary C++20 (g++ -x c++ -DCG_CUDA_HOST -fno-strict-aliasing). It offers what kernels here may use and nothing else:
 *
 *     template <typename T> CG_GLOBAL void sum_rows_kernel(const T *x, T *y, int64_t width) {
 *         CG_SHARED(T[8], partial);                    __shared__ T partial[8], aligned to 16 bytes
 *         CG_SHARED(float[2][32], tile);               extents stand behind the type: the name is not an array yet
 *         CG_DYNAMIC_SHARED(T, rows);                  T *rows: the launch's shared_bytes, aligned to 1024 bytes
 *         ... threadIdx, blockIdx, blockDim, gridDim, __syncthreads(), __shfl_xor_sync(...), atomicAdd(...) ...
 *     }
 *     return CG_LAUNCH(sum_rows_kernel<T>, grid, block, shared_bytes, stream, x, y, width);
 *
 * A launch that fails returns false and fills args->error with one sentence (kernel, block, thread, what, file:line).
 * cg_launch below returns when the kernel is done; device_host.h makes a queue of it that can be recorded, and memory that
 * only queued work may touch.
 *
 * Two ways to run a block's threads; a program links one of them.
 *   fibers.cpp   Fibers on one thread of the system. At every barrier, warp function and atomic the next one is drawn at
 *                random from those that can go on; blocks run one after the other in a drawn order. The draw follows
 *                the seed (cg_host_seed), so every failure can be had again.
 *   threads.cpp  Threads of the system, which run at once; a block after the other. Slow: no more than 10^5 turns a
 *                second.
 * And three ways to compile: plain; with AddressSanitizer and UndefinedBehaviorSanitizer (fibers); with ThreadSanitizer
 * (both), which takes each CUDA thread for a thread and is told the order that barriers, __syncwarp, CG_FENCE and launches
 * make, and no other. Two accesses that only luck keeps apart are then reported whether or not they met. No order
 * between blocks is told either: what one block leaves to another within a launch is a race.
 *
 * What fails, with a sentence
 *   barriers      __syncthreads and its kin need every thread of the block, at the same line. A thread that waits at
 *                 another one or has ended is an error. (Since sm_70 hardware lets threads that have ended be missing;
 *                 the programming guide asks for conditions that are the same in all threads, and so does this.)
 *   warps         A lane that calls without being named in the mask, names a lane that the block has not got or that has
 *                 ended or that waits elsewhere or with another mask, or takes the value of a lane that the mask leaves
 *                 out, is an error; so is a named lane that never comes. Stricter than hardware in the same sense.
 *   shared memory starts each block as 0xff (NaN, -1). Overwritten bytes beside an array are noticed when the block
 *                 ends. More than 48 KiB of static arrays or 227 KiB in all is an error.
 *   cp.async      The destination holds 0xff from the call to the wait that covers it, and the source is read at that
 *                 wait. Misaligned, not to shared memory, or never waited for: an error. Likewise ldmatrix.
 *   launches      of too many threads, blocks or shared bytes.
 * What fails with a report of a sanitizer, which also names kernel, block and thread
 *   any access outside an array, in shared memory to the byte, elsewhere as it was allocated; misaligned vectors;
 *   overflow; every race, between plain accesses or a plain and an atomic one, in shared and global memory.
 *
 * What does not show
 *   - Races without ThreadSanitizer, except where the drawn order changes a result: between two places where the next
 *     thread is drawn, a thread runs alone.
 *   - A barrier that all threads reach, but in different turns of a loop.
 *   - Blocks that wait for other blocks hang; threads that wait for a value in memory hang with fibers unless they look
 *     with atomics. Tests have time limits.
 *   - Memory order weaker than the processor's. Atomics order nothing, as on the device; CG_FENCE does, generously: to
 *     ThreadSanitizer all fences are one chain.
 *   - Rounding of tensor cores: cg_mma_bf16_16x8x16 sums in double and rounds once, hardware keeps fewer bits. Compare
 *     with a bound. expf, logf and rsqrtf are libm's, not the device's.
 *   - What nvcc alone refuses, such as a launch function that calls a CG_DEVICE function.
 *   - Registers, occupancy, bank conflicts, speed, and sm_80's limit of 163 KiB of shared memory.
 */
#ifndef TESTS_CUDA_HOST_H
#define TESTS_CUDA_HOST_H

#ifndef CG_CUDA_HOST
#error "cuda_host.h stands in for CUDA only where CG_CUDA_HOST is defined"
#endif

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <tuple>
#include <type_traits>

extern "C" {
#include "core/base/error.h"
}

/* ---- launching ---- */

struct uint3 {
    unsigned x, y, z;
};

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned nx = 1, unsigned ny = 1, unsigned nz = 1) : x(nx), y(ny), z(nz) {}
};

/* Of the CUDA thread that runs on this thread of the system right now. */
extern __thread uint3 threadIdx, blockIdx;
extern __thread uint3 blockDim, gridDim;

/* Orders of threads and blocks from now on (fibers); 1 without a call. */
void cg_host_seed(uint64_t seed);

/* "fibers" or "threads": the library that is linked. */
extern const char *const cg_host_mode;

/* Runs `run(call)` as every thread of every block; nothing for a grid of no block. False, with error set, when the
 * launch is impossible or a thread does what the page above calls an error; blocks that had not started then do not
 * run. */
bool cg_host_run(const char *kernel, dim3 grid, dim3 block, size_t shared_bytes, void (*run)(const void *),
                 const void *call, cg_error *error);

/* Arguments are converted to the kernel's parameters once, then copied for each thread, as CUDA does. A grid of no
 * block is fine: nothing runs. */
template <typename R, typename... P, typename... A>
bool cg_host_launch(const R *args, const char *name, void (*kernel)(P...), dim3 grid, dim3 block,
                    size_t shared_bytes, const void *stream, A... arguments) {
    (void)stream;
    struct call {
        void (*kernel)(P...);
        std::tuple<P...> arguments;
    };
    const call bound = {kernel, std::tuple<P...>(static_cast<P>(arguments)...)};
    return cg_host_run(
        name, grid, block, shared_bytes,
        [](const void *p) { std::apply(((const call *)p)->kernel, ((const call *)p)->arguments); }, &bound,
        args->error);
}

/* As in ops/cuda/cuda_device.cuh; a macro for the sake of the kernel's name. */
#define cg_launch(args, kernel, ...) cg_host_launch(args, #kernel, kernel, __VA_ARGS__)

#define CG_GLOBAL static
#define CG_BOUNDS(threads, blocks)
#define CG_DEVICE static inline
#define CG_MEMBER inline

/* ---- where a call stands, for messages ---- */

#define CG_HOST_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

/* Ends the launch with a sentence about the calling thread. */
[[noreturn]] void cg_host_fault(const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* ---- shared memory ---- */

/* The block's array of this place in the source; allocated when the first thread of a block comes by. */
void *cg_host_shared(const void *place, const char *name, size_t bytes, size_t align);
void *cg_host_dynamic_shared(void);
bool cg_host_is_shared(const void *p, size_t bytes); /* inside one shared array of the block */

template <typename T> using cg_host_type = T; /* makes float[2][32] a type that can stand before a name */

#define CG_SHARED(type, name)                                                                                  \
    static char cg_place_of_##name;                                                                            \
    cg_host_type<type> &name =                                                                                 \
        *(cg_host_type<type> *)cg_host_shared(&cg_place_of_##name, #name, sizeof(type), alignof(type))
#define CG_DYNAMIC_SHARED(type, name) type *name = (type *)cg_host_dynamic_shared()

/* ---- barriers ---- */

enum cg_host_barrier_kind { CG_HOST_PLAIN, CG_HOST_OR, CG_HOST_AND, CG_HOST_COUNT };

int cg_host_barrier(cg_host_barrier_kind kind, int predicate, const char *file, int line);

inline void __syncthreads(CG_HOST_HERE) { cg_host_barrier(CG_HOST_PLAIN, 0, file, line); }
inline int __syncthreads_or(int p, CG_HOST_HERE) { return cg_host_barrier(CG_HOST_OR, p, file, line); }
inline int __syncthreads_and(int p, CG_HOST_HERE) { return cg_host_barrier(CG_HOST_AND, p, file, line); }
inline int __syncthreads_count(int p, CG_HOST_HERE) { return cg_host_barrier(CG_HOST_COUNT, p, file, line); }

/* ---- warp functions ---- */

enum cg_host_shuffle_kind { CG_HOST_IDX, CG_HOST_UP, CG_HOST_DOWN, CG_HOST_XOR };

void cg_host_syncwarp(unsigned mask, const char *file, int line);
unsigned cg_host_ballot(const char *what, unsigned mask, bool predicate, const char *file, int line);
uint64_t cg_host_shuffle(cg_host_shuffle_kind kind, unsigned mask, uint64_t bits, int by, int width,
                         const char *file, int line);

/* What the thread wrote before it comes before what it writes after, for whoever looks. To ThreadSanitizer all fences
 * of a launch form one order. */
void cg_host_fence(void);
#define CG_FENCE() cg_host_fence()

inline void __syncwarp(unsigned mask = 0xffffffffu, CG_HOST_HERE) { cg_host_syncwarp(mask, file, line); }
inline unsigned __ballot_sync(unsigned mask, int p, CG_HOST_HERE) {
    return cg_host_ballot("__ballot_sync", mask, p != 0, file, line);
}
inline int __any_sync(unsigned mask, int p, CG_HOST_HERE) {
    return cg_host_ballot("__any_sync", mask, p != 0, file, line) != 0;
}
inline int __all_sync(unsigned mask, int p, CG_HOST_HERE) {
    return cg_host_ballot("__all_sync", mask, p != 0, file, line) == mask;
}

template <typename T>
T cg_host_shuffle_value(cg_host_shuffle_kind kind, unsigned mask, T value, int by, int width, const char *file,
                        int line) {
    static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8), "numbers of 4 or 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = cg_host_shuffle(kind, mask, bits, by, width, file, line);
    memcpy(&value, &bits, sizeof value);
    return value;
}
template <typename T> T __shfl_sync(unsigned mask, T value, int lane, int width = 32, CG_HOST_HERE) {
    return cg_host_shuffle_value(CG_HOST_IDX, mask, value, lane, width, file, line);
}
template <typename T> T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32, CG_HOST_HERE) {
    return cg_host_shuffle_value(CG_HOST_UP, mask, value, (int)by, width, file, line);
}
template <typename T> T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32, CG_HOST_HERE) {
    return cg_host_shuffle_value(CG_HOST_DOWN, mask, value, (int)by, width, file, line);
}
template <typename T> T __shfl_xor_sync(unsigned mask, T value, int by, int width = 32, CG_HOST_HERE) {
    return cg_host_shuffle_value(CG_HOST_XOR, mask, value, by, width, file, line);
}

/* ---- atomics: real ones, relaxed, and places where another thread may go on ---- */

void cg_host_pause(void);

template <typename T, typename... U> constexpr bool cg_host_one_of = (std::is_same_v<T, U> || ...);
template <typename T>
constexpr bool cg_host_atomic_integer = cg_host_one_of<T, int, unsigned, unsigned long long>;

/* *p = change(*p) as one step; returns the old value. */
template <typename T, typename F> T cg_host_atomic(T *p, F change) {
    cg_host_pause();
    T old, next;
    __atomic_load(p, &old, __ATOMIC_RELAXED);
    do next = change(old);
    while (!__atomic_compare_exchange(p, &old, &next, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return old;
}
template <typename T> T atomicAdd(T *p, std::common_type_t<T> by) {
    static_assert(cg_host_atomic_integer<T> || cg_host_one_of<T, float, double>, "CUDA adds none of these");
    if constexpr (std::is_integral_v<T>) /* wraps, also where it is signed */
        return cg_host_atomic(p, [by](T old) { return (T)((unsigned long long)old + (unsigned long long)by); });
    else
        return cg_host_atomic(p, [by](T old) { return old + by; });
}
template <typename T> T atomicMax(T *p, std::common_type_t<T> by) {
    static_assert(cg_host_atomic_integer<T> || cg_host_one_of<T, long long>, "CUDA compares none of these");
    return cg_host_atomic(p, [by](T old) { return by > old ? by : old; });
}
template <typename T> T atomicMin(T *p, std::common_type_t<T> by) {
    static_assert(cg_host_atomic_integer<T> || cg_host_one_of<T, long long>, "CUDA compares none of these");
    return cg_host_atomic(p, [by](T old) { return by < old ? by : old; });
}
template <typename T> T atomicCAS(T *p, std::common_type_t<T> expected, std::common_type_t<T> desired) {
    static_assert(cg_host_atomic_integer<T>, "CUDA swaps none of these");
    return cg_host_atomic(p, [=](T old) { return old == expected ? desired : old; });
}

/* ---- single-thread functions ---- */

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
template <typename T> T __ldg(const T *p) { return *p; }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline double rsqrt(double x) { return 1 / sqrt(x); }

struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

/* bf16 as it lies in memory; rounding to nearest, ties to even, NaN stays NaN. */
struct cg_bf16 {
    uint16_t bits;
};
inline float cg_bf16_to_float(cg_bf16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
inline cg_bf16 cg_bf16_from_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (value != value) return {(uint16_t)(bits >> 16 | 0x40)};
    return {(uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

inline uint32_t cg_bf16_pair(float low, float high) {
    return cg_bf16_from_float(low).bits | (uint32_t)cg_bf16_from_float(high).bits << 16;
}

/* x, 0 where it is below; NaN stays NaN. */
inline float cg_relu(float x) { return x < 0 ? 0 : x; }

/* ---- tensor cores: fragments as the PTX ISA lays them out ---- */

/* d[16,8] += a[16,16] * b[16,8], all 32 lanes. With g = lane / 4 and t = lane % 4, lower half of a register first:
 *   a[0] (g, 2t) (g, 2t+1)   a[1] the same of row g+8   a[2] of columns 2t+8, 2t+9   a[3] both
 *   b[0] (2t, g) (2t+1, g)   b[1] of rows 2t+8, 2t+9
 *   d[0] (g, 2t)  d[1] (g, 2t+1)  d[2] d[3] the same of row g+8 */
void cg_host_mma(float d[4], const uint32_t a[4], const uint32_t b[2], const char *file, int line);
inline void cg_mma_bf16_16x8x16(float d[4], const uint32_t a[4], const uint32_t b[2], CG_HOST_HERE) {
    cg_host_mma(d, a, b, file, line);
}

/* Four 8x8 matrices of 16-bit elements from shared memory, all 32 lanes: `row` of lane l is the address of row l % 8
 * of matrix l / 8 (16 bytes). r[m] gets elements 2t and 2t+1 of row g of matrix m; of column g when transposed. */
void cg_host_gather(const char *what, const void *mine, const void *all[32], const char *file, int line);
inline void cg_host_ldmatrix(uint32_t r[4], const void *row, bool transposed, const char *file, int line) {
    if ((uintptr_t)row % 16 != 0)
        cg_host_fault(file, line, "ldmatrix reads a row that is not aligned to 16 bytes");
    if (!cg_host_is_shared(row, 16)) cg_host_fault(file, line, "ldmatrix reads a row outside shared memory");
    const void *rows[32];
    cg_host_gather(transposed ? "ldmatrix.trans" : "ldmatrix", row, rows, file, line);
    int lane = (int)((threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32);
    int g = lane / 4, t = lane % 4;
    for (int m = 0; m < 4; m++) {
        const uint16_t *first = (const uint16_t *)rows[8 * m + (transposed ? 2 * t : g)];
        const uint16_t *second = (const uint16_t *)rows[8 * m + (transposed ? 2 * t + 1 : g)];
        r[m] = transposed ? first[g] | (uint32_t)second[g] << 16
                          : first[2 * t] | (uint32_t)second[2 * t + 1] << 16;
    }
}
inline void cg_ldmatrix_x4(uint32_t r[4], const void *row, CG_HOST_HERE) {
    cg_host_ldmatrix(r, row, false, file, line);
}
inline void cg_ldmatrix_x4_trans(uint32_t r[4], const void *row, CG_HOST_HERE) {
    cg_host_ldmatrix(r, row, true, file, line);
}

/* ---- asynchronous copies: 16 bytes, global to shared; zeros instead when not valid ---- */

/* The accesses are made here and not in the library, so that sanitizers see them as the kernel's. */
struct cg_host_copy {
    void *to;
    const void *from; /* NULL: zeros */
};
void cg_host_copy_issue(cg_host_copy copy, const char *file, int line);
void cg_host_copy_commit(void);
bool cg_host_copy_due(int groups_left, cg_host_copy *copy); /* the next one of all but the newest groups */

inline void cg_cp_async_16(void *to, const void *from, bool valid = true, CG_HOST_HERE) {
    if ((uintptr_t)to % 16 != 0 || (uintptr_t)from % 16 != 0)
        cg_host_fault(file, line,
                      "cp.async copies 16 bytes from or to a place that is not aligned to 16 bytes");
    if (!cg_host_is_shared(to, 16)) cg_host_fault(file, line, "cp.async writes outside shared memory");
    if (cg_host_is_shared(from, 16))
        cg_host_fault(file, line, "cp.async reads shared memory, not global memory");
    ((uint64_t *)to)[0] = ((uint64_t *)to)[1] = UINT64_MAX;
    cg_host_copy_issue({to, valid ? from : NULL}, file, line);
}
inline void cg_cp_async_commit(void) { cg_host_copy_commit(); }
template <int N> void cg_cp_async_wait(void) {
    cg_host_copy copy;
    while (cg_host_copy_due(N, &copy)) {
        uint64_t low = copy.from ? ((const uint64_t *)copy.from)[0] : 0;
        uint64_t high = copy.from ? ((const uint64_t *)copy.from)[1] : 0;
        ((uint64_t *)copy.to)[0] = low;
        ((uint64_t *)copy.to)[1] = high;
    }
}

/* The most shared memory that a block of any launch since the last call had, static arrays included. */
size_t cg_host_most_shared(void);

/* ---- tiles that products of a warpgroup read: what a thread wrote there, or had copied, it fences first ---- */

void cg_host_wrote_tile(void);
#define CG_WROTE_TILE() cg_host_wrote_tile()
void cg_host_fence_tiles(void);
bool cg_host_tiles_are_fenced(void); /* by this thread, all it wrote so far */

#endif
