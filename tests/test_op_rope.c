/* Rotary embedding: positions and frequencies worked out by hand, the pair layout, the inverse. */
#include "tests/support.h"

#include "core/base/rng.h"

static const cg_rope_attr plain = {.n_rotary = 4, .base = 10000}; /* frequencies 1 and 0.01 */

/* Rotate x [N, D] (or [N, heads, D]) in f64; the result is freed with the bench. */
static double *rotate(bench *b, cg_shape shape, const double *x, const int32_t *positions,
                      const cg_rope_attr *attr) {
    *b = bench_new(CG_F64);
    cg_value *y = cg_keep(cg_rope(b->graph, bench_real(b, "x", shape, x),
                                  bench_i32(b, "positions", CG_SHAPE(shape.dims[0]), positions), attr));
    bench_run(b);
    return bench_get(b, y);
}

START_TEST(neighbouring_channels_are_pairs) { /* half against half would give -3.144, 1.920, -0.339, 4.039 */
    bench b;
    const double want[] = {-2.2347416902, 0.0770037537, 2.9194053532, 4.0591960267};
    double *y = rotate(&b, CG_SHAPE(1, 4), (double[]){1, 2, 3, 4}, (int32_t[]){2}, &plain);
    expect_close("y", y, want, 4, 1e-10);
    bench_free(&b);
}
END_TEST

START_TEST(leading_channels_keep_their_bits) {
    for (cg_dtype dtype = CG_F32; dtype <= CG_F64; dtype++) {
        bench b = bench_new(dtype);
        double x[2 * 3 * 7];
        for (int i = 0; i < 42; i++) x[i] = cos(i) * 1e3;
        cg_value *leaf = bench_real(&b, "x", CG_SHAPE(2, 3, 7), x);
        cg_value *y =
            cg_keep(cg_rope(b.graph, leaf, bench_i32(&b, "p", CG_SHAPE(2), (int32_t[]){5, 900}), &plain));
        bench_run(&b);
        double *from = bench_get(&b, leaf), *to = bench_get(&b, y);
        for (int row = 0; row < 6; row++)
            for (int j = 0; j < 7; j++) ck_assert_int_eq(from[7 * row + j] == to[7 * row + j], j < 3);
        bench_free(&b);
    }
}
END_TEST

START_TEST(all_heads_of_a_row_turn_alike) {
    bench b, single;
    const double x[] = {1, 2, 3, 4, 5, 6, 7, 8};
    double *y = rotate(&b, CG_SHAPE(1, 2, 4), x, (int32_t[]){11}, &plain);
    double *z = rotate(&single, CG_SHAPE(2, 4), x, (int32_t[]){11, 11}, &plain);
    for (int i = 0; i < 8; i++) ck_assert(y[i] == z[i]);
    bench_free(&b);
    bench_free(&single);
}
END_TEST

START_TEST(padding_rows_keep_their_bits) {
    bench b;
    double x[] = {1, NAN, INFINITY, -0.0};
    double *y = rotate(&b, CG_SHAPE(1, 4), x, (int32_t[]){-1}, &plain);
    ck_assert(!memcmp(y, x, sizeof x));
    bench_free(&b);
}
END_TEST

START_TEST(inverse_undoes_forward) {
    cg_rope_attr forward = {.n_rotary = 6,
                            .base = 160000,
                            .yarn_factor = 16,
                            .yarn_original_length = 65536,
                            .yarn_beta_fast = 32,
                            .yarn_beta_slow = 1};
    cg_rope_attr inverse = forward;
    inverse.inverse = true;
    bench b = bench_new(CG_F64);
    double x[3 * 2 * 8];
    for (int i = 0; i < 48; i++) x[i] = sin(3.0 * i);
    cg_value *leaf = bench_real(&b, "x", CG_SHAPE(3, 2, 8), x);
    cg_value *positions = bench_i32(&b, "p", CG_SHAPE(3), (int32_t[]){0, 17, 1048575});
    cg_value *turned = cg_keep(cg_rope(b.graph, leaf, positions, &forward));
    cg_value *back = cg_rope(b.graph, turned, positions, &inverse);
    bench_backward(&b, back, x);
    bench_run(&b);
    expect_close("inverse of forward", bench_get(&b, back), x, 48, 1e-14);
    expect_close("and its gradient", bench_grad(&b, leaf), x, 48, 1e-14);
    ck_assert(fabs(bench_get(&b, turned)[47] - x[47]) > 1e-3);
    bench_free(&b);
}
END_TEST

/* A compressed row turns by the position of the first token of its group, 3 * 4, not by its own number. */
START_TEST(compressed_rows_turn_by_their_first_token) {
    bench b;
    const cg_rope_attr one = {.n_rotary = 2, .base = 10000};
    double *y = rotate(&b, CG_SHAPE(2, 2), (double[]){1, 0, 1, 0}, (int32_t[]){3 * 4, 15}, &one);
    expect_close("key", y, (double[]){0.8438539587, -0.5365729180}, 2, 1e-10);
    double dot = y[0] * y[2] + y[1] * y[3], want = -0.9899924966;
    expect_close("query . key", &dot, &want, 1, 1e-10);
    bench_free(&b);
}
END_TEST

START_TEST(an_offset_of_all_positions_changes_no_score) {
    double x[] = {0.3, -1.2, 0.8, 2.1, -0.7, 0.4, 1.9, -0.2}, scores[2];
    for (int offset = 0; offset < 2; offset++) {
        bench b;
        double *y = rotate(&b, CG_SHAPE(2, 4), x, (int32_t[]){12 + 1000 * offset, 15 + 1000 * offset}, &plain);
        scores[offset] = y[0] * y[4] + y[1] * y[5] + y[2] * y[6] + y[3] * y[7];
        bench_free(&b);
    }
    expect_close("score", &scores[1], &scores[0], 1, 1e-12);
}
END_TEST

