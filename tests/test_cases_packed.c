/* Cases from bug reports about compression, packed documents, padding and ranks (see tests/CASES.md), each tried over
 * its whole kind: sizes, places, borders. */
#include "tests/case_pipeline.h"

/* Random documents of given lengths: cu_seqlens, and ids that make a document's values its own. */
typedef struct documents {
    int n, T;
    int32_t cu[P_SEGMENTS + 1], lengths[P_SEGMENTS];
    int ids[512];
} documents;

static documents pack(const int32_t *lengths, int n) {
    documents d = {.n = n};
    for (int b = 0; b < n; b++) {
        for (int i = 0; i < lengths[b]; i++) d.ids[d.T + i] = 1000 * b + i;
        d.T += lengths[b];
        d.lengths[b] = lengths[b];
        d.cu[b + 1] = d.T;
    }
    return d;
}

static pipe_setup setup_of(cg_dtype dtype, const documents *d, int64_t ratio) {
    return (pipe_setup){.dtype = dtype,
                        .T = d->T,
                        .ratio = ratio,
                        .window = 3,
                        .topk = 2,
                        .n_segments = d->n,
                        .cu_seqlens = d->cu,
                        .ids = d->ids};
}

/* Each document alone is what it is in the pack, bit for bit, and losses add up. */
static void expect_as_alone(cg_dtype dtype, const documents *d, int64_t ratio, bool dense) {
    pipe_setup s = setup_of(dtype, d, ratio);
    s.dense = dense;
    pipeline all = p_whole(&s);
    double loss = 0;
    int64_t first = 0, n_compressed = 0;
    for (int b = 0; b < d->n; b++) {
        const int32_t n = d->lengths[b];
        ck_assert_int_eq(bench_get_i32(&all.b, all.rows.cu_compressed)[b], first);
        for (int32_t i = 0; i < n; i++) {
            ck_assert_int_eq(p_fact(&all, d->cu[b] + i, CG_ROW_START), d->cu[b]);
            ck_assert_int_eq(p_fact(&all, d->cu[b] + i, CG_ROW_POSITION), i);
            ck_assert_int_eq(p_fact(&all, d->cu[b] + i, CG_ROW_VISIBLE), (i + 1) / ratio);
            ck_assert_int_eq(p_fact(&all, d->cu[b] + i, CG_ROW_COMPRESSED), first);
        }
        for (int64_t j = 0; j < n / ratio; j++) {
            ck_assert_int_eq(bench_get_i32(&all.b, all.rows.entries)[first + j], d->cu[b] + j * ratio);
            ck_assert_int_eq(bench_get_i32(&all.b, all.rows.entry_positions)[first + j], j * ratio);
        }
        if (n > 0) {
            pipe_setup one = s;
            one.T = n;
            one.n_segments = 1;
            one.cu_seqlens = (const int32_t[]){0, n};
            one.ids = d->ids + d->cu[b];
            pipeline alone = p_whole(&one);
            p_same_rows(&all, d->cu[b], first, &alone, 0, 0, n, s.topk, true);
            p_same("compressed", p_get(&all, all.ckv), first, p_get(&alone, alone.ckv), 0, n / ratio, P_D);
            loss += p_get(&alone, alone.loss)[0];
            p_free(&alone);
        }
        first += n / ratio;
        n_compressed += n / ratio;
    }
    ck_assert_int_eq(bench_get_i32(&all.b, all.rows.cu_compressed)[d->n], n_compressed);
    expect_close("loss", p_get(&all, all.loss), &loss, 1, dtype == CG_F64 ? 1e-13 : 1e-5);
    p_free(&all);
}

/* Lengths drawn from `choices`; empty and one-token documents among them when these are 0 and 1. */
static documents random_documents(int seed, const int32_t *choices, int n_choices) {
    int32_t lengths[P_SEGMENTS];
    const int n = 1 + (int)cg_random_below((uint64_t)seed, 1, 0, 9);
    for (int b = 0; b < n; b++)
        lengths[b] = choices[cg_random_below((uint64_t)seed, 2, (uint64_t)b, n_choices)];
    return pack(lengths, n);
}

static void expect_zero_rows(const double *x, int64_t from, int64_t to, int64_t width) {
    for (int64_t i = from * width; i < to * width; i++) ck_assert(x[i] == 0);
}

/* ---- compressor ---- */

