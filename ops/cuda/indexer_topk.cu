/* Which compressed rows each token attends to: see ops/indexer_topk.c. */
#include "ops/cuda/index_core.cuh"
#include "ops/cuda/index_select.cuh"
#include "ops/cuda/index_tile.cuh"

namespace {

enum { Q, W, KEYS, ROWS };
enum { BAD_ROW = 1, BAD_SCORE };

struct sizes {
    int64_t T, Hi, Di, C, K;
};

sizes sizes_of(const cg_shape *q, const cg_shape *keys, const cg_shape *topk) {
    return {q->dims[0], q->dims[1], q->dims[2], keys->dims[0], topk->dims[1]};
}

void describe(const cg_run_args *args, const cg_device_fault *fault, cg_error *error) {
    const long long C = args->in[KEYS].shape.dims[0];
    if (fault->what == BAD_ROW)
        describe_seen(fault, error);
    else
        cg_fail(error, CG_BAD_INPUT, "row %lld: the score of compressed row %lld is NaN",
                (long long)fault->place / C, (long long)fault->place % C);
}

/* ---- plain: a block takes a row at a time and holds its scores in the workspace ---- */

enum { PLAIN_THREADS = 128, PLAIN_BLOCKS = 256 };

int64_t plain_blocks(int64_t n_rows) {
    const int64_t blocks = cg_blocks(n_rows, 1);
    return blocks < PLAIN_BLOCKS ? blocks : (int64_t)PLAIN_BLOCKS;
}

template <typename T>
CG_GLOBAL void plain_kernel(const T *q, const T *w, const T *k, const int32_t *rows, int32_t *topk, sizes z,
                            cg_sum_of<T> *scores_of_blocks, cg_device_fault *fault) {
    cg_sum_of<T> *scores = scores_of_blocks + blockIdx.x * z.C;
    for (int64_t t = blockIdx.x; t < z.T; t += gridDim.x) {
        const seen_rows seen = seen_of(rows, t, z.C, BAD_ROW, threadIdx.x == 0 ? fault : nullptr);
        for (int64_t j = threadIdx.x; j < seen.n; j += PLAIN_THREADS)
            scores[j] = index_score(q + t * z.Hi * z.Di, w + t * z.Hi, k + (seen.first + j) * z.Di, z.Hi, z.Di);
        __syncthreads();
        const int64_t nan = select_by_rank(scores, seen.n, z.K, seen.first, topk + t * z.K);
        if (nan >= 0 && threadIdx.x == 0) cg_report(fault, BAD_SCORE, t * z.C + seen.first + nan);
        __syncthreads();
    }
}

size_t plain_workspace(const cg_node *node) {
    const size_t real = node->in[Q]->dtype == CG_F64 ? sizeof(double) : sizeof(float);
    return (size_t)(plain_blocks(cg_dim(node->in[Q], 0)) * cg_dim(node->in[KEYS], 0)) * real;
}

template <typename T> bool plain(const cg_run_args *args, cg_stream *stream) {
    const cg_tensor *in = args->in;
    const sizes z = sizes_of(&in[Q].shape, &in[KEYS].shape, &args->out[0].shape);
    return CG_LAUNCH(plain_kernel<T>, plain_blocks(z.T), PLAIN_THREADS, 0, stream, (const T *)in[Q].data,
                     (const T *)in[W].data, (const T *)in[KEYS].data, (const int32_t *)in[ROWS].data,
                     (int32_t *)args->out[0].data, z, (cg_sum_of<T> *)args->workspace, args->fault);
}

/* ---- fast: scores and choice in one, nothing of them in memory ----
 *
 * A block takes 8 rows, a warp each, the last rows first because they see most. Keys that any of the 8 rows sees come by
 * in tiles in shared memory; each warp scores them for its row and keeps the best (index_select.cuh). */

constexpr int FAST_ROWS = 8, FAST_THREADS = FAST_ROWS * CG_WARP;

/* What a block's rows see together: keys first .. end - 1. By the whole block; `seen` is of this warp's row. */
CG_DEVICE void seen_by_block(seen_rows seen, int64_t *first, int64_t *end) {
    CG_SHARED(int64_t[FAST_ROWS], firsts);
    CG_SHARED(int64_t[FAST_ROWS], ends);
    if (threadIdx.x % CG_WARP == 0) {
        firsts[threadIdx.x / CG_WARP] = seen.first;
        ends[threadIdx.x / CG_WARP] = seen.first + seen.n;
    }
    __syncthreads();
    *first = INT64_MAX;
    *end = 0;
    for (int i = 0; i < FAST_ROWS; i++) {
        if (firsts[i] == ends[i]) continue;
        *first = cg_min(*first, firsts[i]);
        *end = cg_max(*end, ends[i]);
    }
    if (*end == 0) *first = 0;
}

/* A warp's row, what it sees, and what it keeps. */
struct fast_row {
    int64_t t;
    bool is_row;
    seen_rows seen;
    selector best;

