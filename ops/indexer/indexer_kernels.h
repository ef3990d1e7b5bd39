/* Index scores of one row, for the kernel part of an op's file: included once for each REAL.
 *
 * A query row is held with its heads in the lanes: one vector has CG_LANES heads of one channel, heads past Hi
 * are zeros. A key is read where it lies, channel by channel, so a list of keys costs no gathering. An element
 * of q.k is the fused sum over the channels in order, the same bits as cg_gemm gives (as long as that does not
 * cut the channels: up to 512 in f32, 256 in f64). Heads are added in order. */

/* Vectors wider than the processor has are passed between static functions alone: no ABI to worry about. */
#pragma GCC diagnostic ignored "-Wpsabi"
#undef LANES
#define LANES KERNEL(lanes)
typedef REAL LANES __attribute__((vector_size(CG_LANES * sizeof(REAL)), aligned(sizeof(REAL)), may_alias));

#include "ops/indexer/fused.h"

/* The same for a scalar and two vectors. */
static inline __attribute__((always_inline)) LANES KERNEL(fused_lanes)(REAL a, LANES b, LANES c) {
#if defined(__FMA__) && REAL_BITS == 32
    return (LANES)_mm256_fmadd_ps(_mm256_set1_ps(a), (__m256)b, (__m256)c);
#elif defined(__AVX512F__)
    return (LANES)_mm512_fmadd_pd(_mm512_set1_pd(a), (__m512d)b, (__m512d)c);
#else /* a * b would take a through memory, number by number */
    for (int i = 0; i < CG_LANES; i++) c[i] = KERNEL(fused)(a, b[i], c[i]);
    return c;
#endif
}

/* a[i][j] becomes a[j][i]: swap blocks of 1, then of 2, then of 4 across the diagonal. */
static inline __attribute__((always_inline)) void KERNEL(transpose)(LANES a[CG_LANES]) {
    _Pragma("GCC unroll 4") for (int i = 0; i < 8; i += 2) {
        LANES x = a[i], y = a[i + 1];
        a[i] = __builtin_shufflevector(x, y, 0, 8, 2, 10, 4, 12, 6, 14);
        a[i + 1] = __builtin_shufflevector(x, y, 1, 9, 3, 11, 5, 13, 7, 15);
    }
    _Pragma("GCC unroll 4") for (int n = 0; n < 4; n++) {
        const int i = n / 2 * 4 + n % 2;
        LANES x = a[i], y = a[i + 2];
        a[i] = __builtin_shufflevector(x, y, 0, 1, 8, 9, 4, 5, 12, 13);
        a[i + 2] = __builtin_shufflevector(x, y, 2, 3, 10, 11, 6, 7, 14, 15);
    }
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) {
        LANES x = a[i], y = a[i + 4];
        a[i] = __builtin_shufflevector(x, y, 0, 1, 2, 3, 8, 9, 10, 11);
        a[i + 4] = __builtin_shufflevector(x, y, 4, 5, 6, 7, 12, 13, 14, 15);
    }
}

/* x where x >= 0 or NaN, else 0. */
static inline __attribute__((always_inline)) LANES KERNEL(relu_lanes)(LANES x) {
    __typeof__(x < x) negative = x < (LANES){0};
    return (LANES)(~negative & (__typeof__(negative))x);
}

/* q [Hi, Di] -> lanes [groups of heads, Di] */
static inline void KERNEL(query_pack)(const REAL *q, int64_t Hi, int64_t Di, LANES *lanes) {
    for (int64_t g = 0; g < cg_ceil_div(Hi, CG_LANES); g++)
        for (int64_t d = 0; d < Di; d += CG_LANES) {
            LANES a[CG_LANES] = {0};
            for (int64_t h = 0; h < CG_LANES && g * CG_LANES + h < Hi; h++) {
                const REAL *row = q + (g * CG_LANES + h) * Di + d;
                if (d + CG_LANES <= Di)
                    a[h] = *(const LANES *)row;
                else
                    for (int64_t i = 0; i < Di - d; i++) a[h][i] = row[i];
            }
            KERNEL(transpose)(a);
            for (int64_t i = 0; i < CG_LANES && d + i < Di; i++) lanes[g * Di + d + i] = a[i];
        }
}

/* What the registers hold: sums of two groups of heads with CG_LANES keys (or twice as many numbers of a gradient), or of
 * one group with twice as many. AVX-512 has 32 vector registers, others 16. */
#undef WIDE
#if defined(__AVX512F__)
#define WIDE 1
#else
#define WIDE 0
#endif

