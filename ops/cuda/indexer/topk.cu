/* The columns of largest score among those a row sees: see ops/indexer/topk.c. */
#include "ops/cuda/indexer/index_select.cuh"

namespace {

enum { THREADS = 128 };
enum { BAD_ROW = 1, BAD_SCORE };

void describe(const cg_run_args *args, const cg_device_fault *fault, cg_error *error) {
    const long long C = args->in[0].shape.dims[1];
    if (fault->what == BAD_ROW)
        describe_seen(fault, error);
    else
        cg_fail(error, CG_BAD_INPUT, "row %lld: the score of column %lld is NaN", (long long)fault->place / C,
                (long long)fault->place % C);
}

/* ---- plain: a block takes a row at a time ---- */

template <typename T>
CG_GLOBAL void topk_kernel(const T *scores, const int32_t *rows, int32_t *topk, int64_t n_rows, int64_t C,
                           int64_t K, cg_device_fault *fault) {
    for (int64_t t = blockIdx.x; t < n_rows; t += gridDim.x) {
        const seen_rows seen = seen_of(rows, t, C, BAD_ROW, threadIdx.x == 0 ? fault : nullptr);
        const int64_t nan = select_by_rank(scores + t * C + seen.first, seen.n, K, seen.first, topk + t * K);
        if (nan >= 0 && threadIdx.x == 0) cg_report(fault, BAD_SCORE, t * C + seen.first + nan);
    }
}

template <typename T> bool topk_plain(const cg_run_args *args, cg_stream *stream) {
    const int64_t *scores = args->in[0].shape.dims;
    return CG_LAUNCH(topk_kernel<T>, cg_blocks(scores[0], 1), THREADS, 0, stream, (const T *)args->in[0].data,
                     (const int32_t *)args->in[1].data, (int32_t *)args->out[0].data, scores[0], scores[1],
                     args->out[0].shape.dims[1], args->fault);
}

/* ---- fast: a warp takes a row at a time and reads it once (index_select.cuh) ---- */

constexpr int WARPS = 8;

template <typename T>
CG_GLOBAL void topk_fast_kernel(const T *scores, const int32_t *rows, int32_t *topk, int64_t n_rows, int64_t C,
                                int64_t K, cg_device_fault *fault) {
    CG_DYNAMIC_SHARED(uint64_t, kept);
    const int lane = (int)threadIdx.x % CG_WARP, warp = (int)threadIdx.x / CG_WARP;
    for (int64_t t = (int64_t)blockIdx.x * WARPS + warp; t < n_rows; t += (int64_t)gridDim.x * WARPS) {
        const seen_rows seen = seen_of(rows, t, C, BAD_ROW, lane == 0 ? fault : nullptr);
        selector best(kept + warp * select_room(K), K);
        for (int64_t j0 = 0; j0 < seen.n; j0 += CG_WARP) {
            const int64_t c = seen.first + j0 + lane;
            const bool is_seen = j0 + lane < seen.n;
            best.push(is_seen, is_seen ? cg_up(scores[t * C + c]) : 0, (int32_t)c);
        }
        best.finish(topk + t * K);
        if (best.nan != INT32_MAX && lane == 0) cg_report(fault, BAD_SCORE, t * C + best.nan);
    }
}

size_t kept_bytes(int64_t K) { return (size_t)(WARPS * select_room(K)) * sizeof(uint64_t); }

template <typename T> bool topk_fast(const cg_run_args *args, cg_stream *stream) {
    const int64_t *scores = args->in[0].shape.dims, K = args->out[0].shape.dims[1];
    return CG_LAUNCH(topk_fast_kernel<T>, cg_blocks(scores[0], WARPS), WARPS * CG_WARP, kept_bytes(K), stream,
                     (const T *)args->in[0].data, (const int32_t *)args->in[1].data,
                     (int32_t *)args->out[0].data, scores[0], scores[1], K, args->fault);
}

bool fits(const cg_node *node) { return cg_dim(node->out[0], 1) <= SELECT_MOST; }
size_t fast_shared(const cg_node *node) { return CG_STATIC_BYTES + kept_bytes(cg_dim(node->out[0], 1)); }

} // namespace

extern "C" const cg_cuda_op cg_cuda_topk = {
    .op = "topk",
    .variants = {{.name = "plain",
                  .launch = {topk_plain<float>, topk_plain<double>, nullptr, topk_plain<cg_bf16>}},
                 {.name = "fast",
                  .launch = {topk_fast<float>, nullptr, nullptr, topk_fast<cg_bf16>},
                  .fits = fits,
                  .shared = fast_shared}},
    .describe = describe,
};
