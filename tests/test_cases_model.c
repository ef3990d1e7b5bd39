/* Cases from bug reports about whole layers: coefficients, recompute, outstanding forwards, memory, sizes (see
 * tests/CASES.md), each tried over its whole kind. */
#include "tests/support.h"

#include "core/base/rng.h"
#include "models/dsv4/layer_check.h"
#include "models/train/step.h"
#include "models/train/trainer.h"

static const cg_dtype dtypes[] = {CG_F32, CG_F64};
static const char *const policies[] = {"stream", "save", "recompute"};

static void set(cg_config *config, const char *key, const char *text) {
    cg_error error = {0};
    if (!cg_config_set(config, key, text, &error)) ck_abort_msg("%s", error.text);
}

static cg_config config_of(cg_dtype dtype, const char *policy) {
    cg_config config = cg_probe_config();
    config.dtype = dtype;
    set(&config, "policy", policy);
    return config;
}

enum { ROWS = 160, SEGMENTS = 4, VOCAB = 11 };

/* Documents of given lengths, tokens drawn by (seed, row). */
typedef struct rows_of {
    int n;
    int32_t cu[SEGMENTS + 1], lengths[SEGMENTS], tokens[ROWS], targets[ROWS];
} rows_of;

static rows_of draw(int seed, int n_rows, const int32_t *lengths, int n_documents) {
    rows_of r = {.n = n_rows};
    int row = 0;
    for (int t = 0; t < n_rows; t++) r.tokens[t] = r.targets[t] = -1;
    for (int b = 0; b < SEGMENTS; b++) {
        for (int i = 0; b < n_documents && i < lengths[b]; i++, row++) {
            r.tokens[row] = (int32_t)cg_random_below((uint64_t)seed, 1, (uint64_t)row, VOCAB);
            if (i > 0) r.targets[row - 1] = r.tokens[row];
        }
        r.lengths[b] = b < n_documents ? lengths[b] : 0;
        r.cu[b + 1] = row;
    }
    return r;
}

static void feed(const cg_probe *p, const rows_of *r) {
    cg_probe_feed(p, r->cu, r->lengths, r->tokens, r->targets);
}

static void build(cg_probe *p, const cg_config *config, int n_rows) {
    cg_error error = {0};
    const cg_dsv4_options options = {
        .n_rows = n_rows, .max_segments = SEGMENTS, .max_seqlen = n_rows, .with_loss = true};
    if (!cg_config_check(config, &error) ||
        !cg_probe_build(p, config, &options, NULL, &(cg_exec_options){.poison = true}, &error))
        ck_abort_msg("%s", error.text);
    cg_probe_scatter(p, 5);
}

static void go(const cg_probe *p, unsigned passes) {
    cg_error error = {0};
    if (!cg_exec_run(p->exec, passes, &error)) ck_abort_msg("%s", error.text);
}

static double number(const cg_probe *p, const cg_value *value) {
    return value ? cg_real_get(value->dtype, cg_exec_data(p->exec, value), 0) : 0;
}

/* All gradients, then both losses. */
static double *outcome(const cg_probe *p, int64_t *n) {
    *n = 2;
    for (int k = 0; k < p->model->n_params; k++) *n += cg_shape_count(&p->model->params[k].value->shape);
    double *all = malloc(sizeof *all * (size_t)*n);
    int64_t at = 0;
    for (int k = 0; k < p->model->n_params; k++) {
        const cg_value *grad = p->grads[k];
        for (int64_t i = 0; i < cg_shape_count(&grad->shape); i++)
            all[at++] = cg_real_get(grad->dtype, cg_exec_data(p->exec, grad), i);
    }
    all[at++] = number(p, p->model->lm_loss);
    all[at] = number(p, p->model->indexer_loss);
    return all;
}

/* ---- coefficient and gradients of the indexer ---- */

/* A step whose gradients are summed over micro-batches, with packed documents of 9 and 7 tokens. */
typedef struct stepped {
    cg_step step;
    cg_exec *exec;
} stepped;

