/* The loss of the indexer over all rows that a token sees, and its gradients: see ops/indexer/indexer_dense_loss.c for the
 * formulas.
 *
 * Neither [T, C] nor [T, H, C] exists. Forward goes over a row's keys twice: for the log-sums of the teacher's heads, then
 * for the masses (sums over heads, relative to the largest share) and the scores at once,
 *
 *   kl = sum_j m_j (log m_j - s_j) / M - log M + lse(s),   M = sum_j m_j,   its sums in f64.
 *
 * Backward knows M and lse(s) of all rows first. Then, for some rows at a time, ds [rows, C] lies in the workspace: the
 * rows' dq and dw are sums over keys, and every key adds what these rows give it to its dk, in order of the rows.
 *
 * Arithmetic, for H = 64, D = 512, Hi = 64, Di = 128, 4096 rows that see half of C = 1024 keys, 2.1 M pairs, on an H200:
 *
 *                                                   per pair        all         67 TFLOP/s f32   790 TFLOP/s bf16
 *   forward   teacher twice 4 H D, score 2 Hi Di    147 kFLOP       309 GFLOP   4.6 ms           0.4 ms
 *   backward  teacher, score, dq and dk             131 kFLOP       275 GFLOP   4.1 ms           0.35 ms
 *   memory    q 2 H D and q_index per row           ~160 KB in f32  0.6 GB      0.15 ms
 *
 * Only this plain form exists, in all dtypes without tensor cores: a number is loaded for each multiplication, 32 per cycle
 * and multiprocessor from the first-level cache where 128 could be multiplied, so that a fifth of the f32 rate is expected:
 * 40 - 50 ms. It is the loss of the warm-up, a small share of a training run. Next: teacher and scores of a row's heads as
 * products with tiles of keys, as csa_attention_fast.cuh and indexer_topk.cu make them, rows in order as now. */
#include "ops/cuda/carver.cuh"
#include "ops/cuda/csa/csa_teacher.cuh"
#include "ops/cuda/indexer/indexer.cuh"
#include "ops/cuda/train/loss.cuh"

