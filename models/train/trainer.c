#include "models/train/trainer.h"

#include "core/base/process.h"
#include "core/base/shown.h"
#include "graph/cases.h"
#include "graph/exec.h"
#include "models/train/checkpoint.h"
#include "models/train/topk_log.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

struct cg_trainer {
    cg_config config;
    const cg_feed *feed;
    cg_topk_writer *record; /* NULL: nothing is recorded */
    cg_topk_reader *replay; /* NULL: CSA layers choose */
    int32_t *selection;     /* [T, K], one that is replayed */
    bool records, replays, verifies;
    const cg_backend *backend;
    cg_batch **batches; /* the micro-batches of a step: their counts are needed before the first one runs */
    cg_step step;
    cg_exec *exec;
    bool warming; /* what `step` was built for */
    const volatile sig_atomic_t *stop;
    bool stopped;
    int64_t steps_done;
    int64_t resident_before; /* bytes of the process just before the arena was made; -1: unknown */
    int64_t process_growth;  /* from there to the first step's peak; -1: no step yet, or unknown */
};

/* Without an indexer loss there is nothing to warm up. */
static int64_t warmup_steps(const cg_config *config) {
    return config->indexer_loss_coeff != 0 ? config->indexer_warmup : 0;
}

/* Does the warm-up hold behind that many steps? */
static bool warms_behind(const cg_trainer *trainer, int64_t steps) {
    return steps < warmup_steps(&trainer->config);
}

static bool is_warming(const cg_trainer *trainer) { return warms_behind(trainer, trainer->steps_done); }

/* Not told to stop. */
static bool goes_on(cg_trainer *trainer) { return !(trainer->stopped = trainer->stop && *trainer->stop); }

/* ---- state: parameters and moments by name, as views on the executor's memory or as copies ---- */

typedef struct state {
    int n;
    cg_named_tensor *tensors;
    char (*names)[256];
    char *copies; /* of all tensors, in order; NULL: they are views */
    size_t bytes;
} state;

static void state_free(state *s) {
    free(s->tensors);
    free(s->names);
    free(s->copies);
    *s = (state){0};
}

/* Parameter, first and second moment of each parameter in turn. */
static const cg_value *state_value(const cg_step *step, int i) {
    return i % 3 == 0 ? step->model->params[i / 3].value : i % 3 == 1 ? step->m[i / 3] : step->v[i / 3];
}

static size_t value_bytes(const cg_value *value) {
    return (size_t)cg_tensor_bytes(value->dtype, &value->shape);
}

/* Copies when asked for, and of a device's memory in any case. */
static bool state_of(const cg_step *step, cg_exec *exec, bool copy, state *s, cg_error *error) {
    static const char *const prefixes[3] = {"", "adamw.m.", "adamw.v."};
    int n = step->model->n_params * 3;
    copy |= step->plan->backend != NULL;
    *s = (state){
        .n = n, .tensors = calloc((size_t)n, sizeof *s->tensors), .names = calloc((size_t)n, sizeof *s->names)};
    for (int i = 0; i < n; i++) s->bytes += value_bytes(state_value(step, i));
    if (copy) s->copies = malloc(s->bytes + 1);
    if (!s->tensors || !s->names || (copy && !s->copies)) {
        size_t bytes = s->bytes;
        state_free(s);
        return cg_fail(error, CG_FAILED, "out of memory for a list of %d tensors, %zu bytes", n,
                       copy ? bytes : 0);
    }
    size_t at = 0;
    for (int i = 0; i < n; i++) {
        const cg_value *value = state_value(step, i), *param = state_value(step, i - i % 3);
        char name[224];
        snprintf(s->names[i], sizeof s->names[i], "%s%s", prefixes[i % 3],
                 cg_param_name(param, name, sizeof name));
        void *data = copy ? s->copies + at : cg_exec_data(exec, value);
        if (copy) cg_exec_read(exec, value, data);
        s->tensors[i] = (cg_named_tensor){s->names[i], {value->dtype, value->shape, data}};
        at += value_bytes(value);
    }
    return true;
}

/* Write copies back, or into another step's executor. */
static void state_write(const state *s, const cg_step *step, cg_exec *exec) {
    for (int i = 0; s->copies && i < s->n; i++)
        cg_exec_write(exec, state_value(step, i), s->tensors[i].tensor.data);
}

static void write_scalar(cg_exec *exec, const cg_value *value, int64_t i, double x) {
    if (value) cg_exec_set(exec, value, i, x);
}

