/* Computing one row. The engine's ops want packed rows: the last of W token rows is ours, the ones before it only
 * carry window keys and see no compressed row. */
#include "models/check/row.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "graph/cases.h"
#include "graph/exec.h"
#include "ops/ops.h"

/* ---- results ---- */

enum { VECTOR = -1 }; /* as rows of an array */

static double *add_array(cg_row_result *result, const char *name, const char *doc, int64_t rows,
                         int64_t columns) {
    cg_row_array *a = &result->arrays[result->n];
    const bool matrix = rows != VECTOR;
    if (!matrix) rows = 1;
    *a = (cg_row_array){
        name, doc, rows, columns, matrix, false, calloc((size_t)(rows * columns + 1), sizeof(double))};
    if (a->x)
        result->n++;
    else
        result->lacks_one = true;
    return a->x;
}

static void copy_array(cg_row_result *result, const char *name, const char *doc, int64_t rows, int64_t columns,
                       const double *from) {
    double *x = add_array(result, name, doc, rows, columns);
    if (x) memcpy(x, from, sizeof *x * (size_t)(llabs(rows) * columns));
}

const cg_row_array *cg_row_find(const cg_row_result *result, const char *name) {
    for (int i = 0; i < result->n; i++)
        if (!strcmp(result->arrays[i].name, name)) return &result->arrays[i];
    return NULL;
}

void cg_row_result_free(cg_row_result *result) {
    if (!result) return;
    for (int i = 0; i < result->n; i++) free(result->arrays[i].x);
    free(result);
}

/* ---- what the engine computes ---- */

typedef struct engine {
    cg_graph *graph;
    cg_plan *plan;
    cg_exec *exec;
    const cg_backend *backend;
    const cg_row *row;
    int32_t *chosen; /* [K], as read after a run */
    int64_t T;
    cg_value *q, *window, *compressed, *sink, *index, *rows, *dout, *all;
    cg_value *q_index, *w, *k_index, *given_scores, *given_target, *one;
    cg_attention attention;
    cg_value *scores, *predict, *target, *loss, *kl; /* of the loss: NULL where contract.h computes it */
    cg_value *grads[8];                              /* q window compressed sink scores q_index w k_index */
} engine;

enum { D_Q, D_WINDOW, D_COMPRESSED, D_SINK, D_SCORES, D_Q_INDEX, D_W, D_K_INDEX };

static cg_teacher teacher_of(const cg_contract *contract) {
    int teacher = contract->value[CG_AXIS_TEACHER];
    return teacher == CG_TEACHER_IS_FULL         ? CG_TEACHER_FULL
           : teacher == CG_TEACHER_IS_SINK       ? CG_TEACHER_SINK
           : teacher == CG_TEACHER_IS_COMPRESSED ? CG_TEACHER_COMPRESSED
                                                 : CG_TEACHER_NONE;
}

/* Every reduction divides the one row by 1. */
static bool ops_know(const cg_row *row) {
    const int *value = row->contract.value;
    return teacher_of(&row->contract) != CG_TEACHER_NONE && value[CG_AXIS_KL] == CG_KL_IS_EXACT &&
           value[CG_AXIS_NORMALISE] == CG_NORMALISE_IS_EXACT && value[CG_AXIS_HEADS] == CG_HEADS_ARE_ALL &&
           (value[CG_AXIS_SCORES] == CG_SCORES_ARE_RELU || row->scores) && row->contract.faults == 0;
}

static bool is_dense(const cg_row *row) { return row->contract.value[CG_AXIS_SUPPORT] == CG_SUPPORT_IS_DENSE; }

static bool has_loss(const cg_row *row) { return row->scores || row->q_index; }

static cg_value *leaf(engine *e, const char *name, cg_shape shape, bool trained) {
    return cg_leaf(e->graph, trained ? CG_LEAF_PARAMETER : CG_LEAF_INPUT, name, e->row->dtype, shape);
}

static cg_value *indices(engine *e, const char *name, int64_t n) {
    return cg_leaf(e->graph, CG_LEAF_INPUT, name, CG_I32, CG_SHAPE(e->T, n));
}