static stepped step_of(const cg_config *config, const rows_of *r) {
    stepped s;
    cg_error error = {0};
    if (!cg_config_check(config, &error) ||
        !cg_step_build(&s.step, config, &(cg_step_options){.max_segments = SEGMENTS, .keep_gradients = true},
                       &error) ||
        !(s.exec = cg_exec_new(s.step.plan, &(cg_exec_options){.poison = true}, &error)))
        ck_abort_msg("%s", error.text);
    const cg_dsv4 *m = s.step.model;
    const cg_dtype dtype = config->dtype;
    int n_targets = 0, n_real = 0;
    for (int t = 0; t < r->n; t++) n_targets += r->targets[t] >= 0, n_real += r->tokens[t] >= 0;
    memcpy(cg_exec_data(s.exec, m->tokens), r->tokens, (size_t)r->n * 4);
    memcpy(cg_exec_data(s.exec, m->targets), r->targets, (size_t)r->n * 4);
    memcpy(cg_exec_data(s.exec, m->cu_seqlens), r->cu, sizeof r->cu);
    memcpy(cg_exec_data(s.exec, m->seqlens), r->lengths, sizeof r->lengths);
    cg_real_set(dtype, cg_exec_data(s.exec, m->lm_scale), 0, 1.0 / n_targets);
    cg_real_set(dtype, cg_exec_data(s.exec, m->row_scale), 0, 1.0 / n_real);
    cg_real_set(dtype, cg_exec_data(s.exec, s.step.seed), 0, 1);
    cg_real_set(dtype, cg_exec_data(s.exec, s.step.schedule), 0, 1e-2);
    cg_real_set(dtype, cg_exec_data(s.exec, s.step.schedule), 1, 1);
    for (int p = 0; p < m->n_params; p++) cg_param_init(&m->params[p], config, s.exec);
    return s;
}

static void step_run(const stepped *s, unsigned passes) {
    cg_error error = {0};
    if (!cg_exec_run(s->exec, passes, &error)) ck_abort_msg("%s", error.text);
}

static void step_free(stepped *s) {
    cg_exec_free(s->exec);
    cg_step_free(&s->step);
}

static bool is_indexer(const stepped *s, int p) { return s->step.model->params[p].indexer; }

/* Gradient sums full of 777: the first micro-batch overwrites all with plain zeros, a later one leaves all as they are. */
START_TEST(s05_zero_coefficient_writes_and_keeps_sums) {
    for (int d = 0; d < 2; d++)
        for (int p = 0; p < 3; p++)
            for (int overwrite = 0; overwrite < 2; overwrite++) {
                cg_config config = config_of(dtypes[d], policies[p]);
                config.indexer_loss_coeff = 0;
                config.seq_len = 16, config.batch_size = 1, config.accumulate = 2;
                rows_of r = draw(1, 16, (int32_t[]){9, 7}, 2);
                stepped s = step_of(&config, &r);
                ck_assert_ptr_nonnull(s.step.keep);
                cg_real_set(config.dtype, cg_exec_data(s.exec, s.step.keep), 0, !overwrite);
                for (int k = 0; k < s.step.model->n_params; k++)
                    for (int64_t i = 0; i < cg_shape_count(&s.step.grads[k]->shape); i++)
                        cg_real_set(config.dtype, cg_exec_data(s.exec, s.step.grads[k]), i, 777);
                step_run(&s, CG_ALL_PASSES & ~CG_PASS_BIT(CG_OPTIMIZE));
                int n_indexer = 0;
                for (int k = 0; k < s.step.model->n_params; k++) {
                    n_indexer += is_indexer(&s, k);
                    for (int64_t i = 0; i < cg_shape_count(&s.step.grads[k]->shape); i++) {
                        const double x = cg_real_get(config.dtype, cg_exec_data(s.exec, s.step.grads[k]), i);
                        if (is_indexer(&s, k))
                            ck_assert(overwrite ? x == 0 && !signbit(x) : x == 777);
                        else
                            ck_assert(isfinite(x) && (!overwrite || x != 777));
                    }
                }
                ck_assert_int_gt(n_indexer, 5);
                step_free(&s);
            }
}
END_TEST

/* One optimizer step: with a coefficient every parameter of the indexer moves, without one none does. */
START_TEST(s06_the_indexer_learns) {
    for (int d = 0; d < 2; d++)
        for (int p = 0; p < 3; p++)
            for (int support = 0; support < 2; support++)
                for (int on = 0; on < 2; on++) {
                    cg_config config = config_of(dtypes[d], policies[p]);
                    config.indexer_loss_coeff = on;
                    config.support = (cg_support)support;
                    config.weight_decay = 0;
                    config.seq_len = 40, config.batch_size = 1;
                    rows_of r = draw(2, 40, (int32_t[]){31, 9}, 2);
                    stepped s = step_of(&config, &r);
                    const cg_dsv4 *m = s.step.model;
                    step_run(&s, CG_ALL_PASSES & ~CG_PASS_BIT(CG_OPTIMIZE));
                    for (int k = 0; k < m->n_params; k++) {
                        const cg_value *value = m->params[k].value;
                        if (!is_indexer(&s, k)) continue;
                        double sum = 0;
                        for (int64_t i = 0; i < cg_shape_count(&value->shape); i++)
                            sum += fabs(cg_real_get(value->dtype, cg_exec_data(s.exec, s.step.grads[k]), i));
                        char name[256];
                        ck_assert_msg((sum > 0) == on, "%s", cg_param_name(value, name, sizeof name));
                    }
                    double before[CG_MAX_PARAMS] = {0}, after[CG_MAX_PARAMS] = {0};
                    for (int pass = 0; pass < 2; pass++) {
                        for (int k = 0; k < m->n_params; k++)
                            for (int64_t i = 0; i < cg_shape_count(&m->params[k].value->shape); i++)
                                (pass ? after : before)[k] +=
                                    (double)(i % 7 + 1) *
                                    cg_real_get(config.dtype, cg_exec_data(s.exec, m->params[k].value), i);
                        if (!pass) step_run(&s, CG_PASS_BIT(CG_OPTIMIZE));
                    }
                    for (int k = 0; k < m->n_params; k++)
                        if (is_indexer(&s, k)) ck_assert((before[k] != after[k]) == on);
                    step_free(&s);
                }
}
END_TEST