static double read_scalar(cg_exec *exec, const cg_value *value) {
    return value ? cg_exec_get(exec, value, 0) : 0;
}

/* ---- the step's graph ---- */

static cg_step_options step_options(const cg_trainer *trainer, bool warming) {
    return (cg_step_options){.max_segments = cg_feed_facts_of(trainer->feed)->max_segments,
                             .attend_all = warming,
                             .given_topk = trainer->replays,
                             .keep_topk = trainer->records && !warming,
                             .plan = {.backend = trainer->backend, .keep_cloned_originals = trainer->verifies}};
}

/* Build the step for a phase. Parameters and moments, if there are any yet, move over through a copy:
 * two arenas at once would be the peak of the whole run. */
static bool build_step(cg_trainer *trainer, bool warming, cg_error *error) {
    state old = {0};
    if (trainer->exec) {
        if (!state_of(&trainer->step, trainer->exec, true, &old, error)) return false;
        cg_exec_free(trainer->exec);
        trainer->exec = NULL;
        cg_step_free(&trainer->step);
    }
    trainer->warming = warming;
    cg_step_options options = step_options(trainer, trainer->warming);
    bool ok = cg_step_build(&trainer->step, &trainer->config, &options, error);
    trainer->process_growth = -1;
    trainer->resident_before = cg_process_resident_bytes();
    if (trainer->resident_before >= 0) trainer->resident_before -= (int64_t)old.bytes; /* the copy goes below */
    cg_exec_options how = {.verify_recompute = trainer->verifies, .stop = trainer->stop};
    ok = ok && (trainer->exec = cg_exec_new(trainer->step.plan, &how, error)) != NULL;
    if (ok && old.n)
        state_write(&old, &trainer->step, trainer->exec);
    else if (ok)
        for (int p = 0; p < trainer->step.model->n_params; p++)
            cg_param_init(&trainer->step.model->params[p], &trainer->config, trainer->exec);
    state_free(&old);
    return ok;
}

static bool load(cg_trainer *trainer, const char *path, cg_error *error) {
    state s;
    if (!state_of(&trainer->step, trainer->exec, false, &s, error)) return false;
    cg_checkpoint_facts facts = {.data = cg_feed_facts_of(trainer->feed)->fingerprint};
    bool ok = cg_checkpoint_read(path, s.tensors, s.n, &facts, error);
    if (ok) trainer->steps_done = facts.step;
    if (ok) state_write(&s, &trainer->step, trainer->exec);
    state_free(&s);
    return ok;
}

static bool is_same_file(const char *a, const char *b) {
    struct stat one, two;
    return !stat(a, &one) && !stat(b, &two) && one.st_dev == two.st_dev && one.st_ino == two.st_ino;
}

/* From the next step on, or the first one behind the warm-up. */
static bool open_topk(cg_trainer *trainer, const cg_trainer_options *options, cg_error *error) {
    const cg_config *c = &trainer->config;
    if (!trainer->records && !trainer->replays) return true;
    int64_t warmup = warmup_steps(c), next = (is_warming(trainer) ? warmup : trainer->steps_done) + 1;
    if (warmup >= c->steps)
        return cg_fail(
            error, CG_BAD_INPUT,
            "there is nothing to record or replay: the indexer's warm-up takes all %lld steps, and all "
            "visible rows are attended in it",
            (long long)c->steps);
    if (trainer->records && trainer->replays && is_same_file(options->record_topk, options->replay_topk))
        return cg_fail(error, CG_BAD_INPUT, "%s cannot be replayed and recorded to at once",
                       options->replay_topk);
    if (trainer->replays &&
        !(trainer->replay = cg_topk_reader_new(options->replay_topk, c, trainer->feed, next, c->steps, error)))
        return false;
    size_t selected = (size_t)(cg_feed_facts_of(trainer->feed)->n_rows * c->index_topk);
    if (trainer->replays && !(trainer->selection = calloc(selected + 1, sizeof *trainer->selection)))
        return cg_fail(error, CG_FAILED, "out of memory for a selection");
    return !trainer->records ||
           (trainer->record = cg_topk_writer_new(options->record_topk, c, trainer->feed, next,
                                                 options->checkpoint || options->record_anew, error)) != NULL;
}

