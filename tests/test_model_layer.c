/* The whole layer: its gradient check, and what must hold whatever the numbers are: causality, packing,
 * padding, policies, supports, empty and short documents. */
#include "tests/support.h"

#include "core/base/rng.h"
#include "models/dsv4/layer_check.h"
#include "models/train/step.h"

/* ---- packed documents, and a run over them ---- */

enum { ROWS = 192, SEGMENTS = 6, VOCAB = 11, FILL = VOCAB - 1 /* a token that stands in no document */ };

typedef struct packed {
    int n_rows, n_segments;
    int32_t cu_seqlens[SEGMENTS + 1], seqlens[SEGMENTS], tokens[ROWS], targets[ROWS];
} packed;

/* A document by its number: the same tokens wherever it stands. */
typedef struct document {
    int number, length, padding;
} document;

static packed pack(int n_rows, int n_documents, const document *documents) {
    packed p = {.n_rows = n_rows, .n_segments = SEGMENTS};
    int row = 0;
    for (int t = 0; t < n_rows; t++) p.tokens[t] = p.targets[t] = -1;
    for (int d = 0; d < n_documents; d++) {
        const document *doc = &documents[d];
        for (int i = 0; i < doc->length + doc->padding; i++, row++) {
            uint64_t stream = (uint64_t)doc->number;
            bool real = i < doc->length;
            p.tokens[row] = real ? (int32_t)cg_random_below(11, stream, (uint64_t)i, FILL) : FILL;
            if (real && i + 1 < doc->length)
                p.targets[row] = (int32_t)cg_random_below(11, stream, (uint64_t)i + 1, FILL);
        }
        p.seqlens[d] = doc->length;
        p.cu_seqlens[d + 1] = row;
    }
    for (int d = n_documents; d < SEGMENTS; d++) p.cu_seqlens[d + 1] = row;
    ck_assert_int_le(row, n_rows);
    return p;
}

#define PACK(n_rows, ...)                                                                                      \
    pack(n_rows, (int)(sizeof((document[]){__VA_ARGS__}) / sizeof(document)), (document[]){__VA_ARGS__})

typedef struct run {
    cg_probe probe;
    cg_config config;
} run;

static void build(run *r, const cg_config *config, int n_rows) {
    cg_error error = {0};
    cg_dsv4_options options = {
        .n_rows = n_rows, .max_segments = SEGMENTS, .max_seqlen = n_rows, .with_loss = true};
    r->config = *config;
    if (!cg_config_check(config, &error) ||
        !cg_probe_build(&r->probe, config, &options, NULL, &(cg_exec_options){.poison = true}, &error))
        ck_abort_msg("%s", error.text);
    cg_probe_scatter(&r->probe, 5);
}

static void go(run *r, const packed *p) {
    cg_error error = {0};
    cg_probe_feed(&r->probe, p->cu_seqlens, p->seqlens, p->tokens, p->targets);
    if (!cg_exec_run(r->probe.exec, CG_ALL_PASSES, &error)) ck_abort_msg("%s", error.text);
}

static run run_new(const cg_config *config, const packed *p) {
    run r = {0};
    build(&r, config, p->n_rows);
    go(&r, p);
    return r;
}

static void run_free(run *r) { cg_probe_free(&r->probe); }

static const char *logits(const run *r, int row) {
    return (const char *)cg_exec_data(r->probe.exec, r->probe.model->logits) +
           (size_t)row * VOCAB * cg_dtype_bytes(r->config.dtype);
}

static bool same_logits(const run *a, int row_a, const run *b, int row_b, int n) {
    return !memcmp(logits(a, row_a), logits(b, row_b), (size_t)n * VOCAB * cg_dtype_bytes(a->config.dtype));
}

static double loss(const run *r, const cg_value *value) {
    return value ? cg_real_get(value->dtype, cg_exec_data(r->probe.exec, value), 0) : 0;
}

static double lm_loss(const run *r) { return loss(r, r->probe.model->lm_loss); }
static double indexer_loss(const run *r) { return loss(r, r->probe.model->indexer_loss); }

