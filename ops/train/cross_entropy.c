/* Softmax cross-entropy in nats, summed over the rows that have a target.
 *
 *   logits [T, V]   targets [T] i32, -1 = none   -> loss [1], lse [T] (constant)
 *
 *   lse[t] = log sum_v exp(logits[t,v]),  loss = sum over t with a target of lse[t] - logits[t, targets[t]]
 *   dlogits[t,v] = dloss (exp(logits[t,v] - lse[t]) - [v == targets[t]]), 0 in a row without target
 *
 * A sum, not a mean: the caller knows by which count to divide. A row without target is not read (it may hold
 * anything); its lse is 0. No array of probabilities exists at any time: a row is walked once, the running sum
 * is rescaled when its maximum grows, and the row losses are added up in f64, row by row.
 *
 * Saved:     logits targets lse       (4*(T*V + 2*T) bytes in f32)
 * Recompute: same bits
 * Refuses:   a target outside -1 .. V-1, when run
 */
#ifndef REAL

#include "ops/ops.h"

extern const cg_op cg_op_cross_entropy_grad;

enum { CROSS_ENTROPY_BLOCK = 1024 }; /* exponentials at once, on the stack */

static bool logits_and_targets(cg_infer *infer) {
    if (!cg_expect_real(infer, 0) || !cg_expect_dims(infer, 0, 2)) return false;
    if (!cg_expect_dtype(infer, 1, CG_I32) || !cg_expect_dims(infer, 1, 1)) return false;
    return cg_expect_dim(infer, 1, 0, infer->in[0]->shape.dims[0], "rows of logits");
}

static bool cross_entropy_infer(cg_infer *infer) {
    if (!logits_and_targets(infer)) return false;
    cg_infer_out(infer, 0, infer->in[0]->dtype, CG_SHAPE(1));
    cg_infer_out(infer, 1, infer->in[0]->dtype, infer->in[1]->shape);
    return true;
}

static bool cross_entropy_grad_infer(cg_infer *infer) {
    if (!logits_and_targets(infer)) return false;
    const cg_value *logits = infer->in[0];
    if (!cg_expect_dtype(infer, 2, logits->dtype) || !cg_expect_dims(infer, 2, 1)) return false;
    if (!cg_expect_dim(infer, 2, 0, logits->shape.dims[0], "rows of logits")) return false;
    if (!cg_expect_dtype(infer, 3, logits->dtype) || !cg_expect_dims(infer, 3, 1)) return false;
    if (!cg_expect_dim(infer, 3, 0, 1, "one loss")) return false;
    cg_infer_out(infer, 0, logits->dtype, logits->shape);
    return true;
}

static bool targets_fit(const cg_run_args *args) {
    const int32_t *targets = args->in[1].data;
    const int64_t T = args->in[0].shape.dims[0], V = args->in[0].shape.dims[1];
    for (int64_t t = 0; t < T; t++)
        if (targets[t] < -1 || targets[t] >= V)
            return cg_fail(args->error, CG_BAD_INPUT,
                           "row %lld of targets is %d, expected -1 or a column of logits, 0 to %lld",
                           (long long)(args->first_row + t), (int)targets[t], (long long)V - 1);
    return true;
}

#define CG_KERNEL_FILE "ops/train/cross_entropy.c"
#include "ops/kernel.h"

static void cross_entropy_build_grad(cg_graph *graph, const cg_node *node, cg_value *const *dout,
                                     cg_value **din) {
    cg_value *in[] = {node->in[0], node->in[1], node->out[1], dout[0]};
    din[0] = cg_apply(graph, &cg_op_cross_entropy_grad, NULL, in, 4);
}

static size_t cross_entropy_workspace(const cg_node *node) {
    return sizeof(double) * (size_t)node->in[0]->shape.dims[0]; /* the loss of each row */
}

static cg_cost cross_entropy_cost(const cg_node *node) {
    return (cg_cost){.flops = 4 * (double)cg_shape_count(&node->in[0]->shape), .bytes = cg_node_bytes(node)};
}

static cg_cost cross_entropy_grad_cost(const cg_node *node) {
    return (cg_cost){.flops = 3 * (double)cg_shape_count(&node->in[0]->shape), .bytes = cg_node_bytes(node)};
}

#define TARGETS                                                                                                \
    .shape = CG_DIMS(4), .i32 = (const int32_t[]) { 2, -1, 0, 4 }
