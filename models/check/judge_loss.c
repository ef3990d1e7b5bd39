/* Which contract do target, prediction, kl, loss and gradients follow? The search says what is possible; this file chooses
 * the simplest, tells value from gradient, and asks of everything that it finds whether enough numbers carry it. The
 * words are made in judge_say.c.
 *
 * A contract may be named when numbers that tell it from the expected one fit it, enough of them that none of the
 * contracts tried would by chance. One number, the loss, never does. Arithmetic coarser than that of the inputs is
 * thought of only when no contract explains the numbers without, and is believed where it shows
 * (judge_outcome_of). */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "models/check/judge_facts.h"

/* What numbers must say before they name a contract: each change from the expected one multiplies the contracts that are as
 * simple by about 2^5, and 13 bits more make a chance fit one in eight thousand. */
static double enough_bits(const cg_contract *c, const cg_contract *expected) {
    int changes = 0;
    for (int a = 0; a < CG_AXES; a++) changes += c->value[a] != expected->value[a];
    return 13 + 5 * (changes + __builtin_popcount(c->faults ^ expected->faults));
}

double judge_cost(const cg_contract *c, const cg_contract *expected) {
    double sum = 0;
    for (int a = 0; a < CG_AXES; a++)
        if (c->value[a] != expected->value[a])
            sum += 1 + 0.01 * c->value[a] + (cg_axis_value_is_fault((cg_axis)a, c->value[a]) ? 0.3 : 0);
    for (int f = 0; f < CG_FAULTS; f++)
        if ((c->faults ^ expected->faults) >> f & 1) sum += 1.3;
    return sum;
}

/* ---- choosing ---- */

enum { LOSS_FACTORS = REDUCTIONS * 3 * 2 * 2 }; /* coefficient, recorded twice, padding */

static cg_contract with_loss_factor(cg_contract c, int v) {
    c.value[CG_AXIS_REDUCTION] = v / 12;
    if (v / 4 % 3 == 1) c.faults |= CG_FAULT_COEFF_MISSING;
    if (v / 4 % 3 == 2) c.faults |= CG_FAULT_COEFF_TWICE;
    if (v / 2 % 2) c.faults |= CG_FAULT_LOSS_TWICE;
    if (v % 2) c.faults |= CG_FAULT_PADDING_IN_LOSS;
    return c;
}

/* Which factors make the dump's loss of each sum. */
static void fit_losses(search *s) {
    for (int i = 0; i < s->n_list; i++) {
        listed *l = &s->list[i];
        for (int v = 0; v < LOSS_FACTORS; v++) {
            const cg_contract c = with_loss_factor(contract_of(l->target, l->kl, l->form, l->weight), v);
            const double want = judge_loss_of(s, &l->sums, &c), noise = judge_loss_noise(s, &l->sums, &c);
            l->fits[v] = judge_same(s->j, CG_DUMP_LOSS, 1, &s->loss, &want, &noise);
        }
    }
}

/* What explains the numbers is walked through three times: for the simplest contract; for the axes of it that may be
 * changed alone; and for the simplest contract that is told apart by neither. */
typedef enum walk { WALK_BEST, WALK_ALONE, WALK_COMBINED, WALKS } walk;

typedef struct walker {
    walk walk;
    const cg_contract *expected;
    double cost, combined_cost;
    choice *to;
} walker;

static void consider(walker *w, const cg_contract *c) {
    choice *best = w->to;
    const double price = judge_cost(c, w->expected);
    int n_changed = 0, changed = 0;
    bool elsewhere = false;
    best->underflow |= (c->faults & CG_FAULT_TEACHER_UNDERFLOW) != 0;
    if (w->walk == WALK_BEST) {
        best->n++;
        if (best->found && w->cost <= price) return;
        best->found = true;
        best->c = *c;
        w->cost = price;
        return;
    }
    for (int a = 0; a < CG_AXES; a++) {
        if (c->value[a] == best->c.value[a]) continue;
        n_changed++;
        changed = a;
        elsewhere |= !(best->also[a] >> c->value[a] & 1);
    }
    if (c->faults != best->c.faults) return;
    if (w->walk == WALK_ALONE) {
        for (int a = 0; a < CG_AXES; a++) best->also[a] |= 1u << best->c.value[a];
        if (n_changed == 1) best->also[changed] |= 1u << c->value[changed];
    } else if (elsewhere && (!best->combined || price < w->combined_cost)) {
        best->combined = true;
        best->combination = *c;
        w->combined_cost = price;
    }
}

