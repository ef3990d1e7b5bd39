#include "graph/gradcheck.h"

#include "core/base/rng.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Below this share of the leaf's largest derivative an entry is measured against that share: differences of f64
 * values carry an absolute rounding error of about 1e-11. */
static const double small_row = 1e-3;

enum { RUN_FORWARD = CG_PASS_BIT(CG_FORWARD), RUN_BOTH = CG_ALL_PASSES & ~CG_PASS_BIT(CG_OPTIMIZE) };

void cg_keep_choices(cg_graph *graph) {
    for (int n = 0; n < graph->n_nodes; n++)
        for (int s = 0; graph->nodes[n]->op->replay == CG_REPLAY_CHOICE && s < graph->nodes[n]->n_out; s++)
            cg_keep(graph->nodes[n]->out[s]);
}

/* True where gradients stop before a node that they flow through: it takes as a constant what moves. */
static bool stops_at(const cg_node *node, int i, const bool *moves) {
    const cg_value *value = node->in[i];
    if (!value || !cg_dtype_is_real(value->dtype) || !moves[value->id] || cg_wants_grad(node, i)) return false;
    for (int s = 0; s < node->n_out; s++)
        if (node->out[s]->needs_grad) return true;
    return false;
}

/* What a forward node makes moves with what it reads, unless it chooses. */
static void move_outputs(const cg_node *node, bool *moves) {
    bool any = false;
    for (int i = 0; i < node->n_in; i++) any |= node->in[i] && moves[node->in[i]->id];
    for (int s = 0; s < node->n_out; s++) moves[node->out[s]->id] = any && node->op->replay != CG_REPLAY_CHOICE;
}

bool cg_hold_constants(cg_graph *graph) {
    if (graph->error.code != CG_OK) return false;
    const int n_nodes = graph->n_nodes, n_values = graph->n_values;
    bool *moves = calloc(2 * (size_t)n_values + 1, sizeof *moves); /* a copy of each value may come behind */
    cg_value **held = calloc((size_t)n_values + 1, sizeof *held);  /* by value id: its copy */
    cg_node **order = malloc((size_t)(n_nodes + n_values + 1) * sizeof *order);
    if (!moves || !held || !order) cg_graph_no_memory(graph, "while constants are held");
    if (!graph->ops->hold) cg_graph_fail(graph, "constants cannot be held: the set of ops has no hold");
    for (int v = 0; v < n_values && moves; v++)
        moves[v] = graph->values[v]->leaf && graph->values[v]->needs_grad;
    int n_order = 0;
    for (int n = 0; n < n_nodes && graph->error.code == CG_OK; n++) {
        cg_node *node = graph->nodes[n];
        for (int i = 0; node->pass == CG_FORWARD && i < node->n_in && graph->error.code == CG_OK; i++) {
            cg_value *value = node->in[i];
            if (!stops_at(node, i, moves)) continue;
            if (!held[value->id]) {
                CG_WITHIN(graph, node->scope, CG_FORWARD, NULL);
                held[value->id] = cg_keep(cg_apply(graph, graph->ops->hold, NULL, &value, 1));
                if (held[value->id]) order[n_order++] = held[value->id]->producer;
            }
            node->in[i] = held[value->id];
        }
        order[n_order++] = node;
        if (node->pass == CG_FORWARD) move_outputs(node, moves);
    }
    const bool ok = graph->error.code == CG_OK;
    if (ok) {
        free(cg_graph_reorder(graph, order, n_order));
    } else {
        free(order);
    }
    free(moves);
    free(held);
    return ok;
}

typedef struct column { /* one entry of one leaf */
    int leaf;
    int64_t entry;
    double h;
} column;

typedef struct work {
    const cg_gradcheck *check;
    int64_t n_rows; /* output entries, or 1: their sum weighted by the random output gradient */
    int64_t n_columns;
    column *columns;
    double *base;         /* [n_rows] */
    double *plus, *minus; /* [n_columns, n_rows] */
    double *weights;      /* the random output gradient, over all output entries */
    double *outputs;      /* all output entries, as read or as seeds to write */
    double *analytic;     /* [n_columns] */
    int64_t n_out;
} work;