static void build_indexer(engine *e) {
    const cg_row *row = e->row;
    if (!row->q_index) return;
    e->q_index = leaf(e, "q_index", CG_SHAPE(e->T, row->Hi, row->Di), true);
    e->w = leaf(e, "w", CG_SHAPE(e->T, row->Hi), true);
    e->k_index = leaf(e, "k_index", CG_SHAPE(row->C, row->Di), true);
}

static void build_index(engine *e) {
    const cg_row *row = e->row;
    if (row->index)
        e->index = indices(e, "index", row->K);
    else if (row->q_index)
        e->index = cg_indexer_topk(e->graph, e->q_index, e->w, e->k_index, e->rows, row->K);
    else
        e->index = cg_topk(e->graph, leaf(e, "scores of all", CG_SHAPE(e->T, row->C), false), e->rows, row->K);
    cg_keep(e->index);
}

static void build_attention(engine *e) {
    const cg_row *row = e->row;
    if (!row->q) return;
    e->q = leaf(e, "q", CG_SHAPE(e->T, row->H, row->D), true);
    e->window = leaf(e, "window", CG_SHAPE(e->T, row->D), true);
    e->compressed = leaf(e, "compressed", CG_SHAPE(row->C, row->D), true);
    e->sink = leaf(e, "sink", CG_SHAPE(row->H), true);
    bool by_ops = has_loss(row) && ops_know(row) && !is_dense(row);
    e->attention = cg_csa_attention(e->graph, e->q, e->window, e->compressed, e->sink, e->index, e->rows,
                                    row->W, row->scale, by_ops ? teacher_of(&row->contract) : CG_TEACHER_NONE);
    cg_keep(e->attention.out), cg_keep(e->attention.lse), cg_keep(e->attention.window_lse);
}

static cg_value *build_target(engine *e, cg_value *support, int64_t n) {
    const cg_row *row = e->row;
    cg_teacher teacher = teacher_of(&row->contract);
    if (row->target) return e->given_target = leaf(e, "target", CG_SHAPE(e->T, n), false);
    if (!is_dense(row)) return e->attention.teacher;
    return cg_csa_teacher_at(e->graph, e->q, e->compressed, support,
                             teacher == CG_TEACHER_FULL ? e->attention.window_lse : NULL,
                             teacher == CG_TEACHER_SINK ? e->sink : NULL, row->scale, teacher);
}

static void build_loss(engine *e) {
    const cg_row *row = e->row;
    if (!has_loss(row) || !ops_know(row)) return;
    int64_t n = is_dense(row) ? row->C : row->K;
    cg_value *support = is_dense(row) ? e->all = indices(e, "all", n) : e->index;
    e->scores = row->scores ? e->given_scores = leaf(e, "scores", CG_SHAPE(e->T, n), true)
                            : cg_indexer_scores_at(e->graph, e->q_index, e->w, e->k_index, support);
    e->target = cg_keep(build_target(e, support, n));
    e->predict = cg_keep(cg_softmax(e->graph, e->scores, support, false));
    e->loss = cg_keep(cg_indexer_kl(e->graph, e->scores, e->target, e->rows, CG_REDUCE_SUM, row->coeff));
    e->kl = cg_keep(cg_output(e->loss, 1));
    cg_keep(e->scores);
}

static void build_backward(engine *e) {
    cg_value *outputs[2], *seeds[2], *wrt[8], *grads[8];
    int n_outputs = 0, n_wrt = 0, place[8];
    if (e->row->dout) {
        outputs[n_outputs] = e->attention.out;
        seeds[n_outputs++] = e->dout = leaf(e, "dout", CG_SHAPE(e->T, e->row->H, e->row->D), false);
    }
    if (e->loss) {
        outputs[n_outputs] = e->loss;
        seeds[n_outputs++] = e->one = leaf(e, "one", CG_SHAPE(1), false);
    }
    cg_value *const all[8] = {e->q, e->window, e->compressed, e->sink, e->scores, e->q_index, e->w, e->k_index};
    for (int i = 0; i < 8; i++)
        if (all[i] && (i < D_SCORES ? e->dout : e->loss)) {
            place[n_wrt] = i;
            wrt[n_wrt++] = all[i];
        }
    if (n_outputs == 0 || !cg_autodiff(e->graph, outputs, seeds, n_outputs, wrt, n_wrt, grads)) return;
    for (int k = 0; k < n_wrt; k++) e->grads[place[k]] = cg_keep(grads[k]);
}

