/* Dumps made under every named contract, and what the verdict says of each: it must name what was changed, and say
 * "cannot tell" where, and only where, two contracts are the same numbers on that dump. Prints the table.
 *
 * Three rules hold for every dump, whatever contract it was made under:
 *   1. the contract that the verdict names gives the numbers of the dump;
 *   2. it is the one that the dump was made under, axes apart that the verdict calls undetermined; or else the verdict
 *      says that another combination of axes gives the same numbers;
 *   3. an axis is called undetermined if changing it alone gives equal numbers, and only then. */
#include "tests/support.h"

#include <unistd.h>

#include "core/base/rng.h"
#include "models/check/dump_write.h"
#include "models/check/verdict.h"

static char folder[] = "/tmp/csagrad_confusion_XXXXXX";

/* The sanitizers are ten times as slow, and look for other things than wrong answers: a share of the dumps will do. */
#ifdef __SANITIZE_ADDRESS__
enum { ONE_IN = 10 };
#else
enum { ONE_IN = 1 };
#endif

/* ---- the dumps ---- */

typedef struct sample {
    const char *name;
    cg_dump_case c;
    cg_dump_form form;
    double equal,
        different; /* row by row, relative: below the first numbers are the same, above the second not */
} sample;

/* Every axis must show: heads that differ, few of many keys selected, rows that keep 1e-13 and 1e-43 of their mass for
 * the compressed keys, students that are far off, padding that would see keys, segments of different lengths. */
static void enrich(cg_dump_case *c) {
    int64_t H = c->n_heads, D = c->head_dim, G = c->index_heads;
    for (int64_t t = 0; t < c->n_rows; t++) {
        double boost = t % 13 == 6 ? 30 : t % 29 == 11 ? 100 : 0;
        for (int64_t h = 0; h < H; h++) c->query[(t * H + h) * D] = 1;
        c->kv[t * D] = boost > 0 ? boost / c->softmax_scale : 0.3 * c->kv[t * D];
    }
    for (int64_t i = 0; i < c->n_rows * G; i++) c->weights[i] *= i / G % 5 == 3 ? 120 : 3;
}

/* Half of the keys have targets where max(t, 1e-10) in a logarithm shows most: by 4e-11, so in f64 alone. */
static void lower_targets(cg_dump_case *c) {
    for (int64_t i = 0; i < c->n_rows * c->n_heads; i++) c->query[i * c->head_dim] = 1;
    for (int64_t j = 0; j < c->n_compressed; j++) c->ckv[j * c->head_dim] = j % 2 ? 0 : -24 / c->softmax_scale;
}

typedef struct shape {
    const char *name;
    cg_dtype dtype;
    cg_dump_layout layout;
    int64_t heads, topk;
    double coeff;
    enum { PLAIN, RICH, FLOORED } kind;
    int n;
    int64_t physical[4], real[4];
} shape;

static const shape shapes[] = {
    {"rich, f64", CG_F64, CG_LAYOUT_THD, 8, 3, 0.7, RICH, 4, {30, 3, 26, 13}, {25, 3, 26, 10}},
    {"rich, f32", CG_F32, CG_LAYOUT_THD, 8, 3, 0.7, RICH, 4, {30, 3, 26, 13}, {25, 3, 26, 10}},
    {"rich, bf16", CG_BF16, CG_LAYOUT_THD, 8, 3, 0.7, RICH, 4, {30, 3, 26, 13}, {25, 3, 26, 10}},
    {"four heads, sbhd", CG_F32, CG_LAYOUT_SBHD, 4, 3, 0.7, PLAIN, 2, {40, 40}, {40, 40}},
    {"targets of 4e-11, f64", CG_F64, CG_LAYOUT_THD, 4, 5, 0.7, FLOORED, 2, {40, 31}, {40, 29}},
    {"one head", CG_F32, CG_LAYOUT_THD, 1, 3, 0.7, PLAIN, 2, {24, 17}, {24, 15}},
    {"everything selected", CG_F32, CG_LAYOUT_THD, 4, 64, 0.7, PLAIN, 2, {24, 17}, {24, 15}},
    {"one segment, coefficient 1", CG_F32, CG_LAYOUT_BSHD, 2, 4, 1, PLAIN, 1, {36}, {36}},
    {"nothing visible", CG_F32, CG_LAYOUT_THD, 2, 4, 1, PLAIN, 2, {3, 2}, {3, 1}},
};
enum { N_SHAPES = sizeof shapes / sizeof *shapes };

