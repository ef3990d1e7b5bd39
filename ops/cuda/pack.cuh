/* 16 bytes of an array, read or written at once: 4 f32, 2 f64 or 8 bf16. */
#ifndef CG_OPS_CUDA_PACK_CUH
#define CG_OPS_CUDA_PACK_CUH

#include "ops/cuda/kernel.cuh"

namespace {

template <typename T> struct alignas(16) pack {
    static constexpr int N = 16 / (int)sizeof(T);
    T at[N];
};

/* An array as packs; it must start on a multiple of 16 bytes, as every tensor does. */
template <typename T> CG_DEVICE const pack<T> *packs(const T *x) { return (const pack<T> *)x; }
template <typename T> CG_DEVICE pack<T> *packs(T *x) { return (pack<T> *)x; }

/* Rows of so many elements of a dtype, one after the other, all start on a multiple of 16 bytes. */
inline bool rows_are_packs(cg_dtype dtype, int64_t length) {
    return length * (int64_t)cg_dtype_bytes(dtype) % 16 == 0;
}

} // namespace

#endif
