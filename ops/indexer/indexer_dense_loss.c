/* The loss of the indexer's warm-up: over all compressed rows that a token sees, streamed.
 *
 *   q_index [T, Hi, Di]   w [T, Hi], every scale multiplied in   k_index [C, Di]   rows [T, CG_ROW_FIELDS]
 *   q [T, H, D]   ckv [C, D]   window_lse [T, H] (teacher full) or sink [H] (teacher sink), else absent
 *   -> loss [1], kl [T] per row, unscaled, in nats (a constant)
 *
 *   s[t,j]    = sum_h w[t,h] relu(q_index[t,h,:] . k_index[j,:])     over the visible rows j of t
 *   p         = softmax of s[t,:]
 *   target    = teacher over the same rows (ops/indexer/dense_teacher.h): its denominators hold all of them and beside
 *               them, per mode, window and sink, the sink, or nothing
 *   kl[t]     = sum_j target (log target - log p)                    0 where target is 0
 *   loss      = coeff / N * sum_t kl[t]                              N: real rows, all rows, or 1; at least 1
 *   ds        = dloss * coeff / N * (p - target), from there as in indexer_scores_at
 *
 * The teacher's side (q, ckv, window_lse, sink) is a constant. Real rows that see nothing add 0, get the
 * gradient 0 and count in N; padding adds 0 and gets 0 and may hold anything, and so may compressed rows that
 * nobody sees. Backward makes teacher and student again. Neither [T, C] nor [T, H, C] exists: each thread holds
 * the logits of a block of rows, [rows, H, C] with as many rows as keep it in the second-level cache, at least
 * one.
 *
 * Saved:     q_index w k_index q ckv window_lse or sink, rows
 *            (4*(T*Hi*Di + T*Hi + C*Di + T*H*D + C*D + T*H) + 20*T bytes in f32)
 * Recompute: same bits
 * Kink:      relu at 0, gradient 0 there
 * Refuses:   shapes that differ, a teacher without its window_lse or sink or with what it does not read, an
 *            unknown reduction, numbers that are not finite; at run time rows outside ckv, and a
 *            sink of +inf or NaN (-inf: no sink)
 * Source:    DeepSeek-V3.2 report, section 2.1.1, equation 3
 */
#ifndef REAL

#include "ops/attributes.h"
#include "ops/indexer/indexer.h"
#include "ops/csa/sinks.h"

enum { Q_INDEX, W, K_INDEX, Q, CKV, WINDOW_LSE, SINK, ROWS, DENSE_INPUTS };

