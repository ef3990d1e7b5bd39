/* How the search works. Every set of recomputations that matters is a chain of decisions: walk the forward nodes from
 * the last to the first; a node that nothing in backward needs (neither a backward node nor a clone decided before) has
 * no decision; any other is kept or cloned. Three things are cheap to know while only some decisions are made:
 *
 *   forced[t]  bytes that are alive at step t whatever the open decisions are. A value is alive while forward reads it,
 *              and from its first to its last reader within a group of backward nodes, be it kept or cloned; a kept one
 *              also in between. The largest forced[t] bounds the peak from below.
 *   time       of the clones decided so far, which further decisions can only raise.
 *   need       an open value that backward reads costs at least its own clones when it is not kept. So what must go at
 *              the fullest step costs at least what a fractional knapsack pays for it.
 *
 * A branch is left when no peak that it can reach is cheaper than the point the frontier has already. Good points are
 * needed early: they come from greedy descents, each of which always empties the fullest step. Peaks are never taken
 * from the simulation: every point of the frontier was rewritten, planned and laid out. */
#include "graph/frontier.h"

#include <stdlib.h>
#include <string.h>

/* ---- one set ---- */

double cg_node_us(const cg_node *node) {
    const double flops_per_us = cg_node_dtype(node) == CG_F64 ? 40e3 : 80e3, bytes_per_us = 10e3, start_us = 2;
    cg_cost cost = node->op->cost ? node->op->cost(node) : (cg_cost){0, cg_node_bytes(node)};
    double compute = cost.flops / flops_per_us, move = cost.bytes / bytes_per_us;
    return start_us + (compute > move ? compute : move);
}

/* Forward nodes come before every clone, so a rewrite leaves their numbers as they are. */
static double time_of(const cg_node *forward, const double *node_us) {
    if (forward->op->alias) return 0;
    return node_us ? node_us[forward->id] : cg_node_us(forward);
}

bool cg_recompute_trial(cg_graph *graph, const bool *chosen, const double *node_us,
                        const cg_plan_options *options, int64_t floor_limit, cg_trial *trial, cg_error *error) {
    *trial = (cg_trial){0};
    int n_clones;
    cg_rewrite *undo = cg_recompute_try(graph, chosen, &n_clones, error);
    if (!undo) return false;
    cg_plan_options limited = options ? *options : (cg_plan_options){0};
    limited.floor_limit = floor_limit;
    cg_plan *plan = cg_plan_make(graph, &limited, error);
    for (int t = 0; plan && t < plan->n_steps; t++) {
        const cg_node *node = plan->steps[t];
        if (node->pass != CG_RECOMPUTE || node->op->alias) continue;
        trial->n_clones++;
        trial->extra_us += time_of(node->cause, node_us);
        trial->extra_flops += node->op->cost ? node->op->cost(node).flops : 0;
    }
    if (plan) {
        trial->peak_bytes = plan->peak_bytes;
        trial->floor_bytes = plan->floor_bytes;
    }
    bool ok = plan != NULL;
    cg_plan_free(plan);
    cg_recompute_undo(graph, undo);
    return ok;
}

/* ---- what a search knows of the graph ---- */

/* Up to FEW candidates all count; of more, those whose bytes are above 1/LEAST_SHARE of the peak. */
enum { NEVER = 1 << 30, FEW = 24, LEAST_SHARE = 512 };

/* An output of a candidate, with everything that shares its storage. */
typedef struct output {
    int64_t bytes;
    int birth;         /* the first step where it surely has bytes of its own */
    int forward_end;   /* last step where forward needs it; -1: forward needs it only for backward's sake */
    int *first, *last; /* by group: first and last step where a backward node reads it; NEVER and -1: none */
    int last_read;     /* of all groups; -1: backward does not read it */
    bool *anyway;      /* by step: alive in every plan */
} output;

typedef struct candidate {
    cg_node *node;
    double us;
    output out[CG_MAX_OUT];
    int first_out;        /* outputs of all candidates are numbered through */
    int in[CG_MAX_IN][2]; /* inputs made by candidates: which candidate, which output */
    int n_inputs_listed;
    double least_us;  /* its clones when it is not kept: one for each group that reads it */
    int64_t *release; /* by step: bytes that go there when it is not kept */
    bool read;        /* some backward node reads it */
} candidate;

typedef struct search {
    cg_graph *graph;
    const double *node_us;
    const cg_plan_options *options;
    cg_error *error;
    cg_frontier *frontier;
    cg_plan *plan; /* recomputing nothing: its steps are the clock */
    int n_steps, n_groups, n, n_outs;
    int *group_of;         /* by step; -1 outside backward */
    candidate *list;       /* in order of the graph */
    struct prices *prices; /* for falling targets */
    int n_prices;
    int64_t *base; /* forced bytes while nothing is decided */
    bool *chosen;  /* by node number, for trials */
    long max_trials, max_visits;
} search;

