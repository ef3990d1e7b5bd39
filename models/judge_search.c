/* The search of models/judge_search.h. On a row where two combinations cannot differ (everything selected, one head, no
 * floor in reach) one is computed for both. */
#include "models/judge_search.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

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

/* One chunk of rows. */
typedef struct piece {
    judge_row r;
    tables *tables;
    judge_stat stats[QUANTITIES];
    listed list[LISTED];
    double *dk[2], *dk_noise;            /* [C, Di] */
    double *e, *unit;                    /* [Hi + Hi * Di] a gradient and its expected rounding */
    double *got;                         /* the same of the dump */
    int64_t padding_value, padding_grad; /* padding rows that hold something */
    int64_t empty_value, empty_grad;     /* real rows that see no key and hold something, NaN too */
    double sum_fg, sum_ff;               /* of gradients along the expected direction */
    double distance[TARGETS];            /* when measuring */
    double want_size;
    int group[TARGETS], next[TARGETS];
    bool fine;
} piece;

bool judge_usable(const search *s, int t) {
    const target_key k = key_of(t);
    const judge *j = s->j;
    if (j->has_window && j->has_sink) return true;
    if (j->has_window) return k.teacher == CG_TEACHER_IS_FULL || k.teacher == CG_TEACHER_IS_COMPRESSED;
    if (j->has_lse) return k.teacher == CG_TEACHER_IS_FULL || k.teacher == CG_TEACHER_IS_COMPRESSED;
    return k.teacher == CG_TEACHER_IS_COMPRESSED;
}

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
        k.heads = CG_HEADS_ARE_ALL;
        if (k.normalise == CG_NORMALISE_IS_EXACT && !k.underflow) k.teacher = CG_TEACHER_IS_COMPRESSED;
    }
    return number_of(k);
}

/* ---- expected rounding ---- */

/* target: relative, from the logits; a target in f32 before its division has float32's steps and far exponents. */
static void target_units(const search *s, const judge_row *r, const cg_contract *c, const double *target,
                         double *unit) {
    const double e = s->j->rounding[CG_DUMP_TARGET], tiny = judge_floor(e);
    double relative = 4 * e + 2 * judge_logit_noise(s->j, r, e), floor = tiny;
    if (c->faults & CG_FAULT_TEACHER_UNDERFLOW) {
        relative += 250 * 0x1p-24;
        floor += 0x1p-149 / (double)FLT_MIN * (double)s->j->d->H;
    }
    for (int64_t i = 0; i < r->n; i++)
        unit[i] = fabs(target[i]) * relative + (target[i] != 0 || floor > tiny ? floor : 0);
}

static double kl_unit(const search *s, const judge_row *r, const cg_contract *c, double kl,
                      const double *target, const double *log_p, cg_dump_id id) {
    const judge *j = s->j;
    const double e = j->rounding[id];
    double size = 0;
    for (int64_t i = 0; i < r->n; i++)
        if (target[i] != 0) size += fabs(target[i]) * (fabs(log_p[i]) + 1);
    if (!isfinite(size)) return 0;
    const double terms = fabs(kl) + 1;
    double unit =
        (4 * e + 2 * judge_logit_noise(j, r, e)) * terms + 2 * judge_score_noise(j, r, e) + 2 * e * (size + 1);
    if (c->faults & CG_FAULT_TEACHER_UNDERFLOW) unit += 250 * 0x1p-24 * size;
    return unit;
}

/* ---- gradients of a row ---- */

