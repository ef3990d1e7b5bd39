/* What joins configuration, feed and trainer, from outside: steps are worked again by a graph of this
 * file's own, with sums, divisors, clipping, rates and AdamW in plain f64, and evaluations from logits. The
 * trainer is seen through its metrics and checkpoints alone. */
#include "tests/support.h"

#include "graph/exec.h"
#include "models/train/trainer.h"

#include <sys/stat.h>
#include <unistd.h>

enum { STEPS = 4, MICRO = 2, EVALUATED = 3, MOST = 3 * 100 };

/* All that enters the arithmetic is said here. Three layers of all kinds, f64; eps is of the gradients'
 * size, so that it counts; the warm-up of the indexer ends behind step 1. */
static const char settings[] =
    "{\"vocab_size\": 256, \"hidden_size\": 16, \"num_hidden_layers\": 3,"
    " \"compress_ratios\": [4, 0, 128], \"num_attention_heads\": 2, \"head_dim\": 8,"
    " \"qk_rope_head_dim\": 4, \"q_lora_rank\": 8, \"o_groups\": 2, \"o_lora_rank\": 4,"
    " \"sliding_window\": 5, \"index_n_heads\": 2, \"index_head_dim\": 4, \"index_topk\": 4,"
    " \"intermediate_size\": 24, \"initializer_range\": 0.125, \"recall_keys\": 12,"
    " \"recall_values\": 6, \"recall_pairs\": 10, \"seq_len\": 136, \"batch_size\": 2,"
    " \"accumulate\": 2, \"steps\": 8, \"seed\": 11, \"dtype\": \"f64\","
    " \"learning_rate\": 0.03125, \"min_lr_ratio\": 0.25, \"warmup_steps\": 2,"
    " \"decay_steps\": 6, \"beta1\": 0.75, \"beta2\": 0.9375, \"adam_eps\": 0.001,"
    " \"weight_decay\": 0.5, \"indexer_loss_coeff\": 0.375, \"teacher\": \"full\","
    " \"support\": \"sparse\", \"indexer_warmup\": 1, \"policy\": \"stream\","
    " \"eval_batches\": 3}";

/* Of a step counted from 1: up to the peak in two steps; then low + (peak - low) (1 + cos(pi k / 4)) / 2
 * for k = 1 .. 4, low = 1/128; cos(pi / 4) = 0.70710678118654752. */
static const double rates[] = {0.015625,
                               0.03125,
                               0.0078125 + 0.0234375 * 0.85355339059327376,
                               0.0078125 + 0.0234375 * 0.5,
                               0.0078125 + 0.0234375 * 0.14644660940672624,
                               0.0078125,
                               0.0078125,
                               0.0078125};

static char folder[] = "/tmp/csagrad-steps-XXXXXX"; /* made by main */

static cg_config config_of(cg_task task, double max_norm) {
    cg_config c = cg_config_default(task);
    cg_error error = {0};
    if (!cg_config_parse(&c, settings, &error)) ck_abort_msg("%s", error.text);
    c.task = task;
    c.max_grad_norm = max_norm;
    if (!cg_config_check(&c, &error)) ck_abort_msg("%s", error.text);
    return c;
}

static cg_feed *feed_of(const cg_config *config) {
    cg_error error = {0};
    cg_feed *feed = cg_feed_new(folder, config, &error);
    if (!feed) ck_abort_msg("%s", error.text);
    return feed;
}

static cg_trainer *trainer_of(const cg_config *config, const cg_feed *feed) {
    cg_error error = {0};
    cg_trainer *trainer = cg_trainer_new(config, feed, NULL, &error);
    if (!trainer) ck_abort_msg("%s", error.text);
    return trainer;
}

static cg_batch *batch_of(const cg_feed *feed) {
    cg_batch *batch = cg_batch_new(feed, NULL);
    ck_assert_ptr_nonnull(batch);
    return batch;
}

/* Files of two to four short lines: pieces are short, and many batches end in padding. */
static bool write_text(void) {
    for (int d = 0; d < 60; d++) {
        char path[64];
        snprintf(path, sizeof path, "%s/%02d", folder, d);
        FILE *file = fopen(path, "w");
        if (!file) return false;
        for (int i = 0; i < 2 + d % 3; i++) fprintf(file, "the %d. of %d\n", i * d % 7, d);
        if (fclose(file)) return false;
    }
    return true;
}

