/* csagrad gradcheck: are all gradients right?
 *
 * Every op's cases in f64: the full Jacobian and a random output gradient against central differences, choices
 * held fixed. Then the whole layer: a small model with window, CSA and HCA layers under every policy, support
 * and teacher. An op without gradient is listed apart with its reason and is no pass; a check that compared
 * nothing fails.
 *
 *     csagrad gradcheck --op csa_attention --json */
#include "tools/csagrad.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/threads.h"
#include "models/dsv4/layer_check.h"
#include "tools/json_number.h"
#include "tools/options.h"
#include "tools/out_of_memory.h"
#include "tools/table.h"

enum { KEY_OP = TOOL_OWN_KEYS };

typedef struct arguments {
    const char *op;
    tool_device device;
    bool json;
} arguments;

static error_t parse(int key, char *arg, struct argp_state *state) {
    arguments *a = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &a->device;
        return 0;
    case KEY_OP:
        a->op = arg;
        return 0;
    case TOOL_JSON:
        a->json = true;
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_option options[] = {
    {.doc = "Input:", .group = GROUP_INPUT},
    {.name = "op",
     .key = KEY_OP,
     .arg = "NAME",
     .group = GROUP_INPUT,
     .doc = "check this op alone and not the layer (default: all ops, then the layer)"},
    TOOL_OUTPUT_HEADER,
    {.name = "json", .key = TOOL_JSON, .group = GROUP_OUTPUT, .doc = "print JSON"},
    {0}};
static const struct argp_child children[] = {TOOL_CHILD(tool_device_argp), {0}};
static const struct argp argp = {
    options,
    parse,
    NULL,
    "Compare every gradient with central differences in f64. The bound is a relative error of 1e-6, measured "
    "against "
    "the largest derivative of the same input. Exits with 1 when a gradient is wrong or nothing was compared.",
    children,
    NULL,
    NULL};

typedef struct result {
    const cg_op *op;
    int n_cases;
    bool ok;
    cg_gradcheck_report report;
    cg_error error; /* the check itself failed */
} result;

/* Check ops; false when one is wrong or none has a gradient. An error: the machine refused, which says nothing of ops. */
static bool check_ops(const cg_op *only, const cg_backend *backend, result *results, int *n, cg_error *error) {
    bool ok = true;
    int n_compared = 0;
    *n = 0;
    for (int o = 0; o < cg_all_ops.n; o++) {
        if (only && cg_all_ops.list[o] != only) continue;
        result *r = &results[(*n)++];
        r->op = cg_all_ops.list[o];
        r->ok =
            cg_gradcheck_op(&cg_all_ops, r->op, backend, &r->n_cases, &r->report, &r->error) && r->report.ok;
        if (r->error.code == CG_FAILED) return cg_fail(error, CG_FAILED, "%s", r->error.text);
        if (!r->op->differentiable) continue;
        ok &= r->ok;
        n_compared++;
    }
    return ok && n_compared > 0;
}

/* ---- output ---- */

static void print_json(const result *results, int n, const cg_layer_report *layer, bool ok) {
    json_t *ops = json_array(), *without = json_array();
    for (int i = 0; i < n; i++) {
        const result *r = &results[i];
        if (!r->op->differentiable) {
            json_array_append_new(without, json_pack("{s:s, s:s}", "op", r->op->name, "why",
                                                     r->op->no_grad ? r->op->no_grad : "not stated"));
            continue;
        }
        json_array_append_new(ops,
                              json_pack("{s:s, s:i, s:f, s:b, s:I, s:I, s:s}", "op", r->op->name, "cases",
                                        r->n_cases, "worst_rel", r->report.worst_rel, "ok", r->ok, "entries",
                                        (json_int_t)r->report.n_entries, "kinks", (json_int_t)r->report.n_kinks,
                                        "worst", r->error.code ? r->error.text : r->report.worst));
    }
    json_t *root =
        json_pack("{s:b, s:o, s:o, s:n}", "ok", ok, "ops", ops, "without_gradient", without, "layer");
    if (layer) {
        json_t *runs = json_array();
        for (int i = 0; i < layer->n_runs; i++) {
            const cg_layer_run *run = &layer->runs[i];
            json_array_append_new(runs, json_pack("{s:s, s:s, s:s, s:s, s:f, s:b, s:I, s:I}", "policy",
                                                  run->policy, "support", run->support, "teacher", run->teacher,
                                                  "loss", run->loss, "worst_rel", run->report.worst_rel, "ok",
                                                  run->report.ok, "entries", (json_int_t)run->report.n_entries,
                                                  "kinks", (json_int_t)run->report.n_kinks));
        }
        json_object_set_new(root, "layer",
                            json_pack("{s:f, s:b, s:I, s:I, s:s, s:o}", "worst_rel", layer->worst_rel, "ok",
                                      layer->ok, "entries", (json_int_t)layer->n_entries, "kinks",
                                      (json_int_t)layer->n_kinks, "worst", layer->worst, "runs", runs));
    }
    json_print(root, JSON_INDENT(2) | JSON_REAL_PRECISION(6));
}

static table *titled(const char *columns, const char *const *titles) {
    table *t = table_new(columns);
    for (size_t c = 0; c < strlen(columns); c++) table_cell(t, "%s", titles[c]);
    return t;
}

static void counts(table *t, const cg_gradcheck_report *report, bool ok) {
    table_cell(t, "%lld", (long long)report->n_entries);
    table_cell(t, "%lld", (long long)report->n_kinks);
    table_cell(t, "%.1e", report->worst_rel);
    table_cell(t, "%s", ok ? "yes" : "NO");
}

static void print_ops(const result *results, int n) {
    table *t = titled("lrrrrl",
                      (const char *const[]){"op", "cases", "entries", "kinks", "worst relative error", "ok"});
    int n_without = 0;
    for (int i = 0; i < n; i++) {
        n_without += !results[i].op->differentiable;
        if (!results[i].op->differentiable) continue;
        table_cell(t, "%s", results[i].op->name);
        table_cell(t, "%d", results[i].n_cases);
        counts(t, &results[i].report, results[i].ok);
    }
    table_print(t);
    for (int i = 0; i < n; i++)
        if (results[i].op->differentiable && !results[i].ok)
            printf("%s: %s\n", results[i].op->name,
                   results[i].error.code ? results[i].error.text : results[i].report.worst);
    if (n_without == 0) return;
    puts("\nNot checked, and no pass:");
    t = titled("ll", (const char *const[]){"op", "why it has no gradient"});
    for (int i = 0; i < n; i++) {
        if (results[i].op->differentiable) continue;
        table_cell(t, "%s", results[i].op->name);
        table_cell(t, "%s", results[i].op->no_grad ? results[i].op->no_grad : "not stated");
    }
    table_print(t);
}

static void print_layer(const cg_layer_report *layer) {
    puts("\nThe layer: window, CSA and HCA in one model, selection held fixed");
    table *t = titled("llllrrrl", (const char *const[]){"policy", "support", "teacher", "loss", "entries",
                                                        "kinks", "worst relative error", "ok"});
    for (int i = 0; i < layer->n_runs; i++) {
        const cg_layer_run *run = &layer->runs[i];
        table_cell(t, "%s", run->policy);
        table_cell(t, "%s", run->support);
        table_cell(t, "%s", run->teacher);
        table_cell(t, "%s", run->loss);
        counts(t, &run->report, run->report.ok);
    }
    table_print(t);
    if (!layer->ok) puts(layer->worst);
}

static const cg_op *find_op(const char *name, cg_error *error) {
    const cg_op *op = cg_op_find(&cg_all_ops, name);
    if (op) return op;
    const char **names = tool_malloc((size_t)cg_all_ops.n * sizeof *names);
    for (int o = 0; o < cg_all_ops.n; o++) names[o] = cg_all_ops.list[o]->name;
    tool_unknown("op", name, names, cg_all_ops.n, error);
    cg_error_at(error, "--op");
    free(names);
    return NULL;
}

int csagrad_gradcheck(int argc, char **argv) {
    arguments a = {0};
    cg_error error = {0};
    tool_parse(&argp, argc, argv, &a);
    const cg_op *only = a.op ? find_op(a.op, &error) : NULL;
    if ((a.op && !only) || !tool_device_open(&a.device, &error)) return tool_failed(argv[0], &error);
    result *results = calloc((size_t)cg_all_ops.n, sizeof *results);
    cg_layer_report *layer = calloc(1, sizeof *layer);
    if (!results || !layer) tool_out_of_memory();
    cg_threads_set(1, NULL); /* shapes are tiny: threads would wait more than work */
    int n;
    bool ok = check_ops(only, a.device.backend, results, &n, &error);
    if (!a.json && !error.code) {
        printf("%s: central differences in f64, bound 1e-6, device %s%s%s\n\n", argv[0], a.device.name,
               a.op ? ", op " : "", a.op ? a.op : "");
        print_ops(results, n);
        fflush(stdout);
    }
    if (!only && !error.code && !cg_layer_check(a.device.backend, 0, layer, &error)) {
        layer->ok = false;
        snprintf(layer->worst, sizeof layer->worst, "%s", error.text);
    }
    ok &= only || layer->ok;
    if (error.code == CG_FAILED) {
        tool_failed(argv[0], &error);
    } else if (a.json) {
        print_json(results, n, only ? NULL : layer, ok);
    } else {
        if (!only) print_layer(layer);
        bool compared = !only || only->differentiable;
        printf("\n%s\n", ok         ? "every gradient checked is right"
                         : compared ? "FAILED"
                                    : "FAILED: nothing was compared");
    }
    free(results);
    free(layer);
    tool_device_close(&a.device);
    return ok ? 0 : CG_FAILED;
}
