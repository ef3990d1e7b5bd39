/* The rows of csagrad mem and what is read off them: counterfactuals, growth, curves. */
#include "tools/mem.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- rows ---- */

bool mem_row_make(mem_row *row, int n_runs, cg_error *error) {
    cg_error own = {0};
    const cg_workload *w = &row->workload;
    bool ok = n_runs ? cg_measure_run(w, n_runs, &row->step, &row->m, &own)
                     : cg_measure_plan(w, &row->step, &row->m, &own);
    if (ok) {
        row->saved = cg_plan_saved(row->step.plan, &row->n_saved);
        return row->saved || cg_fail(error, CG_FAILED, "out of memory for a list of saved values");
    }
    cg_measurement_free(&row->m);
    cg_step_free(&row->step);
    cg_policy
        policy; /* a budget that is too small is this row's trouble, a policy that means nothing everybody's */
    bool has_budget = cg_policy_parse(row->policy, &policy, NULL) && policy.budget_bytes;
    if (own.code == CG_BAD_INPUT && !has_budget) return cg_fail(error, own.code, "%s", own.text);
    row->refused = strdup(own.text);
    row->refused_code = own.code;
    return row->refused || cg_fail(error, CG_FAILED, "out of memory for a row");
}

double mem_step_us(const mem_row *row, int step) {
    if (row->m.node_us) return row->m.node_us[step];
    const cg_node *node = row->step.plan->steps[step];
    return node->op->alias ? 0 : cg_node_us(node);
}

double mem_row_us(const mem_row *row) {
    if (row->m.node_us) return row->m.step_us;
    double sum = 0;
    for (int t = 0; t < row->step.plan->n_steps; t++) sum += mem_step_us(row, t);
    return sum;
}

const cg_frontier_point *mem_budget_point(const mem_row *row) {
    cg_policy policy;
    if (row->refused || !row->step.frontier || !cg_policy_parse(row->policy, &policy, NULL)) return NULL;
    return cg_frontier_fit(row->step.frontier, policy.budget_bytes);
}

int64_t mem_saved_in_indexers(const mem_row *row) {
    int64_t bytes = 0;
    for (int i = 0; i < row->n_saved; i++)
        if (strstr(row->saved[i].value->scope, "/indexer")) bytes += row->saved[i].bytes;
    return bytes;
}

const cg_value *mem_parameter_of(const cg_value *value) {
    const cg_node *node = value->producer;
    for (int i = 0; i < node->n_in; i++)
        if (node->in[i] && cg_value_root(node->in[i])->leaf == CG_LEAF_PARAMETER)
            return cg_value_root(node->in[i]);
    return NULL;
}

const char *mem_readers_text(const cg_saved *saved, char *text, size_t text_bytes) {
    if (!saved->n_readers) {
        snprintf(text, text_bytes, "-");
        return text;
    }
    const cg_node *reader = saved->readers[0];
    int n = snprintf(text, text_bytes, "%s of %s at %d", reader->op->name, cg_pass_name(reader->pass),
                     saved->reader_steps[0]);
    if (saved->n_readers > 1 && n > 0 && (size_t)n < text_bytes)
        snprintf(text + n, text_bytes - (size_t)n, ", %d more, last at %d", saved->n_readers - 1,
                 saved->reader_steps[saved->n_readers - 1]);
    return text;
}

/* ---- what recomputing one value would change ---- */

/* Times of forward nodes by their numbers, as measured; NULL where nothing ran. */
static bool measured_node_us(const mem_row *row, double **node_us, cg_error *error) {
    *node_us = NULL;
    if (!row->m.node_us) return true;
    *node_us = calloc((size_t)row->step.graph->n_nodes + 1, sizeof **node_us);
    if (!*node_us) return cg_fail(error, CG_FAILED, "out of memory for the times of nodes");
    for (int t = 0; t < row->step.plan->n_steps; t++)
        if (row->step.plan->steps[t]->pass == CG_FORWARD)
            (*node_us)[row->step.plan->steps[t]->id] = row->m.node_us[t];
    return true;
}

