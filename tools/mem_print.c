/* The tables and the JSON of csagrad mem: the same figures, MiB (2^20) for people and bytes for programs. */
#include "tools/mem.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/json_number.h"
#include "tools/out_of_memory.h"
#include "tools/table.h"

static double mib(int64_t bytes) { return (double)bytes / 1048576; }

static void mib_cell(table *t, int64_t bytes) {
    if (bytes < 0)
        table_cell(t, "-");
    else
        table_cell(t, "%.3f", mib(bytes));
}

/* ---- the table of rows ---- */

static bool any_measured(const mem_report *report) {
    for (int r = 0; r < report->n_rows; r++)
        if (report->rows[r].m.node_us) return true;
    return false;
}

static void print_rows(const mem_report *report) {
    bool measured = any_measured(report);
    static const char *const titles[] = {"policy",     "S",         "dtype",      "planned peak MiB",
                                         "measured",   "process",   "saved",      "in indexers",
                                         "recomputed", "workspace", "extra GFLOP"};
    table *t = table_new("lrlrrrrrrrrrr");
    const bool on_device = report->n_rows && report->rows[0].workload.backend;
    for (size_t c = 0; c < sizeof titles / sizeof titles[0]; c++)
        table_cell(t, "%s", on_device && !strcmp(titles[c], "process") ? "driver" : titles[c]);
    table_cell(t, "%s", measured ? "step us" : "step us, estimated");
    table_cell(t, "loss");
    for (int r = 0; r < report->n_rows; r++) {
        const mem_row *row = &report->rows[r];
        table_cell(t, "%s", row->policy);
        table_cell(t, "%lld", (long long)row->seq);
        table_cell(t, "%s", cg_dtype_name(row->dtype));
        if (row->refused) {
            table_cell(t, "refused");
            for (int c = 0; c < 9; c++) table_cell(t, "-");
            continue;
        }
        mib_cell(t, row->m.planned_peak_bytes);
        mib_cell(t, row->m.measured_peak_bytes);
        mib_cell(t, row->workload.backend ? row->m.driver_peak_bytes : row->m.rss_peak_bytes);
        mib_cell(t, row->m.saved_bytes);
        mib_cell(t, mem_saved_in_indexers(row));
        mib_cell(t, row->m.recomputed_bytes);
        mib_cell(t, row->m.workspace_bytes);
        table_cell(t, "%.3f", row->m.extra_flops / 1e9);
        table_cell(t, "%.0f", mem_row_us(row));
        if (isnan(row->m.loss))
            table_cell(t, "-");
        else
            table_cell(t, "%.9g", row->m.loss);
    }
    table_print(t);
    for (int r = 0; r < report->n_rows; r++)
        if (report->rows[r].refused)
            printf("\n%s at %lld tokens is refused: %s\n", report->rows[r].policy,
                   (long long)report->rows[r].seq, report->rows[r].refused);
}

static void print_agreement(const mem_report *report) {
    int n = 0;
    int64_t worst = 0;
    double process = 0;
    bool on_device = false;
    for (int r = 0; r < report->n_rows; r++) {
        const mem_row *row = &report->rows[r];
        if (!row->m.node_us) continue;
        int64_t difference = llabs(row->m.measured_peak_bytes - row->m.planned_peak_bytes);
        if (difference > worst) worst = difference;
        int64_t witness = row->workload.backend ? row->m.driver_peak_bytes : row->m.rss_peak_bytes;
        double off = fabs((double)witness / (double)row->m.planned_peak_bytes - 1);
        if (witness >= 0 && off > process) process = off;
        on_device |= row->workload.backend != NULL;
        n++;
    }
    if (!n) return;
    printf(
        "\nplanned and measured peak of %d %s: largest difference %lld bytes; %s by the same within %.2f %%\n",
        n, n == 1 ? "row" : "rows", (long long)worst,
        on_device ? "the device's free memory fell" : "the process grew", 100 * process);
}

/* What a budget was met with, and how much better it might be done. */
static void print_budgets(const mem_report *report) {
    bool first = true;
    for (int r = 0; r < report->n_rows; r++) {
        const mem_row *row = &report->rows[r];
        const cg_frontier_point *point = mem_budget_point(row);
        if (!point) continue;
        if (first) putchar('\n');
        first = false;
        printf("%s at %lld tokens in %s: %d nodes again, estimated +%.1f us; ", row->policy,
               (long long)row->seq, cg_dtype_name(row->dtype), point->trial.n_clones, point->trial.extra_us);
        if (point->least_us >= point->trial.extra_us)
            puts("no set is cheaper");
        else
            printf("no set takes less than +%.1f us\n", point->least_us);
    }
}

