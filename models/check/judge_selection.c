/* Is the dump's selection the visible keys of largest score? As a set; the order is looked at apart, and
 * another set of the same scores is another way to break ties, no fault. A rule that the lists follow
 * instead is named by the rows where it selects other keys than are expected: it must give those, at least
 * two, and all others. */
#include "models/check/judge.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum rule { BY_LINEAR, TOO_LATE, FIRST_KEYS, LAST_KEYS, LOWEST, RULES } rule;
static const struct {
    const char *fault, *says;
} rules[RULES] = {
    [BY_LINEAR] = {"selection-by-linear-scores", "every row selects by scores without ReLU"},
    [TOO_LATE] = {"sees-keys-too-late",
                  "the last row of each group does not see its own group, which is complete"},
    [FIRST_KEYS] = {"selects-first-keys", "every row selects the first keys, whatever their score"},
    [LAST_KEYS] = {"selects-last-keys", "every row selects the last keys, whatever their score"},
    [LOWEST] = {"selects-lowest-scores", "every row selects the keys of lowest score"},
};

typedef struct tally {
    judge_stat stat;
    int64_t rows, wrong, ties, order, repeated, unseen, unseen_next, beside, missing, too_many;
    int64_t rule_rows[RULES], rule_misses[RULES]; /* rows that tell it; rows that it does not give */
    int64_t open[JUDGE_LEVELS], flipped, beyond[JUDGE_LEVELS]; /* by the rounding of scores */
    double worst_tie;
} tally;

static int falling(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? 1 : x > y ? -1 : 0;
}

/* The `most` largest of n scores, falling, ties to the lower index. */
static int64_t select_largest(const double *scores, int64_t n, int64_t most, int64_t *list) {
    int64_t count = 0;
    for (int64_t i = 0; i < n && most > 0; i++) {
        int64_t at = count;
        if (count == most && !(scores[i] > scores[list[most - 1]])) continue;
        while (at > 0 && scores[i] > scores[list[at - 1]]) at--;
        count = count < most ? count + 1 : most;
        memmove(list + at + 1, list + at, (size_t)(count - 1 - at) * sizeof *list);
        list[at] = i;
    }
    return count;
}

/* Largest difference between the sorted scores of the list and the largest of the first n, `most` at most. */
static double gap(const double *scores, int64_t n, int64_t most, const int64_t *list, int64_t n_list, double *a,
                  double *b) {
    int64_t count = 0;
    memcpy(a, scores, (size_t)n * sizeof *a);
    qsort(a, (size_t)n, sizeof *a, falling);
    for (int64_t k = 0; k < n_list; k++) {
        if (list[k] >= n) return INFINITY;
        if (list[k] >= 0) b[count++] = scores[list[k]];
    }
    if (count != (n < most ? n : most)) return INFINITY;
    qsort(b, (size_t)count, sizeof *b, falling);
    double widest = 0;
    for (int64_t i = 0; i < count; i++) widest = fmax(widest, fabs(a[i] - b[i]));
    return widest;
}

/* Scores that are no further apart may stand in either order. Indices say nothing of f64. */
static double room_of(const judge *j, const judge_row *r, judge_level level) {
    if (j->tolerance > 0) return j->tolerance * r->largest_score;
    return j->allowed * (judge_unit(j, CG_DUMP_TOPK, level, 0, 2 * judge_score_noise(j, r)) + 0x1p-149);
}

/* Does the row follow a rule, and can it tell it from what is expected? */
static void try_rule(const judge *j, judge_row *r, rule which, double room, tally *y) {
    const cg_dump *d = j->d;
    const int64_t late = r->position / d->ratio, n = which == TOO_LATE && late < r->n ? late : r->n;
    const int64_t most = d->k_asked; /* lists may be wider, or narrower where there are not so many keys */
    double *scores = r->a[0];
    int64_t *theirs = (int64_t *)r->x[2];
    if (which == BY_LINEAR && !j->has_dots) {
        y->rule_misses[which]++;
        return;
    }
    for (int64_t i = 0; i < n; i++)
        scores[i] = which == BY_LINEAR    ? r->scores[1][i]
                    : which == TOO_LATE   ? r->scores[0][i]
                    : which == FIRST_KEYS ? (double)-i
                    : which == LAST_KEYS  ? (double)i
                                          : -r->scores[0][i];
    const double theirs_room = which == FIRST_KEYS || which == LAST_KEYS ? 0 : room;
    y->rule_misses[which] += !(gap(scores, n, most, r->list, d->K, r->x[0], r->x[1]) <= theirs_room);
    const int64_t count = select_largest(scores, n, most, theirs);
    y->rule_rows[which] += !(gap(r->scores[0], r->n, most, theirs, count, r->x[0], r->x[1]) <= room);
}