/* Nothing that the walk looks for can come of a contract and its factors. `base`: without them, the reduction apart. */
static bool is_idle(const walker *w, const cg_contract *base) {
    const unsigned fixed = CG_FAULT_DENSE_OVER_SPARSE_LSE | CG_FAULT_TEACHER_UNDERFLOW;
    const choice *best = w->to;
    cg_contract c = *base;
    c.value[CG_AXIS_REDUCTION] = w->expected->value[CG_AXIS_REDUCTION];
    c.faults |= w->expected->faults & ~fixed;
    if (w->walk == WALK_BEST) return best->found && judge_cost(&c, w->expected) > w->cost;
    if ((c.faults ^ best->c.faults) & fixed) return true;
    if (w->walk == WALK_COMBINED) return best->combined && judge_cost(&c, w->expected) >= w->combined_cost;
    int changed = 0;
    for (int a = 0; a < CG_AXES; a++) changed += a != CG_AXIS_REDUCTION && c.value[a] != best->c.value[a];
    return changed > 1;
}

static bool value_alive(const search *s, unsigned parts, int t, int kl, int form, int weight) {
    const tables *y = s->start;
    const int dense = key_of(t).support != 0;
    if (weight && !judge_weighable(t)) return false;
    if ((parts & PART(Q_TARGET)) && !y->target[t * FORMS + form]) return false;
    if ((parts & (PART(Q_LOG_PREDICT) | PART(Q_PREDICT))) && !y->predict[dense][form]) return false;
    return !(parts & PART(Q_KL)) || y->kl[value_number(t, kl, form, weight)];
}

/* What of the gradients a contract must give. */
typedef enum demand { NO_GRADIENT, NAMED_FACTOR, ANY_FACTOR } demand;

/* Contracts that give the value's quantities in `parts`, and the gradients. */
static void walk_values(const search *s, unsigned parts, demand gradient, walker *w) {
    for (int number = 0; number < VALUES; number++) {
        const int weight = number % WEIGHTS, form = number / WEIGHTS % FORMS,
                  kl = number / WEIGHTS / FORMS % KLS, t = number / WEIGHTS / FORMS / KLS;
        const cg_contract base = contract_of(t, kl, form, weight);
        if (!judge_usable(s, t) || !value_alive(s, parts, t, kl, form, weight)) continue;
        if (gradient != NO_GRADIENT && is_idle(w, &base)) continue;
        const listed *l = NULL;
        for (int i = s->first_listed[t]; i < s->first_listed[t + 1]; i++)
            if (s->list[i].kl == kl && s->list[i].form == form && s->list[i].weight == weight) l = &s->list[i];
        if ((parts & PART(Q_LOSS)) && !l) continue;
        for (int v = 0; v < LOSS_FACTORS; v++) {
            if (parts & PART(Q_LOSS) ? !l->fits[v] : v % (gradient == NO_GRADIENT ? 12 : 4)) continue;
            const cg_contract c = with_loss_factor(base, v);
            if (gradient == NO_GRADIENT) {
                consider(w, &c);
                continue;
            }
            for (int extra = 0; extra < EXTRAS; extra++) {
                const uint64_t bits = s->start->grad[grad_number(t, slope_of(kl), form, weight, extra)];
                for (int sign = 0; sign < 3; sign++) { /* as it is, opposite, none */
                    const int factor = sign == 2 ? ZERO_FACTOR : v / 4 * 2 + sign;
                    if (gradient == ANY_FACTOR ? sign || !(bits & DIRECTION) : !(bits >> factor & 1)) continue;
                    cg_contract both = c;
                    both.faults |= gradient_contract(t, 0, form, weight, extra).faults;
                    if (sign) both.faults |= sign == 2 ? CG_FAULT_GRADIENT_ZERO : CG_FAULT_GRADIENT_SIGN;
                    consider(w, &both);
                }
            }
        }
    }
}