/* The inputs from number i on. */
static bool dense_expect(cg_infer *infer, int i) {
    const indexer_dense_loss_attr *attr = infer->attr;
    cg_value *const *in = infer->in + i;
    if (!cg_expect_index_inputs(infer, i) || !cg_expect_dtype(infer, i + Q, in[Q_INDEX]->dtype) ||
        !cg_expect_dims(infer, i + Q, 3) ||
        !cg_expect_dim(infer, i + Q, 0, in[Q_INDEX]->shape.dims[0], "rows of q_index") ||
        !cg_expect_dtype(infer, i + CKV, in[Q_INDEX]->dtype) || !cg_expect_dims(infer, i + CKV, 2) ||
        !cg_expect_dim(infer, i + CKV, 0, in[K_INDEX]->shape.dims[0], "rows of k_index") ||
        !cg_expect_dim(infer, i + CKV, 1, in[Q]->shape.dims[2], "channels of q"))
        return false;
    const int64_t T = in[Q]->shape.dims[0], H = in[Q]->shape.dims[1];
    if (H < 1) return cg_refuse(infer, "q has no head, but a teacher needs at least one");
    if (in[WINDOW_LSE] &&
        (!cg_expect_dtype(infer, i + WINDOW_LSE, in[Q]->dtype) || !cg_expect_dims(infer, i + WINDOW_LSE, 2) ||
         !cg_expect_dim(infer, i + WINDOW_LSE, 0, T, "rows of q") ||
         !cg_expect_dim(infer, i + WINDOW_LSE, 1, H, "heads of q")))
        return false;
    if (in[SINK] && (!cg_expect_dtype(infer, i + SINK, in[Q]->dtype) || !cg_expect_dims(infer, i + SINK, 1) ||
                     !cg_expect_dim(infer, i + SINK, 0, H, "heads of q")))
        return false;
    if (!cg_expect_rows(infer, i + ROWS, T, "rows of q")) return false;
    if (attr->teacher != CG_TEACHER_FULL && attr->teacher != CG_TEACHER_SINK &&
        attr->teacher != CG_TEACHER_COMPRESSED)
        return cg_refuse(infer, "teacher is %d, which none of full, sink and compressed is",
                         (int)attr->teacher);
    if ((in[WINDOW_LSE] != NULL) != (attr->teacher == CG_TEACHER_FULL))
        return cg_refuse(infer, in[WINDOW_LSE] ? "window_lse is there, but only the full teacher reads it"
                                               : "the full teacher needs window_lse");
    if ((in[SINK] != NULL) != (attr->teacher == CG_TEACHER_SINK))
        return cg_refuse(infer, in[SINK] ? "sink is there, but only the sink teacher reads it"
                                         : "the sink teacher needs sink");
    if (!(attr->scale - attr->scale == 0))
        return cg_refuse(infer, "scale is %g, expected a finite number", attr->scale);
    return cg_expect_loss_attr(infer, attr->reduction, attr->coeff);
}

static bool indexer_dense_loss_infer(cg_infer *infer) {
    if (!dense_expect(infer, 0)) return false;
    cg_infer_out(infer, 0, infer->in[Q_INDEX]->dtype, CG_SHAPE(1));
    cg_infer_out(infer, 1, infer->in[Q_INDEX]->dtype, CG_SHAPE(infer->in[Q]->shape.dims[0]));
    return true;
}

static bool indexer_dense_loss_grad_infer(cg_infer *infer) {
    if (!dense_expect(infer, 1) || !cg_expect_dtype(infer, 0, infer->in[1]->dtype) ||
        !cg_expect_dims(infer, 0, 1) || !cg_expect_dim(infer, 0, 0, 1, "one loss"))
        return false;
    for (int i = 0; i < 3; i++) cg_infer_out(infer, i, infer->in[1]->dtype, infer->in[1 + i]->shape);
    return true;
}

/* One thread's piece: targets of a block of rows, scores and exponentials of one row, queries of the indexer;
 * for backward also what key_grads fills. */
static size_t dense_piece(cg_dtype dtype, const int64_t q_index[3], const int64_t q[3], int64_t C, bool grad) {
    const size_t real = cg_dtype_bytes(dtype);
    const int64_t heads = cg_ceil_div(q_index[1], CG_LANES) * CG_LANES;
    size_t bytes = cg_teacher_bytes(dtype, q[0], q[1], q[2], C) +
                   cg_align_bytes((size_t)(cg_teacher_rows(q[1], C) * C) * real) +
                   2 * cg_align_bytes((size_t)C * real) + cg_align_bytes((size_t)(heads * q_index[2]) * real);
    if (grad)
        bytes += cg_align_bytes((size_t)heads * real) + cg_align_bytes(cg_key_dots_bytes(q_index[1], real));
    return bytes;
}

static size_t indexer_dense_loss_workspace(const cg_node *node) {
    return (size_t)cg_thread_slots() * dense_piece(node->in[Q]->dtype, node->in[Q_INDEX]->shape.dims,
                                                   node->in[Q]->shape.dims, node->in[CKV]->shape.dims[0],
                                                   false);
}

/* Shares of dk_index, then each thread's piece. */
static size_t indexer_dense_loss_grad_workspace(const cg_node *node) {
    cg_value *const *in = node->in + 1;
    return cg_align_bytes((size_t)(CG_KEY_PARTS * cg_shape_count(&in[K_INDEX]->shape)) *
                          cg_dtype_bytes(in[Q]->dtype)) +
           (size_t)cg_thread_slots() * dense_piece(in[Q]->dtype, in[Q_INDEX]->shape.dims, in[Q]->shape.dims,
                                                   in[CKV]->shape.dims[0], true);
}

