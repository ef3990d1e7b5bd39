/* One matrix per group: y[t,g] = w[g] x[t,g], the first half of DeepSeek-V4's output projection.
 *
 *   x [T, G, in]   w [G, out, in]   -> y [T, G, out]
 *
 * With `transposed` the matrices are applied transposed, y[t,g] = w[g]^T x[t,g]: that is the gradient of x. The
 * gradient of w is grouped_outer, the second table here. The columns of a group lie apart in x and y; the
 * products take them where they are, by their leading dimension, and nothing is copied.
 *
 * Saved:     x w                      (4*(T*G*in + G*out*in) bytes in f32; w only for dx, x only for dw)
 * Recompute: same bits
 * Refuses:   groups or inner dimensions that differ
 */
#include "core/math/gemm.h"
#include "ops/attributes.h"
#include "ops/ops.h"

extern const cg_op cg_op_grouped_outer;

static cg_value *grouped_linear(cg_graph *graph, cg_value *x, cg_value *w, bool transposed);
static cg_value *grouped_outer(cg_graph *graph, cg_value *a, cg_value *b, bool f32_out);

/* ---- grouped_linear ---- */

static bool grouped_linear_infer(cg_infer *infer) {
    const bool transposed = ((const grouped_linear_attr *)infer->attr)->transposed;
    if (!cg_expect_real(infer, 0) || !cg_expect_dtype(infer, 1, infer->in[0]->dtype)) return false;
    if (!cg_expect_dims(infer, 0, 3) || !cg_expect_dims(infer, 1, 3)) return false;
    const int64_t *x = infer->in[0]->shape.dims, *w = infer->in[1]->shape.dims;
    if (!cg_expect_dim(infer, 1, 0, x[1], "groups of x")) return false;
    if (!cg_expect_dim(infer, 1, transposed ? 1 : 2, x[2], "columns of a group of x")) return false;
    cg_infer_out(infer, 0, infer->in[0]->dtype, CG_SHAPE(x[0], x[1], w[transposed ? 2 : 1]));
    return true;
}

static cg_gemm grouped_linear_gemm(cg_dtype dtype, bool transposed, const int64_t *x, const int64_t *y) {
    cg_gemm gemm = cg_gemm_dense(dtype, false, !transposed, x[0], y[2], x[2]);
    gemm.lda = x[1] * x[2];
    gemm.ldc = y[1] * y[2];
    return gemm;
}

static bool grouped_linear_run(const cg_run_args *args) {
    const cg_tensor *x = &args->in[0], *w = &args->in[1], *y = &args->out[0];
    const int64_t in = x->shape.dims[2], out = y->shape.dims[2], element = (int64_t)cg_dtype_bytes(y->dtype);
    cg_gemm gemm = grouped_linear_gemm(y->dtype, ((const grouped_linear_attr *)args->attr)->transposed,
                                       x->shape.dims, y->shape.dims);
    for (int64_t g = 0; g < x->shape.dims[1]; g++)
        if (!cg_gemm_run(&gemm, (const char *)x->data + g * in * element,
                         (const char *)w->data + g * in * out * element, (char *)y->data + g * out * element,
                         args->workspace, args->error))
            return false;
    return true;
}

static void grouped_linear_build_grad(cg_graph *graph, const cg_node *node, cg_value *const *dout,
                                      cg_value **din) {
    const bool transposed = ((const grouped_linear_attr *)node->attr)->transposed;
    cg_value *x = node->in[0], *w = node->in[1], *dy = dout[0];
    const bool f32 = cg_gradient_dtype(graph, w) != w->dtype; /* of a parameter */
    if (cg_wants_grad(node, 0)) din[0] = grouped_linear(graph, dy, w, !transposed);
    if (cg_wants_grad(node, 1))
        din[1] = transposed ? grouped_outer(graph, x, dy, f32) : grouped_outer(graph, dy, x, f32);
}

static size_t grouped_linear_workspace(const cg_node *node) {
    cg_gemm gemm =
        grouped_linear_gemm(node->out[0]->dtype, ((const grouped_linear_attr *)node->attr)->transposed,
                            node->in[0]->shape.dims, node->out[0]->shape.dims);
    return cg_gemm_workspace(&gemm);
}

static cg_cost grouped_linear_cost(const cg_node *node) {
    double flops = 2 * (double)node->in[0]->shape.dims[0] * (double)cg_shape_count(&node->in[1]->shape);
    return (cg_cost){.flops = flops, .bytes = cg_node_bytes(node)};
}

#define PLAIN                                                                                                  \
    &(grouped_linear_attr) { false }
#define TRANSPOSED                                                                                             \
    &(grouped_linear_attr) { true }
