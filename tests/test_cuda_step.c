/* Steps of the tiny model on the CPU in the place of a device against the CPU, by plain and by preferred kernels: the same
 * rows selected, losses, gradients and parameters close, for every policy, support and teacher; memory to the byte; and
 * a step that must not be taken. Recordings, training and checkpoints: test_cuda_model.c. */
#include "tests/cuda_device.h"

#include "core/base/rng.h"
#include "models/dsv4/layer_check.h"
#include "models/train/step.h"

/* 128 tokens make the one compressed row of the HCA layer. The second segment ends in the middle of a group and has
 * padding, and rows lie behind it. */
enum { FIRST = 132, SECOND = 19, PADDING = 3, BEHIND = 2, ROWS = FIRST + SECOND + BEHIND, VOCAB = 11 };
enum { STEPS = 2 }; /* launched, then recorded and played */

/* ---- a step that runs ---- */

typedef struct machine {
    cg_step step;
    cg_backend backend; /* of no device: the CPU */
    cg_exec *exec;
} machine;

static void write_scalar(const machine *m, const cg_value *value, double x) {
    cg_exec_set(m->exec, value, 0, x);
}

/* variant: which kernels of the device; NULL: those that are preferred. */
static void machine_start(machine *m, const cg_config *config, bool on_device, const char *variant) {
    cg_error error = {0};
    *m = (machine){0};
    cg_step_options options = {
        .max_segments = 2, .max_seqlen = FIRST, .keep_topk = true, .keep_gradients = true};
    const int64_t asked = cg_device_asked_bytes(device);
    if (on_device) {
        if (!cg_cuda_backend(&m->backend, device, variant, &error)) ck_abort_msg("%s", error.text);
        options.plan.backend = &m->backend;
    }
    if (!cg_config_check(config, &error) || !cg_step_build(&m->step, config, &options, &error) ||
        !(m->exec = cg_exec_new(m->step.plan, NULL, &error)))
        ck_abort_msg("%s: %s", config->policy, error.text);
    ck_assert_int_eq(cg_device_asked_bytes(device) - asked, on_device ? m->step.plan->peak_bytes : 0);
    const cg_dsv4 *model = m->step.model;
    for (int p = 0; p < model->n_params; p++) {
        cg_param_init(&model->params[p], config, m->exec);
        const cg_value *moments[] = {m->step.m[p], m->step.v[p]};
        for (int k = 0; k < 2; k++)
            for (int64_t i = 0; i < cg_shape_count(&moments[k]->shape); i++)
                cg_exec_set(m->exec, moments[k], i, 0);
    }
}

static void machine_free(machine *m) {
    cg_exec_free(m->exec);
    cg_step_free(&m->step);
}

/* Step `number`, counted from 1, with tokens of its own. */
static bool machine_run(machine *m, int number, double seed, cg_error *error) {
    static const int32_t cu_seqlens[] = {0, FIRST, FIRST + SECOND}, seqlens[] = {FIRST, SECOND - PADDING};
    const cg_dsv4 *model = m->step.model;
    int32_t tokens[ROWS], targets[ROWS];
    int n_targets = 0;
    for (int t = 0; t < ROWS; t++) {
        const bool real = t < FIRST + SECOND - PADDING && t != FIRST - 1;
        tokens[t] = t < FIRST + SECOND ? (int32_t)cg_random_below(3, (uint64_t)number, (uint64_t)t, VOCAB) : -1;
        targets[t] = real ? (int32_t)cg_random_below(4, (uint64_t)number, (uint64_t)t, VOCAB) : -1;
        n_targets += real;
    }
    cg_exec_write(m->exec, model->tokens, tokens);
    cg_exec_write(m->exec, model->targets, targets);
    cg_exec_write(m->exec, model->seqlens, seqlens);
    cg_exec_write(m->exec, model->cu_seqlens, cu_seqlens);
    write_scalar(m, model->lm_scale, 1.0 / n_targets);
    write_scalar(m, model->row_scale, 1.0 / (FIRST + SECOND - PADDING));
    write_scalar(m, m->step.seed, seed);
    cg_exec_write_real(m->exec, m->step.schedule, 0, 2, (double[]){1e-2, number});
    return cg_exec_run(m->exec, CG_ALL_PASSES, error);
}

