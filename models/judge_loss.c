/* Which contract do target, prediction, kl, loss and gradients follow? The search says what is possible, this file
 * chooses the simplest, tells value from gradient, and says it in words. */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "models/judge_search.h"

/* ---- words ---- */

/* What a value that is not expected means. */
static const char *meaning(int axis, int value) {
    static const char *const says[CG_AXES][8] = {
        [CG_AXIS_TEACHER] = {"the window and the sink stand in each head's denominator",
                             "the window is missing from each head's denominator",
                             "the window and the sink are missing from each head's denominator",
                             "the sink is missing from each head's denominator"},
        [CG_AXIS_SUPPORT] = {"target and prediction stand over the selected keys",
                             "target and prediction stand over all visible keys"},
        [CG_AXIS_KL] = {"the logarithms are exact", "the target's logarithm has a floor of 1e-10",
                        "an epsilon of 1e-10 stands in both logarithms",
                        "both logarithms are clamped at the smallest float",
                        "an epsilon of 1e-10 stands in both logarithms, the gradient is exact"},
        [CG_AXIS_NORMALISE] = {"the target is normalised exactly", "the target's sum has a floor of 1e-10",
                               "the target's sum has a floor of the smallest float"},
        [CG_AXIS_REDUCTION] = {"the sum is divided by the real rows",
                               "the sum is divided by all rows, padding included", "the sum is not divided",
                               "the sum is divided by the rows that see a key",
                               "the sum is divided twice, by the real and by all rows",
                               "each segment is averaged, then the averages"},
        [CG_AXIS_SCORES] = {"scores have a ReLU", "scores have no ReLU"},
        [CG_AXIS_HEADS] = {"all heads are summed", "only the first half of the heads is summed",
                           "only the second half of the heads is summed",
                           "each half of the heads is normalised before they are averaged",
                           "each quarter of the heads is normalised before they are averaged"},
    };
    return says[axis][value];
}

static const char *const what_to_dump[CG_AXES] = {
    [CG_AXIS_TEACHER] =
        "dump at least eight heads that prefer different keys, with unequal weight on window and sink",
    [CG_AXIS_SUPPORT] = "dump rows that see more keys than are selected",
    [CG_AXIS_KL] =
        "dump a row whose prediction or target falls below 1e-10 on a key of some weight, in float64",
    [CG_AXIS_NORMALISE] =
        "dump a row whose sinks or windows leave the compressed keys less than 1e-10, and one below 1e-38",
    [CG_AXIS_REDUCTION] =
        "dump the loss or a gradient over several segments of unequal length, with padding and a row "
        "that sees no key",
    [CG_AXIS_SCORES] = "dump index heads with negative products, and log_predict, the loss or a gradient",
    [CG_AXIS_HEADS] = "dump at least eight heads of unequal weight on the window",
};

static void put(char *text, size_t bytes, const char *format, ...) __attribute__((format(printf, 3, 4)));
static void put(char *text, size_t bytes, const char *format, ...) {
    const size_t at = strlen(text);
    va_list args;
    va_start(args, format);
    if (at + 1 < bytes) vsnprintf(text + at, bytes - at, format, args);
    va_end(args);
}

/* "teacher=compressed; the window and ...": what differs from the expected. */
static void put_difference(char *text, size_t bytes, const cg_contract *c, const cg_contract *expected) {
    const char *between = "";
    for (int a = 0; a < CG_AXES; a++)
        if (c->value[a] != expected->value[a]) {
            put(text, bytes, "%s%s=%s", between, cg_axis_names[a], cg_axis_values((cg_axis)a)[c->value[a]]);
            between = ", ";
        }
    for (int f = 0; f < CG_FAULTS; f++)
        if ((c->faults & ~expected->faults) >> f & 1) {
            put(text, bytes, "%s%s", between, cg_fault_name(f));
            between = ", ";
        }
    if (!*between) put(text, bytes, "the expected contract");
}

/* ---- choosing ---- */

/* How far a contract is from the expected one: axes that differ, faults, and a little for the order of values. */
static double cost(const cg_contract *c, const cg_contract *expected) {
    double sum = 0;
    for (int a = 0; a < CG_AXES; a++)
        if (c->value[a] != expected->value[a])
            sum += 1 + 0.01 * c->value[a] + (cg_axis_value_is_fault((cg_axis)a, c->value[a]) ? 0.3 : 0);
    for (int f = 0; f < CG_FAULTS; f++)
        if ((c->faults ^ expected->faults) >> f & 1) sum += 1.3;
    return sum;
}

