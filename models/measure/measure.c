#define _GNU_SOURCE /* strsignal */
#include "models/measure/measure.h"

#include "core/base/process.h"
#include "core/base/rng.h"
#include "core/base/threads.h"
#include "graph/cases.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* ---- the workload's rows ---- */

static int64_t segment_count(const cg_workload *w) {
    return w->n_segments ? w->n_segments : w->config.batch_size;
}

static int32_t segment_start(const cg_workload *w, int64_t b) {
    return w->n_segments ? w->cu_seqlens[b] : (int32_t)(b * w->config.seq_len);
}

static int32_t segment_length(const cg_workload *w, int64_t b) {
    return w->n_segments ? w->seqlens[b] : (int32_t)w->config.seq_len;
}

static int64_t room_for_segments(const cg_workload *w) {
    int64_t n = segment_count(w);
    return w->max_segments > n ? w->max_segments : n;
}

static int64_t longest_segment(const cg_workload *w) {
    int64_t longest = 0;
    for (int64_t b = 0; b < segment_count(w); b++) {
        int64_t physical = segment_start(w, b + 1) - segment_start(w, b);
        if (physical > longest) longest = physical;
    }
    return longest;
}

/* With segments, one sequence as long as all of them stands for the rows of the configuration. */
static bool adopt_segments(const cg_workload *w, cg_config *config, cg_error *error) {
    *config = w->config;
    if (!w->n_segments) return true;
    if (w->cu_seqlens[0] != 0)
        return cg_fail(error, CG_BAD_INPUT, "the first segment starts at row %d, expected 0", w->cu_seqlens[0]);
    for (int b = 0; b < w->n_segments; b++) {
        int32_t physical = w->cu_seqlens[b + 1] - w->cu_seqlens[b];
        if (physical < 0 || w->seqlens[b] < 0 || w->seqlens[b] > physical)
            return cg_fail(error, CG_BAD_INPUT, "segment %d has %d real rows of %d, expected 0 to all of them",
                           b, w->seqlens[b], physical);
    }
    config->batch_size = 1;
    config->seq_len = w->cu_seqlens[w->n_segments];
    return cg_config_check(config, error);
}

/* ---- building ---- */

enum { PART_GRADS = 7 };

static cg_value *input(cg_graph *graph, const char *name, cg_dtype dtype, cg_shape shape, bool needs_grad) {
    cg_value *leaf = cg_leaf(graph, CG_LEAF_INPUT, name, dtype, shape);
    if (leaf) leaf->needs_grad = needs_grad;
    return leaf;
}

/* Attention and objective of one layer, either or both, in the scopes that they have in a model, so that policies name
 * them as there. */
