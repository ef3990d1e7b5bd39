/* csagrad mem from outside and its rows from inside: tables and JSON, what is said of each saved value, counterfactuals
 * against the policies that they speak of, growth, budgets, refusals. */
#include "tests/program.h"

#include "tools/mem.h"

#include <sys/stat.h>
#include <time.h>

static const json_t *find_saved(const json_t *row, const char *op, const char *scope) {
    const json_t *list = json_object_get(row, "saved");
    ck_assert(json_is_array(list));
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *value = json_array_get(list, i);
        if (!strcmp(json_string_value(json_object_get(value, "op")), op) &&
            !strcmp(json_string_value(json_object_get(value, "scope")), scope))
            return value;
    }
    return NULL;
}

static const char *word(const json_t *object, const char *key) {
    const char *text = json_string_value(json_object_get(object, key));
    if (!text) ck_abort_msg("%s is no text", key);
    return text;
}

static bool is_null(const json_t *object, const char *key) {
    return json_is_null(json_object_get(object, key));
}

/* The one row of a command. */
static json_t *one_row(const char *arguments) {
    json_t *list = good_json(arguments);
    ck_assert_int_eq((int)json_array_size(list), 1);
    json_t *row = json_incref(json_array_get(list, 0));
    json_decref(list);
    return row;
}

/* ---- rows ---- */

START_TEST(a_measured_row) {
    json_t *row = one_row("mem --dims toy --seq 64 --policy save --runs 1 --json");
    ck_assert_str_eq(word(row, "policy"), "save");
    ck_assert_str_eq(word(row, "dims"), "toy");
    ck_assert_str_eq(word(row, "dtype"), "f32");
    ck_assert_int_eq(number(row, "seq"), 64);
    ck_assert_int_gt(number(row, "planned_peak_bytes"), number(row, "saved_bytes"));
    ck_assert_int_eq(number(row, "measured_peak_bytes"), number(row, "planned_peak_bytes"));
    ck_assert_int_gt(number(row, "rss_peak_bytes"), 0);
    ck_assert_int_eq(number(row, "recomputed_bytes"), 0);
    ck_assert_int_gt(number(row, "workspace_bytes"), 0);
    ck_assert(json_number_value(json_object_get(row, "extra_flops")) == 0);
    ck_assert(json_number_value(json_object_get(row, "loss")) > 1);
    ck_assert(json_number_value(json_object_get(row, "step_us")) > 1);
    json_decref(row);
    row = one_row("mem --dims toy --seq 64 --policy save --plan-only --json");
    static const char *const measured[] = {"measured_peak_bytes", "rss_peak_bytes", "loss", "step_us"};
    for (int i = 0; i < 4; i++) ck_assert(is_null(row, measured[i]));
    json_decref(row);
    char *text = good("mem --dims toy --seq 64 --policy recompute --policy stream --runs 1 --dtypes f32,f64");
    holds(text, "csagrad mem: task=text seq_len=64 batch_size=1 seed=1");
    holds(text, "planned peak MiB");
    holds(text, "planned and measured peak of 4 rows: largest difference 0 bytes");
    double planned, here, process;
    const char *line = strstr(text, "\nstream ");
    ck_assert(line && sscanf(line, " stream 64 f32 %lf %lf %lf", &planned, &here, &process) == 3);
    free(text);
}
END_TEST