/* Whether a run can go on behind the warm-up is known, and said, before it begins. `clones`: in steps of any phase. */
static bool look_ahead(const cg_trainer *trainer, int *clones, cg_error *error) {
    *clones = trainer->step.n_clones;
    if (!trainer->warming || warmup_steps(&trainer->config) >= trainer->config.steps) return true;
    cg_step later;
    cg_step_options options = step_options(trainer, false);
    bool ok = cg_step_build(&later, &trainer->config, &options, error) && cg_exec_has_room(later.plan, error);
    if (ok) *clones += later.n_clones;
    cg_step_free(&later);
    return ok;
}

static bool start(cg_trainer *trainer, const cg_trainer_options *options, cg_error *error) {
    const cg_config *c = &trainer->config;
    for (int64_t i = 0; i < c->accumulate; i++)
        if (!(trainer->batches[i] = cg_batch_new(trainer->feed, error))) return false;
    int clones;
    if (!build_step(trainer, is_warming(trainer), error) || !look_ahead(trainer, &clones, error)) return false;
    if (trainer->verifies && !clones)
        return cg_fail(error, CG_BAD_INPUT, "there is no recompute to verify: policy %s computes nothing again",
                       c->policy);
    if (options->checkpoint && !load(trainer, options->checkpoint, error)) return false;
    /* The graph of the last step taken: if no other follows, reports are about that. */
    bool warmed = warms_behind(trainer, trainer->steps_done > 0 ? trainer->steps_done - 1 : 0);
    if (trainer->warming != warmed && !build_step(trainer, warmed, error)) return false;
    return open_topk(trainer, options, error);
}

cg_trainer *cg_trainer_new(const cg_config *config, const cg_feed *feed, const cg_trainer_options *options,
                           cg_error *error) {
    static const cg_trainer_options defaults;
    if (!options) options = &defaults;
    cg_trainer *trainer = calloc(1, sizeof *trainer);
    if (!trainer) {
        cg_fail(error, CG_FAILED, "out of memory for a trainer");
        return NULL;
    }
    trainer->config = *config;
    trainer->feed = feed;
    trainer->records = options->record_topk != NULL;
    trainer->replays = options->replay_topk != NULL;
    trainer->verifies = options->verify_recompute;
    trainer->backend = options->backend;
    trainer->stop = options->stop;
    trainer->batches = calloc((size_t)config->accumulate, sizeof *trainer->batches);
    if (!trainer->batches)
        cg_fail(error, CG_FAILED, "out of memory for a trainer");
    else if (start(trainer, options, error))
        return trainer;
    cg_trainer_free(trainer);
    return NULL;
}

void cg_trainer_free(cg_trainer *trainer) {
    if (!trainer) return;
    cg_topk_writer_free(trainer->record);
    cg_topk_reader_free(trainer->replay);
    free(trainer->selection);
    cg_exec_free(trainer->exec);
    cg_step_free(&trainer->step);
    for (int64_t i = 0; trainer->batches && i < trainer->config.accumulate; i++)
        cg_batch_free(trainer->batches[i]);
    free(trainer->batches);
    free(trainer);
}

int64_t cg_trainer_steps(const cg_trainer *trainer) { return trainer->steps_done; }

bool cg_trainer_stopped(const cg_trainer *trainer) { return trainer->stopped; }

const cg_step *cg_trainer_graph(const cg_trainer *trainer) { return &trainer->step; }

int64_t cg_trainer_measured_bytes(const cg_trainer *trainer) { return cg_exec_measured_bytes(trainer->exec); }

/* ---- a step ---- */

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void write_batch(cg_exec *exec, const cg_dsv4 *model, const cg_batch *batch) {
    cg_exec_write(exec, model->tokens, batch->tokens);
    cg_exec_write(exec, model->targets, batch->targets);
    cg_exec_write(exec, model->cu_seqlens, batch->cu_seqlens);
    cg_exec_write(exec, model->seqlens, batch->seqlens);
}

static void replay_selections(const cg_trainer *trainer, int64_t micro_batch) {
    const cg_dsv4 *model = trainer->step.model;
    for (int i = 0, csa = 0; trainer->replay && !trainer->warming && i < model->n_layers; i++)
        if (model->layers[i].topk) {
            cg_topk_reader_get(trainer->replay, trainer->steps_done + 1, micro_batch, csa++,
                               trainer->selection);
            cg_exec_write(trainer->exec, model->layers[i].topk, trainer->selection);
        }
}

