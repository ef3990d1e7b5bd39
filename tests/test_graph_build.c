/* Building: the sticky error, refusals, scopes, and what autodiff builds. */
#include "tests/graph_ops.h"

#include <time.h>

static cg_graph *graph_new(void) { return cg_graph_new(&t_ops); }

START_TEST(first_sentence_stays) {
    cg_graph *graph = graph_new();
    cg_value *x = t_leaf(graph, CG_LEAF_PARAMETER, "x", 4), *other = t_leaf(graph, CG_LEAF_INPUT, "other", 5);
    ck_assert_ptr_null(cg_graph_error(graph));
    {
        CG_SCOPE(graph, "layer%d", 2);
        CG_SCOPE(graph, "attn");
        ck_assert_ptr_null(cg_add(graph, x, other));
    }
    char first[CG_ERROR_TEXT];
    strcpy(first, cg_graph_error(graph)->text);
    ck_assert_str_eq(first, "layer2/attn: add: b has shape [5], expected [4] as a has");
    ck_assert_int_eq(cg_graph_error(graph)->code, CG_BAD_INPUT);
    int n_nodes = graph->n_nodes, n_values = graph->n_values;
    ck_assert_ptr_null(cg_scale(graph, x, 2)); /* sound, but the graph has failed */
    ck_assert_ptr_null(cg_scale(graph, NULL, NAN));
    ck_assert_ptr_null(t_leaf(graph, CG_LEAF_INPUT, "y", 1));
    ck_assert_ptr_null(cg_graph_fail(graph, "another sentence"));
    cg_value *grad = x;
    ck_assert(!cg_autodiff(graph, &x, &x, 1, &x, 1, &grad));
    ck_assert_ptr_null(grad);
    int n_clones = 7;
    ck_assert(!cg_recompute(graph, "no such op", &n_clones));
    ck_assert_int_eq(n_clones, 0);
    ck_assert_str_eq(cg_graph_error(graph)->text, first);
    ck_assert_int_eq(graph->n_nodes, n_nodes);
    ck_assert_int_eq(graph->n_values, n_values);
    ck_assert_ptr_null(cg_output(NULL, 1)); /* what model code does with NULL */
    ck_assert_ptr_null(cg_keep(NULL));
    ck_assert_int_eq(cg_dim(NULL, 0), 0);
    cg_graph_free(graph);
    cg_graph_free(NULL);
}
END_TEST

/* Each of these fails a fresh graph inside scope "here". */
typedef void (*mistake)(cg_graph *graph, cg_value *x, cg_value *index);

static void null_input(cg_graph *graph, cg_value *x, cg_value *index) {
    (void)index;
    cg_add(graph, x, NULL);
}
static void too_few(cg_graph *graph, cg_value *x, cg_value *index) {
    (void)index;
    cg_apply(graph, &cg_op_add, NULL, &x, 1);
}
static void too_many(cg_graph *graph, cg_value *x, cg_value *index) {
    (void)index;
    T_APPLY(&t_relu, NULL, x, x);
}
static void no_attributes(cg_graph *graph, cg_value *x, cg_value *index) {
    (void)index;
    T_APPLY(&t_part, NULL, x);
}
static void wrong_dtype(cg_graph *graph, cg_value *x, cg_value *index) { cg_add(graph, x, index); }
static void float_index(cg_graph *graph, cg_value *x, cg_value *index) {
    (void)index;
    T_APPLY(&t_pick, NULL, x, x);
}
static void duplicate_leaf(cg_graph *graph, cg_value *x, cg_value *index) {
    (void)x, (void)index;
    t_leaf(graph, CG_LEAF_INPUT, "w", 3);
    t_leaf(graph, CG_LEAF_PARAMETER, "w", 4);
}
static void integer_parameter(cg_graph *graph, cg_value *x, cg_value *index) {
    (void)x, (void)index;
    cg_leaf(graph, CG_LEAF_PARAMETER, "p", CG_I32, CG_SHAPE(2));
}
static void no_kind(cg_graph *graph, cg_value *x, cg_value *index) {
    (void)x, (void)index;
    cg_leaf(graph, CG_LEAF_NONE, "p", CG_F32, CG_SHAPE(2));
}
static void large_leaf(cg_graph *graph, cg_value *x, cg_value *index) {
    (void)x, (void)index;
    cg_leaf(graph, CG_LEAF_INPUT, "rows", CG_F32, CG_SHAPE((int64_t)1 << 31, (int64_t)1 << 31, 2));
}
static void large_output(cg_graph *graph, cg_value *x, cg_value *index) {
    (void)index;
    graph->max_value_bytes = 64;
    T_APPLY(&t_join, NULL, x, x);
}
static void negative_size(cg_graph *graph, cg_value *x, cg_value *index) {
    (void)x, (void)index;
    cg_zeros(graph, CG_F64, CG_SHAPE(3, -1));
}
static void other_graph(cg_graph *graph, cg_value *x, cg_value *index) {
    cg_graph *second = graph_new();
    cg_value *y = t_leaf(second, CG_LEAF_INPUT, "y", 8);
    (void)index;
    cg_add(graph, x, y);
    cg_graph_free(second);
}
static void deep_scope(cg_graph *graph, cg_value *x, cg_value *index) {
    CG_SCOPE(graph, "a_long_name_for_a_part_of_a_part");
    if (!cg_graph_error(graph)) deep_scope(graph, x, index);
}
static void long_scope(cg_graph *graph, cg_value *x, cg_value *index) {
    (void)x, (void)index;
    char scope[300];
    memset(scope, 'a', sizeof scope);
    scope[sizeof scope - 1] = 0;
    CG_WITHIN(graph, scope, CG_FORWARD, NULL);
}

