/* Cases from bug reports about single rows: attention, teacher, loss, selection (see tests/CASES.md), each tried over
 * its whole kind: sizes, places, block borders. */
#include "tests/support.h"

#include "core/base/rng.h"
#include "graph/gradcheck.h"
#include "models/check/contract.h"

#define FOR_REAL(dtype) for (cg_dtype dtype = CG_F32; dtype <= CG_F64; dtype++)

/* A float, so that both dtypes start from the same values. */
static double draw(uint64_t stream, int64_t i) { return (float)cg_random_normal(17, stream, (uint64_t)i); }

static double *draws(uint64_t stream, int64_t n) {
    double *x = malloc(sizeof *x * (size_t)(n + 1));
    for (int64_t i = 0; i < n; i++) x[i] = draw(stream, i);
    return x;
}

/* ---- rows that attend: T rows of one segment, each seeing all of C compressed rows ---- */

typedef struct rows_setup {
    cg_dtype dtype;
    int64_t T, H, D, C, K, W;
    const int32_t *topk;
    const double *dout; /* NULL: drawn */
    const double *sink; /* NULL: drawn */
    const double *q;    /* NULL: drawn */
    const double *ckv;  /* NULL: drawn */
    int64_t first_head; /* heads first_head .. first_head + H - 1 of all_heads; all_heads 0: H */
    int64_t all_heads;
} rows_setup;

typedef struct rows_run {
    bench b;
    cg_value *q, *kv, *ckv, *sink;
    cg_attention a;
    double *out, *lse, *teacher, *dq, *dkv, *dckv, *dsink;
} rows_run;

static rows_run run_rows(const rows_setup *s) {
    rows_run r = {.b = bench_new(s->dtype)};
    const int64_t all = s->all_heads ? s->all_heads : s->H, size = s->T * s->H * s->D;
    double *q = malloc(sizeof *q * (size_t)(size + 1)), *dout = malloc(sizeof *dout * (size_t)(size + 1));
    for (int64_t i = 0; i < size; i++) {
        const int64_t t = i / (s->H * s->D), h = i / s->D % s->H + s->first_head, d = i % s->D;
        const int64_t at = (t * all + h) * s->D + d;
        q[i] = s->q ? s->q[i] : draw(1, at);
        dout[i] = s->dout ? s->dout[i] : draw(2, at);
    }
    double *kv = draws(3, s->T * s->D), *ckv = draws(4, s->C * s->D), *sink = draws(5, s->H + s->first_head);
    int32_t *facts = malloc(sizeof(int32_t) * (size_t)(s->T * CG_ROW_FIELDS + 1));
    for (int64_t t = 0; t < s->T; t++)
        memcpy(facts + t * CG_ROW_FIELDS, (int32_t[]){0, (int32_t)t, 0, (int32_t)s->C, 1}, 20);
    r.q = bench_real(&r.b, "q", CG_SHAPE(s->T, s->H, s->D), q);
    r.kv = bench_real(&r.b, "kv", CG_SHAPE(s->T, s->D), kv);
    r.ckv = bench_real(&r.b, "ckv", CG_SHAPE(s->C, s->D), s->ckv ? s->ckv : ckv);
    r.sink = bench_real(&r.b, "sink", CG_SHAPE(s->H), s->sink ? s->sink : sink + s->first_head);
    r.a = cg_csa_attention(r.b.graph, r.q, r.kv, r.ckv, r.sink,
                           bench_i32(&r.b, "topk", CG_SHAPE(s->T, s->K), s->topk),
                           bench_i32(&r.b, "facts", CG_SHAPE(s->T, CG_ROW_FIELDS), facts), s->W,
                           1 / sqrt((double)s->D), CG_TEACHER_FULL);
    cg_keep(r.a.lse), cg_keep(r.a.teacher);
    bench_backward(&r.b, r.a.out, dout);
    bench_run(&r.b);
    r.out = bench_get(&r.b, r.a.out), r.lse = bench_get(&r.b, r.a.lse),
    r.teacher = bench_get(&r.b, r.a.teacher);
    r.dq = bench_grad(&r.b, r.q), r.dkv = bench_grad(&r.b, r.kv), r.dckv = bench_grad(&r.b, r.ckv);
    r.dsink = bench_grad(&r.b, r.sink);
    free(q), free(dout), free(kv), free(ckv), free(sink), free(facts);
    return r;
}

static void expect_bits(const char *what, const double *a, const double *b, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (a[i] != b[i]) ck_abort_msg("%s[%lld]: %.17g and %.17g", what, (long long)i, a[i], b[i]);
}

static void expect_finite(const double *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) ck_assert(isfinite(x[i]));
}

/* ---- loss ---- */

/* Random rows with padding: every teacher and support by the ops against plain loops over one row at a time. S01: what
 * stands in the denominator; S02: which keys; S09: all heads. */
enum { O_T = 26, O_C = 6, O_H = 4, O_D = 5, O_HI = 3, O_DI = 4, O_K = 2, O_W = 4 };

