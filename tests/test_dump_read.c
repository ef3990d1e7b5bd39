/* What the reader of dumps takes and what it refuses, on dumps in memory: lists, merged shapes, facts that
 * contradict, names, the view of code that misreads offsets, and the type that numbers need. */
#include "tests/support.h"

#include <math.h>
#include <stdint.h>
#include <unistd.h>

#include "models/check/dump.h"
#include "models/check/verdict.h"

enum { MOST = 32 };

typedef struct memory {
    cg_named_tensor tensors[MOST];
    const char *meta[MOST][2];
    int n, n_meta;
} memory;

static void add(memory *m, const char *name, cg_dtype dtype, cg_shape shape, const void *data) {
    for (int i = 0; i < m->n; i++)
        if (!strcmp(m->tensors[i].name, name)) { /* in its place */
            m->tensors[i].tensor = (cg_tensor){dtype, shape, (void *)(uintptr_t)data};
            return;
        }
    ck_assert_int_lt(m->n, MOST);
    m->tensors[m->n].name = name;
    m->tensors[m->n++].tensor = (cg_tensor){dtype, shape, (void *)(uintptr_t)data};
}

static void say(memory *m, const char *key, const char *value) {
    m->meta[m->n_meta][0] = key;
    m->meta[m->n_meta++][1] = value;
}

static cg_dump *open_memory(const memory *m, cg_error *error) {
    const cg_dump_options from = {.tensors = m->tensors,
                                  .n_tensors = m->n,
                                  .metadata = (const char *const(*)[2])m->meta,
                                  .n_metadata = m->n_meta};
    *error = (cg_error){0};
    return cg_dump_open(&from, error);
}

static cg_dump *opened(const memory *m) {
    cg_error error;
    cg_dump *d = open_memory(m, &error);
    if (!d) ck_abort_msg("%s", error.text);
    return d;
}

static void refused(const memory *m, const char *says) {
    cg_error error;
    cg_dump *d = open_memory(m, &error);
    if (d) ck_abort_msg("not refused: %s", says);
    if (error.code != CG_BAD_INPUT || !strstr(error.text, says) || strchr(error.text, '\n'))
        ck_abort_msg("expected \"%s\", got %d \"%s\"", says, (int)error.code, error.text);
}

/* Two segments of 6 and 4 rows at ratio 2, 4 and 3 of them real, and 2 rows behind: 3 and 2 keys. */
enum { T = 12, C = 5, H = 2, D = 3, K = 3 };
static const int32_t physical[] = {0, 6, 10}, real[] = {0, 4, 7};
static float query[T * H * D], ckv[C * D];

static memory packed(int32_t *lists) {
    memory m = {.n = 0};
    for (int i = 0; i < T * H * D; i++) query[i] = (float)i + 0.5F;
    for (int i = 0; i < C * D; i++) ckv[i] = (float)(100 * (i / D));
    for (int i = 0; i < T * K; i++) lists[i] = -1;
    add(&m, "query", CG_F32, CG_SHAPE(T, H, D), query);
    add(&m, "compressed_kv", CG_F32, CG_SHAPE(C, D), ckv);
    add(&m, "cu_seqlens_q", CG_I32, CG_SHAPE(3), physical);
    add(&m, "cu_seqlens_q_real", CG_I32, CG_SHAPE(3), real);
    add(&m, "topk", CG_I32, CG_SHAPE(T, K), lists);
    say(&m, "ratio", "2");
    return m;
}

/* ---- lists ---- */

static void expect_list(const cg_dump *d, int64_t t, int64_t a, int64_t b, int64_t c) {
    int64_t got[K];
    cg_dump_list(d, CG_DUMP_TOPK, t, got);
    if (got[0] != a || got[1] != b || got[2] != c)
        ck_abort_msg("row %d: %d %d %d", (int)t, (int)got[0], (int)got[1], (int)got[2]);
}

START_TEST(lists_of_padding_may_hold_anything) {
    int32_t lists[T * K];
    memory m = packed(lists);
    const int32_t odd[] = {INT32_MIN, 2, INT32_MAX};
    static const int padding[] = {4, 5, 9, 10, 11};
    for (int i = 0; i < 5; i++) memcpy(lists + padding[i] * K, odd, sizeof odd);
    for (int global = 0; global < 2; global++) {
        lists[3 * K] = 1;
        lists[8 * K] = global ? 4 : 1; /* the second key of segment 1, whose first one is 3 */
        cg_dump *d = opened(&m);
        ck_assert_int_eq(d->index, global ? CG_INDEX_GLOBAL : CG_INDEX_LOCAL);
        expect_list(d, 3, 1, -1, -1);
        expect_list(d, 8, 1, -1, -1);
        expect_list(d, 5, -1, 2, -1);
        expect_list(d, 9, -1, -1, -1);
        expect_list(d, 11, -1, -1, -1);
        cg_dump_close(d);
    }
}
END_TEST