/* The first parameter whose gradient has other bits, or -1. */
static int differing_gradient(const run *a, const run *b, bool main_only) {
    ck_assert_int_eq(a->probe.model->n_params, b->probe.model->n_params);
    for (int p = 0; p < a->probe.model->n_params; p++) {
        const cg_value *value = a->probe.model->params[p].value;
        if (main_only && a->probe.model->params[p].indexer) continue;
        if (memcmp(cg_exec_data(a->probe.exec, a->probe.grads[p]),
                   cg_exec_data(b->probe.exec, b->probe.grads[p]),
                   (size_t)cg_tensor_bytes(value->dtype, &value->shape)))
            return p;
    }
    return -1;
}

static void expect_equal_gradients(const run *a, const run *b, bool main_only, const char *how) {
    int p = differing_gradient(a, b, main_only);
    char name[256];
    if (p >= 0)
        ck_abort_msg("the gradient of %s differs %s",
                     cg_param_name(a->probe.model->params[p].value, name, sizeof name), how);
}

/* Every bit of an indexer gradient is 0, or (want_zero false) at least one entry of each is not. */
static void expect_indexer_gradients(const run *r, bool want_zero) {
    int n = 0;
    for (int p = 0; p < r->probe.model->n_params; p++) {
        const cg_value *value = r->probe.model->params[p].value;
        if (!r->probe.model->params[p].indexer) continue;
        n++;
        const char *bytes = cg_exec_data(r->probe.exec, r->probe.grads[p]);
        bool zero = true;
        for (int64_t i = 0; i < cg_tensor_bytes(value->dtype, &value->shape); i++) zero &= bytes[i] == 0;
        char name[256];
        if (zero != want_zero)
            ck_abort_msg("the gradient of %s is %szero", cg_param_name(value, name, sizeof name),
                         zero ? "" : "not ");
    }
    ck_assert_int_gt(n, 5);
}

static const cg_dtype dtypes[] = {CG_F32, CG_F64};
static const char *const policies[] = {"stream", "save", "recompute"};

/* The configurations that hold for all of a kind of test. */
static cg_config config_of(cg_dtype dtype, const char *policy) {
    cg_config config = cg_probe_config();
    config.dtype = dtype;
    snprintf(config.policy, sizeof config.policy, "%s", policy);
    return config;
}

#define FOR_EACH_CONFIG(c)                                                                                     \
    for (int d_ = 0; d_ < 2; d_++)                                                                             \
        for (int p_ = 0; p_ < 3; p_++)                                                                         \
            for (cg_config c = config_of(dtypes[d_], policies[p_]), *once_ = &c; once_; once_ = NULL)

/* ---- gradients ---- */

START_TEST(layer_gradients_match_differences) {
    cg_layer_report *report = calloc(1, sizeof *report);
    cg_error error = {0};
    if (!cg_layer_check(NULL, 5, report, &error)) ck_abort_msg("%s", error.text);
    if (!report->ok) ck_abort_msg("%s", report->worst);
    ck_assert_int_eq(report->n_runs, 21); /* 18 indexer losses, the language-model loss once per policy */
    ck_assert_double_lt(report->worst_rel, 1e-6);
    ck_assert_int_gt(report->n_entries, 1000);
    free(report);
}
END_TEST

/* Two gradients of equal shape exchanged: a check that passed now would check nothing. */
START_TEST(exchanged_gradients_are_noticed) {
    cg_config config = config_of(CG_F64, "stream");
    packed p = PACK(40, {1, 33, 3});
    run r = run_new(&config, &p);
    const cg_dsv4 *m = r.probe.model;
    cg_value *wrt[2], *grads[2];
    int n = 0;
    for (int k = 0; k < m->n_params; k++)
        if (strstr(m->params[k].value->scope, "layer1/ffn") && strcmp(m->params[k].value->name, "w2.weight")) {
            ck_assert_int_lt(n, 2);
            wrt[n] = m->params[k].value;
            grads[n++] = r.probe.grads[k];
        }
    ck_assert_int_eq(n, 2);
    for (int exchanged = 0; exchanged < 2; exchanged++) {
        cg_gradcheck check = {.exec = r.probe.exec,
                              .n_outputs = 1,
                              .outputs = &r.probe.model->lm_loss,
                              .seeds = &r.probe.lm_seed,
                              .n_wrt = 2,
                              .wrt = wrt,
                              .grads = exchanged ? (cg_value *[]){grads[1], grads[0]} : grads};
        cg_gradcheck_report report;
        cg_error error = {0};
        ck_assert(cg_gradcheck_run(&check, NULL, &report, &error));
        ck_assert(report.ok == !exchanged);
    }
    run_free(&r);
}
END_TEST

