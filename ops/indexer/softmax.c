/* Softmax over the last axis, or its logarithm, on a given support.
 *
 *   x [T, N]   index [T, N] i32 or absent -> y [T, N]
 *
 *   y = exp(x - max) / sum of exp(x - max)     or its logarithm  x - max - log sum
 *   over the slots with index >= 0 (absent: all). Elsewhere y is 0, and so is a row whose slots are all outside
 *   the support or -inf. What x holds outside the support is not read.
 *
 * Backward, from the output, on the support (0 elsewhere):
 *
 *   dx = y (dy - sum_j y dy)                   of the logarithm:  dx = dy - exp(y) sum_j dy
 *
 * Saved:     y index                        (8*T*N bytes in f32)
 * Recompute: same bits
 * Refuses:   shapes that differ
 */
#ifndef REAL

#include "ops/attributes.h"
#include "ops/indexer/indexer.h"

static bool softmax_infer(cg_infer *infer) {
    if (!cg_expect_real(infer, 0) || !cg_expect_dims(infer, 0, 2)) return false;
    if (infer->in[1] && (!cg_expect_dtype(infer, 1, CG_I32) || !cg_expect_dims(infer, 1, 2) ||
                         !cg_expect_dim(infer, 1, 0, infer->in[0]->shape.dims[0], "rows of x") ||
                         !cg_expect_dim(infer, 1, 1, infer->in[0]->shape.dims[1], "columns of x")))
        return false;
    cg_infer_out(infer, 0, infer->in[0]->dtype, infer->in[0]->shape);
    return true;
}

static bool softmax_grad_infer(cg_infer *infer) {
    if (!cg_expect_real(infer, 0) || !cg_expect_dims(infer, 0, 2) || !cg_expect_same(infer, 1, 0)) return false;
    if (infer->in[2] && (!cg_expect_dtype(infer, 2, CG_I32) || !cg_expect_dims(infer, 2, 2) ||
                         !cg_expect_dim(infer, 2, 0, infer->in[0]->shape.dims[0], "rows of y") ||
                         !cg_expect_dim(infer, 2, 1, infer->in[0]->shape.dims[1], "columns of y")))
        return false;
    cg_infer_out(infer, 0, infer->in[0]->dtype, infer->in[0]->shape);
    return true;
}

/* A row of exponentials for each thread. */
static size_t softmax_workspace(const cg_node *node) {
    return (size_t)cg_thread_slots() *
           cg_align_bytes((size_t)node->in[0]->shape.dims[1] * cg_dtype_bytes(node->in[0]->dtype));
}

#define CG_KERNEL_FILE "ops/indexer/softmax.c"
#include "ops/kernel.h"

extern const cg_op cg_op_softmax_grad;

static void softmax_build_grad(cg_graph *graph, const cg_node *node, cg_value *const *dout, cg_value **din) {
    din[0] =
        cg_apply(graph, &cg_op_softmax_grad, node->attr, (cg_value *[]){dout[0], node->out[0], node->in[1]}, 3);
}

static cg_cost softmax_cost(const cg_node *node) {
    return (cg_cost){.flops = 4 * (double)cg_shape_count(&node->in[0]->shape), .bytes = cg_node_bytes(node)};
}

#define NAN_ __builtin_nan("")
#define INF_ __builtin_inf()
/* Row 1 has nothing. */
#define LIST                                                                                                   \
    {                                                                                                          \
        .shape = CG_DIMS(3, 4), .i32 = (int32_t[]) { 2, -1, 0, 0, -1, -1, -1, -1, 3, 3, 1, 5 }                 \
    }
#define WITH_NAN                                                                                               \
    {                                                                                                          \
        .shape = CG_DIMS(3, 4), .real = (double[]){1, NAN_, -2, 3, NAN_, NAN_, INF_, NAN_, 80, -90, 99, 0},    \
        .constant = true                                                                                       \
    }
#define SOFTMAX                                                                                                \
    &(softmax_attr) { false }
#define LOG_SOFTMAX                                                                                            \
    &(softmax_attr) { true }

static const cg_case softmax_cases[] = {
    {.name = "support", .in = {{.shape = CG_DIMS(3, 4)}, LIST}, .attr = SOFTMAX, .crosses = "index y"},
    {.name = "logarithm on a support",
     .in = {{.shape = CG_DIMS(3, 4)}, LIST},
     .attr = LOG_SOFTMAX,
     .crosses = "index y"},
    {.name = "everywhere", .in = {{.shape = CG_DIMS(2, 5)}, {.absent = true}}, .attr = SOFTMAX, .crosses = "y"},
    {.name = "logarithm everywhere",
     .in = {{.shape = CG_DIMS(2, 5)}, {.absent = true}},
     .attr = LOG_SOFTMAX,
     .crosses = "y"},
    {.name = "NaN off the support", .in = {WITH_NAN, LIST}, .attr = SOFTMAX},
    {.name = "logarithm with NaN off the support", .in = {WITH_NAN, LIST}, .attr = LOG_SOFTMAX},
    {.name = "-inf",
     .in = {{.shape = CG_DIMS(2, 2), .real = (double[]){-INF_, -INF_, 1, -INF_}, .constant = true},
            {.absent = true}},
     .attr = SOFTMAX},
    {.name = "large",
     .in = {{.shape = CG_DIMS(67, 131), .scale = 9}, {.absent = true}},
     .attr = LOG_SOFTMAX,
     .large = true},
    {.name = "no column", .in = {{.shape = CG_DIMS(2, 0)}, {.absent = true}}, .attr = SOFTMAX},
    {.name = "no row", .in = {{.shape = CG_DIMS(0, 2)}, {.absent = true}}, .attr = LOG_SOFTMAX},
    {.name = "shapes differ",
     .in = {{.shape = CG_DIMS(3, 3)}, LIST},
     .attr = SOFTMAX,
     .refuses = "index has shape [3, 4], expected 3 in dimension 1"},
};