START_TEST(lists_of_real_rows_are_checked) {
    int32_t lists[T * K];
    memory m = packed(lists);
    lists[0] = 2; /* not visible yet: for the judge */
    cg_dump *d = opened(&m);
    expect_list(d, 0, 2, -1, -1);
    cg_dump_close(d);

    const struct {
        int at;
        int32_t x;
        const char *says;
    } bad[] = {
        {3 * K + 1, -2, "memory: topk of segment 0, position 3, slot 1 is -2, expected -1 or 0 to 2"},
        {7 * K, INT32_MIN, "topk of segment 1, position 1, slot 0 is -2147483648, expected -1 or 0 to 1"},
        {2 * K, 5, "topk of segment 0, position 2, slot 0 is 5, expected -1 or 0 to 2"},
        {2 * K, 3, "topk of segment 0, position 2, slot 0 is 3, expected -1 or 0 to 2"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        lists[bad[i].at] = bad[i].x;
        refused(&m, bad[i].says);
        lists[bad[i].at] = -1;
    }
    /* a marker that is not -1, where either origin would do */
    lists[6 * K] = -5;
    refused(&m, "segment 1, position 0, slot 0 is -5");
    lists[6 * K] = -1;

    int64_t wide[T * 5];
    for (int i = 0; i < T * 5; i++) wide[i] = -1;
    wide[5 + 4] = INT64_MIN;
    add(&m, "attn_topk", CG_I64, CG_SHAPE(T, 5), wide);
    refused(&m, "attn_topk of segment 0, position 1, slot 4 is -9223372036854775808");
    wide[5 + 4] = -1;
}
END_TEST

/* Lists of segment 1 that fit segment 2, which is longer: code that misread the offsets took its rows for them. */
START_TEST(a_refusal_names_misread_offsets) {
    static const int32_t cu[] = {0, 4, 8, 16}, cu_real[] = {0, 2, 6, 14};
    static const float q[16 * 4], k[8 * 2];
    int32_t lists[16 * 2];
    memory m = {.n = 0};
    for (int i = 0; i < 32; i++) lists[i] = -1;
    add(&m, "query", CG_F32, CG_SHAPE(16, 2, 2), q);
    add(&m, "compressed_kv", CG_F32, CG_SHAPE(8, 2), k);
    add(&m, "cu_seqlens_q", CG_I32, CG_SHAPE(4), cu);
    add(&m, "cu_seqlens_q_real", CG_I32, CG_SHAPE(4), cu_real);
    add(&m, "topk", CG_I32, CG_SHAPE(16, 2), lists);
    say(&m, "ratio", "2");
    lists[2 * 6] = 0;
    lists[2 * 7] = 3; /* of segment 1, which has 2; row 1 of segment 2 by the real sums, which has 4 */
    refused(&m, "segment 1, position 3, slot 0 is 3, expected -1 or 0 to 1 (all lists fit where running sums");
    lists[2 * 2] = 5; /* padding here, real there, and no key */
    cg_error error;
    ck_assert_ptr_null(open_memory(&m, &error));
    ck_assert_ptr_null(strstr(error.text, "running sums"));
}
END_TEST

START_TEST(lists_have_any_width) {
    int32_t lists[T * K];
    memory m = packed(lists);
    const struct {
        const char *topk;
        int64_t asked;
    } cases[] = {{NULL, K}, {"1", 1}, {"3", 3}, {"2048", 2048}};
    for (int i = 0; i < 4; i++) {
        memory one = m;
        lists[3 * K] = 0, lists[3 * K + 1] = 1; /* more than asked for is for the judge */
        if (cases[i].topk) say(&one, "topk", cases[i].topk);
        cg_dump *d = opened(&one);
        ck_assert_int_eq(d->K, K);
        ck_assert_int_eq(d->k_asked, cases[i].asked);
        expect_list(d, 3, 0, 1, -1);
        cg_dump_close(d);
    }
    memory none = m;
    none.n--; /* the lists */
    cg_dump *d = opened(&none);
    ck_assert(d->K == -1 && d->k_asked == -1);
    cg_dump_close(d);
    say(&none, "index_topk", "7");
    d = opened(&none);
    ck_assert(d->K == 7 && d->k_asked == 7);
    cg_dump_close(d);
}
END_TEST

/* ---- shapes ---- */

static void expect_rows(const memory *m, cg_dump_id id, const char *layout, int64_t heads, int64_t width,
                        const double *want) {
    memory told = *m;
    if (layout) say(&told, "layout", layout);
    cg_dump *d = opened(&told);
    ck_assert(d->array[id].heads == heads && d->array[id].width == width);
    double got[64];
    for (int64_t t = 0; t < d->T; t++) {
        cg_dump_row(d, id, t, got);
        for (int64_t i = 0; i < heads * width; i++) ck_assert(got[i] == want[t * heads * width + i]);
    }
    cg_dump_close(d);
}

START_TEST(heads_may_be_merged) {
    enum { S = 4, B = 3, HD = H * D };
    static const cg_dump_id ids[] = {CG_DUMP_QUERY, CG_DUMP_OUTPUT, CG_DUMP_DOUT, CG_DUMP_GRAD_QUERY};
    static const char *const names[] = {"query", "output", "dout", "grad.query"};
    float x[S * B * HD], keys[8 * D] = {0}, sink[H] = {0};
    double b_first[S * B * HD], s_first[S * B * HD];
    for (int i = 0; i < S * B * HD; i++) x[i] = (float)i;
    for (int b = 0; b < B; b++) /* rows in packed order, batch after batch, in either order of the file */
        for (int s = 0; s < S; s++)
            for (int i = 0; i < HD; i++) {
                b_first[(b * S + s) * HD + i] = (b * S + s) * HD + i;
                s_first[(b * S + s) * HD + i] = (s * B + b) * HD + i;
            }
    for (int which = 0; which < 4; which++)
        for (int all = 0; all < 2; all++) {
            const struct {
                const char *layout;
                cg_shape whole, merged, other_merged, kv, keys;
            } forms[] = {
                {"bshd", CG_SHAPE(B, S, H, D), CG_SHAPE(B, S, HD), CG_SHAPE(B, S, HD), CG_SHAPE(B, S, D),
                 CG_SHAPE(B, 2, D)},
                {"sbhd", CG_SHAPE(S, B, H, D), CG_SHAPE(S, B, HD), CG_SHAPE(S, B, HD), CG_SHAPE(S, B, D),
                 CG_SHAPE(2, B, D)},
                {"thd", CG_SHAPE(S * B, H, D), CG_SHAPE(S * B, HD), CG_SHAPE(S * B, 1, HD), CG_SHAPE(S * B, D),
                 CG_SHAPE(6, D)},
            };
            for (int f = 0; f < 3; f++)
                for (int other = 0; other < 2; other++) {
                    memory m = {.n = 0};
                    for (int i = 0; i < 4; i++)
                        add(&m, names[i], CG_F32,
                            !all && i != which ? forms[f].whole
                            : other            ? forms[f].other_merged
                                               : forms[f].merged,
                            x);
                    add(&m, "kv", CG_F32, forms[f].kv, x);
                    add(&m, "compressed_kv", CG_F32, forms[f].keys, keys);
                    if (all) add(&m, "sink", CG_F32, CG_SHAPE(1, H, 1), sink);
                    say(&m, "ratio", "2");
                    expect_rows(&m, ids[which], f == 2 && other ? "thd" : NULL, H, D,
                                f == 1 ? s_first : b_first);
                    expect_rows(&m, ids[which], forms[f].layout, H, D, f == 1 ? s_first : b_first);
                }
        }
    /* one head; the indexer's query */
    memory m = {.n = 0};
    add(&m, "query", CG_F32, CG_SHAPE(S * B, D), x);
    add(&m, "compressed_kv", CG_F32, CG_SHAPE(6, D), keys);
    say(&m, "ratio", "2");
    expect_rows(&m, CG_DUMP_QUERY, NULL, 1, D, b_first);
    m.n = 0;
    add(&m, "q_indexer", CG_F32, CG_SHAPE(S * B, HD), x);
    add(&m, "k_indexer", CG_F32, CG_SHAPE(6, D), keys);
    add(&m, "weights", CG_F32, CG_SHAPE(S * B, H), x);
    add(&m, "grad.q_indexer", CG_F32, CG_SHAPE(S * B, 1, HD), x);
    expect_rows(&m, CG_DUMP_Q_INDEXER, NULL, H, D, b_first);
    expect_rows(&m, CG_DUMP_GRAD_Q_INDEXER, NULL, H, D, b_first);
    /* a width that the keys do not divide */
    add(&m, "q_indexer", CG_F32, CG_SHAPE(S * B, HD - 1), x);
    refused(&m, "expected 3 sizes (packed) or 4");
    m.n = 0;
    add(&m, "query", CG_F32, CG_SHAPE(S * B, HD), x);
    add(&m, "compressed_kv", CG_F32, CG_SHAPE(6, D), keys);
    add(&m, "sink", CG_F32, CG_SHAPE(3), keys); /* three heads of 3 are not 6 */
    refused(&m, "expected 3 sizes (packed) or 4");
}
END_TEST

START_TEST(a_loss_is_one_number) {
    int32_t lists[T * K];
    static const float loss = 0.25F;
    static const cg_shape shapes[] = {{0, {0}}, {1, {1}}, {2, {1, 1}}};
    for (int i = 0; i < 3; i++) {
        memory m = packed(lists);
        add(&m, "loss", CG_F32, shapes[i], &loss);
        cg_dump *d = opened(&m);
        double x = 0;
        cg_dump_row(d, CG_DUMP_LOSS, 0, &x);
        ck_assert(x == 0.25);
        cg_dump_close(d);
    }
    memory m = packed(lists);
    add(&m, "loss", CG_F32, CG_SHAPE(2), query);
    refused(&m, "loss has shape [2]");
}
END_TEST

/* ---- facts ---- */

START_TEST(facts_must_agree) {
    int32_t lists[T * K];
    uint8_t mask[T] = {1, 1, 1, 1, 0, 0, 1, 1, 1, 0, 0, 0};
    memory m = packed(lists);
    add(&m, "query_valid_rows", CG_U8, CG_SHAPE(T), mask);
    cg_dump *d = opened(&m);
    ck_assert(d->real[0] == 4 && d->real[1] == 3 && !cg_dump_is_real(d, 4) && cg_dump_is_real(d, 8));
    cg_dump_close(d);
    const struct {
        int row;
        const char *says;
    } bad[] = {
        {4, "memory: query_valid_rows of segment 0, position 4 is 1, but cu_seqlens_q_real gives the segment 4 "
            "real"},
        {8,
         "query_valid_rows of segment 1, position 2 is 0, but cu_seqlens_q_real gives the segment 3 real rows"},
        {11, "query_valid_rows of row 11 is 1, but cu_seqlens_q_real has no segment with that row"},
    };
    for (int i = 0; i < 3; i++) {
        mask[bad[i].row] ^= 1;
        refused(&m, bad[i].says);
        mask[bad[i].row] ^= 1;
    }
    /* the mask alone */
    memory alone = {.n = 0};
    for (int i = 0; i < m.n; i++)
        if (strcmp(m.tensors[i].name, "cu_seqlens_q_real")) alone.tensors[alone.n++] = m.tensors[i];
    say(&alone, "ratio", "2");
    d = opened(&alone);
    ck_assert(d->real[0] == 4 && d->real[1] == 3);
    cg_dump_close(d);
    mask[10] = 1;
    refused(&alone, "query_valid_rows of row 10 is 1, but cu_seqlens_q has no segment with that row");
    mask[10] = 0;
    mask[5] = 1;
    refused(&alone, "has a real row (segment 0, position 5) behind padding");
}
END_TEST

/* f16 by its bits: signs, subnormal numbers, infinities, NaN. */
START_TEST(halves) {
    static const struct {
        uint16_t bits;
        double number;
    } list[] = {{0x3c00, 1},       {0xc500, -5},        {0x0001, 0x1p-24},  {0x83ff, -0x3ffp-24},
                {0x0400, 0x1p-14}, {0x7bff, 65504},     {0x7c00, INFINITY}, {0xfc00, -INFINITY},
                {0x8000, -0.0},    {0x3555, 0x1.554p-2}};
    int32_t lists[T * K];
    uint16_t keys[C * D];
    double row[D];
    memory m = packed(lists);
    for (int i = 0; i < C * D; i++) keys[i] = list[i % 10].bits;
    add(&m, "compressed_kv", CG_F16, CG_SHAPE(C, D), keys);
    cg_dump *d = opened(&m);
    for (int s = 0, i = 0; s < 2; s++)
        for (int64_t k = 0; k < d->n_keys[s]; k++) {
            cg_dump_key(d, CG_DUMP_COMPRESSED_KV, s, k, row);
            for (int c = 0; c < D; c++, i++)
                ck_assert(row[c] == list[i % 10].number && signbit(row[c]) == signbit(list[i % 10].number));
        }
    cg_dump_close(d);
}
END_TEST

/* Numbers that are counts. */
START_TEST(counts_are_whole) {
    int32_t lists[T * K];
    for (int i = 0; i < 3; i++) {
        memory m = packed(lists);
        say(&m, i == 0 ? "topk" : i == 1 ? "window" : "compress_ratio", "2.5");
        if (i == 2) m.meta[0][0] = "unused";
        refused(&m, "expected an integer from");
    }
}
END_TEST

/* A mask [S, B] of a batch is read by its own sizes. */
START_TEST(mask_of_a_batch) {
    enum { S = 4, B = 3 };
    float q[S * B * H * D] = {0}, keys[S / 2 * B * D] = {0};
    uint8_t mask[S * B];
    memory m = {.n = 0};
    for (int s = 0; s < S; s++)
        for (int b = 0; b < B; b++) mask[s * B + b] = s < S - b;
    add(&m, "query", CG_F32, CG_SHAPE(S, B, H, D), q);
    add(&m, "compressed_kv", CG_F32, CG_SHAPE(S / 2, B, D), keys);
    add(&m, "query_valid_rows", CG_U8, CG_SHAPE(S, B), mask);
    say(&m, "ratio", "2");
    say(&m, "layout", "sbhd");
    cg_dump *d = opened(&m);
    for (int b = 0; b < B; b++) ck_assert_int_eq(d->real[b], S - b);
    cg_dump_close(d);
}
END_TEST

static memory with_offsets(int32_t *lists, const char *a, const int32_t *cu_a, const char *b,
                           const int32_t *cu_b) {
    memory from = packed(lists), m = {.n = 0};
    for (int i = 0; i < from.n; i++)
        if (strncmp(from.tensors[i].name, "cu_", 3)) m.tensors[m.n++] = from.tensors[i];
    add(&m, a, CG_I32, CG_SHAPE(3), cu_a);
    add(&m, b, CG_I32, CG_SHAPE(3), cu_b);
    say(&m, "ratio", "2");
    return m;
}

START_TEST(offsets_by_their_names) {
    int32_t lists[T * K];
    static const char *const pairs[][2] = {{"cu_seqlens_q_padded", "cu_seqlens_q"},
                                           {"in.cu_seqlens_q_padded", "in.cu_seqlens_q_real"},
                                           {"cu_seqlens_padded", "cu_seqlens"},
                                           {"cu_seqlens_q", "cu_seqlens_q_real"}};
    for (int i = 0; i < 4; i++) {
        memory m = with_offsets(lists, pairs[i][0], physical, pairs[i][1], real);
        cg_dump *d = opened(&m);
        ck_assert(d->start[1] == 6 && d->physical[0] == 6 && d->real[0] == 4 && d->real[1] == 3);
        cg_dump_close(d);
        m = with_offsets(lists, pairs[i][0], real, pairs[i][1], physical);
        char says[200];
        snprintf(says, sizeof says,
                 "memory: %s and %s look swapped: entry 1 of the offsets of physical rows is 4", pairs[i][0],
                 pairs[i][1]);
        refused(&m, says);
    }
    /* one segment longer than it is, another shorter: not swapped */
    static const int32_t odd[] = {0, 7, 9};
    memory m = with_offsets(lists, "cu_seqlens_q", physical, "cu_seqlens_q_real", odd);
    refused(&m, "gives segment 0 7 real rows, but it has 6");
    /* without padding both are the same */
    m = with_offsets(lists, "cu_seqlens_q_padded", physical, "cu_seqlens_q", physical);
    cg_dump_close(opened(&m));
    /* offsets of tokens under the name of those of keys, as packed self-attention has them */
    m = packed(lists);
    add(&m, "cu_seqlens_kv", CG_I32, CG_SHAPE(3), physical);
    cg_dump_close(opened(&m));
    static const int32_t keys[] = {0, 3, 5}, bad_keys[] = {0, 2, 5};
    add(&m, "cu_seqlens_kv", CG_I32, CG_SHAPE(3), keys);
    cg_dump_close(opened(&m));
    add(&m, "cu_seqlens_kv", CG_I32, CG_SHAPE(3), bad_keys);
    refused(&m, "cu_seqlens_kv gives segment 0 2 compressed rows, expected 3");
    m = packed(lists);
    add(&m, "cu_seqlens_compressed", CG_I32, CG_SHAPE(3), physical);
    refused(&m, "cu_seqlens_compressed[1] is 6, but there are 5 rows");
}
END_TEST

START_TEST(declared_words) {
    int32_t lists[T * K];
    const struct {
        const char *word;
        int value;
    } known[] = {{"mean", CG_REDUCTION_IS_MEAN_REAL},
                 {"mean-real", CG_REDUCTION_IS_MEAN_REAL},
                 {"mean-physical", CG_REDUCTION_IS_MEAN_PHYSICAL},
                 {"sum", CG_REDUCTION_IS_SUM},
                 {"mean-of-means", CG_REDUCTION_IS_MEAN_OF_MEANS}};
    for (int i = 0; i < 5; i++) {
        memory m = packed(lists);
        say(&m, "reduction", known[i].word);
        say(&m, "sparse", i % 2 ? "False" : "1");
        cg_dump *d = opened(&m);
        ck_assert_int_eq(d->declared.value[CG_AXIS_REDUCTION], known[i].value);
        ck_assert_int_eq(d->declared.value[CG_AXIS_SUPPORT],
                         i % 2 ? CG_SUPPORT_IS_DENSE : CG_SUPPORT_IS_SPARSE);
        cg_dump_close(d);
    }
    memory m = packed(lists);
    say(&m, "reduction", "batchmean");
    refused(&m,
            "reduction of the metadata: expected mean, mean-real, mean-physical, sum, mean-visible, mean-twice "
            "or mean-of-means, got \"batchmean\"");
    m = packed(lists);
    say(&m, "sparse", "2");
    refused(&m, "sparse of the metadata: expected true or false, got \"2\"");
}
END_TEST

START_TEST(names_of_frameworks) {
    static const struct {
        const char *name;
        cg_dump_id id;
        cg_dtype dtype;
        cg_shape shape;
    } known[] = {
        {"softmax_offset", CG_DUMP_SINK, CG_F32, CG_DIMS(1, H, 1, 1)},
        {"attn_sink", CG_DUMP_SINK, CG_F32, CG_DIMS(H)},
        {"s_aux", CG_DUMP_SINK, CG_F32, CG_DIMS(H)},
        {"sinks", CG_DUMP_SINK, CG_F32, CG_DIMS(H)},
        {"topk_indices", CG_DUMP_TOPK, CG_I32, CG_DIMS(1, T, K)},
        {"top_k_indices", CG_DUMP_TOPK, CG_I32, CG_DIMS(T, K)},
        {"out.topk_indexes", CG_DUMP_TOPK, CG_I32, CG_DIMS(T, K)},
        {"attn_topk_idxs", CG_DUMP_ATTN_TOPK, CG_I32, CG_DIMS(T, K)},
        {"softmax_lse", CG_DUMP_LSE, CG_F32, CG_DIMS(1, H, T)},
        {"core_attn_out", CG_DUMP_OUTPUT, CG_F32, CG_DIMS(T, 1, H * D)},
        {"context_layer", CG_DUMP_OUTPUT, CG_F32, CG_DIMS(T, H * D)},
        {"attn_output", CG_DUMP_OUTPUT, CG_F32, CG_DIMS(1, T, H * D)},
        {"grad_output", CG_DUMP_DOUT, CG_F32, CG_DIMS(T, H * D)},
        {"grad_softmax_offset", CG_DUMP_GRAD_SINK, CG_F32, CG_DIMS(H)},
        {"kv_states", CG_DUMP_KV, CG_F32, CG_DIMS(T, 1, D)},
        {"indexer_loss", CG_DUMP_LOSS, CG_F32, CG_DIMS(1)},
        {"index_query", CG_DUMP_Q_INDEXER, CG_F32, CG_DIMS(T, H, D)},
        {"indexer_q", CG_DUMP_Q_INDEXER, CG_F32, CG_DIMS(T, H, D)},
        {"index_key", CG_DUMP_K_INDEXER, CG_F32, CG_DIMS(C, 1, D)},
        {"indexer_weights", CG_DUMP_WEIGHTS, CG_F32, CG_DIMS(T, H)},
        {"cu_seqlens_kv_padded", CG_DUMP_CU_COMPRESSED, CG_I32, CG_DIMS(3)},
    };
    static const float zeros[T * H * D];
    static const int32_t keys[] = {0, 3, 5}, none[T * K];
    int32_t lists[T * K];
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        memory m = packed(lists);
        m.n--; /* the lists */
        if (known[i].id == CG_DUMP_LSE) add(&m, "kv", CG_F32, CG_SHAPE(T, D), zeros);
        add(&m, known[i].name, known[i].dtype, known[i].shape,
            known[i].id == CG_DUMP_CU_COMPRESSED ? (const void *)keys
            : known[i].dtype == CG_I32           ? (const void *)none
                                                 : (const void *)zeros);
        cg_dump *d = opened(&m);
        if (!d->array[known[i].id].name || strcmp(d->array[known[i].id].name, known[i].name))
            ck_abort_msg("%s is not known", known[i].name);
        ck_assert_int_eq(d->n_unused, 0);
        cg_dump_close(d);
    }
}
END_TEST

