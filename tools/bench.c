/* csagrad bench: how fast are the ops and a whole step, against what this machine can do?
 *
 * The two roofs are measured first: GFLOP/s of a 2048^3 matrix product and GB/s of a long sum. Then each part runs in a
 * process of its own on generated data. Times are medians; FLOPs count only what the causal, selected problem needs.
 * A saved JSON is an old measurement to compare with.
 *
 *     csagrad bench --dims flash --seqs 256,512,1024 --parts indexer-loss,attention
 *     csagrad bench --parts step --ops
 *     csagrad bench --json >old.json      ... and later: csagrad bench --compare old.json */
#include "tools/csagrad.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/file.h"
#include "core/math/roofline.h"
#include "core/base/shown.h"
#include "core/base/threads.h"
#include "tools/bench_device.h"
#include "tools/bench_row.h"
#include "tools/json_number.h"
#include "tools/options.h"
#include "tools/table.h"

enum {
    KEY_DIMS = TOOL_OWN_KEYS,
    KEY_SEQS,
    KEY_PARTS,
    KEY_DTYPES,
    KEY_RUNS,
    KEY_OPS,
    KEY_SAVE,
    KEY_COMPARE,
    KEY_TOLERANCE
};

enum { MAX_ITEMS = 32, MAX_RUNS = 1000 };

typedef struct arguments {
    tool_model model;
    tool_device device;
    const char *dims, *seqs, *parts, *dtypes, *runs, *save, *compare, *tolerance;
    bool json, ops;
    const bench_part *part[BENCH_PARTS];
    int64_t seq[MAX_ITEMS];
    cg_dtype dtype[CG_DTYPES];
    int n_parts, n_seqs, n_dtypes, n_runs;
    double slower; /* from which ratio of times on a row counts as slower */
} arguments;

typedef struct report {
    double gemm_gflops[CG_DTYPES], memory_gbytes; /* by dtype, 0: not needed, or not measured */
    bench_row *rows;
    int n_rows;
} report;

/* ---- options ---- */

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
    case KEY_PARTS:
        a->parts = arg;
        return 0;
    case KEY_DTYPES:
        a->dtypes = arg;
        return 0;
    case KEY_RUNS:
        a->runs = arg;
        return 0;
    case KEY_OPS:
        a->ops = true;
        return 0;
    case KEY_SAVE:
        a->save = arg;
        return 0;
    case KEY_COMPARE:
        a->compare = arg;
        return 0;
    case KEY_TOLERANCE:
        a->tolerance = arg;
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
     .doc = "sizes of the one CSA layer whose parts are measured: toy, flash or pro (default: toy); see "
            "csagrad mem"},
    {.name = "seqs",
     .key = KEY_SEQS,
     .arg = "TOKENS,...",
     .group = GROUP_INPUT,
     .doc =
         "lengths of the sequence, a row each (default: 1024,4096 for toy, else 512); not for the part step"},
    {.name = "parts",
     .key = KEY_PARTS,
     .arg = "NAME,...",
     .group = GROUP_INPUT,
     .doc = "indexer-loss (selection, chosen scores, KL), attention (teacher included), attention+loss, layer "
            "(forward "
            "and backward of the whole layer), step (a training step of the configured model, AdamW included) "
            "(default: all)"},
    {.name = "dtypes",
     .key = KEY_DTYPES,
     .arg = "NAME,...",
     .group = GROUP_INPUT,
     .doc = "number formats, a row each: f32, f64, bf16 (default: that of the configuration)"},
    {.name = "runs",
     .key = KEY_RUNS,
     .arg = "N",
     .group = GROUP_INPUT,
     .doc = "timed runs behind a first one, of which the median counts (default: 5)"},
    TOOL_OUTPUT_HEADER,
    {.name = "ops",
     .key = KEY_OPS,
     .group = GROUP_OUTPUT,
     .doc = "where the time of each row goes, op by op, against the roofs"},
    {.name = "save",
     .key = KEY_SAVE,
     .arg = "DIR",
     .group = GROUP_OUTPUT,
     .doc = "write the inputs of each row and what came of them (losses, selection, gradients) to "
            "DIR/PART-DIMS-TOKENS-DTYPE.safetensors, so that other programs can compute the same"},
    {.name = "compare",
     .key = KEY_COMPARE,
     .arg = "FILE",
     .group = GROUP_OUTPUT,
     .doc = "an earlier --json: print ratios of times, and end with 1 when a row got slower"},
    {.name = "tolerance",
     .key = KEY_TOLERANCE,
     .arg = "PERCENT",
     .group = GROUP_OUTPUT,
     .doc = "how much slower --compare lets pass (default: 10)"},
    TOOL_JSON_OPTION,
    {0}};
