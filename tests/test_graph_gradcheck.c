/* The gradient check itself: each kind of wrong gradient must fail, the right one must pass, and a check that
 * compared nothing must not pass. */
#include "tests/graph_ops.h"

#include "graph/gradcheck.h"
#include "ops/attributes.h"

extern const cg_op cg_op_csa_attention;

enum { N = 4 };

/* y = w x with x [N], w [N, N]; its backward gives dx = w^T dy and dw = dy x^T, or one of these wrong. */
typedef enum flaw {
    RIGHT,
    SIGN_X,
    SIGN_W,
    FACTOR_X,
    FACTOR_W,
    FACTOR_BARELY_WRONG,
    FACTOR_ROUNDING,
    DROPPED_TERM_X,
    DROPPED_ENTRY_W,
    OFF_BY_ONE_X,
    OFF_BY_ONE_W,
    TRANSPOSED_X,
    TRANSPOSED_W,
    DOUBLED_ENTRY_W,
    ZERO_X,
    NAN_W,
    MISSING_X,
    FLAWS
} flaw;

static const char *const flaw_names[FLAWS] = {
    "right",         "sign of dx",    "sign of dw",    "1.01 dx",       "1.01 dw",       "1 + 2e-6 dx",
    "1 + 1e-9 dx",   "dropped term",  "dropped entry", "dx off by one", "dw off by one", "dx transposed",
    "dw transposed", "doubled entry", "dx zero",       "dw NaN",        "dx not built"};

static const cg_op mix_grad;

static bool mix_infer(cg_infer *infer) {
    cg_infer_out(infer, 0, infer->in[0]->dtype, infer->in[0]->shape);
    return true;
}
static bool mix_run(const cg_run_args *args) {
    const double *x = args->in[0].data, *w = args->in[1].data;
    for (int i = 0; i < N; i++) {
        double sum = 0;
        for (int j = 0; j < N; j++) sum += w[i * N + j] * x[j];
        ((double *)args->out[0].data)[i] = sum;
    }
    return true;
}
static bool mix_grad_infer(cg_infer *infer) {
    for (int s = 0; s < 2; s++) cg_infer_out(infer, s, infer->in[s]->dtype, infer->in[s]->shape);
    return true;
}
static bool mix_grad_run(const cg_run_args *args) {
    const double *x = args->in[0].data, *w = args->in[1].data, *dy = args->in[2].data;
    double *dx = args->out[0].data, *dw = args->out[1].data, sum[N];
    flaw f = *(const flaw *)args->attr;
    for (int j = 0; j < N; j++) {
        sum[j] = 0;
        for (int i = 0; i < N - (f == DROPPED_TERM_X); i++)
            sum[j] += (f == TRANSPOSED_X ? w[j * N + i] : w[i * N + j]) * dy[i];
    }
    double factor = f == SIGN_X ? -1 : f == FACTOR_X ? 1.01 : f == FACTOR_BARELY_WRONG ? 1 + 2e-6 : 1;
    if (f == FACTOR_ROUNDING) factor = 1 + 1e-9;
    if (f == ZERO_X) factor = 0;
    for (int j = 0; j < N; j++) dx[j] = factor * sum[(j + (f == OFF_BY_ONE_X)) % N];
    for (int i = 0; i < N; i++)
        for (int j = 0; j < N; j++) {
            double v = f == TRANSPOSED_W ? dy[j] * x[i] : dy[i] * x[(j + (f == OFF_BY_ONE_W)) % N];
            if (f == SIGN_W) v = -v;
            if (f == FACTOR_W) v *= 1.01;
            if (f == DROPPED_ENTRY_W && i == 2 && j == 1) v = 0;
            if (f == DOUBLED_ENTRY_W && i == 3 && j == 3) v *= 2;
            if (f == NAN_W && i == 0 && j == 2) v = NAN;
            dw[i * N + j] = v;
        }
    return true;
}
static void mix_build(cg_graph *graph, const cg_node *node, cg_value *const *dout, cg_value **din) {
    cg_value *dx = T_APPLY(&mix_grad, node->attr, node->in[0], node->in[1], dout[0]);
    if (*(const flaw *)node->attr != MISSING_X) din[0] = dx;
    din[1] = cg_output(dx, 1);
}
static const cg_op mix_grad = {.name = "mix_grad",
                               .in = {"x", "w", "dy"},
                               .out = {"dx", "dw"},
                               .attr_bytes = sizeof(flaw),
                               .infer = mix_grad_infer,
                               .no_grad = "not yet",
                               .run = {[CG_F64] = {mix_grad_run}}};