START_TEST(s24_s25_first_group_of_every_document) {
    static const int32_t choices[] = {4, 5, 8, 9, 12, 3, 2};
    for (int seed = 0; seed < 12; seed++)
        for (int64_t ratio = 2; ratio <= 4; ratio++) FOR_REAL(dtype) {
                documents d = random_documents(seed, choices, 7);
                expect_as_alone(dtype, &d, ratio, false);
            }
}
END_TEST

/* Gates of minus infinity would be the missing slots; equal gates with values 10 and 20 would give 7.5 then. */
START_TEST(s25_any_gates_of_a_first_group) {
    for (int i = 0; i < 60; i++) FOR_REAL(dtype) {
            const double g = -300 + 10.0 * i, gates[] = {0, g, 0, g + 1}, kv[] = {1e30, 10, -1e30, 20};
            bench b = bench_new(dtype);
            cg_value *entries = bench_i32(&b, "entries", CG_SHAPE(1), (int32_t[]){0});
            cg_value *positions = bench_i32(&b, "positions", CG_SHAPE(1), (int32_t[]){0});
            cg_value *out =
                cg_csa_compress(b.graph, bench_real(&b, "kv", CG_SHAPE(2, 2), kv),
                                bench_real(&b, "gate", CG_SHAPE(2, 2), gates),
                                bench_real(&b, "ape", CG_SHAPE(2, 2), NULL), entries, positions, 2, true);
            bench_backward(&b, out, NULL);
            bench_run(&b);
            expect_close("entry", bench_get(&b, out), (double[]){17.310585786300049}, 1,
                         dtype == CG_F64 ? 1e-12 : 1e-6);
            bench_free(&b);
        }
}
END_TEST

START_TEST(s26_lengths_around_the_ratio) {
    for (int64_t ratio = 2; ratio <= 5; ratio++)
        for (int32_t n = 1; n <= 3 * ratio; n++) FOR_REAL(dtype) {
                documents d = pack((int32_t[]){n}, 1);
                pipe_setup s = setup_of(dtype, &d, ratio);
                pipeline p = p_whole(&s);
                for (int i = P_CONTENT; i < P_INPUTS && n < ratio; i++) {
                    const double *x = p_grad(&p, i);
                    for (int64_t k = 0; k < n * p_width[i]; k++) ck_assert(x[k] == 0);
                }
                const double *out = p_get(&p, p.attention.out);
                for (int64_t i = 0; i < n * P_H * P_D; i++) ck_assert(isfinite(out[i]));
                for (int64_t i = 0; i < n * s.topk && n < ratio; i++)
                    ck_assert_int_eq(bench_get_i32(&p.b, p.topk)[i], -1);
                ck_assert_msg((fabs(p_get(&p, p.loss)[0]) > 1e-6) == (n >= 2 * ratio),
                              "length %d, ratio %lld, loss %g", n, (long long)ratio,
                              p_get(&p, p.loss)[0]); /* one visible row is certain */
                p_free(&p);
            }
}
END_TEST

/* Tokens of a tail get no gradient through compression; counts are sums of floors. */
START_TEST(s27_tails_of_random_documents) {
    static const int32_t choices[] = {0, 1, 3, 4, 5, 7, 8, 11};
    for (int seed = 0; seed < 30; seed++) FOR_REAL(dtype) {
            documents d = random_documents(100 + seed, choices, 8);
            if (d.T == 0) continue;
            pipe_setup s = setup_of(dtype, &d, 4);
            s.topk = 8;
            pipeline p = p_whole(&s);
            const double *dcontent = p_grad(&p, P_CONTENT), *dgate = p_grad(&p, P_GATE);
            const double *dk = p_grad(&p, P_K_CONTENT);
            for (int b = 0; b < d.n; b++)
                for (int32_t i = 0; i < d.lengths[b]; i++) {
                    const bool in_group = i < d.lengths[b] / 4 * 4;
                    double sum = 0, more = 0;
                    for (int64_t k = 0; k < 2 * P_D; k++) {
                        sum += fabs(dcontent[(d.cu[b] + i) * 2 * P_D + k]) +
                               fabs(dgate[(d.cu[b] + i) * 2 * P_D + k]);
                        more += fabs(dk[(d.cu[b] + i) * 2 * P_DI + k]);
                    }
                    ck_assert(in_group ? sum > 0 : sum == 0 && more == 0);
                }
            p_free(&p);
        }
}
END_TEST

/* ---- who sees whom ---- */