/* e [Hi + Hi * Di] = dw, dq unscaled, and what rounding may change in them; parts that the dump lacks stay out. */
static void gradient(const search *s, piece *p, const cg_contract *c, const double *target, const double *log_p,
                     bool with_q, double *dscores, double *noise) {
    const judge *j = s->j;
    const cg_dump *d = j->d;
    const judge_row *r = &p->r;
    const int64_t n = r->n, G = d->Hi, E = d->Di;
    const cg_dump_id id = s->has[Q_GRAD_W]   ? CG_DUMP_GRAD_WEIGHTS
                          : s->has[Q_GRAD_Q] ? CG_DUMP_GRAD_Q_INDEXER
                                             : CG_DUMP_GRAD_K_INDEXER;
    const double e = j->rounding[id], far = c->faults & CG_FAULT_TEACHER_UNDERFLOW ? 250 * 0x1p-24 : 0;
    const double logit = 4 * e + 2 * judge_logit_noise(j, r, e) + far,
                 score = 4 * e + 2 * judge_score_noise(j, r, e);
    const double dot_noise = judge_dot_noise(j, r, e);
    /* unscaled here: what the type flushes, over the smallest factor there may be */
    const double least = judge_floor(e) * (double)(j->counts.physical + 1);
    const cg_contract_row row = judge_contract_row(j, r, c->value[CG_AXIS_SCORES]);
    cg_contract_dscores(c, &row, target, log_p, dscores);
    const bool sparse = c->value[CG_AXIS_SUPPORT] == CG_SUPPORT_IS_SPARSE;
    for (int64_t i = 0; i < n; i++) {
        const bool on = !sparse || row.selected[i];
        noise[i] = on ? exp(log_p[i]) * (score + e * fabs(log_p[i])) + fabs(target[i]) * logit : 0;
    }
    const int64_t key0 = j->key0[r->segment];
    const cg_contract_index index = {.n_heads = G,
                                     .head_dim = E,
                                     .n_keys = n,
                                     .q = r->qi,
                                     .w = r->w,
                                     .dots = r->dots,
                                     .k = j->ki + key0 * E};
    cg_contract_index_grad(c, &index, dscores, p->e, with_q ? p->e + G : NULL, NULL);
    const bool linear = c->value[CG_AXIS_SCORES] == CG_SCORES_ARE_LINEAR;
    const bool leak = linear || (c->faults & CG_FAULT_RELU_LEAK);
    for (int64_t g = 0; g < G; g++) {
        const double *dots = r->dots + g * n;
        double w = 0, q = 0;
        for (int64_t i = 0; i < n; i++) {
            const double x = linear ? fabs(dots[i]) : dots[i] > 0 ? dots[i] : 0;
            w += x * noise[i] + fabs(dscores[i]) * dot_noise;
            q += (leak || dots[i] > -dot_noise ? noise[i] : 0) * j->ki_largest[key0 + i];
            if (fabs(dots[i]) <= 8 * dot_noise)
                q += fabs(dscores[i]) * j->ki_largest[key0 + i]; /* either side of the kink */
        }
        p->unit[g] = w + 4 * e * fabs(p->e[g]) + least;
        for (int64_t i = 0; with_q && i < E; i++)
            p->unit[G + g * E + i] = fabs(r->w[g]) * q + 4 * e * fabs(p->e[G + g * E + i]) + least;
    }
}

/* The dump's own, read once a row: weights, then q. */
static void read_gradient(const search *s, piece *p) {
    const int64_t G = s->j->d->Hi;
    if (s->has[Q_GRAD_W]) cg_dump_row(s->j->d, CG_DUMP_GRAD_WEIGHTS, p->r.t, p->got);
    if (s->has[Q_GRAD_Q]) cg_dump_row(s->j->d, CG_DUMP_GRAD_Q_INDEXER, p->r.t, p->got + G);
}

