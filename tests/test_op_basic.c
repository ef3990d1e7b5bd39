/* The small ops against numbers worked out by hand, and what the loop over all ops cannot see. */
#include "tests/support.h"

static cg_value *refused(bench *b, const char *part) {
    const cg_error *error = cg_graph_error(b->graph);
    if (!error) ck_abort_msg("not refused, expected \"%s\"", part);
    if (!strstr(error->text, part)) ck_abort_msg("got \"%s\", expected \"%s\" in it", error->text, part);
    bench_free(b);
    return NULL;
}

START_TEST(matmul_by_hand) { /* [1 2; 3 4] [5 6; 7 8], each operand stored either way */
    for (int way = 0; way < 4; way++) {
        bench b = bench_new(CG_F64);
        const bool ta = way & 1, tb = way & 2;
        cg_value *a = bench_real(&b, "a", CG_SHAPE(2, 2), ta ? (double[]){1, 3, 2, 4} : (double[]){1, 2, 3, 4});
        cg_value *c = bench_real(&b, "b", CG_SHAPE(2, 2), tb ? (double[]){5, 7, 6, 8} : (double[]){5, 6, 7, 8});
        cg_value *y = cg_matmul(b.graph, a, c, ta, tb);
        bench_backward(&b, y, (double[]){1, 0, 0, 2});
        bench_run(&b);
        expect_close("y", bench_get(&b, y), (double[]){19, 22, 43, 50}, 4, 1e-15);
        expect_close("da", bench_grad(&b, a), ta ? (double[]){5, 12, 7, 16} : (double[]){5, 7, 12, 16}, 4,
                     1e-15);
        expect_close("db", bench_grad(&b, c), tb ? (double[]){1, 2, 6, 8} : (double[]){1, 6, 2, 8}, 4, 1e-15);
        bench_free(&b);
    }
}
END_TEST

START_TEST(linear_applies_rows_of_the_weight) {
    bench b = bench_new(CG_F32);
    cg_value *x = bench_real(&b, "x", CG_SHAPE(1, 3), (double[]){1, 2, 3});
    cg_value *w = bench_real(&b, "w", CG_SHAPE(2, 3), (double[]){1, 0, 0, 1, 1, 1});
    cg_value *y = cg_keep(cg_linear(b.graph, x, w));
    bench_run(&b);
    expect_close("y", bench_get(&b, y), (double[]){1, 6}, 2, 1e-7);
    bench_free(&b);
}
END_TEST

START_TEST(grouped_linear_by_hand) {
    bench b = bench_new(CG_F64);
    cg_value *x = bench_real(&b, "x", CG_SHAPE(2, 2, 2), (double[]){1, 2, 3, 4, 5, 6, 7, 8});
    cg_value *w = bench_real(&b, "w", CG_SHAPE(2, 1, 2), (double[]){1, 10, 100, 1000});
    cg_value *y = cg_grouped_linear(b.graph, x, w);
    bench_backward(&b, y, (double[]){1, 2, 3, 4});
    bench_run(&b);
    expect_close("y", bench_get(&b, y), (double[]){21, 4300, 65, 8700}, 4, 1e-15);
    expect_close("dx", bench_grad(&b, x), (double[]){1, 10, 200, 2000, 3, 30, 400, 4000}, 8, 1e-15);
    expect_close("dw", bench_grad(&b, w), (double[]){16, 20, 34, 40}, 4, 1e-15);
    bench_free(&b);
}
END_TEST

START_TEST(relu_at_zero_and_at_nan) {
    bench b = bench_new(CG_F32);
    cg_value *x = bench_real(&b, "x", CG_SHAPE(4), (double[]){0, -0.0, 2, -3});
    cg_value *y = cg_relu(b.graph, x);
    bench_backward(&b, y, NULL);
    bench_run(&b);
    expect_close("y", bench_get(&b, y), (double[]){0, 0, 2, 0}, 4, 0);
    expect_close("dx", bench_grad(&b, x), (double[]){0, 0, 1, 0}, 4, 0);
    bench_free(&b);

    b = bench_new(CG_F32);
    y = cg_keep(cg_relu(b.graph, bench_real(&b, "x", CG_SHAPE(1), (double[]){NAN})));
    bench_run(&b);
    ck_assert(isnan(bench_get(&b, y)[0]));
    bench_free(&b);
}
END_TEST

