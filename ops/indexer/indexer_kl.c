/* The loss that trains the indexer: how far its softmax over the chosen rows is from the teacher's.
 *
 *   scores [T, K], -inf where absent   teacher [T, K], sums to 1, 0 where absent   rows
 *   -> loss [1], kl [T] per row, unscaled, in nats (a constant)
 *
 *   p     = softmax of a row's scores over its slots that are not -inf
 *   kl[t] = sum_j teacher (log teacher - log p)           0 where teacher is 0, no floor and no epsilon
 *   loss  = coeff / N * sum_t kl[t]                       N: real rows, all rows, or 1; at least 1
 *
 * The teacher is a constant. Real rows whose slots are all absent add 0, get the gradient 0, and count in N.
 * Padding rows add 0, get the gradient 0, count only among all rows, and may hold anything. log p is made as
 * score - max - log sum, so a student that is far off has the exact value and gradient.
 *
 *   dscores = dloss * coeff / N * (p * sum_j teacher - teacher), exactly 0 where absent
 *
 * Saved:     scores teacher rows            (8*T*K + 20*T bytes in f32)
 * Recompute: same bits
 * Refuses:   shapes that differ, an unknown reduction, a coefficient that is not finite; at run time a teacher
 *            that is not 0 where the score is -inf. A NaN in a real row is not hidden: the loss is NaN.
 * Source:    DeepSeek-V3.2 report, section 2.1.1, equations 3 and 4
 */
#ifndef REAL

#include "ops/attributes.h"
#include "ops/indexer/indexer.h"

/* scores, teacher, rows at inputs i, i+1, i+2. */
static bool kl_expect(cg_infer *infer, int i) {
    const indexer_kl_attr *attr = infer->attr;
    return cg_expect_real(infer, i) && cg_expect_dims(infer, i, 2) && cg_expect_same(infer, i + 1, i) &&
           cg_expect_rows(infer, i + 2, infer->in[i]->shape.dims[0], "rows of the scores") &&
           cg_expect_loss_attr(infer, attr->reduction, attr->coeff);
}

static bool indexer_kl_infer(cg_infer *infer) {
    if (!kl_expect(infer, 0)) return false;
    cg_infer_out(infer, 0, infer->in[0]->dtype, CG_SHAPE(1));
    cg_infer_out(infer, 1, infer->in[0]->dtype, CG_SHAPE(infer->in[0]->shape.dims[0]));
    return true;
}

static bool indexer_kl_grad_infer(cg_infer *infer) {
    if (!kl_expect(infer, 1) || !cg_expect_dtype(infer, 0, infer->in[1]->dtype) ||
        !cg_expect_dims(infer, 0, 1) || !cg_expect_dim(infer, 0, 0, 1, "one loss"))
        return false;
    cg_infer_out(infer, 0, infer->in[1]->dtype, infer->in[1]->shape);
    return true;
}

/* Two rows of scratch for each thread. */
static size_t kl_workspace(const cg_value *scores) {
    return (size_t)cg_thread_slots() * 2 *
           cg_align_bytes((size_t)scores->shape.dims[1] * cg_dtype_bytes(scores->dtype));
}
static size_t indexer_kl_workspace(const cg_node *node) { return kl_workspace(node->in[0]); }
static size_t indexer_kl_grad_workspace(const cg_node *node) { return kl_workspace(node->in[1]); }

static bool kl_bad_teacher(const cg_run_args *args, int64_t slot, int64_t K) {
    return cg_fail(args->error, CG_BAD_INPUT, "row %lld: teacher[%lld] is not 0, but the score there is -inf",
                   (long long)(slot / K), (long long)(slot % K));
}

#define CG_KERNEL_FILE "ops/indexer/indexer_kl.c"
#include "ops/kernel.h"

extern const cg_op cg_op_indexer_kl_grad;

static void indexer_kl_build_grad(cg_graph *graph, const cg_node *node, cg_value *const *dout, cg_value **din) {
    din[0] = cg_apply(graph, &cg_op_indexer_kl_grad, node->attr,
                      (cg_value *[]){dout[0], node->in[0], node->in[1], node->in[2]}, 4);
}

static cg_cost indexer_kl_cost(const cg_node *node) {
    return (cg_cost){.flops = 8 * (double)cg_shape_count(&node->in[0]->shape), .bytes = cg_node_bytes(node)};
}

static cg_cost indexer_kl_grad_cost(const cg_node *node) {
    return (cg_cost){.flops = 7 * (double)cg_shape_count(&node->in[1]->shape), .bytes = cg_node_bytes(node)};
}

