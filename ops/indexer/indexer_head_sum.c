/* Heads to one score: the weighted sum of the indexer spelled out.
 *
 *   x [T, Hi, C]   w [T, Hi] -> y [T, C],  y[t,c] = sum_h w[t,h] x[t,h,c], heads in order
 *
 *   dx[t,h,c] = w[t,h] dy[t,c]                 dw[t,h] = sum_c dy[t,c] x[t,h,c]
 *
 * A column with dy = 0 is left out of dw, so columns that nothing chose may hold anything.
 *
 * Saved:     x w                            (4*(T*Hi*C + T*Hi) bytes in f32)
 * Recompute: same bits
 * Refuses:   shapes that differ
 * Source:    DeepSeek-V4 report, arXiv 2606.19348, section 2.3.3
 */
#ifndef REAL

#include "ops/indexer/indexer.h"

static bool head_sum_expect(cg_infer *infer, int i) {
    return cg_expect_real(infer, i) && cg_expect_dims(infer, i, 3) &&
           cg_expect_dtype(infer, i + 1, infer->in[i]->dtype) && cg_expect_dims(infer, i + 1, 2) &&
           cg_expect_dim(infer, i + 1, 0, infer->in[i]->shape.dims[0], "rows of x") &&
           cg_expect_dim(infer, i + 1, 1, infer->in[i]->shape.dims[1], "heads of x");
}

static bool indexer_head_sum_infer(cg_infer *infer) {
    if (!head_sum_expect(infer, 0)) return false;
    const int64_t *x = infer->in[0]->shape.dims;
    cg_infer_out(infer, 0, infer->in[0]->dtype, CG_SHAPE(x[0], x[2]));
    return true;
}

static bool indexer_head_sum_grad_infer(cg_infer *infer) {
    if (!head_sum_expect(infer, 1) || !cg_expect_dtype(infer, 0, infer->in[1]->dtype) ||
        !cg_expect_dims(infer, 0, 2) || !cg_expect_dim(infer, 0, 0, infer->in[1]->shape.dims[0], "rows of x") ||
        !cg_expect_dim(infer, 0, 1, infer->in[1]->shape.dims[2], "columns of x"))
        return false;
    cg_infer_out(infer, 0, infer->in[1]->dtype, infer->in[1]->shape);
    cg_infer_out(infer, 1, infer->in[1]->dtype, infer->in[2]->shape);
    return true;
}

#define CG_KERNEL_FILE "ops/indexer/indexer_head_sum.c"
#include "ops/kernel.h"

extern const cg_op cg_op_indexer_head_sum_grad;

static void indexer_head_sum_build_grad(cg_graph *graph, const cg_node *node, cg_value *const *dout,
                                        cg_value **din) {
    cg_value *dx = cg_apply(graph, &cg_op_indexer_head_sum_grad, NULL,
                            (cg_value *[]){dout[0], node->in[0], node->in[1]}, 3);
    din[0] = dx;
    din[1] = cg_output(dx, 1);
}

static cg_cost indexer_head_sum_cost(const cg_node *node) {
    return (cg_cost){.flops = 2 * (double)cg_shape_count(&node->in[0]->shape), .bytes = cg_node_bytes(node)};
}

static cg_cost indexer_head_sum_grad_cost(const cg_node *node) {
    return (cg_cost){.flops = 3 * (double)cg_shape_count(&node->in[1]->shape), .bytes = cg_node_bytes(node)};
}

#define NAN_ __builtin_nan("")

static const cg_case indexer_head_sum_cases[] = {
    {.name = "odd", .in = {{.shape = CG_DIMS(3, 2, 5)}, {.shape = CG_DIMS(3, 2)}}, .crosses = "x w"},
    {.name = "no column", .in = {{.shape = CG_DIMS(3, 2, 0)}, {.shape = CG_DIMS(3, 2)}}, .crosses = "x w"},
    {.name = "no head", .in = {{.shape = CG_DIMS(2, 0, 3)}, {.shape = CG_DIMS(2, 0)}}},
    {.name = "no row", .in = {{.shape = CG_DIMS(0, 2, 5)}, {.shape = CG_DIMS(0, 2)}}},
    {.name = "large", .in = {{.shape = CG_DIMS(65, 9, 131)}, {.shape = CG_DIMS(65, 9)}}, .large = true},
    {.name = "heads differ",
     .in = {{.shape = CG_DIMS(3, 2, 5)}, {.shape = CG_DIMS(3, 3)}},
     .refuses = "w has shape [3, 3], expected 2 in dimension 1"},
};

