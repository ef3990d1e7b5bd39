/* The attention itself: output, lse and gradients, over the keys of the dump's own lists that a row sees.
 *
 * Where they are not as expected, known mistakes are tried: a missing sink or window, a wrong window, -1
 * taken for a row, lists read from another origin or with keys not seen yet, another softmax scale, and in
 * the backward an lse without the sink or one of a row's two roles. One is named if it alone gives all
 * rows, and if there are rows where it is not what was expected: the others are no evidence. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "models/check/judge_attention.h"

const attended judge_attended[A_QUANTITIES] = {
    {"output", CG_DUMP_OUTPUT},
    {"lse", CG_DUMP_LSE},
    {"non_compressed_lse", CG_DUMP_WINDOW_LSE},
    {"grad.query", CG_DUMP_GRAD_QUERY},
    {"grad.kv", CG_DUMP_GRAD_KV},
    {"grad.compressed_kv", CG_DUMP_GRAD_COMPRESSED_KV},
    {"grad.sink", CG_DUMP_GRAD_SINK},
};

static const double e_f32 = 0x1p-24;

/* What a row gives under a variant. */
typedef struct answer {
    double *lse, *plain;     /* [H] with the sink, without */
    double *out, *out_noise; /* [H, D] */
    double *dq, *dq_noise;
} answer;

typedef struct part {
    judge_row r;
    judge_stat stats[A_QUANTITIES];
    trial form[2][LSE_FORMS];
    trial *tried;                /* [VARIANTS, TRIES] */
    int64_t rows[TRIES];         /* rows with an expected number that is not 0 */
    int64_t *key, *list, n_list; /* keys: kv row t as t, compressed row k as -1 - k */
    double *p, *x;               /* [H, keys] weights and scratch */
    double *got, *dout, *want, *noise;
    answer right, other;
    double *window, *window_plain; /* [H] */
    sums s;
    void *block;
} part;

static double largest(const double *x, int64_t n) {
    double max = 0;
    for (int64_t i = 0; i < n; i++) max = fabs(x[i]) > max ? fabs(x[i]) : max;
    return max;
}

static const double *key_row(const judge *j, int64_t key) {
    return key >= 0 ? j->kv + key * j->d->D : j->ckv + (-1 - key) * j->d->D;
}

/* The rows that row r attends to under a variant. */
static int64_t list_keys(const setting *a, const judge_row *r, variant v, const int64_t *list, int64_t n_list,
                         int64_t *key) {
    const judge *j = a->j;
    const cg_dump *d = j->d;
    int64_t n = 0, window = d->window + (v == V_WINDOW_LONG) - (v == V_WINDOW_SHORT);
    const int64_t start = d->start[r->segment], base = j->key0[r->segment], all = j->key0[d->B];
    int64_t from = r->position - window + 1 > 0 ? r->position - window + 1 : 0;
    for (int64_t p = from; v != V_NO_WINDOW && p <= r->position; p++) key[n++] = start + p;
    if (v == V_NO_COMPRESSED || !j->has_logits) return n;
    if (v == V_ALL_VISIBLE) {
        for (int64_t i = 0; i < r->n && r->real; i++) key[n++] = -1 - (base + i);
        return n;
    }
    const int64_t first = n;
    for (int64_t k = 0; k < n_list; k++) {
        if (list[k] >= r->n && v != V_UNSEEN) continue;
        int64_t row = list[k] < 0 ? -1 : base + list[k];
        if (v == V_NO_OFFSET && list[k] >= 0) row = list[k];
        if (v == V_MINUS_ONE_LAST && row < 0) row = all - 1;
        if (v == V_MINUS_ONE_FIRST && row < 0) row = d->index == CG_INDEX_GLOBAL ? 0 : base;
        bool there = false;
        for (int64_t i = first; a->once && list[k] >= 0 && i < n && !there; i++) there = key[i] == -1 - row;
        if (row >= 0 && row < all && !there) key[n++] = -1 - row;
    }
    return n;
}

