/* A whole CSA layer of bare ops for tests of cases: pooling, selection, attention, loss, all gradients, over packed
 * rows whose values depend on an id of each row, so that documents can be moved, cut and run alone. */
#ifndef TESTS_CASE_PIPELINE_H
#define TESTS_CASE_PIPELINE_H

#include "tests/support.h"

#include "core/base/rng.h"

#define FOR_REAL(dtype) for (cg_dtype dtype = CG_F32; dtype <= CG_F64; dtype++)

enum { P_H = 2, P_D = 3, P_HI = 2, P_DI = 3, P_SEGMENTS = 24 };

typedef struct pipe_setup {
    cg_dtype dtype;
    int64_t T, ratio, window, topk;
    int64_t capacity; /* of compressed rows; 0: just enough, T / ratio */
    int n_segments;
    const int32_t *cu_seqlens, *seqlens; /* seqlens NULL: all rows are real */
    const int *ids;                      /* [T] where a row's values come from; NULL: its place */
    const int *dout_ids;                 /* [T] -1: the row's output gradient is 0; NULL: ids */
    const int *owner;                    /* [T]: only rows with owner == rank are this rank's; NULL: all are */
    int rank;
    bool dense;  /* loss over all visible rows, streamed */
    double fill; /* values of rows with id -2, and of capacity rows when fill_capacity */
    bool fill_capacity;
    double coeff; /* 0: 1; reduction: sum */
} pipe_setup;

/* Inputs per row, in this order; then their gradients. */
enum { P_Q, P_KV, P_CONTENT, P_GATE, P_Q_INDEX, P_W, P_K_CONTENT, P_K_GATE, P_INPUTS };

typedef struct pipeline {
    bench b;
    cg_value *in[P_INPUTS], *ape, *k_ape, *sink;
    cg_rows rows;
    cg_value *facts, *entries, *ckv, *k_index, *topk, *loss, *kl, *scores;
    cg_attention attention;
    int64_t T, C;
    bool mine[64]; /* of a rank's entries */
} pipeline;

static const int64_t p_width[P_INPUTS] = {P_H * P_D,  P_D,  2 * P_D,  2 * P_D,
                                          P_HI *P_DI, P_HI, 2 * P_DI, 2 * P_DI};

static inline cg_shape p_shape(int input, int64_t T) {
    return input == P_Q         ? CG_SHAPE(T, P_H, P_D)
           : input == P_Q_INDEX ? CG_SHAPE(T, P_HI, P_DI)
                                : CG_SHAPE(T, p_width[input]);
}

static inline double p_random(uint64_t stream, int64_t i) {
    return (float)cg_random_normal(9, stream, (uint64_t)i);
}

static inline cg_value *p_leaf(pipeline *p, const pipe_setup *s, int input) {
    static const char *const names[] = {"q", "kv", "content", "gate", "q_index", "w", "k_content", "k_gate"};
    const int64_t width = p_width[input];
    double *x = malloc(sizeof *x * (size_t)(s->T * width + 1));
    for (int64_t t = 0; t < s->T; t++) {
        const int id = s->ids ? s->ids[t] : (int)t;
        for (int64_t i = 0; i < width; i++)
            x[t * width + i] = id == -2 ? s->fill : p_random((uint64_t)input, id * width + i);
    }
    cg_value *leaf = bench_real(&p->b, names[input], p_shape(input, s->T), x);
    free(x);
    return leaf;
}

/* Rows and entries of this rank alone: the others' rows see nothing, and an entry belongs to the rank of the last
 * token of its group. Computed from the facts of the whole, as a rank that knows its place in the document would. A
 * rank also pools the entries before its own (csa_compress finds the overlap's tokens through them); `mine` says
 * which ones count. */
