/* y = factor * x: see ops/nn/scale.c. */
#include "ops/cuda/kernel.cuh"

namespace {

template <typename T> CG_GLOBAL void scale_kernel(const T *x, T *y, int64_t n, cg_sum_of<T> factor) {
    CG_FOR(i, n) y[i] = cg_down<T>(factor * cg_up(x[i]));
}

template <typename T> bool scale(const cg_run_args *args, cg_stream *stream) {
    const double factor = ((const scale_attr *)args->attr)->factor;
    const int64_t n = cg_shape_count(&args->out[0].shape);
    return CG_LAUNCH(scale_kernel<T>, cg_blocks(n, 256), 256, 0, stream, (const T *)args->in[0].data,
                     (T *)args->out[0].data, n, (cg_sum_of<T>)factor);
}

} // namespace

extern "C" const cg_cuda_op cg_cuda_scale = {
    .op = "scale",
    .variants = {{.name = "plain", .launch = {scale<float>, scale<double>, nullptr, scale<cg_bf16>}}},
};