/* The saved scores are what the policies differ in: one copy per CSA layer and head, in f32. */
START_TEST(policies_side_by_side) {
    json_t *root = good_json("mem --plan-only --seq 256 --batch 2 --set compress_ratios=0,4,128,4 --json");
    ck_assert_int_eq((int)json_array_size(root), 3);
    int64_t saved[3], peak[3], clones[3];
    static const char *const names[3] = {"save", "recompute", "stream"};
    for (size_t i = 0; i < 3; i++) {
        const json_t *line = json_array_get(root, i);
        ck_assert_str_eq(word(line, "policy"), names[i]);
        saved[i] = number(line, "saved_in_indexers_bytes");
        peak[i] = number(line, "planned_peak_bytes");
        clones[i] = number(line, "recomputed_nodes");
    }
    json_decref(root);
    int64_t scores = 4 * 512 * 8 * (512 / 4); /* T, Hi, C */
    ck_assert_int_ge(saved[0] - saved[1], 2 * scores);
    ck_assert_int_ge(saved[0] - saved[2], 2 * scores);
    ck_assert_int_gt(peak[0], peak[1]);
    ck_assert_int_gt(peak[1], peak[2]);
    ck_assert(clones[0] == 0 && clones[1] > 0 && clones[2] == 0);
    /* sizes, then formats, then policies; what --set says is compared too, and a policy named twice is one row */
    root = good_json(
        "mem --plan-only --dims toy --set policy=stream+rms_norm --seqs 64,32 --dtypes f64,f32 --json");
    ck_assert_int_eq((int)json_array_size(root), 16);
    const json_t *row = json_array_get(root, 7);
    ck_assert(number(row, "seq") == 64 && !strcmp(word(row, "dtype"), "f32"));
    ck_assert_str_eq(word(row, "policy"), "stream+rms_norm");
    json_decref(root);
    json_decref(one_row("mem --plan-only --dims toy --policy save --policy save --json"));
    /* without an indexer there is nothing to recompute, which is no mistake */
    json_t *none = one_row("mem --plan-only --policy recompute --set compress_ratios=0,0,128,0 --json");
    ck_assert_int_eq(number(none, "recomputed_nodes"), 0);
    json_decref(none);
}
END_TEST

START_TEST(packed_rows) {
    json_t *row = one_row("mem --dims toy --segments 33,0,40/64,7/9 --policy recompute --runs 1 --json");
    ck_assert_int_eq(number(row, "rows"), 64 + 33 + 9);
    ck_assert_int_eq(number(row, "seq"), 64);
    ck_assert_int_eq(number(row, "measured_peak_bytes"), number(row, "planned_peak_bytes"));
    json_decref(row);
    row = one_row("mem --dims toy --seq 64 --policy recompute --verify-recompute --runs 1 --warm-up "
                  "--no-optimizer --json");
    ck_assert_int_eq(number(row, "measured_peak_bytes"), number(row, "planned_peak_bytes"));
    json_decref(row);
}
END_TEST

/* ---- saved values ---- */

START_TEST(values_add_up) {
    char *text = good("mem --plan-only --seq 64 --batch 2 --task recall --policy save --values");
    holds(text, "csagrad mem: task=recall seq_len=64 batch_size=2 seed=1");
    holds(text, "Saved for backward by save at 64 tokens");
    holds(text, "of backward at");
    free(text);
    json_t *row = one_row("mem --plan-only --seq 64 --batch 2 --policy save --values --json");
    const json_t *list = json_object_get(row, "saved"), *categories = json_object_get(row, "peak_categories");
    ck_assert_int_gt((int)json_array_size(list), 20);
    int64_t all = 0, in_indexers = 0;
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *value = json_array_get(list, i), *shape = json_object_get(value, "shape"),
                     *readers = json_object_get(value, "readers");
        int64_t bytes = 4; /* f32 and i32 */
        for (size_t d = 0; d < json_array_size(shape); d++)
            bytes *= json_integer_value(json_array_get(shape, d));
        ck_assert_int_eq(number(value, "bytes"), bytes);
        all += bytes;
        if (strstr(word(value, "scope"), "indexer")) in_indexers += bytes;
        ck_assert_int_gt((int)json_array_size(readers), 0);
        for (size_t r = 0; r < json_array_size(readers); r++) {
            const json_t *reader = json_array_get(readers, r);
            int64_t step = number(reader, "step");
            ck_assert_int_gt(step, number(value, "first_step"));
            ck_assert_int_le(step, number(value, "last_step"));
            ck_assert_str_ne(word(reader, "pass"), "forward");
            ck_assert(word(reader, "op")[0] && json_is_string(json_object_get(reader, "scope")));
        }
        /* only a choice cannot be computed again */
        bool is_choice = !strcmp(word(value, "op"), "topk");
        ck_assert(is_null(value, "recompute_this") == is_choice);
        if (!is_choice)
            ck_assert(json_number_value(json_object_get(json_object_get(value, "recompute_this"), "extra_us")) >
                      0);
    }
    ck_assert_int_eq(number(row, "saved_bytes"), all);
    ck_assert_int_eq(number(row, "saved_in_indexers_bytes"), in_indexers);
    ck_assert_int_eq(number(row, "rows"), 128);
    int64_t together = 0;
    const char *name;
    json_t *bytes;
    json_object_foreach((json_t *)categories, name, bytes) together += json_integer_value(bytes);
    ck_assert_int_eq(together, number(row, "floor_bytes"));
    ck_assert_int_ge(number(row, "planned_peak_bytes"), together);
    /* spelled out, the per-head scores [T, Hi, C] are values that backward reads; streamed, there are none */
    const json_t *scores = find_saved(row, "relu", "layer1/attn/indexer");
    ck_assert_ptr_nonnull(scores);
    ck_assert_int_eq(number(scores, "bytes"), 4 * 128 * 8 * 32);
    int64_t saved_peak = number(row, "planned_peak_bytes");
    json_decref(row);
    row = one_row("mem --plan-only --seq 64 --batch 2 --policy stream --values --json");
    ck_assert_ptr_null(find_saved(row, "relu", "layer1/attn/indexer"));
    ck_assert_int_lt(number(row, "planned_peak_bytes"), saved_peak);
    ck_assert_int_eq(number(row, "recomputed_nodes"), 0);
    json_decref(row);
    row = one_row("mem --plan-only --seq 64 --batch 2 --policy recompute --json --no-optimizer");
    ck_assert_int_gt(number(row, "recomputed_nodes"), 0);
    ck_assert_int_eq(number(json_object_get(row, "peak_categories"), "optimizer"), 0);
    ck_assert_ptr_null(json_object_get(row, "saved"));
    json_decref(row);
}
END_TEST

