#include "models/dsv4/layer_check.h"

#include "core/base/rng.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- the tiny model ---- */

cg_config cg_probe_config(void) {
    cg_config c = cg_config_toy();
    c.vocab_size = 11;
    c.hidden_size = 8;
    c.num_hidden_layers = c.n_compress_ratios = 3;
    memcpy(c.compress_ratios, (int64_t[]){0, CG_RATIO_CSA, CG_RATIO_HCA}, 3 * sizeof(int64_t));
    c.num_attention_heads = 2;
    c.head_dim = 8;
    c.qk_rope_head_dim = 4;
    c.q_lora_rank = 6;
    c.o_groups = 2;
    c.o_lora_rank = 3;
    c.sliding_window = 4;
    c.index_n_heads = 2;
    c.index_head_dim = 8;
    c.index_topk = 2;
    c.intermediate_size = 8;
    c.indexer_loss_coeff = 1;
    c.dtype = CG_F64;
    return c;
}

static bool differentiate(cg_probe *probe, const cg_config *config) {
    cg_graph *g = probe->graph;
    cg_dsv4 *m = probe->model;
    cg_value *wrt[CG_MAX_PARAMS], *outputs[2] = {m->lm_loss, m->indexer_loss}, *seeds[2];
    int n_outputs = m->indexer_loss ? 2 : 1;
    const cg_dtype scalar = cg_statistic_dtype(config->dtype);
    seeds[0] = probe->lm_seed = cg_leaf(g, CG_LEAF_INPUT, "lm_seed", scalar, CG_SHAPE(1));
    if (n_outputs == 2)
        seeds[1] = probe->indexer_seed = cg_leaf(g, CG_LEAF_INPUT, "indexer_seed", scalar, CG_SHAPE(1));
    for (int p = 0; p < m->n_params; p++) wrt[p] = m->params[p].value;
    if (!cg_autodiff(g, outputs, seeds, n_outputs, wrt, m->n_params, probe->grads)) return false;
    for (int p = 0; p < m->n_params; p++) cg_keep(probe->grads[p]);
    return true;
}

bool cg_probe_build(cg_probe *probe, const cg_config *config, const cg_dsv4_options *options,
                    const cg_backend *backend, const cg_exec_options *exec_options, cg_error *error) {
    *probe = (cg_probe){.graph = cg_graph_new(&cg_all_ops),
                        .model = calloc(1, sizeof *probe->model),
                        .grads = calloc(CG_MAX_PARAMS, sizeof(cg_value *))};
    if (!probe->graph || !probe->model || !probe->grads)
        return cg_fail(error, CG_FAILED, "out of memory while a probe is built");
    cg_policy policy;
    cg_dsv4_options how = *options;
    if (!cg_policy_parse(config->policy, &policy, error)) return false;
    how.form = policy.form;
    if (cg_dsv4_build(probe->graph, config, &how, probe->model)) {
        cg_keep(probe->model->lm_loss);
        cg_keep(probe->model->indexer_loss);
        cg_keep(probe->model->logits);
        cg_keep_choices(probe->graph);
        if (differentiate(probe, config))
            cg_policy_apply(probe->graph, &policy, &(cg_plan_options){.backend = backend}, &probe->n_clones,
                            &probe->frontier);
    }
    return (probe->plan = cg_plan_make(probe->graph, &(cg_plan_options){.backend = backend}, error)) != NULL &&
           (probe->exec = cg_exec_new(probe->plan, exec_options, error)) != NULL;
}

void cg_probe_free(cg_probe *probe) {
    cg_exec_free(probe->exec);
    cg_plan_free(probe->plan);
    cg_graph_free(probe->graph);
    cg_frontier_free(probe->frontier);
    free(probe->model);
    free(probe->grads);
    memset(probe, 0, sizeof *probe);
}

enum { CHUNK = 1024 };

void cg_probe_scatter(const cg_probe *probe, uint64_t seed) {
    for (int p = 0; p < probe->model->n_params; p++) {
        const cg_dsv4_param *param = &probe->model->params[p];
        const cg_value *value = param->value;
        char name[256];
        uint64_t stream = cg_random_stream(cg_param_name(value, name, sizeof name));
        /* a matrix [out, in] keeps the size of what it reads; an embedding has rows of size 1 */
        bool is_matrix = value->shape.n_dims == 2 && param->decay;
        double start = param->init == CG_INIT_ONES ? 1 : 0, spread = param->init == CG_INIT_ONES ? 0.3 : 1;
        if (is_matrix) spread = 1 / sqrt((double)value->shape.dims[1]);
        double x[CHUNK];
        for (int64_t i = 0, n = cg_shape_count(&value->shape); i < n; i += CHUNK) {
            int64_t some = n - i < CHUNK ? n - i : CHUNK;
            for (int64_t k = 0; k < some; k++)
                x[k] = start + spread * cg_random_normal(seed, stream, (uint64_t)(i + k));
            cg_exec_write_real(probe->exec, value, i, some, x);
        }
    }
}

