/* A whole step on the CPU in the place of a device (ops/cuda/host) against the CPU: losses, gradients, the optimizer, all
 * policies; memory as planned; recordings; training, checkpoints and gradient checks through the same front. */
#include "tests/cuda_device.h"

#include "graph/gradcheck.h"
#include "models/dsv4/layer_check.h"
#include "models/train/step.h"
#include "models/train/trainer.h"

#include <unistd.h>

/* ---- a step of the tiny model: window, CSA and HCA layers, two documents, padding, rows behind the last ---- */

enum { FIRST = 140, SECOND = 19, PADDING = 3, BEHIND = 2, N_ROWS = FIRST + SECOND + BEHIND };

typedef struct stepped {
    cg_step step;
    cg_exec *exec;
} stepped;

static cg_config tiny_config(cg_dtype dtype, const char *policy) {
    cg_config c = cg_probe_config();
    cg_error error = {0};
    c.dtype = dtype;
    c.seq_len = N_ROWS;
    c.batch_size = 1;
    if (!cg_config_set(&c, "policy", policy, &error) || !cg_config_check(&c, &error))
        ck_abort_msg("%s", error.text);
    return c;
}

static stepped step_of(const cg_config *config, const cg_backend *where, const cg_exec_options *how) {
    stepped s;
    cg_error error = {0};
    const cg_step_options options = {
        .max_segments = 2,
        .keep_gradients = true,
        .plan = {.backend = where, .keep_cloned_originals = how && how->verify_recompute}};
    if (!cg_step_build(&s.step, config, &options, &error) || !(s.exec = cg_exec_new(s.step.plan, how, &error)))
        ck_abort_msg("%s", error.text);
    return s;
}

static void feed(const stepped *s) {
    const cg_dsv4 *m = s->step.model;
    int32_t tokens[N_ROWS], targets[N_ROWS];
    for (int t = 0; t < N_ROWS; t++) {
        bool real = t < FIRST + SECOND - PADDING;
        tokens[t] = t < FIRST + SECOND ? (t * 7 + t / 3) % 11 : -1;
        targets[t] = real && t != FIRST - 1 ? (t * 5 + 2) % 11 : -1;
    }
    cg_exec_write(s->exec, m->tokens, tokens);
    cg_exec_write(s->exec, m->targets, targets);
    cg_exec_write(s->exec, m->cu_seqlens, (int32_t[]){0, FIRST, FIRST + SECOND});
    cg_exec_write(s->exec, m->seqlens, (int32_t[]){FIRST, SECOND - PADDING});
    cg_exec_set(s->exec, m->lm_scale, 0, 1. / 150);
    cg_exec_set(s->exec, m->row_scale, 0, 1. / 156);
    cg_exec_set(s->exec, s->step.seed, 0, 1);
    cg_exec_set(s->exec, s->step.schedule, 0, 1e-2);
    cg_exec_set(s->exec, s->step.schedule, 1, 1);
    const cg_probe probe = {.graph = s->step.graph, .model = s->step.model, .exec = s->exec};
    cg_probe_scatter(&probe, 5);
    for (int p = 0; p < m->n_params; p++) {
        const cg_value *moments[2] = {s->step.m[p], s->step.v[p]};
        for (int i = 0; i < 2; i++) {
            void *data = cg_exec_fill(s->exec, moments[i]);
            memset(data, 0, (size_t)cg_tensor_bytes(moments[i]->dtype, &moments[i]->shape));
            cg_exec_filled(s->exec, moments[i], data);
        }
    }
}

static void run(const stepped *s) {
    cg_error error = {0};
    if (!cg_exec_run(s->exec, CG_ALL_PASSES, &error)) ck_abort_msg("%s", error.text);
}

static void step_free(stepped *s) {
    cg_exec_free(s->exec);
    cg_step_free(&s->step);
}

static double *numbers(const stepped *s, const cg_value *value) {
    int64_t n = cg_shape_count(&value->shape);
    double *x = malloc((size_t)(n + 1) * sizeof *x);
    cg_exec_read_real(s->exec, value, 0, n, x);
    return x;
}

/* The norm of a - b over that of a. */
static double distance(const stepped *a, const cg_value *va, const stepped *b, const cg_value *vb) {
    double *x = numbers(a, va), *y = numbers(b, vb), difference = 0, norm = 0;
    for (int64_t i = 0; i < cg_shape_count(&va->shape); i++) {
        difference += (x[i] - y[i]) * (x[i] - y[i]);
        norm += x[i] * x[i];
    }
    free(x), free(y);
    return difference == 0 ? 0 : sqrt(difference / norm);
}

