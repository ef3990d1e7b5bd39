/* Where a plan runs when it does not run on the CPU: a device, and who has kernels for it. graph/ knows no kernel; ops/
 * hands it a table (ops/cuda/cuda_ops.h). */
#ifndef CG_GRAPH_BACKEND_H
#define CG_GRAPH_BACKEND_H

#include "core/device/device.h"
#include "graph/op.h"

/* What kernels of a device found wrong with their data. They cannot stop the run: the record is read at its end. All
 * zero: nothing. Written by cg_report of ops/cuda/kernel.cuh. */
struct cg_device_fault {
    uint32_t lock;
    int32_t what;  /* which check of the op failed, counted from 1; checks with smaller numbers come first */
    int64_t place; /* where; smaller ones come first */
    int64_t got[4];
    double number; /* what was found, where it is no integer */
};

/* A kernel that runs one node. */
typedef struct cg_device_kernel {
    const char *variant;
    /* Put the node's work on the stream; data and workspace of args are device memory. */
    bool (*launch)(const cg_run_args *args, cg_stream *stream);
    size_t workspace; /* exact scratch bytes, library scratch included */
    /* Turn a fault into the sentence that the CPU kernel would say; NULL: the kernel reports none. */
    void (*describe)(const cg_run_args *args, const cg_device_fault *fault, cg_error *error);
} cg_device_kernel;

typedef struct cg_backend {
    cg_device *device;
    const void *kernels; /* kernel_of's own, and so is ... */
    int abilities;       /* ... what it found the device to do */
    /* The kernel of a node that is no alias. Depends on op, dtypes, shapes and attributes alone. False with a sentence
     * when there is none. */
    bool (*kernel_of)(const struct cg_backend *backend, const cg_node *node, cg_device_kernel *kernel,
                      cg_error *error);
} cg_backend;

#endif
