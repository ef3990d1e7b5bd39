/* What the program says in words, against what it does: defaults in its help, and bytes for people. */
#include "tests/program.h"

#include <sys/stat.h>

/* ---- defaults ---- */

/* Options that set a key: their help has the key's own default. */
START_TEST(defaults_of_keys) {
    static const char *const keys[][2] = {{"batch", "batch_size"}, {"seq", "seq_len"},
                                          {"seed", "seed"},        {"steps", "steps"},
                                          {"task", "task"},        {"dtype", "dtype"},
                                          {"support", "support"},  {"indexer-warmup", "indexer_warmup"},
                                          {"teacher", "teacher"},  {"policy", "policy"}};
    json_t *config = good_json("config --json");
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        const json_t *value = json_object_get(config, keys[i][1]);
        char number[32], *said = default_of("train", keys[i][0]);
        snprintf(number, sizeof number, "%lld", (long long)json_integer_value(value));
        ck_assert_str_eq(said, json_is_string(value) ? json_string_value(value) : number);
        free(said);
    }
    json_decref(config);
}
END_TEST

/* Which file a command with `options` writes, or else what it prints. */
static char *result_of(const char *command, const char *options, const char *file, size_t *bytes) {
    char arguments[512], path[128];
    snprintf(arguments, sizeof arguments, "%s%s", command, options);
    char *text = good(arguments);
    *bytes = strlen(text);
    if (!file) return text;
    free(text);
    snprintf(path, sizeof path, "%s/%s", folder, file);
    FILE *stream = fopen(path, "rb");
    ck_assert_ptr_nonnull(stream);
    text = calloc(1, 1 << 22);
    *bytes = fread(text, 1, 1 << 22, stream);
    ck_assert(*bytes > 0 && *bytes < 1 << 22 && !fclose(stream));
    return text;
}

/* Given as the help states it, an option changes nothing; given as `other`, it does. */
static void expect_default(const char *command, const char *name, const char *option, const char *other,
                           const char *file) {
    char options[128], *said = default_of(name, option);
    size_t n[3];
    char *got[3] = {result_of(command, "", file, &n[0])};
    snprintf(options, sizeof options, " --%s %s", option, said);
    got[1] = result_of(command, options, file, &n[1]);
    snprintf(options, sizeof options, " --%s %s", option, other);
    got[2] = result_of(command, options, file, &n[2]);
    if (n[0] != n[1] || memcmp(got[0], got[1], n[0]))
        ck_abort_msg("csagrad %s: with the default that its help states, --%s %s, it does something else", name,
                     option, said);
    if (n[0] == n[2] && !memcmp(got[0], got[2], n[0]))
        ck_abort_msg("csagrad %s: --%s %s does what it does by default", name, option, other);
    for (int i = 0; i < 3; i++) free(got[i]);
    free(said);
}

START_TEST(defaults_of_options) {
    static const char dump[] = "dump --segments 16,16 --out dumped";
    expect_default(dump, "dump", "layout", "sbhd", "dumped");
    expect_default(dump, "dump", "index", "global", "dumped");
    expect_default(dump, "dump", "lse", "2", "dumped");
    free(good(dump));
    expect_default("check dumped", "check", "rows", "2", NULL);
    expect_default("info dumped", "info", "values", "3", NULL);
    expect_default("mem --dims toy --seq 32 --plan-only --json", "mem", "part", "indexer-loss", NULL);
    free(good("mem --device cpu --plan-only --dims toy --seq 32"));
    char *device = default_of("mem", "device");
    ck_assert_str_eq(device, "cpu");
    free(device);
}
END_TEST

/* Padding is 1 to 5 rows of each segment. */
START_TEST(padding_of_segments) {
    free(good("dump --seq 16 --batch 40 --set hidden_size=16 --padded --out padded"));
    json_t *root = good_json("info padded --values 41 --json"), *entry, *offsets[2] = {0};
    size_t i;
    json_array_foreach(json_object_get(root, "tensors"), i, entry) {
        const char *name = json_string_value(json_object_get(entry, "name"));
        for (int real = 0; real < 2; real++)
            if (!strcmp(name, real ? "in.cu_seqlens_q_real" : "in.cu_seqlens_q"))
                offsets[real] = json_object_get(entry, "values");
    }
    ck_assert(offsets[0] && offsets[1]);
    int64_t n[41][2];
    for (size_t b = 0; b <= 40; b++)
        for (int real = 0; real < 2; real++) n[b][real] = json_integer_value(json_array_get(offsets[real], b));
    for (size_t b = 0; b < 40; b++) {
        const int64_t padding = n[b + 1][0] - n[b][0] - (n[b + 1][1] - n[b][1]);
        ck_assert(padding >= 1 && padding <= 5);
    }
    json_decref(root);
}
END_TEST

/* ---- a small run ---- */

enum { TEXT_BYTES = 3000000 };

static char *train(void) {
    char path[128], line[16];
    snprintf(path, sizeof path, "%s/text", folder);
    FILE *file = fopen(path, "w");
    ck_assert_ptr_nonnull(file);
    for (int i = 0; i < TEXT_BYTES / 10; i++) {
        snprintf(line, sizeof line, "%09d\n", i);
        fputs(line, file);
    }
    ck_assert_int_eq(fclose(file), 0);
    return good("train --data text --steps 1 --seq 32 --batch 1 --policy recompute --set eval_batches=1 --set "
                "num_hidden_layers=2 --set compress_ratios=4,4 --set index_topk=2 --set hidden_size=32");
}