/* Whether the row's policy has the node run again already. */
static void mark_recomputed(const mem_row *row, bool *chosen) {
    for (int t = 0; t < row->step.plan->n_steps; t++)
        if (row->step.plan->steps[t]->pass == CG_RECOMPUTE) chosen[row->step.plan->steps[t]->cause->id] = true;
}

/* The same workload before recompute rewrote its graph: forward nodes have the same numbers. */
static bool base_of(const mem_row *row, cg_step *base, cg_error *error) {
    cg_workload w = row->workload;
    cg_measurement plan;
    cg_policy policy;
    if (!cg_policy_parse(row->policy, &policy, error)) return false;
    snprintf(w.config.policy, sizeof w.config.policy, "%s", policy.form == CG_FORM_STREAM ? "stream" : "save");
    return cg_measure_plan(&w, base, &plan, error);
}

static bool try_each(mem_row *row, cg_graph *graph, bool *chosen, const double *node_us, cg_error *error) {
    cg_trial as_is, trial;
    cg_plan_options options = {.backend = row->workload.backend,
                               .keep_cloned_originals = row->workload.verify_recompute};
    if (!cg_recompute_trial(graph, chosen, node_us, &options, 0, &as_is, error)) return false;
    for (int i = 0; i < row->n_saved; i++) {
        mem_what_if *what_if = &row->what_if[i];
        const cg_node *node = row->saved[i].value->producer;
        what_if->value = row->saved[i].value;
        if (!cg_recompute_may_clone(node) || chosen[node->id]) continue;
        chosen[node->id] = true;
        cg_error own = {0};
        what_if->possible = cg_recompute_trial(graph, chosen, node_us, &options, 0, &trial, &own);
        chosen[node->id] = false;
        if (!what_if->possible && own.code != CG_OK) return cg_fail(error, own.code, "%s", own.text);
        if (!what_if->possible) continue;
        what_if->peak_change_bytes = trial.peak_bytes - as_is.peak_bytes;
        what_if->extra_us = trial.extra_us - as_is.extra_us;
    }
    return true;
}

bool mem_what_if_make(mem_row *row, cg_error *error) {
    cg_step base = {0};
    double *node_us = NULL;
    row->what_if = calloc((size_t)row->n_saved + 1, sizeof *row->what_if);
    bool *chosen = calloc((size_t)row->step.graph->n_nodes + 1, sizeof *chosen);
    bool ok = row->what_if && chosen;
    if (!ok) cg_fail(error, CG_FAILED, "out of memory for the counterfactuals of a plan");
    ok = ok && measured_node_us(row, &node_us, error);
    if (ok) mark_recomputed(row, chosen);
    if (ok && row->step.n_clones) ok = base_of(row, &base, error);
    ok = ok && try_each(row, base.graph ? base.graph : row->step.graph, chosen, node_us, error);
    cg_step_free(&base);
    free(node_us);
    free(chosen);
    return ok;
}

/* ---- growth ---- */

/* Slope of log y over log x; NaN where that says nothing. */
static double slope(int n, const double *x, const double *y) {
    double mx = 0, my = 0, above = 0, below = 0;
    for (int i = 0; i < n; i++) {
        mx += log(x[i]) / n;
        my += log(y[i]) / n;
    }
    for (int i = 0; i < n; i++) {
        above += (log(x[i]) - mx) * (log(y[i]) - my);
        below += (log(x[i]) - mx) * (log(x[i]) - mx);
    }
    return below > 0 ? above / below : NAN;
}

static int by_seq(const void *a, const void *b) {
    const mem_row *x = *(const mem_row *const *)a, *y = *(const mem_row *const *)b;
    return (x->seq > y->seq) - (x->seq < y->seq);
}

