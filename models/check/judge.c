#include "models/check/judge.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/shown.h"
#include "core/math/vec.h"

const double judge_rounding[JUDGE_LEVELS] = {0x1p-53, 0x1p-24, 0x1p-11, 0x1p-9};
const char *const judge_level_name[JUDGE_LEVELS] = {"float64", "float32", "float16 or tf32", "bfloat16"};

static double dot(const double *a, const double *b, int64_t n) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

static float dot_f32(const float *a, const float *b, int64_t n) {
    float sum = 0;
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

static double largest(const double *x, int64_t n) {
    double max = 0;
    for (int64_t i = 0; i < n; i++) max = fabs(x[i]) > max ? fabs(x[i]) : max;
    return max;
}

/* ---- the row ---- */

bool judge_row_new(const judge *j, judge_row *r) {
    const cg_dump *d = j->d;
    const size_t n = (size_t)d->N + 1, H = (size_t)d->H, G = (size_t)d->Hi;
    const int64_t lists = d->K > d->array[CG_DUMP_ATTN_TOPK].width ? d->K : d->array[CG_DUMP_ATTN_TOPK].width;
    const size_t K = d->K < 0    ? n
                     : lists > 0 ? (size_t)lists
                                 : 0; /* the wider of the two, or what all keys need */
    size_t wide = H * (size_t)d->D;
    if (G * (size_t)(d->Di + 1) > wide) wide = G * (size_t)(d->Di + 1);
    if (n > wide) wide = n;
    if (K > wide) wide = K;
    const size_t doubles =
        H * (size_t)d->D + 2 * H * n + 3 * H + G * (size_t)d->Di + G + G * n + 10 * n + 4 * wide;
    *r = (judge_row){0};
    double *x = r->block = calloc(1, doubles * sizeof *x + (K + 1) * sizeof(int64_t) + 2 * n);
    if (!x) return false;
    r->q = x, x += H * (size_t)d->D;
    r->logits = x, x += H * n;
    r->exps = x, x += H * n;
    r->max = x, x += H;
    r->window = x, x += H;
    r->heads = x, x += H;
    r->qi = x, x += G * (size_t)d->Di;
    r->w = x, x += G;
    r->dots = x, x += G * n;
    for (int i = 0; i < 2; i++, x += n) r->scores[i] = x;
    for (int i = 0; i < 8; i++, x += n) r->a[i] = x;
    for (int i = 0; i < 4; i++, x += wide) r->x[i] = x;
    r->list = (int64_t *)x;
    r->selected[0] = (unsigned char *)(r->list + K + 1);
    r->selected[1] = r->selected[0] + n;
    return true;
}

void judge_row_free(judge_row *r) { free(r->block); }

void judge_row_place(const judge *j, judge_row *r, int64_t t) {
    const cg_dump *d = j->d;
    r->t = t;
    r->segment = d->segment[t];
    r->position = r->segment < 0 ? t : t - d->start[r->segment];
    r->real = cg_dump_is_real(d, t);
    r->n = cg_dump_visible(d, t);
    r->n_selected[0] = r->n_selected[1] = 0;
    r->unclear = false;
}

/* The width largest of n scores, ties to the lower index, marked. */
static int64_t mark_largest(const double *scores, int64_t n, int64_t width, int64_t *list,
                            unsigned char *marked) {
    int64_t count = 0;
    memset(marked, 0, (size_t)n);
    for (int64_t k = 0; k < n && width > 0; k++) {
        int64_t at = count;
        if (count == width && !(scores[k] > scores[list[count - 1]])) continue;
        while (at > 0 && scores[k] > scores[list[at - 1]]) at--;
        count = count < width ? count + 1 : width;
        memmove(list + at + 1, list + at, (size_t)(count - 1 - at) * sizeof *list);
        list[at] = k;
    }
    for (int64_t i = 0; i < count; i++) marked[list[i]] = 1;
    return count;
}

/* Some score lies as near to the cut as arithmetic in bf16 may move it. */
static bool is_unclear(const judge *j, const judge_row *r) {
    const double room = 8 * judge_score_noise(j, r) * (judge_rounding[JUDGE_BF16] / judge_rounding[JUDGE_F32]);
    for (int form = 0; form < 2; form++) {
        double least = INFINITY, most = -INFINITY; /* of the selected, of the others */
        for (int64_t i = 0; i < r->n; i++)
            if (r->selected[form][i])
                least = fmin(least, r->scores[form][i]);
            else
                most = fmax(most, r->scores[form][i]);
        if (least - most <= room) return true;
    }
    return false;
}

void judge_row_scores(const judge *j, judge_row *r) {
    const cg_dump *d = j->d;
    const int64_t n = r->n, G = d->Hi, E = d->Di;
    if (j->has_dots) {
        cg_dump_row(d, CG_DUMP_Q_INDEXER, r->t, r->qi);
        cg_dump_row(d, CG_DUMP_WEIGHTS, r->t, r->w);
        for (int64_t g = 0; g < G; g++) r->w[g] *= j->weights_factor;
        const double *k = j->ki + (r->segment < 0 ? 0 : j->key0[r->segment]) * E;
        for (int64_t i = 0; i < n; i++)
            for (int64_t g = 0; g < G; g++) r->dots[g * n + i] = dot(r->qi + g * E, k + i * E, E);
        for (int64_t i = 0; i < n; i++) r->scores[0][i] = r->scores[1][i] = 0;
        for (int64_t g = 0; g < G; g++)
            for (int64_t i = 0; i < n; i++) {
                const double x = r->dots[g * n + i];
                r->scores[0][i] += r->w[g] * (x > 0 ? x : 0);
                r->scores[1][i] += r->w[g] * x;
            }
        r->largest_dot = largest(r->dots, G * n);
        for (int64_t i = 0; i < n; i++) /* products that cancel leave their rounding behind */
            r->largest_dot =
                fmax(r->largest_dot,
                     j->ki_largest[(r->segment < 0 ? 0 : j->key0[r->segment]) + i] * largest(r->qi, G * E));
    } else if (j->has_scores && r->segment >= 0) {
        cg_dump_columns(d, CG_DUMP_SCORES, r->t, n, r->scores[0]);
        memcpy(r->scores[1], r->scores[0], (size_t)n * sizeof(double));
    }
    /* rounding of a score grows with its terms, not with their sum */
    r->largest_score = largest(r->scores[0], n);
    if (j->has_dots) {
        double terms = 0;
        for (int64_t g = 0; g < G; g++) terms += fabs(r->w[g]);
        r->largest_score = fmax(r->largest_score, terms * r->largest_dot / sqrt((double)(G > 0 ? G : 1)));
    }
    if (j->has_list) {
        memset(r->selected[0], 0, (size_t)n);
        if (r->segment >= 0) {
            cg_dump_list(d, CG_DUMP_TOPK, r->t, r->list);
            for (int64_t k = 0; k < d->K; k++)
                if (r->list[k] >= 0 && r->list[k] < n && !r->selected[0][r->list[k]]) {
                    r->selected[0][r->list[k]] = 1;
                    r->n_selected[0]++;
                }
        }
        memcpy(r->selected[1], r->selected[0], (size_t)n);
        r->n_selected[1] = r->n_selected[0];
    } else {
        for (int form = 1; form >= 0; form--) /* the list stays that of scores with ReLU */
            r->n_selected[form] =
                mark_largest(r->scores[form], n, d->K < 0 ? n : d->K, r->list, r->selected[form]);
        r->unclear = is_unclear(j, r);
    }
}

void judge_row_attention(const judge *j, judge_row *r) {
    const cg_dump *d = j->d;
    const int64_t n = r->n, H = d->H, D = d->D;
    if (!j->has_logits) return;
    cg_dump_row(d, CG_DUMP_QUERY, r->t, r->q);
    const double *k = j->ckv + (r->segment < 0 ? 0 : j->key0[r->segment]) * D;
    for (int64_t i = 0; i < n; i++)
        for (int64_t h = 0; h < H; h++) r->logits[h * n + i] = j->scale * dot(r->q + h * D, k + i * D, D);
    r->largest_logit =
        fmax(largest(r->logits, H * n), fabs(j->scale) * largest(r->q, H * D) * largest(k, n * D));
    for (int64_t h = 0; h < H; h++) {
        double max = -INFINITY, *e = r->exps + h * n;
        for (int64_t i = 0; i < n; i++) max = r->logits[h * n + i] > max ? r->logits[h * n + i] : max;
        for (int64_t i = 0; i < n; i++) e[i] = r->logits[h * n + i] - max;
        cg_exp_f64(n, e, e);
        r->max[h] = max;
    }
    if (j->has_window && r->segment >= 0) {
        const int64_t from = r->position - d->window + 1 > 0 ? r->position - d->window + 1 : 0;
        const double *kv = j->kv + d->start[r->segment] * D;
        for (int64_t h = 0; h < H; h++) {
            double max = -INFINITY, sum = 0;
            for (int64_t p = from; p <= r->position; p++) {
                const double x = j->scale * dot(r->q + h * D, kv + p * D, D);
                if (x > max) {
                    sum = sum * exp(max - x) + 1;
                    max = x;
                } else {
                    sum += exp(x - max);
                }
            }
            r->window[h] = max + log(sum);
            r->largest_logit = fmax(r->largest_logit, fabs(max));
        }
    } else if (j->has_lse) {
        cg_dump_row(d, CG_DUMP_WINDOW_LSE, r->t, r->window);
        if (d->lse_base == 2)
            for (int64_t h = 0; h < H; h++) r->window[h] *= log(2);
    }
}

cg_contract_row judge_contract_row(const judge *j, const judge_row *r, int scores) {
    return (cg_contract_row){.n_heads = j->d->H,
                             .n_keys = r->n,
                             .logits = r->logits,
                             .window_lse = j->has_window || j->has_lse ? r->window : NULL,
                             .sink = j->has_sink ? j->sink : NULL,
                             .scores = r->scores[0],
                             .linear_scores = r->scores[1],
                             .selected = r->selected[scores],
                             .max = r->max,
                             .exps = r->exps};
}

double judge_logit_noise(const judge *j, const judge_row *r) { return j->noise_logits * r->largest_logit; }
double judge_score_noise(const judge *j, const judge_row *r) {
    return (j->has_dots ? j->noise_dots : 0x1p-24) * r->largest_score;
}
double judge_dot_noise(const judge *j, const judge_row *r) { return j->noise_dots * r->largest_dot; }

double judge_floor(double stored) {
    return stored < 0x1p-30 ? 0x1p-1022 : stored == 0x1p-11 ? 0x1p-24 : 0x1p-126; /* f64, f16, f32 and bf16 */
}

/* ---- how much float dot products miss ---- */

static void round_f32(const double *x, int64_t n, float *y) {
    for (int64_t i = 0; i < n; i++) y[i] = (float)x[i];
}

/* Rows of a sample, in f32 beside f64. */
static bool measure_noise(judge *j, cg_error *error) {
    const cg_dump *d = j->d;
    judge_row r;
    const int64_t D = d->D > d->Di ? d->D : d->Di;
    float *a = calloc((size_t)D * 2 + 2, sizeof *a), *b = a + D + 1;
    j->noise_logits = j->noise_dots = 0x1p-23;
    if (!a || !judge_row_new(j, &r)) {
        free(a);
        return cg_fail(error, CG_FAILED, "out of memory for a row of %lld keys", (long long)d->N);
    }
    const int64_t step = d->T / 16 + 1;
    for (int64_t t = d->T - 1; t >= 0; t -= step) {
        if (!cg_dump_is_real(d, t)) continue;
        judge_row_place(j, &r, t);
        judge_row_scores(j, &r);
        judge_row_attention(j, &r);
        for (int64_t i = 0; i < r.n; i += r.n / 64 + 1) {
            if (j->has_logits && r.largest_logit > 0) {
                round_f32(j->ckv + (j->key0[r.segment] + i) * d->D, d->D, b);
                for (int64_t h = 0; h < d->H; h++) {
                    round_f32(r.q + h * d->D, d->D, a);
                    const double x = (double)((float)j->scale * dot_f32(a, b, d->D));
                    j->noise_logits = fmax(j->noise_logits, fabs(x - r.logits[h * r.n + i]) / r.largest_logit);
                }
            }
            if (j->has_dots && r.largest_dot > 0) {
                round_f32(j->ki + (j->key0[r.segment] + i) * d->Di, d->Di, b);
                for (int64_t g = 0; g < d->Hi; g++) {
                    round_f32(r.qi + g * d->Di, d->Di, a);
                    const double x = (double)dot_f32(a, b, d->Di);
                    j->noise_dots = fmax(j->noise_dots, fabs(x - r.dots[g * r.n + i]) / r.largest_dot);
                }
            }
        }
    }
    judge_row_free(&r);
    free(a);
    return true;
}

/* ---- open ---- */

static double *keys_of(const cg_dump *d, cg_dump_id id, int64_t width, const int64_t *key0) {
    double *x = malloc((size_t)(key0[d->B] * width + 1) * sizeof *x);
    for (int64_t s = 0; x && s < d->B; s++)
        for (int64_t i = 0; i < d->n_keys[s]; i++) cg_dump_key(d, id, s, i, x + (key0[s] + i) * width);
    return x;
}

/* Nothing but zeros and what lies below f32's normal numbers: f32 may have made it of anything there. */
static bool is_flushed(const cg_dump_array *a) {
    const int64_t n = cg_shape_count(&a->shape);
    for (int64_t i = 0; i < n; i++)
        if (!(fabs(((const double *)a->data)[i]) < 0x1p-126)) return false;
    return n > 0;
}

/* Own and free level of each answer. */
static void find_levels(judge *j) {
    const cg_dump *d = j->d;
    bool coarse = false; /* an input that f64 arithmetic did not make */
    for (int id = 0; id < CG_DUMP_ARRAYS; id++) {
        const bool zero = d->array[id].name && d->array[id].dtype == CG_F64 && is_flushed(&d->array[id]);
        const cg_dtype held = zero ? CG_F32 : cg_dump_holds(d, (cg_dump_id)id);
        j->stored[id] = cg_dtype_rounding(held);
        j->own[id] = held == CG_F64 ? JUDGE_F64 : JUDGE_F32;
        if (!d->array[id].name) continue;
        if (id < CG_DUMP_TOPK)
            coarse |= held != CG_F64;
        else if (!zero && j->stored[id] > cg_dtype_rounding(d->array[id].dtype) && id >= CG_DUMP_OUTPUT)
            judge_note(j, "%s holds %s numbers in %s and is judged at their rounding", cg_dump_names[id],
                       cg_dtype_name(held), cg_dtype_name(d->array[id].dtype));
    }
    for (int id = 0; id < CG_DUMP_ARRAYS; id++) {
        j->free[id] = coarse ? JUDGE_F32 : j->own[id];
        j->level[id] = j->own[id];
    }
}

bool judge_open(judge *j, const cg_dump *d, const cg_verdict_options *o, cg_verdict *v, cg_error *error) {
    *j = (judge){.d = d, .v = v, .tolerance = o->tolerance, .n_worst = o->n_worst};
    j->allowed = o->tolerance > 0 ? 1 : 4;
    j->scale = d->scale;
    j->weights_factor = 1;
    j->ceiling = JUDGE_BF16;
    if (d->passed_over[0]) judge_note(j, "%s", d->passed_over);
    find_levels(j);
    j->has_logits = cg_dump_has(d, CG_DUMP_QUERY) && cg_dump_has(d, CG_DUMP_COMPRESSED_KV);
    j->has_window = cg_dump_has(d, CG_DUMP_KV) && cg_dump_has(d, CG_DUMP_QUERY);
    j->has_lse = !j->has_window && cg_dump_has(d, CG_DUMP_WINDOW_LSE);
    j->has_sink = j->has_window && cg_dump_has(d, CG_DUMP_SINK);
    j->has_dots = cg_dump_has(d, CG_DUMP_Q_INDEXER) && cg_dump_has(d, CG_DUMP_WEIGHTS) &&
                  cg_dump_has(d, CG_DUMP_K_INDEXER);
    j->has_scores = j->has_dots || cg_dump_has(d, CG_DUMP_SCORES);
    j->has_list = cg_dump_has(d, CG_DUMP_TOPK);
    if ((j->has_logits || j->has_window) && isnan(d->scale))
        return cg_fail(error, CG_BAD_INPUT,
                       "softmax_scale is needed (what q.k is multiplied by): give --softmax-scale X");
    if (j->has_window && !d->window)
        return cg_fail(error, CG_BAD_INPUT,
                       "window is needed (tokens, the query's own included): give --window N");
    j->key0 = calloc((size_t)d->B + 1, sizeof *j->key0);
    if (!j->key0) return cg_fail(error, CG_FAILED, "out of memory for %lld segments", (long long)d->B);
    for (int64_t s = 0; s < d->B; s++) {
        j->key0[s + 1] = j->key0[s] + d->n_keys[s];
        j->counts.segments += d->real[s] > 0;
    }
    j->counts.physical = d->T;
    for (int64_t t = 0; t < d->T; t++) {
        const bool real = cg_dump_is_real(d, t);
        j->counts.real += real;
        j->counts.visible += real && cg_dump_visible(d, t) > 0;
    }
    bool ok = true;
    if (j->has_logits) ok &= (j->ckv = keys_of(d, CG_DUMP_COMPRESSED_KV, d->D, j->key0)) != NULL;
    if (j->has_dots) ok &= (j->ki = keys_of(d, CG_DUMP_K_INDEXER, d->Di, j->key0)) != NULL;
    if (j->has_dots) ok &= (j->ki_largest = malloc((size_t)(j->key0[d->B] + 1) * sizeof(double))) != NULL;
    if (j->has_window) ok &= (j->kv = malloc((size_t)(d->T * d->D + 1) * sizeof(double))) != NULL;
    if (j->has_sink) ok &= (j->sink = malloc((size_t)(d->H + 1) * sizeof(double))) != NULL;
    if (!ok)
        return cg_fail(error, CG_FAILED, "out of memory for %lld compressed rows in f64",
                       (long long)j->key0[d->B]);
    for (int64_t t = 0; j->has_window && t < d->T; t++) cg_dump_row(d, CG_DUMP_KV, t, j->kv + t * d->D);
    if (j->has_sink) cg_dump_row(d, CG_DUMP_SINK, 0, j->sink);
    for (int64_t i = 0; j->has_dots && i < j->key0[d->B]; i++)
        j->ki_largest[i] = largest(j->ki + i * d->Di, d->Di);
    return measure_noise(j, error);
}

void judge_close(judge *j) {
    free(j->key0);
    free(j->ckv);
    free(j->ki);
    free(j->kv);
    free(j->sink);
    free(j->ki_largest);
}

/* ---- comparison ---- */

static double error_of(double got, double want) {
    if (got == want || (isnan(got) && isnan(want))) return 0;
    const double error = fabs(got - want);
    return isnan(error) ? INFINITY : error;
}

double judge_unit(const judge *j, cg_dump_id id, judge_level level, double want, double noise) {
    const double e = j->stored[id], share = level > JUDGE_F32 ? 0.375 : level == JUDGE_F64 ? 4 : 1;
    const double computed = noise * share * (judge_rounding[level] / judge_rounding[JUDGE_F32]);
    return computed + e * fabs(want) + (noise > 0 ? judge_floor(e) : 0);
}

static double units_of(double error, double unit) {
    return error == 0 ? 0 : unit > 0 ? error / unit : INFINITY;
}

bool judge_same(const judge *j, cg_dump_id id, int64_t n, const double *got, const double *want,
                const double *noise) {
    const double wide = j->tolerance * (j->tolerance > 0 ? largest(want, n) : 0);
    for (int64_t i = 0; i < n; i++) {
        const double error = error_of(got[i], want[i]);
        const double unit = j->tolerance > 0 ? wide : judge_unit(j, id, j->level[id], want[i], noise[i]);
        if (error > 0 && !(error <= j->allowed * unit)) return false;
    }
    return true;
}

static void keep_worst(judge_stat *s, const cg_difference *d, int n_worst) {
    int at = s->n_worst;
    while (at > 0 && d->units > s->worst[at - 1].units) at--;
    if (at >= n_worst) return;
    s->n_worst = s->n_worst < n_worst ? s->n_worst + 1 : n_worst;
    memmove(&s->worst[at + 1], &s->worst[at], (size_t)(s->n_worst - 1 - at) * sizeof s->worst[0]);
    s->worst[at] = *d;
}

/* ---- one factor ---- */

static const judge_factor any_factor = {-INFINITY, INFINITY, 0, 0, 0};

/* The factors that make got of want: a wanted number well above its rounding says something. */
static void narrow(const judge *j, judge_factor *f, double got, double want, double unit) {
    const double rounding = j->allowed * unit;
    if (!(fabs(want) > 2 * rounding)) { /* NaN too */
        const double size = unit > 0 ? fabs(got) / unit : got == 0 ? 0 : INFINITY;
        if (!(size <= f->other)) f->other = isnan(size) ? INFINITY : size;
        return;
    }
    const double ratio = got / want, room = fabs(ratio) * rounding / (fabs(want) - rounding);
    f->n++;
    f->off += !(fabs(ratio - 1) <= room);
    if (!(ratio - room <= f->lo)) f->lo = ratio - room;
    if (!(ratio + room >= f->hi)) f->hi = ratio + room;
}

/* True: one factor makes all of it. */
static bool has_factor(const judge *j, const judge_factor *f) {
    const double most = fmax(fmax(fabs(f->lo), fabs(f->hi)), 1);
    return f->n > 0 && f->lo <= f->hi && f->other <= 2 * j->allowed * most;
}

static void meet(judge_factor *to, const judge_factor *from) {
    to->lo = fmax(to->lo, from->lo);
    to->hi = fmin(to->hi, from->hi);
    to->n += from->n;
    to->off += from->off;
    to->other = fmax(to->other, from->other);
}

double judge_simplest(double lo, double hi) {
    if (lo < 0 && hi < 0) return -judge_simplest(-hi, -lo);
    if (lo <= 0 && hi >= 0) return 0;
    const double middle = lo + (hi - lo) / 2;
    for (int size = 1; size <= 1024; size++) /* p / q with p * q = size */
        for (int q = 1; q <= size; q++) {
            const double x = (double)size / q / q;
            if (size % q == 0 && x >= lo && x <= hi) return x;
        }
    return middle;
}

bool judge_factor_of(const judge *j, const judge_stat *const *stats, const cg_dump_id *ids, int n,
                     double *factor) {
    for (judge_level level = JUDGE_F64; level < JUDGE_LEVELS; level++) {
        judge_factor all = any_factor;
        bool own = true;
        for (int i = 0; i < n; i++) {
            own &= level >= j->own[ids[i]];
            meet(&all, &stats[i]->factor[level]);
        }
        if (!own || !has_factor(j, &all)) continue;
        *factor = judge_simplest(all.lo, all.hi);
        /* one of but few numbers, for which the bars of the others leave room, is none */
        return !(all.lo <= 1 && all.hi >= 1) && all.off * 4 >= all.n && (all.off > 1 || all.n == 1);
    }
    return false;
}

/* ---- rows ---- */

void judge_compare(const judge *j, cg_dump_id id, judge_stat *s, int64_t segment, int64_t position, int64_t t,
                   int64_t n, int64_t per_head, const double *got, const double *want, const double *noise,
                   const double *kink, int64_t independent) {
    const double wide = j->tolerance * (j->tolerance > 0 ? largest(want, n) : 0);
    cg_difference first = {.segment = segment, .position = position, .head = -1}, worst = first;
    bool differs = false, beyond = false, excused = false;
    judge_factor row = any_factor;
    for (int64_t i = 0; i < n; i++) {
        const double error = error_of(got[i], want[i]);
        double own = 0;
        for (judge_level level = j->own[id]; level < JUDGE_LEVELS; level++) {
            const double corner = kink && level > JUDGE_F32 ? kink[i] : 0;
            const double plain = j->tolerance > 0 ? wide : judge_unit(j, id, level, want[i], noise[i]),
                         unit = j->tolerance > 0 ? wide : plain + corner;
            const double units = units_of(error, unit);
            if (level == j->own[id]) own = units;
            if (!(units <= s->worst_units[level])) s->worst_units[level] = units;
            if (s->factor[level].lo <= s->factor[level].hi) narrow(j, &s->factor[level], got[i], want[i], unit);
            if (level == JUDGE_BF16) excused |= corner > 0 && units_of(error, plain) > j->allowed;
            if (level != j->free[id]) continue;
            beyond |= units > j->allowed;
            narrow(j, &row, got[i], want[i], unit);
        }
        if (error > s->max_error) s->max_error = error;
        if (fabs(want[i]) > s->max_want) s->max_want = fabs(want[i]);
        const cg_difference here = {segment, position, per_head ? i / per_head : -1, got[i], want[i], own};
        if (own > j->allowed && !differs) {
            differs = true;
            first = here;
        }
        if (own > worst.units) worst = here;
    }
    s->rows += row.n > (n > 1) || beyond; /* one key has all of the mass, whatever the rounding */
    s->beyond += beyond;
    s->excused += beyond && excused;
    if (row.n >= 3 && independent >= 2) {
        s->free_rows++;
        s->free_beyond += beyond && !has_factor(j, &row);
    }
    if (row.n > 0 && has_factor(j, &row)) {
        s->row_lo = fmin(s->row_lo, row.hi);
        s->row_hi = fmax(s->row_hi, row.lo);
    }
    if (differs && (s->first_row < 0 || t < s->first_row)) {
        s->first_row = t;
        s->first = first;
    }
    if (worst.units > 0 && j->n_worst > 0)
        keep_worst(s, &worst, j->n_worst < CG_WORST_ROWS ? j->n_worst : CG_WORST_ROWS);
}

void judge_stat_init(judge_stat *stats, int n) {
    memset(stats, 0, (size_t)n * sizeof *stats);
    for (int i = 0; i < n; i++) {
        stats[i].first_row = -1;
        stats[i].row_lo = INFINITY, stats[i].row_hi = -INFINITY;
        for (int level = 0; level < JUDGE_LEVELS; level++) stats[i].factor[level] = any_factor;
    }
}

void judge_stat_merge(judge_stat *to, const judge_stat *from, int n_worst) {
    to->max_error = fmax(to->max_error, from->max_error);
    to->max_want = fmax(to->max_want, from->max_want);
    for (int level = 0; level < JUDGE_LEVELS; level++) {
        to->worst_units[level] = fmax(to->worst_units[level], from->worst_units[level]);
        meet(&to->factor[level], &from->factor[level]);
    }
    to->rows += from->rows, to->beyond += from->beyond, to->excused += from->excused;
    to->free_rows += from->free_rows, to->free_beyond += from->free_beyond;
    to->row_lo = fmin(to->row_lo, from->row_lo), to->row_hi = fmax(to->row_hi, from->row_hi);
    if (from->first_row >= 0 && (to->first_row < 0 || from->first_row < to->first_row)) {
        to->first_row = from->first_row;
        to->first = from->first;
    }
    for (int i = 0; i < from->n_worst; i++)
        keep_worst(to, &from->worst[i], n_worst < CG_WORST_ROWS ? n_worst : CG_WORST_ROWS);
}

judge_outcome judge_outcome_of(const judge *j, cg_dump_id id, const judge_stat *s, judge_level *level) {
    const judge_level own = j->own[id], free = j->free[id];
    for (*level = own; *level < JUDGE_LEVELS; ++*level)
        if (!(s->worst_units[*level] > j->allowed)) break;
    if (*level <= free) return JUDGE_SAME;
    if (*level > j->ceiling || *level == JUDGE_LEVELS) return JUDGE_OTHER;
    /* rounding shows in most rows, and not as a factor, neither of all numbers nor row by row */
    const judge_factor *factor = &s->factor[free];
    if (s->beyond >= 3 && factor->n >= 6 && has_factor(j, factor) &&
        fmin(fabs(factor->lo - 1), fabs(factor->hi - 1)) > 8 * j->stored[id])
        return JUDGE_OTHER;
    if (j->stored[id] <= judge_rounding[JUDGE_F32]) { /* a coarse type hides what most rows were made in */
        if (s->free_rows >= 8 && s->beyond * 8 < s->rows) return JUDGE_OTHER;
        if (s->free_rows >= 8 && s->free_beyond * 8 < s->free_rows) return JUDGE_OTHER;
    }
    const bool free_enough = s->free_rows ? s->free_beyond >= 2 : s->beyond >= 8;
    const int64_t shown = s->beyond - s->excused; /* what takes a corner's other side shows no rounding */
    return shown >= 3 && shown >= s->excused && free_enough ? JUDGE_SAME : JUDGE_UNSURE;
}

/* ---- the verdict ---- */

cg_quantity *judge_add(judge *j, const char *name, cg_dump_id id, const judge_stat *s) {
    cg_verdict *v = j->v;
    if (v->n_quantities == CG_QUANTITIES) return &v->quantities[CG_QUANTITIES - 1];
    cg_quantity *q = &v->quantities[v->n_quantities++];
    judge_level level;
    const judge_outcome outcome = judge_outcome_of(j, id, s, &level);
    *q = (cg_quantity){.name = name,
                       .tensor = j->d->array[id].name,
                       .ok = outcome == JUDGE_SAME,
                       .unsure = outcome == JUDGE_UNSURE,
                       .worst_rel = s->max_error == 0 ? 0
                                    : s->max_want > 0 ? s->max_error / s->max_want
                                                      : INFINITY,
                       .worst_units = s->worst_units[outcome == JUDGE_SAME ? level : j->own[id]],
                       .has_first = outcome != JUDGE_SAME && s->first_row >= 0,
                       .first = s->first,
                       .n_worst = s->n_worst};
    memcpy(q->worst, s->worst, sizeof q->worst);
    if (outcome == JUDGE_SAME && level > j->own[id]) q->computed_in = judge_level_name[level];
    return q;
}

cg_quantity *judge_add_unjudged(judge *j, const char *name, cg_dump_id id, const char *lacks) {
    cg_verdict *v = j->v;
    if (v->n_quantities == CG_QUANTITIES) return &v->quantities[CG_QUANTITIES - 1];
    cg_quantity *q = &v->quantities[v->n_quantities++];
    *q = (cg_quantity){.name = name, .tensor = j->d->array[id].name, .unjudged = true};
    snprintf(q->says, sizeof q->says, "not judged: %s needed", lacks);
    return q;
}

void judge_note(judge *j, const char *format, ...) {
    if (j->v->n_notes == CG_NOTES) return;
    va_list args;
    va_start(args, format);
    char *note = j->v->notes[j->v->n_notes++];
    const size_t room = sizeof j->v->notes[0];
    if (vsnprintf(note, room, format, args) >= (int)room) cg_shown_trim(note);
    va_end(args);
}

void judge_fault(judge *j, const char *name) {
    for (int i = 0; i < j->v->n_faults; i++)
        if (!strcmp(j->v->faults[i], name)) return;
    if (j->v->n_faults < CG_VERDICT_FAULTS)
        snprintf(j->v->faults[j->v->n_faults++], sizeof j->v->faults[0], "%s", name);
}

/* Whether an answer from number `from` on is another than the expected, whatever the arithmetic. */
static bool any_differs(const cg_verdict *v, int from) {
    for (int i = from; i < v->n_quantities; i++) {
        const cg_quantity *q = &v->quantities[i];
        if (!q->ok && !q->unsure && !q->unjudged) return true;
    }
    return false;
}

/* Coarse arithmetic explains no answer from number `from` on: what is wrong with others that nothing explains may be
 * what these show. */
static void doubt_arithmetic(cg_verdict *v, int from) {
    for (int i = from; i < v->n_quantities; i++) {
        cg_quantity *q = &v->quantities[i];
        if (!q->computed_in) continue;
        q->ok = false, q->unsure = true;
        snprintf(q->says, sizeof q->says, "as expected to the rounding of %s at best", q->computed_in);
        q->computed_in = NULL;
    }
}

/* Coarser arithmetic, once for all answers that show it. */
static void say_arithmetic(judge *j) {
    const cg_verdict *v = j->v;
    for (int level = JUDGE_F64; level < JUDGE_LEVELS; level++) {
        char names[300] = "";
        int n = 0;
        for (int i = 0; i < v->n_quantities; i++) {
            const size_t used = strlen(names);
            if (v->quantities[i].computed_in == judge_level_name[level])
                snprintf(names + used, sizeof names - used, "%s%s", n++ ? ", " : "", v->quantities[i].name);
        }
        if (n)
            judge_note(j, "%s %s probably computed in %s and %s judged at its rounding", names,
                       n > 1 ? "were" : "was", judge_level_name[level], n > 1 ? "are" : "is");
    }
}

static cg_verdict *make_verdict(const cg_dump *d, const cg_verdict_options *o, cg_error *error) {
    cg_verdict *v = calloc(1, sizeof *v);
    const cg_contract expected = o->expected ? *o->expected : d->declared;
    judge j = {0};
    if (!v) {
        cg_fail(error, CG_FAILED, "out of memory for a verdict");
        return NULL;
    }
    bool ok = judge_open(&j, d, o, v, error) && judge_selection(&j, error);
    const int faults = v->n_faults, from = v->n_quantities;
    ok = ok && judge_attention(&j, error);
    const bool unexplained = v->n_faults == faults && any_differs(v, from);
    if (unexplained) doubt_arithmetic(v, from);
    const int known = v->n_faults, loss_from = v->n_quantities;
    ok = ok && judge_loss(&j, &expected, error);
    if (v->n_faults == known && !v->identified && (unexplained || any_differs(v, loss_from)))
        doubt_arithmetic(v, loss_from); /* the teacher is made of the attention */
    if (ok) say_arithmetic(&j);
    judge_close(&j);
    if (ok && !v->n_quantities)
        ok = cg_fail(error, CG_BAD_INPUT,
                     "nothing can be judged: the dump has inputs but no selection, output, target, loss or "
                     "gradient that they give");
    if (ok) {
        v->expected = expected;
        v->match = v->n_faults == 0;
        for (int i = 0; i < v->n_quantities; i++) v->match &= v->quantities[i].ok;
        v->cannot_tell = !v->match && !any_differs(v, 0) && v->n_faults == 0;
        return v;
    }
    free(v);
    return NULL;
}

/* What an answer says when it is read with the offsets that the code took. */
static void adopt_misread(cg_verdict *v, cg_verdict *read) {
    char sentence[sizeof v->sentence];
    for (int i = 0; i < v->n_quantities; i++)
        for (int k = 0; k < read->n_quantities; k++) {
            cg_quantity *q = &v->quantities[i];
            const cg_quantity *r = &read->quantities[k];
            if (q->ok || strcmp(q->name, r->name) || (!r->ok && !strstr(r->says, "as the contract below")))
                continue;
            q->unsure = false;
            snprintf(q->says, sizeof q->says, "as the offsets below have it%s%s", r->says[0] ? ", " : "",
                     r->says);
        }
    snprintf(sentence, sizeof sentence,
             "the code takes running sums of real lengths for the offsets of physical rows; read so, %.1000s",
             read->sentence);
    memcpy(v->sentence, sentence, sizeof sentence);
    v->identified = read->identified;
    v->contract = read->contract, v->gradient = read->gradient, v->gradient_differs = read->gradient_differs;
    memcpy(v->undetermined, read->undetermined, sizeof v->undetermined);
    memcpy(v->remaining, read->remaining, sizeof v->remaining);
    memcpy(v->tell_apart, read->tell_apart, sizeof v->tell_apart);
    v->numbers = read->numbers, v->rows = read->rows, v->n_fit = read->n_fit, v->factor = read->factor;
    v->cannot_tell = false;
    snprintf(v->faults[0], sizeof v->faults[0], "real-lengths-as-offsets");
    v->n_faults = 1;
    for (int i = 0; i < read->n_faults && v->n_faults < CG_VERDICT_FAULTS; i++)
        memcpy(v->faults[v->n_faults++], read->faults[i], sizeof v->faults[0]);
}

cg_verdict *cg_verdict_make(const cg_dump *d, const cg_verdict_options *o, cg_error *error) {
    cg_verdict *v = make_verdict(d, o, error);
    static const cg_dump_misreading ways[] = {CG_MISREAD_KEYS_PACKED, CG_MISREAD_KEYS_KEPT};
    bool adopted = false;
    for (int i = 0; v && v->judged_loss && !v->match && !v->identified && !adopted && i < 2; i++) {
        cg_error none = {0};
        cg_dump *view = cg_dump_misread(d, ways[i], &none);
        cg_verdict *read = view ? make_verdict(view, o, &none) : NULL;
        if (read && read->identified && read->numbers >= 3) {
            adopt_misread(v, read);
            adopted = true;
        }
        free(read);
        cg_dump_close(view);
    }
    return v;
}