enum { LOSS_FACTORS = REDUCTIONS * 3 * 2 * 2 }; /* coefficient, recorded twice, padding */

static cg_contract with_loss_factor(cg_contract c, int v) {
    c.value[CG_AXIS_REDUCTION] = v / 12;
    if (v / 4 % 3 == 1) c.faults |= CG_FAULT_COEFF_MISSING;
    if (v / 4 % 3 == 2) c.faults |= CG_FAULT_COEFF_TWICE;
    if (v / 2 % 2) c.faults |= CG_FAULT_LOSS_TWICE;
    if (v % 2) c.faults |= CG_FAULT_PADDING_IN_LOSS;
    return c;
}

static double loss_of(const search *s, const listed *l, const cg_contract *c) {
    const judge *j = s->j;
    const double coeff = j->d->coeff;
    if (c->value[CG_AXIS_REDUCTION] == CG_REDUCTION_IS_MEAN_OF_MEANS) /* each row by its own segment */
        return cg_contract_value_factor(c, &j->counts, coeff, 1) * l->of_means;
    return cg_contract_value_factor(c, &j->counts, coeff, 1) *
           (l->sum + (c->faults & CG_FAULT_PADDING_IN_LOSS ? l->padding : 0));
}

static double loss_unit(const search *s, const listed *l, const cg_contract *c) {
    const double f = fabs(cg_contract_value_factor(c, &s->j->counts, s->j->d->coeff, 1));
    const double e = s->j->rounding[CG_DUMP_LOSS];
    const double spread = c->value[CG_AXIS_REDUCTION] == CG_REDUCTION_IS_MEAN_OF_MEANS ? 1 : 0;
    return f * sqrt(l->noise) * (1 + spread) + 8 * e * fabs(loss_of(s, l, c)) + judge_floor(e);
}

static bool loss_fits(const search *s, const listed *l, const cg_contract *c) {
    const double want = loss_of(s, l, c), unit = loss_unit(s, l, c);
    return judge_same(s->j, 1, &s->loss, &want, &unit);
}

/* What explains the numbers is walked through three times: for the simplest contract; for the axes of it that may be
 * changed alone; and for the simplest contract that is told apart by neither. */
typedef enum walk { WALK_BEST, WALK_ALONE, WALK_COMBINED, WALKS } walk;

typedef struct choice {
    walk walk;
    bool found;
    double cost;
    cg_contract c;
    bool other[CG_AXES]; /* another value does as well, all other axes as they are */
    bool combined;       /* so does another contract that differs elsewhere */
    double combined_cost;
    cg_contract combination;
    bool underflow; /* so does one whose float teacher underflows */
} choice;

static void consider(choice *best, const cg_contract *c, const cg_contract *expected) {
    const double price = cost(c, expected);
    int n_changed = 0, changed = 0;
    bool elsewhere = false;
    best->underflow |= (c->faults & CG_FAULT_TEACHER_UNDERFLOW) != 0;
    switch (best->walk) {
    case WALK_BEST:
        if (best->found && best->cost <= price) return;
        best->found = true;
        best->cost = price;
        best->c = *c;
        return;
    case WALK_ALONE:
    case WALK_COMBINED:
        for (int a = 0; a < CG_AXES; a++) {
            if (c->value[a] == best->c.value[a]) continue;
            n_changed++;
            changed = a;
            elsewhere |= !best->other[a];
        }
        if (best->walk == WALK_ALONE) {
            if (n_changed == 1 && c->faults == best->c.faults) best->other[changed] = true;
        } else if (elsewhere && c->faults == best->c.faults &&
                   (!best->combined || price < best->combined_cost)) {
            best->combined = true;
            best->combined_cost = price;
            best->combination = *c;
        }
        return;
    case WALKS:
        return;
    }
}

static bool value_alive(const search *s, unsigned parts, int t, int kl, int form) {
    const tables *y = s->start;
    const int dense = key_of(t).support != 0;
    if ((parts >> Q_TARGET & 1) && !y->target[t * FORMS + form]) return false;
    if ((parts & (1u << Q_LOG_PREDICT | 1u << Q_PREDICT)) && !y->predict[dense][form]) return false;
    return !(parts >> Q_KL & 1) || y->kl[value_number(t, kl, form)];
}