/* Weights of n keys for each head, lse with and without the sink; plain: weights as if there were none. */
static void attend(const setting *a, part *w, int64_t n, variant v, answer *to) {
    const judge *j = a->j;
    const int64_t H = j->d->H, D = j->d->D;
    const double scale = j->scale * (v == V_SCALE ? a->factor : 1);
    for (int64_t h = 0; h < H; h++) {
        const double *q = w->r.q + h * D;
        double *p = w->p + h * n, max = -INFINITY, sum = 0;
        for (int64_t i = 0; i < n; i++) {
            const double *k = key_row(j, w->key[i]);
            double x = 0;
#pragma omp simd reduction(+ : x)
            for (int64_t c = 0; c < D; c++) x += q[c] * k[c];
            p[i] = x * scale;
            max = p[i] > max ? p[i] : max;
        }
        for (int64_t i = 0; i < n; i++) sum += p[i] = exp(p[i] - max);
        to->plain[h] = n ? max + log(sum) : -INFINITY;
        const double z = v != V_NO_SINK && j->has_sink ? j->sink[h] : -INFINITY, top = fmax(z, to->plain[h]);
        to->lse[h] = top == -INFINITY ? top : top + log(exp(to->plain[h] - top) + exp(z - top));
        const double share = !n ? 0 : v == V_LSE_NO_SINK ? 1 / sum : exp(to->plain[h] - to->lse[h]) / sum;
        for (int64_t i = 0; i < n; i++) p[i] *= share;
    }
}

static double largest_of_key(const setting *a, int64_t key) {
    return key >= 0 ? a->k_largest[0][key] : a->k_largest[1][-1 - key];
}

/* What f32 changes in weights and sums of a row, relative. */
static double row_noise(const setting *a, const part *w) {
    return 4 * e_f32 + 2 * judge_logit_noise(a->j, &w->r);
}

static void output_of(const setting *a, part *w, int64_t n, answer *to) {
    const judge *j = a->j;
    const int64_t H = j->d->H, D = j->d->D;
    const double relative = row_noise(a, w);
    memset(to->out, 0, (size_t)(H * D) * sizeof *to->out);
    for (int64_t h = 0; h < H; h++) {
        double size = 0;
        for (int64_t i = 0; i < n; i++) {
            const double p = w->p[h * n + i], *k = key_row(j, w->key[i]);
            for (int64_t c = 0; c < D; c++) to->out[h * D + c] += p * k[c];
            size += p * largest_of_key(a, w->key[i]);
        }
        for (int64_t c = 0; c < D; c++) to->out_noise[h * D + c] = relative * size;
    }
}

/* A sum's noise: that of its terms, which are independent, and that of adding them one by one. */
static void add_noise(double *sum, double noise, double size) {
    sum[0] += noise * noise;
    sum[1] += size * size;
    sum[2] += 1;
}

static double sum_noise(const double *sum) { return sqrt(sum[0]) + e_f32 * sqrt(sum[1] * sum[2]); }

/* Gradient of sum(out * dout) towards q, and with `into` towards keys and sink. */
static void gradient_of(const setting *a, part *w, int64_t n, variant v, answer *to, sums *into) {
    const judge *j = a->j;
    const int64_t H = j->d->H, D = j->d->D;
    const double relative = row_noise(a, w), scale = j->scale * (v == V_SCALE ? a->factor : 1);
    memset(to->dq, 0, (size_t)(H * D) * sizeof *to->dq);
    for (int64_t h = 0; h < H; h++) {
        double *p = w->p + h * n, *dp = w->x, delta = 0, size = 0, reach = 0, noise = 0, most_g = 0, most_q = 0;
        const double *g = w->dout + h * D, *q = w->r.q + h * D;
        for (int64_t c = 0; c < D; c++) {
            most_g = fmax(most_g, fabs(g[c]));
            most_q = fmax(most_q, fabs(q[c]));
        }
        for (int64_t i = 0; i < n; i++) {
            const double *k = key_row(j, w->key[i]);
            double x = 0;
#pragma omp simd reduction(+ : x)
            for (int64_t c = 0; c < D; c++) x += g[c] * k[c];
            dp[i] = x;
            delta += p[i] * x;
            size += p[i] * x * p[i] * x;
            reach += p[i] * largest_of_key(a, w->key[i]);
        }
        /* the output that the forward saved has the sink in its weights */
        const double mass = v == V_LSE_NO_SINK ? exp(to->plain[h] - to->lse[h]) : 1;
        delta *= mass;
        /* errors of single products are independent, that of delta all keys share */
        const double dp_noise = sqrt((double)D) * e_f32 * most_g,
                     delta_noise = mass * (sqrt(size) * relative + dp_noise * reach);
        for (int64_t i = 0; i < n; i++) {
            const double *k = key_row(j, w->key[i]), weight = p[i], ds = weight * (dp[i] - delta);
            const double most_k = largest_of_key(a, w->key[i]);
            const double own_noise = weight * (fabs(dp[i] - delta) * relative + 2 * dp_noise * most_k);
            for (int64_t c = 0; c < D; c++) to->dq[h * D + c] += scale * ds * k[c];
            noise += own_noise * most_k * own_noise * most_k;
            if (!into) continue;
            const bool window = w->key[i] >= 0;
            const int64_t place = window ? w->key[i] - into->first : -1 - w->key[i];
            double *value = (window ? into->kv : into->ckv)[0] + place * D,
                   *key = (window ? into->kv : into->ckv)[1] + place * D;
            for (int64_t c = 0; c < D; c++) {
                value[c] += weight * g[c];
                key[c] += scale * ds * q[c];
            }
            add_noise((window ? into->kv_noise : into->ckv_noise) + SUM_NOISE * place,
                      weight * most_g * relative + fabs(scale) * (own_noise + weight * delta_noise) * most_q,
                      weight * most_g + fabs(scale * ds) * most_q);
        }
        noise = fabs(scale) * (sqrt(noise) + delta_noise * reach);
        for (int64_t c = 0; c < D; c++) to->dq_noise[h * D + c] = noise + 4 * e_f32 * fabs(to->dq[h * D + c]);
        if (!into || !j->has_sink) continue;
        const double sink = v == V_NO_SINK ? 0 : exp(j->sink[h] - to->lse[h]);
        into->sink[h] -= sink * delta;
        const double keys = exp(to->plain[h] - to->lse[h]); /* 0: nothing that the sum would notice */
        if (keys > 0) into->sink_other[h] -= sink * delta / keys;
        add_noise(into->sink_noise + SUM_NOISE * h, sink * (delta_noise + fabs(delta) * relative),
                  sink * fabs(delta));
    }
}