static void make_row(mem_row *row, const char *policy, int n_runs) {
    cg_error error = {0};
    *row = (mem_row){.dims = "toy", .seq = 96, .n_rows = 96, .dtype = CG_F32};
    ck_assert(cg_config_dims("toy", &row->workload.config));
    row->workload.config.seq_len = 96;
    snprintf(row->policy, sizeof row->policy, "%s", policy);
    strcpy(row->workload.config.policy, policy);
    if (!mem_row_make(row, n_runs, &error)) ck_abort_msg("%s: %s", policy, error.text);
    ck_assert_ptr_null(row->refused);
}

static void free_rows(mem_row *rows, int n) {
    mem_report report = {.rows = rows, .n_rows = n};
    mem_report_free(&report);
}

/* "Recompute this: peak -x" is what the policy with that term added is planned to. */
START_TEST(counterfactuals_hold) {
    static const char *const policies[] = {"save", "stream", "rms_norm@layer0;relu", "stream+rms_norm"};
    static const char *const terms[][2] = {{"swiglu@layer0/ffn", "swiglu"},
                                           {"csa_compress@layer0/attn/compressor", "csa_compress"},
                                           {"grouped_linear@layer0/attn", "grouped_linear"},
                                           {"embedding", "embedding"}};
    for (int p = 0; p < 4; p++) {
        mem_row *rows = calloc(5, sizeof *rows);
        cg_error error = {0};
        make_row(&rows[0], policies[p], 0);
        if (!mem_what_if_make(&rows[0], &error)) ck_abort_msg("%s", error.text);
        int n_different = 0;
        for (int t = 0; t < 4; t++) {
            char policy[CG_POLICY_BYTES];
            snprintf(policy, sizeof policy, "%s%s%s", p ? policies[p] : "",
                     p == 1 ? "+"
                     : p    ? ";"
                            : "",
                     terms[t][0]);
            make_row(&rows[1 + t], policy, 0);
            const mem_what_if *found = NULL;
            for (int i = 0; i < rows[0].n_saved; i++) {
                const cg_value *value = rows[0].what_if[i].value;
                ck_assert_ptr_eq(value, rows[0].saved[i].value);
                if (!strcmp(value->producer->op->name, terms[t][1]) && !strstr(value->scope, "indexer"))
                    found = &rows[0].what_if[i];
            }
            ck_assert(found && found->possible && found->extra_us > 0);
            ck_assert_int_eq(found->peak_change_bytes,
                             rows[1 + t].m.planned_peak_bytes - rows[0].m.planned_peak_bytes);
            const double us = mem_row_us(&rows[1 + t]) - mem_row_us(&rows[0]);
            ck_assert_double_eq_tol(found->extra_us, us, 1e-6 * us);
            n_different += found->peak_change_bytes != 0;
        }
        ck_assert_int_gt(n_different, 0);
        free_rows(rows, 5);
    }
}
END_TEST

