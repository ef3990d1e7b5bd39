/* Which compressed rows each token attends to: the choice of the lightning indexer.
 *
 *   q [T, Hi, Di]   w [T, Hi], every scale multiplied in   k [C, Di]   rows [T, CG_ROW_FIELDS]
 *   -> topk [T, K] i32, rows of k, by falling score, then -1
 *
 *   s[t,j] = sum_h w[t,h] * relu(q[t,h,:] . k[j,:])       over the visible rows of t alone
 *
 * Equal scores go to the lower index, -0.0 equals +0.0. A visible row whose score is -inf is a candidate like
 * any other and comes last; rows that t does not see are none, whatever they hold. Heads are summed
 * in registers, and each thread holds the scores of a few rows, so no [T, C] exists, let alone [T, Hi, C]. A
 * score has the bits that indexer_head_scores, relu and indexer_head_sum give, so that topk chooses the same.
 *
 * Saved:     nothing; the list itself is kept by those who take it (4*T*K bytes)
 * Recompute: never, this is a choice
 * Refuses:   shapes that differ; K < 0; at run time a score that is NaN, rows outside k
 * Source:    DeepSeek-V4 report, arXiv 2606.19348, section 2.3.3; ties as in the stored vectors
 */
#ifndef REAL

#include "ops/attributes.h"
#include "ops/indexer/indexer.h"
#include "ops/pairs.h"

/* Rows that share a pass over the keys, and keys of one visit: a tile of keys stays in the first-level cache.
 */
enum { TOPK_ROWS = CG_ROW_CHUNK, TOPK_KEYS = 64 };

static bool indexer_topk_infer(cg_infer *infer) {
    const indexer_topk_attr *attr = infer->attr;
    if (!cg_expect_index_inputs(infer, 0) ||
        !cg_expect_rows(infer, 3, infer->in[0]->shape.dims[0], "rows of the queries"))
        return false;
    if (attr->topk < 0) return cg_refuse(infer, "topk is %lld, expected 0 or more", (long long)attr->topk);
    cg_infer_out(infer, 0, CG_I32, CG_SHAPE(infer->in[0]->shape.dims[0], attr->topk));
    return true;
}

/* One thread's piece: scores of its rows, and what selecting takes. */
static size_t indexer_topk_piece(int64_t C, int64_t K, size_t real) {
    return cg_align_bytes((size_t)(TOPK_ROWS * cg_row_scores(C)) * real) + cg_select_bytes(C, K, real);
}

static size_t indexer_topk_workspace(const cg_node *node) {
    const int64_t Di = cg_dim(node->in[0], 2), C = cg_dim(node->in[2], 0), K = cg_dim(node->out[0], 1);
    const size_t real = cg_dtype_bytes(node->in[0]->dtype);
    return cg_packed_keys_bytes(C, Di, real) + (size_t)cg_thread_slots() * indexer_topk_piece(C, K, real);
}

#define CG_KERNEL_FILE "ops/indexer/indexer_topk.c"
#include "ops/kernel.h"

/* Half of a segment's pairs are visible. */
static cg_cost indexer_topk_cost(const cg_node *node) {
    const cg_shape *q = &node->in[0]->shape;
    const double C = (double)cg_dim(node->in[2], 0),
                 pairs = cg_chosen_pairs((double)q->dims[0], C, C, cg_segments_of(node->in[3]));
    return (cg_cost){.flops = pairs * (double)q->dims[1] * (2 * (double)q->dims[2] + 2),
                     .bytes = cg_node_bytes(node)};
}

/* Two segments of 5 and 3 rows at ratio 2, the last row of the first one padding. */
#define ROWS_8                                                                                                 \
    (int32_t[]) {                                                                                              \
        0, 0, 0, 0, 1, 0, 1, 0, 1, 1, 0, 2, 0, 1, 1, 0, 3, 0, 2, 1, 0, 4, 0, 0, 0, 5, 0, 2, 0, 1, 5, 1, 2, 1,  \
            1, 5, 2, 2, 1, 1                                                                                   \
    }
#define ONE_ROW(visible)                                                                                       \
    {                                                                                                          \
        .shape = CG_DIMS(1, 5), .i32 = (int32_t[]) { 0, 9, 0, visible, 1 }                                     \
    }
#define NAN_ __builtin_nan("")
#define INF_ __builtin_inf()

#define FOUR(...) __VA_ARGS__, __VA_ARGS__, __VA_ARGS__, __VA_ARGS__
#define ROWS_64                                                                                                \
    {                                                                                                          \
        .shape = CG_DIMS(64, 5), .i32 = (int32_t[]) { FOUR(FOUR(FOUR(0, 999, 1, 130, 1))) }                    \
    }