static const struct argp_child children[] = {TOOL_CHILD(tool_model_argp), TOOL_CHILD(tool_device_argp), {0}};
static const struct argp argp = {options,
                                 parse,
                                 NULL,
                                 "Time parts of a CSA layer and the step of a model, forward and backward, "
                                 "against the matrix products and the memory "
                                 "of this machine. JSON: gemm_peak_gflops, memory_peak_gbytes and rows.",
                                 children,
                                 NULL,
                                 NULL};

static bool read_parts(arguments *a, cg_error *error) {
    const char *names[BENCH_PARTS];
    char item[40];
    for (int p = 0; p < BENCH_PARTS; p++) names[p] = bench_parts[p].name;
    for (int p = 0; !a->parts && p < BENCH_PARTS; p++) a->part[a->n_parts++] = &bench_parts[p];
    for (const char *list = a->parts; tool_next_item(&list, item, sizeof item);) {
        int p = 0;
        while (p < BENCH_PARTS && strcmp(item, names[p])) p++;
        if (p == BENCH_PARTS) return tool_unknown("--parts", item, names, BENCH_PARTS, error);
        for (int k = 0; k < a->n_parts; k++)
            if (a->part[k] == &bench_parts[p])
                return cg_fail(error, CG_BAD_INPUT, "--parts names %s twice", item);
        a->part[a->n_parts++] = &bench_parts[p];
    }
    return true;
}

static bool read_seqs(arguments *a, cg_error *error) {
    char item[40];
    const char *list = a->seqs ? a->seqs : strcmp(a->dims, "toy") ? "512" : "1024,4096";
    while (tool_next_item(&list, item, sizeof item)) {
        if (a->n_seqs == MAX_ITEMS)
            return cg_fail(error, CG_BAD_INPUT, "--seqs has more than %d lengths", MAX_ITEMS);
        if (!tool_integer("--seqs", item, 1, INT64_C(1) << 30, &a->seq[a->n_seqs++], error)) return false;
    }
    return true;
}

static bool read_arguments(arguments *a, cg_error *error) {
    const char *names[8];
    int n = 0;
    cg_config layer;
    int64_t runs = 5, percent = 10;
    if (!a->dims) a->dims = "toy";
    while (n < 8 && (names[n] = cg_dims_name(n))) n++;
    if (!cg_config_dims(a->dims, &layer)) return tool_unknown("--dims", a->dims, names, n, error);
    if (a->json && a->compare)
        return cg_fail(error, CG_BAD_INPUT,
                       "--json and --compare: a comparison is a table, make each in its own run");
    if (a->save && a->device.word && strcmp(a->device.word, "cpu"))
        return cg_fail(error, CG_BAD_INPUT, "--save computes on the CPU: leave --device %s away",
                       a->device.word);
    if (a->tolerance && !a->compare) return cg_fail(error, CG_BAD_INPUT, "--tolerance goes with --compare");
    if (!tool_model_apply(&a->model, error) || !read_parts(a, error) || !read_seqs(a, error) ||
        !tool_dtypes("--dtypes", a->dtypes, &a->model.config, a->dtype, &a->n_dtypes, error))
        return false;
    if (a->runs && !tool_integer("--runs", a->runs, 1, MAX_RUNS, &runs, error)) return false;
    if (a->tolerance && !tool_integer("--tolerance", a->tolerance, 0, 1000, &percent, error)) return false;
    a->n_runs = (int)runs;
    a->slower = 1 + (double)percent / 100;
    return true;
}

