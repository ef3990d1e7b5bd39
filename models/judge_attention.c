/* The attention itself: output, lse and gradients, over the dump's own lists. Where they are not as expected, known
 * mistakes are tried: a missing sink or window, a wrong window, -1 taken for a row, lists read from another origin, and
 * in the backward an lse without the sink or one of a row's two roles. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "models/judge.h"

typedef enum variant {
    V_RIGHT,
    V_NO_SINK,
    V_NO_WINDOW,
    V_NO_COMPRESSED,
    V_ALL_VISIBLE,
    V_WINDOW_SHORT,
    V_WINDOW_LONG,
    V_MINUS_ONE_LAST,
    V_MINUS_ONE_FIRST,
    V_NO_OFFSET,
    V_LSE_NO_SINK, /* of the backward alone */
    VARIANTS
} variant;

static const struct {
    const char *name, *says;
} variants[VARIANTS] = {
    [V_NO_SINK] = {"sink-ignored", "the sink is missing from the softmax"},
    [V_NO_WINDOW] = {"window-ignored", "the window is missing from the softmax"},
    [V_NO_COMPRESSED] = {"compressed-ignored", "the compressed rows are missing from the softmax"},
    [V_ALL_VISIBLE] = {"attends-all-visible", "rows attend to all visible compressed rows, not to their list"},
    [V_WINDOW_SHORT] = {"window-short", "the window is one token too short"},
    [V_WINDOW_LONG] = {"window-long", "the window is one token too long"},
    [V_MINUS_ONE_LAST] = {"minus-one-wrapped", "-1 in a list is read as the last compressed row"},
    [V_MINUS_ONE_FIRST] = {"minus-one-clamped", "-1 in a list is read as compressed row 0"},
    [V_NO_OFFSET] = {"list-not-offset",
                     "lists that count from the segment are read as if from the whole array"},
    [V_LSE_NO_SINK] = {"backward-lse-without-sink",
                       "the backward rebuilds the weights from an lse without the sink"},
};

enum { A_OUTPUT, A_LSE, A_WINDOW_LSE, A_QUERY, A_KV, A_COMPRESSED, A_SINK, A_QUANTITIES };
static const struct {
    const char *name;
    cg_dump_id id;
} quantity[A_QUANTITIES] = {
    {"output", CG_DUMP_OUTPUT},
    {"lse", CG_DUMP_LSE},
    {"non_compressed_lse", CG_DUMP_WINDOW_LSE},
    {"grad.query", CG_DUMP_GRAD_QUERY},
    {"grad.kv", CG_DUMP_GRAD_KV},
    {"grad.compressed_kv", CG_DUMP_GRAD_COMPRESSED_KV},
    {"grad.sink", CG_DUMP_GRAD_SINK},
};

/* An lse with or without the sink, natural or base 2. */
enum { LSE_FORMS = 4 };
static const char *const lse_forms[LSE_FORMS] = {"", "without the sink", "in base 2",
                                                 "in base 2, without the sink"};

typedef struct setting {
    judge *j;
    bool has[A_QUANTITIES], grads;
    cg_dump_id list;      /* whose list attention follows; CG_DUMP_ARRAYS: the selection of the scores */
    int form[2];          /* of lse and non_compressed_lse */
    double *k_largest[2]; /* largest magnitude of each kv, each compressed row */
    unsigned alive_out, alive_query;
    int64_t width;
} setting;

/* Sums over the rows of a chunk: of kv only the rows that its windows reach. */
typedef struct sums {
    double *kv[2], *kv_noise;               /* value role, key role [rows + W, D] */
    double *ckv[2], *ckv_noise;             /* [keys, D] */
    double *sink, *sink_noise, *sink_other; /* [H]; other: from the output without the sink */
    int64_t first;                          /* kv row of place 0 */
} sums;

