#include "models/train/step.h"

#include "graph/gradcheck.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool allocate(cg_step *step) {
    step->graph = cg_graph_new(&cg_all_ops);
    step->model = calloc(1, sizeof *step->model);
    step->grads = calloc(CG_MAX_PARAMS, sizeof *step->grads);
    step->m = calloc(CG_MAX_PARAMS, sizeof *step->m);
    step->v = calloc(CG_MAX_PARAMS, sizeof *step->v);
    return step->graph && step->model && step->grads && step->m && step->v;
}

/* A leaf that belongs to a parameter: "layer0/attn/wq_a.weight" has "layer0/attn/wq_a.weight.m". */
static cg_value *companion(cg_graph *graph, const cg_value *param, cg_leaf_kind kind, const char *suffix) {
    char name[128];
    snprintf(name, sizeof name, "%s.%s", param->name, suffix);
    CG_WITHIN(graph, param->scope, CG_FORWARD, NULL);
    return cg_leaf(graph, kind, name, param->dtype, param->shape);
}

static void build_backward(cg_step *step, const cg_config *config) {
    cg_graph *g = step->graph;
    const cg_dsv4 *m = step->model;
    cg_value *outputs[2] = {m->lm_loss, m->indexer_loss}, *wrt[CG_MAX_PARAMS];
    int n_outputs = m->indexer_loss ? 2 : 1;
    step->seed = cg_leaf(g, CG_LEAF_INPUT, "seed", cg_statistic_dtype(config->dtype), CG_SHAPE(1));
    cg_value *seeds[2] = {step->seed, step->seed};
    for (int p = 0; p < m->n_params; p++) wrt[p] = m->params[p].value;
    if (!cg_autodiff(g, outputs, seeds, n_outputs, wrt, m->n_params, step->grads)) return;
    if (config->accumulate <= 1) return;
    step->keep = cg_leaf(g, CG_LEAF_INPUT, "keep", cg_statistic_dtype(config->dtype), CG_SHAPE(1));
    for (int p = 0; p < m->n_params && !cg_graph_error(g); p++) {
        cg_value *sum = companion(g, wrt[p], CG_LEAF_GRADIENT, "grad");
        CG_WITHIN(g, wrt[p]->scope, CG_BACKWARD, NULL);
        cg_accumulate(g, sum, step->grads[p], step->keep);
        step->grads[p] = sum;
    }
}

static void build_optimizer(cg_step *step, const cg_config *config) {
    cg_graph *g = step->graph;
    const cg_dsv4 *m = step->model;
    step->schedule = cg_leaf(g, CG_LEAF_INPUT, "schedule", cg_statistic_dtype(config->dtype), CG_SHAPE(2));
    step->grad_norm = cg_keep(cg_global_norm(g, step->grads, m->n_params));
    for (int p = 0; p < m->n_params && !cg_graph_error(g); p++) {
        const cg_dsv4_param *param = &m->params[p];
        cg_adamw_attr attr = {.beta1 = config->beta1,
                              .beta2 = config->beta2,
                              .eps = config->adam_eps,
                              .weight_decay = param->decay ? config->weight_decay : 0,
                              .max_norm = config->max_grad_norm};
        step->m[p] = companion(g, param->value, CG_LEAF_OPTIMIZER, "m");
        step->v[p] = companion(g, param->value, CG_LEAF_OPTIMIZER, "v");
        CG_WITHIN(g, param->value->scope, CG_OPTIMIZE, NULL);
        cg_adamw(g, param->value, step->m[p], step->v[p], step->grads[p], step->grad_norm, step->schedule,
                 &attr);
    }
}

static bool has_indexer(const cg_config *config) {
    for (int64_t i = 0; i < config->num_hidden_layers; i++)
        if (config->compress_ratios[i] == CG_RATIO_CSA) return true;
    return false;
}

bool cg_step_build(cg_step *step, const cg_config *config, const cg_step_options *options, cg_error *error) {
    memset(step, 0, sizeof *step);
    if (!allocate(step)) return cg_fail(error, CG_FAILED, "out of memory while a step is built");
    cg_policy policy;
    cg_dsv4_options model = {.n_rows = config->batch_size * config->seq_len,
                             .max_segments = options->max_segments,
                             .max_seqlen = options->max_seqlen ? options->max_seqlen : config->seq_len,
                             .with_loss = true,
                             .attend_all = options->attend_all,
                             .given_topk = options->given_topk};
    if (!cg_policy_parse(config->policy, &policy, error)) return false;
    model.form = policy.form;
    if (!strcmp(config->policy, "recompute") && !has_indexer(config))
        policy.terms[0] = 0; /* there is nothing to recompute */
    if (cg_dsv4_build(step->graph, config, &model, step->model)) {
        cg_keep(step->model->lm_loss);
        cg_keep(step->model->indexer_loss);
        if (options->hold_choices) cg_keep_choices(step->graph);
        for (int i = 0; options->keep_topk && i < step->model->n_layers; i++)
            cg_keep(step->model->layers[i].topk);
        build_backward(step, config);
        for (int p = 0; options->keep_gradients && p < step->model->n_params; p++) cg_keep(step->grads[p]);
        if (!options->no_optimizer) build_optimizer(step, config);
        cg_policy_apply(step->graph, &policy, &options->plan, &step->n_clones, &step->frontier);
    }
    step->plan = cg_plan_make(step->graph, &options->plan, error);
    return step->plan != NULL;
}

void cg_step_free(cg_step *step) {
    cg_plan_free(step->plan);
    cg_graph_free(step->graph);
    cg_frontier_free(step->frontier);
    free(step->model);
    free(step->grads);
    free(step->m);
    free(step->v);
    memset(step, 0, sizeof *step);
}

double cg_learning_rate(const cg_config *config, int64_t step) {
    double peak = config->learning_rate, low = peak * config->min_lr_ratio;
    if (step <= config->warmup_steps) return peak * (double)step / (double)config->warmup_steps;
    double left = (double)(config->decay_steps - config->warmup_steps);
    double done = left > 0 ? (double)(step - config->warmup_steps) / left : 1;
    if (done > 1) done = 1;
    return low + (peak - low) * 0.5 * (1 + cos(3.14159265358979323846 * done));
}
