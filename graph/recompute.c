#include "graph/op.h"
#include "core/base/suggest.h"

#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct policy_term {
    char ops[192]; /* comma-separated patterns */
    char scope[160];
} policy_term;

enum { MAX_TERMS = 32 };

static bool op_matches(const char *patterns, const char *name) {
    char copy[192];
    strcpy(copy, patterns); /* a term's, which has as much room */
    for (char *save = NULL, *p = strtok_r(copy, ",", &save); p; p = strtok_r(NULL, ",", &save))
        if (!fnmatch(p, name, 0)) return true;
    return false;
}

/* "layer*" covers "layer2/attn": the pattern is tried on the scope and on every scope above it. */
static bool scope_matches(const char *pattern, const char *scope) {
    if (!*pattern) return true;
    char prefix[256];
    snprintf(prefix, sizeof prefix, "%s", scope);
    for (;;) {
        if (!fnmatch(pattern, prefix, FNM_PATHNAME)) return true;
        char *slash = strrchr(prefix, '/');
        if (!slash) return false;
        *slash = 0;
    }
}

/* Every pattern must name an op that exists and may be cloned: a misspelt policy that does nothing would look
 * like a policy that saves nothing. */
static bool pattern_is_known(cg_graph *graph, const char *pattern) {
    const cg_op *choice = NULL;
    for (int i = 0; i < graph->ops->n; i++) {
        const cg_op *op = graph->ops->list[i];
        if (fnmatch(pattern, op->name, 0)) continue;
        if (op->replay != CG_REPLAY_CHOICE) return true;
        choice = op;
    }
    if (choice) {
        cg_graph_fail(graph, "recompute policy: %s chooses, so it is never run again; its indices are kept",
                      choice->name);
        return false;
    }
    const char **names = calloc((size_t)graph->ops->n, sizeof *names);
    for (int i = 0; names && i < graph->ops->n; i++) names[i] = graph->ops->list[i]->name;
    const char *near = names ? cg_suggest(pattern, names, graph->ops->n) : NULL;
    free(names);
    cg_graph_fail(graph, "recompute policy: no op is named %s%s%s%s", pattern, near ? "; did you mean " : "",
                  near ? near : "", near ? "?" : "");
    return false;
}

/* The same for scopes: some forward node must be there. */
static bool scope_is_known(cg_graph *graph, const char *pattern) {
    for (int n = 0; n < graph->n_nodes; n++)
        if (graph->nodes[n]->pass == CG_FORWARD && scope_matches(pattern, graph->nodes[n]->scope)) return true;
    if (!*pattern) return true;
    const char **names = calloc((size_t)graph->n_nodes + 1, sizeof *names);
    int n_names = 0;
    for (int n = 0; names && n < graph->n_nodes; n++)
        if (graph->nodes[n]->pass == CG_FORWARD) names[n_names++] = graph->nodes[n]->scope;
    const char *near = names ? cg_suggest(pattern, names, n_names) : NULL;
    free(names);
    cg_graph_fail(graph, "recompute policy: no scope matches %s%s%s%s", pattern, near ? "; did you mean " : "",
                  near ? near : "", near ? "?" : "");
    return false;
}

static int parse_policy(cg_graph *graph, const char *policy, policy_term *terms) {
    int n = 0;
    for (const char *p = policy; *p;) {
        size_t length = strcspn(p, ";");
        char term[384];
        if (length >= sizeof term || n == MAX_TERMS) {
            cg_graph_fail(graph, "recompute policy: too long (at most %d terms of %zu characters)", MAX_TERMS,
                          sizeof term - 1);
            return -1;
        }
        const char *whole = p;
        memcpy(term, p, length);
        term[length] = 0;
        p += length + (p[length] == ';');
        if (!length) continue;
        char *at = strchr(term, '@');
        if (at) *at++ = 0;
        bool no_op = !*term || term[0] == ',' || term[strlen(term) - 1] == ',' || strstr(term, ",,");
        if (no_op || (at && !*at) || strlen(term) >= sizeof terms[n].ops ||
            (at && strlen(at) >= sizeof terms[n].scope)) {
            cg_graph_fail(graph, "recompute policy: expected OP[,OP...][@SCOPE], got \"%.*s\"", (int)length,
                          whole);
            return -1;
        }
        strcpy(terms[n].ops, term);
        strcpy(terms[n].scope, at ? at : "");
        n++;
        for (char *save = NULL, *op = strtok_r(term, ",", &save); op; op = strtok_r(NULL, ",", &save))
            if (!pattern_is_known(graph, op)) return -1;
        if (!scope_is_known(graph, terms[n - 1].scope)) return -1;
    }
    return n;
}

