/* Sparse attention and its gradient: see ops/csa/csa_attention.c for the formulas. */
#include "ops/cuda/csa/csa_attention_fast.cuh"
#include "ops/cuda/csa/csa_attention_grad_fast.cuh"

namespace {

enum { WARPS = 4, THREADS = 32 * WARPS };

/* ---- wrong data ---- */

CG_DEVICE bool facts_fit(const int32_t *row, int64_t t, int64_t C, bool chooses) {
    const int64_t position = row[CG_ROW_POSITION], first = row[CG_ROW_COMPRESSED],
                  visible = row[CG_ROW_VISIBLE];
    if (position != -1 && (position < 0 || row[CG_ROW_START] < 0 || row[CG_ROW_START] + position != t))
        return false;
    return visible == 0 || !chooses || (visible > 0 && first >= 0 && first + visible <= C);
}

/* Places of a row: its facts, then its K chosen rows. The sinks come behind all rows. */
template <typename S>
CG_GLOBAL void check_data_kernel(const int32_t *rows, const int32_t *topk, const S *sink, int64_t T, int64_t H,
                                 int64_t C, int64_t K, cg_device_fault *fault) {
    CG_FOR(i, T * (K + 1) + H) {
        if (i >= T * (K + 1)) {
            check_sink(sink, i - T * (K + 1), fault);
            continue;
        }
        const int64_t t = i / (K + 1), k = i % (K + 1) - 1;
        const int32_t *row = rows + t * CG_ROW_FIELDS;
        const int64_t first = row[CG_ROW_COMPRESSED], visible = row[CG_ROW_VISIBLE];
        if (k < 0) {
            if (!facts_fit(row, t, C, topk != nullptr))
                cg_report(fault, 1, i, row[CG_ROW_START], row[CG_ROW_POSITION], visible, first);
        } else {
            const int64_t j = topk[t * K + k];
            if (j != -1 && (j < first || j - first >= visible)) cg_report(fault, 1, i, j, visible, first);
        }
    }
}

void describe(const cg_run_args *args, const cg_device_fault *fault, cg_error *error) {
    if (fault->what == BAD_SINK) return describe_sink(fault, error);
    const bool chooses = args->in[TOPK].shape.n_dims > 0;
    const int64_t K = chooses ? args->in[TOPK].shape.dims[1] : 0, C = chooses ? args->in[CKV].shape.dims[0] : 0;
    const long long t = (long long)(fault->place / (K + 1)), k = (long long)(fault->place % (K + 1)) - 1;
    const int64_t *got = fault->got;
    if (k < 0)
        cg_fail(error, CG_BAD_INPUT,
                "row %lld: start %d, position %d, %d compressed rows visible from %d on do not fit %lld rows "
                "and %lld compressed ones",
                t, (int)got[0], (int)got[1], (int)got[2], (int)got[3], (long long)args->in[Q].shape.dims[0],
                (long long)C);
    else
        cg_fail(
            error, CG_BAD_INPUT,
            "topk of row %lld, place %lld is %d, expected -1 or one of the %d compressed rows it sees, from "
            "%d on",
            t, k, (int)got[0], (int)got[1], (int)got[2]);
}

template <typename S> bool check_data_of(const cg_run_args *args, cg_stream *stream) {
    const int64_t T = args->in[Q].shape.dims[0], H = args->in[Q].shape.dims[1];
    const int32_t *topk = (const int32_t *)args->in[TOPK].data;
    const int64_t C = topk ? args->in[CKV].shape.dims[0] : 0, K = topk ? args->in[TOPK].shape.dims[1] : 0;
    return CG_LAUNCH(check_data_kernel<S>, cg_blocks(T * (K + 1) + H, 256), 256, 0, stream,
                     (const int32_t *)args->in[ROWS].data, topk, (const S *)args->in[SINK].data, T, H, C, K,
                     args->fault);
}

bool check_data(const cg_run_args *args, cg_stream *stream) {
    return args->in[SINK].dtype == CG_F64 ? check_data_of<double>(args, stream)
                                          : check_data_of<float>(args, stream);
}

/* ---- the keys of a row ---- */

/* A row's keys are n_window kv rows, then K places for chosen ones; NULL where a place is empty. */
template <typename T> struct row_keys {
    int64_t low, n_window, n;
    const T *kv, *ckv;
    listed_keys chosen;
    int64_t D;
    CG_MEMBER row_keys(const attention<T> &a, int64_t t)
        : low(window_low(a.rows, t, a.W)), n_window(t + 1 - low), n(n_window + a.K), kv(a.kv),
          ckv(a.ckv), chosen{a.topk + t * a.K, a.K, a.C}, D(a.D) {}
    CG_MEMBER const T *operator[](int64_t i) const {
        if (i < n_window) return kv + (low + i) * D;
        const int64_t j = i < n ? chosen[i - n_window] : -1;
        return j >= 0 ? ckv + j * D : nullptr;
    }
};

/* A warp sums over keys for so many columns of D at a time. */
enum { LANE_COLUMNS = 8, PASS = 32 * LANE_COLUMNS };

/* sum[c] += weight of each lane's key times column d0 + lane + 32 c of it, in order of the lanes; lane i has key number
 * first + i. weights: [32] in shared memory, the warp's own. */
template <typename T>
CG_DEVICE void add_weighted_keys(const attention<T> &a, const row_keys<T> &keys, int64_t first,
                                 cg_sum_of<T> weight, int64_t d0, cg_sum_of<T> *weights,
                                 cg_sum_of<T> sum[LANE_COLUMNS]) {
    const int64_t lane = threadIdx.x % CG_WARP;
    __syncwarp();
    weights[lane] = weight;
    __syncwarp();
    for (int64_t i = 0; i < CG_WARP && first + i < keys.n; i++) {
        const T *key = keys[first + i];
        for (int c = 0; key && c < LANE_COLUMNS; c++) {
            const int64_t d = d0 + lane + CG_WARP * c;
            if (d < a.D) sum[c] = cg_fma(weights[i], cg_up(key[d]), sum[c]);
        }
    }
}

/* ---- forward: a warp per row and head, a key per lane ---- */

/* Window and chosen rows are summed apart, each relative to its own largest logit, so that both log-sums are exact
 * however far apart they lie. share, top: of the teacher, NULL when none is wanted. */
template <typename T>
CG_GLOBAL void attention_kernel(attention<T> a, T *out, cg_sum_of<T> *lse, cg_sum_of<T> *window_lse,
                                cg_teacher teacher, double *share, cg_sum_of<T> *top) {
    typedef cg_sum_of<T> S;
    CG_SHARED(S[WARPS][CG_WARP], weights);
    const int64_t lane = threadIdx.x % CG_WARP, warp = threadIdx.x / CG_WARP;
    for (int64_t i = (int64_t)blockIdx.x * WARPS + warp; i < a.T_ * a.H; i += (int64_t)gridDim.x * WARPS) {
        const int64_t t = i / a.H, h = i % a.H;
        const row_keys<T> keys(a, t);
        const T *q = a.q + i * a.D;
        int64_t d0 = 0;
        do {
            log_sum<S> part[2] = {log_sum_of(a.sink[h]), log_sum_of(-cg_infinity<S>)};
            S sum[2][LANE_COLUMNS] = {};
            for (int p = 0; p < 2; p++) {
                const int64_t end = p ? keys.n : keys.n_window;
                for (int64_t first = p ? keys.n_window : 0; first < end; first += CG_WARP) {
                    const T *key = first + lane < end ? keys[first + lane] : nullptr;
                    const S x = key ? a.scale * dot(q, key, a.D) : -cg_infinity<S>;
                    const S highest = cg_warp_max(x);
                    if (highest == -cg_infinity<S>) continue; /* no key among these */
                    const S factor = raise_top(part[p], cg_larger()(part[p].top, highest));
                    const S e = exp_below(x, part[p].top);
                    part[p].sum += cg_warp_sum(e);
                    for (int c = 0; c < LANE_COLUMNS; c++) sum[p][c] *= factor;
                    add_weighted_keys(a, keys, first, e, d0, weights[warp], sum[p]);
                }
            }
            const log_sum<S> all = log_sum_plus(part[0], part[1]);
            for (int c = 0; c < LANE_COLUMNS; c++) {
                const int64_t d = d0 + lane + CG_WARP * c;
                const S both =
                    sum[0][c] * exp_below(part[0].top, all.top) + sum[1][c] * exp_below(part[1].top, all.top);
                if (d < a.D) out[i * a.D + d] = cg_down<T>(all.sum == 0 ? (S)0 : both / all.sum);
            }
            if (lane == 0 && d0 == 0) {
                lse[i] = log_of(all);
                window_lse[i] = log_of(part[0]);
                if (share) {
                    const double rest = teacher == CG_TEACHER_FULL
                                            ? (double)part[0].top + log((double)part[0].sum)
                                        : teacher == CG_TEACHER_SINK ? (double)a.sink[h]
                                                                     : -cg_infinity<double>;
                    share[i] = teacher_share(part[1], rest);
                    top[i] = part[1].top;
                }
            }
            d0 += PASS;
        } while (d0 < a.D);
    }
}

template <typename T>
CG_GLOBAL void teacher_kernel(attention<T> a, const double *share, const cg_sum_of<T> *top,
                              cg_sum_of<T> *teacher) {
    for (int64_t t = blockIdx.x; t < a.T_; t += gridDim.x)
        teach_row(a.q + t * a.H * a.D, a.ckv, listed_keys{a.topk + t * a.K, a.K, a.C},
                  teacher_heads<cg_sum_of<T>>(share + t * a.H, top + t * a.H, a.H), a.H, a.D, a.scale,
                  teacher + t * a.K);
}

size_t sum_bytes(const cg_node *node) { return node->in[Q]->dtype == CG_F64 ? sizeof(double) : sizeof(float); }

size_t attention_workspace(const cg_node *node) {
    const size_t rows = (size_t)(cg_dim(node->in[Q], 0) * cg_dim(node->in[Q], 1));
    if (((const csa_attention_attr *)node->attr)->teacher == CG_TEACHER_NONE) return 0;
    return cg_piece(rows * sizeof(double)) + rows * sum_bytes(node);
}

template <forward_form FORM> bool fast(const cg_run_args *args, cg_stream *stream) {
    return check_data(args, stream) && fast_attention<FORM>(args, stream);
}

template <typename T> bool csa_attention(const cg_run_args *args, cg_stream *stream) {
    typedef cg_sum_of<T> S;
    const attention<T> a = attention_of<T>(args);
    const cg_teacher mode = ((const csa_attention_attr *)args->attr)->teacher;
    const bool taught = mode != CG_TEACHER_NONE;
    double *share = taught ? (double *)args->workspace : nullptr;
    cg_sum_of<T> *top =
        (cg_sum_of<T> *)((char *)args->workspace + cg_piece((size_t)(a.T_ * a.H) * sizeof(double)));
    return check_data(args, stream) &&
           CG_LAUNCH(attention_kernel<T>, cg_blocks(a.T_ * a.H, WARPS), THREADS, 0, stream, a,
                     (T *)args->out[0].data, (S *)args->out[1].data, (S *)args->out[2].data, mode, share,
                     top) &&
           (!taught || CG_LAUNCH(teacher_kernel<T>, cg_blocks(a.T_, 1), THREADS, 0, stream, a, share, top,
                                 (S *)args->out[3].data));
}

/* ---- backward ----
 *
 * A row with dout = 0 is passed over, so that nothing it sees comes in. */

/* live[t]: dout[t] [H * D] is not all zeros; NaN is not zero. */
template <typename T> CG_GLOBAL void live_rows_kernel(const T *dout, int64_t T_, int64_t n, int32_t *live) {
    for (int64_t t = blockIdx.x; t < T_; t += gridDim.x) {
        int some = 0;
        for (int64_t i = threadIdx.x; i < n; i += THREADS) some |= cg_up(dout[t * n + i]) != 0;
        some = __syncthreads_or(some);
        if (threadIdx.x == 0) live[t] = some != 0;
    }
}

/* dq, and delta[t,h] = sum_j p_j dout.key_j: a warp per row and head, a key per lane. */
template <typename T>
CG_GLOBAL void query_grad_kernel(attention<T> a, const cg_sum_of<T> *lse, const T *dout, const int32_t *live,
                                 T *dq, cg_sum_of<T> *delta) {
    typedef cg_sum_of<T> S;
    CG_SHARED(S[WARPS][CG_WARP], weights);
    const int64_t lane = threadIdx.x % CG_WARP, warp = threadIdx.x / CG_WARP;
    for (int64_t i = (int64_t)blockIdx.x * WARPS + warp; i < a.T_ * a.H; i += (int64_t)gridDim.x * WARPS) {
        const row_keys<T> keys(a, i / a.H);
        const int64_t n = live[i / a.H] ? keys.n : 0;
        const T *q = a.q + i * a.D, *g = dout + i * a.D;
        S s = 0;
        for (int64_t k = lane; k < n; k += CG_WARP)
            if (const T *key = keys[k]) s += cg_exp(a.scale * dot(q, key, a.D) - lse[i]) * dot(g, key, a.D);
        s = cg_warp_sum(s);
        if (lane == 0) delta[i] = s;
        for (int64_t d0 = 0; d0 < a.D; d0 += PASS) {
            S sum[LANE_COLUMNS] = {};
            for (int64_t first = 0; first < n; first += CG_WARP) {
                const T *key = keys[first + lane];
                S dx = 0;
                if (key) dx = cg_exp(a.scale * dot(q, key, a.D) - lse[i]) * (dot(g, key, a.D) - s);
                add_weighted_keys(a, keys, first, dx, d0, weights[warp], sum);
            }
            for (int c = 0; c < LANE_COLUMNS; c++) {
                const int64_t d = d0 + lane + CG_WARP * c;
                if (d < a.D) dq[i * a.D + d] = cg_down<T>(a.scale * sum[c]);
            }
        }
    }
}

/* dsink[h] = - sum_t exp(sink - lse) delta: a block per head. */
template <typename T>
CG_GLOBAL void sink_grad_kernel(attention<T> a, const cg_sum_of<T> *lse, const int32_t *live,
                                const cg_sum_of<T> *delta, cg_sum_of<T> *dsink) {
    for (int64_t h = blockIdx.x; h < a.H; h += gridDim.x) {
        double sum = 0;
        for (int64_t t = threadIdx.x; t < a.T_; t += THREADS)
            if (live[t] && delta[t * a.H + h] != 0) /* a row that sees nothing may have the lse -inf */
                sum -= exp((double)a.sink[h] - (double)lse[t * a.H + h]) * (double)delta[t * a.H + h];
        sum = cg_block_sum(sum);
        if (threadIdx.x == 0) dsink[h] = (cg_sum_of<T>)sum;
    }
}

/* The rows that read kv row j: t from j on, as far as a window reaches. */
struct window_readers {
    const int32_t *rows;
    int64_t j, T, W;
    CG_MEMBER int64_t n() const { return cg_min(W, T - j); }
    CG_MEMBER int64_t operator[](int64_t i) const { return window_low(rows, j + i, W) <= j ? j + i : -1; }
};

/* The rows that chose compressed row j, in rising order. */
struct chosen_readers {
    const int64_t *start;
    const int32_t *reader;
    int64_t j;
    CG_MEMBER int64_t n() const { return start[j + 1] - start[j]; }
    CG_MEMBER int64_t operator[](int64_t i) const { return reader[start[j] + i]; }
};

/* dkey = sum over the rows that read it, and heads, of p dout + dx q: a block per key. First each thread has a pair of
 * row and head and finds p and dx, then each has columns and adds the pairs up in order. */
template <typename T, typename Readers>
CG_DEVICE void key_grad(const attention<T> &a, const cg_sum_of<T> *lse, const T *dout, const int32_t *live,
                        const cg_sum_of<T> *delta, const T *key, const Readers &readers, T *dkey) {
    typedef cg_sum_of<T> S;
    CG_SHARED(S[THREADS], weight);
    CG_SHARED(S[THREADS], dlogit);
    CG_SHARED(int64_t[THREADS], pair); /* t * H + h, -1: none */
    const int COLUMNS = 4;
    const int64_t n = readers.n() * a.H;
    for (int64_t d0 = 0; d0 < a.D; d0 += COLUMNS * THREADS) {
        S sum[COLUMNS] = {};
        for (int64_t first = 0; first < n; first += THREADS) {
            const int64_t mine = first + threadIdx.x, t = mine < n ? readers[mine / a.H] : -1;
            const int64_t i = t >= 0 && live[t] ? t * a.H + mine % a.H : -1;
            __syncthreads();
            pair[threadIdx.x] = i;
            if (i >= 0) {
                const S p = cg_exp(a.scale * dot(a.q + i * a.D, key, a.D) - lse[i]);
                weight[threadIdx.x] = p;
                dlogit[threadIdx.x] = a.scale * p * (dot(dout + i * a.D, key, a.D) - delta[i]);
            }
            __syncthreads();
            for (int64_t s = 0; s < THREADS && first + s < n; s++) {
                if (pair[s] < 0) continue;
                const T *g = dout + pair[s] * a.D, *q = a.q + pair[s] * a.D;
                for (int c = 0; c < COLUMNS; c++) {
                    const int64_t d = d0 + threadIdx.x + THREADS * c;
                    if (d < a.D) sum[c] += weight[s] * cg_up(g[d]) + dlogit[s] * cg_up(q[d]);
                }
            }
        }
        for (int c = 0; c < COLUMNS; c++) {
            const int64_t d = d0 + threadIdx.x + THREADS * c;
            if (d < a.D) dkey[d] = cg_down<T>(sum[c]);
        }
    }
}

template <typename T>
CG_GLOBAL void window_grad_kernel(attention<T> a, const cg_sum_of<T> *lse, const T *dout, const int32_t *live,
                                  const cg_sum_of<T> *delta, T *dkv) {
    for (int64_t j = blockIdx.x; j < a.T_; j += gridDim.x)
        key_grad(a, lse, dout, live, delta, a.kv + j * a.D, window_readers{a.rows, j, a.T_, a.W},
                 dkv + j * a.D);
}

template <typename T>
CG_GLOBAL void chosen_grad_kernel(attention<T> a, const cg_sum_of<T> *lse, const T *dout, const int32_t *live,
                                  const cg_sum_of<T> *delta, const int64_t *start, const int32_t *reader,
                                  T *dckv) {
    for (int64_t j = blockIdx.x; j < a.C; j += gridDim.x)
        key_grad(a, lse, dout, live, delta, a.ckv + j * a.D, chosen_readers{start, reader, j}, dckv + j * a.D);
}

/* Scratch of the gradient: delta, live, and who chose which row. */
struct grad_scratch {
    void *delta;
    int32_t *live;
    inversion chosen;
    size_t bytes;
    grad_scratch(void *workspace, int64_t T, int64_t H, int64_t C, int64_t K, size_t sum_bytes) {
        carver from = {(char *)workspace, 0};
        delta = from.carve((size_t)(T * H) * sum_bytes);
        live = (int32_t *)from.carve((size_t)T * sizeof(int32_t));
        chosen = inversion_in(from, T, K, C);
        bytes = from.used;
    }
};

size_t attention_grad_workspace(const cg_node *node) {
    return grad_scratch(nullptr, cg_dim(node->in[Q], 0), cg_dim(node->in[Q], 1), cg_dim(node->in[CKV], 0),
                        cg_dim(node->in[TOPK], 1), sum_bytes(node))
        .bytes;
}

template <typename T> bool csa_attention_grad(const cg_run_args *args, cg_stream *stream) {
    typedef cg_sum_of<T> S;
    const attention<T> a = attention_of<T>(args);
    const S *lse = (const S *)args->in[LSE].data;
    const T *dout = (const T *)args->in[DOUT].data;
    const grad_scratch s(args->workspace, a.T_, a.H, a.C, a.K, sizeof(S));
    S *delta = (S *)s.delta;
    bool ok =
        check_data(args, stream) &&
        CG_LAUNCH(live_rows_kernel<T>, cg_blocks(a.T_, 1), THREADS, 0, stream, dout, a.T_, a.H * a.D, s.live) &&
        CG_LAUNCH(query_grad_kernel<T>, cg_blocks(a.T_ * a.H, WARPS), THREADS, 0, stream, a, lse, dout, s.live,
                  (T *)args->out[0].data, delta) &&
        CG_LAUNCH(window_grad_kernel<T>, cg_blocks(a.T_, 1), THREADS, 0, stream, a, lse, dout, s.live, delta,
                  (T *)args->out[1].data) &&
        CG_LAUNCH(sink_grad_kernel<T>, cg_blocks(a.H, 1), THREADS, 0, stream, a, lse, s.live, delta,
                  (S *)args->out[2].data);
    if (ok && a.topk)
        ok = invert(args, stream, a.topk, s.chosen) &&
             CG_LAUNCH(chosen_grad_kernel<T>, cg_blocks(a.C, 1), THREADS, 0, stream, a, lse, dout, s.live,
                       delta, s.chosen.start, s.chosen.reader, (T *)args->out[3].data);
    return ok;
}

template <grad_form FORM> bool fast_grad(const cg_run_args *args, cg_stream *stream) {
    const attention<cg_bf16> a = attention_of<cg_bf16>(args);
    const float *lse = (const float *)args->in[LSE].data;
    const cg_bf16 *dout = (const cg_bf16 *)args->in[DOUT].data;
    return with_grad_shape<FORM>(a.D, [&](auto shape) {
        typedef decltype(shape) Shape;
        typedef gather_shape<Shape> G;
        const fast_grad_scratch<Shape> s(args->workspace, a.T_, a.H, a.C, a.K, a.W);
        bool ok = check_data(args, stream) &&
                  CG_LAUNCH(live_rows_kernel<cg_bf16>, cg_blocks(a.T_, 1), THREADS, 0, stream, dout, a.T_,
                            a.H * a.D, s.live) &&
                  (!a.topk || invert(args, stream, a.topk, s.chosen));
        int64_t t0 = 0;
        for (int chunk = 0; ok && (chunk == 0 || t0 < a.T_); chunk++) {
            key_parts<Shape> parts = s.parts;
            parts.t0 = t0;
            parts.n_rows = a.T_ - t0 < s.rows_at_once ? a.T_ - t0 : s.rows_at_once;
            ok = CG_LAUNCH(fast_grad_kernel<Shape>, cg_blocks(parts.n_rows * parts.groups, 1), FAST_THREADS,
                           sizeof(grad_shared<Shape>), stream, a, lse, dout, s.live,
                           (cg_bf16 *)args->out[0].data, s.delta, parts) &&
                 CG_LAUNCH(gather_window_kernel<Shape>, cg_blocks(parts.n_rows + parts.W, G::KEYS), G::THREADS,
                           0, stream, a, parts, s.live, s.waiting[chunk % 2], s.waiting[(chunk + 1) % 2],
                           (cg_bf16 *)args->out[1].data) &&
                 (!a.topk ||
                  CG_LAUNCH(gather_chosen_kernel<Shape>, cg_blocks(a.C, G::KEYS), G::THREADS, 0, stream, a,
                            parts, s.live, s.chosen, s.next, s.sums, (cg_bf16 *)args->out[3].data));
            t0 += parts.n_rows;
        }
        return ok && CG_LAUNCH(sink_grad_kernel<cg_bf16>, cg_blocks(a.H, 1), THREADS, 0, stream, a, lse, s.live,
                               s.delta, (float *)args->out[2].data);
    });
}

} // namespace

