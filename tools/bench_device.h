/* What a device can do at most, measured by the ops that it runs: the roofs of csagrad bench --device. */
#ifndef CG_TOOLS_BENCH_DEVICE_H
#define CG_TOOLS_BENCH_DEVICE_H

#include "graph/backend.h"

/* GFLOP/s of a square matrix product (cuBLAS, where the device has it), of the first size that takes 20 ms, at most
 * 8192. */
bool bench_device_gemm(const cg_backend *backend, cg_dtype dtype, double *gflops, cg_error *error);

/* GB/s of a sum of two f32 arrays into a third, of the first length that takes 20 ms, at most 1 GiB each. */
bool bench_device_memory(const cg_backend *backend, double *gbytes, cg_error *error);

#endif