static double in_form(int form, double with_sink, double plain) {
    const double x = form & FORM_PLAIN ? plain : with_sink;
    return form & FORM_BASE_2 ? x / log(2) : x;
}

static void lse_in_form(const setting *a, const part *w, int form, const double *with_sink, const double *plain,
                        double *want, double *noise) {
    const double logits = judge_logit_noise(a->j, &w->r);
    for (int64_t h = 0; h < a->j->d->H; h++) {
        want[h] = in_form(form, with_sink[h], plain[h]);
        noise[h] = 2 * logits + 2 * e_f32 * (fabs(want[h]) + 1);
    }
}

/* ---- one row ---- */

/* True: row t has something to compute; its list is read. */
static bool row_begin(const setting *a, part *w, int64_t t, bool padding) {
    const judge *j = a->j;
    const cg_dump *d = j->d;
    const int64_t HD = d->H * d->D;
    judge_row *r = &w->r;
    judge_row_place(j, r, t);
    if (r->segment < 0 || (!r->real && !padding)) return false;
    cg_dump_row(d, CG_DUMP_QUERY, t, r->q);
    if (a->grads) cg_dump_row(d, CG_DUMP_DOUT, t, w->dout);
    if (!r->real) { /* padding counts where it has a gradient */
        double some = 0, sum = 0;
        for (int64_t i = 0; i < HD; i++) {
            some += fabs(w->dout[i]);
            sum += (w->dout[i] + r->q[i]) * 0;
        }
        if (!(some > 0) || sum != 0) return false;
    }
    w->n_list = 0;
    if (r->real && a->list < CG_DUMP_ARRAYS) {
        w->n_list = a->width;
        cg_dump_list(d, a->list, t, w->list);
    } else if (r->real && j->has_scores && d->K >= 0) {
        judge_row_scores(j, r);
        for (int64_t i = 0; i < r->n; i++)
            if (r->selected[0][i]) w->list[w->n_list++] = i;
    }
    return true;
}

/* The row under a variant; keeps what the first call says of the size of logits. */
static int64_t row_under(const setting *a, part *w, variant v, answer *to) {
    const int64_t n = list_keys(a, &w->r, v, w->list, w->n_list, w->key);
    attend(a, w, n, v, to);
    return n;
}

static void set_logit_size(const setting *a, part *w, int64_t n) { /* from the largest lse */
    w->r.largest_logit = 0;
    for (int64_t h = 0; h < a->j->d->H; h++)
        if (n) w->r.largest_logit = fmax(w->r.largest_logit, fabs(w->right.plain[h]) + log((double)n + 1));
}

/* Are two expectations apart, the bars of both between them? */
static bool bars_apart(const judge *j, cg_dump_id id, judge_level level, int64_t n, const double *x,
                       const double *x_noise, const double *y, const double *y_noise) {
    const double wide = j->tolerance > 0 ? j->tolerance * (largest(x, n) + largest(y, n)) : 0;
    for (int64_t i = 0; i < n; i++) {
        const double units = j->tolerance > 0 ? wide
                                              : judge_unit(j, id, level, x[i], x_noise[i]) +
                                                    judge_unit(j, id, level, y[i], y_noise[i]);
        if (fabs(x[i] - y[i]) > j->allowed * units) return true;
    }
    return false;
}

