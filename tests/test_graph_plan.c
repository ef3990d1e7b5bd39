/* Plans against a checker that shares no code with the planner: lifetimes, aliases, categories and the saved
 * set are worked out here from the steps alone, the arena is painted granule by granule, and every value is
 * compared with an interpreter that gives each value memory of its own. */
#include "tests/graph_ops.h"

#include "graph/gradcheck.h"

#include <time.h>

enum { GRAPHS = 200, MAX_VALUES = 2000, LEAVES = 5 };

/* ---- random graphs ---- */

typedef struct dice {
    uint64_t seed, at;
} dice;

static int64_t roll(dice *d, int64_t n) { return cg_random_below(d->seed, 77, d->at++, n); }

typedef struct pool {
    cg_value *list[256];
    int n;
} pool;

static cg_value *pick_value(dice *d, const pool *p) {
    int64_t back = roll(d, 2) ? roll(d, p->n) : roll(d, p->n < 4 ? p->n : 4); /* often a fresh one */
    return p->list[p->n - 1 - back];
}

/* Another value of as many elements, under the shape of `like`; `like` itself when there is none. */
static cg_value *pick_same(cg_graph *graph, dice *d, const pool *p, cg_value *like) {
    for (int k = 0; k < 6; k++) {
        cg_value *other = p->list[roll(d, p->n)];
        if (t_count(other) == t_count(like)) return t_shaped_like(graph, other, like);
    }
    return like;
}

static void random_node(cg_graph *graph, dice *d, pool *p) {
    cg_value *x = pick_value(d, p), *y = NULL;
    int64_t n = t_count(x);
    switch (roll(d, 12)) {
    case 0:
        y = cg_add(graph, x, pick_same(graph, d, p, x));
        break;
    case 1:
    case 2:
        y = T_APPLY(&t_mul, NULL, x, pick_same(graph, d, p, x));
        break;
    case 3:
        y = cg_scale(graph, x, 0.5);
        break;
    case 4:
    case 5:
        y = T_APPLY(&t_relu, NULL, x);
        break;
    case 6:
        y = x->shape.n_dims == 1 ? cg_reshape(graph, x, CG_SHAPE(1, n)) : cg_reshape(graph, x, CG_SHAPE(n));
        break;
    case 7:
        y = cg_detach(graph, x);
        break;
    case 8: {
        cg_value *other = pick_value(d, p);
        if (n + t_count(other) < 300) y = T_APPLY(&t_join, NULL, x, other);
        break;
    }
    case 9:
        y = T_APPLY(&t_part, (&(t_range){n / 3, n - n / 3}), x);
        break;
    case 10:
        y = T_APPLY(&t_twin, NULL, x);
        if (y && p->n < 250) p->list[p->n++] = cg_output(y, 1);
        break;
    case 11:
        y = T_APPLY(&t_pick, NULL, x, T_APPLY(&t_choose, NULL, x));
        break;
    }
    t_expect_fine(graph);
    if (y) p->list[p->n++] = y;
    if (y && roll(d, 12) == 0) cg_keep(y);
}

static const char *const policies[] = {
    "relu", "mul;relu", "*", "*@layer0", "twin,join@l*", "scale;part@layer2", "add,mul,relu,twin,join,part"};

