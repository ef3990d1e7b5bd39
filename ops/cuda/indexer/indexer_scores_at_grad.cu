/* Gradients of the scores of chosen rows: see ops/indexer/indexer_scores_at.c. Scores of bf16 queries are f32. */
#include "ops/cuda/csa/csa_invert.cuh"
#include "ops/cuda/indexer/index_at.cuh"
#include "ops/cuda/indexer/index_core.cuh"
#include "ops/cuda/indexer/index_tile.cuh"

namespace {

enum { DSCORES, FORWARD_INPUTS }; /* the forward inputs follow */

sizes sizes_of(const cg_tensor *in) { return sizes_of(&in[Q].shape, &in[KEYS].shape, &in[TOPK].shape); }

sizes sizes_of(const cg_node *node) {
    cg_value *const *in = node->in + FORWARD_INPUTS;
    return sizes_of(&in[Q]->shape, &in[KEYS]->shape, &in[TOPK]->shape);
}

void describe(const cg_run_args *args, const cg_device_fault *fault, cg_error *error) {
    const sizes z = sizes_of(args->in + FORWARD_INPUTS);
    describe_listed("topk", z.K, z.C, fault, error);
}

/* ---- plain ---- */

enum { THREADS = 64 };

/* dq and dw. A block takes a head of a row at a time, and the slots in tiles: first a slot per thread, then a channel.
 */
template <typename T>
CG_GLOBAL void plain_queries_kernel(const cg_sum_of<T> *ds, const T *q, const T *w, const T *k,
                                    const int32_t *topk, T *dq, T *dw, sizes z, cg_device_fault *fault) {
    typedef cg_sum_of<T> S;
    CG_SHARED(S[THREADS], factor); /* of each key of a tile in dq */
    CG_SHARED(int64_t[THREADS], key);
    for (int64_t i = blockIdx.x; i < z.T * z.Hi; i += gridDim.x) {
        const int64_t t = i / z.Hi, h = i % z.Hi;
        const S weight = cg_up(w[i]);
        for (int64_t d0 = 0; d0 == 0 || d0 < z.Di; d0 += THREADS) {
            const int64_t d = d0 + threadIdx.x;
            S dw_mine = 0, dq_mine = 0;
            for (int64_t j0 = 0; j0 < z.K; j0 += THREADS) {
                const int64_t j = j0 + threadIdx.x;
                key[threadIdx.x] = -1;
                if (j < z.K) {
                    const int64_t slot = t * z.K + j,
                                  c = listed(topk, slot, z.C, BAD_INDEX, h ? nullptr : fault);
                    const S dot = c < 0 ? 0 : index_dot(q + i * z.Di, k + c * z.Di, z.Di);
                    if (dot > 0) {
                        key[threadIdx.x] = c;
                        factor[threadIdx.x] = weight * ds[slot];
                        dw_mine += ds[slot] * dot;
                    }
                }
                __syncthreads();
                for (int n = 0; n < THREADS && d < z.Di; n++)
                    if (key[n] >= 0) dq_mine += factor[n] * cg_up(k[key[n] * z.Di + d]);
                __syncthreads();
            }
            if (d < z.Di) dq[i * z.Di + d] = cg_down<T>(dq_mine);
            dw_mine = cg_block_sum(dw_mine);
            if (d == 0) dw[i] = cg_down<T>(dw_mine);
        }
    }
}

/* dk. A block takes a key at a time, and the heads of the rows that chose it in tiles: first a head per thread, then a
 * channel. */
template <typename T>
CG_GLOBAL void plain_keys_kernel(const cg_sum_of<T> *ds, const T *q, const T *w, const T *k,
                                 const int32_t *topk, T *dk, sizes z, inversion chosen) {
    typedef cg_sum_of<T> S;
    CG_SHARED(S[THREADS], factor); /* of each head of a tile */
    for (int64_t c = blockIdx.x; c < z.C; c += gridDim.x)
        for (int64_t d0 = 0; d0 < z.Di; d0 += THREADS) {
            const int64_t d = d0 + threadIdx.x;
            S sum = 0;
            for (int64_t p = chosen.start[c]; p < chosen.start[c + 1]; p++) {
                const int64_t t = chosen.reader[p];
                if (p > chosen.start[c] && t == chosen.reader[p - 1]) continue; /* all of its slots are done */
                S ds_row = 0;
                for (int64_t i = t * z.K + threadIdx.x; i < (t + 1) * z.K; i += THREADS)
                    if (topk[i] == c) ds_row += ds[i];
                ds_row = cg_block_sum(ds_row);
                for (int64_t h0 = 0; h0 < z.Hi; h0 += THREADS) {
                    const int64_t h = h0 + threadIdx.x, head = t * z.Hi + h;
                    factor[threadIdx.x] = 0;
                    if (h < z.Hi && index_dot(q + head * z.Di, k + c * z.Di, z.Di) > 0)
                        factor[threadIdx.x] = ds_row * cg_up(w[head]);
                    __syncthreads();
                    for (int n = 0; n < THREADS && h0 + n < z.Hi && d < z.Di; n++)
                        if (factor[n] != 0) sum += factor[n] * cg_up(q[(t * z.Hi + h0 + n) * z.Di + d]);
                    __syncthreads();
                }
            }
            if (d < z.Di) dk[c * z.Di + d] = cg_down<T>(sum);
        }
}

size_t plain_workspace(const cg_node *node) {
    const sizes z = sizes_of(node);
    carver from = {};
    inversion_in(from, z.T, z.K, z.C);
    return from.used;
}

template <typename T> bool plain(const cg_run_args *args, cg_stream *stream) {
    const cg_tensor *in = args->in + FORWARD_INPUTS;
    const sizes z = sizes_of(in);
    const cg_sum_of<T> *ds = (const cg_sum_of<T> *)args->in[DSCORES].data;
    const T *q = (const T *)in[Q].data, *w = (const T *)in[W].data, *k = (const T *)in[KEYS].data;
    const int32_t *topk = (const int32_t *)in[TOPK].data;
    carver from = {(char *)args->workspace, 0};
    const inversion chosen = inversion_in(from, z.T, z.K, z.C);
    return CG_LAUNCH(plain_queries_kernel<T>, cg_blocks(z.T * z.Hi, 1), THREADS, 0, stream, ds, q, w, k, topk,
                     (T *)args->out[0].data, (T *)args->out[1].data, z, args->fault) &&
           invert(args, stream, topk, chosen) &&
           CG_LAUNCH(plain_keys_kernel<T>, cg_blocks(z.C, 1), THREADS, 0, stream, ds, q, w, k, topk,
                     (T *)args->out[2].data, z, chosen);
}

/* ---- fast ----
 *
 * Rows are taken in chunks, so that what waits between the two kernels of a chunk stays small:
 *
 *   rows   a block takes a row. It sorts the slots by key, gathers the keys in that order and makes dq and dw. What is
 *          known of a slot then, its key, its ds and a bit per head, 1[q.k > 0], goes to the workspace: 16 bytes.
 *   keys   a block has a tile of keys and a slice of channels of dk in shared memory, and walks over a part of the chunk's
 *          rows in order. A row's slots with keys of the tile lie side by side. It adds ds sum_h w[h] 1[q.k > 0] q[h] to
 *          the keys that the row chose: no two of a row are the same, so no two warps meet, and rows come one after the
 *          other: fixed sums without atomics.
 *
 * At the end the parts of dk are added up in order. A key that stands twice in a list is taken once, with the sum of its
 * gradients.
 *
 * Flash sizes, T = 4096, Hi = 64, Di = 128, K = 512, C = 1024: three products of 34 GFLOP, 131 us at 790 TFLOP/s in bf16
 * and 1.5 ms at 67 TFLOP/s in f32. Why the keys do not gather their rows: a slot needs all of its row's query, 16 KB in
 * bf16, 34 GB in all, 6 ms from the second-level cache. Here a block reads the query of a row once for all keys of its
 * tile, 8 KB for 64 channels: 4096 rows * 4 tiles * 2 slices * 8 KB = 270 MB, and the slots 134 MB.
 *
 *   rows, bf16   two products. A warp has 32 heads, 64 registers of q and 128 of dq, and the keys of a step of 16 serve
 *                both products: 64 mma.sync for 16 ldmatrix, which is balanced on an H200 (4096 FLOP and 128 bytes per
 *                cycle). 2 warps a row, 4 rows a multiprocessor, for the sake of registers. The sort of 512 slots is 45
 *                rounds of 4 exchanges per thread, a tenth of the products. Expected: 200 us, of 87.
 *   keys, bf16   8 slots of a row are the columns of a product of 32 channels by 64 heads, 8 mma.sync beside 32
 *                instructions that turn bits into weights and 24 that add to shared memory, about 80 in all: 84 million
 *                warp instructions, 110 us. Shared memory: 8 ldmatrix a row and warp, 32 wavefronts per 8 slots.
 *                Expected: 150 us, of 44. Where keys are many, 8 columns are filled badly: at C = 16384 a row has 8
 *                slots in a tile.
 *   rows, f32    8 warps with 8 heads each; 64 keys at a time. Products take 16 of 16 wavefronts in the first part, 6 of
 *                8 in the second. Expected: 1.6 ms, of 1.0.
 *   keys, f32    a head of 8 slots is 2 multiplications, 8 tests and 16 additions for 64 channels: half of what the
 *                units can add. Expected: 1.0 ms, of 0.5.
 *
 * Exact: which heads are active and the order of all sums. bf16: dq takes ds rounded to bf16, dk does not; both sum in
 * f32. */

constexpr int64_t MOST_K = 2048;
constexpr int KEY_TILE = 256, KEY_SLICE = 64,
              KEY_PITCH = KEY_SLICE + 4; /* 4: keys of neighbouring lanes in other banks */

/* A slot of a row, in order of keys. -1: no key. */
struct alignas(16) entry {
    int32_t key;
    float ds;
    uint32_t active[2]; /* a bit per head, 32 each: q_h.k > 0; f32: bit h % 32 */
};

struct cuts {
    int64_t rows;          /* of a chunk */
    int64_t tiles, slices; /* of dk */
    int64_t parts;         /* of a chunk's rows */
};

cuts cuts_of(const sizes &z) {
#ifdef CG_CUDA_HOST
    const int64_t chunk_bytes = 24 * z.K * (int64_t)sizeof(entry), least = 1, blocks = 6; /* several of each */
#else
    const int64_t chunk_bytes = 16 << 20, least = 256,
                  blocks = 264; /* two for each multiprocessor of an H200 */
#endif
    cuts c;
    c.rows = z.K > 0 ? chunk_bytes / (z.K * (int64_t)sizeof(entry)) : z.T;
    c.rows = cg_min(cg_max(c.rows, least), z.T);
    c.tiles = (z.C + KEY_TILE - 1) / KEY_TILE;
    c.slices = (z.Di + KEY_SLICE - 1) / KEY_SLICE;
    c.parts = c.tiles && c.slices ? cg_max(blocks / (c.tiles * c.slices), (int64_t)1) : 0;
    return c;
}

struct fast_scratch {
    entry *entries;  /* [rows, K] */
    int32_t *starts; /* [rows, tiles + 1]: where the entries of a tile begin */
    float *parts;    /* [parts, C, Di] */
};

fast_scratch scratch_in(carver &from, const sizes &z, const cuts &c) {
    fast_scratch s;
    s.entries = (entry *)from.carve((size_t)(c.rows * z.K) * sizeof(entry));
    s.starts = (int32_t *)from.carve((size_t)(c.rows * (c.tiles + 1)) * sizeof(int32_t));
    s.parts = (float *)from.carve((size_t)(c.parts * z.C * z.Di) * sizeof(float));
    return s;
}

size_t fast_workspace(const cg_node *node) {
    const sizes z = sizes_of(node);
    carver from = {};
    scratch_in(from, z, cuts_of(z));
    return from.used;
}

/* ---- fast: a row's list ---- */

/* In shared memory. Room is a power of two. */
struct row_list {
    int room;
    uint64_t *slots; /* [room] key, then slot; rising */
    int32_t *keys;   /* [room] -1: none here */
    float *ds;       /* [room] 0 where there is no key */
};

CG_BOTH int list_room(int64_t K) {
    int room = CG_WARP;
    while (room < K) room *= 2;
    return room;
}

size_t list_bytes(int64_t K) {
    return (size_t)list_room(K) * (sizeof(uint64_t) + sizeof(int32_t) + sizeof(float));
}

CG_DEVICE row_list list_at(void *shared, int64_t K) {
    row_list list;
    list.room = list_room(K);
    list.slots = (uint64_t *)shared;
    list.keys = (int32_t *)(list.slots + list.room);
    list.ds = (float *)(list.keys + list.room);
    return list;
}

/* The first of n rising numbers that is not below x. */
CG_DEVICE int first_from(const uint64_t *numbers, int n, uint64_t x) {
    int low = 0;
    while (low < n) {
        const int middle = (low + n) / 2;
        if (numbers[middle] < x)
            low = middle + 1;
        else
            n = middle;
    }
    return low;
}

/* Sort row t, which is number r of the chunk, and write its entries, without active heads. Returns the number of slots
 * that have a key. By the whole block. */
CG_DEVICE int list_row(const row_list &list, const float *dscores, const int32_t *topk, int64_t t, int64_t r,
                       const sizes &z, int64_t tiles, const fast_scratch &s, cg_device_fault *fault) {
    const int threads = (int)blockDim.x, me = (int)threadIdx.x;
    for (int i = me; i < list.room; i += threads) {
        const int64_t c = i < z.K ? listed(topk, t * z.K + i, z.C, BAD_INDEX, fault) : -1;
        list.slots[i] = c < 0 ? UINT64_MAX : (uint64_t)c << 32 | (uint64_t)i;
    }
    for (int size = 2; size <= list.room; size *= 2)
        for (int step = size / 2; step; step /= 2) {
            __syncthreads();
            for (int i = me; i < list.room / 2; i += threads) {
                const int a = 2 * i - (i & (step - 1)), b = a + step;
                const uint64_t x = list.slots[a], y = list.slots[b];
                if ((a & size) ? x > y : x < y) continue;
                list.slots[a] = y;
                list.slots[b] = x;
            }
        }
    __syncthreads();
    const int n = first_from(list.slots, list.room, UINT64_MAX);
    for (int i = me; i < list.room; i += threads) {
        entry e = {-1, 0, {0, 0}};
        if (i < n && (i == 0 || list.slots[i] >> 32 != list.slots[i - 1] >> 32)) {
            e.key = (int32_t)(list.slots[i] >> 32);
            for (int j = i; j < n && list.slots[j] >> 32 == list.slots[i] >> 32; j++)
                e.ds += dscores[t * z.K + (uint32_t)list.slots[j]];
        }
        list.keys[i] = e.key;
        list.ds[i] = e.ds;
        if (i < z.K) s.entries[r * z.K + i] = e;
    }
    for (int64_t tile = me; tile <= tiles; tile += threads)
        s.starts[r * (tiles + 1) + tile] = first_from(list.slots, n, (uint64_t)(tile * KEY_TILE) << 32);
    __syncthreads();
    return n;
}

/* ---- fast: rows, bf16 ----
 *
 * The bit of head h stands at 16 (h % 2) + 4 (h % 32 / 8) + h % 8 / 2, so that one shift brings those of two neighbours to
 * bits 0 and 16, where the second kernel wants them. */

constexpr int TENSOR_KEYS = 16, TENSOR_STAGES = 4, TENSOR_THREADS = 2 * CG_WARP;

template <int DI>
CG_GLOBAL void CG_BOUNDS(TENSOR_THREADS, 4)
    tensor_rows_kernel(const float *dscores, const cg_bf16 *q, const cg_bf16 *w, const cg_bf16 *k,
                       const int32_t *topk, cg_bf16 *dq, cg_bf16 *dw, int64_t t0, sizes z, int64_t tiles,
                       fast_scratch s, cg_device_fault *fault) {
    CG_DYNAMIC_SHARED(cg_bf16, stages);
    constexpr int STEPS = DI / 16, PIECES = padded_tile<DI>::PIECES;
    const int64_t r = blockIdx.x, t = t0 + r;
    const int lane = (int)threadIdx.x % CG_WARP, warp = (int)threadIdx.x / CG_WARP, g = lane / 4,
              c2 = lane % 4 * 2;
    const int h0 = warp * 32 + g; /* heads of this lane: h0 + 8 i */
    const row_list list = list_at(stages + TENSOR_STAGES * TENSOR_KEYS * padded_tile<DI>::PITCH, z.K);
    const int n = list_row(list, dscores, topk, t, r, z, tiles, s, fault);

    /* Keys of step i into its stage: 16 slots, zeros where there is no key. A thread copies a piece of some rows. */
    constexpr int COPIES = TENSOR_KEYS * PIECES / TENSOR_THREADS;
    const row_copy<DI> copy(k, z.Di, (int)threadIdx.x);
    const auto stage = [&](int i) {
        return padded_tile<DI>{stages + (unsigned)i % TENSOR_STAGES * TENSOR_KEYS * padded_tile<DI>::PITCH};
    };
    const auto queue = [&](int i) {
        const padded_tile<DI> to = stage(i);
        if (i * TENSOR_KEYS < n)
#pragma unroll
            for (int j = 0; j < COPIES; j++) {
                const int row = (int)threadIdx.x / PIECES + j * (TENSOR_KEYS / COPIES);
                const int32_t key = list.keys[i * TENSOR_KEYS + row];
                copy.queue(to, row, key, key >= 0);
            }
        cg_cp_async_commit();
    };
    for (int i = 0; i < TENSOR_STAGES - 1; i++) queue(i);

    uint32_t query[2][STEPS][4];
#pragma unroll
    for (int m = 0; m < 4; m++) {
        const int h = h0 + 8 * m;
        const bool is_head = h < z.Hi;
        const uint32_t *row = (const uint32_t *)(q + (t * z.Hi + (is_head ? h : 0)) * z.Di + c2); /* pairs */
#pragma unroll
        for (int step = 0; step < STEPS; step++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                query[m / 2][step][m % 2 + 2 * half] =
                    is_head && 16 * step + 8 * half < z.Di ? row[8 * step + 4 * half] : 0;
    }
    float dq_sum[2][DI / 8][4] = {}, dw_sum[2][2] = {};
    for (int i = 0; i * TENSOR_KEYS < n; i++) {
        cg_cp_async_wait<TENSOR_STAGES - 2>();
        __syncthreads();
        queue(i + TENSOR_STAGES - 1);
        const padded_tile<DI> keys = stage(i);
        /* The second product is 1[x > 0] ds by k: its left side has the places of x. */
        uint32_t left[2][4],
            active[2]; /* of heads of this lane: 16 bits for the lower of two slots, then for the other */
#pragma unroll
        for (int of = 0; of < 2; of++) {
            float x[2][4] = {}; /* 16 heads each, by 8 slots */
#pragma unroll
            for (int step = 0; step < STEPS; step += 2) {
                uint32_t b[2][2];
                right_of_rows(b, keys, 8 * of, 2 * step);
#pragma unroll
                for (int half = 0; half < 2; half++)
#pragma unroll
                    for (int m = 0; m < 2; m++) cg_mma_bf16_16x8x16(x[m], query[m][step + half], b[half]);
            }
            const int slot = i * TENSOR_KEYS + 8 * of + c2;
            const float2 both = *(const float2 *)&list.ds[slot];
            const float ds[2] = {both.x, both.y};
            const uint32_t pair = cg_bf16_pair(ds[0], ds[1]);
            uint32_t on[2][2]; /* of heads g + 16 m + 8 row, all bits of a half alike */
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int row = 0; row < 2; row++) {
                    const float low = x[m][2 * row], high = x[m][2 * row + 1];
                    if (low > 0) dw_sum[m][row] = cg_fma(ds[0], low, dw_sum[m][row]);
                    if (high > 0) dw_sum[m][row] = cg_fma(ds[1], high, dw_sum[m][row]);
                    on[m][row] = (low > 0 ? 0xffffu : 0) | (high > 0 ? 0xffff0000u : 0);
                    left[m][2 * of + row] = pair & on[m][row];
                }
            const uint32_t of_first = (on[0][0] & 0x0f0f0f0fu) | (on[0][1] & 0xf0f0f0f0u),
                           of_second = (on[1][0] & 0x0f0f0f0fu) | (on[1][1] & 0xf0f0f0f0u);
            active[of] = (((of_first & 0x00ff00ffu) | (of_second & 0xff00ff00u)) & 0x11111111u)
                         << (threadIdx.x / 8 % 4);
        }
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            uint32_t b[2][2];
            right_of_columns(b, keys, 0, 2 * step);
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int of = 0; of < 2; of++) cg_mma_bf16_16x8x16(dq_sum[m][2 * step + of], left[m], b[of]);
        }
        /* The bits of all heads of the warp come together, even and odd heads last. Two lanes of eight write a slot each. */
#pragma unroll
        for (int of = 0; of < 2; of++) {
            active[of] |= __shfl_xor_sync(0xffffffffu, active[of], 8);
            active[of] |= __shfl_xor_sync(0xffffffffu, active[of], 16);
            const uint32_t other = __shfl_xor_sync(0xffffffffu, active[of], 4);
            const int slot =
                i * TENSOR_KEYS + 8 * of + c2 + g; /* g = 0, even heads: the lower slot; g = 1: the other */
            const uint32_t word =
                g == 0 ? (active[of] & 0xffffu) | other << 16 : other >> 16 | (active[of] & 0xffff0000u);
            if (g < 2 && slot < n) s.entries[(int64_t)blockIdx.x * z.K + slot].active[warp] = word;
        }
    }
    cg_cp_async_wait<0>();
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int row = 0; row < 2; row++) {
            const int64_t h = h0 + 16 * m + 8 * row, at = t * z.Hi + h;
            float sum = dw_sum[m][row];
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            if (h >= z.Hi) continue;
            if (c2 == 0) dw[at] = cg_down<cg_bf16>(sum);
            const float weight = cg_up(w[at]);
#pragma unroll
            for (int of = 0; of < DI / 8; of++)
                if (8 * of < z.Di)
                    *(uint32_t *)(dq + at * z.Di + 8 * of + c2) =
                        cg_bf16_pair(weight * dq_sum[m][of][2 * row], weight * dq_sum[m][of][2 * row + 1]);
        }
}

