/* The executor: what stays where between runs, passes run apart, sentences of failures, no allocation per run.
 */
#include "tests/graph_ops.h"

#include "graph/gradcheck.h"

#include <malloc.h>
#include <time.h>

static double *data_of(const cg_exec *exec, const cg_value *value) { return cg_exec_data(exec, value); }

START_TEST(leaves_start_as_zeros_and_stay) {
    for (int separate = 0; separate < 2; separate++) {
        cg_graph *graph = cg_graph_new(&t_ops);
        cg_value *x = t_leaf(graph, CG_LEAF_INPUT, "x", 9), *sum = t_leaf(graph, CG_LEAF_GRADIENT, "sum", 9);
        cg_value *idle = t_leaf(graph, CG_LEAF_OPTIMIZER, "idle", 9), *y = cg_keep(T_APPLY(&t_relu, NULL, x));
        T_APPLY(&t_bump, NULL, sum, y);
        cg_plan *plan = t_plan(graph, NULL);
        cg_exec *exec = t_exec(plan, &(cg_exec_options){.separate = separate, .poison = true});
        for (int i = 0; i < 9; i++) {
            ck_assert(data_of(exec, x)[i] == 0);
            ck_assert(data_of(exec, sum)[i] == 0);
            data_of(exec, x)[i] = i;
            data_of(exec, idle)[i] = -i;
        }
        for (int k = 0; k < 3; k++) t_run(exec, CG_ALL_PASSES);
        for (int i = 0; i < 9; i++) {
            ck_assert(data_of(exec, x)[i] == i);
            ck_assert(data_of(exec, idle)[i] == -i);
            ck_assert(data_of(exec, y)[i] == i);
            ck_assert(data_of(exec, sum)[i] == 3 * i);
        }
        ck_assert_int_eq(cg_exec_measured_bytes(exec), plan->peak_bytes);
        cg_exec_free(exec);
        cg_plan_free(plan);
        cg_graph_free(graph);
    }
    cg_exec_free(NULL);
    cg_plan_free(NULL);
}
END_TEST

/* Any part of a value, also of more numbers than are turned at a time. */
START_TEST(parts_are_written_and_read) {
    enum { N = 2500 };
    cg_graph *graph = cg_graph_new(&t_ops);
    cg_value *x = t_leaf(graph, CG_LEAF_INPUT, "x", N);
    cg_keep(T_APPLY(&t_relu, NULL, x));
    cg_plan *plan = t_plan(graph, NULL);
    cg_exec *exec = t_exec(plan, NULL);
    double numbers[N], back[N];
    for (int i = 0; i < N; i++) numbers[i] = i;
    cg_exec_write_real(exec, x, 0, N, numbers);
    numbers[3] = -1, numbers[4] = -2;
    cg_exec_write_part(exec, x, 3, 2, numbers + 3);
    cg_exec_read_real(exec, x, 1, N - 1, back);
    ck_assert_mem_eq(back, numbers + 1, (N - 1) * sizeof *back);
    cg_exec_read_part(exec, x, 2, 4, back);
    ck_assert_mem_eq(back, numbers + 2, 4 * sizeof *back);
    cg_exec_free(exec);
    cg_plan_free(plan);
    cg_graph_free(graph);
}
END_TEST

