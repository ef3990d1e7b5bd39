/* How a product is cut, which depends on its shape alone:
 *
 *   C into tiles of mt x nt, one thread each; k into blocks of kt, added up in order, first to last.
 *
 * Blocks of k keep the copies of the operands in the second-level cache and bound the workspace, however
 * long k is. Within a block an f32 tile is one call of oneDNN's "brg" kernels, the only ones that do not
 * allocate packing buffers behind the plan. They take dense operands only, so the block of an operand that
 * has a longer leading dimension is copied to the workspace first. Where oneDNN has no such kernel
 * (processors without AVX-512, some shapes), for f64, and for products so small that its call would cost
 * more than the work, a plain kernel in this file does the same work.
 *
 * Both kernels add the fused products of a block in order of k (seen of oneDNN 2.6, and tested), and both
 * cut k alike. So an element depends on its row of A, its column of B and k, and not on m, n or the tile,
 * on a path with FMA (core/base/isa.h); without, oneDNN has no such kernels.
 *
 * bf16 operands go to oneDNN as they are where it has kernels for them (AVX-512 with BF16), which multiply pairs and
 * add up in f32. Elsewhere, and for small products, their blocks are widened to f32 first and treated as such. The
 * sum of a tile stays in f32 over all blocks of k.
 *
 * A build without oneDNN has the plain kernel alone.
 *
 * A call of oneDNN allocates a few small handles of its own (six, under 100 bytes each, freed on return),
 * and nothing that grows with the shape.
 */
#include "core/math/gemm.h"

#include <omp.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/bf16.h"
#include "core/base/threads.h"

#ifdef CG_HAVE_DNNL
#include <oneapi/dnnl/dnnl.h>
#endif

__thread volatile sig_atomic_t cg_in_onednn;

static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t parts_of(int64_t whole, int64_t part) { return (whole + part - 1) / part; }
static int64_t round_up(int64_t n, int64_t step) { return parts_of(n, step) * step; }
static size_t aligned(int64_t bytes) { return (size_t)round_up(bytes, 64); }

/* ---- The plain kernel ---- */

typedef struct plain_product {
    int64_t rows, vector_bytes; /* of a panel of A; B has two vectors of columns */
    void (*f32)(int64_t m, int64_t n, int64_t depth, const float *a, int64_t a_row, int64_t a_k, const float *b,
                int64_t b_col, int64_t b_k, float *c, int64_t ldc, bool add, float *packed_a, float *packed_b);
    void (*f64)(int64_t m, int64_t n, int64_t depth, const double *a, int64_t a_row, int64_t a_k,
                const double *b, int64_t b_col, int64_t b_k, double *c, int64_t ldc, bool add, double *packed_a,
                double *packed_b);
} plain_product;

#define CG_KERNEL_FILE "core/math/gemm_plain.h"
#define CG_ISA_FILE "core/base/each_real.h"
#include "core/base/each_isa.h"

static const plain_product *plain(void) {
    static const plain_product *const plains[CG_ISAS] = CG_EACH_ISA(&plain_kernel);
    return plains[cg_isa_used()];
}

static int64_t plain_cols(cg_dtype dtype) { return 2 * plain()->vector_bytes / (int64_t)cg_dtype_bytes(dtype); }

/* ---- oneDNN kernels, kept by shape for the life of the process ---- */

#ifdef CG_HAVE_DNNL

typedef struct seat { /* what one thread needs to call a kernel; a seat in use is busy */
    atomic_flag busy;
    dnnl_stream_t stream;
    dnnl_memory_t a, b, c, scratch;
} seat;

typedef struct kernel {
    struct kernel *next;
    cg_dtype dtype; /* of A and B; C is f32 */
    bool trans_a, trans_b;
    int64_t m, n, k;
    dnnl_primitive_t primitive; /* NULL: oneDNN has none that keeps to the workspace */
    dnnl_memory_desc_t a, b, c, scratch;
    size_t scratch_bytes;
    seat seats[]; /* one for each thread slot */
} kernel;

enum { BUCKETS = 4096 };
static _Atomic(kernel *) buckets[BUCKETS]; /* lists that only grow at their head, so readers need no lock */
static pthread_mutex_t compile_lock = PTHREAD_MUTEX_INITIALIZER;
static dnnl_engine_t engine;