/* Expected is nothing but rounding: the factors under which what the dump has is no more than that. */
static uint64_t fit_rounding(const search *s, const piece *p, int64_t from, int64_t to, uint64_t mask) {
    const judge *j = s->j;
    const double coeff = isnan(j->d->coeff) ? 1 : j->d->coeff;
    if (j->tolerance > 0) return mask;
    uint64_t left = mask & (DIRECTION | UINT64_C(1) << ZERO_FACTOR);
    for (int k = 0; k < FACTORS; k++) {
        if (!(mask >> k & 1)) continue;
        const cg_contract c = with_factor(cg_contract_default(), k);
        const double want = cg_contract_grad_factor(&c, &j->counts, coeff, j->d->real[p->r.segment]);
        bool fits = true;
        for (int64_t i = from; i < to && fits; i++)
            fits = fabs(p->got[i] - want * p->e[i]) <= 2 * j->allowed * fabs(want) * p->unit[i] + 0x1p-140;
        if (fits) left |= UINT64_C(1) << k;
    }
    return left;
}

/* Which factors of the mask still fit elements from..to of e: 0 when not even the direction does. */
static uint64_t fit_factors(const search *s, const piece *p, int64_t from, int64_t to, uint64_t mask) {
    const judge *j = s->j;
    double see = 0, sge = 0, sue = 0, most = 0, noise = 0, sgg = 0;
    for (int64_t i = from; i < to; i++) {
        see += p->e[i] * p->e[i];
        sge += p->got[i] * p->e[i];
        sgg += p->got[i] * p->got[i];
        sue += fabs(p->e[i]) * p->unit[i];
        most = fmax(most, fabs(p->e[i]));
        noise = fmax(noise, p->unit[i]);
    }
    if (isnan(see)) return isnan(sge) ? mask : 0;
    if (isnan(sge)) return 0;
    if (j->tolerance > 0) noise = j->tolerance * most, sue = noise * most;
    if (most <= 4 * j->allowed * noise) return fit_rounding(s, p, from, to, mask); /* nothing but rounding */
    const double f = sge / see, bar = j->allowed * sue / see + 0x1p-50;
    if (sgg == 0) return mask & (UINT64_C(1) << ZERO_FACTOR); /* no gradient where there should be one */
    for (int64_t i = from; i < to; i++) {
        const double unit = j->tolerance > 0 ? noise : p->unit[i];
        if (!(fabs(p->got[i] - f * p->e[i]) <= 2 * j->allowed * fabs(f) * unit + 0x1p-140)) return 0;
    }
    uint64_t left = mask & DIRECTION;
    const double coeff = isnan(j->d->coeff) ? 1 : j->d->coeff;
    for (int k = 0; k < FACTORS; k++) {
        if (!(mask >> k & 1)) continue;
        const cg_contract c = with_factor(cg_contract_default(), k);
        const double want = cg_contract_grad_factor(&c, &j->counts, coeff, j->d->real[p->r.segment]);
        if (fabs(f - want) <= fabs(want) * bar) left |= UINT64_C(1) << k;
    }
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

static void expected_log_units(const search *s, const judge_row *r, const cg_contract *c, cg_dump_id id,
                               const double *log_p, double *unit) {
    const double e = s->j->rounding[id], score = judge_score_noise(s->j, r, e);
    for (int64_t i = 0; i < r->n; i++) {
        const double u = 2 * score + 2 * e * (fabs(log_p[i]) + 1);
        unit[i] = !in_support(r, c, i)    ? 0
                  : id == CG_DUMP_PREDICT ? exp(log_p[i]) * (u + 2 * e) + judge_floor(e)
                                          : u;
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
        double *got = r->a[6], *unit = r->a[7], *want = r->x[0];
        read_logs(s, r, judge_quantity[q].id, got);
        for (int dense = 0; dense < 2; dense++)
            for (int form = 0; form < FORMS; form++) {
                if (!p->tables->predict[dense][form]) continue;
                const cg_contract c = contract_of(number_of((target_key){0, dense, 0, 0, 0}), 0, form);
                const double *log_p = logs_of(s, p, logs, &c);
                expected_log_units(s, r, &c, judge_quantity[q].id, log_p, unit);
                for (int64_t i = 0; i < r->n; i++)
                    want[i] = q == Q_LOG_PREDICT ? log_p[i] : in_support(r, &c, i) ? exp(log_p[i]) : 0;
                if (!judge_same(s->j, r->n, got, want, unit)) p->tables->predict[dense][form] = 0;
            }
    }
}

/* Everything of one combination of target and row; members: the combinations that it stands for. */
static void match_group(const search *s, piece *p, row_logs *logs, int t, bool measure) {
    const judge *j = s->j;
    judge_row *r = &p->r;
    tables *y = p->tables;
    double *target = r->a[0], *unit = r->a[1], *got = r->a[2], *dscores = r->a[6], *noise = r->a[7];
    const int64_t n = r->n, G = j->d->Hi, E = j->d->Di;
    bool made[FORMS] = {false, false};
    for (int form = 0; form < FORMS; form++) {
        /* the target depends on the form of scores where the selection does */
        const cg_contract c = contract_of(t, 0, form);
        const cg_contract_row row = judge_contract_row(j, r, form);
        const bool again = form == 0 || (!j->has_list && c.value[CG_AXIS_SUPPORT] == CG_SUPPORT_IS_SPARSE) ||
                           (c.faults & CG_FAULT_DENSE_OVER_SPARSE_LSE);
        bool wanted = false;
        for (int m = p->group[t]; m >= 0; m = p->next[m]) {
            wanted |= s->has[Q_TARGET] && (y->target[m * FORMS + form] || (measure && form == 0));
            for (int kl = 0; kl < KLS && s->has[Q_KL] && !wanted; kl++)
                wanted |= y->kl[value_number(m, kl, form)];
            for (int i = 0; i < SLOPES * 4 && s->has_grad && !wanted; i++)
                wanted |= y->grad[grad_number(m, i / 4, form, i % 4)] != 0;
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
                target_units(s, r, &c, target, unit);
                double distance = 0;
                for (int64_t i = 0; measure && i < n; i++) distance += fabs(got[i] - target[i]);
                if (measure && !(distance < 2)) distance = 2;
                const bool same = judge_same(j, n, got, target, unit);
                for (int m = p->group[t]; m >= 0; m = p->next[m]) {
                    if (!same) y->target[m * FORMS + form] = 0;
                    if (measure && form == 0) p->distance[m] += distance;
                }
            }
        }
        const double *log_p = logs_of(s, p, logs, &c);
        for (int kl = 0; kl < KLS; kl++) {
            bool test = false, sum = false;
            for (int m = p->group[t]; m >= 0; m = p->next[m]) {
                test |= s->has[Q_KL] && y->kl[value_number(m, kl, form)];
                for (int i = s->first_listed[m]; i < s->first_listed[m + 1] && !sum; i++)
                    sum |= s->list[i].kl == kl && s->list[i].form == form;
            }
            if (!test && !sum) continue;
            const cg_contract k = contract_of(t, kl, form);
            const double value = cg_contract_kl(&k, &row, target, log_p);
            if (test) {
                double dump_value;
                const double u = kl_unit(s, r, &k, value, target, log_p, CG_DUMP_KL);
                cg_dump_row(j->d, CG_DUMP_KL, r->t, &dump_value);
                if (!judge_same(j, 1, &dump_value, &value, &u))
                    for (int m = p->group[t]; m >= 0; m = p->next[m]) y->kl[value_number(m, kl, form)] = 0;
            }
            if (!sum) continue;
            const double u = kl_unit(s, r, &k, value, target, log_p, CG_DUMP_LOSS);
            for (int m = p->group[t]; m >= 0; m = p->next[m])
                for (int i = s->first_listed[m]; i < s->first_listed[m + 1]; i++) {
                    listed *l = &p->list[i];
                    if (l->kl != kl || l->form != form) continue;
                    l->sum += value;
                    l->noise += u * u;
                    l->of_means += value / (double)j->d->real[r->segment];
                }
        }
        if (!s->has_grad || !j->has_dots) continue;
        for (int i = 0; i < SLOPES * 4; i++) {
            const int slope = i / 4, extra = i % 4;
            uint64_t any = 0;
            for (int m = p->group[t]; m >= 0; m = p->next[m])
                any |= y->grad[grad_number(m, slope, form, extra)];
            if (!any) continue;
            cg_contract k = contract_of(t, kl_of_slope(slope), form);
            if (extra & 1) k.faults |= CG_FAULT_PREDICT_MINUS_TARGET;
            if (extra & 2) k.faults |= CG_FAULT_RELU_LEAK;
            gradient(s, p, &k, target, log_p, !s->has[Q_GRAD_W], dscores, noise);
            uint64_t left = s->has[Q_GRAD_W] ? fit_factors(s, p, 0, G, any) : any;
            if (left && s->has[Q_GRAD_Q]) {
                if (s->has[Q_GRAD_W]) gradient(s, p, &k, target, log_p, true, dscores, noise);
                left = fit_factors(s, p, G, G + G * E, left);
            }
            for (int m = p->group[t]; m >= 0; m = p->next[m])
                y->grad[grad_number(m, slope, form, extra)] &= left;
        }
    }
}

