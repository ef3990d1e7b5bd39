/* Some neighbouring elements of an array, read or written 16 bytes at a time: 4 f32, 2 f64 or 8 bf16 where nothing else is
 * said. */
#ifndef CG_OPS_CUDA_PACK_CUH
#define CG_OPS_CUDA_PACK_CUH

#include "ops/cuda/kernel.cuh"

namespace {

template <typename T, int M = 16 / (int)sizeof(T)> struct alignas(16) pack {
    static constexpr int N = M;
    T at[M];
};

/* An array as packs; it must start on a multiple of 16 bytes, as every tensor does. */
template <typename T> CG_DEVICE const pack<T> *packs(const T *x) { return (const pack<T> *)x; }
template <typename T> CG_DEVICE pack<T> *packs(T *x) { return (pack<T> *)x; }
template <int M, typename T> CG_DEVICE const pack<T, M> *packs_of(const T *x) { return (const pack<T, M> *)x; }
template <int M, typename T> CG_DEVICE pack<T, M> *packs_of(T *x) { return (pack<T, M> *)x; }

/* Rows of so many elements of a dtype, one after the other, all start on a multiple of 16 bytes. */
inline bool rows_are_packs(cg_dtype dtype, int64_t length) {
    return length * (int64_t)cg_dtype_bytes(dtype) % 16 == 0;
}

} // namespace

#endif