static void hold(const judge *j, cg_dump_id id, trial *to, const judge_row *r, int64_t n, int64_t per_head,
                 const double *got, const double *want, const double *noise, const double *right,
                 const double *right_noise) {
    judge_compare(j, id, &to->stat, r->segment, r->position, r->t, n, per_head, got, want, noise, NULL, n);
    for (judge_level level = j->own[id]; level < JUDGE_LEVELS; level++)
        to->apart[level] += bars_apart(j, id, level, n, want, noise, right, right_noise);
}

/* Row t under the reading v: compared, and its gradients summed. */
static void judge_one(const setting *a, part *w, int64_t t, variant v, sums *into) {
    const judge *j = a->j;
    const cg_dump *d = j->d;
    const int64_t H = d->H, HD = d->H * d->D;
    judge_row *r = &w->r;
    answer *to = &w->right;
    if (!row_begin(a, w, t, into != NULL)) {
        if (r->segment >= 0) return; /* behind the last segment: nothing to attend to */
        memset(to->out, 0, (size_t)HD * sizeof *to->out);
        for (int q = 0; q <= A_QUERY; q += A_QUERY)
            if (a->has[q]) {
                cg_dump_row(d, judge_attended[q].id, t, w->got);
                judge_compare(j, judge_attended[q].id, &w->stats[q], -1, t, t, HD, d->D, w->got, to->out,
                              to->out, NULL, HD);
            }
        return;
    }
    list_keys(a, r, V_NO_COMPRESSED, NULL, 0, w->key);
    row_under(a, w, V_NO_COMPRESSED, to);
    memcpy(w->window, to->lse, (size_t)H * sizeof *w->window);
    memcpy(w->window_plain, to->plain, (size_t)H * sizeof *w->window_plain);
    const int64_t n = row_under(a, w, v, to);
    set_logit_size(a, w, n);
    for (int which = 0; which < 2 && r->real; which++) {
        const int q = which ? A_WINDOW_LSE : A_LSE;
        if (!a->has[q]) continue;
        const double *with = which ? w->window : to->lse, *plain = which ? w->window_plain : to->plain;
        cg_dump_row(d, judge_attended[q].id, t, w->got);
        int first = 0;
        while (!(a->forms[which] >> first & 1)) first++;
        lse_in_form(a, w, first, with, plain, to->out, to->out_noise);
        for (int form = 0; form < LSE_FORMS; form++) {
            if (!(a->forms[which] >> form & 1)) continue;
            lse_in_form(a, w, form, with, plain, w->want, w->noise);
            hold(j, judge_attended[q].id, &w->form[which][form], r, H, 1, w->got, w->want, w->noise, to->out,
                 to->out_noise);
        }
        w->rows[TRY_LSE + which]++;
    }
    if (a->has[A_OUTPUT] && r->real) {
        cg_dump_row(d, CG_DUMP_OUTPUT, t, w->got);
        output_of(a, w, n, to);
        judge_compare(j, CG_DUMP_OUTPUT, &w->stats[A_OUTPUT], r->segment, r->position, t, HD, d->D, w->got,
                      to->out, to->out_noise, NULL, HD);
    }
    if (!a->grads) return;
    gradient_of(a, w, n, v, to, into);
    if (!a->has[A_QUERY] || !r->real) return;
    cg_dump_row(d, CG_DUMP_GRAD_QUERY, t, w->got);
    judge_compare(j, CG_DUMP_GRAD_QUERY, &w->stats[A_QUERY], r->segment, r->position, t, HD, d->D, w->got,
                  to->dq, to->dq_noise, NULL, HD);
}

cg_dump_id judge_id_of_try(int t) {
    return t == TRY_OUTPUT ? CG_DUMP_OUTPUT : t == TRY_QUERY ? CG_DUMP_GRAD_QUERY : CG_DUMP_LSE;
}

/* The numbers of a try under what `row_under` left in `to`. */
static int64_t numbers_of(const setting *a, part *w, int t, int64_t n, variant v, answer *to,
                          const double **want, const double **noise) {
    const cg_dump *d = a->j->d;
    if (t == TRY_OUTPUT) {
        output_of(a, w, n, to);
        *want = to->out, *noise = to->out_noise;
        return d->H * d->D;
    }
    if (t == TRY_QUERY) {
        gradient_of(a, w, n, v, to, NULL);
        *want = to->dq, *noise = to->dq_noise;
        return d->H * d->D;
    }
    double *x = to == &w->right ? w->want : to->out, *y = to == &w->right ? w->noise : to->out_noise;
    lse_in_form(a, w, t - TRY_LSE, to->lse, to->plain, x, y);
    *want = x, *noise = y;
    return d->H;
}

