/* A tensor of zeros: the gradient of a parameter that nothing reaches is exactly 0, not absent.
 *
 * Saved: nothing. Recompute: same bits.
 */
#include "ops/ops.h"

#include <string.h>

static bool zeros_infer(cg_infer *infer) {
    const cg_zeros_attr *attr = infer->attr;
    cg_infer_out(infer, 0, attr->dtype, attr->shape);
    return true;
}

static bool zeros_run(const cg_run_args *args) {
    memset(args->out[0].data, 0, (size_t)cg_tensor_bytes(args->out[0].dtype, &args->out[0].shape));
    return true;
}

static cg_cost zeros_cost(const cg_node *node) { return (cg_cost){.bytes = cg_node_bytes(node)}; }

static const cg_case zeros_cases[] = {
    {.name = "f32", .attr = &(cg_zeros_attr){CG_F32, CG_DIMS(3, 5)}},
    {.name = "f64", .attr = &(cg_zeros_attr){CG_F64, CG_DIMS(7)}},
    {.name = "bf16", .attr = &(cg_zeros_attr){CG_BF16, CG_DIMS(2, 3)}},
};

const cg_op cg_op_zeros = {
    .name = "zeros",
    .doc = "a tensor of zeros",
    .out = {"y"},
    .attr_bytes = sizeof(cg_zeros_attr),
    .infer = zeros_infer,
    .no_grad = "cannot: it has no input",
    .replay = CG_REPLAY_SAME_BITS,
    .cost = zeros_cost,
    .run = {[CG_F32] = {zeros_run}, [CG_F64] = {zeros_run}, [CG_I32] = {zeros_run}, [CG_BF16] = {zeros_run}},
    CG_CASES(zeros_cases),
};

cg_value *cg_zeros(cg_graph *graph, cg_dtype dtype, cg_shape shape) {
    return cg_apply(graph, &cg_op_zeros, &(cg_zeros_attr){dtype, shape}, NULL, 0);
}
