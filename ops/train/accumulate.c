/* sum = keep[0] == 0 ? grad : sum + grad, in place: gradients of several micro-batches into one leaf.
 *
 * The first micro-batch of a step (keep = 0) stores instead of adding, so the leaf is never cleared and what it
 * held before, NaN included, does not matter. Belongs to backward: the gradient dies here.
 *
 * Saved: nothing. Recompute: never, it changes a leaf.
 * Refuses: a sum that is computed by a node
 */
#ifndef REAL

#include "ops/ops.h"

static bool accumulate_infer(cg_infer *infer) {
    if (!cg_expect_real(infer, 0) || !cg_expect_same(infer, 1, 0)) return false;
    if (!cg_expect_dtype(infer, 2, infer->in[0]->dtype) || !cg_expect_dims(infer, 2, 1)) return false;
    if (!cg_expect_dim(infer, 2, 0, 1, "one flag")) return false;
    if (!infer->in[0]->leaf)
        return cg_refuse(infer, "sum is computed by a node, expected a leaf to change in place");
    return true;
}

#define CG_KERNEL_FILE "ops/train/accumulate.c"
#include "ops/kernel.h"

static cg_cost accumulate_cost(const cg_node *node) {
    double n = (double)cg_shape_count(&node->in[0]->shape),
           element = (double)cg_dtype_bytes(node->in[0]->dtype);
    return (cg_cost){.flops = n, .bytes = 3 * n * element};
}

#define KEEP(flag)                                                                                             \
    .shape = CG_DIMS(1), .real = (const double[]) { flag }
static const cg_case accumulate_cases[] = {
    {.name = "add", .in = {{.shape = CG_DIMS(3, 5)}, {.shape = CG_DIMS(3, 5)}, {KEEP(1)}}},
    {.name = "store", .in = {{.shape = CG_DIMS(3, 5)}, {.shape = CG_DIMS(3, 5)}, {KEEP(0)}}},
    {.name = "empty", .in = {{.shape = CG_DIMS(0)}, {.shape = CG_DIMS(0)}, {KEEP(1)}}},
    {.name = "large",
     .in = {{.shape = CG_DIMS(331, 227)}, {.shape = CG_DIMS(331, 227)}, {KEEP(1)}},
     .large = true},
    {.name = "shapes differ",
     .in = {{.shape = CG_DIMS(3)}, {.shape = CG_DIMS(2)}, {KEEP(1)}},
     .refuses = "grad has shape [2], expected [3] as sum has"},
    {.name = "two flags",
     .in = {{.shape = CG_DIMS(3)}, {.shape = CG_DIMS(3)}, {.shape = CG_DIMS(2)}},
     .refuses = "keep has shape [2], expected 1"},
    {.name = "wrong dtype",
     .in = {{.shape = CG_DIMS(3)}, {.shape = CG_DIMS(3), .wrong_dtype = true}, {KEEP(1)}},
     .refuses = "grad is i32"},
};

const cg_op cg_op_accumulate = {
    .name = "accumulate",
    .doc = "sum = keep ? sum + grad : grad, in place",
    .in = {"sum", "grad", "keep"},
    .infer = accumulate_infer,
    .no_grad = "cannot: it changes a leaf",
    .mutates = CG_BIT(0),
    .statistic_in = CG_BIT(0) | CG_BIT(1) | CG_BIT(2),
    .replay = CG_REPLAY_SAME_BITS,
    .cost = accumulate_cost,
    .run = CG_RUN(accumulate),
    CG_CASES(accumulate_cases),
};

void cg_accumulate(cg_graph *graph, cg_value *sum, cg_value *grad, cg_value *keep) {
    CG_WITHIN(graph, NULL, CG_BACKWARD, NULL);
    cg_apply(graph, &cg_op_accumulate, NULL, (cg_value *[]){sum, grad, keep}, 3);
}

#else

static bool KERNEL(accumulate)(const cg_run_args *args) {
    REAL *sum = args->in[0].data;
    const REAL *grad = args->in[1].data;
    int64_t n = cg_shape_count(&args->in[0].shape);
    if (((const REAL *)args->in[2].data)[0] == 0) {
#pragma omp parallel for simd if (n > 65536)
        for (int64_t i = 0; i < n; i++) sum[i] = grad[i];
    } else {
#pragma omp parallel for simd if (n > 65536)
        for (int64_t i = 0; i < n; i++) sum[i] += grad[i];
    }
    return true;
}

#endif
