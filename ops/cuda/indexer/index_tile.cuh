/* Index scores on tensor cores: one query's heads stay in the registers of a warp, keys come by in shared memory, 16 at a
 * time, and relu, head weights and the sum over heads are done where the products come out.
 *
 *   x[key, head] = k[key, :] . q[head, :]       16 keys x 64 heads, DI / 16 steps of m16n8k16, sums in f32
 *   score[key]   = sum_h w[h] relu(x[key, h])
 *
 * Keys are the rows of the products and heads their columns, so a lane has 2 keys and 16 heads, and what is left is a sum
 * over 4 lanes. Registers of a lane for 64 heads of 128 channels: 128 of q, 32 of x, 16 of w. 64 products take 8
 * ldmatrix. */
#ifndef CG_OPS_CUDA_INDEX_TILE_CUH
#define CG_OPS_CUDA_INDEX_TILE_CUH

#include "ops/cuda/indexer/indexer.cuh"
#include "ops/cuda/tile.cuh"

namespace {

constexpr int TILE_HEADS = 64, TILE_CHANNELS = 128; /* the most that it can do */

/* ---- tiles of bf16 in shared memory, and the fragments of cg_mma_bf16_16x8x16 ----
 *
 * Unlike those of ops/cuda/tile.cuh, whose pieces are permuted, a row of COLUMNS numbers is followed by an empty piece, so
 * that the 8 rows of an ldmatrix lie in different banks: fewer instructions for an address. */

template <int COLUMNS> struct padded_tile {
    static constexpr int PIECES = COLUMNS / PIECE, PITCH = COLUMNS + PIECE;
    cg_bf16 *data;
    CG_MEMBER cg_bf16 *piece(int row, int p) const { return data + row * PITCH + p * PIECE; }
};

/* Rows of a matrix [.., n] in global memory, n a multiple of PIECE, into rows of tiles: a thread copies the same piece of
 * every row it is asked for. Zeros behind n, and where there is no row. */
template <int COLUMNS> struct row_copy {
    const cg_bf16 *pieces;
    uint32_t n;
    int p;
    bool is_piece;

    /* threads: any number, of which this is `thread`; piece thread % PIECES is this one's. */
    CG_MEMBER row_copy(const cg_bf16 *matrix, int64_t length, int thread)
        : pieces(matrix), n((uint32_t)length), p(thread % padded_tile<COLUMNS>::PIECES),
          is_piece(p * PIECE < (int)n) {
        if (is_piece) pieces += p * PIECE;
    }
    template <typename Tile> CG_MEMBER void queue(Tile to, int row, int from_row, bool is_row) const {
        static_assert(Tile::PIECES == padded_tile<COLUMNS>::PIECES, "rows of COLUMNS");
        cg_cp_async_16(to.piece(row, p), pieces + (is_row ? (uint64_t)(uint32_t)from_row * n : 0),
                       is_piece && is_row);
    }
};

/* The left side: 16 rows from row0 on, columns of pieces p and p + 1. */
template <int COLUMNS> CG_DEVICE void left_of_rows(uint32_t a[4], padded_tile<COLUMNS> x, int row0, int p) {
    const int lane = (int)threadIdx.x % CG_WARP;
    cg_ldmatrix_x4(a, x.piece(row0 + lane % 16, p + lane / 16));
}

/* The left side out of columns: 16 columns, those of pieces p and p + 1, by 16 rows from row0 on. */
template <int COLUMNS> CG_DEVICE void left_of_columns(uint32_t a[4], padded_tile<COLUMNS> x, int row0, int p) {
    const int lane = (int)threadIdx.x % CG_WARP;
    cg_ldmatrix_x4_trans(a, x.piece(row0 + lane % 8 + lane / 16 * 8, p + lane / 8 % 2));
}

/* The right side, twice: columns are 8 rows from row0 on; summed over pieces p and p + 1, and p + 2 and p + 3. */
template <int COLUMNS> CG_DEVICE void right_of_rows(uint32_t b[2][2], padded_tile<COLUMNS> x, int row0, int p) {
    const int lane = (int)threadIdx.x % CG_WARP;
    cg_ldmatrix_x4(b[0], x.piece(row0 + lane % 8, p + lane / 8));
}

/* The right side, twice: columns are those of pieces p, and p + 1; summed over 16 rows from row0 on. */
template <int COLUMNS>
CG_DEVICE void right_of_columns(uint32_t b[2][2], padded_tile<COLUMNS> x, int row0, int p) {
    const int lane = (int)threadIdx.x % CG_WARP;
    cg_ldmatrix_x4_trans(b[0], x.piece(row0 + lane % 16, p + lane / 16));
}

/* Sums over the 4 lanes of a group, that of part[t] in lane t. */
CG_DEVICE float sum_of_lanes(const float part[4]) {
    const int t = (int)threadIdx.x % 4;
    const float a = t & 2 ? part[2] : part[0], b = t & 2 ? part[3] : part[1];
    const float pair0 = a + __shfl_xor_sync(0xffffffffu, t & 2 ? part[0] : part[2], 2);
    const float pair1 = b + __shfl_xor_sync(0xffffffffu, t & 2 ? part[1] : part[3], 2);
    return (t & 1 ? pair1 : pair0) + __shfl_xor_sync(0xffffffffu, t & 1 ? pair0 : pair1, 1);
}

/* ---- one query ---- */

template <int DI> struct tile_query {
    static constexpr int STEPS = DI / 16, HEADS = TILE_HEADS / 8;
    uint32_t q[HEADS][STEPS][2];
    float w[HEADS][2];

    /* q [Hi, Di], w [Hi]; nothing is read where there is no row. Di is a multiple of 8. */
    CG_MEMBER void load(const cg_bf16 *query, const cg_bf16 *weights, int64_t Hi, int64_t Di, bool is_row) {
        const int lane = (int)threadIdx.x % CG_WARP, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int n = 0; n < HEADS; n++) {
            const uint32_t *row = (const uint32_t *)(query + (8 * n + g) * Di); /* pairs of channels */
            const bool is_head = is_row && 8 * n + g < Hi;
#pragma unroll
            for (int s = 0; s < STEPS; s++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    q[n][s][half] = is_head && 16 * s + 8 * half < Di ? row[8 * s + 4 * half + t] : 0;
#pragma unroll
            for (int i = 0; i < 2; i++)
                w[n][i] = is_row && 8 * n + 2 * t + i < Hi ? cg_up(weights[8 * n + 2 * t + i]) : 0;
        }
    }

    /* Scores of 16 keys, rows of a tile from row0 on: what this lane has of those of keys g and g + 8. */
    CG_MEMBER void add_up(padded_tile<DI> keys, int row0, float part[2]) const {
        float x[HEADS][4];
#pragma unroll
        for (int n = 0; n < HEADS; n++) x[n][0] = x[n][1] = x[n][2] = x[n][3] = 0;
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            uint32_t k[4];
            left_of_rows(k, keys, row0, 2 * s);
#pragma unroll
            for (int n = 0; n < HEADS; n++) cg_mma_bf16_16x8x16(x[n], k, q[n][s]);
        }
        part[0] = part[1] = 0;
#pragma unroll
        for (int n = 0; n < HEADS; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) part[i / 2] = cg_fma(w[n][i % 2], cg_relu(x[n][i]), part[i / 2]);
    }

    /* Scores of 32 keys, that of key `lane` for each lane. */
    CG_MEMBER float scores(padded_tile<DI> keys, int row0) const {
        const int lane = (int)threadIdx.x % CG_WARP;
        float part[4];
        add_up(keys, row0, part);
        add_up(keys, row0 + 16, part + 2);
        const float sum = sum_of_lanes(part);
        /* Lane (g, t) has key 8 t + g. */
        return __shfl_sync(0xffffffffu, sum, lane % 8 * 4 + lane / 8);
    }
};

} // namespace

#endif