/* Counts, and with every token changed in turn: nothing before it changes a bit, itself and something behind does. */
START_TEST(s17_every_token_at_every_ratio) {
    enum { N = 41 };
    for (int64_t ratio = 2; ratio <= 7; ratio++)
        for (int dense = 0; dense < 2; dense++) FOR_REAL(dtype) {
                documents d = pack((int32_t[]){N}, 1);
                pipe_setup s = setup_of(dtype, &d, ratio);
                s.dense = dense;
                /* output gradients and loss of one row at a time would be N * N runs; rows' own values and their
                 * gradients on scores suffice, so outputs have no gradient here */
                int none[N];
                for (int t = 0; t < N; t++) none[t] = -1;
                s.dout_ids = none;
                pipeline a = p_whole(&s);
                for (int t = 0; t < N; t++) ck_assert_int_eq(p_fact(&a, t, CG_ROW_VISIBLE), (t + 1) / ratio);
                for (int t = 0; t < N; t++) {
                    documents changed = d;
                    changed.ids[t] = 5000 + t;
                    s.ids = changed.ids;
                    pipeline b = p_whole(&s);
                    p_same("out", p_get(&a, a.attention.out), 0, p_get(&b, b.attention.out), 0, t, P_H * P_D);
                    p_same("kl", p_get(&a, a.kl), 0, p_get(&b, b.kl), 0, t, 1);
                    /* dw of a row sums its score gradients times its dots */
                    p_same("dw", p_grad(&a, P_W), 0, p_grad(&b, P_W), 0, t, P_HI);
                    p_same("dq_index", p_grad(&a, P_Q_INDEX), 0, p_grad(&b, P_Q_INDEX), 0, t, P_HI * P_DI);
                    const double *x = p_get(&a, a.attention.out), *y = p_get(&b, b.attention.out);
                    ck_assert(memcmp(x + t * P_H * P_D, y + t * P_H * P_D, sizeof(double) * P_H * P_D) != 0);
                    p_free(&b);
                }
                p_free(&a);
            }
}
END_TEST

/* The last row that sees token t's group only through compression: leaks and delays both show. */
START_TEST(s17_a_group_is_seen_from_its_last_token_on) {
    enum { N = 24 };
    for (int64_t ratio = 2; ratio <= 6; ratio++)
        for (int t = 0; t < N; t++) {
            documents d = pack((int32_t[]){N}, 1), changed = d;
            changed.ids[t] = 5000 + t;
            pipe_setup s = setup_of(CG_F64, &d, ratio);
            s.topk = N;
            s.window = 1;
            pipeline a = p_whole(&s);
            s.ids = changed.ids;
            pipeline b = p_whole(&s);
            const double *x = p_get(&a, a.attention.out), *y = p_get(&b, b.attention.out);
            const int64_t seen = (t / ratio + 1) * ratio - 1; /* the first row that sees the group */
            for (int64_t row = 0; row < N; row++) {
                const bool differs =
                    memcmp(x + row * P_H * P_D, y + row * P_H * P_D, sizeof(double) * P_H * P_D) != 0;
                ck_assert_msg(differs == (row == t || row >= seen), "ratio %lld, token %d, row %lld",
                              (long long)ratio, t, (long long)row);
            }
            p_free(&a), p_free(&b);
        }
}
END_TEST

/* ---- packed documents ---- */

START_TEST(s29_random_empty_documents) {
    static const int32_t choices[] = {0, 0, 0, 4, 5, 9, 2};
    for (int seed = 0; seed < 40; seed++) FOR_REAL(dtype) {
            documents d = random_documents(200 + seed, choices, 7);
            expect_as_alone(dtype, &d, 2 + seed % 3, seed % 2);
        }
}
END_TEST

START_TEST(s45_random_one_token_documents) {
    static const int32_t choices[] = {1, 1, 1, 2, 3, 7, 0};
    for (int seed = 0; seed < 40; seed++) FOR_REAL(dtype) {
            documents d = random_documents(300 + seed, choices, 7);
            expect_as_alone(dtype, &d, 2 + seed % 3, seed % 2);
        }
    documents d = pack((int32_t[]){3, 1, 1, 2}, 4);
    pipe_setup s = setup_of(CG_F64, &d, 2);
    s.window = 2;
    pipeline p = p_whole(&s);
    ck_assert_mem_eq(bench_get_i32(&p.b, p.rows.cu_compressed), ((int32_t[]){0, 1, 1, 1, 2}), 20);
    ck_assert_int_eq(bench_get_i32(&p.b, p.topk)[6 * 2], 1); /* row 6 sees entry 1 */
    p_free(&p);
}
END_TEST