/* ---- kinds of elements ---- */

static void put_whole(cg_dtype dtype, void *to, int64_t i, int64_t x) {
    const size_t bytes = cg_dtype_bytes(dtype);
    memcpy((char *)to + (size_t)i * bytes, &x, bytes); /* the low bytes come first */
}

/* Lists, offsets, lengths and masks in any kind of whole number say the same. */
START_TEST(whole_numbers_of_any_kind) {
    static const cg_dtype kinds[] = {CG_I8, CG_I16, CG_I32, CG_I64, CG_U8, CG_U16, CG_U32, CG_U64};
    static const uint8_t mask[T] = {1, 1, 1, 1, 0, 0, 1, 1, 1, 0, 0, 0};
    static const int32_t keys[] = {0, 3, 5};
    int32_t lists[T * K];
    int64_t room[5][T * K], ratio;
    for (int i = 0; i < 8; i++) {
        const cg_dtype kind = kinds[i];
        memory m = packed(lists);
        m.n_meta = 0; /* the ratio comes from a tensor */
        for (int k = 0; k < T * K; k++) put_whole(kind, room[0], k, k / K % 6 < 4 ? 0 : -1);
        for (int b = 0; b < 3; b++) {
            put_whole(kind, room[1], b, physical[b]);
            put_whole(kind, room[2], b, real[b]);
            put_whole(kind, room[3], b, keys[b]);
        }
        for (int t = 0; t < T; t++) put_whole(kind, room[4], t, mask[t]);
        put_whole(kind, &ratio, 0, 2);
        add(&m, "topk", kind, CG_SHAPE(T, K), room[0]);
        add(&m, "cu_seqlens_q", kind, CG_SHAPE(3), room[1]);
        add(&m, "cu_seqlens_q_real", kind, CG_SHAPE(3), room[2]);
        add(&m, "cu_seqlens_compressed", kind, CG_SHAPE(3), room[3]);
        add(&m, "query_valid_rows", kind, CG_SHAPE(T), room[4]);
        add(&m, "ratio", kind, CG_SHAPE(1), &ratio);
        cg_dump *d = opened(&m);
        ck_assert(d->ratio == 2 && d->real[0] == 4 && d->real[1] == 3 && d->n_keys[0] == 3 &&
                  d->n_keys[1] == 2);
        expect_list(d, 0, 0, 0, 0);
        expect_list(d, 8, 0, 0, 0);
        cg_dump_close(d);
    }
    memory m = packed(lists); /* truth values: a mask alone */
    add(&m, "query_valid_rows", CG_BOOL, CG_SHAPE(T), mask);
    cg_dump *d = opened(&m);
    ck_assert(d->real[0] == 4 && d->real[1] == 3);
    cg_dump_close(d);
    add(&m, "topk", CG_BOOL, CG_SHAPE(T, K), lists);
    refused(&m, "memory: topk has elements bool, expected whole numbers of 8 to 64 bits");
    m = packed(lists);
    add(&m, "query_valid_rows", CG_F32, CG_SHAPE(T), query);
    refused(&m, "query_valid_rows has elements f32, expected truth values or whole numbers of 8 to 64 bits");
}
END_TEST

