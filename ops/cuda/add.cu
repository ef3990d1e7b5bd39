/* y = a + b: see ops/add.c. */
#include "ops/cuda/kernel.cuh"

namespace {

template <typename T> CG_GLOBAL void add_kernel(const T *a, const T *b, T *y, int64_t n) {
    CG_FOR(i, n) y[i] = cg_down<T>(cg_up(a[i]) + cg_up(b[i]));
}

template <typename T> bool add(const cg_run_args *args, cg_stream *stream) {
    const int64_t n = cg_shape_count(&args->out[0].shape);
    return CG_LAUNCH(add_kernel<T>, cg_blocks(n, 256), 256, 0, stream, (const T *)args->in[0].data,
                     (const T *)args->in[1].data, (T *)args->out[0].data, n);
}

} // namespace

extern "C" const cg_cuda_op cg_cuda_add = {
    .op = "add",
    .variants = {{.name = "plain", .launch = {add<float>, add<double>}}},
};
