/* Products of index heads and keys in f32, without tensor cores: several keys and 8 heads per lane. */
#ifndef CG_OPS_CUDA_INDEX_CORE_CUH
#define CG_OPS_CUDA_INDEX_CORE_CUH

#include "ops/cuda/indexer/indexer.cuh"

namespace {

constexpr int CORE_HEADS = 8; /* of a warp */

/* Channels d to d + 3 of a row of Di into shared memory, zeros behind Di where they stand in the way of a float4. */
CG_DEVICE void core_piece(float *to, const float *row, int64_t d, int64_t Di) {
    if (Di % 4 == 0) {
        if (d < Di) cg_cp_async_16(to, row + d);
    } else {
        for (int c = 0; c < 4; c++) to[c] = d + c < Di ? row[d + c] : 0;
    }
}

/* dot[head, key] += over `depth` channels, in order and fused. Keys of this lane, CG_WARP rows apart, and the queries of
 * CORE_HEADS heads, both in shared memory; KEY_PITCH and QUERY_PITCH from row to row. 8 lanes read 16 bytes each from
 * different banks where KEY_PITCH is 4 beyond a multiple of 32; all read the same query. Wavefronts for 4 channels: 4
 * KEYS + CORE_HEADS, beside 4 KEYS CORE_HEADS fused multiplications. */
template <int KEYS, int KEY_PITCH, int QUERY_PITCH>
CG_DEVICE void core_dots(const float *keys, const float *queries, int depth, float dot[CORE_HEADS][KEYS]) {
    for (int d = 0; d < depth; d += 4) {
        float4 key[KEYS];
#pragma unroll
        for (int i = 0; i < KEYS; i++) key[i] = *(const float4 *)(keys + i * CG_WARP * KEY_PITCH + d);
#pragma unroll
        for (int h = 0; h < CORE_HEADS; h++) {
            const float4 query = *(const float4 *)(queries + h * QUERY_PITCH + d);
#pragma unroll
            for (int i = 0; i < KEYS; i++) {
                dot[h][i] = cg_fma(key[i].x, query.x, dot[h][i]);
                dot[h][i] = cg_fma(key[i].y, query.y, dot[h][i]);
                dot[h][i] = cg_fma(key[i].z, query.z, dot[h][i]);
                dot[h][i] = cg_fma(key[i].w, query.w, dot[h][i]);
            }
        }
    }
}

} // namespace

#endif
