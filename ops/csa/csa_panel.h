/* The small products and column sums that attention does for one row, on one thread. Included where REAL is
 * set.
 *
 * A row has N keys and H heads. Its logits lie as [N, Hp], heads side by side, so that everything a softmax
 * does runs straight down the columns with no sum across a vector, and so that all five products of forward and
 * backward have one form: a number of `a` times a row of `b`. Rows of a, b and c may lie anywhere (pointers),
 * so keys are read and their gradients added where they are. Hp is H rounded up to whole vectors; panel_bytes
 * gives the vector's size.
 *
 * A product blocks k by PANEL_DEPTH and adds in order of k, whatever the blocking of rows and columns: an
 * element's bits depend on its row of a, its column of b and k alone.
 */
#ifndef OPS_CSA_PANEL_H
#define OPS_CSA_PANEL_H
enum { PANEL_DEPTH = 128 }; /* this many rows of b, four vectors wide, fill the first-level cache */

/* Bytes of the vectors that hold the heads of one key: the smallest that takes all of them, else the widest of any
 * processor. A path with narrower ones takes several for it, so that the workspace is the same on all paths. */
static inline int panel_bytes(int64_t heads, size_t real_bytes) {
    int64_t bytes = heads * (int64_t)real_bytes;
    return bytes <= 16 ? 16 : bytes <= 32 ? 32 : 64;
}

static inline int64_t panel_heads(int64_t heads, size_t real_bytes) {
    int64_t lanes = panel_bytes(heads, real_bytes) / (int64_t)real_bytes;
    return (heads + lanes - 1) / lanes * lanes;
}

/* Workspace in aligned pieces: counted with base NULL when a plan is made, handed out by the same calls in the
 * kernel, so that the two cannot differ. */
typedef struct panel_carver {
    char *base;
    size_t used;
} panel_carver;

static inline void *panel_carve(panel_carver *from, int64_t count, size_t element) {
    void *piece = from->base ? from->base + from->used : NULL;
    from->used += ((size_t)count * element + 63) & ~(size_t)63;
    return piece;
}
#endif

#undef PANEL_WIDE
#undef PANEL_VECS
#undef PANEL_ROWS
#if defined(__AVX512F__)
#define PANEL_WIDE 64
#define PANEL_VECS 4
#define PANEL_ROWS 6 /* 24 of 32 registers hold sums */
#elif defined(__AVX__)
#define PANEL_WIDE 32
#define PANEL_VECS 2
#define PANEL_ROWS 4
#else
#define PANEL_WIDE 16
#define PANEL_VECS 2
#define PANEL_ROWS 4
#endif

typedef struct KERNEL(panel_product) {
    int64_t m, n, k;
    const REAL *a; /* a(i,k) = a[i * a_row + k * a_k], or a_rows[i][k * a_k] */
    int64_t a_row, a_k;
    const REAL *const *a_rows;
    const REAL *const *b_rows; /* b(k,j) = b_rows[k][j] */
    REAL *c; /* c(i,j) = c[i * ldc + j], or c_rows[i][j]; a row may stand there twice when adding */
    int64_t ldc;
    REAL *const *c_rows;
    bool add;
} KERNEL(panel_product);

#define PANEL_INLINE static inline __attribute__((always_inline))