static int64_t count(const cg_value *value) { return cg_shape_count(&value->shape); }

/* The outputs as rows. An infinite entry is a marker (no score here) and has no derivative; NaN stays. */
static void read_outputs(const work *w, double *rows) {
    int64_t at = 0;
    double sum = 0;
    for (int o = 0; o < w->check->n_outputs; o++) {
        const int64_t n = count(w->check->outputs[o]);
        cg_exec_read_real(w->check->exec, w->check->outputs[o], 0, n, w->outputs);
        for (int64_t i = 0; i < n; i++, at++) {
            double y = isinf(w->outputs[i]) ? 0 : w->outputs[i];
            if (w->check->full_jacobian)
                rows[at] = y;
            else
                sum += w->weights[at] * y;
        }
    }
    if (!w->check->full_jacobian) rows[0] = sum;
}

static bool evaluate(const work *w, const column *c, double delta, double *rows, cg_error *error) {
    const cg_value *leaf = w->check->wrt[c->leaf];
    double kept = cg_exec_get(w->check->exec, leaf, c->entry);
    cg_exec_set(w->check->exec, leaf, c->entry, kept + delta);
    bool ok = cg_exec_run(w->check->exec, RUN_FORWARD | CG_HOLD_CHOICES, error);
    if (ok) read_outputs(w, rows); /* before x is restored: an output may be x under another shape */
    cg_exec_set(w->check->exec, leaf, c->entry, kept);
    return ok;
}

/* Set the output gradients: one-hot at output entry `row`, or all of the random one (row < 0). */
static void seed_outputs(const work *w, int64_t row) {
    int64_t at = 0;
    for (int o = 0; o < w->check->n_outputs; o++) {
        const int64_t n = count(w->check->outputs[o]);
        for (int64_t i = 0; i < n; i++, at++) w->outputs[i] = row < 0 ? w->weights[at] : at == row;
        cg_exec_write_real(w->check->exec, w->check->seeds[o], 0, n, w->outputs);
    }
}

/* f of one row, or of all rows weighted. */
static double weighted(const work *w, const double *rows, int64_t row) {
    if (!w->check->full_jacobian) return rows[0];
    if (row >= 0) return rows[row];
    double sum = 0;
    for (int64_t r = 0; r < w->n_rows; r++) sum += w->weights[r] * rows[r];
    return sum;
}

/* Compare the analytic gradients now in memory with the numeric ones of output entry `row` (-1: weighted sum).
 */
static void compare(const work *w, int64_t row, const double *leaf_scale, bool *nonzero,
                    cg_gradcheck_report *report) {
    const cg_gradcheck *check = w->check;
    double tolerance = check->tolerance > 0 ? check->tolerance : 1e-6;
    double *row_scale = calloc((size_t)check->n_wrt + 1, sizeof *row_scale);
    if (!row_scale) return;
    for (int64_t c = 0; c < w->n_columns; c++)
        w->analytic[c] = cg_exec_get(check->exec, check->grads[w->columns[c].leaf], w->columns[c].entry);
    for (int pass = 0; pass < 2; pass++)
        for (int64_t c = 0; c < w->n_columns; c++) {
            const column *col = &w->columns[c];
            const cg_value *leaf = check->wrt[col->leaf];
            double analytic = w->analytic[c];
            double f_plus = weighted(w, w->plus + c * w->n_rows, row),
                   f_minus = weighted(w, w->minus + c * w->n_rows, row);
            double numeric = (f_plus - f_minus) / (2 * col->h);
            double *scale = &row_scale[col->leaf];
            if (pass == 0) {
                *scale = fmax(*scale, fmax(fabs(analytic), fabs(numeric)));
                continue;
            }
            double measure = fmax(fmax(*scale, small_row * leaf_scale[col->leaf]), 1e-6);
            double rel = fabs(analytic - numeric) / measure;
            if (isnan(rel)) rel = DBL_MAX;
            if (!(rel <= tolerance)) {
                double f = weighted(w, w->base, row);
                double right = (f_plus - f) / col->h, left = (f - f_minus) / col->h;
                double low = fmin(left, right), high = fmax(left, right), slack = 1e-4 * measure;
                if (high - low > 1e-2 * measure && analytic >= low - slack && analytic <= high + slack) {
                    report->n_kinks++;
                    continue;
                }
            }
            report->n_entries++;
            if (nonzero && fabs(numeric) > 1e-9) nonzero[col->leaf] = true;
            if (rel <= report->worst_rel) continue;
            report->worst_rel = rel;
            char name[128];
            snprintf(report->worst, sizeof report->worst,
                     "%s entry %lld by %s %lld: analytic %.12g, numeric %.12g, step %.1e",
                     cg_value_text(leaf, name, sizeof name), (long long)col->entry,
                     row < 0 ? "random output gradient" : "output entry", (long long)(row < 0 ? 0 : row),
                     analytic, numeric, col->h);
        }
    free(row_scale);
}