static bool dnnl_fail(cg_error *error, const char *what, dnnl_status_t status, int64_t m, int64_t n,
                      int64_t k) {
    if (status == dnnl_out_of_memory)
        return cg_fail(error, CG_FAILED, "gemm: out of memory: oneDNN could not %s for m=%lld n=%lld k=%lld",
                       what, (long long)m, (long long)n, (long long)k);
    return cg_fail(error, CG_FAILED, "gemm: oneDNN could not %s for m=%lld n=%lld k=%lld (status %d)", what,
                   (long long)m, (long long)n, (long long)k, (int)status);
}

/* oneDNN 2 has descriptions as structures and finds implementations with an iterator; oneDNN 3 has pointers. */
#if DNNL_VERSION_MAJOR >= 3
#define DESC(desc) (desc)
#define desc_init_by_strides dnnl_memory_desc_create_with_strides
#else
#define DESC(desc) (&(desc))
#define desc_init_by_strides dnnl_memory_desc_init_by_strides
#endif

static dnnl_status_t matrix_desc(dnnl_memory_desc_t *desc, cg_dtype dtype, int64_t rows, int64_t cols,
                                 bool trans) {
    dnnl_dims_t dims = {rows, cols}, strides = {trans ? 1 : cols, trans ? rows : 1};
    return desc_init_by_strides(desc, 2, dims, dtype == CG_BF16 ? dnnl_bf16 : dnnl_f32, strides);
}

/* Takes this implementation if its name starts with "brg". The others allocate their own packing buffers. */
static bool take(kernel *kern, dnnl_primitive_desc_t desc, dnnl_status_t *status) {
    const char *name = "";
    dnnl_primitive_desc_query(desc, dnnl_query_impl_info_str, 0, &name);
    if (strncmp(name, "brg", 3) != 0) return false;
#if DNNL_VERSION_MAJOR >= 3
    const_dnnl_memory_desc_t scratch = dnnl_primitive_desc_query_md(desc, dnnl_query_scratchpad_md, 0);
    *status = dnnl_memory_desc_clone(&kern->scratch, scratch);
#else
    const dnnl_memory_desc_t *scratch = dnnl_primitive_desc_query_md(desc, dnnl_query_scratchpad_md, 0);
    kern->scratch = *scratch;
    *status = dnnl_success;
#endif
    kern->scratch_bytes = dnnl_memory_desc_get_size(scratch);
    if (*status == dnnl_success) *status = dnnl_primitive_create(&kern->primitive, desc);
    return true;
}

/* The first implementation that "take" takes, if any. */
#if DNNL_VERSION_MAJOR >= 3
static dnnl_status_t choose(kernel *kern, dnnl_primitive_attr_t attr) {
    dnnl_primitive_desc_t desc;
    dnnl_status_t status =
        dnnl_matmul_primitive_desc_create(&desc, engine, kern->a, kern->b, NULL, kern->c, attr);
    if (status == dnnl_unimplemented) return dnnl_success;
    if (status != dnnl_success) return status;
    while (!take(kern, desc, &status) && dnnl_primitive_desc_next_impl(desc) == dnnl_success)
        ;
    dnnl_primitive_desc_destroy(desc);
    return status;
}
#else
static dnnl_status_t choose(kernel *kern, dnnl_primitive_attr_t attr) {
    dnnl_matmul_desc_t matmul;
    dnnl_primitive_desc_iterator_t iterator;
    dnnl_status_t status = dnnl_matmul_desc_init(&matmul, &kern->a, &kern->b, NULL, &kern->c);
    if (status != dnnl_success) return status;
    status = dnnl_primitive_desc_iterator_create(&iterator, (const_dnnl_op_desc_t)&matmul, attr, engine, NULL);
    if (status == dnnl_unimplemented) return dnnl_success;
    if (status != dnnl_success) return status;
    bool taken;
    do {
        dnnl_primitive_desc_t desc = dnnl_primitive_desc_iterator_fetch(iterator);
        taken = take(kern, desc, &status);
        dnnl_primitive_desc_destroy(desc);
    } while (!taken && dnnl_primitive_desc_iterator_next(iterator) == dnnl_success);
    dnnl_primitive_desc_iterator_destroy(iterator);
    return status;
}
#endif

