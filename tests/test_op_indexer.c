/* The indexer and its loss against stored vectors, against numbers worked out by hand, and against itself: the
 * streaming ops, the ops on index lists and the spelled-out primitives are three forms of one objective. */
#include "tests/support.h"

#include "core/base/rng.h"

/* ---- stored vectors ---- */

typedef struct problem {
    cg_safetensors *file;
    int64_t T, C, Hi, Di, H, D, K, B;
    int64_t ratio, window, batch; /* batch 0: packed segments */
    double scale, coeff;
    bool sparse;
    cg_reduction reduction;
    double *q_index, *w, *k_index, *q, *kv, *ckv, *sink;
    int32_t *cu_seqlens, *seqlens, *first_key; /* first_key: by row, of its segment */
} problem;

static problem problem_open(const char *name) {
    problem p = {.file = golden_open(name)};
    const cg_safetensors *f = p.file;
    bool packed = !strcmp(cg_safetensors_metadata(f, "layout"), "thd");
    const cg_tensor *q_index = cg_safetensors_find(f, "in.q_indexer"), *q = cg_safetensors_find(f, "in.query");
    const cg_tensor *k_index = cg_safetensors_find(f, "in.k_indexer");
    int64_t steps = q_index->shape.dims[0];
    p.batch = packed ? 0 : q_index->shape.dims[1];
    p.Hi = q_index->shape.dims[packed ? 1 : 2];
    p.Di = q_index->shape.dims[packed ? 2 : 3];
    p.H = q->shape.dims[packed ? 1 : 2];
    p.D = q->shape.dims[packed ? 2 : 3];
    p.T = packed ? steps : steps * p.batch;
    p.C = k_index->shape.dims[0] * (packed ? 1 : p.batch);
    p.ratio = (int64_t)golden_number(f, "ratio");
    p.window = (int64_t)golden_number(f, "window");
    p.scale = golden_number(f, "softmax_scale");
    p.coeff = golden_number(f, "loss_coeff");
    const char *sparse = cg_safetensors_metadata(f, "sparse");
    p.sparse = sparse && !strcmp(sparse, "true");
    p.reduction = strcmp(cg_safetensors_metadata(f, "reduction"), "sum") ? CG_REDUCE_MEAN_REAL : CG_REDUCE_SUM;
    const cg_tensor *topk = cg_safetensors_find(f, "out.topk");
    p.K = topk->shape.dims[topk->shape.n_dims - 1];
    p.q_index = golden_get(f, "in.q_indexer", p.batch);
    p.w = golden_get(f, "in.weights", p.batch);
    p.k_index = golden_get(f, "in.k_indexer", p.batch);
    p.q = golden_get(f, "in.query", p.batch);
    p.kv = golden_get(f, "in.kv", p.batch);
    p.ckv = golden_get(f, "in.compressed_kv", p.batch);
    p.sink = golden_get(f, "in.sink", 0);
    p.B = packed ? cg_safetensors_find(f, "in.cu_seqlens_q")->shape.dims[0] - 1 : p.batch;
    p.cu_seqlens = calloc((size_t)p.B + 1, sizeof(int32_t));
    p.seqlens = calloc((size_t)p.B + 1, sizeof(int32_t));
    p.first_key = calloc((size_t)p.T + 1, sizeof(int32_t));
    double *cu = packed ? golden_get(f, "in.cu_seqlens_q", 0) : NULL;
    double *real = packed ? golden_get(f, "in.cu_seqlens_q_real", 0) : NULL;
    int32_t key = 0;
    for (int64_t b = 0; b < p.B; b++) {
        p.cu_seqlens[b + 1] = (int32_t)(packed ? cu[b + 1] : (double)((b + 1) * steps));
        int32_t length = p.cu_seqlens[b + 1] - p.cu_seqlens[b];
        p.seqlens[b] = packed ? (int32_t)(real[b + 1] - real[b]) : length;
        for (int32_t t = p.cu_seqlens[b]; t < p.cu_seqlens[b + 1]; t++) p.first_key[t] = key;
        key += length / (int32_t)p.ratio;
    }
    free(cu);
    free(real);
    return p;
}

static void problem_close(problem *p) {
    double *arrays[] = {p->q_index, p->w, p->k_index, p->q, p->kv, p->ckv, p->sink};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) free(arrays[i]);
    free(p->cu_seqlens);
    free(p->seqlens);
    free(p->first_key);
    cg_safetensors_close(p->file);
}

/* A stored [B, S, n] or [T, n] tensor as [T, C] in packed columns. */
static double *packed_columns(const problem *p, const char *name) {
    double *stored = golden_get(p->file, name, 0), *out = calloc((size_t)(p->T * p->C) + 1, sizeof *out);
    int64_t n = p->batch ? p->C / p->batch : p->C;
    for (int64_t t = 0; t < p->T; t++)
        memcpy(out + t * p->C + (p->batch ? p->first_key[t] : 0), stored + t * n, (size_t)n * sizeof *out);
    free(stored);
    return out;
}

typedef enum form { STREAMED, LISTS, SPELLED, FORMS } form;

/* A problem in one form, differentiated and run. */
typedef struct solved {
    bench b;
    cg_value *rows, *q_index, *w, *k_index, *q, *kv, *ckv, *sink;
    cg_value *loss, *kl, *topk;
    cg_value *list, *target, *predict; /* the support and both distributions on it; NULL when streamed */
} solved;

static solved solve(const problem *p, cg_dtype dtype, form how, cg_teacher teacher, bool sparse, bool rotate) {
    solved s = {.b = bench_new(dtype)};
    cg_graph *g = s.b.graph;
    s.q_index = bench_real(&s.b, "q_index", CG_SHAPE(p->T, p->Hi, p->Di), p->q_index);
    s.w = bench_real(&s.b, "w", CG_SHAPE(p->T, p->Hi), p->w);
    s.k_index = bench_real(&s.b, "k_index", CG_SHAPE(p->C, p->Di), p->k_index);
    s.q = bench_real(&s.b, "q", CG_SHAPE(p->T, p->H, p->D), p->q);
    s.kv = bench_real(&s.b, "kv", CG_SHAPE(p->T, p->D), p->kv);
    s.ckv = bench_real(&s.b, "ckv", CG_SHAPE(p->C, p->D), p->ckv);
    s.sink = bench_real(&s.b, "sink", CG_SHAPE(p->H), p->sink);
    cg_value *cu = bench_i32(&s.b, "cu_seqlens", CG_SHAPE(p->B + 1), p->cu_seqlens);
    cg_value *lengths = bench_i32(&s.b, "seqlens", CG_SHAPE(p->B), p->seqlens);
    s.rows = cg_segment_rows(g, cu, lengths, p->T, p->ratio, p->C).rows;
    cg_value *q_index = rotate ? cg_hadamard(g, s.q_index) : s.q_index;
    cg_value *k_index = rotate ? cg_hadamard(g, s.k_index) : s.k_index;
    cg_value *all = NULL; /* [T, C] */
    if (how == SPELLED) {
        all = cg_indexer_head_sum(g, cg_relu(g, cg_indexer_head_scores(g, q_index, k_index)), s.w);
        s.topk = cg_topk(g, all, s.rows, p->K);
    } else {
        s.topk = cg_indexer_topk(g, q_index, s.w, k_index, s.rows, p->K);
    }
    cg_attention attention =
        cg_csa_attention(g, s.q, s.kv, s.ckv, s.sink, s.topk, s.rows, p->window, p->scale, teacher);
    if (how == STREAMED && !sparse) {
        s.loss = cg_indexer_dense_loss(g, q_index, s.w, k_index, s.q, s.ckv, attention.window_lse, s.sink,
                                       s.rows, p->scale, teacher, p->reduction, p->coeff);
    } else {
        s.list = sparse ? s.topk : cg_visible_indices(g, s.rows, p->C);
        s.target = sparse ? attention.teacher
                          : cg_csa_teacher_at(g, s.q, s.ckv, s.list,
                                              teacher == CG_TEACHER_FULL ? attention.window_lse : NULL,
                                              teacher == CG_TEACHER_SINK ? s.sink : NULL, p->scale, teacher);
        cg_value *scores =
            how == SPELLED ? cg_gather(g, all, s.list) : cg_indexer_scores_at(g, q_index, s.w, k_index, s.list);
        s.predict = cg_keep(cg_softmax(g, scores, s.list, false));
        s.loss = how == SPELLED ? cg_kl_div(g, cg_softmax(g, scores, s.list, true), s.target, s.rows,
                                            p->reduction, p->coeff)
                                : cg_indexer_kl(g, scores, s.target, s.rows, p->reduction, p->coeff);
    }
    cg_keep(s.list);
    cg_keep(s.target);
    cg_keep(s.topk);
    s.kl = cg_keep(cg_output(s.loss, 1));
    bench_backward(&s.b, s.loss, NULL);
    bench_run(&s.b);
    return s;
}