START_TEST(s23_documents_change_places) {
    for (int32_t first = 1; first <= 12; first++) FOR_REAL(dtype) {
            documents ab = pack((int32_t[]){first, 8}, 2), ba = pack((int32_t[]){8, first}, 2);
            for (int i = 0; i < 8; i++) ba.ids[i] = ab.ids[first + i];
            for (int i = 0; i < first; i++) ba.ids[8 + i] = ab.ids[i];
            pipe_setup s = setup_of(dtype, &ab, 4), r = setup_of(dtype, &ba, 4);
            pipeline a = p_whole(&s), b = p_whole(&r);
            p_same_rows(&a, 0, 0, &b, 8, 2, first, 2, true);
            p_same_rows(&a, first, first / 4, &b, 0, 0, 8, 2, true);
            p_free(&a), p_free(&b);
        }
}
END_TEST

/* Any number of rows behind the last document: output and gradients exactly 0, all else as without them. */
START_TEST(s30_rows_behind_the_last_document) {
    static const int32_t lengths[][3] = {{3, 2, 0}, {144, 32, 0}, {1, 0, 0}, {0, 0, 0}, {4, 4, 4}};
    for (int k = 0; k < 5; k++)
        for (int extra = 1; extra <= 9; extra++) FOR_REAL(dtype) {
                documents d = pack(lengths[k], 3), longer = d;
                longer.T += extra;
                for (int t = d.T; t < longer.T; t++) longer.ids[t] = 7000 + t;
                pipe_setup s = setup_of(dtype, &d, 2), r = setup_of(dtype, &longer, 2);
                s.capacity = r.capacity = longer.T / 2 + 1;
                r.dense = s.dense = extra % 2;
                pipeline a = p_whole(&s), b = p_whole(&r);
                p_same_rows(&a, 0, 0, &b, 0, 0, d.T, 2, true);
                ck_assert(p_get(&a, a.loss)[0] == p_get(&b, b.loss)[0]);
                const double *out = p_get(&b, b.attention.out);
                for (int64_t i = d.T * P_H * P_D; i < longer.T * P_H * P_D; i++) ck_assert(out[i] == 0);
                for (int i = 0; i < P_INPUTS; i++) expect_zero_rows(p_grad(&b, i), d.T, longer.T, p_width[i]);
                p_free(&a), p_free(&b);
            }
    /* offsets that are none */
    static const struct {
        int32_t cu[4];
        const char *says;
    } bad[] = {{{1, 3, 5, 5}, "cu_seqlens[0] is 1, expected 0"},
               {{0, 5, 3, 7}, "cu_seqlens[2] is 3, expected at least 5"},
               {{0, 3, 5, 8}, "cu_seqlens[3] is 8, expected at most the 7 rows"},
               {{0, -1, 5, 7}, "cu_seqlens[1] is -1"},
               {{0, 3, INT32_MIN, 7}, "cu_seqlens[2] is -2147483648"},
               {{0, 3, 5, INT32_MAX}, "cu_seqlens[3] is 2147483647"}};
    for (int k = 0; k < 6; k++) {
        documents d = pack((int32_t[]){3, 2, 2}, 3);
        pipe_setup s = setup_of(CG_F32, &d, 2);
        s.cu_seqlens = bad[k].cu;
        pipeline p = p_build(&s, NULL, NULL);
        ck_assert(!bench_try(&p.b));
        ck_assert_msg(strstr(p.b.error.text, bad[k].says), "%s", p.b.error.text);
        p_free(&p);
    }
}
END_TEST

/* The sizes of the report. */
START_TEST(s30_the_reported_sizes) {
    documents d = {.n = 3, .T = 946, .cu = {0, 144, 432, 944}};
    int ids[946];
    for (int t = 0; t < 946; t++) ids[t] = t;
    pipe_setup s = setup_of(CG_F32, &d, 4), r = s;
    s.ids = r.ids = ids;
    s.T = 944;
    s.capacity = r.capacity = 236;
    pipeline a = p_whole(&s), b = p_whole(&r);
    p_same_rows(&a, 0, 0, &b, 0, 0, 944, 2, true);
    for (int i = 0; i < P_INPUTS; i++) expect_zero_rows(p_grad(&b, i), 944, 946, p_width[i]);
    p_free(&a), p_free(&b);
}
END_TEST

/* Padding of any length behind any document, and capacity behind the last compressed row: filled with NaN in a
 * forward run, with -3 and 1e6 in a whole one. */