static choice choose(const search *s, unsigned parts, demand gradient) {
    choice best = {0};
    walker w = {.expected = &s->expected, .to = &best};
    for (; w.walk < WALKS && (best.found || w.walk == WALK_BEST); w.walk++) walk_values(s, parts, gradient, &w);
    return best;
}

/* Contracts of the gradients alone, near the value's. */
static void walk_gradients(const search *s, const cg_contract *near, demand factor, walker *w) {
    for (int number = 0; number < GRADS; number++) {
        const uint64_t bits = s->start->grad[number];
        const int extra = number % EXTRAS, weight = number / EXTRAS % WEIGHTS,
                  form = number / EXTRAS / WEIGHTS % FORMS, slope = number / EXTRAS / WEIGHTS / FORMS % SLOPES,
                  t = number / SLOPES_OF_TARGET;
        const cg_contract base = gradient_contract(t, slope, form, weight, extra);
        if (!bits || (slope && is_idle(w, &base))) continue;
        for (int f = 0; f <= FACTORS; f++) {
            if (factor == ANY_FACTOR ? f || !(bits & DIRECTION) : !(bits >> f & 1)) continue;
            cg_contract c = base;
            if (factor != ANY_FACTOR) c = with_factor(c, f);
            if (slope == 0 && slope_of(near->value[CG_AXIS_KL]) == 0)
                c.value[CG_AXIS_KL] = near->value[CG_AXIS_KL];
            if (factor == ANY_FACTOR || f == ZERO_FACTOR)
                c.value[CG_AXIS_REDUCTION] = near->value[CG_AXIS_REDUCTION];
            consider(w, &c);
        }
    }
}

static choice choose_gradient(const search *s, const cg_contract *near, demand factor) {
    choice best = {0};
    walker w = {.expected = near, .to = &best};
    for (; w.walk < WALKS && (best.found || w.walk == WALK_BEST); w.walk++) walk_gradients(s, near, factor, &w);
    return best;
}

/* ---- which losses to sum ---- */

typedef struct candidate {
    double cost;
    int number;
} candidate;

static int by_cost(const void *a, const void *b) {
    const candidate *x = a, *y = b;
    return x->cost < y->cost ? -1 : x->cost > y->cost ? 1 : x->number - y->number;
}
static int by_number(const void *a, const void *b) {
    return ((const candidate *)a)->number - ((const candidate *)b)->number;
}

/* alive: those alone that the rows leave, if there are rows; otherwise the likelier ones of the rest too, which the loss
 * alone could speak for. */
static bool list_losses(search *s, bool alive) {
    candidate *all = malloc(VALUES * sizeof *all);
    unsigned rows = 0;
    int n = 0;
    for (int q = 0; q < Q_LOSS; q++) rows |= s->has[q] ? PART(q) : 0;
    if (!all) return false;
    cg_contract base = s->expected;
    base.value[CG_AXIS_REDUCTION] = 0;
    for (int number = 0; number < VALUES; number++) {
        const int weight = number % WEIGHTS, form = number / WEIGHTS % FORMS,
                  kl = number / WEIGHTS / FORMS % KLS, t = number / WEIGHTS / FORMS / KLS;
        const cg_contract c = contract_of(t, kl, form, weight);
        if (!judge_usable(s, t) || (weight && !judge_weighable(t))) continue;
        double price = judge_cost(&c, &base);
        bool fits = rows && value_alive(s, rows, t, kl, form, weight);
        if (!rows && s->has_grad)
            for (int extra = 0; extra < EXTRAS; extra++)
                fits |= s->start->grad[grad_number(t, slope_of(kl), form, weight, extra)] != 0;
        if (t == target_of(&s->expected) && kl == s->expected.value[CG_AXIS_KL] &&
            form == s->expected.value[CG_AXIS_SCORES] && weight == s->expected.value[CG_AXIS_ROW_WEIGHT])
            price = -2;
        else if (fits)
            price = price / 1000 - 1; /* before those that only the loss could speak for */
        else if (alive && (rows || s->has_grad))
            continue;
        all[n++] = (candidate){price, number};
    }
    qsort(all, (size_t)n, sizeof *all, by_cost);
    while (n > 0 && (n > LISTED || all[n - 1].cost > 3.5)) n--;
    qsort(all, (size_t)n, sizeof *all, by_number);
    s->n_list = n;
    for (int i = 0; i < n; i++)
        s->list[i] = (listed){.target = all[i].number / WEIGHTS / FORMS / KLS,
                              .kl = all[i].number / WEIGHTS / FORMS % KLS,
                              .form = all[i].number / WEIGHTS % FORMS,
                              .weight = all[i].number % WEIGHTS};
    for (int t = 0, i = 0; t <= TARGETS; t++) {
        while (i < n && s->list[i].target < t) i++;
        s->first_listed[t] = i;
    }
    free(all);
    return true;
}

