/* csagrad train from outside: what a run writes, stop and go on, kill, damage, full disks, bad options, recorded
 * selections, memory. */
#include "tests/support.h"

#include <errno.h>
#include <jansson.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__)
enum { SANITIZED = 1 };
#else
enum { SANITIZED = 0 };
#endif

static char folder[] = "/tmp/csagrad_train_XXXXXX";

/* A model that takes a hundred steps in a second: every kind of layer, selection exercised. */
#define TINY                                                                                                   \
    " --set hidden_size=32 --set num_hidden_layers=3 --set compress_ratios=0,4,128 --set "                     \
    "num_attention_heads=2"                                                                                    \
    " --set head_dim=16 --set qk_rope_head_dim=8 --set q_lora_rank=16 --set o_groups=2 --set o_lora_rank=8"    \
    " --set sliding_window=8 --set index_n_heads=2 --set index_head_dim=8 --set index_topk=4"                  \
    " --set intermediate_size=32 --seq 144 --batch 2 --set warmup_steps=5 --set eval_every=5"                  \
    " --set eval_batches=1 --indexer-warmup 0 --policy stream "
#define TEXT " --task text --data text "
#define RECALL " --task recall "

/* ---- running the program ---- */

typedef struct outcome {
    int code; /* exit code, or minus the signal */
    char *out, *err;
} outcome;

static char *slurp(const char *path) {
    FILE *file = fopen(path, "r");
    if (!file) ck_abort_msg("%s cannot be opened", path);
    size_t bytes = 0, room = 1 << 16, got;
    char *text = malloc(room);
    while ((got = fread(text + bytes, 1, room - bytes - 1, file)) > 0)
        if ((bytes += got) == room - 1) text = realloc(text, room *= 2);
    fclose(file);
    text[bytes] = 0;
    return text;
}

static char *path_of(const char *format, ...) {
    static char paths[4][512]; /* the last four stay */
    static int next;
    char *path = paths[next++ % 4];
    int n = snprintf(path, sizeof paths[0], "%s/", folder);
    va_list args;
    va_start(args, format);
    vsnprintf(path + n, sizeof paths[0] - (size_t)n, format, args);
    va_end(args);
    return path;
}

/* Start `csagrad train ARGUMENTS` in the folder; no file that it writes may pass file_limit (0: none). */
static pid_t start(const char *arguments, rlim_t file_limit) {
    char command[4096];
    ck_assert_int_lt(snprintf(command, sizeof command, "cd %s && exec '%s' train %s >out 2>err </dev/null",
                              folder, CSAGRAD_PROGRAM, arguments),
                     (int)sizeof command);
    pid_t child = fork();
    ck_assert_int_ge(child, 0);
    if (child) return child;
    if (file_limit) setrlimit(RLIMIT_FSIZE, &(struct rlimit){file_limit, file_limit});
    execl("/bin/sh", "sh", "-c", command, (char *)NULL);
    _exit(127);
}

static outcome finish(pid_t child) {
    int status;
    ck_assert_int_eq(waitpid(child, &status, 0), child);
    return (outcome){WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status), slurp(path_of("out")),
                     slurp(path_of("err"))};
}

static void outcome_free(outcome *o) {
    free(o->out);
    free(o->err);
}

#define WITH_ARGUMENTS(text, format)                                                                           \
    char text[3072];                                                                                           \
    va_list args;                                                                                              \
    va_start(args, format);                                                                                    \
    ck_assert_int_lt(vsnprintf(text, sizeof text, format, args), (int)sizeof text);                            \
    va_end(args)

/* Exit code 0 and nothing on stderr; returns stdout, which the caller frees. */
__attribute__((format(printf, 1, 2))) static char *good(const char *format, ...) {
    WITH_ARGUMENTS(arguments, format);
    outcome o = finish(start(arguments, 0));
    if (o.code != 0 || o.err[0]) ck_abort_msg("train %s: exit code %d: %s", arguments, o.code, o.err);
    free(o.err);
    return o.out;
}

#define RUN(...) free(good(__VA_ARGS__))

static bool is_one_line(const char *err) {
    const char *end = strchr(err, '\n');
    return end && end[1] == 0 && !strncmp(err, "csagrad train: ", 15);
}

/* The exit code, and one sentence that holds a part. */
static void expect_bad(outcome o, const char *arguments, int code, const char *part) {
    if (o.code != code || !is_one_line(o.err) || !strstr(o.err, part))
        ck_abort_msg("train %s: exit code %d, expected %d and one line with \"%s\", got: %s", arguments, o.code,
                     code, part, o.err);
    outcome_free(&o);
}

__attribute__((format(printf, 3, 4))) static void bad(int code, const char *part, const char *format, ...) {
    WITH_ARGUMENTS(arguments, format);
    expect_bad(finish(start(arguments, 0)), arguments, code, part);
}

/* ---- files ---- */

__attribute__((format(printf, 1, 2))) static char *shell(const char *format, ...) {
    WITH_ARGUMENTS(command, format);
    char whole[3200];
    snprintf(whole, sizeof whole, "cd %s && { %s; } >shell 2>&1", folder, command);
    if (system(whole)) ck_abort_msg("%s: %s", command, slurp(path_of("shell")));
    return slurp(path_of("shell"));
}

#define SHELL(...) free(shell(__VA_ARGS__))

/* Names, times and content of all files in a folder. */
static char *state_of(const char *dir) {
    return shell("find %s -type f -printf '%%p %%s %%T@\\n' | sort; find %s -type f -exec cksum {} + | sort",
                 dir, dir);
}

static void expect_unchanged(const char *dir, char *before) {
    char *after = state_of(dir);
    ck_assert_str_eq(before, after);
    free(before);
    free(after);
}

static bool exists(const char *path) { return access(path, F_OK) == 0; }

static off_t size_of(const char *path) {
    struct stat facts;
    if (stat(path, &facts)) ck_abort_msg("%s is not there", path);
    return facts.st_size;
}

static void expect_no_tmp(const char *dir) {
    char *text = shell("find %s -name '*.tmp'", dir);
    ck_assert_str_eq(text, "");
    free(text);
}

static const char *checkpoint(const char *dir, int step) {
    return path_of("%s/checkpoint-%08d.safetensors", dir, step);
}

/* Text of made-up words, the same every time; `salt` gives another one. */
static bool write_text(const char *dir, unsigned salt) {
    if (mkdir(path_of("%s", dir), 0777) && errno != EEXIST) return false;
    for (int f = 0; f < 4; f++) {
        FILE *file = fopen(path_of("%s/%d.txt", dir, f), "w");
        if (!file) return false;
        unsigned x = 12345 + (unsigned)f + salt;
        for (int i = 0; i < 5000; i++) {
            x = x * 1103515245u + 12345u;
            fprintf(file, "%s%c",
                    (const char *[]){"key", "value", "row", "window", "sink", "head", "top", "a"}[x >> 29],
                    x >> 20 & 7 ? ' ' : '\n');
        }
        if (fclose(file)) return false;
    }
    return true;
}

/* ---- metrics ---- */

enum { MAX_LINES = 4096 };

typedef struct metrics {
    int n;
    json_t *lines[MAX_LINES];
} metrics;

/* Whole lines of JSON only; steps 1, 2, 3 ..., each once, then at most the final line. */
static metrics *metrics_of(const char *dir) {
    metrics *m = calloc(1, sizeof *m);
    char *text = slurp(path_of("%s/metrics.jsonl", dir));
    for (char *line = text, *end; *line; line = end + 1) {
        end = strchr(line, '\n');
        if (!end) ck_abort_msg("%s: half a line: %s", dir, line);
        json_t *object = json_loadb(line, (size_t)(end - line), JSON_REJECT_DUPLICATES, NULL);
        if (!json_is_object(object)) ck_abort_msg("%s: no JSON object: %s", dir, line);
        bool final = json_is_true(json_object_get(object, "final"));
        if (!final) ck_assert_int_eq(json_integer_value(json_object_get(object, "step")), m->n + 1);
        if (final) ck_assert_str_eq(end + 1, "");
        ck_assert_int_lt(m->n, MAX_LINES);
        m->lines[m->n++] = object;
    }
    free(text);
    return m;
}

