/* Dtypes, shapes and their counts up to the edge of 64 bits; errors: the first one wins, text is never overrun.
 */
#include <check.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/tensor.h"

START_TEST(dtypes) {
    static const struct {
        cg_dtype dtype;
        const char *name;
        size_t bytes;
        bool real;
    } known[] = {
        {CG_F32, "f32", 4, true},   {CG_F64, "f64", 8, true},    {CG_I32, "i32", 4, false},
        {CG_BF16, "bf16", 2, true}, {CG_F16, "f16", 2, false},   {CG_I64, "i64", 8, false},
        {CG_U8, "u8", 1, false},    {CG_BOOL, "bool", 1, false}, {CG_I8, "i8", 1, false},
        {CG_I16, "i16", 2, false},  {CG_U16, "u16", 2, false},   {CG_U32, "u32", 4, false},
        {CG_U64, "u64", 8, false},
    };
    ck_assert_uint_eq(sizeof known / sizeof known[0], CG_DTYPES);
    for (int i = 0; i < CG_DTYPES; i++) {
        ck_assert_str_eq(cg_dtype_name(known[i].dtype), known[i].name);
        ck_assert_uint_eq(cg_dtype_bytes(known[i].dtype), known[i].bytes);
        ck_assert_int_eq(cg_dtype_is_real(known[i].dtype), known[i].real);
    }
}
END_TEST

START_TEST(shapes_compare) {
    cg_shape a = CG_SHAPE(2, 3), b = CG_SHAPE(2, 3), transposed = CG_SHAPE(3, 2), longer = CG_SHAPE(2, 3, 1);
    cg_shape scalar = {0};
    ck_assert_int_eq(a.n_dims, 2);
    ck_assert_int_eq(longer.n_dims, 3);
    ck_assert(cg_shape_equal(&a, &b));
    ck_assert(!cg_shape_equal(&a, &transposed));
    ck_assert(!cg_shape_equal(&a, &longer));
    ck_assert(!cg_shape_equal(&scalar, &a));
    b.dims[4] = 9; /* behind the last dimension: means nothing */
    ck_assert(cg_shape_equal(&a, &b));
}
END_TEST

START_TEST(counts) {
    cg_shape scalar = {0}, plain = CG_SHAPE(40, 8, 16), empty = CG_SHAPE(7, 0, 3);
    ck_assert_int_eq(cg_shape_count(&scalar), 1);
    ck_assert_int_eq(cg_shape_count(&plain), 5120);
    ck_assert_int_eq(cg_shape_count(&empty), 0);
    ck_assert_int_eq(cg_tensor_bytes(CG_F64, &scalar), 8);
    ck_assert_int_eq(cg_tensor_bytes(CG_F32, &plain), 20480);
    ck_assert_int_eq(cg_tensor_bytes(CG_F64, &empty), 0);
}
END_TEST

/* 32-bit arithmetic would wrap in each of these: rows times heads times size at the row past the last safe
 * one, and rows times compressed rows. */
START_TEST(counts_beyond_32_bits) {
    cg_shape last = CG_SHAPE(2097151, 16, 64), past = CG_SHAPE(2097152, 16, 64),
             square = CG_SHAPE(131072, 32768);
    ck_assert_int_eq(cg_shape_count(&last), 2147482624);
    ck_assert_int_eq(cg_shape_count(&past), 2147483648);
    ck_assert_int_eq(cg_shape_count(&square), 4294967296);
    ck_assert_int_eq(cg_tensor_bytes(CG_F32, &square), 17179869184);
}
END_TEST

START_TEST(counts_that_do_not_fit) {
    cg_shape edge = CG_SHAPE(INT64_MAX), over = CG_SHAPE(INT64_C(1) << 32, INT64_C(1) << 31);
    cg_shape wraps_to_0 = CG_SHAPE(INT64_C(1) << 32, INT64_C(1) << 32),
             wraps_to_4 = CG_SHAPE(4, (INT64_C(1) << 62) + 1);
    cg_shape negative = CG_SHAPE(3, -1), negatives = CG_SHAPE(-3, -1);
    cg_shape large_empty = CG_SHAPE(INT64_C(1) << 62, INT64_C(1) << 62, 0);
    cg_shape bytes_over = CG_SHAPE(INT64_C(1) << 60), bytes_fit = CG_SHAPE((INT64_C(1) << 60) - 1);
    ck_assert_int_eq(cg_shape_count(&edge), INT64_MAX);
    ck_assert_int_eq(cg_shape_count(&over), INT64_MAX);
    ck_assert_int_eq(cg_shape_count(&wraps_to_0), INT64_MAX);
    ck_assert_int_eq(cg_shape_count(&wraps_to_4), INT64_MAX);
    ck_assert_int_eq(cg_shape_count(&negative), INT64_MAX);
    ck_assert_int_eq(cg_shape_count(&negatives), INT64_MAX);
    ck_assert_int_eq(cg_shape_count(&large_empty), 0);
    ck_assert_int_eq(cg_tensor_bytes(CG_U8, &over), INT64_MAX);
    ck_assert_int_eq(cg_tensor_bytes(CG_F32, &negative), INT64_MAX);
    ck_assert_int_eq(cg_tensor_bytes(CG_F64, &bytes_over), INT64_MAX);
    ck_assert_int_eq(cg_tensor_bytes(CG_F64, &bytes_fit), INT64_MAX - 7);
    ck_assert_int_eq(cg_tensor_bytes(CG_F64, &large_empty), 0);
}
END_TEST

