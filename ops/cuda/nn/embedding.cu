/* Rows of a table, and the gradient to it: see ops/nn/embedding.c.
 *
 * 8192 tokens of 4096 channels in f32 are 134 MB read and 134 MB written, 62 us at 4.3 TB/s; the gradient reads 134 MB and
 * writes the whole table, 2.1 GB for 129280 rows: 0.52 ms, 0.49 of them for zeros. Plain takes a token per block; for the
 * gradient, a block looks for its token among all before it, and the first one sums all of its rows alone: T^2 / 2
 * looks, and a common token of a small vocabulary keeps one block busy for as long as all others together.
 *
 * Fast sorts tokens with their places (T * 8 bytes): each chunk by counting, then each token's place among all by looking
 * itself up in all chunks, 10 looks each: 8192 * 8 * 10 for 8192 tokens, a few us. The sorted list is cut into pieces of 32,
 * a block each, whatever their tokens are; runs of a token that cross a border leave sums at it, which the block of the
 * piece where the run starts adds up. The order of sums depends on the tokens alone. Expected: 85 % of 4.3 TB/s
 * forward; the gradient is what writing zeros takes. What limits next: a dense gradient of a table that few rows touch. */
#include "ops/cuda/team.cuh"

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

/* ---- fast ---- */

bool embedding_fits(const cg_node *node) {
    return rows_are_packs(node->out[0]->dtype, node->out[0]->shape.dims[1]);
}

template <typename T, int WARPS>
CG_GLOBAL void embedding_packed_kernel(const T *table, const int32_t *tokens, T *y, int64_t n_table,
                                       int64_t n_tokens, int64_t n_packs, cg_device_fault *fault) {
    typedef team<WARPS> mine;
    for (int64_t t = mine::first(); t < n_tokens; t += mine::all()) {
        const int64_t token = tokens[t];
        const bool some = token >= 0 && token < n_table;
        if (!some && token != -1 && mine::lane() == 0) cg_report(fault, BAD_TOKEN, t, token, n_table);
        for (int64_t p = mine::lane(); p < n_packs; p += mine::LANES)
            packs(y)[t * n_packs + p] = some ? packs(table)[token * n_packs + p] : pack<T>{};
    }
}

template <typename T> bool embedding_fast(const cg_run_args *args, cg_stream *stream) {
    const int64_t *table = args->in[0].shape.dims, n_tokens = args->in[1].shape.dims[0];
    const bool warp = row_for_a_warp(args->in[0].dtype, table[1]);
    return CG_LAUNCH((warp ? embedding_packed_kernel<T, 1> : embedding_packed_kernel<T, TEAM_WARPS>),
                     cg_blocks(n_tokens, warp ? TEAM_WARPS : 1), TEAM_THREADS, 0, stream,
                     (const T *)args->in[0].data, (const int32_t *)args->in[1].data, (T *)args->out[0].data,
                     table[0], n_tokens, table[1] / pack<T>::N, args->fault);
}

template <typename T> CG_GLOBAL void zero_packs_kernel(pack<T> *y, int64_t n) { CG_FOR(p, n) y[p] = pack<T>{}; }

/* A token and where it stands, to be sorted by both; what is no row of the table comes last. */
#ifdef CG_CUDA_HOST
constexpr int CHUNK = 64, PIECE = 8; /* small tests have several */
#else
constexpr int CHUNK = 1024, PIECE = 32;
#endif
constexpr int64_t NO_TOKEN = INT32_MAX;

CG_DEVICE int64_t token_of(int64_t key) { return key >> 32; }
CG_DEVICE int64_t place_of(int64_t key) { return key & 0xffffffff; }

