/* How to write a CUDA kernel of an op: one file ops/cuda/<room>/<op>.cu per ops/<room>/<op>.c. See ops/cuda/nn/scale.cu (a page long) and
 * rms_norm.cu (reductions, scratch), matmul.cu (cuBLAS), embedding.cu (data that can be wrong).
 *
 *  1. Include this file, ops/cuda/reduce.cuh if wanted, and nothing else of CUDA. The same source is compiled by nvcc and,
 *     for tests on machines without a GPU, as C++ on top of ops/cuda/host/cuda_host.h: use nothing outside the lists
 *     below.
 *  2. Everything but the table stands in `namespace { ... }`: helpers of two files may have the same name.
 *  3. Kernels: template <typename T> CG_GLOBAL void scale_kernel(...); helpers: CG_DEVICE (functions), CG_MEMBER
 *     (functions of a struct), CG_BOTH (functions that launch functions call too). T is float, double or cg_bf16; sums are in cg_sum_of<T> (float for bf16), and so
 *     are inputs and outputs that the table in ops/<op>.c calls statistics. cg_up(x) makes
 *     that of a T, cg_down<T>(s) the reverse; exp, log and so on are cg_exp(..) for float and double alike.
 *  4. Launch functions are host code: bool scale(const cg_run_args *args, cg_stream *stream). Data pointers and workspace
 *     of args are device memory: never read them there. End with return CG_LAUNCH(kernel, grid, block, dynamic shared
 *     bytes, stream, arguments...), which uses the variable `args`; a grid of 0 launches nothing and is fine. Templates
 *     with a comma go into parentheses. No allocation, no wait, no memory that is not an output or the workspace: launches
 *     are recorded once and played again, so arguments must depend on shapes, attributes and pointers alone.
 *  5. The table, at the start of a line: extern "C" const cg_cuda_op cg_cuda_<op> = {.op = "<op>", .variants = {...}};
 *     .launch lists f32, f64, i32 in this order, nullptr where there is none; the dtype is that of the first real input
 *     or output, as for cg_op.run. An op without reals has {nullptr, nullptr, launch}.
 *  6. Variant 0 is "plain": any size, any device, readable. Faster ones follow; .fits, .shared, .least_sm and .wgmma say
 *     where they run. Products of whole warpgroups: ops/cuda/wgmma.cuh.
 *  7. .workspace says the exact scratch bytes from the node's shapes (pieces by cg_piece). Scratch and outputs hold garbage
 *     (NaN in tests). An output may be one of the inputs where the op's table in ops/<op>.c says `overwrites`.
 *  8. Same bits every time: no float atomics, fixed order of sums, cuts that depend on shapes alone (never on the device).
 *  9. Offsets are int64_t. CG_FOR(i, n) walks over n items with any grid; cg_blocks(n, per_block) is a grid for it.
 *     Empty tensors happen: any size may be 0.
 * 10. Wrong data (an index out of range, NaN where a choice is made): cg_report(args->fault, what, place, got...), passed to
 *     the kernel as cg_device_fault *. The run goes on, so the kernel must stay inside its arrays whatever it reads, and one that
 *     changes leaves (adamw) must leave them alone. The smallest (what, place) wins. .describe turns the record into the
 *     very sentence of the CPU kernel; args->fault is NULL when the table has no .describe.
 * 11. Matrix products: cg_device_gemm_run (core/device/device.h) with scratch from cg_device_gemm_workspace.
 * 12. Test: tests/test_cuda_ops.c runs every case of ops/<op>.c with every variant, f32 and f64, in several thread orders,
 *     against the CPU kernel. Nothing to add there. Sizes that only a kernel needs (several tiles, a rest) are cases in
 *     ops/<op>.c with .large.
 *
 * Beside C++ and the above, kernels may use: threadIdx blockIdx blockDim gridDim, CG_SHARED(float[8][32], name),
 * CG_DYNAMIC_SHARED(type, name), __syncthreads[_or|_and|_count], __syncwarp, __shfl[_xor|_down|_up]_sync, __ballot_sync
 * __any_sync __all_sync, atomicAdd (int, float, double) atomicMax atomicMin atomicCAS, CG_FENCE(), __popc __ffs __ldg,
 * float2 float4, CG_BOUNDS(threads, blocks) behind CG_GLOBAL, cg_relu, cg_bf16_pair, cg_mma_bf16_16x8x16,
 * cg_ldmatrix_x4[_trans], cg_cp_async_16 cg_cp_async_commit cg_cp_async_wait<N>.
 */
#ifndef CG_OPS_CUDA_KERNEL_CUH
#define CG_OPS_CUDA_KERNEL_CUH

#include <cmath>
#include <cstdint>
#include <cstring>

extern "C" {
#include "ops/attributes.h"
#include "ops/cuda/cuda_ops.h"
}
#include "ops/chunks.h" /* cg_piece */

#ifdef CG_CUDA_HOST
#include "ops/cuda/host/device_host.h"
#else
#include "ops/cuda/cuda_device.cuh"
#endif

/* A function for host and kernels. */
#ifdef CG_CUDA_HOST
#define CG_BOTH static inline
#else
#define CG_BOTH static __host__ __device__ __forceinline__
#endif