/* The simplest contract that gives the value's quantities in `parts`, and with `gradient` those too. */
static void walk_values(const search *s, const result *all, unsigned parts, bool gradient, choice *best) {
    for (int t = 0; t < TARGETS; t++)
        for (int kl = 0; kl < KLS && judge_usable(s, t); kl++)
            for (int form = 0; form < FORMS; form++) {
                if (!value_alive(s, parts, t, kl, form)) continue;
                const listed *l = NULL;
                for (int i = s->first_listed[t]; i < s->first_listed[t + 1]; i++)
                    if (all->list[i].kl == kl && all->list[i].form == form) l = &all->list[i];
                if ((parts >> Q_LOSS & 1) && !l) continue;
                for (int v = 0; v < LOSS_FACTORS; v++) {
                    const cg_contract c = with_loss_factor(contract_of(t, kl, form), v);
                    if (parts >> Q_LOSS & 1 ? !loss_fits(s, l, &c) : v % 4) continue;
                    if (!gradient) {
                        if (!(parts >> Q_LOSS & 1) && v % 12) continue;
                        consider(best, &c, &s->expected);
                        continue;
                    }
                    for (int extra = 0; extra < 4; extra++) {
                        const uint64_t bits = s->start->grad[grad_number(t, slope_of(kl), form, extra)];
                        for (int sign = 0; sign < 3; sign++) { /* as it is, opposite, none */
                            if (!(bits >> (sign == 2 ? ZERO_FACTOR : v / 4 * 2 + sign) & 1)) continue;
                            cg_contract both = c;
                            if (extra & 1) both.faults |= CG_FAULT_PREDICT_MINUS_TARGET;
                            if (extra & 2) both.faults |= CG_FAULT_RELU_LEAK;
                            if (sign)
                                both.faults |= sign == 2 ? CG_FAULT_GRADIENT_ZERO : CG_FAULT_GRADIENT_SIGN;
                            consider(best, &both, &s->expected);
                        }
                    }
                }
            }
}

static choice choose(const search *s, const result *all, unsigned parts, bool gradient) {
    choice best = {0};
    for (best.walk = WALK_BEST; best.walk < WALKS; best.walk++) walk_values(s, all, parts, gradient, &best);
    return best;
}

/* The simplest contract of the gradients alone, near the value's. */
static void walk_gradients(const search *s, const cg_contract *near, choice *best) {
    for (int t = 0; t < TARGETS; t++)
        for (int slope = 0; slope < SLOPES; slope++)
            for (int form = 0; form < FORMS; form++)
                for (int extra = 0; extra < 4; extra++) {
                    const uint64_t bits = s->start->grad[grad_number(t, slope, form, extra)];
                    for (int f = 0; f <= FACTORS; f++) {
                        if (!(bits >> f & 1)) continue;
                        cg_contract c = with_factor(contract_of(t, kl_of_slope(slope), form), f);
                        if (slope == 0 && slope_of(near->value[CG_AXIS_KL]) == 0)
                            c.value[CG_AXIS_KL] = near->value[CG_AXIS_KL];
                        if (extra & 1) c.faults |= CG_FAULT_PREDICT_MINUS_TARGET;
                        if (extra & 2) c.faults |= CG_FAULT_RELU_LEAK;
                        if (f == ZERO_FACTOR) c.value[CG_AXIS_REDUCTION] = near->value[CG_AXIS_REDUCTION];
                        consider(best, &c, near);
                    }
                }
}

static choice choose_gradient(const search *s, const cg_contract *near) {
    choice best = {0};
    for (best.walk = WALK_BEST; best.walk < WALKS; best.walk++) walk_gradients(s, near, &best);
    return best;
}