static void print_growth(const mem_report *report) {
    if (!report->n_growth) return;
    puts("\nGrowth with the length S, bytes ~ S^p; beyond the boundary: without leaves and what the caller "
         "keeps");
    table *t = table_new("lllrr");
    static const char *const titles[] = {"policy", "dtype", "S", "p of the peak", "p beyond the boundary"};
    for (int c = 0; c < 5; c++) table_cell(t, "%s", titles[c]);
    for (int i = 0; i < report->n_growth; i++) {
        const mem_growth *g = &report->growth[i];
        table_cell(t, "%s", g->policy);
        table_cell(t, "%s", cg_dtype_name(g->dtype));
        if (g->n_sizes)
            table_cell(t, "%lld .. %lld", (long long)g->rows[0]->seq, (long long)g->rows[g->n_sizes - 1]->seq);
        else
            table_cell(t, "-");
        table_cell(t, "%.3f", g->peak_exponent);
        table_cell(t, "%.3f", g->extra_exponent);
    }
    table_print(t);
}

/* The ops that a point runs again, each with its number: "relu x2, rms_norm". */
static char *chosen_text(const mem_curve *curve, const cg_frontier_point *point) {
    const cg_graph *graph = curve->row->step.graph;
    char *text = NULL;
    size_t bytes = 0;
    FILE *stream = open_memstream(&text, &bytes);
    if (!stream) tool_out_of_memory();
    bool first = true;
    for (int n = 0; n < curve->frontier->n_nodes; n++) {
        if (!point->chosen[n]) continue;
        int same = 0;
        bool before = false;
        for (int k = 0; k < curve->frontier->n_nodes; k++)
            if (point->chosen[k] && graph->nodes[k]->op == graph->nodes[n]->op) {
                before |= k < n;
                same++;
            }
        if (before) continue;
        fprintf(stream, "%s%s", first ? "" : ", ", graph->nodes[n]->op->name);
        if (same > 1) fprintf(stream, " x%d", same);
        first = false;
    }
    if (ferror(stream) | fclose(stream) || !text) tool_out_of_memory();
    return text;
}

static void print_curves(const mem_report *report) {
    for (int c = 0; c < report->n_curves; c++) {
        const mem_curve *curve = &report->curves[c];
        const cg_frontier *f = curve->frontier;
        printf("\nPeak against time, from %s at %lld tokens in %s: %d nodes may be recomputed, %s; times %s\n",
               curve->base, (long long)curve->row->seq, cg_dtype_name(curve->row->dtype), f->n_candidates,
               f->exact ? "the curve is exact" : "the curve is the best found",
               curve->node_us ? "measured" : "estimated");
        table *t = table_new(f->exact ? "rrrrl" : "rrrrrl");
        table_cell(t, "peak MiB");
        table_cell(t, "extra us");
        if (!f->exact) table_cell(t, "at least");
        table_cell(t, "extra GFLOP");
        table_cell(t, "nodes");
        table_cell(t, "recomputed");
        for (int i = 0; i < f->n_points; i++) {
            const cg_frontier_point *p = &f->points[i];
            char *chosen = chosen_text(curve, p);
            table_cell(t, "%.3f", mib(p->trial.peak_bytes));
            table_cell(t, "%.1f", p->trial.extra_us);
            if (!f->exact) table_cell(t, "%.1f", p->least_us);
            table_cell(t, "%.3f", p->trial.extra_flops / 1e9);
            table_cell(t, "%d", p->trial.n_clones);
            table_cell(t, "%s", chosen && chosen[0] ? chosen : "-");
            free(chosen);
        }
        table_print(t);
    }
}

void mem_print(const mem_report *report) {
    print_rows(report);
    print_agreement(report);
    print_budgets(report);
    print_growth(report);
    print_curves(report);
}

/* ---- the saved values of a row ---- */

static void print_categories(const mem_row *row) {
    const cg_plan *plan = row->step.plan;
    int64_t bytes[CG_CATEGORIES], total = 0;
    cg_plan_live(plan, plan->peak_step, bytes);
    const cg_node *peak = plan->steps[plan->peak_step];
    printf("\nAlive at step %d of %d, the fullest: %s in %s, %s\n", plan->peak_step, plan->n_steps,
           peak->op->name, peak->scope[0] ? peak->scope : "the whole model", cg_pass_name(peak->pass));
    table *t = table_new("lr");
    table_cell(t, "category");
    table_cell(t, "MiB");
    for (int c = 0; c < CG_CATEGORIES; c++) {
        table_cell(t, "%s", cg_category_name((cg_category)c));
        table_cell(t, "%.3f", mib(bytes[c]));
        total += bytes[c];
    }
    table_cell(t, "together");
    table_cell(t, "%.3f", mib(total));
    table_print(t);
    printf("\nplanned peak %.3f MiB (%lld bytes), no layout can be below %.3f MiB\n", mib(plan->peak_bytes),
           (long long)plan->peak_bytes, mib(plan->floor_bytes));
}

