/* Tiles of bf16 in shared memory for tensor cores, and their fragments.
 *
 * A tile has rows of COLUMNS numbers (32, or a multiple of 64), cut into pieces of 16 bytes. A row's pieces are permuted by
 * its number, so that the eight rows an ldmatrix reads at once lie in different banks:
 *
 *   64 columns or more: piece p of row r at p ^ (r % 8);   32 columns: at p ^ (r / 2 % 4), two rows to a line of banks
 *
 * Rows follow each other, or lie in slabs of 64 columns, [COLUMNS / 64][ROWS][64], ROWS a multiple of 8: as wgmma reads them
 * (ops/cuda/wgmma.cuh) from a multiple of 1024 bytes. For ldmatrix both are the same; rows in one piece need fewer
 * registers for addresses.
 *
 * Fragments are those of cg_mma_bf16_16x8x16. */
#ifndef CG_OPS_CUDA_TILE_CUH
#define CG_OPS_CUDA_TILE_CUH

#include "ops/cuda/kernel.cuh"

namespace {

enum { PIECE = 8 }; /* numbers of a piece */

/* ROWS: of a slab; 0: no slabs. */
template <int COLUMNS, int ROWS = 0> struct tile {
    static_assert(COLUMNS == 32 || COLUMNS % 64 == 0, "banks");
    static_assert(ROWS % 8 == 0 && (ROWS == 0 || COLUMNS >= 64), "whole slabs");
    static constexpr int PIECES = COLUMNS / PIECE, PITCH = ROWS ? 64 : COLUMNS; /* numbers from row to row */
    static constexpr int SLAB = ROWS * 64;                                      /* and from slab to slab */
    cg_bf16 *data;
    static CG_MEMBER int offset(int row, int p) {
        const int turned = COLUMNS == 32 ? p ^ (row >> 1 & 3) : p ^ (row & 7);
        return row * PITCH + (ROWS ? p / 8 * SLAB + turned % 8 * PIECE : turned * PIECE);
    }
    /* From a number to the one 8 n pieces further along the rows. */
    static CG_MEMBER int along(int p8) { return ROWS ? p8 / 8 * SLAB : p8 * PIECE; }
    CG_MEMBER cg_bf16 *piece(int row, int p) const { return data + offset(row, p); }
};

CG_DEVICE void set_zero(cg_bf16 *piece) { *(float4 *)piece = make_float4(0, 0, 0, 0); }
CG_DEVICE void copy_piece(cg_bf16 *to, const cg_bf16 *from) { *(float4 *)to = *(const float4 *)from; }

/* The piece that this lane gives to an ldmatrix, found once for the rows of a fragment. Fragments further along the rows
 * are moved by p8 + p pieces: p8 a multiple of 8, which the permutation leaves alone, and p a multiple of what one ldmatrix
 * takes, which is an exclusive or. */
template <typename Tile> struct lane_piece {
    int offset;
    CG_MEMBER cg_bf16 *in(Tile x, int p8, int p) const {
        return x.data + (offset ^ p * PIECE) + Tile::along(p8);
    }
};

CG_DEVICE int lane_id() { return (int)threadIdx.x % 32; }

/* a, 16 rows and 2 pieces: rows of the tile. */
template <typename Tile> CG_DEVICE lane_piece<Tile> a_rows(int row0) {
    return {Tile::offset(row0 + lane_id() % 16, lane_id() / 16)};
}
template <typename Tile>
CG_DEVICE void load_a_rows(uint32_t a[4], Tile x, lane_piece<Tile> lane, int p8, int p) {
    cg_ldmatrix_x4(a, lane.in(x, p8, p));
}

/* a, 16 columns (2 pieces) of the tile as its rows, summed over 16 rows of the tile. */
template <typename Tile> CG_DEVICE lane_piece<Tile> a_columns(int row0) {
    return {Tile::offset(row0 + lane_id() % 8 + lane_id() / 16 * 8, lane_id() / 8 % 2)};
}
template <typename Tile>
CG_DEVICE void load_a_columns(uint32_t a[4], Tile x, lane_piece<Tile> lane, int p8, int p) {
    cg_ldmatrix_x4_trans(a, lane.in(x, p8, p));
}

/* b, rows of the tile as its columns: two b of 8 rows each and 2 pieces; or one of 8 rows for 4 pieces, two steps. */
template <typename Tile> CG_DEVICE lane_piece<Tile> b_rows(int row0) {
    return {Tile::offset(row0 + lane_id() % 8 + lane_id() / 16 * 8, lane_id() / 8 % 2)};
}
template <typename Tile> CG_DEVICE lane_piece<Tile> b_rows_two_steps(int row0) {
    return {Tile::offset(row0 + lane_id() % 8, lane_id() / 8)};
}
template <typename Tile>
CG_DEVICE void load_b_rows(uint32_t b[4], Tile x, lane_piece<Tile> lane, int p8, int p) {
    cg_ldmatrix_x4(b, lane.in(x, p8, p));
}

/* b, summed over 16 rows of the tile: two b of 8 columns each. */
template <typename Tile> CG_DEVICE lane_piece<Tile> b_columns(int row0) {
    return {Tile::offset(row0 + lane_id() % 16, lane_id() / 16)};
}
template <typename Tile>
CG_DEVICE void load_b_columns(uint32_t b[4], Tile x, lane_piece<Tile> lane, int p8, int p) {
    cg_ldmatrix_x4_trans(b, lane.in(x, p8, p));
}

/* The same further down: `rows` is a multiple of 8. */
template <typename Tile> CG_DEVICE Tile down(Tile x, int rows) { return {x.data + rows * Tile::PITCH}; }

/* Two neighbours of a row of d, rounded, as they lie in a tile: column is even. */
template <typename Tile> CG_DEVICE void store_pair(Tile x, int row, int column, float low, float high) {
    *(uint32_t *)(x.piece(row, column / PIECE) + column % PIECE) = cg_bf16_pair(low, high);
    CG_WROTE_TILE();
}
/* This lane's place in rows of d from a row and a piece on; p8 + p pieces further as in lane_piece. */
template <typename Tile> CG_DEVICE lane_piece<Tile> d_rows(int row0, int piece) {
    return {Tile::offset(row0 + lane_id() / 4, piece) + lane_id() % 4 * 2};
}
template <typename Tile>
CG_DEVICE void store_pair(Tile x, lane_piece<Tile> lane, int p8, int p, float low, float high) {
    *(uint32_t *)lane.in(x, p8, p) = cg_bf16_pair(low, high);
    CG_WROTE_TILE();
}

} // namespace

#endif