/* ---- fast: rows, f32 ---- */

constexpr int CORE_WARPS = AT_HEADS / CORE_HEADS, CORE_THREADS = CORE_WARPS * CG_WARP, CORE_KEYS = 2 * CG_WARP;
constexpr int CORE_PITCH = AT_CHANNELS + 4;

struct core_shared {
    float keys[CORE_KEYS * CORE_PITCH];
    float queries[AT_HEADS * AT_CHANNELS];
    float factors[CORE_WARPS][CORE_KEYS][CORE_HEADS]; /* of each key in the dq of a warp's heads */
    float weights[AT_HEADS];
};

CG_GLOBAL void CG_BOUNDS(CORE_THREADS, 2)
    core_rows_kernel(const float *dscores, const float *q, const float *w, const float *k, const int32_t *topk,
                     float *dq, float *dw, int64_t t0, sizes z, int64_t tiles, fast_scratch s,
                     cg_device_fault *fault) {
    CG_DYNAMIC_SHARED(core_shared, shared);
    constexpr int FOURTHS = AT_CHANNELS / 4;
    const int64_t r = blockIdx.x, t = t0 + r;
    const int lane = (int)threadIdx.x % CG_WARP, warp = (int)threadIdx.x / CG_WARP, h0 = warp * CORE_HEADS;
    const row_list list = list_at(shared + 1, z.K);
    for (int i = (int)threadIdx.x; i < z.Hi * FOURTHS; i += CORE_THREADS)
        core_piece(shared->queries + i / FOURTHS * AT_CHANNELS + i % FOURTHS * 4,
                   q + (t * z.Hi + i / FOURTHS) * z.Di, i % FOURTHS * 4, z.Di);
    cg_cp_async_commit();
    if (threadIdx.x < AT_HEADS)
        shared->weights[threadIdx.x] = (int)threadIdx.x < z.Hi ? w[t * z.Hi + threadIdx.x] : 0;
    const int n = list_row(list, dscores, topk, t, r, z, tiles, s, fault);
    float dq_sum[CORE_HEADS][4] = {}, dw_sum[CORE_HEADS] = {};
    for (int e0 = 0; e0 < n; e0 += CORE_KEYS) {
        for (int i = (int)threadIdx.x; i < CORE_KEYS * FOURTHS; i += CORE_THREADS) {
            float *to = shared->keys + i / FOURTHS * CORE_PITCH + i % FOURTHS * 4;
            const int64_t key = e0 + i / FOURTHS < n ? list.keys[e0 + i / FOURTHS] : -1;
            if (key >= 0)
                core_piece(to, k + key * z.Di, i % FOURTHS * 4, z.Di);
            else
                *(float4 *)to = make_float4(0, 0, 0, 0);
        }
        cg_cp_async_commit();
        cg_cp_async_wait<0>();
        __syncthreads();
        if (h0 < z.Hi) {
            float dot[CORE_HEADS][2] = {};
            core_dots<2, CORE_PITCH, AT_CHANNELS>(shared->keys + lane * CORE_PITCH,
                                                  shared->queries + h0 * AT_CHANNELS, (int)z.Di, dot);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int e = e0 + i * CG_WARP + lane;
                const bool is_key = e < n && list.keys[e] >= 0;
                const float ds = is_key ? list.ds[e] : 0;
                float *factors = shared->factors[warp][i * CG_WARP + lane];
                unsigned active = 0;
#pragma unroll
                for (int h = 0; h < CORE_HEADS; h++) {
                    const bool on = is_key && h0 + h < z.Hi && dot[h][i] > 0;
                    if (on) dw_sum[h] = cg_fma(ds, dot[h][i], dw_sum[h]);
                    active |= (unsigned)on << h;
                    factors[h] = on ? ds * shared->weights[h0 + h] : 0;
                }
                if (is_key) ((uint8_t *)s.entries[r * z.K + e].active)[warp] = (uint8_t)active;
            }
            __syncwarp();
            for (int i = 0; i < CORE_KEYS && e0 + i < n; i++) {
                const float4 key = *(const float4 *)(shared->keys + i * CORE_PITCH + 4 * lane);
                const float4 *factors = (const float4 *)shared->factors[warp][i];
                const float4 low = factors[0], high = factors[1];
                const float factor[CORE_HEADS] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
                for (int h = 0; h < CORE_HEADS; h++) {
                    dq_sum[h][0] = cg_fma(factor[h], key.x, dq_sum[h][0]);
                    dq_sum[h][1] = cg_fma(factor[h], key.y, dq_sum[h][1]);
                    dq_sum[h][2] = cg_fma(factor[h], key.z, dq_sum[h][2]);
                    dq_sum[h][3] = cg_fma(factor[h], key.w, dq_sum[h][3]);
                }
            }
        }
        __syncthreads(); /* all have read the keys */
    }
    cg_cp_async_wait<0>();
