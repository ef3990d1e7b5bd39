#include "models/train/checkpoint.h"

#include "core/base/file.h"
#include "core/base/shown.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

static const char old_format[] = "csagrad checkpoint 1", format_name[] = "csagrad checkpoint 2";

static const char *const keys[] = {"format", "step", "data", "config"};
enum { N_KEYS = sizeof keys / sizeof keys[0], SUM_BYTES = 20 };

static size_t bytes_of(const cg_named_tensor *named) {
    return (size_t)cg_tensor_bytes(named->tensor.dtype, &named->tensor.shape);
}

/* ---- checksums: they tell damage, not malice ---- */

static uint64_t fnv(uint64_t hash, const void *data, size_t bytes) {
    const unsigned char *p = data;
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ p[i]) * 1099511628211u;
    return hash;
}

static uint64_t fnv_text(uint64_t hash, const char *text) { return fnv(hash, text, strlen(text) + 1); }

/* That of files of the old format, which are still read: a sum, blind to tensors that changed places. */
static void old_checksum(const cg_safetensors *file, const char *const *texts, char sum[SUM_BYTES]) {
    uint64_t all = 0;
    for (int i = 0; i < cg_safetensors_count(file); i++) {
        const cg_named_tensor *named = cg_safetensors_at(file, i);
        all += fnv(fnv_text(14695981039346656037u, named->name), named->tensor.data, bytes_of(named));
    }
    for (int i = 0; i < N_KEYS; i++) all = fnv_text(all, texts[i]);
    snprintf(sum, SUM_BYTES, "%016llx", (unsigned long long)all);
}

static uLong crc_text(uLong crc, const char *text) {
    return crc32_z(crc, (const Bytef *)text, strlen(text) + 1);
}

static int by_name(const void *a, const void *b) {
    const cg_named_tensor *const *x = a, *const *y = b;
    return strcmp((*x)->name, (*y)->name);
}

/* CRC-32 over name, dtype, shape and data of each tensor, by name, so that their order in the file does not
 * matter; then over the metadata, key and value in turn. A 0 byte ends every text. */
static bool checksum(const cg_named_tensor *tensors, int n, const char *const *texts, char sum[SUM_BYTES],
                     cg_error *error) {
    const cg_named_tensor **sorted = malloc(((size_t)n + 1) * sizeof *sorted);
    if (!sorted) return cg_fail(error, CG_FAILED, "out of memory for the checksum of %d tensors", n);
    for (int i = 0; i < n; i++) sorted[i] = &tensors[i];
    qsort(sorted, (size_t)n, sizeof *sorted, by_name);
    uLong crc = 0;
    char shape[160];
    for (int i = 0; i < n; i++) {
        const cg_tensor *t = &sorted[i]->tensor;
        crc = crc_text(crc, sorted[i]->name);
        crc = crc_text(crc, cg_dtype_name(t->dtype));
        crc = crc_text(crc, cg_shape_text(&t->shape, shape, sizeof shape));
        crc = crc32_z(crc, t->data, bytes_of(sorted[i]));
    }
    free(sorted);
    for (int i = 0; i < N_KEYS; i++) crc = crc_text(crc_text(crc, keys[i]), texts[i]);
    snprintf(sum, SUM_BYTES, "%08lx", crc);
    return true;
}

bool cg_checkpoint_write(const char *path, const cg_named_tensor *tensors, int n_tensors,
                         const cg_checkpoint_facts *facts, cg_error *error) {
    char step[32], data[32], sum[SUM_BYTES];
    snprintf(step, sizeof step, "%lld", (long long)facts->step);
    snprintf(data, sizeof data, "%016llx", (unsigned long long)facts->data);
    const char *const texts[N_KEYS] = {format_name, step, data, facts->config_json};
    if (!checksum(tensors, n_tensors, texts, sum, error)) return false;
    const char *metadata[N_KEYS + 1][2];
    for (int i = 0; i < N_KEYS; i++) {
        metadata[i][0] = keys[i];
        metadata[i][1] = texts[i];
    }
    metadata[N_KEYS][0] = "checksum";
    metadata[N_KEYS][1] = sum;
    return cg_safetensors_write(path, tensors, n_tensors, metadata, N_KEYS + 1, error);
}