/* A distribution on the list as [T, C]. */
static double *spread(solved *s, const problem *p, const cg_value *value) {
    double *got = bench_get(&s->b, value), *out = calloc((size_t)(p->T * p->C) + 1, sizeof *out);
    const int32_t *list = bench_get_i32(&s->b, s->list);
    int64_t n = s->list->shape.dims[1];
    for (int64_t t = 0; t < p->T; t++)
        for (int64_t j = 0; j < n; j++)
            if (list[t * n + j] >= 0) out[t * p->C + list[t * n + j]] = got[t * n + j];
    return out;
}

static void expect_topk(const problem *p, solved *s, const char *what) {
    int32_t *want = golden_get_i32(p->file, "out.topk");
    const int32_t *got = bench_get_i32(&s->b, s->topk);
    for (int64_t i = 0; i < p->T * p->K; i++) {
        int32_t global = want[i] < 0 ? -1 : want[i] + p->first_key[i / p->K];
        if (got[i] != global)
            ck_abort_msg("%s: topk of row %lld slot %lld is %d, expected %d", what, (long long)(i / p->K),
                         (long long)(i % p->K), got[i], global);
    }
    free(want);
}

static void expect_zero(const double *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) ck_assert(x[i] == 0);
}

/* The gradients of indexer inputs: the oracle's, or where it is left out for size the stored f32 ones. */
static void expect_gradients(const problem *p, solved *s, double bound) {
    const struct {
        const char *name;
        const cg_value *leaf;
    } list[] = {{"grad.q_indexer", s->q_index}, {"grad.weights", s->w}, {"grad.k_indexer", s->k_index}};
    for (int i = 0; i < 3; i++) {
        char name[64];
        snprintf(name, sizeof name, "oracle.%s", list[i].name);
        bool exact = cg_safetensors_find(p->file, name) != NULL;
        double *want = golden_get(p->file, exact ? name : list[i].name, p->batch);
        expect_close(list[i].name, bench_grad(&s->b, list[i].leaf), want, cg_shape_count(&list[i].leaf->shape),
                     exact ? bound : 1e-5);
        free(want);
    }
    expect_zero(bench_grad(&s->b, s->q), p->T * p->H * p->D);
    expect_zero(bench_grad(&s->b, s->kv), p->T * p->D);
    expect_zero(bench_grad(&s->b, s->ckv), p->C * p->D);
    expect_zero(bench_grad(&s->b, s->sink), p->H);
}

static void check_file(const char *name) {
    problem p = problem_open(name);
    double *target = packed_columns(&p, "oracle.target"), *predict = packed_columns(&p, "oracle.predict");
    double *kl = golden_get(p.file, "oracle.kl", 0), *loss = golden_get(p.file, "oracle.loss", 0);
    for (int dtype = CG_F32; dtype <= CG_F64; dtype++)
        for (form how = 0; how < FORMS; how++) {
            const double bound = dtype == CG_F32 ? 1e-5 : 1e-12;
            solved s = solve(&p, (cg_dtype)dtype, how, CG_TEACHER_FULL, p.sparse, false);
            expect_topk(&p, &s, name);
            expect_close("loss", bench_get(&s.b, s.loss), loss, 1, bound);
            expect_close("kl", bench_get(&s.b, s.kl), kl, p.T, bound);
            if (s.list) {
                double *got = spread(&s, &p, s.target);
                expect_close("target", got, target, p.T * p.C, bound);
                free(got);
                got = spread(&s, &p, s.predict);
                expect_close("predict", got, predict, p.T * p.C, bound);
                free(got);
            }
            expect_gradients(&p, &s, bound);
            bench_free(&s.b);
        }
    free(target);
    free(predict);
    free(kl);
    free(loss);
    problem_close(&p);
}

START_TEST(stored_losses) {
    const char *const files[] = {"sbhd_sparse_mean", "sbhd_dense_mean", "sbhd_sparse_sum",
                                 "thd_sparse_mean",  "thd_dense_sum",   "thd_padded_sparse_mean",
                                 "topk_boundary",    "ratio128_dense"};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) check_file(files[i]);
}
END_TEST

/* Small integers: all scores are exact in f32 and many tie. */
START_TEST(boundary_scores_are_exact) {
    problem p = problem_open("topk_boundary");
    double *want = packed_columns(&p, "out.index_scores");
    bench b = bench_new(CG_F32);
    cg_value *q = bench_real(&b, "q", CG_SHAPE(p.T, p.Hi, p.Di), p.q_index);
    cg_value *k = bench_real(&b, "k", CG_SHAPE(p.C, p.Di), p.k_index);
    cg_value *w = bench_real(&b, "w", CG_SHAPE(p.T, p.Hi), p.w);
    cg_value *all =
        cg_keep(cg_indexer_head_sum(b.graph, cg_relu(b.graph, cg_indexer_head_scores(b.graph, q, k)), w));
    bench_run(&b);
    const double *got = bench_get(&b, all);
    int64_t n = p.C / p.batch, compared = 0;
    for (int64_t t = 0; t < p.T; t++)
        for (int64_t j = p.first_key[t]; j < p.first_key[t] + n; j++, compared++)
            if (isfinite(want[t * p.C + j])) ck_assert(got[t * p.C + j] == want[t * p.C + j]);
    ck_assert_int_eq(compared, 800);
    bench_free(&b);
    free(want);
    problem_close(&p);
}
END_TEST

START_TEST(stored_teacher_modes) {
    problem p = problem_open("teacher_modes");
    const struct {
        cg_teacher teacher;
        const char *name;
    } modes[] = {{CG_TEACHER_FULL, "full"}, {CG_TEACHER_SINK, "sink"}, {CG_TEACHER_COMPRESSED, "compressed"}};
    for (int dtype = CG_F32; dtype <= CG_F64; dtype++)
        for (int m = 0; m < 3; m++)
            for (int sparse = 0; sparse < 2; sparse++)
                for (form how = 0; how < FORMS; how++) {
                    const double bound = dtype == CG_F32 ? 1e-5 : 1e-12;
                    char name[64];
                    solved s = solve(&p, (cg_dtype)dtype, how, modes[m].teacher, sparse, false);
                    expect_topk(&p, &s, "teacher_modes");
                    snprintf(name, sizeof name, "oracle.loss_%s_%s", modes[m].name,
                             sparse ? "sparse" : "dense");
                    double *loss = golden_get(p.file, name, 0);
                    expect_close(name, bench_get(&s.b, s.loss), loss, 1, bound);
                    snprintf(name, sizeof name, "oracle.target_%s_%s", modes[m].name,
                             sparse ? "sparse" : "dense");
                    double *target = packed_columns(&p, name);
                    if (s.list) {
                        double *got = spread(&s, &p, s.target);
                        expect_close(name, got, target, p.T * p.C, bound);
                        free(got);
                    }
                    free(loss);
                    free(target);
                    bench_free(&s.b);
                }
    problem_close(&p);
}
END_TEST