static void expect_objective(cg_dtype dtype, cg_teacher teacher, int teacher_value, int listed) {
    static const int32_t cu[] = {0, 15, 15, 26}, seqlens[] = {15, 0, 9};
    bench b = bench_new(dtype);
    cg_graph *g = b.graph;
    double *q = draws(1, O_T * O_H * O_D), *kv = draws(2, O_T * O_D), *ckv = draws(3, O_C * O_D),
           *sink = draws(4, O_H);
    double *qi = draws(5, O_T * O_HI * O_DI), *w = draws(6, O_T * O_HI), *ki = draws(7, O_C * O_DI);
    cg_value *vq = bench_real(&b, "q", CG_SHAPE(O_T, O_H, O_D), q),
             *vkv = bench_real(&b, "kv", CG_SHAPE(O_T, O_D), kv);
    cg_value *vckv = bench_real(&b, "ckv", CG_SHAPE(O_C, O_D), ckv),
             *vsink = bench_real(&b, "sink", CG_SHAPE(O_H), sink);
    cg_value *vqi = bench_real(&b, "q_index", CG_SHAPE(O_T, O_HI, O_DI), qi);
    cg_value *vw = bench_real(&b, "w", CG_SHAPE(O_T, O_HI), w),
             *vki = bench_real(&b, "k_index", CG_SHAPE(O_C, O_DI), ki);
    cg_value *rows = cg_keep(cg_segment_rows(g, bench_i32(&b, "cu", CG_SHAPE(4), cu),
                                             bench_i32(&b, "seqlens", CG_SHAPE(3), seqlens), O_T, 4, O_C)
                                 .rows);
    cg_value *topk = cg_keep(cg_indexer_topk(g, vqi, vw, vki, rows, O_K));
    cg_attention a = cg_csa_attention(g, vq, vkv, vckv, vsink, topk, rows, O_W, 0.7, teacher);
    cg_value *lse = teacher == CG_TEACHER_FULL ? a.window_lse : NULL,
             *own = teacher == CG_TEACHER_SINK ? vsink : NULL;
    cg_value *visible = cg_visible_indices(g, rows, O_C), *dense;
    if (listed)
        dense = cg_indexer_kl(g, cg_indexer_scores_at(g, vqi, vw, vki, visible),
                              cg_csa_teacher_at(g, vq, vckv, visible, lse, own, 0.7, teacher), rows,
                              CG_REDUCE_MEAN_REAL, 0.5);
    else
        dense = cg_indexer_dense_loss(g, vqi, vw, vki, vq, vckv, lse, own, rows, 0.7, teacher,
                                      CG_REDUCE_MEAN_REAL, 0.5);
    cg_value *sparse = cg_indexer_kl(g, cg_indexer_scores_at(g, vqi, vw, vki, topk), a.teacher, rows,
                                     CG_REDUCE_MEAN_REAL, 0.5);
    cg_value *losses[] = {sparse, dense}, *kls[2];
    for (int k = 0; k < 2; k++) cg_keep(losses[k]), kls[k] = cg_keep(cg_output(losses[k], 1));
    bench_backward(&b, cg_add(g, sparse, dense), NULL);
    bench_run(&b);

    const int32_t *fact = bench_get_i32(&b, rows), *list = bench_get_i32(&b, topk);
    double loss[2] = {0}, dqi[O_T * O_HI * O_DI] = {0}, dw[O_T * O_HI] = {0}, dki[O_C * O_DI] = {0},
           kl[2][O_T] = {{0}};
    for (int64_t t = 0; t < O_T; t++) {
        const int32_t *f = fact + t * CG_ROW_FIELDS;
        const int n = f[CG_ROW_VISIBLE];
        double logits[O_H * O_C], window[O_H], scores[O_C], dots[O_HI * O_C], scratch[O_H];
        unsigned char selected[O_C] = {0};
        for (int k = 0; k < O_K; k++)
            if (list[t * O_K + k] >= 0) selected[list[t * O_K + k] - f[CG_ROW_COMPRESSED]] = 1;
        int32_t keys[O_C];
        for (int j = 0; j < n; j++) keys[j] = f[CG_ROW_COMPRESSED] + j;
        for (int h = 0; h < O_H; h++) {
            double sum = 0;
            for (int64_t i = t - O_W + 1 > f[CG_ROW_START] ? t - O_W + 1 : f[CG_ROW_START]; i <= t; i++) {
                double x = 0;
                for (int d = 0; d < O_D; d++) x += 0.7 * q[(t * O_H + h) * O_D + d] * kv[i * O_D + d];
                sum += exp(x);
            }
            window[h] = log(sum);
            for (int j = 0; j < n; j++) {
                logits[h * n + j] = 0;
                for (int d = 0; d < O_D; d++)
                    logits[h * n + j] += 0.7 * q[(t * O_H + h) * O_D + d] * ckv[keys[j] * O_D + d];
            }
        }
        for (int j = 0; j < n; j++) {
            scores[j] = 0;
            for (int h = 0; h < O_HI; h++) {
                double x = 0;
                for (int d = 0; d < O_DI; d++) x += qi[(t * O_HI + h) * O_DI + d] * ki[keys[j] * O_DI + d];
                dots[h * n + j] = x;
                scores[j] += w[t * O_HI + h] * fmax(x, 0);
            }
        }
        for (int k = 0; k < 2; k++) {
            cg_contract c = cg_contract_default();
            c.value[CG_AXIS_TEACHER] = teacher_value;
            c.value[CG_AXIS_SUPPORT] = k ? CG_SUPPORT_IS_DENSE : CG_SUPPORT_IS_SPARSE;
            const cg_contract_row row = {O_H, n, logits, window, sink, scores, NULL, selected, NULL};
            double target[O_C], ds[O_C], one_dw[O_HI], one_dq[O_HI * O_DI];
            cg_contract_row_eval(&c, &row, target, NULL, ds, &kl[k][t], scratch);
            loss[k] += 0.5 * kl[k][t] / 24; /* 15 + 9 real rows */
            for (int j = 0; j < n; j++) ds[j] *= 0.5 / 24;
            const cg_contract_index index = {O_HI, O_DI, n, qi + t * O_HI * O_DI, w + t * O_HI, dots, ki, keys};
            cg_contract_index_grad(&c, &index, ds, one_dw, one_dq, dki);
            for (int i = 0; i < O_HI; i++) dw[t * O_HI + i] += one_dw[i];
            for (int i = 0; i < O_HI * O_DI; i++) dqi[t * O_HI * O_DI + i] += one_dq[i];
        }
    }
    const double bound = dtype == CG_F64 ? 1e-12 : 2e-5;
    for (int k = 0; k < 2; k++) {
        expect_close("loss", bench_get(&b, losses[k]), &loss[k], 1, bound);
        expect_close("kl", bench_get(&b, kls[k]), kl[k], O_T, bound);
        ck_assert(loss[k] > 1e-3);
    }
    ck_assert(fabs(loss[0] - loss[1]) > 1e-4);
    expect_close("dw", bench_grad(&b, vw), dw, O_T * O_HI, bound);
    expect_close("dq", bench_grad(&b, vqi), dqi, O_T * O_HI * O_DI, bound);
    expect_close("dk", bench_grad(&b, vki), dki, O_C * O_DI, bound);
    const double *dq = bench_grad(&b, vq), *dsink = bench_grad(&b, vsink);
    for (int i = 0; i < O_T * O_H * O_D; i++) ck_assert(dq[i] == 0);
    for (int i = 0; i < O_H; i++) ck_assert(dsink[i] == 0);
    bench_free(&b);
    free(q), free(kv), free(ckv), free(sink), free(qi), free(w), free(ki);
}

/* Both losses from one saved forward. */
START_TEST(s01_s02_every_teacher_and_support_by_plain_loops) {
    FOR_REAL(dtype) for (int listed = 0; listed < 2; listed++) {
        expect_objective(dtype, CG_TEACHER_FULL, CG_TEACHER_IS_FULL, listed);
        expect_objective(dtype, CG_TEACHER_SINK, CG_TEACHER_IS_SINK, listed);
        expect_objective(dtype, CG_TEACHER_COMPRESSED, CG_TEACHER_IS_COMPRESSED, listed);
    }
}
END_TEST

/* One row, H heads with logits x [H, n], window_lse [H] and scores [n]: teacher, kl, dI by lists, kl and dk by the
 * streamed dense loss, whose keys are scores by relu(k) - relu(-k). */
typedef struct one_row {
    double target[64], kl, dscores[64], dense_kl, dk[64];
} one_row;

