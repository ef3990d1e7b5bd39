/* Kernels written once for float and double, and compiled for each path (core/base/isa.h). An op's file looks like this:
 *
 *     #ifndef REAL
 *     ... includes, attribute struct, infer ...
 *     #define CG_KERNEL_FILE "ops/nn/scale.c"
 *     #include "ops/kernel.h"                 reads the file's #else part, twice for each path
 *     ... grad, cost, workspace, cases, table: .run = CG_RUN(scale)
 *     #else
 *     static bool KERNEL(scale)(const cg_run_args *args) { const REAL *x = args->in[0].data; ... }
 *     #endif
 *
 * Inside the #else part: REAL is float or double, KERNEL(name) is name_f32 or name_f64 (with _avx2 or _avx512 behind it on
 * that path), VEC(exp) is cg_exp_f32 or cg_exp_f64; REAL_DTYPE, REAL_MIN and more: see core/base/each_real.h. Outside, name_f32 is
 * that of the portable path: how much workspace an op needs may be asked of it, and must not depend on the path. */
#include <math.h>
#include <string.h>

#include "core/math/gemm.h"
#include "core/base/threads.h"
#include "core/math/vec.h"
#include "graph/op.h"

#define CG_ISA_FILE "core/base/each_real.h"
#include "core/base/each_isa.h"

#define CG_RUN(name)                                                                                           \
    { [CG_F32] = CG_EACH_ISA(name##_f32), [CG_F64] = CG_EACH_ISA(name##_f64) }