START_TEST(mistakes_are_refused) {
    const struct {
        mistake make;
        const char *sentence;
    } mistakes[] = {
        {null_input, "here: add: input b is missing"},
        {too_few, "here: add: expected 2 inputs, got 1"},
        {too_many, "here: relu: expected 1 inputs, got 2"},
        {no_attributes, "here: part: attributes are missing"},
        {wrong_dtype, "here: add: b is i32, expected f64"},
        {float_index, "here: pick: index is f64, expected i32"},
        {duplicate_leaf, "here: there is a leaf named w already"},
        {integer_parameter, "here: parameter p is i32, expected f32, f64 or bf16"},
        {no_kind, "here: leaf p has no kind"},
        {large_leaf,
         "here: rows [2147483648, 2147483648, 2] of f32 is larger than the limit of 1125899906842624"},
        {large_output, "here: join: y [16] of f64 is larger than the limit of 64 bytes"},
        {negative_size, "here: zeros:"},
        {other_graph, "here: add: input b belongs to another graph"},
        {deep_scope, "nested too deeply"},
        {long_scope, "the scope is longer than 255 bytes"},
    };
    for (size_t k = 0; k < sizeof mistakes / sizeof *mistakes; k++) {
        cg_graph *graph = graph_new();
        cg_value *x = t_leaf(graph, CG_LEAF_INPUT, "x", 8);
        cg_value *index = cg_leaf(graph, CG_LEAF_INPUT, "index", CG_I32, CG_SHAPE(8));
        {
            CG_SCOPE(graph, "here");
            mistakes[k].make(graph, x, index);
        }
        t_expect_failed(graph, mistakes[k].sentence);
        cg_graph_free(graph);
    }
}
END_TEST

/* A variadic op: any number of inputs, none of them missing, also far beyond the bits of a mask. */
START_TEST(many_inputs) {
    cg_op many = t_sum;
    many.variadic = true;
    cg_graph *graph = graph_new();
    cg_value *in[40], *x = t_leaf(graph, CG_LEAF_PARAMETER, "x", 2);
    for (int i = 0; i < 40; i++) in[i] = x;
    cg_value *y = cg_apply(graph, &many, NULL, in, 40);
    ck_assert_ptr_nonnull(y);
    ck_assert(cg_wants_grad(y->producer, 39));
    in[39] = NULL;
    ck_assert_ptr_null(cg_apply(graph, &many, NULL, in, 40));
    t_expect_failed(graph, "sum: input x is missing");
    cg_graph_free(graph);
    graph = graph_new();
    cg_apply(graph, &many, NULL, NULL, 0);
    t_expect_failed(graph, "sum: expected at least 1 inputs, got 0");
    cg_graph_free(graph);
}
END_TEST