static void metrics_free(metrics *m) {
    for (int i = 0; i < m->n; i++) json_decref(m->lines[i]);
    free(m);
}

static const json_t *last_line(const metrics *m) {
    ck_assert_int_gt(m->n, 0);
    return m->lines[m->n - 1];
}

static double number(const json_t *object, const char *key) {
    const json_t *value = json_object_get(object, key);
    if (!json_is_number(value)) ck_abort_msg("%s is no number", key);
    return json_number_value(value);
}

static int64_t integer(const json_t *object, const char *key) {
    const json_t *value = json_object_get(object, key);
    if (!json_is_integer(value)) ck_abort_msg("%s is no integer", key);
    return json_integer_value(value);
}

static void forget(json_t *line, const char *const *keys, size_t n) {
    for (size_t k = 0; k < n; k++) json_object_del(line, keys[k]);
}

/* Bit by bit but for what time and the kernel say, and, of other graphs, for what they plan. JSON has 17 digits: enough
 * to tell any two doubles apart. */
static void compare_metrics(const char *dir_a, const char *dir_b, bool same_graph) {
    static const char *const of_the_moment[] = {"tokens_per_s", "seconds", "process_growth_bytes",
                                                "process_peak_bytes"},
                             *const of_the_graph[] = {"planned_peak_bytes", "measured_peak_bytes",
                                                      "verified_clones",    "saved_bytes",
                                                      "recomputed_bytes",   "workspace_bytes"};
    metrics *a = metrics_of(dir_a), *b = metrics_of(dir_b);
    for (int i = 0; i < a->n && i < b->n; i++) {
        forget(a->lines[i], of_the_moment, 4);
        forget(b->lines[i], of_the_moment, 4);
        if (!same_graph) {
            forget(a->lines[i], of_the_graph, 6);
            forget(b->lines[i], of_the_graph, 6);
        }
        if (json_equal(a->lines[i], b->lines[i])) continue;
        ck_abort_msg("%s and %s differ in line %d:\n%s\n%s", dir_a, dir_b, i + 1, json_dumps(a->lines[i], 0),
                     json_dumps(b->lines[i], 0));
    }
    if (a->n != b->n) ck_abort_msg("%s has %d lines, %s has %d", dir_a, a->n, dir_b, b->n);
    metrics_free(a);
    metrics_free(b);
}

static void expect_same_metrics(const char *dir_a, const char *dir_b) { compare_metrics(dir_a, dir_b, true); }

/* The weights and moments of two checkpoints, bit for bit; their configurations may differ. */
static void expect_same_weights(const char *path_a, const char *path_b) {
    cg_error error = {0};
    cg_safetensors *a = cg_safetensors_open(path_a, &error), *b = cg_safetensors_open(path_b, &error);
    if (!a || !b) ck_abort_msg("%s", error.text);
    ck_assert_int_eq(cg_safetensors_count(a), cg_safetensors_count(b));
    for (int i = 0; i < cg_safetensors_count(a); i++) {
        const cg_named_tensor *one = cg_safetensors_at(a, i);
        const cg_tensor *two = cg_safetensors_find(b, one->name);
        size_t bytes = (size_t)cg_tensor_bytes(one->tensor.dtype, &one->tensor.shape);
        ck_assert(two && two->dtype == one->tensor.dtype && cg_shape_equal(&two->shape, &one->tensor.shape));
        if (memcmp(one->tensor.data, two->data, bytes)) ck_abort_msg("%s differs", one->name);
    }
    cg_safetensors_close(a);
    cg_safetensors_close(b);
}

/* Wait until a run has logged n steps. */
static void wait_for_lines(pid_t child, const char *dir, int n) {
    for (int tries = 0; tries < 6000; tries++) {
        int lines = 0;
        FILE *file = fopen(path_of("%s/metrics.jsonl", dir), "r");
        for (int c; file && (c = fgetc(file)) != EOF;) lines += c == '\n';
        if (file) fclose(file);
        if (lines >= n) return;
        if (waitpid(child, NULL, WNOHANG)) ck_abort_msg("the run ended early: %s", slurp(path_of("err")));
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    }
    ck_abort_msg("no %d steps within a minute", n);
}

/* ---- a good run ---- */

START_TEST(what_a_run_writes) {
    for (int recall = 0; recall < 2; recall++) {
        const char *dir = recall ? "good_recall" : "good_text";
        char *out = good(TINY "%s --steps 11 --set checkpoint_every=4 --out %s", recall ? RECALL : TEXT, dir);
        ck_assert_ptr_null(strpbrk(out, "\r\033"));
        ck_assert_ptr_nonnull(strstr(out, "step    11/11"));
        ck_assert_ptr_nonnull(strstr(out, "peak memory of a step: planned"));
        free(out);
        metrics *m = metrics_of(dir);
        ck_assert_int_eq(m->n, 12);
        for (int i = 0; i < 11; i++) {
            const json_t *line = m->lines[i];
            static const char *const keys[] = {"lm_loss", "grad_norm", "lr", "tokens_per_s"};
            for (size_t k = 0; k < sizeof keys / sizeof *keys; k++)
                ck_assert_double_gt(number(line, keys[k]), 0);
            ck_assert_double_ge(number(line, "indexer_loss"), 0);
            ck_assert_int_gt(integer(line, "planned_peak_bytes"), 0);
            ck_assert_int_eq(integer(line, "planned_peak_bytes"), integer(line, "measured_peak_bytes"));
            bool evaluated = (i + 1) % 5 == 0 || i == 10;
            ck_assert(evaluated == (json_object_get(line, "val_loss") != NULL));
            ck_assert(evaluated == (json_array_size(json_object_get(line, "indexers")) == 1));
        }
        const json_t *final = last_line(m), *begin = json_object_get(final, "start");
        ck_assert_int_eq(integer(final, "steps"), 11);
        ck_assert_double_gt(number(final, "val_loss"), 0);
        ck_assert_double_gt(number(begin, "val_loss"), 0);
        ck_assert(number(final, "captured") <= 1 && number(final, "recall") <= 1);
        ck_assert(json_is_true(json_object_get(final, "selection_exercised")));
        ck_assert(recall == json_is_number(json_object_get(final, "val_accuracy_far")));
        ck_assert_ptr_nonnull(json_object_get(final, "val_accuracy_far"));
        metrics_free(m);
        ck_assert(exists(checkpoint(dir, 11)) && exists(checkpoint(dir, 8)) && !exists(checkpoint(dir, 4)));
        expect_no_tmp(dir);
        /* config.json gives the same run again */
        RUN("--config %s/config.json %s --out again_%s", dir, recall ? "" : "--data text", dir);
        char again[64];
        snprintf(again, sizeof again, "again_%s", dir);
        expect_same_metrics(dir, again);
    }
}
END_TEST

/* The first evaluation half way from chance to 1, here on text of which one byte tells the next, is in the
 * final line: the same after stops before, at and behind it, and also where the end alone is evaluated. */
START_TEST(step_half_way) {
    enum { STEPS = 40, AT_END_ONLY = 4 };
    SHELL("mkdir easy; yes ab | tr -d '\\n' | head -c 20000 >easy/text");
    free(good(TINY "--data easy --steps %d --set eval_every=2 --out easy_straight", STEPS));
    metrics *m = metrics_of("easy_straight");
    int64_t first = 0;
    ck_assert_double_eq(number(last_line(m), "chance"), 0.5);
    for (int i = STEPS; i-- > 0;)
        if ((i + 1) % 2 == 0 && number(m->lines[i], "val_accuracy") >= 0.75) first = i + 1;
    ck_assert_int_gt(first, 4);
    ck_assert_int_lt(first, STEPS - 4);
    ck_assert_int_eq(integer(last_line(m), "half_way_step"), first);
    metrics_free(m);
    for (int64_t stop = first - 1; stop <= first + AT_END_ONLY; stop++) {
        bool end_only = stop == first + AT_END_ONLY;
        SHELL("rm -rf easy_parts");
        RUN(TINY "--data easy --steps %lld --set eval_every=%d --out easy_parts", (long long)stop,
            end_only ? 0 : 2);
        RUN("--data easy --resume --steps %d --out easy_parts", STEPS);
        if (!end_only) expect_same_metrics("easy_straight", "easy_parts");
        m = metrics_of("easy_parts");
        ck_assert_int_eq(integer(last_line(m), "half_way_step"), end_only ? STEPS : first);
        metrics_free(m);
    }
    char *out =
        good(TINY RECALL "--steps 2 --out not_half_way"); /* recall is learned at once: it has a row for it */
    static const char row[] = "  accuracy of 0.5312 first at step            -          -\n";
    if (!strstr(out, row)) ck_abort_msg("\"%s\" is not in: %s", row, out);
    free(out);
    m = metrics_of("not_half_way");
    ck_assert(json_is_null(json_object_get(last_line(m), "half_way_step")));
    metrics_free(m);
}
END_TEST