static void what_if_cells(table *t, const mem_what_if *what_if) {
    if (!what_if->possible) {
        table_cell(t, "-");
        table_cell(t, "-");
        return;
    }
    table_cell(t, "%+.3f", mib(what_if->peak_change_bytes));
    table_cell(t, "%+.1f", what_if->extra_us);
}

void mem_print_values(const mem_row *row) {
    const cg_plan *plan = row->step.plan;
    printf("\nSaved for backward by %s at %lld tokens in %s, in order of birth; a step is one node, counted "
           "from 0; "
           "the right columns say what computing this value again would change (times %s)\n",
           row->policy, (long long)row->seq, cg_dtype_name(row->dtype),
           row->m.node_us ? "measured" : "estimated");
    table *t = table_new("rlllllrrl");
    static const char *const titles[] = {"MiB",   "value",    "op", "dtype",   "shape",
                                         "steps", "peak MiB", "us", "kept for"};
    for (int c = 0; c < 9; c++) table_cell(t, "%s", titles[c]);
    for (int i = 0; i < row->n_saved; i++) {
        const cg_saved *saved = &row->saved[i];
        const cg_value *value = saved->value, *parameter = mem_parameter_of(value);
        const cg_storage *storage = &plan->storages[plan->storage_of[value->id]];
        char shape[128], readers[256];
        table_cell(t, "%.3f", mib(saved->bytes));
        table_cell(t, "%s%s%s", value->scope, value->scope[0] ? "/" : "", value->name);
        table_cell(t, "%s%s%s", value->producer->op->name, parameter ? " " : "",
                   parameter ? parameter->name : "");
        table_cell(t, "%s", cg_dtype_name(value->dtype));
        table_cell(t, "%s", cg_shape_text(&value->shape, shape, sizeof shape));
        table_cell(t, "%d to %d", storage->first, storage->last);
        what_if_cells(t, &row->what_if[i]);
        table_cell(t, "%s", mem_readers_text(saved, readers, sizeof readers));
    }
    table_print(t);
    print_categories(row);
}

/* ---- JSON ---- */

static json_t *bytes_json(int64_t bytes) { return bytes < 0 ? json_null() : json_integer((json_int_t)bytes); }

static json_t *shape_json(const cg_shape *shape) {
    json_t *list = json_array();
    for (int d = 0; d < shape->n_dims; d++) json_array_append_new(list, json_integer(shape->dims[d]));
    return list;
}

static json_t *readers_json(const cg_saved *saved) {
    json_t *list = json_array();
    for (int r = 0; r < saved->n_readers; r++)
        json_array_append_new(list,
                              json_pack("{s:s, s:s, s:s, s:i}", "op", saved->readers[r]->op->name, "scope",
                                        saved->readers[r]->scope, "pass", cg_pass_name(saved->readers[r]->pass),
                                        "step", saved->reader_steps[r]));
    return list;
}

static json_t *saved_json(const mem_row *row) {
    json_t *list = json_array();
    for (int i = 0; i < row->n_saved; i++) {
        const cg_value *value = row->saved[i].value, *parameter = mem_parameter_of(value);
        const cg_storage *storage = &row->step.plan->storages[row->step.plan->storage_of[value->id]];
        const mem_what_if *what_if = &row->what_if[i];
        char name[256];
        json_array_append_new(
            list, json_pack("{s:s, s:s, s:s, s:s?, s:s, s:o, s:I, s:i, s:i, s:o, s:o}", "name", value->name,
                            "scope", value->scope, "op", value->producer->op->name, "parameter",
                            parameter ? cg_param_name(parameter, name, sizeof name) : NULL, "dtype",
                            cg_dtype_name(value->dtype), "shape", shape_json(&value->shape), "bytes",
                            (json_int_t)row->saved[i].bytes, "first_step", storage->first, "last_step",
                            storage->last, "readers", readers_json(&row->saved[i]), "recompute_this",
                            what_if->possible ? json_pack("{s:I, s:f}", "peak_change_bytes",
                                                          (json_int_t)what_if->peak_change_bytes, "extra_us",
                                                          what_if->extra_us)
                                              : json_null()));
    }
    return list;
}

