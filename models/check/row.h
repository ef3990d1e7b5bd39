/* One query row by itself: its attention over explicit rows, its indexer loss, and all gradients.
 *
 *     cg_row *row = cg_row_read(json, bytes, NULL, 0, &error);      check a description
 *     cg_row_result *result = cg_row_run(row, NULL, &error);        compute
 *     const cg_row_array *dq = cg_row_find(result, "dq");
 *
 * The description is a JSON object (keys: cg_row_key_at). The row attends to every window row and to the compressed
 * rows of its index list; -1 in the list is no row, a row that is listed twice counts twice. Attention, and the loss
 * under every contract that the engine's ops know, are computed by these ops in the dtype asked for; other contracts
 * by models/check/contract.h in f64. */
#ifndef CG_MODELS_ROW_H
#define CG_MODELS_ROW_H

#include "graph/backend.h"
#include "models/check/contract.h"

/* What a description says, checked. Arrays that are absent are NULL. */
typedef struct cg_row {
    int64_t H, D, W, C, K, Hi, Di; /* W window rows, C compressed rows, K places of the list */
    double *q;                     /* [H, D] */
    double *window, *compressed;   /* [W, D], [C, D]; a row that no index names may hold NaN or infinity */
    double *sink;                  /* [H], always there; -inf: no sink */
    double *dout;                  /* [H, D] */
    int32_t *index;                /* [K]; NULL when the engine is to select K rows */
    double *scores;                /* [C], or else all of: */
    double *q_index, *w, *k_index; /* [Hi, Di], [Hi], [C, Di] */
    double *target;                /* [C], in place of the teacher */
    double scale, coeff;
    bool
        from_logits; /* q and rows only carry given logits: outputs and gradients of the attention say nothing */
    cg_dtype dtype;
    cg_contract contract;
} cg_row;

/* Read a description, then n_settings pairs of key and JSON value over it (a value that is no JSON is a word: f64).
 * text NULL: the settings alone. Reads exactly `bytes` bytes of any content. NULL with a sentence that names the key:
 * unknown or repeated keys, ragged arrays, sizes that do not fit, indices out of range, numbers that are not finite
 * where they would be read. */
cg_row *cg_row_read(const char *text, size_t bytes, const char *const (*settings)[2], int n_settings,
                    cg_error *error);
void cg_row_free(cg_row *row); /* NULL is fine */

/* A key of the description and what it holds; NULL when there is no such i. */
typedef struct cg_row_key {
    const char *name, *other_name; /* other_name: as in dumps; NULL: none */
    const char *doc;
} cg_row_key;
const cg_row_key *cg_row_key_at(int i);

/* A result [rows, columns], or [columns] when it is no matrix. */
typedef struct cg_row_array {
    const char *name, *doc;
    int64_t rows, columns;
    bool matrix, integer;
    double *x;
} cg_row_array;

enum { CG_ROW_ARRAYS = 32 };

/* Attention (with q): logits, weights [H, K] by place of the list, window_logits, window_weights [H, W],
 * sink_weight, lse, window_lse [H] (window and sink), out [H, D]; with dout: dq [H, D], dwindow [W, D],
 * dcompressed [C, D], dsink [H]. Always: index [K]. Loss (with scores): support [N], the compressed rows of list or,
 * dense, all; scores, target, predict, dscores [N]; kl, loss [1]; dq_index, dw, dk_index where these exist.
 * Gradients of the loss hold coeff. */
typedef struct cg_row_result {
    cg_row_array arrays[CG_ROW_ARRAYS];
    int n;
    bool by_ops;    /* the loss comes from the engine's ops, not from contract.h */
    bool lacks_one; /* of the arrays: memory ran out; cg_row_run fails then */
} cg_row_result;

/* On a backend; NULL: the CPU. */
cg_row_result *cg_row_run(const cg_row *row, const cg_backend *backend, cg_error *error);
void cg_row_result_free(cg_row_result *result);
const cg_row_array *cg_row_find(const cg_row_result *result, const char *name); /* NULL: not computed */

#endif
