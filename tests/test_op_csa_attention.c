/* Sparse attention and its teacher: stored vectors, and rows worked out by hand. Numbers named S.. are bug
 * reports turned into inputs with a known answer; which fault each one shows is said beside it. */
#include "tests/support.h"

static double bound_of(cg_dtype dtype) { return dtype == CG_F64 ? 1e-12 : 1e-5; }

#define FOR_REAL(dtype) for (cg_dtype dtype = CG_F32; dtype <= CG_F64; dtype++)

/* ---- stored vectors ---- */

/* How a file's rows are cut: segments, and where their compressed rows begin. */
typedef struct layout {
    int64_t T, C, batch, B; /* batch 0: packed already */
    int32_t cu_seqlens[16], seqlens[16], cu_compressed[16];
    int64_t ratio, window;
    double scale;
} layout;

static layout layout_of(const cg_safetensors *file) {
    layout l = {.ratio = (int64_t)golden_number(file, "ratio"),
                .window = (int64_t)golden_number(file, "window"),
                .scale = golden_number(file, "softmax_scale")};
    if (!strcmp(cg_safetensors_metadata(file, "layout"), "sbhd")) {
        int64_t steps = (int64_t)golden_number(file, "seq_len");
        l.B = l.batch = (int64_t)golden_number(file, "batch");
        for (int64_t b = 0; b < l.B; b++) {
            l.cu_seqlens[b + 1] = (int32_t)((b + 1) * steps);
            l.seqlens[b] = (int32_t)steps;
        }
    } else {
        l.B = cg_safetensors_find(file, "in.cu_seqlens_q")->shape.dims[0] - 1;
        int32_t *cu = golden_get_i32(file, "in.cu_seqlens_q");
        const bool padded = cg_safetensors_find(file, "in.cu_seqlens_q_real") != NULL;
        int32_t *real = golden_get_i32(file, padded ? "in.cu_seqlens_q_real" : "in.cu_seqlens_q");
        for (int64_t b = 0; b < l.B; b++) {
            l.cu_seqlens[b + 1] = cu[b + 1];
            l.seqlens[b] = real[b + 1] - real[b];
        }
        free(cu);
        free(real);
    }
    for (int64_t b = 0; b < l.B; b++)
        l.cu_compressed[b + 1] =
            l.cu_compressed[b] + (int32_t)((l.cu_seqlens[b + 1] - l.cu_seqlens[b]) / l.ratio);
    l.T = l.cu_seqlens[l.B];
    l.C = l.cu_compressed[l.B];
    return l;
}

static int64_t segment_of(const layout *l, int64_t t) {
    int64_t b = 0;
    while (t >= l->cu_seqlens[b + 1]) b++;
    return b;
}

/* Local indices of a file as rows of the packed array. */
static int32_t *global_indices(const cg_safetensors *file, const layout *l, const char *name, int64_t *K) {
    const cg_tensor *tensor = cg_safetensors_find(file, name);
    int32_t *index = golden_get_i32(file, name);
    *K = tensor->shape.dims[tensor->shape.n_dims - 1];
    for (int64_t t = 0; t < l->T; t++)
        for (int64_t k = 0; k < *K; k++)
            if (index[t * *K + k] >= 0) index[t * *K + k] += l->cu_compressed[segment_of(l, t)];
    return index;
}

/* [B, H, S] or [H, T] -> [T, H] */
static double *heads_last(const cg_safetensors *file, const layout *l, const char *name, int64_t H) {
    double *from = golden_get(file, name, 0), *to = malloc(sizeof(double) * (size_t)(l->T * H + 1));
    const int64_t batch = l->batch ? l->batch : 1, steps = l->T / batch;
    for (int64_t b = 0; b < batch; b++)
        for (int64_t h = 0; h < H; h++)
            for (int64_t s = 0; s < steps; s++) to[(b * steps + s) * H + h] = from[(b * H + h) * steps + s];
    free(from);
    return to;
}

/* The graph of a file: leaves and rows. */
typedef struct golden {
    bench b;
    layout l;
    cg_safetensors *file;
    cg_value *q, *kv, *ckv, *sink;
    cg_rows rows;
    int64_t H, D;
} golden;

static cg_value *real_leaf(golden *g, const char *name, const char *key, bool heads, bool compressed) {
    double *data = golden_get(g->file, key, g->l.batch);
    const int64_t n = compressed ? g->l.C : g->l.T;
    cg_value *leaf = bench_real(&g->b, name, heads ? CG_SHAPE(n, g->H, g->D) : CG_SHAPE(n, g->D), data);
    free(data);
    return leaf;
}

static golden golden_begin(const char *name, cg_dtype dtype) {
    golden g = {.b = bench_new(dtype), .file = golden_open(name)};
    g.l = layout_of(g.file);
    const cg_tensor *q = cg_safetensors_find(g.file, "in.query");
    g.H = q->shape.dims[q->shape.n_dims - 2];
    g.D = q->shape.dims[q->shape.n_dims - 1];
    g.q = real_leaf(&g, "q", "in.query", true, false);
    g.kv = real_leaf(&g, "kv", "in.kv", false, false);
    g.ckv = real_leaf(&g, "ckv", "in.compressed_kv", false, true);
    double *sink = golden_get(g.file, "in.sink", 0);
    g.sink = bench_real(&g.b, "sink", CG_SHAPE(g.H), sink);
    free(sink);
    cg_value *cu_seqlens = bench_i32(&g.b, "cu_seqlens", CG_SHAPE(g.l.B + 1), g.l.cu_seqlens);
    cg_value *seqlens = bench_i32(&g.b, "seqlens", CG_SHAPE(g.l.B), g.l.seqlens);
    g.rows = cg_segment_rows(g.b.graph, cu_seqlens, seqlens, g.l.T, g.l.ratio, g.l.C);
    return g;
}

static cg_value *topk_leaf(golden *g, const char *key) {
    int64_t K;
    int32_t *index = global_indices(g->file, &g->l, key, &K);
    cg_value *leaf = bench_i32(&g->b, key, CG_SHAPE(g->l.T, K), index);
    free(index);
    return leaf;
}

static void golden_end(golden *g) {
    cg_safetensors_close(g->file);
    bench_free(&g->b);
}

/* The oracle's tensor, else the float32 reference's, which bounds the comparison. */
static void expect_golden(golden *g, const char *what, const double *got, int64_t n, bool rows_first) {
    char key[128];
    snprintf(key, sizeof key, "oracle.%s", what);
    bool exact = cg_safetensors_find(g->file, key);
    if (!exact) snprintf(key, sizeof key, strncmp(what, "grad.", 5) ? "out.%s" : "%s", what);
    double *want = golden_get(g->file, key, rows_first ? g->l.batch : 0);
    expect_close(key, got, want, n, exact ? bound_of(g->b.dtype) : 1e-5);
    free(want);
}