/* The Hadamard rotation of both sides changes neither losses nor gradients beyond rounding, selecting few or all. */
START_TEST(s22_rotation_of_a_layer) {
    for (int topk = 1; topk <= 40; topk += 13)
        for (int support = 0; support < 2; support++) {
            double *results[2];
            int64_t n;
            for (int rotate = 0; rotate < 2; rotate++) {
                cg_config config = config_of(CG_F64, "stream");
                config.index_hadamard = rotate;
                config.index_topk = topk;
                config.support = (cg_support)support;
                cg_probe p = {0};
                build(&p, &config, 80);
                rows_of r = draw(3, 80, (int32_t[]){61, 19}, 2);
                feed(&p, &r);
                go(&p, CG_ALL_PASSES);
                results[rotate] = outcome(&p, &n);
                cg_probe_free(&p);
            }
            ck_assert(results[0][n - 1] > 0 || (topk == 1 && support == 0));
            ck_assert_double_eq_tol(results[0][n - 1], results[1][n - 1], 1e-12);
            expect_close("gradients", results[1], results[0], n, 1e-10);
            free(results[0]), free(results[1]);
        }
}
END_TEST

/* ---- short documents ---- */

/* Single documents of 1 to 24 tokens: forward, backward, recompute, and a plan that is kept to the byte. */
START_TEST(s26_whole_layers_of_short_documents) {
    for (int n = 1; n <= 24; n++)
        for (int d = 0; d < 2; d++) {
            double *first = NULL;
            int64_t size;
            for (int p = 0; p < 3; p++) {
                cg_config config = config_of(dtypes[d], policies[p]);
                config.index_topk = 8;
                cg_probe probe = {0};
                build(&probe, &config, n);
                rows_of r = draw(4, n, (int32_t[]){n}, 1);
                feed(&probe, &r);
                go(&probe, CG_ALL_PASSES);
                ck_assert_int_eq(cg_exec_measured_bytes(probe.exec), probe.plan->peak_bytes);
                double *all = outcome(&probe, &size);
                for (int64_t i = 0; i < size; i++) ck_assert(isfinite(all[i]));
                ck_assert((all[size - 1] > 1e-9) == (n >= 8)); /* one visible row is certain */
                if (n < 4) ck_assert(all[size - 1] == 0);
                if (p == 1) first = all;
                if (p == 2) ck_assert(!memcmp(first, all, sizeof *all * (size_t)size));
                if (p != 1) free(all);
                cg_probe_free(&probe);
            }
            free(first);
        }
}
END_TEST

/* ---- recompute ---- */

/* Two batches in flight on one plan: whatever the order, gradients are those of one batch after the other. */
START_TEST(s34_outstanding_forwards) {
    static const char *const orders[] = {"A1a1B2b2C3c3", "A1B2a1b2C3c3", "A1B2b2a1C3c3",
                                         "A1B2C3a1b2c3", "A1B2C3c3b2a1", "A1E4B2a1E4b2C3E4c3"};
    static const char *const more[] = {"stream", "save", "recompute", "*norm*,relu,rope,csa_compress@layer*",
                                       "stream+csa_attention,csa_compress"};
    enum { FORWARD = CG_PASS_BIT(CG_FORWARD), BACKWARD = CG_PASS_BIT(CG_BACKWARD) };
    for (int d = 0; d < 2; d++)
        for (int p = 0; p < 5; p++) {
            cg_config config = config_of(dtypes[d], more[p]);
            config.index_topk = 1;
            double *want[3] = {0};
            int64_t n = 0;
            int32_t chosen[3][ROWS];
            for (size_t o = 0; o < sizeof orders / sizeof *orders; o++) {
                cg_probe probe = {0};
                build(&probe, &config, 48);
                cg_exec *first = probe.exec, *execs[4] = {first};
                cg_error error = {0};
                for (int i = 1; i < 4; i++)
                    ck_assert_ptr_nonnull(execs[i] = cg_exec_new(probe.plan, NULL, &error));
                for (const char *c = orders[o]; *c; c += 2) {
                    const int i = c[1] - '1';
                    probe.exec = execs[i];
                    if (c[0] <= 'Z') {
                        rows_of r = draw(10 + i, 48, (int32_t[]){30, 18}, 2);
                        cg_probe_scatter(&probe, 5);
                        feed(&probe, &r);
                    }
                    go(&probe, c[0] <= 'Z' ? FORWARD : BACKWARD);
                }
                for (int i = 0; i < 3; i++) {
                    probe.exec = execs[i];
                    double *got = outcome(&probe, &n);
                    const cg_value *topk = probe.model->layers[1].topk;
                    memcpy(chosen[i], cg_exec_data(probe.exec, topk), 48 * sizeof(int32_t));
                    if (o == 0) want[i] = got;
                    if (memcmp(want[i], got, sizeof *got * (size_t)n))
                        ck_abort_msg("order %s, policy %s", orders[o], more[p]);
                    if (o) free(got);
                }
                ck_assert(memcmp(chosen[0], chosen[1], sizeof chosen[0]) !=
                          0); /* the batches do select differently */
                probe.exec = first;
                for (int i = 1; i < 4; i++) cg_exec_free(execs[i]);
                cg_probe_free(&probe);
            }
            for (int i = 0; i < 3; i++) free(want[i]);
        }
}
END_TEST

