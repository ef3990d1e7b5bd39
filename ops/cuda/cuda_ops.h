/* The kernels of ops on CUDA devices: one table per op, in ops/cuda/<op>.cu (ops/cuda/kernel.cuh says how to write
 * one). The build finds the tables. */
#ifndef CG_OPS_CUDA_CUDA_OPS_H
#define CG_OPS_CUDA_CUDA_OPS_H

#include "graph/backend.h"

enum { CG_CUDA_VARIANTS = 4 };

/* One way of running an op. */
typedef struct cg_cuda_variant {
    const char *name; /* the first one is "plain": readable, any size, any device */
    bool (*launch[CG_DTYPES])(const cg_run_args *args, cg_stream *stream); /* by cg_node_dtype, as cg_op.run */
    size_t (*workspace)(const cg_node *node);                              /* exact scratch bytes; NULL: none */
    bool (*fits)(const cg_node *node);                                     /* sizes it can do; NULL: all */
    size_t (*shared)(const cg_node *node); /* bytes of shared memory of a block; NULL: 48 KiB at most */
    int least_sm;                          /* 80: sm_80 and later; 0: all */
    bool wgmma;                            /* made of products of ops/cuda/wgmma.cuh */
} cg_cuda_variant;

typedef struct cg_cuda_op {
    const char *op;
    cg_cuda_variant variants[CG_CUDA_VARIANTS]; /* a later one is preferred where it fits */
    /* The sentence of a fault, the same as the CPU kernel's; NULL: the kernels report none. args holds shapes and
     * attributes, its data are out of reach. */
    void (*describe)(const cg_run_args *args, const cg_device_fault *fault, cg_error *error);
} cg_cuda_op;

/* The table of an op; NULL when there is none. */
const cg_cuda_op *cg_cuda_op_find(const char *op);

/* What a device can do with wgmma. */
typedef enum cg_cuda_wgmma {
    CG_WGMMA_NONE,   /* nothing: the kernels were not compiled for it */
    CG_WGMMA_WORKS,  /* what mma.sync does: tried on whole numbers, the same bits */
    CG_WGMMA_DIFFERS /* something else; no variant is made of it then */
} cg_cuda_wgmma;

/* Try it: ops/cuda/wgmma_check.cu. */
bool cg_cuda_try_wgmma(cg_device *device, cg_cuda_wgmma *found, cg_error *error);

/* Can the variant run the node on the backend's device? */
bool cg_cuda_can_run(const cg_backend *backend, const cg_cuda_variant *variant, const cg_node *node);

/* The kernels of all ops on a device. variant: NULL, or the name of one that is taken wherever an op has it and it can
 * run; a name that no op has is refused. The device must outlive the backend. */
bool cg_cuda_backend(cg_backend *backend, cg_device *device, const char *variant, cg_error *error);

#endif
