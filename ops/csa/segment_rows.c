/* What every packed row needs to know of its segment, written down once from the offsets.
 *
 *   cu_seqlens [B+1] i32 physical offsets, rising from 0   seqlens [B] i32 real lengths; absent: all are real
 *   -> rows [T, CG_ROW_FIELDS]   positions [T]   entries [C]   entry_positions [C]   cu_compressed [B+1]  (i32)
 *
 * Segment b has floor(physical length / m) compressed rows, so a group never crosses a border and a tail
 * shorter than m makes none. A real row at position p sees floor((p+1)/m) of them: a group is visible from its
 * last token on. Empty segments may stand anywhere. Rows behind the last segment have position -1.
 *
 * Saved:     nothing.
 * Recompute: same bits.
 * Refuses:   a negative size; at run time a first offset other than 0, a decreasing one, a last one above T, a
 *            real length outside 0..physical, more compressed rows than the capacity C.
 * Source:    DeepSeek-V4 report, arXiv 2606.19348, section 2.3.3, for the groups; the causal rule as released.
 */
#include "ops/attributes.h"
#include "ops/ops.h"

static bool segment_rows_infer(cg_infer *infer) {
    const segment_rows_attr *attr = infer->attr;
    if (!cg_expect_dtype(infer, 0, CG_I32) || !cg_expect_dims(infer, 0, 1)) return false;
    int64_t offsets = infer->in[0]->shape.dims[0];
    if (offsets < 1)
        return cg_refuse(infer, "cu_seqlens has shape [0], expected at least the first offset (0)");
    if (infer->in[1] && (!cg_expect_dtype(infer, 1, CG_I32) || !cg_expect_dims(infer, 1, 1) ||
                         !cg_expect_dim(infer, 1, 0, offsets - 1, "segments of cu_seqlens")))
        return false;
    if (attr->n_rows < 0 || attr->n_rows > INT32_MAX)
        return cg_refuse(infer, "n_rows is %lld, expected 0 to %d", (long long)attr->n_rows, INT32_MAX);
    if (attr->ratio < 0) return cg_refuse(infer, "ratio is %lld, expected 0 or more", (long long)attr->ratio);
    if (attr->capacity < 0 || attr->capacity > INT32_MAX)
        return cg_refuse(infer, "capacity is %lld, expected 0 to %d", (long long)attr->capacity, INT32_MAX);
    cg_infer_out(infer, 0, CG_I32, CG_SHAPE(attr->n_rows, CG_ROW_FIELDS));
    cg_infer_out(infer, 1, CG_I32, CG_SHAPE(attr->n_rows));
    cg_infer_out(infer, 2, CG_I32, CG_SHAPE(attr->capacity));
    cg_infer_out(infer, 3, CG_I32, CG_SHAPE(attr->capacity));
    cg_infer_out(infer, 4, CG_I32, CG_SHAPE(offsets));
    return true;
}

/* The offsets are the caller's data: all of them are checked before one is used. */
static bool segments_fit(const cg_run_args *args, int64_t B) {
    const segment_rows_attr *attr = args->attr;
    const int32_t *cu_seqlens = args->in[0].data, *seqlens = args->in[1].data;
    if (cu_seqlens[0] != 0)
        return cg_fail(args->error, CG_BAD_INPUT, "cu_seqlens[0] is %d, expected 0", cu_seqlens[0]);
    int64_t compressed = 0;
    for (int64_t b = 0; b < B; b++) {
        int64_t physical = (int64_t)cu_seqlens[b + 1] - cu_seqlens[b];
        if (physical < 0)
            return cg_fail(args->error, CG_BAD_INPUT,
                           "cu_seqlens[%lld] is %d, expected at least %d as before it", (long long)b + 1,
                           cu_seqlens[b + 1], cu_seqlens[b]);
        if (cu_seqlens[b + 1] > attr->n_rows)
            return cg_fail(args->error, CG_BAD_INPUT, "cu_seqlens[%lld] is %d, expected at most the %lld rows",
                           (long long)b + 1, cu_seqlens[b + 1], (long long)attr->n_rows);
        if (seqlens && (seqlens[b] < 0 || seqlens[b] > physical))
            return cg_fail(args->error, CG_BAD_INPUT,
                           "seqlens[%lld] is %d, expected 0 to the %lld rows of segment %lld", (long long)b,
                           seqlens[b], (long long)physical, (long long)b);
        if (attr->ratio) compressed += physical / attr->ratio;
    }
    if (compressed > attr->capacity)
        return cg_fail(args->error, CG_BAD_INPUT,
                       "the segments make %lld compressed rows at ratio %lld, but the capacity is %lld",
                       (long long)compressed, (long long)attr->ratio, (long long)attr->capacity);
    return true;
}