static cg_config train_config(void) {
    static const char *const settings[][2] = {
        {"task", "recall"},         {"hidden_size", "16"},        {"num_hidden_layers", "2"},
        {"compress_ratios", "4,4"}, {"num_attention_heads", "2"}, {"head_dim", "8"},
        {"qk_rope_head_dim", "4"},  {"q_lora_rank", "8"},         {"o_groups", "2"},
        {"o_lora_rank", "4"},       {"sliding_window", "8"},      {"index_n_heads", "2"},
        {"index_head_dim", "8"},    {"index_topk", "4"},          {"intermediate_size", "16"},
        {"seq_len", "144"},         {"batch_size", "1"},          {"steps", "20"},
        {"eval_batches", "2"},      {"indexer_warmup", "0"}};
    cg_config config = cg_config_toy();
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++)
        set(&config, settings[i][0], settings[i][1]);
    return config;
}

/* The reported loss is the same with any recompute, and with evaluations between the steps. */
START_TEST(s35_reported_losses) {
    static const char *const how[] = {"save", "recompute",
                                      "*norm*,swiglu,relu,rope,csa_compress,csa_attention@layer*",
                                      "indexer_*,relu,softmax,gather@layer*"};
    cg_metrics first[4];
    for (int p = 0; p < 4; p++)
        for (int evaluate = 0; evaluate < 2; evaluate++) {
            cg_config config = train_config();
            set(&config, "policy", how[p]);
            cg_error error = {0};
            cg_feed *source = cg_feed_recall(&config, &error);
            cg_trainer *trainer = source ? cg_trainer_new(&config, source, NULL, &error) : NULL;
            if (!trainer) ck_abort_msg("%s", error.text);
            for (int i = 0; i < 4; i++) {
                cg_metrics m;
                cg_evaluation e;
                if (!cg_trainer_step(trainer, &m, &error)) ck_abort_msg("%s", error.text);
                if (evaluate) ck_assert(cg_trainer_evaluate(trainer, &e, &error));
                if (p == 0 && !evaluate) first[i] = m;
                ck_assert_int_eq(m.step, i + 1);
                ck_assert_int_eq(cg_trainer_steps(trainer), i + 1);
                ck_assert(m.indexer_loss > 0);
                ck_assert(m.indexer_loss == first[i].indexer_loss && m.lm_loss == first[i].lm_loss);
                ck_assert(m.grad_norm == first[i].grad_norm);
            }
            cg_trainer_free(trainer);
            cg_feed_free(source);
        }
}
END_TEST

static void expect_policy(const char *policy, const double *want, int64_t n_want, int n_layers, int *most) {
    cg_config config = config_of(CG_F64, policy);
    if (n_layers == 4) set(&config, "num_hidden_layers", "4"), set(&config, "compress_ratios", "4,0,4,128");
    cg_probe probe = {0};
    build(&probe, &config, ROWS);
    rows_of r = draw(6, ROWS, (int32_t[]){140, 15}, 2);
    feed(&probe, &r);
    go(&probe, CG_ALL_PASSES);
    int64_t n;
    double *got = outcome(&probe, &n);
    ck_assert_int_eq(n, n_want);
    if (memcmp(got, want, sizeof *got * (size_t)n)) ck_abort_msg("\"%s\" changes the result", policy);
    if (probe.n_clones > *most) *most = probe.n_clones;
    ck_assert_int_eq(cg_exec_measured_bytes(probe.exec), probe.plan->peak_bytes);
    free(got);
    cg_probe_free(&probe);
}

