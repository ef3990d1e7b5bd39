/* The page of csagrad mem: one HTML file that needs nothing else, no network and no library.
 *
 * mem_page.html is its text, style and script, put into the program when that is built. The figures stand in the page
 * as one JSON object, from which the script draws; this file writes that object. Long lists are columns ("op": [...],
 * "scope": [...]) with texts by number, and what the script can add up from the plan is not written twice. */
#include "tools/mem.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/file.h"
#include "tools/json_number.h"

static const char template_text[] = {
#include "mem_page_html.inc"
    0};

/* Where the object goes. */
#define PLACE "@REPORT@"

/* Texts by number, each stored once. */
typedef struct texts {
    json_t *list, *number;
} texts;

static json_t *text_json(texts *t, const char *text) {
    json_t *known = json_object_get(t->number, text);
    if (known) return json_incref(known);
    json_t *number = json_integer((json_int_t)json_array_size(t->list));
    if (json_array_append_new(t->list, json_string(text)) || json_object_set(t->number, text, number)) {
        json_decref(number);
        return NULL;
    }
    return number;
}

static json_t *bytes_json(int64_t bytes) { return json_integer((json_int_t)bytes); }

/* -1 stands for a figure that was not measured. */
static json_t *measured_json(int64_t bytes) { return bytes < 0 ? json_null() : bytes_json(bytes); }

static json_t *real_json(double x) { return isfinite(x) ? json_real(x) : json_null(); }

/* Times in the lists: a hundredth of a microsecond is finer than any clock here, and keeps the page short. */
static json_t *us_json(double us) { return real_json(round(us * 100) / 100); }

/* Columns: an object of lists of one length. A failed append leaves a list too short, which `complete` sees. */
typedef struct column {
    const char *name;
    json_t *list;
} column;

static json_t *columns_json(column *columns, int n_columns, int n) {
    json_t *object = json_object();
    bool complete = object != NULL;
    for (int c = 0; c < n_columns; c++) {
        complete &= json_array_size(columns[c].list) == (size_t)n;
        complete &= json_object_set_new(object, columns[c].name, columns[c].list) == 0;
    }
    if (complete) return object;
    json_decref(object);
    return NULL;
}

static void put(column *c, json_t *item) { json_array_append_new(c->list, item); }

/* ---- a plan ---- */

/* The storages that a step reads, each once: the script turns this into the readers of a value. */
static json_t *reads_json(const cg_plan *plan, const cg_node *node) {
    json_t *list = json_array();
    for (int i = 0; i < node->n_in; i++) {
        if (!node->in[i] || node->op->alias) continue;
        int storage = plan->storage_of[node->in[i]->id];
        bool again = false;
        for (int k = 0; k < i; k++) again |= node->in[k] && plan->storage_of[node->in[k]->id] == storage;
        if (!again && json_array_append_new(list, json_integer(storage))) {
            json_decref(list);
            return NULL;
        }
    }
    return list;
}

static json_t *steps_json(const mem_row *row, texts *t) {
    const cg_plan *plan = row->step.plan;
    enum { OP, SCOPE, PASS, US, FLOPS, READS, N };
    static const char *const names[N] = {"op", "scope", "pass", "us", "flops", "reads"};
    column columns[N];
    for (int c = 0; c < N; c++) columns[c] = (column){names[c], json_array()};
    for (int s = 0; s < plan->n_steps; s++) {
        const cg_node *node = plan->steps[s];
        put(&columns[OP], text_json(t, node->op->name));
        put(&columns[SCOPE], text_json(t, node->scope));
        put(&columns[PASS], json_integer(node->pass));
        put(&columns[US], us_json(mem_step_us(row, s)));
        put(&columns[FLOPS], real_json(node->op->cost ? node->op->cost(node).flops : 0));
        put(&columns[READS], reads_json(plan, node));
    }
    return columns_json(columns, N, plan->n_steps);
}

/* By value's producer id: the step that runs it, -1: none. */
static int *steps_of_nodes(const cg_plan *plan) {
    int *step_of = malloc(((size_t)plan->graph->n_nodes + 1) * sizeof *step_of);
    if (!step_of) return NULL;
    for (int n = 0; n < plan->graph->n_nodes; n++) step_of[n] = -1;
    for (int s = 0; s < plan->n_steps; s++) step_of[plan->steps[s]->id] = s;
    return step_of;
}

