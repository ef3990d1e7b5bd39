/* y = sum of all elements of x -> [1], in an order that the shape fixes; f32 elements are added in f64.
 *
 * Saved:     nothing (the shape of x is an attribute of the gradient)
 * Recompute: same bits
 */
#ifndef REAL

#include "ops/attributes.h"
#include "ops/chunks.h"
#include "ops/ops.h"

extern const cg_op cg_op_sum_grad;

enum { SUM_LEAST = 16384 }; /* elements of a chunk */

static bool sum_infer(cg_infer *infer) {
    if (!cg_expect_real(infer, 0)) return false;
    cg_infer_out(infer, 0, infer->in[0]->dtype, CG_SHAPE(1));
    return true;
}

static bool sum_grad_infer(cg_infer *infer) {
    if (!cg_expect_real(infer, 0) || !cg_expect_dims(infer, 0, 1)) return false;
    if (!cg_expect_dim(infer, 0, 0, 1, "the gradient of one sum")) return false;
    cg_infer_out(infer, 0, infer->in[0]->dtype, ((const sum_grad_attr *)infer->attr)->shape);
    return true;
}

#define CG_KERNEL_FILE "ops/nn/sum.c"
#include "ops/kernel.h"

static void sum_build_grad(cg_graph *graph, const cg_node *node, cg_value *const *dout, cg_value **din) {
    const sum_grad_attr attr = {node->in[0]->shape};
    din[0] =
        cg_cast(graph, cg_apply(graph, &cg_op_sum_grad, &attr, (cg_value *[]){dout[0]}, 1), node->in[0]->dtype);
}

static void sum_grad_build_grad(cg_graph *graph, const cg_node *node, cg_value *const *dout, cg_value **din) {
    (void)node;
    din[0] = cg_sum(graph, dout[0]);
}

static size_t sum_workspace(const cg_node *node) {
    return sizeof(double) * (size_t)cg_chunk_count(cg_shape_count(&node->in[0]->shape), SUM_LEAST);
}

static cg_cost sum_cost(const cg_node *node) {
    return (cg_cost){.flops = (double)cg_shape_count(&node->in[0]->shape), .bytes = cg_node_bytes(node)};
}

static cg_cost sum_grad_cost(const cg_node *node) { return (cg_cost){.bytes = cg_node_bytes(node)}; }

static const cg_case sum_cases[] = {
    {.name = "odd", .in = {{.shape = CG_DIMS(3, 5)}}, .crosses = ""},
    {.name = "one", .in = {{.shape = CG_DIMS(1)}}, .crosses = ""},
    {.name = "empty", .in = {{.shape = CG_DIMS(0, 5)}}, .crosses = ""},
    {.name = "large", .in = {{.shape = CG_DIMS(331, 227), .offset = 0.5}}, .crosses = "", .large = true},
    {.name = "wrong dtype", .in = {{.shape = CG_DIMS(2), .wrong_dtype = true}}, .refuses = "x is i32"},
};

const cg_op cg_op_sum = {
    .name = "sum",
    .doc = "y = sum of all elements",
    .in = {"x"},
    .out = {"y"},
    .infer = sum_infer,
    .differentiable = CG_BIT(0),
    .grad = sum_build_grad,
    .statistic_out = CG_BIT(0),
    .replay = CG_REPLAY_SAME_BITS,
    .cost = sum_cost,
    .workspace = sum_workspace,
    .run = CG_RUN(sum),
    CG_CASES(sum_cases),
};

static const cg_case sum_grad_cases[] = {
    {.name = "odd", .in = {{.shape = CG_DIMS(1)}}, .attr = &(sum_grad_attr){CG_DIMS(3, 5)}, .crosses = ""},
    {.name = "empty", .in = {{.shape = CG_DIMS(1)}}, .attr = &(sum_grad_attr){CG_DIMS(0, 5)}, .crosses = ""},
    {.name = "two gradients",
     .in = {{.shape = CG_DIMS(2)}},
     .attr = &(sum_grad_attr){CG_DIMS(3)},
     .refuses = "dy has shape [2], expected 1"},
};

const cg_op cg_op_sum_grad = {
    .name = "sum_grad",
    .doc = "dx = dy everywhere",
    .in = {"dy"},
    .out = {"dx"},
    .attr_bytes = sizeof(sum_grad_attr),
    .infer = sum_grad_infer,
    .differentiable = CG_BIT(0),
    .grad = sum_grad_build_grad,
    .statistic_in = CG_BIT(0),
    .replay = CG_REPLAY_SAME_BITS,
    .cost = sum_grad_cost,
    .run = CG_RUN(sum_grad),
    CG_CASES(sum_grad_cases),
};

cg_value *cg_sum(cg_graph *graph, cg_value *x) {
    return cg_apply(graph, &cg_op_sum, NULL, (cg_value *[]){x}, 1);
}

#else

static bool KERNEL(sum)(const cg_run_args *args) {
    const REAL *x = args->in[0].data;
    double *partial = args->workspace;
    int64_t n = cg_shape_count(&args->in[0].shape), chunks = cg_chunk_count(n, SUM_LEAST);
#pragma omp parallel for schedule(static) if (chunks > 1)
    for (int64_t c = 0; c < chunks; c++) {
        double sum = 0;
        const int64_t end = cg_chunk_start(n, chunks, c + 1);
#pragma omp simd reduction(+ : sum)
        for (int64_t i = cg_chunk_start(n, chunks, c); i < end; i++) sum += (double)x[i];
        partial[c] = sum;
    }
    double total = 0;
    for (int64_t c = 0; c < chunks; c++) total += partial[c];
    ((REAL *)args->out[0].data)[0] = (REAL)total;
    return true;
}

static bool KERNEL(sum_grad)(const cg_run_args *args) {
    const REAL dy = ((const REAL *)args->in[0].data)[0];
    REAL *dx = args->out[0].data;
    int64_t n = cg_shape_count(&args->out[0].shape);
#pragma omp parallel for simd if (n > 65536)
    for (int64_t i = 0; i < n; i++) dx[i] = dy;
    return true;
}

#endif
