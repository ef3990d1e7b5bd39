/* Every query head against every key: the costly step of the indexer spelled out.
 *
 *   q [T, Hi, Di]   k [C, Di] -> x [T, Hi, C],  x[t,h,c] = q[t,h,:] . k[c,:]
 *
 *   dq[t,h,:] = sum_c dx[t,h,c] k[c,:]         dk[c,:] = sum_(t,h) dx[t,h,c] q[t,h,:]
 *
 * Three plain products over [T*Hi, Di]. Nothing is masked, so every row of k takes part, and its zeros in dx
 * are multiplied: unused rows of k must be finite numbers here, unlike in the streaming ops.
 *
 * Saved:     q k                            (4*(T*Hi*Di + C*Di) bytes in f32; what follows saves x, 4*T*Hi*C)
 * Recompute: same bits
 * Refuses:   shapes that differ
 * Source:    DeepSeek-V4 report, arXiv 2606.19348, section 2.3.3
 */
#include "ops/indexer/indexer.h"

static bool head_scores_expect(cg_infer *infer, int i) {
    return cg_expect_real(infer, i) && cg_expect_dims(infer, i, 3) &&
           cg_expect_dtype(infer, i + 1, infer->in[i]->dtype) && cg_expect_dims(infer, i + 1, 2) &&
           cg_expect_dim(infer, i + 1, 1, infer->in[i]->shape.dims[2], "channels of q");
}

static cg_shape head_scores_shape(const cg_value *q, const cg_value *k) {
    return CG_SHAPE(q->shape.dims[0], q->shape.dims[1], k->shape.dims[0]);
}

static bool indexer_head_scores_infer(cg_infer *infer) {
    if (!head_scores_expect(infer, 0)) return false;
    cg_infer_out(infer, 0, infer->in[0]->dtype, head_scores_shape(infer->in[0], infer->in[1]));
    return true;
}

static bool indexer_head_scores_grad_infer(cg_infer *infer) {
    if (!head_scores_expect(infer, 1) || !cg_expect_dtype(infer, 0, infer->in[1]->dtype)) return false;
    const cg_shape want = head_scores_shape(infer->in[1], infer->in[2]);
    if (!cg_shape_equal(&infer->in[0]->shape, &want)) {
        char got[128], text[128];
        return cg_refuse(infer, "dx has shape %s, expected %s",
                         cg_shape_text(&infer->in[0]->shape, got, sizeof got),
                         cg_shape_text(&want, text, sizeof text));
    }
    cg_infer_out(infer, 0, infer->in[1]->dtype, infer->in[1]->shape);
    cg_infer_out(infer, 1, infer->in[1]->dtype, infer->in[2]->shape);
    return true;
}

/* x = q k^T, dq = dx k, dk = dx^T q, all over the T*Hi rows of heads. */
static cg_gemm x_gemm(cg_dtype dtype, int64_t rows, int64_t C, int64_t Di) {
    return cg_gemm_dense(dtype, false, true, rows, C, Di);
}
static cg_gemm dq_gemm(cg_dtype dtype, int64_t rows, int64_t C, int64_t Di) {
    return cg_gemm_dense(dtype, false, false, rows, Di, C);
}
static cg_gemm dk_gemm(cg_dtype dtype, int64_t rows, int64_t C, int64_t Di) {
    return cg_gemm_dense(dtype, true, false, C, Di, rows);
}

static size_t indexer_head_scores_workspace(const cg_node *node) {
    const cg_shape *q = &node->in[0]->shape;
    cg_gemm x = x_gemm(node->in[0]->dtype, q->dims[0] * q->dims[1], node->in[1]->shape.dims[0], q->dims[2]);
    return cg_gemm_workspace(&x);
}

/* The two products run one after the other. */
static size_t indexer_head_scores_grad_workspace(const cg_node *node) {
    const cg_shape *q = &node->in[1]->shape;
    const int64_t rows = q->dims[0] * q->dims[1], C = node->in[2]->shape.dims[0];
    cg_gemm dq = dq_gemm(node->in[1]->dtype, rows, C, q->dims[2]);
    cg_gemm dk = dk_gemm(node->in[1]->dtype, rows, C, q->dims[2]);
    const size_t a = cg_gemm_workspace(&dq), b = cg_gemm_workspace(&dk);
    return a > b ? a : b;
}

static bool head_scores_run(const cg_run_args *args) {
    const int64_t *q = args->in[0].shape.dims, *k = args->in[1].shape.dims;
    cg_gemm x = x_gemm(args->in[0].dtype, q[0] * q[1], k[0], q[2]);
    return cg_gemm_run(&x, args->in[0].data, args->in[1].data, args->out[0].data, args->workspace, args->error);
}

