#include "models/check/dump_write.h"

#include "core/files/safetensors.h"
#include "graph/exec.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *const cg_dump_layout_names[CG_LAYOUTS + 1] = {"sbhd", "bshd", "thd", NULL};

static int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

/* ---- rows ---- */

/* Where a row stands. `sees` counts the keys of its position, also for padding, which real kernels do not show any.
 */
typedef struct row_facts {
    int64_t segment, start, position, first_key, sees;
    bool real;
} row_facts;

static row_facts *list_rows(const cg_dump_case *c) {
    row_facts *rows = calloc((size_t)c->n_rows + 1, sizeof *rows);
    for (int64_t t = 0; rows && t < c->n_rows; t++) rows[t].segment = -1;
    for (int64_t b = 0; rows && b < c->n_segments; b++)
        for (int64_t t = c->cu_seqlens[b]; t < c->cu_seqlens[b + 1]; t++) {
            int64_t position = t - c->cu_seqlens[b], n = c->cu_compressed[b + 1] - c->cu_compressed[b];
            rows[t] = (row_facts){.segment = b,
                                  .start = c->cu_seqlens[b],
                                  .position = position,
                                  .first_key = c->cu_compressed[b],
                                  .sees = min64((position + 1) / c->ratio, n),
                                  .real = position < c->seqlens[b]};
        }
    return rows;
}

static int64_t longest_compressed(const cg_dump_case *c) {
    int64_t longest = 0;
    for (int64_t b = 0; b < c->n_segments; b++)
        longest = max64(longest, c->cu_compressed[b + 1] - c->cu_compressed[b]);
    return longest;
}

