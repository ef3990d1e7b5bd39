/* What indexer_scores_at and its gradient share. */
#ifndef CG_OPS_CUDA_INDEX_AT_CUH
#define CG_OPS_CUDA_INDEX_AT_CUH

#include "ops/cuda/indexer/indexer.cuh"

namespace {

enum { Q, W, KEYS, TOPK };
enum { BAD_INDEX = 1 };

constexpr int AT_HEADS = 64, AT_CHANNELS = 128; /* the most that the fast kernels can do */

struct sizes {
    int64_t T, Hi, Di, C, K;
};

inline sizes sizes_of(const cg_shape *q, const cg_shape *keys, const cg_shape *topk) {
    return {q->dims[0], q->dims[1], q->dims[2], keys->dims[0], topk->dims[1]};
}

} // namespace

#endif