static void record_selections(const cg_trainer *trainer, int64_t micro_batch) {
    const cg_dsv4 *model = trainer->step.model;
    for (int i = 0, csa = 0; trainer->record && !trainer->warming && i < model->n_layers; i++) {
        const cg_value *topk = model->layers[i].topk;
        if (topk) cg_exec_read(trainer->exec, topk, cg_topk_writer_slot(trainer->record, micro_batch, csa++));
    }
}

/* A run that is told to stop fails without an error. */
static bool run_passes(cg_trainer *trainer, cg_exec *exec, unsigned passes, cg_error *error) {
    cg_error own = {0};
    if (cg_exec_run(exec, passes, &own)) return true;
    if (!own.code) return goes_on(trainer) && cg_fail(error, CG_FAILED, "a run ended early");
    return cg_fail(error, own.code, "%s", own.text);
}

/* Forward and backward of all micro-batches. Losses are divided by the counts of the whole step, so that short
 * micro-batches do not weigh more than their tokens. */
static bool run_micro_batches(cg_trainer *trainer, cg_metrics *metrics, cg_error *error) {
    const cg_step *step = &trainer->step;
    int64_t n_targets = 0, n_real = 0, n_micro = trainer->config.accumulate;
    for (int64_t i = 0; i < n_micro; i++) {
        if (!goes_on(trainer)) return false;
        cg_feed_batch(trainer->feed, false, (uint64_t)(trainer->steps_done * n_micro + i), trainer->batches[i]);
        n_targets += trainer->batches[i]->n_targets;
        n_real += trainer->batches[i]->n_real;
    }
    write_scalar(trainer->exec, step->seed, 0, 1);
    write_scalar(trainer->exec, step->model->lm_scale, 0, n_targets ? 1 / (double)n_targets : 0);
    write_scalar(trainer->exec, step->model->row_scale, 0, n_real ? 1 / (double)n_real : 0);
    for (int64_t i = 0; i < n_micro; i++) {
        if (!goes_on(trainer)) return false;
        write_batch(trainer->exec, step->model, trainer->batches[i]);
        replay_selections(trainer, i);
        write_scalar(trainer->exec, step->keep, 0, i > 0);
        if (!run_passes(trainer, trainer->exec, CG_ALL_PASSES & ~CG_PASS_BIT(CG_OPTIMIZE), error)) return false;
        record_selections(trainer, i);
        metrics->lm_loss += read_scalar(trainer->exec, step->model->lm_loss);
        metrics->indexer_loss += read_scalar(trainer->exec, step->model->indexer_loss);
    }
    if (!isfinite(metrics->lm_loss) || !isfinite(metrics->indexer_loss))
        return cg_fail(error, CG_FAILED, "the loss is not finite (language model %g, indexer %g)",
                       metrics->lm_loss, metrics->indexer_loss);
    return !trainer->record || trainer->warming || cg_topk_writer_append(trainer->record, error);
}

/* By how much the process grew from before the arena was made to the peak of the first step. The kernel's mark
 * may be older than the step (an evaluation, an earlier phase); then the step stayed below it, and what counts is
 * what is in memory now, as the arena keeps each page once touched. */
static int64_t growth_of_first_step(const cg_trainer *trainer, int64_t mark_before_step) {
    int64_t mark = cg_process_peak_bytes(), resident = cg_process_resident_bytes();
    if (trainer->resident_before < 0 || mark < 0 || resident < 0) return -1;
    return (mark > mark_before_step ? mark : resident) - trainer->resident_before;
}

static bool update_parameters(cg_trainer *trainer, cg_metrics *metrics, cg_error *error) {
    write_scalar(trainer->exec, trainer->step.schedule, 0, metrics->lr);
    write_scalar(trainer->exec, trainer->step.schedule, 1, (double)metrics->step);
    cg_error refused = {0};
    bool ok = cg_exec_run(trainer->exec, CG_PASS_BIT(CG_OPTIMIZE), &refused);
    metrics->grad_norm = read_scalar(trainer->exec, trainer->step.grad_norm);
    if (ok) return true;
    if (isfinite(metrics->grad_norm)) return cg_fail(error, refused.code, "%s", refused.text);
    return cg_fail(error, CG_FAILED, "the gradient is not finite (its norm is %g)", fabs(metrics->grad_norm));
}

