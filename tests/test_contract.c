/* Contracts by themselves: the numbers of known faults, right and wrong, each under its own variant; the default against
 * stored vectors and against the engine's ops; every derivative against a central difference; names and text. */
#include "tests/support.h"

#include "core/base/rng.h"
#include "models/check/contract.h"

enum { KEYS = 8 };

typedef struct answer {
    double target[KEYS], log_p[KEYS], ds[KEYS], kl;
} answer;

static cg_contract contract(const char *text) {
    cg_contract c;
    cg_error error = {0};
    if (!cg_contract_parse(text, &c, &error)) ck_abort_msg("%s: %s", text, error.text);
    return c;
}

static answer eval(const char *text, cg_contract_row row) {
    cg_contract c = contract(text);
    double scratch[8];
    answer a;
    cg_contract_row_eval(&c, &row, a.target, a.log_p, a.ds, &a.kl, scratch);
    double kl, target[KEYS], max[8], exps[8 * KEYS];
    cg_contract_row_eval(&c, &row, target, NULL, NULL, &kl, scratch); /* the same without the other outputs */
    if (!isnan(a.kl)) expect_close("kl alone", &kl, &a.kl, 1, 1e-14);
    for (int64_t h = 0; h < row.n_heads; h++) { /* ... and from exponentials made before */
        max[h] = -INFINITY;
        for (int64_t j = 0; j < row.n_keys; j++) max[h] = fmax(max[h], row.logits[h * row.n_keys + j]);
        for (int64_t j = 0; j < row.n_keys; j++)
            exps[h * row.n_keys + j] = exp(row.logits[h * row.n_keys + j] - max[h]);
    }
    row.max = max;
    row.exps = exps;
    cg_contract_row_eval(&c, &row, target, NULL, NULL, &kl, scratch);
    if (!isnan(a.kl)) expect_close("with exponentials", target, a.target, row.n_keys, 1e-13);
    return a;
}

static void near(const char *what, double got, double want, double bound) {
    if (!(fabs(got - want) <= bound * fabs(want)))
        ck_abort_msg("%s: got %.13g, expected %.13g", what, got, want);
}

/* ---- known cases, right and wrong ---- */

static const double s01_logits[] = {2, 0, 0, 1}, s01_window[] = {0, 3}, s01_sink[] = {0, 0},
                    s01_scores[] = {0.3, -0.2};
static const cg_contract_row s01 = {.n_heads = 2,
                                    .n_keys = 2,
                                    .logits = s01_logits,
                                    .window_lse = s01_window,
                                    .sink = s01_sink,
                                    .scores = s01_scores};

START_TEST(renormalised_teacher) {
    answer a = eval("", s01);
    expect_close("target", a.target, (double[]){0.7849937697, 0.2150062303}, 2, 1e-9);
    near("kl", a.kl, 0.0610656464345, 1e-11);
    expect_close("ds", a.ds, (double[]){-0.1625344385, 0.1625344385}, 2, 1e-9);
    a = eval("teacher=compressed", s01);
    expect_close("target", a.target, (double[]){0.5748692497, 0.4251307503}, 2, 1e-9);
    near("kl", a.kl, 0.0047482623, 1e-8);
    near("ds", a.ds[0], 0.0475900815, 1e-8);
    near("without the sink", eval("teacher=window", s01).kl, 0.0649118282, 1e-9);
    near("without the window", eval("teacher=sink", s01).kl, 0.0017012967, 1e-7);
}
END_TEST

START_TEST(dense_over_the_sparse_denominator) {
    const double logits[] = {1, 0, -1, 0.5, 2, 1.5}, window[] = {0, 1}, sink[] = {0, 0},
                 scores[] = {0.4, 0.1, -0.3};
    const unsigned char selected[] = {1, 1, 0};
    const cg_contract_row row = {.n_heads = 2,
                                 .n_keys = 3,
                                 .logits = logits,
                                 .window_lse = window,
                                 .sink = sink,
                                 .scores = scores,
                                 .selected = selected};
    answer a = eval("support=dense", row);
    expect_close("target", a.target, (double[]){0.3725264145, 0.4073441723, 0.2201294133}, 3, 1e-9);
    near("kl", a.kl, 0.0147505761200, 1e-11);
    expect_close("ds", a.ds, (double[]){0.0744202311, -0.0762379536, 0.0018177225}, 3, 1e-9);
    a = eval("", row);
    expect_close("target", a.target, (double[]){0.444979227, 0.555020773, 0}, 3, 1e-9);
    near("kl", a.kl, 0.0337811455998, 1e-11);
    expect_close("ds", a.ds, (double[]){0.1294632898, -0.1294632898, 0}, 3, 1e-9);
    near("fault", eval("support=dense,fault=dense-over-sparse-lse", row).kl, 0.0263008118, 1e-8);
}
END_TEST

