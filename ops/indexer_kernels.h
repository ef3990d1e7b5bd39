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

#include "ops/fused.h"

/* The same for a scalar and two vectors. */
static inline __attribute__((always_inline)) LANES KERNEL(fused_lanes)(REAL a, LANES b, LANES c) {
#if !defined(__FMA__)
    return a * b + c;
#elif REAL_BITS == 32
    return (LANES)_mm256_fmadd_ps(_mm256_set1_ps(a), (__m256)b, (__m256)c);
#elif defined(__AVX512F__)
    return (LANES)_mm512_fmadd_pd(_mm512_set1_pd(a), (__m512d)b, (__m512d)c);
#else
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

/* The reverse: lanes [groups of heads, Di] -> q [Hi, Di] */
static inline void KERNEL(query_unpack)(const LANES *lanes, int64_t Hi, int64_t Di, REAL *q) {
    for (int64_t g = 0; g < cg_ceil_div(Hi, CG_LANES); g++)
        for (int64_t d = 0; d < Di; d += CG_LANES) {
            LANES a[CG_LANES] = {0};
            for (int64_t i = 0; i < CG_LANES && d + i < Di; i++) a[i] = lanes[g * Di + d + i];
            KERNEL(transpose)(a);
            for (int64_t h = 0; h < CG_LANES && g * CG_LANES + h < Hi; h++) {
                REAL *row = q + (g * CG_LANES + h) * Di + d;
                if (d + CG_LANES <= Di)
                    *(LANES *)row = a[h];
                else
                    for (int64_t i = 0; i < Di - d; i++) row[i] = a[h][i];
            }
        }
}

/* Where each of the next keys lies: rows index[0..n-1] of k, or its rows 0..n-1 when there is no list. When
 * less than CG_LANES are left the last one is repeated, so that no other row is read. */
static inline void KERNEL(keys_at)(const REAL *k, int64_t Di, const int32_t *index, int64_t n,
                                   const REAL *key[CG_LANES]) {
    for (int64_t i = 0; i < CG_LANES; i++) {
        int64_t j = i < n ? i : n - 1;
        key[i] = k + (index ? (int64_t)index[j] : j) * Di;
    }
}

/* dots[key] [head] = q.k of one group of heads, whose channels are lanes [Di]. */
static inline __attribute__((always_inline)) void
KERNEL(key_dots)(const LANES *lanes, int64_t Di, const REAL *const key[CG_LANES], LANES dots[CG_LANES]) {
    LANES sum[CG_LANES] = {0};
    for (int64_t d = 0; d < Di; d++) {
        LANES q = lanes[d];
        _Pragma("GCC unroll 8") for (int i = 0; i < CG_LANES; i++) sum[i] =
            KERNEL(fused_lanes)(key[i][d], q, sum[i]);
    }
    _Pragma("GCC unroll 8") for (int i = 0; i < CG_LANES; i++) dots[i] = sum[i];
}

/* The scores of CG_LANES keys, one in each lane. NaN stays NaN. */
static __attribute__((noinline)) LANES KERNEL(key_scores)(const LANES *lanes, const REAL *w, int64_t Hi,
                                                          int64_t Di, const REAL *const key[CG_LANES]) {
    LANES score = {0};
    for (int64_t h0 = 0; h0 < Hi; h0 += CG_LANES) {
        LANES dots[CG_LANES];
        KERNEL(key_dots)(lanes + h0 / CG_LANES * Di, Di, key, dots);
        KERNEL(transpose)(dots);
        if (Hi - h0 >= CG_LANES) {
            _Pragma("GCC unroll 8") for (int h = 0; h < CG_LANES; h++) score =
                KERNEL(fused_lanes)(w[h0 + h], KERNEL(relu_lanes)(dots[h]), score);
        } else {
            for (int64_t h = 0; h < Hi - h0; h++)
                score = KERNEL(fused_lanes)(w[h0 + h], KERNEL(relu_lanes)(dots[h]), score);
        }
    }
    return score;
}

/* Index scores of the n rows of k from its first on. */
static inline void KERNEL(scores_of)(const LANES *lanes, const REAL *w, const REAL *k, int64_t Hi, int64_t Di,
                                     int64_t n, REAL *scores) {
    for (int64_t j = 0; j < n; j += CG_LANES) {
        const REAL *key[CG_LANES];
        KERNEL(keys_at)(k + j * Di, Di, NULL, n - j, key);
        LANES score = KERNEL(key_scores)(lanes, w, Hi, Di, key);
        if (n - j >= CG_LANES)
            *(LANES *)(scores + j) = score;
        else
            for (int64_t i = 0; i < n - j; i++) scores[j + i] = score[i];
    }
}

/* The gradients of one row's scores, in three steps over a tile of m <= CG_KEY_TILE keys:
 *
 *   dw[h] += ds_j relu(q_h.k_j)     dot_hj = ds_j w[h] where q_h.k_j > 0, else 0
 *   dq_h  += sum_j dot_hj k_j       dk_j  += sum_h dot_hj q_h
 *
 * q.k is made again rather than kept. Each step is a function of its own, so that its pointers stay in
 * registers. */
static __attribute__((noinline)) void KERNEL(grad_dots)(const LANES *lanes, const REAL *w, const REAL *k,
                                                        int64_t Hi, int64_t Di, const int32_t *index, int64_t m,
                                                        const REAL *ds, LANES *dots, LANES *dw) {
    const int64_t groups = cg_ceil_div(Hi, CG_LANES);
    for (int64_t g = 0; g < groups; g++) {
        LANES weight = {0}, sum = dw[g];
        for (int64_t h = 0; h < CG_LANES && g * CG_LANES + h < Hi; h++) weight[h] = w[g * CG_LANES + h];
        for (int64_t j = 0; j < m; j += CG_LANES) {
            const REAL *key[CG_LANES];
            LANES tile[CG_LANES];
            KERNEL(keys_at)(index ? k : k + j * Di, Di, index ? index + j : NULL, m - j, key);
            KERNEL(key_dots)(lanes + g * Di, Di, key, tile);
            for (int64_t i = 0; i < CG_LANES && j + i < m; i++) {
                __typeof__(tile[i] > tile[i]) on = tile[i] > (LANES){0};
                const LANES scaled = ds[j + i] * weight;
                sum += ds[j + i] * (LANES)(on & (__typeof__(on))tile[i]);
                dots[(j + i) * groups + g] = (LANES)(on & (__typeof__(on))scaled);
            }
        }
        dw[g] = sum;
    }
}

static __attribute__((noinline)) void KERNEL(grad_queries)(const REAL *k, int64_t Hi, int64_t Di,
                                                           const int32_t *index, int64_t m, const LANES *dots,
                                                           LANES *dlanes) {
    const int64_t groups = cg_ceil_div(Hi, CG_LANES);
    for (int64_t g = 0; g < groups; g++) {
        LANES *out = dlanes + g * Di;
        int64_t d = 0;
        for (; d + CG_LANES <= Di; d += CG_LANES) {
            LANES sum[CG_LANES];
            _Pragma("GCC unroll 8") for (int i = 0; i < CG_LANES; i++) sum[i] = out[d + i];
            for (int64_t j = 0; j < m; j++) {
                const REAL *key = k + (index ? (int64_t)index[j] : j) * Di + d;
                const LANES dot = dots[j * groups + g];
                _Pragma("GCC unroll 8") for (int i = 0; i < CG_LANES; i++) sum[i] += key[i] * dot;
            }
            _Pragma("GCC unroll 8") for (int i = 0; i < CG_LANES; i++) out[d + i] = sum[i];
        }
        for (int64_t j = 0; j < m && d < Di; j++) {
            const REAL *key = k + (index ? (int64_t)index[j] : j) * Di;
            for (int64_t i = d; i < Di; i++) out[i] += key[i] * dots[j * groups + g];
        }
    }
}

/* One key: dk [Di] += sum_h dot[h] q[h]. */
static inline __attribute__((always_inline)) void KERNEL(grad_key)(const REAL *q, int64_t Hi, int64_t Di,
                                                                   const REAL *dot, REAL *dk) {
    int64_t d = 0;
    for (; d + 4 * CG_LANES <= Di; d += 4 * CG_LANES) {
        LANES *out = (LANES *)(dk + d), sum[4] = {out[0], out[1], out[2], out[3]};
        for (int64_t h = 0; h < Hi; h++) {
            const LANES *head = (const LANES *)(q + h * Di + d);
            _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) sum[i] += dot[h] * head[i];
        }
        _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) out[i] = sum[i];
    }
    for (int64_t h = 0; h < Hi && d < Di; h++)
        for (int64_t i = d; i < Di; i++) dk[i] += dot[h] * q[h * Di + i];
}