/* Sizes beyond 32 bits are kept exactly; a product beyond 63 bits is refused, with numbers. */
START_TEST(sizes_are_64_bit) {
    cg_graph *graph = graph_new();
    graph->max_value_bytes = INT64_MAX - 1;
    int64_t rows = 2097153, scores = (int64_t)131072 * (131072 / 4);
    cg_value *q = cg_leaf(graph, CG_LEAF_INPUT, "q", CG_F32, CG_SHAPE(rows, 16, 64));
    cg_value *s = cg_leaf(graph, CG_LEAF_INPUT, "s", CG_F64, CG_SHAPE(scores));
    ck_assert_int_eq(t_count(q), 2147484672);
    cg_keep(cg_scale(graph, q, 2));
    cg_keep(T_APPLY(&t_join, NULL, s, s));
    cg_plan *plan = t_plan(graph, NULL);
    ck_assert_int_eq(plan->peak_bytes, 2 * 4 * (int64_t)2147484672 + (1 + 2 + 2) * 8 * scores);
    cg_plan_free(plan);
    cg_leaf(graph, CG_LEAF_INPUT, "w", CG_F32, CG_SHAPE((int64_t)1 << 32, (int64_t)1 << 31));
    t_expect_failed(graph, "w [4294967296, 2147483648] of f32 is larger than the limit");
    cg_graph_free(graph);
    graph = graph_new();
    cg_leaf(graph, CG_LEAF_INPUT, "w", CG_F32, CG_SHAPE(INT64_MAX, INT64_MAX, INT64_MAX));
    t_expect_failed(graph, "is larger than the limit");
    cg_graph_free(graph);
}
END_TEST

START_TEST(names_and_scopes) {
    cg_graph *graph = graph_new();
    char text[128];
    cg_value *outer = t_leaf(graph, CG_LEAF_PARAMETER, "w", 3);
    cg_value *inner, *y;
    {
        CG_SCOPE(graph, "layer%d", 0);
        inner = t_leaf(graph, CG_LEAF_PARAMETER, "w", 3); /* the same name in another scope */
        for (;;) {
            CG_SCOPE(graph, "attn");
            y = cg_add(graph, outer, inner);
            break; /* however the block is left */
        }
        ck_assert_str_eq(cg_scope_now(graph), "layer0");
    }
    ck_assert_str_eq(cg_scope_now(graph), "");
    ck_assert_str_eq(cg_value_text(outer, text, sizeof text), "w");
    ck_assert_str_eq(cg_value_text(inner, text, sizeof text), "layer0/w");
    ck_assert_str_eq(cg_value_text(y, text, sizeof text), "layer0/attn/add.y");
    ck_assert_ptr_eq(cg_leaf_find(graph, "w"), outer);
    ck_assert_ptr_eq(cg_leaf_find(graph, "layer0/w"), inner);
    ck_assert_ptr_null(cg_leaf_find(graph, "layer0/attn/add.y"));
    ck_assert_ptr_eq(cg_op_find(&t_ops, "relu"), &t_relu);
    ck_assert_ptr_null(cg_op_find(&t_ops, "rel"));
    t_expect_fine(graph);
    cg_graph_free(graph);
}
END_TEST

/* ---- autodiff ---- */

typedef struct gradients {
    cg_graph *graph;
    cg_value *wrt[4], *grads[4];
    cg_plan *plan;
    cg_exec *exec;
} gradients;

/* Differentiate sum(y) and run; leaves are normal numbers, the seed is 1. */
static gradients differentiate(cg_graph *graph, cg_value *y, int n, cg_value *const *wrt) {
    gradients g = {.graph = graph};
    for (int k = 0; k < n; k++) g.wrt[k] = wrt[k];
    cg_value *loss = T_APPLY(&t_sum, NULL, y), *seed = t_leaf(graph, CG_LEAF_INPUT, "seed", 1);
    if (!cg_autodiff(graph, &loss, &seed, 1, g.wrt, n, g.grads)) t_expect_fine(graph);
    cg_keep(loss);
    for (int k = 0; k < n; k++) cg_keep(g.grads[k]);
    g.plan = t_plan(graph, NULL);
    g.exec = t_exec(g.plan, &(cg_exec_options){.separate = true, .poison = true});
    t_fill_leaves(graph, g.exec, 1);
    *(double *)cg_exec_data(g.exec, seed) = 1;
    t_run(g.exec, CG_ALL_PASSES);
    return g;
}

