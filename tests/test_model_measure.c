/* A planned step is measured: the plan's peak, the farthest byte that a kernel was handed, the farthest byte that was
 * written, and what the operating system saw are the same; the forms of the indexer's objective give one loss. */
#include "tests/support.h"

#include "models/measure/measure.h"

#include <math.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__)
enum { SANITIZED = 1 };
#else
enum { SANITIZED = 0 };
#endif

/* Four layers of all kinds; short sequences. */
static cg_workload small_step(cg_dtype dtype) {
    cg_workload w = {.config = cg_config_toy(), .part = CG_PART_STEP};
    w.config.seq_len = 144;
    w.config.batch_size = 2;
    w.config.dtype = dtype;
    return w;
}

/* Segments with padding, an empty one, one that is all padding, one of a single row, one too short for a group. */
static const int32_t starts[] = {0, 160, 160, 168, 169, 172, 320}, lengths[] = {150, 0, 0, 1, 3, 131};

static cg_workload packed_step(cg_dtype dtype) {
    cg_workload w = small_step(dtype);
    w.n_segments = 6;
    w.cu_seqlens = starts;
    w.seqlens = lengths;
    w.max_segments = 9;
    return w;
}

static cg_workload one_layer(const char *dims, cg_part part, int64_t seq_len, const char *policy) {
    cg_workload w = {.part = part};
    ck_assert(cg_config_dims(dims, &w.config));
    w.config.seq_len = seq_len;
    strcpy(w.config.policy, policy);
    return w;
}

static cg_measurement run(const cg_workload *w, int n_runs) {
    cg_step step;
    cg_measurement m;
    cg_error error = {0};
    if (!cg_measure_run(w, n_runs, &step, &m, &error)) ck_abort_msg("%s: %s", w->config.policy, error.text);
    ck_assert_int_eq(m.planned_peak_bytes, step.plan->peak_bytes);
    ck_assert_int_eq(m.n_steps, step.plan->n_steps);
    double together = 0;
    for (int t = 0; t < m.n_steps; t++) {
        ck_assert(m.node_us[t] >= 0);
        together += m.node_us[t];
    }
    ck_assert(together > 0 && m.step_us > 0);
    cg_step_free(&step);
    cg_measurement_free(&m);
    return m;
}

static cg_measurement plan_of(const cg_workload *w) {
    cg_step step;
    cg_measurement m;
    cg_error error = {0};
    if (!cg_measure_plan(w, &step, &m, &error)) ck_abort_msg("%s: %s", w->config.policy, error.text);
    ck_assert(m.measured_peak_bytes == -1 && m.rss_peak_bytes == -1 && isnan(m.loss) && isnan(m.step_us) &&
              !m.node_us);
    cg_step_free(&step);
    return m;
}

/* ---- planned = measured ---- */

static const char *const spelled[] = {"save", "recompute", "relu,softmax;rms_norm@layer*/ffn",
                                      "indexer_head_scores@layer1;rope,matmul@layer3"};
static const char *const streamed[] = {"stream", "stream+rms_norm,swiglu;csa_compress@layer*"};

static void compare_policies(cg_workload w) {
    double loss = NAN;
    for (int i = 0; i < 4; i++) {
        strcpy(w.config.policy, spelled[i]);
        cg_measurement m = run(&w, 1);
        ck_assert_int_eq(m.measured_peak_bytes, m.planned_peak_bytes);
        ck_assert(m.floor_bytes <= m.planned_peak_bytes && m.boundary_bytes < m.planned_peak_bytes);
        ck_assert((m.n_clones > 0) == (i > 0) && (m.recomputed_bytes > 0) == (i > 0));
        ck_assert((m.extra_flops > 0) == (i > 0) && m.extra_flops < m.flops);
        ck_assert(isfinite(m.loss) && m.loss > 1);
        if (i) ck_assert_double_eq(m.loss, loss); /* a clone has the bits of its original */
        loss = m.loss;
    }
    for (int i = 0; i < 2; i++) {
        strcpy(w.config.policy, streamed[i]);
        cg_measurement m = run(&w, 1);
        ck_assert_int_eq(m.measured_peak_bytes, m.planned_peak_bytes);
        ck_assert_double_le(fabs(m.loss - loss), (w.config.dtype == CG_F64 ? 1e-12 : 1e-6) * loss);
    }
}