/* ---- measuring ---- */

static bool save(const arguments *a, const cg_workload *w, const bench_row *r, cg_error *error) {
    char path[4096];
    int bytes = snprintf(path, sizeof path, "%s/%s-%s-%lld-%s.safetensors", a->save, r->name, r->dims,
                         (long long)r->seq, cg_dtype_name(r->dtype));
    if (bytes >= (int)sizeof path)
        return cg_fail(error, CG_BAD_INPUT, "--save: a folder's name is longer than %zu bytes", sizeof path);
    return cg_measure_save(w, path, error);
}

static bool measure(const arguments *a, const bench_part *p, int64_t seq, cg_dtype dtype, bench_row *r,
                    cg_error *error) {
    cg_workload w = {.config = a->model.config,
                     .part = p->part,
                     .no_optimizer = p->no_optimizer,
                     .backend = a->device.backend};
    if (!p->whole_model) {
        cg_config_dims(a->dims, &w.config);
        w.config.seq_len = seq;
        w.config.teacher = a->model.config.teacher;
        memcpy(w.config.policy, a->model.config.policy, sizeof w.config.policy);
    }
    w.config.dtype = dtype;
    if (!cg_config_check(&w.config, error)) return false;
    *r = (bench_row){.name = p->name,
                     .dims = p->whole_model ? "config" : a->dims,
                     .policy = a->model.config.policy,
                     .seq = w.config.seq_len,
                     .dtype = dtype};
    cg_step step;
    cg_measurement m = {0};
    bool ok = cg_measure_run(&w, a->n_runs, &step, &m, error) && (!a->save || save(a, &w, r, error));
    if (ok) {
        r->extra_peak_bytes = m.planned_peak_bytes - m.boundary_bytes;
        r->rss_peak_bytes = m.rss_peak_bytes;
        r->loss = m.loss;
        r->step_us = m.step_us;
        ok = bench_row_add_nodes(r, step.plan, m.node_us, error);
    } else {
        cg_error_at(error, "%s at %lld tokens", p->name, (long long)w.config.seq_len);
    }
    cg_measurement_free(&m);
    cg_step_free(&step);
    return ok;
}

/* On the CPU bf16 is measured against the product in f32, in which it computes. */
static bool measure_roofs(const arguments *a, report *out, cg_error *error) {
    for (int d = -1; d < a->n_dtypes; d++) {
        const cg_dtype dtype = d < 0 ? CG_F32 : a->dtype[d];
        double *gflops = &out->gemm_gflops[dtype];
        if (*gflops > 0 || (dtype == CG_BF16 && !a->device.backend)) continue;
        if (a->device.backend) {
            if (!bench_device_gemm(a->device.backend, dtype, gflops, error)) return false;
        } else {
            *gflops = cg_gemm_peak_gflops(dtype);
        }
        if (!(*gflops > 0))
            return cg_fail(error, CG_FAILED,
                           "out of memory for the matrix product that everything is compared with");
    }
    if (a->device.backend) return bench_device_memory(a->device.backend, &out->memory_gbytes, error);
    out->memory_gbytes = cg_memory_peak_gbytes();
    return true;
}