static void attention_case(const char *name, const char *topk_key) {
    FOR_REAL(dtype) {
        golden g = golden_begin(name, dtype);
        cg_attention a = cg_csa_attention(g.b.graph, g.q, g.kv, g.ckv, g.sink, topk_leaf(&g, topk_key),
                                          g.rows.rows, g.l.window, g.l.scale, CG_TEACHER_NONE);
        double *dout = golden_get(g.file, "in.dout", g.l.batch);
        bench_backward(&g.b, a.out, dout);
        free(dout);
        bench_run(&g.b);
        expect_golden(&g, "output", bench_get(&g.b, a.out), g.l.T * g.H * g.D, true);
        expect_golden(&g, "grad.query", bench_grad(&g.b, g.q), g.l.T * g.H * g.D, true);
        expect_golden(&g, "grad.kv", bench_grad(&g.b, g.kv), g.l.T * g.D, true);
        expect_golden(&g, "grad.compressed_kv", bench_grad(&g.b, g.ckv), g.l.C * g.D, true);
        expect_golden(&g, "grad.sink", bench_grad(&g.b, g.sink), g.H, false);
        golden_end(&g);
    }
}

START_TEST(attention_of_a_batch) { attention_case("core_attention_sbhd", "in.topk"); }
END_TEST

START_TEST(attention_of_packed_segments) { attention_case("core_attention_thd", "in.topk"); }
END_TEST

START_TEST(attention_to_all_visible_rows) { attention_case("ratio128_dense", "in.attn_topk"); }
END_TEST

/* A stored target [rows, n] has a column per compressed row: of the segment in a batch, of all when packed. */
static double *target_at(golden *g, const char *key, const int32_t *index, int64_t K) {
    const cg_tensor *tensor = cg_safetensors_find(g->file, key);
    const int64_t n = tensor->shape.dims[tensor->shape.n_dims - 1];
    double *target = golden_get(g->file, key, 0), *at = malloc(sizeof(double) * (size_t)(g->l.T * K + 1));
    for (int64_t t = 0; t < g->l.T; t++)
        for (int64_t k = 0; k < K; k++) {
            int64_t j = index[t * K + k];
            if (g->l.batch) j -= g->l.cu_compressed[segment_of(&g->l, t)];
            at[t * K + k] = index[t * K + k] < 0 ? 0 : target[t * n + j];
        }
    free(target);
    return at;
}

static void expect_target(golden *g, const char *key, const cg_value *teacher, const cg_value *index) {
    const int64_t K = teacher->shape.dims[1];
    double *want = target_at(g, key, bench_get_i32(&g->b, index), K);
    expect_close(key, bench_get(&g->b, teacher), want, g->l.T * K, bound_of(g->b.dtype));
    free(want);
}

/* Every loss file: the log-sum of window and sink, and the teacher on its support, both ways that can be asked.
 */
START_TEST(window_lse_and_teacher_of_all_files) {
    const char *const files[] = {"sbhd_sparse_mean", "sbhd_dense_mean", "sbhd_sparse_sum",
                                 "thd_sparse_mean",  "thd_dense_sum",   "thd_padded_sparse_mean",
                                 "topk_boundary",    "ratio128_dense"};
    for (size_t f = 0; f < sizeof files / sizeof *files; f++) FOR_REAL(dtype) {
            golden g = golden_begin(files[f], dtype);
            bool sparse = !strcmp(cg_safetensors_metadata(g.file, "sparse"), "true");
            cg_value *topk = cg_keep(topk_leaf(&g, "out.topk"));
            cg_attention a = cg_csa_attention(g.b.graph, g.q, g.kv, g.ckv, g.sink, topk, g.rows.rows,
                                              g.l.window, g.l.scale, CG_TEACHER_FULL);
            cg_value *index = sparse ? topk : cg_keep(cg_visible_indices(g.b.graph, g.rows.rows, g.l.C));
            cg_value *at =
                cg_csa_teacher_at(g.b.graph, g.q, g.ckv, index, a.window_lse, NULL, g.l.scale, CG_TEACHER_FULL);
            cg_keep(at), cg_keep(a.window_lse), cg_keep(a.teacher);
            bench_run(&g.b);
            double *lse = heads_last(g.file, &g.l, "oracle.non_compressed_lse", g.H);
            expect_close(files[f], bench_get(&g.b, a.window_lse), lse, g.l.T * g.H, bound_of(dtype));
            free(lse);
            expect_target(&g, "oracle.target", at, index);
            if (sparse) expect_target(&g, "oracle.target", a.teacher, topk);
            golden_end(&g);
        }
}
END_TEST

static const struct {
    const char *name;
    cg_teacher mode;
} modes[] = {{"full", CG_TEACHER_FULL}, {"sink", CG_TEACHER_SINK}, {"compressed", CG_TEACHER_COMPRESSED}};

START_TEST(teacher_of_each_mode) {
    for (int m = 0; m < 3; m++) FOR_REAL(dtype) {
            golden g = golden_begin("teacher_modes", dtype);
            const cg_teacher mode = modes[m].mode;
            cg_value *topk = cg_keep(topk_leaf(&g, "out.topk"));
            cg_attention a = cg_csa_attention(g.b.graph, g.q, g.kv, g.ckv, g.sink, topk, g.rows.rows,
                                              g.l.window, g.l.scale, mode);
            cg_value *lse = mode == CG_TEACHER_FULL ? a.window_lse : NULL;
            cg_value *sink = mode == CG_TEACHER_SINK ? g.sink : NULL;
            cg_value *visible = cg_keep(cg_visible_indices(g.b.graph, g.rows.rows, g.l.C));
            cg_value *dense = cg_csa_teacher_at(g.b.graph, g.q, g.ckv, visible, lse, sink, g.l.scale, mode);
            cg_value *sparse = cg_csa_teacher_at(g.b.graph, g.q, g.ckv, topk, lse, sink, g.l.scale, mode);
            cg_keep(dense), cg_keep(sparse), cg_keep(a.teacher);
            bench_run(&g.b);
            char key[64];
            snprintf(key, sizeof key, "oracle.target_%s_dense", modes[m].name);
            expect_target(&g, key, dense, visible);
            snprintf(key, sizeof key, "oracle.target_%s_sparse", modes[m].name);
            expect_target(&g, key, sparse, topk);
            expect_target(&g, key, a.teacher, topk);
            golden_end(&g);
        }
}
END_TEST

