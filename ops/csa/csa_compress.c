/* Gated pooling: m tokens (2m with overlap) become one compressed row.
 *
 *   kv, gate [T, c*d]   ape [m, c*d]   entries, entry_positions [C] i32 (segment_rows)   -> out [C, d]
 *
 *   out[s,j] = sum_i a[i,j] kv[i,j],   a[:,j] = softmax over the slots i of gate[i,j] + ape[i mod m,j]
 *
 * Slots of entry s are the m tokens from entries[s] on. With overlap (c = 2) the own group is read in columns
 * [d:2d], and the m tokens before it add their columns [0:d] as further slots. The first group of a segment has
 * no predecessor: those slots do not exist, which is not the same as a gate of 0. Unused capacity gives 0.
 *
 * Backward, g = dout[s], e = out[s]:  dkv = a g,  dgate = a g (kv - e),  dape = sum of dgate over the entries.
 * A token has two roles at most, one per half of its columns, so no two entries write one place. Tokens in no
 * group (the tail of a segment) get exact zeros. dape is summed in at most 16 fixed runs of entries, then over
 * the runs.
 *
 * Saved:     kv gate ape entries entry_positions  (4*(2*T*c*d + m*c*d + 2*C) bytes in f32); the weights are
 *            rebuilt
 * Recompute: same bits
 * Refuses:   shapes that do not fit; at run time entries that leave the rows, overlap, or miss their
 *            predecessor
 * Source:    DeepSeek-V4 report, arXiv 2606.19348, equations 9-12 and 20-23
 */
#ifndef REAL

#include "ops/attributes.h"
#include "ops/ops.h"

enum { RUNS = 16 }; /* partial sums of dape */

static size_t aligned(size_t bytes) { return (bytes + 63) & ~(size_t)63; }

static bool csa_compress_expect(cg_infer *infer) {
    const csa_compress_attr *attr = infer->attr;
    if (attr->ratio < 1) return cg_refuse(infer, "ratio is %lld, expected at least 1", (long long)attr->ratio);
    if (!cg_expect_real(infer, 0) || !cg_expect_dims(infer, 0, 2) || !cg_expect_same(infer, 1, 0)) return false;
    const int64_t columns = infer->in[0]->shape.dims[1];
    if (attr->overlap && columns % 2)
        return cg_refuse(infer, "kv has %lld columns, expected an even number with overlap",
                         (long long)columns);
    return cg_expect_dtype(infer, 2, infer->in[0]->dtype) && cg_expect_dims(infer, 2, 2) &&
           cg_expect_dim(infer, 2, 0, attr->ratio, "ratio") &&
           cg_expect_dim(infer, 2, 1, columns, "columns of kv") && cg_expect_dtype(infer, 3, CG_I32) &&
           cg_expect_dims(infer, 3, 1) && cg_expect_same(infer, 4, 3);
}

static bool csa_compress_infer(cg_infer *infer) {
    if (!csa_compress_expect(infer)) return false;
    const bool overlap = ((const csa_compress_attr *)infer->attr)->overlap;
    cg_infer_out(infer, 0, infer->in[0]->dtype,
                 CG_SHAPE(infer->in[3]->shape.dims[0], infer->in[0]->shape.dims[1] / (overlap ? 2 : 1)));
    return true;
}

static bool csa_compress_grad_infer(cg_infer *infer) {
    if (!csa_compress_expect(infer)) return false;
    const bool overlap = ((const csa_compress_attr *)infer->attr)->overlap;
    if (!cg_expect_dtype(infer, 5, infer->in[0]->dtype) || !cg_expect_dims(infer, 5, 2) ||
        !cg_expect_dim(infer, 5, 0, infer->in[3]->shape.dims[0], "entries") ||
        !cg_expect_dim(infer, 5, 1, infer->in[0]->shape.dims[1] / (overlap ? 2 : 1),
                       "columns of a compressed row"))
        return false;
    for (int slot = 0; slot < 3; slot++)
        cg_infer_out(infer, slot, infer->in[slot]->dtype, infer->in[slot]->shape);
    return true;
}

/* Entries are data: each must lie in the rows, behind the one before it, and next to its predecessor. Then no
 * two entries share a place and the gradient needs no locks. */