/* Row t under every variant that is still possible. */
static void try_one(const setting *a, part *w, int64_t t) {
    const judge *j = a->j;
    if (!row_begin(a, w, t, false)) return;
    for (int which = 0; which < TRIES; which++) {
        if (!a->tries[which]) continue;
        const cg_dump_id id = judge_id_of_try(which);
        const double *right, *right_noise, *want, *noise;
        const int64_t n_right = row_under(a, w, V_RIGHT, &w->right);
        set_logit_size(a, w, n_right);
        const int64_t n = numbers_of(a, w, which, n_right, V_RIGHT, &w->right, &right, &right_noise);
        cg_dump_row(j->d, id, t, w->got);
        w->rows[which] += largest(right, n) > 0;
        for (int v = V_NO_SINK; v < VARIANTS; v++) {
            trial *to = &w->tried[v * TRIES + which];
            if (to->stat.worst_units[JUDGE_LEVELS - 1] > j->allowed) continue; /* no longer possible */
            if (v == V_LSE_NO_SINK && which != TRY_QUERY) continue;
            if (v == V_NO_SINK && which >= TRY_LSE) continue; /* that is a form */
            const int64_t n_keys = row_under(a, w, (variant)v, &w->other);
            numbers_of(a, w, which, n_keys, (variant)v, &w->other, &want, &noise);
            hold(j, id, to, &w->r, n, n / j->d->H, w->got, want, noise, right, right_noise);
        }
    }
}

/* ---- over the rows ---- */

static bool part_new(const setting *a, part *w) {
    const cg_dump *d = a->j->d;
    const size_t HD = (size_t)(d->H * d->D), H = (size_t)d->H;
    const size_t listed = (size_t)(a->width > d->N ? a->width : d->N) + 1;
    const size_t keys = (size_t)(d->window < d->T ? d->window : d->T) + 2 + listed;
    judge_stat_init(w->stats, A_QUANTITIES);
    for (int i = 0; i < 2; i++)
        for (int form = 0; form < LSE_FORMS; form++) judge_stat_init(&w->form[i][form].stat, 1);
    if (!judge_row_new(a->j, &w->r)) return false;
    double *x = w->block = malloc(sizeof *x * (2 * keys + listed + H * keys + 12 * HD + 6 * H + 1));
    w->tried = calloc(VARIANTS * TRIES, sizeof *w->tried);
    if (!x || !w->tried) return false;
    for (int i = 0; i < VARIANTS * TRIES; i++) judge_stat_init(&w->tried[i].stat, 1);
    w->key = (int64_t *)x, x += keys;
    w->list = (int64_t *)x, x += listed;
    w->x = x, x += keys;
    w->p = x, x += H * keys;
    answer *const to[] = {&w->right, &w->other};
    double **const wide[] = {&w->got,     &w->dout,          &w->want,   &w->noise,
                             &to[0]->out, &to[0]->out_noise, &to[0]->dq, &to[0]->dq_noise,
                             &to[1]->out, &to[1]->out_noise, &to[1]->dq, &to[1]->dq_noise};
    double **const narrow[] = {&to[0]->lse,   &to[0]->plain, &to[1]->lse,
                               &to[1]->plain, &w->window,    &w->window_plain};
    for (int i = 0; i < 12; i++, x += HD) *wide[i] = x;
    for (int i = 0; i < 6; i++, x += H) *narrow[i] = x;
    return true;
}

static void part_free(part *w) {
    judge_row_free(&w->r);
    free(w->block);
    free(w->tried);
    free(w->s.kv[0]);
}

/* Room for the sums of rows from .. to-1. */
static bool sums_new(const setting *a, sums *s, int64_t from, int64_t to) {
    const cg_dump *d = a->j->d;
    s->first = from - d->window + 1 > 0 ? from - d->window + 1 : 0;
    if (s->first > 0) s->first--; /* a window may be taken for one longer */
    const size_t rows = (size_t)(to - s->first), keys = (size_t)a->j->key0[d->B], D = (size_t)d->D,
                 H = (size_t)d->H;
    double *x = calloc(2 * D * (rows + keys) + SUM_NOISE * (rows + keys + H) + 2 * H + 1, sizeof *x);
    if (!x) return false;
    s->kv[0] = x, x += rows * D;
    s->kv[1] = x, x += rows * D;
    s->kv_noise = x, x += SUM_NOISE * rows;
    s->ckv[0] = x, x += keys * D;
    s->ckv[1] = x, x += keys * D;
    s->ckv_noise = x, x += SUM_NOISE * keys;
    s->sink = x, x += H;
    s->sink_noise = x, x += SUM_NOISE * H;
    s->sink_other = x;
    return true;
}

