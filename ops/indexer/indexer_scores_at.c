/* Scores of the compressed rows that the indexer chose.
 *
 *   q [T, Hi, Di]   w [T, Hi], every scale multiplied in   k [C, Di]   topk [T, K] i32, -1 = none, at any place
 *   -> scores [T, K], -inf where topk is -1
 *
 *   s[t,j] = sum_h w[t,h] * relu(q[t,h,:] . k[topk[t,j],:])
 *
 * Backward, ds the gradient, on the slots that are not -1:
 *
 *   dw[t,h]   = sum_j ds relu(q.k)             dq[t,h,:] = w[t,h] sum_j ds 1[q.k > 0] k[topk[t,j],:]
 *   dk[c,:]   = sum over (t,j) with topk[t,j] = c of ds sum_h w[t,h] 1[q.k > 0] q[t,h,:]
 *
 * An index may stand in a list twice. What rows of k hold that no list names does not matter, and their gradient is
 * exactly 0, as is that of a row whose list is empty; ds of a -1 slot does not matter either.
 *
 * A list that names most keys of a range has the scores of the whole range made, and takes its own: keys in order may
 * be turned around once for all rows.
 *
 * In backward a key's dk is summed over fixed shares of the rows, then over the shares in order: the same bits on any
 * number of threads. A thread takes whole shares; where there are more threads than shares, which cost memory, keys
 * are dealt out instead, and what is known then, for some rows at a time, is a bit per slot and head, 1[q.k > 0].
 *
 * Saved:     q w k topk                     (4*(T*Hi*Di + T*Hi + C*Di + T*K) bytes in f32)
 * Recompute: same bits; topk is given, not chosen again
 * Kink:      relu at 0, gradient 0 there
 * Refuses:   shapes that differ; at run time an index outside -1..C-1. There are no rows here to tell what a
 *            token sees: an index into another document passes. Who reads the list beside the rows refuses it
 *            (csa_attention, indexer_health), and lists of the ops that choose never hold one
 * Source:    DeepSeek-V4 report, arXiv 2606.19348, section 2.3.3, for the score
 */
#ifndef REAL

#include "ops/indexer/indexer.h"
#include "ops/pairs.h"

#include <string.h>

static bool scores_at_expect(cg_infer *infer, int i) {
    if (!cg_expect_index_inputs(infer, i) || !cg_expect_dtype(infer, i + 3, CG_I32) ||
        !cg_expect_dims(infer, i + 3, 2) ||
        !cg_expect_dim(infer, i + 3, 0, infer->in[i]->shape.dims[0], "rows of the queries"))
        return false;
    return true;
}

static bool indexer_scores_at_infer(cg_infer *infer) {
    if (!scores_at_expect(infer, 0)) return false;
    cg_infer_out(infer, 0, infer->in[0]->dtype, infer->in[3]->shape);
    return true;
}

static bool indexer_scores_at_grad_infer(cg_infer *infer) {
    if (!scores_at_expect(infer, 1) || !cg_expect_dtype(infer, 0, infer->in[1]->dtype)) return false;
    if (!cg_shape_equal(&infer->in[0]->shape, &infer->in[4]->shape)) {
        char got[128], want[128];
        return cg_refuse(infer, "dscores has shape %s, expected %s as topk has",
                         cg_shape_text(&infer->in[0]->shape, got, sizeof got),
                         cg_shape_text(&infer->in[4]->shape, want, sizeof want));
    }
    for (int i = 0; i < 3; i++) cg_infer_out(infer, i, infer->in[1]->dtype, infer->in[i + 1]->shape);
    return true;
}

static size_t lanes_bytes(int64_t Hi, int64_t Di, size_t real) {
    return cg_align_bytes((size_t)(cg_ceil_div(Hi, CG_LANES) * CG_LANES * Di) * real);
}

/* Whether ranges of keys are worth being turned around: what the lists ask for is more. */
static bool scores_at_packs(int64_t T, int64_t K, int64_t C) { return C <= T * K; }

/* Keys of a range of which a list of n names enough. */
static int64_t scores_at_range(int64_t n) { return n + n / 4 + CG_KEYS; }