/* What is no index is refused with its place and all its digits, wherever an index is needed. */
START_TEST(numbers_beyond_all_indexes) {
    int32_t lists[T * K];
    uint64_t wide[T * K], offsets[3] = {0, 6, 10};
    memory m = packed(lists);
    memset(wide, 0, sizeof wide);
    for (int k = 0; k < K; k++) wide[4 * K + k] = UINT64_MAX; /* padding */
    add(&m, "topk", CG_U64, CG_SHAPE(T, K), wide);
    cg_dump_close(opened(&m));
    wide[7 * K + 1] = UINT64_MAX;
    refused(&m, "topk of segment 1, position 1, slot 1 is 18446744073709551615, expected -1 or 0 to 1");
    wide[7 * K + 1] = (uint64_t)INT64_MAX + 1;
    refused(&m, "topk of segment 1, position 1, slot 1 is 9223372036854775808, expected -1 or 0 to 1");
    m = packed(lists);
    add(&m, "cu_seqlens_q", CG_U64, CG_SHAPE(3), offsets);
    offsets[2] = UINT64_MAX - 1;
    refused(&m, "cu_seqlens_q[2] is 18446744073709551614, but there are 12 rows");
    offsets[0] = UINT64_MAX;
    refused(&m, "cu_seqlens_q[0] is 18446744073709551615, expected 0");
}
END_TEST