/* A step of micro-batches: forward and backward twice, then the optimizer once. */
START_TEST(passes_run_apart) {
    for (int separate = 0; separate < 2; separate++) {
        cg_graph *graph = cg_graph_new(&t_ops);
        cg_value *x = t_leaf(graph, CG_LEAF_INPUT, "x", 5), *w = t_leaf(graph, CG_LEAF_PARAMETER, "w", 5), *dw;
        cg_value *sum = t_leaf(graph, CG_LEAF_GRADIENT, "sum", 5),
                 *seed = t_leaf(graph, CG_LEAF_INPUT, "seed", 1);
        cg_value *y = T_APPLY(&t_mul, NULL, T_APPLY(&t_mul, NULL, x, w), w); /* x w^2 */
        cg_value *loss = cg_keep(T_APPLY(&t_sum, NULL, y));
        ck_assert(cg_autodiff(graph, &loss, &seed, 1, &w, 1, &dw));
        {
            CG_WITHIN(graph, NULL, CG_BACKWARD, NULL);
            T_APPLY(&t_bump, NULL, sum, dw);
        }
        {
            CG_WITHIN(graph, NULL, CG_OPTIMIZE, NULL);
            T_APPLY(&t_bump, NULL, w, cg_scale(graph, sum, -0.5));
        }
        cg_plan *plan = t_plan(graph, NULL);
        cg_exec *exec = t_exec(plan, &(cg_exec_options){.separate = separate, .poison = true});
        data_of(exec, seed)[0] = 1;
        for (int i = 0; i < 5; i++) data_of(exec, w)[i] = 2;
        for (int batch = 1; batch <= 2; batch++) {
            for (int i = 0; i < 5; i++) data_of(exec, x)[i] = batch * (i + 1);
            t_run(exec, CG_PASS_BIT(CG_FORWARD) | CG_PASS_BIT(CG_BACKWARD));
            ck_assert(data_of(exec, loss)[0] == 60 * batch);
            for (int i = 0; i < 5; i++) ck_assert(data_of(exec, w)[i] == 2);
        }
        for (int i = 0; i < 5; i++) ck_assert(data_of(exec, sum)[i] == 12 * (i + 1));
        t_run(exec, CG_PASS_BIT(CG_OPTIMIZE));
        for (int i = 0; i < 5; i++) ck_assert(data_of(exec, w)[i] == 2 - 6 * (i + 1));
        for (int i = 0; i < 5; i++) ck_assert(data_of(exec, sum)[i] == 12 * (i + 1));
        /* forward alone, any number of times, then the backward of the last */
        for (int k = 0; k < 3; k++) t_run(exec, CG_PASS_BIT(CG_FORWARD));
        t_run(exec, CG_PASS_BIT(CG_BACKWARD));
        for (int i = 0; i < 5; i++)
            ck_assert(data_of(exec, sum)[i] == 12 * (i + 1) + 2 * 2 * (i + 1) * data_of(exec, w)[i]);
        cg_exec_free(exec);
        cg_plan_free(plan);
        cg_graph_free(graph);
    }
}
END_TEST

/* Each backward needs a forward of its own, and takes the clones along. */
START_TEST(backward_needs_a_forward) {
    for (int k = 0; k < 4; k++) {
        bool separate = k & 1;
        cg_graph *graph = cg_graph_new(&t_ops);
        cg_value *w = t_leaf(graph, CG_LEAF_PARAMETER, "w", 5), *seed = t_leaf(graph, CG_LEAF_INPUT, "seed", 5),
                 *dw;
        cg_value *y;
        {
            CG_SCOPE(graph, "net");
            y = T_APPLY(&t_relu, NULL, cg_scale(graph, w, 2));
        }
        ck_assert(cg_autodiff(graph, &y, &seed, 1, &w, 1, &dw));
        cg_keep(dw);
        cg_value *sum = t_leaf(graph, CG_LEAF_OPTIMIZER, "sum", 5);
        {
            CG_WITHIN(graph, NULL, CG_OPTIMIZE, NULL);
            T_APPLY(&t_bump, NULL, sum, cg_scale(graph, dw, 1));
        }
        cg_keep(T_APPLY(&t_twin, NULL, w));
        if (k & 2) ck_assert(cg_recompute(graph, "relu,scale", NULL));
        cg_plan *plan = t_plan(graph, NULL);
        cg_exec *exec = t_exec(plan, &(cg_exec_options){.separate = separate, .poison = true});
        const char *sentence = "backward needs a forward run of its own before it";
        cg_error error = {0};
        ck_assert(!cg_exec_run(exec, CG_PASS_BIT(CG_BACKWARD), &error));
        ck_assert_str_eq(error.text, sentence);
        for (int i = 0; i < 5; i++) data_of(exec, seed)[i] = data_of(exec, w)[i] = 1 + i;
        t_run(exec, CG_PASS_BIT(CG_FORWARD));
        t_run(exec, CG_PASS_BIT(CG_BACKWARD));
        for (int i = 0; i < 5; i++) ck_assert(data_of(exec, dw)[i] == 2 * (1 + i));
        error = (cg_error){0};
        ck_assert(!cg_exec_run(exec, CG_PASS_BIT(CG_BACKWARD) | CG_PASS_BIT(CG_OPTIMIZE), &error));
        ck_assert_str_eq(error.text, sentence);
        t_run(exec, CG_PASS_BIT(CG_OPTIMIZE));
        for (int i = 0; i < 5; i++) ck_assert(data_of(exec, sum)[i] == 2 * (1 + i));
        t_run(exec, CG_PASS_BIT(CG_FORWARD) | CG_PASS_BIT(CG_BACKWARD));
        for (int i = 0; i < 5; i++) ck_assert(data_of(exec, dw)[i] == 2 * (1 + i));
        cg_exec_free(exec);
        exec = t_exec(plan, &(cg_exec_options){.separate = true});
        error = (cg_error){0};
        ck_assert(!cg_exec_run(exec, CG_PASS_BIT(CG_OPTIMIZE), &error));
        t_expect_text(error.text, "net/scale.y has no memory: the pass that computes it did not run before");
        cg_exec_free(exec);
        cg_plan_free(plan);
        cg_graph_free(graph);
    }
}
END_TEST

