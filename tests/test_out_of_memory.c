/* The program where memory runs out: for each command, the N-th request of memory is refused, or that and all behind it
 * (tests/fail_alloc.c). It must end by itself with one sentence that names memory and with exit code 1, or do all as if
 * nothing had been; never by a signal, with half of a JSON text or half of a file.
 *
 *     build/tests/test_out_of_memory          some N of each command
 *     build/tests/test_out_of_memory 200      on purpose: up to 200 of each command, evenly over its run, in both ways
 *
 * Help texts are not among them: argp asserts that it has memory. */
#define _GNU_SOURCE /* nftw, strcasestr */
#include "tests/program.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <sys/stat.h>

static const char *const commands[] = {
    "ops",
    "ops --json",
    "info --json",
    "info ../data.safetensors",
    "info --json ../data.safetensors",
    "config --seq 64 --json",
    "gradcheck --op relu --json",
    "check ../data.safetensors",
    "check --json ../data.safetensors",
    "check --row --json ../row.json",
    "dump --seq 16 --batch 1 --out dump.safetensors --json",
    "mem --dims toy --seqs 64 --policy stream --plan-only --html page.html --snapshot snapshot.pickle --trace "
    "trace.json",
    "mem --dims toy --seqs 64 --policy recompute --runs 1 --json",
    "train --data ../text --steps 2 --seq 16 --batch 1 --out run --json",
};

enum { N_COMMANDS = sizeof commands / sizeof commands[0] };

static long n_wanted; /* of each command; 0: a few */

static int remove_one(const char *path, const struct stat *status, int kind, struct FTW *place) {
    (void)status, (void)kind;
    return place->level > 0 ? remove(path) : 0;
}

static int is_whole(const char *path, const struct stat *status, int kind, struct FTW *place) {
    (void)status, (void)kind, (void)place;
    size_t n = strlen(path);
    return n > 4 && !strcmp(path + n - 4, ".tmp");
}

static void path_in(char path[256], const char *name) { snprintf(path, 256, "%s/%s", folder, name); }

static bool put(const char *name, int times, const char *text) {
    char path[256];
    path_in(path, name);
    FILE *file = fopen(path, "w");
    for (int i = 0; file && i < times; i++) fputs(text, file);
    return file && fclose(file) == 0;
}

/* The program in folder/place, emptied before; its exit status as waitpid gives it. */
static int start(const char *command, const char *place, const char *plan) {
    char text[400], cwd[256], out[256], err[256], *words[40];
    int n = 0;
    snprintf(text, sizeof text, "csagrad %s", command);
    for (char *word = strtok(text, " "); word; word = strtok(NULL, " ")) words[n++] = word;
    words[n] = NULL;
    path_in(cwd, place);
    path_in(out, "out");
    path_in(err, "err");
    ck_assert_int_eq(nftw(cwd, remove_one, 8, FTW_DEPTH | FTW_PHYS), 0);
    pid_t child = fork();
    if (child == 0) {
        int to = open(out, O_WRONLY | O_CREAT | O_TRUNC, 0600),
            errors = open(err, O_WRONLY | O_CREAT | O_TRUNC, 0600);
        bool ok = chdir(cwd) == 0 && to >= 0 && errors >= 0 && dup2(to, 1) == 1 && dup2(errors, 2) == 2;
        setenv("FAIL_ALLOC", plan, 1);
        setenv("FAIL_ALLOC_COUNT", "../count", 1);
        setenv("LD_PRELOAD", FAIL_ALLOC_LIBRARY, 1);
        setenv("GOMP_SPINCOUNT", "1000", 0); /* or the program would start itself again to set it */
        if (ok) execv(CSAGRAD_PROGRAM, words);
        _exit(99);
    }
    int status;
    ck_assert_int_eq(waitpid(child, &status, 0), child);
    return status;
}

static char *read_back(const char *name) {
    char path[256];
    path_in(path, name);
    return slurp(path);
}

static int lines_of(const char *text) {
    int n = 0;
    for (; *text; text++) n += *text == '\n';
    return n;
}

/* One JSON text, or one on each line; a text of nothing is none and fine. */
static bool is_json(char *text, bool by_line) {
    json_error_t error;
    for (char *end; by_line && (end = strchr(text, '\n')); text = end + 1) {
        *end = 0;
        json_t *line = json_loads(text, 0, &error);
        json_decref(line);
        if (!line) return false;
    }
    if (!*text) return true;
    json_t *root = json_loads(text, 0, &error);
    json_decref(root);
    return root != NULL;
}