static dnnl_status_t compile(kernel *kern) {
    dnnl_status_t status = dnnl_success;
    dnnl_primitive_attr_t attr = NULL;
    if (!engine) {
        /* Held to the path. On the highest one DNNL_MAX_CPU_ISA may name a lower level; a oneDNN that was built without
         * this call stays as it is. */
        if (cg_isa_used() != CG_AVX512)
            dnnl_set_max_cpu_isa(cg_isa_used() == CG_AVX2 ? dnnl_cpu_isa_avx2 : dnnl_cpu_isa_sse41);
        status = dnnl_engine_create(&engine, dnnl_cpu, 0);
    }
    if (status == dnnl_success) status = matrix_desc(&kern->a, kern->dtype, kern->m, kern->k, kern->trans_a);
    if (status == dnnl_success) status = matrix_desc(&kern->b, kern->dtype, kern->k, kern->n, kern->trans_b);
    if (status == dnnl_success) status = matrix_desc(&kern->c, CG_F32, kern->m, kern->n, false);
    if (status == dnnl_success) status = dnnl_primitive_attr_create(&attr);
    if (status != dnnl_success) return status;
    status = dnnl_primitive_attr_set_scratchpad_mode(attr, dnnl_scratchpad_mode_user);
    /* an environment variable must not turn f32 products into bf16 ones */
    if (status == dnnl_success) status = dnnl_primitive_attr_set_fpmath_mode(attr, dnnl_fpmath_mode_strict);
    if (status == dnnl_success) {
        int threads = omp_get_max_threads();
        omp_set_num_threads(1); /* a kernel made for more would split k among them */
        status = choose(kern, attr);
        omp_set_num_threads(threads);
    }
    dnnl_primitive_attr_destroy(attr);
    return status;
}

static kernel *kernel_in(kernel *list, cg_dtype dtype, bool trans_a, bool trans_b, int64_t m, int64_t n,
                         int64_t k) {
    for (; list; list = list->next)
        if (list->m == m && list->n == n && list->k == k && list->dtype == dtype && list->trans_a == trans_a &&
            list->trans_b == trans_b)
            return list;
    return NULL;
}

/* For A and B in f32 or bf16. */
static kernel *kernel_get(cg_dtype dtype, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k,
                          cg_error *error) {
    uint64_t hash = (((uint64_t)m * 2048 + (uint64_t)n) * 2048 + (uint64_t)k) * 8 +
                    (uint64_t)(4 * (dtype == CG_BF16) + 2 * trans_a + trans_b);
    _Atomic(kernel *) *bucket = &buckets[(hash * UINT64_C(0x9E3779B97F4A7C15)) >> 52];
    kernel *kern =
        kernel_in(atomic_load_explicit(bucket, memory_order_acquire), dtype, trans_a, trans_b, m, n, k);
    if (kern) return kern;
    pthread_mutex_lock(&compile_lock);
    kernel *head = atomic_load_explicit(bucket, memory_order_relaxed);
    kern = kernel_in(head, dtype, trans_a, trans_b, m, n, k);
    if (!kern) {
        size_t slots = (size_t)cg_thread_slots();
        kern = calloc(1, sizeof *kern + slots * sizeof(seat));
        dnnl_status_t status = dnnl_out_of_memory;
        if (kern) {
            kern->dtype = dtype, kern->trans_a = trans_a, kern->trans_b = trans_b;
            kern->m = m, kern->n = n, kern->k = k, kern->next = head;
            for (size_t i = 0; i < slots; i++) atomic_flag_clear(&kern->seats[i].busy);
            cg_in_onednn = 1;
            status = compile(kern);
            cg_in_onednn = 0;
        }
        if (status == dnnl_success) {
            atomic_store_explicit(bucket, kern, memory_order_release);
        } else {
            free(kern);
            kern = NULL;
            dnnl_fail(error, "compile a kernel", status, m, n, k);
        }
    }
    pthread_mutex_unlock(&compile_lock);
    return kern;
}

static dnnl_status_t seat_open(const kernel *kern, seat *place) {
    dnnl_status_t status = dnnl_stream_create(&place->stream, engine, dnnl_stream_default_flags);
    if (status == dnnl_success) status = dnnl_memory_create(&place->a, DESC(kern->a), engine, DNNL_MEMORY_NONE);
    if (status == dnnl_success) status = dnnl_memory_create(&place->b, DESC(kern->b), engine, DNNL_MEMORY_NONE);
    if (status == dnnl_success) status = dnnl_memory_create(&place->c, DESC(kern->c), engine, DNNL_MEMORY_NONE);
    if (status == dnnl_success)
        status = dnnl_memory_create(&place->scratch, DESC(kern->scratch), engine, DNNL_MEMORY_NONE);
    return status;
}

