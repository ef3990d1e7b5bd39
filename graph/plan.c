#include "graph/plan.h"

#include "graph/widen.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *cg_category_name(cg_category category) {
    static const char *const names[CG_CATEGORIES] = {"parameter", "gradient",   "optimizer",  "input",
                                                     "saved",     "activation", "recomputed", "workspace"};
    return names[category];
}

/* ---- which nodes run ---- */

static bool is_root(const cg_node *node) {
    if (node->op->mutates) return true;
    for (int s = 0; s < node->n_out; s++)
        if (node->out[s]->keep) return true;
    return false;
}

static bool choose_steps(cg_plan *plan) {
    const cg_graph *graph = plan->graph;
    bool *needed = calloc((size_t)graph->n_values + 1, sizeof *needed);
    plan->steps = malloc(((size_t)graph->n_nodes + 1) * sizeof *plan->steps);
    if (!needed || !plan->steps) {
        free(needed);
        return false;
    }
    for (int n = graph->n_nodes - 1; n >= 0; n--) {
        cg_node *node = graph->nodes[n];
        bool runs = is_root(node);
        for (int s = 0; s < node->n_out; s++) runs |= needed[node->out[s]->id];
        if (!runs) continue;
        for (int i = 0; i < node->n_in; i++)
            if (node->in[i]) needed[node->in[i]->id] = true;
        plan->steps[plan->n_steps++] = node;
    }
    for (int i = 0, j = plan->n_steps - 1; i < j; i++, j--) {
        cg_node *swap = plan->steps[i];
        plan->steps[i] = plan->steps[j];
        plan->steps[j] = swap;
    }
    free(needed);
    return true;
}

/* ---- lifetimes ---- */

static cg_category category_of(const cg_value *value) {
    switch (value->leaf) {
    case CG_LEAF_PARAMETER:
        return CG_PARAMETER;
    case CG_LEAF_GRADIENT:
        return CG_GRADIENT;
    case CG_LEAF_OPTIMIZER:
        return CG_OPTIMIZER;
    case CG_LEAF_INPUT:
        return CG_INPUT;
    case CG_LEAF_NONE:
        break;
    }
    switch (value->producer->pass) {
    case CG_BACKWARD:
        return CG_GRADIENT;
    case CG_RECOMPUTE:
        return CG_RECOMPUTED;
    case CG_OPTIMIZE:
        return CG_OPTIMIZER;
    default:
        return CG_ACTIVATION; /* becomes CG_SAVED when backward reads it */
    }
}

static bool round_up(int64_t bytes, int64_t *rounded) {
    if (__builtin_add_overflow(bytes, CG_ALIGN - 1, rounded)) return false;
    *rounded -= *rounded % CG_ALIGN;
    return true;
}

static cg_storage *add_storage(cg_plan *plan, cg_category category, int64_t bytes, int first, int last,
                               cg_error *error) {
    cg_storage *storage = &plan->storages[plan->n_storages];
    *storage =
        (cg_storage){.category = category, .bytes = bytes, .first = first, .last = last, .taken_over = -1};
    if (!round_up(bytes, &storage->reserved)) {
        cg_fail(error, CG_BAD_INPUT, "a value or workspace of %lld bytes does not fit a plan",
                (long long)bytes);
        return NULL;
    }
    plan->n_storages++;
    return storage;
}

/* The storage of a value, made when the value is first met. */
static cg_storage *storage_of(cg_plan *plan, const cg_value *value, int step, cg_error *error) {
    const cg_value *root = cg_value_root(value);
    int last_step = plan->n_steps - 1;
    if (plan->storage_of[root->id] < 0) {
        int64_t bytes = root->external ? 0 : cg_tensor_bytes(root->dtype, &root->shape);
        cg_storage *made = add_storage(plan, category_of(root), bytes, root->leaf ? 0 : step,
                                       root->leaf ? last_step : step, error);
        if (!made) return NULL;
        made->value = root;
        if (root->external) made->offset = -1;
        plan->storage_of[root->id] = plan->n_storages - 1;
    }
    plan->storage_of[value->id] = plan->storage_of[root->id];
    return &plan->storages[plan->storage_of[root->id]];
}