static const cg_op mix = {.name = "mix",
                          .in = {"x", "w"},
                          .out = {"y"},
                          .attr_bytes = sizeof(flaw),
                          .infer = mix_infer,
                          .differentiable = 3,
                          .grad = mix_build,
                          .run = {[CG_F64] = {mix_run}}};

typedef struct verdict {
    cg_gradcheck_report report;
    int n_cases;
} verdict;

static verdict check_op(const cg_op *op) {
    verdict v;
    cg_error error = {0};
    if (!cg_gradcheck_op(&t_ops, op, NULL, &v.n_cases, &v.report, &error)) ck_abort_msg("%s", error.text);
    return v;
}

static verdict check_one(cg_op op, const cg_case *cases, int n_cases) {
    op.cases = cases;
    op.n_cases = n_cases;
    return check_op(&op);
}

START_TEST(wrong_gradients_fail) {
    for (flaw f = 0; f < FLAWS; f++) {
        const cg_case one = {
            .name = "one", .in = {{.shape = CG_DIMS(N)}, {.shape = CG_DIMS(N, N)}}, .attr = &f};
        verdict v = check_one(mix, &one, 1);
        bool right = f == RIGHT || f == FACTOR_ROUNDING;
        ck_assert_msg(v.report.ok == right, "%s: ok %d, worst %.3g: %s", flaw_names[f], v.report.ok,
                      v.report.worst_rel, v.report.worst);
        ck_assert_int_eq(v.n_cases, 1);
        ck_assert_int_eq(v.report.n_kinks, 0); /* none of them is explained away */
        ck_assert_int_eq(v.report.n_entries, (N + 1) * (N + N * N));
        if (f == FACTOR_X) ck_assert_double_eq_tol(v.report.worst_rel, 0.01 / 1.01, 1e-3);
        if (f == DROPPED_ENTRY_W)
            t_expect_text(v.report.worst, "one: w entry 9 by output entry 2: analytic 0,");
        if (f == NAN_W) t_expect_text(v.report.worst, "w entry 2");
    }
}
END_TEST

/* One wrong case among right ones is enough. */
START_TEST(every_case_counts) {
    flaw flaws[] = {RIGHT, RIGHT, TRANSPOSED_W, RIGHT};
    cg_case cases[4];
    for (int c = 0; c < 4; c++)
        cases[c] = (cg_case){.name = (const char *[]){"a", "b", "c", "d"}[c],
                             .in = {{.shape = CG_DIMS(N)}, {.shape = CG_DIMS(N, N)}},
                             .attr = &flaws[c]};
    verdict v = check_one(mix, cases, 4);
    ck_assert(!v.report.ok);
    ck_assert_int_eq(v.n_cases, 4);
    t_expect_text(v.report.worst, "c: w entry");
    cases[2].refuses = "not this one"; /* cases that are not run do not count */
    cases[3].large = true;
    v = check_one(mix, cases, 4);
    ck_assert(v.report.ok);
    ck_assert_int_eq(v.n_cases, 2);
}
END_TEST

