/* Sparse attention: one softmax per head over the window, the chosen compressed rows and a sink.
 *
 *   q [T, H, D]   kv [T, D]   ckv [C, D]   sink [H]   topk [T, K] i32, -1 = none, at any place
 *   rows [T, CG_ROW_FIELDS] i32
 *   -> out [T, H, D]   lse [T, H]   window_lse [T, H]   teacher [T, K]
 *
 *   x[h,j] = scale * q[t,h] . key[j],  keys j: kv rows max(start, t-W+1) .. t, then ckv rows topk[t,:]
 *   lse[h] = log(exp(sink[h]) + sum_j exp(x[h,j])),  window_lse[h]: the same without the chosen rows
 *   out[h] = sum_j exp(x[h,j] - lse[h]) key[j];  a key is its own value, the sink has none
 *   teacher[j] = sum_h exp(x[h,j] - z[h]) over the chosen rows, divided once by its sum;
 *     z = lse (full), or log of sink and chosen (sink), or of the chosen alone (compressed)
 *
 * The teacher is the indexer's target: a constant, as lse and window_lse are. Every x is shifted by its head's
 * largest one and every head by the row's largest log-share, so that chosen rows with a mass of 1e-80 still get
 * an exact target; it costs no second product, as the exponentials are there anyway. A row that lies in the
 * window and in a chosen row counts twice, and so does a repeated index. A row that sees nothing has out 0 and
 * lse = sink, -inf too.
 *
 * Backward, g = dout[t,h], p[j] = exp(x[j] - lse), s = sum_j p[j] g.key[j]:
 *   dx[j] = p[j] (g.key[j] - s),  dq = scale sum_j dx[j] key[j],  dsink -= exp(sink - lse) s,
 *   dkey[j] += p[j] g + scale dx[j] q   (value and key: both roles of a row)
 * A row with g = 0 is passed over, so that nothing it sees (padding may hold anything) comes in. Rows are cut
 * into at most 16 runs, by T alone. A run owns its rows of dkv; what its windows add to rows before it, and all
 * it adds to dckv and dsink, are partial sums in the workspace, added in order of the runs.
 *
 * Saved:     q kv ckv sink topk rows lse   (4*(T*H*D + T*D + C*D + H + T*K + 5*T + T*H) bytes in f32). Not out:
 *            s is summed from p and g.key, which backward needs anyway.
 * Recompute: same bits
 * Refuses:   shapes that do not fit, a teacher without chosen rows; at run time a chosen row that the token
 *            does not see, facts of rows that do not fit T and C, and a sink of +inf or NaN (-inf: no sink)
 * Check:     f32 against f64, relative norm 1e-5: D products and N exponentials summed in f32, heads' sums in
 *            f64
 * Source:    DeepSeek-V4 report, arXiv 2606.19348, section 2.3 and equation 27; the teacher as Megatron-LM has
 *            it
 */
#ifndef REAL

#include "ops/attributes.h"
#include "ops/ops.h"
#include "ops/pairs.h"
#include "ops/csa/sinks.h"

enum { Q, KV, CKV, SINK, TOPK, ROWS, LSE, DOUT }; /* inputs, the last two of the gradient */
enum { RUNS = 16, RUN_ROWS = 16 };                /* at most, at least */
enum { COPY_BYTES = 1024 }; /* from this size of a key on, its copies are faster than it */

static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

/* ---- shapes ---- */

static bool csa_attention_expect(cg_infer *infer) {
    const csa_attention_attr *attr = infer->attr;
    if (!cg_expect_real(infer, Q) || !cg_expect_dims(infer, Q, 3)) return false;
    const cg_dtype real = infer->in[Q]->dtype;
    const int64_t T = infer->in[Q]->shape.dims[0], H = infer->in[Q]->shape.dims[1],
                  D = infer->in[Q]->shape.dims[2];
    if (!cg_expect_dtype(infer, KV, real) || !cg_expect_dims(infer, KV, 2) ||
        !cg_expect_dim(infer, KV, 0, T, "rows of q") || !cg_expect_dim(infer, KV, 1, D, "head size of q") ||
        !cg_expect_dtype(infer, SINK, real) || !cg_expect_dims(infer, SINK, 1) ||
        !cg_expect_dim(infer, SINK, 0, H, "heads of q") || !cg_expect_dtype(infer, ROWS, CG_I32) ||
        !cg_expect_dims(infer, ROWS, 2) || !cg_expect_dim(infer, ROWS, 0, T, "rows of q") ||
        !cg_expect_dim(infer, ROWS, 1, CG_ROW_FIELDS, "fields of a row"))
        return false;
    if (!infer->in[CKV] != !infer->in[TOPK])
        return cg_refuse(infer, "%s is missing, expected both ckv and topk, or neither",
                         infer->in[CKV] ? "topk" : "ckv");
    if (infer->in[CKV] &&
        (!cg_expect_dtype(infer, CKV, real) || !cg_expect_dims(infer, CKV, 2) ||
         !cg_expect_dim(infer, CKV, 1, D, "head size of q") || !cg_expect_dtype(infer, TOPK, CG_I32) ||
         !cg_expect_dims(infer, TOPK, 2) || !cg_expect_dim(infer, TOPK, 0, T, "rows of q")))
        return false;
    if (attr->window < 0)
        return cg_refuse(infer, "window is %lld, expected 0 or more", (long long)attr->window);
    if (!(attr->scale - attr->scale == 0))
        return cg_refuse(infer, "scale is %g, expected a finite number", attr->scale);
    return true;
}

static bool csa_attention_infer(cg_infer *infer) {
    if (!csa_attention_expect(infer)) return false;
    const csa_attention_attr *attr = infer->attr;
    if (attr->teacher != CG_TEACHER_NONE && !infer->in[TOPK])
        return cg_refuse(infer, "topk is missing, expected the rows that the teacher is wanted for");
    if (attr->teacher < CG_TEACHER_NONE || attr->teacher > CG_TEACHER_COMPRESSED)
        return cg_refuse(infer, "teacher is %d, expected one of cg_teacher", (int)attr->teacher);
    const cg_value *q = infer->in[Q];
    const int64_t T = q->shape.dims[0], H = q->shape.dims[1];
    cg_infer_out(infer, 0, q->dtype, q->shape);
    cg_infer_out(infer, 1, q->dtype, CG_SHAPE(T, H));
    cg_infer_out(infer, 2, q->dtype, CG_SHAPE(T, H));
    if (attr->teacher != CG_TEACHER_NONE)
        cg_infer_out(infer, 3, q->dtype, CG_SHAPE(T, infer->in[TOPK]->shape.dims[1]));
    else
        infer->n_out = 3;
    return true;
}

