/* What is fuzzed: every reader of bytes from outside, by the function that the program itself calls.
 *
 * A target gets any bytes. Beyond what the sanitizers see, it aborts when a refusal is no clean sentence, and when
 * what was accepted does not stand: data outside its bounds, a configuration that does not come back the same.
 * tests/fuzz/fuzz.c gives one to libFuzzer; tests/test_fuzz_corpus.c gives all of them the stored files. */
#ifndef CG_TESTS_FUZZ_TARGETS_H
#define CG_TESTS_FUZZ_TARGETS_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* memfd_create */
#endif
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <zlib.h>

#include "core/files/archive.h"
#include "models/dsv4/config.h"
#include "models/check/dump.h"
#include "models/check/row.h"
#include "models/train/topk_log.h"
#include "models/check/verdict.h"

typedef void fuzz_target(const uint8_t *data, size_t size);

static inline void fuzz_expect(bool ok, const char *what, const char *text) {
    if (ok) return;
    fprintf(stderr, "%s: %s\n", what, text);
    abort();
}

/* One line that names a cause, for bad input; anything else is memory that ran out. */
static inline void fuzz_check_refusal(const cg_error *error) {
    fuzz_expect(error->code == CG_BAD_INPUT || (error->code == CG_FAILED && strstr(error->text, "no memory")),
                "a refusal with another code than bad input", error->text);
    fuzz_expect(error->text[0] != 0, "a refusal without a sentence", "");
    for (const char *c = error->text; *c; c++)
        fuzz_expect((unsigned char)*c >= 0x20 && *c != 0x7f, "a sentence with control characters", error->text);
}

/* A file that lies in memory only. */
typedef struct fuzz_file {
    int fd;
    char path[40];
} fuzz_file;

static inline fuzz_file fuzz_file_make(const void *data, size_t size) {
    fuzz_file file = {memfd_create("fuzz", MFD_CLOEXEC), ""};
    fuzz_expect(file.fd >= 0 && write(file.fd, data, size) == (ssize_t)size, "no file in memory", "");
    snprintf(file.path, sizeof file.path, "/proc/self/fd/%d", file.fd);
    return file;
}

/* Reads every byte, so that one outside its bounds is seen. */
static inline void fuzz_touch(const cg_named_tensor *t) {
    volatile unsigned sum = 0;
    const unsigned char *data = t->tensor.data;
    int64_t bytes = cg_tensor_bytes(t->tensor.dtype, &t->tensor.shape);
    fuzz_expect(t->tensor.shape.n_dims >= 0 && t->tensor.shape.n_dims <= CG_MAX_DIMS && bytes >= 0, "bad shape",
                t->name);
    for (int64_t i = 0; i < bytes; i++) sum += data[i];
    for (const char *c = t->name; *c; c++) sum += (unsigned char)*c;
}

/* What a file lists has a name, a dtype and bytes that it holds; what is read is what is found. */
static inline void fuzz_entry(const cg_entry *e, const cg_tensor *found, size_t size) {
    fuzz_expect(e->tensor == found, "an entry that is another tensor", e->name);
    fuzz_expect(e->name && e->dtype && e->bytes >= 0, "an entry that lacks something", e->name);
    fuzz_expect(!found || cg_tensor_bytes(found->dtype, &found->shape) == e->bytes, "other bytes", e->name);
    fuzz_expect(found || (uint64_t)e->bytes <= size * UINT64_C(1032), "more bytes than the file has", e->name);
}

static inline void fuzz_safetensors(const uint8_t *data, size_t size) {
    fuzz_file file = fuzz_file_make(data, size);
    cg_error error = {0};
    cg_safetensors *tensors = cg_safetensors_open(file.path, &error);
    if (!tensors) {
        fuzz_check_refusal(&error);
    } else {
        const char *key, *value;
        for (int i = 0; i < cg_safetensors_count(tensors); i++) {
            const cg_named_tensor *t = cg_safetensors_at(tensors, i);
            fuzz_touch(t);
            fuzz_expect(cg_safetensors_find(tensors, t->name) == &t->tensor, "a name that is not found",
                        t->name);
        }
        for (int i = 0; i < cg_safetensors_n_entries(tensors); i++) {
            const cg_entry *e = cg_safetensors_entry(tensors, i);
            fuzz_entry(e, cg_safetensors_find(tensors, e->name), size);
        }
        for (void *at = NULL; cg_safetensors_metadata_next(tensors, &at, &key, &value);)
            fuzz_expect(cg_safetensors_metadata(tensors, key) == value, "metadata that is not found", key);
    }
    cg_safetensors_close(tensors);
    close(file.fd);
}