/* Scratch of a step; on a device it depends on the kernel, which is chosen here. */
static bool find_workspace(cg_plan *plan, int t, size_t *bytes, cg_error *error) {
    const cg_node *node = plan->steps[t];
    *bytes = 0;
    if (plan->backend && !node->op->alias) {
        cg_device_kernel *kernel = &plan->kernels[t];
        if (!plan->backend->kernel_of(plan->backend, node, kernel, error)) return false;
        if (kernel->describe) plan->fault_of[t] = plan->n_faults++;
        *bytes = kernel->workspace;
    } else {
        *bytes = cg_node_workspace(node);
    }
    if (*bytes == SIZE_MAX) /* of a product whose kernel could not be made */
        return cg_fail(error, CG_FAILED, "%s%s%s: out of memory for a kernel", node->scope,
                       node->scope[0] ? ": " : "", node->op->name);
    return *bytes <= INT64_MAX / 2 ||
           cg_fail(error, CG_BAD_INPUT, "%s%s%s: its workspace of %zu bytes does not fit a plan", node->scope,
                   node->scope[0] ? ": " : "", node->op->name, *bytes);
}

/* What kernels report stays until the end of a run, wherever it begins. */
static bool add_faults(cg_plan *plan, cg_error *error) {
    if (!plan->n_faults) return true;
    int64_t bytes = plan->n_faults * (int64_t)sizeof(cg_device_fault);
    cg_storage *storage = add_storage(plan, CG_WORKSPACE, bytes, 0, plan->n_steps - 1, error);
    if (!storage) return false;
    for (int t = plan->n_steps - 1; t >= 0; t--)
        if (plan->fault_of[t] >= 0) storage->node = plan->steps[t];
    plan->faults = plan->n_storages - 1;
    return true;
}

static bool find_lifetimes(cg_plan *plan, const cg_plan_options *options, cg_error *error) {
    int last_step = plan->n_steps - 1;
    for (int t = 0; t < plan->n_steps; t++) {
        const cg_node *node = plan->steps[t];
        for (int i = 0; i < node->n_in; i++) {
            if (!node->in[i]) continue;
            cg_storage *storage = storage_of(plan, node->in[i], t, error);
            if (!storage) return false;
            if (storage->last < t) storage->last = t;
            bool late = node->pass == CG_BACKWARD || node->pass == CG_RECOMPUTE;
            if (late && !node->op->alias && storage->category == CG_ACTIVATION) storage->category = CG_SAVED;
        }
        for (int s = 0; s < node->n_out; s++) {
            cg_storage *storage = storage_of(plan, node->out[s], t, error);
            if (!storage) return false;
            if (!node->out[s]->keep) continue;
            storage->kept = true;
            storage->last = last_step;
            /* when it is held in a later run, the nodes before it run again: they must not get its place */
            if (node->op->replay == CG_REPLAY_CHOICE) storage->first = 0;
        }
        plan->workspace_of[t] = -1;
        size_t bytes;
        if (!find_workspace(plan, t, &bytes, error)) return false;
        if (bytes) {
            cg_storage *storage = add_storage(plan, CG_WORKSPACE, (int64_t)bytes, t, t, error);
            if (!storage) return false;
            storage->node = node;
            plan->workspace_of[t] = plan->n_storages - 1;
        }
    }
    if (!add_faults(plan, error)) return false;
    /* a leaf that no node reads is still the caller's to write */
    for (int v = 0; v < plan->graph->n_values; v++)
        if (plan->graph->values[v]->leaf && !storage_of(plan, plan->graph->values[v], 0, error)) return false;
    if (options && options->keep_cloned_originals)
        for (int t = 0; t < plan->n_steps; t++) {
            const cg_node *clone = plan->steps[t];
            if (clone->pass != CG_RECOMPUTE) continue;
            for (int s = 0; s < clone->n_out; s++) {
                int original = plan->storage_of[clone->cause->out[s]->id];
                if (original >= 0 && plan->storages[original].last < t) plan->storages[original].last = t;
            }
        }
    return true;
}

/* ---- in-place: output 0 takes the place of an input that dies at the same step ---- */