static size_t scores_at_piece(int64_t Hi, int64_t Di, int64_t K, size_t real) {
    return lanes_bytes(Hi, Di, real) + 2 * cg_align_bytes((size_t)(K + 1) * sizeof(int32_t)) +
           cg_align_bytes((size_t)cg_row_scores(scores_at_range(K)) * real);
}

static size_t indexer_scores_at_workspace(const cg_node *node) {
    const cg_shape *q = &node->in[0]->shape;
    const int64_t C = node->in[2]->shape.dims[0], K = node->in[3]->shape.dims[1];
    const size_t real = cg_dtype_bytes(node->in[0]->dtype);
    return (scores_at_packs(q->dims[0], K, C) ? cg_packed_keys_bytes(C, q->dims[2], real) : 0) +
           (size_t)cg_thread_slots() * scores_at_piece(q->dims[1], q->dims[2], K, real);
}

/* What one thread needs for a row. */
static size_t scores_at_grad_piece(int64_t Hi, int64_t Di, int64_t K, size_t real) {
    return lanes_bytes(Hi, Di, real) + 2 * lanes_bytes(Hi, 1, real) +
           cg_align_bytes(cg_key_dots_bytes(Hi, real)) + 2 * cg_align_bytes((size_t)(K + 1) * sizeof(int32_t)) +
           cg_align_bytes((size_t)K * real);
}

/* Shares of the rows, dealt out in chunks: as many as take half the memory of the list (in f32),
 * CG_KEY_PARTS at most. */
static int64_t scores_at_parts(int64_t T, int64_t K, int64_t C, int64_t Di) {
    int64_t parts = C * Di > 0 ? T * K / (2 * C * Di) : 1;
    const int64_t chunks = cg_ceil_div(T, CG_ROW_CHUNK);
    parts = parts > CG_KEY_PARTS ? CG_KEY_PARTS : parts;
    parts = parts > chunks ? chunks : parts;
    return parts < 1 ? 1 : parts;
}

static size_t scores_at_parts_bytes(int64_t T, int64_t K, int64_t C, int64_t Di, size_t real) {
    const int64_t parts = scores_at_parts(T, K, C, Di);
    return parts == 1 ? 0 : cg_align_bytes((size_t)(parts * C * Di) * real); /* one is dk itself */
}

/* Whether threads that take whole shares have about the same to do. */
static bool scores_at_shares_fit(int64_t parts, int64_t threads) {
    return cg_ceil_div(parts, threads) * threads * 4 <= parts * 5;
}

/* The bits of a row that waits for its keys: one per slot and head. */
static size_t scores_at_grad_row(int64_t Hi, int64_t K) {
    return cg_align_bytes((size_t)(K * cg_ceil_div(Hi, CG_LANES)));
}

/* Rows that wait together: threads wait for each other once for all of them. More while their queries stay in a
 * second-level cache. */
enum { GRAD_ROWS = 64, GRAD_BYTES = 1 << 19 };
static int64_t scores_at_grad_rows(int64_t T, int64_t Hi, int64_t Di, int64_t K, size_t real) {
    const int64_t fit = GRAD_BYTES / (int64_t)(lanes_bytes(Hi, Di, real) + scores_at_grad_row(Hi, K)),
                  rows = fit < GRAD_ROWS ? GRAD_ROWS : fit;
    return T < rows ? T : rows;
}

static size_t indexer_scores_at_grad_workspace(const cg_node *node) {
    const cg_shape *q = &node->in[1]->shape;
    const int64_t T = q->dims[0], Hi = q->dims[1], Di = q->dims[2], C = node->in[3]->shape.dims[0],
                  K = node->in[4]->shape.dims[1];
    const size_t real = cg_dtype_bytes(node->in[1]->dtype);
    return scores_at_parts_bytes(T, K, C, Di, real) +
           (size_t)scores_at_grad_rows(T, Hi, Di, K, real) * scores_at_grad_row(Hi, K) +
           (size_t)cg_thread_slots() * scores_at_grad_piece(Hi, Di, K, real);
}

/* How keys are dealt out to threads: in runs of neighbours, whose gradients share cache lines and what is read ahead. */
typedef struct key_owners {
    int32_t n, run_bits;
} key_owners;

static key_owners owners_of(int64_t C, int32_t n_threads) {
    enum { RUN_BITS = 3, RUNS = 8 }; /* several runs for each, lest one has much more */
    return (key_owners){n_threads, C >> RUN_BITS >= (int64_t)RUNS * n_threads ? RUN_BITS : 0};
}

