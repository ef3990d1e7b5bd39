/* y = x / sqrt(mean(x^2) + eps) over the last axis, times weight when there is one.
 *
 *   x [..., D]   weight [D] or absent   -> y as x
 *
 *   r = 1 / sqrt(mean_j x_j^2 + eps),  y_j = r x_j w_j
 *   g_j = w_j dy_j,  dx_j = r g_j - x_j r^3/D sum_i g_i x_i,  dw_j = sum over rows of dy_j r x_j
 *
 * Saved:     x weight     (4*(rows*D + D) bytes in f32); r is computed again, one pass over a row that is read
 *            anyway
 * Recompute: same bits. May work in place.
 * Refuses:   eps below 0 or not finite; a weight of another length
 * Source:    Zhang and Sennrich 2019
 */
#ifndef REAL

#include "ops/attributes.h"
#include "ops/chunks.h"
#include "ops/ops.h"

extern const cg_op cg_op_rms_norm_grad;

enum { RMS_NORM_LEAST = 8 }; /* rows of a chunk whose part of dweight is summed apart */

static int64_t last_dim(const cg_shape *shape) { return shape->dims[shape->n_dims - 1]; }

static int64_t rows_of(const cg_shape *shape) {
    int64_t rows = 1;
    for (int i = 0; i + 1 < shape->n_dims; i++) rows *= shape->dims[i];
    return rows;
}

static bool rms_norm_infer(cg_infer *infer) {
    if (!cg_expect_real(infer, 0)) return false;
    const cg_value *x = infer->in[0], *weight = infer->in[1];
    if (x->shape.n_dims < 1) return cg_refuse(infer, "x has no dimension, expected at least one");
    if (weight) {
        if (!cg_expect_dtype(infer, 1, x->dtype) || !cg_expect_dims(infer, 1, 1)) return false;
        if (!cg_expect_dim(infer, 1, 0, last_dim(&x->shape), "the last axis of x")) return false;
    }
    const double eps = ((const rms_norm_attr *)infer->attr)->eps;
    if (!(eps >= 0 && eps - eps == 0))
        return cg_refuse(infer, "eps is %g, expected a finite number from 0 on", eps);
    cg_infer_out(infer, 0, x->dtype, x->shape);
    return true;
}

static bool rms_norm_grad_infer(cg_infer *infer) {
    if (!rms_norm_infer(infer) || !cg_expect_same(infer, 2, 0)) return false;
    infer->n_out = infer->in[1] ? 2 : 1;
    if (infer->in[1]) cg_infer_out(infer, 1, infer->in[1]->dtype, infer->in[1]->shape);
    return true;
}

#define CG_KERNEL_FILE "ops/nn/rms_norm.c"
#include "ops/kernel.h"

static void rms_norm_build_grad(cg_graph *graph, const cg_node *node, cg_value *const *dout, cg_value **din) {
    cg_value *dx =
        cg_apply(graph, &cg_op_rms_norm_grad, node->attr, (cg_value *[]){node->in[0], node->in[1], dout[0]}, 3);
    din[0] = dx;
    if (node->in[1]) din[1] = cg_output(dx, 1);
}

static size_t rms_norm_grad_workspace(const cg_node *node) {
    const cg_value *x = node->in[0];
    if (!node->in[1]) return 0;
    size_t piece = cg_piece(cg_dtype_bytes(x->dtype) * (size_t)last_dim(&x->shape));
    return piece * (size_t)cg_chunk_count(rows_of(&x->shape), RMS_NORM_LEAST);
}

static cg_cost rms_norm_cost(const cg_node *node) {
    return (cg_cost){.flops = 4 * (double)cg_shape_count(&node->in[0]->shape), .bytes = cg_node_bytes(node)};
}

static cg_cost rms_norm_grad_cost(const cg_node *node) {
    return (cg_cost){.flops = 11 * (double)cg_shape_count(&node->in[0]->shape), .bytes = cg_node_bytes(node)};
}

#define EPS                                                                                                    \
    &(rms_norm_attr) { 1e-6 }
