/* The loss that trains the indexer, and its gradient: see ops/indexer/indexer_kl.c. */
#include "ops/cuda/train/loss.cuh"

namespace {

enum { BAD_TEACHER = 1 };

void describe(const cg_run_args *args, const cg_device_fault *fault, cg_error *error) {
    const long long K = args->in[0].shape.dims[1];
    cg_fail(error, CG_BAD_INPUT, "row %lld: teacher[%lld] is not 0, but the score there is -inf",
            (long long)fault->place / K, (long long)fault->place % K);
}

/* ---- plain: a warp takes a row at a time and reads it as often as it needs it ---- */

constexpr int WARPS = 4, THREADS = WARPS * CG_WARP;

/* t from 0 to n - 1, shared by all warps of all blocks. */
#define FOR_ROWS(t, n)                                                                                         \
    for (int64_t t = (int64_t)blockIdx.x * WARPS + threadIdx.x / CG_WARP; t < (n);                             \
         t += (int64_t)gridDim.x * WARPS)

/* The largest score of a row, -inf when all slots are absent. */
template <typename T> CG_DEVICE cg_sum_of<T> row_top(const T *scores, int64_t K) {
    cg_sum_of<T> top = -cg_infinity<cg_sum_of<T>>;
    for (int64_t j = threadIdx.x % CG_WARP; j < K; j += CG_WARP) top = cg_larger()(top, cg_up(scores[j]));
    return cg_warp_max(top);
}

template <typename T> CG_DEVICE cg_sum_of<T> row_sum(const T *scores, int64_t K, cg_sum_of<T> top) {
    cg_sum_of<T> sum = 0;
    for (int64_t j = threadIdx.x % CG_WARP; j < K; j += CG_WARP) sum += cg_exp(cg_up(scores[j]) - top);
    return cg_warp_sum(sum);
}

template <typename T>
CG_GLOBAL void plain_kernel(const T *scores, const T *teacher, const int32_t *rows, T *kl, int64_t n_rows,
                            int64_t K, cg_device_fault *fault) {
    typedef cg_sum_of<T> S;
    FOR_ROWS(t, n_rows) {
        const T *s = scores + t * K, *goal = teacher + t * K;
        S sum = 0;
        if (rows[t * CG_ROW_FIELDS + CG_ROW_REAL]) {
            const S top = row_top(s, K);
            const S log_sum = top == -cg_infinity<S> ? 0 : cg_log(row_sum(s, K, top));
            for (int64_t j = threadIdx.x % CG_WARP; j < K; j += CG_WARP) {
                const S score = cg_up(s[j]), p = cg_up(goal[j]);
                if (p == 0) continue;
                if (score == -cg_infinity<S>) cg_report(fault, BAD_TEACHER, t * K + j);
                sum += p * (cg_log(p) - (score - top - log_sum));
            }
        }
        sum = cg_warp_sum(sum);
        if (threadIdx.x % CG_WARP == 0) kl[t] = cg_down<T>(sum);
    }
}

template <typename T> bool plain(const cg_run_args *args, cg_stream *stream) {
    const indexer_kl_attr *attr = (const indexer_kl_attr *)args->attr;
    const int64_t *dims = args->in[0].shape.dims;
    const int32_t *rows = (const int32_t *)args->in[2].data;
    T *loss = (T *)args->out[0].data, *kl = (T *)args->out[1].data;
    return CG_LAUNCH(plain_kernel<T>, cg_blocks(dims[0], WARPS), THREADS, 0, stream,
                     (const T *)args->in[0].data, (const T *)args->in[1].data, rows, kl, dims[0], dims[1],
                     args->fault) &&
           loss_of_rows<T>(args, stream, kl, rows, dims[0], attr->reduction, attr->coeff,
                           (loss_parts *)args->workspace, loss);
}

template <typename T>
CG_GLOBAL void plain_grad_kernel(const T *dloss, const T *scores, const T *teacher, const int32_t *rows,
                                 T *dscores, int64_t n_rows, int64_t K, const loss_parts *parts,
                                 indexer_kl_attr attr) {
    typedef cg_sum_of<T> S;
    const S factor = (S)((double)cg_up(dloss[0]) * attr.coeff / loss_divisor(parts, attr.reduction, n_rows));
    FOR_ROWS(t, n_rows) {
        const T *s = scores + t * K, *goal = teacher + t * K;
        const bool is_real = rows[t * CG_ROW_FIELDS + CG_ROW_REAL];
        S top = -cg_infinity<S>, share = 0;
        if (is_real && (top = row_top(s, K)) != -cg_infinity<S>) {
            S mass = 0;
            for (int64_t j = threadIdx.x % CG_WARP; j < K; j += CG_WARP) mass += cg_up(goal[j]);
            mass = cg_warp_sum(mass);
            share = mass / row_sum(s, K, top);
        }
        for (int64_t j = threadIdx.x % CG_WARP; j < K; j += CG_WARP) {
            S d = 0;
            if (top != -cg_infinity<S> && cg_up(s[j]) != -cg_infinity<S>)
                d = factor * (cg_exp(cg_up(s[j]) - top) * share - cg_up(goal[j])) + 0; /* no -0.0 */
            dscores[t * K + j] = cg_down<T>(d);
        }
    }
}

template <typename T> bool plain_grad(const cg_run_args *args, cg_stream *stream) {
    const indexer_kl_attr attr = *(const indexer_kl_attr *)args->attr;
    const int64_t *dims = args->in[1].shape.dims;
    const int32_t *rows = (const int32_t *)args->in[3].data;
    loss_parts *parts = (loss_parts *)args->workspace;
    return loss_rows(args, stream, rows, dims[0], parts) &&
           CG_LAUNCH(plain_grad_kernel<T>, cg_blocks(dims[0], WARPS), THREADS, 0, stream,
                     (const T *)args->in[0].data, (const T *)args->in[1].data, (const T *)args->in[2].data,
                     rows, (T *)args->out[0].data, dims[0], dims[1], parts, attr);
}

/* ---- fast: a warp takes a row at a time and reads it once, EACH slots per lane in registers ----
 *
 * T = 4096, K = 512: forward reads 8 bytes a slot, 17 MB, 3.9 us at 4.3 TB/s; backward reads 8 and writes 4, 5.9 us. An
 * exponential, a logarithm and some 30 instructions a slot are 60 million lanes' instructions, 0.2 us a thousand warps: memory
 * is the limit. All of a lane's loads are on their way at once, 32 for 512 slots, so that 8 warps keep a multiprocessor's share
 * of memory busy. Expected: 80 % of the floor, beside two small launches for the sum over rows and the count of real ones. */

template <int EACH> struct row_values {
    float x[EACH];
    CG_MEMBER row_values(const float *row, int64_t K, float behind) {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int64_t j = i * CG_WARP + threadIdx.x % CG_WARP;
            x[i] = j < K ? row[j] : behind;
        }
    }
    CG_MEMBER float top() const {
        float most = -cg_infinity<float>;
#pragma unroll
        for (int i = 0; i < EACH; i++) most = cg_larger()(most, x[i]);
        return cg_warp_max(most);
    }
    CG_MEMBER float sum() const {
        float all = 0;
#pragma unroll
        for (int i = 0; i < EACH; i++) all += x[i];
        return cg_warp_sum(all);
    }
};

