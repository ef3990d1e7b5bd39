/* Contracts worked by hand: one row of two heads (four for ranks) and three keys whose exponentials are
 * small whole numbers, so that target, prediction, loss and gradients are fractions that can be read off.
 * Every value of every axis and every fault has its numbers here. */
#include "tests/support.h"

#include "models/check/contract.h"

/* What has been tried, so that no value and no fault is left out. */
static bool tried[CG_AXES][8], tried_fault[CG_FAULTS];

static cg_contract contract(const char *text) {
    cg_contract c;
    cg_error error = {0};
    if (!cg_contract_parse(text, &c, &error)) ck_abort_msg("%s: %s", text, error.text);
    for (int a = 0; a < CG_AXES; a++) tried[a][c.value[a]] = true;
    for (int f = 0; f < CG_FAULTS; f++) tried_fault[f] |= c.faults >> f & 1;
    return c;
}

/*                      keys a  b  c    window  sink
 *   head 0    exp =         1  2  3       4      1
 *   head 1                  3  1  2       1      3
 *   head 2 (ranks)          1  1  .       1      1
 *   head 3 (ranks)          5  1  .       1      1
 *   scores    exp =         1  2  1    with ReLU;    4  2  1 without;   a and b are selected */
static const double heads_exp[4][3] = {{1, 2, 3}, {3, 1, 2}, {1, 1, 1}, {5, 1, 1}}, window_exp[] = {4, 1, 1, 1},
                    sink_exp[] = {1, 3, 1, 1}, scores_exp[] = {1, 2, 1}, linear_exp[] = {4, 2, 1};
static const unsigned char selected[] = {1, 1, 0};

typedef struct numbers {
    double logits[4 * 3], window[4], sink[4], scores[3], linear[3];
    cg_contract_row row;
} numbers;

/* Windows whose exponential is `window` instead, when that is not 0, and no sink then. */
static void numbers_of(numbers *n, int n_heads, double window) {
    for (int h = 0; h < n_heads; h++) {
        for (int j = 0; j < 3; j++) n->logits[h * 3 + j] = log(heads_exp[h][j]);
        n->window[h] = log(window > 0 ? window : window_exp[h]);
        n->sink[h] = log(sink_exp[h]);
    }
    for (int j = 0; j < 3; j++) n->scores[j] = log(scores_exp[j]), n->linear[j] = log(linear_exp[j]);
    n->row = (cg_contract_row){.n_heads = n_heads,
                               .n_keys = 3,
                               .logits = n->logits,
                               .window_lse = n->window,
                               .sink = window > 0 ? NULL : n->sink,
                               .scores = n->scores,
                               .linear_scores = n->linear,
                               .selected = selected};
}

/* Target and prediction as fractions; kl and ds = weight (p sum of t - t), or (p - t), from their
 * definition. */
static void expect_row(const char *text, const cg_contract_row *row, const double *target,
                       const double *predict, double weight, bool minus_target) {
    const cg_contract c = contract(text);
    double t[3], log_p[3], ds[3], kl, scratch[4], want_kl = 0, want_log_p[3], want_ds[3], mass = 0;
    for (int j = 0; j < 3; j++) {
        want_log_p[j] = predict[j] > 0 ? log(predict[j]) : 0;
        if (target[j] > 0) want_kl += weight * target[j] * log(target[j] / predict[j]);
        mass += target[j];
    }
    for (int j = 0; j < 3; j++) want_ds[j] = weight * (predict[j] * (minus_target ? 1 : mass) - target[j]);
    cg_contract_row_eval(&c, row, t, log_p, ds, &kl, scratch);
    char what[160];
    snprintf(what, sizeof what, "\"%s\"", text);
    expect_close(what, t, target, 3, 1e-11);
    expect_close(what, log_p, want_log_p, 3, 1e-13);
    expect_close(what, ds, want_ds, 3, 1e-11);
    expect_close(what, &kl, &want_kl, 1, 1e-10);
    cg_contract_row_eval(&c, row, t, NULL, NULL, &kl, scratch); /* the way that keeps no predictions */
    expect_close(what, &kl, &want_kl, 1, 1e-10);
}

#define THREE(a, b, c, all)                                                                                    \
    { (double)(a) / (all), (double)(b) / (all), (double)(c) / (all) }

/* Masses of a key: sum over heads of exp / Z; Z holds the support and what the teacher lets stand beside
 * it. */