static one_row lose(cg_dtype dtype, int64_t H, int64_t n, const double *x, const double *window_lse,
                    const double *scores) {
    one_row r;
    bench b = bench_new(dtype);
    cg_graph *g = b.graph;
    double identity[64 * 64] = {0};
    int32_t list[64];
    ck_assert_int_le(n, 64);
    for (int64_t j = 0; j < n; j++) identity[j * n + j] = 1, list[j] = (int32_t)j;
    cg_value *rows = bench_i32(&b, "rows", CG_SHAPE(1, CG_ROW_FIELDS), (int32_t[]){0, 0, 0, (int32_t)n, 1});
    cg_value *q = bench_constant(&b, "q", CG_SHAPE(1, H, n), x),
             *ckv = bench_constant(&b, "ckv", CG_SHAPE(n, n), identity);
    cg_value *lse = bench_constant(&b, "lse", CG_SHAPE(1, H), window_lse);
    cg_value *s = bench_real(&b, "scores", CG_SHAPE(1, n), scores);
    cg_value *teacher = cg_keep(cg_csa_teacher_at(g, q, ckv, bench_i32(&b, "list", CG_SHAPE(1, n), list), lse,
                                                  NULL, 1, CG_TEACHER_FULL));
    cg_value *loss = cg_keep(cg_indexer_kl(g, s, teacher, rows, CG_REDUCE_SUM, 1));
    cg_value *qi = bench_constant(&b, "qi", CG_SHAPE(1, 2, 1), (double[]){1, -1});
    cg_value *w = bench_constant(&b, "w", CG_SHAPE(1, 2), (double[]){1, -1}),
             *k = bench_real(&b, "k", CG_SHAPE(n, 1), scores);
    cg_value *dense = cg_keep(
        cg_indexer_dense_loss(g, qi, w, k, q, ckv, lse, NULL, rows, 1, CG_TEACHER_FULL, CG_REDUCE_SUM, 1));
    bench_backward(&b, cg_add(g, loss, dense), NULL);
    bench_run(&b);
    memcpy(r.target, bench_get(&b, teacher), sizeof(double) * (size_t)n);
    memcpy(r.dscores, bench_grad(&b, s), sizeof(double) * (size_t)n);
    memcpy(r.dk, bench_grad(&b, k), sizeof(double) * (size_t)n);
    r.kl = bench_get(&b, loss)[0];
    r.dense_kl = bench_get(&b, dense)[0];
    bench_free(&b);
    return r;
}

/* Windows from far below to far above what exp can hold, up to a mass of 1e-1300: one head's target never moves, and
 * the loss and its gradient stay what they are. */
START_TEST(s03_any_compressed_mass) {
    FOR_REAL(dtype)
    for (double window = -3000; window <= 3000; window += 20)
        for (int64_t n = 1; n <= 33; n += 8) {
            double x[33], scores[33], want[33], sum = 0, log_sum = 0, kl = 0;
            for (int64_t j = 0; j < n; j++)
                x[j] = draw(8, j), scores[j] = draw(9, j) + 0.01, sum += exp(x[j]), log_sum += exp(scores[j]);
            for (int64_t j = 0; j < n; j++)
                want[j] = exp(x[j]) / sum, kl += want[j] * (x[j] - log(sum) - scores[j] + log(log_sum));
            const double bound = dtype == CG_F64 ? 1e-12 : 1e-6;
            one_row r = lose(dtype, 1, n, x, &window, scores);
            expect_close("target", r.target, want, n, bound);
            ck_assert_double_eq_tol(r.kl, kl, 3 * bound);
            ck_assert_double_eq_tol(r.dense_kl, kl, 3 * bound);
            for (int64_t j = 0; j < n; j++) {
                const double gradient = exp(scores[j]) / log_sum - want[j];
                ck_assert_double_eq_tol(r.dscores[j], gradient, 3 * bound);
                ck_assert_double_eq_tol(r.dk[j], gradient, 3 * bound);
            }
        }
}
END_TEST

/* Two heads d apart: the weaker one counts by exp(-d), to nothing. */
START_TEST(s03_heads_of_unlike_mass) {
    FOR_REAL(dtype) for (double d = 0; d <= 2000; d += d < 40 ? 1 : 97) {
        const double x[] = {0, 1, 2, 0}, window[] = {500, 500 + d}, s[] = {0.5, -0.5};
        const double a = exp(0), b = exp(1), c = exp(2 - d), e = exp(-d);
        one_row r = lose(dtype, 2, 2, x, window, s);
        expect_close("target", r.target, (double[]){(a + c) / (a + b + c + e), (b + e) / (a + b + c + e)}, 2,
                     dtype == CG_F64 ? 1e-12 : 2e-6);
    }
}
END_TEST

/* Students that are wrong by any gap: value log(1 + exp(gap)) - ..., gradient (1/2, -1/2) in the limit. */
START_TEST(s04_any_gap_of_the_student) {
    FOR_REAL(dtype) for (double gap = 0; gap <= 600; gap += 5) for (int spelled = 0; spelled < 2; spelled++) {
        bench b = bench_new(dtype);
        cg_value *rows = bench_i32(&b, "rows", CG_SHAPE(1, CG_ROW_FIELDS), (int32_t[]){0, 0, 0, 2, 1});
        cg_value *s = bench_real(&b, "s", CG_SHAPE(1, 2), (double[]){0, -gap});
        cg_value *t = bench_constant(&b, "t", CG_SHAPE(1, 2), (double[]){0.5, 0.5});
        cg_value *loss = spelled
                             ? cg_kl_div(b.graph, cg_softmax(b.graph, s, NULL, true), t, rows, CG_REDUCE_SUM, 1)
                             : cg_indexer_kl(b.graph, s, t, rows, CG_REDUCE_SUM, 1);
        bench_backward(&b, loss, NULL);
        bench_run(&b);
        const double kl = gap / 2 + log1p(exp(-gap)) - log(2), p = 1 / (1 + exp(-gap));
        const double bound = dtype == CG_F64 ? 1e-13 : 1e-6;
        ck_assert_double_eq_tol(bench_get(&b, loss)[0], kl, bound * (1 + kl));
        expect_close("dI", bench_grad(&b, s), (double[]){p - 0.5, 0.5 - p}, 2, gap == 0 ? bound : bound * 20);
        bench_free(&b);
    }
}
END_TEST

/* Negative and zero weights and dots of any sign: scores and gradients against sums written down here, in the three
 * forms; a head whose dot is not above 0 passes nothing. */