#pragma unroll
    for (int h = 0; h < CORE_HEADS; h++) {
        const float sum = cg_warp_sum(dw_sum[h]);
        if (h0 + h >= z.Hi) continue;
        const int64_t at = t * z.Hi + h0 + h;
        if (lane == 0) dw[at] = sum;
#pragma unroll
        for (int c = 0; c < 4; c++)
            if (4 * lane + c < z.Di) dq[at * z.Di + 4 * lane + c] = dq_sum[h][c];
    }
}

/* ---- fast: keys ---- */

constexpr int KEYS_WARPS = 8, KEYS_THREADS = KEYS_WARPS * CG_WARP;

/* A row's heads in a slice of channels, and their weights; in shared memory, twice. */
template <typename T> struct row_slice;
template <> struct row_slice<float> { float queries[AT_HEADS][KEY_SLICE], weights[AT_HEADS]; };
template <> struct row_slice<cg_bf16> {
    cg_bf16 queries[AT_HEADS * padded_tile<KEY_SLICE>::PITCH], weights[AT_HEADS];
};

template <typename T> struct keys_shared {
    row_slice<T> rows[2];
    float dk[KEY_TILE * KEY_PITCH];
};

/* Heads and channels that there are not are zeros. d0: the first channel. */
CG_DEVICE void slice_copy(row_slice<float> *to, const float *q, const float *w, int64_t d0, const sizes &z) {
    constexpr int FOURTHS = KEY_SLICE / 4;
    for (int i = (int)threadIdx.x; i < AT_HEADS * FOURTHS; i += KEYS_THREADS) {
        const int h = i / FOURTHS, c = i % FOURTHS * 4;
        if (h < z.Hi && d0 + c < z.Di)
            core_piece(&to->queries[h][c], q + h * z.Di, d0 + c, z.Di);
        else
            *(float4 *)&to->queries[h][c] = make_float4(0, 0, 0, 0);
    }
    if (threadIdx.x < AT_HEADS) to->weights[threadIdx.x] = (int)threadIdx.x < z.Hi ? w[threadIdx.x] : 0;
}