static sample make_sample(const shape *s) {
    sample out = {.name = s->name,
                  .form = {.layout = s->layout, .dtype = s->dtype, .anonymous = true},
                  .equal = s->dtype == CG_F64   ? 1e-11
                           : s->dtype == CG_F32 ? 1e-7
                                                : 1e-3,
                  .different = s->dtype == CG_F64   ? 1e-6
                               : s->dtype == CG_F32 ? 1e-4
                                                    : 0.05};
    out.c = (cg_dump_case){.n_heads = s->heads,
                           .head_dim = 8,
                           .index_heads = 3,
                           .index_dim = 4,
                           .ratio = 4,
                           .window = 4,
                           .topk = s->topk,
                           .softmax_scale = 0.4,
                           .loss_coeff = s->coeff};
    cg_dump_lengths lengths = {s->n, s->physical, s->real, 0};
    cg_error error = {0};
    if (!cg_dump_case_random(&out.c, &lengths, 3, &error)) ck_abort_msg("%s", error.text);
    if (s->kind == RICH) enrich(&out.c);
    if (s->kind == FLOORED) {
        lower_targets(&out.c);
        out.equal = 1e-13;
        out.different = 2e-12;
    }
    cg_dump_case_round(&out.c, s->dtype);
    return out;
}

/* ---- are two contracts the same numbers? ---- */

static cg_dump_results results_of(const sample *s, const cg_contract *value, const cg_contract *gradient) {
    cg_dump_contracts contracts = {*value, *gradient, true};
    cg_dump_results r;
    cg_error error = {0};
    if (!cg_dump_compute(&s->c, &contracts, NULL, &r, &error)) ck_abort_msg("%s", error.text);
    return r;
}

/* Largest difference of any row, relative to the row's largest number. */
static double distance_of_rows(const double *a, const double *b, int64_t n_rows, int64_t width) {
    double worst = 0;
    for (int64_t t = 0; t < n_rows; t++) {
        double largest = 0, apart = 0;
        for (int64_t i = t * width; i < (t + 1) * width; i++) {
            largest = fmax(largest, fmax(fabs(a[i]), fabs(b[i])));
            apart = fmax(apart, fabs(a[i] - b[i]));
            if (isnan(a[i]) != isnan(b[i])) apart = largest = 1;
        }
        if (apart > 1e-30) worst = fmax(worst, apart / largest);
    }
    return worst;
}

/* What the dump would show: 0 for the same numbers. */
static double distance(const sample *s, const cg_dump_results *a, const cg_dump_results *b) {
    const cg_dump_case *c = &s->c;
    int64_t T = c->n_rows, G = c->index_heads, E = c->index_dim;
    if (memcmp(a->topk, b->topk, (size_t)(T * a->width) * sizeof *a->topk)) return 1;
    double d = distance_of_rows(a->target, b->target, T, a->n_keys);
    d = fmax(d, distance_of_rows(a->log_predict, b->log_predict, T, a->n_keys));
    d = fmax(d, distance_of_rows(&a->loss, &b->loss, 1, 1));
    d = fmax(d, distance_of_rows(a->grad_weights, b->grad_weights, 1, T * G));
    d = fmax(d, distance_of_rows(a->grad_q_indexer, b->grad_q_indexer, 1, T * G * E));
    return fmax(d, distance_of_rows(a->grad_k_indexer, b->grad_k_indexer, 1, c->n_compressed * E));
}

static double distance_of_contracts(const sample *s, const cg_dump_results *truth, const cg_contract *other) {
    cg_dump_results r = results_of(s, other, other);
    double d = distance(s, truth, &r);
    cg_dump_results_free(&r);
    return d;
}

/* ---- one dump ---- */

static int n_wrong, n_judged;

