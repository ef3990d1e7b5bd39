/* y = op(a) op(b): see ops/nn/matmul.c. Plain: tiles in shared memory, each element summed in order of k. Fast: cuBLAS. */
#include "ops/cuda/product.cuh"

namespace {

cg_gemm gemm_of(cg_dtype dtype, const void *attr, const cg_shape *a, const cg_shape *y) {
    const matmul_attr *how = (const matmul_attr *)attr;
    cg_gemm g =
        cg_gemm_dense(dtype, how->trans_a, how->trans_b, y->dims[0], y->dims[1], a->dims[!how->trans_a]);
    g.c_is_f32 = how->f32_out && dtype == CG_BF16;
    return g;
}

/* ---- plain ---- */

template <typename T> bool matmul_plain(const cg_run_args *args, cg_stream *stream) {
    const cg_gemm g = gemm_of(args->in[0].dtype, args->attr, &args->in[0].shape, &args->out[0].shape);
    return product<T>(args, stream, &g, args->in[0].data, args->in[1].data, args->out[0].data);
}

/* ---- cuBLAS ---- */

size_t matmul_workspace(const cg_node *node) {
    const cg_device_gemm gemm = {
        .each = gemm_of(node->in[0]->dtype, node->attr, &node->in[0]->shape, &node->out[0]->shape),
        .n_batch = 1};
    return cg_device_gemm_workspace(&gemm);
}

bool matmul_fast(const cg_run_args *args, cg_stream *stream) {
    const cg_device_gemm gemm = {
        .each = gemm_of(args->in[0].dtype, args->attr, &args->in[0].shape, &args->out[0].shape), .n_batch = 1};
    return cg_device_gemm_run(stream, &gemm, args->in[0].data, args->in[1].data, args->out[0].data,
                              args->workspace, args->error);
}

} // namespace

extern "C" const cg_cuda_op cg_cuda_matmul = {
    .op = "matmul",
    .variants = {{.name = "plain",
                  .launch = {matmul_plain<float>, matmul_plain<double>, nullptr, matmul_plain<cg_bf16>}},
                 {.name = "fast",
                  .launch = {matmul_fast, matmul_fast, nullptr, matmul_fast},
                  .workspace = matmul_workspace}},
};