/* 2^24 ones: an f32 running sum of more would stop growing there. */
START_TEST(sum_does_not_stall_in_f32) {
    bench b = bench_new(CG_F32);
    enum { N = 100003 };
    double *x = malloc(N * sizeof *x);
    for (int i = 0; i < N; i++) x[i] = i ? 1 : 1 << 24;
    cg_value *y = cg_keep(cg_sum(b.graph, bench_real(&b, "x", CG_SHAPE(N), x)));
    bench_run(&b);
    ck_assert(bench_get(&b, y)[0] == (double)(float)((1 << 24) + N - 1));
    free(x);
    bench_free(&b);
}
END_TEST

START_TEST(rms_norm_by_hand) { /* mean of squares 12.5 - with eps 3.5 it is 16, so r = 1/4 */
    bench b = bench_new(CG_F64);
    cg_value *x = bench_real(&b, "x", CG_SHAPE(1, 2), (double[]){3, 4});
    cg_value *w = bench_real(&b, "w", CG_SHAPE(2), (double[]){2, -1});
    cg_value *y = cg_rms_norm(b.graph, x, w, 3.5);
    bench_backward(&b, y, (double[]){1, 3});
    bench_run(&b);
    expect_close("y", bench_get(&b, y), (double[]){1.5, -1}, 2, 1e-15);
    /* g = w dy = (2, -3), g.x = -6: dx = g/4 - x (1/64) (-6)/2 = g/4 + 3x/64 */
    expect_close("dx", bench_grad(&b, x), (double[]){0.5 + 9. / 64, -0.75 + 12. / 64}, 2, 1e-15);
    expect_close("dw", bench_grad(&b, w), (double[]){0.75, 3}, 2, 1e-15);
    bench_free(&b);
}
END_TEST

START_TEST(swiglu_by_hand) {
    const double s1 = 1 / (1 + exp(-1)), s2 = 1 / (1 + exp(-2)), s20 = 1 / (1 + exp(20));
    const double gate[] = {1, 5, -20, 2, 1}, up[] = {1.5, 1, -1, 7, -7};
    bench b = bench_new(CG_F64);
    cg_value *g = bench_real(&b, "gate", CG_SHAPE(5), gate), *u = bench_real(&b, "up", CG_SHAPE(5), up);
    cg_value *y = cg_swiglu(b.graph, g, u, 2);
    bench_backward(&b, y, NULL);
    bench_run(&b);
    expect_close("y", bench_get(&b, y), (double[]){1.5 * s1, 2 * s2, 20 * s20, 4 * s2, -2 * s1}, 5, 1e-15);
    /* no lower clamp of the gate; gradient 0 beyond a clamp, and passed at the limit itself (gate 2) */
    expect_close("dgate", bench_grad(&b, g),
                 (double[]){1.5 * s1 * (2 - s1), 0, -s20 * (1 - 20 * (1 - s20)), 2 * s2 * (1 + 2 * (1 - s2)),
                            -2 * s1 * (2 - s1)},
                 5, 1e-14);
    expect_close("dup", bench_grad(&b, u), (double[]){s1, 2 * s2, -20 * s20, 0, 0}, 5, 1e-14);
    bench_free(&b);

    b = bench_new(CG_F64); /* limit 0: no clamp */
    y = cg_keep(cg_swiglu(b.graph, bench_real(&b, "gate", CG_SHAPE(1), (double[]){30}),
                          bench_real(&b, "up", CG_SHAPE(1), (double[]){-40}), 0));
    bench_run(&b);
    expect_close("y", bench_get(&b, y), (double[]){-1200}, 1, 1e-12);
    bench_free(&b);
}
END_TEST