static double dense_divisor(const indexer_dense_loss_attr *attr, const cg_tensor *rows) {
    return cg_reduction_divisor(attr->reduction, rows->data, rows->shape.dims[0]);
}

#define CG_KERNEL_FILE "ops/indexer/indexer_dense_loss.c"
#include "ops/kernel.h"

extern const cg_op cg_op_indexer_dense_loss_grad;

static void indexer_dense_loss_build_grad(cg_graph *graph, const cg_node *node, cg_value *const *dout,
                                          cg_value **din) {
    cg_value *in[1 + DENSE_INPUTS] = {dout[0]};
    for (int i = 0; i < DENSE_INPUTS; i++) in[1 + i] = node->in[i];
    cg_value *dq = cg_apply(graph, &cg_op_indexer_dense_loss_grad, node->attr, in, 1 + DENSE_INPUTS);
    for (int i = 0; i < 3; i++) din[i] = cg_output(dq, i);
}

/* FLOPs for each visible pair: scores, logits and their exponentials, the loss. Half of all pairs are visible
 * in one long segment. */
static double dense_pair_flops(cg_value *const *in) {
    const int64_t *q_index = in[Q_INDEX]->shape.dims, *q = in[Q]->shape.dims;
    return (double)q_index[1] * (2 * (double)q_index[2] + 2) + (double)q[1] * (2 * (double)q[2] + 4) + 8;
}

static cg_cost indexer_dense_loss_cost(const cg_node *node) {
    const double pairs = (double)node->in[Q]->shape.dims[0] * (double)node->in[CKV]->shape.dims[0] / 2;
    return (cg_cost){.flops = pairs * dense_pair_flops(node->in), .bytes = cg_node_bytes(node)};
}

static cg_cost indexer_dense_loss_grad_cost(const cg_node *node) {
    cg_value *const *in = node->in + 1;
    const double pairs = (double)in[Q]->shape.dims[0] * (double)in[CKV]->shape.dims[0] / 2;
    const double grads = (double)in[Q_INDEX]->shape.dims[1] * (6 * (double)in[Q_INDEX]->shape.dims[2] + 3);
    return (cg_cost){.flops = pairs * (dense_pair_flops(in) + grads), .bytes = cg_node_bytes(node)};
}

#define NAN_ __builtin_nan("")
/* Segments of 5 and 3 rows at ratio 2, the last row of the first one padding; row 3 of the keys is unused. */
#define ROWS_8                                                                                                 \
    {                                                                                                          \
        .shape = CG_DIMS(8, 5), .i32 = (int32_t[]) {                                                           \
            0, 0, 0, 0, 1, 0, 1, 0, 1, 1, 0, 2, 0, 1, 1, 0, 3, 0, 2, 1, 0, 4, 0, 0, 0, 5, 0, 2, 0, 1, 5, 1, 2, \
                1, 1, 5, 2, 2, 1, 1                                                                            \
        }                                                                                                      \
    }
#define INDEX_8                                                                                                \
    {.shape = CG_DIMS(8, 2, 2)}, {.shape = CG_DIMS(8, 2)}, { .shape = CG_DIMS(4, 2) }
#define MAIN_8                                                                                                 \
    {.shape = CG_DIMS(8, 2, 3)}, { .shape = CG_DIMS(4, 3) }
#define LSE_8                                                                                                  \
    { .shape = CG_DIMS(8, 2) }
#define SINK_2                                                                                                 \
    { .shape = CG_DIMS(2) }
#define ABSENT                                                                                                 \
    { .absent = true }
#define WRONG_SINK                                                                                             \
    {                                                                                                          \
        .shape = CG_DIMS(2), .real = (double[]) { .5, INFINITY }                                               \
    }
