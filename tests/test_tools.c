/* The program from outside: help, good runs, bad options, exit codes, one sentence per failure, JSON. */
#include "tests/program.h"

#include <signal.h>
#include <time.h>

#include "core/base/isa.h"
#include "models/dsv4/config.h"

START_TEST(help_and_version) {
    static const char *const commands[] = {"train", "mem", "gradcheck", "ops", "config"};
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
    text = good("mem --help");
    static const char *const parts[] = {"Input:", "Model:", "Policy:", "--seq=TOKENS", "default: 512", "bytes"};
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) holds(text, parts[i]);
    free(text);
    text = good("--version");
    holds(text, "csagrad ");
    free(text);
}
END_TEST

/* csagrad info says so. */
START_TEST(runs_on_the_path_that_is_asked_for) {
    int n = 0;
    for (int isa = 0; isa < CG_ISAS; isa++) {
        setenv("CSAGRAD_ISA", cg_isa_name((cg_isa)isa), 1);
        if (!cg_isa_exists((cg_isa)isa)) {
            bad("ops", 2, "which this processor or build lacks");
            continue;
        }
        json_t *root = good_json("info --json");
        ck_assert_str_eq(json_string_value(json_object_get(root, "isa")), cg_isa_name((cg_isa)isa));
        const json_t *list = json_object_get(root, "isas");
        const size_t place = json_array_size(list) - 1 - (size_t)n++; /* the widest first */
        ck_assert_str_eq(json_string_value(json_array_get(list, place)), cg_isa_name((cg_isa)isa));
        json_decref(root);
    }
    setenv("CSAGRAD_ISA", "avx513", 1);
    bad("ops", 2, "CSAGRAD_ISA is \"avx513\", expected avx512, avx2 or portable, did you mean avx512?");
    setenv("CSAGRAD_ISA", "\n", 1);
    bad("--help", 2, "CSAGRAD_ISA is \"\\x0a\"");
    setenv("CSAGRAD_ISA", "", 1); /* as if unset */
    char *text = good("info");
    holds(text, "kernels: ");
    holds(text, "portable; CSAGRAD_ISA chooses");
    free(text);
}
END_TEST

START_TEST(bad_command_lines) {
    bad("", 2, "a command is needed");
    bad("trian", 2, "unknown command \"trian\", did you mean train?");
    bad("zzzzzzzzzz", 2, "see csagrad --help");
    bad("--hlep", 2, "unknown option \"--hlep\"");
    static const char *const commands[] = {"train", "mem", "gradcheck", "ops", "config"};
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
        {"--threads 2x", "--threads must be an integer from 1 to"},
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
        snprintf(arguments, sizeof arguments, "%s %s", i % 2 ? "mem" : "config", list[i].arguments);
        bad(arguments, 2, list[i].part);
    }
    bad("mem --plan-only --policy no_such_op", 2, "no_such_op");
    bad("mem --plan-only --policy recompute=indexer_topk", 2, "indexer_topk");
    bad("mem --plan-only --data no_such_folder", 2, "--data: ");
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
    cg_config recall = cg_config_default(CG_TASK_RECALL); /* the defaults are those of the task */
    char *second = good("config --json --task recall"), *expected = cg_config_json(&recall);
    ck_assert_str_eq(second, expected);
    free(expected);
    free(second);
    second = good("config --json --config config.json");
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

/* Before the work, not behind it: an hour would be lost. */
START_TEST(outputs_are_checked_first) {
    bad("mem --plan-only --seqs 64 --html absent/page.html", 2, "--html: cannot write absent/page.html");
    bad("mem --plan-only --seqs 64 --policy save --trace absent/t", 2, "--trace: cannot write absent/t");
    bad("mem --plan-only --seqs 64 --policy save --snapshot /", 2,
        "--snapshot: cannot write /: it is a folder");
    bad("dump --out 'absent\nf/d.safetensors'", 2, "--out: cannot write absent\\x0af/d.safetensors");
    bad("train --data /absent --out /dev/null/run", 2, "cannot make the folder /dev/null/run");
    char name[300]; /* a path too long leaves room for the reason */
    memset(name, 'x', 299);
    name[299] = 0;
    char arguments[400];
    snprintf(arguments, sizeof arguments, "train --data /absent/%s", name);
    bad(arguments, 2, "No such file or directory");
    snprintf(arguments, sizeof arguments, "train --data %s", name);
    bad(arguments, 2, "File name too long");
}
END_TEST

/* Commands that have nothing to save end at once. */
START_TEST(signals_end_commands) {
    static char *const commands[] = {"bench", "gradcheck", "mem", "mem", "gradcheck"};
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP, SIGHUP, SIGSEGV};
#ifdef __SANITIZE_ADDRESS__
    const int n = 4; /* which catches faults itself */
