/* One row by itself: cases from bug reports (S.. in tests/CASES.md), each with the numbers that are right and, by the
 * contract that means it, the number that is wrong; and descriptions that are refused. */
#include "tests/support.h"

#include <jansson.h>
#include <sys/wait.h>

#include "core/base/rng.h"
#include "models/check/row.h"

#define FOR_REAL(dtype) for (cg_dtype dtype = CG_F32; dtype <= CG_F64; dtype++)

static double digits(cg_dtype dtype) { return dtype == CG_F64 ? 1e-10 : 2e-6; }

/* JSON with ' for ", then key and value pairs over it, NULL at the end. */
static cg_row_result *run(cg_dtype dtype, const char *json, const char *const *settings) {
    char text[1 << 14];
    const char *pairs[16][2];
    int n = 0;
    snprintf(text, sizeof text, "%s", json);
    for (char *c = text; *c; c++)
        if (*c == '\'') *c = '"';
    for (int i = 0; settings && settings[i]; i += 2, n++)
        pairs[n][0] = settings[i], pairs[n][1] = settings[i + 1];
    pairs[n][0] = "dtype", pairs[n++][1] = cg_dtype_name(dtype);
    cg_error error = {0};
    cg_row *row = cg_row_read(text, strlen(text), (const char *const(*)[2])pairs, n, &error);
    if (!row) ck_abort_msg("%s: %s", json, error.text);
    cg_row_result *result = cg_row_run(row, NULL, &error);
    if (!result) ck_abort_msg("%s: %s", json, error.text);
    cg_row_free(row);
    return result;
}

#define RUN(dtype, json, ...) run(dtype, json, (const char *const[]){__VA_ARGS__, NULL})

static const double *of(const cg_row_result *result, const char *name, int64_t n) {
    const cg_row_array *a = cg_row_find(result, name);
    if (!a) ck_abort_msg("no %s", name);
    ck_assert_int_eq(a->rows * a->columns, n);
    return a->x;
}

#define EXPECT(result, name, bound, ...)                                                                       \
    expect_close(name, of(result, name, sizeof((double[]){__VA_ARGS__}) / 8), (double[]){__VA_ARGS__},         \
                 sizeof((double[]){__VA_ARGS__}) / 8, bound)

/* Exactly zero, no -0.0 excepted. */
static void expect_zero(const cg_row_result *result, const char *name, int64_t from, int64_t n) {
    const double *x = cg_row_find(result, name)->x;
    ck_assert_int_le(from + n, cg_row_find(result, name)->rows * cg_row_find(result, name)->columns);
    for (int64_t i = from; i < from + n; i++) ck_assert(x[i] == 0);
}

#define S01                                                                                                    \
    "{'q': [[2,0],[0,1]], 'window': [[0,3]], 'compressed': [[1,0],[0,1]], 'sink': [0,0], 'index': [0,1], "     \
    "'scores': [0.3,-0.2]}"

START_TEST(s01_denominator_of_the_teacher) {
    FOR_REAL(dtype) {
        const double bound = digits(dtype);
        cg_row_result *r = RUN(dtype, S01, NULL);
        ck_assert(r->by_ops);
        EXPECT(r, "target", bound, 0.7849937697, 0.2150062303);
        EXPECT(r, "kl", bound, 0.0610656464345);
        EXPECT(r, "dscores", 1e-9 + bound, -0.1625344385, 0.1625344385);
        cg_row_result_free(r);
        r = RUN(dtype, S01, "contract", "teacher=compressed");
        ck_assert(r->by_ops);
        EXPECT(r, "target", bound, 0.5748692497, 0.4251307503);
        EXPECT(r, "kl", 2e-8 + 10 * bound, 0.0047482623);
        EXPECT(r, "dscores", 2e-8 + bound, 0.0475900815, -0.0475900815); /* the opposite sign */
        cg_row_result_free(r);
        r = RUN(dtype, S01, "contract", "teacher=window");
        ck_assert(!r->by_ops);
        EXPECT(r, "kl", 1e-9, 0.0649118282);
        cg_row_result_free(r);
        r = RUN(dtype, S01, "contract", "teacher=sink");
        EXPECT(r, "kl", 2e-8 + 10 * bound, 0.0017012967);
        cg_row_result_free(r);
    }
}
END_TEST