static void write_scalar(const cg_probe *probe, const cg_value *value, double x) {
    if (value) cg_exec_set(probe->exec, value, 0, x);
}

void cg_probe_feed(const cg_probe *probe, const int32_t *cu_seqlens, const int32_t *seqlens,
                   const int32_t *tokens, const int32_t *targets) {
    const cg_dsv4 *m = probe->model;
    int64_t n_rows = m->tokens->shape.dims[0], n_segments = m->seqlens->shape.dims[0], n_targets = 0,
            n_real = 0;
    for (int64_t t = 0; t < n_rows; t++) n_targets += targets[t] >= 0;
    for (int64_t b = 0; b < n_segments; b++) n_real += seqlens[b];
    cg_exec_write(probe->exec, m->tokens, tokens);
    cg_exec_write(probe->exec, m->targets, targets);
    cg_exec_write(probe->exec, m->seqlens, seqlens);
    cg_exec_write(probe->exec, m->cu_seqlens, cu_seqlens);
    write_scalar(probe, m->lm_scale, n_targets ? 1 / (double)n_targets : 0);
    write_scalar(probe, m->row_scale, n_real ? 1 / (double)n_real : 0);
    write_scalar(probe, probe->lm_seed, 1);
    write_scalar(probe, probe->indexer_seed, 1);
}

/* ---- the check ---- */

/* 128 tokens make the one compressed row of the HCA layer; 13 rows can see it. The second segment ends in the
 * middle of a group, 3 of its rows are padding, and 2 rows lie behind it. */
enum { FIRST = 140, SECOND = 19, PADDING = 3, BEHIND = 2, N_ROWS = FIRST + SECOND + BEHIND };

/* The language-model loss is smooth here (its clamps are far away), so a long step keeps rounding small. The
 * indexer loss holds thousands of ReLUs: a step across one of them is off by too little to look like a kink and
 * by more than the bound, so steps are short. */
static const double lm_step = 5e-5, indexer_step = 2e-6;

/* Entries at a kink are not compared, so there must be few. */
static const double most_kinks = 0.02;

static void feed_check(const cg_probe *probe) {
    static const int32_t cu_seqlens[] = {0, FIRST, FIRST + SECOND}, seqlens[] = {FIRST, SECOND - PADDING};
    int32_t tokens[N_ROWS], targets[N_ROWS];
    for (int t = 0; t < N_ROWS; t++) {
        /* targets near the ends of the segments, so that the few rows which see the HCA layer's one row weigh
         * enough for their gradients to stand above the rounding of the loss */
        bool real = t >= FIRST - 13 && t < FIRST + SECOND - PADDING;
        tokens[t] = t < FIRST + SECOND ? (int32_t)cg_random_below(3, 0, (uint64_t)t, 11) : -1;
        targets[t] = real && t != FIRST - 1 ? (int32_t)cg_random_below(3, 1, (uint64_t)t, 11) : -1;
    }
    cg_probe_feed(probe, cu_seqlens, seqlens, tokens, targets);
}