static void build_part_graph(cg_step *step, const cg_config *c, const cg_workload *w, cg_form form) {
    cg_graph *g = step->graph;
    const cg_part part = w->part;
    const int64_t n_segments = room_for_segments(w);
    int64_t T = c->batch_size * c->seq_len, C = T / CG_RATIO_CSA, K = c->index_topk, D = c->head_dim;
    bool attends = part != CG_PART_INDEXER_LOSS, indexes = part != CG_PART_ATTENTION;
    cg_value *wrt[PART_GRADS], *outputs[2], *seeds[2];
    int n_wrt = 0, n_outputs = 0;
    const cg_dtype statistic = cg_statistic_dtype(c->dtype);
    cg_value *cu_seqlens = input(g, "cu_seqlens", CG_I32, CG_SHAPE(n_segments + 1), false);
    cg_value *seqlens = input(g, "seqlens", CG_I32, CG_SHAPE(n_segments), false);
    cg_value *rows, *topk = NULL, *teacher = NULL;
    {
        CG_SCOPE(g, "rows%d", CG_RATIO_CSA);
        rows = cg_segment_rows(g, cu_seqlens, seqlens, T, CG_RATIO_CSA, C).rows;
    }
    cg_indexer indexer = {0};
    {
        CG_SCOPE(g, "layer0");
        CG_SCOPE(g, "attn");
        {
            CG_SCOPE(g, "indexer");
            if (indexes) {
                cg_value *q = wrt[n_wrt++] =
                    input(g, "q", c->dtype, CG_SHAPE(T, c->index_n_heads, c->index_head_dim), true);
                cg_value *weights = wrt[n_wrt++] = input(g, "w", c->dtype, CG_SHAPE(T, c->index_n_heads), true);
                cg_value *k = wrt[n_wrt++] = input(g, "k", c->dtype, CG_SHAPE(C, c->index_head_dim), true);
                indexer = cg_indexer_new(g, form, q, weights, k);
                topk = cg_indexer_select(g, &indexer, rows, K);
                if (w->keep_results) cg_keep(topk);
            } else {
                topk = input(g, "topk", CG_I32, CG_SHAPE(T, K), false);
            }
            if (!attends) teacher = input(g, "teacher", statistic, CG_SHAPE(T, K), false);
        }
        if (attends) {
            cg_value *q = wrt[n_wrt++] = input(g, "q", c->dtype, CG_SHAPE(T, c->num_attention_heads, D), true);
            cg_value *kv = wrt[n_wrt++] = input(g, "kv", c->dtype, CG_SHAPE(T, D), true);
            cg_value *ckv = wrt[n_wrt++] = input(g, "ckv", c->dtype, CG_SHAPE(C, D), true);
            cg_value *sink = wrt[n_wrt++] = input(g, "sink", statistic, CG_SHAPE(c->num_attention_heads), true);
            cg_attention attention = cg_csa_attention(g, q, kv, ckv, sink, topk, rows, c->sliding_window,
                                                      1 / sqrt((double)D), c->teacher);
            teacher = attention.teacher;
            outputs[n_outputs] = cg_keep(attention.out);
            seeds[n_outputs++] = input(g, "dout", c->dtype, CG_SHAPE(T, c->num_attention_heads, D), false);
            if (!indexes || w->keep_results) cg_keep(teacher);
        }
        if (indexes) {
            {
                CG_SCOPE(g, "indexer");
                outputs[n_outputs] =
                    cg_keep(cg_indexer_loss(g, &indexer, topk, teacher, rows, c->indexer_loss_coeff));
            }
            seeds[n_outputs++] = step->seed = input(g, "seed", statistic, CG_SHAPE(1), false);
        }
    }
    cg_autodiff(g, outputs, seeds, n_outputs, wrt, n_wrt, step->grads);
    for (int i = 0; i < n_wrt; i++) cg_keep(step->grads[i]);
}

static bool build_part(cg_step *step, const cg_config *config, const cg_workload *w,
                       const cg_plan_options *plan, cg_error *error) {
    if (w->attend_all || config->support == CG_SUPPORT_DENSE)
        return cg_fail(
            error, CG_BAD_INPUT,
            "a part of a layer is measured over the selected rows: the dense support needs the whole step");
    memset(step, 0, sizeof *step);
    step->graph = cg_graph_new(&cg_all_ops);
    step->grads = calloc(PART_GRADS, sizeof *step->grads);
    if (!step->graph || !step->grads) return cg_fail(error, CG_FAILED, "out of memory while a graph is built");
    cg_policy policy;
    if (!cg_policy_parse(config->policy, &policy, error)) return false;
    build_part_graph(step, config, w, policy.form);
    cg_policy_apply(step->graph, &policy, plan, &step->n_clones, &step->frontier);
    step->plan = cg_plan_make(step->graph, plan, error);
    return step->plan != NULL;
}

/* ---- what a plan says ---- */

