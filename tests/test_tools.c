/* The program from outside: help, good runs, bad options, exit codes, one sentence per failure, JSON. */
#include "tests/support.h"

#include <jansson.h>
#include <sys/wait.h>
#include <unistd.h>

static char folder[] = "/tmp/csagrad_tools_XXXXXX";

typedef struct outcome {
    int code;
    char *out, *err;
} outcome;

static char *slurp(const char *path) {
    FILE *file = fopen(path, "r");
    ck_assert_ptr_nonnull(file);
    size_t bytes = 0, room = 1 << 16, got;
    char *text = malloc(room);
    while ((got = fread(text + bytes, 1, room - bytes - 1, file)) > 0)
        if ((bytes += got) == room - 1) text = realloc(text, room *= 2);
    fclose(file);
    text[bytes] = 0;
    return text;
}

/* Run the program with arguments for a shell. */
static outcome run_program(const char *arguments) {
    char command[2048], out[128], err[128];
    snprintf(out, sizeof out, "%s/out", folder);
    snprintf(err, sizeof err, "%s/err", folder);
    ck_assert_int_lt(snprintf(command, sizeof command, "cd %s && '%s' >%s 2>%s %s", folder, CSAGRAD_PROGRAM,
                              out, err, arguments),
                     (int)sizeof command);
    int status = system(command);
    ck_assert(WIFEXITED(status));
    return (outcome){WEXITSTATUS(status), slurp(out), slurp(err)};
}

static void outcome_free(outcome *o) {
    free(o->out);
    free(o->err);
}

/* Exit code 0 and nothing on stderr. The text of stdout is the caller's. */
static char *good(const char *arguments) {
    outcome o = run_program(arguments);
    if (o.code != 0 || o.err[0]) ck_abort_msg("csagrad %s: exit code %d: %s", arguments, o.code, o.err);
    ck_assert(o.out[0]);
    free(o.err);
    return o.out;
}

static json_t *good_json(const char *arguments) {
    char *text = good(arguments);
    json_error_t error;
    json_t *root = json_loads(text, JSON_REJECT_DUPLICATES, &error);
    if (!root) ck_abort_msg("csagrad %s: line %d is no JSON: %s", arguments, error.line, error.text);
    free(text);
    return root;
}

/* The exit code, and one sentence that starts with the program's name and holds a part. */
static void bad(const char *arguments, int code, const char *part) {
    outcome o = run_program(arguments);
    const char *end = strchr(o.err, '\n');
    bool one_line = end && end[1] == 0 && !strncmp(o.err, "csagrad", 7);
    if (o.code != code || !one_line || !strstr(o.err, part))
        ck_abort_msg("csagrad %s: exit code %d, expected %d and one line with \"%s\", got: %s", arguments,
                     o.code, code, part, o.err);
    ck_assert_str_eq(o.out, "");
    outcome_free(&o);
}

static void holds(const char *text, const char *part) {
    if (!strstr(text, part)) ck_abort_msg("\"%s\" is not in: %s", part, text);
}

START_TEST(help_and_version) {
    static const char *const commands[] = {"train", "plan", "gradcheck", "ops", "config"};
    char *text = good("--help");
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++) {
        holds(text, commands[i]);
        char arguments[64];
        snprintf(arguments, sizeof arguments, "%s --help", commands[i]);
        char *own = good(arguments);
        snprintf(arguments, sizeof arguments, "csagrad %s", commands[i]);
        holds(own, arguments);
        holds(own, "Output:");
        holds(own, "--json");
        free(own);
    }
    free(text);
    text = good("plan --help");
    static const char *const parts[] = {"Input:", "Model:", "Policy:", "--seq=TOKENS", "default: 512", "bytes"};
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) holds(text, parts[i]);
    free(text);
    text = good("--version");
    holds(text, "csagrad ");
    free(text);
}
END_TEST

START_TEST(bad_command_lines) {
    bad("", 2, "a command is needed");
    bad("trian", 2, "unknown command \"trian\", did you mean train?");
    bad("zzzzzzzzzz", 2, "see csagrad --help");
    bad("--hlep", 2, "unknown option \"--hlep\"");
    static const char *const commands[] = {"train", "plan", "gradcheck", "ops", "config"};
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++) {
        char arguments[64];
        snprintf(arguments, sizeof arguments, "%s --jsn", commands[i]);
        bad(arguments, 2, "unknown option --jsn, did you mean --json?");
        snprintf(arguments, sizeof arguments, "%s --json=3", commands[i]);
        bad(arguments, 2, "--json takes no value");
        snprintf(arguments, sizeof arguments, "%s stray", commands[i]);
        bad(arguments, 2, "\"stray\"");
        snprintf(arguments, sizeof arguments, "%s -q", commands[i]);
        bad(arguments, 2, "unknown option -q");
    }
}
END_TEST