CG_DEVICE void slice_copy(row_slice<cg_bf16> *to, const cg_bf16 *q, const cg_bf16 *w, int64_t d0,
                          const sizes &z) {
    constexpr int PIECES = padded_tile<KEY_SLICE>::PIECES, COPIES = AT_HEADS * PIECES / KEYS_THREADS;
    const int p = (int)threadIdx.x % PIECES;
    const bool is_piece = d0 + p * PIECE < z.Di;
    const cg_bf16 *pieces = is_piece ? q + d0 + p * PIECE : q;
#pragma unroll
    for (int j = 0; j < COPIES; j++) {
        const int h = (int)threadIdx.x / PIECES + j * (AT_HEADS / COPIES);
        const bool valid = is_piece && h < z.Hi;
        cg_cp_async_16(padded_tile<KEY_SLICE>{to->queries}.piece(h, p),
                       pieces + (valid ? (uint32_t)h * (uint32_t)z.Di : 0), valid);
    }
    if (threadIdx.x < AT_HEADS)
        to->weights[threadIdx.x] = (int)threadIdx.x < z.Hi ? w[threadIdx.x] : cg_down<cg_bf16>(0);
}

/* dk of the tile += what n entries of one row bring. By the whole block, without a barrier. key0: the tile's first. */
CG_DEVICE void add_row(const row_slice<float> &row, const entry *entries, int n, int64_t key0, int64_t Hi,
                       float *dk) {
    const int lane = (int)threadIdx.x % CG_WARP;
    for (int e0 = (int)threadIdx.x / CG_WARP * 8; e0 < n; e0 += KEYS_WARPS * 8) {
        float sum[8][2] = {};
#pragma unroll 1
        for (int half = 0; half < 2 && half * 32 < Hi; half++) {
            uint32_t active[8];
#pragma unroll
            for (int e = 0; e < 8; e++) active[e] = e0 + e < n ? entries[e0 + e].active[half] : 0;
#pragma unroll 8
            for (int h = 0; h < 32; h++) {
                const float weight = row.weights[half * 32 + h];
                const float2 query = *(const float2 *)&row.queries[half * 32 + h][2 * lane];
                const float x = weight * query.x, y = weight * query.y;
#pragma unroll
                for (int e = 0; e < 8; e++) {
                    if (!(active[e] >> h & 1)) continue;
                    sum[e][0] += x;
                    sum[e][1] += y;
                }
            }
        }
#pragma unroll
        for (int e = 0; e < 8; e++) {
            if (e0 + e >= n || entries[e0 + e].key < 0) continue;
            const float ds = entries[e0 + e].ds;
            float2 *to = (float2 *)(dk + (entries[e0 + e].key - key0) * KEY_PITCH + 2 * lane), now = *to;
            now.x = cg_fma(ds, sum[e][0], now.x);
            now.y = cg_fma(ds, sum[e][1], now.y);
            *to = now;
        }
    }
}