/* Sorted within each chunk; a block takes a chunk at a time. */
CG_GLOBAL void sort_chunks_kernel(const int32_t *tokens, int64_t *sorted, int64_t n_table, int64_t n_tokens,
                                  cg_device_fault *fault) {
    CG_SHARED(int64_t[CHUNK], key);
    for (int64_t first = (int64_t)blockIdx.x * CHUNK; first < n_tokens; first += (int64_t)gridDim.x * CHUNK) {
        const int n = (int)cg_min((int64_t)CHUNK, n_tokens - first);
        __syncthreads(); /* the chunk before is done */
        for (int i = (int)threadIdx.x; i < n; i += TEAM_THREADS) {
            const int64_t token = tokens[first + i];
            const bool some = token >= 0 && token < n_table;
            if (!some && token != -1) cg_report(fault, BAD_TOKEN, first + i, token, n_table);
            key[i] = (some ? token : NO_TOKEN) << 32 | (first + i);
        }
        __syncthreads();
        for (int i = (int)threadIdx.x; i < n; i += TEAM_THREADS) {
            int smaller = 0;
            for (int k = 0; k < n; k++) smaller += key[k] < key[i];
            sorted[first + smaller] = key[i];
        }
    }
}

/* The chunks merged: no two keys are equal, so a key's place is how many are smaller. */
CG_GLOBAL void merge_chunks_kernel(const int64_t *sorted, int64_t *order, int64_t n) {
    CG_FOR(i, n) {
        const int64_t key = sorted[i];
        int64_t smaller = i % CHUNK;
        for (int64_t first = 0; first < n; first += CHUNK) {
            if (first == i - i % CHUNK) continue;
            int64_t low = first, high = cg_min(first + CHUNK, n);
            while (low < high) {
                const int64_t middle = (low + high) / 2;
                if (sorted[middle] < key)
                    low = middle + 1;
                else
                    high = middle;
            }
            smaller += low - first;
        }
        order[smaller] = key;
    }
}

/* What a run of one token that crosses borders of pieces leaves there: head[p] of the one that comes into piece p,
 * tail[p] of the one that starts in it and goes on. */
template <typename T> struct token_runs {
    const int64_t *order;
    cg_sum_of<T> *head, *tail; /* [pieces, length] */
    int64_t n_tokens, n_packs;
};

template <typename T> CG_GLOBAL void sum_pieces_kernel(token_runs<T> r, const T *dy, T *dtable) {
    typedef cg_sum_of<T> S;
    constexpr int N = pack<T>::N;
    for (int64_t first = (int64_t)blockIdx.x * PIECE; first < r.n_tokens; first += (int64_t)gridDim.x * PIECE) {
        const int64_t end = cg_min(first + PIECE, r.n_tokens);
        for (int64_t p = threadIdx.x; p < r.n_packs; p += TEAM_THREADS) {
            bool comes_in = first > 0 && token_of(r.order[first - 1]) == token_of(r.order[first]);
            pack<S, N> sum = {};
            for (int64_t e = first; e < end; e++) {
                const int64_t token = token_of(r.order[e]);
                if (token == NO_TOKEN) break;
                const pack<T> some = packs(dy)[place_of(r.order[e]) * r.n_packs + p];
                for (int j = 0; j < N; j++) sum.at[j] += cg_up(some.at[j]);
                const bool goes_on = e + 1 < r.n_tokens && token_of(r.order[e + 1]) == token;
                if (goes_on && e + 1 < end) continue;
                const int64_t border = first / PIECE * r.n_packs + p;
                if (comes_in) {
                    packs_of<N>(r.head)[border] = sum;
                } else if (goes_on) {
                    packs_of<N>(r.tail)[border] = sum;
                } else {
                    pack<T> row;
                    for (int j = 0; j < N; j++) row.at[j] = cg_down<T>(sum.at[j]);
                    packs(dtable)[token * r.n_packs + p] = row;
                }
                comes_in = false;
                sum = {};
            }
        }
    }
}

/* Runs that cross borders, by the block of the piece where each starts. */
template <typename T> CG_GLOBAL void sum_borders_kernel(token_runs<T> r, T *dtable) {
    constexpr int N = pack<T>::N;
    typedef cg_sum_of<T> S;
    for (int64_t first = (int64_t)blockIdx.x * PIECE; first + PIECE < r.n_tokens;
         first += (int64_t)gridDim.x * PIECE) {
        const int64_t token = token_of(r.order[first + PIECE - 1]);
        const bool starts_before = first > 0 && token_of(r.order[first - 1]) == token;
        if (token == NO_TOKEN || starts_before || token_of(r.order[first + PIECE]) != token) continue;
        for (int64_t p = threadIdx.x; p < r.n_packs; p += TEAM_THREADS) {
            pack<S, N> sum = packs_of<N>(r.tail)[first / PIECE * r.n_packs + p];
            for (int64_t next = first + PIECE; next < r.n_tokens && token_of(r.order[next]) == token;
                 next += PIECE) {
                const pack<S, N> more = packs_of<N>(r.head)[next / PIECE * r.n_packs + p];
                for (int j = 0; j < N; j++) sum.at[j] += more.at[j];
            }
            pack<T> row;
            for (int j = 0; j < N; j++) row.at[j] = cg_down<T>(sum.at[j]);
            packs(dtable)[token * r.n_packs + p] = row;
        }
    }
}