static bool check_sum(const char *path, const cg_safetensors *file, const char *const *texts, const char *want,
                      cg_error *error) {
    char got[SUM_BYTES];
    if (!strcmp(texts[0], old_format))
        old_checksum(file, texts, got);
    else if (!checksum(cg_safetensors_at(file, 0), cg_safetensors_count(file), texts, got, error))
        return false;
    return !strcmp(got, want) ||
           cg_fail(error, CG_BAD_INPUT, "%s is damaged: its content has checksum %s, expected %s",
                   cg_shown_path(path).text, got, cg_shown(want).text);
}

/* A format of ours that this version does not know. */
static bool is_newer(const char *format) {
    const size_t stem = sizeof format_name - 2;
    return !strncmp(format, format_name, stem) && strcmp(format, format_name) && strcmp(format, old_format);
}

/* An open file whose checksum is right; NULL with a sentence that names the file. What fails for another reason
 * than the file's content is CG_FAILED. */
static cg_safetensors *open_checked(const char *path, cg_error *error) {
    cg_safetensors *file = cg_safetensors_open(path, error);
    if (!file) return NULL;
    const char *texts[N_KEYS], *want = cg_safetensors_metadata(file, "checksum");
    bool complete = want != NULL;
    for (int i = 0; i < N_KEYS; i++) complete &= (texts[i] = cg_safetensors_metadata(file, keys[i])) != NULL;
    if (complete && is_newer(texts[0]))
        cg_fail(error, CG_FAILED, "%s is of format \"%s\", which this version of csagrad cannot read",
                cg_shown_path(path).text, cg_shown(texts[0]).text);
    else if (!complete || (strcmp(texts[0], format_name) && strcmp(texts[0], old_format)))
        cg_fail(error, CG_BAD_INPUT,
                "%s is not a checkpoint of csagrad (its metadata lacks format, step, data, config or checksum)",
                cg_shown_path(path).text);
    else if (check_sum(path, file, texts, want, error))
        return file;
    cg_safetensors_close(file);
    return NULL;
}

cg_checkpoint_state cg_checkpoint_look(const char *path, cg_error *error) {
    cg_error own = {0};
    if (!cg_file_try(path, error)) return CG_CHECKPOINT_UNREADABLE;
    cg_safetensors *file = open_checked(path, &own);
    cg_safetensors_close(file);
    if (file) return CG_CHECKPOINT_WHOLE;
    cg_fail(error, own.code, "%s", own.text);
    return own.code == CG_FAILED ? CG_CHECKPOINT_UNREADABLE : CG_CHECKPOINT_DAMAGED;
}

static bool fits(const char *path, const cg_safetensors *file, const cg_named_tensor *tensors, int n_tensors,
                 cg_error *error) {
    for (int i = 0; i < n_tensors; i++) {
        const cg_tensor *want = &tensors[i].tensor, *got = cg_safetensors_find(file, tensors[i].name);
        if (!got)
            return cg_fail(error, CG_BAD_INPUT, "%s lacks %s: is it of another model?",
                           cg_shown_path(path).text, tensors[i].name);
        char a[128], b[128];
        if (got->dtype != want->dtype || !cg_shape_equal(&got->shape, &want->shape))
            return cg_fail(error, CG_BAD_INPUT, "%s: %s is %s %s, expected %s %s: is it of another model?",
                           cg_shown_path(path).text, tensors[i].name, cg_dtype_name(got->dtype),
                           cg_shape_text(&got->shape, a, sizeof a), cg_dtype_name(want->dtype),
                           cg_shape_text(&want->shape, b, sizeof b));
    }
    if (cg_safetensors_n_entries(file) != n_tensors)
        return cg_fail(error, CG_BAD_INPUT, "%s holds %d tensors, expected %d: is it of another model?",
                       cg_shown_path(path).text, cg_safetensors_n_entries(file), n_tensors);
    return true;
}