static double *saved_outcome(int n_layers, int64_t *n) {
    cg_config config = config_of(CG_F64, "save");
    if (n_layers == 4) set(&config, "num_hidden_layers", "4"), set(&config, "compress_ratios", "4,0,4,128");
    cg_probe probe = {0};
    build(&probe, &config, ROWS);
    rows_of r = draw(6, ROWS, (int32_t[]){140, 15}, 2);
    feed(&probe, &r);
    go(&probe, CG_ALL_PASSES);
    double *all = outcome(&probe, n);
    cg_probe_free(&probe);
    return all;
}

/* All 2^8 choices of what a window, a CSA and an HCA layer compute again. */
START_TEST(s36_every_choice_of_a_layer) {
    static const char *const pieces[] = {"rms_norm",       "rope,hadamard",
                                         "csa_compress",   "swiglu,relu",
                                         "csa_attention",  "indexer_head_scores,indexer_head_sum",
                                         "gather,softmax", "matmul,grouped_linear,add,scale"};
    int64_t n;
    int most = 0;
    double *want = saved_outcome(3, &n);
    for (int chosen = 1; chosen < 256; chosen++) {
        char policy[CG_POLICY_BYTES] = "";
        for (int k = 0; k < 8; k++)
            if (chosen >> k & 1) strcat(strcat(policy, *policy ? "," : ""), pieces[k]);
        strcat(policy, "@layer*");
        expect_policy(policy, want, n, 3, &most);
    }
    ck_assert_int_gt(most, 60);
    free(want);
}
END_TEST

/* Four layers, of which groups of 1, 2, 3, 4 are computed again from their entrance, wherever the group begins. */
START_TEST(s47_groups_of_layers) {
    int64_t n;
    int most = 0;
    double *want = saved_outcome(4, &n);
    for (int size = 1; size <= 4; size++)
        for (int from = 0; from + size <= 4; from++) {
            char policy[CG_POLICY_BYTES] = "";
            for (int layer = from; layer < from + size; layer++)
                snprintf(policy + strlen(policy), sizeof policy - strlen(policy), "%s*@layer%d",
                         *policy ? ";" : "", layer);
            expect_policy(policy, want, n, 4, &most);
        }
    ck_assert_int_gt(most, 40);
    free(want);
}
END_TEST

/* ---- memory ---- */

/* A layer of the reported sizes, planned: bytes that cross from forward to backward because of the indexer. */
static int64_t indexer_keeps(const cg_config *config, bool with_loss, int64_t n_rows, int *n_values,
                             int *n_loss_nodes) {
    cg_error error = {0};
    cg_probe p = {.graph = cg_graph_new(&cg_all_ops), .model = calloc(1, sizeof *p.model)};
    const cg_dsv4_options options = {
        .n_rows = n_rows, .max_segments = 1, .max_seqlen = n_rows, .with_loss = with_loss};
    if (!cg_config_check(config, &error)) ck_abort_msg("%s", error.text);
    if (!cg_dsv4_build(p.graph, config, &options, p.model)) ck_abort_msg("%s", cg_graph_error(p.graph)->text);
    cg_dsv4 *m = p.model;
    cg_value *wrt[CG_MAX_PARAMS], *grads[CG_MAX_PARAMS], *outputs[2] = {m->lm_loss, m->indexer_loss}, *seeds[2];
    const int n_outputs = m->indexer_loss ? 2 : 1;
    for (int i = 0; i < n_outputs; i++)
        seeds[i] = cg_leaf(p.graph, CG_LEAF_INPUT, i ? "b" : "a", config->dtype, CG_SHAPE(1)),
        cg_keep(outputs[i]);
    for (int k = 0; k < m->n_params; k++) wrt[k] = m->params[k].value;
    if (!cg_autodiff(p.graph, outputs, seeds, n_outputs, wrt, m->n_params, grads))
        ck_abort_msg("%s", cg_graph_error(p.graph)->text);
    for (int k = 0; k < m->n_params; k++) cg_keep(grads[k]);
    p.plan = cg_plan_make(p.graph, NULL, &error);
    if (!p.plan) ck_abort_msg("%s", error.text);
    int n;
    int64_t bytes = 0;
    cg_saved *saved = cg_plan_saved(p.plan, &n);
    *n_values = *n_loss_nodes = 0;
    for (int i = 0; i < n; i++) {
        if (!strstr(saved[i].value->scope, "indexer")) continue;
        bytes += saved[i].bytes;
        ++*n_values;
    }
    cg_saved_free(saved, n);
    for (int i = 0; i < p.plan->n_steps; i++) {
        const char *name = p.plan->steps[i]->op->name;
        *n_loss_nodes += !strncmp(name, "indexer_kl", 10) || !strncmp(name, "csa_teacher", 11) ||
                         !strncmp(name, "kl_div", 6) || !strncmp(name, "indexer_scores_at", 17) ||
                         !strncmp(name, "indexer_dense_loss", 18);
    }
    cg_plan_free(p.plan);
    cg_graph_free(p.graph);
    free(p.model);
    return bytes;
}

