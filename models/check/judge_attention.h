/* Inside of judge_attention.c, which computes, and judge_attention_say.c, which decides and makes words of
 * it. */
#ifndef CG_MODELS_JUDGE_ATTENTION_H
#define CG_MODELS_JUDGE_ATTENTION_H

#include "models/check/judge.h"

/* Readings of attention: the right one, and known mistakes. */
typedef enum variant {
    V_RIGHT,
    V_NO_SINK,
    V_NO_WINDOW,
    V_NO_COMPRESSED,
    V_ALL_VISIBLE,
    V_UNSEEN,
    V_WINDOW_SHORT,
    V_WINDOW_LONG,
    V_MINUS_ONE_LAST,
    V_MINUS_ONE_FIRST,
    V_NO_OFFSET,
    V_SCALE,
    V_LSE_NO_SINK, /* of the backward alone */
    VARIANTS
} variant;

enum { A_OUTPUT, A_LSE, A_WINDOW_LSE, A_QUERY, A_KV, A_COMPRESSED, A_SINK, A_QUANTITIES };
typedef struct attended {
    const char *name;
    cg_dump_id id;
} attended;
extern const attended judge_attended[A_QUANTITIES];

/* An lse with or without the sink, natural or base 2. */
enum { LSE_FORMS = 4, FORM_PLAIN = 1, FORM_BASE_2 = 2 };

/* Beside one expectation: the stat, and the rows where it and what was expected first are apart at each
 * level. */
typedef struct trial {
    judge_stat stat;
    int64_t apart[JUDGE_LEVELS];
} trial;

/* What variants are held against. */
enum { TRY_OUTPUT, TRY_QUERY, TRY_LSE, TRIES = TRY_LSE + LSE_FORMS };

typedef struct setting {
    judge *j;
    bool has[A_QUANTITIES], grads;
    cg_dump_id list;      /* whose list attention follows; CG_DUMP_ARRAYS: the selection of the scores */
    int64_t width;        /* of it */
    bool once;            /* a key that is listed twice counts once */
    double factor;        /* of V_SCALE */
    bool tries[TRIES];    /* which answers variants are looked for */
    unsigned forms[2];    /* bits: forms that lse and non_compressed_lse may have */
    double *k_largest[2]; /* largest magnitude of each kv, each compressed row */
} setting;

/* Sums over the rows of a chunk: of kv only the rows that its windows reach. */
enum { SUM_NOISE = 3 }; /* numbers for each of *_noise, squares and a count */
typedef struct sums {
    double *kv[2], *kv_noise;               /* value role, key role [rows + W, D] */
    double *ckv[2], *ckv_noise;             /* [keys, D] */
    double *sink, *sink_noise, *sink_other; /* [H]; other: from the output without the sink */
    int64_t first;                          /* kv row of place 0 */
} sums;

/* All rows under one reading. */
typedef struct result {
    judge_stat stats[A_QUANTITIES];
    judge_outcome outcome[A_QUANTITIES];
    judge_level level[A_QUANTITIES];
    trial form[2][LSE_FORMS];
    int chosen[2]; /* forms of lse and non_compressed_lse */
    bool form_shows[2];
    int64_t lse_rows[2];
    sums total;
} result;

/* Rows under variants. */
typedef struct attempts {
    trial tried[VARIANTS][TRIES];
    int64_t rows[TRIES];
} attempts;

/* All answers beside what a reading gives; freed by judge_under_free. False: out of memory. */
bool judge_under(const setting *a, variant v, result *to);
void judge_under_free(result *r);

/* All rows under every variant, for the tries that are set. */
bool judge_try_variants(const setting *a, attempts *to);

/* The answer of a try. */
cg_dump_id judge_id_of_try(int t);

/* The factor of the scale that fits a sample of rows best, into a->factor. */
bool judge_find_scale(setting *a);

/* Rows of a key gradient beside its sum, or beside that of one role: 0 value, 1 key, 2 both. Returns how
 * many are not 0. buffer: 4 D numbers. */
int64_t judge_compare_keys(const setting *a, const sums *s, int which, int role, trial *to, double *buffer);

/* The gradient of the sink beside one that is wanted. buffer: 2 H numbers. */
void judge_compare_sink(const setting *a, const sums *s, const double *want, judge_stat *to, double *buffer);

#endif