#define DENSE(teacher, reduction)                                                                              \
    &(indexer_dense_loss_attr) { .7, 1.5, teacher, reduction }
#define FULL DENSE(CG_TEACHER_FULL, CG_REDUCE_MEAN_REAL)

#define FOUR(...) __VA_ARGS__, __VA_ARGS__, __VA_ARGS__, __VA_ARGS__
#define ROWS_64                                                                                                \
    {                                                                                                          \
        .shape = CG_DIMS(64, 5), .i32 = (int32_t[]) { FOUR(FOUR(FOUR(0, 999, 1, 130, 1))) }                    \
    }

static const cg_case indexer_dense_loss_cases[] = {
    {.name = "full",
     .in = {INDEX_8, MAIN_8, LSE_8, ABSENT, ROWS_8},
     .attr = FULL,
     .crosses = "q_index w k_index q ckv window_lse rows"},
    {.name = "sink",
     .in = {INDEX_8, MAIN_8, ABSENT, SINK_2, ROWS_8},
     .attr = DENSE(CG_TEACHER_SINK, CG_REDUCE_MEAN_PHYSICAL),
     .crosses = "q_index w k_index q ckv sink rows"},
    {.name = "compressed",
     .in = {INDEX_8, MAIN_8, ABSENT, ABSENT, ROWS_8},
     .attr = DENSE(CG_TEACHER_COMPRESSED, CG_REDUCE_SUM),
     .crosses = "q_index w k_index q ckv rows"},
    {.name = "large",
     .in = {{.shape = CG_DIMS(64, 11, 33)},
            {.shape = CG_DIMS(64, 11), .scale = .05},
            {.shape = CG_DIMS(131, 33)},
            {.shape = CG_DIMS(64, 3, 17)},
            {.shape = CG_DIMS(131, 17)},
            {.shape = CG_DIMS(64, 3)},
            ABSENT,
            ROWS_64},
     .attr = FULL,
     .large = true},
    {.name = "a mass of 1e-80",
     .in = {INDEX_8, MAIN_8, {.shape = CG_DIMS(8, 2), .offset = 184}, ABSENT, ROWS_8},
     .attr = FULL,
     .f32_bound = 4e-5}, /* a logarithm near 184 has an error of 1e-5 in f32, and the heads' ratio keeps it */
    {.name = "NaN where nobody looks",
     .in = {{.shape = CG_DIMS(2, 1, 1)},
            {.shape = CG_DIMS(2, 1)},
            {.shape = CG_DIMS(3, 1), .real = (double[]){NAN_, 1, -2}, .constant = true},
            {.shape = CG_DIMS(2, 1, 1), .real = (double[]){1, NAN_}},
            {.shape = CG_DIMS(3, 1), .real = (double[]){NAN_, .5, 1}},
            {.shape = CG_DIMS(2, 1), .real = (double[]){1, NAN_}},
            ABSENT,
            {.shape = CG_DIMS(2, 5), .i32 = (int32_t[]){0, 9, 1, 2, 1, 0, 10, 1, 0, 0}}},
     .attr = FULL},
    {.name = "no compressed row",
     .in = {{.shape = CG_DIMS(1, 1, 1)},
            {.shape = CG_DIMS(1, 1)},
            {.shape = CG_DIMS(0, 1)},
            {.shape = CG_DIMS(1, 1, 2)},
            {.shape = CG_DIMS(0, 2)},
            {.shape = CG_DIMS(1, 1)},
            ABSENT,
            {.shape = CG_DIMS(1, 5), .i32 = (int32_t[]){0, 0, 0, 0, 1}}},
     .attr = FULL},
    {.name = "no row",
     .in = {{.shape = CG_DIMS(0, 1, 1)},
            {.shape = CG_DIMS(0, 1)},
            {.shape = CG_DIMS(2, 1)},
            {.shape = CG_DIMS(0, 1, 2)},
            {.shape = CG_DIMS(2, 2)},
            {.shape = CG_DIMS(0, 1)},
            ABSENT,
            {.shape = CG_DIMS(0, 5), .i32 = (int32_t[]){0}}},
     .attr = FULL},
    {.name = "row outside",
     .in = {{.shape = CG_DIMS(1, 1, 1)},
            {.shape = CG_DIMS(1, 1)},
            {.shape = CG_DIMS(2, 1)},
            {.shape = CG_DIMS(1, 1, 2)},
            {.shape = CG_DIMS(2, 2)},
            {.shape = CG_DIMS(1, 1)},
            ABSENT,
            {.shape = CG_DIMS(1, 5), .i32 = (int32_t[]){0, 9, 1, 2, 1}}},
     .attr = FULL,
     .run_error = "row 0 sees 2 compressed rows from 1 on, but there are 2"},
    {.name = "sink of all weight",
     .in = {INDEX_8, MAIN_8, ABSENT, WRONG_SINK, ROWS_8},
     .attr = DENSE(CG_TEACHER_SINK, CG_REDUCE_SUM),
     .run_error = "sink of head 1 is inf, expected a number or -inf"},
    {.name = "full without window_lse",
     .in = {INDEX_8, MAIN_8, ABSENT, ABSENT, ROWS_8},
     .attr = FULL,
     .refuses = "the full teacher needs window_lse"},
    {.name = "compressed with sink",
     .in = {INDEX_8, MAIN_8, ABSENT, SINK_2, ROWS_8},
     .attr = DENSE(CG_TEACHER_COMPRESSED, CG_REDUCE_SUM),
     .refuses = "only the sink teacher reads it"},
    {.name = "no teacher",
     .in = {INDEX_8, MAIN_8, ABSENT, ABSENT, ROWS_8},
     .attr = DENSE(CG_TEACHER_NONE, CG_REDUCE_SUM),
     .refuses = "teacher is 0"},
    {.name = "keys differ",
     .in = {INDEX_8, {.shape = CG_DIMS(8, 2, 3)}, {.shape = CG_DIMS(3, 3)}, LSE_8, ABSENT, ROWS_8},
     .attr = FULL,
     .refuses = "ckv has shape [3, 3], expected 4 in dimension 0"},
    {.name = "heads differ",
     .in = {INDEX_8, MAIN_8, {.shape = CG_DIMS(8, 3)}, ABSENT, ROWS_8},
     .attr = FULL,
     .refuses = "window_lse has shape [8, 3], expected 2 in dimension 1"},
};