/* ---- who sees whom ---- */

START_TEST(no_row_sees_a_later_token) {
    FOR_EACH_CONFIG(config) {
        packed p = PACK(170, {1, 150, 3}, {2, 12, 0});
        run a = run_new(&config, &p);
        static const int places[] = {149, 128, 127, 75, 4, 3, 0};
        for (size_t k = 0; k < sizeof places / sizeof *places; k++) {
            int j = places[k];
            packed changed = p;
            changed.tokens[j] = (p.tokens[j] + 1) % FILL;
            run b = run_new(&config, &changed);
            if (!same_logits(&a, 0, &b, 0, j)) ck_abort_msg("a row before %d sees token %d", j, j);
            ck_assert(!same_logits(&a, j, &b, j, 1));
            ck_assert(same_logits(&a, 153, &b, 153, 12)); /* the other document */
            run_free(&b);
        }
        run_free(&a);
    }
}
END_TEST

/* What the window cannot reach comes through compressed rows: token 0 must matter to the last rows. */
START_TEST(compressed_rows_carry_what_is_far) {
    cg_config config = config_of(CG_F64, "stream");
    config.index_topk = 64;
    packed p = PACK(150, {1, 150, 0}), changed = p;
    changed.tokens[0] = (p.tokens[0] + 1) % FILL;
    run a = run_new(&config, &p), b = run_new(&config, &changed);
    ck_assert(!same_logits(&a, 149, &b, 149, 1));
    run_free(&a);
    run_free(&b);
}
END_TEST

START_TEST(a_packed_document_is_as_if_alone) {
    FOR_EACH_CONFIG(config) {
        packed together = PACK(192, {1, 37, 2}, {2, 131, 0}, {3, 18, 0}), first = PACK(37, {1, 37, 0}),
               second = PACK(131, {2, 131, 0}), third = PACK(18, {3, 18, 0});
        run all = run_new(&config, &together), a = run_new(&config, &first), b = run_new(&config, &second),
            c = run_new(&config, &third);
        ck_assert(same_logits(&all, 0, &a, 0, 37));
        ck_assert(same_logits(&all, 39, &b, 0, 131));
        ck_assert(same_logits(&all, 170, &c, 0, 18));
        /* means over all targets and real rows of three runs make that of the packed one */
        double targets = 36 + 130 + 17, real = 37 + 131 + 18, bound = config.dtype == CG_F32 ? 1e-5 : 1e-13;
        double lm = (36 * lm_loss(&a) + 130 * lm_loss(&b) + 17 * lm_loss(&c)) / targets;
        double indexer = (37 * indexer_loss(&a) + 131 * indexer_loss(&b) + 18 * indexer_loss(&c)) / real;
        ck_assert_double_eq_tol(lm_loss(&all), lm, bound * lm);
        ck_assert_double_eq_tol(indexer_loss(&all), indexer, bound * indexer);
        run_free(&all);
        run_free(&a);
        run_free(&b);
        run_free(&c);
    }
}
END_TEST

START_TEST(documents_may_change_places) {
    FOR_EACH_CONFIG(config) {
        packed ab = PACK(180, {1, 37, 0}, {2, 131, 0}), ba = PACK(180, {2, 131, 0}, {1, 37, 0});
        run a = run_new(&config, &ab), b = run_new(&config, &ba);
        ck_assert(same_logits(&a, 0, &b, 131, 37));
        ck_assert(same_logits(&a, 37, &b, 0, 131));
        run_free(&a);
        run_free(&b);
    }
}
END_TEST

