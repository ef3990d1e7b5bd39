/* Which compressed rows each token attends to: see ops/indexer_topk.c. */
#include "ops/cuda/indexer.cuh"

namespace {

enum { Q, W, KEYS, ROWS };
enum { BAD_ROW = 1, BAD_SCORE };

struct sizes {
    int64_t T, Hi, Di, C, K;
};

sizes sizes_of(const cg_shape *q, const cg_shape *keys, const cg_shape *topk) {
    return {q->dims[0], q->dims[1], q->dims[2], keys->dims[0], topk->dims[1]};
}

void describe(const cg_run_args *args, const cg_device_fault *fault, cg_error *error) {
    const long long C = args->in[KEYS].shape.dims[0];
    if (fault->what == BAD_ROW)
        describe_seen(fault, error);
    else
        cg_fail(error, CG_BAD_INPUT, "row %lld: the score of compressed row %lld is NaN",
                (long long)fault->place / C, (long long)fault->place % C);
}

/* ---- plain: a block takes a row at a time and holds its scores in the workspace ---- */

enum { PLAIN_THREADS = 128, PLAIN_BLOCKS = 256 };

int64_t plain_blocks(int64_t n_rows) {
    const int64_t blocks = cg_blocks(n_rows, 1);
    return blocks < PLAIN_BLOCKS ? blocks : (int64_t)PLAIN_BLOCKS;
}

template <typename T>
CG_GLOBAL void plain_kernel(const T *q, const T *w, const T *k, const int32_t *rows, int32_t *topk, sizes z,
                            cg_sum_of<T> *scores_of_blocks, cg_device_fault *fault) {
    cg_sum_of<T> *scores = scores_of_blocks + blockIdx.x * z.C;
    for (int64_t t = blockIdx.x; t < z.T; t += gridDim.x) {
        const seen_rows seen = seen_of(rows, t, z.C, BAD_ROW, threadIdx.x == 0 ? fault : nullptr);
        for (int64_t j = threadIdx.x; j < seen.n; j += PLAIN_THREADS)
            scores[j] = index_score(q + t * z.Hi * z.Di, w + t * z.Hi, k + (seen.first + j) * z.Di, z.Hi, z.Di);
        __syncthreads();
        const int64_t nan = select_by_rank(scores, seen.n, z.K, seen.first, topk + t * z.K);
        if (nan >= 0 && threadIdx.x == 0) cg_report(fault, BAD_SCORE, t * z.C + seen.first + nan);
        __syncthreads();
    }
}

size_t plain_workspace(const cg_node *node) {
    const size_t real = node->in[Q]->dtype == CG_F64 ? sizeof(double) : sizeof(float);
    return (size_t)(plain_blocks(cg_dim(node->in[Q], 0)) * cg_dim(node->in[KEYS], 0)) * real;
}

template <typename T> bool plain(const cg_run_args *args, cg_stream *stream) {
    const cg_tensor *in = args->in;
    const sizes z = sizes_of(&in[Q].shape, &in[KEYS].shape, &args->out[0].shape);
    return CG_LAUNCH(plain_kernel<T>, plain_blocks(z.T), PLAIN_THREADS, 0, stream, (const T *)in[Q].data,
                     (const T *)in[W].data, (const T *)in[KEYS].data, (const int32_t *)in[ROWS].data,
                     (int32_t *)args->out[0].data, z, (cg_sum_of<T> *)args->workspace, args->fault);
}

} // namespace

extern "C" const cg_cuda_op cg_cuda_indexer_topk = {
    .op = "indexer_topk",
    .variants = {{.name = "plain",
                  .launch = {plain<float>, plain<double>, nullptr, plain<cg_bf16>},
                  .workspace = plain_workspace}},
    .describe = describe,
};