#define SAVED .crosses = "logits targets lse"
static const cg_case cross_entropy_cases[] = {
    {.name = "one row without target", .in = {{.shape = CG_DIMS(4, 5)}, {TARGETS}}, SAVED},
    {.name = "large logits", .in = {{.shape = CG_DIMS(4, 5), .offset = 500, .scale = 3}, {TARGETS}}, SAVED},
    {.name = "one row",
     .in = {{.shape = CG_DIMS(1, 7)}, {.shape = CG_DIMS(1), .i32 = (const int32_t[]){6}}},
     SAVED},
    {.name = "no target at all",
     .in = {{.shape = CG_DIMS(2, 3), .constant = true},
            {.shape = CG_DIMS(2), .i32 = (const int32_t[]){-1, -1}}}},
    {.name = "garbage where no target is",
     .in = {{.shape = CG_DIMS(2, 2),
             .constant = true,
             .real = (const double[]){__builtin_nan(""), 1, 0.5, -0.5}},
            {.shape = CG_DIMS(2), .i32 = (const int32_t[]){-1, 1}}}},
    {.name = "no rows",
     .in = {{.shape = CG_DIMS(0, 5)}, {.shape = CG_DIMS(0), .i32 = (const int32_t[]){0}}},
     SAVED},
    {.name = "no columns",
     .in = {{.shape = CG_DIMS(1, 0)}, {.shape = CG_DIMS(1), .i32 = (const int32_t[]){-1}}},
     SAVED},
    {.name = "large", .in = {{.shape = CG_DIMS(4, 20011), .scale = 3}, {TARGETS}}, SAVED, .large = true},
    {.name = "long rows of whole packs",
     .in = {{.shape = CG_DIMS(4, 2088), .scale = 3}, {TARGETS}},
     SAVED,
     .large = true},
    {.name = "many short rows of whole packs",
     .in = {{.shape = CG_DIMS(45, 264), .scale = 3},
            {.shape = CG_DIMS(45), .i32 = (const int32_t[]){[3] = 263, [4 ... 40] = 7, [41 ... 44] = -1}}},
     SAVED,
     .large = true},
    {.name = "wrong target in a row of whole packs",
     .in = {{.shape = CG_DIMS(45, 8)},
            {.shape = CG_DIMS(45), .i32 = (const int32_t[]){[7] = -2, [8 ... 41] = 8, [42 ... 44] = 7}}},
     SAVED,
     .run_error = "row 7 of targets is -2"},
    {.name = "target too large",
     .in = {{.shape = CG_DIMS(4, 4)}, {TARGETS}},
     SAVED,
     .run_error = "row 3 of targets is 4, expected -1 or a column of logits, 0 to 3"},
    {.name = "target too small",
     .in = {{.shape = CG_DIMS(2, 4)}, {.shape = CG_DIMS(2), .i32 = (const int32_t[]){-100, 9}}},
     SAVED,
     .run_error = "row 0 of targets is -100"},
    {.name = "rows differ",
     .in = {{.shape = CG_DIMS(3, 5)}, {TARGETS}},
     .refuses = "targets has shape [4], expected 3 in dimension 0 (rows of logits)"},
    {.name = "logits of one dimension",
     .in = {{.shape = CG_DIMS(4)}, {TARGETS}},
     .refuses = "logits has shape [4], expected 2 dimensions"},
    {.name = "targets are real",
     .in = {{.shape = CG_DIMS(4, 5)}, {TARGETS, .wrong_dtype = true}},
     .refuses = "expected i32"},
};

const cg_op cg_op_cross_entropy = {
    .name = "cross_entropy",
    .doc = "softmax cross-entropy in nats, summed over the rows that have a target",
    .in = {"logits", "targets"},
    .out = {"loss", "lse"},
    .infer = cross_entropy_infer,
    .differentiable = CG_BIT(0),
    .constant_out = CG_BIT(1),
    .grad = cross_entropy_build_grad,
    .statistic_out = CG_BIT(0) | CG_BIT(1),
    .by_row = CG_BIT(0) | CG_BIT(1),
    .summed = CG_BIT(0),
    .replay = CG_REPLAY_SAME_BITS,
    .cost = cross_entropy_cost,
    .workspace = cross_entropy_workspace,
    .run = CG_RUN(cross_entropy),
    CG_CASES(cross_entropy_cases),
};

static const cg_case cross_entropy_grad_cases[] = {
    {.name = "one row without target",
     .in = {{.shape = CG_DIMS(4, 5)}, {TARGETS}, {.shape = CG_DIMS(4), .offset = 2}, {.shape = CG_DIMS(1)}}},
    {.name = "no rows",
     .in = {{.shape = CG_DIMS(0, 5)},
            {.shape = CG_DIMS(0), .i32 = (const int32_t[]){0}},
            {.shape = CG_DIMS(0)},
            {.shape = CG_DIMS(1)}}},
    {.name = "rows of whole packs",
     .in = {{.shape = CG_DIMS(4, 72)}, {TARGETS}, {.shape = CG_DIMS(4), .offset = 4}, {.shape = CG_DIMS(1)}},
     .large = true},
    {.name = "target too large",
     .in = {{.shape = CG_DIMS(4, 4)}, {TARGETS}, {.shape = CG_DIMS(4)}, {.shape = CG_DIMS(1)}},
     .run_error = "row 3 of targets is 4"},
    {.name = "lse of another length",
     .in = {{.shape = CG_DIMS(4, 5)}, {TARGETS}, {.shape = CG_DIMS(3)}, {.shape = CG_DIMS(1)}},
     .refuses = "lse has shape [3], expected 4"},
    {.name = "two losses",
     .in = {{.shape = CG_DIMS(4, 5)}, {TARGETS}, {.shape = CG_DIMS(4)}, {.shape = CG_DIMS(2)}},
     .refuses = "dloss has shape [2], expected 1"},
};