static bool segment_rows_run(const cg_run_args *args) {
    const segment_rows_attr *attr = args->attr;
    const int32_t *cu_seqlens = args->in[0].data, *seqlens = args->in[1].data;
    int32_t *rows = args->out[0].data, *positions = args->out[1].data, *entries = args->out[2].data;
    int32_t *entry_positions = args->out[3].data, *cu_compressed = args->out[4].data;
    const int64_t B = args->in[0].shape.dims[0] - 1, T = attr->n_rows, C = attr->capacity, m = attr->ratio;
    if (!segments_fit(args, B)) return false;
    int64_t c = 0;
    cu_compressed[0] = 0;
    for (int64_t b = 0; b < B; b++) {
        int64_t start = cu_seqlens[b], physical = cu_seqlens[b + 1] - start;
        int64_t real = seqlens ? seqlens[b] : physical, first = c;
        for (int64_t p = 0; p < physical; p++) {
            int32_t *row = rows + (start + p) * CG_ROW_FIELDS;
            row[CG_ROW_START] = (int32_t)start;
            row[CG_ROW_POSITION] = (int32_t)p;
            row[CG_ROW_COMPRESSED] = (int32_t)first;
            row[CG_ROW_VISIBLE] = m && p < real ? (int32_t)((p + 1) / m) : 0;
            row[CG_ROW_REAL] = p < real;
            positions[start + p] = (int32_t)p;
        }
        for (int64_t s = 0; m && s < physical / m; s++, c++) {
            entries[c] = (int32_t)(start + s * m);
            entry_positions[c] = (int32_t)(s * m);
        }
        cu_compressed[b + 1] = (int32_t)c;
    }
    for (int64_t t = cu_seqlens[B]; t < T; t++) {
        int32_t *row = rows + t * CG_ROW_FIELDS;
        row[CG_ROW_START] = cu_seqlens[B];
        row[CG_ROW_POSITION] = -1;
        row[CG_ROW_COMPRESSED] = (int32_t)c;
        row[CG_ROW_VISIBLE] = row[CG_ROW_REAL] = 0;
        positions[t] = -1;
    }
    for (; c < C; c++) entries[c] = entry_positions[c] = -1;
    return true;
}

static cg_cost segment_rows_cost(const cg_node *node) { return (cg_cost){.bytes = cg_node_bytes(node)}; }

/* clang-format off */
#define OFFSETS(...) { .shape = CG_DIMS(sizeof((int32_t[]){__VA_ARGS__}) / sizeof(int32_t)), .i32 = (const int32_t[]) { __VA_ARGS__ } }