/* ---- set up ---- */

static bool set_up(facts *f, cg_error *error) {
    search *s = f->s;
    judge *j = s->j;
    const cg_dump *d = j->d;
    const char *lacks[QUANTITIES] = {0};
    f->expectable = j->has_logits && judge_usable(s, target_of(&s->expected));
    for (int q = 0; q < QUANTITIES; q++) {
        if (!cg_dump_has(d, judge_quantity[q].id)) continue;
        const bool predicts = q == Q_LOG_PREDICT || q == Q_PREDICT;
        if (!predicts && !j->has_logits) lacks[q] = "query and compressed_kv are";
        if (!lacks[q] && q != Q_TARGET && !j->has_scores) lacks[q] = "q_indexer, weights and k_indexer are";
        if (!lacks[q] && q >= Q_GRAD_Q && !j->has_dots) lacks[q] = "q_indexer, weights and k_indexer are";
        if (lacks[q]) judge_add_unjudged(j, judge_quantity[q].name, judge_quantity[q].id, lacks[q]);
        s->has[q] = !lacks[q];
        f->parts |= lacks[q] ? 0 : PART(q);
    }
    s->has_value = (f->parts & VALUE_PARTS) != 0;
    s->has_grad = (f->parts & ROW_GRADIENTS) != 0;
    if (!f->parts) return true;
    if ((f->parts & (PART(Q_LOSS) | GRADIENTS)) && isnan(d->coeff))
        return cg_fail(error, CG_BAD_INPUT,
                       "loss_coeff is needed to judge loss and gradients: give --loss-coeff X");
    if (!j->has_list && d->K < 0 && s->expected.value[CG_AXIS_SUPPORT] == CG_SUPPORT_IS_SPARSE)
        return cg_fail(error, CG_BAD_INPUT,
                       "topk is needed (compressed rows that a token selects): give --topk N");
    s->coarse = true;
    for (int q = 0; q < QUANTITIES; q++) s->coarse &= !s->has[q] || j->own[judge_quantity[q].id] >= JUDGE_F32;
    if (s->has[Q_LOSS]) cg_dump_row(d, CG_DUMP_LOSS, 0, &s->loss);
    f->nothing = d->coeff == 0 && !(f->parts & ROW_PARTS);
    return true;
}

/* ---- looking ---- */

/* Hold every answer against arithmetic of this level, or its own where that is coarser. False: that changes nothing. */
static bool set_level(judge *j, judge_level level) {
    bool changed = false;
    for (int id = 0; id < CG_DUMP_ARRAYS; id++) {
        const judge_level to = level > j->own[id] ? level : j->own[id];
        changed |= cg_dump_has(j->d, (cg_dump_id)id) && to != j->level[id];
        j->level[id] = to;
    }
    return changed;
}