/* Hold one real row with keys against all that is left. */
static void match_row(const search *s, piece *p, row_logs *logs, bool measure) {
    const judge_row *r = &p->r;
    const tables *y = p->tables;
    const double least = least_share(s->j, r);
    if (s->has_grad) read_gradient(s, p);
    for (int t = 0; t < TARGETS; t++) p->group[t] = -1;
    for (int t = TARGETS - 1; t >= 0; t--) {
        bool live = measure || s->first_listed[t] < s->first_listed[t + 1] ||
                    (s->has[Q_TARGET] && (y->target[t * FORMS] || y->target[t * FORMS + 1]));
        for (int i = 0; i < KLS * FORMS && s->has[Q_KL] && !live; i++) live = y->kl[t * KLS * FORMS + i];
        for (int i = 0; i < SLOPES * FORMS * 4 && s->has_grad && !live; i++)
            live = y->grad[t * SLOPES * FORMS * 4 + i] != 0;
        if (!live || !judge_usable(s, t)) continue;
        const int same = same_as(s, r, t, least);
        p->next[t] = p->group[same];
        p->group[same] = t;
    }
    for (int t = 0; t < TARGETS; t++)
        if (p->group[t] >= 0) match_group(s, p, logs, t, measure);
    match_predictions(s, p, logs);
}

