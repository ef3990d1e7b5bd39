/* Chosen columns of each row.
 *
 *   x [T, C]   index [T, K] i32, -1 = none -> y [T, K],  y[t,j] = x[t, index[t,j]], -inf where index is -1
 *
 * Backward: dx[t,c] = sum of dy over the slots of row t that name c, exactly 0 where none does; dy of a -1 slot
 * is not read.
 *
 * Saved:     index                          (4*T*K bytes)
 * Recompute: same bits
 * Refuses:   shapes that differ; at run time an index outside -1..C-1. There are no rows here to tell what a
 *            token sees: an index into another document passes. Who reads the list beside the rows refuses it
 *            (csa_attention, indexer_health), and lists of the ops that choose never hold one
 */
#ifndef REAL

#include "ops/attributes.h"
#include "ops/indexer/indexer.h"

static bool gather_infer(cg_infer *infer) {
    if (!cg_expect_real(infer, 0) || !cg_expect_dims(infer, 0, 2) || !cg_expect_dtype(infer, 1, CG_I32) ||
        !cg_expect_dims(infer, 1, 2) || !cg_expect_dim(infer, 1, 0, infer->in[0]->shape.dims[0], "rows of x"))
        return false;
    cg_infer_out(infer, 0, infer->in[0]->dtype, infer->in[1]->shape);
    return true;
}

static bool gather_grad_infer(cg_infer *infer) {
    const int64_t C = ((const gather_grad_attr *)infer->attr)->n_columns;
    if (!cg_expect_real(infer, 0) || !cg_expect_dims(infer, 0, 2) || !cg_expect_dtype(infer, 1, CG_I32) ||
        !cg_expect_dims(infer, 1, 2) ||
        !cg_expect_dim(infer, 1, 0, infer->in[0]->shape.dims[0], "rows of dy") ||
        !cg_expect_dim(infer, 1, 1, infer->in[0]->shape.dims[1], "columns of dy"))
        return false;
    if (C < 0) return cg_refuse(infer, "x has %lld columns, expected 0 or more", (long long)C);
    cg_infer_out(infer, 0, infer->in[0]->dtype, CG_SHAPE(infer->in[0]->shape.dims[0], C));
    return true;
}

#define CG_KERNEL_FILE "ops/indexer/gather.c"
#include "ops/kernel.h"

extern const cg_op cg_op_gather_grad;

static void gather_build_grad(cg_graph *graph, const cg_node *node, cg_value *const *dout, cg_value **din) {
    din[0] = cg_apply(graph, &cg_op_gather_grad, &(gather_grad_attr){node->in[0]->shape.dims[1]},
                      (cg_value *[]){dout[0], node->in[1]}, 2);
}

/* Only the chosen columns move. */
static cg_cost gather_cost(const cg_node *node) {
    const double slots = (double)cg_shape_count(&node->in[1]->shape);
    return (cg_cost){.bytes = slots * (2 * (double)cg_dtype_bytes(node->in[0]->dtype) + sizeof(int32_t))};
}

static cg_cost gather_grad_cost(const cg_node *node) {
    return (cg_cost){.flops = (double)cg_shape_count(&node->in[1]->shape), .bytes = cg_node_bytes(node)};
}

#define LIST                                                                                                   \
    {                                                                                                          \
        .shape = CG_DIMS(3, 3), .i32 = (int32_t[]) { 2, -1, 0, -1, -1, -1, 3, 3, 1 }                           \
    }

#define FOUR(...) __VA_ARGS__, __VA_ARGS__, __VA_ARGS__, __VA_ARGS__
#define LIST_64                                                                                                \
    {                                                                                                          \
        .shape = CG_DIMS(64, 5), .i32 = (int32_t[]) { FOUR(FOUR(FOUR(7, -1, 130, 0, 7))) }                     \
    }