/* Bytes of a list of keys, and of the sums at borders. */
size_t keys_bytes(int64_t n_tokens) { return cg_piece((size_t)n_tokens * sizeof(int64_t)); }
size_t borders_bytes(int64_t n_tokens, int64_t length, size_t sum) {
    return cg_piece((size_t)((n_tokens + PIECE - 1) / PIECE * length) * sum);
}

size_t embedding_grad_workspace(const cg_node *node) {
    const int64_t n_tokens = node->in[0]->shape.dims[0], length = node->out[0]->shape.dims[1];
    const size_t sum = node->out[0]->dtype == CG_F64 ? sizeof(double) : sizeof(float);
    return 2 * keys_bytes(n_tokens) + 2 * borders_bytes(n_tokens, length, sum);
}

template <typename T> bool embedding_grad_fast(const cg_run_args *args, cg_stream *stream) {
    typedef cg_sum_of<T> S;
    const int64_t *table = args->out[0].shape.dims, n_tokens = args->in[0].shape.dims[0];
    const int64_t n_packs = table[1] / pack<T>::N;
    char *workspace = (char *)args->workspace, *borders = workspace + 2 * keys_bytes(n_tokens);
    int64_t *sorted = (int64_t *)workspace, *order = (int64_t *)(workspace + keys_bytes(n_tokens));
    T *dtable = (T *)args->out[0].data;
    const token_runs<T> runs = {
        order, (S *)borders, (S *)(borders + borders_bytes(n_tokens, table[1], sizeof(S))), n_tokens, n_packs};
    return CG_LAUNCH(zero_packs_kernel<T>, cg_blocks(table[0] * n_packs, 256), 256, 0, stream,
                     (pack<T> *)dtable, table[0] * n_packs) &&
           CG_LAUNCH(sort_chunks_kernel, cg_blocks(n_tokens, CHUNK), TEAM_THREADS, 0, stream,
                     (const int32_t *)args->in[0].data, sorted, table[0], n_tokens, args->fault) &&
           CG_LAUNCH(merge_chunks_kernel, cg_blocks(n_tokens, 256), 256, 0, stream, sorted, order, n_tokens) &&
           CG_LAUNCH(sum_pieces_kernel<T>, cg_blocks(n_tokens, PIECE), TEAM_THREADS, 0, stream, runs,
                     (const T *)args->in[1].data, dtable) &&
           CG_LAUNCH(sum_borders_kernel<T>, cg_blocks(n_tokens, PIECE), TEAM_THREADS, 0, stream, runs, dtable);
}

} // namespace

extern "C" const cg_cuda_op cg_cuda_embedding = {
    .op = "embedding",
    .variants = {{.name = "plain",
                  .launch = {embedding<float>, embedding<double>, nullptr, embedding<cg_bf16>}},
                 {.name = "fast",
                  .launch = {embedding_fast<float>, embedding_fast<double>, nullptr, embedding_fast<cg_bf16>},
                  .fits = embedding_fits}},
    .describe = describe,
};

extern "C" const cg_cuda_op cg_cuda_embedding_grad = {
    .op = "embedding_grad",
    .variants = {{.name = "plain",
                  .launch = {embedding_grad<float>, embedding_grad<double>, nullptr, embedding_grad<cg_bf16>}},
                 {.name = "fast",
                  .launch = {embedding_grad_fast<float>, embedding_grad_fast<double>, nullptr,
                             embedding_grad_fast<cg_bf16>},
                  .workspace = embedding_grad_workspace,
                  .fits = embedding_fits}},
    .describe = describe,
};
