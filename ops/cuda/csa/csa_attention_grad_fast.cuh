/* Backward of sparse attention in bf16 on tensor cores. As in csa_attention_fast.cuh a block has a row and a group of its
 * heads, q and dout in shared memory, and keys come by in tiles, twice: for delta = sum_j p_j dout.key_j, then for
 *
 *   p, dx from q.key and dout.key again;   dq += dx keys (its sums stay in registers);   part = p^T dout + dx^T q
 *
 * A key's gradient is the sum of its parts over the rows that read it. A key of its own has no product with anything but rows
 * of q and dout, 128 KiB for each row that chose it: gathering those would move 4 PB for 65536 rows. So parts are made where
 * q and dout are, rounded to bf16 (as p and dx were before the product), and written; gather kernels add them up in f32 in
 * order of the rows. Rows go in chunks, by shapes alone, so that the parts of a chunk fit into 256 MiB: 409 rows here. A kv
 * row that two chunks reach waits in a small ring; sums of dckv wait in f32. Who chose which row is known by a counting sort
 * of the places (csa_invert.cuh), and every row of dckv remembers how far it has come. No float atomics, the same bits every
 * time. With atomics in the place of parts it would be 328 thousand of them per row, 21 G in all, where the parts cost 20 ms
 * of memory: not written.
 *
 * Arithmetic, for H = 64, D = 512, W = 128, K = 512 on an H200 (790 TFLOP/s bf16, 4.3 TB/s), N = W + K:
 *
 *                                                per row            65536 rows
 *   products  14 H N D (10 if delta were known)  294 MFLOP          19.2 PFLOP    24 ms
 *   memory    q, dout, dq 6 H D                  197 KB             12.9 GB        3 ms
 *             parts 2 N D, written and read      1.3 MB             86 GB         20 ms, half of it beside the products
 *   L2        keys, twice                        1.3 MB             86 GB         16 ms
 *   shared memory, 128 bytes per cycle; bytes per mma of 4096 FLOP, tiles of 32 keys:
 *             q.key, dout.key, twice             41 kmma x 384      123 kcycle    36 ms at 1.7 GHz
 *             dq                                 10 kmma x 128       10 kcycle     3 ms
 *             parts                              20 kmma x 256       41 kcycle    12 ms
 *
 * Shared memory is the floor: 51 ms, of which 55 - 65 % are expected, and 12 ms for the gather kernels, which only read and
 * add: 90 - 105 ms, 180 - 210 TFLOP/s, a quarter of 790. Groups of 32 heads, for sm_80 and its 164 KiB, load keys twice for
 * H = 64 and write two parts.
 *
 * wgmma (sm_90a) makes the products that read most, q.key and dout.key: of two groups of four warps one multiplies q and the
 * other dout, m64n32k16, and they exchange halves through shared memory, so that all else is the same code. Per tile of 32
 * keys 64 products of 16 cycles of the tensor cores and 24 of shared memory, and 128 for the exchange: 67 kcycle per row in
 * the place of 123. In all 118, 35 ms; 55 - 65 % of that and the gather kernels: 65 - 75 ms, 260 - 295 TFLOP/s.
 *
 * Next: `out` beside dout would give delta without the first walk (33 of 118 kcycle per row less, 36 of 174 by mma.sync, for
 * a saved tensor more); parts of 64 columns at a time would load p and dx half as often, but need 32 registers more than
 * there are. By wgmma: parts with columns as the rows of the products and keys as their columns, whose sums are 16 per
 * thread for 64 columns (another order of key_parts); dq, whose weights are 32 keys wide, in slabs of 64 bytes. */
#ifndef CG_OPS_CUDA_CSA_ATTENTION_GRAD_FAST_CUH
#define CG_OPS_CUDA_CSA_ATTENTION_GRAD_FAST_CUH

#include "ops/cuda/csa/csa_attention_tiles.cuh"
#include "ops/cuda/csa/csa_invert.cuh"

