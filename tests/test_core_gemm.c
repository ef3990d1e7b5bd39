#include "tests/support.h"

#include <omp.h>

#include "core/math/gemm.h"
#include "core/base/threads.h"

enum { GUARD = 64, GUARD_BYTE = 0xA5 };

/* Memory of exactly the stated size between two guards, on a 64-byte boundary plus `shift`. */
typedef struct guarded {
    unsigned char *base, *data;
    size_t bytes;
} guarded;

static guarded guarded_new(size_t bytes, size_t shift) {
    guarded g = {aligned_alloc(64, (2 * GUARD + bytes + shift + 127) / 64 * 64), NULL, bytes};
    ck_assert_ptr_nonnull(g.base);
    g.data = g.base + GUARD + shift;
    memset(g.base, GUARD_BYTE, GUARD + shift);
    memset(g.data, 0xFF, bytes); /* NaN in f32 and in f64 */
    memset(g.data + bytes, GUARD_BYTE, GUARD);
    return g;
}

static void guarded_free(guarded g) {
    int touched = 0;
    for (unsigned char *p = g.base; p < g.data; p++) touched += *p != GUARD_BYTE;
    for (int i = 0; i < GUARD; i++) touched += g.data[g.bytes + (size_t)i] != GUARD_BYTE;
    ck_assert_msg(!touched, "%d bytes written outside of %zu", touched, g.bytes);
    free(g.base);
}

static uint64_t state;
static double draw(void) {
    state = state * UINT64_C(6364136223846793005) + 1442695040888963407u;
    return (double)(int64_t)(state >> 33) / (double)(1 << 30) - 1;
}

static const cg_dtype dtypes[] = {CG_F32, CG_F64, CG_BF16};

static double get(cg_dtype dtype, const void *x, int64_t i) { return cg_dtype_get(dtype, x, i); }
static void put(cg_dtype dtype, void *x, int64_t i, double value) { cg_dtype_set(dtype, x, i, value); }

static void fill(cg_dtype dtype, guarded *x, int64_t rows, int64_t width, int64_t ld) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < width; j++) put(dtype, x->data, i * ld + j, draw());
}

static int64_t extent(int64_t rows, int64_t width, int64_t ld) {
    return rows > 0 && width > 0 ? (rows - 1) * ld + width : 0;
}

/* Everything that is promised about one product. What lies between the rows of A and B is NaN; what lies
 * between the rows of C must stay. */