const cg_op cg_op_cross_entropy_grad = {
    .name = "cross_entropy_grad",
    .doc = "gradient of cross_entropy: softmax minus one-hot",
    .in = {"logits", "targets", "lse", "dloss"},
    .out = {"dlogits"},
    .infer = cross_entropy_grad_infer,
    .no_grad = "not yet: second derivatives",
    .overwrites = CG_BIT(0),
    .statistic_in = CG_BIT(2) | CG_BIT(3),
    .by_row = CG_BIT(0) | CG_BIT(1) | CG_BIT(2),
    .replay = CG_REPLAY_SAME_BITS,
    .cost = cross_entropy_grad_cost,
    .run = CG_RUN(cross_entropy_grad),
    CG_CASES(cross_entropy_grad_cases),
};

cg_value *cg_cross_entropy(cg_graph *graph, cg_value *logits, cg_value *targets) {
    return cg_apply(graph, &cg_op_cross_entropy, NULL, (cg_value *[]){logits, targets}, 2);
}

#else

/* log sum exp(x) = max + log_sum. Blocks of -inf alone add 0. */
static void KERNEL(log_sum_exp)(const REAL *x, int64_t V, REAL *max, double *log_sum) {
    REAL e[CROSS_ENTROPY_BLOCK], top = (REAL)-INFINITY;
    double sum = 0;
    for (int64_t v0 = 0; v0 < V; v0 += CROSS_ENTROPY_BLOCK) {
        const int64_t block = V - v0 < CROSS_ENTROPY_BLOCK ? V - v0 : CROSS_ENTROPY_BLOCK;
        REAL block_top = (REAL)-INFINITY, block_sum = 0;
#pragma omp simd reduction(max : block_top)
        for (int64_t v = 0; v < block; v++) block_top = x[v0 + v] > block_top ? x[v0 + v] : block_top;
        if (block_top > top) {
            sum *= exp((double)(top - block_top));
            top = block_top;
        }
        const REAL shift = top > (REAL)-INFINITY ? top : 0;
        for (int64_t v = 0; v < block; v++) e[v] = x[v0 + v] - shift;
        VEC(exp)(block, e, e);
#pragma omp simd reduction(+ : block_sum)
        for (int64_t v = 0; v < block; v++) block_sum += e[v];
        sum += (double)block_sum;
    }
    *max = top;
    *log_sum = log(sum);
}

static bool KERNEL(cross_entropy)(const cg_run_args *args) {
    const int64_t T = args->in[0].shape.dims[0], V = args->in[0].shape.dims[1];
    const int32_t *targets = args->in[1].data;
    REAL *lse = args->out[1].data;
    double *row_loss = args->workspace, loss = 0;
    if (!targets_fit(args)) return false;
#pragma omp parallel for schedule(static) if (T * V > 8192)
    for (int64_t t = 0; t < T; t++) {
        row_loss[t] = 0;
        lse[t] = 0;
        if (targets[t] < 0) continue;
        const REAL *x = (const REAL *)args->in[0].data + t * V;
        REAL max;
        double log_sum;
        KERNEL(log_sum_exp)(x, V, &max, &log_sum);
        lse[t] = (REAL)((double)max + log_sum);
        row_loss[t] =
            log_sum - ((double)x[targets[t]] - (double)max); /* small numbers, unlike lse and the logit */
    }
    for (int64_t t = 0; t < T; t++) loss += row_loss[t];
    ((REAL *)args->out[0].data)[0] = (REAL)loss;
    return true;
}

static bool KERNEL(cross_entropy_grad)(const cg_run_args *args) {
    const int64_t T = args->in[0].shape.dims[0], V = args->in[0].shape.dims[1];
    const int32_t *targets = args->in[1].data;
    const REAL *lse = args->in[2].data, dloss = ((const REAL *)args->in[3].data)[0];
    if (!targets_fit(args)) return false;
#pragma omp parallel for schedule(static) if (T * V > 8192)
    for (int64_t t = 0; t < T; t++) {
        const REAL *x = (const REAL *)args->in[0].data + t * V;
        REAL *dx = (REAL *)args->out[0].data + t * V, e[CROSS_ENTROPY_BLOCK];
        if (targets[t] < 0) {
            memset(dx, 0, sizeof(REAL) * (size_t)V);
            continue;
        }
        for (int64_t v0 = 0; v0 < V; v0 += CROSS_ENTROPY_BLOCK) {
            const int64_t block = V - v0 < CROSS_ENTROPY_BLOCK ? V - v0 : CROSS_ENTROPY_BLOCK;
            for (int64_t v = 0; v < block; v++) e[v] = x[v0 + v] - lse[t];
            VEC(exp)(block, e, e);
            for (int64_t v = 0; v < block; v++) dx[v0 + v] = dloss * e[v];
        }
        dx[targets[t]] -= dloss;
    }
    return true;
}

#endif