/* S22: rotating queries and keys alike changes no score; rotating one of them does. */
START_TEST(rotation_changes_nothing) {
    for (int sparse = 0; sparse < 2; sparse++) {
        problem p = problem_open(sparse ? "sbhd_sparse_mean" : "sbhd_dense_mean");
        solved plain = solve(&p, CG_F64, STREAMED, CG_TEACHER_FULL, sparse, false);
        solved turned = solve(&p, CG_F64, STREAMED, CG_TEACHER_FULL, sparse, true);
        expect_close("loss", bench_get(&turned.b, turned.loss), bench_get(&plain.b, plain.loss), 1, 1e-12);
        expect_close("dq", bench_grad(&turned.b, turned.q_index), bench_grad(&plain.b, plain.q_index),
                     p.T * p.Hi * p.Di, 1e-12);
        bench_free(&plain.b);
        bench_free(&turned.b);
        problem_close(&p);
    }
    const double q[] = {1, 2, 0, -1}, k[] = {1, 1, 0, 0, 0, 0, 1, 2, 1, 0, 2, 0};
    const double want[2][3] = {{3, -2, 1}, {1, 0, 5}};
    for (int wrong = 0; wrong < 2; wrong++) {
        bench b = bench_new(CG_F64);
        cg_value *q_turned = cg_hadamard(b.graph, bench_real(&b, "q", CG_SHAPE(1, 1, 4), q));
        cg_value *keys = bench_real(&b, "k", CG_SHAPE(3, 4), k);
        if (!wrong) keys = cg_hadamard(b.graph, keys);
        cg_value *dots = cg_keep(cg_indexer_head_scores(b.graph, q_turned, keys));
        bench_run(&b);
        expect_close("dots", bench_get(&b, dots), want[wrong], 3, 1e-12);
        bench_free(&b);
    }
}
END_TEST

/* ---- numbers worked out by hand; S.. are numbers of cases from bug reports ---- */

#define ROW_SEES(visible) 0, 9, 0, visible, 1

/* S01: eight rows, the last of which sees two compressed rows, one window row and the sink. */
START_TEST(denominator_holds_window_and_sink) {
    double q[8 * 4] = {0}, kv[8 * 2] = {0}, scores[16], ckv[] = {1, 0, 0, 1}, sink[] = {0, 0};
    int32_t list[16], cu[] = {0, 8};
    for (int t = 0; t < 8; t++)
        for (int j = 0; j < 2; j++) {
            list[2 * t + j] = j < (t + 1) / 4 ? j : -1;
            scores[2 * t + j] = j < (t + 1) / 4 ? 0 : -INFINITY;
        }
    memcpy(q + 28, (double[]){2, 0, 0, 1}, 4 * sizeof *q);
    memcpy(kv + 14, (double[]){0, 3}, 2 * sizeof *kv);
    memcpy(scores + 14, (double[]){.3, -.2}, 2 * sizeof *scores);
    bench b = bench_new(CG_F64);
    cg_value *rows = cg_segment_rows(b.graph, bench_i32(&b, "cu", CG_SHAPE(2), cu), NULL, 8, 4, 2).rows;
    cg_value *x = bench_real(&b, "scores", CG_SHAPE(8, 2), scores);
    cg_attention attention = cg_csa_attention(
        b.graph, bench_constant(&b, "q", CG_SHAPE(8, 2, 2), q), bench_constant(&b, "kv", CG_SHAPE(8, 2), kv),
        bench_constant(&b, "ckv", CG_SHAPE(2, 2), ckv), bench_constant(&b, "sink", CG_SHAPE(2), sink),
        bench_i32(&b, "list", CG_SHAPE(8, 2), list), rows, 1, 1, CG_TEACHER_FULL);
    cg_value *loss = cg_indexer_kl(b.graph, x, cg_keep(attention.teacher), rows, CG_REDUCE_SUM, 1);
    bench_backward(&b, loss, NULL);
    bench_run(&b);
    expect_close("T", bench_get(&b, attention.teacher) + 14, (double[]){.7849937697, .2150062303}, 2, 1e-9);
    expect_close("KL", bench_get(&b, loss), (double[]){.0610656464345}, 1, 1e-11);
    expect_close("dI", bench_grad(&b, x) + 14, (double[]){-.1625344385, .1625344385}, 2, 1e-9);
    expect_zero(bench_grad(&b, x), 14);
    bench_free(&b);
}
END_TEST

/* One row with given logits [H, n], logits beside them as window_lse [H], and index scores s: teacher, KL and
 * dI over a list, and the same through the dense loss when the list is all there is. */
static void one_row(cg_dtype dtype, int64_t H, int64_t n, const double *logits, const double *window_lse,
                    const double *s, int64_t chosen, double *target, double *kl, double *ds) {
    bench b = bench_new(dtype);
    double *identity = calloc((size_t)(n * n), sizeof *identity);
    int32_t *list = calloc((size_t)n, sizeof *list);
    for (int64_t j = 0; j < n; j++) {
        identity[j * n + j] = 1;
        list[j] = (int32_t)j;
    }
    cg_value *rows = bench_i32(&b, "rows", CG_SHAPE(1, 5), (int32_t[]){ROW_SEES((int32_t)n)});
    cg_value *q = bench_constant(&b, "q", CG_SHAPE(1, H, n), logits);
    cg_value *ckv = bench_constant(&b, "ckv", CG_SHAPE(n, n), identity);
    cg_value *lse = bench_constant(&b, "window_lse", CG_SHAPE(1, H), window_lse);
    cg_value *scores = bench_real(&b, "scores", CG_SHAPE(1, chosen), s);
    cg_value *teacher = cg_keep(cg_csa_teacher_at(
        b.graph, q, ckv, bench_i32(&b, "list", CG_SHAPE(1, chosen), list), lse, NULL, 1, CG_TEACHER_FULL));
    cg_value *loss = cg_indexer_kl(b.graph, scores, teacher, rows, CG_REDUCE_SUM, 1);
    /* relu(k) - relu(-k) = k, and dk = dI where k is not 0 */
    cg_value *q_index = bench_constant(&b, "q_index", CG_SHAPE(1, 2, 1), (double[]){1, -1});
    cg_value *w = bench_constant(&b, "w", CG_SHAPE(1, 2), (double[]){1, -1});
    cg_value *k_index = bench_real(&b, "k_index", CG_SHAPE(n, 1), s);
    cg_value *dense = cg_keep(cg_indexer_dense_loss(b.graph, q_index, w, k_index, q, ckv, lse, NULL, rows, 1,
                                                    CG_TEACHER_FULL, CG_REDUCE_SUM, 1));
    bench_backward(&b, cg_add(b.graph, cg_keep(loss), dense), NULL);
    bench_run(&b);
    memcpy(target, bench_get(&b, teacher), (size_t)chosen * sizeof *target);
    memcpy(ds, bench_grad(&b, scores), (size_t)chosen * sizeof *ds);
    *kl = bench_get(&b, loss)[0];
    if (chosen == n) {
        const double bound = dtype == CG_F32 ? 2e-6 : 1e-13;
        expect_close("dense KL", bench_get(&b, dense), kl, 1, bound);
        const double *dk = bench_grad(&b, k_index);
        for (int64_t j = 0; j < n; j++)
            if (s[j] != 0) ck_assert_double_le(fabs(dk[j] - ds[j]), bound);
    }
    free(identity);
    free(list);
    bench_free(&b);
}