START_TEST(s02_dense_denominator) {
    static const char json[] = "{'logits': [[1,0,-1],[0.5,2,1.5]], 'window_logits': [[0],[1]], 'sink': [0,0], "
                               "'scores': [0.4,0.1,-0.3], 'index': [0,1]}";
    FOR_REAL(dtype) {
        const double bound = digits(dtype);
        cg_row_result *r = RUN(dtype, json, "contract", "support=dense");
        EXPECT(r, "target", bound, 0.3725264145, 0.4073441723, 0.2201294133);
        EXPECT(r, "kl", 5 * bound, 0.0147505761200);
        EXPECT(r, "dscores", 1e-9 + bound, 0.0744202311, -0.0762379536, 0.0018177225);
        cg_row_result_free(r);
        r = RUN(dtype, json, NULL);
        EXPECT(r, "target", 1e-9 + bound, 0.444979227, 0.555020773);
        EXPECT(r, "kl", bound, 0.0337811455998);
        EXPECT(r, "dscores", 1e-9 + bound, 0.1294632898, -0.1294632898);
        cg_row_result_free(r);
        r = RUN(dtype, json, "contract", "support=dense,fault=dense-over-sparse-lse");
        EXPECT(r, "kl", 2e-9, 0.0263008118);
        cg_row_result_free(r);
    }
}
END_TEST

START_TEST(s03_little_compressed_mass) {
    static const char *const windows[] = {"[[40]]", "[[200]]"};
    static const char json[] = "{'q': [1], 'compressed': [[0],[1]], 'sink': 0, 'scores': [0,0]}";
    FOR_REAL(dtype) {
        const double bound = dtype == CG_F32 ? 1e-6 : 1e-9;
        double first[2];
        for (int far = 0; far < 2; far++) {
            cg_row_result *r = RUN(dtype, json, "window", windows[far]);
            EXPECT(r, "target", bound, 0.2689414214, 0.7310585786);
            EXPECT(r, "kl", bound, 0.110944071672);
            EXPECT(r, "dscores", bound, 0.2310585786, -0.2310585786);
            if (!far) memcpy(first, of(r, "target", 2), sizeof first);
            expect_close("both windows", of(r, "target", 2), first, 2, dtype == CG_F32 ? 1e-6 : 1e-14);
            cg_row_result_free(r);
        }
        /* every window between: the target does not move at all */
        for (int w = -300; w <= 300; w += 20) {
            char window[32];
            snprintf(window, sizeof window, "[[%d]]", w);
            cg_row_result *r = RUN(dtype, json, "window", window);
            EXPECT(r, "target", bound, 0.2689414214, 0.7310585786);
            cg_row_result_free(r);
        }
        cg_row_result *r = RUN(dtype, json, "window", "[[40]]", "contract", "normalise=floor-1e-10");
        EXPECT(r, "target", 0.05, 4.2e-8, 1.2e-7);
        EXPECT(r, "kl", 0.05, -2.5e-6);
        cg_row_result_free(r);
        r = RUN(dtype,
                "{'logits': [[0,1],[2,0]], 'window_logits': [[40],[60]], 'sink': [0,0], 'scores': [0,0]}",
                NULL);
        EXPECT(r, "target", bound, 0.2689414242, 0.7310585758);
        EXPECT(r, "kl", bound, 0.110944068826);
        cg_row_result_free(r);
    }
}
END_TEST

START_TEST(s04_no_epsilon) {
    static const char json[] = "{'target': [0.5,0.5], 'scores': [0,-30]}";
    FOR_REAL(dtype) {
        cg_row_result *r = RUN(dtype, json, NULL);
        EXPECT(r, "kl", digits(dtype), 14.3068528194);
        EXPECT(r, "dscores", digits(dtype), 0.5, -0.5);
        cg_row_result_free(r);
    }
    cg_row_result *r = RUN(CG_F64, json, "contract", "kl=eps");
    EXPECT(r, "kl", 1e-10, 10.8193106222);
    EXPECT(r, "dscores", 1e-3, 4.67e-4, -4.67e-4);
    cg_row_result_free(r);
}
END_TEST

START_TEST(s06_gradients_of_the_indexer) {
    static const char json[] =
        "{'q': [[2,0],[0,1]], 'window': [[0,3]], 'compressed': [[1,0],[0,1]], 'sink': [0,0], "
        "'q_index': [[1,0],[0,1]], 'k_index': [[0.5,-1],[1,2]], 'w': [0.6,-0.4]}";
    FOR_REAL(dtype) for (int dense = 0; dense < 2; dense++) {
        const double bound = 1e-9 + digits(dtype);
        cg_row_result *r = RUN(dtype, json, "contract", dense ? "support=dense" : "support=sparse");
        ck_assert(r->by_ops);
        EXPECT(r, "scores", bound, 0.3, -0.2);
        EXPECT(r, "kl", bound, 0.0610656464345);
        EXPECT(r, "dw", bound, 0.0812672192, 0.3250688770);
        EXPECT(r, "dq_index", bound, 0.0487603315, 0.2925619893, -0.0650137754, -0.1300275508);
        EXPECT(r, "dk_index", bound, -0.0975206631, 0, 0.0975206631, -0.0650137754);
        expect_zero(r, "dk_index", 1, 1);
        cg_row_result_free(r);
    }
    cg_row_result *leak = RUN(CG_F64, json, "contract", "fault=relu-leak");
    EXPECT(leak, "kl", 1e-10, 0.0610656464345);
    ck_assert(cg_row_find(leak, "dk_index")->x[1] != 0);
    cg_row_result_free(leak);
}
END_TEST