START_TEST(s16_any_padding_and_capacity) {
    for (int real = 0; real <= 9; real++) FOR_REAL(dtype) {
            documents d = pack((int32_t[]){9, 6}, 2);
            const int32_t seqlens[] = {real, 6};
            int dout[15];
            for (int t = real; t < 9; t++) d.ids[t] = -2;
            for (int t = 0; t < 15; t++) dout[t] = d.ids[t] < 0 ? -1 : d.ids[t];
            pipe_setup s = setup_of(dtype, &d, 2);
            s.seqlens = seqlens;
            s.dout_ids = dout;
            s.capacity = 11;
            s.dense = real % 2;
            pipeline runs[2];
            for (int k = 0; k < 2; k++) {
                s.fill = k ? 1e6 : -3;
                runs[k] = p_whole(&s);
            }
            p_same_rows(&runs[0], 0, 0, &runs[1], 0, 0, real, 2, false);
            p_same_rows(&runs[0], 9, 4, &runs[1], 9, 4, 6, 2, false);
            ck_assert(p_get(&runs[0], runs[0].loss)[0] == p_get(&runs[1], runs[1].loss)[0]);
            for (int i = 0; i < P_INPUTS; i++)
                if (i == P_Q || i == P_KV || i == P_Q_INDEX || i == P_W)
                    expect_zero_rows(p_grad(&runs[1], i), real, 9, p_width[i]);
            s.fill = NAN;
            pipeline nan = p_build(&s, NULL, NULL);
            cg_keep(nan.attention.out);
            bench_run(&nan.b);
            p_same("out", p_get(&nan, nan.attention.out), 0, p_get(&runs[0], runs[0].attention.out), 0, real,
                   P_H * P_D);
            p_same("out", p_get(&nan, nan.attention.out), 9, p_get(&runs[0], runs[0].attention.out), 9, 6,
                   P_H * P_D);
            p_same("kl", p_get(&nan, nan.kl), 0, p_get(&runs[0], runs[0].kl), 0, 15, 1);
            p_free(&nan), p_free(&runs[0]), p_free(&runs[1]);
        }
}
END_TEST

/* Compressed rows given with NaN wherever no list names them, capacity included. */
START_TEST(s16_compressed_rows_that_nobody_names) {
    enum { T = 24, C = 9 };
    documents d = pack((int32_t[]){13, 11}, 2); /* 3 + 2 rows at ratio 4 */
    FOR_REAL(dtype) for (int dense = 0; dense < 2; dense++) {
        double ckv[C * P_D], keys[C * P_DI];
        for (int i = 0; i < C * P_D; i++) ckv[i] = p_random(40, i), keys[i] = p_random(41, i);
        pipe_setup s = setup_of(dtype, &d, 4);
        s.capacity = C;
        s.dense = dense;
        pipeline clean = p_build(&s, ckv, keys);
        p_run(&clean, &s);
        for (int i = 5 * P_D; i < C * P_D; i++) ckv[i] = keys[i] = i % 2 ? NAN : INFINITY;
        pipeline bad = p_build(&s, ckv, keys);
        p_run(&bad, &s);
        p_same_rows(&clean, 0, 0, &bad, 0, 0, T, 2, false);
        p_same("dckv", bench_grad(&clean.b, clean.ckv), 0, bench_grad(&bad.b, bad.ckv), 0, C, P_D);
        p_same("dk_index", bench_grad(&clean.b, clean.k_index), 0, bench_grad(&bad.b, bad.k_index), 0, C, P_DI);
        for (int i = 5 * P_D; i < C * P_D; i++) ck_assert(bench_grad(&bad.b, bad.ckv)[i] == 0);
        p_free(&clean), p_free(&bad);
    }
}
END_TEST

/* The same six documents in every split into batches: one divisor, one loss, the same gradients. */
START_TEST(s31_any_split_of_documents) {
    static const int32_t lengths[] = {9, 1, 17, 0, 8, 5};
    enum { N = 6, ROWS = 40 };
    documents d = pack(lengths, N);
    pipe_setup s = setup_of(CG_F64, &d, 2);
    s.coeff = 1.0 / ROWS;
    for (int cuts = 0; cuts < 1 << (N - 1); cuts++) {
        pipeline whole = p_whole(&s);
        const double loss = p_get(&whole, whole.loss)[0];
        double sum = 0;
        ck_assert(loss > 0);
        for (int from = 0, b = 0; b < N; b++) {
            if (b < N - 1 && !(cuts >> b & 1)) continue;
            documents part = pack(lengths + from, b + 1 - from);
            pipe_setup r = setup_of(CG_F64, &part, 2);
            r.coeff = 1.0 / ROWS;
            r.ids = d.ids + d.cu[from];
            if (part.T > 0) {
                pipeline p = p_whole(&r);
                sum += p_get(&p, p.loss)[0];
                int64_t first = bench_get_i32(&whole.b, whole.rows.cu_compressed)[from];
                p_same_rows(&whole, d.cu[from], first, &p, 0, 0, part.T, 2, true);
                p_free(&p);
            }
            from = b + 1;
        }
        expect_close("loss", &sum, &loss, 1, 1e-13);
        p_free(&whole);
    }
}
END_TEST