/* tools/show-learning makes its tables from runs that are finished without training them again. */
START_TEST(tables_of_what_is_learned) {
    static const char *const half_way[][3] = {{"125", "100", "150"}, {"null", "200", "null"}};
    for (int row = 0; row < 2; row++)
        for (int seed = 1; seed <= 3; seed++)
            SHELL("d=table/%s-%d; mkdir -p $d; echo '{\"step\":1}' >$d/metrics.jsonl; "
                  "echo '{\"final\":true,\"steps\":9,\"val_accuracy\":0.9%d,\"captured\":%s,\"recall\":0.5,"
                  "\"indexers\":[{\"recall\":0.1}],\"half_way_step\":%s,\"start\":{\"val_accuracy\":0.1}}' "
                  ">>$d/metrics.jsonl",
                  row ? "window" : "default", seed, 7 * seed % 10, row ? "null" : "1e-1",
                  half_way[row][seed - 1]);
    SHELL("'%s' train " TINY "--data text --steps 2 --out table/text-1 >table/text-1.txt", CSAGRAD_PROGRAM);
    SHELL("for s in 2 3; do cp -r table/text-1 table/text-$s; sed 's/\\( loss,.*\\) .*/\\1 1.'$s/ "
          "table/text-1.txt "
          ">table/text-$s.txt; done");
    char *text = shell("CSAGRAD='%s' '%s/tools/show-learning' --seeds 3 --out %s/table text default window",
                       CSAGRAD_PROGRAM, CSAGRAD_SOURCE_DIR, folder);
    char loss[96], *one = slurp(path_of("table/text-1.txt"));
    double start, end;
    ck_assert_int_eq(
        sscanf(strstr(one, "  loss, nats per target "), "  loss, nats per target %lf %lf", &start, &end), 2);
    snprintf(loss, sizeof loss, "| loss, nats per byte | %.3f | 1.300 (1.200 to %.3f) |\n", start, end);
    const char *const rows[] = {"| 94.0 (91.0 to 97.0) | 0.10 | 0.50 | 125 (100 to 150) |\n",
                                "| 94.0 (91.0 to 97.0) | - | 0.50 | 200, 2 of 3 never |\n", loss};
    free(one);
    for (int row = 0; row < 3; row++)
        if (!strstr(text, rows[row])) ck_abort_msg("\"%s\" is not in: %s", rows[row], text);
    ck_assert_ptr_null(strstr(text, "without warm-up"));
    free(text);
}
END_TEST

START_TEST(json_prints_the_log) {
    char *out = good(TINY RECALL "--steps 3 --json --out json"), *log = slurp(path_of("json/metrics.jsonl"));
    ck_assert_str_eq(out, log);
    free(out);
    free(log);
}
END_TEST

START_TEST(note_about_selection) {
    static const struct {
        const char *setting;
        bool noted;
    } list[] = {{"index_topk=35", false}, {"index_topk=36", true}, {"compress_ratios=0,0,128", true}};
    for (size_t i = 0; i < 3; i++) {
        char *out = good(TINY RECALL "--steps 2 --set %s --out note%zu", list[i].setting, i);
        const char *note = strstr(out, "does not test selection");
        ck_assert_msg((note != NULL) == list[i].noted, "%s: %s", list[i].setting, out);
        if (note) ck_assert_ptr_null(strstr(note + 1, "does not test selection"));
        free(out);
        char dir[16];
        snprintf(dir, sizeof dir, "note%zu", i);
        metrics *m = metrics_of(dir);
        ck_assert(json_is_true(json_object_get(last_line(m), "selection_exercised")) == !list[i].noted);
        metrics_free(m);
    }
}
END_TEST

/* One note, at most, where the cosine and the run end far apart. */
START_TEST(note_about_decay) {
    static const struct {
        const char *settings, *words;
    } list[] = {
        {"decay_steps=4", NULL},
        {"decay_steps=1", NULL},
        {"decay_steps=5", "note: the run ends at step 2 with "},
        {"decay_steps=5 --set min_lr_ratio=1", NULL},
        {"decay_steps=5 --set learning_rate=0", NULL},
        {"decay_steps=1 --steps 3", "note: the learning rate is at its lowest, 0.1 of the peak, from step 1 "}};
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        char *out =
            good(TINY RECALL "--steps 2 --set min_lr_ratio=0.1 --set warmup_steps=0 --set %s --out decay%zu",
                 list[i].settings, i);
        const char *note = strstr(out, "(--set decay_steps=");
        ck_assert_msg(!note == !list[i].words, "%s: %s", list[i].settings, out);
        if (note)
            ck_assert_msg(strstr(out, list[i].words) && !strstr(note + 1, "(--set decay_steps="), "%s", out);
        free(out);
    }
}
END_TEST

/* ---- stop and go on ---- */

/* 20 steps on all threads; 10, then 10 more on one thread. The warm-up ends between, at, or after the stop; the
 * stop is an evaluation step or not. */
START_TEST(stop_and_resume) {
    static const char *const variants[] = {"", "--indexer-warmup 13", "--set accumulate=2 --set eval_every=7"};
    for (int v = 0; v < 6; v++) {
        const char *task = v % 2 ? RECALL : TEXT, *data = v % 2 ? "" : "--data text",
                   *variant = variants[v / 2];
        char a[32], b[32];
        snprintf(a, sizeof a, "straight%d", v);
        snprintf(b, sizeof b, "parts%d", v);
        RUN(TINY "%s %s --steps 20 --out %s", task, variant, a);
        RUN(TINY "%s %s --steps 10 --threads 1 --out %s", task, variant, b);
        RUN("--steps 20 --resume %s --threads 1 --out %s", data, b);
        expect_same_metrics(a, b);
    }
}
END_TEST

START_TEST(stopped_by_signals) {
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP};
    for (int s = 0; s < 3; s++) {
        char dir[32], straight[32];
        snprintf(dir, sizeof dir, "signal%d", s);
        snprintf(straight, sizeof straight, "no_signal%d", s);
        char arguments[2048];
        snprintf(arguments, sizeof arguments, TINY RECALL "--steps 100000 --out %s", dir);
        pid_t child = start(arguments, 0);
        wait_for_lines(child, dir, 3);
        kill(child, signals[s]);
        outcome o = finish(child);
        ck_assert_int_eq(o.code, 128 + signals[s]);
        ck_assert_str_eq(o.err, "");
        ck_assert_ptr_nonnull(strstr(o.out, "checkpoint written: go on with "));
        outcome_free(&o);
        metrics *m = metrics_of(dir);
        int at = m->n;
        ck_assert_int_eq(integer(last_line(m), "step"), at);
        metrics_free(m);
        ck_assert(exists(checkpoint(dir, at)));
        RUN("--steps %d --resume --out %s", at + 4, dir);
        RUN(TINY RECALL "--steps %d --out %s", at + 4, straight);
        expect_same_metrics(dir, straight);
    }
}
END_TEST

