/* Recompute: the policy language, which nodes are cloned for whom, and that no choice of them changes a bit. */
#include "tests/graph_ops.h"

static cg_value *relu(cg_graph *graph, cg_value *x) { return T_APPLY(&t_relu, NULL, x); }
static cg_value *mul(cg_graph *graph, cg_value *a, cg_value *b) { return T_APPLY(&t_mul, NULL, a, b); }

/* A graph of n parameters, its loss [1] and their gradients. */
typedef struct net {
    cg_graph *graph;
    cg_value *w[8], *dw[8], *loss, *seed;
    int n;
} net;

static void net_backward(net *m) {
    m->seed = t_leaf(m->graph, CG_LEAF_INPUT, "seed", 1);
    cg_autodiff(m->graph, &m->loss, &m->seed, 1, m->w, m->n, m->dw);
    cg_keep(m->loss);
    for (int i = 0; i < m->n; i++) cg_keep(m->dw[i]);
    t_expect_fine(m->graph);
}

/* One relu in each of these scopes, in a chain. */
static const char *const scopes[] = {"embed", "layer0", "layer0/attn", "layer1/attn/indexer", "layer10/mlp"};
enum { SCOPES = 5 };

static net scoped_net(void) {
    net m = {.graph = cg_graph_new(&t_ops), .n = 1};
    cg_value *x = m.w[0] = t_leaf(m.graph, CG_LEAF_PARAMETER, "w", 8);
    for (int i = 0; i < SCOPES; i++) {
        CG_WITHIN(m.graph, scopes[i], CG_FORWARD, NULL);
        x = relu(m.graph, cg_scale(m.graph, x, 1.5));
    }
    m.loss = T_APPLY_IN(m.graph, &t_sum, NULL, x);
    net_backward(&m);
    return m;
}

START_TEST(policies_that_are_refused) {
    const struct {
        const char *policy, *sentence;
    } refused[] = {
        {"rleu", "recompute policy: no op is named rleu; did you mean relu?"},
        {"relu;mull@layer0", "recompute policy: no op is named mull; did you mean mul?"},
        {"quantize_everything", "recompute policy: no op is named quantize_everything"},
        {"Relu", "no op is named Relu; did you mean relu?"},
        {"choose", "recompute policy: choose chooses, so it is never run again; its indices are kept"},
        {"relu,choose", "choose chooses"},
        {"choo*", "choose chooses"},
        {"@layer0", "expected OP[,OP...][@SCOPE], got \"@layer0\""},
        {"relu;scale@", "expected OP[,OP...][@SCOPE], got \"scale@\""},
        {",", "expected OP[,OP...][@SCOPE], got \",\""},
        {"relu,,mul@layer0;scale", "expected OP[,OP...][@SCOPE], got \"relu,,mul@layer0\""},
        {"relu;,mul", "expected OP[,OP...][@SCOPE], got \",mul\""},
        {"relu@layre0", "recompute policy: no scope matches layre0; did you mean layer0?"},
        {"relu@layer7", "no scope matches layer7; did you mean layer0?"},
        {"relu@attn", "no scope matches attn"},           /* a pattern starts at the top */
        {"relu@*/indexer", "no scope matches */indexer"}, /* * stays within one part of a scope */
        {"relu@*/*/*/*", "no scope matches */*/*/*"},
    };
    for (size_t k = 0; k < sizeof refused / sizeof *refused; k++) {
        net m = scoped_net();
        int n_nodes = m.graph->n_nodes, n_clones = 5;
        ck_assert_msg(!cg_recompute(m.graph, refused[k].policy, &n_clones), "%s", refused[k].policy);
        t_expect_failed(m.graph, refused[k].sentence);
        ck_assert_int_eq(n_clones, 0);
        ck_assert_int_eq(m.graph->n_nodes, n_nodes);
        cg_graph_free(m.graph);
    }
    char longish[600], many[200] = "relu";
    memset(longish, 'x', sizeof longish);
    longish[sizeof longish - 1] = 0;
    for (int i = 0; i < 33; i++) strcat(many, ";mul");
    for (int k = 0; k < 2; k++) {
        net m = scoped_net();
        ck_assert(!cg_recompute(m.graph, k ? many : longish, NULL));
        t_expect_failed(m.graph, "recompute policy: too long");
        cg_graph_free(m.graph);
    }
}
END_TEST

