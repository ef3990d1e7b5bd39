/* Matrix products: a thin front over oneDNN (f32, bf16) and a plain blocked loop (f64, which oneDNN lacks).
 *
 * The product is cut into tiles of C whose size depends on the shape alone; each tile is one single-threaded
 * oneDNN call. So an element has the same bits on any number of threads. All scratch that oneDNN asks for
 * comes from the caller's workspace; compiled kernels are cached by shape for the life of the process.
 */
#ifndef CG_CORE_GEMM_H
#define CG_CORE_GEMM_H

#include <signal.h>

#include "core/base/tensor.h"

/* C[m,n] = op(A)[m,k] op(B)[k,n], or += when accumulate. Row-major; ld = distance of two rows as stored.
 * trans_a: A is stored [k,m]; trans_b: B is stored [n,k]. dtype is CG_F32, CG_F64 or CG_BF16, which is summed in f32;
 * its C is bf16, rounded once at the end, or f32 with c_is_f32. m, n or k may be 0. */
typedef struct cg_gemm {
    cg_dtype dtype;
    bool c_is_f32;
    bool trans_a, trans_b, accumulate;
    int64_t m, n, k;
    int64_t lda, ldb, ldc;
} cg_gemm;

/* The product with dense leading dimensions. */
cg_gemm cg_gemm_dense(cg_dtype dtype, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k);

/* Bytes of workspace that cg_gemm_run needs; the same for any number of threads. May compile kernels, each
 * in a fraction of a millisecond, so that the run need not; SIZE_MAX when oneDNN fails at that. Start it on a
 * multiple of 64 bytes. */
size_t cg_gemm_workspace(const cg_gemm *gemm);

/* Run on all threads in use. Must not be called inside a parallel region. Fails only when oneDNN does. */
bool cg_gemm_run(const cg_gemm *gemm, const void *a, const void *b, void *c, void *workspace, cg_error *error);

/* The same on the calling thread alone, of any size, for use inside a parallel region; gives the same bits as
 * cg_gemm_run. The workspace is that of one thread; it may be NULL when 0 bytes are asked for. */
size_t cg_gemm_serial_workspace(const cg_gemm *gemm);
bool cg_gemm_serial(const cg_gemm *gemm, const void *a, const void *b, void *c, void *workspace,
                    cg_error *error);

/* Not 0 while the thread has oneDNN make a kernel or a handle; 2.6 then writes to blocks that it was refused. For a signal
 * handler that tells such a fault from others. */
extern __thread volatile sig_atomic_t cg_in_onednn;

#endif