bool cg_checkpoint_read(const char *path, const cg_named_tensor *tensors, int n_tensors,
                        cg_checkpoint_facts *facts, cg_error *error) {
    cg_safetensors *file = open_checked(path, error);
    if (!file) return false;
    bool ok = fits(path, file, tensors, n_tensors, error);
    char data[32];
    snprintf(data, sizeof data, "%016llx", (unsigned long long)facts->data);
    if (ok && strcmp(cg_safetensors_metadata(file, "data"), data))
        ok = cg_fail(
            error, CG_BAD_INPUT,
            "%s was trained on other data (fingerprint %s, now %s): give the same --data, or start anew",
            cg_shown_path(path).text, cg_safetensors_metadata(file, "data"), data);
    for (int i = 0; ok && i < n_tensors; i++) {
        const cg_tensor *to = &tensors[i].tensor;
        memcpy(to->data, cg_safetensors_find(file, tensors[i].name)->data,
               (size_t)cg_tensor_bytes(to->dtype, &to->shape));
    }
    if (ok) facts->step = atoll(cg_safetensors_metadata(file, "step"));
    cg_safetensors_close(file);
    return ok;
}

bool cg_checkpoint_config(const char *path, cg_config *config, cg_error *error) {
    cg_error own = {0};
    cg_safetensors *file = cg_safetensors_open(path, error);
    if (!file) return false;
    const char *text = cg_safetensors_metadata(file, "config");
    *config = cg_config_toy();
    bool ok = cg_config_parse(config, text ? text : "", &own);
    cg_safetensors_close(file);
    return ok || cg_fail(error, own.code, "%s: its configuration: %s", cg_shown_path(path).text, own.text);
}

void cg_checkpoint_path(const char *dir, int64_t step, char *path, size_t path_bytes) {
    snprintf(path, path_bytes, "%s/checkpoint-%08lld.safetensors", dir, (long long)step);
}

int cg_checkpoint_list(const char *dir, int64_t *steps, int max, cg_error *error) {
    DIR *folder = opendir(dir);
    if (!folder) {
        if (errno == ENOENT) return 0;
        cg_fail(error, cg_errno_code(errno), "the folder %s cannot be read: %s", cg_shown_path(dir).text,
                strerror(errno));
        return -1;
    }
    int n = 0;
    errno = 0;
    for (struct dirent *entry; (entry = readdir(folder)); errno = 0) {
        long long step;
        char name[64];
        if (sscanf(entry->d_name, "checkpoint-%lld.", &step) != 1) continue;
        cg_checkpoint_path(".", step, name, sizeof name);
        if (strcmp(entry->d_name, name + 2)) continue; /* a copy, a half-written .tmp */
        int at = n < max ? n++ : max;
        for (; at > 0 && steps[at - 1] < step; at--)
            if (at < max) steps[at] = steps[at - 1];
        if (at < max) steps[at] = step;
    }
    if (errno) {
        cg_fail(error, cg_errno_code(errno), "the folder %s cannot be read: %s", cg_shown_path(dir).text,
                strerror(errno));
        n = -1;
    }
    closedir(folder);
    return n;
}

void cg_checkpoint_remove_stale(const char *dir) {
    DIR *folder = opendir(dir);
    if (!folder) return;
    for (struct dirent *entry; (entry = readdir(folder));) {
        long long step;
        char name[64], path[600];
        if (sscanf(entry->d_name, "checkpoint-%lld.", &step) != 1) continue;
        cg_checkpoint_path(".", step, name, sizeof name);
        size_t length = strlen(name + 2);
        if (strncmp(entry->d_name, name + 2, length) || strcmp(entry->d_name + length, ".tmp")) continue;
        cg_checkpoint_path(dir, step, path, sizeof path);
        cg_file_remove_stale(path);
    }
    closedir(folder);
}