/* as_expected: all numbers are; what else gives them is looked for. */
static bool look(search *s, bool as_expected) {
    s->j->v->n_looks++;
    judge_search_reset(s, false);
    if (!judge_search_sample(s, NULL, NULL) || (s->has[Q_LOSS] && !list_losses(s, as_expected)) ||
        !judge_search_all(s))
        return false;
    fit_losses(s);
    return true;
}

/* The quantities of `parts` that stand with an outcome, at no coarser level than `most` beyond what needs no evidence. */
static unsigned outcomes(const search *s, const compared *c, unsigned parts, judge_outcome outcome,
                         judge_level most) {
    unsigned found = 0;
    for (int q = 0; q < QUANTITIES; q++) {
        const cg_dump_id id = judge_quantity[q].id;
        judge_level level;
        if (!(parts & PART(q))) continue;
        judge_outcome is = judge_outcome_of(s->j, id, &c->stats[q], &level);
        if (is == JUDGE_SAME && level > most && level > s->j->free[id]) is = JUDGE_OTHER;
        if (is == outcome) found |= PART(q);
    }
    return found;
}

/* One factor for the gradients of `parts`. */
static bool factor_of(const search *s, const compared *c, unsigned parts, double *factor) {
    const judge_stat *stats[3];
    cg_dump_id ids[3];
    int n = 0;
    for (int q = Q_GRAD_Q; q <= Q_GRAD_K; q++)
        if (parts & PART(q)) {
            stats[n] = &c->stats[q];
            ids[n++] = judge_quantity[q].id;
        }
    return n > 0 && judge_factor_of(s->j, stats, ids, n, factor);
}

/* p / q with p * q at most 64. */
static bool is_simple(double x) {
    for (int q = 1; q <= 8; q++) {
        const double p = fabs(fabs(x) < 1 ? 1 / x : x) * q;
        if (fabs(p - round(p)) < 1e-9 * p && round(p) * q <= 64) return true;
    }
    return false;
}

/* One factor for all indexer gradients that are not as expected. Few numbers have some factor by chance or by
 * rounding: then it must be a simple one, and hit closely. */
static bool find_factor(facts *f) {
    const unsigned off = f->parts & GRADIENTS & ~f->as_expected;
    int64_t n = 0, rows = 0;
    double width = INFINITY;
    bool exact = true; /* without coarser arithmetic than needs no evidence */
    if (!off || !factor_of(f->s, &f->beside, off, &f->factor)) return false;
    for (int q = Q_GRAD_Q; q <= Q_GRAD_K; q++) {
        const judge_stat *stat = &f->beside.stats[q];
        const judge_factor *own = &stat->factor[f->s->j->own[judge_quantity[q].id]],
                           *free = &stat->factor[f->s->j->free[judge_quantity[q].id]];
        if (!(off & PART(q))) continue;
        exact &= free->lo <= free->hi;
        n += own->n;
        rows += stat->beyond;
        width = fmin(width, own->hi - own->lo);
    }
    const bool simple = exact && n >= 4 && width < 1e-3 * fabs(f->factor) && is_simple(f->factor);
    return simple || (n >= (exact ? 6 : 24) && rows >= 3 && !(off & f->unsure));
}

static bool same_contract(const cg_contract *a, const cg_contract *b) {
    return a->faults == b->faults && !memcmp(a->value, b->value, sizeof a->value);
}

