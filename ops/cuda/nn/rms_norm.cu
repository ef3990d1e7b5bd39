/* RMSNorm and its gradient: see ops/nn/rms_norm.c.
 *
 * In f32, 8 bytes an element: 8192 rows of 4096 take 62 us at 4.3 TB/s, 8192 rows of 64 heads of 128 channels 125 us;
 * the gradient moves 12 bytes, 94 and 187 us. Either looks at a row twice; the second look finds it in the first-level
 * cache, 256 KB of a multiprocessor: rows of 16 KB are 80 KB in the 5 blocks that it runs, 64 KB in the gradient's 2.
 * Plain gives each row a block of 128 threads that read 4 bytes: a short row leaves the memory idle while the block waits
 * for its sum. Fast gives rows up to 4 KB to a warp each, which needs no barrier, and reads 16 bytes at a time. In the
 * gradient each thread keeps its columns of dweight in registers over all rows of its team (plain adds to them in
 * memory, row by row): up to 128 registers, so that 512 threads run at once, each with up to 16 reads under way, up to 128
 * KB. The blocks, 512 at most, leave one row each to be added: 512 * 4096 * 4 bytes = 8 MB, 4 us. Expected: 85 % of 4.3
 * TB/s forward, 75 % for the gradient, where the wait of a team for its sums is hidden by few others. */
#include "ops/cuda/team.cuh"

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
CG_GLOBAL void rms_norm_kernel(const T *x, const cg_sum_of<T> *weight, T *y, rows r, cg_sum_of<T> eps) {
    for (int64_t t = blockIdx.x; t < r.n; t += gridDim.x) {
        const T *row = x + t * r.length;
        const cg_sum_of<T> inverse = rms_inverse(row, r.length, eps);
        for (int64_t j = threadIdx.x; j < r.length; j += THREADS) {
            const cg_sum_of<T> w = weight ? weight[j] : (cg_sum_of<T>)1;
            y[t * r.length + j] = cg_down<T>(inverse * cg_up(row[j]) * w);
        }
    }
}

template <typename T> bool rms_norm(const cg_run_args *args, cg_stream *stream) {
    const rows r = rows_of(&args->in[0].shape);
    const double eps = ((const rms_norm_attr *)args->attr)->eps;
    return CG_LAUNCH(rms_norm_kernel<T>, cg_blocks(r.n, 1), THREADS, 0, stream, (const T *)args->in[0].data,
                     (const cg_sum_of<T> *)args->in[1].data, (T *)args->out[0].data, r, (cg_sum_of<T>)eps);
}

/* ---- gradient ---- */

/* Rows are cut into chunks by their number alone. Each block walks over the rows of a chunk and sums its part of
 * dweight in a row of the workspace, a column per thread; the parts are then added in order. */
int64_t chunks_of(int64_t n_rows) {
    const int64_t least = 8, most = 512, chunks = n_rows / least;
    return chunks < 1 ? 1 : chunks > most ? most : chunks;
}

template <typename T>
CG_GLOBAL void rms_norm_grad_kernel(const T *x, const cg_sum_of<T> *weight, const T *dy, T *dx,
                                    cg_sum_of<T> *parts, rows r, int64_t chunks, cg_sum_of<T> eps) {
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
            dot += (weight ? weight[j] : (S)1) * cg_up(dy[at + j]) * cg_up(x[at + j]);
        const S along = inverse * inverse * inverse * cg_block_sum(dot) / (S)r.length;
        for (int64_t j = threadIdx.x; j < r.length; j += THREADS) {
            const S xj = cg_up(x[at + j]), dj = cg_up(dy[at + j]); /* dx may lie in the place of either */
            if (weight) part[j] += dj * (inverse * xj);
            dx[at + j] = cg_down<T>(inverse * (weight ? weight[j] : (S)1) * dj - along * xj);
        }
    }
}

