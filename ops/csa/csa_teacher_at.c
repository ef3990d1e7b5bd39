/* The indexer's teacher over a given list of compressed rows, without the attention itself.
 *
 *   q [T, H, D]   ckv [C, D]   index [T, N] i32, -1 = none   window_lse [T, H] (full)   sink [H] (sink)
 *   -> teacher [T, N], sums to 1 over the row's list; 0 where index is -1
 *
 *   x[h,j] = scale * q[t,h] . ckv[index[t,j]],  teacher[j] = sum_h exp(x[h,j] - z[h]), divided once by its sum
 *   z[h] = log(E[h] + sum_j exp(x[h,j])),  E = exp(window_lse[t,h]) full, exp(sink[h]) sink, 0 compressed
 *
 * With index = visible_indices this is the teacher of the dense loss: its denominator holds all visible rows,
 * so the lse of the sparse attention cannot stand in for it. Heads are normalised after they are summed, not
 * before, and the sum is shifted by the row's largest share, so a list with a mass of 1e-80 gets an exact
 * target.
 *
 * Saved:     nothing: it is a constant
 * Recompute: same bits
 * Refuses:   shapes that do not fit; a window_lse or sink that the mode lacks or does not want; at run time an
 *            index outside -1..C-1, and a sink of +inf or NaN (-inf: no sink). There are no rows here to tell
 *            what a token sees: an index into another document passes. Who reads the list beside the rows
 *            refuses it (csa_attention, indexer_health), and lists of the ops that choose never hold one
 * Check:     f32 against f64, relative norm 1e-5
 * Source:    DeepSeek-V3.2 report, arXiv 2512.02556, section 2.1.1; denominators as Megatron-LM has them
 */
#ifndef REAL

#include "ops/attributes.h"
#include "ops/ops.h"
#include "ops/pairs.h"
#include "ops/csa/sinks.h"

enum { Q, CKV, INDEX, WINDOW_LSE, SINK };

static bool csa_teacher_at_infer(cg_infer *infer) {
    const csa_teacher_at_attr *attr = infer->attr;
    if (!cg_expect_real(infer, Q) || !cg_expect_dims(infer, Q, 3)) return false;
    const cg_dtype real = infer->in[Q]->dtype;
    const int64_t T = infer->in[Q]->shape.dims[0], H = infer->in[Q]->shape.dims[1],
                  D = infer->in[Q]->shape.dims[2];
    if (!cg_expect_dtype(infer, CKV, real) || !cg_expect_dims(infer, CKV, 2) ||
        !cg_expect_dim(infer, CKV, 1, D, "head size of q") || !cg_expect_dtype(infer, INDEX, CG_I32) ||
        !cg_expect_dims(infer, INDEX, 2) || !cg_expect_dim(infer, INDEX, 0, T, "rows of q"))
        return false;
    if (attr->teacher < CG_TEACHER_FULL || attr->teacher > CG_TEACHER_COMPRESSED)
        return cg_refuse(infer, "teacher is %d, expected full, sink or compressed", (int)attr->teacher);
    if (!(attr->scale - attr->scale == 0))
        return cg_refuse(infer, "scale is %g, expected a finite number", attr->scale);
    if (!infer->in[WINDOW_LSE] != (attr->teacher != CG_TEACHER_FULL))
        return cg_refuse(infer, "window_lse is %s, expected it with the full teacher and no other",
                         infer->in[WINDOW_LSE] ? "given" : "missing");
    if (!infer->in[SINK] != (attr->teacher != CG_TEACHER_SINK))
        return cg_refuse(infer, "sink is %s, expected it with the sink teacher and no other",
                         infer->in[SINK] ? "given" : "missing");
    if (infer->in[WINDOW_LSE] &&
        (!cg_expect_dtype(infer, WINDOW_LSE, real) || !cg_expect_dims(infer, WINDOW_LSE, 2) ||
         !cg_expect_dim(infer, WINDOW_LSE, 0, T, "rows of q") ||
         !cg_expect_dim(infer, WINDOW_LSE, 1, H, "heads of q")))
        return false;
    if (infer->in[SINK] && (!cg_expect_dtype(infer, SINK, real) || !cg_expect_dims(infer, SINK, 1) ||
                            !cg_expect_dim(infer, SINK, 0, H, "heads of q")))
        return false;
    cg_infer_out(infer, 0, real, infer->in[INDEX]->shape);
    return true;
}

