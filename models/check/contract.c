#include "models/check/contract.h"

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "core/base/suggest.h"

/* ---- names ---- */

const char *const cg_axis_names[CG_AXES + 1] = {"teacher", "support", "kl",         "normalise", "reduction",
                                                "scores",  "heads",   "row-weight", NULL};

static const char *const teachers[] = {"full", "sink", "compressed", "window", NULL};
static const char *const supports[] = {"sparse", "dense", NULL};
static const char *const kls[] = {"exact", "target-floor", "eps", "clamp-tiny", "eps-value-exact-grad", NULL};
static const char *const normalises[] = {"exact", "floor-1e-10", "floor-tiny", NULL};
static const char *const reductions[] = {"mean-real",  "mean-physical", "sum", "mean-visible",
                                         "mean-twice", "mean-of-means", NULL};
static const char *const scores_forms[] = {"relu", "linear", NULL};
static const char *const head_sets[] = {
    "all", "first-half", "second-half", "local-normalised-2", "local-normalised-4", NULL};

static const char *const row_weights[] = {"equal", "compressed-mass", NULL};

static const char *const *const value_names[CG_AXES] = {teachers,   supports,     kls,       normalises,
                                                        reductions, scores_forms, head_sets, row_weights};

static const struct {
    const char *name, *says;
} faults[CG_FAULTS] = {
    {"dense-over-sparse-lse", "the dense numerators stand over a denominator of the selected keys alone"},
    {"teacher-f32-underflow",
     "exp(logit - lse) is formed in float32 before it is normalised, and small masses are lost"},
    {"padding-in-loss", "padding rows add their loss"},
    {"loss-twice", "the loss is recorded twice"},
    {"coeff-missing", "loss_coeff is not applied"},
    {"coeff-twice", "loss_coeff is applied twice"},
    {"predict-minus-target", "the score gradient is predict - target although the target does not sum to 1"},
    {"gradient-sign", "the gradients have the opposite sign"},
    {"gradient-zero", "no gradient reaches the indexer"},
    {"relu-leak", "gradient passes index heads whose ReLU is 0"},
};

cg_contract cg_contract_default(void) { return (cg_contract){0}; }

const char *const *cg_axis_values(cg_axis axis) { return value_names[axis]; }

int cg_axis_count(cg_axis axis) {
    int n = 0;
    while (value_names[axis][n]) n++;
    return n;
}

bool cg_axis_value_is_fault(cg_axis axis, int value) {
    switch (axis) {
    case CG_AXIS_TEACHER:
        return value == CG_TEACHER_IS_WINDOW;
    case CG_AXIS_REDUCTION:
        return value >= CG_REDUCTION_IS_MEAN_VISIBLE;
    case CG_AXIS_HEADS:
        return value != CG_HEADS_ARE_ALL;
    default:
        return false;
    }
}

const char *cg_fault_name(int i) { return faults[i].name; }
const char *cg_fault_says(int i) { return faults[i].says; }

/* Place of a word of `length` letters among n names, or -1 with a sentence. */
static int find(const char *what, const char *word, size_t length, const char *const *names, int n,
                cg_error *error) {
    char copy[128];
    for (int i = 0; i < n; i++)
        if (strlen(names[i]) == length && !memcmp(names[i], word, length)) return i;
    snprintf(copy, sizeof copy, "%.*s", (int)(length < 100 ? length : 100), word);
    const char *near = cg_suggest(copy, names, n);
    char all[256] = "";
    for (int i = 0; i < n && !near; i++)
        snprintf(all + strlen(all), sizeof all - strlen(all), "%s%s", i ? ", " : ", use one of ", names[i]);
    cg_fail(error, CG_BAD_INPUT, "contract: unknown %s \"%s\"%s%s%s", what, copy,
            near ? ", did you mean " : all, near ? near : "", near ? "?" : "");
    return -1;
}

bool cg_contract_parse(const char *text, cg_contract *contract, cg_error *error) {
    *contract = cg_contract_default();
    return cg_contract_parse_over(text, contract, error);
}