/* Two heads with opposite tastes and two visible rows: what moves the target shows the denominator. */
static void pair_case(cg_dtype dtype, cg_teacher mode, const char *sink_key, const char *kv_key, bool single,
                      const char *want_key) {
    cg_safetensors *file = golden_open("teacher_modes");
    bench b = bench_new(dtype);
    const int64_t T = 8, D = 2, H = single ? 1 : 2, row = (int64_t)golden_number(file, "pair_row");
    double *query = golden_get(file, "pair.query", 0), *kv = golden_get(file, kv_key, 0);
    double *ckv = golden_get(file, "pair.compressed_kv", 0), *sink = golden_get(file, sink_key, 0);
    double *want = golden_get(file, want_key, 0), q[32];
    for (int64_t t = 0; t < T; t++) memcpy(q + t * H * D, query + t * 2 * D, sizeof(double) * (size_t)(H * D));
    cg_value *cu_seqlens = bench_i32(&b, "cu_seqlens", CG_SHAPE(2), (int32_t[]){0, 8});
    cg_rows rows = cg_segment_rows(b.graph, cu_seqlens, NULL, T, (int64_t)golden_number(file, "pair_ratio"), 2);
    cg_value *topk = cg_visible_indices(b.graph, rows.rows, (int64_t)golden_number(file, "pair_topk"));
    cg_attention a = cg_csa_attention(
        b.graph, bench_real(&b, "q", CG_SHAPE(T, H, D), q), bench_real(&b, "kv", CG_SHAPE(T, D), kv),
        bench_real(&b, "ckv", CG_SHAPE(2, D), ckv), bench_real(&b, "sink", CG_SHAPE(H), sink), topk, rows.rows,
        (int64_t)golden_number(file, "pair_window"), golden_number(file, "pair_softmax_scale"), mode);
    cg_keep(a.teacher);
    bench_run(&b);
    expect_close(want_key, bench_get(&b, a.teacher) + row * 2, want, 2, bound_of(dtype));
    bench_free(&b);
    free(query), free(kv), free(ckv), free(sink), free(want);
    cg_safetensors_close(file);
}

START_TEST(teacher_of_two_heads_moves_with_its_denominator) {
    static const struct {
        const char *name, *sink, *kv;
    } changes[] = {{"a", "pair.sink_a", "pair.kv_a"},
                   {"sink_b", "pair.sink_b", "pair.kv_a"},
                   {"kv_b", "pair.sink_a", "pair.kv_b"}};
    FOR_REAL(dtype) {
        for (int c = 0; c < 3; c++) {
            char key[64];
            for (int m = 0; m < 3; m++) {
                snprintf(key, sizeof key, "oracle.pair.target_%s_%s", modes[m].name, changes[c].name);
                pair_case(dtype, modes[m].mode, changes[c].sink, changes[c].kv, false, key);
            }
            snprintf(key, sizeof key, "oracle.pair.target_single_%s", changes[c].name);
            pair_case(dtype, CG_TEACHER_FULL, changes[c].sink, changes[c].kv, true, key);
        }
        pair_case(dtype, CG_TEACHER_FULL, "pair.sink_tiny", "pair.kv_a", false, "oracle.pair.target_tiny");
    }
}
END_TEST

/* ---- rows by hand ---- */

/* Rows that each see the same n keys and nothing else: window 0, one segment. */
typedef struct by_hand {
    int64_t T, H, D, C, K;
    const double *q, *ckv, *sink, *dout;
    const int32_t *topk;
    double scale;
} by_hand;

typedef struct answer {
    bench b;
    double *out, *lse, *dq, *dckv, *dsink;
} answer;

static answer answer_of(cg_dtype dtype, const by_hand *x) {
    answer a = {.b = bench_new(dtype)};
    int32_t *rows = malloc(sizeof(int32_t) * (size_t)(x->T * CG_ROW_FIELDS));
    for (int64_t t = 0; t < x->T; t++) {
        int32_t row[CG_ROW_FIELDS] = {0, (int32_t)t, 0, (int32_t)x->C, 1};
        memcpy(rows + t * CG_ROW_FIELDS, row, sizeof row);
    }
    cg_value *q = bench_real(&a.b, "q", CG_SHAPE(x->T, x->H, x->D), x->q);
    cg_value *kv = bench_real(&a.b, "kv", CG_SHAPE(x->T, x->D), NULL);
    cg_value *ckv = bench_real(&a.b, "ckv", CG_SHAPE(x->C, x->D), x->ckv);
    cg_value *sink = bench_real(&a.b, "sink", CG_SHAPE(x->H), x->sink);
    cg_value *topk = bench_i32(&a.b, "topk", CG_SHAPE(x->T, x->K), x->topk);
    cg_value *facts = bench_i32(&a.b, "rows", CG_SHAPE(x->T, CG_ROW_FIELDS), rows);
    free(rows);
    cg_attention attention =
        cg_csa_attention(a.b.graph, q, kv, ckv, sink, topk, facts, 0, x->scale, CG_TEACHER_NONE);
    cg_keep(attention.lse);
    bench_backward(&a.b, attention.out, x->dout);
    bench_run(&a.b);
    a.out = bench_get(&a.b, attention.out);
    a.lse = bench_get(&a.b, attention.lse);
    a.dq = bench_grad(&a.b, q);
    a.dckv = bench_grad(&a.b, ckv);
    a.dsink = bench_grad(&a.b, sink);
    return a;
}

static const double s12_keys[] = {1, 0, 0, 3, 5, 7, NAN, INFINITY};
static const by_hand s12 = {.T = 1,
                            .H = 1,
                            .D = 2,
                            .C = 2,
                            .K = 2,
                            .q = (const double[]){1, 0.5},
                            .ckv = s12_keys,
                            .sink = (const double[]){0.25},
                            .dout = (const double[]){1, 3},
                            .topk = (const int32_t[]){0, 1},
                            .scale = 0.5};

/* The printed digits end at 1e-10. */
static double digits(cg_dtype dtype) { return dtype == CG_F64 ? 1e-10 : 2e-6; }

static void expect_s12(cg_dtype dtype, const answer *a, int64_t C) {
    const double bound = digits(dtype), none[8] = {0};
    expect_close("out", a->out, (const double[]){0.3264958358, 1.2576868548}, 2, bound);
    expect_close("lse", a->lse, (const double[]){1.6193380844}, 1, bound);
    expect_close("dq", a->dq, (const double[]){-0.5059961288, 3.0816117491}, 2, bound);
    expect_close("dckv", a->dckv, (const double[]){-0.1795002930, 0.7264894430, 1.4464328680, 1.7712888130}, 4,
                 bound);
    expect_close("dsink", a->dsink, (const double[]){-1.0424155752}, 1, bound);
    ck_assert_mem_eq(a->dckv + 4, none, sizeof(double) * (size_t)(2 * (C - 2)));
}