static void add_to(double *to, const double *from, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] += from[i];
}

static void add_sums(const setting *a, sums *total, const sums *s, int64_t to) {
    const cg_dump *d = a->j->d;
    const int64_t rows = to - s->first, keys = a->j->key0[d->B];
    for (int i = 0; i < 2; i++) {
        add_to(total->kv[i] + s->first * d->D, s->kv[i], rows * d->D);
        add_to(total->ckv[i], s->ckv[i], keys * d->D);
    }
    add_to(total->kv_noise + SUM_NOISE * s->first, s->kv_noise, SUM_NOISE * rows);
    add_to(total->ckv_noise, s->ckv_noise, SUM_NOISE * keys);
    add_to(total->sink, s->sink, d->H);
    add_to(total->sink_noise, s->sink_noise, SUM_NOISE * d->H);
    add_to(total->sink_other, s->sink_other, d->H);
}

static void merge_trial(trial *to, const trial *from, int n_worst) {
    judge_stat_merge(&to->stat, &from->stat, n_worst);
    for (int level = 0; level < JUDGE_LEVELS; level++) to->apart[level] += from->apart[level];
}

/* All rows in contiguous chunks, into `under` where they are judged under a reading, into `tries` where
 * others are tried. */
static bool pass(const setting *a, variant v, result *under, attempts *tries) {
    const cg_dump *d = a->j->d;
    const bool summed = under && a->grads;
    part *parts = calloc(JUDGE_CHUNKS, sizeof *parts);
    bool ok = parts && (!summed || sums_new(a, &under->total, 0, d->T));
#pragma omp parallel for schedule(dynamic, 1) reduction(&& : ok)
    for (int c = 0; c < JUDGE_CHUNKS; c++) {
        const int64_t from = d->T * c / JUDGE_CHUNKS, to = d->T * (c + 1) / JUDGE_CHUNKS;
        part *w = &parts[c];
        ok = ok && part_new(a, w) && (!summed || sums_new(a, &w->s, from, to));
        for (int64_t t = from; ok && t < to; t++) {
            if (under)
                judge_one(a, w, t, v, summed ? &w->s : NULL);
            else
                try_one(a, w, t);
        }
    }
    for (int c = 0; ok && c < JUDGE_CHUNKS; c++) {
        part *w = &parts[c];
        for (int q = 0; under && q < A_QUANTITIES; q++)
            judge_stat_merge(&under->stats[q], &w->stats[q], a->j->n_worst);
        for (int i = 0; under && i < 2; i++) {
            for (int form = 0; form < LSE_FORMS; form++)
                merge_trial(&under->form[i][form], &w->form[i][form], a->j->n_worst);
            under->lse_rows[i] += w->rows[TRY_LSE + i];
        }
        if (summed) add_sums(a, &under->total, &w->s, d->T * (c + 1) / JUDGE_CHUNKS);
        for (int i = 0; tries && i < TRIES; i++) {
            for (int k = 0; k < VARIANTS; k++) merge_trial(&tries->tried[k][i], &w->tried[k * TRIES + i], 0);
            tries->rows[i] += w->rows[i];
        }
    }
    for (int c = 0; parts && c < JUDGE_CHUNKS; c++) part_free(&parts[c]);
    free(parts);
    return ok;
}

int64_t judge_compare_keys(const setting *a, const sums *s, int which, int role, trial *to, double *buffer) {
    const judge *j = a->j;
    const cg_dump *d = j->d;
    const bool window = which == A_KV;
    const cg_dump_id id = judge_attended[which].id;
    double *got = buffer, *want = buffer + d->D, *noise = want + d->D, *both = noise + d->D;
    judge_row r = {0};
    int64_t some = 0;
    for (r.segment = 0; r.segment < d->B; r.segment++) {
        const int64_t n = window ? d->physical[r.segment] : d->n_keys[r.segment];
        for (r.position = 0; r.position < n; r.position++) {
            const int64_t at = r.t = (window ? d->start : j->key0)[r.segment] + r.position;
            if (window)
                cg_dump_row(d, id, at, got);
            else
                cg_dump_key(d, id, r.segment, r.position, got);
            const double *value = (window ? s->kv : s->ckv)[0] + at * d->D,
                         *key = (window ? s->kv : s->ckv)[1] + at * d->D,
                         summed = sum_noise((window ? s->kv_noise : s->ckv_noise) + SUM_NOISE * at);
            for (int64_t c = 0; c < d->D; c++) {
                both[c] = value[c] + key[c];
                want[c] = role == 0 ? value[c] : role == 1 ? key[c] : both[c];
                noise[c] = summed + 4 * e_f32 * fabs(both[c]);
            }
            hold(j, id, to, &r, d->D, 0, got, want, noise, both, noise);
            some += largest(both, d->D) > 0;
        }
    }
    return some;
}