START_TEST(empty_documents_change_nothing) {
    FOR_EACH_CONFIG(config) {
        packed full = PACK(60, {1, 21, 2}, {2, 30, 0}),
               gaps = PACK(60, {9, 0, 0}, {1, 21, 2}, {8, 0, 0}, {7, 0, 0}, {2, 30, 0}, {6, 0, 0});
        run a = run_new(&config, &full), b = run_new(&config, &gaps);
        ck_assert(same_logits(&a, 0, &b, 0, 60));
        ck_assert(lm_loss(&a) == lm_loss(&b) && indexer_loss(&a) == indexer_loss(&b));
        expect_equal_gradients(&a, &b, false, "with empty documents between");
        run_free(&a);
        run_free(&b);
    }
}
END_TEST

/* ---- padding ---- */

static void fill_embedding(run *r, double x) {
    cg_value *table = cg_leaf_find(r->probe.graph, "embed.weight");
    ck_assert_ptr_nonnull(table);
    for (int64_t i = 0; i < cg_dim(table, 1); i++)
        cg_real_set(table->dtype, cg_exec_data(r->probe.exec, table), FILL * cg_dim(table, 1) + i, x);
}

/* Only padding holds the token FILL, so its embedding is what the padding is filled with. */
START_TEST(padding_reaches_nothing_real) {
    FOR_EACH_CONFIG(config) {
        packed p = PACK(192, {1, 137, 7}, {2, 0, 5}, {3, 30, 2}, {4, 3, 4});
        run a = run_new(&config, &p);
        fill_embedding(&a, -3);
        go(&a, &p);
        run b = run_new(&config, &p);
        fill_embedding(&b, 1e6);
        go(&b, &p);
        static const int starts[] = {0, 149, 181}, lengths[] = {137, 30, 3};
        for (int d = 0; d < 3; d++) ck_assert(same_logits(&a, starts[d], &b, starts[d], lengths[d]));
        ck_assert(!same_logits(&a, 137, &b, 137, 1)); /* the filling itself is seen by its own row */
        ck_assert(lm_loss(&a) == lm_loss(&b) && indexer_loss(&a) == indexer_loss(&b));
        expect_equal_gradients(&a, &b, false, "with other padding");
        /* a forward pass may even meet NaN there */
        fill_embedding(&b, NAN);
        cg_error error = {0};
        if (!cg_exec_run(b.probe.exec, CG_PASS_BIT(CG_FORWARD), &error)) ck_abort_msg("%s", error.text);
        for (int d = 0; d < 3; d++) ck_assert(same_logits(&a, starts[d], &b, starts[d], lengths[d]));
        ck_assert(lm_loss(&a) == lm_loss(&b) && indexer_loss(&a) == indexer_loss(&b));
        run_free(&a);
        run_free(&b);
    }
}
END_TEST

/* ---- policies, supports, coefficient ---- */