/* S12: the weights of backward include the sink, and a key is also a value. */
START_TEST(one_row) {
    FOR_REAL(dtype) {
        answer a = answer_of(dtype, &s12);
        expect_s12(dtype, &a, 2);
        bench_free(&a.b);
    }
}
END_TEST

/* S13: however many empty places come first, or between. */
START_TEST(empty_places_come_first) {
    static const int sizes[] = {1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129};
    FOR_REAL(dtype)
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int between = 0; between < 2; between++) {
            int32_t topk[132];
            for (int k = 0; k < 132; k++) topk[k] = -1;
            topk[between ? 0 : sizes[i]] = 0;
            topk[sizes[i] + 1] = 1;
            by_hand x = s12;
            x.topk = topk;
            x.K = sizes[i] + 2;
            answer a = answer_of(dtype, &x);
            expect_s12(dtype, &a, 2);
            bench_free(&a.b);
        }
}
END_TEST

/* S14: -1 is no address. S16: what no index names may hold anything. */
START_TEST(unnamed_rows_do_not_matter) {
    const double garbage[] = {1, 0, 0, 3, NAN, INFINITY};
    FOR_REAL(dtype) for (int64_t K = 2; K <= 4; K++) for (int bad = 0; bad < 2; bad++) {
        by_hand x = s12;
        x.C = 3;
        x.K = K;
        x.topk = (const int32_t[]){0, 1, -1, -1};
        if (bad) x.ckv = garbage;
        answer a = answer_of(dtype, &x), plain = answer_of(dtype, &s12);
        expect_s12(dtype, &a, 3);
        ck_assert_mem_eq(a.dckv, plain.dckv, 4 * sizeof(double));
        ck_assert_mem_eq(a.out, plain.out, 2 * sizeof(double));
        ck_assert_mem_eq(a.dq, plain.dq, 2 * sizeof(double));
        bench_free(&a.b);
        bench_free(&plain.b);
    }
}
END_TEST

/* S11: 0 / 0 and exp(-inf - -inf) on a row that sees nothing. */
START_TEST(a_row_that_sees_nothing) {
    const double none[4] = {0};
    FOR_REAL(dtype) for (int infinite = 0; infinite < 2; infinite++) {
        by_hand x = s12;
        x.topk = (const int32_t[]){-1, -1};
        x.sink = infinite ? (const double[]){-INFINITY} : (const double[]){0.7};
        answer a = answer_of(dtype, &x);
        ck_assert_mem_eq(a.out, none, 2 * sizeof(double));
        ck_assert(a.lse[0] == (dtype == CG_F32 ? (float)x.sink[0] : x.sink[0]));
        ck_assert_mem_eq(a.dq, none, 2 * sizeof(double));
        ck_assert_mem_eq(a.dckv, none, 4 * sizeof(double));
        ck_assert(a.dsink[0] == 0);
        bench_free(&a.b);
    }
}
END_TEST

/* The same row in a batch: the others keep their bits. Also a row whose output gradient is 0 gives nothing. */
START_TEST(an_empty_row_among_others) {
    enum { T = 6 };
    double q[T * 2], dout[T * 2], ckv[4];
    int32_t full[T * 2], holed[T * 2];
    for (int i = 0; i < T * 2; i++) {
        q[i] = sin(i + 1.0);
        dout[i] = cos(3.0 * i);
        full[i] = holed[i] = i % 2;
        if (i < 4) ckv[i] = sin(7.0 * i + 2);
    }
    holed[6] = holed[7] = -1;
    FOR_REAL(dtype) {
        by_hand x = {.T = T,
                     .H = 1,
                     .D = 2,
                     .C = 2,
                     .K = 2,
                     .q = q,
                     .ckv = ckv,
                     .sink = (double[]){-INFINITY},
                     .dout = dout,
                     .topk = full,
                     .scale = 1};
        answer a = answer_of(dtype, &x);
        x.topk = holed;
        answer b = answer_of(dtype, &x);
        dout[6] = dout[7] = 0;
        answer c = answer_of(dtype, &x);
        x.topk = full;
        answer d = answer_of(dtype, &x);
        dout[6] = cos(18.0), dout[7] = cos(21.0);
        for (int t = 0; t < T; t++)
            for (int i = 2 * t; i < 2 * t + 2; i++) {
                ck_assert(t == 3 ? b.out[i] == 0 : b.out[i] == a.out[i]);
                ck_assert(t == 3 ? b.dq[i] == 0 : b.dq[i] == a.dq[i]);
            }
        ck_assert_mem_eq(c.dckv, b.dckv, 4 * sizeof(double));
        ck_assert_mem_eq(d.dckv, b.dckv, 4 * sizeof(double));
        ck_assert(c.dsink[0] == b.dsink[0] && d.dsink[0] == b.dsink[0]);
        bench_free(&a.b), bench_free(&b.b), bench_free(&c.b), bench_free(&d.b);
    }
}
END_TEST

/* S15: queries that chose the same rows, in another order; then a thousand of one row. */
START_TEST(several_queries_choose_one_row) {
    enum { MANY = 1000 };
    FOR_REAL(dtype) {
        by_hand x = s12;
        x.T = 2;
        x.q = (const double[]){1, 0.5, 0, 1};
        x.topk = (const int32_t[]){0, 1, 1, 0};
        x.dout = (const double[]){1, 3, 1, 3};
        answer a = answer_of(dtype, &x);
        expect_close("dckv", a.dckv, (const double[]){-0.0316962433, 0.7922984427, 2.1088446619, 4.7158714633},
                     4, digits(dtype));
        bench_free(&a.b);

        double q[2 * MANY], dout[2 * MANY];
        int32_t topk[MANY] = {0};
        for (int t = 0; t < MANY; t++) memcpy(q + 2 * t, s12.q, 16), memcpy(dout + 2 * t, s12.dout, 16);
        by_hand one = s12, many = {.T = MANY,
                                   .H = 1,
                                   .D = 2,
                                   .C = 2,
                                   .K = 1,
                                   .q = q,
                                   .ckv = s12_keys,
                                   .sink = s12.sink,
                                   .dout = dout,
                                   .topk = topk,
                                   .scale = 0.5};
        one.K = 1;
        one.topk = topk;
        answer single = answer_of(dtype, &one);
        cg_error error = {0};
        answer all[2];
        for (int n = 0; n < 2; n++) {
            ck_assert(cg_threads_set(n ? cg_thread_slots() : 1, &error));
            all[n] = answer_of(dtype, &many);
        }
        for (int i = 0; i < 4; i++) single.dckv[i] *= MANY;
        single.dsink[0] *= MANY;
        expect_close("dckv", all[0].dckv, single.dckv, 4, dtype == CG_F64 ? 1e-12 : 1e-5);
        expect_close("dsink", all[0].dsink, single.dsink, 1, dtype == CG_F64 ? 1e-12 : 1e-5);
        ck_assert_mem_eq(all[0].dckv, all[1].dckv, 4 * sizeof(double));
        ck_assert_mem_eq(all[0].dsink, all[1].dsink, sizeof(double));
        bench_free(&single.b), bench_free(&all[0].b), bench_free(&all[1].b);
    }
}
END_TEST

