/* The plain product, read by core/math/gemm.c once for each path and each REAL (core/base/each_real.h): panels of PLAIN_ROWS rows of
 * A against panels of two vectors of columns of B.
 *
 * An element is the sum over the block in order of k, fused where the path can, whatever panel or lane it falls in: the
 * panels differ in how many elements they carry, not in how one is computed. Panels are padded with zeros, which only
 * meet elements that are never stored. */
#undef VECTOR_BYTES
#undef PLAIN_ROWS
#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#define PLAIN_ROWS 8
#elif defined(__AVX2__)
#define VECTOR_BYTES 32
#define PLAIN_ROWS 4 /* 16 registers hold 4 x 2 sums and their operands */
#else
#define VECTOR_BYTES 16
#define PLAIN_ROWS 4
#endif
#undef LANES
#undef COLS
#define LANES (VECTOR_BYTES / (int64_t)sizeof(REAL))
#define COLS (2 * LANES)

typedef REAL KERNEL(plain_vec) __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));

/* a * b + c. Fused by name: what the compiler contracts depends on its options, and elements must match oneDNN's. */
static inline __attribute__((always_inline)) KERNEL(plain_vec)
    KERNEL(plain_fused)(REAL a, KERNEL(plain_vec) b, KERNEL(plain_vec) c) {
#if defined(__AVX512F__) && REAL_BITS == 32
    return (KERNEL(plain_vec))_mm512_fmadd_ps(_mm512_set1_ps(a), (__m512)b, (__m512)c);
#elif defined(__AVX512F__)
    return (KERNEL(plain_vec))_mm512_fmadd_pd(_mm512_set1_pd(a), (__m512d)b, (__m512d)c);
#elif defined(__FMA__) && REAL_BITS == 32
    return (KERNEL(plain_vec))_mm256_fmadd_ps(_mm256_set1_ps(a), (__m256)b, (__m256)c);
#elif defined(__FMA__)
    return (KERNEL(plain_vec))_mm256_fmadd_pd(_mm256_set1_pd(a), (__m256d)b, (__m256d)c);
#else
    return c + a * b;
#endif
}

/* panel[k][lane] = src[lane * lane_step + k * k_step] */
static void KERNEL(plain_pack)(REAL *restrict panel, const REAL *restrict src, int64_t lane_step,
                               int64_t k_step, int64_t used, int64_t lanes, int64_t depth) {
    if (lane_step == 1) {
        for (int64_t k = 0; k < depth; k++) {
            for (int64_t lane = 0; lane < used; lane++) panel[k * lanes + lane] = src[k * k_step + lane];
            for (int64_t lane = used; lane < lanes; lane++) panel[k * lanes + lane] = 0;
        }
        return;
    }
    for (int64_t lane = 0; lane < lanes; lane++)
        for (int64_t k = 0; k < depth; k++)
            panel[k * lanes + lane] = lane < used ? src[lane * lane_step + k * k_step] : 0;
}

static inline __attribute__((always_inline)) void
KERNEL(plain_micro)(const int rows, const int vecs, int64_t depth, const REAL *a, const REAL *b, REAL *c,
                    int64_t ldc, int64_t used_rows, int64_t used_cols, bool add) {
    KERNEL(plain_vec) sum[PLAIN_ROWS][2] = {0};
    for (int64_t k = 0; k < depth; k++) {
        KERNEL(plain_vec) b0 = *(const KERNEL(plain_vec) *)(b + k * COLS), b1 = {0};
        if (vecs == 2) b1 = *(const KERNEL(plain_vec) *)(b + k * COLS + LANES);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            sum[i][0] = KERNEL(plain_fused)(a[k * PLAIN_ROWS + i], b0, sum[i][0]);
            if (vecs == 2) sum[i][1] = KERNEL(plain_fused)(a[k * PLAIN_ROWS + i], b1, sum[i][1]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) {
        if (i >= used_rows) break;
        REAL *row = c + i * ldc;
#pragma GCC unroll 2
        for (int v = 0; v < vecs; v++) {
            int64_t cols = used_cols - v * LANES;
            REAL *out = row + v * LANES;
            if (cols >= LANES) {
                KERNEL(plain_vec) *whole = (KERNEL(plain_vec) *)out;
                if (add)
                    *whole += sum[i][v];
                else
                    *whole = sum[i][v];
                continue;
            }
            REAL edge[LANES];
            memcpy(edge, &sum[i][v], sizeof edge);
            for (int64_t j = 0; j < cols; j++) out[j] = add ? out[j] + edge[j] : edge[j];
        }
    }
}

static void KERNEL(plain)(int64_t m, int64_t n, int64_t depth, const REAL *a, int64_t a_row, int64_t a_k,
                          const REAL *b, int64_t b_col, int64_t b_k, REAL *c, int64_t ldc, bool add,
                          REAL *packed_a, REAL *packed_b) {
    for (int64_t i = 0; i < m; i += PLAIN_ROWS) {
        const int64_t rows = min64(m - i, PLAIN_ROWS);
        KERNEL(plain_pack)(packed_a + i * depth, a + i * a_row, a_row, a_k, rows, PLAIN_ROWS, depth);
    }
    for (int64_t j = 0; j < n; j += COLS) {
        int64_t cols = min64(n - j, COLS);
        KERNEL(plain_pack)(packed_b, b + j * b_col, b_col, b_k, cols, COLS, depth);
        for (int64_t i = 0; i < m; i += PLAIN_ROWS) {
            int64_t rows = min64(m - i, PLAIN_ROWS);
            const REAL *panel = packed_a + i * depth;
            REAL *out = c + i * ldc + j;
            if (cols > LANES) {
                if (rows > 4)
                    KERNEL(plain_micro)(PLAIN_ROWS, 2, depth, panel, packed_b, out, ldc, rows, cols, add);
                else if (rows > 1)
                    KERNEL(plain_micro)(4, 2, depth, panel, packed_b, out, ldc, rows, cols, add);
                else
                    KERNEL(plain_micro)(1, 2, depth, panel, packed_b, out, ldc, rows, cols, add);
            } else {
                if (rows > 4)
                    KERNEL(plain_micro)(PLAIN_ROWS, 1, depth, panel, packed_b, out, ldc, rows, cols, add);
                else if (rows > 1)
                    KERNEL(plain_micro)(4, 1, depth, panel, packed_b, out, ldc, rows, cols, add);
                else
                    KERNEL(plain_micro)(1, 1, depth, panel, packed_b, out, ldc, rows, cols, add);
            }
        }
    }
}

#if REAL_BITS == 64 /* both are there */
static const plain_product ISA(plain_kernel) = {PLAIN_ROWS, VECTOR_BYTES, ISA(plain_f32), ISA(plain_f64)};
#endif