/* A file with elements that are not read: passed over with one note, and refused where the check needs them. */
START_TEST(unread_elements) {
    static const char head[] = "{\"__metadata__\":{\"ratio\":\"2\"},\"query\":{\"dtype\":\"F32\",\"shape\":[2,"
                               "1,1],\"data_offsets\":[0,8]},"
                               "\"%s\":{\"dtype\":\"F8_E4M3\",\"shape\":[1,1],\"data_offsets\":[8,9]},"
                               "\"other\":{\"dtype\":\"%s\",\"shape\":[3],\"data_offsets\":[9,12]}}";
    static const struct {
        const char *name, *other, *note, *refusal;
    } cases[] = {
        {"codes", "U8", "passed over: codes, whose elements are not read (F8_E4M3)", NULL},
        {"codes", "X1", "passed over: 2 tensors whose elements are not read, the first is codes (F8_E4M3)",
         NULL},
        {"compressed_kv", "U8", NULL, ": compressed_kv has elements F8_E4M3, expected f32, f64, bf16 or f16"},
        {"topk", "U8", NULL, ": topk has elements F8_E4M3, expected whole numbers of 8 to 64 bits"},
        {"window", "U8", NULL, "expected an integer from 1, got \"elements F8_E4M3\""},
    };
    char path[] = "/tmp/csagrad_unread_XXXXXX";
    int fd = mkstemp(path);
    ck_assert_int_ge(fd, 0);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[600];
        uint64_t n = (uint64_t)snprintf(text, sizeof text, head, cases[i].name, cases[i].other);
        ck_assert(!ftruncate(fd, 0) && pwrite(fd, &n, 8, 0) == 8 && pwrite(fd, text, n, 8) == (ssize_t)n &&
                  !ftruncate(fd, (off_t)(8 + n + 12)));
        cg_error error = {0};
        const cg_dump_options from = {.paths = (const char *const[]){path}, .n_paths = 1};
        cg_dump *d = cg_dump_open(&from, &error);
        ck_assert_msg(!d == !cases[i].note, "%s", error.text);
        if (d)
            ck_assert_str_eq(d->passed_over, cases[i].note);
        else
            ck_assert_msg(strstr(error.text, cases[i].refusal) != NULL, "%s", error.text);
        cg_dump_close(d);
    }
    /* beside a dump that can be judged: one note, and the same verdict */
    static const char alone[] =
        "\x3a\0\0\0\0\0\0\0{\"codes\":{\"dtype\":\"F4\",\"shape\":[2],\"data_offsets\":[0,1]}} !";
    ck_assert(!ftruncate(fd, 0) && pwrite(fd, alone, sizeof alone - 1, 0) == sizeof alone - 1);
    cg_error error = {0};
    const cg_dump_options both = {
        .paths = (const char *const[]){TEST_DATA_DIR "/sbhd_sparse_mean.safetensors", path}, .n_paths = 2};
    cg_dump *d = cg_dump_open(&both, &error);
    cg_verdict *v = d ? cg_verdict_make(d, &(cg_verdict_options){0}, &error) : NULL;
    ck_assert_msg(v && v->match, "%s", error.text);
    ck_assert_str_eq(v->notes[0], "passed over: codes, whose elements are not read (F4)");
    free(v);
    cg_dump_close(d);
    close(fd);
    unlink(path);
}
END_TEST

