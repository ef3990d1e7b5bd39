/* norm = sqrt of the sum of the squares of all inputs, in f64: see ops/train/global_norm.c.
 *
 * 4 bytes an element in f32: 10^9 parameters take 0.93 ms at 4.3 TB/s. Widening to f64 is what a multiprocessor does 16
 * times a clock: 3.6 * 10^12 a second, above the 1.1 * 10^12 numbers that memory gives. Plain launches once per tensor,
 * 2 us each: 0.4 ms for the 200 of a model. Fast takes MOST_TENSORS per launch, their addresses being arguments, and reads 16
 * bytes at a time: a block per chunk of 64 KiB has 256 * 16 bytes under way, 32 KB on a multiprocessor with 8 blocks,
 * which is enough (elementwise.cuh). Expected: 85 to 95 % of 4.3 TB/s. */
#include "ops/cuda/total.cuh"

namespace {

size_t global_norm_workspace(const cg_node *node) {
    int64_t chunks = 0;
    for (int i = 0; i < node->n_in; i++) chunks += total_chunks(cg_shape_count(&node->in[i]->shape));
    return (size_t)chunks * sizeof(double);
}

template <typename T> bool global_norm(const cg_run_args *args, cg_stream *stream) {
    double *parts = (double *)args->workspace;
    int64_t chunks = 0;
    for (int i = 0; i < args->n_in; i++) {
        const int64_t n = cg_shape_count(&args->in[i].shape);
        if (!sum_chunks<of_square>(args, stream, (const T *)args->in[i].data, n, parts + chunks)) return false;
        chunks += total_chunks(n);
    }
    return sum_parts(args, stream, parts, chunks, (T *)args->out[0].data, true);
}

/* ---- fast ---- */

#ifdef CG_CUDA_HOST
constexpr int MOST_TENSORS = 2; /* small tests launch more than once */
#else
constexpr int MOST_TENSORS = 128; /* 3 KiB of arguments; 4 KiB is what any device takes */
#endif

template <typename T> struct tensors {
    int n;
    const T *x[MOST_TENSORS];
    int64_t count[MOST_TENSORS], first[MOST_TENSORS]; /* first: chunks of those before */
};

template <typename T> CG_GLOBAL void squares_kernel(tensors<T> t, int64_t chunks, double *parts) {
    constexpr int N = pack<T>::N;
    for (int64_t c = blockIdx.x; c < chunks; c += gridDim.x) {
        int k = t.n - 1;
        while (t.first[k] > c) k--;
        const T *x = t.x[k];
        const int64_t chunk = total_chunk(t.count[k]), from = (c - t.first[k]) * chunk,
                      end = cg_min(t.count[k], from + chunk), rest = end / N * N;
        double sum = 0;
        for (int64_t p = from / N + threadIdx.x; p < end / N; p += TOTAL_THREADS) {
            const pack<T> some = packs(x)[p];
            for (int j = 0; j < N; j++) sum += of_square()((double)cg_up(some.at[j]));
        }
        if (threadIdx.x < end - rest) sum += of_square()((double)cg_up(x[rest + threadIdx.x]));
        sum = cg_block_sum(sum);
        if (threadIdx.x == 0) parts[c] = sum;
    }
}

template <typename T> bool global_norm_fast(const cg_run_args *args, cg_stream *stream) {
    double *parts = (double *)args->workspace;
    int64_t before = 0;
    for (int i = 0; i < args->n_in;) {
        tensors<T> some = {};
        int64_t chunks = 0;
        for (; i < args->n_in && some.n < MOST_TENSORS; i++, some.n++) {
            some.x[some.n] = (const T *)args->in[i].data;
            some.count[some.n] = cg_shape_count(&args->in[i].shape);
            some.first[some.n] = chunks;
            chunks += total_chunks(some.count[some.n]);
        }
        if (!CG_LAUNCH(squares_kernel<T>, cg_blocks(chunks, 1), TOTAL_THREADS, 0, stream, some, chunks,
                       parts + before))
            return false;
        before += chunks;
    }
    return sum_parts(args, stream, parts, before, (T *)args->out[0].data, true);
}

} // namespace

extern "C" const cg_cuda_op cg_cuda_global_norm = {
    .op = "global_norm",
    .variants = {{.name = "plain",
                  .launch = {global_norm<float>, global_norm<double>},
                  .workspace = global_norm_workspace},
                 {.name = "fast",
                  .launch = {global_norm_fast<float>, global_norm_fast<double>},
                  .workspace = global_norm_workspace}},
};
