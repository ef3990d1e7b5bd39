/* Inside of models/verdict.h: what judging the loss, the selection and the attention share. */
#ifndef CG_MODELS_JUDGE_H
#define CG_MODELS_JUDGE_H

#include "models/verdict.h"

/* Pieces of the rows, striped; sums over them are added in order, so that results do not depend on threads. */
enum { JUDGE_CHUNKS = 8 };

/* Errors of one quantity, in one chunk. */
typedef struct judge_stat {
    double max_error, max_want, worst_units;
    int64_t first_row; /* -1: none differs */
    cg_difference first, worst[CG_WORST_ROWS];
    int n_worst;
} judge_stat;

typedef struct judge {
    const cg_dump *d;
    cg_verdict *v;
    double allowed;   /* units of expected rounding that are no difference */
    double tolerance; /* or 0 */
    int n_worst;
    double rounding[CG_DUMP_ARRAYS]; /* of each tensor's numbers */

    bool has_logits, has_window, has_lse, has_sink, has_dots, has_scores, has_list;
    int64_t *key0;                   /* [B+1] first row of a segment in the arrays of keys */
    double *ckv, *ki, *kv, *sink;    /* [., D], [., Di], [T, D], [H] */
    double *ki_largest;              /* largest magnitude of each index key */
    double noise_logits, noise_dots; /* what float dot products miss, relative to the row's largest */
    cg_contract_counts counts;
} judge;

/* One row, computed in f64. */
typedef struct judge_row {
    int64_t t, segment, position, n; /* n visible keys; a padding row's are those of its position */
    bool real;
    double *q, *logits, *exps, *max; /* [H, D], [H, n] twice, [H] */
    double *window;             /* [H] log sum over the window, without the sink where that is told apart */
    double *qi, *w, *dots;      /* [Hi, Di], [Hi], [Hi, n] */
    double *scores[2];          /* [n] with ReLU, linear */
    unsigned char *selected[2]; /* [n] for either form of scores; the dump's list where it has one */
    int64_t n_selected[2];
    int64_t *list; /* [K] */
    double largest_logit, largest_score, largest_dot;
    double *a[8]; /* [n] scratch */
    double *x[4]; /* [the longest row] scratch */
    double *heads;
    void *block;
} judge_row;

bool judge_open(judge *j, const cg_dump *d, const cg_verdict_options *o, cg_verdict *v, cg_error *error);
void judge_close(judge *j);

bool judge_row_new(const judge *j, judge_row *r);
void judge_row_free(judge_row *r);

/* The facts of row t; logits and index scores where the dump has what they need. */
void judge_row_place(const judge *j, judge_row *r, int64_t t);
void judge_row_scores(const judge *j, judge_row *r);    /* dots, scores, selected */
void judge_row_attention(const judge *j, judge_row *r); /* logits, window */

cg_contract_row judge_contract_row(const judge *j, const judge_row *r, int scores);

/* What float arithmetic may change in the row's logits, scores and dots, given the rounding of a quantity. */
double judge_logit_noise(const judge *j, const judge_row *r, double rounding);
double judge_score_noise(const judge *j, const judge_row *r, double rounding);
double judge_dot_noise(const judge *j, const judge_row *r, double rounding);

/* What is lost below the normal numbers of the type: frameworks flush it to 0. */
double judge_floor(double rounding);

/* Compare n elements of row t: unit[i] is the expected rounding of element i; per_head elements belong to a head (0:
 * none has one). True: no difference. */
bool judge_same(const judge *j, int64_t n, const double *got, const double *want, const double *unit);
void judge_compare(const judge *j, judge_stat *stat, int64_t segment, int64_t position, int64_t t, int64_t n,
                   int64_t per_head, const double *got, const double *want, const double *unit);

void judge_stat_init(judge_stat *stats, int n);
void judge_stat_merge(judge_stat *to, const judge_stat *from, int n_worst);

/* Add a quantity to the verdict. */
cg_quantity *judge_add(judge *j, const char *name, cg_dump_id id, const judge_stat *stat);

void judge_note(judge *j, const char *format, ...) __attribute__((format(printf, 2, 3)));
void judge_fault(judge *j, const char *name);

/* The parts. */
bool judge_selection(judge *j, cg_error *error);
bool judge_attention(judge *j, cg_error *error);
bool judge_loss(judge *j, const cg_contract *expected, cg_error *error);

#endif