static int64_t storage_bytes(const search *s, const cg_value *value) {
    int storage = s->plan->storage_of[value->id];
    return storage < 0 ? 0 : s->plan->storages[storage].reserved;
}

/* Nodes that run whatever is recomputed: what kept values, changed leaves and choices need. */
static bool *find_fixed(const search *s) {
    const cg_plan *plan = s->plan;
    bool *fixed = calloc((size_t)plan->n_steps + 1, sizeof *fixed);
    bool *needed = calloc((size_t)s->graph->n_values + 1, sizeof *needed);
    for (int t = plan->n_steps - 1; fixed && needed && t >= 0; t--) {
        const cg_node *node = plan->steps[t];
        bool forward = node->pass == CG_FORWARD;
        fixed[t] = !forward || node->op->mutates || node->op->replay == CG_REPLAY_CHOICE;
        for (int o = 0; o < node->n_out; o++) fixed[t] |= node->out[o]->keep || needed[node->out[o]->id];
        for (int i = 0; forward && fixed[t] && i < node->n_in; i++)
            if (node->in[i]) needed[node->in[i]->id] = true;
    }
    free(needed);
    if (needed) return fixed;
    free(fixed);
    return NULL;
}

/* Step numbers of nodes; groups as recompute forms them: consecutive backward nodes of one scope. */
static void find_groups(search *s, int *step_of) {
    for (int n = 0; n < s->graph->n_nodes; n++) step_of[n] = -1;
    for (int t = 0; t < s->n_steps; t++) {
        step_of[s->plan->steps[t]->id] = t;
        s->group_of[t] = -1;
    }
    const char *scope = NULL;
    for (int n = 0; n < s->graph->n_nodes; n++) {
        const cg_node *node = s->graph->nodes[n];
        if (node->pass != CG_BACKWARD) continue;
        if (!scope || strcmp(scope, node->scope)) s->n_groups++;
        scope = node->scope;
        if (step_of[n] >= 0) s->group_of[step_of[n]] = s->n_groups - 1;
    }
}

/* Candidates: what backward reads and recompute may clone, and in turn what those need; with more bytes than one part in
 * least_share of the peak (0: whatever their size). */
static bool find_candidates(search *s, int *candidate_of, int least_share) {
    s->n = 0;
    bool *wanted = calloc((size_t)s->graph->n_values + 1, sizeof *wanted);
    bool *is_candidate = calloc((size_t)s->graph->n_nodes + 1, sizeof *is_candidate);
    bool ok = wanted && is_candidate;
    int64_t small = least_share ? s->plan->peak_bytes / least_share : -1;
    for (int t = s->n_steps - 1; ok && t >= 0; t--) {
        cg_node *node = s->plan->steps[t];
        bool reads = node->pass == CG_BACKWARD;
        if (node->pass == CG_FORWARD && !node->op->alias && cg_recompute_may_clone(node)) {
            int64_t bytes = 0;
            for (int o = 0; o < node->n_out; o++) {
                reads |= wanted[node->out[o]->id];
                bytes += storage_bytes(s, node->out[o]);
            }
            reads &= bytes > small;
            is_candidate[node->id] = reads;
            s->n += reads;
        }
        for (int i = 0; reads && i < node->n_in; i++)
            if (node->in[i]) wanted[cg_value_root(node->in[i])->id] = true;
    }
    s->list = ok ? calloc((size_t)s->n + 1, sizeof *s->list) : NULL;
    int c = 0;
    for (int n = 0; s->list && n < s->graph->n_nodes; n++) {
        candidate_of[n] = -1;
        if (!is_candidate[n]) continue;
        candidate_of[n] = c;
        s->list[c].node = s->graph->nodes[n];
        s->list[c++].us = time_of(s->graph->nodes[n], s->node_us);
    }
    free(wanted);
    free(is_candidate);
    return s->list != NULL;
}

static bool describe(search *s, candidate *c, const int *candidate_of) {
    cg_node *node = c->node;
    size_t groups = (size_t)s->n_groups + 1;
    c->first_out = s->n_outs;
    s->n_outs += node->n_out;
    c->release = calloc((size_t)s->n_steps + 1, sizeof *c->release);
    if (!c->release) return false;
    for (int o = 0; o < node->n_out; o++) {
        output *out = &c->out[o];
        out->bytes = storage_bytes(s, node->out[o]);
        out->forward_end = out->last_read = -1;
        out->first = malloc(groups * sizeof *out->first);
        out->last = malloc(groups * sizeof *out->last);
        out->anyway = calloc((size_t)s->n_steps + 1, sizeof *out->anyway);
        if (!out->first || !out->last || !out->anyway) return false;
        for (int g = 0; g < s->n_groups; g++) {
            out->first[g] = NEVER;
            out->last[g] = -1;
        }
    }
    for (int i = 0; i < node->n_in; i++) {
        const cg_value *root = node->in[i] ? cg_value_root(node->in[i]) : NULL;
        if (!root || !root->producer || candidate_of[root->producer->id] < 0) continue;
        if (c->n_inputs_listed == CG_MAX_IN) break; /* a variadic op: fewer inputs only loosen the bounds */
        c->in[c->n_inputs_listed][0] = candidate_of[root->producer->id];
        c->in[c->n_inputs_listed++][1] = root->slot;
    }
    return true;
}