static bool entries_fit(const cg_run_args *args) {
    const csa_compress_attr *attr = args->attr;
    const int32_t *entries = args->in[3].data, *entry_positions = args->in[4].data;
    const int64_t T = args->in[0].shape.dims[0], C = args->in[3].shape.dims[0];
    int64_t last = -attr->ratio; /* first row of the entry before */
    for (int64_t s = 0; s < C; s++) {
        int64_t first = entries[s];
        if (first == -1) continue;
        if (first < last + attr->ratio || first + attr->ratio > T)
            return cg_fail(
                args->error, CG_BAD_INPUT,
                "entry %lld begins at row %lld, expected -1 or %lld to %lld for %lld rows of its own",
                (long long)s, (long long)first, (long long)(last + attr->ratio), (long long)(T - attr->ratio),
                (long long)attr->ratio);
        if (attr->overlap && entry_positions[s] > 0 && (s == 0 || entries[s - 1] != first - attr->ratio))
            return cg_fail(
                args->error, CG_BAD_INPUT,
                "entry %lld stands at position %d, but the entry before it does not begin at row %lld",
                (long long)s, entry_positions[s], (long long)(first - attr->ratio));
        last = first;
    }
    return true;
}

#define CG_KERNEL_FILE "ops/csa/csa_compress.c"
#include "ops/kernel.h"

extern const cg_op cg_op_csa_compress_grad;

static void csa_compress_build_grad(cg_graph *graph, const cg_node *node, cg_value *const *dout,
                                    cg_value **din) {
    cg_value *in[6];
    for (int i = 0; i < 5; i++) in[i] = node->in[i];
    in[5] = dout[0];
    din[0] = cg_apply(graph, &cg_op_csa_compress_grad, node->attr, in, 6);
    din[1] = cg_output(din[0], 1);
    din[2] = cg_output(din[0], 2);
}

/* One thread's slots: their logits, then weights, and three rows of sums. */
static size_t slot_bytes(const cg_node *node) {
    const csa_compress_attr *attr = node->attr;
    size_t columns = (size_t)node->in[0]->shape.dims[1]; /* c*d: m rows of it hold all slots of an entry */
    return aligned((size_t)(attr->ratio + 3) * columns * cg_dtype_bytes(node->in[0]->dtype));
}

static size_t csa_compress_workspace(const cg_node *node) {
    return (size_t)cg_thread_slots() * slot_bytes(node);
}

static size_t csa_compress_grad_workspace(const cg_node *node) {
    size_t ape_bytes = (size_t)cg_tensor_bytes(node->in[2]->dtype, &node->in[2]->shape);
    return (size_t)cg_thread_slots() * slot_bytes(node) + RUNS * aligned(ape_bytes);
}

/* A slot and channel: add ape, subtract the maximum, exp, two sums. */
static cg_cost csa_compress_cost(const cg_node *node) {
    double slots = (double)node->in[3]->shape.dims[0] * (double)cg_shape_count(&node->in[2]->shape);
    return (cg_cost){.flops = 6 * slots, .bytes = cg_node_bytes(node)};
}

static cg_cost csa_compress_grad_cost(const cg_node *node) {
    double slots = (double)node->in[3]->shape.dims[0] * (double)cg_shape_count(&node->in[2]->shape);
    return (cg_cost){.flops = 12 * slots, .bytes = cg_node_bytes(node)};
}

/* clang-format off */
#define INDICES(...) { .shape = CG_DIMS(sizeof((int32_t[]){__VA_ARGS__}) / sizeof(int32_t)), .i32 = (const int32_t[]) { __VA_ARGS__ } }
#define PAIR(...) {.shape = CG_DIMS(__VA_ARGS__)}, { .shape = CG_DIMS(__VA_ARGS__) }
#define SAVED "kv gate ape entries entry_positions"

