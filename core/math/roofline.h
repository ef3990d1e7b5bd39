/* What this machine can do at most, measured: the two roofs that benchmarks are compared with. */
#ifndef CG_CORE_ROOFLINE_H
#define CG_CORE_ROOFLINE_H

#include "core/base/tensor.h"

/* GFLOP/s of a 2048^3 product on the threads in use, best of several: the faster one of oneDNN's own matrix product and
 * the engine's (f32; for f64, which oneDNN lacks, the engine's alone). 0 when memory is out. Takes about a second. */
double cg_gemm_peak_gflops(cg_dtype dtype);

/* GB/s of a sum of two long arrays into a third, on the threads in use, best of several. 0 when memory is out. */
double cg_memory_peak_gbytes(void);

#endif