/* Where each of the next keys lies: rows index[0..n-1] of k, or its rows 0..n-1 when there is no list. When
 * less than CG_KEYS are left the last one is repeated, so that no other row is read. */
static inline __attribute__((always_inline)) void
KERNEL(keys_at)(const REAL *k, int64_t Di, const int32_t *index, int64_t n, const REAL *key[CG_KEYS]) {
    if (n >= CG_KEYS) {
        _Pragma("GCC unroll 16") for (int i = 0; i < CG_KEYS; i++) key[i] =
            k + (index ? (int64_t)index[i] : i) * Di;
        return;
    }
    for (int64_t i = 0; i < CG_KEYS; i++) {
        int64_t j = i < n ? i : n - 1;
        key[i] = k + (index ? (int64_t)index[j] : j) * Di;
    }
}

/* dots[key] [head] = q.k of `groups` groups of heads, whose channels are lanes [groups, Di], with n_keys keys: dots of one
 * group after those of the other. Both numbers are constants, at most CG_KEYS together. */
static inline __attribute__((always_inline)) void KERNEL(dots_of)(const LANES *lanes, int64_t Di,
                                                                  const int groups, const REAL *const *key,
                                                                  const int n_keys, LANES *dots) {
    LANES sum[CG_KEYS] = {0};
    for (int64_t d = 0; d < Di; d++) _Pragma("GCC unroll 16") for (int i = 0; i < n_keys; i++) {
            const REAL x = key[i][d];
            _Pragma("GCC unroll 2") for (int g = 0; g < groups; g++) sum[g * n_keys + i] =
                KERNEL(fused_lanes)(x, lanes[g * Di + d], sum[g * n_keys + i]);
        }
    _Pragma("GCC unroll 16") for (int i = 0; i < groups * n_keys; i++) dots[i] = sum[i];
}

/* The same for CG_KEYS keys and one or two groups, in the pieces that fit into registers. dots [groups, CG_KEYS]. Keys from
 * number n on are left out where that saves a piece. */
static inline __attribute__((always_inline)) void KERNEL(key_dots)(const LANES *lanes, int64_t Di,
                                                                   int64_t groups,
                                                                   const REAL *const key[CG_KEYS], int64_t n,
                                                                   LANES *dots) {
    if (WIDE && groups == 1 && n > CG_LANES) {
        KERNEL(dots_of)(lanes, Di, 1, key, CG_KEYS, dots);
        return;
    }
    for (int half = 0; half < CG_KEYS && half < n; half += CG_LANES) {
        if (WIDE && groups == 2) {
            LANES both[CG_KEYS];
            KERNEL(dots_of)(lanes, Di, 2, key + half, CG_LANES, both);
            _Pragma("GCC unroll 16") for (int i = 0; i < CG_KEYS; i++)
                dots[i / CG_LANES * CG_KEYS + half + i % CG_LANES] = both[i];
        } else {
            for (int64_t g = 0; g < groups; g++)
                KERNEL(dots_of)(lanes + g * Di, Di, 1, key + half, CG_LANES, dots + g * CG_KEYS + half);
        }
    }
}

/* The scores of the first n of CG_KEYS keys, one in each lane of two vectors. NaN stays NaN. */
static __attribute__((noinline)) void KERNEL(key_scores)(const LANES *lanes, const REAL *w, int64_t Hi,
                                                         int64_t Di, const REAL *const key[CG_KEYS], int64_t n,
                                                         LANES score[CG_KEYS / CG_LANES]) {
    LANES dots[2 * CG_KEYS];
    score[0] = score[1] = (LANES){0};
    for (int64_t h0 = 0; h0 < Hi;) {
        const int64_t groups = Hi - h0 > CG_LANES ? 2 : 1;
        KERNEL(key_dots)(lanes + h0 / CG_LANES * Di, Di, groups, key, n, dots);
        for (int64_t g = 0; g < groups; g++, h0 += CG_LANES)
            for (int half = 0; half < CG_KEYS / CG_LANES && half * CG_LANES < n; half++) {
                LANES *tile = dots + g * CG_KEYS + half * CG_LANES, sum = score[half];
                KERNEL(transpose)(tile);
                if (Hi - h0 >= CG_LANES) {
                    _Pragma("GCC unroll 8") for (int h = 0; h < CG_LANES; h++) sum =
                        KERNEL(fused_lanes)(w[h0 + h], KERNEL(relu_lanes)(tile[h]), sum);
                } else {
                    for (int64_t h = 0; h < Hi - h0; h++)
                        sum = KERNEL(fused_lanes)(w[h0 + h], KERNEL(relu_lanes)(tile[h]), sum);
                }
                score[half] = sum;
            }
    }
}