START_TEST(killed) {
    pid_t child = start(TINY RECALL "--steps 100000 --set checkpoint_every=3 --out killed", 0);
    wait_for_lines(child, "killed", 8);
    kill(child, SIGKILL);
    outcome o = finish(child);
    ck_assert_int_eq(o.code, -SIGKILL);
    outcome_free(&o);
    FILE *file = fopen(path_of("killed/metrics.jsonl"), "a"); /* as if it had been killed within a line, too */
    fputs("{\"step\":100", file);
    fclose(file);
    int lines = 0;
    char *log = slurp(path_of("killed/metrics.jsonl"));
    for (const char *p = log; *p; p++) lines += *p == '\n';
    free(log);
    RUN("--steps %d --resume --out killed", lines + 3);
    RUN(TINY RECALL "--steps %d --set checkpoint_every=3 --out not_killed", lines + 3);
    expect_same_metrics("killed", "not_killed");
    expect_no_tmp("killed");
}
END_TEST

/* ---- killed before anything was saved, stopped wherever it is ---- */

static void sleep_ms(long ms) {
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000}, NULL);
}

/* Exit code 0, and stderr holds a part. */
__attribute__((format(printf, 2, 3))) static void noted(const char *part, const char *format, ...) {
    WITH_ARGUMENTS(arguments, format);
    outcome o = finish(start(arguments, 0));
    if (o.code != 0 || !strstr(o.err, part))
        ck_abort_msg("train %s: exit code %d, \"%s\" is not in: %s", arguments, o.code, part, o.err);
    outcome_free(&o);
}

/* A log alone, and a recording of that log's steps, are what is left of a run that was killed before its first
 * checkpoint: it starts anew, by the same command or with --resume. */
START_TEST(killed_before_the_first_checkpoint) {
    RUN(TINY RECALL "--steps 6 --record-topk early.topk --out early");
    RUN(TINY RECALL "--steps 3 --record-topk three.topk --out three");
    for (int kind = 0; kind < 6; kind++) {
        SHELL("rm -rf anew anew.topk; mkdir anew; cp early/config.json anew");
        if (kind % 3 == 0) SHELL(": >anew/metrics.jsonl; : >anew.topk");
        if (kind % 3 == 1) SHELL("head -n 2 early/metrics.jsonl >anew/metrics.jsonl; cp three.topk anew.topk");
        if (kind % 3 == 2) /* within a line, and between the data of a step and the head that counts it */
            SHELL("head -c 900 early/metrics.jsonl >anew/metrics.jsonl; cp three.topk anew.topk; "
                  "head -c 999 early.topk >>anew.topk; : >anew/config.json.tmp; "
                  ": >anew/checkpoint-00000001.safetensors.tmp");
        noted("anew holds no checkpoint yet: the run starts anew", "%s --out anew --record-topk anew.topk",
              kind < 3 ? TINY RECALL "--steps 6" : "--resume");
        expect_same_metrics("anew", "early");
        SHELL("cmp anew.topk early.topk");
        expect_no_tmp("anew");
    }
    /* in a new folder too, when it was killed before it made one */
    SHELL(": >anew.topk; rm -r anew");
    RUN(TINY RECALL "--steps 6 --record-topk anew.topk --out anew");
    SHELL("cmp anew.topk early.topk");
}
END_TEST

START_TEST(saved_by_the_clock) {
    RUN(TINY RECALL "--steps 6 --out clock");
    ck_assert(exists(checkpoint("clock", 1)) && exists(checkpoint("clock", 6)));
    RUN(TINY RECALL "--steps 6 --set checkpoint_minutes=0 --out no_clock");
    ck_assert(!exists(checkpoint("no_clock", 1)) && !exists(checkpoint("no_clock", 5)));
    RUN(TINY RECALL "--steps 6 --set checkpoint_minutes=1e-9 --out fast_clock");
    ck_assert(exists(checkpoint("fast_clock", 5)) && !exists(checkpoint("fast_clock", 4)));
    expect_same_metrics("clock", "no_clock");
    expect_same_metrics("clock", "fast_clock");
    expect_same_weights(checkpoint("no_clock", 6), checkpoint("fast_clock", 6));
}
END_TEST

/* Within a micro-batch of a step or of an evaluation; what the log then lacks, the resumed run makes up for. */
START_TEST(stopped_within_steps_and_evaluations) {
    static const char *const slow[] = {"--set accumulate=2000", "--set eval_batches=100000"};
    int stay = 200; /* milliseconds */
    for (int i = 0; i < 2; i++) {
        char arguments[2048];
        snprintf(arguments, sizeof arguments, TINY RECALL "--steps 10 --out slow%d %s", i, slow[i]);
        pid_t child = start(arguments, 0);
        for (int tries = 0; !exists(path_of("slow%d/metrics.jsonl", i)) && tries < 1000; tries++) sleep_ms(10);
        sleep_ms(200);
        kill(child, SIGTERM);
        outcome o = finish(child);
        ck_assert_msg(o.code == 128 + SIGTERM, "%s: %d", slow[i], o.code);
        ck_assert_ptr_nonnull(strstr(o.out, "stopped before the first step was done"));
        outcome_free(&o);
    }
    noted("starts anew", TINY RECALL "--steps 2 --out slow0"); /* the same folder */

    RUN(TINY RECALL "--steps 8 --set eval_every=6 --out not_within");
    RUN(TINY RECALL "--steps 4 --set eval_every=6 --out within");
    for (bool within = false; !within; stay *= 2) { /* the sixth step is evaluated for minutes */
        pid_t child = start("--steps 100000 --resume --set eval_batches=100000 --out within", 0);
        wait_for_lines(child, "within", 5);
        sleep_ms(stay);
        kill(child, SIGINT);
        outcome o = finish(child);
        ck_assert_int_eq(o.code, 130);
        within = strstr(o.out, "stopped at step 6");
        ck_assert(within || (strstr(o.out, "stopped at step 5") && stay < 10000)); /* a slow machine */
        outcome_free(&o);
    }
    metrics *m = metrics_of("within");
    ck_assert_int_eq(m->n, 6);
    ck_assert_ptr_null(json_object_get(m->lines[5], "val_loss"));
    metrics_free(m);
    RUN("--steps 8 --resume --set eval_batches=1 --out within");
    expect_same_metrics("within", "not_within");
}
END_TEST

/* Where nothing is read from the program's output, so that it waits there for ever. */
static pid_t start_unread(const char *dir, int *unread) {
    int ends[2];
    ck_assert_int_eq(pipe(ends), 0);
    pid_t child = fork();
    ck_assert_int_ge(child, 0);
    if (!child) {
        char command[4096];
        snprintf(command, sizeof command,
                 "cd %s && exec '%s' train " TINY RECALL "--steps 100000 --json --out %s 2>err </dev/null",
                 folder, CSAGRAD_PROGRAM, dir);
        dup2(ends[1], STDOUT_FILENO);
        close(ends[0]), close(ends[1]);
        execl("/bin/sh", "sh", "-c", command, (char *)NULL);
        _exit(127);
    }
    close(ends[1]);
    *unread = ends[0];
    return child;
}