/* The first number behind a word. */
static double number_behind(const char *text, const char *word) {
    double x;
    const char *at = strstr(text, word);
    if (!at || sscanf(at + strlen(word), "%lf", &x) != 1) ck_abort_msg("no number behind \"%s\"", word);
    return x;
}

static void expect_mib(const char *what, double shown, double digits, int64_t bytes) {
    if (!(fabs(shown - (double)bytes / 1048576) <= 0.51 * digits) || bytes <= 0)
        ck_abort_msg("%s is shown as %g MiB, it has %lld bytes", what, shown, (long long)bytes);
}

START_TEST(a_run_in_mib) {
    char *text = train(), path[256], *out = default_of("train", "out");
    snprintf(path, sizeof path, "%s/%s/metrics.jsonl", folder, out); /* where the help says, too */
    char *log = slurp(path), *save = NULL;
    json_t *step = NULL;
    for (char *line = strtok_r(log, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        json_t *one = json_loads(line, 0, NULL);
        if (json_object_get(one, "workspace_bytes")) {
            json_decref(step);
            step = json_incref(one);
        }
        json_decref(one);
    }
    ck_assert_ptr_nonnull(step);
    expect_mib("planned", number_behind(text, "planned "), 0.01, number(step, "planned_peak_bytes"));
    expect_mib("measured", number_behind(text, ", measured "), 0.01, number(step, "measured_peak_bytes"));
    expect_mib("saved", number_behind(text, "kept for backward "), 0.01, number(step, "saved_bytes"));
    expect_mib("recomputed", number_behind(text, "computed again "), 0.01, number(step, "recomputed_bytes"));
    expect_mib("workspace", number_behind(text, "at most "), 0.01, number(step, "workspace_bytes"));
    /* the mean of both layers, at the start and in the end */
    double shown[2];
    const char *kl = strstr(text, "indexer KL, nats per row ");
    ck_assert(kl && sscanf(kl + strlen("indexer KL, nats per row "), "%lf %lf", &shown[0], &shown[1]) == 2);
    for (int end = 0; end < 2; end++) {
        const json_t *layers = json_object_get(end ? step : json_object_get(step, "start"), "indexers");
        ck_assert_uint_eq(json_array_size(layers), 2);
        const double mean =
            (real_of(json_array_get(layers, 0), "kl") + real_of(json_array_get(layers, 1), "kl")) / 2;
        ck_assert(mean > 0.01 && fabs(shown[end] - mean) <= 0.51e-4);
    }
    /* a sixteenth is held out, in blocks of 4096 bytes */
    const int64_t held_out = (TEXT_BYTES / 16 + 4095) / 4096 * 4096;
    expect_mib("training", number_behind(text, "documents, "), 0.1, TEXT_BYTES - held_out);
    expect_mib("held out", number_behind(text, "MiB for training, "), 0.1, held_out);
    json_decref(step);
    free(log);
    free(out);
    free(text);
}
END_TEST

START_TEST(tables_of_memory_in_mib) {
    static const char command[] = "mem --dims toy --seq 128 --policy recompute --plan-only --values";
    char *text = good(command), arguments[128];
    snprintf(arguments, sizeof arguments, "%s --json", command);
    json_t *list = good_json(arguments), *row = json_array_get(list, 0);
    double planned, saved, in_indexers, recomputed, workspace;
    const char *line = strstr(text, "\nrecompute ");
    ck_assert_ptr_nonnull(line);
    ck_assert_int_eq(sscanf(line, " recompute 128 f32 %lf - - %lf %lf %lf %lf", &planned, &saved, &in_indexers,
                            &recomputed, &workspace),
                     5);
    expect_mib("planned", planned, 0.001, number(row, "planned_peak_bytes"));
    expect_mib("saved", saved, 0.001, number(row, "saved_bytes"));
    expect_mib("in indexers", in_indexers, 0.001, number(row, "saved_in_indexers_bytes"));
    expect_mib("recomputed", recomputed, 0.001, number(row, "recomputed_bytes"));
    expect_mib("workspace", workspace, 0.001, number(row, "workspace_bytes"));
    expect_mib("the peak", number_behind(text, "\nplanned peak "), 0.001, number(row, "planned_peak_bytes"));
    expect_mib("the floor", number_behind(text, "can be below "), 0.001, number(row, "floor_bytes"));
    const json_t *parts = json_object_get(row, "peak_categories");
    expect_mib("parameters", number_behind(text, "\nparameter "), 0.001, number(parts, "parameter"));
    expect_mib("optimizer", number_behind(text, "\noptimizer "), 0.001, number(parts, "optimizer"));
    json_decref(list);
    free(text);
}
END_TEST

int main(void) {
    const TTest *const tests[] = {defaults_of_keys, defaults_of_options, padding_of_segments, a_run_in_mib,
                                  tables_of_memory_in_mib};
    return suite_run_in_folder("tools_words", tests, (int)(sizeof tests / sizeof *tests));
}