static bool allocate(work *w) {
    const cg_gradcheck *check = w->check;
    for (int o = 0; o < check->n_outputs; o++) w->n_out += count(check->outputs[o]);
    w->n_rows = check->full_jacobian ? w->n_out : 1;
    for (int k = 0; k < check->n_wrt; k++) {
        int64_t n = count(check->wrt[k]);
        w->n_columns += check->max_entries && n > check->max_entries ? check->max_entries : n;
    }
    size_t cells = (size_t)w->n_columns * (size_t)w->n_rows;
    w->columns = calloc((size_t)w->n_columns + 1, sizeof *w->columns);
    w->base = calloc((size_t)w->n_rows + 1, sizeof *w->base);
    w->plus = calloc(cells + 1, sizeof *w->plus);
    w->minus = calloc(cells + 1, sizeof *w->minus);
    w->weights = calloc((size_t)w->n_out + 1, sizeof *w->weights);
    w->outputs = calloc((size_t)w->n_out + 1, sizeof *w->outputs);
    w->analytic = calloc((size_t)w->n_columns + 1, sizeof *w->analytic);
    if (!w->columns || !w->base || !w->plus || !w->minus || !w->weights || !w->outputs || !w->analytic)
        return false;
    int64_t c = 0;
    for (int k = 0; k < check->n_wrt; k++) {
        int64_t n = count(check->wrt[k]),
                used = check->max_entries && n > check->max_entries ? check->max_entries : n;
        for (int64_t i = 0; i < used; i++) {
            /* one of each stretch, not its first: sizes are powers of two, and a stretch of whole rows would
             * leave all columns but one unseen */
            int64_t first = i * n / used, end = (i + 1) * n / used;
            int64_t entry = first + cg_random_below(2, 1, (uint64_t)i, end - first);
            const double x = cg_exec_get(check->exec, check->wrt[k], entry);
            if (!isfinite(x)) continue; /* -inf marks an absent score: there is no point beside it */
            double h = (check->step > 0 ? check->step : 1e-5) * fmax(1, sqrt(fabs(x)));
            w->columns[c++] = (column){k, entry, h};
        }
    }
    w->n_columns = c;
    for (int64_t i = 0; i < w->n_out; i++) w->weights[i] = cg_random_normal(2, 0, (uint64_t)i);
    return true;
}