/* ---- ranks ---- */

static void add(double *sum, const double *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) sum[i] += x[i];
}

/* Run each rank's rows with the facts of the whole document: entries are pooled by the rank of their last token, summed
 * over ranks (what a gather gives), then each rank attends and backward is summed over ranks. */
static void expect_ranks(const pipe_setup *s, const int *owner, int n_ranks) {
    pipeline whole = p_whole(s);
    const int64_t T = s->T, C = whole.C;
    const double *whole_out = p_get(&whole, whole.attention.out), *whole_kl = p_get(&whole, whole.kl);
    double *ckv = calloc((size_t)(C * P_D + 1), 8), *keys = calloc((size_t)(C * P_DI + 1), 8);
    pipe_setup mine = *s;
    mine.owner = owner;
    for (int r = 0; r < n_ranks; r++) { /* forward of the pooling */
        mine.rank = r;
        pipeline p = p_build(&mine, NULL, NULL);
        bench_run(&p.b);
        const double *a = p_get(&p, p.ckv), *k = p_get(&p, p.k_index);
        for (int64_t i = 0; i < C * P_D; i++)
            if (p.mine[i / P_D]) ckv[i] += a[i], keys[i] += k[i];
        p_free(&p);
    }
    p_same("compressed", ckv, 0, p_get(&whole, whole.ckv), 0, C, P_D);
    p_same("index keys", keys, 0, p_get(&whole, whole.k_index), 0, C, P_DI);
    double *sums[P_INPUTS], *dckv = calloc((size_t)(C * P_D + 1), 8),
                            *dkeys = calloc((size_t)(C * P_DI + 1), 8), loss = 0;
    for (int i = 0; i < P_INPUTS; i++) sums[i] = calloc((size_t)(T * p_width[i] + 1), 8);
    for (int r = 0; r < n_ranks; r++) { /* attention and loss of its rows */
        mine.rank = r;
        pipeline p = p_build(&mine, ckv, keys);
        p_run(&p, &mine);
        loss += p_get(&p, p.loss)[0];
        const double *out = p_get(&p, p.attention.out), *kl = p_get(&p, p.kl);
        for (int64_t t = 0; t < T; t++) {
            if (owner[t] != r) {
                for (int64_t i = 0; i < P_H * P_D; i++) ck_assert(out[t * P_H * P_D + i] == 0);
                continue;
            }
            p_same("out", out, t, whole_out, t, 1, P_H * P_D);
            p_same("kl", kl, t, whole_kl, t, 1, 1);
            ck_assert_mem_eq(bench_get_i32(&p.b, p.topk) + t * s->topk,
                             bench_get_i32(&whole.b, whole.topk) + t * s->topk,
                             sizeof(int32_t) * (size_t)s->topk);
        }
        for (int i = 0; i < P_INPUTS; i++) add(sums[i], p_grad(&p, i), T * p_width[i]);
        add(dckv, bench_grad(&p.b, p.ckv), C * P_D);
        add(dkeys, bench_grad(&p.b, p.k_index), C * P_DI);
        p_free(&p);
    }
    for (int r = 0; r < n_ranks; r++) { /* backward of the pooling: borrowed tokens get their gradient back */
        mine.rank = r;
        bench b = bench_new(s->dtype);
        pipeline p = {.b = b, .T = T, .C = C};
        for (int i = P_CONTENT; i < P_INPUTS; i++)
            if (i != P_Q_INDEX && i != P_W) p.in[i] = p_leaf(&p, &mine, i);
        p_cut(&p, &mine);
        double ape[16 * 2 * P_D], k_ape[16 * 2 * P_DI];
        for (int i = 0; i < 16 * 2 * P_D; i++) ape[i] = p_random(20, i), k_ape[i] = p_random(21, i);
        cg_value *entries = p.rows.entries, *at = p.rows.entry_positions;
        cg_value *a = cg_csa_compress(p.b.graph, p.in[P_CONTENT], p.in[P_GATE],
                                      bench_real(&p.b, "ape", CG_SHAPE(s->ratio, 2 * P_D), ape), entries, at,
                                      s->ratio, true);
        cg_value *k = cg_csa_compress(p.b.graph, p.in[P_K_CONTENT], p.in[P_K_GATE],
                                      bench_real(&p.b, "k_ape", CG_SHAPE(s->ratio, 2 * P_DI), k_ape), entries,
                                      at, s->ratio, true);
        double da[64 * P_D], dk[64 * P_DI];
        for (int64_t i = 0; i < C * P_D; i++)
            da[i] = p.mine[i / P_D] ? dckv[i] : 0, dk[i] = p.mine[i / P_D] ? dkeys[i] : 0;
        cg_value *x = cg_sum(p.b.graph, cg_mul(p.b.graph, a, bench_constant(&p.b, "dckv", a->shape, da)));
        cg_value *y = cg_sum(p.b.graph, cg_mul(p.b.graph, k, bench_constant(&p.b, "dkeys", k->shape, dk)));
        bench_backward(&p.b, cg_add(p.b.graph, x, y), NULL);
        bench_run(&p.b);
        for (int i = P_CONTENT; i < P_INPUTS; i++)
            if (p.in[i]) add(sums[i], p_grad(&p, i), T * p_width[i]);
        p_free(&p);
    }
    const double bound = s->dtype == CG_F64 ? 1e-13 : 1e-5;
    expect_close("loss", &loss, p_get(&whole, whole.loss), 1, bound);
    for (int i = 0; i < P_INPUTS; i++) {
        expect_close("gradient over ranks", sums[i], p_grad(&whole, i), T * p_width[i], bound);
        free(sums[i]);
    }
    free(ckv), free(keys), free(dckv), free(dkeys);
    p_free(&whole);
}

