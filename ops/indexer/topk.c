/* The columns of largest score among those a row sees: the choice spelled out.
 *
 *   scores [T, C]   rows [T, CG_ROW_FIELDS] -> topk [T, K] i32, columns by falling score, then -1
 *
 * The order is that of indexer_topk: equal scores go to the lower index, -0.0 equals +0.0, a visible -inf comes
 * last. Columns that a row does not see may hold anything.
 *
 * Saved:     nothing; the list itself is kept by those who take it (4*T*K bytes)
 * Recompute: never, this is a choice
 * Refuses:   shapes that differ; K < 0; at run time a visible score that is NaN, rows outside the columns
 */
#ifndef REAL

#include "ops/attributes.h"
#include "ops/indexer/indexer.h"

static bool topk_infer(cg_infer *infer) {
    const topk_attr *attr = infer->attr;
    if (!cg_expect_real(infer, 0) || !cg_expect_dims(infer, 0, 2) ||
        !cg_expect_rows(infer, 1, infer->in[0]->shape.dims[0], "rows of the scores"))
        return false;
    if (infer->in[0]->shape.dims[1] > INT32_MAX)
        return cg_refuse(infer, "scores has %lld columns, more than an i32 index can name",
                         (long long)infer->in[0]->shape.dims[1]);
    if (attr->topk < 0) return cg_refuse(infer, "topk is %lld, expected 0 or more", (long long)attr->topk);
    cg_infer_out(infer, 0, CG_I32, CG_SHAPE(infer->in[0]->shape.dims[0], attr->topk));
    return true;
}

static size_t topk_workspace(const cg_node *node) {
    return (size_t)cg_thread_slots() * cg_select_bytes(node->in[0]->shape.dims[1], node->out[0]->shape.dims[1],
                                                       cg_dtype_bytes(node->in[0]->dtype));
}

#define CG_KERNEL_FILE "ops/indexer/topk.c"
#include "ops/kernel.h"

/* A comparison for each score. */
static cg_cost topk_cost(const cg_node *node) {
    return (cg_cost){.flops = (double)cg_shape_count(&node->in[0]->shape), .bytes = cg_node_bytes(node)};
}

#define NAN_ __builtin_nan("")
#define INF_ __builtin_inf()
#define SEES(first, visible) 0, 0, first, visible, 1

#define FOUR(...) __VA_ARGS__, __VA_ARGS__, __VA_ARGS__, __VA_ARGS__
#define ROWS_64                                                                                                \
    {                                                                                                          \
        .shape = CG_DIMS(64, 5), .i32 = (int32_t[]) { FOUR(FOUR(FOUR(SEES(1, 130)))) }                         \
    }