static const cg_case indexer_dense_loss_grad_cases[] = {
    {.name = "full", .in = {{.shape = CG_DIMS(1)}, INDEX_8, MAIN_8, LSE_8, ABSENT, ROWS_8}, .attr = FULL},
    {.name = "sink",
     .in = {{.shape = CG_DIMS(1)}, INDEX_8, MAIN_8, ABSENT, SINK_2, ROWS_8},
     .attr = DENSE(CG_TEACHER_SINK, CG_REDUCE_SUM)},
    {.name = "sink of all weight",
     .in = {{.shape = CG_DIMS(1)}, INDEX_8, MAIN_8, ABSENT, WRONG_SINK, ROWS_8},
     .attr = DENSE(CG_TEACHER_SINK, CG_REDUCE_SUM),
     .run_error = "sink of head 1 is inf"},
    {.name = "row outside",
     .in = {{.shape = CG_DIMS(1)},
            {.shape = CG_DIMS(1, 1, 1)},
            {.shape = CG_DIMS(1, 1)},
            {.shape = CG_DIMS(2, 1)},
            {.shape = CG_DIMS(1, 1, 2)},
            {.shape = CG_DIMS(2, 2)},
            {.shape = CG_DIMS(1, 1)},
            ABSENT,
            {.shape = CG_DIMS(1, 5), .i32 = (int32_t[]){0, 9, 1, 2, 1}}},
     .attr = FULL,
     .run_error = "row 0 sees 2 compressed rows from 1 on, but there are 2"},
    {.name = "two losses",
     .in = {{.shape = CG_DIMS(2)}, INDEX_8, MAIN_8, LSE_8, ABSENT, ROWS_8},
     .attr = FULL,
     .refuses = "dloss has shape [2]"},
};

