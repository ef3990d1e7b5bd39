/* The k best of a row of scores, for the kernel part of an op's file: included once for each REAL.
 *
 * Better is the larger score, then the lower index; -0.0 equals +0.0. Scores are turned into integers of the
 * same order, a bound that little more than k of them reach is found by halving and counting, and those are sorted
 * by counting what is better. No branch depends on a single score, which is worth more here than fewer comparisons. */

#undef ORDER
#undef ORDERS
#undef SELECT
#define ORDER REAL_INTEGER
#define ORDERS KERNEL(orders)
#define SELECT KERNEL(select_scratch)
typedef ORDER ORDERS __attribute__((vector_size(CG_LANES * sizeof(ORDER)), aligned(sizeof(ORDER)), may_alias));

/* Scratch of cg_select_bytes. */
typedef struct SELECT {
    ORDER *key;     /* of all, in whole vectors */
    ORDER *kept;    /* of those kept, in rising order of index, in whole CG_RANKED */
    int32_t *place; /* of those kept, among all */
} SELECT;

static inline SELECT KERNEL(select_take)(char **at, int64_t n, int64_t k) {
    SELECT s;
    s.key = cg_take(at, (size_t)(n + CG_LANES) * sizeof(ORDER));
    s.kept = cg_take(at, (size_t)(cg_select_most(k) + CG_RANKED) * sizeof(ORDER));
    s.place = cg_take(at, (size_t)(cg_select_most(k) + CG_LANES) * sizeof(int32_t));
    return s;
}

/* Smaller than the key of any number. */
#undef LEAST_KEY
#define LEAST_KEY ((ORDER)((uint64_t)1 << (8 * sizeof(ORDER) - 1)))

/* The bits of a number as a key, and back: below 0, larger bits are smaller numbers. */
static inline __attribute__((always_inline)) ORDER KERNEL(select_flip)(ORDER bits) {
    return bits ^ ((bits >> (8 * (int)sizeof(ORDER) - 1)) & ~LEAST_KEY);
}

/* -0.0 should be 0.0 before. */
static inline __attribute__((always_inline)) ORDER KERNEL(select_key)(REAL x) {
    ORDER bits;
    memcpy(&bits, &x, sizeof bits);
    return KERNEL(select_flip)(bits);
}

