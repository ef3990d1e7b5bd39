/* KL divergence from log-probabilities: the last step of the indexer loss spelled out.
 *
 *   log_p [T, K]   target [T, K]   rows -> loss [1], kl [T] per row, unscaled, in nats (a constant)
 *
 *   kl[t] = sum_j target (log target - log_p)    over the slots whose target is not 0
 *   loss  = coeff / N * sum_t kl[t]              N: real rows, all rows, or 1 (cg_reduction); at least 1
 *
 * The target is a constant. Padding rows add 0, get the gradient 0 and may hold anything, and so may log_p
 * where the target is 0.
 *
 *   dlog_p = -dloss * coeff / N * target
 *
 * Saved:     target rows                    (4*T*K + 20*T bytes in f32)
 * Recompute: same bits
 * Refuses:   shapes that differ, an unknown reduction, a coefficient that is not finite
 * Source:    DeepSeek-V3.2 report, section 2.1.1, equations 3 and 4
 */
#ifndef REAL

#include "ops/attributes.h"
#include "ops/indexer/indexer.h"

static bool kl_div_infer(cg_infer *infer) {
    const kl_div_attr *attr = infer->attr;
    if (!cg_expect_real(infer, 0) || !cg_expect_dims(infer, 0, 2) || !cg_expect_same(infer, 1, 0) ||
        !cg_expect_rows(infer, 2, infer->in[0]->shape.dims[0], "rows of log_p") ||
        !cg_expect_loss_attr(infer, attr->reduction, attr->coeff))
        return false;
    cg_infer_out(infer, 0, infer->in[0]->dtype, CG_SHAPE(1));
    cg_infer_out(infer, 1, infer->in[0]->dtype, CG_SHAPE(infer->in[0]->shape.dims[0]));
    return true;
}

static bool kl_div_grad_infer(cg_infer *infer) {
    const kl_div_attr *attr = infer->attr;
    if (!cg_expect_real(infer, 1) || !cg_expect_dims(infer, 1, 2) ||
        !cg_expect_dtype(infer, 0, infer->in[1]->dtype) || !cg_expect_dims(infer, 0, 1) ||
        !cg_expect_dim(infer, 0, 0, 1, "one loss") ||
        !cg_expect_rows(infer, 2, infer->in[1]->shape.dims[0], "rows of the target") ||
        !cg_expect_loss_attr(infer, attr->reduction, attr->coeff))
        return false;
    cg_infer_out(infer, 0, infer->in[1]->dtype, infer->in[1]->shape);
    return true;
}

/* A row of logarithms for each thread. */
static size_t kl_div_workspace(const cg_node *node) {
    return (size_t)cg_thread_slots() *
           cg_align_bytes((size_t)node->in[0]->shape.dims[1] * cg_dtype_bytes(node->in[0]->dtype));
}

#define CG_KERNEL_FILE "ops/indexer/kl_div.c"
#include "ops/kernel.h"

extern const cg_op cg_op_kl_div_grad;

static void kl_div_build_grad(cg_graph *graph, const cg_node *node, cg_value *const *dout, cg_value **din) {
    din[0] =
        cg_apply(graph, &cg_op_kl_div_grad, node->attr, (cg_value *[]){dout[0], node->in[1], node->in[2]}, 3);
}

static cg_cost kl_div_cost(const cg_node *node) {
    return (cg_cost){.flops = 4 * (double)cg_shape_count(&node->in[0]->shape), .bytes = cg_node_bytes(node)};
}

static cg_cost kl_div_grad_cost(const cg_node *node) {
    return (cg_cost){.flops = (double)cg_shape_count(&node->out[0]->shape), .bytes = cg_node_bytes(node)};
}

#define NAN_ __builtin_nan("")
#define KL_ATTR(reduction, coeff)                                                                              \
    &(kl_div_attr) { reduction, coeff }
#define LOG_P                                                                                                  \
    { .shape = CG_DIMS(3, 4) }
#define TARGET                                                                                                 \
    {                                                                                                          \
        .shape = CG_DIMS(3, 4), .real = (double[]) { .125, .5, .25, .125, 0, 0, .25, .75, NAN_, NAN_, .25, 0 } \
    }
#define ROWS_3                                                                                                 \
    {                                                                                                          \
        .shape = CG_DIMS(3, 5), .i32 = (int32_t[]) { 0, 0, 0, 4, 1, 0, 1, 0, 4, 1, 0, 2, 0, 0, 0 }             \
    }

#define FOUR(...) __VA_ARGS__, __VA_ARGS__, __VA_ARGS__, __VA_ARGS__
#define ROWS_64                                                                                                \
    {                                                                                                          \
        .shape = CG_DIMS(64, 5), .i32 = (int32_t[]) { FOUR(FOUR(FOUR(0, 0, 0, 33, 1))) }                       \
    }