/* S02: the dense loss has a denominator of its own. */
START_TEST(dense_is_not_sparse) {
    const double logits[] = {1, 0, -1, .5, 2, 1.5}, lse[] = {log(2), log(exp(1) + 1)}, s[] = {.4, .1, -.3};
    double target[3], kl, ds[3];
    one_row(CG_F64, 2, 3, logits, lse, s, 3, target, &kl, ds);
    expect_close("dense T", target, (double[]){.3725264145, .4073441723, .2201294133}, 3, 1e-9);
    expect_close("dense KL", &kl, (double[]){.0147505761200}, 1, 1e-11);
    expect_close("dense dI", ds, (double[]){.0744202311, -.0762379536, .0018177225}, 3, 1e-8);
    one_row(CG_F64, 2, 3, logits, lse, s, 2, target, &kl, ds);
    expect_close("sparse T", target, (double[]){.444979227, .555020773}, 2, 1e-9);
    expect_close("sparse KL", &kl, (double[]){.0337811455998}, 1, 1e-11);
    expect_close("sparse dI", ds, (double[]){.1294632898, -.1294632898}, 2, 1e-9);
}
END_TEST

/* S03: a compressed mass of 1e-17 or 1e-87 beside the window gives the same target. */
START_TEST(tiny_mass_keeps_its_target) {
    for (int dtype = CG_F32; dtype <= CG_F64; dtype++) {
        const double bound = dtype == CG_F32 ? 1e-6 : 1e-9;
        double target[2], kl, ds[2];
        for (double window = 40; window <= 200; window += 160) {
            one_row((cg_dtype)dtype, 1, 2, (double[]){0, 1}, &window, (double[]){0, 0}, 2, target, &kl, ds);
            expect_close("T", target, (double[]){.2689414214, .7310585786}, 2, bound);
            expect_close("KL", &kl, (double[]){.110944071672}, 1, bound);
            expect_close("dI", ds, (double[]){.2310585786, -.2310585786}, 2, bound);
        }
        one_row((cg_dtype)dtype, 2, 2, (double[]){0, 1, 2, 0}, (double[]){40, 60}, (double[]){0, 0}, 2, target,
                &kl, ds);
        expect_close("T of two heads", target, (double[]){.2689414242, .7310585758}, 2, bound);
        expect_close("KL of two heads", &kl, (double[]){.110944068826}, 1, bound);
    }
}
END_TEST

/* S04: a student that is far off has the exact value and gradient, in both forms. */
START_TEST(no_epsilon_in_the_logarithms) {
    for (int spelled = 0; spelled < 2; spelled++) {
        bench b = bench_new(CG_F64);
        cg_value *rows = bench_i32(&b, "rows", CG_SHAPE(1, 5), (int32_t[]){ROW_SEES(2)});
        cg_value *s = bench_real(&b, "s", CG_SHAPE(1, 2), (double[]){0, -30});
        cg_value *t = bench_constant(&b, "t", CG_SHAPE(1, 2), (double[]){.5, .5});
        cg_value *loss = spelled
                             ? cg_kl_div(b.graph, cg_softmax(b.graph, s, NULL, true), t, rows, CG_REDUCE_SUM, 1)
                             : cg_indexer_kl(b.graph, s, t, rows, CG_REDUCE_SUM, 1);
        bench_backward(&b, loss, NULL);
        bench_run(&b);
        expect_close("KL", bench_get(&b, loss), (double[]){14.3068528194}, 1, 1e-11);
        expect_close("dI", bench_grad(&b, s), (double[]){.5, -.5}, 2, 1e-12);
        bench_free(&b);
    }
}
END_TEST

/* S06: gradients through relu and a negative weight. */
START_TEST(gradients_through_relu_and_negative_weight) {
    bench b = bench_new(CG_F64);
    cg_value *rows = bench_i32(&b, "rows", CG_SHAPE(1, 5), (int32_t[]){ROW_SEES(2)});
    cg_value *list = bench_i32(&b, "list", CG_SHAPE(1, 2), (int32_t[]){0, 1});
    cg_value *q = bench_real(&b, "q", CG_SHAPE(1, 2, 2), (double[]){1, 0, 0, 1});
    cg_value *k = bench_real(&b, "k", CG_SHAPE(2, 2), (double[]){.5, -1, 1, 2});
    cg_value *w = bench_real(&b, "w", CG_SHAPE(1, 2), (double[]){.6, -.4});
    cg_value *t = bench_constant(&b, "t", CG_SHAPE(1, 2), (double[]){.7849937697, .2150062303});
    cg_value *scores = cg_keep(cg_indexer_scores_at(b.graph, q, w, k, list));
    cg_value *loss = cg_indexer_kl(b.graph, scores, t, rows, CG_REDUCE_SUM, 1);
    bench_backward(&b, loss, NULL);
    bench_run(&b);
    expect_close("I", bench_get(&b, scores), (double[]){.3, -.2}, 2, 1e-15);
    expect_close("KL", bench_get(&b, loss), (double[]){.0610656464345}, 1, 1e-8);
    expect_close("dw", bench_grad(&b, w), (double[]){.0812672192, .3250688770}, 2, 1e-8);
    expect_close("dq", bench_grad(&b, q), (double[]){.0487603315, .2925619893, -.0650137754, -.1300275508}, 4,
                 1e-8);
    expect_close("dk", bench_grad(&b, k), (double[]){-.0975206631, 0, .0975206631, -.0650137754}, 4, 1e-8);
    ck_assert(bench_grad(&b, k)[1] == 0);
    bench_free(&b);
}
END_TEST

/* Two slots with teacher {1, 0} whose KL is kl: log(1 + exp(s1 - s0)). */
static void row_of_kl(double kl, double s[2]) {
    s[0] = 0;
    s[1] = log(expm1(kl));
}

/* S08: padding is neither in the sum nor in the count, whatever it holds, in value and gradient. */
START_TEST(padding_counts_nowhere) {
    double s[8], t[8] = {1, 0, 1, 0, 1, 0, NAN, NAN}, kl[] = {.2, .4, 1};
    for (int i = 0; i < 3; i++) row_of_kl(kl[i], s + 2 * i);
    for (int garbage = 0; garbage < 2; garbage++)
        for (int spelled = 0; spelled < 2; spelled++) {
            row_of_kl(9.9, s + 6);
            if (garbage) s[6] = s[7] = NAN;
            if (!garbage) memcpy(t + 6, (double[]){1, 0}, 2 * sizeof *t);
            if (garbage) t[6] = t[7] = NAN;
            bench b = bench_new(CG_F64);
            cg_value *rows = bench_i32(&b, "rows", CG_SHAPE(4, 5),
                                       (int32_t[]){ROW_SEES(2), ROW_SEES(2), ROW_SEES(2), 0, 9, 0, 0, 0});
            cg_value *x = bench_real(&b, "s", CG_SHAPE(4, 2), s);
            cg_value *teacher = bench_constant(&b, "t", CG_SHAPE(4, 2), t);
            cg_value *loss = spelled ? cg_kl_div(b.graph, cg_softmax(b.graph, x, NULL, true), teacher, rows,
                                                 CG_REDUCE_MEAN_REAL, 1)
                                     : cg_indexer_kl(b.graph, x, teacher, rows, CG_REDUCE_MEAN_REAL, 1);
            cg_value *per_row = cg_keep(cg_output(loss, 1));
            bench_backward(&b, loss, NULL);
            bench_run(&b);
            expect_close("loss", bench_get(&b, loss), (double[]){1.6 / 3}, 1, 1e-14);
            expect_close("kl", bench_get(&b, per_row), (double[]){.2, .4, 1, 0}, 4, 1e-14);
            const double *dx = bench_grad(&b, x);
            for (int i = 0; i < 3; i++)
                expect_close("gradient", dx + 2 * i, (double[]){expm1(-kl[i]) / 3, -expm1(-kl[i]) / 3}, 2,
                             1e-14);
            if (!(garbage && spelled)) expect_zero(dx + 6, 2); /* softmax_grad itself knows no padding */
            bench_free(&b);
        }
}
END_TEST