START_TEST(s09_heads_are_summed_first) {
    static const char json[] = "{'logits': [[2,0],[1,-1],[0,1],[-1,2]], 'window_logits': [[0],[2],[3],[-1]], "
                               "'sink': [0,0,0,0], 'scores': [0.3,-0.2]}";
    FOR_REAL(dtype) {
        cg_row_result *r = RUN(dtype, json, NULL);
        EXPECT(r, "target", digits(dtype), 0.4954414969, 0.5045585031);
        EXPECT(r, "kl", 3 * digits(dtype), 0.0332506156386);
        const double *weights = of(r, "weights", 8); /* what each of two ranks holds */
        const double raw[] = {weights[0] + weights[2], weights[1] + weights[3], weights[4] + weights[6],
                              weights[5] + weights[7]};
        expect_close("raw sums", raw, (double[]){0.9481174123, 0.1283137385, 0.0806327453, 0.9193672547}, 4,
                     digits(dtype));
        cg_row_result_free(r);
    }
    cg_row_result *r = RUN(CG_F64, json, "contract", "heads=local-normalised-2");
    EXPECT(r, "kl", 1e-8, 0.0413163616);
    cg_row_result_free(r);
    r = RUN(CG_F64, json, "contract", "heads=first-half");
    EXPECT(r, "kl", 1e-8, 0.1683445901);
    cg_row_result_free(r);
}
END_TEST

#define S11 "{'q': [1,0.5], 'compressed': [[1,0],[0,3]], 'dout': [1,3], 'index': [-1,-1], 'scale': 0.5}"

START_TEST(s11_nothing_to_attend_to) {
    static const char *const lists[] = {"[-1,-1]", "[]", "[-1]", "[-1,-1,-1,-1,-1,-1,-1,-1,-1]"};
    FOR_REAL(dtype) for (int infinite = 0; infinite < 2; infinite++) for (int l = 0; l < 4; l++) {
        cg_row_result *r =
            RUN(dtype, S11, "sink", infinite ? "-Infinity" : "0.7", "index", lists[l], "scores", "[1,2]");
        const double lse = of(r, "lse", 1)[0], sink = dtype == CG_F32 ? (double)0.7f : 0.7;
        ck_assert(lse == (infinite ? -INFINITY : sink));
        expect_zero(r, "out", 0, 2), expect_zero(r, "dq", 0, 2), expect_zero(r, "dcompressed", 0, 4);
        expect_zero(r, "dsink", 0, 1), expect_zero(r, "kl", 0, 1), expect_zero(r, "loss", 0, 1);
        expect_zero(r, "dscores", 0, cg_row_find(r, "dscores")->columns);
        ck_assert(of(r, "sink_weight", 1)[0] == (infinite ? 0 : 1));
        cg_row_result_free(r);
    }
}
END_TEST

#define S12 "{'q': [1,0.5], 'compressed': [[1,0],[0,3]], 'sink': 0.25, 'dout': [1,3], 'scale': 0.5}"

/* The S12 values at the first rows, zero gradient at the rows behind. */
static void expect_s12(cg_dtype dtype, const cg_row_result *r) {
    const double bound = digits(dtype);
    const cg_row_array *dcompressed = cg_row_find(r, "dcompressed");
    EXPECT(r, "out", bound, 0.3264958358, 1.2576868548);
    EXPECT(r, "lse", bound, 1.6193380844);
    EXPECT(r, "sink_weight", 1e-9 + bound, 0.2542752126);
    EXPECT(r, "dq", bound, -0.5059961288, 3.0816117491);
    EXPECT(r, "dsink", bound, -1.0424155752);
    expect_close("dcompressed", dcompressed->x,
                 (double[]){-0.1795002930, 0.7264894430, 1.4464328680, 1.7712888130}, 4, bound);
    expect_zero(r, "dcompressed", 4, dcompressed->rows * 2 - 4);
}

START_TEST(s12_sink_and_both_roles_of_a_row) {
    FOR_REAL(dtype) {
        cg_row_result *r = RUN(dtype, S12, NULL);
        expect_s12(dtype, r);
        EXPECT(r, "weights", digits(dtype), 0.3264958358, 0.4192289516);
        cg_row_result_free(r);
    }
}
END_TEST

