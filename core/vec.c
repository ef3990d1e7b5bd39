#include "core/vec.h"

#include <math.h>
#include <string.h>

#ifdef CG_HAVE_SLEEF
#include <sleef.h>
#endif

/* Loads and stores go through memcpy, which the compiler turns into one unaligned move. Without SLEEF a vector is one
 * number. */
#if !defined(CG_HAVE_SLEEF)
typedef float vec_f32;
typedef double vec_f64;
#define EXP_F32 expf
#define EXP_F64 exp
#define LOG_F32 logf
#define LOG_F64 log
#elif defined(__AVX512F__)
typedef __m512 vec_f32;
typedef __m512d vec_f64;
#define EXP_F32 Sleef_expf16_u10
#define EXP_F64 Sleef_expd8_u10
#define LOG_F32 Sleef_logf16_u10
#define LOG_F64 Sleef_logd8_u10
#elif defined(__AVX2__)
typedef __m256 vec_f32;
typedef __m256d vec_f64;
#define EXP_F32 Sleef_expf8_u10
#define EXP_F64 Sleef_expd4_u10
#define LOG_F32 Sleef_logf8_u10
#define LOG_F64 Sleef_logd4_u10
#elif defined(__SSE2__)
typedef __m128 vec_f32;
typedef __m128d vec_f64;
#define EXP_F32 Sleef_expf4_u10
#define EXP_F64 Sleef_expd2_u10
#define LOG_F32 Sleef_logf4_u10
#define LOG_F64 Sleef_logd2_u10
#else
typedef float vec_f32;
typedef double vec_f64;
#define EXP_F32 Sleef_expf_u10
#define EXP_F64 Sleef_exp_u10
#define LOG_F32 Sleef_logf_u10
#define LOG_F64 Sleef_log_u10
#endif

/* The tail runs through the same vector function, padded with 1 (harmless for exp and log): a scalar
 * function there could round differently, and an element would then depend on its place. */
#define DEFINE_MAP(name, real, vec, function)                                                                  \
    void name(int64_t n, const real *x, real *y) {                                                             \
        enum { LANES = sizeof(vec) / sizeof(real) };                                                           \
        int64_t i = 0;                                                                                         \
        vec v;                                                                                                 \
        for (; i + LANES <= n; i += LANES) {                                                                   \
            memcpy(&v, x + i, sizeof v);                                                                       \
            v = function(v);                                                                                   \
            memcpy(y + i, &v, sizeof v);                                                                       \
        }                                                                                                      \
        if (i >= n) return;                                                                                    \
        real padded[LANES];                                                                                    \
        for (int lane = 0; lane < LANES; lane++) padded[lane] = i + lane < n ? x[i + lane] : 1;                \
        memcpy(&v, padded, sizeof v);                                                                          \
        v = function(v);                                                                                       \
        memcpy(padded, &v, sizeof v);                                                                          \
        memcpy(y + i, padded, (size_t)(n - i) * sizeof(real));                                                 \
    }

DEFINE_MAP(cg_exp_f32, float, vec_f32, EXP_F32)
DEFINE_MAP(cg_exp_f64, double, vec_f64, EXP_F64)
DEFINE_MAP(cg_log_f32, float, vec_f32, LOG_F32)
DEFINE_MAP(cg_log_f64, double, vec_f64, LOG_F64)