static void find_readers(search *s, const bool *fixed, const int *candidate_of) {
    for (int t = 0; t < s->n_steps; t++) {
        const cg_node *node = s->plan->steps[t];
        for (int i = 0; i < node->n_in; i++) {
            const cg_value *root = node->in[i] ? cg_value_root(node->in[i]) : NULL;
            if (!root || !root->producer || candidate_of[root->producer->id] < 0) continue;
            output *out = &s->list[candidate_of[root->producer->id]].out[root->slot];
            int g = s->group_of[t];
            if (g < 0) {
                if (fixed[t] && out->forward_end < t) out->forward_end = t;
            } else if (!node->op->alias) {
                if (out->first[g] > t) out->first[g] = t;
                out->last[g] = out->last_read = t;
            }
        }
    }
}

static void find_base(search *s, const bool *fixed, const int *candidate_of) {
    for (int k = 0; k < s->plan->n_storages; k++) {
        const cg_storage *storage = &s->plan->storages[k];
        const cg_value *value = storage->value;
        const cg_node *producer = value ? value->producer : storage->node;
        if (value && producer && candidate_of[producer->id] >= 0 && !storage->kept) continue;
        /* an output may lie in the place of an input that dies there: it counts from the next step on */
        int first = storage->first + (value && producer && producer->op->overwrites);
        if (!value && producer->pass == CG_FORWARD && !fixed[storage->first]) continue;
        if (value && producer && producer->pass == CG_FORWARD && !storage->kept && !fixed[storage->first])
            continue;
        for (int t = first; t <= storage->last; t++) s->base[t] += storage->reserved;
    }
}

/* Where each output is alive in any case, which `base` gets, and what goes when it is not kept. */
static void find_releases(search *s, const bool *fixed, const int *step_of) {
    for (int c = 0; c < s->n; c++) {
        candidate *k = &s->list[c];
        int step = step_of[k->node->id];
        for (int o = 0; o < k->node->n_out; o++) {
            output *out = &k->out[o];
            int storage = s->plan->storage_of[k->node->out[o]->id];
            k->read |= out->last_read >= 0;
            if (storage < 0 || s->plan->storages[storage].kept)
                out->bytes = 0;                                 /* counted in base, and never goes */
            out->birth = step + (k->node->op->overwrites != 0); /* it may begin in the place of an input */
            for (int t = out->birth; t < s->n_steps; t++) {
                int g = s->group_of[t];
                out->anyway[t] = (fixed[step] && (t == step || t <= out->forward_end)) ||
                                 (g >= 0 && t >= out->first[g] && t <= out->last[g]);
                if (out->anyway[t])
                    s->base[t] += out->bytes;
                else if (t <= out->last_read)
                    k->release[t] += out->bytes;
            }
        }
    }
}

/* A clone needs its inputs. One that backward does not read, that no other node reads and that is at least as large: to
 * keep it in place of the output lets nothing go, so it is cloned too, and so on. */
static double chain_us(const search *s, const candidate *k, const int *readers) {
    int64_t bytes = 0;
    for (int o = 0; o < k->node->n_out; o++) bytes += k->out[o].bytes;
    double us = k->us;
    for (int i = 0; i < k->n_inputs_listed; i++) {
        const candidate *source = &s->list[k->in[i][0]];
        const output *out = &source->out[k->in[i][1]];
        if (!source->read && readers[k->in[i][0]] == 1 && out->bytes >= bytes)
            us += chain_us(s, source, readers);
    }
    return us;
}

static bool find_least_times(search *s) {
    int *readers = calloc((size_t)s->n + 1, sizeof *readers);
    for (int c = 0; readers && c < s->n; c++)
        for (int i = 0; i < s->list[c].n_inputs_listed; i++) readers[s->list[c].in[i][0]]++;
    for (int c = 0; readers && c < s->n; c++) {
        candidate *k = &s->list[c];
        double us = chain_us(s, k, readers);
        for (int g = 0; g < s->n_groups; g++) {
            bool reads = false;
            for (int o = 0; o < k->node->n_out; o++) reads |= k->out[o].last[g] >= 0;
            if (reads) k->least_us += us;
        }
    }
    free(readers);
    return readers != NULL;
}

/* ---- the frontier ---- */

static const double tie_us = 1e-6; /* sums of the same times in another order */

static void point_free(cg_frontier_point *point) { free(point->chosen); }

