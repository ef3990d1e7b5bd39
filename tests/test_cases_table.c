/* tests/CASES.md names tests: each must be there and be run, and no case may be missing, so that the table cannot rot. */
#include "tests/support.h"

#include "core/base/file.h"

static char *read_source(const char *name) {
    char path[512], *text = NULL;
    size_t bytes;
    cg_error error = {0};
    snprintf(path, sizeof path, "%s/tests/%s", CSAGRAD_SOURCE_DIR, name);
    if (!cg_file_read(path, 1 << 22, &text, &bytes, &error)) ck_abort_msg("%s", error.text);
    ck_assert_ptr_nonnull(text);
    return text;
}

/* `name` as a whole word of the text, from `text` on. */
static bool holds_word(const char *text, const char *name) {
    const size_t n = strlen(name);
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_";
    for (const char *at = text; (at = strstr(at, name)); at += n)
        if ((at == text || !strchr(letters, at[-1])) && (!at[n] || !strchr(letters, at[n]))) return true;
    return false;
}

/* `test_file:test`, between backticks. */
static void expect_test(const char *from, size_t n) {
    char name[256], file[300], start[300];
    ck_assert_uint_lt(n, sizeof name);
    memcpy(name, from, n);
    name[n] = 0;
    char *test = strchr(name, ':');
    ck_assert_msg(test != NULL, "%s names no test", name);
    *test++ = 0;
    snprintf(file, sizeof file, "%s.c", name);
    char *source = read_source(file);
    snprintf(start, sizeof start, "START_TEST(%s)", test);
    if (!strstr(source, start)) ck_abort_msg("tests/CASES.md: %s has no test %s", file, test);
    /* run by the list of tests at the end of the file */
    if (!holds_word(strstr(source, start) + strlen(start), test))
        ck_abort_msg("tests/CASES.md: %s does not run %s", file, test);
    free(source);
}

START_TEST(every_case_has_tests_that_exist) {
    char *table = read_source("CASES.md"), prefix[16];
    int next = 1, n_tests = 0;
    for (char *line = strtok(table, "\n"); line; line = strtok(NULL, "\n")) {
        if (strncmp(line, "| S", 3)) continue;
        snprintf(prefix, sizeof prefix, "| S%02d |", next++);
        ck_assert_msg(!strncmp(line, prefix, strlen(prefix)), "expected %s, got %.8s", prefix, line);
        ck_assert_msg(strstr(line, "| tested") != NULL, "%s has no result", prefix);
        const int before = n_tests;
        for (char *at = line; (at = strchr(at, '`'));) {
            const char *end = strchr(++at, '`');
            ck_assert_ptr_nonnull(end);
            expect_test(at, (size_t)(end - at));
            n_tests++;
            at += end - at + 1;
        }
        ck_assert_msg(n_tests > before, "%s names no test", prefix);
    }
    ck_assert_int_eq(next, 50);
    ck_assert_int_gt(n_tests, 100);
    free(table);
}
END_TEST

/* The other way round: a test that bears a case's number is in the table. */
START_TEST(every_sweep_is_in_the_table) {
    static const char *const files[] = {"test_row", "test_cases_rows", "test_cases_packed", "test_cases_model"};
    char *table = read_source("CASES.md");
    for (int f = 0; f < 4; f++) {
        char name[64];
        snprintf(name, sizeof name, "%s.c", files[f]);
        char *source = read_source(name);
        for (char *at = source; (at = strstr(at, "START_TEST(s"));) {
            char entry[256];
            at += strlen("START_TEST(");
            const char *end = strchr(at, ')');
            ck_assert_ptr_nonnull(end);
            if (at[1] < '0' || at[1] > '9') continue;
            snprintf(entry, sizeof entry, "%s:%.*s", files[f], (int)(end - at), at);
            ck_assert_msg(holds_word(table, entry), "tests/CASES.md lacks %s", entry);
        }
        free(source);
    }
    free(table);
}
END_TEST

SUITE("cases_table", every_case_has_tests_that_exist, every_sweep_is_in_the_table)