template <typename S>
CG_GLOBAL void add_parts_kernel(const S *parts, S *dweight, int64_t length, int64_t chunks) {
    CG_FOR(j, length) {
        S sum = 0;
        for (int64_t c = 0; c < chunks; c++) sum += parts[c * length + j];
        dweight[j] = sum;
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
    const cg_sum_of<T> *weight = (const cg_sum_of<T> *)args->in[1].data;
    const double eps = ((const rms_norm_attr *)args->attr)->eps;
    cg_sum_of<T> *parts = (cg_sum_of<T> *)args->workspace;
    const bool ok = CG_LAUNCH(rms_norm_grad_kernel<T>, (unsigned)chunks, THREADS, 0, stream,
                              (const T *)args->in[0].data, weight, (const T *)args->in[2].data,
                              (T *)args->out[0].data, parts, r, chunks, (cg_sum_of<T>)eps);
    return ok && (!weight || CG_LAUNCH(add_parts_kernel<cg_sum_of<T>>, cg_blocks(r.length, 256), 256, 0, stream,
                                       parts, (cg_sum_of<T> *)args->out[1].data, r.length, chunks));
}

/* ---- fast: a team per row, 16 bytes at a time ---- */

template <typename T, int WARPS>
CG_GLOBAL void rms_norm_packed_kernel(const T *x, const cg_sum_of<T> *weight, T *y, rows r, cg_sum_of<T> eps) {
    typedef cg_sum_of<T> S;
    typedef team<WARPS> mine;
    constexpr int N = pack<T>::N;
    for (int64_t t = mine::first(); t < r.n; t += mine::all()) {
        const pack<T> *row = packs(x + t * r.length);
        S sum = 0;
        for (int64_t p = mine::lane(); p < r.length / N; p += mine::LANES) {
            const pack<T> some = row[p];
            for (int j = 0; j < N; j++) sum += cg_up(some.at[j]) * cg_up(some.at[j]);
        }
        const S inverse = 1 / cg_sqrt(mine::sum(sum) / (S)r.length + eps);
        for (int64_t p = mine::lane(); p < r.length / N; p += mine::LANES) {
            pack<T> some = row[p];
            pack<S, N> w;
            if (weight) w = packs_of<N>(weight)[p];
            for (int j = 0; j < N; j++)
                some.at[j] = cg_down<T>(inverse * cg_up(some.at[j]) * (weight ? w.at[j] : (S)1));
            packs(y + t * r.length)[p] = some;
        }
    }
}

bool rms_norm_fits(const cg_node *node) {
    return rows_are_packs(node->in[0]->dtype, rows_of(&node->in[0]->shape).length);
}

template <typename T> bool rms_norm_fast(const cg_run_args *args, cg_stream *stream) {
    const rows r = rows_of(&args->in[0].shape);
    const double eps = ((const rms_norm_attr *)args->attr)->eps;
    const bool warp = row_for_a_warp(args->in[0].dtype, r.length);
    return CG_LAUNCH((warp ? rms_norm_packed_kernel<T, 1> : rms_norm_packed_kernel<T, TEAM_WARPS>),
                     cg_blocks(r.n, warp ? TEAM_WARPS : 1), TEAM_THREADS, 0, stream,
                     (const T *)args->in[0].data, (const cg_sum_of<T> *)args->in[1].data,
                     (T *)args->out[0].data, r, (cg_sum_of<T>)eps);
}

/* MOST: packs of a row that a lane may have. parts [blocks, length] gets the block's part of dweight: the columns of each
 * warp's rows are added in shared memory where a warp is a team. Shared: PER_BLOCK rows of sums, none for one team. */
template <typename T, int WARPS, int MOST>
CG_GLOBAL void CG_BOUNDS(TEAM_THREADS, 2)
    rms_norm_grad_packed_kernel(const T *x, const cg_sum_of<T> *weight, const T *dy, T *dx, cg_sum_of<T> *parts,
                                rows r, cg_sum_of<T> eps) {
    typedef cg_sum_of<T> S;
    typedef team<WARPS> mine;
    constexpr int N = pack<T>::N;
    const int64_t n_packs = r.length / N;
    S part[MOST * N];
    for (int k = 0; k < MOST * N; k++) part[k] = 0;
    const int64_t end = cg_cut(r.n, mine::all(), mine::first() + 1);
    for (int64_t t = cg_cut(r.n, mine::all(), mine::first()); t < end; t++) {
        const pack<T> *row = packs(x + t * r.length), *drow = packs(dy + t * r.length);
        S square = 0, dot = 0;
        for (int k = 0; k < MOST; k++) {
            const int64_t p = mine::lane() + k * mine::LANES;
            if (p >= n_packs) break;
            const pack<T> some = row[p], d = drow[p];
            pack<S, N> w;
            if (weight) w = packs_of<N>(weight)[p];
            for (int j = 0; j < N; j++) {
                square += cg_up(some.at[j]) * cg_up(some.at[j]);
                dot += (weight ? w.at[j] : (S)1) * cg_up(d.at[j]) * cg_up(some.at[j]);
            }
        }
        const S inverse = 1 / cg_sqrt(mine::sum(square) / (S)r.length + eps);
        const S along = inverse * inverse * inverse * mine::sum(dot) / (S)r.length;
#pragma unroll
        for (int k = 0; k < MOST; k++) { /* unrolled, so that part[..] are registers */
            const int64_t p = mine::lane() + k * mine::LANES;
            if (p >= n_packs) continue;
            pack<T> some = row[p], d = drow[p]; /* dx may lie in the place of either */
            pack<S, N> w;
            if (weight) w = packs_of<N>(weight)[p];
            for (int j = 0; j < N; j++) {
                const S xj = cg_up(some.at[j]), dj = cg_up(d.at[j]);
                part[k * N + j] += dj * (inverse * xj);
                some.at[j] = cg_down<T>(inverse * (weight ? w.at[j] : (S)1) * dj - along * xj);
            }
            packs(dx + t * r.length)[p] = some;
        }
    }
    if (!weight) return;
    S *mine_to = parts + blockIdx.x * r.length;
    CG_DYNAMIC_SHARED(unsigned char, memory);
    S *sums = (S *)memory; /* [PER_BLOCK, length] */
    if (mine::PER_BLOCK > 1) mine_to = sums + threadIdx.x / mine::LANES * r.length;
#pragma unroll
    for (int k = 0; k < MOST; k++) {
        const int64_t p = mine::lane() + k * mine::LANES;
        for (int j = 0; p < n_packs && j < N; j++) mine_to[p * N + j] = part[k * N + j];
    }
    if (mine::PER_BLOCK == 1) return;
    __syncthreads();
    for (int64_t j = threadIdx.x; j < r.length; j += TEAM_THREADS) {
        S sum = 0;
        for (int i = 0; i < mine::PER_BLOCK; i++) sum += sums[i * r.length + j];
        parts[blockIdx.x * r.length + j] = sum;
    }
}

/* dweight: a warp of columns in a block, whose warps share the parts. */
template <typename S>
CG_GLOBAL void add_many_parts_kernel(const S *parts, S *dweight, int64_t length, int64_t n_parts) {
    CG_SHARED(S[TEAM_WARPS][CG_WARP], sums);
    const int lane = (int)threadIdx.x % CG_WARP, warp = (int)threadIdx.x / CG_WARP;
    const int64_t j = (int64_t)blockIdx.x * CG_WARP + lane;
    S sum = 0;
    if (j < length)
        for (int64_t c = warp; c < n_parts; c += TEAM_WARPS) sum += parts[c * length + j];
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp || j >= length) return;
    for (int i = 1; i < TEAM_WARPS; i++) sum += sums[i][lane];
    dweight[j] = sum;
}