static const cg_case indexer_topk_cases[] = {
    {.name = "two segments and padding",
     .in = {{.shape = CG_DIMS(8, 3, 5)},
            {.shape = CG_DIMS(8, 3)},
            {.shape = CG_DIMS(3, 5)},
            {.shape = CG_DIMS(8, 5), .i32 = ROWS_8}},
     .attr = &(indexer_topk_attr){2}},
    {.name = "wider than what there is",
     .in = {{.shape = CG_DIMS(8, 9, 2)},
            {.shape = CG_DIMS(8, 9)},
            {.shape = CG_DIMS(3, 2)},
            {.shape = CG_DIMS(8, 5), .i32 = ROWS_8}},
     .attr = &(indexer_topk_attr){7}},
    {.name = "NaN in rows that are not seen",
     .in = {{.shape = CG_DIMS(1, 1, 1), .real = (double[]){1}},
            {.shape = CG_DIMS(1, 1), .real = (double[]){1}},
            {.shape = CG_DIMS(4, 1), .real = (double[]){3, 5, NAN_, NAN_}},
            ONE_ROW(2)},
     .attr = &(indexer_topk_attr){3}},
    {.name = "infinite scores",
     .in = {{.shape = CG_DIMS(1, 1, 1), .real = (double[]){1}},
            {.shape = CG_DIMS(1, 1), .real = (double[]){-1}},
            {.shape = CG_DIMS(3, 1), .real = (double[]){INF_, 5, -INF_}},
            ONE_ROW(3)},
     .attr = &(indexer_topk_attr){3}},
    {.name = "large",
     .in = {{.shape = CG_DIMS(64, 11, 33)}, {.shape = CG_DIMS(64, 11)}, {.shape = CG_DIMS(131, 33)}, ROWS_64},
     .attr = &(indexer_topk_attr){17},
     .large = true},
    {.name = "nothing chosen",
     .in = {{.shape = CG_DIMS(1, 2, 3)}, {.shape = CG_DIMS(1, 2)}, {.shape = CG_DIMS(4, 3)}, ONE_ROW(4)},
     .attr = &(indexer_topk_attr){0}},
    {.name = "no compressed row",
     .in = {{.shape = CG_DIMS(1, 2, 3)}, {.shape = CG_DIMS(1, 2)}, {.shape = CG_DIMS(0, 3)}, ONE_ROW(0)},
     .attr = &(indexer_topk_attr){2}},
    {.name = "no row",
     .in = {{.shape = CG_DIMS(0, 2, 3)},
            {.shape = CG_DIMS(0, 2)},
            {.shape = CG_DIMS(4, 3)},
            {.shape = CG_DIMS(0, 5), .i32 = (int32_t[]){0}}},
     .attr = &(indexer_topk_attr){2}},
    {.name = "NaN score",
     .in = {{.shape = CG_DIMS(1, 1, 1), .real = (double[]){1}},
            {.shape = CG_DIMS(1, 1), .real = (double[]){1}},
            {.shape = CG_DIMS(4, 1), .real = (double[]){3, 5, NAN_, NAN_}},
            ONE_ROW(3)},
     .attr = &(indexer_topk_attr){1},
     .run_error = "row 0: the score of compressed row 2 is NaN"},
    {.name = "row outside",
     .in = {{.shape = CG_DIMS(1, 1, 1)}, {.shape = CG_DIMS(1, 1)}, {.shape = CG_DIMS(4, 1)}, ONE_ROW(5)},
     .attr = &(indexer_topk_attr){1},
     .run_error = "row 0 sees 5 compressed rows from 0 on, but there are 4"},
    {.name = "negative width",
     .in = {{.shape = CG_DIMS(1, 1, 1)}, {.shape = CG_DIMS(1, 1)}, {.shape = CG_DIMS(4, 1)}, ONE_ROW(1)},
     .attr = &(indexer_topk_attr){-1},
     .refuses = "topk is -1"},
    {.name = "channels differ",
     .in = {{.shape = CG_DIMS(1, 1, 2)}, {.shape = CG_DIMS(1, 1)}, {.shape = CG_DIMS(4, 1)}, ONE_ROW(1)},
     .attr = &(indexer_topk_attr){1},
     .refuses = "k has shape [4, 1], expected 2 in dimension 1"},
    {.name = "rows of another dtype",
     .in = {{.shape = CG_DIMS(1, 1, 1)},
            {.shape = CG_DIMS(1, 1)},
            {.shape = CG_DIMS(4, 1)},
            {.shape = CG_DIMS(1, 5), .i32 = (int32_t[]){0}, .wrong_dtype = true}},
     .attr = &(indexer_topk_attr){1},
     .refuses = "rows is f32, expected i32"},
};

