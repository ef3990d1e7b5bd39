/* exp and log over arrays, read by core/math/vec.c once for each path. */

/* SLEEF's functions for one kind of instructions: those without a name at their end look at the processor themselves.
 * Without SLEEF a vector is one number. */
#undef EXP_F32
#undef EXP_F64
#undef LOG_F32
#undef LOG_F64
#if !defined(CG_HAVE_SLEEF)
typedef float ISA(vec_f32);
typedef double ISA(vec_f64);
#define EXP_F32 expf
#define EXP_F64 exp
#define LOG_F32 logf
#define LOG_F64 log
#elif defined(__AVX512F__)
typedef __m512 ISA(vec_f32);
typedef __m512d ISA(vec_f64);
#define EXP_F32 Sleef_expf16_u10avx512f
#define EXP_F64 Sleef_expd8_u10avx512f
#define LOG_F32 Sleef_logf16_u10avx512f
#define LOG_F64 Sleef_logd8_u10avx512f
#elif defined(__AVX2__) && defined(__FMA__)
typedef __m256 ISA(vec_f32);
typedef __m256d ISA(vec_f64);
#define EXP_F32 Sleef_expf8_u10avx2
#define EXP_F64 Sleef_expd4_u10avx2
#define LOG_F32 Sleef_logf8_u10avx2
#define LOG_F64 Sleef_logd4_u10avx2
#elif defined(__SSE2__)
typedef __m128 ISA(vec_f32);
typedef __m128d ISA(vec_f64);
#define EXP_F32 Sleef_expf4_u10sse2
#define EXP_F64 Sleef_expd2_u10sse2
#define LOG_F32 Sleef_logf4_u10sse2
#define LOG_F64 Sleef_logd2_u10sse2
#else
typedef float ISA(vec_f32);
typedef double ISA(vec_f64);
#define EXP_F32 Sleef_expf_u10
#define EXP_F64 Sleef_exp_u10
#define LOG_F32 Sleef_logf_u10
#define LOG_F64 Sleef_log_u10
#endif

/* Loads and stores go through memcpy, which the compiler turns into one unaligned move. The tail runs through the same
 * vector function, padded with 1 (harmless for exp and log): a scalar function there could round differently, and an element
 * would then depend on its place. */
#define DEFINE_MAP(name, real, vec, function)                                                                  \
    static void name(int64_t n, const real *x, real *y) {                                                      \
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

DEFINE_MAP(ISA(map_exp_f32), float, ISA(vec_f32), EXP_F32)
DEFINE_MAP(ISA(map_exp_f64), double, ISA(vec_f64), EXP_F64)
DEFINE_MAP(ISA(map_log_f32), float, ISA(vec_f32), LOG_F32)
DEFINE_MAP(ISA(map_log_f64), double, ISA(vec_f64), LOG_F64)
#undef DEFINE_MAP