START_TEST(floor_under_a_small_mass) {
    const double logits[] = {0, 1}, sink[] = {0}, scores[] = {0, 0}, windows[] = {40, 200};
    for (int i = 0; i < 2; i++) {
        const cg_contract_row row = {.n_heads = 1,
                                     .n_keys = 2,
                                     .logits = logits,
                                     .window_lse = &windows[i],
                                     .sink = sink,
                                     .scores = scores};
        answer a = eval("", row);
        expect_close("target", a.target, (double[]){0.2689414214, 0.7310585786}, 2, 1e-9);
        near("kl", a.kl, 0.110944071672, 1e-11);
        expect_close("ds", a.ds, (double[]){0.2310585786, -0.2310585786}, 2, 1e-9);
        a = eval("normalise=floor-1e-10", row);
        if (i == 0) {
            near("target", a.target[0], 4.2e-8, 0.02);
            near("target", a.target[1], 1.2e-7, 0.05);
            near("kl", a.kl, -2.5e-6, 0.05);
        }
        a = eval("normalise=floor-tiny,fault=teacher-f32-underflow", row);
        if (i == 0) near("f32, still in range", a.target[0], 0.2689414214, 1e-5);
        if (i == 1) ck_assert(a.target[0] == 0 && a.target[1] == 0);
        a = eval("fault=teacher-f32-underflow", row);
        if (i == 1) ck_assert(isnan(a.target[0]) && isnan(a.kl));
    }
    const double two[] = {0, 1, 2, 0}, window[] = {40, 60}, sinks[] = {0, 0};
    const cg_contract_row row = {
        .n_heads = 2, .n_keys = 2, .logits = two, .window_lse = window, .sink = sinks, .scores = scores};
    answer a = eval("", row);
    expect_close("two heads", a.target, (double[]){0.2689414242, 0.7310585758}, 2, 1e-9);
    near("two heads", a.kl, 0.110944068826, 1e-11);
}
END_TEST

START_TEST(epsilon_in_both_logarithms) {
    const double target[] = {0.5, 0.5}, scores[] = {0, -30};
    const cg_contract_row row = {.n_heads = 0, .n_keys = 2, .scores = scores, .given_target = target};
    answer a = eval("", row);
    near("kl", a.kl, 14.3068528194, 1e-11);
    expect_close("ds", a.ds, (double[]){0.5, -0.5}, 2, 1e-9);
    a = eval("kl=eps", row);
    near("kl", a.kl, 10.8193106222, 1e-11);
    expect_close("ds", a.ds, (double[]){4.67e-4, -4.67e-4}, 2, 1e-3);
    a = eval("kl=eps-value-exact-grad", row);
    near("kl", a.kl, 10.8193106222, 1e-11);
    expect_close("ds", a.ds, (double[]){0.5, -0.5}, 2, 1e-9);
}
END_TEST

START_TEST(divisors) {
    const double kl[] = {0.2, 0.4, 1.0, 9.9};
    const cg_contract_counts counts = {.physical = 4, .real = 3, .visible = 3, .segments = 1};
    const struct {
        const char *text;
        double loss, factor;
    } list[] = {{"", 1.6 / 3, 1.0 / 3},
                {"reduction=mean-physical", 0.4, 0.25},
                {"reduction=mean-physical,fault=padding-in-loss", 2.875, 0.25},
                {"reduction=mean-twice", 1.6 / 12, 1.0 / 12},
                {"reduction=sum", 1.6, 1},
                {"fault=loss-twice", 3.2 / 3, 1.0 / 3},
                {"fault=gradient-sign", 1.6 / 3, -1.0 / 3}};
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        cg_contract c = contract(list[i].text);
        double loss = 0;
        for (int t = 0; t < (c.faults & CG_FAULT_PADDING_IN_LOSS ? 4 : 3); t++)
            loss += kl[t] * cg_contract_value_factor(&c, &counts, 1, 3);
        near(list[i].text, loss, list[i].loss, 1e-12);
        near(list[i].text, cg_contract_grad_factor(&c, &counts, 1, 3), list[i].factor, 1e-12);
    }
    /* segments of 3 and 1 rows with sums 0.6 and 0.5 */
    const cg_contract_counts two = {.physical = 4, .real = 4, .visible = 4, .segments = 2};
    cg_contract c = contract("reduction=mean-of-means"), right = cg_contract_default();
    near("average of averages",
         0.6 * cg_contract_value_factor(&c, &two, 1, 3) + 0.5 * cg_contract_value_factor(&c, &two, 1, 1), 0.35,
         1e-12);
    near("average", 1.1 * cg_contract_value_factor(&right, &two, 1, 3), 0.275, 1e-12);
}
END_TEST

