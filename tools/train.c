/* csagrad train: what do language-model loss, indexer loss and the indexer's health do over a run?
 *
 * Measured: losses, gradient norm, time and peak memory of each step; on held-out batches the loss, the
 * accuracy and how well the indexer selects. Left out of tokens/s: making batches of the next step, evaluation,
 * checkpoints.
 *
 *     csagrad train --task recall --steps 500 --out runs/recall
 */
#include "tools/csagrad.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "core/file.h"
#include "core/process.h"
#include "core/shown.h"
#include "models/checkpoint.h"
#include "models/measure.h"
#include "models/trainer.h"
#include "tools/options.h"
#include "tools/run_log.h"

enum { KEY_DATA = TOOL_OWN_KEYS, KEY_OUT, KEY_RESUME, KEY_RECORD, KEY_REPLAY, KEY_VERIFY };

enum { DIR_BYTES = 480 }; /* of --out: with a file's name it fits into the paths here */

typedef struct train_options {
    tool_model model;
    tool_device device;
    const char *data, *out, *record_topk, *replay_topk;
    bool resume, verify_recompute, json;
} train_options;

static const struct argp_option options[] = {
    {.name = "data",
     .key = KEY_DATA,
     .arg = "PATH",
     .group = GROUP_INPUT,
     .doc = "text: a file, or a folder with all text files below it (default: this project's own sources and "
            "documents)"},
    {.name = "replay-topk",
     .key = KEY_REPLAY,
     .arg = "FILE",
     .group = GROUP_INPUT,
     .doc = "take the selections that --record-topk wrote instead of choosing; data, seed and sizes must be "
            "the same, policy and dtype may differ: losses and gradients then differ by rounding alone. "
            "Held-out batches choose for themselves. With --resume, give it again"},
    {.name = "verify-recompute",
     .key = KEY_VERIFY,
     .group = GROUP_POLICY,
     .doc = "compare whatever the policy computes again with its original, bit for bit; the first "
            "difference ends the run and names scope and op. Originals live until they are compared: the "
            "peak is about that of keeping them, plus the clones"},
    TOOL_OUTPUT_HEADER,
    {.name = "out",
     .key = KEY_OUT,
     .arg = "DIR",
     .group = GROUP_OUTPUT,
     .doc = "folder for metrics.jsonl, config.json and checkpoints (default: runs/train)"},
    {.name = "resume",
     .key = KEY_RESUME,
     .group = GROUP_OUTPUT,
     .doc = "go on from the newest checkpoint in --out that is whole, with its configuration; further options "
            "override it"},
    {.name = "record-topk",
     .key = KEY_RECORD,
     .arg = "FILE",
     .group = GROUP_OUTPUT,
     .doc = "write what each CSA layer selects in each micro-batch of each step, as safetensors: topk "
            "[micro-batches, CSA layers, rows, index_topk], int32, -1 for none. FILE begins behind the "
            "indexer's warm-up, which selects nothing. It must be new; with --resume, the recording of this "
            "run goes on from the checkpoint, and a missing one begins there"},
    {.name = "json",
     .key = TOOL_JSON,
     .group = GROUP_OUTPUT,
     .doc = "print the lines of metrics.jsonl instead of progress and table"},
    {0}};

