/* Every stored file of tests/fuzz/corpus through the target that it was found with: no clang needed. */
#include "tests/fuzz/targets.h"

#include <check.h>
#include <dirent.h>
#include <sys/stat.h>

#include "core/base/file.h"

static int run_folder(int target) {
    char folder[400];
    snprintf(folder, sizeof folder, "%s/tests/fuzz/corpus/%s", CSAGRAD_SOURCE_DIR, fuzz_targets[target].name);
    DIR *dir = opendir(folder);
    ck_assert_ptr_nonnull(dir);
    int files = 0;
    for (const struct dirent *entry; (entry = readdir(dir));) {
        if (entry->d_name[0] == '.') continue;
        char path[700], *data;
        size_t size;
        cg_error error = {0};
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        if (!cg_file_read(path, 1 << 20, &data, &size, &error)) ck_abort_msg("%s", error.text);
        char *exact = malloc(size ? size : 1); /* without the 0 that cg_file_read adds */
        memcpy(exact, data, size);
        free(data);
        fprintf(stderr, "%s\n", path); /* shown by ctest when the next line ends the program */
        fuzz_targets[target].run((const uint8_t *)exact, size);
        free(exact);
        files++;
    }
    closedir(dir);
    return files;
}

START_TEST(stored_files) { ck_assert_int_gt(run_folder(_i), 0); }
END_TEST

/* What no file holds: nothing at all. */
START_TEST(empty_input) { fuzz_targets[_i].run((const uint8_t *)"", 0); }
END_TEST

int main(void) {
    Suite *suite = suite_create("fuzz_corpus");
    TCase *tcase = tcase_create("fuzz_corpus");
    tcase_set_timeout(tcase, 240);
    suite_add_tcase(suite, tcase);
    tcase_add_loop_test(tcase, stored_files, 0, N_FUZZ_TARGETS);
    tcase_add_loop_test(tcase, empty_input, 0, N_FUZZ_TARGETS);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
