/* From a list of choices per row to a list of rows per choice, on the device: lists [T, K] of 0..C-1 (anything else: none)
 *   -> start [C + 1], reader: numbers start[j] .. start[j+1]-1 of it are the rows t whose list has j, rising, or their places
 * t * K + k in the lists. A row whose list has j twice stands there twice.
 *
 * Rows are cut into parts by T alone. Counts per part and choice, their running sums, then each part puts its places in, a
 * piece of a row at a time. Counters are atomic; where one piece has a choice twice, which shows when a counter is not what
 * it was, the order within the piece is found by looking at all of it. */
#ifndef CG_OPS_CUDA_CSA_INVERT_CUH
#define CG_OPS_CUDA_CSA_INVERT_CUH

#include "ops/cuda/carver.cuh"

namespace {

struct inversion {
    int64_t T, K, C, parts;
    int32_t *counts; /* [parts, C]: how many, then where the next one goes after start[j] */
    int64_t *start;  /* [C + 1] */
    int32_t *reader; /* [T * K] */
    bool places;     /* are in reader, not rows: T * K is no more than an i32 holds */
};

enum { INVERT_MOST_PARTS = 1024 };
#ifdef CG_CUDA_HOST
enum { INVERT_THREADS = 32 }; /* small tests have several pieces */
#else
enum { INVERT_THREADS = 256 };
#endif

/* Parts are long enough that their counts are no more than the lists themselves. */
inline int64_t inversion_parts(int64_t T, int64_t K, int64_t C) {
#ifdef CG_CUDA_HOST
    const int64_t rows = 16; /* small tests have several */
#else
    const int64_t rows = 64;
#endif
    int64_t parts = (T + rows - 1) / rows;
    if (C > 0 && parts > T * K / C) parts = T * K / C;
    return parts < 1 ? 1 : parts > INVERT_MOST_PARTS ? (int64_t)INVERT_MOST_PARTS : parts;
}

inline inversion inversion_in(carver &from, int64_t T, int64_t K, int64_t C) {
    inversion v = {.T = T, .K = K, .C = C, .parts = inversion_parts(T, K, C)};
    v.counts = (int32_t *)from.carve((size_t)(v.parts * C) * sizeof(int32_t));
    v.start = (int64_t *)from.carve((size_t)(C + 1) * sizeof(int64_t));
    v.reader = (int32_t *)from.carve((size_t)(T * K) * sizeof(int32_t));
    return v;
}

CG_GLOBAL void invert_count_kernel(const int32_t *lists, inversion v) {
    int32_t *counts = v.counts + blockIdx.x * v.C;
    for (int64_t j = threadIdx.x; j < v.C; j += INVERT_THREADS) counts[j] = 0;
    __syncthreads();
    const int64_t end = cg_cut(v.T, v.parts, blockIdx.x + 1) * v.K;
    for (int64_t i = cg_cut(v.T, v.parts, blockIdx.x) * v.K + threadIdx.x; i < end; i += INVERT_THREADS) {
        const int64_t j = lists[i];
        if (j >= 0 && j < v.C) atomicAdd(&counts[j], 1);
    }
}

/* Counts of a choice become sums over the parts before; start[j + 1] is how many it has. */
CG_GLOBAL void invert_sum_parts_kernel(inversion v) {
    CG_FOR(j, v.C) {
        int32_t sum = 0;
        for (int64_t p = 0; p < v.parts; p++) {
            const int32_t n = v.counts[p * v.C + j];
            v.counts[p * v.C + j] = sum;
            sum += n;
        }
        v.start[j + 1] = sum;
    }
}

/* One block: running sums of start, a run of choices per thread. */
CG_GLOBAL void invert_sum_choices_kernel(inversion v) {
    CG_SHARED(int64_t[INVERT_THREADS], total);
    const int64_t first = cg_cut(v.C, INVERT_THREADS, threadIdx.x),
                  end = cg_cut(v.C, INVERT_THREADS, threadIdx.x + 1);
    int64_t sum = 0;
    for (int64_t j = first; j < end; j++) sum += v.start[j + 1];
    total[threadIdx.x] = sum;
    __syncthreads();
    sum = 0;
    for (unsigned i = 0; i < threadIdx.x; i++) sum += total[i];
    if (threadIdx.x == 0) v.start[0] = 0;
    for (int64_t j = first; j < end; j++) v.start[j + 1] = sum += v.start[j + 1];
}

CG_GLOBAL void invert_fill_kernel(const int32_t *lists, inversion v) {
    CG_SHARED(int64_t[INVERT_THREADS], choice); /* of a piece, -1: none */
    int32_t *next = v.counts + blockIdx.x * v.C;
    const int64_t end = cg_cut(v.T, v.parts, blockIdx.x + 1);
    for (int64_t t = cg_cut(v.T, v.parts, blockIdx.x); t < end; t++)
        for (int64_t k0 = 0; k0 < v.K; k0 += INVERT_THREADS) {
            const int64_t k = k0 + threadIdx.x;
            int64_t j = k < v.K ? lists[t * v.K + k] : -1;
            if (j >= v.C) j = -1;
            int64_t at = j >= 0 ? next[j] : 0;
            choice[threadIdx.x] = j;
            __syncthreads();
            const bool again = j >= 0 && atomicAdd(&next[j], 1) != at;
            if (__syncthreads_or(again)) {
                for (unsigned i = 0; i < threadIdx.x; i++) at += choice[i] == j;
                __syncthreads();
            }
            if (j >= 0) v.reader[v.start[j] + at] = (int32_t)(v.places ? t * v.K + k : t);
        }
}

inline bool invert(const cg_run_args *args, cg_stream *stream, const int32_t *lists, const inversion &v) {
    const unsigned parts = (unsigned)v.parts;
    return CG_LAUNCH(invert_count_kernel, parts, INVERT_THREADS, 0, stream, lists, v) &&
           CG_LAUNCH(invert_sum_parts_kernel, cg_blocks(v.C, INVERT_THREADS), INVERT_THREADS, 0, stream, v) &&
           CG_LAUNCH(invert_sum_choices_kernel, 1, INVERT_THREADS, 0, stream, v) &&
           CG_LAUNCH(invert_fill_kernel, parts, INVERT_THREADS, 0, stream, lists, v);
}

} // namespace

#endif