/* The chosen list of one row of scores, by the op on scores and by the streaming op. */
static void choose(int64_t n, const double *scores, int64_t visible, int64_t K, int32_t *list) {
    for (int streamed = 0; streamed < 2; streamed++) {
        bench b = bench_new(CG_F32);
        cg_value *rows = bench_i32(&b, "rows", CG_SHAPE(1, 5), (int32_t[]){ROW_SEES((int32_t)visible)});
        cg_value *topk;
        if (streamed) { /* relu(k) - relu(-k); the infinite ones would be inf - inf, so the larger head is taken
                         */
            cg_value *q = bench_constant(&b, "q", CG_SHAPE(1, 2, 1), (double[]){1, -1});
            cg_value *w = bench_constant(&b, "w", CG_SHAPE(1, 2), (double[]){1, -1});
            topk = cg_indexer_topk(b.graph, q, w, bench_constant(&b, "k", CG_SHAPE(n, 1), scores), rows, K);
        } else {
            topk = cg_topk(b.graph, bench_constant(&b, "scores", CG_SHAPE(1, n), scores), rows, K);
        }
        cg_keep(topk);
        bench_run(&b);
        const int32_t *got = bench_get_i32(&b, topk);
        if (streamed)
            for (int64_t j = 0; j < K; j++) ck_assert_int_eq(got[j], list[j]);
        else
            memcpy(list, got, (size_t)K * sizeof *list);
        bench_free(&b);
    }
}

/* S19: equal scores go to the lower index, -0.0 equals 0.0, the best come first. */
START_TEST(ties_go_to_the_lower_index) {
    int32_t list[8];
    choose(4, (double[]){5, 1, 5, 5}, 4, 2, list);
    ck_assert(list[0] == 0 && list[1] == 2);
    choose(6, (double[]){0, 0, 0, 7, 0, 0}, 6, 4, list);
    ck_assert(list[0] == 3 && list[1] == 0 && list[2] == 1 && list[3] == 2);
    choose(6, (double[]){-0., 0, -0., -7, 0, -0.}, 6, 4, list);
    ck_assert(list[0] == 0 && list[1] == 1 && list[2] == 2 && list[3] == 4);
    double equal[1000];
    for (int i = 0; i < 1000; i++) equal[i] = 1.5;
    choose(1000, equal, 1000, 7, list);
    for (int j = 0; j < 7; j++) ck_assert_int_eq(list[j], j);
}
END_TEST

/* The best of a few hundred against a search that takes them one by one: numbers that spread, that are mostly equal, that lie
 * within a few bits of each other, that reach over all magnitudes, with some infinite. */
START_TEST(the_best_are_chosen_whatever_the_numbers) {
    enum { MOST = 700 };
    static const int64_t sizes[][2] = {{1, 1},   {9, 2},   {64, 64},  {65, 64},  {81, 64},
                                       {82, 64}, {333, 1}, {700, 64}, {700, 500}};
    double scores[MOST];
    for (int kind = 0; kind < 6; kind++)
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            const int64_t n = sizes[i][0], K = sizes[i][1];
            for (int64_t j = 0; j < n; j++) {
                const double x = cg_random_normal(11, i, (uint64_t)j), u = cg_random_normal(12, i, (uint64_t)j);
                const double kinds[] = {x,
                                        x > 1 ? x : 0,
                                        floor(2 * x),
                                        1 + ldexp(floor(4 * x), -23),
                                        ldexp(x, (int)(20 * u)),
                                        u > 1.5  ? INFINITY
                                        : u < -1 ? -INFINITY
                                                 : x};
                scores[j] = (float)kinds[kind];
            }
            int32_t list[MOST];
            choose(n, scores, n, K, list);
            bool taken[MOST] = {false};
            for (int64_t place = 0; place < K; place++) {
                int64_t best = -1;
                for (int64_t j = 0; j < n; j++)
                    if (!taken[j] && (best < 0 || scores[j] > scores[best])) best = j;
                ck_assert_int_eq(list[place], best);
                taken[best] = true;
            }
        }
}
END_TEST

/* S20: the width is K whatever there is to choose from; what is not seen is no candidate; -inf seen comes last.
 */
START_TEST(fewer_candidates_than_width) {
    double scores[51];
    int32_t list[16];
    for (int i = 0; i < 51; i++) scores[i] = i < 3 ? 3 - i : -INFINITY;
    choose(51, scores, 3, 16, list);
    for (int j = 0; j < 16; j++) ck_assert_int_eq(list[j], j < 3 ? j : -1);
    const int widths[] = {0, 1, 2, 3, 15, 16, 17, 51};
    for (int i = 0; i < 51; i++) scores[i] = 51 - i;
    for (int i = 0; i < 8; i++) {
        choose(widths[i], scores, widths[i], 16, list);
        for (int j = 0; j < 16; j++) ck_assert_int_eq(list[j], j < widths[i] ? j : -1);
    }
    choose(4, (double[]){-INFINITY, 2, -INFINITY, 3}, 4, 3, list);
    ck_assert(list[0] == 3 && list[1] == 1 && list[2] == 0);
}
END_TEST

/* S21: without relu the strongly negative head would push entry 0 out. */
START_TEST(relu_is_applied_to_each_head) {
    bench b = bench_new(CG_F64);
    cg_value *q = bench_real(&b, "q", CG_SHAPE(1, 2, 2), (double[]){1, 0, 0, 1});
    cg_value *w = bench_real(&b, "w", CG_SHAPE(1, 2), (double[]){1, 1});
    cg_value *k = bench_real(&b, "k", CG_SHAPE(2, 2), (double[]){3, -5, 1, .5});
    cg_value *rows = bench_i32(&b, "rows", CG_SHAPE(1, 5), (int32_t[]){ROW_SEES(2)});
    cg_value *one = cg_keep(cg_indexer_topk(b.graph, q, w, k, rows, 1));
    cg_value *both = cg_indexer_topk(b.graph, q, w, k, rows, 2);
    cg_value *scores = cg_keep(cg_indexer_scores_at(b.graph, q, w, k, both));
    bench_run(&b);
    ck_assert_int_eq(bench_get_i32(&b, one)[0], 0);
    expect_close("scores", bench_get(&b, scores), (double[]){3, 1.5}, 2, 0);
    bench_free(&b);
}
END_TEST