#define NAN_ __builtin_nan("")
#define INF_ __builtin_inf()
#define ROW(visible, real) 0, 0, 0, visible, real
#define KL_ATTR(reduction, coeff)                                                                              \
    &(indexer_kl_attr) { reduction, coeff }

/* Row 0 sees nothing, row 1 has gaps, row 2 a teacher that is 0 at one slot, row 3 is padding. */
#define SCORES_4_3                                                                                             \
    {                                                                                                          \
        .shape = CG_DIMS(4, 3),                                                                                \
        .real = (double[]){-INF_, -INF_, -INF_, .25, -INF_, -1.5, .5, 2, -.75, NAN_, NAN_, NAN_},              \
        .constant = true                                                                                       \
    }
#define TEACHER_4_3                                                                                            \
    {                                                                                                          \
        .shape = CG_DIMS(4, 3), .real = (double[]) { 0, 0, 0, .375, 0, .625, .75, 0, .25, NAN_, NAN_, NAN_ }   \
    }
#define ROWS_4                                                                                                 \
    {                                                                                                          \
        .shape = CG_DIMS(4, 5), .i32 = (int32_t[]) { ROW(0, 1), ROW(3, 1), ROW(3, 1), ROW(0, 0) }              \
    }

/* The same without -inf and NaN at the inputs, which differences cannot step from; row 1 of a mass that is not 1. */
#define PLAIN_SCORES                                                                                           \
    { .shape = CG_DIMS(3, 4) }
#define PLAIN_TEACHER                                                                                          \
    {                                                                                                          \
        .shape = CG_DIMS(3, 4), .real = (double[]) { .125, .5, .25, .125, 0, 0, .25, .5, .5, .25, .25, 0 }     \
    }
#define PLAIN_ROWS                                                                                             \
    {                                                                                                          \
        .shape = CG_DIMS(3, 5), .i32 = (int32_t[]) { ROW(4, 1), ROW(4, 1), ROW(4, 0) }                         \
    }

#define FOUR(...) __VA_ARGS__, __VA_ARGS__, __VA_ARGS__, __VA_ARGS__
#define ROWS_64                                                                                                \
    {                                                                                                          \
        .shape = CG_DIMS(64, 5), .i32 = (int32_t[]) { FOUR(FOUR(FOUR(ROW(33, 1)))) }                           \
    }