START_TEST(kinks_are_counted_apart) {
    const cg_case some = {.name = "some", .in = {{.shape = CG_DIMS(4), .real = (double[]){1, 0, -2, 0.5}}}};
    verdict v = check_one(t_relu, &some, 1);
    ck_assert(v.report.ok);
    ck_assert_int_gt(v.report.n_kinks, 0);
    ck_assert_int_gt(v.report.n_entries, 0);
    const cg_case smooth = {.name = "smooth", .in = {{.shape = CG_DIMS(2), .real = (double[]){0.1, 1}}}};
    v = check_one(t_relu, &smooth, 1);
    ck_assert(v.report.ok);
    ck_assert_int_eq(v.report.n_kinks, 0);
    const cg_case zeros = {.name = "zeros", .in = {{.shape = CG_DIMS(4), .real = (double[]){0, 0, 0, 0}}}};
    v = check_one(t_relu, &zeros, 1); /* nothing but kinks is not a pass */
    ck_assert(!v.report.ok);
    ck_assert_int_ge(v.report.n_kinks, 4);
    t_expect_text(v.report.worst, "no case has a gradient to x that is not zero");
    const cg_case negative = {.name = "negative", .in = {{.shape = CG_DIMS(2), .real = (double[]){-1, -2}}}};
    v = check_one(t_relu, &negative, 1); /* nor are zeros that agree */
    ck_assert(!v.report.ok);
    ck_assert_int_gt(v.report.n_entries, 0);
    v = check_one(t_relu, (cg_case[]){zeros, negative, some}, 3);
    ck_assert(v.report.ok);
    ck_assert_int_eq(v.n_cases, 3);
}
END_TEST

static double wrong_slope;
static bool wrong_relu_grad_run(const cg_run_args *args) {
    t_relu_grad_run(args);
    for (int64_t i = 0; i < t_size(&args->out[0]); i++)
        if (((const double *)args->in[1].data)[i] <= 0)
            ((double *)args->out[0].data)[i] = wrong_slope * ((const double *)args->in[0].data)[i];
    return true;
}
static cg_op wrong_relu_grad;
static void wrong_relu_build(cg_graph *graph, const cg_node *node, cg_value *const *dout, cg_value **din) {
    din[0] = T_APPLY(&wrong_relu_grad, NULL, dout[0], node->out[0]);
}

/* At a kink a value between the two slopes is fine, any other is an error. */
START_TEST(kinks_excuse_nothing_else) {
    cg_op relu = t_relu;
    relu.grad = wrong_relu_build;
    wrong_relu_grad = t_relu_grad;
    wrong_relu_grad.run[CG_F64][CG_PORTABLE] = wrong_relu_grad_run;
    const cg_case at_kink = {.name = "kink", .in = {{.shape = CG_DIMS(3), .real = (double[]){1, 0, 2}}}};
    const struct {
        double slope;
        bool ok;
    } slopes[] = {{0, true}, {0.5, true}, {1, true}, {1.1, false}, {2, false}, {-0.1, false}, {-1, false}};
    for (size_t k = 0; k < sizeof slopes / sizeof *slopes; k++) {
        wrong_slope = slopes[k].slope;
        verdict v = check_one(relu, &at_kink, 1);
        ck_assert_msg(v.report.ok == slopes[k].ok, "slope %g: %s", wrong_slope, v.report.worst);
    }
    wrong_slope = 0.5; /* away from the kink the same value is wrong */
    const cg_case below = {.name = "below", .in = {{.shape = CG_DIMS(3), .real = (double[]){1, -0.5, 2}}}};
    ck_assert(!check_one(relu, &below, 1).report.ok);
}
END_TEST

static bool constant_run(const cg_run_args *args) {
    for (int64_t i = 0; i < t_size(&args->out[0]); i++) ((double *)args->out[0].data)[i] = 7;
    return true;
}
static void zero_build(cg_graph *graph, const cg_node *node, cg_value *const *dout, cg_value **din) {
    (void)dout;
    din[0] = cg_zeros(graph, CG_F64, node->in[0]->shape);
}
static bool nan_run(const cg_run_args *args) {
    for (int64_t i = 0; i < t_size(&args->out[0]); i++) ((double *)args->out[0].data)[i] = NAN;
    return true;
}
static bool failing_run(const cg_run_args *args) { return cg_fail(args->error, CG_BAD_INPUT, "row 2 is bad"); }