static const cg_case csa_compress_cases[] = {
    {.name = "overlap", .in = {PAIR(7, 4), {.shape = CG_DIMS(2, 4)}, INDICES(0, 2, 4), INDICES(0, 2, 4)},
     .attr = &(csa_compress_attr){2, true}, .crosses = SAVED},
    {.name = "two segments and spare room", .in = {PAIR(9, 4), {.shape = CG_DIMS(2, 4)},
     INDICES(0, 2, 5, 7, -1), INDICES(0, 2, 0, 2, -1)}, .attr = &(csa_compress_attr){2, true},
     .crosses = SAVED},
    {.name = "no overlap", .in = {PAIR(7, 3), {.shape = CG_DIMS(3, 3)}, INDICES(0, 3), INDICES(0, 3)},
     .attr = &(csa_compress_attr){3, false}, .crosses = SAVED},
    {.name = "ratio one", .in = {PAIR(3, 2), {.shape = CG_DIMS(1, 2)}, INDICES(0, 1, 2), INDICES(0, 1, 2)},
     .attr = &(csa_compress_attr){1, true}, .crosses = SAVED},
    {.name = "steep gates", .in = {{.shape = CG_DIMS(4, 2)}, {.shape = CG_DIMS(4, 2), .scale = 5},
     {.shape = CG_DIMS(2, 2)}, INDICES(0, 2), INDICES(0, 2)}, .attr = &(csa_compress_attr){2, true},
     .crosses = SAVED},
    {.name = "nothing but spare room", .in = {PAIR(3, 4), {.shape = CG_DIMS(4, 4)}, INDICES(-1, -1),
     INDICES(-1, -1)}, .attr = &(csa_compress_attr){4, true}, .crosses = SAVED},
    {.name = "no entry", .in = {PAIR(3, 4), {.shape = CG_DIMS(4, 4)}, {.shape = CG_DIMS(0),
     .i32 = (const int32_t[]){0}}, {.shape = CG_DIMS(0), .i32 = (const int32_t[]){0}}},
     .attr = &(csa_compress_attr){4, true}, .crosses = SAVED},
    {.name = "no row", .in = {PAIR(0, 4), {.shape = CG_DIMS(4, 4)}, INDICES(-1), INDICES(-1)},
     .attr = &(csa_compress_attr){4, true}, .crosses = SAVED},
    {.name = "large", .in = {PAIR(523, 134), {.shape = CG_DIMS(128, 134)}, INDICES(0, 128, 263, 391, -1),
     INDICES(0, 128, 0, 128, -1)}, .attr = &(csa_compress_attr){128, true}, .crosses = SAVED, .large = true},
    {.name = "odd columns", .in = {PAIR(4, 3), {.shape = CG_DIMS(2, 3)}, INDICES(0), INDICES(0)},
     .attr = &(csa_compress_attr){2, true}, .refuses = "kv has 3 columns, expected an even number"},
    {.name = "ratio", .in = {PAIR(4, 4), {.shape = CG_DIMS(0, 4)}, INDICES(0), INDICES(0)},
     .attr = &(csa_compress_attr){0, true}, .refuses = "ratio is 0"},
    {.name = "ape rows", .in = {PAIR(4, 4), {.shape = CG_DIMS(4, 4)}, INDICES(0), INDICES(0)},
     .attr = &(csa_compress_attr){2, true}, .refuses = "expected 2 in dimension 0 (ratio)"},
    {.name = "ape columns", .in = {PAIR(4, 4), {.shape = CG_DIMS(2, 2)}, INDICES(0), INDICES(0)},
     .attr = &(csa_compress_attr){2, true}, .refuses = "expected 4 in dimension 1 (columns of kv)"},
    {.name = "gate shape", .in = {{.shape = CG_DIMS(4, 4)}, {.shape = CG_DIMS(4, 2)}, {.shape = CG_DIMS(2, 4)},
     INDICES(0), INDICES(0)}, .attr = &(csa_compress_attr){2, true},
     .refuses = "gate has shape [4, 2], expected [4, 4]"},
    {.name = "positions shape", .in = {PAIR(4, 4), {.shape = CG_DIMS(2, 4)}, INDICES(0), INDICES(0, 2)},
     .attr = &(csa_compress_attr){2, true}, .refuses = "entry_positions has shape [2]"},
    {.name = "wrong dtype", .in = {{.shape = CG_DIMS(4, 4), .wrong_dtype = true}, {.shape = CG_DIMS(4, 4)},
     {.shape = CG_DIMS(2, 4)}, INDICES(0), INDICES(0)}, .attr = &(csa_compress_attr){2, true},
     .refuses = "kv is i32"},
    {.name = "wrong entries dtype", .in = {PAIR(4, 4), {.shape = CG_DIMS(2, 4)}, {.shape = CG_DIMS(1),
     .i32 = (const int32_t[]){0}, .wrong_dtype = true}, INDICES(0)}, .attr = &(csa_compress_attr){2, true},
     .refuses = "entries is f32, expected i32"},
    {.name = "beyond the rows", .in = {PAIR(5, 4), {.shape = CG_DIMS(2, 4)}, INDICES(0, 4), INDICES(0, 2)},
     .attr = &(csa_compress_attr){2, true}, .run_error = "entry 1 begins at row 4, expected -1 or 2 to 3"},
    {.name = "entries that overlap", .in = {PAIR(5, 4), {.shape = CG_DIMS(2, 4)}, INDICES(0, 1),
     INDICES(0, 0)}, .attr = &(csa_compress_attr){2, true}, .run_error = "entry 1 begins at row 1"},
    {.name = "no predecessor", .in = {PAIR(5, 4), {.shape = CG_DIMS(2, 4)}, INDICES(0, 3), INDICES(0, 2)},
     .attr = &(csa_compress_attr){2, true},
     .run_error = "entry 1 stands at position 2, but the entry before it does not"},
};

