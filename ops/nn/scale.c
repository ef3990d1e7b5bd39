/* y = factor * x.
 *
 * Saved: nothing. Recompute: same bits. May work in place.
 */
#ifndef REAL

#include "ops/attributes.h"
#include "ops/ops.h"

static bool scale_infer(cg_infer *infer) {
    if (!cg_expect_real(infer, 0)) return false;
    const double factor = ((const scale_attr *)infer->attr)->factor;
    if (!(factor - factor == 0)) return cg_refuse(infer, "factor is %g, expected a finite number", factor);
    cg_infer_out(infer, 0, infer->in[0]->dtype, infer->in[0]->shape);
    return true;
}

#define CG_KERNEL_FILE "ops/nn/scale.c"
#include "ops/kernel.h"

static void scale_build_grad(cg_graph *graph, const cg_node *node, cg_value *const *dout, cg_value **din) {
    din[0] = cg_scale(graph, dout[0], ((const scale_attr *)node->attr)->factor);
}

static cg_cost scale_cost(const cg_node *node) {
    return (cg_cost){.flops = (double)cg_shape_count(&node->out[0]->shape), .bytes = cg_node_bytes(node)};
}

static const cg_case scale_cases[] = {
    {.name = "odd", .in = {{.shape = CG_DIMS(3, 5)}}, .attr = &(scale_attr){-1.75}, .crosses = ""},
    {.name = "empty", .in = {{.shape = CG_DIMS(0, 5)}}, .attr = &(scale_attr){2}, .crosses = ""},
    {.name = "not finite",
     .in = {{.shape = CG_DIMS(2)}},
     .attr = &(scale_attr){__builtin_inf()},
     .refuses = "finite"},
    {.name = "wrong dtype",
     .in = {{.shape = CG_DIMS(2), .wrong_dtype = true}},
     .attr = &(scale_attr){2},
     .refuses = "x is i32, expected f32, f64 or bf16"},
};

const cg_op cg_op_scale = {
    .name = "scale",
    .doc = "y = factor * x",
    .in = {"x"},
    .out = {"y"},
    .attr_bytes = sizeof(scale_attr),
    .infer = scale_infer,
    .differentiable = CG_BIT(0),
    .grad = scale_build_grad,
    .overwrites = CG_BIT(0),
    .elementwise = true,
    .replay = CG_REPLAY_SAME_BITS,
    .cost = scale_cost,
    .run = CG_RUN(scale),
    CG_CASES(scale_cases),
};

cg_value *cg_scale(cg_graph *graph, cg_value *x, double factor) {
    return cg_apply(graph, &cg_op_scale, &(scale_attr){factor}, (cg_value *[]){x}, 1);
}

#else

static bool KERNEL(scale)(const cg_run_args *args) {
    const REAL *x = args->in[0].data;
    REAL *y = args->out[0].data;
    const REAL factor = (REAL)((const scale_attr *)args->attr)->factor;
    int64_t n = cg_shape_count(&args->out[0].shape);
#pragma omp parallel for simd if (n > 65536)
    for (int64_t i = 0; i < n; i++) y[i] = factor * x[i];
    return true;
}

#endif
