/* The search of models/check/judge_search.h. On a row where two combinations cannot differ (everything selected, one head, no
 * floor in reach) one is computed for both. Noise is that of f32 arithmetic throughout, see models/check/judge.h. */
#include "models/check/judge_search.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define F32 0x1p-24 /* judge_rounding[JUDGE_F32] */

const quantity_name judge_quantity[QUANTITIES] = {
    {"target", CG_DUMP_TARGET},
    {"log_predict", CG_DUMP_LOG_PREDICT},
    {"predict", CG_DUMP_PREDICT},
    {"kl", CG_DUMP_KL},
    {"loss", CG_DUMP_LOSS},
    {"grad.q_indexer", CG_DUMP_GRAD_Q_INDEXER},
    {"grad.weights", CG_DUMP_GRAD_WEIGHTS},
    {"grad.k_indexer", CG_DUMP_GRAD_K_INDEXER},
};

/* One row under one contract. */
typedef struct row_values {
    double *target, *target_noise, *log_p, *log_noise, *predict, *predict_noise; /* [n] */
    double kl, kl_noise, factor;
    double *e, *noise,
        *kink; /* [Hi + Hi * Di] gradients of weights and q, with their factor; what rounding changes */
    double *dk, *dk_noise, *dk_squares,
        *dk_kink; /* [keys, Di], [keys] each: sums over rows, the last two of squares */
    bool counts;
} row_values;

/* One chunk of rows. */
typedef struct piece {
    judge_row r;
    tables *tables;
    listed list[LISTED];
    compared c;
    row_values v[2];                /* of a contract, and of the one that it is told apart from */
    double *e, *noise, *kink, *got; /* [Hi + Hi * Di] a gradient, its noise, the dump's */
    double distance[TARGETS];       /* when measuring */
    int group[TARGETS], next[TARGETS];
    bool dead[TARGETS];      /* nothing is left of it */
    double factors[FACTORS]; /* of gradients, in the row's segment */
    double *block;
} piece;

bool judge_usable(const search *s, int t) {
    const target_key k = key_of(t);
    const judge *j = s->j;
    const int64_t ranks = k.heads == CG_HEADS_ARE_ALL ? 1 : k.heads == CG_HEADS_ARE_LOCAL_NORMALISED_4 ? 4 : 2;
    if (j->d->H % ranks != 0) return false;
    if (j->has_window && j->has_sink) return true;
    if (j->has_window || j->has_lse)
        return k.teacher == CG_TEACHER_IS_FULL || k.teacher == CG_TEACHER_IS_COMPRESSED;
    return k.teacher == CG_TEACHER_IS_COMPRESSED;
}

bool judge_weighable(int t) { return key_of(t).teacher != CG_TEACHER_IS_COMPRESSED; }

/* ---- the row's own sameness ---- */

/* Log of the smallest share that any head leaves for the support, under the fullest denominator. */
static double least_share(const judge *j, const judge_row *r) {
    double least = 0;
    for (int64_t h = 0; h < j->d->H; h++) {
        const double *e = r->exps + h * r->n;
        double all = 0, chosen[2] = {0, 0};
        for (int64_t i = 0; i < r->n; i++) {
            all += e[i];
            for (int f = 0; f < 2; f++) chosen[f] += r->selected[f][i] ? e[i] : 0;
        }
        const double few = chosen[0] < chosen[1] ? chosen[0] : chosen[1];
        double other = j->has_window || j->has_lse ? r->window[h] : -INFINITY;
        if (j->has_sink) other = fmax(other, j->sink[h]);
        /* log(few / (all + exp(other - max))), a factor of 2 aside */
        const double share = log(few) - fmax(log(all), other - r->max[h]) - log(3);
        if (!(share >= least)) least = share;
    }
    return least;
}

static int same_as(const search *s, const judge_row *r, int t, double least) {
    target_key k = key_of(t);
    if (r->n_selected[0] == r->n && r->n_selected[1] == r->n) k.support = 0;
    if (least > log(1e-9)) k.normalise = CG_NORMALISE_IS_EXACT;
    if (least > log(1e-30) && s->coarse) k.underflow = 0;
    if (s->j->d->H == 1) {
        k.heads = CG_HEADS_ARE_ALL; /* the teacher cancels too, but not in the weight of the row */
    }
    return number_of(k);
}

/* ---- expected rounding ---- */

/* target: relative, from the logits; a target in f32 before its division has float32's steps and far exponents. */
static void target_noises(const search *s, const judge_row *r, const cg_contract *c, const double *target,
                          double *noise) {
    double relative = 4 * F32 + 2 * judge_logit_noise(s->j, r), floor = 0;
    if (c->faults & CG_FAULT_TEACHER_UNDERFLOW) {
        relative += 250 * F32;
        floor = 0x1p-149 / (double)FLT_MIN * (double)s->j->d->H;
    }
    for (int64_t i = 0; i < r->n; i++) noise[i] = target[i] != 0 ? fabs(target[i]) * relative + floor : floor;
}

static double kl_noise(const search *s, const judge_row *r, const cg_contract *c, double kl,
                       const double *target, const double *log_p) {
    const judge *j = s->j;
    double size = 0;
    for (int64_t i = 0; i < r->n; i++)
        if (target[i] != 0) size += fabs(target[i]) * (fabs(log_p[i]) + 1);
    if (!isfinite(size)) return 0;
    double noise = (4 * F32 + 2 * judge_logit_noise(j, r)) * (fabs(kl) + 1) + 2 * judge_score_noise(j, r) +
                   2 * F32 * (size + 1);
    if (c->faults & CG_FAULT_TEACHER_UNDERFLOW) noise += 250 * F32 * size;
    return noise;
}

/* ---- gradients of a row ---- */