static void gradients_free(gradients *g) {
    cg_exec_free(g->exec);
    cg_plan_free(g->plan);
    cg_graph_free(g->graph);
}

static double at(const gradients *g, const cg_value *value, int i) {
    return ((const double *)cg_exec_data(g->exec, value))[i];
}

START_TEST(uses_are_summed) {
    cg_graph *graph = graph_new();
    cg_value *x = t_leaf(graph, CG_LEAF_PARAMETER, "x", 5);
    cg_value *y = T_APPLY(&t_mul, NULL, x, x); /* x^2 + 3x + x: used five times */
    y = cg_add(graph, y, cg_add(graph, cg_scale(graph, x, 3), x));
    gradients g = differentiate(graph, y, 1, &x);
    for (int i = 0; i < 5; i++) ck_assert_double_eq_tol(at(&g, g.grads[0], i), 2 * at(&g, x, i) + 4, 1e-14);
    gradients_free(&g);
}
END_TEST

/* Only one, the other, or both outputs of a node are used. */
START_TEST(outputs_without_gradient) {
    for (int used = 1; used < 4; used++) {
        cg_graph *graph = graph_new();
        cg_value *x = t_leaf(graph, CG_LEAF_PARAMETER, "x", 5), *twin = T_APPLY(&t_twin, NULL, x);
        cg_value *z = cg_output(twin, 1), *y = used == 1 ? twin : used == 2 ? z : cg_add(graph, twin, z);
        gradients g = differentiate(graph, y, 1, &x);
        for (int i = 0; i < 5; i++)
            ck_assert_double_eq_tol(at(&g, g.grads[0], i),
                                    (used & 1 ? 2 : 0) + (used & 2 ? 2 * at(&g, x, i) : 0), 1e-14);
        gradients_free(&g);
    }
}
END_TEST

START_TEST(unreached_leaves_get_zeros) {
    cg_graph *graph = graph_new();
    cg_value *x, *idle, *input, *stopped, *y;
    {
        CG_SCOPE(graph, "layer0");
        x = t_leaf(graph, CG_LEAF_PARAMETER, "x", 5), idle = t_leaf(graph, CG_LEAF_PARAMETER, "idle", 3);
        input = t_leaf(graph, CG_LEAF_INPUT, "input", 5), stopped = t_leaf(graph, CG_LEAF_PARAMETER, "s", 5);
        T_APPLY(&t_relu, NULL, idle); /* read, but nothing of it reaches the loss */
        y = cg_add(graph, T_APPLY(&t_mul, NULL, x, input), cg_detach(graph, stopped));
        y = cg_add(graph, y, cg_detach(graph, cg_scale(graph, x, 7)));
    }
    gradients g = differentiate(graph, y, 4, (cg_value *[]){x, idle, input, stopped});
    for (int i = 0; i < 5; i++) {
        ck_assert(at(&g, g.grads[0], i) == at(&g, input, i)); /* the detached use adds nothing */
        ck_assert(at(&g, g.grads[2], i) == 0);
        ck_assert(at(&g, g.grads[3], i) == 0);
    }
    for (int i = 0; i < 3; i++) ck_assert(at(&g, g.grads[1], i) == 0);
    ck_assert_str_eq(g.grads[1]->scope, "layer0");
    ck_assert(cg_shape_equal(&g.grads[1]->shape, &idle->shape));
    gradients_free(&g);
}
END_TEST

