/* KL divergence from log-probabilities, and the gradient: see ops/indexer/kl_div.c. A warp takes a row at a time. */
#include "ops/cuda/train/loss.cuh"

namespace {

constexpr int WARPS = 4;

template <typename T>
CG_GLOBAL void kl_div_kernel(const T *log_p, const T *target, const int32_t *rows, T *kl, int64_t n_rows,
                             int64_t K) {
    typedef cg_sum_of<T> S;
    for (int64_t t = (int64_t)blockIdx.x * WARPS + threadIdx.x / CG_WARP; t < n_rows;
         t += (int64_t)gridDim.x * WARPS) {
        S sum = 0;
        if (rows[t * CG_ROW_FIELDS + CG_ROW_REAL])
            for (int64_t i = t * K + threadIdx.x % CG_WARP; i < (t + 1) * K; i += CG_WARP) {
                const S goal = cg_up(target[i]);
                if (goal != 0) sum += goal * (cg_log(goal) - cg_up(log_p[i]));
            }
        sum = cg_warp_sum(sum);
        if (threadIdx.x % CG_WARP == 0) kl[t] = cg_down<T>(sum);
    }
}

template <typename T> bool kl_div(const cg_run_args *args, cg_stream *stream) {
    const kl_div_attr *attr = (const kl_div_attr *)args->attr;
    const int64_t *dims = args->in[0].shape.dims;
    const int32_t *rows = (const int32_t *)args->in[2].data;
    T *loss = (T *)args->out[0].data, *kl = (T *)args->out[1].data;
    return CG_LAUNCH(kl_div_kernel<T>, cg_blocks(dims[0], WARPS), WARPS * CG_WARP, 0, stream,
                     (const T *)args->in[0].data, (const T *)args->in[1].data, rows, kl, dims[0], dims[1]) &&
           loss_of_rows<T>(args, stream, kl, rows, dims[0], attr->reduction, attr->coeff,
                           (loss_parts *)args->workspace, loss);
}

template <typename T>
CG_GLOBAL void kl_div_grad_kernel(const T *dloss, const T *target, const int32_t *rows, T *dlog_p,
                                  int64_t n_rows, int64_t K, const loss_parts *parts, kl_div_attr attr) {
    typedef cg_sum_of<T> S;
    const S factor = (S)((double)cg_up(dloss[0]) * attr.coeff / loss_divisor(parts, attr.reduction, n_rows));
    CG_FOR(i, n_rows * K) {
        const bool is_real = rows[i / K * CG_ROW_FIELDS + CG_ROW_REAL];
        dlog_p[i] = cg_down<T>(is_real ? 0 - factor * cg_up(target[i]) : 0);
    }
}

template <typename T> bool kl_div_grad(const cg_run_args *args, cg_stream *stream) {
    const kl_div_attr attr = *(const kl_div_attr *)args->attr;
    const int64_t *dims = args->in[1].shape.dims;
    const int32_t *rows = (const int32_t *)args->in[2].data;
    loss_parts *parts = (loss_parts *)args->workspace;
    return loss_rows(args, stream, rows, dims[0], parts) &&
           CG_LAUNCH(kl_div_grad_kernel<T>, cg_blocks(dims[0] * dims[1], 256), 256, 0, stream,
                     (const T *)args->in[0].data, (const T *)args->in[1].data, rows, (T *)args->out[0].data,
                     dims[0], dims[1], parts, attr);
}

} // namespace

extern "C" const cg_cuda_op cg_cuda_kl_div = {
    .op = "kl_div",
    .variants = {{.name = "plain", .launch = {kl_div<float>, kl_div<double>}, .workspace = loss_workspace}},
};

extern "C" const cg_cuda_op cg_cuda_kl_div_grad = {
    .op = "kl_div_grad",
    .variants = {{.name = "plain",
                  .launch = {kl_div_grad<float>, kl_div_grad<double>},
                  .workspace = loss_workspace}},
};