static cg_config reported_config(void) { /* 4 index heads of 32, 64 selected, ratio 4 */
    cg_config config = cg_config_toy();
    set(&config, "num_hidden_layers", "1"), set(&config, "compress_ratios", "4");
    set(&config, "index_n_heads", "4"), set(&config, "index_head_dim", "32"), set(&config, "index_topk", "64");
    return config;
}

/* Off, or in evaluation: of the indexer only the selection [1024, 64] lives from forward to backward, and no node of
 * loss or teacher is there. */
START_TEST(s37_a_switched_off_loss_keeps_nothing) {
    for (int support = 0; support < 2; support++)
        for (int p = 0; p < 3; p++)
            for (int evaluation = 0; evaluation < 2; evaluation++)
                for (int64_t n = 256; n <= 1024; n *= 2) {
                    cg_config config = reported_config();
                    int n_values, n_nodes;
                    set(&config, "policy", policies[p]);
                    config.support = (cg_support)support;
                    ck_assert_int_gt(indexer_keeps(&config, true, n, &n_values, &n_nodes),
                                     n * 64 * 4 + n * 4 * 32 * 4);
                    ck_assert_int_gt(n_nodes, 0);
                    if (!evaluation) config.indexer_loss_coeff = 0;
                    ck_assert_int_eq(indexer_keeps(&config, !evaluation, n, &n_values, &n_nodes), n * 64 * 4);
                    ck_assert_int_eq(n_values, 1);
                    ck_assert_int_eq(n_nodes, 0);
                }
}
END_TEST

/* Largest scratch and largest forward value of the streamed objective at n rows. */
static void temporaries(int64_t n, int support, int64_t *scratch, int64_t *value) {
    cg_error error = {0};
    bench b = bench_new(CG_F32);
    cg_graph *g = b.graph;
    const int64_t C = n / 4;
    enum { HI = 8, DI = 16, H = 2, D = 16, K = 16 };
    cg_value *qi = cg_leaf(g, CG_LEAF_PARAMETER, "qi", CG_F32, CG_SHAPE(n, HI, DI)),
             *w = cg_leaf(g, CG_LEAF_PARAMETER, "w", CG_F32, CG_SHAPE(n, HI));
    cg_value *ki = cg_leaf(g, CG_LEAF_PARAMETER, "ki", CG_F32, CG_SHAPE(C, DI)),
             *q = cg_leaf(g, CG_LEAF_INPUT, "q", CG_F32, CG_SHAPE(n, H, D));
    cg_value *kv = cg_leaf(g, CG_LEAF_INPUT, "kv", CG_F32, CG_SHAPE(n, D)),
             *ckv = cg_leaf(g, CG_LEAF_INPUT, "ckv", CG_F32, CG_SHAPE(C, D));
    cg_value *sink = cg_leaf(g, CG_LEAF_INPUT, "sink", CG_F32, CG_SHAPE(H));
    cg_value *rows =
        cg_segment_rows(g, cg_leaf(g, CG_LEAF_INPUT, "cu", CG_I32, CG_SHAPE(2)), NULL, n, 4, C).rows;
    cg_value *topk = cg_indexer_topk(g, qi, w, ki, rows, K);
    cg_attention a = cg_csa_attention(g, q, kv, ckv, sink, topk, rows, 8, 0.25, CG_TEACHER_FULL);
    cg_value *loss =
        support ? cg_indexer_dense_loss(g, qi, w, ki, q, ckv, a.window_lse, NULL, rows, 0.25, CG_TEACHER_FULL,
                                        CG_REDUCE_SUM, 1)
                : cg_indexer_kl(g, cg_indexer_scores_at(g, qi, w, ki, topk), a.teacher, rows, CG_REDUCE_SUM, 1);
    cg_value *seed = cg_leaf(g, CG_LEAF_INPUT, "seed", CG_F32, CG_SHAPE(1)), *grads[3], *wrt[] = {qi, w, ki};
    cg_keep(loss);
    ck_assert(cg_autodiff(g, &loss, &seed, 1, wrt, 3, grads));
    for (int i = 0; i < 3; i++) cg_keep(grads[i]);
    b.plan = cg_plan_make(g, NULL, &error);
    if (!b.plan) ck_abort_msg("%s", error.text);
    *scratch = *value = 0;
    for (int i = 0; i < b.plan->n_storages; i++) {
        const cg_storage *s = &b.plan->storages[i];
        if (s->category == CG_WORKSPACE)
            *scratch = s->bytes > *scratch ? s->bytes : *scratch;
        else if (s->value && !s->value->leaf && s->bytes > *value)
            *value = s->bytes;
    }
    bench_free(&b);
}

