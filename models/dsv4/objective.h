/* The objective of the Lightning Indexer on one layer's compressed rows: scores, the selection, the loss. The model
 * builds it, and measurements build it alone.
 *
 * Source: DeepSeek-V4 report (arXiv 2606.19348), section 2.3.3; DeepSeek-V3.2 report (arXiv 2512.02556), section 2.1.
 */
#ifndef CG_MODELS_OBJECTIVE_H
#define CG_MODELS_OBJECTIVE_H

#include "ops/ops.h"

/* How the objective is built. Both forms select the same rows and give the same loss. */
typedef enum cg_form {
    CG_FORM_STREAM, /* first-class ops: no per-head scores in memory */
    CG_FORM_SPELLED /* primitive ops: per-head scores [T, Hi, C] are values, which backward reads */
} cg_form;

typedef struct cg_indexer {
    cg_value *q, *w, *k; /* [T, Hi, Di], [T, Hi] with every scale in it, [C, Di] */
    cg_value *scores;    /* spelled out: [T, C]; NULL: streamed */
} cg_indexer;

/* An indexer of queries, head weights and keys. */
cg_indexer cg_indexer_new(cg_graph *graph, cg_form form, cg_value *q, cg_value *w, cg_value *k);

/* The topk visible rows of largest score -> [T, topk] i32, -1 for none. */
cg_value *cg_indexer_select(cg_graph *graph, const cg_indexer *indexer, cg_value *rows, int64_t topk);

/* coeff * KL(teacher || softmax of the scores at `support`), summed over rows: support [T, N] i32, teacher [T, N], a
 * constant -> loss [1]. */
cg_value *cg_indexer_loss(cg_graph *graph, const cg_indexer *indexer, cg_value *support, cg_value *teacher,
                          cg_value *rows, double coeff);

#endif
