/* Dumps of one CSA layer: everything that the named contract computes from a case's inputs, and the file with it.
 *
 * Attention, selection and the default contract come from the engine's ops in f64. Every other contract's target,
 * loss and gradients come row by row from models/check/contract.h, over the selection that its scores make. The file has
 * the tensor names of the stored vectors (tests/data/README.md). */
#ifndef CG_MODELS_DUMP_WRITE_H
#define CG_MODELS_DUMP_WRITE_H

#include "graph/backend.h"
#include "models/check/contract.h"
#include "models/check/dump_case.h"

typedef struct cg_dump_results {
    int64_t width;      /* K: columns of the lists */
    int64_t n_keys;     /* N: columns of target, compressed rows of the longest segment */
    int32_t *topk;      /* [T,K] rows of ckv, then -1 */
    double *lse;        /* [T,H] window, selected, sink */
    double *window_lse; /* [T,H] window and sink */
    double *output, *grad_query, *grad_kv, *grad_ckv, *grad_sink; /* of sum(output * dout) */
    double *target, *log_predict; /* [T,N] columns counted from the segment's first; 0 off the support */
    double *kl;                   /* [T] not scaled */
    double loss;
    double *grad_q_indexer, *grad_weights, *grad_k_indexer; /* of loss */
} cg_dump_results;

/* Two contracts: what target and loss follow, and what the gradients follow. False with a sentence; free in any
 * case. With by_rows even the default is evaluated row by row, which tests compare with the ops. */
typedef struct cg_dump_contracts {
    cg_contract value, gradient;
    bool by_rows;
} cg_dump_contracts;

/* The engine's part runs on a backend (NULL: the CPU). */
bool cg_dump_compute(const cg_dump_case *c, const cg_dump_contracts *contracts, const cg_backend *backend,
                     cg_dump_results *results, cg_error *error);
void cg_dump_results_free(cg_dump_results *results);

typedef enum cg_dump_layout { CG_LAYOUT_SBHD, CG_LAYOUT_BSHD, CG_LAYOUT_THD, CG_LAYOUTS } cg_dump_layout;
extern const char *const cg_dump_layout_names[CG_LAYOUTS + 1]; /* "sbhd", "bshd", "thd", NULL */

typedef struct cg_dump_form {
    cg_dump_layout layout; /* sbhd and bshd need equal segments without padding */
    cg_dtype dtype;        /* f32, f64, or bf16: then loss, target, lse and sink are f32 */
    bool global_lists;     /* lists hold rows of the whole ckv instead of places in the segment */
    bool lse_base_2;
    bool anonymous; /* the file does not say which contract it follows */
    uint64_t seed;  /* for the file's metadata */
} cg_dump_form;

/* Refused where the case has no such form. */
bool cg_dump_form_fits(const cg_dump_case *c, const cg_dump_form *form, cg_error *error);

/* Write the file, whole or not at all. Equal arguments give equal bytes. */
bool cg_dump_write(const char *path, const cg_dump_case *c, const cg_dump_contracts *contracts,
                   const cg_dump_results *results, const cg_dump_form *form, cg_error *error);

/* ---- a ready set ---- */

/* Round, compute, and write a set of dumps that are hard in different ways into a folder, with a README.md that says
 * what each is for. */
bool cg_dump_set_write(const char *folder, const cg_dump_contracts *contracts, const cg_backend *backend,
                       uint64_t seed, cg_error *error);

#endif
