/* Running the program in tests: its exit code, what it prints, JSON.
 *
 * A suite makes `folder` with mkdtemp; programs run there, and it holds their output. */
#ifndef CG_TESTS_PROGRAM_H
#define CG_TESTS_PROGRAM_H

#include "tests/support.h"

#include <jansson.h>
#include <sys/wait.h>
#include <unistd.h>

static char folder[] = "/tmp/csagrad_tools_XXXXXX";

typedef struct outcome {
    int code;
    char *out, *err;
} outcome;

static inline char *slurp(const char *path) {
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
static inline outcome run_program(const char *arguments) {
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

static inline void outcome_free(outcome *o) {
    free(o->out);
    free(o->err);
}

/* Exit code 0 and nothing on stderr. The text of stdout is the caller's. */
static inline char *good(const char *arguments) {
    outcome o = run_program(arguments);
    if (o.code != 0 || o.err[0]) ck_abort_msg("csagrad %s: exit code %d: %s", arguments, o.code, o.err);
    ck_assert(o.out[0]);
    free(o.err);
    return o.out;
}

static inline json_t *good_json(const char *arguments) {
    char *text = good(arguments);
    json_error_t error;
    json_t *root = json_loads(text, JSON_REJECT_DUPLICATES, &error);
    if (!root) ck_abort_msg("csagrad %s: line %d is no JSON: %s", arguments, error.line, error.text);
    free(text);
    return root;
}

/* The exit code, and one sentence that starts with the program's name and holds a part. */
static inline void bad(const char *arguments, int code, const char *part) {
    outcome o = run_program(arguments);
    const char *end = strchr(o.err, '\n');
    bool one_line = end && end[1] == 0 && !strncmp(o.err, "csagrad", 7);
    if (o.code != code || !one_line || !strstr(o.err, part))
        ck_abort_msg("csagrad %s: exit code %d, expected %d and one line with \"%s\", got: %s", arguments,
                     o.code, code, part, o.err);
    ck_assert_str_eq(o.out, "");
    outcome_free(&o);
}

static inline void holds(const char *text, const char *part) {
    if (!strstr(text, part)) ck_abort_msg("\"%s\" is not in: %s", part, text);
}

static inline int64_t number(const json_t *object, const char *key) {
    const json_t *value = json_object_get(object, key);
    if (!json_is_integer(value)) ck_abort_msg("%s is no integer", key);
    return json_integer_value(value);
}

/* A number, whole or not. */
static inline double real_of(const json_t *object, const char *key) {
    const json_t *value = json_object_get(object, key);
    if (!json_is_number(value)) ck_abort_msg("%s is no number", key);
    return json_number_value(value);
}

/* main() of a suite whose programs run in `folder`: makes it, and removes it with all that they left. */
static inline int suite_run_in_folder(const char *name, const TTest *const *tests, int n) {
    char command[256];
    if (!mkdtemp(folder)) return EXIT_FAILURE;
    const int code = suite_run(name, tests, n);
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    return system(command) ? EXIT_FAILURE : code;
}

/* What a command's help says that an option has where it is not given: "thd" of "--layout=NAME (default: thd)".
 * malloc'd. */
static inline char *default_of(const char *command, const char *option) {
    char text[80], *said = NULL;
    snprintf(text, sizeof text, "%s --help", command);
    char *help = good(text);
    snprintf(text, sizeof text, " --%s=", option);
    const char *at = strstr(help, text), *end = at;
    while (end && (end = strchr(end + 1, '\n')) && end[1 + strspn(end + 1, " ")] != '-') continue;
    if (!at) ck_abort_msg("csagrad %s has no option --%s", command, option);
    char *own = strndup(at, end ? (size_t)(end - at) : strlen(at)), *to = own;
    for (const char *from = own; *from; from++) /* lines are broken anywhere, inside the brackets too */
        if (*from > ' ' || (to > own && to[-1] != ' ')) *to++ = *from > ' ' ? *from : ' ';
    *to = 0;
    const char *start = strstr(own, "(default: ");
    if (start) said = strndup(start + 10, strcspn(start + 10, ")"));
    if (!said) ck_abort_msg("csagrad %s: the help of --%s states no default: %s", command, option, own);
    free(own);
    free(help);
    return said;
}

#endif
