/* Gated pooling: stored vectors, and small segments worked out by hand. Numbers named S.. are bug reports
 * turned into inputs with a known answer. */
#include "tests/support.h"

#define FOR_REAL(dtype) for (cg_dtype dtype = CG_F32; dtype <= CG_F64; dtype++)

typedef struct pooled {
    bench b;
    cg_rows rows;
    cg_value *kv, *gate, *ape, *out;
} pooled;

/* kv, gate [T, columns], ape [ratio, columns] (NULL: zeros), dout [C, d] (NULL: ones). */
static pooled pool(cg_dtype dtype, const int32_t *cu_seqlens, int64_t B, int64_t T, int64_t ratio, int64_t C,
                   bool overlap, int64_t columns, const double *kv, const double *gate, const double *ape,
                   const double *dout) {
    pooled p = {.b = bench_new(dtype)};
    p.kv = bench_real(&p.b, "kv", CG_SHAPE(T, columns), kv);
    p.gate = bench_real(&p.b, "gate", CG_SHAPE(T, columns), gate);
    p.ape = bench_real(&p.b, "ape", CG_SHAPE(ratio, columns), ape);
    cg_value *cu = bench_i32(&p.b, "cu_seqlens", CG_SHAPE(B + 1), cu_seqlens);
    p.rows = cg_segment_rows(p.b.graph, cu, NULL, T, ratio, C);
    cg_keep(p.rows.cu_compressed), cg_keep(p.rows.entries), cg_keep(p.rows.entry_positions);
    p.out =
        cg_csa_compress(p.b.graph, p.kv, p.gate, p.ape, p.rows.entries, p.rows.entry_positions, ratio, overlap);
    bench_backward(&p.b, p.out, dout);
    bench_run(&p.b);
    return p;
}

/* ---- stored vectors ---- */

static void golden_case(const char *group, const int32_t *cu_seqlens, int64_t B, int64_t batch, int64_t ratio,
                        bool overlap) {
    cg_safetensors *file = golden_open("compressor");
    char key[64];
    const char *const names[] = {"in.kv",  "in.gate", "in.ape",    "in.dout",
                                 "oracle", "grad.kv", "grad.gate", "grad.ape"};
    double *data[8];
    for (int i = 0; i < 8; i++) {
        if (i == 4)
            snprintf(key, sizeof key, "oracle.%s.compressed", group);
        else
            snprintf(key, sizeof key, "%s.%s", group, names[i]);
        bool is_ape = i == 2 || i == 7;
        data[i] = golden_get(file, key, is_ape ? 0 : batch);
    }
    snprintf(key, sizeof key, "%s.in.ape", group);
    const int64_t columns = cg_safetensors_find(file, key)->shape.dims[1], d = columns / (overlap ? 2 : 1);
    snprintf(key, sizeof key, "%s.in.dout", group);
    const int64_t C = cg_safetensors_find(file, key)->shape.dims[0] * batch, T = cu_seqlens[B];
    FOR_REAL(dtype) {
        pooled p =
            pool(dtype, cu_seqlens, B, T, ratio, C, overlap, columns, data[0], data[1], data[2], data[3]);
        expect_close(group, bench_get(&p.b, p.out), data[4], C * d, dtype == CG_F64 ? 1e-12 : 1e-5);
        /* gradients are stored by the float32 reference only */
        expect_close("grad.kv", bench_grad(&p.b, p.kv), data[5], T * columns, 1e-5);
        expect_close("grad.gate", bench_grad(&p.b, p.gate), data[6], T * columns, 1e-5);
        expect_close("grad.ape", bench_grad(&p.b, p.ape), data[7], ratio * columns, 1e-5);
        bench_free(&p.b);
    }
    for (int i = 0; i < 8; i++) free(data[i]);
    cg_safetensors_close(file);
}