static int end_of(pid_t child) {
    int status;
    ck_assert_int_eq(waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

/* ... and waiting for a reader that sleeps. */
START_TEST(stopped_while_nobody_reads) {
    int unread;
    pid_t child = start_unread("unread", &unread);
    for (off_t before = -1, now = 0; now != before || now == 0; sleep_ms(200)) { /* until it waits */
        before = now;
        if (exists(path_of("unread/metrics.jsonl"))) now = size_of(path_of("unread/metrics.jsonl"));
    }
    kill(child, SIGINT);
    ck_assert_int_eq(end_of(child), 130);
    close(unread);
    metrics *m = metrics_of("unread");
    ck_assert(exists(checkpoint("unread", m->n)));
    metrics_free(m);
}
END_TEST

/* A second signal ends what a first one only asks to end, but not at the same moment: timeout(1) sends it twice. */
START_TEST(a_second_signal_ends_at_once) {
    for (int tries = 0; tries < 20; tries++) {
        char arguments[2048], name[48];
        int status;
        snprintf(name, sizeof name, "second%d", tries);
        snprintf(arguments, sizeof arguments, TINY RECALL "--seq 1024 --batch 8 --steps 100000 --out %s", name);
        pid_t child = start(arguments, 0);
        wait_for_lines(child, name, 1);
        kill(child, SIGINT);
        kill(child, SIGINT);
        sleep_ms(5);
        kill(child, SIGSTOP); /* as if it had long to do yet */
        if (waitpid(child, &status, WUNTRACED) == child && !WIFSTOPPED(status)) continue; /* it had ended */
        sleep_ms(400);
        kill(child, SIGTERM);
        kill(child, SIGCONT);
        const int end = end_of(child);
        if (end == -SIGTERM) return;
        ck_assert(end == 128 + SIGINT ||
                  end == 128 + SIGTERM); /* it took them for one: both came behind the halt */
    }
    ck_abort_msg("20 times two requests were one, or the first was heeded within milliseconds");
}
END_TEST

START_TEST(a_reader_that_stops) {
    int unread;
    pid_t child = start_unread("reader", &unread);
    wait_for_lines(child, "reader", 3);
    close(unread);
    ck_assert_int_eq(end_of(child), 1);
    char *err = slurp(path_of("err"));
    ck_assert_msg(is_one_line(err) &&
                      strstr(err, "the output could not be written: Broken pipe; checkpoint of"),
                  "%s", err);
    free(err);
    metrics *m = metrics_of("reader");
    int n = m->n;
    metrics_free(m);
    ck_assert(exists(checkpoint("reader", n)));
    RUN("--steps %d --resume --out reader", n + 2);
    RUN(TINY RECALL "--steps %d --out no_reader", n + 2);
    expect_same_metrics("reader", "no_reader");
    /* a full disk under standard output, and none of the standard files open */
    SHELL("'%s' train " TINY RECALL "--steps 3 --out full_out >/dev/full; test $? -eq 1", CSAGRAD_PROGRAM);
    RUN(TINY RECALL "--steps 3 --out opened");
    SHELL("'%s' train " TINY RECALL "--steps 3 --json --out closed <&- >&- 2>&-", CSAGRAD_PROGRAM);
    expect_same_metrics("opened", "closed");
}
END_TEST

/* Batch systems send it before they kill. */
START_TEST(saves_on_demand) {
    pid_t child = start(TINY RECALL "--steps 100000 --set checkpoint_minutes=0 --out demand", 0);
    wait_for_lines(child, "demand", 2);
    char *none = shell("ls demand");
    ck_assert_ptr_null(strstr(none, "checkpoint-"));
    free(none);
    kill(child, SIGUSR1);
    for (int tries = 0; tries < 1000; tries++, sleep_ms(10)) {
        char *list = shell("ls demand");
        bool saved = strstr(list, "checkpoint-") && !strstr(list, ".tmp");
        free(list);
        if (saved) break;
        ck_assert_int_lt(tries, 999);
    }
    ck_assert_int_eq(waitpid(child, NULL, WNOHANG), 0);
    kill(child, SIGKILL);
    ck_assert_int_eq(end_of(child), -SIGKILL);
    char *saved = shell("ls demand | sed -n 's/checkpoint-0*\\([0-9]*\\).*/\\1/p'");
    int step = atoi(saved);
    free(saved);
    ck_assert_int_ge(step, 2);
    RUN("--resume --steps %d --out demand", step + 1);
    metrics_free(metrics_of("demand"));
}
END_TEST

/* The command that a stopped run prints goes on with it, wherever blanks and quotes stand. */
START_TEST(the_printed_command_works) {
    SHELL("cp -r text \"text of 'two'\"");
    pid_t child =
        start(TINY "--task text --data \"text of 'two'\" --steps 100000 --record-topk 'a b.topk' --out "
                   "'out $put'",
              0);
    wait_for_lines(child, "out $put", 3);
    kill(child, SIGINT);
    outcome o = finish(child);
    ck_assert_int_eq(o.code, 130);
    char *command = strstr(o.out, "go on with ");
    ck_assert_ptr_nonnull(command);
    command += strlen("go on with ");
    command[strcspn(command, "\n")] = 0;
    ck_assert_ptr_nonnull(strstr(command, "--resume"));
    metrics *m = metrics_of("out $put");
    int n = m->n;
    metrics_free(m);
    SHELL("%s --steps %d", command, n + 2);
    RUN(TINY TEXT "--steps %d --record-topk plain.topk --out plain", n + 2);
    expect_same_metrics("out $put", "plain");
    SHELL("cmp 'a b.topk' plain.topk");
    outcome_free(&o);
}
END_TEST

/* A run resumed at its end reports what it did at that end: the graph of its last step, its evaluation. */
START_TEST(resumed_at_its_end) {
    static const char *const variants[] = {"--indexer-warmup 4", "--indexer-warmup 6 --set eval_every=4"};
    for (int v = 0; v < 2; v++) {
        SHELL("rm -rf at_end end_twice");
        RUN(TINY RECALL "--steps 6 %s --out at_end", variants[v]);
        SHELL("cp -r at_end end_twice");
        RUN("--resume --out end_twice");
        expect_same_metrics("at_end", "end_twice");
        /* killed before its last line */
        SHELL("head -n 6 at_end/metrics.jsonl >end_twice/metrics.jsonl");
        RUN("--resume --out end_twice");
        expect_same_metrics("at_end", "end_twice");
    }
}
END_TEST

/* ---- logs and changes that do not fit ---- */

START_TEST(broken_logs_are_named) {
    RUN(TINY RECALL "--steps 6 --out log");
    static const struct {
        const char *how, *part;
    } list[] = {
        {"sed -i 3d", "log/metrics.jsonl, line 3: it is of step 4, expected the line of step 3"},
        {"sed -i 1d", "line 1: it is of step 2, expected the line of step 1"},
        {"sed -i 3p", "line 4: it is of step 3, expected the line of step 4"},
        {"sed -i '2{h;d};3{G}'", "line 2: it is of step 3, expected the line of step 2"},
        {"sed -i '4s/.$//'", "line 4: it is no JSON object"},
        {"sed -i '4s/.*//'", "line 4: it is no JSON object"},
        {"sed -i '5s/\"step\":5/\"step\":\"5\"/'", "line 5: it has no step"},
        {"sed -i '5,$d'", "line 5: the log ends before it, expected the line of step 5"},
        {"truncate -s -9000", "the log ends before it"},
        {"truncate -s 0", "line 1: the log ends before it"},
    };
    SHELL("cp -r log whole_log");
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        SHELL("rm -r log && cp -r whole_log log && %s log/metrics.jsonl", list[i].how);
        char *before = state_of("log");
        bad(2, list[i].part, "--steps 8 --resume --out log");
        expect_unchanged("log", before);
    }
    /* without a log a new one begins, and that is no broken one */
    SHELL("rm log/metrics.jsonl");
    noted("log/metrics.jsonl is gone: a new log begins at step 7", "--steps 8 --resume --out log");
    RUN("--steps 9 --resume --out log");
    char *steps = shell("grep -o '^{\"step\":[0-9]*' log/metrics.jsonl");
    ck_assert_str_eq(steps, "{\"step\":7\n{\"step\":8\n{\"step\":9\n");
    free(steps);
}
END_TEST

START_TEST(changes_are_refused_or_named) {
    RUN(TINY TEXT "--set accumulate=2 --steps 4 --out changes");
    static const struct {
        const char *change, *part;
    } list[] = {
        {"--set accumulate=3", "accumulate was 2 and would be 3: it decides which data come next"},
        {"--batch 1", "batch_size was 2 and would be 1"},
        {"--seq 145", "seq_len was 144 and would be 145"},
        {"--seed 2", "seed was 1 and would be 2"},
    };
    char *before = state_of("changes");
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        bad(2, list[i].part, "--resume --steps 6 --data text --out changes %s", list[i].change);
    }
    expect_unchanged("changes", before);
    /* in the file that stands beside the checkpoints, too */
    SHELL("sed -i 's/\"seed\": 1/\"seed\": 5/' changes/config.json");
    bad(2, "seed was 1 and would be 5", "--resume --steps 6 --data text --out changes");
    noted(
        "from step 5 on it is another computation: index_hadamard was true and is false, rope_theta was "
        "10000.0 "
        "and is 500.0",
        "--resume --steps 6 --seed 1 --set rope_theta=500 --set index_hadamard=false --set eval_every=3 --data "
        "text --out changes");
    RUN("--resume --steps 8 --data text --out changes");
}
END_TEST

