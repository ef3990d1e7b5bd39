/* Rows of a table, and the gradient to it: see ops/embedding.c. A block takes a token at a time. */
#include "ops/cuda/kernel.cuh"

namespace {

enum { THREADS = 128 };
enum { BAD_TOKEN = 1 }; /* place: row, got: token, rows of the table */

void describe(const cg_run_args *, const cg_device_fault *fault, cg_error *error) {
    cg_fail(error, CG_BAD_INPUT, "row %lld of tokens is %lld, expected -1 or a row of the table, 0 to %lld",
            (long long)fault->place, (long long)fault->got[0], (long long)fault->got[1] - 1);
}

/* True when token t is a row of the table; one thread reports what is none and no padding either. */
CG_DEVICE bool is_row(const int32_t *tokens, int64_t t, int64_t n_table, cg_device_fault *fault) {
    const int32_t token = tokens[t];
    if ((token < -1 || token >= n_table) && threadIdx.x == 0) cg_report(fault, BAD_TOKEN, t, token, n_table);
    return token >= 0 && token < n_table;
}

template <typename T>
CG_GLOBAL void embedding_kernel(const T *table, const int32_t *tokens, T *y, int64_t n_table, int64_t n_tokens,
                                int64_t length, cg_device_fault *fault) {
    for (int64_t t = blockIdx.x; t < n_tokens; t += gridDim.x) {
        const bool some = is_row(tokens, t, n_table, fault);
        for (int64_t j = threadIdx.x; j < length; j += THREADS)
            y[t * length + j] = some ? table[tokens[t] * length + j] : cg_down<T>(0);
    }
}

template <typename T> bool embedding(const cg_run_args *args, cg_stream *stream) {
    const int64_t *table = args->in[0].shape.dims, n_tokens = args->in[1].shape.dims[0];
    return CG_LAUNCH(embedding_kernel<T>, cg_blocks(n_tokens, 1), THREADS, 0, stream,
                     (const T *)args->in[0].data, (const int32_t *)args->in[1].data, (T *)args->out[0].data,
                     table[0], n_tokens, table[1], args->fault);
}

template <typename T> CG_GLOBAL void zero_kernel(T *y, int64_t n) { CG_FOR(i, n) y[i] = cg_down<T>(0); }

/* The first occurrence of a token sums its row of the table over all occurrences in order. */
template <typename T>
CG_GLOBAL void embedding_grad_kernel(const int32_t *tokens, const T *dy, T *dtable, int64_t n_table,
                                     int64_t n_tokens, int64_t length, cg_device_fault *fault) {
    for (int64_t t = blockIdx.x; t < n_tokens; t += gridDim.x) {
        if (!is_row(tokens, t, n_table, fault)) continue;
        bool earlier = false;
        for (int64_t s = threadIdx.x; s < t; s += THREADS) earlier |= tokens[s] == tokens[t];
        if (__syncthreads_or(earlier)) continue;
        for (int64_t j = threadIdx.x; j < length; j += THREADS) {
            cg_sum_of<T> sum = 0;
            for (int64_t s = t; s < n_tokens; s++)
                if (tokens[s] == tokens[t]) sum += cg_up(dy[s * length + j]);
            dtable[tokens[t] * length + j] = cg_down<T>(sum);
        }
    }
}

template <typename T> bool embedding_grad(const cg_run_args *args, cg_stream *stream) {
    const int64_t *table = args->out[0].shape.dims, n_tokens = args->in[0].shape.dims[0];
    T *dtable = (T *)args->out[0].data;
    return CG_LAUNCH(zero_kernel<T>, cg_blocks(table[0] * table[1], 256), 256, 0, stream, dtable,
                     table[0] * table[1]) &&
           CG_LAUNCH(embedding_grad_kernel<T>, cg_blocks(n_tokens, 1), THREADS, 0, stream,
                     (const int32_t *)args->in[0].data, (const T *)args->in[1].data, dtable, table[0], n_tokens,
                     table[1], args->fault);
}

} // namespace

extern "C" const cg_cuda_op cg_cuda_embedding = {
    .op = "embedding",
    .variants = {{.name = "plain", .launch = {embedding<float>, embedding<double>}}},
    .describe = describe,
};

extern "C" const cg_cuda_op cg_cuda_embedding_grad = {
    .op = "embedding_grad",
    .variants = {{.name = "plain", .launch = {embedding_grad<float>, embedding_grad<double>}}},
    .describe = describe,
};