START_TEST(batch_with_overlap) { golden_case("r4", (int32_t[]){0, 19, 38}, 2, 2, 4, true); }
END_TEST

START_TEST(batch_without_overlap) { golden_case("r128", (int32_t[]){0, 300}, 1, 1, 128, false); }
END_TEST

START_TEST(packed_segments) { golden_case("r4_thd", (int32_t[]){0, 21, 24, 38}, 3, 1, 4, true); }
END_TEST

/* ---- by hand ---- */

/* Ratio 2, one channel, first half A = 1 2 3 4, second half B = 10 20 30 40. */
static const double halves[] = {1, 10, 2, 20, 3, 30, 4, 40};
static const double rising_gates[] = {0, 0, 1, 1, 2, 2, 0.5, 0.5};

static double digits(cg_dtype dtype) { return dtype == CG_F64 ? 1e-10 : 2e-6; }

/* S24: the overlap stays in its segment. */
START_TEST(overlap_ends_at_the_border) {
    const double zeros[8] = {0};
    static const struct {
        bool gates, two;
        double want[2];
    } cases[] = {{false, false, {15, 18.25}},
                 {false, true, {15, 35}},
                 {true, false, {17.3105857863, 23.0523465662}},
                 {true, true, {17.3105857863, 31.8242552381}}};
    for (int c = 0; c < 4; c++) FOR_REAL(dtype) {
            const int32_t cu[] = {0, cases[c].two ? 2 : 4, 4};
            pooled p = pool(dtype, cu, cases[c].two ? 2 : 1, 4, 2, 2, true, 2, halves,
                            cases[c].gates ? rising_gates : zeros, NULL, NULL);
            expect_close("out", bench_get(&p.b, p.out), cases[c].want, 2, digits(dtype));
            bench_free(&p.b);
        }
}
END_TEST

/* Every packed segment is what it is alone, bit for bit, forward and backward. */
START_TEST(segments_are_independent) {
    enum { T = 23, COLUMNS = 6, MOST = T * COLUMNS };
    static const int32_t cu[] = {0, 9, 9, 12, 23};
    double kv[MOST], gate[MOST], ape[4 * COLUMNS], dout[5 * 3];
    for (int i = 0; i < MOST; i++) kv[i] = sin(1.0 + i), gate[i] = 2 * cos(5.0 * i);
    for (int i = 0; i < 4 * COLUMNS; i++) ape[i] = sin(3.0 * i);
    for (int i = 0; i < 15; i++) dout[i] = cos(2.0 * i);
    FOR_REAL(dtype) {
        pooled all = pool(dtype, cu, 4, T, 4, 5, true, COLUMNS, kv, gate, ape, dout);
        const double *out = bench_get(&all.b, all.out), *dkv = bench_grad(&all.b, all.kv);
        const double *dgate = bench_grad(&all.b, all.gate);
        for (int b = 0, c = 0; b < 4; b++) {
            int n = cu[b + 1] - cu[b], at = cu[b] * COLUMNS, entries = n / 4;
            pooled one = pool(dtype, (int32_t[]){0, n}, 1, n, 4, entries, true, COLUMNS, kv + at, gate + at,
                              ape, dout + 3 * c);
            ck_assert_mem_eq(out + 3 * c, bench_get(&one.b, one.out), sizeof(double) * (size_t)(3 * entries));
            ck_assert_mem_eq(dkv + at, bench_grad(&one.b, one.kv), sizeof(double) * (size_t)(n * COLUMNS));
            ck_assert_mem_eq(dgate + at, bench_grad(&one.b, one.gate), sizeof(double) * (size_t)(n * COLUMNS));
            c += entries;
            bench_free(&one.b);
        }
        double nothing[3] = {0}; /* spare room: none here, so ask for more */
        pooled roomy = pool(dtype, cu, 4, T, 4, 6, true, COLUMNS, kv, gate, ape, NULL);
        ck_assert_mem_eq(bench_get(&roomy.b, roomy.out) + 15, nothing, sizeof nothing);
        ck_assert_mem_eq(bench_get(&roomy.b, roomy.out), out, 15 * sizeof(double));
        bench_free(&roomy.b);
        bench_free(&all.b);
    }
}
END_TEST

