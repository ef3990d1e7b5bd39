#include "graph/op.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Nodes, values, names and attributes live in a pool that dies with the graph. */
typedef struct pool_block {
    struct pool_block *next;
    size_t used, size;
    _Alignas(16) char bytes[];
} pool_block;

struct cg_building {
    cg_context at; /* outer: the last one entered */
    pool_block *pool;
    int nodes_capacity, values_capacity;
    /* Leaves by name: a table of open addressing, at most half full, of their ids plus 1. What a rewind forgot may stay in
     * it: such an id is another value's by then, or nobody's. */
    int *leaves;
    size_t leaf_slots, leaf_slots_used; /* the first a power of two */
};

static void *pool_take(cg_graph *graph, size_t bytes) {
    bytes = (bytes + 15) & ~(size_t)15;
    pool_block *block = graph->inside->pool;
    if (!block || block->size - block->used < bytes) {
        size_t size = bytes > 65536 ? bytes : 65536;
        block = malloc(sizeof *block + size);
        if (!block) return cg_graph_no_memory(graph, "while the graph is built");
        *block = (pool_block){graph->inside->pool, 0, size};
        graph->inside->pool = block;
    }
    void *p = block->bytes + block->used;
    block->used += bytes;
    return memset(p, 0, bytes);
}

static const char *pool_text(cg_graph *graph, const char *text) {
    size_t n = strlen(text) + 1;
    char *copy = pool_take(graph, n);
    return copy ? memcpy(copy, text, n) : "";
}

static bool grow(cg_graph *graph, void **array, int *capacity, int n, size_t element) {
    if (n < *capacity) return true;
    int larger = *capacity ? 2 * *capacity : 256;
    void *p = realloc(*array, (size_t)larger * element);
    if (!p) return cg_graph_no_memory(graph, "while the graph is built");
    *array = p;
    *capacity = larger;
    return true;
}

cg_graph *cg_graph_new(const cg_op_set *ops) {
    cg_graph *graph = calloc(1, sizeof *graph);
    if (!graph) return NULL;
    graph->inside = calloc(1, sizeof *graph->inside);
    if (!graph->inside) {
        free(graph);
        return NULL;
    }
    graph->inside->at.graph = graph;
    graph->ops = ops;
    graph->max_value_bytes = (int64_t)1 << 50;
    return graph;
}

void cg_graph_free(cg_graph *graph) {
    if (!graph) return;
    for (cg_context *entered = graph->inside->at.outer; entered; entered = entered->outer)
        entered->graph = NULL;
    for (pool_block *block = graph->inside->pool, *next; block; block = next) {
        next = block->next;
        free(block);
    }
    free(graph->inside->leaves);
    free(graph->inside);
    free(graph->nodes);
    free(graph->values);
    free(graph);
}

const cg_error *cg_graph_error(const cg_graph *graph) {
    return graph->error.code == CG_OK ? NULL : &graph->error;
}

static void fail_in_scope(cg_graph *graph, const char *op, const char *format, va_list args) {
    if (graph->error.code != CG_OK) return;
    cg_fail_va(&graph->error, CG_BAD_INPUT, format, args);
    if (op) cg_error_at(&graph->error, "%s", op);
    if (graph->inside->at.scope[0]) cg_error_at(&graph->error, "%s", graph->inside->at.scope);
}

cg_value *cg_graph_fail(cg_graph *graph, const char *format, ...) {
    va_list args;
    va_start(args, format);
    fail_in_scope(graph, NULL, format, args);
    va_end(args);
    return NULL;
}

cg_value *cg_graph_no_memory(cg_graph *graph, const char *when) {
    cg_fail(&graph->error, CG_FAILED, "out of memory %s", when);
    return NULL;
}

const char *cg_scope_now(const cg_graph *graph) { return graph->inside->at.scope; }

cg_pass cg_pass_now(const cg_graph *graph) { return graph->inside->at.pass; }

void cg_context_enter(cg_context *before, cg_graph *graph, const char *scope, cg_pass pass,
                      const cg_node *cause) {
    cg_context *at = &graph->inside->at;
    *before = *at;
    at->outer = before;
    at->pass = pass;
    at->cause = cause;
    if (scope && snprintf(at->scope, sizeof at->scope, "%s", scope) >= (int)sizeof at->scope)
        cg_graph_fail(graph, "the scope is longer than %zu bytes", sizeof at->scope - 1);
}