static double dot(const double *a, const double *b, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

/* ---- results ---- */

static double *numbers(int64_t n, bool *ok) {
    double *x = calloc((size_t)n + 1, sizeof *x);
    *ok &= x != NULL;
    return x;
}

static bool allocate(const cg_dump_case *c, cg_dump_results *r, cg_error *error) {
    int64_t T = c->n_rows, C = c->n_compressed, H = c->n_heads, D = c->head_dim, G = c->index_heads,
            E = c->index_dim;
    r->n_keys = longest_compressed(c);
    r->width = min64(c->topk, r->n_keys);
    bool ok = true;
    r->lse = numbers(T * H, &ok);
    r->window_lse = numbers(T * H, &ok);
    r->output = numbers(T * H * D, &ok);
    r->grad_query = numbers(T * H * D, &ok);
    r->grad_kv = numbers(T * D, &ok);
    r->grad_ckv = numbers(C * D, &ok);
    r->grad_sink = numbers(H, &ok);
    r->target = numbers(T * r->n_keys, &ok);
    r->log_predict = numbers(T * r->n_keys, &ok);
    r->kl = numbers(T, &ok);
    r->grad_q_indexer = numbers(T * G * E, &ok);
    r->grad_weights = numbers(T * G, &ok);
    r->grad_k_indexer = numbers(C * E, &ok);
    r->topk = malloc((size_t)(T * r->width + 1) * sizeof *r->topk);
    if (ok && r->topk) return true;
    return cg_fail(error, CG_FAILED, "out of memory for a dump of %lld rows and %lld compressed rows",
                   (long long)T, (long long)C);
}

void cg_dump_results_free(cg_dump_results *r) {
    double *const all[] = {r->lse,           r->window_lse, r->output,         r->grad_query,
                           r->grad_kv,       r->grad_ckv,   r->grad_sink,      r->target,
                           r->log_predict,   r->kl,         r->grad_q_indexer, r->grad_weights,
                           r->grad_k_indexer};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    free(r->topk);
    memset(r, 0, sizeof *r);
}

/* ---- the engine's part ---- */

typedef struct engine {
    cg_graph *graph;
    cg_plan *plan;
    cg_exec *exec;
    const cg_backend *backend;
    int n_leaves;
    struct {
        cg_value *leaf;
        const void *data;
    } leaves[24];
} engine;

static cg_value *leaf(engine *e, cg_leaf_kind kind, const char *name, cg_dtype dtype, cg_shape shape,
                      const void *data) {
    cg_value *value = cg_leaf(e->graph, kind, name, dtype, shape);
    e->leaves[e->n_leaves].leaf = value;
    e->leaves[e->n_leaves++].data = data;
    return value;
}

static bool run(engine *e, cg_error *error) {
    if (!(e->plan = cg_plan_make(e->graph, &(cg_plan_options){.backend = e->backend}, error)) ||
        !(e->exec = cg_exec_new(e->plan, NULL, error)))
        return false;
    for (int i = 0; i < e->n_leaves; i++) {
        const cg_value *value = e->leaves[i].leaf;
        cg_exec_write(e->exec, value, e->leaves[i].data);
    }
    return cg_exec_run(e->exec, CG_ALL_PASSES, error);
}

static void get(const engine *e, const cg_value *value, void *to) { cg_exec_read(e->exec, value, to); }

static void release(engine *e) {
    cg_exec_free(e->exec);
    cg_plan_free(e->plan);
    cg_graph_free(e->graph);
}

/* What is read back. Order of grads: query, kv, ckv, sink, then the indexer's q, weights, k. */
enum { N_ATTENTION = 4, N_WRT = 7 };
typedef struct engine_values {
    cg_value *topk, *target, *log_predict, *kl, *loss, *out, *lse, *window_lse, *grads[N_WRT];
} engine_values;

/* Attention over the selection that the indexer's ops make, or over a given list; with_loss: the default
 * contract's loss too. */
static engine_values build(engine *e, const cg_dump_case *c, const int32_t *given, int64_t width,
                           bool with_loss) {
    static const double one = 1;
    int64_t T = c->n_rows, C = c->n_compressed, H = c->n_heads, D = c->head_dim, G = c->index_heads,
            E = c->index_dim, B = c->n_segments;
    cg_graph *g = e->graph;
    const cg_leaf_kind in = CG_LEAF_INPUT, wanted = CG_LEAF_PARAMETER;
    cg_value *query = leaf(e, wanted, "query", CG_F64, CG_SHAPE(T, H, D), c->query);
    cg_value *kv = leaf(e, wanted, "kv", CG_F64, CG_SHAPE(T, D), c->kv);
    cg_value *ckv = leaf(e, wanted, "ckv", CG_F64, CG_SHAPE(C, D), c->ckv);
    cg_value *sink = leaf(e, wanted, "sink", CG_F64, CG_SHAPE(H), c->sink);
    cg_value *q = leaf(e, wanted, "q_indexer", CG_F64, CG_SHAPE(T, G, E), c->q_indexer);
    cg_value *w = leaf(e, wanted, "weights", CG_F64, CG_SHAPE(T, G), c->weights);
    cg_value *k = leaf(e, wanted, "k_indexer", CG_F64, CG_SHAPE(C, E), c->k_indexer);
    cg_value *seeds[2] = {leaf(e, in, "dout", CG_F64, CG_SHAPE(T, H, D), c->dout),
                          leaf(e, in, "seed", CG_F64, CG_SHAPE(1), &one)};
    cg_value *cu_seqlens = leaf(e, in, "cu_seqlens", CG_I32, CG_SHAPE(B + 1), c->cu_seqlens);
    cg_value *seqlens = leaf(e, in, "seqlens", CG_I32, CG_SHAPE(B), c->seqlens);
    cg_value *rows = cg_segment_rows(g, cu_seqlens, seqlens, T, c->ratio, C).rows;
    engine_values v = {0};
    v.topk = given ? leaf(e, in, "topk", CG_I32, CG_SHAPE(T, width), given)
                   : cg_keep(cg_indexer_topk(g, q, w, k, rows, width));
    cg_attention a = cg_csa_attention(g, query, kv, ckv, sink, v.topk, rows, c->window, c->softmax_scale,
                                      with_loss ? CG_TEACHER_FULL : CG_TEACHER_NONE);
    v.out = cg_keep(a.out);
    v.lse = cg_keep(a.lse);
    v.window_lse = cg_keep(a.window_lse);
    cg_value *outputs[2] = {a.out, NULL}, *wrt[N_WRT] = {query, kv, ckv, sink, q, w, k};
    if (with_loss) {
        cg_value *scores = cg_indexer_scores_at(g, q, w, k, v.topk);
        v.target = cg_keep(a.teacher);
        v.log_predict = cg_keep(cg_softmax(g, scores, v.topk, true));
        v.loss = outputs[1] =
            cg_keep(cg_indexer_kl(g, scores, a.teacher, rows, CG_REDUCE_MEAN_REAL, c->loss_coeff));
        v.kl = cg_keep(cg_output(v.loss, 1));
    }
    int n_wrt = with_loss ? N_WRT : N_ATTENTION;
    if (cg_autodiff(g, outputs, seeds, with_loss ? 2 : 1, wrt, n_wrt, v.grads))
        for (int i = 0; i < n_wrt; i++) cg_keep(v.grads[i]);
    return v;
}

/* Spread a row's list [T,K] over the columns [T,N] of its segment. */
static void spread(const cg_dump_case *c, const cg_dump_results *r, const row_facts *rows, const double *list,
                   double *columns) {
    for (int64_t t = 0; t < c->n_rows; t++)
        for (int64_t i = 0; i < r->width; i++) {
            int64_t at = t * r->width + i;
            if (r->topk[at] >= 0) columns[t * r->n_keys + r->topk[at] - rows[t].first_key] = list[at];
        }
}

static bool engine_part(const cg_dump_case *c, const row_facts *rows, const int32_t *given, bool with_loss,
                        const cg_backend *backend, cg_dump_results *r, cg_error *error) {
    engine e = {.backend = backend, .graph = cg_graph_new(&cg_all_ops)};
    if (!e.graph) return cg_fail(error, CG_FAILED, "out of memory while a dump is computed");
    engine_values v = build(&e, c, given, r->width, with_loss);
    bool ok = run(&e, error);
    if (ok) {
        if (!given) get(&e, v.topk, r->topk);
        get(&e, v.out, r->output);
        get(&e, v.lse, r->lse);
        get(&e, v.window_lse, r->window_lse);
        double *const to[N_WRT] = {r->grad_query,     r->grad_kv,      r->grad_ckv,      r->grad_sink,
                                   r->grad_q_indexer, r->grad_weights, r->grad_k_indexer};
        for (int i = 0; i < (with_loss ? N_WRT : N_ATTENTION); i++) get(&e, v.grads[i], to[i]);
    }
    if (ok && with_loss) {
        double *list = malloc(sizeof *list * (size_t)(c->n_rows * r->width + 1));
        ok = list || cg_fail(error, CG_FAILED, "out of memory while a dump is computed");
        if (ok) get(&e, v.target, list), spread(c, r, rows, list, r->target);
        if (ok) get(&e, v.log_predict, list), spread(c, r, rows, list, r->log_predict);
        free(list);
        get(&e, v.kl, r->kl);
        get(&e, v.loss, &r->loss);
    }
    release(&e);
    return ok;
}

/* ---- row by row ---- */

/* Scratch of one row. */
typedef struct row_buffers {
    double *logits, *dots, *window; /* [H,N], [Hi,N], [H] */
    double *relu, *linear, *dscores, *scratch, *unused;
    unsigned char *selected;
    void *block;
} row_buffers;

static bool reserve(const cg_dump_case *c, int64_t N, row_buffers *b) {
    size_t H = (size_t)c->n_heads, G = (size_t)c->index_heads, n = (size_t)N;
    double *x = b->block = calloc(H * n + G * n + 2 * H + 6 * n + 1, sizeof *x);
    if (!x) return false;
    b->logits = x;
    b->dots = b->logits + H * n;
    b->window = b->dots + G * n;
    b->scratch = b->window + H;
    b->relu = b->scratch + H;
    b->linear = b->relu + n;
    b->dscores = b->linear + n;
    b->unused = b->dscores + n;
    b->selected = (unsigned char *)(b->unused + 2 * n);
    return true;
}

/* Index scores of the keys of a row's position, with and without ReLU. */
static void score_row(const cg_dump_case *c, const row_facts *row, int64_t t, row_buffers *b) {
    int64_t G = c->index_heads, E = c->index_dim, N = row->sees;
    const double *q = c->q_indexer + t * G * E, *w = c->weights + t * G;
    for (int64_t j = 0; j < N; j++) b->relu[j] = b->linear[j] = 0;
    for (int64_t g = 0; g < G; g++)
        for (int64_t j = 0; j < N; j++) {
            double x = dot(q + g * E, c->k_indexer + (row->first_key + j) * E, E);
            b->dots[g * N + j] = x;
            b->linear[j] += w[g] * x;
            b->relu[j] += w[g] * (x > 0 ? x : 0);
        }
}

/* The `width` largest of N scores, falling, ties to the lower index. */
static void choose(const double *scores, int64_t N, int64_t first, int64_t width, int32_t *list) {
    int64_t n = 0;
    for (int64_t j = 0; j < N && width > 0; j++) {
        int64_t at = n;
        while (at > 0 && scores[list[at - 1] - first] < scores[j]) at--;
        if (at == width) continue;
        n = min64(n + 1, width);
        memmove(list + at + 1, list + at, (size_t)(n - 1 - at) * sizeof *list);
        list[at] = (int32_t)(first + j);
    }
    for (; n < width; n++) list[n] = -1;
}

/* Does a row add to the loss of this contract? */
static bool counts_row(const cg_contract *contract, const row_facts *row) {
    return row->real || (row->segment >= 0 && (contract->faults & CG_FAULT_PADDING_IN_LOSS));
}

/* The lists that the contract's scores give. */
static bool choose_all(const cg_dump_case *c, const cg_contract *contract, const row_facts *rows,
                       cg_dump_results *r) {
    bool ok = true;
#pragma omp parallel reduction(&& : ok)
    {
        row_buffers b = {0};
        ok = reserve(c, r->n_keys, &b);
#pragma omp for schedule(dynamic, 16)
        for (int64_t t = 0; t < c->n_rows; t++) {
            if (!ok) continue;
            bool counts = counts_row(contract, &rows[t]);
            if (counts) score_row(c, &rows[t], t, &b);
            const double *scores = contract->value[CG_AXIS_SCORES] == CG_SCORES_ARE_LINEAR ? b.linear : b.relu;
            choose(scores, counts ? rows[t].sees : 0, rows[t].first_key, r->width, r->topk + t * r->width);
        }
        free(b.block);
    }
    return ok;
}

static cg_contract_counts count_rows(const cg_dump_case *c, const row_facts *rows) {
    cg_contract_counts counts = {.physical = c->n_rows};
    for (int64_t t = 0; t < c->n_rows; t++) {
        counts.real += rows[t].real;
        counts.visible += rows[t].real && rows[t].sees > 0;
    }
    for (int64_t s = 0; s < c->n_segments; s++) counts.segments += c->seqlens[s] > 0;
    return counts;
}

/* Logits of the keys, and what the window adds to each head's denominator, without the sink. */
static void attend_row(const cg_dump_case *c, const row_facts *row, int64_t t, row_buffers *b) {
    int64_t H = c->n_heads, D = c->head_dim, N = row->sees, first = max64(0, row->position - c->window + 1);
    for (int64_t h = 0; h < H; h++) {
        const double *q = c->query + (t * H + h) * D;
        for (int64_t j = 0; j < N; j++)
            b->logits[h * N + j] = c->softmax_scale * dot(q, c->ckv + (row->first_key + j) * D, D);
        double most = -INFINITY, sum = 0;
        for (int64_t p = first; p <= row->position; p++)
            most = fmax(most, c->softmax_scale * dot(q, c->kv + (row->start + p) * D, D));
        for (int64_t p = first; p <= row->position; p++)
            sum += exp(c->softmax_scale * dot(q, c->kv + (row->start + p) * D, D) - most);
        b->window[h] = most + log(sum);
    }
}

static void evaluate_row(const cg_dump_case *c, const cg_dump_contracts *contracts, const row_facts *row,
                         int64_t t, const cg_contract_counts *counts, row_buffers *b, cg_dump_results *r,
                         double *value, double *dk) {
    int64_t N = row->sees, G = c->index_heads, E = c->index_dim, segment_real = c->seqlens[row->segment];
    score_row(c, row, t, b);
    attend_row(c, row, t, b);
    memset(b->selected, 0, (size_t)N);
    for (int64_t i = 0; i < r->width; i++) {
        int32_t key = r->topk[t * r->width + i];
        if (key >= 0) b->selected[key - row->first_key] = 1;
    }
    cg_contract_row in = {.n_heads = c->n_heads,
                          .n_keys = N,
                          .logits = b->logits,
                          .window_lse = b->window,
                          .sink = c->sink,
                          .scores = b->relu,
                          .linear_scores = b->linear,
                          .selected = b->selected};
    if (counts_row(&contracts->value, row)) {
        cg_contract_row_eval(&contracts->value, &in, r->target + t * r->n_keys, r->log_predict + t * r->n_keys,
                             NULL, &r->kl[t], b->scratch);
        *value = cg_contract_value_factor(&contracts->value, counts, c->loss_coeff, segment_real) * r->kl[t];
    }
    if (!counts_row(&contracts->gradient, row)) return;
    cg_contract_row_eval(&contracts->gradient, &in, b->unused, NULL, b->dscores, NULL, b->scratch);
    double factor = cg_contract_grad_factor(&contracts->gradient, counts, c->loss_coeff, segment_real);
    for (int64_t j = 0; j < N; j++) b->dscores[j] *= factor;
    cg_contract_index index = {.n_heads = G,
                               .head_dim = E,
                               .n_keys = N,
                               .q = c->q_indexer + t * G * E,
                               .w = c->weights + t * G,
                               .dots = b->dots,
                               .k = c->k_indexer + row->first_key * E};
    cg_contract_index_grad(&contracts->gradient, &index, b->dscores, r->grad_weights + t * G,
                           r->grad_q_indexer + t * G * E, dk + row->first_key * E);
}

enum { CHUNKS = 16 }; /* fixed, so that sums over rows have one order on any number of threads */

static bool row_part(const cg_dump_case *c, const cg_dump_contracts *contracts, const row_facts *rows,
                     cg_dump_results *r) {
    int64_t T = c->n_rows, n_dk = c->n_compressed * c->index_dim;
    bool ok = true;
    double *dk = numbers(CHUNKS * n_dk, &ok), *values = numbers(T, &ok);
    cg_contract_counts counts = count_rows(c, rows);
#pragma omp parallel for schedule(dynamic, 1) reduction(&& : ok)
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        row_buffers b = {0};
        ok = ok && reserve(c, r->n_keys, &b);
        for (int64_t t = chunk; ok && t < T; t += CHUNKS) /* striped: late rows see more */
            if (rows[t].segment >= 0)
                evaluate_row(c, contracts, &rows[t], t, &counts, &b, r, &values[t], dk + chunk * n_dk);
        free(b.block);
    }
    for (int64_t t = 0; ok && t < T; t++) r->loss += values[t];
    for (int chunk = 0; ok && chunk < CHUNKS; chunk++)
        for (int64_t i = 0; i < n_dk; i++) r->grad_k_indexer[i] += dk[chunk * n_dk + i];
    free(dk);
    free(values);
    return ok;
}