static void check(cg_gemm g, int64_t pad, size_t shift) {
    const cg_dtype c_dtype = g.c_is_f32 ? CG_F32 : g.dtype;
    const size_t bytes = cg_dtype_bytes(g.dtype), c_element = cg_dtype_bytes(c_dtype);
    const size_t c_shift =
        (shift + c_element - 1) / c_element * c_element; /* odd, but where its elements may lie */
    g.lda += pad, g.ldb += 2 * pad, g.ldc += 3 * pad;
    int64_t a_rows = g.trans_a ? g.k : g.m, a_width = g.trans_a ? g.m : g.k;
    int64_t b_rows = g.trans_b ? g.n : g.k, b_width = g.trans_b ? g.k : g.n;
    guarded a = guarded_new((size_t)extent(a_rows, a_width, g.lda) * bytes, shift);
    guarded b = guarded_new((size_t)extent(b_rows, b_width, g.ldb) * bytes, shift);
    size_t c_bytes = (size_t)extent(g.m, g.n, g.ldc) * c_element;
    guarded before = guarded_new(c_bytes, 0);
    fill(g.dtype, &a, a_rows, a_width, g.lda);
    fill(g.dtype, &b, b_rows, b_width, g.ldb);
    if (g.accumulate) fill(c_dtype, &before, g.m, g.n, g.ldc);

    size_t workspace_bytes = cg_gemm_workspace(&g), serial_bytes = cg_gemm_serial_workspace(&g);
    cg_error error = {0};
    guarded c = {0}, work;
    for (int threads = 1; threads <= (cg_thread_slots() < 2 ? 1 : 2); threads++) {
        guarded again = guarded_new(c_bytes, c_shift);
        memcpy(again.data, before.data, c_bytes);
        ck_assert(cg_threads_set(threads, &error));
        ck_assert_uint_eq(cg_gemm_workspace(&g), workspace_bytes);
        work = guarded_new(workspace_bytes, 0);
        ck_assert_msg(cg_gemm_run(&g, a.data, b.data, again.data, work.data, &error), "%s", error.text);
        guarded_free(work);
        if (threads == 1)
            c = again;
        else {
            ck_assert_mem_eq(c.data, again.data, c_bytes);
            guarded_free(again);
        }
    }
    guarded serial = guarded_new(c_bytes, c_shift);
    memcpy(serial.data, before.data, c_bytes);
    work = guarded_new(serial_bytes, 0);
    ck_assert_msg(cg_gemm_serial(&g, a.data, b.data, serial.data, work.data, &error), "%s", error.text);
    ck_assert_mem_eq(c.data, serial.data, c_bytes);
    guarded_free(work);
    guarded_free(serial);

    /* pairs of bf16 products may be rounded twice; a C in bf16 is rounded once more */
    const double epsilon = g.dtype == CG_F32    ? 0x1p-24
                           : g.dtype == CG_BF16 ? 0x1p-23
                                                : 0x1p-53,
                 rounding = c_dtype == CG_BF16 ? 0x1p-8 : 0;
    for (int64_t i = 0; i < g.m; i++) {
        for (int64_t j = 0; j < g.n; j++) {
            double sum = 0, size = 0;
            for (int64_t k = 0; k < g.k; k++) {
                double product = get(g.dtype, a.data, g.trans_a ? k * g.lda + i : i * g.lda + k) *
                                 get(g.dtype, b.data, g.trans_b ? j * g.ldb + k : k * g.ldb + j);
                sum += product;
                size += fabs(product);
            }
            if (g.accumulate) {
                sum += get(c_dtype, before.data, i * g.ldc + j);
                size += fabs(get(c_dtype, before.data, i * g.ldc + j));
            }
            /* the error of a sum of k terms grows like sqrt(k) at most here; 2 for the reference's own */
            double bound = epsilon * size * (2 + sqrt((double)g.k)) + rounding * fabs(sum);
            double got = get(c_dtype, c.data, i * g.ldc + j);
            if (!(fabs(got - sum) <=
                  bound)) /* a passed ck_assert costs a system call, too much for each element */
                ck_abort_msg("%s m=%d n=%d k=%d ta=%d tb=%d acc=%d pad=%d [%d,%d]: %.17g, expected %.17g +- %g",
                             cg_dtype_name(g.dtype), (int)g.m, (int)g.n, (int)g.k, g.trans_a, g.trans_b,
                             g.accumulate, (int)pad, (int)i, (int)j, got, sum, bound);
        }
        if (i + 1 < g.m && g.n > 0)
            ck_assert_mem_eq(c.data + (size_t)(i * g.ldc + g.n) * c_element,
                             before.data + (size_t)(i * g.ldc + g.n) * c_element,
                             (size_t)(g.ldc - g.n) * c_element);
    }
    guarded_free(a), guarded_free(b), guarded_free(c), guarded_free(before);
}

static void check_all_forms(cg_dtype dtype, int64_t m, int64_t n, int64_t k, int64_t pad, size_t shift) {
    for (int form = 0; form < 8; form++) {
        cg_gemm g = cg_gemm_dense(dtype, form & 1, form & 2, m, n, k);
        g.accumulate = form & 4;
        check(g, pad, shift);
        if (dtype != CG_BF16) continue;
        g.c_is_f32 = true;
        check(g, pad, shift);
    }
}

static const int64_t shapes[][3] = {
    {1, 1, 1},      {1, 1, 300},  {1, 40, 17},  {40, 1, 17},  {3, 5, 7},      {8, 8, 8},
    {9, 33, 5},     {16, 16, 16}, {31, 17, 65}, {64, 64, 64}, {65, 63, 66},   {13, 129, 515},
    {70, 20, 1030}, {300, 7, 40}, {5, 290, 64}, {257, 81, 9}, {130, 150, 33}, {1, 270, 513},
};
enum { N_SHAPES = sizeof shapes / sizeof *shapes };

START_TEST(matches_the_naive_loop_f32) {
    for (int s = 0; s < N_SHAPES; s++) check_all_forms(CG_F32, shapes[s][0], shapes[s][1], shapes[s][2], 0, 0);
}
END_TEST

START_TEST(matches_the_naive_loop_f64) {
    for (int s = 0; s < N_SHAPES; s++) check_all_forms(CG_F64, shapes[s][0], shapes[s][1], shapes[s][2], 0, 0);
}
END_TEST