/* Measured times stand behind the counterfactuals of a row that was run. */
START_TEST(counterfactuals_of_a_run) {
    mem_row *row = calloc(1, sizeof *row);
    cg_error error = {0};
    make_row(row, "stream", 1);
    if (!mem_what_if_make(row, &error)) ck_abort_msg("%s", error.text);
    for (int i = 0; i < row->n_saved; i++) {
        const cg_node *node = row->saved[i].value->producer;
        if (strcmp(node->op->name, "embedding")) continue; /* it needs no other clone */
        for (int t = 0; t < row->step.plan->n_steps; t++)
            if (row->step.plan->steps[t] == node)
                ck_assert_double_eq(row->what_if[i].extra_us, row->m.node_us[t]);
    }
    ck_assert_double_eq(mem_row_us(row), row->m.step_us);
    free_rows(row, 1);
}
END_TEST

/* ---- sizes ---- */

START_TEST(sizes_beyond_the_machine) {
    json_t *row =
        one_row("mem --plan-only --values --seq 1048576 --batch 64 --set index_topk=512 --task recall "
                "--policy stream --json");
    const json_t *topk = find_saved(row, "indexer_topk", "layer1/attn/indexer");
    ck_assert_ptr_nonnull(topk);
    ck_assert_int_eq(number(topk, "bytes"), INT64_C(4) * 64 * 1048576 * 512);
    ck_assert_int_gt(number(row, "planned_peak_bytes"), INT64_C(1) << 37);
    json_decref(row);
    struct timespec start, end;
    clock_gettime(CLOCK_MONOTONIC, &start);
    json_t *root = good_json("mem --plan-only --dims flash --seqs 4096,8192,65536 --json");
    clock_gettime(CLOCK_MONOTONIC, &end);
    ck_assert_int_eq((int)json_array_size(root), 9);
    /* at most a second each, also where tests share a processor and run under sanitizers */
    ck_assert_double_lt((double)(end.tv_sec - start.tv_sec), 9);
    int64_t scores = INT64_C(4) * 65536 * 64 * 16384;
    ck_assert_int_gt(number(json_array_get(root, 6), "saved_bytes"), scores);
    ck_assert_int_lt(number(json_array_get(root, 8), "planned_peak_bytes"), scores / 4);
    json_decref(root);
    /* no plan: a value beyond what is counted; a plan that no memory holds */
    bad("mem --plan-only --dims pro --seqs 16777216", 2,
        "is larger than the limit of 1125899906842624 bytes for one value");
    outcome o =
        run_program("mem --runs 1 --policy save --seq 65536 --batch 16384 --set hidden_size=65536 --json "
                    "--set intermediate_size=262144 --set num_hidden_layers=2 --set compress_ratios=0,0");
    ck_assert_int_eq(o.code, 1);
    ck_assert_ptr_eq(strchr(o.err, '\n'), o.err + strlen(o.err) - 1);
    holds(o.err, "save at 65536 tokens: the step needs 10421446816599040 bytes, this machine has ");
    outcome_free(&o);
}
END_TEST

START_TEST(growth_is_fitted) {
    json_t *root =
        good_json("mem --plan-only --dims toy --part indexer-loss --seqs 512,1024,2048,4096,8192 --json");
    double exponent[3];
    for (int i = 0; i < 3; i++)
        exponent[i] = json_number_value(
            json_object_get(json_object_get(json_array_get(root, (size_t)i), "growth"), "extra_exponent"));
    printf("bytes beyond the boundary grow with the power %.3f, %.3f, %.3f (save, recompute, stream)\n",
           exponent[0], exponent[1], exponent[2]);
    ck_assert(exponent[0] > 1.95 && exponent[0] < 2.1);
    ck_assert(exponent[1] > 1.95 && exponent[1] < 2.1);
    ck_assert(exponent[2] > 0.8 && exponent[2] < 1.05);
    json_decref(root);
    char *text = good("mem --plan-only --dims toy --seqs 64,128 --policy stream");
    holds(text, "Growth with the length S");
    holds(text, "64 .. 128");
    free(text);
    json_t *row = one_row("mem --plan-only --dims toy --seqs 64 --policy stream --json");
    ck_assert(is_null(row, "growth"));
    json_decref(row);
    double of_format[2]; /* a format's growth is its own, beside another one's too */
    for (int both = 0; both < 2; both++) {
        root =
            good_json(both ? "mem --plan-only --dims toy --seqs 64,128 --policy save --dtypes f32,bf16 --json"
                           : "mem --plan-only --dims toy --seqs 64,128 --policy save --dtypes bf16 --json");
        of_format[both] = json_number_value(
            json_object_get(json_object_get(json_array_get(root, (size_t)both), "growth"), "peak_exponent"));
        json_decref(root);
    }
    ck_assert_double_eq(of_format[0], of_format[1]);
}
END_TEST

