/* A tiny model to look at from all sides, and the gradient check of the whole layer on it.
 *
 * Three layers (window only, CSA, HCA) in f64 on packed rows with two segments, the second one padded, and rows
 * behind the last segment. The language-model loss is checked against all parameters outside the indexers, the
 * indexer loss against all inside, with the selection held fixed, for every policy, support and teacher. Each
 * loss must also have a gradient of exactly zero at the other's parameters, and no leaf may have zeros alone at
 * its own.
 */
#ifndef CG_MODELS_LAYER_CHECK_H
#define CG_MODELS_LAYER_CHECK_H

#include "graph/gradcheck.h"
#include "models/dsv4/dsv4.h"
#include "models/dsv4/policy.h"

/* Forward and backward of a model, planned and ready to run. */
typedef struct cg_probe {
    cg_graph *graph;
    cg_dsv4 *model;
    cg_value *lm_seed,
        *indexer_seed;     /* [1]: gradients of the two losses; the second is NULL without its loss */
    cg_value **grads;      /* by parameter, kept */
    int n_clones;          /* nodes that recompute added */
    cg_frontier *frontier; /* of an auto policy, else NULL */
    cg_plan *plan;
    cg_exec *exec;
} cg_probe;

/* The tiny model: hidden 8, 2 heads of 8, window 4, 2 compressed rows selected, 11 tokens, ratios 0 4 128. */
cg_config cg_probe_config(void);

/* Build, plan for a backend (NULL: the CPU), reserve. options->form comes from config->policy; losses, logits, selections and gradients are
 * kept. False with a sentence; free in any case. */
bool cg_probe_build(cg_probe *probe, const cg_config *config, const cg_dsv4_options *options,
                    const cg_backend *backend, const cg_exec_options *exec_options, cg_error *error);
void cg_probe_free(cg_probe *probe);

/* Give every parameter values scattered around its start, by its name and the seed: no norm weight stays 1, no
 * sink stays 0. */
void cg_probe_scatter(const cg_probe *probe, uint64_t seed);

/* Write segments, tokens and targets, and the scales 1 / targets and 1 / real rows that follow from them.
 * tokens and targets have n_rows entries; cu_seqlens one more than seqlens. Both seeds become 1. */
void cg_probe_feed(const cg_probe *probe, const int32_t *cu_seqlens, const int32_t *seqlens,
                   const int32_t *tokens, const int32_t *targets);

/* One combination of the layer check. */
typedef struct cg_layer_run {
    const char *policy, *support, *teacher, *loss;
    cg_gradcheck_report report;
} cg_layer_run;

enum { CG_LAYER_RUNS = 36 };

typedef struct cg_layer_report {
    int n_runs;
    cg_layer_run runs[CG_LAYER_RUNS];
    int64_t n_entries, n_kinks;
    double worst_rel;
    bool ok;         /* every run is, no gradient crosses, few entries are kinks */
    char worst[512]; /* what failed first, or the worst entry */
} cg_layer_report;

/* Check the layer on a backend (NULL: the CPU); entries per parameter, 0: a number that takes seconds. False: a run
 * failed. */
bool cg_layer_check(const cg_backend *backend, int64_t max_entries, cg_layer_report *report, cg_error *error);

#endif