/* Every backward node names the forward node it is for; scope and pass of the builder are as before. */
START_TEST(backward_nodes_know_their_cause) {
    cg_graph *graph = graph_new();
    cg_value *x = t_leaf(graph, CG_LEAF_PARAMETER, "x", 6), *seed = t_leaf(graph, CG_LEAF_INPUT, "seed", 6),
             *dx;
    cg_value *y;
    {
        CG_SCOPE(graph, "layer1");
        y = T_APPLY(&t_relu, NULL, T_APPLY(&t_mul, NULL, x, x));
    }
    int n_forward = graph->n_nodes;
    {
        CG_SCOPE(graph, "outside");
        ck_assert(cg_autodiff(graph, &y, &seed, 1, &x, 1, &dx));
        ck_assert_str_eq(cg_scope_now(graph), "outside");
        ck_assert_int_eq(cg_pass_now(graph), CG_FORWARD);
    }
    ck_assert_int_gt(graph->n_nodes, n_forward);
    for (int n = n_forward; n < graph->n_nodes; n++) {
        ck_assert_int_eq(graph->nodes[n]->pass, CG_BACKWARD);
        ck_assert_str_eq(graph->nodes[n]->scope, "layer1");
        ck_assert_ptr_nonnull(graph->nodes[n]->cause);
        ck_assert_int_eq(graph->nodes[n]->cause->pass, CG_FORWARD);
    }
    cg_graph_free(graph);
}
END_TEST

static void wrong_shape(cg_graph *graph, const cg_node *node, cg_value *const *dout, cg_value **din) {
    (void)node;
    din[0] = T_APPLY(&t_sum, NULL, dout[0]);
}
static void wrong_type(cg_graph *graph, const cg_node *node, cg_value *const *dout, cg_value **din) {
    (void)dout;
    din[0] = cg_zeros(graph, CG_F32, node->in[0]->shape);
}

START_TEST(wrong_gradients_are_named) {
    for (int k = 0; k < 2; k++) {
        cg_op bad = t_relu;
        bad.grad = k ? wrong_type : wrong_shape;
        cg_graph *graph = graph_new();
        cg_value *x = t_leaf(graph, CG_LEAF_PARAMETER, "x", 6), *seed = t_leaf(graph, CG_LEAF_INPUT, "seed", 6),
                 *dx;
        cg_value *y;
        {
            CG_SCOPE(graph, "layer1");
            y = T_APPLY(&bad, NULL, cg_scale(graph, x, 2));
        }
        ck_assert(!cg_autodiff(graph, &y, &seed, 1, &x, 1, &dx));
        t_expect_failed(graph, k ? "layer1: the gradient of layer1/scale.y is f32 [6], expected f64 [6]"
                                 : "layer1: the gradient of layer1/scale.y is f64 [1], expected f64 [6]");
        cg_graph_free(graph);
    }
    cg_graph *graph = graph_new();
    cg_value *x = t_leaf(graph, CG_LEAF_PARAMETER, "x", 6), *y = cg_scale(graph, x, 2), *dx;
    cg_value *seed = t_leaf(graph, CG_LEAF_INPUT, "seed", 2);
    ck_assert(!cg_autodiff(graph, &y, &seed, 1, &x, 1, &dx));
    t_expect_failed(graph, "the gradient of scale.y is f64 [2], expected f64 [6]");
    cg_graph_free(graph);
}
END_TEST

