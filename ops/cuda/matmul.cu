/* y = op(a) op(b): see ops/matmul.c. Plain: tiles in shared memory, each element summed in order of k. Fast: cuBLAS. */
#include "ops/cuda/kernel.cuh"

namespace {

cg_gemm gemm_of(cg_dtype dtype, const void *attr, const cg_shape *a, const cg_shape *y) {
    const matmul_attr *how = (const matmul_attr *)attr;
    return cg_gemm_dense(dtype, how->trans_a, how->trans_b, y->dims[0], y->dims[1], a->dims[!how->trans_a]);
}

/* ---- plain ---- */

enum { TILE = 16 };

template <typename T> CG_GLOBAL void matmul_kernel(const T *a, const T *b, T *y, cg_gemm g) {
    typedef cg_sum_of<T> S;
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
        if (i < g.m && j < g.n) y[i * g.ldc + j] = cg_down<T>(sum);
    }
}

template <typename T> bool matmul_plain(const cg_run_args *args, cg_stream *stream) {
    const cg_gemm g = gemm_of(args->out[0].dtype, args->attr, &args->in[0].shape, &args->out[0].shape);
    const int64_t tiles = (g.m + TILE - 1) / TILE * ((g.n + TILE - 1) / TILE);
    return CG_LAUNCH(matmul_kernel<T>, cg_blocks(tiles, 1), TILE * TILE, 0, stream, (const T *)args->in[0].data,
                     (const T *)args->in[1].data, (T *)args->out[0].data, g);
}

/* ---- cuBLAS ---- */

size_t matmul_workspace(const cg_node *node) {
    const cg_device_gemm gemm = {
        .each = gemm_of(node->out[0]->dtype, node->attr, &node->in[0]->shape, &node->out[0]->shape),
        .n_batch = 1};
    return cg_device_gemm_workspace(&gemm);
}

bool matmul_fast(const cg_run_args *args, cg_stream *stream) {
    const cg_device_gemm gemm = {
        .each = gemm_of(args->out[0].dtype, args->attr, &args->in[0].shape, &args->out[0].shape), .n_batch = 1};
    return cg_device_gemm_run(stream, &gemm, args->in[0].data, args->in[1].data, args->out[0].data,
                              args->workspace, args->error);
}

} // namespace

extern "C" const cg_cuda_op cg_cuda_matmul = {
    .op = "matmul",
    .variants = {{.name = "plain", .launch = {matmul_plain<float>, matmul_plain<double>}},
                 {.name = "fast", .launch = {matmul_fast, matmul_fast}, .workspace = matmul_workspace}},
};