START_TEST(equal_segments) {
    compare_policies(small_step(CG_F32));
    compare_policies(small_step(CG_F64));
}
END_TEST

START_TEST(packed_rows_with_padding) {
    compare_policies(packed_step(CG_F32));
    compare_policies(packed_step(CG_F64));
}
END_TEST

START_TEST(budgets) {
    cg_workload w = one_layer("toy", CG_PART_STEP, 256, "stream");
    w.config.compress_ratios[0] = CG_RATIO_HCA; /* fewer nodes, so that a search takes no time */
    int64_t all = plan_of(&w).planned_peak_bytes;
    double loss = run(&w, 1).loss;
    for (int percent = 99; percent >= 85; percent -= 7) {
        snprintf(w.config.policy, sizeof w.config.policy, "auto:%lld", (long long)(all / 100 * percent));
        cg_measurement m = run(&w, 1);
        ck_assert_int_eq(m.measured_peak_bytes, m.planned_peak_bytes);
        ck_assert_int_le(m.planned_peak_bytes, all / 100 * percent);
        ck_assert_double_eq(m.loss, loss);
    }
}
END_TEST

START_TEST(the_loss_alone) {
    static const char *const policies[] = {"save", "recompute", "relu;gather,softmax", "stream",
                                           "stream+indexer_scores_at"};
    for (int f64 = 0; f64 < 2; f64++) {
        double loss = NAN;
        for (int i = 0; i < 5; i++) {
            cg_workload w = one_layer("toy", CG_PART_INDEXER_LOSS, 320, policies[i]);
            w.config.dtype = f64 ? CG_F64 : CG_F32;
            w.n_segments = 6;
            w.cu_seqlens = starts;
            w.seqlens = lengths;
            cg_measurement m = run(&w, 1);
            ck_assert_int_eq(m.measured_peak_bytes, m.planned_peak_bytes);
            if (i) ck_assert_double_le(fabs(m.loss - loss), (f64 ? 1e-12 : 1e-6) * loss);
            if (i == 1 || i == 2) ck_assert_double_eq(m.loss, loss);
            loss = m.loss;
        }
    }
}
END_TEST

/* Scores of every head, and their ReLU, which takes their place: one buffer of T Hi C numbers, not two.
 * Apart from each other they are two. */
START_TEST(a_reused_clone_is_counted_once) {
    cg_workload w = one_layer("toy", CG_PART_INDEXER_LOSS, 256, "recompute");
    const int64_t all = 256 * w.config.index_n_heads * (256 / CG_RATIO_CSA) * (int64_t)sizeof(float);
    cg_measurement m = plan_of(&w);
    ck_assert_int_eq(m.n_clones, 2);
    ck_assert_int_eq(m.recomputed_bytes, all);
    strcpy(w.config.policy, "relu");
    m = plan_of(&w);
    ck_assert_int_eq(m.n_clones, 1);
    ck_assert_int_eq(m.recomputed_bytes, all);
    strcpy(w.config.policy, "save");
    ck_assert_int_eq(plan_of(&w).recomputed_bytes, 0);
}
END_TEST

/* OpenMP's threads do not survive a fork: a measurement must work all the same, and twice. */
START_TEST(behind_a_parallel_region) {
    cg_workload w = one_layer("toy", CG_PART_INDEXER_LOSS, 64, "stream");
    int n = 0;
#pragma omp parallel reduction(+ : n)
    n++;
    ck_assert_int_ge(n, 1);
    double loss = run(&w, 3).loss;
    ck_assert_double_eq(run(&w, 2).loss, loss);
}
END_TEST

/* ---- the operating system ---- */