/* What a checkpoint holds. */
static cg_safetensors *state_of(const cg_trainer *trainer) {
    char path[64];
    cg_error error = {0};
    snprintf(path, sizeof path, "%s.state", folder);
    if (!cg_trainer_save(trainer, path, &error)) ck_abort_msg("%s", error.text);
    cg_safetensors *state = cg_safetensors_open(path, &error);
    if (!state) ck_abort_msg("%s", error.text);
    unlink(path);
    return state;
}

static const double *tensor_of(const cg_safetensors *state, const char *prefix, const char *name, int64_t *n) {
    char full[256];
    snprintf(full, sizeof full, "%s%s", prefix, name);
    const cg_tensor *tensor = cg_safetensors_find(state, full);
    if (!tensor) ck_abort_msg("no tensor %s", full);
    ck_assert_int_eq(tensor->dtype, CG_F64);
    if (n) *n = cg_shape_count(&tensor->shape);
    return tensor->data;
}

/* ---- kinds of parameters, by their names ---- */

static bool ends_with(const char *name, const char *end) {
    size_t n = strlen(name), m = strlen(end);
    return n >= m && !strcmp(name + n - m, end);
}

static bool is_norm(const char *name) { return ends_with(name, "norm.weight"); }
static bool is_sink(const char *name) { return ends_with(name, ".attn_sink"); }

/* Matrices alone decay. */
static bool decays(const char *name) {
    return !is_norm(name) && !is_sink(name) && !ends_with(name, ".ape") && strcmp(name, "embed.weight") != 0;
}

/* ---- a graph of the test's own ---- */

typedef struct witness {
    cg_graph *graph;
    cg_dsv4 *model;
    cg_plan *plan;
    cg_exec *exec;
    cg_value *seeds[2], *grads[CG_MAX_PARAMS];
    int64_t n_rows;
} witness;

/* Losses are summed over rows, without a coefficient. The indexer's warm-up is written as a selection that
 * all visible rows fit into, and the loss over all of them. */
static void witness_build(witness *w, const cg_config *config, const cg_feed *feed, bool warming, bool trains) {
    const cg_feed_facts *facts = cg_feed_facts_of(feed);
    cg_config c = *config;
    cg_error error = {0};
    c.indexer_loss_coeff = 1;
    if (warming) c.index_topk = facts->max_seqlen / CG_RATIO_CSA, c.support = CG_SUPPORT_DENSE;
    *w = (witness){
        .graph = cg_graph_new(&cg_all_ops), .model = calloc(1, sizeof *w->model), .n_rows = facts->n_rows};
    cg_dsv4_options options = {.n_rows = facts->n_rows,
                               .max_segments = facts->max_segments,
                               .max_seqlen = facts->max_seqlen,
                               .form = CG_FORM_STREAM,
                               .with_loss = trains};
    ck_assert(cg_dsv4_build(w->graph, &c, &options, w->model));
    cg_keep(w->model->logits);
    cg_value *outputs[2] = {w->model->lm_loss, w->model->indexer_loss}, *wrt[CG_MAX_PARAMS];
    for (int p = 0; p < w->model->n_params; p++) wrt[p] = w->model->params[p].value;
    for (int i = 0; trains && i < 2; i++) {
        cg_keep(outputs[i]);
        w->seeds[i] = cg_leaf(w->graph, CG_LEAF_INPUT, i ? "seed1" : "seed0", CG_F64, CG_SHAPE(1));
    }
    if (trains) ck_assert(cg_autodiff(w->graph, outputs, w->seeds, 2, wrt, w->model->n_params, w->grads));
    for (int p = 0; trains && p < w->model->n_params; p++) cg_keep(w->grads[p]);
    w->plan = cg_plan_make(w->graph, NULL, &error);
    if (!w->plan || !(w->exec = cg_exec_new(w->plan, NULL, &error))) ck_abort_msg("%s", error.text);
}

static void witness_free(witness *w) {
    cg_exec_free(w->exec);
    cg_plan_free(w->plan);
    cg_graph_free(w->graph);
    free(w->model);
}

static const char *name_of(const witness *w, int p, char name[256]) {
    return cg_param_name(w->model->params[p].value, name, 256);
}

static void witness_load(witness *w, const cg_safetensors *state) {
    char name[256];
    for (int p = 0; p < w->model->n_params; p++)
        cg_exec_write(w->exec, w->model->params[p].value, tensor_of(state, "", name_of(w, p, name), NULL));
}

