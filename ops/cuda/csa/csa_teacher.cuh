/* What csa_attention, csa_teacher_at and indexer_dense_loss share: softmax over keys that come by in pieces, and the
 * indexer's teacher of a row, in logarithms (ops/csa/csa_teacher_at.c has the formulas). */
#ifndef CG_OPS_CUDA_CSA_TEACHER_CUH
#define CG_OPS_CUDA_CSA_TEACHER_CUH

#include "ops/cuda/reduce.cuh"

namespace {

/* ---- wrong data ---- */

enum { BAD_SINK = 2 }; /* place: its head, number: what it is */

/* Sink h must be a number, or -inf: see ops/csa/sinks.h. */
template <typename S> CG_DEVICE void check_sink(const S *sink, int64_t h, cg_device_fault *fault) {
    if (!(sink[h] < cg_infinity<S>)) cg_report(fault, BAD_SINK, h, 0, 0, 0, 0, (double)sink[h]);
}

inline void describe_sink(const cg_device_fault *fault, cg_error *error) {
    cg_fail(error, CG_BAD_INPUT, "sink of head %lld is %s, expected a number or -inf", (long long)fault->place,
            fault->number == fault->number ? "inf" : "NaN");
}

/* ---- sums ---- */

/* sum_i exp(x_i) as sum * exp(top), top being the largest x_i so far; of nothing: 0 * exp(-inf). */
template <typename S> struct log_sum { S top, sum; };

template <typename S> CG_DEVICE log_sum<S> log_sum_of(S x) { return {x, x == -cg_infinity<S> ? (S)0 : (S)1}; }

/* exp(x - top), 0 for x = -inf whatever top is. */
template <typename S> CG_DEVICE S exp_below(S x, S top) {
    return x == -cg_infinity<S> ? (S)0 : cg_exp(x - top);
}

template <typename S> CG_DEVICE S log_of(log_sum<S> a) { return a.top + cg_log(a.sum); }

/* Raise the top to one that is at least as large; returns the factor of what was taken relative to the old one. */
template <typename S> CG_DEVICE S raise_top(log_sum<S> &a, S top) {
    const S factor = exp_below(a.top, top);
    a.sum *= factor;
    a.top = top;
    return factor;
}

template <typename S> CG_DEVICE log_sum<S> log_sum_plus(log_sum<S> a, log_sum<S> b) {
    const S top = cg_larger()(a.top, b.top);
    return {top, a.sum * exp_below(a.top, top) + b.sum * exp_below(b.top, top)};
}

/* The log-sum of a warp's 32 lanes, the same in all. */
template <typename S> CG_DEVICE log_sum<S> warp_log_sum(log_sum<S> mine) {
    const S top = cg_warp_max(mine.top);
    return {top, cg_warp_sum(mine.sum * exp_below(mine.top, top))};
}

/* sum_d a[d] b[d] */
template <typename T> CG_DEVICE cg_sum_of<T> dot(const T *a, const T *b, int64_t n) {
    cg_sum_of<T> sum = 0;
    for (int64_t d = 0; d < n; d++) sum = cg_fma(cg_up(a[d]), cg_up(b[d]), sum);
    return sum;
}

/* Log of what a head's weight in the teacher is for exponentials relative to its top: -log(exp(rest - top) + sum). rest:
 * log of what stands in the denominator beside the listed keys. In f64, so that only ratios of heads are rounded. */
template <typename S> CG_DEVICE double teacher_share(log_sum<S> keys, double rest) {
    if (keys.top == -cg_infinity<S>) return -cg_infinity<double>;
    const double gap = rest - (double)keys.top, above = gap > 0 ? gap : 0;
    return -above - log((gap > 0 ? 1 : exp(gap)) + (double)keys.sum * exp(-above));
}

/* The keys of a list; -1: none. Whatever stands there, nothing outside 0..C-1 is read. */
struct listed_keys {
    const int32_t *index;
    int64_t n, C;
    CG_MEMBER int64_t operator[](int64_t k) const { return index[k] >= 0 && index[k] < C ? index[k] : -1; }
};

/* n keys from `first` on. */
struct key_range {
    int64_t first, n;
    CG_MEMBER int64_t operator[](int64_t k) const { return first + k; }
};

/* Log-sum of a head's logits over its keys, by a warp, a key per lane: q [D]. */
template <typename T, typename Keys>
CG_DEVICE log_sum<cg_sum_of<T>> head_log_sum(const T *q, const T *ckv, Keys keys, int64_t D,
                                             cg_sum_of<T> scale) {
    typedef cg_sum_of<T> S;
    log_sum<S> mine = log_sum_of(-cg_infinity<S>);
    for (int64_t k = threadIdx.x % CG_WARP; k < keys.n; k += CG_WARP)
        if (keys[k] >= 0) mine = log_sum_plus(mine, log_sum_of(scale * dot(q, ckv + keys[k] * D, D)));
    return warp_log_sum(mine);
}

/* What a row's heads bring to its teacher: share and top [H], and the largest share. Shares are taken relative to it: a
 * sum of masses that is divided away is at least 1. */
template <typename S> struct teacher_heads {
    const double *share;
    const S *top;
    double largest;
    CG_MEMBER teacher_heads(const double *shares, const S *tops, int64_t H)
        : share(shares), top(tops), largest(-cg_infinity<double>) {
        for (int64_t h = 0; h < H; h++) largest = share[h] > largest ? share[h] : largest;
    }
    /* What head h adds to the mass of a key with logit x. */
    CG_MEMBER S mass(int64_t h, S x) const { return cg_exp(x - top[h] + (S)(share[h] - largest)); }
};

/* The mass of a key over all heads: q [H, D]. */
template <typename T>
CG_DEVICE cg_sum_of<T> key_mass(const T *q, const T *key, const teacher_heads<cg_sum_of<T>> &heads, int64_t H,
                                int64_t D, cg_sum_of<T> scale) {
    cg_sum_of<T> mass = 0;
    for (int64_t h = 0; h < H; h++) mass += heads.mass(h, scale * dot(q + h * D, key, D));
    return mass;
}

/* One row's teacher over its keys, by a whole block: q [H, D] -> teacher [n]. */
template <typename T, typename Keys>
CG_DEVICE void teach_row(const T *q, const T *ckv, Keys keys, const teacher_heads<cg_sum_of<T>> &heads,
                         int64_t H, int64_t D, cg_sum_of<T> scale, cg_sum_of<T> *teacher) {
    typedef cg_sum_of<T> S;
    double sum = 0;
    for (int64_t k = threadIdx.x; k < keys.n; k += blockDim.x) {
        const int64_t j = keys[k];
        const S mass = j >= 0 ? key_mass(q, ckv + j * D, heads, H, D, scale) : (S)0;
        teacher[k] = mass;
        sum += (double)mass;
    }
    sum = cg_block_sum(sum);
    if (sum == 0) return; /* no key */
    for (int64_t k = threadIdx.x; k < keys.n; k += blockDim.x) teacher[k] *= (S)(1 / sum);
}

} // namespace

#endif