/* Two of eight warps share 8 entries, 32 channels each: channels are the rows of the product, entries its columns, heads
 * are summed. */
CG_DEVICE void add_row(const row_slice<cg_bf16> &row, const entry *entries, int n, int64_t key0, int64_t,
                       float *dk) {
    const int lane = (int)threadIdx.x % CG_WARP, warp = (int)threadIdx.x / CG_WARP, g = lane / 4,
              c2 = lane % 4 * 2;
    const int half = warp % 2;
    if (warp / 2 * 8 >= n) return;
    const padded_tile<KEY_SLICE> queries = {(cg_bf16 *)row.queries};
    uint32_t channels[2][4][4], weights[4][2];
#pragma unroll
    for (int step = 0; step < 4; step++) {
#pragma unroll
        for (int m = 0; m < 2; m++) left_of_columns(channels[m][step], queries, 16 * step, 4 * half + 2 * m);
#pragma unroll
        for (int i = 0; i < 2; i++)
            weights[step][i] = *(const uint32_t *)(row.weights + 16 * step + 8 * i + c2);
    }
    for (int e0 = warp / 2 * 8; e0 < n; e0 += KEYS_WARPS / 2 * 8) {
        const entry mine = e0 + g < n ? entries[e0 + g] : entry{-1, 0, {0, 0}};
        const uint32_t active[2] = {mine.active[0] >> (c2 / 2), mine.active[1] >> (c2 / 2)};
        float sum[2][4] = {};
#pragma unroll
        for (int step = 0; step < 4; step++) {
            uint32_t on[2];
#pragma unroll
            for (int i = 0; i < 2; i++)
                on[i] = weights[step][i] & (active[step / 2] >> (8 * (step % 2) + 4 * i) & 0x10001u) * 0xffffu;
#pragma unroll
            for (int m = 0; m < 2; m++) cg_mma_bf16_16x8x16(sum[m], channels[m][step], on);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) { /* the two columns of this lane */
            const int from = (c2 + i) * 4;
            const int32_t key = __shfl_sync(0xffffffffu, mine.key, from);
            const float ds = __shfl_sync(0xffffffffu, mine.ds, from);
            if (key < 0) continue;
            float *to = dk + (key - key0) * KEY_PITCH + 32 * half + g;
#pragma unroll
            for (int m = 0; m < 2; m++) {
                to[16 * m] = cg_fma(ds, sum[m][i], to[16 * m]);
                to[16 * m + 8] = cg_fma(ds, sum[m][2 + i], to[16 * m + 8]);
            }
        }
    }
}

