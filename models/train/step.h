/* One training step as one planned graph: forward, backward, recompute, clipping and AdamW. */
#ifndef CG_MODELS_STEP_H
#define CG_MODELS_STEP_H

#include "graph/plan.h"
#include "models/dsv4/dsv4.h"
#include "models/dsv4/policy.h"

typedef struct cg_step_options {
    int64_t max_segments;
    int64_t max_seqlen;  /* no segment is longer; 0: seq_len */
    bool attend_all;     /* the indexer's warm-up: see cg_dsv4_options */
    bool given_topk;     /* selections are inputs: see cg_dsv4_options */
    bool keep_topk;      /* selections stay readable behind a run */
    bool keep_gradients; /* gradients stay readable behind a run */
    bool no_optimizer;   /* forward and backward alone */
    bool hold_choices;   /* keep the outputs of nodes that choose, for cg_gradcheck_run */
    cg_plan_options plan;
} cg_step_options;

typedef struct cg_step {
    cg_graph *graph;
    cg_dsv4 *model;
    cg_plan *plan;
    int n_clones;          /* nodes that recompute added */
    cg_frontier *frontier; /* of an auto policy, else NULL */
    cg_value *seed;        /* [1] input, the gradient of both losses: write 1 */
    cg_value *keep;     /* [1] input: 0 in the first micro-batch of a step, else 1; NULL without accumulation */
    cg_value *schedule; /* [2] input: learning rate, step counted from 1 */
    cg_value *grad_norm; /* [1], before clipping */
    cg_value **grads;    /* by parameter: the sum over micro-batches with accumulation */
    cg_value **m, **v;   /* by parameter: AdamW's moments */
} cg_step;

/* Build and plan the step of a checked config. False with a sentence; free what was built in any case. */
bool cg_step_build(cg_step *step, const cg_config *config, const cg_step_options *options, cg_error *error);
void cg_step_free(cg_step *step);

/* Learning rate of a step counted from 1: linear warm-up over warmup_steps, then a cosine down to
 * min_lr_ratio * learning_rate at decay_steps, and that from there on. */
double cg_learning_rate(const cg_config *config, int64_t step);

#endif
