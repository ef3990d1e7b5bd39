/* Is the dump's selection the visible keys of largest score? As a set; the order is looked at apart, and another set
 * of the same scores is another way to break ties, no fault. */
#include "models/judge.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct tally {
    judge_stat stat;
    int64_t rows, wrong, ties, order, repeated, unseen, unseen_next, missing, padding;
    int64_t as_linear, as_late, as_late_rows; /* of the rows, how many follow another rule */
    double worst_tie;
} tally;

static int falling(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? 1 : x > y ? -1 : 0;
}

/* Largest difference between the sorted scores of the list and the `width` largest of the first n. */
static double gap(const double *scores, int64_t n, const int64_t *list, int64_t n_list, double *a, double *b) {
    int64_t count = 0;
    memcpy(a, scores, (size_t)n * sizeof *a);
    qsort(a, (size_t)n, sizeof *a, falling);
    for (int64_t k = 0; k < n_list; k++) {
        if (list[k] >= n) return INFINITY;
        if (list[k] >= 0) b[count++] = scores[list[k]];
    }
    if (count != (n < n_list ? n : n_list)) return INFINITY;
    qsort(b, (size_t)count, sizeof *b, falling);
    double most = 0;
    for (int64_t i = 0; i < count; i++) most = fmax(most, fabs(a[i] - b[i]));
    return most;
}

static void judge_one(const judge *j, judge_row *r, tally *y) {
    const cg_dump *d = j->d;
    const int64_t n = r->n, K = d->K;
    const double *scores = r->scores[0];
    const double unit = 2 * judge_score_noise(j, r, 0x1p-24) + 0x1p-149; /* indices say nothing of f64 */
    const double room = j->tolerance > 0 ? j->tolerance * r->largest_score : j->allowed * unit;
    int64_t *list = r->list, *want = (int64_t *)r->x[3];
    bool unseen = false, repeated = false;

    /* the expected list; list and marks of the row hold the dump's */
    unsigned char *marks = r->selected[1];
    memset(marks, 0, (size_t)n + 1);
    cg_dump_list(d, CG_DUMP_TOPK, r->t, list);
    int64_t count = 0;
    for (int64_t k = 0; k < K; k++) {
        if (list[k] < 0) continue;
        count++;
        if (list[k] >= n) {
            unseen = true;
            y->unseen_next += list[k] == n;
        } else if (marks[list[k]]++) {
            repeated = true;
        }
    }
    int64_t n_want = 0;
    for (int64_t i = 0; i < n && K > 0; i++) { /* falling, ties to the lower index */
        int64_t at = n_want;
        if (n_want == K && !(scores[i] > scores[want[K - 1]])) continue;
        while (at > 0 && scores[i] > scores[want[at - 1]]) at--;
        n_want = n_want < K ? n_want + 1 : K;
        memmove(want + at + 1, want + at, (size_t)(n_want - 1 - at) * sizeof *want);
        want[at] = i;
    }
    y->rows++;
    bool same_set = !unseen && !repeated && count == n_want;
    for (int64_t k = 0; k < n_want && same_set; k++) same_set = marks[want[k]] != 0;
    double difference = same_set             ? 0
                        : unseen || repeated ? INFINITY
                                             : gap(scores, n, list, K, r->x[0], r->x[1]);
    const bool fine = difference <= room;
    y->unseen += unseen;
    y->repeated += repeated;
    y->missing += count < n_want;
    if (!same_set && fine) {
        y->ties++;
        y->worst_tie = fmax(y->worst_tie, difference);
    }
    double before = INFINITY;
    bool ordered = true;
    for (int64_t k = 0; k < K && fine; k++) {
        if (list[k] < 0) continue;
        ordered &= scores[list[k]] <= before + room;
        before = scores[list[k]];
    }
    y->order += !ordered;
    if (n > K && j->has_dots) y->as_linear += gap(r->scores[1], n, list, K, r->x[0], r->x[1]) <= room;
    if (r->position % d->ratio == d->ratio - 1) { /* the only rows that "too late" changes */
        y->as_late_rows++;
        y->as_late += n > 0 && gap(scores, n - 1, list, K, r->x[0], r->x[1]) <= room;
    }

    judge_stat *s = &y->stat;
    const double units = difference / (j->tolerance > 0 ? room : unit);
    s->max_want = fmax(s->max_want, r->largest_score);
    if (isfinite(difference)) s->max_error = fmax(s->max_error, fine ? 0 : difference);
    if (!fine) {
        y->wrong++;
        cg_difference here = {r->segment, r->position, -1, NAN, NAN, units};
        int64_t k = 0;
        while (k < K && k < n_want && list[k] == want[k]) k++;
        /* the first slot whose key does not belong, or that lacks one */
        for (int64_t i = 0; i < K; i++) {
            bool belongs = list[i] < 0 ? count == n_want : false;
            for (int64_t m = 0; m < n_want && !belongs; m++) belongs = list[i] == want[m];
            if (!belongs) {
                k = i;
                break;
            }
        }
        here.got = k < K ? (double)list[k] : -1;
        here.expected = -1;
        for (int64_t m = 0; m < n_want; m++)
            if (!(want[m] < n && marks[want[m]])) {
                here.expected = (double)want[m];
                break;
            }
        if (s->first_row < 0 || r->t < s->first_row) {
            s->first_row = r->t;
            s->first = here;
        }
        s->worst_units = fmax(s->worst_units, units);
        if (!isfinite(difference)) s->max_error = INFINITY;
        if (s->n_worst < j->n_worst && s->n_worst < CG_WORST_ROWS) s->worst[s->n_worst++] = here;
    }
}

