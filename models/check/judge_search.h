/* Inside of judge_loss.c: which combinations give the numbers of the rows, and how the dump stands beside one of them. */
#ifndef CG_MODELS_JUDGE_SEARCH_H
#define CG_MODELS_JUDGE_SEARCH_H

#include "models/check/judge.h"

enum {
    TEACHERS = 4,
    SUPPORTS = 3, /* sparse, dense, dense over the sparse denominator */
    NORMALISES = 3,
    HEADS = 5,
    TARGETS = TEACHERS * SUPPORTS * NORMALISES * HEADS * 2,
    KLS = 5,
    FORMS = 2,   /* of scores */
    WEIGHTS = 2, /* of rows */
    VALUES = TARGETS * KLS * FORMS * WEIGHTS,
    SLOPES = 3, /* derivatives: exact, eps, clamp-tiny */
    EXTRAS = 4, /* predict-minus-target, relu-leak */
    SLOPES_OF_TARGET = SLOPES * FORMS * WEIGHTS * EXTRAS,
    GRADS = TARGETS * SLOPES_OF_TARGET,
    REDUCTIONS = 6,
    FACTORS = REDUCTIONS * 3 * 2, /* coefficient, sign */
    ZERO_FACTOR = FACTORS,
    LISTED = 512, /* contracts whose loss is summed */
    SAMPLE = 48,
    MEASURED = 6 /* rows that the nearest contract is looked for on */
};
#define DIRECTION (UINT64_C(1) << 63)
#define ALL_FACTORS ((UINT64_C(1) << (FACTORS + 1)) - 1)

typedef struct target_key {
    int teacher, support, normalise, heads, underflow;
} target_key;

static inline target_key key_of(int t) {
    target_key k;
    k.underflow = t % 2, t /= 2;
    k.heads = t % HEADS, t /= HEADS;
    k.normalise = t % NORMALISES, t /= NORMALISES;
    k.support = t % SUPPORTS;
    k.teacher = t / SUPPORTS;
    return k;
}

static inline int number_of(target_key k) {
    return (((k.teacher * SUPPORTS + k.support) * NORMALISES + k.normalise) * HEADS + k.heads) * 2 +
           k.underflow;
}

static inline cg_contract contract_of(int t, int kl, int form, int weight) {
    const target_key k = key_of(t);
    cg_contract c = cg_contract_default();
    c.value[CG_AXIS_TEACHER] = k.teacher;
    c.value[CG_AXIS_SUPPORT] = k.support ? CG_SUPPORT_IS_DENSE : CG_SUPPORT_IS_SPARSE;
    c.value[CG_AXIS_NORMALISE] = k.normalise;
    c.value[CG_AXIS_HEADS] = k.heads;
    c.value[CG_AXIS_KL] = kl;
    c.value[CG_AXIS_SCORES] = form;
    c.value[CG_AXIS_ROW_WEIGHT] = weight;
    if (k.support == 2) c.faults |= CG_FAULT_DENSE_OVER_SPARSE_LSE;
    if (k.underflow) c.faults |= CG_FAULT_TEACHER_UNDERFLOW;
    return c;
}

static inline int target_of(const cg_contract *c) {
    const bool dense = c->value[CG_AXIS_SUPPORT] == CG_SUPPORT_IS_DENSE;
    return number_of((target_key){
        c->value[CG_AXIS_TEACHER], dense ? (c->faults & CG_FAULT_DENSE_OVER_SPARSE_LSE ? 2 : 1) : 0,
        c->value[CG_AXIS_NORMALISE], c->value[CG_AXIS_HEADS], (c->faults & CG_FAULT_TEACHER_UNDERFLOW) != 0});
}

static inline int value_number(int t, int kl, int form, int weight) {
    return ((t * KLS + kl) * FORMS + form) * WEIGHTS + weight;
}
static inline int grad_number(int t, int slope, int form, int weight, int extra) {
    return (((t * SLOPES + slope) * FORMS + form) * WEIGHTS + weight) * EXTRAS + extra;
}
static inline int slope_of(int kl) { return kl == CG_KL_IS_EPS ? 1 : kl == CG_KL_IS_CLAMP_TINY ? 2 : 0; }
static inline int kl_of_slope(int slope) {
    return slope == 1 ? CG_KL_IS_EPS : slope == 2 ? CG_KL_IS_CLAMP_TINY : CG_KL_IS_EXACT;
}