START_TEST(s06_any_sign_of_weights_and_dots) {
    enum { N = 40, HI = 3, DI = 2 };
    for (int seed = 0; seed < N; seed++) FOR_REAL(dtype) for (int form = 0; form < 3; form++) {
            double q[HI * DI], k[3 * DI], w[HI], dq[HI * DI] = {0}, dk[3 * DI] = {0}, dw[HI] = {0},
                                                         scores[3] = {0};
            for (int i = 0; i < HI * DI; i++)
                q[i] = (double)cg_random_below((uint64_t)seed, 1, (uint64_t)i, 5) - 2;
            for (int i = 0; i < 3 * DI; i++)
                k[i] = (double)cg_random_below((uint64_t)seed, 2, (uint64_t)i, 5) - 2;
            for (int i = 0; i < HI; i++)
                w[i] = ((double)cg_random_below((uint64_t)seed, 3, (uint64_t)i, 5) - 2) / 4;
            const double target[] = {0.2, 0.5, 0.3};
            double sum = 0, ds[3];
            for (int j = 0; j < 3; j++) {
                for (int h = 0; h < HI; h++)
                    scores[j] += w[h] * fmax(0, q[h * DI] * k[j * DI] + q[h * DI + 1] * k[j * DI + 1]);
                sum += exp(scores[j]);
            }
            for (int j = 0; j < 3; j++) {
                ds[j] = exp(scores[j]) / sum - target[j];
                for (int h = 0; h < HI; h++) {
                    const double x = q[h * DI] * k[j * DI] + q[h * DI + 1] * k[j * DI + 1];
                    for (int d = 0; d < DI && x > 0; d++)
                        dq[h * DI + d] += ds[j] * w[h] * k[j * DI + d],
                            dk[j * DI + d] += ds[j] * w[h] * q[h * DI + d];
                    dw[h] += x > 0 ? ds[j] * x : 0;
                }
            }
            bench b = bench_new(dtype);
            cg_graph *g = b.graph;
            cg_value *rows = bench_i32(&b, "rows", CG_SHAPE(1, CG_ROW_FIELDS), (int32_t[]){0, 0, 0, 3, 1});
            cg_value *list = bench_i32(&b, "list", CG_SHAPE(1, 3), (int32_t[]){0, 1, 2});
            cg_value *vq = bench_real(&b, "q", CG_SHAPE(1, HI, DI), q),
                     *vk = bench_real(&b, "k", CG_SHAPE(3, DI), k);
            cg_value *vw = bench_real(&b, "w", CG_SHAPE(1, HI), w),
                     *t = bench_constant(&b, "t", CG_SHAPE(1, 3), target), *loss;
            if (form == 0) {
                loss = cg_indexer_kl(g, cg_indexer_scores_at(g, vq, vw, vk, list), t, rows, CG_REDUCE_SUM, 1);
            } else if (form == 1) {
                cg_value *all = cg_indexer_head_sum(g, cg_relu(g, cg_indexer_head_scores(g, vq, vk)), vw);
                loss =
                    cg_kl_div(g, cg_softmax(g, cg_gather(g, all, list), list, true), t, rows, CG_REDUCE_SUM, 1);
            } else { /* one head with logits log t and nothing beside them has the teacher t */
                cg_value *logits =
                    bench_constant(&b, "logits", CG_SHAPE(1, 1, 3), (double[]){log(0.2), log(0.5), log(0.3)});
                cg_value *keys =
                    bench_constant(&b, "keys", CG_SHAPE(3, 3), (double[]){1, 0, 0, 0, 1, 0, 0, 0, 1});
                loss = cg_indexer_dense_loss(g, vq, vw, vk, logits, keys, NULL, NULL, rows, 1,
                                             CG_TEACHER_COMPRESSED, CG_REDUCE_SUM, 1);
            }
            bench_backward(&b, loss, NULL);
            bench_run(&b);
            const double bound = dtype == CG_F64 ? 1e-13 : 2e-6;
            for (int i = 0; i < HI * DI; i++) ck_assert_double_eq_tol(bench_grad(&b, vq)[i], dq[i], bound);
            for (int i = 0; i < 3 * DI; i++) ck_assert_double_eq_tol(bench_grad(&b, vk)[i], dk[i], bound);
            for (int i = 0; i < HI; i++) ck_assert_double_eq_tol(bench_grad(&b, vw)[i], dw[i], bound);
            bench_free(&b);
        }
}
END_TEST

/* Every set of padding rows among five: the reported loss, and its own central differences. */
START_TEST(s08_any_rows_are_padding) {
    enum { N = 5 };
    for (int real = 0; real < 1 << N; real++)
        for (int form = 0; form < 2; form++) {
            int32_t facts[N * CG_ROW_FIELDS];
            double s[2 * N], t[2 * N], grad[2 * N];
            int count = 0;
            for (int i = 0; i < N; i++) {
                const bool is_real = real >> i & 1;
                count += is_real;
                memcpy(facts + i * CG_ROW_FIELDS, (int32_t[]){0, 9, 0, is_real ? 2 : 0, is_real}, 20);
                s[2 * i] = draw(10, i), s[2 * i + 1] = draw(11, i);
                t[2 * i] = is_real ? 0.3 : 77, t[2 * i + 1] = is_real ? 0.7 : -9;
            }
            for (int k = -1; k < 2 * N; k++) {
                double loss[2] = {0}, want = 0;
                for (int side = 0; side < 2; side++) {
                    double x[2 * N];
                    memcpy(x, s, sizeof x);
                    if (k >= 0) x[k] += side ? -1e-6 : 1e-6;
                    bench b = bench_new(CG_F64);
                    cg_value *rows = bench_i32(&b, "rows", CG_SHAPE(N, CG_ROW_FIELDS), facts);
                    cg_value *v = bench_real(&b, "s", CG_SHAPE(N, 2), x),
                             *target = bench_constant(&b, "t", CG_SHAPE(N, 2), t);
                    cg_value *reported = form ? cg_kl_div(b.graph, cg_softmax(b.graph, v, NULL, true), target,
                                                          rows, CG_REDUCE_MEAN_REAL, 1)
                                              : cg_indexer_kl(b.graph, v, target, rows, CG_REDUCE_MEAN_REAL, 1);
                    bench_backward(&b, reported, NULL);
                    bench_run(&b);
                    loss[side] = bench_get(&b, reported)[0];
                    if (k < 0) memcpy(grad, bench_grad(&b, v), sizeof grad);
                    bench_free(&b);
                }
                if (k >= 0) {
                    ck_assert_double_eq_tol(grad[k], (loss[0] - loss[1]) / 2e-6, 1e-8);
                    if (!(real >> k / 2 & 1)) ck_assert(grad[k] == 0 || form);
                    continue;
                }
                for (int i = 0; i < N; i++) {
                    const double z = log(exp(s[2 * i]) + exp(s[2 * i + 1]));
                    if (real >> i & 1)
                        want += 0.3 * (log(0.3) - s[2 * i] + z) + 0.7 * (log(0.7) - s[2 * i + 1] + z);
                }
                ck_assert_double_eq_tol(loss[0], count ? want / count : 0, 1e-13);
            }
        }
}
END_TEST

/* Heads cut over 1, 2, 4 ranks: each rank's sums of weights, added and then divided once, make the teacher of all heads;
 * averages of the ranks' own teachers do not. Order of heads does not matter. */
START_TEST(s09_heads_cut_over_ranks) {
    enum { T = 20, H = 8, D = 6, C = 7, K = 5, W = 3 };
    int32_t topk[T * K];
    for (int i = 0; i < T * K; i++) topk[i] = i % K == 4 && i / K % 3 == 0 ? -1 : (i * 3 + i / K) % C;
    FOR_REAL(dtype) {
        rows_setup s = {.dtype = dtype, .T = T, .H = H, .D = D, .C = C, .K = K, .W = W, .topk = topk};
        rows_run full = run_rows(&s);
        for (int ranks = 1; ranks <= 8; ranks *= 2) {
            double sums[T * K] = {0}, average[T * K] = {0}, furthest = 0;
            for (int r = 0; r < ranks; r++) {
                rows_setup mine = s;
                mine.H = H / ranks;
                mine.first_head = r * mine.H;
                mine.all_heads = H;
                rows_run part = run_rows(&mine);
                for (int64_t i = 0; i < T * K; i++) {
                    const int64_t t = i / K, j = topk[i];
                    average[i] += part.teacher[i] / ranks;
                    for (int64_t h = 0; h < mine.H && j >= 0; h++) {
                        double x = 0;
                        for (int d = 0; d < D; d++)
                            x += draw(1, (t * H + mine.first_head + h) * D + d) * draw(4, j * D + d) / sqrt(D);
                        sums[i] += exp(x - part.lse[t * mine.H + h]);
                    }
                }
                bench_free(&part.b);
            }
            for (int64_t t = 0; t < T; t++) {
                double sum = 0;
                for (int k = 0; k < K; k++) sum += sums[t * K + k];
                for (int k = 0; k < K; k++) sums[t * K + k] /= sum;
            }
            expect_close("teacher over ranks", sums, full.teacher, T * K, dtype == CG_F64 ? 1e-13 : 1e-5);
            for (int i = 0; i < T * K; i++) furthest = fmax(furthest, fabs(average[i] - full.teacher[i]));
            ck_assert((furthest > 1e-3) == (ranks > 1));
        }
        bench_free(&full.b);
    }
}
END_TEST