/* rows x vecs vectors of c over one block of k. rows and vecs are constants at every call. */
#define PANEL_MICRO(bytes)                                                                                     \
    typedef REAL KERNEL(panel_vec##bytes)                                                                      \
        __attribute__((vector_size(bytes), aligned(sizeof(REAL)), may_alias));                                 \
    PANEL_INLINE void KERNEL(panel_micro##bytes)(const int rows, const int vecs,                               \
                                                 const KERNEL(panel_product) * p, int64_t i0, int64_t j0,      \
                                                 int64_t k0, int64_t k1, bool add) {                           \
        typedef KERNEL(panel_vec##bytes) vec;                                                                  \
        const REAL *a[8];                                                                                      \
        vec sum[8][4] = {0};                                                                                   \
        _Pragma("GCC unroll 8") for (int i = 0; i < rows; i++) a[i] =                                          \
            p->a_rows ? p->a_rows[i0 + i] : p->a + (i0 + i) * p->a_row;                                        \
        const int64_t a_k = p->a_k;                                                                            \
        const REAL *const *b_rows = p->b_rows;                                                                 \
        for (int64_t k = k0; k < k1; k++) {                                                                    \
            const vec *b = (const vec *)(b_rows[k] + j0);                                                      \
            _Pragma("GCC unroll 8") for (int i = 0; i < rows; i++) {                                           \
                const REAL x = a[i][k * a_k];                                                                  \
                _Pragma("GCC unroll 4") for (int v = 0; v < vecs; v++) sum[i][v] += x * b[v];                  \
            }                                                                                                  \
        }                                                                                                      \
        _Pragma("GCC unroll 8") for (int i = 0; i < rows; i++) {                                               \
            vec *c = (vec *)((p->c_rows ? p->c_rows[i0 + i] : p->c + (i0 + i) * p->ldc) + j0);                 \
            _Pragma("GCC unroll 4") for (int v = 0; v < vecs; v++) {                                           \
                if (add)                                                                                       \
                    c[v] += sum[i][v];                                                                         \
                else                                                                                           \
                    c[v] = sum[i][v];                                                                          \
            }                                                                                                  \
        }                                                                                                      \
    }                                                                                                          \
    /* all rows of one strip of columns */                                                                     \
    static __attribute__((noinline)) void KERNEL(panel_strip##bytes)(                                          \
        const KERNEL(panel_product) * p, int vecs, int64_t j0, int64_t k0, int64_t k1, bool add) {             \
        int64_t i = 0;                                                                                         \
        if (bytes == PANEL_WIDE && vecs == PANEL_VECS) {                                                       \
            for (; i + PANEL_ROWS <= p->m; i += PANEL_ROWS)                                                    \
                KERNEL(panel_micro##bytes)(PANEL_ROWS, PANEL_VECS, p, i, j0, k0, k1, add);                     \
            for (; i + 2 <= p->m; i += 2) KERNEL(panel_micro##bytes)(2, PANEL_VECS, p, i, j0, k0, k1, add);    \
            for (; i < p->m; i++) KERNEL(panel_micro##bytes)(1, PANEL_VECS, p, i, j0, k0, k1, add);            \
        } else if (vecs == 2) {                                                                                \
            for (; i + 8 <= p->m; i += 8) KERNEL(panel_micro##bytes)(8, 2, p, i, j0, k0, k1, add);             \
            for (; i + 4 <= p->m; i += 4) KERNEL(panel_micro##bytes)(4, 2, p, i, j0, k0, k1, add);             \
            for (; i < p->m; i++) KERNEL(panel_micro##bytes)(1, 2, p, i, j0, k0, k1, add);                     \
        } else {                                                                                               \
            for (; i + 8 <= p->m; i += 8) KERNEL(panel_micro##bytes)(8, 1, p, i, j0, k0, k1, add);             \
            for (; i + 4 <= p->m; i += 4) KERNEL(panel_micro##bytes)(4, 1, p, i, j0, k0, k1, add);             \
            for (; i < p->m; i++) KERNEL(panel_micro##bytes)(1, 1, p, i, j0, k0, k1, add);                     \
        }                                                                                                      \
    }

PANEL_MICRO(16)
#if defined(__AVX__)
PANEL_MICRO(32)
#endif
#if defined(__AVX512F__)
PANEL_MICRO(64)
#endif

/* The last columns, fewer than the smallest vector. */
static void KERNEL(panel_edge)(const KERNEL(panel_product) * p, int64_t j0, int64_t k0, int64_t k1, bool add) {
    for (int64_t i = 0; i < p->m; i++) {
        const REAL *a = p->a_rows ? p->a_rows[i] : p->a + i * p->a_row;
        REAL *c = p->c_rows ? p->c_rows[i] : p->c + i * p->ldc;
        for (int64_t j = j0; j < p->n; j++) {
            REAL sum = 0;
            for (int64_t k = k0; k < k1; k++) sum += a[k * p->a_k] * p->b_rows[k][j];
            c[j] = add ? c[j] + sum : sum;
        }
    }
}

/* c = a b, or c += a b. */
static void KERNEL(panel_multiply)(const KERNEL(panel_product) * p) {
    int64_t k0 = 0;
    do { /* once even for k = 0, which writes zeros */
        int64_t k1 = k0 + PANEL_DEPTH < p->k ? k0 + PANEL_DEPTH : p->k, j = 0;
        bool add = p->add || k0 > 0;
#define STRIPS(bytes, vecs)                                                                                    \
    for (int64_t width = (int64_t)(bytes / sizeof(REAL)) * (vecs); j + width <= p->n; j += width)              \
        KERNEL(panel_strip##bytes)(p, vecs, j, k0, k1, add);
#if defined(__AVX512F__)
        STRIPS(64, 4)
        STRIPS(64, 2)
        STRIPS(64, 1)
        STRIPS(32, 1)
#elif defined(__AVX__)
        STRIPS(32, 2)
        STRIPS(32, 1)
#else
        STRIPS(16, 2)
#endif
        STRIPS(16, 1)
#undef STRIPS
        if (j < p->n) KERNEL(panel_edge)(p, j, k0, k1, add);
        k0 += PANEL_DEPTH;
    } while (k0 < p->k);
}

/* ---- down the columns of x [n, heads], heads a whole number of vectors of `bytes` ---- */

/* Four keys at a time, so that sums and comparisons do not wait for each other. */
#define PANEL_COLUMNS(bytes)                                                                                   \
    /* best[h] = max(best[h], x[:,h]) */                                                                       \
    static void KERNEL(panel_max##bytes)(int64_t n, int64_t heads, const REAL *x, REAL *best) {                \
        typedef KERNEL(panel_vec##bytes) vec;                                                                  \
        for (int64_t h = 0; h < heads; h += (int64_t)(bytes / sizeof(REAL))) {                                 \
            vec top[4], *to = (vec *)(best + h);                                                               \
            for (int u = 0; u < 4; u++) top[u] = *to;                                                          \
            int64_t i = 0;                                                                                     \
            for (; i + 4 <= n; i += 4) _Pragma("GCC unroll 4") for (int u = 0; u < 4; u++) {                   \
                    vec y = *(const vec *)(x + (i + u) * heads + h);                                           \
                    top[u] = KERNEL(panel_larger##bytes)(y, top[u]);                                           \
                }                                                                                              \
            for (; i < n; i++)                                                                                 \
                top[0] = KERNEL(panel_larger##bytes)(*(const vec *)(x + i * heads + h), top[0]);               \
            *to = KERNEL(panel_larger##bytes)(KERNEL(panel_larger##bytes)(top[0], top[1]),                     \
                                              KERNEL(panel_larger##bytes)(top[2], top[3]));                    \
        }                                                                                                      \
    }                                                                                                          \
    /* x[:,h] -= shift[h] */                                                                                   \
    static void KERNEL(panel_shift##bytes)(int64_t n, int64_t heads, REAL * x, const REAL *shift) {            \
        typedef KERNEL(panel_vec##bytes) vec;                                                                  \
        for (int64_t h = 0; h < heads; h += (int64_t)(bytes / sizeof(REAL))) {                                 \
            const vec s = *(const vec *)(shift + h);                                                           \
            for (int64_t i = 0; i < n; i++) *(vec *)(x + i * heads + h) -= s;                                  \
        }                                                                                                      \
    }                                                                                                          \
    /* x[:,h] *= factor[h] */                                                                                  \
    static void KERNEL(panel_scale##bytes)(int64_t n, int64_t heads, REAL * x, const REAL *factor) {           \
        typedef KERNEL(panel_vec##bytes) vec;                                                                  \
        for (int64_t h = 0; h < heads; h += (int64_t)(bytes / sizeof(REAL))) {                                 \
            const vec s = *(const vec *)(factor + h);                                                          \
            for (int64_t i = 0; i < n; i++) *(vec *)(x + i * heads + h) *= s;                                  \
        }                                                                                                      \
    }                                                                                                          \
    /* sum[h] = sum of x[:,h], of x[:,h] y[:,h] when there is a y */                                           \
    PANEL_INLINE void KERNEL(panel_add##bytes)(const bool times, int64_t n, int64_t heads, const REAL *x,      \
                                               const REAL *y, REAL *sum) {                                     \
        typedef KERNEL(panel_vec##bytes) vec;                                                                  \
        for (int64_t h = 0; h < heads; h += (int64_t)(bytes / sizeof(REAL))) {                                 \
            vec part[4] = {0};                                                                                 \
            int64_t i = 0;                                                                                     \
            for (; i + 4 <= n; i += 4) _Pragma("GCC unroll 4") for (int u = 0; u < 4; u++) {                   \
                    vec z = *(const vec *)(x + (i + u) * heads + h);                                           \
                    if (times) z *= *(const vec *)(y + (i + u) * heads + h);                                   \
                    part[u] += z;                                                                              \
                }                                                                                              \
            for (; i < n; i++) {                                                                               \
                vec z = *(const vec *)(x + i * heads + h);                                                     \
                if (times) z *= *(const vec *)(y + i * heads + h);                                             \
                part[0] += z;                                                                                  \
            }                                                                                                  \
            *(vec *)(sum + h) = (part[0] + part[1]) + (part[2] + part[3]);                                     \
        }                                                                                                      \
    }                                                                                                          \
    static void KERNEL(panel_sum##bytes)(int64_t n, int64_t heads, const REAL *x, REAL *sum) {                 \
        KERNEL(panel_add##bytes)(false, n, heads, x, NULL, sum);                                               \
    }                                                                                                          \
    static void KERNEL(panel_dot##bytes)(int64_t n, int64_t heads, const REAL *x, const REAL *y, REAL *sum) {  \
        KERNEL(panel_add##bytes)(true, n, heads, x, y, sum);                                                   \
    }                                                                                                          \
    /* pair[i,:] = {p, scale p (dp - delta)}: weights beside gradients of logits */                            \
    static void KERNEL(panel_pair##bytes)(int64_t n, int64_t heads, const REAL *p, const REAL *dp,             \
                                          const REAL *delta, REAL scale, REAL *pair) {                         \
        typedef KERNEL(panel_vec##bytes) vec;                                                                  \
        for (int64_t i = 0; i < n; i++)                                                                        \
            for (int64_t h = 0; h < heads; h += (int64_t)(bytes / sizeof(REAL))) {                             \
                vec weight = *(const vec *)(p + i * heads + h);                                                \
                *(vec *)(pair + 2 * i * heads + h) = weight;                                                   \
                *(vec *)(pair + (2 * i + 1) * heads + h) =                                                     \
                    scale * weight * (*(const vec *)(dp + i * heads + h) - *(const vec *)(delta + h));         \
            }                                                                                                  \
    }

/* The larger of each lane; C has no ?: for vectors, a blend by bits is the same. A NaN in y is passed over
 * here; it comes back in the exponentials. */
#define PANEL_LARGER(bytes)                                                                                    \
    PANEL_INLINE KERNEL(panel_vec##bytes)                                                                      \
        KERNEL(panel_larger##bytes)(KERNEL(panel_vec##bytes) y, KERNEL(panel_vec##bytes) top) {                \
        const __typeof__(y > top) take = y > top;                                                              \
        return (KERNEL(panel_vec##bytes))((take & (__typeof__(take))y) | (~take & (__typeof__(take))top));     \
    }

PANEL_LARGER(16)
PANEL_COLUMNS(16)
#if defined(__AVX__)
PANEL_LARGER(32)
PANEL_COLUMNS(32)
#endif
#if defined(__AVX512F__)
PANEL_LARGER(64)
PANEL_COLUMNS(64)
#endif
#undef PANEL_MICRO
#undef PANEL_COLUMNS
#undef PANEL_LARGER

/* The column functions of one width. */
typedef struct KERNEL(panel_columns) {
    int64_t heads; /* Hp */
    void (*max)(int64_t n, int64_t heads, const REAL *x, REAL *best);
    void (*shift)(int64_t n, int64_t heads, REAL *x, const REAL *shift);
    void (*scale)(int64_t n, int64_t heads, REAL *x, const REAL *factor);
    void (*sum)(int64_t n, int64_t heads, const REAL *x, REAL *sum);
    void (*dot)(int64_t n, int64_t heads, const REAL *x, const REAL *y, REAL *sum);
    void (*pair)(int64_t n, int64_t heads, const REAL *p, const REAL *dp, const REAL *delta, REAL scale,
                 REAL *pair);
} KERNEL(panel_columns);

static KERNEL(panel_columns) KERNEL(panel_columns_of)(int64_t heads) {
#define COLUMNS(bytes)                                                                                         \
    (KERNEL(panel_columns)) {                                                                                  \
        panel_heads(heads, sizeof(REAL)), KERNEL(panel_max##bytes), KERNEL(panel_shift##bytes),                \
            KERNEL(panel_scale##bytes), KERNEL(panel_sum##bytes), KERNEL(panel_dot##bytes),                    \
            KERNEL(panel_pair##bytes)                                                                          \
    }
    const int bytes = panel_bytes(heads, sizeof(REAL));
#if defined(__AVX512F__)
    if (bytes >= 64) return COLUMNS(64);
#endif
#if defined(__AVX__)
    if (bytes >= 32) return COLUMNS(32);
#endif
    (void)bytes;
    return COLUMNS(16);
#undef COLUMNS
}

/* to[d, h] = factor * x[h, d]; heads beyond H are left as they are. Squares of four, so that reading and
 * writing both go by vectors. */
static void KERNEL(panel_transpose)(int64_t H, int64_t D, int64_t heads, REAL factor, const REAL *restrict x,
                                    REAL *restrict to) {
    typedef REAL quad __attribute__((vector_size(4 * sizeof(REAL)), aligned(sizeof(REAL)), may_alias));
    const int64_t H4 = H / 4 * 4, D4 = D / 4 * 4;
    for (int64_t h = 0; h < H4; h += 4)
        for (int64_t d = 0; d < D4; d += 4) {
            const REAL *from = x + h * D + d;
            const quad a = factor * *(const quad *)from, b = factor * *(const quad *)(from + D);
            const quad c = factor * *(const quad *)(from + 2 * D), e = factor * *(const quad *)(from + 3 * D);
            const quad ab = __builtin_shufflevector(a, b, 0, 4, 1, 5),
                       ce = __builtin_shufflevector(c, e, 0, 4, 1, 5);
            const quad ab2 = __builtin_shufflevector(a, b, 2, 6, 3, 7),
                       ce2 = __builtin_shufflevector(c, e, 2, 6, 3, 7);
            REAL *square = to + d * heads + h;
            *(quad *)square = __builtin_shufflevector(ab, ce, 0, 1, 4, 5);
            *(quad *)(square + heads) = __builtin_shufflevector(ab, ce, 2, 3, 6, 7);
            *(quad *)(square + 2 * heads) = __builtin_shufflevector(ab2, ce2, 0, 1, 4, 5);
            *(quad *)(square + 3 * heads) = __builtin_shufflevector(ab2, ce2, 2, 3, 6, 7);
        }
    for (int64_t h = 0; h < H; h++)
        for (int64_t d = h < H4 ? D4 : 0; d < D; d++) to[d * heads + h] = factor * x[h * D + d];
}

/* ---- the teacher of one row ---- */

/* share[h] = log of the heads' mass on the listed keys, up to a term that all heads share: each head's
 * exponentials are taken relative to its largest logit `top`, `sum` is their sum, and rest[h] is the log of
 * what else stands in its denominator. rest is [2 * H]; it is used up. */
static void KERNEL(panel_shares)(int64_t H, const REAL *top, const REAL *sum, double *rest, double *share) {
    /* log(exp(gap) + sum) = above + log(exp(gap - above) + sum exp(-above)), gap = rest - top */
    for (int64_t h = 0; h < H; h++) {
        double gap = rest[h] - top[h], above = gap > 0 ? gap : 0; /* inf where the head has no mass for a key */
        rest[h] = gap > 0 ? 0 : gap;
        rest[H + h] = share[h] = -above;
    }
    cg_exp_f64(2 * H, rest, rest);
    for (int64_t h = 0; h < H; h++) rest[h] += sum[h] * rest[H + h];
    cg_log_f64(H, rest, rest);
    for (int64_t h = 0; h < H; h++) share[h] -= rest[h];
}

/* teacher[place[i]] for the n keys of a list from their exponentials e [n, Hp]; `share` is used up, and
 * `factor` is [Hp] of scratch. Other places are left alone. Every head is shifted by the largest share, so that
 * the sum is at least 1 before it is divided away. */
static void KERNEL(panel_teach)(int64_t H, int64_t n, int64_t Hp, const REAL *e, double *share, REAL *factor,
                                const int64_t *place, REAL *teacher) {
    double largest = -INFINITY, sum = 0;
    for (int64_t h = 0; h < H; h++) largest = share[h] > largest ? share[h] : largest;
    for (int64_t h = 0; h < H; h++) share[h] -= largest;
    cg_exp_f64(H, share, share);
    for (int64_t h = 0; h < Hp; h++) factor[h] = h < H ? (REAL)share[h] : 0;
    for (int64_t i = 0; i < n; i++) {
        REAL mass = 0;
#pragma omp simd reduction(+ : mass)
        for (int64_t h = 0; h < H; h++) mass += e[i * Hp + h] * factor[h];
        teacher[place[i]] = mass;
        sum += mass;
    }
    const REAL inverse = (REAL)(1 / sum);
    for (int64_t i = 0; i < n; i++) teacher[place[i]] *= inverse;
}
#undef PANEL_INLINE