/* S23: lists hold rows of the packed array. */
START_TEST(lists_count_from_the_start_of_the_array) {
    bench b = bench_new(CG_F32);
    double zeros[16] = {0};
    cg_value *cu = bench_i32(&b, "cu", CG_SHAPE(3), (int32_t[]){0, 8, 16});
    cg_value *rows = cg_segment_rows(b.graph, cu, NULL, 16, 4, 4).rows;
    cg_value *q = bench_constant(&b, "q", CG_SHAPE(16, 1, 1), zeros);
    cg_value *w = bench_constant(&b, "w", CG_SHAPE(16, 1), zeros);
    cg_value *topk =
        cg_keep(cg_indexer_topk(b.graph, q, w, bench_constant(&b, "k", CG_SHAPE(4, 1), zeros), rows, 2));
    bench_run(&b);
    const int32_t *list = bench_get_i32(&b, topk);
    const struct {
        int row;
        int32_t a, b;
    } want[] = {{2, -1, -1}, {3, 0, -1}, {7, 0, 1}, {8, -1, -1}, {11, 2, -1}, {15, 2, 3}};
    for (int i = 0; i < 6; i++) {
        ck_assert_int_eq(list[2 * want[i].row], want[i].a);
        ck_assert_int_eq(list[2 * want[i].row + 1], want[i].b);
    }
    bench_free(&b);
}
END_TEST

/* S31: one divisor for all rows, however they are split into batches. */
START_TEST(averages_are_not_averaged) {
    const double kl[] = {.1, .2, .3, .5};
    double whole = 0, split = 0;
    const struct {
        int from, to;
        bool mean;
    } batches[] = {{0, 4, true}, {0, 3, false}, {3, 4, false}};
    for (int i = 0; i < 3; i++) {
        bench b = bench_new(CG_F64);
        int n = batches[i].to - batches[i].from;
        double s[8], t[8];
        int32_t fields[20];
        for (int r = 0; r < n; r++) {
            row_of_kl(kl[batches[i].from + r], s + 2 * r);
            memcpy(t + 2 * r, (double[]){1, 0}, 2 * sizeof *t);
            memcpy(fields + 5 * r, (int32_t[]){ROW_SEES(2)}, 5 * sizeof *fields);
        }
        cg_value *rows = bench_i32(&b, "rows", CG_SHAPE(n, 5), fields);
        cg_value *loss = cg_keep(cg_indexer_kl(
            b.graph, bench_real(&b, "s", CG_SHAPE(n, 2), s), bench_constant(&b, "t", CG_SHAPE(n, 2), t), rows,
            batches[i].mean ? CG_REDUCE_MEAN_REAL : CG_REDUCE_SUM, batches[i].mean ? 1 : .25));
        bench_run(&b);
        *(batches[i].mean ? &whole : &split) += bench_get(&b, loss)[0];
        bench_free(&b);
    }
    expect_close("whole", &whole, (double[]){.275}, 1, 1e-14);
    expect_close("split", &split, (double[]){.275}, 1, 1e-14);
}
END_TEST

/* S39: at a dot of exactly 0 the gradient is 0, streamed and spelled out. */
START_TEST(derivative_at_the_kink_is_zero) {
    for (int spelled = 0; spelled < 2; spelled++)
        for (int kink = 0; kink < 2; kink++) {
            bench b = bench_new(CG_F64);
            cg_value *q = bench_real(&b, "q", CG_SHAPE(1, 1, 2), (double[]){1, -1});
            cg_value *w = bench_real(&b, "w", CG_SHAPE(1, 1), (double[]){1});
            cg_value *k = bench_real(&b, "k", CG_SHAPE(1, 2), (double[]){1, kink ? 1 : .9});
            cg_value *list = bench_i32(&b, "list", CG_SHAPE(1, 1), (int32_t[]){0});
            cg_value *all = cg_relu(b.graph, cg_indexer_head_scores(b.graph, q, k));
            cg_value *s = spelled ? cg_gather(b.graph, cg_indexer_head_sum(b.graph, all, w), list)
                                  : cg_indexer_scores_at(b.graph, q, w, k, list);
            bench_backward(&b, s, NULL);
            bench_run(&b);
            expect_close("dq", bench_grad(&b, q), (double[]){kink ? 0 : 1, kink ? 0 : .9}, 2, 0);
            expect_close("dk", bench_grad(&b, k), (double[]){kink ? 0 : 1, kink ? 0 : -1}, 2, 0);
            bench_free(&b);
        }
}
END_TEST

/* S05: a coefficient of 0 gives gradients of +0.0, never -0.0. */
START_TEST(zero_coefficient_gives_plain_zeros) {
    problem p = problem_open("thd_padded_sparse_mean");
    p.coeff = 0;
    for (int sparse = 0; sparse < 2; sparse++)
        for (form how = 0; how < SPELLED; how++) {
            solved s = solve(&p, CG_F64, how, CG_TEACHER_FULL, sparse, false);
            ck_assert(bench_get(&s.b, s.loss)[0] == 0);
            const cg_value *leaves[] = {s.q_index, s.w, s.k_index};
            for (int i = 0; i < 3; i++) {
                const double *grad = bench_grad(&s.b, leaves[i]);
                for (int64_t n = cg_shape_count(&leaves[i]->shape), j = 0; j < n; j++)
                    ck_assert(grad[j] == 0 && !signbit(grad[j]));
            }
            bench_free(&s.b);
        }
    problem_close(&p);
}
END_TEST

/* ---- the three forms on more rows ---- */

/* Three segments of random rows: 600 rows, 150 compressed ones, the last segment padded. */
static problem random_problem(void) {
    problem p = {.T = 600,
                 .C = 150,
                 .Hi = 8,
                 .Di = 32,
                 .H = 4,
                 .D = 16,
                 .K = 10,
                 .B = 3,
                 .ratio = 4,
                 .window = 9,
                 .scale = .25,
                 .coeff = .5,
                 .reduction = CG_REDUCE_MEAN_REAL};
    double **arrays[] = {&p.q_index, &p.w, &p.k_index, &p.q, &p.kv, &p.ckv, &p.sink};
    const int64_t counts[] = {p.T * p.Hi * p.Di, p.T * p.Hi, p.C * p.Di, p.T * p.H * p.D,
                              p.T * p.D,         p.C * p.D,  p.H};
    for (int i = 0; i < 7; i++) {
        *arrays[i] = malloc((size_t)counts[i] * sizeof(double));
        for (int64_t j = 0; j < counts[i]; j++)
            (*arrays[i])[j] = (float)cg_random_normal(5, (uint64_t)i, (uint64_t)j);
    }
    p.cu_seqlens = memcpy(malloc(4 * sizeof(int32_t)), (int32_t[]){0, 397, 400, 600}, 4 * sizeof(int32_t));
    p.seqlens = memcpy(malloc(3 * sizeof(int32_t)), (int32_t[]){397, 3, 180}, 3 * sizeof(int32_t));
    p.first_key = calloc(1, sizeof(int32_t));
    return p;
}

static void random_close(problem *p) {
    p->file = NULL;
    problem_close(p);
}

/* The streaming choice has the bits of the spelled-out scores, so both choose alike; and so do chosen scores.
 */