static bool index_fits(const cg_run_args *args) {
    const int32_t *index = args->in[INDEX].data;
    const int64_t C = args->in[CKV].shape.dims[0], N = args->in[INDEX].shape.dims[1];
    const int64_t n = cg_shape_count(&args->in[INDEX].shape);
    int64_t bad = n;
#pragma omp parallel for schedule(static) reduction(min : bad) if (n > 65536)
    for (int64_t i = 0; i < n; i++)
        if (i < bad && (index[i] < -1 || index[i] >= C)) bad = i;
    return bad == n ||
           cg_fail(args->error, CG_BAD_INPUT, "index of row %lld, place %lld is %d, expected -1 to %lld",
                   (long long)(args->first_row + bad / N), (long long)(bad % N), index[bad], (long long)C - 1);
}

#define CG_KERNEL_FILE "ops/csa/csa_teacher_at.c"
#include "ops/kernel.h"

static size_t csa_teacher_at_workspace(const cg_node *node) {
    const int64_t H = cg_dim(node->in[Q], 1), D = cg_dim(node->in[Q], 2), N = cg_dim(node->in[INDEX], 1);
    size_t bytes =
        node->in[Q]->dtype == CG_F32 ? teacher_slot_bytes_f32(H, D, N) : teacher_slot_bytes_f64(H, D, N);
    return (size_t)cg_thread_slots() * bytes;
}

/* Per listed row and head: a product of D, and 6 for the shares. */
static cg_cost csa_teacher_at_cost(const cg_node *node) {
    double H = (double)cg_dim(node->in[Q], 1), D = (double)cg_dim(node->in[Q], 2);
    double pairs = cg_chosen_pairs((double)cg_dim(node->in[Q], 0), (double)cg_dim(node->in[CKV], 0),
                                   (double)cg_dim(node->in[INDEX], 1), cg_segments_of(node->in[INDEX]));
    return (cg_cost){.flops = pairs * H * (2 * D + 6), .bytes = cg_node_bytes(node)};
}

/* clang-format off */
#define REALS(...) { .shape = CG_DIMS(__VA_ARGS__) }
#define I32(data, ...) { .shape = CG_DIMS(__VA_ARGS__), .i32 = (data) }
#define ABSENT { .absent = true }
#define ATTR(teacher) .attr = &(csa_teacher_at_attr) { 0.6, teacher }

static const int32_t lists[] = {-1, -1, -1, 0, -1, -1, -1, 1, 0, 2, 2, 1, 3, -1, 3};
static const int32_t wrong_lists[] = {-1, -1, -1, 0, 4, -1};
static const double wrong_sinks[] = {0.5, INFINITY};
static const double distant[] = {300, 310, 320, 330, 340, 350, 360, 370, 380, 390};

