/* Softmax, its logarithm, and the gradient: see ops/indexer/softmax.c. A block takes a row at a time. */
#include "ops/cuda/reduce.cuh"

namespace {

enum { THREADS = 128 };

/* Nothing is read outside the support: `in` says where that is. */
CG_DEVICE bool in(const int32_t *list, int64_t j) { return !list || list[j] >= 0; }

template <typename T>
CG_GLOBAL void softmax_kernel(const T *x, const int32_t *index, T *y, int64_t n_rows, int64_t length,
                              bool log) {
    typedef cg_sum_of<T> S;
    for (int64_t t = blockIdx.x; t < n_rows; t += gridDim.x) {
        const T *row = x + t * length;
        const int32_t *list = index ? index + t * length : nullptr;
        S most = -cg_infinity<S>, sum = 0;
        for (int64_t j = threadIdx.x; j < length; j += THREADS)
            if (in(list, j)) most = cg_larger()(most, cg_up(row[j]));
        most = cg_block_max(most);
        for (int64_t j = threadIdx.x; j < length; j += THREADS)
            if (in(list, j)) sum += cg_exp(cg_up(row[j]) - most);
        sum = cg_block_sum(sum);
        const bool some = most != -cg_infinity<S>; /* else the sum is NaN, and nobody looks */
        const S log_sum = cg_log(sum);
        for (int64_t j = threadIdx.x; j < length; j += THREADS) {
            S p = 0;
            if (some && in(list, j))
                p = log ? cg_up(row[j]) - most - log_sum : cg_exp(cg_up(row[j]) - most) / sum;
            y[t * length + j] = cg_down<T>(p);
        }
    }
}

template <typename T> bool softmax(const cg_run_args *args, cg_stream *stream) {
    const int64_t *dims = args->in[0].shape.dims;
    return CG_LAUNCH(softmax_kernel<T>, cg_blocks(dims[0], 1), THREADS, 0, stream, (const T *)args->in[0].data,
                     (const int32_t *)args->in[1].data, (T *)args->out[0].data, dims[0], dims[1],
                     ((const softmax_attr *)args->attr)->log);
}

template <typename T>
CG_GLOBAL void softmax_grad_kernel(const T *dy, const T *y, const int32_t *index, T *dx, int64_t n_rows,
                                   int64_t length, bool log) {
    typedef cg_sum_of<T> S;
    for (int64_t t = blockIdx.x; t < n_rows; t += gridDim.x) {
        const int64_t at = t * length;
        const int32_t *list = index ? index + at : nullptr;
        S sum = 0;
        for (int64_t j = threadIdx.x; j < length; j += THREADS)
            if (in(list, j)) sum += log ? cg_up(dy[at + j]) : cg_up(y[at + j]) * cg_up(dy[at + j]);
        sum = cg_block_sum(sum);
        for (int64_t j = threadIdx.x; j < length; j += THREADS) {
            S d = 0;
            if (in(list, j)) {
                const S p = cg_up(y[at + j]), dp = cg_up(dy[at + j]);
                d = log ? dp - cg_exp(p) * sum : p * (dp - sum);
            }
            dx[at + j] = cg_down<T>(d);
        }
    }
}

template <typename T> bool softmax_grad(const cg_run_args *args, cg_stream *stream) {
    const int64_t *dims = args->in[0].shape.dims;
    return CG_LAUNCH(softmax_grad_kernel<T>, cg_blocks(dims[0], 1), THREADS, 0, stream,
                     (const T *)args->in[0].data, (const T *)args->in[1].data,
                     (const int32_t *)args->in[2].data, (T *)args->out[0].data, dims[0], dims[1],
                     ((const softmax_attr *)args->attr)->log);
}

} // namespace

extern "C" const cg_cuda_op cg_cuda_softmax = {
    .op = "softmax",
    .variants = {{.name = "plain", .launch = {softmax<float>, softmax<double>, nullptr, softmax<cg_bf16>}}},
};

extern "C" const cg_cuda_op cg_cuda_softmax_grad = {
    .op = "softmax_grad",
    .variants = {{.name = "plain",
                  .launch = {softmax_grad<float>, softmax_grad<double>, nullptr, softmax_grad<cg_bf16>}}},
};