bool cg_contract_parse_over(const char *text, cg_contract *contract, cg_error *error) {
    const char *keys[CG_AXES + 1], *fault_names[CG_FAULTS];
    unsigned given = 0;
    for (int a = 0; a < CG_AXES; a++) keys[a] = cg_axis_names[a];
    keys[CG_AXES] = "fault";
    for (int f = 0; f < CG_FAULTS; f++) fault_names[f] = faults[f].name;
    while (*text) {
        const size_t length = strcspn(text, ","), key_length = strcspn(text, "=,");
        if (key_length == length)
            return cg_fail(error, CG_BAD_INPUT, "contract: expected axis=value, got \"%.*s\"",
                           (int)(length < 100 ? length : 100), text);
        const int key = find("axis", text, key_length, keys, CG_AXES + 1, error);
        if (key < 0) return false;
        const char *word = text + key_length + 1;
        const size_t word_length = length - key_length - 1;
        if (key == CG_AXES) {
            const int fault = find("fault", word, word_length, fault_names, CG_FAULTS, error);
            if (fault < 0) return false;
            contract->faults |= 1u << fault;
        } else {
            if (given & (1u << key))
                return cg_fail(error, CG_BAD_INPUT, "contract: %s is given twice", keys[key]);
            given |= 1u << key;
            contract->value[key] =
                find(keys[key], word, word_length, value_names[key], cg_axis_count((cg_axis)key), error);
            if (contract->value[key] < 0) return false;
        }
        text += length;
        if (*text == ',' && !*++text)
            return cg_fail(error, CG_BAD_INPUT, "contract: nothing stands after the last comma");
    }
    return true;
}

const char *cg_contract_text(const cg_contract *contract, char *text, size_t text_bytes) {
    size_t at = 0;
    for (int a = 0; a < CG_AXES && at < text_bytes; a++)
        at += (size_t)snprintf(text + at, text_bytes - at, "%s%s=%s", a ? "," : "", cg_axis_names[a],
                               value_names[a][contract->value[a]]);
    for (int f = 0; f < CG_FAULTS && at < text_bytes; f++)
        if (contract->faults & (1u << f))
            at += (size_t)snprintf(text + at, text_bytes - at, ",fault=%s", faults[f].name);
    return text;
}

/* ---- the teacher of one row ---- */

static double log_add(double a, double b) {
    const double max = a > b ? a : b;
    return max == -INFINITY ? max : max + log(exp(a - max) + exp(b - max));
}

/* Log of what stands beside the compressed keys in the denominator of head h. */
static double beside(const cg_contract *c, const cg_contract_row *row, int64_t h) {
    const double window = row->window_lse ? row->window_lse[h] : -INFINITY;
    const double sink = row->sink ? row->sink[h] : -INFINITY;
    switch (c->value[CG_AXIS_TEACHER]) {
    case CG_TEACHER_IS_FULL:
        return log_add(window, sink);
    case CG_TEACHER_IS_SINK:
        return sink;
    case CG_TEACHER_IS_WINDOW:
        return window;
    default:
        return -INFINITY;
    }
}

/* The keys of the support, NULL: all. */
static const unsigned char *support(const cg_contract *c, const cg_contract_row *row) {
    return c->value[CG_AXIS_SUPPORT] == CG_SUPPORT_IS_DENSE ? NULL : row->selected;
}

static double log_floor(const cg_contract *c) {
    switch (c->value[CG_AXIS_NORMALISE]) {
    case CG_NORMALISE_IS_FLOOR_1E_10:
        return log(1e-10);
    case CG_NORMALISE_IS_FLOOR_TINY:
        return log((double)FLT_MIN);
    default:
        return -INFINITY;
    }
}

static double largest_of(const double *x, const unsigned char *set, int64_t n) {
    double max = -INFINITY;
    for (int64_t j = 0; j < n; j++)
        if ((!set || set[j]) && !(x[j] <= max)) max = x[j];
    return max;
}

static double sum_of(const double *x, const unsigned char *set, int64_t n) {
    double sum = 0;
    if (!set) {
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < n; j++) sum += x[j];
    } else {
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < n; j++) sum += set[j] ? x[j] : 0;
    }
    return sum;
}

/* exp(x) is lost below, where exp(x - its own largest) would not be. */
static const double lost = -600;

/* log of the sum of exp(logits) over a set. */
static double log_sum(const cg_contract_row *row, int64_t h, const unsigned char *set) {
    const int64_t n = row->n_keys;
    const double *logits = row->logits + h * n;
    if (row->exps) {
        const double sum = sum_of(row->exps + h * n, set, n);
        if (sum > exp(lost)) return row->max[h] + log(sum);
    }
    const double max = largest_of(logits, set, n);
    if (max == -INFINITY) return max;
    double sum = 0;
    for (int64_t j = 0; j < n; j++)
        if (!set || set[j]) sum += exp(logits[j] - max);
    return max + log(sum);
}

