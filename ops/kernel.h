/* Kernels written once for float and double. An op's file looks like this:
 *
 *     #ifndef REAL
 *     ... includes, attribute struct, infer ...
 *     #define CG_KERNEL_FILE "ops/scale.c"
 *     #include "ops/kernel.h"                 reads the file's #else part twice
 *     ... grad, cost, workspace, cases, table: .run = CG_RUN(scale)
 *     #else
 *     static bool KERNEL(scale)(const cg_run_args *args) { const REAL *x = args->in[0].data; ... }
 *     #endif
 *
 * Inside the #else part: REAL is float or double, KERNEL(name) is name_f32 or name_f64, VEC(exp) is
 * cg_exp_f32 or cg_exp_f64, REAL_DTYPE is CG_F32 or CG_F64, REAL_MIN is the smallest normal number. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "core/gemm.h"
#include "core/threads.h"
#include "core/vec.h"
#include "graph/op.h"

#define REAL float
#define REAL_DTYPE CG_F32
#define REAL_MIN FLT_MIN
#define KERNEL(name) name##_f32
#define VEC(name) cg_##name##_f32
#include CG_KERNEL_FILE
#undef REAL
#undef REAL_DTYPE
#undef REAL_MIN
#undef KERNEL
#undef VEC

#define REAL double
#define REAL_DTYPE CG_F64
#define REAL_MIN DBL_MIN
#define KERNEL(name) name##_f64
#define VEC(name) cg_##name##_f64
#include CG_KERNEL_FILE
#undef REAL
#undef REAL_DTYPE
#undef REAL_MIN
#undef KERNEL
#undef VEC

#undef CG_KERNEL_FILE

#define CG_RUN(name)                                                                                           \
    { [CG_F32] = name##_f32, [CG_F64] = name##_f64 }
