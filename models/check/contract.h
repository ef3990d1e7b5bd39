/* Contracts of the indexer loss: the axes along which implementations differ, each value with a name, and one row
 * of the loss under any of them, in plain f64.
 *
 *   c[h,j]      logits of the compressed keys, h < H, j < N       I[j]  index scores
 *   Z[h]        = E[h] + sum over the support of exp(c[h,j]);     E[h]: what `teacher` lets stand beside them
 *   target[j]   = sum_h exp(c[h,j]) / Z[h] over `heads`, then divided once by its sum (`normalise`)
 *   kl          = sum_j target[j] (log target[j] - log softmax(I)[j]), with the epsilons of `kl`, times the row's weight
 *   weight      = 1, or the row's compressed mass: mean over heads of sum_j exp(c[h,j]) / Z[h] (`row-weight`)
 *   loss        = coeff * sum of kl / divisor (`reduction`)
 *   dI[j]       = the derivative of kl, or what the contract uses in its place; target and weight are constants
 *
 * Value and gradient of one implementation may follow two contracts. The default is what the ops compute.
 * The same functions serve csagrad check, check --row, csagrad dump and the tests. */
#ifndef CG_MODELS_CONTRACT_H
#define CG_MODELS_CONTRACT_H

#include <stddef.h>
#include <stdint.h>

#include "core/base/error.h"

typedef enum cg_axis {
    CG_AXIS_TEACHER,
    CG_AXIS_SUPPORT,
    CG_AXIS_KL,
    CG_AXIS_NORMALISE,
    CG_AXIS_REDUCTION,
    CG_AXIS_SCORES,
    CG_AXIS_HEADS,
    CG_AXIS_ROW_WEIGHT,
    CG_AXES
} cg_axis;

/* Values of the axes, the default first. The name of each is in cg_axis_values. */
/* teacher: beside the compressed keys in each head's denominator */
enum {
    CG_TEACHER_IS_FULL,       /* "full": window and sink */
    CG_TEACHER_IS_SINK,       /* "sink": the sink alone */
    CG_TEACHER_IS_COMPRESSED, /* "compressed": nothing */
    CG_TEACHER_IS_WINDOW      /* "window", a fault: the sink is missing */
};
/* support: the keys of target and prediction */
enum { CG_SUPPORT_IS_SPARSE, CG_SUPPORT_IS_DENSE };
/* kl */
enum {
    CG_KL_IS_EXACT,
    CG_KL_IS_TARGET_FLOOR, /* "target-floor": log max(t, 1e-10) - log p; gradient exact */
    CG_KL_IS_EPS,          /* "eps": log(t + 1e-10) - log(p + 1e-10), gradient of that */
    CG_KL_IS_CLAMP_TINY,   /* "clamp-tiny": log max(t, FLT_MIN) - log max(p, FLT_MIN), gradient of that */
    CG_KL_IS_EPS_VALUE_EXACT_GRAD /* "eps-value-exact-grad": value of eps, gradient of exact */
};
/* normalise: what the target's masses are divided by */
enum {
    CG_NORMALISE_IS_EXACT,
    CG_NORMALISE_IS_FLOOR_1E_10, /* "floor-1e-10": max(sum, 1e-10) */
    CG_NORMALISE_IS_FLOOR_TINY   /* "floor-tiny": max(sum, FLT_MIN) */
};
/* reduction: the divisor */
enum {
    CG_REDUCTION_IS_MEAN_REAL,     /* "mean-real": real rows, those that see nothing included */
    CG_REDUCTION_IS_MEAN_PHYSICAL, /* "mean-physical": all rows */
    CG_REDUCTION_IS_SUM,           /* "sum": 1 */
    CG_REDUCTION_IS_MEAN_VISIBLE,  /* "mean-visible", a fault: real rows that see a compressed key */
    CG_REDUCTION_IS_MEAN_TWICE,    /* "mean-twice", a fault: real rows times all rows */
    CG_REDUCTION_IS_MEAN_OF_MEANS  /* "mean-of-means", a fault: mean over segments of each one's mean */
};
/* scores */
enum { CG_SCORES_ARE_RELU, CG_SCORES_ARE_LINEAR };
/* heads: which ones the teacher sums, and how */
enum {
    CG_HEADS_ARE_ALL,
    CG_HEADS_ARE_FIRST_HALF,         /* "first-half", a fault: rank 0 of two */
    CG_HEADS_ARE_SECOND_HALF,        /* "second-half", a fault */
    CG_HEADS_ARE_LOCAL_NORMALISED_2, /* "local-normalised-2", a fault: each half a distribution, then averaged */
    CG_HEADS_ARE_LOCAL_NORMALISED_4  /* "local-normalised-4", a fault */
};

/* row-weight: what each row's kl counts */
enum { CG_ROWS_ARE_EQUAL, CG_ROWS_ARE_COMPRESSED_MASS /* "compressed-mass" */ };