START_TEST(scope_patterns) {
    const struct {
        const char *policy;
        bool covers[SCOPES];
    } policies[] = {
        {"", {0}},
        {";;", {0}},
        {"relu", {1, 1, 1, 1, 1}},
        {"re?u", {1, 1, 1, 1, 1}},
        {"relu@*", {1, 1, 1, 1, 1}},
        {"relu@layer*", {0, 1, 1, 1, 1}},
        {"relu@layer?", {0, 1, 1, 1, 0}},
        {"relu@layer0", {0, 1, 1, 0, 0}},
        {"relu@layer1", {0, 0, 0, 1, 0}}, /* not layer10 */
        {"relu@layer*/attn", {0, 0, 1, 1, 0}},
        {"relu@*/attn/indexer", {0, 0, 0, 1, 0}},
        {"relu@embed;relu@layer10;mul", {1, 0, 0, 0, 1}},
        {"mul,relu@layer0/attn", {0, 0, 1, 0, 0}},
        {"mul", {0}},
    };
    for (size_t k = 0; k < sizeof policies / sizeof *policies; k++) {
        net m = scoped_net();
        int n_clones, want = 0;
        {
            CG_SCOPE(m.graph, "elsewhere");
            if (!cg_recompute(m.graph, policies[k].policy, &n_clones)) t_expect_fine(m.graph);
            ck_assert_str_eq(cg_scope_now(m.graph), "elsewhere");
            ck_assert_int_eq(cg_pass_now(m.graph), CG_FORWARD);
        }
        for (int i = 0; i < SCOPES; i++) {
            int found = 0;
            for (int n = 0; n < m.graph->n_nodes; n++) {
                const cg_node *node = m.graph->nodes[n];
                if (node->pass != CG_RECOMPUTE || strcmp(node->scope, scopes[i])) continue;
                ck_assert_ptr_eq(node->op, &t_relu);
                ck_assert_ptr_eq(node->cause->op, &t_relu);
                ck_assert_str_eq(node->cause->scope, node->scope);
                ck_assert_int_eq(node->cause->pass, CG_FORWARD);
                found++;
            }
            ck_assert_msg(found == policies[k].covers[i], "%s: %d clones in %s", policies[k].policy, found,
                          scopes[i]);
            want += found;
        }
        ck_assert_int_eq(n_clones, want);
        cg_graph_free(m.graph);
    }
}
END_TEST

/* ---- runs ---- */

typedef struct outcome {
    double loss, dw[8][64];
} outcome;

static outcome read_outcome(const net *m, const cg_exec *exec) {
    outcome o = {.loss = *(double *)cg_exec_data(exec, m->loss)};
    for (int i = 0; i < m->n; i++)
        memcpy(o.dw[i], cg_exec_data(exec, m->dw[i]), (size_t)cg_tensor_bytes(CG_F64, &m->dw[i]->shape));
    return o;
}

static void fill(const net *m, const cg_exec *exec, uint64_t seed) {
    t_fill_leaves(m->graph, exec, seed);
    *(double *)cg_exec_data(exec, m->seed) = 1;
}

/* Every clone is compared with its original on the way. */
static outcome run_net(const net *m) {
    cg_plan *plan = t_plan(m->graph, &(cg_plan_options){.keep_cloned_originals = true});
    cg_exec *verifying = t_exec(plan, &(cg_exec_options){.verify_recompute = true, .poison = true});
    fill(m, verifying, 5);
    t_run(verifying, CG_ALL_PASSES);
    outcome verified = read_outcome(m, verifying);
    cg_exec_free(verifying);
    cg_plan_free(plan);
    plan = t_plan(m->graph, NULL);
    cg_exec *exec = t_exec(plan, &(cg_exec_options){.poison = true});
    fill(m, exec, 5);
    t_run(exec, CG_ALL_PASSES);
    outcome o = read_outcome(m, exec);
    ck_assert_int_eq(cg_exec_measured_bytes(exec), plan->peak_bytes);
    ck_assert(!memcmp(&o, &verified, sizeof o));
    cg_exec_free(exec);
    cg_plan_free(plan);
    return o;
}