static bool may_take_over(const cg_plan *plan, int t, int i) {
    const cg_node *node = plan->steps[t];
    if (!(node->op->overwrites & CG_BIT(i)) || !node->in[i]) return false;
    const cg_storage *from = &plan->storages[plan->storage_of[node->in[i]->id]];
    const cg_storage *to = &plan->storages[plan->storage_of[node->out[0]->id]];
    if (from->value->leaf || from->last != t || from->bytes != to->bytes || from->kept) return false;
    if (from->first == t || to->first != t) return false;
    for (int k = 0; k < node->n_in; k++) /* another input in the same place would be read after the write */
        if (k != i && node->in[k] && plan->storage_of[node->in[k]->id] == plan->storage_of[node->in[i]->id])
            return false;
    for (int s = 1; s < node->n_out; s++)
        if (plan->storage_of[node->out[s]->id] == plan->storage_of[node->in[i]->id]) return false;
    return true;
}

static void reuse_in_place(cg_plan *plan) {
    for (int t = 0; t < plan->n_steps; t++) {
        const cg_node *node = plan->steps[t];
        if (node->op->alias || !node->n_out) continue;
        for (int i = 0; i < node->n_in && i < CG_MAX_IN; i++)
            if (may_take_over(plan, t, i)) {
                int from = plan->storage_of[node->in[i]->id];
                plan->storages[plan->storage_of[node->out[0]->id]].taken_over = from;
                break;
            }
    }
}

/* ---- layout ---- */

/* A block: a chain of storages that follow each other in place. It lies where its first one lies. */
typedef struct block {
    int64_t reserved, offset;
    int first, last;
} block;

static int larger_first(const void *a, const void *b) {
    const block *x = *(block *const *)a, *y = *(block *const *)b;
    if (x->reserved != y->reserved) return x->reserved < y->reserved ? 1 : -1;
    if (x->first != y->first) return x->first < y->first ? -1 : 1;
    return x < y ? -1 : x > y;
}

static int longer_first(const void *a, const void *b) {
    const block *x = *(block *const *)a, *y = *(block *const *)b;
    int lx = x->last - x->first, ly = y->last - y->first;
    if (lx != ly) return lx < ly ? 1 : -1;
    return larger_first(a, b);
}

static int earlier_first(const void *a, const void *b) {
    const block *x = *(block *const *)a, *y = *(block *const *)b;
    if (x->first != y->first) return x->first < y->first ? -1 : 1;
    return larger_first(a, b);
}

/* Place blocks in the given order, each at the lowest offset where it meets no block of the same time. */
static int64_t place(block **order, int n, block **placed) {
    int64_t peak = 0;
    for (int i = 0; i < n; i++) { /* `placed` is kept sorted by offset */
        block *b = order[i];
        int64_t offset = 0;
        for (int k = 0; k < i; k++) {
            const block *other = placed[k];
            if (other->last < b->first || b->last < other->first) continue;
            if (other->offset - offset >= b->reserved) break;
            if (other->offset + other->reserved > offset) offset = other->offset + other->reserved;
        }
        b->offset = offset;
        if (offset + b->reserved > peak) peak = offset + b->reserved;
        int k = i;
        for (; k > 0 && placed[k - 1]->offset > offset; k--) placed[k] = placed[k - 1];
        placed[k] = b;
    }
    return peak;
}