static const cg_case csa_compress_grad_cases[] = {
    {.name = "overlap", .in = {PAIR(9, 4), {.shape = CG_DIMS(2, 4)}, INDICES(0, 2, 5, 7, -1),
     INDICES(0, 2, 0, 2, -1), {.shape = CG_DIMS(5, 2)}}, .attr = &(csa_compress_attr){2, true}},
    {.name = "no overlap", .in = {PAIR(7, 3), {.shape = CG_DIMS(3, 3)}, INDICES(0, 3), INDICES(0, 3),
     {.shape = CG_DIMS(2, 3)}}, .attr = &(csa_compress_attr){3, false}},
    {.name = "no row", .in = {PAIR(0, 4), {.shape = CG_DIMS(4, 4)}, INDICES(-1), INDICES(-1),
     {.shape = CG_DIMS(1, 2)}}, .attr = &(csa_compress_attr){4, true}},
    {.name = "large", .in = {PAIR(523, 134), {.shape = CG_DIMS(128, 134)}, INDICES(0, 128, 263, 391, -1),
     INDICES(0, 128, 0, 128, -1), {.shape = CG_DIMS(5, 67)}}, .attr = &(csa_compress_attr){128, true},
     .large = true},
    {.name = "dout rows", .in = {PAIR(4, 4), {.shape = CG_DIMS(2, 4)}, INDICES(0), INDICES(0),
     {.shape = CG_DIMS(2, 2)}}, .attr = &(csa_compress_attr){2, true},
     .refuses = "expected 1 in dimension 0 (entries)"},
    {.name = "dout columns", .in = {PAIR(4, 4), {.shape = CG_DIMS(2, 4)}, INDICES(0), INDICES(0),
     {.shape = CG_DIMS(1, 4)}}, .attr = &(csa_compress_attr){2, true},
     .refuses = "columns of a compressed row"},
    {.name = "wrong dtype", .in = {PAIR(4, 4), {.shape = CG_DIMS(2, 4)}, INDICES(0), INDICES(0),
     {.shape = CG_DIMS(1, 2), .wrong_dtype = true}}, .attr = &(csa_compress_attr){2, true},
     .refuses = "dout is i32"},
    {.name = "beyond the rows", .in = {PAIR(5, 4), {.shape = CG_DIMS(2, 4)}, INDICES(0, 4), INDICES(0, 2),
     {.shape = CG_DIMS(2, 2)}}, .attr = &(csa_compress_attr){2, true}, .run_error = "entry 1 begins at row 4"},
};
/* clang-format on */

const cg_op cg_op_csa_compress = {
    .name = "csa_compress",
    .doc = "gated pooling of token rows into compressed rows",
    .in = {"kv", "gate", "ape", "entries", "entry_positions"},
    .out = {"out"},
    .attr_bytes = sizeof(csa_compress_attr),
    .infer = csa_compress_infer,
    .differentiable = CG_BIT(0) | CG_BIT(1) | CG_BIT(2),
    .grad = csa_compress_build_grad,
    .statistic_in = CG_BIT(2),
    .replay = CG_REPLAY_SAME_BITS,
    .cost = csa_compress_cost,
    .workspace = csa_compress_workspace,
    .run = CG_RUN(csa_compress),
    CG_CASES(csa_compress_cases),
};