/* S25: the missing predecessor is no slot, neither in the value nor in the gradient. */
START_TEST(no_predecessor) {
    const double gates[] = {0, 0, 0, 1}, kv[] = {NAN, 10, INFINITY, 20};
    FOR_REAL(dtype) {
        pooled p = pool(dtype, (int32_t[]){0, 2}, 1, 2, 2, 1, true, 2, kv, gates, NULL, NULL);
        expect_close("out", bench_get(&p.b, p.out), (const double[]){17.3105857863}, 1, digits(dtype));
        const double *dkv = bench_grad(&p.b, p.kv), *dgate = bench_grad(&p.b, p.gate),
                     *dape = bench_grad(&p.b, p.ape);
        for (int t = 0; t < 2; t++) ck_assert(dkv[2 * t] == 0 && dgate[2 * t] == 0 && dape[2 * t] == 0);
        const double a = 1 / (1 + exp(1)), b = 1 - a, e = 10 * a + 20 * b;
        expect_close("dkv", (double[]){dkv[1], dkv[3]}, (const double[]){a, b}, 2, digits(dtype));
        expect_close("dgate", (double[]){dgate[1], dgate[3]}, (const double[]){a * (10 - e), b * (20 - e)}, 2,
                     digits(dtype));
        bench_free(&p.b);
    }
}
END_TEST

/* S26: segments shorter than the ratio. */
START_TEST(short_segments) {
    static const struct {
        int32_t cu[3];
        int B, entries;
    } cases[] = {{{0, 3, 5}, 2, 0}, {{0, 1}, 1, 0}, {{0, 21}, 1, 5},
                 {{0, 5}, 1, 1},    {{0, 4}, 1, 1}, {{0, 3}, 1, 0}};
    double kv[21 * 4], zeros[21 * 4] = {0};
    for (int i = 0; i < 84; i++) kv[i] = sin(i);
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) FOR_REAL(dtype) {
            const int64_t T = cases[c].cu[cases[c].B];
            pooled p =
                pool(dtype, cases[c].cu, cases[c].B, T, 4, cases[c].entries, true, 4, kv, zeros, NULL, NULL);
            ck_assert_int_eq(bench_get_i32(&p.b, p.rows.cu_compressed)[cases[c].B], cases[c].entries);
            if (cases[c].entries == 0) {
                ck_assert_mem_eq(bench_grad(&p.b, p.kv), zeros, sizeof(double) * (size_t)(4 * T));
                ck_assert_mem_eq(bench_grad(&p.b, p.gate), zeros, sizeof(double) * (size_t)(4 * T));
                ck_assert_mem_eq(bench_grad(&p.b, p.ape), zeros, sizeof(double) * 16);
            }
            bench_free(&p.b);
        }
}
END_TEST

/* S27: groups are counted from each segment's start; tokens in no group get exactly nothing. */
START_TEST(groups_of_each_segment) {
    double kv[15 * 4], gate[15 * 4];
    for (int i = 0; i < 60; i++) kv[i] = sin(i), gate[i] = cos(i);
    FOR_REAL(dtype) {
        pooled p = pool(dtype, (int32_t[]){0, 3, 8, 15}, 3, 15, 4, 3, true, 4, kv, gate, NULL, NULL);
        ck_assert_mem_eq(bench_get_i32(&p.b, p.rows.cu_compressed), ((int32_t[]){0, 0, 1, 2}), 16);
        ck_assert_mem_eq(bench_get_i32(&p.b, p.rows.entries), ((int32_t[]){3, 8, -1}), 12);
        ck_assert_mem_eq(bench_get_i32(&p.b, p.rows.entry_positions), ((int32_t[]){0, 0, -1}), 12);
        const double *dkv = bench_grad(&p.b, p.kv), *dgate = bench_grad(&p.b, p.gate);
        for (int t = 0; t < 15; t++) {
            bool in_group = (t >= 3 && t < 7) || (t >= 8 && t < 12);
            for (int j = 0; j < 4; j++) {
                ck_assert(in_group && j >= 2 ? dkv[t * 4 + j] != 0 : dkv[t * 4 + j] == 0);
                ck_assert(in_group && j >= 2 ? dgate[t * 4 + j] != 0 : dgate[t * 4 + j] == 0);
            }
        }
        bench_free(&p.b);
    }
}
END_TEST

