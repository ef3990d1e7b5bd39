/* Training as a whole: same bits on any number of threads and across a stop, the three policies, micro-batches,
 * checkpoints that are damaged. */
#include "tests/support.h"

#include "graph/exec.h"
#include "models/train/checkpoint.h"
#include "models/train/trainer.h"

#include <sys/stat.h>
#include <unistd.h>

/* A model small enough to train for some steps in a second: every kind of layer, selection exercised. */
static cg_config small_config(void) {
    cg_config c = cg_config_toy();
    const char *settings[][2] = {{"hidden_size", "32"},
                                 {"num_hidden_layers", "3"},
                                 {"compress_ratios", "0,4,128"},
                                 {"num_attention_heads", "2"},
                                 {"head_dim", "16"},
                                 {"qk_rope_head_dim", "8"},
                                 {"q_lora_rank", "16"},
                                 {"o_groups", "2"},
                                 {"o_lora_rank", "8"},
                                 {"sliding_window", "8"},
                                 {"index_n_heads", "2"},
                                 {"index_head_dim", "8"},
                                 {"index_topk", "4"},
                                 {"intermediate_size", "32"},
                                 {"seq_len", "144"},
                                 {"batch_size", "2"},
                                 {"steps", "20"},
                                 {"warmup_steps", "5"},
                                 {"eval_batches", "2"},
                                 {"task", "recall"},
                                 {"indexer_warmup", "0"},
                                 {"policy", "stream"}};
    cg_error error = {0};
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++)
        if (!cg_config_set(&c, settings[i][0], settings[i][1], &error)) ck_abort_msg("%s", error.text);
    if (!cg_config_check(&c, &error)) ck_abort_msg("%s", error.text);
    return c;
}

static void set(cg_config *config, const char *key, const char *text) {
    cg_error error = {0};
    if (!cg_config_set(config, key, text, &error)) ck_abort_msg("%s", error.text);
}

static cg_feed *feed_of(const cg_config *config) {
    cg_error error = {0};
    cg_feed *feed = cg_feed_recall(config, &error);
    if (!feed) ck_abort_msg("%s", error.text);
    return feed;
}

static cg_trainer *trainer_of(const cg_config *config, const cg_feed *feed) {
    cg_error error = {0};
    cg_trainer *trainer = cg_trainer_new(config, feed, NULL, &error);
    if (!trainer) ck_abort_msg("%s", error.text);
    return trainer;
}

static cg_trainer *trainer_from(const cg_config *config, const cg_feed *feed, const char *checkpoint) {
    cg_error error = {0};
    cg_trainer *trainer = cg_trainer_new(config, feed, &(cg_trainer_options){.checkpoint = checkpoint}, &error);
    if (!trainer) ck_abort_msg("%s", error.text);
    return trainer;
}

static void expect_checkpoint_refused(const cg_config *config, const cg_feed *feed, const char *path,
                                      const char *part) {
    cg_error error = {0};
    cg_trainer *trainer = cg_trainer_new(config, feed, &(cg_trainer_options){.checkpoint = path}, &error);
    if (trainer || error.code != CG_BAD_INPUT || !strstr(error.text, part))
        ck_abort_msg("expected a refusal with \"%s\", got: %s", part, trainer ? "a trainer" : error.text);
}

static void train(cg_trainer *trainer, int n, cg_metrics *metrics) {
    cg_error error = {0};
    for (int i = 0; i < n; i++)
        if (!cg_trainer_step(trainer, &metrics[i], &error)) ck_abort_msg("%s", error.text);
}

static void expect_same_metrics(const cg_metrics *a, const cg_metrics *b, int n) {
    for (int i = 0; i < n; i++) {
        ck_assert_int_eq(a[i].step, b[i].step);
        ck_assert(a[i].lm_loss == b[i].lm_loss);
        ck_assert(a[i].indexer_loss == b[i].indexer_loss);
        ck_assert(a[i].grad_norm == b[i].grad_norm);
        ck_assert_int_eq(a[i].planned_peak_bytes, b[i].planned_peak_bytes);
        ck_assert_int_eq(a[i].measured_peak_bytes, b[i].measured_peak_bytes);
    }
}

