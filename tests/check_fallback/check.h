/* The part of Check (https://libcheck.github.io/check) that the suites use, for machines without it: each test in a
 * process of its own, with a time limit. CK_FORK=no runs them all in this one, where a failed test leaves what it holds
 * open and a crash ends the suite. One program includes this in one file. */
#ifndef TESTS_CHECK_FALLBACK_CHECK_H
#define TESTS_CHECK_FALLBACK_CHECK_H

#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

typedef struct TTest {
    const char *name;
    void (*fn)(int);
} TTest;

#define START_TEST(name)                                                                                       \
    static void name##_fn(int);                                                                                \
    static const TTest name##_test = {#name, name##_fn};                                                       \
    static const TTest *const name = &name##_test;                                                             \
    static void name##_fn(int _i __attribute__((unused)))
#define END_TEST

enum print_output { CK_NORMAL, CK_ENV };

enum { CK_MOST = 256, CK_SECONDS = 4 };

typedef void (*ck_fixture)(void);

typedef struct TCase {
    const char *name;
    double seconds;
    struct {
        const TTest *test;
        int first, end;
    } tests[CK_MOST];
    int n_tests;
    ck_fixture setup, teardown, setup_once, teardown_once; /* around each test, in its process; around all */
} TCase;

typedef struct Suite {
    const char *name;
    TCase *cases[CK_MOST];
    int n_cases;
} Suite;

typedef struct SRunner {
    Suite *suite;
    int n_run, n_failures, n_errors;
} SRunner;

static jmp_buf ck_back; /* to the runner, from a test that failed */

__attribute__((noreturn, format(printf, 3, 4), unused)) static void ck_fail(const char *file, int line,
                                                                            const char *format, ...) {
    va_list list;
    va_start(list, format);
    printf("%s:%d: ", file, line);
    vprintf(format, list);
    printf("\n");
    va_end(list);
    longjmp(ck_back, 1);
}

/* ---- assertions ---- */