START_TEST(the_process_grows_by_the_peak) {
    if (SANITIZED) {
        puts("the_process_grows_by_the_peak: skipped, as sanitizers take memory of their own");
        return;
    }
    static const char *const policies[] = {"save", "recompute", "stream"};
    for (int i = 0; i < 3; i++) {
        cg_workload w = one_layer("toy", CG_PART_STEP, 2560, policies[i]);
        cg_measurement m = run(&w, 1);
        ck_assert_int_eq(m.measured_peak_bytes, m.planned_peak_bytes);
        ck_assert_int_gt(m.planned_peak_bytes, 40 << 20);
        double growth = (double)m.rss_peak_bytes / (double)m.planned_peak_bytes;
        printf("policy %s: planned %lld bytes, the process grew by %.4f of that\n", policies[i],
               (long long)m.planned_peak_bytes, growth);
        ck_assert_double_le(fabs(growth - 1), 0.03);
    }
}
END_TEST

/* ---- the farthest byte that a step writes ---- */

/* One more than the offset of the last byte of the arena that a run changed from `pattern`. */
static int64_t written_bytes(const cg_workload *w, const cg_step *step, unsigned char pattern) {
    cg_error error = {0};
    const cg_plan *plan = step->plan;
    cg_exec *exec = cg_exec_new(plan, NULL, &error);
    if (!exec) ck_abort_msg("%s", error.text);
    unsigned char *arena = (unsigned char *)cg_exec_data(exec, step->seed) -
                           plan->storages[plan->storage_of[step->seed->id]].offset;
    memset(arena, pattern, (size_t)plan->peak_bytes);
    cg_measure_fill(w, step, exec);
    if (!cg_exec_run(exec, CG_ALL_PASSES, &error)) ck_abort_msg("%s", error.text);
    int64_t n = plan->peak_bytes;
    while (n > 0 && arena[n - 1] == pattern) n--;
    cg_exec_free(exec);
    return n;
}

/* A workspace that the op asked for and did not write to its end: scratch for threads that had no work, say. */
static bool only_workspaces_reach(const cg_plan *plan, int64_t bytes) {
    bool any = false;
    for (int s = 0; s < plan->n_storages; s++) {
        const cg_storage *storage = &plan->storages[s];
        if (storage->offset + storage->reserved <= (bytes + CG_ALIGN - 1) / CG_ALIGN * CG_ALIGN) continue;
        if (storage->category != CG_WORKSPACE) return false;
        any = true;
    }
    return any;
}

START_TEST(paint_shows_the_peak) {
    int exact = 0;
    for (int i = 0; i < 6; i++)
        for (int packed = 0; packed < 2; packed++) {
            cg_workload w = packed ? packed_step(i % 2 ? CG_F64 : CG_F32) : small_step(i % 2 ? CG_F32 : CG_F64);
            strcpy(w.config.policy, i < 4 ? spelled[i] : streamed[i - 4]);
            cg_step step;
            cg_measurement m;
            cg_error error = {0};
            if (!cg_measure_plan(&w, &step, &m, &error)) ck_abort_msg("%s", error.text);
            int64_t a = written_bytes(&w, &step, 0xa5), b = written_bytes(&w, &step, 0x5a),
                    most = a > b ? a : b;
            bool in_last_granule = most > m.planned_peak_bytes - CG_ALIGN;
            if (!in_last_granule && !only_workspaces_reach(step.plan, most))
                ck_abort_msg("policy %s: %lld bytes are planned, %lld were written", w.config.policy,
                             (long long)m.planned_peak_bytes, (long long)most);
            exact += in_last_granule;
            cg_step_free(&step);
        }
    printf("the last granule of the plan was written in %d of 12 steps\n", exact);
    ck_assert_int_ge(exact, 6);
}
END_TEST

/* ---- what the forms cost ---- */

/* Saved values of the shape [T, Hi, C]. */
static int64_t score_bytes(const cg_workload *w) {
    cg_step step;
    cg_measurement m;
    cg_error error = {0};
    if (!cg_measure_plan(w, &step, &m, &error)) ck_abort_msg("%s", error.text);
    int64_t T = w->config.batch_size * w->config.seq_len, bytes = 0, together = 0;
    int n;
    cg_saved *saved = cg_plan_saved(step.plan, &n);
    for (int i = 0; i < n; i++) {
        const cg_shape *shape = &saved[i].value->shape;
        together += saved[i].bytes;
        if (cg_shape_equal(shape, &CG_SHAPE(T, w->config.index_n_heads, T / CG_RATIO_CSA)))
            bytes += saved[i].bytes;
    }
    ck_assert_int_eq(together, m.saved_bytes);
    cg_saved_free(saved, n);
    cg_step_free(&step);
    return bytes;
}