/* Two layers with a choice, in-place chains and a join; each of the eight pieces has a scope of its own. */
static net two_layers(void) {
    net m = {.graph = cg_graph_new(&t_ops), .n = 2};
    cg_graph *graph = m.graph;
    cg_value *x = t_leaf(graph, CG_LEAF_INPUT, "x", 40);
    for (int layer = 0; layer < 2; layer++) {
        CG_SCOPE(graph, "layer%d", layer);
        m.w[layer] = t_leaf(graph, CG_LEAF_PARAMETER, layer ? "w1" : "w0", 40);
        cg_value *y = mul(graph, x, m.w[layer]);
        y = relu(graph, cg_add(graph, cg_scale(graph, y, 1.25), x));
        cg_value *twin = T_APPLY(&t_twin, NULL, y), *z = mul(graph, twin, cg_output(twin, 1));
        cg_value *index = T_APPLY(&t_choose, NULL, z);
        cg_value *part = T_APPLY(&t_pick, NULL, mul(graph, y, y), index);
        cg_value *rows = cg_reshape(graph, T_APPLY(&t_join, NULL, part, part), CG_SHAPE(4, 10));
        x = mul(graph, cg_reshape(graph, rows, CG_SHAPE(40)), z);
    }
    m.loss = T_APPLY(&t_sum, NULL, mul(graph, x, x));
    net_backward(&m);
    return m;
}

START_TEST(no_choice_of_clones_changes_a_bit) {
    const char *const pieces[] = {"mul@layer0", "scale,add@layer0", "relu@layer0", "twin,pick,join@layer0",
                                  "mul@layer1", "scale,add@layer1", "relu@layer1", "twin,pick,join@layer1"};
    net plain = two_layers();
    outcome want = run_net(&plain);
    double size = 0;
    for (int i = 0; i < 40; i++) size += fabs(want.dw[0][i]) + fabs(want.dw[1][i]);
    ck_assert(isfinite(want.loss) && want.loss != 0 && isfinite(size) && size > 0);
    cg_graph_free(plain.graph);
    int most = 0;
    for (int set = 0; set <= 256; set++) {
        char policy[300] = "";
        for (int k = 0; k < 8; k++)
            if (set & (1 << k)) strcat(strcat(policy, pieces[k]), ";");
        if (set == 256) strcpy(policy, "*");
        net m = two_layers();
        int n_clones;
        if (!cg_recompute(m.graph, policy, &n_clones)) t_expect_fine(m.graph);
        if (n_clones > most) most = n_clones;
        outcome got = run_net(&m);
        if (memcmp(&got, &want, sizeof want)) ck_abort_msg("\"%s\" changes the result", policy);
        for (int n = 0; n < m.graph->n_nodes; n++)
            if (m.graph->nodes[n]->pass == CG_RECOMPUTE) ck_assert_ptr_ne(m.graph->nodes[n]->op, &t_choose);
        cg_graph_free(m.graph);
    }
    ck_assert_int_gt(most, 15);
}
END_TEST

/* y = x; y += 1 in place; L = y^2 at x = 2: 9 and 6, whatever is rebuilt. (4 when the addition is forgotten.)
 */
START_TEST(in_place_chain_is_rebuilt_whole) {
    const char *const policies[] = {"", "scale", "add", "scale,add", "*"};
    for (int k = 0; k < 5; k++) {
        net m = {.graph = cg_graph_new(&t_ops), .n = 1};
        m.w[0] = t_leaf(m.graph, CG_LEAF_PARAMETER, "x", 1);
        cg_value *one = t_leaf(m.graph, CG_LEAF_INPUT, "one", 1);
        cg_value *y = cg_add(m.graph, cg_scale(m.graph, m.w[0], 1), one);
        m.loss = mul(m.graph, y, y);
        net_backward(&m);
        ck_assert(cg_recompute(m.graph, policies[k], NULL));
        cg_plan *plan = t_plan(m.graph, NULL);
        cg_exec *exec = t_exec(plan, &(cg_exec_options){.poison = true});
        *(double *)cg_exec_data(exec, m.w[0]) = 2;
        *(double *)cg_exec_data(exec, one) = *(double *)cg_exec_data(exec, m.seed) = 1;
        t_run(exec, CG_ALL_PASSES);
        ck_assert(*(double *)cg_exec_data(exec, m.loss) == 9);
        ck_assert(*(double *)cg_exec_data(exec, m.dw[0]) == 6);
        cg_exec_free(exec);
        cg_plan_free(plan);
        cg_graph_free(m.graph);
    }
}
END_TEST

/* Layer 1: y = 2x; layer 2: y = x^2; one group, x = 3: 36 and 24. (9 and 6 when each gets the group's input.)
 */