/* The thread that has a key. Neighbouring runs go to different ones, since a list may lie at one end of all keys. The
 * golden ratio's multiples spread evenly (Knuth, The Art of Computer Programming, section 6.4); in 32 bits, for up to
 * 65536 threads. */
static inline int32_t owner_of(int32_t key, key_owners owners) {
    return (int32_t)((((uint32_t)key >> owners.run_bits) * 2654435769u >> 16) * (uint32_t)owners.n >> 16);
}

/* The slots of a list [K] whose keys a thread has, in order: slots [K + 1]. Returns how many. */
static int64_t owned_slots(const int32_t *index, int64_t K, int32_t owner, key_owners owners, int32_t *slots) {
    enum { PIECE = 64 };
    int64_t n = 0;
    for (int64_t j0 = 0; j0 < K; j0 += PIECE) {
        const int64_t m = K - j0 < PIECE ? K - j0 : PIECE;
        int32_t has[PIECE]; /* in a loop of its own, for the sake of vectors */
        for (int64_t j = 0; j < m; j++)
            has[j] = (index[j0 + j] >= 0) & (owner_of(index[j0 + j], owners) == owner);
        for (int64_t j = 0; j < m; j++) {
            slots[n] = (int32_t)(j0 + j);
            n += has[j];
        }
    }
    return n;
}

/* The used slots of a list [K] and the keys that they name: each [K + 1]. Returns how many. */
static int64_t used_slots(const int32_t *index, int64_t K, int32_t *list, int32_t *slots) {
    int64_t n = 0;
    for (int64_t j = 0; j < K; j++) {
        list[n] = index[j];
        slots[n] = (int32_t)j;
        n += index[j] >= 0;
    }
    return n;
}

#define CG_KERNEL_FILE "ops/indexer/indexer_scores_at.c"
#include "ops/kernel.h"

extern const cg_op cg_op_indexer_scores_at_grad;

static void indexer_scores_at_build_grad(cg_graph *graph, const cg_node *node, cg_value *const *dout,
                                         cg_value **din) {
    cg_value *dq = cg_apply(graph, &cg_op_indexer_scores_at_grad, NULL,
                            (cg_value *[]){dout[0], node->in[0], node->in[1], node->in[2], node->in[3]}, 5);
    for (int i = 0; i < 3; i++) din[i] = cg_output(dq, i);
}

/* As if every slot were used. */
static cg_cost indexer_scores_at_cost(const cg_node *node) {
    const cg_shape *q = &node->in[0]->shape;
    double pairs = cg_chosen_pairs((double)q->dims[0], (double)cg_dim(node->in[2], 0),
                                   (double)cg_dim(node->in[3], 1), cg_segments_of(node->in[3]));
    return (cg_cost){.flops = pairs * (double)q->dims[1] * (2 * (double)q->dims[2] + 2),
                     .bytes = cg_node_bytes(node)};
}

static cg_cost indexer_scores_at_grad_cost(const cg_node *node) {
    const cg_shape *q = &node->in[1]->shape;
    double pairs = cg_chosen_pairs((double)q->dims[0], (double)cg_dim(node->in[3], 0),
                                   (double)cg_dim(node->in[4], 1), cg_segments_of(node->in[4]));
    return (cg_cost){.flops = pairs * (double)q->dims[1] * (6 * (double)q->dims[2] + 3),
                     .bytes = cg_node_bytes(node)};
}

#define NAN_ __builtin_nan("")
#define INF_ __builtin_inf()
/* Row 0 has gaps, row 1 nothing, row 2 one key twice; key 3 is named by none. */
#define LIST_3_4                                                                                               \
    (int32_t[]) { -1, 2, -1, 0, -1, -1, -1, -1, 4, 4, 1, 2 }

#define FOUR(...) __VA_ARGS__, __VA_ARGS__, __VA_ARGS__, __VA_ARGS__
#define LIST_64                                                                                                \
    {                                                                                                          \
        .shape = CG_DIMS(64, 11), .i32 = (int32_t[]) {                                                         \
            FOUR(FOUR(FOUR(7, -1, 130, 0, 7, 99, 42, 2, 129, -1, 64)))                                         \
        }                                                                                                      \
    }