bool cg_trainer_step(cg_trainer *trainer, cg_metrics *metrics, cg_error *error) {
    trainer->stopped = false;
    if (trainer->warming != is_warming(trainer) && !build_step(trainer, is_warming(trainer), error))
        return false;
    bool first = trainer->process_growth < 0;
    int64_t mark = first ? cg_process_peak_bytes() : -1;
    double start = now_s();
    *metrics = (cg_metrics){.step = trainer->steps_done + 1,
                            .warming = trainer->warming,
                            .planned_peak_bytes = trainer->step.plan->peak_bytes};
    metrics->lr = cg_learning_rate(&trainer->config, metrics->step);
    cg_error refused = {0};
    if (!run_micro_batches(trainer, metrics, &refused) || !update_parameters(trainer, metrics, &refused))
        /* whatever an op says of its input: here numbers went astray, the user's input is fine */
        return !trainer->stopped &&
               cg_fail(error, CG_FAILED, "step %lld: %s; parameters are as before this step",
                       (long long)metrics->step, refused.text);
    metrics->measured_peak_bytes = cg_trainer_measured_bytes(trainer);
    trainer->steps_done++;
    int64_t rows = trainer->batches[0]->n_rows * trainer->config.accumulate;
    metrics->tokens_per_s = (double)rows / fmax(now_s() - start, 1e-9);
    if (first) trainer->process_growth = growth_of_first_step(trainer, mark);
    metrics->process_growth_bytes = trainer->process_growth;
    return true;
}

/* ---- evaluation ---- */

typedef struct eval_run {
    cg_graph *graph;
    cg_dsv4 *model;
    cg_value *predicted;
    cg_plan *plan;
    cg_exec *exec;
    cg_batch *batch;
    int32_t *tokens; /* as predicted */
} eval_run;

static void eval_free(eval_run *run) {
    cg_exec_free(run->exec);
    cg_plan_free(run->plan);
    cg_graph_free(run->graph);
    cg_batch_free(run->batch);
    free(run->model);
    free(run->tokens);
}

static bool eval_build(const cg_trainer *trainer, eval_run *run, cg_error *error) {
    const cg_feed_facts *facts = cg_feed_facts_of(trainer->feed);
    run->graph = cg_graph_new(&cg_all_ops);
    run->model = calloc(1, sizeof *run->model);
    run->batch = cg_batch_new(trainer->feed, error);
    run->tokens = calloc((size_t)facts->n_rows + 1, sizeof *run->tokens);
    if (!run->graph || !run->model || !run->batch || !run->tokens)
        return cg_fail(error, CG_FAILED, "out of memory for an evaluation");
    cg_dsv4_options options = {.n_rows = facts->n_rows,
                               .max_segments = facts->max_segments,
                               .max_seqlen = facts->max_seqlen,
                               .form = CG_FORM_STREAM,
                               .with_health = true,
                               .external = true};
    if (cg_dsv4_build(run->graph, &trainer->config, &options, run->model)) {
        run->predicted = cg_keep(cg_argmax(run->graph, run->model->logits));
        cg_keep(run->model->lm_loss);
        for (int i = 0; i < run->model->n_layers; i++) cg_keep(run->model->layers[i].health);
    }
    const cg_plan_options plan = {.backend = trainer->step.plan->backend};
    if (!(run->plan = cg_plan_make(run->graph, &plan, error))) return false;
    if (!(run->exec = cg_exec_new(run->plan, &(cg_exec_options){.stop = trainer->stop}, error))) return false;
    for (int p = 0; p < run->model->n_params; p++)
        cg_exec_bind_value(run->exec, run->model->params[p].value, trainer->exec,
                           trainer->step.model->params[p].value);
    return true;
}

static void count_predictions(const eval_run *run, const cg_feed_facts *facts, cg_evaluation *e, int64_t *right,
                              int64_t *right_far) {
    const cg_batch *batch = run->batch;
    cg_exec_read(run->exec, run->predicted, run->tokens);
    for (int64_t t = 0; t < batch->n_rows; t++) {
        if (batch->targets[t] < 0) continue;
        bool hit = run->tokens[t] == batch->targets[t], far = batch->distances[t] > facts->reach;
        e->n_targets++;
        *right += hit;
        e->n_far += far;
        *right_far += far && hit;
    }
}