static bool add_point(search *s, const cg_trial *trial) {
    cg_frontier *f = s->frontier;
    int at = 0, end;
    while (at < f->n_points && f->points[at].trial.peak_bytes > trial->peak_bytes) at++;
    /* points behind `at` have at most this peak: is one of them as fast? */
    for (int i = at; i < f->n_points; i++)
        if (f->points[i].trial.extra_us <= trial->extra_us + tie_us) return true;
    if (at < f->n_points && f->points[at].trial.peak_bytes == trial->peak_bytes) { /* slower: goes */
        point_free(&f->points[at]);
        memmove(&f->points[at], &f->points[at + 1], (size_t)(f->n_points - at - 1) * sizeof *f->points);
        f->n_points--;
    }
    for (end = at; at > 0 && f->points[at - 1].trial.extra_us >= trial->extra_us - tie_us;) at--;
    for (int i = at; i < end; i++) point_free(&f->points[i]);
    if (f->n_points) memmove(&f->points[at], &f->points[end], (size_t)(f->n_points - end) * sizeof *f->points);
    f->n_points -= end - at;
    cg_frontier_point *points = realloc(f->points, (size_t)(f->n_points + 1) * sizeof *points);
    bool *chosen = malloc((size_t)f->n_nodes + 1);
    if (points) f->points = points;
    if (!points || !chosen) {
        free(chosen);
        return cg_fail(s->error, CG_FAILED, "out of memory in the search for a budget");
    }
    memcpy(chosen, s->chosen, (size_t)f->n_nodes);
    memmove(&points[at + 1], &points[at], (size_t)(f->n_points - at) * sizeof *points);
    points[at] = (cg_frontier_point){.trial = *trial, .chosen = chosen};
    f->n_points++;
    return true;
}

/* Try a set of candidates for real; 0: no limit. */
static bool try_set(search *s, const bool *cloned, int64_t floor_limit) {
    cg_frontier *f = s->frontier;
    for (int c = 0; c < s->n; c++) s->chosen[s->list[c].node->id] = cloned[c];
    cg_trial trial;
    f->n_trials++;
    if (!cg_recompute_trial(s->graph, s->chosen, s->node_us, s->options, floor_limit, &trial, s->error))
        return false;
    return !trial.peak_bytes || add_point(s, &trial);
}

/* ---- simulation ---- */

/* What is known after some decisions, made from the last candidate to the first. */
typedef struct state {
    double us;       /* of the clones so far */
    int64_t *forced; /* by step */
    int64_t *open;   /* by step: bytes that open decisions could make go */
    int *need;       /* by output of a candidate, and group: step before which a clone reads it; NEVER: none */
} state;

static int *need_of(const search *s, const state *st, int c, int o) {
    return st->need + (size_t)(s->list[c].first_out + o) * (size_t)s->n_groups;
}

static size_t need_count(const search *s) { return (size_t)s->n_outs * (size_t)s->n_groups; }

static bool is_needed(const search *s, const state *st, int c) {
    if (s->list[c].read) return true;
    for (int o = 0; o < s->list[c].node->n_out; o++)
        for (int g = 0; g < s->n_groups; g++)
            if (need_of(s, st, c, o)[g] < NEVER) return true;
    return false;
}

/* Alive at this step whether kept or cloned, by the decisions so far. */
static bool is_settled(const search *s, const output *out, const int *need, int t) {
    int g = s->group_of[t];
    return out->anyway[t] || (g >= 0 && t >= need[g] && t <= out->last[g]);
}

/* A decision is being made: its bytes are open no longer. */
static void close_decision(const search *s, state *st, int c) {
    for (int o = 0; o < s->list[c].node->n_out; o++) {
        const output *out = &s->list[c].out[o];
        const int *need = need_of(s, st, c, o);
        for (int t = out->birth; t <= out->last_read; t++)
            if (!is_settled(s, out, need, t)) st->open[t] -= out->bytes;
    }
}

static void decide_keep(const search *s, state *st, int c) {
    close_decision(s, st, c);
    for (int o = 0; o < s->list[c].node->n_out; o++) {
        const output *out = &s->list[c].out[o];
        const int *need = need_of(s, st, c, o);
        int end = out->last_read;
        for (int g = 0; g < s->n_groups; g++)
            if (need[g] < NEVER && need[g] - 1 > end) end = need[g] - 1;
        for (int t = out->birth; t <= end; t++)
            if (!is_settled(s, out, need, t)) st->forced[t] += out->bytes;
    }
}

/* A clone will read an output before step `at`; where backward reads it later in the group, it stays until then. */
static void add_need(const search *s, state *st, int c, int o, int g, int at) {
    const output *out = &s->list[c].out[o];
    int *need = need_of(s, st, c, o);
    if (need[g] <= at) return;
    int until = need[g] < out->first[g] ? need[g] : out->first[g];
    for (int t = at; out->last[g] >= 0 && t < until; t++) {
        if (out->anyway[t]) continue;
        st->forced[t] += out->bytes;
        if (t <= out->last_read) st->open[t] -= out->bytes;
    }
    need[g] = at;
}