static bool csa_attention_grad_infer(cg_infer *infer) {
    if (!csa_attention_expect(infer)) return false;
    const cg_value *q = infer->in[Q];
    if (!cg_expect_dtype(infer, LSE, q->dtype) || !cg_expect_dims(infer, LSE, 2) ||
        !cg_expect_dim(infer, LSE, 0, q->shape.dims[0], "rows of q") ||
        !cg_expect_dim(infer, LSE, 1, q->shape.dims[1], "heads of q") || !cg_expect_same(infer, DOUT, Q))
        return false;
    const int source[4] = {Q, KV, SINK, CKV};
    infer->n_out = infer->in[CKV] ? 4 : 3;
    for (int s = 0; s < infer->n_out; s++) cg_infer_out(infer, s, q->dtype, infer->in[source[s]]->shape);
    return true;
}

/* ---- the rows ---- */

/* What a call works on. */
typedef struct attention_sizes {
    int64_t T, H, D, C, K, W;
    int64_t first, kv_rows; /* number, among all kv rows, of the first of the T rows */
    const int32_t *rows, *topk;
    double scale;
} attention_sizes;

static attention_sizes sizes_of(const cg_run_args *args) {
    const csa_attention_attr *attr = args->attr;
    const cg_tensor *in = args->in;
    return (attention_sizes){.T = in[Q].shape.dims[0],
                             .H = in[Q].shape.dims[1],
                             .D = in[Q].shape.dims[2],
                             .C = in[CKV].data ? in[CKV].shape.dims[0] : 0,
                             .K = in[TOPK].data ? in[TOPK].shape.dims[1] : 0,
                             .W = attr->window,
                             .first = args->first_row,
                             .kv_rows = in[KV].shape.dims[0],
                             .rows = in[ROWS].data,
                             .topk = in[TOPK].data,
                             .scale = attr->scale};
}

/* Do the facts of row t lie inside the tensors? */
static bool facts_fit(const attention_sizes *z, int64_t t) {
    const int32_t *row = z->rows + t * CG_ROW_FIELDS;
    int64_t position = row[CG_ROW_POSITION], first = row[CG_ROW_COMPRESSED], visible = row[CG_ROW_VISIBLE];
    if (position != -1 &&
        (position < 0 || row[CG_ROW_START] < 0 || row[CG_ROW_START] + position != z->first + t))
        return false;
    return visible == 0 || !z->topk || (visible > 0 && first >= 0 && first + visible <= z->C);
}

static bool chosen_fits(const int32_t *row, int64_t j) {
    return j == -1 || (j >= row[CG_ROW_COMPRESSED] && j - row[CG_ROW_COMPRESSED] < row[CG_ROW_VISIBLE]);
}

static bool row_fits(const attention_sizes *z, int64_t t) {
    if (!facts_fit(z, t)) return false;
    const int32_t *row = z->rows + t * CG_ROW_FIELDS, *chosen = z->topk + t * z->K;
    bool fits = true;
    for (int64_t k = 0; k < z->K; k++) fits &= chosen_fits(row, chosen[k]);
    return fits;
}

/* All indices, before one is used, then the sinks; the first bad row is named. */
static bool data_fit(const cg_run_args *args) {
    const attention_sizes z = sizes_of(args);
    int64_t bad = z.T;
#pragma omp parallel for schedule(static) reduction(min : bad) if (z.T * (z.K + 8) > 65536)
    for (int64_t t = 0; t < z.T; t++)
        if (t < bad && !row_fits(&z, t)) bad = t;
    if (bad == z.T) return cg_sinks_fit(args, SINK);
    const int32_t *row = z.rows + bad * CG_ROW_FIELDS;
    if (!facts_fit(&z, bad))
        return cg_fail(
            args->error, CG_BAD_INPUT,
            "row %lld: start %d, position %d, %d compressed rows visible from %d on do not fit %lld rows "
            "and %lld compressed ones",
            (long long)(z.first + bad), row[CG_ROW_START], row[CG_ROW_POSITION], row[CG_ROW_VISIBLE],
            row[CG_ROW_COMPRESSED], (long long)z.kv_rows, (long long)z.C);
    int64_t k = 0;
    while (chosen_fits(row, z.topk[bad * z.K + k])) k++;
    return cg_fail(
        args->error, CG_BAD_INPUT,
        "topk of row %lld, place %lld is %d, expected -1 or one of the %d compressed rows it sees, from %d on",
        (long long)(z.first + bad), (long long)k, z.topk[bad * z.K + k], row[CG_ROW_VISIBLE],
        row[CG_ROW_COMPRESSED]);
}

/* The runs of rows that backward sums apart. */
typedef struct attention_runs {
    int64_t rows, count; /* rows of a run, runs */
    int64_t halo;        /* rows before a run that its windows reach */
} attention_runs;

static attention_runs runs_of(const attention_sizes *z) {
    attention_runs runs = {.rows = max64((z->T + RUNS - 1) / RUNS, RUN_ROWS),
                           .halo = min64(max64(z->W - 1, 0), z->kv_rows)};
    runs.count = (z->T + runs.rows - 1) / runs.rows;
    return runs;
}

#define CG_KERNEL_FILE "ops/csa/csa_attention.c"
#include "ops/kernel.h"

static size_t workspace_bytes(const cg_node *node, bool backward) {
    const csa_attention_attr *attr = node->attr;
    const cg_shape *q = &node->in[Q]->shape;
    attention_sizes z = {.T = q->dims[0],
                         .H = q->dims[1],
                         .D = q->dims[2],
                         .C = cg_dim(node->in[CKV], 0),
                         .K = cg_dim(node->in[TOPK], 1),
                         .W = attr->window,
                         .kv_rows = cg_dim(node->in[KV], 0)};
    bool is_f32 = node->in[Q]->dtype == CG_F32;
    panel_carver slot = {0}, all = {0};
    if (is_f32)
        attention_scratch_of_f32(&slot, &z, backward);
    else
        attention_scratch_of_f64(&slot, &z, backward);
    panel_carve(&all, cg_thread_slots(), slot.used);
    if (backward) {
        if (is_f32)
            attention_partials_of_f32(&all, &z);
        else
            attention_partials_of_f64(&all, &z);
    }
    return all.used;
}

static size_t csa_attention_workspace(const cg_node *node) { return workspace_bytes(node, false); }
static size_t csa_attention_grad_workspace(const cg_node *node) { return workspace_bytes(node, true); }

/* Keys of all rows, windows and chosen ones together. */
static double keys_of(const cg_node *node) {
    double T = (double)cg_dim(node->in[Q], 0), W = (double)((const csa_attention_attr *)node->attr)->window;
    double K = node->in[TOPK] ? (double)cg_dim(node->in[TOPK], 1) : 0;
    const double n_segments = cg_segments_of(node->in[ROWS]);
    return cg_window_pairs(T, W, n_segments) +
           cg_chosen_pairs(T, (double)cg_dim(node->in[CKV], 0), K, n_segments);
}

/* Per key and head: two products of D, and 5 for the softmax. */
static cg_cost csa_attention_cost(const cg_node *node) {
    double H = (double)cg_dim(node->in[Q], 1), D = (double)cg_dim(node->in[Q], 2);
    return (cg_cost){.flops = keys_of(node) * H * (4 * D + 5), .bytes = cg_node_bytes(node)};
}