static const cg_case csa_teacher_at_cases[] = {
    {.name = "full", .in = {REALS(5, 2, 3), REALS(4, 3), I32(lists, 5, 3), REALS(5, 2), ABSENT},
     ATTR(CG_TEACHER_FULL)},
    {.name = "sink", .in = {REALS(5, 2, 3), REALS(4, 3), I32(lists, 5, 3), ABSENT, REALS(2)},
     ATTR(CG_TEACHER_SINK)},
    {.name = "compressed", .in = {REALS(5, 2, 3), REALS(4, 3), I32(lists, 5, 3), ABSENT, ABSENT},
     ATTR(CG_TEACHER_COMPRESSED)},
    {.name = "mass below the range of f32", .in = {REALS(5, 2, 3), REALS(4, 3), I32(lists, 5, 3),
     {.shape = CG_DIMS(5, 2), .real = distant}, ABSENT}, ATTR(CG_TEACHER_FULL)},
    {.name = "one row, longer than C", .in = {REALS(1, 3, 5), REALS(4, 5), I32(lists, 1, 15), REALS(1, 3),
     ABSENT}, ATTR(CG_TEACHER_FULL)},
    {.name = "no place", .in = {REALS(2, 3, 5), REALS(4, 5), I32(lists, 2, 0), REALS(2, 3), ABSENT},
     ATTR(CG_TEACHER_FULL)},
    {.name = "no compressed row", .in = {REALS(1, 3, 5), REALS(0, 5), I32(lists, 1, 3), REALS(1, 3), ABSENT},
     ATTR(CG_TEACHER_FULL)},
    {.name = "no row", .in = {REALS(0, 3, 5), REALS(4, 5), I32(lists, 0, 3), REALS(0, 3), ABSENT},
     ATTR(CG_TEACHER_FULL)},
    {.name = "large", .in = {REALS(1, 19, 301), REALS(4, 301), I32(lists, 1, 15), REALS(1, 19), ABSENT},
     ATTR(CG_TEACHER_FULL), .large = true},
    {.name = "outside", .in = {REALS(2, 2, 3), REALS(4, 3), I32(wrong_lists, 2, 3), REALS(2, 2), ABSENT},
     ATTR(CG_TEACHER_FULL), .run_error = "index of row 1, place 1 is 4, expected -1 to 3"},
    {.name = "sink of all weight", .in = {REALS(5, 2, 3), REALS(4, 3), I32(lists, 5, 3), ABSENT,
     {.shape = CG_DIMS(2), .real = wrong_sinks}}, ATTR(CG_TEACHER_SINK),
     .run_error = "sink of head 1 is inf, expected a number or -inf"},
    {.name = "no mode", .in = {REALS(5, 2, 3), REALS(4, 3), I32(lists, 5, 3), ABSENT, ABSENT},
     ATTR(CG_TEACHER_NONE), .refuses = "teacher is 0"},
    {.name = "full without window_lse", .in = {REALS(5, 2, 3), REALS(4, 3), I32(lists, 5, 3), ABSENT, ABSENT},
     ATTR(CG_TEACHER_FULL), .refuses = "window_lse is missing"},
    {.name = "window_lse unasked", .in = {REALS(5, 2, 3), REALS(4, 3), I32(lists, 5, 3), REALS(5, 2), ABSENT},
     ATTR(CG_TEACHER_COMPRESSED), .refuses = "window_lse is given"},
    {.name = "sink without sink", .in = {REALS(5, 2, 3), REALS(4, 3), I32(lists, 5, 3), ABSENT, ABSENT},
     ATTR(CG_TEACHER_SINK), .refuses = "sink is missing"},
    {.name = "sink unasked", .in = {REALS(5, 2, 3), REALS(4, 3), I32(lists, 5, 3), ABSENT, REALS(2)},
     ATTR(CG_TEACHER_COMPRESSED), .refuses = "sink is given"},
    {.name = "ckv columns", .in = {REALS(5, 2, 3), REALS(4, 2), I32(lists, 5, 3), ABSENT, ABSENT},
     ATTR(CG_TEACHER_COMPRESSED), .refuses = "ckv has shape [4, 2]"},
    {.name = "index rows", .in = {REALS(5, 2, 3), REALS(4, 3), I32(lists, 4, 3), ABSENT, ABSENT},
     ATTR(CG_TEACHER_COMPRESSED), .refuses = "index has shape [4, 3]"},
    {.name = "window_lse heads", .in = {REALS(5, 2, 3), REALS(4, 3), I32(lists, 5, 3), REALS(5, 3), ABSENT},
     ATTR(CG_TEACHER_FULL), .refuses = "window_lse has shape [5, 3]"},
    {.name = "sink heads", .in = {REALS(5, 2, 3), REALS(4, 3), I32(lists, 5, 3), ABSENT, REALS(3)},
     ATTR(CG_TEACHER_SINK), .refuses = "sink has shape [3]"},
    {.name = "scale", .in = {REALS(5, 2, 3), REALS(4, 3), I32(lists, 5, 3), ABSENT, ABSENT},
     .attr = &(csa_teacher_at_attr){NAN, CG_TEACHER_COMPRESSED}, .refuses = "scale is"},
    {.name = "wrong dtype", .in = {{.shape = CG_DIMS(5, 2, 3), .wrong_dtype = true}, REALS(4, 3),
     I32(lists, 5, 3), ABSENT, ABSENT}, ATTR(CG_TEACHER_COMPRESSED), .refuses = "q is i32"},
    {.name = "wrong index dtype", .in = {REALS(5, 2, 3), REALS(4, 3), {.shape = CG_DIMS(5, 3), .i32 = lists,
     .wrong_dtype = true}, ABSENT, ABSENT}, ATTR(CG_TEACHER_COMPRESSED),
     .refuses = "index is f32, expected i32"},
};
/* clang-format on */

const cg_op cg_op_csa_teacher_at = {
    .name = "csa_teacher_at",
    .doc = "the indexer's teacher over a given list of compressed rows",
    .in = {"q", "ckv", "index", "window_lse", "sink"},
    .out = {"teacher"},
    .optional = CG_BIT(WINDOW_LSE) | CG_BIT(SINK),
    .attr_bytes = sizeof(csa_teacher_at_attr),
    .infer = csa_teacher_at_infer,
    .no_grad = "cannot: the teacher is a constant",
    .statistic_in = CG_BIT(WINDOW_LSE) | CG_BIT(SINK),
    .statistic_out = CG_BIT(0),
    .by_row = CG_BIT(Q) | CG_BIT(INDEX) | CG_BIT(WINDOW_LSE),
    .replay = CG_REPLAY_SAME_BITS,
    .cost = csa_teacher_at_cost,
    .workspace = csa_teacher_at_workspace,
    .run = CG_RUN(csa_teacher_at),
    CG_CASES(csa_teacher_at_cases),
};

cg_value *cg_csa_teacher_at(cg_graph *graph, cg_value *q, cg_value *ckv, cg_value *index, cg_value *window_lse,
                            cg_value *sink, double scale, cg_teacher teacher) {
    return cg_apply(graph, &cg_op_csa_teacher_at, &(csa_teacher_at_attr){scale, teacher},
                    (cg_value *[]){q, ckv, index, window_lse, sink}, 5);
}