static void decide_clone(const search *s, state *st, int c) {
    const candidate *k = &s->list[c];
    close_decision(s, st, c);
    for (int g = 0; g < s->n_groups; g++) {
        int at = NEVER;
        for (int o = 0; o < k->node->n_out; o++) {
            if (k->out[o].first[g] < at) at = k->out[o].first[g];
            if (need_of(s, st, c, o)[g] < at) at = need_of(s, st, c, o)[g];
        }
        if (at == NEVER) continue;
        st->us += k->us;
        for (int i = 0; i < k->n_inputs_listed; i++) add_need(s, st, k->in[i][0], k->in[i][1], g, at);
    }
}

static void begin(const search *s, state *st) {
    st->us = 0;
    memcpy(st->forced, s->base, (size_t)s->n_steps * sizeof *st->forced);
    for (size_t i = 0; i < need_count(s); i++) st->need[i] = NEVER;
}

static void simulate(const search *s, const bool *cloned, state *st) {
    begin(s, st);
    for (int c = s->n - 1; c >= 0; c--) {
        if (!is_needed(s, st, c)) continue;
        if (cloned[c])
            decide_clone(s, st, c);
        else
            decide_keep(s, st, c);
    }
}

static int fullest(const search *s, const int64_t *bytes) {
    int at = 0;
    for (int t = 1; t < s->n_steps; t++)
        if (bytes[t] > bytes[at]) at = t;
    return at;
}

static bool state_new(const search *s, state *st) {
    size_t steps = (size_t)s->n_steps + 1;
    st->forced = calloc(steps, sizeof *st->forced);
    st->open = calloc(steps, sizeof *st->open);
    st->need = calloc(need_count(s) + 1, sizeof *st->need);
    return st->forced && st->open && st->need;
}

static void state_free(state *st) {
    free(st->forced);
    free(st->open);
    free(st->need);
}

static void state_copy(const search *s, state *to, const state *from) {
    to->us = from->us;
    memcpy(to->forced, from->forced, (size_t)s->n_steps * sizeof *to->forced);
    memcpy(to->open, from->open, (size_t)s->n_steps * sizeof *to->open);
    memcpy(to->need, from->need, need_count(s) * sizeof *to->need);
}

/* ---- greedy descents ---- */

/* A clone of c alone would keep its inputs alive instead: take along those that nothing keeps already. */
static void add_chain(const search *s, bool *cloned, int c) {
    cloned[c] = true;
    for (int i = 0; i < s->list[c].n_inputs_listed; i++) {
        int source = s->list[c].in[i][0];
        if (!cloned[source] && !s->list[source].read) add_chain(s, cloned, source);
    }
}

typedef struct descent {
    bool *cloned, *move, *best;
    state now, trial;
} descent;

/* Give back what does not lower the fullest step any more, dearest first. */
static void trim(search *s, descent *d) {
    simulate(s, d->cloned, &d->now);
    int64_t limit = d->now.forced[fullest(s, d->now.forced)];
    for (int pass = 0; pass < 2; pass++)
        for (int c = 0; c < s->n; c++) {
            if (!d->cloned[c]) continue;
            d->cloned[c] = false;
            simulate(s, d->cloned, &d->trial);
            bool lower = d->trial.us < d->now.us - tie_us;
            if (lower && d->trial.forced[fullest(s, d->trial.forced)] <= limit)
                d->now.us = d->trial.us;
            else
                d->cloned[c] = true;
        }
    simulate(s, d->cloned, &d->now);
}

/* Would it help at step t not to keep c: is it alive there, and only for being kept? */
static bool is_kept_at(const search *s, const state *st, int c, int t) {
    for (int o = 0; o < s->list[c].node->n_out; o++) {
        const output *out = &s->list[c].out[o];
        const int *need = need_of(s, st, c, o);
        int end = out->last_read;
        for (int g = 0; g < s->n_groups; g++)
            if (need[g] < NEVER && need[g] - 1 > end) end = need[g] - 1;
        if (out->bytes && t >= out->birth && t <= end && !is_settled(s, out, need, t)) return true;
    }
    return false;
}

/* One step down: the move that takes most from the fullest step for its time; `power` weighs bytes against time. */
static bool step_down(search *s, descent *d, int power) {
    int full = fullest(s, d->now.forced);
    double best = 0;
    for (int c = 0; c < s->n; c++) {
        if (d->cloned[c] || !is_kept_at(s, &d->now, c, full)) continue;
        for (int chain = 0; chain < 2; chain++) {
            memcpy(d->move, d->cloned, (size_t)s->n);
            if (chain)
                add_chain(s, d->move, c);
            else
                d->move[c] = true;
            simulate(s, d->move, &d->trial);
            double gain = (double)(d->now.forced[full] - d->trial.forced[full]), us = d->trial.us - d->now.us;
            if (gain <= 0) continue;
            double score = gain / (us > tie_us ? us : tie_us);
            for (int p = 1; p < power; p++) score *= gain;
            if (score <= best) continue;
            best = score;
            memcpy(d->best, d->move, (size_t)s->n);
        }
    }
    if (best > 0) memcpy(d->cloned, d->best, (size_t)s->n);
    return best > 0;
}