static inline void p_cut(pipeline *p, const pipe_setup *s) {
    const int64_t T = s->T, C = p->C;
    ck_assert_int_le(C, 64);
    int32_t *facts = calloc((size_t)(T * CG_ROW_FIELDS + 1), 4),
            *entries = malloc(sizeof(int32_t) * (size_t)(C + 1));
    int32_t *positions = malloc(sizeof(int32_t) * (size_t)(C + 1));
    int64_t c = 0;
    for (int b = 0; b < s->n_segments; b++) {
        const int32_t begin = s->cu_seqlens[b], end = s->cu_seqlens[b + 1], first = (int32_t)c;
        const int32_t real = s->seqlens ? s->seqlens[b] : end - begin;
        for (int32_t t = begin; t < end; t++) {
            const bool is_real = t - begin < real;
            const int32_t row[] = {begin, t - begin, first, is_real ? (t - begin + 1) / (int32_t)s->ratio : 0,
                                   is_real};
            if (s->owner[t] == s->rank)
                memcpy(facts + t * CG_ROW_FIELDS, row, sizeof row);
            else
                facts[t * CG_ROW_FIELDS + CG_ROW_POSITION] = -1;
        }
        for (int32_t j = 0; j < (end - begin) / s->ratio; j++, c++) {
            const bool mine = s->owner[begin + (j + 1) * s->ratio - 1] == s->rank;
            bool halo = false;
            for (int64_t next = begin + (j + 2) * s->ratio - 1; next < end; next += s->ratio)
                halo |= s->owner[next] == s->rank;
            entries[c] = mine || halo ? begin + j * (int32_t)s->ratio : -1;
            positions[c] = mine || halo ? j * (int32_t)s->ratio : -1;
            p->mine[c] = mine;
        }
    }
    for (int64_t t = s->n_segments ? s->cu_seqlens[s->n_segments] : 0; t < T; t++)
        facts[t * CG_ROW_FIELDS + CG_ROW_POSITION] = -1;
    for (; c < C; c++) entries[c] = positions[c] = -1;
    p->facts = bench_i32(&p->b, "facts", CG_SHAPE(T, CG_ROW_FIELDS), facts);
    p->rows.entries = bench_i32(&p->b, "entries", CG_SHAPE(C), entries);
    p->rows.entry_positions = bench_i32(&p->b, "entry_positions", CG_SHAPE(C), positions);
    free(facts), free(entries), free(positions);
}

/* With owner set, compressed rows are given (the sum over ranks, as gathered), else they are pooled here. */
static inline pipeline p_build(const pipe_setup *s, const double *ckv, const double *k_index) {
    pipeline p = {.b = bench_new(s->dtype), .T = s->T};
    cg_graph *g = p.b.graph;
    p.C = s->capacity ? s->capacity : s->T / s->ratio;
    for (int i = 0; i < P_INPUTS; i++) p.in[i] = p_leaf(&p, s, i);
    double ape[16 * 2 * P_D], sink[P_H] = {0.3, -0.4}, k_ape[16 * 2 * P_DI];
    ck_assert_int_le(s->ratio, 16);
    for (int i = 0; i < 16 * 2 * P_D; i++) ape[i] = p_random(20, i), k_ape[i] = p_random(21, i);
    p.ape = bench_real(&p.b, "ape", CG_SHAPE(s->ratio, 2 * P_D), ape);
    p.k_ape = bench_real(&p.b, "k_ape", CG_SHAPE(s->ratio, 2 * P_DI), k_ape);
    p.sink = bench_real(&p.b, "sink", CG_SHAPE(P_H), sink);
    if (s->owner) {
        p_cut(&p, s);
    } else {
        cg_value *cu = bench_i32(&p.b, "cu_seqlens", CG_SHAPE(s->n_segments + 1), s->cu_seqlens);
        cg_value *lengths = s->seqlens ? bench_i32(&p.b, "seqlens", CG_SHAPE(s->n_segments), s->seqlens) : NULL;
        p.rows = cg_segment_rows(g, cu, lengths, s->T, s->ratio, p.C);
        p.facts = p.rows.rows;
    }
    cg_keep(p.facts), cg_keep(p.rows.cu_compressed), cg_keep(p.rows.entries), cg_keep(p.rows.entry_positions);
    if (ckv) {
        p.ckv = bench_real(&p.b, "ckv", CG_SHAPE(p.C, P_D), ckv);
        p.k_index = bench_real(&p.b, "k_index", CG_SHAPE(p.C, P_DI), k_index);
    } else {
        p.ckv = cg_csa_compress(g, p.in[P_CONTENT], p.in[P_GATE], p.ape, p.rows.entries, p.rows.entry_positions,
                                s->ratio, true);
        p.k_index = cg_csa_compress(g, p.in[P_K_CONTENT], p.in[P_K_GATE], p.k_ape, p.rows.entries,
                                    p.rows.entry_positions, s->ratio, true);
    }
    p.topk = cg_keep(cg_indexer_topk(g, p.in[P_Q_INDEX], p.in[P_W], p.k_index, p.facts, s->topk));
    p.attention = cg_csa_attention(g, p.in[P_Q], p.in[P_KV], p.ckv, p.sink, p.topk, p.facts, s->window, 0.8,
                                   CG_TEACHER_FULL);
    const double coeff = s->coeff ? s->coeff : 1;
    if (s->dense) {
        p.loss = cg_indexer_dense_loss(g, p.in[P_Q_INDEX], p.in[P_W], p.k_index, cg_detach(g, p.in[P_Q]),
                                       cg_detach(g, p.ckv), p.attention.window_lse, NULL, p.facts, 0.8,
                                       CG_TEACHER_FULL, CG_REDUCE_SUM, coeff);
    } else {
        p.scores = cg_indexer_scores_at(g, p.in[P_Q_INDEX], p.in[P_W], p.k_index, p.topk);
        p.loss = cg_indexer_kl(g, p.scores, p.attention.teacher, p.facts, CG_REDUCE_SUM, coeff);
        cg_keep(p.attention.teacher);
    }
    p.kl = cg_keep(cg_output(p.loss, 1));
    cg_keep(p.loss), cg_keep(p.ckv), cg_keep(p.k_index), cg_keep(p.attention.lse);
    return p;
}