static const cg_case grouped_linear_cases[] = {
    {.name = "odd",
     .in = {{.shape = CG_DIMS(3, 2, 4)}, {.shape = CG_DIMS(2, 5, 4)}},
     .attr = PLAIN,
     .crosses = "x w"},
    {.name = "transposed",
     .in = {{.shape = CG_DIMS(3, 2, 5)}, {.shape = CG_DIMS(2, 5, 4)}},
     .attr = TRANSPOSED,
     .crosses = "x w"},
    {.name = "one group",
     .in = {{.shape = CG_DIMS(3, 1, 4)}, {.shape = CG_DIMS(1, 5, 4)}},
     .attr = PLAIN,
     .crosses = "x w"},
    {.name = "one row",
     .in = {{.shape = CG_DIMS(1, 3, 2)}, {.shape = CG_DIMS(3, 1, 2)}},
     .attr = PLAIN,
     .crosses = "x w"},
    {.name = "x constant",
     .in = {{.shape = CG_DIMS(3, 2, 4), .constant = true}, {.shape = CG_DIMS(2, 5, 4)}},
     .attr = PLAIN,
     .crosses = "x"},
    {.name = "w constant",
     .in = {{.shape = CG_DIMS(3, 2, 4)}, {.shape = CG_DIMS(2, 5, 4), .constant = true}},
     .attr = PLAIN,
     .crosses = "w"},
    {.name = "no rows",
     .in = {{.shape = CG_DIMS(0, 2, 4)}, {.shape = CG_DIMS(2, 5, 4)}},
     .attr = PLAIN,
     .crosses = "x w"},
    {.name = "nothing to sum",
     .in = {{.shape = CG_DIMS(3, 2, 0)}, {.shape = CG_DIMS(2, 5, 0)}},
     .attr = PLAIN,
     .crosses = "x w"},
    {.name = "large",
     .in = {{.shape = CG_DIMS(131, 3, 67)}, {.shape = CG_DIMS(3, 51, 67)}},
     .attr = PLAIN,
     .crosses = "x w",
     .large = true},
    {.name = "groups differ",
     .in = {{.shape = CG_DIMS(3, 2, 4)}, {.shape = CG_DIMS(3, 5, 4)}},
     .attr = PLAIN,
     .refuses = "w has shape [3, 5, 4], expected 2 in dimension 0 (groups of x)"},
    {.name = "columns differ",
     .in = {{.shape = CG_DIMS(3, 2, 4)}, {.shape = CG_DIMS(2, 4, 5)}},
     .attr = PLAIN,
     .refuses = "expected 4 in dimension 2 (columns of a group of x)"},
    {.name = "two dimensions",
     .in = {{.shape = CG_DIMS(3, 8)}, {.shape = CG_DIMS(2, 5, 4)}},
     .attr = PLAIN,
     .refuses = "x has shape [3, 8], expected 3 dimensions"},
    {.name = "wrong dtype",
     .in = {{.shape = CG_DIMS(3, 2, 4)}, {.shape = CG_DIMS(2, 5, 4), .wrong_dtype = true}},
     .attr = PLAIN,
     .refuses = "w is i32"},
};

const cg_op cg_op_grouped_linear = {
    .name = "grouped_linear",
    .doc = "one matrix per group of columns",
    .in = {"x", "w"},
    .out = {"y"},
    .attr_bytes = sizeof(grouped_linear_attr),
    .infer = grouped_linear_infer,
    .differentiable = CG_BIT(0) | CG_BIT(1),
    .grad = grouped_linear_build_grad,
    .replay = CG_REPLAY_SAME_BITS,
    .cost = grouped_linear_cost,
    .workspace = grouped_linear_workspace,
    .run = {[CG_F32] = {grouped_linear_run}, [CG_F64] = {grouped_linear_run}, [CG_BF16] = {grouped_linear_run}},
    CG_CASES(grouped_linear_cases),
};

/* ---- grouped_outer: w[g] = sum_t a[t,g] b[t,g]^T, a [T, G, m], b [T, G, n] -> w [G, m, n] ---- */

static bool grouped_outer_infer(cg_infer *infer) {
    if (!cg_expect_real(infer, 0) || !cg_expect_dtype(infer, 1, infer->in[0]->dtype)) return false;
    if (!cg_expect_dims(infer, 0, 3) || !cg_expect_dims(infer, 1, 3)) return false;
    const int64_t *a = infer->in[0]->shape.dims, *b = infer->in[1]->shape.dims;
    if (!cg_expect_dim(infer, 1, 0, a[0], "rows of a") || !cg_expect_dim(infer, 1, 1, a[1], "groups of a"))
        return false;
    const cg_dtype real = infer->in[0]->dtype;
    const bool f32_out = ((const grouped_outer_attr *)infer->attr)->f32_out;
    cg_infer_out(infer, 0, f32_out ? cg_statistic_dtype(real) : real, CG_SHAPE(a[1], a[2], b[2]));
    return true;
}

static cg_gemm grouped_outer_gemm(cg_dtype dtype, const void *attr, const int64_t *a, const int64_t *b) {
    cg_gemm gemm = cg_gemm_dense(dtype, true, false, a[2], b[2], a[0]);
    gemm.c_is_f32 = ((const grouped_outer_attr *)attr)->f32_out && dtype == CG_BF16;
    gemm.lda = a[1] * a[2];
    gemm.ldb = b[1] * b[2];
    return gemm;
}