START_TEST(targets) {
    static const struct {
        const char *text;
        double target[3], predict[3], weight;
        bool minus_target;
    } list[] = {
        /* Z = 1+2+4+1, 3+1+1+3: a 1/8 + 3/8, b 2/8 + 1/8 */
        {"", THREE(4, 3, 0, 7), THREE(1, 2, 0, 3), 1, false},
        /* Z = 1+2+1, 3+1+3: a 1/4 + 3/7 = 19/28, b 2/4 + 1/7 = 18/28 */
        {"teacher=sink", THREE(19, 18, 0, 37), THREE(1, 2, 0, 3), 1, false},
        /* Z = 3, 4: a 1/3 + 3/4 = 13/12, b 2/3 + 1/4 = 11/12 */
        {"teacher=compressed", THREE(13, 11, 0, 24), THREE(1, 2, 0, 3), 1, false},
        /* Z = 1+2+4, 3+1+1: a 1/7 + 3/5 = 26/35, b 2/7 + 1/5 = 17/35 */
        {"teacher=window", THREE(26, 17, 0, 43), THREE(1, 2, 0, 3), 1, false},
        /* Z = 6+4+1, 6+1+3: a 1/11 + 3/10 = 43/110, b 2/11 + 1/10 = 31/110, c 3/11 + 2/10 = 52/110 */
        {"support=dense", THREE(43, 31, 52, 126), THREE(1, 2, 1, 4), 1, false},
        /* Z = 6+1, 6+3: a 1/7 + 3/9 = 30/63, b 2/7 + 1/9 = 25/63, c 3/7 + 2/9 = 41/63 */
        {"support=dense,teacher=sink", THREE(30, 25, 41, 96), THREE(1, 2, 1, 4), 1, false},
        /* Z = 6, 6 */
        {"support=dense,teacher=compressed", THREE(4, 3, 5, 12), THREE(1, 2, 1, 4), 1, false},
        /* Z = 6+4, 6+1: a 1/10 + 3/7 = 37/70, b 2/10 + 1/7 = 24/70, c 3/10 + 2/7 = 41/70 */
        {"support=dense,teacher=window", THREE(37, 24, 41, 102), THREE(1, 2, 1, 4), 1, false},
        /* the sparse Z = 8, 8 under all three */
        {"support=dense,fault=dense-over-sparse-lse", THREE(4, 3, 5, 12), THREE(1, 2, 1, 4), 1, false},
        /* ... and without anything beside: Z = 3, 4: a 13/12, b 11/12, c 3/3 + 2/4 = 18/12 */
        {"support=dense,teacher=compressed,fault=dense-over-sparse-lse", THREE(13, 11, 18, 42),
         THREE(1, 2, 1, 4), 1, false},
        {"scores=linear", THREE(4, 3, 0, 7), THREE(2, 1, 0, 3), 1, false},
        {"support=dense,scores=linear", THREE(43, 31, 52, 126), THREE(4, 2, 1, 7), 1, false},
        /* weights: mean over heads of the support's share of Z */
        {"row-weight=compressed-mass", THREE(4, 3, 0, 7), THREE(1, 2, 0, 3), (3.0 / 8 + 4.0 / 8) / 2, false},
        {"row-weight=compressed-mass,teacher=sink", THREE(19, 18, 0, 37), THREE(1, 2, 0, 3),
         (3.0 / 4 + 4.0 / 7) / 2, false},
        {"row-weight=compressed-mass,support=dense", THREE(43, 31, 52, 126), THREE(1, 2, 1, 4),
         (6.0 / 11 + 6.0 / 10) / 2, false},
        {"row-weight=compressed-mass,teacher=compressed", THREE(13, 11, 0, 24), THREE(1, 2, 0, 3), 1, false},
        /* these change nothing here: the masses are far above the floors, and the target sums to 1 */
        {"normalise=floor-1e-10", THREE(4, 3, 0, 7), THREE(1, 2, 0, 3), 1, false},
        {"normalise=floor-tiny", THREE(4, 3, 0, 7), THREE(1, 2, 0, 3), 1, false},
        {"fault=predict-minus-target", THREE(4, 3, 0, 7), THREE(1, 2, 0, 3), 1, false},
    };
    numbers n;
    numbers_of(&n, 2, 0);
    for (size_t i = 0; i < sizeof list / sizeof *list; i++)
        expect_row(list[i].text, &n.row, list[i].target, list[i].predict, list[i].weight, list[i].minus_target);
}
END_TEST