static const cg_case gather_cases[] = {
    {.name = "gaps, repeats, an empty row", .in = {{.shape = CG_DIMS(3, 4)}, LIST}, .crosses = "index"},
    {.name = "large", .in = {{.shape = CG_DIMS(64, 131)}, LIST_64}, .large = true},
    {.name = "no slot", .in = {{.shape = CG_DIMS(2, 3)}, {.shape = CG_DIMS(2, 0), .i32 = (int32_t[]){0}}}},
    {.name = "no column",
     .in = {{.shape = CG_DIMS(1, 0)}, {.shape = CG_DIMS(1, 2), .i32 = (int32_t[]){-1, -1}}}},
    {.name = "no row", .in = {{.shape = CG_DIMS(0, 3)}, {.shape = CG_DIMS(0, 2), .i32 = (int32_t[]){0}}}},
    {.name = "index outside",
     .in = {{.shape = CG_DIMS(1, 2)}, {.shape = CG_DIMS(1, 2), .i32 = (int32_t[]){0, 2}}},
     .run_error = "row 0: index[1] is 2, expected -1 or 0 to 1"},
    {.name = "rows differ",
     .in = {{.shape = CG_DIMS(2, 4)}, LIST},
     .refuses = "index has shape [3, 3], expected 2 in dimension 0"},
};

static const cg_case gather_grad_cases[] = {
    {.name = "gaps, repeats, an empty row",
     .in = {{.shape = CG_DIMS(3, 3)}, LIST},
     .attr = &(gather_grad_attr){4}},
    {.name = "index outside",
     .in = {{.shape = CG_DIMS(3, 3)}, LIST},
     .attr = &(gather_grad_attr){3},
     .run_error = "row 2: index[0] is 3"},
    {.name = "slots differ",
     .in = {{.shape = CG_DIMS(3, 2)}, LIST},
     .attr = &(gather_grad_attr){4},
     .refuses = "index has shape [3, 3], expected 2 in dimension 1"},
};

const cg_op cg_op_gather = {
    .name = "gather",
    .doc = "y[t,j] = x[t, index[t,j]], -inf where index is -1",
    .in = {"x", "index"},
    .out = {"y"},
    .infer = gather_infer,
    .differentiable = CG_BIT(0),
    .grad = gather_build_grad,
    .by_row = CG_BIT(0) | CG_BIT(1),
    .replay = CG_REPLAY_SAME_BITS,
    .cost = gather_cost,
    .run = CG_RUN(gather),
    CG_CASES(gather_cases),
};

const cg_op cg_op_gather_grad = {
    .name = "gather_grad",
    .doc = "gradient of gather",
    .in = {"dy", "index"},
    .out = {"dx"},
    .attr_bytes = sizeof(gather_grad_attr),
    .infer = gather_grad_infer,
    .no_grad = "not yet: second derivatives",
    .by_row = CG_BIT(0) | CG_BIT(1),
    .replay = CG_REPLAY_SAME_BITS,
    .cost = gather_grad_cost,
    .run = CG_RUN(gather_grad),
    CG_CASES(gather_grad_cases),
};

cg_value *cg_gather(cg_graph *graph, cg_value *x, cg_value *index) {
    return cg_apply(graph, &cg_op_gather, NULL, (cg_value *[]){x, index}, 2);
}

#else

static bool KERNEL(gather)(const cg_run_args *args) {
    const REAL *x = args->in[0].data;
    const int32_t *index = args->in[1].data;
    REAL *y = args->out[0].data;
    const int64_t T = args->in[0].shape.dims[0], C = args->in[0].shape.dims[1], K = args->in[1].shape.dims[1];
    if (!cg_index_fits(args, "index", index, T, K, C)) return false;
#pragma omp parallel for schedule(static) if (T * K > 16384)
    for (int64_t t = 0; t < T; t++)
        for (int64_t j = 0; j < K; j++) {
            int64_t c = index[t * K + j];
            y[t * K + j] = c < 0 ? -(REAL)INFINITY : x[t * C + c];
        }
    return true;
}

static bool KERNEL(gather_grad)(const cg_run_args *args) {
    const REAL *dy = args->in[0].data;
    const int32_t *index = args->in[1].data;
    REAL *dx = args->out[0].data;
    const int64_t T = args->in[1].shape.dims[0], K = args->in[1].shape.dims[1], C = args->out[0].shape.dims[1];
    if (!cg_index_fits(args, "index", index, T, K, C)) return false;
#pragma omp parallel for schedule(static) if (T * (C + K) > 16384)
    for (int64_t t = 0; t < T; t++) {
        for (int64_t c = 0; c < C; c++) dx[t * C + c] = 0;
        for (int64_t j = 0; j < K; j++)
            if (index[t * K + j] >= 0) dx[t * C + index[t * K + j]] += dy[t * K + j];
    }
    return true;
}

#endif
