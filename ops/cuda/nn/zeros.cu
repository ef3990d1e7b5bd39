/* A tensor of zeros: see ops/nn/zeros.c. */
#include "ops/cuda/kernel.cuh"

namespace {

template <typename T> CG_GLOBAL void zeros_kernel(T *y, int64_t n) { CG_FOR(i, n) y[i] = T(); }

template <typename T> bool zeros(const cg_run_args *args, cg_stream *stream) {
    const int64_t n = cg_shape_count(&args->out[0].shape);
    return CG_LAUNCH(zeros_kernel<T>, cg_blocks(n, 256), 256, 0, stream, (T *)args->out[0].data, n);
}

} // namespace

extern "C" const cg_cuda_op cg_cuda_zeros = {
    .op = "zeros",
    .variants = {{.name = "plain", .launch = {zeros<float>, zeros<double>, zeros<int32_t>, zeros<cg_bf16>}}},
};
