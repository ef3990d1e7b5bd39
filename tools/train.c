/* csagrad train: what do language-model loss, indexer loss and the indexer's health do over a run?
 *
 * Measured: losses, gradient norm, time and peak memory of each step; on held-out batches the loss, the
 * accuracy and how well the indexer selects. Left out of tokens/s: making batches of the next step, evaluation,
 * checkpoints.
 *
 *     csagrad train --task recall --steps 500 --out runs/recall
 */
#define _GNU_SOURCE /* program_invocation_name */
#include "tools/csagrad.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "core/base/file.h"
#include "core/base/process.h"
#include "core/base/shown.h"
#include "models/train/checkpoint.h"
#include "models/measure/measure.h"
#include "models/train/trainer.h"
#include "tools/json_number.h"
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
            "override it, but for those that decide which data come next. Without a checkpoint yet, the run "
            "starts "
            "anew"},
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
    char checkpoint[600]; /* to go on from; "": none */
    int n_damaged;        /* newer ones, which are not used */
    cg_error damage[64];
    bool anew;     /* the folder holds what a run left that was killed before its first checkpoint */
    bool log_lost; /* there is a checkpoint, but no log of the steps up to it */
    cg_feed *feed;
    cg_trainer *trainer;
    run_log *log;
    json_t *start;    /* the evaluation before the first step */
    int64_t half_way; /* the first step evaluated at least half way from chance to 1; 0: none yet */
    double started_s, shown_s, saved_s;
    int64_t started_step, saved_step;
    int64_t measured_before; /* peak of the last step before this program began; -1: unknown */
    int lock;                /* the folder's descriptor: one run at a time */
    int64_t process_growth;  /* -1: unknown, or no step was taken */
    int output_errno;        /* why standard output could not be written */
    bool terminal;
} run;

/* ---- signals ---- */

static volatile sig_atomic_t interrupted, save_wanted;

/* The first one stops the run where that loses nothing, a second one ends it at once. What follows within a
 * moment is the same request: timeout(1) and others send it to the process and to its group. */
static void on_stop(int number) {
    static struct timespec first;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (!interrupted) {
        interrupted = number;
        first = now;
    } else if ((double)(now.tv_sec - first.tv_sec) + 1e-9 * (double)(now.tv_nsec - first.tv_nsec) > 0.3) {
        cg_file_remove_unfinished();
        signal(number, SIG_DFL);
        raise(number);
    }
}

static void on_save(int number) {
    (void)number;
    save_wanted = 1;
}

static void handle(int number, void (*handler)(int)) {
    struct sigaction action = {.sa_handler = handler, .sa_flags = SA_RESTART};
    sigfillset(&action.sa_mask);
    sigaction(number, &action, NULL);
}

/* From the start: what must not end the program while there is nothing to save yet either. */
static void expect_signals(void) {
    handle(SIGUSR1, on_save); /* batch systems send it some time before they kill */
    signal(SIGPIPE, SIG_IGN); /* a reader that stops must not take the run with it */
    signal(SIGXFSZ, SIG_IGN); /* a file at its size limit is an error with a sentence, like a full disk */
}

/* From when there is something that stopping would lose. */
static void catch_stops(void) {
    struct sigaction hangup;
    handle(SIGINT, on_stop);
    handle(SIGTERM, on_stop);
    if (sigaction(SIGHUP, NULL, &hangup) == 0 && hangup.sa_handler != SIG_IGN) /* nohup: ignored */
        handle(SIGHUP, on_stop);
}

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- lines ---- */

/* Waits until output would be taken: a reader that sleeps must not keep a run from being stopped. False then. */
static bool output_is_free(void) {
    struct pollfd output = {.fd = STDOUT_FILENO, .events = POLLOUT};
    while (poll(&output, 1, interrupted ? 0 : -1) <= 0)
        if (interrupted) return false;
    return true;
}