static void say(judge *j, cg_quantity *q, const tally *all) {
    char *text = q->says;
    const size_t bytes = sizeof q->says;
    if (all->unseen) {
        judge_fault(j, "selects-unseen-keys");
        snprintf(text, bytes, "%lld rows select keys that they do not see yet%s", (long long)all->unseen,
                 all->unseen_next >= all->unseen ? ", the group that they stand in among them" : "");
    } else if (all->repeated) {
        judge_fault(j, "selects-a-key-twice");
        snprintf(text, bytes, "%lld rows select a key twice", (long long)all->repeated);
    } else if (all->as_linear == all->rows && all->wrong) {
        judge_fault(j, "selection-by-linear-scores");
        snprintf(text, bytes, "every row selects by scores without ReLU");
    } else if (all->as_late == all->as_late_rows && all->wrong) {
        judge_fault(j, "sees-keys-too-late");
        snprintf(text, bytes, "the last row of each group does not see its own group, which is complete");
    } else if (all->missing) {
        snprintf(text, bytes, "%lld rows select fewer keys than they could", (long long)all->missing);
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

bool judge_selection(judge *j, cg_error *error) {
    const cg_dump *d = j->d;
    if (!j->has_list) return true;
    if (!j->has_scores) {
        judge_note(j, "selection is not judged: q_indexer, weights and k_indexer, or index_scores, are needed");
        return true;
    }
    tally *parts = calloc(JUDGE_CHUNKS, sizeof *parts);
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
            if (!r.real) {
                if (r.segment >= 0) {
                    cg_dump_list(d, CG_DUMP_TOPK, t, r.list);
                    for (int64_t k = 0; k < d->K; k++) parts[c].padding += r.list[k] >= 0;
                }
                continue;
            }
            judge_row_scores(j, &r);
            judge_one(j, &r, &parts[c]);
        }
        judge_row_free(&r);
    }
    if (ok) {
        tally all = {0};
        judge_stat_init(&all.stat, 1);
        for (int c = 0; c < JUDGE_CHUNKS; c++) {
            const tally *y = &parts[c];
            judge_stat_merge(&all.stat, &y->stat, j->n_worst);
            all.rows += y->rows, all.wrong += y->wrong, all.ties += y->ties, all.order += y->order;
            all.repeated += y->repeated, all.unseen += y->unseen, all.unseen_next += y->unseen_next;
            all.missing += y->missing, all.padding += y->padding, all.as_linear += y->as_linear;
            all.as_late += y->as_late, all.as_late_rows += y->as_late_rows;
        }
        /* rows that see no more than K keys follow any rule about scores */
        for (int64_t t = 0; t < d->T; t++)
            all.as_linear += cg_dump_is_real(d, t) && cg_dump_visible(d, t) <= d->K;
        say(j, judge_add(j, "selection", CG_DUMP_TOPK, &all.stat), &all);
        if (all.padding) judge_note(j, "padding rows select keys too (%lld slots)", (long long)all.padding);
    }
    free(parts);
    return ok || cg_fail(error, CG_FAILED, "out of memory for a row of %lld keys", (long long)d->N);
}
