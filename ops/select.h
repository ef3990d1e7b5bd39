/* The k best of a row of scores, for the kernel part of an op's file: included once for each REAL.
 *
 * Better is the larger score, then the lower index; -0.0 equals +0.0. Scores are turned into integers of the
 * same order, the k-th largest of them is found by halving its range and counting, and what is kept is sorted
 * by counting what is better. No branch depends on a score, which is worth more here than fewer comparisons. */

#undef ORDER
#undef SELECT
#define ORDER REAL_INTEGER
#define SELECT KERNEL(select_scratch)

/* Scratch of cg_select_bytes. */
typedef struct SELECT {
    ORDER *key, *kept; /* of all, and of those kept in rising order of index */
    int32_t *place;    /* of those kept, among all */
} SELECT;

static inline SELECT KERNEL(select_take)(char **at, int64_t n, int64_t k) {
    SELECT s;
    s.key = cg_take(at, (size_t)n * sizeof(ORDER));
    s.kept = cg_take(at, (size_t)k * sizeof(ORDER));
    s.place = cg_take(at, (size_t)(k + 1) * sizeof(int32_t));
    return s;
}

/* Select among scores [n], whose indices are first, first + 1, ...: index [k], best first, then -1. Returns the
 * place of the first NaN, or -1. */
static inline int64_t KERNEL(select)(const REAL *score, int64_t n, int64_t k, int64_t first,
                                     const SELECT *scratch, int32_t *index) {
    ORDER *key = scratch->key, *kept = scratch->kept;
    int32_t *place = scratch->place;
    const int bits = 8 * (int)sizeof(ORDER);
    const ORDER least = (ORDER)((uint64_t)1 << (bits - 1)), most = ~least;
    ORDER low = most, high = least;
    int nan = 0;
    for (int64_t j = 0; j < n; j++) {
        const REAL x = score[j] + 0; /* -0.0 becomes 0.0 */
        ORDER i;
        memcpy(&i, &x, sizeof i);
        i ^= (i >> (bits - 1)) & most;
        key[j] = i;
        low = i < low ? i : low;
        high = i > high ? i : high;
        nan |= x != x;
    }
    for (int64_t j = 0; nan && j < n; j++)
        if (score[j] != score[j]) return j;

    /* The largest bound that at least k keys reach is the k-th largest key: found bit by bit below those that
     * all keys share, until exactly k reach it. */
    const uint64_t differ = n > 0 ? ((uint64_t)low ^ (uint64_t)high) & (uint64_t)most : 0;
    int b = low < 0 && high >= 0 ? bits - 1 : differ ? 63 - __builtin_clzll(differ) : -1;
    ORDER bound = b == bits - 1 ? least : b < 0 ? low : (ORDER)(high & (ORDER) ~(((uint64_t)2 << b) - 1));
    int64_t reach = n; /* keys >= bound */
    for (; b >= 0 && reach > k; b--) {
        const ORDER higher = (ORDER)(bound ^ (ORDER)((uint64_t)1 << b));
        ORDER count = 0; /* as wide as the keys, for the sake of vectors */
        for (int64_t j = 0; j < n; j++) count += key[j] >= higher;
        if (count < k) continue;
        bound = higher;
        reach = count;
    }

    /* Those that reach it in rising order of index, but of equal ones on it only the first that fit. */
    int64_t m = 0, surplus = reach > k ? reach - k : 0;
    if (surplus == 0) {
        for (int64_t j = 0; j < n; j++) {
            place[m] = (int32_t)j; /* one place more than k, for what is not kept */
            m += key[j] >= bound;
        }
    } else {
        ORDER above = 0;
        for (int64_t j = 0; j < n; j++) above += key[j] > bound;
        for (int64_t j = 0, room = k - above; j < n; j++) {
            const bool is_on = key[j] == bound;
            if (key[j] > bound || (is_on && room > 0)) place[m++] = (int32_t)j;
            room -= is_on;
        }
    }
    for (int64_t i = 0; i < m; i++) kept[i] = key[place[i]];

    /* The rank of each is the number of better ones. */
    for (int64_t i = 0; i < m; i++) {
        const ORDER mine = kept[i];
        ORDER better = 0;
        for (int64_t j = 0; j < i; j++) better += kept[j] >= mine;
        for (int64_t j = i + 1; j < m; j++) better += kept[j] > mine;
        index[better] = (int32_t)(first + place[i]);
    }
    for (int64_t j = m; j < k; j++) index[j] = -1;
    return -1;
}