START_TEST(external_leaves) {
    for (int separate = 0; separate < 2; separate++) {
        cg_graph *graph = cg_graph_new(&t_ops);
        cg_value *x = t_leaf(graph, CG_LEAF_INPUT, "x", 100), *own = t_leaf(graph, CG_LEAF_INPUT, "own", 100);
        x->external = true;
        cg_value *y;
        {
            CG_SCOPE(graph, "net");
            y = cg_keep(cg_add(graph, cg_scale(graph, x, 2), own));
        }
        cg_plan *plan = t_plan(graph, NULL);
        ck_assert_int_eq(plan->peak_bytes, 2 * 832); /* x takes nothing */
        cg_exec *exec = t_exec(plan, &(cg_exec_options){.separate = separate, .poison = true});
        cg_error error = {0};
        ck_assert(!cg_exec_run(exec, CG_ALL_PASSES, &error));
        ck_assert_str_eq(error.text, "net: scale: x has no memory: bind it with cg_exec_bind");
        double a[100], b[100], *before = data_of(exec, own);
        for (int i = 0; i < 100; i++) {
            a[i] = i;
            b[i] = -i;
            before[i] = 0.5;
        }
        cg_exec_bind(exec, own, b); /* not external: stays where it is */
        ck_assert_ptr_eq(cg_exec_data(exec, own), before);
        cg_exec_bind(exec, x, a);
        ck_assert_ptr_eq(cg_exec_data(exec, x), a);
        t_run(exec, CG_ALL_PASSES);
        for (int i = 0; i < 100; i++) ck_assert(data_of(exec, y)[i] == 2 * i + 0.5);
        cg_exec_bind(exec, x, b); /* other memory, same plan */
        t_run(exec, CG_ALL_PASSES);
        for (int i = 0; i < 100; i++) ck_assert(data_of(exec, y)[i] == -2 * i + 0.5);
        ck_assert_int_eq(cg_exec_measured_bytes(exec), plan->peak_bytes);
        cg_exec_free(exec);
        cg_plan_free(plan);
        cg_graph_free(graph);
    }
}
END_TEST

START_TEST(too_large_for_the_machine) {
    cg_graph *graph = cg_graph_new(&t_ops);
    cg_keep(cg_scale(graph, t_leaf(graph, CG_LEAF_INPUT, "x", (int64_t)1 << 46), 2));
    cg_plan *plan = t_plan(graph, NULL);
    cg_error error = {0};
    ck_assert_ptr_null(cg_exec_new(plan, NULL, &error));
    t_expect_text(error.text, "the step needs 1125899906842624 bytes, this machine has ");
    ck_assert_int_eq(error.code, CG_FAILED);
    cg_plan_free(plan);
    cg_graph_free(graph);
}
END_TEST

static volatile sig_atomic_t stop_now;
static bool stops_behind_itself(const cg_run_args *args) {
    stop_now = 1;
    return args != NULL;
}