/* A direction that fits, though no named factor does. */
static bool choose_direction(const search *s, cg_contract *c) {
    double best = INFINITY;
    for (int t = 0; t < TARGETS; t++)
        for (int i = 0; i < SLOPES * FORMS * 4; i++) {
            const int slope = i / 8, form = i / 4 % 2, extra = i % 4;
            if (!(s->start->grad[grad_number(t, slope, form, extra)] & DIRECTION)) continue;
            cg_contract k = contract_of(t, kl_of_slope(slope), form);
            if (extra & 1) k.faults |= CG_FAULT_PREDICT_MINUS_TARGET;
            if (extra & 2) k.faults |= CG_FAULT_RELU_LEAK;
            k.value[CG_AXIS_REDUCTION] = s->expected.value[CG_AXIS_REDUCTION];
            if (cost(&k, &s->expected) >= best) continue;
            best = cost(&k, &s->expected);
            *c = k;
        }
    return best < INFINITY;
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

static bool list_losses(search *s) {
    candidate *all = malloc(VALUES * sizeof *all);
    const unsigned rows = (s->has[Q_TARGET] ? 1u << Q_TARGET : 0) |
                          (s->has[Q_LOG_PREDICT] ? 1u << Q_LOG_PREDICT : 0) |
                          (s->has[Q_PREDICT] ? 1u << Q_PREDICT : 0) | (s->has[Q_KL] ? 1u << Q_KL : 0);
    int n = 0;
    if (!all) return false;
    cg_contract base = s->expected;
    base.value[CG_AXIS_REDUCTION] = 0;
    for (int number = 0; number < VALUES; number++) {
        const int t = number / FORMS / KLS, kl = number / FORMS % KLS, form = number % FORMS;
        const cg_contract c = contract_of(t, kl, form);
        if (!judge_usable(s, t)) continue;
        double price = cost(&c, &base);
        bool fits = rows && value_alive(s, rows, t, kl, form);
        if (!rows && s->has_grad)
            for (int extra = 0; extra < 4; extra++)
                fits |= s->start->grad[grad_number(t, slope_of(kl), form, extra)] != 0;
        if (t == target_of(&s->expected) && kl == s->expected.value[CG_AXIS_KL] &&
            form == s->expected.value[CG_AXIS_SCORES])
            price = -2;
        else if (fits)
            price = price / 1000 - 1; /* before those that only the loss could speak for */
        all[n++] = (candidate){price, number};
    }
    qsort(all, (size_t)n, sizeof *all, by_cost);
    while (n > 0 && (n > LISTED || all[n - 1].cost > 3.5)) n--;
    qsort(all, (size_t)n, sizeof *all, by_number);
    s->n_list = n;
    for (int i = 0; i < n; i++)
        s->list[i] = (listed){.target = all[i].number / FORMS / KLS,
                              .kl = all[i].number / FORMS % KLS,
                              .form = all[i].number % FORMS};
    for (int t = 0, i = 0; t <= TARGETS; t++) {
        while (i < n && s->list[i].target < t) i++;
        s->first_listed[t] = i;
    }
    free(all);
    return true;
}

/* ---- set up ---- */

static bool set_up(search *s, cg_error *error) {
    judge *j = s->j;
    const cg_dump *d = j->d;
    const bool beside =
        j->has_window || j->has_lse || s->expected.value[CG_AXIS_TEACHER] == CG_TEACHER_IS_COMPRESSED;
    const char *lacks = !j->has_logits ? "query and compressed_kv"
                        : !beside      ? "kv and sink, or non_compressed_lse,"
                                       : NULL;
    bool any = false;
    for (int q = 0; q < QUANTITIES; q++) {
        const bool there = cg_dump_has(d, judge_quantity[q].id), gradient = q >= Q_GRAD_Q;
        const char *missing = NULL;
        if (!there) continue;
        if (q != Q_LOG_PREDICT && q != Q_PREDICT) missing = lacks;
        if (!missing && q != Q_TARGET && !j->has_scores) missing = "q_indexer, weights and k_indexer";
        if (!missing && gradient && !j->has_dots) missing = "q_indexer, weights and k_indexer";
        s->has[q] = !missing;
        any |= !missing;
        if (missing) judge_note(j, "%s is not judged: %s are needed", judge_quantity[q].name, missing);
    }
    s->has_value =
        s->has[Q_TARGET] || s->has[Q_LOG_PREDICT] || s->has[Q_PREDICT] || s->has[Q_KL] || s->has[Q_LOSS];
    s->has_grad = s->has[Q_GRAD_Q] || s->has[Q_GRAD_W];
    if (!any) return true;
    if ((s->has[Q_LOSS] || s->has_grad || s->has[Q_GRAD_K]) && isnan(d->coeff))
        return cg_fail(error, CG_BAD_INPUT,
                       "loss_coeff is needed to judge loss and gradients: give --loss-coeff X");
    if (!j->has_list && d->K < 0 && s->expected.value[CG_AXIS_SUPPORT] == CG_SUPPORT_IS_SPARSE)
        return cg_fail(error, CG_BAD_INPUT,
                       "topk is needed (compressed rows that a token selects): give --topk N");
    s->coarse = true;
    for (int q = 0; q < QUANTITIES; q++)
        s->coarse &= !s->has[q] || j->rounding[judge_quantity[q].id] >= 0x1p-24;
    if (s->has[Q_LOSS]) cg_dump_row(d, CG_DUMP_LOSS, 0, &s->loss);
    for (int t = 0; t < TARGETS; t++) {
        const unsigned char there = judge_usable(s, t);
        for (int i = 0; i < FORMS; i++) s->start->target[t * FORMS + i] = there;
        for (int i = 0; i < KLS * FORMS; i++) s->start->kl[t * KLS * FORMS + i] = there;
        for (int i = 0; i < SLOPES * FORMS * 4; i++)
            s->start->grad[t * SLOPES * FORMS * 4 + i] = there ? DIRECTION | ALL_FACTORS : 0;
    }
    memset(s->start->predict, 1, sizeof s->start->predict);
    return true;
}

/* ---- reporting ---- */

static void add_faults(judge *j, const cg_contract *c, const cg_contract *expected) {
    char name[64];
    for (int a = 0; a < CG_AXES; a++)
        if (c->value[a] != expected->value[a] && cg_axis_value_is_fault((cg_axis)a, c->value[a])) {
            snprintf(name, sizeof name, "%s=%s", cg_axis_names[a], cg_axis_values((cg_axis)a)[c->value[a]]);
            judge_fault(j, name);
        }
    for (int f = 0; f < CG_FAULTS; f++)
        if ((c->faults & ~expected->faults) >> f & 1) judge_fault(j, cg_fault_name(f));
}

static void say_contract(const search *s, const cg_contract *c, const bool *undetermined, char *text,
                         size_t bytes) {
    static const int always[] = {CG_AXIS_TEACHER, CG_AXIS_SUPPORT, CG_AXIS_KL, CG_AXIS_REDUCTION};
    const char *between = "";
    for (int a = 0; a < CG_AXES; a++) {
        bool shown = c->value[a] != s->expected.value[a];
        for (int i = 0; i < 4; i++) shown |= always[i] == a;
        if (!shown) continue;
        put(text, bytes, "%s%s=%s", between, cg_axis_names[a], cg_axis_values((cg_axis)a)[c->value[a]]);
        between = ", ";
    }
    between = " (this dump cannot tell ";
    for (int a = 0; a < CG_AXES; a++) {
        if (!undetermined[a]) continue;
        put(text, bytes, "%s%s", between, cg_axis_names[a]);
        between = ", ";
    }
    if (!strcmp(between, ", ")) put(text, bytes, ")");
    for (int a = 0; a < CG_AXES; a++)
        if (c->value[a] != s->expected.value[a]) put(text, bytes, "; %s", meaning(a, c->value[a]));
    for (int f = 0; f < CG_FAULTS; f++)
        if ((c->faults & ~s->expected.faults) >> f & 1) put(text, bytes, "; %s", cg_fault_says(f));
}

/* "; 0.0047482 against 0.0610656": the loss, or the first number that differs. */
static void say_numbers(const judge *j, char *text, size_t bytes) {
    const cg_quantity *shown = NULL;
    for (int i = 0; i < j->v->n_quantities; i++) {
        const cg_quantity *q = &j->v->quantities[i];
        if (q->ok || !q->has_first) continue;
        if (!strcmp(q->name, "loss")) shown = q;
    }
    for (int i = 0; i < j->v->n_quantities && !shown; i++) {
        const cg_quantity *q = &j->v->quantities[i];
        bool of_loss = false;
        for (int k = 0; k < QUANTITIES; k++) of_loss |= !strcmp(q->name, judge_quantity[k].name);
        if (of_loss && !q->ok && q->has_first) shown = q;
    }
    if (shown)
        put(text, bytes, "; %s%s%.7g against %.7g", strcmp(shown->name, "loss") ? shown->name : "",
            strcmp(shown->name, "loss") ? " " : "", shown->first.got, shown->first.expected);
}

static void report(search *s, const result *all, const double *distance, int n_measured) {
    judge *j = s->j;
    cg_verdict *v = j->v;
    unsigned parts = 0;
    for (int q = Q_TARGET; q <= Q_LOSS; q++) parts |= s->has[q] ? 1u << q : 0;
    v->judged_loss = true;
    v->contract = v->gradient = s->expected;

    choice joint = choose(s, all, parts, s->has_grad), value = joint, gradient = {0};
    unsigned given = parts;
    if (!joint.found) {
        const unsigned lp = 1u << Q_LOG_PREDICT | 1u << Q_PREDICT;
        const unsigned tries[] = {parts,
                                  parts & ~(1u << Q_LOSS),
                                  parts & (1u << Q_TARGET | lp),
                                  parts & 1u << Q_TARGET,
                                  parts & 1u << Q_KL,
                                  parts & lp,
                                  parts & 1u << Q_LOSS};
        for (int i = 0; i < 7 && !value.found && parts; i++) {
            if (i > 0 && !tries[i]) continue;
            given = tries[i];
            value = choose(s, all, given, false);
        }
        if (s->has_grad) gradient = choose_gradient(s, value.found ? &value.c : &s->expected);
    }
    const bool has_value = value.found && parts;
    if (value.found) v->contract = value.c;
    if (!parts && gradient.found) v->contract = gradient.c;
    if (joint.found || !parts) v->gradient = v->contract;
    if (!joint.found && gradient.found && parts) {
        v->gradient = gradient.c;
        v->gradient_differs = true;
    }
    v->identified = joint.found || (has_value && given == parts && (!s->has_grad || gradient.found)) ||
                    (!parts && gradient.found);
    const choice *shown = joint.found || value.found ? &value : &gradient;
    for (int a = 0; a < CG_AXES && shown->found; a++) {
        v->undetermined[a] = shown->other[a];
        if (shown->other[a])
            snprintf(v->tell_apart[a], sizeof v->tell_apart[a],
                     "%s: this dump gives the same numbers for other values of it; %s", cg_axis_names[a],
                     what_to_dump[a]);
    }
    if (shown->found && shown->combined) {
        char text[400] = "";
        put_difference(text, sizeof text, &shown->combination, &v->contract);
        judge_note(j, "another combination gives the same numbers: %.180s", text);
    }

    /* the quantities beside what is expected, and what each follows instead */
    for (int q = 0; q < QUANTITIES; q++) {
        if (!s->has[q]) continue;
        cg_quantity *x = judge_add(j, judge_quantity[q].name, judge_quantity[q].id, &all->stats[q]);
        if (x->ok) continue;
        if (q == Q_GRAD_Q || q == Q_GRAD_W) {
            if (all->empty_grad)
                put(x->says, sizeof x->says, "not zero in %lld rows that see no key%s",
                    (long long)all->empty_grad, joint.found || gradient.found ? "; elsewhere " : "");
            if (joint.found || gradient.found) put(x->says, sizeof x->says, "as the contract below has it");
        } else if (q <= Q_LOSS) {
            const choice own = choose(s, all, 1u << q, false);
            if (own.found && value.found && (given >> q & 1)) {
                put(x->says, sizeof x->says, "as the contract below has it");
            } else if (own.found) {
                put(x->says, sizeof x->says, "by itself it follows ");
                put_difference(x->says, sizeof x->says, &own.c, &s->expected);
            } else {
                put(x->says, sizeof x->says, "no known contract gives it");
                if (q == Q_LOSS && x->first.expected != 0 && isfinite(x->first.got))
                    put(x->says, sizeof x->says, "; it is %.6g times the expected",
                        x->first.got / x->first.expected);
                if (q == Q_TARGET && n_measured > 0) {
                    int near = -1;
                    for (int t = 0; t < TARGETS; t++)
                        if (judge_usable(s, t) &&
                            (near < 0 || distance[t] < distance[near] * (1 - 1e-9) ||
                             (t == target_of(&s->expected) && distance[t] <= distance[near] * (1 + 1e-9))))
                            near = t;
                    cg_contract c =
                        contract_of(near, s->expected.value[CG_AXIS_KL], s->expected.value[CG_AXIS_SCORES]);
                    c.value[CG_AXIS_REDUCTION] = s->expected.value[CG_AXIS_REDUCTION];
                    put(x->says, sizeof x->says, "; nearest is ");
                    put_difference(x->says, sizeof x->says, &c, &s->expected);
                    put(x->says, sizeof x->says, ", %.2g of a row's mass away",
                        distance[near] / 2 / n_measured);
                }
            }
        }
    }

    /* the sentence */
    char *text = v->sentence;
    const size_t bytes = sizeof v->sentence;
    if (joint.found || (has_value && given == parts)) {
        put(text, bytes, "your loss is ");
        say_contract(s, &v->contract, v->undetermined, text, bytes);
        say_numbers(j, text, bytes);
    } else if (has_value) {
        put(text, bytes, "part of your loss is ");
        say_contract(s, &v->contract, v->undetermined, text, bytes);
        say_numbers(j, text, bytes);
        put(text, bytes, "; the rest follows no known contract together with it");
    } else if (parts) {
        put(text, bytes, "your loss follows no known contract");
        say_numbers(j, text, bytes);
    } else if (gradient.found) {
        put(text, bytes, "your gradients are those of ");
        say_contract(s, &gradient.c, v->undetermined, text, bytes);
    }
    const bool floored = v->contract.value[CG_AXIS_NORMALISE] != s->expected.value[CG_AXIS_NORMALISE];
    if (shown->found && shown->underflow && floored && !(v->contract.faults & CG_FAULT_TEACHER_UNDERFLOW))
        put(text, bytes, "; or, with the same numbers, %s: %s", cg_fault_name(1), cg_fault_says(1));
    const double pooled = all->sum_ff > 0 ? all->sum_fg / all->sum_ff : NAN;
    const double wanted =
        cg_contract_grad_factor(&s->expected, &j->counts, isnan(j->d->coeff) ? 1 : j->d->coeff,
                                j->counts.real / (j->counts.segments ? j->counts.segments : 1));
    if (!joint.found && s->has_grad) {
        cg_contract direction;
        if (gradient.found && parts) {
            put(text, bytes, "; the gradients follow another contract: ");
            put_difference(text, bytes, &gradient.c, &s->expected);
        } else if (!gradient.found && choose_direction(s, &direction)) {
            put(text, bytes, "%sthe gradients have the direction of ", *text ? "; " : "");
            put_difference(text, bytes, &direction, &s->expected);
            if (isfinite(pooled) && wanted != 0) put(text, bytes, ", times %.6g", pooled / wanted);
            judge_fault(j, "gradient-factor");
        } else if (!gradient.found) {
            put(text, bytes, "%sthe gradients follow no known contract", *text ? "; " : "");
        }
    }
    if (has_value || joint.found) add_faults(j, &v->contract, &s->expected);
    if (gradient.found) add_faults(j, &gradient.c, &s->expected);
    if (all->empty_value || all->empty_grad) { /* 0/0 of an empty softmax, most often */
        put(text, bytes, "%srows that see no key hold %s, where zero is right", *text ? "; " : "",
            all->empty_value && all->empty_grad ? "a loss and a gradient"
            : all->empty_value                  ? "a loss"
                                                : "a gradient");
        judge_fault(j, "empty-row-not-zero");
    }
    if (all->padding_value || all->padding_grad) {
        if (!(v->contract.faults & CG_FAULT_PADDING_IN_LOSS))
            put(text, bytes, "; padding rows hold %s",
                all->padding_value && all->padding_grad ? "target and gradient"
                : all->padding_value                    ? "a target"
                                                        : "a gradient");
        if (!(s->expected.faults & CG_FAULT_PADDING_IN_LOSS)) {
            v->contract.faults |= all->padding_value ? CG_FAULT_PADDING_IN_LOSS : 0;
            v->gradient.faults |= all->padding_grad ? CG_FAULT_PADDING_IN_LOSS : 0;
            judge_fault(j, cg_fault_name(2));
        }
    }
}

/* k's gradient is a sum over rows: it is looked at once the rest is known. */
static bool judge_grad_k(search *s, result *all, cg_error *error) {
    judge *j = s->j;
    const cg_dump *d = j->d;
    result found = {0};
    const cg_contract *other = j->v->gradient_differs ? &j->v->gradient : &j->v->contract;
    judge_stat stat[2];
    judge_stat_init(stat, 2);
    cg_contract both = *other;
    if (j->v->contract.faults & j->v->gradient.faults & CG_FAULT_PADDING_IN_LOSS)
        both.faults |= CG_FAULT_PADDING_IN_LOSS;
    const bool second = memcmp(&both, &s->expected, sizeof both) != 0;
    if (second) {
        s->grad_k[1] = both;
        s->n_grad_k = 2;
        if (!judge_search_all(s, &found, false, true)) {
            free(found.dk[0]), free(found.dk[1]), free(found.dk_noise);
            return cg_fail(error, CG_FAILED, "out of memory for the gradient of k_indexer");
        }
    }
    double *got = malloc((size_t)(d->Di + 1) * 3 * sizeof *got), *unit = got + d->Di + 1;
    for (int64_t b = 0; got && b < d->B; b++)
        for (int64_t i = 0; i < d->n_keys[b]; i++) {
            const int64_t at = j->key0[b] + i;
            cg_dump_key(d, CG_DUMP_GRAD_K_INDEXER, b, i, got);
            for (int which = 0; which < (second ? 2 : 1); which++) {
                const double *want = (which ? found.dk[1] : all->dk[0]) + at * d->Di;
                const double noise = (which ? found.dk_noise : all->dk_noise)[at];
                for (int64_t k = 0; k < d->Di; k++)
                    unit[k] = noise + 4 * j->rounding[CG_DUMP_GRAD_K_INDEXER] * fabs(want[k]) +
                              judge_floor(j->rounding[CG_DUMP_GRAD_K_INDEXER]);
                judge_compare(j, &stat[which], b, i, at, d->Di, 0, got, want, unit);
            }
        }
    for (int i = 0; got && i < j->v->n_quantities; i++) {
        cg_quantity *q = &j->v->quantities[i];
        if (strcmp(q->name, "grad.k_indexer")) continue;
        const char *name = q->name, *tensor = q->tensor;
        q->ok = !(stat[0].worst_units > j->allowed);
        q->worst_rel = stat[0].max_error == 0 ? 0
                       : stat[0].max_want > 0 ? stat[0].max_error / stat[0].max_want
                                              : INFINITY;
        q->worst_units = stat[0].worst_units;
        q->has_first = stat[0].first_row >= 0;
        q->first = stat[0].first;
        q->n_worst = stat[0].n_worst;
        memcpy(q->worst, stat[0].worst, sizeof q->worst);
        q->name = name;
        q->tensor = tensor;
        const bool explained = second && !(stat[1].worst_units > j->allowed);
        if (!q->ok && explained) {
            snprintf(q->says, sizeof q->says, "as the contract below has it");
        } else if (!q->ok && all->empty_grad && isinf(q->worst_units)) {
            put(q->says, sizeof q->says, "the gradients of rows that see no key are summed into it");
            j->v->identified = false;
        } else if (!q->ok) {
            put(q->says, sizeof q->says,
                second ? "it does not follow the contract of the other gradients either"
                       : "the other gradients are as expected");
            j->v->identified = false;
            judge_fault(j, "gradient-of-keys");
        }
    }
    free(got);
    free(found.dk[0]);
    free(found.dk[1]);
    free(found.dk_noise);
    return got != NULL || cg_fail(error, CG_FAILED, "out of memory for the gradient of k_indexer");
}

bool judge_loss(judge *j, const cg_contract *expected, cg_error *error) {
    search *s = calloc(1, sizeof *s);
    result *all = calloc(1, sizeof *all);
    double *distance = calloc(TARGETS, sizeof *distance);
    int n_measured = 0;
    bool ok = s && all && distance && (s->start = calloc(1, sizeof *s->start));
    if (ok) {
        *s = (search){.j = j, .expected = *expected, .start = s->start};
        ok = set_up(s, error);
        bool any = false;
        for (int q = 0; q < QUANTITIES; q++) any |= s->has[q];
        if (ok && any) {
            if (s->has[Q_GRAD_K]) {
                s->grad_k[0] = *expected;
                s->n_grad_k = 1;
            }
            ok = judge_search_sample(s, NULL, NULL);
            bool some = false;
            for (int t = 0; t < TARGETS * FORMS; t++) some |= s->start->target[t];
            if (ok && s->has[Q_TARGET] && !some) ok = judge_search_sample(s, distance, &n_measured);
            ok = ok && (!s->has[Q_LOSS] || list_losses(s)) && judge_search_all(s, all, true, true);
            if (ok && s->has[Q_LOSS]) { /* beside the expected one, which is in the list */
                for (int i = 0; i < s->n_list; i++) {
                    const listed *l = &all->list[i];
                    if (l->target != target_of(expected) || l->kl != expected->value[CG_AXIS_KL] ||
                        l->form != expected->value[CG_AXIS_SCORES])
                        continue;
                    const double want = loss_of(s, l, expected), unit = loss_unit(s, l, expected);
                    judge_compare(j, &all->stats[Q_LOSS], -1, -1, 0, 1, 0, &s->loss, &want, &unit);
                }
            }
            if (ok) report(s, all, distance, n_measured);
            if (ok && s->has[Q_GRAD_K]) ok = judge_grad_k(s, all, error);
        }
    }
    if (all) {
        free(all->dk[0]);
        free(all->dk[1]);
        free(all->dk_noise);
    }
    if (s) free(s->start);
    free(s);
    free(all);
    free(distance);
    return ok || cg_fail(error, CG_FAILED, "out of memory for the search");
}