/* ---- beside what is expected ---- */

static void compare_value(const search *s, piece *p) {
    const judge *j = s->j;
    judge_row *r = &p->r;
    const int64_t n = r->n;
    double *target = r->a[0], *unit = r->a[1], *got = r->a[2], *log_p = r->a[3], *zero = r->a[4];
    const cg_contract *c = &s->expected;
    const bool counts = r->real || (r->segment >= 0 && (c->faults & CG_FAULT_PADDING_IN_LOSS));
    const cg_contract_row row = judge_contract_row(j, r, c->value[CG_AXIS_SCORES]);
    if (r->segment < 0) return;
    if (counts && s->has_value) {
        cg_contract_target(c, &row, target, r->heads);
        cg_contract_log_predict(c, &row, log_p);
    } else {
        memset(target, 0, (size_t)n * sizeof *target);
        memset(log_p, 0, (size_t)n * sizeof *log_p);
    }
    if (s->has[Q_TARGET]) {
        cg_dump_columns(j->d, CG_DUMP_TARGET, r->t, n, got);
        target_units(s, r, c, target, unit);
        judge_compare(j, &p->stats[Q_TARGET], r->segment, r->position, r->t, n, 0, got, target, unit);
        for (int64_t i = 0; !r->real && i < n; i++)
            if (got[i] != 0) {
                p->padding_value++;
                break;
            }
    }
    for (int q = Q_LOG_PREDICT; q <= Q_PREDICT; q++) {
        if (!s->has[q]) continue;
        read_logs(s, r, judge_quantity[q].id, got);
        if (counts)
            expected_log_units(s, r, c, judge_quantity[q].id, log_p, unit);
        else
            memset(unit, 0, (size_t)n * sizeof *unit);
        for (int64_t i = 0; i < n; i++)
            zero[i] = !counts ? 0 : q == Q_LOG_PREDICT ? log_p[i] : in_support(r, c, i) ? exp(log_p[i]) : 0;
        judge_compare(j, &p->stats[q], r->segment, r->position, r->t, n, 0, got, zero, unit);
    }
    if (s->has[Q_KL]) {
        const double kl = counts && n ? cg_contract_kl(c, &row, target, log_p) : 0;
        const double u = n ? kl_unit(s, r, c, kl, target, log_p, CG_DUMP_KL) : 0;
        cg_dump_row(j->d, CG_DUMP_KL, r->t, got);
        judge_compare(j, &p->stats[Q_KL], r->segment, r->position, r->t, 1, 0, got, &kl, &u);
        p->padding_value += !r->real && got[0] != 0;
        p->empty_value += r->real && !n && got[0] != 0;
    }
    if (!r->real) /* what padding would add to the loss */
        for (int i = 0; i < s->n_list; i++) {
            const listed *l = &s->list[i];
            const cg_contract k = contract_of(l->target, l->kl, l->form);
            const cg_contract_row padded = judge_contract_row(j, r, l->form);
            double kl;
            if (!n) continue;
            cg_contract_row_eval(&k, &padded, target, NULL, NULL, &kl, r->heads);
            p->list[i].padding += kl;
        }
}