/* Losses, gradients, and parameters behind the optimizer; bound 0: the same bits. AdamW's first step divides a gradient by
 * its own size, so that the smallest ones move a parameter as far as their rounding says: `far` for those. */
static void expect_same_step(const stepped *a, const stepped *b, double bound, double far, const char *what) {
    const cg_dsv4 *ma = a->step.model, *mb = b->step.model;
    double of_loss = distance(a, ma->lm_loss, b, mb->lm_loss),
           of_indexer = distance(a, ma->indexer_loss, b, mb->indexer_loss);
    if (!(of_loss <= bound && of_indexer <= bound))
        ck_abort_msg("%s: the losses differ by %.3g and %.3g", what, of_loss, of_indexer);
    for (int p = 0; p < ma->n_params; p++) {
        char name[256];
        const cg_value *value = ma->params[p].value;
        double of_grad = distance(a, a->step.grads[p], b, b->step.grads[p]),
               of_value = distance(a, value, b, mb->params[p].value);
        if (!(of_grad <= bound && of_value <= far))
            ck_abort_msg("%s: %s differs by %.3g, its gradient by %.3g", what,
                         cg_param_name(value, name, sizeof name), of_value, of_grad);
    }
}

static const char *const policies[] = {"stream", "save", "recompute"};

START_TEST(a_step_agrees_with_the_cpu) {
    open_device();
    const char *policy = policies[_i % 3];
    const cg_dtype dtype = _i < 3 ? CG_F64 : CG_F32;
    cg_config config = tiny_config(dtype, policy);
    stepped cpu = step_of(&config, NULL, NULL), gpu = step_of(&config, &backend, NULL);
    ck_assert_int_eq(cg_device_asked_bytes(device), gpu.step.plan->peak_bytes);
    feed(&cpu), feed(&gpu);
    run(&cpu), run(&gpu);
    expect_same_step(&cpu, &gpu, dtype == CG_F64 ? 1e-11 : 1e-3, 1e-2, policy);
    ck_assert_int_eq(cg_exec_measured_bytes(gpu.exec), gpu.step.plan->peak_bytes);
    step_free(&cpu);
    /* the second run is recorded, the third plays; a fourth is watched and launches each node */
    stepped blocks = step_of(&config, &backend, &(cg_exec_options){.separate = true, .poison = true});
    for (int i = 0; i < 3; i++) {
        feed(&gpu);
        run(&gpu);
        if (i) continue;
        feed(&blocks);
        run(&blocks);
        expect_same_step(&gpu, &blocks, 0, 0, "separate blocks");
        step_free(&blocks);
        blocks = step_of(&config, &backend, &(cg_exec_options){.no_recording = true});
        feed(&blocks);
        run(&blocks);
    }
    expect_same_step(&gpu, &blocks, 0, 0, "recorded and played");
    step_free(&gpu);
    step_free(&blocks);
    close_device();
}
END_TEST

typedef struct seen {
    int n;
    bool backwards;
    double us;
} seen;

static void watch(void *context, int step, const cg_node *node, double us) {
    seen *s = context;
    (void)node;
    s->backwards |= step < s->n - 1;
    s->n++;
    s->us += us;
}

START_TEST(watched_and_verified) {
    open_device();
    cg_config config = tiny_config(CG_F32, "recompute");
    stepped s = step_of(&config, &backend, &(cg_exec_options){.verify_recompute = true});
    ck_assert_int_gt(s.step.n_clones, 0);
    seen nodes = {0};
    cg_exec_watch(s.exec, watch, &nodes);
    for (int i = 0; i < 3; i++) {
        nodes = (seen){0};
        feed(&s);
        run(&s);
        ck_assert(nodes.n > 100 && nodes.us > 0 && !nodes.backwards);
    }
    step_free(&s);
    close_device();
}
END_TEST