/* The first slot whose key does not belong, or that lacks one, and what is missing. */
static cg_difference place_of(const cg_dump *d, const judge_row *r, const int64_t *want, int64_t n_want,
                              int64_t count, double units) {
    cg_difference here = {r->segment, r->position, -1, -1, -1, units};
    int64_t at = 0;
    while (at < d->K && at < n_want && r->list[at] == want[at]) at++;
    for (int64_t i = 0; i < d->K; i++) {
        bool belongs = r->list[i] < 0 && count >= n_want;
        for (int64_t m = 0; m < n_want && !belongs; m++) belongs = r->list[i] == want[m];
        if (!belongs) {
            at = i;
            break;
        }
    }
    here.got = at < d->K ? (double)r->list[at] : -1;
    for (int64_t m = n_want - 1; m >= 0; m--)
        if (!r->selected[1][want[m]]) here.expected = (double)want[m];
    return here;
}

static void judge_one(const judge *j, judge_row *r, tally *y) {
    const cg_dump *d = j->d;
    const int64_t n = r->n, K = d->K, most = d->k_asked;
    const double *scores = r->scores[0];
    const double room = room_of(j, r, JUDGE_F32);
    int64_t *list = r->list, *want = (int64_t *)r->x[3];

    /* list and marks of the row hold the dump's */
    unsigned char *marks = r->selected[1];
    memset(marks, 0, (size_t)n + 1);
    cg_dump_list(d, CG_DUMP_TOPK, r->t, list);
    int64_t count = 0, unseen = 0, repeated = 0;
    bool next = false;
    for (int64_t k = 0; k < K; k++) {
        if (list[k] < 0) continue;
        count++;
        if (list[k] >= n) {
            unseen++;
            next |= list[k] == n;
        } else if (marks[list[k]]++) {
            repeated++;
        }
    }
    const int64_t n_want = select_largest(scores, n, most, want);
    bool same_set = count == n_want && !unseen && !repeated;
    for (int64_t k = 0; k < n_want && same_set; k++) same_set = marks[want[k]] != 0;
    const double difference = same_set             ? 0
                              : unseen || repeated ? INFINITY
                                                   : gap(scores, n, most, list, K, r->x[0], r->x[1]);
    const bool fine = difference <= room;
    y->rows++;
    y->unseen += unseen > 0;
    y->unseen_next += next;
    y->repeated += repeated > 0;
    y->missing += count < n_want;
    y->too_many += count - unseen - repeated > most;
    y->ties += !same_set && fine;
    if (unseen && !repeated) { /* are those that it sees the right ones? */
        int64_t kept = 0, *seen = (int64_t *)r->x[2];
        for (int64_t k = 0; k < K; k++)
            if (list[k] < n) seen[kept++] = list[k];
        y->beside += gap(scores, n, most, seen, kept, r->x[0], r->x[1]) <= room;
    }
    double before = INFINITY;
    bool ordered = true;
    for (int64_t k = 0; k < K && fine; k++) {
        if (list[k] < 0) continue;
        ordered &= scores[list[k]] <= before + room;
        before = scores[list[k]];
    }
    y->order += !ordered;
    for (int which = 0; which < RULES; which++) try_rule(j, r, (rule)which, room, y);
    if (n > most && most > 0) { /* do coarser scores select others as often as not? */
        select_largest(scores, n, most + 1, (int64_t *)r->x[2]);
        const int64_t *first = (int64_t *)r->x[2];
        const double margin = scores[first[most - 1]] - scores[first[most]];
        for (judge_level level = JUDGE_F16; level < JUDGE_LEVELS; level++)
            y->open[level] += margin <= 0.25 * judge_rounding[level] * r->largest_score;
    }
    y->flipped += !fine;
    for (judge_level level = JUDGE_F16; level < JUDGE_LEVELS; level++)
        y->beyond[level] += !(difference <= room_of(j, r, level));

    judge_stat *s = &y->stat;
    const double units = difference == 0 ? 0 : difference / (room / j->allowed);
    s->max_want = fmax(s->max_want, r->largest_score);
    if (fine) return;
    y->wrong++;
    s->max_error = fmax(s->max_error, difference);
    for (judge_level level = JUDGE_F64; level < JUDGE_LEVELS; level++)
        s->worst_units[level] = level > JUDGE_F32 ? INFINITY : fmax(s->worst_units[level], units);
    const cg_difference here = place_of(d, r, want, n_want, count, units);
    if (s->first_row < 0 || r->t < s->first_row) {
        s->first_row = r->t;
        s->first = here;
    }
    if (s->n_worst < j->n_worst && s->n_worst < CG_WORST_ROWS) s->worst[s->n_worst++] = here;
}

