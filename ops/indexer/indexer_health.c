/* How good an indexer is: sums over the rows where selecting matters.
 *
 *   scores [T, K], teacher [T, K], topk [T, K] i32   the chosen rows, their index scores and sparse teacher
 *   w [T, Hi]   q [T, H, D]   ckv [C, D]   window_lse [T, H]   rows [T, CG_ROW_FIELDS]
 *   -> health [CG_HEALTH_FIELDS], a constant
 *
 * A row matters when it is real and sees more compressed rows than K. Over those rows:
 *
 *   ROWS         how many there are; divide by it
 *   KL_UNIFORM   sum_j teacher log(teacher * n), n chosen rows: the KL of knowing nothing
 *   KL           as in indexer_kl, unscaled; captured = 1 - KL / KL_UNIFORM
 *   RECALL       share of the dense teacher's own K largest that was chosen; equal ones go to the lower index
 *   MASS         the dense teacher's mass on the chosen rows
 *   TOP1_MISSED  1 when the dense teacher's largest row was not chosen
 *   NEGATIVE     share of the Hi head weights that are negative
 *   DISTANCE     mean over the chosen rows of position - (first position of the group), in tokens
 *
 * The dense teacher is the full one over all visible rows (ops/indexer/dense_teacher.h), made for a block of
 * rows at a time. Sums are made over CG_KEY_PARTS fixed shares of the rows, then over the shares in order.
 *
 * Saved: nothing, no gradient. Recompute: same bits.
 * Refuses: shapes that differ, ratio < 1; at run time an index that is neither -1 nor seen by its row
 */
#ifndef REAL

#include "ops/attributes.h"
#include "ops/indexer/indexer.h"

enum { SCORES, TEACHER_AT, TOPK, W, Q, CKV, WINDOW_LSE, ROWS };

static bool indexer_health_infer(cg_infer *infer) {
    const indexer_health_attr *attr = infer->attr;
    cg_value *const *in = infer->in;
    if (!cg_expect_real(infer, Q) || !cg_expect_dtype(infer, SCORES, in[Q]->dtype) ||
        !cg_expect_dims(infer, SCORES, 2) || !cg_expect_same(infer, TEACHER_AT, SCORES) ||
        !cg_expect_dtype(infer, TOPK, CG_I32) || !cg_expect_dims(infer, TOPK, 2))
        return false;
    const int64_t T = in[SCORES]->shape.dims[0], K = in[SCORES]->shape.dims[1];
    if (!cg_expect_dim(infer, TOPK, 0, T, "rows of the scores") ||
        !cg_expect_dim(infer, TOPK, 1, K, "columns of the scores") ||
        !cg_expect_dtype(infer, W, in[Q]->dtype) || !cg_expect_dims(infer, W, 2) ||
        !cg_expect_dim(infer, W, 0, T, "rows of the scores") || !cg_expect_dims(infer, Q, 3) ||
        !cg_expect_dim(infer, Q, 0, T, "rows of the scores") || !cg_expect_dtype(infer, CKV, in[Q]->dtype) ||
        !cg_expect_dims(infer, CKV, 2) ||
        !cg_expect_dim(infer, CKV, 1, in[Q]->shape.dims[2], "channels of q") ||
        !cg_expect_indexable(infer, CKV) || !cg_expect_dtype(infer, WINDOW_LSE, in[Q]->dtype) ||
        !cg_expect_dims(infer, WINDOW_LSE, 2) ||
        !cg_expect_dim(infer, WINDOW_LSE, 0, T, "rows of the scores") ||
        !cg_expect_dim(infer, WINDOW_LSE, 1, in[Q]->shape.dims[1], "heads of q") ||
        !cg_expect_rows(infer, ROWS, T, "rows of the scores"))
        return false;
    if (in[Q]->shape.dims[1] < 1) return cg_refuse(infer, "q has no head, but a teacher needs at least one");
    if (attr->ratio < 1) return cg_refuse(infer, "ratio is %lld, expected 1 or more", (long long)attr->ratio);
    if (!(attr->scale - attr->scale == 0))
        return cg_refuse(infer, "scale is %g, expected a finite number", attr->scale);
    cg_infer_out(infer, 0, in[Q]->dtype, CG_SHAPE(CG_HEALTH_FIELDS));
    return true;
}

/* One thread's piece: a block of targets; for one row the K best of them, and two rows for the KL. */
static size_t health_piece(cg_dtype dtype, const int64_t q[3], int64_t C, int64_t K) {
    const size_t real = cg_dtype_bytes(dtype);
    return cg_teacher_bytes(dtype, q[0], q[1], q[2], C) +
           cg_align_bytes((size_t)(cg_teacher_rows(q[1], C) * C) * real) +
           2 * cg_align_bytes((size_t)K * real) + cg_align_bytes((size_t)K * sizeof(int32_t)) +
           cg_select_bytes(C, K, real);
}