/* One shape with two blocks of k more. */
START_TEST(matches_the_naive_loop_bf16) {
    for (int s = 0; s < N_SHAPES; s++) check_all_forms(CG_BF16, shapes[s][0], shapes[s][1], shapes[s][2], 0, 0);
    check_all_forms(CG_BF16, 20, 33, 2101, 0, 0);
}
END_TEST

START_TEST(leading_dimensions_and_odd_addresses) {
    for (int s = 0; s < N_SHAPES; s++) {
        if (s % 2 == 0) check_all_forms(CG_F32, shapes[s][0], shapes[s][1], shapes[s][2], 1 + s % 4, 4);
        if (s % 2 == 1) check_all_forms(CG_BF16, shapes[s][0], shapes[s][1], shapes[s][2], 1 + s % 4, 2);
        check_all_forms(CG_F64, shapes[s][0], shapes[s][1], shapes[s][2], 1 + s % 4, 8);
    }
}
END_TEST

START_TEST(empty_sides) {
    for (int d = 0; d < 3; d++) {
        for (int64_t pad = 0; pad < 3; pad++) {
            check_all_forms(dtypes[d], 5, 7, 0, pad, 0); /* zeros, or C as it was */
            check_all_forms(dtypes[d], 0, 7, 5, pad, 0);
            check_all_forms(dtypes[d], 7, 0, 5, pad, 0);
            check_all_forms(dtypes[d], 0, 0, 0, pad, 0);
        }
    }
}
END_TEST

/* A corner of C is the product of the corner's rows and columns, bit for bit: neither the tiles, nor the
 * choice of the kernel, nor the tails show in an element. */
START_TEST(elements_do_not_depend_on_m_and_n) {
    enum { M = 150, N = 200 };
    static const int64_t depths[] = {7, 130, 700, 1200},
                         sides[][2] = {{1, 1}, {3, 2}, {5, 100}, {96, 33}, {150, 9}};
    for (int form = 0; form < 8; form++) {
        for (size_t d = 0; d < sizeof depths / sizeof *depths; d++) {
            int64_t k = depths[d];
            cg_gemm g = cg_gemm_dense(form & 4 ? CG_F64 : CG_F32, form & 1, form & 2, M, N, k);
            size_t bytes = cg_dtype_bytes(g.dtype);
            guarded a = guarded_new((size_t)(M * k) * bytes, 0), b = guarded_new((size_t)(k * N) * bytes, 0);
            fill(g.dtype, &a, 1, M * k, M * k);
            fill(g.dtype, &b, 1, k * N, k * N);
            guarded c = guarded_new((size_t)(M * N) * bytes, 0), work = guarded_new(cg_gemm_workspace(&g), 0);
            ck_assert(cg_gemm_run(&g, a.data, b.data, c.data, work.data, NULL));
            guarded_free(work);
            for (size_t s = 0; s < sizeof sides / sizeof *sides; s++) {
                cg_gemm part = g;
                part.m = sides[s][0], part.n = part.ldc = sides[s][1];
                guarded corner = guarded_new((size_t)(part.m * part.n) * bytes, 0);
                work = guarded_new(cg_gemm_workspace(&part), 0);
                ck_assert(cg_gemm_run(&part, a.data, b.data, corner.data, work.data, NULL));
                for (int64_t i = 0; i < part.m; i++)
                    ck_assert_mem_eq(corner.data + (size_t)(i * part.n) * bytes,
                                     c.data + (size_t)(i * N) * bytes, (size_t)part.n * bytes);
                guarded_free(work), guarded_free(corner);
            }
            guarded_free(a), guarded_free(b), guarded_free(c);
        }
    }
}
END_TEST