/* All six inputs by central differences of out . dout. */
START_TEST(s12_central_differences) {
    double x[9] = {1, 0.5, 1, 0, 0, 3, 0.25, 1, 3}, got[7];
    for (int k = -1; k < 7; k++) {
        double sums[2] = {0};
        for (int side = 0; side < 2; side++) {
            double y[9];
            memcpy(y, x, sizeof y);
            if (k >= 0) y[k] += side ? -1e-5 : 1e-5;
            char json[512];
            snprintf(json, sizeof json,
                     "{'q': [%.17g,%.17g], 'compressed': [[%.17g,%.17g],[%.17g,%.17g]], 'sink': %.17g, 'dout': "
                     "[1,3], "
                     "'scale': 0.5}",
                     y[0], y[1], y[2], y[3], y[4], y[5], y[6]);
            cg_row_result *r = RUN(CG_F64, json, NULL);
            const double *out = of(r, "out", 2);
            sums[side] = out[0] + 3 * out[1];
            if (k < 0) {
                memcpy(got, of(r, "dq", 2), 16), memcpy(got + 2, of(r, "dcompressed", 4), 32);
                got[6] = of(r, "dsink", 1)[0];
            }
            cg_row_result_free(r);
        }
        if (k >= 0) ck_assert_double_eq_tol((sums[0] - sums[1]) / 2e-5, got[k], 1e-8);
    }
}
END_TEST

START_TEST(s13_first_block_masked) {
    char list[1024];
    FOR_REAL(dtype) for (int n = 0; n <= 130; n++) for (int between = 0; between < 2; between++) {
        char *c = list;
        c += sprintf(c, between ? "[0" : "[");
        for (int i = 0; i < n; i++) c += sprintf(c, i || between ? ",-1" : "-1");
        sprintf(c, between ? ",1]" : n ? ",0,1]" : "0,1]");
        cg_row_result *r = RUN(dtype, S12, "index", list);
        expect_s12(dtype, r);
        cg_row_result_free(r);
    }
}
END_TEST

START_TEST(s14_marker_is_no_address) {
    static const char *const lists[] = {"[0,1,-1,-1]", "[-1,0,-1,1]", "[0,1]", "[-1,-1,0,1]"};
    FOR_REAL(dtype) for (int l = 0; l < 4; l++) {
        cg_row_result *r = RUN(dtype, S12, "compressed", "[[1,0],[0,3],[5,7]]", "index", lists[l]);
        expect_s12(dtype, r);
        cg_row_result_free(r);
    }
}
END_TEST

/* A row that is listed twice counts twice: gradients of both places add up in it. */
START_TEST(s15_a_row_listed_twice) {
    FOR_REAL(dtype) {
        cg_row_result *twice = RUN(dtype, S12, "index", "[0,1,0]", "scores", "[0.5,-1]");
        cg_row_result *copied = RUN(dtype, S12, "compressed", "[[1,0],[0,3],[1,0]]", "scores", "[0.5,-1,0.5]");
        const double *a = of(twice, "dcompressed", 4), *b = of(copied, "dcompressed", 6);
        for (int i = 0; i < 2; i++) ck_assert_double_eq_tol(a[i], b[i] + b[4 + i], digits(dtype));
        expect_close("row 1", a + 2, b + 2, 2, digits(dtype));
        expect_close("out", of(twice, "out", 2), of(copied, "out", 2), 2, digits(dtype));
        expect_close("kl", of(twice, "kl", 1), of(copied, "kl", 1), 1, digits(dtype));
        cg_row_result_free(twice), cg_row_result_free(copied);
        cg_row_result *second = RUN(dtype, S12, "q", "[0,1]", "index", "[1,0]"); /* the printed second query */
        EXPECT(second, "dcompressed", digits(dtype), 0.1478040497, 0.0658089997, 0.6624117939, 2.9445826503);
        cg_row_result_free(second);
    }
}
END_TEST

START_TEST(s16_garbage_in_rows_that_nobody_names) {
    FOR_REAL(dtype) for (int marked = 0; marked < 2; marked++) {
        cg_row_result *r = RUN(dtype, S12, "compressed", "[[1,0],[0,3],[\"NaN\",\"Infinity\"]]", "index",
                               marked ? "[0,1,-1]" : "[0,1]", "q_index", "[[1,2]]", "w", "[1]", "k_index",
                               "[[1,1],[2,-1],[\"-Infinity\",\"NaN\"]]");
        cg_row_result *clean = RUN(dtype, S12, "q_index", "[[1,2]]", "w", "[1]", "k_index", "[[1,1],[2,-1]]");
        expect_s12(dtype, r);
        ck_assert_mem_eq(of(r, "out", 2), of(clean, "out", 2), 16);
        ck_assert_mem_eq(of(r, "dq", 2), of(clean, "dq", 2), 16);
        ck_assert(of(r, "kl", 1)[0] == of(clean, "kl", 1)[0]);
        ck_assert_mem_eq(of(r, "dq_index", 2), of(clean, "dq_index", 2), 16);
        ck_assert_mem_eq(of(r, "dk_index", 6), of(clean, "dk_index", 4), 32);
        expect_zero(r, "dk_index", 4, 2);
        cg_row_result_free(r), cg_row_result_free(clean);
    }
}
END_TEST

