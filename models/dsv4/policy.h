/* Policies: what a step keeps for backward, and what it computes again.
 *
 *     save            the objective spelled out in primitive ops; backward keeps what ordinary autograd would
 *     recompute       the same, with the nodes that make per-head scores cloned into backward
 *     stream          first-class ops: no per-head scores in memory
 *     TEXT            spelled out, rewritten by that text of cg_recompute ("recompute=TEXT" is the same)
 *     stream+TEXT     streaming ops, rewritten by that text
 *     auto:BYTES      streaming ops, rewritten by the cheapest set of recomputations whose peak fits; BYTES is a number,
 *                     perhaps with KiB, MiB or GiB behind it: auto:200MiB, auto:1.5GiB
 *     save+auto:BYTES the same for the spelled-out form
 */
#ifndef CG_MODELS_POLICY_H
#define CG_MODELS_POLICY_H

#include "graph/frontier.h"
#include "models/dsv4/config.h"
#include "models/dsv4/objective.h"

typedef struct cg_policy {
    cg_form form;
    char terms[CG_POLICY_BYTES]; /* for cg_recompute; "" for none */
    int64_t budget_bytes;        /* of auto; 0: not auto */
} cg_policy;

bool cg_policy_parse(const char *text, cg_policy *policy, cg_error *error);

/* Rewrite a graph that autodiff is done with. An auto policy searches the frontier of the graph as it will be planned, so
 * everything else must be built already; the frontier is handed over (NULL for other policies; free it). A budget that no
 * set fits is refused with the smallest peak. `plan` is how the graph will be planned (NULL: defaults). False: a sentence is in the graph. */
bool cg_policy_apply(cg_graph *graph, const cg_policy *policy, const cg_plan_options *plan, int *n_clones,
                     cg_frontier **frontier);

#endif