START_TEST(scores_are_saved_once_per_layer) {
    for (int part = 0; part < 2; part++) {
        cg_workload w = one_layer("toy", part ? CG_PART_INDEXER_LOSS : CG_PART_STEP, 4096, "save");
        ck_assert_int_eq(score_bytes(&w), INT64_C(4) * 4096 * 8 * 1024);
        strcpy(w.config.policy, "recompute");
        ck_assert_int_eq(score_bytes(&w), 0);
        strcpy(w.config.policy, "stream");
        ck_assert_int_eq(score_bytes(&w), 0);
    }
    cg_workload w = small_step(CG_F64);
    strcpy(w.config.policy, "save");
    ck_assert_int_eq(score_bytes(&w), INT64_C(2) * 8 * 288 * 8 * 72); /* two CSA layers */
}
END_TEST

static double beyond_boundary(int64_t seq_len, const char *policy) {
    cg_workload w = one_layer("toy", CG_PART_INDEXER_LOSS, seq_len, policy);
    cg_measurement m = plan_of(&w);
    /* queries, keys and head weights stand there twice, as values and as gradients; the teacher [T, K] once */
    double floats = (double)seq_len * (2 * (8 * 32 + 8 + 32 / 4) + 64);
    ck_assert_double_le(fabs((double)m.boundary_bytes - 4 * floats), 1024);
    return (double)(m.planned_peak_bytes - m.boundary_bytes);
}

START_TEST(the_streamed_loss_needs_a_hundredth) {
    double save = beyond_boundary(4096, "save"), stream = beyond_boundary(4096, "stream");
    printf("beyond the boundary at S = 4096: save %.0f bytes, stream %.0f, %.5f of it\n", save, stream,
           stream / save);
    ck_assert_double_ge(save, 2.0 * 4 * 4096 * 8 * 1024);
    ck_assert_double_le(stream, save / 100);
    /* linear: a doubled length takes at most twice as much */
    for (int64_t S = 512; S < 8192; S *= 2) {
        ck_assert_double_le(beyond_boundary(2 * S, "stream"), 2.05 * beyond_boundary(S, "stream"));
        ck_assert_double_ge(beyond_boundary(2 * S, "save"), 3.5 * beyond_boundary(S, "save"));
    }
}
END_TEST

START_TEST(sizes_beyond_the_machine) {
    cg_workload w = one_layer("flash", CG_PART_STEP, 65536, "save");
    cg_measurement m = plan_of(&w);
    ck_assert_int_gt(m.planned_peak_bytes, INT64_C(4) * 65536 * 64 * 16384);
    cg_step step;
    cg_error error = {0};
    ck_assert(!cg_measure_run(&w, 1, &step, &m, &error));
    ck_assert_int_eq(error.code, CG_FAILED);
    ck_assert_ptr_nonnull(strstr(error.text, "this machine has"));
    ck_assert_ptr_nonnull(step.plan); /* what is planned can be reported */
    cg_step_free(&step);
}
END_TEST

/* ---- options ---- */

START_TEST(what_a_step_holds) {
    cg_workload w = small_step(CG_F32);
    int64_t whole = plan_of(&w).planned_peak_bytes;
    w.no_optimizer = true;
    cg_measurement m = run(&w, 1);
    ck_assert_int_eq(m.measured_peak_bytes, m.planned_peak_bytes);
    ck_assert_int_lt(m.planned_peak_bytes, whole);
    w.attend_all = true;
    m = run(&w, 1);
    ck_assert_int_eq(m.measured_peak_bytes, m.planned_peak_bytes);
    /* lists of all visible rows are as wide as the longest segment asks */
    w.n_segments = 1;
    w.cu_seqlens = (const int32_t[]){0, 288};
    w.seqlens = (const int32_t[]){288};
    ck_assert_int_gt(plan_of(&w).planned_peak_bytes, m.planned_peak_bytes);
    w.n_segments = 2;
    w.cu_seqlens = (const int32_t[]){0, 144, 288};
    w.seqlens = (const int32_t[]){144, 144};
    ck_assert_int_eq(plan_of(&w).planned_peak_bytes, m.planned_peak_bytes);
    w = small_step(CG_F32);
    w.config.accumulate = 2;
    m = run(&w, 1);
    ck_assert_int_eq(m.measured_peak_bytes, m.planned_peak_bytes);
}
END_TEST