static bool measure_all(const arguments *a, report *out, cg_error *error) {
    if (a->save && (!cg_folder_make(a->save, error) || !cg_folder_can_make(a->save, error))) return false;
    out->rows = calloc((size_t)(BENCH_PARTS * MAX_ITEMS * CG_DTYPES), sizeof *out->rows);
    if (!out->rows) return cg_fail(error, CG_FAILED, "out of memory for rows");
    if (!measure_roofs(a, out, error)) return false;
    for (int p = 0; p < a->n_parts; p++)
        for (int d = 0; d < a->n_dtypes; d++)
            for (int s = 0; s < (a->part[p]->whole_model ? 1 : a->n_seqs); s++) {
                bench_row *r = &out->rows[out->n_rows];
                if (!measure(a, a->part[p], a->seq[s], a->dtype[d], r, error)) return false;
                r->peak_gflops =
                    out->gemm_gflops[r->dtype] > 0 ? out->gemm_gflops[r->dtype] : out->gemm_gflops[CG_F32];
                out->n_rows++;
            }
    return true;
}

static void report_free(report *r) {
    for (int i = 0; i < r->n_rows; i++) free(r->rows[i].ops);
    free(r->rows);
}

/* ---- output ---- */

static double gflops_of(const bench_row *r) { return r->flops / bench_row_us(r) * 1e-3; }

static void print_rows(const arguments *a, const report *out) {
    printf("matrix product %.1f GFLOP/s in f32", out->gemm_gflops[CG_F32]);
    for (int d = CG_F32 + 1; d < CG_DTYPES; d++)
        if (out->gemm_gflops[d] > 0) printf(", %.1f in %s", out->gemm_gflops[d], cg_dtype_name((cg_dtype)d));
    printf("; memory %.1f GB/s; ", out->memory_gbytes);
    if (a->device.backend)
        printf("%s\n\n", a->device.name);
    else
        printf("%d threads\n\n", cg_threads());
    table *t = table_new("llrlrrrrrrrr");
    static const char *const titles[] = {"part",       "dims",           "S",        "dtype",
                                         "forward ms", "backward ms",    "optimize", "GFLOP",
                                         "GFLOP/s",    "of the product", "GB/s",     "extra peak MiB"};
    for (size_t c = 0; c < sizeof titles / sizeof *titles; c++) table_cell(t, "%s", titles[c]);
    for (int i = 0; i < out->n_rows; i++) {
        const bench_row *r = &out->rows[i];
        table_cell(t, "%s", r->name);
        table_cell(t, "%s", r->dims);
        table_cell(t, "%lld", (long long)r->seq);
        table_cell(t, "%s", cg_dtype_name(r->dtype));
        table_cell(t, "%.3f", r->us[CG_FORWARD] / 1e3);
        table_cell(t, "%.3f", bench_row_backward_us(r) / 1e3);
        table_cell(t, "%.3f", r->us[CG_OPTIMIZE] / 1e3);
        table_cell(t, "%.3f", r->flops / 1e9);
        table_cell(t, "%.1f", gflops_of(r));
        table_cell(t, "%.0f %%", 100 * gflops_of(r) / r->peak_gflops);
        table_cell(t, "%.1f", r->bytes / bench_row_us(r) * 1e-3);
        table_cell(t, "%.3f", (double)r->extra_peak_bytes / 1048576);
    }
    table_print(t);
}

/* The roof of an op: the time that its FLOPs or its bytes take at least, whichever is more. */
static void print_ops(const report *out, const bench_row *r) {
    printf("\n%s, %s, %lld tokens, %s: %.3f ms, of which ops %.1f %%\n", r->name, r->dims, (long long)r->seq,
           cg_dtype_name(r->dtype), r->step_us / 1e3, 100 * bench_row_us(r) / r->step_us);
    table *t = table_new("llrrrrrrlr");
    static const char *const titles[] = {"op",      "pass", "nodes",     "ms",       "of the step",
                                         "GFLOP/s", "GB/s", "FLOP/byte", "bound by", "of its roof"};
    for (size_t c = 0; c < sizeof titles / sizeof *titles; c++) table_cell(t, "%s", titles[c]);
    for (int k = 0; k < r->n_ops; k++) {
        const bench_op *o = &r->ops[k];
        double compute_us = o->flops / r->peak_gflops * 1e-3, memory_us = o->bytes / out->memory_gbytes * 1e-3;
        double roof_us = compute_us > memory_us ? compute_us : memory_us;
        table_cell(t, *o->variant ? "%s, %s" : "%s", o->op, o->variant);
        table_cell(t, "%s", cg_pass_name(o->pass));
        table_cell(t, "%d", o->n_nodes);
        table_cell(t, "%.3f", o->us / 1e3);
        table_cell(t, "%.1f %%", 100 * o->us / r->step_us);
        table_cell(t, "%.1f", o->flops / o->us * 1e-3);
        table_cell(t, "%.1f", o->bytes / o->us * 1e-3);
        table_cell(t, "%.2f", o->bytes > 0 ? o->flops / o->bytes : 0);
        table_cell(t, "%s", compute_us > memory_us ? "products" : "memory");
        table_cell(t, "%.0f %%", 100 * roof_us / o->us);
    }
    table_print(t);
}