/* target += share * the normalised sum over the heads from first to before last. The masses are added below the
 * largest one: 1e-80 beside the window is exact. scratch: log Z of each head. */
static void add_heads(const cg_contract *c, const cg_contract_row *row, int64_t first, int64_t last,
                      double share, double *target, double *scratch) {
    const unsigned char *set = support(c, row);
    const unsigned char *below = c->faults & CG_FAULT_DENSE_OVER_SPARSE_LSE ? row->selected : set;
    const int64_t n = row->n_keys;
    double top = -INFINITY, total = 0;
    for (int64_t h = first; h < last; h++) {
        scratch[h] = log_add(beside(c, row, h), log_sum(row, h, below));
        const double largest = largest_of(row->logits + h * n, set, n) - scratch[h];
        if (!(largest <= top)) top = largest;
    }
    if (c->faults & CG_FAULT_TEACHER_UNDERFLOW) { /* the same in float, without the shift by `top` */
        const float least = (float)exp(log_floor(c));
        float sum = 0;
        for (int pass = 0; pass < 2; pass++)
            for (int64_t j = 0; j < n; j++) {
                float mass = 0;
                if (set && !set[j]) continue;
                for (int64_t h = first; h < last; h++)
                    mass += expf((float)row->logits[h * n + j] - (float)scratch[h]);
                if (pass == 0)
                    sum += mass;
                else
                    target[j] += share * (double)(mass / (sum < least ? least : sum));
            }
        return;
    }
    bool wide = row->exps != NULL; /* exp(logit - max) can be had for one head's factor */
    for (int64_t h = first; h < last && wide; h++) wide = row->max[h] - scratch[h] - top < -lost;
    for (int pass = 0; pass < 2; pass++) {
        /* divided by sum, or by the floor where the whole mass lies below it */
        const double least = log_floor(c);
        const double factor = pass == 0 ? 0 : top + log(total) < least ? exp(top - least) : 1 / total;
        double piece[128];
        for (int64_t from = 0; from < n; from += 128) {
            const int64_t m = n - from < 128 ? n - from : 128;
            for (int64_t j = 0; j < m; j++) piece[j] = 0;
            for (int64_t h = first; h < last; h++) {
                if (wide) {
                    const double *exps = row->exps + h * n + from, weight = exp(row->max[h] - scratch[h] - top);
                    for (int64_t j = 0; j < m; j++) piece[j] += weight * exps[j];
                } else {
                    const double *logits = row->logits + h * n + from;
                    for (int64_t j = 0; j < m; j++)
                        if (!set || set[from + j]) piece[j] += exp(logits[j] - scratch[h] - top);
                }
            }
            if (pass == 0)
                total += sum_of(piece, set ? set + from : NULL, m);
            else
                for (int64_t j = 0; j < m; j++)
                    if (!set || set[from + j]) target[from + j] += share * piece[j] * factor;
        }
    }
}

void cg_contract_target(const cg_contract *c, const cg_contract_row *row, double *target, double *scratch) {
    const int64_t n_heads = row->n_heads, half = (n_heads + 1) / 2, n = row->n_keys;
    const unsigned char *set = support(c, row);
    const int heads = c->value[CG_AXIS_HEADS];
    memset(target, 0, (size_t)n * sizeof *target);
    if (row->given_target) {
        for (int64_t j = 0; j < n; j++)
            if (!set || set[j]) target[j] = row->given_target[j];
    } else if (heads == CG_HEADS_ARE_FIRST_HALF) {
        add_heads(c, row, 0, half, 1, target, scratch);
    } else if (heads == CG_HEADS_ARE_SECOND_HALF) {
        add_heads(c, row, half < n_heads ? half : 0, n_heads, 1, target, scratch);
    } else if (heads == CG_HEADS_ARE_ALL) {
        add_heads(c, row, 0, n_heads, 1, target, scratch);
    } else {
        int64_t groups = heads == CG_HEADS_ARE_LOCAL_NORMALISED_2 ? 2 : 4;
        if (groups > n_heads) groups = n_heads;
        for (int64_t g = 0; g < groups; g++)
            add_heads(c, row, n_heads * g / groups, n_heads * (g + 1) / groups, 1 / (double)groups, target,
                      scratch);
    }
}