static bool check_all(work *w, bool *nonzero, cg_gradcheck_report *report, cg_error *error) {
    const cg_gradcheck *check = w->check;
    if (!cg_exec_run(check->exec, RUN_FORWARD, error)) return false;
    read_outputs(w, w->base);
    double *leaf_scale = calloc((size_t)check->n_wrt + 1, sizeof *leaf_scale);
    bool ok = leaf_scale || cg_fail(error, CG_FAILED, "out of memory in a gradient check");
    for (int64_t c = 0; ok && c < w->n_columns; c++) {
        const column *col = &w->columns[c];
        double *plus = w->plus + c * w->n_rows, *minus = w->minus + c * w->n_rows;
        ok = evaluate(w, col, col->h, plus, error) && evaluate(w, col, -col->h, minus, error);
        for (int64_t r = 0; ok && r < w->n_rows; r++)
            leaf_scale[col->leaf] = fmax(leaf_scale[col->leaf], fabs(plus[r] - minus[r]) / (2 * col->h));
    }
    for (int64_t row = check->full_jacobian ? 0 : w->n_out; ok && row <= w->n_out; row++) {
        int64_t which = row == w->n_out ? -1 : row;
        seed_outputs(w, which);
        ok = cg_exec_run(check->exec, RUN_BOTH | CG_HOLD_CHOICES, error);
        if (ok) compare(w, which, leaf_scale, nonzero, report);
    }
    free(leaf_scale);
    return ok;
}

/* Everything is read as doubles, in memory that lasts until it is read. */
static bool is_checkable(const cg_gradcheck *check, cg_error *error) {
    cg_value *const *lists[] = {check->outputs, check->seeds, check->wrt, check->grads};
    const int n[] = {check->n_outputs, check->n_outputs, check->n_wrt, check->n_wrt};
    for (int l = 0; l < 4; l++)
        for (int i = 0; i < n[l]; i++) {
            char name[256];
            const cg_value *value = lists[l][i];
            if (value->dtype != CG_F64)
                return cg_fail(error, CG_BAD_INPUT,
                               "a gradient check needs f64, %s is %s: differences of f32 are mostly rounding",
                               cg_value_text(value, name, sizeof name), cg_dtype_name(value->dtype));
            if (!value->leaf && !value->keep)
                return cg_fail(error, CG_BAD_INPUT, "a gradient check needs %s kept (cg_keep)",
                               cg_value_text(value, name, sizeof name));
        }
    return true;
}

static bool is_seen(const cg_node *node, const bool *seen) {
    for (int s = 0; s < node->n_out && node->op->replay != CG_REPLAY_CHOICE; s++)
        if (seen[node->out[s]->id]) return true;
    return false;
}

/* A constant that the leaves move and the outputs see would make a right gradient look wrong. */
static bool constants_are_held(const cg_gradcheck *check, cg_error *error) {
    const cg_graph *graph = cg_exec_plan(check->exec)->graph;
    bool *moves = calloc(2 * (size_t)graph->n_values + 1, sizeof *moves);
    if (!moves) return cg_fail(error, CG_FAILED, "out of memory in a gradient check");
    bool *seen = moves + graph->n_values;
    for (int k = 0; k < check->n_wrt; k++) moves[check->wrt[k]->id] = true;
    for (int o = 0; o < check->n_outputs; o++) seen[check->outputs[o]->id] = true;
    for (int n = graph->n_nodes - 1; n >= 0;
         n--) /* the outputs see what a node reads when they see what it makes */
        for (int i = 0; i < graph->nodes[n]->n_in && is_seen(graph->nodes[n], seen); i++)
            if (graph->nodes[n]->in[i]) seen[graph->nodes[n]->in[i]->id] = true;
    bool ok = true;
    for (int n = 0; n < graph->n_nodes && ok; n++) {
        const cg_node *node = graph->nodes[n];
        if (node->pass != CG_FORWARD) continue;
        for (int i = 0; i < node->n_in && ok && is_seen(node, seen); i++) {
            char name[256];
            if (stops_at(node, i, moves))
                ok = cg_fail(error, CG_BAD_INPUT,
                             "a gradient check needs %s held (cg_hold_constants): %s takes it as a constant",
                             cg_value_text(node->in[i], name, sizeof name), node->op->name);
        }
        move_outputs(node, moves);
    }
    free(moves);
    return ok;
}