/* Forward in three scopes, backward, sometimes recompute, sometimes nodes that change leaves. */
static cg_graph *random_graph(uint64_t seed) {
    dice dice_ = {seed, 0}, *d = &dice_;
    cg_graph *graph = cg_graph_new(&t_ops);
    pool p = {.n = 0};
    cg_value *leaves[LEAVES], *sums[LEAVES];
    for (int i = 0; i < LEAVES; i++) {
        int64_t n = (int64_t[]){1, 7, 8, 40, 40}[roll(d, 5)];
        char name[16];
        snprintf(name, sizeof name, "w%d", i);
        leaves[i] = t_leaf(graph, roll(d, 3) ? CG_LEAF_PARAMETER : CG_LEAF_INPUT, name, n);
        snprintf(name, sizeof name, "s%d", i);
        sums[i] = t_leaf(graph, CG_LEAF_GRADIENT, name, n);
        leaves[i]->external = roll(d, 8) == 0;
        p.list[p.n++] = leaves[i];
    }
    int n_nodes = 4 + (int)roll(d, 36);
    for (int k = 0; k < n_nodes; k++) {
        CG_SCOPE(graph, "layer%d", 3 * k / n_nodes);
        random_node(graph, d, &p);
    }
    cg_value *loss = cg_keep(T_APPLY(&t_sum, NULL, p.list[p.n - 1]));
    for (int k = 0; k < 2; k++) loss = cg_keep(cg_add(graph, loss, T_APPLY(&t_sum, NULL, pick_value(d, &p))));
    if (roll(d, 4)) {
        cg_value *seed_leaf = t_leaf(graph, CG_LEAF_INPUT, "seed", 1), *grads[LEAVES];
        ck_assert(cg_autodiff(graph, &loss, &seed_leaf, 1, leaves, LEAVES, grads));
        for (int i = 0; i < LEAVES; i++) {
            CG_WITHIN(graph, NULL, CG_BACKWARD, NULL);
            if (roll(d, 2))
                cg_keep(grads[i]);
            else
                T_APPLY(&t_bump, NULL, sums[i], grads[i]);
        }
        if (!leaves[0]->external) {
            CG_WITHIN(graph, NULL, CG_OPTIMIZE, NULL);
            T_APPLY(&t_bump, NULL, leaves[0], cg_scale(graph, grads[0], -0.1));
        }
        if (roll(d, 2)) cg_recompute(graph, policies[roll(d, 7)], NULL);
    }
    if (roll(d, 3) == 0) cg_keep_choices(graph);
    t_expect_fine(graph);
    ck_assert_int_lt(graph->n_values, MAX_VALUES);
    return graph;
}

/* ---- the checker's own facts ---- */

typedef struct facts {
    int n; /* values */
    int *class_of;
    int *birth, *death; /* by class; -1: not in the plan */
    bool *kept;         /* by class, kept directly or under an alias */
    bool *late_read;    /* by class: read by a node of backward or recompute that has a kernel */
    const cg_value **source;
} facts;

static int64_t rounded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

static int64_t class_bytes(const facts *f, int c) {
    return f->source[c]->external ? 0 : cg_tensor_bytes(f->source[c]->dtype, &f->source[c]->shape);
}

static bool is_late(const cg_node *node) { return node->pass == CG_BACKWARD || node->pass == CG_RECOMPUTE; }

static facts facts_of(const cg_graph *graph, const cg_plan *plan) {
    size_t n = (size_t)graph->n_values;
    facts f = {.n = graph->n_values,
               .class_of = calloc(n, sizeof(int)),
               .birth = calloc(n, sizeof(int)),
               .death = calloc(n, sizeof(int)),
               .kept = calloc(n, sizeof(bool)),
               .late_read = calloc(n, sizeof(bool)),
               .source = calloc(n, sizeof(void *))};
    for (int v = 0; v < f.n; v++) {
        const cg_value *value = graph->values[v], *from = value;
        while (from->producer && from->producer->op->alias) from = from->producer->in[0];
        f.class_of[v] = from->id;
        f.source[v] = value;
        f.birth[v] = f.death[v] = value->leaf ? 0 : -1;
        if (value->leaf) f.death[v] = plan->n_steps - 1;
    }
    for (int t = 0; t < plan->n_steps; t++) {
        const cg_node *node = plan->steps[t];
        for (int s = 0; s < node->n_out; s++) {
            int c = f.class_of[node->out[s]->id];
            if (f.birth[c] < 0) f.birth[c] = f.death[c] = t;
            if (node->op->replay == CG_REPLAY_CHOICE && node->out[s]->keep) f.birth[c] = 0; /* held choices */
            if (node->out[s]->keep) f.kept[c] = true;
        }
        for (int i = 0; i < node->n_in; i++) {
            int c = f.class_of[node->in[i]->id];
            ck_assert_int_ge(f.birth[c], 0); /* a producer before its reader */
            if (f.death[c] < t) f.death[c] = t;
            if (is_late(node) && !node->op->alias) f.late_read[c] = true;
        }
    }
    for (int c = 0; c < f.n; c++)
        if (f.kept[c]) f.death[c] = plan->n_steps - 1;
    return f;
}

static void facts_free(facts *f) {
    free(f->class_of);
    free(f->birth);
    free(f->death);
    free(f->kept);
    free(f->late_read);
    free(f->source);
}