double cg_contract_row_weight(const cg_contract *c, const cg_contract_row *row) {
    if (c->value[CG_AXIS_ROW_WEIGHT] == CG_ROWS_ARE_EQUAL || row->given_target) return 1;
    const unsigned char *set = support(c, row);
    const unsigned char *below = c->faults & CG_FAULT_DENSE_OVER_SPARSE_LSE ? row->selected : set;
    double mass = 0;
    for (int64_t h = 0; h < row->n_heads; h++) {
        const double keys = log_sum(row, h, set);
        if (keys > -INFINITY) mass += exp(keys - log_add(beside(c, row, h), log_sum(row, h, below)));
    }
    return mass / (double)row->n_heads;
}

/* ---- one row ---- */

static const double *scores_of(const cg_contract *c, const cg_contract_row *row) {
    return c->value[CG_AXIS_SCORES] == CG_SCORES_ARE_LINEAR && row->linear_scores ? row->linear_scores
                                                                                  : row->scores;
}

/* max + log of the sum of exp(score - max); false: the support is empty. */
static bool log_partition(const double *scores, const unsigned char *set, int64_t n, double *max,
                          double *log_z) {
    double sum = 0;
    bool some = !set && n > 0;
    for (int64_t j = 0; j < n && !some; j++) some = set[j];
    *max = largest_of(scores, set, n);
    for (int64_t j = 0; j < n; j++)
        if (!set || set[j]) sum += exp(scores[j] - *max);
    *log_z = log(sum);
    return some;
}

bool cg_contract_log_predict(const cg_contract *c, const cg_contract_row *row, double *log_predict) {
    const unsigned char *set = support(c, row);
    const double *scores = scores_of(c, row);
    double max, log_z;
    const bool some = log_partition(scores, set, row->n_keys, &max, &log_z);
    for (int64_t j = 0; j < row->n_keys; j++) log_predict[j] = !set || set[j] ? scores[j] - max - log_z : 0;
    return some;
}

static const double eps = 1e-10;

/* target * (log target - log predict) of one key. */
static double kl_term(int kl, double target, double log_p) {
    const double tiny = (double)FLT_MIN;
    if (target == 0) return 0;
    switch (kl) {
    case CG_KL_IS_TARGET_FLOOR:
        return target * (log(target < eps ? eps : target) - log_p);
    case CG_KL_IS_EPS:
    case CG_KL_IS_EPS_VALUE_EXACT_GRAD:
        return target * (log(target + eps) - log(exp(log_p) + eps));
    case CG_KL_IS_CLAMP_TINY:
        return target * (log(target < tiny ? tiny : target) - (log_p < log(tiny) ? log(tiny) : log_p));
    default:
        return target * (log(target) - log_p);
    }
}

/* The share of d kl / d log p[j] that the clamp or epsilon leaves: -target[j] * share. */
static double share_of_log(int kl, double log_p) {
    if (kl == CG_KL_IS_EPS) { /* p / (p + eps) */
        const double p = exp(log_p);
        return p / (p + eps);
    }
    if (kl == CG_KL_IS_CLAMP_TINY) return log_p < log((double)FLT_MIN) ? 0 : 1;
    return 1;
}

double cg_contract_kl(const cg_contract *c, const cg_contract_row *row, const double *target,
                      const double *log_predict) {
    const unsigned char *set = support(c, row);
    double kl = 0;
    for (int64_t j = 0; j < row->n_keys; j++)
        if (!set || set[j]) kl += kl_term(c->value[CG_AXIS_KL], target[j], log_predict[j]);
    return kl;
}

void cg_contract_dscores(const cg_contract *c, const cg_contract_row *row, const double *target,
                         const double *log_predict, double *dscores) {
    const unsigned char *set = support(c, row);
    const int form = c->value[CG_AXIS_KL];
    double mass = 0;
    for (int64_t j = 0; j < row->n_keys; j++)
        if (!set || set[j]) mass += target[j] * share_of_log(form, log_predict[j]);
    if (c->faults & CG_FAULT_PREDICT_MINUS_TARGET) mass = 1;
    for (int64_t j = 0; j < row->n_keys; j++)
        dscores[j] =
            !set || set[j] ? exp(log_predict[j]) * mass - target[j] * share_of_log(form, log_predict[j]) : 0;
}

