/* What the tensor-core kernels of csa_attention and its gradient share: a block's row and its keys, fetched in tiles while
 * earlier ones are worked on, and the products of the row's heads with a tile of keys. */
#ifndef CG_OPS_CUDA_CSA_ATTENTION_TILES_CUH
#define CG_OPS_CUDA_CSA_ATTENTION_TILES_CUH

#include "ops/cuda/csa/csa_attention.cuh"
#include "ops/cuda/wgmma.cuh"

namespace {

enum { FAST_WARPS = 8, FAST_THREADS = 32 * FAST_WARPS };

/* Who makes the products of a block: warps, by mma.sync; two groups of four warps those over columns, or all, by wgmma, for
 * which there must be 64 heads (wgmma.cuh). */
enum products_by { BY_WARPS, ROWS_BY_GROUPS, BY_GROUPS };

/* Tiles of a block: HEADS heads (a multiple of 16) of a row, keys of COLUMNS numbers, KEYS at a time. BLOCKS of a
 * multiprocessor bound the registers. */
template <int HEADS_, int COLUMNS_, int KEYS_, int BLOCKS_, products_by PRODUCTS_ = BY_WARPS>
struct tile_shape {
    static constexpr int HEADS = HEADS_, COLUMNS = COLUMNS_, KEYS = KEYS_, BLOCKS = BLOCKS_;
    static constexpr products_by PRODUCTS = PRODUCTS_;
    static constexpr bool SLABS = PRODUCTS != BY_WARPS, GROUPS = PRODUCTS == BY_GROUPS;
    static constexpr int PIECES = COLUMNS / PIECE;
    typedef tile<COLUMNS, SLABS ? HEADS : 0> head_tile;
    typedef tile<COLUMNS, SLABS ? KEYS : 0> key_tile;
    typedef tile<KEYS, GROUPS ? HEADS : 0> weight_tile;
    /* products [HEADS, KEYS]: warps side by side along the heads, 16 each, and along the keys */
    static constexpr int ALONG_HEADS = HEADS / 16, ALONG_KEYS = FAST_WARPS / ALONG_HEADS;
    static constexpr int OWN_KEYS = KEYS / ALONG_KEYS, KEY_TILES = OWN_KEYS / 8;
    static constexpr int STEPS = KEY_TILES % 2 ? 2 : 1; /* of 16 columns, that one load of keys is for */
    /* products [HEADS, COLUMNS]: a warp has all heads and these columns; of groups, 16 heads as above, and each group has
     * its columns */
    static constexpr int HEAD_TILES = GROUPS ? 1 : HEADS / 16,
                         OWN_COLUMNS = COLUMNS / (GROUPS ? 2 : FAST_WARPS), COLUMN_TILES = OWN_COLUMNS / 8;
    static_assert(ALONG_HEADS <= FAST_WARPS && OWN_KEYS % 8 == 0 && COLUMN_TILES % 2 == 0, "whole fragments");
    static_assert(KEYS * PIECES % FAST_THREADS == 0 && KEYS <= FAST_THREADS && HEADS <= FAST_THREADS,
                  "threads");
    static_assert(!SLABS || (HEADS == 64 && FAST_THREADS == 2 * GROUP_THREADS), "two groups");
};

/* Where a thread stands in the products. */
template <typename Shape> struct thread_place {
    int tid, warp, group, quad;
    int along_heads, along_keys;
    int head;       /* its products [HEADS, KEYS] are of heads `head` and head + 8 ... */
    int key;        /* ... and of keys key + 8 n and key + 8 n + 1 */
    int sum_head;   /* of products [HEADS, COLUMNS]: the first head, of others 8 further, ... */
    int own_pieces; /* ... and the first piece */
    CG_MEMBER thread_place()
        : tid((int)threadIdx.x), warp(tid / 32), group(tid % 32 / 4), quad(tid % 4),
          along_heads(warp % Shape::ALONG_HEADS), along_keys(warp / Shape::ALONG_HEADS),
          head(along_heads * 16 + group), key(along_keys * Shape::OWN_KEYS + 2 * quad),
          sum_head(Shape::GROUPS ? head : group),
          own_pieces((Shape::GROUPS ? along_keys : warp) * (Shape::OWN_COLUMNS / PIECE)) {}
};

/* Two tiles of keys in shared memory, and the rows of kv or ckv that they come from (-1: none) for three. */
template <typename Shape> struct key_buffers {
    cg_bf16 keys[2][Shape::KEYS * Shape::COLUMNS];
    int32_t index[3][Shape::KEYS];
};

/* The largest of all threads' numbers, in all threads. */
CG_DEVICE int block_max_int(int x, int32_t *of_warps) {
    for (int by = 16; by; by /= 2) {
        const int other = __shfl_xor_sync(0xffffffffu, x, by);
        x = other > x ? other : x;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
    __syncthreads();
    for (int w = 0; w < FAST_WARPS; w++) x = of_warps[w] > x ? of_warps[w] : x;
    return x;
}

/* The keys of row t in tiles, first of its window, then of its places up to the last that is not empty. Tiles pass through
 * the buffers by step: 0, 1, ... */
template <typename Shape> struct key_tiles {
    const attention<cg_bf16> &a;
    key_buffers<Shape> &s;
    const int32_t *topk;
    int low, n_window, n_places, window_tiles, n_tiles;

    CG_MEMBER key_tiles(const attention<cg_bf16> &all, key_buffers<Shape> &buffers, int t)
        : a(all), s(buffers), topk(all.topk + (int64_t)t * all.K), low((int)window_low(all.rows, t, all.W)),
          n_window(t + 1 - low), n_places(0) {
        for (int k = (int)threadIdx.x; k < (int)a.K; k += FAST_THREADS)
            if (topk[k] >= 0 && topk[k] < a.C) n_places = k + 1;
        n_places = block_max_int(n_places, s.index[0]);
        window_tiles = (n_window + Shape::KEYS - 1) / Shape::KEYS;
        n_tiles = window_tiles + (n_places + Shape::KEYS - 1) / Shape::KEYS;
    }

    /* Columns beyond D of both buffers: zero, and not touched again. */
    static CG_MEMBER void clear_rest(key_buffers<Shape> &s, int D) {
        for (int n = (int)threadIdx.x; n < 2 * Shape::KEYS * Shape::PIECES; n += FAST_THREADS)
            if (n % Shape::PIECES * PIECE >= D)
                set_zero(typename Shape::key_tile{s.keys[n / (Shape::KEYS * Shape::PIECES)]}.piece(
                    n / Shape::PIECES % Shape::KEYS, n % Shape::PIECES));
    }

    /* Find the rows of tile i for `step`; a barrier later they can be fetched. */
    CG_MEMBER void find(int step, int i) const {
        const int tid = (int)threadIdx.x, place = (i < window_tiles ? i : i - window_tiles) * Shape::KEYS + tid;
        if (tid >= Shape::KEYS) return;
        int32_t row = -1;
        if (i < window_tiles) {
            if (place < n_window) row = low + place;
        } else if (place < n_places) {
            row = topk[place] >= 0 && topk[place] < a.C ? topk[place] : -1;
        }
        s.index[step % 3][tid] = row;
    }

    /* Send for tile i; zeros in the place of no row. */
    CG_MEMBER void fetch(int step, int i) const {
        const cg_bf16 *from = i < window_tiles ? a.kv : a.ckv;
        const typename Shape::key_tile to = keys(step);
        const int D = (int)a.D;
#pragma unroll
        for (int n = (int)threadIdx.x; n < Shape::KEYS * Shape::PIECES; n += FAST_THREADS) {
            const int row = n / Shape::PIECES, p = n % Shape::PIECES;
            const int64_t index = s.index[step % 3][row];
            if (p * PIECE >= D) continue;
            if (index >= 0)
                cg_cp_async_16(to.piece(row, p), from + index * D + p * PIECE);
            else
                set_zero(to.piece(row, p));
        }
    }

    CG_MEMBER typename Shape::key_tile keys(int step) const { return {s.keys[step % 2]}; }
    CG_MEMBER bool has(int step, int key) const { return s.index[step % 3][key] >= 0; }
};

/* Send for `heads` rows of D numbers; zeros below and beside them. */
template <typename Shape>
CG_DEVICE void fetch_heads(typename Shape::head_tile to, const cg_bf16 *from, int heads, int D) {
    for (int n = (int)threadIdx.x; n < Shape::HEADS * Shape::PIECES; n += FAST_THREADS) {
        const int row = n / Shape::PIECES, p = n % Shape::PIECES;
        if (row < heads && p * PIECE < D)
            cg_cp_async_16(to.piece(row, p), from + row * D + p * PIECE);
        else
            set_zero(to.piece(row, p));
    }
}

/* x[o] += rows of heads[o] times rows of keys, over all columns: 16 heads and OWN_KEYS keys per warp. */
template <typename Shape, int N>
CG_DEVICE void row_products(float x[N][Shape::KEY_TILES][4], const typename Shape::head_tile (&heads)[N],
                            lane_piece<typename Shape::head_tile> head_lane, typename Shape::key_tile keys,
                            lane_piece<typename Shape::key_tile> key_lane) {
    constexpr int STEPS = Shape::STEPS, KEY_TILES = Shape::KEY_TILES;
    uint32_t a[2][N][STEPS][4], b[2][KEY_TILES][STEPS][2]; /* the next ones while these are multiplied */
    const auto load = [&](int to, int p8, int p) {
#pragma unroll
        for (int o = 0; o < N; o++)
#pragma unroll
            for (int step = 0; step < STEPS; step++)
                load_a_rows(a[to][o][step], heads[o], head_lane, p8, p + 2 * step);
#pragma unroll
        for (int n = 0; n < KEY_TILES; n += 2 / STEPS)
            load_b_rows(b[to][n][0], down(keys, n * 8), key_lane, p8, p);
    };
    load(0, 0, 0);
#pragma unroll 1
    for (int p8 = 0; p8 < Shape::PIECES; p8 += 8)
#pragma unroll
        for (int p = 0; p < 8; p += 2 * STEPS) {
            const int now = p / (2 * STEPS) % 2;
            if (p + 2 * STEPS < 8)
                load(!now, p8, p + 2 * STEPS);
            else if (p8 + 8 < Shape::PIECES)
                load(!now, p8 + 8, 0);
#pragma unroll
            for (int step = 0; step < STEPS; step++)
#pragma unroll
                for (int o = 0; o < N; o++)
#pragma unroll
                    for (int n = 0; n < KEY_TILES; n++)
                        cg_mma_bf16_16x8x16(x[o][n], a[now][o][step], b[now][n][step]);
        }
}

/* As row_products of two, x set. The first group multiplies heads[0] by all keys, the second heads[1], and they exchange
 * what belongs to the other's keys by way of `swap`. By the whole block, which comes together in it. */
template <typename Shape> using key_swap = float4[Shape::KEY_TILES][FAST_THREADS];
template <typename Shape>
CG_DEVICE void group_row_products(float (&x)[2][Shape::KEY_TILES][4],
                                  const typename Shape::head_tile (&heads)[2], typename Shape::key_tile keys,
                                  key_swap<Shape> &swap) {
    constexpr int KEY_TILES = Shape::KEY_TILES;
    const int tid = (int)threadIdx.x, group = tid / GROUP_THREADS;
    warpgroup products;
    float all[2 * KEY_TILES][4];
    products.begin();
    products.set_rows(all, group ? heads[1] : heads[0], 0, keys, 0);
    products.commit();
    products.template wait<0>(all);
#pragma unroll
    for (int n = 0; n < KEY_TILES; n++) {
        float theirs[4];
#pragma unroll
        for (int e = 0; e < 4; e++) theirs[e] = group ? all[n][e] : all[KEY_TILES + n][e];
        swap[n][tid] = make_float4(theirs[0], theirs[1], theirs[2], theirs[3]);
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < KEY_TILES; n++) {
        const float4 other = swap[n][tid ^ GROUP_THREADS];
        const float got[4] = {other.x, other.y, other.z, other.w};
#pragma unroll
        for (int e = 0; e < 4; e++) {
            x[0][n][e] = group ? got[e] : all[n][e];
            x[1][n][e] = group ? all[KEY_TILES + n][e] : got[e];
        }
    }
}

/* This lane's piece of the rows of keys in row_products. */
template <typename Shape> CG_DEVICE lane_piece<typename Shape::key_tile> key_rows(int along_keys) {
    return Shape::STEPS == 1 ? b_rows<typename Shape::key_tile>(along_keys * Shape::OWN_KEYS)
                             : b_rows_two_steps<typename Shape::key_tile>(along_keys * Shape::OWN_KEYS);
}

/* sum += weights [HEADS, KEYS] times keys: all heads and OWN_COLUMNS columns per warp. */
template <typename Shape>
CG_DEVICE void
add_weighted_tile(float sum[Shape::HEAD_TILES][Shape::COLUMN_TILES][4], typename Shape::weight_tile weights,
                  lane_piece<typename Shape::weight_tile> weight_lane, typename Shape::key_tile keys,
                  lane_piece<typename Shape::key_tile> column_lane, int own_pieces) {
#pragma unroll
    for (int k = 0; k < Shape::KEYS / 16; k++) {
        uint32_t a[Shape::HEAD_TILES][4];
#pragma unroll
        for (int m = 0; m < Shape::HEAD_TILES; m++)
            load_a_rows(a[m], down(weights, m * 16), weight_lane, 0, 2 * k);
#pragma unroll
        for (int n = 0; n < Shape::COLUMN_TILES; n += 2) {
            uint32_t b[4];
            load_b_columns(b, down(keys, k * 16), column_lane, own_pieces & ~7, (own_pieces & 7) + n);
#pragma unroll
            for (int m = 0; m < Shape::HEAD_TILES; m++) {
                cg_mma_bf16_16x8x16(sum[m][n], a[m], b);
                cg_mma_bf16_16x8x16(sum[m][n + 1], a[m], b + 2);
            }
        }
    }
}

/* Rows of sum times factor [HEADS], rounded, by way of `staging` to `heads` rows of D numbers. By the whole block; begins and
 * ends with threads apart. */
template <typename Shape, typename Factor>
CG_DEVICE void store_heads(const float sum[Shape::HEAD_TILES][Shape::COLUMN_TILES][4], Factor factor,
                           typename Shape::head_tile staging, cg_bf16 *to, int heads, int D) {
    const thread_place<Shape> my;
    const auto lane = d_rows<typename Shape::head_tile>(my.sum_head - my.group, my.own_pieces);
#pragma unroll
    for (int m = 0; m < Shape::HEAD_TILES; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float by = factor(my.sum_head + m * 16 + 8 * r);
#pragma unroll
            for (int n = 0; n < Shape::COLUMN_TILES; n++)
                store_pair(down(staging, m * 16 + 8 * r), lane, n & ~7, n & 7, sum[m][n][2 * r] * by,
                           sum[m][n][2 * r + 1] * by);
        }
    __syncthreads();
    for (int n = my.tid; n < heads * Shape::PIECES; n += FAST_THREADS)
        if (n % Shape::PIECES * PIECE < D)
            copy_piece(to + (int64_t)(n / Shape::PIECES) * D + n % Shape::PIECES * PIECE,
                       staging.piece(n / Shape::PIECES, n % Shape::PIECES));
}

} // namespace

#endif