START_TEST(one_run_per_folder) {
    pid_t child = start(TINY RECALL "--steps 100000 --set checkpoint_every=1 --out locked", 0);
    wait_for_lines(child, "locked", 2);
    char command[1024]; /* a shell of its own, as the outputs of the first run are in use */
    snprintf(command, sizeof command, "cd %s && '%s' train --resume --out locked >out2 2>err2", folder,
             CSAGRAD_PROGRAM);
    int status = system(command);
    kill(child, SIGINT);
    outcome o = finish(child);
    ck_assert(WIFEXITED(status) && WEXITSTATUS(status) == 2);
    char *err = slurp(path_of("err2"));
    ck_assert_msg(is_one_line(err) && strstr(err, "another run is writing to locked"), "%s", err);
    ck_assert_int_eq(o.code, 130);
    free(err);
    outcome_free(&o);
    metrics_free(metrics_of("locked"));
}
END_TEST

/* A step that fails ends the run, and the parameters before it are kept. */
START_TEST(failed_step_keeps_the_steps_before) {
    char arguments[2048];
    snprintf(arguments, sizeof arguments,
             TINY RECALL
             "--steps 1000 --set learning_rate=10 --set warmup_steps=1 --set max_grad_norm=0 "
             "--set initializer_range=10 --set swiglu_limit=0 --set weight_decay=10 --out diverged");
    outcome o = finish(start(arguments, 0));
    expect_bad(o, arguments, 1, "not finite");
    metrics *m = metrics_of("diverged");
    ck_assert(exists(checkpoint("diverged", m->n)));
    metrics_free(m);
}
END_TEST

/* ---- damage ---- */

static void flip(const char *path, off_t at) {
    FILE *file = fopen(path, "r+b");
    fseek(file, at, SEEK_SET);
    int c = fgetc(file);
    fseek(file, at, SEEK_SET);
    fputc(c ^ 0x10, file);
    fclose(file);
}

static void damage(const char *path, int kind) {
    off_t bytes = size_of(path);
    if (kind == 0) flip(path, bytes / 2);
    if (kind == 1) ck_assert_int_eq(truncate(path, bytes - 100), 0);
    if (kind == 2) ck_assert_int_eq(truncate(path, 0), 0);
    if (kind == 3) flip(path, 3);
}

START_TEST(damaged_checkpoints) {
    RUN(TINY TEXT "--steps 6 --set checkpoint_every=3 --set eval_every=0 --out whole");
    RUN(TINY TEXT "--steps 8 --set checkpoint_every=3 --set eval_every=0 --out straight");
    for (int kind = 0; kind < 4; kind++) {
        SHELL("rm -rf damaged && cp -r whole damaged");
        damage(checkpoint("damaged", 6), kind);
        outcome o = finish(start("--steps 8 --resume --data text --out damaged", 0));
        ck_assert_msg(o.code == 0 && is_one_line(o.err) && strstr(o.err, "checkpoint-00000006.safetensors") &&
                          strstr(o.err, "step 3 is used"),
                      "kind %d: exit code %d: %s", kind, o.code, o.err);
        outcome_free(&o);
        expect_same_metrics("damaged", "straight");
        SHELL("rm -rf damaged && cp -r whole damaged");
        damage(checkpoint("damaged", 6), kind);
        damage(checkpoint("damaged", 3), kind);
        char *before = state_of("damaged");
        bad(2, "none of 2 checkpoints in damaged is whole", "--steps 8 --resume --data text --out damaged");
        expect_unchanged("damaged", before);
    }
}
END_TEST

/* A newest checkpoint that cannot be read may be whole: it is neither passed over nor removed. A loop of links
 * stands for all that opening refuses, also to root. */
START_TEST(unreadable_checkpoints) {
    RUN(TINY TEXT "--steps 6 --set checkpoint_every=3 --set eval_every=0 --out unreadable");
    SHELL("cd unreadable && ln -s checkpoint-00000009.safetensors checkpoint-00000009.safetensors");
    char *before = state_of("unreadable");
    bad(2, "no older checkpoint is used, as this one may be whole",
        "--steps 12 --resume --data text --out unreadable");
    expect_unchanged("unreadable", before);
    SHELL("cd unreadable && rm checkpoint-00000009.safetensors && mv checkpoint-00000006.safetensors "
          "checkpoint-00000009.safetensors");
    bad(2, "is of step 6: it has another's name", "--steps 12 --resume --data text --out unreadable");
}
END_TEST

/* Damaged files of later steps must not count among the two that stay. */
START_TEST(pruning_spares_whole_checkpoints) {
    RUN(TINY TEXT "--steps 3 --out prune");
    SHELL("cd prune; cp checkpoint-00000003.safetensors kept; for i in 1 2; do head -c 5000 kept "
          ">checkpoint-0000009$i.safetensors; done; rm kept");
    outcome o = finish(start("--steps 4 --resume --data text --out prune", 0));
    ck_assert_int_eq(o.code, 0);
    ck_assert(strstr(o.err, "checkpoint-00000091") && strstr(o.err, "checkpoint-00000092"));
    outcome_free(&o);
    ck_assert(exists(checkpoint("prune", 3)) && exists(checkpoint("prune", 4)));
    ck_assert(!exists(checkpoint("prune", 91)) && !exists(checkpoint("prune", 92)));
    RUN("--steps 5 --resume --data text --out prune");
}
END_TEST

START_TEST(what_does_not_fit_is_refused) {
    RUN(TINY TEXT "--steps 4 --set checkpoint_every=2 --out fit");
    ck_assert(write_text("other_text", 77));
    char *before = state_of("fit");
    bad(2, "other data", "--steps 8 --resume --data other_text --out fit");
    bad(2, "ffn.w1.weight", "--steps 8 --resume --data text --set intermediate_size=48 --out fit");
    bad(2, "--data is for --task text", "--steps 8 --resume --data text --task recall --out fit");
    bad(2, "holds a run already", TINY TEXT "--steps 4 --out fit");
    expect_unchanged("fit", before);
    bad(2, "nowhere/config.json", "--steps 8 --resume --out nowhere");
    ck_assert(!exists(path_of("nowhere")));
    SHELL("mkdir only_config && cp fit/config.json only_config");
    outcome o = finish(start("--steps 8 --resume --data text --out only_config", 0));
    ck_assert_int_eq(o.code, 0);
    ck_assert_ptr_nonnull(strstr(o.err, "only_config holds no checkpoint yet: the run starts anew"));
    outcome_free(&o);
    SHELL("cp -r fit half_config && head -c 100 fit/config.json >half_config/config.json");
    bad(2, "half_config/config.json", "--steps 8 --resume --data text --out half_config");
}
END_TEST

/* ---- disks ---- */

START_TEST(folders_that_cannot_be) {
    SHELL("echo x >file");
    bad(2, "file", TINY RECALL "--steps 2 --out file");
    bad(2, "file", TINY RECALL "--steps 2 --out file/run");
    bad(2, "--out: a path of", TINY RECALL "--steps 2 --out %0600d", 1);
    bad(2, "folder", TINY RECALL "--steps 2 --out ''");
}
END_TEST