/* Write n numbers into the last rows of a leaf. */
static void put(const engine *e, const cg_value *value, const double *x, int64_t n) {
    if (!value || !x) return;
    cg_exec_write_real(e->exec, value, cg_shape_count(&value->shape) - n, n, x);
}

static void put_indices(const engine *e, const cg_value *value, const int32_t *x, int64_t n) {
    if (!value || value->producer) return;
    for (int64_t i = 0; i < e->T * n; i++) {
        int64_t k = i - (e->T - 1) * n;
        cg_exec_write_part(e->exec, value, i, 1, &(int32_t){k < 0 ? -1 : x ? x[k] : (int32_t)k});
    }
}

/* What stands at each place of the support: of x [C], or `absent` at -1. */
static void put_at(const engine *e, const cg_value *value, const double *x, const int32_t *support, int64_t n,
                   double absent) {
    if (!value || !x) return;
    for (int64_t k = 0; k < n; k++) {
        int64_t j = support ? support[k] : k;
        cg_exec_set(e->exec, value, (e->T - 1) * n + k, j < 0 ? absent : x[j]);
    }
}

static void fill(const engine *e) {
    const cg_row *row = e->row;
    for (int64_t t = 0; t < e->T; t++) {
        bool ours = t == e->T - 1;
        const int32_t fact[CG_ROW_FIELDS] = {0, (int32_t)t, 0, ours ? (int32_t)row->C : 0, ours};
        cg_exec_write_part(e->exec, e->rows, t * CG_ROW_FIELDS, CG_ROW_FIELDS, fact);
    }
    put(e, e->q, row->q, row->H * row->D);
    put(e, e->window, row->window, row->W * row->D);
    put(e, e->compressed, row->compressed, row->C * row->D);
    put(e, e->sink, row->sink, row->H);
    put(e, e->dout, row->dout, row->H * row->D);
    put(e, e->q_index, row->q_index, row->Hi * row->Di);
    put(e, e->w, row->w, row->Hi);
    put(e, e->k_index, row->k_index, row->C * row->Di);
    put(e, e->one, &(double){1}, 1);
    put(e, cg_leaf_find(e->graph, "scores of all"), row->scores, row->C);
    put_indices(e, e->index, row->index, row->K);
    put_indices(e, e->all, NULL, row->C);
}

static const int32_t *read_choice(engine *e, cg_error *error) {
    const int64_t K = e->row->K;
    if (!e->chosen && !(e->chosen = calloc((size_t)K + 1, sizeof *e->chosen))) {
        cg_fail(error, CG_FAILED, "out of memory while a row is computed");
        return NULL;
    }
    cg_exec_read_part(e->exec, e->index, (e->T - 1) * K, K, e->chosen);
    return e->chosen;
}

/* The choice is made when the run begins, so scores and targets at chosen places are written behind a first run. */
static bool run(engine *e, cg_error *error) {
    const cg_row *row = e->row;
    if (!cg_graph_error(e->graph) && e->graph->n_nodes == 0) return true; /* a given target alone */
    e->plan = cg_plan_make(e->graph, &(cg_plan_options){.backend = e->backend}, error);
    e->exec = e->plan ? cg_exec_new(e->plan, NULL, error) : NULL;
    if (!e->exec) return false;
    fill(e);
    int64_t n = is_dense(row) ? row->C : row->K;
    const int32_t *support = is_dense(row) ? NULL : row->index;
    bool late = !row->index && !is_dense(row) && (e->given_scores || e->given_target);
    if (late) {
        if (!cg_exec_run(e->exec, CG_ALL_PASSES, error)) return false;
        if (!(support = read_choice(e, error))) return false;
    }
    put_at(e, e->given_scores, row->scores, support, n, -INFINITY);
    put_at(e, e->given_target, row->target, support, n, 0);
    return cg_exec_run(e->exec, CG_ALL_PASSES, error);
}

/* ---- from the engine to results ---- */

/* The last rows * columns numbers of a value. */
static void fetch(const engine *e, cg_row_result *result, const char *name, const char *doc, int64_t rows,
                  int64_t columns, const cg_value *value) {
    if (!value) return;
    double *x = add_array(result, name, doc, rows, columns);
    if (rows == VECTOR) rows = 1;
    int64_t n = rows * columns;
    if (x) cg_exec_read_real(e->exec, value, cg_shape_count(&value->shape) - n, n, x);
}