/* cp = 1, 2, 3, 5: every cut of ten rows into so many stretches; empty ones included. */
START_TEST(s32_every_cut_of_a_document) {
    documents d = pack((int32_t[]){10}, 1);
    FOR_REAL(dtype) {
        pipe_setup s = setup_of(dtype, &d, 4);
        int owner[10];
        for (int a = 0; a <= 10; a++)
            for (int b = a; b <= 10; b += dtype == CG_F64 ? 1 : 3) {
                for (int t = 0; t < 10; t++) owner[t] = (t >= a) + (t >= b);
                s.dense = (a + b) % 2;
                expect_ranks(&s, owner, 3);
            }
        for (int t = 0; t < 10; t++) owner[t] = t / 2;
        expect_ranks(&s, owner, 5);
    }
}
END_TEST

/* The printed numbers: gates 0, A = t + 1, B = 10 (t + 1), loss = sum of entries, any cut. */
START_TEST(s32_printed_numbers_at_any_cut) {
    double kv[20], zeros[20] = {0};
    for (int t = 0; t < 10; t++) kv[2 * t] = t + 1, kv[2 * t + 1] = 10 * (t + 1);
    FOR_REAL(dtype) for (int cut = 0; cut <= 10; cut++) {
        double entry[2] = {0}, dkv[20] = {0}, dgate[20] = {0};
        for (int r = 0; r < 2; r++) {
            bench b = bench_new(dtype);
            cg_value *x = bench_real(&b, "kv", CG_SHAPE(10, 2), kv),
                     *g = bench_real(&b, "gate", CG_SHAPE(10, 2), zeros);
            const bool first = (3 >= cut) == r,
                       second = (7 >= cut) == r; /* owners of the groups' last tokens */
            const int32_t mine[] = {first || second ? 0 : -1, second ? 4 : -1};
            cg_value *out = cg_csa_compress(b.graph, x, g, bench_real(&b, "ape", CG_SHAPE(4, 2), zeros),
                                            bench_i32(&b, "entries", CG_SHAPE(2), mine),
                                            bench_i32(&b, "positions", CG_SHAPE(2), mine), 4, true);
            bench_backward(&b, out, (double[]){first, second});
            bench_run(&b);
            if (first) entry[0] += bench_get(&b, out)[0];
            if (second) entry[1] += bench_get(&b, out)[1];
            for (int i = 0; i < 20; i++) dkv[i] += bench_grad(&b, x)[i], dgate[i] += bench_grad(&b, g)[i];
            bench_free(&b);
        }
        expect_close("entries", entry, (double[]){25, 33.75}, 2, 1e-6);
        for (int t = 0; t < 10; t++) {
            ck_assert(dkv[2 * t] == (t < 4 ? 0.125 : 0));
            ck_assert(dkv[2 * t + 1] == (t < 4 ? 0.25 : t < 8 ? 0.125 : 0));
        }
        static const double a[] = {-4.09375, -3.96875, -3.84375, -3.71875},
                            own[] = {2.03125, 3.28125, 4.53125, 5.78125};
        for (int i = 0; i < 4; i++) {
            ck_assert_double_eq_tol(dgate[2 * i], a[i], 1e-5);
            ck_assert_double_eq_tol(dgate[2 * (i + 4) + 1], own[i], 1e-5);
        }
    }
}
END_TEST

