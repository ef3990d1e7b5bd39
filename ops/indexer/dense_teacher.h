/* The teacher over all rows that a token sees, for the kernel part of an op's file: included once per REAL.
 *
 *   l[h,j] = scale * q[t,h,:] . ckv[j,:]               over the visible rows j of t
 *   P[h,j] = exp(l[h,j]) / (E[h] + sum_j exp(l[h,j]))   E[h]: exp(window_lse[t,h]), exp(sink[h]), or 0
 *   target = sum_h P[h,:] / its sum over j
 *
 * The logits of a few rows lie in the thread's scratch. Each head's exponentials are taken below its own
 * largest logit, and heads are added with weights found in logarithms. Only the ratio of the weights counts, so
 * a mass of 1e-80 beside the window gives the exact target, in f32 too. */

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
    REAL *logits;       /* [rows * H, C], keys counted from the first one that any of the rows sees */
    REAL *max, *sum;    /* of each head */
    double *log_weight; /* of the heads of one row */
    void *gemm;
} SCRATCH;

static inline SCRATCH KERNEL(teacher_take)(char **at, const TEACHER *a) {
    const int64_t heads = cg_teacher_rows(a->H, a->C) * a->H;
    SCRATCH s;
    s.logits = cg_take(at, (size_t)(heads * a->C) * sizeof(REAL));
    s.max = cg_take(at, (size_t)heads * sizeof(REAL));
    s.sum = cg_take(at, (size_t)heads * sizeof(REAL));
    s.log_weight = cg_take(at, (size_t)a->H * sizeof(double));
    s.gemm = cg_take(at, cg_teacher_gemm_bytes(REAL_DTYPE, a->T, a->H, a->D, a->C));
    return s;
}

/* logit becomes exp(scale * logit - max); the sum of it is returned. */
static inline REAL KERNEL(teacher_exp)(REAL *logit, int64_t n, REAL scale, REAL *max) {
    REAL largest = -(REAL)INFINITY, sum = 0;
    for (int64_t j = 0; j < n; j++) {
        logit[j] *= scale;
        largest = logit[j] > largest ? logit[j] : largest;
    }
    for (int64_t j = 0; j < n; j++) logit[j] -= largest;
    VEC(exp)(n, logit, logit);
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < n; j++) sum += logit[j];
    *max = largest;
    return sum;
}

/* From max and sum of the heads of row t to their weights, the largest 1, which take the place of sum. */
static inline void KERNEL(teacher_weights)(const TEACHER *a, int64_t t, const REAL *max, REAL *sum,
                                           double *log_weight) {
    double largest = -INFINITY;
    for (int64_t h = 0; h < a->H; h++) {
        const double lse = (double)max[h] + log((double)sum[h]);
        const double beside = a->window_lse ? (double)a->window_lse[t * a->H + h]
                              : a->sink     ? (double)a->sink[h]
                                            : -INFINITY;
        const double high = beside > lse ? beside : lse, low = beside > lse ? lse : beside;
        log_weight[h] = (double)max[h] - (high + log1p(exp(low - high)));
        largest = log_weight[h] > largest ? log_weight[h] : largest;
    }
    for (int64_t h = 0; h < a->H; h++) sum[h] = (REAL)exp(log_weight[h] - largest);
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
    for (int64_t c = first; c < end; c += CG_TEACHER_KEYS) {
        cg_gemm logits = cg_gemm_dense(REAL_DTYPE, false, true, n_rows * H,
                                       a->C - c < CG_TEACHER_KEYS ? a->C - c : CG_TEACHER_KEYS, a->D);
        logits.ldc = a->C;
        if (!cg_gemm_serial(&logits, a->q + t0 * H * a->D, a->ckv + c * a->D, s->logits + (c - first), s->gemm,
                            error))
            return false;
    }
    for (int64_t r = 0; r < n_rows; r++) {
        const int64_t n = cg_row_seen(a->rows, t0 + r);
        if (n == 0) continue;
        REAL *e = s->logits + r * H * a->C + (a->rows[(t0 + r) * CG_ROW_FIELDS + CG_ROW_COMPRESSED] - first);
        REAL *mass = target + r * a->C, *weight = s->sum + r * H, sum = 0;
        for (int64_t h = 0; h < H; h++)
            weight[h] = KERNEL(teacher_exp)(e + h * a->C, n, a->scale, &s->max[r * H + h]);
        KERNEL(teacher_weights)(a, t0 + r, s->max + r * H, weight, s->log_weight);
        for (int64_t j = 0; j < n; j++) mass[j] = weight[0] * e[j];
        for (int64_t h = 1; h < H; h++)
            for (int64_t j = 0; j < n; j++) mass[j] += weight[h] * e[h * a->C + j];
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < n; j++) sum += mass[j];
        for (int64_t j = 0; j < n; j++) mass[j] /= sum;
    }
    return true;
}