bool cg_recompute_may_clone(const cg_node *node) {
    return node->pass == CG_FORWARD && node->op->replay != CG_REPLAY_CHOICE && !node->op->mutates;
}

bool cg_recompute_match(cg_graph *graph, const char *policy, bool *chosen) {
    memset(chosen, 0, (size_t)graph->n_nodes * sizeof *chosen);
    policy_term terms[MAX_TERMS];
    if (graph->error.code != CG_OK) return false;
    int n_terms = parse_policy(graph, policy, terms);
    for (int n = 0; n < graph->n_nodes; n++)
        for (int i = 0; i < n_terms && cg_recompute_may_clone(graph->nodes[n]); i++)
            chosen[n] |= op_matches(terms[i].ops, graph->nodes[n]->op->name) &&
                         scope_matches(terms[i].scope, graph->nodes[n]->scope);
    return graph->error.code == CG_OK;
}

typedef struct rewrite {
    cg_graph *graph;
    const bool *chosen; /* by node number before the rewrite */
    cg_value **clone;   /* by value id: its clone in the group at hand */
    int n_values;       /* before the rewrite: clones are never cloned again */
    int *changed;       /* by value id: place of the last node so far that changed this leaf, -1: none */
    cg_node **order;    /* the new sequence */
    int n_order, order_capacity;
    int n_clones;
} rewrite;

static bool append(rewrite *r, cg_node *node) {
    if (r->n_order == r->order_capacity) {
        int larger = 2 * r->order_capacity + 256;
        cg_node **order = realloc(r->order, (size_t)larger * sizeof *order);
        if (!order) {
            cg_graph_no_memory(r->graph, "in recompute");
            return false;
        }
        r->order = order;
        r->order_capacity = larger;
    }
    r->order[r->n_order++] = node;
    return true;
}

/* A clone would read what a leaf holds now, its original read what it held before: not the same bits. */
static bool inputs_are_unchanged(rewrite *r, const cg_node *node) {
    for (int i = 0; i < node->n_in; i++) {
        const cg_value *leaf = node->in[i] ? cg_value_root(node->in[i]) : NULL;
        if (!leaf || !leaf->leaf || r->changed[leaf->id] < node->id) continue;
        char name[256];
        cg_graph_fail(r->graph, "recompute: %s cannot run again, %s was changed in between", node->op->name,
                      cg_value_text(leaf, name, sizeof name));
        return false;
    }
    return true;
}

/* A value that recompute rebuilds: made by a chosen node, possibly seen through reshapes. */
static bool is_rebuilt(const rewrite *r, const cg_value *value) {
    if (!value || value->id >= r->n_values) return false;
    const cg_node *source = cg_value_root(value)->producer;
    return source && cg_recompute_may_clone(source) && r->chosen[source->id];
}

/* The clone of `value` in this group, made on first use together with what it needs. */
static cg_value *rebuild(rewrite *r, cg_value *value) {
    if (!is_rebuilt(r, value)) return value;
    if (r->clone[value->id]) return r->clone[value->id];
    cg_node *node = value->producer;
    cg_value **in = calloc((size_t)node->n_in + 1, sizeof *in);
    if (!in) return cg_graph_no_memory(r->graph, "in recompute");
    for (int i = 0; i < node->n_in; i++) in[i] = rebuild(r, node->in[i]);
    CG_WITHIN(r->graph, node->scope, CG_RECOMPUTE, node);
    if (!inputs_are_unchanged(r, node)) {
        free(in);
        return NULL;
    }
    int place = r->graph->n_nodes;
    cg_apply(r->graph, node->op, node->attr, in, node->n_in);
    free(in);
    if (r->graph->error.code != CG_OK) return NULL;
    cg_node *clone = r->graph->nodes[place];
    if (!append(r, clone)) return NULL;
    r->n_clones++;
    for (int s = 0; s < node->n_out; s++) {
        clone->out[s]->needs_grad = false;
        r->clone[node->out[s]->id] = clone->out[s];
    }
    return r->clone[value->id];
}

/* Where an input of a backward node stood before. */
typedef struct edge {
    cg_node *node;
    int i;
    cg_value *value;
} edge;

struct cg_rewrite {
    cg_graph_mark mark;
    cg_node **nodes; /* the sequence before */
    int n_nodes;
    edge *edges;
    int n_edges, edge_capacity;
};

