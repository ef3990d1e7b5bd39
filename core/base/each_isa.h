/* Reads a file once for each path (core/base/isa.h), compiled for it:
 *
 *     #define CG_ISA_FILE "core/math/vec_kernels.h"
 *     #include "core/base/each_isa.h"
 *     static map *const maps[CG_ISAS] = CG_EACH_ISA(exp);      maps[cg_isa_used()](n, x, y)
 *
 * Inside the file ISA(name) is name on the portable path, then name_avx2 and name_avx512, and the compiler's own macros
 * (__AVX2__ and the like) tell what the path has. What the file includes is read before, on the portable path, if it
 * guards itself; a function there is compiled for a path where it is inlined. */
#include "core/base/isa.h"

#undef ISA
#define ISA(name) name
#include CG_ISA_FILE

#ifdef CG_HAVE_ISAS
#ifndef CG_EACH_ISA
#define CG_EACH_ISA(name)                                                                                      \
    { [CG_PORTABLE] = name, [CG_AVX2] = name##_avx2, [CG_AVX512] = name##_avx512 }
#endif

/* cg_isa_exists asks for the same. */
#pragma GCC push_options
#pragma GCC target("avx2,fma,bmi,bmi2,popcnt")
#undef ISA
#define ISA(name) name##_avx2
#include CG_ISA_FILE
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,bmi,bmi2,popcnt,avx512f,avx512bw,avx512cd,avx512dq,avx512vl")
#undef ISA
#define ISA(name) name##_avx512
#include CG_ISA_FILE
#pragma GCC pop_options

#elif !defined(CG_EACH_ISA)
#define CG_EACH_ISA(name)                                                                                      \
    { [CG_PORTABLE] = name }
#endif

#undef ISA
#undef CG_ISA_FILE
#undef CG_KERNEL_FILE
