/* Arrays of bf16, read by core/base/bf16.c once for each path. */

static void ISA(widen)(int64_t n, const uint16_t *restrict x, float *restrict y) {
    for (int64_t i = 0; i < n; i++) y[i] = cg_bf16_get(x[i]);
}

static void ISA(narrow)(int64_t n, const float *restrict x, uint16_t *restrict y) {
    for (int64_t i = 0; i < n; i++) y[i] = cg_bf16_of(x[i]);
}