/* Padding that the contract selects for is outside what attention shows it. */
static int32_t *list_for_attention(const cg_dump_case *c, const cg_dump_results *r, const row_facts *rows) {
    int32_t *list = malloc((size_t)(c->n_rows * r->width + 1) * sizeof *list);
    for (int64_t t = 0; list && t < c->n_rows; t++)
        for (int64_t i = 0; i < r->width; i++)
            list[t * r->width + i] = rows[t].real ? r->topk[t * r->width + i] : -1;
    return list;
}

static bool is_default(const cg_contract *contract) {
    bool same = !contract->faults;
    for (int axis = 0; axis < CG_AXES; axis++) same &= contract->value[axis] == 0;
    return same;
}

bool cg_dump_compute(const cg_dump_case *c, const cg_dump_contracts *contracts, const cg_backend *backend,
                     cg_dump_results *r, cg_error *error) {
    *r = (cg_dump_results){0};
    row_facts *rows = list_rows(c);
    bool by_ops = is_default(&contracts->value) && is_default(&contracts->gradient) && !contracts->by_rows;
    bool ok = rows && allocate(c, r, error);
    if (ok && by_ops) {
        ok = engine_part(c, rows, NULL, true, backend, r, error);
    } else if (ok) {
        ok = choose_all(c, &contracts->value, rows, r) && row_part(c, contracts, rows, r);
        int32_t *list = ok ? list_for_attention(c, r, rows) : NULL;
        ok = list && engine_part(c, rows, list, false, backend, r, error);
        free(list);
    }
    free(rows);
    return ok || cg_fail(error, CG_FAILED, "out of memory while a dump is computed");
}