START_TEST(frequencies_of_deepseek_v4) {
    const cg_rope_attr window = {.n_rotary = 64, .base = 10000};
    const cg_rope_attr compress = {.n_rotary = 64,
                                   .base = 160000,
                                   .yarn_factor = 16,
                                   .yarn_original_length = 65536,
                                   .yarn_beta_fast = 32,
                                   .yarn_beta_slow = 1};
    const int pairs[] = {14, 16, 20, 24, 31};
    const double want[] = {0.00528685632, 0.002265625, 2.96977778e-4, 1.953125e-5, 5.68052904e-7};
    for (int i = 0; i < 5; i++) {
        double f = cg_rope_frequency(&compress, pairs[i]);
        expect_close("YaRN frequency", &f, &want[i], 1, 1e-8);
    }
    ck_assert(cg_rope_frequency(&window, 0) == 1 && cg_rope_frequency(&compress, 0) == 1);
    double f = cg_rope_frequency(&window, 16), hundredth = 0.01;
    expect_close("plain frequency", &f, &hundredth, 1, 1e-14);
    /* blended from pair 15 on to pair 25, where it is a 16th */
    cg_rope_attr unblended = compress;
    unblended.yarn_factor = 1;
    ck_assert(cg_rope_frequency(&compress, 15) == cg_rope_frequency(&unblended, 15));
    ck_assert(cg_rope_frequency(&compress, 16) < cg_rope_frequency(&unblended, 16));
    ck_assert(cg_rope_frequency(&compress, 24) > cg_rope_frequency(&unblended, 24) / 16);
    ck_assert(cg_rope_frequency(&compress, 25) == cg_rope_frequency(&unblended, 25) / 16);
}
END_TEST

/* Both ends of the ramp in one place: a ramp of no length must not divide by 0. */
START_TEST(yarn_with_a_ramp_of_no_length) {
    const cg_rope_attr attr = {.n_rotary = 4,
                               .base = 10000,
                               .yarn_factor = 4,
                               .yarn_original_length = 6,
                               .yarn_beta_fast = 1e-3,
                               .yarn_beta_slow = 1e-3};
    for (int i = 0; i < 2; i++) {
        double f = cg_rope_frequency(&attr, i);
        ck_assert(f > 0 && f <= 1);
    }
}
END_TEST

/* Rows of one long sequence, against the library's sines of each angle; in pieces of a few rows, and row by row, they
 * have the same bits. */
START_TEST(few_rows_and_many_turn_alike) {
    enum { N = 300, D = 8 };
    const cg_rope_attr attr = {.n_rotary = D, .base = 10000};
    double x[N * D], whole[N * D];
    int32_t positions[N];
    for (int64_t i = 0; i < N * D; i++) x[i] = cg_random_normal(31, 0, (uint64_t)i);
    for (int dtype = CG_F32; dtype <= CG_F64; dtype++)
        for (int64_t rows = N; rows > 0; rows = rows == N ? 7 : rows == 7 ? 1 : 0)
            for (int64_t first = 0; first < N; first += rows) {
                const int64_t n = N - first < rows ? N - first : rows;
                for (int64_t i = 0; i < n; i++) positions[i] = (int32_t)(first + i) * 5;
                bench b = bench_new((cg_dtype)dtype);
                cg_value *in = bench_real(&b, "x", CG_SHAPE(n, D), x + first * D);
                cg_value *y = cg_keep(cg_rope(b.graph, in, bench_i32(&b, "p", CG_SHAPE(n), positions), &attr));
                bench_run(&b);
                const double *got = bench_get(&b, y);
                for (int64_t i = 0; rows == N && i < N * D / 2; i++) {
                    const double angle = positions[i / (D / 2)] * cg_rope_frequency(&attr, i % (D / 2));
                    whole[2 * i] = x[2 * i] * cos(angle) - x[2 * i + 1] * sin(angle);
                    whole[2 * i + 1] = x[2 * i] * sin(angle) + x[2 * i + 1] * cos(angle);
                }
                if (rows == N) {
                    expect_close("y", got, whole, N * D, dtype == CG_F32 ? 1e-7 : 1e-13);
                    memcpy(whole, got, sizeof whole);
                }
                ck_assert(!memcmp(got, whole + first * D, (size_t)(n * D) * sizeof(double)));
                bench_free(&b);
            }
}
END_TEST

/* An f32 angle at this position would be wrong in the second digit. */
START_TEST(far_positions_in_f32) {
    bench b = bench_new(CG_F32);
    const cg_rope_attr one = {.n_rotary = 2, .base = 10000};
    cg_value *y = cg_keep(cg_rope(b.graph, bench_real(&b, "x", CG_SHAPE(1, 2), (double[]){1, 0}),
                                  bench_i32(&b, "p", CG_SHAPE(1), (int32_t[]){1048575}), &one));
    bench_run(&b);
    expect_close("y", bench_get(&b, y), (double[]){cos(1048575.0), sin(1048575.0)}, 2, 1e-7);
    bench_free(&b);
}
END_TEST

SUITE("rope", neighbouring_channels_are_pairs, leading_channels_keep_their_bits, all_heads_of_a_row_turn_alike,
      padding_rows_keep_their_bits, inverse_undoes_forward, compressed_rows_turn_by_their_first_token,
      an_offset_of_all_positions_changes_no_score, frequencies_of_deepseek_v4, yarn_with_a_ramp_of_no_length,
      few_rows_and_many_turn_alike, far_positions_in_f32)