static void seat_close(seat *place) {
    if (place->scratch) dnnl_memory_destroy(place->scratch);
    if (place->c) dnnl_memory_destroy(place->c);
    if (place->b) dnnl_memory_destroy(place->b);
    if (place->a) dnnl_memory_destroy(place->a);
    if (place->stream) dnnl_stream_destroy(place->stream);
    place->scratch = place->c = place->b = place->a = NULL;
    place->stream = NULL;
}

static bool kernel_run(kernel *kern, const void *a, const void *b, void *c, void *scratch, cg_error *error) {
    /* Two threads share a slot number when the caller has threads of its own: the later one brings a chair. */
    seat chair = {0};
    int slot = cg_thread_slot();
    seat *place = slot < cg_thread_slots() ? &kern->seats[slot] : &chair;
    if (atomic_flag_test_and_set_explicit(&place->busy, memory_order_acquire)) place = &chair;
    dnnl_status_t status = dnnl_success;
    cg_in_onednn = 1;
    if (!place->scratch) status = seat_open(kern, place);
    cg_in_onednn = 0; /* what computes allocates safely, and a fault in it may be one in our pointers */
    if (status == dnnl_success) status = dnnl_memory_set_data_handle(place->a, (void *)a);
    if (status == dnnl_success) status = dnnl_memory_set_data_handle(place->b, (void *)b);
    if (status == dnnl_success) status = dnnl_memory_set_data_handle(place->c, c);
    if (status == dnnl_success) status = dnnl_memory_set_data_handle(place->scratch, scratch);
    if (status == dnnl_success) {
        dnnl_exec_arg_t args[] = {{DNNL_ARG_SRC, place->a},
                                  {DNNL_ARG_WEIGHTS, place->b},
                                  {DNNL_ARG_DST, place->c},
                                  {DNNL_ARG_SCRATCHPAD, place->scratch}};
        status = dnnl_primitive_execute(kern->primitive, place->stream, 4, args);
    }
    if (place == &chair || status != dnnl_success) seat_close(place);
    atomic_flag_clear_explicit(&place->busy, memory_order_release);
    return status == dnnl_success || dnnl_fail(error, "run a kernel", status, kern->m, kern->n, kern->k);
}

#else

typedef struct kernel {
    const void *primitive; /* NULL: always */
    size_t scratch_bytes;
} kernel;

static kernel *kernel_get(cg_dtype dtype, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k,
                          cg_error *error) {
    static kernel none;
    (void)dtype, (void)trans_a, (void)trans_b, (void)m, (void)n, (void)k, (void)error;
    return &none;
}

static bool kernel_run(kernel *kern, const void *a, const void *b, void *c, void *scratch, cg_error *error) {
    (void)kern, (void)a, (void)b, (void)c, (void)scratch;
    return cg_fail(error, CG_FAILED, "gemm: this build has no kernels of oneDNN");
}

#endif

/* ---- Cutting ---- */

enum {
    TILE = 256,        /* the largest side of a tile */
    TILE_LEAST = 64,   /* below, copying the operands costs more than a busy thread gains */
    TILES_WANTED = 16, /* tiles that a product should have, so that as many threads find work */
    DEPTH_BF16 = 1024,
    DEPTH_F32 = 512,
    DEPTH_F64 = 256,  /* a panel of B is then 32 KiB, the first-level cache */
    PLAIN_WORK = 8192 /* m*n*k up to which the plain kernel is faster than a call of oneDNN */
};

typedef struct plan {
    bool plain;
    int64_t mt, nt, kt;               /* a tile, and a block of k */
    int64_t rows, cols;               /* tiles in each direction */
    size_t a_bytes, b_bytes, c_bytes; /* copies of the operands, and of the product of one block */
    size_t a_wide, b_wide;            /* of bf16: the operands in f32, where they are needed */
    size_t sum_bytes;                 /* of bf16 that C takes: the sum over the blocks */
    size_t slot_bytes;                /* these and oneDNN's scratch */
} plan;