typedef struct part {
    judge_row r;
    judge_stat stats[A_QUANTITIES];
    unsigned alive_out, alive_query, alive_form[2];
    int64_t *key;  /* rows: kv row t as t, compressed row k as -1 - k */
    double *p, *x; /* [H, keys] weights and scratch */
    double *out, *got, *unit, *dout, *dq;
    double *lse, *lse_plain, *window, *window_plain; /* [H] */
    sums s;
    void *block;
} part;

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
    for (int64_t k = 0; k < n_list; k++) {
        int64_t row = list[k] < 0 ? -1 : base + list[k];
        if (v == V_NO_OFFSET && list[k] >= 0) row = list[k];
        if (v == V_MINUS_ONE_LAST && row < 0) row = all - 1;
        if (v == V_MINUS_ONE_FIRST && row < 0) row = d->index == CG_INDEX_GLOBAL ? 0 : base;
        if (row >= 0 && row < all) key[n++] = -1 - row;
    }
    return n;
}

/* Weights of n keys for each head, lse with and without the sink; plain: weights as if there were none. */
static void attend(const setting *a, part *w, int64_t n, bool sink, bool plain) {
    const judge *j = a->j;
    const int64_t H = j->d->H, D = j->d->D;
    for (int64_t h = 0; h < H; h++) {
        const double *q = w->r.q + h * D;
        double *p = w->p + h * n, max = -INFINITY, sum = 0;
        for (int64_t i = 0; i < n; i++) {
            const double *k = key_row(j, w->key[i]);
            double x = 0;
#pragma omp simd reduction(+ : x)
            for (int64_t c = 0; c < D; c++) x += q[c] * k[c];
            p[i] = x * j->d->scale;
            max = p[i] > max ? p[i] : max;
        }
        for (int64_t i = 0; i < n; i++) sum += p[i] = exp(p[i] - max);
        w->lse_plain[h] = n ? max + log(sum) : -INFINITY;
        const double z = sink && j->has_sink ? j->sink[h] : -INFINITY, top = fmax(z, w->lse_plain[h]);
        w->lse[h] = top == -INFINITY ? top : top + log(exp(w->lse_plain[h] - top) + exp(z - top));
        const double share = !n ? 0 : plain ? 1 / sum : exp(w->lse_plain[h] - w->lse[h]) / sum;
        for (int64_t i = 0; i < n; i++) p[i] *= share;
    }
}

static double largest_of_key(const setting *a, int64_t key) {
    return key >= 0 ? a->k_largest[0][key] : a->k_largest[1][-1 - key];
}

static void output_of(const setting *a, part *w, int64_t n, double *out, double *unit) {
    const judge *j = a->j;
    const int64_t H = j->d->H, D = j->d->D;
    const double e = j->rounding[CG_DUMP_OUTPUT], relative = 4 * e + 2 * judge_logit_noise(j, &w->r, e);
    memset(out, 0, (size_t)(H * D) * sizeof *out);
    for (int64_t h = 0; h < H; h++) {
        double size = 0;
        for (int64_t i = 0; i < n; i++) {
            const double p = w->p[h * n + i], *k = key_row(j, w->key[i]);
            for (int64_t c = 0; c < D; c++) out[h * D + c] += p * k[c];
            size += p * largest_of_key(a, w->key[i]);
        }
        for (int64_t c = 0; c < D; c++) unit[h * D + c] = relative * size + judge_floor(e);
    }
}