static const cg_case indexer_kl_cases[] = {
    {.name = "mean over real rows",
     .in = {PLAIN_SCORES, PLAIN_TEACHER, PLAIN_ROWS},
     .attr = KL_ATTR(CG_REDUCE_MEAN_REAL, .75),
     .crosses = "scores teacher rows"},
    {.name = "mean over all rows",
     .in = {PLAIN_SCORES, PLAIN_TEACHER, PLAIN_ROWS},
     .attr = KL_ATTR(CG_REDUCE_MEAN_PHYSICAL, 1)},
    {.name = "sum", .in = {PLAIN_SCORES, PLAIN_TEACHER, PLAIN_ROWS}, .attr = KL_ATTR(CG_REDUCE_SUM, -2)},
    {.name = "absent slots", .in = {SCORES_4_3, TEACHER_4_3, ROWS_4}, .attr = KL_ATTR(CG_REDUCE_MEAN_REAL, 1)},
    {.name = "padding alone",
     .in = {{.shape = CG_DIMS(1, 2), .constant = true},
            {.shape = CG_DIMS(1, 2)},
            {.shape = CG_DIMS(1, 5), .i32 = (int32_t[]){ROW(0, 0)}}},
     .attr = KL_ATTR(CG_REDUCE_MEAN_REAL, 1)},
    {.name = "no slot",
     .in = {{.shape = CG_DIMS(2, 0)},
            {.shape = CG_DIMS(2, 0)},
            {.shape = CG_DIMS(2, 5), .i32 = (int32_t[]){ROW(0, 1), ROW(0, 1)}}},
     .attr = KL_ATTR(CG_REDUCE_MEAN_REAL, 1)},
    {.name = "no row",
     .in = {{.shape = CG_DIMS(0, 2)},
            {.shape = CG_DIMS(0, 2)},
            {.shape = CG_DIMS(0, 5), .i32 = (int32_t[]){0}}},
     .attr = KL_ATTR(CG_REDUCE_MEAN_REAL, 1)},
    {.name = "large",
     .in = {{.shape = CG_DIMS(64, 33)}, {.shape = CG_DIMS(64, 33), .offset = 1, .scale = .1}, ROWS_64},
     .attr = KL_ATTR(CG_REDUCE_MEAN_REAL, 1),
     .large = true},
    {.name = "wide",
     .in = {{.shape = CG_DIMS(3, 700)},
            {.shape = CG_DIMS(3, 700), .offset = 1, .scale = .1},
            {.shape = CG_DIMS(3, 5), .i32 = (int32_t[]){ROW(700, 1), ROW(0, 0), ROW(700, 1)}}},
     .attr = KL_ATTR(CG_REDUCE_MEAN_REAL, 1),
     .large = true},
    {.name = "wider",
     .in = {{.shape = CG_DIMS(1, 1100)},
            {.shape = CG_DIMS(1, 1100), .offset = 1, .scale = .1},
            {.shape = CG_DIMS(1, 5), .i32 = (int32_t[]){ROW(1100, 1)}}},
     .attr = KL_ATTR(CG_REDUCE_MEAN_REAL, 1),
     .large = true},
    {.name = "teacher at an absent slot",
     .in = {{.shape = CG_DIMS(1, 2), .real = (double[]){0, -INF_}},
            {.shape = CG_DIMS(1, 2), .real = (double[]){.5, .5}},
            {.shape = CG_DIMS(1, 5), .i32 = (int32_t[]){ROW(2, 1)}}},
     .attr = KL_ATTR(CG_REDUCE_SUM, 1),
     .run_error = "row 0: teacher[1] is not 0, but the score there is -inf"},
    {.name = "teacher of another shape",
     .in = {PLAIN_SCORES, {.shape = CG_DIMS(3, 3)}, PLAIN_ROWS},
     .attr = KL_ATTR(CG_REDUCE_SUM, 1),
     .refuses = "teacher has shape [3, 3], expected [3, 4] as scores has"},
    {.name = "rows differ",
     .in = {PLAIN_SCORES, PLAIN_TEACHER, {.shape = CG_DIMS(1, 5), .i32 = (int32_t[]){ROW(4, 1)}}},
     .attr = KL_ATTR(CG_REDUCE_SUM, 1),
     .refuses = "rows has shape [1, 5], expected 3 in dimension 0"},
    {.name = "coefficient not finite",
     .in = {PLAIN_SCORES, PLAIN_TEACHER, PLAIN_ROWS},
     .attr = KL_ATTR(CG_REDUCE_SUM, NAN_),
     .refuses = "coeff is"},
    {.name = "unknown reduction",
     .in = {PLAIN_SCORES, PLAIN_TEACHER, PLAIN_ROWS},
     .attr = KL_ATTR((cg_reduction)9, 1),
     .refuses = "reduction is 9"},
};

static const cg_case indexer_kl_grad_cases[] = {
    {.name = "absent slots and padding",
     .in = {{.shape = CG_DIMS(1)}, SCORES_4_3, TEACHER_4_3, ROWS_4},
     .attr = KL_ATTR(CG_REDUCE_MEAN_REAL, 1)},
    {.name = "coefficient 0",
     .in = {{.shape = CG_DIMS(1)}, SCORES_4_3, TEACHER_4_3, ROWS_4},
     .attr = KL_ATTR(CG_REDUCE_MEAN_REAL, 0)},
    {.name = "two losses",
     .in = {{.shape = CG_DIMS(2)}, SCORES_4_3, TEACHER_4_3, ROWS_4},
     .attr = KL_ATTR(CG_REDUCE_MEAN_REAL, 1),
     .refuses = "dloss has shape [2]"},
};

const cg_op cg_op_indexer_kl = {
    .name = "indexer_kl",
    .doc = "KL of the teacher against the softmax of the chosen scores",
    .in = {"scores", "teacher", "rows"},
    .out = {"loss", "kl"},
    .attr_bytes = sizeof(indexer_kl_attr),
    .infer = indexer_kl_infer,
    .differentiable = CG_BIT(0),
    .constant_out = CG_BIT(1),
    .grad = indexer_kl_build_grad,
    .statistic_in = CG_BIT(0) | CG_BIT(1),
    .statistic_out = CG_BIT(0) | CG_BIT(1),
    .replay = CG_REPLAY_SAME_BITS,
    .cost = indexer_kl_cost,
    .workspace = indexer_kl_workspace,
    .run = CG_RUN(indexer_kl),
    CG_CASES(indexer_kl_cases),
};