static void count_storages(const cg_plan *plan, cg_measurement *out) {
    for (int s = 0; s < plan->n_storages; s++) {
        const cg_storage *storage = &plan->storages[s];
        bool is_leaf = storage->value && storage->value->leaf;
        if ((is_leaf && storage->offset >= 0) || storage->kept) out->boundary_bytes += storage->reserved;
        if (storage->category == CG_SAVED) out->saved_bytes += storage->bytes;
        /* a clone in the place of another is the same buffer used again */
        bool again = storage->taken_over >= 0 && plan->storages[storage->taken_over].category == CG_RECOMPUTED;
        if (storage->category == CG_RECOMPUTED && !again) out->recomputed_bytes += storage->bytes;
        if (storage->category == CG_WORKSPACE && storage->bytes > out->workspace_bytes)
            out->workspace_bytes = storage->bytes;
    }
}

static void count_flops(const cg_plan *plan, cg_measurement *out) {
    for (int t = 0; t < plan->n_steps; t++) {
        const cg_node *node = plan->steps[t];
        double flops = node->op->cost ? node->op->cost(node).flops : 0;
        out->flops += flops;
        if (node->pass == CG_RECOMPUTE) out->extra_flops += flops;
    }
}

cg_measurement cg_measurement_planned(const cg_step *step) {
    cg_measurement m = {.planned_peak_bytes = step->plan->peak_bytes,
                        .floor_bytes = step->plan->floor_bytes,
                        .n_clones = step->n_clones,
                        .n_steps = step->plan->n_steps,
                        .measured_peak_bytes = -1,
                        .rss_peak_bytes = -1,
                        .driver_peak_bytes = -1,
                        .loss = NAN,
                        .step_us = NAN};
    count_storages(step->plan, &m);
    count_flops(step->plan, &m);
    return m;
}

bool cg_measure_plan(const cg_workload *w, cg_step *step, cg_measurement *out, cg_error *error) {
    memset(step, 0, sizeof *step);
    *out = (cg_measurement){
        .measured_peak_bytes = -1, .rss_peak_bytes = -1, .driver_peak_bytes = -1, .loss = NAN, .step_us = NAN};
    cg_config config;
    if (!adopt_segments(w, &config, error)) return false;
    cg_step_options how = {.max_segments = room_for_segments(w),
                           .max_seqlen = longest_segment(w),
                           .attend_all = w->attend_all,
                           .keep_topk = w->keep_results,
                           .keep_gradients = w->no_optimizer || w->keep_results,
                           .no_optimizer = w->no_optimizer,
                           .plan = {.backend = w->backend, .keep_cloned_originals = w->verify_recompute}};
    bool ok = w->part == CG_PART_STEP ? cg_step_build(step, &config, &how, error)
                                      : build_part(step, &config, w, &how.plan, error);
    if (!ok) return false;
    *out = cg_measurement_planned(step);
    return true;
}

/* ---- inputs ---- */

static void set_scalar(cg_exec *exec, const cg_value *value, int64_t i, double x) {
    if (value) cg_exec_set(exec, value, i, x);
}

static void set_segments(const cg_workload *w, cg_exec *exec, const cg_value *cu_seqlens,
                         const cg_value *seqlens) {
    int32_t *starts = cg_exec_fill(exec, cu_seqlens), *lengths = cg_exec_fill(exec, seqlens);
    int64_t n = segment_count(w);
    if (starts) starts[0] = 0;
    for (int64_t b = 0; starts && lengths && b < cg_dim(seqlens, 0); b++) {
        starts[b + 1] = b < n ? segment_start(w, b + 1) : starts[b];
        lengths[b] = b < n ? segment_length(w, b) : 0;
    }
    cg_exec_filled(exec, cu_seqlens, starts);
    cg_exec_filled(exec, seqlens, lengths);
}

