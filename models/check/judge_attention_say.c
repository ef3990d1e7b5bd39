/* Attention beside what is expected, in words. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "models/check/judge_attention.h"

static const struct {
    const char *name, *says;
} variants[VARIANTS] = {
    [V_NO_SINK] = {"sink-ignored", "the sink is missing from the softmax"},
    [V_NO_WINDOW] = {"window-ignored", "the window is missing from the softmax"},
    [V_NO_COMPRESSED] = {"compressed-ignored", "the compressed rows are missing from the softmax"},
    [V_ALL_VISIBLE] = {"attends-all-visible", "rows attend to all visible compressed rows, not to their list"},
    [V_UNSEEN] = {"attends-unseen-keys", "rows attend to keys of their list that they do not see yet"},
    [V_WINDOW_SHORT] = {"window-short", "the window is one token too short"},
    [V_WINDOW_LONG] = {"window-long", "the window is one token too long"},
    [V_MINUS_ONE_LAST] = {"minus-one-wrapped", "-1 in a list is read as the last compressed row"},
    [V_MINUS_ONE_FIRST] = {"minus-one-clamped", "-1 in a list is read as compressed row 0"},
    [V_NO_OFFSET] = {"list-not-offset",
                     "lists that count from the segment are read as if from the whole array"},
    [V_SCALE] = {"softmax-scale", "the softmax scale is another"}, /* which one, is said where it is known */
    [V_LSE_NO_SINK] = {"backward-lse-without-sink",
                       "the backward rebuilds the weights from an lse without the sink"},
};

static const char *const lse_forms[LSE_FORMS] = {"natural, with the sink", "without the sink", "in base 2",
                                                 "in base 2, without the sink"};

static double largest(const double *x, int64_t n) {
    double max = 0;
    for (int64_t i = 0; i < n; i++) max = fabs(x[i]) > max ? fabs(x[i]) : max;
    return max;
}

/* Finer arithmetic than was needed, or none that fits. */
static bool looks_right(const setting *a, const result *r, int q) {
    return !a->has[q] || (r->outcome[q] == JUDGE_SAME && r->level[q] <= a->j->free[judge_attended[q].id]);
}

static int count_same(const setting *a, const result *r) {
    int n = 0;
    for (int q = 0; q < A_QUANTITIES; q++)
        n += a->has[q] && r->outcome[q] == JUDGE_SAME ? q <= A_LSE ? 8 : 1 : 0;
    return n;
}

static int64_t enough(int64_t rows) { return rows < 2 ? rows > 0 ? rows : 1 : 2; }

/* Variants that give all rows of some tries and can be told from what was expected: those of the finest
 * arithmetic. */
typedef struct named {
    unsigned fit;
    int64_t rows; /* that tell */
    judge_level level;
} named;

static named fitting(const setting *a, const attempts *all, int from, int to, judge_level below) {
    const judge *j = a->j;
    named found = {.level = below};
    for (int v = V_NO_SINK; v < VARIANTS; v++)
        for (int i = from; i < to; i++) {
            const trial *t = &all->tried[v][i];
            judge_level level;
            if (!a->tries[i] || judge_outcome_of(j, judge_id_of_try(i), &t->stat, &level) != JUDGE_SAME)
                continue;
            if (level >= below || level > found.level || t->apart[level] < enough(all->rows[i])) continue;
            if (level < found.level) found = (named){.level = level};
            found.fit |= 1u << v;
            found.rows = t->apart[level];
        }
    return found;
}

static variant only(const named *n) {
    for (int v = V_NO_SINK; v < VARIANTS; v++)
        if (n->fit == 1u << v) return (variant)v;
    return V_RIGHT;
}

static const char *words_of(const setting *a, variant v, char *text, size_t bytes) {
    if (v != V_SCALE) return variants[v].says;
    snprintf(text, bytes, "the softmax scale in use is %.9g times the one given", a->factor);
    return text;
}