/* Two ranks' buffers as transposed views: a tensor has no strides, so a view is a copy by name, and the sum lands in the
 * leaf that the caller holds. */
START_TEST(s10_the_sum_lands_in_the_callers_leaf) {
    FOR_REAL(dtype) {
        bench b = bench_new(dtype);
        double rank[2][6];
        for (int r = 0; r < 2; r++)
            for (int i = 0; i < 6; i++)
                rank[r][i % 2 * 3 + i / 2] = 10 * r + i; /* element i of the 3 x 2 buffer, viewed 2 x 3 */
        cg_value *x = bench_constant(&b, "rank 1", CG_SHAPE(2, 3), rank[1]);
        cg_value *keep = bench_constant(&b, "keep", CG_SHAPE(1), (double[]){1});
        cg_value *sum = bench_leaf(&b, CG_LEAF_GRADIENT, "sum", dtype, CG_SHAPE(2, 3), rank[0], sizeof(double));
        cg_accumulate(b.graph, sum, x, keep);
        bench_run(&b);
        const double *got = bench_get(&b, sum);
        for (int i = 0; i < 6; i++) ck_assert(got[i % 2 * 3 + i / 2] == 10 + 2 * i);
        bench_free(&b);
    }
}
END_TEST

/* ---- attention ---- */

/* Each row in turn has nothing to attend to, in sizes around the blocks of rows and heads. */
START_TEST(s11_an_empty_row_at_every_place) {
    static const int64_t sizes[][2] = {{1, 2}, {3, 5}, {17, 8}};
    for (int c = 0; c < 3; c++) FOR_REAL(dtype) {
            enum { T = 33, K = 3, C = 8 };
            const int64_t H = sizes[c][0], D = sizes[c][1];
            int32_t topk[T * K];
            double sink[32];
            for (int i = 0; i < T * K; i++) topk[i] = (i * 5 + i / K) % C;
            for (int h = 0; h < 32; h++) sink[h] = h % 2 ? -INFINITY : 0.5;
            rows_setup s = {
                .dtype = dtype, .T = T, .H = H, .D = D, .C = C, .K = K, .W = 0, .topk = topk, .sink = sink};
            rows_run full = run_rows(&s);
            for (int t = 0; t < T; t++) {
                int32_t kept[K];
                memcpy(kept, topk + t * K, sizeof kept);
                for (int k = 0; k < K; k++) topk[t * K + k] = -1;
                rows_run r = run_rows(&s);
                memcpy(topk + t * K, kept, sizeof kept);
                const int64_t row = H * D;
                expect_bits("out", full.out, r.out, t * row);
                expect_bits("out", full.out + (t + 1) * row, r.out + (t + 1) * row, (T - t - 1) * row);
                expect_bits("dq", full.dq, r.dq, t * row);
                expect_bits("dq", full.dq + (t + 1) * row, r.dq + (t + 1) * row, (T - t - 1) * row);
                for (int64_t i = t * row; i < (t + 1) * row; i++) ck_assert(r.out[i] == 0 && r.dq[i] == 0);
                for (int64_t h = 0; h < H; h++) ck_assert(r.lse[t * H + h] == sink[h]);
                for (int k = 0; k < K; k++) ck_assert(r.teacher[t * K + k] == 0);
                expect_finite(r.dckv, C * D), expect_finite(r.dsink, H);
                bench_free(&r.b);
            }
            bench_free(&full.b);
        }
}
END_TEST

/* 0 to 130 empty places in front, or behind the first entry, or spread: the numbers of the plain list. */
START_TEST(s13_empty_places_of_any_number) {
    enum { T = 3, H = 5, D = 37, C = 4, MOST = 140 };
    FOR_REAL(dtype) {
        static const int32_t plain[T * 4] = {0, 2, 3, 1, 2, 1, 0, 3, 3, 0, 1, 2};
        rows_setup s = {.dtype = dtype, .T = T, .H = H, .D = D, .C = C, .K = 4, .W = 0, .topk = plain};
        rows_run want = run_rows(&s);
        for (int n = 0; n <= 130; n++)
            for (int where = 0; where < 3; where++) {
                int32_t topk[T * MOST];
                s.K = n + 4;
                for (int64_t i = 0; i < T * s.K; i++) topk[i] = -1;
                for (int t = 0; t < T; t++)
                    for (int k = 0; k < 4; k++) {
                        const int64_t at = where == 0 ? n + k : where == 1 ? (k ? n + k : 0) : k * (n + 3) / 3;
                        topk[t * s.K + at] = plain[4 * t + k];
                    }
                s.topk = topk;
                rows_run r = run_rows(&s);
                const double bound = dtype == CG_F64 ? 1e-13 : 2e-6;
                expect_close("out", r.out, want.out, T * H * D, bound);
                expect_close("lse", r.lse, want.lse, T * H, bound);
                expect_close("dq", r.dq, want.dq, T * H * D, bound * 10);
                expect_close("dckv", r.dckv, want.dckv, C * D, bound * 10);
                expect_close("dsink", r.dsink, want.dsink, H, bound * 10);
                for (int t = 0; t < T; t++)
                    for (int64_t k = 0, found = 0; k < s.K; k++) {
                        const double share = r.teacher[t * s.K + k];
                        if (topk[t * s.K + k] < 0)
                            ck_assert(share == 0);
                        else
                            ck_assert_double_eq_tol(share, want.teacher[4 * t + found++], bound * 10);
                    }
                bench_free(&r.b);
            }
        bench_free(&want.b);
    }
}
END_TEST

/* 1 to 130 equal rows that all select row 0 give that many times one row's gradient, with the same bits on any number
 * of threads; and so do 1000. */
START_TEST(s15_rows_of_any_number_select_one_entry) {
    enum { MOST = 1000, H = 2, D = 3, C = 5 };
    static int32_t topk[MOST];
    static double q[MOST * H * D], dout[MOST * H * D];
    for (int i = 0; i < MOST * H * D; i++) q[i] = draw(12, i % (H * D)), dout[i] = draw(13, i % (H * D));
    cg_error error = {0};
    FOR_REAL(dtype) {
        rows_setup s = {
            .dtype = dtype, .T = 1, .H = H, .D = D, .C = C, .K = 1, .W = 0, .topk = topk, .q = q, .dout = dout};
        rows_run one = run_rows(&s);
        for (int T = 1; T <= MOST; T = T < 130 ? T + 1 : T + 290) {
            s.T = T;
            rows_run many[3];
            for (int n = 0; n < 3; n++) {
                const int threads = n == 0 ? 1 : n == 1 && cg_thread_slots() > 1 ? 2 : cg_thread_slots();
                ck_assert(cg_threads_set(threads, &error));
                many[n] = run_rows(&s);
            }
            double want[D];
            for (int d = 0; d < D; d++) want[d] = T * one.dckv[d];
            expect_close("dckv", many[0].dckv, want, D, dtype == CG_F64 ? 1e-12 : 1e-5);
            for (int i = D; i < C * D; i++) ck_assert(many[0].dckv[i] == 0);
            for (int n = 1; n < 3; n++) {
                expect_bits("dckv", many[0].dckv, many[n].dckv, C * D);
                expect_bits("dsink", many[0].dsink, many[n].dsink, H);
                bench_free(&many[n].b);
            }
            bench_free(&many[0].b);
        }
        bench_free(&one.b);
    }
}
END_TEST