START_TEST(recompute_is_verified) {
    cg_workload w = small_step(CG_F32);
    strcpy(w.config.policy, "recompute");
    int64_t plain = plan_of(&w).planned_peak_bytes;
    w.verify_recompute = true;
    cg_measurement m = run(&w, 1);
    ck_assert_int_eq(m.measured_peak_bytes, m.planned_peak_bytes);
    ck_assert_int_gt(m.planned_peak_bytes, plain); /* originals live longer */
}
END_TEST

static void refuse(const cg_workload *w, int n_runs, const char *part) {
    cg_step step;
    cg_measurement m;
    cg_error error = {0};
    ck_assert(!cg_measure_run(w, n_runs, &step, &m, &error));
    if (error.code != CG_BAD_INPUT || !strstr(error.text, part))
        ck_abort_msg("expected a sentence with \"%s\", got: %s", part, error.text);
    cg_measurement_free(&m);
    cg_step_free(&step);
}

START_TEST(bad_workloads) {
    cg_workload w = small_step(CG_F32);
    refuse(&w, 0, "at least 1 run, got 0");
    strcpy(w.config.policy, "sve");
    refuse(&w, 1, "sve");
    w = packed_step(CG_F32);
    w.seqlens = (const int32_t[]){150, 0, 9, 1, 3, 131};
    refuse(&w, 1, "segment 2 has 9 real rows of 8");
    w.seqlens = lengths;
    w.cu_seqlens = (const int32_t[]){1, 160, 160, 168, 169, 172, 320};
    refuse(&w, 1, "the first segment starts at row 1");
    w.cu_seqlens = (const int32_t[]){0, 160, 150, 168, 169, 172, 320};
    refuse(&w, 1, "segment 1 has 0 real rows of -10");
    w = one_layer("toy", CG_PART_INDEXER_LOSS, 64, "stream");
    w.attend_all = true;
    refuse(&w, 1, "over the selected rows");
    w.attend_all = false;
    w.config.support = CG_SUPPORT_DENSE;
    refuse(&w, 1, "over the selected rows");
}
END_TEST

/* The end of the measured process is a sentence here, whatever ended it. */
START_TEST(a_run_that_is_killed) {
    cg_workload w = one_layer("toy", CG_PART_STEP, 64, "stream");
    pid_t measuring = getpid(), killer = fork();
    if (killer == 0) {
        char path[64];
        snprintf(path, sizeof path, "/proc/%d/task/%d/children", measuring, measuring);
        for (int tries = 0; tries < 20000; tries++) {
            FILE *file = fopen(path, "r");
            int pid = 0;
            while (file && fscanf(file, "%d", &pid) == 1)
                if (pid != getpid()) {
                    usleep(50000);
                    _exit(kill(pid, SIGKILL) != 0);
                }
            if (file) fclose(file);
            usleep(1000);
        }
        _exit(2);
    }
    cg_step step;
    cg_measurement m;
    cg_error error = {0};
    ck_assert(!cg_measure_run(&w, 1 << 20, &step, &m, &error));
    ck_assert_int_eq(error.code, CG_FAILED);
    if (!strstr(error.text, "the run was killed")) ck_abort_msg("%s", error.text);
    ck_assert_int_eq(m.measured_peak_bytes, -1);
    ck_assert_ptr_null(m.node_us);
    int status;
    ck_assert_int_eq(waitpid(killer, &status, 0), killer);
    ck_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    cg_step_free(&step);
}
END_TEST

SUITE("model_measure", equal_segments, packed_rows_with_padding, budgets, the_loss_alone,
      a_reused_clone_is_counted_once, behind_a_parallel_region, the_process_grows_by_the_peak,
      paint_shows_the_peak, scores_are_saved_once_per_layer, the_streamed_loss_needs_a_hundredth,
      sizes_beyond_the_machine, what_a_step_holds, recompute_is_verified, bad_workloads, a_run_that_is_killed)
