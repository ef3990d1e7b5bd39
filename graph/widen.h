/* Running a node on the CPU: by its kernel, or, where it holds bf16 values and has no kernel for them, by its f32 kernel
 * on f32 copies of them in the workspace.
 *
 * An op that is by_row or elementwise is run in blocks of rows, so that the copies stay small and in the cache: a block
 * of each cut input is widened, the kernel runs on it, its outputs are rounded. How many rows a block has depends on the
 * machine, which no bit shows, since rows do not depend on each other. It is fixed where outputs are sums over the rows:
 * those are added up in f32, block after block. Other ops are run as a whole.
 */
#ifndef CG_GRAPH_WIDEN_H
#define CG_GRAPH_WIDEN_H

#include "graph/op.h"

/* Can the node be run? It cannot where its dtype has no kernel: bf16 falls back on f32 unless the op takes any number
 * of inputs or changes them. */
bool cg_node_has_kernel(const cg_node *node);

/* Exact scratch bytes of a node that can be run: the op's own, and the copies. */
size_t cg_node_workspace(const cg_node *node);

/* Run it: args are the node's own tensors, with cg_node_workspace bytes of workspace. */
bool cg_node_run(const cg_node *node, const cg_run_args *args);

#endif