static const cg_case indexer_scores_at_cases[] = {
    {.name = "gaps, repeats, an empty row",
     .in = {{.shape = CG_DIMS(3, 3, 2)},
            {.shape = CG_DIMS(3, 3)},
            {.shape = CG_DIMS(5, 2)},
            {.shape = CG_DIMS(3, 4), .i32 = LIST_3_4}},
     .crosses = "q w k topk"},
    {.name = "more heads than lanes",
     .in = {{.shape = CG_DIMS(1, 9, 3)},
            {.shape = CG_DIMS(1, 9)},
            {.shape = CG_DIMS(3, 3)},
            {.shape = CG_DIMS(1, 3), .i32 = (int32_t[]){2, 0, 1}}},
     .crosses = "q w k topk"},
    {.name = "wide keys",
     .in = {{.shape = CG_DIMS(1, 2, 17)},
            {.shape = CG_DIMS(1, 2)},
            {.shape = CG_DIMS(2, 17)},
            {.shape = CG_DIMS(1, 3), .i32 = (int32_t[]){1, -1, 0}}}},
    {.name = "NaN in rows that no list names",
     .in = {{.shape = CG_DIMS(1, 1, 2), .real = (double[]){1, 2}},
            {.shape = CG_DIMS(1, 1), .real = (double[]){1}},
            {.shape = CG_DIMS(3, 2), .real = (double[]){3, 5, NAN_, INF_, -1, 4}, .constant = true},
            {.shape = CG_DIMS(1, 3), .i32 = (int32_t[]){2, -1, 0}}},
     .crosses = "q w k topk"},
    {.name = "large",
     .in = {{.shape = CG_DIMS(64, 11, 33)}, {.shape = CG_DIMS(64, 11)}, {.shape = CG_DIMS(131, 33)}, LIST_64},
     .crosses = "q w k topk",
     .large = true},
    {.name = "no slot",
     .in = {{.shape = CG_DIMS(2, 1, 2)},
            {.shape = CG_DIMS(2, 1)},
            {.shape = CG_DIMS(3, 2)},
            {.shape = CG_DIMS(2, 0), .i32 = (int32_t[]){0}}}},
    {.name = "no key",
     .in = {{.shape = CG_DIMS(2, 1, 2)},
            {.shape = CG_DIMS(2, 1)},
            {.shape = CG_DIMS(0, 2)},
            {.shape = CG_DIMS(2, 1), .i32 = (int32_t[]){-1, -1}}}},
    {.name = "no row",
     .in = {{.shape = CG_DIMS(0, 1, 2)},
            {.shape = CG_DIMS(0, 1)},
            {.shape = CG_DIMS(3, 2)},
            {.shape = CG_DIMS(0, 2), .i32 = (int32_t[]){0}}}},
    {.name = "index outside",
     .in = {{.shape = CG_DIMS(1, 1, 2)},
            {.shape = CG_DIMS(1, 1)},
            {.shape = CG_DIMS(3, 2)},
            {.shape = CG_DIMS(1, 2), .i32 = (int32_t[]){0, 3}}},
     .run_error = "row 0: topk[1] is 3, expected -1 or 0 to 2"},
    {.name = "index below -1",
     .in = {{.shape = CG_DIMS(1, 1, 2)},
            {.shape = CG_DIMS(1, 1)},
            {.shape = CG_DIMS(3, 2)},
            {.shape = CG_DIMS(1, 2), .i32 = (int32_t[]){-2, 0}}},
     .run_error = "row 0: topk[0] is -2"},
    {.name = "heads differ",
     .in = {{.shape = CG_DIMS(1, 2, 2)},
            {.shape = CG_DIMS(1, 1)},
            {.shape = CG_DIMS(3, 2)},
            {.shape = CG_DIMS(1, 2), .i32 = (int32_t[]){0, 0}}},
     .refuses = "w has shape [1, 1], expected 2 in dimension 1"},
    {.name = "rows differ",
     .in = {{.shape = CG_DIMS(1, 1, 2)},
            {.shape = CG_DIMS(1, 1)},
            {.shape = CG_DIMS(3, 2)},
            {.shape = CG_DIMS(2, 1), .i32 = (int32_t[]){0, 0}}},
     .refuses = "topk has shape [2, 1], expected 1 in dimension 0"},
};