/* ---- packed rows ---- */

/* A whole small attention over segments; every row lists all it sees. */
typedef struct packed {
    bench b;
    cg_value *q, *kv, *ckv, *sink;
    cg_rows rows;
    cg_attention a;
} packed;

/* Real lengths as the physical ones when seqlens is NULL. A value depends on its row and channel alone. */
static packed packed_run(cg_dtype dtype, const int32_t *cu_seqlens, int64_t B, int64_t T, int64_t ratio,
                         int64_t C, int64_t window, const double *dout, const int32_t *topk, int64_t K) {
    enum { H = 2, D = 3, MOST = 64 };
    packed p = {.b = bench_new(dtype)};
    double q[MOST * H * D], kv[MOST * D], ckv[MOST * D], ones[MOST * H * D];
    ck_assert_int_le(T, MOST);
    for (int i = 0; i < MOST * H * D; i++) q[i] = sin(1.0 + 5 * i), ones[i] = cos(2.0 * i);
    for (int i = 0; i < MOST * D; i++) kv[i] = cos(3.0 + 7 * i), ckv[i] = sin(4.0 + 11 * i);
    p.q = bench_real(&p.b, "q", CG_SHAPE(T, H, D), q);
    p.kv = bench_real(&p.b, "kv", CG_SHAPE(T, D), kv);
    p.ckv = bench_real(&p.b, "ckv", CG_SHAPE(C, D), ckv);
    p.sink = bench_real(&p.b, "sink", CG_SHAPE(H), (const double[]){0.3, -0.4});
    p.rows = cg_segment_rows(p.b.graph, bench_i32(&p.b, "cu_seqlens", CG_SHAPE(B + 1), cu_seqlens), NULL, T,
                             ratio, C);
    cg_keep(p.rows.rows), cg_keep(p.rows.cu_compressed);
    cg_value *index =
        topk ? bench_i32(&p.b, "topk", CG_SHAPE(T, K), topk) : cg_visible_indices(p.b.graph, p.rows.rows, C);
    p.a =
        cg_csa_attention(p.b.graph, p.q, p.kv, p.ckv, p.sink, index, p.rows.rows, window, 0.8, CG_TEACHER_FULL);
    cg_keep(p.a.teacher), cg_keep(p.a.lse);
    bench_backward(&p.b, p.a.out, dout ? dout : ones);
    bench_run(&p.b);
    return p;
}

static void expect_same(packed *a, packed *b, const cg_value *va, const cg_value *vb, int64_t n) {
    ck_assert_mem_eq(bench_get(&a->b, va), bench_get(&b->b, vb), sizeof(double) * (size_t)n);
}

static void expect_same_grad(packed *a, packed *b, const cg_value *va, const cg_value *vb, int64_t n) {
    ck_assert_mem_eq(bench_grad(&a->b, va), bench_grad(&b->b, vb), sizeof(double) * (size_t)n);
}

/* S29: an empty segment changes nothing, wherever it stands. */
START_TEST(empty_segments) {
    FOR_REAL(dtype) {
        packed plain = packed_run(dtype, (int32_t[]){0, 4, 9}, 2, 9, 4, 2, 2, NULL, NULL, 0);
        packed holed = packed_run(dtype, (int32_t[]){0, 4, 4, 9}, 3, 9, 4, 2, 2, NULL, NULL, 0);
        const int32_t *cu = bench_get_i32(&holed.b, holed.rows.cu_compressed);
        ck_assert_mem_eq(cu, ((int32_t[]){0, 1, 1, 2}), 4 * sizeof(int32_t));
        const int32_t *rows = bench_get_i32(&holed.b, holed.rows.rows);
        static const int32_t visible[] = {0, 0, 0, 1, 0, 0, 0, 1, 1};
        for (int t = 0; t < 9; t++) ck_assert_int_eq(rows[t * CG_ROW_FIELDS + CG_ROW_VISIBLE], visible[t]);
        for (int t = 4; t < 9; t++) {
            ck_assert_int_eq(rows[t * CG_ROW_FIELDS + CG_ROW_START], 4);
            ck_assert_int_eq(rows[t * CG_ROW_FIELDS + CG_ROW_POSITION], t - 4);
            ck_assert_int_eq(rows[t * CG_ROW_FIELDS + CG_ROW_COMPRESSED], 1);
        }
        expect_same(&plain, &holed, plain.a.out, holed.a.out, 54);
        expect_same(&plain, &holed, plain.a.teacher, holed.a.teacher, 18);
        expect_same_grad(&plain, &holed, plain.kv, holed.kv, 27);
        expect_same_grad(&plain, &holed, plain.ckv, holed.ckv, 6);
        bench_free(&plain.b), bench_free(&holed.b);

        packed whole = packed_run(dtype, (int32_t[]){0, 9}, 1, 9, 4, 2, 2, NULL, NULL, 0);
        packed first = packed_run(dtype, (int32_t[]){0, 0, 9}, 2, 9, 4, 2, 2, NULL, NULL, 0);
        packed last = packed_run(dtype, (int32_t[]){0, 9, 9}, 2, 9, 4, 2, 2, NULL, NULL, 0);
        packed nothing = packed_run(dtype, (int32_t[]){0, 0}, 1, 0, 4, 0, 2, NULL, NULL, 0);
        expect_same(&whole, &first, whole.a.out, first.a.out, 54);
        expect_same(&whole, &last, whole.a.out, last.a.out, 54);
        bench_free(&whole.b), bench_free(&first.b), bench_free(&last.b), bench_free(&nothing.b);
    }
}
END_TEST