static json_t *storages_json(const cg_plan *plan, texts *t) {
    enum { NAME, OP, OF, SCOPE, TYPE, CATEGORY, BYTES, OFFSET, FIRST, LAST, MADE, OVER, KEPT, N };
    static const char *const names[N] = {"name",   "op",    "of",   "scope", "type", "category", "bytes",
                                         "offset", "first", "last", "made",  "over", "kept"};
    int *step_of = steps_of_nodes(plan);
    if (!step_of) return NULL;
    column columns[N];
    for (int c = 0; c < N; c++) columns[c] = (column){names[c], json_array()};
    for (int i = 0; i < plan->n_storages; i++) {
        const cg_storage *storage = &plan->storages[i];
        const cg_value *value = storage->value;
        const cg_node *node = value ? value->producer : storage->node;
        const cg_value *of = value && node ? mem_parameter_of(value) : NULL;
        char shape[128] = "", type[160] = "";
        if (value)
            snprintf(type, sizeof type, "%s %s", cg_dtype_name(value->dtype),
                     cg_shape_text(&value->shape, shape, sizeof shape));
        put(&columns[NAME], text_json(t, value ? value->name : "workspace"));
        put(&columns[OP], text_json(t, node ? node->op->name : ""));
        put(&columns[OF], text_json(t, of ? of->name : ""));
        put(&columns[SCOPE], text_json(t, value ? value->scope : node->scope));
        put(&columns[TYPE], text_json(t, type));
        put(&columns[CATEGORY], json_integer(storage->category));
        put(&columns[BYTES], bytes_json(storage->bytes));
        put(&columns[OFFSET], bytes_json(storage->offset));
        put(&columns[FIRST], json_integer(storage->first));
        put(&columns[LAST], json_integer(storage->last));
        put(&columns[MADE], json_integer(node ? step_of[node->id] : -1));
        put(&columns[OVER], json_integer(storage->taken_over));
        put(&columns[KEPT], json_integer(storage->kept));
    }
    free(step_of);
    return columns_json(columns, N, plan->n_storages);
}

static json_t *saved_json(const mem_row *row) {
    enum { STORAGE, POSSIBLE, PEAK, US, N };
    static const char *const names[N] = {"storage", "possible", "peak_change_bytes", "extra_us"};
    column columns[N];
    int n_columns = row->what_if ? N : 1;
    for (int c = 0; c < n_columns; c++) columns[c] = (column){names[c], json_array()};
    for (int i = 0; i < row->n_saved; i++) {
        put(&columns[STORAGE], json_integer(row->step.plan->storage_of[row->saved[i].value->id]));
        if (!row->what_if) continue;
        put(&columns[POSSIBLE], json_integer(row->what_if[i].possible));
        put(&columns[PEAK], bytes_json(row->what_if[i].peak_change_bytes));
        put(&columns[US], us_json(row->what_if[i].extra_us));
    }
    return columns_json(columns, n_columns, row->n_saved);
}

static json_t *plan_json(const mem_row *row, texts *t) {
    const cg_plan *plan = row->step.plan;
    if (!plan) return json_null();
    return json_pack("{s:i, s:b, s:o, s:o, s:o}", "peak_step", plan->peak_step, "timed", row->m.node_us != NULL,
                     "steps", steps_json(row, t), "storages", storages_json(plan, t), "saved", saved_json(row));
}

/* ---- a row ---- */

/* Sizes that name a workload, under the letters of core/base/tensor.h. */
static json_t *sizes_json(const mem_row *row) {
    const cg_config *c = &row->workload.config;
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "layers", (json_int_t)c->num_hidden_layers,
                     "T", (json_int_t)row->n_rows, "H", (json_int_t)c->num_attention_heads, "D",
                     (json_int_t)c->head_dim, "Hi", (json_int_t)c->index_n_heads, "Di",
                     (json_int_t)c->index_head_dim, "K", (json_int_t)c->index_topk, "W",
                     (json_int_t)c->sliding_window);
}