static json_t *row_json(const bench_row *r) {
    json_t *ops = json_array();
    for (int k = 0; k < r->n_ops; k++) {
        const bench_op *o = &r->ops[k];
        json_array_append_new(ops, json_pack("{s:s, s:s, s:s, s:i, s:f, s:f, s:f}", "op", o->op, "variant",
                                             o->variant, "pass", cg_pass_name(o->pass), "nodes", o->n_nodes,
                                             "us", o->us, "flops", o->flops, "bytes", o->bytes));
    }
    json_t *json = json_pack(
        "{s:s, s:s, s:I, s:s, s:s, s:i, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:I, s:I, s:o}", "name",
        r->name, "dims", r->dims, "seq", (json_int_t)r->seq, "dtype", cg_dtype_name(r->dtype), "policy",
        r->policy, "threads", cg_threads(), "fwd_us", r->us[CG_FORWARD], "bwd_us", bench_row_backward_us(r),
        "optimize_us", r->us[CG_OPTIMIZE], "step_us", r->step_us, "flops", r->flops, "bytes", r->bytes,
        "gflops", gflops_of(r), "peak_share", gflops_of(r) / r->peak_gflops, "extra_peak_bytes",
        (json_int_t)r->extra_peak_bytes, "rss_peak_bytes", (json_int_t)r->rss_peak_bytes, "ops", ops);
    if (json) json_object_set_new(json, "loss", json_figure(r->loss));
    return json;
}