/* Gradient of sum(out * dout) towards q, and with `into` towards keys and sink. */
static void gradient_of(const setting *a, part *w, int64_t n, bool plain_weights, sums *into) {
    const judge *j = a->j;
    const int64_t H = j->d->H, D = j->d->D;
    const double e = j->rounding[a->has[A_QUERY] ? CG_DUMP_GRAD_QUERY : CG_DUMP_GRAD_KV];
    const double relative = 4 * e + 2 * judge_logit_noise(j, &w->r, e), scale = j->d->scale;
    memset(w->dq, 0, (size_t)(H * D) * sizeof *w->dq);
    for (int64_t h = 0; h < H; h++) {
        double *p = w->p + h * n, *dp = w->x, delta = 0, size = 0, noise = 0, most_g = 0, most_q = 0;
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
            size += p[i] * fabs(x);
        }
        /* the output that the forward saved has the sink in its weights */
        const double mass = plain_weights ? exp(w->lse_plain[h] - w->lse[h]) : 1;
        delta *= mass;
        size *= mass;
        const double dp_noise = sqrt((double)D) * e * most_g;
        for (int64_t i = 0; i < n; i++) {
            const double *k = key_row(j, w->key[i]), weight = p[i], ds = weight * (dp[i] - delta);
            const double largest = largest_of_key(a, w->key[i]);
            const double ds_noise = weight * ((fabs(dp[i]) + size) * relative + 2 * dp_noise * largest);
            for (int64_t c = 0; c < D; c++) w->dq[h * D + c] += scale * ds * k[c];
            noise += fabs(scale) * ds_noise * largest;
            if (!into) continue;
            const bool window = w->key[i] >= 0;
            const int64_t place = window ? w->key[i] - into->first : -1 - w->key[i];
            double *value = (window ? into->kv : into->ckv)[0] + place * D,
                   *key = (window ? into->kv : into->ckv)[1] + place * D;
            for (int64_t c = 0; c < D; c++) {
                value[c] += weight * g[c];
                key[c] += scale * ds * q[c];
            }
            (window ? into->kv_noise : into->ckv_noise)[place] +=
                weight * most_g * relative + fabs(scale) * (ds_noise + 2 * e * fabs(ds)) * most_q;
        }
        for (int64_t c = 0; c < D; c++)
            w->unit[h * D + c] = noise + 4 * e * fabs(w->dq[h * D + c]) + judge_floor(e);
        if (!into || !j->has_sink) continue;
        const double sink = exp(j->sink[h] - w->lse[h]);
        into->sink[h] -= sink * delta;
        const double keys = exp(w->lse_plain[h] - w->lse[h]); /* 0: nothing that the sum would notice */
        if (keys > 0) into->sink_other[h] -= sink * delta / keys;
        into->sink_noise[h] += sink * (size * relative + dp_noise * sqrt((double)n + 1));
    }
}

static double in_form(int form, double with_sink, double plain) {
    const double x = form & 1 ? plain : with_sink;
    return form & 2 ? x / log(2) : x;
}

static void lse_units(const setting *a, const part *w, int which, const double *want, double *unit) {
    const double e = a->j->rounding[quantity[which].id], noise = judge_logit_noise(a->j, &w->r, e);
    for (int64_t h = 0; h < a->j->d->H; h++) unit[h] = 2 * noise + 2 * e * (fabs(want[h]) + 1);
}