static cg_cost csa_attention_grad_cost(const cg_node *node) {
    double H = (double)cg_dim(node->in[Q], 1), D = (double)cg_dim(node->in[Q], 2);
    return (cg_cost){.flops = keys_of(node) * H * (10 * D + 7), .bytes = cg_node_bytes(node)};
}

extern const cg_op cg_op_csa_attention_grad;

static void csa_attention_build_grad(cg_graph *graph, const cg_node *node, cg_value *const *dout,
                                     cg_value **din) {
    cg_value *in[DOUT + 1];
    for (int i = 0; i <= ROWS; i++) in[i] = node->in[i];
    in[LSE] = node->out[1];
    in[DOUT] = dout[0];
    din[Q] = cg_apply(graph, &cg_op_csa_attention_grad, node->attr, in, DOUT + 1);
    din[KV] = cg_output(din[Q], 1);
    din[SINK] = cg_output(din[Q], 2);
    if (node->in[CKV]) din[CKV] = cg_output(din[Q], 3);
}

/* ---- cases ---- */

/* clang-format off */
#define REALS(...) { .shape = CG_DIMS(__VA_ARGS__) }
#define I32(data, ...) { .shape = CG_DIMS(__VA_ARGS__), .i32 = (data) }
#define ABSENT { .absent = true }
#define ATTR(window, scale, teacher) .attr = &(csa_attention_attr) { window, scale, teacher }
#define SAVED "q kv ckv sink topk rows lse"

/* Two segments of 4 and 3 rows at ratio 2, the second ending with a row of padding, then a row behind the last. */
static const int32_t two_segments[] = {0, 0, 0, 0, 1, 0, 1, 0, 1, 1, 0, 2, 0, 1, 1, 0, 3,  0, 2, 1,
                                       4, 0, 2, 0, 1, 4, 1, 2, 1, 1, 4, 2, 2, 0, 0, 7, -1, 3, 0, 0};
static const int32_t two_segments_topk[] = {-1, -1, -1, 0,  -1, -1, -1, 0,  0,  1,  -1, 1,
                                            -1, -1, -1, -1, 2,  -1, -1, -1, -1, -1, -1, -1};
static const int32_t two_segments_wrong[] = {-1, -1, -1, 0,  -1, -1, -1, 0,  0,  1,  -1, 1,
                                             -1, -1, -1, -1, 1,  -1, -1, -1, -1, -1, -1, -1};
static const int32_t two_segments_early[] = {-1, -1, -1, 0,  -1, -1, -1, 0,  1,  1,  -1, 1,
                                             -1, -1, -1, -1, 2,  -1, -1, -1, -1, -1, -1, -1};
static const int32_t none[24] = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
                                 -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
static const int32_t one_row[] = {0, 0, 0, 1, 1};
static const int32_t one_row_topk[] = {-1, 0, -1, 0};
static const int32_t blind_rows[] = {0, 0, 0, 0, 1, 0, 1, 0, 0, 1};
static const int32_t bad_facts[] = {0, 0, 0, 0, 1, 0, 2, 0, 1, 1};
static const int32_t bad_visible[] = {0, 0, 0, 0, 1, 0, 1, 0, 2, 1};
static const double sinks[] = {-INFINITY, 0.5}, wrong_sinks[] = {0.5, INFINITY}, nan_sinks[] = {0.5, NAN};

#define SEGMENTS REALS(8, 2, 3), REALS(8, 3), REALS(3, 3), REALS(2), I32(two_segments_topk, 8, 3), I32(two_segments, 8, 5)

/* A long case made by the compiler: 331 rows of one segment at ratio 4, five places with one of them empty. */
#define FACTS(t) 0, (t), 0, ((t) + 1) / 4, 1
#define CHOSEN(t)                                                                                              \
    ((t) < 3 ? -1 : (t) * 7 % (((t) + 1) / 4)), ((t) < 11 ? -1 : (t) * 5 % (((t) + 1) / 4)), -1,               \
        ((t) < 7 ? -1 : 0), ((t) < 3 ? -1 : ((t) + 1) / 4 - 1)
#define TEN(f, t) f(t), f(t + 1), f(t + 2), f(t + 3), f(t + 4), f(t + 5), f(t + 6), f(t + 7), f(t + 8), f(t + 9)
#define HUNDRED(f, t)                                                                                          \
    TEN(f, t), TEN(f, t + 10), TEN(f, t + 20), TEN(f, t + 30), TEN(f, t + 40), TEN(f, t + 50), TEN(f, t + 60), \
        TEN(f, t + 70), TEN(f, t + 80), TEN(f, t + 90)
static const int32_t long_rows[] = {HUNDRED(FACTS, 0), HUNDRED(FACTS, 100), HUNDRED(FACTS, 200),
                                    TEN(FACTS, 300),   TEN(FACTS, 310),     TEN(FACTS, 320),
                                    FACTS(330)};
static const int32_t long_topk[] = {HUNDRED(CHOSEN, 0), HUNDRED(CHOSEN, 100), HUNDRED(CHOSEN, 200),
                                    TEN(CHOSEN, 300),   TEN(CHOSEN, 310),     TEN(CHOSEN, 320),
                                    CHOSEN(330)};