static int print_json(const arguments *a, const report *out) {
    json_t *rows = json_array();
    for (int i = 0; i < out->n_rows; i++) json_array_append_new(rows, row_json(&out->rows[i]));
    json_t *root = json_pack("{s:s, s:f, s:f, s:f, s:f, s:o}", "device", a->device.name, "gemm_peak_gflops",
                             out->gemm_gflops[CG_F32], "gemm_peak_gflops_f64", out->gemm_gflops[CG_F64],
                             "gemm_peak_gflops_bf16", out->gemm_gflops[CG_BF16], "memory_peak_gbytes",
                             out->memory_gbytes, "rows", rows);
    json_print(root, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
    return 0;
}

/* ---- against an earlier measurement ---- */

static json_t *load_old(const char *path, cg_error *error) {
    json_error_t where;
    char *text;
    size_t bytes;
    if (!cg_file_read(path, 1 << 28, &text, &bytes, error)) {
        cg_error_at(error, "--compare");
        return NULL;
    }
    json_t *root = json_loadb(text, bytes, 0, &where);
    free(text);
    if (!root) {
        cg_fail(error, CG_BAD_INPUT, "--compare: %s: %s", cg_shown_path(path).text, where.text);
        return NULL;
    }
    json_t *rows = json_object_get(root, "rows");
    bool ok = json_is_array(rows) && json_is_number(json_object_get(root, "gemm_peak_gflops"));
    size_t i;
    json_t *old;
    json_array_foreach(rows, i, old) ok &=
        json_is_string(json_object_get(old, "name")) && json_is_string(json_object_get(old, "dims")) &&
        json_is_string(json_object_get(old, "dtype")) && json_is_integer(json_object_get(old, "seq")) &&
        json_is_integer(json_object_get(old, "threads")) && json_is_number(json_object_get(old, "fwd_us")) &&
        json_is_number(json_object_get(old, "bwd_us"));
    if (ok) return root;
    json_decref(root);
    cg_fail(error, CG_BAD_INPUT, "--compare: %s is no output of csagrad bench --json",
            cg_shown_path(path).text);
    return NULL;
}

static const json_t *find_old(const json_t *root, const bench_row *r) {
    size_t i;
    json_t *old;
    json_array_foreach(json_object_get(root, "rows"), i, old) {
        if (!strcmp(json_string_value(json_object_get(old, "name")), r->name) &&
            !strcmp(json_string_value(json_object_get(old, "dims")), r->dims) &&
            !strcmp(json_string_value(json_object_get(old, "dtype")), cg_dtype_name(r->dtype)) &&
            json_integer_value(json_object_get(old, "seq")) == r->seq &&
            json_integer_value(json_object_get(old, "threads")) == cg_threads())
            return old;
    }
    return NULL;
}

/* Times are put in units of the matrix product of their own run: on a busy or another machine both change alike. */
static int print_comparison(const report *out, const json_t *old, double slower) {
    double old_peak = json_number_value(json_object_get(old, "gemm_peak_gflops")),
           clock = old_peak / out->gemm_gflops[CG_F32];
    printf("\nAgainst the earlier run (matrix product then %.1f GFLOP/s, now %.1f); above 1: slower, in units "
           "of it\n",
           old_peak, out->gemm_gflops[CG_F32]);
    table *t = table_new("llrlrrl");
    static const char *const titles[] = {"part", "dims", "S", "dtype", "forward", "backward", ""};
    for (size_t c = 0; c < sizeof titles / sizeof *titles; c++) table_cell(t, "%s", titles[c]);
    int n_slower = 0, n_found = 0;
    for (int i = 0; i < out->n_rows; i++) {
        const bench_row *r = &out->rows[i];
        const json_t *was = find_old(old, r);
        if (!was) continue;
        double forward = r->us[CG_FORWARD] / json_number_value(json_object_get(was, "fwd_us")) / clock;
        double backward = bench_row_backward_us(r) / json_number_value(json_object_get(was, "bwd_us")) / clock;
        bool is_slower = forward > slower || backward > slower;
        n_found++;
        n_slower += is_slower;
        table_cell(t, "%s", r->name);
        table_cell(t, "%s", r->dims);
        table_cell(t, "%lld", (long long)r->seq);
        table_cell(t, "%s", cg_dtype_name(r->dtype));
        table_cell(t, "%.2f", forward);
        table_cell(t, "%.2f", backward);
        table_cell(t, "%s", is_slower ? "SLOWER" : "");
    }
    table_print(t);
    printf("%d of %d rows have a counterpart, %d got slower by more than %.0f %%\n", n_found, out->n_rows,
           n_slower, 100 * (slower - 1));
    return n_slower ? CG_FAILED : 0;
}

int csagrad_bench(int argc, char **argv) {
    arguments a = {0};
    cg_error error = {0};
    tool_parse(&argp, argc, argv, &a);
    report out = {0};
    json_t *old = NULL;
    bool ok = read_arguments(&a, &error) && (!a.compare || (old = load_old(a.compare, &error)) != NULL);
    ok = ok && tool_device_open(&a.device, &error) && measure_all(&a, &out, &error);
    int code = 0;
    if (!ok) {
        code = tool_failed(argv[0], &error);
    } else if (a.json) {
        code = print_json(&a, &out);
    } else {
        print_rows(&a, &out);
        for (int i = 0; a.ops && i < out.n_rows; i++) print_ops(&out, &out.rows[i]);
    }
    if (ok && old && !a.json) code = print_comparison(&out, old, a.slower);
    json_decref(old);
    report_free(&out);
    tool_device_close(&a.device);
    return code;
}