static bool descend(search *s) {
    size_t n = (size_t)s->n + 1;
    descent d = {.cloned = calloc(n, 1), .move = calloc(n, 1), .best = calloc(n, 1)};
    bool ok = d.cloned && d.move && d.best && state_new(s, &d.now) && state_new(s, &d.trial);
    if (!ok) cg_fail(s->error, CG_FAILED, "out of memory in the search for a budget");
    for (int power = 1; ok && power <= 3; power++) {
        memset(d.cloned, 0, n);
        simulate(s, d.cloned, &d.now);
        for (int step = 0; ok && step < 2 * s->n && s->frontier->n_trials < s->max_trials; step++) {
            if (!step_down(s, &d, power)) break;
            memcpy(d.best, d.cloned, (size_t)s->n);
            trim(s, &d);
            ok = try_set(s, d.cloned, 0);
            if (power == 1) continue; /* goes on from the trimmed set; the others from the whole one */
            memcpy(d.cloned, d.best, (size_t)s->n);
            simulate(s, d.cloned, &d.now);
        }
    }
    free(d.cloned);
    free(d.move);
    free(d.best);
    state_free(&d.now);
    state_free(&d.trial);
    return ok;
}

/* ---- branch and bound ---- */

/* What must be paid to bring every step down to a target is a covering problem: minimise the time of what goes, such that
 * at each step enough bytes go. Any prices y[t] >= 0 of a byte at step t bound it from below (weak duality):
 *
 *     sum_t y[t] (forced[t] + open[t] - target)  -  sum over open c of max(0, sum_t y[t] release_c[t] - least_us_c)
 *
 * and the bound stays valid for any target and any state. So prices are found once, for a few targets at the root. */
typedef struct prices {
    double target;
    int n; /* steps with a price */
    int *step;
    double *y;
    double *worth; /* by candidate: sum_t y[t] release_c[t] */
} prices;

typedef struct offer {
    double y; /* at this price of a byte the candidate lets its bytes go */
    double bytes;
} offer;

static int lower_offer(const void *a, const void *b) {
    const offer *x = a, *y = b;
    return x->y < y->y ? -1 : x->y > y->y ? 1 : x->bytes < y->bytes ? -1 : x->bytes > y->bytes;
}

/* The best price at one step while all others stay: as high as it takes to let enough go. */
static double best_price(const search *s, const double *worth, int t, double old, double over, offer *offers) {
    int n = 0;
    for (int c = 0; c < s->n; c++) {
        double bytes = (double)s->list[c].release[t];
        if (bytes <= 0) continue;
        double left = s->list[c].least_us - (worth[c] - old * bytes);
        offers[n++] = (offer){left > 0 ? left / bytes : 0, bytes};
    }
    qsort(offers, (size_t)n, sizeof *offers, lower_offer);
    for (int i = 0; i < n; i++) {
        over -= offers[i].bytes;
        if (over <= 0) return offers[i].y;
    }
    return n ? offers[n - 1].y
             : 0; /* no price is enough: the state cannot reach the target, which others find out */
}

static bool find_prices(const search *s, const state *root, prices *p, double target) {
    size_t steps = (size_t)s->n_steps + 1;
    *p = (prices){.target = target};
    p->step = calloc(steps, sizeof *p->step);
    p->y = calloc(steps, sizeof *p->y);
    p->worth = calloc((size_t)s->n + 1, sizeof *p->worth);
    offer *offers = calloc((size_t)s->n + 1, sizeof *offers);
    bool ok = p->step && p->y && p->worth && offers;
    for (int t = 0; ok && t < s->n_steps; t++) {
        int64_t here = root->forced[t] + root->open[t];
        bool hill = (t == 0 || here >= root->forced[t - 1] + root->open[t - 1]) &&
                    (t + 1 == s->n_steps || here > root->forced[t + 1] + root->open[t + 1]);
        if (hill && (double)here > target) p->step[p->n++] = t;
    }
    for (int sweep = 0; ok && sweep < 12; sweep++)
        for (int i = 0; i < p->n; i++) {
            int t = p->step[i];
            double over = (double)(root->forced[t] + root->open[t]) - target;
            double y = best_price(s, p->worth, t, p->y[i], over, offers);
            for (int c = 0; c < s->n; c++) p->worth[c] += (y - p->y[i]) * (double)s->list[c].release[t];
            p->y[i] = y;
        }
    int kept = 0;
    for (int i = 0; i < p->n; i++) {
        if (p->y[i] <= 0) continue;
        p->step[kept] = p->step[i];
        p->y[kept++] = p->y[i];
    }
    p->n = kept;
    free(offers);
    return ok;
}

