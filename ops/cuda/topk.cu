/* The columns of largest score among those a row sees: see ops/topk.c. A block takes a row at a time. */
#include "ops/cuda/indexer.cuh"

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

} // namespace

extern "C" const cg_cuda_op cg_cuda_topk = {
    .op = "topk",
    .variants = {{.name = "plain",
                  .launch = {topk_plain<float>, topk_plain<double>, nullptr, topk_plain<cg_bf16>}}},
    .describe = describe,
};
