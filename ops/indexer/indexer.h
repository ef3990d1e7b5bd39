/* What the files of the indexer ops share: checks of data that names rows, the divisor of a loss, and fixed
 * cuts. The kernels they share are in ops/indexer/indexer_kernels.h. */
#ifndef CG_OPS_INDEXER_H
#define CG_OPS_INDEXER_H

#include "core/math/gemm.h"
#include "core/base/threads.h"
#include "ops/ops.h"

/* Gradients of the keys are sums over rows: so many partial sums over fixed shares of the rows, then added
 * in order, whatever the number of threads. */
enum { CG_KEY_PARTS = 16 };

/* Rows that a thread takes at once, in turns: the same rows in each of the ops, so that what it wrote is still in its
 * cache. Rows see more the later they come. */
enum { CG_ROW_CHUNK = 8 };

/* Heads, or keys, that one vector of ops/indexer/indexer_kernels.h holds. */
enum { CG_LANES = 8 };

/* Keys whose q.k are made together, and keys whose gradients are. */
enum { CG_KEYS = 2 * CG_LANES, CG_DEALT = 4 };

/* Keys whose q.k a backward kernel holds at once. */
enum { CG_KEY_TILE = 64 };

static inline int64_t cg_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline size_t cg_align_bytes(size_t bytes) { return (bytes + 63) & ~(size_t)63; }

/* Take the next aligned piece of a workspace; sizes are counted with cg_align_bytes. */
static inline void *cg_take(char **at, size_t bytes) {
    void *piece = *at;
    *at += cg_align_bytes(bytes);
    return piece;
}

/* Kept keys that ops/indexer/select.h ranks at once. */
enum { CG_RANKED = 2 * CG_LANES };

/* The most keys that it keeps to choose k. */
static inline int64_t cg_select_most(int64_t k) { return k + k / 8 + CG_LANES; }

/* Scratch of ops/indexer/select.h for the k best of n. */
static inline size_t cg_select_bytes(int64_t n, int64_t k, size_t real) {
    return cg_align_bytes((size_t)(n + CG_LANES) * real) +
           cg_align_bytes((size_t)(cg_select_most(k) + CG_RANKED) * real) +
           cg_align_bytes((size_t)(cg_select_most(k) + CG_LANES) * sizeof(int32_t));
}

/* True when the compressed rows that each row says it sees exist. The first row that does not fit is named. */
static inline bool cg_rows_fit(const cg_run_args *args, const int32_t *rows, int64_t T, int64_t C) {
    for (int64_t t = 0; t < T; t++) {
        int64_t visible = rows[t * CG_ROW_FIELDS + CG_ROW_VISIBLE];
        int64_t first = rows[t * CG_ROW_FIELDS + CG_ROW_COMPRESSED];
        if (visible == 0 || (visible > 0 && first >= 0 && first + visible <= C)) continue;
        return cg_fail(args->error, CG_BAD_INPUT,
                       "row %lld sees %lld compressed rows from %lld on, but there are %lld",
                       (long long)(args->first_row + t), (long long)visible, (long long)first, (long long)C);
    }
    return true;
}

/* True when every index of a list [T, K] is -1 or in 0..C-1. */
static inline bool cg_index_fits(const cg_run_args *args, const char *name, const int32_t *index, int64_t T,
                                 int64_t K, int64_t C) {
    int64_t bad = INT64_MAX;
#pragma omp parallel for reduction(min : bad) if (T * K > 65536)
    for (int64_t t = 0; t < T; t++) {
        bool fits = true;
        for (int64_t j = 0; j < K; j++) fits &= index[t * K + j] >= -1 && index[t * K + j] < C;
        if (!fits && t < bad) bad = t;
    }
    if (bad == INT64_MAX) return true;
    for (int64_t j = 0; j < K; j++) {
        int32_t i = index[bad * K + j];
        if (i >= -1 && i < C) continue;
        return cg_fail(args->error, CG_BAD_INPUT, "row %lld: %s[%lld] is %d, expected -1 or 0 to %lld",
                       (long long)(args->first_row + bad), name, (long long)j, i, (long long)C - 1);
    }
    return true;
}

/* What a sum over rows is divided by; 1 where that would be 0. */
static inline double cg_reduction_divisor(cg_reduction reduction, const int32_t *rows, int64_t T) {
    if (reduction == CG_REDUCE_SUM) return 1;
    int64_t n = 0;
    for (int64_t t = 0; t < T; t++)
        n += reduction == CG_REDUCE_MEAN_PHYSICAL || rows[t * CG_ROW_FIELDS + CG_ROW_REAL] != 0;
    return n > 0 ? (double)n : 1;
}

/* Bytes of scratch that key_grads of ops/indexer/indexer_kernels.h needs beside its results: `dots`. */
static inline size_t cg_key_dots_bytes(int64_t Hi, size_t real) {
    return (size_t)(CG_KEY_TILE * cg_ceil_div(Hi, CG_LANES) * CG_LANES) * real;
}