template <int EACH>
CG_GLOBAL void fast_kernel(const float *scores, const float *teacher, const int32_t *rows, float *kl,
                           int64_t n_rows, int64_t K, cg_device_fault *fault) {
    FOR_ROWS(t, n_rows) {
        float sum = 0;
        if (rows[t * CG_ROW_FIELDS + CG_ROW_REAL]) {
            const row_values<EACH> s(scores + t * K, K, -cg_infinity<float>), goal(teacher + t * K, K, 0);
            const float top = s.top();
            row_values<EACH> e = s;
#pragma unroll
            for (int i = 0; i < EACH; i++) e.x[i] = cg_exp(s.x[i] - top);
            const float log_sum = cg_log(e.sum());
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                if (goal.x[i] == 0) continue;
                if (s.x[i] == -cg_infinity<float>)
                    cg_report(fault, BAD_TEACHER, t * K + i * CG_WARP + threadIdx.x % CG_WARP);
                sum += goal.x[i] * (cg_log(goal.x[i]) - (s.x[i] - top - log_sum));
            }
        }
        sum = cg_warp_sum(sum);
        if (threadIdx.x % CG_WARP == 0) kl[t] = sum;
    }
}

bool fast(const cg_run_args *args, cg_stream *stream) {
    const indexer_kl_attr *attr = (const indexer_kl_attr *)args->attr;
    const int64_t *dims = args->in[0].shape.dims;
    const float *scores = (const float *)args->in[0].data, *teacher = (const float *)args->in[1].data;
    const int32_t *rows = (const int32_t *)args->in[2].data;
    float *loss = (float *)args->out[0].data, *kl = (float *)args->out[1].data;
    return (dims[1] <= 16 * CG_WARP ? CG_LAUNCH(fast_kernel<16>, cg_blocks(dims[0], WARPS), THREADS, 0, stream,
                                                scores, teacher, rows, kl, dims[0], dims[1], args->fault)
                                    : CG_LAUNCH(fast_kernel<32>, cg_blocks(dims[0], WARPS), THREADS, 0, stream,
                                                scores, teacher, rows, kl, dims[0], dims[1], args->fault)) &&
           loss_of_rows<float>(args, stream, kl, rows, dims[0], attr->reduction, attr->coeff,
                               (loss_parts *)args->workspace, loss);
}

