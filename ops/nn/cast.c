/* The same numbers in another dtype: f32 rounded to bf16 (nearest, ties to even), bf16 as f32.
 *
 *   x, any shape -> y.  f64 stays f64, so that a graph in f64 may hold the same nodes
 *
 * The gradient is rounded or widened the other way. A gradient of y may be in f32 already (cg_gradient_dtype).
 *
 * Saved: nothing. Recompute: same bits.
 */
#include "core/base/bf16.h"
#include "ops/ops.h"

#include <string.h>

static bool cast_infer(cg_infer *infer) {
    const cg_dtype to = ((const cg_cast_attr *)infer->attr)->to;
    if (!cg_expect_real(infer, 0)) return false;
    if (to != CG_F32 && to != CG_BF16)
        return cg_refuse(infer, "x is asked for in %s, expected f32 or bf16", cg_dtype_name(to));
    cg_infer_out(infer, 0, infer->in[0]->dtype == CG_F64 ? CG_F64 : to, infer->in[0]->shape);
    return true;
}

/* Within a dtype. */
static bool cast_copy(const cg_run_args *args) {
    memcpy(args->out[0].data, args->in[0].data,
           (size_t)cg_tensor_bytes(args->out[0].dtype, &args->out[0].shape));
    return true;
}

static bool cast_bf16(const cg_run_args *args) {
    enum { BLOCK = 4096 };
    const void *x = args->in[0].data;
    void *y = args->out[0].data;
    const bool narrows = args->in[0].dtype == CG_F32, widens = args->out[0].dtype == CG_F32;
    const int64_t n = cg_shape_count(&args->out[0].shape);
    if (!narrows && !widens) return cast_copy(args);
#pragma omp parallel for schedule(static) if (n > 65536)
    for (int64_t i = 0; i < n; i += BLOCK) {
        const int64_t block = n - i < BLOCK ? n - i : BLOCK;
        if (narrows)
            cg_bf16_narrow(block, (const float *)x + i, (uint16_t *)y + i);
        else
            cg_bf16_widen(block, (const uint16_t *)x + i, (float *)y + i);
    }
    return true;
}

static void cast_build_grad(cg_graph *graph, const cg_node *node, cg_value *const *dout, cg_value **din) {
    din[0] = cg_cast(graph, dout[0], node->in[0]->dtype);
}

static cg_cost cast_cost(const cg_node *node) { return (cg_cost){.bytes = cg_node_bytes(node)}; }

#define TO(dtype)                                                                                              \
    &(cg_cast_attr) { dtype }
static const cg_case cast_cases[] = {
    {.name = "to bf16",
     .in = {{.shape = CG_DIMS(3, 5)}},
     .attr = TO(CG_BF16),
     .crosses = "",
     .f32_bound = 0x1p-8}, /* a rounding of each element is below 2^-8 of it */
    {.name = "to f32", .in = {{.shape = CG_DIMS(3, 5)}}, .attr = TO(CG_F32), .crosses = ""},
    {.name = "empty", .in = {{.shape = CG_DIMS(0, 5)}}, .attr = TO(CG_BF16), .crosses = ""},
    {.name = "large",
     .in = {{.shape = CG_DIMS(331, 227)}},
     .attr = TO(CG_BF16),
     .crosses = "",
     .large = true,
     .f32_bound = 0x1p-8},
    {.name = "large, to f32", .in = {{.shape = CG_DIMS(331, 227)}}, .attr = TO(CG_F32), .large = true},
    {.name = "to an index", .in = {{.shape = CG_DIMS(3)}}, .attr = TO(CG_I32), .refuses = "asked for in i32"},
    {.name = "wrong dtype",
     .in = {{.shape = CG_DIMS(3), .wrong_dtype = true}},
     .attr = TO(CG_BF16),
     .refuses = "x is i32, expected f32, f64 or bf16"},
};

const cg_op cg_op_cast = {
    .name = "cast",
    .doc = "the same numbers in f32 or bf16",
    .in = {"x"},
    .out = {"y"},
    .attr_bytes = sizeof(cg_cast_attr),
    .infer = cast_infer,
    .differentiable = CG_BIT(0),
    .grad = cast_build_grad,
    .replay = CG_REPLAY_SAME_BITS,
    .cost = cast_cost,
    .run = {[CG_F32] = {cast_copy}, [CG_F64] = {cast_copy}, [CG_BF16] = {cast_bf16}},
    CG_CASES(cast_cases),
};

cg_value *cg_cast(cg_graph *graph, cg_value *x, cg_dtype dtype) {
    if (x && (x->dtype == dtype || x->dtype == CG_F64)) return x;
    return cg_apply(graph, &cg_op_cast, &(cg_cast_attr){dtype}, (cg_value *[]){x}, 1);
}