constexpr int64_t LONGEST = 8 * TEAM_THREADS * 16; /* bytes of a row: 8 packs for each thread of a block */

bool rms_norm_grad_fits(const cg_node *node) {
    const cg_dtype dtype = node->in[0]->dtype;
    const int64_t length = rows_of(&node->in[0]->shape).length;
    return rows_are_packs(dtype, length) && length * (int64_t)cg_dtype_bytes(dtype) <= LONGEST;
}

/* Blocks by the number of rows alone, eight rows for a team at least. */
int64_t grad_blocks(cg_dtype dtype, rows r) {
    const int64_t rows_of_block = row_for_a_warp(dtype, r.length) ? 8 * TEAM_WARPS : 8, most = 512;
    const int64_t blocks = r.n / rows_of_block;
    return blocks < 1 ? 1 : blocks > most ? most : blocks;
}

size_t rms_norm_grad_fast_workspace(const cg_node *node) {
    const cg_dtype dtype = node->in[0]->dtype;
    const rows r = rows_of(&node->in[0]->shape);
    const size_t sum = dtype == CG_F64 ? sizeof(double) : sizeof(float);
    return node->in[1] ? cg_piece((size_t)(grad_blocks(dtype, r) * r.length) * sum) : 0;
}

template <typename T> bool rms_norm_grad_fast(const cg_run_args *args, cg_stream *stream) {
    typedef cg_sum_of<T> S;
    const rows r = rows_of(&args->in[0].shape);
    const double eps = ((const rms_norm_attr *)args->attr)->eps;
    const cg_sum_of<T> *weight = (const cg_sum_of<T> *)args->in[1].data;
    const bool warp = row_for_a_warp(args->in[0].dtype, r.length);
    const bool short_row = r.length * (int64_t)sizeof(T) <= 1024;
    const int64_t blocks = grad_blocks(args->in[0].dtype, r);
    return CG_LAUNCH((short_row ? rms_norm_grad_packed_kernel<T, 1, 2>
                      : warp    ? rms_norm_grad_packed_kernel<T, 1, 8>
                                : rms_norm_grad_packed_kernel<T, TEAM_WARPS, 8>),
                     (unsigned)blocks, TEAM_THREADS,
                     weight && warp ? TEAM_WARPS * (size_t)r.length * sizeof(S) : 0, stream,
                     (const T *)args->in[0].data, weight, (const T *)args->in[2].data, (T *)args->out[0].data,
                     (S *)args->workspace, r, (S)eps) &&
           (!weight ||
            CG_LAUNCH(add_many_parts_kernel<S>, (unsigned)((r.length + CG_WARP - 1) / CG_WARP), TEAM_THREADS, 0,
                      stream, (S *)args->workspace, (cg_sum_of<T> *)args->out[1].data, r.length, blocks));
}

} // namespace

extern "C" const cg_cuda_op cg_cuda_rms_norm = {
    .op = "rms_norm",
    .variants = {{.name = "plain", .launch = {rms_norm<float>, rms_norm<double>, nullptr, rms_norm<cg_bf16>}},
                 {.name = "fast",
                  .launch = {rms_norm_fast<float>, rms_norm_fast<double>, nullptr, rms_norm_fast<cg_bf16>},
                  .fits = rms_norm_fits}},
};

extern "C" const cg_cuda_op cg_cuda_rms_norm_grad = {
    .op = "rms_norm_grad",
    .variants = {{.name = "plain",
                  .launch = {rms_norm_grad<float>, rms_norm_grad<double>, nullptr, rms_norm_grad<cg_bf16>},
                  .workspace = rms_norm_grad_workspace},
                 {.name = "fast",
                  .launch = {rms_norm_grad_fast<float>, rms_norm_grad_fast<double>, nullptr,
                             rms_norm_grad_fast<cg_bf16>},
                  .workspace = rms_norm_grad_fast_workspace,
                  .fits = rms_norm_grad_fits}},
};