void cg_context_deeper(cg_context *before, cg_graph *graph, const char *format, ...) {
    cg_context *at = &graph->inside->at;
    cg_context_enter(before, graph, NULL, at->pass, at->cause);
    char part[128];
    va_list args;
    va_start(args, format);
    vsnprintf(part, sizeof part, format, args);
    va_end(args);
    const size_t n = strlen(at->scope), room = sizeof at->scope - n;
    if (strlen(part) + 2 > room)
        cg_graph_fail(graph, "the scope %s is nested too deeply", part);
    else
        snprintf(at->scope + n, room, "%s%s", n ? "/" : "", part);
}

void cg_context_restore(cg_context *before) {
    if (before->graph) before->graph->inside->at = *before;
}

const char *cg_pass_name(cg_pass pass) {
    static const char *const names[CG_PASSES] = {"forward", "backward", "recompute", "optimize"};
    return names[pass];
}

cg_node **cg_graph_reorder(cg_graph *graph, cg_node **nodes, int n) {
    cg_node **old = graph->nodes;
    graph->nodes = nodes;
    graph->n_nodes = graph->inside->nodes_capacity = n;
    for (int i = 0; i < n; i++) nodes[i]->id = i;
    return old;
}

cg_graph_mark cg_graph_mark_now(const cg_graph *graph) {
    const pool_block *block = graph->inside->pool;
    return (cg_graph_mark){graph->n_nodes, graph->n_values, (void *)block, block ? block->used : 0};
}

void cg_graph_rewind(cg_graph *graph, const cg_graph_mark *mark) {
    pool_block **head = &graph->inside->pool;
    while (*head != mark->block) {
        pool_block *next = (*head)->next;
        free(*head);
        *head = next;
    }
    if (*head) (*head)->used = mark->used;
    graph->n_nodes = mark->n_nodes;
    graph->n_values = mark->n_values;
    graph->error = (cg_error){0};
}

static cg_value *value_new(cg_graph *graph, const char *op, const char *name, const char *scope, cg_dtype dtype,
                           cg_shape shape) {
    int64_t bytes = cg_tensor_bytes(dtype, &shape);
    if (bytes > graph->max_value_bytes) {
        char text[128];
        return cg_graph_fail(graph, "%s%s%s %s of %s is larger than the limit of %lld bytes for one value", op,
                             op[0] ? ": " : "", name, cg_shape_text(&shape, text, sizeof text),
                             cg_dtype_name(dtype), (long long)graph->max_value_bytes);
    }
    if (!grow(graph, (void **)&graph->values, &graph->inside->values_capacity, graph->n_values, sizeof(void *)))
        return NULL;
    cg_value *value = pool_take(graph, sizeof *value);
    if (!value) return NULL;
    value->id = graph->n_values;
    value->dtype = dtype;
    value->shape = shape;
    value->name = name;
    value->scope = scope;
    graph->values[graph->n_values++] = value;
    return value;
}

/* ---- leaves ---- */

static bool is_named(const cg_value *leaf, const char *full_name) {
    const size_t n = strlen(leaf->scope);
    if (!n) return !strcmp(leaf->name, full_name);
    return !strncmp(leaf->scope, full_name, n) && full_name[n] == '/' && !strcmp(leaf->name, full_name + n + 1);
}

/* The slot of the leaf of this name, or the free one where it belongs. */
static int *leaf_slot(const cg_graph *graph, const char *full_name) {
    const struct cg_building *inside = graph->inside;
    uint64_t hash = UINT64_C(0xcbf29ce484222325); /* FNV-1a */
    for (const char *c = full_name; *c; c++) hash = (hash ^ (unsigned char)*c) * UINT64_C(0x100000001b3);
    for (size_t s = hash;; s++) {
        int *slot = &inside->leaves[s & (inside->leaf_slots - 1)];
        if (!*slot) return slot;
        const cg_value *value = *slot <= graph->n_values ? graph->values[*slot - 1] : NULL;
        if (value && value->leaf && is_named(value, full_name)) return slot;
    }
}