static inline REAL KERNEL(select_number)(ORDER key) {
    const ORDER bits = KERNEL(select_flip)(key);
    REAL x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Keys [n] of scores, filled up to whole vectors. Returns whether one is NaN. */
static inline bool KERNEL(select_keys)(const REAL *score, int64_t n, ORDER *key, ORDER *low, ORDER *high) {
    ORDER least = ~LEAST_KEY, most = LEAST_KEY;
    int nan = 0;
    for (int64_t j = 0; j < n; j++) {
        const REAL x = score[j] + 0;
        key[j] = KERNEL(select_key)(x);
        least = key[j] < least ? key[j] : least;
        most = key[j] > most ? key[j] : most;
        nan |= x != x;
    }
    for (int64_t j = n; j % CG_LANES != 0; j++) key[j] = LEAST_KEY;
    *low = least;
    *high = most;
    return nan != 0;
}

/* Keys [n] that are at least a bound above LEAST_KEY. */
static inline int64_t KERNEL(select_count)(const ORDER *key, int64_t n, ORDER bound) {
    ORDERS count = {0};
    for (int64_t j = 0; j < n; j += CG_LANES) count -= (ORDERS)(*(const ORDERS *)(key + j) >= bound);
    int64_t sum = 0;
    for (int i = 0; i < CG_LANES; i++) sum += count[i];
    return sum;
}

/* A bound that at least k of the n > k > 0 keys reach, and cg_select_most(k) at most, unless too many are equal: then
 * it is their key. Returns how many reach it; above: how many of them are known to be larger. */
static inline int64_t KERNEL(select_bound)(const ORDER *key, int64_t n, int64_t k, ORDER low, ORDER high,
                                           ORDER *bound, int64_t *above) {
    int64_t reach = n; /* of low */
    *above = 0;        /* high; always less than k */
    for (int pass = 1; reach > cg_select_most(k) && low < high; pass++) {
        /* Half-way between numbers; between keys where that is neither, and now and then, since one score may be far
         * from all others. */
        ORDER middle = KERNEL(select_key)(KERNEL(select_number)(low) / 2 + KERNEL(select_number)(high) / 2);
        if (middle <= low || middle > high || pass % 4 == 0)
            middle = (ORDER)((uint64_t)low + ((uint64_t)high - (uint64_t)low) / 2 + 1);
        const int64_t count = KERNEL(select_count)(key, n, middle);
        if (count >= k) {
            low = middle;
            reach = count;
        } else {
            high = middle - 1;
            *above = count;
        }
    }
    *bound = low;
    return reach;
}

/* Those keys of n that reach the bound, in rising order of index, and their places. A vector beyond them is written. */
static inline int64_t KERNEL(select_kept)(const ORDER *key, int64_t n, ORDER bound, ORDER *kept,
                                          int32_t *place) {
    int64_t m = 0;
#if defined(__AVX512VL__)
    __m256i at = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    for (int64_t j = 0; j < n; j += CG_LANES, at = _mm256_add_epi32(at, _mm256_set1_epi32(CG_LANES))) {
#if REAL_BITS == 32
        const __m256i keys = _mm256_loadu_si256((const __m256i *)(key + j));
        const __mmask8 on = _mm256_cmpge_epi32_mask(keys, _mm256_set1_epi32(bound));
        _mm256_storeu_si256((__m256i *)(kept + m), _mm256_maskz_compress_epi32(on, keys));
#else
        const __m512i keys = _mm512_loadu_si512(key + j);
        const __mmask8 on = _mm512_cmpge_epi64_mask(keys, _mm512_set1_epi64(bound));
        _mm512_storeu_si512(kept + m, _mm512_maskz_compress_epi64(on, keys));
#endif
        _mm256_storeu_si256((__m256i *)(place + m), _mm256_maskz_compress_epi32(on, at));
        m += __builtin_popcount(on);
    }
#else
    for (int64_t j = 0; j < n; j++) {
        place[m] = (int32_t)j;
        kept[m] = key[j];
        m += key[j] >= bound;
    }
#endif
    return m;
}

/* better [CG_RANKED] += how many of kept [from, to) are above each bound. */
static inline __attribute__((always_inline)) void
KERNEL(select_rank)(const ORDER *kept, int64_t from, int64_t to, const ORDERS *bound, ORDERS *better) {
    _Pragma("GCC unroll 4") for (int64_t j = from; j < to; j++)
        _Pragma("GCC unroll 4") for (int v = 0; v < CG_RANKED / CG_LANES; v++) better[v] -=
        (ORDERS)(kept[j] > bound[v]);
}

/* Select among scores [n], whose indices are first, first + 1, ...: index [k], best first, then -1. Returns the
 * place of the first NaN, or -1. */
static inline int64_t KERNEL(select)(const REAL *score, int64_t n, int64_t k, int64_t first,
                                     const SELECT *scratch, int32_t *index) {
    ORDER *key = scratch->key, *kept = scratch->kept, low, high;
    int32_t *place = scratch->place;
    if (KERNEL(select_keys)(score, n, key, &low, &high))
        for (int64_t j = 0; j < n; j++)
            if (score[j] != score[j]) return j;
    if (k == 0) return -1;

    int64_t m = 0, reach = n, above = 0;
    ORDER bound = low;
    if (n > k) reach = KERNEL(select_bound)(key, n, k, low, high, &bound, &above);
    if (reach <= cg_select_most(k)) {
        m = KERNEL(select_kept)(key, n, bound, kept, place);
    } else { /* of equal ones on the bound only the first that fit */
        for (int64_t j = 0, room = k - above; j < n; j++) {
            const bool is_on = key[j] == bound;
            if (key[j] > bound || (is_on && room > 0)) {
                kept[m] = key[j];
                place[m++] = (int32_t)j;
            }
            room -= is_on;
        }
    }

    /* The rank of each is the number of better ones: equal ones before it count, behind it they do not. */
    int32_t beyond;
    for (int64_t j = m; j % CG_RANKED != 0; j++) kept[j] = LEAST_KEY + 1;
    for (int64_t i = 0; i < m; i += CG_RANKED) {
        enum { VECTORS = CG_RANKED / CG_LANES };
        ORDERS mine[VECTORS], below[VECTORS], better[VECTORS] = {0};
        memcpy(mine, kept + i, sizeof mine);
        for (int v = 0; v < VECTORS; v++) below[v] = mine[v] - 1;
        const int64_t end = m < i + CG_RANKED ? m : i + CG_RANKED;
        KERNEL(select_rank)(kept, 0, i, below, better);
        for (int64_t j = i; j < end; j++)
            for (int v = 0; v < VECTORS; v++) {
                const ORDERS at = (ORDERS){0, 1, 2, 3, 4, 5, 6, 7} + (ORDER)(v * CG_LANES);
                better[v] -= (ORDERS)(kept[j] > mine[v] + (ORDERS)(at > (ORDER)(j - i)));
            }
        KERNEL(select_rank)(kept, end, m, mine, better);
        for (int64_t j = i; j < end; j++) {
            const ORDER rank = ((const ORDER *)better)[j - i];
            *(rank < k ? &index[rank] : &beyond) = (int32_t)(first + place[j]);
        }
    }
    for (int64_t j = m; j < k; j++) index[j] = -1;
    return -1;
}