/* The steps are the nodes that something kept or changed needs, in the graph's order. */
static void check_steps(const cg_graph *graph, const cg_plan *plan) {
    bool *runs = calloc((size_t)graph->n_nodes + 1, sizeof *runs);
    for (bool more = true; more;) {
        more = false;
        for (int n = 0; n < graph->n_nodes; n++) {
            const cg_node *node = graph->nodes[n];
            ck_assert_int_eq(node->id, n);
            bool needed = node->op->mutates != 0;
            for (int s = 0; s < node->n_out; s++) {
                needed |= node->out[s]->keep;
                for (int m = 0; m < graph->n_nodes; m++)
                    for (int i = 0; runs[m] && i < graph->nodes[m]->n_in; i++)
                        needed |= graph->nodes[m]->in[i] == node->out[s];
            }
            more |= needed && !runs[n];
            runs[n] = needed;
        }
    }
    int t = 0;
    for (int n = 0; n < graph->n_nodes; n++)
        if (runs[n]) ck_assert_ptr_eq(plan->steps[t++], graph->nodes[n]);
    ck_assert_int_eq(t, plan->n_steps);
    free(runs);
}

static cg_category own_category(const facts *f, int c) {
    const cg_value *v = f->source[c];
    if (v->leaf)
        return v->leaf == CG_LEAF_PARAMETER   ? CG_PARAMETER
               : v->leaf == CG_LEAF_GRADIENT  ? CG_GRADIENT
               : v->leaf == CG_LEAF_OPTIMIZER ? CG_OPTIMIZER
                                              : CG_INPUT;
    if (v->producer->pass == CG_FORWARD) return f->late_read[c] ? CG_SAVED : CG_ACTIVATION;
    return v->producer->pass == CG_BACKWARD    ? CG_GRADIENT
           : v->producer->pass == CG_RECOMPUTE ? CG_RECOMPUTED
                                               : CG_OPTIMIZER;
}

/* May the output 0 of step t stand where class c stands? */
static bool may_lie_on(const facts *f, const cg_node *node, int t, int c) {
    int hits = 0, bit = -1;
    for (int i = 0; i < node->n_in; i++)
        if (f->class_of[node->in[i]->id] == c) hits++, bit = i;
    return hits == 1 && (node->op->overwrites & CG_BIT(bit)) && f->death[c] == t && !f->kept[c] &&
           !f->source[c]->leaf;
}

/* Paint the arena at every step; count the bytes of each category. */
static void check_arena(const cg_plan *plan, const facts *f) {
    size_t granules = (size_t)plan->peak_bytes / 64 + 1;
    int *owner = malloc(granules * sizeof *owner);
    int64_t most = 0;
    int most_step = 0;
    ck_assert_int_eq(plan->peak_bytes % 64, 0);
    for (int t = 0; t < plan->n_steps; t++) {
        const cg_node *node = plan->steps[t];
        int64_t own[CG_CATEGORIES] = {0}, bytes[CG_CATEGORIES];
        for (size_t g = 0; g < granules; g++) owner[g] = -1;
        for (int c = 0; c < f->n; c++) {
            if (f->class_of[c] != c || f->birth[c] < 0 || t < f->birth[c] || t > f->death[c]) continue;
            const cg_storage *storage = &plan->storages[plan->storage_of[c]];
            ck_assert_int_eq(storage->bytes, class_bytes(f, c));
            if (f->source[c]->external) {
                ck_assert_int_eq(storage->offset, -1);
                continue;
            }
            if (!storage->bytes) continue;
            ck_assert_int_ge(storage->offset, 0);
            ck_assert_int_eq(storage->offset % 64, 0);
            ck_assert_int_le(storage->offset + rounded(storage->bytes), plan->peak_bytes);
            bool on_input = false;
            for (int64_t g = storage->offset / 64; g < (storage->offset + rounded(storage->bytes)) / 64; g++) {
                int other = owner[g];
                bool born = t == f->birth[c] && node->n_out && f->class_of[node->out[0]->id] == c;
                bool other_born = other >= 0 && t == f->birth[other] && f->class_of[node->out[0]->id] == other;
                bool fine = other < 0 || (born && may_lie_on(f, node, t, other)) ||
                            (other_born && may_lie_on(f, node, t, c));
                if (!fine)
                    ck_abort_msg("step %d (%s): values %d and %d share byte %lld", t, node->op->name, c, other,
                                 (long long)g * 64);
                on_input |= other >= 0;
                owner[g] = c;
            }
            if (!on_input) own[own_category(f, c)] += rounded(storage->bytes);
        }
        size_t scratch = node->op->workspace ? node->op->workspace(node) : 0;
        ck_assert_int_eq(plan->workspace_of[t] >= 0, scratch > 0);
        if (scratch) {
            const cg_storage *storage = &plan->storages[plan->workspace_of[t]];
            ck_assert_int_eq(storage->bytes, (int64_t)scratch);
            for (int64_t g = 0; g < rounded(storage->bytes) / 64; g++)
                ck_assert_int_eq(owner[storage->offset / 64 + g], -1);
            own[CG_WORKSPACE] = rounded(storage->bytes);
        }
        cg_plan_live(plan, t, bytes);
        int64_t total = 0, own_total = 0;
        for (int k = 0; k < CG_CATEGORIES; k++) {
            total += bytes[k];
            own_total += own[k];
        }
        ck_assert_int_eq(total, own_total);
        for (int s = 0; s < plan->n_storages; s++) /* where a value takes another's place, either may count */
            if (plan->storages[s].taken_over >= 0 && plan->storages[s].first == t) goto next;
        for (int k = 0; k < CG_CATEGORIES; k++)
            if (bytes[k] != own[k])
                ck_abort_msg("step %d: %lld bytes of %s, counted %lld", t, (long long)bytes[k],
                             cg_category_name((cg_category)k), (long long)own[k]);
    next:
        if (total > most) {
            most = total;
            most_step = t;
        }
    }
    ck_assert_int_eq(plan->floor_bytes, most);
    ck_assert_int_eq(plan->peak_step, most_step);
    ck_assert_int_ge(plan->peak_bytes, plan->floor_bytes);
    free(owner);
}

