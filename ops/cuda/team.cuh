/* Rows of a matrix shared out to teams of threads: a warp each while rows are short, a whole block where they are long.
 * Short rows in a block each would leave most of its threads without work, and wait at its barriers. */
#ifndef CG_OPS_CUDA_TEAM_CUH
#define CG_OPS_CUDA_TEAM_CUH

#include "ops/cuda/pack.cuh"
#include "ops/cuda/reduce.cuh"

namespace {

constexpr int TEAM_WARPS = 8, TEAM_THREADS = TEAM_WARPS * CG_WARP; /* of a block */

/* WARPS is 1 or TEAM_WARPS. All lanes of a team call its sums together. */
template <int WARPS> struct team {
    static_assert(WARPS == 1 || WARPS == TEAM_WARPS, "a warp or a block");
    static constexpr int LANES = WARPS * CG_WARP, PER_BLOCK = TEAM_WARPS / WARPS;

    CG_MEMBER static int lane() { return (int)threadIdx.x % LANES; }
    CG_MEMBER static int64_t first() { return (int64_t)blockIdx.x * PER_BLOCK + (int)threadIdx.x / LANES; }
    CG_MEMBER static int64_t all() { return (int64_t)gridDim.x * PER_BLOCK; }

    template <typename S> CG_MEMBER static S sum(S x) {
        if constexpr (WARPS == 1)
            return cg_warp_sum(x);
        else
            return cg_block_sum(x);
    }
    template <typename S> CG_MEMBER static S max(S x) {
        if constexpr (WARPS == 1)
            return cg_warp_max(x);
        else
            return cg_block_max(x);
    }
};

/* A warp is enough for rows of so many bytes: 8 packs of 16 for each of its lanes. */
inline bool row_for_a_warp(cg_dtype dtype, int64_t length) {
    return length * (int64_t)cg_dtype_bytes(dtype) <= 4096;
}

} // namespace

#endif