/* The sums of each share, in f64, then each thread's piece. */
static size_t indexer_health_workspace(const cg_node *node) {
    return cg_align_bytes(CG_KEY_PARTS * CG_HEALTH_FIELDS * sizeof(double)) +
           (size_t)cg_thread_slots() * health_piece(node->in[Q]->dtype, node->in[Q]->shape.dims,
                                                    node->in[CKV]->shape.dims[0],
                                                    node->in[SCORES]->shape.dims[1]);
}

/* True when every index of a row that matters is -1 or seen by it. */
static bool health_lists_fit(const cg_run_args *args, const int32_t *topk, const int32_t *rows, int64_t T,
                             int64_t K) {
    for (int64_t t = 0; t < T; t++) {
        const int32_t first = rows[t * CG_ROW_FIELDS + CG_ROW_COMPRESSED];
        const int64_t end = first + cg_row_seen(rows, t);
        for (int64_t j = 0; end - first > K && j < K; j++) {
            const int32_t i = topk[t * K + j];
            if (i != -1 && (i < first || i >= end))
                return cg_fail(args->error, CG_BAD_INPUT,
                               "row %lld: topk[%lld] is %d, but the row sees %d to %lld",
                               (long long)(args->first_row + t), (long long)j, i, first, (long long)end - 1);
        }
    }
    return true;
}

#define CG_KERNEL_FILE "ops/indexer/indexer_health.c"
#include "ops/kernel.h"

/* Half of all pairs are visible in one long segment. */
static cg_cost indexer_health_cost(const cg_node *node) {
    const int64_t *q = node->in[Q]->shape.dims;
    const double pairs = (double)q[0] * (double)node->in[CKV]->shape.dims[0] / 2;
    return (cg_cost){.flops = pairs * (double)q[1] * (2 * (double)q[2] + 4), .bytes = cg_node_bytes(node)};
}

/* Rows that see 1, 3, 3 of 4 compressed rows; the list has room for 2, so two rows matter. */
#define SCORES_3_2                                                                                             \
    {                                                                                                          \
        .shape = CG_DIMS(3, 2), .real = (double[]) { .5, -__builtin_inf(), 1, -.5, .25, 2 }                    \
    }
#define TEACHER_3_2                                                                                            \
    {                                                                                                          \
        .shape = CG_DIMS(3, 2), .real = (double[]) { 1, 0, .25, .75, .5, .5 }                                  \
    }
#define LIST(last)                                                                                             \
    {                                                                                                          \
        .shape = CG_DIMS(3, 2), .i32 = (int32_t[]) { 0, -1, 2, 0, 1, last }                                    \
    }
#define MAIN                                                                                                   \
    {.shape = CG_DIMS(3, 5)}, {.shape = CG_DIMS(3, 2, 3)}, {.shape = CG_DIMS(4, 3)}, { .shape = CG_DIMS(3, 2) }
#define ROWS_3                                                                                                 \
    {                                                                                                          \
        .shape = CG_DIMS(3, 5), .i32 = (int32_t[]) { 0, 4, 0, 1, 1, 0, 12, 0, 3, 1, 0, 13, 0, 3, 1 }           \
    }
#define ATTR(ratio)                                                                                            \
    &(indexer_health_attr) { .5, ratio }