/* What went wrong in a run under a plan; NULL: nothing. */
static const char *fault_of(const char *command, int status, char *out, const char *err, int lines) {
    static const char *const files[] = {"dump.safetensors", "page.html", "snapshot.pickle", "trace.json"};
    if (!WIFEXITED(status)) return "it was killed";
    int code = WEXITSTATUS(status);
    if (code > 1) return "it blames something else";
    if (code == 0 && err[0]) return "it complains and ends with 0";
    if (code == 0 && lines_of(out) != lines) return "it ends with 0 and does not say all";
    if (code == 1) {
        /* libgomp has a line of its own, "\nlibgomp: Out of memory allocating N bytes", and ends the process; where that is one
         * which runs a step for csagrad mem, the sentence follows */
        const char *sentence = err + (err[0] == '\n'), *end = strchr(sentence, '\n');
        if (err[0] == '\n' && end && end[1]) sentence = end + 1, end = strchr(sentence, '\n');
        if (!end || end[1]) return "it does not say one sentence";
        if (!strcasestr(sentence, "memory")) return "it does not name memory";
    }
    if (strstr(command, "--json") && !is_json(out, !strncmp(command, "train", 5)))
        return "its JSON is not whole";
    char path[256], whole[256];
    path_in(path, "try");
    if (nftw(path, is_whole, 8, FTW_PHYS)) return "half a file is left";
    for (int f = 0; f < 4; f++) {
        struct stat now, then;
        snprintf(path, sizeof path, "%s/try/%s", folder, files[f]);
        snprintf(whole, sizeof whole, "%s/whole/%s", folder, files[f]);
        if (!stat(path, &now) && (stat(whole, &then) || now.st_size != then.st_size))
            return "a file is not whole";
    }
    return NULL;
}

static void try(const char *command, const char *plan, int lines) {
    int status = start(command, "try", plan);
    char *out = read_back("out"), *err = read_back("err");
    const char *fault = fault_of(command, status, out, err, lines);
    if (fault)
        ck_abort_msg("csagrad %s with FAIL_ALLOC=%s: %s; status %#x, errors \"%s\"", command, plan, fault,
                     status, err);
    free(out);
    free(err);
}

START_TEST(memory_runs_out) {
    const char *command = commands[_i];
    int status = start(command, "whole", "0");
    char *out = read_back("out"), *count = read_back("count"), *err = read_back("err");
    if (status || err[0]) ck_abort_msg("csagrad %s: status %#x, %s", command, status, err);
    const int lines = lines_of(out);
    const long n = atol(count);
    ck_assert_int_ge(n, 5);
    char plan[40];
    if (n_wanted > 0) {
        for (long i = 0, tries = n < n_wanted ? n : n_wanted; i < tries; i++)
            for (int behind = 0; behind < 2; behind++) {
                snprintf(plan, sizeof plan, "%ld%s", 1 + i * n / tries, behind ? "+" : "");
                try(command, plan, lines);
            }
    } else {
        bool behind = false;
        for (long a = 1, b = 2, next; a <= n; next = a + b, a = b, b = next) {
            snprintf(plan, sizeof plan, "%ld%s", a, behind ? "+" : "");
            try(command, plan, lines);
            behind = !behind;
        }
        snprintf(plan, sizeof plan, "%ld", n); /* at the very end, where all is printed */
        try(command, plan, lines);
    }
    free(out);
    free(err);
    free(count);
}
END_TEST

/* The limits that a step is held against, in the program: refused with both numbers before anything is done. */
START_TEST(a_limit_below_the_plan) {
    char shell[1024];
    snprintf(
        shell, sizeof shell,
        "cd %s && ulimit -v 400000 && '%s' train --data text --steps 1 --seq 16384 --batch 16 --out limited "
        ">out 2>err",
        folder, CSAGRAD_PROGRAM);
    int status = system(shell);
    ck_assert(WIFEXITED(status));
    ck_assert_int_eq(WEXITSTATUS(status), 1);
    char *err = read_back("err");
    holds(err, "csagrad train: the step needs ");
    holds(err, " bytes, RLIMIT_AS (ulimit -v) allows this process 409600000\n");
    ck_assert_int_eq(lines_of(err), 1);
    free(err);
}
END_TEST

int main(int argc, char **argv) {
    n_wanted = argc > 1 ? atol(argv[1]) : 0;
    if (!mkdtemp(folder)) return EXIT_FAILURE;
    char path[256];
    const char *const folders[] = {"try", "whole"};
    for (int f = 0; f < 2; f++) {
        path_in(path, folders[f]);
        if (mkdir(path, 0700)) return EXIT_FAILURE;
    }
    if (!put("text", 4000, "one more line of a text\n") ||
        !put("row.json", 1,
             "{\"q\": [[1, 0.5]], \"compressed\": [[1, 2], [3, 1]], \"scores\": [0.1, 0.2], \"dout\": [[1, "
             "0]]}"))
        return EXIT_FAILURE;
    char make[512];
    snprintf(make, sizeof make, "'%s' dump --seq 16 --batch 1 --out %s/data.safetensors >/dev/null",
             CSAGRAD_PROGRAM, folder);
    if (system(make)) return EXIT_FAILURE;

    Suite *suite = suite_create("out_of_memory");
    TCase *tcase = tcase_create("out_of_memory");
    tcase_set_timeout(tcase, 3600);
    suite_add_tcase(suite, tcase);
    tcase_add_loop_test(tcase, memory_runs_out, 0, N_COMMANDS);
    tcase_add_test(tcase, a_limit_below_the_plan);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    nftw(folder, remove_one, 8, FTW_DEPTH | FTW_PHYS);
    rmdir(folder);
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