START_TEST(embedding_adds_repeated_tokens) {
    bench b = bench_new(CG_F64);
    cg_value *table = bench_real(&b, "table", CG_SHAPE(3, 2), (double[]){1, 2, 3, 4, 5, 6});
    cg_value *tokens = bench_i32(&b, "tokens", CG_SHAPE(4), (int32_t[]){2, -1, 0, 2});
    cg_value *y = cg_embedding(b.graph, table, tokens);
    bench_backward(&b, y, (double[]){1, 2, 4, 8, 16, 32, 64, 128});
    bench_run(&b);
    expect_close("y", bench_get(&b, y), (double[]){5, 6, 0, 0, 1, 2, 5, 6}, 8, 0);
    expect_close("dtable", bench_grad(&b, table), (double[]){16, 32, 0, 0, 65, 130}, 6, 0);
    bench_free(&b);
}
END_TEST

START_TEST(embedding_names_the_first_bad_token) {
    const int32_t bad[] = {3, -2, INT32_MAX, INT32_MIN};
    for (int i = 0; i < 4; i++) {
        bench b = bench_new(CG_F32);
        CG_SCOPE(b.graph, "embed");
        cg_value *table = bench_real(&b, "table", CG_SHAPE(3, 2), NULL);
        cg_value *tokens = bench_i32(&b, "tokens", CG_SHAPE(3), (int32_t[]){0, bad[i], 77});
        cg_keep(cg_embedding(b.graph, table, tokens));
        ck_assert(!bench_try(&b));
        char want[128];
        snprintf(want, sizeof want, "row 1 of tokens is %d, expected -1 or a row of the table, 0 to 2",
                 (int)bad[i]);
        if (!strstr(b.error.text, want) || !strstr(b.error.text, "embed: embedding"))
            ck_abort_msg("got \"%s\", expected \"%s\"", b.error.text, want);
        ck_assert_int_eq(b.error.code, CG_BAD_INPUT);
        bench_free(&b);
    }
}
END_TEST

/* Row 0: uniform over 4. Row 1: no target, not read. Row 2: logits log 1, log 2, log 5, -inf: p = 1/8, 2/8,
 * 5/8, 0. */
START_TEST(cross_entropy_by_hand) {
    bench b = bench_new(CG_F64);
    const double logits[] = {7, 7, 7, 7, NAN, NAN, 1, 2, 0, log(2), log(5), -INFINITY};
    cg_value *x = bench_real(&b, "logits", CG_SHAPE(3, 4), logits);
    cg_value *loss = cg_cross_entropy(b.graph, x, bench_i32(&b, "targets", CG_SHAPE(3), (int32_t[]){3, -1, 1}));
    cg_value *lse = cg_keep(cg_output(loss, 1));
    bench_backward(&b, loss, (double[]){2});
    bench_run(&b);
    expect_close("loss", bench_get(&b, loss), (double[]){log(4) + log(4)}, 1, 1e-15);
    expect_close("lse", bench_get(&b, lse), (double[]){7 + log(4), 0, log(8)}, 3, 1e-15);
    expect_close("dlogits", bench_grad(&b, x), (double[]){.5, .5, .5, -1.5, 0, 0, 0, 0, .25, -1.5, 1.25, 0}, 12,
                 1e-15);
    bench_free(&b);
}
END_TEST

/* The maximum grows from block to block, so the running sum is rescaled each time; and -inf alone in the first.
 */
START_TEST(cross_entropy_across_blocks) {
    enum { N = 5000 };
    double *x = malloc(N * sizeof *x), sum = 0;
    for (int v = 0; v < N; v++) x[v] = v < 1500 ? -INFINITY : v * 0.01;
    for (int v = N - 1; v >= 1500; v--) sum += exp(x[v] - x[N - 1]);
    const double want = log(sum) + x[N - 1] - x[2000];
    for (cg_dtype dtype = CG_F32; dtype <= CG_F64; dtype++) {
        bench b = bench_new(dtype);
        cg_value *loss = cg_keep(cg_cross_entropy(b.graph, bench_real(&b, "x", CG_SHAPE(1, N), x),
                                                  bench_i32(&b, "t", CG_SHAPE(1), (int32_t[]){2000})));
        bench_run(&b);
        expect_close("loss", bench_get(&b, loss), &want, 1, dtype == CG_F32 ? 1e-6 : 1e-14);
        bench_free(&b);
    }
    free(x);
}
END_TEST