/* Equal parts, in steps of 16 so that only the last one ends inside a vector. */
static int64_t even_part(int64_t whole, int64_t most) {
    return min64(whole, round_up(parts_of(whole, parts_of(whole, most)), 16));
}

/* What an element is added up in, and what it is stored in. */
static cg_dtype sum_dtype(const cg_gemm *g) { return g->dtype == CG_BF16 ? CG_F32 : g->dtype; }
static cg_dtype c_dtype(const cg_gemm *g) { return g->c_is_f32 ? sum_dtype(g) : g->dtype; }

static bool is_empty(const cg_gemm *g) { return g->m <= 0 || g->n <= 0 || g->k <= 0; }

/* Kernels for whole tiles and blocks and for what is left at their ends: the largest scratch, and whether one lacks. */
static bool kernels_get(const cg_gemm *g, const plan *p, cg_dtype dtype, size_t *scratch, bool *lacks_one,
                        cg_error *error) {
    for (int tail = 0; tail < 8; tail++) {
        int64_t m = tail & 1 ? g->m - (p->rows - 1) * p->mt : p->mt;
        int64_t n = tail & 2 ? g->n - (p->cols - 1) * p->nt : p->nt;
        int64_t k = tail & 4 ? g->k - (parts_of(g->k, p->kt) - 1) * p->kt : p->kt;
        kernel *kern = kernel_get(dtype, g->trans_a, g->trans_b, m, n, k, error);
        if (!kern) return false;
        *lacks_one |= !kern->primitive;
        if (kern->scratch_bytes > *scratch) *scratch = kern->scratch_bytes;
    }
    return true;
}

static bool plan_make(const cg_gemm *g, plan *p, cg_error *error) {
    /* Rows of B that are not cut are used in place, without a copy; then thin tiles pay. */
    bool b_stays = !g->trans_b && g->ldb == g->n && g->n <= 2 * TILE_LEAST;
    int64_t mt = TILE, nt = b_stays ? g->n : TILE;
    int64_t mt_least = b_stays ? TILE_LEAST / 2 : TILE_LEAST, nt_least = b_stays ? nt : TILE_LEAST;
    while (parts_of(g->m, mt) * parts_of(g->n, nt) < TILES_WANTED && (mt > mt_least || nt > nt_least)) {
        bool wide = min64(nt, g->n) > min64(mt, g->m);
        if (nt <= nt_least || (mt > mt_least && !wide))
            mt /= 2;
        else
            nt /= 2;
    }
    /* three sides of at most PLAIN_WORK multiply without overflow */
    p->plain = g->dtype == CG_F64 || (g->m <= PLAIN_WORK && g->n <= PLAIN_WORK && g->k <= PLAIN_WORK &&
                                      g->m * g->n * g->k <= PLAIN_WORK);
    p->mt = even_part(g->m, mt);
    p->nt = even_part(g->n, nt);
    p->kt = even_part(g->k, g->dtype == CG_F64 ? DEPTH_F64 : g->dtype == CG_F32 ? DEPTH_F32 : DEPTH_BF16);
    p->rows = parts_of(g->m, p->mt);
    p->cols = parts_of(g->n, p->nt);
    size_t scratch = 0;
    bool widens = p->plain && g->dtype == CG_BF16, lacks_one = false;
    if (!p->plain && !kernels_get(g, p, g->dtype, &scratch, &lacks_one, error)) return false;
    if (g->dtype == CG_BF16 && lacks_one) {
        widens = true;
        if (!kernels_get(g, p, CG_F32, &scratch, &lacks_one, error)) return false;
    }
    /* Room for both kernels: oneDNN may lack the one for a tail. */
    const cg_dtype real = sum_dtype(g);
    const int64_t bytes = (int64_t)cg_dtype_bytes(real);
    p->a_bytes = aligned(round_up(p->mt, plain()->rows) * p->kt * bytes);
    p->b_bytes = aligned((p->plain ? plain_cols(real) : round_up(p->nt, plain_cols(real))) * p->kt * bytes);
    p->c_bytes = p->plain ? 0 : aligned(p->mt * p->nt * bytes);
    p->a_wide = widens ? aligned(p->mt * p->kt * bytes) : 0;
    p->b_wide = widens ? aligned(p->nt * p->kt * bytes) : 0;
    p->sum_bytes = c_dtype(g) == CG_BF16 ? aligned(p->mt * p->nt * bytes) : 0;
    p->slot_bytes =
        p->a_bytes + p->b_bytes + p->c_bytes + p->a_wide + p->b_wide + p->sum_bytes + aligned((int64_t)scratch);
    return true;
}