/* Logits whose exponentials are beyond all numbers: the same shares, since every one is e^800 times as large. */
START_TEST(large_logits) {
    numbers n;
    numbers_of(&n, 2, 0);
    for (int h = 0; h < 2; h++) {
        for (int j = 0; j < 3; j++) n.logits[h * 3 + j] += 800;
        n.window[h] += 800, n.sink[h] += 800;
    }
    expect_row("", &n.row, (const double[])THREE(4, 3, 0, 7), (const double[])THREE(1, 2, 0, 3), 1, false);
    expect_row("teacher=sink", &n.row, (const double[])THREE(19, 18, 0, 37), (const double[])THREE(1, 2, 0, 3),
               1, false);
}
END_TEST

/* Three heads: two in the first half. Z = 8, 8, 1+1+1+1: a 1/8 + 3/8, b 2/8 + 1/8; of the third alone 1/4 each. */
START_TEST(halves_of_an_odd_number) {
    numbers n;
    numbers_of(&n, 3, 0);
    expect_row("heads=first-half", &n.row, (const double[])THREE(4, 3, 0, 7), (const double[])THREE(1, 2, 0, 3),
               1, false);
    expect_row("heads=second-half", &n.row, (const double[])THREE(1, 1, 0, 2),
               (const double[])THREE(1, 2, 0, 3), 1, false);
}
END_TEST

/* Four heads: Z = 8, 8, 1+1+1+1, 5+1+1+1; masses of a 1/8 3/8 2/8 5/8, of b 2/8 1/8 2/8 1/8. */
START_TEST(ranks) {
    static const struct {
        const char *text;
        double target[3];
    } list[] = {
        {"heads=all", THREE(11, 6, 0, 17)},
        {"heads=first-half", THREE(4, 3, 0, 7)},
        {"heads=second-half", THREE(7, 3, 0, 10)},
        /* mean of 4/7 and 7/10 */
        {"heads=local-normalised-2", THREE(89, 51, 0, 140)},
        /* mean of 1/3, 3/4, 1/2, 5/6 */
        {"heads=local-normalised-4", THREE(29, 19, 0, 48)},
    };
    numbers n;
    numbers_of(&n, 4, 0);
    for (size_t i = 0; i < sizeof list / sizeof *list; i++)
        expect_row(list[i].text, &n.row, list[i].target, (double[])THREE(1, 2, 0, 3), 1, false);
}
END_TEST

/* Windows so heavy that Z is theirs to 12 digits and more: masses 4/W and 3/W. */
START_TEST(small_masses) {
    numbers n;
    const double thirds[] = THREE(1, 2, 0, 3);
    numbers_of(&n, 2, 1e12); /* 7e-12 in all: divided by 1e-10 instead */
    expect_row("", &n.row, (double[])THREE(4, 3, 0, 7), thirds, 1, false);
    expect_row("normalise=floor-1e-10", &n.row, (double[])THREE(4, 3, 0, 100), thirds, 1, false);
    expect_row("normalise=floor-1e-10,fault=predict-minus-target", &n.row, (double[])THREE(4, 3, 0, 100),
               thirds, 1, true);
    expect_row("normalise=floor-tiny", &n.row, (double[])THREE(4, 3, 0, 7), thirds, 1, false);
    numbers_of(&n, 2, 0x1p130); /* 7/2^130 in all: divided by FLT_MIN = 16/2^130 instead */
    expect_row("", &n.row, (double[])THREE(4, 3, 0, 7), thirds, 1, false);
    expect_row("normalise=floor-tiny", &n.row, (double[])THREE(4, 3, 0, 16), thirds, 1, false);
    numbers_of(&n, 2, 1e50); /* each mass is 0 in f32 */
    expect_row("", &n.row, (double[])THREE(4, 3, 0, 7), thirds, 1, false);
    expect_row("normalise=floor-tiny,fault=teacher-f32-underflow", &n.row, (double[]){0, 0, 0}, thirds, 1,
               false);
    const cg_contract c = contract("fault=teacher-f32-underflow");
    double target[3], scratch[4], kl;
    cg_contract_row_eval(&c, &n.row, target, NULL, NULL, &kl, scratch);
    ck_assert(isnan(target[0]) && isnan(target[1]) && target[2] == 0 && isnan(kl));
}
END_TEST

/* Two keys, a target that is given, and a prediction p, 1 - p. */
static void expect_kl(const char *text, const double *target, double p, double kl, double ds0, double ds1) {
    const cg_contract c = contract(text);
    const double scores[] = {log(p), log1p(-p)};
    const cg_contract_row row = {.n_keys = 2, .scores = scores, .given_target = target};
    double t[2], log_p[2], ds[2], got, scratch[1];
    cg_contract_row_eval(&c, &row, t, log_p, ds, &got, scratch);
    char what[64];
    snprintf(what, sizeof what, "%s, p = %g", text, p);
    expect_close(what, &got, &kl, 1, 1e-12);
    expect_close(what, ds, (double[]){ds0, ds1}, 2, 1e-12);
}