    CG_MEMBER fast_row(const int32_t *rows, const sizes &z, uint64_t *shared, cg_device_fault *fault)
        : t(((int64_t)gridDim.x - 1 - blockIdx.x) * FAST_ROWS + threadIdx.x / CG_WARP),
          is_row(t < z.T), seen{0, 0}, best(shared + threadIdx.x / CG_WARP * select_room(z.K), z.K) {
        if (is_row) seen = seen_of(rows, t, z.C, BAD_ROW, best.lane == 0 ? fault : nullptr);
    }

    CG_MEMBER bool sees_any(int64_t first, int64_t n) const {
        return first < seen.first + seen.n && first + n > seen.first;
    }

    CG_MEMBER void push(float score, int64_t key) {
        best.push(key >= seen.first && key < seen.first + seen.n, score, (int32_t)key);
    }

    CG_MEMBER void finish(int32_t *topk, const sizes &z, cg_device_fault *fault) {
        if (!is_row) return;
        best.finish(topk + t * z.K);
        if (best.nan != INT32_MAX && best.lane == 0) cg_report(fault, BAD_SCORE, t * z.C + best.nan);
    }
};

size_t kept_bytes(int64_t K) { return (size_t)(FAST_ROWS * select_room(K)) * sizeof(uint64_t); }

/* ---- fast, bf16: tensor cores ---- */

constexpr int TENSOR_KEYS = 64, TENSOR_STAGES = 3;

template <int DI> constexpr size_t tensor_stage = tile<DI>::PITCH *TENSOR_KEYS;

/* Keys from `first` on into a tile; behind the last one there are zeros. */
template <int DI>
CG_DEVICE void tensor_copy(tile<DI> to, const row_copy<DI> &copy, int64_t first, int64_t end) {
    constexpr int COPIES = TENSOR_KEYS * tile<DI>::PIECES / FAST_THREADS;
    const int base = (int)first, last = (int)end;
#pragma unroll
    for (int j = 0; j < COPIES; j++) {
        const int row = (int)threadIdx.x / tile<DI>::PIECES + j * (TENSOR_KEYS / COPIES);
        copy.queue(to, row, base + row, base + row < last);
    }
}

template <int DI>
CG_GLOBAL void tensor_kernel(const cg_bf16 *q, const cg_bf16 *w, const cg_bf16 *k, const int32_t *rows,
                             int32_t *topk, sizes z, cg_device_fault *fault) {
    CG_DYNAMIC_SHARED(unsigned char, shared);
    cg_bf16 *tiles = (cg_bf16 *)shared;
    fast_row row(rows, z, (uint64_t *)(tiles + TENSOR_STAGES * tensor_stage<DI>), fault);
    int64_t first, end;
    seen_by_block(row.seen, &first, &end);
    const row_copy<DI> copy(k, z.Di, (int)threadIdx.x);
    for (int s = 0; s < TENSOR_STAGES - 1; s++) {
        if (first + s * TENSOR_KEYS < end)
            tensor_copy(tile<DI>{tiles + s * tensor_stage<DI>}, copy, first + s * TENSOR_KEYS, end);
        cg_cp_async_commit();
    }
    tile_query<DI> query;
    query.load(q + row.t * z.Hi * z.Di, w + row.t * z.Hi, z.Hi, z.Di, row.is_row);

    int stage = 0;
    for (int64_t base = first; base < end; base += TENSOR_KEYS) {
        cg_cp_async_wait<TENSOR_STAGES - 2>();
        __syncthreads();
        const int64_t next = base + (TENSOR_STAGES - 1) * TENSOR_KEYS;
        const int free = stage == 0 ? TENSOR_STAGES - 1 : stage - 1; /* read by all in the last turn */
        if (next < end) tensor_copy(tile<DI>{tiles + free * tensor_stage<DI>}, copy, next, end);
        cg_cp_async_commit();
        for (int part = 0; part < TENSOR_KEYS; part += CG_WARP) {
            if (!row.sees_any(base + part, CG_WARP)) continue;
            const float score = query.scores(tile<DI>{tiles + stage * tensor_stage<DI>}, part);
            row.push(score, base + part + row.best.lane);
        }
        stage = stage == TENSOR_STAGES - 1 ? 0 : stage + 1;
    }
    cg_cp_async_wait<0>();
    row.finish(topk, z, fault);
}

template <int DI> bool tensor_launch(const cg_run_args *args, cg_stream *stream, const sizes &z) {
    const cg_tensor *in = args->in;
    const size_t shared = TENSOR_STAGES * tensor_stage<DI> * sizeof(cg_bf16) + kept_bytes(z.K);
    return CG_LAUNCH(tensor_kernel<DI>, (unsigned)((z.T + FAST_ROWS - 1) / FAST_ROWS), FAST_THREADS, shared,
                     stream, (const cg_bf16 *)in[Q].data, (const cg_bf16 *)in[W].data,
                     (const cg_bf16 *)in[KEYS].data, (const int32_t *)in[ROWS].data,
                     (int32_t *)args->out[0].data, z, args->fault);
}

bool tensor(const cg_run_args *args, cg_stream *stream) {
    const sizes z = sizes_of(&args->in[Q].shape, &args->in[KEYS].shape, &args->out[0].shape);
    return z.Di <= 32 ? tensor_launch<32>(args, stream, z) : tensor_launch<TILE_CHANNELS>(args, stream, z);
}

/* ---- fast, f32: a key per lane and 4 such, 8 heads at a time ----
 *
 * Channels and heads are summed in the order of the CPU kernel, fused: the same bits, so the same choice. Parts of keys
 * and queries, CORE_DEPTH channels deep, come by in shared memory, one read while the next is on its way. */

constexpr int CORE_KEYS = 4 * CG_WARP, CORE_DEPTH = 32, CORE_STAGES = 2;
constexpr int CORE_PITCH = CORE_DEPTH + 4; /* of keys: 8 lanes read 16 bytes each from different banks */
constexpr int CORE_QUERIES = FAST_ROWS * CORE_HEADS;
constexpr size_t core_stage = CORE_KEYS * CORE_PITCH + CORE_QUERIES * CORE_DEPTH;

/* Each thread copies the same 16 bytes of every CORE_STEP-th row of a part. */
constexpr int CORE_FOURTHS = CORE_DEPTH / 4, CORE_STEP = FAST_THREADS / CORE_FOURTHS;

/* Queue a part: keys from `base` on, and a group of heads of the rows from t on, both from channel d on. Behind the last
 * ones they come again. */
CG_DEVICE void core_queue(float *part, const float *q, const float *k, int64_t base, int64_t end, int64_t t,
                          int64_t group, int64_t d, const sizes &z) {
    const int row = (int)threadIdx.x / CORE_FOURTHS, c = (int)threadIdx.x % CORE_FOURTHS * 4;
#pragma unroll
    for (int r = row; r < CORE_KEYS; r += CORE_STEP)
        core_piece(part + r * CORE_PITCH + c, k + cg_min(base + r, end - 1) * z.Di, d + c, z.Di);
    part += CORE_KEYS * CORE_PITCH;
#pragma unroll
    for (int r = row; r < CORE_QUERIES; r += CORE_STEP) {
        const int64_t h = cg_min(group * CORE_HEADS + r % CORE_HEADS, z.Hi - 1);
        core_piece(part + r * CORE_DEPTH + c, q + (cg_min(t + r / CORE_HEADS, z.T - 1) * z.Hi + h) * z.Di,
                   d + c, z.Di);
    }
    cg_cp_async_commit();
}

CG_GLOBAL void CG_BOUNDS(FAST_THREADS, 2)
    core_kernel(const float *q, const float *w, const float *k, const int32_t *rows, int32_t *topk, sizes z,
                cg_device_fault *fault) {
    CG_DYNAMIC_SHARED(float, stages);
    fast_row row(rows, z, (uint64_t *)(stages + CORE_STAGES * core_stage), fault);
    const int lane = row.best.lane, warp = (int)threadIdx.x / CG_WARP;
    int64_t first, end;
    seen_by_block(row.seen, &first, &end);

    /* Parts come in the order of their tile of keys, then of their group of heads, then of their channels. */
    const int64_t groups = z.Di > 0 ? (z.Hi + CORE_HEADS - 1) / CORE_HEADS : 0; /* none: all scores are 0 */
    if (groups > 0 && first < end) core_queue(stages, q, k, first, end, row.t - warp, 0, 0, z);
    int stage = 0;
    for (int64_t base = first; base < end; base += CORE_KEYS) {
        float score[4] = {0, 0, 0, 0};
        for (int64_t group = 0; group < groups; group++) {
            float dot[CORE_HEADS][4] = {};
            for (int64_t d = 0; d < z.Di; d += CORE_DEPTH) {
                cg_cp_async_wait<0>();
                __syncthreads();
                const int64_t next = d + CORE_DEPTH < z.Di ? d + CORE_DEPTH : 0;
                const int64_t next_group = next ? group : group + 1 < groups ? group + 1 : 0;
                const int64_t next_base = next || next_group ? base : base + CORE_KEYS;
                if (next_base < end)
                    core_queue(stages + (1 - stage) * core_stage, q, k, next_base, end, row.t - warp,
                               next_group, next, z);
                const float *part = stages + stage * core_stage;
                if (row.sees_any(base, CORE_KEYS))
                    core_dots<4, CORE_PITCH, CORE_DEPTH>(part + lane * CORE_PITCH,
                                                         part + CORE_KEYS * CORE_PITCH +
                                                             warp * CORE_HEADS * CORE_DEPTH,
                                                         (int)cg_min((int64_t)CORE_DEPTH, z.Di - d), dot);
                stage = 1 - stage;
            }
#pragma unroll
            for (int h = 0; h < CORE_HEADS; h++) {
                if (!row.is_row || group * CORE_HEADS + h >= z.Hi) continue;
                const float weight = w[row.t * z.Hi + group * CORE_HEADS + h];
#pragma unroll
                for (int i = 0; i < 4; i++) score[i] = cg_fma(weight, cg_relu(dot[h][i]), score[i]);
            }
        }
#pragma unroll 1
        for (int64_t of = base; of < base + CORE_KEYS; of += CG_WARP) {
            if (row.sees_any(of, CG_WARP)) row.push(score[0], of + lane);
            score[0] = score[1];
            score[1] = score[2];
            score[2] = score[3];
        }
    }
    row.finish(topk, z, fault);
}

bool core(const cg_run_args *args, cg_stream *stream) {
    const cg_tensor *in = args->in;
    const sizes z = sizes_of(&in[Q].shape, &in[KEYS].shape, &args->out[0].shape);
    return CG_LAUNCH(core_kernel, (unsigned)((z.T + FAST_ROWS - 1) / FAST_ROWS), FAST_THREADS,
                     CORE_STAGES * core_stage * sizeof(float) + kept_bytes(z.K), stream,
                     (const float *)in[Q].data, (const float *)in[W].data, (const float *)in[KEYS].data,
                     (const int32_t *)in[ROWS].data, (int32_t *)args->out[0].data, z, args->fault);
}

bool fits(const cg_node *node) {
    const int64_t Hi = cg_dim(node->in[Q], 1), Di = cg_dim(node->in[Q], 2);
    if (cg_dim(node->out[0], 1) > SELECT_MOST) return false;
    return node->in[Q]->dtype == CG_BF16 ? Hi <= TILE_HEADS && Di <= TILE_CHANNELS && Di % 8 == 0 : true;
}

} // namespace

extern "C" const cg_cuda_op cg_cuda_indexer_topk = {
    .op = "indexer_topk",
    .variants = {{.name = "plain",
                  .launch = {plain<float>, plain<double>, nullptr, plain<cg_bf16>},
                  .workspace = plain_workspace},
                 {.name = "fast", .launch = {core, nullptr, nullptr, tensor}, .fits = fits}},
    .describe = describe,
};
