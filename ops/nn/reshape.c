/* The same elements under another shape. No bytes, no kernel: the output is its input.
 */
#include "ops/attributes.h"
#include "ops/ops.h"

static bool reshape_infer(cg_infer *infer) {
    const reshape_attr *attr = infer->attr;
    const cg_shape *from = &infer->in[0]->shape;
    if (cg_shape_count(from) != cg_shape_count(&attr->shape)) {
        char a[128], b[128];
        return cg_refuse(infer, "x has shape %s, which does not have as many elements as %s",
                         cg_shape_text(from, a, sizeof a), cg_shape_text(&attr->shape, b, sizeof b));
    }
    cg_infer_out(infer, 0, infer->in[0]->dtype, attr->shape);
    return true;
}

static void reshape_build_grad(cg_graph *graph, const cg_node *node, cg_value *const *dout, cg_value **din) {
    din[0] = cg_reshape(graph, dout[0], node->in[0]->shape);
}

static cg_cost reshape_cost(const cg_node *node) {
    (void)node;
    return (cg_cost){0};
}

static const cg_case reshape_cases[] = {
    {.name = "odd", .in = {{.shape = CG_DIMS(3, 4)}}, .attr = &(reshape_attr){CG_DIMS(2, 3, 2)}, .crosses = ""},
    {.name = "count differs",
     .in = {{.shape = CG_DIMS(3, 4)}},
     .attr = &(reshape_attr){CG_DIMS(5, 2)},
     .refuses = "as many elements"},
};

const cg_op cg_op_reshape = {
    .name = "reshape",
    .doc = "the same elements under another shape",
    .in = {"x"},
    .out = {"y"},
    .attr_bytes = sizeof(reshape_attr),
    .infer = reshape_infer,
    .differentiable = CG_BIT(0),
    .grad = reshape_build_grad,
    .alias = true,
    .replay = CG_REPLAY_SAME_BITS,
    .cost = reshape_cost,
    CG_CASES(reshape_cases),
};

cg_value *cg_reshape(cg_graph *graph, cg_value *x, cg_shape shape) {
    return cg_apply(graph, &cg_op_reshape, &(reshape_attr){shape}, (cg_value *[]){x}, 1);
}