START_TEST(ranks_that_normalise_first) {
    const double logits[] = {2, 0, 1, -1, 0, 1, -1, 2}, sink[] = {0, 0, 0, 0}, scores[] = {0.3, -0.2};
    double window[] = {0, 2, 3, -1};
    const cg_contract_row row = {
        .n_heads = 4, .n_keys = 2, .logits = logits, .window_lse = window, .sink = sink, .scores = scores};
    answer a = eval("", row);
    expect_close("target", a.target, (double[]){0.4954414969, 0.5045585031}, 2, 1e-9);
    near("kl", a.kl, 0.0332506156386, 1e-11);
    near("local", eval("heads=local-normalised-2", row).kl, 0.0413163616, 1e-8);
    near("rank 0", eval("heads=first-half", row).kl, 0.1683445901, 1e-8);
    a = eval("heads=local-normalised-4", row); /* one head per rank: its denominator cancels */
    answer b = eval("teacher=compressed", row);
    expect_close("one head per rank", a.target, b.target, 2, 1e-14);
    ck_assert(fabs(eval("heads=second-half", row).kl - a.kl) > 1e-3);
}
END_TEST

/* The indexer's gradients of one row, and the dead ReLU. */
START_TEST(gradient_through_relu) {
    const double q[] = {1, 0, 0, 1}, k[] = {0.5, -1, 1, 2}, w[] = {0.6, -0.4}, dots[] = {0.5, 1, -1, 2};
    answer a = eval("", s01);
    const cg_contract_index index = {
        .n_heads = 2, .head_dim = 2, .n_keys = 2, .q = q, .w = w, .dots = dots, .k = k};
    double dw[2], dq[4], dk[4] = {0};
    cg_contract c = cg_contract_default();
    cg_contract_index_grad(&c, &index, a.ds, dw, dq, dk);
    expect_close("dw", dw, (double[]){0.0812672192, 0.3250688770}, 2, 1e-9);
    expect_close("dq", dq, (double[]){0.0487603315, 0.2925619893, -0.0650137754, -0.1300275508}, 4, 1e-9);
    expect_close("dk", dk, (double[]){-0.0975206631, 0, 0.0975206631, -0.0650137754}, 4, 1e-9);
    ck_assert(dk[1] == 0);
    c = contract("fault=relu-leak");
    memset(dk, 0, sizeof dk);
    cg_contract_index_grad(&c, &index, a.ds, dw, dq, dk);
    ck_assert(dk[1] != 0);
    expect_close("dw does not change", dw, (double[]){0.0812672192, 0.3250688770}, 2, 1e-9);
}
END_TEST

/* ---- derivatives ---- */

START_TEST(derivatives) {
    const char *const texts[] = {"",
                                 "kl=eps",
                                 "kl=clamp-tiny",
                                 "normalise=floor-1e-10",
                                 "support=dense",
                                 "normalise=floor-1e-10,kl=eps",
                                 "teacher=sink,heads=first-half"};
    double logits[3 * KEYS], window[] = {38, 36, 37}, sink[] = {1, -1, 0.5}, scores[KEYS];
    const unsigned char selected[KEYS] = {1, 0, 1, 1, 0, 1, 1, 0};
    for (int i = 0; i < 3 * KEYS; i++) logits[i] = 2 * cg_random_normal(11, 0, (uint64_t)i);
    for (int j = 0; j < KEYS; j++) scores[j] = 12 * cg_random_normal(11, 1, (uint64_t)j);
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        const cg_contract_row row = {.n_heads = 3,
                                     .n_keys = KEYS,
                                     .logits = logits,
                                     .window_lse = window,
                                     .sink = sink,
                                     .scores = scores,
                                     .selected = selected};
        const answer a = eval(texts[i], row);
        for (int j = 0; j < KEYS; j++) {
            const double kept = scores[j], h = 1e-5;
            scores[j] = kept + h;
            const double high = eval(texts[i], row).kl;
            scores[j] = kept - h;
            const double low = eval(texts[i], row).kl;
            scores[j] = kept;
            if (!(fabs((high - low) / (2 * h) - a.ds[j]) < 1e-8))
                ck_abort_msg("%s: d kl / d score %d is %.10g, difference %.10g", texts[i], j, a.ds[j],
                             (high - low) / (2 * h));
        }
    }
}
END_TEST