START_TEST(bad_model_options) {
    static const struct {
        const char *arguments, *part;
    } list[] = {
        {"--seq 3.5", "--seq: seq_len must be an integer"},
        {"--seq ''", "--seq: seq_len must be an integer"},
        {"--seq 1", "--seq: seq_len must be an integer from 2"},
        {"--seq", "--seq needs a value"},
        {"--batch 0x10", "--batch: batch_size must be"},
        {"--seed -1", "--seed: seed must be"},
        {"--teacher none", "--teacher: teacher must be one of full, sink, compressed"},
        {"--support all", "--support: support must be one of sparse, dense"},
        {"--task recal", "--task: task must be one of text, recall"},
        {"--policy ''", "--policy: policy must be"},
        {"--threads 0", "--threads must be an integer from 1 to"},
        {"--threads two", "--threads must be an integer from 1 to"},
        {"--set seq_len", "--set needs KEY=VALUE"},
        {"--set seq_lem=4", "--set: unknown key \"seq_lem\", did you mean seq_len?"},
        {"--set indexer_loss_coeff=false", "indexer_loss_coeff must be a number"},
        {"--set qk_rope_head_dim=7", "qk_rope_head_dim must be even"},
        {"--config no_such_file.json", "--config: "},
        {"--se 4", "--se may be"},
    };
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        char arguments[256];
        snprintf(arguments, sizeof arguments, "%s %s", i % 2 ? "plan" : "config", list[i].arguments);
        bad(arguments, 2, list[i].part);
    }
    bad("plan --policy no_such_op", 2, "no_such_op");
    bad("plan --policy recompute=indexer_topk", 2, "indexer_topk");
    bad("plan --data no_such_folder", 2, "--data: ");
    bad("train --steps 0", 2, "--steps: steps must be");
}
END_TEST

START_TEST(config_prints_a_file_that_gives_itself) {
    char *keys = good("config");
    holds(keys, "seq_len = 512");
    free(keys);
    char *first = good("config --json --seq 64 --set index_topk=3 --seq 96 --steps 7");
    char path[128];
    snprintf(path, sizeof path, "%s/config.json", folder);
    FILE *file = fopen(path, "w");
    ck_assert(file && fputs(first, file) >= 0 && fclose(file) == 0);
    json_t *root = json_loads(first, 0, NULL);
    ck_assert_ptr_nonnull(root);
    ck_assert_int_eq(json_integer_value(json_object_get(root, "seq_len")), 96); /* the last one counts */
    ck_assert_int_eq(json_integer_value(json_object_get(root, "index_topk")), 3);
    ck_assert_int_eq(json_integer_value(json_object_get(root, "steps")), 7);
    json_decref(root);
    char *second = good("config --json --config config.json");
    ck_assert_str_eq(first, second);
    free(second);
    second =
        good("config --seed 9 --config config.json --json"); /* options override the file wherever they stand */
    holds(second, "\"seed\": 9");
    holds(second, "\"seq_len\": 96");
    free(second);
    free(first);
}
END_TEST

START_TEST(output_that_cannot_be_written) {
    outcome o = run_program("config --json >/dev/full");
    ck_assert_int_eq(o.code, 1);
    holds(o.err, "csagrad config: the output could not be written");
    outcome_free(&o);
}
END_TEST

START_TEST(ops_list) {
    char *text = good("ops");
    holds(text, "csa_attention");
    holds(text, "never: it chooses");
    free(text);
    json_t *root = good_json("ops --json"), *list = json_object_get(root, "ops");
    ck_assert_int_eq((int)json_array_size(list), cg_all_ops.n);
    bool seen = false;
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *op = json_array_get(list, i);
        bool differentiable = json_array_size(json_object_get(op, "differentiable")) > 0;
        ck_assert(differentiable == json_is_null(json_object_get(op, "no_gradient")));
        ck_assert(json_is_string(json_object_get(op, "doc")) && json_is_string(json_object_get(op, "replay")));
        if (strcmp(json_string_value(json_object_get(op, "op")), "indexer_scores_at")) continue;
        seen = true;
        static const char *const saved[] = {"q", "w", "k", "topk"};
        ck_assert_int_eq((int)json_array_size(json_object_get(op, "saves")), 4);
        for (size_t k = 0; k < 4; k++)
            ck_assert_str_eq(json_string_value(json_array_get(json_object_get(op, "saves"), k)), saved[k]);
    }
    ck_assert(seen);
    json_decref(root);
}
END_TEST