/* e [Hi + Hi * Di] = dw, dq unscaled, and what rounding may change in them; dscores and their noise [n]. */
static void gradient(const search *s, const judge_row *r, const cg_contract *c, const double *target,
                     const double *log_p, bool with_q, double *dscores, double *dnoise, double *e,
                     double *noise, double *kink) {
    const judge *j = s->j;
    const cg_dump *d = j->d;
    const int64_t n = r->n, G = d->Hi, E = d->Di;
    const double far = c->faults & CG_FAULT_TEACHER_UNDERFLOW ? 250 * F32 : 0;
    const double logit = 4 * F32 + 2 * judge_logit_noise(j, r) + far,
                 score = 4 * F32 + 2 * judge_score_noise(j, r);
    const double dot_noise = judge_dot_noise(j, r), corner = 8 * dot_noise, coarse = corner * 0x1p13;
    const cg_contract_row row = judge_contract_row(j, r, c->value[CG_AXIS_SCORES]);
    const double weight = cg_contract_row_weight(c, &row);
    cg_contract_dscores(c, &row, target, log_p, dscores);
    const bool sparse = c->value[CG_AXIS_SUPPORT] == CG_SUPPORT_IS_SPARSE;
    for (int64_t i = 0; i < n; i++) {
        const bool on = !sparse || row.selected[i];
        dnoise[i] =
            on ? weight * (exp(log_p[i]) * (score + F32 * fabs(log_p[i])) + fabs(target[i]) * logit) : 0;
        dscores[i] *= weight;
    }
    const int64_t key0 = j->key0[r->segment];
    const cg_contract_index index = {.n_heads = G,
                                     .head_dim = E,
                                     .n_keys = n,
                                     .q = r->qi,
                                     .w = r->w,
                                     .dots = r->dots,
                                     .k = j->ki + key0 * E};
    cg_contract_index_grad(c, &index, dscores, e, with_q ? e + G : NULL, NULL);
    const bool linear = c->value[CG_AXIS_SCORES] == CG_SCORES_ARE_LINEAR;
    const bool leak = linear || (c->faults & CG_FAULT_RELU_LEAK);
    for (int64_t g = 0; g < G; g++) {
        const double *dots = r->dots + g * n;
        double w = 0, q = 0, other_side = 0;
        for (int64_t i = 0; i < n; i++) {
            const double x = linear ? fabs(dots[i]) : dots[i] > 0 ? dots[i] : 0;
            w += x * dnoise[i] + fabs(dscores[i]) * dot_noise;
            q += (leak || dots[i] > -dot_noise ? dnoise[i] : 0) * j->ki_largest[key0 + i];
            if (fabs(dots[i]) <= corner)
                q += fabs(dscores[i]) * j->ki_largest[key0 + i]; /* either side of the corner */
            if (fabs(dots[i]) <= coarse && !leak) other_side += fabs(dscores[i]) * j->ki_largest[key0 + i];
        }
        e[g] *= j->weights_factor; /* towards the dump's weights */
        noise[g] = fabs(j->weights_factor) * w + 4 * F32 * fabs(e[g]);
        kink[g] = 0;
        for (int64_t i = G + g * E; with_q && i < G + (g + 1) * E; i++) {
            noise[i] = fabs(r->w[g]) * q + 4 * F32 * fabs(e[i]);
            kink[i] = fabs(r->w[g]) * other_side;
        }
    }
}

/* The dump's own, read once a row: weights, then q. */
static void read_gradient(const search *s, piece *p) {
    const int64_t G = s->j->d->Hi;
    if (s->has[Q_GRAD_W]) cg_dump_row(s->j->d, CG_DUMP_GRAD_WEIGHTS, p->r.t, p->got);
    if (s->has[Q_GRAD_Q]) cg_dump_row(s->j->d, CG_DUMP_GRAD_Q_INDEXER, p->r.t, p->got + G);
}

/* Which factors of the mask make the dump's elements from..to of p->e; DIRECTION stays where any factor does. */
static uint64_t fit_factors(const search *s, const piece *p, cg_dump_id id, int64_t from, int64_t to,
                            uint64_t mask) {
    const judge *j = s->j;
    /* unscaled here: what the type flushes, over the smallest factor there may be */
    const double flushed = judge_floor(j->stored[id]) * (double)(j->counts.physical + 1);
    double lo = -INFINITY, hi = INFINITY, other = 0, most = 0, row_largest = 0;
    bool some = false, says = false;
    if (j->tolerance > 0)
        for (int64_t i = from; i < to; i++) row_largest = fmax(row_largest, fabs(p->e[i]));
    for (int64_t i = from; i < to; i++) {
        const double e = p->e[i], got = p->got[i];
        const double unit = j->tolerance > 0 ? j->tolerance * row_largest
                                             : judge_unit(j, id, j->level[id], e, p->noise[i]) + flushed +
                                                   (j->level[id] > JUDGE_F32 ? p->kink[i] : 0);
        const double rounding = j->allowed * unit;
        if (isnan(e) || isnan(got)) {
            if (isnan(e) && isnan(got)) continue;
            return 0;
        }
        some |= got != 0;
        most = fmax(most, fabs(got));
        if (!(fabs(e) > 2 * rounding)) {
            if (got != 0) other = fmax(other, fabs(got) / unit);
            continue;
        }
        const double ratio = got / e, room = fabs(ratio) * rounding / (fabs(e) - rounding);
        lo = fmax(lo, ratio - room), hi = fmin(hi, ratio + room);
        says = true;
    }
    if (!some && says) { /* no gradient where there should be one, unless its factor is 0 */
        uint64_t zero = UINT64_C(1) << ZERO_FACTOR;
        for (int k = 0; k < FACTORS; k++) zero |= p->factors[k] == 0 ? UINT64_C(1) << k : 0;
        return mask & zero;
    }
    uint64_t left = !some ? mask & (DIRECTION | UINT64_C(1) << ZERO_FACTOR) : 0;
    double largest_factor = 0;
    for (int k = 0; k < FACTORS; k++) {
        if (!(mask >> k & 1)) continue;
        const double want = p->factors[k];
        largest_factor = fmax(largest_factor, fabs(want));
        if (want >= lo && want <= hi && other <= 2 * j->allowed * fabs(want) + 0x1p-40)
            left |= UINT64_C(1) << k;
    }
    if (says ? lo <= hi && other <= 2 * j->allowed * fmax(fabs(lo), fabs(hi))
             : other <= 2 * j->allowed * fmax(64 * largest_factor, 1))
        left |= mask & DIRECTION;
    return left;
}

/* ---- one row ---- */

typedef struct row_logs { /* log softmax for support and scores, made when asked for */
    double *at[2][FORMS];
    bool made[2][FORMS];
} row_logs;