START_TEST(argmax_takes_the_lowest_of_equals) {
    bench b = bench_new(CG_F32);
    cg_value *x = bench_real(&b, "x", CG_SHAPE(4, 3),
                             (double[]){1, 3, 3, -5, -6, -5, -0.0, 0, 0, -INFINITY, -INFINITY, -INFINITY});
    cg_value *y = cg_keep(cg_argmax(b.graph, x));
    bench_run(&b);
    expect_close("y", bench_get(&b, y), (double[]){1, 0, 0, 0}, 4, 0);
    bench_free(&b);
}
END_TEST

START_TEST(accumulate_stores_then_adds) {
    bench b = bench_new(CG_F32);
    cg_value *sum = cg_leaf(b.graph, CG_LEAF_GRADIENT, "sum", CG_F32, CG_SHAPE(2));
    cg_value *grad = cg_leaf(b.graph, CG_LEAF_INPUT, "grad", CG_F32, CG_SHAPE(2));
    cg_value *keep = cg_leaf(b.graph, CG_LEAF_INPUT, "keep", CG_F32, CG_SHAPE(1));
    cg_accumulate(b.graph, sum, grad, keep);
    ck_assert_int_eq(b.graph->nodes[0]->pass, CG_BACKWARD);
    ck_assert_int_eq(cg_pass_now(b.graph), CG_FORWARD);
    bench_run(&b);
    float *s = cg_exec_data(b.exec, sum), *g = cg_exec_data(b.exec, grad), *k = cg_exec_data(b.exec, keep);
    s[0] = NAN, s[1] = 7, g[0] = 1, g[1] = 2; /* garbage of the last step does not matter */
    for (int micro = 0; micro < 3; micro++) {
        *k = (float)(micro > 0);
        ck_assert(cg_exec_run(b.exec, CG_ALL_PASSES, &b.error));
    }
    ck_assert(s[0] == 3 && s[1] == 6);
    ck_assert(cg_exec_run(b.exec, CG_PASS_BIT(CG_OPTIMIZE) | CG_PASS_BIT(CG_FORWARD), &b.error));
    ck_assert(s[0] == 3 && s[1] == 6);
    bench_free(&b);
}
END_TEST

START_TEST(only_leaves_change_in_place) {
    bench b = bench_new(CG_F32);
    cg_value *x = bench_real(&b, "x", CG_SHAPE(2), NULL), *one = bench_constant(&b, "one", CG_SHAPE(1), NULL);
    cg_accumulate(b.graph, cg_scale(b.graph, x, 2), x, one);
    refused(&b, "sum is computed by a node, expected a leaf");

    b = bench_new(CG_F32);
    x = bench_real(&b, "x", CG_SHAPE(2), NULL), one = bench_constant(&b, "one", CG_SHAPE(1), NULL);
    const cg_adamw_attr attr = {.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8};
    cg_adamw(b.graph, x, cg_scale(b.graph, x, 2), x, x, one, x, &attr);
    refused(&b, "m is computed by a node, expected a leaf");
}
END_TEST

START_TEST(global_norm_by_hand) {
    bench b = bench_new(CG_F32);
    cg_value *grads[] = {bench_real(&b, "a", CG_SHAPE(2), (double[]){3e20, 0}),
                         bench_real(&b, "b", CG_SHAPE(0), NULL),
                         bench_real(&b, "c", CG_SHAPE(1, 1), (double[]){-4e20})};
    cg_value *norm = cg_keep(cg_global_norm(b.graph, grads, 3));
    ck_assert_int_eq(b.graph->nodes[0]->pass, CG_OPTIMIZE);
    ck_assert_int_eq(cg_pass_now(b.graph), CG_FORWARD);
    bench_run(&b);
    expect_close("norm", bench_get(&b, norm), (double[]){5e20}, 1, 1e-7); /* squares do not fit f32 */
    bench_free(&b);
}
END_TEST

/* The same steps, one number after the other, from the paper's algorithm. */
typedef struct reference {
    double p, m, v;
} reference;