/* "1 row selects", "2 rows select" */
static const char *rows_text(int64_t n, const char *verb, char *text, size_t bytes) {
    snprintf(text, bytes, "%lld row%s %s%s", (long long)n, n == 1 ? "" : "s", verb, n == 1 ? "s" : "");
    return text;
}

static void add_tally(tally *all, const tally *y, int n_worst) {
    judge_stat_merge(&all->stat, &y->stat, n_worst);
    all->rows += y->rows, all->wrong += y->wrong, all->ties += y->ties, all->order += y->order;
    all->repeated += y->repeated, all->unseen += y->unseen, all->unseen_next += y->unseen_next;
    all->beside += y->beside, all->missing += y->missing, all->too_many += y->too_many;
    all->flipped += y->flipped;
    for (int i = 0; i < RULES; i++) {
        all->rule_rows[i] += y->rule_rows[i];
        all->rule_misses[i] += y->rule_misses[i];
    }
    for (int level = 0; level < JUDGE_LEVELS; level++) {
        all->open[level] += y->open[level];
        all->beyond[level] += y->beyond[level];
    }
}

/* The rules that give all lists; true: there are some. */
static bool say_rule(judge *j, cg_quantity *q, const tally *all) {
    size_t at = 0;
    int n = 0;
    for (int i = 0; i < RULES; i++) {
        if (all->rule_misses[i] || all->rule_rows[i] < 2 || at >= sizeof q->says) continue;
        at += (size_t)snprintf(q->says + at, sizeof q->says - at, "%s%s (%lld rows tell)", n++ ? ", or " : "",
                               rules[i].says, (long long)all->rule_rows[i]);
    }
    for (int i = 0; i < RULES && n == 1; i++)
        if (!all->rule_misses[i] && all->rule_rows[i] >= 2) judge_fault(j, rules[i].fault);
    return n > 0;
}

/* Lists by coarser scores than f32 differ where scores are close, and in a good part of those rows. True:
 * that may be. */
static bool say_coarse(judge *j, cg_quantity *q, const tally *all) {
    for (judge_level level = JUDGE_F16; level < JUDGE_LEVELS && level <= j->ceiling; level++) {
        if (all->beyond[level] || j->tolerance > 0) continue;
        if (all->flipped >= 3 && all->flipped * 4 >= all->open[level]) {
            q->ok = true;
            q->has_first = false;
            snprintf(q->says, sizeof q->says,
                     "selected by scores in %s probably: other keys in %lld of %lld rows "
                     "where their rounding decides",
                     judge_level_name[level], (long long)all->flipped, (long long)all->open[level]);
            judge_note(j, "selection was probably made by scores in %s", judge_level_name[level]);
        } else {
            q->unsure = true;
            snprintf(q->says, sizeof q->says,
                     "other keys in %lld of %lld rows where scores in %s would decide: too few to tell",
                     (long long)all->flipped, (long long)all->open[level], judge_level_name[level]);
        }
        return true;
    }
    return false;
}

