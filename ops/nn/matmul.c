/* y = op(a) op(b), where op transposes when asked to.
 *
 *   a [m, k] ([k, m] with trans_a)   b [k, n] ([n, k] with trans_b)   -> y [m, n]
 *
 * Both gradients are matrix products of dy with the other operand, transposed such that nothing is ever copied.
 *
 * bf16 is multiplied as it is and summed in f32; the gradient of a parameter's bf16 copy stays f32.
 *
 * Saved:     a b                       (4*(m*k + k*n) bytes in f32; b only for da, a only for db)
 * Recompute: same bits
 * Refuses:   inner dimensions that differ
 * Check:     f32 against f64, relative norm 1e-5: k products summed in f32
 */
#include "core/math/gemm.h"
#include "ops/attributes.h"
#include "ops/ops.h"

extern const cg_op cg_op_matmul;

static bool matmul_infer(cg_infer *infer) {
    const matmul_attr *attr = infer->attr;
    if (!cg_expect_real(infer, 0) || !cg_expect_dtype(infer, 1, infer->in[0]->dtype)) return false;
    if (!cg_expect_dims(infer, 0, 2) || !cg_expect_dims(infer, 1, 2)) return false;
    const cg_shape *a = &infer->in[0]->shape, *b = &infer->in[1]->shape;
    int64_t m = a->dims[attr->trans_a], k = a->dims[!attr->trans_a];
    int64_t n = b->dims[!attr->trans_b], k_of_b = b->dims[attr->trans_b];
    if (k != k_of_b) {
        char ta[128], tb[128];
        return cg_refuse(infer, "a %s%s and b %s%s have inner dimensions %lld and %lld, expected equal ones",
                         cg_shape_text(a, ta, sizeof ta), attr->trans_a ? " (transposed)" : "",
                         cg_shape_text(b, tb, sizeof tb), attr->trans_b ? " (transposed)" : "", (long long)k,
                         (long long)k_of_b);
    }
    const cg_dtype real = infer->in[0]->dtype;
    cg_infer_out(infer, 0, attr->f32_out ? cg_statistic_dtype(real) : real, CG_SHAPE(m, n));
    return true;
}

static cg_gemm gemm_of(cg_dtype dtype, const matmul_attr *attr, const cg_shape *a, const cg_shape *y) {
    cg_gemm gemm =
        cg_gemm_dense(dtype, attr->trans_a, attr->trans_b, y->dims[0], y->dims[1], a->dims[!attr->trans_a]);
    gemm.c_is_f32 = attr->f32_out && dtype == CG_BF16;
    return gemm;
}

static bool matmul(const cg_run_args *args) {
    const cg_tensor *a = &args->in[0], *b = &args->in[1], *y = &args->out[0];
    cg_gemm gemm = gemm_of(a->dtype, args->attr, &a->shape, &y->shape);
    return cg_gemm_run(&gemm, a->data, b->data, y->data, args->workspace, args->error);
}

/* The gradient of operand x. */
static cg_value *gradient(cg_graph *graph, const cg_value *x, cg_value *a, cg_value *b, bool trans_a,
                          bool trans_b) {
    const matmul_attr attr = {trans_a, trans_b, .f32_out = cg_gradient_dtype(graph, x) != x->dtype};
    return cg_apply(graph, &cg_op_matmul, &attr, (cg_value *[]){a, b}, 2);
}

/* y = A B: dA = dy B^T and dB = A^T dy; a stored transposed operand wants its gradient transposed. */
static void matmul_build_grad(cg_graph *graph, const cg_node *node, cg_value *const *dout, cg_value **din) {
    const bool ta = ((const matmul_attr *)node->attr)->trans_a, tb = ((const matmul_attr *)node->attr)->trans_b;
    cg_value *a = node->in[0], *b = node->in[1], *dy = cg_cast(graph, dout[0], a->dtype);
    if (cg_wants_grad(node, 0))
        din[0] = ta ? gradient(graph, a, b, dy, tb, true) : gradient(graph, a, dy, b, false, !tb);
    if (cg_wants_grad(node, 1))
        din[1] = tb ? gradient(graph, b, dy, a, true, ta) : gradient(graph, b, a, dy, !ta, false);
}

static size_t matmul_workspace(const cg_node *node) {
    cg_gemm gemm = gemm_of(node->in[0]->dtype, node->attr, &node->in[0]->shape, &node->out[0]->shape);
    return cg_gemm_workspace(&gemm);
}

static cg_cost matmul_cost(const cg_node *node) {
    const int64_t *y = node->out[0]->shape.dims;
    int64_t k = node->in[0]->shape.dims[!((const matmul_attr *)node->attr)->trans_a];
    return (cg_cost){.flops = 2 * (double)y[0] * (double)y[1] * (double)k, .bytes = cg_node_bytes(node)};
}

#define NONE                                                                                                   \
    &(matmul_attr) { false, false }