/* Wrong data stop a run before the optimizer, with the CPU's sentence; the next run is fine again. */
START_TEST(wrong_data_change_nothing) {
    open_device();
    cg_config config = tiny_config(CG_F64, "stream");
    stepped cpu = step_of(&config, NULL, NULL), gpu = step_of(&config, &backend, NULL);
    const int32_t bad[2] = {11, -7};
    for (int i = 0; i < 3; i++) { /* launched, recorded, played */
        cg_error on_cpu = {0}, on_gpu = {0};
        feed(&cpu), feed(&gpu);
        double *before = numbers(&gpu, gpu.step.model->params[3].value);
        for (int k = 0; k < 2; k++) { /* the first one counts, and of one node's the smaller row */
            cg_exec_write_part(cpu.exec, cpu.step.model->tokens, 60 - 40 * k, 1, &bad[k]);
            cg_exec_write_part(gpu.exec, gpu.step.model->tokens, 60 - 40 * k, 1, &bad[k]);
        }
        cg_exec_write_part(cpu.exec, cpu.step.model->targets, 2, 1, &bad[0]);
        cg_exec_write_part(gpu.exec, gpu.step.model->targets, 2, 1, &bad[0]);
        ck_assert(!cg_exec_run(cpu.exec, CG_ALL_PASSES, &on_cpu));
        ck_assert(!cg_exec_run(gpu.exec, CG_ALL_PASSES, &on_gpu));
        ck_assert_str_eq(on_gpu.text, on_cpu.text);
        ck_assert_ptr_nonnull(strstr(on_gpu.text, "row 20 of tokens is -7"));
        double *after = numbers(&gpu, gpu.step.model->params[3].value);
        ck_assert_int_eq(
            memcmp(before, after,
                   sizeof *after * (size_t)cg_shape_count(&gpu.step.model->params[3].value->shape)),
            0);
        free(before), free(after);
    }
    feed(&cpu), feed(&gpu);
    run(&cpu), run(&gpu);
    expect_same_step(&cpu, &gpu, 1e-11, 1e-2, "after wrong data");
    step_free(&cpu), step_free(&gpu);
    close_device();
}
END_TEST

/* ---- training ---- */

static cg_config train_config(void) {
    cg_config c = cg_probe_config();
    const char *settings[][2] = {{"task", "recall"},      {"vocab_size", "96"},
                                 {"seq_len", "128"},      {"batch_size", "1"},
                                 {"steps", "6"},          {"dtype", "f64"},
                                 {"indexer_warmup", "2"}, {"eval_batches", "1"},
                                 {"accumulate", "2"},     {"compress_ratios", "0,4,128"}};
    cg_error error = {0};
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++)
        if (!cg_config_set(&c, settings[i][0], settings[i][1], &error)) ck_abort_msg("%s", error.text);
    if (!cg_config_check(&c, &error)) ck_abort_msg("%s", error.text);
    return c;
}

static cg_trainer *trainer_of(const cg_config *config, const cg_feed *data, const cg_backend *where,
                              const char *from) {
    cg_error error = {0};
    cg_trainer *trainer =
        cg_trainer_new(config, data, &(cg_trainer_options){.checkpoint = from, .backend = where}, &error);
    if (!trainer) ck_abort_msg("%s", error.text);
    return trainer;
}

static void expect_close_to(const char *what, double got, double want) {
    if (!(fabs(got - want) <= 1e-9 * fmax(1, fabs(want))))
        ck_abort_msg("%s is %.17g, on the CPU %.17g", what, got, want);
}

/* Across the end of the warm-up, where the step is built anew; a checkpoint of the device goes on on the CPU. */
START_TEST(training_agrees_with_the_cpu) {
    open_device();
    cg_error error = {0};
    cg_config config = train_config();
    cg_feed *data = cg_feed_recall(&config, &error);
    if (!data) ck_abort_msg("%s", error.text);
    cg_trainer *cpu = trainer_of(&config, data, NULL, NULL), *gpu = trainer_of(&config, data, &backend, NULL);
    cg_metrics on_cpu, on_gpu;
    char path[] = "/tmp/csagrad_cuda_XXXXXX";
    int file = mkstemp(path);
    ck_assert_int_ge(file, 0);
    close(file);
    for (int i = 0; i < 6; i++) {
        if (i == 4) { /* goes on from the device's parameters */
            if (!cg_trainer_save(gpu, path, &error)) ck_abort_msg("%s", error.text);
            cg_trainer_free(cpu);
            cpu = trainer_of(&config, data, NULL, path);
        }
        if (!cg_trainer_step(cpu, &on_cpu, &error) || !cg_trainer_step(gpu, &on_gpu, &error))
            ck_abort_msg("%s", error.text);
        expect_close_to("the loss", on_gpu.lm_loss, on_cpu.lm_loss);
        expect_close_to("the indexer loss", on_gpu.indexer_loss, on_cpu.indexer_loss);
        expect_close_to("the norm of the gradient", on_gpu.grad_norm, on_cpu.grad_norm);
        ck_assert_int_eq(on_gpu.measured_peak_bytes, on_gpu.planned_peak_bytes);
    }
    cg_evaluation a, b;
    if (!cg_trainer_evaluate(cpu, &a, &error) || !cg_trainer_evaluate(gpu, &b, &error))
        ck_abort_msg("%s", error.text);
    expect_close_to("the held-out loss", b.val_loss, a.val_loss);
    expect_close_to("the held-out accuracy", b.val_accuracy, a.val_accuracy);
    cg_trainer_free(cpu);
    cpu = trainer_of(&config, data, &backend, path); /* and the other way round */
    if (!cg_trainer_step(cpu, &on_cpu, &error)) ck_abort_msg("%s", error.text);
    ck_assert_int_eq(on_cpu.step, 5);
    unlink(path);
    cg_trainer_free(cpu);
    cg_trainer_free(gpu);
    cg_feed_free(data);
    close_device();
}
END_TEST

