#include "models/dsv4/objective.h"

cg_indexer cg_indexer_new(cg_graph *graph, cg_form form, cg_value *q, cg_value *w, cg_value *k) {
    cg_indexer indexer = {q, w, k, NULL};
    if (form == CG_FORM_SPELLED)
        indexer.scores = cg_indexer_head_sum(graph, cg_relu(graph, cg_indexer_head_scores(graph, q, k)), w);
    return indexer;
}

cg_value *cg_indexer_select(cg_graph *graph, const cg_indexer *indexer, cg_value *rows, int64_t topk) {
    if (indexer->scores) return cg_topk(graph, indexer->scores, rows, topk);
    return cg_indexer_topk(graph, indexer->q, indexer->w, indexer->k, rows, topk);
}

cg_value *cg_indexer_loss(cg_graph *graph, const cg_indexer *indexer, cg_value *support, cg_value *teacher,
                          cg_value *rows, double coeff) {
    if (!indexer->scores)
        return cg_indexer_kl(graph, cg_indexer_scores_at(graph, indexer->q, indexer->w, indexer->k, support),
                             teacher, rows, CG_REDUCE_SUM, coeff);
    cg_value *log_p = cg_softmax(graph, cg_gather(graph, indexer->scores, support), support, true);
    return cg_kl_div(graph, log_p, teacher, rows, CG_REDUCE_SUM, coeff);
}