void cg_contract_row_eval(const cg_contract *c, const cg_contract_row *row, double *target, double *log_predict,
                          double *dscores, double *kl, double *scratch) {
    double *log_p = log_predict ? log_predict : dscores; /* lives in whichever output there is */
    const double weight = cg_contract_row_weight(c, row);
    if (kl) *kl = 0;
    cg_contract_target(c, row, target, scratch);
    if (log_p) {
        const bool some = cg_contract_log_predict(c, row, log_p);
        if (kl && some) *kl = weight * cg_contract_kl(c, row, target, log_p);
        if (!dscores) return;
        if (some)
            cg_contract_dscores(c, row, target, log_p, dscores);
        else
            memset(dscores, 0, (size_t)row->n_keys * sizeof *dscores);
        for (int64_t j = 0; j < row->n_keys && weight != 1; j++) dscores[j] *= weight;
    } else if (kl) { /* key by key */
        const unsigned char *set = support(c, row);
        const double *scores = scores_of(c, row);
        double max, log_z;
        if (!log_partition(scores, set, row->n_keys, &max, &log_z)) return;
        for (int64_t j = 0; j < row->n_keys; j++)
            if (!set || set[j]) *kl += kl_term(c->value[CG_AXIS_KL], target[j], scores[j] - max - log_z);
        *kl *= weight;
    }
}

/* ---- from rows to the loss ---- */

static double at_least_one(int64_t n) { return n < 1 ? 1 : (double)n; }

static double factor(const cg_contract *c, const cg_contract_counts *counts, double coeff,
                     int64_t segment_real) {
    if (c->faults & CG_FAULT_COEFF_MISSING) coeff = 1;
    if (c->faults & CG_FAULT_COEFF_TWICE) coeff *= coeff;
    switch (c->value[CG_AXIS_REDUCTION]) {
    case CG_REDUCTION_IS_MEAN_REAL:
        return coeff / at_least_one(counts->real);
    case CG_REDUCTION_IS_MEAN_PHYSICAL:
        return coeff / at_least_one(counts->physical);
    case CG_REDUCTION_IS_MEAN_VISIBLE:
        return coeff / at_least_one(counts->visible);
    case CG_REDUCTION_IS_MEAN_TWICE:
        return coeff / at_least_one(counts->real) / at_least_one(counts->physical);
    case CG_REDUCTION_IS_MEAN_OF_MEANS:
        return coeff / at_least_one(counts->segments) / at_least_one(segment_real);
    default:
        return coeff;
    }
}

double cg_contract_value_factor(const cg_contract *c, const cg_contract_counts *counts, double coeff,
                                int64_t segment_real) {
    return factor(c, counts, coeff, segment_real) * (c->faults & CG_FAULT_LOSS_TWICE ? 2 : 1);
}

double cg_contract_grad_factor(const cg_contract *c, const cg_contract_counts *counts, double coeff,
                               int64_t segment_real) {
    if (c->faults & CG_FAULT_GRADIENT_ZERO) return 0;
    return factor(c, counts, coeff, segment_real) * (c->faults & CG_FAULT_GRADIENT_SIGN ? -1 : 1);
}

void cg_contract_index_grad(const cg_contract *c, const cg_contract_index *index, const double *dscores,
                            double *dw, double *dq, double *dk) {
    const bool linear = c->value[CG_AXIS_SCORES] == CG_SCORES_ARE_LINEAR;
    const bool leak = linear || (c->faults & CG_FAULT_RELU_LEAK);
    const int64_t d = index->head_dim, n = index->n_keys;
    for (int64_t h = 0; h < index->n_heads; h++) {
        const double *dots = index->dots + h * n, *q = index->q + h * d;
        double sum = 0;
        if (dq) memset(dq + h * d, 0, (size_t)d * sizeof *dq);
        for (int64_t j = 0; j < n; j++) {
            if (dscores[j] == 0) continue;
            const int64_t row = index->keys ? index->keys[j] : j;
            const double ddot = index->w[h] * dscores[j];
            if (linear || dots[j] > 0) sum += dots[j] * dscores[j];
            if (!leak && !(dots[j] > 0)) continue;
            if (dq)
                for (int64_t i = 0; i < d; i++) dq[h * d + i] += ddot * index->k[row * d + i];
            if (dk)
                for (int64_t i = 0; i < d; i++) dk[row * d + i] += ddot * q[i];
        }
        if (dw) dw[h] = sum;
    }
}