static json_t *row_json(const mem_row *row, texts *t) {
    const cg_measurement *m = &row->m;
    json_t *head = json_pack("{s:s, s:s, s:I, s:s, s:b, s:o, s:o}", "policy", row->policy, "dims", row->dims,
                             "seq", (json_int_t)row->seq, "dtype", cg_dtype_name(row->dtype), "part",
                             row->workload.part == CG_PART_INDEXER_LOSS, "sizes", sizes_json(row), "refused",
                             row->refused ? json_words(row->refused) : json_null());
    if (!head || row->refused) return head;
    json_t *figures = json_pack(
        "{s:I, s:I, s:I, s:I, s:I, s:I, s:i, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "planned_peak_bytes",
        (json_int_t)m->planned_peak_bytes, "floor_bytes", (json_int_t)m->floor_bytes, "boundary_bytes",
        (json_int_t)m->boundary_bytes, "saved_bytes", (json_int_t)m->saved_bytes, "recomputed_bytes",
        (json_int_t)m->recomputed_bytes, "workspace_bytes", (json_int_t)m->workspace_bytes, "n_clones",
        m->n_clones, "flops", real_json(m->flops), "extra_flops", real_json(m->extra_flops),
        "measured_peak_bytes", measured_json(m->measured_peak_bytes), "rss_peak_bytes",
        measured_json(m->rss_peak_bytes), "loss", real_json(m->loss), "step_us",
        m->node_us ? us_json(m->step_us) : json_null(), "plan", plan_json(row, t));
    if (!figures || json_object_update(head, figures)) {
        json_decref(head);
        head = NULL;
    }
    json_decref(figures);
    return head;
}

static json_t *rows_json(const mem_report *report, texts *t) {
    json_t *list = json_array();
    for (int i = 0; i < report->n_rows; i++)
        if (json_array_append_new(list, row_json(&report->rows[i], t))) {
            json_decref(list);
            return NULL;
        }
    return list;
}

/* ---- growth ---- */

static json_t *growth_json(const mem_report *report) {
    json_t *list = json_array();
    for (int g = 0; g < report->n_growth; g++) {
        const mem_growth *growth = &report->growth[g];
        column columns[] = {{"seq", json_array()}, {"peak_bytes", json_array()}, {"extra_bytes", json_array()}};
        for (int i = 0; i < growth->n_sizes; i++) {
            const cg_measurement *m = &growth->rows[i]->m;
            put(&columns[0], bytes_json(growth->rows[i]->seq));
            put(&columns[1], bytes_json(m->planned_peak_bytes));
            put(&columns[2], bytes_json(m->planned_peak_bytes - m->boundary_bytes));
        }
        json_t *item =
            json_pack("{s:s, s:s, s:s, s:o, s:o, s:o}", "policy", growth->policy, "dtype",
                      cg_dtype_name(growth->dtype), "dims", growth->n_sizes ? growth->rows[0]->dims : "",
                      "peak_exponent", real_json(growth->peak_exponent), "extra_exponent",
                      real_json(growth->extra_exponent), "sizes", columns_json(columns, 3, growth->n_sizes));
        if (json_array_append_new(list, item)) {
            json_decref(list);
            return NULL;
        }
    }
    return list;
}

/* ---- the curve of peak against time ---- */

/* The nodes that a point computes again, as places in `nodes`; place[n] is that of node n, -1: not there yet. */
static json_t *chosen_json(const mem_curve *curve, const cg_frontier_point *point, int *place, column *op,
                           column *scope, texts *t) {
    const cg_graph *graph = curve->row->step.graph;
    json_t *list = json_array();
    for (int n = 0; n < curve->frontier->n_nodes && n < graph->n_nodes; n++) {
        if (!point->chosen[n]) continue;
        if (place[n] < 0) {
            place[n] = (int)json_array_size(op->list);
            put(op, text_json(t, graph->nodes[n]->op->name));
            put(scope, text_json(t, graph->nodes[n]->scope));
        }
        if (json_array_append_new(list, json_integer(place[n]))) {
            json_decref(list);
            return NULL;
        }
    }
    return list;
}