static const cg_case csa_attention_cases[] = {
    {.name = "two segments, padding, a row behind", .in = {SEGMENTS}, ATTR(2, 0.7, CG_TEACHER_FULL),
     .crosses = SAVED},
    {.name = "teacher with the sink", .in = {SEGMENTS}, ATTR(3, 0.7, CG_TEACHER_SINK), .crosses = SAVED},
    {.name = "teacher alone", .in = {SEGMENTS}, ATTR(1, 0.7, CG_TEACHER_COMPRESSED), .crosses = SAVED},
    {.name = "no window", .in = {SEGMENTS}, ATTR(0, 0.7, CG_TEACHER_FULL), .crosses = SAVED},
    {.name = "window only", .in = {REALS(8, 2, 3), REALS(8, 3), ABSENT, REALS(2), ABSENT,
     I32(two_segments, 8, 5)}, ATTR(20, 0.7, CG_TEACHER_NONE), .crosses = "q kv sink rows lse"},
    {.name = "sink of no weight", .in = {REALS(8, 2, 3), REALS(8, 3), REALS(3, 3), {.shape = CG_DIMS(2),
     .real = sinks, .constant = true}, I32(two_segments_topk, 8, 3), I32(two_segments, 8, 5)},
     ATTR(2, 0.7, CG_TEACHER_FULL), .crosses = SAVED},
    {.name = "all absent", .in = {REALS(8, 2, 3), REALS(8, 3), REALS(3, 3), REALS(2), I32(none, 8, 3),
     I32(two_segments, 8, 5)}, ATTR(2, 0.7, CG_TEACHER_FULL), .crosses = SAVED},
    {.name = "one row, K above C", .in = {REALS(1, 3, 5), REALS(1, 5), REALS(1, 5), REALS(3),
     I32(one_row_topk, 1, 4), I32(one_row, 1, 5)}, ATTR(4, 0.5, CG_TEACHER_FULL), .crosses = SAVED},
    {.name = "no compressed row", .in = {REALS(2, 1, 2), REALS(2, 2), REALS(0, 2), REALS(1), I32(none, 2, 3),
     I32(blind_rows, 2, 5)}, ATTR(2, 0.5, CG_TEACHER_FULL), .crosses = SAVED},
    {.name = "no place", .in = {REALS(2, 1, 2), REALS(2, 2), REALS(2, 2), REALS(1), I32(none, 2, 0),
     I32(two_segments, 2, 5)}, ATTR(2, 0.5, CG_TEACHER_FULL), .crosses = SAVED},
    {.name = "no row", .in = {REALS(0, 2, 3), REALS(0, 3), REALS(3, 3), REALS(2), I32(none, 0, 3),
     I32(none, 0, 5)}, ATTR(2, 0.5, CG_TEACHER_FULL), .crosses = SAVED},
    {.name = "wide heads", .in = {REALS(4, 17, 1), REALS(4, 1), REALS(2, 1), REALS(17),
     I32(two_segments_topk, 4, 3), I32(two_segments, 4, 5)}, ATTR(2, 0.5, CG_TEACHER_NONE), .crosses = SAVED},
    {.name = "large", .in = {REALS(331, 5, 71), REALS(331, 71), REALS(82, 71), REALS(5),
     I32(long_topk, 331, 5), I32(long_rows, 331, 5)}, ATTR(37, 0.12, CG_TEACHER_FULL), .crosses = SAVED,
     .large = true},
    {.name = "large, keys copied", .in = {REALS(33, 18, 264), REALS(33, 264), REALS(8, 264), REALS(18),
     I32(long_topk, 33, 5), I32(long_rows, 33, 5)}, ATTR(18, 0.06, CG_TEACHER_FULL), .crosses = SAVED,
     .large = true},
    {.name = "kv rows", .in = {REALS(4, 2, 3), REALS(5, 3), ABSENT, REALS(2), ABSENT, I32(two_segments, 4, 5)},
     ATTR(2, 1, CG_TEACHER_NONE), .refuses = "kv has shape [5, 3], expected 4 in dimension 0 (rows of q)"},
    {.name = "kv columns", .in = {REALS(4, 2, 3), REALS(4, 2), ABSENT, REALS(2), ABSENT,
     I32(two_segments, 4, 5)}, ATTR(2, 1, CG_TEACHER_NONE),
     .refuses = "kv has shape [4, 2], expected 3 in dimension 1 (head size of q)"},
    {.name = "ckv columns", .in = {REALS(4, 2, 3), REALS(4, 3), REALS(2, 2), REALS(2), I32(none, 4, 2),
     I32(two_segments, 4, 5)}, ATTR(2, 1, CG_TEACHER_NONE), .refuses = "ckv has shape [2, 2]"},
    {.name = "sink heads", .in = {REALS(4, 2, 3), REALS(4, 3), ABSENT, REALS(3), ABSENT,
     I32(two_segments, 4, 5)}, ATTR(2, 1, CG_TEACHER_NONE), .refuses = "sink has shape [3], expected 2"},
    {.name = "topk rows", .in = {REALS(4, 2, 3), REALS(4, 3), REALS(2, 3), REALS(2), I32(none, 3, 2),
     I32(two_segments, 4, 5)}, ATTR(2, 1, CG_TEACHER_NONE), .refuses = "topk has shape [3, 2]"},
    {.name = "row fields", .in = {REALS(4, 2, 3), REALS(4, 3), ABSENT, REALS(2), ABSENT,
     I32(two_segments, 4, 4)}, ATTR(2, 1, CG_TEACHER_NONE), .refuses = "fields of a row"},
    {.name = "topk alone", .in = {REALS(4, 2, 3), REALS(4, 3), ABSENT, REALS(2), I32(none, 4, 2),
     I32(two_segments, 4, 5)}, ATTR(2, 1, CG_TEACHER_NONE), .refuses = "ckv is missing, expected both"},
    {.name = "ckv alone", .in = {REALS(4, 2, 3), REALS(4, 3), REALS(2, 3), REALS(2), ABSENT,
     I32(two_segments, 4, 5)}, ATTR(2, 1, CG_TEACHER_NONE), .refuses = "topk is missing, expected both"},
    {.name = "teacher of nothing", .in = {REALS(4, 2, 3), REALS(4, 3), ABSENT, REALS(2), ABSENT,
     I32(two_segments, 4, 5)}, ATTR(2, 1, CG_TEACHER_FULL), .refuses = "the teacher is wanted for"},
    {.name = "unknown teacher", .in = {REALS(4, 2, 3), REALS(4, 3), REALS(2, 3), REALS(2), I32(none, 4, 2),
     I32(two_segments, 4, 5)}, ATTR(2, 1, (cg_teacher)9), .refuses = "teacher is 9"},
    {.name = "window", .in = {REALS(4, 2, 3), REALS(4, 3), ABSENT, REALS(2), ABSENT, I32(two_segments, 4, 5)},
     ATTR(-1, 1, CG_TEACHER_NONE), .refuses = "window is -1"},
    {.name = "scale", .in = {REALS(4, 2, 3), REALS(4, 3), ABSENT, REALS(2), ABSENT, I32(two_segments, 4, 5)},
     ATTR(2, INFINITY, CG_TEACHER_NONE), .refuses = "scale is inf"},
    {.name = "wrong dtype", .in = {{.shape = CG_DIMS(4, 2, 3), .wrong_dtype = true}, REALS(4, 3), ABSENT,
     REALS(2), ABSENT, I32(two_segments, 4, 5)}, ATTR(2, 1, CG_TEACHER_NONE), .refuses = "q is i32"},
    {.name = "wrong topk dtype", .in = {REALS(4, 2, 3), REALS(4, 3), REALS(2, 3), REALS(2),
     {.shape = CG_DIMS(4, 2), .i32 = none, .wrong_dtype = true}, I32(two_segments, 4, 5)},
     ATTR(2, 1, CG_TEACHER_NONE), .refuses = "topk is f32, expected i32"},
    {.name = "another segment's row", .in = {REALS(8, 2, 3), REALS(8, 3), REALS(3, 3), REALS(2),
     I32(two_segments_wrong, 8, 3), I32(two_segments, 8, 5)}, ATTR(2, 1, CG_TEACHER_NONE),
     .run_error = "topk of row 5, place 1 is 1, expected -1 or one of the 1 compressed rows it sees, from 2 on"},
    {.name = "a row that comes later", .in = {REALS(8, 2, 3), REALS(8, 3), REALS(3, 3), REALS(2),
     I32(two_segments_early, 8, 3), I32(two_segments, 8, 5)}, ATTR(2, 1, CG_TEACHER_NONE),
     .run_error = "topk of row 2, place 2 is 1, expected -1 or one of the 1 compressed rows it sees, from 0 on"},
    {.name = "position", .in = {REALS(2, 2, 3), REALS(2, 3), ABSENT, REALS(2), ABSENT, I32(bad_facts, 2, 5)},
     ATTR(2, 1, CG_TEACHER_NONE), .run_error = "row 1: start 0, position 2"},
    {.name = "more visible than there are", .in = {REALS(2, 2, 3), REALS(2, 3), REALS(1, 3), REALS(2),
     I32(none, 2, 2), I32(bad_visible, 2, 5)}, ATTR(2, 1, CG_TEACHER_NONE),
     .run_error = "row 1: start 0, position 1, 2 compressed rows"},
    {.name = "sink of all weight", .in = {REALS(4, 2, 3), REALS(4, 3), ABSENT, {.shape = CG_DIMS(2),
     .real = wrong_sinks}, ABSENT, I32(two_segments, 4, 5)}, ATTR(2, 1, CG_TEACHER_NONE),
     .run_error = "sink of head 1 is inf, expected a number or -inf"},
    {.name = "sink is NaN", .in = {REALS(4, 2, 3), REALS(4, 3), ABSENT, {.shape = CG_DIMS(2),
     .real = nan_sinks}, ABSENT, I32(two_segments, 4, 5)}, ATTR(2, 1, CG_TEACHER_NONE),
     .run_error = "sink of head 1 is NaN"},
};