static bool head_scores_grad_run(const cg_run_args *args) {
    const int64_t *q = args->in[1].shape.dims, *k = args->in[2].shape.dims;
    cg_gemm dq = dq_gemm(args->in[1].dtype, q[0] * q[1], k[0], q[2]);
    cg_gemm dk = dk_gemm(args->in[1].dtype, q[0] * q[1], k[0], q[2]);
    const void *dx = args->in[0].data;
    return cg_gemm_run(&dq, dx, args->in[2].data, args->out[0].data, args->workspace, args->error) &&
           cg_gemm_run(&dk, dx, args->in[1].data, args->out[1].data, args->workspace, args->error);
}

extern const cg_op cg_op_indexer_head_scores_grad;

static void indexer_head_scores_build_grad(cg_graph *graph, const cg_node *node, cg_value *const *dout,
                                           cg_value **din) {
    cg_value *dq = cg_apply(graph, &cg_op_indexer_head_scores_grad, NULL,
                            (cg_value *[]){dout[0], node->in[0], node->in[1]}, 3);
    din[0] = dq;
    din[1] = cg_output(dq, 1);
}

static cg_cost indexer_head_scores_cost(const cg_node *node) {
    return (cg_cost){.flops =
                         2 * (double)cg_shape_count(&node->out[0]->shape) * (double)node->in[0]->shape.dims[2],
                     .bytes = cg_node_bytes(node)};
}

static cg_cost indexer_head_scores_grad_cost(const cg_node *node) {
    return (cg_cost){.flops =
                         4 * (double)cg_shape_count(&node->in[0]->shape) * (double)node->in[1]->shape.dims[2],
                     .bytes = cg_node_bytes(node)};
}

static const cg_case indexer_head_scores_cases[] = {
    {.name = "odd", .in = {{.shape = CG_DIMS(3, 2, 5)}, {.shape = CG_DIMS(4, 5)}}, .crosses = "q k"},
    {.name = "no key", .in = {{.shape = CG_DIMS(3, 2, 5)}, {.shape = CG_DIMS(0, 5)}}, .crosses = "q k"},
    {.name = "no row", .in = {{.shape = CG_DIMS(0, 2, 5)}, {.shape = CG_DIMS(4, 5)}}, .crosses = "q k"},
    {.name = "large", .in = {{.shape = CG_DIMS(67, 5, 33)}, {.shape = CG_DIMS(130, 33)}}, .large = true},
    {.name = "channels differ",
     .in = {{.shape = CG_DIMS(3, 2, 5)}, {.shape = CG_DIMS(4, 3)}},
     .refuses = "k has shape [4, 3], expected 5 in dimension 1"},
};

static const cg_case indexer_head_scores_grad_cases[] = {
    {.name = "odd", .in = {{.shape = CG_DIMS(3, 2, 4)}, {.shape = CG_DIMS(3, 2, 5)}, {.shape = CG_DIMS(4, 5)}}},
    {.name = "keys differ",
     .in = {{.shape = CG_DIMS(3, 2, 3)}, {.shape = CG_DIMS(3, 2, 5)}, {.shape = CG_DIMS(4, 5)}},
     .refuses = "dx has shape [3, 2, 3], expected [3, 2, 4]"},
};

const cg_op cg_op_indexer_head_scores = {
    .name = "indexer_head_scores",
    .doc = "q.k of every index head and compressed row",
    .in = {"q", "k"},
    .out = {"x"},
    .infer = indexer_head_scores_infer,
    .differentiable = CG_BIT(0) | CG_BIT(1),
    .grad = indexer_head_scores_build_grad,
    .replay = CG_REPLAY_SAME_BITS,
    .cost = indexer_head_scores_cost,
    .workspace = indexer_head_scores_workspace,
    .run = {[CG_F32] = {head_scores_run}, [CG_F64] = {head_scores_run}, [CG_BF16] = {head_scores_run}},
    CG_CASES(indexer_head_scores_cases),
};

const cg_op cg_op_indexer_head_scores_grad = {
    .name = "indexer_head_scores_grad",
    .doc = "gradients of indexer_head_scores",
    .in = {"dx", "q", "k"},
    .out = {"dq", "dk"},
    .infer = indexer_head_scores_grad_infer,
    .no_grad = "not yet: second derivatives",
    .replay = CG_REPLAY_SAME_BITS,
    .cost = indexer_head_scores_grad_cost,
    .workspace = indexer_head_scores_grad_workspace,
    .run = {[CG_F32] = {head_scores_grad_run},
            [CG_F64] = {head_scores_grad_run},
            [CG_BF16] = {head_scores_grad_run}},
    CG_CASES(indexer_head_scores_grad_cases),
};

cg_value *cg_indexer_head_scores(cg_graph *graph, cg_value *q, cg_value *k) {
    return cg_apply(graph, &cg_op_indexer_head_scores, NULL, (cg_value *[]){q, k}, 2);
}
