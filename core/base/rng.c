#include "core/base/rng.h"

#include <math.h>

typedef struct block {
    uint32_t word[4];
} block;

static block philox(uint64_t seed, uint64_t stream, uint64_t index) {
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    uint32_t c0 = (uint32_t)index, c1 = (uint32_t)(index >> 32);
    uint32_t c2 = (uint32_t)stream, c3 = (uint32_t)(stream >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)UINT32_C(0xD2511F53) * c0;
        uint64_t p1 = (uint64_t)UINT32_C(0xCD9E8D57) * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += UINT32_C(0x9E3779B9); /* the golden ratio and sqrt(3) - 1: the published key schedule */
        k1 += UINT32_C(0xBB67AE85);
    }
    return (block){{c0, c1, c2, c3}};
}

uint32_t cg_random_u32(uint64_t seed, uint64_t stream, uint64_t index) {
    return philox(seed, stream, index).word[0];
}

double cg_random_uniform(uint64_t seed, uint64_t stream, uint64_t index) {
    return philox(seed, stream, index).word[0] * 0x1p-32;
}

int64_t cg_random_below(uint64_t seed, uint64_t stream, uint64_t index, int64_t n) {
    /* floor(x n / 2^128) with the whole block as x. A draw of 64 bits would need a rejection loop to be fair
     * for large n; with 128 bits what is left of the unfairness cannot be seen, and a draw stays one block. */
    block b = philox(seed, stream, index);
    uint64_t high = (uint64_t)b.word[0] << 32 | b.word[1];
    uint64_t low = (uint64_t)b.word[2] << 32 | b.word[3];
    __uint128_t carry = ((__uint128_t)low * (uint64_t)n) >> 64;
    return (int64_t)(((__uint128_t)high * (uint64_t)n + carry) >> 64);
}

double cg_random_normal(uint64_t seed, uint64_t stream, uint64_t index) {
    block b = philox(seed, stream, index);
    double radius = sqrt(-2.0 * log((b.word[0] + 0.5) * 0x1p-32)); /* the half keeps log away from 0 */
    return radius * cos(2.0 * 3.14159265358979323846 * (b.word[1] * 0x1p-32));
}

uint64_t cg_random_stream(const char *name) {
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (; *name; name++) hash = (hash ^ (unsigned char)*name) * UINT64_C(0x100000001b3);
    return hash;
}