namespace {

template <typename Shape> struct grad_shared {
    cg_bf16 q[Shape::HEADS * Shape::COLUMNS], g[Shape::HEADS * Shape::COLUMNS];
    cg_bf16 p[Shape::HEADS * Shape::KEYS], dx[Shape::HEADS * Shape::KEYS];
    key_buffers<Shape> buffers;
    alignas(16) key_swap<Shape> swap; /* of groups */
    float sum[Shape::ALONG_KEYS][Shape::HEADS], delta[Shape::HEADS], lse[Shape::HEADS];
};

/* What the rows of a chunk give to their keys: [rows, groups of heads, slots, COLUMNS] in bf16. Slot i < W of row t is kv row
 * t - i, slot W + k is place k of its list. Within the CHUNK columns of four (or two) tiles of d, numbers lie as the lanes
 * have them: lane `quad` of tile n has columns 8 n + 2 quad and the next one at 2 TILES quad + 2 n. */
template <typename Shape> struct key_parts {
    static constexpr int TILES = Shape::COLUMN_TILES < 4 ? Shape::COLUMN_TILES : 4,
                         RUN = 2 * TILES; /* of a lane */
    static constexpr int CHUNK = 8 * TILES, RUNS = Shape::COLUMNS / RUN;
    struct alignas(RUN * sizeof(cg_bf16)) run {
        uint32_t pair[TILES];
    };
    run *data;
    int64_t W, slots, groups, t0, n_rows;
    CG_MEMBER run *at(int64_t t, int64_t group, int64_t slot) const {
        return data + (((t - t0) * groups + group) * slots + slot) * RUNS;
    }
    /* The first column of tile n in run r of a row. */
    static CG_MEMBER int column(int r, int n) { return r / 4 * CHUNK + 8 * n + 2 * (r % 4); }
};

/* dq, delta and key_parts: a block per row and group of HEADS heads. Two walks over the keys: for delta = sum_j p_j g.key_j,
 * then for the rest. */
template <typename Shape>
CG_GLOBAL CG_BOUNDS(FAST_THREADS, Shape::BLOCKS) void fast_grad_kernel(attention<cg_bf16> a, const float *lse,
                                                                       const cg_bf16 *dout, const int32_t *live,
                                                                       cg_bf16 *dq, float *delta,
                                                                       key_parts<Shape> parts) {
    constexpr int HEADS = Shape::HEADS, KEYS = Shape::KEYS, KEY_TILES = Shape::KEY_TILES,
                  TILES = key_parts<Shape>::TILES;
    CG_DYNAMIC_SHARED(grad_shared<Shape>, s);
    typedef typename Shape::head_tile head_tile;
    typedef typename Shape::key_tile key_tile;
    typedef typename Shape::weight_tile weight_tile;
    const head_tile q_tile = {s->q}, g_tile = {s->g};
    const weight_tile p_tile = {s->p}, dx_tile = {s->dx};
    const thread_place<Shape> my;
    const auto head_lane = a_rows<head_tile>(my.along_heads * 16), row_lane = b_columns<head_tile>(0);
    const auto key_lane = key_rows<Shape>(my.along_keys), column_lane = b_columns<key_tile>(0);
    const auto weight_lane = a_rows<weight_tile>(0), turned_lane = a_columns<weight_tile>(0);
    const int H = (int)a.H, D = (int)a.D;

    key_tiles<Shape>::clear_rest(s->buffers, D);
    for (int64_t block = blockIdx.x; block < parts.n_rows * parts.groups; block += gridDim.x) {
        const int t = (int)(parts.t0 + block / parts.groups), part = (int)(block % parts.groups),
                  head0 = part * HEADS, heads = H - head0 < HEADS ? H - head0 : HEADS;
        const auto at_head = [&](int h) { return (int64_t)t * H + head0 + h; };
        const key_tiles<Shape> tiles(a, s->buffers, t);
        const int n = live[t] ? tiles.n_tiles : 0;
        const auto tile_of = [&](int step) { return step < n ? step : step - n; };
        __syncthreads(); /* the last turn has read what comes now */
        fetch_heads<Shape>(q_tile, a.q + at_head(0) * D, heads, D);
        fetch_heads<Shape>(g_tile, dout + at_head(0) * D, heads, D);
        if (n > 0) tiles.find(0, 0);
        if (n > 0) tiles.find(1, tile_of(1));
        __syncthreads();
        if (n > 0) tiles.fetch(0, 0);
        cg_cp_async_commit();

        float sum[Shape::HEAD_TILES][Shape::COLUMN_TILES][4] = {}; /* dq */
        /* delta's part of own keys, of heads `head` and head + 8; dq's sums are free in the first walk */
        float *const own_delta[2] = {&sum[0][0][0], &sum[0][0][2]};
        if (my.tid < HEADS) s->lse[my.tid] = my.tid < heads ? lse[at_head(my.tid)] : cg_infinity<float>;

        for (int step = 0; step < 2 * n; step++) {
            const int i = tile_of(step);
            cg_cp_async_wait<0>();
            warpgroup().shared_written();
            __syncthreads();
            if (step == n) {
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    float of_keys = *own_delta[r];
                    *own_delta[r] = 0;
                    of_keys += __shfl_xor_sync(0xffffffffu, of_keys, 1);
                    of_keys += __shfl_xor_sync(0xffffffffu, of_keys, 2);
                    if (my.quad == 0) s->sum[my.along_keys][my.head + 8 * r] = of_keys;
                }
                __syncthreads();
                if (my.tid < HEADS) {
                    float all = 0;
                    for (int w = 0; w < Shape::ALONG_KEYS; w++) all += s->sum[w][my.tid];
                    s->delta[my.tid] = all;
                    if (my.tid < heads) delta[at_head(my.tid)] = all;
                }
                __syncthreads();
            }
            if (step + 2 < 2 * n) tiles.find(step + 2, tile_of(step + 2));
            if (step + 1 < 2 * n) tiles.fetch(step + 1, tile_of(step + 1));
            cg_cp_async_commit();

            float x[2][KEY_TILES][4] = {}; /* q.key, g.key */
            if constexpr (Shape::PRODUCTS == ROWS_BY_GROUPS)
                group_row_products<Shape>(x, {q_tile, g_tile}, tiles.keys(step), s->swap);
            else
                row_products<Shape, 2>(x, {q_tile, g_tile}, head_lane, tiles.keys(step), key_lane);
#pragma unroll
            for (int k = 0; k < KEY_TILES; k++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    x[0][k][e] = tiles.has(step, my.key + k * 8 + e % 2)
                                     ? cg_exp(x[0][k][e] * a.scale - s->lse[my.head + e / 2 * 8])
                                     : 0;
            if (step < n) {
#pragma unroll
                for (int k = 0; k < KEY_TILES; k++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        *own_delta[e / 2] = cg_fma(x[0][k][e], x[1][k][e], *own_delta[e / 2]);
                continue;
            }
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int head = my.head + 8 * r;
                const float of_head = s->delta[head];
#pragma unroll
                for (int k = 0; k < KEY_TILES; k++) {
                    const float p0 = x[0][k][2 * r], p1 = x[0][k][2 * r + 1];
                    store_pair(p_tile, head, my.key + k * 8, p0, p1);
                    store_pair(dx_tile, head, my.key + k * 8, a.scale * p0 * (x[1][k][2 * r] - of_head),
                               a.scale * p1 * (x[1][k][2 * r + 1] - of_head));
                }
            }
            __syncthreads();
            add_weighted_tile<Shape>(sum, dx_tile, weight_lane, tiles.keys(step), column_lane, my.own_pieces);

            /* dkey of this tile: [KEYS, OWN_COLUMNS] per warp, TILES tiles of columns at a time */
#pragma unroll 1
            for (int c0 = 0; c0 < Shape::COLUMN_TILES; c0 += TILES) {
                float dkey[KEYS / 16][TILES][4] = {};
                const int piece = my.own_pieces + c0;
#pragma unroll
                for (int h = 0; h < HEADS / 16; h++)
#pragma unroll
                    for (int role = 0; role < 2; role++) {
                        const weight_tile weights = role ? dx_tile : p_tile;
                        const head_tile rows = role ? q_tile : g_tile;
                        uint32_t wa[KEYS / 16][4], rb[TILES / 2][4];
#pragma unroll
                        for (int m = 0; m < KEYS / 16; m++)
                            load_a_columns(wa[m], down(weights, h * 16), turned_lane, 0, 2 * m);
#pragma unroll
                        for (int k = 0; k < TILES / 2; k++)
                            load_b_columns(rb[k], down(rows, h * 16), row_lane, piece & ~7,
                                           (piece & 7) + 2 * k);
#pragma unroll
                        for (int m = 0; m < KEYS / 16; m++)
#pragma unroll
                            for (int k = 0; k < TILES / 2; k++) {
                                cg_mma_bf16_16x8x16(dkey[m][2 * k], wa[m], rb[k]);
                                cg_mma_bf16_16x8x16(dkey[m][2 * k + 1], wa[m], rb[k] + 2);
                            }
                    }
#pragma unroll
                for (int m = 0; m < KEYS / 16; m++)
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        const int key = m * 16 + my.group + 8 * r;
                        if (!tiles.has(step, key)) continue;
                        const int64_t slot = i < tiles.window_tiles
                                                 ? (int64_t)(t - tiles.low - i * KEYS - key)
                                                 : parts.W + (i - tiles.window_tiles) * KEYS + key;
                        typename key_parts<Shape>::run out;
#pragma unroll
                        for (int k = 0; k < TILES; k++)
                            out.pair[k] = cg_bf16_pair(dkey[m][k][2 * r], dkey[m][k][2 * r + 1]);
                        parts.at(t, part, slot)[piece / TILES * 4 + my.quad] = out;
                    }
            }
        }
        cg_cp_async_wait<0>();
        __syncthreads();
        if (n == 0 && my.tid < heads) delta[at_head(my.tid)] = 0;
        store_heads<Shape>(
            sum, [](int) { return 1.f; }, q_tile, dq + at_head(0) * D, heads, D);
    }
}

