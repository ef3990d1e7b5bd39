/* y = a * b, same shape, element by element.
 *
 * Saved:     a b      (4 bytes an element each in f32; b only for da, a only for db)
 * Recompute: same bits. May work in place of either input.
 */
#ifndef REAL

#include "ops/ops.h"

static bool mul_infer(cg_infer *infer) {
    if (!cg_expect_real(infer, 0) || !cg_expect_same(infer, 1, 0)) return false;
    cg_infer_out(infer, 0, infer->in[0]->dtype, infer->in[0]->shape);
    return true;
}

#define CG_KERNEL_FILE "ops/nn/mul.c"
#include "ops/kernel.h"

static void mul_build_grad(cg_graph *graph, const cg_node *node, cg_value *const *dout, cg_value **din) {
    if (cg_wants_grad(node, 0)) din[0] = cg_mul(graph, dout[0], node->in[1]);
    if (cg_wants_grad(node, 1)) din[1] = cg_mul(graph, dout[0], node->in[0]);
}

static cg_cost mul_cost(const cg_node *node) {
    return (cg_cost){.flops = (double)cg_shape_count(&node->out[0]->shape), .bytes = cg_node_bytes(node)};
}

static const cg_case mul_cases[] = {
    {.name = "odd", .in = {{.shape = CG_DIMS(3, 5)}, {.shape = CG_DIMS(3, 5)}}, .crosses = "a b"},
    {.name = "a constant",
     .in = {{.shape = CG_DIMS(3, 5), .constant = true}, {.shape = CG_DIMS(3, 5)}},
     .crosses = "a"},
    {.name = "b constant",
     .in = {{.shape = CG_DIMS(3, 5)}, {.shape = CG_DIMS(3, 5), .constant = true}},
     .crosses = "b"},
    {.name = "empty", .in = {{.shape = CG_DIMS(0, 2)}, {.shape = CG_DIMS(0, 2)}}, .crosses = "a b"},
    {.name = "large",
     .in = {{.shape = CG_DIMS(331, 227)}, {.shape = CG_DIMS(331, 227)}},
     .crosses = "a b",
     .large = true},
    {.name = "shapes differ",
     .in = {{.shape = CG_DIMS(3, 5)}, {.shape = CG_DIMS(3)}},
     .refuses = "b has shape [3], expected [3, 5] as a has"},
    {.name = "wrong dtype",
     .in = {{.shape = CG_DIMS(2), .wrong_dtype = true}, {.shape = CG_DIMS(2)}},
     .refuses = "a is i32, expected f32, f64 or bf16"},
};

const cg_op cg_op_mul = {
    .name = "mul",
    .doc = "y = a * b, element by element",
    .in = {"a", "b"},
    .out = {"y"},
    .infer = mul_infer,
    .differentiable = CG_BIT(0) | CG_BIT(1),
    .grad = mul_build_grad,
    .overwrites = CG_BIT(0) | CG_BIT(1),
    .elementwise = true,
    .replay = CG_REPLAY_SAME_BITS,
    .cost = mul_cost,
    .run = CG_RUN(mul),
    CG_CASES(mul_cases),
};

cg_value *cg_mul(cg_graph *graph, cg_value *a, cg_value *b) {
    return cg_apply(graph, &cg_op_mul, NULL, (cg_value *[]){a, b}, 2);
}

#else

static bool KERNEL(mul)(const cg_run_args *args) {
    const REAL *a = args->in[0].data, *b = args->in[1].data;
    REAL *y = args->out[0].data;
    int64_t n = cg_shape_count(&args->out[0].shape);
#pragma omp parallel for simd if (n > 65536)
    for (int64_t i = 0; i < n; i++) y[i] = a[i] * b[i];
    return true;
}

#endif
