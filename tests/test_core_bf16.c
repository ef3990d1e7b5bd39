/* bf16: every value there and back, rounding between all neighbours, arrays as their elements. */
#include "tests/support.h"

#include "core/base/bf16.h"
#include "core/base/tensor.h"

static float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

START_TEST(every_value_comes_back) {
    for (uint32_t bits = 0; bits < 65536; bits++) {
        float x = cg_bf16_get((uint16_t)bits);
        if (isnan(x)) {
            if (!isnan(cg_bf16_get(cg_bf16_of(x)))) ck_abort_msg("NaN %#x becomes a number", bits);
        } else if (cg_bf16_of(x) != bits ||
                   (double)x != cg_dtype_get(CG_BF16, (uint16_t[]){(uint16_t)bits}, 0)) {
            ck_abort_msg("%#x comes back as %#x", bits, cg_bf16_of(x));
        }
    }
}
END_TEST

/* Between each number and the next: a hair, just below half, half, just above half, just below the next. */
START_TEST(rounds_to_nearest_even) {
    for (uint32_t bits = 0; bits < 0x7f80; bits++)
        for (uint32_t sign = 0; sign <= 0x8000; sign += 0x8000) {
            const uint32_t low = bits | sign, high = low + 1, even = low & 1 ? high : low;
            const struct {
                uint32_t beyond, want;
            } cases[] = {{1, low}, {0x7fff, low}, {0x8000, even}, {0x8001, high}, {0xffff, high}};
            for (int c = 0; c < 5; c++) {
                uint16_t got = cg_bf16_of(float_of(low << 16 | cases[c].beyond));
                if (got != cases[c].want)
                    ck_abort_msg("%#x rounds to %#x, expected %#x", low << 16 | cases[c].beyond, got,
                                 cases[c].want);
            }
        }
    ck_assert_uint_eq(cg_bf16_of(INFINITY), 0x7f80);
    ck_assert_uint_eq(cg_bf16_of(-INFINITY), 0xff80);
    ck_assert_uint_eq(cg_bf16_of(3.4e38f), 0x7f80); /* above the largest by more than half a step */
    ck_assert(
        isnan(cg_bf16_get(cg_bf16_of(float_of(0x7f800001))))); /* its payload lies in the lower half alone */
    uint16_t set;
    cg_dtype_set(CG_BF16, &set, 0, -1.00390625);
    ck_assert_uint_eq(set, 0xbf80);
}
END_TEST

START_TEST(arrays_are_their_elements) {
    enum { N = 203, GUARD = 0x5a5a };
    uint16_t narrow[N + 2];
    float wide[N + 2], x[N + 2];
    for (int at = 0; at < 2; at++) /* whatever the alignment */
        for (int n = 0; n <= N; n++) {
            for (int i = 0; i < N + 2; i++) {
                x[i] = float_of((uint32_t)(i + 1) * 2654435761u);
                narrow[i] = GUARD;
                wide[i] = -7;
            }
            cg_bf16_narrow(n, x + at, narrow + at);
            cg_bf16_widen(n, narrow + at, wide + at);
            for (int i = 0; i < N + 2; i++) {
                bool inside = i >= at && i < at + n;
                uint16_t want = inside ? cg_bf16_of(x[i]) : GUARD;
                float back = inside ? cg_bf16_get(want) : -7;
                if (narrow[i] != want || memcmp(&wide[i], &back, sizeof back))
                    ck_abort_msg("element %d of %d, from %d on: %#x, expected %#x", i, n, at, narrow[i], want);
            }
        }
}
END_TEST

int main(void) {
    Suite *suite = suite_create("core/bf16");
    TCase *tcase = tcase_create("core/bf16");
    suite_add_tcase(suite, tcase);
    tcase_add_test(tcase, every_value_comes_back);
    tcase_add_test(tcase, rounds_to_nearest_even);
    tcase_add_test(tcase, arrays_are_their_elements);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
