/* The model in bf16: loss and gradients near those of f32, memory as planned, the same bits however it runs. */
#include "tests/support.h"

#include "core/base/rng.h"
#include "models/dsv4/layer_check.h"
#include "models/train/step.h"

enum { ROWS = 320, SEGMENTS = 3, VOCAB = 256 };

/* The toy on three documents, the second one padded. */
static cg_config toy(cg_dtype dtype, const char *policy) {
    cg_config c = cg_config_toy();
    c.dtype = dtype;
    snprintf(c.policy, sizeof c.policy, "%s", policy);
    return c;
}

static void feed(const cg_probe *probe) {
    static const int32_t cu_seqlens[SEGMENTS + 1] = {0, 200, 260, ROWS},
                                               seqlens[SEGMENTS] = {200, 50, ROWS - 260};
    static int32_t tokens[ROWS], targets[ROWS];
    for (int b = 0; b < SEGMENTS; b++)
        for (int32_t t = cu_seqlens[b]; t < cu_seqlens[b + 1]; t++) {
            bool real = t - cu_seqlens[b] < seqlens[b] - 1;
            tokens[t] = (int32_t)cg_random_below(3, 1, (uint64_t)t, VOCAB);
            targets[t] = real ? (int32_t)cg_random_below(3, 1, (uint64_t)t + 1, VOCAB) : -1;
        }
    cg_probe_feed(probe, cu_seqlens, seqlens, tokens, targets);
}

typedef struct settings {
    bool given_topk, dense;
    cg_exec_options how;
} settings;

static cg_probe probe_of(const cg_config *config, const settings *s) {
    cg_probe probe;
    cg_error error = {0};
    cg_dsv4_options options = {.n_rows = ROWS,
                               .max_segments = SEGMENTS,
                               .max_seqlen = ROWS,
                               .with_loss = true,
                               .given_topk = s->given_topk,
                               .attend_all = s->dense};
    if (!cg_config_check(config, &error) || !cg_probe_build(&probe, config, &options, NULL, &s->how, &error))
        ck_abort_msg("%s", error.text);
    cg_probe_scatter(&probe, 5);
    feed(&probe);
    return probe;
}

static void run(cg_probe *probe) {
    cg_error error = {0};
    if (!cg_exec_run(probe->exec, CG_ALL_PASSES, &error)) ck_abort_msg("%s", error.text);
}

static double *read(const cg_probe *probe, const cg_value *value) {
    int64_t n = cg_shape_count(&value->shape);
    double *x = malloc((size_t)n * sizeof *x);
    cg_exec_read_real(probe->exec, value, 0, n, x);
    return x;
}

/* Relative norm of the difference. */
static double distance(const cg_probe *a, const cg_value *va, const cg_probe *b, const cg_value *vb) {
    double *x = read(a, va), *y = read(b, vb), difference = 0, norm = 0;
    for (int64_t i = 0; i < cg_shape_count(&va->shape); i++) {
        difference += (x[i] - y[i]) * (x[i] - y[i]);
        norm += y[i] * y[i];
    }
    free(x);
    free(y);
    return norm > 0 ? sqrt(difference / norm) : sqrt(difference);
}

/* With equal selections, since a near tie that flips changes a gradient as a whole. Index scores have a ReLU for each
 * head and key, so rounding that turns one on or off shows in the indexers' gradients. */
START_TEST(loss_and_gradients_are_near_f32) {
    for (int dense = 0; dense < 2; dense++) {
        cg_config in_f32 = toy(CG_F32, "stream"), in_bf16 = toy(CG_BF16, "stream");
        cg_probe a = probe_of(&in_bf16, &(settings){.given_topk = true, .dense = dense, .how.poison = true});
        cg_probe b = probe_of(&in_f32, &(settings){.dense = dense, .how.poison = true});
        run(&b);
        for (int l = 0; l < a.model->n_layers; l++) {
            const cg_value *to = a.model->layers[l].topk, *from = b.model->layers[l].topk;
            if (to && to->leaf) cg_exec_write(a.exec, to, cg_exec_data(b.exec, from));
        }
        run(&a);
        ck_assert_int_eq(a.model->logits->dtype, CG_BF16);
        ck_assert_int_eq(a.model->lm_loss->dtype, CG_F32);
        ck_assert(distance(&a, a.model->lm_loss, &b, b.model->lm_loss) < 1e-3);
        ck_assert(distance(&a, a.model->indexer_loss, &b, b.model->indexer_loss) < 2e-3);
        for (int p = 0; p < a.model->n_params; p++) {
            char name[256];
            const cg_dsv4_param *param = &a.model->params[p];
            double off = distance(&a, a.grads[p], &b, b.grads[p]), bound = param->indexer ? 0.12 : 0.06;
            ck_assert_int_eq(param->value->dtype, CG_F32);
            ck_assert_int_eq(a.grads[p]->dtype, CG_F32);
            if (!(off > 0 && off < bound))
                ck_abort_msg("the gradient of %s is %.3g off f32, bound %g",
                             cg_param_name(param->value, name, sizeof name), off, bound);
        }
        cg_probe_free(&a);
        cg_probe_free(&b);
    }
}
END_TEST