START_TEST(rows_without_support) {
    const unsigned char none[2] = {0, 0};
    cg_contract_row row = s01;
    row.selected = none;
    answer a = eval("", row);
    for (int j = 0; j < 2; j++) ck_assert(a.target[j] == 0 && a.log_p[j] == 0 && a.ds[j] == 0);
    ck_assert(a.kl == 0);
    row.n_keys = 0;
    ck_assert(eval("support=dense", row).kl == 0);
}
END_TEST

/* ---- against the ops, in f64 ---- */

START_TEST(the_default_is_what_the_ops_compute) {
    enum { T = 37, H = 3, D = 5, HI = 2, DI = 4, RATIO = 2, C = T / RATIO, K = 5, W = 3 };
    const char *const teachers[] = {"", "full", "sink", "compressed"};
    static double q[T * H * D], kv[T * D], ckv[C * D], sink[H], qi[T * HI * DI], w[T * HI], ki[C * DI];
    double *const arrays[] = {q, kv, ckv, sink, qi, w, ki};
    const int sizes[] = {T * H * D, T * D, C * D, H, T * HI * DI, T * HI, C * DI};
    for (int a = 0; a < 7; a++)
        for (int i = 0; i < sizes[a]; i++) arrays[a][i] = cg_random_normal(5, (uint64_t)a, (uint64_t)i);
    for (int teacher = CG_TEACHER_FULL; teacher <= CG_TEACHER_COMPRESSED; teacher++)
        for (int dense = 0; dense < 2; dense++)
            for (int reduction = CG_REDUCE_MEAN_REAL; reduction <= CG_REDUCE_SUM; reduction++) {
                bench b = bench_new(CG_F64);
                cg_value *vq = bench_real(&b, "q", CG_SHAPE(T, H, D), q),
                         *vkv = bench_real(&b, "kv", CG_SHAPE(T, D), kv);
                cg_value *vc = bench_real(&b, "ckv", CG_SHAPE(C, D), ckv),
                         *vs = bench_real(&b, "sink", CG_SHAPE(H), sink);
                cg_value *vqi = bench_real(&b, "qi", CG_SHAPE(T, HI, DI), qi),
                         *vw = bench_real(&b, "w", CG_SHAPE(T, HI), w);
                cg_value *vki = bench_real(&b, "ki", CG_SHAPE(C, DI), ki);
                cg_value *cu = bench_i32(&b, "cu", CG_SHAPE(2), (int32_t[]){0, T});
                cg_value *real = bench_i32(&b, "real", CG_SHAPE(1), (int32_t[]){T - 2});
                cg_value *rows = cg_segment_rows(b.graph, cu, real, T, RATIO, C).rows;
                cg_value *topk = cg_keep(cg_indexer_topk(b.graph, vqi, vw, vki, rows, K));
                cg_attention at =
                    cg_csa_attention(b.graph, vq, vkv, vc, vs, topk, rows, W, 0.7, (cg_teacher)teacher);
                cg_keep(at.window_lse);
                cg_value *loss = dense
                                     ? cg_indexer_dense_loss(b.graph, vqi, vw, vki, vq, vc,
                                                             teacher == CG_TEACHER_FULL ? at.window_lse : NULL,
                                                             teacher == CG_TEACHER_SINK ? vs : NULL, rows, 0.7,
                                                             (cg_teacher)teacher, (cg_reduction)reduction, 0.3)
                                     : cg_indexer_kl(b.graph, cg_indexer_scores_at(b.graph, vqi, vw, vki, topk),
                                                     at.teacher, rows, (cg_reduction)reduction, 0.3);
                cg_value *kl = cg_keep(cg_output(loss, 1));
                bench_backward(&b, loss, NULL);
                bench_run(&b);
                const int32_t *chosen = bench_get_i32(&b, topk);
                const double *u = bench_get(&b, at.window_lse);
                const double *row_kl = bench_get(&b, kl);

                char text[128];
                snprintf(text, sizeof text, "teacher=%s,support=%s,reduction=%s", teachers[teacher],
                         dense ? "dense" : "sparse", cg_axis_values(CG_AXIS_REDUCTION)[reduction]);
                cg_contract c = contract(text);
                const cg_contract_counts counts = {
                    .physical = T, .real = T - 2, .visible = T - 3, .segments = 1};
                double total = 0, got_kl[T] = {0}, dq[T * HI * DI] = {0}, dw[T * HI] = {0}, dk[C * DI] = {0};
                for (int t = 0; t < T - 2; t++) {
                    double logits[H * C] = {0}, dots[HI * C] = {0}, scores[C] = {0}, window[H], target[C],
                                      ds[C], z[H];
                    unsigned char selected[C] = {0};
                    const int n = (t + 1) / RATIO;
                    for (int h = 0; h < H; h++) {
                        /* the op's holds the sink: take it out */
                        window[h] = u[t * H + h] + log1p(-exp(sink[h] - u[t * H + h]));
                        for (int j = 0; j < n; j++)
                            for (int i = 0; i < D; i++)
                                logits[h * n + j] += 0.7 * q[(t * H + h) * D + i] * ckv[j * D + i];
                    }
                    for (int g = 0; g < HI; g++)
                        for (int j = 0; j < n; j++) {
                            for (int i = 0; i < DI; i++)
                                dots[g * n + j] += qi[(t * HI + g) * DI + i] * ki[j * DI + i];
                            scores[j] += w[t * HI + g] * fmax(dots[g * n + j], 0);
                        }
                    for (int k = 0; k < K; k++)
                        if (chosen[t * K + k] >= 0) selected[chosen[t * K + k]] = 1;
                    const cg_contract_row row = {.n_heads = H,
                                                 .n_keys = n,
                                                 .logits = logits,
                                                 .window_lse = window,
                                                 .sink = sink,
                                                 .scores = scores,
                                                 .selected = selected};
                    cg_contract_row_eval(&c, &row, target, NULL, ds, &got_kl[t], z);
                    total += got_kl[t] * cg_contract_value_factor(&c, &counts, 0.3, T - 2);
                    for (int j = 0; j < n; j++) ds[j] *= cg_contract_grad_factor(&c, &counts, 0.3, T - 2);
                    const cg_contract_index index = {.n_heads = HI,
                                                     .head_dim = DI,
                                                     .n_keys = n,
                                                     .q = qi + t * HI * DI,
                                                     .w = w + t * HI,
                                                     .dots = dots,
                                                     .k = ki};
                    cg_contract_index_grad(&c, &index, ds, dw + t * HI, dq + t * HI * DI, dk);
                }
                expect_close(text, got_kl, row_kl, T, 1e-12);
                expect_close(text, &total, bench_get(&b, loss), 1, 1e-12);
                expect_close("dq", dq, bench_grad(&b, vqi), T * HI * DI, 1e-12);
                expect_close("dw", dw, bench_grad(&b, vw), T * HI, 1e-12);
                expect_close("dk", dk, bench_grad(&b, vki), C * DI, 1e-12);
                bench_free(&b);
            }
}
END_TEST