/* Nothing in the streamed objective, sparse or dense, grows with the square of n: temporaries at most double with it.
 * Spelled out at 131072 rows and 64 heads it would be 1 TiB, which is planned to the byte and refused with its size. */
START_TEST(s38_no_temporary_grows_with_the_square) {
    for (int support = 0; support < 2; support++) {
        int64_t scratch[2], value[2];
        temporaries(1024, support, &scratch[0], &value[0]);
        for (int64_t n = 2048; n <= 1 << 20; n *= 2) {
            temporaries(n, support, &scratch[1], &value[1]);
            ck_assert_int_le(scratch[1], 2 * scratch[0]);
            ck_assert_int_le(value[1], 2 * value[0]);
            scratch[0] = scratch[1], value[0] = value[1];
        }
    }
    bench b = bench_new(CG_F32);
    const int64_t n = 131072, C = n / 4;
    cg_value *scores = cg_keep(
        cg_indexer_head_scores(b.graph, cg_leaf(b.graph, CG_LEAF_INPUT, "q", CG_F32, CG_SHAPE(n, 64, 128)),
                               cg_leaf(b.graph, CG_LEAF_INPUT, "k", CG_F32, CG_SHAPE(C, 128))));
    ck_assert_int_eq(cg_tensor_bytes(CG_F32, &scores->shape), INT64_C(1) << 40);
    b.plan = cg_plan_make(b.graph, NULL, &b.error);
    ck_assert_ptr_nonnull(b.plan);
    ck_assert_int_gt(b.plan->peak_bytes, INT64_C(1) << 40);
    ck_assert_ptr_null(cg_exec_new(b.plan, NULL, &b.error));
    char want[64];
    snprintf(want, sizeof want, "the step needs %lld bytes", (long long)b.plan->peak_bytes);
    ck_assert_msg(strstr(b.error.text, want), "%s", b.error.text);
    bench_free(&b);
    b = bench_new(CG_F32); /* beyond the limit of a value it is not even built */
    cg_indexer_head_scores(b.graph,
                           cg_leaf(b.graph, CG_LEAF_INPUT, "q", CG_F32, CG_SHAPE((int64_t)1 << 40, 64, 1)),
                           cg_leaf(b.graph, CG_LEAF_INPUT, "k", CG_F32, CG_SHAPE((int64_t)1 << 38, 1)));
    ck_assert_msg(strstr(cg_graph_error(b.graph)->text, "[1099511627776, 64, 274877906944]"), "%s",
                  cg_graph_error(b.graph)->text);
    bench_free(&b);
}
END_TEST

/* ---- sizes beyond 32 bits ---- */