/* Between two nodes; what updates parameters, a pass of its own, is done as a whole. */
START_TEST(a_run_is_stopped) {
    cg_op stopping = t_relu;
    stopping.name = "stopping";
    stopping.run[CG_F64][CG_PORTABLE] = stops_behind_itself;
    cg_graph *graph = cg_graph_new(&t_ops);
    cg_value *x = t_leaf(graph, CG_LEAF_INPUT, "x", 4);
    cg_value *y = cg_keep(cg_scale(graph, T_APPLY(&stopping, NULL, x), 2));
    cg_plan *plan = t_plan(graph, NULL);
    cg_exec *exec = t_exec(plan, &(cg_exec_options){.stop = &stop_now});
    cg_error error = {0};
    stop_now = 0;
    cg_exec_set(exec, y, 0, 7);
    ck_assert(!cg_exec_run(exec, CG_ALL_PASSES & ~CG_PASS_BIT(CG_OPTIMIZE), &error));
    ck_assert_int_eq(error.code, CG_OK);
    ck_assert(cg_exec_get(exec, y, 0) == 7);
    ck_assert(cg_exec_run(exec, CG_PASS_BIT(CG_OPTIMIZE), &error));
    t_run(exec, CG_ALL_PASSES); /* with the update in it */
    ck_assert(cg_exec_get(exec, y, 0) != 7);
    cg_exec_free(exec);
    cg_plan_free(plan);
    cg_graph_free(graph);
}
END_TEST

static bool fails_silently(const cg_run_args *args) { return args == NULL; }
static bool fails_aloud(const cg_run_args *args) {
    return cg_fail(args->error, CG_BAD_INPUT, "row %d is bad", 3);
}

START_TEST(failures_name_the_place) {
    for (int k = 0; k < 8; k++) {
        bool aloud = k & 1, scoped = k & 2, separate = k & 4;
        cg_op bad = t_relu;
        bad.name = "bad";
        bad.run[CG_F64][CG_PORTABLE] = aloud ? fails_aloud : fails_silently;
        cg_graph *graph = cg_graph_new(&t_ops);
        cg_value *x = t_leaf(graph, CG_LEAF_INPUT, "x", 4);
        {
            CG_WITHIN(graph, scoped ? "layer1/attn" : "", CG_FORWARD, NULL);
            cg_keep(cg_scale(graph, T_APPLY(&bad, NULL, cg_scale(graph, x, 2)), 2));
        }
        cg_plan *plan = t_plan(graph, NULL);
        cg_exec *exec = t_exec(plan, &(cg_exec_options){.separate = separate});
        cg_error error = {0};
        ck_assert(!cg_exec_run(exec, CG_ALL_PASSES, &error));
        char want[80];
        snprintf(want, sizeof want, "%sbad: %s", scoped ? "layer1/attn: " : "",
                 aloud ? "row 3 is bad" : "failed");
        ck_assert_str_eq(error.text, want);
        ck_assert_int_eq(error.code, aloud ? CG_BAD_INPUT : CG_FAILED);
        ck_assert(
            !cg_exec_run(exec, CG_ALL_PASSES, NULL)); /* an executor survives a failure; no place for it */
        cg_exec_free(exec);
        cg_plan_free(plan);
        cg_graph_free(graph);
    }
    cg_graph *graph = cg_graph_new(&t_ops); /* no kernel for f32 */
    cg_keep(T_APPLY(&t_relu, NULL, cg_leaf(graph, CG_LEAF_INPUT, "x", CG_F32, CG_SHAPE(2))));
    cg_plan *plan = t_plan(graph, NULL);
    cg_error error = {0};
    ck_assert_ptr_null(cg_exec_new(plan, NULL, &error));
    ck_assert_str_eq(error.text, "relu has no kernel for f32");
    cg_plan_free(plan);
    cg_graph_free(graph);
}
END_TEST

static cg_op bad_relu_grad;
static void bad_relu_build(cg_graph *graph, const cg_node *node, cg_value *const *dout, cg_value **din) {
    din[0] = T_APPLY(&bad_relu_grad, NULL, dout[0], node->out[0]);
}

