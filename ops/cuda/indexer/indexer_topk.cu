/* Which compressed rows each token attends to: see ops/indexer/indexer_topk.c.
 *
 * Arithmetic in bf16, for 64 heads of 128 channels, K = 512, C = 16384 compressed rows of which a row sees half, on an H200
 * (790 TFLOP/s bf16, 4.3 TB/s; L2 taken as 5.5 TB/s; 132 multiprocessors at 1.7 GHz, each 4096 FLOP and 128 bytes of shared
 * memory per cycle, 4 instructions of warps):
 *
 *                                                   per row           65536 rows
 *   products  2 Hi Di C / 2                         134 MFLOP         8.8 PFLOP     11 ms
 *   memory    q 2 Hi Di, list 4 K                   18 KB             1.2 GB        0.3 ms; keys, 4 MB, stay in L2
 *
 * Scores are not written: 8 C / 2 bytes per row would be 4.3 GB and back, and a sort. What a kernel does beside the products
 * is relu, head weight and sum, 2 instructions of a lane per head and key, and the choice: about 30 instructions of a warp per
 * 32 keys, and 2000 each time that its list is full, a few times per row (index_select.cuh).
 *
 * fast (mma.sync, whose rate is about 0.62 of wgmma's): a warp has a row, with its 64 heads in 128 registers, which leaves
 * room for 8 warps. Per 16 keys and row:
 *     64 mma                                        64 cycles of the tensor cores at wgmma's rate, 103 at its own
 *     8 ldmatrix of 512 bytes                       32 cycles of shared memory
 *     64 mma, 64 relu and fma, 8 ldmatrix, ~20      39 cycles of instructions
 *   L2: keys once per 8 rows, 17 GB                 3.1 ms
 * The floor is mma.sync's, 18 ms. Two warps per scheduler, one's products beside the other's sums, and a barrier per 64 keys:
 * 65 - 75 % of it are expected, 24 - 28 ms, 310 - 370 TFLOP/s. Next: only more products per instruction.
 *
 * wgmma: a block has four rows, with their 256 heads in shared memory; its two groups of four warps have 64 keys each. Keys
 * are the rows of the products and heads their columns, so that sums over heads are sums in a lane, and one key of shared
 * memory is read for two rows' products. Per 128 keys and four rows:
 *     32 products of m64n128k16                     2048 cycles of the tensor cores
 *     their operands, 6 KB each                     1536 cycles of shared memory; 256 more to put keys there
 *     relu, fma, weights, sums of 8 warps           ~650 cycles of instructions; the choice, ~130
 *   L2: keys once per 4 rows, 34 GB                 6.2 ms, fetched a turn ahead
 * The floor is the products': 11 ms. A turn begins both halves of the products, two rows each, and chooses among the scores
 * of the last turn while they run; the first half's sums run beside the second half's products. What is left open is the
 * second half's sums, about 330 cycles, and the barrier: 80 % of the floor at best, 65 - 75 % expected: 15 - 17 ms,
 * 520 - 590 TFLOP/s. Shared memory: 133 KiB and lists of 6 KiB per row (18 at K = 2048); one block per multiprocessor.
 * Next: a barrier per group in the place of one per block, so that the groups drift apart and one's sums always have the
 * other's products beside them; then eight rows per block, whose heads fill 128 KiB, for half the traffic of L2.
 *
 * In f32 without tensor cores, 67 TFLOP/s, the products alone take 131 ms. */