/* Emptying the lists of all other rows changes no bit of a row, and single rows' gradients of the entries sum to the
 * whole: no row reads or feeds another's choice. */
START_TEST(s18_rows_do_not_share_lists) {
    enum { T = 19, H = 3, D = 5, C = 9, K = 4, W = 3 };
    int32_t topk[T * K], alone[T * K];
    for (int i = 0; i < T * K; i++) topk[i] = (i * 7 + i / K) % C;
    FOR_REAL(dtype) {
        double dout[T * H * D], sum[C * D] = {0};
        rows_setup s = {.dtype = dtype, .T = T, .H = H, .D = D, .C = C, .K = K, .W = W, .topk = topk};
        rows_run all = run_rows(&s);
        s.dout = dout;
        for (int t = 0; t < T; t++) {
            for (int i = 0; i < T * K; i++) alone[i] = i / K == t ? topk[i] : -1;
            for (int i = 0; i < T * H * D; i++) dout[i] = i / (H * D) == t ? draw(2, i) : 0;
            s.topk = alone;
            rows_run r = run_rows(&s);
            expect_bits("out", all.out + t * H * D, r.out + t * H * D, H * D);
            expect_bits("dq", all.dq + t * H * D, r.dq + t * H * D, H * D);
            for (int j = 0; j < C; j++) {
                bool listed = false;
                for (int k = 0; k < K; k++) listed |= topk[t * K + k] == j;
                for (int d = 0; d < D && !listed; d++) ck_assert(r.dckv[j * D + d] == 0);
            }
            for (int i = 0; i < C * D; i++) sum[i] += r.dckv[i];
            bench_free(&r.b);
        }
        expect_close("sum of single rows", sum, all.dckv, C * D, dtype == CG_F64 ? 1e-12 : 1e-5);
        bench_free(&all.b);
    }
}
END_TEST

/* K = 0 is window and sink: the bits of an attention without compressed rows. */
START_TEST(s49_an_empty_list_is_window_and_sink) {
    enum { T = 21, H = 3, D = 5, C = 5, W = 4 };
    FOR_REAL(dtype) {
        rows_setup s = {.dtype = dtype, .T = T, .H = H, .D = D, .C = C, .K = 0, .W = W, .topk = (int32_t[]){0}};
        rows_run empty = run_rows(&s);
        int32_t none[T];
        for (int t = 0; t < T; t++) none[t] = -1;
        s.K = 1;
        s.topk = none;
        rows_run masked = run_rows(&s);
        expect_bits("out", empty.out, masked.out, T * H * D);
        expect_bits("dq", empty.dq, masked.dq, T * H * D);
        for (int i = 0; i < C * D; i++) ck_assert(empty.dckv[i] == 0 && masked.dckv[i] == 0);
        bench_free(&empty.b), bench_free(&masked.b);
    }
}
END_TEST

/* ---- selection ---- */

/* The chosen list by definition: visible columns by falling score, the lower first of equals, -0 equal to 0. */
static void choose(const double *scores, int64_t visible, int64_t K, int32_t *list) {
    bool *taken = calloc((size_t)visible + 1, sizeof *taken);
    for (int64_t k = 0; k < K; k++) {
        int64_t best = -1;
        for (int64_t j = 0; j < visible; j++)
            if (!taken[j] && (best < 0 || scores[j] > scores[best])) best = j;
        list[k] = (int32_t)best;
        if (best >= 0) taken[best] = true;
    }
    free(taken);
}

/* Row t sees t columns: scores [rows, rows - 1] chosen from by both ops; q = 1, -1 makes keys scores. The streaming op
 * has one row of keys, so each row has its own segment of keys there. */
static void expect_choice(cg_dtype dtype, int64_t n_rows, int64_t K, const double *scores) {
    const int64_t C = n_rows - 1;
    int32_t *facts = malloc(sizeof(int32_t) * (size_t)(n_rows * CG_ROW_FIELDS)),
            *far = malloc(sizeof(int32_t) * (size_t)(n_rows * CG_ROW_FIELDS));
    int32_t *want = malloc(sizeof(int32_t) * (size_t)(n_rows * K + 1));
    double *keys = malloc(sizeof *keys * (size_t)(n_rows * C + 1)),
           *q = malloc(sizeof *q * (size_t)(2 * n_rows));
    for (int64_t t = 0; t < n_rows; t++) {
        memcpy(facts + t * CG_ROW_FIELDS, (int32_t[]){0, (int32_t)t, 0, (int32_t)t, 1}, 20);
        memcpy(far + t * CG_ROW_FIELDS, (int32_t[]){0, (int32_t)t, (int32_t)(t * C), (int32_t)t, 1}, 20);
        q[2 * t] = 1, q[2 * t + 1] = -1;
        for (int64_t j = 0; j < C; j++)
            keys[t * C + j] = j < t ? scores[t * C + j] : NAN; /* not to be looked at */
        choose(scores + t * C, t, K, want + t * K);
    }
    bench b = bench_new(dtype);
    cg_value *chosen = cg_keep(cg_topk(b.graph, bench_constant(&b, "scores", CG_SHAPE(n_rows, C), keys),
                                       bench_i32(&b, "facts", CG_SHAPE(n_rows, CG_ROW_FIELDS), facts), K));
    cg_value *streamed = cg_keep(cg_indexer_topk(
        b.graph, bench_constant(&b, "q", CG_SHAPE(n_rows, 2, 1), q),
        bench_constant(&b, "w", CG_SHAPE(n_rows, 2), q), bench_constant(&b, "k", CG_SHAPE(n_rows * C, 1), keys),
        bench_i32(&b, "far", CG_SHAPE(n_rows, CG_ROW_FIELDS), far), K));
    bench_run(&b);
    for (int64_t i = 0; i < n_rows * K; i++) {
        const int64_t t = i / K, a = bench_get_i32(&b, chosen)[i], s = bench_get_i32(&b, streamed)[i];
        if (a != want[i] || (s < 0 ? -1 : s - t * C) != want[i])
            ck_abort_msg("%lld of %lld columns, place %lld: %lld, streamed %lld, expected %d", (long long)K,
                         (long long)t, (long long)(i % K), (long long)a, (long long)s, want[i]);
    }
    bench_free(&b);
    free(facts), free(far), free(want), free(keys), free(q);
}