const cg_op cg_op_indexer_dense_loss = {
    .name = "indexer_dense_loss",
    .doc = "KL of the teacher against the index scores over all visible rows",
    .in = {"q_index", "w", "k_index", "q", "ckv", "window_lse", "sink", "rows"},
    .out = {"loss", "kl"},
    .optional = CG_BIT(WINDOW_LSE) | CG_BIT(SINK),
    .attr_bytes = sizeof(indexer_dense_loss_attr),
    .infer = indexer_dense_loss_infer,
    .differentiable = CG_BIT(Q_INDEX) | CG_BIT(W) | CG_BIT(K_INDEX),
    .constant_out = CG_BIT(1),
    .grad = indexer_dense_loss_build_grad,
    .statistic_in = CG_BIT(WINDOW_LSE) | CG_BIT(SINK),
    .statistic_out = CG_BIT(0) | CG_BIT(1),
    .by_row = CG_BIT(Q_INDEX) | CG_BIT(W) | CG_BIT(Q) | CG_BIT(WINDOW_LSE),
    .summed = CG_BIT(0),
    .replay = CG_REPLAY_SAME_BITS,
    .cost = indexer_dense_loss_cost,
    .workspace = indexer_dense_loss_workspace,
    .run = CG_RUN(indexer_dense_loss),
    CG_CASES(indexer_dense_loss_cases),
};

const cg_op cg_op_indexer_dense_loss_grad = {
    .name = "indexer_dense_loss_grad",
    .doc = "gradients of indexer_dense_loss",
    .in = {"dloss", "q_index", "w", "k_index", "q", "ckv", "window_lse", "sink", "rows"},
    .out = {"dq_index", "dw", "dk_index"},
    .optional = CG_BIT(1 + WINDOW_LSE) | CG_BIT(1 + SINK),
    .attr_bytes = sizeof(indexer_dense_loss_attr),
    .infer = indexer_dense_loss_grad_infer,
    .no_grad = "not yet: second derivatives",
    .statistic_in = CG_BIT(0) | CG_BIT(1 + WINDOW_LSE) | CG_BIT(1 + SINK),
    .by_row = CG_BIT(1 + Q_INDEX) | CG_BIT(1 + W) | CG_BIT(1 + Q) | CG_BIT(1 + WINDOW_LSE),
    .summed = CG_BIT(2),
    .replay = CG_REPLAY_SAME_BITS,
    .cost = indexer_dense_loss_grad_cost,
    .workspace = indexer_dense_loss_grad_workspace,
    .run = CG_RUN(indexer_dense_loss_grad),
    CG_CASES(indexer_dense_loss_grad_cases),
};

/* What the teacher does not read is not saved. */
cg_value *cg_indexer_dense_loss(cg_graph *graph, cg_value *q_index, cg_value *w, cg_value *k_index, cg_value *q,
                                cg_value *ckv, cg_value *window_lse, cg_value *sink, cg_value *rows,
                                double scale, cg_teacher teacher, cg_reduction reduction, double coeff) {
    if (teacher != CG_TEACHER_FULL) window_lse = NULL;
    if (teacher != CG_TEACHER_SINK) sink = NULL;
    return cg_apply(graph, &cg_op_indexer_dense_loss,
                    &(indexer_dense_loss_attr){scale, coeff, teacher, reduction},
                    (cg_value *[]){q_index, w, k_index, q, ckv, window_lse, sink, rows}, DENSE_INPUTS);
}

#else

#include "ops/indexer/dense_teacher.h"
#include "ops/indexer/indexer_kernels.h"
#include "ops/indexer/kl_kernels.h"