static bool lay_out(cg_plan *plan, cg_error *error) {
    int n = plan->n_storages;
    block *blocks = calloc((size_t)n + 1, sizeof *blocks);
    int *block_of = malloc(((size_t)n + 1) * sizeof *block_of);
    block **order = malloc(((size_t)n + 1) * sizeof *order),
          **placed = malloc(((size_t)n + 1) * sizeof *placed);
    int64_t *best = malloc(((size_t)n + 1) * sizeof *best);
    bool ok = blocks && block_of && order && placed && best;
    int n_blocks = 0;
    /* storages were made in order of birth, so a storage that is taken over precedes its successor */
    for (int s = 0; ok && s < n; s++) {
        cg_storage *storage = &plan->storages[s];
        block_of[s] = -1;
        if (storage->value && storage->value->external) continue;
        if (storage->taken_over >= 0) {
            block_of[s] = block_of[storage->taken_over];
            if (blocks[block_of[s]].last < storage->last) blocks[block_of[s]].last = storage->last;
            continue;
        }
        block_of[s] = n_blocks;
        blocks[n_blocks] = (block){storage->reserved, 0, storage->first, storage->last};
        n_blocks++;
    }
    /* the greedy placement depends on the order; the smallest result of three is kept */
    int (*const orders[])(const void *, const void *) = {larger_first, longer_first, earlier_first};
    plan->peak_bytes = INT64_MAX;
    for (int o = 0; ok && o < 3 && plan->peak_bytes > plan->floor_bytes; o++) {
        int n_order = 0;
        for (int b = 0; b < n_blocks; b++)
            if (blocks[b].reserved) order[n_order++] = &blocks[b];
        qsort(order, (size_t)n_order, sizeof *order, orders[o]);
        int64_t peak = place(order, n_order, placed);
        if (peak >= plan->peak_bytes) continue;
        plan->peak_bytes = peak;
        for (int b = 0; b < n_blocks; b++) best[b] = blocks[b].offset;
    }
    for (int s = 0; ok && s < n; s++) plan->storages[s].offset = block_of[s] < 0 ? -1 : best[block_of[s]];
    free(blocks);
    free(block_of);
    free(order);
    free(placed);
    free(best);
    return ok || cg_fail(error, CG_FAILED, "out of memory while a plan is made");
}

void cg_plan_live(const cg_plan *plan, int step, int64_t bytes[CG_CATEGORIES]) {
    memset(bytes, 0, CG_CATEGORIES * sizeof *bytes);
    for (int s = 0; s < plan->n_storages; s++) {
        const cg_storage *storage = &plan->storages[s];
        if (step < storage->first || step > storage->last) continue;
        /* at the step of a takeover both names stand for one place */
        if (storage->taken_over >= 0 && step == storage->first) continue;
        bytes[storage->category] += storage->reserved;
    }
}

static bool find_floor(cg_plan *plan, cg_error *error) {
    int64_t total = 0; /* no sum of bytes below can overflow when this one does not */
    for (int s = 0; s < plan->n_storages; s++)
        if (__builtin_add_overflow(total, plan->storages[s].reserved, &total))
            return cg_fail(error, CG_BAD_INPUT, "the sizes of all values together do not fit 63 bits");
    int64_t *delta = calloc((size_t)plan->n_steps + 2, sizeof *delta);
    if (!delta) return cg_fail(error, CG_FAILED, "out of memory while a plan is made");
    for (int s = 0; s < plan->n_storages; s++) {
        const cg_storage *storage = &plan->storages[s];
        delta[storage->first + (storage->taken_over >= 0)] += storage->reserved;
        delta[storage->last + 1] -= storage->reserved;
    }
    int64_t live = 0;
    for (int t = 0; t < plan->n_steps; t++) {
        live += delta[t];
        if (live > plan->floor_bytes) {
            plan->floor_bytes = live;
            plan->peak_step = t;
        }
    }
    free(delta);
    return true;
}

cg_plan *cg_plan_make(const cg_graph *graph, const cg_plan_options *options, cg_error *error) {
    const cg_error *failed = cg_graph_error(graph);
    if (failed) {
        cg_fail(error, failed->code, "%s", failed->text);
        return NULL;
    }
    cg_plan *plan = calloc(1, sizeof *plan);
    bool ok = plan != NULL;
    if (ok) {
        plan->graph = graph;
        plan->backend = options ? options->backend : NULL;
        plan->faults = -1;
        ok = choose_steps(plan);
    }
    if (ok && !plan->n_steps) {
        cg_fail(error, CG_BAD_INPUT, "nothing to run: no value of the graph is kept");
        cg_plan_free(plan);
        return NULL;
    }
    if (ok) {
        size_t n_values = (size_t)graph->n_values, n_steps = (size_t)plan->n_steps;
        plan->storages = calloc(n_values + n_steps + 2, sizeof *plan->storages);
        plan->storage_of = malloc((n_values + 1) * sizeof *plan->storage_of);
        plan->workspace_of = malloc((n_steps + 1) * sizeof *plan->workspace_of);
        plan->kernels = calloc(n_steps + 1, sizeof *plan->kernels);
        plan->fault_of = malloc((n_steps + 1) * sizeof *plan->fault_of);
        ok = plan->storages && plan->storage_of && plan->workspace_of && plan->kernels && plan->fault_of;
        for (size_t t = 0; ok && t < n_steps; t++) plan->fault_of[t] = -1;
        for (size_t v = 0; ok && v < n_values; v++) plan->storage_of[v] = -1;
    }
    ok = ok && find_lifetimes(plan, options, error);
    if (ok && !(options && options->no_reuse_in_place)) reuse_in_place(plan);
    ok = ok && find_floor(plan, error);
    bool hopeless = options && options->floor_limit && plan && plan->floor_bytes > options->floor_limit;
    ok = ok && (hopeless || lay_out(plan, error));
    if (!ok) {
        cg_fail(error, CG_FAILED, "out of memory while a plan is made");
        cg_plan_free(plan);
        return NULL;
    }
    return plan;
}

