/* One AdamW step, in place.
 *
 *   g = grad * min(1, max_norm / norm)                       (max_norm <= 0: g = grad)
 *   m = b1 m + (1 - b1) g,   v = b2 v + (1 - b2) g^2
 *   param -= lr * (m / (1 - b1^step) / (sqrt(v / (1 - b2^step)) + eps) + weight_decay * param)
 *
 * A param that is infinite (a sink of -inf is no sink) is not decayed: it would be 0 * inf, or inf - inf.
 *
 * norm comes from global_norm over all gradients; schedule = {lr, step}, step counted from 1. All steps of one
 * run share norm and schedule, so a gradient that is not finite is refused before the first parameter changes.
 *
 * Saved: nothing. Recompute: never, it changes leaves. Belongs to the optimizer.
 * Refuses: leaves that are none, numbers out of range; a norm, rate or step that cannot be used, when run
 * Source:  Loshchilov and Hutter 2019, algorithm 2; clipping by Pascanu et al. 2013
 */
#ifndef REAL

#include <math.h>

#include "ops/ops.h"

enum { PARAM, M, V, GRAD, NORM, SCHEDULE };

static bool adamw_infer(cg_infer *infer) {
    const cg_adamw_attr *attr = infer->attr;
    if (!cg_expect_real(infer, PARAM)) return false;
    for (int i = M; i <= GRAD; i++)
        if (!cg_expect_same(infer, i, PARAM)) return false;
    for (int i = NORM; i <= SCHEDULE; i++) {
        if (!cg_expect_dtype(infer, i, infer->in[PARAM]->dtype) || !cg_expect_dims(infer, i, 1)) return false;
        if (!cg_expect_dim(infer, i, 0, i == NORM ? 1 : 2, i == NORM ? "one norm" : "rate and step"))
            return false;
    }
    for (int i = PARAM; i <= V; i++)
        if (!infer->in[i]->leaf)
            return cg_refuse(infer, "%s is computed by a node, expected a leaf to change in place",
                             cg_op_in_name(infer->op, i));
    if (!(attr->beta1 >= 0 && attr->beta1 < 1))
        return cg_refuse(infer, "beta1 is %g, expected 0 <= beta1 < 1", attr->beta1);
    if (!(attr->beta2 >= 0 && attr->beta2 < 1))
        return cg_refuse(infer, "beta2 is %g, expected 0 <= beta2 < 1", attr->beta2);
    if (!(attr->eps > 0 && attr->eps - attr->eps == 0))
        return cg_refuse(infer, "eps is %g, expected a finite number above 0", attr->eps);
    if (!(attr->weight_decay >= 0 && attr->weight_decay - attr->weight_decay == 0))
        return cg_refuse(infer, "weight_decay is %g, expected a finite number from 0 on", attr->weight_decay);
    if (attr->max_norm != attr->max_norm) return cg_refuse(infer, "max_norm is not a number");
    return true;
}

/* The numbers of one step, in f64. False when data cannot be used. */
typedef struct adamw_step {
    double clip, rate, correct_m, correct_v;
} adamw_step;

static bool adamw_step_of(const cg_adamw_attr *attr, double norm, double rate, double step, adamw_step *s,
                          cg_error *error) {
    if (!(norm >= 0 && norm - norm == 0))
        return cg_fail(error, CG_BAD_INPUT, "norm is %g, expected a finite number: a gradient is not finite",
                       norm);
    if (!(rate >= 0 && rate - rate == 0))
        return cg_fail(error, CG_BAD_INPUT, "schedule holds a rate of %g, expected a finite number from 0 on",
                       rate);
    if (!(step >= 1 && step - step == 0))
        return cg_fail(error, CG_BAD_INPUT, "schedule holds step %g, expected a number from 1 on", step);
    s->clip = attr->max_norm > 0 && norm > attr->max_norm ? attr->max_norm / norm : 1;
    s->rate = rate;
    s->correct_m = 1 / (1 - pow(attr->beta1, step));
    s->correct_v = 1 / (1 - pow(attr->beta2, step));
    return true;
}

#define CG_KERNEL_FILE "ops/train/adamw.c"
#include "ops/kernel.h"

static cg_cost adamw_cost(const cg_node *node) {
    double n = (double)cg_shape_count(&node->in[PARAM]->shape),
           element = (double)cg_dtype_bytes(node->in[PARAM]->dtype);
    return (cg_cost){.flops = 16 * n, .bytes = 7 * n * element}; /* four read, three written */
}