const cg_op cg_op_csa_compress_grad = {
    .name = "csa_compress_grad",
    .doc = "backward of csa_compress",
    .in = {"kv", "gate", "ape", "entries", "entry_positions", "dout"},
    .out = {"dkv", "dgate", "dape"},
    .attr_bytes = sizeof(csa_compress_attr),
    .infer = csa_compress_grad_infer,
    .no_grad = "not yet: second derivatives",
    .statistic_in = CG_BIT(2),
    .statistic_out = CG_BIT(2),
    .replay = CG_REPLAY_SAME_BITS,
    .cost = csa_compress_grad_cost,
    .workspace = csa_compress_grad_workspace,
    .run = CG_RUN(csa_compress_grad),
    CG_CASES(csa_compress_grad_cases),
};

cg_value *cg_csa_compress(cg_graph *graph, cg_value *kv, cg_value *gate, cg_value *ape, cg_value *entries,
                          cg_value *entry_positions, int64_t ratio, bool overlap) {
    return cg_apply(graph, &cg_op_csa_compress, &(csa_compress_attr){ratio, overlap},
                    (cg_value *[]){kv, gate, ape, entries, entry_positions}, 5);
}

#else

/* One slot of an entry: d channels of a token row, and of its row of ape. */
typedef struct KERNEL(slot) {
    const REAL *kv, *gate, *ape;
} KERNEL(slot);

/* What all entries have in common, and one thread's scratch. */
typedef struct KERNEL(pool) {
    int64_t m, d, columns, own; /* own: first column of the own group, d with overlap */
    const REAL *kv, *gate, *ape;
    REAL *weight;               /* [slots, d] */
    REAL *largest, *sum, *mean; /* [d] */
} KERNEL(pool);

static KERNEL(pool) KERNEL(pool_of)(const cg_run_args *args) {
    const csa_compress_attr *attr = args->attr;
    const int64_t columns = args->in[0].shape.dims[1], d = attr->overlap ? columns / 2 : columns;
    return (KERNEL(pool)){.m = attr->ratio,
                          .d = d,
                          .columns = columns,
                          .own = columns - d,
                          .kv = args->in[0].data,
                          .gate = args->in[1].data,
                          .ape = args->in[2].data};
}

/* Bytes of a thread's slot; the same number as slot_bytes gives the plan. */
static size_t KERNEL(pool_use_slot)(KERNEL(pool) * pool, void *workspace) {
    size_t bytes = aligned((size_t)(pool->m + 3) * (size_t)pool->columns * sizeof(REAL));
    pool->weight = (REAL *)((char *)workspace + (size_t)cg_thread_slot() * bytes);
    pool->largest = pool->weight + pool->m * pool->columns;
    pool->sum = pool->largest + pool->columns;
    pool->mean = pool->sum + pool->columns;
    return bytes;
}

/* Slot i of an entry that begins at row `first`: the own group, then the group before it. */
static KERNEL(slot) KERNEL(slot_of)(const KERNEL(pool) * pool, int64_t first, int64_t i) {
    int64_t column = i < pool->m ? pool->own : 0;
    int64_t row = i < pool->m ? first + i : first + i - 2 * pool->m, offset = i < pool->m ? i : i - pool->m;
    return (KERNEL(slot)){pool->kv + row * pool->columns + column, pool->gate + row * pool->columns + column,
                          pool->ape + offset * pool->columns + column};
}

/* weight = softmax over the n slots, mean = weighted sum of kv. */
static void KERNEL(pool_entry)(const KERNEL(pool) * pool, int64_t first, int64_t n) {
    const int64_t d = pool->d;
    REAL *restrict weight = pool->weight, *restrict largest = pool->largest;
    REAL *restrict sum = pool->sum, *restrict mean = pool->mean;
    for (int64_t j = 0; j < d; j++) largest[j] = (REAL)-INFINITY, sum[j] = 0, mean[j] = 0;
    for (int64_t i = 0; i < n; i++) {
        KERNEL(slot) slot = KERNEL(slot_of)(pool, first, i);
        for (int64_t j = 0; j < d; j++) {
            REAL logit = slot.gate[j] + slot.ape[j];
            weight[i * d + j] = logit;
            largest[j] = logit > largest[j] ? logit : largest[j];
        }
    }
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < d; j++) weight[i * d + j] -= largest[j];
    VEC(exp)(n * d, weight, weight);
    for (int64_t i = 0; i < n; i++) {
        KERNEL(slot) slot = KERNEL(slot_of)(pool, first, i);
        for (int64_t j = 0; j < d; j++) {
            sum[j] += weight[i * d + j];
            mean[j] += weight[i * d + j] * slot.kv[j];
        }
    }
    for (int64_t j = 0; j < d; j++) {
        sum[j] = 1 / sum[j];
        mean[j] *= sum[j];
    }
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < d; j++) weight[i * d + j] *= sum[j];
}