START_TEST(nothing_compared_is_no_pass) {
    const cg_case one = {.name = "one", .in = {{.shape = CG_DIMS(3)}}};
    cg_op op = t_relu;
    op.run[CG_F64][CG_PORTABLE] = constant_run; /* a gradient that is zero everywhere, and rightly so */
    op.grad = zero_build;
    verdict v = check_one(op, &one, 1);
    ck_assert(!v.report.ok);
    ck_assert(v.report.worst_rel == 0);
    t_expect_text(v.report.worst, "no case has a gradient to x that is not zero");

    op = t_relu;
    op.constant_out = 1; /* no output that a gradient flows through: no seeds */
    v = check_one(op, &one, 1);
    ck_assert(!v.report.ok);
    ck_assert_int_eq(v.n_cases, 0);

    v = check_one(t_relu, &one, 0); /* no cases */
    ck_assert(!v.report.ok);
    const cg_case constant = {.name = "constant", .in = {{.shape = CG_DIMS(3), .constant = true}}};
    ck_assert(!check_one(t_relu, &constant, 1).report.ok); /* no gradient is wanted */
    const cg_case empty = {.name = "empty", .in = {{.shape = CG_DIMS(0)}}};
    ck_assert(!check_one(t_relu, &empty, 1).report.ok);

    flaw right = RIGHT; /* of two inputs one is never differentiated */
    const cg_case half = {.name = "half",
                          .in = {{.shape = CG_DIMS(N)}, {.shape = CG_DIMS(N, N), .constant = true}},
                          .attr = &right};
    v = check_one(mix, &half, 1);
    ck_assert(!v.report.ok);
    t_expect_text(v.report.worst, "no case has a gradient to w that is not zero");

    op = t_relu; /* NaN agrees with nothing */
    op.run[CG_F64][CG_PORTABLE] = nan_run;
    op.grad = zero_build;
    ck_assert(!check_one(op, &one, 1).report.ok);

    op = t_choose; /* an op without gradient passes when it says why */
    ck_assert(check_one(op, &one, 1).report.ok);
    op.no_grad = NULL;
    ck_assert(!check_one(op, &one, 1).report.ok);
}
END_TEST

START_TEST(failures_of_the_run_are_errors) {
    const cg_case one = {.name = "one", .in = {{.shape = CG_DIMS(3)}}};
    cg_op op = t_relu;
    op.run[CG_F64][CG_PORTABLE] = failing_run;
    op.cases = &one;
    op.n_cases = 1;
    cg_gradcheck_report report;
    cg_error error = {0};
    int n_cases;
    ck_assert(!cg_gradcheck_op(&t_ops, &op, NULL, &n_cases, &report, &error));
    ck_assert_str_eq(error.text, "relu, case one: relu: row 2 is bad");
    ck_assert(!report.ok);
}
END_TEST

/* A graph under cg_gradcheck_run itself. */
typedef struct checked {
    cg_graph *graph;
    cg_value *wrt, *out, *seed, *grad;
    cg_plan *plan;
    cg_exec *exec;
    cg_gradcheck check;
} checked;

static void check_begin(checked *c) {
    cg_keep(c->out);
    c->seed = cg_leaf(c->graph, CG_LEAF_INPUT, "seed", c->out->dtype, c->out->shape);
    cg_autodiff(c->graph, &c->out, &c->seed, 1, &c->wrt, 1, &c->grad);
    cg_keep(c->grad);
    cg_keep_choices(c->graph);
    t_expect_fine(c->graph);
    c->plan = t_plan(c->graph, NULL);
    c->exec = t_exec(c->plan, &(cg_exec_options){.poison = true});
    t_fill_leaves(c->graph, c->exec, 4);
    c->check = (cg_gradcheck){.exec = c->exec,
                              .n_outputs = 1,
                              .outputs = &c->out,
                              .seeds = &c->seed,
                              .n_wrt = 1,
                              .wrt = &c->wrt,
                              .grads = &c->grad};
}