START_TEST(policies_agree) {
    for (int support = 0; support < 2; support++)
        for (int teacher = CG_TEACHER_FULL; teacher <= CG_TEACHER_COMPRESSED; teacher++)
            for (int d = 0; d < 2; d++) {
                packed p = PACK(170, {1, 133, 3}, {2, 30, 0});
                run runs[3];
                for (int i = 0; i < 3; i++) {
                    cg_config config = config_of(dtypes[d], policies[i]);
                    config.support = (cg_support)support;
                    config.teacher = (cg_teacher)teacher;
                    runs[i] = run_new(&config, &p);
                }
                const run *stream = &runs[0], *save = &runs[1], *recompute = &runs[2];
                ck_assert_int_gt(recompute->probe.n_clones, 0);
                ck_assert(lm_loss(save) == lm_loss(recompute) && indexer_loss(save) == indexer_loss(recompute));
                expect_equal_gradients(save, recompute, false, "when recomputed");
                expect_indexer_gradients(save, false);
                double bound = dtypes[d] == CG_F64 ? 1e-12 : 1e-6;
                ck_assert_double_eq_tol(lm_loss(stream), lm_loss(save), bound * lm_loss(save));
                ck_assert_double_eq_tol(indexer_loss(stream), indexer_loss(save), bound * indexer_loss(save));
                if (dtypes[d] == CG_F64) expect_equal_gradients(stream, save, true, "between stream and save");
                for (int k = 0; k < save->probe.model->n_params; k++) {
                    const cg_value *value = save->probe.model->params[k].value;
                    int64_t n = cg_shape_count(&value->shape);
                    double *got = malloc((size_t)n * sizeof *got), *want = malloc((size_t)n * sizeof *want);
                    for (int64_t i = 0; i < n; i++) {
                        got[i] = cg_real_get(value->dtype,
                                             cg_exec_data(stream->probe.exec, stream->probe.grads[k]), i);
                        want[i] =
                            cg_real_get(value->dtype, cg_exec_data(save->probe.exec, save->probe.grads[k]), i);
                    }
                    char name[256];
                    expect_close(cg_param_name(value, name, sizeof name), got, want, n,
                                 dtypes[d] == CG_F64 ? 1e-10 : 1e-4);
                    free(got);
                    free(want);
                }
                for (int i = 0; i < 3; i++) run_free(&runs[i]);
            }
}
END_TEST

/* ---- every recompute policy, on one selection ---- */

/* A step without optimizer; every clone is compared with its original while it runs. */
typedef struct given_run {
    cg_step step;
    run run; /* looks at the step as at a probe */
} given_run;

/* With a selection (the one CSA layer's, [T, K]) that one is given, else the step chooses. */
static given_run given_new(const cg_config *config, const packed *p, const int32_t *topk) {
    given_run g = {.run.config = *config};
    cg_error error = {0};
    const cg_step_options options = {.max_segments = SEGMENTS,
                                     .given_topk = topk != NULL,
                                     .keep_topk = true,
                                     .keep_gradients = true,
                                     .no_optimizer = true,
                                     .plan.keep_cloned_originals = true};
    g.run.config.batch_size = 1;
    g.run.config.seq_len = p->n_rows;
    if (!cg_step_build(&g.step, &g.run.config, &options, &error))
        ck_abort_msg("%s: %s", config->policy, error.text);
    const cg_exec_options how = {.poison = true, .verify_recompute = true};
    cg_probe *probe = &g.run.probe;
    *probe =
        (cg_probe){.graph = g.step.graph, .model = g.step.model, .lm_seed = g.step.seed, .grads = g.step.grads};
    if (!(probe->exec = cg_exec_new(g.step.plan, &how, &error))) ck_abort_msg("%s", error.text);
    cg_probe_scatter(probe, 5);
    const cg_value *chosen = probe->model->layers[1].topk;
    if (topk) {
        ck_assert(chosen->leaf == CG_LEAF_INPUT);
        memcpy(cg_exec_data(probe->exec, chosen), topk, (size_t)cg_tensor_bytes(CG_I32, &chosen->shape));
    }
    go(&g.run, p);
    ck_assert_int_eq(cg_exec_measured_bytes(probe->exec), g.step.plan->peak_bytes);
    return g;
}

static void given_free(given_run *g) {
    cg_exec_free(g->run.probe.exec);
    cg_step_free(&g->step);
}

static int32_t *selection_of(const given_run *g) {
    const cg_value *topk = g->run.probe.model->layers[1].topk;
    size_t bytes = (size_t)cg_tensor_bytes(CG_I32, &topk->shape);
    return memcpy(malloc(bytes), cg_exec_data(g->run.probe.exec, topk), bytes);
}

/* Losses and gradients have the bits of `want`; returns the number of clones. */
static int expect_same_bits(const given_run *want, const char *policy, const packed *p, const int32_t *topk) {
    cg_config config = want->run.config;
    snprintf(config.policy, sizeof config.policy, "%s", policy);
    given_run got = given_new(&config, p, topk);
    ck_assert_msg(lm_loss(&got.run) == lm_loss(&want->run) &&
                      indexer_loss(&got.run) == indexer_loss(&want->run),
                  "policy %s changes a loss", policy);
    expect_equal_gradients(&want->run, &got.run, false, policy);
    int n_clones = got.step.n_clones;
    given_free(&got);
    return n_clones;
}