/* ---- the file ---- */

enum { MAX_TENSORS = 40, MAX_FACTS = 40 };

typedef struct file_builder {
    const cg_dump_case *c;
    const cg_dump_form *form;
    int64_t n_batch, n_steps, n_keys; /* B, S and n of sbhd and bshd */
    cg_named_tensor tensors[MAX_TENSORS];
    int n_tensors;
    const char *facts[MAX_FACTS][2];
    char texts[MAX_FACTS][64];
    int n_facts;
    bool ok;
} file_builder;

bool cg_dump_form_fits(const cg_dump_case *c, const cg_dump_form *form, cg_error *error) {
    if (form->layout == CG_LAYOUT_THD) return true;
    const char *name = cg_dump_layout_names[form->layout];
    int64_t length = c->n_segments ? c->cu_seqlens[1] : 0;
    for (int64_t b = 0; b < c->n_segments; b++) {
        if (c->cu_seqlens[b + 1] - c->cu_seqlens[b] != length)
            return cg_fail(
                error, CG_BAD_INPUT,
                "layout %s needs segments of one length, but segment 0 has %lld rows and segment %lld has "
                "%lld: use thd",
                name, (long long)length, (long long)b, (long long)(c->cu_seqlens[b + 1] - c->cu_seqlens[b]));
        if (c->seqlens[b] != length)
            return cg_fail(error, CG_BAD_INPUT, "layout %s has no lengths, so it holds no padding: use thd",
                           name);
    }
    if (!c->n_segments || c->cu_seqlens[c->n_segments] != c->n_rows)
        return cg_fail(error, CG_BAD_INPUT, "layout %s has no rows behind the last segment: use thd", name);
    return true;
}

