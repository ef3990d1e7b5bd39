/* The graph: values, nodes, scopes. A training step is one static graph that holds its own backward pass.
 *
 * Building computes nothing. A builder returns a value, or NULL once the graph has failed: the first error
 * stays in the graph, later builders return NULL quietly, and model code checks once (cg_graph_error).
 *
 *     cg_graph *g = cg_graph_new(&cg_all_ops);
 *     cg_value *x = cg_leaf(g, CG_LEAF_INPUT, "x", CG_F32, CG_SHAPE(T, D));
 *     CG_SCOPE(g, "layer%d", 0);  // what is built until the end of this block belongs there
 *     cg_value *y = cg_rms_norm(g, x, weight, 1e-6);
 *     cg_autodiff(...);           // appends backward nodes to the same graph
 *     cg_recompute(...);          // rewrites edges that cross from forward to backward
 *     cg_plan_make(...);          // order, lifetimes, one arena: the exact peak
 *     cg_exec_new, cg_exec_run    // as often as wanted, no allocation
 */
#ifndef CG_GRAPH_GRAPH_H
#define CG_GRAPH_GRAPH_H

#include "core/base/tensor.h"

typedef struct cg_graph cg_graph;
typedef struct cg_node cg_node;
typedef struct cg_value cg_value;
typedef struct cg_op cg_op;         /* graph/op.h */
typedef struct cg_op_set cg_op_set; /* graph/op.h */

/* What a value without a producer is. Leaves live through the whole step and keep their bytes between runs. */
typedef enum cg_leaf_kind {
    CG_LEAF_NONE,      /* not a leaf: a node computes it */
    CG_LEAF_PARAMETER, /* trained; gradients are wanted */
    CG_LEAF_GRADIENT,  /* a sum of gradients over micro-batches */
    CG_LEAF_OPTIMIZER, /* moments and the like */
    CG_LEAF_INPUT      /* written by the caller before a run */
} cg_leaf_kind;

typedef enum cg_pass { CG_FORWARD, CG_BACKWARD, CG_RECOMPUTE, CG_OPTIMIZE, CG_PASSES } cg_pass;

/* "forward", "backward", "recompute", "optimize". */
const char *cg_pass_name(cg_pass pass);

struct cg_value {
    int id;
    cg_dtype dtype;
    cg_shape shape;
    const char *name;  /* a leaf's own name, else the name of the op's output */
    const char *scope; /* "layer2/attn/indexer", "" at the top */
    cg_node *producer; /* NULL: a leaf */
    int slot;          /* which output of the producer */
    cg_leaf_kind leaf;
    bool needs_grad; /* a parameter, or computed from one through differentiable inputs */
    bool keep;       /* readable after a run: its memory is not given to anyone else */
    bool external;   /* a leaf whose memory the caller lends (cg_exec_bind): no bytes of the arena */
};

struct cg_node {
    int id;
    const cg_op *op;
    const void *attr;
    int n_in, n_out;
    cg_value **in; /* an optional input that is absent is NULL */
    cg_value **out;
    const char *scope;
    cg_pass pass;
    const cg_node *cause; /* the forward node that a backward or recompute node exists for; NULL in forward */
};

struct cg_graph {
    const cg_op_set *ops;
    cg_error error;
    cg_node **nodes; /* in execution order */
    int n_nodes;
    cg_value **values;
    int n_values;
    int64_t max_value_bytes;    /* a larger value is refused when it is built */
    struct cg_building *inside; /* graph.c: the context, memory, leaves by name */
};

/* A new graph over a set of ops; NULL when memory is out. */
cg_graph *cg_graph_new(const cg_op_set *ops);
void cg_graph_free(cg_graph *graph);

/* The first error, or NULL when the graph is fine. */
const cg_error *cg_graph_error(const cg_graph *graph);

