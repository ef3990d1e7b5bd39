/* Dumps of gated pooling alone, held against csa_compress. */
#include "tests/support.h"

#include <unistd.h>

#include "models/check/compressor_check.h"

static cg_archive *stored(void) {
    char path[512];
    cg_error error = {0};
    snprintf(path, sizeof path, "%s/compressor.safetensors", TEST_DATA_DIR);
    cg_archive *archive = cg_archive_open(path, &error);
    if (!archive) ck_abort_msg("%s", error.text);
    return archive;
}

START_TEST(stored_vectors_match) {
    cg_archive *archive = stored();
    cg_compressor_quantity q[CG_COMPRESSOR_QUANTITIES];
    cg_error error = {0};
    int n;
    ck_assert_int_eq(cg_compressor_groups(archive), 3);
    if (!cg_compressor_check(archive, NULL, 0, q, &n, &error)) ck_abort_msg("%s", error.text);
    ck_assert_int_eq(n, 12);
    for (int i = 0; i < n; i++) {
        if (!q[i].ok)
            ck_abort_msg("%s: %g, got %.9g, expected %.9g", q[i].name, q[i].worst_rel, q[i].got, q[i].expected);
        ck_assert_double_gt(q[i].worst_rel,
                            0); /* f32 against f64: exact equality would mean nothing was compared */
    }
    cg_archive_close(archive);
}
END_TEST

/* Each stored tensor with one element changed is found at its place. */
START_TEST(a_changed_element_is_found) {
    cg_archive *archive = stored();
    int n_tensors = cg_archive_count(archive);
    cg_named_tensor *tensors = calloc((size_t)n_tensors, sizeof *tensors);
    static const char *const lengths[1][2] = {{"r4_thd_segment_lengths", "[21, 3, 14]"}};
    char path[] = "/tmp/csagrad-test-XXXXXX";
    close(mkstemp(path));
    int n_found = 0;
    for (int i = 0; i < n_tensors; i++) {
        const char *name = cg_archive_at(archive, i)->name;
        if (!strstr(name, ".out.") && !strstr(name, ".grad.")) continue;
        for (int k = 0; k < n_tensors; k++) tensors[k] = *cg_archive_at(archive, k);
        size_t bytes = (size_t)cg_tensor_bytes(CG_F32, &tensors[i].tensor.shape);
        float *copy = memcpy(malloc(bytes), tensors[i].tensor.data, bytes);
        copy[bytes / 8] += 0.01f;
        tensors[i].tensor.data = copy;
        cg_error error = {0};
        if (!cg_safetensors_write(path, tensors, n_tensors, lengths, 1, &error)) ck_abort_msg("%s", error.text);
        cg_archive *changed = cg_archive_open(path, &error);
        cg_compressor_quantity q[CG_COMPRESSOR_QUANTITIES];
        int n;
        if (!changed || !cg_compressor_check(changed, NULL, 0, q, &n, &error)) ck_abort_msg("%s", error.text);
        for (int k = 0; k < n; k++) {
            ck_assert_int_eq(q[k].ok, strcmp(q[k].name, name) != 0);
            if (!q[k].ok) ck_assert_double_lt(fabs(q[k].got - q[k].expected - 0.01), 1e-4);
            n_found += !q[k].ok;
        }
        cg_archive_close(changed);
        free(copy);
    }
    ck_assert_int_eq(n_found, 12);
    unlink(path);
    free(tensors);
    cg_archive_close(archive);
}
END_TEST

/* Without the lengths of its segments the packed group has one segment, and too few rows. */
START_TEST(shapes_that_do_not_fit_are_refused) {
    cg_archive *archive = stored();
    int n_tensors = cg_archive_count(archive), n;
    cg_named_tensor *tensors = calloc((size_t)n_tensors, sizeof *tensors);
    for (int k = 0; k < n_tensors; k++) tensors[k] = *cg_archive_at(archive, k);
    char path[] = "/tmp/csagrad-test-XXXXXX";
    close(mkstemp(path));
    cg_error error = {0};
    if (!cg_safetensors_write(path, tensors, n_tensors, NULL, 0, &error)) ck_abort_msg("%s", error.text);
    cg_archive *bare = cg_archive_open(path, &error);
    cg_compressor_quantity q[CG_COMPRESSOR_QUANTITIES];
    ck_assert(!cg_compressor_check(bare, NULL, 0, q, &n, &error));
    ck_assert_str_eq(error.text,
                     "r4_thd.out.compressed has 8 rows, expected 9 (floor(length / 4) of each segment)");
    ck_assert_int_eq(error.code, CG_BAD_INPUT);
    cg_archive_close(bare);
    unlink(path);
    free(tensors);
    cg_archive_close(archive);
}
END_TEST

SUITE("compressor_check", stored_vectors_match, a_changed_element_is_found, shapes_that_do_not_fit_are_refused)