/* The policies that name one op, for each op of a step that may run again. */
static int every_op_alone(const given_run *want, const char *form, const packed *p, const int32_t *topk) {
    const cg_graph *graph = want->step.graph;
    int n_that_clone = 0;
    for (int n = 0; n < graph->n_nodes; n++) {
        const cg_op *op = graph->nodes[n]->op;
        bool seen = graph->nodes[n]->pass != CG_FORWARD || op->replay == CG_REPLAY_CHOICE || op->mutates;
        for (int k = 0; k < n && !seen; k++) seen = graph->nodes[k]->op == op;
        if (seen) continue;
        char policy[CG_POLICY_BYTES];
        snprintf(policy, sizeof policy, "%s%s", form, op->name);
        n_that_clone += expect_same_bits(want, policy, p, topk) > 0;
    }
    return n_that_clone;
}

START_TEST(every_recompute_policy_gives_the_same_bits) {
    static const char *const mixed[] = {"*",
                                        "*norm*",
                                        "*@layer0",
                                        "*@layer1",
                                        "*@layer2",
                                        "*@layer1/attn",
                                        "*@layer1/attn/indexer",
                                        "*@layer*/ffn;rope@layer2",
                                        "swiglu@layer0;*norm@layer1;*@layer2/attn",
                                        "csa_*,rope,matmul@layer?",
                                        "reshape,detach,scale",
                                        "segment_rows,visible_indices;csa_attention"};
    packed p = PACK(170, {1, 133, 3}, {2, 21, 2}, {3, 0, 0}, {4, 3, 1});
    for (int d = 0; d < 2; d++)
        for (int stream = 0; stream < 2; stream++) {
            const char *form = stream ? "stream+" : "recompute=";
            cg_config config = config_of(dtypes[d], stream ? "stream" : "save");
            given_run chosen = given_new(&config, &p, NULL);
            int32_t *topk = selection_of(&chosen);
            expect_same_bits(&chosen, config.policy, &p, topk); /* given or chosen: one result */
            ck_assert_int_gt(every_op_alone(&chosen, form, &p, topk), 12);
            int most = 0;
            for (size_t i = 0; i < sizeof mixed / sizeof *mixed; i++) {
                char policy[CG_POLICY_BYTES];
                snprintf(policy, sizeof policy, "%s%s", form, mixed[i]);
                int n_clones = expect_same_bits(&chosen, policy, &p, topk);
                ck_assert_int_gt(n_clones, 0);
                if (n_clones > most) most = n_clones;
            }
            ck_assert_int_gt(most, 60);
            if (!stream) ck_assert_int_gt(expect_same_bits(&chosen, "recompute", &p, topk), 0);
            free(topk);
            given_free(&chosen);
        }
}
END_TEST

START_TEST(coefficient_zero_gives_exact_zeros) {
    FOR_EACH_CONFIG(config) {
        packed p = PACK(160, {1, 9, 0}, {2, 7, 0}, {3, 133, 1});
        config.indexer_loss_coeff = 1e-3;
        run on = run_new(&config, &p);
        config.indexer_loss_coeff = 0;
        run off = run_new(&config, &p);
        expect_indexer_gradients(&on, false);
        expect_indexer_gradients(&off, true);
        ck_assert(lm_loss(&on) == lm_loss(&off) && indexer_loss(&off) == 0);
        ck_assert(same_logits(&on, 0, &off, 0, p.n_rows));
        expect_equal_gradients(&on, &off, true, "with coefficient 0");
        run_free(&on);
        run_free(&off);
    }
}
END_TEST