#define BACK REALS(8, 2), REALS(8, 2, 3)

static const cg_case csa_attention_grad_cases[] = {
    {.name = "two segments, padding, a row behind", .in = {SEGMENTS, {.shape = CG_DIMS(8, 2), .offset = 3},
     REALS(8, 2, 3)}, ATTR(2, 0.7, CG_TEACHER_FULL)},
    {.name = "window only", .in = {REALS(8, 2, 3), REALS(8, 3), ABSENT, REALS(2), ABSENT,
     I32(two_segments, 8, 5), {.shape = CG_DIMS(8, 2), .offset = 3}, REALS(8, 2, 3)},
     ATTR(20, 0.7, CG_TEACHER_NONE)},
    {.name = "no row", .in = {REALS(0, 2, 3), REALS(0, 3), REALS(3, 3), REALS(2), I32(none, 0, 3),
     I32(none, 0, 5), REALS(0, 2), REALS(0, 2, 3)}, ATTR(2, 0.5, CG_TEACHER_FULL)},
    {.name = "large", .in = {REALS(331, 5, 71), REALS(331, 71), REALS(82, 71), REALS(5),
     I32(long_topk, 331, 5), I32(long_rows, 331, 5), {.shape = CG_DIMS(331, 5), .offset = 5},
     REALS(331, 5, 71)}, ATTR(37, 0.12, CG_TEACHER_FULL), .large = true},
    {.name = "lse heads", .in = {SEGMENTS, REALS(8, 3), REALS(8, 2, 3)}, ATTR(2, 0.7, CG_TEACHER_FULL),
     .refuses = "lse has shape [8, 3]"},
    {.name = "dout shape", .in = {SEGMENTS, REALS(8, 2), REALS(8, 2, 2)}, ATTR(2, 0.7, CG_TEACHER_FULL),
     .refuses = "dout has shape [8, 2, 2]"},
    {.name = "wrong dtype", .in = {SEGMENTS, REALS(8, 2), {.shape = CG_DIMS(8, 2, 3), .wrong_dtype = true}},
     ATTR(2, 0.7, CG_TEACHER_FULL), .refuses = "dout is i32"},
    {.name = "another segment's row", .in = {REALS(8, 2, 3), REALS(8, 3), REALS(3, 3), REALS(2),
     I32(two_segments_wrong, 8, 3), I32(two_segments, 8, 5), BACK}, ATTR(2, 1, CG_TEACHER_NONE),
     .run_error = "topk of row 5, place 1 is 1"},
    {.name = "sink of all weight", .in = {REALS(8, 2, 3), REALS(8, 3), ABSENT, {.shape = CG_DIMS(2),
     .real = wrong_sinks}, ABSENT, I32(two_segments, 8, 5), BACK}, ATTR(2, 1, CG_TEACHER_NONE),
     .run_error = "sink of head 1 is inf"},
};
/* clang-format on */

const cg_op cg_op_csa_attention = {
    .name = "csa_attention",
    .doc = "one softmax over window, chosen compressed rows and sink",
    .in = {"q", "kv", "ckv", "sink", "topk", "rows"},
    .out = {"out", "lse", "window_lse", "teacher"},
    .optional = CG_BIT(CKV) | CG_BIT(TOPK),
    .attr_bytes = sizeof(csa_attention_attr),
    .infer = csa_attention_infer,
    .differentiable = CG_BIT(Q) | CG_BIT(KV) | CG_BIT(CKV) | CG_BIT(SINK),
    .constant_out = CG_BIT(1) | CG_BIT(2) | CG_BIT(3),
    .grad = csa_attention_build_grad,
    .statistic_in = CG_BIT(SINK),
    .statistic_out = CG_BIT(1) | CG_BIT(2) | CG_BIT(3),
    .by_row = CG_BIT(Q) | CG_BIT(TOPK) | CG_BIT(ROWS),
    .replay = CG_REPLAY_SAME_BITS,
    .cost = csa_attention_cost,
    .workspace = csa_attention_workspace,
    .run = CG_RUN(csa_attention),
    CG_CASES(csa_attention_cases),
};

const cg_op cg_op_csa_attention_grad = {
    .name = "csa_attention_grad",
    .doc = "backward of csa_attention",
    .in = {"q", "kv", "ckv", "sink", "topk", "rows", "lse", "dout"},
    .out = {"dq", "dkv", "dsink", "dckv"},
    .optional = CG_BIT(CKV) | CG_BIT(TOPK),
    .attr_bytes = sizeof(csa_attention_attr),
    .infer = csa_attention_grad_infer,
    .no_grad = "not yet: second derivatives",
    .statistic_in = CG_BIT(SINK) | CG_BIT(LSE),
    .statistic_out = CG_BIT(2),
    .by_row = CG_BIT(Q) | CG_BIT(TOPK) | CG_BIT(ROWS) | CG_BIT(LSE) | CG_BIT(DOUT),
    .summed = CG_BIT(1) | CG_BIT(2) | CG_BIT(3),
    .replay = CG_REPLAY_SAME_BITS,
    .cost = csa_attention_grad_cost,
    .workspace = csa_attention_grad_workspace,
    .run = CG_RUN(csa_attention_grad),
    CG_CASES(csa_attention_grad_cases),
};

cg_attention cg_csa_attention(cg_graph *graph, cg_value *q, cg_value *kv, cg_value *ckv, cg_value *sink,
                              cg_value *topk, cg_value *rows, int64_t window, double scale,
                              cg_teacher teacher) {
    cg_value *out = cg_apply(graph, &cg_op_csa_attention, &(csa_attention_attr){window, scale, teacher},
                             (cg_value *[]){q, kv, ckv, sink, topk, rows}, 6);
    return (cg_attention){.out = out,
                          .lse = cg_output(out, 1),
                          .window_lse = cg_output(out, 2),
                          .teacher = teacher == CG_TEACHER_NONE ? NULL : cg_output(out, 3)};
}