/* ---- gathering: a key's parts in order of the rows ---- */

CG_DEVICE float bf16_bits(uint32_t upper_half) {
    float x;
    memcpy(&x, &upper_half, sizeof x);
    return x;
}

/* What a key has so far: a lane's run of columns. */
template <typename Shape> struct key_sum {
    float x[key_parts<Shape>::RUN];
    CG_MEMBER key_sum(const float *from) {
#pragma unroll
        for (int i = 0; i < key_parts<Shape>::RUN; i++) x[i] = from ? from[i] : 0;
    }
    CG_MEMBER void add(const typename key_parts<Shape>::run &part) {
#pragma unroll
        for (int n = 0; n < key_parts<Shape>::TILES; n++) {
            x[2 * n] += bf16_bits(part.pair[n] << 16);
            x[2 * n + 1] += bf16_bits(part.pair[n] & 0xffff0000u);
        }
    }
    CG_MEMBER void store(float *to) const {
#pragma unroll
        for (int i = 0; i < key_parts<Shape>::RUN; i++) to[i] = x[i];
    }
    /* Rounded, in the order of columns. */
    CG_MEMBER void finish(cg_bf16 *row, int run, int D) const {
#pragma unroll
        for (int n = 0; n < key_parts<Shape>::TILES; n++) {
            const int column = key_parts<Shape>::column(run, n);
            if (column < D) *(uint32_t *)(row + column) = cg_bf16_pair(x[2 * n], x[2 * n + 1]);
        }
    }
};