static const double *logs_of(const search *s, piece *p, row_logs *logs, const cg_contract *c) {
    const int dense = c->value[CG_AXIS_SUPPORT], form = c->value[CG_AXIS_SCORES];
    if (!logs->made[dense][form]) {
        const cg_contract_row row = judge_contract_row(s->j, &p->r, form);
        cg_contract_log_predict(c, &row, logs->at[dense][form]);
        logs->made[dense][form] = true;
    }
    return logs->at[dense][form];
}

static bool in_support(const judge_row *r, const cg_contract *c, int64_t i) {
    return c->value[CG_AXIS_SUPPORT] == CG_SUPPORT_IS_DENSE || r->selected[c->value[CG_AXIS_SCORES]][i];
}

static void log_noises(const search *s, const judge_row *r, const cg_contract *c, bool predict,
                       const double *log_p, double *noise) {
    const double score = judge_score_noise(s->j, r);
    for (int64_t i = 0; i < r->n; i++) {
        const double u = 2 * score + 2 * F32 * (fabs(log_p[i]) + 1);
        noise[i] = !in_support(r, c, i) ? 0 : predict ? exp(log_p[i]) * (u + 2 * F32) + 0x1p-149 : u;
    }
}

/* The dump's logarithms; off the support 0 and -inf say the same. */
static void read_logs(const search *s, const judge_row *r, cg_dump_id id, double *got) {
    cg_dump_columns(s->j->d, id, r->t, r->n, got);
    for (int64_t i = 0; id == CG_DUMP_LOG_PREDICT && i < r->n; i++)
        if (got[i] == -INFINITY) got[i] = 0;
}

static void match_predictions(const search *s, piece *p, row_logs *logs) {
    judge_row *r = &p->r;
    for (int q = Q_LOG_PREDICT; q <= Q_PREDICT; q++) {
        if (!s->has[q]) continue;
        double *got = r->a[6], *noise = r->a[7], *want = r->x[0];
        read_logs(s, r, judge_quantity[q].id, got);
        for (int dense = 0; dense < 2; dense++)
            for (int form = 0; form < FORMS; form++) {
                if (!p->tables->predict[dense][form]) continue;
                const cg_contract c = contract_of(number_of((target_key){0, dense, 0, 0, 0}), 0, form, 0);
                const double *log_p = logs_of(s, p, logs, &c);
                log_noises(s, r, &c, q == Q_PREDICT, log_p, noise);
                for (int64_t i = 0; i < r->n; i++)
                    want[i] = q == Q_LOG_PREDICT ? log_p[i] : in_support(r, &c, i) ? exp(log_p[i]) : 0;
                if (!judge_same(s->j, judge_quantity[q].id, r->n, got, want, noise))
                    p->tables->predict[dense][form] = 0;
            }
    }
}

static void add_loss(loss_sums *to, double kl, double noise, int64_t segment_real) {
    to->sum += kl;
    to->noise += noise * noise;
    to->of_means += kl / (double)segment_real;
    to->noise_of_means += noise * noise / (double)segment_real / (double)segment_real;
}

/* Gradients of a group, scores in one form. Many derivatives are one on most rows: no prediction is small enough to be
 * clamped, the target sums to 1, no head's ReLU is 0. Each is looked at once. */
static void match_gradients(const search *s, piece *p, int t, int form, const double *target,
                            const double *log_p) {
    const judge_row *r = &p->r;
    tables *y = p->tables;
    double *dscores = p->r.a[6], *dnoise = p->r.a[7], sum = 0;
    const int64_t n = r->n, G = s->j->d->Hi, E = s->j->d->Di;
    bool clamped = false, dead = false;
    int same[SLOPES][EXTRAS];
    for (int64_t i = 0; i < n; i++) {
        sum += target[i];
        clamped |= log_p[i] < log((double)FLT_MIN);
    }
    for (int64_t i = 0; i < G * n && !dead && form == CG_SCORES_ARE_RELU; i++) dead = !(r->dots[i] > 0);
    const bool whole = fabs(sum - 1) <= 1e-15 * (double)(n + 1);
    for (int slope = 0; slope < SLOPES; slope++)
        for (int extra = 0; extra < EXTRAS; extra++) {
            const int as = slope == 2 && !clamped ? 0 : slope;
            same[slope][extra] = as * EXTRAS + (extra & ~(as == 0 && whole ? 1 : 0) & ~(dead ? 0 : 2));
        }
    for (int i = 0; i < SLOPES * EXTRAS * WEIGHTS; i++) {
        const int slope = i / WEIGHTS / EXTRAS, extra = i / WEIGHTS % EXTRAS, weight = i % WEIGHTS;
        uint64_t any = 0;
        if (same[slope][extra] != i / WEIGHTS) continue;
        for (int k = 0; k < SLOPES * EXTRAS; k++)
            for (int m = same[k / EXTRAS][k % EXTRAS] == i / WEIGHTS ? p->group[t] : -1; m >= 0; m = p->next[m])
                any |= y->grad[grad_number(m, k / EXTRAS, form, weight, k % EXTRAS)];
        if (!any) continue;
        const cg_contract c = gradient_contract(t, slope, form, weight, extra);
        gradient(s, r, &c, target, log_p, !s->has[Q_GRAD_W], dscores, dnoise, p->e, p->noise, p->kink);
        uint64_t left = s->has[Q_GRAD_W] ? fit_factors(s, p, CG_DUMP_GRAD_WEIGHTS, 0, G, any) : any;
        if (left && s->has[Q_GRAD_Q]) {
            if (s->has[Q_GRAD_W])
                gradient(s, r, &c, target, log_p, true, dscores, dnoise, p->e, p->noise, p->kink);
            left = fit_factors(s, p, CG_DUMP_GRAD_Q_INDEXER, G, G + G * E, left);
        }
        for (int k = 0; k < SLOPES * EXTRAS; k++)
            for (int m = same[k / EXTRAS][k % EXTRAS] == i / WEIGHTS ? p->group[t] : -1; m >= 0; m = p->next[m])
                y->grad[grad_number(m, k / EXTRAS, form, weight, k % EXTRAS)] &= left;
    }
}

