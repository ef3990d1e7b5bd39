#include "core/math/roofline.h"

#include "core/math/gemm.h"
#include "core/base/threads.h"

#include <stdlib.h>
#include <time.h>

#ifdef CG_HAVE_DNNL
#include <oneapi/dnnl/dnnl.h>
#endif

/* Tries of one kind, of which a slow machine makes fewer. */
enum { EDGE = 2048, TRIES = 7 };
static const double enough_s = 1;

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static bool own_product(const cg_gemm *gemm, const void *a, const void *b, void *c, void *workspace) {
    return cg_gemm_run(gemm, a, b, c, workspace, NULL);
}

#ifdef CG_HAVE_DNNL
enum { PRODUCTS_F32 = 2 };
static bool library_product(const void *a, const void *b, void *c) {
    cg_in_onednn = 1; /* it makes its kernel in here */
    bool ok = dnnl_sgemm('N', 'N', EDGE, EDGE, EDGE, 1, a, EDGE, b, EDGE, 0, c, EDGE) == dnnl_success;
    cg_in_onednn = 0;
    return ok;
}
#else
enum { PRODUCTS_F32 = 1 };
static bool library_product(const void *a, const void *b, void *c) {
    (void)a, (void)b, (void)c;
    return false;
}
#endif

double cg_gemm_peak_gflops(cg_dtype dtype) {
    const int64_t n = (int64_t)EDGE * EDGE;
    cg_gemm gemm = cg_gemm_dense(dtype, false, false, EDGE, EDGE, EDGE);
    size_t element = cg_dtype_bytes(dtype), scratch = cg_gemm_workspace(&gemm);
    char *a = NULL, *b = NULL, *c = NULL, *workspace = NULL;
    double best = 0;
    bool ok = scratch != SIZE_MAX && !posix_memalign((void **)&a, 64, (size_t)n * element) &&
              !posix_memalign((void **)&b, 64, (size_t)n * element) &&
              !posix_memalign((void **)&c, 64, (size_t)n * element) &&
              !posix_memalign((void **)&workspace, 64, scratch + 1);
    for (int64_t i = 0; ok && i < n; i++) {
        double x = (double)(i % 17) / 16 - 0.5;
        if (dtype == CG_F64)
            ((double *)a)[i] = ((double *)b)[i] = x;
        else
            ((float *)a)[i] = ((float *)b)[i] = (float)x;
    }
    for (int library = 0; ok && library < (dtype == CG_F32 ? PRODUCTS_F32 : 1); library++) {
        const double begin = now_s();
        for (int i = 0; ok && i < TRIES && (i < 2 || now_s() - begin < enough_s); i++) {
            double start = now_s();
            ok = library ? library_product(a, b, c) : own_product(&gemm, a, b, c, workspace);
            double gflops = 2e-9 * EDGE * EDGE * EDGE / (now_s() - start);
            if (ok && gflops > best) best = gflops;
        }
    }
    free(a);
    free(b);
    free(c);
    free(workspace);
    return best;
}

double cg_memory_peak_gbytes(void) {
    const int64_t n = (int64_t)16 << 20; /* 64 MiB each: larger than caches */
    float *a = malloc((size_t)n * sizeof *a), *b = malloc((size_t)n * sizeof *b),
          *c = malloc((size_t)n * sizeof *c);
    double best = 0;
    for (int i = 0; a && b && c && i < TRIES; i++) {
        double start = now_s();
#pragma omp parallel for schedule(static) num_threads(cg_threads())
        for (int64_t k = 0; k < n; k++) {
            if (i == 0)
                a[k] = b[k] = (float)k; /* the first round touches the pages, each by the thread that uses it */
            c[k] = a[k] + b[k];
        }
        double gbytes = 12e-9 * (double)n / (now_s() - start);
        if (i > 0 && gbytes > best) best = gbytes;
    }
    free(a);
    free(b);
    free(c);
    return best;
}
