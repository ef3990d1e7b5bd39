/* Index scores of one row, for the kernel part of an op's file: included once for each REAL.
 *
 * A query row is held with its heads in the lanes: one vector has CG_LANES heads of one channel, heads past Hi
 * are zeros. A key is read where it lies, channel by channel, so a list of keys costs no gathering. An element
 * of q.k is the fused sum over the channels in order, the same bits as cg_gemm gives (as long as that does not
 * cut the channels: up to 512 in f32, 256 in f64). Heads are added in order. */

#undef LANES
#define LANES KERNEL(lanes)
typedef REAL LANES __attribute__((vector_size(CG_LANES * sizeof(REAL)), aligned(sizeof(REAL)), may_alias));

/* a[i][j] becomes a[j][i]: swap blocks of 1, then of 2, then of 4 across the diagonal. */
static inline __attribute__((always_inline)) void KERNEL(transpose)(LANES a[CG_LANES]) {
    _Pragma("GCC unroll 4") for (int i = 0; i < 8; i += 2) {
        LANES x = a[i], y = a[i + 1];
        a[i] = __builtin_shufflevector(x, y, 0, 8, 2, 10, 4, 12, 6, 14);
        a[i + 1] = __builtin_shufflevector(x, y, 1, 9, 3, 11, 5, 13, 7, 15);
    }
    _Pragma("GCC unroll 4") for (int i = 0; i < 8; i += i % 4 ? 3 : 1) {
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
        _Pragma("GCC unroll 8") for (int i = 0; i < CG_LANES; i++) sum[i] += key[i][d] * q;
    }
    _Pragma("GCC unroll 8") for (int i = 0; i < CG_LANES; i++) dots[i] = sum[i];
}

/* The scores of CG_LANES keys, one in each lane. NaN stays NaN. */
static inline LANES KERNEL(key_scores)(const LANES *lanes, const REAL *w, int64_t Hi, int64_t Di,
                                       const REAL *const key[CG_LANES]) {
    LANES score = {0};
    for (int64_t h0 = 0; h0 < Hi; h0 += CG_LANES) {
        LANES dots[CG_LANES];
        KERNEL(key_dots)(lanes + h0 / CG_LANES * Di, Di, key, dots);
        KERNEL(transpose)(dots);
        if (Hi - h0 >= CG_LANES) {
            _Pragma("GCC unroll 8") for (int h = 0; h < CG_LANES; h++) score +=
                w[h0 + h] * KERNEL(relu_lanes)(dots[h]);
        } else {
            for (int64_t h = 0; h < Hi - h0; h++) score += w[h0 + h] * KERNEL(relu_lanes)(dots[h]);
        }
    }
    return score;
}

/* The gradients of one row's scores at n keys, from dscores [n]; `index` as in keys_at. Adds to dlanes [groups,
 * Di] (dq with heads in the lanes), dw [groups * CG_LANES] and dk, whose rows match those of k.
 *
 *   dw[h] += ds_j relu(q_h.k_j)     dot_hj = ds_j w[h] where q_h.k_j > 0, else 0
 *   dq_h  += sum_j dot_hj k_j       dk_j  += sum_h dot_hj q_h
 *
 * q.k is made again rather than kept: a tile of CG_KEY_TILE keys at a time, in `dots` [CG_KEY_TILE, groups]. */
static inline void KERNEL(key_grads)(const LANES *lanes, const REAL *q, const REAL *w, const REAL *k,
                                     int64_t Hi, int64_t Di, const int32_t *index, int64_t n,
                                     const REAL *dscores, LANES *dots, LANES *dlanes, LANES *dw, REAL *dk) {
    const int64_t groups = cg_ceil_div(Hi, CG_LANES);
    for (int64_t j0 = 0; j0 < n; j0 += CG_KEY_TILE) {
        const int64_t m = n - j0 < CG_KEY_TILE ? n - j0 : CG_KEY_TILE;
        const int32_t *list = index ? index + j0 : NULL;
        const REAL *rows = index ? k : k + j0 * Di;
        REAL *drows = index ? dk : dk + j0 * Di;
        for (int64_t g = 0; g < groups; g++) {
            LANES weight = {0}, sum = dw[g];
            for (int64_t h = 0; h < CG_LANES && g * CG_LANES + h < Hi; h++) weight[h] = w[g * CG_LANES + h];
            for (int64_t j = 0; j < m; j += CG_LANES) {
                const REAL *key[CG_LANES];
                LANES tile[CG_LANES];
                KERNEL(keys_at)(list ? rows : rows + j * Di, Di, list ? list + j : NULL, m - j, key);
                KERNEL(key_dots)(lanes + g * Di, Di, key, tile);
                for (int64_t i = 0; i < CG_LANES && j + i < m; i++) {
                    const REAL ds = dscores[j0 + j + i];
                    __typeof__(tile[i] > tile[i]) on = tile[i] > (LANES){0};
                    LANES scaled = ds * weight;
                    sum += ds * (LANES)(on & (__typeof__(on))tile[i]);
                    dots[(j + i) * groups + g] = (LANES)(on & (__typeof__(on))scaled);
                }
            }
            dw[g] = sum;
            for (int64_t d = 0; d < Di; d += CG_LANES) {
                LANES *out = dlanes + g * Di + d, acc[CG_LANES] = {0};
                const int64_t width = Di - d < CG_LANES ? Di - d : CG_LANES;
                for (int64_t i = 0; i < width; i++) acc[i] = out[i];
                for (int64_t j = 0; j < m; j++) {
                    const REAL *key = rows + (list ? (int64_t)list[j] : j) * Di + d;
                    LANES dot = dots[j * groups + g];
                    if (width == CG_LANES) {
                        _Pragma("GCC unroll 8") for (int i = 0; i < CG_LANES; i++) acc[i] += key[i] * dot;
                    } else {
                        for (int64_t i = 0; i < width; i++) acc[i] += key[i] * dot;
                    }
                }
                for (int64_t i = 0; i < width; i++) out[i] = acc[i];
            }
        }
        for (int64_t j = 0; j < m; j++) {
            const REAL *dot = (const REAL *)(dots + j * groups);
            REAL *row = drows + (list ? (int64_t)list[j] : j) * Di;
            for (int64_t h = 0; h < Hi; h++)
                for (int64_t d = 0; d < Di; d++) row[d] += dot[h] * q[h * Di + d];
        }
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
