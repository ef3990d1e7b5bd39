/* The same value, as a constant: gradients stop here. No bytes, no kernel.
 *
 * The indexer sees detached hidden states and query latents (DeepSeek-V3.2 report, section 2.1.1).
 */
#include "ops/ops.h"

static bool detach_infer(cg_infer *infer) {
    if (!cg_expect_real(infer, 0)) return false;
    cg_infer_out(infer, 0, infer->in[0]->dtype, infer->in[0]->shape);
    return true;
}

static cg_cost detach_cost(const cg_node *node) {
    (void)node;
    return (cg_cost){0};
}

static const cg_case detach_cases[] = {
    {.name = "odd", .in = {{.shape = CG_DIMS(3, 5)}}},
    {.name = "wrong dtype", .in = {{.shape = CG_DIMS(2), .wrong_dtype = true}}, .refuses = "x is i32"},
};

const cg_op cg_op_detach = {
    .name = "detach",
    .doc = "the same value; gradients stop here",
    .in = {"x"},
    .out = {"y"},
    .infer = detach_infer,
    .no_grad = "cannot: stopping gradients is its purpose",
    .alias = true,
    .replay = CG_REPLAY_SAME_BITS,
    .cost = detach_cost,
    CG_CASES(detach_cases),
};

cg_value *cg_detach(cg_graph *graph, cg_value *x) {
    return cg_apply(graph, &cg_op_detach, NULL, (cg_value *[]){x}, 1);
}
