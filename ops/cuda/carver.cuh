#ifndef CG_OPS_CUDA_CARVER_CUH
#define CG_OPS_CUDA_CARVER_CUH

#include "ops/cuda/kernel.cuh"

namespace {

/* Workspace in aligned pieces: counted with base NULL, handed out by the same calls in the launch function. */
struct carver {
    char *base;
    size_t used;
    void *carve(size_t bytes) {
        void *piece = base ? base + used : nullptr;
        used += cg_piece(bytes);
        return piece;
    }
};

} // namespace

#endif