/* A launch, true when it is queued: see 4 above. */
#define CG_LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                                              \
    cg_launch(args, kernel, dim3(grid), dim3(block), shared_bytes, stream, __VA_ARGS__)

/* For .shared of a variant: static arrays of up to as many bytes, up to where CG_DYNAMIC_SHARED begins. */
enum { CG_STATIC_BYTES = 1024 };

/* i from 0 to n - 1, shared by all threads of all blocks. */
#define CG_FOR(i, n)                                                                                           \
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < (n);                                  \
         i += (int64_t)gridDim.x * blockDim.x)

/* Blocks for n items at so many per block. Not more than keep a large device busy, so that setting up counts little; on
 * the CPU a few, so that small tests go through all turns. None for none. */
static inline unsigned cg_blocks(int64_t n, int64_t per_block) {
#ifdef CG_CUDA_HOST
    const int64_t most = 5;
#else
    const int64_t most = 4096;
#endif
    const int64_t blocks = (n + per_block - 1) / per_block;
    return (unsigned)(blocks < most ? blocks : most);
}

/* The first of n items that part number `part` holds when they are cut into `parts`; of part `parts`: n. */
CG_BOTH int64_t cg_cut(int64_t n, int64_t parts, int64_t part) {
    const int64_t each = n / parts, longer = n % parts;
    return each * part + (part < longer ? part : longer);
}

/* ---- numbers of type T ---- */

template <typename T> struct cg_sum_type { typedef T type; };
template <> struct cg_sum_type<cg_bf16> { typedef float type; };
template <typename T> using cg_sum_of = typename cg_sum_type<T>::type;

CG_DEVICE float cg_up(float x) { return x; }
CG_DEVICE double cg_up(double x) { return x; }
CG_DEVICE float cg_up(cg_bf16 x) { return cg_bf16_to_float(x); }

template <typename T> CG_DEVICE T cg_down(cg_sum_of<T> x) {
    if constexpr (sizeof(T) == sizeof(cg_bf16))
        return cg_bf16_from_float(x);
    else
        return x;
}

CG_DEVICE float cg_exp(float x) { return expf(x); }
CG_DEVICE double cg_exp(double x) { return exp(x); }
CG_DEVICE float cg_log(float x) { return logf(x); }
CG_DEVICE double cg_log(double x) { return log(x); }
CG_DEVICE float cg_log1p(float x) { return log1pf(x); }
CG_DEVICE double cg_log1p(double x) { return log1p(x); }
CG_DEVICE double cg_pow(double x, double y) { return pow(x, y); }
CG_DEVICE void cg_sincos(double x, double *sine, double *cosine) { sincos(x, sine, cosine); }
CG_DEVICE float cg_sqrt(float x) { return sqrtf(x); }
CG_DEVICE double cg_sqrt(double x) { return sqrt(x); }
CG_DEVICE double cg_relu(double x) { return x < 0 ? 0 : x; }
CG_DEVICE float cg_fma(float a, float b, float c) { return fmaf(a, b, c); }
CG_DEVICE double cg_fma(double a, double b, double c) { return fma(a, b, c); }
CG_DEVICE float cg_max(float a, float b) { return a > b ? a : b; }
CG_DEVICE double cg_max(double a, double b) { return a > b ? a : b; }
CG_BOTH int64_t cg_max(int64_t a, int64_t b) { return a > b ? a : b; }
CG_DEVICE float cg_min(float a, float b) { return a < b ? a : b; }
CG_DEVICE double cg_min(double a, double b) { return a < b ? a : b; }
CG_BOTH int64_t cg_min(int64_t a, int64_t b) { return a < b ? a : b; }
CG_DEVICE float cg_abs(float a) { return fabsf(a); }
CG_DEVICE double cg_abs(double a) { return fabs(a); }
template <typename T> CG_DEVICE bool cg_is_nan(T x) { return x != x; }

/* +infinity; usable in host and device code. */
template <typename T> constexpr T cg_infinity = (T)__builtin_inf();

/* ---- wrong data ---- */

/* Report that check number `what` (from 1) failed at `place`; got and number are for the sentence. See 10 above. */
CG_DEVICE void cg_report(cg_device_fault *fault, int what, int64_t place, int64_t got0 = 0, int64_t got1 = 0,
                         int64_t got2 = 0, int64_t got3 = 0, double number = 0) {
    volatile cg_device_fault *record = fault;
    unsigned *lock = (unsigned *)&fault->lock;
    for (bool done = false;
         !done;) { /* the holder lets go inside the loop: threads of one warp may meet here */
        if (atomicCAS(lock, 0u, 1u) != 0u) continue;
        CG_FENCE();
        if (!record->what || what < record->what || (what == record->what && place < record->place)) {
            record->what = what;
            record->place = place;
            record->got[0] = got0;
            record->got[1] = got1;
            record->got[2] = got2;
            record->got[3] = got3;
            record->number = number;
        }
        CG_FENCE();
        atomicCAS(lock, 1u, 0u);
        done = true;
    }
}

#endif