static const cg_case topk_cases[] = {
    {.name = "ties",
     .in = {{.shape = CG_DIMS(2, 6), .real = (double[]){5, 1, 5, 5, 9, 9, 0, -0., 0, 7, 0, 0}},
            {.shape = CG_DIMS(2, 5), .i32 = (int32_t[]){SEES(0, 4), SEES(0, 6)}}},
     .attr = &(topk_attr){4}},
    {.name = "infinite scores, NaN that is not seen",
     .in = {{.shape = CG_DIMS(2, 4), .real = (double[]){NAN_, -INF_, INF_, 3, NAN_, NAN_, NAN_, NAN_}},
            {.shape = CG_DIMS(2, 5), .i32 = (int32_t[]){SEES(1, 3), SEES(2, 0)}}},
     .attr = &(topk_attr){3}},
    {.name = "large", .in = {{.shape = CG_DIMS(64, 131)}, ROWS_64}, .attr = &(topk_attr){17}, .large = true},
    {.name = "nothing chosen",
     .in = {{.shape = CG_DIMS(1, 4)}, {.shape = CG_DIMS(1, 5), .i32 = (int32_t[]){SEES(0, 4)}}},
     .attr = &(topk_attr){0}},
    {.name = "no column",
     .in = {{.shape = CG_DIMS(1, 0)}, {.shape = CG_DIMS(1, 5), .i32 = (int32_t[]){SEES(0, 0)}}},
     .attr = &(topk_attr){16}},
    {.name = "no row",
     .in = {{.shape = CG_DIMS(0, 4)}, {.shape = CG_DIMS(0, 5), .i32 = (int32_t[]){0}}},
     .attr = &(topk_attr){2}},
    {.name = "NaN score",
     .in = {{.shape = CG_DIMS(1, 3), .real = (double[]){1, NAN_, 2}},
            {.shape = CG_DIMS(1, 5), .i32 = (int32_t[]){SEES(0, 3)}}},
     .attr = &(topk_attr){1},
     .run_error = "row 0: the score of column 1 is NaN"},
    {.name = "row outside",
     .in = {{.shape = CG_DIMS(1, 3)}, {.shape = CG_DIMS(1, 5), .i32 = (int32_t[]){SEES(2, 2)}}},
     .attr = &(topk_attr){1},
     .run_error = "row 0 sees 2 compressed rows from 2 on, but there are 3"},
    {.name = "negative width",
     .in = {{.shape = CG_DIMS(1, 3)}, {.shape = CG_DIMS(1, 5), .i32 = (int32_t[]){SEES(0, 3)}}},
     .attr = &(topk_attr){-1},
     .refuses = "topk is -1"},
    {.name = "rows differ",
     .in = {{.shape = CG_DIMS(2, 3)}, {.shape = CG_DIMS(1, 5), .i32 = (int32_t[]){SEES(0, 3)}}},
     .attr = &(topk_attr){1},
     .refuses = "rows has shape [1, 5], expected 2 in dimension 0"},
};

const cg_op cg_op_topk = {
    .name = "topk",
    .doc = "the K visible columns of largest score",
    .in = {"scores", "rows"},
    .out = {"topk"},
    .attr_bytes = sizeof(topk_attr),
    .infer = topk_infer,
    .no_grad = "cannot: indices",
    .by_row = CG_BIT(0) | CG_BIT(1),
    .replay = CG_REPLAY_CHOICE,
    .cost = topk_cost,
    .workspace = topk_workspace,
    .run = CG_RUN(topk),
    CG_CASES(topk_cases),
};

cg_value *cg_topk(cg_graph *graph, cg_value *scores, cg_value *rows, int64_t topk) {
    return cg_apply(graph, &cg_op_topk, &(topk_attr){topk}, (cg_value *[]){scores, rows}, 2);
}

#else

#include "ops/indexer/select.h"

static bool KERNEL(topk)(const cg_run_args *args) {
    const REAL *scores = args->in[0].data;
    const int32_t *rows = args->in[1].data;
    int32_t *topk = args->out[0].data;
    const int64_t T = args->in[0].shape.dims[0], C = args->in[0].shape.dims[1], K = args->out[0].shape.dims[1];
    if (!cg_rows_fit(args, rows, T, C)) return false;
    int64_t bad = INT64_MAX; /* row * C + column of the first NaN */
#pragma omp parallel for schedule(static) reduction(min : bad)
    for (int64_t t = 0; t < T; t++) {
        char *at = (char *)args->workspace + (size_t)cg_thread_slot() * cg_select_bytes(C, K, sizeof(REAL));
        const SELECT scratch = KERNEL(select_take)(&at, C, K);
        const int64_t first = rows[t * CG_ROW_FIELDS + CG_ROW_COMPRESSED];
        const int64_t nan = KERNEL(select)(scores + t * C + first, rows[t * CG_ROW_FIELDS + CG_ROW_VISIBLE], K,
                                           first, &scratch, topk + t * K);
        if (nan >= 0 && t * C + first + nan < bad) bad = t * C + first + nan;
    }
    if (bad == INT64_MAX) return true;
    return cg_fail(args->error, CG_BAD_INPUT, "row %lld: the score of column %lld is NaN",
                   (long long)(args->first_row + bad / C), (long long)(bad % C));
}

#endif