static void prices_free(prices *p) {
    free(p->step);
    free(p->y);
    free(p->worth);
}

/* The least further time in which open decisions can bring every step to `target`; 1e300: they cannot. */
static double least_us(const search *s, const state *st, int n_open, int64_t target) {
    for (int t = 0; t < s->n_steps; t++)
        if (st->forced[t] > target) return 1e300;
    double best = 0;
    int at = 0;
    while (at + 1 < s->n_prices && s->prices[at + 1].target >= (double)target) at++;
    for (int k = at > 3 ? at - 3 : 0; k <= at + 3 && k < s->n_prices; k++) {
        const prices *p = &s->prices[k];
        double us = 0;
        for (int i = 0; i < p->n; i++) {
            int t = p->step[i];
            us += p->y[i] * (double)(st->forced[t] + st->open[t] - target);
        }
        for (int c = 0; c < n_open; c++)
            if (p->worth[c] > s->list[c].least_us) us -= p->worth[c] - s->list[c].least_us;
        if (us > best) best = us;
    }
    return best;
}

/* One gap of the frontier: sets whose peak is below that of the point before, in less time than the point behind. */
typedef struct hunt {
    state *stack;
    bool *cloned;
    int64_t below;
    long visits_left;
} hunt;

static double time_to_beat(const search *s, int64_t below) {
    const cg_frontier_point *found = cg_frontier_fit(s->frontier, below - 1);
    return found ? found->trial.extra_us - tie_us : 1e300;
}

static bool branch(search *s, hunt *h, int n_open) {
    const state *st = &h->stack[s->n - n_open];
    int c = n_open - 1;
    while (c >= 0 && !is_needed(s, st, c)) h->cloned[c--] = false; /* nothing to decide */
    if (h->visits_left-- <= 0) return true;
    if (st->us + least_us(s, st, c + 1, h->below - 1) >= time_to_beat(s, h->below)) return true;
    if (c < 0) return try_set(s, h->cloned, h->below - 1);
    state *next = &h->stack[s->n - c];
    for (int clone = 0; clone < 2; clone++) {
        state_copy(s, next, st);
        h->cloned[c] = clone;
        if (clone)
            decide_clone(s, next, c);
        else
            decide_keep(s, next, c);
        if (!branch(s, h, c)) return false;
    }
    return true;
}

/* The state before any decision, and prices for targets between its fullest step and the least possible. */
static bool find_root(search *s, state *root) {
    enum { TARGETS = 48 };
    if (!state_new(s, root)) return false;
    begin(s, root);
    int64_t least = root->forced[fullest(s, root->forced)], most = s->frontier->points[0].trial.floor_bytes;
    for (int c = 0; c < s->n; c++)
        for (int t = 0; t < s->n_steps; t++) root->open[t] += s->list[c].release[t];
    s->prices = calloc(TARGETS, sizeof *s->prices);
    bool ok = s->prices != NULL;
    for (int k = 0; ok && k < TARGETS; k++) {
        double target = (double)most - (double)(most - least) * k / TARGETS;
        ok = find_prices(s, root, &s->prices[s->n_prices++], target);
    }
    return ok;
}

/* From the loosest budget down: look for a better set in each gap, until none is there or the visits are used up. Behind
 * many gaps that could not be closed in a row the rest is left to the bound alone. */
static bool close_gaps(search *s, hunt *h, const state *root) {
    enum { HOPELESS = 4 };
    int in_vain = 0;
    long left = HOPELESS * s->max_visits; /* of all gaps together */
    double bound = 0;
    for (int i = 0; i < s->frontier->n_points; i++) {
        h->below = s->frontier->points[i].trial.peak_bytes;
        long share = in_vain < HOPELESS && left > 0 ? left < s->max_visits ? left : s->max_visits : 0;
        h->visits_left = share;
        state_copy(s, &h->stack[0], root);
        if (h->visits_left && !branch(s, h, s->n)) return false;
        /* what was found lies behind point i; the point may be gone when a set with less peak was as fast */
        int behind = 0;
        while (behind < s->frontier->n_points && s->frontier->points[behind].trial.peak_bytes >= h->below)
            behind++;
        i = behind - 1;
        left -= share - (h->visits_left > 0 ? h->visits_left : 0);
        bool closed = h->visits_left > 0;
        in_vain = closed ? 0 : in_vain + 1;
        double least = least_us(s, root, s->n, h->below - 1);
        if (least < bound) least = bound;      /* less peak never takes less time */
        if (behind == s->frontier->n_points) { /* nothing lies below the last point */
            bool none = closed || least >= 1e300;
            s->frontier->least_bytes = none ? h->below : root->forced[fullest(s, root->forced)];
            s->frontier->exact &= none;
            break;
        }
        cg_frontier_point *point = &s->frontier->points[behind];
        point->least_us = closed || least > point->trial.extra_us ? point->trial.extra_us : least;
        bound = point->least_us;
        s->frontier->exact &= closed;
    }
    return true;
}

