/* csagrad mem: what does it cost in memory and time to save, recompute or stream the values that a training step needs
 * for its backward pass?
 *
 * Each row is one policy at one size. It is planned as training would, and then run in a process of its own on
 * generated data: planned and measured peak must be the same number, and a difference is an error. With --plan-only
 * nothing is run or allocated, so sizes beyond this machine are fine. The peak is the size of the one arena that
 * training reserves; memory outside it (code, libraries, the data feed) is not counted.
 *
 *     csagrad mem --dims toy --seqs 512,1024,2048 --policy save --policy stream --plan-only */
#include "tools/mem.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/file.h"
#include "models/train/data.h"
#include "tools/csagrad.h"
#include "tools/options.h"
#include "tools/out_of_memory.h"

enum {
    KEY_DIMS = TOOL_OWN_KEYS,
    KEY_SEQS,
    KEY_DTYPES,
    KEY_SEGMENTS,
    KEY_DATA,
    KEY_PART,
    KEY_NO_OPTIMIZER,
    KEY_WARM_UP,
    KEY_PLAN_ONLY,
    KEY_RUNS,
    KEY_VERIFY,
    KEY_VALUES,
    KEY_PARETO,
    KEY_HTML,
    KEY_SNAPSHOT,
    KEY_TRACE
};

enum { MAX_SIZES = 64, MAX_SEGMENTS = 4096, MAX_RUNS = 1000 };

typedef struct arguments {
    tool_model model;
    tool_device device;
    const char *dims, *seqs, *dtypes, *segments, *data, *part, *runs, *html, *snapshot, *trace;
    bool json, no_optimizer, warm_up, plan_only, verify, values, pareto;
    /* read from the texts above */
    int64_t seq[MAX_SIZES];
    cg_dtype dtype[CG_DTYPES];
    const char *policy[TOOL_SETTINGS + 3];
    int n_seqs, n_dtypes, n_policies, n_segments, n_runs;
    int32_t cu_seqlens[MAX_SEGMENTS + 1], seqlens[MAX_SEGMENTS];
    cg_part which;
} arguments;