static void witness_run(witness *w, const cg_batch *batch) {
    cg_error error = {0};
    const cg_dsv4 *m = w->model;
    cg_exec_write(w->exec, m->tokens, batch->tokens);
    cg_exec_write(w->exec, m->targets, batch->targets);
    cg_exec_write(w->exec, m->cu_seqlens, batch->cu_seqlens);
    cg_exec_write(w->exec, m->seqlens, batch->seqlens);
    cg_exec_set(w->exec, m->lm_scale, 0, 1);
    cg_exec_set(w->exec, m->row_scale, 0, 1);
    if (!cg_exec_run(w->exec, CG_ALL_PASSES, &error)) ck_abort_msg("%s", error.text);
}

/* From the logits: nats over all targets, and how many have the largest logit. */
static double nats_of(const witness *w, const cg_batch *batch, int64_t *right) {
    const int64_t n_words = cg_dim(w->model->logits, 1);
    const double *logits = cg_exec_data(w->exec, w->model->logits);
    double nats = 0;
    for (int64_t t = 0; t < batch->n_rows; t++, logits += n_words) {
        if (batch->targets[t] < 0) continue;
        double sum = 0, want = logits[batch->targets[t]];
        int64_t above = 0;
        for (int64_t v = 0; v < n_words; v++) sum += exp(logits[v] - want), above += logits[v] > want;
        nats += log(sum);
        *right += above == 0;
    }
    return nats;
}

static void counts_of(const cg_batch *batch, int64_t *n_targets, int64_t *n_real) {
    for (int64_t t = 0; t < batch->n_rows; t++) {
        *n_targets += batch->targets[t] >= 0;
        *n_real += batch->tokens[t] >= 0;
    }
}

static void expect_number(const char *what, double got, double want) {
    expect_close(what, &got, &want, 1, 1e-12);
}

/* ---- steps ---- */

/* One AdamW step on one parameter: `before` and `after` are checkpoints, grad is summed and not clipped. */
static void expect_adamw(const cg_config *c, const cg_safetensors *before, const cg_safetensors *after,
                         const char *name, const double *grad, double norm, int step) {
    int64_t n;
    const double *p = tensor_of(before, "", name, &n), *m = tensor_of(before, "adamw.m.", name, NULL),
                 *v = tensor_of(before, "adamw.v.", name, NULL), rate = rates[step - 1],
                 clip = norm > c->max_grad_norm ? c->max_grad_norm / norm : 1;
    double *want[3];
    for (int i = 0; i < 3; i++) want[i] = calloc((size_t)n, sizeof **want);
    for (int64_t i = 0; i < n; i++) {
        const double g = clip * grad[i];
        want[1][i] = 0.75 * m[i] + 0.25 * g;
        want[2][i] = 0.9375 * v[i] + 0.0625 * g * g;
        const double mean = want[1][i] / (1 - pow(0.75, step)), square = want[2][i] / (1 - pow(0.9375, step));
        want[0][i] = p[i] - rate * mean / (sqrt(square) + 0.001) - (decays(name) ? rate * 0.5 * p[i] : 0);
    }
    static const char *const prefixes[] = {"", "adamw.m.", "adamw.v."};
    for (int i = 0; i < 3; i++) {
        char what[300];
        snprintf(what, sizeof what, "step %d: %s%s", step, prefixes[i], name);
        expect_close(what, tensor_of(after, prefixes[i], name, NULL), want[i], n, 1e-11);
        free(want[i]);
    }
}