#include "ops/cuda/indexer/index_core.cuh"
#include "ops/cuda/indexer/index_select.cuh"
#include "ops/cuda/indexer/index_tile.cuh"
#include "ops/cuda/wgmma.cuh"

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

    /* Row `number` of this block's PER_BLOCK. A warp without a row has number -1. */
    CG_MEMBER fast_row(const int32_t *rows, const sizes &z, int number, int per_block, uint64_t *shared,
                       cg_device_fault *fault)
        : t(((int64_t)gridDim.x - 1 - blockIdx.x) * per_block + number),
          is_row(number >= 0 && t < z.T), seen{0, 0}, best(shared + number * select_room(z.K), z.K) {
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

size_t kept_bytes(int64_t rows, int64_t K) { return (size_t)(rows * select_room(K)) * sizeof(uint64_t); }

/* ---- fast, bf16: tensor cores ---- */

constexpr int TENSOR_KEYS = 64, TENSOR_STAGES = 3;

template <int DI> constexpr size_t tensor_stage = padded_tile<DI>::PITCH *TENSOR_KEYS;

/* Keys from `first` on into a tile; behind the last one there are zeros. */
template <int DI>
CG_DEVICE void tensor_copy(padded_tile<DI> to, const row_copy<DI> &copy, int64_t first, int64_t end) {
    constexpr int COPIES = TENSOR_KEYS * padded_tile<DI>::PIECES / FAST_THREADS;
    const int base = (int)first, last = (int)end;
#pragma unroll
    for (int j = 0; j < COPIES; j++) {
        const int row = (int)threadIdx.x / padded_tile<DI>::PIECES + j * (TENSOR_KEYS / COPIES);
        copy.queue(to, row, base + row, base + row < last);
    }
}

template <int DI>
CG_GLOBAL void tensor_kernel(const cg_bf16 *q, const cg_bf16 *w, const cg_bf16 *k, const int32_t *rows,
                             int32_t *topk, sizes z, cg_device_fault *fault) {
    CG_DYNAMIC_SHARED(unsigned char, shared);
    cg_bf16 *tiles = (cg_bf16 *)shared;
    fast_row row(rows, z, (int)threadIdx.x / CG_WARP, FAST_ROWS,
                 (uint64_t *)(tiles + TENSOR_STAGES * tensor_stage<DI>), fault);
    int64_t first, end;
    seen_by_block(row.seen, &first, &end);
    const row_copy<DI> copy(k, z.Di, (int)threadIdx.x);
    for (int s = 0; s < TENSOR_STAGES - 1; s++) {
        if (first + s * TENSOR_KEYS < end)
            tensor_copy(padded_tile<DI>{tiles + s * tensor_stage<DI>}, copy, first + s * TENSOR_KEYS, end);
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
        if (next < end) tensor_copy(padded_tile<DI>{tiles + free * tensor_stage<DI>}, copy, next, end);
        cg_cp_async_commit();
        for (int part = 0; part < TENSOR_KEYS; part += CG_WARP) {
            if (!row.sees_any(base + part, CG_WARP)) continue;
            const float score = query.scores(padded_tile<DI>{tiles + stage * tensor_stage<DI>}, part);
            row.push(score, base + part + row.best.lane);
        }
        stage = stage == TENSOR_STAGES - 1 ? 0 : stage + 1;
    }
    cg_cp_async_wait<0>();
    row.finish(topk, z, fault);
}

template <int DI> size_t tensor_bytes(int64_t K) {
    return TENSOR_STAGES * tensor_stage<DI> * sizeof(cg_bf16) + kept_bytes(FAST_ROWS, K);
}

template <int DI> bool tensor_launch(const cg_run_args *args, cg_stream *stream, const sizes &z) {
    const cg_tensor *in = args->in;
    return CG_LAUNCH(tensor_kernel<DI>, (unsigned)((z.T + FAST_ROWS - 1) / FAST_ROWS), FAST_THREADS,
                     tensor_bytes<DI>(z.K), stream, (const cg_bf16 *)in[Q].data, (const cg_bf16 *)in[W].data,
                     (const cg_bf16 *)in[KEYS].data, (const int32_t *)in[ROWS].data,
                     (int32_t *)args->out[0].data, z, args->fault);
}

bool tensor(const cg_run_args *args, cg_stream *stream) {
    const sizes z = sizes_of(&args->in[Q].shape, &args->in[KEYS].shape, &args->out[0].shape);
    return z.Di <= 32 ? tensor_launch<32>(args, stream, z) : tensor_launch<TILE_CHANNELS>(args, stream, z);
}

/* ---- wgmma: as fast, with products of four rows and 128 keys at a time ---- */

constexpr int GROUP_ROWS = 4, GROUP_KEYS = 64; /* of a block; of one of its two groups */
constexpr int PAIR_TILES = 2 * TILE_HEADS / 8; /* x of two rows: their heads are the columns */

struct group_shared {
    static constexpr int KEYS = 2 * GROUP_KEYS;
    typedef tile<TILE_CHANNELS, GROUP_ROWS * TILE_HEADS> query_tile; /* heads of row 0, of row 1 ... */
    typedef tile<TILE_CHANNELS, KEYS> key_tile;
    cg_bf16 queries[GROUP_ROWS * TILE_HEADS * TILE_CHANNELS], keys[2][KEYS * TILE_CHANNELS];
    float weights[GROUP_ROWS][TILE_HEADS], scores[2][GROUP_ROWS][KEYS];
};

/* x [64 keys, 2 rows of heads] of this group to the scores of rows `pair` and pair + 1. */
CG_DEVICE void group_scores(const float (&x)[PAIR_TILES][4], int pair, group_shared *s, int buffer) {
    const int lane = (int)threadIdx.x % CG_WARP, t = lane % 4;
    float part[4] = {0, 0, 0, 0}; /* of keys g and g + 8 for the first row, then for the second */
#pragma unroll
    for (int n = 0; n < PAIR_TILES; n++) {
        const int row = n / (PAIR_TILES / 2), head = 8 * n % TILE_HEADS + 2 * t;
        const float2 w = *(const float2 *)&s->weights[pair + row][head];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            part[2 * row + i] = cg_fma(w.x, cg_relu(x[n][2 * i]), part[2 * row + i]);
            part[2 * row + i] = cg_fma(w.y, cg_relu(x[n][2 * i + 1]), part[2 * row + i]);
        }
    }
    s->scores[buffer][pair + t / 2][(int)threadIdx.x / CG_WARP * 16 + t % 2 * 8 + lane / 4] =
        sum_of_lanes(part);
}

