/* Pairs of a token and a key that an op has to compute, from shapes alone: for costs. */
#ifndef CG_OPS_PAIRS_H
#define CG_OPS_PAIRS_H

#include <string.h>

#include "graph/op.h"

/* Segments that the rows behind a value are packed from: a value of segment_rows, or one that was made from such a value.
 * Costs take them as equally long; what shapes do not tell is 1. */
static inline double cg_segments_of(const cg_value *value) {
    const cg_node *node = value ? value->producer : NULL;
    if (!node) return 1;
    for (int i = -1; i < node->n_in; i++) {
        const cg_node *made = i < 0 ? node : node->in[i] ? node->in[i]->producer : NULL;
        if (!made || strcmp(made->op->name, "segment_rows")) continue;
        const int64_t n = cg_dim(made->in[0], 0) - 1;
        return n > 1 ? (double)n : 1;
    }
    return 1;
}

/* T tokens of n_segments sequences choose at most K each of the compressed rows that they see: of a sequence's own C /
 * n_segments, token t sees a share that grows from 0 to 1. */
static inline double cg_chosen_pairs(double T, double C, double K, double n_segments) {
    const double own = C / n_segments;
    if (C <= 0 || K <= 0) return 0;
    return K >= own ? T * own / 2 : T * K - K * K * T / (2 * own);
}

/* T tokens of n_segments sequences see the last `window` tokens of theirs, themselves included. */
static inline double cg_window_pairs(double T, double window, double n_segments) {
    const double reach = window < T / n_segments ? window : T / n_segments;
    return reach * T - n_segments * reach * (reach - 1) / 2;
}

#endif