START_TEST(s19_s21_selection) {
    cg_row_result *r = RUN(CG_F64, "{'logits': [[0,0,0,0]], 'scores': [5,1,5,5], 'select': 2}", NULL);
    EXPECT(r, "index", 0, 0, 2);
    cg_row_result_free(r);
    r = RUN(CG_F64, "{'logits': [[0,0,0,0,0,0]], 'scores': [0,-0.0,0,7,-0.0,0], 'select': 4}", NULL);
    EXPECT(r, "index", 0, 3, 0, 1, 2);
    cg_row_result_free(r);
    r = RUN(CG_F64, "{'logits': [[0,0,0]], 'scores': [3,2,1], 'select': 5}", NULL);
    EXPECT(r, "index", 0, 0, 1, 2, -1, -1);
    cg_row_result_free(r);
    r = RUN(
        CG_F64,
        "{'logits': [[0,0]], 'q_index': [[1,0],[0,1]], 'w': [1,1], 'k_index': [[3,-5],[1,0.5]], 'select': 1}",
        NULL);
    EXPECT(r, "index", 0, 0);
    EXPECT(r, "scores", 0, 3);
    cg_row_result_free(r);
}
END_TEST

/* ---- both ways to a loss ---- */

static char *random_row(int seed, bool indexer) {
    static char text[4096];
    uint64_t at = 0;
    char *c = text;
#define MATRIX(name, rows, columns)                                                                            \
    c += sprintf(c, "'%s': [", name);                                                                          \
    for (int i = 0; i < rows; i++) {                                                                           \
        c += sprintf(c, i ? ", [" : "[");                                                                      \
        for (int j = 0; j < columns; j++)                                                                      \
            c += sprintf(c, "%s%.4f", j ? "," : "", cg_random_normal((uint64_t)seed, 1, at++));                \
        c += sprintf(c, "]");                                                                                  \
    }                                                                                                          \
    c += sprintf(c, "], ");
    c += sprintf(c, "{");
    MATRIX("q", 3, 4) MATRIX("window", 2, 4) MATRIX("compressed", 6, 4) if (indexer) {
        MATRIX("q_index", 2, 3)
        MATRIX("k_index", 6, 3)
        c += sprintf(c, "'w': [%.4f, %.4f], ", cg_random_normal((uint64_t)seed, 2, 0),
                     cg_random_normal((uint64_t)seed, 2, 1));
    }
    else {
        c += sprintf(c, "'scores': [0.3, -1, 2, 0.7, -0.4, 1.1], ");
    }
    sprintf(c, "'index': [4,-1,0,2], 'coeff': 0.5}");
    return text;
}

/* Without a sink "window" is "full" and "sink" is "compressed": the first of each is computed by contract.h. */
START_TEST(ops_and_contracts_agree) {
    static const char *const names[] = {"target",  "predict",  "kl", "loss",
                                        "dscores", "dq_index", "dw", "dk_index"};
    for (int seed = 0; seed < 10; seed++)
        for (int indexer = 0; indexer < 2; indexer++)
            for (int dense = 0; dense < 2; dense++) {
                const char *json = random_row(seed, indexer);
                cg_row_result *a = RUN(CG_F64, json, "contract", dense ? "support=dense" : "");
                cg_row_result *b =
                    RUN(CG_F64, json, "contract", dense ? "support=dense,teacher=window" : "teacher=window");
                ck_assert(a->by_ops && !b->by_ops);
                for (int i = 0; i < (indexer ? 8 : 5); i++) {
                    const cg_row_array *x = cg_row_find(a, names[i]), *y = cg_row_find(b, names[i]);
                    ck_assert(x && y && x->rows == y->rows && x->columns == y->columns);
                    expect_close(names[i], x->x, y->x, x->rows * x->columns, 1e-12);
                }
                cg_row_result_free(a), cg_row_result_free(b);
            }
}
END_TEST