/* Blocks: parts of the chunk's rows, by tiles of keys, by slices of channels. is_first: nothing was summed before. */
template <typename T>
CG_GLOBAL void CG_BOUNDS(KEYS_THREADS, 2) keys_kernel(const T *q, const T *w, int64_t t0, int64_t n_rows,
                                                      sizes z, cuts c, fast_scratch s, bool is_first) {
    CG_DYNAMIC_SHARED(keys_shared<T>, shared);
    const int64_t slice = blockIdx.x % c.slices, tile = blockIdx.x / c.slices % c.tiles,
                  part = blockIdx.x / c.slices / c.tiles;
    const int64_t key0 = tile * KEY_TILE, d0 = slice * KEY_SLICE, end = cg_cut(n_rows, c.parts, part + 1);
    float *sums = s.parts + part * z.C * z.Di;
    for (int i = (int)threadIdx.x; i < KEY_TILE * KEY_SLICE; i += KEYS_THREADS) {
        const int64_t key = key0 + i / KEY_SLICE, d = d0 + i % KEY_SLICE;
        shared->dk[i / KEY_SLICE * KEY_PITCH + i % KEY_SLICE] =
            !is_first && key < z.C && d < z.Di ? sums[key * z.Di + d] : 0;
    }
    /* Entries of row r of the chunk that lie in the tile; none behind the part. */
    const auto range = [&](int64_t r) {
        if (r >= end) return seen_rows{0, 0};
        const int32_t *starts = s.starts + r * (c.tiles + 1) + tile;
        return seen_rows{starts[0], starts[1] - starts[0]};
    };
    const auto copy = [&](int64_t r, int stage, int64_t n) {
        if (n > 0) slice_copy(&shared->rows[stage], q + (t0 + r) * z.Hi * z.Di, w + (t0 + r) * z.Hi, d0, z);
        cg_cp_async_commit();
    };
    const int64_t first = cg_cut(n_rows, c.parts, part);
    seen_rows now = range(first), next = range(first + 1);
    copy(first, 0, now.n);
    int stage = 0;
    for (int64_t r = first; r < end; r++) {
        cg_cp_async_wait<0>();
        __syncthreads(); /* the row is there, and the one before it is done */
        copy(r + 1, 1 - stage, next.n);
        const seen_rows behind = range(r + 2);
        if (now.n > 0)
            add_row(shared->rows[stage], s.entries + r * z.K + now.first, (int)now.n, key0, z.Hi, shared->dk);
        now = next;
        next = behind;
        stage = 1 - stage;
    }
    cg_cp_async_wait<0>();
    __syncthreads();
    for (int i = (int)threadIdx.x; i < KEY_TILE * KEY_SLICE; i += KEYS_THREADS) {
        const int64_t key = key0 + i / KEY_SLICE, d = d0 + i % KEY_SLICE;
        if (key < z.C && d < z.Di) sums[key * z.Di + d] = shared->dk[i / KEY_SLICE * KEY_PITCH + i % KEY_SLICE];
    }
}