/* The rows of a block of a matrix as one dense piece, copied only when they are apart. */
static const void *dense(cg_dtype dtype, const void *src, int64_t rows, int64_t width, int64_t ld, void *copy) {
    if (rows == 1 || width == ld) return src;
    const size_t element = cg_dtype_bytes(dtype), bytes = (size_t)width * element;
    for (int64_t i = 0; i < rows; i++)
        memcpy((char *)copy + (size_t)i * bytes, (const char *)src + (size_t)(i * ld) * element, bytes);
    return copy;
}

/* The same in f32, always a copy. */
static const float *widened(const uint16_t *src, int64_t rows, int64_t width, int64_t ld, float *copy) {
    for (int64_t i = 0; i < rows; i++) cg_bf16_widen(width, src + i * ld, copy + i * width);
    return copy;
}

static bool tile_run(const cg_gemm *g, const plan *p, int64_t tile, const void *a, const void *b, void *c,
                     char *slot, cg_error *error) {
    int64_t i0 = tile / p->cols * p->mt, j0 = tile % p->cols * p->nt;
    int64_t m = min64(p->mt, g->m - i0), n = min64(p->nt, g->n - j0);
    int64_t a_row = g->trans_a ? 1 : g->lda, a_k = g->trans_a ? g->lda : 1;
    int64_t b_col = g->trans_b ? g->ldb : 1, b_k = g->trans_b ? 1 : g->ldb;
    int64_t c_at = i0 * g->ldc + j0;
    char *copy_a = slot, *copy_b = copy_a + p->a_bytes, *product = copy_b + p->b_bytes;
    char *wide_a = product + p->c_bytes, *wide_b = wide_a + p->a_wide, *sum = wide_b + p->b_wide,
         *scratch = sum + p->sum_bytes;
    /* where the tile is added up, in f32: C itself, or beside it when C is bf16 */
    const bool rounds = c_dtype(g) == CG_BF16;
    float *c_tile = rounds ? (float *)sum : (float *)c + c_at;
    const int64_t ldc = rounds ? n : g->ldc;
    if (rounds && g->accumulate) widened((const uint16_t *)c + c_at, m, n, g->ldc, c_tile);
    for (int64_t k0 = 0; k0 < g->k; k0 += p->kt) {
        int64_t k = min64(p->kt, g->k - k0);
        int64_t a_at = i0 * a_row + k0 * a_k, b_at = j0 * b_col + k0 * b_k;
        bool add = g->accumulate || k0 > 0;
        if (g->dtype == CG_F64) {
            plain()->f64(m, n, k, (const double *)a + a_at, a_row, a_k, (const double *)b + b_at, b_col, b_k,
                         (double *)c + c_at, g->ldc, add, (double *)copy_a, (double *)copy_b);
            continue;
        }
        const size_t element = cg_dtype_bytes(g->dtype);
        const void *a_block = (const char *)a + (size_t)a_at * element,
                   *b_block = (const char *)b + (size_t)b_at * element;
        /* as they are stored */
        const int64_t a_rows = g->trans_a ? k : m, a_width = g->trans_a ? m : k, b_rows = g->trans_b ? n : k,
                      b_width = g->trans_b ? k : n;
        int64_t lda = g->lda, ldb = g->ldb;
        cg_dtype dtype = g->dtype;
        kernel *kern = NULL;
        if (!p->plain && !(kern = kernel_get(dtype, g->trans_a, g->trans_b, m, n, k, error))) return false;
        if (dtype == CG_BF16 && (!kern || !kern->primitive)) {
            a_block = widened(a_block, a_rows, a_width, lda, (float *)wide_a);
            b_block = widened(b_block, b_rows, b_width, ldb, (float *)wide_b);
            dtype = CG_F32;
            lda = a_width;
            ldb = b_width;
            if (!p->plain && !(kern = kernel_get(dtype, g->trans_a, g->trans_b, m, n, k, error))) return false;
        }
        if (!kern || !kern->primitive) {
            plain()->f32(m, n, k, a_block, g->trans_a ? 1 : lda, g->trans_a ? lda : 1, b_block,
                         g->trans_b ? ldb : 1, g->trans_b ? 1 : ldb, c_tile, ldc, add, (float *)copy_a,
                         (float *)copy_b);
            continue;
        }
        a_block = dense(dtype, a_block, a_rows, a_width, lda, copy_a);
        b_block = dense(dtype, b_block, b_rows, b_width, ldb, copy_b);
        bool in_place = !add && (m == 1 || n == ldc);
        float *out = in_place ? c_tile : (float *)product;
        if (!kernel_run(kern, a_block, b_block, out, scratch, error)) return false;
        if (in_place) continue;
        for (int64_t i = 0; i < m; i++) {
            float *restrict to = c_tile + i * ldc;
            const float *restrict from = out + i * n;
            if (!add)
                memcpy(to, from, (size_t)n * sizeof *to);
            else
                for (int64_t j = 0; j < n; j++) to[j] += from[j];
        }
    }
    for (int64_t i = 0; rounds && i < m; i++)
        cg_bf16_narrow(n, c_tile + i * ldc, (uint16_t *)c + c_at + i * g->ldc);
    return true;
}

