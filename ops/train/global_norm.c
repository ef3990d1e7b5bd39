/* norm = sqrt of the sum of the squares of all elements of all inputs -> [1].
 *
 * Squared and summed in f64, in an order that the shapes fix: f32 squares would overflow at 1.8e19.
 *
 * Saved: nothing. Recompute: same bits. Belongs to the optimizer.
 */
#ifndef REAL

#include "ops/chunks.h"
#include "ops/ops.h"

enum { GLOBAL_NORM_LEAST = 16384 }; /* elements of a chunk */

static bool global_norm_infer(cg_infer *infer) {
    if (!cg_expect_real(infer, 0)) return false;
    for (int i = 1; i < infer->n_in; i++)
        if (!cg_expect_dtype(infer, i, infer->in[0]->dtype)) return false;
    cg_infer_out(infer, 0, infer->in[0]->dtype, CG_SHAPE(1));
    return true;
}

#define CG_KERNEL_FILE "ops/train/global_norm.c"
#include "ops/kernel.h"

static size_t global_norm_workspace(const cg_node *node) {
    (void)node;
    return sizeof(double) * CG_MAX_CHUNKS;
}

static cg_cost global_norm_cost(const cg_node *node) {
    double flops = 0;
    for (int i = 0; i < node->n_in; i++) flops += 2 * (double)cg_shape_count(&node->in[i]->shape);
    return (cg_cost){.flops = flops, .bytes = cg_node_bytes(node)};
}

static const cg_case global_norm_cases[] = {
    {.name = "three",
     .n_in = 3,
     .in = {{.shape = CG_DIMS(3, 5)}, {.shape = CG_DIMS(0)}, {.shape = CG_DIMS(7)}}},
    {.name = "one", .n_in = 1, .in = {{.shape = CG_DIMS(1)}}},
    {.name = "nothing", .n_in = 1, .in = {{.shape = CG_DIMS(0)}}},
    {.name = "huge", .n_in = 1, .in = {{.shape = CG_DIMS(2), .real = (const double[]){3e25, -4e25}}}},
    {.name = "large", .n_in = 2, .in = {{.shape = CG_DIMS(331, 227)}, {.shape = CG_DIMS(51)}}, .large = true},
    {.name = "wrong dtype",
     .n_in = 2,
     .in = {{.shape = CG_DIMS(2)}, {.shape = CG_DIMS(2), .wrong_dtype = true}},
     .refuses = "grad is i32"},
};

const cg_op cg_op_global_norm = {
    .name = "global_norm",
    .doc = "sqrt of the sum of all squares",
    .in = {"grad"},
    .out = {"norm"},
    .variadic = true,
    .infer = global_norm_infer,
    .no_grad = "not yet: no loss reads it",
    .statistic_in = CG_BIT(0),
    .statistic_out = CG_BIT(0),
    .replay = CG_REPLAY_SAME_BITS,
    .cost = global_norm_cost,
    .workspace = global_norm_workspace,
    .run = CG_RUN(global_norm),
    CG_CASES(global_norm_cases),
};

cg_value *cg_global_norm(cg_graph *graph, cg_value *const *grads, int n) {
    CG_WITHIN(graph, NULL, CG_OPTIMIZE, NULL);
    return cg_apply(graph, &cg_op_global_norm, NULL, grads, n);
}

#else

static double KERNEL(squares)(const REAL *x, int64_t n, double *partial) {
    const int64_t chunks = cg_chunk_count(n, GLOBAL_NORM_LEAST);
#pragma omp parallel for schedule(static) if (chunks > 1)
    for (int64_t c = 0; c < chunks; c++) {
        double sum = 0;
        const int64_t end = cg_chunk_start(n, chunks, c + 1);
#pragma omp simd reduction(+ : sum)
        for (int64_t i = cg_chunk_start(n, chunks, c); i < end; i++) sum += (double)x[i] * (double)x[i];
        partial[c] = sum;
    }
    double total = 0;
    for (int64_t c = 0; c < chunks; c++) total += partial[c];
    return total;
}

static bool KERNEL(global_norm)(const cg_run_args *args) {
    double total = 0;
    for (int i = 0; i < args->n_in; i++)
        total += KERNEL(squares)(args->in[i].data, cg_shape_count(&args->in[i].shape), args->workspace);
    ((REAL *)args->out[0].data)[0] = (REAL)sqrt(total);
    return true;
}

#endif