/* Threads of a key, and keys of a block. */
template <typename Shape> struct gather_shape {
    static constexpr int THREADS = 256, OF_KEY = key_parts<Shape>::RUNS, KEYS = THREADS / OF_KEY;
    static_assert(THREADS % OF_KEY == 0, "whole keys");
};

/* dkv rows that the chunk's windows reach. A row that later chunks reach too waits in `waiting` [W - 1, COLUMNS], by its
 * number modulo W - 1; `waited` is the same of the chunk before. */
template <typename Shape>
CG_GLOBAL void gather_window_kernel(attention<cg_bf16> a, key_parts<Shape> parts, const int32_t *live,
                                    const float *waited, float *waiting, cg_bf16 *dkv) {
    typedef gather_shape<Shape> G;
    const int run = (int)threadIdx.x % G::OF_KEY;
    const int64_t t1 = parts.t0 + parts.n_rows,
                  first = cg_max((int64_t)0, parts.t0 - cg_max(parts.W - 1, (int64_t)0));
    for (int64_t j = first + (int64_t)blockIdx.x * G::KEYS + threadIdx.x / G::OF_KEY; j < t1;
         j += (int64_t)gridDim.x * G::KEYS) {
        const int64_t ring = parts.W > 1 ? j % (parts.W - 1) : 0,
                      at = ring * Shape::COLUMNS + run * key_parts<Shape>::RUN;
        key_sum<Shape> sum(j < parts.t0 ? waited + at : nullptr);
        const int64_t end = cg_min(j + parts.W, t1);
        for (int64_t t = cg_max(j, parts.t0); t < end; t++)
            if (live[t] && window_low(a.rows, t, a.W) <= j)
                for (int64_t g = 0; g < parts.groups; g++) sum.add(parts.at(t, g, t - j)[run]);
        if (j + parts.W > t1 && t1 < a.T_)
            sum.store(waiting + at);
        else
            sum.finish(dkv + j * a.D, run, (int)a.D);
    }
}

