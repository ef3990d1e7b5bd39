/* Tiles of bf16 in shared memory for tensor cores, and their fragments.
 *
 * A tile has rows of COLUMNS numbers (32, or a multiple of 64), cut into pieces of 16 bytes. A row's pieces are permuted by
 * its number, so that the eight rows an ldmatrix reads at once lie in different banks:
 *
 *   64 columns or more: piece p of row r at p ^ (r % 8);   32 columns: at p ^ (r / 2 % 4), two rows to a line of banks
 *
 * Fragments are those of cg_mma_bf16_16x8x16. What follows is the interface that a kernel's products use; other tensor
 * instructions would stand behind it. */
#ifndef CG_OPS_CUDA_TILE_CUH
#define CG_OPS_CUDA_TILE_CUH

#include "ops/cuda/kernel.cuh"

namespace {

enum { PIECE = 8 }; /* numbers of a piece */

template <int COLUMNS> struct tile {
    static_assert(COLUMNS == 32 || COLUMNS % 64 == 0, "banks");
    static constexpr int PIECES = COLUMNS / PIECE;
    cg_bf16 *data;
    static CG_MEMBER int offset(int row, int p) {
        return row * COLUMNS + (PIECES >= 8 ? p ^ (row & 7) : p ^ (row >> 1 & 3)) * PIECE;
    }
    CG_MEMBER cg_bf16 *piece(int row, int p) const { return data + offset(row, p); }
};

CG_DEVICE void set_zero(cg_bf16 *piece) { *(float4 *)piece = make_float4(0, 0, 0, 0); }
CG_DEVICE void copy_piece(cg_bf16 *to, const cg_bf16 *from) { *(float4 *)to = *(const float4 *)from; }

/* The piece that this lane gives to an ldmatrix, found once for the rows of a fragment. Fragments further along the rows
 * are moved by p8 + p pieces: p8 a multiple of 8, which the permutation leaves alone, and p a multiple of what one ldmatrix
 * takes, which is an exclusive or. */
template <int COLUMNS> struct lane_piece {
    int offset;
    CG_MEMBER const cg_bf16 *in(tile<COLUMNS> x, int p8, int p) const {
        return x.data + (offset ^ p * PIECE) + p8 * PIECE;
    }
};

CG_DEVICE int lane_id() { return (int)threadIdx.x % 32; }

/* a, 16 rows and 2 pieces: rows of the tile. */
template <int COLUMNS> CG_DEVICE lane_piece<COLUMNS> a_rows(int row0) {
    return {tile<COLUMNS>::offset(row0 + lane_id() % 16, lane_id() / 16)};
}
template <int COLUMNS>
CG_DEVICE void load_a_rows(uint32_t a[4], tile<COLUMNS> x, lane_piece<COLUMNS> lane, int p8, int p) {
    cg_ldmatrix_x4(a, lane.in(x, p8, p));
}

/* a, 16 columns (2 pieces) of the tile as its rows, summed over 16 rows of the tile. */
template <int COLUMNS> CG_DEVICE lane_piece<COLUMNS> a_columns(int row0) {
    return {tile<COLUMNS>::offset(row0 + lane_id() % 8 + lane_id() / 16 * 8, lane_id() / 8 % 2)};
}
template <int COLUMNS>
CG_DEVICE void load_a_columns(uint32_t a[4], tile<COLUMNS> x, lane_piece<COLUMNS> lane, int p8, int p) {
    cg_ldmatrix_x4_trans(a, lane.in(x, p8, p));
}

/* b, rows of the tile as its columns: two b of 8 rows each and 2 pieces; or one of 8 rows for 4 pieces, two steps. */
template <int COLUMNS> CG_DEVICE lane_piece<COLUMNS> b_rows(int row0) {
    return {tile<COLUMNS>::offset(row0 + lane_id() % 8 + lane_id() / 16 * 8, lane_id() / 8 % 2)};
}
template <int COLUMNS> CG_DEVICE lane_piece<COLUMNS> b_rows_two_steps(int row0) {
    return {tile<COLUMNS>::offset(row0 + lane_id() % 8, lane_id() / 8)};
}
template <int COLUMNS>
CG_DEVICE void load_b_rows(uint32_t b[4], tile<COLUMNS> x, lane_piece<COLUMNS> lane, int p8, int p) {
    cg_ldmatrix_x4(b, lane.in(x, p8, p));
}

/* b, summed over 16 rows of the tile: two b of 8 columns each. */
template <int COLUMNS> CG_DEVICE lane_piece<COLUMNS> b_columns(int row0) {
    return {tile<COLUMNS>::offset(row0 + lane_id() % 16, lane_id() / 16)};
}
template <int COLUMNS>
CG_DEVICE void load_b_columns(uint32_t b[4], tile<COLUMNS> x, lane_piece<COLUMNS> lane, int p8, int p) {
    cg_ldmatrix_x4_trans(b, lane.in(x, p8, p));
}

/* The same further down: `rows` is a multiple of 8. */
template <int COLUMNS> CG_DEVICE tile<COLUMNS> down(tile<COLUMNS> x, int rows) {
    return {x.data + rows * COLUMNS};
}

/* Two neighbours of a row of d, rounded, as they lie in a tile: column is even. */
template <int COLUMNS> CG_DEVICE void store_pair(tile<COLUMNS> x, int row, int column, float low, float high) {
    *(uint32_t *)(x.piece(row, column / PIECE) + column % PIECE) = cg_bf16_pair(low, high);
}

} // namespace

#endif
