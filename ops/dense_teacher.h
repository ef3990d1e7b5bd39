/* The teacher over all rows that a token sees, for the kernel part of an op's file: included once for each
 * REAL.
 *
 *   l[h,j] = scale * q[t,h,:] . ckv[j,:]              over the visible rows j of t
 *   P[h,j] = exp(l[h,j]) / (E[h] + sum_j exp(l[h,j]))  E[h]: exp(window_lse[t,h]), exp(sink[h]), or 0
 *   target = sum_h P[h,:] / its sum over j
 *
 * Two passes over tiles of keys: the first finds each head's largest logit and the sum of exponentials below
 * it, the second adds the heads up, each head under its own largest logit and with a weight found in
 * logarithms. Only the ratio of the weights counts, so a mass of 1e-80 beside the window gives the exact
 * target, in f32 too. */

#undef TEACHER
#undef SCRATCH
#define TEACHER KERNEL(teacher)
#define SCRATCH KERNEL(teacher_scratch)

typedef struct TEACHER {
    const REAL *q, *ckv;
    const REAL *window_lse, *sink; /* at most one of them is there */
    const int32_t *rows;
    int64_t T, H, D, C;
    REAL scale;
} TEACHER;

/* Scratch of one thread: cg_teacher_bytes. */
typedef struct SCRATCH {
    REAL *tile, *max, *sum;
    void *gemm;
} SCRATCH;

static inline SCRATCH KERNEL(teacher_take)(char **at, const TEACHER *a) {
    const int64_t heads = cg_teacher_rows(a->H) * a->H;
    SCRATCH s;
    s.tile = cg_take(at, (size_t)(heads * CG_TEACHER_KEYS) * sizeof(REAL));
    s.max = cg_take(at, (size_t)heads * sizeof(REAL));
    s.sum = cg_take(at, (size_t)heads * sizeof(REAL));
    s.gemm = cg_take(at, cg_teacher_gemm_bytes(REAL_DTYPE, a->T, a->H, a->D, a->C));
    return s;
}

/* The logits of rows t0.. against keys c0..c0+n-1 -> tile [n_rows * H, n], not yet scaled. */
static inline bool KERNEL(teacher_logits)(const TEACHER *a, const SCRATCH *s, int64_t t0, int64_t n_rows,
                                          int64_t c0, int64_t n, cg_error *error) {
    cg_gemm logits = cg_gemm_dense(REAL_DTYPE, false, true, n_rows * a->H, n, a->D);
    return cg_gemm_serial(&logits, a->q + t0 * a->H * a->D, a->ckv + c0 * a->D, s->tile, s->gemm, error);
}

/* Fold n logits into a head's largest one and its sum of exponentials. */
static inline void KERNEL(teacher_fold)(REAL *logit, int64_t n, REAL scale, REAL *max, REAL *sum) {
    REAL largest = *max, add = 0;
    for (int64_t j = 0; j < n; j++) {
        logit[j] *= scale;
        largest = logit[j] > largest ? logit[j] : largest;
    }
    for (int64_t j = 0; j < n; j++) logit[j] -= largest;
    VEC(exp)(n, logit, logit);
#pragma omp simd reduction(+ : add)
    for (int64_t j = 0; j < n; j++) add += logit[j];
    if (largest > *max) *sum *= *max == -(REAL)INFINITY ? 0 : (REAL)exp((double)(*max - largest));
    *sum += add;
    *max = largest;
}

/* From max and sum of a row's heads to their weights, the largest 1, which take the place of sum. */
static inline void KERNEL(teacher_weights)(const TEACHER *a, int64_t t, const REAL *max, REAL *sum) {
    double largest = -INFINITY;
    for (int pass = 0; pass < 2; pass++)
        for (int64_t h = 0; h < a->H; h++) {
            const double beside = a->window_lse ? (double)a->window_lse[t * a->H + h]
                                  : a->sink     ? (double)a->sink[h]
                                                : -INFINITY;
            const double lse = (double)max[h] + log((double)sum[h]);
            const double high = beside > lse ? beside : lse, low = beside > lse ? lse : beside;
            const double log_weight = (double)max[h] - (high + log1p(exp(low - high)));
            if (pass == 0)
                largest = log_weight > largest ? log_weight : largest;
            else
                sum[h] = (REAL)exp(log_weight - largest);
        }
}

/* Targets of rows t0..t0+n_rows-1 -> target [n_rows, C], the visible rows of each from column 0 on; the rest of
 * a row is not written. n_rows is at most cg_teacher_rows. False when a product fails. */
static inline bool KERNEL(teacher_block)(const TEACHER *a, const SCRATCH *s, int64_t t0, int64_t n_rows,
                                         REAL *target, cg_error *error) {
    const int64_t H = a->H;
    int64_t first = a->C, end = 0;
    for (int64_t r = 0; r < n_rows; r++) {
        const int64_t from = a->rows[(t0 + r) * CG_ROW_FIELDS + CG_ROW_COMPRESSED];
        const int64_t n = cg_row_seen(a->rows, t0 + r);
        if (n == 0) continue;
        first = from < first ? from : first;
        end = from + n > end ? from + n : end;
    }
    first -= first % CG_TEACHER_KEYS; /* whole tiles, so that few shapes of products occur */
    for (int64_t i = 0; i < n_rows * H; i++) {
        s->max[i] = -(REAL)INFINITY;
        s->sum[i] = 0;
    }
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t c0 = first; c0 < end; c0 += CG_TEACHER_KEYS) {
            const int64_t width = a->C - c0 < CG_TEACHER_KEYS ? a->C - c0 : CG_TEACHER_KEYS;
            if (!KERNEL(teacher_logits)(a, s, t0, n_rows, c0, width, error)) return false;
            for (int64_t r = 0; r < n_rows; r++) {
                const int64_t start = a->rows[(t0 + r) * CG_ROW_FIELDS + CG_ROW_COMPRESSED];
                int64_t from = start, to = start + cg_row_seen(a->rows, t0 + r);
                from = from < c0 ? c0 : from;
                to = to > c0 + width ? c0 + width : to;
                if (from >= to) continue;
                REAL *mass = target + r * a->C + (from - start);
                for (int64_t h = 0; h < H; h++) {
                    REAL *logit = s->tile + (r * H + h) * width + (from - c0);
                    const int64_t n = to - from, i = r * H + h;
                    if (pass == 0) {
                        KERNEL(teacher_fold)(logit, n, a->scale, &s->max[i], &s->sum[i]);
                        continue;
                    }
                    for (int64_t j = 0; j < n; j++) logit[j] = logit[j] * a->scale - s->max[i];
                    VEC(exp)(n, logit, logit);
                    if (h == 0)
                        for (int64_t j = 0; j < n; j++) mass[j] = s->sum[i] * logit[j];
                    else
                        for (int64_t j = 0; j < n; j++) mass[j] += s->sum[i] * logit[j];
                }
            }
        }
        for (int64_t r = 0; pass == 0 && r < n_rows; r++)
            if (cg_row_seen(a->rows, t0 + r))
                KERNEL(teacher_weights)(a, t0 + r, s->max + r * H, s->sum + r * H);
    }
    for (int64_t r = 0; r < n_rows; r++) {
        const int64_t n = cg_row_seen(a->rows, t0 + r);
        REAL *mass = target + r * a->C, sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < n; j++) sum += mass[j];
        for (int64_t j = 0; j < n; j++) mass[j] /= sum;
    }
    return true;
}