static cg_gradcheck_report check_end(checked *c) {
    cg_gradcheck_report report;
    cg_error error = {0};
    if (!cg_gradcheck_run(&c->check, NULL, &report, &error)) ck_abort_msg("%s", error.text);
    cg_exec_free(c->exec);
    cg_plan_free(c->plan);
    cg_graph_free(c->graph);
    return report;
}

/* Ties: every perturbation would choose differently, and earlier values have died by then. */
START_TEST(choices_are_held_fixed) {
    for (int full = 0; full < 2; full++) {
        checked c = {.graph = cg_graph_new(&t_ops)};
        cg_graph *graph = c.graph;
        c.wrt = t_leaf(graph, CG_LEAF_PARAMETER, "x", 12);
        cg_value *x = T_APPLY(&t_join, NULL, cg_scale(graph, c.wrt, 2), c.wrt);
        x = T_APPLY(&t_part, (&(t_range){0, 12}), T_APPLY(&t_mul, NULL, x, x));
        c.out = T_APPLY(&t_pick, NULL, T_APPLY(&t_mul, NULL, x, c.wrt), T_APPLY(&t_choose, NULL, x));
        check_begin(&c);
        double *data = cg_exec_data(c.exec, c.wrt);
        for (int i = 0; i < 12; i++) data[i] = i < 8 ? 1 : 0.5;
        c.check.full_jacobian = full;
        cg_gradcheck_report report = check_end(&c);
        ck_assert_msg(report.ok, "%s", report.worst);
        ck_assert_int_eq(report.n_entries, full ? 7 * 12 : 12);
        ck_assert_int_eq(report.n_kinks, 0);
    }
}
END_TEST

/* Attention beside a loss that is taught by it: what its teacher is made from must not move the loss. */
typedef enum teaching { BY_ATTENTION, BY_KEYS, IN_THE_LOSS, BY_DETACHED, TEACHINGS } teaching;

static double wrong_factor;
static void scaled_attention_grad(cg_graph *graph, const cg_node *node, cg_value *const *dout, cg_value **din) {
    cg_op_csa_attention.grad(graph, node, dout, din);
    for (int i = 0; i < 4; i++)
        if (din[i] && wrong_factor != 1) din[i] = cg_scale(graph, din[i], wrong_factor);
}

