/* y = max(x, 0).
 *
 * The gradient asks only where x was positive, which y tells as well: y is what the next op tends to keep
 * anyway (indexer_head_sum keeps it), and then x is kept by nobody.
 *
 * Saved:     y                        (4 bytes an element in f32)
 * Recompute: same bits. May work in place.
 * Kink:      x = 0, gradient 0 there
 * NaN:       stays NaN, so that it is found where a choice is made
 */
#ifndef REAL

#include "ops/ops.h"

extern const cg_op cg_op_relu_grad;

static bool relu_infer(cg_infer *infer) {
    if (!cg_expect_real(infer, 0)) return false;
    cg_infer_out(infer, 0, infer->in[0]->dtype, infer->in[0]->shape);
    return true;
}

static bool relu_grad_infer(cg_infer *infer) { return relu_infer(infer) && cg_expect_same(infer, 1, 0); }

#define CG_KERNEL_FILE "ops/nn/relu.c"
#include "ops/kernel.h"

static void relu_build_grad(cg_graph *graph, const cg_node *node, cg_value *const *dout, cg_value **din) {
    din[0] = cg_apply(graph, &cg_op_relu_grad, NULL, (cg_value *[]){node->out[0], dout[0]}, 2);
}

static cg_cost relu_cost(const cg_node *node) {
    return (cg_cost){.flops = (double)cg_shape_count(&node->out[0]->shape), .bytes = cg_node_bytes(node)};
}

static const double off_kink[] = {-1.5, 0.25, 2, -0.75, 0.5, -2, 1.25, -0.125, 3, -1, 0.75, -0.5, 1, 1.5, -3};
static const cg_case relu_cases[] = {
    {.name = "odd", .in = {{.shape = CG_DIMS(3, 5), .real = off_kink}}, .crosses = "y"},
    {.name = "at zero", .in = {{.shape = CG_DIMS(3), .real = (const double[]){0, -1, 1}}}, .crosses = "y"},
    {.name = "empty", .in = {{.shape = CG_DIMS(0)}}, .crosses = "y"},
    {.name = "large", .in = {{.shape = CG_DIMS(331, 227)}}, .crosses = "y", .large = true},
    {.name = "wrong dtype", .in = {{.shape = CG_DIMS(2), .wrong_dtype = true}}, .refuses = "x is i32"},
};

const cg_op cg_op_relu = {
    .name = "relu",
    .doc = "y = max(x, 0)",
    .in = {"x"},
    .out = {"y"},
    .infer = relu_infer,
    .differentiable = CG_BIT(0),
    .grad = relu_build_grad,
    .overwrites = CG_BIT(0),
    .elementwise = true,
    .replay = CG_REPLAY_SAME_BITS,
    .cost = relu_cost,
    .run = CG_RUN(relu),
    CG_CASES(relu_cases),
};

static const cg_case relu_grad_cases[] = {
    {.name = "odd", .in = {{.shape = CG_DIMS(3, 5), .real = off_kink}, {.shape = CG_DIMS(3, 5)}}},
    {.name = "empty", .in = {{.shape = CG_DIMS(0)}, {.shape = CG_DIMS(0)}}},
    {.name = "shapes differ",
     .in = {{.shape = CG_DIMS(2)}, {.shape = CG_DIMS(3)}},
     .refuses = "dy has shape [3], expected [2] as y has"},
};

const cg_op cg_op_relu_grad = {
    .name = "relu_grad",
    .doc = "dx = dy where y > 0, else 0",
    .in = {"y", "dy"},
    .out = {"dx"},
    .infer = relu_grad_infer,
    .no_grad = "not yet: second derivatives",
    .overwrites = CG_BIT(0) | CG_BIT(1),
    .elementwise = true,
    .replay = CG_REPLAY_SAME_BITS,
    .cost = relu_cost,
    .run = CG_RUN(relu_grad),
    CG_CASES(relu_grad_cases),
};

cg_value *cg_relu(cg_graph *graph, cg_value *x) {
    return cg_apply(graph, &cg_op_relu, NULL, (cg_value *[]){x}, 1);
}

#else

static bool KERNEL(relu)(const cg_run_args *args) {
    const REAL *x = args->in[0].data;
    REAL *y = args->out[0].data;
    int64_t n = cg_shape_count(&args->out[0].shape);
#pragma omp parallel for simd if (n > 65536)
    for (int64_t i = 0; i < n; i++) y[i] = x[i] <= 0 ? 0 : x[i];
    return true;
}

static bool KERNEL(relu_grad)(const cg_run_args *args) {
    const REAL *y = args->in[0].data, *dy = args->in[1].data;
    REAL *dx = args->out[0].data;
    int64_t n = cg_shape_count(&args->out[0].shape);
#pragma omp parallel for simd if (n > 65536)
    for (int64_t i = 0; i < n; i++) dx[i] = y[i] <= 0 ? 0 : dy[i];
    return true;
}

#endif