static bool grouped_outer_run(const cg_run_args *args) {
    const cg_tensor *a = &args->in[0], *b = &args->in[1], *w = &args->out[0];
    const int64_t m = a->shape.dims[2], n = b->shape.dims[2], element = (int64_t)cg_dtype_bytes(a->dtype);
    const int64_t w_bytes = m * n * (int64_t)cg_dtype_bytes(w->dtype);
    cg_gemm gemm = grouped_outer_gemm(a->dtype, args->attr, a->shape.dims, b->shape.dims);
    for (int64_t g = 0; g < a->shape.dims[1]; g++)
        if (!cg_gemm_run(&gemm, (const char *)a->data + g * m * element,
                         (const char *)b->data + g * n * element, (char *)w->data + g * w_bytes,
                         args->workspace, args->error))
            return false;
    return true;
}

static void grouped_outer_build_grad(cg_graph *graph, const cg_node *node, cg_value *const *dout,
                                     cg_value **din) {
    cg_value *dw = cg_cast(graph, dout[0], node->in[0]->dtype);
    if (cg_wants_grad(node, 0)) din[0] = grouped_linear(graph, node->in[1], dw, false);
    if (cg_wants_grad(node, 1)) din[1] = grouped_linear(graph, node->in[0], dw, true);
}

static size_t grouped_outer_workspace(const cg_node *node) {
    cg_gemm gemm =
        grouped_outer_gemm(node->in[0]->dtype, node->attr, node->in[0]->shape.dims, node->in[1]->shape.dims);
    return cg_gemm_workspace(&gemm);
}

static cg_cost grouped_outer_cost(const cg_node *node) {
    double flops = 2 * (double)node->in[0]->shape.dims[0] * (double)cg_shape_count(&node->out[0]->shape);
    return (cg_cost){.flops = flops, .bytes = cg_node_bytes(node)};
}

#define IN_KIND                                                                                                \
    &(grouped_outer_attr) { false }
static const cg_case grouped_outer_cases[] = {
    {.name = "odd",
     .in = {{.shape = CG_DIMS(3, 2, 4)}, {.shape = CG_DIMS(3, 2, 5)}},
     .attr = IN_KIND,
     .crosses = "a b"},
    {.name = "no rows",
     .in = {{.shape = CG_DIMS(0, 2, 4)}, {.shape = CG_DIMS(0, 2, 5)}},
     .attr = IN_KIND,
     .crosses = "a b"},
    {.name = "a sum in f32",
     .in = {{.shape = CG_DIMS(3, 2, 4)}, {.shape = CG_DIMS(3, 2, 5)}},
     .attr = &(grouped_outer_attr){true},
     .crosses = "a b"},
    {.name = "large",
     .in = {{.shape = CG_DIMS(131, 3, 67)}, {.shape = CG_DIMS(131, 3, 51)}},
     .attr = IN_KIND,
     .crosses = "a b",
     .large = true},
    {.name = "rows differ",
     .in = {{.shape = CG_DIMS(3, 2, 4)}, {.shape = CG_DIMS(4, 2, 5)}},
     .attr = IN_KIND,
     .refuses = "expected 3 in dimension 0 (rows of a)"},
    {.name = "groups differ",
     .in = {{.shape = CG_DIMS(3, 2, 4)}, {.shape = CG_DIMS(3, 1, 5)}},
     .attr = IN_KIND,
     .refuses = "expected 2 in dimension 1 (groups of a)"},
};

const cg_op cg_op_grouped_outer = {
    .name = "grouped_outer",
    .doc = "w[g] = sum of a[t,g] b[t,g]^T over t: the weight gradient of grouped_linear",
    .in = {"a", "b"},
    .out = {"w"},
    .attr_bytes = sizeof(grouped_outer_attr),
    .infer = grouped_outer_infer,
    .differentiable = CG_BIT(0) | CG_BIT(1),
    .grad = grouped_outer_build_grad,
    .replay = CG_REPLAY_SAME_BITS,
    .cost = grouped_outer_cost,
    .workspace = grouped_outer_workspace,
    .run = {[CG_F32] = {grouped_outer_run}, [CG_F64] = {grouped_outer_run}, [CG_BF16] = {grouped_outer_run}},
    CG_CASES(grouped_outer_cases),
};

static cg_value *grouped_outer(cg_graph *graph, cg_value *a, cg_value *b, bool f32_out) {
    return cg_apply(graph, &cg_op_grouped_outer, &(grouped_outer_attr){f32_out}, (cg_value *[]){a, b}, 2);
}

static cg_value *grouped_linear(cg_graph *graph, cg_value *x, cg_value *w, bool transposed) {
    return cg_apply(graph, &cg_op_grouped_linear, &(grouped_linear_attr){transposed}, (cg_value *[]){x, w}, 2);
}

cg_value *cg_grouped_linear(cg_graph *graph, cg_value *x, cg_value *w) {
    return grouped_linear(graph, x, w, false);
}