#else
    const int n = 5;
#endif
    for (int i = 0; i < n; i++) {
        const bool ignored = i == 3; /* as nohup starts it */
        pid_t child = fork();
        ck_assert_int_ge(child, 0);
        if (!child) {
            signal(signals[i], ignored ? SIG_IGN : SIG_DFL);
            if (!freopen("/dev/null", "w", stdout) || chdir(folder)) _exit(127);
            execl(CSAGRAD_PROGRAM, "csagrad", commands[i], (char *)NULL);
            _exit(127);
        }
        nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
        kill(child, signals[i]);
        int status;
        if (signals[i] == SIGSEGV) { /* the first one is held against the faults of oneDNN */
            nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
            kill(child, SIGSEGV);
        }
        if (ignored) {
            nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
            ck_assert_int_eq(waitpid(child, &status, WNOHANG), 0);
            kill(child, SIGKILL);
            waitpid(child, &status, 0);
            continue;
        }
        ck_assert_int_eq(waitpid(child, &status, 0), child);
        ck_assert_msg(WIFSIGNALED(status) && WTERMSIG(status) == signals[i], "%s: status %x", commands[i],
                      (unsigned)status);
    }
}
END_TEST

START_TEST(ops_list) {
    char *text = good("ops");
    holds(text, "csa_attention");
    holds(text, "never: it chooses");
    ck_assert_ptr_null(strstr(text, " \n")); /* no blanks behind the last column */
    free(text);
    json_t *root = good_json("ops --json"), *list = json_object_get(root, "ops");
    ck_assert_int_eq((int)json_array_size(list), cg_all_ops.n);
    int n_seen = 0;
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *op = json_array_get(list, i);
        bool differentiable = json_array_size(json_object_get(op, "differentiable")) > 0;
        ck_assert(differentiable == json_is_null(json_object_get(op, "no_gradient")));
        ck_assert(json_is_string(json_object_get(op, "doc")) && json_is_string(json_object_get(op, "replay")));
        static const char *const saved[][6] = {
            {"indexer_scores_at", "q", "w", "k", "topk"},
            {"cross_entropy", "logits", "targets", "lse"}, /* one is an output */
            {"gather", "index"}};
        for (int s = 0; s < 3; s++) {
            if (strcmp(json_string_value(json_object_get(op, "op")), saved[s][0])) continue;
            n_seen++;
            size_t n = 0;
            for (; saved[s][n + 1]; n++)
                ck_assert_str_eq(json_string_value(json_array_get(json_object_get(op, "saves"), n)),
                                 saved[s][n + 1]);
            ck_assert_int_eq((int)json_array_size(json_object_get(op, "saves")), (int)n);
        }
    }
    ck_assert_int_eq(n_seen, 3);
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

START_TEST(train_two_steps) {
    char *text = good("train --steps 2 --seq 32 --batch 2 --seed 3 --threads 1 --set eval_batches=1 --out run");
    free(text);
    char path[128];
    snprintf(path, sizeof path, "%s/run/metrics.jsonl", folder);
    text = slurp(path);
    int n_lines = 0;
    static const char *const figures[] = {"planned_peak_bytes", "saved_bytes", "recomputed_bytes",
                                          "workspace_bytes"};
    int64_t planned = 0, at_the_end[4] = {0};
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n"), n_lines++) {
        json_t *object = json_loads(line, JSON_REJECT_DUPLICATES, NULL);
        if (!json_is_object(object)) ck_abort_msg("no JSON object: %s", line);
        if (json_object_get(object, "step") && json_object_get(object, "lm_loss")) {
            planned = number(object, "planned_peak_bytes");
            ck_assert_int_eq(number(object, "measured_peak_bytes"), planned);
        }
        for (int i = 0; i < 4 && json_object_get(object, "final"); i++)
            at_the_end[i] = number(object, figures[i]);
        json_decref(object);
    }
    /* mem speaks of the very step that ran */
    json_t *root = good_json("mem --plan-only --seq 32 --batch 2 --seed 3 --policy stream --json");
    ck_assert_int_eq(at_the_end[0], planned);
    for (int i = 0; i < 4; i++) ck_assert_int_eq(number(json_array_get(root, 0), figures[i]), at_the_end[i]);
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
                                  runs_on_the_path_that_is_asked_for,
                                  bad_command_lines,
                                  bad_model_options,
                                  config_prints_a_file_that_gives_itself,
                                  outputs_are_checked_first,
                                  signals_end_commands,
                                  ops_list,
                                  gradcheck_of_one_op,
                                  train_two_steps,
                                  remove_files};
    return suite_run("tools", tests, (int)(sizeof tests / sizeof *tests));
}
