/* Paths: the levels of vector instructions that kernels are compiled for (core/base/each_isa.h). A process runs on one of
 * them, the highest that its processor has, or the one that the environment variable CSAGRAD_ISA names. */
#ifndef CG_CORE_ISA_H
#define CG_CORE_ISA_H

#include "core/base/error.h"

/* Where the compiler can compile for several: other compilers than GCC do not let __AVX2__ follow the target. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CG_HAVE_ISAS
#endif

/* Rising: a processor that has one has those before it. */
typedef enum cg_isa {
    CG_PORTABLE, /* what the compiler takes for granted: SSE2 on x86-64; the only one on other processors */
    CG_AVX2,     /* with FMA, as every processor of level x86-64-v3 */
    CG_AVX512,   /* F, BW, CD, DQ and VL, as every processor of level x86-64-v4 */
    CG_ISAS
} cg_isa;

/* The path of this process, chosen at the first call. */
cg_isa cg_isa_used(void);

/* Can CSAGRAD_ISA be obeyed? CG_BAD_INPUT for a name that no path has, and for a path that this processor or build
 * lacks. An empty value is none. A program asks at its start: where nobody asks, a bad value counts as none. */
bool cg_isa_obeyed(cg_error *error);

/* Do this processor and this build have the path? */
bool cg_isa_exists(cg_isa isa);

/* "portable", "avx2", "avx512". */
const char *cg_isa_name(cg_isa isa);

#endif