/* Random tokens; the target of a row is the next token of its segment. Padding has neither. */
static void fill_step(const cg_workload *w, const cg_step *step, cg_exec *exec) {
    const cg_dsv4 *m = step->model;
    const cg_config *c = &w->config;
    for (int p = 0; p < m->n_params; p++) {
        cg_param_init(&m->params[p], c, exec);
        const cg_value *moments[2] = {step->m[p], step->v[p]};
        for (int i = 0; i < 2; i++) {
            void *data = moments[i] ? cg_exec_fill(exec, moments[i]) : NULL;
            if (data) memset(data, 0, (size_t)cg_tensor_bytes(moments[i]->dtype, &moments[i]->shape));
            if (data) cg_exec_filled(exec, moments[i], data);
        }
    }
    int32_t *tokens = cg_exec_fill(exec, m->tokens), *targets = cg_exec_fill(exec, m->targets);
    for (int64_t t = 0; tokens && targets && t < cg_dim(m->tokens, 0); t++) tokens[t] = targets[t] = -1;
    uint64_t stream = cg_random_stream("measure.tokens");
    int64_t n_targets = 0, n_real = 0;
    for (int64_t b = 0; tokens && targets && b < segment_count(w); b++) {
        int64_t start = segment_start(w, b), length = segment_length(w, b);
        for (int64_t t = start; t < start + length; t++)
            tokens[t] = (int32_t)cg_random_below((uint64_t)c->seed, stream, (uint64_t)t, c->vocab_size);
        for (int64_t t = start; t + 1 < start + length; t++) targets[t] = tokens[t + 1];
        n_real += length;
        n_targets += length > 0 ? length - 1 : 0;
    }
    cg_exec_filled(exec, m->tokens, tokens);
    cg_exec_filled(exec, m->targets, targets);
    set_segments(w, exec, m->cu_seqlens, m->seqlens);
    set_scalar(exec, m->lm_scale, 0, n_targets ? 1 / (double)n_targets : 0);
    set_scalar(exec, m->row_scale, 0, n_real ? 1 / (double)n_real : 0);
    set_scalar(exec, step->keep, 0, 0);
    set_scalar(exec, step->schedule, 0, cg_learning_rate(c, 1));
    set_scalar(exec, step->schedule, 1, 1);
}

static void fill_normal(const cg_workload *w, cg_exec *exec, const cg_value *value, double scale) {
    uint64_t seed = (uint64_t)w->config.seed, stream = cg_random_stream(value->name);
    void *data = cg_exec_fill(exec, value);
    const int64_t n = data ? cg_shape_count(&value->shape) : 0;
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; i++)
        cg_real_set(value->dtype, data, i, scale * cg_random_normal(seed, stream, (uint64_t)i));
    cg_exec_filled(exec, value, data);
}

/* A random distribution over as many slots as the row will select: those it sees, at most K; the rest is 0, as the
 * attention would give it. */
static void fill_teacher(const cg_workload *w, cg_exec *exec, const cg_value *teacher) {
    uint64_t seed = (uint64_t)w->config.seed, stream = cg_random_stream("teacher");
    int64_t K = cg_dim(teacher, 1);
    void *data = cg_exec_fill(exec, teacher);
    if (!data) return;
    memset(data, 0, (size_t)cg_tensor_bytes(teacher->dtype, &teacher->shape));
    for (int64_t b = 0; b < segment_count(w); b++)
        for (int64_t p = 0; p < segment_length(w, b); p++) {
            int64_t first = (segment_start(w, b) + p) * K, seen = (p + 1) / CG_RATIO_CSA;
            double sum = 0;
            if (seen > K) seen = K;
            for (int64_t j = 0; j < seen; j++) sum += 1 + cg_random_u32(seed, stream, (uint64_t)(first + j));
            for (int64_t j = 0; j < seen; j++)
                cg_real_set(teacher->dtype, data, first + j,
                            (1 + (double)cg_random_u32(seed, stream, (uint64_t)(first + j))) / sum);
        }
    cg_exec_filled(exec, teacher, data);
}