START_TEST(gradcheck_of_one_op) {
    char *text = good("gradcheck --op rms_norm");
    holds(text, "every gradient checked is right");
    free(text);
    json_t *root = good_json("gradcheck --op rms_norm --json");
    const json_t *op = json_array_get(json_object_get(root, "ops"), 0);
    ck_assert(json_is_true(json_object_get(root, "ok")));
    ck_assert_int_eq((int)json_array_size(json_object_get(root, "ops")), 1);
    ck_assert_str_eq(json_string_value(json_object_get(op, "op")), "rms_norm");
    ck_assert_int_gt((int)json_integer_value(json_object_get(op, "cases")), 0);
    ck_assert_double_lt(json_number_value(json_object_get(op, "worst_rel")), 1e-6);
    ck_assert(json_is_true(json_object_get(op, "ok")));
    json_decref(root);
    bad("gradcheck --op rms_nrom", 2, "--op: unknown op \"rms_nrom\", did you mean rms_norm?");
    bad("gradcheck --op", 2, "--op needs a value");
    outcome o = run_program("gradcheck --op argmax"); /* has no gradient: checking nothing is no pass */
    ck_assert_int_eq(o.code, 1);
    holds(o.out, "nothing was compared");
    outcome_free(&o);
}
END_TEST

static const json_t *find_saved(const json_t *root, const char *op, const char *scope) {
    const json_t *list = json_object_get(root, "saved");
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *value = json_array_get(list, i);
        if (!strcmp(json_string_value(json_object_get(value, "op")), op) &&
            !strcmp(json_string_value(json_object_get(value, "scope")), scope))
            return value;
    }
    return NULL;
}

static int64_t number(const json_t *object, const char *key) {
    const json_t *value = json_object_get(object, key);
    if (!json_is_integer(value)) ck_abort_msg("%s is no integer", key);
    return json_integer_value(value);
}