static void compare_gradient(const search *s, piece *p) {
    const judge *j = s->j;
    const cg_dump *d = j->d;
    judge_row *r = &p->r;
    const int64_t n = r->n, G = d->Hi, E = d->Di;
    double *target = r->a[0], *log_p = r->a[3], *dscores = r->a[6], *noise = r->a[7];
    const double coeff = isnan(d->coeff) ? 1 : d->coeff;
    for (int which = 0; which < (s->n_grad_k ? s->n_grad_k : 1); which++) {
        const cg_contract *c = s->n_grad_k ? &s->grad_k[which] : &s->expected;
        const bool counts = n > 0 && (r->real || (r->segment >= 0 && (c->faults & CG_FAULT_PADDING_IN_LOSS)));
        const cg_contract_row row = judge_contract_row(j, r, c->value[CG_AXIS_SCORES]);
        const double f = counts ? cg_contract_grad_factor(c, &j->counts, coeff, d->real[r->segment]) : 0;
        memset(p->e, 0, (size_t)(G + G * E) * sizeof *p->e);
        memset(p->unit, 0, (size_t)(G + G * E) * sizeof *p->unit);
        if (counts) {
            cg_contract_target(c, &row, target, r->heads);
            if (cg_contract_log_predict(c, &row, log_p)) {
                gradient(s, p, c, target, log_p, s->has[Q_GRAD_Q] && which == 0, dscores, noise);
                if (p->dk[which]) {
                    double *dk = p->dk[which] + j->key0[r->segment] * E;
                    for (int64_t i = 0; i < n; i++) dscores[i] *= f;
                    const cg_contract_index index = {.n_heads = G,
                                                     .head_dim = E,
                                                     .n_keys = n,
                                                     .q = r->qi,
                                                     .w = r->w,
                                                     .dots = r->dots,
                                                     .k = j->ki + j->key0[r->segment] * E};
                    cg_contract_index_grad(c, &index, dscores, NULL, NULL, dk);
                    const bool leak =
                        c->value[CG_AXIS_SCORES] == CG_SCORES_ARE_LINEAR || (c->faults & CG_FAULT_RELU_LEAK);
                    if (which == s->n_grad_k - 1) { /* rounding of each key's sum, as one number */
                        double *u = p->dk_noise + j->key0[r->segment];
                        const double dot_noise = judge_dot_noise(j, r, j->rounding[CG_DUMP_GRAD_K_INDEXER]);
                        for (int64_t g = 0; g < G; g++) {
                            double most = 0;
                            for (int64_t i = 0; i < E; i++) most = fmax(most, fabs(r->qi[g * E + i]));
                            most *= fabs(r->w[g]);
                            for (int64_t i = 0; i < n; i++) {
                                const double x = r->dots[g * n + i];
                                if (leak || x > -dot_noise) u[i] += most * fabs(f) * noise[i];
                                if (fabs(x) <= 8 * dot_noise) u[i] += most * fabs(dscores[i]);
                            }
                        }
                    }
                }
            }
        }
        if (which > 0) continue;
        read_gradient(s, p);
        for (int64_t i = s->has[Q_GRAD_W] ? 0 : G; s->has_grad && i < G + (s->has[Q_GRAD_Q] ? G * E : 0); i++) {
            p->sum_fg += p->e[i] * p->got[i];
            p->sum_ff += p->e[i] * p->e[i];
        }
        for (int64_t i = 0; i < G + G * E; i++) {
            p->e[i] *= f;
            p->unit[i] *= fabs(f);
        }
        if (s->has[Q_GRAD_W])
            judge_compare(j, &p->stats[Q_GRAD_W], r->segment, r->position, r->t, G, 1, p->got, p->e, p->unit);
        if (s->has[Q_GRAD_Q])
            judge_compare(j, &p->stats[Q_GRAD_Q], r->segment, r->position, r->t, G * E, E, p->got + G, p->e + G,
                          p->unit + G);
        bool some = false;
        for (int64_t i = s->has[Q_GRAD_W] ? 0 : G; s->has_grad && i < (s->has[Q_GRAD_Q] ? G + G * E : G); i++)
            some |= p->got[i] != 0;
        p->padding_grad += some && !r->real && r->segment >= 0;
        p->empty_grad += some && r->real && n == 0;
    }
}

