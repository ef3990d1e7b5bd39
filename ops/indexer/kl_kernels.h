/* One row of a KL divergence, for the kernel part of an op's file: included once for each REAL. Slots with the
 * score -inf are absent. */

/* Slots up to the last one that is not absent. */
static inline int64_t KERNEL(present_slots)(const REAL *s, int64_t n) {
    while (n > 0 && s[n - 1] == -(REAL)INFINITY) n--;
    return n;
}

/* shifted[j] = s[j] - max, e[j] = exp of it, *log_sum = log of the sum of e, so log p = shifted - log_sum.
 * False when all slots are absent. NaN comes through. */
static inline bool KERNEL(log_softmax_parts)(const REAL *s, int64_t n, REAL *shifted, REAL *e, REAL *log_sum) {
    REAL max = -(REAL)INFINITY, sum = 0;
    bool some = false;
    for (int64_t j = 0; j < n; j++) {
        max = s[j] > max ? s[j] : max;
        some |= s[j] != -(REAL)INFINITY;
    }
    if (!some) return false;
    for (int64_t j = 0; j < n; j++) shifted[j] = s[j] - max;
    VEC(exp)(n, shifted, e);
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < n; j++) sum += e[j];
    *log_sum = (REAL)log((double)sum);
    return true;
}

/* sum_j target (log target - log p) where target is not 0. */
static inline REAL KERNEL(kl_row)(const REAL *target, const REAL *shifted, REAL log_sum, int64_t n,
                                  REAL *log_target) {
    REAL kl = 0;
    VEC(log)(n, target, log_target);
#pragma omp simd reduction(+ : kl)
    for (int64_t j = 0; j < n; j++)
        kl += target[j] != 0 ? target[j] * (log_target[j] - (shifted[j] - log_sum)) : 0;
    return kl;
}

/* The first absent slot whose target is not 0, or -1. */
static inline int64_t KERNEL(kl_bad_slot)(const REAL *s, const REAL *target, int64_t n) {
    int some = 0;
    for (int64_t j = 0; j < n; j++) some |= (s[j] == -(REAL)INFINITY) & (target[j] != 0);
    for (int64_t j = 0; some && j < n; j++)
        if (s[j] == -(REAL)INFINITY && target[j] != 0) return j;
    return -1;
}

/* factor * (p * sum of target - target), p = e / sum of e. Adding 0 leaves no -0.0 where factor is 0. */
static inline void KERNEL(kl_dscores)(const REAL *target, const REAL *e, int64_t n, REAL factor,
                                      REAL *dscores) {
    REAL sum = 0, mass = 0;
#pragma omp simd reduction(+ : sum, mass)
    for (int64_t j = 0; j < n; j++) {
        sum += e[j];
        mass += target[j];
    }
    const REAL share = mass / sum;
    for (int64_t j = 0; j < n; j++) dscores[j] = factor * (e[j] * share - target[j]) + 0;
}
