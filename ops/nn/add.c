/* y = a + b, same shape.
 *
 * Saved: nothing. Recompute: same bits. May work in place of either input.
 */
#ifndef REAL

#include "ops/ops.h"

static bool add_infer(cg_infer *infer) {
    if (!cg_expect_real(infer, 0) || !cg_expect_same(infer, 1, 0)) return false;
    cg_infer_out(infer, 0, infer->in[0]->dtype, infer->in[0]->shape);
    return true;
}

#define CG_KERNEL_FILE "ops/nn/add.c"
#include "ops/kernel.h"

static void add_build_grad(cg_graph *graph, const cg_node *node, cg_value *const *dout, cg_value **din) {
    (void)graph, (void)node;
    din[0] = dout[0];
    din[1] = dout[0];
}

static cg_cost add_cost(const cg_node *node) {
    return (cg_cost){.flops = (double)cg_shape_count(&node->out[0]->shape), .bytes = cg_node_bytes(node)};
}

static const cg_case add_cases[] = {
    {.name = "odd", .in = {{.shape = CG_DIMS(3, 5)}, {.shape = CG_DIMS(3, 5)}}, .crosses = ""},
    {.name = "empty", .in = {{.shape = CG_DIMS(0)}, {.shape = CG_DIMS(0)}}, .crosses = ""},
    {.name = "shapes differ",
     .in = {{.shape = CG_DIMS(3, 5)}, {.shape = CG_DIMS(5, 3)}},
     .refuses = "b has shape [5, 3], expected [3, 5] as a has"},
    {.name = "wrong dtype",
     .in = {{.shape = CG_DIMS(2)}, {.shape = CG_DIMS(2), .wrong_dtype = true}},
     .refuses = "b is i32"},
};

const cg_op cg_op_add = {
    .name = "add",
    .doc = "y = a + b",
    .in = {"a", "b"},
    .out = {"y"},
    .infer = add_infer,
    .differentiable = CG_BIT(0) | CG_BIT(1),
    .grad = add_build_grad,
    .overwrites = CG_BIT(0) | CG_BIT(1),
    .elementwise = true,
    .replay = CG_REPLAY_SAME_BITS,
    .cost = add_cost,
    .run = CG_RUN(add),
    CG_CASES(add_cases),
};

cg_value *cg_add(cg_graph *graph, cg_value *a, cg_value *b) {
    return cg_apply(graph, &cg_op_add, NULL, (cg_value *[]){a, b}, 2);
}

#else

static bool KERNEL(add)(const cg_run_args *args) {
    const REAL *a = args->in[0].data, *b = args->in[1].data;
    REAL *y = args->out[0].data;
    int64_t n = cg_shape_count(&args->out[0].shape);
#pragma omp parallel for simd if (n > 65536)
    for (int64_t i = 0; i < n; i++) y[i] = a[i] + b[i];
    return true;
}

#endif