/* The contract of a gradient but for its factor. */
static inline cg_contract gradient_contract(int t, int slope, int form, int weight, int extra) {
    cg_contract c = contract_of(t, kl_of_slope(slope), form, weight);
    if (extra & 1) c.faults |= CG_FAULT_PREDICT_MINUS_TARGET;
    if (extra & 2) c.faults |= CG_FAULT_RELU_LEAK;
    return c;
}

static inline cg_contract with_factor(cg_contract c, int f) {
    if (f == ZERO_FACTOR) {
        c.faults |= CG_FAULT_GRADIENT_ZERO;
        return c;
    }
    c.value[CG_AXIS_REDUCTION] = f / 6;
    if (f / 2 % 3 == 1) c.faults |= CG_FAULT_COEFF_MISSING;
    if (f / 2 % 3 == 2) c.faults |= CG_FAULT_COEFF_TWICE;
    if (f % 2) c.faults |= CG_FAULT_GRADIENT_SIGN;
    return c;
}

/* ---- what is still possible ---- */

typedef struct tables {
    unsigned char target[TARGETS * FORMS], predict[2][FORMS], kl[VALUES];
    uint64_t grad[GRADS]; /* bits: factors; DIRECTION: fits up to some factor of the row */
} tables;

/* Sums over rows: of kl over real rows, of its variance, over padding, of kl / real rows of the segment, and the
 * variance of that. */
typedef struct loss_sums {
    double sum, noise, padding, of_means, noise_of_means;
    double unclear; /* INFINITY where coarser arithmetic may have selected other keys in some row */
} loss_sums;

/* ... for one listed contract. */
typedef struct listed {
    int target, kl, form, weight;
    loss_sums sums;
    unsigned char fits[REDUCTIONS * 3 * 2 * 2]; /* the dump's loss, with each factor of judge_loss.c */
} listed;

enum { Q_TARGET, Q_LOG_PREDICT, Q_PREDICT, Q_KL, Q_LOSS, Q_GRAD_Q, Q_GRAD_W, Q_GRAD_K, QUANTITIES };
typedef struct quantity_name {
    const char *name;
    cg_dump_id id;
} quantity_name;
extern const quantity_name judge_quantity[QUANTITIES];

typedef struct search {
    judge *j;
    cg_contract expected;
    bool has[QUANTITIES], has_value, has_grad;
    bool coarser; /* arithmetic coarser than f32 is thought of */
    bool coarse;  /* no quantity is stored finer than f32 */
    tables *start;
    listed list[LISTED];
    int n_list, first_listed[TARGETS + 1]; /* the list is sorted by target */
    double loss;                           /* the dump's */
    double gradient_factor; /* 1; what all gradients have beside those of their contract, once found */
} search;

/* What a quantity says for one contract and against another: rows in which they lie apart by more than both their
 * roundings, the independent numbers in those, and how improbable it is that they fit by chance, in bits. */
typedef struct telling {
    int64_t rows, numbers;
    double bits;
} telling;

/* The dump beside one contract for values and one for gradients. */
typedef struct compared {
    cg_contract value, gradient;
    judge_stat stats[QUANTITIES];
    telling tells[QUANTITIES]; /* against `than` of judge_search_compare */
    int64_t numbers;           /* independent numbers that the quantities hold in all */
    loss_sums sums;
    int64_t padding_value, padding_grad; /* padding rows that hold something */
    int64_t empty_value, empty_grad;     /* real rows that see no key and hold something, NaN too */
} compared;

bool judge_usable(const search *s,
                  int target);    /* the dump has what its denominator needs, and heads to share out */
bool judge_weighable(int target); /* the weight of rows can differ from 1 */

/* Everything is possible again; with `near`, targets that are at most one change from the expected one. */
void judge_search_reset(search *s, bool near);

/* The rows of a sample: spread out, and the last one with keys among them. One after the other: each drops what the
 * next need not look at. With `distance` [TARGETS], nothing is dropped: how far targets are, over a few rows. */
bool judge_search_sample(search *s, double *distance, int *n_measured);

/* Every row: what is left of the tables, sums of the listed losses. */
bool judge_search_all(search *s);

/* Beside value and gradient in *out; `than`: what tells holds them against, NULL: nothing. free_factor: gradients may
 * have a common factor, and tell only what that leaves. False: out of memory. */
bool judge_search_compare(const search *s, const compared *than, bool free_factor, compared *out);

/* The loss that the sums give, and what rounding changes in it. */
double judge_loss_of(const search *s, const loss_sums *sums, const cg_contract *c);
double judge_loss_noise(const search *s, const loss_sums *sums, const cg_contract *c);

#endif
