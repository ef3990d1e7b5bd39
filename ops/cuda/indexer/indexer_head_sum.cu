/* The weighted sum over heads, and the gradients: see ops/indexer/indexer_head_sum.c. Sums of bf16 are f32. */
#include "ops/cuda/reduce.cuh"

namespace {

enum { THREADS = 128 };

struct sizes {
    int64_t T, Hi, C;
};

sizes sizes_of(const cg_shape *x) { return {x->dims[0], x->dims[1], x->dims[2]}; }

template <typename T> CG_GLOBAL void head_sum_kernel(const T *x, const T *w, cg_sum_of<T> *y, sizes z) {
    CG_FOR(i, z.T * z.C) {
        const int64_t t = i / z.C, c = i % z.C;
        cg_sum_of<T> sum = 0;
        for (int64_t h = 0; h < z.Hi; h++)
            sum = cg_fma(cg_up(w[t * z.Hi + h]), cg_up(x[(t * z.Hi + h) * z.C + c]), sum);
        y[i] = sum;
    }
}

template <typename T> bool head_sum(const cg_run_args *args, cg_stream *stream) {
    const sizes z = sizes_of(&args->in[0].shape);
    return CG_LAUNCH(head_sum_kernel<T>, cg_blocks(z.T * z.C, 256), 256, 0, stream, (const T *)args->in[0].data,
                     (const T *)args->in[1].data, (cg_sum_of<T> *)args->out[0].data, z);
}

/* A block takes a head of a row at a time. */
template <typename T>
CG_GLOBAL void head_sum_grad_kernel(const cg_sum_of<T> *dy, const T *x, const T *w, T *dx, T *dw, sizes z) {
    typedef cg_sum_of<T> S;
    for (int64_t i = blockIdx.x; i < z.T * z.Hi; i += gridDim.x) {
        const S weight = cg_up(w[i]);
        S sum = 0;
        for (int64_t c = threadIdx.x; c < z.C; c += THREADS) {
            const S d = dy[i / z.Hi * z.C + c];
            dx[i * z.C + c] = cg_down<T>(weight * d);
            if (d != 0) sum += d * cg_up(x[i * z.C + c]);
        }
        sum = cg_block_sum(sum);
        if (threadIdx.x == 0) dw[i] = cg_down<T>(sum);
    }
}

template <typename T> bool head_sum_grad(const cg_run_args *args, cg_stream *stream) {
    const sizes z = sizes_of(&args->in[1].shape);
    return CG_LAUNCH(head_sum_grad_kernel<T>, cg_blocks(z.T * z.Hi, 1), THREADS, 0, stream,
                     (const cg_sum_of<T> *)args->in[0].data, (const T *)args->in[1].data,
                     (const T *)args->in[2].data, (T *)args->out[0].data, (T *)args->out[1].data, z);
}

} // namespace

extern "C" const cg_cuda_op cg_cuda_indexer_head_sum = {
    .op = "indexer_head_sum",
    .variants = {{.name = "plain", .launch = {head_sum<float>, head_sum<double>, nullptr, head_sum<cg_bf16>}}},
};

extern "C" const cg_cuda_op cg_cuda_indexer_head_sum_grad = {
    .op = "indexer_head_sum_grad",
    .variants = {{.name = "plain",
                  .launch = {head_sum_grad<float>, head_sum_grad<double>, nullptr, head_sum_grad<cg_bf16>}}},
};
