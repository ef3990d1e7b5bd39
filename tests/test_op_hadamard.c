/* The Hadamard rotation: orthonormal, its own inverse, in Sylvester order. */
#include "tests/support.h"

#define FOR_REAL(dtype) for (cg_dtype dtype = CG_F32; dtype <= CG_F64; dtype++)

static double bound_of(cg_dtype dtype) { return dtype == CG_F64 ? 1e-14 : 1e-6; }

/* Row r, column c of H has the sign of the parity of r & c. */
START_TEST(is_the_matrix_and_its_inverse) {
    FOR_REAL(dtype) for (int n = 1; n <= 256; n *= 2) {
        bench b = bench_new(dtype);
        double x[2 * 256], want[2 * 256] = {0};
        for (int i = 0; i < 2 * n; i++) x[i] = (float)sin(3 * i + 1);
        for (int i = 0; i < 2 * n; i++)
            for (int c = 0; c < n; c++)
                want[i] += (__builtin_parity((unsigned)(i % n & c)) ? -1 : 1) * x[i / n * n + c] / sqrt(n);
        cg_value *y = cg_keep(cg_hadamard(b.graph, bench_real(&b, "x", CG_SHAPE(2, n), x)));
        cg_value *back = cg_keep(cg_hadamard(b.graph, y));
        bench_run(&b);
        expect_close("y", bench_get(&b, y), want, 2 * n, bound_of(dtype));
        expect_close("back", bench_get(&b, back), x, 2 * n, bound_of(dtype));
        bench_free(&b);
    }
}
END_TEST

/* S22: turning both sides of a dot product leaves it as it is; turning one side does not. */
START_TEST(keeps_dot_products) {
    const double x[] = {1, 2, 0, -1, 1, 1, 0, 0, 0, 0, 1, 2, 1, 0, 2, 0}, dots[] = {3, -2, 1},
                 one_side[] = {1, 0, 5};
    FOR_REAL(dtype) {
        bench b = bench_new(dtype);
        cg_value *y = cg_keep(cg_hadamard(b.graph, bench_real(&b, "x", CG_SHAPE(4, 4), x)));
        bench_run(&b);
        const double *turned = bench_get(&b, y);
        double both[3] = {0}, one[3] = {0};
        for (int k = 0; k < 3; k++)
            for (int d = 0; d < 4; d++) {
                both[k] += turned[d] * turned[4 * (k + 1) + d];
                one[k] += turned[d] * x[4 * (k + 1) + d];
            }
        expect_close("both sides", both, dots, 3, bound_of(dtype));
        expect_close("one side", one, one_side, 3, bound_of(dtype));
        bench_free(&b);
    }
}
END_TEST

SUITE("op_hadamard", is_the_matrix_and_its_inverse, keeps_dot_products)