START_TEST(streamed_scores_have_the_spelled_out_bits) {
    enum { SOME = 40 };
    problem p = random_problem();
    for (int dtype = CG_F32; dtype <= CG_F64; dtype++) {
        bench b = bench_new((cg_dtype)dtype);
        cg_graph *g = b.graph;
        cg_value *q = bench_constant(&b, "q", CG_SHAPE(p.T, p.Hi, p.Di), p.q_index);
        cg_value *w = bench_constant(&b, "w", CG_SHAPE(p.T, p.Hi), p.w);
        cg_value *k = bench_constant(&b, "k", CG_SHAPE(p.C, p.Di), p.k_index);
        cg_value *cu = bench_i32(&b, "cu", CG_SHAPE(4), p.cu_seqlens);
        cg_value *rows = cg_segment_rows(g, cu, NULL, p.T, p.ratio, p.C).rows;
        cg_value *all = cg_indexer_head_sum(g, cg_relu(g, cg_indexer_head_scores(g, q, k)), w);
        cg_value *spelled = cg_keep(cg_topk(g, all, rows, p.K));
        cg_value *streamed = cg_keep(cg_indexer_topk(g, q, w, k, rows, p.K));
        int32_t *some =
            malloc((size_t)(p.T * SOME) * sizeof(int32_t)); /* of all keys, one in four slots empty */
        for (int64_t i = 0; i < p.T * SOME; i++)
            some[i] = i % 4 == 1 ? -1 : (int32_t)cg_random_below(9, 0, (uint64_t)i, p.C);
        cg_value *const lists[] = {cg_visible_indices(g, rows, p.C),
                                   bench_i32(&b, "some", CG_SHAPE(p.T, SOME), some)};
        cg_value *at[2], *gathered[2];
        for (int i = 0; i < 2; i++) {
            at[i] = cg_keep(cg_indexer_scores_at(g, q, w, k, lists[i]));
            gathered[i] = cg_keep(cg_gather(g, all, lists[i]));
        }
        bench_run(&b);
        free(some);
        ck_assert(!memcmp(bench_get_i32(&b, spelled), bench_get_i32(&b, streamed),
                          (size_t)(p.T * p.K) * sizeof(int32_t)));
        for (int i = 0; i < 2; i++) {
            const double *x = bench_get(&b, at[i]), *y = bench_get(&b, gathered[i]);
            for (int64_t j = 0; j < cg_shape_count(&at[i]->shape); j++) ck_assert(x[j] == y[j]);
        }
        bench_free(&b);
    }
    random_close(&p);
}
END_TEST

START_TEST(three_forms_agree) {
    problem p = random_problem();
    for (int sparse = 0; sparse < 2; sparse++) {
        solved first = solve(&p, CG_F64, STREAMED, CG_TEACHER_FULL, sparse, false);
        for (form how = LISTS; how < FORMS; how++) {
            solved s = solve(&p, CG_F64, how, CG_TEACHER_FULL, sparse, false);
            expect_close("loss", bench_get(&s.b, s.loss), bench_get(&first.b, first.loss), 1, 1e-12);
            expect_close("kl", bench_get(&s.b, s.kl), bench_get(&first.b, first.kl), p.T, 1e-12);
            expect_close("dq", bench_grad(&s.b, s.q_index), bench_grad(&first.b, first.q_index),
                         p.T * p.Hi * p.Di, 1e-12);
            expect_close("dw", bench_grad(&s.b, s.w), bench_grad(&first.b, first.w), p.T * p.Hi, 1e-12);
            expect_close("dk", bench_grad(&s.b, s.k_index), bench_grad(&first.b, first.k_index), p.C * p.Di,
                         1e-12);
            bench_free(&s.b);
        }
        bench_free(&first.b);
    }
    random_close(&p);
}
END_TEST

START_TEST(f32_agrees_with_f64_on_many_rows) {
    problem p = random_problem();
    for (int sparse = 0; sparse < 2; sparse++) {
        solved exact = solve(&p, CG_F64, STREAMED, CG_TEACHER_FULL, sparse, false);
        for (form how = 0; how < FORMS; how++) {
            solved s = solve(&p, CG_F32, how, CG_TEACHER_FULL, sparse, false);
            expect_close("loss", bench_get(&s.b, s.loss), bench_get(&exact.b, exact.loss), 1, 1e-6);
            expect_close("kl", bench_get(&s.b, s.kl), bench_get(&exact.b, exact.kl), p.T, 1e-5);
            const cg_value *a[] = {s.q_index, s.w, s.k_index}, *b[] = {exact.q_index, exact.w, exact.k_index};
            for (int i = 0; i < 3; i++)
                expect_close("gradient", bench_grad(&s.b, a[i]), bench_grad(&exact.b, b[i]),
                             cg_shape_count(&a[i]->shape), 1e-5);
            bench_free(&s.b);
        }
        bench_free(&exact.b);
    }
    random_close(&p);
}
END_TEST

START_TEST(bits_do_not_depend_on_threads) {
    problem p = random_problem();
    cg_error error = {0};
    for (int sparse = 0; sparse < 2; sparse++)
        for (form how = 0; how < FORMS; how++) {
            ck_assert(cg_threads_set(1, &error));
            solved one = solve(&p, CG_F32, how, CG_TEACHER_FULL, sparse, false);
            ck_assert(cg_threads_set(cg_thread_slots(), &error));
            solved all = solve(&p, CG_F32, how, CG_TEACHER_FULL, sparse, false);
            ck_assert(bench_get(&one.b, one.loss)[0] == bench_get(&all.b, all.loss)[0]);
            const cg_value *a[] = {one.q_index, one.w, one.k_index}, *b[] = {all.q_index, all.w, all.k_index};
            for (int i = 0; i < 3; i++)
                ck_assert(!memcmp(bench_grad(&one.b, a[i]), bench_grad(&all.b, b[i]),
                                  (size_t)cg_shape_count(&a[i]->shape) * sizeof(double)));
            bench_free(&one.b);
            bench_free(&all.b);
        }
    random_close(&p);
}
END_TEST

/* Gradients of chosen scores against their formula, and with the same bits on one thread and on all: in one share of the
 * rows, in as many as two threads can take evenly, and in three, which they cannot. */
START_TEST(shares_of_rows_add_up) {
    enum { T = 96, Hi = 11, Di = 8, C = 12 };
    cg_error error = {0};
    for (int64_t shares = 1; shares <= 8; shares++) {
        const int64_t K = 2 * shares; /* T K / (2 C Di) shares */
        double q[T * Hi * Di], w[T * Hi], k[C * Di], ds[T * 16];
        int32_t list[T * 16];
        for (int64_t i = 0; i < T * Hi * Di; i++) q[i] = (float)cg_random_normal(21, 0, (uint64_t)i);
        for (int64_t i = 0; i < T * Hi; i++) w[i] = (float)cg_random_normal(21, 1, (uint64_t)i);
        for (int64_t i = 0; i < C * Di; i++) k[i] = (float)cg_random_normal(21, 2, (uint64_t)i);
        for (int64_t i = 0; i < T * K; i++) {
            ds[i] = (float)cg_random_normal(21, 3, (uint64_t)i);
            list[i] = (int32_t)cg_random_below(21, 4, (uint64_t)i, C + 1) - 1;
        }
        double dq[T * Hi * Di] = {0}, dw[T * Hi] = {0}, dk[C * Di] = {0};
        for (int64_t i = 0; i < T * K; i++)
            for (int64_t h = 0; list[i] >= 0 && h < Hi; h++) {
                const int64_t row = i / K * Hi + h;
                const double *key = k + list[i] * Di, *head = q + row * Di;
                double dot = 0;
                for (int64_t d = 0; d < Di; d++) dot += head[d] * key[d];
                if (dot <= 0) continue;
                dw[row] += ds[i] * dot;
                for (int64_t d = 0; d < Di; d++) {
                    dq[row * Di + d] += ds[i] * w[row] * key[d];
                    dk[list[i] * Di + d] += ds[i] * w[row] * head[d];
                }
            }
        const double *want[] = {dq, dw, dk};
        for (int dtype = CG_F32; dtype <= CG_F64; dtype++) {
            bench b[2];
            for (int many = 0; many < 2; many++) {
                ck_assert(cg_threads_set(many ? cg_thread_slots() : 1, &error));
                b[many] = bench_new((cg_dtype)dtype);
                cg_value *const in[] = {bench_real(&b[many], "q", CG_SHAPE(T, Hi, Di), q),
                                        bench_real(&b[many], "w", CG_SHAPE(T, Hi), w),
                                        bench_real(&b[many], "k", CG_SHAPE(C, Di), k)};
                cg_value *scores = cg_indexer_scores_at(b[many].graph, in[0], in[1], in[2],
                                                        bench_i32(&b[many], "list", CG_SHAPE(T, K), list));
                bench_backward(&b[many], scores, ds);
                bench_run(&b[many]);
            }
            for (int i = 0; i < 3; i++) {
                const cg_value *leaf = b[0].leaves[i].leaf;
                const int64_t n = cg_shape_count(&leaf->shape);
                const double *one = bench_grad(&b[0], leaf), *all = bench_grad(&b[1], b[1].leaves[i].leaf);
                ck_assert(!memcmp(one, all, (size_t)n * sizeof(double)));
                expect_close("gradient", one, want[i], n, dtype == CG_F32 ? 1e-6 : 1e-14);
            }
            for (int many = 0; many < 2; many++) bench_free(&b[many]);
        }
    }
    ck_assert(cg_threads_set(cg_thread_slots(), &error));
}
END_TEST