CG_GLOBAL void CG_BOUNDS(FAST_THREADS, 1)
    group_kernel(const cg_bf16 *q, const cg_bf16 *w, const cg_bf16 *k, const int32_t *rows, int32_t *topk,
                 sizes z, cg_device_fault *fault) {
    constexpr int KEYS = group_shared::KEYS;
    typedef group_shared::key_tile key_tile;
    typedef group_shared::query_tile query_tile;
    CG_DYNAMIC_SHARED(group_shared, s);
    const int tid = (int)threadIdx.x, warp = tid / CG_WARP, group = tid / GROUP_THREADS;
    /* Four warps, each on another scheduler, choose. */
    const int number = warp / 2 % 2 == group ? warp % 4 : -1;
    fast_row row(rows, z, number, GROUP_ROWS, (uint64_t *)(s + 1), fault);
    int64_t first, end;
    seen_by_block(row.seen, &first, &end);

    const int64_t t0 = ((int64_t)gridDim.x - 1 - blockIdx.x) * GROUP_ROWS;
    const int n_rows = (int)cg_min((int64_t)GROUP_ROWS, z.T - t0), Hi = (int)z.Hi;
    const row_copy<TILE_CHANNELS> copy_q(q + t0 * z.Hi * z.Di, z.Di, tid), copy_k(k, z.Di, tid);
    constexpr int STEP = FAST_THREADS / key_tile::PIECES; /* rows that all threads copy at once */
    for (int r = tid / key_tile::PIECES; r < GROUP_ROWS * TILE_HEADS; r += STEP) {
        const int of = r / TILE_HEADS, h = r % TILE_HEADS;
        copy_q.queue(query_tile{s->queries}, r, of * Hi + h, of < n_rows && h < Hi);
    }
    for (int i = tid; i < GROUP_ROWS * TILE_HEADS; i += FAST_THREADS) {
        const int of = i / TILE_HEADS, h = i % TILE_HEADS;
        s->weights[of][h] = of < n_rows && h < Hi ? cg_up(w[(t0 + of) * z.Hi + h]) : 0;
    }
    const auto copy_keys = [&](int64_t base, int stage) {
        const int from = (int)base, last = (int)end;
#pragma unroll
        for (int j = 0; j < KEYS / STEP; j++) {
            const int r = tid / key_tile::PIECES + j * STEP;
            copy_k.queue(key_tile{s->keys[stage]}, r, from + r, from + r < last);
        }
    };
    const auto choose = [&](int64_t base, int buffer) {
        for (int part = 0; part < KEYS; part += CG_WARP)
            if (row.sees_any(base + part, CG_WARP))
                row.push(s->scores[buffer][number][part + row.best.lane], base + part + row.best.lane);
    };

    if (first < end) copy_keys(first, 0);
    cg_cp_async_commit();
    warpgroup products;
    int turn = 0;
    for (int64_t base = first; base < end; base += KEYS, turn = 1 - turn) {
        cg_cp_async_wait<0>();
        products.shared_written();
        __syncthreads(); /* keys of this turn and scores of the last are there, keys of the last are read */
        if (base + KEYS < end) copy_keys(base + KEYS, 1 - turn);
        cg_cp_async_commit();

        float x[2][PAIR_TILES][4];
        products.begin();
#pragma unroll
        for (int pair = 0; pair < 2; pair++) {
            products.set_rows(x[pair], key_tile{s->keys[turn]}, group * GROUP_KEYS, query_tile{s->queries},
                              pair * 2 * TILE_HEADS);
            products.commit();
        }
        if (base > first) choose(base - KEYS, 1 - turn);
        products.wait<1>(x[0]);
        group_scores(x[0], 0, s, turn);
        products.wait<0>(x[1]);
        group_scores(x[1], 2, s, turn);
    }
    cg_cp_async_wait<0>();
    __syncthreads();
    if (first < end) choose(first + (end - first - 1) / KEYS * KEYS, 1 - turn);
    row.finish(topk, z, fault);
}

