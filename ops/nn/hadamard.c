/* y = H x / sqrt(n) over the last axis, H the Hadamard matrix in Sylvester order, n a power of two.
 *
 *   x [..., n] -> y [..., n]
 *
 * H / sqrt(n) is orthonormal and symmetric: it is its own inverse and its own gradient, and turning both sides
 * of a dot product leaves it as it is. It matters where the indexer's q and k are rounded to few bits.
 *
 * Saved: nothing. Recompute: same bits. May work in place.
 * Refuses: a last axis that is not a power of two.
 * Check: f32 against f64, log2(n) sums.
 * Source: DeepSeek-V4 as released (rotation of indexer queries and keys).
 */
#ifndef REAL

#include "ops/ops.h"

static bool hadamard_infer(cg_infer *infer) {
    if (!cg_expect_real(infer, 0)) return false;
    const cg_shape *shape = &infer->in[0]->shape;
    int64_t n = shape->n_dims ? shape->dims[shape->n_dims - 1] : 0;
    char text[128];
    if (n < 1 || (n & (n - 1)))
        return cg_refuse(infer, "x has shape %s, expected a power of two in the last dimension",
                         cg_shape_text(shape, text, sizeof text));
    cg_infer_out(infer, 0, infer->in[0]->dtype, *shape);
    return true;
}

#define CG_KERNEL_FILE "ops/nn/hadamard.c"
#include "ops/kernel.h"

static void hadamard_build_grad(cg_graph *graph, const cg_node *node, cg_value *const *dout, cg_value **din) {
    (void)node;
    din[0] = cg_hadamard(graph, dout[0]);
}

static cg_cost hadamard_cost(const cg_node *node) {
    const cg_shape *shape = &node->in[0]->shape;
    int steps = 1; /* the scale, and one addition for each doubling */
    for (int64_t n = shape->dims[shape->n_dims - 1]; n > 1; n /= 2) steps++;
    return (cg_cost){.flops = (double)steps * (double)cg_shape_count(shape), .bytes = cg_node_bytes(node)};
}

static const cg_case hadamard_cases[] = {
    {.name = "eight", .in = {{.shape = CG_DIMS(3, 8)}}, .crosses = ""},
    {.name = "heads", .in = {{.shape = CG_DIMS(2, 3, 4)}}, .crosses = ""},
    {.name = "one channel", .in = {{.shape = CG_DIMS(3, 1)}}, .crosses = ""},
    {.name = "one axis", .in = {{.shape = CG_DIMS(2)}}, .crosses = ""},
    {.name = "no row", .in = {{.shape = CG_DIMS(0, 4)}}, .crosses = ""},
    {.name = "large", .in = {{.shape = CG_DIMS(77, 9, 128)}}, .large = true, .crosses = ""},
    {.name = "not a power", .in = {{.shape = CG_DIMS(3, 6)}}, .refuses = "expected a power of two"},
    {.name = "no channel", .in = {{.shape = CG_DIMS(3, 0)}}, .refuses = "expected a power of two"},
    {.name = "wrong dtype", .in = {{.shape = CG_DIMS(4), .wrong_dtype = true}}, .refuses = "x is i32"},
};

const cg_op cg_op_hadamard = {
    .name = "hadamard",
    .doc = "orthonormal Hadamard rotation of the last axis",
    .in = {"x"},
    .out = {"y"},
    .infer = hadamard_infer,
    .differentiable = CG_BIT(0),
    .grad = hadamard_build_grad,
    .overwrites = CG_BIT(0),
    .by_row = CG_BIT(0),
    .replay = CG_REPLAY_SAME_BITS,
    .cost = hadamard_cost,
    .run = CG_RUN(hadamard),
    CG_CASES(hadamard_cases),
};

cg_value *cg_hadamard(cg_graph *graph, cg_value *x) {
    return cg_apply(graph, &cg_op_hadamard, NULL, (cg_value *[]){x}, 1);
}

#else

/* One doubling: halves of 2*step neighbours become their sum and difference. */
static void KERNEL(hadamard_step)(REAL *y, int64_t n, int64_t step) {
    for (int64_t i = 0; i < n; i += 2 * step) {
        REAL *restrict low = y + i, *restrict high = y + i + step;
        for (int64_t j = 0; j < step; j++) {
            REAL a = low[j], b = high[j];
            low[j] = a + b;
            high[j] = a - b;
        }
    }
}

static bool KERNEL(hadamard)(const cg_run_args *args) {
    const REAL *x = args->in[0].data;
    REAL *y = args->out[0].data;
    const cg_shape *shape = &args->in[0].shape;
    const int64_t n = shape->dims[shape->n_dims - 1], rows = cg_shape_count(shape) / n;
    const REAL factor = (REAL)(1 / sqrt((double)n));
#pragma omp parallel for schedule(static) if (rows * n > 65536)
    for (int64_t r = 0; r < rows; r++) {
        REAL *row = y + r * n;
        for (int64_t j = 0; j < n; j++) row[j] = factor * x[r * n + j];
        /* steps 1, 2 and 4 with a size that the compiler knows */
        if (n >= 2) KERNEL(hadamard_step)(row, n, 1);
        if (n >= 4) KERNEL(hadamard_step)(row, n, 2);
        if (n >= 8) KERNEL(hadamard_step)(row, n, 4);
        for (int64_t step = 8; step < n; step *= 2) KERNEL(hadamard_step)(row, n, step);
    }
    return true;
}

#endif