#else

#include "ops/csa/csa_panel.h"

/* One thread's scratch. Hp: heads in whole vectors; N = W + K: the most keys of a row. */
typedef struct KERNEL(attention_scratch) {
    REAL *qt;                    /* [D, Hp] scale * q of the row, turned */
    REAL *x;                     /* [N, Hp] logits, then weights */
    const REAL **key, **qt_rows; /* [N], [D] */
    REAL *copy;                  /* [N, copy_ld] keys side by side, NULL: read where they are */
    int64_t copy_ld;
    int64_t *place;      /* [K] the place in topk of each chosen key */
    REAL *a, *b, *c, *e; /* [Hp] */
    double *u, *v;       /* [3 * Hp] */
    /* backward */
    REAL *gt, *dx, *pair;            /* [D, Hp] dout turned, [N, Hp] g.key, [N, 2 * Hp] p beside scale * dx */
    const REAL **gt_rows, **gq_rows; /* [D], [2 * Hp] rows of dout, then of q */
    REAL **dkey;                     /* [N] where a key's gradient is added */
    REAL *zero;                      /* [D] what stands for heads beyond H */
} KERNEL(attention_scratch);

static KERNEL(attention_scratch)
    KERNEL(attention_scratch_of)(panel_carver *from, const attention_sizes *z, bool backward) {
    const int64_t Hp = panel_heads(z->H, sizeof(REAL)), N = min64(z->W, z->kv_rows) + z->K, D = z->D;
    KERNEL(attention_scratch) s = {0};
    s.qt = panel_carve(from, D * Hp, sizeof(REAL));
    s.x = panel_carve(from, N * Hp, sizeof(REAL));
    s.key = panel_carve(from, N, sizeof *s.key);
    s.qt_rows = panel_carve(from, D, sizeof *s.qt_rows);
    s.place = panel_carve(from, z->K, sizeof *s.place);
    if ((size_t)D * sizeof(REAL) >= COPY_BYTES) {
        /* rows a power of two apart would all fall on the same few lines of the cache */
        s.copy_ld = D + (int64_t)(64 / sizeof(REAL));
        s.copy = panel_carve(from, N * s.copy_ld, sizeof(REAL));
    }
    s.a = panel_carve(from, Hp, sizeof(REAL));
    s.b = panel_carve(from, Hp, sizeof(REAL));
    s.c = panel_carve(from, Hp, sizeof(REAL));
    s.e = panel_carve(from, Hp, sizeof(REAL));
    s.u = panel_carve(from, 3 * Hp, sizeof(double));
    s.v = panel_carve(from, 3 * Hp, sizeof(double));
    if (backward) {
        s.gt = panel_carve(from, D * Hp, sizeof(REAL));
        s.dx = panel_carve(from, N * Hp, sizeof(REAL));
        s.pair = panel_carve(from, 2 * N * Hp, sizeof(REAL));
        s.gt_rows = panel_carve(from, D, sizeof *s.gt_rows);
        s.gq_rows = panel_carve(from, 2 * Hp, sizeof *s.gq_rows);
        s.dkey = panel_carve(from, N, sizeof *s.dkey);
        s.zero = panel_carve(from, D, sizeof(REAL));
    }
    return s;
}

/* The scratch of the calling thread, with what stays the same for all rows. */
static KERNEL(attention_scratch)
    KERNEL(attention_begin)(const cg_run_args *args, const attention_sizes *z, bool backward) {
    panel_carver count = {0};
    KERNEL(attention_scratch_of)(&count, z, backward);
    panel_carver slot = {(char *)args->workspace + (size_t)cg_thread_slot() * count.used, 0};
    KERNEL(attention_scratch) s = KERNEL(attention_scratch_of)(&slot, z, backward);
    const int64_t Hp = panel_heads(z->H, sizeof(REAL));
    memset(s.qt, 0, (size_t)(z->D * Hp) * sizeof(REAL));
    for (int64_t d = 0; d < z->D; d++) s.qt_rows[d] = s.qt + d * Hp;
    if (!backward) return s;
    memset(s.gt, 0, (size_t)(z->D * Hp) * sizeof(REAL));
    memset(s.zero, 0, (size_t)z->D * sizeof(REAL));
    for (int64_t d = 0; d < z->D; d++) s.gt_rows[d] = s.gt + d * Hp;
    for (int64_t h = 0; h < 2 * Hp; h++) s.gq_rows[h] = s.zero;
    return s;
}

/* The keys of row t: n_window rows from `low` on, then the chosen ones. */
typedef struct KERNEL(attention_keys) {
    int64_t low, n_window, n_chosen;
} KERNEL(attention_keys);

static KERNEL(attention_keys) KERNEL(gather)(const attention_sizes *z, const REAL *kv, const REAL *ckv,
                                             int64_t t, const KERNEL(attention_scratch) * s) {
    const int32_t *row = z->rows + t * CG_ROW_FIELDS;
    const int64_t own = z->first + t;
    KERNEL(attention_keys) keys = {.low = max64(row[CG_ROW_START], own - z->W + 1)};
    if (row[CG_ROW_POSITION] >= 0) keys.n_window = own + 1 - keys.low;
    int64_t n = 0;
    for (; n < keys.n_window; n++) s->key[n] = kv + (keys.low + n) * z->D;
    for (int64_t k = 0; k < z->K; k++) {
        int64_t j = z->topk[t * z->K + k];
        if (j < 0) continue;
        s->place[keys.n_chosen++] = k;
        s->key[n++] = ckv + j * z->D;
    }
    if (s->copy)
        for (int64_t i = 0; i < n; i++)
            s->key[i] = memcpy(s->copy + i * s->copy_ld, s->key[i], (size_t)z->D * sizeof(REAL));
    return keys;
}

/* x = keys times the turned rows [D, Hp]. */
static void KERNEL(logits)(const attention_sizes *z, int64_t n, int64_t Hp, const REAL *const *key,
                           const REAL *const *turned, REAL *x) {
    const KERNEL(panel_product)
        product = {.m = n, .n = Hp, .k = z->D, .a_rows = key, .a_k = 1, .b_rows = turned, .c = x, .ldc = Hp};
    KERNEL(panel_multiply)(&product);
}

/* out [H, D] = weights times keys, weight of key i and head h at weight[i * ld + h]. */
static void KERNEL(weighted)(const attention_sizes *z, int64_t n, const REAL *weight, int64_t ld,
                             const REAL *const *key, REAL *out) {
    const KERNEL(panel_product) product = {
        .m = z->H, .n = z->D, .k = n, .a = weight, .a_row = 1, .a_k = ld, .b_rows = key, .c = out, .ldc = z->D};
    KERNEL(panel_multiply)(&product);
}