namespace {

enum { Q_INDEX, W, K_INDEX, Q, CKV, WINDOW_LSE, SINK, ROWS };
enum { BAD_ROW = 1 };
enum { WARPS = 4, THREADS = 32 * WARPS };

template <typename T> struct dense {
    int64_t T_, Hi, Di, H, D, C;
    const T *q_index, *w, *k_index, *q, *ckv;
    const cg_sum_of<T> *sink, *window_lse;
    const int32_t *rows;
    cg_sum_of<T> scale;
    /* The compressed rows that count for row t: what it sees if it is real. */
    CG_MEMBER key_range keys(int64_t t) const {
        const seen_rows seen = seen_of(rows, t, C, BAD_ROW, nullptr);
        return {seen.first, rows[t * CG_ROW_FIELDS + CG_ROW_REAL] ? seen.n : 0};
    }
    CG_MEMBER cg_sum_of<T> score(int64_t t, int64_t j) const {
        return index_score(q_index + t * Hi * Di, w + t * Hi, k_index + j * Di, Hi, Di);
    }
    CG_MEMBER cg_sum_of<T> mass(int64_t t, int64_t j, const teacher_heads<cg_sum_of<T>> &heads) const {
        return key_mass(q + t * H * D, ckv + j * D, heads, H, D, scale);
    }
};

template <typename T> dense<T> dense_of(const cg_tensor *in, const indexer_dense_loss_attr *attr) {
    return {.T_ = in[Q].shape.dims[0],
            .Hi = in[Q_INDEX].shape.dims[1],
            .Di = in[Q_INDEX].shape.dims[2],
            .H = in[Q].shape.dims[1],
            .D = in[Q].shape.dims[2],
            .C = in[CKV].shape.dims[0],
            .q_index = (const T *)in[Q_INDEX].data,
            .w = (const T *)in[W].data,
            .k_index = (const T *)in[K_INDEX].data,
            .q = (const T *)in[Q].data,
            .ckv = (const T *)in[CKV].data,
            .sink = (const cg_sum_of<T> *)in[SINK].data,
            .window_lse = (const cg_sum_of<T> *)in[WINDOW_LSE].data,
            .rows = (const int32_t *)in[ROWS].data,
            .scale = (cg_sum_of<T>)attr->scale};
}

template <typename T> CG_GLOBAL void check_data_kernel(dense<T> a, cg_device_fault *fault) {
    CG_FOR(t, a.T_) seen_of(a.rows, t, a.C, BAD_ROW, fault);
    CG_FOR(h, a.sink ? a.H : 0) check_sink(a.sink, h, fault);
}

void describe(const cg_run_args *, const cg_device_fault *fault, cg_error *error) {
    if (fault->what == BAD_SINK) return describe_sink(fault, error);
    describe_seen(fault, error);
}

/* ---- forward ---- */

/* Top and share of every row and head of the teacher: a warp each. */
template <typename T> CG_GLOBAL void teacher_shares_kernel(dense<T> a, double *share, cg_sum_of<T> *top) {
    for (int64_t i = (int64_t)blockIdx.x * WARPS + threadIdx.x / CG_WARP; i < a.T_ * a.H;
         i += (int64_t)gridDim.x * WARPS) {
        const log_sum<cg_sum_of<T>> all = head_log_sum(a.q + i * a.D, a.ckv, a.keys(i / a.H), a.D, a.scale);
        if (threadIdx.x % CG_WARP) continue;
        const double rest = a.window_lse ? (double)a.window_lse[i]
                            : a.sink     ? (double)a.sink[i % a.H]
                                         : -cg_infinity<double>;
        share[i] = teacher_share(all, rest);
        top[i] = all.top;
    }
}

/* Of a row: the sum of masses, and the log-sum of scores. */
template <typename S> struct row_sums {
    double mass;
    log_sum<S> scores;
};

/* A block per row. Either kl or sums may be NULL. */
template <typename T>
CG_GLOBAL void row_sums_kernel(dense<T> a, const double *share, const cg_sum_of<T> *top, cg_sum_of<T> *kl,
                               row_sums<cg_sum_of<T>> *sums) {
    typedef cg_sum_of<T> S;
    for (int64_t t = blockIdx.x; t < a.T_; t += gridDim.x) {
        const key_range keys = a.keys(t);
        const teacher_heads<S> heads(share + t * a.H, top + t * a.H, a.H);
        double mass = 0, logs = 0;
        log_sum<S> scores = log_sum_of(-cg_infinity<S>);
        for (int64_t k = threadIdx.x; k < keys.n; k += THREADS) {
            const S m = a.mass(t, keys[k], heads), s = a.score(t, keys[k]);
            scores = log_sum_plus(scores, log_sum_of(s));
            mass += (double)m;
            if (m != 0) logs += (double)m * ((double)cg_log(m) - (double)s);
        }
        mass = cg_block_sum(mass);
        logs = cg_block_sum(logs);
        const S highest = cg_block_max(scores.top);
        scores = {highest, cg_block_sum(scores.sum * exp_below(scores.top, highest))};
        if (threadIdx.x) continue;
        const bool some = keys.n > 0 && highest != -cg_infinity<S>;
        if (kl)
            kl[t] = some ? (S)(logs / mass - log(mass) + (double)scores.top + log((double)scores.sum)) : (S)0;
        if (sums) sums[t] = {mass, scores};
    }
}

/* Scratch; the gradient has more. */
struct scratch {
    loss_parts *parts;
    double *share;
    void *top;
    /* gradient */
    void *sums, *ds, *dk;
    int64_t rows_at_once;
    size_t bytes;
    scratch(void *workspace, int64_t T, int64_t H, int64_t C, int64_t Di, size_t real, bool grad) {
        carver from = {(char *)workspace, 0};
        parts = (loss_parts *)from.carve(sizeof(loss_parts));
        share = (double *)from.carve((size_t)(T * H) * sizeof(double));
        top = from.carve((size_t)(T * H) * real);
#ifdef CG_CUDA_HOST
        const int64_t most = 256; /* small tests go through all turns */
#else
        const int64_t most = 4 << 20;
#endif
        rows_at_once = most / (C ? C : 1);
        if (rows_at_once < 1) rows_at_once = 1;
        if (rows_at_once > T) rows_at_once = T;
        if (grad) {
            sums = from.carve((size_t)T * sizeof(row_sums<double>));
            ds = from.carve((size_t)(rows_at_once * C) * real);
            dk = from.carve((size_t)(C * Di) * real);
        }
        bytes = from.used;
    }
};

size_t workspace_bytes(const cg_node *node, int first, bool grad) {
    cg_value *const *in = node->in + first;
    return scratch(nullptr, cg_dim(in[Q], 0), cg_dim(in[Q], 1), cg_dim(in[CKV], 0), cg_dim(in[Q_INDEX], 2),
                   in[Q]->dtype == CG_F64 ? sizeof(double) : sizeof(float), grad)
        .bytes;
}

size_t loss_scratch(const cg_node *node) { return workspace_bytes(node, 0, false); }
size_t grad_scratch(const cg_node *node) { return workspace_bytes(node, 1, true); }

/* The two walks over all keys. */
template <typename T>
bool walk_keys(const cg_run_args *args, cg_stream *stream, const dense<T> &a, const scratch &s,
               cg_sum_of<T> *kl) {
    typedef cg_sum_of<T> S;
    return CG_LAUNCH(check_data_kernel<T>, cg_blocks(a.T_ + a.H, 256), 256, 0, stream, a, args->fault) &&
           CG_LAUNCH(teacher_shares_kernel<T>, cg_blocks(a.T_ * a.H, WARPS), THREADS, 0, stream, a, s.share,
                     (S *)s.top) &&
           CG_LAUNCH(row_sums_kernel<T>, cg_blocks(a.T_, 1), THREADS, 0, stream, a, s.share, (S *)s.top, kl,
                     kl ? nullptr : (row_sums<S> *)s.sums);
}

template <typename T> bool indexer_dense_loss(const cg_run_args *args, cg_stream *stream) {
    typedef cg_sum_of<T> S;
    const indexer_dense_loss_attr *attr = (const indexer_dense_loss_attr *)args->attr;
    const dense<T> a = dense_of<T>(args->in, attr);
    const scratch s(args->workspace, a.T_, a.H, a.C, a.Di, sizeof(S), false);
    S *kl = (S *)args->out[1].data;
    return walk_keys(args, stream, a, s, kl) && loss_of_rows(args, stream, kl, a.rows, a.T_, attr->reduction,
                                                             attr->coeff, s.parts, (S *)args->out[0].data);
}

/* ---- backward: rows t0 .. t0+n_rows-1 at a time ---- */

/* ds [n_rows, C] where it is seen: a block per row. */
template <typename T>
CG_GLOBAL void dscores_kernel(dense<T> a, const double *share, const cg_sum_of<T> *top,
                              const row_sums<cg_sum_of<T>> *sums, const loss_parts *parts,
                              const cg_sum_of<T> *dloss, double coeff, cg_reduction reduction, int64_t t0,
                              int64_t n_rows, cg_sum_of<T> *ds) {
    typedef cg_sum_of<T> S;
    const S factor = (S)((double)dloss[0] * coeff / loss_divisor(parts, reduction, a.T_));
    for (int64_t r = blockIdx.x; r < n_rows; r += gridDim.x) {
        const int64_t t = t0 + r;
        const key_range keys = a.keys(t);
        const teacher_heads<S> heads(share + t * a.H, top + t * a.H, a.H);
        const row_sums<S> sum = sums[t];
        const bool some = sum.scores.top != -cg_infinity<S>;
        for (int64_t k = threadIdx.x; k < keys.n; k += THREADS) {
            const S target = a.mass(t, keys[k], heads) / (S)sum.mass;
            const S p = cg_exp(a.score(t, keys[k]) - sum.scores.top) / sum.scores.sum;
            ds[r * a.C + keys[k]] = some ? factor * (p - target) + 0 : (S)0;
        }
    }
}

/* dq and dw: a block per row and head. First a thread has a key and finds what it adds, then it has a channel. */
template <typename T>
CG_GLOBAL void dense_queries_kernel(dense<T> a, const cg_sum_of<T> *ds, int64_t t0, int64_t n_rows, T *dq,
                                    T *dw) {
    typedef cg_sum_of<T> S;
    CG_SHARED(S[THREADS], factor); /* of each key in dq */
    for (int64_t i = blockIdx.x; i < n_rows * a.Hi; i += gridDim.x) {
        const int64_t r = i / a.Hi, head = t0 * a.Hi + i;
        const key_range keys = a.keys(t0 + r);
        const T *q = a.q_index + head * a.Di;
        const S weight = cg_up(a.w[head]);
        int64_t d0 = 0;
        do {
            const int64_t d = d0 + threadIdx.x;
            S dw_mine = 0, dq_mine = 0;
            for (int64_t k0 = 0; k0 < keys.n; k0 += THREADS) {
                const int64_t k = k0 + threadIdx.x;
                factor[threadIdx.x] = 0;
                if (k < keys.n) {
                    const S of_key = index_dot(q, a.k_index + keys[k] * a.Di, a.Di),
                            dscore = ds[r * a.C + keys[k]];
                    if (of_key > 0) {
                        factor[threadIdx.x] = weight * dscore;
                        dw_mine += dscore * of_key;
                    }
                }
                __syncthreads();
                for (int n = 0; n < THREADS && k0 + n < keys.n && d < a.Di; n++)
                    dq_mine += factor[n] * cg_up(a.k_index[keys[k0 + n] * a.Di + d]);
                __syncthreads();
            }
            if (d < a.Di) dq[head * a.Di + d] = cg_down<T>(dq_mine);
            dw_mine = cg_block_sum(dw_mine);
            if (d == 0) dw[head] = cg_down<T>(dw_mine);
            d0 += THREADS;
        } while (d0 < a.Di);
    }
}

/* dk: a block per key, adding to what earlier rows gave it. First a thread has a row and head, then a channel. */
template <typename T>
CG_GLOBAL void dense_keys_kernel(dense<T> a, const cg_sum_of<T> *ds, int64_t t0, int64_t n_rows,
                                 cg_sum_of<T> *sums, T *dk) {
    typedef cg_sum_of<T> S;
    CG_SHARED(S[THREADS], factor); /* of each row and head in dk */
    for (int64_t j = blockIdx.x; j < a.C; j += gridDim.x)
        for (int64_t d0 = 0; d0 < a.Di; d0 += THREADS) {
            const int64_t d = d0 + threadIdx.x, n = n_rows * a.Hi;
            S sum = t0 > 0 && d < a.Di ? sums[j * a.Di + d] : (S)0;
            for (int64_t i0 = 0; i0 < n; i0 += THREADS) {
                const int64_t i = i0 + threadIdx.x, r = i / a.Hi, head = t0 * a.Hi + i;
                factor[threadIdx.x] = 0;
                if (i < n) {
                    const key_range keys = a.keys(t0 + r);
                    if (j >= keys.first && j - keys.first < keys.n &&
                        index_dot(a.q_index + head * a.Di, a.k_index + j * a.Di, a.Di) > 0)
                        factor[threadIdx.x] = ds[r * a.C + j] * cg_up(a.w[head]);
                }
                __syncthreads();
                for (int m = 0; m < THREADS && i0 + m < n && d < a.Di; m++)
                    if (factor[m] != 0) sum += factor[m] * cg_up(a.q_index[(t0 * a.Hi + i0 + m) * a.Di + d]);
                __syncthreads();
            }
            if (d >= a.Di) continue;
            if (t0 + n_rows < a.T_)
                sums[j * a.Di + d] = sum;
            else
                dk[j * a.Di + d] = cg_down<T>(sum);
        }
}

template <typename T> bool indexer_dense_loss_grad(const cg_run_args *args, cg_stream *stream) {
    typedef cg_sum_of<T> S;
    const indexer_dense_loss_attr *attr = (const indexer_dense_loss_attr *)args->attr;
    const dense<T> a = dense_of<T>(args->in + 1, attr);
    const scratch s(args->workspace, a.T_, a.H, a.C, a.Di, sizeof(S), true);
    T *dq = (T *)args->out[0].data, *dw = (T *)args->out[1].data, *dk = (T *)args->out[2].data;
    S *ds = (S *)s.ds;
    bool ok = walk_keys<T>(args, stream, a, s, nullptr) && loss_rows(args, stream, a.rows, a.T_, s.parts);
    int64_t t0 = 0;
    do { /* once even without rows: dk is 0 then */
        const int64_t left = a.T_ - t0, n_rows = left < s.rows_at_once ? left : s.rows_at_once;
        ok = ok &&
             CG_LAUNCH(dscores_kernel<T>, cg_blocks(n_rows, 1), THREADS, 0, stream, a, s.share, (S *)s.top,
                       (row_sums<S> *)s.sums, s.parts, (const S *)args->in[0].data, attr->coeff,
                       attr->reduction, t0, n_rows, ds) &&
             CG_LAUNCH(dense_queries_kernel<T>, cg_blocks(n_rows * a.Hi, 1), THREADS, 0, stream, a, ds, t0,
                       n_rows, dq, dw) &&
             CG_LAUNCH(dense_keys_kernel<T>, cg_blocks(a.C, 1), THREADS, 0, stream, a, ds, t0, n_rows,
                       (S *)s.dk, dk);
        t0 += n_rows;
    } while (ok && t0 < a.T_);
    return ok;
}

} // namespace

extern "C" const cg_cuda_op cg_cuda_indexer_dense_loss = {
    .op = "indexer_dense_loss",
    .variants = {{.name = "plain",
                  .launch = {indexer_dense_loss<float>, indexer_dense_loss<double>, nullptr,
                             indexer_dense_loss<cg_bf16>},
                  .workspace = loss_scratch}},
    .describe = describe,
};

extern "C" const cg_cuda_op cg_cuda_indexer_dense_loss_grad = {
    .op = "indexer_dense_loss_grad",
    .variants = {{.name = "plain",
                  .launch = {indexer_dense_loss_grad<float>, indexer_dense_loss_grad<double>, nullptr,
                             indexer_dense_loss_grad<cg_bf16>},
                  .workspace = grad_scratch}},
    .describe = describe,
};