/* ---- gradient checks ---- */

START_TEST(gradients_match_differences) {
    open_device();
    static const char *const ops[] = {"rms_norm", "csa_attention", "indexer_kl"};
    for (int o = 0; o < 3; o++) {
        cg_gradcheck_report report;
        cg_error error = {0};
        int n_cases;
        const cg_op *op = cg_op_find(&cg_all_ops, ops[o]);
        if (!cg_gradcheck_op(&cg_all_ops, op, &backend, &n_cases, &report, &error))
            ck_abort_msg("%s", error.text);
        if (!report.ok) ck_abort_msg("%s: %s", ops[o], report.worst);
    }
    close_device();
}
END_TEST

/* ---- the executor's front on a device ---- */

START_TEST(leaves_are_reached_by_copies) {
    open_device();
    cg_error error = {0};
    cg_graph *g = cg_graph_new(&cg_all_ops);
    cg_value *x = cg_leaf(g, CG_LEAF_INPUT, "x", CG_F32, CG_SHAPE(3000)), *y = cg_keep(cg_scale(g, x, 2));
    cg_value *lent = cg_leaf(g, CG_LEAF_INPUT, "lent", CG_F32, CG_SHAPE(3000)),
             *z = cg_keep(cg_scale(g, lent, 3));
    lent->external = true;
    cg_plan *plan = cg_plan_make(g, &(cg_plan_options){.backend = &backend}, &error);
    cg_exec *exec = cg_exec_new(plan, NULL, &error);
    ck_assert_ptr_nonnull(exec);
    double in[3000], out[3000];
    for (int i = 0; i < 3000; i++) in[i] = i;
    ck_assert_ptr_null(cg_exec_data(exec, x)); /* no pointer that the CPU could follow */
    cg_exec_write_real(exec, x, 0, 3000, in);
    cg_exec_set(exec, x, 2999, 0.5);
    ck_assert(!cg_exec_run(exec, CG_ALL_PASSES, &error));
    ck_assert_ptr_nonnull(strstr(error.text, "lent has no memory"));
    cg_exec_bind(exec, lent, in); /* memory of the CPU is none for a device */
    error = (cg_error){0};
    ck_assert(!cg_exec_run(exec, CG_ALL_PASSES, &error));
    cg_exec_bind_value(exec, lent, exec, x);
    for (int i = 0; i < 3; i++) {
        error = (cg_error){0};
        if (!cg_exec_run(exec, CG_ALL_PASSES, &error)) ck_abort_msg("%s", error.text);
        cg_exec_read_real(exec, y, 0, 3000, out);
        ck_assert(out[7] == 14 && out[2998] == 5996 && out[2999] == 1);
        ck_assert(cg_exec_get(exec, z, 9) == 27);
    }
    cg_exec_free(exec);
    cg_plan_free(plan);
    cg_graph_free(g);
    close_device();
}
END_TEST

START_TEST(a_device_that_is_full_refuses) {
    open_device();
    cg_error error = {0};
    cg_graph *g = cg_graph_new(&cg_all_ops);
    cg_value *x = cg_leaf(g, CG_LEAF_INPUT, "x", CG_F64, CG_SHAPE((int64_t)1 << 46));
    cg_keep(cg_scale(g, x, 2));
    cg_plan *plan = cg_plan_make(g, &(cg_plan_options){.backend = &backend}, &error);
    ck_assert_ptr_nonnull(plan);
    ck_assert_ptr_null(cg_exec_new(plan, NULL, &error));
    ck_assert_ptr_nonnull(strstr(error.text, "refuses 1125899906842624 bytes"));
    cg_plan_free(plan);
    cg_graph_free(g);
    close_device();
}
END_TEST

int main(void) {
    Suite *suite = suite_create("cuda_model");
    TCase *tcase = tcase_create("cuda_model");
    tcase_set_timeout(tcase, 240);
    suite_add_tcase(suite, tcase);
    tcase_add_loop_test(tcase, a_step_agrees_with_the_cpu, 0, 6);
    tcase_add_test(tcase, watched_and_verified);
    tcase_add_test(tcase, wrong_data_change_nothing);
    tcase_add_test(tcase, training_agrees_with_the_cpu);
    tcase_add_test(tcase, gradients_match_differences);
    tcase_add_test(tcase, leaves_are_reached_by_copies);
    tcase_add_test(tcase, a_device_that_is_full_refuses);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