bool cg_gradcheck_run(const cg_gradcheck *check, bool *nonzero, cg_gradcheck_report *report, cg_error *error) {
    *report = (cg_gradcheck_report){0};
    bool any[256] = {false}, *seen = nonzero ? nonzero : any;
    if (!nonzero && check->n_wrt > 256)
        return cg_fail(error, CG_BAD_INPUT, "a gradient check of over 256 leaves");
    if (!is_checkable(check, error) || !constants_are_held(check, error)) return false;
    work w = {.check = check};
    bool ok = allocate(&w) || cg_fail(error, CG_FAILED, "out of memory in a gradient check");
    ok = ok && check_all(&w, seen, report, error);
    free(w.columns);
    free(w.base);
    free(w.plus);
    free(w.minus);
    free(w.weights);
    free(w.outputs);
    free(w.analytic);
    bool some = false;
    for (int k = 0; k < check->n_wrt; k++) some |= seen[k];
    report->ok = ok && some && report->n_entries > 0 &&
                 report->worst_rel <= (check->tolerance > 0 ? check->tolerance : 1e-6);
    return ok;
}

static bool check_case(const cg_op_set *ops, const cg_op *op, const cg_case *the_case,
                       const cg_backend *backend, bool *nonzero_input, bool *checked,
                       cg_gradcheck_report *report, cg_error *error) {
    cg_case_graph built;
    cg_plan *plan = NULL;
    cg_exec *exec = NULL;
    *checked = false;
    bool ok = cg_case_build(ops, op, the_case, CG_F64, &built) || cg_fail(error, CG_FAILED, "out of memory");
    ok = ok && (plan = cg_plan_make(built.graph, &(cg_plan_options){.backend = backend}, error)) != NULL;
    if (ok && built.n_wrt && built.n_seeds) {
        bool nonzero[CG_MAX_IN] = {false};
        ok = (exec = cg_exec_new(plan, &(cg_exec_options){.poison = true}, error)) != NULL;
        ok = ok && cg_case_fill(&built, exec, error);
        cg_gradcheck check = {.exec = exec,
                              .n_outputs = built.n_seeds,
                              .outputs = built.seeded,
                              .seeds = built.seed,
                              .n_wrt = built.n_wrt,
                              .wrt = built.wrt,
                              .grads = built.grad,
                              .full_jacobian = true};
        ok = ok && cg_gradcheck_run(&check, nonzero, report, error);
        for (int k = 0; k < built.n_wrt; k++)
            nonzero_input[op->variadic ? 0 : built.wrt_input[k]] |= nonzero[k];
        *checked = ok;
    }
    cg_exec_free(exec);
    cg_plan_free(plan);
    cg_case_free(&built);
    if (!ok) cg_error_at(error, "%s, case %s", op->name, the_case->name);
    return ok;
}

bool cg_gradcheck_op(const cg_op_set *ops, const cg_op *op, const cg_backend *backend, int *n_cases,
                     cg_gradcheck_report *report, cg_error *error) {
    *report = (cg_gradcheck_report){0};
    *n_cases = 0;
    bool nonzero[CG_MAX_IN] = {false};
    for (int c = 0; c < op->n_cases && op->differentiable; c++) {
        const cg_case *the_case = &op->cases[c];
        if (the_case->refuses || the_case->run_error || the_case->large) continue;
        cg_gradcheck_report one = {0};
        bool checked;
        if (!check_case(ops, op, the_case, backend, nonzero, &checked, &one, error)) return false;
        *n_cases += checked;
        report->n_entries += one.n_entries;
        report->n_kinks += one.n_kinks;
        if (one.worst_rel <= report->worst_rel) continue;
        report->worst_rel = one.worst_rel;
        snprintf(report->worst, sizeof report->worst, "%.40s: %.200s", the_case->name, one.worst);
    }
    if (!op->differentiable) {
        report->ok = op->no_grad != NULL;
        return true;
    }
    report->ok = report->n_entries > 0 && report->worst_rel <= 1e-6;
    for (int i = 0; i < CG_MAX_IN; i++)
        if ((op->differentiable & CG_BIT(i)) && !nonzero[i]) {
            report->ok = false;
            snprintf(report->worst, sizeof report->worst, "no case has a gradient to %s that is not zero",
                     op->in[i]);
        }
    return true;
}
