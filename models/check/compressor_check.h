/* A dump of gated pooling alone (no norm, no rotation), held against csa_compress in f64.
 *
 * Tensors, each with any prefix P: P.in.kv, P.in.gate [S, B, c*d] (or packed [T, c*d]), P.in.ape [ratio, c*d],
 * P.out.compressed [n, B, d], and for gradients P.in.dout as the output, P.grad.kv, P.grad.gate, P.grad.ape. c is 2 with
 * overlap. Packed segments: P.in.cu_seqlens, or the metadata P_segment_lengths, "[21, 3, 14]". */
#ifndef CG_MODELS_COMPRESSOR_CHECK_H
#define CG_MODELS_COMPRESSOR_CHECK_H

#include "core/files/archive.h"
#include "graph/backend.h"

typedef struct cg_compressor_quantity {
    char name[96]; /* as in the file */
    bool ok;       /* within 4 roundings of the stored type, times the terms of its longest sum's root */
    double worst_rel;
    int64_t segment, position; /* of the first row that differs; -1: none */
    double got, expected;
} cg_compressor_quantity;

enum { CG_COMPRESSOR_QUANTITIES = 64 };

/* How many groups of such tensors a file holds. */
int cg_compressor_groups(const cg_archive *archive);

/* Check all groups, on a backend (NULL: the CPU). tolerance 0: expected rounding. False with a sentence for shapes that do not fit, or a group that
 * has nothing to compare. */
bool cg_compressor_check(const cg_archive *archive, const cg_backend *backend, double tolerance,
                         cg_compressor_quantity *quantities, int *n, cg_error *error);

#endif