/* Every contract there is computes, and its gradient is finite. */
START_TEST(every_contract) {
    for (cg_axis axis = 0; axis < CG_AXES; axis++)
        for (int v = 0; v < cg_axis_count(axis); v++) {
            char contract[128];
            snprintf(contract, sizeof contract, "%s=%s", cg_axis_names[axis], cg_axis_values(axis)[v]);
            cg_row_result *r = RUN(CG_F64, random_row(3, true), "contract", contract);
            ck_assert(isfinite(of(r, "loss", 1)[0]));
            for (int i = 0; i < 6; i++) ck_assert(isfinite(of(r, "dq_index", 6)[i]));
            cg_row_result_free(r);
        }
    for (int i = 0; i < CG_FAULTS; i++) {
        char contract[128];
        snprintf(contract, sizeof contract, "fault=%s", cg_fault_name(i));
        cg_row_result_free(RUN(CG_F64, random_row(3, true), "contract", contract));
    }
}
END_TEST

/* ---- what is refused ---- */

static void refuse(const char *json, const char *sentence) {
    char text[4096];
    cg_error error = {0};
    snprintf(text, sizeof text, "%s", json);
    for (char *c = text; *c; c++)
        if (*c == '\'') *c = '"';
    cg_row *row = cg_row_read(text, strlen(text), NULL, 0, &error);
    if (row) ck_abort_msg("accepted: %s", json);
    ck_assert_int_eq(error.code, CG_BAD_INPUT);
    if (!strstr(error.text, sentence)) ck_abort_msg("%s: \"%s\", expected \"%s\"", json, error.text, sentence);
    ck_assert_ptr_null(strchr(error.text, '\n'));
}

START_TEST(bad_descriptions) {
    refuse("", "no JSON");
    refuse("[1]", "a JSON object of keys is needed, got [1]");
    refuse("{'q': [1,2]", "no JSON");
    refuse("{'q': [NaN]}", "no JSON: invalid token near 'NaN'");
    refuse("{'q': [1], 'q': [2]}", "duplicate object key");
    refuse("{'q': [1], '\\u0071': [2]}", "duplicate object key");
    refuse("{'q': [1], 'query': [2]}", "q is given twice, as q and as query");
    refuse("{'q_indx': [1]}", "unknown key \"q_indx\", did you mean q_index?");
    refuse("{'': [1]}", "unknown key \"\"");
    refuse("{'line\\nbreak': [1]}", "unknown key \"line\\nbreak\"");
    refuse("{}", "q, logits or target is needed");
    refuse("{'q': []}", "q is empty");
    refuse("{'q': [[],[]]}", "q is empty");
    refuse("{'logits': []}", "logits is empty");
    refuse("{'q': null}", "q must be a number, got null");
    refuse("{'q': {}}", "q must be a number, got {}");
    refuse("{'q': [true]}", "q[0] must be a number, got true");
    refuse("{'q': ['nan']}", "q[0] must be a number, got \"nan\"");
    refuse("{'q': ['NaN']}", "number 0 of q is NaN, expected a finite one");
    refuse("{'q': [1, '-Infinity']}", "number 1 of q is -Infinity");
    refuse("{'q': [1e999]}", "no JSON: real number overflow");
    refuse("{'q': [[1,2],[3]]}", "q[1] must be a list of 2 numbers as q[0] is, got [3]");
    refuse("{'q': [[1,2],3]}", "q[1] must be a list of 2 numbers");
    refuse("{'q': [1,[2]]}", "q[1] must be a number, got [2]");
    refuse("{'q': [[[1]]]}", "q[0][0] must be a number, got [1]");
    refuse("{'q': [1,2], 'sink': [[0]]}", "sink must be a list of numbers");
    refuse("{'q': [1,2], 'scale': [1]}", "scale must be one number");
    refuse("{'q': [1,2], 'window': [[1,2,3]]}", "window has 3 columns, expected 2");
    refuse("{'q': [1,2], 'compressed': [[1],[2]]}", "compressed has 1 columns, expected 2");
    refuse("{'q': [1,2], 'dout': [[1,2],[3,4]]}", "dout has 2 rows, expected 1");
    refuse("{'q': [1,2], 'sink': [1,2]}", "sink has 2 numbers, expected 1");
    refuse("{'q': [1,2], 'sink': 'Infinity'}", "number 0 of sink is Infinity");
    refuse("{'q': [[1],[2]], 'sink': ['-Infinity','NaN']}", "sink must be finite or -Infinity");
    refuse("{'q': [1], 'compressed': [[1],[2]], 'scores': [1]}", "scores has 1 numbers, expected 2");
    refuse("{'q': [1], 'compressed': [[1]], 'scores': ['-Infinity']}", "number 0 of scores is -Infinity");
    refuse("{'q': [1], 'compressed': [[1],[2]], 'index': [2]}",
           "index[0] is 2, expected -1 or one of 2 compressed rows");
    refuse("{'q': [1], 'compressed': [[1],[2]], 'index': [0,-2]}", "index[1] is -2");
    refuse("{'q': [1], 'compressed': [[1],[2]], 'index': [1.0]}", "index[0] must be an integer, got 1.0");
    refuse("{'q': [1], 'compressed': [[1],[2]], 'index': [4294967296]}", "index[0] is 4294967296");
    refuse("{'q': [1], 'index': [0]}", "one of 0 compressed rows");
    refuse("{'q': [1], 'compressed': [['NaN']], 'index': [0]}", "compressed[0] is read and holds NaN");
    refuse(
        "{'q': [1], 'compressed': [[1],['NaN']], 'index': [0], 'scores': [1,2], 'contract': 'support=dense'}",
        "compressed[1] is read and holds NaN");
    refuse("{'q': [1], 'compressed': [[1]], 'select': 1}", "select needs scores");
    refuse("{'q': [1], 'compressed': [[1]], 'scores': [1], 'select': -1}", "select must be an integer from 0");
    refuse("{'q': [1], 'compressed': [[1]], 'scores': [1], 'select': 1, 'index': [0]}",
           "index and select exclude");
    refuse("{'q': [1], 'logits': [[1]]}", "q and logits exclude each other");
    refuse("{'target': [1,0]}", "target needs scores");
    refuse("{'target': [-1,2], 'scores': [0,0]}", "target[0] is -1");
    refuse("{'q': [1], 'compressed': [[1]], 'q_index': [1]}", "q_index needs k_index beside it");
    refuse("{'q': [1], 'compressed': [[1]], 'q_index': [1], 'k_index': [[1,2]], 'w': [1]}",
           "k_index has 2 columns, expected 1");
    refuse("{'q': [1], 'contract': 'teachr=full'}", "unknown axis \"teachr\", did you mean teacher?");
    refuse("{'q': [1], 'contract': 1}", "contract must be a short text, got 1");
    refuse("{'q': [1], 'dtype': 'bf16'}", "dtype must be f64 or f32, got \"bf16\"");
    refuse("{'q': [1], 'compressed': [[1]], 'scores': [1], 'select': 4194305}",
           "select must be an integer from 0 to");
    cg_error error = {0};
    ck_assert_ptr_null(cg_row_read("{\"q\": [1]}\0", 11, NULL, 0, &error));
    ck_assert_ptr_null(cg_row_read("{\"q\": [1\xff]}", 11, NULL, 0, NULL));
}
END_TEST