#define ATTR                                                                                                   \
    &(cg_adamw_attr) { .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .max_norm = 1 }
#define N15 .shape = CG_DIMS(3, 5)
#define N2 .shape = CG_DIMS(2)
#define V15 .shape = CG_DIMS(3, 5), .offset = 0.5, .scale = 0.01
#define V2 .shape = CG_DIMS(2), .offset = 0.5, .scale = 0.01
#define NORM_OF(x)                                                                                             \
    .shape = CG_DIMS(1), .real = (const double[]) { x }
#define AT(rate, step)                                                                                         \
    .shape = CG_DIMS(2), .real = (const double[]) { rate, step }
static const cg_case adamw_cases[] = {
    {.name = "clipped", .in = {{N15}, {N15}, {V15}, {N15}, {NORM_OF(4)}, {AT(0.125, 3)}}, .attr = ATTR},
    {.name = "not clipped", .in = {{N15}, {N15}, {V15}, {N15}, {NORM_OF(0.5)}, {AT(0.125, 1)}}, .attr = ATTR},
    {.name = "clipping off",
     .in = {{N15}, {N15}, {V15}, {N15}, {NORM_OF(4)}, {AT(0.125, 1000)}},
     .attr = &(cg_adamw_attr){.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-20}},
    {.name = "no sink, not decayed",
     .in = {{.shape = CG_DIMS(2), .real = (const double[]){-INFINITY, 1}},
            {N2},
            {V2},
            {N2},
            {NORM_OF(1)},
            {AT(0.125, 1)}},
     .attr = &(cg_adamw_attr){.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8}},
    {.name = "no sink, rate 0",
     .in = {{.shape = CG_DIMS(2), .real = (const double[]){-INFINITY, 1}},
            {N2},
            {V2},
            {N2},
            {NORM_OF(1)},
            {AT(0, 1)}},
     .attr = ATTR},
    {.name = "empty",
     .in = {{.shape = CG_DIMS(0)},
            {.shape = CG_DIMS(0)},
            {.shape = CG_DIMS(0)},
            {.shape = CG_DIMS(0)},
            {NORM_OF(0)},
            {AT(0.125, 1)}},
     .attr = ATTR},
    {.name = "large",
     .in = {{.shape = CG_DIMS(331, 227)},
            {.shape = CG_DIMS(331, 227)},
            {.shape = CG_DIMS(331, 227), .offset = 0.5, .scale = 0.01},
            {.shape = CG_DIMS(331, 227)},
            {NORM_OF(4)},
            {AT(0.125, 3)}},
     .attr = ATTR,
     .large = true},
    {.name = "norm is NaN",
     .in = {{N2}, {N2}, {V2}, {N2}, {NORM_OF(__builtin_nan(""))}, {AT(0.125, 1)}},
     .attr = ATTR,
     .run_error = "a gradient is not finite"},
    {.name = "norm is infinite",
     .in = {{N2}, {N2}, {V2}, {N2}, {NORM_OF(__builtin_inf())}, {AT(0.125, 1)}},
     .attr = ATTR,
     .run_error = "norm is inf"},
    {.name = "step 0",
     .in = {{N2}, {N2}, {V2}, {N2}, {NORM_OF(1)}, {AT(0.125, 0)}},
     .attr = ATTR,
     .run_error = "step 0, expected a number from 1 on"},
    {.name = "negative rate",
     .in = {{N2}, {N2}, {V2}, {N2}, {NORM_OF(1)}, {AT(-0.125, 1)}},
     .attr = ATTR,
     .run_error = "a rate of -0.125"},
    {.name = "shapes differ",
     .in = {{N2}, {N15}, {V2}, {N2}, {NORM_OF(1)}, {AT(0.125, 1)}},
     .attr = ATTR,
     .refuses = "m has shape [3, 5], expected [2] as param has"},
    {.name = "two norms",
     .in = {{N2}, {N2}, {V2}, {N2}, {N2}, {AT(0.125, 1)}},
     .attr = ATTR,
     .refuses = "norm has shape [2], expected 1"},
    {.name = "no step",
     .in = {{N2}, {N2}, {V2}, {N2}, {NORM_OF(1)}, {NORM_OF(1)}},
     .attr = ATTR,
     .refuses = "schedule has shape [1], expected 2"},
    {.name = "beta1",
     .in = {{N2}, {N2}, {V2}, {N2}, {NORM_OF(1)}, {AT(0.125, 1)}},
     .attr = &(cg_adamw_attr){.beta1 = 1, .beta2 = 0.95, .eps = 1e-8},
     .refuses = "beta1 is 1"},
    {.name = "beta2",
     .in = {{N2}, {N2}, {V2}, {N2}, {NORM_OF(1)}, {AT(0.125, 1)}},
     .attr = &(cg_adamw_attr){.beta1 = 0.9, .beta2 = -1, .eps = 1e-8},
     .refuses = "beta2 is -1"},
    {.name = "eps",
     .in = {{N2}, {N2}, {V2}, {N2}, {NORM_OF(1)}, {AT(0.125, 1)}},
     .attr = &(cg_adamw_attr){.beta1 = 0.9, .beta2 = 0.95},
     .refuses = "eps is 0"},
    {.name = "decay",
     .in = {{N2}, {N2}, {V2}, {N2}, {NORM_OF(1)}, {AT(0.125, 1)}},
     .attr = &(cg_adamw_attr){.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = -1},
     .refuses = "weight_decay is -1"},
    {.name = "wrong dtype",
     .in = {{N2}, {N2}, {V2}, {N2, .wrong_dtype = true}, {NORM_OF(1)}, {AT(0.125, 1)}},
     .attr = ATTR,
     .refuses = "grad is i32"},
};

