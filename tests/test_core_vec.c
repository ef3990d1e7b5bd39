#include "tests/support.h"

#include "core/math/vec.h"

/* Passed asserts cost a system call each: the long loops abort instead. */
enum { N = 20011 }; /* odd: ends inside a vector of any width */

/* Distance in units of the last place of the exact value, which is given in a wider type. */
static double ulps_f32(float got, double exact) {
    if ((float)exact == got) return 0;
    int exponent;
    frexp(exact, &exponent);
    return fabs((double)got - exact) / ldexp(1, exponent < -125 ? -149 : exponent - 24);
}
static double ulps_f64(double got, long double exact) {
    if ((double)exact == got) return 0;
    int exponent;
    frexpl(exact, &exponent);
    return (double)(fabsl((long double)got - exact) / ldexpl(1, exponent < -1021 ? -1074 : exponent - 53));
}

START_TEST(exp_is_within_one_ulp) {
    float *x = malloc(sizeof *x * N), *y = malloc(sizeof *y * N);
    double *u = malloc(sizeof *u * N), *v = malloc(sizeof *v * N);
    for (int i = 0; i < N; i++) {
        x[i] = -87.3f + 176.f * (float)i / N; /* normal results */
        u[i] = -708.3 + 1417. * (double)i / N;
    }
    cg_exp_f32(N, x, y);
    cg_exp_f64(N, u, v);
    for (int i = 0; i < N; i++) {
        if (!(ulps_f32(y[i], exp((double)x[i])) <= 1))
            ck_abort_msg("exp(%.9g) = %.9g", (double)x[i], (double)y[i]);
        if (!(ulps_f64(v[i], expl(u[i])) <= 1)) ck_abort_msg("exp(%.17g) = %.17g", u[i], v[i]);
    }
    free(x), free(y), free(u), free(v);
}
END_TEST

START_TEST(log_is_within_one_ulp) {
    float *x = malloc(sizeof *x * N), *y = malloc(sizeof *y * N);
    double *u = malloc(sizeof *u * N), *v = malloc(sizeof *v * N);
    for (int i = 0; i < N; i++) { /* all magnitudes, and near 1, where a careless log loses all digits */
        x[i] = i % 2 ? exp2f(-140 + 267.f * (float)i / N) : 1 + ((float)i - N / 2) * 0x1p-20f;
        u[i] = i % 2 ? exp2(-1060 + 2080. * (double)i / N) : 1 + ((double)i - N / 2) * 0x1p-40;
    }
    cg_log_f32(N, x, y);
    cg_log_f64(N, u, v);
    for (int i = 0; i < N; i++) {
        if (!(ulps_f32(y[i], log((double)x[i])) <= 1))
            ck_abort_msg("log(%.9g) = %.9g", (double)x[i], (double)y[i]);
        if (!(ulps_f64(v[i], logl(u[i])) <= 1)) ck_abort_msg("log(%.17g) = %.17g", u[i], v[i]);
    }
    free(x), free(y), free(u), free(v);
}
END_TEST

/* Special values stand in the vector part (first) and in the tail (last). */
START_TEST(special_values) {
    enum { PLACES = 37 };
    static const double in[] = {-INFINITY, INFINITY, 0., -0., NAN, 1., -1., 1e4, -1e4};
    static const double exp_out[] = {0, INFINITY, 1, 1, NAN, M_E, 1 / M_E, INFINITY, 0};
    static const double log_out[] = {NAN, INFINITY, -INFINITY, -INFINITY, NAN, 0, NAN, 9.210340371976184, NAN};
    for (size_t s = 0; s < sizeof in / sizeof *in; s++) {
        float x[PLACES], e[PLACES], l[PLACES];
        double u[PLACES], f[PLACES], m[PLACES];
        for (int i = 0; i < PLACES; i++) x[i] = (float)(u[i] = i == 0 || i == PLACES - 1 ? in[s] : 0.5);
        cg_exp_f32(PLACES, x, e), cg_log_f32(PLACES, x, l);
        cg_exp_f64(PLACES, u, f), cg_log_f64(PLACES, u, m);
        for (int i = 0; i < PLACES; i += PLACES - 1) {
            const double got[] = {(double)e[i], f[i], (double)l[i], m[i]};
            for (int j = 0; j < 4; j++) {
                double expected = j < 2 ? exp_out[s] : log_out[s];
                bool same = isnan(expected)   ? isnan(got[j])
                            : isinf(expected) ? got[j] == expected
                                              : fabs(got[j] - expected) <= (j % 2 ? 1e-14 : 1e-6);
                ck_assert_msg(same, "%s of %g at %d: %.17g, expected %g", j < 2 ? "exp" : "log", in[s], i,
                              got[j], expected);
            }
        }
    }
}
END_TEST

#define CHECK_PLACES(real, name, first, step)                                                                  \
    do {                                                                                                       \
        real x[MOST], whole[MOST], part[MOST + 2];                                                             \
        for (int i = 0; i < MOST; i++) x[i] = (real)((first) + (step)*i);                                      \
        name(MOST, x, whole);                                                                                  \
        for (int from = 0; from < 20; from++) {                                                                \
            for (int n = 0; from + n <= MOST; n++) {                                                           \
                memset(part, 0x5A, sizeof part);                                                               \
                real untouched = part[0];                                                                      \
                name(n, x + from, part + 1);                                                                   \
                ck_assert_mem_eq(part + 1, whole + from, (size_t)n * sizeof(real));                            \
                ck_assert_mem_eq(part + 1 + n, &untouched, sizeof(real)); /* nothing behind the end */         \
                ck_assert_mem_eq(part, &untouched, sizeof(real));                                              \
            }                                                                                                  \
        }                                                                                                      \
        name(MOST, x, x); /* in place */                                                                       \
        ck_assert_mem_eq(x, whole, sizeof x);                                                                  \
    } while (0)

START_TEST(bits_do_not_depend_on_the_place) {
    enum { MOST = 75 };
    CHECK_PLACES(float, cg_exp_f32, -30, 0.731);
    CHECK_PLACES(double, cg_exp_f64, -30, 0.731);
    CHECK_PLACES(float, cg_log_f32, 0.0131, 0.731);
    CHECK_PLACES(double, cg_log_f64, 0.0131, 0.731);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("core_vec");
    TCase *tests = tcase_create("vec");
    tcase_add_test(tests, exp_is_within_one_ulp);
    tcase_add_test(tests, log_is_within_one_ulp);
    tcase_add_test(tests, special_values);
    tcase_add_test(tests, bits_do_not_depend_on_the_place);
    suite_add_tcase(suite, tests);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