static void *add(file_builder *f, const char *name, cg_dtype dtype, cg_shape shape) {
    void *data = malloc((size_t)cg_tensor_bytes(dtype, &shape) + 8);
    f->ok &= data != NULL;
    f->tensors[f->n_tensors].name = name;
    f->tensors[f->n_tensors++].tensor = (cg_tensor){dtype, shape, data};
    return data;
}

/* Rows of `width` numbers, given packed: [T, ...] or [C, ...], `steps` of each sequence. inner: what one row holds. */
static void add_rows(file_builder *f, const char *name, cg_dtype dtype, const double *from, int64_t n_rows,
                     int64_t steps, cg_shape inner) {
    bool packed = f->form->layout == CG_LAYOUT_THD, s_first = f->form->layout == CG_LAYOUT_SBHD;
    int64_t B = f->n_batch, width = cg_shape_count(&inner);
    cg_shape shape = packed ? CG_SHAPE(n_rows) : s_first ? CG_SHAPE(steps, B) : CG_SHAPE(B, steps);
    for (int i = 0; i < inner.n_dims; i++) shape.dims[shape.n_dims++] = inner.dims[i];
    void *data = add(f, name, dtype, shape);
    if (!f->ok) return;
    for (int64_t row = 0; row < n_rows; row++) {
        int64_t to = packed || !s_first ? row : row % steps * B + row / steps;
        for (int64_t i = 0; i < width; i++) cg_dtype_set(dtype, data, to * width + i, from[row * width + i]);
    }
}