/* A selection as the attention may get it: K of the visible rows without repeats, all of them where there are fewer. */
static void fill_topk(const cg_workload *w, cg_exec *exec, const cg_value *topk) {
    uint64_t seed = (uint64_t)w->config.seed, stream = cg_random_stream("topk");
    int64_t K = cg_dim(topk, 1), entries = 0;
    int32_t *data = cg_exec_fill(exec, topk);
    if (!data) return;
    memset(data, 0xff, (size_t)cg_tensor_bytes(topk->dtype, &topk->shape)); /* -1: none */
    for (int64_t b = 0; b < segment_count(w); b++) {
        for (int64_t p = 0; p < segment_length(w, b); p++) {
            int64_t row = segment_start(w, b) + p, seen = (p + 1) / CG_RATIO_CSA, n = 0;
            for (int64_t j = 0; j < seen && n < K; j++) /* keeps K of `seen`, each with the same chance */
                if (cg_random_below(seed, stream, (uint64_t)(row * w->config.seq_len + j), seen - j) < K - n)
                    data[row * K + n++] = (int32_t)(entries + j);
        }
        entries += segment_length(w, b) / CG_RATIO_CSA;
    }
    cg_exec_filled(exec, topk, data);
}

static void fill_part(const cg_workload *w, const cg_step *step, cg_exec *exec) {
    const cg_graph *g = step->graph;
    const cg_config *c = &w->config;
    const double index_scale = 1 / sqrt((double)(c->index_n_heads * c->index_head_dim));
    for (int v = 0; v < g->n_values; v++) {
        const cg_value *leaf = g->values[v];
        if (!leaf->leaf || !cg_dtype_is_real(leaf->dtype)) continue;
        fill_normal(w, exec, leaf, strcmp(leaf->name, "w") ? 1 : index_scale);
    }
    const cg_value *teacher = cg_leaf_find(g, "layer0/attn/indexer/teacher"),
                   *topk = cg_leaf_find(g, "layer0/attn/indexer/topk");
    if (teacher) fill_teacher(w, exec, teacher);
    if (topk) fill_topk(w, exec, topk);
    set_segments(w, exec, cg_leaf_find(g, "cu_seqlens"), cg_leaf_find(g, "seqlens"));
}

void cg_measure_fill(const cg_workload *w, const cg_step *step, cg_exec *exec) {
    if (step->model)
        fill_step(w, step, exec);
    else
        fill_part(w, step, exec);
    set_scalar(exec, step->seed, 0, 1);
}

/* All losses together: the kept scalars of forward. */
static double loss_of(const cg_step *step, cg_exec *exec) {
    double loss = 0;
    bool found = false;
    for (int t = 0; t < step->plan->n_steps; t++) {
        const cg_node *node = step->plan->steps[t];
        for (int s = 0; s < node->n_out && node->pass == CG_FORWARD; s++) {
            const cg_value *out = node->out[s];
            if (!out->keep || !cg_dtype_is_real(out->dtype) || cg_shape_count(&out->shape) != 1) continue;
            loss += cg_exec_get(exec, out, 0);
            found = true;
        }
    }
    return found ? loss : NAN; /* the attention alone has none */
}

/* ---- running, in a child ---- */

/* What the child tells, in memory that it shares with its parent. */
typedef struct report {
    bool done, ok;
    cg_error error;
    int64_t measured_bytes, rss_bytes;
    double loss, step_us;
    double node_us[];
} report;

typedef struct child {
    const cg_workload *workload;
    const cg_step *step;
    int n_runs, n_threads;
    report *report;
} child;

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *x, int n) {
    qsort(x, (size_t)n, sizeof *x, by_size);
    return n % 2 ? x[n / 2] : (x[n / 2 - 1] + x[n / 2]) / 2;
}

static void note_time(void *context, int step, const cg_node *node, double us) {
    (void)node;
    double **row = context;
    (*row)[step] = us;
}

bool cg_measure_time(cg_exec *exec, int n_steps, int n_runs, double *node_us, double *step_us,
                     cg_error *error) {
    double *times = calloc((size_t)n_runs * (size_t)n_steps + 1, sizeof *times);
    double *column = calloc((size_t)n_runs + 1, sizeof *column), *row = times;
    bool ok = times && column;
    if (!ok) cg_fail(error, CG_FAILED, "out of memory for the times of %d runs", n_runs);
    if (node_us) cg_exec_watch(exec, note_time, &row);
    for (int i = 0; ok && i < n_runs; i++) {
        row = times + (size_t)i * (size_t)n_steps;
        double start = now_us();
        ok = cg_exec_run(exec, CG_ALL_PASSES, error);
        column[i] = now_us() - start;
    }
    cg_exec_watch(exec, NULL, NULL);
    if (ok) *step_us = median(column, n_runs);
    for (int t = 0; ok && node_us && t < n_steps; t++) {
        for (int i = 0; i < n_runs; i++) column[i] = times[(size_t)i * (size_t)n_steps + (size_t)t];
        node_us[t] = median(column, n_runs);
    }
    free(times);
    free(column);
    return ok;
}