static void say_variants(const setting *a, cg_quantity *q, const named *n) {
    char text[100];
    const variant v = only(n);
    size_t at = 0;
    if (v) {
        snprintf(q->says, sizeof q->says, "%s: it gives all rows, %lld of which tell it from what is expected",
                 words_of(a, v, text, sizeof text), (long long)n->rows);
        judge_fault(a->j, variants[v].name);
        q->unsure = false;
        return;
    }
    for (int k = V_NO_SINK; k < VARIANTS; k++)
        if (n->fit >> k & 1 && at < sizeof q->says)
            at += (size_t)snprintf(q->says + at, sizeof q->says - at, "%s%s",
                                   at ? ", or " : "one of these, which the dump does not tell apart: ",
                                   words_of(a, (variant)k, text, sizeof text));
}

/* One factor for all gradients. */
static void say_common_factor(const setting *a, const result *r, cg_quantity *const *q) {
    const judge_stat *stats[A_QUANTITIES];
    cg_dump_id ids[A_QUANTITIES];
    int n = 0;
    double factor;
    bool all = true, some = false;
    for (int which = A_QUERY; which < A_QUANTITIES; which++) {
        if (!a->has[which]) continue;
        all &= r->outcome[which] != JUDGE_SAME || r->stats[which].max_want == 0;
        some |= r->outcome[which] == JUDGE_OTHER;
        stats[n] = &r->stats[which];
        ids[n++] = judge_attended[which].id;
    }
    if (n > 1 && all && some && judge_factor_of(a->j, stats, ids, n, &factor)) {
        for (int which = A_QUERY; which < A_QUANTITIES; which++)
            if (q[which] && !q[which]->ok)
                snprintf(q[which]->says, sizeof q[which]->says,
                         "all gradients of attention are %.9g times those expected", factor);
        judge_fault(a->j, "attention-gradient-factor");
    }
}

/* ... or for a quantity alone, where more than one number says so. */
static void say_own_factors(const setting *a, const result *r, cg_quantity *const *q) {
    for (int which = 0; which < A_QUANTITIES; which++) {
        const bool lse = which == A_LSE || which == A_WINDOW_LSE;
        if (!q[which] || q[which]->ok || q[which]->unsure || q[which]->says[0] || lse) continue;
        const cg_dump_id id = judge_attended[which].id;
        const judge_stat *stat = &r->stats[which];
        double factor;
        char fault[48];
        if (stat->factor[a->j->free[id]].n < 2 || !judge_factor_of(a->j, &stat, &id, 1, &factor)) continue;
        snprintf(q[which]->says, sizeof q[which]->says, "it is %.9g times the one expected", factor);
        snprintf(fault, sizeof fault, "%s-factor", judge_attended[which].name);
        judge_fault(a->j, fault);
    }
}

/* A gradient with one of its two parts missing. */
static bool say_parts(const setting *a, const result *r, cg_quantity *const *q) {
    const judge *j = a->j;
    const int64_t wide = 4 * (j->d->D > j->d->H ? j->d->D : j->d->H) + 1;
    double *buffer = malloc((size_t)wide * sizeof *buffer);
    judge_level level;
    if (!buffer) return false;
    for (int which = A_KV; which <= A_COMPRESSED; which++)
        for (int role = 0; role < 2; role++) {
            if (!q[which] || q[which]->ok || q[which]->says[0]) continue;
            trial alone = {0};
            judge_stat_init(&alone.stat, 1);
            const int64_t some = judge_compare_keys(a, &r->total, which, role, &alone, buffer);
            if (judge_outcome_of(j, judge_attended[which].id, &alone.stat, &level) != JUDGE_SAME ||
                alone.apart[level] < enough(some))
                continue;
            snprintf(q[which]->says, sizeof q[which]->says, "only a row's role as %s has a gradient",
                     role ? "key" : "value");
            judge_fault(a->j, role ? "gradient-of-key-role-only" : "gradient-of-value-role-only");
        }
    if (q[A_SINK] && !q[A_SINK]->ok && !q[A_SINK]->says[0]) {
        judge_stat other;
        judge_stat_init(&other, 1);
        judge_compare_sink(a, &r->total, r->total.sink_other, &other, buffer);
        if (judge_outcome_of(j, CG_DUMP_GRAD_SINK, &other, &level) == JUDGE_SAME) {
            snprintf(q[A_SINK]->says, sizeof q[A_SINK]->says,
                     "it is recomputed from an output without the sink");
            judge_fault(a->j, "sink-gradient-without-sink");
        }
    }
    free(buffer);
    return true;
}