/* [B,S,n] or packed columns [T,C], from [T,N]. */
static void add_columns(file_builder *f, const char *name, cg_dtype dtype, const double *from, int64_t N) {
    const cg_dump_case *c = f->c;
    bool packed = f->form->layout == CG_LAYOUT_THD;
    int64_t T = c->n_rows, columns = packed ? c->n_compressed : f->n_keys;
    double zero = 0;
    void *data = add(f, name, dtype, packed ? CG_SHAPE(T, columns) : CG_SHAPE(f->n_batch, f->n_steps, columns));
    if (!f->ok) return;
    for (int64_t i = 0; i < T * columns; i++) cg_dtype_set(dtype, data, i, zero);
    for (int64_t b = 0; b < c->n_segments; b++) {
        int64_t n = c->cu_compressed[b + 1] - c->cu_compressed[b], first = packed ? c->cu_compressed[b] : 0;
        for (int64_t t = c->cu_seqlens[b]; t < c->cu_seqlens[b + 1]; t++)
            for (int64_t j = 0; j < n; j++) cg_dtype_set(dtype, data, t * columns + first + j, from[t * N + j]);
    }
}

/* [B,H,S] or [H,T], from [T,H]. */
static void add_lse(file_builder *f, const char *name, cg_dtype dtype, const double *from) {
    int64_t T = f->c->n_rows, H = f->c->n_heads, S = f->n_steps;
    bool packed = f->form->layout == CG_LAYOUT_THD;
    double unit = f->form->lse_base_2 ? 1 / log(2) : 1;
    void *data = add(f, name, dtype, packed ? CG_SHAPE(H, T) : CG_SHAPE(f->n_batch, H, S));
    if (!f->ok) return;
    for (int64_t t = 0; t < T; t++)
        for (int64_t h = 0; h < H; h++)
            cg_dtype_set(dtype, data, packed ? h * T + t : (t / S * H + h) * S + t % S, unit * from[t * H + h]);
}

