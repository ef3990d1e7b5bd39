/* The orthonormal Hadamard rotation of the last axis: see ops/nn/hadamard.c. */
#include "ops/cuda/reduce.cuh"

namespace {

enum { THREADS = 128 };

struct rows {
    int64_t n, length;
};

rows rows_of(const cg_shape *shape) {
    const int64_t length = shape->dims[shape->n_dims - 1];
    return {cg_shape_count(shape) / length, length};
}

/* ---- plain: a block takes a row at a time, in the workspace ---- */

template <typename T>
CG_GLOBAL void hadamard_kernel(const T *x, T *y, rows r, cg_sum_of<T> factor, cg_sum_of<T> *of_blocks) {
    cg_sum_of<T> *row = of_blocks + blockIdx.x * r.length;
    for (int64_t t = blockIdx.x; t < r.n; t += gridDim.x) {
        for (int64_t j = threadIdx.x; j < r.length; j += THREADS) row[j] = factor * cg_up(x[t * r.length + j]);
        for (int64_t step = 1; step < r.length; step *= 2) {
            __syncthreads();
            for (int64_t i = threadIdx.x; i < r.length / 2; i += THREADS) {
                cg_sum_of<T> *low = row + i / step * 2 * step + i % step, a = *low, b = low[step];
                *low = a + b;
                low[step] = a - b;
            }
        }
        __syncthreads();
        for (int64_t j = threadIdx.x; j < r.length; j += THREADS) y[t * r.length + j] = cg_down<T>(row[j]);
        __syncthreads();
    }
}

size_t plain_workspace(const cg_node *node) {
    const rows r = rows_of(&node->in[0]->shape);
    return cg_blocks(r.n, 1) * (size_t)r.length *
           (node->in[0]->dtype == CG_F64 ? sizeof(double) : sizeof(float));
}

template <typename T> bool hadamard_plain(const cg_run_args *args, cg_stream *stream) {
    const rows r = rows_of(&args->in[0].shape);
    return CG_LAUNCH(hadamard_kernel<T>, cg_blocks(r.n, 1), THREADS, 0, stream, (const T *)args->in[0].data,
                     (T *)args->out[0].data, r, (cg_sum_of<T>)(1 / sqrt((double)r.length)),
                     (cg_sum_of<T> *)args->workspace);
}

/* ---- fast: a warp takes EACH elements per lane, whole rows, in registers ----
 *
 * Element p * 32 + lane is register p of a lane: steps below 32 go between lanes, the others between registers. In and
 * out once: 2 * rows * n * sizeof(T) bytes at 4.3 TB/s are the floor on an H200 (63 us for [4096, 64, 128] in f32).
 * 7 steps of 128 elements are about 100 instructions of a warp, so 25 cycles of a multiprocessor, in which memory brings
 * 475 of the 1024 bytes: memory is what limits it. 90 % of the floor expected, as in a copy. */

constexpr int FAST_WARPS = 8;

template <typename T, int EACH>
CG_GLOBAL void hadamard_fast_kernel(const T *x, T *y, int64_t n, int64_t length, cg_sum_of<T> factor) {
    typedef cg_sum_of<T> S;
    const int64_t lane = threadIdx.x % CG_WARP, warp = (int64_t)blockIdx.x * FAST_WARPS + threadIdx.x / CG_WARP;
    for (int64_t start = warp * (EACH * CG_WARP); start < n;
         start += (int64_t)gridDim.x * FAST_WARPS * (EACH * CG_WARP)) {
        S v[EACH];
#pragma unroll
        for (int p = 0; p < EACH; p++) {
            const int64_t i = start + p * CG_WARP + lane;
            v[p] = i < n ? factor * cg_up(x[i]) : 0;
        }
        for (int step = 1; step < CG_WARP && step < length; step *= 2)
#pragma unroll
            for (int p = 0; p < EACH; p++) {
                const S other = __shfl_xor_sync(0xffffffffu, v[p], step);
                v[p] = lane & step ? other - v[p] : v[p] + other;
            }
#pragma unroll
        for (int step = 1; step < EACH; step *= 2)
            if (step * CG_WARP < length)
#pragma unroll
                for (int p = 0; p < EACH; p++)
                    if (!(p & step)) {
                        const S a = v[p], b = v[p + step];
                        v[p] = a + b;
                        v[p + step] = a - b;
                    }
#pragma unroll
        for (int p = 0; p < EACH; p++) {
            const int64_t i = start + p * CG_WARP + lane;
            if (i < n) y[i] = cg_down<T>(v[p]);
        }
    }
}

bool is_short(const cg_node *node) {
    const cg_shape *shape = &node->in[0]->shape;
    return shape->dims[shape->n_dims - 1] <= 32 * CG_WARP;
}

template <typename T> bool hadamard_fast(const cg_run_args *args, cg_stream *stream) {
    const rows r = rows_of(&args->in[0].shape);
    const int64_t n = r.n * r.length;
    const cg_sum_of<T> factor = (cg_sum_of<T>)(1 / sqrt((double)r.length));
    const T *x = (const T *)args->in[0].data;
    T *y = (T *)args->out[0].data;
    if (r.length <= 4 * CG_WARP)
        return CG_LAUNCH((hadamard_fast_kernel<T, 4>), cg_blocks(n, FAST_WARPS * 4 * CG_WARP),
                         FAST_WARPS * CG_WARP, 0, stream, x, y, n, r.length, factor);
    return CG_LAUNCH((hadamard_fast_kernel<T, 32>), cg_blocks(n, FAST_WARPS * 32 * CG_WARP),
                     FAST_WARPS * CG_WARP, 0, stream, x, y, n, r.length, factor);
}

} // namespace

extern "C" const cg_cuda_op cg_cuda_hadamard = {
    .op = "hadamard",
    .variants = {{.name = "plain",
                  .launch = {hadamard_plain<float>, hadamard_plain<double>, nullptr, hadamard_plain<cg_bf16>},
                  .workspace = plain_workspace},
                 {.name = "fast",
                  .launch = {hadamard_fast<float>, hadamard_fast<double>, nullptr, hadamard_fast<cg_bf16>},
                  .fits = is_short}},
};