/* Row t; forms: find what the lse tensors hold; into: sums of the gradients; tries: other variants too. */
static void one_row(const setting *a, part *w, int64_t t, bool forms, bool tries, sums *into) {
    const judge *j = a->j;
    const cg_dump *d = j->d;
    const int64_t H = d->H, D = d->D;
    judge_row *r = &w->r;
    judge_row_place(j, r, t);
    const bool compare = !forms && !tries;
    if (r->segment < 0) { /* behind the last segment: nothing to attend to */
        memset(w->out, 0, (size_t)(H * D) * sizeof *w->out);
        memset(w->unit, 0, (size_t)(H * D) * sizeof *w->unit);
        for (int q = 0; compare && q <= A_QUERY; q += A_QUERY)
            if (a->has[q]) {
                cg_dump_row(d, quantity[q].id, t, w->got);
                judge_compare(j, &w->stats[q], -1, t, t, H * D, D, w->got, w->out, w->unit);
            }
        return;
    }
    if (!r->real && !into) return;
    cg_dump_row(d, CG_DUMP_QUERY, t, r->q);
    if (a->grads) cg_dump_row(d, CG_DUMP_DOUT, t, w->dout);
    if (!r->real) { /* padding counts where it has a gradient */
        double some = 0, sum = 0;
        for (int64_t i = 0; i < H * D; i++) {
            some += fabs(w->dout[i]);
            sum += (w->dout[i] + r->q[i]) * 0;
        }
        if (!(some > 0) || sum != 0) return;
    }
    int64_t n_list = 0;
    if (a->list < CG_DUMP_ARRAYS) {
        n_list = a->width;
        cg_dump_list(d, a->list, t, r->list);
        for (int64_t k = 0; !r->real && k < n_list; k++) r->list[k] = -1;
    } else if (j->has_scores && r->real && d->K >= 0) {
        judge_row_scores(j, r);
        n_list = r->n_selected[0];
    }
    r->largest_logit = 0;
    int64_t n = list_keys(a, r, V_NO_COMPRESSED, r->list, n_list, w->key);
    attend(a, w, n, true, false);
    memcpy(w->window, w->lse, (size_t)H * sizeof *w->window);
    memcpy(w->window_plain, w->lse_plain, (size_t)H * sizeof *w->window_plain);
    n = list_keys(a, r, V_RIGHT, r->list, n_list, w->key);
    attend(a, w, n, true, false);
    for (int64_t h = 0; h < H; h++) /* magnitude of the logits, from the largest lse */
        r->largest_logit = fmax(r->largest_logit, fabs(w->lse_plain[h]) + log((double)n + 1));

    for (int which = A_LSE; which <= A_WINDOW_LSE; which++) {
        if (!a->has[which] || !r->real || tries) continue;
        const double *with = which == A_LSE ? w->lse : w->window,
                     *plain = which == A_LSE ? w->lse_plain : w->window_plain;
        cg_dump_row(d, quantity[which].id, t, w->got);
        for (int form = 0; form < LSE_FORMS; form++) {
            if (compare && form != a->form[which - A_LSE]) continue;
            for (int64_t h = 0; h < H; h++) w->out[h] = in_form(form, with[h], plain[h]);
            lse_units(a, w, which, w->out, w->unit);
            if (compare)
                judge_compare(j, &w->stats[which], r->segment, r->position, t, H, 1, w->got, w->out, w->unit);
            else if (!judge_same(j, H, w->got, w->out, w->unit))
                w->alive_form[which - A_LSE] &= ~(1u << form);
        }
    }
    if (forms) return;
    if (compare && a->has[A_OUTPUT] && r->real) {
        cg_dump_row(d, CG_DUMP_OUTPUT, t, w->got);
        output_of(a, w, n, w->out, w->unit);
        judge_compare(j, &w->stats[A_OUTPUT], r->segment, r->position, t, H * D, D, w->got, w->out, w->unit);
    }
    if (compare && a->grads) {
        gradient_of(a, w, n, false, into);
        if (a->has[A_QUERY] && r->real) {
            cg_dump_row(d, CG_DUMP_GRAD_QUERY, t, w->got);
            judge_compare(j, &w->stats[A_QUERY], r->segment, r->position, t, H * D, D, w->got, w->dq, w->unit);
        }
    }
    for (int v = V_NO_SINK; tries && v < VARIANTS; v++) {
        if (!((w->alive_out | w->alive_query) >> v & 1)) continue;
        n = list_keys(a, r, v == V_LSE_NO_SINK ? V_RIGHT : (variant)v, r->list, n_list, w->key);
        attend(a, w, n, v != V_NO_SINK, v == V_LSE_NO_SINK);
        if (w->alive_out >> v & 1) {
            cg_dump_row(d, CG_DUMP_OUTPUT, t, w->got);
            output_of(a, w, n, w->out, w->unit);
            if (!judge_same(j, H * D, w->got, w->out, w->unit)) w->alive_out &= ~(1u << v);
        }
        if (w->alive_query >> v & 1) {
            cg_dump_row(d, CG_DUMP_GRAD_QUERY, t, w->got);
            gradient_of(a, w, n, v == V_LSE_NO_SINK, NULL);
            if (!judge_same(j, H * D, w->got, w->dq, w->unit)) w->alive_query &= ~(1u << v);
        }
    }
}

/* ---- over the rows ---- */

static bool part_new(const setting *a, part *w) {
    const cg_dump *d = a->j->d;
    const size_t HD = (size_t)(d->H * d->D), H = (size_t)d->H;
    const size_t keys =
        (size_t)((d->window < d->T ? d->window : d->T) + 2 + (a->width > d->N ? a->width : d->N));
    judge_stat_init(w->stats, A_QUANTITIES);
    if (!judge_row_new(a->j, &w->r)) return false;
    double *x = w->block = malloc(sizeof *x * (keys + H * keys + keys + 5 * (HD + H) + 4 * H + 1));
    if (!x) return false;
    w->key = (int64_t *)x, x += keys;
    w->p = x, x += H * keys;
    w->x = x, x += keys;
    w->out = x, x += HD + H;
    w->got = x, x += HD + H;
    w->unit = x, x += HD + H;
    w->dout = x, x += HD + H;
    w->dq = x, x += HD + H;
    w->lse = x, x += H;
    w->lse_plain = x, x += H;
    w->window = x, x += H;
    w->window_plain = x;
    w->alive_out = a->alive_out;
    w->alive_query = a->alive_query;
    w->alive_form[0] = w->alive_form[1] = (1u << LSE_FORMS) - 1;
    return true;
}