const cg_op cg_op_adamw = {
    .name = "adamw",
    .doc = "one AdamW step in place",
    .in = {"param", "m", "v", "grad", "norm", "schedule"},
    .attr_bytes = sizeof(cg_adamw_attr),
    .infer = adamw_infer,
    .no_grad = "cannot: it changes leaves",
    .mutates = CG_BIT(PARAM) | CG_BIT(M) | CG_BIT(V),
    .statistic_in = CG_BIT(PARAM) | CG_BIT(M) | CG_BIT(V) | CG_BIT(GRAD) | CG_BIT(NORM) | CG_BIT(SCHEDULE),
    .replay = CG_REPLAY_SAME_BITS,
    .cost = adamw_cost,
    .run = CG_RUN(adamw),
    CG_CASES(adamw_cases),
};

void cg_adamw(cg_graph *graph, cg_value *param, cg_value *m, cg_value *v, cg_value *grad, cg_value *norm,
              cg_value *schedule, const cg_adamw_attr *attr) {
    CG_WITHIN(graph, NULL, CG_OPTIMIZE, NULL);
    cg_apply(graph, &cg_op_adamw, attr, (cg_value *[]){param, m, v, grad, norm, schedule}, 6);
}

#else

static bool KERNEL(adamw)(const cg_run_args *args) {
    const cg_adamw_attr *attr = args->attr;
    const REAL *grad = args->in[GRAD].data, *schedule = args->in[SCHEDULE].data;
    REAL *param = args->in[PARAM].data, *m = args->in[M].data, *v = args->in[V].data;
    adamw_step s = {0};
    if (!adamw_step_of(attr, (double)((const REAL *)args->in[NORM].data)[0], (double)schedule[0],
                       (double)schedule[1], &s, args->error))
        return false;
    const REAL b1 = (REAL)attr->beta1, c1 = (REAL)(1 - attr->beta1), b2 = (REAL)attr->beta2,
               c2 = (REAL)(1 - attr->beta2);
    const REAL clip = (REAL)s.clip, rate = (REAL)s.rate, correct_m = (REAL)s.correct_m,
               correct_v = (REAL)s.correct_v;
    const REAL eps = (REAL)attr->eps, decay = (REAL)attr->weight_decay;
    const int64_t n = cg_shape_count(&args->in[PARAM].shape);
#pragma omp parallel for simd if (n > 32768)
    for (int64_t i = 0; i < n; i++) {
        const REAL g = clip * grad[i];
        const REAL mi = b1 * m[i] + c1 * g, vi = b2 * v[i] + c2 * g * g;
        m[i] = mi;
        v[i] = vi;
        const REAL p = param[i], decayed = p - p == 0 ? decay * p : 0;
        param[i] = p - rate * (correct_m * mi / ((REAL)sqrt((double)(correct_v * vi)) + eps) + decayed);
    }
    return true;
}

#endif
