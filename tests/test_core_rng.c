/* Random numbers against published and independently computed values, and misspelt words against their list. */
#include <check.h>
#include <math.h>
#include <stdlib.h>

#include "core/base/rng.h"
#include "core/base/suggest.h"

/* The three vectors of Random123's kat_vectors for philox4x32-10: the first word is cg_random_u32, the first
 * two but for their last two bits are cg_random_below with n = 2^62. */
START_TEST(philox_known_answers) {
    static const struct {
        uint64_t seed, stream, index;
        uint32_t word[2];
    } known[] = {
        {0, 0, 0, {0x6627e8d5, 0xe169c58d}},
        {UINT64_MAX, UINT64_MAX, UINT64_MAX, {0x408f276d, 0x41c83b0e}},
        {0x299f31d0a4093822, 0x0370734413198a2e, 0x85a308d3243f6a88, {0xd16cfe09, 0x94fdcceb}},
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        uint64_t both = (uint64_t)known[i].word[0] << 32 | known[i].word[1];
        ck_assert_uint_eq(cg_random_u32(known[i].seed, known[i].stream, known[i].index), known[i].word[0]);
        ck_assert_int_eq(cg_random_below(known[i].seed, known[i].stream, known[i].index, INT64_C(1) << 62),
                         (int64_t)(both >> 2));
    }
}
END_TEST

/* Numbers from a literal transcription of the algorithm in Python with exact integers. */
START_TEST(known_draws) {
    static const struct {
        uint64_t seed, stream, index;
        double uniform, normal;
        int64_t below_10, below_1000003, below_most;
    } known[] = {
        {1, 2, 3, 0x1.bc117ea4p-1, -0.4304758461134398, 8, 867323, 7999624018428657574},
        {0x0123456789abcdef, 0xfedcba9876543210, 0x0011223344556677, 0x1.c2af685ap-1, -0.03825552952615643, 8,
         880247, 8118822543999852930},
        {0, 0, 0, 0x1.989fa354p-2, 0.9911376792540323, 3, 399047, 3680554060633924294},
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        uint64_t seed = known[i].seed, stream = known[i].stream, index = known[i].index;
        ck_assert_double_eq(cg_random_uniform(seed, stream, index), known[i].uniform);
        ck_assert_double_eq_tol(cg_random_normal(seed, stream, index), known[i].normal, 1e-14);
        ck_assert_int_eq(cg_random_below(seed, stream, index, 1), 0);
        ck_assert_int_eq(cg_random_below(seed, stream, index, 10), known[i].below_10);
        ck_assert_int_eq(cg_random_below(seed, stream, index, 1000003), known[i].below_1000003);
        ck_assert_int_eq(cg_random_below(seed, stream, index, INT64_MAX), known[i].below_most);
    }
}
END_TEST

/* Here the third word decides: without it the product would be one less. */
START_TEST(below_uses_more_than_64_bits) {
    ck_assert_int_eq(cg_random_below(0, 0, 2, INT64_MAX), 179389259095185747);
    ck_assert_int_eq(cg_random_below(0, 0, 6, INT64_MAX), 6581911883909449241);
}
END_TEST

START_TEST(every_bit_of_the_arguments_counts) {
    uint32_t base = cg_random_u32(5, 6, 7);
    for (int bit = 0; bit < 64; bit++) {
        uint64_t flip = UINT64_C(1) << bit;
        ck_assert_uint_ne(cg_random_u32(5 ^ flip, 6, 7), base);
        ck_assert_uint_ne(cg_random_u32(5, 6 ^ flip, 7), base);
        ck_assert_uint_ne(cg_random_u32(5, 6, 7 ^ flip), base);
    }
    ck_assert_uint_eq(cg_random_u32(5, 6, 7), base); /* no state was kept */
}
END_TEST

enum { DRAWS = 200000 };

START_TEST(uniform_moments) {
    double sum = 0, squares = 0;
    for (uint64_t i = 0; i < DRAWS; i++) {
        double u = cg_random_uniform(1, 0, i);
        ck_assert(u >= 0 && u < 1);
        sum += u;
        squares += u * u;
    }
    /* five standard errors */
    ck_assert_double_eq_tol(sum / DRAWS, 0.5, 5 * sqrt(1.0 / 12 / DRAWS));
    ck_assert_double_eq_tol(squares / DRAWS, 1.0 / 3, 5 * sqrt(4.0 / 45 / DRAWS));
}
END_TEST

START_TEST(normal_moments) {
    double moments[5] = {0}, neighbours = 0, before = 0;
    for (uint64_t i = 0; i < DRAWS; i++) {
        double x = cg_random_normal(1, 0, i), power = 1;
        ck_assert(isfinite(x));
        for (int m = 0; m < 5; m++, power *= x) moments[m] += power / DRAWS;
        neighbours += x * before / DRAWS;
        before = x;
    }
    double error = 5 / sqrt(DRAWS); /* times the standard deviation of x^m */
    ck_assert_double_eq_tol(moments[1], 0, error);
    ck_assert_double_eq_tol(moments[2], 1, error * sqrt(2));
    ck_assert_double_eq_tol(moments[3], 0, error * sqrt(15));
    ck_assert_double_eq_tol(moments[4], 3, error * sqrt(96));
    ck_assert_double_eq_tol(neighbours, 0, error);
}
END_TEST