#else

#include "ops/csa/csa_panel.h"

/* One thread's scratch. */
typedef struct KERNEL(teacher_scratch) {
    REAL *qt;                    /* [D, Hp] scale * q of the row, turned */
    REAL *x;                     /* [N, Hp] logits, then exponentials */
    const REAL **key, **qt_rows; /* [N], [D] */
    int64_t *place;              /* [N] the place in the list of each key */
    REAL *top, *sum;             /* [Hp] */
    double *share, *rest;        /* [H], [2 * H] */
} KERNEL(teacher_scratch);

static KERNEL(teacher_scratch) KERNEL(teacher_scratch_of)(panel_carver *from, int64_t H, int64_t D, int64_t N) {
    const int64_t Hp = panel_heads(H, sizeof(REAL));
    KERNEL(teacher_scratch) s = {0};
    s.qt = panel_carve(from, D * Hp, sizeof(REAL));
    s.x = panel_carve(from, N * Hp, sizeof(REAL));
    s.key = panel_carve(from, N, sizeof *s.key);
    s.qt_rows = panel_carve(from, D, sizeof *s.qt_rows);
    s.place = panel_carve(from, N, sizeof *s.place);
    s.top = panel_carve(from, Hp, sizeof(REAL));
    s.sum = panel_carve(from, Hp, sizeof(REAL));
    s.share = panel_carve(from, H, sizeof(double));
    s.rest = panel_carve(from, 2 * H, sizeof(double));
    return s;
}

static size_t KERNEL(teacher_slot_bytes)(int64_t H, int64_t D, int64_t N) {
    panel_carver count = {0};
    KERNEL(teacher_scratch_of)(&count, H, D, N);
    return count.used;
}

static bool KERNEL(csa_teacher_at)(const cg_run_args *args) {
    const csa_teacher_at_attr *attr = args->attr;
    const REAL *q = args->in[Q].data, *ckv = args->in[CKV].data, *window_lse = args->in[WINDOW_LSE].data;
    const REAL *sink = args->in[SINK].data;
    const int32_t *index = args->in[INDEX].data;
    REAL *teacher = args->out[0].data;
    const int64_t T = args->in[Q].shape.dims[0], H = args->in[Q].shape.dims[1], D = args->in[Q].shape.dims[2];
    const int64_t N = args->in[INDEX].shape.dims[1];
    if (!index_fits(args) || !cg_sinks_fit(args, SINK)) return false;
#pragma omp parallel if (T * H * (D + N) > 4096)
    {
        const KERNEL(panel_columns) columns = KERNEL(panel_columns_of)(H);
        const int64_t Hp = columns.heads;
        panel_carver slot = {
            (char *)args->workspace + (size_t)cg_thread_slot() * KERNEL(teacher_slot_bytes)(H, D, N), 0};
        const KERNEL(teacher_scratch) s = KERNEL(teacher_scratch_of)(&slot, H, D, N);
        memset(s.qt, 0, (size_t)(D * Hp) * sizeof(REAL));
        for (int64_t d = 0; d < D; d++) s.qt_rows[d] = s.qt + d * Hp;
#pragma omp for schedule(dynamic, 8)
        for (int64_t t = 0; t < T; t++) {
            int64_t n = 0;
            for (int64_t j = 0; j < N; j++) {
                teacher[t * N + j] = 0;
                if (index[t * N + j] < 0) continue;
                s.place[n] = j;
                s.key[n++] = ckv + index[t * N + j] * D;
            }
            if (n == 0) continue;
            KERNEL(panel_transpose)(H, D, Hp, (REAL)attr->scale, q + t * H * D, s.qt);
            const KERNEL(panel_product) product = {
                .m = n, .n = Hp, .k = D, .a_rows = s.key, .a_k = 1, .b_rows = s.qt_rows, .c = s.x, .ldc = Hp};
            KERNEL(panel_multiply)(&product);
            for (int64_t h = 0; h < Hp; h++) s.top[h] = (REAL)-INFINITY;
            columns.max(n, Hp, s.x, s.top);
            columns.shift(n, Hp, s.x, s.top);
            VEC(exp)(n * Hp, s.x, s.x);
            columns.sum(n, Hp, s.x, s.sum);
            for (int64_t h = 0; h < H; h++)
                s.rest[h] = window_lse ? window_lse[t * H + h] : sink ? sink[h] : -INFINITY;
            KERNEL(panel_shares)(H, s.top, s.sum, s.rest, s.share);
            KERNEL(panel_teach)(H, n, Hp, s.x, s.share, s.top, s.place, teacher + t * N);
        }
    }
    return true;
}

#endif
