/* Inside of models/check/verdict.h: what judging the loss, the selection and the attention share. */
#ifndef CG_MODELS_JUDGE_H
#define CG_MODELS_JUDGE_H

#include "models/check/verdict.h"

/* Pieces of the rows, striped; sums over them are added in order, so that results do not depend on threads. */
enum { JUDGE_CHUNKS = 8 };

/* What an answer may have been computed in. Units of expected rounding are those of one of these levels; what the
 * stored type rounds away comes on top, and is the answer's own. */
typedef enum judge_level { JUDGE_F64, JUDGE_F32, JUDGE_F16, JUDGE_BF16, JUDGE_LEVELS } judge_level;
extern const double judge_rounding[JUDGE_LEVELS]; /* 2^-53, 2^-24, 2^-11 (tf32 too), 2^-9 */
extern const char *const judge_level_name[JUDGE_LEVELS];

/* The factors by which all elements are those expected, at one level: an interval, empty where lo > hi. */
typedef struct judge_factor {
    double lo, hi;
    int64_t n;    /* elements large enough to say something */
    int64_t off;  /* those of them that exclude 1 */
    double other; /* the largest of the rest, in units: must be small beside the factor */
} judge_factor;

/* Errors of one quantity, in one chunk. From the answer's own level on, coarser levels beside it. */
typedef struct judge_stat {
    double max_error, max_want, worst_units[JUDGE_LEVELS];
    judge_factor factor[JUDGE_LEVELS];
    /* at the answer's own level: rows with an element above its rounding; those that differ; those whose elements could
     * show a common factor; those of them that differ by more than one */
    int64_t rows, beyond, free_rows, free_beyond;
    int64_t
        excused; /* rows of `beyond` that coarse rounding alone does not explain, but the other side of a corner */
    double row_lo, row_hi; /* the factors of rows that differ by one */
    int64_t first_row;     /* -1: none differs */
    cg_difference first, worst[CG_WORST_ROWS];
    int n_worst;
} judge_stat;

/* How a quantity stands beside one expectation. */
typedef enum judge_outcome {
    JUDGE_SAME,   /* as expected, at `level` */
    JUDGE_UNSURE, /* coarser arithmetic would explain it, but nothing shows that there was any */
    JUDGE_OTHER   /* it differs */
} judge_outcome;

typedef struct judge {
    const cg_dump *d;
    cg_verdict *v;
    double allowed;   /* units of expected rounding that are no difference */
    double tolerance; /* or 0 */
    int n_worst;
    double stored[CG_DUMP_ARRAYS];   /* rounding of each tensor's numbers */
    judge_level own[CG_DUMP_ARRAYS]; /* the finest arithmetic that an answer is held against */
    judge_level
        free[CG_DUMP_ARRAYS]; /* the coarsest that needs no evidence: what its inputs and its type have */
    judge_level level[CG_DUMP_ARRAYS]; /* the one in force where contracts are looked for */
    judge_level ceiling;   /* coarser than this is not thought of: a contract explains the numbers without */
    double scale;          /* softmax_scale, times the factor that was found, if any */
    double weights_factor; /* what the dump's head weights are multiplied by, likewise: 1 */

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
    bool unclear;  /* without a list: coarser arithmetic may select other keys */
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

/* What arithmetic in f32 changes in the row's logits, scores and dots. Noise is always that of f32: what is computed
 * coarser has judge_rounding[level] / judge_rounding[JUDGE_F32] times as much. */
double judge_logit_noise(const judge *j, const judge_row *r);
double judge_score_noise(const judge *j, const judge_row *r);
double judge_dot_noise(const judge *j, const judge_row *r);

/* What is lost below the normal numbers of the type: frameworks flush it to 0. */
double judge_floor(double stored);

/* Unit of expected rounding of an element of tensor id at a level. noise 0: exactly `want` is expected. Coarser than
 * f32, three eighths of the worst are expected: such products are summed in f32, where their rounding averages out;
 * finer, four times: functions are not exact to the last bit. */
double judge_unit(const judge *j, cg_dump_id id, judge_level level, double want, double noise);

/* Compare n elements of row t of a tensor with what is wanted; noise[i] as above. per_head elements belong to a head
 * (0: none has one). kink[i], or NULL: what arithmetic coarser than f32 may change besides, on the other side of a
 * ReLU's corner. independent: how many numbers the elements are made of; a factor of one number says nothing.
 * judge_same: no difference at the level in force. */
bool judge_same(const judge *j, cg_dump_id id, int64_t n, const double *got, const double *want,
                const double *noise);
void judge_compare(const judge *j, cg_dump_id id, judge_stat *stat, int64_t segment, int64_t position,
                   int64_t t, int64_t n, int64_t per_head, const double *got, const double *want,
                   const double *noise, const double *kink, int64_t independent);

void judge_stat_init(judge_stat *stats, int n);
void judge_stat_merge(judge_stat *to, const judge_stat *from, int n_worst);

/* The stat of a tensor, judged: level is the finest that explains it. Coarser arithmetic than `free` is believed where it
 * shows: in many rows, and not as a factor. A row among exact ones that is off by as much is wrong. */
judge_outcome judge_outcome_of(const judge *j, cg_dump_id id, const judge_stat *stat, judge_level *level);

/* One factor for all stats of a group, at the finest level that has one; false: there is none, or it is 1. The value is
 * the simplest number in the interval: 0.25 and not 0.25000012. */
bool judge_factor_of(const judge *j, const judge_stat *const *stats, const cg_dump_id *ids, int n,
                     double *factor);
double judge_simplest(double lo, double hi);

/* Add a quantity to the verdict, judged. judge_add_unjudged: an answer that the dump lacks inputs for. */
cg_quantity *judge_add(judge *j, const char *name, cg_dump_id id, const judge_stat *stat);
cg_quantity *judge_add_unjudged(judge *j, const char *name, cg_dump_id id, const char *lacks);

void judge_note(judge *j, const char *format, ...) __attribute__((format(printf, 2, 3)));
void judge_fault(judge *j, const char *name);

/* The parts. */
bool judge_selection(judge *j, cg_error *error);
bool judge_attention(judge *j, cg_error *error);
bool judge_loss(judge *j, const cg_contract *expected, cg_error *error);

#endif
