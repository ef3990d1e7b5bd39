/* The program in surroundings that refuse or deceive, every command in turn: output that cannot be written, words with
 * control characters, paths too long to be shown. */
#include "tests/program.h"

#include <ctype.h>
#include <sys/stat.h>

/* Small work of each command; in the place of $ a number that makes it another folder. */
static const char *const works[] = {
    "train --data text --steps 1 --seq 16 --batch 1 --out run$",
    "mem --dims toy --seqs 64 --policy stream --plan-only",
    "mem --dims toy --seqs 64 --policy stream --plan-only --values",
    "mem --dims toy --seqs 64 --policy stream --runs 1",
    "gradcheck --op scale",
    "check data.safetensors",
    "check --row row.json",
    "dump --seq 16 --batch 1 --out out.safetensors",
    "ops",
    "info",
    "info data.safetensors",
    "config",
    "bench --seqs 64 --runs 1 --parts indexer-loss",
};

enum { N_WORKS = sizeof works / sizeof works[0] };

static void expect_a_line(const outcome *o, const char *what, int code, const char *part) {
    const char *end = strchr(o->err, '\n');
    if (o->code != code || !end || end[1] || strncmp(o->err, "csagrad", 7) || !strstr(o->err, part))
        ck_abort_msg("%s: exit code %d, expected %d and one line with \"%s\", got: %s", what, o->code, code,
                     part, o->err);
}

/* No byte below a space but the ends of lines, none of UTF-8's second set of control characters. */
static void expect_no_control(const char *text, const char *what) {
    for (const unsigned char *c = (const unsigned char *)text; *c; c++)
        if ((*c < ' ' && *c != '\n') || *c == 0x7f || (*c == 0xc2 && c[1] < 0xa0))
            ck_abort_msg("%s: a control character, %#x, in: %s", what, *c, text);
}

START_TEST(output_that_cannot_be_written) {
    for (int json = 0; json < 2; json++) {
#ifdef __SANITIZE_ADDRESS__
        if (_i == N_WORKS - 1) return; /* bench measures the machine first: seconds */
#endif
        if (_i == N_WORKS - 1 && !json) continue;
        char arguments[256], command[32];
        const char *folder_of_run = strchr(works[_i], '$');
        int length = folder_of_run ? (int)(folder_of_run - works[_i]) : (int)strlen(works[_i]);
        snprintf(arguments, sizeof arguments, "%.*s%s%s >/dev/full", length, works[_i],
                 folder_of_run ? json ? "1" : "0" : "", json ? " --json" : "");
        snprintf(command, sizeof command, "csagrad %.*s", (int)strcspn(works[_i], " "), works[_i]);
        outcome o = run_program(arguments);
        expect_a_line(&o, arguments, 1, ": the output could not be written");
        if (strncmp(o.err, command, strlen(command))) ck_abort_msg("%s: %s", arguments, o.err);
        if (strstr(o.err, "Success")) ck_abort_msg("%s: %s", arguments, o.err);
        outcome_free(&o);
    }
}
END_TEST

START_TEST(texts_of_the_program_that_cannot_be_written) {
    static const char *const words[] = {
        "--help", "--version", "-V", "train --help", "check --row --help", "ops --usage", "info --version"};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        char arguments[64];
        snprintf(arguments, sizeof arguments, "%s >/dev/full", words[i]);
        outcome o = run_program(arguments);
        expect_a_line(&o, arguments, 1, "the output could not be written");
        outcome_free(&o);
    }
}
END_TEST

/* $1: a word of a shell with an escape sequence, a new line, a C1 character of UTF-8 and a byte that is no UTF-8. */
#define EVIL "$(printf 'a\\033[2J\\nb\\302\\205\\377')"

/* Options by name: most commands share those of the configuration, which one parser reads. */
static bool is_new(const char *name, size_t length) {
    static char seen[4096];
    char word[64];
    snprintf(word, sizeof word, " %.*s ", (int)length, name);
    if (strstr(seen, word)) return strstr(" --config --dims --layout ", word) != NULL; /* two readers */
    strcat(seen, word);
    return true;
}

/* Options that take a value, as --help lists them, and an argument besides. */
START_TEST(control_characters_are_escaped) {
    static const char *const commands[] = {"train --data text --steps 1 --seq 16 --batch 1",
                                           "mem --dims toy --seqs 64 --policy stream --plan-only",
                                           "gradcheck --op scale",
                                           "check data.safetensors",
                                           "check --row row.json",
                                           "dump --seq 16 --batch 1 --out evil.safetensors",
                                           "ops",
                                           "info data.safetensors",
                                           "config",
                                           "bench --parts none"};
    int n = 0;
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
        const char *work = commands[i];
        char arguments[512];
        snprintf(arguments, sizeof arguments, "%.*s --help",
                 (int)strcspn(work, " ") + (strstr(work, "--row") ? 6 : 0), work);
        char *help = good(arguments);
        for (char *at = help; (at = strstr(at, "  --")); at += 2) {
            const char *name = at + 2;
            size_t length = 2;
            while (islower((unsigned char)name[length]) || name[length] == '-') length++;
            if (name[length] != '=' || !is_new(name, length)) continue;
            snprintf(arguments, sizeof arguments, "%s %.*s=\"" EVIL "\"", work, (int)length, name);
            outcome o = run_program(arguments);
            if (o.code) expect_a_line(&o, arguments, 2, "csagrad ");
            expect_no_control(o.err, arguments);
            expect_no_control(o.out, arguments);
            outcome_free(&o);
            n++;
        }
        free(help);
        snprintf(arguments, sizeof arguments, "%s \"" EVIL "\"", work);
        outcome o = run_program(arguments);
        expect_a_line(&o, arguments, 2, "\\x");
        expect_no_control(o.err, arguments);
        outcome_free(&o);
    }
    ck_assert_int_gt(n, 50);
}
END_TEST