START_TEST(disk_full) {
    RUN(TINY RECALL "--steps 4 --set checkpoint_every=2 --set eval_every=0 --out before_full");
    RUN(TINY RECALL "--steps 30 --set eval_every=0 --out not_full");
    off_t log = size_of(path_of("before_full/metrics.jsonl")), saved = size_of(checkpoint("before_full", 4));
    struct {
        rlim_t limit;
        const char *arguments, *part;
    } list[] = {
        {(rlim_t)log + 1000, "--steps 30 --resume --set checkpoint_every=0 --out full", "full/metrics.jsonl"},
        {(rlim_t)saved - 1, "--steps 6 --resume --out full", "full/checkpoint-00000006.safetensors"},
        {100, "--steps 6 --resume --out full", "full/config.json"},
    };
    ck_assert_int_gt(saved, log + 4000); /* else the second one would not get as far as a checkpoint */
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        SHELL("rm -rf full && cp -r before_full full");
        expect_bad(finish(start(list[i].arguments, list[i].limit)), list[i].arguments, 1, list[i].part);
        metrics_free(metrics_of("full"));
        expect_no_tmp("full");
        SHELL("cmp before_full/checkpoint-00000004.safetensors full/checkpoint-00000004.safetensors");
        SHELL("cmp before_full/checkpoint-00000002.safetensors full/checkpoint-00000002.safetensors");
        RUN("--steps 30 --resume --set checkpoint_every=0 --out full");
        expect_same_metrics("full", "not_full");
    }
    expect_bad(finish(start(TINY RECALL "--steps 2 --out full_at_once", 100)), "", 1,
               "full_at_once/config.json");
    RUN(TINY RECALL "--steps 2 --out full_at_once");
}
END_TEST

/* ---- bad input leaves nothing behind ---- */

START_TEST(bad_options) {
    static const struct {
        const char *arguments, *part;
    } list[] = {
        {"--steps 0x10", "--steps: steps must be"},
        {"--steps 1e2", "--steps: steps must be"},
        {"--steps 0", "--steps: steps must be"},
        {"--seq -1", "--seq: seq_len must be"},
        {"--set indexer_loss_coeff=nan", "indexer_loss_coeff must be a number"},
        {"--set indexer_loss_coeff=inf", "indexer_loss_coeff must be a number"},
        {"--set indexer_loss_coeff=-1", "indexer_loss_coeff must be a number"},
        {"--set indexer_loss_coeff=false", "indexer_loss_coeff must be a number"},
        {"--set indexer_loss_coeff='\"false\"'", "indexer_loss_coeff must be a number"},
        {"--set indexer_loss_coeff=0x1p-3", "indexer_loss_coeff must be a number"},
        {"--set indexer_loss_coeff=1e-3abc", "indexer_loss_coeff must be a number"},
        {"--set indexer_loss_coeff=", "indexer_loss_coeff must be a number"},
        {"--set index_topk=-1", "index_topk must be an integer"},
        {"--set index_topk=3.5", "index_topk must be an integer"},
        {"--set compress_ratios=0,3,128", "compress_ratios must be"},
        {"--set compress_ratios=0,1,128", "compress_ratios must be"},
        {"--set sliding_window=0", "sliding_window must be an integer"},
        {"--set indexer_los_coeff=1", "did you mean indexer_loss_coeff?"},
        {"--policy nonsense", "unknown policy \"nonsense\", expected save, recompute, stream"},
        {"--policy recomput", "did you mean recompute?"},
        {"--policy recompute=softmx", "did you mean softmax?"},
        {"--policy softmax@layr1", "did you mean layer1?"},
        {"--policy 'stream+;'", "policy is empty"},
        {"--policy indexer_topk", "indexer_topk"},
        {"--threads 0", "--threads must be an integer from 1"},
        {"--threads 9999", "--threads must be an integer from 1"},
        {"--task text --data missing", "missing"},
        {"--task recall --data text", "--data is for --task text"},
        {"--task text --data text --seq 100000", "text is too short"},
        {"--teacher nobody", "--teacher: teacher must be one of"},
        {"--config missing.json", "--config: "},
        {"--resume", "bad/config.json"},
        {"--indexer-warmup -1", "--indexer-warmup: indexer_warmup must be"},
    };
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        bad(2, list[i].part, TINY "%s --out bad", list[i].arguments);
        if (exists(path_of("bad"))) ck_abort_msg("train %s made its folder", list[i].arguments);
    }
    RUN(TINY RECALL "--steps 1 --set index_topk=0 --out no_topk"); /* means: window and sink alone */
    metrics *m = metrics_of("no_topk");
    ck_assert_double_eq(number(m->lines[0], "indexer_loss"), 0);
    metrics_free(m);
}
END_TEST

/* ---- recorded selections ---- */

#define SOME TINY TEXT "--set accumulate=2 --steps 8 --indexer-warmup 2 "

START_TEST(record_and_replay) {
    RUN(SOME "--out chosen");
    RUN(SOME "--out recorded --record-topk recorded/topk.safetensors"); /* in the folder that the run makes */
    RUN(SOME "--out replayed --replay-topk recorded/topk.safetensors --record-topk copy.topk");
    compare_metrics("chosen", "recorded", false);
    compare_metrics("recorded", "replayed", false);
    SHELL("cmp chosen/checkpoint-00000008.safetensors recorded/checkpoint-00000008.safetensors");
    SHELL("cmp recorded/checkpoint-00000008.safetensors replayed/checkpoint-00000008.safetensors");
    SHELL("cmp recorded/topk.safetensors copy.topk");
    char *text = shell("'%s' info copy.topk", CSAGRAD_PROGRAM);
    ck_assert_ptr_nonnull(strstr(text, "topk  i32    [12, 1, 288, 4]"));
    ck_assert_ptr_nonnull(strstr(text, "first_step = 3"));
    free(text);
    /* other policies on the same selections: recomputing changes no bit, and is certified */
    RUN(SOME "--out of_save --policy save --replay-topk copy.topk");
    char *out = good(SOME "--out of_recompute --policy recompute --replay-topk copy.topk --verify-recompute");
    ck_assert_ptr_nonnull(strstr(out, "nodes ran again in each step, with the same bits as their originals"));
    free(out);
    compare_metrics("of_save", "of_recompute", false);
    expect_same_weights(checkpoint("of_save", 8), checkpoint("of_recompute", 8));
    metrics *m = metrics_of("of_recompute"), *streamed = metrics_of("recorded");
    ck_assert_int_eq(integer(last_line(m), "verified_clones"), 2);
    for (int i = 0; i < 8; i++)
        ck_assert_double_le(fabs(number(m->lines[i], "lm_loss") - number(streamed->lines[i], "lm_loss")), 1e-4);
    metrics_free(m);
    metrics_free(streamed);
}
END_TEST

/* However a run ends, the file holds the steps that were taken, and goes on with the run. */
START_TEST(stopped_while_recording) {
    static const int signals[] = {SIGINT, SIGKILL};
    for (int s = 0; s < 2; s++) {
        pid_t child =
            start(TINY RECALL "--steps 100000 --set checkpoint_every=3 --record-topk stop.topk --out stop", 0);
        wait_for_lines(child, "stop", 8);
        kill(child, signals[s]);
        outcome o = finish(child);
        ck_assert_int_eq(o.code, s == 0 ? 130 : -SIGKILL);
        outcome_free(&o);
        int lines = 0;
        char *log = slurp(path_of("stop/metrics.jsonl")), expected[64];
        for (const char *p = log; *p; p++) lines += *p == '\n';
        free(log);
        if (s == 0) {
            char *text = shell("'%s' info stop.topk", CSAGRAD_PROGRAM);
            snprintf(expected, sizeof expected, "[%d, 1, 288, 4]", lines);
            ck_assert_msg(strstr(text, expected) != NULL, "%s is not in %s", expected, text);
            free(text);
        }
        RUN("--steps %d --resume --record-topk stop.topk --out stop", lines + 4);
        RUN(TINY RECALL "--steps %d --set checkpoint_every=3 --record-topk go.topk --out go", lines + 4);
        SHELL("cmp stop.topk go.topk");
        RUN(TINY RECALL "--steps %d --replay-topk stop.topk --out again", lines + 4);
        compare_metrics("stop", "again", false);
        SHELL("rm -r stop go again stop.topk go.topk");
    }
}
END_TEST