static json_t *evaluation_json(const cg_evaluation *e) {
    json_t *layers = json_array();
    for (int i = 0; i < e->n_layers; i++) {
        const cg_indexer_state *s = &e->layers[i];
        json_array_append_new(
            layers,
            json_pack("{s:i, s:I, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "layer", s->layer, "rows",
                      (json_int_t)s->rows, "kl", json_figure(s->kl), "kl_uniform", json_figure(s->kl_uniform),
                      "captured", json_figure(s->captured), "recall", json_figure(s->recall), "mass",
                      json_figure(s->mass), "top1_missed", json_figure(s->top1_missed), "negative_weights",
                      json_figure(s->negative_weights), "distance", json_figure(s->distance)));
    }
    return json_pack("{s:o, s:o, s:o, s:o, s:o, s:o}", "val_loss", json_figure(e->val_loss), "val_accuracy",
                     json_figure(e->val_accuracy), "val_accuracy_far", json_figure(e->val_accuracy_far),
                     "captured", json_figure(e->captured), "recall", json_figure(e->recall), "indexers",
                     layers);
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
    if (r->options->json && line && output_is_free()) {
        char *text = json_dumps(line, JSON_COMPACT | JSON_PRESERVE_ORDER | JSON_REAL_PRECISION(17));
        if (text) puts(text);
        if (fflush(stdout))
            r->output_errno = errno; /* now: a line shall be there as a whole, whatever happens next */
        free(text);
    }
    return run_log_write(r->log, line, error);
}

/* What a shell reads as this one word. */
static void print_word(const char *word) {
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./:=+,@%-";
    bool control = false;
    for (const char *c = word; *c; c++) control |= cg_control_bytes(c, strlen(c)) > 0;
    if (*word && word[strspn(word, plain)] == 0) {
        fputs(word, stdout);
        return;
    }
    fputs(control ? "$'" : "'", stdout);
    size_t escaped = 0; /* bytes that are left of a control character */
    for (const char *c = word; *c; c++) {
        if (!escaped) escaped = cg_control_bytes(c, strlen(c));
        if (escaped)
            printf("\\x%02x", (unsigned char)*c), escaped--;
        else if (control && (*c == '\'' || *c == '\\'))
            printf("\\%c", *c);
        else if (*c == '\'')
            fputs("'\\''", stdout);
        else
            putchar(*c);
    }
    putchar('\'');
}

/* The command that goes on with this run, from this folder. */
static void print_resume(const run *r) {
    const train_options *o = r->options;
    const char *const words[][2] = {{"--out", r->dir},
                                    {"--data", o->data},
                                    {"--record-topk", o->record_topk},
                                    {"--replay-topk", o->replay_topk},
                                    {"--device", o->device.word},
                                    {"--threads", o->model.threads}};
    print_word(program_invocation_name);
    fputs(" train --resume", stdout);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        if (!words[i][1]) continue;
        printf(" %s ", words[i][0]);
        print_word(words[i][1]);
    }
    puts(o->verify_recompute ? " --verify-recompute" : "");
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
    if (!output_is_free()) return;
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
    if (r->saved_step == step || step == 0) return true;
    char path[600];
    cg_checkpoint_path(r->dir, step, path, sizeof path);
    /* The log first: after a power cut it must not lack a step that the checkpoint holds. */
    if (!run_log_sync(r->log, error) || !cg_trainer_save(r->trainer, path, error)) return false;
    r->saved_step = step;
    r->saved_s = now_s();
    remove_old_checkpoints(r, step);
    return true;
}

/* By the count of steps, by the clock (first behind the first step, so that no killed run has nothing), or on
 * demand. */
static bool save_is_due(const run *r) {
    int64_t step = cg_trainer_steps(r->trainer), every = r->config->checkpoint_every;
    double minutes = r->config->checkpoint_minutes;
    return save_wanted || (every > 0 && step % every == 0) ||
           (minutes > 0 && (r->saved_step < 0 || now_s() - r->saved_s >= 60 * minutes));
}