static const cg_case softmax_grad_cases[] = {
    {.name = "support", .in = {WITH_NAN, {.shape = CG_DIMS(3, 4)}, LIST}, .attr = SOFTMAX},
    {.name = "logarithm on a support", .in = {WITH_NAN, {.shape = CG_DIMS(3, 4)}, LIST}, .attr = LOG_SOFTMAX},
    {.name = "shapes differ",
     .in = {{.shape = CG_DIMS(3, 3)}, {.shape = CG_DIMS(3, 4)}, LIST},
     .attr = SOFTMAX,
     .refuses = "y has shape [3, 4], expected [3, 3] as dy has"},
};

const cg_op cg_op_softmax = {
    .name = "softmax",
    .doc = "softmax over the last axis, or its logarithm, on a support",
    .in = {"x", "index"},
    .out = {"y"},
    .optional = CG_BIT(1),
    .attr_bytes = sizeof(softmax_attr),
    .infer = softmax_infer,
    .differentiable = CG_BIT(0),
    .grad = softmax_build_grad,
    .by_row = CG_BIT(0) | CG_BIT(1),
    .replay = CG_REPLAY_SAME_BITS,
    .cost = softmax_cost,
    .workspace = softmax_workspace,
    .run = CG_RUN(softmax),
    CG_CASES(softmax_cases),
};

const cg_op cg_op_softmax_grad = {
    .name = "softmax_grad",
    .doc = "gradient of softmax",
    .in = {"dy", "y", "index"},
    .out = {"dx"},
    .optional = CG_BIT(2),
    .attr_bytes = sizeof(softmax_attr),
    .infer = softmax_grad_infer,
    .no_grad = "not yet: second derivatives",
    .by_row = CG_BIT(0) | CG_BIT(1) | CG_BIT(2),
    .replay = CG_REPLAY_SAME_BITS,
    .cost = softmax_cost,
    .workspace = softmax_workspace,
    .run = CG_RUN(softmax_grad),
    CG_CASES(softmax_grad_cases),
};

cg_value *cg_softmax(cg_graph *graph, cg_value *x, cg_value *index, bool log) {
    return cg_apply(graph, &cg_op_softmax, &(softmax_attr){log}, (cg_value *[]){x, index}, 2);
}

#else

#include "ops/indexer/kl_kernels.h"

static bool KERNEL(softmax)(const cg_run_args *args) {
    const bool log = ((const softmax_attr *)args->attr)->log;
    const REAL *x = args->in[0].data;
    const int32_t *index = args->in[1].data;
    REAL *y = args->out[0].data;
    const int64_t T = args->in[0].shape.dims[0], N = args->in[0].shape.dims[1];
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < T; t++) {
        REAL *e = (REAL *)((char *)args->workspace +
                           (size_t)cg_thread_slot() * cg_align_bytes((size_t)N * sizeof(REAL)));
        const int32_t *list = index ? index + t * N : NULL;
        REAL *row = y + t * N, log_sum = 0;
        for (int64_t j = 0; j < N; j++) row[j] = list && list[j] < 0 ? -(REAL)INFINITY : x[t * N + j];
        const bool some = KERNEL(log_softmax_parts)(row, N, row, e, &log_sum);
        REAL sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < N; j++) sum += e[j];
        for (int64_t j = 0; j < N; j++) {
            const REAL p = log ? row[j] - log_sum : e[j] / sum;
            row[j] = some && !(list && list[j] < 0) ? p : 0;
        }
    }
    return true;
}

static bool KERNEL(softmax_grad)(const cg_run_args *args) {
    const bool log = ((const softmax_attr *)args->attr)->log;
    const REAL *dy = args->in[0].data, *y = args->in[1].data;
    const int32_t *index = args->in[2].data;
    REAL *dx = args->out[0].data;
    const int64_t T = args->in[0].shape.dims[0], N = args->in[0].shape.dims[1];
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < T; t++) {
        REAL *p = (REAL *)((char *)args->workspace +
                           (size_t)cg_thread_slot() * cg_align_bytes((size_t)N * sizeof(REAL)));
        const int32_t *list = index ? index + t * N : NULL;
        const REAL *dout = dy + t * N, *out = y + t * N;
        REAL sum = 0;
        if (log) VEC(exp)(N, out, p);
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < N; j++) {
            const REAL term = log ? dout[j] : out[j] * dout[j];
            sum += list && list[j] < 0 ? 0 : term;
        }
        for (int64_t j = 0; j < N; j++) {
            const REAL d = log ? dout[j] - p[j] * sum : out[j] * (dout[j] - sum);
            dx[t * N + j] = list && list[j] < 0 ? 0 : d;
        }
    }
    return true;
}

#endif