/* Index scores of the n rows of k from its first on. */
static inline void KERNEL(scores_of)(const LANES *lanes, const REAL *w, const REAL *k, int64_t Hi, int64_t Di,
                                     int64_t n, REAL *scores) {
    for (int64_t j = 0; j < n; j += CG_KEYS) {
        const REAL *key[CG_KEYS];
        LANES score[CG_KEYS / CG_LANES];
        KERNEL(keys_at)(k + j * Di, Di, NULL, n - j, key);
        KERNEL(key_scores)(lanes, w, Hi, Di, key, n - j, score);
        memcpy(scores + j, score, (size_t)(n - j < CG_KEYS ? n - j : CG_KEYS) * sizeof(REAL));
    }
}

/* The gradients of one row's scores, in three steps over a tile of m <= CG_KEY_TILE keys:
 *
 *   dw[h] += ds_j relu(q_h.k_j)     dot_hj = ds_j w[h] where q_h.k_j > 0, else 0
 *   dq_h  += sum_j dot_hj k_j       dk_j  += sum_h dot_hj q_h
 *
 * q.k is made again rather than kept. Each step is a function of its own, so that its pointers stay in
 * registers. */

/* What n keys give one group of heads: dots of q.k become those above, `stride` vectors apart, and dw takes its part. */
static inline __attribute__((always_inline)) void KERNEL(scale_dots)(const LANES *qk, const int64_t n,
                                                                     const REAL *ds, LANES weight,
                                                                     int64_t stride, LANES *dots, LANES *dw) {
    LANES even = {0}, odd = {0}; /* an addition waits for the one before */
    _Pragma("GCC unroll 16") for (int64_t i = 0; i < n; i++) {
        const LANES scaled = ds[i] * weight;
        __typeof__(weight > weight) on = qk[i] > (LANES){0};
        const LANES part = ds[i] * (LANES)(on & (__typeof__(on))qk[i]);
        if (i % 2 == 0)
            even += part;
        else
            odd += part;
        dots[i * stride] = (LANES)(on & (__typeof__(on))scaled);
    }
    *dw += even + odd;
}

static __attribute__((noinline)) void KERNEL(grad_dots)(const LANES *lanes, const REAL *w, const REAL *k,
                                                        int64_t Hi, int64_t Di, const int32_t *index, int64_t m,
                                                        const REAL *ds, LANES *dots, LANES *dw) {
    const int64_t all_groups = cg_ceil_div(Hi, CG_LANES);
    for (int64_t g0 = 0; g0 < all_groups; g0 += 2) {
        const int64_t groups = all_groups - g0 > 1 ? 2 : 1;
        LANES weight[2] = {0};
        for (int64_t h = 0; h < groups * CG_LANES && g0 * CG_LANES + h < Hi; h++)
            weight[h / CG_LANES][h % CG_LANES] = w[g0 * CG_LANES + h];
        for (int64_t j = 0; j < m; j += CG_KEYS) {
            const REAL *key[CG_KEYS];
            LANES tile[2 * CG_KEYS];
            KERNEL(keys_at)(index ? k : k + j * Di, Di, index ? index + j : NULL, m - j, key);
            KERNEL(key_dots)(lanes + g0 * Di, Di, groups, key, m - j, tile);
            for (int64_t g = 0; g < groups; g++) {
                const LANES *qk = tile + g * CG_KEYS;
                LANES *to = dots + j * all_groups + g0 + g, *sum = dw + g0 + g;
                if (m - j >= CG_KEYS) {
                    KERNEL(scale_dots)(qk, CG_KEYS, ds + j, weight[g], all_groups, to, sum);
                } else {
                    KERNEL(scale_dots)(qk, m - j, ds + j, weight[g], all_groups, to, sum);
                }
            }
        }
    }
}

/* n heads and `vectors` vectors of channels, both constants: dq [n, Di] = dots [m, all heads] times keys, or, to `add`, +=. */
static inline __attribute__((always_inline)) void
KERNEL(add_keys)(const REAL *k, int64_t Di, const int32_t *index, int64_t m, const REAL *dots,
                 int64_t all_heads, const int n, const int vectors, bool add, REAL *dq) {
    LANES sum[CG_KEYS] = {0};
    if (add)
        _Pragma("GCC unroll 16") for (int i = 0; i < n * vectors; i++) sum[i] =
            ((const LANES *)(dq + i / vectors * Di))[i % vectors];
    for (int64_t j = 0; j < m; j++) {
        const LANES *key = (const LANES *)(k + (index ? (int64_t)index[j] : j) * Di);
        const REAL *dot = dots + j * all_heads;
        _Pragma("GCC unroll 4") for (int h = 0; h < n; h++)
            _Pragma("GCC unroll 4") for (int v = 0; v < vectors; v++) sum[h * vectors + v] =
                KERNEL(fused_lanes)(dot[h], key[v], sum[h * vectors + v]);
    }
    _Pragma("GCC unroll 16") for (int i = 0; i < n * vectors;
                                  i++)((LANES *)(dq + i / vectors * Di))[i % vectors] = sum[i];
}