size_t group_bytes(int64_t K) { return sizeof(group_shared) + kept_bytes(GROUP_ROWS, K); }

bool group(const cg_run_args *args, cg_stream *stream) {
    const cg_tensor *in = args->in;
    const sizes z = sizes_of(&in[Q].shape, &in[KEYS].shape, &args->out[0].shape);
    return CG_LAUNCH(group_kernel, (unsigned)((z.T + GROUP_ROWS - 1) / GROUP_ROWS), FAST_THREADS,
                     group_bytes(z.K), stream, (const cg_bf16 *)in[Q].data, (const cg_bf16 *)in[W].data,
                     (const cg_bf16 *)in[KEYS].data, (const int32_t *)in[ROWS].data,
                     (int32_t *)args->out[0].data, z, args->fault);
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
    const int warp = (int)threadIdx.x / CG_WARP;
    fast_row row(rows, z, warp, FAST_ROWS, (uint64_t *)(stages + CORE_STAGES * core_stage), fault);
    const int lane = row.best.lane;
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

size_t core_bytes(int64_t K) { return CORE_STAGES * core_stage * sizeof(float) + kept_bytes(FAST_ROWS, K); }

bool core(const cg_run_args *args, cg_stream *stream) {
    const cg_tensor *in = args->in;
    const sizes z = sizes_of(&in[Q].shape, &in[KEYS].shape, &args->out[0].shape);
    return CG_LAUNCH(core_kernel, (unsigned)((z.T + FAST_ROWS - 1) / FAST_ROWS), FAST_THREADS, core_bytes(z.K),
                     stream, (const float *)in[Q].data, (const float *)in[W].data, (const float *)in[KEYS].data,
                     (const int32_t *)in[ROWS].data, (int32_t *)args->out[0].data, z, args->fault);
}

bool fits(const cg_node *node) {
    const int64_t Hi = cg_dim(node->in[Q], 1), Di = cg_dim(node->in[Q], 2);
    if (cg_dim(node->out[0], 1) > SELECT_MOST) return false;
    return node->in[Q]->dtype == CG_BF16 ? Hi <= TILE_HEADS && Di <= TILE_CHANNELS && Di % PIECE == 0 : true;
}

size_t fast_shared(const cg_node *node) {
    const int64_t K = cg_dim(node->out[0], 1);
    const size_t dynamic = node->in[Q]->dtype != CG_BF16  ? core_bytes(K)
                           : cg_dim(node->in[Q], 2) <= 32 ? tensor_bytes<32>(K)
                                                          : tensor_bytes<TILE_CHANNELS>(K);
    return dynamic + CG_STATIC_BYTES;
}

/* Of up to 32 channels, fast does not multiply three quarters of zeros. */
bool group_fits(const cg_node *node) { return fits(node) && cg_dim(node->in[Q], 2) > 32; }
size_t group_shared_bytes(const cg_node *node) {
    return group_bytes(cg_dim(node->out[0], 1)) + CG_STATIC_BYTES;
}

} // namespace

extern "C" const cg_cuda_op cg_cuda_indexer_topk = {
    .op = "indexer_topk",
    .variants =
        {{.name = "plain",
          .launch = {plain<float>, plain<double>, nullptr, plain<cg_bf16>},
          .workspace = plain_workspace},
         {.name = "fast", .launch = {core, nullptr, nullptr, tensor}, .fits = fits, .shared = fast_shared},
         {.name = "wgmma",
          .launch = {nullptr, nullptr, nullptr, group},
          .fits = group_fits,
          .shared = group_shared_bytes,
          .wgmma = true}},
    .describe = describe,
};
