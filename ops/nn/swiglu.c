/* y = silu(g) * u with g = min(gate, limit), u = clamp(up, -limit, limit); limit <= 0: no clamp.
 *
 *   s = 1 / (1 + exp(-g)),  silu(g) = g s
 *   dgate = dy u s (1 + g (1 - s)) where gate <= limit, else 0;  dup = dy g s where |up| <= limit, else 0
 *
 * The gate has no lower clamp. Saved rather than s: the two inputs, s is cheap to compute again.
 *
 * Saved:     gate up                  (8 bytes an element in f32)
 * Recompute: same bits. May work in place of either input.
 * Kink:      at the clamp; the gradient passes at the limit itself
 * Refuses:   a limit that is NaN
 */
#ifndef REAL

#include "ops/attributes.h"
#include "ops/ops.h"

extern const cg_op cg_op_swiglu_grad;

enum { SWIGLU_BLOCK = 1024 }; /* exponentials at once, on the stack */

static bool swiglu_infer(cg_infer *infer) {
    if (!cg_expect_real(infer, 0) || !cg_expect_same(infer, 1, 0)) return false;
    const double limit = ((const swiglu_attr *)infer->attr)->limit;
    if (limit != limit) return cg_refuse(infer, "limit is not a number");
    cg_infer_out(infer, 0, infer->in[0]->dtype, infer->in[0]->shape);
    return true;
}

static bool swiglu_grad_infer(cg_infer *infer) {
    if (!swiglu_infer(infer) || !cg_expect_same(infer, 2, 0)) return false;
    cg_infer_out(infer, 1, infer->in[0]->dtype, infer->in[0]->shape);
    return true;
}

#define CG_KERNEL_FILE "ops/nn/swiglu.c"
#include "ops/kernel.h"

static void swiglu_build_grad(cg_graph *graph, const cg_node *node, cg_value *const *dout, cg_value **din) {
    din[0] =
        cg_apply(graph, &cg_op_swiglu_grad, node->attr, (cg_value *[]){node->in[0], node->in[1], dout[0]}, 3);
    din[1] = cg_output(din[0], 1);
}

static cg_cost swiglu_cost(const cg_node *node) {
    return (cg_cost){.flops = 5 * (double)cg_shape_count(&node->in[0]->shape), .bytes = cg_node_bytes(node)};
}

static cg_cost swiglu_grad_cost(const cg_node *node) {
    return (cg_cost){.flops = 10 * (double)cg_shape_count(&node->in[0]->shape), .bytes = cg_node_bytes(node)};
}

/* Both sides of each clamp at limit 1, nothing on it. */
static const double gates[] = {-2.5, 0.3, 1.6, -0.4, 0.9, 2.2}, ups[] = {0.5, -1.7, 1.4, 0.8, -0.6, -0.2};
#define NO_LIMIT                                                                                               \
    &(swiglu_attr) { 0 }
static const cg_case swiglu_cases[] = {
    {.name = "no limit",
     .in = {{.shape = CG_DIMS(3, 5)}, {.shape = CG_DIMS(3, 5)}},
     .attr = NO_LIMIT,
     .crosses = "gate up"},
    {.name = "clamped",
     .in = {{.shape = CG_DIMS(2, 3), .real = gates}, {.shape = CG_DIMS(2, 3), .real = ups}},
     .attr = &(swiglu_attr){1},
     .crosses = "gate up"},
    {.name = "far out",
     .in = {{.shape = CG_DIMS(3), .real = (const double[]){-200, 200, 0}},
            {.shape = CG_DIMS(3), .real = (const double[]){1, 0.5, 2}}},
     .attr = NO_LIMIT,
     .crosses = "gate up"},
    {.name = "empty",
     .in = {{.shape = CG_DIMS(0, 5)}, {.shape = CG_DIMS(0, 5)}},
     .attr = NO_LIMIT,
     .crosses = "gate up"},
    {.name = "large",
     .in = {{.shape = CG_DIMS(331, 227), .scale = 3}, {.shape = CG_DIMS(331, 227), .scale = 3}},
     .attr = &(swiglu_attr){5},
     .crosses = "gate up",
     .large = true},
    {.name = "shapes differ",
     .in = {{.shape = CG_DIMS(3, 5)}, {.shape = CG_DIMS(5, 3)}},
     .attr = NO_LIMIT,
     .refuses = "up has shape [5, 3], expected [3, 5] as gate has"},
    {.name = "limit is NaN",
     .in = {{.shape = CG_DIMS(3)}, {.shape = CG_DIMS(3)}},
     .attr = &(swiglu_attr){__builtin_nan("")},
     .refuses = "limit is not a number"},
    {.name = "wrong dtype",
     .in = {{.shape = CG_DIMS(3)}, {.shape = CG_DIMS(3), .wrong_dtype = true}},
     .attr = NO_LIMIT,
     .refuses = "up is i32"},
};

const cg_op cg_op_swiglu = {
    .name = "swiglu",
    .doc = "silu(min(gate, limit)) * clamp(up, -limit, limit)",
    .in = {"gate", "up"},
    .out = {"y"},
    .attr_bytes = sizeof(swiglu_attr),
    .infer = swiglu_infer,
    .differentiable = CG_BIT(0) | CG_BIT(1),
    .grad = swiglu_build_grad,
    .overwrites = CG_BIT(0) | CG_BIT(1),
    .elementwise = true,
    .replay = CG_REPLAY_SAME_BITS,
    .cost = swiglu_cost,
    .run = CG_RUN(swiglu),
    CG_CASES(swiglu_cases),
};

