/* Rows of a table: y[t] = table[tokens[t]], zeros where the token is -1 (padding).
 *
 *   table [V, D]   tokens [T] i32   -> y [T, D]
 *
 * The gradient adds the rows of dy to the rows of the table. It is cut by columns, so each element of the table
 * is summed by one thread over t = 0, 1, ... whatever the tokens are.
 *
 * Saved:     tokens                   (4*T bytes)
 * Recompute: same bits
 * Refuses:   a token outside -1 .. V-1, when run
 */
#ifndef REAL

#include "ops/attributes.h"
#include "ops/ops.h"

extern const cg_op cg_op_embedding_grad;

enum { EMBEDDING_COLUMNS = 16 }; /* columns of the table that one thread sums: a cache line of f32 */

static bool embedding_infer(cg_infer *infer) {
    if (!cg_expect_real(infer, 0) || !cg_expect_dims(infer, 0, 2)) return false;
    if (!cg_expect_dtype(infer, 1, CG_I32) || !cg_expect_dims(infer, 1, 1)) return false;
    const cg_value *table = infer->in[0];
    cg_infer_out(infer, 0, table->dtype, CG_SHAPE(infer->in[1]->shape.dims[0], table->shape.dims[1]));
    return true;
}

static bool embedding_grad_infer(cg_infer *infer) {
    const embedding_grad_attr *attr = infer->attr;
    if (!cg_expect_dtype(infer, 0, CG_I32) || !cg_expect_dims(infer, 0, 1)) return false;
    if (!cg_expect_real(infer, 1) || !cg_expect_dims(infer, 1, 2)) return false;
    const cg_value *dy = infer->in[1];
    if (!cg_expect_dim(infer, 1, 0, infer->in[0]->shape.dims[0], "tokens")) return false;
    if (attr->n_rows < 0)
        return cg_refuse(infer, "n_rows is %lld, expected at least 0", (long long)attr->n_rows);
    cg_infer_out(infer, 0, dy->dtype, CG_SHAPE(attr->n_rows, dy->shape.dims[1]));
    return true;
}

static bool tokens_fit(const cg_run_args *args, const cg_tensor *tokens, int64_t V) {
    const int32_t *token = tokens->data;
    for (int64_t t = 0; t < tokens->shape.dims[0]; t++)
        if (token[t] < -1 || token[t] >= V)
            return cg_fail(args->error, CG_BAD_INPUT,
                           "row %lld of tokens is %d, expected -1 or a row of the table, 0 to %lld",
                           (long long)(args->first_row + t), (int)token[t], (long long)V - 1);
    return true;
}

#define CG_KERNEL_FILE "ops/nn/embedding.c"
#include "ops/kernel.h"

static void embedding_build_grad(cg_graph *graph, const cg_node *node, cg_value *const *dout, cg_value **din) {
    const embedding_grad_attr attr = {node->in[0]->shape.dims[0]};
    din[0] = cg_apply(graph, &cg_op_embedding_grad, &attr, (cg_value *[]){node->in[1], dout[0]}, 2);
}

static cg_cost embedding_cost(const cg_node *node) {
    const cg_value *y = node->out[0]; /* of the table only the rows that are named */
    double bytes = 2 * (double)cg_tensor_bytes(y->dtype, &y->shape) + 4 * (double)y->shape.dims[0];
    return (cg_cost){.bytes = bytes};
}

static cg_cost embedding_grad_cost(const cg_node *node) {
    return (cg_cost){.flops = (double)cg_shape_count(&node->in[1]->shape), .bytes = cg_node_bytes(node)};
}

#define TOKENS                                                                                                 \
    .shape = CG_DIMS(6), .i32 = (const int32_t[]) { 2, 0, -1, 2, 3, 2 }
/* One token in most places, far apart too. */
#define MANY_TOKENS                                                                                            \
    .shape = CG_DIMS(150), .i32 = (const int32_t[]) {                                                          \
        [3] = 1, [8] = -1, [9] = 4, [17 ... 23] = 1, [64] = 4, [100] = -1, [101] = 4, [140 ... 149] = 1        \
    }