/* Widths 0 to 70, K 0 to 40 and beyond the width. */
START_TEST(s20_every_width_and_k) {
    enum { ROWS = 71 };
    static double scores[ROWS * (ROWS - 1)];
    for (int i = 0; i < ROWS * (ROWS - 1); i++) scores[i] = draw(14, i);
    FOR_REAL(dtype) for (int64_t K = 0; K <= 40; K++) expect_choice(dtype, ROWS, K, scores);
    expect_choice(CG_F32, ROWS, 100, scores);
}
END_TEST

/* Small integers, zeros of both signs, all equal: ties everywhere, on one thread and on all. */
START_TEST(s19_ties_of_every_kind) {
    enum { ROWS = 60 };
    static double scores[ROWS * (ROWS - 1)];
    cg_error error = {0};
    for (int kind = 1; kind <= 5; kind++)
        for (int64_t K = 1; K <= 33; K += kind)
            for (int threads = 1; threads <= cg_thread_slots();
                 threads += cg_thread_slots() - (cg_thread_slots() > 1)) {
                for (int i = 0; i < ROWS * (ROWS - 1); i++) {
                    const int64_t x = cg_random_below(3, (uint64_t)kind, (uint64_t)i, kind);
                    scores[i] = kind == 2 ? (x ? -0.0 : 0.0) : (double)(x - kind / 2);
                }
                ck_assert(cg_threads_set(threads, &error));
                FOR_REAL(dtype) expect_choice(dtype, ROWS, K, scores);
            }
    static double equal[1000];
    bench b = bench_new(CG_F32); /* the report's size */
    cg_value *topk =
        cg_keep(cg_topk(b.graph, bench_constant(&b, "s", CG_SHAPE(1, 1000), equal),
                        bench_i32(&b, "r", CG_SHAPE(1, CG_ROW_FIELDS), (int32_t[]){0, 0, 0, 1000, 1}), 7));
    bench_run(&b);
    for (int k = 0; k < 7; k++) ck_assert_int_eq(bench_get_i32(&b, topk)[k], k);
    bench_free(&b);
}
END_TEST

/* 3, 2, 1 and then 48 of minus infinity: behind the visible ones they are not there, visible they come last. */
START_TEST(s20_minus_infinity) {
    double scores[51];
    for (int i = 0; i < 51; i++) scores[i] = i < 3 ? 3 - i : -INFINITY;
    FOR_REAL(dtype) for (int visible = 0; visible <= 51; visible++) {
        bench b = bench_new(dtype);
        cg_value *topk = cg_keep(
            cg_topk(b.graph, bench_constant(&b, "s", CG_SHAPE(1, 51), scores),
                    bench_i32(&b, "r", CG_SHAPE(1, CG_ROW_FIELDS), (int32_t[]){0, 0, 0, visible, 1}), 16));
        bench_run(&b);
        for (int k = 0; k < 16; k++) ck_assert_int_eq(bench_get_i32(&b, topk)[k], k < visible ? k : -1);
        bench_free(&b);
    }
}
END_TEST

/* Selection by scores with ReLU; without it other rows would be selected, which only K below the visible count shows. */
START_TEST(s21_relu_decides_the_selection) {
    enum { T = 40, C = 10, HI = 2, DI = 3 };
    double *q = draws(15, T * HI * DI), *k = draws(16, C * DI), *w = draws(17, T * HI);
    int32_t facts[T * CG_ROW_FIELDS];
    for (int t = 0; t < T; t++) memcpy(facts + t * CG_ROW_FIELDS, (int32_t[]){0, t, 0, (t + 1) / 4, 1}, 20);
    FOR_REAL(dtype) for (int64_t K = 1; K <= 12; K++) {
        int other_sets = 0;
        bench b = bench_new(dtype);
        cg_value *topk = cg_keep(cg_indexer_topk(b.graph, bench_constant(&b, "q", CG_SHAPE(T, HI, DI), q),
                                                 bench_constant(&b, "w", CG_SHAPE(T, HI), w),
                                                 bench_constant(&b, "k", CG_SHAPE(C, DI), k),
                                                 bench_i32(&b, "facts", CG_SHAPE(T, CG_ROW_FIELDS), facts), K));
        bench_run(&b);
        const int32_t *got = bench_get_i32(&b, topk);
        for (int t = 0; t < T; t++) {
            double scores[2][C] = {{0}};
            int32_t want[2][16];
            unsigned sets[2] = {0};
            for (int j = 0; j < C; j++)
                for (int h = 0; h < HI; h++) {
                    double x = 0;
                    for (int d = 0; d < DI; d++) x += q[(t * HI + h) * DI + d] * k[j * DI + d];
                    scores[0][j] += w[t * HI + h] * fmax(0, x);
                    scores[1][j] += w[t * HI + h] * x;
                }
            for (int linear = 0; linear < 2; linear++) {
                choose(scores[linear], (t + 1) / 4, K, want[linear]);
                for (int i = 0; i < K; i++)
                    if (want[linear][i] >= 0) sets[linear] |= 1u << want[linear][i];
            }
            for (int i = 0; i < K; i++) ck_assert_int_eq(got[t * K + i], want[0][i]);
            other_sets += sets[0] != sets[1];
        }
        ck_assert((other_sets > 0) == (K < C)); /* K >= visible hides it */
        bench_free(&b);
    }
    free(q), free(k), free(w);
}
END_TEST

/* ---- rotation ---- */

static void rotate(cg_dtype dtype, int64_t D, const double *x, const int32_t *positions, int64_t n,
                   const cg_rope_attr *attr, double *y) {
    bench b = bench_new(dtype);
    cg_value *turned = cg_keep(cg_rope(b.graph, bench_constant(&b, "x", CG_SHAPE(n, D), x),
                                       bench_i32(&b, "p", CG_SHAPE(n), positions), attr));
    bench_run(&b);
    memcpy(y, bench_get(&b, turned), sizeof *y * (size_t)(n * D));
    bench_free(&b);
}

/* Entry j of any ratio turns by j * ratio, as segment_rows says: its dot with a query at any distance depends on the
 * distance alone, wherever in the document they stand, and not on the entry's number. */
START_TEST(s28_entries_turn_by_their_first_token) {
    const cg_rope_attr attr = {.n_rotary = 2, .base = 10000};
    for (int64_t ratio = 1; ratio <= 128; ratio = ratio < 9 ? ratio + 1 : ratio * 2) {
        enum { N = 40 };
        const int64_t T = N * ratio;
        bench b = bench_new(CG_F64);
        cg_rows rows = cg_segment_rows(b.graph, bench_i32(&b, "cu", CG_SHAPE(2), (int32_t[]){0, (int32_t)T}),
                                       NULL, T, ratio, N);
        cg_keep(rows.entry_positions);
        bench_run(&b);
        int32_t positions[2 * N];
        for (int j = 0; j < N; j++) {
            positions[j] = bench_get_i32(&b, rows.entry_positions)[j];
            ck_assert_int_eq(positions[j], j * ratio);
            positions[N + j] = positions[j] + 3;
        }
        bench_free(&b);
        double x[4 * N] = {0}, y[4 * N];
        for (int j = 0; j < 2 * N; j++) x[2 * j] = 1;
        rotate(CG_F64, 2, x, positions, 2 * N, &attr, y);
        for (int j = 0; j < N; j++)
            ck_assert_double_eq_tol(y[2 * j] * y[2 * (N + j)] + y[2 * j + 1] * y[2 * (N + j) + 1], cos(3),
                                    1e-12);
    }
}
END_TEST