START_TEST(names_in_a_file_are_escaped) {
    char path[128];
    const char header[] =
        "{\"a\\u001b[2J\\u0085\": {\"dtype\": \"F32\", \"shape\": [1], \"data_offsets\": [0, 4]},"
        " \"__metadata__\": {\"b\\n\\u009b\": \"c\\r\\u0090\"}}";
    uint64_t bytes = sizeof header - 1;
    snprintf(path, sizeof path, "%s/names.safetensors", folder);
    FILE *file = fopen(path, "w");
    ck_assert(file && fwrite(&bytes, 8, 1, file) == 1 && fputs(header, file) >= 0 &&
              fwrite("1234", 4, 1, file) == 1);
    ck_assert_int_eq(fclose(file), 0);
    char *text = good("info names.safetensors --values 1");
    expect_no_control(text, "info");
    holds(text, "a\\x1b[2J\\u0085");
    holds(text, "b\\x0a\\u009b = c\\x0d\\u0090");
    free(text);
    json_t *root = good_json("info names.safetensors --json");
    ck_assert_str_eq(
        json_string_value(json_object_get(json_array_get(json_object_get(root, "tensors"), 0), "name")),
        "a\x1b[2J\xc2\x85");
    json_decref(root);
}
END_TEST

/* Where standard output is closed, the log is not what is printed there. */
START_TEST(closed_standard_output) {
    outcome o = run_program("train --data text --steps 2 --seq 16 --batch 1 --out closed >&-");
    if (o.code || o.err[0]) ck_abort_msg("exit code %d: %s", o.code, o.err);
    char path[128];
    snprintf(path, sizeof path, "%s/closed/metrics.jsonl", folder);
    char *log = slurp(path), *rest = log;
    for (char *line; (line = strtok_r(rest, "\n", &rest));) {
        json_t *object = json_loads(line, 0, NULL);
        if (!object) ck_abort_msg("no JSON: %s", line);
        json_decref(object);
    }
    free(log);
    outcome_free(&o);
}
END_TEST

/* A path that is too long to be shown leaves room for the reason. */
START_TEST(long_paths_keep_their_reason) {
    static const char *const list[] = {
        "train --steps 1 --data",
        "train --steps 1 --out run9 --config",
        "train --data text --steps 1 --seq 16 --batch 1 --out run9 --replay-topk",
        "mem --plan-only --data",
        "mem --plan-only --policy save --html",
        "mem --plan-only --policy save --trace",
        "mem --plan-only --policy save --snapshot",
        "bench --compare",
        "check",
        "check --row",
        "check data.safetensors --config",
        "dump --out",
        "dump --out d.safetensors --checkpoint",
        "info",
        "config --config",
    };
    char path[700];
    memset(path, 'x', sizeof path);
    for (int i = 0; i < 699; i += 200) path[i] = '/';
    path[699] = 0;
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        char arguments[900];
        snprintf(arguments, sizeof arguments, "%s %s", list[i], path);
        outcome o = run_program(arguments);
        expect_a_line(&o, list[i], 2, "No such file or directory");
        outcome_free(&o);
    }
}
END_TEST

int main(void) {
    if (!mkdtemp(folder) || chdir(folder)) return EXIT_FAILURE;
    char make[256];
    FILE *text = fopen("text", "w"), *row = fopen("row.json", "w");
    if (!text || !row) return EXIT_FAILURE;
    for (int i = 0; i < 4000; i++) fputs("one more line of a text\n", text);
    fputs("{\"logits\": [0.5, 1.5], \"scores\": [0.1, 0.2]}", row);
    if (fclose(text) || fclose(row)) return EXIT_FAILURE;
    snprintf(make, sizeof make, "'%s' dump --seq 16 --batch 1 --out data.safetensors >/dev/null",
             CSAGRAD_PROGRAM);
    if (system(make)) return EXIT_FAILURE;
    Suite *suite = suite_create("surroundings");
    TCase *tcase = tcase_create("surroundings");
    tcase_set_timeout(tcase, 240);
    suite_add_tcase(suite, tcase);
    tcase_add_loop_test(tcase, output_that_cannot_be_written, 0, N_WORKS);
    tcase_add_test(tcase, texts_of_the_program_that_cannot_be_written);
    tcase_add_test(tcase, control_characters_are_escaped);
    tcase_add_test(tcase, names_in_a_file_are_escaped);
    tcase_add_test(tcase, closed_standard_output);
    tcase_add_test(tcase, long_paths_keep_their_reason);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    snprintf(make, sizeof make, "rm -r '%s'", folder);
    return failed || system(make) ? EXIT_FAILURE : EXIT_SUCCESS;
}