static const cg_case embedding_cases[] = {
    {.name = "repeated and absent", .in = {{.shape = CG_DIMS(5, 3)}, {TOKENS}}, .crosses = "tokens"},
    {.name = "one row",
     .in = {{.shape = CG_DIMS(1, 4)}, {.shape = CG_DIMS(1), .i32 = (const int32_t[]){0}}},
     .crosses = "tokens"},
    {.name = "wide",
     .in = {{.shape = CG_DIMS(2, 19)}, {.shape = CG_DIMS(2), .i32 = (const int32_t[]){1, 1}}},
     .crosses = "tokens"},
    {.name = "no tokens",
     .in = {{.shape = CG_DIMS(5, 3)}, {.shape = CG_DIMS(0), .i32 = (const int32_t[]){0}}},
     .crosses = "tokens"},
    {.name = "empty table",
     .in = {{.shape = CG_DIMS(0, 3)}, {.shape = CG_DIMS(2), .i32 = (const int32_t[]){-1, -1}}},
     .crosses = "tokens"},
    {.name = "large", .in = {{.shape = CG_DIMS(301, 331)}, {TOKENS}}, .crosses = "tokens", .large = true},
    {.name = "many tokens, rows of whole packs",
     .in = {{.shape = CG_DIMS(5, 24)}, {MANY_TOKENS}},
     .crosses = "tokens",
     .large = true},
    {.name = "long rows of whole packs",
     .in = {{.shape = CG_DIMS(5, 1040)}, {TOKENS}},
     .crosses = "tokens",
     .large = true},
    {.name = "wrong token, rows of whole packs",
     .in = {{.shape = CG_DIMS(2, 8)}, {MANY_TOKENS}},
     .crosses = "tokens",
     .run_error = "row 9 of tokens is 4"},
    {.name = "token too large",
     .in = {{.shape = CG_DIMS(5, 3)}, {.shape = CG_DIMS(3), .i32 = (const int32_t[]){4, 5, 9}}},
     .crosses = "tokens",
     .run_error = "row 1 of tokens is 5, expected -1 or a row of the table, 0 to 4"},
    {.name = "token too small",
     .in = {{.shape = CG_DIMS(5, 3)}, {.shape = CG_DIMS(2), .i32 = (const int32_t[]){0, -2}}},
     .crosses = "tokens",
     .run_error = "row 1 of tokens is -2"},
    {.name = "table of one dimension",
     .in = {{.shape = CG_DIMS(5)}, {TOKENS}},
     .refuses = "table has shape [5], expected 2 dimensions"},
    {.name = "tokens of two dimensions",
     .in = {{.shape = CG_DIMS(5, 3)}, {.shape = CG_DIMS(1, 1), .i32 = (const int32_t[]){0}}},
     .refuses = "tokens has shape [1, 1], expected 1 dimensions"},
    {.name = "tokens are real",
     .in = {{.shape = CG_DIMS(5, 3)}, {TOKENS, .wrong_dtype = true}},
     .refuses = "expected i32"},
};

const cg_op cg_op_embedding = {
    .name = "embedding",
    .doc = "rows of a table at tokens",
    .in = {"table", "tokens"},
    .out = {"y"},
    .infer = embedding_infer,
    .differentiable = CG_BIT(0),
    .grad = embedding_build_grad,
    .by_row = CG_BIT(1),
    .replay = CG_REPLAY_SAME_BITS,
    .cost = embedding_cost,
    .run = CG_RUN(embedding),
    CG_CASES(embedding_cases),
};

#define FOUR                                                                                                   \
    &(embedding_grad_attr) { 4 }