static const cg_case indexer_head_sum_grad_cases[] = {
    {.name = "NaN where nothing was chosen",
     .in = {{.shape = CG_DIMS(1, 3), .real = (double[]){0, 2, -1}},
            {.shape = CG_DIMS(1, 2, 3), .real = (double[]){NAN_, 3, .5, NAN_, -1, 4}},
            {.shape = CG_DIMS(1, 2)}}},
    {.name = "columns differ",
     .in = {{.shape = CG_DIMS(1, 4)}, {.shape = CG_DIMS(1, 2, 3)}, {.shape = CG_DIMS(1, 2)}},
     .refuses = "dy has shape [1, 4], expected 3 in dimension 1"},
};

const cg_op cg_op_indexer_head_sum = {
    .name = "indexer_head_sum",
    .doc = "y[t,c] = sum_h w[t,h] x[t,h,c]",
    .in = {"x", "w"},
    .out = {"y"},
    .infer = indexer_head_sum_infer,
    .differentiable = CG_BIT(0) | CG_BIT(1),
    .grad = indexer_head_sum_build_grad,
    .statistic_out = CG_BIT(0),
    .by_row = CG_BIT(0) | CG_BIT(1),
    .replay = CG_REPLAY_SAME_BITS,
    .cost = indexer_head_sum_cost,
    .run = CG_RUN(indexer_head_sum),
    CG_CASES(indexer_head_sum_cases),
};

const cg_op cg_op_indexer_head_sum_grad = {
    .name = "indexer_head_sum_grad",
    .doc = "gradients of indexer_head_sum",
    .in = {"dy", "x", "w"},
    .out = {"dx", "dw"},
    .infer = indexer_head_sum_grad_infer,
    .no_grad = "not yet: second derivatives",
    .statistic_in = CG_BIT(0),
    .by_row = CG_BIT(0) | CG_BIT(1) | CG_BIT(2),
    .replay = CG_REPLAY_SAME_BITS,
    .cost = indexer_head_sum_grad_cost,
    .run = CG_RUN(indexer_head_sum_grad),
    CG_CASES(indexer_head_sum_grad_cases),
};

cg_value *cg_indexer_head_sum(cg_graph *graph, cg_value *x, cg_value *w) {
    return cg_apply(graph, &cg_op_indexer_head_sum, NULL, (cg_value *[]){x, w}, 2);
}

#else

#include "ops/indexer/fused.h"

static bool KERNEL(indexer_head_sum)(const cg_run_args *args) {
    const REAL *x = args->in[0].data, *w = args->in[1].data;
    REAL *y = args->out[0].data;
    const int64_t T = args->in[0].shape.dims[0], Hi = args->in[0].shape.dims[1], C = args->in[0].shape.dims[2];
#pragma omp parallel for schedule(static) if (T * Hi * C > 16384)
    for (int64_t t = 0; t < T; t++) {
        for (int64_t c = 0; c < C; c++) y[t * C + c] = 0;
        for (int64_t h = 0; h < Hi; h++) {
            const REAL weight = w[t * Hi + h], *row = x + (t * Hi + h) * C;
            for (int64_t c = 0; c < C; c++) y[t * C + c] = KERNEL(fused)(weight, row[c], y[t * C + c]);
        }
    }
    return true;
}

static bool KERNEL(indexer_head_sum_grad)(const cg_run_args *args) {
    const REAL *dy = args->in[0].data, *x = args->in[1].data, *w = args->in[2].data;
    REAL *dx = args->out[0].data, *dw = args->out[1].data;
    const int64_t T = args->in[1].shape.dims[0], Hi = args->in[1].shape.dims[1], C = args->in[1].shape.dims[2];
#pragma omp parallel for schedule(static) if (T * Hi * C > 16384)
    for (int64_t t = 0; t < T; t++)
        for (int64_t h = 0; h < Hi; h++) {
            const REAL weight = w[t * Hi + h], *row = x + (t * Hi + h) * C, *dout = dy + t * C;
            REAL *drow = dx + (t * Hi + h) * C, sum = 0;
            for (int64_t c = 0; c < C; c++) drow[c] = weight * dout[c];
#pragma omp simd reduction(+ : sum)
            for (int64_t c = 0; c < C; c++) sum += dout[c] != 0 ? dout[c] * row[c] : 0;
            dw[t * Hi + h] = sum;
        }
    return true;
}

#endif
