/* One matrix per group of columns, and the gradient of the matrices: see ops/nn/grouped_linear.c. Plain: tiles in shared
 * memory, a launch per group. Fast: cuBLAS takes all groups at once, the columns of a group where they are.
 *
 * T = 8192 rows, 8 groups, 4096 -> 1024 columns: 2 * 8192 * 8 * 4096 * 1024 = 0.55 TFLOP, 8.2 ms at 67 TFLOP/s of f32, 0.7 ms
 * at 790 of bf16; 0.3 GB x, 0.13 GB w, 0.27 GB y in bf16 take 0.3 ms at 4.3 TB/s. Bound by arithmetic either way. */
#include "ops/cuda/product.cuh"

namespace {

/* ---- y[t,g] = w[g] x[t,g] ---- */

cg_device_gemm linear_of(cg_dtype dtype, const void *attr, const cg_shape *x_shape, const cg_shape *y_shape) {
    const bool transposed = ((const grouped_linear_attr *)attr)->transposed;
    const int64_t *x = x_shape->dims, *y = y_shape->dims;
    cg_device_gemm gemm = {.each = cg_gemm_dense(dtype, false, !transposed, x[0], y[2], x[2]),
                           .n_batch = x[1],
                           .stride_a = x[2],
                           .stride_b = x[2] * y[2],
                           .stride_c = y[2]};
    gemm.each.lda = x[1] * x[2];
    gemm.each.ldc = y[1] * y[2];
    return gemm;
}

cg_device_gemm linear_of_args(const cg_run_args *args) {
    return linear_of(args->in[0].dtype, args->attr, &args->in[0].shape, &args->out[0].shape);
}

size_t linear_workspace(const cg_node *node) {
    const cg_device_gemm gemm =
        linear_of(node->in[0]->dtype, node->attr, &node->in[0]->shape, &node->out[0]->shape);
    return cg_device_gemm_workspace(&gemm);
}

/* ---- w[g] = sum of a[t,g] b[t,g]^T over t ---- */

cg_device_gemm outer_of(cg_dtype dtype, const void *attr, const cg_shape *a_shape, const cg_shape *b_shape) {
    const int64_t *a = a_shape->dims, *b = b_shape->dims;
    cg_device_gemm gemm = {.each = cg_gemm_dense(dtype, true, false, a[2], b[2], a[0]),
                           .n_batch = a[1],
                           .stride_a = a[2],
                           .stride_b = b[2],
                           .stride_c = a[2] * b[2]};
    gemm.each.c_is_f32 = ((const grouped_outer_attr *)attr)->f32_out && dtype == CG_BF16;
    gemm.each.lda = a[1] * a[2];
    gemm.each.ldb = b[1] * b[2];
    return gemm;
}

cg_device_gemm outer_of_args(const cg_run_args *args) {
    return outer_of(args->in[0].dtype, args->attr, &args->in[0].shape, &args->in[1].shape);
}

size_t outer_workspace(const cg_node *node) {
    const cg_device_gemm gemm =
        outer_of(node->in[0]->dtype, node->attr, &node->in[0]->shape, &node->in[1]->shape);
    return cg_device_gemm_workspace(&gemm);
}

/* ---- both ---- */

typedef cg_device_gemm (*gemm_of_args)(const cg_run_args *args);

template <typename T, gemm_of_args OF> bool plain(const cg_run_args *args, cg_stream *stream) {
    const cg_device_gemm gemm = OF(args);
    const int64_t y_bytes = gemm.stride_c * (int64_t)cg_dtype_bytes(args->out[0].dtype);
    for (int64_t g = 0; g < gemm.n_batch; g++)
        if (!product<T>(args, stream, &gemm.each, (const T *)args->in[0].data + g * gemm.stride_a,
                        (const T *)args->in[1].data + g * gemm.stride_b,
                        (char *)args->out[0].data + g * y_bytes))
            return false;
    return true;
}

template <gemm_of_args OF> bool fast(const cg_run_args *args, cg_stream *stream) {
    const cg_device_gemm gemm = OF(args);
    return cg_device_gemm_run(stream, &gemm, args->in[0].data, args->in[1].data, args->out[0].data,
                              args->workspace, args->error);
}

} // namespace

extern "C" const cg_cuda_op cg_cuda_grouped_linear = {
    .op = "grouped_linear",
    .variants = {{.name = "plain",
                  .launch = {plain<float, linear_of_args>, plain<double, linear_of_args>, nullptr,
                             plain<cg_bf16, linear_of_args>}},
                 {.name = "fast",
                  .launch = {fast<linear_of_args>, fast<linear_of_args>, nullptr, fast<linear_of_args>},
                  .workspace = linear_workspace}},
};

extern "C" const cg_cuda_op cg_cuda_grouped_outer = {
    .op = "grouped_outer",
    .variants = {{.name = "plain",
                  .launch = {plain<float, outer_of_args>, plain<double, outer_of_args>, nullptr,
                             plain<cg_bf16, outer_of_args>}},
                 {.name = "fast",
                  .launch = {fast<outer_of_args>, fast<outer_of_args>, nullptr, fast<outer_of_args>},
                  .workspace = outer_workspace}},
};
