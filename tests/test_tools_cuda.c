/* The program with --device: a build whose device is the CPU (ops/cuda/host), beside itself on the CPU. */
#undef CSAGRAD_PROGRAM
#define CSAGRAD_PROGRAM CSAGRAD_CUDA_HOST_PROGRAM
#include "tests/program.h"

/* The lines of metrics.jsonl as one list. */
static json_t *train(const char *options) {
    char command[1024];
    snprintf(
        command, sizeof command,
        "train --task recall --steps 3 --seq 128 --batch 1 --dtype f64 --indexer-warmup 1 --set eval_batches=1 "
        "--set hidden_size=16 --set num_hidden_layers=2 --set compress_ratios=0,4 --set num_attention_heads=2 "
        "--set head_dim=8 --set qk_rope_head_dim=4 --set q_lora_rank=8 --set o_groups=2 --set o_lora_rank=4 "
        "--set index_n_heads=2 --set index_head_dim=8 --set index_topk=4 --set sliding_window=4 "
        "--set intermediate_size=16 --json %s",
        options);
    char *text = good(command), *rest = text;
    json_t *lines = json_array();
    for (char *line; (line = strtok_r(rest, "\n", &rest));) {
        json_t *object = json_loads(line, 0, NULL);
        ck_assert_ptr_nonnull(object);
        json_array_append_new(lines, object);
    }
    free(text);
    return lines;
}

START_TEST(training) {
    json_t *cpu = train("--out on_cpu"), *gpu = train("--out on_device --device cuda");
    static const char *const keys[] = {"lm_loss", "indexer_loss", "grad_norm"};
    ck_assert_int_eq(json_array_size(cpu), json_array_size(gpu));
    size_t last = json_array_size(gpu) - 1;
    for (size_t i = 0; i < last; i++)
        for (int k = 0; k < 3; k++) {
            double a = real_of(json_array_get(cpu, i), keys[k]), b = real_of(json_array_get(gpu, i), keys[k]);
            if (!(fabs(a - b) <= 1e-8 * fmax(1, fabs(a))))
                ck_abort_msg("step %zu: %s is %.17g on the device, %.17g on the CPU", i + 1, keys[k], b, a);
        }
    const json_t *end = json_array_get(gpu, last);
    ck_assert_ptr_nonnull(json_object_get(end, "device"));
    ck_assert_ptr_null(json_object_get(json_array_get(cpu, last), "device"));
    ck_assert_int_eq(number(end, "planned_peak_bytes"), number(end, "measured_peak_bytes"));
    ck_assert_int_ge(number(end, "device_asked_peak_bytes"), number(end, "planned_peak_bytes"));
    json_decref(cpu);
    json_decref(gpu);
}
END_TEST

START_TEST(checks) {
    json_t *report = good_json("gradcheck --op rms_norm --json --device cuda");
    ck_assert(json_is_true(json_object_get(report, "ok")));
    json_decref(report);
    report = good_json("check '" TEST_DATA_DIR "/compressor.safetensors' --json --device cuda");
    ck_assert(json_is_true(json_object_get(report, "match")));
    json_decref(report);
    const char *row =
        "check --row --device cuda --q '[[2,0],[0,1]]' --window '[[0,3]]' --compressed '[[1,0],[0,1]]' "
        "--sink '[0,0]' --scores '[0.3,-0.2]'";
    char *text = good(row);
    holds(text, "lse");
    free(text);
}
END_TEST

/* What the device's kernels compute is judged by code that shares nothing with them. */
START_TEST(a_dump_of_the_device) {
    free(good("dump --out mine.safetensors --segments 23,9 --dtype f64 --device cuda"));
    json_t *verdict = good_json("check mine.safetensors --json");
    ck_assert(json_is_true(json_object_get(verdict, "match")));
    json_decref(verdict);
    bad("check mine.safetensors --device cuda", CG_BAD_INPUT, "judged on the CPU");
}
END_TEST

/* Planned, measured by the pointers that kernels got, and asked of the driver: three accounts of the same bytes. */
START_TEST(memory) {
    json_t *rows = good_json("mem --seq 48 --batch 1 --runs 1 --json --device cuda --set num_hidden_layers=2 "
                             "--set compress_ratios=0,4 --policy save --policy 'stream+rms_norm'");
    ck_assert_int_eq(json_array_size(rows), 2);
    for (size_t i = 0; i < 2; i++) {
        const json_t *row = json_array_get(rows, i);
        ck_assert_int_eq(number(row, "measured_peak_bytes"), number(row, "planned_peak_bytes"));
        ck_assert_int_eq(number(row, "driver_peak_bytes"), number(row, "planned_peak_bytes"));
        ck_assert(json_is_null(json_object_get(row, "rss_peak_bytes")));
        ck_assert(real_of(row, "step_us") > 0 && isfinite(real_of(row, "loss")));
    }
    json_decref(rows);
    char *text = good("mem --seq 48 --batch 1 --plan-only --device cuda --policy stream");
    holds(text, "device: the CPU in the place of a CUDA device");
    free(text);
}
END_TEST

START_TEST(times) {
    json_t *report =
        good_json("bench --dims toy --seqs 24 --runs 1 --parts attention+loss --dtypes f32,bf16 --json "
                  "--device cuda");
    const char *name = json_string_value(json_object_get(report, "device"));
    ck_assert_ptr_nonnull(strstr(name, "in the place of"));
    const double gib = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE) / 1073741824;
    ck_assert_double_eq_tol(atof(strrchr(name, ',') + 1), gib, 0.051);
    ck_assert(real_of(report, "gemm_peak_gflops") > 0 && real_of(report, "gemm_peak_gflops_bf16") > 0);
    ck_assert(real_of(report, "memory_peak_gbytes") > 0);
    const json_t *rows = json_object_get(report, "rows");
    ck_assert_int_eq(json_array_size(rows), 2);
    for (size_t i = 0; i < 2; i++) {
        const json_t *row = json_array_get(rows, i);
        ck_assert(real_of(row, "fwd_us") > 0 && real_of(row, "bwd_us") > 0 && isfinite(real_of(row, "loss")));
    }
    json_decref(report);
}
END_TEST

START_TEST(bad_devices) {
    bad("gradcheck --op scale --device cud", CG_BAD_INPUT, "unknown device \"cud\", did you mean cuda?");
    bad("gradcheck --op scale --device cuda:x", CG_BAD_INPUT, "--device cuda:N must be an integer");
    bad("gradcheck --op scale --device cuda:1", CG_NO_DEVICE, "no CUDA device number 1");
    ck_assert_int_eq(setenv("CSAGRAD_CUDA_VARIANT", "plan", 1), 0);
    bad("gradcheck --op scale --device cuda", CG_BAD_INPUT, "variant \"plan\", did you mean plain?");
    ck_assert_int_eq(setenv("CSAGRAD_CUDA_VARIANT", "plain", 1), 0);
    free(good("gradcheck --op matmul --device cuda"));
    unsetenv("CSAGRAD_CUDA_VARIANT");
}
END_TEST

int main(void) {
    const TTest *const tests[] = {training, checks, a_dump_of_the_device, memory, times, bad_devices};
    return suite_run_in_folder("tools_cuda", tests, 6);
}