static double dot(const double *a, const double *b, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

/* Logits in f64 and what the engine's lse makes of them. */
static void add_weights(const cg_row *row, const int32_t *index, const double *lse, cg_row_result *result) {
    double *window_logits =
        add_array(result, "window_logits", "scale * q.k of the window rows", row->H, row->W);
    double *logits =
        add_array(result, "logits", "scale * q.k by place of the list; -Infinity: none", row->H, row->K);
    double *window_weights =
        add_array(result, "window_weights", "softmax over window, list and sink", row->H, row->W);
    double *weights =
        add_array(result, "weights", "share in that softmax, by place of the list", row->H, row->K);
    double *sink = add_array(result, "sink_weight", "share of the sink", VECTOR, row->H);
    if (!window_logits || !logits || !window_weights || !weights || !sink) return;
    for (int64_t h = 0; h < row->H; h++) {
        const double *q = row->q + h * row->D;
        for (int64_t i = 0; i < row->W; i++) {
            double x = window_logits[h * row->W + i] = row->scale * dot(q, row->window + i * row->D, row->D);
            window_weights[h * row->W + i] = exp(x - lse[h]);
        }
        for (int64_t k = 0; k < row->K; k++) {
            double x = -INFINITY;
            if (index[k] >= 0) x = row->scale * dot(q, row->compressed + index[k] * row->D, row->D);
            logits[h * row->K + k] = x;
            weights[h * row->K + k] = index[k] >= 0 ? exp(x - lse[h]) : 0;
        }
        sink[h] = row->sink[h] == -INFINITY
                      ? 0
                      : exp((row->dtype == CG_F32 ? (float)row->sink[h] : row->sink[h]) - lse[h]);
    }
}

static bool collect(const engine *e, const int32_t *index, cg_row_result *result) {
    const cg_row *row = e->row;
    double *list = add_array(result, "index", "compressed rows of the list", VECTOR, row->K);
    if (list) result->arrays[result->n - 1].integer = true;
    for (int64_t k = 0; list && k < row->K; k++) list[k] = index[k];
    if (row->q) {
        fetch(e, result, "lse", "log of the softmax's sum: window, list and sink", VECTOR, row->H,
              e->attention.lse);
        const cg_row_array *lse = cg_row_find(result, "lse");
        if (lse) add_weights(row, index, lse->x, result);
        fetch(e, result, "window_lse", "log of the sum of window and sink alone", VECTOR, row->H,
              e->attention.window_lse);
        if (!row->from_logits)
            fetch(e, result, "out", "output of the attention", row->H, row->D, e->attention.out);
        fetch(e, result, "dq", "gradient of out . dout", row->H, row->D, e->grads[D_Q]);
        fetch(e, result, "dwindow", "gradient, as above", row->W, row->D, e->grads[D_WINDOW]);
        fetch(e, result, "dcompressed", "gradient, as above", row->C, row->D, e->grads[D_COMPRESSED]);
        fetch(e, result, "dsink", "gradient, as above", VECTOR, row->H, e->grads[D_SINK]);
    }
    if (!has_loss(row)) return true;
    int64_t n = is_dense(row) ? row->C : row->K;
    double *support = add_array(result, "support", "compressed rows that the loss compares", VECTOR, n);
    if (support) result->arrays[result->n - 1].integer = true;
    for (int64_t k = 0; support && k < n; k++) support[k] = is_dense(row) ? (double)k : index[k];
    if (!e->loss) return false;
    result->by_ops = true;
    fetch(e, result, "scores", "index scores of the support", VECTOR, n, e->scores);
    fetch(e, result, "target", "the teacher's distribution", VECTOR, n, e->target);
    fetch(e, result, "predict", "softmax of the scores", VECTOR, n, e->predict);
    fetch(e, result, "kl", "KL of target against predict, nats", VECTOR, 1, e->kl);
    fetch(e, result, "loss", "coeff * kl", VECTOR, 1, e->loss);
    fetch(e, result, "dscores", "gradient of the loss", VECTOR, n, e->grads[D_SCORES]);
    fetch(e, result, "dq_index", "gradient, as above", row->Hi, row->Di, e->grads[D_Q_INDEX]);
    fetch(e, result, "dw", "gradient, as above", VECTOR, row->Hi, e->grads[D_W]);
    fetch(e, result, "dk_index", "gradient, as above", row->C, row->Di, e->grads[D_K_INDEX]);
    return true;
}

/* ---- other contracts ---- */

/* The keys of a contract: the places of the list that hold a row, then the other rows. Dense, each row once. */
typedef struct keys {
    int64_t n;
    int32_t *row, *place; /* compressed row; place in the support, -1: outside */
    unsigned char *selected;
} keys;

static void list_keys(const cg_row *row, const int32_t *index, keys *k) {
    for (int64_t j = 0; j < row->C; j++) k->selected[j] = 0;
    if (is_dense(row)) {
        for (int64_t i = 0; i < row->K; i++)
            if (index[i] >= 0) k->selected[index[i]] = 1;
        for (int32_t j = 0; j < row->C; j++) k->row[k->n] = j, k->place[k->n++] = j;
        return;
    }
    for (int32_t i = 0; i < row->K; i++)
        if (index[i] >= 0) k->row[k->n] = index[i], k->place[k->n] = i, k->selected[k->n++] = 1;
}

typedef struct scratch {
    keys keys;
    double *logits, *window_lse, *scores, *linear, *given, *dots, *heads;
    double *target, *log_predict, *dscores; /* by key */
} scratch;

static double window_lse(const cg_row *row, int64_t h) {
    double most = -INFINITY, sum = 0;
    for (int64_t i = 0; i < row->W; i++)
        most = fmax(most, row->scale * dot(row->q + h * row->D, row->window + i * row->D, row->D));
    if (!(most > -INFINITY)) return -INFINITY;
    for (int64_t i = 0; i < row->W; i++)
        sum += exp(row->scale * dot(row->q + h * row->D, row->window + i * row->D, row->D) - most);
    return most + log(sum);
}

static void prepare(const cg_row *row, const int32_t *index, scratch *s) {
    list_keys(row, index, &s->keys);
    const int64_t n = s->keys.n;
    for (int64_t i = 0; i < n; i++) {
        const int64_t j = s->keys.row[i];
        for (int64_t h = 0; h < row->H && row->q; h++)
            s->logits[h * n + i] = row->scale * dot(row->q + h * row->D, row->compressed + j * row->D, row->D);
        s->scores[i] = row->scores ? row->scores[j] : 0;
        s->linear[i] = s->scores[i];
        for (int64_t h = 0; h < row->Hi; h++) {
            double x = s->dots[h * n + i] =
                dot(row->q_index + h * row->Di, row->k_index + j * row->Di, row->Di);
            s->linear[i] += row->w[h] * x;
            if (x > 0) s->scores[i] += row->w[h] * x;
        }
        if (row->target) s->given[i] = row->target[j];
    }
    for (int64_t h = 0; h < row->H && row->q; h++) s->window_lse[h] = window_lse(row, h);
}

static void by_contract(const cg_row *row, scratch *s, cg_row_result *result) {
    const cg_contract *contract = &row->contract;
    const int64_t n_keys = s->keys.n, n = is_dense(row) ? row->C : row->K;
    const cg_contract_row one = {.n_heads = row->q ? row->H : 0,
                                 .n_keys = n_keys,
                                 .logits = s->logits,
                                 .window_lse = row->W ? s->window_lse : NULL,
                                 .sink = row->sink,
                                 .scores = s->scores,
                                 .linear_scores = s->linear,
                                 .selected = s->keys.selected,
                                 .given_target = row->target ? s->given : NULL};
    double kl;
    cg_contract_row_eval(contract, &one, s->target, s->log_predict, s->dscores, &kl, s->heads);
    const cg_contract_counts counts = {.physical = 1, .real = 1, .visible = row->C > 0, .segments = 1};
    const double value = cg_contract_value_factor(contract, &counts, row->coeff, 1),
                 slope = cg_contract_grad_factor(contract, &counts, row->coeff, 1);
    double *scores = add_array(result, "scores", "index scores of the support", VECTOR, n);
    double *target = add_array(result, "target", "the teacher's distribution", VECTOR, n);
    double *predict = add_array(result, "predict", "softmax of the scores", VECTOR, n);
    copy_array(result, "kl", "KL under the contract, nats", VECTOR, 1, &kl);
    copy_array(result, "loss", "kl times the contract's factor", VECTOR, 1, (double[]){kl * value});
    double *dscores = add_array(result, "dscores", "gradient of the loss", VECTOR, n);
    if (!scores || !target || !predict || !dscores) return;
    const bool linear = contract->value[CG_AXIS_SCORES] == CG_SCORES_ARE_LINEAR;
    for (int64_t k = 0; k < n; k++) scores[k] = -INFINITY;
    for (int64_t i = 0; i < n_keys; i++) {
        const int64_t k = s->keys.place[i];
        s->dscores[i] *= slope;
        scores[k] = linear ? s->linear[i] : s->scores[i];
        target[k] = s->target[i];
        predict[k] = exp(s->log_predict[i]);
        dscores[k] = s->dscores[i];
    }
    if (!row->q_index) return;
    double *dq = add_array(result, "dq_index", "gradient, as above", row->Hi, row->Di);
    double *dw = add_array(result, "dw", "gradient, as above", VECTOR, row->Hi);
    double *dk = add_array(result, "dk_index", "gradient, as above", row->C, row->Di);
    if (!dq || !dw || !dk) return;
    const cg_contract_index indexer = {.n_heads = row->Hi,
                                       .head_dim = row->Di,
                                       .n_keys = n_keys,
                                       .q = row->q_index,
                                       .w = row->w,
                                       .dots = s->dots,
                                       .k = row->k_index,
                                       .keys = s->keys.row};
    cg_contract_index_grad(contract, &indexer, s->dscores, dw, dq, dk);
}

static bool evaluate(const cg_row *row, const int32_t *index, cg_row_result *result, cg_error *error) {
    const size_t n = (size_t)((row->K > row->C ? row->K : row->C) + 1), H = (size_t)row->H + 1;
    scratch s = {.keys = {.row = calloc(n, sizeof(int32_t)),
                          .place = calloc(n, sizeof(int32_t)),
                          .selected = calloc(n, 1)}};
    double *all = calloc(n * (H + (size_t)row->Hi + 7) + 2 * H, sizeof *all), *next = all;
    bool ok = all && s.keys.row && s.keys.place && s.keys.selected;
    if (ok) {
        double **const arrays[] = {&s.scores, &s.linear, &s.given, &s.target, &s.log_predict, &s.dscores};
        for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++, next += n) *arrays[i] = next;
        s.logits = next, next += n * H;
        s.dots = next, next += n * (size_t)row->Hi;
        s.window_lse = next, next += H;
        s.heads = next;
        prepare(row, index, &s);
        by_contract(row, &s, result);
    }
    free(all);
    free(s.keys.row);
    free(s.keys.place);
    free(s.keys.selected);
    return ok || cg_fail(error, CG_FAILED, "out of memory while a contract is evaluated");
}