/* S30: rows behind the last segment. */
START_TEST(rows_behind_the_last_segment) {
    const double none[12] = {0};
    FOR_REAL(dtype) {
        packed a = packed_run(dtype, (int32_t[]){0, 3, 5}, 2, 5, 2, 2, 2, NULL, NULL, 0);
        packed b = packed_run(dtype, (int32_t[]){0, 3, 5}, 2, 7, 2, 2, 2, NULL, NULL, 0);
        expect_same(&a, &b, a.a.out, b.a.out, 30);
        expect_same_grad(&a, &b, a.q, b.q, 30);
        expect_same_grad(&a, &b, a.kv, b.kv, 15);
        expect_same_grad(&a, &b, a.ckv, b.ckv, 6);
        expect_same_grad(&a, &b, a.sink, b.sink, 2);
        ck_assert_mem_eq(bench_get(&b.b, b.a.out) + 30, none, sizeof none);
        ck_assert_mem_eq(bench_grad(&b.b, b.q) + 30, none, sizeof none);
        ck_assert_mem_eq(bench_grad(&b.b, b.kv) + 15, none, 6 * sizeof(double));
        double *lse = bench_get(&b.b, b.a.lse), sink = dtype == CG_F32 ? (double)0.3f : 0.3;
        ck_assert(lse[10] == sink && lse[12] == sink);
        bench_free(&a.b), bench_free(&b.b);
    }
}
END_TEST

/* S45: segments of one token are segments. */
START_TEST(segments_of_one_token) {
    FOR_REAL(dtype) {
        packed p = packed_run(dtype, (int32_t[]){0, 3, 4, 5, 7}, 4, 7, 2, 2, 2, NULL, NULL, 0);
        ck_assert_mem_eq(bench_get_i32(&p.b, p.rows.cu_compressed), ((int32_t[]){0, 1, 1, 1, 2}),
                         5 * sizeof(int32_t));
        const int32_t *rows = bench_get_i32(&p.b, p.rows.rows);
        static const int32_t positions[] = {0, 1, 2, 0, 0, 0, 1}, visible[] = {0, 1, 1, 0, 0, 0, 1};
        for (int t = 0; t < 7; t++) {
            ck_assert_int_eq(rows[t * CG_ROW_FIELDS + CG_ROW_POSITION], positions[t]);
            ck_assert_int_eq(rows[t * CG_ROW_FIELDS + CG_ROW_VISIBLE], visible[t]);
        }
        ck_assert_int_eq(rows[6 * CG_ROW_FIELDS + CG_ROW_COMPRESSED], 1);
        /* a lone token sees itself and the sink: out = kv exp(x) / (exp(x) + exp(sink)) */
        const double *out = bench_get(&p.b, p.a.out);
        for (int t = 3; t < 5; t++)
            for (int h = 0; h < 2; h++) {
                double x = 0, want[3];
                for (int d = 0; d < 3; d++)
                    x += 0.8 * sin(1.0 + 5 * ((t * 2 + h) * 3 + d)) * cos(3.0 + 7 * (t * 3 + d));
                double weight = 1 / (1 + exp((h ? -0.4 : 0.3) - x));
                for (int d = 0; d < 3; d++) want[d] = weight * cos(3.0 + 7 * (t * 3 + d));
                expect_close("out", out + (t * 2 + h) * 3, want, 3, dtype == CG_F64 ? 1e-12 : 1e-5);
            }
        bench_free(&p.b);
    }
}
END_TEST

/* S18: each row attends to its own choice. dout on one row only, so what it does not see gets exactly nothing.
 */
START_TEST(choices_are_not_shared) {
    static const int32_t topk[] = {-1, -1, -1, 0, 0, 0, 0, 1};
    FOR_REAL(dtype) for (int row = 6; row < 8; row++) {
        double dout[48] = {0};
        for (int i = 0; i < 6; i++) dout[row * 6 + i] = 1 + i;
        packed p = packed_run(dtype, (int32_t[]){0, 8}, 1, 8, 4, 2, 1, dout, topk, 1);
        const double *dckv = bench_grad(&p.b, p.ckv);
        for (int d = 0; d < 3; d++) {
            ck_assert(dckv[(row == 6 ? 3 : 0) + d] == 0);
            ck_assert(dckv[(row == 6 ? 0 : 3) + d] != 0);
        }
        /* one call of n rows, n calls of one row */
        for (int64_t t = 1; t <= 8; t++) {
            packed part = packed_run(dtype, (int32_t[]){0, (int32_t)t}, 1, t, 4, 2, 1, dout, topk, 1);
            expect_same(&p, &part, p.a.out, part.a.out, t * 6);
            bench_free(&part.b);
        }
        bench_free(&p.b);
    }
}
END_TEST

/* S17: a group is visible from its last token on. */
START_TEST(visible_counts) {
    packed p = packed_run(CG_F64, (int32_t[]){0, 12}, 1, 12, 4, 3, 1, NULL, NULL, 0);
    static const int32_t visible[] = {0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3};
    for (int t = 0; t < 12; t++)
        ck_assert_int_eq(bench_get_i32(&p.b, p.rows.rows)[t * CG_ROW_FIELDS + CG_ROW_VISIBLE], visible[t]);
    bench_free(&p.b);
}
END_TEST

/* S16: padding may hold anything. Segment of 6 physical and 4 real rows; what the padding rows hold and see is
 * NaN, and their output gradient is 0. */
START_TEST(padding_may_hold_anything) {
    enum { T = 9, H = 2, D = 3, C = 4 };
    static const int32_t cu_seqlens[] = {0, 6, 9}, seqlens[] = {4, 3};
    FOR_REAL(dtype) {
        double *first[6] = {0};
        bench benches[2];
        for (int bad = 0; bad < 2; bad++) {
            bench b = bench_new(dtype);
            double q[T * H * D], kv[T * D], ckv[C * D], dout[T * H * D];
            for (int i = 0; i < T * H * D; i++) {
                bool padding = i / (H * D) == 4 || i / (H * D) == 5;
                q[i] = padding && bad ? NAN : sin(1.0 + i);
                dout[i] = padding ? 0 : cos(2.0 * i);
            }
            for (int i = 0; i < T * D; i++) kv[i] = bad && (i / D == 4 || i / D == 5) ? INFINITY : cos(5.0 * i);
            for (int i = 0; i < C * D; i++) ckv[i] = bad && i / D == 2 ? NAN : sin(3.0 * i); /* rows 4 and 5 */
            cg_value *vq = bench_real(&b, "q", CG_SHAPE(T, H, D), q),
                     *vkv = bench_real(&b, "kv", CG_SHAPE(T, D), kv);
            cg_value *vckv = bench_real(&b, "ckv", CG_SHAPE(C, D), ckv);
            cg_value *sink = bench_real(&b, "sink", CG_SHAPE(H), (const double[]){0.5, -0.5});
            cg_rows rows = cg_segment_rows(b.graph, bench_i32(&b, "cu_seqlens", CG_SHAPE(3), cu_seqlens),
                                           bench_i32(&b, "seqlens", CG_SHAPE(2), seqlens), T, 2, C);
            cg_attention a =
                cg_csa_attention(b.graph, vq, vkv, vckv, sink, cg_visible_indices(b.graph, rows.rows, C),
                                 rows.rows, 3, 0.7, CG_TEACHER_FULL);
            cg_keep(a.teacher);
            bench_backward(&b, a.out, dout);
            bench_run(&b);
            double *now[] = {bench_get(&b, a.out), bench_get(&b, a.teacher), bench_grad(&b, vq),
                             bench_grad(&b, vkv),  bench_grad(&b, vckv),     bench_grad(&b, sink)};
            const int widths[] = {H * D, C, H * D, D, D, H}, counts[] = {T, T, T, T, C, 1};
            for (int k = 0; k < 6; k++) {
                for (int r = 0; bad && r < counts[k];
                     r++) /* of the outputs the real rows, of the gradients all */
                    if (k > 0 || (r != 4 && r != 5))
                        ck_assert_mem_eq(now[k] + r * widths[k], first[k] + r * widths[k],
                                         sizeof(double) * (size_t)widths[k]);
                if (!bad) first[k] = now[k];
            }
            benches[bad] = b;
        }
        bench_free(&benches[0]), bench_free(&benches[1]);
    }
}
END_TEST