static void wrong(const sample *s, const cg_contract *truth, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static void wrong(const sample *s, const cg_contract *truth, const char *format, ...) {
    char text[CG_CONTRACT_TEXT];
    va_list args;
    va_start(args, format);
    printf("WRONG %s: made under %s: ", s->name, cg_contract_text(truth, text, sizeof text));
    vprintf(format, args);
    putchar('\n');
    va_end(args);
    n_wrong++;
}

/* Only what is not the default: "kl=eps fault=relu-leak". */
static const char *changes(const cg_contract *contract, char text[256]) {
    size_t n = 0;
    text[0] = 0;
    for (int a = 0; a < CG_AXES; a++)
        if (contract->value[a])
            n += (size_t)snprintf(text + n, 256 - n, "%s%s=%s", n ? " " : "", cg_axis_names[a],
                                  cg_axis_values((cg_axis)a)[contract->value[a]]);
    for (int f = 0; f < CG_FAULTS; f++)
        if (contract->faults & 1u << f)
            n += (size_t)snprintf(text + n, 256 - n, "%sfault=%s", n ? " " : "", cg_fault_name(f));
    if (!n) snprintf(text, 256, "default");
    return text;
}

static cg_verdict *judge(const sample *s, const cg_dump_results *r, const cg_dump_contracts *contracts) {
    char path[256];
    snprintf(path, sizeof path, "%s/dump.safetensors", folder);
    cg_error error = {0};
    if (!cg_dump_write(path, &s->c, contracts, r, &s->form, &error)) ck_abort_msg("%s", error.text);
    const char *paths[] = {path};
    cg_dump_options options = {.paths = paths, .n_paths = 1};
    cg_dump *dump = cg_dump_open(&options, &error);
    if (!dump) ck_abort_msg("%s: %s", s->name, error.text);
    cg_verdict_options how = {0};
    cg_verdict *verdict = cg_verdict_make(dump, &how, &error);
    if (!verdict) ck_abort_msg("%s: %s", s->name, error.text);
    cg_dump_close(dump);
    return verdict;
}

/* Heads that do not divide among the ranks have no such contract; compressed keys alone in the denominator have all of its
 * mass, so that rows weighted by it are rows alike. */
static bool exists(const sample *s, const cg_contract *c) {
    static const int64_t ranks[] = {1, 2, 2, 2, 4};
    return s->c.n_heads % ranks[c->value[CG_AXIS_HEADS]] == 0 &&
           !(c->value[CG_AXIS_TEACHER] == CG_TEACHER_IS_COMPRESSED &&
             c->value[CG_AXIS_ROW_WEIGHT] == CG_ROWS_ARE_COMPRESSED_MASS);
}

/* Distance of the nearest contract that differs from `named` on one axis alone. */
static double alone(const sample *s, const cg_dump_results *r, const cg_contract *named, int axis) {
    double least = INFINITY;
    for (int v = 0; v < cg_axis_count((cg_axis)axis); v++) {
        cg_contract other = *named;
        other.value[axis] = v;
        if (v != named->value[axis] && exists(s, &other))
            least = fmin(least, distance_of_contracts(s, r, &other));
    }
    return least;
}

/* Is a name in the list of faults? */
static bool has_fault(const cg_verdict *v, const char *name) {
    for (int i = 0; i < v->n_faults; i++)
        if (strstr(v->faults[i], name)) return true;
    return false;
}

/* Does a note say that other contracts, changed on several axes at once, give the same numbers? */
static bool has_combination(const cg_verdict *v) {
    for (int i = 0; i < v->n_notes; i++)
        if (strstr(v->notes[i], "another combination")) return true;
    return false;
}

/* Rules 2 and 3. */
static void check_axes(const sample *s, const cg_contract *truth, const cg_dump_results *r,
                       const cg_verdict *v) {
    for (int a = 0; a < CG_AXES; a++) {
        const char *name = cg_axis_names[a];
        double d = alone(s, r, &v->contract, a);
        if (!v->undetermined[a] && v->contract.value[a] != truth->value[a] && !has_combination(v))
            wrong(s, truth, "%s is said to be %s", name, cg_axis_values((cg_axis)a)[v->contract.value[a]]);
        if (v->undetermined[a] && d > s->different)
            wrong(s, truth, "%s is called undetermined, but no other value gives these numbers", name);
        if (v->undetermined[a] && !v->tell_apart[a][0]) wrong(s, truth, "nothing says how to tell %s", name);
        if (!v->undetermined[a] && d < s->equal)
            wrong(s, truth, "%s is called determined, but another value gives these numbers", name);
    }
}

static void check_faults(const sample *s, const cg_contract *truth, const cg_dump_results *r,
                         const cg_verdict *v) {
    for (int f = 0; f < CG_FAULTS; f++) {
        bool made = truth->faults >> f & 1, named = v->contract.faults >> f & 1;
        if (named != has_fault(v, cg_fault_name(f)))
            wrong(s, truth, "fault %s is in the contract or in the list, not in both", cg_fault_name(f));
        cg_contract without = *truth;
        without.faults ^= 1u << f;
        if (made != named && distance_of_contracts(s, r, &without) > s->different)
            wrong(s, truth, "fault %s is %s", cg_fault_name(f), made ? "not named" : "named");
    }
}

/* Does the verdict call a dump of default numbers a match, and no other? */
static void check_match(const sample *s, const cg_contract *truth, const cg_dump_results *r,
                        const cg_verdict *v) {
    cg_contract standard = cg_contract_default();
    double d = distance_of_contracts(s, r, &standard);
    if (v->match ? d > s->different : d < s->equal)
        wrong(s, truth, "called %s, %.3g from the default", v->match ? "a match" : "no match", d);
}

static void check_one(const sample *s, const cg_contract *truth, bool print) {
    if (!exists(s, truth)) return;
    cg_dump_contracts contracts = {*truth, *truth, true};
    cg_dump_results r = results_of(s, truth, truth);
    cg_verdict *v = judge(s, &r, &contracts);
    char said[256], asked[256], unknown[256] = "";
    if (!v->identified) {
        wrong(s, truth, "nothing identified: %s", v->sentence);
    } else {
        double d = distance_of_contracts(s, &r, &v->contract); /* rule 1 */
        if (d > s->different) wrong(s, truth, "%s is named, %.3g away", changes(&v->contract, said), d);
        if (v->gradient_differs)
            wrong(s, truth, "the gradients are said to follow %s", changes(&v->gradient, said));
        check_axes(s, truth, &r, v);
        check_faults(s, truth, &r, v);
        check_match(s, truth, &r, v);
        for (int a = 0; a < CG_AXES; a++)
            if (v->undetermined[a])
                snprintf(unknown + strlen(unknown), sizeof unknown - strlen(unknown), " %s", cg_axis_names[a]);
    }
    if (print)
        printf("  %-52s %-52s %s%s%s\n", changes(truth, asked),
               v->identified ? changes(&v->contract, said) : "?", *unknown ? "cannot tell:" : "", unknown,
               has_combination(v) ? "; another combination does as well" : "");
    free(v);
    cg_dump_results_free(&r);
    n_judged++;
}

/* Every value of every axis, every fault alone, and faults where they act. */
static int list_contracts(cg_contract list[64]) {
    static const char *const acting[] = {"support=dense,fault=dense-over-sparse-lse",
                                         "normalise=floor-1e-10,fault=predict-minus-target",
                                         "normalise=floor-tiny,fault=teacher-f32-underflow"};
    int n = 0;
    cg_error error = {0};
    list[n++] = cg_contract_default();
    for (int a = 0; a < CG_AXES; a++)
        for (int v = 1; v < cg_axis_count((cg_axis)a); v++) {
            list[n] = cg_contract_default();
            list[n++].value[a] = v;
        }
    for (int f = 0; f < CG_FAULTS; f++) {
        list[n] = cg_contract_default();
        list[n++].faults = 1u << f;
    }
    for (int i = 0; i < 3; i++)
        if (!cg_contract_parse(acting[i], &list[n++], &error)) ck_abort_msg("%s", error.text);
    return n;
}

START_TEST(each_change_is_named) {
    cg_contract list[64];
    int n = list_contracts(list);
    n_wrong = 0;
    printf("  %-52s %-52s %s\n", "made under", "named", "");
    for (int i = 0; i < N_SHAPES; i++) {
        sample s = make_sample(&shapes[i]);
        printf("%s\n", s.name);
        for (int k = i % ONE_IN; k < n; k += ONE_IN) check_one(&s, &list[k], true);
        cg_dump_case_free(&s.c);
    }
    ck_assert_int_eq(n_wrong, 0);
}
END_TEST

/* Two axes at once, then anything at all. */
START_TEST(changes_together_are_named) {
    n_wrong = n_judged = 0;
    for (int i = 0; i < 3; i++) {
        sample s = make_sample(&shapes[i]);
        for (int a = 0; a < CG_AXES; a++)
            for (int b = a + 1; b < CG_AXES; b++)
                for (int v = 1; v < cg_axis_count((cg_axis)a); v++)
                    for (int u = 1; u < cg_axis_count((cg_axis)b); u++) {
                        /* all pairs in f32, some in the others */
                        int share = ONE_IN * (i == 1 ? 1 : 10);
                        if (cg_random_below(1, (uint64_t)(i * 100 + a * 10 + b), (uint64_t)(v * 8 + u), share))
                            continue;
                        cg_contract truth = cg_contract_default();
                        truth.value[a] = v;
                        truth.value[b] = u;
                        check_one(&s, &truth, false);
                    }
        for (uint64_t k = 0; k < 30; k += ONE_IN) {
            cg_contract truth = cg_contract_default();
            for (int a = 0; a < CG_AXES; a++)
                truth.value[a] = (int)cg_random_below(2, (uint64_t)a, k, cg_axis_count((cg_axis)a));
            if (k % 2) truth.faults = 1u << cg_random_below(2, CG_AXES, k, CG_FAULTS);
            check_one(&s, &truth, false);
        }
        cg_dump_case_free(&s.c);
    }
    printf("%d dumps of several changes, %d wrong\n", n_judged, n_wrong);
    ck_assert_int_eq(n_wrong, 0);
}
END_TEST

/* Value and gradient of one dump under two contracts. */
START_TEST(value_and_gradient_apart) {
    static const char *const pairs[][2] = {
        {"", "reduction=mean-physical"},
        {"", "reduction=mean-twice"},
        {"reduction=mean-physical", ""},
        {"", "teacher=compressed"},
        {"kl=eps", ""},
        {"support=dense", "support=dense,teacher=sink"},
        {"", "fault=gradient-sign"},
        {"", "fault=relu-leak"},
        {"teacher=compressed,reduction=sum", "reduction=mean-real"},
        {"", "fault=coeff-missing"},
    };
    n_wrong = 0;
    for (int i = 0; i < 2; i++) {
        sample s = make_sample(&shapes[i]);
        for (size_t k = 0; k < sizeof pairs / sizeof *pairs; k++) {
            cg_dump_contracts made = {.by_rows = true};
            cg_error error = {0};
            if (!cg_contract_parse(pairs[k][0], &made.value, &error) ||
                !cg_contract_parse(pairs[k][1], &made.gradient, &error))
                ck_abort_msg("%s", error.text);
            cg_dump_results r = results_of(&s, &made.value, &made.gradient);
            cg_verdict *v = judge(&s, &r, &made);
            char value[256], gradient[256], asked[2][256];
            cg_contract follows = v->gradient_differs ? v->gradient : v->contract;
            if (!v->identified) wrong(&s, &made.value, "nothing identified: %s", v->sentence);
            cg_dump_results named = results_of(&s, &v->contract, &follows);
            double d = distance(&s, &r, &named);
            if (d > s.different) wrong(&s, &made.value, "what is named is %.3g away", d);
            printf("  %-36s gradient %-30s named %-36s gradient %s\n", changes(&made.value, asked[0]),
                   changes(&made.gradient, asked[1]), changes(&v->contract, value),
                   v->gradient_differs ? changes(&v->gradient, gradient) : "the same");
            cg_dump_results_free(&named);
            cg_dump_results_free(&r);
            free(v);
        }
        cg_dump_case_free(&s.c);
    }
    ck_assert_int_eq(n_wrong, 0);
}
END_TEST

int main(void) {
    /* the dumps are tiny: threads would do nothing but wait for each other */
    if (!mkdtemp(folder) || !cg_threads_set(1, NULL)) return EXIT_FAILURE;
    const TTest *const tests[] = {each_change_is_named, changes_together_are_named, value_and_gradient_apart};
    int code = suite_run("confusion", tests, (int)(sizeof tests / sizeof *tests));
    char command[256];
    snprintf(command, sizeof command, "rm -rf %s", folder);
    return system(command) ? EXIT_FAILURE : code;
}