/* The gradient of a parameter that is rounded for a product: as many ones as bf16 cannot count. */
START_TEST(gradients_of_parameters_are_not_rounded) {
    enum { N = 257 };
    cg_graph *graph = cg_graph_new(&cg_all_ops);
    cg_value *x = cg_leaf(graph, CG_LEAF_INPUT, "x", CG_BF16, CG_SHAPE(N, 2)), *dw;
    cg_value *w = cg_leaf(graph, CG_LEAF_PARAMETER, "w", CG_F32, CG_SHAPE(2, 3));
    cg_value *seed = cg_leaf(graph, CG_LEAF_INPUT, "seed", CG_BF16, CG_SHAPE(N, 3));
    cg_value *y = cg_matmul(graph, x, cg_cast(graph, w, CG_BF16), false, false);
    ck_assert(cg_autodiff(graph, &y, &seed, 1, &w, 1, &dw));
    cg_keep(dw);
    cg_plan *plan = cg_plan_make(graph, NULL, NULL);
    cg_exec *exec = cg_exec_new(plan, NULL, NULL);
    ck_assert_ptr_nonnull(exec);
    for (int i = 0; i < 2 * N; i++) cg_exec_set(exec, x, i, 1);
    for (int i = 0; i < 3 * N; i++) cg_exec_set(exec, seed, i, 1);
    ck_assert(cg_exec_run(exec, CG_ALL_PASSES, NULL));
    for (int i = 0; i < 6; i++) ck_assert(cg_exec_get(exec, dw, i) == N);
    cg_exec_free(exec);
    cg_plan_free(plan);
    cg_graph_free(graph);
}
END_TEST

static void expect_same_gradients(const cg_probe *a, const cg_probe *b, const char *how) {
    for (int p = 0; p < a->model->n_params; p++) {
        char name[256];
        const cg_value *x = a->grads[p], *y = b->grads[p];
        if (memcmp(cg_exec_data(a->exec, x), cg_exec_data(b->exec, y),
                   (size_t)cg_tensor_bytes(x->dtype, &x->shape)))
            ck_abort_msg("the gradient of %s differs %s",
                         cg_param_name(a->model->params[p].value, name, sizeof name), how);
    }
}

/* One arena against separate blocks that hold NaN, where AddressSanitizer sees every overrun, and one thread against all;
 * the arena has the planned size. */
START_TEST(same_bits_and_memory_as_planned) {
    static const char *const policies[] = {"save", "recompute", "stream", "stream+rms_norm,swiglu,cast"};
    cg_error error = {0};
    for (int i = 0; i < 4; i++) {
        cg_config in_f32 = toy(CG_F32, policies[i]), in_bf16 = toy(CG_BF16, policies[i]);
        ck_assert(cg_threads_set(cg_thread_slots(), &error));
        cg_probe a = probe_of(&in_bf16, &(settings){.how.poison = true});
        run(&a);
        ck_assert_int_eq(cg_exec_measured_bytes(a.exec), a.plan->peak_bytes);
        ck_assert(cg_threads_set(1, &error));
        cg_probe b = probe_of(&in_bf16, &(settings){.how = {.separate = true, .poison = true}});
        run(&b);
        expect_same_gradients(&a, &b, "with the number of threads, or between separate blocks and one arena");
        cg_probe f32 = probe_of(&in_f32, &(settings){0});
        if (a.plan->peak_bytes > 0.75 * (double)f32.plan->peak_bytes)
            ck_abort_msg("%s: the peak is %lld bytes, in f32 %lld", policies[i], (long long)a.plan->peak_bytes,
                         (long long)f32.plan->peak_bytes);
        cg_probe_free(&a);
        cg_probe_free(&b);
        cg_probe_free(&f32);
    }
}
END_TEST

/* What is computed again gives the gradients of what was kept. */
START_TEST(recompute_gives_the_same_bits) {
    static const char *const pairs[][2] = {{"save", "recompute"}, {"stream", "stream+*@layer*"}};
    for (int i = 0; i < 2; i++) {
        cg_config kept = toy(CG_BF16, pairs[i][0]), again = toy(CG_BF16, pairs[i][1]);
        cg_probe a = probe_of(&kept, &(settings){0}), b = probe_of(&again, &(settings){0});
        ck_assert_int_gt(b.n_clones, 0);
        run(&a);
        run(&b);
        expect_same_gradients(&a, &b, "when it is computed again");
        cg_probe_free(&a);
        cg_probe_free(&b);
    }
}
END_TEST

/* The scores of all heads, which ordinary autograd keeps, take 2 bytes each; what is chosen by is f32. */
START_TEST(saved_scores_are_bf16) {
    cg_config config = toy(CG_BF16, "save");
    cg_probe probe = probe_of(&config, &(settings){0});
    int n, n_scores = 0;
    cg_saved *saved = cg_plan_saved(probe.plan, &n);
    for (int i = 0; i < n; i++) {
        const cg_node *node = saved[i].value->producer;
        if (!node || strcmp(node->op->name, "relu")) continue;
        n_scores++;
        ck_assert_int_eq(saved[i].bytes, 2 * ROWS * config.index_n_heads * (ROWS / CG_RATIO_CSA));
    }
    ck_assert_int_eq(n_scores, 2);
    for (int i = 0; i < probe.graph->n_nodes; i++)
        if (!strcmp(probe.graph->nodes[i]->op->name, "topk"))
            ck_assert_int_eq(probe.graph->nodes[i]->in[0]->dtype, CG_F32);
    cg_saved_free(saved, n);
    cg_probe_free(&probe);
}
END_TEST

SUITE("bf16", loss_and_gradients_are_near_f32, gradients_of_parameters_are_not_rounded,
      same_bits_and_memory_as_planned, recompute_gives_the_same_bits, saved_scores_are_bf16)