static bool search_all(search *s) {
    state root = {0};
    hunt h = {.stack = calloc((size_t)s->n + 2, sizeof *h.stack),
              .cloned = calloc((size_t)s->n + 1, sizeof(bool))};
    bool ok = h.stack && h.cloned && find_root(s, &root);
    for (int d = 0; ok && d <= s->n; d++) ok = state_new(s, &h.stack[d]);
    s->frontier->exact = true;
    ok = ok ? close_gaps(s, &h, &root)
            : cg_fail(s->error, CG_FAILED, "out of memory in the search for a budget");
    for (int d = 0; h.stack && d <= s->n; d++) state_free(&h.stack[d]);
    free(h.stack);
    free(h.cloned);
    state_free(&root);
    return ok;
}

/* ---- all of it ---- */

static bool prepare(search *s) {
    size_t n_nodes = (size_t)s->graph->n_nodes + 1;
    s->n_steps = s->plan->n_steps;
    s->group_of = malloc(((size_t)s->n_steps + 1) * sizeof *s->group_of);
    s->base = calloc((size_t)s->n_steps + 1, sizeof *s->base);
    s->chosen = calloc(n_nodes, sizeof *s->chosen);
    int *step_of = malloc(n_nodes * sizeof *step_of), *candidate_of = malloc(n_nodes * sizeof *candidate_of);
    bool *fixed = find_fixed(s), ok = s->group_of && s->base && s->chosen && step_of && candidate_of && fixed;
    if (ok) find_groups(s, step_of);
    ok = ok && find_candidates(s, candidate_of, 0);
    if (ok && s->n > FEW) {
        free(s->list);
        ok = find_candidates(s, candidate_of, LEAST_SHARE);
    }
    for (int c = 0; ok && c < s->n; c++) ok = describe(s, &s->list[c], candidate_of);
    if (ok) {
        find_readers(s, fixed, candidate_of);
        find_base(s, fixed, candidate_of);
        find_releases(s, fixed, step_of);
        ok = find_least_times(s);
    }
    free(step_of);
    free(candidate_of);
    free(fixed);
    return ok || cg_fail(s->error, CG_FAILED, "out of memory in the search for a budget");
}

static void search_free(search *s) {
    for (int c = 0; s->list && c < s->n; c++) {
        for (int o = 0; o < CG_MAX_OUT; o++) {
            free(s->list[c].out[o].first);
            free(s->list[c].out[o].last);
            free(s->list[c].out[o].anyway);
        }
        free(s->list[c].release);
    }
    free(s->list);
    for (int k = 0; k < s->n_prices; k++) prices_free(&s->prices[k]);
    free(s->prices);
    free(s->group_of);
    free(s->base);
    free(s->chosen);
    cg_plan_free(s->plan);
}

cg_frontier *cg_frontier_make(cg_graph *graph, const double *node_us, const cg_plan_options *options,
                              long max_visits, cg_error *error) {
    search s = {.graph = graph,
                .node_us = node_us,
                .options = options,
                .error = error,
                .max_trials = 4000,
                .max_visits = max_visits ? max_visits : 50000};
    s.frontier = calloc(1, sizeof *s.frontier);
    bool ok = s.frontier != NULL || cg_fail(error, CG_FAILED, "out of memory in the search for a budget");
    if (ok) s.frontier->n_nodes = graph->n_nodes;
    ok = ok && (s.plan = cg_plan_make(graph, options, error)) != NULL && prepare(&s);
    bool *nothing = ok ? calloc((size_t)s.n + 1, sizeof *nothing) : NULL;
    ok = ok && (nothing || cg_fail(error, CG_FAILED, "out of memory in the search for a budget"));
    ok = ok && try_set(&s, nothing, 0) && descend(&s) && search_all(&s);
    free(nothing);
    if (s.frontier) s.frontier->n_candidates = s.n;
    cg_frontier *frontier = s.frontier;
    search_free(&s);
    if (ok) return frontier;
    cg_frontier_free(frontier);
    return NULL;
}

void cg_frontier_free(cg_frontier *frontier) {
    if (!frontier) return;
    for (int i = 0; i < frontier->n_points; i++) point_free(&frontier->points[i]);
    free(frontier->points);
    free(frontier);
}

const cg_frontier_point *cg_frontier_fit(const cg_frontier *frontier, int64_t budget_bytes) {
    for (int i = 0; i < frontier->n_points; i++)
        if (frontier->points[i].trial.peak_bytes <= budget_bytes) return &frontier->points[i];
    return NULL;
}