START_TEST(autodiff_refuses) {
    for (int k = 0; k < 3; k++) {
        cg_graph *graph = graph_new();
        cg_value *x = t_leaf(graph, CG_LEAF_PARAMETER, "x", 6), *y = cg_scale(graph, x, 2), *dx;
        cg_value *seed = t_leaf(graph, CG_LEAF_INPUT, "seed", 6), *null = NULL;
        ck_assert(
            !cg_autodiff(graph, k == 0 ? &null : &y, k == 1 ? &null : &seed, 1, k == 2 ? &null : &x, 1, &dx));
        t_expect_failed(graph, k == 2 ? "autodiff: value 0 to differentiate by is missing"
                                      : "autodiff: output 0 or its gradient is missing");
        cg_graph_free(graph);
    }
    /* the gradient of a gradient: refused, not silently without its second-order part */
    for (int k = 0; k < 2; k++) {
        cg_graph *graph = graph_new();
        cg_value *x = t_leaf(graph, CG_LEAF_PARAMETER, "x", 6), *seed = t_leaf(graph, CG_LEAF_INPUT, "seed", 6),
                 *dx;
        cg_value *y;
        {
            CG_SCOPE(graph, "net");
            y = k ? T_APPLY(&t_relu, NULL, x) : T_APPLY(&t_mul, NULL, x, x);
        }
        ck_assert(cg_autodiff(graph, &y, &seed, 1, &x, 1, &dx));
        cg_value *penalty = T_APPLY(&t_mul, NULL, dx, dx);
        ck_assert(!cg_autodiff(graph, &penalty, &seed, 1, &x, 1, &dx));
        t_expect_failed(graph, k ? "net: relu_grad: not yet" : "net: add: not yet: second derivatives");
        cg_graph_free(graph);
    }
    cg_op op = t_sum; /* a forward op whose gradient is not written */
    op.grad = NULL;
    op.differentiable = 0;
    op.no_grad = "not yet: nobody needed it";
    cg_graph *graph = graph_new();
    cg_value *x = t_leaf(graph, CG_LEAF_PARAMETER, "x", 6), *seed = t_leaf(graph, CG_LEAF_INPUT, "seed", 1),
             *dx;
    cg_value *y = T_APPLY(&op, NULL, x);
    ck_assert(!cg_autodiff(graph, &y, &seed, 1, &x, 1, &dx));
    t_expect_failed(graph, "sum: not yet: nobody needed it");
    cg_graph_free(graph);
}
END_TEST

/* Names are looked up in a table: many leaves cost no more than a few, also behind a rewind, which forgets. */
START_TEST(many_leaves) {
    enum { LEAVES = 100000 };
    cg_graph *graph = graph_new();
    cg_graph_mark half = {0};
    char name[32];
    const clock_t begin = clock();
    for (int i = 0; i < LEAVES; i++) {
        if (i == LEAVES / 2) half = cg_graph_mark_now(graph);
        CG_SCOPE(graph, "layer%d", i % 10);
        snprintf(name, sizeof name, "w%d", i / 10);
        t_leaf(graph, CG_LEAF_INPUT, name, 1);
    }
    t_expect_fine(graph);
    ck_assert((double)(clock() - begin) / CLOCKS_PER_SEC < 10); /* comparing all with all takes minutes */
    for (int i = 0; i < LEAVES; i += 77) {
        snprintf(name, sizeof name, "layer%d/w%d", i % 10, i / 10);
        ck_assert_int_eq(cg_leaf_find(graph, name)->id, i);
    }
    cg_graph_rewind(graph, &half);
    ck_assert_ptr_null(cg_leaf_find(graph, "layer9/w9999"));
    for (int round = 0; round < 2; round++) { /* other names take the ids, then the old ones are free again */
        for (int i = LEAVES / 2; i < LEAVES; i++) {
            snprintf(name, sizeof name, round ? "v%d" : "u%d", i);
            t_leaf(graph, CG_LEAF_INPUT, name, 1);
        }
        t_expect_fine(graph);
        ck_assert_int_eq(cg_leaf_find(graph, name)->id, LEAVES - 1);
        ck_assert_ptr_null(cg_leaf_find(graph, "layer9/w9999"));
        ck_assert_ptr_null(cg_leaf_find(graph, round ? "u99999" : "v99999"));
        cg_graph_rewind(graph, &half);
    }
    t_leaf(graph, CG_LEAF_INPUT, "layer0/w0", 1); /* the same full name by another way */
    t_expect_failed(graph, "there is a leaf named layer0/w0 already");
    cg_graph_free(graph);
}
END_TEST

/* A context may outlive its graph. */
START_TEST(freed_within_a_scope) {
    cg_graph *graph = graph_new();
    CG_SCOPE(graph, "layer0");
    CG_WITHIN(graph, "", CG_BACKWARD, NULL);
    cg_graph_free(graph);
}
END_TEST

SUITE("graph_build", first_sentence_stays, mistakes_are_refused, many_inputs, sizes_are_64_bit,
      names_and_scopes, many_leaves, freed_within_a_scope, uses_are_summed, outputs_without_gradient,
      unreached_leaves_get_zeros, backward_nodes_know_their_cause, wrong_gradients_are_named, autodiff_refuses)