static json_t *categories_json(const cg_plan *plan) {
    int64_t bytes[CG_CATEGORIES];
    cg_plan_live(plan, plan->peak_step, bytes);
    json_t *object = json_object();
    for (int c = 0; c < CG_CATEGORIES; c++)
        json_object_set_new(object, cg_category_name((cg_category)c), json_integer(bytes[c]));
    return object;
}

static json_t *curve_json(const mem_curve *curve) {
    json_t *list = json_array();
    const cg_frontier *f = curve->frontier;
    for (int i = 0; i < f->n_points; i++) {
        const cg_trial *trial = &f->points[i].trial;
        char *chosen = chosen_text(curve, &f->points[i]);
        json_array_append_new(list,
                              json_pack("{s:I, s:f, s:f, s:f, s:i, s:s}", "peak_bytes",
                                        (json_int_t)trial->peak_bytes, "extra_us", trial->extra_us, "least_us",
                                        f->points[i].least_us, "extra_flops", trial->extra_flops,
                                        "recomputed_nodes", trial->n_clones, "ops", chosen ? chosen : ""));
        free(chosen);
    }
    return json_pack("{s:b, s:i, s:o}", "exact", f->exact, "candidates", f->n_candidates, "points", list);
}

static json_t *growth_json(const mem_report *report, const mem_row *row) {
    for (int i = 0; i < report->n_growth; i++)
        if (report->growth[i].dtype == row->dtype && !strcmp(report->growth[i].policy, row->policy))
            return json_pack("{s:o, s:o}", "peak_exponent", json_figure(report->growth[i].peak_exponent),
                             "extra_exponent", json_figure(report->growth[i].extra_exponent));
    return json_null();
}

static json_t *row_json(const mem_report *report, const mem_row *row) {
    json_t *object = json_pack(
        "{s:s, s:s, s:I, s:s, s:I, s:s, s:s?}", "policy", row->policy, "dims", row->dims, "seq",
        (json_int_t)row->seq, "dtype", cg_dtype_name(row->dtype), "rows", (json_int_t)row->n_rows, "part",
        row->workload.part == CG_PART_STEP ? "step" : "indexer-loss", "refused", row->refused);
    const cg_measurement *m = &row->m;
    bool is_fine = !row->refused;
    const struct {
        const char *key;
        int64_t bytes; /* -1: null */
    } bytes[] = {
        {"planned_peak_bytes", m->planned_peak_bytes},
        {"measured_peak_bytes", m->measured_peak_bytes},
        {"rss_peak_bytes", m->rss_peak_bytes},
        {"driver_peak_bytes", m->driver_peak_bytes},
        {"saved_bytes", m->saved_bytes},
        {"recomputed_bytes", m->recomputed_bytes},
        {"workspace_bytes", m->workspace_bytes},
        {"floor_bytes", m->floor_bytes},
        {"boundary_bytes", m->boundary_bytes},
        {"saved_in_indexers_bytes", is_fine ? mem_saved_in_indexers(row) : -1},
        {"recomputed_nodes", m->n_clones},
        {"steps", m->n_steps},
    };
    for (size_t i = 0; i < sizeof bytes / sizeof bytes[0]; i++)
        json_object_set_new(object, bytes[i].key, bytes_json(is_fine ? bytes[i].bytes : -1));
    json_object_set_new(object, "flops", is_fine ? json_real(m->flops) : json_null());
    json_object_set_new(object, "extra_flops", is_fine ? json_real(m->extra_flops) : json_null());
    json_object_set_new(object, "loss", is_fine ? json_figure(m->loss) : json_null());
    json_object_set_new(object, "step_us", is_fine ? json_figure(m->step_us) : json_null());
    json_object_set_new(object, "growth", growth_json(report, row));
    if (!is_fine) return object;
    json_object_set_new(object, "peak_step", json_integer(row->step.plan->peak_step));
    json_object_set_new(object, "peak_categories", categories_json(row->step.plan));
    if (row->what_if) json_object_set_new(object, "saved", saved_json(row));
    const cg_frontier_point *point = mem_budget_point(row);
    if (point)
        json_object_set_new(object, "budget",
                            json_pack("{s:f, s:f, s:I}", "extra_us", point->trial.extra_us, "least_us",
                                      point->least_us, "least_peak_bytes",
                                      (json_int_t)row->step.frontier->least_bytes));
    for (int c = 0; c < report->n_curves; c++)
        if (report->curves[c].row == row) json_object_set_new(object, "pareto", curve_json(&report->curves[c]));
    return object;
}

void mem_print_json(const mem_report *report) {
    json_t *list = json_array();
    for (int r = 0; r < report->n_rows; r++) json_array_append_new(list, row_json(report, &report->rows[r]));
    json_print(list, JSON_INDENT(2) | JSON_REAL_PRECISION(17));
}