/* ---- against the equations, in sizes that fill every block ---- */

typedef struct plain_result {
    double *out, *teacher, *dq, *dkv, *dckv, *dsink;
} plain_result;

/* One segment, one loop after the other, nothing shared with the kernels. */
static plain_result plain_attention(int64_t T, int64_t H, int64_t D, int64_t C, int64_t K, int64_t W,
                                    double scale, const double *q, const double *kv, const double *ckv,
                                    const double *sink, const int32_t *topk, const double *dout) {
    const int64_t most = W + K;
    plain_result r = {.out = calloc((size_t)(T * H * D), 8),
                      .teacher = calloc((size_t)(T * K), 8),
                      .dq = calloc((size_t)(T * H * D), 8),
                      .dkv = calloc((size_t)(T * D), 8),
                      .dckv = calloc((size_t)(C * D), 8),
                      .dsink = calloc((size_t)H, 8)};
    double *x = calloc((size_t)most, 8);
    for (int64_t t = 0; t < T; t++) {
        double mass = 0;
        for (int64_t h = 0; h < H; h++) {
            const double *qh = q + (t * H + h) * D, *g = dout + (t * H + h) * D;
            double *o = r.out + (t * H + h) * D, *dqh = r.dq + (t * H + h) * D, sum = exp(sink[h]), gp = 0;
            for (int pass = 0; pass < 3; pass++) {
                int64_t low = t - W + 1 > 0 ? t - W + 1 : 0, n = t - low + 1 + K;
                for (int64_t i = 0; i < n; i++) {
                    int64_t k = i - (n - K), j = k < 0 ? low + i : topk[t * K + k];
                    if (j < 0) continue;
                    const double *key = (k < 0 ? kv : ckv) + j * D;
                    double *dkey = (k < 0 ? r.dkv : r.dckv) + j * D, dp = 0;
                    if (pass == 0) {
                        x[i] = 0;
                        for (int64_t d = 0; d < D; d++) x[i] += scale * qh[d] * key[d];
                        sum += exp(x[i]);
                        continue;
                    }
                    double p = exp(x[i]) / sum;
                    for (int64_t d = 0; d < D; d++) dp += g[d] * key[d];
                    if (pass == 1) {
                        for (int64_t d = 0; d < D; d++) o[d] += p * key[d];
                        gp += p * dp;
                        if (k >= 0) r.teacher[t * K + k] += p, mass += p;
                        continue;
                    }
                    for (int64_t d = 0; d < D; d++) {
                        dqh[d] += scale * p * (dp - gp) * key[d];
                        dkey[d] += p * g[d] + scale * p * (dp - gp) * qh[d];
                    }
                }
            }
            r.dsink[h] -= exp(sink[h]) / sum * gp;
        }
        for (int64_t k = 0; k < K && mass > 0; k++) r.teacher[t * K + k] /= mass;
    }
    free(x);
    return r;
}

START_TEST(as_the_equations_say) {
    static const struct {
        int64_t T, H, D, C, K, W;
    } sizes[] = {{70, 3, 7, 17, 5, 9},     {40, 1, 1, 10, 3, 1},      {300, 5, 19, 75, 6, 100},
                 {40, 9, 130, 10, 10, 40}, {200, 2, 37, 50, 33, 160}, {33, 16, 64, 8, 8, 16},
                 {36, 17, 261, 9, 7, 30},  {20, 33, 96, 5, 5, 8},     {18, 70, 160, 4, 3, 5},
                 {150, 4, 32, 37, 37, 8},  {40, 6, 530, 10, 4, 135}};
    FOR_REAL(dtype) for (size_t c = 0; c < sizeof sizes / sizeof *sizes; c++) {
        const int64_t T = sizes[c].T, H = sizes[c].H, D = sizes[c].D, C = sizes[c].C, K = sizes[c].K,
                      W = sizes[c].W;
        const double scale = 1 / sqrt((double)D);
        double *q = malloc(8 * (size_t)(T * H * D)), *dout = malloc(8 * (size_t)(T * H * D));
        double *kv = malloc(8 * (size_t)(T * D)), *ckv = malloc(8 * (size_t)(C * D)),
               *sink = malloc(8 * (size_t)H);
        int32_t *topk = malloc(4 * (size_t)(T * K)), *rows = malloc(4 * (size_t)(T * CG_ROW_FIELDS));
        for (int64_t i = 0; i < T * H * D; i++)
            q[i] = (float)(1.4 * sin(1 + 0.7 * (double)i)), dout[i] = (float)cos(2.3 * (double)i);
        for (int64_t i = 0; i < T * D; i++) kv[i] = (float)(1.4 * cos(1.9 * (double)i));
        for (int64_t i = 0; i < C * D; i++) ckv[i] = (float)(1.4 * sin(3.1 * (double)i));
        for (int64_t h = 0; h < H; h++) sink[h] = (float)cos((double)h);
        for (int64_t t = 0; t < T; t++) {
            const int64_t visible = (t + 1) / 4 < C ? (t + 1) / 4 : C;
            memcpy(rows + t * CG_ROW_FIELDS, (int32_t[]){0, (int32_t)t, 0, (int32_t)visible, 1}, 20);
            for (int64_t k = 0; k < K; k++)
                topk[t * K + k] = visible == 0 || (t + k) % 5 == 4 ? -1 : (int32_t)((3 * t + 7 * k) % visible);
        }
        bench b = bench_new(dtype);
        cg_value *vq = bench_real(&b, "q", CG_SHAPE(T, H, D), q),
                 *vkv = bench_real(&b, "kv", CG_SHAPE(T, D), kv);
        cg_value *vckv = bench_real(&b, "ckv", CG_SHAPE(C, D), ckv),
                 *vsink = bench_real(&b, "sink", CG_SHAPE(H), sink);
        cg_attention a = cg_csa_attention(
            b.graph, vq, vkv, vckv, vsink, bench_i32(&b, "topk", CG_SHAPE(T, K), topk),
            bench_i32(&b, "rows", CG_SHAPE(T, CG_ROW_FIELDS), rows), W, scale, CG_TEACHER_FULL);
        cg_keep(a.teacher);
        bench_backward(&b, a.out, dout);
        bench_run(&b);
        plain_result want = plain_attention(T, H, D, C, K, W, scale, q, kv, ckv, sink, topk, dout);
        const double bound = bound_of(dtype);
        expect_close("out", bench_get(&b, a.out), want.out, T * H * D, bound);
        expect_close("teacher", bench_get(&b, a.teacher), want.teacher, T * K, bound);
        expect_close("dq", bench_grad(&b, vq), want.dq, T * H * D, bound);
        expect_close("dkv", bench_grad(&b, vkv), want.dkv, T * D, bound);
        expect_close("dckv", bench_grad(&b, vckv), want.dckv, C * D, bound);
        expect_close("dsink", bench_grad(&b, vsink), want.dsink, H, bound);
        bench_free(&b);
        free(q), free(dout), free(kv), free(ckv), free(sink), free(topk), free(rows);
        free(want.out), free(want.teacher), free(want.dq), free(want.dkv), free(want.dckv), free(want.dsink);
    }
}
END_TEST

