/* The same value in memory of its own, as a choice: where choices are held (CG_HOLD_CHOICES) it stays what it was.
 *
 * No model uses it. A gradient check puts it where gradients stop (cg_hold_constants): a teacher is a constant of its
 * loss, and must not move when what it was made from is moved by a step.
 */
#include "ops/ops.h"

#include <string.h>

static bool hold_infer(cg_infer *infer) {
    if (!cg_expect_real(infer, 0)) return false;
    cg_infer_out(infer, 0, infer->in[0]->dtype, infer->in[0]->shape);
    return true;
}

static bool hold_run(const cg_run_args *args) {
    memcpy(args->out[0].data, args->in[0].data,
           (size_t)cg_tensor_bytes(args->out[0].dtype, &args->out[0].shape));
    return true;
}

static cg_cost hold_cost(const cg_node *node) { return (cg_cost){.bytes = cg_node_bytes(node)}; }

static const cg_case hold_cases[] = {
    {.name = "odd", .in = {{.shape = CG_DIMS(3, 5)}}},
    {.name = "empty", .in = {{.shape = CG_DIMS(0, 5)}}},
    {.name = "wrong dtype", .in = {{.shape = CG_DIMS(2), .wrong_dtype = true}}, .refuses = "x is i32"},
};

const cg_op cg_op_hold = {
    .name = "hold",
    .doc = "the same value, held as a choice is in a gradient check",
    .in = {"x"},
    .out = {"y"},
    .infer = hold_infer,
    .no_grad = "cannot: stopping gradients is its purpose",
    .replay = CG_REPLAY_CHOICE,
    .cost = hold_cost,
    .run = {[CG_F32] = {hold_run}, [CG_F64] = {hold_run}, [CG_BF16] = {hold_run}},
    CG_CASES(hold_cases),
};
