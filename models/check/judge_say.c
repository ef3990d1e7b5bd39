/* What was found out about the loss, in words: sentence, notes, faults, and what each quantity says. Finds out nothing by
 * itself. */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "models/check/judge_facts.h"

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
        [CG_AXIS_ROW_WEIGHT] =
            {"all rows count alike",
             "each row counts by its compressed mass, the mean over heads of what the window and "
             "the sink leave"},
    };
    return says[axis][value];
}

static void put(char *text, size_t bytes, const char *format, ...) __attribute__((format(printf, 3, 4)));
static void put(char *text, size_t bytes, const char *format, ...) {
    const size_t at = strlen(text);
    va_list args;
    va_start(args, format);
    if (at + 1 < bytes) vsnprintf(text + at, bytes - at, format, args);
    va_end(args);
}

/* "teacher=compressed, kl=eps": what differs from the expected. */
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

static void put_values(char *text, size_t bytes, int axis, unsigned mask) {
    const char *between = "";
    for (int v = 0; v < cg_axis_count((cg_axis)axis); v++)
        if (mask >> v & 1) {
            put(text, bytes, "%s%s", between, cg_axis_values((cg_axis)axis)[v]);
            between = ", ";
        }
}

/* ---- what would tell the values of an axis apart ---- */

static bool both(unsigned mask, int a, int b) { return (mask >> a & 1) && (mask >> b & 1); }

static void put_advice(const judge *j, int axis, unsigned left, char *text, size_t bytes) {
    switch (axis) {
    case CG_AXIS_TEACHER:
        if (j->d->H == 1)
            put(text, bytes,
                "with one head the denominator cancels: dump two heads or more that prefer different keys");
        else if (!j->has_window && !j->has_lse)
            put(text, bytes, "dump kv and sink");
        else
            put(text, bytes, "dump heads that prefer different keys, with unequal weight on window and sink");
        return;
    case CG_AXIS_SUPPORT:
        put(text, bytes, "dump rows that see more keys than are selected");
        return;
    case CG_AXIS_KL:
        if (left == (1u << CG_KL_IS_EXACT | 1u << CG_KL_IS_TARGET_FLOOR))
            put(text, bytes,
                "they differ by at most 4e-11 nat for each key, and not in gradients: only kl or loss in "
                "float64 "
                "shows it, with targets below 1e-10");
        else if (left == (1u << CG_KL_IS_EPS | 1u << CG_KL_IS_EPS_VALUE_EXACT_GRAD))
            put(text, bytes, "they differ in gradients alone: dump those of q_indexer or weights");
        else if (left == (1u << CG_KL_IS_EXACT | 1u << CG_KL_IS_CLAMP_TINY))
            put(text, bytes, "dump a row whose prediction falls below 1e-38 on a key of some weight");
        else
            put(text, bytes,
                "dump a row whose prediction falls below 1e-10 on a key of some weight, its kl and its "
                "gradients%s",
                both(left, CG_KL_IS_EXACT, CG_KL_IS_TARGET_FLOOR)
                    ? "; exact and target-floor differ by 4e-11 at most, in float64 alone"
                    : "");
        return;
    case CG_AXIS_NORMALISE:
        put(text, bytes,
            "dump a row whose sinks or windows leave the compressed keys less than %s of each head's mass",
            both(left, CG_NORMALISE_IS_EXACT, CG_NORMALISE_IS_FLOOR_1E_10) ? "1e-10" : "1e-38");
        return;
    case CG_AXIS_REDUCTION: {
        const char *between = "";
        const bool real = left >> CG_REDUCTION_IS_MEAN_REAL & 1;
        put(text, bytes, "dump the loss and a gradient with ");
        if (j->counts.real == j->counts.physical) put(text, bytes, "padding rows"), between = ", ";
        if (real && j->counts.visible == j->counts.real)
            put(text, bytes, "%srows that see no key", between), between = ", ";
        if (real && (left >> CG_REDUCTION_IS_MEAN_OF_MEANS & 1))
            put(text, bytes, "%sdocuments of unequal length", between), between = ", ";
        if (!*between) put(text, bytes, "more rows of each kind");
        return;
    }
    case CG_AXIS_SCORES:
        put(text, bytes, "dump index heads with negative products, and log_predict or a gradient");
        return;
    case CG_AXIS_HEADS:
        put(text, bytes, "dump eight heads of unequal weight on the window");
        return;
    default:
        put(text, bytes, "dump rows whose windows and sinks leave unequal shares to the compressed keys");
    }
}