extern "C" const cg_cuda_op cg_cuda_csa_attention = {
    .op = "csa_attention",
    .variants = {{.name = "plain",
                  .launch = {csa_attention<float>, csa_attention<double>, nullptr, csa_attention<cg_bf16>},
                  .workspace = attention_workspace},
                 {.name = "fast",
                  .launch = {nullptr, nullptr, nullptr, fast<FORWARD_FAST>},
                  .workspace = fast_workspace<FORWARD_FAST>,
                  .fits = fast_fits,
                  .shared = fast_shared<FORWARD_FAST>,
                  .least_sm = 80},
                 {.name = "fast_wide",
                  .launch = {nullptr, nullptr, nullptr, fast<FORWARD_WIDE>},
                  .workspace = fast_workspace<FORWARD_WIDE>,
                  .fits = fast_wide_fits,
                  .shared = fast_shared<FORWARD_WIDE>,
                  .least_sm = 80},
                 {.name = "wgmma",
                  .launch = {nullptr, nullptr, nullptr, fast<FORWARD_GROUPS>},
                  .workspace = fast_workspace<FORWARD_GROUPS>,
                  .fits = fast_wide_fits,
                  .shared = fast_shared<FORWARD_GROUPS>,
                  .wgmma = true}},
    .describe = describe,
};