static error_t parse(int key, char *arg, struct argp_state *state) {
    train_options *o = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &o->model;
        state->child_inputs[1] = &o->model;
        state->child_inputs[2] = &o->device;
        return 0;
    case KEY_DATA:
        o->data = arg;
        return 0;
    case KEY_OUT:
        o->out = arg;
        return 0;
    case KEY_RESUME:
        o->resume = true;
        return 0;
    case KEY_RECORD:
        o->record_topk = arg;
        return 0;
    case KEY_REPLAY:
        o->replay_topk = arg;
        return 0;
    case KEY_VERIFY:
        o->verify_recompute = true;
        return 0;
    case TOOL_JSON:
        o->json = true;
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

/* Everything of one run. */
typedef struct run {
    const train_options *options;
    const cg_config *config;
    const char *dir;
    cg_feed *feed;
    cg_trainer *trainer;
    run_log *log;
    json_t *start; /* the evaluation before the first step */
    double started_s, shown_s;
    int64_t started_step, saved_step;
    int lock;               /* the folder's descriptor: one run at a time */
    int64_t process_growth; /* -1: unknown, or no step was taken */
    bool terminal;
} run;

static volatile sig_atomic_t interrupted;

static void on_signal(int number) { interrupted = number; }

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- lines ---- */

static json_t *evaluation_json(const cg_evaluation *e) {
    json_t *layers = json_array();
    for (int i = 0; i < e->n_layers; i++) {
        const cg_indexer_state *s = &e->layers[i];
        json_array_append_new(
            layers, json_pack("{s:i, s:I, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "layer", s->layer, "rows",
                              (json_int_t)s->rows, "kl", s->kl, "kl_uniform", s->kl_uniform, "captured",
                              s->captured, "recall", s->recall, "mass", s->mass, "top1_missed", s->top1_missed,
                              "negative_weights", s->negative_weights, "distance", s->distance));
    }
    return json_pack("{s:o, s:o, s:o, s:o, s:o, s:o}", "val_loss", run_number(e->val_loss), "val_accuracy",
                     run_number(e->val_accuracy), "val_accuracy_far", run_number(e->val_accuracy_far),
                     "captured", run_number(e->captured), "recall", run_number(e->recall), "indexers", layers);
}

static json_t *metrics_json(const cg_metrics *m) {
    return json_pack("{s:I, s:f, s:f, s:f, s:f, s:b, s:f, s:I, s:I}", "step", (json_int_t)m->step, "lm_loss",
                     m->lm_loss, "indexer_loss", m->indexer_loss, "grad_norm", m->grad_norm, "lr", m->lr,
                     "indexer_warmup", m->warming, "tokens_per_s", m->tokens_per_s, "planned_peak_bytes",
                     (json_int_t)m->planned_peak_bytes, "measured_peak_bytes",
                     (json_int_t)m->measured_peak_bytes);
}

/* Write a line to the log, and print it with --json. */
static bool log_line(run *r, json_t *line, cg_error *error) {
    if (r->options->json && line) {
        char *text = json_dumps(line, JSON_COMPACT | JSON_PRESERVE_ORDER | JSON_REAL_PRECISION(17));
        if (text) puts(text);
        free(text);
    }
    return run_log_write(r->log, line, error);
}

static void duration_text(double s, char *text, size_t text_bytes) {
    long long n = (long long)(s + 0.5);
    if (n >= 3600)
        snprintf(text, text_bytes, "%lldh%02lldm", n / 3600, n / 60 % 60);
    else
        snprintf(text, text_bytes, "%lldm%02llds", n / 60, n % 60);
}

/* On a terminal one line that is written over; elsewhere a plain line now and then. */
static void show_progress(run *r, const cg_metrics *m, const cg_evaluation *e) {
    double now = now_s();
    bool last = m->step == r->config->steps;
    if (r->options->json || (!e && !last && now - r->shown_s < (r->terminal ? 0.2 : 10))) return;
    r->shown_s = now;
    double left =
        (now - r->started_s) / (double)(m->step - r->started_step) * (double)(r->config->steps - m->step);
    char eta[32], held_out[96] = "";
    duration_text(left, eta, sizeof eta);
    if (e) {
        int n = snprintf(held_out, sizeof held_out, "  val %.4f", e->val_loss);
        if (!isnan(e->val_accuracy_far))
            n += snprintf(held_out + n, sizeof held_out - (size_t)n, "  far %.1f%%", 100 * e->val_accuracy_far);
        if (!isnan(e->recall)) snprintf(held_out + n, sizeof held_out - (size_t)n, "  recall %.3f", e->recall);
    }
    printf("%sstep %*" PRId64 "/%" PRId64 "  lm %.4f  indexer %.4f%s  %.0f tokens/s  ETA %s%s%s",
           r->terminal ? "\r\033[K" : "", 5, m->step, r->config->steps, m->lm_loss, m->indexer_loss,
           m->warming ? " (warm-up)" : "", m->tokens_per_s, eta, held_out,
           e || last || !r->terminal ? "\n" : "");
    fflush(stdout);
}

/* ---- the run ---- */

/* The one before stays: should the newest be damaged, it still loads. Those of later steps were damaged when this
 * run began, or are of a run that it took the place of. */
static void remove_old_checkpoints(const run *r, int64_t newest) {
    int64_t steps[64];
    int n = cg_checkpoint_list(r->dir, steps, 64, NULL);
    bool kept = false;
    for (int i = 0; i < n; i++) {
        if (steps[i] == newest) continue;
        if (steps[i] < newest && !kept) {
            kept = true;
            continue;
        }
        char path[600];
        cg_checkpoint_path(r->dir, steps[i], path, sizeof path);
        unlink(path);
    }
}

static bool save(run *r, cg_error *error) {
    int64_t step = cg_trainer_steps(r->trainer);
    if (r->saved_step == step) return true;
    char path[600];
    cg_checkpoint_path(r->dir, step, path, sizeof path);
    /* The log first: after a power cut it must not lack a step that the checkpoint holds. */
    if (!run_log_sync(r->log, error) || !cg_trainer_save(r->trainer, path, error)) return false;
    r->saved_step = step;
    remove_old_checkpoints(r, step);
    return true;
}

/* Make the trainer, fresh or from a checkpoint. */
static bool make_trainer(run *r, const char *checkpoint, cg_error *error) {
    cg_trainer_options how = {.checkpoint = checkpoint,
                              .record_topk = r->options->record_topk,
                              .replay_topk = r->options->replay_topk,
                              .verify_recompute = r->options->verify_recompute,
                              .backend = r->options->device.backend};
    return (r->trainer = cg_trainer_new(r->config, r->feed, &how, error)) != NULL;
}

/* Go on from the newest whole checkpoint; one that was read and is damaged is named, and the one before it is tried. A
 * whole one that does not fit (other data, another model) is refused: an older one would fit no better. So is one that
 * cannot be read: it may be whole, and would be removed behind an older one. */
static bool resume(run *r, cg_error *error) {
    int64_t steps[64];
    char path[600];
    cg_error damage[64] = {0};
    int n = cg_checkpoint_list(r->dir, steps, 64, error), whole = 0;
    if (n < 0) return false;
    if (!n)
        return cg_fail(error, CG_BAD_INPUT,
                       "--resume: there is no checkpoint in %s: start anew in another folder", r->dir);
    for (; whole < n; whole++) {
        cg_checkpoint_path(r->dir, steps[whole], path, sizeof path);
        cg_checkpoint_state state = cg_checkpoint_look(path, &damage[whole]);
        if (state == CG_CHECKPOINT_WHOLE) break;
        if (state == CG_CHECKPOINT_UNREADABLE)
            return cg_fail(error, damage[whole].code,
                           "--resume: %s; no older checkpoint is used, as this one may be whole",
                           damage[whole].text);
    }
    if (whole == n)
        return cg_fail(error, CG_BAD_INPUT, "--resume: none of %d checkpoint%s in %s is whole; the newest: %s",
                       n, n == 1 ? "" : "s", cg_shown_path(r->dir).text, damage[0].text);
    if (!make_trainer(r, path, error)) return false;
    if (cg_trainer_steps(r->trainer) != steps[whole])
        return cg_fail(error, CG_BAD_INPUT, "--resume: %s is of step %" PRId64 ": it has another's name",
                       cg_shown_path(path).text, cg_trainer_steps(r->trainer));
    for (int i = 0; i < whole; i++)
        fprintf(stderr, "csagrad train: %s; the checkpoint of step %" PRId64 " is used instead\n",
                damage[i].text, steps[whole]);
    r->saved_step = steps[whole];
    return true;
}

static bool write_config(const run *r, cg_error *error) {
    char path[600];
    snprintf(path, sizeof path, "%s/config.json", r->dir);
    char *json = cg_config_json(r->config);
    if (!json) return cg_fail(error, CG_FAILED, "out of memory while %s is written", path);
    cg_file_writer *writer = cg_file_begin(path, error);
    bool ok = writer && cg_file_write(writer, json, strlen(json), error);
    if (ok)
        ok = cg_file_commit(writer, error);
    else
        cg_file_cancel(writer);
    free(json);
    return ok;
}

/* A folder that holds a run is not overwritten. */
static bool dir_is_free(const run *r, cg_error *error) {
    char path[600];
    struct stat facts;
    snprintf(path, sizeof path, "%s/metrics.jsonl", r->dir);
    int64_t step;
    int n = cg_checkpoint_list(r->dir, &step, 1, error);
    if (n < 0 || (n == 0 && stat(path, &facts))) return n == 0;
    return cg_fail(error, CG_BAD_INPUT,
                   "--out: %s holds a run already: go on with --resume, or name another folder", r->dir);
}

/* Two runs in one folder would mix their lines. The kernel drops the lock when the process ends, however it ends;
 * a file system without locks is used without. */
static bool lock_dir(run *r, cg_error *error) {
    r->lock = open(r->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (r->lock < 0 || flock(r->lock, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return true;
    return cg_fail(error, CG_BAD_INPUT, "--out: another run is writing to %s", r->dir);
}

/* A log that goes on is the log of a run that never stopped: of the evaluation at the end of the run before, only
 * what falls on an evaluation step stays. */
static const char *const *stale_keys(const run *r) {
    static const char *const evaluation[] = {
        "val_loss", "val_accuracy", "val_accuracy_far", "captured", "recall", "indexers", NULL};
    int64_t every = r->config->eval_every;
    return every > 0 && r->started_step % every == 0 ? NULL : evaluation;
}

static bool begin(run *r, cg_error *error) {
    const cg_feed_facts *facts;
    /* Whatever may be wrong with the input is found before anything is made or changed in the folder. */
    if (r->options->data && r->config->task != CG_TASK_TEXT)
        return cg_fail(error, CG_BAD_INPUT, "--data is for --task text: the recall task makes its own");
    if (!r->options->resume && !dir_is_free(r, error)) return false;
    if (!(r->feed = cg_feed_new(r->options->data, r->config, error))) return false;
    if (!r->options->resume && !make_trainer(r, NULL, error)) return false;
    if (!cg_folder_make(r->dir, error) || !lock_dir(r, error)) return false;
    if (!(r->options->resume ? resume(r, error) : dir_is_free(r, error))) return false;
    json_t *first = NULL;
    r->started_step = cg_trainer_steps(r->trainer);
    if (!write_config(r, error)) return false;
    if (!(r->log = run_log_open(r->dir, r->started_step, stale_keys(r), &first, error))) return false;
    r->start = json_incref(json_object_get(first, "start"));
    json_decref(first);
    facts = cg_feed_facts_of(r->feed);
    if (!r->options->json) {
        tool_print_model("csagrad train", r->config);
        if (r->options->device.backend) printf("device: %s\n", r->options->device.name);
        if (r->config->task == CG_TASK_TEXT)
            printf("data: %s, %" PRId64 " documents, %.1f MiB for training, %.1f MiB held out\n", facts->source,
                   facts->documents, (double)facts->train_bytes / 1048576,
                   (double)facts->held_out_bytes / 1048576);
        else
            printf("data: recall, %" PRId64 " pairs and %" PRId64 " queries a sequence, distance %" PRId64
                   " or more tokens, windows together reach %" PRId64 "; chance %.1f%%\n",
                   facts->n_pairs, facts->n_queries, facts->min_distance, facts->reach, 100 * facts->chance);
        if (!cg_selection_is_exercised(r->config, r->feed))
            printf("note: no row sees more than index_topk = %" PRId64
                   " compressed rows, so all are selected and this run does not test selection\n",
                   r->config->index_topk);
        if (r->options->resume) printf("resumed at step %" PRId64 "\n", r->started_step);
    }
    return true;
}

/* The steps up to config->steps, or until a signal. */
static bool go(run *r, cg_evaluation *end, bool *evaluated, cg_error *error) {
    const cg_config *c = r->config;
    cg_metrics m;
    r->started_s = now_s();
    json_t *start = NULL;
    if (cg_trainer_steps(r->trainer) == 0) {
        if (!cg_trainer_evaluate(r->trainer, end, error)) return false;
        start = evaluation_json(end);
        r->start = json_incref(start);
    }
    for (int64_t step = cg_trainer_steps(r->trainer) + 1; step <= c->steps && !interrupted; step++) {
        if (!cg_trainer_step(r->trainer, &m, error)) {
            cg_error second = {
                0}; /* the parameters are those of the step before: worth keeping, whatever comes */
            if (step > 1) save(r, &second);
            return false;
        }
        r->process_growth = m.process_growth_bytes;
        json_t *line = metrics_json(&m);
        if (start) json_object_set_new(line, "start", start);
        start = NULL;
        *evaluated = step == c->steps || (c->eval_every > 0 && step % c->eval_every == 0);
        if (*evaluated) {
            if (!cg_trainer_evaluate(r->trainer, end, error)) return false;
            json_t *e = evaluation_json(end);
            json_object_update(line, e);
            json_decref(e);
        }
        if (!log_line(r, line, error)) return false;
        if (c->checkpoint_every > 0 && step % c->checkpoint_every == 0 && !save(r, error)) return false;
        show_progress(r, &m, *evaluated ? end : NULL);
    }
    json_decref(start);
    return true;
}

static double number_of(const json_t *object, const char *key) {
    const json_t *value = json_object_get(object, key);
    return json_is_number(value) ? json_number_value(value) : NAN;
}

static void table_row(const char *name, const char *format, double start, double end) {
    char a[32] = "-", b[32] = "-";
    if (!isnan(start)) snprintf(a, sizeof a, format, start);
    if (!isnan(end)) snprintf(b, sizeof b, format, end);
    printf("  %-34s %10s %10s\n", name, a, b);
}

static void print_table(const run *r, const cg_evaluation *e) {
    const cg_plan *plan = cg_trainer_graph(r->trainer)->plan;
    printf("\n  %-34s %10s %10s\n", "held out", "start", "end");
    table_row("loss, nats per target", "%.4f", number_of(r->start, "val_loss"), e->val_loss);
    table_row("accuracy", "%.4f", number_of(r->start, "val_accuracy"), e->val_accuracy);
    if (!isnan(e->val_accuracy_far))
        table_row("accuracy beyond the windows", "%.4f", number_of(r->start, "val_accuracy_far"),
                  e->val_accuracy_far);
    double start_kl = 0, end_kl = 0;
    const json_t *layers = json_object_get(r->start, "indexers");
    for (int i = 0; i < e->n_layers; i++) {
        start_kl += number_of(json_array_get(layers, (size_t)i), "kl") / e->n_layers;
        end_kl += e->layers[i].kl / e->n_layers;
    }
    if (e->n_layers) table_row("indexer KL, nats per row", "%.4f", start_kl, end_kl);
    table_row("indexer captured (1 - kl/uniform)", "%.4f", number_of(r->start, "captured"), e->captured);
    table_row("indexer recall of the true top-k", "%.4f", number_of(r->start, "recall"), e->recall);
    printf("\n  peak memory of a step: planned %.2f MiB, measured %.2f MiB", (double)plan->peak_bytes / 1048576,
           (double)cg_trainer_measured_bytes(r->trainer) / 1048576);
    if (r->options->device.backend)
        printf(", the most asked of the device %.2f MiB",
               (double)cg_device_asked_peak(r->options->device.device) / 1048576);
    else if (r->process_growth >= 0)
        printf(", and the process grew by %.2f MiB", (double)r->process_growth / 1048576);
    const cg_measurement m = cg_measurement_planned(cg_trainer_graph(r->trainer));
    printf("\n  kept for backward %.2f MiB, computed again %.2f MiB, workspace of a node at most %.2f MiB",
           (double)m.saved_bytes / 1048576, (double)m.recomputed_bytes / 1048576,
           (double)m.workspace_bytes / 1048576);
    if (r->options->verify_recompute && cg_trainer_steps(r->trainer) > r->started_step)
        printf("\n  recompute: %d nodes ran again in each step, with the same bits as their originals",
               cg_trainer_graph(r->trainer)->n_clones);
    printf("\n  high-water mark of the whole process, evaluation included: %.2f MiB\n",
           (double)cg_process_peak_bytes() / 1048576);
    printf("  files: %s/metrics.jsonl, config.json, checkpoint-%08" PRId64 ".safetensors\n", r->dir,
           r->saved_step);
}

static json_t *known_bytes(int64_t bytes) { return bytes >= 0 ? json_integer(bytes) : json_null(); }

/* The last line of the log: the whole run in one object. */
static json_t *final_json(const run *r, const cg_evaluation *e) {
    json_t *line = json_pack("{s:b, s:I}", "final", 1, "steps", (json_int_t)cg_trainer_steps(r->trainer));
    json_t *end = evaluation_json(e);
    json_object_update(line, end);
    json_decref(end);
    const cg_plan *plan = cg_trainer_graph(r->trainer)->plan;
    json_object_set_new(line, "selection_exercised",
                        json_boolean(cg_selection_is_exercised(r->config, r->feed)));
    json_object_set_new(line, "chance", run_number(cg_feed_facts_of(r->feed)->chance));
    json_object_set_new(line, "planned_peak_bytes", json_integer(plan->peak_bytes));
    json_object_set_new(line, "measured_peak_bytes", json_integer(cg_trainer_measured_bytes(r->trainer)));
    if (r->options->verify_recompute)
        json_object_set_new(line, "verified_clones", json_integer(cg_trainer_graph(r->trainer)->n_clones));
    const cg_measurement m = cg_measurement_planned(cg_trainer_graph(r->trainer));
    json_object_set_new(line, "saved_bytes", json_integer(m.saved_bytes));
    json_object_set_new(line, "recomputed_bytes", json_integer(m.recomputed_bytes));
    json_object_set_new(line, "workspace_bytes", json_integer(m.workspace_bytes));
    if (r->options->device.backend) {
        const cg_device *device = r->options->device.device;
        json_object_set_new(line, "device", json_string(r->options->device.name));
        json_object_set_new(line, "device_asked_peak_bytes", json_integer(cg_device_asked_peak(device)));
    }
    json_object_set_new(line, "process_growth_bytes", known_bytes(r->process_growth));
    json_object_set_new(line, "process_peak_bytes", known_bytes(cg_process_peak_bytes()));
    json_object_set_new(line, "seconds", run_number(now_s() - r->started_s));
    if (r->start) json_object_set(line, "start", r->start);
    return line;
}

static bool finish(run *r, cg_evaluation *e, bool evaluated, cg_error *error) {
    if (!save(r, error)) return false;
    if (interrupted) {
        if (!r->options->json)
            printf("%sstopped at step %" PRId64 ", checkpoint written: go on with --resume --out %s\n",
                   r->terminal ? "\n" : "", cg_trainer_steps(r->trainer), r->dir);
        return true;
    }
    if (!evaluated && !cg_trainer_evaluate(r->trainer, e, error)) return false; /* a run resumed at its end */
    if (!log_line(r, final_json(r, e), error)) return false;
    if (!r->options->json) print_table(r, e);
    return true;
}

int csagrad_train(int argc, char **argv) {
    static const struct argp_child children[] = {
        TOOL_CHILD(tool_model_argp), TOOL_CHILD(tool_training_argp), TOOL_CHILD(tool_device_argp), {0}};
    static const struct argp argp = {
        .options = options,
        .parser = parse,
        .children = children,
        .doc = "Train the toy model; losses, indexer health and memory go to DIR/metrics.jsonl."};
    train_options o = {.out = "runs/train"};
    cg_error error = {0};
    tool_parse(&argp, argc, argv, &o);
    if (strlen(o.out) > DIR_BYTES) {
        cg_fail(&error, CG_BAD_INPUT, "--out: a path of %zu bytes, at most %d are accepted", strlen(o.out),
                DIR_BYTES);
        return tool_failed(argv[0], &error);
    }
    if (o.resume) {
        char path[600];
        snprintf(path, sizeof path, "%s/config.json", o.out);
        o.model.config = cg_config_toy();
        if (!cg_config_load(&o.model.config, path, &error)) {
            cg_error_at(&error, "--resume");
            return tool_failed(argv[0], &error);
        }
        o.model.config_given = true;
    }
    if (!tool_model_apply(&o.model, &error) || !tool_device_open(&o.device, &error))
        return tool_failed(argv[0], &error);
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART}, hangup;
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    if (sigaction(SIGHUP, NULL, &hangup) == 0 && hangup.sa_handler != SIG_IGN) /* nohup: ignored */
        sigaction(SIGHUP, &action, NULL);
    signal(SIGXFSZ, SIG_IGN); /* a file at its size limit is an error with a sentence, like a full disk */
    run r = {.options = &o,
             .config = &o.model.config,
             .dir = o.out,
             .saved_step = -1,
             .lock = -1,
             .process_growth = -1,
             .terminal = isatty(STDOUT_FILENO)};
    cg_evaluation *end = calloc(1, sizeof *end);
    bool evaluated = false;
    bool ok = end ? begin(&r, &error) && go(&r, end, &evaluated, &error) && finish(&r, end, evaluated, &error)
                  : cg_fail(&error, CG_FAILED, "out of memory");
    cg_error closing = {0};
    if (!run_log_close(r.log, &closing) && ok) ok = cg_fail(&error, closing.code, "%s", closing.text);
    cg_trainer_free(r.trainer);
    cg_feed_free(r.feed);
    json_decref(r.start);
    if (r.lock >= 0) close(r.lock);
    tool_device_close(&o.device);
    free(end);
    if (!ok) return tool_failed(argv[0], &error);
    return interrupted ? 128 + interrupted : 0;
}