/* With no k there is nothing to add up. */
static void clear(const cg_gemm *g, void *c) {
    if (g->accumulate || g->n <= 0) return;
    size_t bytes = cg_dtype_bytes(c_dtype(g));
    for (int64_t i = 0; i < g->m; i++)
        memset((char *)c + (size_t)i * (size_t)g->ldc * bytes, 0, (size_t)g->n * bytes);
}

cg_gemm cg_gemm_dense(cg_dtype dtype, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k) {
    return (cg_gemm){.dtype = dtype,
                     .trans_a = trans_a,
                     .trans_b = trans_b,
                     .m = m,
                     .n = n,
                     .k = k,
                     .lda = trans_a ? m : k,
                     .ldb = trans_b ? k : n,
                     .ldc = n};
}

size_t cg_gemm_serial_workspace(const cg_gemm *gemm) {
    plan p;
    if (is_empty(gemm)) return 0;
    return plan_make(gemm, &p, NULL) ? p.slot_bytes : SIZE_MAX; /* 0 would let a later run write to nowhere */
}

size_t cg_gemm_workspace(const cg_gemm *gemm) {
    size_t bytes = cg_gemm_serial_workspace(gemm);
    return bytes == SIZE_MAX ? SIZE_MAX : (size_t)cg_thread_slots() * bytes;
}

bool cg_gemm_serial(const cg_gemm *gemm, const void *a, const void *b, void *c, void *workspace,
                    cg_error *error) {
    if (is_empty(gemm)) {
        clear(gemm, c);
        return true;
    }
    plan p;
    if (!plan_make(gemm, &p, error)) return false;
    int threads = omp_get_max_threads();
    if (threads > 1) omp_set_num_threads(1); /* outside of a region oneDNN would start one */
    bool fine = true;
    for (int64_t tile = 0; fine && tile < p.rows * p.cols; tile++)
        fine = tile_run(gemm, &p, tile, a, b, c, workspace, error);
    if (threads > 1) omp_set_num_threads(threads);
    return fine;
}

bool cg_gemm_run(const cg_gemm *gemm, const void *a, const void *b, void *c, void *workspace, cg_error *error) {
    plan p;
    if (is_empty(gemm) || cg_threads() == 1) return cg_gemm_serial(gemm, a, b, c, workspace, error);
    if (!plan_make(gemm, &p, error)) return false;
    if (p.rows * p.cols == 1) return cg_gemm_serial(gemm, a, b, c, workspace, error);
    cg_error first = {0};
    atomic_bool fine = true;
    /* always the same number of threads: libgomp ends and starts threads when it changes */
#pragma omp parallel for schedule(dynamic) num_threads(cg_threads())
    for (int64_t tile = 0; tile < p.rows * p.cols; tile++) {
        if (!atomic_load_explicit(&fine, memory_order_relaxed)) continue;
        cg_error here = {0};
        char *slot = (char *)workspace + (size_t)cg_thread_slot() * p.slot_bytes;
        if (tile_run(gemm, &p, tile, a, b, c, slot, &here)) continue;
        atomic_store(&fine, false);
#pragma omp critical(cg_gemm_error)
        if (first.code == CG_OK) first = here;
    }
    return fine || cg_fail(error, first.code, "%s", first.text);
}