static void say(judge *j, cg_quantity *q, const tally *all) {
    char *text = q->says, rows[64];
    const size_t bytes = sizeof q->says;
    if (all->unseen) {
        judge_fault(j, "selects-unseen-keys");
        snprintf(text, bytes, "%s keys that they do not see yet%s%s",
                 rows_text(all->unseen, "select", rows, sizeof rows),
                 all->unseen_next >= all->unseen ? ", the group that they stand in among them" : "",
                 all->beside == all->unseen && all->wrong == all->unseen ? ", beside those that are expected"
                                                                         : "");
    } else if (all->repeated) {
        judge_fault(j, "selects-a-key-twice");
        snprintf(text, bytes, "%s a key twice", rows_text(all->repeated, "select", rows, sizeof rows));
    } else if (all->too_many) {
        judge_fault(j, "selects-too-many");
        snprintf(text, bytes, "%s more than %lld keys", rows_text(all->too_many, "select", rows, sizeof rows),
                 (long long)j->d->k_asked);
    } else if (all->wrong && say_rule(j, q, all)) {
        return;
    } else if (all->wrong && say_coarse(j, q, all)) {
        return;
    } else if (all->missing) {
        snprintf(text, bytes, "%s fewer keys than %s could",
                 rows_text(all->missing, "select", rows, sizeof rows), all->missing == 1 ? "it" : "they");
    } else if (all->wrong) {
        snprintf(text, bytes, "%lld of %lld rows select keys of lower score", (long long)all->wrong,
                 (long long)all->rows);
    } else if (all->ties) {
        snprintf(text, bytes,
                 "ties broken otherwise than to the lower index in %lld rows: other keys of the same scores",
                 (long long)all->ties);
    } else if (all->order) {
        snprintf(text, bytes, "the same keys, in %lld rows not by falling score", (long long)all->order);
    }
}

static bool judge_lists(judge *j) {
    const cg_dump *d = j->d;
    tally *parts = calloc(JUDGE_CHUNKS + 1, sizeof *parts), *all = parts + JUDGE_CHUNKS;
    bool ok = parts != NULL;
#pragma omp parallel for schedule(dynamic, 1) reduction(&& : ok)
    for (int c = 0; c < JUDGE_CHUNKS; c++) {
        judge_row r;
        if (!ok || !judge_row_new(j, &r)) {
            ok = false;
            continue;
        }
        judge_stat_init(&parts[c].stat, 1);
        for (int64_t t = c; t < d->T; t += JUDGE_CHUNKS) {
            judge_row_place(j, &r, t);
            if (!r.real) continue;
            judge_row_scores(j, &r);
            judge_one(j, &r, &parts[c]);
        }
        judge_row_free(&r);
    }
    if (ok) {
        judge_stat_init(&all->stat, 1);
        for (int c = 0; c < JUDGE_CHUNKS; c++) add_tally(all, &parts[c], j->n_worst);
        say(j, judge_add(j, "selection", CG_DUMP_TOPK, &all->stat), all);
    }
    free(parts);
    return ok;
}

/* ---- the scores themselves ---- */

typedef struct score_part {
    judge_stat form[2]; /* with ReLU, linear */
    int64_t apart[JUDGE_LEVELS];
} score_part;

/* Scores stand by slot of the list, or by key. */
static bool by_slot(const cg_dump *d) {
    const int64_t width = d->array[CG_DUMP_SCORES].width;
    return cg_dump_has(d, CG_DUMP_TOPK) && width == d->K && width != d->N && width != d->C &&
           width != d->keys_per_sequence;
}

static void compare_scores(const judge *j, judge_row *r, bool slots, score_part *to) {
    double *got = r->a[0], *noise = r->a[1], *want[2] = {r->a[2], r->a[3]};
    int64_t n = 0;
    judge_row_scores(j, r);
    cg_dump_columns(j->d, CG_DUMP_SCORES, r->t, r->n, got);
    for (int64_t i = 0; i < r->n; i++) {
        if (slots && !r->selected[0][i]) continue;
        got[n] = got[i];
        for (int form = 0; form < 2; form++) want[form][n] = r->scores[form][i];
        noise[n] = 2 * judge_score_noise(j, r) + 2 * judge_rounding[JUDGE_F32] * fabs(want[0][n]);
        n++;
    }
    for (int form = 0; form < 2; form++)
        judge_compare(j, CG_DUMP_SCORES, &to->form[form], r->segment, r->position, r->t, n, 0, got, want[form],
                      noise, NULL, n);
    for (judge_level level = j->own[CG_DUMP_SCORES]; level < JUDGE_LEVELS; level++) {
        bool apart = false;
        for (int64_t i = 0; i < n; i++) {
            const double unit = judge_unit(j, CG_DUMP_SCORES, level, want[0][i], noise[i]) +
                                judge_unit(j, CG_DUMP_SCORES, level, want[1][i], noise[i]);
            apart |= fabs(want[0][i] - want[1][i]) >
                     (j->tolerance > 0 ? 2 * j->tolerance * r->largest_score : j->allowed * unit);
        }
        to->apart[level] += apart;
    }
}