/* How the dump stands beside what was chosen for `given`; any_factor: gradients have a direction only. */
static bool examine(facts *f, finding *x, unsigned given, bool any_factor, judge_level level) {
    search *s = f->s;
    x->given = given;
    x->has_factor = any_factor;
    x->beside.value = x->beside.gradient = x->choice.c;
    /* whether padding counts is seen in the loss for the value, in the gradients of padding rows for those */
    x->beside.gradient.faults &= ~(unsigned)CG_FAULT_PADDING_IN_LOSS;
    if (f->beside.padding_grad) x->beside.gradient.faults |= CG_FAULT_PADDING_IN_LOSS;
    const bool empty =
        f->beside.empty_value || f->beside.empty_grad; /* counted beside the expected one alone */
    if (!any_factor && !empty && same_contract(&x->beside.value, &f->beside.value) &&
        same_contract(&x->beside.gradient, &f->beside.gradient))
        x->beside = f->beside; /* nothing tells it from itself */
    else if (!judge_search_compare(s, &f->beside, any_factor, &x->beside))
        return false;
    x->explained = outcomes(s, &x->beside, f->parts, JUDGE_SAME, level);
    unsigned factored = f->parts & GRADIENTS;
    if (any_factor) {
        x->one_factor = factor_of(s, &x->beside, factored, &x->factor);
        if (!x->one_factor && (factored & PART(Q_GRAD_K)))
            x->one_factor = factor_of(s, &x->beside, factored &= ~PART(Q_GRAD_K), &x->factor);
        x->explained &= ~(unsigned)GRADIENTS;
        if (x->one_factor) x->explained |= factored;
    }
    for (int q = 0; q < QUANTITIES; q++)
        if (q != Q_LOSS && (x->explained & PART(q)) && x->beside.tells[q].bits > x->rests_on.bits)
            x->rests_on = x->beside.tells[q];
    cg_contract plain = x->choice.c;
    const bool is_expected = judge_cost(&plain, &s->expected) == 0 && !any_factor;
    const double loss = x->explained & PART(Q_LOSS) ? x->beside.tells[Q_LOSS].bits : 0;
    x->carried =
        is_expected || (x->rests_on.bits > 0 && x->rests_on.bits + loss >= enough_bits(&plain, &s->expected));
    /* where rows follow the expected contract, the loss alone may be one step away from it: it must hit that closely */
    if (!x->carried && !any_factor && (given & PART(Q_LOSS)) && (x->explained & ~PART(Q_LOSS)) &&
        f->expectable && x->beside.numbers >= 2 && judge_cost(&plain, &s->expected) < 2 &&
        x->beside.tells[Q_LOSS].rows)
        x->carried = x->beside.stats[Q_LOSS].worst_units[s->j->level[CG_DUMP_LOSS]] <= 1 &&
                     !outcomes(s, &f->beside, ROW_GRADIENTS & f->parts, JUDGE_OTHER, level);
    return true;
}

/* One contract for everything. Without `keys` the gradient of the keys, a sum over rows, may be wrong by itself. */
static bool find_joint(facts *f, judge_level level, bool keys, bool *done) {
    const search *s = f->s;
    const demand named = s->has_grad ? NAMED_FACTOR : NO_GRADIENT;
    finding *x = &f->joint;
    *x = (finding){.choice = choose(s, f->parts & VALUE_PARTS, named)};
    const bool any = !x->choice.found && s->has_grad;
    if (any) x->choice = choose(s, f->parts & VALUE_PARTS, ANY_FACTOR);
    *done = false;
    if (!x->choice.found) return true;
    if (!examine(f, x, f->parts, any, level)) return false;
    *done = x->carried && !(f->parts & ~x->explained & ~(keys ? 0 : PART(Q_GRAD_K)));
    if (!*done || !any) return true;
    /* with the factor known, rows tell more than by their directions */
    f->s->gradient_factor = x->factor;
    const bool ok = look(f->s, false);
    f->s->gradient_factor = 1;
    const choice named_now = choose(s, f->parts & VALUE_PARTS, NAMED_FACTOR);
    if (ok && named_now.found && judge_cost(&named_now.c, &x->choice.c) == 0) x->choice = named_now;
    return ok;
}