static const cg_case indexer_health_cases[] = {
    {.name = "two rows matter", .in = {SCORES_3_2, TEACHER_3_2, LIST(2), MAIN, ROWS_3}, .attr = ATTR(4)},
    {.name = "rows that stand twice in their lists",
     .in = {SCORES_3_2,
            TEACHER_3_2,
            {.shape = CG_DIMS(3, 2), .i32 = (int32_t[]){0, -1, 2, 2, 0, 0}},
            MAIN,
            ROWS_3},
     .attr = ATTR(4)},
    {.name = "a short list",
     .in = {{.shape = CG_DIMS(3, 2), .real = (double[]){0, 0, 0, 0, 1, -__builtin_inf()}},
            {.shape = CG_DIMS(3, 2), .real = (double[]){1, 0, .25, .75, 1, 0}},
            LIST(-1),
            MAIN,
            ROWS_3},
     .attr = ATTR(4)},
    {.name = "no slot",
     .in = {{.shape = CG_DIMS(3, 0)},
            {.shape = CG_DIMS(3, 0)},
            {.shape = CG_DIMS(3, 0), .i32 = (int32_t[]){0}},
            MAIN,
            ROWS_3},
     .attr = ATTR(4)},
    {.name = "no row",
     .in = {{.shape = CG_DIMS(0, 2)},
            {.shape = CG_DIMS(0, 2)},
            {.shape = CG_DIMS(0, 2), .i32 = (int32_t[]){0}},
            {.shape = CG_DIMS(0, 5)},
            {.shape = CG_DIMS(0, 2, 3)},
            {.shape = CG_DIMS(4, 3)},
            {.shape = CG_DIMS(0, 2)},
            {.shape = CG_DIMS(0, 5), .i32 = (int32_t[]){0}}},
     .attr = ATTR(4)},
    {.name = "a row it does not see",
     .in = {SCORES_3_2, TEACHER_3_2, LIST(3), MAIN, ROWS_3},
     .attr = ATTR(4),
     .run_error = "row 2: topk[1] is 3, but the row sees 0 to 2"},
    {.name = "ratio 0",
     .in = {SCORES_3_2, TEACHER_3_2, LIST(2), MAIN, ROWS_3},
     .attr = ATTR(0),
     .refuses = "ratio is 0"},
    {.name = "teacher of another shape",
     .in = {SCORES_3_2, {.shape = CG_DIMS(3, 3)}, LIST(2), MAIN, ROWS_3},
     .attr = ATTR(4),
     .refuses = "teacher has shape [3, 3], expected [3, 2] as scores has"},
};

const cg_op cg_op_indexer_health = {
    .name = "indexer_health",
    .doc = "how well the chosen rows cover the dense teacher",
    .in = {"scores", "teacher", "topk", "w", "q", "ckv", "window_lse", "rows"},
    .out = {"health"},
    .attr_bytes = sizeof(indexer_health_attr),
    .infer = indexer_health_infer,
    .no_grad = "cannot: a statistic",
    .statistic_in = CG_BIT(SCORES) | CG_BIT(TEACHER_AT) | CG_BIT(WINDOW_LSE),
    .statistic_out = CG_BIT(0),
    .by_row = CG_BIT(SCORES) | CG_BIT(TEACHER_AT) | CG_BIT(TOPK) | CG_BIT(W) | CG_BIT(Q) | CG_BIT(WINDOW_LSE) |
              CG_BIT(ROWS),
    .summed = CG_BIT(0),
    .replay = CG_REPLAY_SAME_BITS,
    .cost = indexer_health_cost,
    .workspace = indexer_health_workspace,
    .run = CG_RUN(indexer_health),
    CG_CASES(indexer_health_cases),
};

cg_value *cg_indexer_health(cg_graph *graph, cg_value *scores, cg_value *teacher, cg_value *topk, cg_value *w,
                            cg_value *q, cg_value *ckv, cg_value *window_lse, cg_value *rows, double scale,
                            int64_t ratio) {
    return cg_apply(graph, &cg_op_indexer_health, &(indexer_health_attr){scale, ratio},
                    (cg_value *[]){scores, teacher, topk, w, q, ckv, window_lse, rows}, 8);
}

#else

#include "ops/indexer/dense_teacher.h"
#include "ops/indexer/kl_kernels.h"
#include "ops/indexer/select.h"

/* One row's share of the sums. `dense` is its dense teacher over the n rows from `first` on. */
static void KERNEL(health_row)(const cg_run_args *args, int64_t t, int64_t first, int64_t n, const REAL *dense,
                               const SELECT *scratch, int32_t *best, REAL *shifted, REAL *other, double *sums) {
    const int64_t K = args->in[SCORES].shape.dims[1], Hi = args->in[W].shape.dims[1];
    const REAL *scores = (const REAL *)args->in[SCORES].data + t * K;
    const REAL *teacher = (const REAL *)args->in[TEACHER_AT].data + t * K;
    const REAL *w = (const REAL *)args->in[W].data + t * Hi;
    const int32_t *topk = (const int32_t *)args->in[TOPK].data + t * K;
    const int64_t position = ((const int32_t *)args->in[ROWS].data)[t * CG_ROW_FIELDS + CG_ROW_POSITION];
    const int64_t ratio = ((const indexer_health_attr *)args->attr)->ratio;
    sums[CG_HEALTH_ROWS] += 1;
    double distance = 0, entropy = 0;
    int64_t chosen = 0, found = 0, top_found = 0;
    if (KERNEL(select)(dense, n, K, first, scratch, best) >= 0) /* a NaN shows in MASS as well */
        for (int64_t i = 0; i < K; i++) best[i] = -1;
    for (int64_t j = 0; j < K; j++) {
        if (teacher[j] != 0) entropy += (double)teacher[j] * log((double)teacher[j]);
        if (topk[j] < 0) continue;
        chosen++;
        sums[CG_HEALTH_MASS] += (double)dense[topk[j] - first];
        distance += (double)(position - (topk[j] - first) * ratio);
        top_found |= topk[j] == best[0];
    }
    /* A few hundred by a few hundred comparisons, beside a product with every visible row. */
    for (int64_t i = 0; i < K; i++) {
        int here = 0;
        for (int64_t j = 0; j < K; j++) here |= topk[j] == best[i];
        found += here;
    }
    sums[CG_HEALTH_TOP1_MISSED] += !top_found;
    int64_t negative = 0;
    for (int64_t h = 0; h < Hi; h++) negative += w[h] < 0;
    if (Hi > 0) sums[CG_HEALTH_NEGATIVE] += (double)negative / (double)Hi;
    if (K > 0) sums[CG_HEALTH_RECALL] += (double)found / (double)K;
    if (chosen == 0) return;
    sums[CG_HEALTH_DISTANCE] += distance / (double)chosen;
    sums[CG_HEALTH_KL_UNIFORM] += entropy + log((double)chosen);
    REAL log_sum;
    if (KERNEL(log_softmax_parts)(scores, K, shifted, other, &log_sum))
        sums[CG_HEALTH_KL] += (double)KERNEL(kl_row)(teacher, shifted, log_sum, K, other);
}

