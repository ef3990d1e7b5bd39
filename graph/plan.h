/* The plan of a graph: which nodes run, when each value is born and dies, where it lies in one arena.
 * Peak memory is known from it before anything runs. */
#ifndef CG_GRAPH_PLAN_H
#define CG_GRAPH_PLAN_H

#include "graph/backend.h"

typedef enum cg_category {
    CG_PARAMETER,  /* parameter leaves */
    CG_GRADIENT,   /* gradient sums, and every value that backward computes */
    CG_OPTIMIZER,  /* optimizer leaves, and values of the optimize pass */
    CG_INPUT,      /* input leaves */
    CG_SAVED,      /* forward values that backward or recompute reads */
    CG_ACTIVATION, /* forward values that only forward reads */
    CG_RECOMPUTED, /* clones in backward */
    CG_WORKSPACE,  /* scratch of a node while it runs */
    CG_CATEGORIES
} cg_category;

const char *cg_category_name(cg_category category);

/* One piece of memory: a value with all its aliases, or the workspace of a node. Steps count the nodes of the
 * plan from 0; a leaf lives from 0 to the last step. */
typedef struct cg_storage {
    const cg_value *value; /* NULL for a workspace */
    const cg_node *node;   /* the node of a workspace, else NULL */
    cg_category category;
    int64_t bytes;    /* exact */
    int64_t reserved; /* bytes rounded up to CG_ALIGN */
    int64_t offset;   /* in the arena; -1: external */
    int first,
        last;  /* steps, both included; a kept choice lives from 0, so that it can be held (CG_HOLD_CHOICES) */
    bool kept; /* readable after a run, itself or an alias of it */
    int taken_over; /* a storage whose place this one takes in place at `first`; -1: none */
} cg_storage;

enum { CG_ALIGN = 64 };

typedef struct cg_plan {
    const cg_graph *graph;
    cg_node **steps; /* the nodes that run, in order; nodes that nothing needs are left out */
    int n_steps;
    cg_storage *storages;
    int n_storages;
    int *storage_of;     /* by value id: index of its storage, -1 when the plan does not hold it */
    int *workspace_of;   /* by step: index of its workspace's storage, -1: none */
    int64_t peak_bytes;  /* size of the arena */
    int64_t floor_bytes; /* the most bytes alive at one step: no layout can be smaller */
    int peak_step;       /* the first step with floor_bytes alive */
    /* on a device */
    const cg_backend *backend; /* NULL: the CPU */
    cg_device_kernel *kernels; /* by step; all zero for aliases */
    int *fault_of;             /* by step: the number of its fault record; -1: none */
    int n_faults;
    int faults; /* index of the storage that holds the records, alive throughout; -1: none */
} cg_plan;

typedef struct cg_plan_options {
    const cg_backend
        *backend; /* where it will run, which decides about workspaces; it must outlive the plan. NULL:
                                   the CPU */
    bool no_reuse_in_place;     /* never let an output take the place of a dying input */
    bool keep_cloned_originals; /* let originals live until their clones are compared with them */
    int64_t floor_limit; /* lay nothing out, and leave peak_bytes 0, when the floor is above this; 0: always */
} cg_plan_options;

/* Plan a graph. Roots are the values marked by cg_keep and the nodes that change a leaf; what they do not need
 * is left out. NULL with a sentence when the graph has failed, is empty, or the sizes do not fit 63 bits. */
cg_plan *cg_plan_make(const cg_graph *graph, const cg_plan_options *options, cg_error *error);
void cg_plan_free(cg_plan *plan);

/* Bytes of each category alive at a step (reserved bytes, which is what the arena must hold). */
void cg_plan_live(const cg_plan *plan, int step, int64_t bytes[CG_CATEGORIES]);

/* A saved value and who keeps it. */
typedef struct cg_saved {
    const cg_value *value;
    int64_t bytes;
    int n_readers;           /* nodes of backward and recompute that read it */
    const cg_node **readers; /* in order; freed by cg_saved_free */
    const int *reader_steps;
} cg_saved;

/* All saved values in order of birth; *n of them. NULL, with *n 0, when memory is out. */
cg_saved *cg_plan_saved(const cg_plan *plan, int *n);
void cg_saved_free(cg_saved *saved, int n);

#endif