static void part_free(part *w) {
    judge_row_free(&w->r);
    free(w->block);
    free(w->s.kv[0]);
}

/* Room for the sums of rows from .. to-1. */
static bool sums_new(const setting *a, sums *s, int64_t from, int64_t to) {
    const cg_dump *d = a->j->d;
    s->first = from - d->window + 1 > 0 ? from - d->window + 1 : 0;
    const size_t rows = (size_t)(to - s->first), keys = (size_t)a->j->key0[d->B], D = (size_t)d->D,
                 H = (size_t)d->H;
    double *x = calloc(2 * rows * D + rows + 2 * keys * D + keys + 3 * H + 1, sizeof *x);
    if (!x) return false;
    s->kv[0] = x, x += rows * D;
    s->kv[1] = x, x += rows * D;
    s->kv_noise = x, x += rows;
    s->ckv[0] = x, x += keys * D;
    s->ckv[1] = x, x += keys * D;
    s->ckv_noise = x, x += keys;
    s->sink = x, x += H;
    s->sink_noise = x, x += H;
    s->sink_other = x;
    return true;
}

static void add_to(double *to, const double *from, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] += from[i];
}

/* All rows in contiguous chunks; total: sums of all (its first is 0). */
static bool pass(setting *a, judge_stat *stats, bool tries, sums *total) {
    const cg_dump *d = a->j->d;
    part *parts = calloc(JUDGE_CHUNKS, sizeof *parts);
    bool ok = parts != NULL;
#pragma omp parallel for schedule(dynamic, 1) reduction(&& : ok)
    for (int c = 0; c < JUDGE_CHUNKS; c++) {
        const int64_t from = d->T * c / JUDGE_CHUNKS, to = d->T * (c + 1) / JUDGE_CHUNKS;
        part *w = &parts[c];
        ok = ok && part_new(a, w) && (!total || sums_new(a, &w->s, from, to));
        for (int64_t t = from; ok && t < to; t++) one_row(a, w, t, false, tries, total ? &w->s : NULL);
    }
    for (int c = 0; ok && c < JUDGE_CHUNKS; c++) {
        part *w = &parts[c];
        a->alive_out &= w->alive_out;
        a->alive_query &= w->alive_query;
        for (int q = 0; q < A_QUANTITIES && stats; q++)
            judge_stat_merge(&stats[q], &w->stats[q], a->j->n_worst);
        if (!total) continue;
        const int64_t rows = d->T * (c + 1) / JUDGE_CHUNKS - w->s.first, keys = a->j->key0[d->B];
        for (int i = 0; i < 2; i++) {
            add_to(total->kv[i] + w->s.first * d->D, w->s.kv[i], rows * d->D);
            add_to(total->ckv[i], w->s.ckv[i], keys * d->D);
        }
        add_to(total->kv_noise + w->s.first, w->s.kv_noise, rows);
        add_to(total->ckv_noise, w->s.ckv_noise, keys);
        add_to(total->sink, w->s.sink, d->H);
        add_to(total->sink_noise, w->s.sink_noise, d->H);
        add_to(total->sink_other, w->s.sink_other, d->H);
    }
    for (int c = 0; parts && c < JUDGE_CHUNKS; c++) part_free(&parts[c]);
    free(parts);
    return ok;
}

/* Which form the lse tensors have, from a few rows. */
static bool find_forms(setting *a) {
    const cg_dump *d = a->j->d;
    part *w = calloc(1, sizeof *w);
    const bool ok = w && part_new(a, w);
    const int64_t step = d->T / 12 + 1;
    for (int64_t t = d->T - 1; ok && t >= 0; t -= step) one_row(a, w, t, true, false, NULL);
    for (int i = 0; ok && i < 2; i++) {
        unsigned alive = w->alive_form[i];
        if (d->lse_base != 0 && i == 0) /* told: base, and perhaps the sink */
            alive &= d->lse_base == 2 ? 0xcu : 0x3u;
        if (d->lse_has_sink >= 0 && i == 0) alive &= d->lse_has_sink ? 0x5u : 0xau;
        a->form[i] = i == 0 && d->lse_base == 2 ? 2 : 0;
        if (i == 0 && d->lse_has_sink == 0) a->form[i] |= 1;
        for (int form = LSE_FORMS - 1; form >= 0; form--)
            if (alive >> form & 1) a->form[i] = form;
    }
    if (w) part_free(w);
    free(w);
    return ok;
}