static void taught(checked *c, teaching how, int leaf, bool held) {
    enum { T = 8, H = 2, D = 3, C = 2, K = 2 };
    static cg_op attend;
    attend = cg_op_csa_attention;
    attend.grad = scaled_attention_grad;
    static int32_t rows[T * CG_ROW_FIELDS], list[T * K];
    for (int32_t t = 0; t < T; t++) {
        memcpy(rows + t * CG_ROW_FIELDS, (int32_t[]){0, t, 0, (t + 1) / 4, 1}, CG_ROW_FIELDS * sizeof *rows);
        for (int32_t k = 0; k < K; k++) list[t * K + k] = k < (t + 1) / 4 ? k : -1;
    }
    *c = (checked){.graph = cg_graph_new(&cg_all_ops)};
    cg_graph *graph = c->graph;
    cg_value *q = cg_leaf(graph, CG_LEAF_PARAMETER, "q", CG_F64, CG_SHAPE(T, H, D)),
             *kv = cg_leaf(graph, CG_LEAF_PARAMETER, "kv", CG_F64, CG_SHAPE(T, D)),
             *ckv = cg_leaf(graph, CG_LEAF_PARAMETER, "ckv", CG_F64, CG_SHAPE(C, D)),
             *sink = cg_leaf(graph, CG_LEAF_PARAMETER, "sink", CG_F64, CG_SHAPE(H)),
             *scores = cg_leaf(graph, CG_LEAF_PARAMETER, "scores", CG_F64, CG_SHAPE(T, K)),
             *w = cg_leaf(graph, CG_LEAF_PARAMETER, "w", CG_F64, CG_SHAPE(T, H)),
             *topk = cg_leaf(graph, CG_LEAF_INPUT, "topk", CG_I32, CG_SHAPE(T, K)),
             *facts = cg_leaf(graph, CG_LEAF_INPUT, "rows", CG_I32, CG_SHAPE(T, CG_ROW_FIELDS));
    cg_value *out =
        T_APPLY(&attend, (&(csa_attention_attr){3, 0.7, CG_TEACHER_FULL}), q, kv, ckv, sink, topk, facts);
    cg_value *window_lse = cg_output(out, 2), *loss;
    if (how == IN_THE_LOSS) {
        loss = cg_indexer_dense_loss(graph, q, w, ckv, q, ckv, window_lse, NULL, facts, 0.7, CG_TEACHER_FULL,
                                     CG_REDUCE_SUM, 1);
    } else {
        cg_value *teacher = how == BY_KEYS
                                ? cg_csa_teacher_at(graph, q, ckv, topk, window_lse, NULL, 0.7, CG_TEACHER_FULL)
                                : cg_output(out, 3);
        if (how == BY_DETACHED) /* through ops that gradients do pass, behind the one where they stop */
            teacher = cg_mul(graph, cg_scale(graph, cg_detach(graph, teacher), 2), cg_detach(graph, teacher));
        loss = cg_indexer_kl(graph, scores, teacher, facts, CG_REDUCE_SUM, 1);
    }
    c->out = cg_add(graph, cg_sum(graph, cg_mul(graph, out, out)), loss);
    c->wrt = (cg_value *[]){q, ckv, sink}[leaf];
    t_expect_fine(graph);
    if (held) ck_assert(cg_hold_constants(graph));
    check_begin(c);
    cg_exec_write(c->exec, topk, list);
    cg_exec_write(c->exec, facts, rows);
}

START_TEST(constants_are_held_fixed) {
    for (teaching how = 0; how < TEACHINGS; how++)
        for (int leaf = 0; leaf < 3; leaf++) {
            const double factors[] = {1, -1, 1.001, 1 + 4e-6};
            for (int f = 0; f < 4; f++) {
                wrong_factor = factors[f];
                checked c;
                taught(&c, how, leaf, true);
                cg_gradcheck_report report = check_end(&c);
                ck_assert_msg(report.ok == (f == 0), "teaching %d, leaf %d, factor %g: %s", how, leaf,
                              wrong_factor, report.worst);
                ck_assert_int_gt(report.n_entries, 0);
            }
            wrong_factor = 1; /* without holds no verdict, rather than a wrong one */
            checked c;
            taught(&c, how, leaf, false);
            cg_gradcheck_report report;
            cg_error error = {0};
            ck_assert(!cg_gradcheck_run(&c.check, NULL, &report, &error));
            t_expect_text(error.text, "held (cg_hold_constants)");
            cg_exec_free(c.exec);
            cg_plan_free(c.plan);
            cg_graph_free(c.graph);
        }
}
END_TEST

/* Some entries of a large leaf, evenly spread, and the leaf itself untouched. */
static bool one_column_run(const cg_run_args *args) {
    t_relu_grad_run(args);
    for (int64_t i = 0; i < t_size(&args->out[0]); i++)
        if (i % 100) ((double *)args->out[0].data)[i] = 0;
    return true;
}