static json_t *curve_json(const mem_curve *curve, int row, texts *t) {
    const cg_frontier *frontier = curve->frontier;
    int *place = malloc(((size_t)frontier->n_nodes + 1) * sizeof *place);
    if (!place) return NULL;
    for (int n = 0; n < frontier->n_nodes; n++) place[n] = -1;
    column points[] = {{"peak_bytes", json_array()},  {"extra_us", json_array()}, {"least_us", json_array()},
                       {"extra_flops", json_array()}, {"clones", json_array()},   {"chosen", json_array()}};
    column nodes[] = {{"op", json_array()}, {"scope", json_array()}};
    for (int p = 0; p < frontier->n_points; p++) {
        const cg_trial *trial = &frontier->points[p].trial;
        put(&points[0], bytes_json(trial->peak_bytes));
        put(&points[1], us_json(trial->extra_us));
        put(&points[2], us_json(frontier->points[p].least_us));
        put(&points[3], real_json(trial->extra_flops));
        put(&points[4], json_integer(trial->n_clones));
        put(&points[5], chosen_json(curve, &frontier->points[p], place, &nodes[0], &nodes[1], t));
    }
    free(place);
    int n_nodes = (int)json_array_size(nodes[0].list);
    return json_pack("{s:s, s:i, s:b, s:b, s:i, s:I, s:I, s:o, s:o}", "base", curve->base, "row", row, "timed",
                     curve->node_us != NULL, "exact", frontier->exact, "candidates", frontier->n_candidates,
                     "trials", (json_int_t)frontier->n_trials, "least_bytes", (json_int_t)frontier->least_bytes,
                     "points", columns_json(points, 6, frontier->n_points), "nodes",
                     columns_json(nodes, 2, n_nodes));
}

static json_t *curves_json(const mem_report *report, texts *t) {
    json_t *list = json_array();
    for (int c = 0; c < report->n_curves; c++)
        if (json_array_append_new(
                list, curve_json(&report->curves[c], (int)(report->curves[c].row - report->rows), t))) {
            json_decref(list);
            return NULL;
        }
    return list;
}

/* ---- the page ---- */

static json_t *names_json(int n, const char *(*name)(int)) {
    json_t *list = json_array();
    for (int i = 0; i < n; i++) json_array_append_new(list, json_string(name(i)));
    return list;
}

static const char *category_name(int i) { return cg_category_name((cg_category)i); }
static const char *pass_name(int i) { return cg_pass_name((cg_pass)i); }

static json_t *report_json(const mem_report *report) {
    texts t = {json_array(), json_object()};
    json_t *rows = rows_json(report, &t), *curves = curves_json(report, &t);
    json_t *object =
        json_pack("{s:o, s:s, s:i, s:o, s:o, s:o, s:o, s:o, s:O}", "command", json_words(report->title),
                  "version", CSAGRAD_VERSION, "align", CG_ALIGN, "categories",
                  names_json(CG_CATEGORIES, category_name), "passes", names_json(CG_PASSES, pass_name), "rows",
                  rows, "growth", growth_json(report), "curves", curves, "texts", t.list);
    json_decref(t.list);
    json_decref(t.number);
    return object;
}

/* A '<' stands only in strings of JSON; written as an escape, no text can end the script element that holds it. */
static bool write_escaped(cg_file_writer *writer, const char *json, cg_error *error) {
    for (bool ok = true;; json++) {
        size_t n = strcspn(json, "<");
        ok = cg_file_write(writer, json, n, error);
        json += n;
        if (!ok || !*json) return ok;
        if (!cg_file_write(writer, "\\u003c", 6, error)) return false;
    }
}

bool mem_page_write(const mem_report *report, const char *path, cg_error *error) {
    json_t *object = report_json(report);
    char *json = object ? json_dumps(object, JSON_COMPACT | JSON_REAL_PRECISION(12)) : NULL;
    json_decref(object);
    if (!json) return cg_fail(error, CG_FAILED, "out of memory while the page %s is written", path);
    const char *place = strstr(template_text, PLACE), *rest = place + strlen(PLACE);
    cg_file_writer *writer = cg_file_begin(path, error);
    bool ok = writer && cg_file_write(writer, template_text, (size_t)(place - template_text), error) &&
              write_escaped(writer, json, error) && cg_file_write(writer, rest, strlen(rest), error);
    free(json);
    if (ok) return cg_file_commit(writer, error);
    cg_file_cancel(writer);
    return false;
}