void judge_compare_sink(const setting *a, const sums *s, const double *want, judge_stat *to, double *buffer) {
    const int64_t H = a->j->d->H;
    double *noise = buffer + H;
    cg_dump_row(a->j->d, CG_DUMP_GRAD_SINK, 0, buffer);
    for (int64_t h = 0; h < H; h++) noise[h] = sum_noise(s->sink_noise + SUM_NOISE * h);
    judge_compare(a->j, CG_DUMP_GRAD_SINK, to, -1, -1, 0, H, 1, buffer, want, noise, NULL, H);
}

/* The form of an lse that fits best, the first one in doubt. */
static void choose_form(const setting *a, result *to, int which) {
    const judge *j = a->j;
    const int q = which ? A_WINDOW_LSE : A_LSE;
    int first = -1;
    for (int form = 0; form < LSE_FORMS; form++) {
        if (!(a->forms[which] >> form & 1)) continue;
        judge_level level;
        const judge_outcome outcome =
            judge_outcome_of(j, judge_attended[q].id, &to->form[which][form].stat, &level);
        if (first >= 0 && (outcome > to->outcome[q] || (outcome == to->outcome[q] && level >= to->level[q])))
            continue;
        if (first < 0) first = form;
        to->chosen[which] = form;
        to->outcome[q] = outcome;
        to->level[q] = level;
    }
    const trial *t = &to->form[which][to->chosen[which]];
    to->stats[q] = t->stat;
    to->form_shows[which] = to->chosen[which] == first ||
                            (to->outcome[q] == JUDGE_SAME &&
                             t->apart[to->level[q]] >= (to->lse_rows[which] < 2 ? to->lse_rows[which] : 2));
}

bool judge_under(const setting *a, variant v, result *to) {
    const int64_t wide = 4 * (a->j->d->D > a->j->d->H ? a->j->d->D : a->j->d->H) + 1;
    double *buffer = malloc((size_t)wide * sizeof *buffer);
    *to = (result){0};
    judge_stat_init(to->stats, A_QUANTITIES);
    for (int i = 0; i < 2; i++)
        for (int form = 0; form < LSE_FORMS; form++) judge_stat_init(&to->form[i][form].stat, 1);
    bool ok = buffer && pass(a, v, to, NULL);
    for (int which = A_KV; ok && which <= A_COMPRESSED; which++) {
        trial sum = {0};
        judge_stat_init(&sum.stat, 1);
        if (a->has[which]) judge_compare_keys(a, &to->total, which, 2, &sum, buffer);
        to->stats[which] = sum.stat;
    }
    if (ok && a->has[A_SINK]) {
        const sums *s = &to->total;
        judge_compare_sink(a, s, s->sink, &to->stats[A_SINK], buffer);
    }
    for (int q = 0; ok && q < A_QUANTITIES; q++)
        if (a->has[q])
            to->outcome[q] = judge_outcome_of(a->j, judge_attended[q].id, &to->stats[q], &to->level[q]);
    for (int i = 0; ok && i < 2; i++)
        if (a->has[i ? A_WINDOW_LSE : A_LSE]) choose_form(a, to, i);
    free(buffer);
    return ok;
}

void judge_under_free(result *r) { free(r->total.kv[0]); }

bool judge_try_variants(const setting *a, attempts *to) {
    for (int v = 0; v < VARIANTS; v++)
        for (int i = 0; i < TRIES; i++) judge_stat_init(&to->tried[v][i].stat, 1);
    return pass(a, V_RIGHT, NULL, to);
}

/* ---- the softmax scale that was really used ---- */

