/* Scores of the compressed rows that the indexer chose: see ops/indexer/indexer_scores_at.c. Scores of bf16 queries are f32. */
#include "ops/cuda/indexer/index_at.cuh"
#include "ops/cuda/indexer/index_core.cuh"
#include "ops/cuda/indexer/index_tile.cuh"

namespace {

sizes sizes_of(const cg_tensor *in) { return sizes_of(&in[Q].shape, &in[KEYS].shape, &in[TOPK].shape); }

void describe(const cg_run_args *args, const cg_device_fault *fault, cg_error *error) {
    const sizes z = sizes_of(args->in);
    describe_listed("topk", z.K, z.C, fault, error);
}

/* ---- plain: a slot per thread ---- */

template <typename T>
CG_GLOBAL void plain_kernel(const T *q, const T *w, const T *k, const int32_t *topk, cg_sum_of<T> *scores,
                            sizes z, cg_device_fault *fault) {
    CG_FOR(i, z.T * z.K) {
        const int64_t c = listed(topk, i, z.C, BAD_INDEX, fault), t = i / z.K;
        cg_sum_of<T> score = -cg_infinity<cg_sum_of<T>>;
        if (c >= 0) score = index_score(q + t * z.Hi * z.Di, w + t * z.Hi, k + c * z.Di, z.Hi, z.Di);
        scores[i] = score;
    }
}

template <typename T> bool plain(const cg_run_args *args, cg_stream *stream) {
    const cg_tensor *in = args->in;
    const sizes z = sizes_of(in);
    return CG_LAUNCH(plain_kernel<T>, cg_blocks(z.T * z.K, 128), 128, 0, stream, (const T *)in[Q].data,
                     (const T *)in[W].data, (const T *)in[KEYS].data, (const int32_t *)in[TOPK].data,
                     (cg_sum_of<T> *)args->out[0].data, z, args->fault);
}

/* ---- fast, bf16: a warp takes a row, its query in registers, and gathers 32 keys at a time ----
 *
 * Flash sizes, T = 4096, Hi = 64, Di = 128, K = 512: 34 GFLOP, 44 us at 790 TFLOP/s; each key is read by one row alone,
 * 537 MB from the second-level cache (or memory, where the keys are more than 50 MB), about 100 us at 5.5 TB/s: that is
 * the floor. mma.sync reaches about 0.6 of the tensor rate, and a key's 64 products of 8 heads take as long as its 256
 * bytes; the two overlap, copies being one step of 32 keys ahead: 64 KB on their way per multiprocessor. Expected: 130 us.
 * Next: several rows that chose the same keys could share them. */

constexpr int FAST_ROWS = 8, FAST_THREADS = FAST_ROWS * CG_WARP, TENSOR_STAGES = 2;

template <int DI>
CG_GLOBAL void CG_BOUNDS(FAST_THREADS, 1)
    tensor_kernel(const cg_bf16 *q, const cg_bf16 *w, const cg_bf16 *k, const int32_t *topk, float *scores,
                  sizes z, cg_device_fault *fault) {
    CG_DYNAMIC_SHARED(cg_bf16, tiles);
    const int lane = (int)threadIdx.x % CG_WARP, warp = (int)threadIdx.x / CG_WARP;
    const int64_t t = (int64_t)blockIdx.x * FAST_ROWS + warp;
    if (t >= z.T) return;
    tile_query<DI> query;
    query.load(q + t * z.Hi * z.Di, w + t * z.Hi, z.Hi, z.Di, true);

    /* Keys of slots j0 to j0 + 31 into a stage, a slot per lane; returns this lane's key, -1: none. */
    const row_copy<DI> copy(k, z.Di, lane);
    const auto queue = [&](int64_t j0, int stage) {
        constexpr int PIECES = padded_tile<DI>::PIECES;
        const padded_tile<DI> to = {tiles + (warp * TENSOR_STAGES + stage) * CG_WARP * padded_tile<DI>::PITCH};
        int32_t key = -1;
        if (j0 < z.K) {
            if (j0 + lane < z.K) key = (int32_t)listed(topk, t * z.K + j0 + lane, z.C, BAD_INDEX, fault);
#pragma unroll
            for (int j = 0; j < PIECES; j++) {
                const int row = lane / PIECES + j * (CG_WARP / PIECES);
                const int32_t from = __shfl_sync(0xffffffffu, key, row);
                copy.queue(to, row, from, from >= 0);
            }
        }
        cg_cp_async_commit();
        return key;
    };
    int32_t now = queue(0, 0);
    int stage = 0;
    for (int64_t j0 = 0; j0 < z.K; j0 += CG_WARP) {
        const int32_t next = queue(j0 + CG_WARP, 1 - stage);
        cg_cp_async_wait<1>();
        __syncwarp();
        const float score = query.scores(
            padded_tile<DI>{tiles + (warp * TENSOR_STAGES + stage) * CG_WARP * padded_tile<DI>::PITCH}, 0);
        if (j0 + lane < z.K) scores[t * z.K + j0 + lane] = now >= 0 ? score : -cg_infinity<float>;
        __syncwarp(); /* all have read the stage */
        now = next;
        stage = 1 - stage;
    }
    cg_cp_async_wait<0>();
}

template <int DI>
constexpr size_t tensor_bytes = FAST_ROWS *TENSOR_STAGES *CG_WARP *padded_tile<DI>::PITCH * sizeof(cg_bf16);

template <int DI> bool tensor_launch(const cg_run_args *args, cg_stream *stream, const sizes &z) {
    const cg_tensor *in = args->in;
    return CG_LAUNCH(tensor_kernel<DI>, (unsigned)((z.T + FAST_ROWS - 1) / FAST_ROWS), FAST_THREADS,
                     tensor_bytes<DI>, stream, (const cg_bf16 *)in[Q].data, (const cg_bf16 *)in[W].data,
                     (const cg_bf16 *)in[KEYS].data, (const int32_t *)in[TOPK].data, (float *)args->out[0].data,
                     z, args->fault);
}

bool tensor(const cg_run_args *args, cg_stream *stream) {
    const sizes z = sizes_of(args->in);
    return z.Di <= 32 ? tensor_launch<32>(args, stream, z) : tensor_launch<TILE_CHANNELS>(args, stream, z);
}

/* ---- fast, f32: a block takes a row, a warp 8 of its heads, and gathers 128 keys at a time ----
 *
 * Flash sizes as above: 34 GFLOP, 0.51 ms at 67 TFLOP/s; keys are 1.07 GB, 0.2 ms from the second-level cache, and come
 * while the multiprocessor's other block computes. 128 multiplications take 24 of 32 wavefronts of shared memory and 140
 * of instructions: 75 % of the floor expected, 0.7 ms. Heads are added up by warps, so sums are not in the CPU's order. */

constexpr int CORE_KEYS = 4 * CG_WARP, CORE_PITCH = AT_CHANNELS + 4;

struct core_shared {
    float keys[CORE_KEYS * CORE_PITCH];
    float queries[AT_HEADS * AT_CHANNELS];
    float parts[AT_HEADS / CORE_HEADS][CORE_KEYS]; /* of the heads of each warp */
    int32_t list[CORE_KEYS];
};

CG_GLOBAL void CG_BOUNDS(FAST_THREADS, 2)
    core_kernel(const float *q, const float *w, const float *k, const int32_t *topk, float *scores, sizes z,
                cg_device_fault *fault) {
    CG_DYNAMIC_SHARED(core_shared, shared);
    constexpr int FOURTHS = AT_CHANNELS / 4;
    const int lane = (int)threadIdx.x % CG_WARP, warp = (int)threadIdx.x / CG_WARP;
    const int64_t t = blockIdx.x, h0 = warp * CORE_HEADS;
    for (int i = (int)threadIdx.x; i < z.Hi * FOURTHS; i += FAST_THREADS)
        core_piece(shared->queries + i / FOURTHS * AT_CHANNELS + i % FOURTHS * 4,
                   q + (t * z.Hi + i / FOURTHS) * z.Di, i % FOURTHS * 4, z.Di);
    cg_cp_async_commit();
    for (int64_t j0 = 0; j0 < z.K; j0 += CORE_KEYS) {
        const int64_t j = j0 + threadIdx.x;
        if (threadIdx.x < CORE_KEYS)
            shared->list[threadIdx.x] =
                j < z.K ? (int32_t)listed(topk, t * z.K + j, z.C, BAD_INDEX, fault) : -1;
        __syncthreads();
        for (int i = (int)threadIdx.x; i < CORE_KEYS * FOURTHS; i += FAST_THREADS) {
            const int64_t c = shared->list[i / FOURTHS];
            if (c >= 0)
                core_piece(shared->keys + i / FOURTHS * CORE_PITCH + i % FOURTHS * 4, k + c * z.Di,
                           i % FOURTHS * 4, z.Di);
        }
        cg_cp_async_commit();
        cg_cp_async_wait<0>();
        __syncthreads();
        if (h0 < z.Hi) {
            float dot[CORE_HEADS][4] = {}, part[4] = {0, 0, 0, 0};
            core_dots<4, CORE_PITCH, AT_CHANNELS>(shared->keys + lane * CORE_PITCH,
                                                  shared->queries + h0 * AT_CHANNELS, (int)z.Di, dot);
#pragma unroll
            for (int h = 0; h < CORE_HEADS; h++) {
                if (h0 + h >= z.Hi) continue;
                const float weight = w[t * z.Hi + h0 + h];
#pragma unroll
                for (int i = 0; i < 4; i++) part[i] = cg_fma(weight, cg_relu(dot[h][i]), part[i]);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) shared->parts[warp][i * CG_WARP + lane] = part[i];
        }
        __syncthreads();
        if (threadIdx.x < CORE_KEYS && j < z.K) {
            float score = 0;
            for (int of = 0; of * CORE_HEADS < z.Hi; of++) score += shared->parts[of][threadIdx.x];
            scores[t * z.K + j] = shared->list[threadIdx.x] >= 0 ? score : -cg_infinity<float>;
        }
    }
    cg_cp_async_wait<0>();
}

bool core(const cg_run_args *args, cg_stream *stream) {
    const cg_tensor *in = args->in;
    const sizes z = sizes_of(in);
    return CG_LAUNCH(core_kernel, (unsigned)z.T, FAST_THREADS, sizeof(core_shared), stream,
                     (const float *)in[Q].data, (const float *)in[W].data, (const float *)in[KEYS].data,
                     (const int32_t *)in[TOPK].data, (float *)args->out[0].data, z, args->fault);
}

bool fits(const cg_node *node) {
    const int64_t Hi = cg_dim(node->in[Q], 1), Di = cg_dim(node->in[Q], 2);
    return Hi <= AT_HEADS && Di <= AT_CHANNELS && (node->in[Q]->dtype != CG_BF16 || Di % PIECE == 0);
}

size_t fast_shared(const cg_node *node) {
    return CG_STATIC_BYTES + (node->in[Q]->dtype != CG_BF16  ? sizeof(core_shared)
                              : cg_dim(node->in[Q], 2) <= 32 ? tensor_bytes<32>
                                                             : tensor_bytes<TILE_CHANNELS>);
}

} // namespace

extern "C" const cg_cuda_op cg_cuda_indexer_scores_at = {
    .op = "indexer_scores_at",
    .variants =
        {{.name = "plain", .launch = {plain<float>, plain<double>, nullptr, plain<cg_bf16>}},
         {.name = "fast", .launch = {core, nullptr, nullptr, tensor}, .fits = fits, .shared = fast_shared}},
    .describe = describe,
};