/* `rows` holds all rows, for the divisor, also where the others are cut. */
static TEACHER KERNEL(dense_teacher_of)(const cg_run_args *args, const cg_tensor *in) {
    return (TEACHER){.q = in[Q].data,
                     .ckv = in[CKV].data,
                     .window_lse = in[WINDOW_LSE].data,
                     .sink = in[SINK].data,
                     .rows = (const int32_t *)in[ROWS].data + args->first_row * CG_ROW_FIELDS,
                     .T = in[Q].shape.dims[0],
                     .H = in[Q].shape.dims[1],
                     .D = in[Q].shape.dims[2],
                     .C = in[CKV].shape.dims[0],
                     .scale = (REAL)((const indexer_dense_loss_attr *)args->attr)->scale};
}

static bool KERNEL(indexer_dense_loss)(const cg_run_args *args) {
    const indexer_dense_loss_attr *attr = args->attr;
    const cg_tensor *in = args->in;
    const TEACHER teacher = KERNEL(dense_teacher_of)(args, in);
    const REAL *q_index = in[Q_INDEX].data, *w = in[W].data, *k_index = in[K_INDEX].data;
    const int32_t *rows = teacher.rows;
    REAL *loss = args->out[0].data, *kl = args->out[1].data;
    const int64_t T = teacher.T, C = teacher.C, Hi = in[Q_INDEX].shape.dims[1], Di = in[Q_INDEX].shape.dims[2];
    const int64_t block = cg_teacher_rows(teacher.H, C);
    const size_t piece = dense_piece(REAL_DTYPE, in[Q_INDEX].shape.dims, in[Q].shape.dims, C, false);
    if (!cg_rows_fit(args, rows, T, C) || !cg_sinks_fit(args, SINK)) return false;
    bool fine = true;
#pragma omp parallel for schedule(dynamic) reduction(&& : fine)
    for (int64_t t0 = 0; t0 < T; t0 += block) {
        const int64_t n_rows = T - t0 < block ? T - t0 : block;
        char *at = (char *)args->workspace + (size_t)cg_thread_slot() * piece;
        const SCRATCH scratch = KERNEL(teacher_take)(&at, &teacher);
        REAL *target = cg_take(&at, (size_t)(block * C) * sizeof(REAL));
        REAL *scores = cg_take(&at, (size_t)C * sizeof(REAL)), *e = cg_take(&at, (size_t)C * sizeof(REAL));
        LANES *lanes = (LANES *)at;
        cg_error error = {0};
        if (!KERNEL(teacher_block)(&teacher, &scratch, t0, n_rows, target, &error)) fine = false;
        for (int64_t r = 0; r < n_rows; r++) {
            const int64_t t = t0 + r, n = cg_row_seen(rows, t);
            kl[t] = 0;
            if (n == 0) continue;
            KERNEL(query_pack)(q_index + t * Hi * Di, Hi, Di, lanes);
            KERNEL(scores_of)
            (lanes, w + t * Hi, k_index + rows[t * CG_ROW_FIELDS + CG_ROW_COMPRESSED] * Di, Hi, Di, n, scores);
            REAL log_sum;
            if (KERNEL(log_softmax_parts)(scores, n, scores, e, &log_sum))
                kl[t] = KERNEL(kl_row)(target + r * C, scores, log_sum, n, e);
        }
    }
    if (!fine) return cg_fail(args->error, CG_FAILED, "a product of the teacher could not be run");
    double sum = 0;
    for (int64_t t = 0; t < T; t++) sum += (double)kl[t];
    loss[0] = (REAL)(attr->coeff / dense_divisor(attr, &in[ROWS]) * sum);
    return true;
}