/* Returns the rows of padding. */
static int64_t expect_step(const cg_config *config, const cg_feed *feed, int step, const cg_safetensors *before,
                           const cg_safetensors *after, const cg_metrics *got) {
    witness w;
    witness_build(&w, config, feed, step == 1, true);
    witness_load(&w, before);
    cg_batch *batches[MICRO];
    int64_t n_targets = 0, n_real = 0, right = 0;
    for (int i = 0; i < MICRO; i++) {
        batches[i] = batch_of(feed);
        cg_feed_batch(feed, false, (uint64_t)((step - 1) * MICRO + i), batches[i]);
        counts_of(batches[i], &n_targets, &n_real);
    }
    ck_assert_int_lt(n_targets, n_real);
    cg_exec_set(w.exec, w.seeds[0], 0, 1 / (double)n_targets);
    cg_exec_set(w.exec, w.seeds[1], 0, config->indexer_loss_coeff / (double)n_real);
    double *sums[CG_MAX_PARAMS], nats = 0, kl = 0, squares = 0;
    for (int i = 0; i < MICRO; i++) {
        witness_run(&w, batches[i]);
        nats += nats_of(&w, batches[i], &right);
        kl += cg_exec_get(w.exec, w.model->indexer_loss, 0);
        for (int p = 0; p < w.model->n_params; p++) {
            const int64_t n = cg_shape_count(&w.grads[p]->shape);
            const double *grad = cg_exec_data(w.exec, w.grads[p]);
            if (i == 0) sums[p] = calloc((size_t)n, sizeof **sums);
            for (int64_t k = 0; k < n; k++) sums[p][k] += grad[k];
        }
        cg_batch_free(batches[i]);
    }
    expect_number("loss", got->lm_loss, nats / (double)n_targets);
    expect_number("indexer loss", got->indexer_loss, config->indexer_loss_coeff * kl / (double)n_real);
    expect_number("rate", got->lr, rates[step - 1]);
    ck_assert_int_eq(got->step, step);
    ck_assert_int_eq(got->warming, step == 1);
    for (int p = 0; p < w.model->n_params; p++)
        for (int64_t k = 0, n = cg_shape_count(&w.grads[p]->shape); k < n; k++)
            squares += sums[p][k] * sums[p][k];
    expect_number("norm", got->grad_norm, sqrt(squares));
    char name[256];
    for (int p = 0; p < w.model->n_params; p++) {
        expect_adamw(config, before, after, name_of(&w, p, name), sums[p], sqrt(squares), step);
        free(sums[p]);
    }
    ck_assert_int_eq(cg_safetensors_count(after), 3 * w.model->n_params);
    witness_free(&w);
    return MICRO * w.n_rows - n_real;
}

/* ---- evaluation ---- */

/* Rows that see more compressed rows than are selected: row i of a segment sees (i + 1) / 4. */
static int64_t exercised_rows(const cg_config *config, const cg_batch *batch) {
    int64_t n = 0;
    for (int64_t s = 0; s < batch->max_segments; s++)
        for (int32_t i = 0; i < batch->seqlens[s]; i++) n += (i + 1) / CG_RATIO_CSA > config->index_topk;
    return n;
}

static void expect_evaluation(const cg_config *config, const cg_feed *feed, cg_trainer *trainer) {
    cg_evaluation got;
    cg_error error = {0};
    if (!cg_trainer_evaluate(trainer, &got, &error)) ck_abort_msg("%s", error.text);
    cg_safetensors *state = state_of(trainer);
    witness w;
    witness_build(&w, config, feed, false, false);
    witness_load(&w, state);
    cg_batch *batch = batch_of(feed);
    int64_t n_targets = 0, n_real = 0, right = 0, exercised = 0;
    double nats = 0;
    for (uint64_t i = 0; i < EVALUATED; i++) {
        cg_feed_batch(feed, true, i, batch);
        witness_run(&w, batch);
        nats += nats_of(&w, batch, &right);
        counts_of(batch, &n_targets, &n_real);
        exercised += exercised_rows(config, batch);
    }
    ck_assert_int_eq(got.n_targets, n_targets);
    expect_number("held-out loss", got.val_loss, nats / (double)n_targets);
    ck_assert_int_gt(right, 0);
    expect_number("accuracy", got.val_accuracy, (double)right / (double)n_targets);
    if (config->task == CG_TASK_RECALL) expect_number("far", got.val_accuracy_far, got.val_accuracy);
    double captured = 0;
    for (int l = 0; l < got.n_layers; l++) captured += 1 - got.layers[l].kl / got.layers[l].kl_uniform;
    expect_number("captured", got.captured, captured / got.n_layers);
    ck_assert_int_eq(got.n_layers, 1);
    ck_assert_int_gt(exercised, 0);
    ck_assert_int_eq(got.layers[0].rows, exercised);
    cg_batch_free(batch);
    witness_free(&w);
    cg_safetensors_close(state);
}