#define ck_abort_msg(...) ck_fail(__FILE__, __LINE__, __VA_ARGS__)
#define ck_assert(condition)                                                                                   \
    do {                                                                                                       \
        if (!(condition)) ck_abort_msg("%s does not hold", #condition);                                        \
    } while (0)
#define ck_assert_msg(condition, ...)                                                                          \
    do {                                                                                                       \
        if (!(condition)) ck_abort_msg(__VA_ARGS__);                                                           \
    } while (0)
#define CK_COMPARE(type, format, a, op, b)                                                                     \
    do {                                                                                                       \
        const type ck_a = (a), ck_b = (b);                                                                     \
        if (!(ck_a op ck_b))                                                                                   \
            ck_abort_msg("%s does not hold: " format " and " format, #a " " #op " " #b, ck_a, ck_b);           \
    } while (0)

#define ck_assert_int_eq(a, b) CK_COMPARE(intmax_t, "%jd", a, ==, b)
#define ck_assert_int_ne(a, b) CK_COMPARE(intmax_t, "%jd", a, !=, b)
#define ck_assert_int_lt(a, b) CK_COMPARE(intmax_t, "%jd", a, <, b)
#define ck_assert_int_le(a, b) CK_COMPARE(intmax_t, "%jd", a, <=, b)
#define ck_assert_int_gt(a, b) CK_COMPARE(intmax_t, "%jd", a, >, b)
#define ck_assert_int_ge(a, b) CK_COMPARE(intmax_t, "%jd", a, >=, b)
#define ck_assert_uint_eq(a, b) CK_COMPARE(uintmax_t, "%ju", a, ==, b)
#define ck_assert_uint_ne(a, b) CK_COMPARE(uintmax_t, "%ju", a, !=, b)
#define ck_assert_uint_lt(a, b) CK_COMPARE(uintmax_t, "%ju", a, <, b)
#define ck_assert_uint_gt(a, b) CK_COMPARE(uintmax_t, "%ju", a, >, b)
#define ck_assert_uint_ge(a, b) CK_COMPARE(uintmax_t, "%ju", a, >=, b)
#define ck_assert_float_eq(a, b) CK_COMPARE(float, "%.9g", a, ==, b)
#define ck_assert_double_eq(a, b) CK_COMPARE(double, "%.17g", a, ==, b)
#define ck_assert_double_lt(a, b) CK_COMPARE(double, "%.17g", a, <, b)
#define ck_assert_double_le(a, b) CK_COMPARE(double, "%.17g", a, <=, b)
#define ck_assert_double_gt(a, b) CK_COMPARE(double, "%.17g", a, >, b)
#define ck_assert_double_ge(a, b) CK_COMPARE(double, "%.17g", a, >=, b)
#define ck_assert_double_eq_tol(a, b, tolerance) CK_COMPARE(double, "%.17g", fabs((a) - (b)), <=, tolerance)
#define ck_assert_double_nan(a) ck_assert(isnan(a))
#define ck_assert_ptr_eq(a, b) ck_assert((const void *)(a) == (const void *)(b))
#define ck_assert_ptr_ne(a, b) ck_assert((const void *)(a) != (const void *)(b))
#define ck_assert_ptr_null(a) ck_assert((a) == NULL)
#define ck_assert_ptr_nonnull(a) ck_assert((a) != NULL)
#define ck_assert_mem_eq(a, b, bytes) ck_assert(!memcmp(a, b, bytes))
#define CK_STRINGS(a, equal, b)                                                                                \
    do {                                                                                                       \
        const char *ck_a = (a), *ck_b = (b);                                                                   \
        if (!ck_a || !ck_b || (strcmp(ck_a, ck_b) == 0) != (equal))                                            \
            ck_abort_msg("%s is \"%s\", %s \"%s\"", #a, ck_a ? ck_a : "(null)",                                \
                         (equal) ? "expected" : "and must not be", ck_b ? ck_b : "(null)");                    \
    } while (0)
#define ck_assert_str_eq(a, b) CK_STRINGS(a, 1, b)
#define ck_assert_str_ne(a, b) CK_STRINGS(a, 0, b)

/* ---- suites ---- */

static inline void *ck_new(size_t bytes) {
    void *memory = calloc(1, bytes);
    if (memory) return memory;
    fprintf(stderr, "out of memory for a suite\n");
    exit(EXIT_FAILURE);
}

static inline Suite *suite_create(const char *name) {
    Suite *suite = (Suite *)ck_new(sizeof *suite);
    suite->name = name;
    return suite;
}

static inline TCase *tcase_create(const char *name) {
    TCase *tcase = (TCase *)ck_new(sizeof *tcase);
    tcase->name = name;
    tcase->seconds = CK_SECONDS;
    return tcase;
}

static inline void ck_room(int n) {
    if (n < CK_MOST) return;
    fprintf(stderr, "a suite has more than %d cases or tests\n", CK_MOST);
    exit(EXIT_FAILURE);
}

static inline void suite_add_tcase(Suite *suite, TCase *tcase) {
    ck_room(suite->n_cases);
    suite->cases[suite->n_cases++] = tcase;
}

static inline void tcase_set_timeout(TCase *tcase, double seconds) { tcase->seconds = seconds; }

static inline void tcase_add_loop_test(TCase *tcase, const TTest *test, int first, int end) {
    ck_room(tcase->n_tests);
    tcase->tests[tcase->n_tests].test = test;
    tcase->tests[tcase->n_tests].first = first;
    tcase->tests[tcase->n_tests++].end = end;
}

static inline void tcase_add_test(TCase *tcase, const TTest *test) { tcase_add_loop_test(tcase, test, 0, 1); }

static inline void tcase_add_checked_fixture(TCase *tcase, ck_fixture setup, ck_fixture teardown) {
    tcase->setup = setup;
    tcase->teardown = teardown;
}

static inline void tcase_add_unchecked_fixture(TCase *tcase, ck_fixture setup, ck_fixture teardown) {
    tcase->setup_once = setup;
    tcase->teardown_once = teardown;
}

static inline SRunner *srunner_create(Suite *suite) {
    SRunner *runner = (SRunner *)ck_new(sizeof *runner);
    runner->suite = suite;
    return runner;
}

static inline int ck_run_here(const TCase *tcase, const TTest *test, int i) {
    if (setjmp(ck_back)) return EXIT_FAILURE;
    if (tcase->setup) tcase->setup();
    test->fn(i);
    if (tcase->teardown) tcase->teardown();
    return EXIT_SUCCESS;
}

static inline void ck_run(SRunner *runner, const TCase *tcase, const TTest *test, int i) {
    const char *fork_setting = getenv("CK_FORK");
    int status = 0;
    runner->n_run++;
    fflush(NULL);
    if (fork_setting && !strcmp(fork_setting, "no")) {
        status = ck_run_here(tcase, test, i) == EXIT_SUCCESS ? 0 : EXIT_FAILURE << 8;
    } else {
        pid_t child = fork();
        if (child == 0) {
            setpgid(0, 0);
            alarm((unsigned)ceil(tcase->seconds));
            exit(ck_run_here(tcase, test, i));
        }
        if (child < 0) {
            perror("fork");
            exit(EXIT_FAILURE);
        }
        while (waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
        kill(-child, SIGKILL); /* what the test started and left */
    }
    if (!status) return;
    if (WIFSIGNALED(status)) {
        runner->n_errors++;
        if (WTERMSIG(status) == SIGALRM)
            printf("%s, number %d: not done after %g s\n", test->name, i, tcase->seconds);
        else
            printf("%s, number %d: ended by signal %d (%s)\n", test->name, i, WTERMSIG(status),
                   strsignal(WTERMSIG(status)));
    } else {
        runner->n_failures++;
        printf("%s, number %d: failed\n", test->name, i);
    }
}

static inline void srunner_run_all(SRunner *runner, enum print_output how) {
    (void)how;
    printf("Running suite: %s\n", runner->suite->name);
    for (int c = 0; c < runner->suite->n_cases; c++) {
        const TCase *tcase = runner->suite->cases[c];
        if (tcase->setup_once) tcase->setup_once();
        for (int t = 0; t < tcase->n_tests; t++)
            for (int i = tcase->tests[t].first; i < tcase->tests[t].end; i++)
                ck_run(runner, tcase, tcase->tests[t].test, i);
        if (tcase->teardown_once) tcase->teardown_once();
    }
    printf("Checks: %d, Failures: %d, Errors: %d\n", runner->n_run, runner->n_failures, runner->n_errors);
}

static inline int srunner_ntests_failed(const SRunner *runner) { return runner->n_failures + runner->n_errors; }

static inline void srunner_free(SRunner *runner) {
    for (int c = 0; c < runner->suite->n_cases; c++) free(runner->suite->cases[c]);
    free(runner->suite);
    free(runner);
}

#endif
