/* The k best of a stream of scores, for the kernel part of an op's file: included once for each REAL.
 *
 * Better is the larger score, then the lower index; -0.0 equals +0.0. Candidates come in rising order of index.
 * The kept ones form a heap whose root is the worst, so a candidate costs one comparison unless it is kept. */

static inline bool KERNEL(worse)(REAL a, int32_t i, REAL b, int32_t j) { return a < b || (a == b && i > j); }

/* Let (score, index) sink from `at` below which the heap is in order. */
static inline void KERNEL(heap_sink)(REAL *scores, int32_t *index, int64_t n, int64_t at, REAL score,
                                     int32_t i) {
    for (int64_t child; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && KERNEL(worse)(scores[child + 1], index[child + 1], scores[child], index[child]))
            child++;
        if (!KERNEL(worse)(scores[child], index[child], score, i)) break;
        scores[at] = scores[child];
        index[at] = index[child];
    }
    scores[at] = score;
    index[at] = i;
}

/* Offer a candidate to a heap that holds *n of at most k. */
static inline void KERNEL(heap_offer)(REAL *scores, int32_t *index, int64_t *n, int64_t k, REAL score,
                                      int32_t i) {
    if (*n == k) {
        if (k > 0 && KERNEL(worse)(scores[0], index[0], score, i))
            KERNEL(heap_sink)(scores, index, k, 0, score, i);
        return;
    }
    scores[*n] = score;
    index[*n] = i;
    if (++*n == k)
        for (int64_t at = k / 2 - 1; at >= 0; at--)
            KERNEL(heap_sink)(scores, index, k, at, scores[at], index[at]);
}

/* Sort what is kept, best first, and fill index up to k with -1. The heap is no heap afterwards. */
static inline void KERNEL(heap_finish)(REAL *scores, int32_t *index, int64_t n, int64_t k) {
    if (n < k)
        for (int64_t at = n / 2 - 1; at >= 0; at--)
            KERNEL(heap_sink)(scores, index, n, at, scores[at], index[at]);
    for (int64_t last = n - 1; last > 0; last--) {
        REAL score = scores[last];
        int32_t i = index[last];
        scores[last] = scores[0];
        index[last] = index[0];
        KERNEL(heap_sink)(scores, index, last, 0, score, i);
    }
    for (int64_t j = n; j < k; j++) index[j] = -1;
}
