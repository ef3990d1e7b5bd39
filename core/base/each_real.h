/* Reads CG_KERNEL_FILE for float and for double. For CG_ISA_FILE of core/base/each_isa.h, which reads this for each path:
 *
 *     #define CG_KERNEL_FILE "core/math/gemm_plain.h"
 *     #define CG_ISA_FILE "core/base/each_real.h"
 *     #include "core/base/each_isa.h"
 *
 * Inside the file: REAL is float or double, REAL_BITS 32 or 64, REAL_INTEGER the integer of so many, KERNEL(name) is
 * ISA(name_f32) or ISA(name_f64), VEC(exp) is cg_exp_f32 or cg_exp_f64, REAL_DTYPE is CG_F32 or CG_F64, REAL_MIN is the
 * smallest normal number. */
#include <float.h>
#include <stdint.h>

#if defined(__x86_64__)
#include <immintrin.h> /* on the portable path, which is read first: the intrinsics bring their own instructions */
#endif

#define REAL float
#define REAL_BITS 32
#define REAL_INTEGER int32_t
#define REAL_DTYPE CG_F32
#define REAL_MIN FLT_MIN
#define KERNEL(name) ISA(name##_f32)
#define VEC(name) cg_##name##_f32
#include CG_KERNEL_FILE
#undef REAL
#undef REAL_BITS
#undef REAL_INTEGER
#undef REAL_DTYPE
#undef REAL_MIN
#undef KERNEL
#undef VEC

#define REAL double
#define REAL_BITS 64
#define REAL_INTEGER int64_t
#define REAL_DTYPE CG_F64
#define REAL_MIN DBL_MIN
#define KERNEL(name) ISA(name##_f64)
#define VEC(name) cg_##name##_f64
#include CG_KERNEL_FILE
#undef REAL
#undef REAL_BITS
#undef REAL_INTEGER
#undef REAL_DTYPE
#undef REAL_MIN
#undef KERNEL
#undef VEC