/* All visible rows selected: the two supports are one. */
START_TEST(supports_coincide_when_all_is_selected) {
    for (int p_ = 0; p_ < 3; p_++)
        for (int teacher = CG_TEACHER_FULL; teacher <= CG_TEACHER_COMPRESSED; teacher++) {
            packed p = PACK(150, {1, 133, 3}, {2, 14, 0});
            cg_config config = config_of(CG_F64, policies[p_]);
            config.teacher = (cg_teacher)teacher;
            config.index_topk = 40;
            run sparse = run_new(&config, &p);
            config.support = CG_SUPPORT_DENSE;
            run dense = run_new(&config, &p);
            ck_assert(indexer_loss(&sparse) > 0);
            ck_assert(lm_loss(&sparse) == lm_loss(&dense));
            ck_assert_double_eq_tol(indexer_loss(&sparse), indexer_loss(&dense), 1e-12 * indexer_loss(&sparse));
            /* with fewer selected they differ; the dense one does not look at the selection of its own layer */
            config.index_topk = 2;
            run few_dense = run_new(&config, &p);
            ck_assert(indexer_loss(&few_dense) == indexer_loss(&dense));
            config.support = CG_SUPPORT_SPARSE;
            run few = run_new(&config, &p);
            ck_assert(fabs(indexer_loss(&few) - indexer_loss(&dense)) > 1e-6);
            run_free(&sparse);
            run_free(&dense);
            run_free(&few_dense);
            run_free(&few);
        }
}
END_TEST

/* No document is as long as a group: nothing is compressed, and what depends on it has gradient zero. */
START_TEST(documents_shorter_than_the_ratio) {
    for (int support = 0; support < 2; support++) FOR_EACH_CONFIG(config) {
            config.support = (cg_support)support;
            packed list[] = {PACK(5, {1, 3, 0}, {2, 2, 0}), PACK(1, {1, 1, 0}), PACK(3, {1, 3, 0}),
                             PACK(9, {1, 3, 0}, {2, 1, 0}, {3, 2, 0}, {4, 0, 0}, {5, 3, 0}),
                             PACK(4, {1, 2, 2})};
            for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
                run r = run_new(&config, &list[i]);
                ck_assert(indexer_loss(&r) == 0);
                ck_assert(isfinite(lm_loss(&r)));
                for (int p = 0; p < r.probe.model->n_params; p++) {
                    const cg_value *value = r.probe.model->params[p].value;
                    bool unused = r.probe.model->params[p].indexer || strstr(value->scope, "compressor");
                    for (int64_t k = 0; k < cg_shape_count(&value->shape); k++) {
                        double x = cg_real_get(value->dtype, cg_exec_data(r.probe.exec, r.probe.grads[p]), k);
                        ck_assert(unused ? x == 0 : isfinite(x));
                    }
                }
                run_free(&r);
            }
        }
}
END_TEST

START_TEST(any_number_of_threads_gives_the_same_bits) {
    if (cg_thread_slots() < 2) return;
    for (int support = 0; support < 2; support++) FOR_EACH_CONFIG(config) {
            config.support = (cg_support)support;
            packed p = PACK(192, {1, 137, 7}, {2, 30, 2});
            cg_error error = {0};
            ck_assert(cg_threads_set(1, &error));
            run one = run_new(&config, &p);
            ck_assert(cg_threads_set(2, &error));
            run two = run_new(&config, &p);
            ck_assert(same_logits(&one, 0, &two, 0, p.n_rows));
            ck_assert(lm_loss(&one) == lm_loss(&two) && indexer_loss(&one) == indexer_loss(&two));
            expect_equal_gradients(&one, &two, false, "on two threads");
            run_free(&one);
            run_free(&two);
        }
}
END_TEST

SUITE("model_layer", layer_gradients_match_differences, exchanged_gradients_are_noticed,
      no_row_sees_a_later_token, compressed_rows_carry_what_is_far, a_packed_document_is_as_if_alone,
      documents_may_change_places, empty_documents_change_nothing, padding_reaches_nothing_real, policies_agree,
      every_recompute_policy_gives_the_same_bits, coefficient_zero_gives_exact_zeros,
      supports_coincide_when_all_is_selected, documents_shorter_than_the_ratio,
      any_number_of_threads_gives_the_same_bits)
