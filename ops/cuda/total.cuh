/* Sums of whole arrays in f64, whatever they hold: in chunks by their length alone, then of the chunks, each in an order
 * that lengths fix. */
#ifndef CG_OPS_CUDA_TOTAL_CUH
#define CG_OPS_CUDA_TOTAL_CUH

#include "ops/cuda/pack.cuh"
#include "ops/cuda/reduce.cuh"

namespace {

constexpr int TOTAL_THREADS = 256;
constexpr int64_t TOTAL_CHUNK = 16384, TOTAL_MOST_CHUNKS = 2048;

/* Elements of a chunk, a multiple of every pack. */
CG_BOTH int64_t total_chunk(int64_t n) {
    const int64_t least = (n / TOTAL_MOST_CHUNKS + 16) / 16 * 16;
    return least > TOTAL_CHUNK ? least : TOTAL_CHUNK;
}
CG_BOTH int64_t total_chunks(int64_t n) { return (n + total_chunk(n) - 1) / total_chunk(n); }

struct of_itself {
    CG_MEMBER double operator()(double x) const { return x; }
};
struct of_square {
    CG_MEMBER double operator()(double x) const { return x * x; }
};

/* parts[c] = sum of f(x) over chunk c; a block takes a chunk at a time. */
template <typename T, typename F>
CG_GLOBAL void total_chunks_kernel(const T *x, int64_t n, double *parts, F f) {
    for (int64_t c = blockIdx.x; c < total_chunks(n); c += gridDim.x) {
        const int64_t end = cg_min(n, (c + 1) * total_chunk(n));
        double sum = 0;
        for (int64_t i = c * total_chunk(n) + threadIdx.x; i < end; i += TOTAL_THREADS)
            sum += f((double)cg_up(x[i]));
        sum = cg_block_sum(sum);
        if (threadIdx.x == 0) parts[c] = sum;
    }
}

template <typename F, typename T>
bool sum_chunks(const cg_run_args *args, cg_stream *stream, const T *x, int64_t n, double *parts) {
    return CG_LAUNCH((total_chunks_kernel<T, F>), cg_blocks(total_chunks(n), 1), TOTAL_THREADS, 0, stream, x, n,
                     parts, F());
}

/* y = the sum of all parts, or its root: one block. */
template <typename T> CG_GLOBAL void total_kernel(const double *parts, int64_t n, T *y, bool root) {
    double sum = 0;
    for (int64_t i = threadIdx.x; i < n; i += TOTAL_THREADS) sum += parts[i];
    sum = cg_block_sum(sum);
    if (threadIdx.x == 0) y[0] = cg_down<T>((cg_sum_of<T>)(root ? cg_sqrt(sum) : sum));
}

template <typename T>
bool sum_parts(const cg_run_args *args, cg_stream *stream, const double *parts, int64_t n, T *y,
               bool root = false) {
    return CG_LAUNCH(total_kernel<T>, 1, TOTAL_THREADS, 0, stream, parts, n, y, root);
}

} // namespace

#endif