static void check_saved(const cg_plan *plan, const facts *f) {
    int n, k = 0;
    cg_saved *saved = cg_plan_saved(plan, &n);
    for (int t = 0; t < plan->n_steps; t++)
        for (int s = 0; s < plan->steps[t]->n_out; s++) {
            const cg_value *v = plan->steps[t]->out[s];
            if (f->class_of[v->id] != v->id || own_category(f, v->id) != CG_SAVED) continue;
            int found = -1;
            for (int e = 0; e < n; e++)
                if (saved[e].value == v) found = e;
            ck_assert_int_eq(found, k++);
            ck_assert_int_eq(saved[found].bytes, class_bytes(f, v->id));
            int readers = 0;
            for (int r = 0; r < plan->n_steps; r++) {
                bool reads = false;
                for (int i = 0; i < plan->steps[r]->n_in; i++)
                    reads |= f->class_of[plan->steps[r]->in[i]->id] == v->id;
                if (!reads || !is_late(plan->steps[r]) || plan->steps[r]->op->alias) continue;
                ck_assert_int_lt(readers, saved[found].n_readers);
                ck_assert_ptr_eq(saved[found].readers[readers], plan->steps[r]);
                ck_assert_int_eq(saved[found].reader_steps[readers], r);
                readers++;
            }
            ck_assert_int_eq(readers, saved[found].n_readers);
        }
    ck_assert_int_eq(k, n);
    cg_saved_free(saved, n);
}

/* ---- the interpreter: every value has memory of its own ---- */

typedef struct reference {
    const cg_plan *plan;
    cg_exec *exec; /* the run that is watched */
    void **data;   /* by value id */
    int compared;  /* steps done here */
} reference;

static size_t value_bytes(const cg_value *v) { return (size_t)cg_tensor_bytes(v->dtype, &v->shape); }

static void reference_step(reference *r, int t) {
    const cg_node *node = r->plan->steps[t];
    cg_tensor in[CG_MAX_IN], out[CG_MAX_OUT];
    for (int i = 0; i < node->n_in; i++)
        in[i] = (cg_tensor){node->in[i]->dtype, node->in[i]->shape, r->data[node->in[i]->id]};
    if (node->op->alias) { /* the same memory: what changes a leaf changes its aliases */
        r->data[node->out[0]->id] = in[0].data;
        return;
    }
    for (int s = 0; s < node->n_out; s++) {
        void **place = &r->data[node->out[s]->id];
        if (!*place) *place = malloc(value_bytes(node->out[s]) + 1);
        out[s] = (cg_tensor){node->out[s]->dtype, node->out[s]->shape, *place};
    }
    cg_error error = {0};
    void *scratch = malloc((node->op->workspace ? node->op->workspace(node) : 0) + 1);
    cg_run_args args = {node->n_in, node->n_out, in, out, node->attr, scratch, &error};
    if (!cg_op_kernel(node->op, CG_F64)(&args)) ck_abort_msg("%s: %s", node->op->name, error.text);
    free(scratch);
}