static const cg_case indexer_scores_at_grad_cases[] = {
    {.name = "gaps, repeats, an empty row",
     .in = {{.shape = CG_DIMS(3, 4),
             .real = (double[]){NAN_, 1, NAN_, -2, NAN_, NAN_, NAN_, NAN_, .5, 3, -1, 2}},
            {.shape = CG_DIMS(3, 3, 2)},
            {.shape = CG_DIMS(3, 3)},
            {.shape = CG_DIMS(5, 2)},
            {.shape = CG_DIMS(3, 4), .i32 = LIST_3_4}}},
    {.name = "no key",
     .in = {{.shape = CG_DIMS(2, 1)},
            {.shape = CG_DIMS(2, 1, 2)},
            {.shape = CG_DIMS(2, 1)},
            {.shape = CG_DIMS(0, 2)},
            {.shape = CG_DIMS(2, 1), .i32 = (int32_t[]){-1, -1}}}},
    {.name = "index outside",
     .in = {{.shape = CG_DIMS(1, 1)},
            {.shape = CG_DIMS(1, 1, 2)},
            {.shape = CG_DIMS(1, 1)},
            {.shape = CG_DIMS(3, 2)},
            {.shape = CG_DIMS(1, 1), .i32 = (int32_t[]){3}}},
     .run_error = "row 0: topk[0] is 3"},
    {.name = "slots differ",
     .in = {{.shape = CG_DIMS(1, 2)},
            {.shape = CG_DIMS(1, 1, 2)},
            {.shape = CG_DIMS(1, 1)},
            {.shape = CG_DIMS(3, 2)},
            {.shape = CG_DIMS(1, 1), .i32 = (int32_t[]){0}}},
     .refuses = "dscores has shape [1, 2], expected [1, 1] as topk has"},
};

const cg_op cg_op_indexer_scores_at = {
    .name = "indexer_scores_at",
    .doc = "index scores of the chosen compressed rows",
    .in = {"q", "w", "k", "topk"},
    .out = {"scores"},
    .infer = indexer_scores_at_infer,
    .differentiable = CG_BIT(0) | CG_BIT(1) | CG_BIT(2),
    .grad = indexer_scores_at_build_grad,
    .statistic_out = CG_BIT(0),
    .by_row = CG_BIT(0) | CG_BIT(1) | CG_BIT(3),
    .replay = CG_REPLAY_SAME_BITS,
    .cost = indexer_scores_at_cost,
    .workspace = indexer_scores_at_workspace,
    .run = CG_RUN(indexer_scores_at),
    CG_CASES(indexer_scores_at_cases),
};

const cg_op cg_op_indexer_scores_at_grad = {
    .name = "indexer_scores_at_grad",
    .doc = "gradients of indexer_scores_at",
    .in = {"dscores", "q", "w", "k", "topk"},
    .out = {"dq", "dw", "dk"},
    .infer = indexer_scores_at_grad_infer,
    .no_grad = "not yet: second derivatives",
    .statistic_in = CG_BIT(0),
    .by_row = CG_BIT(0) | CG_BIT(1) | CG_BIT(2) | CG_BIT(4),
    .summed = CG_BIT(2),
    .replay = CG_REPLAY_SAME_BITS,
    .cost = indexer_scores_at_grad_cost,
    .workspace = indexer_scores_at_grad_workspace,
    .run = CG_RUN(indexer_scores_at_grad),
    CG_CASES(indexer_scores_at_grad_cases),
};

cg_value *cg_indexer_scores_at(cg_graph *graph, cg_value *q, cg_value *w, cg_value *k, cg_value *topk) {
    return cg_apply(graph, &cg_op_indexer_scores_at, NULL, (cg_value *[]){q, w, k, topk}, 4);
}

#else

#include "ops/indexer/indexer_kernels.h"
#include "ops/indexer/packed_keys.h"