START_TEST(layers_are_chained) {
    const char *const policies[] = {"", "scale", "mul", "scale,mul", "*", "*@layer1", "*@layer2"};
    for (int k = 0; k < 7; k++) {
        net m = {.graph = cg_graph_new(&t_ops), .n = 1};
        m.w[0] = t_leaf(m.graph, CG_LEAF_PARAMETER, "x", 1);
        cg_value *y;
        {
            CG_SCOPE(m.graph, "layer1");
            y = cg_scale(m.graph, m.w[0], 2);
        }
        {
            CG_SCOPE(m.graph, "layer2");
            m.loss = mul(m.graph, y, y);
        }
        net_backward(&m);
        ck_assert(cg_recompute(m.graph, policies[k], NULL));
        cg_plan *plan = t_plan(m.graph, NULL);
        cg_exec *exec = t_exec(plan, &(cg_exec_options){.poison = true});
        *(double *)cg_exec_data(exec, m.w[0]) = 3;
        *(double *)cg_exec_data(exec, m.seed) = 1;
        t_run(exec, CG_ALL_PASSES);
        ck_assert(*(double *)cg_exec_data(exec, m.loss) == 36);
        ck_assert(*(double *)cg_exec_data(exec, m.dw[0]) == 24);
        cg_exec_free(exec);
        cg_plan_free(plan);
        cg_graph_free(m.graph);
    }
}
END_TEST

/* ---- which clones, and what is no longer saved ---- */

static int count_saved(const cg_graph *graph, const cg_op *op, int64_t *bytes) {
    cg_plan *plan = t_plan(graph, NULL);
    int n, found = 0;
    cg_saved *saved = cg_plan_saved(plan, &n);
    *bytes = 0;
    for (int i = 0; i < n; i++) {
        found += saved[i].value->producer->op == op;
        *bytes += saved[i].bytes;
        ck_assert_int_gt(saved[i].n_readers, 0);
        ck_assert_int_eq(saved[i].reader_steps[0] >= 0, 1);
    }
    cg_saved_free(saved, n);
    cg_plan_free(plan);
    return found;
}

START_TEST(saved_values_vanish) {
    net m = scoped_net();
    int64_t before, after;
    ck_assert_int_eq(count_saved(m.graph, &t_relu, &before), SCOPES);
    ck_assert_int_eq(before, SCOPES * 64);
    ck_assert(cg_recompute(m.graph, "relu,scale@layer*", NULL));
    /* of the chain in layer* only its entrance is saved, the relu of embed */
    ck_assert_int_eq(count_saved(m.graph, &t_relu, &after), 1);
    ck_assert_int_eq(after, 64);
    cg_graph_free(m.graph);
    m = scoped_net();
    ck_assert(cg_recompute(m.graph, "relu@layer*", NULL)); /* now the scales are saved in their stead */
    ck_assert_int_eq(count_saved(m.graph, &t_relu, &after), 1);
    ck_assert_int_eq(count_saved(m.graph, &cg_op_scale, &after), SCOPES - 1);
    ck_assert_int_eq(after, before);
    cg_graph_free(m.graph);
    cg_graph *graph = cg_graph_new(&t_ops); /* what backward reads under another shape of another shape */
    m = (net){.graph = graph, .n = 1};
    cg_value *y = T_APPLY(&t_relu, NULL, m.w[0] = t_leaf(graph, CG_LEAF_PARAMETER, "w", 8));
    y = cg_reshape(graph, cg_reshape(graph, y, CG_SHAPE(2, 4)), CG_SHAPE(1, 8));
    m.loss = T_APPLY(&t_sum, NULL, mul(graph, y, y));
    net_backward(&m);
    ck_assert(cg_recompute(graph, "relu", NULL));
    ck_assert_int_eq(count_saved(graph, &t_relu, &after), 0);
    cg_graph_free(graph);
}
END_TEST