static void expect_equal(const reference *r, const cg_value *v, int t, const char *what) {
    if (memcmp(cg_exec_data(r->exec, v), r->data[v->id], value_bytes(v)))
        ck_abort_msg("step %d (%s): %s %s of value %d has other bytes", t, r->plan->steps[t]->op->name, what,
                     v->name, v->id);
}

/* Called after each node of the watched run: what it wrote, and what it read and did not overwrite. */
static void compare_step(void *context, int t, const cg_node *node, double us) {
    reference *r = context;
    (void)us;
    for (; r->compared <= t; r->compared++) reference_step(r, r->compared); /* aliases are not watched */
    for (int s = 0; s < node->n_out; s++) expect_equal(r, node->out[s], t, "output");
    for (int i = 0; i < node->n_in; i++) {
        bool lost = false;
        for (int s = 0; s < node->n_out; s++)
            lost |= r->plan->storages[r->plan->storage_of[node->out[s]->id]].taken_over ==
                    r->plan->storage_of[node->in[i]->id];
        if (!lost) expect_equal(r, node->in[i], t, "input");
    }
}

/* Run a plan against the interpreter, from given leaves. */
static void check_run(const cg_graph *graph, const cg_plan *plan, const cg_exec_options *options) {
    cg_exec *exec = t_exec(plan, options);
    reference r = {.plan = plan, .exec = exec, .data = calloc((size_t)graph->n_values, sizeof(void *))};
    void *lent[MAX_VALUES];
    int n_lent = 0;
    for (int v = 0; v < graph->n_values; v++)
        if (graph->values[v]->external)
            cg_exec_bind(exec, graph->values[v], lent[n_lent++] = calloc(1, value_bytes(graph->values[v]) + 1));
    t_fill_leaves(graph, exec, 3);
    for (int v = 0; v < graph->n_values; v++)
        if (graph->values[v]->leaf) {
            r.data[v] = malloc(value_bytes(graph->values[v]) + 1);
            memcpy(r.data[v], cg_exec_data(exec, graph->values[v]), value_bytes(graph->values[v]));
        }
    cg_exec_watch(exec, compare_step, &r);
    t_run(exec, CG_ALL_PASSES);
    for (; r.compared < plan->n_steps; r.compared++) reference_step(&r, r.compared);
    for (int v = 0; v < graph->n_values; v++)
        if (plan->storage_of[v] >= 0 && (graph->values[v]->keep || graph->values[v]->leaf))
            expect_equal(&r, graph->values[v], plan->n_steps - 1, "after the run");
    ck_assert_int_eq(cg_exec_measured_bytes(exec), options->separate ? plan->floor_bytes : plan->peak_bytes);
    for (int v = 0; v < graph->n_values; v++)
        if (!graph->values[v]->producer || !graph->values[v]->producer->op->alias) free(r.data[v]);
    free(r.data);
    cg_exec_free(exec);
    for (int i = 0; i < n_lent; i++) free(lent[i]);
}

START_TEST(random_graphs) {
    double worst = 1, sum = 0;
    uint64_t worst_seed = 0;
    int in_place = 0, clones = 0, saved = 0;
    for (uint64_t seed = 0; seed < GRAPHS; seed++) {
        cg_graph *graph = random_graph(seed);
        for (int k = 0; k < 3; k++) {
            cg_plan *plan =
                t_plan(graph, &(cg_plan_options){.no_reuse_in_place = k == 1, .keep_cloned_originals = k == 2});
            if (k < 2) {
                if (k == 0) check_steps(graph, plan);
                facts f = facts_of(graph, plan);
                check_arena(plan, &f);
                check_saved(plan, &f);
                facts_free(&f);
            }
            check_run(graph, plan, &(cg_exec_options){.poison = true, .verify_recompute = k == 2});
            check_run(graph, plan, &(cg_exec_options){.poison = k, .separate = true});
            double fragmentation = (double)plan->peak_bytes / (double)plan->floor_bytes;
            sum += fragmentation;
            if (fragmentation > worst) {
                worst = fragmentation;
                worst_seed = seed;
            }
            for (int s = 0; s < plan->n_storages; s++) {
                if (k == 1) ck_assert_int_lt(plan->storages[s].taken_over, 0);
                in_place += plan->storages[s].taken_over >= 0;
                saved += plan->storages[s].category == CG_SAVED;
                clones += plan->storages[s].category == CG_RECOMPUTED;
            }
            cg_plan_free(plan);
        }
        cg_graph_free(graph);
    }
    printf("fragmentation of %d plans: mean %.4f, worst %.4f (seed %llu); %d in place, %d saved, %d clones\n",
           3 * GRAPHS, sum / (3 * GRAPHS), worst, (unsigned long long)worst_seed, in_place, saved, clones);
    ck_assert(worst <= 1.25);
    ck_assert(in_place > GRAPHS && saved > GRAPHS && clones > GRAPHS); /* the graphs do exercise these */
}
END_TEST