static bool KERNEL(indexer_scores_at)(const cg_run_args *args) {
    const REAL *q = args->in[0].data, *w = args->in[1].data, *k = args->in[2].data;
    const int32_t *topk = args->in[3].data;
    REAL *scores = args->out[0].data;
    const int64_t T = args->in[0].shape.dims[0], Hi = args->in[0].shape.dims[1], Di = args->in[0].shape.dims[2];
    const int64_t C = args->in[2].shape.dims[0], K = args->in[3].shape.dims[1];
    if (!cg_index_fits(args, "topk", topk, T, K, C)) return false;
    const bool packs = scores_at_packs(T, K, C);
    LANES *packed = args->workspace;
    if (packs) KERNEL(keys_pack)(k, C, Di, packed);
    char *pieces = (char *)args->workspace + (packs ? cg_packed_keys_bytes(C, Di, sizeof(REAL)) : 0);
#pragma omp parallel for schedule(static, CG_ROW_CHUNK)
    for (int64_t t = 0; t < T; t++) {
        char *at = pieces + (size_t)cg_thread_slot() * scores_at_piece(Hi, Di, K, sizeof(REAL));
        LANES *lanes = cg_take(&at, lanes_bytes(Hi, Di, sizeof(REAL)));
        int32_t *list = cg_take(&at, (size_t)(K + 1) * sizeof *list);
        int32_t *slots = cg_take(&at, (size_t)(K + 1) * sizeof *slots);
        REAL *range = (REAL *)at;
        const REAL *row_q = q + t * Hi * Di, *row_w = w + t * Hi;
        const int32_t *index = topk + t * K;
        REAL *out = scores + t * K;
        int32_t first = INT32_MAX, last = -1;
        int64_t n = 0;
        for (int64_t j = 0; j < K; j++) {
            const uint32_t key = (uint32_t)index[j]; /* -1 is no first one */
            first = key < (uint32_t)first ? (int32_t)key : first;
            last = index[j] > last ? index[j] : last;
            n += index[j] >= 0;
        }
        if (packs && last - first < scores_at_range(n)) {
            const int64_t begin = first / CG_KEYS * CG_KEYS; /* of a tile */
            for (int64_t j = begin; j <= last; j += CG_KEYS) {
                const LANES *keys = packed + j / CG_LANES * Di;
                KERNEL(packed_scores)(row_q, row_w, Hi, Di, keys, last + 1 - j, range + j - begin);
            }
            for (int64_t j = 0; j < K; j++) out[j] = index[j] < 0 ? -(REAL)INFINITY : range[index[j] - begin];
            continue;
        }
        for (int64_t j = 0; j < K; j++) out[j] = -(REAL)INFINITY;
        n = used_slots(index, K, list, slots);
        if (n > 0) KERNEL(query_pack)(row_q, Hi, Di, lanes);
        for (int64_t j = 0; j < n; j += CG_KEYS) {
            const REAL *key[CG_KEYS];
            LANES score[CG_KEYS / CG_LANES];
            KERNEL(keys_at)(k, Di, list + j, n - j, key);
            KERNEL(key_scores)(lanes, row_w, Hi, Di, key, n - j, score);
            for (int64_t i = 0; i < CG_KEYS && j + i < n; i++) out[slots[j + i]] = ((const REAL *)score)[i];
        }
    }
    return true;
}

typedef REAL_INTEGER KERNEL(bits) __attribute__((vector_size(CG_LANES * sizeof(REAL))));

/* The heads of a key whose dots are not 0, a bit each. */
static inline void KERNEL(note_active)(const LANES *dots, int64_t groups, uint8_t *active) {
    for (int64_t g = 0; g < groups; g++) {
#if defined(__AVX2__) && REAL_BITS == 32
        active[g] = (uint8_t)_mm256_movemask_ps((__m256)(dots[g] != (LANES){0}));
#elif defined(__AVX512F__)
        active[g] = (uint8_t)_mm512_cmpneq_pd_mask((__m512d)dots[g], _mm512_setzero_pd());
#else
        KERNEL(bits) bits = {1, 2, 4, 8, 16, 32, 64, 128};
        bits &= (KERNEL(bits))(dots[g] != (LANES){0});
        bits |= __builtin_shufflevector(bits, bits, 4, 5, 6, 7, 0, 1, 2, 3);
        bits |= __builtin_shufflevector(bits, bits, 2, 3, 0, 1, 6, 7, 4, 5);
        bits |= __builtin_shufflevector(bits, bits, 1, 0, 3, 2, 5, 4, 7, 6);
        active[g] = (uint8_t)bits[0];
#endif
    }
}