/* Softmax of row t in place: x becomes weights. Window and chosen rows are shifted by a largest logit of their
 * own, so that both log-sums are exact however far apart they lie; their sums meet in f64, per head. */
static void KERNEL(softmax_row)(const attention_sizes *z, cg_teacher mode,
                                const KERNEL(panel_columns) * columns, const KERNEL(attention_scratch) * s,
                                KERNEL(attention_keys) keys, const REAL *sink, REAL *lse, REAL *window_lse,
                                REAL *teacher) {
    const int64_t H = z->H, Hp = columns->heads, nw = keys.n_window, nc = keys.n_chosen;
    REAL *chosen = s->x + nw * Hp, *top_window = s->a, *top_chosen = s->b, *sum_window = s->c,
         *sum_chosen = s->e;
    for (int64_t h = 0; h < Hp; h++) {
        top_window[h] = h < H ? sink[h] : 0;
        top_chosen[h] = (REAL)-INFINITY;
    }
    columns->max(nw, Hp, s->x, top_window);
    columns->max(nc, Hp, chosen, top_chosen);
    columns->shift(nw, Hp, s->x, top_window);
    columns->shift(nc, Hp, chosen, top_chosen);
    VEC(exp)((nw + nc) * Hp, s->x, s->x);
    columns->sum(nw, Hp, s->x, sum_window);
    columns->sum(nc, Hp, chosen, sum_chosen);

    /* largest of all, and exp of: the sink to the window's largest; the window's, the chosen rows' to that of
     * all */
    double *u = s->u, *v = s->v;
    for (int64_t h = 0; h < H; h++) {
        double window = top_window[h], chosen_top = top_chosen[h],
               all = window > chosen_top ? window : chosen_top;
        bool empty = window == -INFINITY;
        u[h] = empty ? -INFINITY : sink[h] - window;
        u[H + h] = empty ? -INFINITY : window - all;
        u[2 * H + h] = nc ? top_chosen[h] - all : -INFINITY;
    }
    cg_exp_f64(3 * H, u, u);
    for (int64_t h = 0; h < H; h++) {
        v[h] = u[h] + sum_window[h];
        v[H + h] = v[h] * u[H + h] + sum_chosen[h] * u[2 * H + h];
        u[H + h] /= v[H + h];
        u[2 * H + h] /= v[H + h];
    }
    cg_log_f64(2 * H, v, v);
    for (int64_t h = 0; h < H; h++) {
        double window = top_window[h], chosen_top = top_chosen[h],
               all = window > chosen_top ? window : chosen_top;
        window_lse[h] = (REAL)(window + v[h]);
        lse[h] = (REAL)(all + v[H + h]);
    }
    if (teacher) memset(teacher, 0, (size_t)z->K * sizeof(REAL));
    if (teacher && nc > 0) {
        /* in the full mode window and sink are the rest of the denominator: their exact log-sum is at hand */
        for (int64_t h = 0; h < H; h++)
            v[h] = mode == CG_TEACHER_FULL   ? top_window[h] + v[h]
                   : mode == CG_TEACHER_SINK ? sink[h]
                                             : -INFINITY;
        KERNEL(panel_shares)(H, top_chosen, sum_chosen, v, v + 2 * H);
        KERNEL(panel_teach)(H, nc, Hp, chosen, v + 2 * H, s->a, s->place, teacher);
    }
    for (int64_t h = 0; h < Hp; h++) {
        sum_window[h] = h < H ? (REAL)u[H + h] : 0;
        sum_chosen[h] = h < H ? (REAL)u[2 * H + h] : 0;
    }
    columns->scale(nw, Hp, s->x, sum_window);
    columns->scale(nc, Hp, chosen, sum_chosen);
}

static bool KERNEL(csa_attention)(const cg_run_args *args) {
    const attention_sizes z = sizes_of(args);
    const cg_teacher mode = ((const csa_attention_attr *)args->attr)->teacher;
    const REAL *q = args->in[Q].data, *kv = args->in[KV].data, *ckv = args->in[CKV].data,
               *sink = args->in[SINK].data;
    REAL *out = args->out[0].data, *lse = args->out[1].data, *window_lse = args->out[2].data;
    REAL *teacher = mode == CG_TEACHER_NONE ? NULL : args->out[3].data;
    const int64_t T = z.T, H = z.H, D = z.D, K = z.K;
    if (!data_fit(args)) return false;
#pragma omp parallel if (T * H * D > 4096)
    {
        const KERNEL(panel_columns) columns = KERNEL(panel_columns_of)(H);
        const KERNEL(attention_scratch) s = KERNEL(attention_begin)(args, &z, false);
#pragma omp for schedule(dynamic, 8)
        for (int64_t t = 0; t < T; t++) {
            const KERNEL(attention_keys) keys = KERNEL(gather)(&z, kv, ckv, t, &s);
            const int64_t n = keys.n_window + keys.n_chosen;
            KERNEL(panel_transpose)(H, D, columns.heads, (REAL)z.scale, q + t * H * D, s.qt);
            KERNEL(logits)(&z, n, columns.heads, s.key, s.qt_rows, s.x);
            KERNEL(softmax_row)
            (&z, mode, &columns, &s, keys, sink, lse + t * H, window_lse + t * H,
             teacher ? teacher + t * K : NULL);
            KERNEL(weighted)(&z, n, s.x, columns.heads, s.key, out + t * H * D);
        }
    }
    return true;
}

/* Partial sums of the runs. */
typedef struct KERNEL(attention_partials) {
    REAL *dckv;    /* [runs, C, D] */
    REAL *halo;    /* [runs, halo, D]: the kv rows before a run */
    double *dsink; /* [runs, H] */
    int64_t *low,
        *high; /* [runs] the compressed rows that a run may touch; the rest of its dckv stays unwritten */
} KERNEL(attention_partials);

static KERNEL(attention_partials) KERNEL(attention_partials_of)(panel_carver *from, const attention_sizes *z) {
    const attention_runs runs = runs_of(z);
    KERNEL(attention_partials) partials;
    partials.dckv = panel_carve(from, runs.count * z->C * z->D, sizeof(REAL));
    partials.halo = panel_carve(from, runs.count * runs.halo * z->D, sizeof(REAL));
    partials.dsink = panel_carve(from, runs.count * z->H, sizeof(double));
    partials.low = panel_carve(from, runs.count, sizeof(int64_t));
    partials.high = panel_carve(from, runs.count, sizeof(int64_t));
    return partials;
}

static bool KERNEL(is_zero)(int64_t n, const REAL *x) {
    for (int64_t i = 0; i < n; i++)
        if (x[i] != 0) return false; /* NaN is not 0 */
    return true;
}