/* Output that cannot be written, to a full disk or a reader that stopped, ends the run; what was trained is
 * kept. */
static bool output_arrives(run *r, cg_error *error) {
    if (fflush(stdout) == 0 && !ferror(stdout)) return true;
    cg_error own = {0};
    int number = r->output_errno ? r->output_errno : errno,
        to_nowhere = open("/dev/null", O_WRONLY | O_CLOEXEC);
    if (to_nowhere >= 0) dup2(to_nowhere, STDOUT_FILENO), close(to_nowhere);
    fflush(stdout); /* what waits in it was complained about */
    clearerr(stdout);
    bool saved = r->log && save(r, &own) && r->saved_step > 0;
    if (saved) snprintf(own.text, sizeof own.text, "; checkpoint of step %" PRId64 " written", r->saved_step);
    return cg_fail(error, CG_FAILED, "the output could not be written: %s%s%s", strerror(number),
                   own.code ? "; " : "", own.text);
}

/* Make the trainer, fresh or from a checkpoint. */
static bool make_trainer(run *r, cg_error *error) {
    cg_trainer_options how = {.checkpoint = *r->checkpoint ? r->checkpoint : NULL,
                              .record_topk = r->options->record_topk,
                              .replay_topk = r->options->replay_topk,
                              .record_anew = r->anew,
                              .verify_recompute = r->options->verify_recompute,
                              .backend = r->options->device.backend,
                              .stop = &interrupted};
    return (r->trainer = cg_trainer_new(r->config, r->feed, &how, error)) != NULL;
}

/* The newest whole checkpoint; one that was read and is damaged is named, and the one before it is tried. One
 * that cannot be read is refused: it may be whole, and would be removed behind an older one. */
static bool find_checkpoint(run *r, cg_error *error) {
    enum { MOST = sizeof r->damage / sizeof *r->damage };
    int64_t steps[MOST];
    int n = cg_checkpoint_list(r->dir, steps, MOST, error);
    if (n <= 0) {
        r->anew = n == 0;
        return n == 0;
    }
    for (; r->n_damaged < n; r->n_damaged++) {
        cg_error *damage = &r->damage[r->n_damaged];
        r->saved_step = steps[r->n_damaged];
        cg_checkpoint_path(r->dir, r->saved_step, r->checkpoint, sizeof r->checkpoint);
        cg_checkpoint_state state = cg_checkpoint_look(r->checkpoint, damage);
        if (state == CG_CHECKPOINT_WHOLE) return true;
        if (state == CG_CHECKPOINT_UNREADABLE)
            return cg_fail(error, damage->code,
                           "--resume: %s; no older checkpoint is used, as this one may be whole", damage->text);
    }
    return cg_fail(error, CG_BAD_INPUT, "--resume: none of %d checkpoint%s in %s is whole; the newest: %s", n,
                   n == 1 ? "" : "s", cg_shown_path(r->dir).text, r->damage[0].text);
}

static bool is_among(const char *word, const char *const *words) {
    for (; *words; words++)
        if (!strcmp(word, *words)) return true;
    return false;
}

/* The configuration that the checkpoint was trained with, against that of now. What decides which data come
 * next must be the same: the position in them is counted in it. What changes the computation is named, in
 * `changes`; the rest changes no result, and the policy none but for rounding. */