/* Heads, rows and lists that each are allowed may together be too large: the numbers are named. */
START_TEST(sizes_that_multiply) {
    enum { ROWS = 3000 };
    char *json = malloc(64 + 8 * ROWS * 4), *c = json;
    c += sprintf(c, "{\"q\": [");
    for (int i = 0; i < ROWS; i++) c += sprintf(c, i ? ",[1]" : "[1]");
    c += sprintf(c, "], \"window\": [");
    for (int i = 0; i < ROWS; i++) c += sprintf(c, i ? ",[1]" : "[1]");
    c += sprintf(c, "]}");
    cg_error error = {0};
    ck_assert_ptr_null(cg_row_read(json, (size_t)(c - json), NULL, 0, &error));
    ck_assert_msg(strstr(error.text, "3000 heads of 1, 3000 window rows"), "%s", error.text);
    ck_assert_msg(strstr(error.text, "9000000 numbers"), "%s", error.text);
    free(json);
}
END_TEST

/* Every cut of a description and every changed byte is read or refused, and what is read is computed. */
START_TEST(cut_and_damaged_descriptions) {
    char text[4096];
    int n_read = 0;
    snprintf(text, sizeof text, "%s", random_row(1, true));
    for (char *c = text; *c; c++)
        if (*c == '\'') *c = '"';
    size_t n = strlen(text);
    for (size_t i = 0; i < 3 * n; i++) {
        char *copy = malloc(n ? n : 1); /* its own block, so that reading past the end is seen */
        memcpy(copy, text, n);
        size_t bytes = i < n ? i : n;
        if (i >= n) copy[i % n] = (char)cg_random_u32(7, 0, i);
        cg_error error = {0};
        cg_row *row = cg_row_read(copy, bytes, NULL, 0, &error);
        ck_assert(row || (error.code == CG_BAD_INPUT && *error.text));
        cg_row_result *result = row ? cg_row_run(row, NULL, &error) : NULL;
        n_read += result != NULL;
        cg_row_result_free(result);
        cg_row_free(row);
        free(copy);
    }
    ck_assert_int_gt(n_read, 5);
}
END_TEST

/* ---- csagrad check --row ---- */