START_TEST(below_is_fair) {
    int64_t counts[7] = {0};
    for (uint64_t i = 0; i < DRAWS; i++) {
        int64_t k = cg_random_below(3, 9, i, 7);
        ck_assert(k >= 0 && k < 7);
        counts[k]++;
    }
    double chi2 = 0, expected = DRAWS / 7.0;
    for (int k = 0; k < 7; k++) chi2 += (counts[k] - expected) * (counts[k] - expected) / expected;
    ck_assert_double_lt(chi2, 30); /* 6 degrees of freedom: beyond 30 once in 25000 */

    /* n of 3/4 of 2^63: with 64 random bits and no more, a remainder would favour the lower half by a third */
    int64_t n = INT64_C(3) << 61, lower = 0;
    for (uint64_t i = 0; i < DRAWS; i++) {
        int64_t k = cg_random_below(3, 10, i, n);
        ck_assert(k >= 0 && k < n);
        lower += k < n / 2;
    }
    ck_assert_double_eq_tol((double)lower / DRAWS, 0.5, 5 * 0.5 / sqrt(DRAWS));
}
END_TEST

START_TEST(stream_is_fnv1a) {
    ck_assert_uint_eq(cg_random_stream(""), 0xcbf29ce484222325);
    ck_assert_uint_eq(cg_random_stream("a"), 0xaf63dc4c8601ec8c);
    ck_assert_uint_eq(cg_random_stream("foobar"), 0x85944171f73967e8);
    ck_assert_uint_eq(cg_random_stream("layers.0.wq\xff"), 0x72f9af791f5403ce); /* bytes count as 0 .. 255 */
}
END_TEST

START_TEST(suggest_nearest) {
    static const char *const known[] = {"learning_rate", "layers", "lr", "warmup", "window", "learning_date"};
    int n = sizeof known / sizeof known[0];
    ck_assert_str_eq(cg_suggest("learning_rat", known, n), "learning_rate");
    ck_assert_str_eq(cg_suggest("learning_late", known, n), "learning_rate"); /* two at distance 1: the first */
    ck_assert_str_eq(cg_suggest("windwo", known, n), "window");
    ck_assert_str_eq(cg_suggest("ayers", known, n), "layers");
    ck_assert_str_eq(cg_suggest("warmup_", known, n), "warmup");
    ck_assert_str_eq(cg_suggest("layers", known, n), "layers");
    ck_assert_str_eq(cg_suggest("lrr", known, n), "lr");
}
END_TEST

START_TEST(suggest_nothing_far) {
    static const char *const known[] = {"abcdefgh", "lr"};
    ck_assert_str_eq(cg_suggest("abcdxxxx", known, 2), "abcdefgh"); /* 8 letters: 4 away is near */
    ck_assert_ptr_null(cg_suggest("abcxxxxx", known, 2));           /* 5 is not */
    ck_assert_ptr_null(cg_suggest("xy", known, 2));                 /* 2 away, but no letter in common */
    ck_assert_ptr_null(cg_suggest("", known, 2));
    ck_assert_ptr_null(cg_suggest("lr", known, 0));
    ck_assert_ptr_null(cg_suggest("lr", NULL, 0));
}
END_TEST

START_TEST(suggest_long_words) {
    char word[129], other[129];
    for (int i = 0; i < 128; i++) word[i] = other[i] = 'a';
    word[127] = word[128] = other[126] = other[127] = other[128] = 0;
    const char *known[] = {other};
    ck_assert_ptr_eq(cg_suggest(word, known, 1), other); /* 127 and 126 letters */
    word[127] = 'a';
    ck_assert_ptr_null(cg_suggest(word, known, 1));
    known[0] = word;
    ck_assert_ptr_null(cg_suggest(other, known, 1));
}
END_TEST

int main(void) {
    Suite *suite = suite_create("core_rng");
    TCase *rng = tcase_create("rng"), *suggest = tcase_create("suggest");
    tcase_add_test(rng, philox_known_answers);
    tcase_add_test(rng, known_draws);
    tcase_add_test(rng, below_uses_more_than_64_bits);
    tcase_add_test(rng, every_bit_of_the_arguments_counts);
    tcase_add_test(rng, uniform_moments);
    tcase_add_test(rng, normal_moments);
    tcase_add_test(rng, below_is_fair);
    tcase_add_test(rng, stream_is_fnv1a);
    tcase_add_test(suggest, suggest_nearest);
    tcase_add_test(suggest, suggest_nothing_far);
    tcase_add_test(suggest, suggest_long_words);
    suite_add_tcase(suite, rng);
    suite_add_tcase(suite, suggest);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_ENV);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