/* Fail the graph with a sentence, the current scope put before it; returns NULL. */
cg_value *cg_graph_fail(cg_graph *graph, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Fail it as the machine, and not the graph, is to blame: "out of memory" and `when`, "in autodiff" say; returns NULL. */
cg_value *cg_graph_no_memory(cg_graph *graph, const char *when);

/* ---- where what is built belongs ---- */

/* Builders enter another scope or pass by CG_SCOPE and CG_WITHIN alone, until the end of the block that these stand in,
 * however it is left: nothing can stay behind. Declarations, so that they stand in a block of their own.
 *
 *     CG_SCOPE(graph, "layer%d", i);                 one component deeper
 *     CG_WITHIN(graph, scope, pass, cause);          there: the whole scope, "" for the top, NULL for the present one */
#define CG_SCOPE(graph, ...) CG_UNTIL_THE_BLOCK_ENDS(cg_context_deeper, graph, __VA_ARGS__)
#define CG_WITHIN(graph, ...) CG_UNTIL_THE_BLOCK_ENDS(cg_context_enter, graph, __VA_ARGS__)

/* "layer2/attn", and the pass of what is built now. */
const char *cg_scope_now(const cg_graph *graph);
cg_pass cg_pass_now(const cg_graph *graph);

/* What the two are made of: `before` takes the context that the third restores. */
typedef struct cg_context {
    cg_graph *graph;          /* NULL: it was freed in the meantime */
    struct cg_context *outer; /* entered before */
    char scope[256];
    cg_pass pass;
    const cg_node *cause;
} cg_context;
void cg_context_deeper(cg_context *before, cg_graph *graph, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
void cg_context_enter(cg_context *before, cg_graph *graph, const char *scope, cg_pass pass,
                      const cg_node *cause);
void cg_context_restore(cg_context *before);
#define CG_UNTIL_THE_BLOCK_ENDS(enter, ...)                                                                    \
    __attribute__((cleanup(cg_context_restore))) cg_context CG_JOINED(cg_before_, __LINE__);                   \
    enter(&CG_JOINED(cg_before_, __LINE__), __VA_ARGS__)
#define CG_JOINED(a, b) CG_JOINED_(a, b)
#define CG_JOINED_(a, b) a##b

/* ---- values and nodes ---- */

/* A value without a producer. The name is prefixed with the scope in messages and lists, and must be unique
 * within its scope. */
cg_value *cg_leaf(cg_graph *graph, cg_leaf_kind kind, const char *name, cg_dtype dtype, cg_shape shape);

/* Add a node and return its first output (NULL when the graph has failed; for an op without outputs also
 * NULL). `attr` is copied, attr_bytes of the op. Other outputs: cg_output(first, slot). */
cg_value *cg_apply(cg_graph *graph, const cg_op *op, const void *attr, cg_value *const *in, int n_in);

/* A further output of the node that made `value`; NULL for NULL. */
cg_value *cg_output(cg_value *value, int slot);

/* Mark a value as readable after a run; NULL is ignored. Returns the value. */
cg_value *cg_keep(cg_value *value);

/* The size of a dimension; 0 for NULL, so that model code need not check each value. */
int64_t cg_dim(const cg_value *value, int axis);

/* "scope/name" or "scope/op.output" into text; returns text. */
const char *cg_value_text(const cg_value *value, char *text, size_t text_bytes);

/* A leaf by its full name "scope/name"; NULL when absent. Takes the same time however many there are. */
cg_value *cg_leaf_find(const cg_graph *graph, const char *full_name);

/* The value whose storage this one shares: follows reshape, detach and other aliases to their source. */
const cg_value *cg_value_root(const cg_value *value);

/* Append the backward pass. outputs[i] has the output gradient seeds[i] (same dtype and shape); grads[k]
 * becomes the gradient of wrt[k], exactly zero where nothing reaches it. Refused where a gradient would have to
 * pass through backward nodes or an op whose gradient is "not yet" there. Every node added belongs to the
 * pass CG_BACKWARD and carries scope and cause of the forward node it differentiates. */
bool cg_autodiff(cg_graph *graph, cg_value *const *outputs, cg_value *const *seeds, int n_outputs,
                 cg_value *const *wrt, int n_wrt, cg_value **grads);

/* Rewrite crossing edges by recomputation. Policy text, terms joined by ';':
 *
 *     OP[,OP...][@SCOPE]      e.g.  indexer_head_scores,softmax@layer*;rms_norm
 *
 * OP and SCOPE may hold * and ?; a scope pattern also covers what lies below it. Each forward node that matches
 * and whose output is read in backward is cloned there, right before its first reader, together with the
 * matching nodes it needs. Readers form groups: consecutive backward nodes of one scope share a clone, others
 * get their own, so a clone never lives from one scope to another. Nodes that choose are never cloned. Refuses
 * an op name that no op has, naming a choice, a scope in which nothing lies, and cloning a node that reads a
 * leaf which was changed in between. Returns the number of clones through n_clones (may be NULL). Call after
 * cg_autodiff. */
bool cg_recompute(cg_graph *graph, const char *policy, int *n_clones);

/* The same in two halves: the nodes that a policy names, as chosen[node number] (n_nodes of the graph), and the rewrite
 * for any set of them. Entries of nodes that cannot be cloned are ignored. */
bool cg_recompute_match(cg_graph *graph, const char *policy, bool *chosen);
bool cg_recompute_nodes(cg_graph *graph, const bool *chosen, int *n_clones);

/* A forward node that recompute may clone: it neither chooses nor changes a leaf. */
bool cg_recompute_may_clone(const cg_node *node);

/* A rewrite that will be taken back: between the two calls the graph is rewritten and may be planned, but nothing may be
 * added to it. NULL, with the graph as it was and without error, when the set cannot be cloned. */
typedef struct cg_rewrite cg_rewrite;
cg_rewrite *cg_recompute_try(cg_graph *graph, const bool *chosen, int *n_clones, cg_error *error);
void cg_recompute_undo(cg_graph *graph, cg_rewrite *rewrite);

/* Another order of the nodes, numbered anew: n of them in a malloc'd array that the graph takes over. Returns the old one,
 * for free() or another call. */
cg_node **cg_graph_reorder(cg_graph *graph, cg_node **nodes, int n);

/* A place in the building of a graph; rewinding forgets every node and value made behind it, and an error. Only for
 * who knows that no older node refers to them. */
typedef struct cg_graph_mark {
    int n_nodes, n_values;
    void *block;
    size_t used;
} cg_graph_mark;
cg_graph_mark cg_graph_mark_now(const cg_graph *graph);
void cg_graph_rewind(cg_graph *graph, const cg_graph_mark *mark);

#endif
