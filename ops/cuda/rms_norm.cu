/* RMSNorm and its gradient: see ops/rms_norm.c. A block takes a row at a time. */
#include "ops/cuda/reduce.cuh"

namespace {

enum { THREADS = 128 };

struct rows {
    int64_t n, length;
};

rows rows_of(const cg_shape *shape) {
    rows r = {1, shape->dims[shape->n_dims - 1]};
    for (int i = 0; i + 1 < shape->n_dims; i++) r.n *= shape->dims[i];
    return r;
}

/* 1 / sqrt(mean(x^2) + eps) of a row, in all threads. */
template <typename T, typename S = cg_sum_of<T>> CG_DEVICE S rms_inverse(const T *x, int64_t length, S eps) {
    S sum = 0;
    for (int64_t j = threadIdx.x; j < length; j += THREADS) sum += cg_up(x[j]) * cg_up(x[j]);
    return 1 / cg_sqrt(cg_block_sum(sum) / (S)length + eps);
}

template <typename T>
CG_GLOBAL void rms_norm_kernel(const T *x, const T *weight, T *y, rows r, cg_sum_of<T> eps) {
    for (int64_t t = blockIdx.x; t < r.n; t += gridDim.x) {
        const T *row = x + t * r.length;
        const cg_sum_of<T> inverse = rms_inverse(row, r.length, eps);
        for (int64_t j = threadIdx.x; j < r.length; j += THREADS) {
            const cg_sum_of<T> w = weight ? cg_up(weight[j]) : (cg_sum_of<T>)1;
            y[t * r.length + j] = cg_down<T>(inverse * cg_up(row[j]) * w);
        }
    }
}

template <typename T> bool rms_norm(const cg_run_args *args, cg_stream *stream) {
    const rows r = rows_of(&args->in[0].shape);
    const double eps = ((const rms_norm_attr *)args->attr)->eps;
    return CG_LAUNCH(rms_norm_kernel<T>, cg_blocks(r.n, 1), THREADS, 0, stream, (const T *)args->in[0].data,
                     (const T *)args->in[1].data, (T *)args->out[0].data, r, (cg_sum_of<T>)eps);
}

/* ---- gradient ---- */

/* Rows are cut into chunks by their number alone. Each block walks over the rows of a chunk and sums its part of
 * dweight in a row of the workspace, a column per thread; the parts are then added in order. */
int64_t chunks_of(int64_t n_rows) {
    const int64_t least = 8, most = 512, chunks = n_rows / least;
    return chunks < 1 ? 1 : chunks > most ? most : chunks;
}

template <typename T>
CG_GLOBAL void rms_norm_grad_kernel(const T *x, const T *weight, const T *dy, T *dx, cg_sum_of<T> *parts,
                                    rows r, int64_t chunks, cg_sum_of<T> eps) {
    typedef cg_sum_of<T> S;
    const int64_t chunk = blockIdx.x;
    S *part = parts + chunk * r.length;
    for (int64_t j = threadIdx.x; weight && j < r.length; j += THREADS) part[j] = 0;
    const int64_t end = cg_cut(r.n, chunks, chunk + 1);
    for (int64_t t = cg_cut(r.n, chunks, chunk); t < end; t++) {
        const int64_t at = t * r.length;
        const S inverse = rms_inverse(x + at, r.length, eps);
        S dot = 0;
        for (int64_t j = threadIdx.x; j < r.length; j += THREADS)
            dot += (weight ? cg_up(weight[j]) : (S)1) * cg_up(dy[at + j]) * cg_up(x[at + j]);
        const S along = inverse * inverse * inverse * cg_block_sum(dot) / (S)r.length;
        for (int64_t j = threadIdx.x; j < r.length; j += THREADS) {
            const S xj = cg_up(x[at + j]), dj = cg_up(dy[at + j]); /* dx may lie in the place of either */
            if (weight) part[j] += dj * (inverse * xj);
            dx[at + j] = cg_down<T>(inverse * (weight ? cg_up(weight[j]) : (S)1) * dj - along * xj);
        }
    }
}

template <typename T>
CG_GLOBAL void add_parts_kernel(const cg_sum_of<T> *parts, T *dweight, int64_t length, int64_t chunks) {
    CG_FOR(j, length) {
        cg_sum_of<T> sum = 0;
        for (int64_t c = 0; c < chunks; c++) sum += parts[c * length + j];
        dweight[j] = cg_down<T>(sum);
    }
}

size_t rms_norm_grad_workspace(const cg_node *node) {
    const rows r = rows_of(&node->in[0]->shape);
    const size_t sum = node->in[0]->dtype == CG_F64 ? sizeof(double) : sizeof(float);
    return node->in[1] ? cg_piece((size_t)(chunks_of(r.n) * r.length) * sum) : 0;
}

template <typename T> bool rms_norm_grad(const cg_run_args *args, cg_stream *stream) {
    const rows r = rows_of(&args->in[0].shape);
    const int64_t chunks = chunks_of(r.n);
    const T *weight = (const T *)args->in[1].data;
    const double eps = ((const rms_norm_attr *)args->attr)->eps;
    cg_sum_of<T> *parts = (cg_sum_of<T> *)args->workspace;
    const bool ok = CG_LAUNCH(rms_norm_grad_kernel<T>, (unsigned)chunks, THREADS, 0, stream,
                              (const T *)args->in[0].data, weight, (const T *)args->in[2].data,
                              (T *)args->out[0].data, parts, r, chunks, (cg_sum_of<T>)eps);
    return ok && (!weight || CG_LAUNCH(add_parts_kernel<T>, cg_blocks(r.length, 256), 256, 0, stream, parts,
                                       (T *)args->out[1].data, r.length, chunks));
}

} // namespace

extern "C" const cg_cuda_op cg_cuda_rms_norm = {
    .op = "rms_norm",
    .variants = {{.name = "plain", .launch = {rms_norm<float>, rms_norm<double>}}},
};

extern "C" const cg_cuda_op cg_cuda_rms_norm_grad = {
    .op = "rms_norm_grad",
    .variants = {{.name = "plain",
                  .launch = {rms_norm_grad<float>, rms_norm_grad<double>},
                  .workspace = rms_norm_grad_workspace}},
};