/* The saved scores are what the policies differ in: one copy per CSA layer and head, in f32. */
START_TEST(plan_compares_policies) {
    json_t *root = good_json("plan --seq 256 --batch 2 --set compress_ratios=0,4,128,4 --compare --json");
    ck_assert_int_eq((int)json_array_size(root), 3);
    int64_t saved[3], peak[3], clones[3];
    static const char *const names[3] = {"save", "recompute", "stream"};
    for (size_t i = 0; i < 3; i++) {
        const json_t *line = json_array_get(root, i);
        ck_assert_str_eq(json_string_value(json_object_get(line, "policy")), names[i]);
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
    root = good_json("plan --compare --json --policy stream+rms_norm");
    ck_assert_int_eq((int)json_array_size(root), 4);
    json_decref(root);
    free(good("plan --compare"));
    /* without an indexer there is nothing to recompute, which is no mistake */
    root = good_json("plan --policy recompute --set compress_ratios=0,0,128,0 --json");
    ck_assert_int_eq(number(root, "recomputed_nodes"), 0);
    json_decref(root);
}
END_TEST

START_TEST(plan_adds_up) {
    char *text = good("plan --seq 64 --batch 2 --task recall --policy save");
    holds(text, "csagrad plan: task=recall seq_len=64 batch_size=2 seed=1");
    holds(text, "planned peak");
    free(text);
    json_t *root = good_json("plan --seq 64 --batch 2 --policy save --json");
    const json_t *list = json_object_get(root, "saved"), *categories = json_object_get(root, "peak_categories");
    ck_assert_int_gt((int)json_array_size(list), 20);
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *value = json_array_get(list, i), *shape = json_object_get(value, "shape"),
                     *readers = json_object_get(value, "readers");
        int64_t bytes = 4; /* f32 and i32 */
        for (size_t d = 0; d < json_array_size(shape); d++)
            bytes *= json_integer_value(json_array_get(shape, d));
        ck_assert_int_eq(number(value, "bytes"), bytes);
        ck_assert_int_gt((int)json_array_size(readers), 0);
        for (size_t r = 0; r < json_array_size(readers); r++) {
            const json_t *reader = json_array_get(readers, r);
            int64_t step = number(reader, "step");
            ck_assert_int_gt(step, number(value, "first_step"));
            ck_assert_int_le(step, number(value, "last_step"));
            ck_assert_str_ne(json_string_value(json_object_get(reader, "pass")), "forward");
            ck_assert(json_is_string(json_object_get(reader, "op")) &&
                      json_is_string(json_object_get(reader, "scope")));
        }
    }
    int64_t together = 0;
    const char *name;
    json_t *bytes;
    json_object_foreach((json_t *)categories, name, bytes) together += json_integer_value(bytes);
    ck_assert_int_eq(together, number(root, "floor_bytes"));
    ck_assert_int_ge(number(root, "planned_peak_bytes"), together);
    /* spelled out, the per-head scores [T, Hi, C] are values that backward reads; streamed, there are none */
    const json_t *scores = find_saved(root, "relu", "layer1/attn/indexer");
    ck_assert_ptr_nonnull(scores);
    ck_assert_int_eq(number(scores, "bytes"), 4 * 128 * 8 * 32);
    int64_t saved_peak = number(root, "planned_peak_bytes");
    json_decref(root);
    root = good_json("plan --seq 64 --batch 2 --policy stream --json");
    ck_assert_ptr_null(find_saved(root, "relu", "layer1/attn/indexer"));
    ck_assert_int_lt(number(root, "planned_peak_bytes"), saved_peak);
    ck_assert_int_eq(number(root, "recomputed_nodes"), 0);
    json_decref(root);
    root = good_json("plan --seq 64 --batch 2 --policy recompute --json --no-optimizer");
    ck_assert_int_gt(number(root, "recomputed_nodes"), 0);
    ck_assert_int_eq(number(json_object_get(root, "peak_categories"), "optimizer"), 0);
    json_decref(root);
}
END_TEST

/* Sizes that no machine has, exact to the byte. */
START_TEST(plan_of_a_size_beyond_the_machine) {
    json_t *root = good_json("plan --seq 1048576 --batch 64 --set index_topk=512 --task recall --json");
    const json_t *topk = find_saved(root, "indexer_topk", "layer1/attn/indexer");
    ck_assert_ptr_nonnull(topk);
    ck_assert_int_eq(number(topk, "bytes"), INT64_C(4) * 64 * 1048576 * 512);
    ck_assert_int_gt(number(root, "planned_peak_bytes"), INT64_C(1) << 37);
    json_decref(root);
}
END_TEST

START_TEST(train_two_steps) {
    char *text = good("train --steps 2 --seq 32 --batch 2 --seed 3 --threads 1 --set eval_batches=1 --out run");
    free(text);
    char path[128];
    snprintf(path, sizeof path, "%s/run/metrics.jsonl", folder);
    text = slurp(path);
    int n_lines = 0;
    int64_t planned = 0;
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n"), n_lines++) {
        json_t *object = json_loads(line, JSON_REJECT_DUPLICATES, NULL);
        if (!json_is_object(object)) ck_abort_msg("no JSON object: %s", line);
        if (json_object_get(object, "step") && json_object_get(object, "lm_loss")) {
            planned = number(object, "planned_peak_bytes");
            ck_assert_int_eq(number(object, "measured_peak_bytes"), planned);
        }
        json_decref(object);
    }
    json_t *root =
        good_json("plan --seq 32 --batch 2 --seed 3 --json"); /* plan speaks of the very step that ran */
    ck_assert_int_eq(number(root, "planned_peak_bytes"), planned);
    json_decref(root);
    ck_assert_int_ge(n_lines, 3);
    free(text);
    bad("train --steps 2 --out /proc/nowhere", 2, "/proc/nowhere");
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
    const TTest *const tests[] = {help_and_version,
                                  bad_command_lines,
                                  bad_model_options,
                                  config_prints_a_file_that_gives_itself,
                                  output_that_cannot_be_written,
                                  ops_list,
                                  gradcheck_of_one_op,
                                  plan_compares_policies,
                                  plan_adds_up,
                                  plan_of_a_size_beyond_the_machine,
                                  train_two_steps,
                                  remove_files};
    return suite_run("tools", tests, (int)(sizeof tests / sizeof *tests));
}