/* Where other answers of attention show coarse arithmetic, one that it explains needs no evidence of its
 * own. */
static void share_evidence(const setting *a, result *r) {
    judge *j = a->j;
    judge_level shown = JUDGE_F64;
    for (int q = 0; q < A_QUANTITIES; q++)
        if (a->has[q] && r->outcome[q] == JUDGE_SAME && r->level[q] > j->free[judge_attended[q].id] &&
            r->level[q] > shown)
            shown = r->level[q];
    for (int q = A_QUERY; q < A_QUANTITIES; q++)
        if (a->has[q] && r->outcome[q] == JUDGE_UNSURE && r->level[q] <= shown) {
            j->free[judge_attended[q].id] = r->level[q];
            r->outcome[q] = JUDGE_SAME;
        }
}

static bool report(setting *a, result *right, const result *adopted, variant main_one, const named *found) {
    judge *j = a->j;
    cg_quantity *q[A_QUANTITIES] = {0};
    const judge_level ceiling = j->ceiling;
    for (int which = 0; which < A_QUANTITIES; which++) {
        if (!a->has[which]) continue;
        const named *n = which == A_OUTPUT ? &found[0] : which == A_QUERY ? &found[1] : &found[2];
        const bool tried = which == A_OUTPUT || which == A_QUERY || which == A_LSE;
        if (tried && n->fit && right->outcome[which] == JUDGE_SAME)
            j->ceiling = j->free[judge_attended[which].id];
        q[which] = judge_add(j, judge_attended[which].name, judge_attended[which].id, &right->stats[which]);
        j->ceiling = ceiling;
        if (which == A_LSE || which == A_WINDOW_LSE) {
            const int i = which == A_WINDOW_LSE;
            if (q[which]->ok && !right->form_shows[i]) {
                q[which]->ok = false;
                q[which]->unsure = true;
            }
            if ((q[which]->ok || q[which]->unsure) && right->chosen[i])
                snprintf(q[which]->says, sizeof q[which]->says, "it is %s%s", lse_forms[right->chosen[i]],
                         right->form_shows[i] ? "" : " by too few rows to tell");
        }
        if (!q[which]->ok && tried && n->fit) say_variants(a, q[which], n);
        if (!q[which]->ok && !q[which]->says[0] && main_one && adopted->outcome[which] == JUDGE_SAME) {
            char text[100];
            snprintf(q[which]->says, sizeof q[which]->says, "it is as expected where %s",
                     words_of(a, main_one, text, sizeof text));
        }
    }
    const result *beside = main_one ? adopted : right;
    say_common_factor(a, beside, q);
    if (!say_parts(a, beside, q)) return false;
    say_own_factors(a, beside, q);
    return true;
}