/* The ops of a layer planned at sizes whose offsets pass 2^31: shapes, bytes and peaks are exact, nothing is allocated. */
START_TEST(s48_offsets_beyond_32_bits) {
    static const int64_t sizes[] = {2097151, 2097152, 2097153, 131072, 16777216};
    for (int k = 0; k < 5; k++) {
        const int64_t T = sizes[k], C = T / 4;
        enum { H = 16, D = 64, K = 512 };
        bench b = bench_new(CG_F32);
        cg_graph *g = b.graph;
        g->max_value_bytes = INT64_MAX - 1;
        cg_value *q = cg_leaf(g, CG_LEAF_PARAMETER, "q", CG_F32, CG_SHAPE(T, H, D)),
                 *kv = cg_leaf(g, CG_LEAF_INPUT, "kv", CG_F32, CG_SHAPE(T, D));
        cg_value *ckv = cg_leaf(g, CG_LEAF_INPUT, "ckv", CG_F32, CG_SHAPE(C, D)),
                 *sink = cg_leaf(g, CG_LEAF_INPUT, "sink", CG_F32, CG_SHAPE(H));
        cg_value *rows =
            cg_segment_rows(g, cg_leaf(g, CG_LEAF_INPUT, "cu", CG_I32, CG_SHAPE(2)), NULL, T, 4, C).rows;
        cg_value *topk =
            cg_indexer_topk(g, q, cg_leaf(g, CG_LEAF_INPUT, "w", CG_F32, CG_SHAPE(T, H)), ckv, rows, K);
        cg_attention a = cg_csa_attention(g, q, kv, ckv, sink, topk, rows, 128, 1, CG_TEACHER_FULL);
        cg_value *spelled = cg_indexer_head_scores(g, q, ckv);
        cg_value *summed =
            cg_indexer_head_sum(g, spelled, cg_leaf(g, CG_LEAF_INPUT, "w2", CG_F32, CG_SHAPE(T, H)));
        ck_assert_msg(!cg_graph_error(g), "%s", cg_graph_error(g) ? cg_graph_error(g)->text : "");
        ck_assert_int_eq(cg_tensor_bytes(CG_F32, &a.out->shape), 4 * T * H * D);
        ck_assert_int_eq(cg_tensor_bytes(CG_F32, &spelled->shape), 4 * T * H * C);
        ck_assert_int_eq(cg_tensor_bytes(CG_F32, &summed->shape), 4 * T * C);
        ck_assert_int_eq(cg_tensor_bytes(CG_I32, &topk->shape), 4 * T * K);
        ck_assert_int_eq(cg_tensor_bytes(CG_F32, &a.teacher->shape), 4 * T * K);
        cg_keep(a.out), cg_keep(topk), cg_keep(summed), cg_keep(a.teacher);
        b.plan = cg_plan_make(g, NULL, &b.error);
        ck_assert_msg(b.plan != NULL, "%s", b.error.text);
        ck_assert_int_gt(b.plan->peak_bytes, 4 * T * H * D + 8 * T * K + 4 * T * C);
        for (int i = 0; i < b.plan->n_storages; i++) {
            const cg_storage *s = &b.plan->storages[i];
            ck_assert(s->bytes >= 0 && s->offset >= 0 && s->offset + s->reserved <= b.plan->peak_bytes);
        }
        bench_free(&b);
    }
    bench b = bench_new(CG_F32); /* 2^66 bytes: not even a limit of 63 bits lets them through wrapped */
    b.graph->max_value_bytes = INT64_MAX - 1;
    cg_indexer_head_scores(b.graph, cg_leaf(b.graph, CG_LEAF_INPUT, "q", CG_F32, CG_SHAPE(INT32_MAX, 16, 1)),
                           cg_leaf(b.graph, CG_LEAF_INPUT, "k", CG_F32, CG_SHAPE(INT32_MAX / 4, 1)));
    ck_assert_msg(
        strstr(cg_graph_error(b.graph)->text, "[2147483647, 16, 536870911] of f32 is larger than the limit"),
        "%s", cg_graph_error(b.graph)->text);
    bench_free(&b);
    b = bench_new(CG_F32); /* rows that an i32 cannot count */
    cg_segment_rows(b.graph, cg_leaf(b.graph, CG_LEAF_INPUT, "cu", CG_I32, CG_SHAPE(2)), NULL,
                    INT64_C(2147483648), 4, 0);
    ck_assert_msg(strstr(cg_graph_error(b.graph)->text, "n_rows is 2147483648, expected 0 to 2147483647"), "%s",
                  cg_graph_error(b.graph)->text);
    bench_free(&b);
}
END_TEST

/* A whole model of 2097153 rows is planned and refused with its size. */
START_TEST(s48_a_model_beyond_32_bits) {
    cg_config config = reported_config();
    set(&config, "num_attention_heads", "16"), set(&config, "head_dim", "64");
    int n_values, n_nodes;
    ck_assert_int_gt(indexer_keeps(&config, true, 2097153, &n_values, &n_nodes),
                     INT64_C(4) * 2097153 * (64 + 4 * 32));
}
END_TEST

/* K = 0 in a layer: no loss, nothing compressed is read, and all else trains. */
START_TEST(s49_no_selected_rows) {
    for (int d = 0; d < 2; d++)
        for (int p = 0; p < 3; p++) {
            cg_config config = config_of(dtypes[d], policies[p]);
            config.index_topk = 0;
            cg_probe probe = {0};
            build(&probe, &config, 60);
            rows_of r = draw(8, 60, (int32_t[]){41, 19}, 2);
            feed(&probe, &r);
            go(&probe, CG_ALL_PASSES);
            ck_assert(number(&probe, probe.model->indexer_loss) == 0);
            for (int k = 0; k < probe.model->n_params; k++) {
                const cg_value *value = probe.model->params[k].value;
                const bool unused =
                    strstr(value->scope, "layer1/attn/compressor") || probe.model->params[k].indexer;
                for (int64_t i = 0; i < cg_shape_count(&value->shape); i++) {
                    const double x = cg_real_get(value->dtype, cg_exec_data(probe.exec, probe.grads[k]), i);
                    ck_assert(unused ? x == 0 : isfinite(x));
                }
            }
            cg_probe_free(&probe);
        }
}
END_TEST

SUITE("cases_model", s05_zero_coefficient_writes_and_keeps_sums, s06_the_indexer_learns,
      s22_rotation_of_a_layer, s26_whole_layers_of_short_documents, s34_outstanding_forwards,
      s35_reported_losses, s36_every_choice_of_a_layer, s47_groups_of_layers,
      s37_a_switched_off_loss_keeps_nothing, s38_no_temporary_grows_with_the_square, s48_offsets_beyond_32_bits,
      s48_a_model_beyond_32_bits, s49_no_selected_rows)