/* Values and gradients apart: the most of the value that one contract gives. */
static bool find_parts(facts *f, judge_level level) {
    const search *s = f->s;
    const unsigned parts = f->parts & VALUE_PARTS, predicts = PART(Q_LOG_PREDICT) | PART(Q_PREDICT);
    const unsigned tries[] = {parts,
                              parts & ~PART(Q_LOSS),
                              parts & (PART(Q_TARGET) | predicts),
                              parts & PART(Q_TARGET),
                              parts & PART(Q_KL),
                              parts & predicts,
                              parts & PART(Q_LOSS)};
    finding *v = &f->value, *g = &f->gradient;
    *v = *g = (finding){0};
    unsigned given = 0;
    for (int i = 0; i < 7 && !v->choice.found; i++)
        if ((given = tries[i])) v->choice = choose(s, given, NO_GRADIENT);
    if (v->choice.found && !examine(f, v, given, false, level)) return false;
    if (!s->has_grad) return true;
    const cg_contract *near = v->choice.found && v->carried ? &v->choice.c : &s->expected;
    g->choice = choose_gradient(s, near, NAMED_FACTOR);
    const bool any = !g->choice.found;
    if (any) g->choice = choose_gradient(s, near, ANY_FACTOR);
    return !g->choice.found || examine(f, g, f->parts & GRADIENTS, any, level);
}

/* Scales that are often missing or applied twice: of the head weights, of the softmax. */
static int scales(const judge *j, int which, double *out) {
    const cg_dump *d = j->d;
    const double heads = sqrt((double)(d->Hi > 0 ? d->Hi : 1)), index = sqrt((double)(d->Di > 0 ? d->Di : 1)),
                 wide = sqrt((double)(d->D > 0 ? d->D : 1));
    const double weights[] = {heads * index, heads, index, heads * heads, index * index},
                 softmax[] = {wide, wide * wide, d->scale, log2(exp(1)), 2, 4};
    const double *list = which ? softmax : weights;
    const int n = which ? sizeof softmax / sizeof *softmax : sizeof weights / sizeof *weights;
    int count = 0;
    for (int i = 0; i < n; i++)
        for (int inverse = 0; inverse < 2; inverse++) {
            const double x = inverse ? 1 / list[i] : list[i];
            if (x != 1 && isfinite(x) && x != 0) out[count++] = x;
        }
    return count;
}

static bool is_judged_ok(const judge *j, const char *name) {
    for (int i = 0; i < j->v->n_quantities; i++)
        if (!strcmp(j->v->quantities[i].name, name)) return j->v->quantities[i].ok;
    return false;
}

/* Nothing explains the rows: perhaps one scale of the inputs is not the one in use. */
static bool find_scale(facts *f, judge_level level, bool *done) {
    search *s = f->s;
    judge *j = s->j;
    double list[16], *const to[2] = {&j->weights_factor, &j->scale};
    const double before[2] = {j->weights_factor, j->scale};
    *done = false;
    if (!s->has_grad && !(f->parts & ROW_PARTS)) return true;
    const demand any_factor = s->has_grad ? ANY_FACTOR : NO_GRADIENT;
    /* rows that fit at the scale given say nothing of it: those that rounding explains fit at every other */
    judge_search_reset(s, true);
    if (!judge_search_sample(s, NULL, NULL)) return false;
    if (choose(s, f->parts & ROW_PARTS, any_factor).found) return true;
    for (int which = 0; which < 2 && !*done; which++) {
        if (which ? is_judged_ok(j, "output") || is_judged_ok(j, "lse") : is_judged_ok(j, "index_scores"))
            continue;
        const int n = scales(j, which, list);
        for (int i = 0; i < n && !*done; i++) {
            *to[which] = before[which] * list[i];
            judge_search_reset(s, true);
            if (!judge_search_sample(s, NULL, NULL)) return false;
            if (!choose(s, f->parts & ROW_PARTS, any_factor).found) continue;
            if (!judge_search_compare(s, NULL, false, &f->beside) || !look(s, false) ||
                !find_joint(f, level, false, done))
                return false;
            /* many scales are tried: with a contract that is far off too, one would fit some numbers */
            *done &= f->joint.beside.numbers >= 3 && judge_cost(&f->joint.choice.c, &s->expected) < 2;
        }
        if (!*done) {
            *to[which] = before[which];
            f->joint = (finding){0};
            if (!judge_search_compare(s, NULL, false, &f->beside)) return false;
            continue;
        }
        const double factor = *to[which] / before[which];
        judge_fault(j, which ? "softmax-scale" : "head-weights-scale");
        judge_note(j,
                   which ? "the softmax scale in use is %.6g times the one given"
                         : "the head weights in use are %.6g times those in the dump",
                   judge_simplest(factor * (1 - 1e-9), factor * (1 + 1e-9)));
    }
    return true;
}