/* A value that is kept under another shape keeps its bytes, also against the very last step. */
START_TEST(kept_alias_is_not_taken_over) {
    cg_graph *graph = cg_graph_new(&t_ops);
    cg_value *x = t_leaf(graph, CG_LEAF_INPUT, "x", 8), *y = cg_scale(graph, x, 2);
    cg_value *seen = cg_keep(cg_reshape(graph, y, CG_SHAPE(2, 4))), *z = cg_keep(cg_scale(graph, y, 3));
    cg_plan *plan = t_plan(graph, NULL);
    cg_exec *exec = t_exec(plan, NULL);
    t_fill_leaves(graph, exec, 1);
    t_run(exec, CG_ALL_PASSES);
    const double *dx = cg_exec_data(exec, x), *dy = cg_exec_data(exec, seen), *dz = cg_exec_data(exec, z);
    for (int i = 0; i < 8; i++) {
        ck_assert(dy[i] == 2 * dx[i]);
        ck_assert(dz[i] == 6 * dx[i]);
    }
    cg_exec_free(exec);
    cg_plan_free(plan);
    cg_graph_free(graph);
}
END_TEST

/* A leaf is there for the next run, also when the last step alone reads it. */
START_TEST(leaves_are_not_taken_over) {
    cg_graph *graph = cg_graph_new(&t_ops);
    cg_value *x = t_leaf(graph, CG_LEAF_INPUT, "x", 8);
    cg_keep(cg_scale(graph, t_leaf(graph, CG_LEAF_INPUT, "other", 8), 2));
    cg_value *y = cg_keep(T_APPLY(&t_relu, NULL, x));
    cg_plan *plan = t_plan(graph, NULL);
    ck_assert_int_eq(plan->n_steps, 2);
    cg_exec *exec = t_exec(plan, NULL);
    double *data = cg_exec_data(exec, x);
    for (int i = 0; i < 8; i++) data[i] = i - 4;
    t_run(exec, CG_ALL_PASSES);
    for (int i = 0; i < 8; i++) ck_assert(data[i] == i - 4);
    ck_assert(((double *)cg_exec_data(exec, y))[0] == 0);
    cg_exec_free(exec);
    cg_plan_free(plan);
    cg_graph_free(graph);
}
END_TEST

/* A choice that is held keeps its indices while the nodes before it run again. */
START_TEST(held_choice_outlives_a_run) {
    for (int separate = 0; separate < 2; separate++) {
        cg_graph *graph = cg_graph_new(&t_ops);
        cg_value *x = t_leaf(graph, CG_LEAF_INPUT, "x", 16), *early = x;
        for (int k = 0; k < 3; k++) early = T_APPLY(&t_join, NULL, early, early); /* dies before the choice */
        cg_value *small = T_APPLY(&t_part, (&(t_range){100, 16}), early);
        cg_value *index = T_APPLY(&t_choose, NULL, small);
        cg_value *y = cg_keep(T_APPLY(&t_pick, NULL, x, index));
        cg_keep_choices(graph);
        cg_plan *plan = t_plan(graph, NULL);
        cg_exec *exec = t_exec(plan, &(cg_exec_options){.poison = true, .separate = separate});
        t_fill_leaves(graph, exec, 1);
        t_run(exec, CG_ALL_PASSES);
        double *dx = cg_exec_data(exec, x);
        int32_t held[8], *now;
        memcpy(held, cg_exec_data(exec, index), sizeof held);
        for (int i = 0; i < 16; i++) dx[i] = -dx[i]; /* a free choice would now be another one */
        t_run(exec, CG_ALL_PASSES | CG_HOLD_CHOICES);
        ck_assert(!memcmp(held, cg_exec_data(exec, index), sizeof held));
        for (int i = 0; i < 8; i++) ck_assert(((double *)cg_exec_data(exec, y))[i] == dx[held[i]]);
        t_run(exec, CG_ALL_PASSES);
        now = cg_exec_data(exec, index);
        ck_assert(memcmp(held, now, sizeof held));
        cg_exec_free(exec);
        cg_plan_free(plan);
        cg_graph_free(graph);
    }
}
END_TEST