/* ---- passes over rows ---- */

static bool piece_new(const search *s, piece *p, const tables *from) {
    const cg_dump *d = s->j->d;
    const size_t n = (size_t)(d->Hi + d->Hi * d->Di) + 1, keys = (size_t)s->j->key0[d->B] + 1;
    memset(p, 0, sizeof *p);
    judge_stat_init(p->stats, QUANTITIES);
    if (!judge_row_new(s->j, &p->r)) return false;
    p->tables = malloc(sizeof *p->tables);
    p->e = calloc(3 * n, sizeof *p->e);
    if (!p->tables || !p->e) return false;
    p->unit = p->e + n;
    p->got = p->unit + n;
    *p->tables = *from;
    memcpy(p->list, s->list, sizeof p->list);
    for (int i = 0; i < s->n_grad_k; i++)
        if (!(p->dk[i] = calloc(keys * (size_t)d->Di, sizeof(double)))) return false;
    return !s->n_grad_k || (p->dk_noise = calloc(keys, sizeof(double))) != NULL;
}

static void piece_free(piece *p) {
    judge_row_free(&p->r);
    free(p->tables);
    free(p->e);
    free(p->dk[0]);
    free(p->dk[1]);
    free(p->dk_noise);
}

static void one_row(const search *s, piece *p, int64_t t, bool match, bool compare, bool measure) {
    const judge *j = s->j;
    judge_row *r = &p->r;
    judge_row_place(j, r, t);
    if (r->segment >= 0) {
        judge_row_scores(j, r);
        judge_row_attention(j, r);
    }
    if (match && r->real && r->n > 0) {
        row_logs logs = {.at = {{r->a[4], r->a[5]}, {r->x[1], r->x[2]}}};
        match_row(s, p, &logs, measure);
    }
    if (!compare) return;
    compare_value(s, p);
    if ((s->has_grad || s->has[Q_GRAD_K]) && j->has_dots && j->has_logits) compare_gradient(s, p);
}

