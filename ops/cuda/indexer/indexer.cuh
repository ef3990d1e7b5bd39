/* Checks that kernels of the indexer ops share, with the sentences of ops/indexer/indexer.h. */
#ifndef CG_OPS_CUDA_INDEXER_CUH
#define CG_OPS_CUDA_INDEXER_CUH

#include "ops/cuda/reduce.cuh"

namespace {

/* ---- lists: index [T, K] of -1 or 0..C-1 ---- */

/* Entry i of a list, -1 for what is out of range too. That is reported as check `what` unless fault is NULL. */
CG_DEVICE int64_t listed(const int32_t *index, int64_t i, int64_t C, int what, cg_device_fault *fault) {
    const int32_t c = index[i];
    if (c >= -1 && c < C) return c;
    if (fault) cg_report(fault, what, i, c);
    return -1;
}

inline void describe_listed(const char *name, int64_t K, int64_t C, const cg_device_fault *fault,
                            cg_error *error) {
    cg_fail(error, CG_BAD_INPUT, "row %lld: %s[%lld] is %lld, expected -1 or 0 to %lld",
            (long long)(fault->place / K), name, (long long)(fault->place % K), (long long)fault->got[0],
            (long long)C - 1);
}

/* ---- rows [T, CG_ROW_FIELDS] ---- */

/* The compressed rows that a row sees. */
struct seen_rows {
    int64_t first, n;
};

/* What row t sees of C compressed rows; nothing where that does not exist, which is reported as check `what` unless
 * fault is NULL. */
CG_DEVICE seen_rows seen_of(const int32_t *rows, int64_t t, int64_t C, int what, cg_device_fault *fault) {
    const int64_t first = rows[t * CG_ROW_FIELDS + CG_ROW_COMPRESSED],
                  n = rows[t * CG_ROW_FIELDS + CG_ROW_VISIBLE];
    if (n > 0 && first >= 0 && first + n <= C) return {first, n};
    if (n != 0 && fault) cg_report(fault, what, t, n, first, C);
    return {0, 0};
}

inline void describe_seen(const cg_device_fault *fault, cg_error *error) {
    cg_fail(error, CG_BAD_INPUT, "row %lld sees %lld compressed rows from %lld on, but there are %lld",
            (long long)fault->place, (long long)fault->got[0], (long long)fault->got[1],
            (long long)fault->got[2]);
}

/* ---- scores ---- */

/* q.k of one head: fused, channels in order. */
template <typename T> CG_DEVICE cg_sum_of<T> index_dot(const T *q, const T *key, int64_t Di) {
    cg_sum_of<T> sum = 0;
    for (int64_t d = 0; d < Di; d++) sum = cg_fma(cg_up(q[d]), cg_up(key[d]), sum);
    return sum;
}

/* sum_h w[h] relu(q_h.key): fused, heads in order. q [Hi, Di], w [Hi]. */
template <typename T>
CG_DEVICE cg_sum_of<T> index_score(const T *q, const T *w, const T *key, int64_t Hi, int64_t Di) {
    cg_sum_of<T> score = 0;
    for (int64_t h = 0; h < Hi; h++)
        score = cg_fma(cg_up(w[h]), cg_relu(index_dot(q + h * Di, key, Di)), score);
    return score;
}

/* Indices of the K best of scores [n], counted from `first`, best first and then -1; the lower index is better where
 * scores are equal. By a whole block. A score's place is the number of better ones. Returns the first NaN, or -1, to all
 * threads; where there is one nothing is chosen. */
template <typename T>
CG_DEVICE int64_t select_by_rank(const T *score, int64_t n, int64_t K, int64_t first, int32_t *index) {
    int64_t behind = 0; /* of the first NaN, counted from the end: the largest is the first */
    for (int64_t j = threadIdx.x; j < n && !behind; j += blockDim.x)
        if (cg_is_nan(cg_up(score[j]))) behind = n - j;
    behind = cg_block_max(behind);
    for (int64_t j = threadIdx.x; j < K; j += blockDim.x) index[j] = -1;
    __syncthreads();
    if (behind) return n - behind;
    for (int64_t j = threadIdx.x; j < n; j += blockDim.x) {
        const cg_sum_of<T> mine = cg_up(score[j]);
        int64_t better = 0;
        for (int64_t i = 0; i < n; i++) {
            const cg_sum_of<T> other = cg_up(score[i]);
            better += other > mine || (other == mine && i < j);
        }
        if (better < K) index[better] = (int32_t)(first + j);
    }
    return -1;
}

} // namespace

#endif