static bool KERNEL(indexer_dense_loss_grad)(const cg_run_args *args) {
    const indexer_dense_loss_attr *attr = args->attr;
    const cg_tensor *in = args->in + 1;
    const TEACHER teacher = KERNEL(dense_teacher_of)(args, in);
    const REAL *dloss = args->in[0].data;
    const REAL *q_index = in[Q_INDEX].data, *w = in[W].data, *k_index = in[K_INDEX].data;
    const int32_t *rows = teacher.rows;
    REAL *dq = args->out[0].data, *dw = args->out[1].data, *dk = args->out[2].data;
    const int64_t T = teacher.T, C = teacher.C, Hi = in[Q_INDEX].shape.dims[1], Di = in[Q_INDEX].shape.dims[2];
    const int64_t block = cg_teacher_rows(teacher.H, C), groups = cg_ceil_div(Hi, CG_LANES);
    const size_t piece = dense_piece(REAL_DTYPE, in[Q_INDEX].shape.dims, in[Q].shape.dims, C, true);
    if (!cg_rows_fit(args, rows, T, C) || !cg_sinks_fit(args, 1 + SINK)) return false;
    const REAL factor = (REAL)((double)dloss[0] * attr->coeff / dense_divisor(attr, &in[ROWS]));
    char *pieces = args->workspace;
    REAL *parts = cg_take(&pieces, (size_t)(CG_KEY_PARTS * C * Di) * sizeof(REAL));
    bool fine = true;
#pragma omp parallel for schedule(dynamic) reduction(&& : fine)
    for (int64_t part = 0; part < CG_KEY_PARTS; part++) {
        char *at = pieces + (size_t)cg_thread_slot() * piece;
        const SCRATCH scratch = KERNEL(teacher_take)(&at, &teacher);
        REAL *target = cg_take(&at, (size_t)(block * C) * sizeof(REAL));
        REAL *scores = cg_take(&at, (size_t)C * sizeof(REAL)), *e = cg_take(&at, (size_t)C * sizeof(REAL));
        LANES *lanes = cg_take(&at, (size_t)(groups * Di) * sizeof(LANES));
        LANES *dw_lanes = cg_take(&at, (size_t)groups * sizeof(LANES));
        LANES *dots = cg_take(&at, cg_key_dots_bytes(Hi, sizeof(REAL)));
        REAL *dk_part = parts + part * C * Di;
        memset(dk_part, 0, (size_t)(C * Di) * sizeof(REAL));
        cg_error error = {0};
        /* blocks are dealt out in turn: later rows see more */
        for (int64_t t0 = part * block; t0 < T; t0 += CG_KEY_PARTS * block) {
            const int64_t n_rows = T - t0 < block ? T - t0 : block;
            if (!KERNEL(teacher_block)(&teacher, &scratch, t0, n_rows, target, &error)) fine = false;
            for (int64_t r = 0; r < n_rows; r++) {
                const int64_t t = t0 + r, n = cg_row_seen(rows, t);
                const int64_t first = rows[t * CG_ROW_FIELDS + CG_ROW_COMPRESSED];
                REAL log_sum;
                bool written = false;
                memset(dw_lanes, 0, (size_t)groups * sizeof(LANES));
                if (n > 0) {
                    KERNEL(query_pack)(q_index + t * Hi * Di, Hi, Di, lanes);
                    KERNEL(scores_of)(lanes, w + t * Hi, k_index + first * Di, Hi, Di, n, scores);
                    if ((written = KERNEL(log_softmax_parts)(scores, n, scores, e, &log_sum))) {
                        KERNEL(kl_dscores)(target + r * C, e, n, factor, scores);
                        KERNEL(key_grads)
                        (lanes, q_index + t * Hi * Di, w + t * Hi, k_index + first * Di, Hi, Di, n, scores,
                         dots, dq + t * Hi * Di, dw_lanes, dk_part + first * Di);
                    }
                }
                if (!written) memset(dq + t * Hi * Di, 0, (size_t)(Hi * Di) * sizeof(REAL));
                memcpy(dw + t * Hi, dw_lanes, (size_t)Hi * sizeof(REAL));
            }
        }
    }
    if (!fine) return cg_fail(args->error, CG_FAILED, "a product of the teacher could not be run");
    KERNEL(parts_sum)(parts, CG_KEY_PARTS, C * Di, dk);
    return true;
}

#endif