START_TEST(logarithms) {
    const double half[] = {0.5, 0.5}, third = 1.0 / 3, two = log(2);
    /* p = 3e-10: with 1e-10 beside it, 4e-10 */
    const double small = 3e-10, exact = 0.5 * log(0.5 / small) + 0.5 * log(0.5 / (1 - small));
    const double eps = 0.5 * log(0.5000000001 / 4e-10) + 0.5 * log(0.5000000001 / (1 - 2e-10));
    /* of d kl / d log p what p / (p + 1e-10) leaves: 3/4 of the first, (1 - 3e-10) / (1 - 2e-10) of the
     * second */
    const double first = 0.375, second = 0.5 * (1 - 3e-10) / (1 - 2e-10), mass = first + second;
    expect_kl("", half, small, exact, small - 0.5, 0.5 - small);
    expect_kl("kl=target-floor", half, small, exact, small - 0.5, 0.5 - small);
    expect_kl("kl=clamp-tiny", half, small, exact, small - 0.5, 0.5 - small);
    expect_kl("kl=eps", half, small, eps, small * mass - first, (1 - small) * mass - second);
    expect_kl("kl=eps-value-exact-grad", half, small, eps, small - 0.5, 0.5 - small);
    /* p = 2^-140, below FLT_MIN = 2^-126: no gradient from the first key */
    expect_kl("", half, 0x1p-140, 69 * two, -0.5, 0.5); /* (139 - 1) / 2 */
    expect_kl("kl=clamp-tiny", half, 0x1p-140, 62 * two, 0x1p-141, 0);
    /* targets below 1e-10: they do not sum to 1, so that neither do the gradients' parts */
    const double tiny[] = {1e-12, 3e-12}, floor_10 = log(1e-10);
    expect_kl("", tiny, third, 1e-12 * log(3e-12) + 3e-12 * log(4.5e-12), third * 1e-12, -third * 1e-12);
    expect_kl("kl=target-floor", tiny, third, 1e-12 * (floor_10 + log(3)) + 3e-12 * (floor_10 + log(1.5)),
              third * 1e-12, -third * 1e-12);
    expect_kl("fault=predict-minus-target", tiny, third, 1e-12 * log(3e-12) + 3e-12 * log(4.5e-12),
              third - 1e-12, 2 * third - 3e-12);
    /* ... and below FLT_MIN */
    const double least[] = {0x1p-130, 0x1p-129};
    expect_kl("kl=clamp-tiny", least, third,
              0x1p-130 * (log(3) - 126 * two) + 0x1p-129 * (log(1.5) - 126 * two), 0, 0);
    /* a target of 0 adds nothing, whatever the prediction */
    const double one[] = {0, 1};
    for (int v = 0; v < 2; v++) expect_kl(v ? "kl=clamp-tiny" : "", one, 0.25, log(4.0 / 3), 0.25, -0.25);
}
END_TEST

/* 10 rows, 8 real, 5 of them see a key, two segments, of which one has 3 real rows; the coefficient is 1/2. */
START_TEST(factors) {
    static const struct {
        const char *text;
        double value, grad;
    } list[] = {{"", 1.0 / 16, 1.0 / 16},
                {"reduction=mean-physical", 1.0 / 20, 1.0 / 20},
                {"reduction=sum", 0.5, 0.5},
                {"reduction=mean-visible", 0.1, 0.1},
                {"reduction=mean-twice", 1.0 / 160, 1.0 / 160},
                {"reduction=mean-of-means", 1.0 / 12, 1.0 / 12},
                {"fault=padding-in-loss", 1.0 / 16, 1.0 / 16}, /* rows are added, none weighs more */
                {"fault=loss-twice", 1.0 / 8, 1.0 / 16},
                {"fault=coeff-missing", 1.0 / 8, 1.0 / 8},
                {"fault=coeff-twice", 1.0 / 32, 1.0 / 32},
                {"fault=gradient-sign", 1.0 / 16, -1.0 / 16},
                {"fault=gradient-zero", 1.0 / 16, 0},
                {"reduction=sum,fault=coeff-twice,fault=loss-twice", 0.5, 0.25}};
    const cg_contract_counts counts = {.physical = 10, .real = 8, .visible = 5, .segments = 2};
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        const cg_contract c = contract(list[i].text);
        const double value = cg_contract_value_factor(&c, &counts, 0.5, 3),
                     grad = cg_contract_grad_factor(&c, &counts, 0.5, 3);
        expect_close(list[i].text, &value, &list[i].value, 1, 1e-15);
        expect_close(list[i].text, &grad, &list[i].grad, 1, 1e-15);
    }
    const cg_contract_counts none = {0}; /* a divisor is at least 1 */
    for (int v = 0; v < cg_axis_count(CG_AXIS_REDUCTION); v++) {
        cg_contract c = cg_contract_default();
        c.value[CG_AXIS_REDUCTION] = v;
        ck_assert_double_eq(cg_contract_value_factor(&c, &none, 0.5, 0), 0.5);
    }
}
END_TEST