static const cg_case kl_div_cases[] = {
    {.name = "mean over real rows",
     .in = {LOG_P, TARGET, ROWS_3},
     .attr = KL_ATTR(CG_REDUCE_MEAN_REAL, .75),
     .crosses = "target rows"},
    {.name = "mean over all rows", .in = {LOG_P, TARGET, ROWS_3}, .attr = KL_ATTR(CG_REDUCE_MEAN_PHYSICAL, 1)},
    {.name = "sum", .in = {LOG_P, TARGET, ROWS_3}, .attr = KL_ATTR(CG_REDUCE_SUM, -2)},
    {.name = "NaN where the target is 0",
     .in = {{.shape = CG_DIMS(1, 2), .real = (double[]){NAN_, -1}, .constant = true},
            {.shape = CG_DIMS(1, 2), .real = (double[]){0, 1}},
            {.shape = CG_DIMS(1, 5), .i32 = (int32_t[]){0, 0, 0, 2, 1}}},
     .attr = KL_ATTR(CG_REDUCE_SUM, 1)},
    {.name = "no slot",
     .in = {{.shape = CG_DIMS(1, 0)},
            {.shape = CG_DIMS(1, 0)},
            {.shape = CG_DIMS(1, 5), .i32 = (int32_t[]){0, 0, 0, 0, 1}}},
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
    {.name = "shapes differ",
     .in = {LOG_P, {.shape = CG_DIMS(3, 3)}, ROWS_3},
     .attr = KL_ATTR(CG_REDUCE_SUM, 1),
     .refuses = "target has shape [3, 3], expected [3, 4] as log_p has"},
    {.name = "coefficient not finite",
     .in = {LOG_P, TARGET, ROWS_3},
     .attr = KL_ATTR(CG_REDUCE_SUM, __builtin_inf()),
     .refuses = "coeff is"},
};

static const cg_case kl_div_grad_cases[] = {
    {.name = "padding",
     .in = {{.shape = CG_DIMS(1)}, TARGET, ROWS_3},
     .attr = KL_ATTR(CG_REDUCE_MEAN_REAL, .75)},
    {.name = "two losses",
     .in = {{.shape = CG_DIMS(2)}, TARGET, ROWS_3},
     .attr = KL_ATTR(CG_REDUCE_SUM, 1),
     .refuses = "dloss has shape [2]"},
};

const cg_op cg_op_kl_div = {
    .name = "kl_div",
    .doc = "KL of a target against log-probabilities",
    .in = {"log_p", "target", "rows"},
    .out = {"loss", "kl"},
    .attr_bytes = sizeof(kl_div_attr),
    .infer = kl_div_infer,
    .differentiable = CG_BIT(0),
    .constant_out = CG_BIT(1),
    .grad = kl_div_build_grad,
    .statistic_in = CG_BIT(0) | CG_BIT(1),
    .statistic_out = CG_BIT(0) | CG_BIT(1),
    .replay = CG_REPLAY_SAME_BITS,
    .cost = kl_div_cost,
    .workspace = kl_div_workspace,
    .run = CG_RUN(kl_div),
    CG_CASES(kl_div_cases),
};

const cg_op cg_op_kl_div_grad = {
    .name = "kl_div_grad",
    .doc = "gradient of kl_div",
    .in = {"dloss", "target", "rows"},
    .out = {"dlog_p"},
    .attr_bytes = sizeof(kl_div_attr),
    .infer = kl_div_grad_infer,
    .no_grad = "not yet: second derivatives",
    .statistic_in = CG_BIT(0) | CG_BIT(1),
    .replay = CG_REPLAY_SAME_BITS,
    .cost = kl_div_grad_cost,
    .run = CG_RUN(kl_div_grad),
    CG_CASES(kl_div_grad_cases),
};

cg_value *cg_kl_div(cg_graph *graph, cg_value *log_p, cg_value *target, cg_value *rows, cg_reduction reduction,
                    double coeff) {
    return cg_apply(graph, &cg_op_kl_div, &(kl_div_attr){reduction, coeff}, (cg_value *[]){log_p, target, rows},
                    3);
}

#else

static bool KERNEL(kl_div)(const cg_run_args *args) {
    const kl_div_attr *attr = args->attr;
    const REAL *log_p = args->in[0].data, *target = args->in[1].data;
    const int32_t *rows = args->in[2].data;
    REAL *loss = args->out[0].data, *kl = args->out[1].data;
    const int64_t T = args->in[0].shape.dims[0], K = args->in[0].shape.dims[1];
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < T; t++) {
        REAL *log_target = (REAL *)((char *)args->workspace +
                                    (size_t)cg_thread_slot() * cg_align_bytes((size_t)K * sizeof(REAL)));
        const REAL *p = log_p + t * K, *goal = target + t * K;
        REAL sum = 0;
        if (rows[t * CG_ROW_FIELDS + CG_ROW_REAL]) {
            VEC(log)(K, goal, log_target);
#pragma omp simd reduction(+ : sum)
            for (int64_t j = 0; j < K; j++) sum += goal[j] != 0 ? goal[j] * (log_target[j] - p[j]) : 0;
        }
        kl[t] = sum;
    }
    double sum = 0;
    for (int64_t t = 0; t < T; t++) sum += (double)kl[t];
    loss[0] = (REAL)(attr->coeff / cg_reduction_divisor(attr->reduction, rows, T) * sum);
    return true;
}

static bool KERNEL(kl_div_grad)(const cg_run_args *args) {
    const kl_div_attr *attr = args->attr;
    const REAL *dloss = args->in[0].data, *target = args->in[1].data;
    const int32_t *rows = args->in[2].data;
    REAL *dlog_p = args->out[0].data;
    const int64_t T = args->in[1].shape.dims[0], K = args->in[1].shape.dims[1];
    const REAL factor = (REAL)((double)dloss[0] * attr->coeff / cg_reduction_divisor(attr->reduction, rows, T));
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < T; t++) {
        const bool is_real = rows[t * CG_ROW_FIELDS + CG_ROW_REAL] != 0;
        for (int64_t j = 0; j < K; j++) dlog_p[t * K + j] = is_real ? 0 - factor * target[t * K + j] : 0;
    }
    return true;
}

#endif