/* ---- budgets and curves ---- */

START_TEST(budgets_and_curves) {
#define ONE_LAYER "mem --dims toy --set compress_ratios=128 --seq 256 " /* few nodes: a search takes no time */
    json_t *root = good_json(ONE_LAYER "--policy stream --policy auto:6.5MiB --pareto --runs 1 --json");
    const json_t *stream = json_array_get(root, 0), *budget = json_array_get(root, 1);
    ck_assert_int_gt(number(stream, "planned_peak_bytes"), 13 << 19);
    ck_assert_int_le(number(budget, "planned_peak_bytes"), 13 << 19);
    ck_assert_int_eq(number(budget, "measured_peak_bytes"), number(budget, "planned_peak_bytes"));
    ck_assert_int_gt(number(budget, "recomputed_nodes"), 0);
    ck_assert(json_is_object(json_object_get(budget, "budget")));
    ck_assert(json_equal(json_object_get(stream, "loss"), json_object_get(budget, "loss")));
    ck_assert_ptr_null(json_object_get(budget, "pareto"));
    char stream_mib[32];
    snprintf(stream_mib, sizeof stream_mib, " %.3f ", (double)number(stream, "planned_peak_bytes") / (1 << 20));
    const json_t *points = json_object_get(json_object_get(stream, "pareto"), "points");
    ck_assert_int_gt((int)json_array_size(points), 3);
    for (size_t i = 0; i < json_array_size(points); i++) {
        const json_t *point = json_array_get(points, i);
        if (i == 0) ck_assert_int_eq(number(point, "peak_bytes"), number(stream, "planned_peak_bytes"));
        if (i)
            ck_assert_int_lt(number(point, "peak_bytes"), number(json_array_get(points, i - 1), "peak_bytes"));
    }
    json_decref(root);
    char *text = good(ONE_LAYER "--policy save --pareto --plan-only");
    holds(text, "Peak against time, from save at 256 tokens");
    free(text);
    /* a budget that nothing meets: the other rows stand, and the sentence says how small it could be */
    outcome o = run_program(ONE_LAYER "--plan-only --policy stream --policy auto:1KiB");
    ck_assert_int_eq(o.code, 2);
    holds(o.out, "auto:1KiB at 256 tokens is refused: ");
    holds(o.out, stream_mib);
    holds(o.err, "the smallest found is");
    ck_assert_ptr_eq(strchr(o.err, '\n'), o.err + strlen(o.err) - 1);
    outcome_free(&o);
    bad("mem --dims toy --plan-only --policy recompute --pareto", 2, "add --policy stream");
}
END_TEST

/* Only what is proven is said to be so. */
START_TEST(cheapest_sets) {
    mem_report report = {.rows = calloc(1, sizeof *report.rows), .n_rows = 1};
    mem_row *row = &report.rows[0];
    cg_config *config = &row->workload.config;
    cg_error error = {0};
    char path[128];
    *row = (mem_row){.dims = "toy", .seq = 256, .n_rows = 256};
    strcpy(row->policy, "auto:6.5MiB");
    ck_assert(cg_config_dims("toy", config) && cg_config_set(config, "compress_ratios", "128", &error) &&
              cg_config_set(config, "seq_len", "256", &error));
    strcpy(config->policy, row->policy);
    if (!mem_row_make(row, 0, &error)) ck_abort_msg("%s", error.text);
    cg_frontier *frontier = row->step.frontier;
    snprintf(path, sizeof path, "%s/printed", folder);
    for (int proven = 1; proven >= 0; proven--) {
        for (int i = 0; i < frontier->n_points; i++)
            frontier->points[i].least_us = frontier->points[i].trial.extra_us * (proven ? 1 : .5);
        ck_assert_ptr_nonnull(freopen(path, "w", stdout));
        mem_print(&report);
        fflush(stdout);
        char *text = slurp(path);
        holds(text, proven ? "; no set is cheaper\n" : "; no set takes less than +");
        free(text);
    }
    mem_report_free(&report);
}
END_TEST

/* ---- files ---- */

