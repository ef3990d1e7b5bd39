/* Index of the largest entry of each row, the lowest of equals.
 *
 *   x [T, V]   -> y [T] i32
 *
 * Recompute: never, it is a choice
 * Refuses:   rows without columns; NaN, when run
 */
#ifndef REAL

#include "ops/ops.h"

static bool argmax_infer(cg_infer *infer) {
    if (!cg_expect_real(infer, 0) || !cg_expect_dims(infer, 0, 2)) return false;
    const int64_t *x = infer->in[0]->shape.dims;
    if (x[0] > 0 && (x[1] < 1 || x[1] > INT32_MAX))
        return cg_refuse(infer, "x has %lld columns, expected 1 to %d", (long long)x[1], INT32_MAX);
    cg_infer_out(infer, 0, CG_I32, CG_SHAPE(x[0]));
    return true;
}

#define CG_KERNEL_FILE "ops/nn/argmax.c"
#include "ops/kernel.h"

static cg_cost argmax_cost(const cg_node *node) {
    return (cg_cost){.flops = (double)cg_shape_count(&node->in[0]->shape), .bytes = cg_node_bytes(node)};
}

static const double ties[] = {1, 3, 3, -2, -2, -2, 0, -0.0, 0};
static const double with_nan[] = {1, 2, 3, __builtin_nan(""), 0, __builtin_nan("")};
static const double infinite[] = {-__builtin_inf(), -__builtin_inf(), 5, __builtin_inf()};
static const cg_case argmax_cases[] = {
    {.name = "odd", .in = {{.shape = CG_DIMS(3, 7)}}},
    {.name = "ties", .in = {{.shape = CG_DIMS(3, 3), .real = ties}}},
    {.name = "infinite", .in = {{.shape = CG_DIMS(2, 2), .real = infinite}}},
    {.name = "one", .in = {{.shape = CG_DIMS(1, 1)}}},
    {.name = "no rows", .in = {{.shape = CG_DIMS(0, 3)}}},
    {.name = "large", .in = {{.shape = CG_DIMS(301, 331)}}, .large = true},
    {.name = "nan", .in = {{.shape = CG_DIMS(3, 2), .real = with_nan}}, .run_error = "row 1 of x holds NaN"},
    {.name = "no columns", .in = {{.shape = CG_DIMS(3, 0)}}, .refuses = "x has 0 columns"},
    {.name = "one dimension",
     .in = {{.shape = CG_DIMS(3)}},
     .refuses = "x has shape [3], expected 2 dimensions"},
    {.name = "wrong dtype", .in = {{.shape = CG_DIMS(3, 2), .wrong_dtype = true}}, .refuses = "x is i32"},
};

const cg_op cg_op_argmax = {
    .name = "argmax",
    .doc = "index of the largest entry of each row",
    .in = {"x"},
    .out = {"y"},
    .infer = argmax_infer,
    .no_grad = "cannot: indices",
    .by_row = CG_BIT(0),
    .replay = CG_REPLAY_CHOICE,
    .cost = argmax_cost,
    .run = CG_RUN(argmax),
    CG_CASES(argmax_cases),
};

cg_value *cg_argmax(cg_graph *graph, cg_value *x) {
    return cg_apply(graph, &cg_op_argmax, NULL, (cg_value *[]){x}, 1);
}

#else

static bool KERNEL(argmax)(const cg_run_args *args) {
    const int64_t T = args->in[0].shape.dims[0], V = args->in[0].shape.dims[1];
    int32_t *y = args->out[0].data;
    int64_t bad = T;
#pragma omp parallel for schedule(static) reduction(min : bad) if (T * V > 32768)
    for (int64_t t = 0; t < T; t++) {
        const REAL *x = (const REAL *)args->in[0].data + t * V;
        REAL top = (REAL)-INFINITY;
        int nan = 0;
#pragma omp simd reduction(max : top) reduction(| : nan)
        for (int64_t v = 0; v < V; v++) {
            top = x[v] > top ? x[v] : top;
            nan |= x[v] != x[v];
        }
        if (nan && t < bad) bad = t;
        y[t] = 0;
        for (int64_t v = 0; v < V; v++)
            if (x[v] == top) {
                y[t] = (int32_t)v;
                break;
            }
    }
    return bad == T || cg_fail(args->error, CG_BAD_INPUT, "row %lld of x holds NaN, expected numbers",
                               (long long)(args->first_row + bad));
}

#endif
