/* bf16: the upper half of an f32, to store numbers in. They are widened to f32, which is exact, to be computed with, and
 * rounded to the nearest, ties to even, to be stored. Subnormal numbers and the sign of zero stay; NaN stays NaN.
 */
#ifndef CG_CORE_BF16_H
#define CG_CORE_BF16_H

#include <stdint.h>
#include <string.h>

static inline float cg_bf16_get(uint16_t bits) {
    const uint32_t wide = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &wide, sizeof x);
    return x;
}

static inline uint16_t cg_bf16_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, nan = bits >> 16 | 0x40;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}

/* Arrays, which must not overlap. */
void cg_bf16_widen(int64_t n, const uint16_t *restrict x, float *restrict y);
void cg_bf16_narrow(int64_t n, const float *restrict x, uint16_t *restrict y);

#endif