static const cg_case rms_norm_cases[] = {
    {.name = "weighted",
     .in = {{.shape = CG_DIMS(4, 5)}, {.shape = CG_DIMS(5), .offset = 1, .scale = 0.5}},
     .attr = EPS,
     .crosses = "x weight"},
    {.name = "no weight", .in = {{.shape = CG_DIMS(2, 3, 4)}, {.absent = true}}, .attr = EPS, .crosses = "x"},
    {.name = "large eps",
     .in = {{.shape = CG_DIMS(3, 4)}, {.shape = CG_DIMS(4)}},
     .attr = &(rms_norm_attr){0.5},
     .crosses = "x weight"},
    {.name = "one row",
     .in = {{.shape = CG_DIMS(7)}, {.shape = CG_DIMS(7)}},
     .attr = EPS,
     .crosses = "x weight"},
    {.name = "several chunks",
     .in = {{.shape = CG_DIMS(19, 2)}, {.shape = CG_DIMS(2)}},
     .attr = EPS,
     .crosses = "x weight"},
    {.name = "weight constant",
     .in = {{.shape = CG_DIMS(3, 4)}, {.shape = CG_DIMS(4), .constant = true}},
     .attr = EPS,
     .crosses = "x weight"},
    {.name = "zero row",
     .in = {{.shape = CG_DIMS(2, 2), .real = (const double[]){0, 0, 1, -2}}, {.shape = CG_DIMS(2)}},
     .attr = &(rms_norm_attr){0.25},
     .crosses = "x weight"},
    {.name = "no rows",
     .in = {{.shape = CG_DIMS(0, 4)}, {.shape = CG_DIMS(4)}},
     .attr = EPS,
     .crosses = "x weight"},
    {.name = "no columns",
     .in = {{.shape = CG_DIMS(3, 0)}, {.shape = CG_DIMS(0)}},
     .attr = EPS,
     .crosses = "x weight"},
    {.name = "large",
     .in = {{.shape = CG_DIMS(211, 3, 37)}, {.shape = CG_DIMS(37)}},
     .attr = EPS,
     .crosses = "x weight",
     .large = true},
    {.name = "rows of whole packs",
     .in = {{.shape = CG_DIMS(203, 40)}, {.shape = CG_DIMS(40)}},
     .attr = EPS,
     .crosses = "x weight",
     .large = true},
    {.name = "longer rows of whole packs",
     .in = {{.shape = CG_DIMS(11, 504)}, {.shape = CG_DIMS(504)}},
     .attr = EPS,
     .crosses = "x weight",
     .large = true},
    {.name = "long rows of whole packs",
     .in = {{.shape = CG_DIMS(27, 2088)}, {.shape = CG_DIMS(2088)}},
     .attr = EPS,
     .crosses = "x weight",
     .large = true},
    {.name = "long rows of whole packs, no weight",
     .in = {{.shape = CG_DIMS(3, 2088)}, {.absent = true}},
     .attr = EPS,
     .crosses = "x",
     .large = true},
    {.name = "length of weight",
     .in = {{.shape = CG_DIMS(3, 4)}, {.shape = CG_DIMS(3)}},
     .attr = EPS,
     .refuses = "weight has shape [3], expected 4"},
    {.name = "negative eps",
     .in = {{.shape = CG_DIMS(3, 4)}, {.absent = true}},
     .attr = &(rms_norm_attr){-1},
     .refuses = "eps is -1"},
    {.name = "scalar", .in = {{.shape = {0}}, {.absent = true}}, .attr = EPS, .refuses = "no dimension"},
    {.name = "wrong dtype",
     .in = {{.shape = CG_DIMS(3, 4), .wrong_dtype = true}, {.absent = true}},
     .attr = EPS,
     .refuses = "x is i32"},
};

const cg_op cg_op_rms_norm = {
    .name = "rms_norm",
    .doc = "x / sqrt(mean(x^2) + eps) over the last axis, times weight",
    .in = {"x", "weight"},
    .out = {"y"},
    .optional = CG_BIT(1),
    .attr_bytes = sizeof(rms_norm_attr),
    .infer = rms_norm_infer,
    .differentiable = CG_BIT(0) | CG_BIT(1),
    .grad = rms_norm_build_grad,
    .overwrites = CG_BIT(0),
    .statistic_in = CG_BIT(1),
    .by_row = CG_BIT(0),
    .replay = CG_REPLAY_SAME_BITS,
    .cost = rms_norm_cost,
    .run = CG_RUN(rms_norm),
    CG_CASES(rms_norm_cases),
};

static const cg_case rms_norm_grad_cases[] = {
    {.name = "weighted",
     .in = {{.shape = CG_DIMS(4, 5)}, {.shape = CG_DIMS(5)}, {.shape = CG_DIMS(4, 5)}},
     .attr = EPS},
    {.name = "no weight",
     .in = {{.shape = CG_DIMS(4, 5)}, {.absent = true}, {.shape = CG_DIMS(4, 5)}},
     .attr = EPS},
    {.name = "no rows",
     .in = {{.shape = CG_DIMS(0, 5)}, {.shape = CG_DIMS(5)}, {.shape = CG_DIMS(0, 5)}},
     .attr = EPS},
    {.name = "large",
     .in = {{.shape = CG_DIMS(633, 37)}, {.shape = CG_DIMS(37)}, {.shape = CG_DIMS(633, 37)}},
     .attr = EPS,
     .large = true},
    {.name = "rows of whole packs",
     .in = {{.shape = CG_DIMS(203, 40)}, {.shape = CG_DIMS(40)}, {.shape = CG_DIMS(203, 40)}},
     .attr = EPS,
     .large = true},
    {.name = "shapes differ",
     .in = {{.shape = CG_DIMS(4, 5)}, {.absent = true}, {.shape = CG_DIMS(4, 4)}},
     .attr = EPS,
     .refuses = "dy has shape [4, 4], expected [4, 5] as x has"},
};