static void add_topk(file_builder *f, const cg_dump_results *r) {
    const cg_dump_case *c = f->c;
    bool packed = f->form->layout == CG_LAYOUT_THD;
    int64_t T = c->n_rows, K = r->width;
    int32_t *data = add(f, "out.topk", CG_I32, packed ? CG_SHAPE(T, K) : CG_SHAPE(f->n_batch, f->n_steps, K));
    if (!f->ok) return;
    for (int64_t i = 0; i < T * K; i++) data[i] = r->topk[i];
    for (int64_t b = 0; b < c->n_segments && !f->form->global_lists; b++)
        for (int64_t i = c->cu_seqlens[b] * K; i < c->cu_seqlens[b + 1] * K; i++)
            if (data[i] >= 0) data[i] -= c->cu_compressed[b];
}

static void add_numbers(file_builder *f, const char *name, cg_dtype dtype, const double *from, int64_t n) {
    void *data = add(f, name, dtype, CG_SHAPE(n));
    for (int64_t i = 0; f->ok && i < n; i++) cg_dtype_set(dtype, data, i, from[i]);
}

static void add_lengths(file_builder *f) {
    const cg_dump_case *c = f->c;
    int64_t B = c->n_segments, T = c->n_rows;
    int32_t *physical = add(f, "in.cu_seqlens_q", CG_I32, CG_SHAPE(B + 1));
    int32_t *real = add(f, "in.cu_seqlens_q_real", CG_I32, CG_SHAPE(B + 1));
    int32_t *compressed = add(f, "in.cu_seqlens_compressed", CG_I32, CG_SHAPE(B + 1));
    int32_t *valid = add(f, "out.query_valid_rows", CG_I32, CG_SHAPE(T));
    if (!f->ok) return;
    memcpy(physical, c->cu_seqlens, (size_t)(B + 1) * sizeof *physical);
    memcpy(compressed, c->cu_compressed, (size_t)(B + 1) * sizeof *compressed);
    memset(valid, 0, (size_t)T * sizeof *valid);
    real[0] = 0;
    for (int64_t b = 0; b < B; b++) {
        real[b + 1] = real[b] + c->seqlens[b];
        for (int32_t i = 0; i < c->seqlens[b]; i++) valid[c->cu_seqlens[b] + i] = 1;
    }
}