void cg_plan_free(cg_plan *plan) {
    if (!plan) return;
    free(plan->steps);
    free(plan->storages);
    free(plan->storage_of);
    free(plan->workspace_of);
    free(plan->kernels);
    free(plan->fault_of);
    free(plan);
}

/* ---- what is saved, and for whom ---- */

/* True for the first input through which a step reads a storage late: a node that reads a value twice is one
 * reader. */
static bool reads_late(const cg_plan *plan, const cg_node *node, int i) {
    if ((node->pass != CG_BACKWARD && node->pass != CG_RECOMPUTE) || node->op->alias || !node->in[i])
        return false;
    for (int k = 0; k < i; k++)
        if (node->in[k] && plan->storage_of[node->in[k]->id] == plan->storage_of[node->in[i]->id]) return false;
    return true;
}

/* Readers of saved storages, counted first and then filled in; entry[s] is the place in the list or -1. */
static bool list_readers(const cg_plan *plan, cg_saved *saved, int n, const int *entry) {
    for (int fill = 0; fill < 2; fill++) {
        for (int t = 0; t < plan->n_steps; t++)
            for (int i = 0; i < plan->steps[t]->n_in; i++) {
                if (!reads_late(plan, plan->steps[t], i)) continue;
                int e = entry[plan->storage_of[plan->steps[t]->in[i]->id]];
                if (e < 0) continue;
                if (fill) {
                    saved[e].readers[saved[e].n_readers] = plan->steps[t];
                    ((int *)saved[e].reader_steps)[saved[e].n_readers] = t;
                }
                saved[e].n_readers++;
            }
        for (int e = 0; !fill && e < n; e++) {
            saved[e].readers = calloc((size_t)saved[e].n_readers + 1, sizeof *saved[e].readers);
            saved[e].reader_steps = calloc((size_t)saved[e].n_readers + 1, sizeof *saved[e].reader_steps);
            if (!saved[e].readers || !saved[e].reader_steps) return false;
            saved[e].n_readers = 0;
        }
    }
    return true;
}

cg_saved *cg_plan_saved(const cg_plan *plan, int *n) {
    *n = 0;
    int *entry = malloc(((size_t)plan->n_storages + 1) * sizeof *entry);
    if (!entry) return NULL;
    for (int s = 0; s < plan->n_storages; s++) entry[s] = plan->storages[s].category == CG_SAVED ? (*n)++ : -1;
    cg_saved *saved = calloc((size_t)*n + 1, sizeof *saved);
    for (int s = 0; saved && s < plan->n_storages; s++)
        if (entry[s] >= 0)
            saved[entry[s]] = (cg_saved){.value = plan->storages[s].value, .bytes = plan->storages[s].bytes};
    if (saved && !list_readers(plan, saved, *n, entry)) {
        cg_saved_free(saved, *n);
        saved = NULL;
    }
    free(entry);
    if (!saved) *n = 0;
    return saved;
}

void cg_saved_free(cg_saved *saved, int n) {
    for (int i = 0; saved && i < n; i++) {
        free(saved[i].readers);
        free((void *)saved[i].reader_steps);
    }
    free(saved);
}
