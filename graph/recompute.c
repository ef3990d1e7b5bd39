#include "graph/op.h"
#include "core/suggest.h"

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
    snprintf(copy, sizeof copy, "%s", patterns);
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
        memcpy(term, p, length);
        term[length] = 0;
        p += length + (p[length] == ';');
        if (!length) continue;
        char *at = strchr(term, '@');
        if (at) *at++ = 0;
        if (strlen(term) >= sizeof terms[n].ops || (at && strlen(at) >= sizeof terms[n].scope) ||
            (at && !*at) || !*term) {
            cg_graph_fail(graph, "recompute policy: expected OP[,OP...][@SCOPE], got %.*s", (int)length, p);
            return -1;
        }
        strcpy(terms[n].ops, term);
        strcpy(terms[n].scope, at ? at : "");
        n++;
        for (char *save = NULL, *op = strtok_r(term, ",", &save); op; op = strtok_r(NULL, ",", &save))
            if (!pattern_is_known(graph, op)) return -1;
    }
    return n;
}

static bool is_chosen(const cg_node *node, const policy_term *terms, int n_terms) {
    if (node->pass != CG_FORWARD || node->op->replay == CG_REPLAY_CHOICE || node->op->mutates) return false;
    for (int i = 0; i < n_terms; i++)
        if (op_matches(terms[i].ops, node->op->name) && scope_matches(terms[i].scope, node->scope)) return true;
    return false;
}

typedef struct rewrite {
    cg_graph *graph;
    const policy_term *terms;
    int n_terms;
    cg_value **clone; /* by value id: its clone in the group at hand */
    int n_values;     /* before the rewrite: clones are never cloned again */
    cg_node **order;  /* the new sequence */
    int n_order;
    int n_clones;
} rewrite;

/* A value that recompute rebuilds: made by a chosen node, possibly seen through reshapes. */
static bool is_rebuilt(const rewrite *r, const cg_value *value) {
    if (!value || value->id >= r->n_values) return false;
    const cg_node *source = cg_value_root(value)->producer;
    return source && is_chosen(source, r->terms, r->n_terms);
}

/* The clone of `value` in this group, made on first use together with what it needs. */
static cg_value *rebuild(rewrite *r, cg_value *value) {
    if (!is_rebuilt(r, value)) return value;
    if (r->clone[value->id]) return r->clone[value->id];
    cg_node *node = value->producer;
    cg_value **in = calloc((size_t)node->n_in + 1, sizeof *in);
    if (!in) return cg_graph_fail(r->graph, "out of memory in recompute");
    for (int i = 0; i < node->n_in; i++) in[i] = rebuild(r, node->in[i]);
    strcpy(r->graph->scope, node->scope);
    r->graph->cause = node;
    int place = r->graph->n_nodes;
    cg_apply(r->graph, node->op, node->attr, in, node->n_in);
    free(in);
    if (r->graph->error.code != CG_OK) return NULL;
    cg_node *clone = r->graph->nodes[place];
    r->order[r->n_order++] = clone;
    r->n_clones++;
    for (int s = 0; s < node->n_out; s++) {
        clone->out[s]->needs_grad = false;
        r->clone[node->out[s]->id] = clone->out[s];
    }
    return r->clone[value->id];
}

bool cg_recompute(cg_graph *graph, const char *policy, int *n_clones) {
    if (n_clones) *n_clones = 0;
    policy_term terms[MAX_TERMS];
    if (graph->error.code != CG_OK) return false;
    int n_terms = parse_policy(graph, policy, terms);
    if (n_terms <= 0) return graph->error.code == CG_OK;
    int n_nodes = graph->n_nodes;
    rewrite r = {.graph = graph, .terms = terms, .n_terms = n_terms, .n_values = graph->n_values};
    r.clone = calloc((size_t)graph->n_values + 1, sizeof *r.clone);
    /* a group clones a node at most once, and there are at most as many groups as backward nodes */
    size_t order_size = 0, n_forward = 0, n_backward = 0;
    for (int n = 0; n < n_nodes; n++) (graph->nodes[n]->pass == CG_FORWARD ? n_forward++ : n_backward++);
    order_size = (size_t)n_nodes + n_forward * n_backward + 1;
    r.order = r.clone ? malloc(order_size * sizeof *r.order) : NULL;
    if (!r.order) {
        free(r.clone);
        cg_graph_fail(graph, "out of memory in recompute");
        return false;
    }
    graph->pass = CG_RECOMPUTE;
    const char *group = NULL;
    for (int n = 0; n < n_nodes && graph->error.code == CG_OK; n++) {
        cg_node *node = graph->nodes[n];
        if (node->pass == CG_BACKWARD) {
            if (!group || strcmp(group, node->scope)) memset(r.clone, 0, (size_t)r.n_values * sizeof *r.clone);
            group = node->scope;
            for (int i = 0; i < node->n_in; i++) node->in[i] = rebuild(&r, node->in[i]);
        }
        r.order[r.n_order++] = node;
    }
    graph->pass = CG_FORWARD;
    graph->cause = NULL;
    graph->scope[0] = 0;
    bool ok = graph->error.code == CG_OK;
    if (ok) {
        free(graph->nodes);
        graph->nodes = r.order;
        graph->n_nodes = r.n_order;
        graph->nodes_capacity = (int)order_size;
        for (int n = 0; n < graph->n_nodes; n++) graph->nodes[n]->id = n;
    } else {
        free(r.order);
    }
    free(r.clone);
    if (n_clones) *n_clones = r.n_clones;
    return ok;
}
