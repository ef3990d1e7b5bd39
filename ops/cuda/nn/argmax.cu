/* Index of the largest entry of each row: see ops/nn/argmax.c. A block takes a row at a time. */
#include "ops/cuda/reduce.cuh"

namespace {

enum { THREADS = 128 };

void describe(const cg_run_args *, const cg_device_fault *fault, cg_error *error) {
    cg_fail(error, CG_BAD_INPUT, "row %lld of x holds NaN, expected numbers", (long long)fault->place);
}

template <typename T>
CG_GLOBAL void argmax_kernel(const T *x, int32_t *y, int64_t n_rows, int64_t length, cg_device_fault *fault) {
    typedef cg_sum_of<T> S;
    for (int64_t t = blockIdx.x; t < n_rows; t += gridDim.x) {
        const T *row = x + t * length;
        S top = -cg_infinity<S>;
        for (int64_t v = threadIdx.x; v < length; v += THREADS) top = cg_larger()(top, cg_up(row[v]));
        top = cg_block_max(top);
        int64_t behind = 0; /* the first entry that is as large, counted from the end: the largest wins */
        for (int64_t v = threadIdx.x; v < length && !behind; v += THREADS)
            if (cg_up(row[v]) == top) behind = length - v;
        behind = cg_block_max(behind);
        if (threadIdx.x) continue;
        if (cg_is_nan(top)) cg_report(fault, 1, t);
        y[t] = behind ? (int32_t)(length - behind) : 0;
    }
}

template <typename T> bool argmax(const cg_run_args *args, cg_stream *stream) {
    const int64_t *dims = args->in[0].shape.dims;
    return CG_LAUNCH(argmax_kernel<T>, cg_blocks(dims[0], 1), THREADS, 0, stream, (const T *)args->in[0].data,
                     (int32_t *)args->out[0].data, dims[0], dims[1], args->fault);
}

} // namespace

extern "C" const cg_cuda_op cg_cuda_argmax = {
    .op = "argmax",
    .variants = {{.name = "plain", .launch = {argmax<float>, argmax<double>, nullptr, argmax<cg_bf16>}}},
    .describe = describe,
};
