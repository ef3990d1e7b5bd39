/* The list of all ops, read by the build from the files of this folder. */
#include "ops/ops.h"

#define CG_OP(name) extern const cg_op cg_op_##name;
#include "op_list.inc"
#undef CG_OP

static const cg_op *const list[] = {
#define CG_OP(name) &cg_op_##name,
#include "op_list.inc"
#undef CG_OP
};

const cg_op_set cg_all_ops = {
    list, (int)(sizeof list / sizeof *list), &cg_op_add, &cg_op_zeros, &cg_op_cast, &cg_op_hold};