/* ---- in memory ---- */

START_TEST(memory_is_as_good_as_a_file) {
    cg_safetensors *file = golden_open("sbhd_sparse_mean");
    memory m = {.n = 0};
    void *at = NULL;
    const char *key, *value;
    while (cg_safetensors_metadata_next(file, &at, &key, &value)) say(&m, key, value);
    for (int i = 0; i < cg_safetensors_count(file); i++)
        if (strncmp(cg_safetensors_at(file, i)->name, "oracle.", 7))
            m.tensors[m.n++] = *cg_safetensors_at(file, i);
    cg_dump *d = opened(&m);
    ck_assert_str_eq(d->array[CG_DUMP_QUERY].file, "memory");
    const cg_verdict_options how = {0};
    cg_error error = {0};
    cg_verdict *v = cg_verdict_make(d, &how, &error);
    if (!v) ck_abort_msg("%s", error.text);
    ck_assert(v->match && v->n_quantities == 8);
    free(v);
    cg_dump_close(d);
    cg_safetensors_close(file);

    int32_t lists[T * K];
    m = packed(lists);
    m.tensors[m.n++] = m.tensors[0];
    refused(&m, "memory: tensor \"query\" is also in memory");
    m = packed(lists);
    m.tensors[0].name = "other";
    refused(&m, "memory: neither query nor q_indexer is there");
    /* beside a file */
    char path[512];
    snprintf(path, sizeof path, "%s/%s.safetensors", TEST_DATA_DIR, "sbhd_sparse_mean");
    const char *paths[] = {path};
    const cg_named_tensor twin = {"in.query", {CG_F32, CG_SHAPE(T, H, D), query}};
    const cg_dump_options both = {.paths = paths, .n_paths = 1, .tensors = &twin, .n_tensors = 1};
    ck_assert_ptr_null(cg_dump_open(&both, &error));
    ck_assert_ptr_nonnull(strstr(error.text, "\"in.query\" is also in /"));
}
END_TEST