/* An output of another size does not fit where its input lies. */
START_TEST(other_sizes_are_not_in_place) {
    cg_op sum = t_sum, fill = t_fill;
    sum.overwrites = fill.overwrites = 1;
    cg_graph *graph = cg_graph_new(&t_ops);
    cg_value *x = cg_scale(graph, t_leaf(graph, CG_LEAF_INPUT, "x", 40), 2);
    x = T_APPLY(&fill, &CG_SHAPE(40), T_APPLY(&sum, NULL, x));
    cg_keep(cg_scale(graph, x, 3));
    cg_plan *plan = t_plan(graph, NULL);
    int in_place = 0;
    for (int s = 0; s < plan->n_storages; s++) in_place += plan->storages[s].taken_over >= 0;
    ck_assert_int_eq(in_place, 1); /* the last one */
    check_run(graph, plan, &(cg_exec_options){.poison = true});
    cg_plan_free(plan);
    cg_graph_free(graph);
}
END_TEST

/* A backward node that only renames a value does not make it a saved one. */
START_TEST(alias_in_backward_saves_nothing) {
    cg_graph *graph = cg_graph_new(&t_ops);
    cg_value *y = cg_scale(graph, t_leaf(graph, CG_LEAF_INPUT, "x", 8), 2);
    CG_WITHIN(graph, NULL, CG_BACKWARD, NULL);
    cg_value *seen = cg_keep(cg_reshape(graph, y, CG_SHAPE(2, 4)));
    for (int k = 0; k < 2; k++) {
        int n;
        cg_plan *plan = t_plan(graph, NULL);
        cg_saved *saved = cg_plan_saved(plan, &n);
        ck_assert_int_eq(n, k);
        ck_assert_int_eq(plan->storages[plan->storage_of[y->id]].category, k ? CG_SAVED : CG_ACTIVATION);
        cg_saved_free(saved, n);
        cg_plan_free(plan);
        cg_keep(T_APPLY(&t_sum, NULL, seen)); /* one that reads it does */
    }
    cg_graph_free(graph);
}
END_TEST

static void expect_no_plan(const cg_graph *graph, const char *part) {
    cg_error error = {0};
    ck_assert_ptr_null(cg_plan_make(graph, NULL, &error));
    t_expect_text(error.text, part);
}

START_TEST(sizes_that_do_not_fit) {
    int64_t huge = INT64_MAX / 8 - 16; /* elements; one value fits, two do not */
    cg_graph *graph = cg_graph_new(&t_ops);
    expect_no_plan(graph, "nothing to run");
    graph->max_value_bytes = INT64_MAX;
    cg_value *x = t_leaf(graph, CG_LEAF_INPUT, "x", huge);
    expect_no_plan(graph, "nothing to run"); /* a leaf alone */
    cg_keep(cg_scale(graph, T_APPLY(&t_relu, NULL, cg_scale(graph, x, 2)), 3));
    t_expect_fine(graph);
    expect_no_plan(graph, "63 bits");
    cg_graph_free(graph);

    graph = cg_graph_new(&t_ops);
    graph->max_value_bytes = INT64_MAX;
    cg_keep(cg_scale(graph, t_leaf(graph, CG_LEAF_INPUT, "x", INT64_MAX / 8), 2));
    expect_no_plan(graph, "9223372036854775800 bytes");
    cg_graph_free(graph);

    graph = cg_graph_new(&t_ops); /* the graph's own sentence */
    CG_SCOPE(graph, "layer3");
    cg_scale(graph, NULL, 2);
    expect_no_plan(graph, "layer3: scale: input x is missing");
    cg_graph_free(graph);
}
END_TEST

static size_t wide_workspace(const cg_node *node) {
    (void)node;
    return SIZE_MAX - 10;
}