static void complain(cg_layer_report *report, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void complain(cg_layer_report *report, const char *format, ...) {
    if (!report->ok) return; /* the first one stays */
    report->ok = false;
    va_list args;
    va_start(args, format);
    vsnprintf(report->worst, sizeof report->worst, format, args);
    va_end(args);
}

/* Run with one seed set: the gradients of the other loss's parameters must be exactly zero. */
static bool check_crossing(const cg_probe *probe, bool of_indexer, const char *what, cg_layer_report *report,
                           cg_error *error) {
    write_scalar(probe, probe->lm_seed, of_indexer ? 0 : 1);
    write_scalar(probe, probe->indexer_seed, of_indexer ? 1 : 0);
    if (!cg_exec_run(probe->exec, CG_ALL_PASSES, error)) return false;
    for (int p = 0; p < probe->model->n_params; p++) {
        const cg_dsv4_param *param = &probe->model->params[p];
        if (param->indexer == of_indexer) continue;
        char name[256];
        double grad[CHUNK];
        for (int64_t i = 0, n = cg_shape_count(&param->value->shape); i < n; i++) {
            if (i % CHUNK == 0)
                cg_exec_read_real(probe->exec, probe->grads[p], i, n - i < CHUNK ? n - i : CHUNK, grad);
            if (grad[i % CHUNK] != 0)
                complain(report, "%s: the %s loss reaches %s: gradient %.3g at entry %lld", what,
                         of_indexer ? "indexer" : "language-model",
                         cg_param_name(param->value, name, sizeof name), grad[i % CHUNK], (long long)i);
        }
    }
    return true;
}

/* Compare one loss with differences at its own parameters. */
static bool check_loss(const cg_probe *probe, bool of_indexer, int64_t max_entries, cg_layer_run *run,
                       const char *what, cg_layer_report *report, cg_error *error) {
    const cg_dsv4 *m = probe->model;
    cg_value *wrt[CG_MAX_PARAMS], *grads[CG_MAX_PARAMS];
    bool nonzero[CG_MAX_PARAMS] = {false};
    int n = 0;
    for (int p = 0; p < m->n_params; p++)
        if (m->params[p].indexer == of_indexer) {
            wrt[n] = m->params[p].value;
            grads[n++] = probe->grads[p];
        }
    write_scalar(probe, of_indexer ? probe->lm_seed : probe->indexer_seed, 0);
    cg_gradcheck check = {.exec = probe->exec,
                          .n_outputs = 1,
                          .outputs = of_indexer ? &m->indexer_loss : &m->lm_loss,
                          .seeds = of_indexer ? &probe->indexer_seed : &probe->lm_seed,
                          .n_wrt = n,
                          .wrt = wrt,
                          .grads = grads,
                          .max_entries = max_entries,
                          .step = of_indexer ? indexer_step : lm_step};
    if (!cg_gradcheck_run(&check, nonzero, &run->report, error)) return false;
    const cg_gradcheck_report *got = &run->report;
    char name[256];
    for (int k = 0; k < n; k++)
        if (!nonzero[k])
            complain(report, "%s: no gradient that is not zero at %s", what,
                     cg_param_name(wrt[k], name, sizeof name));
    if (!got->ok) complain(report, "%s: relative error %.3g, %s", what, got->worst_rel, got->worst);
    if ((double)got->n_kinks > most_kinks * (double)(got->n_entries + got->n_kinks))
        complain(report, "%s: %lld of %lld entries lie at a kink", what, (long long)got->n_kinks,
                 (long long)(got->n_entries + got->n_kinks));
    report->n_entries += got->n_entries;
    report->n_kinks += got->n_kinks;
    if (got->worst_rel > report->worst_rel) {
        report->worst_rel = got->worst_rel;
        if (report->ok) snprintf(report->worst, sizeof report->worst, "%s: %s", what, got->worst);
    }
    return true;
}

/* One combination: the indexer loss always, the language-model loss where it is not the same as before. */
static bool check_one(const char *policy, cg_support support, cg_teacher teacher, const cg_backend *backend,
                      int64_t max_entries, cg_layer_report *report, cg_error *error) {
    static const char *const supports[] = {"sparse", "dense"}, *const teachers[] = {"none", "full", "sink",
                                                                                    "compressed"};
    cg_config config = cg_probe_config();
    config.support = support;
    config.teacher = teacher;
    snprintf(config.policy, sizeof config.policy, "%s", policy);
    cg_dsv4_options options = {.n_rows = N_ROWS, .max_segments = 2, .max_seqlen = FIRST, .with_loss = true};
    char what[128];
    snprintf(what, sizeof what, "policy %s, support %s, teacher %s", policy, supports[support],
             teachers[teacher]);
    cg_probe probe;
    bool ok = cg_probe_build(&probe, &config, &options, backend, NULL, error);
    if (ok) {
        cg_probe_scatter(&probe, 5);
        feed_check(&probe);
    }
    for (int of_indexer = 0; ok && of_indexer < 2; of_indexer++) {
        ok = check_crossing(&probe, of_indexer, what, report, error);
        bool repeated = !of_indexer && (support != CG_SUPPORT_SPARSE || teacher != CG_TEACHER_FULL);
        if (!ok || repeated) continue;
        cg_layer_run *run = &report->runs[report->n_runs++];
        run->policy = policy;
        run->support = supports[support];
        run->teacher = teachers[teacher];
        run->loss = of_indexer ? "indexer" : "lm";
        ok = check_loss(&probe, of_indexer, max_entries, run, what, report, error);
    }
    if (ok && !strcmp(policy, "recompute") && !probe.n_clones)
        complain(report, "%s: nothing is recomputed", what);
    if (!ok) cg_error_at(error, "%s", what);
    cg_probe_free(&probe);
    return ok;
}

bool cg_layer_check(const cg_backend *backend, int64_t max_entries, cg_layer_report *report, cg_error *error) {
    static const char *const policies[] = {"stream", "save", "recompute"};
    *report = (cg_layer_report){.ok = true};
    for (int p = 0; p < 3; p++)
        for (int s = CG_SUPPORT_SPARSE; s <= CG_SUPPORT_DENSE; s++)
            for (int t = CG_TEACHER_FULL; t <= CG_TEACHER_COMPRESSED; t++)
                if (!check_one(policies[p], (cg_support)s, (cg_teacher)t, backend,
                               max_entries ? max_entries : 24, report, error))
                    return false;
    return true;
}