static void indexer_means(const double *sums, int layer, cg_indexer_state *s) {
    double rows = sums[CG_HEALTH_ROWS], per = rows > 0 ? 1 / rows : 0;
    *s = (cg_indexer_state){.layer = layer,
                            .rows = (int64_t)rows,
                            .kl = sums[CG_HEALTH_KL] * per,
                            .kl_uniform = sums[CG_HEALTH_KL_UNIFORM] * per,
                            .recall = sums[CG_HEALTH_RECALL] * per,
                            .mass = sums[CG_HEALTH_MASS] * per,
                            .top1_missed = sums[CG_HEALTH_TOP1_MISSED] * per,
                            .negative_weights = sums[CG_HEALTH_NEGATIVE] * per,
                            .distance = sums[CG_HEALTH_DISTANCE] * per};
    s->captured = s->kl_uniform > 0 ? 1 - s->kl / s->kl_uniform : 0;
}

static bool eval_run_all(cg_trainer *trainer, eval_run *run, cg_evaluation *e, cg_error *error) {
    const cg_feed_facts *facts = cg_feed_facts_of(trainer->feed);
    double(*sums)[CG_HEALTH_FIELDS] = calloc(CG_MAX_LAYERS, sizeof *sums);
    if (!sums) return cg_fail(error, CG_FAILED, "out of memory for an evaluation");
    double loss = 0;
    int64_t right = 0, right_far = 0;
    bool ok = true;
    write_scalar(run->exec, run->model->lm_scale, 0, 1); /* sums over targets; divided once, below */
    for (int64_t i = 0; ok && i < trainer->config.eval_batches; i++) {
        if (!(ok = goes_on(trainer))) break;
        cg_feed_batch(trainer->feed, true, (uint64_t)i, run->batch);
        write_batch(run->exec, run->model, run->batch);
        if (!(ok = run_passes(trainer, run->exec, CG_ALL_PASSES & ~CG_PASS_BIT(CG_OPTIMIZE), error))) break;
        loss += read_scalar(run->exec, run->model->lm_loss);
        count_predictions(run, facts, e, &right, &right_far);
        for (int l = 0; l < run->model->n_layers; l++) {
            const cg_value *health = run->model->layers[l].health;
            for (int f = 0; health && f < CG_HEALTH_FIELDS; f++)
                sums[l][f] += cg_exec_get(run->exec, health, f);
        }
    }
    e->val_loss = loss / (double)(e->n_targets ? e->n_targets : 1);
    e->val_accuracy = (double)right / (double)(e->n_targets ? e->n_targets : 1);
    e->val_accuracy_far = e->n_far ? (double)right_far / (double)e->n_far : NAN;
    int exercised = 0;
    for (int l = 0; l < run->model->n_layers; l++) {
        if (!run->model->layers[l].health) continue;
        cg_indexer_state *s = &e->layers[e->n_layers++];
        indexer_means(sums[l], l, s);
        if (!s->rows) continue;
        exercised++;
        e->captured += s->captured;
        e->recall += s->recall;
    }
    e->captured = exercised ? e->captured / exercised : NAN;
    e->recall = exercised ? e->recall / exercised : NAN;
    free(sums);
    return ok;
}

bool cg_trainer_evaluate(cg_trainer *trainer, cg_evaluation *evaluation, cg_error *error) {
    *evaluation = (cg_evaluation){0};
    trainer->stopped = false;
    eval_run run = {0};
    bool ok = eval_build(trainer, &run, error) && eval_run_all(trainer, &run, evaluation, error);
    eval_free(&run);
    return ok;
}

bool cg_selection_is_exercised(const cg_config *config, const cg_feed *feed) {
    for (int64_t i = 0; i < config->num_hidden_layers; i++)
        if (config->compress_ratios[i] == CG_RATIO_CSA)
            return cg_feed_facts_of(feed)->max_seqlen / CG_RATIO_CSA > config->index_topk;
    return false;
}

/* ---- checkpoints ---- */

bool cg_trainer_save(const cg_trainer *trainer, const char *path, cg_error *error) {
    state s;
    if (!trainer->exec)
        return cg_fail(error, CG_FAILED, "%s: there is no model to save", cg_shown_path(path).text);
    if (trainer->record && !cg_topk_writer_sync(trainer->record, error)) return false;
    if (!state_of(&trainer->step, trainer->exec, false, &s, error)) return false;
    char *json = cg_config_json(&trainer->config);
    cg_checkpoint_facts facts = {trainer->steps_done, cg_feed_facts_of(trainer->feed)->fingerprint, json};
    bool ok = json || cg_fail(error, CG_FAILED, "out of memory while a checkpoint is written");
    ok = ok && cg_checkpoint_write(path, s.tensors, s.n, &facts, error);
    free(json);
    state_free(&s);
    return ok;
}
