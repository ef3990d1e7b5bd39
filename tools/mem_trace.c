/* A row's step as a Chrome trace (trace-event JSON), which Perfetto (ui.perfetto.dev) and chrome://tracing open.
 *
 * One process; a track per pass; a slice per step of the plan, in the order in which they run. Counters hold the
 * bytes alive by category ("live bytes") and together ("live bytes, all"). A flow leads from each forward node to the
 * backward and recompute nodes that exist for it. An instant marks the peak step. Times are whole nanoseconds, written
 * in microseconds, of each node the median over the runs, so that all slices together need not last as long as the
 * median step. args of a slice:
 *
 *     step, scope, live_bytes      live_bytes: all that is alive while it runs, in reserved bytes as in the plan
 *     read_bytes, written_bytes    of its inputs (each once) and outputs; 0 for an alias, which moves nothing
 *     workspace_bytes, flops
 *     gflops_per_s                 where times are measured
 *     parameter                    the parameter that it reads, where there is one
 *     cause, cause_step            of backward and recompute nodes; cause_step null: the plan leaves that node out
 */
#include "tools/mem_export.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PROCESS = 1 };

typedef struct trace {
    const mem_row *row;
    const cg_plan *plan;
    mem_schedule schedule;
    int *first_effect, *next_effect; /* by step: the steps that it is the cause of, as a list; -1: end */
    json_t *events;
} trace;

static int track_of(const cg_node *node) { return 1 + (int)node->pass; }

/* json_pack refuses a NULL reference, so that memory that ran out is noticed where the event is added. */
static bool add(trace *t, json_t *event) { return json_array_append_new(t->events, event) == 0; }

static double us(int64_t ns) { return (double)ns / 1000; }

static void name_text(const cg_node *node, char *text, size_t text_bytes) {
    snprintf(text, text_bytes, "%s%s%s", node->scope, node->scope[0] ? "/" : "", node->op->name);
}

/* ---- bytes of a node ---- */

static bool is_repeated(const cg_node *node, int i) {
    for (int k = 0; k < i; k++)
        if (node->in[k] && cg_value_root(node->in[k]) == cg_value_root(node->in[i])) return true;
    return false;
}

static int64_t value_bytes(const cg_value *value) { return cg_tensor_bytes(value->dtype, &value->shape); }

static int64_t read_bytes(const cg_node *node) {
    int64_t bytes = 0;
    for (int i = 0; i < node->n_in && !node->op->alias; i++)
        if (node->in[i] && !is_repeated(node, i)) bytes += value_bytes(node->in[i]);
    return bytes;
}

/* Outputs, and the leaves that it changes. */
static int64_t written_bytes(const cg_node *node) {
    int64_t bytes = 0;
    for (int s = 0; s < node->n_out && !node->op->alias; s++) bytes += value_bytes(node->out[s]);
    for (int i = 0; i < node->n_in && i < CG_MAX_IN; i++)
        if (node->op->mutates & CG_BIT(i) && node->in[i]) bytes += value_bytes(node->in[i]);
    return bytes;
}

static int64_t workspace_bytes(const cg_plan *plan, int step) {
    int storage = plan->workspace_of[step];
    return storage < 0 ? 0 : plan->storages[storage].bytes;
}

static const cg_value *parameter_of(const cg_node *node) {
    for (int s = 0; s < node->n_out; s++) return mem_parameter_of(node->out[s]);
    return NULL;
}

/* ---- events ---- */

static json_t *slice_args(const trace *t, int step, int64_t live_bytes) {
    const cg_node *node = t->plan->steps[step];
    double flops = node->op->cost ? node->op->cost(node).flops : 0;
    double ns = (double)(t->schedule.start_ns[step + 1] - t->schedule.start_ns[step]);
    json_t *args = json_pack("{s:i, s:s, s:I, s:I, s:I, s:I, s:f}", "step", step, "scope", node->scope,
                             "live_bytes", (json_int_t)live_bytes, "read_bytes", (json_int_t)read_bytes(node),
                             "written_bytes", (json_int_t)written_bytes(node), "workspace_bytes",
                             (json_int_t)workspace_bytes(t->plan, step), "flops", flops);
    if (t->row->m.node_us) json_object_set_new(args, "gflops_per_s", json_real(flops / ns));
    const cg_value *parameter = parameter_of(node);
    if (parameter) json_object_set_new(args, "parameter", json_string(parameter->name));
    if (node->cause) {
        char name[320];
        int cause = t->schedule.step_of[node->cause->id];
        name_text(node->cause, name, sizeof name);
        json_object_set_new(args, "cause", json_string(name));
        json_object_set_new(args, "cause_step", cause < 0 ? json_null() : json_integer(cause));
    }
    return args;
}

static bool add_metadata(trace *t) {
    char text[512];
    bool ok = add(t, json_pack("{s:s, s:s, s:i, s:{s:s}}", "ph", "M", "name", "process_name", "pid", PROCESS,
                               "args", "name", mem_row_text(t->row, text, sizeof text)));
    for (int pass = 0; pass < CG_PASSES; pass++) {
        int track = 1 + pass;
        ok = ok &&
             add(t, json_pack("{s:s, s:s, s:i, s:i, s:{s:s}}", "ph", "M", "name", "thread_name", "pid", PROCESS,
                              "tid", track, "args", "name", cg_pass_name((cg_pass)pass))) &&
             add(t, json_pack("{s:s, s:s, s:i, s:i, s:{s:i}}", "ph", "M", "name", "thread_sort_index", "pid",
                              PROCESS, "tid", track, "args", "sort_index", track));
    }
    return ok;
}