/* npy and npz; safetensors too, through the common front. */
static inline void fuzz_archive(const uint8_t *data, size_t size) {
    fuzz_file file = fuzz_file_make(data, size);
    cg_error error = {0};
    cg_archive *archive = cg_archive_open(file.path, &error);
    if (!archive) fuzz_check_refusal(&error);
    for (int i = 0; archive && i < cg_archive_count(archive); i++) {
        const cg_named_tensor *t = cg_archive_at(archive, i);
        fuzz_touch(t);
        fuzz_expect((uintptr_t)t->tensor.data % cg_dtype_bytes(t->tensor.dtype) == 0,
                    "data that is not aligned", t->name);
        fuzz_expect(cg_archive_find(archive, t->name) == &t->tensor, "a name that is not found", t->name);
    }
    for (int i = 0; archive && i < cg_archive_n_entries(archive); i++) {
        const cg_entry *e = cg_archive_entry(archive, i);
        fuzz_entry(e, cg_archive_find(archive, e->name), size);
        fuzz_expect(!cg_archive_unread(archive, e->name) == (e->tensor != NULL), "read and unread", e->name);
    }
    cg_archive_close(archive);
    close(file.fd);
}

/* What is accepted is written and read again: the same. */
static inline void fuzz_config(const uint8_t *data, size_t size) {
    fuzz_file file = fuzz_file_make(data, size);
    cg_error error = {0};
    cg_config config = cg_config_toy();
    if (!cg_config_load(&config, file.path, &error)) {
        fuzz_check_refusal(&error);
    } else {
        fuzz_expect(cg_config_check(&config, &error), "accepted and then refused", error.text);
        char *text = cg_config_json(&config);
        fuzz_expect(text != NULL, "a configuration that is not written", "");
        fuzz_file again = fuzz_file_make(text, strlen(text));
        cg_config same = cg_config_toy();
        fuzz_expect(cg_config_load(&same, again.path, &error), "written and then refused", error.text);
        char *same_text = cg_config_json(&same);
        fuzz_expect(same_text && !strcmp(text, same_text), "another configuration when read again", text);
        free(same_text);
        free(text);
        close(again.fd);
    }
    close(file.fd);
}

static inline void fuzz_row(const uint8_t *data, size_t size) {
    cg_error error = {0};
    char *copy = malloc(size ? size : 1); /* exactly its bytes, no 0 behind them */
    if (size) memcpy(copy, data, size);
    cg_row *row = cg_row_read(copy, size, NULL, 0, &error);
    free(copy);
    if (!row) {
        fuzz_check_refusal(&error);
        return;
    }
    /* "select" is the one number that makes a short text long work, a second for a million: bounded, and no fault. */
    bool slow = row->K > 1 << 12;
    cg_row_result *result = slow ? NULL : cg_row_run(row, NULL, &error);
    if (!result && !slow) fuzz_check_refusal(&error);
    for (int i = 0; result && i < result->n; i++) {
        const cg_row_array *a = &result->arrays[i];
        volatile double sum = 0;
        for (int64_t k = 0; k < a->rows * a->columns; k++) sum += a->x[k];
        fuzz_expect(cg_row_find(result, a->name) == a, "a result that is not found", a->name);
    }
    cg_row_result_free(result);
    cg_row_free(row);
}

/* A dump, as csagrad check opens it. Numbers that the file lacks (an npz has none) come from options. */
static inline cg_dump *fuzz_open_dump(const char *path, cg_error *error) {
    static const char *const numbers[][2] = {{"ratio", "4"}, {"window", "2"}, {"topk", "1"}};
    cg_dump_options options = {.paths = &path, .n_paths = 1};
    cg_dump *dump = cg_dump_open(&options, error);
    if (dump) return dump;
    fuzz_check_refusal(error);
    options.settings = numbers;
    options.n_settings = 3;
    *error = (cg_error){0};
    dump = cg_dump_open(&options, error);
    if (!dump) fuzz_check_refusal(error);
    return dump;
}

