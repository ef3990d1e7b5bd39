/* All compressed rows that a row sees, as an index list: with it sparse attention is dense attention.
 *
 *   rows [T, CG_ROW_FIELDS] i32 -> index [T, width] i32, rising, then -1
 *
 * Saved: nothing. Recompute: same bits; it chooses nothing, so the list need not be kept for backward.
 * Refuses: at run time a row that sees more than width.
 */
#include "ops/attributes.h"
#include "ops/ops.h"

static bool visible_indices_infer(cg_infer *infer) {
    const int64_t width = ((const visible_indices_attr *)infer->attr)->width;
    if (!cg_expect_dtype(infer, 0, CG_I32) || !cg_expect_dims(infer, 0, 2) ||
        !cg_expect_dim(infer, 0, 1, CG_ROW_FIELDS, "fields of a row"))
        return false;
    if (width < 0) return cg_refuse(infer, "width is %lld, expected 0 or more", (long long)width);
    cg_infer_out(infer, 0, CG_I32, CG_SHAPE(infer->in[0]->shape.dims[0], width));
    return true;
}

static bool visible_indices_run(const cg_run_args *args) {
    const int32_t *rows = args->in[0].data;
    int32_t *index = args->out[0].data;
    const int64_t T = args->out[0].shape.dims[0], K = args->out[0].shape.dims[1];
    for (int64_t t = 0; t < T; t++) {
        int32_t visible = rows[t * CG_ROW_FIELDS + CG_ROW_VISIBLE];
        if (visible < 0 || visible > K)
            return cg_fail(args->error, CG_BAD_INPUT,
                           "row %lld sees %d compressed rows, expected 0 to the width %lld", (long long)t,
                           visible, (long long)K);
    }
#pragma omp parallel for schedule(static) if (T * K > 65536)
    for (int64_t t = 0; t < T; t++) {
        int32_t first = rows[t * CG_ROW_FIELDS + CG_ROW_COMPRESSED];
        int32_t visible = rows[t * CG_ROW_FIELDS + CG_ROW_VISIBLE];
        for (int32_t k = 0; k < visible; k++) index[t * K + k] = first + k;
        for (int64_t k = visible; k < K; k++) index[t * K + k] = -1;
    }
    return true;
}

static cg_cost visible_indices_cost(const cg_node *node) { return (cg_cost){.bytes = cg_node_bytes(node)}; }

/* clang-format off */
static const int32_t three_rows[] = {0, 0, 0, 0, 1, 0, 1, 0, 2, 1, 2, -1, 2, 0, 0};

static const cg_case visible_indices_cases[] = {
    {.name = "odd", .in = {{.shape = CG_DIMS(3, CG_ROW_FIELDS), .i32 = three_rows}},
     .attr = &(visible_indices_attr){3}},
    {.name = "exact width", .in = {{.shape = CG_DIMS(3, CG_ROW_FIELDS), .i32 = three_rows}},
     .attr = &(visible_indices_attr){2}},
    {.name = "no width", .in = {{.shape = CG_DIMS(1, CG_ROW_FIELDS), .i32 = three_rows}},
     .attr = &(visible_indices_attr){0}},
    {.name = "no row", .in = {{.shape = CG_DIMS(0, CG_ROW_FIELDS), .i32 = three_rows}},
     .attr = &(visible_indices_attr){3}},
    {.name = "too narrow", .in = {{.shape = CG_DIMS(3, CG_ROW_FIELDS), .i32 = three_rows}},
     .attr = &(visible_indices_attr){1},
     .run_error = "row 1 sees 2 compressed rows, expected 0 to the width 1"},
    {.name = "fields", .in = {{.shape = CG_DIMS(3, 4), .i32 = three_rows}}, .attr = &(visible_indices_attr){1},
     .refuses = "fields of a row"},
    {.name = "negative width", .in = {{.shape = CG_DIMS(3, CG_ROW_FIELDS), .i32 = three_rows}},
     .attr = &(visible_indices_attr){-1}, .refuses = "width is -1"},
    {.name = "wrong dtype", .in = {{.shape = CG_DIMS(3, CG_ROW_FIELDS), .i32 = three_rows,
     .wrong_dtype = true}}, .attr = &(visible_indices_attr){1}, .refuses = "rows is f32, expected i32"},
};
/* clang-format on */

const cg_op cg_op_visible_indices = {
    .name = "visible_indices",
    .doc = "all visible compressed rows as an index list",
    .in = {"rows"},
    .out = {"index"},
    .attr_bytes = sizeof(visible_indices_attr),
    .infer = visible_indices_infer,
    .no_grad = "cannot: indices",
    .replay = CG_REPLAY_SAME_BITS,
    .cost = visible_indices_cost,
    .run = {[CG_I32] = {visible_indices_run}},
    CG_CASES(visible_indices_cases),
};

cg_value *cg_visible_indices(cg_graph *graph, cg_value *rows, int64_t width) {
    return cg_apply(graph, &cg_op_visible_indices, &(visible_indices_attr){width}, (cg_value *[]){rows}, 1);
}