static const cg_case segment_rows_cases[] = {
    {.name = "padding", .in = {OFFSETS(0, 5, 5, 9), OFFSETS(4, 0, 4)}, .attr = &(segment_rows_attr){11, 2, 6}},
    {.name = "all real", .in = {OFFSETS(0, 3, 8, 15), {.absent = true}}, .attr = &(segment_rows_attr){15, 4,
     3}},
    {.name = "empty segments", .in = {OFFSETS(0, 0, 4, 4), {.absent = true}}, .attr = &(segment_rows_attr){4,
     4, 1}},
    {.name = "no segment", .in = {OFFSETS(0), {.absent = true}}, .attr = &(segment_rows_attr){3, 4, 1}},
    {.name = "no row", .in = {OFFSETS(0, 0), {.absent = true}}, .attr = &(segment_rows_attr){0, 4, 0}},
    {.name = "no compression", .in = {OFFSETS(0, 3), {.absent = true}}, .attr = &(segment_rows_attr){3, 0, 0}},
    {.name = "first offset", .in = {OFFSETS(1, 3), {.absent = true}}, .attr = &(segment_rows_attr){3, 2, 1},
     .run_error = "cu_seqlens[0] is 1, expected 0"},
    {.name = "decreasing", .in = {OFFSETS(0, 3, 2), {.absent = true}}, .attr = &(segment_rows_attr){3, 2, 1},
     .run_error = "cu_seqlens[2] is 2, expected at least 3"},
    {.name = "beyond the rows", .in = {OFFSETS(0, 4), {.absent = true}}, .attr = &(segment_rows_attr){3, 2, 1},
     .run_error = "cu_seqlens[1] is 4, expected at most the 3 rows"},
    {.name = "real length", .in = {OFFSETS(0, 2, 3), OFFSETS(2, 2)}, .attr = &(segment_rows_attr){3, 2, 1},
     .run_error = "seqlens[1] is 2, expected 0 to the 1 rows"},
    {.name = "capacity", .in = {OFFSETS(0, 4, 9), {.absent = true}}, .attr = &(segment_rows_attr){9, 4, 1},
     .run_error = "2 compressed rows at ratio 4, but the capacity is 1"},
    {.name = "no offset", .in = {{.shape = CG_DIMS(0), .i32 = (const int32_t[]){0}}, {.absent = true}},
     .attr = &(segment_rows_attr){3, 2, 1}, .refuses = "expected at least the first offset"},
    {.name = "lengths", .in = {OFFSETS(0, 2, 3), OFFSETS(2)}, .attr = &(segment_rows_attr){3, 2, 1},
     .refuses = "segments of cu_seqlens"},
    {.name = "wrong dtype", .in = {{.shape = CG_DIMS(2), .i32 = (const int32_t[]){0, 3}, .wrong_dtype = true},
     {.absent = true}}, .attr = &(segment_rows_attr){3, 2, 1}, .refuses = "cu_seqlens is f32, expected i32"},
    {.name = "ratio", .in = {OFFSETS(0, 3), {.absent = true}}, .attr = &(segment_rows_attr){3, -1, 1},
     .refuses = "ratio is -1"},
    {.name = "negative capacity", .in = {OFFSETS(0, 3), {.absent = true}}, .attr = &(segment_rows_attr){3, 2,
     -1}, .refuses = "capacity is -1"},
    {.name = "negative rows", .in = {OFFSETS(0, 3), {.absent = true}}, .attr = &(segment_rows_attr){-1, 2, 1},
     .refuses = "n_rows is -1"},
};
/* clang-format on */

const cg_op cg_op_segment_rows = {
    .name = "segment_rows",
    .doc = "facts of each packed row: segment, position, what it sees",
    .in = {"cu_seqlens", "seqlens"},
    .out = {"rows", "positions", "entries", "entry_positions", "cu_compressed"},
    .optional = CG_BIT(1),
    .attr_bytes = sizeof(segment_rows_attr),
    .infer = segment_rows_infer,
    .no_grad = "cannot: indices",
    .replay = CG_REPLAY_SAME_BITS,
    .cost = segment_rows_cost,
    .run = {[CG_I32] = {segment_rows_run}},
    CG_CASES(segment_rows_cases),
};

cg_rows cg_segment_rows(cg_graph *graph, cg_value *cu_seqlens, cg_value *seqlens, int64_t n_rows, int64_t ratio,
                        int64_t capacity) {
    cg_value *rows = cg_apply(graph, &cg_op_segment_rows, &(segment_rows_attr){n_rows, ratio, capacity},
                              (cg_value *[]){cu_seqlens, seqlens}, 2);
    return (cg_rows){.rows = rows,
                     .positions = cg_output(rows, 1),
                     .entries = cg_output(rows, 2),
                     .entry_positions = cg_output(rows, 3),
                     .cu_compressed = cg_output(rows, 4)};
}
