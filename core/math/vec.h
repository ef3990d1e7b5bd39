/* Elementwise exp, log and friends over arrays: a thin front over SLEEF (at most 1.0 ulp), or over the C
 * library where the build has no SLEEF.
 * x and y may be the same array. An element has the same bits wherever it stands in the array. */
#ifndef CG_CORE_VEC_H
#define CG_CORE_VEC_H

#include <stdint.h>

void cg_exp_f32(int64_t n, const float *x, float *y);
void cg_exp_f64(int64_t n, const double *x, double *y);
void cg_log_f32(int64_t n, const float *x, float *y);
void cg_log_f64(int64_t n, const double *x, double *y);

#endif
