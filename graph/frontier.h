/* Peak memory against time: which values to compute again.
 *
 * A point is a set of forward nodes that recompute may clone; it costs the time of its clones and has the peak of its
 * plan, both exact for the time model at hand. The frontier holds the points that no other found point beats. A
 * budget asks the frontier for its cheapest point that fits, so a looser budget is never slower.
 */
#ifndef CG_GRAPH_FRONTIER_H
#define CG_GRAPH_FRONTIER_H

#include "graph/plan.h"

/* Estimated time of a node, from its FLOPs and bytes: the larger of both over fixed rates, plus a fixed start. The
 * rates are those of two AVX-512 cores; they are constants so that a policy means the same plan everywhere. */
double cg_node_us(const cg_node *node);

/* One set of recomputations, tried and taken back. */
typedef struct cg_trial {
    int64_t peak_bytes; /* of its plan; 0 when a limit cut the work short */
    int64_t floor_bytes;
    double extra_us; /* sum over the clones of the time of their originals */
    double extra_flops;
    int n_clones;
} cg_trial;

/* Rewrite for a set, plan, and take the rewrite back: the graph is as before. chosen[n] speaks of node number n of the
 * graph, forward nodes alone (see cg_recompute_nodes); node_us[n] is its time, NULL: cg_node_us. The layout is left
 * out when the floor is already above floor_limit (0: no limit). */
bool cg_recompute_trial(cg_graph *graph, const bool *chosen, const double *node_us,
                        const cg_plan_options *options, int64_t floor_limit, cg_trial *trial, cg_error *error);

typedef struct cg_frontier_point {
    cg_trial trial;
    double
        least_us; /* no set with a peak below the point before takes less: trial.extra_us where that is proven */
    bool *chosen; /* by node number */
} cg_frontier_point;

typedef struct cg_frontier {
    int n_candidates; /* forward nodes that the search decides about: all whose recomputation can change anything, or, when
                         these are more than 24, those with more than 1/512 of the peak */
    int n_points;
    cg_frontier_point *points; /* peak falling, time rising; the first recomputes nothing */
    bool exact;                /* no set of candidates beats any point, nor has less peak than the last */
    int64_t
        least_bytes; /* no set of candidates has a smaller peak: that of the last point where that is proven */
    long n_trials;   /* sets that were rewritten, planned and laid out */
    int n_nodes;     /* length of `chosen` */
} cg_frontier;

/* Search. The graph must not have been rewritten yet. Deterministic. max_visits bounds the work of proving each point
 * (0: a number that lets a toy step take about a second in all). node_us as above. */
cg_frontier *cg_frontier_make(cg_graph *graph, const double *node_us, const cg_plan_options *options,
                              long max_visits, cg_error *error);
void cg_frontier_free(cg_frontier *frontier);

/* The cheapest point whose peak is at most budget_bytes; NULL when none is. */
const cg_frontier_point *cg_frontier_fit(const cg_frontier *frontier, int64_t budget_bytes);

#endif