/* Neighbouring channels are pairs, for every number of rotary channels behind every number of others, at many
 * positions; half against half would be something else from 4 channels on. */
START_TEST(s44_pairs_are_neighbours) {
    FOR_REAL(dtype) for (int64_t n = 2; n <= 64; n += 2) for (int64_t before = 0; before <= 6; before += 3) {
        enum { N = 6 };
        const int64_t D = before + n;
        static const int32_t positions[N] = {0, 1, 2, 17, 1000, 65535};
        double *x = draws(18, N * D), *y = malloc(sizeof *y * (size_t)(N * D)), halves = 0;
        const cg_rope_attr attr = {.n_rotary = n, .base = 10000};
        rotate(dtype, D, x, positions, N, &attr, y);
        for (int t = 0; t < N; t++) {
            const double *from = x + t * D, *to = y + t * D;
            for (int64_t d = 0; d < before; d++) ck_assert(to[d] == from[d]);
            for (int64_t i = 0; i < n / 2; i++) {
                const double a = positions[t] * pow(10000, -2.0 * (double)i / (double)n);
                const double *pair = from + before + 2 * i, bound = dtype == CG_F64 ? 1e-10 : 1e-5;
                ck_assert_double_eq_tol(to[before + 2 * i], pair[0] * cos(a) - pair[1] * sin(a), bound);
                ck_assert_double_eq_tol(to[before + 2 * i + 1], pair[0] * sin(a) + pair[1] * cos(a), bound);
                halves +=
                    fabs(to[before + i] - (from[before + i] * cos(a) - from[before + n / 2 + i] * sin(a)));
            }
        }
        ck_assert((halves > 0.1) == (n > 2));
        free(x), free(y);
    }
}
END_TEST

/* ---- gradient checks at kinks ---- */

/* dq of the scores of one key in three forms, checked by central differences at the given point. */
static cg_gradcheck_report check_scores(int form, const double *q, const double *k, const double *w, int64_t HI,
                                        int64_t DI) {
    bench b = bench_new(CG_F64);
    cg_graph *g = b.graph;
    cg_value *vq = bench_real(&b, "q", CG_SHAPE(1, HI, DI), q), *vk = bench_real(&b, "k", CG_SHAPE(1, DI), k);
    cg_value *vw = bench_real(&b, "w", CG_SHAPE(1, HI), w),
             *list = bench_i32(&b, "list", CG_SHAPE(1, 1), (int32_t[]){0});
    cg_value *y = form == 0 ? cg_indexer_scores_at(g, vq, vw, vk, list)
                            : cg_indexer_head_sum(g, cg_relu(g, cg_indexer_head_scores(g, vq, vk)), vw);
    bench_backward(&b, y, NULL);
    bench_run(&b);
    cg_value *wrt[] = {vq, vk}, *grads[2], *outputs[] = {y}, *seed = NULL;
    for (int i = 0; i < b.n_leaves; i++) {
        if (b.leaves[i].leaf == vq) grads[0] = b.leaves[i].grad;
        if (b.leaves[i].leaf == vk) grads[1] = b.leaves[i].grad;
        if (!strcmp(b.leaves[i].leaf->name, "seed of the output")) seed = b.leaves[i].leaf;
    }
    cg_plan *plan = b.plan;
    cg_exec *exec = cg_exec_new(plan, NULL, &b.error); /* leaves must be readable between runs: one arena */
    ck_assert_ptr_nonnull(exec);
    for (int i = 0; i < b.n_leaves; i++) {
        const cg_value *leaf = b.leaves[i].leaf;
        memcpy(cg_exec_data(exec, leaf), b.leaves[i].data, (size_t)cg_tensor_bytes(leaf->dtype, &leaf->shape));
    }
    const cg_gradcheck check = {.exec = exec,
                                .n_outputs = 1,
                                .outputs = outputs,
                                .seeds = &seed,
                                .n_wrt = 2,
                                .wrt = wrt,
                                .grads = grads,
                                .full_jacobian = true};
    cg_gradcheck_report report;
    if (!cg_gradcheck_run(&check, NULL, &report, &b.error)) ck_abort_msg("%s", b.error.text);
    cg_exec_free(exec);
    bench_free(&b);
    return report;
}

/* A dot of exactly 0 is a kink, not a failure; close by there is none; everything at a kink is no pass. */
START_TEST(s39_dots_of_exactly_zero) {
    for (int form = 0; form < 2; form++) {
        const double q[] = {1, -1, 2, 1}, w[] = {1, 0.5}, zeros[4] = {0};
        for (int kink = 0; kink < 2; kink++) {
            cg_gradcheck_report r = check_scores(form, q, (double[]){1, kink ? 1 : 0.9}, w, 2, 2);
            ck_assert_msg(r.ok, "%s", r.worst);
            ck_assert((r.n_kinks > 0) == kink);
        }
        cg_gradcheck_report one = check_scores(form, q, (double[]){1, 0.9}, w, 1, 2);
        ck_assert(one.ok && one.n_kinks == 0);
        cg_gradcheck_report none = check_scores(form, zeros, zeros, w, 2, 2);
        ck_assert(!none.ok);
        for (int i = 0; i < 40; i++) { /* small integers: many dots are 0 */
            double a[4], k[2];
            for (int j = 0; j < 4; j++) a[j] = (double)cg_random_below(5, (uint64_t)i, (uint64_t)j, 3) - 1;
            for (int j = 0; j < 2; j++) k[j] = (double)cg_random_below(6, (uint64_t)i, (uint64_t)j, 3) - 1;
            const bool zero[2] = {a[0] * k[0] + a[1] * k[1] == 0, a[2] * k[0] + a[3] * k[1] == 0};
            const bool above[2] = {a[0] * k[0] + a[1] * k[1] > 0, a[2] * k[0] + a[3] * k[1] > 0};
            cg_gradcheck_report r = check_scores(form, a, k, w, 2, 2);
            ck_assert_msg(r.ok || !(above[0] || above[1]), "%s", r.worst);
            ck_assert(r.n_kinks == 0 || zero[0] || zero[1]);
        }
    }
}
END_TEST

SUITE("cases_rows", s01_s02_every_teacher_and_support_by_plain_loops, s03_any_compressed_mass,
      s03_heads_of_unlike_mass, s04_any_gap_of_the_student, s06_any_sign_of_weights_and_dots,
      s08_any_rows_are_padding, s09_heads_cut_over_ranks, s10_the_sum_lands_in_the_callers_leaf,
      s11_an_empty_row_at_every_place, s13_empty_places_of_any_number, s15_rows_of_any_number_select_one_entry,
      s18_rows_do_not_share_lists, s49_an_empty_list_is_window_and_sink, s20_every_width_and_k,
      s19_ties_of_every_kind, s20_minus_infinity, s21_relu_decides_the_selection,
      s28_entries_turn_by_their_first_token, s44_pairs_are_neighbours, s39_dots_of_exactly_zero)