/* Everything of one combination of target and row; members: the combinations that it stands for. */
static void match_group(const search *s, piece *p, row_logs *logs, int t, bool measure) {
    const judge *j = s->j;
    judge_row *r = &p->r;
    tables *y = p->tables;
    double *target = r->a[0], *noise = r->a[1], *got = r->a[2];
    const int64_t n = r->n;
    bool made[FORMS] = {false, false};
    for (int form = 0; form < FORMS; form++) {
        /* the target depends on the form of scores where the selection does */
        const cg_contract c = contract_of(t, 0, form, 0);
        const cg_contract_row row = judge_contract_row(j, r, form);
        const bool again = form == 0 || (!j->has_list && c.value[CG_AXIS_SUPPORT] == CG_SUPPORT_IS_SPARSE) ||
                           (c.faults & CG_FAULT_DENSE_OVER_SPARSE_LSE);
        bool wanted = false;
        for (int m = p->group[t]; m >= 0; m = p->next[m]) {
            wanted |= s->has[Q_TARGET] && (y->target[m * FORMS + form] || (measure && form == 0));
            for (int i = 0; i < KLS * WEIGHTS && s->has[Q_KL] && !wanted; i++)
                wanted |= y->kl[value_number(m, i / WEIGHTS, form, i % WEIGHTS)];
            for (int i = 0; i < SLOPES * WEIGHTS * EXTRAS && s->has_grad && !wanted; i++)
                wanted |= y->grad[grad_number(m, i / 8, form, i / 4 % 2, i % 4)] != 0;
            for (int i = s->first_listed[m]; i < s->first_listed[m + 1] && !wanted; i++)
                wanted |= s->list[i].form == form;
        }
        if (!wanted) continue;
        if (again || !made[0]) cg_contract_target(&c, &row, target, r->heads);
        made[form] = true;
        if (s->has[Q_TARGET]) {
            bool alive = measure;
            for (int m = p->group[t]; m >= 0; m = p->next[m]) alive |= y->target[m * FORMS + form];
            if (alive) {
                cg_dump_columns(j->d, CG_DUMP_TARGET, r->t, n, got);
                target_noises(s, r, &c, target, noise);
                double distance = 0;
                for (int64_t i = 0; measure && i < n; i++) distance += fabs(got[i] - target[i]);
                if (measure && !(distance < 2)) distance = 2;
                const bool same = judge_same(j, CG_DUMP_TARGET, n, got, target, noise);
                for (int m = p->group[t]; m >= 0; m = p->next[m]) {
                    if (!same) y->target[m * FORMS + form] = 0;
                    if (measure && form == 0) p->distance[m] += distance;
                }
            }
        }
        const double *log_p = logs_of(s, p, logs, &c);
        double plain = 0, plain_noise = 0; /* of one kl, before the weight of the row */
        int made_kl = -1;
        for (int i = 0; i < KLS * WEIGHTS; i++) {
            const int kl = i / WEIGHTS, weight = i % WEIGHTS;
            bool test = false, sum = false;
            for (int m = p->group[t]; m >= 0; m = p->next[m]) {
                test |= s->has[Q_KL] && y->kl[value_number(m, kl, form, weight)];
                for (int l = s->first_listed[m]; l < s->first_listed[m + 1] && !sum; l++)
                    sum |= s->list[l].kl == kl && s->list[l].form == form && s->list[l].weight == weight;
            }
            if (!test && !sum) continue;
            const cg_contract k = contract_of(t, kl, form, weight);
            const double counts = cg_contract_row_weight(&k, &row);
            if (made_kl != kl) {
                plain = cg_contract_kl(&k, &row, target, log_p);
                plain_noise = kl_noise(s, r, &k, plain, target, log_p);
                made_kl = kl;
            }
            const double value = counts * plain, u = counts * plain_noise;
            if (test) {
                double dump_value;
                cg_dump_row(j->d, CG_DUMP_KL, r->t, &dump_value);
                if (!judge_same(j, CG_DUMP_KL, 1, &dump_value, &value, &u))
                    for (int m = p->group[t]; m >= 0; m = p->next[m])
                        y->kl[value_number(m, kl, form, weight)] = 0;
            }
            if (!sum) continue;
            for (int m = p->group[t]; m >= 0; m = p->next[m])
                for (int l = s->first_listed[m]; l < s->first_listed[m + 1]; l++)
                    if (p->list[l].kl == kl && p->list[l].form == form && p->list[l].weight == weight)
                        add_loss(&p->list[l].sums, value, u, j->d->real[r->segment]);
        }
        if (s->has_grad && j->has_dots) match_gradients(s, p, t, form, target, log_p);
    }
}

/* Hold one real row with keys against all that is left. */
static void match_row(const search *s, piece *p, row_logs *logs, bool measure) {
    const judge_row *r = &p->r;
    const tables *y = p->tables;
    const double least = least_share(s->j, r);
    const double coeff = isnan(s->j->d->coeff) ? 1 : s->j->d->coeff;
    if (s->has_grad) read_gradient(s, p);
    for (int k = 0; k < FACTORS && s->has_grad; k++) {
        const cg_contract c = with_factor(cg_contract_default(), k);
        p->factors[k] =
            s->gradient_factor * cg_contract_grad_factor(&c, &s->j->counts, coeff, s->j->d->real[r->segment]);
    }
    for (int t = 0; t < TARGETS; t++) p->group[t] = -1;
    for (int t = TARGETS - 1; t >= 0; t--) {
        if (p->dead[t]) continue;
        bool live = measure || s->first_listed[t] < s->first_listed[t + 1] ||
                    (s->has[Q_TARGET] && (y->target[t * FORMS] || y->target[t * FORMS + 1]));
        const int values = KLS * FORMS * WEIGHTS;
        for (int i = 0; i < values && s->has[Q_KL] && !live; i++) live = y->kl[t * values + i];
        for (int i = 0; i < SLOPES_OF_TARGET && s->has_grad && !live; i++)
            live = y->grad[t * SLOPES_OF_TARGET + i] != 0;
        p->dead[t] = !live || !judge_usable(s, t);
        if (p->dead[t]) continue;
        const int same = same_as(s, r, t, least);
        p->next[t] = p->group[same];
        p->group[same] = t;
    }
    for (int t = 0; t < TARGETS; t++)
        if (p->group[t] >= 0) match_group(s, p, logs, t, measure);
    match_predictions(s, p, logs);
}

/* ---- beside one contract ---- */