/* Both counters, at the beginning of a step; step n_steps: what the caller holds behind the last one. */
static bool add_counters(trace *t, int step, int64_t *together) {
    int64_t bytes[CG_CATEGORIES] = {0};
    if (step < t->plan->n_steps) {
        cg_plan_live(t->plan, step, bytes);
    } else {
        for (int s = 0; s < t->plan->n_storages; s++) {
            const cg_storage *storage = &t->plan->storages[s];
            if (storage->kept || (storage->value && storage->value->leaf))
                bytes[storage->category] += storage->reserved;
        }
    }
    json_t *by_category = json_object();
    *together = 0;
    for (int c = 0; c < CG_CATEGORIES; c++) {
        json_object_set_new(by_category, cg_category_name((cg_category)c), json_integer(bytes[c]));
        *together += bytes[c];
    }
    double ts = us(t->schedule.start_ns[step]);
    return add(t, json_pack("{s:s, s:s, s:i, s:f, s:o}", "ph", "C", "name", "live bytes", "pid", PROCESS, "ts",
                            ts, "args", by_category)) &&
           add(t, json_pack("{s:s, s:s, s:i, s:f, s:{s:I}}", "ph", "C", "name", "live bytes, all", "pid",
                            PROCESS, "ts", ts, "args", "bytes", (json_int_t)*together));
}

/* One end of the flow from a cause to its effect; the effect's step is the flow's id. */
static bool add_flow_end(trace *t, bool start, int effect, int step) {
    const cg_node *node = t->plan->steps[step];
    json_t *event = json_pack("{s:s, s:s, s:s, s:i, s:i, s:i, s:f}", "ph", start ? "s" : "f", "name", "cause",
                              "cat", "cause", "id", effect, "pid", PROCESS, "tid", track_of(node), "ts",
                              us(t->schedule.start_ns[step]));
    if (!start) json_object_set_new(event, "bp", json_string("e")); /* ends in the slice that begins here */
    return add(t, event);
}

static bool add_step(trace *t, int step) {
    const cg_node *node = t->plan->steps[step];
    const int64_t *start_ns = t->schedule.start_ns;
    int64_t live_bytes;
    bool ok = add_counters(t, step, &live_bytes);
    ok = ok && add(t, json_pack("{s:s, s:s, s:s, s:i, s:i, s:f, s:f, s:o}", "ph", "X", "name", node->op->name,
                                "cat", cg_pass_name(node->pass), "pid", PROCESS, "tid", track_of(node), "ts",
                                us(start_ns[step]), "dur", us(start_ns[step + 1] - start_ns[step]), "args",
                                slice_args(t, step, live_bytes)));
    if (step == t->plan->peak_step)
        ok = ok && add(t, json_pack("{s:s, s:s, s:s, s:i, s:i, s:f, s:{s:i, s:I}}", "ph", "i", "name", "peak",
                                    "s", "p", "pid", PROCESS, "tid", track_of(node), "ts", us(start_ns[step]),
                                    "args", "step", step, "live_bytes", (json_int_t)live_bytes));
    if (node->cause && t->schedule.step_of[node->cause->id] >= 0) ok = ok && add_flow_end(t, false, step, step);
    for (int effect = t->first_effect[step]; effect >= 0; effect = t->next_effect[effect])
        ok = ok && add_flow_end(t, true, effect, step);
    return ok;
}

static bool prepare(trace *t) {
    size_t n = (size_t)t->plan->n_steps + 1;
    t->events = json_array();
    t->first_effect = malloc(n * sizeof *t->first_effect);
    t->next_effect = malloc(n * sizeof *t->next_effect);
    if (!t->events || !t->first_effect || !t->next_effect) return false;
    for (int step = 0; step < t->plan->n_steps; step++) t->first_effect[step] = -1;
    for (int step = t->plan->n_steps - 1; step >= 0; step--) {
        const cg_node *cause = t->plan->steps[step]->cause;
        int from = cause ? t->schedule.step_of[cause->id] : -1;
        if (from < 0) continue;
        t->next_effect[step] = t->first_effect[from];
        t->first_effect[from] = step;
    }
    return true;
}

/* The whole text; malloc'd, NULL when memory is out. */
static char *text_of(trace *t) {
    const mem_row *row = t->row;
    bool ok = prepare(t) && add_metadata(t);
    int64_t in_the_end;
    for (int step = 0; ok && step < t->plan->n_steps; step++) ok = add_step(t, step);
    ok = ok && add_counters(t, t->plan->n_steps, &in_the_end);
    json_t *root =
        ok ? json_pack("{s:s, s:{s:s, s:s, s:I, s:s, s:s, s:i, s:I, s:I}, s:O}", "displayTimeUnit", "ns",
                       "otherData", "policy", row->policy, "dims", row->dims, "seq", (json_int_t)row->seq,
                       "dtype", cg_dtype_name(row->dtype), "times", mem_clock_name(row), "peak_step",
                       t->plan->peak_step, "floor_bytes", (json_int_t)t->plan->floor_bytes,
                       "planned_peak_bytes", (json_int_t)t->plan->peak_bytes, "traceEvents", t->events)
           : NULL;
    char *text = root ? json_dumps(root, JSON_COMPACT | JSON_REAL_PRECISION(15)) : NULL;
    json_decref(root);
    return text;
}

bool mem_trace_write(const mem_row *row, const char *path, cg_error *error) {
    trace t = {.row = row, .plan = row->step.plan};
    bool ok = mem_schedule_make(row, &t.schedule, error);
    char *text = ok ? text_of(&t) : NULL;
    if (ok && !text) ok = cg_fail(error, CG_FAILED, "out of memory while a trace is made");
    ok = ok && mem_file_write(path, text, strlen(text), error);
    free(text);
    json_decref(t.events);
    free(t.first_effect);
    free(t.next_effect);
    mem_schedule_free(&t.schedule);
    return ok;
}