static double largest(const double *x, int64_t n) {
    double max = 0;
    for (int64_t i = 0; i < n; i++) max = fabs(x[i]) > max ? fabs(x[i]) : max;
    return max;
}

/* Rows of a key gradient beside its sum; role: 0 value alone, 1 key alone, 2 both. */
static void compare_keys(const setting *a, const sums *s, int which, int role, judge_stat *stat, double *got,
                         double *want, double *unit) {
    const judge *j = a->j;
    const cg_dump *d = j->d;
    const double e = j->rounding[quantity[which].id];
    const bool window = which == A_KV;
    for (int64_t b = 0; b < d->B; b++) {
        const int64_t n = window ? d->physical[b] : d->n_keys[b];
        for (int64_t i = 0; i < n; i++) {
            const int64_t at = window ? d->start[b] + i : j->key0[b] + i;
            if (window)
                cg_dump_row(d, CG_DUMP_GRAD_KV, at, got);
            else
                cg_dump_key(d, CG_DUMP_GRAD_COMPRESSED_KV, b, i, got);
            const double *value = (window ? s->kv : s->ckv)[0] + at * d->D,
                         *key = (window ? s->kv : s->ckv)[1] + at * d->D;
            for (int64_t c = 0; c < d->D; c++) {
                want[c] = (role != 1 ? value[c] : 0) + (role != 0 ? key[c] : 0);
                unit[c] = (window ? s->kv_noise : s->ckv_noise)[at] + 4 * e * fabs(want[c]) + judge_floor(e);
            }
            judge_compare(j, stat, b, i, at, d->D, 0, got, want, unit);
        }
    }
}

static void say_variant(judge *j, cg_quantity *q, unsigned alive) {
    for (int v = V_NO_SINK; v < VARIANTS; v++)
        if (alive >> v & 1) {
            snprintf(q->says, sizeof q->says, "%s", variants[v].says);
            judge_fault(j, variants[v].name);
            return;
        }
}

static bool report(setting *a, judge_stat *stats, const sums *s, cg_error *error) {
    judge *j = a->j;
    const int64_t D = j->d->D, H = j->d->H, wide = (D > H ? D : H) + 1;
    double *got = malloc((size_t)(3 * wide) * sizeof *got), *want = got + wide, *unit = want + wide;
    if (!got) return cg_fail(error, CG_FAILED, "out of memory for a row");
    for (int which = 0; which < A_QUANTITIES; which++) {
        if (!a->has[which]) continue;
        judge_stat other;
        judge_stat_init(&other, 1);
        if (which == A_KV || which == A_COMPRESSED)
            compare_keys(a, s, which, 2, &stats[which], got, want, unit);
        if (which == A_SINK) {
            const double e = j->rounding[CG_DUMP_GRAD_SINK];
            cg_dump_row(j->d, CG_DUMP_GRAD_SINK, 0, got);
            for (int64_t h = 0; h < H; h++)
                unit[h] = s->sink_noise[h] + 4 * e * fabs(s->sink[h]) + judge_floor(e);
            judge_compare(j, &stats[which], -1, -1, 0, H, 1, got, s->sink, unit);
            judge_compare(j, &other, -1, -1, 0, H, 1, got, s->sink_other, unit);
        }
        cg_quantity *q = judge_add(j, quantity[which].name, quantity[which].id, &stats[which]);
        if (which == A_LSE || which == A_WINDOW_LSE) {
            if (q->ok && a->form[which - A_LSE])
                snprintf(q->says, sizeof q->says, "it is %s", lse_forms[a->form[which - A_LSE]]);
            continue;
        }
        if (q->ok) continue;
        if (which == A_OUTPUT) say_variant(j, q, a->alive_out);
        if (which == A_QUERY) say_variant(j, q, a->alive_query);
        if (which == A_SINK && !(other.worst_units > j->allowed)) {
            snprintf(q->says, sizeof q->says, "it is recomputed from an output without the sink");
            judge_fault(j, "sink-gradient-without-sink");
        }
        for (int role = 0; role < 2 && (which == A_KV || which == A_COMPRESSED); role++) {
            judge_stat_init(&other, 1);
            compare_keys(a, s, which, role, &other, got, want, unit);
            if (other.worst_units > j->allowed) continue;
            snprintf(q->says, sizeof q->says, "only a row's role as %s has a gradient", role ? "key" : "value");
            judge_fault(j, role ? "gradient-of-key-role-only" : "gradient-of-value-role-only");
        }
    }
    free(got);
    return true;
}