/* ---- text ---- */

START_TEST(names_and_text) {
    char text[CG_CONTRACT_TEXT], again[CG_CONTRACT_TEXT];
    for (int a = 0; a < CG_AXES; a++)
        for (int v = 0; v < cg_axis_count((cg_axis)a); v++)
            for (int f = 0; f < CG_FAULTS; f++) {
                cg_contract c = cg_contract_default(), back;
                c.value[a] = v;
                c.faults = 1u << f;
                cg_contract_text(&c, text, sizeof text);
                back = contract(text);
                ck_assert(!memcmp(&back, &c, sizeof c));
                ck_assert_str_eq(cg_contract_text(&back, again, sizeof again), text);
            }
    const struct {
        const char *text, *says;
    } bad[] = {{"techer=full", "did you mean teacher?"},
               {"teacher=compresed", "did you mean compressed?"},
               {"fault=relu-leek", "did you mean relu-leak?"},
               {"teacher", "expected axis=value"},
               {"=", "unknown axis"},
               {"teacher=", "use one of full, sink"},
               {"teacher=full,", "nothing stands after the last comma"},
               {"teacher=full,teacher=sink", "given twice"}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        cg_contract c;
        cg_error error = {0};
        ck_assert(!cg_contract_parse(bad[i].text, &c, &error));
        ck_assert_int_eq(error.code, CG_BAD_INPUT);
        if (!strstr(error.text, bad[i].says)) ck_abort_msg("%s: %s", bad[i].text, error.text);
    }
}
END_TEST

SUITE("contract", renormalised_teacher, dense_over_the_sparse_denominator, floor_under_a_small_mass,
      epsilon_in_both_logarithms, divisors, ranks_that_normalise_first, gradient_through_relu, derivatives,
      rows_without_support, the_default_is_what_the_ops_compute, names_and_text)