/* Whatever lists hold, they are read as keys of the row's segment. */
static inline void fuzz_lists(const cg_dump *dump) {
    for (int id = CG_DUMP_TOPK; id <= CG_DUMP_ATTN_TOPK; id++) {
        const cg_dump_array *a = &dump->array[id];
        int64_t *list = a->name ? malloc(sizeof *list * (size_t)(a->width + 1)) : NULL;
        for (int64_t t = 0; list && t < dump->T; t++) {
            const int64_t n = dump->segment[t] < 0 ? 0 : dump->n_keys[dump->segment[t]];
            cg_dump_list(dump, (cg_dump_id)id, t, list);
            for (int64_t k = 0; k < a->width; k++)
                fuzz_expect(list[k] >= -1 && list[k] < n, "a key beyond the segment", cg_dump_names[id]);
        }
        free(list);
    }
}

/* Every row that a dump offers. */
static inline void fuzz_dump(const uint8_t *data, size_t size) {
    fuzz_file file = fuzz_file_make(data, size);
    cg_error error = {0};
    cg_dump *dump = fuzz_open_dump(file.path, &error);
    for (int id = 0; dump && id < CG_DUMP_ARRAYS; id++) {
        const cg_dump_array *a = &dump->array[id];
        bool per_row = a->name && id != CG_DUMP_SINK && id != CG_DUMP_GRAD_SINK && id != CG_DUMP_LOSS &&
                       id != CG_DUMP_K_INDEXER && id != CG_DUMP_GRAD_K_INDEXER && id != CG_DUMP_COMPRESSED_KV &&
                       id != CG_DUMP_GRAD_COMPRESSED_KV &&
                       (id < CG_DUMP_CU_SEQLENS || id == CG_DUMP_VALID_ROWS);
        if (!per_row) continue;
        double *row = malloc(sizeof *row * (size_t)(a->heads * a->width + 1));
        for (int64_t t = 0; t < dump->T; t++) cg_dump_row(dump, (cg_dump_id)id, t, row);
        free(row);
        cg_dump_holds(dump, (cg_dump_id)id);
    }
    if (dump) fuzz_lists(dump);
    cg_dump *view = dump ? cg_dump_misread(dump, CG_MISREAD_KEYS_PACKED, &error) : NULL;
    if (view) fuzz_lists(view);
    cg_dump_close(view);
    cg_dump_close(dump);
    close(file.fd);
}

/* The whole verdict: a hundred times slower, so a target of its own. */
static inline void fuzz_check(const uint8_t *data, size_t size) {
    fuzz_file file = fuzz_file_make(data, size);
    cg_error error = {0};
    cg_dump *dump = fuzz_open_dump(file.path, &error);
    cg_verdict_options judging = {.n_worst = 1};
    cg_verdict *verdict = dump ? cg_verdict_make(dump, &judging, &error) : NULL;
    if (dump && !verdict) fuzz_check_refusal(&error);
    free(verdict);
    cg_dump_close(dump);
    close(file.fd);
}

/* A run of one CSA layer, 16 rows and 2 selected, small enough for many steps in a short file. */
static inline cg_feed *fuzz_feed(cg_config *config) {
    cg_error error = {0};
    *config = cg_config_default(CG_TASK_RECALL);
    config->num_hidden_layers = config->n_compress_ratios = config->batch_size = config->accumulate = 1;
    config->compress_ratios[0] = CG_RATIO_CSA;
    config->sliding_window = config->recall_pairs = config->index_topk = 2;
    config->seq_len = 16;
    cg_feed *feed = cg_feed_recall(config, &error);
    fuzz_expect(feed != NULL, "no feed", error.text);
    return feed;
}