static bool find_out(facts *f) {
    search *s = f->s;
    judge *j = s->j;
    const judge_level free = j->free[CG_DUMP_LOSS];
    bool done = false, as_expected = false;
    f->beside.value = f->beside.gradient = s->expected;
    set_level(j, JUDGE_F64);
    if (!judge_search_compare(s, NULL, false, &f->beside)) return false;
    if (f->nothing) {
        f->as_expected = outcomes(s, &f->beside, f->parts, JUDGE_SAME, JUDGE_BF16);
        return true;
    }
    /* finest arithmetic first: what explains the numbers without more rounding is the better explanation */
    for (judge_level level = JUDGE_F64; level < JUDGE_LEVELS && !done && !as_expected; level++) {
        if (!set_level(j, level) && level != JUDGE_F64) continue;
        s->coarser = level > JUDGE_F32;
        f->as_expected = f->expectable ? outcomes(s, &f->beside, f->parts, JUDGE_SAME, level) : 0;
        as_expected = f->as_expected == f->parts;
        if (level == JUDGE_F16 && !as_expected)
            continue; /* other contracts are looked for once, at the coarsest */
        if (!look(s, as_expected) || !find_joint(f, level, true, &done)) return false;
        if (done) j->ceiling = level;
        f->coarse = f->joint;
        if (j->tolerance > 0) break;
    }
    f->as_expected = f->expectable ? outcomes(s, &f->beside, f->parts, JUDGE_SAME, JUDGE_BF16) : 0;
    f->unsure = f->expectable ? outcomes(s, &f->beside, f->parts, JUDGE_UNSURE, JUDGE_BF16) : 0;
    if (done || as_expected) return true;
    f->group_factor = f->expectable && find_factor(f);
    if (f->group_factor) f->unsure &= ~(unsigned)GRADIENTS; /* rounding is no such factor */
    f->joint = (finding){0};
    set_level(j, free);
    s->coarser = false;
    if (f->parts & PART(Q_GRAD_K) & ~f->as_expected & ~f->unsure) {
        if (!look(s, false) || !find_joint(f, free, false, &done)) return false;
        if (done) j->ceiling = free;
        if (done) return true;
        f->joint = (finding){0};
    }
    if ((f->as_expected | f->unsure) == f->parts) {
        if (!look(s, false) || !find_parts(f, free)) return false;
        const finding *v = &f->value; /* a loss that hits another contract closely is no rounding */
        if (v->choice.found && v->carried && !(v->given & ~v->explained) && v->beside.tells[Q_LOSS].bits >= 10)
            f->unsure &= ~PART(Q_LOSS);
        return true;
    }
    if (!f->group_factor) {
        if (!find_scale(f, free, &done)) return false;
        if (done) return true;
    }
    if (!look(s, false) || !find_parts(f, free)) return false;
    bool some = false;
    for (int t = 0; t < TARGETS * FORMS; t++) some |= s->start->target[t];
    if (s->has[Q_TARGET] && !some) {
        judge_search_reset(s, false);
        return judge_search_sample(s, f->distance, &f->n_measured);
    }
    return true;
}

bool judge_loss(judge *j, const cg_contract *expected, cg_error *error) {
    search *s = calloc(1, sizeof *s);
    facts *f = calloc(1, sizeof *f);
    bool ok = s && f && (s->start = calloc(1, sizeof *s->start));
    if (ok) {
        s->j = j, s->expected = *expected, s->gradient_factor = 1;
        f->s = s;
        if (!set_up(f, error)) {
            ok = false;
        } else if (f->parts) {
            ok = find_out(f);
            if (ok) judge_say_loss(f);
        }
    }
    if (!ok)
        cg_fail(error, CG_FAILED, "out of memory for the search"); /* unless something else is said already */
    if (s) free(s->start);
    free(s);
    free(f);
    return ok;
}
