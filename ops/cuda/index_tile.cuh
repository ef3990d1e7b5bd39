/* Index scores on tensor cores: one query's heads stay in the registers of a warp, keys come by in shared memory, 16 at a
 * time, and relu, head weights and the sum over heads are done where the products come out.
 *
 *   x[key, head] = k[key, :] . q[head, :]       16 keys x 64 heads, DI / 16 steps of m16n8k16, sums in f32
 *   score[key]   = sum_h w[h] relu(x[key, h])
 *
 * Keys are the rows of the products and heads their columns, so a lane has 2 keys and 16 heads, and what is left is a sum
 * over 4 lanes. Registers of a lane for 64 heads of 128 channels: 128 of q, 32 of x, 16 of w. 64 products take 8
 * ldmatrix. */
#ifndef CG_OPS_CUDA_INDEX_TILE_CUH
#define CG_OPS_CUDA_INDEX_TILE_CUH

#include "ops/cuda/indexer.cuh"

namespace {

constexpr int TILE_HEADS = 64, TILE_CHANNELS = 128; /* the most that it can do */

/* Rows of DI channels in shared memory lie so far apart that the 8 rows of an ldmatrix are in different banks. */
template <int DI> struct tile_pitch { static constexpr int value = DI + 8; };

/* One row of Di channels into shared memory, zeros up to DI; by `threads` threads of which this is `thread`, for row
 * number thread / (DI / 8) and so on. Channels come in eights. NULL: nothing is copied. */
template <int DI> CG_DEVICE void tile_copy(cg_bf16 *to, const cg_bf16 *from, int eighth, int64_t Di) {
    if (!from) return;
    if (eighth * 8 < Di)
        cg_cp_async_16(to + eighth * 8, from + eighth * 8);
    else
        *(float4 *)(to + eighth * 8) = make_float4(0, 0, 0, 0);
}

template <int DI> struct tile_query {
    static constexpr int STEPS = DI / 16, HEADS = TILE_HEADS / 8;
    uint32_t q[HEADS][STEPS][2];
    float w[HEADS][2];

    /* q [Hi, Di], w [Hi]; nothing is read where there is no row. Di is a multiple of 8. */
    CG_MEMBER void load(const cg_bf16 *query, const cg_bf16 *weights, int64_t Hi, int64_t Di, bool is_row) {
        const int lane = (int)threadIdx.x % CG_WARP, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int n = 0; n < HEADS; n++) {
            const uint32_t *row = (const uint32_t *)(query + (8 * n + g) * Di); /* pairs of channels */
            const bool is_head = is_row && 8 * n + g < Hi;
#pragma unroll
            for (int s = 0; s < STEPS; s++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    q[n][s][half] = is_head && 16 * s + 8 * half < Di ? row[8 * s + 4 * half + t] : 0;
#pragma unroll
            for (int i = 0; i < 2; i++)
                w[n][i] = is_row && 8 * n + 2 * t + i < Hi ? cg_up(weights[8 * n + 2 * t + i]) : 0;
        }
    }

    /* Scores of 16 keys at `keys`, rows tile_pitch apart: what this lane has of those of keys g and g + 8. */
    CG_MEMBER void add_up(const cg_bf16 *keys, float part[2]) const {
        const int lane = (int)threadIdx.x % CG_WARP;
        const cg_bf16 *row = keys + lane % 16 * tile_pitch<DI>::value + lane / 16 * 8;
        float x[HEADS][4];
#pragma unroll
        for (int n = 0; n < HEADS; n++) x[n][0] = x[n][1] = x[n][2] = x[n][3] = 0;
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            uint32_t k[4];
            cg_ldmatrix_x4(k, row + 16 * s);
#pragma unroll
            for (int n = 0; n < HEADS; n++) cg_mma_bf16_16x8x16(x[n], k, q[n][s]);
        }
        part[0] = part[1] = 0;
#pragma unroll
        for (int n = 0; n < HEADS; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) part[i / 2] = cg_fma(w[n][i % 2], cg_relu(x[n][i]), part[i / 2]);
    }

    /* Scores of 32 keys, that of key `lane` for each lane. */
    CG_MEMBER float scores(const cg_bf16 *keys) const {
        const int lane = (int)threadIdx.x % CG_WARP, t = lane % 4;
        float part[4];
        add_up(keys, part);
        add_up(keys + 16 * tile_pitch<DI>::value, part + 2);
        /* Sums over the 4 lanes of a group, that of part[t] in lane t. */
        const float a = t & 2 ? part[2] : part[0], b = t & 2 ? part[3] : part[1];
        const float pair0 = a + __shfl_xor_sync(0xffffffffu, t & 2 ? part[0] : part[2], 2);
        const float pair1 = b + __shfl_xor_sync(0xffffffffu, t & 2 ? part[1] : part[3], 2);
        const float sum = (t & 1 ? pair1 : pair0) + __shfl_xor_sync(0xffffffffu, t & 1 ? pair0 : pair1, 1);
        /* Lane (g, t) has key 8 t + g. */
        return __shfl_sync(0xffffffffu, sum, lane % 8 * 4 + lane / 8);
    }
};

} // namespace

#endif