static void run_of(cg_task task, bool clips) {
    const cg_config config = config_of(task, clips ? 0.0625 : 64);
    cg_feed *feed = feed_of(&config);
    cg_trainer *trainer = trainer_of(&config, feed);
    cg_safetensors *before = state_of(trainer);
    int64_t padding = 0;
    for (int step = 1; step <= STEPS; step++) {
        cg_metrics metrics;
        cg_error error = {0};
        if (!cg_trainer_step(trainer, &metrics, &error)) ck_abort_msg("%s", error.text);
        cg_safetensors *after = state_of(trainer);
        padding += expect_step(&config, feed, step, before, after, &metrics);
        ck_assert_int_eq(metrics.grad_norm > config.max_grad_norm, clips);
        cg_safetensors_close(before);
        before = after;
    }
    ck_assert_int_eq(padding > 0, task == CG_TASK_TEXT);
    cg_safetensors_close(before);
    expect_evaluation(&config, feed, trainer);
    cg_trainer_free(trainer);
    cg_feed_free(feed);
}

START_TEST(text) { run_of(CG_TASK_TEXT, false); }
END_TEST
START_TEST(text_clipped) { run_of(CG_TASK_TEXT, true); }
END_TEST
START_TEST(recall) { run_of(CG_TASK_RECALL, false); }
END_TEST
START_TEST(recall_clipped) { run_of(CG_TASK_RECALL, true); }
END_TEST

START_TEST(rates_by_hand) {
    cg_config c = config_of(CG_TASK_TEXT, 1);
    for (int step = 1; step <= 8; step++) expect_number("rate", cg_learning_rate(&c, step), rates[step - 1]);
    c.warmup_steps = 0; /* the first step is already on the cosine, the last is its end */
    c.decay_steps = 2;
    c.min_lr_ratio = 0;
    expect_number("rate", cg_learning_rate(&c, 1), 0.015625);
    ck_assert_double_le(fabs(cg_learning_rate(&c, 2)), 1e-17);
    c.min_lr_ratio = 1; /* no decay */
    expect_number("rate", cg_learning_rate(&c, 1), 0.03125);
    expect_number("rate", cg_learning_rate(&c, 7), 0.03125);
}
END_TEST

/* Norms 1, sinks 0, the rest normal: of each tensor mean, mean square and the share within one deviation,
 * all within five of their own; moments 0. */
START_TEST(start_values) {
    const cg_config config = config_of(CG_TASK_RECALL, 1);
    cg_feed *feed = feed_of(&config);
    cg_trainer *trainer = trainer_of(&config, feed);
    cg_safetensors *state = state_of(trainer);
    int n_normal = 0;
    for (int i = 0; i < cg_safetensors_count(state); i++) {
        const cg_named_tensor *t = cg_safetensors_at(state, i);
        const double *x = t->tensor.data;
        const int64_t n = cg_shape_count(&t->tensor.shape);
        const bool moment = !strncmp(t->name, "adamw.", 6);
        double mean = 0, square = 0, inside = 0;
        for (int64_t k = 0; k < n; k++) {
            mean += x[k] / 0.125 / (double)n;
            square += x[k] / 0.125 * x[k] / 0.125 / (double)n;
            inside += fabs(x[k]) < 0.125;
        }
        if (moment || is_norm(t->name) || is_sink(t->name)) {
            for (int64_t k = 0; k < n; k++)
                if (x[k] != (moment || is_sink(t->name) ? 0 : 1))
                    ck_abort_msg("%s starts with %g", t->name, x[k]);
            continue;
        }
        n_normal++;
        const double root = sqrt((double)n);
        if (fabs(mean) > 5 / root || fabs(square - 1) > 5 * sqrt(2) / root ||
            fabs(inside / (double)n - 0.682689) > 5 * 0.465 / root)
            ck_abort_msg("%s: of %lld start values the mean is %g deviations, the mean square %g, %g of them "
                         "are within 1",
                         t->name, (long long)n, mean, square, inside);
    }
    ck_assert_int_gt(n_normal, 30);
    cg_safetensors_close(state);
    cg_trainer_free(trainer);
    cg_feed_free(feed);
}
END_TEST

int main(void) {
    if (!mkdtemp(folder) || !write_text()) return EXIT_FAILURE;
    const TTest *const tests[] = {text, text_clipped, recall, recall_clipped, rates_by_hand, start_values};
    int failed = suite_run("trainer_steps", tests, (int)(sizeof tests / sizeof *tests));
    char command[64];
    snprintf(command, sizeof command, "rm -r %s", folder);
    return system(command) ? EXIT_FAILURE : failed;
}
