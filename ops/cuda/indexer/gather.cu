/* Chosen columns of each row, and the gradient: see ops/indexer/gather.c. */
#include "ops/cuda/indexer/indexer.cuh"

namespace {

enum { THREADS = 128 };
enum { BAD_INDEX = 1 };

void describe(const cg_run_args *args, const cg_device_fault *fault, cg_error *error) {
    describe_listed("index", args->in[1].shape.dims[1], args->in[0].shape.dims[1], fault, error);
}

void describe_grad(const cg_run_args *args, const cg_device_fault *fault, cg_error *error) {
    describe_listed("index", args->in[1].shape.dims[1], args->out[0].shape.dims[1], fault, error);
}

template <typename T>
CG_GLOBAL void gather_kernel(const T *x, const int32_t *index, T *y, int64_t n_rows, int64_t C, int64_t K,
                             cg_device_fault *fault) {
    CG_FOR(i, n_rows * K) {
        const int64_t c = listed(index, i, C, BAD_INDEX, fault);
        y[i] = c < 0 ? cg_down<T>(-cg_infinity<cg_sum_of<T>>) : x[i / K * C + c];
    }
}

template <typename T> bool gather(const cg_run_args *args, cg_stream *stream) {
    const int64_t *x = args->in[0].shape.dims, K = args->in[1].shape.dims[1];
    return CG_LAUNCH(gather_kernel<T>, cg_blocks(x[0] * K, 256), 256, 0, stream, (const T *)args->in[0].data,
                     (const int32_t *)args->in[1].data, (T *)args->out[0].data, x[0], x[1], K, args->fault);
}

/* A block takes a row at a time. Column c belongs to one thread, which adds up its slots in order. */
template <typename T>
CG_GLOBAL void gather_grad_kernel(const T *dy, const int32_t *index, T *dx, int64_t n_rows, int64_t C,
                                  int64_t K, cg_device_fault *fault) {
    for (int64_t t = blockIdx.x; t < n_rows; t += gridDim.x) {
        for (int64_t c = threadIdx.x; c < C; c += THREADS) dx[t * C + c] = cg_down<T>(0);
        for (int64_t i = t * K; i < (t + 1) * K; i++) {
            const int64_t c = listed(index, i, C, BAD_INDEX, threadIdx.x == 0 ? fault : nullptr);
            if (c < 0 || c % THREADS != threadIdx.x) continue;
            dx[t * C + c] = cg_down<T>(cg_up(dx[t * C + c]) + cg_up(dy[i]));
        }
    }
}

template <typename T> bool gather_grad(const cg_run_args *args, cg_stream *stream) {
    const int64_t *dy = args->in[0].shape.dims, C = args->out[0].shape.dims[1];
    return CG_LAUNCH(gather_grad_kernel<T>, cg_blocks(dy[0], 1), THREADS, 0, stream,
                     (const T *)args->in[0].data, (const int32_t *)args->in[1].data, (T *)args->out[0].data,
                     dy[0], C, dy[1], args->fault);
}

} // namespace

extern "C" const cg_cuda_op cg_cuda_gather = {
    .op = "gather",
    .variants = {{.name = "plain", .launch = {gather<float>, gather<double>, nullptr, gather<cg_bf16>}}},
    .describe = describe,
};

extern "C" const cg_cuda_op cg_cuda_gather_grad = {
    .op = "gather_grad",
    .variants = {{.name = "plain",
                  .launch = {gather_grad<float>, gather_grad<double>, nullptr, gather_grad<cg_bf16>}}},
    .describe = describe_grad,
};