static void enter_leaf(cg_graph *graph, const cg_value *leaf, const char *full_name) {
    *leaf_slot(graph, full_name) = leaf->id + 1;
    graph->inside->leaf_slots_used++;
}

/* Room for one more leaf in the table; false when memory is out. */
static bool grow_leaves(cg_graph *graph) {
    struct cg_building *inside = graph->inside;
    if (2 * (inside->leaf_slots_used + 1) <= inside->leaf_slots) return true;
    size_t n_leaves = 0, slots = 64;
    for (int v = 0; v < graph->n_values; v++) n_leaves += graph->values[v]->leaf != CG_LEAF_NONE;
    while (slots < 4 * (n_leaves + 1)) slots *= 2;
    int *larger = calloc(slots, sizeof *larger);
    if (!larger) return cg_graph_no_memory(graph, "while the graph is built");
    free(inside->leaves);
    inside->leaves = larger;
    inside->leaf_slots = slots;
    inside->leaf_slots_used = 0;
    for (int v = 0; v < graph->n_values; v++) {
        const cg_value *leaf = graph->values[v];
        if (leaf->leaf) enter_leaf(graph, leaf, leaf->name - (leaf->scope[0] ? strlen(leaf->scope) + 1 : 0));
    }
    return true;
}

cg_value *cg_leaf(cg_graph *graph, cg_leaf_kind kind, const char *name, cg_dtype dtype, cg_shape shape) {
    if (graph->error.code != CG_OK) return NULL;
    const char *scope = cg_scope_now(graph);
    const size_t n = scope[0] ? strlen(scope) + 1 : 0, bytes = n + strlen(name) + 1;
    char *full_name = pool_take(graph, bytes); /* the leaf's name is the end of it, for grow_leaves() */
    if (!full_name || !grow_leaves(graph)) return NULL;
    snprintf(full_name, bytes, "%s%s%s", scope, n ? "/" : "", name);
    if (cg_leaf_find(graph, full_name)) return cg_graph_fail(graph, "there is a leaf named %s already", name);
    if (kind == CG_LEAF_NONE) return cg_graph_fail(graph, "leaf %s has no kind", name);
    if (kind == CG_LEAF_PARAMETER && !cg_dtype_is_real(dtype))
        return cg_graph_fail(graph, "parameter %s is %s, expected f32, f64 or bf16", name,
                             cg_dtype_name(dtype));
    cg_value *value = value_new(graph, "", full_name + n, pool_text(graph, scope), dtype, shape);
    if (!value) return NULL;
    value->leaf = kind;
    value->needs_grad = kind == CG_LEAF_PARAMETER;
    enter_leaf(graph, value, full_name);
    return value;
}

cg_value *cg_leaf_find(const cg_graph *graph, const char *full_name) {
    if (!graph->inside->leaf_slots) return NULL;
    const int entry = *leaf_slot(graph, full_name);
    return entry ? graph->values[entry - 1] : NULL;
}

/* The sentence for an input that is missing or of the wrong number; false when refused. */
static bool inputs_fit(cg_infer *infer) {
    const cg_op *op = infer->op;
    int named = 0;
    while (named < CG_MAX_IN && op->in[named]) named++;
    if (op->variadic ? infer->n_in < 1 : infer->n_in != named)
        return cg_refuse(infer, "expected %s%d inputs, got %d", op->variadic ? "at least " : "",
                         op->variadic ? 1 : named, infer->n_in);
    for (int i = 0; i < infer->n_in; i++) {
        const cg_value *value = infer->in[i];
        if (!value && !(op->optional & CG_BIT(op->variadic ? 0 : i)))
            return cg_refuse(infer, "input %s is missing", cg_op_in_name(op, i));
        if (value && (value->id >= infer->graph->n_values || infer->graph->values[value->id] != value))
            return cg_refuse(infer, "input %s belongs to another graph", cg_op_in_name(op, i));
    }
    return !op->attr_bytes || infer->attr || cg_refuse(infer, "attributes are missing");
}