/* Without lists, attention follows the scores: do they leave open which keys are selected? */
static bool cut_is_open(const judge *j, bool *open) {
    const cg_dump *d = j->d;
    judge_row r;
    bool ok = judge_row_new(j, &r);
    for (int64_t t = 0; ok && t < d->T && !*open; t++) {
        if (!cg_dump_is_real(d, t)) continue;
        judge_row_place(j, &r, t);
        if (r.n <= d->K) continue;
        judge_row_scores(j, &r);
        double in = INFINITY, out = -INFINITY;
        for (int64_t i = 0; i < r.n; i++)
            if (r.selected[0][i])
                in = fmin(in, r.scores[0][i]);
            else
                out = fmax(out, r.scores[0][i]);
        *open = in - out <= 2 * j->allowed * judge_score_noise(j, &r);
    }
    if (ok) judge_row_free(&r);
    return ok;
}

/* A list of a real row with a key twice. */
static bool find_repeats(const setting *a, bool *repeats) {
    const cg_dump *d = a->j->d;
    int64_t *list = malloc((size_t)(a->width + 1) * sizeof *list);
    for (int64_t t = 0; list && a->list < CG_DUMP_ARRAYS && t < d->T && !*repeats; t++) {
        if (!cg_dump_is_real(d, t)) continue;
        cg_dump_list(d, a->list, t, list);
        for (int64_t k = 1; k < a->width; k++)
            for (int64_t i = 0; i < k && list[k] >= 0; i++) *repeats |= list[i] == list[k];
    }
    free(list);
    return list != NULL;
}

/* What the dump lacks to judge a quantity, NULL: nothing. */
static const char *lacking(const setting *a, int q, bool open) {
    const judge *j = a->j;
    const cg_dump *d = j->d;
    bool keys = false;
    for (int64_t t = 0; t < d->T; t++) keys |= cg_dump_is_real(d, t) && cg_dump_visible(d, t) > 0;
    if (!j->has_window) return cg_dump_has(d, CG_DUMP_QUERY) ? "kv is" : "query and kv are";
    if (q == A_WINDOW_LSE) return NULL;
    if (keys && !j->has_logits) return "compressed_kv is";
    if (keys && a->list == CG_DUMP_ARRAYS && !(j->has_scores && d->K >= 0)) return "topk is";
    if (open) return "topk, which the scores leave open, is";
    if (q >= A_QUERY && !cg_dump_has(d, CG_DUMP_DOUT)) return "dout is";
    if (q == A_SINK && !j->has_sink) return "sink is";
    if (q == A_COMPRESSED && !j->has_logits) return "compressed_kv is";
    return NULL;
}

/* All of it, with memory in hand. */
static bool judge_answers(setting *a, attempts *tries, result *right, result *adopted) {
    judge *j = a->j;
    bool repeats = false, all_right = true;
    named found[3] = {0};
    variant main_one = V_RIGHT;
    if (!judge_under(a, V_RIGHT, right) || !find_repeats(a, &repeats)) return false;
    for (int q = 0; q < A_QUANTITIES; q++) all_right &= looks_right(a, right, q);
    if (repeats) {
        a->once = true;
        if (!judge_under(a, V_RIGHT, adopted)) return false;
        const int listed = count_same(a, right), once = count_same(a, adopted);
        if (once != listed)
            judge_note(j, "attention counts a key that a list holds more than once %s",
                       once > listed ? "once" : "as often as it stands there");
        if (once > listed) {
            result x = *right;
            *right = *adopted;
            *adopted = x;
        }
        a->once = once > listed;
        judge_under_free(adopted);
        *adopted = (result){0};
    }
    share_evidence(a, right);
    a->tries[TRY_OUTPUT] = !looks_right(a, right, A_OUTPUT);
    a->tries[TRY_QUERY] = !looks_right(a, right, A_QUERY);
    for (int form = 0; form < LSE_FORMS; form++)
        a->tries[TRY_LSE + form] = !looks_right(a, right, A_LSE) && a->forms[0] >> form & 1;
    if (a->tries[TRY_OUTPUT] || a->tries[TRY_QUERY] || !looks_right(a, right, A_LSE)) {
        if (!judge_find_scale(a) || !judge_try_variants(a, tries)) return false;
        const int from[] = {TRY_OUTPUT, TRY_QUERY, TRY_LSE}, q[] = {A_OUTPUT, A_QUERY, A_LSE};
        for (int i = 0; i < 3; i++) {
            const bool same = a->has[q[i]] && right->outcome[q[i]] == JUDGE_SAME;
            found[i] = fitting(a, tries, from[i], i < 2 ? from[i] + 1 : TRIES,
                               same ? right->level[q[i]] : JUDGE_LEVELS);
        }
        main_one = only(&found[0]);
        if (!main_one && !found[0].fit) main_one = only(&found[2]);
        if (!main_one && !found[0].fit) main_one = only(&found[1]);
        if (main_one && !judge_under(a, main_one, adopted)) return false;
    }
    if (!report(a, right, adopted, main_one, found)) return false;
    const bool forward = found[0].fit || found[2].fit || (!a->has[A_OUTPUT] && !a->has[A_LSE]);
    if (main_one == V_SCALE && forward) j->scale *= a->factor; /* the loss is judged with it */
    return true;
}