/* Squared errors of a sample of rows, in units, at a factor of the scale; of each try. */
static void squares_at(setting *a, part *w, const int64_t *rows, int n_rows, double factor, double *squares) {
    const judge *j = a->j;
    a->factor = factor;
    for (int i = 0; i < TRIES; i++) squares[i] = a->tries[i] ? 0 : INFINITY;
    for (int k = 0; k < n_rows; k++) {
        row_begin(a, w, rows[k], false);
        const int64_t n_keys = row_under(a, w, V_SCALE, &w->other);
        for (int i = 0; i < TRIES; i++) {
            const double *want, *noise;
            if (!a->tries[i]) continue;
            const int64_t n = numbers_of(a, w, i, n_keys, V_SCALE, &w->other, &want, &noise);
            const cg_dump_id id = judge_id_of_try(i);
            cg_dump_row(j->d, id, rows[k], w->got);
            const double unit = (j->stored[id] + 8 * judge_rounding[j->own[id]]) * largest(w->got, n);
            for (int64_t m = 0; m < n; m++) {
                const double error = w->got[m] == want[m] ? 0 : (w->got[m] - want[m]) / unit;
                squares[i] += isnan(error) ? INFINITY : error * error;
            }
        }
    }
}

/* Along a grid, then between the neighbours of its best. What fits as well and is a simple number, or one
 * that programs make, is taken for it. */
bool judge_find_scale(setting *a) {
    enum { ROWS = 8, STEPS = 64, MADE = 8 };
    const cg_dump *d = a->j->d;
    const double step = exp2(0.125), root = sqrt((double)d->D), scale = a->j->scale;
    int64_t rows[ROWS];
    int n_rows = 0, which = -1;
    double best[TRIES], factors[TRIES], squares[TRIES];
    part *w = calloc(1, sizeof *w);
    const bool ok = w && part_new(a, w);
    const int64_t cost = (d->window + a->width + 1) * d->H * d->D, most = cost < 1 << 19 ? ROWS : 2;
    for (int64_t t = d->T - 1; ok && t >= 0 && n_rows < most; t -= d->T / (2 * most) + 1)
        if (cg_dump_is_real(d, t)) rows[n_rows++] = t;
    const double made[MADE] = {0, -1, root, 1 / root, 1 / scale, scale, 1 / log(2), log(2)};
    for (int k = -STEPS; ok && k <= STEPS + MADE; k++) {
        const double x = k <= STEPS ? pow(step, k) : made[k - STEPS - 1];
        squares_at(a, w, rows, n_rows, x, squares);
        for (int i = 0; i < TRIES; i++)
            if (k == -STEPS || squares[i] < best[i]) best[i] = squares[i], factors[i] = x;
    }
    /* the output tells most, then the best form of an lse */
    const int order[TRIES] = {TRY_OUTPUT, TRY_LSE, TRY_LSE + 1, TRY_LSE + 2, TRY_LSE + 3, TRY_QUERY};
    for (int i = 0; ok && i < TRIES; i++)
        if (a->tries[order[i]] &&
            (which < 0 || (which >= TRY_LSE && order[i] >= TRY_LSE && best[order[i]] < best[which])))
            which = order[i];
    double factor = which >= 0 ? factors[which] : 1, least = which >= 0 ? best[which] : 0;
    if (which >= 0 && factor > 0) { /* golden section */
        const double golden = (sqrt(5) - 1) / 2;
        double lo = factor / step, hi = factor * step;
        for (int k = 0; k < 80; k++) {
            double x[2] = {hi - golden * (hi - lo), lo + golden * (hi - lo)}, y[2];
            for (int i = 0; i < 2; i++) {
                squares_at(a, w, rows, n_rows, x[i], squares);
                y[i] = squares[which];
                if (y[i] < least) least = y[i], factor = x[i];
            }
            if (y[0] < y[1])
                hi = x[1];
            else
                lo = x[0];
        }
        const double room[] = {3e-3, 1e-4, 3e-6, 1e-8}; /* then in few digits */
        const double numbers = (double)(n_rows * d->H * (which < TRY_LSE ? d->D : 1));
        bool simple = false;
        for (int k = 0; k < 12 && !simple; k++) {
            char digits[32];
            snprintf(digits, sizeof digits, "%.*g", k - 1, factor);
            double x =
                k < 4 ? judge_simplest(factor * (1 - room[k]), factor * (1 + room[k])) : strtod(digits, NULL);
            for (int i = 2; i < MADE && k < 4; i++)
                if (fabs(made[i] - factor) <= room[k] * factor) x = made[i];
            if (k < 4 && fabs(x / factor - 1) < 1e-14) continue; /* there is no simple one */
            squares_at(a, w, rows, n_rows, x, squares);
            simple = squares[which] <= least * (1 + 9 / numbers) + 4;
            if (simple) factor = x;
        }
    }
    if (w) part_free(w);
    free(w);
    a->factor = factor;
    return ok;
}