/* A small step of the same kind: the threads with their stacks, and what libraries load and generate when they are
 * first used, are memory of the program and not of the step that is measured. */
static bool warm_up(const cg_workload *measured, cg_error *error) {
    cg_workload w = {.part = measured->part, .backend = measured->backend};
    cg_step step;
    cg_measurement plan;
    if (!cg_config_dims("toy", &w.config))
        return cg_fail(error, CG_FAILED, "there are no dims to warm up with");
    snprintf(w.config.policy, sizeof w.config.policy, "save");
    w.config.seq_len = 64;
    w.config.dtype = measured->config.dtype;
    bool ok = cg_measure_plan(&w, &step, &plan, error);
    cg_exec *exec = ok ? cg_exec_new(step.plan, NULL, error) : NULL;
    if (exec) cg_measure_fill(&w, &step, exec);
    ok = exec && cg_exec_run(exec, CG_ALL_PASSES, error);
    cg_exec_free(exec);
    cg_step_free(&step);
    return ok;
}

static bool run_child(child *c) {
    report *r = c->report;
    if (!warm_up(c->workload, &r->error)) return false;
    cg_process_forget_peak();
    int64_t resident = cg_process_resident_bytes();
    cg_exec_options options = {.verify_recompute = c->workload->verify_recompute};
    cg_exec *exec = cg_exec_new(c->step->plan, &options, &r->error);
    if (!exec) return false;
    cg_measure_fill(c->workload, c->step, exec);
    if (!cg_exec_run(exec, CG_ALL_PASSES, &r->error)) return false;
    r->loss = loss_of(c->step, exec);
    if (!cg_measure_time(exec, c->step->plan->n_steps, c->n_runs, r->node_us, &r->step_us, &r->error))
        return false;
    r->measured_bytes = cg_exec_measured_bytes(exec);
    int64_t mark = cg_process_peak_bytes();
    r->rss_bytes = resident >= 0 && mark >= 0 ? mark - resident : -1;
    return true; /* the process ends now, and gives everything back */
}

static void *child_thread(void *context) {
    child *c = context;
    c->report->ok = cg_threads_set(c->n_threads, &c->report->error) && run_child(c);
    c->report->done = true;
    _exit(0); /* at once: what a thread's end would do asks for memory */
}

/* When memory runs out, the kernel shall end this process and no other. */
static void offer_as_victim(void) {
    FILE *file = fopen("/proc/self/oom_score_adj", "w");
    if (!file) return;
    fputs("1000", file);
    fclose(file);
}

/* OpenMP's threads do not live on in a forked process, but it would wait for them. They belong to the thread that
 * started them: a new one gets threads of its own, whatever ran before the fork. */
static _Noreturn void be_child(child *c, pid_t parent) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(CG_FAILED); /* it ended before that */
    offer_as_victim();
    pthread_t thread;
    if (pthread_create(&thread, NULL, child_thread, c)) {
        cg_fail(&c->report->error, CG_FAILED, "the machine refuses a thread for the run");
        c->report->done = true;
    } else {
        pthread_join(thread, NULL);
    }
    _exit(0);
}