double judge_loss_of(const search *s, const loss_sums *l, const cg_contract *c) {
    const double f =
        cg_contract_value_factor(c, &s->j->counts, s->j->d->coeff, 1); /* each row by its own segment */
    if (c->value[CG_AXIS_REDUCTION] == CG_REDUCTION_IS_MEAN_OF_MEANS) return f * l->of_means;
    return f * (l->sum + (c->faults & CG_FAULT_PADDING_IN_LOSS ? l->padding : 0));
}

double judge_loss_noise(const search *s, const loss_sums *l, const cg_contract *c) {
    const double f = fabs(cg_contract_value_factor(c, &s->j->counts, s->j->d->coeff, 1));
    const bool means = c->value[CG_AXIS_REDUCTION] == CG_REDUCTION_IS_MEAN_OF_MEANS;
    return f * sqrt(means ? l->noise_of_means : l->noise) + 4 * F32 * fabs(judge_loss_of(s, l, c));
}

/* Arithmetic coarser than f32 may have another support in this row. */
static bool is_unclear(const judge_row *r, const cg_contract *c) {
    return r->unclear &&
           (c->value[CG_AXIS_SUPPORT] == CG_SUPPORT_IS_SPARSE || (c->faults & CG_FAULT_DENSE_OVER_SPARSE_LSE));
}

static bool row_counts(const judge_row *r, const cg_contract *c) {
    return r->real || (r->segment >= 0 && (c->faults & CG_FAULT_PADDING_IN_LOSS));
}

/* Target, predictions and kl of the row. */
static void make_values(const search *s, piece *p, const cg_contract *c, row_values *v) {
    judge_row *r = &p->r;
    const int64_t n = r->n;
    const cg_contract_row row = judge_contract_row(s->j, r, c->value[CG_AXIS_SCORES]);
    v->counts = n > 0 && row_counts(r, c) && judge_usable(s, target_of(c));
    v->kl = v->kl_noise = 0;
    if (!v->counts) return;
    cg_contract_target(c, &row, v->target, r->heads);
    target_noises(s, r, c, v->target, v->target_noise);
    if (!s->j->has_scores || !cg_contract_log_predict(c, &row, v->log_p)) return;
    log_noises(s, r, c, false, v->log_p, v->log_noise);
    log_noises(s, r, c, true, v->log_p, v->predict_noise);
    for (int64_t i = 0; i < n; i++) v->predict[i] = in_support(r, c, i) ? exp(v->log_p[i]) : 0;
    const double weight = cg_contract_row_weight(c, &row), kl = cg_contract_kl(c, &row, v->target, v->log_p);
    v->kl = weight * kl;
    v->kl_noise = weight * kl_noise(s, r, c, kl, v->target, v->log_p);
}

/* Gradients of the row, with their factor; those of the keys are added up. */
static void make_gradients(const search *s, piece *p, const cg_contract *c, row_values *v) {
    const judge *j = s->j;
    const cg_dump *d = j->d;
    judge_row *r = &p->r;
    const int64_t n = r->n, G = d->Hi, E = d->Di;
    const double coeff = isnan(d->coeff) ? 1 : d->coeff;
    const cg_contract_row row = judge_contract_row(j, r, c->value[CG_AXIS_SCORES]);
    double *target = r->a[0], *log_p = r->a[3], *dscores = r->a[6], *dnoise = r->a[7];
    memset(v->e, 0, (size_t)(G + G * E) * sizeof *v->e);
    memset(v->noise, 0, (size_t)(G + G * E) * sizeof *v->noise);
    memset(v->kink, 0, (size_t)(G + G * E) * sizeof *v->kink);
    if (n < 1 || !row_counts(r, c) || !judge_usable(s, target_of(c))) return;
    cg_contract_target(c, &row, target, r->heads);
    if (!cg_contract_log_predict(c, &row, log_p)) return;
    const double f = cg_contract_grad_factor(c, &j->counts, coeff, d->real[r->segment]);
    gradient(s, r, c, target, log_p, s->has[Q_GRAD_Q], dscores, dnoise, v->e, v->noise, v->kink);
    for (int64_t i = 0; i < G + G * E; i++) {
        v->e[i] *= f, v->noise[i] *= fabs(f), v->kink[i] *= fabs(f);
        if (is_unclear(r, c)) v->kink[i] = INFINITY;
    }
    if (!v->dk) return;
    for (int64_t i = 0; i < n; i++) dscores[i] *= f;
    const cg_contract_index index = {.n_heads = G,
                                     .head_dim = E,
                                     .n_keys = n,
                                     .q = r->qi,
                                     .w = r->w,
                                     .dots = r->dots,
                                     .k = j->ki + j->key0[r->segment] * E};
    cg_contract_index_grad(c, &index, dscores, NULL, NULL, v->dk + j->key0[r->segment] * E);
    /* Rounding of each key's sum, as one number: that of rows is independent and adds up in squares, that of the
     * summation itself does not. */
    const bool leak = c->value[CG_AXIS_SCORES] == CG_SCORES_ARE_LINEAR || (c->faults & CG_FAULT_RELU_LEAK);
    const double dot_noise = judge_dot_noise(j, r);
    double *squares = v->dk_squares + j->key0[r->segment], *u = v->dk_noise + j->key0[r->segment],
           *kink = v->dk_kink + j->key0[r->segment], *most = p->noise;
    for (int64_t g = 0; g < G; g++) {
        most[g] = 0;
        for (int64_t i = 0; i < E; i++) most[g] = fmax(most[g], fabs(r->qi[g * E + i]));
        most[g] *= fabs(r->w[g]);
    }
    for (int64_t i = 0; i < n; i++) {
        double noise = 0, corner = 0;
        for (int64_t g = 0; g < G; g++) {
            const double x = r->dots[g * n + i];
            if (leak || x > -dot_noise) {
                noise += most[g] * fabs(f) * dnoise[i];
                u[i] += most[g] * 4 * F32 * fabs(dscores[i]);
            }
            if (fabs(x) <= 8 * dot_noise) noise += most[g] * fabs(dscores[i]);
            if (fabs(x) <= 8 * dot_noise * 0x1p13 && !leak) corner += most[g] * fabs(dscores[i]);
        }
        if (is_unclear(r, c)) corner = INFINITY;
        squares[i] += noise * noise;
        kink[i] += corner * corner;
    }
}

