/* Rows cut into chunks by their number alone, so that sums over rows do not depend on the threads in use: each
 * chunk is summed by one thread, and the chunks are added up in order. */
#ifndef CG_OPS_CHUNKS_H
#define CG_OPS_CHUNKS_H

#include <stddef.h>
#include <stdint.h>

enum { CG_MAX_CHUNKS = 16 };

/* How many chunks n rows give when each is worth at least `least` rows; never 0. */
static inline int64_t cg_chunk_count(int64_t n, int64_t least) {
    int64_t chunks = n / least;
    return chunks < 1 ? 1 : chunks > CG_MAX_CHUNKS ? (int64_t)CG_MAX_CHUNKS : chunks;
}

/* The first row of chunk c; of chunk `chunks`: n. */
static inline int64_t cg_chunk_start(int64_t n, int64_t chunks, int64_t c) {
    return n / chunks * c + (c < n % chunks ? c : n % chunks);
}

/* Bytes rounded up to a cache line, so that pieces of a workspace start on one. */
static inline size_t cg_piece(size_t bytes) { return (bytes + 63) & ~(size_t)63; }

#endif
