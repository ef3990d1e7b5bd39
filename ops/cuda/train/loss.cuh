/* Losses that are sums over rows (ops/indexer/indexer.h): the divisor, and the sum itself in f64. Rows are cut into parts by their
 * number alone; a block sums a part, and whoever needs the whole adds up the parts in order. */
#ifndef CG_OPS_CUDA_LOSS_CUH
#define CG_OPS_CUDA_LOSS_CUH

#include "ops/cuda/reduce.cuh"

namespace {

#ifdef CG_CUDA_HOST
enum { LOSS_PARTS = 3, LOSS_THREADS = 64 }; /* small tests go through all turns */
#else
enum { LOSS_PARTS = 64, LOSS_THREADS = 256 };
#endif

struct loss_parts {
    int64_t n_real[LOSS_PARTS]; /* rows that are real */
    double sum[LOSS_PARTS];     /* of what the rows add to the loss */
};

/* A block per part. of_row: what each row adds; NULL: only rows are counted. */
template <typename T>
CG_GLOBAL void loss_parts_kernel(const T *of_row, const int32_t *rows, int64_t n_rows, loss_parts *parts) {
    const int64_t part = blockIdx.x, end = cg_cut(n_rows, LOSS_PARTS, part + 1);
    int64_t n = 0;
    double sum = 0;
    for (int64_t t = cg_cut(n_rows, LOSS_PARTS, part) + threadIdx.x; t < end; t += LOSS_THREADS) {
        n += rows[t * CG_ROW_FIELDS + CG_ROW_REAL] != 0;
        if (of_row) sum += (double)cg_up(of_row[t]);
    }
    n = cg_block_sum(n);
    sum = cg_block_sum(sum);
    if (threadIdx.x) return;
    parts->n_real[part] = n;
    parts->sum[part] = sum;
}

/* What the sum over rows is divided by; 1 where that would be 0. */
CG_DEVICE double loss_divisor(const loss_parts *parts, cg_reduction reduction, int64_t n_rows) {
    int64_t n = n_rows;
    if (reduction == CG_REDUCE_MEAN_REAL) {
        n = 0;
        for (int part = 0; part < LOSS_PARTS; part++) n += parts->n_real[part];
    }
    return reduction == CG_REDUCE_SUM || n == 0 ? 1 : (double)n;
}

/* One thread: loss = coeff / divisor * sum over rows. */
template <typename T>
CG_GLOBAL void loss_kernel(const loss_parts *parts, cg_reduction reduction, double coeff, int64_t n_rows,
                           T *loss) {
    double sum = 0;
    for (int part = 0; part < LOSS_PARTS; part++) sum += parts->sum[part];
    loss[0] = cg_down<T>((cg_sum_of<T>)(coeff / loss_divisor(parts, reduction, n_rows) * sum));
}

/* Queue the loss of what each row adds. */
template <typename T>
bool loss_of_rows(const cg_run_args *args, cg_stream *stream, const T *of_row, const int32_t *rows,
                  int64_t n_rows, cg_reduction reduction, double coeff, loss_parts *parts, T *loss) {
    return CG_LAUNCH(loss_parts_kernel<T>, LOSS_PARTS, LOSS_THREADS, 0, stream, of_row, rows, n_rows, parts) &&
           CG_LAUNCH(loss_kernel<T>, 1, 1, 0, stream, parts, reduction, coeff, n_rows, loss);
}

/* Queue the count of rows alone, for loss_divisor. */
inline bool loss_rows(const cg_run_args *args, cg_stream *stream, const int32_t *rows, int64_t n_rows,
                      loss_parts *parts) {
    return CG_LAUNCH(loss_parts_kernel<float>, LOSS_PARTS, LOSS_THREADS, 0, stream, (const float *)nullptr,
                     rows, n_rows, parts);
}

inline size_t loss_workspace(const cg_node *) { return sizeof(loss_parts); }

} // namespace

#endif