/* y is read in backward by two nodes of scope a and, apart from them, by one of scope b. */
START_TEST(one_clone_per_group) {
    net m = {.graph = cg_graph_new(&t_ops), .n = 1};
    cg_graph *graph = m.graph;
    m.w[0] = t_leaf(graph, CG_LEAF_PARAMETER, "w", 8);
    cg_value *y = cg_scale(graph, m.w[0], 3);
    cg_value *a;
    {
        CG_SCOPE(graph, "a");
        a = mul(graph, mul(graph, y, m.w[0]), y);
    }
    cg_value *b;
    {
        CG_SCOPE(graph, "b");
        b = mul(graph, a, y);
    }
    m.loss = T_APPLY(&t_sum, NULL, b);
    net_backward(&m);
    int n_clones;
    ck_assert(cg_recompute(graph, "scale", &n_clones));
    ck_assert_int_eq(n_clones, 2);
    const cg_node *clone[2] = {NULL};
    int n = 0;
    for (int k = 0; k < graph->n_nodes; k++) {
        const cg_node *node = graph->nodes[k];
        ck_assert_int_eq(node->id, k);
        if (node->pass == CG_RECOMPUTE) {
            ck_assert_int_lt(n, 2);
            clone[n++] = node;
            const cg_node *reader = graph->nodes[k + 1]; /* right before its first reader */
            ck_assert(reader->in[0] == node->out[0] || reader->in[1] == node->out[0]);
        }
        for (int i = 0; node->pass == CG_BACKWARD && i < node->n_in; i++) {
            ck_assert_ptr_ne(node->in[i], y);
            if (n && node->in[i] == clone[n - 1]->out[0]) ck_assert_str_eq(node->scope, n == 1 ? "b" : "a");
        }
    }
    ck_assert_int_eq(n, 2);
    cg_graph_free(graph);
}
END_TEST

/* Deep and wide: recomputing each layer's inside lowers the peak to the boundaries and one inside. */
START_TEST(peak_falls) {
    int64_t peak[2];
    for (int k = 0; k < 2; k++) {
        net m = {.graph = cg_graph_new(&t_ops), .n = 8};
        cg_value *x = t_leaf(m.graph, CG_LEAF_INPUT, "x", 64);
        for (int layer = 0; layer < 8; layer++) {
            CG_SCOPE(m.graph, "layer%d", layer);
            m.w[layer] = t_leaf(m.graph, CG_LEAF_PARAMETER, "w", 64);
            cg_value *wide = mul(m.graph, x, m.w[layer]);
            for (int d = 0; d < 3; d++) wide = T_APPLY_IN(m.graph, &t_join, NULL, wide, wide);
            wide = relu(m.graph, mul(m.graph, wide, wide));
            x = T_APPLY_IN(m.graph, &t_part, (&(t_range){100, 64}), wide);
        }
        m.loss = T_APPLY_IN(m.graph, &t_sum, NULL, x);
        net_backward(&m);
        if (k) ck_assert(cg_recompute(m.graph, "mul,join,relu", NULL));
        cg_plan *plan = t_plan(m.graph, NULL);
        peak[k] = plan->peak_bytes;
        cg_plan_free(plan);
        cg_graph_free(m.graph);
    }
    printf("eight layers: peak %lld bytes, with recompute %lld\n", (long long)peak[0], (long long)peak[1]);
    ck_assert_int_lt(2 * peak[1], peak[0]);
}
END_TEST

/* ---- clones that differ, inputs that change ---- */

static int n_calls;

static bool impure_run(const cg_run_args *args) {
    t_relu_run(args);
    if (++n_calls == 2) ((double *)args->out[0].data)[3] += 1e-15;
    return true;
}

START_TEST(a_clone_that_differs_is_caught) {
    cg_op impure = t_relu;
    impure.run[CG_F64][CG_PORTABLE] = impure_run;
    const cg_op *list[] = {&impure, &t_mul, &t_sum, &t_fill, &t_relu_grad};
    cg_op_set ops = {list, 5, &cg_op_add, &cg_op_zeros};
    net m = {.graph = cg_graph_new(&ops), .n = 1};
    m.w[0] = t_leaf(m.graph, CG_LEAF_PARAMETER, "w", 6);
    {
        CG_SCOPE(m.graph, "layer4");
        m.loss = T_APPLY_IN(m.graph, &t_sum, NULL, T_APPLY_IN(m.graph, &impure, NULL, m.w[0]));
    }
    net_backward(&m);
    ck_assert(cg_recompute(m.graph, "relu", NULL));
    cg_error error = {0};
    cg_plan *plan = t_plan(m.graph, NULL);
    ck_assert_ptr_null(cg_exec_new(plan, &(cg_exec_options){.verify_recompute = true}, &error));
    t_expect_text(error.text, "verify_recompute needs a plan made with keep_cloned_originals");
    cg_plan_free(plan);
    plan = t_plan(m.graph, &(cg_plan_options){.keep_cloned_originals = true});
    for (int separate = 0; separate < 2; separate++) {
        cg_exec *exec = t_exec(plan, &(cg_exec_options){.verify_recompute = true, .separate = separate});
        double *w = cg_exec_data(exec, m.w[0]);
        for (int i = 0; i < 6; i++) w[i] = 0.5;
        n_calls = 0;
        error = (cg_error){0};
        ck_assert(!cg_exec_run(exec, CG_ALL_PASSES, &error));
        ck_assert_str_eq(error.text,
                         "layer4: relu: the recomputed output y differs from the original at element 3");
        ck_assert_int_eq(error.code, CG_FAILED);
        n_calls = 2;
        t_run(exec, CG_ALL_PASSES); /* pure from now on */
        cg_exec_free(exec);
    }
    cg_plan_free(plan);
    cg_graph_free(m.graph);
}
END_TEST