static cg_config config_of(const char *policy, cg_dtype dtype) {
    cg_config config = cg_probe_config();
    config.seq_len = ROWS;
    config.batch_size = 1;
    config.dtype = dtype;
    config.initializer_range = 0.5; /* so that every part of the tiny model matters */
    snprintf(config.policy, sizeof config.policy, "%s", policy);
    return config;
}

/* ---- comparisons ---- */

/* The relative norm of the difference. */
static void expect_near(const machine *cpu, const cg_value *want, const machine *gpu, const cg_value *got,
                        double bound, const char *what) {
    const int64_t n = cg_shape_count(&want->shape);
    double *x = malloc(((size_t)n + 1) * sizeof *x), *y = malloc(((size_t)n + 1) * sizeof *y), difference = 0,
           norm = 0;
    cg_exec_read_real(cpu->exec, want, 0, n, x);
    cg_exec_read_real(gpu->exec, got, 0, n, y);
    for (int64_t i = 0; i < n; i++) {
        difference += (x[i] - y[i]) * (x[i] - y[i]);
        norm += x[i] * x[i];
    }
    char name[256];
    if (!(sqrt(difference) <= bound * sqrt(norm)))
        ck_abort_msg("%s: %s differs by %.3g of norm %.3g, bound %.1e", what,
                     want->leaf ? cg_param_name(want, name, sizeof name) : want->name, sqrt(difference),
                     sqrt(norm), bound);
    free(x);
    free(y);
}

static void expect_same_selection(const machine *cpu, const machine *gpu, const char *what) {
    int n_layers = 0;
    for (int l = 0; l < cpu->step.model->n_layers; l++) {
        const cg_value *want = cpu->step.model->layers[l].topk, *got = gpu->step.model->layers[l].topk;
        if (!want) continue;
        const size_t bytes = (size_t)cg_tensor_bytes(CG_I32, &want->shape);
        void *x = malloc(bytes + 1), *y = malloc(bytes + 1);
        cg_exec_read(cpu->exec, want, x);
        cg_exec_read(gpu->exec, got, y);
        if (memcmp(x, y, bytes)) ck_abort_msg("%s: the selections of layer %d differ", what, l);
        free(x);
        free(y);
        n_layers++;
    }
    ck_assert_int_eq(n_layers, 1);
}

/* Some steps on both. first, later: bounds of gradients in the first step and behind it, when parameters differ a
 * little. */
static void compare(const cg_config *config, const char *variant, double first, double later) {
    machine cpu, gpu;
    char what[CG_POLICY_BYTES + 100];
    machine_start(&cpu, config, false, NULL);
    machine_start(&gpu, config, true, variant);
    for (int s = 1; s <= STEPS; s++) {
        cg_error error = {0};
        const double bound = s == 1 ? first : later;
        snprintf(what, sizeof what, "%s, %s, %s kernels, step %d", config->policy, cg_dtype_name(config->dtype),
                 variant ? variant : "preferred", s);
        cg_device_host_seed((uint64_t)s);
        if (!machine_run(&cpu, s, 1, &error) || !machine_run(&gpu, s, 1, &error))
            ck_abort_msg("%s: %s", what, error.text);
        expect_same_selection(&cpu, &gpu, what);
        expect_near(&cpu, cpu.step.model->lm_loss, &gpu, gpu.step.model->lm_loss, bound, what);
        expect_near(&cpu, cpu.step.model->indexer_loss, &gpu, gpu.step.model->indexer_loss, bound, what);
        expect_near(&cpu, cpu.step.grad_norm, &gpu, gpu.step.grad_norm, bound, what);
        for (int p = 0; p < cpu.step.model->n_params; p++) {
            expect_near(&cpu, cpu.step.grads[p], &gpu, gpu.step.grads[p], bound, what);
            expect_near(&cpu, cpu.step.model->params[p].value, &gpu, gpu.step.model->params[p].value, later,
                        what);
        }
        ck_assert_int_eq(cg_exec_measured_bytes(gpu.exec), gpu.step.plan->peak_bytes);
    }
    machine_free(&cpu);
    machine_free(&gpu);
}