#define TRANS_A                                                                                                \
    &(matmul_attr) { true, false }
#define TRANS_B                                                                                                \
    &(matmul_attr) { false, true }
#define BOTH                                                                                                   \
    &(matmul_attr) { true, true }
static const cg_case matmul_cases[] = {
    {.name = "plain",
     .in = {{.shape = CG_DIMS(3, 5)}, {.shape = CG_DIMS(5, 4)}},
     .attr = NONE,
     .crosses = "a b"},
    {.name = "a transposed",
     .in = {{.shape = CG_DIMS(5, 3)}, {.shape = CG_DIMS(5, 4)}},
     .attr = TRANS_A,
     .crosses = "a b"},
    {.name = "b transposed",
     .in = {{.shape = CG_DIMS(3, 5)}, {.shape = CG_DIMS(4, 5)}},
     .attr = TRANS_B,
     .crosses = "a b"},
    {.name = "both transposed",
     .in = {{.shape = CG_DIMS(5, 3)}, {.shape = CG_DIMS(4, 5)}},
     .attr = BOTH,
     .crosses = "a b"},
    {.name = "a constant",
     .in = {{.shape = CG_DIMS(3, 5), .constant = true}, {.shape = CG_DIMS(4, 5)}},
     .attr = TRANS_B,
     .crosses = "a"},
    {.name = "b constant",
     .in = {{.shape = CG_DIMS(3, 5)}, {.shape = CG_DIMS(4, 5), .constant = true}},
     .attr = TRANS_B,
     .crosses = "b"},
    {.name = "one by one",
     .in = {{.shape = CG_DIMS(1, 1)}, {.shape = CG_DIMS(1, 1)}},
     .attr = NONE,
     .crosses = "a b"},
    {.name = "no rows",
     .in = {{.shape = CG_DIMS(0, 5)}, {.shape = CG_DIMS(5, 4)}},
     .attr = NONE,
     .crosses = "a b"},
    {.name = "nothing to sum",
     .in = {{.shape = CG_DIMS(3, 0)}, {.shape = CG_DIMS(0, 4)}},
     .attr = NONE,
     .crosses = "a b"},
    {.name = "large",
     .in = {{.shape = CG_DIMS(301, 67)}, {.shape = CG_DIMS(129, 67)}},
     .attr = TRANS_B,
     .crosses = "a b",
     .large = true},
    {.name = "a sum in f32",
     .in = {{.shape = CG_DIMS(3, 5)}, {.shape = CG_DIMS(4, 5)}},
     .attr = &(matmul_attr){false, true, true},
     .crosses = "a b"},
    {.name = "large, a sum in f32",
     .in = {{.shape = CG_DIMS(301, 67)}, {.shape = CG_DIMS(301, 129)}},
     .attr = &(matmul_attr){true, false, true},
     .crosses = "a b",
     .large = true},
    {.name = "inner dimensions",
     .in = {{.shape = CG_DIMS(3, 5)}, {.shape = CG_DIMS(4, 5)}},
     .attr = NONE,
     .refuses = "inner dimensions 5 and 4"},
    {.name = "three dimensions",
     .in = {{.shape = CG_DIMS(3, 5, 1)}, {.shape = CG_DIMS(5, 4)}},
     .attr = NONE,
     .refuses = "a has shape [3, 5, 1], expected 2 dimensions"},
    {.name = "a is an index",
     .in = {{.shape = CG_DIMS(3, 5), .wrong_dtype = true}, {.shape = CG_DIMS(5, 4)}},
     .attr = NONE,
     .refuses = "a is i32, expected f32, f64 or bf16"},
    {.name = "b is an index",
     .in = {{.shape = CG_DIMS(3, 5)}, {.shape = CG_DIMS(5, 4), .wrong_dtype = true}},
     .attr = NONE,
     .refuses = "b is i32"},
};

const cg_op cg_op_matmul = {
    .name = "matmul",
    .doc = "y = op(a) op(b), a matrix product",
    .in = {"a", "b"},
    .out = {"y"},
    .attr_bytes = sizeof(matmul_attr),
    .infer = matmul_infer,
    .differentiable = CG_BIT(0) | CG_BIT(1),
    .grad = matmul_build_grad,
    .replay = CG_REPLAY_SAME_BITS,
    .cost = matmul_cost,
    .workspace = matmul_workspace,
    .run = {[CG_F32] = {matmul}, [CG_F64] = {matmul}, [CG_BF16] = {matmul}},
    CG_CASES(matmul_cases),
};

cg_value *cg_matmul(cg_graph *graph, cg_value *a, cg_value *b, bool trans_a, bool trans_b) {
    return cg_apply(graph, &cg_op_matmul, &(matmul_attr){trans_a, trans_b, false}, (cg_value *[]){a, b}, 2);
}

cg_value *cg_linear(cg_graph *graph, cg_value *x, cg_value *w) { return cg_matmul(graph, x, w, false, true); }
