#include "core/math/vec.h"

#include "core/base/isa.h"

#include <math.h>
#include <string.h>

#if defined(CG_HAVE_SLEEF) && defined(CG_HAVE_ISAS)
#include <immintrin.h>
/* It declares what the target has. */
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f")
#include <sleef.h>
#pragma GCC pop_options
#elif defined(CG_HAVE_SLEEF)
#include <sleef.h>
#endif

#define CG_ISA_FILE "core/math/vec_kernels.h"
#include "core/base/each_isa.h"

#define DEFINE_FRONT(name, real)                                                                               \
    void cg_##name(int64_t n, const real *x, real *y) {                                                        \
        static void (*const maps[CG_ISAS])(int64_t, const real *, real *) = CG_EACH_ISA(map_##name);           \
        maps[cg_isa_used()](n, x, y);                                                                          \
    }

DEFINE_FRONT(exp_f32, float)
DEFINE_FRONT(exp_f64, double)
DEFINE_FRONT(log_f32, float)
DEFINE_FRONT(log_f64, double)