/* Two wants beside each other; with a free factor, after the best one. Of independent numbers, at most as many tell
 * them apart as elements lie apart by more than both roundings, each by as many bits as it lies beyond. */
static void tell(telling *to, const judge *j, cg_dump_id id, int64_t n, const double *a, const double *a_noise,
                 const double *b, const double *b_noise, bool free_factor, int64_t independent) {
    double f = 1, ab = 0, bb = 0, bits = 0;
    int64_t count = 0;
    for (int64_t i = 0; free_factor && i < n; i++) ab += a[i] * b[i], bb += b[i] * b[i];
    if (free_factor) f = bb > 0 ? ab / bb : 0;
    for (int64_t i = 0; i < n; i++) {
        const double unit = judge_unit(j, id, j->level[id], a[i], a_noise[i]) +
                            judge_unit(j, id, j->level[id], f * b[i], fabs(f) * b_noise[i]);
        const double times = fabs(a[i] - f * b[i]) / (j->allowed * unit);
        if (!(times > 1)) continue;
        bits += fmin(log2(times), 30);
        count++;
    }
    const int64_t numbers = count < independent ? count : independent;
    if (numbers < 1) return;
    to->rows++;
    to->numbers += numbers;
    to->bits += bits * (double)numbers / (double)count;
}

/* Independent numbers in a row's distribution. */
static int64_t numbers_of(const judge_row *r, const cg_contract *c) {
    const bool dense = c->value[CG_AXIS_SUPPORT] == CG_SUPPORT_IS_DENSE;
    const int64_t n = dense ? r->n : r->n_selected[c->value[CG_AXIS_SCORES]];
    return n > 1 ? n - 1 : 0;
}

static bool holds(const double *x, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (x[i] != 0) return true;
    return false;
}

static void compare_values(const search *s, piece *p, const compared *than) {
    const judge *j = s->j;
    judge_row *r = &p->r;
    compared *out = &p->c;
    row_values *v = p->v;
    const int64_t n = r->n;
    double *got = r->a[2], *corner = NULL;
    if (r->segment < 0) return;
    if (is_unclear(r, &out->value)) { /* beside coarser arithmetic the row says nothing */
        corner = r->x[0];
        for (int64_t i = 0; i <= n; i++) corner[i] = INFINITY;
        out->sums.unclear = INFINITY;
    }
    make_values(s, p, &out->value, &v[0]);
    if (than) make_values(s, p, &than->value, &v[1]);
    const struct {
        int q;
        const double *want[2], *noise[2];
    } rows[] = {{Q_TARGET, {v[0].target, v[1].target}, {v[0].target_noise, v[1].target_noise}},
                {Q_LOG_PREDICT, {v[0].log_p, v[1].log_p}, {v[0].log_noise, v[1].log_noise}},
                {Q_PREDICT, {v[0].predict, v[1].predict}, {v[0].predict_noise, v[1].predict_noise}}};
    const bool both = than && v[0].counts && v[1].counts && r->real;
    for (int i = 0; i < 3; i++) {
        const cg_dump_id id = judge_quantity[rows[i].q].id;
        if (!s->has[rows[i].q]) continue;
        read_logs(s, r, id, got);
        if (!r->real) { /* what a padding row holds matters where it reaches loss or gradient */
            out->padding_value += rows[i].q == Q_TARGET && holds(got, n);
            continue;
        }
        if (!v[0].counts) continue;
        judge_compare(j, id, &out->stats[rows[i].q], r->segment, r->position, r->t, n, 0, got, rows[i].want[0],
                      rows[i].noise[0], corner, numbers_of(r, &out->value));
        if (both)
            tell(&out->tells[rows[i].q], j, id, n, rows[i].want[0], rows[i].noise[0], rows[i].want[1],
                 rows[i].noise[1], false, numbers_of(r, &out->value));
    }
    if (s->has[Q_KL]) {
        cg_dump_row(j->d, CG_DUMP_KL, r->t, got);
        out->padding_value += !r->real && got[0] != 0;
        out->empty_value += r->real && !n && got[0] != 0;
        if (r->real && (n > 0 || !than)) /* rows that see nothing are looked at beside the expected alone */
            judge_compare(j, CG_DUMP_KL, &out->stats[Q_KL], r->segment, r->position, r->t, 1, 0, got, &v[0].kl,
                          &v[0].kl_noise, corner, 1);
        if (both)
            tell(&out->tells[Q_KL], j, CG_DUMP_KL, 1, &v[0].kl, &v[0].kl_noise, &v[1].kl, &v[1].kl_noise, false,
                 1);
    }
    if (r->real) {
        add_loss(&out->sums, v[0].kl, v[0].kl_noise, j->d->real[r->segment]);
        out->numbers += v[0].counts ? numbers_of(r, &out->value) : 0;
    } else if (n > 0) { /* what padding would add to the loss */
        cg_contract padded = out->value;
        padded.faults |= CG_FAULT_PADDING_IN_LOSS;
        make_values(s, p, &padded, &v[1]);
        out->sums.padding += v[1].kl;
    }
}

static void compare_gradients(const search *s, piece *p, const compared *than, bool free_factor) {
    const judge *j = s->j;
    const int64_t G = j->d->Hi, E = j->d->Di;
    const struct {
        int q;
        int64_t from, n, per_head;
    } parts[] = {{Q_GRAD_W, 0, G, 1}, {Q_GRAD_Q, G, G * E, E}};
    judge_row *r = &p->r;
    compared *out = &p->c;
    bool some = false;
    make_gradients(s, p, &out->gradient, &p->v[0]);
    if (than) make_gradients(s, p, &than->gradient, &p->v[1]);
    read_gradient(s, p);
    for (int i = 0; i < 2; i++) {
        const cg_dump_id id = judge_quantity[parts[i].q].id;
        const double *got = p->got + parts[i].from, *want = p->v[0].e + parts[i].from,
                     *noise = p->v[0].noise + parts[i].from;
        if (!s->has[parts[i].q]) continue;
        some |= holds(got, parts[i].n);
        if (r->n < 1 && r->real && than) continue;
        judge_compare(j, id, &out->stats[parts[i].q], r->segment, r->position, r->t, parts[i].n,
                      parts[i].per_head, got, want, noise, p->v[0].kink + parts[i].from,
                      numbers_of(r, &out->gradient));
        int64_t numbers = numbers_of(r, &out->gradient) - free_factor;
        numbers = numbers < parts[i].n ? numbers : parts[i].n;
        if (than && r->n > 0)
            tell(&out->tells[parts[i].q], j, id, parts[i].n, want, noise, p->v[1].e + parts[i].from,
                 p->v[1].noise + parts[i].from, free_factor, numbers);
    }
    out->padding_grad += some && !r->real && r->segment >= 0;
    out->empty_grad += some && r->real && r->n == 0;
}