/* Rows first .. last-1: run number r. */
static void KERNEL(attention_run_grad)(const cg_run_args *args, const attention_sizes *z,
                                       const attention_runs *runs, const KERNEL(attention_partials) * partials,
                                       int64_t r, const KERNEL(panel_columns) * columns,
                                       const KERNEL(attention_scratch) * s) {
    const REAL *q = args->in[Q].data, *kv = args->in[KV].data, *ckv = args->in[CKV].data,
               *sink = args->in[SINK].data;
    const REAL *lse = args->in[LSE].data, *dout = args->in[DOUT].data;
    REAL *dq = args->out[0].data, *dkv = args->out[1].data;
    const int64_t H = z->H, Hp = columns->heads, D = z->D, first = r * runs->rows,
                  last = min64(first + runs->rows, z->T), own = z->first + first; /* kv rows from `own` on */
    const size_t row_bytes = (size_t)D * sizeof(REAL);
    REAL *halo = partials->halo + r * runs->halo * D, *dckv = partials->dckv + r * z->C * D;
    double *dsink = partials->dsink + r * H;
    int64_t low = z->C, high = 0;
    for (int64_t t = first; z->topk && t < last; t++) {
        const int32_t *row = z->rows + t * CG_ROW_FIELDS;
        if (row[CG_ROW_VISIBLE] == 0) continue;
        low = min64(low, row[CG_ROW_COMPRESSED]);
        high = max64(high, (int64_t)row[CG_ROW_COMPRESSED] + row[CG_ROW_VISIBLE]);
    }
    partials->low[r] = low;
    partials->high[r] = high;
    if (low < high) memset(dckv + low * D, 0, (size_t)(high - low) * row_bytes);
    memset(dkv + own * D, 0, (size_t)(last - first) * row_bytes);
    memset(halo, 0, (size_t)runs->halo * row_bytes);
    for (int64_t h = 0; h < H; h++) dsink[h] = 0;

    for (int64_t t = first; t < last; t++) {
        const REAL *g = dout + t * H * D;
        const KERNEL(attention_keys) keys = KERNEL(gather)(z, kv, ckv, t, s);
        const int64_t n = keys.n_window + keys.n_chosen;
        if (n == 0 || KERNEL(is_zero)(H * D, g)) {
            memset(dq + t * H * D, 0, (size_t)H * row_bytes);
            continue;
        }
        /* weights again */
        KERNEL(panel_transpose)(H, D, Hp, (REAL)z->scale, q + t * H * D, s->qt);
        KERNEL(logits)(z, n, Hp, s->key, s->qt_rows, s->x);
        for (int64_t h = 0; h < Hp; h++) s->a[h] = h < H ? lse[t * H + h] : 0;
        columns->shift(n, Hp, s->x, s->a);
        VEC(exp)(n * Hp, s->x, s->x);
        /* gradients of logits */
        KERNEL(panel_transpose)(H, D, Hp, 1, g, s->gt);
        KERNEL(logits)(z, n, Hp, s->key, s->gt_rows, s->dx);
        columns->dot(n, Hp, s->x, s->dx, s->b);
        columns->pair(n, Hp, s->x, s->dx, s->b, (REAL)z->scale, s->pair);
        for (int64_t h = 0; h < H; h++) s->u[h] = (double)sink[h] - lse[t * H + h];
        cg_exp_f64(H, s->u, s->u);
        for (int64_t h = 0; h < H; h++) dsink[h] -= s->u[h] * s->b[h];
        KERNEL(weighted)(z, n, s->pair + Hp, 2 * Hp, s->key, dq + t * H * D);
        /* both roles of the keys, in one sum over [dout; q] */
        for (int64_t h = 0; h < H; h++) {
            s->gq_rows[h] = g + h * D;
            s->gq_rows[Hp + h] = q + (t * H + h) * D;
        }
        for (int64_t i = 0; i < keys.n_window; i++) {
            int64_t j = keys.low + i;
            s->dkey[i] = j >= own ? dkv + j * D : halo + (j - (own - runs->halo)) * D;
        }
        for (int64_t i = 0; i < keys.n_chosen; i++)
            s->dkey[keys.n_window + i] = dckv + z->topk[t * z->K + s->place[i]] * D;
        const KERNEL(panel_product) product = {.m = n,
                                               .n = D,
                                               .k = 2 * Hp,
                                               .a = s->pair,
                                               .a_row = 2 * Hp,
                                               .a_k = 1,
                                               .b_rows = s->gq_rows,
                                               .c_rows = s->dkey,
                                               .add = true};
        KERNEL(panel_multiply)(&product);
    }
}

static bool KERNEL(csa_attention_grad)(const cg_run_args *args) {
    const attention_sizes z = sizes_of(args);
    const attention_runs runs = runs_of(&z);
    const int64_t D = z.D;
    if (!data_fit(args)) return false;
    REAL *dkv = args->out[1].data, *dsink = args->out[2].data,
         *dckv = args->n_out > 3 ? args->out[3].data : NULL;
    panel_carver slot = {0}, all = {args->workspace, 0};
    KERNEL(attention_scratch_of)(&slot, &z, true);
    panel_carve(&all, cg_thread_slots(), slot.used);
    const KERNEL(attention_partials) partials = KERNEL(attention_partials_of)(&all, &z);
    const int64_t before = min64(z.first, runs.halo); /* rows before the first one that windows reach */
    memset(dkv, 0, (size_t)(z.first * D) * sizeof(REAL));
    memset(dkv + (z.first + z.T) * D, 0, (size_t)((z.kv_rows - z.first - z.T) * D) * sizeof(REAL));
#pragma omp parallel if (z.T * z.H * D > 4096)
    {
        const KERNEL(panel_columns) columns = KERNEL(panel_columns_of)(z.H);
        const KERNEL(attention_scratch) s = KERNEL(attention_begin)(args, &z, true);
#pragma omp for schedule(dynamic)
        for (int64_t r = 0; r < runs.count; r++)
            KERNEL(attention_run_grad)(args, &z, &runs, &partials, r, &columns, &s);
#pragma omp for schedule(static) nowait
        for (int64_t j = -before; j < z.T; j++) {
            REAL *to = dkv + (z.first + j) * D;
            for (int64_t r = j < 0 ? 0 : j / runs.rows + 1; r < runs.count && j >= r * runs.rows - runs.halo;
                 r++) {
                const REAL *restrict from =
                    partials.halo + (r * runs.halo + j - (r * runs.rows - runs.halo)) * D;
                for (int64_t d = 0; d < D; d++) to[d] += from[d];
            }
        }
#pragma omp for schedule(static)
        for (int64_t j = 0; j < (dckv ? z.C : 0); j++) {
            memset(dckv + j * D, 0, (size_t)D * sizeof(REAL));
            for (int64_t r = 0; r < runs.count; r++) {
                if (j < partials.low[r] || j >= partials.high[r]) continue;
                const REAL *restrict from = partials.dckv + (r * z.C + j) * D;
                for (int64_t d = 0; d < D; d++) dckv[j * D + d] += from[d];
            }
        }
    }
    for (int64_t h = 0; h < z.H; h++) {
        double sum = 0;
        for (int64_t r = 0; r < runs.count; r++) sum += partials.dsink[r * z.H + h];
        dsink[h] = (REAL)sum;
    }
    return true;
}

#endif
