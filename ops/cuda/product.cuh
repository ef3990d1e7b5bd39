/* A matrix product with tiles in shared memory, each element summed in order of k by fused steps: the same bits as the
 * plain sum, whatever the tiles. Slower than cuBLAS. */
#ifndef CG_OPS_CUDA_PRODUCT_CUH
#define CG_OPS_CUDA_PRODUCT_CUH

#include "ops/cuda/kernel.cuh"

namespace {

enum { PRODUCT_TILE = 16, PRODUCT_THREADS = PRODUCT_TILE * PRODUCT_TILE };

/* y = op(a) op(b), laid out as g says; g.accumulate is not looked at. */
template <typename T, typename Y> CG_GLOBAL void product_kernel(const T *a, const T *b, Y *y, cg_gemm g) {
    typedef cg_sum_of<T> S;
    enum { TILE = PRODUCT_TILE };
    CG_SHARED(S[TILE][TILE + 1], tile_a); /* [row of y][k]: the odd length keeps banks apart */
    CG_SHARED(S[TILE][TILE + 1], tile_b); /* [k][column of y] */
    const int across = (int)threadIdx.x % TILE, down = (int)threadIdx.x / TILE;
    const int64_t tiles_m = (g.m + TILE - 1) / TILE, tiles_n = (g.n + TILE - 1) / TILE;
    for (int64_t tile = blockIdx.x; tile < tiles_m * tiles_n; tile += gridDim.x) {
        const int64_t i = tile / tiles_n * TILE + down, j = tile % tiles_n * TILE + across;
        S sum = 0;
        for (int64_t k0 = 0; k0 < g.k; k0 += TILE) {
            const int64_t ka = k0 + across, kb = k0 + down;
            tile_a[down][across] =
                i < g.m && ka < g.k ? cg_up(a[g.trans_a ? ka * g.lda + i : i * g.lda + ka]) : 0;
            tile_b[down][across] =
                j < g.n && kb < g.k ? cg_up(b[g.trans_b ? j * g.ldb + kb : kb * g.ldb + j]) : 0;
            __syncthreads();
            for (int k = 0; k < TILE; k++) sum = cg_fma(tile_a[down][k], tile_b[k][across], sum);
            __syncthreads();
        }
        if (i < g.m && j < g.n) y[i * g.ldc + j] = cg_down<Y>(sum);
    }
}

template <typename T, typename Y>
bool product_to(const cg_run_args *args, cg_stream *stream, const cg_gemm *g, const void *a, const void *b,
                void *y) {
    const int64_t tiles =
        ((g->m + PRODUCT_TILE - 1) / PRODUCT_TILE) * ((g->n + PRODUCT_TILE - 1) / PRODUCT_TILE);
    return CG_LAUNCH((product_kernel<T, Y>), cg_blocks(tiles, 1), PRODUCT_THREADS, 0, stream, (const T *)a,
                     (const T *)b, (Y *)y, *g);
}

/* y is f32 for g.c_is_f32. */
template <typename T>
bool product(const cg_run_args *args, cg_stream *stream, const cg_gemm *g, const void *a, const void *b,
             void *y) {
    return g->c_is_f32 ? product_to<T, cg_sum_of<T>>(args, stream, g, a, b, y)
                       : product_to<T, T>(args, stream, g, a, b, y);
}

} // namespace

#endif
