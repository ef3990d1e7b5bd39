/* What ops/cuda/kernel.cuh promises, made of CUDA: compiled by nvcc. Its twin for machines without a GPU is
 * ops/cuda/host/cuda_host.h. */
#ifndef CG_OPS_CUDA_CUDA_DEVICE_CUH
#define CG_OPS_CUDA_CUDA_DEVICE_CUH

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#define CG_GLOBAL static __global__
/* Behind CG_GLOBAL: the most threads of a block, and how many blocks a multiprocessor should hold. */
#define CG_BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)
#define CG_DEVICE static __device__ __forceinline__
#define CG_MEMBER __device__ __forceinline__
template <typename T> using cg_type = T; /* float[8][32] can stand before a name */
#define CG_SHARED(type, name) __shared__ __align__(16) cg_type<type> name
/* One block of bytes for all kernels of a file, under the name and type that each wants; where wgmma can read it. */
#define CG_DYNAMIC_SHARED(type, name)                                                                          \
    extern __shared__ __align__(1024) unsigned char cg_dynamic_shared[];                                       \
    type *name = reinterpret_cast<type *>(cg_dynamic_shared)
#define CG_FENCE() __threadfence()
#define CG_WROTE_TILE() ((void)0) /* tests look at it */

/* ---- bf16 ---- */

typedef __nv_bfloat16 cg_bf16;
CG_DEVICE float cg_bf16_to_float(cg_bf16 x) { return __bfloat162float(x); }
CG_DEVICE cg_bf16 cg_bf16_from_float(float x) { return __float2bfloat16_rn(x); } /* to nearest, ties to even */
/* Two side by side, the first in the lower half. */
CG_DEVICE uint32_t cg_bf16_pair(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t *>(&pair);
}

/* x, 0 where it is below; NaN stays NaN. One instruction, where a comparison takes two. */
CG_DEVICE float cg_relu(float x) {
    float y;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
    return y;
}

/* d += a b for a 16x8 tile with 16 products each, one tile per warp: mma.sync.aligned.m16n8k16.row.col of the PTX ISA,
 * whose fragment layout it has. */
CG_DEVICE void cg_mma_bf16_16x8x16(float d[4], const uint32_t a[4], const uint32_t b[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* Four 8x8 tiles of 16-bit numbers from shared memory; lane i holds the address of row i % 8 of tile i / 8, on a multiple
 * of 16 bytes. trans: each tile transposed. */
CG_DEVICE void cg_ldmatrix_x4(uint32_t r[4], const void *shared_row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(shared_row))
                 : "memory");
}
CG_DEVICE void cg_ldmatrix_x4_trans(uint32_t r[4], const void *shared_row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(shared_row))
                 : "memory");
}

/* 16 bytes from global to shared memory, both on multiples of 16, there after the wait; zeros instead, and nothing is
 * read, when not valid. wait<N> waits for all but the N youngest groups of this thread. */
CG_DEVICE void cg_cp_async_16(void *to_shared, const void *from_global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 :
                 : "r"((uint32_t)__cvta_generic_to_shared(to_shared)), "l"(from_global)
                 : "memory");
}
CG_DEVICE void cg_cp_async_16(void *to_shared, const void *from_global, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"((uint32_t)__cvta_generic_to_shared(to_shared)), "l"(from_global), "r"(valid ? 16 : 0)
                 : "memory");
}
CG_DEVICE void cg_cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> CG_DEVICE void cg_cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" : : "n"(N) : "memory");
}

/* ---- launches ---- */

#define cg_launch(args, kernel, ...) cg_device_launch(args, #kernel, kernel, __VA_ARGS__)

template <typename... P, typename... A>
static bool cg_device_launch(const cg_run_args *args, const char *name, void (*kernel)(P...), dim3 grid,
                             dim3 block, size_t shared_bytes, cg_stream *stream, A... a) {
    const size_t shared_without_asking = 48 * 1024;
    if (!grid.x || !grid.y || !grid.z) return true;
    cudaError_t status = cudaSuccess;
    if (shared_bytes > shared_without_asking)
        status = cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      (int)shared_bytes);
    if (status == cudaSuccess) {
        kernel<<<grid, block, shared_bytes, (cudaStream_t)cg_stream_handle(stream)>>>(static_cast<P>(a)...);
        status = cudaGetLastError();
    }
    return status == cudaSuccess ||
           cg_fail(args->error, CG_FAILED, "%s could not be launched: %s", name, cudaGetErrorString(status));
}

#endif