static void reference_step(reference *r, double grad, double norm, double rate, int step,
                           const cg_adamw_attr *a) {
    double g = a->max_norm > 0 ? grad * fmin(1, a->max_norm / norm) : grad;
    r->m = a->beta1 * r->m + (1 - a->beta1) * g;
    r->v = a->beta2 * r->v + (1 - a->beta2) * g * g;
    double m_hat = r->m / (1 - pow(a->beta1, step)), v_hat = r->v / (1 - pow(a->beta2, step));
    r->p = r->p - rate * (m_hat / (sqrt(v_hat) + a->eps) + a->weight_decay * r->p);
}

static void follow_reference(cg_dtype dtype, const cg_adamw_attr *attr, double bound) {
    enum { N = 37, STEPS = 6 }; /* whole vectors of every path, and a rest */
    bench b = bench_new(dtype);
    cg_value *p = cg_leaf(b.graph, CG_LEAF_PARAMETER, "p", dtype, CG_SHAPE(N));
    cg_value *m = cg_leaf(b.graph, CG_LEAF_OPTIMIZER, "m", dtype, CG_SHAPE(N));
    cg_value *v = cg_leaf(b.graph, CG_LEAF_OPTIMIZER, "v", dtype, CG_SHAPE(N));
    cg_value *grad = cg_leaf(b.graph, CG_LEAF_GRADIENT, "grad", dtype, CG_SHAPE(N));
    cg_value *schedule = cg_leaf(b.graph, CG_LEAF_INPUT, "schedule", dtype, CG_SHAPE(2));
    cg_adamw(b.graph, p, m, v, grad, cg_global_norm(b.graph, &grad, 1), schedule, attr);
    ck_assert_int_eq(b.graph->nodes[1]->pass, CG_OPTIMIZE);
    ck_assert_int_eq(cg_pass_now(b.graph), CG_FORWARD);
    b.plan = cg_plan_make(b.graph, NULL, &b.error);
    b.exec = cg_exec_new(b.plan, &b.options, &b.error);
    ck_assert_ptr_nonnull(b.exec);
    reference r[N];
    for (int i = 0; i < N; i++) {
        r[i] = (reference){.p = 0.5 - 0.25 * (i % 5)};
        cg_real_set(dtype, cg_exec_data(b.exec, p), i, r[i].p);
    }
    for (int step = 1; step <= STEPS; step++) {
        double g[N], norm = 0, rate = (float)(0.01 * step); /* the norm falls from above max_norm to below it */
        for (int i = 0; i < N; i++) {
            g[i] = i % 9 == 4 ? 0 : (float)(3 * cos(2 * i + step) / step);
            norm += g[i] * g[i];
            cg_real_set(dtype, cg_exec_data(b.exec, grad), i, g[i]);
        }
        cg_real_set(dtype, cg_exec_data(b.exec, schedule), 0, rate);
        cg_real_set(dtype, cg_exec_data(b.exec, schedule), 1, step);
        if (!cg_exec_run(b.exec, CG_ALL_PASSES, &b.error)) ck_abort_msg("%s", b.error.text);
        double want[3][N];
        for (int i = 0; i < N; i++) {
            reference_step(&r[i], g[i], sqrt(norm), rate, step, attr);
            want[0][i] = r[i].p, want[1][i] = r[i].m, want[2][i] = r[i].v;
        }
        expect_close("param", bench_get(&b, p), want[0], N, bound);
        expect_close("m", bench_get(&b, m), want[1], N, bound);
        expect_close("v", bench_get(&b, v), want[2], N, bound);
        ck_assert((step == 1) == (attr->max_norm > 0 && sqrt(norm) > 2 * attr->max_norm) ||
                  attr->max_norm <= 0);
    }
    bench_free(&b);
}

START_TEST(adamw_follows_its_definition) {
    cg_adamw_attr attr = {.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .max_norm = 4};
    follow_reference(CG_F64, &attr, 1e-14);
    follow_reference(CG_F32, &attr, 2e-6);
    attr = (cg_adamw_attr){.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-20}; /* DeepSeek-V4's eps, and no clipping */
    follow_reference(CG_F64, &attr, 1e-14);
    follow_reference(CG_F32, &attr, 2e-6);
}
END_TEST