/*   q = (1, 2), (-1, 1)     w = 2, 3     k = (1, 0), (0, 1), (2, -1)     ds = 1, -2, 4
 *   dots = 1 2 0, -1 1 -3: head 0 lives at keys 0 and 1 (0 is dead), head 1 at key 1 */
START_TEST(through_the_scores) {
    static const struct {
        const char *text;
        double dw[2], dq[4], dk[6];
    } list[] = {
        /* dw = 1 - 4, -2; dq = 2 (1, -2), 3 (0, -2); dk: key 0 is 2 q0, key 1 is -2 (2 q0 + 3 q1) */
        {"", {-3, -2}, {2, -4, 0, -6}, {2, 4, 2, -14, 0, 0}},
        /* dq = w (1, 0) - 2 (0, 1) + 4 (2, -1) = w (9, -6); dk: ds (2 q0 + 3 q1) = ds (-1, 7) */
        {"fault=relu-leak", {-3, -2}, {18, -12, 27, -18}, {-1, 7, 2, -14, -4, 28}},
        /* dw = 1 - 4 + 0, -1 - 2 - 12 */
        {"scores=linear", {-3, -15}, {18, -12, 27, -18}, {-1, 7, 2, -14, -4, 28}},
    };
    static const double q[] = {1, 2, -1, 1}, w[] = {2, 3}, k[] = {1, 0, 0, 1, 2, -1},
                        dots[] = {1, 2, 0, -1, 1, -3}, ds[] = {1, -2, 4};
    const cg_contract_index index = {
        .n_heads = 2, .head_dim = 2, .n_keys = 3, .q = q, .w = w, .dots = dots, .k = k};
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        const cg_contract c = contract(list[i].text);
        double dw[2], dq[4], dk[6] = {0};
        cg_contract_index_grad(&c, &index, ds, dw, dq, dk);
        expect_close(list[i].text, dw, list[i].dw, 2, 0);
        expect_close(list[i].text, dq, list[i].dq, 4, 0);
        expect_close(list[i].text, dk, list[i].dk, 6, 0);
    }
    /* keys that stand elsewhere: rows 2, 0 and 1 of k */
    static const double moved[] = {0, 1, 2, -1, 1, 0};
    static const int32_t keys[] = {2, 0, 1};
    const cg_contract_index elsewhere = {
        .n_heads = 2, .head_dim = 2, .n_keys = 3, .q = q, .w = w, .dots = dots, .k = moved, .keys = keys};
    const cg_contract c = contract("");
    double dq[4], dk[6] = {0};
    cg_contract_index_grad(&c, &elsewhere, ds, NULL, dq, dk);
    expect_close("keys", dq, list[0].dq, 4, 0);
    expect_close("keys", dk, (const double[]){2, -14, 0, 0, 2, 4}, 6, 0);
}
END_TEST

START_TEST(nothing_is_left_out) {
    targets_fn(0), ranks_fn(0), small_masses_fn(0), logarithms_fn(0), factors_fn(0), through_the_scores_fn(0);
    for (int a = 0; a < CG_AXES; a++)
        for (int v = 0; v < cg_axis_count((cg_axis)a); v++)
            if (!tried[a][v])
                ck_abort_msg("no numbers for %s=%s", cg_axis_names[a], cg_axis_values((cg_axis)a)[v]);
    for (int f = 0; f < CG_FAULTS; f++)
        if (!tried_fault[f]) ck_abort_msg("no numbers for fault=%s", cg_fault_name(f));
}
END_TEST

SUITE("contract_by_hand", targets, large_logits, halves_of_an_odd_number, ranks, small_masses, logarithms,
      factors, through_the_scores, nothing_is_left_out)