static bool KERNEL(csa_compress)(const cg_run_args *args) {
    const csa_compress_attr *attr = args->attr;
    const int32_t *entries = args->in[3].data, *entry_positions = args->in[4].data;
    REAL *out = args->out[0].data;
    const int64_t C = args->out[0].shape.dims[0], d = args->out[0].shape.dims[1];
    if (!entries_fit(args)) return false;
#pragma omp parallel if (C * cg_shape_count(&args->in[2].shape) > 16384)
    {
        KERNEL(pool) pool = KERNEL(pool_of)(args);
        KERNEL(pool_use_slot)(&pool, args->workspace);
#pragma omp for schedule(static)
        for (int64_t s = 0; s < C; s++) {
            if (entries[s] < 0) {
                memset(out + s * d, 0, (size_t)d * sizeof(REAL));
                continue;
            }
            KERNEL(pool_entry)
            (&pool, entries[s], attr->overlap && entry_positions[s] > 0 ? 2 * pool.m : pool.m);
            memcpy(out + s * d, pool.mean, (size_t)d * sizeof(REAL));
        }
    }
    return true;
}

/* The gradient of one entry; dape is this run's partial sum. */
static void KERNEL(pool_entry_grad)(const KERNEL(pool) * pool, int64_t first, int64_t n, const REAL *restrict g,
                                    REAL *dkv, REAL *dgate, REAL *dape) {
    const int64_t d = pool->d;
    const REAL *restrict weight = pool->weight, *restrict mean = pool->mean;
    for (int64_t i = 0; i < n; i++) {
        KERNEL(slot) slot = KERNEL(slot_of)(pool, first, i);
        REAL *restrict to_kv = dkv + (slot.kv - pool->kv), *restrict to_gate = dgate + (slot.kv - pool->kv);
        REAL *restrict to_ape = dape + (slot.ape - pool->ape);
        for (int64_t j = 0; j < d; j++) {
            REAL share = weight[i * d + j] * g[j], dlogit = share * (slot.kv[j] - mean[j]);
            to_kv[j] = share;
            to_gate[j] = dlogit;
            to_ape[j] += dlogit;
        }
    }
}

static bool KERNEL(csa_compress_grad)(const cg_run_args *args) {
    const csa_compress_attr *attr = args->attr;
    const int32_t *entries = args->in[3].data, *entry_positions = args->in[4].data;
    const REAL *dout = args->in[5].data;
    REAL *dkv = args->out[0].data, *dgate = args->out[1].data, *dape = args->out[2].data;
    const int64_t C = args->in[5].shape.dims[0], d = args->in[5].shape.dims[1];
    const int64_t kv_count = cg_shape_count(&args->in[0].shape), ape_count = cg_shape_count(&args->in[2].shape);
    const int64_t ape_stride = (int64_t)(aligned((size_t)ape_count * sizeof(REAL)) / sizeof(REAL));
    if (!entries_fit(args)) return false;
    REAL *partial = args->workspace;
    char *slots = (char *)(partial + RUNS * ape_stride);
    memset(dkv, 0, (size_t)kv_count * sizeof(REAL));
    memset(dgate, 0, (size_t)kv_count * sizeof(REAL));
#pragma omp parallel if (C * ape_count > 16384)
    {
        KERNEL(pool) pool = KERNEL(pool_of)(args);
        KERNEL(pool_use_slot)(&pool, slots);
#pragma omp for schedule(dynamic)
        for (int run = 0; run < RUNS; run++) {
            REAL *sum = partial + run * ape_stride;
            memset(sum, 0, (size_t)ape_count * sizeof(REAL));
            for (int64_t s = C * run / RUNS; s < C * (run + 1) / RUNS; s++) {
                if (entries[s] < 0) continue;
                int64_t n = attr->overlap && entry_positions[s] > 0 ? 2 * pool.m : pool.m;
                KERNEL(pool_entry)(&pool, entries[s], n);
                KERNEL(pool_entry_grad)(&pool, entries[s], n, dout + s * d, dkv, dgate, sum);
            }
        }
    }
    for (int64_t i = 0; i < ape_count; i++) {
        REAL sum = 0;
        for (int run = 0; run < RUNS; run++) sum += partial[run * ape_stride + i];
        dape[i] = sum;
    }
    return true;
}

#endif