const cg_op cg_op_indexer_topk = {
    .name = "indexer_topk",
    .doc = "the K visible compressed rows of largest index score",
    .in = {"q", "w", "k", "rows"},
    .out = {"topk"},
    .attr_bytes = sizeof(indexer_topk_attr),
    .infer = indexer_topk_infer,
    .no_grad = "cannot: indices",
    .by_row = CG_BIT(0) | CG_BIT(1) | CG_BIT(3),
    .replay = CG_REPLAY_CHOICE,
    .cost = indexer_topk_cost,
    .workspace = indexer_topk_workspace,
    .run = CG_RUN(indexer_topk),
    CG_CASES(indexer_topk_cases),
};

cg_value *cg_indexer_topk(cg_graph *graph, cg_value *q, cg_value *w, cg_value *k, cg_value *rows,
                          int64_t topk) {
    return cg_apply(graph, &cg_op_indexer_topk, &(indexer_topk_attr){topk}, (cg_value *[]){q, w, k, rows}, 4);
}

#else

#include "ops/indexer/indexer_kernels.h"
#include "ops/indexer/packed_keys.h"
#include "ops/indexer/select.h"

static bool KERNEL(indexer_topk)(const cg_run_args *args) {
    const REAL *q = args->in[0].data, *w = args->in[1].data, *k = args->in[2].data;
    const int32_t *rows = args->in[3].data;
    int32_t *topk = args->out[0].data;
    const int64_t T = args->in[0].shape.dims[0], Hi = args->in[0].shape.dims[1], Di = args->in[0].shape.dims[2];
    const int64_t C = args->in[2].shape.dims[0], K = args->out[0].shape.dims[1];
    if (!cg_rows_fit(args, rows, T, C)) return false;
    LANES *packed = args->workspace;
    KERNEL(keys_pack)(k, C, Di, packed);
    char *pieces = (char *)args->workspace + cg_packed_keys_bytes(C, Di, sizeof(REAL));
    int64_t bad = INT64_MAX; /* row * C + key of the first NaN */
#pragma omp parallel for schedule(static, 1) reduction(min : bad)
    for (int64_t t0 = 0; t0 < T; t0 += TOPK_ROWS) {
        const int64_t n_rows = T - t0 < TOPK_ROWS ? T - t0 : TOPK_ROWS;
        char *at = pieces + (size_t)cg_thread_slot() * indexer_topk_piece(C, K, sizeof(REAL));
        REAL *scores = cg_take(&at, (size_t)(TOPK_ROWS * cg_row_scores(C)) * sizeof(REAL));
        const SELECT scratch = KERNEL(select_take)(&at, C, K);
        int64_t first = C, end = 0;
        for (int64_t r = 0; r < n_rows; r++) {
            const int32_t *row = rows + (t0 + r) * CG_ROW_FIELDS;
            const int64_t start = row[CG_ROW_COMPRESSED], n = row[CG_ROW_VISIBLE];
            if (n == 0) continue;
            first = start < first ? start : first;
            end = start + n > end ? start + n : end;
        }
        for (int64_t c = first / TOPK_KEYS * TOPK_KEYS; c < end; c += TOPK_KEYS)
            for (int64_t r = 0; r < n_rows; r++) {
                const int32_t *row = rows + (t0 + r) * CG_ROW_FIELDS;
                const int64_t start = row[CG_ROW_COMPRESSED], seen_end = start + row[CG_ROW_VISIBLE],
                              to = seen_end < c + TOPK_KEYS ? seen_end : c + TOPK_KEYS;
                const REAL *row_q = q + (t0 + r) * Hi * Di, *row_w = w + (t0 + r) * Hi;
                REAL *row_scores = scores + r * cg_row_scores(C) + CG_KEYS;
                /* from the tile on in which the row's first key lies */
                for (int64_t j = c < start ? start / CG_KEYS * CG_KEYS : c; j < to; j += CG_KEYS) {
                    const LANES *keys = packed + j / CG_LANES * Di;
                    KERNEL(packed_scores)(row_q, row_w, Hi, Di, keys, to - j, row_scores + (j - start));
                }
            }
        for (int64_t r = 0; r < n_rows; r++) {
            const int32_t *row = rows + (t0 + r) * CG_ROW_FIELDS;
            const int64_t nan = KERNEL(select)(scores + r * cg_row_scores(C) + CG_KEYS, row[CG_ROW_VISIBLE], K,
                                               row[CG_ROW_COMPRESSED], &scratch, topk + (t0 + r) * K);
            const int64_t place = (t0 + r) * C + row[CG_ROW_COMPRESSED] + nan;
            if (nan >= 0 && place < bad) bad = place;
        }
    }
    if (bad == INT64_MAX) return true;
    return cg_fail(args->error, CG_BAD_INPUT, "row %lld: the score of compressed row %lld is NaN",
                   (long long)(args->first_row + bad / C), (long long)(bad % C));
}

#endif