template <int EACH>
CG_GLOBAL void fast_grad_kernel(const float *dloss, const float *scores, const float *teacher,
                                const int32_t *rows, float *dscores, int64_t n_rows, int64_t K,
                                const loss_parts *parts, indexer_kl_attr attr) {
    const float factor = (float)((double)dloss[0] * attr.coeff / loss_divisor(parts, attr.reduction, n_rows));
    FOR_ROWS(t, n_rows) {
        const bool is_real = rows[t * CG_ROW_FIELDS + CG_ROW_REAL];
        const int64_t length = is_real ? K : 0; /* padding may hold anything */
        const row_values<EACH> s(scores + t * K, length, -cg_infinity<float>), goal(teacher + t * K, length, 0);
        const float top = s.top();
        row_values<EACH> e = s;
#pragma unroll
        for (int i = 0; i < EACH; i++) e.x[i] = s.x[i] == -cg_infinity<float> ? 0 : cg_exp(s.x[i] - top);
        const float share = goal.sum() / e.sum();
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int64_t j = i * CG_WARP + threadIdx.x % CG_WARP;
            if (j >= K) continue;
            dscores[t * K + j] =
                s.x[i] == -cg_infinity<float> ? 0 : factor * (e.x[i] * share - goal.x[i]) + 0; /* no -0.0 */
        }
    }
}

bool fast_grad(const cg_run_args *args, cg_stream *stream) {
    const indexer_kl_attr attr = *(const indexer_kl_attr *)args->attr;
    const int64_t *dims = args->in[1].shape.dims;
    const float *dloss = (const float *)args->in[0].data, *scores = (const float *)args->in[1].data,
                *teacher = (const float *)args->in[2].data;
    const int32_t *rows = (const int32_t *)args->in[3].data;
    float *dscores = (float *)args->out[0].data;
    loss_parts *parts = (loss_parts *)args->workspace;
    return loss_rows(args, stream, rows, dims[0], parts) &&
           (dims[1] <= 16 * CG_WARP
                ? CG_LAUNCH(fast_grad_kernel<16>, cg_blocks(dims[0], WARPS), THREADS, 0, stream, dloss, scores,
                            teacher, rows, dscores, dims[0], dims[1], parts, attr)
                : CG_LAUNCH(fast_grad_kernel<32>, cg_blocks(dims[0], WARPS), THREADS, 0, stream, dloss, scores,
                            teacher, rows, dscores, dims[0], dims[1], parts, attr));
}

bool fits(const cg_node *node) { return cg_dim(node->in[0], 1) <= 32 * CG_WARP; }
bool fits_grad(const cg_node *node) { return cg_dim(node->in[1], 1) <= 32 * CG_WARP; }

} // namespace

extern "C" const cg_cuda_op cg_cuda_indexer_kl = {
    .op = "indexer_kl",
    .variants = {{.name = "plain", .launch = {plain<float>, plain<double>}, .workspace = loss_workspace},
                 {.name = "fast", .launch = {fast}, .workspace = loss_workspace, .fits = fits}},
    .describe = describe,
};

extern "C" const cg_cuda_op cg_cuda_indexer_kl_grad = {
    .op = "indexer_kl_grad",
    .variants = {{.name = "plain",
                  .launch = {plain_grad<float>, plain_grad<double>},
                  .workspace = loss_workspace},
                 {.name = "fast", .launch = {fast_grad}, .workspace = loss_workspace, .fits = fits_grad}},
};