/* Documents of 4 and 3 tokens in ten rows; whatever rows 7 to 9 hold, cp = 1, 2, 5 and every cut. */
START_TEST(s33_no_document_is_shortened) {
    FOR_REAL(dtype) for (int refill = 0; refill < 2; refill++) {
        documents d = pack((int32_t[]){4, 3}, 2);
        d.T = 10;
        for (int t = 7; t < 10; t++) d.ids[t] = refill ? 9000 + t : 100 + t;
        pipe_setup s = setup_of(dtype, &d, 2);
        pipeline p = p_whole(&s);
        for (int t = 0; t < 10; t++) ck_assert_int_eq(p_fact(&p, t, CG_ROW_REAL), t < 7);
        expect_zero_rows(p_get(&p, p.attention.out), 7, 10, P_H * P_D);
        const double *last = p_get(&p, p.attention.out) + 6 * P_H * P_D;
        ck_assert(last[0] != 0);    /* the last real token attends */
        int32_t real[2][2] = {{0}}; /* by rank of five rows and document */
        for (int t = 0; t < 10; t++)
            if (p_fact(&p, t, CG_ROW_REAL)) real[t / 5][p_fact(&p, t, CG_ROW_START) > 0]++;
        ck_assert(real[0][0] == 4 && real[0][1] == 1 && real[1][0] == 0 && real[1][1] == 2);
        p_free(&p);
        for (int size = 1; size <= 10; size++) {
            int owner[10];
            for (int t = 0; t < 10; t++) owner[t] = t / size;
            expect_ranks(&s, owner, 9 / size + 1);
        }
    }
}
END_TEST

/* Head and tail of the document on one rank; then any assignment of rows to three ranks. */
START_TEST(s46_rows_of_a_rank_in_any_layout) {
    documents d = pack((int32_t[]){8}, 1);
    static const int zigzag[] = {0, 0, 1, 1, 1, 1, 0, 0};
    FOR_REAL(dtype) {
        pipe_setup s = setup_of(dtype, &d, 2);
        pipeline p = p_whole(&s);
        static const int32_t counts[2][4] = {{0, 1, 3, 4}, {1, 2, 2, 3}};
        for (int r = 0; r < 2; r++)
            for (int t = 0, k = 0; t < 8; t++)
                if (zigzag[t] == r) ck_assert_int_eq(p_fact(&p, t, CG_ROW_VISIBLE), counts[r][k++]);
        p_free(&p);
        expect_ranks(&s, zigzag, 2);
        for (int seed = 0; seed < 12; seed++) {
            documents more = pack((int32_t[]){11, 0, 1, 6}, 4);
            int owner[18];
            for (int t = 0; t < 18; t++) owner[t] = (int)cg_random_below((uint64_t)seed, 50, (uint64_t)t, 3);
            pipe_setup r = setup_of(dtype, &more, 2 + seed % 3);
            r.dense = seed % 2;
            expect_ranks(&r, owner, 3);
        }
    }
}
END_TEST

SUITE("cases_packed", s24_s25_first_group_of_every_document, s25_any_gates_of_a_first_group,
      s26_lengths_around_the_ratio, s27_tails_of_random_documents, s17_every_token_at_every_ratio,
      s17_a_group_is_seen_from_its_last_token_on, s29_random_empty_documents, s45_random_one_token_documents,
      s23_documents_change_places, s30_rows_behind_the_last_document, s30_the_reported_sizes,
      s16_any_padding_and_capacity, s16_compressed_rows_that_nobody_names, s31_any_split_of_documents,
      s32_every_cut_of_a_document, s32_printed_numbers_at_any_cut, s33_no_document_is_shortened,
      s46_rows_of_a_rank_in_any_layout)