/* A row of A with NaN or infinity reaches its row of C and no other, also inside padded panels. */
START_TEST(nan_and_infinity_pass) {
    enum { M = 37, N = 45, K = 70 };
    for (int d = 0; d < 3; d++) {
        for (int size = 0; size < 2; size++) {
            int64_t m = size ? M : 3, n = size ? N : 5, k = size ? K : 7;
            cg_gemm g = cg_gemm_dense(dtypes[d], false, true, m, n, k);
            size_t bytes = cg_dtype_bytes(g.dtype);
            guarded a = guarded_new((size_t)(m * k) * bytes, 0), b = guarded_new((size_t)(n * k) * bytes, 0);
            guarded c = guarded_new((size_t)(m * n) * bytes, 0), work = guarded_new(cg_gemm_workspace(&g), 0);
            for (int64_t i = 0; i < m * k; i++) put(g.dtype, a.data, i, 1);
            for (int64_t i = 0; i < n * k; i++) put(g.dtype, b.data, i, 1);
            put(g.dtype, a.data, 1 * k + 2, NAN);
            put(g.dtype, a.data, 2 * k + 3, -INFINITY);
            cg_error error = {0};
            ck_assert(cg_gemm_run(&g, a.data, b.data, c.data, work.data, &error));
            for (int64_t i = 0; i < m; i++) {
                for (int64_t j = 0; j < n; j++) {
                    double got = get(g.dtype, c.data, i * n + j);
                    if (i == 1)
                        ck_assert(isnan(got));
                    else
                        ck_assert(got == (i == 2 ? -INFINITY : (double)k));
                }
            }
            guarded_free(a), guarded_free(b), guarded_free(c), guarded_free(work);
        }
    }
}
END_TEST

/* Many threads at once on kernels that nobody compiled before. */
START_TEST(serial_inside_a_parallel_region) {
    enum { M = 24, N = 40, K = 50, CALLS = 64 };
    cg_error error = {0};
    ck_assert(cg_threads_set(cg_thread_slots(), &error));
    float *a = malloc(sizeof *a * M * K), *b = malloc(sizeof *b * K * (N + CALLS));
    for (int i = 0; i < M * K; i++) a[i] = (float)draw();
    for (int i = 0; i < K * (N + CALLS); i++) b[i] = (float)draw();
    int wrong = 0;
#pragma omp parallel for schedule(dynamic) reduction(+ : wrong) num_threads(cg_threads())
    for (int call = 0; call < CALLS; call++) {
        cg_gemm g = cg_gemm_dense(CG_F32, false, false, M, N + call / 2, K);
        size_t bytes = (cg_gemm_serial_workspace(&g) + 63) / 64 * 64;
        void *work = bytes ? aligned_alloc(64, bytes) : NULL;
        float *c = malloc(sizeof *c * (size_t)(g.m * g.n));
        if (!cg_gemm_serial(&g, a, b, c, work, NULL)) wrong++;
        for (int64_t i = 0; i < g.m; i++) {
            for (int64_t j = 0; j < g.n; j++) {
                double sum = 0;
                for (int k = 0; k < K; k++) sum += (double)a[i * K + k] * (double)b[k * g.n + j];
                wrong += !(fabs(sum - (double)c[i * g.n + j]) < 1e-4);
            }
        }
        free(c), free(work);
    }
    ck_assert_int_eq(wrong, 0);
    free(a), free(b);
}
END_TEST

START_TEST(thread_numbers_are_checked) {
    cg_error error = {0};
    ck_assert_int_ge(cg_thread_slots(), 1);
    ck_assert(!cg_threads_set(0, &error));
    ck_assert_int_eq(error.code, CG_BAD_INPUT);
    error = (cg_error){0};
    ck_assert(!cg_threads_set(cg_thread_slots() + 1, &error));
    ck_assert_int_eq(error.code, CG_BAD_INPUT);
    for (int n = 1; n <= cg_thread_slots() && n <= 4; n++) {
        ck_assert(cg_threads_set(n, NULL));
        ck_assert_int_eq(cg_threads(), n);
        int seen = 0, high = 0;
#pragma omp parallel reduction(+ : seen) reduction(max : high)
        {
            seen++;
            high = cg_thread_slot();
        }
        ck_assert_int_eq(seen, n);
        ck_assert_int_eq(high, n - 1);
    }
}
END_TEST

int main(void) {
    Suite *suite = suite_create("core_gemm");
    TCase *tests = tcase_create("gemm");
    tcase_set_timeout(tests, 60);
    tcase_add_test(tests, matches_the_naive_loop_f32);
    tcase_add_test(tests, matches_the_naive_loop_f64);
    tcase_add_test(tests, matches_the_naive_loop_bf16);
    tcase_add_test(tests, leading_dimensions_and_odd_addresses);
    tcase_add_test(tests, empty_sides);
    tcase_add_test(tests, elements_do_not_depend_on_m_and_n);
    tcase_add_test(tests, nan_and_infinity_pass);
    tcase_add_test(tests, serial_inside_a_parallel_region);
    tcase_add_test(tests, thread_numbers_are_checked);
    suite_add_tcase(suite, tests);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