static void keep_common(tables *to, const tables *from) {
    for (int i = 0; i < TARGETS * FORMS; i++) to->target[i] &= from->target[i];
    for (int i = 0; i < 4; i++) to->predict[i / 2][i % 2] &= from->predict[i / 2][i % 2];
    for (int i = 0; i < VALUES; i++) to->kl[i] &= from->kl[i];
    for (int i = 0; i < GRADS; i++) to->grad[i] &= from->grad[i];
}

/* The rows of a sample: spread out, and the ones with most keys among them. One after the other: each drops what the
 * next need not look at. */
bool judge_search_sample(search *s, double *distance, int *n_measured) {
    const cg_dump *d = s->j->d;
    piece *p = malloc(sizeof *p);
    const bool ok = p && piece_new(s, p, s->start);
    const int64_t rows = s->j->counts.visible, step = rows / SAMPLE + 1;
    int64_t seen = 0;
    for (int64_t t = 0; ok && t < d->T; t++) {
        if (!cg_dump_is_real(d, t) || !cg_dump_visible(d, t)) continue;
        seen++;
        if (seen != rows && (rows - seen) % step) continue;
        if (distance && *n_measured == MEASURED) break;
        one_row(s, p, t, true, false, distance != NULL);
        if (distance) ++*n_measured;
    }
    if (ok && distance) memcpy(distance, p->distance, sizeof p->distance);
    if (ok && !distance) keep_common(s->start, p->tables);
    if (p) piece_free(p);
    free(p);
    return ok;
}

/* Every row: what is left of the tables, errors beside the expected, sums. */
bool judge_search_all(search *s, result *out, bool match, bool compare) {
    const cg_dump *d = s->j->d;
    piece *pieces = calloc(JUDGE_CHUNKS, sizeof *pieces);
    bool ok = pieces != NULL;
#pragma omp parallel for schedule(dynamic, 1) reduction(&& : ok)
    for (int c = 0; c < JUDGE_CHUNKS; c++) {
        ok = ok && piece_new(s, &pieces[c], s->start);
        for (int64_t t = c; ok && t < d->T; t += JUDGE_CHUNKS) one_row(s, &pieces[c], t, match, compare, false);
    }
    judge_stat_init(out->stats, QUANTITIES);
    memcpy(out->list, s->list, sizeof out->list);
    for (int c = 0; ok && c < JUDGE_CHUNKS; c++) {
        piece *p = &pieces[c];
        keep_common(s->start, p->tables);
        for (int q = 0; q < QUANTITIES; q++) judge_stat_merge(&out->stats[q], &p->stats[q], s->j->n_worst);
        for (int i = 0; i < s->n_list; i++) {
            out->list[i].sum += p->list[i].sum;
            out->list[i].noise += p->list[i].noise;
            out->list[i].padding += p->list[i].padding;
            out->list[i].of_means += p->list[i].of_means;
        }
        out->padding_value += p->padding_value;
        out->padding_grad += p->padding_grad;
        out->empty_value += p->empty_value;
        out->empty_grad += p->empty_grad;
        out->sum_fg += p->sum_fg;
        out->sum_ff += p->sum_ff;
        const int64_t keys = s->j->key0[d->B];
        for (int i = 0; i < s->n_grad_k; i++) {
            if (c == 0) {
                out->dk[i] = p->dk[i];
                p->dk[i] = NULL;
            } else {
                for (int64_t k = 0; k < keys * d->Di; k++) out->dk[i][k] += p->dk[i][k];
            }
        }
        if (s->n_grad_k && c == 0) {
            out->dk_noise = p->dk_noise;
            p->dk_noise = NULL;
        } else if (s->n_grad_k) {
            for (int64_t k = 0; k < keys; k++) out->dk_noise[k] += p->dk_noise[k];
        }
    }
    for (int c = 0; pieces && c < JUDGE_CHUNKS; c++) piece_free(&pieces[c]);
    free(pieces);
    return ok;
}