/* Output (and messages) of the program behind `feed |`; its exit code. */
static int program(char *text, size_t bytes, const char *feed, const char *arguments) {
    char command[4096];
    snprintf(command, sizeof command, "%s '%s' check --row %s 2>&1", feed, CSAGRAD_PROGRAM, arguments);
    FILE *pipe = popen(command, "r");
    ck_assert_ptr_nonnull(pipe);
    size_t n = fread(text, 1, bytes - 1, pipe);
    text[n] = 0;
    return WEXITSTATUS(pclose(pipe));
}

static void expect_program(int code, const char *feed, const char *arguments, const char *says) {
    char text[1 << 14];
    int got = program(text, sizeof text, feed, arguments);
    ck_assert_msg(got == code && strstr(text, says), "%s: exit code %d, \"%s\"", arguments, got, text);
    if (code == 2) ck_assert_ptr_eq(strchr(text, '\n'), text + strlen(text) - 1); /* one sentence */
}

#define S01_JSON "{\"q\": [[2,0],[0,1]], \"window\": [[0,3]], \"compressed\": [[1,0],[0,1]], \"sink\": [0,0]}"

START_TEST(command_line) {
    static const char s01[] =
        "--q '[[2,0],[0,1]]' --window '[[0,3]]' --compressed '[[1,0],[0,1]]' --sink '[0,0]' "
        "--scores '[0.3,-0.2]'";
    static const char feed[] = "printf '%s' '" S01_JSON "' |";
    char text[1 << 14], arguments[1024];
    expect_program(0, "", s01, "kl                    0.0610656464345");
    expect_program(0, feed, "- --scores '[0.3,-0.2]'", "kl                    0.0610656464345");
    expect_program(0, feed, "- --scores '[0.3,-0.2]' --contract=teacher=window",
                   "kl                    0.06491182");
    expect_program(0, feed, "- --scores '[9,9]' --scores '[0.3,-0.2]'",
                   "kl                    0.0610656464345");
    expect_program(0, "{ printf '%70000s' ' '; printf '%s' '" S01_JSON "'; } |", "- --scores '[0.3,-0.2]'",
                   "kl                    0.0610656464345");
    snprintf(arguments, sizeof arguments, "%s --window-logits '[[0],[3]]'", s01);
    expect_program(2, "", arguments, "window and window_logits exclude each other");
    snprintf(arguments, sizeof arguments, "%s --json --dtype f64 --dout '[[1,2],[3,4]]'", s01);
    ck_assert_int_eq(program(text, sizeof text, "", arguments), 0);
    json_error_t why;
    json_t *root = json_loads(text, 0, &why);
    ck_assert_msg(root != NULL, "%s: %s", why.text, text);
    cg_row_result *r = RUN(CG_F64, S01, "dout", "[[1,2],[3,4]]"); /* every number comes out whole */
    for (int i = 0; i < r->n; i++) {
        const cg_row_array *a = &r->arrays[i];
        const json_t *value = json_object_get(root, a->name);
        ck_assert_msg(value != NULL, "no %s", a->name);
        for (int64_t k = 0; k < a->rows * a->columns; k++) {
            const json_t *x = a->matrix ? json_array_get(json_array_get(value, (size_t)(k / a->columns)),
                                                         (size_t)(k % a->columns))
                              : json_is_array(value) ? json_array_get(value, (size_t)k)
                                                     : value;
            ck_assert(json_number_value(x) == a->x[k]);
        }
    }
    cg_row_result_free(r);
    json_decref(root);
    expect_program(0, "", "--q 1 --sink -inf --json", "\"lse\": [\"-Infinity\"]");
    expect_program(2, "", "", "q, logits or target is needed");
    expect_program(2, "", "--qq 1", "unknown option --qq, did you mean --q?");
    expect_program(2, "", "--q", "--q needs a value");
    expect_program(2, "", "--q '[1,'", "q is no JSON");
    expect_program(2, "", "--q 1 one two", "one file is wanted, got \"one\" and \"two\"");
    expect_program(2, "", "/no/such/file", "/no/such/file");
    expect_program(2, "printf '{' |", "-", "standard input: line 1: no JSON");
    expect_program(2, "", "--q 1 --contract teacher=ful", "did you mean full?");
}
END_TEST

SUITE("row", s01_denominator_of_the_teacher, s02_dense_denominator, s03_little_compressed_mass, s04_no_epsilon,
      s06_gradients_of_the_indexer, s09_heads_are_summed_first, s11_nothing_to_attend_to,
      s12_sink_and_both_roles_of_a_row, s12_central_differences, s13_first_block_masked,
      s14_marker_is_no_address, s15_a_row_listed_twice, s16_garbage_in_rows_that_nobody_names,
      s19_s21_selection, ops_and_contracts_agree, every_contract, bad_descriptions, sizes_that_multiply,
      cut_and_damaged_descriptions, command_line)