template <typename T> CG_GLOBAL void keys_sum_kernel(const float *parts, int64_t n_parts, int64_t n, T *dk) {
    CG_FOR(i, n) {
        float sum = 0;
        for (int64_t p = 0; p < n_parts; p++) sum += parts[p * n + i];
        dk[i] = cg_down<T>(sum);
    }
}

/* ---- fast: all of it ---- */

size_t core_rows_bytes(int64_t K) { return sizeof(core_shared) + list_bytes(K); }
template <int DI> size_t tensor_rows_bytes(int64_t K) {
    return TENSOR_STAGES * TENSOR_KEYS * padded_tile<DI>::PITCH * sizeof(cg_bf16) + list_bytes(K);
}

bool rows_launch(const cg_run_args *args, cg_stream *stream, const float *ds, const float *q, const float *w,
                 const float *k, const int32_t *topk, float *dq, float *dw, int64_t t0, int64_t n_rows,
                 const sizes &z, int64_t tiles, const fast_scratch &s) {
    return CG_LAUNCH(core_rows_kernel, (unsigned)n_rows, CORE_THREADS, core_rows_bytes(z.K), stream, ds, q, w,
                     k, topk, dq, dw, t0, z, tiles, s, args->fault);
}

template <int DI>
bool tensor_launch(const cg_run_args *args, cg_stream *stream, const float *ds, const cg_bf16 *q,
                   const cg_bf16 *w, const cg_bf16 *k, const int32_t *topk, cg_bf16 *dq, cg_bf16 *dw,
                   int64_t t0, int64_t n_rows, const sizes &z, int64_t tiles, const fast_scratch &s) {
    return CG_LAUNCH(tensor_rows_kernel<DI>, (unsigned)n_rows, TENSOR_THREADS, tensor_rows_bytes<DI>(z.K),
                     stream, ds, q, w, k, topk, dq, dw, t0, z, tiles, s, args->fault);
}