/* dckv rows, a chunk's part: next[j] is where the list of row j goes on. Sums [C, COLUMNS] are kept between chunks. */
template <typename Shape>
CG_GLOBAL void gather_chosen_kernel(attention<cg_bf16> a, key_parts<Shape> parts, const int32_t *live,
                                    inversion chosen, int64_t *next, float *sums, cg_bf16 *dckv) {
    typedef gather_shape<Shape> G;
    const int run = (int)threadIdx.x % G::OF_KEY;
    const bool is_first = parts.t0 == 0, is_last = parts.t0 + parts.n_rows == a.T_;
    const int64_t end_place = (parts.t0 + parts.n_rows) * a.K;
    for (int64_t j0 = (int64_t)blockIdx.x * G::KEYS; j0 < a.C; j0 += (int64_t)gridDim.x * G::KEYS) {
        const int64_t j = j0 + threadIdx.x / G::OF_KEY;
        int64_t at = 0, end = 0;
        if (j < a.C) {
            at = is_first ? chosen.start[j] : next[j];
            end = chosen.start[j + 1];
        }
        __syncthreads(); /* next has been read */
        if (j < a.C && (is_first || is_last || (at < end && chosen.reader[at] < end_place))) {
            float *kept = sums + j * Shape::COLUMNS + run * key_parts<Shape>::RUN;
            key_sum<Shape> sum(is_first ? nullptr : kept);
            for (; at < end && chosen.reader[at] < end_place; at++) {
                const int64_t t = chosen.reader[at] / a.K, k = chosen.reader[at] % a.K;
                if (!live[t]) continue;
                for (int64_t g = 0; g < parts.groups; g++) sum.add(parts.at(t, g, parts.W + k)[run]);
            }
            if (is_last)
                sum.finish(dckv + j * a.D, run, (int)a.D);
            else
                sum.store(kept);
            if (run == 0) next[j] = at;
        }
    }
}

/* ---- launching ---- */