/* ---- passes over rows ---- */

static bool piece_new(const search *s, piece *p, bool with_keys) {
    const cg_dump *d = s->j->d;
    const size_t wide = (size_t)(d->Hi + d->Hi * d->Di) + 1, n = (size_t)d->N + 1,
                 keys = (size_t)s->j->key0[d->B] + 1;
    memset(p, 0, sizeof *p);
    judge_stat_init(p->c.stats, QUANTITIES);
    if (!judge_row_new(s->j, &p->r)) return false;
    const size_t dk = with_keys ? keys * (size_t)(d->Di + 3) : 0;
    double *x = p->block = calloc(4 * wide + 2 * (6 * n + 3 * wide + dk), sizeof *x);
    p->tables = malloc(sizeof *p->tables);
    if (!x || !p->tables) return false;
    p->e = x, x += wide;
    p->noise = x, x += wide;
    p->kink = x, x += wide;
    p->got = x, x += wide;
    for (int i = 0; i < 2; i++) {
        row_values *v = &p->v[i];
        double **const rows[] = {&v->target,    &v->target_noise, &v->log_p,
                                 &v->log_noise, &v->predict,      &v->predict_noise};
        for (int k = 0; k < 6; k++, x += n) *rows[k] = x;
        v->e = x, x += wide;
        v->noise = x, x += wide;
        v->kink = x, x += wide;
        if (!with_keys) continue;
        v->dk = x, x += keys * (size_t)d->Di;
        v->dk_noise = x, x += keys;
        v->dk_squares = x, x += keys;
        v->dk_kink = x, x += keys;
    }
    *p->tables = *s->start;
    memcpy(p->list, s->list, sizeof p->list);
    return true;
}

static void piece_free(piece *p) {
    judge_row_free(&p->r);
    free(p->tables);
    free(p->block);
}

static void place_row(const search *s, piece *p, int64_t t) {
    judge_row_place(s->j, &p->r, t);
    if (p->r.segment < 0) return;
    judge_row_scores(s->j, &p->r);
    judge_row_attention(s->j, &p->r);
}

/* What a padding row would add to the listed losses. */
static void add_padding(const search *s, piece *p) {
    judge_row *r = &p->r;
    for (int i = 0; i < s->n_list; i++) {
        listed *l = &p->list[i];
        const cg_contract c = contract_of(l->target, l->kl, l->form, l->weight);
        const cg_contract_row row = judge_contract_row(s->j, r, l->form);
        double kl;
        cg_contract_row_eval(&c, &row, r->a[0], NULL, NULL, &kl, r->heads);
        l->sums.padding += kl;
    }
}

static void match_at(const search *s, piece *p, int64_t t, bool measure) {
    judge_row *r = &p->r;
    row_logs logs = {.at = {{r->a[4], r->a[5]}, {r->x[1], r->x[2]}}};
    const bool real = cg_dump_is_real(s->j->d, t);
    if (!cg_dump_visible(s->j->d, t) || (!real && !s->n_list)) return;
    place_row(s, p, t);
    if (p->r.unclear && s->coarser) return;
    if (real)
        match_row(s, p, &logs, measure);
    else
        add_padding(s, p);
}

static void keep_common(tables *to, const tables *from) {
    for (int i = 0; i < TARGETS * FORMS; i++) to->target[i] &= from->target[i];
    for (int i = 0; i < 4; i++) to->predict[i / 2][i % 2] &= from->predict[i / 2][i % 2];
    for (int i = 0; i < VALUES; i++) to->kl[i] &= from->kl[i];
    for (int i = 0; i < GRADS; i++) to->grad[i] &= from->grad[i];
}

static void add_sums(loss_sums *to, const loss_sums *from) {
    to->sum += from->sum, to->noise += from->noise, to->padding += from->padding;
    to->of_means += from->of_means, to->noise_of_means += from->noise_of_means;
    to->unclear = fmax(to->unclear, from->unclear);
}

static int changes(const target_key a, const target_key b) {
    return (a.teacher != b.teacher) + (a.support != b.support) + (a.normalise != b.normalise) +
           (a.heads != b.heads) + (a.underflow != b.underflow);
}

void judge_search_reset(search *s, bool near) {
    const target_key expected = key_of(target_of(&s->expected));
    for (int t = 0; t < TARGETS; t++) {
        const bool there = judge_usable(s, t) && (!near || changes(key_of(t), expected) <= 1),
                   weighed = there && judge_weighable(t);
        for (int i = 0; i < FORMS; i++) s->start->target[t * FORMS + i] = there;
        for (int i = 0; i < KLS * FORMS * WEIGHTS; i++)
            s->start->kl[t * KLS * FORMS * WEIGHTS + i] = i % WEIGHTS ? weighed : there;
        for (int i = 0; i < SLOPES_OF_TARGET; i++)
            s->start->grad[t * SLOPES_OF_TARGET + i] =
                (i / EXTRAS % WEIGHTS ? weighed : there) ? DIRECTION | ALL_FACTORS : 0;
    }
    memset(s->start->predict, 1, sizeof s->start->predict);
    s->n_list = 0;
    memset(s->first_listed, 0, sizeof s->first_listed);
}

bool judge_search_sample(search *s, double *distance, int *n_measured) {
    const cg_dump *d = s->j->d;
    piece *p = malloc(sizeof *p);
    const bool ok = p && piece_new(s, p, false);
    const int64_t rows = s->j->counts.visible, step = rows / SAMPLE + 1;
    int64_t seen = 0;
    for (int64_t t = 0; ok && t < d->T; t++) {
        if (!cg_dump_is_real(d, t) || !cg_dump_visible(d, t)) continue;
        seen++;
        if (seen != rows && (rows - seen) % step) continue;
        if (distance && *n_measured == MEASURED) break;
        match_at(s, p, t, distance != NULL);
        if (distance) ++*n_measured;
    }
    if (ok && distance) memcpy(distance, p->distance, sizeof p->distance);
    if (ok && !distance) keep_common(s->start, p->tables);
    if (p) piece_free(p);
    free(p);
    return ok;
}