bool judge_attention(judge *j, cg_error *error) {
    const cg_dump *d = j->d;
    setting a = {.j = j, .factor = 1};
    bool any = false, open = false;
    for (int q = 0; q < A_QUANTITIES; q++)
        any |= a.has[q] = cg_dump_has(d, judge_attended[q].id) && !(q == A_WINDOW_LSE && !j->has_window);
    if (!any) return true;
    a.list = cg_dump_has(d, CG_DUMP_ATTN_TOPK) ? CG_DUMP_ATTN_TOPK
             : cg_dump_has(d, CG_DUMP_TOPK)    ? CG_DUMP_TOPK
                                               : CG_DUMP_ARRAYS;
    a.width = a.list < CG_DUMP_ARRAYS ? d->array[a.list].width : 0;
    bool ok = a.list < CG_DUMP_ARRAYS || !j->has_scores || d->K < 0 || cut_is_open(j, &open);
    any = false;
    for (int q = 0; q < A_QUANTITIES; q++) {
        const char *lacks = a.has[q] ? lacking(&a, q, open) : NULL;
        if (lacks) judge_add_unjudged(j, judge_attended[q].name, judge_attended[q].id, lacks);
        any |= a.has[q] &= !lacks;
        a.grads |= a.has[q] && q >= A_QUERY;
    }
    if (any && !j->has_sink) judge_note(j, "the dump has no sink: none is expected in the softmax");
    a.forms[0] = a.forms[1] = (1u << LSE_FORMS) - 1;
    if (d->lse_base != 0) a.forms[0] &= d->lse_base == 2 ? 0xcu : 0x3u; /* told: base, and perhaps the sink */
    if (d->lse_has_sink >= 0) a.forms[0] &= d->lse_has_sink ? 0x5u : 0xau;

    attempts *tries = calloc(1, sizeof *tries);
    result *results = calloc(2, sizeof *results);
    a.k_largest[0] = malloc((size_t)(d->T + 1) * sizeof(double));
    a.k_largest[1] = malloc((size_t)(j->key0[d->B] + 1) * sizeof(double));
    ok = ok && tries && results && a.k_largest[0] && a.k_largest[1];
    if (ok && any) {
        for (int64_t t = 0; t < d->T; t++) a.k_largest[0][t] = largest(j->kv + t * d->D, d->D);
        for (int64_t k = 0; j->has_logits && k < j->key0[d->B]; k++)
            a.k_largest[1][k] = largest(j->ckv + k * d->D, d->D);
        ok = judge_answers(&a, tries, &results[0], &results[1]);
    }
    for (int i = 0; i < 2 && results; i++) judge_under_free(&results[i]);
    free(results);
    free(tries);
    free(a.k_largest[0]);
    free(a.k_largest[1]);
    return ok || cg_fail(error, CG_FAILED, "out of memory for attention over %lld rows", (long long)d->T);
}
