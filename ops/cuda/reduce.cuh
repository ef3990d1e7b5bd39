/* Sums and maxima over a block, in an order that depends on its size alone: the same bits every time.
 *
 * The block is one-dimensional, of whole warps, and every thread of it calls. The result is the same in all threads. */
#ifndef CG_OPS_CUDA_REDUCE_CUH
#define CG_OPS_CUDA_REDUCE_CUH

#include "ops/cuda/kernel.cuh"

constexpr int CG_WARP = 32, CG_MAX_WARPS = 32;

struct cg_plus {
    template <typename S> CG_MEMBER S operator()(S a, S b) const { return a + b; }
};
struct cg_larger { /* NaN where one is NaN */
    template <typename S> CG_MEMBER S operator()(S a, S b) const { return a > b || a != a ? a : b; }
};

/* Over the 32 lanes of a warp. */
template <typename S, typename F> CG_DEVICE S cg_warp_reduce(S x, F combine) {
    for (int by = CG_WARP / 2; by; by /= 2) x = combine(x, __shfl_xor_sync(0xffffffffu, x, by));
    return x;
}

template <typename S, typename F> CG_DEVICE S cg_block_reduce(S x, F combine) {
    CG_SHARED(S[CG_MAX_WARPS], of_warps);
    const int warps = (int)blockDim.x / CG_WARP, warp = (int)threadIdx.x / CG_WARP;
    x = cg_warp_reduce(x, combine);
    __syncthreads(); /* a call before this one may still be read */
    if (threadIdx.x % CG_WARP == 0) of_warps[warp] = x;
    __syncthreads();
    x = of_warps[0];
    for (int w = 1; w < warps; w++) x = combine(x, of_warps[w]);
    return x;
}

template <typename S> CG_DEVICE S cg_warp_sum(S x) { return cg_warp_reduce(x, cg_plus()); }
template <typename S> CG_DEVICE S cg_warp_max(S x) { return cg_warp_reduce(x, cg_larger()); }
template <typename S> CG_DEVICE S cg_block_sum(S x) { return cg_block_reduce(x, cg_plus()); }
template <typename S> CG_DEVICE S cg_block_max(S x) { return cg_block_reduce(x, cg_larger()); }

#endif