bool judge_search_all(search *s) {
    const cg_dump *d = s->j->d;
    piece *pieces = calloc(JUDGE_CHUNKS, sizeof *pieces);
    bool ok = pieces != NULL;
#pragma omp parallel for schedule(dynamic, 1) reduction(&& : ok)
    for (int c = 0; c < JUDGE_CHUNKS; c++) {
        ok = ok && piece_new(s, &pieces[c], false);
        for (int64_t t = c; ok && t < d->T; t += JUDGE_CHUNKS) match_at(s, &pieces[c], t, false);
    }
    for (int c = 0; ok && c < JUDGE_CHUNKS; c++) {
        keep_common(s->start, pieces[c].tables);
        for (int i = 0; i < s->n_list; i++) add_sums(&s->list[i].sums, &pieces[c].list[i].sums);
    }
    for (int c = 0; pieces && c < JUDGE_CHUNKS; c++) piece_free(&pieces[c]);
    free(pieces);
    return ok;
}

/* The gradient of the keys is a sum over rows: its first piece holds the sums of all. */
static void compare_keys(const search *s, piece *p, const compared *than, bool free_factor, compared *out) {
    const judge *j = s->j;
    const cg_dump *d = j->d;
    const int64_t E = d->Di;
    double *got = p->e, *kink = p->kink, *noise[2] = {p->noise, p->got}; /* Hi * Di wide, at least Di */
    for (int64_t b = 0; b < d->B; b++)
        for (int64_t i = 0; i < d->n_keys[b]; i++) {
            const int64_t at = j->key0[b] + i;
            cg_dump_key(d, CG_DUMP_GRAD_K_INDEXER, b, i, got);
            for (int w = 0; w < (than ? 2 : 1); w++)
                for (int64_t k = 0; k < E; k++)
                    noise[w][k] = p->v[w].dk_noise[at] + sqrt(p->v[w].dk_squares[at]),
                    kink[k] = sqrt(p->v[0].dk_kink[at]);
            judge_compare(j, CG_DUMP_GRAD_K_INDEXER, &out->stats[Q_GRAD_K], b, i, at, E, 0, got,
                          p->v[0].dk + at * E, noise[0], kink, E);
            if (than && !free_factor)
                tell(&out->tells[Q_GRAD_K], j, CG_DUMP_GRAD_K_INDEXER, E, p->v[0].dk + at * E, noise[0],
                     p->v[1].dk + at * E, noise[1], false, 1);
        }
}

bool judge_search_compare(const search *s, const compared *than, bool free_factor, compared *out) {
    const judge *j = s->j;
    const cg_dump *d = j->d;
    const bool gradients = (s->has_grad || s->has[Q_GRAD_K]) && j->has_dots && j->has_logits;
    const cg_contract value = out->value, gradient = out->gradient;
    piece *pieces = calloc(JUDGE_CHUNKS, sizeof *pieces);
    bool ok = pieces != NULL;
    *out = (compared){.value = value, .gradient = gradient};
    judge_stat_init(out->stats, QUANTITIES);
#pragma omp parallel for schedule(dynamic, 1) reduction(&& : ok)
    for (int c = 0; c < JUDGE_CHUNKS; c++) {
        ok = ok && piece_new(s, &pieces[c], s->has[Q_GRAD_K]);
        if (!ok) continue;
        pieces[c].c.value = value, pieces[c].c.gradient = gradient;
        for (int64_t t = c; t < d->T; t += JUDGE_CHUNKS) {
            place_row(s, &pieces[c], t);
            compare_values(s, &pieces[c], than);
            if (gradients) compare_gradients(s, &pieces[c], than, free_factor);
        }
    }
    for (int c = 0; ok && c < JUDGE_CHUNKS; c++) {
        const compared *from = &pieces[c].c;
        for (int q = 0; q < QUANTITIES; q++) {
            judge_stat_merge(&out->stats[q], &from->stats[q], j->n_worst);
            out->tells[q].rows += from->tells[q].rows;
            out->tells[q].numbers += from->tells[q].numbers;
            out->tells[q].bits += from->tells[q].bits;
        }
        add_sums(&out->sums, &from->sums);
        out->numbers += from->numbers;
        out->padding_value += from->padding_value, out->padding_grad += from->padding_grad;
        out->empty_value += from->empty_value, out->empty_grad += from->empty_grad;
        for (int w = 0; c > 0 && s->has[Q_GRAD_K] && w < 2; w++) {
            const int64_t keys = j->key0[d->B];
            for (int64_t k = 0; k < keys * d->Di; k++) pieces[0].v[w].dk[k] += pieces[c].v[w].dk[k];
            for (int64_t k = 0; k < keys; k++) {
                pieces[0].v[w].dk_noise[k] += pieces[c].v[w].dk_noise[k];
                pieces[0].v[w].dk_squares[k] += pieces[c].v[w].dk_squares[k];
                pieces[0].v[w].dk_kink[k] += pieces[c].v[w].dk_kink[k];
            }
        }
    }
    if (ok && s->has[Q_GRAD_K] && gradients) compare_keys(s, &pieces[0], than, free_factor, out);
    if (ok && s->has[Q_LOSS]) {
        const double want = judge_loss_of(s, &out->sums, &value),
                     noise = judge_loss_noise(s, &out->sums, &value);
        judge_compare(j, CG_DUMP_LOSS, &out->stats[Q_LOSS], -1, -1, 0, 1, 0, &s->loss, &want, &noise,
                      &out->sums.unclear, 1);
        if (than) {
            const double other = judge_loss_of(s, &than->sums, &than->value),
                         other_noise = judge_loss_noise(s, &than->sums, &than->value);
            tell(&out->tells[Q_LOSS], j, CG_DUMP_LOSS, 1, &want, &noise, &other, &other_noise, false, 1);
        }
    }
    for (int c = 0; pieces && c < JUDGE_CHUNKS; c++) piece_free(&pieces[c]);
    free(pieces);
    return ok;
}
