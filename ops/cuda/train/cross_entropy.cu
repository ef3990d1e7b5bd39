/* Softmax cross-entropy and its gradient: see ops/train/cross_entropy.c.
 *
 * T = 8192 rows of V = 129280 logits in f32 are 4.2 GB: read once, 0.99 ms at 4.3 TB/s; the gradient reads and writes
 * them, 1.97 ms. 1.1 * 10^12 logits a second leave 27 instructions for each (elementwise.cuh); an exponential, a
 * comparison and a sum are about 14. Plain reads a row twice, the second time from the second-level cache at best. Fast
 * reads it once, 16 bytes at a time: a running maximum per thread, whose sum is scaled when the maximum grows, by the
 * same formula when the threads' sums are joined. Expected: 85 % of 4.3 TB/s for rows of 4 KB on, which a block takes;
 * shorter ones go to a warp each. What limits next: logits go through memory at all, between the product that makes them
 * and this. */
#include "ops/cuda/team.cuh"
#include "ops/cuda/total.cuh"

namespace {

constexpr int THREADS = 256;
enum { BAD_TARGET = 1 }; /* place: row, got: target, columns */

void describe(const cg_run_args *, const cg_device_fault *fault, cg_error *error) {
    cg_fail(error, CG_BAD_INPUT, "row %lld of targets is %lld, expected -1 or a column of logits, 0 to %lld",
            (long long)fault->place, (long long)fault->got[0], (long long)fault->got[1] - 1);
}

/* The target of row t; -1 without one, or for a wrong one, which thread `lane` 0 reports. */
CG_DEVICE int64_t target_of(const int32_t *targets, int64_t t, int64_t V, int lane, cg_device_fault *fault) {
    const int64_t target = targets[t];
    if (target >= 0 && target < V) return target;
    if (target != -1 && lane == 0) cg_report(fault, BAD_TARGET, t, target, V);
    return -1;
}

/* exp(x - top), 0 where all is -inf. */
template <typename S> CG_DEVICE S exp_to_top(S x, S top) {
    return cg_exp(x - (top > -cg_infinity<S> ? top : (S)0));
}

/* What a row gives: logits x, the largest and the sum of exp(x - largest). */
template <typename T, typename S>
CG_DEVICE void finish_row(const T *x, int64_t target, S top, S sum, S *lse, double *loss) {
    const double log_sum = cg_log((double)sum);
    *lse = (S)((double)top + log_sum);
    *loss = log_sum - ((double)cg_up(x[target]) - (double)top); /* small numbers, unlike lse and the logit */
}

template <typename S> CG_DEVICE void finish_empty_row(S *lse, double *loss) {
    *lse = 0;
    *loss = 0;
}

/* ---- plain: a block per row ---- */

template <typename T>
CG_GLOBAL void cross_entropy_kernel(const T *logits, const int32_t *targets, int64_t n_rows, int64_t V,
                                    cg_sum_of<T> *lse, double *loss, cg_device_fault *fault) {
    typedef cg_sum_of<T> S;
    for (int64_t t = blockIdx.x; t < n_rows; t += gridDim.x) {
        const T *x = logits + t * V;
        const int64_t target = target_of(targets, t, V, (int)threadIdx.x, fault);
        if (target < 0) {
            if (threadIdx.x == 0) finish_empty_row(&lse[t], &loss[t]);
            continue;
        }
        S top = -cg_infinity<S>, sum = 0;
        for (int64_t v = threadIdx.x; v < V; v += THREADS) top = cg_larger()(top, cg_up(x[v]));
        top = cg_block_max(top);
        for (int64_t v = threadIdx.x; v < V; v += THREADS) sum += exp_to_top(cg_up(x[v]), top);
        sum = cg_block_sum(sum);
        if (threadIdx.x == 0) finish_row(x, target, top, sum, &lse[t], &loss[t]);
    }
}

size_t cross_entropy_workspace(const cg_node *node) {
    return (size_t)node->in[0]->shape.dims[0] * sizeof(double); /* the loss of each row */
}

template <typename T> bool cross_entropy(const cg_run_args *args, cg_stream *stream) {
    const int64_t *dims = args->in[0].shape.dims;
    double *loss = (double *)args->workspace;
    return CG_LAUNCH(cross_entropy_kernel<T>, cg_blocks(dims[0], 1), THREADS, 0, stream,
                     (const T *)args->in[0].data, (const int32_t *)args->in[1].data, dims[0], dims[1],
                     (cg_sum_of<T> *)args->out[1].data, loss, args->fault) &&
           sum_parts(args, stream, loss, dims[0], (cg_sum_of<T> *)args->out[0].data);
}

/* May write in the place of logits. */
template <typename T>
CG_GLOBAL void cross_entropy_grad_kernel(const T *logits, const int32_t *targets, const cg_sum_of<T> *lse,
                                         const cg_sum_of<T> *dloss, T *dlogits, int64_t n_rows, int64_t V,
                                         cg_device_fault *fault) {
    typedef cg_sum_of<T> S;
    const S d = dloss[0];
    for (int64_t t = blockIdx.x; t < n_rows; t += gridDim.x) {
        const int64_t target = target_of(targets, t, V, (int)threadIdx.x, fault);
        for (int64_t v = threadIdx.x; v < V; v += THREADS) {
            S dx = 0;
            if (target >= 0) dx = d * cg_exp(cg_up(logits[t * V + v]) - lse[t]) - (v == target ? d : (S)0);
            dlogits[t * V + v] = cg_down<T>(dx);
        }
    }
}

template <typename T> bool cross_entropy_grad(const cg_run_args *args, cg_stream *stream) {
    const int64_t *dims = args->in[0].shape.dims;
    return CG_LAUNCH(cross_entropy_grad_kernel<T>, cg_blocks(dims[0], 1), THREADS, 0, stream,
                     (const T *)args->in[0].data, (const int32_t *)args->in[1].data,
                     (const cg_sum_of<T> *)args->in[2].data, (const cg_sum_of<T> *)args->in[3].data,
                     (T *)args->out[0].data, dims[0], dims[1], args->fault);
}

/* ---- fast: a team per row ---- */

bool fits(const cg_node *node) { return rows_are_packs(node->in[0]->dtype, node->in[0]->shape.dims[1]); }

template <typename T, int WARPS>
CG_GLOBAL void cross_entropy_packed_kernel(const T *logits, const int32_t *targets, int64_t n_rows, int64_t V,
                                           cg_sum_of<T> *lse, double *loss, cg_device_fault *fault) {
    typedef cg_sum_of<T> S;
    typedef team<WARPS> mine;
    constexpr int N = pack<T>::N;
    for (int64_t t = mine::first(); t < n_rows; t += mine::all()) {
        const T *x = logits + t * V;
        const int64_t target = target_of(targets, t, V, mine::lane(), fault);
        if (target < 0) {
            if (mine::lane() == 0) finish_empty_row(&lse[t], &loss[t]);
            continue;
        }
        S top = -cg_infinity<S>, sum = 0; /* NaN never is the top; it makes the sum NaN */
        for (int64_t p = mine::lane(); p < V / N; p += mine::LANES) {
            const pack<T> some = packs(x)[p];
            S most = cg_up(some.at[0]);
            for (int j = 1; j < N; j++) most = cg_max(cg_up(some.at[j]), most);
            if (most > top) {
                sum *= cg_exp(top - most);
                top = most;
            }
            for (int j = 0; j < N; j++) sum += exp_to_top(cg_up(some.at[j]), top);
        }
        const S all = mine::max(top);
        sum = mine::sum(top > -cg_infinity<S> ? sum * cg_exp(top - all) : sum);
        if (mine::lane() == 0) finish_row(x, target, all, sum, &lse[t], &loss[t]);
    }
}

template <typename T> bool cross_entropy_fast(const cg_run_args *args, cg_stream *stream) {
    const int64_t *dims = args->in[0].shape.dims;
    double *loss = (double *)args->workspace;
    const bool warp = row_for_a_warp(args->in[0].dtype, dims[1]);
    return CG_LAUNCH((warp ? cross_entropy_packed_kernel<T, 1> : cross_entropy_packed_kernel<T, TEAM_WARPS>),
                     cg_blocks(dims[0], warp ? TEAM_WARPS : 1), TEAM_THREADS, 0, stream,
                     (const T *)args->in[0].data, (const int32_t *)args->in[1].data, dims[0], dims[1],
                     (cg_sum_of<T> *)args->out[1].data, loss, args->fault) &&
           sum_parts(args, stream, loss, dims[0], (cg_sum_of<T> *)args->out[0].data);
}

template <typename T, int WARPS>
CG_GLOBAL void cross_entropy_grad_packed_kernel(const T *logits, const int32_t *targets,
                                                const cg_sum_of<T> *lse, const cg_sum_of<T> *dloss, T *dlogits,
                                                int64_t n_rows, int64_t V, cg_device_fault *fault) {
    typedef cg_sum_of<T> S;
    typedef team<WARPS> mine;
    constexpr int N = pack<T>::N;
    const S d = dloss[0];
    for (int64_t t = mine::first(); t < n_rows; t += mine::all()) {
        const int64_t target = target_of(targets, t, V, mine::lane(), fault);
        const S shift = lse[t];
        for (int64_t p = mine::lane(); p < V / N; p += mine::LANES) {
            pack<T> some;
            if (target >= 0) some = packs(logits + t * V)[p];
            for (int j = 0; j < N; j++) {
                S dx = 0;
                if (target >= 0) dx = d * cg_exp(cg_up(some.at[j]) - shift) - (p * N + j == target ? d : (S)0);
                some.at[j] = cg_down<T>(dx);
            }
            packs(dlogits + t * V)[p] = some;
        }
    }
}

template <typename T> bool cross_entropy_grad_fast(const cg_run_args *args, cg_stream *stream) {
    const int64_t *dims = args->in[0].shape.dims;
    const bool warp = row_for_a_warp(args->in[0].dtype, dims[1]);
    return CG_LAUNCH(
        (warp ? cross_entropy_grad_packed_kernel<T, 1> : cross_entropy_grad_packed_kernel<T, TEAM_WARPS>),
        cg_blocks(dims[0], warp ? TEAM_WARPS : 1), TEAM_THREADS, 0, stream, (const T *)args->in[0].data,
        (const int32_t *)args->in[1].data, (const cg_sum_of<T> *)args->in[2].data,
        (const cg_sum_of<T> *)args->in[3].data, (T *)args->out[0].data, dims[0], dims[1], args->fault);
}

} // namespace

extern "C" const cg_cuda_op cg_cuda_cross_entropy = {
    .op = "cross_entropy",
    .variants = {{.name = "plain",
                  .launch = {cross_entropy<float>, cross_entropy<double>, nullptr, cross_entropy<cg_bf16>},
                  .workspace = cross_entropy_workspace},
                 {.name = "fast",
                  .launch = {cross_entropy_fast<float>, cross_entropy_fast<double>, nullptr,
                             cross_entropy_fast<cg_bf16>},
                  .workspace = cross_entropy_workspace,
                  .fits = fits}},
    .describe = describe,
};

extern "C" const cg_cuda_op cg_cuda_cross_entropy_grad = {
    .op = "cross_entropy_grad",
    .variants = {{.name = "plain",
                  .launch = {cross_entropy_grad<float>, cross_entropy_grad<double>, nullptr,
                             cross_entropy_grad<cg_bf16>}},
                 {.name = "fast",
                  .launch = {cross_entropy_grad_fast<float>, cross_entropy_grad_fast<double>, nullptr,
                             cross_entropy_grad_fast<cg_bf16>},
                  .fits = fits}},
    .describe = describe,
};