/* ---- misread offsets ---- */

START_TEST(misread_offsets) {
    int32_t lists[T * K];
    float target[T * C];
    for (int i = 0; i < T * C; i++) target[i] = (float)i;
    memory m = packed(lists);
    add(&m, "target", CG_F32, CG_SHAPE(T, C), target);
    const int32_t seen[] = {0, 1, 2}; /* row 4: padding; here row 0 of segment 1, which has one key */
    memcpy(lists + 4 * K, seen, sizeof seen);
    cg_dump *d = opened(&m);
    for (int how = 0; how < 2; how++) {
        cg_error error = {0};
        cg_dump *view = cg_dump_misread(d, how ? CG_MISREAD_KEYS_KEPT : CG_MISREAD_KEYS_PACKED, &error);
        ck_assert_ptr_nonnull(view);
        ck_assert(view->B == 2 && view->T == T && view->N == 2);
        ck_assert(view->start[0] == 0 && view->physical[0] == 4 && view->real[0] == 4 && view->n_keys[0] == 2);
        ck_assert(view->start[1] == 4 && view->physical[1] == 3 && view->real[1] == 3 && view->n_keys[1] == 1);
        ck_assert(view->first_key[0] == 0 && view->first_key[1] == (how ? 3 : 2));
        for (int t = 0; t < T; t++) {
            ck_assert_int_eq(view->segment[t], t < 4 ? 0 : t < 7 ? 1 : -1);
            ck_assert_int_eq(cg_dump_is_real(view, t), t < 7);
            ck_assert_int_eq(cg_dump_visible(view, t), t < 4 ? (t + 1) / 2 : t == 5 || t == 6);
        }
        expect_list(view, 4, 0, -1, -1);
        expect_list(view, 7, -1, -1, -1);
        double x[H * D];
        cg_dump_key(view, CG_DUMP_COMPRESSED_KV, 1, 0, x);
        ck_assert(x[0] == (how ? 300 : 200));
        cg_dump_columns(view, CG_DUMP_TARGET, 5, 1, x);
        ck_assert(x[0] == 5 * C + (how ? 3 : 2));
        cg_dump_row(view, CG_DUMP_QUERY, 5, x);
        ck_assert(x[0] == 5 * H * D + 0.5);
        cg_dump_close(view);
    }
    /* the dump is as it was */
    ck_assert(d->start[1] == 6 && d->segment[4] == 0 && d->first_key[1] == 3);
    expect_list(d, 4, 0, 1, 2);
    cg_dump_close(d);

    /* nothing to misread */
    cg_error error = {0};
    add(&m, "cu_seqlens_q_real", CG_I32, CG_SHAPE(3), physical);
    d = opened(&m);
    ck_assert_ptr_null(cg_dump_misread(d, CG_MISREAD_KEYS_PACKED, &error));
    cg_dump_close(d);
    memory masked =
        with_offsets(lists, "cu_seqlens_q", physical, "cu_seqlens_compressed", (int32_t[]){0, 3, 5});
    add(&masked, "query_valid_rows", CG_I32, CG_SHAPE(T), (int32_t[T]){1, 1, 0, 0, 0, 0, 1});
    d = opened(&masked);
    ck_assert_int_eq(d->real[1], 1);
    ck_assert_ptr_null(cg_dump_misread(d, CG_MISREAD_KEYS_KEPT, &error));
    cg_dump_close(d);
    ck_assert_int_eq(error.code, CG_OK);
}
END_TEST