/* A gradient that is not finite stops the step before any parameter or moment has changed. */
START_TEST(adamw_keeps_parameters_from_nan) {
    bench b = bench_new(CG_F32);
    const cg_adamw_attr attr = {.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8};
    cg_value *p = bench_real(&b, "p", CG_SHAPE(2), (double[]){1, 2});
    cg_value *m = bench_constant(&b, "m", CG_SHAPE(2), NULL), *v = bench_constant(&b, "v", CG_SHAPE(2), NULL);
    cg_value *grad = bench_constant(&b, "grad", CG_SHAPE(2), (double[]){0, NAN});
    cg_value *schedule = bench_constant(&b, "schedule", CG_SHAPE(2), (double[]){0.1, 1});
    cg_adamw(b.graph, p, m, v, grad, cg_global_norm(b.graph, &grad, 1), schedule, &attr);
    ck_assert(!bench_try(&b));
    ck_assert_ptr_nonnull(strstr(b.error.text, "a gradient is not finite"));
    expect_close("p", bench_get(&b, p), (double[]){1, 2}, 2, 0);
    expect_close("m", bench_get(&b, m), (double[]){0, 0}, 2, 0);
    bench_free(&b);
}
END_TEST

/* Outputs that take the place of an input give the same bits as outputs with a place of their own. */
static double *chain(bench *b, bool in_place, int *n_taken_over) {
    enum { T = 40, D = 301 };
    *b = bench_new(CG_F32);
    double x[T * D];
    int32_t number[T];
    for (int i = 0; i < T * D; i++) x[i] = 3 * sin(1.7 * i);
    for (int t = 0; t < T; t++) number[t] = t % 7 - 1;
    cg_graph *g = b->graph;
    cg_value *leaf = bench_real(b, "x", CG_SHAPE(T, D), x), *w = bench_real(b, "w", CG_SHAPE(D), x);
    cg_value *index = bench_i32(b, "index", CG_SHAPE(T), number);
    cg_value *h = cg_rms_norm(g, cg_scale(g, leaf, 1.5), w, 1e-6);
    h = cg_rope(g, h, index, &(cg_rope_attr){.n_rotary = 64, .base = 100});
    h = cg_swiglu(g, cg_scale(g, h, 1.1), cg_scale(g, h, -0.7), 2);
    h = cg_mul(g, cg_relu(g, cg_scale(g, h, 2)), cg_scale(g, leaf, 0.3));
    bench_backward(b, cg_cross_entropy(g, cg_rms_norm(g, h, NULL, 1e-6), index), NULL);
    b->plan = cg_plan_make(g, &(cg_plan_options){.no_reuse_in_place = !in_place}, &b->error);
    ck_assert_ptr_nonnull(b->plan);
    b->exec = cg_exec_new(b->plan, &b->options, &b->error);
    bench_run(b);
    for (int s = *n_taken_over = 0; s < b->plan->n_storages; s++)
        *n_taken_over += b->plan->storages[s].taken_over >= 0;
    return bench_grad(b, leaf);
}

START_TEST(in_place_gives_the_same_bits) {
    bench a, b;
    int shared, apart;
    double *da = chain(&a, true, &shared), *db = chain(&b, false, &apart);
    ck_assert_int_ge(shared, 8);
    ck_assert_int_eq(apart, 0);
    ck_assert(!memcmp(da, db, 40 * 301 * sizeof(double)));
    bench_free(&a);
    bench_free(&b);
}
END_TEST

SUITE("basic ops", matmul_by_hand, linear_applies_rows_of_the_weight, grouped_linear_by_hand,
      relu_at_zero_and_at_nan, sum_does_not_stall_in_f32, rms_norm_by_hand, swiglu_by_hand,
      embedding_adds_repeated_tokens, embedding_names_the_first_bad_token, cross_entropy_by_hand,
      cross_entropy_across_blocks, argmax_takes_the_lowest_of_equals, accumulate_stores_then_adds,
      only_leaves_change_in_place, global_norm_by_hand, adamw_follows_its_definition,
      adamw_keeps_parameters_from_nan, in_place_gives_the_same_bits)