START_TEST(same_bits_on_any_number_of_threads) {
    cg_config config = small_config();
    set(&config, "indexer_warmup", "2");
    cg_feed *feed = feed_of(&config);
    cg_metrics one[5], all[5];
    cg_evaluation e1, e2;
    cg_error error = {0};
    ck_assert(cg_threads_set(1, &error));
    cg_trainer *a = trainer_of(&config, feed);
    train(a, 5, one);
    ck_assert(cg_trainer_evaluate(a, &e1, &error));
    ck_assert(cg_threads_set(cg_thread_slots(), &error));
    cg_trainer *b = trainer_of(&config, feed);
    train(b, 5, all);
    ck_assert(cg_trainer_evaluate(b, &e2, &error));
    expect_same_metrics(one, all, 5);
    ck_assert(e1.val_loss == e2.val_loss);
    ck_assert(e1.captured == e2.captured && e1.recall == e2.recall);
    ck_assert_int_gt(e1.layers[0].rows, 0);
    cg_trainer_free(a);
    cg_trainer_free(b);
    cg_feed_free(feed);
}
END_TEST

/* There is nothing to warm up where no indexer is trained. */
START_TEST(no_warmup_without_a_loss) {
    for (int with = 0; with < 2; with++) {
        cg_config config = small_config();
        set(&config, "indexer_warmup", "2");
        if (!with) set(&config, "indexer_loss_coeff", "0");
        cg_feed *feed = feed_of(&config);
        cg_trainer *trainer = trainer_of(&config, feed);
        cg_metrics metrics[3];
        train(trainer, 3, metrics);
        for (int i = 0; i < 3; i++) ck_assert_int_eq(metrics[i].warming, with && i < 2);
        cg_trainer_free(trainer);
        cg_feed_free(feed);
    }
}
END_TEST

START_TEST(stop_and_resume_gives_the_same_bits) {
    cg_config config = small_config();
    set(&config, "indexer_warmup", "7"); /* the stop lies between the phases' borders and behind one */
    cg_feed *feed = feed_of(&config);
    cg_metrics straight[12], parts[12];
    cg_trainer *a = trainer_of(&config, feed);
    train(a, 12, straight);
    char dir[] = "/tmp/csagrad-test-XXXXXX", path[256];
    ck_assert_ptr_nonnull(mkdtemp(dir));
    for (int stop = 4; stop <= 9; stop += 5) {
        cg_error error = {0};
        cg_trainer *b = trainer_of(&config, feed);
        train(b, stop, parts);
        cg_checkpoint_path(dir, stop, path, sizeof path);
        if (!cg_trainer_save(b, path, &error)) ck_abort_msg("%s", error.text);
        cg_trainer_free(b);
        b = trainer_from(&config, feed, path);
        ck_assert_int_eq(cg_trainer_steps(b), stop);
        train(b, 12 - stop, parts + stop);
        expect_same_metrics(straight, parts, 12);
        cg_trainer_free(b);
        unlink(path);
    }
    rmdir(dir);
    cg_trainer_free(a);
    cg_feed_free(feed);
}
END_TEST