/* What remains of each axis, what is excluded, and what to dump. */
static void say_open(const facts *f, const choice *c) {
    cg_verdict *v = f->s->j->v;
    for (int a = 0; a < CG_AXES; a++) {
        const unsigned all = (1u << cg_axis_count((cg_axis)a)) - 1, left = c->also[a] & all;
        char *text = v->tell_apart[a];
        const size_t bytes = sizeof v->tell_apart[a];
        v->remaining[a] = left;
        v->undetermined[a] = (left & (left - 1)) != 0;
        if (!v->undetermined[a]) continue;
        put(text, bytes, "%s: ", cg_axis_names[a]);
        put_values(text, bytes, a, left);
        put(text, bytes, " give the same numbers here");
        if (all & ~left) {
            put(text, bytes, " (excluded: ");
            put_values(text, bytes, a, all & ~left);
            put(text, bytes, ")");
        }
        put(text, bytes, "; ");
        put_advice(f->s->j, a, left, text, bytes);
    }
    if (c->combined) {
        char text[400] = "";
        put_difference(text, sizeof text, &c->combination, &c->c);
        judge_note(f->s->j, "another combination gives the same numbers: %.180s", text);
    }
}

/* ---- the contract ---- */

static void add_faults(judge *j, const cg_contract *c, const cg_contract *expected) {
    char name[64];
    for (int a = 0; a < CG_AXES; a++)
        if (c->value[a] != expected->value[a] && cg_axis_value_is_fault((cg_axis)a, c->value[a])) {
            snprintf(name, sizeof name, "%s=%s", cg_axis_names[a], cg_axis_values((cg_axis)a)[c->value[a]]);
            judge_fault(j, name);
        }
    for (int i = 0; i < CG_FAULTS; i++)
        if ((c->faults & ~expected->faults) >> i & 1) judge_fault(j, cg_fault_name(i));
}