/* The dots of a key again, as grad_dots made them. */
static inline void KERNEL(restore_dots)(const uint8_t *active, REAL ds, const LANES *weights, int64_t groups,
                                        LANES *dots) {
    for (int64_t g = 0; g < groups; g++) {
        const KERNEL(bits) bit = {1, 2, 4, 8, 16, 32, 64, 128};
        const KERNEL(bits) on = (KERNEL(bits))((bit & active[g]) != 0);
        const LANES scaled = ds * weights[g];
        dots[g] = (LANES)(on & (KERNEL(bits))scaled);
    }
}

/* dk += from n slots of a row. */
static __attribute__((noinline)) void KERNEL(grad_dealt)(const REAL *q, const LANES *weights, int64_t Hi,
                                                         int64_t Di, const int32_t *index, const REAL *ds,
                                                         const int32_t *slots, int64_t n, const uint8_t *active,
                                                         LANES *dots, REAL *dk) {
    const int64_t groups = cg_ceil_div(Hi, CG_LANES);
    for (int64_t i = 0; i < n; i += CG_KEYS) {
        const REAL *dot[CG_KEYS];
        REAL *to[CG_KEYS];
        const int64_t m = n - i < CG_KEYS ? n - i : CG_KEYS;
        for (int64_t e = 0; e < m; e++) {
            const int64_t j = slots[i + e];
            KERNEL(restore_dots)(active + j * groups, ds[j], weights, groups, dots + e * groups);
            dot[e] = (const REAL *)(dots + e * groups);
            to[e] = dk + (int64_t)index[j] * Di;
        }
        for (int64_t e = 0; e < m; e += CG_DEALT)
            KERNEL(grad_some)(q, Hi, Di, m - e < CG_DEALT ? m - e : CG_DEALT, dot + e, to + e);
    }
}

#undef SCRATCH
#define SCRATCH KERNEL(scores_at_scratch)
typedef struct SCRATCH {
    LANES *lanes, *dw, *weights, *dots; /* [groups, Di], [groups], [groups], cg_key_dots_bytes */
    int32_t *list, *slots;              /* [K + 1] */
    REAL *ds;                           /* [K] */
} SCRATCH;

static SCRATCH KERNEL(scores_at_take)(char *at, int64_t Hi, int64_t Di, int64_t K) {
    SCRATCH s;
    s.lanes = cg_take(&at, lanes_bytes(Hi, Di, sizeof(REAL)));
    s.dw = cg_take(&at, lanes_bytes(Hi, 1, sizeof(REAL)));
    s.weights = cg_take(&at, lanes_bytes(Hi, 1, sizeof(REAL)));
    s.dots = cg_take(&at, cg_key_dots_bytes(Hi, sizeof(REAL)));
    s.list = cg_take(&at, (size_t)(K + 1) * sizeof *s.list);
    s.slots = cg_take(&at, (size_t)(K + 1) * sizeof *s.slots);
    s.ds = cg_take(&at, (size_t)K * sizeof *s.ds);
    memset(s.weights, 0, lanes_bytes(Hi, 1, sizeof(REAL)));
    return s;
}

/* dq and dw of a row. What it gives its keys is added to dk, or, without dk, the active heads are noted. */
static void KERNEL(row_grads)(const cg_run_args *args, int64_t t, const SCRATCH *s, REAL *dk, uint8_t *active) {
    const int64_t Hi = args->in[1].shape.dims[1], Di = args->in[1].shape.dims[2],
                  groups = cg_ceil_div(Hi, CG_LANES), K = args->in[4].shape.dims[1];
    const REAL *dscores = (const REAL *)args->in[0].data + t * K,
               *q = (const REAL *)args->in[1].data + t * Hi * Di, *w = (const REAL *)args->in[2].data + t * Hi,
               *k = args->in[3].data;
    REAL *dq = (REAL *)args->out[0].data + t * Hi * Di;
    const int64_t n = used_slots((const int32_t *)args->in[4].data + t * K, K, s->list, s->slots);
    for (int64_t j = 0; j < n; j++) s->ds[j] = dscores[s->slots[j]];
    memset(s->dw, 0, lanes_bytes(Hi, 1, sizeof(REAL)));
    if (n > 0)
        KERNEL(query_pack)(q, Hi, Di, s->lanes);
    else
        memset(dq, 0, (size_t)(Hi * Di) * sizeof(REAL));
    for (int64_t j = 0; j < n; j += CG_KEY_TILE) {
        const int64_t m = n - j < CG_KEY_TILE ? n - j : CG_KEY_TILE;
        KERNEL(grad_dots)(s->lanes, w, k, Hi, Di, s->list + j, m, s->ds + j, s->dots, s->dw);
        KERNEL(grad_queries)(k, Hi, Di, s->list + j, m, s->dots, j > 0, dq);
        if (dk)
            KERNEL(grad_keys)(q, Hi, Di, s->list + j, m, s->dots, dk);
        else
            for (int64_t i = 0; i < m; i++)
                KERNEL(note_active)(s->dots + i * groups, groups, active + s->slots[j + i] * groups);
    }
    memcpy((REAL *)args->out[1].data + t * Hi, s->dw, (size_t)Hi * sizeof(REAL));
}