const cg_op cg_op_indexer_kl_grad = {
    .name = "indexer_kl_grad",
    .doc = "gradient of indexer_kl",
    .in = {"dloss", "scores", "teacher", "rows"},
    .out = {"dscores"},
    .attr_bytes = sizeof(indexer_kl_attr),
    .infer = indexer_kl_grad_infer,
    .no_grad = "not yet: second derivatives",
    .statistic_in = CG_BIT(0) | CG_BIT(1) | CG_BIT(2),
    .replay = CG_REPLAY_SAME_BITS,
    .cost = indexer_kl_grad_cost,
    .workspace = indexer_kl_grad_workspace,
    .run = CG_RUN(indexer_kl_grad),
    CG_CASES(indexer_kl_grad_cases),
};

cg_value *cg_indexer_kl(cg_graph *graph, cg_value *scores, cg_value *teacher, cg_value *rows,
                        cg_reduction reduction, double coeff) {
    return cg_apply(graph, &cg_op_indexer_kl, &(indexer_kl_attr){reduction, coeff},
                    (cg_value *[]){scores, teacher, rows}, 3);
}

#else

#include "ops/indexer/kl_kernels.h"

static bool KERNEL(indexer_kl)(const cg_run_args *args) {
    const indexer_kl_attr *attr = args->attr;
    const REAL *scores = args->in[0].data, *teacher = args->in[1].data;
    const int32_t *rows = args->in[2].data;
    REAL *loss = args->out[0].data, *kl = args->out[1].data;
    const int64_t T = args->in[0].shape.dims[0], K = args->in[0].shape.dims[1];
    int64_t bad = INT64_MAX;
#pragma omp parallel for schedule(static, CG_ROW_CHUNK) reduction(min : bad)
    for (int64_t t = 0; t < T; t++) {
        const size_t row_bytes = cg_align_bytes((size_t)K * sizeof(REAL));
        char *at = (char *)args->workspace + (size_t)cg_thread_slot() * 2 * row_bytes;
        REAL *shifted = (REAL *)at, *other = (REAL *)(at + row_bytes);
        kl[t] = 0;
        if (!rows[t * CG_ROW_FIELDS + CG_ROW_REAL]) continue;
        const REAL *s = scores + t * K, *target = teacher + t * K;
        int64_t slot = KERNEL(kl_bad_slot)(s, target, K);
        if (slot >= 0 && t * K + slot < bad) bad = t * K + slot;
        const int64_t n = KERNEL(present_slots)(s, K);
        REAL log_sum;
        if (KERNEL(log_softmax_parts)(s, n, shifted, other, &log_sum))
            kl[t] = KERNEL(kl_row)(target, shifted, log_sum, n, other);
    }
    if (bad < INT64_MAX) return kl_bad_teacher(args, bad, K);
    double sum = 0;
    for (int64_t t = 0; t < T; t++) sum += (double)kl[t];
    loss[0] = (REAL)(attr->coeff / cg_reduction_divisor(attr->reduction, rows, T) * sum);
    return true;
}

static bool KERNEL(indexer_kl_grad)(const cg_run_args *args) {
    const indexer_kl_attr *attr = args->attr;
    const REAL *dloss = args->in[0].data, *scores = args->in[1].data, *teacher = args->in[2].data;
    const int32_t *rows = args->in[3].data;
    REAL *dscores = args->out[0].data;
    const int64_t T = args->in[1].shape.dims[0], K = args->in[1].shape.dims[1];
    const REAL factor = (REAL)((double)dloss[0] * attr->coeff / cg_reduction_divisor(attr->reduction, rows, T));
#pragma omp parallel for schedule(static, CG_ROW_CHUNK)
    for (int64_t t = 0; t < T; t++) {
        const size_t row_bytes = cg_align_bytes((size_t)K * sizeof(REAL));
        char *at = (char *)args->workspace + (size_t)cg_thread_slot() * 2 * row_bytes;
        REAL *shifted = (REAL *)at, *p = (REAL *)(at + row_bytes), *out = dscores + t * K, log_sum;
        const REAL *s = scores + t * K;
        const int64_t present = rows[t * CG_ROW_FIELDS + CG_ROW_REAL] ? KERNEL(present_slots)(s, K) : 0;
        const int64_t n = KERNEL(log_softmax_parts)(s, present, shifted, p, &log_sum) ? present : 0;
        KERNEL(kl_dscores)(teacher + t * K, p, n, factor, out);
        for (int64_t j = 0; j < n; j++)
            if (s[j] == -(REAL)INFINITY) out[j] = 0;
        for (int64_t j = n; j < K; j++) out[j] = 0;
    }
    return true;
}

#endif