START_TEST(recordings_that_do_not_fit) {
    RUN(SOME "--out fits --set checkpoint_every=4 --record-topk fits.topk");
    SHELL("cp fits.topk torn.topk && printf x >>torn.topk && head -c 9000 fits.topk >cut.topk && cp fits.topk "
          "bad.topk && "
          "printf '\\377' | dd of=bad.topk bs=1 seek=5000 conv=notrunc");
    static const struct {
        const char *arguments, *part;
    } list[] = {
        {SOME "--replay-topk none.topk", "none.topk: cannot be opened"},
        {SOME "--replay-topk torn.topk", "torn.topk: 1 bytes follow the last tensor"},
        {SOME "--replay-topk cut.topk", "cut.topk: tensor 'topk': data_offsets"},
        {SOME "--replay-topk bad.topk", "bad.topk is damaged: its content has checksum"},
        {SOME "--replay-topk fits/config.json", "fits/config.json: claims a header"},
        {SOME "--replay-topk fits/checkpoint-00000008.safetensors", "is not a recording of selections"},
        {SOME "--replay-topk fits.topk --steps 9",
         "6 steps from step 3 on, this run needs those of the steps 3 to 9"},
        {SOME "--replay-topk fits.topk --indexer-warmup 1", "needs those of the steps 2 to 8"},
        {SOME "--replay-topk fits.topk --indexer-warmup 8", "the indexer's warm-up takes all 8 steps"},
        {SOME "--replay-topk fits.topk --seed 9", "was recorded with seed 1, this run has 9"},
        {SOME "--replay-topk fits.topk --seq 140", "was recorded with seq_len 144, this run has 140"},
        {SOME "--replay-topk fits.topk --batch 1", "was recorded with batch_size 2, this run has 1"},
        {SOME "--replay-topk fits.topk --set accumulate=1", "was recorded with accumulate 2, this run has 1"},
        {SOME "--replay-topk fits.topk --set index_topk=5", "was recorded with index_topk 4, this run has 5"},
        {SOME "--replay-topk fits.topk --set compress_ratios=4,0,128",
         "was recorded with layers 1, this run has 0"},
        {SOME "--replay-topk fits.topk --set compress_ratios=0,0,128", "compress_ratios holds no 4"},
        {SOME "--record-topk new.topk --set compress_ratios=0,0,128", "compress_ratios holds no 4"},
        {SOME "--record-topk new.topk --set index_topk=0", "index_topk is 0"},
        {SOME "--record-topk fits.topk", "fits.topk is there already"},
        {SOME "--record-topk fits.topk --replay-topk fits.topk", "cannot be replayed and recorded to at once"},
        {SOME "--record-topk fits", "fits is there already"},
        {SOME "--record-topk fits/config.json/below", "in the way"},
        {SOME "--verify-recompute", "policy stream computes nothing again"},
        {SOME "--verify-recompute --policy save", "policy save computes nothing again"},
    };
    char *before = state_of("fits*");
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        bad(2, list[i].part, "%s --out unfit", list[i].arguments);
        if (exists(path_of("unfit")) || exists(path_of("new.topk")))
            ck_abort_msg("%s leaves files", list[i].arguments);
    }
    ck_assert(write_text("other_text", 77));
    bad(2, "was recorded with data", SOME "--data other_text --replay-topk fits.topk --out unfit");
    const char *more = "--steps 12 --resume --data text --out fits";
    bad(2, "needs those of the steps 9 to 12", "%s --replay-topk fits.topk", more);
    bad(2, "bad.topk is damaged", "%s --record-topk bad.topk", more);
    bad(2, "is not a recording", "%s --record-topk fits/checkpoint-00000008.safetensors", more);
    bad(2, "cannot be replayed and recorded", "%s --record-topk fits.topk --replay-topk fits.topk", more);
    expect_unchanged("fits*", before);
    /* of a run of fewer steps than the checkpoint has */
    RUN(SOME "--out fewer --steps 4 --record-topk fewer.topk");
    bad(2, "2 steps from step 3 on: it cannot go on at step 9", "%s --record-topk fewer.topk", more);
    /* without a file, what follows is recorded, and can be replayed from the same checkpoint */
    SHELL("cp -r fits replays");
    RUN("%s --record-topk later.topk", more);
    RUN("--steps 12 --resume --data text --out replays --replay-topk later.topk");
    SHELL("cmp fits/checkpoint-00000012.safetensors replays/checkpoint-00000012.safetensors");
}
END_TEST

/* Wide selections, so that the recording is soon larger than the checkpoint, which must still fit. */
#define WIDE TINY RECALL "--set index_topk=32 --set eval_every=0 "

START_TEST(disk_full_while_recording) {
    RUN(WIDE "--steps 1 --out wide");
    const off_t head = 4096, step = 288 * 32 * 4;
    rlim_t limit = (rlim_t)(size_of(checkpoint("wide", 1)) + head + step);
    const char *arguments = WIDE "--steps 300 --record-topk full.topk --out topk_full";
    expect_bad(finish(start(arguments, limit)), arguments, 1, "full.topk cannot be written");
    metrics *m = metrics_of("topk_full");
    int n = m->n;
    metrics_free(m);
    ck_assert_int_gt(n, 5);
    ck_assert_int_eq(size_of(path_of("full.topk")), head + step * n);
    ck_assert(exists(checkpoint("topk_full", n)));
    RUN("--steps %d --resume --record-topk full.topk --out topk_full", n + 2);
    RUN(WIDE "--steps %d --record-topk not_full.topk --out topk_not_full", n + 2);
    SHELL("cmp full.topk not_full.topk");
}
END_TEST

/* ---- memory ---- */

START_TEST(plan_is_what_the_process_grows_by) {
    if (SANITIZED) {
        puts("plan_is_what_the_process_grows_by: skipped, as sanitizers take memory of their own");
        return;
    }
    static const char *const policies[] = {"save", "recompute", "stream"};
    double loss[3];
    for (int p = 0; p < 3; p++) {
        RUN(TEXT "--steps 1 --set eval_batches=1 --policy %s --out memory_%s", policies[p], policies[p]);
        char dir[32];
        snprintf(dir, sizeof dir, "memory_%s", policies[p]);
        metrics *m = metrics_of(dir);
        int64_t planned = integer(m->lines[0], "planned_peak_bytes");
        ck_assert_int_eq(integer(m->lines[0], "measured_peak_bytes"), planned);
        ck_assert_int_eq(integer(last_line(m), "planned_peak_bytes"), planned);
        ck_assert_int_gt(planned, 100 << 20);
        double growth = number(last_line(m), "process_growth_bytes") / (double)planned;
        printf("policy %s: planned %lld bytes, the process grew by %.4f of that\n", policies[p],
               (long long)planned, growth);
        ck_assert_double_le(fabs(growth - 1), 0.03);
        loss[p] = number(m->lines[0], "lm_loss");
        ck_assert_double_le(fabs(loss[p] - loss[0]), 1e-6 * loss[0]);
        metrics_free(m);
    }
}
END_TEST

int main(void) {
    if (!mkdtemp(folder) || !write_text("text", 0)) return EXIT_FAILURE;
    const TTest *const tests[] = {what_a_run_writes,
                                  step_half_way,
                                  tables_of_what_is_learned,
                                  json_prints_the_log,
                                  note_about_selection,
                                  note_about_decay,
                                  stop_and_resume,
                                  stopped_by_signals,
                                  killed,
                                  killed_before_the_first_checkpoint,
                                  saved_by_the_clock,
                                  stopped_within_steps_and_evaluations,
                                  stopped_while_nobody_reads,
                                  a_second_signal_ends_at_once,
                                  a_reader_that_stops,
                                  saves_on_demand,
                                  the_printed_command_works,
                                  resumed_at_its_end,
                                  broken_logs_are_named,
                                  changes_are_refused_or_named,
                                  one_run_per_folder,
                                  failed_step_keeps_the_steps_before,
                                  damaged_checkpoints,
                                  unreadable_checkpoints,
                                  pruning_spares_whole_checkpoints,
                                  what_does_not_fit_is_refused,
                                  folders_that_cannot_be,
                                  disk_full,
                                  bad_options,
                                  record_and_replay,
                                  stopped_while_recording,
                                  recordings_that_do_not_fit,
                                  disk_full_while_recording,
                                  plan_is_what_the_process_grows_by};
    int failed = suite_run("tools_train", tests, (int)(sizeof tests / sizeof *tests));
    char command[64];
    snprintf(command, sizeof command, "rm -r %s", folder);
    return system(command) ? EXIT_FAILURE : failed;
}