static inline __attribute__((always_inline)) void KERNEL(add_keys_to_all)(const REAL *k, int64_t Hi, int64_t Di,
                                                                          const int32_t *index, int64_t m,
                                                                          const REAL *dots, const int vectors,
                                                                          bool add, REAL *dq) {
    enum { HEADS = WIDE ? 4 : 2 };
    const int64_t all_heads = cg_ceil_div(Hi, CG_LANES) * CG_LANES;
    int64_t h = 0;
    for (; h + HEADS <= Hi; h += HEADS)
        KERNEL(add_keys)(k, Di, index, m, dots + h, all_heads, HEADS, vectors, add, dq + h * Di);
    for (; h < Hi; h++) KERNEL(add_keys)(k, Di, index, m, dots + h, all_heads, 1, vectors, add, dq + h * Di);
}

/* dq [Hi, Di]. The channels of a few vectors at a time, so that those of all keys stay in the first-level cache. */
static __attribute__((noinline)) void KERNEL(grad_queries)(const REAL *k, int64_t Hi, int64_t Di,
                                                           const int32_t *index, int64_t m, const LANES *dots,
                                                           bool add, REAL *dq) {
    const int64_t heads = cg_ceil_div(Hi, CG_LANES) * CG_LANES;
    const REAL *dot = (const REAL *)dots;
    int64_t d = 0;
    for (; d + 4 * CG_LANES <= Di; d += 4 * CG_LANES)
        KERNEL(add_keys_to_all)(k + d, Hi, Di, index, m, dot, 4, add, dq + d);
    for (; d + CG_LANES <= Di; d += CG_LANES)
        KERNEL(add_keys_to_all)(k + d, Hi, Di, index, m, dot, 1, add, dq + d);
    for (; d < Di; d++)
        for (int64_t h = 0; h < Hi; h++) {
            REAL sum = add ? dq[h * Di + d] : 0;
            for (int64_t j = 0; j < m; j++)
                sum = KERNEL(fused)(dot[j * heads + h], k[(index ? (int64_t)index[j] : j) * Di + d], sum);
            dq[h * Di + d] = sum;
        }
}

/* `vectors` vectors of channels of n <= CG_DEALT keys, no two the same row: dk[i] += sum_h dot[i][h] q[h]. Both numbers are
 * constants. */
static inline __attribute__((always_inline)) void KERNEL(add_channels)(const REAL *q, int64_t Hi, int64_t Di,
                                                                       const int n, const int vectors,
                                                                       const REAL *const *dot, int64_t d,
                                                                       REAL *const *dk) {
    LANES sum[CG_DEALT][4];
    _Pragma("GCC unroll 4") for (int i = 0; i < n; i++)
        _Pragma("GCC unroll 4") for (int v = 0; v < vectors; v++) sum[i][v] = ((const LANES *)(dk[i] + d))[v];
    for (int64_t h = 0; h < Hi; h++) {
        const LANES *head = (const LANES *)(q + h * Di + d);
        _Pragma("GCC unroll 4") for (int i = 0; i < n; i++)
            _Pragma("GCC unroll 4") for (int v = 0; v < vectors; v++) sum[i][v] =
                KERNEL(fused_lanes)(dot[i][h], head[v], sum[i][v]);
    }
    _Pragma("GCC unroll 4") for (int i = 0; i < n; i++)
        _Pragma("GCC unroll 4") for (int v = 0; v < vectors; v++)((LANES *)(dk[i] + d))[v] = sum[i][v];
}

static inline __attribute__((always_inline)) void
KERNEL(add_heads)(const REAL *q, int64_t Hi, int64_t Di, const int n, const REAL *const *dot, REAL *const *dk) {
    int64_t d = 0;
    for (; d + 4 * CG_LANES <= Di; d += 4 * CG_LANES) KERNEL(add_channels)(q, Hi, Di, n, 4, dot, d, dk);
    for (; d + CG_LANES <= Di; d += CG_LANES) KERNEL(add_channels)(q, Hi, Di, n, 1, dot, d, dk);
    for (int i = 0; i < n; i++)
        for (int64_t c = d; c < Di; c++)
            for (int64_t h = 0; h < Hi; h++) dk[i][c] = KERNEL(fused)(dot[i][h], q[h * Di + c], dk[i][c]);
}