/* A backward that failed has used its forward up. */
START_TEST(backward_fails_once) {
    cg_op bad = t_relu;
    bad.grad = bad_relu_build;
    bad_relu_grad = t_relu_grad;
    bad_relu_grad.run[CG_F64][CG_PORTABLE] = fails_silently;
    cg_graph *graph = cg_graph_new(&t_ops);
    cg_value *w = t_leaf(graph, CG_LEAF_PARAMETER, "w", 4), *seed = t_leaf(graph, CG_LEAF_INPUT, "seed", 4),
             *dw;
    cg_value *y = T_APPLY(&bad, NULL, w);
    ck_assert(cg_autodiff(graph, &y, &seed, 1, &w, 1, &dw));
    cg_keep(dw);
    cg_plan *plan = t_plan(graph, NULL);
    cg_exec *exec = t_exec(plan, NULL);
    t_run(exec, CG_PASS_BIT(CG_FORWARD));
    for (int k = 0; k < 2; k++) {
        cg_error error = {0};
        ck_assert(!cg_exec_run(exec, CG_PASS_BIT(CG_BACKWARD), &error));
        t_expect_text(error.text,
                      k ? "backward needs a forward run of its own before it" : "relu_grad: failed");
    }
    cg_exec_free(exec);
    cg_plan_free(plan);
    cg_graph_free(graph);
}
END_TEST

/* A layered step with backward and a choice. */
static cg_graph *layered(int n_layers, int64_t width, cg_value **loss) {
    cg_graph *graph = cg_graph_new(&t_ops);
    cg_value *x = t_leaf(graph, CG_LEAF_INPUT, "x", width), *w[64], *dw[64];
    for (int layer = 0; layer < n_layers; layer++) {
        CG_SCOPE(graph, "layer%d", layer);
        char name[16];
        snprintf(name, sizeof name, "w%d", layer);
        w[layer] = t_leaf(graph, CG_LEAF_PARAMETER, name, width);
        cg_value *y = T_APPLY(&t_relu, NULL, T_APPLY(&t_mul, NULL, x, w[layer]));
        cg_value *part = T_APPLY(&t_pick, NULL, y, T_APPLY(&t_choose, NULL, y));
        y = T_APPLY(&t_join, NULL, part, T_APPLY(&t_part, (&(t_range){0, width - t_count(part)}), y));
        x = cg_add(graph, y, cg_scale(graph, x, 0.5));
    }
    *loss = cg_keep(T_APPLY(&t_sum, NULL, x));
    cg_value *seed = t_leaf(graph, CG_LEAF_INPUT, "seed", 1);
    ck_assert(cg_autodiff(graph, loss, &seed, 1, w, n_layers, dw));
    for (int i = 0; i < n_layers; i++) cg_keep(dw[i]);
    return graph;
}

/* Memory that malloc has handed out, in all arenas and mapped blocks. */
static size_t heap_bytes(void) {
    struct mallinfo2 info = mallinfo2();
    return info.uordblks + info.hblkhd;
}

static const cg_exec *watched;
static size_t heap_before;
static int heap_changes;

static void watch_heap(void *context, int step, const cg_node *node, double us) {
    (void)step, (void)node;
    ck_assert_ptr_eq(context, &watched);
    ck_assert(us >= 0);
    heap_changes += heap_bytes() != heap_before;
}

START_TEST(runs_allocate_nothing) {
    cg_value *loss;
    cg_graph *graph = layered(6, 50, &loss);
    cg_recompute(graph, "relu;mul@layer*", NULL);
    t_expect_fine(graph);
    cg_plan *plan = t_plan(graph, NULL);
    cg_exec *exec = t_exec(plan, NULL);
    t_fill_leaves(graph, exec, 1);
    t_run(exec, CG_ALL_PASSES); /* OpenMP makes its threads once */
    cg_exec_watch(exec, watch_heap, &watched);
    heap_before = heap_bytes();
    for (int k = 0; k < 20; k++) t_run(exec, CG_ALL_PASSES);
    ck_assert_int_eq(heap_changes, 0); /* also none that is given back within the run */
    ck_assert_uint_eq(heap_bytes(), heap_before);
    cg_exec_free(exec);
    cg_plan_free(plan);
    cg_graph_free(graph);
}
END_TEST