static error_t parse(int key, char *arg, struct argp_state *state) {
    arguments *a = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &a->model;
        state->child_inputs[1] = &a->device;
        return 0;
    case KEY_DIMS:
        a->dims = arg;
        return 0;
    case KEY_SEQS:
        a->seqs = arg;
        return 0;
    case KEY_DTYPES:
        a->dtypes = arg;
        return 0;
    case KEY_SEGMENTS:
        a->segments = arg;
        return 0;
    case KEY_DATA:
        a->data = arg;
        return 0;
    case KEY_PART:
        a->part = arg;
        return 0;
    case KEY_NO_OPTIMIZER:
        a->no_optimizer = true;
        return 0;
    case KEY_WARM_UP:
        a->warm_up = true;
        return 0;
    case KEY_PLAN_ONLY:
        a->plan_only = true;
        return 0;
    case KEY_RUNS:
        a->runs = arg;
        return 0;
    case KEY_VERIFY:
        a->verify = true;
        return 0;
    case KEY_VALUES:
        a->values = true;
        return 0;
    case KEY_PARETO:
        a->pareto = true;
        return 0;
    case KEY_HTML:
        a->html = arg;
        return 0;
    case KEY_SNAPSHOT:
        a->snapshot = arg;
        return 0;
    case KEY_TRACE:
        a->trace = arg;
        return 0;
    case TOOL_JSON:
        a->json = true;
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_option options[] = {
    {.name = "dims",
     .key = KEY_DIMS,
     .arg = "NAME",
     .group = GROUP_INPUT,
     .doc =
         "toy, flash or pro: ONE CSA layer with the attention and indexer sizes of that model, batch 1, 512 "
         "tokens; the vocabulary is 256 and the feed-forward half as wide as one expert, since embedding, head "
         "and experts are not the question; other options override it (default: the configuration of the "
         "task)"},
    {.name = "seqs",
     .key = KEY_SEQS,
     .arg = "TOKENS,...",
     .group = GROUP_INPUT,
     .doc = "lengths of a sequence, a row each; with several, growth is fitted (default: --seq)"},
    {.name = "dtypes",
     .key = KEY_DTYPES,
     .arg = "NAME,...",
     .group = GROUP_INPUT,
     .doc = "number formats, a row each: f32, f64, bf16 (default: that of the configuration)"},
    {.name = "segments",
     .key = KEY_SEGMENTS,
     .arg = "REAL[/PHYSICAL],...",
     .group = GROUP_INPUT,
     .doc =
         "packed rows of these lengths in tokens instead of --batch times --seq; PHYSICAL - REAL is padding"},
    {.name = "data",
     .key = KEY_DATA,
     .arg = "PATH",
     .group = GROUP_INPUT,
     .doc =
         "file or folder of text that training would read; it decides how many segments the rows have room for "
         "(default: as many as there are; without --dims and --segments, as the sources and documents of this "
         "project would need)"},
    {.name = "part",
     .key = KEY_PART,
     .arg = "NAME",
     .group = GROUP_MODEL,
     .doc =
         "step: the whole training step; indexer-loss: selection, chosen scores and loss of one layer alone, "
         "from given queries, keys, head weights and teacher, with gradients (default: step)"},
    {.name = "no-optimizer",
     .key = KEY_NO_OPTIMIZER,
     .group = GROUP_MODEL,
     .doc = "forward and backward alone: no moments, no clipping, no update"},
    {.name = "warm-up",
     .key = KEY_WARM_UP,
     .group = GROUP_MODEL,
     .doc = "a step of the indexer's warm-up: dense attention and dense support"},
    {.name = "plan-only",
     .key = KEY_PLAN_ONLY,
     .group = GROUP_POLICY,
     .doc = "run nothing; times are estimated, and sizes may exceed this machine"},
    {.name = "runs",
     .key = KEY_RUNS,
     .arg = "N",
     .group = GROUP_POLICY,
     .doc = "timed runs of each row behind one that warms up; times are their medians (default: 3)"},
    {.name = "verify-recompute",
     .key = KEY_VERIFY,
     .group = GROUP_POLICY,
     .doc = "compare every recomputed value with its original, bit for bit; originals live longer for that, so "
            "peaks "
            "are higher"},
    TOOL_OUTPUT_HEADER,
    {.name = "values",
     .key = KEY_VALUES,
     .group = GROUP_OUTPUT,
     .doc =
         "every saved value of each row: bytes, who made it, which backward node reads it and when, and what "
         "computing it again would change"},
    {.name = "pareto",
     .key = KEY_PARETO,
     .group = GROUP_OUTPUT,
     .doc = "the curve of peak against extra time, over all sets of recomputations, from each of the policies "
            "save "
            "and stream that is asked for"},
    {.name = "html",
     .key = KEY_HTML,
     .arg = "FILE",
     .group = GROUP_OUTPUT,
     .doc = "write one page with timelines, bars, growth and curves, which needs no network"},
    {.name = "snapshot",
     .key = KEY_SNAPSHOT,
     .arg = "FILE",
     .group = GROUP_OUTPUT,
     .doc = "write the one row as a memory snapshot for PyTorch's viewer"},
    {.name = "trace",
     .key = KEY_TRACE,
     .arg = "FILE",
     .group = GROUP_OUTPUT,
     .doc = "write the one row as a Chrome trace with a counter of live bytes"},
    TOOL_JSON_OPTION,
    {0}};
static const struct argp_child children[] = {TOOL_CHILD(tool_model_argp), TOOL_CHILD(tool_device_argp), {0}};
static const struct argp argp = {options,
                                 parse,
                                 NULL,
                                 "What saving, recomputing or streaming costs: peak memory of a training step, "
                                 "planned and measured, and its time, "
                                 "one row per policy and size. --policy may be repeated; without it save, "
                                 "recompute and stream are set side by "
                                 "side. Tables are in MiB (2^20 bytes) and microseconds, JSON in bytes.",
                                 children,
                                 NULL,
                                 NULL};

/* ---- reading the command line ---- */

static bool read_seqs(arguments *a, cg_error *error) {
    char item[40];
    for (const char *list = a->seqs; tool_next_item(&list, item, sizeof item);) {
        cg_config probe = a->model.config;
        if (a->n_seqs == MAX_SIZES)
            return cg_fail(error, CG_BAD_INPUT, "--seqs has more than %d lengths", MAX_SIZES);
        if (!cg_config_set(&probe, "seq_len", item, error)) {
            cg_error_at(error, "--seqs");
            return false;
        }
        a->seq[a->n_seqs++] = probe.seq_len;
    }
    if (!a->n_seqs) a->seq[a->n_seqs++] = a->model.config.seq_len;
    return true;
}

static void add_policy(arguments *a, const char *policy) {
    for (int i = 0; i < a->n_policies; i++)
        if (!strcmp(a->policy[i], policy)) return;
    a->policy[a->n_policies++] = policy;
}

/* Those that --policy names, else the three forms and what --set or a file says. */
static void read_policies(arguments *a) {
    for (int i = 0; i < a->model.n_settings; i++)
        if (!strcmp(a->model.settings[i].option, "--policy")) add_policy(a, a->model.settings[i].text);
    if (a->n_policies) return;
    add_policy(a, "save");
    add_policy(a, "recompute");
    add_policy(a, "stream");
    add_policy(a, a->model.config.policy);
}

static bool read_segments(arguments *a, cg_error *error) {
    char item[64];
    const int64_t most = INT64_C(1) << 30;
    for (const char *list = a->segments; tool_next_item(&list, item, sizeof item); a->n_segments++) {
        char *slash = strchr(item, '/');
        int64_t real, physical, start = a->cu_seqlens[a->n_segments];
        if (a->n_segments == MAX_SEGMENTS)
            return cg_fail(error, CG_BAD_INPUT, "--segments has more than %d of them", MAX_SEGMENTS);
        if (slash) *slash++ = 0;
        if (!tool_integer("--segments: a length", item, 0, most, &real, error)) return false;
        physical = real;
        if (slash && !tool_integer("--segments: a physical length", slash, real, most, &physical, error))
            return false;
        if (start + physical > most)
            return cg_fail(error, CG_BAD_INPUT, "--segments: more than %lld rows together", (long long)most);
        a->seqlens[a->n_segments] = (int32_t)real;
        a->cu_seqlens[a->n_segments + 1] = (int32_t)(start + physical);
    }
    if (!a->segments) return true;
    snprintf(item, sizeof item, "%d", a->cu_seqlens[a->n_segments]);
    a->model.config.batch_size = 1;
    if (cg_config_set(&a->model.config, "seq_len", item, error)) return true;
    cg_error_at(error, "--segments: all rows together");
    return false;
}

static bool read_part(arguments *a, cg_error *error) {
    static const char *const names[] = {"step", "indexer-loss"};
    for (int i = 0; i < 2; i++)
        if (!a->part || !strcmp(a->part, names[i])) {
            a->which = i ? CG_PART_INDEXER_LOSS : CG_PART_STEP;
            return true;
        }
    return tool_unknown("--part", a->part, names, 2, error);
}

static bool read_dims(arguments *a, cg_error *error) {
    const char *names[8];
    int n = 0;
    if (!a->dims) return true;
    a->model.config_given = cg_config_dims(a->dims, &a->model.config);
    while (n < 8 && (names[n] = cg_dims_name(n))) n++;
    return a->model.config_given || tool_unknown("--dims", a->dims, names, n, error);
}

static bool read_runs(arguments *a, cg_error *error) {
    int64_t n = 3;
    if (a->plan_only && (a->runs || a->verify))
        return cg_fail(error, CG_BAD_INPUT, "%s: with --plan-only nothing runs",
                       a->runs ? "--runs" : "--verify-recompute");
    if (a->runs && !tool_integer("--runs", a->runs, 1, MAX_RUNS, &n, error)) return false;
    a->n_runs = a->plan_only ? 0 : (int)n;
    return true;
}

static bool read_arguments(arguments *a, cg_error *error) {
    if (a->seqs && a->segments)
        return cg_fail(error, CG_BAD_INPUT, "--seqs: the lengths of packed rows are those of --segments");
    if (!read_dims(a, error) || !tool_model_apply(&a->model, error) || !read_part(a, error) ||
        !read_runs(a, error) || !read_segments(a, error) || !read_seqs(a, error) ||
        !tool_dtypes("--dtypes", a->dtypes, &a->model.config, a->dtype, &a->n_dtypes, error))
        return false;
    read_policies(a);
    int n = a->n_seqs * a->n_dtypes * a->n_policies;
    const char *one = a->snapshot ? "--snapshot" : a->trace ? "--trace" : NULL;
    if (one && n > 1)
        return cg_fail(error, CG_BAD_INPUT,
                       "%s shows one row, and this makes %d: name one --policy and one size", one, n);
    const char *const files[][2] = {{"--html", a->html}, {"--snapshot", a->snapshot}, {"--trace", a->trace}};
    for (int i = 0; i < 3; i++)
        if (files[i][1] && !cg_file_can_write(files[i][1], error)) { /* before hours are spent on it */
            cg_error_at(error, "%s", files[i][0]);
            return false;
        }
    return true;
}

/* ---- rows ---- */

/* Segments that the rows have room for, as training would ask of its feed; 0: as many as there are. */
static bool room_for_segments(const arguments *a, const cg_config *config, int64_t *n, cg_error *error) {
    *n = 0;
    bool from_sources = !a->dims && !a->segments && a->which == CG_PART_STEP && config->task == CG_TASK_TEXT;
    if (!a->data && !from_sources) return true;
    cg_error own = {0};
    cg_feed *feed = cg_feed_new(a->data, config, &own);
    if (feed) *n = cg_feed_facts_of(feed)->max_segments;
    cg_feed_free(feed);
    if (feed || !a->data) return true; /* where those sources are not at hand, nothing depends on them */
    return cg_fail(error, own.code, "--data: %s", own.text);
}

static bool make_row(arguments *a, mem_row *row, const char *policy, int64_t seq, cg_dtype dtype,
                     cg_error *error) {
    cg_workload *w = &row->workload;
    *w = (cg_workload){.config = a->model.config,
                       .part = a->which,
                       .n_segments = a->n_segments,
                       .cu_seqlens = a->cu_seqlens,
                       .seqlens = a->seqlens,
                       .no_optimizer = a->no_optimizer,
                       .attend_all = a->warm_up,
                       .verify_recompute = a->verify,
                       .backend = a->device.backend};
    w->config.seq_len = seq;
    w->config.dtype = dtype;
    row->dims = a->dims ? a->dims : "config";
    row->dtype = dtype;
    row->n_rows = a->n_segments ? a->cu_seqlens[a->n_segments] : seq * w->config.batch_size;
    row->seq = seq;
    for (int b = 0; b < a->n_segments; b++) {
        int64_t physical = a->cu_seqlens[b + 1] - a->cu_seqlens[b];
        if (b == 0 || physical > row->seq) row->seq = physical;
    }
    snprintf(row->policy, sizeof row->policy, "%s", policy);
    if (!cg_config_set(&w->config, "policy", policy, error) || !cg_config_check(&w->config, error))
        return false;
    return room_for_segments(a, &w->config, &w->max_segments, error) && mem_row_make(row, a->n_runs, error);
}

static bool make_rows(arguments *a, mem_report *report, cg_error *error) {
    int n = a->n_seqs * a->n_dtypes * a->n_policies;
    report->rows = calloc((size_t)n, sizeof *report->rows);
    if (!report->rows) return cg_fail(error, CG_FAILED, "out of memory for %d rows", n);
    for (int s = 0; s < a->n_seqs; s++)
        for (int d = 0; d < a->n_dtypes; d++)
            for (int p = 0; p < a->n_policies; p++) {
                mem_row *row = &report->rows[report->n_rows++];
                if (!make_row(a, row, a->policy[p], a->seq[s], a->dtype[d], error)) return false;
            }
    return true;
}

static bool read_off(const arguments *a, mem_report *report, cg_error *error) {
    if (!mem_growth_make(report, error)) return false;
    for (int r = 0; (a->values || a->html) && r < report->n_rows; r++)
        if (!report->rows[r].refused && !mem_what_if_make(&report->rows[r], error)) return false;
    return !a->pareto || mem_curves_make(report, error);
}

/* ---- output ---- */

/* The command line as a shell takes it. */
static char *command_text(int argc, char **argv) {
    char *text = NULL;
    size_t bytes = 0;
    FILE *stream = open_memstream(&text, &bytes);
    if (!stream) tool_out_of_memory();
    for (int i = 0; i < argc; i++) {
        static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_@%+=:,./- ";
        /* the program's name is two words */
        bool quoted = i && (argv[i][strspn(argv[i], plain)] || strchr(argv[i], ' ') || !argv[i][0]);
        fputs(i ? " " : "", stream);
        if (quoted) fputc('\'', stream);
        for (const char *c = argv[i]; *c; c++)
            if (quoted && *c == '\'')
                fputs("'\\''", stream);
            else
                fputc(*c, stream);
        if (quoted) fputc('\'', stream);
    }
    if (ferror(stream) | fclose(stream) || !text) tool_out_of_memory();
    return text;
}

static bool write_files(const arguments *a, const mem_report *report, cg_error *error) {
    const mem_row *row = &report->rows[0];
    if ((a->snapshot || a->trace) && row->refused) return true; /* which the exit code says */
    return (!a->html || mem_page_write(report, a->html, error)) &&
           (!a->snapshot || mem_snapshot_write(row, a->snapshot, error)) &&
           (!a->trace || mem_trace_write(row, a->trace, error));
}

/* What is printed is right; what remains to say is which of it is no good. */
static bool rows_hold(const mem_report *report, cg_error *error) {
    for (int r = 0; r < report->n_rows; r++) {
        const mem_row *row = &report->rows[r];
        if (row->refused)
            return cg_fail(error, row->refused_code, "%s at %lld tokens: %s", row->policy, (long long)row->seq,
                           row->refused);
        if (row->m.node_us && row->m.measured_peak_bytes != row->m.planned_peak_bytes)
            return cg_fail(error, CG_FAILED, "%s at %lld tokens: %lld bytes were planned and %lld measured",
                           row->policy, (long long)row->seq, (long long)row->m.planned_peak_bytes,
                           (long long)row->m.measured_peak_bytes);
    }
    return true;
}

int csagrad_mem(int argc, char **argv) {
    arguments *a = calloc(1, sizeof *a);
    cg_error error = {0};
    mem_report report = {0};
    if (!a) tool_out_of_memory();
    tool_parse(&argp, argc, argv, a);
    char *title = command_text(argc, argv);
    report.title = title;
    bool ok = read_arguments(a, &error) && tool_device_open(&a->device, &error) &&
              make_rows(a, &report, &error) && read_off(a, &report, &error);
    if (ok && a->json) {
        mem_print_json(&report);
    } else if (ok) {
        tool_print_model(argv[0], &a->model.config);
        if (a->device.backend) printf("device: %s\n", a->device.name);
        putchar('\n');
        mem_print(&report);
        for (int r = 0; a->values && r < report.n_rows; r++)
            if (!report.rows[r].refused) mem_print_values(&report.rows[r]);
    }
    ok = ok && write_files(a, &report, &error) && rows_hold(&report, &error);
    int code = ok ? 0 : tool_failed(argv[0], &error);
    mem_report_free(&report);
    tool_device_close(&a->device);
    free(title);
    free(a);
    return code;
}