extern "C" const cg_cuda_op cg_cuda_csa_attention_grad = {
    .op = "csa_attention_grad",
    .variants = {{.name = "plain",
                  .launch = {csa_attention_grad<float>, csa_attention_grad<double>, nullptr,
                             csa_attention_grad<cg_bf16>},
                  .workspace = attention_grad_workspace},
                 {.name = "fast",
                  .launch = {nullptr, nullptr, nullptr, fast_grad<GRAD_FAST>},
                  .workspace = fast_grad_workspace<GRAD_FAST>,
                  .fits = fast_grad_fits,
                  .shared = fast_grad_shared<GRAD_FAST>,
                  .least_sm = 80},
                 {.name = "fast_wide",
                  .launch = {nullptr, nullptr, nullptr, fast_grad<GRAD_WIDE>},
                  .workspace = fast_grad_workspace<GRAD_WIDE>,
                  .fits = fast_wide_grad_fits,
                  .shared = fast_grad_shared<GRAD_WIDE>,
                  .least_sm = 80},
                 {.name = "wgmma",
                  .launch = {nullptr, nullptr, nullptr, fast_grad<GRAD_GROUPS>},
                  .workspace = fast_grad_workspace<GRAD_GROUPS>,
                  .fits = fast_wide_grad_fits,
                  .shared = fast_grad_shared<GRAD_GROUPS>,
                  .wgmma = true}},
    .describe = describe,
};