static bool run_in_child(child *c, cg_error *error) {
    pid_t parent = getpid(), pid = fork();
    if (pid == 0) be_child(c, parent);
    if (pid < 0)
        return cg_fail(error, CG_FAILED, "the machine refuses a process for the run: %s", strerror(errno));
    int status = 0;
    while (waitpid(pid, &status, 0) < 0)
        if (errno != EINTR) return cg_fail(error, CG_FAILED, "the run's process is lost: %s", strerror(errno));
    if (c->report->done && c->report->ok) return true;
    if (c->report->done) return cg_fail(error, c->report->error.code, "%s", c->report->error.text);
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)
        return cg_fail(
            error, CG_FAILED,
            "the run was killed, most likely as the machine has too little memory left for its %lld bytes",
            (long long)c->step->plan->peak_bytes);
    if (WIFEXITED(status) && WEXITSTATUS(status) == CG_FAILED) /* without a report: it could not make one */
        return cg_fail(error, CG_FAILED,
                       "the run ended early, most likely as it ran out of memory beside its %lld bytes",
                       (long long)c->step->plan->peak_bytes);
    return cg_fail(error, CG_FAILED, "the run ended early, by %s",
                   WIFSIGNALED(status) ? strsignal(WTERMSIG(status)) : "an exit");
}

/* ---- running on a device, which does not live on in a child; its driver is the witness ---- */

static bool run_here(const cg_workload *w, int n_runs, cg_step *step, cg_measurement *out, cg_error *error) {
    cg_device *device = w->backend->device;
    int64_t before = 0, after = 0;
    out->node_us = calloc((size_t)out->n_steps + 1, sizeof *out->node_us);
    if (!out->node_us)
        return cg_fail(error, CG_FAILED, "out of memory for the times of %d nodes", out->n_steps);
    if (!warm_up(w, error) || !cg_device_free_bytes(device, &before, error)) return false;
    cg_exec *exec = cg_exec_new(step->plan, &(cg_exec_options){.verify_recompute = w->verify_recompute}, error);
    bool ok = exec != NULL;
    if (ok) cg_measure_fill(w, step, exec);
    ok = ok && cg_exec_run(exec, CG_ALL_PASSES, error) && cg_device_free_bytes(device, &after, error);
    if (ok) out->loss = loss_of(step, exec);
    /* nodes one by one, then the whole as it would run otherwise: a recording that plays */
    ok = ok && cg_measure_time(exec, out->n_steps, n_runs, out->node_us, &out->step_us, error) &&
         cg_measure_time(exec, out->n_steps, n_runs + 1, NULL, &out->step_us, error);
    if (ok) {
        out->measured_peak_bytes = cg_exec_measured_bytes(exec);
        out->driver_peak_bytes = before - after;
    }
    cg_exec_free(exec);
    return ok;
}

bool cg_measure_run(const cg_workload *w, int n_runs, cg_step *step, cg_measurement *out, cg_error *error) {
    if (!cg_measure_plan(w, step, out, error)) return false;
    if (w->backend && n_runs >= 1) return run_here(w, n_runs, step, out, error);
    if (n_runs < 1) return cg_fail(error, CG_BAD_INPUT, "a measurement needs at least 1 run, got %d", n_runs);
    size_t times = (size_t)out->n_steps * sizeof(double), bytes = sizeof(report) + times;
    report *shared = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED)
        return cg_fail(error, CG_FAILED, "out of memory for a report of %zu bytes", bytes);
    child c = {.workload = w, .step = step, .n_runs = n_runs, .n_threads = cg_threads(), .report = shared};
    bool ok = run_in_child(&c, error);
    out->node_us = ok ? malloc(times + 1) : NULL;
    if (ok && !out->node_us)
        ok = cg_fail(error, CG_FAILED, "out of memory for the times of %d nodes", out->n_steps);
    if (ok) {
        memcpy(out->node_us, shared->node_us, times);
        out->measured_peak_bytes = shared->measured_bytes;
        out->rss_peak_bytes = shared->rss_bytes;
        out->loss = shared->loss;
        out->step_us = shared->step_us;
    }
    munmap(shared, bytes);
    return ok;
}

void cg_measurement_free(cg_measurement *measurement) {
    free(measurement->node_us);
    measurement->node_us = NULL;
}