cg_value *cg_apply(cg_graph *graph, const cg_op *op, const void *attr, cg_value *const *in, int n_in) {
    if (graph->error.code != CG_OK) return NULL;
    cg_infer infer = {.graph = graph, .op = op, .n_in = n_in, .in = in, .attr = attr};
    while (infer.n_out < CG_MAX_OUT && op->out[infer.n_out]) infer.n_out++;
    if (!inputs_fit(&infer) || !op->infer(&infer)) {
        if (graph->error.code == CG_OK) cg_refuse(&infer, "refused its inputs");
        return NULL;
    }
    if (!grow(graph, (void **)&graph->nodes, &graph->inside->nodes_capacity, graph->n_nodes, sizeof(void *)))
        return NULL;
    cg_node *node = pool_take(graph, sizeof *node);
    if (!node) return NULL;
    node->op = op;
    node->n_in = n_in;
    node->n_out = infer.n_out;
    node->in = pool_take(graph, sizeof(void *) * (size_t)(n_in + 1));
    node->out = pool_take(graph, sizeof(void *) * (size_t)(infer.n_out + 1));
    void *attr_copy = op->attr_bytes ? pool_take(graph, op->attr_bytes) : NULL;
    node->scope = pool_text(graph, graph->inside->at.scope);
    node->pass = graph->inside->at.pass;
    node->cause = graph->inside->at.cause;
    if (graph->error.code != CG_OK) return NULL;
    if (attr_copy) memcpy(attr_copy, attr, op->attr_bytes);
    node->attr = attr_copy;
    /* a gradient that is not written yet is wanted all the same: autodiff refuses it instead of dropping it */
    unsigned flows = op->no_grad && !strncmp(op->no_grad, "not yet", 7) ? ~0u : op->differentiable;
    bool needs_grad = false;
    for (int i = 0; i < n_in; i++) {
        node->in[i] = in[i];
        needs_grad |= in[i] && in[i]->needs_grad && (flows & CG_BIT(op->variadic ? 0 : i));
    }
    for (int s = 0; s < infer.n_out; s++) {
        cg_value *out =
            value_new(graph, op->name, op->out[s], node->scope, infer.out_dtype[s], infer.out_shape[s]);
        if (!out) return NULL;
        out->producer = node;
        out->slot = s;
        out->needs_grad = needs_grad && cg_dtype_is_real(out->dtype) && !(op->constant_out & CG_BIT(s));
        node->out[s] = out;
    }
    node->id = graph->n_nodes;
    graph->nodes[graph->n_nodes++] = node;
    return infer.n_out ? node->out[0] : NULL;
}

cg_value *cg_output(cg_value *value, int slot) { return value ? value->producer->out[slot] : NULL; }

cg_value *cg_keep(cg_value *value) {
    if (value) value->keep = true;
    return value;
}

int64_t cg_dim(const cg_value *value, int axis) { return value ? value->shape.dims[axis] : 0; }

const char *cg_value_text(const cg_value *value, char *text, size_t text_bytes) {
    const char *slash = value->scope[0] ? "/" : "";
    if (value->producer)
        snprintf(text, text_bytes, "%s%s%s.%s", value->scope, slash, value->producer->op->name, value->name);
    else
        snprintf(text, text_bytes, "%s%s%s", value->scope, slash, value->name);
    return text;
}

const cg_value *cg_value_root(const cg_value *value) {
    while (value->producer && value->producer->op->alias) value = value->producer->in[0];
    return value;
}

/* ---- helpers of infer ---- */

bool cg_refuse(cg_infer *infer, const char *format, ...) {
    va_list args;
    va_start(args, format);
    fail_in_scope(infer->graph, infer->op->name, format, args);
    va_end(args);
    return false;
}

const char *cg_op_in_name(const cg_op *op, int i) { return op->in[op->variadic ? 0 : i]; }

bool cg_expect_dims(cg_infer *infer, int i, int n_dims) {
    const cg_value *value = infer->in[i];
    if (value->shape.n_dims == n_dims) return true;
    char text[128];
    return cg_refuse(infer, "%s has shape %s, expected %d dimensions", cg_op_in_name(infer->op, i),
                     cg_shape_text(&value->shape, text, sizeof text), n_dims);
}