static bool compute(engine *e, cg_row_result *result, cg_error *error) {
    e->graph = cg_graph_new(&cg_all_ops);
    if (!e->graph) return cg_fail(error, CG_FAILED, "out of memory while a row is computed");
    e->rows = cg_leaf(e->graph, CG_LEAF_INPUT, "rows", CG_I32, CG_SHAPE(e->T, CG_ROW_FIELDS));
    build_indexer(e);
    build_index(e);
    build_attention(e);
    build_loss(e);
    build_backward(e);
    if (!run(e, error)) return false;
    const int32_t *index = e->row->index;
    if (!index && !(index = read_choice(e, error))) return false;
    if (collect(e, index, result) || !has_loss(e->row)) return true;
    return evaluate(e->row, index, result, error);
}

cg_row_result *cg_row_run(const cg_row *row, const cg_backend *backend, cg_error *error) {
    engine e = {.row = row, .backend = backend, .T = row->W > 1 ? row->W : 1};
    cg_row_result *result = calloc(1, sizeof *result);
    bool ok = result && compute(&e, result, error);
    if (!result || result->lacks_one) ok = cg_fail(error, CG_FAILED, "out of memory while a row is computed");
    cg_exec_free(e.exec);
    cg_plan_free(e.plan);
    cg_graph_free(e.graph);
    free(e.chosen);
    if (ok) return result;
    cg_row_result_free(result);
    return NULL;
}