/* ---- what numbers need ---- */

static cg_dtype held(cg_dtype dtype, int64_t n, const void *data) {
    int32_t lists[T * K];
    memory m = packed(lists);
    memset(query, 0, sizeof query);
    memcpy(query, data, (size_t)n * cg_dtype_bytes(dtype)); /* aligned, and not longer than it was */
    add(&m, n == 1 ? "loss" : "out.kl", dtype, n == 1 ? CG_SHAPE(1) : CG_SHAPE(T), query);
    m.tensors[0].tensor.data = ckv, m.tensors[0].tensor.shape = CG_SHAPE(T, 1, 1);
    m.tensors[1].tensor.shape = CG_SHAPE(C, 1);
    cg_dump *d = opened(&m);
    const cg_dtype kind = cg_dump_holds(d, n == 1 ? CG_DUMP_LOSS : CG_DUMP_KL);
    ck_assert_int_eq(cg_dump_holds(d, CG_DUMP_TOPK), CG_I32);
    cg_dump_close(d);
    return kind;
}

static cg_dtype held_f64(double x) { return held(CG_F64, 1, &x); }
static cg_dtype held_f32(float x) { return held(CG_F32, 1, &x); }

START_TEST(numbers_tell_their_type) {
    const double third = 1.0 / 3;
    ck_assert_int_eq(held_f64(third), CG_F64);
    ck_assert_int_eq(held_f64((double)(float)third), CG_F32);
    ck_assert_int_eq(held_f64(0x1.554p-2), CG_F16); /* 11 bits */
    ck_assert_int_eq(held_f64(0x1.555p-2), CG_F32); /* 13 */
    ck_assert_int_eq(held_f64(0x1.54p-2), CG_BF16);
    ck_assert_int_eq(held_f64(-0x1.56p-2), CG_BF16);
    ck_assert_int_eq(held_f32(0x1.56p-2F), CG_BF16);
    ck_assert_int_eq(held_f32((float)third), CG_F32);
    /* the ends of their ranges: f16 from 2^-24 to below 2^16, bf16 from 2^-133, f32 from 2^-149 */
    ck_assert_int_eq(held_f64(0x1.ffcp15), CG_F16);
    ck_assert_int_eq(held_f64(0x1.ffcp16), CG_F32);
    ck_assert_int_eq(held_f64(0x1.ffcp-15), CG_F32); /* its last bit is 2^-25 */
    ck_assert_int_eq(held_f64(0x1.ff8p-15), CG_F16);
    ck_assert_int_eq(held_f64(0x1.fp127), CG_BF16);
    ck_assert_int_eq(held_f64(0x1.fp128), CG_F64);
    ck_assert_int_eq(held_f64(0x1.fp-129), CG_BF16);
    ck_assert_int_eq(held_f64(0x1.fp-130), CG_F32);
    ck_assert_int_eq(held_f64(0x1.fp-145), CG_F32);
    ck_assert_int_eq(held_f64(0x1.fp-146), CG_F64);
    ck_assert_int_eq(held_f64(0x1.fp-1030), CG_F64);
    /* says nothing */
    ck_assert_int_eq(held_f64(0), CG_F64);
    ck_assert_int_eq(held_f64(15), CG_F64);
    ck_assert_int_eq(held_f64(17), CG_BF16);
    ck_assert_int_eq(held_f32(-0.875F), CG_F32);
    ck_assert_int_eq(held_f32(INFINITY), CG_F32);
    const float whole[T] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
    ck_assert_int_eq(held(CG_F32, T, whole), CG_F32);
    /* one number of an array decides, NaN none */
    float array[T] = {1, NAN, 0x1.56p-2F, 0, -INFINITY, 3};
    ck_assert_int_eq(held(CG_F32, T, array), CG_BF16);
    array[T - 1] = 0x1.554p3F;
    ck_assert_int_eq(held(CG_F32, T, array), CG_F16);
    array[T - 2] = 0x1.56p60F; /* too large for f16, the other too fine for bf16 */
    ck_assert_int_eq(held(CG_F32, T, array), CG_F32);
    /* stored in two bytes */
    const uint16_t fine[T] = {0x3555, 0x3c00}, coarse[T] = {0x3558, 0x3c00};
    ck_assert_int_eq(held(CG_F16, T, fine), CG_F16);
    ck_assert_int_eq(held(CG_F16, T, coarse), CG_BF16);
    ck_assert_int_eq(held(CG_BF16, T, fine), CG_BF16);
}
END_TEST

int main(void) {
    const TTest *const tests[] = {whole_numbers_of_any_kind,
                                  numbers_beyond_all_indexes,
                                  unread_elements,
                                  lists_of_padding_may_hold_anything,
                                  lists_of_real_rows_are_checked,
                                  a_refusal_names_misread_offsets,
                                  lists_have_any_width,
                                  heads_may_be_merged,
                                  a_loss_is_one_number,
                                  facts_must_agree,
                                  halves,
                                  counts_are_whole,
                                  mask_of_a_batch,
                                  offsets_by_their_names,
                                  declared_words,
                                  names_of_frameworks,
                                  memory_is_as_good_as_a_file,
                                  misread_offsets,
                                  numbers_tell_their_type};
    return suite_run("dump_read", tests, (int)(sizeof tests / sizeof *tests));
}