bool cg_expect_dim(cg_infer *infer, int i, int axis, int64_t dim, const char *because) {
    const cg_value *value = infer->in[i];
    if (value->shape.dims[axis] == dim) return true;
    char text[128];
    return cg_refuse(infer, "%s has shape %s, expected %lld in dimension %d (%s)", cg_op_in_name(infer->op, i),
                     cg_shape_text(&value->shape, text, sizeof text), (long long)dim, axis, because);
}

static bool is_statistic(const cg_op *op, int i) { return op->statistic_in & CG_BIT(op->variadic ? 0 : i); }

cg_dtype cg_statistic_dtype(cg_dtype dtype) { return dtype == CG_BF16 ? CG_F32 : dtype; }

bool cg_expect_dtype(cg_infer *infer, int i, cg_dtype dtype) {
    if (is_statistic(infer->op, i)) dtype = cg_statistic_dtype(dtype);
    if (infer->in[i]->dtype == dtype) return true;
    return cg_refuse(infer, "%s is %s, expected %s", cg_op_in_name(infer->op, i),
                     cg_dtype_name(infer->in[i]->dtype), cg_dtype_name(dtype));
}

bool cg_expect_real(cg_infer *infer, int i) {
    const cg_dtype dtype = infer->in[i]->dtype;
    const bool statistic = is_statistic(infer->op, i);
    if (cg_dtype_is_real(dtype) && !(statistic && dtype == CG_BF16)) return true;
    return cg_refuse(infer, "%s is %s, expected %s", cg_op_in_name(infer->op, i), cg_dtype_name(dtype),
                     statistic ? "f32 or f64" : "f32, f64 or bf16");
}

bool cg_expect_same(cg_infer *infer, int i, int j) {
    const cg_value *a = infer->in[i], *b = infer->in[j];
    if (!cg_expect_dtype(infer, i, b->dtype)) return false;
    if (cg_shape_equal(&a->shape, &b->shape)) return true;
    char ta[128], tb[128];
    return cg_refuse(infer, "%s has shape %s, expected %s as %s has", cg_op_in_name(infer->op, i),
                     cg_shape_text(&a->shape, ta, sizeof ta), cg_shape_text(&b->shape, tb, sizeof tb),
                     cg_op_in_name(infer->op, j));
}

void cg_infer_out(cg_infer *infer, int slot, cg_dtype dtype, cg_shape shape) {
    infer->out_dtype[slot] = infer->op->statistic_out & CG_BIT(slot) ? cg_statistic_dtype(dtype) : dtype;
    infer->out_shape[slot] = shape;
}

const cg_op *cg_op_find(const cg_op_set *ops, const char *name) {
    for (int i = 0; i < ops->n; i++)
        if (!strcmp(ops->list[i]->name, name)) return ops->list[i];
    return NULL;
}

cg_kernel cg_op_kernel(const cg_op *op, cg_dtype dtype) {
    const cg_kernel kernel = op->run[dtype][cg_isa_used()];
    return kernel ? kernel : op->run[dtype][CG_PORTABLE];
}

cg_dtype cg_node_dtype(const cg_node *node) {
    cg_dtype first = CG_I32;
    for (int i = 0; i < node->n_in + node->n_out; i++) {
        const cg_value *value = i < node->n_in ? node->in[i] : node->out[i - node->n_in];
        if (!value || !cg_dtype_is_real(value->dtype)) continue;
        if (value->dtype == CG_BF16) return CG_BF16;
        if (first == CG_I32) first = value->dtype;
    }
    return first;
}

bool cg_wants_grad(const cg_node *node, int i) {
    return node->in[i] && node->in[i]->needs_grad &&
           (node->op->differentiable & CG_BIT(node->op->variadic ? 0 : i));
}

double cg_node_bytes(const cg_node *node) {
    double bytes = 0;
    for (int i = 0; i < node->n_in; i++)
        if (node->in[i]) bytes += (double)cg_tensor_bytes(node->in[i]->dtype, &node->in[i]->shape);
    for (int s = 0; s < node->n_out; s++)
        bytes += (double)cg_tensor_bytes(node->out[s]->dtype, &node->out[s]->shape);
    return bytes;
}