static const cg_case swiglu_grad_cases[] = {
    {.name = "clamped",
     .in = {{.shape = CG_DIMS(2, 3), .real = gates},
            {.shape = CG_DIMS(2, 3), .real = ups},
            {.shape = CG_DIMS(2, 3)}},
     .attr = &(swiglu_attr){1}},
    {.name = "empty",
     .in = {{.shape = CG_DIMS(0)}, {.shape = CG_DIMS(0)}, {.shape = CG_DIMS(0)}},
     .attr = NO_LIMIT},
    {.name = "large",
     .in = {{.shape = CG_DIMS(331, 227)}, {.shape = CG_DIMS(331, 227)}, {.shape = CG_DIMS(331, 227)}},
     .attr = NO_LIMIT,
     .large = true},
    {.name = "shapes differ",
     .in = {{.shape = CG_DIMS(3)}, {.shape = CG_DIMS(3)}, {.shape = CG_DIMS(2)}},
     .attr = NO_LIMIT,
     .refuses = "dy has shape [2], expected [3] as gate has"},
};

const cg_op cg_op_swiglu_grad = {
    .name = "swiglu_grad",
    .doc = "gradients of swiglu",
    .in = {"gate", "up", "dy"},
    .out = {"dgate", "dup"},
    .attr_bytes = sizeof(swiglu_attr),
    .infer = swiglu_grad_infer,
    .no_grad = "not yet: second derivatives",
    .overwrites = CG_BIT(0) | CG_BIT(1) | CG_BIT(2),
    .elementwise = true,
    .replay = CG_REPLAY_SAME_BITS,
    .cost = swiglu_grad_cost,
    .run = CG_RUN(swiglu_grad),
    CG_CASES(swiglu_grad_cases),
};

cg_value *cg_swiglu(cg_graph *graph, cg_value *gate, cg_value *up, double limit) {
    return cg_apply(graph, &cg_op_swiglu, &(swiglu_attr){limit}, (cg_value *[]){gate, up}, 2);
}

#else

/* e[i] = exp(-min(gate[i], limit)) */
static void KERNEL(swiglu_exp)(int64_t n, const REAL *gate, REAL limit, REAL *e) {
    for (int64_t i = 0; i < n; i++) e[i] = gate[i] > limit ? -limit : -gate[i];
    VEC(exp)(n, e, e);
}

static REAL KERNEL(swiglu_limit)(const cg_run_args *args) {
    const double limit = ((const swiglu_attr *)args->attr)->limit;
    return limit > 0 ? (REAL)limit : (REAL)INFINITY;
}

static bool KERNEL(swiglu)(const cg_run_args *args) {
    const REAL limit = KERNEL(swiglu_limit)(args);
    const int64_t n = cg_shape_count(&args->out[0].shape);
#pragma omp parallel for schedule(static) if (n > 8192)
    for (int64_t at = 0; at < n; at += SWIGLU_BLOCK) {
        const REAL *gate = (const REAL *)args->in[0].data + at, *up = (const REAL *)args->in[1].data + at;
        REAL *y = (REAL *)args->out[0].data + at, e[SWIGLU_BLOCK];
        const int64_t block = n - at < SWIGLU_BLOCK ? n - at : SWIGLU_BLOCK;
        KERNEL(swiglu_exp)(block, gate, limit, e);
#pragma omp simd
        for (int64_t i = 0; i < block; i++) {
            const REAL g = gate[i] > limit ? limit : gate[i];
            const REAL u = up[i] > limit ? limit : up[i] < -limit ? -limit : up[i];
            y[i] = g / (1 + e[i]) * u;
        }
    }
    return true;
}

static bool KERNEL(swiglu_grad)(const cg_run_args *args) {
    const REAL limit = KERNEL(swiglu_limit)(args);
    const int64_t n = cg_shape_count(&args->out[0].shape);
#pragma omp parallel for schedule(static) if (n > 8192)
    for (int64_t at = 0; at < n; at += SWIGLU_BLOCK) {
        const REAL *gate = (const REAL *)args->in[0].data + at, *up = (const REAL *)args->in[1].data + at;
        const REAL *dy = (const REAL *)args->in[2].data + at;
        REAL *dgate = (REAL *)args->out[0].data + at, *dup = (REAL *)args->out[1].data + at, e[SWIGLU_BLOCK];
        const int64_t block = n - at < SWIGLU_BLOCK ? n - at : SWIGLU_BLOCK;
        KERNEL(swiglu_exp)(block, gate, limit, e);
#pragma omp simd
        for (int64_t i = 0; i < block; i++) {
            const REAL g = gate[i] > limit ? limit : gate[i];
            const REAL u = up[i] > limit ? limit : up[i] < -limit ? -limit : up[i];
            const REAL s = 1 / (1 + e[i]), d = dy[i];
            const bool gate_out = gate[i] > limit, up_out = up[i] > limit || up[i] < -limit;
            dgate[i] = gate_out ? 0 : d * u * s * (1 + g * (1 - s));
            dup[i] = up_out ? 0 : d * g * s;
        }
    }
    return true;
}

#endif