static __attribute__((noinline)) void KERNEL(add_heads_to_one)(const REAL *q, int64_t Hi, int64_t Di,
                                                               const REAL *const *dot, REAL *const *dk) {
    KERNEL(add_heads)(q, Hi, Di, 1, dot, dk);
}

static __attribute__((noinline)) void KERNEL(add_heads_to_two)(const REAL *q, int64_t Hi, int64_t Di,
                                                               const REAL *const *dot, REAL *const *dk) {
    KERNEL(add_heads)(q, Hi, Di, 2, dot, dk);
}

/* The gradients of n <= CG_DEALT keys, some of which may be the same row: as many at once as registers hold. Any n gives a
 * key the same bits. */
static inline void KERNEL(grad_some)(const REAL *q, int64_t Hi, int64_t Di, int64_t n, const REAL *const *dot,
                                     REAL *const *dk) {
    bool together = WIDE && n == CG_DEALT;
    for (int64_t i = 1; together && i < n; i++)
        for (int64_t j = 0; j < i; j++) together &= dk[i] != dk[j];
    if (together) {
        KERNEL(add_heads)(q, Hi, Di, CG_DEALT, dot, dk);
        return;
    }
    int64_t i = 0;
    while (i < n)
        if (i + 1 < n && dk[i] != dk[i + 1]) {
            KERNEL(add_heads_to_two)(q, Hi, Di, dot + i, dk + i);
            i += 2;
        } else {
            KERNEL(add_heads_to_one)(q, Hi, Di, dot + i, dk + i);
            i++;
        }
}

/* dk[index[j]] (or dk[j]) += sum_h dots[j][h] q[h] for m keys. */
static __attribute__((noinline)) void KERNEL(grad_keys)(const REAL *q, int64_t Hi, int64_t Di,
                                                        const int32_t *index, int64_t m, const LANES *dots,
                                                        REAL *dk) {
    const int64_t groups = cg_ceil_div(Hi, CG_LANES);
    for (int64_t j = 0; j < m; j += CG_DEALT) {
        const REAL *dot[CG_DEALT];
        REAL *to[CG_DEALT];
        const int64_t n = m - j < CG_DEALT ? m - j : CG_DEALT;
        for (int64_t i = 0; i < n; i++) {
            dot[i] = (const REAL *)(dots + (j + i) * groups);
            to[i] = dk + (index ? (int64_t)index[j + i] : j + i) * Di;
        }
        KERNEL(grad_some)(q, Hi, Di, n, dot, to);
    }
}

/* All of it for rows 0..n-1 of k, from ds [n], n > 0. Writes dq [Hi, Di], adds to dw [groups] and dk [n, Di]. `dots` is
 * scratch of cg_key_dots_bytes. */
static inline void KERNEL(key_grads)(const LANES *lanes, const REAL *q, const REAL *w, const REAL *k,
                                     int64_t Hi, int64_t Di, int64_t n, const REAL *ds, LANES *dots, REAL *dq,
                                     LANES *dw, REAL *dk) {
    for (int64_t j = 0; j < n; j += CG_KEY_TILE) {
        const int64_t m = n - j < CG_KEY_TILE ? n - j : CG_KEY_TILE;
        KERNEL(grad_dots)(lanes, w, k + j * Di, Hi, Di, NULL, m, ds + j, dots, dw);
        KERNEL(grad_queries)(k + j * Di, Hi, Di, NULL, m, dots, j > 0, dq);
        KERNEL(grad_keys)(q, Hi, Di, NULL, m, dots, dk + j * Di);
    }
}

/* sum[i] = parts[0][i] + parts[1][i] + ..., n each, in order. */
static inline void KERNEL(parts_sum)(const REAL *parts, int64_t n_parts, int64_t n, REAL *sum) {
    enum { PIECE = 2048 };
#pragma omp parallel for schedule(static) if (n > 16384)
    for (int64_t i0 = 0; i0 < n; i0 += PIECE) {
        const int64_t end = n < i0 + PIECE ? n : i0 + PIECE;
        for (int64_t i = i0; i < end; i++) sum[i] = parts[i];
        for (int64_t p = 1; p < n_parts; p++)
            for (int64_t i = i0; i < end; i++) sum[i] += parts[p * n + i];
    }
}