START_TEST(shape_text) {
    char text[200];
    cg_shape scalar = {0}, one = CG_SHAPE(5), three = CG_SHAPE(40, 8, 16);
    cg_shape widest = CG_SHAPE(INT64_MIN, INT64_MIN, INT64_MIN, INT64_MIN, INT64_MIN, INT64_MIN);
    ck_assert_str_eq(cg_shape_text(&scalar, text, sizeof text), "[]");
    ck_assert_str_eq(cg_shape_text(&one, text, sizeof text), "[5]");
    ck_assert_str_eq(cg_shape_text(&three, text, sizeof text), "[40, 8, 16]");
    ck_assert_uint_eq(strlen(cg_shape_text(&widest, text, sizeof text)), 2 + 6 * 20 + 5 * 2);
    for (size_t room = 1; room < 12; room++) { /* cut to what fits, no byte further */
        memset(text, '#', sizeof text);
        cg_shape_text(&three, text, room);
        ck_assert_uint_eq(strlen(text), room - 1);
        ck_assert_int_eq(strncmp(text, "[40, 8, 16]", room - 1), 0);
        ck_assert_int_eq(text[room], '#');
    }
}
END_TEST

START_TEST(first_error_wins) {
    cg_error error = {0};
    ck_assert(!cg_fail(&error, CG_BAD_INPUT, "window is %d, expected at least %d", 0, 1));
    ck_assert_int_eq(error.code, CG_BAD_INPUT);
    ck_assert_str_eq(error.text, "window is 0, expected at least 1");
    ck_assert(!cg_fail(&error, CG_FAILED, "an echo"));
    ck_assert_int_eq(error.code, CG_BAD_INPUT);
    ck_assert_str_eq(error.text, "window is 0, expected at least 1");
    ck_assert(!cg_fail(NULL, CG_FAILED, "nobody listens"));
}
END_TEST

START_TEST(error_at_adds_the_place) {
    cg_error error = {0};
    cg_error_at(&error, "layer %d", 3); /* nothing is wrong yet */
    ck_assert_int_eq(error.code, CG_OK);
    ck_assert_str_eq(error.text, "");
    cg_fail(&error, CG_FAILED, "disk full");
    cg_error_at(&error, "layer %d", 3);
    cg_error_at(&error, "%s", "train");
    ck_assert_int_eq(error.code, CG_FAILED);
    ck_assert_str_eq(error.text, "train: layer 3: disk full");
    cg_error_at(NULL, "nobody");
}
END_TEST

START_TEST(long_errors_are_cut) {
    char word[2 * CG_ERROR_TEXT];
    memset(word, 'w', sizeof word - 1);
    word[sizeof word - 1] = 0;
    struct {
        cg_error error;
        char guard[8];
    } s = {.guard = "guard"};
    cg_fail(&s.error, CG_FAILED, "%s", word);
    ck_assert_uint_eq(strlen(s.error.text), CG_ERROR_TEXT - 1);
    cg_error_at(&s.error, "place");
    ck_assert_uint_eq(strlen(s.error.text), CG_ERROR_TEXT - 1);
    ck_assert_int_eq(strncmp(s.error.text, "place: www", 10), 0);
    for (int length = CG_ERROR_TEXT - 6; length < CG_ERROR_TEXT + 2; length++) {
        cg_error_at(&s.error, "%.*s", length, word);
        ck_assert_uint_lt(strlen(s.error.text), CG_ERROR_TEXT);
        ck_assert_int_eq(s.error.code, CG_FAILED);
    }
    ck_assert_str_eq(s.guard, "guard");
}
END_TEST

int main(void) {
    Suite *suite = suite_create("core_tensor");
    TCase *tensor = tcase_create("tensor"), *error = tcase_create("error");
    tcase_add_test(tensor, dtypes);
    tcase_add_test(tensor, shapes_compare);
    tcase_add_test(tensor, counts);
    tcase_add_test(tensor, counts_beyond_32_bits);
    tcase_add_test(tensor, counts_that_do_not_fit);
    tcase_add_test(tensor, shape_text);
    tcase_add_test(error, first_error_wins);
    tcase_add_test(error, error_at_adds_the_place);
    tcase_add_test(error, long_errors_are_cut);
    suite_add_tcase(suite, tensor);
    suite_add_tcase(suite, error);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_ENV);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