static bool check_changes(const run *r, char *changes, size_t changes_bytes, cg_error *error) {
    static const char *const of_data[] = {"task",        "seq_len",       "batch_size",   "accumulate", "seed",
                                          "recall_keys", "recall_values", "recall_pairs", NULL};
    static const char *const harmless[] = {
        "steps", "eval_every", "eval_batches", "checkpoint_every", "checkpoint_minutes", "policy", NULL};
    cg_config trained;
    cg_config_key key;
    char was[CG_POLICY_BYTES + CG_MAX_LAYERS * 4], is[sizeof was];
    if (!cg_checkpoint_config(r->checkpoint, &trained, error)) return false;
    size_t n = 0;
    changes[0] = 0;
    for (int i = 0; cg_config_key_at(i, &key); i++) {
        cg_config_get(&trained, key.name, was, sizeof was);
        cg_config_get(r->config, key.name, is, sizeof is);
        if (!strcmp(was, is) || is_among(key.name, harmless)) continue;
        if (is_among(key.name, of_data))
            return cg_fail(
                error, CG_BAD_INPUT,
                "--resume: %s was %s and would be %s: it decides which data come next; start anew in "
                "another folder",
                key.name, was, is);
        if (n < changes_bytes)
            n += (size_t)snprintf(changes + n, changes_bytes - n, "%s %s was %s and is %s", n ? "," : "",
                                  key.name, was, is);
    }
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

/* A folder that holds a run is not overwritten. A log alone is no run yet: it was killed before its first
 * checkpoint. */
static bool dir_is_free(run *r, cg_error *error) {
    char path[600];
    struct stat facts;
    snprintf(path, sizeof path, "%s/metrics.jsonl", r->dir);
    int64_t step;
    int n = cg_checkpoint_list(r->dir, &step, 1, error);
    r->anew = n == 0 && stat(path, &facts) == 0;
    if (n <= 0) return n == 0;
    return cg_fail(error, CG_BAD_INPUT,
                   "--out: %s holds a run already: go on with --resume, or name another folder",
                   cg_shown_path(r->dir).text);
}

/* Two runs in one folder would mix their lines. The kernel drops the lock when the process ends, however it ends;
 * a file system without locks is used without. */
static bool lock_dir(run *r, cg_error *error) {
    r->lock = open(r->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (r->lock < 0 || flock(r->lock, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return true;
    return cg_fail(error, CG_BAD_INPUT, "--out: another run is writing to %s", cg_shown_path(r->dir).text);
}

/* Half-written files of programs that were killed; what another one is writing stays. */
static void remove_half_written(const run *r) {
    static const char *const names[] = {"config.json", "metrics.jsonl"};
    char path[600];
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(path, sizeof path, "%s/%s", r->dir, names[i]);
        cg_file_remove_stale(path);
    }
    cg_checkpoint_remove_stale(r->dir);
}

static bool is_evaluation_step(const cg_config *c, int64_t step) {
    return step == c->steps || (c->eval_every > 0 && step % c->eval_every == 0);
}

/* A model that looks back for its answers is beyond it, one that guesses well is not. */
static double half_way_accuracy(const run *r) { return 0.5 * (1 + cg_feed_facts_of(r->feed)->chance); }

static void note_half_way(run *r, int64_t step, const json_t *line) {
    if (!r->half_way && run_log_reaches(line, half_way_accuracy(r))) r->half_way = step;
}

static bool evaluate_into(run *r, json_t *line, cg_evaluation *e, cg_error *error) {
    if (!cg_trainer_evaluate(r->trainer, e, error)) return false;
    json_t *keys = evaluation_json(e);
    json_object_update(line, keys);
    json_decref(keys);
    return true;
}

/* A log that goes on is the log of a run that never stopped: the line of the step at hand has its evaluation
 * where one belongs, also when the run was stopped in the midst of it, and none where the end of an earlier run
 * took one. */
static bool mend_last_line(run *r, json_t *last, cg_evaluation *e, cg_error *error) {
    static const char *const evaluation[] = {"val_loss", "val_accuracy", "val_accuracy_far",
                                             "captured", "recall",       "indexers"};
    if (!is_evaluation_step(r->config, r->started_step))
        for (size_t i = 0; i < sizeof evaluation / sizeof *evaluation; i++)
            json_object_del(last, evaluation[i]);
    else if (!json_object_get(last, "val_loss"))
        return evaluate_into(r, last, e, error);
    return true;
}

/* Take over what the log holds of the steps before this program. */
static bool open_log(run *r, cg_evaluation *e, cg_error *error) {
    run_log_past past = {0};
    int64_t n_lines = 0;
    bool ok = r->started_step == 0 || run_log_read(r->dir, r->started_step, half_way_accuracy(r), &past, error);
    if (ok && past.last) {
        n_lines = r->started_step - json_integer_value(json_object_get(past.first, "step")) + 1;
        r->start = json_incref(json_object_get(past.first, "start"));
        const json_t *measured = json_object_get(past.last, "measured_peak_bytes");
        if (measured) r->measured_before = json_integer_value(measured);
        r->half_way = past.reached;
        ok = mend_last_line(r, past.last, e, error);
        note_half_way(r, r->started_step, past.last);
    }
    r->log_lost = r->started_step > 0 && !past.last;
    ok = ok && write_config(r, error) && (r->log = run_log_open(r->dir, n_lines, past.last, error));
    json_decref(past.first);
    json_decref(past.last);
    return ok;
}

/* What is the matter with the run that is taken up, on stderr. */
static void print_notes(const run *r, const char *changes) {
    for (int i = 0; i < r->n_damaged; i++)
        fprintf(stderr, "csagrad train: %s; the checkpoint of step %" PRId64 " is used instead\n",
                r->damage[i].text, r->started_step);
    if (r->anew)
        fprintf(stderr, "csagrad train: %s holds no checkpoint yet: the run starts anew\n",
                cg_shown_path(r->dir).text);
    if (r->log_lost)
        fprintf(stderr, "csagrad train: %s/metrics.jsonl is gone: a new log begins at step %" PRId64 "\n",
                cg_shown_path(r->dir).text, r->started_step + 1);
    if (*changes)
        fprintf(stderr, "csagrad train: from step %" PRId64 " on it is another computation:%s\n",
                r->started_step + 1, changes);
}

/* decay_steps does not follow steps, so that a run cut short and resumed is the same run: say where they are
 * far apart. */
static void print_decay(const cg_config *c) {
    if (c->min_lr_ratio == 1 || c->learning_rate == 0) return;
    if (c->steps < c->decay_steps / 2.0)
        printf("note: the run ends at step %" PRId64
               " with %.3g of the peak learning rate, the cosine ends at %" PRId64
               " (--set decay_steps=%" PRId64 " ends it with the run)\n",
               c->steps, cg_learning_rate(c, c->steps) / c->learning_rate, c->decay_steps, c->steps);
    else if (c->decay_steps < c->steps / 2.0)
        printf("note: the learning rate is at its lowest, %.3g of the peak, from step %" PRId64
               " to the end at %" PRId64 " (--set decay_steps=%" PRId64 " ends the cosine with the run)\n",
               c->min_lr_ratio, c->decay_steps, c->steps, c->steps);
}

static void print_head(const run *r) {
    const cg_feed_facts *facts = cg_feed_facts_of(r->feed);
    tool_print_model("csagrad train", r->config);
    if (r->options->device.backend) printf("device: %s\n", r->options->device.name);
    if (r->config->task == CG_TASK_TEXT)
        printf("data: %s, %" PRId64 " documents, %.1f MiB for training, %.1f MiB held out\n",
               cg_shown_path(facts->source).text, facts->documents, (double)facts->train_bytes / 1048576,
               (double)facts->held_out_bytes / 1048576);
    print_decay(r->config);
    if (r->options->data && *facts->skipped) printf("note: passed over: %s\n", facts->skipped);
    if (facts->repeated_bytes)
        printf("note: %.1f KiB held out stand word for word in the training part too, in files that are there "
               "twice: the losses on them say little\n",
               (double)facts->repeated_bytes / 1024);
    if (r->config->task != CG_TASK_TEXT)
        printf("data: recall, %" PRId64 " pairs and %" PRId64 " queries a sequence, distance %" PRId64
               " or more tokens, windows together reach %" PRId64 "; chance %.1f%%\n",
               facts->n_pairs, facts->n_queries, facts->min_distance, facts->reach, 100 * facts->chance);
    if (!cg_selection_is_exercised(r->config, r->feed))
        printf("note: no row sees more than index_topk = %" PRId64
               " compressed rows, so all are selected and this run does not test selection\n",
               r->config->index_topk);
    if (*r->checkpoint) printf("resumed at step %" PRId64 "\n", r->started_step);
}

/* Whatever may be wrong with the input is found before anything is made or changed in the folder. */
static bool begin(run *r, cg_evaluation *e, cg_error *error) {
    char changes[400] = "";
    bool resumes = r->options->resume;
    if (r->options->data && r->config->task != CG_TASK_TEXT)
        return cg_fail(error, CG_BAD_INPUT, "--data is for --task text: the recall task makes its own");
    if (!cg_folder_can_make(r->dir, error)) return false;
    if (resumes ? !lock_dir(r, error) || !find_checkpoint(r, error) : !dir_is_free(r, error)) return false;
    if (*r->checkpoint && !check_changes(r, changes, sizeof changes, error)) return false;
    if (!(r->feed = cg_feed_new(r->options->data, r->config, error)) || !make_trainer(r, error)) return false;
    r->started_step = cg_trainer_steps(r->trainer);
    if (*r->checkpoint && r->started_step != r->saved_step)
        return cg_fail(error, CG_BAD_INPUT, "--resume: %s is of step %" PRId64 ": it has another's name",
                       cg_shown_path(r->checkpoint).text, r->started_step);
    catch_stops();
    if (!resumes && (!cg_folder_make(r->dir, error) || !lock_dir(r, error) || !dir_is_free(r, error)))
        return false; /* looked at once more: another run may have come and gone */
    remove_half_written(r);
    if (!open_log(r, e, error)) return interrupted && cg_trainer_stopped(r->trainer);
    print_notes(r, changes);
    if (!r->options->json) print_head(r);
    return output_arrives(r, error);
}

/* The steps up to config->steps, or until a signal. */
static bool go(run *r, cg_evaluation *end, bool *evaluated, cg_error *error) {
    const cg_config *c = r->config;
    cg_metrics m;
    r->started_s = r->saved_s = now_s();
    if (cg_trainer_steps(r->trainer) == 0 && !interrupted) {
        if (!cg_trainer_evaluate(r->trainer, end, error)) return cg_trainer_stopped(r->trainer);
        r->start = evaluation_json(end);
    }
    for (int64_t step = cg_trainer_steps(r->trainer) + 1; step <= c->steps && !interrupted; step++) {
        if (!cg_trainer_step(r->trainer, &m, error)) {
            if (cg_trainer_stopped(r->trainer)) return true;
            cg_error second = {
                0}; /* the parameters are those of the step before: worth keeping, whatever comes */
            save(r, &second);
            return false;
        }
        r->process_growth = m.process_growth_bytes;
        json_t *line = metrics_json(&m);
        if (step == 1) json_object_set(line, "start", r->start);
        if (r->log_lost) json_object_set_new(line, RUN_LOG_BEGINS, json_true());
        r->log_lost = false;
        *evaluated = is_evaluation_step(c, step);
        if (*evaluated && !evaluate_into(r, line, end, error)) {
            *evaluated = false; /* a resumed run makes up for it */
            if (!cg_trainer_stopped(r->trainer)) {
                json_decref(line);
                return false;
            }
        }
        note_half_way(r, step, line);
        if (!log_line(r, line, error)) return false;
        if (save_is_due(r)) {
            save_wanted = 0;
            if (!save(r, error)) return false;
        }
        show_progress(r, &m, *evaluated ? end : NULL);
        if (!output_arrives(r, error)) return false;
    }
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

/* Of the last step, which may have been taken before this program began. */
static int64_t measured_bytes(const run *r) {
    bool stepped = cg_trainer_steps(r->trainer) > r->started_step;
    return stepped || r->measured_before < 0 ? cg_trainer_measured_bytes(r->trainer) : r->measured_before;
}

static void print_table(const run *r, const cg_evaluation *e) {
    const cg_plan *plan = cg_trainer_graph(r->trainer)->plan;
    printf("\n  %-34s %10s %10s\n", "held out", "start", "end");
    table_row("loss, nats per target", "%.4f", number_of(r->start, "val_loss"), e->val_loss);
    table_row("accuracy", "%.4f", number_of(r->start, "val_accuracy"), e->val_accuracy);
    if (!isnan(e->val_accuracy_far))
        table_row("accuracy beyond the windows", "%.4f", number_of(r->start, "val_accuracy_far"),
                  e->val_accuracy_far);
    if (r->config->task == CG_TASK_RECALL) { /* learned at once; a text is learned bit by bit */
        char half_way[64];
        snprintf(half_way, sizeof half_way, "accuracy of %.4f first at step", half_way_accuracy(r));
        table_row(half_way, "%.0f", NAN, r->half_way ? (double)r->half_way : NAN);
    }
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
           (double)measured_bytes(r) / 1048576);
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
    printf("  files: %s/metrics.jsonl, config.json, checkpoint-%08" PRId64 ".safetensors\n",
           cg_shown_path(r->dir).text, r->saved_step);
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
    json_object_set_new(line, "chance", json_figure(cg_feed_facts_of(r->feed)->chance));
    json_object_set_new(line, "half_way_step", r->half_way ? json_integer(r->half_way) : json_null());
    json_object_set_new(line, "planned_peak_bytes", json_integer(plan->peak_bytes));
    json_object_set_new(line, "measured_peak_bytes", json_integer(measured_bytes(r)));
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
    json_object_set_new(line, "seconds", json_figure(now_s() - r->started_s));
    if (r->start) json_object_set(line, "start", r->start);
    return line;
}

static void print_stop(const run *r) {
    int64_t step = cg_trainer_steps(r->trainer);
    if (r->terminal) putchar('\n');
    if (step == 0) {
        puts("stopped before the first step was done: nothing to save; the same command starts anew");
        return;
    }
    printf("stopped at step %" PRId64 ", checkpoint written: go on with ", step);
    print_resume(r);
}

static bool finish(run *r, cg_evaluation *e, bool evaluated, cg_error *error) {
    if (!save(r, error)) return false;
    if (!interrupted && !evaluated && !cg_trainer_evaluate(r->trainer, e, error) &&
        !cg_trainer_stopped(r->trainer)) /* a run resumed at its end */
        return false;
    if (interrupted) {
        if (!r->options->json && output_is_free()) print_stop(r);
    } else {
        if (!log_line(r, final_json(r, e), error)) return false;
        if (!r->options->json) print_table(r, e);
    }
    return output_arrives(r, error);
}

int csagrad_train(int argc, char **argv) {
    static const struct argp_child children[] = {
        TOOL_CHILD(tool_model_argp), TOOL_CHILD(tool_training_argp), TOOL_CHILD(tool_device_argp), {0}};
    static const struct argp argp = {
        .options = options,
        .parser = parse,
        .children = children,
        .doc = "Train the toy model; losses, indexer health and memory go to DIR/metrics.jsonl. Ctrl-C and "
               "SIGTERM stop it with a checkpoint, a second one at once; SIGUSR1 writes one."};
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
    expect_signals();
    run r = {.options = &o,
             .config = &o.model.config,
             .dir = o.out,
             .saved_step = -1,
             .measured_before = -1,
             .lock = -1,
             .process_growth = -1,
             .terminal = isatty(STDOUT_FILENO)};
    cg_evaluation *end = calloc(1, sizeof *end);
    bool evaluated = false;
    bool ok =
        end ? begin(&r, end, &error) && go(&r, end, &evaluated, &error) && finish(&r, end, evaluated, &error)
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