START_TEST(some_entries) {
    checked c = {.graph = cg_graph_new(&t_ops)};
    cg_graph *graph = c.graph;
    c.wrt = t_leaf(graph, CG_LEAF_PARAMETER, "x", 1000);
    c.out = T_APPLY(&t_sum, NULL, T_APPLY(&t_mul, NULL, c.wrt, c.wrt));
    check_begin(&c);
    double before[1000];
    memcpy(before, cg_exec_data(c.exec, c.wrt), sizeof before);
    c.check.max_entries = 10;
    cg_gradcheck_report report;
    cg_error error = {0};
    bool nonzero = false;
    ck_assert(cg_gradcheck_run(&c.check, &nonzero, &report, &error));
    ck_assert_int_eq(report.n_entries, 10);
    ck_assert(nonzero);
    ck_assert(!memcmp(before, cg_exec_data(c.exec, c.wrt), sizeof before));
    c.check.tolerance = 1e-30; /* no difference is that good */
    ck_assert(!check_end(&c).ok);

    /* not the first of each stretch: they may all lie in one column, and be right */
    cg_op relu = t_relu;
    relu.grad = wrong_relu_build;
    wrong_relu_grad = t_relu_grad;
    wrong_relu_grad.run[CG_F64][CG_PORTABLE] = one_column_run;
    c = (checked){.graph = graph = cg_graph_new(&t_ops)};
    c.wrt = t_leaf(graph, CG_LEAF_PARAMETER, "x", 1000);
    c.out = T_APPLY(&t_sum, NULL, T_APPLY(&relu, NULL, c.wrt));
    check_begin(&c);
    c.check.max_entries = 10;
    ck_assert(!check_end(&c).ok);
}
END_TEST

/* Zeros that agree, and no entries at all. */
START_TEST(no_gradient_is_no_pass) {
    for (int n = 0; n <= 3; n += 3) {
        checked c = {.graph = cg_graph_new(&t_ops)};
        cg_graph *graph = c.graph;
        cg_op constant = t_relu;
        constant.run[CG_F64][CG_PORTABLE] = constant_run;
        constant.grad = zero_build;
        c.wrt = t_leaf(graph, CG_LEAF_PARAMETER, "x", n);
        c.out = T_APPLY(&constant, NULL, c.wrt);
        check_begin(&c);
        cg_gradcheck_report report = check_end(&c);
        ck_assert_int_eq(report.n_entries, n);
        ck_assert(!report.ok);
    }
}
END_TEST

START_TEST(what_cannot_be_checked_is_refused) {
    for (int k = 0; k < 2; k++) {
        cg_dtype dtype = k ? CG_F64 : CG_F32;
        checked c = {.graph = cg_graph_new(&t_ops)};
        c.wrt = cg_leaf(c.graph, CG_LEAF_PARAMETER, "x", dtype, CG_SHAPE(3));
        c.out = cg_scale(c.graph, cg_scale(c.graph, c.wrt, 2), 3);
        cg_keep(c.out);
        c.seed = cg_leaf(c.graph, CG_LEAF_INPUT, "seed", dtype, CG_SHAPE(3));
        ck_assert(cg_autodiff(c.graph, &c.out, &c.seed, 1, &c.wrt, 1, &c.grad));
        c.plan = t_plan(c.graph, NULL);
        c.exec = t_exec(c.plan, NULL);
        c.check = (cg_gradcheck){.exec = c.exec,
                                 .n_outputs = 1,
                                 .outputs = &c.out,
                                 .seeds = &c.seed,
                                 .n_wrt = 1,
                                 .wrt = &c.wrt,
                                 .grads = &c.grad};
        cg_gradcheck_report report;
        cg_error error = {0};
        ck_assert(!cg_gradcheck_run(&c.check, NULL, &report, &error));
        ck_assert(!report.ok);
        t_expect_text(error.text, k ? "a gradient check needs scale.y kept" : "needs f64, scale.y is f32");
        cg_exec_free(c.exec);
        cg_plan_free(c.plan);
        cg_graph_free(c.graph);
    }
}
END_TEST

SUITE("graph_gradcheck", wrong_gradients_fail, every_case_counts, kinks_are_counted_apart,
      kinks_excuse_nothing_else, nothing_compared_is_no_pass, failures_of_the_run_are_errors,
      choices_are_held_fixed, constants_are_held_fixed, some_entries, no_gradient_is_no_pass,
      what_cannot_be_checked_is_refused)