bool rows_launch(const cg_run_args *args, cg_stream *stream, const float *ds, const cg_bf16 *q,
                 const cg_bf16 *w, const cg_bf16 *k, const int32_t *topk, cg_bf16 *dq, cg_bf16 *dw, int64_t t0,
                 int64_t n_rows, const sizes &z, int64_t tiles, const fast_scratch &s) {
    return (z.Di <= 32 ? tensor_launch<32> : tensor_launch<AT_CHANNELS>)(args, stream, ds, q, w, k, topk, dq,
                                                                         dw, t0, n_rows, z, tiles, s);
}

template <typename T> bool fast(const cg_run_args *args, cg_stream *stream) {
    const cg_tensor *in = args->in + FORWARD_INPUTS;
    const sizes z = sizes_of(in);
    const cuts c = cuts_of(z);
    carver from = {(char *)args->workspace, 0};
    const fast_scratch s = scratch_in(from, z, c);
    const T *q = (const T *)in[Q].data, *w = (const T *)in[W].data, *k = (const T *)in[KEYS].data;
    for (int64_t t0 = 0; t0 == 0 || t0 < z.T; t0 += c.rows) { /* once without rows too: dk is 0 then */
        const int64_t n_rows = cg_min(c.rows, z.T - t0);
        if (!rows_launch(args, stream, (const float *)args->in[DSCORES].data, q, w, k,
                         (const int32_t *)in[TOPK].data, (T *)args->out[0].data, (T *)args->out[1].data, t0,
                         n_rows, z, c.tiles, s) ||
            !CG_LAUNCH(keys_kernel<T>, (unsigned)(c.parts * c.tiles * c.slices), KEYS_THREADS,
                       sizeof(keys_shared<T>), stream, q, w, t0, n_rows, z, c, s, t0 == 0))
            return false;
        if (z.T == 0) break;
    }
    return CG_LAUNCH(keys_sum_kernel<T>, cg_blocks(z.C * z.Di, 256), 256, 0, stream, s.parts, c.parts,
                     z.C * z.Di, (T *)args->out[2].data);
}

bool fits(const cg_node *node) {
    const sizes z = sizes_of(node);
    return z.Hi <= AT_HEADS && z.Di <= AT_CHANNELS && z.K <= MOST_K &&
           (cg_node_dtype(node) != CG_BF16 || z.Di % PIECE == 0);
}

/* The larger of the two kernels. */
size_t fast_shared(const cg_node *node) {
    const sizes z = sizes_of(node);
    const bool is_f32 = cg_node_dtype(node) != CG_BF16;
    const size_t rows = is_f32       ? core_rows_bytes(z.K)
                        : z.Di <= 32 ? tensor_rows_bytes<32>(z.K)
                                     : tensor_rows_bytes<AT_CHANNELS>(z.K);
    const size_t keys = is_f32 ? sizeof(keys_shared<float>) : sizeof(keys_shared<cg_bf16>);
    return CG_STATIC_BYTES + (rows > keys ? rows : keys);
}

} // namespace

extern "C" const cg_cuda_op cg_cuda_indexer_scores_at_grad = {
    .op = "indexer_scores_at_grad",
    .variants = {{.name = "plain",
                  .launch = {plain<float>, plain<double>, nullptr, plain<cg_bf16>},
                  .workspace = plain_workspace},
                 {.name = "fast",
                  .launch = {fast<float>, nullptr, nullptr, fast<cg_bf16>},
                  .workspace = fast_workspace,
                  .fits = fits,
                  .shared = fast_shared}},
    .describe = describe,
};