/* ---- the teacher by hand ---- */

/* One token whose window is itself: heads' logits are x[h] of n chosen rows and window[h]. */
static void teacher_case(cg_dtype dtype, int64_t H, int64_t n, const double *x, const double *window,
                         const double *sink, const int32_t *list, int64_t K, bool dense, const double *want,
                         double bound) {
    bench b = bench_new(dtype);
    /* head h reads channel h of the keys */
    double q[16] = {0}, ckv[16];
    for (int64_t h = 0; h < H; h++) {
        q[h * H + h] = 1;
        for (int64_t j = 0; j < n; j++) ckv[j * H + h] = x[h * n + j];
    }
    cg_value *vq = bench_real(&b, "q", CG_SHAPE(1, H, H), q),
             *vkv = bench_real(&b, "kv", CG_SHAPE(1, H), window);
    cg_value *vckv = bench_real(&b, "ckv", CG_SHAPE(n, H), ckv),
             *vsink = bench_real(&b, "sink", CG_SHAPE(H), sink);
    cg_value *rows = bench_i32(&b, "rows", CG_SHAPE(1, CG_ROW_FIELDS), (int32_t[]){0, 0, 0, (int32_t)n, 1});
    cg_value *topk = bench_i32(&b, "topk", CG_SHAPE(1, K), list);
    cg_attention a = cg_csa_attention(b.graph, vq, vkv, vckv, vsink, topk, rows, 1, 1, CG_TEACHER_FULL);
    cg_value *visible = cg_visible_indices(b.graph, rows, n);
    cg_value *at =
        cg_csa_teacher_at(b.graph, vq, vckv, dense ? visible : topk, a.window_lse, NULL, 1, CG_TEACHER_FULL);
    cg_keep(a.teacher), cg_keep(at);
    bench_run(&b);
    if (!dense) expect_close("teacher", bench_get(&b, a.teacher), want, K, bound);
    expect_close("teacher at", bench_get(&b, at), want, dense ? n : K, bound);
    bench_free(&b);
}

/* S03: a mass of 1e-17, then of 5e-87, and two heads of which one outweighs the other by exp(19). */
START_TEST(little_compressed_mass) {
    FOR_REAL(dtype) {
        const double bound = dtype == CG_F64 ? 1e-10 : 1e-6, sink[2] = {0};
        for (int far = 0; far < 2; far++)
            teacher_case(dtype, 1, 2, (double[]){0, 1}, (double[]){far ? 200 : 40}, sink, (int32_t[]){0, 1}, 2,
                         false, (double[]){0.2689414214, 0.7310585786}, bound);
        teacher_case(dtype, 2, 2, (double[]){0, 1, 2, 0}, (double[]){40, 60}, sink, (int32_t[]){0, 1}, 2, false,
                     (double[]){0.2689414242, 0.7310585758}, bound);
    }
}
END_TEST

/* S01: window and sink stand in the denominator. S02: the dense denominator holds all visible rows. S09: heads
 * are summed before they are normalised. */
START_TEST(teacher_denominators) {
    FOR_REAL(dtype) {
        const double bound = digits(dtype);
        teacher_case(dtype, 2, 2, (double[]){2, 0, 0, 1}, (double[]){0, 3}, (double[]){0, 0}, (int32_t[]){0, 1},
                     2, false, (double[]){0.7849937697, 0.2150062303}, bound);
        teacher_case(dtype, 2, 3, (double[]){1, 0, -1, 0.5, 2, 1.5}, (double[]){0, 1}, (double[]){0, 0},
                     (int32_t[]){0, 1}, 2, false, (double[]){0.444979227, 0.555020773}, 1e-9 + bound);
        teacher_case(dtype, 2, 3, (double[]){1, 0, -1, 0.5, 2, 1.5}, (double[]){0, 1}, (double[]){0, 0},
                     (int32_t[]){0, 1}, 2, true, (double[]){0.3725264145, 0.4073441723, 0.2201294133}, bound);
        teacher_case(dtype, 4, 2, (double[]){2, 0, 1, -1, 0, 1, -1, 2}, (double[]){0, 2, 3, -1},
                     (double[]){0, 0, 0, 0}, (int32_t[]){0, 1}, 2, false,
                     (double[]){0.4954414969, 0.5045585031}, bound);
    }
}
END_TEST

SUITE("op_csa_attention", attention_of_a_batch, attention_of_packed_segments, attention_to_all_visible_rows,
      window_lse_and_teacher_of_all_files, teacher_of_each_mode,
      teacher_of_two_heads_moves_with_its_denominator, one_row, empty_places_come_first,
      unnamed_rows_do_not_matter, a_row_that_sees_nothing, an_empty_row_among_others,
      several_queries_choose_one_row, empty_segments, rows_behind_the_last_segment, segments_of_one_token,
      choices_are_not_shared, visible_counts, padding_may_hold_anything, as_the_equations_say,
      little_compressed_mass, teacher_denominators)
