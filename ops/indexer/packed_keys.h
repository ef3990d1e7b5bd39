/* Index scores with keys that many rows share, for the kernel part of an op's file behind ops/indexer/indexer_kernels.h: turned
 * around once, keys lie in the lanes, and heads are read where they are. */

/* k [C, Di] -> packed [tiles of CG_KEYS keys, Di, CG_KEYS], zeros behind the last key. */
static void KERNEL(keys_pack)(const REAL *k, int64_t C, int64_t Di, LANES *packed) {
#pragma omp parallel for schedule(static) if (C * Di > 16384)
    for (int64_t tile = 0; tile < cg_ceil_div(C, CG_KEYS); tile++)
        for (int64_t half = 0; half < CG_KEYS / CG_LANES; half++)
            for (int64_t d = 0; d < Di; d += CG_LANES) {
                const int64_t first = tile * CG_KEYS + half * CG_LANES,
                              n = Di - d < CG_LANES ? Di - d : CG_LANES;
                LANES a[CG_LANES] = {0};
                for (int64_t i = 0; i < CG_LANES && first + i < C; i++)
                    memcpy(&a[i], k + (first + i) * Di + d, (size_t)n * sizeof(REAL));
                KERNEL(transpose)(a);
                for (int64_t i = 0; i < n; i++)
                    packed[(tile * Di + d + i) * (CG_KEYS / CG_LANES) + half] = a[i];
            }
}

/* Adds n heads to the scores of `vectors` vectors of keys; both numbers are constants. */
static inline __attribute__((always_inline)) void KERNEL(add_packed)(const REAL *q, const REAL *w, int64_t Di,
                                                                     const int n, const int vectors,
                                                                     const LANES *keys, LANES *score) {
    LANES sum[CG_KEYS] = {0};
    for (int64_t d = 0; d < Di; d++) _Pragma("GCC unroll 8") for (int h = 0; h < n; h++) {
            const REAL x = q[h * Di + d];
            _Pragma("GCC unroll 2") for (int v = 0; v < vectors; v++) sum[h * vectors + v] =
                KERNEL(fused_lanes)(x, keys[d * (CG_KEYS / CG_LANES) + v], sum[h * vectors + v]);
        }
    _Pragma("GCC unroll 8") for (int h = 0; h < n; h++)
        _Pragma("GCC unroll 2") for (int v = 0; v < vectors; v++) score[v] =
            KERNEL(fused_lanes)(w[h], KERNEL(relu_lanes)(sum[h * vectors + v]), score[v]);
}

static inline __attribute__((always_inline)) void KERNEL(add_all_packed)(const REAL *q, const REAL *w,
                                                                         int64_t Hi, int64_t Di,
                                                                         const int vectors, const LANES *keys,
                                                                         LANES *score) {
    enum { HEADS = WIDE ? 8 : 4 };
    int64_t h = 0;
    for (; h + HEADS <= Hi; h += HEADS) KERNEL(add_packed)(q + h * Di, w + h, Di, HEADS, vectors, keys, score);
    for (; h < Hi; h++) KERNEL(add_packed)(q + h * Di, w + h, Di, 1, vectors, keys, score);
}

/* Index scores of a row with the first n, or some more, of a tile of packed keys. The bits of key_scores. */
static __attribute__((noinline)) void KERNEL(packed_scores)(const REAL *q, const REAL *w, int64_t Hi,
                                                            int64_t Di, const LANES *keys, int64_t n,
                                                            REAL *scores) {
    LANES score[CG_KEYS / CG_LANES] = {0};
    if (n > CG_LANES) {
        KERNEL(add_all_packed)(q, w, Hi, Di, CG_KEYS / CG_LANES, keys, score);
        memcpy(scores, score, sizeof score);
    } else {
        KERNEL(add_all_packed)(q, w, Hi, Di, 1, keys, score);
        memcpy(scores, score, sizeof *score);
    }
}