static bool is_of(const mem_row *row, const mem_row *first) {
    return row->dtype == first->dtype && !strcmp(row->policy, first->policy);
}

static bool fit(mem_growth *growth, const mem_report *report, const mem_row *first) {
    *growth = (mem_growth){.policy = first->policy, .dtype = first->dtype};
    growth->rows = calloc((size_t)report->n_rows, sizeof *growth->rows);
    double *x = calloc((size_t)report->n_rows * 3, sizeof *x), *peak = x + report->n_rows,
           *extra = peak + report->n_rows;
    int n = 0;
    for (int r = 0; growth->rows && x && r < report->n_rows; r++)
        if (!report->rows[r].refused && is_of(&report->rows[r], first)) growth->rows[n++] = &report->rows[r];
    if (n) qsort(growth->rows, (size_t)n, sizeof *growth->rows, by_seq);
    for (int i = 0; i < n; i++) {
        const cg_measurement *m = &growth->rows[i]->m;
        x[i] = (double)growth->rows[i]->seq;
        peak[i] = (double)m->planned_peak_bytes;
        extra[i] = (double)(m->planned_peak_bytes - m->boundary_bytes);
    }
    growth->n_sizes = n;
    growth->peak_exponent = n ? slope(n, x, peak) : NAN;
    growth->extra_exponent = n ? slope(n, x, extra) : NAN;
    bool ok = growth->rows && x;
    free(x);
    return ok;
}

bool mem_growth_make(mem_report *report, cg_error *error) {
    report->growth = calloc((size_t)report->n_rows + 1, sizeof *report->growth);
    bool ok = report->growth != NULL;
    for (int r = 0; ok && r < report->n_rows; r++) {
        const mem_row *row = &report->rows[r];
        bool seen = false;
        int sizes = 0;
        for (int i = 0; i < report->n_rows; i++) {
            if (!is_of(&report->rows[i], row)) continue;
            seen |= i < r;
            sizes += report->rows[i].seq != row->seq;
        }
        if (seen || !sizes) continue;
        ok = fit(&report->growth[report->n_growth++], report, row);
    }
    return ok || cg_fail(error, CG_FAILED, "out of memory for the growth of %d rows", report->n_rows);
}

/* ---- curves ---- */

bool mem_curves_make(mem_report *report, cg_error *error) {
    report->curves = calloc((size_t)report->n_rows + 1, sizeof *report->curves);
    if (!report->curves) return cg_fail(error, CG_FAILED, "out of memory for curves");
    for (int r = 0; r < report->n_rows; r++) {
        const mem_row *row = &report->rows[r];
        if (row->refused || row->step.n_clones) continue;
        mem_curve *curve = &report->curves[report->n_curves++];
        double *node_us = NULL;
        *curve = (mem_curve){.base = row->policy, .row = row};
        if (!measured_node_us(row, &node_us, error)) return false;
        curve->node_us = node_us;
        curve->frontier = cg_frontier_make(row->step.graph, node_us,
                                           &(cg_plan_options){.backend = row->workload.backend}, 0, error);
        if (!curve->frontier) return false;
    }
    return report->n_curves ||
           cg_fail(error, CG_BAD_INPUT,
                   "a curve starts from a policy that recomputes nothing, and none was asked for: "
                   "add --policy stream or --policy save");
}

void mem_report_free(mem_report *report) {
    for (int c = 0; c < report->n_curves; c++) {
        cg_frontier_free(report->curves[c].frontier);
        free((void *)report->curves[c].node_us);
    }
    for (int i = 0; i < report->n_growth; i++) free(report->growth[i].rows);
    for (int r = 0; r < report->n_rows; r++) {
        mem_row *row = &report->rows[r];
        cg_saved_free(row->saved, row->n_saved);
        free(row->what_if);
        free(row->refused);
        cg_measurement_free(&row->m);
        cg_step_free(&row->step);
    }
    free(report->curves);
    free(report->growth);
    free(report->rows);
    *report = (mem_report){0};
}