static const struct {
    const char *policy, *variant;
    cg_dtype dtype;
    cg_support support;
    cg_teacher teacher;
} steps[] = {
    {"stream", NULL, CG_F32, CG_SUPPORT_SPARSE, CG_TEACHER_FULL},
    {"recompute", NULL, CG_F32, CG_SUPPORT_SPARSE, CG_TEACHER_FULL},
    {"save", NULL, CG_F64, CG_SUPPORT_SPARSE, CG_TEACHER_FULL},
    {"stream", "plain", CG_F64, CG_SUPPORT_SPARSE, CG_TEACHER_FULL},
    {"recompute", "plain", CG_F64, CG_SUPPORT_SPARSE, CG_TEACHER_FULL},
    {"save", "plain", CG_F64, CG_SUPPORT_SPARSE, CG_TEACHER_FULL},
    {"stream", NULL, CG_F64, CG_SUPPORT_DENSE, CG_TEACHER_FULL},
    {"stream", NULL, CG_F64, CG_SUPPORT_DENSE, CG_TEACHER_SINK},
    {"stream", NULL, CG_F64, CG_SUPPORT_DENSE, CG_TEACHER_COMPRESSED},
};
enum { N_STEPS = (int)(sizeof steps / sizeof steps[0]) };

START_TEST(steps_agree) {
    open_device();
    cg_config config = config_of(steps[_i].policy, steps[_i].dtype);
    config.support = steps[_i].support;
    config.teacher = steps[_i].teacher;
    const bool f64 = steps[_i].dtype == CG_F64;
    compare(&config, steps[_i].variant, f64 ? 1e-12 : 1e-4, f64 ? 1e-8 : 1e-2);
    close_device();
}
END_TEST

/* ---- a step that must not be taken ---- */

/* Every leaf that the optimizer changes, one after the other; freed by the caller. */
static char *leaves_of(const machine *m, size_t *bytes) {
    const cg_step *step = &m->step;
    *bytes = 0;
    for (int p = 0; p < step->model->n_params; p++) {
        const cg_value *param = step->model->params[p].value;
        *bytes += 3 * (size_t)cg_tensor_bytes(param->dtype, &param->shape);
    }
    char *all = malloc(*bytes + 1), *at = all;
    for (int p = 0; p < step->model->n_params; p++) {
        const cg_value *leaves[] = {step->model->params[p].value, step->m[p], step->v[p]};
        for (int k = 0; k < 3; k++) {
            cg_exec_read(m->exec, leaves[k], at);
            at += cg_tensor_bytes(leaves[k]->dtype, &leaves[k]->shape);
        }
    }
    return all;
}

START_TEST(leaves_stay_when_a_gradient_is_not_finite) {
    static const char *const variants[] = {NULL, "plain"};
    open_device();
    const cg_config config = config_of("stream", _i ? CG_F64 : CG_F32);
    for (int v = 0; v < 2; v++) {
        machine cpu, gpu;
        machine_start(&cpu, &config, false, NULL);
        machine_start(&gpu, &config, true, variants[v]);
        cg_error on_cpu = {0}, on_gpu = {0};
        size_t bytes;
        if (!machine_run(&gpu, 1, 1, &on_gpu)) ck_abort_msg("%s", on_gpu.text);
        char *before = leaves_of(&gpu, &bytes);
        ck_assert(!machine_run(&cpu, 2, NAN, &on_cpu));
        ck_assert(!machine_run(&gpu, 2, NAN, &on_gpu));
        ck_assert_str_eq(on_gpu.text, on_cpu.text);
        ck_assert_ptr_nonnull(strstr(on_gpu.text, "a gradient is not finite"));
        char *after = leaves_of(&gpu, &bytes);
        if (memcmp(before, after, bytes)) ck_abort_msg("a leaf has changed");
        free(before);
        free(after);
        on_gpu = (cg_error){0};
        if (!machine_run(&gpu, 2, 1, &on_gpu)) ck_abort_msg("%s", on_gpu.text); /* and it goes on */
        machine_free(&cpu);
        machine_free(&gpu);
    }
    close_device();
}
END_TEST

int main(void) {
    Suite *suite = suite_create("cuda_step");
    TCase *tcase = tcase_create("cuda_step");
    tcase_set_timeout(tcase, 240);
    suite_add_tcase(suite, tcase);
    tcase_add_loop_test(tcase, steps_agree, 0, N_STEPS);
    tcase_add_loop_test(tcase, leaves_stay_when_a_gradient_is_not_finite, 0, 2);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