/* Backward of sum(out . dout) + loss. */
static inline void p_run(pipeline *p, const pipe_setup *s) {
    if (cg_graph_error(p->b.graph)) ck_abort_msg("%s", cg_graph_error(p->b.graph)->text);
    const int64_t n = s->T * P_H * P_D;
    double *dout = malloc(sizeof *dout * (size_t)(n + 1));
    const int *ids = s->dout_ids ? s->dout_ids : s->ids;
    for (int64_t i = 0; i < n; i++) {
        const int64_t t = i / (P_H * P_D), id = ids ? ids[t] : t;
        const bool mine = !s->owner || s->owner[t] == s->rank;
        dout[i] = id < 0 || !mine ? 0 : p_random(30, id * P_H * P_D + i % (P_H * P_D));
    }
    cg_value *weight = bench_constant(&p->b, "dout", p->attention.out->shape, dout);
    cg_keep(p->attention.out);
    cg_value *sum = cg_sum(p->b.graph, cg_mul(p->b.graph, p->attention.out, weight));
    bench_backward(&p->b, cg_add(p->b.graph, sum, p->loss), NULL);
    bench_run(&p->b);
    free(dout);
}

static inline pipeline p_whole(const pipe_setup *s) {
    pipeline p = p_build(s, NULL, NULL);
    p_run(&p, s);
    return p;
}

static inline double *p_get(pipeline *p, const cg_value *value) { return bench_get(&p->b, value); }
static inline double *p_grad(pipeline *p, int input) { return bench_grad(&p->b, p->in[input]); }
static inline int32_t p_fact(pipeline *p, int64_t t, int field) {
    return bench_get_i32(&p->b, p->facts)[t * CG_ROW_FIELDS + field];
}

/* Rows from..from+n-1 of two values have the same bits (0 and -0 are one). */
static inline void p_same(const char *what, const double *a, int64_t from_a, const double *b, int64_t from_b,
                          int64_t n, int64_t width) {
    for (int64_t i = 0; i < n * width; i++)
        if (a[from_a * width + i] != b[from_b * width + i])
            ck_abort_msg("%s: row %lld is not row %lld of the other run, %.17g against %.17g", what,
                         (long long)(from_a + i / width), (long long)(from_b + i / width),
                         a[from_a * width + i], b[from_b * width + i]);
}

/* n rows of b, from from_b on, are those of a: outputs, lists, kl and all gradients of row inputs. first: of the
 * compressed rows of the document in each. Gradients of what one row alone reads have the same bits; those of what
 * many read are sums whose grouping follows the number of rows, so with `grouped` they agree to rounding. */
static inline void p_same_rows(pipeline *a, int64_t from_a, int64_t first_a, pipeline *b, int64_t from_b,
                               int64_t first_b, int64_t n, int64_t topk, bool grouped) {
    const double bound = a->b.dtype == CG_F64 ? 1e-12 : 1e-4;
    p_same("out", p_get(a, a->attention.out), from_a, p_get(b, b->attention.out), from_b, n, P_H * P_D);
    p_same("lse", p_get(a, a->attention.lse), from_a, p_get(b, b->attention.lse), from_b, n, P_H);
    p_same("kl", p_get(a, a->kl), from_a, p_get(b, b->kl), from_b, n, 1);
    for (int i = 0; i < P_INPUTS; i++) {
        const double *da = p_grad(a, i), *db = p_grad(b, i);
        if (!grouped || i == P_Q || i == P_Q_INDEX || i == P_W)
            p_same("gradient", da, from_a, db, from_b, n, p_width[i]);
        else
            expect_close("gradient", da + from_a * p_width[i], db + from_b * p_width[i], n * p_width[i], bound);
    }
    const int32_t *la = bench_get_i32(&a->b, a->topk), *lb = bench_get_i32(&b->b, b->topk);
    for (int64_t i = 0; i < n * topk; i++) {
        const int32_t ja = la[from_a * topk + i], jb = lb[from_b * topk + i];
        ck_assert_int_eq(ja < 0 ? -1 : ja - first_a, jb < 0 ? -1 : jb - first_b);
    }
}

static inline void p_free(pipeline *p) { bench_free(&p->b); }

#endif