bool judge_attention(judge *j, cg_error *error) {
    const cg_dump *d = j->d;
    setting a = {.j = j};
    bool any = false;
    for (int q = 0; q < A_QUANTITIES; q++)
        any |= a.has[q] = cg_dump_has(d, quantity[q].id) && !(q == A_WINDOW_LSE && !j->has_window);
    if (!any) return true;
    const bool keys = cg_dump_has(d, CG_DUMP_COMPRESSED_KV);
    a.list = cg_dump_has(d, CG_DUMP_ATTN_TOPK) ? CG_DUMP_ATTN_TOPK
             : cg_dump_has(d, CG_DUMP_TOPK)    ? CG_DUMP_TOPK
                                               : CG_DUMP_ARRAYS;
    a.width = a.list < CG_DUMP_ARRAYS ? d->array[a.list].width : d->K > 0 ? d->K : 0;
    if (!j->has_window || (keys && a.list == CG_DUMP_ARRAYS && !(j->has_scores && d->K >= 0))) {
        judge_note(j, "attention is not judged: %s needed", !j->has_window ? "query and kv are" : "topk is");
        return true;
    }
    if (!j->has_sink) judge_note(j, "the dump has no sink: none is expected in the softmax");
    a.grads =
        cg_dump_has(d, CG_DUMP_DOUT) && (a.has[A_QUERY] || a.has[A_KV] || a.has[A_COMPRESSED] || a.has[A_SINK]);
    for (int q = A_QUERY; q < A_QUANTITIES; q++) {
        if (a.has[q] && !a.grads) judge_note(j, "%s is not judged: dout is needed", quantity[q].name);
        a.has[q] &= a.grads && (q != A_SINK || j->has_sink) && (q != A_COMPRESSED || j->has_logits);
    }
    judge_stat stats[A_QUANTITIES];
    judge_stat_init(stats, A_QUANTITIES);
    sums total = {0};
    a.k_largest[0] = malloc((size_t)(d->T + 1) * sizeof(double));
    a.k_largest[1] = malloc((size_t)(j->key0[d->B] + 1) * sizeof(double));
    bool ok = a.k_largest[0] && a.k_largest[1];
    if (ok) {
        for (int64_t t = 0; t < d->T; t++) a.k_largest[0][t] = largest(j->kv + t * d->D, d->D);
        for (int64_t k = 0; j->has_logits && k < j->key0[d->B]; k++)
            a.k_largest[1][k] = largest(j->ckv + k * d->D, d->D);
        ok = find_forms(&a) && (!a.grads || sums_new(&a, &total, 0, d->T)) &&
             pass(&a, stats, false, a.grads ? &total : NULL);
        a.alive_out =
            a.has[A_OUTPUT] && stats[A_OUTPUT].worst_units > j->allowed ? (1u << V_LSE_NO_SINK) - 1 : 0;
        a.alive_query = a.has[A_QUERY] && stats[A_QUERY].worst_units > j->allowed ? (1u << VARIANTS) - 1 : 0;
        if (ok && (a.alive_out | a.alive_query)) ok = pass(&a, NULL, true, NULL);
        ok = ok && report(&a, stats, &total, error);
    }
    free(a.k_largest[0]);
    free(a.k_largest[1]);
    free(total.kv[0]);
    return ok || cg_fail(error, CG_FAILED, "out of memory for attention over %lld rows", (long long)d->T);
}