/* Chunks of rows, and scratch. */
template <typename Shape> struct fast_grad_scratch {
    float *delta, *waiting[2], *sums;
    int32_t *live;
    int64_t *next;
    inversion chosen;
    key_parts<Shape> parts;
    int64_t rows_at_once;
    size_t bytes;
    fast_grad_scratch(void *workspace, int64_t T, int64_t H, int64_t C, int64_t K, int64_t W) {
#ifdef CG_CUDA_HOST
        const int64_t most_rows = 5; /* small tests have several chunks */
#else
        const int64_t most_rows = 512;
#endif
        const int64_t most_bytes = (int64_t)256 << 20;
        carver from = {(char *)workspace, 0};
        parts.W = W < T ? W : T;
        parts.slots = parts.W + K;
        parts.groups = (H + Shape::HEADS - 1) / Shape::HEADS;
        const int64_t row_bytes = parts.groups * parts.slots * Shape::COLUMNS * (int64_t)sizeof(cg_bf16);
        rows_at_once = row_bytes > 0 ? most_bytes / row_bytes : most_rows;
        rows_at_once = rows_at_once < 1 ? 1 : rows_at_once > most_rows ? most_rows : rows_at_once;
        if (rows_at_once > T) rows_at_once = T;
        const int64_t n_waiting = parts.W > 1 && rows_at_once < T ? parts.W - 1 : 0;
        delta = (float *)from.carve((size_t)(T * H) * sizeof(float));
        live = (int32_t *)from.carve((size_t)T * sizeof(int32_t));
        for (int i = 0; i < 2; i++)
            waiting[i] = (float *)from.carve((size_t)(n_waiting * Shape::COLUMNS) * sizeof(float));
        chosen = inversion_in(from, T, K, C);
        chosen.places = true;
        next = (int64_t *)from.carve((size_t)C * sizeof(int64_t));
        sums = (float *)from.carve((size_t)(C * Shape::COLUMNS) * sizeof(float));
        parts.data = (typename key_parts<Shape>::run *)from.carve((size_t)(rows_at_once * row_bytes));
        bytes = from.used;
    }
};

/* As forward_form. */
enum grad_form { GRAD_FAST, GRAD_WIDE, GRAD_GROUPS };

template <grad_form FORM, typename F> auto with_grad_shape(int64_t D, F use) {
    if constexpr (FORM == GRAD_WIDE)
        return use(tile_shape<64, 512, 32, 1>());
    else if constexpr (FORM == GRAD_GROUPS)
        return use(tile_shape<64, 512, 32, 1, ROWS_BY_GROUPS>());
    else
        return D <= 128 ? use(tile_shape<32, 128, 32, 2>()) : use(tile_shape<32, 512, 32, 1>());
}

inline bool fast_grad_fits(const cg_node *node) {
    const int64_t H = cg_dim(node->in[Q], 1), D = cg_dim(node->in[Q], 2);
    return H > 0 && D > 0 && D <= 512 && D % PIECE == 0 &&
           cg_dim(node->in[Q], 0) * cg_dim(node->in[TOPK], 1) <= INT32_MAX;
}

inline bool fast_wide_grad_fits(const cg_node *node) {
    return fast_grad_fits(node) && cg_dim(node->in[Q], 1) > 32 && cg_dim(node->in[Q], 2) > 128;
}

template <grad_form FORM> size_t fast_grad_workspace(const cg_node *node) {
    return with_grad_shape<FORM>(cg_dim(node->in[Q], 2), [&](auto shape) {
        return fast_grad_scratch<decltype(shape)>(nullptr, cg_dim(node->in[Q], 0), cg_dim(node->in[Q], 1),
                                                  cg_dim(node->in[CKV], 0), cg_dim(node->in[TOPK], 1),
                                                  ((const csa_attention_attr *)node->attr)->window)
            .bytes;
    });
}

template <grad_form FORM> size_t fast_grad_shared(const cg_node *node) {
    return with_grad_shape<FORM>(cg_dim(node->in[Q], 2), [](auto shape) {
        return CG_STATIC_BYTES + sizeof(grad_shared<decltype(shape)>);
    });
}

} // namespace

#endif
