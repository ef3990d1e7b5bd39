#include "models/checkpoint.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char format_name[] = "csagrad checkpoint 1";

/* FNV-1a over names and bytes. It tells damage, not malice. */
static uint64_t hash_bytes(uint64_t hash, const void *data, size_t bytes) {
    const unsigned char *p = data;
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ p[i]) * 1099511628211u;
    return hash;
}

static uint64_t hash_text(uint64_t hash, const char *text) { return hash_bytes(hash, text, strlen(text) + 1); }

static uint64_t hash_tensor(const cg_named_tensor *named) {
    uint64_t hash = hash_text(14695981039346656037u, named->name);
    return hash_bytes(hash, named->tensor.data,
                      (size_t)cg_tensor_bytes(named->tensor.dtype, &named->tensor.shape));
}

/* Independent of the order of tensors in the file. */
static uint64_t checksum(uint64_t tensors, const char *const *texts, int n_texts) {
    for (int i = 0; i < n_texts; i++) tensors = hash_text(tensors, texts[i]);
    return tensors;
}

static const char *const keys[] = {"format", "step", "data", "config"};
enum { N_KEYS = sizeof keys / sizeof keys[0] };

bool cg_checkpoint_write(const char *path, const cg_named_tensor *tensors, int n_tensors,
                         const cg_checkpoint_facts *facts, cg_error *error) {
    uint64_t sum = 0;
    for (int i = 0; i < n_tensors; i++) sum += hash_tensor(&tensors[i]);
    char step[32], data[32], sum_text[32];
    snprintf(step, sizeof step, "%lld", (long long)facts->step);
    snprintf(data, sizeof data, "%016llx", (unsigned long long)facts->data);
    const char *const texts[N_KEYS] = {format_name, step, data, facts->config_json};
    snprintf(sum_text, sizeof sum_text, "%016llx", (unsigned long long)checksum(sum, texts, N_KEYS));
    const char *metadata[N_KEYS + 1][2];
    for (int i = 0; i < N_KEYS; i++) {
        metadata[i][0] = keys[i];
        metadata[i][1] = texts[i];
    }
    metadata[N_KEYS][0] = "checksum";
    metadata[N_KEYS][1] = sum_text;
    return cg_safetensors_write(path, tensors, n_tensors, metadata, N_KEYS + 1, error);
}

/* An open file whose checksum is right; NULL with a sentence that names the file. */
static cg_safetensors *open_checked(const char *path, cg_error *error) {
    cg_safetensors *file = cg_safetensors_open(path, error);
    if (!file) return NULL;
    const char *texts[N_KEYS], *want = cg_safetensors_metadata(file, "checksum");
    bool complete = want != NULL;
    for (int i = 0; i < N_KEYS; i++) complete &= (texts[i] = cg_safetensors_metadata(file, keys[i])) != NULL;
    if (!complete || strcmp(texts[0], format_name)) {
        cg_fail(error, CG_BAD_INPUT,
                "%s is not a checkpoint of csagrad (its metadata lacks format, step, data, config or checksum)",
                path);
    } else {
        uint64_t sum = 0;
        for (int i = 0; i < cg_safetensors_count(file); i++) sum += hash_tensor(cg_safetensors_at(file, i));
        char got[32];
        snprintf(got, sizeof got, "%016llx", (unsigned long long)checksum(sum, texts, N_KEYS));
        if (!strcmp(got, want)) return file;
        cg_fail(error, CG_BAD_INPUT, "%s is damaged: its content has checksum %s, expected %s", path, got,
                want);
    }
    cg_safetensors_close(file);
    return NULL;
}

bool cg_checkpoint_is_whole(const char *path, cg_error *error) {
    cg_safetensors *file = open_checked(path, error);
    cg_safetensors_close(file);
    return file != NULL;
}

static bool fits(const char *path, const cg_safetensors *file, const cg_named_tensor *tensors, int n_tensors,
                 cg_error *error) {
    for (int i = 0; i < n_tensors; i++) {
        const cg_tensor *want = &tensors[i].tensor, *got = cg_safetensors_find(file, tensors[i].name);
        if (!got)
            return cg_fail(error, CG_BAD_INPUT, "%s lacks %s: is it of another model?", path, tensors[i].name);
        char a[128], b[128];
        if (got->dtype != want->dtype || !cg_shape_equal(&got->shape, &want->shape))
            return cg_fail(error, CG_BAD_INPUT, "%s: %s is %s %s, expected %s %s: is it of another model?",
                           path, tensors[i].name, cg_dtype_name(got->dtype),
                           cg_shape_text(&got->shape, a, sizeof a), cg_dtype_name(want->dtype),
                           cg_shape_text(&want->shape, b, sizeof b));
    }
    if (cg_safetensors_count(file) != n_tensors)
        return cg_fail(error, CG_BAD_INPUT, "%s holds %d tensors, expected %d: is it of another model?", path,
                       cg_safetensors_count(file), n_tensors);
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
            "%s was trained on other data (fingerprint %s, now %s): give the same --data, or start anew", path,
            cg_safetensors_metadata(file, "data"), data);
    for (int i = 0; ok && i < n_tensors; i++) {
        const cg_tensor *to = &tensors[i].tensor;
        memcpy(to->data, cg_safetensors_find(file, tensors[i].name)->data,
               (size_t)cg_tensor_bytes(to->dtype, &to->shape));
    }
    if (ok) facts->step = atoll(cg_safetensors_metadata(file, "step"));
    cg_safetensors_close(file);
    return ok;
}

void cg_checkpoint_path(const char *dir, int64_t step, char *path, size_t path_bytes) {
    snprintf(path, path_bytes, "%s/checkpoint-%08lld.safetensors", dir, (long long)step);
}

int cg_checkpoint_list(const char *dir, int64_t *steps, int max) {
    DIR *folder = opendir(dir);
    if (!folder) return 0;
    int n = 0;
    for (struct dirent *entry; (entry = readdir(folder));) {
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
    closedir(folder);
    return n;
}