static void fact(file_builder *f, const char *key, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static void fact(file_builder *f, const char *key, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(f->texts[f->n_facts], sizeof f->texts[0], format, args);
    va_end(args);
    f->facts[f->n_facts][0] = key;
    f->facts[f->n_facts][1] = f->texts[f->n_facts];
    f->n_facts++;
}

static void fact_text(file_builder *f, const char *key, const char *text) {
    f->facts[f->n_facts][0] = key;
    f->facts[f->n_facts++][1] = text;
}

static void add_facts(file_builder *f, const cg_dump_results *r) {
    const cg_dump_case *c = f->c;
    fact_text(f, "source", "csagrad dump");
    fact_text(f, "layout", cg_dump_layout_names[f->form->layout]);
    fact(f, "ratio", "%lld", (long long)c->ratio);
    fact(f, "window", "%lld", (long long)c->window);
    fact(f, "topk", "%lld", (long long)c->topk);
    fact(f, "softmax_scale", "%.17g", c->softmax_scale);
    fact(f, "loss_coeff", "%.17g", c->loss_coeff);
    fact(f, "seed", "%llu", (unsigned long long)f->form->seed);
    if (f->form->layout != CG_LAYOUT_THD) {
        fact(f, "seq_len", "%lld", (long long)f->n_steps);
        fact(f, "batch", "%lld", (long long)f->n_batch);
    }
    if (f->form->anonymous) return;
    fact(f, "loss", "%.17g", r->loss);
    fact_text(f, "lse_base", f->form->lse_base_2 ? "2" : "e");
    fact_text(f, "index", f->form->global_lists ? "global" : "local");
}

/* The contract, whole and in the words of the stored vectors. */
static void add_contract(file_builder *f, const cg_dump_contracts *contracts, char text[2][CG_CONTRACT_TEXT]) {
    if (f->form->anonymous) return;
    const int *value = contracts->value.value;
    cg_contract_text(&contracts->value, text[0], CG_CONTRACT_TEXT);
    cg_contract_text(&contracts->gradient, text[1], CG_CONTRACT_TEXT);
    fact_text(f, "contract", text[0]);
    if (strcmp(text[0], text[1])) fact_text(f, "gradient_contract", text[1]);
    fact_text(f, "teacher", cg_axis_values(CG_AXIS_TEACHER)[value[CG_AXIS_TEACHER]]);
    fact_text(f, "sparse", value[CG_AXIS_SUPPORT] == CG_SUPPORT_IS_SPARSE ? "true" : "false");
    fact_text(f, "reduction",
              value[CG_AXIS_REDUCTION] == CG_REDUCTION_IS_MEAN_REAL
                  ? "mean"
                  : cg_axis_values(CG_AXIS_REDUCTION)[value[CG_AXIS_REDUCTION]]);
}

static void add_tensors(file_builder *f, const cg_dump_results *r) {
    const cg_dump_case *c = f->c;
    int64_t T = c->n_rows, C = c->n_compressed, S = f->n_steps, n = f->n_keys, H = c->n_heads, D = c->head_dim,
            G = c->index_heads, E = c->index_dim;
    cg_dtype x = f->form->dtype, fine = x == CG_BF16 ? CG_F32 : x;
    add_rows(f, "in.q_indexer", x, c->q_indexer, T, S, CG_SHAPE(G, E));
    add_rows(f, "in.weights", x, c->weights, T, S, CG_SHAPE(G));
    add_rows(f, "in.k_indexer", x, c->k_indexer, C, n, CG_SHAPE(E));
    add_rows(f, "in.query", x, c->query, T, S, CG_SHAPE(H, D));
    add_rows(f, "in.kv", x, c->kv, T, S, CG_SHAPE(D));
    add_rows(f, "in.compressed_kv", x, c->ckv, C, n, CG_SHAPE(D));
    add_numbers(f, "in.sink", fine, c->sink, H);
    add_rows(f, "in.dout", x, c->dout, T, S, CG_SHAPE(H, D));
    if (f->form->layout == CG_LAYOUT_THD) add_lengths(f);
    add_topk(f, r);
    add_rows(f, "out.output", x, r->output, T, S, CG_SHAPE(H, D));
    add_lse(f, "out.lse", fine, r->lse);
    add_lse(f, "out.non_compressed_lse", fine, r->window_lse);
    add_columns(f, "out.target", fine, r->target, r->n_keys);
    add_columns(f, "out.log_predict", fine, r->log_predict, r->n_keys);
    add_numbers(f, "out.loss", fine, &r->loss, 1);
    add_rows(f, "grad.q_indexer", x, r->grad_q_indexer, T, S, CG_SHAPE(G, E));
    add_rows(f, "grad.weights", x, r->grad_weights, T, S, CG_SHAPE(G));
    add_rows(f, "grad.k_indexer", x, r->grad_k_indexer, C, n, CG_SHAPE(E));
    add_rows(f, "grad.query", x, r->grad_query, T, S, CG_SHAPE(H, D));
    add_rows(f, "grad.kv", x, r->grad_kv, T, S, CG_SHAPE(D));
    add_rows(f, "grad.compressed_kv", x, r->grad_ckv, C, n, CG_SHAPE(D));
    add_numbers(f, "grad.sink", fine, r->grad_sink, H);
}

bool cg_dump_write(const char *path, const cg_dump_case *c, const cg_dump_contracts *contracts,
                   const cg_dump_results *results, const cg_dump_form *form, cg_error *error) {
    if (!cg_dump_form_fits(c, form, error)) return false;
    file_builder f = {.c = c, .form = form, .ok = true};
    char contract_text[2][CG_CONTRACT_TEXT];
    if (form->layout != CG_LAYOUT_THD) {
        f.n_batch = c->n_segments;
        f.n_steps = c->cu_seqlens[1];
        f.n_keys = c->cu_compressed[1];
    }
    add_tensors(&f, results);
    add_facts(&f, results);
    add_contract(&f, contracts, contract_text);
    bool ok = f.ok ? cg_safetensors_write(path, f.tensors, f.n_tensors, (const char *const(*)[2])f.facts,
                                          f.n_facts, error)
                   : cg_fail(error, CG_FAILED, "out of memory while %s is written", path);
    for (int i = 0; i < f.n_tensors; i++) free(f.tensors[i].tensor.data);
    return ok;
}