static void say_scores(judge *j, const score_part *all) {
    const cg_dump *d = j->d;
    const cg_dump_id id = CG_DUMP_SCORES;
    const char *const forms[] = {"", "scores without ReLU"};
    cg_quantity *q = judge_add(j, "index_scores", id, &all->form[0]);
    if (q->ok) return;
    for (int form = 0; form < 2; form++) {
        const judge_stat *stat = &all->form[form];
        judge_level level;
        double factor = 1;
        const bool same = judge_outcome_of(j, id, stat, &level) == JUDGE_SAME;
        if (!same && !judge_factor_of(j, &stat, &id, 1, &factor)) continue;
        if (same && (form == 0 || all->apart[level] < 2)) continue;
        if (form == 1) judge_fault(j, "index-scores-linear");
        const double scales[] = {1 / sqrt((double)d->Hi), 1 / sqrt((double)d->Di),
                                 1 / sqrt((double)(d->Hi * d->Di))};
        bool unscaled = false;
        for (int i = 0; i < 3 && !same && !unscaled; i++)
            if (scales[i] != 1 && fabs(factor / scales[i] - 1) <= fmax(1e-5, 4 * j->stored[id])) {
                factor = scales[i];
                unscaled = true;
            }
        if (same)
            snprintf(q->says, sizeof q->says, "they are %s: %lld rows tell", forms[1],
                     (long long)all->apart[level]);
        else
            snprintf(q->says, sizeof q->says, "they are%s%s %.9g times those expected%s", form ? " " : "",
                     forms[form], factor, unscaled ? ": the head weights are given before their scale" : "");
        if (!same) judge_fault(j, unscaled ? "head-weights-unscaled" : "index-scores-factor");
        if (factor > 0) j->weights_factor = factor;
        return;
    }
}

static bool judge_scores(judge *j) {
    const cg_dump *d = j->d;
    score_part *parts = calloc(JUDGE_CHUNKS + 1, sizeof *parts), *all = parts + JUDGE_CHUNKS;
    bool ok = parts != NULL;
    const bool slots = by_slot(d);
#pragma omp parallel for schedule(dynamic, 1) reduction(&& : ok)
    for (int c = 0; c < JUDGE_CHUNKS; c++) {
        judge_row r;
        if (!ok || !judge_row_new(j, &r)) {
            ok = false;
            continue;
        }
        judge_stat_init(parts[c].form, 2);
        for (int64_t t = c; t < d->T; t += JUDGE_CHUNKS) {
            judge_row_place(j, &r, t);
            if (r.real && r.n > 0) compare_scores(j, &r, slots, &parts[c]);
        }
        judge_row_free(&r);
    }
    if (ok) {
        judge_stat_init(all->form, 2);
        for (int c = 0; c < JUDGE_CHUNKS; c++) {
            for (int form = 0; form < 2; form++)
                judge_stat_merge(&all->form[form], &parts[c].form[form], j->n_worst);
            for (int level = 0; level < JUDGE_LEVELS; level++) all->apart[level] += parts[c].apart[level];
        }
        say_scores(j, all);
    }
    free(parts);
    return ok;
}

bool judge_selection(judge *j, cg_error *error) {
    const cg_dump *d = j->d;
    const char *name = j->has_list ? d->array[CG_DUMP_TOPK].name : "",
               *lacks = "q_indexer, weights and k_indexer, or index_scores, are";
    bool ok = true;
    if (j->has_list && j->has_scores)
        ok = judge_lists(j);
    else if (!strncmp(name, "out.", 4)) /* an answer; else it may be what attention was given */
        judge_add_unjudged(j, "selection", CG_DUMP_TOPK, lacks);
    else if (j->has_list)
        judge_note(j, "selection is not judged: %s needed", lacks);
    if (ok && j->has_dots && cg_dump_has(d, CG_DUMP_SCORES)) ok = judge_scores(j);
    return ok || cg_fail(error, CG_FAILED, "out of memory for a row of %lld keys", (long long)d->N);
}