static void put_contract(const facts *f, const cg_contract *c, char *text, size_t bytes) {
    static const int always[] = {CG_AXIS_TEACHER, CG_AXIS_SUPPORT, CG_AXIS_KL, CG_AXIS_REDUCTION};
    const cg_contract *expected = &f->s->expected;
    const bool *undetermined = f->s->j->v->undetermined;
    const char *between = "";
    for (int a = 0; a < CG_AXES; a++) {
        bool shown = c->value[a] != expected->value[a];
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
        if (c->value[a] != expected->value[a]) put(text, bytes, "; %s", meaning(a, c->value[a]));
    for (int i = 0; i < CG_FAULTS; i++)
        if ((c->faults & ~expected->faults) >> i & 1) put(text, bytes, "; %s", cg_fault_says(i));
}

/* "; 0.0047482 against 0.0610656": the loss, or the first number that differs. */
static void put_numbers(const judge *j, char *text, size_t bytes) {
    const cg_quantity *shown = NULL;
    for (int i = 0; i < j->v->n_quantities; i++) {
        const cg_quantity *q = &j->v->quantities[i];
        if (q->ok || !q->has_first) continue;
        for (int k = 0; k < QUANTITIES; k++)
            if (!strcmp(q->name, judge_quantity[k].name) && (!shown || k == Q_LOSS)) shown = q;
    }
    if (!shown) return;
    const bool loss = !strcmp(shown->name, "loss");
    put(text, bytes, "; %s%s%.7g against %.7g", loss ? "" : shown->name, loss ? "" : " ", shown->first.got,
        shown->first.expected);
}

static void put_rests(const facts *f, const finding *x, char *text, size_t bytes) {
    cg_verdict *v = f->s->j->v;
    const bool expected = judge_cost(&x->choice.c, &f->s->expected) == 0;
    v->numbers = expected ? x->beside.numbers : x->rests_on.numbers;
    v->rows = expected ? 0 : x->rests_on.rows;
    if (expected)
        put(text, bytes, "; it rests on %lld independent number%s of rows%s", (long long)v->numbers,
            v->numbers == 1 ? "" : "s", f->s->has[Q_LOSS] ? " and on the loss" : "");
    else if (x->rests_on.rows)
        put(text, bytes,
            "; it rests on %lld independent numbers in %lld rows that tell it from the expected one",
            (long long)v->numbers, (long long)v->rows);
    else
        put(text, bytes, "; the rows are as expected, it rests on the loss");
}

/* ---- the quantities ---- */

static void say_target(const facts *f, cg_quantity *x) {
    const search *s = f->s;
    int near = -1;
    if (!f->n_measured) return;
    for (int t = 0; t < TARGETS; t++)
        if (judge_usable(s, t) &&
            (near < 0 || f->distance[t] < f->distance[near] * (1 - 1e-9) ||
             (t == target_of(&s->expected) && f->distance[t] <= f->distance[near] * (1 + 1e-9))))
            near = t;
    cg_contract c = contract_of(near, s->expected.value[CG_AXIS_KL], s->expected.value[CG_AXIS_SCORES],
                                s->expected.value[CG_AXIS_ROW_WEIGHT]);
    c.value[CG_AXIS_REDUCTION] = s->expected.value[CG_AXIS_REDUCTION];
    put(x->says, sizeof x->says, "; nearest is ");
    put_difference(x->says, sizeof x->says, &c, &s->expected);
    put(x->says, sizeof x->says, ", %.2g of a row's mass away", f->distance[near] / 2 / f->n_measured);
}

/* One quantity beside what is expected, and what it follows instead. */
static void say_quantity(const facts *f, int q, unsigned explained, bool factored) {
    const search *s = f->s;
    const bool gradient = q >= Q_GRAD_Q;
    if (!f->expectable && q != Q_LOG_PREDICT && q != Q_PREDICT) {
        judge_add_unjudged(s->j, judge_quantity[q].name, judge_quantity[q].id,
                           "kv and sink, or non_compressed_lse, are");
        return;
    }
    cg_quantity *x = judge_add(s->j, judge_quantity[q].name, judge_quantity[q].id, &f->beside.stats[q]);
    char *text = x->says;
    const size_t bytes = sizeof x->says;
    double factor;
    if (x->ok) return;
    if ((gradient && f->group_factor) || (explained & PART(q))) x->unsure = false;
    const judge_stat *stat = &f->beside.stats[q];
    const bool few = stat->rows >= 4 && stat->beyond * 2 < stat->rows;
    const bool times = judge_factor_of(s->j, &stat, &judge_quantity[q].id, 1, &factor);
    if (gradient && f->beside.empty_grad)
        put(text, bytes,
            q == Q_GRAD_K ? "the gradients of rows that see no key are summed into it"
                          : "not zero in %lld rows that see no key",
            (long long)f->beside.empty_grad);
    if (explained & PART(q)) {
        put(text, bytes, "%sas the contract below has it%s", *text ? "; elsewhere " : "",
            factored ? ", but for the factor" : "");
    } else if (x->unsure) {
        put(text, bytes, q == Q_LOSS ? "no known contract" : "not as expected");
        if (times) put(text, bytes, "; %.7g times the expected", factor);
        put(text, bytes,
            "; arithmetic in bfloat16, tf32 or float16 would explain it, and nothing in the dump shows that "
            "there was any");
    } else if (gradient) {
        if (times) put(text, bytes, "%s%.7g times the expected", *text ? "; " : "", factor);
        if (few)
            put(text, bytes, "%s%lld of %lld rows differ", *text ? "; " : "", (long long)stat->beyond,
                (long long)stat->rows);
    } else {
        put(text, bytes, "no known contract gives it");
        if (times) put(text, bytes, "; %.7g times the expected", factor);
        if (q == Q_TARGET) say_target(f, x);
    }
}

/* Padding and empty rows. */
static void say_rows(const facts *f, char *text, size_t bytes) {
    judge *j = f->s->j;
    const compared *e = &f->beside;
    if (e->empty_value || e->empty_grad) { /* 0/0 of an empty softmax, most often */
        put(text, bytes, "%srows that see no key hold %s, where zero is right", *text ? "; " : "",
            e->empty_value && e->empty_grad ? "a loss and a gradient"
            : e->empty_value                ? "a loss"
                                            : "a gradient");
        judge_fault(j, "empty-row-not-zero");
    }
    if (e->padding_grad && !(f->s->expected.faults & CG_FAULT_PADDING_IN_LOSS)) {
        put(text, bytes, "%spadding rows hold a gradient", *text ? "; " : "");
        j->v->gradient.faults |= CG_FAULT_PADDING_IN_LOSS;
        if (f->s->has[Q_LOSS]) /* which says whether they count in the value too */
            j->v->gradient_differs |= !(j->v->contract.faults & CG_FAULT_PADDING_IN_LOSS);
        else
            j->v->contract.faults |= CG_FAULT_PADDING_IN_LOSS;
        judge_fault(j, cg_fault_name(2));
    }
    if (e->padding_value)
        judge_note(j, "padding rows hold a target or a kl: right where loss and gradients leave them out");
}

/* ---- the sentence ---- */

/* `which`: the gradients that have it; `of`: beside what, where all have. */
static void say_factor(const facts *f, unsigned which, double factor, const char *of, char *text,
                       size_t bytes) {
    const unsigned all = f->parts & GRADIENTS;
    put(text, bytes, "%s", *text ? "; " : "");
    if (which == all) {
        put(text, bytes, "the indexer's gradients are %s%.7g times those %s",
            __builtin_popcount(all) > 1 ? "all " : "", factor, of);
    } else {
        const char *between = "";
        for (int q = Q_GRAD_Q; q <= Q_GRAD_K; q++)
            if (which & PART(q)) put(text, bytes, "%s%s", between, judge_quantity[q].name), between = " and ";
        const bool several = __builtin_popcount(all & ~which) > 1;
        put(text, bytes, " %s %.7g times the expected, the other%s as %s should be",
            __builtin_popcount(which) > 1 ? "are" : "is", factor, several ? "s are" : " is",
            several ? "they" : "it");
    }
    judge_fault(f->s->j, "gradient-factor");
    f->s->j->v->factor = factor;
}

/* A contract that too few numbers carry is none that is yours. */
static void say_few(const facts *f, const finding *x, const char *how, char *text, size_t bytes) {
    char named[300] = "";
    put_difference(named, sizeof named, &x->choice.c, &f->s->expected);
    put(text, bytes,
        "%s%s%lld of the contracts that were tried fit %s, the simplest is %s: too few numbers to name one",
        *text ? "; " : "", how, (long long)x->choice.n,
        x->given == PART(Q_LOSS) ? "the loss, which is one number"
        : x->given & VALUE_PARTS ? "these numbers"
                                 : "the gradients",
        named);
    if (!f->s->j->v->n_fit) f->s->j->v->n_fit = x->choice.n;
}

/* Everything follows one contract, or is as expected. */
static void say_joint(const facts *f, char *text, size_t bytes) {
    const finding *x = &f->joint;
    judge *j = f->s->j;
    cg_verdict *v = j->v;
    v->contract = v->gradient = x->choice.c;
    v->gradient.faults = x->beside.gradient.faults;
    v->identified = true;
    const bool rows = (f->parts & ~PART(Q_LOSS)) != 0,
               expected = judge_cost(&x->choice.c, &f->s->expected) == 0;
    if (expected && !rows) {
        put(text, bytes, "the loss is that of ");
        put_contract(f, &x->choice.c, text, bytes);
        put(text, bytes, "; it is one number, which %lld of the contracts that were tried give",
            (long long)x->choice.n);
        v->n_fit = x->choice.n;
    } else {
        put(text, bytes, f->parts & VALUE_PARTS ? "your loss is " : "your gradients are those of ");
        put_contract(f, &x->choice.c, text, bytes);
        put_numbers(j, text, bytes);
        put_rests(f, x, text, bytes);
    }
    add_faults(j, &x->choice.c, &f->s->expected);
    if (x->has_factor) say_factor(f, f->parts & GRADIENTS, x->factor, "of this contract", text, bytes);
    const bool floored = x->choice.c.value[CG_AXIS_NORMALISE] != f->s->expected.value[CG_AXIS_NORMALISE];
    if (floored && x->choice.underflow && !(x->choice.c.faults & CG_FAULT_TEACHER_UNDERFLOW))
        put(text, bytes, "; or, with the same numbers, %s: %s", cg_fault_name(1), cg_fault_says(1));
}

/* Value and gradients apart. */
static void say_parts(const facts *f, char *text, size_t bytes) {
    const finding *x = &f->value, *g = &f->gradient;
    judge *j = f->s->j;
    cg_verdict *v = j->v;
    const unsigned values = f->parts & VALUE_PARTS, wrong = f->parts & ~f->as_expected & ~f->unsure;
    const bool value = x->choice.found && x->carried && !(x->given & ~x->explained);
    const bool expected_value = !(values & ~f->as_expected);
    if (value || (expected_value && values)) {
        const cg_contract *c = value ? &x->choice.c : &f->s->expected;
        v->contract = *c;
        put(text, bytes, x->given == values || !value ? "your loss is " : "part of your loss is ");
        put_contract(f, c, text, bytes);
        put_numbers(j, text, bytes);
        if (value) put_rests(f, x, text, bytes);
        if (value && x->given != values)
            put(text, bytes, "; the rest follows no known contract together with it");
        add_faults(j, c, &f->s->expected);
    } else if (values & wrong || !f->expectable) {
        if (!f->expectable && !x->choice.found)
            put(text, bytes,
                "no contract of the compressed keys alone gives your loss%s, and no other can be formed "
                "without kv and sink, or non_compressed_lse",
                f->parts & GRADIENTS && !g->choice.found ? " or gradients" : "");
        else if (!x->choice.found)
            put(text, bytes, "your loss follows no known contract");
        else
            say_few(f, x, "", text, bytes);
        put_numbers(j, text, bytes);
    }
    if (!(wrong & GRADIENTS)) {
        if (!value || !(f->parts & GRADIENTS)) return;
        v->gradient = f->s->expected;
        v->gradient_differs = true;
        v->identified = x->given == values;
        put(text, bytes, "; the gradients follow the expected contract");
        return;
    }
    if (!f->s->has_grad) return;
    const bool gradient = g->choice.found && g->carried && (!g->has_factor || g->one_factor) &&
                          !(f->parts & ROW_GRADIENTS & ~g->explained);
    if (f->group_factor && !(gradient && !g->has_factor)) {
        say_factor(f, f->parts & GRADIENTS & ~f->as_expected, f->factor, "expected", text, bytes);
    } else if (gradient) {
        v->gradient = g->choice.c;
        v->gradient_differs = values != 0;
        if (!values) v->contract = g->choice.c;
        if (values) {
            put(text, bytes, "%sthe gradients follow another contract: ", *text ? "; " : "");
            put_difference(text, bytes, &g->choice.c, &f->s->expected);
        } else {
            put(text, bytes, "your gradients are those of ");
            put_contract(f, &g->choice.c, text, bytes);
        }
        put_rests(f, g, text, bytes);
        add_faults(j, &g->choice.c, &f->s->expected);
        if (g->has_factor) say_factor(f, f->parts & GRADIENTS, g->factor, "of that contract", text, bytes);
        v->identified = !values || ((value || expected_value) && (x->given == values || expected_value));
    } else if (g->choice.found && g->has_factor && !g->one_factor &&
               judge_cost(&g->choice.c, &f->s->expected) == 0) {
        const judge_stat *stat = &f->beside.stats[f->s->has[Q_GRAD_Q] ? Q_GRAD_Q : Q_GRAD_W];
        put(text, bytes,
            "%seach row's gradient has the direction that is expected, the factors differ from row to row",
            *text ? "; " : "");
        if (stat->row_hi >= stat->row_lo) put(text, bytes, ", from %.4g to %.4g", stat->row_lo, stat->row_hi);
    } else if (g->choice.found && !g->carried && (!g->has_factor || g->one_factor)) {
        say_few(f, g, "", text, bytes);
    } else if (f->coarse.choice.found && !(f->parts & ROW_GRADIENTS & ~f->coarse.explained)) {
        say_few(f, &f->coarse, "to the rounding of coarser arithmetic, ", text, bytes);
    } else if (f->expectable || g->choice.found) {
        put(text, bytes, "%sthe gradients follow no known contract", *text ? "; " : "");
    }
}

void judge_say_loss(const facts *f) {
    const search *s = f->s;
    judge *j = s->j;
    cg_verdict *v = j->v;
    char *text = v->sentence;
    const size_t bytes = sizeof v->sentence;
    const bool as_expected = f->as_expected == f->parts;
    const bool joint =
        f->joint.choice.found && f->joint.carried && !(f->parts & ~f->joint.explained & ~PART(Q_GRAD_K));
    v->judged_loss = true;
    v->factor = 1;
    v->contract = v->gradient = s->expected;

    unsigned explained = joint ? f->joint.explained : 0;
    bool factored = joint && f->joint.has_factor;
    if (!joint && f->value.carried) explained |= f->value.explained & f->value.given;
    if (!joint && f->gradient.carried && (!f->gradient.has_factor || f->gradient.one_factor)) {
        explained |= f->gradient.explained & GRADIENTS;
        factored = f->gradient.has_factor;
    }
    for (int q = 0; q < QUANTITIES; q++)
        if (s->has[q]) say_quantity(f, q, explained, factored && q >= Q_GRAD_Q);

    if (f->nothing) {
        if (as_expected) put(text, bytes, "loss_coeff is 0: loss and gradients are 0, whatever the contract");
        v->identified = as_expected;
        return;
    }
    const choice *open = joint                                             ? &f->joint.choice
                         : f->value.choice.found && f->value.carried       ? &f->value.choice
                         : f->gradient.choice.found && f->gradient.carried ? &f->gradient.choice
                                                                           : NULL;
    if (open) say_open(f, open);
    if (joint) {
        say_joint(f, text, bytes);
    } else if (as_expected) { /* to rounding that the search did not allow */
        v->identified = true;
        put(text, bytes, "your loss is ");
        put_contract(f, &s->expected, text, bytes);
    } else if ((f->as_expected | f->unsure) != f->parts || !f->expectable) {
        say_parts(f, text, bytes);
    } else if (f->unsure & PART(Q_LOSS)) {
        const bool fits = f->value.choice.found && judge_cost(&f->value.choice.c, &s->expected) > 0;
        put(text, bytes, "to the rounding of its type your loss follows %s",
            fits ? "another contract than the expected one" : "no known contract");
        if (fits) say_few(f, &f->value, "", text, bytes);
        put_numbers(j, text, bytes);
    }
    if (f->expectable) say_rows(f, text, bytes);

    /* the keys' gradient alone */
    const unsigned others = f->parts & ROW_GRADIENTS;
    const bool k_wrong =
        (f->parts & PART(Q_GRAD_K)) && !((explained | f->as_expected | f->unsure) & PART(Q_GRAD_K));
    if (k_wrong && others && !(others & ~(explained | f->as_expected)) && !f->beside.empty_grad &&
        !f->group_factor) {
        put(text, bytes, "%sthe gradient of k_indexer does not follow that of the others", *text ? "; " : "");
        judge_fault(j, "gradient-of-keys");
    }
    if (k_wrong && joint && f->group_factor) {
        say_factor(f, PART(Q_GRAD_K), f->factor, "expected", text, bytes);
    }
    if (k_wrong) v->identified = false;
}