/* Known faults beside the axes, as bits. */
typedef enum cg_fault {
    CG_FAULT_DENSE_OVER_SPARSE_LSE = 1 << 0, /* support dense: denominators hold the selected keys alone */
    CG_FAULT_TEACHER_UNDERFLOW = 1 << 1, /* exp(c - log Z) in f32 before the division: tiny masses are lost */
    CG_FAULT_PADDING_IN_LOSS = 1 << 2,   /* padding rows add their kl (the caller evaluates them) */
    CG_FAULT_LOSS_TWICE = 1 << 3,        /* the value is recorded twice, the gradient is right */
    CG_FAULT_COEFF_MISSING = 1 << 4,     /* loss_coeff left out: value and gradient */
    CG_FAULT_COEFF_TWICE = 1 << 5,       /* loss_coeff applied twice */
    CG_FAULT_PREDICT_MINUS_TARGET = 1 << 6, /* dI = p - t although the target does not sum to 1 */
    CG_FAULT_GRADIENT_SIGN = 1 << 7,        /* gradients of the opposite sign */
    CG_FAULT_GRADIENT_ZERO = 1 << 8,        /* no gradient reaches the indexer */
    CG_FAULT_RELU_LEAK = 1 << 9             /* gradient passes heads whose ReLU is 0 */
} cg_fault;

enum { CG_FAULTS = 10 };

typedef struct cg_contract {
    int value[CG_AXES];
    unsigned faults;
} cg_contract;

/* What the engine's ops compute: value 0 on each axis, no fault. */
cg_contract cg_contract_default(void);

extern const char *const cg_axis_names[CG_AXES + 1]; /* "teacher", ..., NULL */

/* Names of an axis's values, then NULL; their number. */
const char *const *cg_axis_values(cg_axis axis);
int cg_axis_count(cg_axis axis);

/* True for a value that no framework means: it counts among the faults in a verdict. */
bool cg_axis_value_is_fault(cg_axis axis, int value);

/* Name of the fault bit 1 << i, and what it says in a sentence ("dead ReLUs pass gradient"). */
const char *cg_fault_name(int i);
const char *cg_fault_says(int i);

/* "teacher=compressed,kl=eps,fault=relu-leak" over the default; "" is the default. An unknown axis, value or fault
 * is refused with the nearest known word. */
bool cg_contract_parse(const char *text, cg_contract *contract, cg_error *error);

/* The same over what *contract holds: an axis that the text does not name stays. */
bool cg_contract_parse_over(const char *text, cg_contract *contract, cg_error *error);

enum { CG_CONTRACT_TEXT = 512 };

/* The same form back, all axes. Returns text. */
const char *cg_contract_text(const cg_contract *contract, char *text, size_t text_bytes);

/* ---- one row ---- */

/* The keys are those that the row sees, or a superset of its support; -inf logits are allowed, NaN comes through. */
typedef struct cg_contract_row {
    int64_t n_heads, n_keys;
    const double *logits;        /* [H, N]; softmax_scale is in them */
    const double *window_lse;    /* [H] log sum exp of the window's logits, WITHOUT the sink; NULL: no window */
    const double *sink;          /* [H]; NULL: no sink */
    const double *scores;        /* [N] with ReLU */
    const double *linear_scores; /* [N] without; NULL: as scores */
    const unsigned char *selected; /* [N] 1: selected; NULL: all */
    const double *given_target;    /* [N] taken in place of the teacher's; NULL: computed */
    /* For a caller that evaluates many contracts: [H] the largest logit, [H, N] exp(logit - largest). NULL: formed. */
    const double *max, *exps;
} cg_contract_row;

/* target, log_predict, dscores [N]: 0 off the support. dscores is not scaled by coeff or divisor. kl [1]. All but
 * target may be NULL. scratch [H]. A row without support gives 0 everywhere. Allocates nothing. */
void cg_contract_row_eval(const cg_contract *contract, const cg_contract_row *row, double *target,
                          double *log_predict, double *dscores, double *kl, double *scratch);

/* Its parts: the target; log softmax of the scores over the support (false: the support is empty); kl and dscores from
 * both, without the row's weight, which stands apart. */
void cg_contract_target(const cg_contract *contract, const cg_contract_row *row, double *target,
                        double *scratch);
bool cg_contract_log_predict(const cg_contract *contract, const cg_contract_row *row, double *log_predict);
double cg_contract_kl(const cg_contract *contract, const cg_contract_row *row, const double *target,
                      const double *log_predict);
void cg_contract_dscores(const cg_contract *contract, const cg_contract_row *row, const double *target,
                         const double *log_predict, double *dscores); /* dscores may be log_predict */
double cg_contract_row_weight(const cg_contract *contract, const cg_contract_row *row);

/* ---- from rows to the loss ---- */

typedef struct cg_contract_counts {
    int64_t physical; /* all rows */
    int64_t real;
    int64_t visible;  /* real rows that see a compressed key */
    int64_t segments; /* with at least one real row */
} cg_contract_counts;

/* What the kl of a row is multiplied by in the loss, its dscores in the gradient. segment_real: real rows of the
 * row's segment (0 for padding outside any). */
double cg_contract_value_factor(const cg_contract *contract, const cg_contract_counts *counts, double coeff,
                                int64_t segment_real);
double cg_contract_grad_factor(const cg_contract *contract, const cg_contract_counts *counts, double coeff,
                               int64_t segment_real);

/* The indexer's gradients of one row from dscores [N], already scaled: dots [Hi, N] = q.k; key j is row keys[j] of k
 * and dk (keys NULL: j). dw [Hi] and dq [Hi, Di] are written, dk [C, Di] is added to. dw, dq, dk may be NULL.
 * Keys with dscores 0 are skipped: their rows are not read. */
typedef struct cg_contract_index {
    int64_t n_heads, head_dim, n_keys;
    const double *q, *w, *dots, *k; /* [Hi, Di], [Hi], [Hi, N], [C, Di] */
    const int32_t *keys;            /* [N] */
} cg_contract_index;

void cg_contract_index_grad(const cg_contract *contract, const cg_contract_index *index, const double *dscores,
                            double *dw, double *dq, double *dk);

#endif