static bool impure_twin_run(const cg_run_args *args) {
    t_twin_run(args);
    if (++n_calls == 2) ((double *)args->out[1].data)[5] += 1;
    return true;
}

/* The first output is right, the second is not. */
START_TEST(every_output_of_a_clone_is_compared) {
    cg_op impure = t_twin;
    impure.run[CG_F64][CG_PORTABLE] = impure_twin_run;
    const cg_op *list[] = {&impure, &t_mul, &t_sum, &t_fill, &cg_op_scale};
    cg_op_set ops = {list, 5, &cg_op_add, &cg_op_zeros};
    net m = {.graph = cg_graph_new(&ops), .n = 1};
    m.w[0] = t_leaf(m.graph, CG_LEAF_PARAMETER, "w", 6);
    cg_value *y = T_APPLY_IN(m.graph, &impure, NULL, m.w[0]);
    m.loss = T_APPLY_IN(m.graph, &t_sum, NULL, mul(m.graph, y, cg_output(y, 1)));
    net_backward(&m);
    int n_clones;
    ck_assert(cg_recompute(m.graph, "twin", &n_clones));
    ck_assert_int_eq(n_clones, 1);
    cg_plan *plan = t_plan(m.graph, &(cg_plan_options){.keep_cloned_originals = true});
    for (int separate = 0; separate < 2; separate++) {
        cg_exec *exec = t_exec(plan, &(cg_exec_options){.verify_recompute = true, .separate = separate});
        t_fill_leaves(m.graph, exec, 1);
        cg_error error = {0};
        n_calls = 0;
        ck_assert(!cg_exec_run(exec, CG_ALL_PASSES, &error));
        ck_assert_str_eq(error.text, "twin: the recomputed output z differs from the original at element 5");
        cg_exec_free(exec);
    }
    cg_plan_free(plan);
    cg_graph_free(m.graph);
}
END_TEST

/* A leaf that changes between a node and its clone: refused; before the node, or after the clone: fine. */
START_TEST(changed_leaves_are_seen) {
    for (int when = 0; when < 4; when++) {
        net m = {.graph = cg_graph_new(&t_ops), .n = 1};
        cg_value *w = m.w[0] = t_leaf(m.graph, CG_LEAF_PARAMETER, "w", 6),
                 *x = t_leaf(m.graph, CG_LEAF_INPUT, "x", 6);
        if (when == 0) T_APPLY_IN(m.graph, &t_bump, NULL, x, w);
        {
            CG_SCOPE(m.graph, "net");
            cg_value *flat = cg_reshape(m.graph, x, CG_SHAPE(6)); /* seen through an alias, too */
            m.loss = T_APPLY_IN(m.graph, &t_sum, NULL, relu(m.graph, mul(m.graph, flat, w)));
        }
        if (when == 1) T_APPLY_IN(m.graph, &t_bump, NULL, x, w);
        net_backward(&m);
        if (when >= 2) {
            CG_WITHIN(m.graph, NULL, when == 2 ? CG_BACKWARD : CG_OPTIMIZE, NULL);
            T_APPLY_IN(m.graph, &t_bump, NULL, when == 2 ? x : w, m.dw[0]);
        }
        bool ok = cg_recompute(m.graph, "mul,relu", NULL);
        ck_assert_int_eq(ok, when != 1);
        if (!ok) t_expect_failed(m.graph, "net: recompute: mul cannot run again, x was changed in between");
        cg_graph_free(m.graph);
    }
}
END_TEST

/* ---- two outstanding forwards, counters ---- */