static int64_t file_bytes(const char *name) {
    char path[128];
    struct stat facts;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return stat(path, &facts) ? -1 : (int64_t)facts.st_size;
}

START_TEST(files_are_written) {
    free(good("mem --dims toy --seq 64 --plan-only --policy save --html \"it's.html\""));
    ck_assert_int_gt(file_bytes("it's.html"), 10000);
    char path[128];
    snprintf(path, sizeof path, "%s/it's.html", folder);
    char *page = slurp(path);
    holds(page, "--html 'it'\\\\''s.html'\""); /* the command as a shell takes it, in JSON */
    holds(page, "\"peak_change_bytes\":[");
    free(page);
    free(good("mem --dims toy --seq 64 --policy save --runs 1 --snapshot s.pickle --trace t.json"));
    ck_assert(file_bytes("s.pickle") > 1000 && file_bytes("t.json") > 1000);
    bad("mem --dims toy --plan-only --trace none.json", 2, "--trace shows one row, and this makes 3");
    bad("mem --dims toy --plan-only --policy save --seqs 32,64 --snapshot none", 2, "--snapshot shows one row");
    ck_assert(file_bytes("none.json") < 0 && file_bytes("none") < 0);
    outcome o = run_program("mem --dims toy --seq 64 --plan-only --policy save --html /proc/nowhere/page.html");
    ck_assert_int_eq(o.code, 2);
    holds(o.err, "/proc/nowhere/page.html");
    outcome_free(&o);
}
END_TEST

/* ---- bad options ---- */

START_TEST(bad_options) {
    static const struct {
        const char *arguments, *part;
    } list[] = {
        {"--dims flush", "unknown --dims \"flush\", did you mean flash?"},
        {"--part steps", "unknown --part \"steps\", did you mean step?"},
        {"--seqs 64,x", "--seqs: seq_len must be an integer"},
        {"--seqs ''", "--seqs: seq_len must be an integer"},
        {"--seqs 64,,128", "--seqs: seq_len must be an integer"},
        {"--seqs 1", "--seqs: seq_len must be an integer from 2"},
        {"--dtypes f16", "--dtypes: dtype must be one of f32, f64"},
        {"--dtypes f32,f32", "--dtypes names f32 twice"},
        {"--segments 8/4", "--segments: a physical length must be an integer from 8"},
        {"--segments 8/", "--segments: a physical length must be an integer from 8"},
        {"--segments -3", "--segments: a length must be an integer from 0"},
        {"--segments 1073741824,1", "--segments: more than 1073741824 rows together"},
        {"--segments 1", "--segments: all rows together: seq_len must be an integer from 2"},
        {"--segments 64 --seqs 64", "--seqs: the lengths of packed rows are those of --segments"},
        {"--runs 0", "--runs must be an integer from 1"},
        {"--plan-only --runs 3", "--runs: with --plan-only nothing runs"},
        {"--plan-only --verify-recompute", "--verify-recompute: with --plan-only nothing runs"},
        {"--dims toy --part indexer-loss --warm-up", "over the selected rows"},
        {"--dims toy --policy auto:12X", "got \"12X\""},
        {"--dims toy --policy save --policy ''", "policy must be"},
        {"--dims toy --seq 64 --plan-only --policy rms_norm@layer7", "no scope matches layer7"},
        {"--batch 65536 --seqs 16777216 --plan-only", "batch_size * seq_len must be at most"},
    };
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        char arguments[256];
        snprintf(arguments, sizeof arguments, "mem %s", list[i].arguments);
        bad(arguments, 2, list[i].part);
    }
}
END_TEST

START_TEST(remove_files) {
    char command[128];
    snprintf(command, sizeof command, "rm -r %s", folder);
    ck_assert_int_eq(system(command), 0);
}
END_TEST

int main(void) {
    if (!mkdtemp(folder)) return EXIT_FAILURE;
    const TTest *const tests[] = {a_measured_row,
                                  policies_side_by_side,
                                  packed_rows,
                                  values_add_up,
                                  counterfactuals_hold,
                                  counterfactuals_of_a_run,
                                  sizes_beyond_the_machine,
                                  growth_is_fitted,
                                  budgets_and_curves,
                                  cheapest_sets,
                                  files_are_written,
                                  bad_options,
                                  remove_files};
    return suite_run("tools_mem", tests, (int)(sizeof tests / sizeof *tests));
}
