/* Gradient checks: analytic gradients of a graph against central differences, entry by entry.
 *
 * Choices are held fixed: nodes that select run once, at the unperturbed point. So are constants: values through
 * which no gradient flows, though they are computed from leaves that have one, as a teacher is. An entry at a
 * kink (relu at 0), where the analytic value lies between two one-sided differences that differ, is counted as a
 * kink, not as a failure. A check that compared nothing, or only zeros, or only kinks, is not a pass.
 */
#ifndef CG_GRAPH_GRADCHECK_H
#define CG_GRAPH_GRADCHECK_H

#include "graph/cases.h"

/* A differentiated graph: f64 outputs with leaves as their gradients, and the gradients of leaves. Outputs,
 * gradients and the outputs of choices must be kept (cg_keep, cg_keep_choices), and constants be held that move
 * with the leaves (cg_hold_constants): a graph where one of them would move the outputs is refused. */
typedef struct cg_gradcheck {
    cg_exec *exec;
    int n_outputs;
    cg_value *const *outputs, *const *seeds;
    int n_wrt;
    cg_value *const *wrt, *const *grads;
    bool full_jacobian;  /* one output entry at a time, besides the one random output gradient */
    int64_t max_entries; /* per leaf, one of each stretch; 0: all */
    double step;         /* 0: 1e-5, times max(1, sqrt |x|) */
    double tolerance;    /* 0: 1e-6 */
} cg_gradcheck;

typedef struct cg_gradcheck_report {
    int64_t n_entries, n_kinks; /* compared, and skipped at a kink */
    double worst_rel;           /* largest |analytic - numeric| / largest magnitude in that leaf's gradient */
    bool ok;         /* compared something that is not zero everywhere, and worst_rel is within tolerance */
    char worst[256]; /* the worst entry: where, both values, the step */
} cg_gradcheck_report;

/* nonzero[k] becomes true when leaf k has a gradient that is not zero (may be NULL). False: the run itself
 * failed. */
bool cg_gradcheck_run(const cg_gradcheck *check, bool *nonzero, cg_gradcheck_report *report, cg_error *error);

/* All cases of one op in f64, on a backend (NULL: the CPU). For an op without gradient n_entries is 0 and ok says whether it states why. */
bool cg_gradcheck_op(const cg_op_set *ops, const cg_op *op, const cg_backend *backend, int *n_cases,
                     cg_gradcheck_report *report, cg_error *error);

/* Keep the outputs of all nodes that choose, so that they can be held fixed. */
void cg_keep_choices(cg_graph *graph);

/* Put a hold (ops/nn/hold.c) wherever a forward node that gradients flow through reads a value that moves with a
 * parameter but passes no gradient on: a constant output, a detached value, an input that the op takes as a
 * constant. Before or after cg_autodiff; before cg_recompute. */
bool cg_hold_constants(cg_graph *graph);

#endif