const cg_op cg_op_rms_norm_grad = {
    .name = "rms_norm_grad",
    .doc = "gradients of rms_norm",
    .in = {"x", "weight", "dy"},
    .out = {"dx", "dweight"},
    .optional = CG_BIT(1),
    .attr_bytes = sizeof(rms_norm_attr),
    .infer = rms_norm_grad_infer,
    .no_grad = "not yet: second derivatives",
    .overwrites = CG_BIT(0) | CG_BIT(2),
    .statistic_in = CG_BIT(1),
    .statistic_out = CG_BIT(1),
    .by_row = CG_BIT(0) | CG_BIT(2),
    .summed = CG_BIT(1),
    .replay = CG_REPLAY_SAME_BITS,
    .cost = rms_norm_grad_cost,
    .workspace = rms_norm_grad_workspace,
    .run = CG_RUN(rms_norm_grad),
    CG_CASES(rms_norm_grad_cases),
};

cg_value *cg_rms_norm(cg_graph *graph, cg_value *x, cg_value *weight, double eps) {
    return cg_apply(graph, &cg_op_rms_norm, &(rms_norm_attr){eps}, (cg_value *[]){x, weight}, 2);
}

#else

static REAL KERNEL(rms_inverse)(const REAL *x, int64_t D, REAL eps) {
    REAL sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < D; j++) sum += x[j] * x[j];
    return 1 / (REAL)sqrt((double)(sum / (REAL)D + eps));
}

static bool KERNEL(rms_norm)(const cg_run_args *args) {
    const cg_shape *shape = &args->in[0].shape;
    const REAL *w = args->in[1].data, eps = (REAL)((const rms_norm_attr *)args->attr)->eps;
    const int64_t D = last_dim(shape), rows = rows_of(shape);
#pragma omp parallel for schedule(static) if (rows * D > 32768)
    for (int64_t t = 0; t < rows; t++) {
        const REAL *x = (const REAL *)args->in[0].data + t * D;
        REAL *y = (REAL *)args->out[0].data + t * D;
        const REAL r = KERNEL(rms_inverse)(x, D, eps);
        if (w) {
#pragma omp simd
            for (int64_t j = 0; j < D; j++) y[j] = r * x[j] * w[j];
        } else {
#pragma omp simd
            for (int64_t j = 0; j < D; j++) y[j] = r * x[j];
        }
    }
    return true;
}

/* One row; dw is this chunk's sum so far. */
static void KERNEL(rms_norm_grad_row)(const REAL *x, const REAL *w, const REAL *dy, REAL *dx, REAL *dw,
                                      int64_t D, REAL eps) {
    const REAL r = KERNEL(rms_inverse)(x, D, eps);
    REAL dot = 0;
    if (w) {
#pragma omp simd reduction(+ : dot)
        for (int64_t j = 0; j < D; j++) {
            dot += w[j] * dy[j] * x[j];
            dw[j] += dy[j] * (r * x[j]);
        }
    } else {
#pragma omp simd reduction(+ : dot)
        for (int64_t j = 0; j < D; j++) dot += dy[j] * x[j];
    }
    const REAL along = r * r * r * dot / (REAL)D;
    if (w) {
#pragma omp simd
        for (int64_t j = 0; j < D; j++) dx[j] = r * w[j] * dy[j] - along * x[j];
    } else {
#pragma omp simd
        for (int64_t j = 0; j < D; j++) dx[j] = r * dy[j] - along * x[j];
    }
}

static bool KERNEL(rms_norm_grad)(const cg_run_args *args) {
    const cg_shape *shape = &args->in[0].shape;
    const REAL *w = args->in[1].data, eps = (REAL)((const rms_norm_attr *)args->attr)->eps;
    const int64_t D = last_dim(shape), rows = rows_of(shape), chunks = cg_chunk_count(rows, RMS_NORM_LEAST);
    const int64_t stride = (int64_t)(cg_piece(sizeof(REAL) * (size_t)D) / sizeof(REAL));
    REAL *partial = args->workspace;
#pragma omp parallel for schedule(static) if (rows * D > 32768)
    for (int64_t c = 0; c < chunks; c++) {
        REAL *dw = w ? partial + c * stride : NULL;
        for (int64_t j = 0; w && j < D; j++) dw[j] = 0;
        for (int64_t t = cg_chunk_start(rows, chunks, c); t < cg_chunk_start(rows, chunks, c + 1); t++)
            KERNEL(rms_norm_grad_row)
        ((const REAL *)args->in[0].data + t * D, w, (const REAL *)args->in[2].data + t * D,
         (REAL *)args->out[0].data + t * D, dw, D, eps);
    }
    if (!w) return true;
    REAL *dweight = args->out[1].data;
    for (int64_t j = 0; j < D; j++) dweight[j] = partial[j];
    for (int64_t c = 1; c < chunks; c++)
        for (int64_t j = 0; j < D; j++) dweight[j] += partial[c * stride + j];
    return true;
}

#endif