static bool KERNEL(indexer_health)(const cg_run_args *args) {
    const cg_tensor *in = args->in;
    const int32_t *rows = in[ROWS].data;
    const TEACHER teacher = {.q = in[Q].data,
                             .ckv = in[CKV].data,
                             .window_lse = in[WINDOW_LSE].data,
                             .rows = rows,
                             .T = in[Q].shape.dims[0],
                             .H = in[Q].shape.dims[1],
                             .D = in[Q].shape.dims[2],
                             .C = in[CKV].shape.dims[0],
                             .scale = (REAL)((const indexer_health_attr *)args->attr)->scale};
    const int64_t T = teacher.T, C = teacher.C, K = in[SCORES].shape.dims[1],
                  block = cg_teacher_rows(teacher.H, C);
    REAL *health = args->out[0].data;
    if (!cg_rows_fit(args, rows, T, C) || !health_lists_fit(args, in[TOPK].data, rows, T, K)) return false;
    char *pieces = args->workspace;
    double *sums = cg_take(&pieces, CG_KEY_PARTS * CG_HEALTH_FIELDS * sizeof *sums);
    const size_t piece = health_piece(REAL_DTYPE, in[Q].shape.dims, C, K);
    bool fine = true;
#pragma omp parallel for schedule(dynamic) reduction(&& : fine)
    for (int64_t part = 0; part < CG_KEY_PARTS; part++) {
        char *at = pieces + (size_t)cg_thread_slot() * piece;
        const SCRATCH scratch = KERNEL(teacher_take)(&at, &teacher);
        REAL *target = cg_take(&at, (size_t)(block * C) * sizeof(REAL));
        REAL *shifted = cg_take(&at, (size_t)K * sizeof(REAL)), *other = cg_take(&at, (size_t)K * sizeof(REAL));
        int32_t *best = cg_take(&at, (size_t)K * sizeof *best);
        const SELECT selecting = KERNEL(select_take)(&at, C, K);
        double *mine = sums + part * CG_HEALTH_FIELDS;
        memset(mine, 0, CG_HEALTH_FIELDS * sizeof *mine);
        cg_error error = {0};
        for (int64_t t0 = part * block; t0 < T; t0 += CG_KEY_PARTS * block) {
            const int64_t n_rows = T - t0 < block ? T - t0 : block;
            bool some = false;
            for (int64_t r = 0; r < n_rows; r++) some |= cg_row_seen(rows, t0 + r) > K;
            if (!some) continue;
            if (!KERNEL(teacher_block)(&teacher, &scratch, t0, n_rows, target, &error)) fine = false;
            for (int64_t r = 0; r < n_rows; r++) {
                const int64_t n = cg_row_seen(rows, t0 + r);
                if (n > K) KERNEL(health_row)
                (args, t0 + r, rows[(t0 + r) * CG_ROW_FIELDS + CG_ROW_COMPRESSED], n, target + r * C,
                 &selecting, best, shifted, other, mine);
            }
        }
    }
    if (!fine) return cg_fail(args->error, CG_FAILED, "a product of the teacher could not be run");
    for (int field = 0; field < CG_HEALTH_FIELDS; field++) {
        double sum = 0;
        for (int part = 0; part < CG_KEY_PARTS; part++) sum += sums[part * CG_HEALTH_FIELDS + field];
        health[field] = (REAL)sum;
    }
    return true;
}

#endif
