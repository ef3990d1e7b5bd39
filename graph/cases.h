/* Cases of ops, built into graphs that can run: for gradient checks, f32 against f64, and the test loop. */
#ifndef CG_GRAPH_CASES_H
#define CG_GRAPH_CASES_H

#include "graph/exec.h"

/* A case as a graph: leaves for the inputs, one node, and its backward with a leaf as each output's gradient.
 */
typedef struct cg_case_graph {
    cg_graph *graph;
    const cg_op *op;
    const cg_case *the_case;
    cg_value *in[CG_MAX_IN];
    int n_in;
    cg_node *node; /* NULL when the op was refused */
    int n_seeds;   /* outputs that gradients flow through, and their gradients */
    cg_value *seeded[CG_MAX_OUT], *seed[CG_MAX_OUT];
    int n_wrt; /* inputs whose gradient is built */
    cg_value *wrt[CG_MAX_IN], *grad[CG_MAX_IN];
    int wrt_input[CG_MAX_IN]; /* their input numbers */
    bool as_bf16; /* set it before cg_case_fill to have the values of a bf16 graph in one of another dtype */
} cg_case_graph;

/* Build a case with real inputs of the given dtype; all outputs and gradients are kept. False when memory is
 * out; a refusal by the op is in cg_graph_error(built->graph). */
bool cg_case_build(const cg_op_set *ops, const cg_op *op, const cg_case *the_case, cg_dtype real,
                   cg_case_graph *built);
void cg_case_free(cg_case_graph *built);

/* Write the inputs and the output gradients. The same case has the same values, rounded to f32, in f32 and f64. */
bool cg_case_fill(const cg_case_graph *built, cg_exec *exec, cg_error *error);

/* Names of the op's inputs and outputs that its backward reads, in table order, separated by blanks. */
void cg_case_crosses(const cg_case_graph *built, char *text, size_t text_bytes);

/* Element i of a real tensor's data as double, and the reverse. */
double cg_real_get(cg_dtype dtype, const void *data, int64_t i);
void cg_real_set(cg_dtype dtype, void *data, int64_t i, double x);

#endif
