/* csagrad bench: what its rows hold, its comparison with an earlier run, and what it refuses. No time is judged. */
#include "tests/program.h"

#include "models/train/step.h"
#include "tools/bench_row.h"

static const char *const small = "bench --dims toy --seqs 40,64 --runs 1 ";

/* Beside a run that was a thousand times as slow, then beside one whose backward was that much faster. One with
 * other threads, faster than any, is none to compare with. */
static void compare(json_t *report) {
    json_t *rows = json_object_get(report, "rows"), *row;
    const json_t *extra = json_array_get(rows, 0); /* the indexer's loss, f32 */
    for (int faster = 0; faster < 2; faster++) {
        size_t i;
        json_array_foreach(rows, i, row) {
            const double by = faster ? 1e-6 : 1e3;
            if (!faster) json_object_set_new(row, "fwd_us", json_real(real_of(row, "fwd_us") * by));
            json_object_set_new(row, "bwd_us", json_real(real_of(row, "bwd_us") * by));
        }
        for (size_t k = 0; k < 2 && !faster; k++) {
            row = json_copy(json_array_get(rows, 2 * k));
            json_object_set_new(row, "threads", json_integer(number(row, "threads") + 1));
            json_object_set_new(row, "bwd_us", json_real(1e-9));
            json_array_insert_new(rows, k, row);
        }
        char path[300], command[512];
        snprintf(path, sizeof path, "%s/old.json", folder);
        ck_assert_int_eq(json_dump_file(report, path, 0), 0);
        snprintf(command, sizeof command, "%s --parts indexer-loss --compare '%s'", small, path);
        outcome o = run_program(command);
        ck_assert_int_eq(o.code, faster ? CG_FAILED : 0);
        char said[100], *percent = default_of("bench", "tolerance");
        snprintf(said, sizeof said, "2 of 2 rows have a counterpart, %d got slower by more than %s %%\n",
                 faster ? 2 : 0, percent);
        holds(o.out, said);
        snprintf(said, sizeof said, "%.3f\n", (double)number(extra, "extra_peak_bytes") / 1048576);
        holds(o.out, said); /* the last column, MiB */
        free(percent);
        outcome_free(&o);
    }
}

/* What a row needs beyond its boundary is what csagrad mem plans. */
static void expect_extra_bytes(const json_t *row) {
    char command[256];
    snprintf(command, sizeof command,
             "mem --dims toy --seqs 40 --part indexer-loss --policy '%s' --plan-only --json",
             json_string_value(json_object_get(row, "policy")));
    json_t *list = good_json(command), *planned = json_array_get(list, 0);
    ck_assert_int_eq(number(row, "extra_peak_bytes"),
                     number(planned, "planned_peak_bytes") - number(planned, "boundary_bytes"));
    json_decref(list);
}

START_TEST(rows_and_comparison) {
    char command[512];
    snprintf(command, sizeof command,
             "%s --parts indexer-loss,attention,attention+loss --dtypes f32,f64,bf16 --json", small);
    json_t *report = good_json(command);
    const json_t *list = json_object_get(report, "rows");
    ck_assert_int_eq(json_array_size(list), 3 * 2 * 3);
    ck_assert(real_of(report, "gemm_peak_gflops") > 0 && real_of(report, "gemm_peak_gflops_f64") > 0);
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *row = json_array_get(list, i), *op;
        double flops = 0, bytes = 0, us = 0;
        size_t k;
        json_array_foreach(json_object_get(row, "ops"), k, op) {
            flops += real_of(op, "flops");
            bytes += real_of(op, "bytes");
            us += real_of(op, "us");
        }
        ck_assert(flops > 0 && flops == real_of(row, "flops") && bytes == real_of(row, "bytes"));
        const double whole = real_of(row, "fwd_us") + real_of(row, "bwd_us") + real_of(row, "optimize_us");
        ck_assert(fabs(us - whole) <= 1e-6 * whole);
        ck_assert(fabs(real_of(row, "gflops") - flops / us * 1e-3) <= 1e-6 * real_of(row, "gflops"));
        ck_assert(real_of(row, "peak_share") > 0 && number(row, "extra_peak_bytes") > 0);
        ck_assert_int_eq(number(row, "seq"), i % 2 ? 64 : 40);
    }
    /* the FLOPs that are counted belong to the problem, not to the number format */
    ck_assert(real_of(json_array_get(list, 0), "flops") == real_of(json_array_get(list, 2), "flops"));
    expect_extra_bytes(json_array_get(list, 0));
    compare(report);
    json_decref(report);
}
END_TEST

/* Of made-up times: ops by pass, the dearest first, and what runs again is part of backward. */
START_TEST(times_of_nodes) {
    cg_error error = {0};
    cg_step step = {0};
    cg_measurement m = {0};
    cg_workload w = {.part = CG_PART_STEP};
    ck_assert(cg_config_dims("toy", &w.config));
    w.config.seq_len = 32;
    strcpy(w.config.policy, "recompute");
    if (!cg_measure_plan(&w, &step, &m, &error)) ck_abort_msg("%s", error.text);
    double *us = calloc((size_t)step.plan->n_steps, sizeof *us), of_pass[CG_PASSES] = {0};
    for (int t = 0; t < step.plan->n_steps; t++) {
        us[t] = t % 7 + 1;
        if (!step.plan->steps[t]->op->alias) of_pass[step.plan->steps[t]->pass] += us[t];
    }
    bench_row row = {0};
    if (!bench_row_add_nodes(&row, step.plan, us, &error)) ck_abort_msg("%s", error.text);
    double of_ops[CG_PASSES] = {0};
    for (int k = 0; k < row.n_ops; k++) {
        of_ops[row.ops[k].pass] += row.ops[k].us;
        ck_assert(k == 0 || row.ops[k].us <= row.ops[k - 1].us);
    }
    for (int pass = 0; pass < CG_PASSES; pass++) ck_assert(of_pass[pass] > 0 && of_ops[pass] == of_pass[pass]);
    ck_assert(bench_row_backward_us(&row) == of_pass[CG_BACKWARD] + of_pass[CG_RECOMPUTE]);
    free(row.ops);
    free(us);
    cg_measurement_free(&m);
    cg_step_free(&step);
}
END_TEST

START_TEST(ops_of_a_step) {
    char *text =
        good("bench --parts step --ops --runs 1 --seq 32 --batch 1 --threads 1 --set num_hidden_layers=2 "
             "--set compress_ratios=0,4");
    holds(text, "; 1 threads\n");
    holds(text, "of its roof");
    holds(text, "csa_attention");
    holds(text, "adamw");
    free(text);
}
END_TEST

START_TEST(refusals) {
    bad("bench --parts atention", CG_BAD_INPUT, "did you mean attention?");
    bad("bench --dtypes f32,f32", CG_BAD_INPUT, "--dtypes names f32 twice");
    bad("bench --parts step,step", CG_BAD_INPUT, "--parts names step twice");
    bad("bench --seqs 0", CG_BAD_INPUT, "--seqs must be an integer");
    bad("bench --tolerance 5", CG_BAD_INPUT, "--tolerance goes with --compare");
    bad("bench --save out --device cuda", CG_BAD_INPUT, "--save computes on the CPU");
    bad("bench --compare /nowhere.json", CG_BAD_INPUT, "/nowhere.json");
}
END_TEST

int main(void) {
    const TTest *const tests[] = {rows_and_comparison, times_of_nodes, ops_of_a_step, refusals};
    return suite_run_in_folder("tools_bench", tests, 4);
}
