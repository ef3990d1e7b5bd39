/* Ops whose element i of each output depends on element i of each input alone: y_k[i] = f(x_0[i], x_1[i], ...)_k. f is a
 * struct with
 *
 *     template <typename S> CG_MEMBER void operator()(const S *x, S *y) const      x: one of each input, y: one of each output
 *
 * in f32 or f64. Outputs may lie in the place of inputs: a thread reads all of its elements before it writes one.
 *
 * Plain takes an element at a time. Packed takes 16 bytes of each array, tensors start on multiples of 64 bytes: the
 * same numbers, and more of them under way. Why that matters, on an H200: these ops do nothing but move bytes, at 4.3 TB/s
 * at best. A read takes about 0.7 us, so that 4.3 TB/s * 0.7 us = 3 MB must be under way, 23 KB on each of the 132
 * multiprocessors. Their 2048 threads have 8 KB under way per input in steps of 4 bytes (a third of the speed for one
 * input), 32 KB in steps of 16 (all of it). Arithmetic is free: 29 * 10^12 instructions a second for 1.1 * 10^12 numbers
 * read or written are 27 instructions for each, and the longest here (swiglu_grad, 5 numbers an element) takes about 50
 * an element. Expected: 85 to 95 % of 4.3 TB/s from 50 MB on; below, the launch counts (2 us are 9 MB). */
#ifndef CG_OPS_CUDA_ELEMENTWISE_CUH
#define CG_OPS_CUDA_ELEMENTWISE_CUH

#include "ops/cuda/pack.cuh"

namespace {

constexpr int EACH_THREADS = 256;

template <typename T, int IN, int OUT> struct arrays {
    const T *in[IN];
    T *out[OUT];
};

/* Element i. */
template <typename T, int IN, int OUT, typename F>
CG_DEVICE void each_one(const arrays<T, IN, OUT> &a, int64_t i, F f) {
    cg_sum_of<T> x[IN], y[OUT];
    for (int k = 0; k < IN; k++) x[k] = cg_up(a.in[k][i]);
    f(x, y);
    for (int k = 0; k < OUT; k++) a.out[k][i] = cg_down<T>(y[k]);
}

template <typename T, int IN, int OUT, typename F>
CG_DEVICE void each_packed(const arrays<T, IN, OUT> &a, int64_t n, F f) {
    constexpr int N = pack<T>::N;
    CG_FOR(p, n / N) {
        pack<T> in[IN], out[OUT];
        for (int k = 0; k < IN; k++) in[k] = packs(a.in[k])[p];
        for (int j = 0; j < N; j++) {
            cg_sum_of<T> x[IN], y[OUT];
            for (int k = 0; k < IN; k++) x[k] = cg_up(in[k].at[j]);
            f(x, y);
            for (int k = 0; k < OUT; k++) out[k].at[j] = cg_down<T>(y[k]);
        }
        for (int k = 0; k < OUT; k++) packs(a.out[k])[p] = out[k];
    }
    const int64_t done = n / N * N;
    CG_FOR(i, n - done) each_one(a, done + i, f);
}

template <typename T, int IN, int OUT, typename F>
CG_GLOBAL void each_kernel(arrays<T, IN, OUT> a, int64_t n, F f) {
    CG_FOR(i, n) each_one(a, i, f);
}

template <typename T, int IN, int OUT, typename F>
CG_GLOBAL void each_packed_kernel(arrays<T, IN, OUT> a, int64_t n, F f) {
    each_packed(a, n, f);
}

/* The first IN inputs and OUT outputs of a node. */
template <typename T, int IN, int OUT> arrays<T, IN, OUT> arrays_of(const cg_run_args *args) {
    arrays<T, IN, OUT> a;
    for (int k = 0; k < IN; k++) a.in[k] = (const T *)args->in[k].data;
    for (int k = 0; k < OUT; k++) a.out[k] = (T *)args->out[k].data;
    return a;
}

template <typename T> unsigned packed_blocks(int64_t n) { return cg_blocks(n, EACH_THREADS * pack<T>::N); }

template <typename T, int IN, int OUT, typename F>
bool each(const cg_run_args *args, cg_stream *stream, bool packed, F f) {
    const int64_t n = cg_shape_count(&args->out[0].shape);
    const arrays<T, IN, OUT> a = arrays_of<T, IN, OUT>(args);
    return packed ? CG_LAUNCH((each_packed_kernel<T, IN, OUT, F>), packed_blocks<T>(n), EACH_THREADS, 0, stream,
                              a, n, f)
                  : CG_LAUNCH((each_kernel<T, IN, OUT, F>), cg_blocks(n, EACH_THREADS), EACH_THREADS, 0, stream,
                              a, n, f);
}

} // namespace

#endif