/* The same file with the checksum that its content asks for: no fuzzer finds one. */
static inline bool fuzz_repair_topk(const char *path, fuzz_file *repaired) {
    static const char *const keys[] = {"format",     "data",       "seed",   "seq_len",    "batch_size",
                                       "accumulate", "index_topk", "layers", "first_step", "checksum"};
    const char *metadata[10][2];
    char line[512], sum_text[16];
    cg_safetensors *file = cg_safetensors_open(path, NULL);
    const cg_tensor *topk = file ? cg_safetensors_find(file, "topk") : NULL;
    bool ok = topk != NULL;
    uLong sum = ok ? crc32_z(0, topk->data, (size_t)cg_tensor_bytes(topk->dtype, &topk->shape)) : 0;
    for (int k = 0; ok && k < 10; k++) {
        if (k == 9) snprintf(sum_text, sizeof sum_text, "%08lx", sum);
        metadata[k][0] = keys[k];
        metadata[k][1] = k == 9 ? sum_text : cg_safetensors_metadata(file, keys[k]);
        ok = metadata[k][1] != NULL && strlen(metadata[k][1]) < 400;
        if (ok)
            sum = crc32(sum, (Bytef *)line,
                        (uInt)snprintf(line, sizeof line, "%s=%s\n", keys[k], metadata[k][1]));
    }
    const cg_named_tensor tensor = {"topk", ok ? *topk : (cg_tensor){0}};
    char *head = ok ? cg_safetensors_head(&tensor, 1, metadata, 10, 4096, NULL) : NULL;
    if (head) {
        *repaired = fuzz_file_make(head, 4096);
        size_t bytes = (size_t)cg_tensor_bytes(topk->dtype, &topk->shape);
        fuzz_expect(write(repaired->fd, topk->data, bytes) == (ssize_t)bytes, "no file in memory", "");
    }
    free(head);
    cg_safetensors_close(file);
    return head != NULL;
}

/* Read as the recording of three steps, then gone on with: whatever it holds, it is refused or can be appended to. */
static inline void fuzz_topk_file(const char *path) {
    cg_config config;
    cg_feed *feed = fuzz_feed(&config);
    cg_error error = {0};
    int32_t topk[16 * 2];
    cg_topk_reader *reader = cg_topk_reader_new(path, &config, feed, 1, 3, &error);
    if (!reader) fuzz_check_refusal(&error);
    for (int step = 1; reader && step <= 3; step++) {
        cg_topk_reader_get(reader, step, 0, 0, topk);
        for (int i = 0; i < 16 * 2; i++)
            fuzz_expect(topk[i] >= -1 && topk[i] < 4, "a row that is not there", path);
    }
    bool was_read = reader != NULL;
    cg_topk_reader_free(reader);
    error = (cg_error){0};
    cg_topk_writer *writer = cg_topk_writer_new(path, &config, feed, 4, true, &error);
    if (!writer) fuzz_check_refusal(&error);
    for (int i = 0; writer && i < 16 * 2; i++) cg_topk_writer_slot(writer, 0, 0)[i] = -1;
    if (writer) fuzz_expect(cg_topk_writer_append(writer, &error), "not appended", error.text);
    cg_topk_writer_free(writer);
    if (writer && was_read) {
        reader = cg_topk_reader_new(path, &config, feed, 1, 4, &error);
        fuzz_expect(reader != NULL, "appended and then refused", error.text);
        cg_topk_reader_free(reader);
    }
    cg_feed_free(feed);
}

static inline void fuzz_topk(const uint8_t *data, size_t size) {
    fuzz_file file = fuzz_file_make(data, size), repaired;
    if (fuzz_repair_topk(file.path, &repaired)) {
        fuzz_topk_file(repaired.path);
        close(repaired.fd);
    }
    fuzz_topk_file(file.path);
    close(file.fd);
}

static const struct {
    const char *name;
    fuzz_target *run;
} fuzz_targets[] = {{"safetensors", fuzz_safetensors},
                    {"archive", fuzz_archive},
                    {"config", fuzz_config},
                    {"row", fuzz_row},
                    {"dump", fuzz_dump},
                    {"check", fuzz_check},
                    {"topk", fuzz_topk}};
enum { N_FUZZ_TARGETS = sizeof fuzz_targets / sizeof fuzz_targets[0] };

#endif