/* Health against its definition, from the dense teacher over a list. */
START_TEST(health_by_definition) {
    problem p = random_problem();
    bench b = bench_new(CG_F64);
    cg_graph *g = b.graph;
    cg_value *q_index = bench_constant(&b, "q_index", CG_SHAPE(p.T, p.Hi, p.Di), p.q_index);
    cg_value *w = bench_constant(&b, "w", CG_SHAPE(p.T, p.Hi), p.w);
    cg_value *k_index = bench_constant(&b, "k_index", CG_SHAPE(p.C, p.Di), p.k_index);
    cg_value *q = bench_constant(&b, "q", CG_SHAPE(p.T, p.H, p.D), p.q);
    cg_value *kv = bench_constant(&b, "kv", CG_SHAPE(p.T, p.D), p.kv);
    cg_value *ckv = bench_constant(&b, "ckv", CG_SHAPE(p.C, p.D), p.ckv);
    cg_value *sink = bench_constant(&b, "sink", CG_SHAPE(p.H), p.sink);
    cg_value *rows =
        cg_keep(cg_segment_rows(g, bench_i32(&b, "cu", CG_SHAPE(4), p.cu_seqlens),
                                bench_i32(&b, "lengths", CG_SHAPE(3), p.seqlens), p.T, p.ratio, p.C)
                    .rows);
    cg_value *topk = cg_keep(cg_indexer_topk(g, q_index, w, k_index, rows, p.K));
    cg_value *scores = cg_indexer_scores_at(g, q_index, w, k_index, topk);
    cg_attention attention =
        cg_csa_attention(g, q, kv, ckv, sink, topk, rows, p.window, p.scale, CG_TEACHER_FULL);
    cg_value *kl =
        cg_keep(cg_output(cg_keep(cg_indexer_kl(g, scores, attention.teacher, rows, CG_REDUCE_SUM, 1)), 1));
    cg_value *list = cg_keep(cg_visible_indices(g, rows, p.C));
    cg_value *dense =
        cg_keep(cg_csa_teacher_at(g, q, ckv, list, attention.window_lse, NULL, p.scale, CG_TEACHER_FULL));
    cg_value *health = cg_keep(cg_indexer_health(g, scores, cg_keep(attention.teacher), topk, w, q, ckv,
                                                 attention.window_lse, rows, p.scale, p.ratio));
    bench_run(&b);
    const double *target = bench_get(&b, dense), *teacher = bench_get(&b, attention.teacher),
                 *row_kl = bench_get(&b, kl);
    const int32_t *chosen = bench_get_i32(&b, topk), *fields = bench_get_i32(&b, rows);
    double want[CG_HEALTH_FIELDS] = {0};
    for (int64_t t = 0; t < p.T; t++) {
        const int32_t *row = fields + t * CG_ROW_FIELDS;
        if (row[CG_ROW_VISIBLE] <= p.K) continue;
        want[CG_HEALTH_ROWS]++;
        want[CG_HEALTH_KL] += row_kl[t];
        bool top = false;
        for (int64_t j = 0; j < p.K; j++) {
            int64_t local = chosen[t * p.K + j] - row[CG_ROW_COMPRESSED], larger = 0;
            double mine = target[t * p.C + local], share = teacher[t * p.K + j];
            for (int64_t i = 0; i < row[CG_ROW_VISIBLE]; i++) larger += target[t * p.C + i] > mine;
            want[CG_HEALTH_RECALL] += (larger < p.K) / (double)p.K;
            top |= larger == 0;
            want[CG_HEALTH_MASS] += mine;
            want[CG_HEALTH_KL_UNIFORM] += share * log(share * (double)p.K);
            want[CG_HEALTH_DISTANCE] += (double)(row[CG_ROW_POSITION] - local * p.ratio) / (double)p.K;
        }
        want[CG_HEALTH_TOP1_MISSED] += !top;
        for (int64_t h = 0; h < p.Hi; h++) want[CG_HEALTH_NEGATIVE] += (p.w[t * p.Hi + h] < 0) / (double)p.Hi;
    }
    const double *got = bench_get(&b, health);
    for (int i = 0; i < CG_HEALTH_FIELDS; i++) expect_close("health", got + i, want + i, 1, 1e-11);
    ck_assert(want[CG_HEALTH_ROWS] == 354 + 137); /* from position 43 on */
    bench_free(&b);
    random_close(&p);
}
END_TEST

/* Twice as many equal segments are twice the work: no token sees another segment's rows. */
START_TEST(costs_count_a_segments_own_pairs) {
    double flops[2];
    for (int twice = 0; twice < 2; twice++) {
        const int64_t n = 1 + twice, T = 64 * n, C = 16 * n;
        cg_graph *g = cg_graph_new(&cg_all_ops);
        cg_value *cu = cg_leaf(g, CG_LEAF_INPUT, "cu", CG_I32, CG_SHAPE(n + 1));
        cg_value *topk = cg_indexer_topk(g, cg_leaf(g, CG_LEAF_INPUT, "q", CG_F32, CG_SHAPE(T, 3, 5)),
                                         cg_leaf(g, CG_LEAF_INPUT, "w", CG_F32, CG_SHAPE(T, 3)),
                                         cg_leaf(g, CG_LEAF_INPUT, "k", CG_F32, CG_SHAPE(C, 5)),
                                         cg_segment_rows(g, cu, NULL, T, 4, C).rows, 7);
        ck_assert_ptr_nonnull(topk);
        flops[twice] = topk->producer->op->cost(topk->producer).flops;
        cg_graph_free(g);
    }
    ck_assert(flops[0] ==
              64 * 16 / 2 * 3 * (2 * 5 + 2)); /* half of all pairs; heads; a product, relu and weight */
    ck_assert(flops[1] == 2 * flops[0]);
}
END_TEST

SUITE("indexer", stored_losses, boundary_scores_are_exact, stored_teacher_modes, rotation_changes_nothing,
      denominator_holds_window_and_sink, dense_is_not_sparse, tiny_mass_keeps_its_target,
      no_epsilon_in_the_logarithms, gradients_through_relu_and_negative_weight, padding_counts_nowhere,
      ties_go_to_the_lower_index, the_best_are_chosen_whatever_the_numbers, fewer_candidates_than_width,
      relu_is_applied_to_each_head, lists_count_from_the_start_of_the_array, averages_are_not_averaged,
      derivative_at_the_kink_is_zero, zero_coefficient_gives_plain_zeros,
      streamed_scores_have_the_spelled_out_bits, three_forms_agree, f32_agrees_with_f64_on_many_rows,
      bits_do_not_depend_on_threads, shares_of_rows_add_up, health_by_definition,
      costs_count_a_segments_own_pairs)