/* Keys in tiles, for ops/indexer/packed_keys.h. */
static inline size_t cg_packed_keys_bytes(int64_t C, int64_t Di, size_t real) {
    return cg_align_bytes((size_t)(cg_ceil_div(C, CG_KEYS) * CG_KEYS * Di) * real);
}

/* Scores of a row by packed_scores: whole tiles of keys, of which the first and the last may reach beyond what the row
 * sees. */
static inline int64_t cg_row_scores(int64_t C) { return C + 2 * CG_KEYS; }

/* Compressed rows that count for row t: what it sees if it is real. */
static inline int64_t cg_row_seen(const int32_t *rows, int64_t t) {
    return rows[t * CG_ROW_FIELDS + CG_ROW_REAL] ? rows[t * CG_ROW_FIELDS + CG_ROW_VISIBLE] : 0;
}

/* Cuts of ops/indexer/dense_teacher.h: keys of one product, and the logits that a thread holds, which fit into the
 * second-level cache unless one row alone has more. */
enum { CG_TEACHER_KEYS = 128, CG_TEACHER_ROWS = 16, CG_TEACHER_LOGITS = 131072 };
static inline int64_t cg_teacher_rows(int64_t H, int64_t C) {
    const int64_t rows = C > 0 && H > 0 ? CG_TEACHER_LOGITS / H / C : CG_TEACHER_ROWS;
    return rows < 1 ? 1 : rows > CG_TEACHER_ROWS ? CG_TEACHER_ROWS : rows;
}

/* Scratch of the tile products: the largest of whole and rest in both directions. */
static inline size_t cg_teacher_gemm_bytes(cg_dtype dtype, int64_t T, int64_t H, int64_t D, int64_t C) {
    const int64_t block = cg_teacher_rows(H, C), rows[2] = {T < block ? 0 : block, T % block};
    const int64_t keys[2] = {C < CG_TEACHER_KEYS ? 0 : CG_TEACHER_KEYS, C % CG_TEACHER_KEYS};
    size_t most = 0;
    for (int i = 0; i < 4; i++) {
        cg_gemm logits = cg_gemm_dense(dtype, false, true, rows[i / 2] * H, keys[i % 2], D);
        logits.ldc = C;
        const size_t bytes = cg_gemm_serial_workspace(&logits);
        if (bytes > most) most = bytes;
    }
    return most;
}

/* All scratch of one thread. */
static inline size_t cg_teacher_bytes(cg_dtype dtype, int64_t T, int64_t H, int64_t D, int64_t C) {
    const size_t real = cg_dtype_bytes(dtype), heads = (size_t)(cg_teacher_rows(H, C) * H);
    return cg_align_bytes(heads * (size_t)C * real) + 2 * cg_align_bytes(heads * real) +
           cg_align_bytes((size_t)H * sizeof(double)) +
           cg_align_bytes(cg_teacher_gemm_bytes(dtype, T, H, D, C));
}

/* The checks that infer of several ops makes. */
static inline bool cg_expect_rows(cg_infer *infer, int i, int64_t T, const char *because) {
    return cg_expect_dtype(infer, i, CG_I32) && cg_expect_dims(infer, i, 2) &&
           cg_expect_dim(infer, i, 0, T, because) &&
           cg_expect_dim(infer, i, 1, CG_ROW_FIELDS, "fields of a row");
}

static inline bool cg_expect_loss_attr(cg_infer *infer, cg_reduction reduction, double coeff) {
    if (reduction != CG_REDUCE_MEAN_REAL && reduction != CG_REDUCE_MEAN_PHYSICAL && reduction != CG_REDUCE_SUM)
        return cg_refuse(infer, "reduction is %d, which none of the three is", (int)reduction);
    if (!(coeff - coeff == 0)) return cg_refuse(infer, "coeff is %g, expected a finite number", coeff);
    return true;
}

/* Compressed rows are indexed by i32. */
static inline bool cg_expect_indexable(cg_infer *infer, int i) {
    if (infer->in[i]->shape.dims[0] <= INT32_MAX) return true;
    return cg_refuse(infer, "%s has %lld rows, more than an i32 index can name", cg_op_in_name(infer->op, i),
                     (long long)infer->in[i]->shape.dims[0]);
}

/* q [T,Hi,Di], w [T,Hi], k [C,Di] at inputs i, i+1, i+2. */
static inline bool cg_expect_index_inputs(cg_infer *infer, int i) {
    cg_value *const *in = infer->in + i;
    return cg_expect_real(infer, i) && cg_expect_dims(infer, i, 3) &&
           cg_expect_dtype(infer, i + 1, in[0]->dtype) && cg_expect_dims(infer, i + 1, 2) &&
           cg_expect_dim(infer, i + 1, 0, in[0]->shape.dims[0], "rows of the queries") &&
           cg_expect_dim(infer, i + 1, 1, in[0]->shape.dims[1], "heads of the queries") &&
           cg_expect_dtype(infer, i + 2, in[0]->dtype) && cg_expect_dims(infer, i + 2, 2) &&
           cg_expect_dim(infer, i + 2, 1, in[0]->shape.dims[2], "channels of the queries") &&
           cg_expect_indexable(infer, i + 2);
}

#endif