static bool redirect(rewrite *r, cg_rewrite *undo, cg_node *node, int i) {
    cg_value *rebuilt = rebuild(r, node->in[i]);
    if (!undo || rebuilt == node->in[i] || r->graph->error.code != CG_OK) {
        node->in[i] = rebuilt;
        return true;
    }
    if (undo->n_edges == undo->edge_capacity) {
        int larger = 2 * undo->edge_capacity + 64;
        edge *edges = realloc(undo->edges, (size_t)larger * sizeof *edges);
        if (!edges) return cg_graph_no_memory(r->graph, "in recompute");
        undo->edges = edges;
        undo->edge_capacity = larger;
    }
    undo->edges[undo->n_edges++] = (edge){node, i, node->in[i]};
    node->in[i] = rebuilt;
    return true;
}

static void walk(rewrite *r, cg_rewrite *undo) {
    cg_graph *graph = r->graph;
    int n_nodes = graph->n_nodes; /* clones are appended behind these */
    const char *group = NULL;
    for (int n = 0; n < n_nodes && graph->error.code == CG_OK; n++) {
        cg_node *node = graph->nodes[n];
        if (node->pass == CG_BACKWARD) {
            if (!group || strcmp(group, node->scope))
                memset(r->clone, 0, (size_t)r->n_values * sizeof *r->clone);
            group = node->scope;
            for (int i = 0; i < node->n_in; i++)
                if (!redirect(r, undo, node, i)) return;
        }
        for (int i = 0; i < node->n_in && i < CG_MAX_IN; i++)
            if ((node->op->mutates & CG_BIT(i)) && node->in[i]) r->changed[cg_value_root(node->in[i])->id] = n;
        append(r, node);
    }
}

static bool rewrite_graph(cg_graph *graph, const bool *chosen, int *n_clones, cg_rewrite *undo) {
    if (n_clones) *n_clones = 0;
    if (graph->error.code != CG_OK) return false;
    rewrite r = {.graph = graph, .chosen = chosen, .n_values = graph->n_values};
    size_t n_values = (size_t)graph->n_values;
    r.clone = calloc(n_values + 1, sizeof *r.clone);
    r.changed = malloc((n_values + 1) * sizeof *r.changed);
    if (!r.clone || !r.changed) cg_graph_no_memory(graph, "in recompute");
    for (size_t v = 0; r.changed && v < n_values; v++) r.changed[v] = -1;
    const int n_nodes = graph->n_nodes;
    walk(&r, undo);
    bool ok = graph->error.code == CG_OK;
    if (ok) {
        cg_node **before = cg_graph_reorder(graph, r.order, r.n_order);
        if (undo)
            undo->nodes = before, undo->n_nodes = n_nodes;
        else
            free(before);
    } else {
        free(r.order);
    }
    free(r.clone);
    free(r.changed);
    if (n_clones) *n_clones = r.n_clones;
    return ok;
}

bool cg_recompute_nodes(cg_graph *graph, const bool *chosen, int *n_clones) {
    return rewrite_graph(graph, chosen, n_clones, NULL);
}

cg_rewrite *cg_recompute_try(cg_graph *graph, const bool *chosen, int *n_clones, cg_error *error) {
    cg_rewrite *undo = calloc(1, sizeof *undo);
    if (!undo) {
        cg_fail(error, CG_FAILED, "out of memory in recompute");
        return NULL;
    }
    undo->mark = cg_graph_mark_now(graph);
    if (rewrite_graph(graph, chosen, n_clones, undo)) return undo;
    cg_fail(error, graph->error.code, "%s", graph->error.text);
    cg_recompute_undo(graph, undo);
    return NULL;
}

void cg_recompute_undo(cg_graph *graph, cg_rewrite *undo) {
    if (!undo) return;
    for (int e = undo->n_edges - 1; e >= 0; e--)
        undo->edges[e].node->in[undo->edges[e].i] = undo->edges[e].value;
    if (undo->nodes) /* else the rewrite failed, and the sequence is the old one */
        free(cg_graph_reorder(graph, undo->nodes, undo->n_nodes));
    cg_graph_rewind(graph, &undo->mark);
    free(undo->edges);
    free(undo);
}

bool cg_recompute(cg_graph *graph, const char *policy, int *n_clones) {
    if (n_clones) *n_clones = 0;
    bool *chosen = calloc((size_t)graph->n_nodes + 1, sizeof *chosen);
    bool ok =
        chosen ? cg_recompute_match(graph, policy, chosen) : (cg_graph_no_memory(graph, "in recompute"), false);
    ok = ok && cg_recompute_nodes(graph, chosen, n_clones);
    free(chosen);
    return ok;
}