static bool KERNEL(indexer_scores_at_grad)(const cg_run_args *args) {
    const REAL *dscores = args->in[0].data, *q = args->in[1].data, *w = args->in[2].data;
    const int32_t *topk = args->in[4].data;
    const int64_t T = args->in[1].shape.dims[0], Hi = args->in[1].shape.dims[1], Di = args->in[1].shape.dims[2];
    const int64_t C = args->in[3].shape.dims[0], K = args->in[4].shape.dims[1];
    if (!cg_index_fits(args, "topk", topk, T, K, C)) return false;
    const int64_t n_parts = scores_at_parts(T, K, C, Di), part_size = C * Di;
    const int64_t block = scores_at_grad_rows(T, Hi, Di, K, sizeof(REAL));
    const size_t row_bytes = scores_at_grad_row(Hi, K), piece = scores_at_grad_piece(Hi, Di, K, sizeof(REAL));
    REAL *dk = args->out[2].data, *parts = n_parts == 1 ? dk : args->workspace;
    uint8_t *waiting = (uint8_t *)args->workspace + scores_at_parts_bytes(T, K, C, Di, sizeof(REAL));
    char *pieces = (char *)waiting + (size_t)block * row_bytes;
    const key_owners owners = owners_of(C, cg_threads());
    const bool whole = scores_at_shares_fit(n_parts, owners.n);
#pragma omp parallel
    {
        const SCRATCH s = KERNEL(scores_at_take)(pieces + (size_t)cg_thread_slot() * piece, Hi, Di, K);
#pragma omp for schedule(static, 1)
        for (int64_t p = 0; p < n_parts; p++) {
            REAL *part = parts + p * part_size;
            memset(part, 0, (size_t)part_size * sizeof(REAL));
            for (int64_t t0 = p * CG_ROW_CHUNK; whole && t0 < T; t0 += n_parts * CG_ROW_CHUNK)
                for (int64_t t = t0; t < T && t < t0 + CG_ROW_CHUNK; t++)
                    KERNEL(row_grads)(args, t, &s, part, NULL);
        }
        for (int64_t t0 = 0; !whole && t0 < T; t0 += block) {
            const int64_t end = T - t0 < block ? T : t0 + block;
#pragma omp for schedule(static, CG_ROW_CHUNK)
            for (int64_t t = t0; t < end; t++)
                KERNEL(row_grads)(args, t, &s, NULL, waiting + (size_t)(t - t0) * row_bytes);
#pragma omp for schedule(static, 1)
            for (int32_t owner = 0; owner < owners.n; owner++)
                for (int64_t t = t0; t < end; t++) {
                    const int64_t n = owned_slots(topk + t * K, K, owner, owners, s.slots);
                    memcpy(s.weights, w + t * Hi, (size_t)Hi * sizeof(REAL));
                    KERNEL(grad_dealt)
                    (q + t * Hi * Di, s.weights, Hi, Di, topk + t * K, dscores + t * K, s.slots, n,
                     waiting + (size_t)(t - t0) * row_bytes, s.dots,
                     parts + t / CG_ROW_CHUNK % n_parts * part_size);
                }
        }
    }
    if (n_parts > 1) KERNEL(parts_sum)(parts, n_parts, part_size, dk);
    return true;
}

#endif