enum { FORWARD = CG_PASS_BIT(CG_FORWARD), BACKWARD = CG_PASS_BIT(CG_BACKWARD) };

START_TEST(outstanding_forwards) {
    const char *const policies[] = {"", "pick,mul,twin", "*"};
    const char *const orders[] = {"A1a1B2b2", "A1B2a1b2", "A1B2b2a1", "A1E3B2a1E3b2"}; /* E: forward alone */
    for (int k = 0; k < 3; k++) {
        net m = two_layers();
        ck_assert(cg_recompute(m.graph, policies[k], NULL));
        cg_plan *plan = t_plan(m.graph, NULL);
        outcome want[2];
        for (size_t o = 0; o < sizeof orders / sizeof *orders; o++) {
            cg_exec *exec[3];
            for (int i = 0; i < 3; i++) exec[i] = t_exec(plan, NULL);
            for (const char *c = orders[o]; *c; c += 2) {
                int i = c[1] - '1';
                bool forward = c[0] <= 'Z';
                if (forward) fill(&m, exec[i], (uint64_t)(10 + i));
                t_run(exec[i], forward ? FORWARD : BACKWARD);
            }
            for (int i = 0; i < 2; i++) {
                outcome got = read_outcome(&m, exec[i]);
                if (o == 0) want[i] = got;
                if (memcmp(&got, &want[i], sizeof got))
                    ck_abort_msg("order %s, policy %s", orders[o], policies[k]);
            }
            for (int i = 0; i < 3; i++) cg_exec_free(exec[i]);
        }
        ck_assert(want[0].loss != want[1].loss);
        cg_plan_free(plan);
        cg_graph_free(m.graph);
    }
}
END_TEST

static void count_ops(void *context, int step, const cg_node *node, double us) {
    (void)step, (void)us;
    int *counts = context;
    counts[node->pass] += node->op == &t_choose || node->op == &t_bump;
}

/* What a forward counts, it counts once, however much is run again; choices run once. */
START_TEST(side_results_are_recorded_once) {
    const char *const policies[] = {"", "relu", "*"};
    outcome want;
    for (int k = 0; k < 3; k++) {
        net m = two_layers();
        cg_value *total = t_leaf(m.graph, CG_LEAF_OPTIMIZER, "total", 1), *loss = m.loss;
        T_APPLY_IN(m.graph, &t_bump, NULL, total, loss); /* in the forward pass, as models that log do */
        ck_assert(cg_recompute(m.graph, policies[k], NULL));
        cg_plan *plan = t_plan(m.graph, NULL);
        cg_exec *exec = t_exec(plan, NULL);
        fill(&m, exec, 5);
        double *sum = cg_exec_data(exec, total);
        *sum = 0;
        int counts[CG_PASSES] = {0};
        cg_exec_watch(exec, count_ops, counts);
        t_run(exec, CG_ALL_PASSES);
        outcome got = read_outcome(&m, exec);
        ck_assert(*sum == got.loss);
        t_run(exec, CG_ALL_PASSES);
        ck_assert(*sum == got.loss + got.loss);
        ck_assert_int_eq(counts[CG_FORWARD], 2 * 3);
        ck_assert_int_eq(counts[CG_BACKWARD] + counts[CG_RECOMPUTE], 0);
        if (k == 0) want = got;
        ck_assert(!memcmp(&got, &want, sizeof got));
        cg_exec_free(exec);
        cg_plan_free(plan);
        cg_graph_free(m.graph);
    }
}
END_TEST

/* A second policy after a first: still the same bits. */
START_TEST(policies_one_after_another) {
    net plain = two_layers(), m = two_layers();
    outcome want = run_net(&plain);
    ck_assert(cg_recompute(m.graph, "relu;mul@layer0", NULL));
    ck_assert(cg_recompute(m.graph, "mul@layer1;scale,add", NULL));
    outcome got = run_net(&m);
    ck_assert(!memcmp(&got, &want, sizeof got));
    cg_graph_free(plain.graph);
    cg_graph_free(m.graph);
}
END_TEST

SUITE("graph_recompute", policies_that_are_refused, scope_patterns, no_choice_of_clones_changes_a_bit,
      in_place_chain_is_rebuilt_whole, layers_are_chained, saved_values_vanish, one_clone_per_group, peak_falls,
      a_clone_that_differs_is_caught, every_output_of_a_clone_is_compared, changed_leaves_are_seen,
      outstanding_forwards, side_results_are_recorded_once, policies_one_after_another)