static const cg_case embedding_grad_cases[] = {
    {.name = "repeated and absent", .in = {{TOKENS}, {.shape = CG_DIMS(6, 3)}}, .attr = FOUR},
    {.name = "wide", .in = {{TOKENS}, {.shape = CG_DIMS(6, 35)}}, .attr = FOUR},
    {.name = "no tokens",
     .in = {{.shape = CG_DIMS(0), .i32 = (const int32_t[]){0}}, {.shape = CG_DIMS(0, 3)}},
     .attr = FOUR},
    {.name = "many tokens, rows of whole packs",
     .in = {{MANY_TOKENS}, {.shape = CG_DIMS(150, 24)}},
     .attr = &(embedding_grad_attr){6},
     .large = true},
    {.name = "wrong token, rows of whole packs",
     .in = {{MANY_TOKENS}, {.shape = CG_DIMS(150, 8)}},
     .attr = FOUR,
     .run_error = "row 9 of tokens is 4"},
    {.name = "token too large",
     .in = {{TOKENS}, {.shape = CG_DIMS(6, 3)}},
     .attr = &(embedding_grad_attr){2},
     .run_error = "row 0 of tokens is 2"},
    {.name = "rows differ",
     .in = {{TOKENS}, {.shape = CG_DIMS(5, 3)}},
     .attr = FOUR,
     .refuses = "dy has shape [5, 3], expected 6 in dimension 0 (tokens)"},
    {.name = "negative rows",
     .in = {{TOKENS}, {.shape = CG_DIMS(6, 3)}},
     .attr = &(embedding_grad_attr){-1},
     .refuses = "n_rows is -1"},
};

const cg_op cg_op_embedding_grad = {
    .name = "embedding_grad",
    .doc = "gradient of the table: rows of dy added up by token",
    .in = {"tokens", "dy"},
    .out = {"dtable"},
    .attr_bytes = sizeof(embedding_grad_attr),
    .infer = embedding_grad_infer,
    .no_grad = "not yet: second derivatives",
    .by_row = CG_BIT(0) | CG_BIT(1),
    .summed = CG_BIT(0),
    .replay = CG_REPLAY_SAME_BITS,
    .cost = embedding_grad_cost,
    .run = CG_RUN(embedding_grad),
    CG_CASES(embedding_grad_cases),
};

cg_value *cg_embedding(cg_graph *graph, cg_value *table, cg_value *tokens) {
    return cg_apply(graph, &cg_op_embedding, NULL, (cg_value *[]){table, tokens}, 2);
}

#else

static bool KERNEL(embedding)(const cg_run_args *args) {
    const int32_t *tokens = args->in[1].data;
    const REAL *table = args->in[0].data;
    REAL *y = args->out[0].data;
    const int64_t V = args->in[0].shape.dims[0], D = args->in[0].shape.dims[1], T = args->in[1].shape.dims[0];
    if (!tokens_fit(args, &args->in[1], V)) return false;
#pragma omp parallel for schedule(static) if (T * D > 65536)
    for (int64_t t = 0; t < T; t++) {
        if (tokens[t] < 0)
            memset(y + t * D, 0, sizeof(REAL) * (size_t)D);
        else
            memcpy(y + t * D, table + tokens[t] * D, sizeof(REAL) * (size_t)D);
    }
    return true;
}

static bool KERNEL(embedding_grad)(const cg_run_args *args) {
    const int32_t *tokens = args->in[0].data;
    const REAL *dy = args->in[1].data;
    REAL *dtable = args->out[0].data;
    const int64_t V = args->out[0].shape.dims[0], D = args->out[0].shape.dims[1], T = args->in[0].shape.dims[0];
    if (!tokens_fit(args, &args->in[0], V)) return false;
#pragma omp parallel for schedule(static) if (V * D > 65536)
    for (int64_t v = 0; v < V; v++) memset(dtable + v * D, 0, sizeof(REAL) * (size_t)D);
#pragma omp parallel for schedule(static) if (T * D > 16384)
    for (int64_t j0 = 0; j0 < D; j0 += EMBEDDING_COLUMNS) {
        const int64_t width = D - j0 < EMBEDDING_COLUMNS ? D - j0 : EMBEDDING_COLUMNS;
        for (int64_t t = 0; t < T; t++) {
            if (tokens[t] < 0) continue;
            const REAL *from = dy + t * D + j0;
            REAL *to = dtable + tokens[t] * D + j0;
#pragma omp simd
            for (int64_t j = 0; j < width; j++) to[j] += from[j];
        }
    }
    return true;
}

#endif