static __attribute__((noinline)) void KERNEL(grad_keys)(const REAL *q, int64_t Hi, int64_t Di, int64_t m,
                                                        const LANES *dots, REAL *dk) {
    const int64_t groups = cg_ceil_div(Hi, CG_LANES);
    for (int64_t j = 0; j < m; j++) KERNEL(grad_key)(q, Hi, Di, (const REAL *)(dots + j * groups), dk + j * Di);
}

/* All of it for rows 0..n-1 of k, from ds [n]. Adds to dlanes [groups, Di] (dq with heads in the lanes), dw [groups]
 * and dk [n, Di]. `dots` is scratch of cg_key_dots_bytes. */
static inline void KERNEL(key_grads)(const LANES *lanes, const REAL *q, const REAL *w, const REAL *k,
                                     int64_t Hi, int64_t Di, int64_t n, const REAL *ds, LANES *dots,
                                     LANES *dlanes, LANES *dw, REAL *dk) {
    for (int64_t j = 0; j < n; j += CG_KEY_TILE) {
        const int64_t m = n - j < CG_KEY_TILE ? n - j : CG_KEY_TILE;
        KERNEL(grad_dots)(lanes, w, k + j * Di, Hi, Di, NULL, m, ds + j, dots, dw);
        KERNEL(grad_queries)(k + j * Di, Hi, Di, NULL, m, dots, dlanes);
        KERNEL(grad_keys)(q, Hi, Di, m, dots, dk + j * Di);
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