/* A held choice stays while its input changes; the rest of the step sees the new input. */
START_TEST(choices_are_held) {
    cg_value *loss;
    cg_graph *graph = layered(3, 20, &loss);
    cg_keep_choices(graph);
    for (int separate = 0; separate < 2; separate++) {
        cg_plan *plan = t_plan(graph, NULL);
        cg_exec *exec = t_exec(plan, &(cg_exec_options){.separate = separate, .poison = true});
        t_fill_leaves(graph, exec, 1);
        t_run(exec, CG_ALL_PASSES);
        double free_loss = data_of(exec, loss)[0];
        t_run(exec, CG_ALL_PASSES | CG_HOLD_CHOICES);
        ck_assert(data_of(exec, loss)[0] == free_loss);
        int32_t held[3][10];
        int n = 0;
        for (int t = 0; t < plan->n_steps; t++)
            if (plan->steps[t]->op == &t_choose)
                memcpy(held[n++], cg_exec_data(exec, plan->steps[t]->out[0]), sizeof held[0]);
        t_fill_leaves(graph, exec, 2);
        t_run(exec, CG_PASS_BIT(CG_FORWARD) | CG_HOLD_CHOICES);
        ck_assert(data_of(exec, loss)[0] != free_loss);
        n = 0;
        for (int t = 0; t < plan->n_steps; t++)
            if (plan->steps[t]->op == &t_choose)
                ck_assert(!memcmp(held[n++], cg_exec_data(exec, plan->steps[t]->out[0]), sizeof held[0]));
        ck_assert_int_eq(n, 3);
        double held_loss = data_of(exec, loss)[0];
        t_run(exec, CG_ALL_PASSES);
        ck_assert(data_of(exec, loss)[0] != held_loss);
        cg_exec_free(exec);
        cg_plan_free(plan);
    }
    cg_graph_free(graph);
}
END_TEST

/* A value that was not in the plan has no memory. */
START_TEST(what_the_plan_does_not_hold) {
    cg_graph *graph = cg_graph_new(&t_ops);
    cg_value *x = t_leaf(graph, CG_LEAF_INPUT, "x", 4), *dead = T_APPLY(&t_relu, NULL, x);
    cg_value *seen = cg_keep(cg_reshape(graph, cg_keep(cg_scale(graph, x, 2)), CG_SHAPE(2, 2)));
    cg_plan *plan = t_plan(graph, NULL);
    cg_exec *exec = t_exec(plan, NULL);
    t_run(exec, CG_ALL_PASSES);
    ck_assert_ptr_null(cg_exec_data(exec, dead));
    ck_assert_ptr_eq(cg_exec_data(exec, seen), cg_exec_data(exec, seen->producer->in[0]));
    cg_exec_free(exec);
    cg_plan_free(plan);
    cg_graph_free(graph);
}
END_TEST

/* What the executor adds to each step. */
START_TEST(overhead_per_step) {
    cg_value *loss;
    cg_graph *graph = layered(60, 2, &loss);
    cg_plan *plan = t_plan(graph, NULL);
    cg_exec *exec = t_exec(plan, NULL);
    t_fill_leaves(graph, exec, 1);
    t_run(exec, CG_ALL_PASSES);
    struct timespec a, b;
    clock_gettime(CLOCK_MONOTONIC, &a);
    for (int k = 0; k < 200; k++) t_run(exec, CG_ALL_PASSES);
    clock_gettime(CLOCK_MONOTONIC, &b);
    double us = (double)(b.tv_sec - a.tv_sec) * 1e6 + (double)(b.tv_nsec - a.tv_nsec) * 1e-3;
    printf("%d steps: %.3f us per step, kernels of two elements included\n", plan->n_steps,
           us / 200 / plan->n_steps);
    ck_assert(us / 200 / plan->n_steps < 50); /* loose: for sanitizers and busy machines */
    cg_exec_free(exec);
    cg_plan_free(plan);
    cg_graph_free(graph);
}
END_TEST

SUITE("graph_exec", leaves_start_as_zeros_and_stay, parts_are_written_and_read, passes_run_apart,
      backward_needs_a_forward, external_leaves, too_large_for_the_machine, a_run_is_stopped,
      failures_name_the_place, backward_fails_once, runs_allocate_nothing, choices_are_held,
      what_the_plan_does_not_hold, overhead_per_step)