/* Checkpoints hold what bf16 trains, f32: a run may go on in the other of the two, from the same weights. */
START_TEST(checkpoints_of_f32_and_bf16_are_alike) {
    cg_config in_f32 = small_config(), in_bf16 = in_f32, in_f64 = in_f32;
    in_bf16.dtype = CG_BF16;
    in_f64.dtype = CG_F64;
    cg_feed *feed = feed_of(&in_f32);
    char dir[] = "/tmp/csagrad-test-XXXXXX", path[256], again[256];
    ck_assert_ptr_nonnull(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/a", dir);
    snprintf(again, sizeof again, "%s/b", dir);
    cg_error error = {0};
    cg_metrics f32[4], bf16[4];
    cg_trainer *a = trainer_of(&in_f32, feed);
    train(a, 2, f32);
    ck_assert(cg_trainer_save(a, path, &error));
    train(a, 2, f32 + 2);
    cg_trainer_free(a);
    a = trainer_from(&in_bf16, feed, path);
    ck_assert(cg_trainer_save(a, again, &error));
    train(a, 2, bf16 + 2);
    for (int i = 2; i < 4; i++) {
        ck_assert(bf16[i].lm_loss != f32[i].lm_loss);
        ck_assert(fabs(bf16[i].lm_loss - f32[i].lm_loss) < 1e-2);
        ck_assert_int_eq(bf16[i].measured_peak_bytes, bf16[i].planned_peak_bytes);
    }
    cg_trainer_free(a);
    cg_safetensors *one = cg_safetensors_open(path, &error), *two = cg_safetensors_open(again, &error);
    ck_assert(one && two);
    for (int i = 0; i < cg_safetensors_count(one); i++) {
        const cg_named_tensor *x = cg_safetensors_at(one, i);
        const cg_tensor *y = cg_safetensors_find(two, x->name);
        ck_assert_ptr_nonnull(y);
        ck_assert_int_eq(y->dtype, CG_F32);
        ck_assert(!memcmp(x->tensor.data, y->data, (size_t)cg_tensor_bytes(CG_F32, &y->shape)));
    }
    cg_safetensors_close(one);
    cg_safetensors_close(two);
    expect_checkpoint_refused(&in_f64, feed, path, "is f32 [");
    unlink(path);
    unlink(again);
    rmdir(dir);
    cg_feed_free(feed);
}
END_TEST

START_TEST(damaged_checkpoint_is_refused) {
    cg_config config = small_config();
    cg_feed *feed = feed_of(&config);
    cg_metrics before[2];
    char dir[] = "/tmp/csagrad-test-XXXXXX", path[256];
    ck_assert_ptr_nonnull(mkdtemp(dir));
    cg_checkpoint_path(dir, 2, path, sizeof path);
    cg_error error = {0};
    cg_trainer *a = trainer_of(&config, feed);
    train(a, 2, before);
    ck_assert(cg_trainer_save(a, path, &error));
    struct stat facts;
    ck_assert_int_eq(stat(path, &facts), 0);
    for (int place = 0; place < 5; place++) { /* header, metadata, weights, end */
        long at = (long)(facts.st_size - 1) * place / 4;
        FILE *file = fopen(path, "r+b");
        fseek(file, at, SEEK_SET);
        int c = fgetc(file);
        fseek(file, at, SEEK_SET);
        fputc(c ^ 0x10, file);
        fclose(file);
        expect_checkpoint_refused(&config, feed, path, path);
        file = fopen(path, "r+b");
        fseek(file, at, SEEK_SET);
        fputc(c, file);
        fclose(file);
    }
    ck_assert_int_eq(truncate(path, facts.st_size - 8), 0);
    expect_checkpoint_refused(&config, feed, path, path);
    int64_t steps[4];
    ck_assert_int_eq(cg_checkpoint_list(dir, steps, 4, &error), 1);
    ck_assert_int_eq(steps[0], 2);
    unlink(path);
    rmdir(dir);
    cg_trainer_free(a);
    cg_feed_free(feed);
}
END_TEST

START_TEST(checkpoint_of_another_model_is_refused) {
    cg_config config = small_config(), other = config;
    set(&other, "intermediate_size", "48");
    cg_feed *feed = feed_of(&config);
    char dir[] = "/tmp/csagrad-test-XXXXXX", path[256];
    ck_assert_ptr_nonnull(mkdtemp(dir));
    cg_checkpoint_path(dir, 0, path, sizeof path);
    cg_error error = {0};
    cg_trainer *a = trainer_of(&config, feed);
    ck_assert(cg_trainer_save(a, path, &error));
    expect_checkpoint_refused(&other, feed, path, "ffn.w1.weight is f32 [32, 32], expected f32 [48, 32]");
    unlink(path);
    rmdir(dir);
    cg_trainer_free(a);
    cg_feed_free(feed);
}
END_TEST

/* One step's losses and all its gradients, on given micro-batches. */
typedef struct once {
    double lm_loss, indexer_loss;
    double *grads;
    int64_t n;
    int64_t planned, measured;
    int n_clones;
} once;

static void write_batch(const cg_exec *exec, const cg_dsv4 *m, const cg_batch *batch) {
    memcpy(cg_exec_data(exec, m->tokens), batch->tokens, (size_t)batch->n_rows * 4);
    memcpy(cg_exec_data(exec, m->targets), batch->targets, (size_t)batch->n_rows * 4);
    memcpy(cg_exec_data(exec, m->cu_seqlens), batch->cu_seqlens, (size_t)(batch->max_segments + 1) * 4);
    memcpy(cg_exec_data(exec, m->seqlens), batch->seqlens, (size_t)batch->max_segments * 4);
}

static once run_once(const cg_config *config, cg_batch *const *batches, int n_batches) {
    cg_error error = {0};
    cg_step step;
    cg_step_options options = {.max_segments = batches[0]->max_segments,
                               .keep_gradients = true,
                               .plan = {.keep_cloned_originals = true}};
    if (!cg_step_build(&step, config, &options, &error)) ck_abort_msg("%s", error.text);
    cg_exec *exec =
        cg_exec_new(step.plan, &(cg_exec_options){.poison = true, .verify_recompute = true}, &error);
    if (!exec) ck_abort_msg("%s", error.text);
    const cg_dsv4 *m = step.model;
    cg_dtype dtype = config->dtype;
    int64_t n_targets = 0, n_real = 0;
    for (int i = 0; i < n_batches; i++) {
        n_targets += batches[i]->n_targets;
        n_real += batches[i]->n_real;
    }
    for (int p = 0; p < m->n_params; p++) {
        cg_param_init(&m->params[p], config, exec);
        size_t bytes =
            (size_t)cg_tensor_bytes(dtype, &step.grads[p]->shape); /* what an unwritten gradient would show */
        if (step.grads[p]->leaf) memset(cg_exec_data(exec, step.grads[p]), 0xff, bytes);
    }
    cg_real_set(dtype, cg_exec_data(exec, step.seed), 0, 1);
    cg_real_set(dtype, cg_exec_data(exec, m->lm_scale), 0, 1 / (double)n_targets);
    cg_real_set(dtype, cg_exec_data(exec, m->row_scale), 0, 1 / (double)n_real);
    cg_real_set(dtype, cg_exec_data(exec, step.schedule), 0, 1e-3);
    cg_real_set(dtype, cg_exec_data(exec, step.schedule), 1, 1);
    once r = {.planned = step.plan->peak_bytes, .n_clones = step.n_clones};
    for (int i = 0; i < n_batches; i++) {
        write_batch(exec, m, batches[i]);
        if (step.keep) cg_real_set(dtype, cg_exec_data(exec, step.keep), 0, i > 0);
        if (!cg_exec_run(exec, CG_ALL_PASSES & ~CG_PASS_BIT(CG_OPTIMIZE), &error))
            ck_abort_msg("%s", error.text);
        r.lm_loss += cg_real_get(dtype, cg_exec_data(exec, m->lm_loss), 0);
        r.indexer_loss += cg_real_get(dtype, cg_exec_data(exec, m->indexer_loss), 0);
    }
    if (!cg_exec_run(exec, CG_PASS_BIT(CG_OPTIMIZE), &error)) ck_abort_msg("%s", error.text);
    for (int p = 0; p < m->n_params; p++) r.n += cg_shape_count(&step.grads[p]->shape);
    r.grads = malloc((size_t)r.n * sizeof *r.grads);
    int64_t at = 0;
    for (int p = 0; p < m->n_params; p++)
        for (int64_t i = 0; i < cg_shape_count(&step.grads[p]->shape); i++)
            r.grads[at++] = cg_real_get(dtype, cg_exec_data(exec, step.grads[p]), i);
    r.measured = cg_exec_measured_bytes(exec);
    cg_exec_free(exec);
    cg_step_free(&step);
    return r;
}

static cg_batch *batch_of(const cg_feed *feed) {
    cg_error error = {0};
    cg_batch *batch = cg_batch_new(feed, &error);
    if (!batch) ck_abort_msg("%s", error.text);
    cg_feed_batch(feed, false, 0, batch);
    return batch;
}

START_TEST(policies_agree) {
    static const char *const policies[] = {"save",
                                           "recompute",
                                           "stream",
                                           "softmax,gather@layer1/attn",
                                           "*norm*,swiglu,relu@layer*",
                                           "stream+rms_norm,rope,csa_attention"};
    for (int support = 0; support < 2; support++) {
        cg_config config = small_config();
        set(&config, "support", support ? "dense" : "sparse");
        cg_feed *feed = feed_of(&config);
        cg_batch *batch = batch_of(feed);
        once first = {0};
        for (size_t i = 0; i < sizeof policies / sizeof *policies; i++) {
            set(&config, "policy", policies[i]);
            once r = run_once(&config, &batch, 1);
            ck_assert_int_eq(r.planned, r.measured);
            ck_assert(isfinite(r.lm_loss) && r.indexer_loss > 0);
            if (i == 0) {
                first = r;
                ck_assert_int_eq(r.n_clones, 0);
                continue;
            }
            bool stream = !strncmp(policies[i], "stream", 6);
            if (!stream || strchr(policies[i], '+')) ck_assert_int_gt(r.n_clones, 0);
            ck_assert_double_le(fabs(r.lm_loss - first.lm_loss), 1e-6 * first.lm_loss);
            ck_assert_double_le(fabs(r.indexer_loss - first.indexer_loss), 1e-6 * first.indexer_loss);
            if (!stream && memcmp(r.grads, first.grads, (size_t)r.n * sizeof *r.grads))
                ck_abort_msg("policy %s: gradients differ from those of save", policies[i]);
            if (stream) expect_close(policies[i], r.grads, first.grads, r.n, 1e-5);
            free(r.grads);
        }
        free(first.grads);
        cg_batch_free(batch);
        cg_feed_free(feed);
    }
}
END_TEST

/* Both losses are means over the whole step: the same micro-batch twice, or four times, is the same step. */
START_TEST(repeated_micro_batches_change_nothing) {
    cg_config config = small_config();
    set(&config, "dtype", "f64");
    cg_feed *feed = feed_of(&config);
    cg_batch *batch = batch_of(feed), *batches[4] = {batch, batch, batch, batch};
    once one = run_once(&config, batches, 1);
    for (int n = 2; n <= 4; n += 2) {
        set(&config, "accumulate", n == 2 ? "2" : "4");
        once many = run_once(&config, batches, n);
        ck_assert_double_le(fabs(many.lm_loss - one.lm_loss), 1e-14 * one.lm_loss);
        ck_assert_double_le(fabs(many.indexer_loss - one.indexer_loss), 1e-14 * one.indexer_loss);
        expect_close("gradients", many.grads, one.grads, one.n, 1e-13);
        ck_assert_int_eq(many.planned, many.measured);
        free(many.grads);
    }
    free(one.grads);
    cg_batch_free(batch);
    cg_feed_free(feed);
}
END_TEST

/* Two sequences with unlike counts of targets and real rows: in one micro-batch or in two, the same step. */
START_TEST(micro_batches_weigh_by_their_tokens) {
    cg_config whole = small_config();
    set(&whole, "dtype", "f64");
    cg_config halves = whole;
    set(&halves, "batch_size", "1");
    set(&halves, "accumulate", "2");
    cg_feed *feed = feed_of(&whole), *half_feed = feed_of(&halves);
    cg_batch *both = batch_of(feed), *parts[2] = {batch_of(half_feed), batch_of(half_feed)};
    int64_t length = whole.seq_len;
    both->seqlens[1] = (int32_t)length - 41; /* the second sequence ends in padding */
    for (int64_t t = 2 * length - 41; t < 2 * length; t++) both->targets[t] = -1;
    both->n_real = 2 * length - 41;
    both->n_targets = 0;
    for (int64_t t = 0; t < 2 * length; t++) both->n_targets += both->targets[t] >= 0;
    for (int k = 0; k < 2; k++) {
        cg_batch *part = parts[k];
        memcpy(part->tokens, both->tokens + k * length, (size_t)length * 4);
        memcpy(part->targets, both->targets + k * length, (size_t)length * 4);
        part->seqlens[0] = both->seqlens[k];
        part->n_real = both->seqlens[k];
        part->n_targets = 0;
        for (int64_t t = 0; t < length; t++) part->n_targets += part->targets[t] >= 0;
    }
    ck_assert_int_ne(parts[0]->n_targets, parts[1]->n_targets);
    once a = run_once(&whole, &both, 1), b = run_once(&halves, parts, 2);
    ck_assert_double_le(fabs(a.lm_loss - b.lm_loss), 1e-13 * a.lm_loss);
    ck_assert_double_le(fabs(a.indexer_loss - b.indexer_loss), 1e-13 * a.indexer_loss);
    expect_close("gradients", b.grads, a.grads, a.n, 1e-12);
    free(a.grads);
    free(b.grads);
    cg_batch_free(both);
    cg_batch_free(parts[0]);
    cg_batch_free(parts[1]);
    cg_feed_free(feed);
    cg_feed_free(half_feed);
}
END_TEST

SUITE("train", same_bits_on_any_number_of_threads, no_warmup_without_a_loss,
      stop_and_resume_gives_the_same_bits, checkpoints_of_f32_and_bf16_are_alike, damaged_checkpoint_is_refused,
      checkpoint_of_another_model_is_refused, policies_agree, repeated_micro_batches_change_nothing,
      micro_batches_weigh_by_their_tokens)
