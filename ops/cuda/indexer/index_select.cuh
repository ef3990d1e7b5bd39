/* The K best of a stream of scores, kept by a warp in shared memory.
 *
 * Better is the larger score, then the lower index; -0.0 equals +0.0. Candidates come in rising order of index, 32 at a
 * time. What is above a bound is put behind what is kept; when there is no room left, all but the K best leave, and the
 * K-th best is the new bound. At the end what is left is sorted.
 *
 * Random scores: K (1 + ln(n / K)) of n come in, so with room for half of K more a warp shrinks a few times per row.
 * Rising ones: all come in, it shrinks once per K / 2. To shrink 768 to 512 takes a pass of 24 steps per bit that is
 * needed to tell 512 from 768 numbers, about 12, then one that moves them: 2000 instructions. To sort 512 takes 45 rounds
 * of 8 exchanges per lane: 4000 instructions. */
#ifndef CG_OPS_CUDA_INDEX_SELECT_CUH
#define CG_OPS_CUDA_INDEX_SELECT_CUH

#include "ops/cuda/indexer/indexer.cuh"

namespace {

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int64_t SELECT_MOST = 2048; /* K that a warp can keep */

/* Places for the K best and what may still come: a power of two, which is sorted, and at least two pushes. */
CG_BOTH int select_room(int64_t K) {
    int power = CG_WARP;
    while (power < K) power *= 2;
    const int more = power / 2 < 64 ? 64 : power / 2 > 256 ? 256 : power / 2;
    return power + more;
}

/* A number of the order of scores, above 0. */
CG_DEVICE uint32_t order_of(float score) {
    score += 0.0f; /* -0.0 becomes 0.0 */
    uint32_t bits;
    memcpy(&bits, &score, sizeof bits);
    return bits ^ ((uint32_t)((int32_t)bits >> 31) | 0x80000000u);
}

struct cg_smaller {
    template <typename S> CG_MEMBER S operator()(S a, S b) const { return a < b ? a : b; }
};

struct selector {
    uint64_t
        *kept; /* [room] in shared memory, of this warp: order, then the index so that a lower one is larger */
    int K, room, lane;
    int count;      /* how many are there, in rising order of index */
    uint32_t bound; /* only what is above comes in */
    int32_t nan;    /* the first index with a score that is NaN; INT32_MAX: none. By lane until finish */

    CG_MEMBER selector(uint64_t *shared, int64_t n_best)
        : kept(shared), K((int)n_best), room(select_room(n_best)), lane((int)threadIdx.x % CG_WARP), count(0),
          bound(0), nan(INT32_MAX) {}

    CG_MEMBER uint32_t order(int i) const { return (uint32_t)(kept[i] >> 32); }

    /* One score per lane, of rising index over the lanes and calls. seen: it is a candidate. By the whole warp. */
    CG_MEMBER void push(bool seen, float score, int32_t index) {
        if (seen && score != score && index < nan) nan = index;
        const uint32_t mine = order_of(score);
        const bool enters = seen && mine > bound;
        const unsigned all = __ballot_sync(ALL_LANES, enters);
        if (enters)
            kept[count + __popc(all & ((1u << lane) - 1))] =
                (uint64_t)mine << 32 | (0xffffffffu - (uint32_t)index);
        count += __popc(all);
        if (count > room - CG_WARP) shrink();
    }

    /* Of equal scores on the bound those of lower index stay: what is kept is in their order. */
    CG_MEMBER void shrink() {
        __syncwarp();
        uint32_t low = 0xffffffffu, high = 0;
        for (int i = lane; i < count; i += CG_WARP) {
            low = cg_smaller()(low, order(i));
            high = cg_larger()(high, order(i));
        }
        low = cg_warp_reduce(low, cg_smaller());
        high = cg_warp_reduce(high, cg_larger());

        /* The largest number that at least K reach is the K-th largest: found bit by bit below those that all share,
         * until exactly K reach it. */
        uint32_t differ = low ^ high;
        for (int by = 1; by < 32; by *= 2) differ |= differ >> by;
        uint32_t on = high & ~differ;
        int reach = count;
        for (uint32_t bit = differ ^ differ >> 1; bit && reach > K; bit >>= 1) {
            int n = 0;
            for (int i = lane; i < count; i += CG_WARP) n += order(i) >= (on | bit);
            n = cg_warp_sum(n);
            if (n < K) continue;
            on |= bit;
            reach = n;
        }
        int above = 0; /* wanted only where more than K reach the bound */
        for (int i = lane; reach > K && i < count; i += CG_WARP) above += order(i) > on;
        int room_on = reach > K ? K - cg_warp_sum(above) : count; /* how many that lie on the bound stay */

        int end = 0;
        for (int first = 0; first < count; first += CG_WARP) {
            const bool there = first + lane < count;
            const uint64_t mine = there ? kept[first + lane] : 0;
            const unsigned equal = __ballot_sync(ALL_LANES, there && (uint32_t)(mine >> 32) == on);
            const int before = __popc(equal & ((1u << lane) - 1));
            const bool stays =
                there && ((uint32_t)(mine >> 32) > on || ((uint32_t)(mine >> 32) == on && before < room_on));
            const unsigned all = __ballot_sync(ALL_LANES, stays);
            __syncwarp(); /* what is read here may be written over, also by the next turn */
            if (stays) kept[end + __popc(all & ((1u << lane) - 1))] = mine;
            end += __popc(all);
            room_on -= __popc(equal);
        }
        __syncwarp();
        count = end;
        bound = on;
    }

    /* Write index [K]: the best first, then -1. Tells all lanes where the first NaN was. */
    CG_MEMBER void finish(int32_t *index) {
        if (count > K) shrink();
        __syncwarp();
        int power = 1;
        while (power < count) power *= 2;
        for (int i = count + lane; i < power; i += CG_WARP) kept[i] = 0;
        for (int size = 2; size <= power; size *= 2)
            for (int step = size / 2; step; step /= 2) {
                __syncwarp();
                for (int i = lane; i < power / 2; i += CG_WARP) {
                    const int a = 2 * i - (i & (step - 1)), b = a + step;
                    const uint64_t x = kept[a], y = kept[b];
                    if ((a & size) ? x < y : x > y) continue;
                    kept[a] = y;
                    kept[b] = x;
                }
            }
        __syncwarp();
        for (int i = lane; i < K; i += CG_WARP)
            index[i] = i < count ? (int32_t)(0xffffffffu - (uint32_t)kept[i]) : -1;
        nan = cg_warp_reduce(nan, cg_smaller());
        __syncwarp();
    }
};

} // namespace

#endif