/* The gradient of a sum of entries with flat gates (the numbers of S32): both roles of a token. */
START_TEST(both_roles_of_a_token) {
    double kv[20], zeros[20] = {0};
    for (int t = 0; t < 10; t++) kv[2 * t] = t + 1, kv[2 * t + 1] = 10 * (t + 1);
    FOR_REAL(dtype) {
        pooled p = pool(dtype, (int32_t[]){0, 10}, 1, 10, 4, 2, true, 2, kv, zeros, NULL, NULL);
        expect_close("out", bench_get(&p.b, p.out), (const double[]){25, 33.75}, 2, digits(dtype));
        const double *dkv = bench_grad(&p.b, p.kv), *dgate = bench_grad(&p.b, p.gate);
        for (int t = 0; t < 10; t++) {
            ck_assert(dkv[2 * t] == (t < 4 ? 0.125 : 0));
            ck_assert(dkv[2 * t + 1] == (t < 4 ? 0.25 : t < 8 ? 0.125 : 0));
        }
        double first[4], own[4];
        for (int t = 0; t < 4; t++) first[t] = dgate[2 * t], own[t] = dgate[2 * (t + 4) + 1];
        expect_close("A", first, (const double[]){-4.09375, -3.96875, -3.84375, -3.71875}, 4, digits(dtype));
        expect_close("B", own, (const double[]){2.03125, 3.28125, 4.53125, 5.78125}, 4, digits(dtype));
        bench_free(&p.b);
    }
}
END_TEST

/* dape is dgate summed over the tokens of one offset, however many entries there are. */
START_TEST(ape_sums_over_all_entries) {
    enum { T = 203, COLUMNS = 4 };
    double kv[T * COLUMNS], gate[T * COLUMNS], dout[50 * 2];
    for (int i = 0; i < T * COLUMNS; i++) kv[i] = sin(1.0 + i), gate[i] = cos(5.0 * i);
    for (int i = 0; i < 100; i++) dout[i] = 1 + cos(2.0 * i);
    FOR_REAL(dtype) {
        pooled p = pool(dtype, (int32_t[]){0, 100, T}, 2, T, 4, 50, true, COLUMNS, kv, gate, NULL, dout);
        const double *dgate = bench_grad(&p.b, p.gate);
        double want[4 * COLUMNS] = {0}, largest = 0;
        for (int i = 0; i < T * COLUMNS; i++) want[i / COLUMNS % 4 * COLUMNS + i % COLUMNS] += dgate[i];
        for (int i = 0; i < 4 * COLUMNS; i++) largest = fmax(largest, fabs(want[i]));
        ck_assert(largest > 0.01);
        expect_close("dape", bench_grad(&p.b, p.ape), want, 4 * COLUMNS, dtype == CG_F64 ? 1e-12 : 1e-5);
        bench_free(&p.b);
    }
}
END_TEST

SUITE("op_csa_compress", batch_with_overlap, batch_without_overlap, packed_segments, overlap_ends_at_the_border,
      segments_are_independent, no_predecessor, short_segments, groups_of_each_segment, both_roles_of_a_token,
      ape_sums_over_all_entries)
