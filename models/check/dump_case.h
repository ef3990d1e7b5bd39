/* Inputs of one CSA layer, to make dumps of: from the toy model, from random numbers, or built to be hard.
 *
 * Everything is packed and in f64; a value is rounded to what the file will hold before anything is computed
 * from it, so that who reads the file computes from the same numbers. */
#ifndef CG_MODELS_DUMP_CASE_H
#define CG_MODELS_DUMP_CASE_H

#include "models/dsv4/config.h"

typedef struct cg_dump_case {
    int64_t n_rows, n_segments, n_compressed; /* T, B, C */
    int64_t n_heads, head_dim;                /* H, D */
    int64_t index_heads, index_dim;           /* Hi, Di */
    int64_t ratio, window;
    int64_t
        topk; /* requested; a file's lists are as wide as the longest segment has compressed rows, at most */
    double softmax_scale, loss_coeff;
    int32_t *cu_seqlens, *seqlens;           /* [B+1] physical offsets, [B] real lengths */
    int32_t *cu_compressed;                  /* [B+1] */
    double *query, *kv, *ckv, *sink;         /* [T,H,D], [T,D], [C,D], [H] */
    double *q_indexer, *weights, *k_indexer; /* [T,Hi,Di], [T,Hi] with every scale in it, [C,Di] */
    double *dout;                            /* [T,H,D]; 0 on rows that are not real */
} cg_dump_case;

/* Packed segments: n physical lengths, real ones (NULL: the same), rows behind the last segment. */
typedef struct cg_dump_lengths {
    int n;
    const int64_t *physical, *real;
    int64_t behind;
} cg_dump_lengths;

/* Normal numbers by (seed, name of the tensor). The sizes of `c` up to loss_coeff are given, T, B and C follow from
 * the lengths. False with a sentence; free in any case. */
bool cg_dump_case_random(cg_dump_case *c, const cg_dump_lengths *lengths, uint64_t seed, cg_error *error);

/* What CSA layer number `layer` of the toy model reads when it runs on random tokens. Parameters are scattered by
 * the config's seed (no sink 0, no norm 1), or come from the weights of a checkpoint (NULL: none). */
bool cg_dump_case_of_model(cg_dump_case *c, const cg_config *config, int64_t layer,
                           const cg_dump_lengths *lengths, const char *checkpoint, cg_error *error);

/* Round all real inputs to a dtype: f64, f32, or bf16 (the sink stays f32). */
void cg_dump_case_round(cg_dump_case *c, cg_dtype dtype);

void cg_dump_case_free(cg_dump_case *c);

#endif