START_TEST(workspace_that_does_not_fit) {
    cg_op wide = t_relu;
    wide.workspace = wide_workspace;
    cg_graph *graph = cg_graph_new(&t_ops);
    cg_value *x = t_leaf(graph, CG_LEAF_INPUT, "x", 3);
    cg_keep(T_APPLY(&wide, NULL, x));
    cg_error error = {0};
    ck_assert_ptr_null(cg_plan_make(graph, NULL, &error));
    ck_assert_msg(!strncmp(error.text, "relu: its workspace of", 22), "%s", error.text);
    cg_graph_free(graph);
}
END_TEST

/* Values without elements have no bytes and still run. */
START_TEST(empty_values) {
    cg_graph *graph = cg_graph_new(&t_ops);
    cg_value *x = t_leaf(graph, CG_LEAF_PARAMETER, "x", 0);
    cg_value *y = cg_keep(T_APPLY(&t_sum, NULL, T_APPLY(&t_relu, NULL, T_APPLY(&t_join, NULL, x, x))));
    for (int separate = 0; separate < 2; separate++) {
        cg_plan *plan = t_plan(graph, NULL);
        cg_exec *exec = t_exec(plan, &(cg_exec_options){.poison = true, .separate = separate});
        t_run(exec, CG_ALL_PASSES);
        ck_assert(*(double *)cg_exec_data(exec, y) == 0);
        ck_assert_int_eq(plan->peak_bytes, 64);
        cg_exec_free(exec);
        cg_plan_free(plan);
    }
    cg_graph_free(graph);
}
END_TEST

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* A step as large as a deep model's: building, planning and listing what is saved take well under a second. */
START_TEST(large_graph_plans_fast) {
    double start = now_s();
    cg_graph *graph = cg_graph_new(&t_ops);
    cg_value *x = t_leaf(graph, CG_LEAF_PARAMETER, "x", 1000), *w[100], *grads[100];
    for (int layer = 0; layer < 100; layer++) {
        CG_SCOPE(graph, "layer%d", layer);
        w[layer] = t_leaf(graph, CG_LEAF_PARAMETER, "w", 1000);
        for (int k = 0; k < 3; k++) {
            cg_value *y = T_APPLY(&t_relu, NULL, T_APPLY(&t_mul, NULL, x, w[layer]));
            int64_t width = 300 + 41 * ((3 * layer + k) % 17); /* sizes differ, so that placing them is work */
            y = T_APPLY(&t_part, (&(t_range){0, width}), T_APPLY(&t_join, NULL, y, cg_scale(graph, x, 2)));
            y = T_APPLY(&t_pad, (&(t_range){100, 1500}), T_APPLY(&t_mul, NULL, y, y));
            y = T_APPLY(&t_part, (&(t_range){50, 1000}), y);
            x = cg_add(graph, x, y);
        }
    }
    cg_value *loss = cg_keep(T_APPLY(&t_sum, NULL, x)), *seed_leaf = t_leaf(graph, CG_LEAF_INPUT, "seed", 1);
    ck_assert(cg_autodiff(graph, &loss, &seed_leaf, 1, w, 100, grads));
    for (int i = 0; i < 100; i++) cg_keep(grads[i]);
    double built = now_s();
    int n_clones, n_saved;
    ck_assert(cg_recompute(graph, "relu;scale", &n_clones));
    double rewritten = now_s();
    cg_plan *plan = t_plan(graph, NULL);
    double planned = now_s();
    cg_saved *saved = cg_plan_saved(plan, &n_saved);
    double listed = now_s();
    printf(
        "%d steps, %d storages: build %.1f ms, recompute %.1f ms (%d clones), plan %.1f ms, saved list %.1f ms "
        "(%d); peak/floor %.4f\n",
        plan->n_steps, plan->n_storages, 1e3 * (built - start), 1e3 * (rewritten - built), n_clones,
        1e3 * (planned - rewritten), 1e3 * (listed - planned), n_saved,
        (double)plan->peak_bytes / (double)plan->floor_bytes);
    ck_assert_int_gt(plan->n_steps, 3000);
    ck_assert(listed - start < 5); /* loose: for sanitizers and busy machines */
    cg_saved_free(saved, n_saved);
    cg_plan_free(plan);
    cg_graph_free(graph);
}
END_TEST

SUITE("graph_plan", random_graphs, kept_alias_is_not_taken_over, leaves_are_not_taken_over,
      held_choice_outlives_a_run, other_sizes_are_not_in_place, alias_in_backward_saves_nothing,
      sizes_that_do_not_fit, workspace_that_does_not_fit, empty_values, large_graph_plans_fast)
