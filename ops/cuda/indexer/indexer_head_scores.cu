/* Every query head against every key, and the gradients: see ops/indexer/indexer_head_scores.c.
 *
 * Forward, sums are in the order of indexer_topk, so that topk chooses the same from what they give. Backward,
 * the fast one is cuBLAS. */
#include "ops/cuda/product.cuh"

namespace {

cg_gemm scores_gemm(cg_dtype dtype, const cg_shape *q, const cg_shape *k) {
    return cg_gemm_dense(dtype, false, true, q->dims[0] * q->dims[1], k->dims[0], k->dims[1]);
}

cg_gemm dq_gemm(cg_dtype dtype, const cg_shape *q, const cg_shape *k) {
    return cg_gemm_dense(dtype, false, false, q->dims[0] * q->dims[1], k->dims[1], k->dims[0]);
}

cg_gemm dk_gemm(cg_dtype dtype, const cg_shape *q, const cg_shape *k) {
    return cg_gemm_dense(dtype, true, false, k->dims[0], k->dims[1], q->dims[0] * q->dims[1]);
}

template <typename T> bool scores_plain(const cg_run_args *args, cg_stream *stream) {
    const cg_tensor *in = args->in;
    const cg_gemm g = scores_gemm(in[0].dtype, &in[0].shape, &in[1].shape);
    return product<T>(args, stream, &g, in[0].data, in[1].data, args->out[0].data);
}

template <typename T> bool grad_plain(const cg_run_args *args, cg_stream *stream) {
    const cg_tensor *in = args->in;
    const cg_gemm dq = dq_gemm(in[1].dtype, &in[1].shape, &in[2].shape);
    const cg_gemm dk = dk_gemm(in[1].dtype, &in[1].shape, &in[2].shape);
    return product<T>(args, stream, &dq, in[0].data, in[2].data, args->out[0].data) &&
           product<T>(args, stream, &dk, in[0].data, in[1].data, args->out[1].data);
}

/* ---- cuBLAS ---- */

/* The two products run one after the other. */
size_t grad_workspace(const cg_node *node) {
    const cg_shape *q = &node->in[1]->shape, *k = &node->in[2]->shape;
    const cg_device_gemm dq = {.each = dq_gemm(node->in[1]->dtype, q, k), .n_batch = 1};
    const cg_device_gemm dk = {.each = dk_gemm(node->in[1]->dtype, q, k), .n_batch = 1};
    const size_t a = cg_device_gemm_workspace(&dq), b = cg_device_gemm_workspace(&dk);
    return a > b ? a : b;
}

bool grad_fast(const cg_run_args *args, cg_stream *stream) {
    const cg_tensor *in = args->in;
    const cg_device_gemm dq = {.each = dq_gemm(in[1].dtype, &in[1].shape, &in[2].shape), .n_batch = 1};
    const cg_device_gemm dk = {.each = dk_gemm(in[1].dtype, &in[1].shape, &in[2].shape), .n_batch = 1};
    return cg_device_gemm_run(stream, &dq, in[0].data, in[2].data, args->out[0].data, args->workspace,
                              args->error) &&
           cg_device_gemm_run(stream, &dk, in[0].data, in[1].data, args->out[1].data, args->workspace,
                              args->error);
}

} // namespace

extern "C" const cg_cuda_op cg_cuda_indexer_head_scores = {
    .op = "indexer_head_scores",
    .variants = {{.name = "plain",
                  .launch = {scores_plain<float>, scores_plain<double>, nullptr, scores_plain<cg_bf16>}}},
};

extern "C" const cg_cuda_op cg_cuda_indexer_head_scores_grad = {
    .op = "indexer_head_scores_grad",
    .variants =
        {{.name = "plain", .launch = {grad_plain<float>, grad_plain<double>, nullptr, grad_plain<cg_bf16>}},
         {.name = "fast", .launch = {grad_fast, grad_fast, nullptr, grad_fast}, .workspace = grad_workspace}},
};
