#include "models/train/topk_log.h"

#include "core/base/file.h"
#include "core/files/safetensors.h"
#include "core/base/shown.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

/* The head of a file that csagrad writes: room for the layers of the deepest model, and data that begins on a page. */
enum { HEAD_BYTES = 4096 };

static const char format_name[] = "csagrad topk 1";

/* In the order of the checksum. */
enum { FORMAT, DATA, SEED, SEQ_LEN, BATCH_SIZE, ACCUMULATE, INDEX_TOPK, LAYERS, FIRST_STEP, N_KEYS };
static const char *const keys[N_KEYS] = {"format",     "data",       "seed",   "seq_len",   "batch_size",
                                         "accumulate", "index_topk", "layers", "first_step"};

/* What a run's selections look like and what they belong to; texts[FIRST_STEP] is the file's own. */
typedef struct identity {
    int64_t accumulate, n_layers, n_rows, topk;
    int layers[CG_MAX_LAYERS];
    char texts[N_KEYS][5 * CG_MAX_LAYERS];
} identity;

static size_t selection_bytes(const identity *id) { return (size_t)(id->n_rows * id->topk) * sizeof(int32_t); }
static size_t step_bytes(const identity *id) {
    return (size_t)(id->accumulate * id->n_layers) * selection_bytes(id);
}

static bool identify(const cg_config *config, const cg_feed *feed, identity *id, cg_error *error) {
    *id = (identity){
        .accumulate = config->accumulate, .n_rows = cg_feed_facts_of(feed)->n_rows, .topk = config->index_topk};
    char *layers = id->texts[LAYERS];
    for (int64_t i = 0; i < config->num_hidden_layers; i++) {
        if (config->compress_ratios[i] != CG_RATIO_CSA) continue;
        layers += sprintf(layers, "%s%d", id->n_layers ? "," : "", (int)i);
        id->layers[id->n_layers++] = (int)i;
    }
    if (!id->n_layers || !id->topk)
        return cg_fail(error, CG_BAD_INPUT, "this run selects nothing that could be recorded or replayed: %s",
                       id->n_layers ? "index_topk is 0" : "compress_ratios holds no 4");
    const int64_t numbers[] = {[SEED] = config->seed,
                               [SEQ_LEN] = config->seq_len,
                               [BATCH_SIZE] = config->batch_size,
                               [ACCUMULATE] = config->accumulate,
                               [INDEX_TOPK] = config->index_topk};
    strcpy(id->texts[FORMAT], format_name);
    sprintf(id->texts[DATA], "%016" PRIx64, cg_feed_facts_of(feed)->fingerprint);
    for (int k = SEED; k <= INDEX_TOPK; k++) sprintf(id->texts[k], "%" PRId64, numbers[k]);
    return true;
}

/* ---- checksums ---- */

/* Over mapped memory, whose pages are given back behind it: a long recording must not count as memory of the run. */
static uLong crc_of_data(uLong crc, const char *data, size_t bytes) {
    enum { PIECE = 1 << 22 };
    for (size_t at = 0; at < bytes; at += PIECE) {
        size_t n = bytes - at < PIECE ? bytes - at : PIECE;
        crc = crc32(crc, (const Bytef *)data + at, (uInt)n);
        cg_file_drop(data + at, n);
    }
    return crc;
}

static void checksum_text(uLong crc, const char *const *texts, char text[9]) {
    for (int k = 0; k < N_KEYS; k++) {
        crc = crc32(crc, (const Bytef *)keys[k], (uInt)strlen(keys[k]));
        crc = crc32(crc, (const Bytef *)"=", 1);
        crc = crc32(crc, (const Bytef *)texts[k], (uInt)strlen(texts[k]));
        crc = crc32(crc, (const Bytef *)"\n", 1);
    }
    snprintf(text, 9, "%08lx", crc);
}

/* ---- an open file ---- */

typedef struct recording {
    cg_safetensors *file;
    const char *topk; /* at any address: files of other writers are read too */
    int64_t first_step, n_steps;
} recording;

static bool check_whole(const char *path, const recording *r, const char *texts[N_KEYS], cg_error *error) {
    const char *want = cg_safetensors_metadata(r->file, "checksum");
    bool complete = want != NULL;
    for (int k = 0; k < N_KEYS; k++) complete &= (texts[k] = cg_safetensors_metadata(r->file, keys[k])) != NULL;
    const cg_tensor *topk = cg_safetensors_find(r->file, "topk");
    if (!complete || strcmp(texts[FORMAT], format_name) || !topk || cg_safetensors_n_entries(r->file) != 1)
        return cg_fail(error, CG_BAD_INPUT,
                       "%s is not a recording of selections (of format \"%s\", with one tensor topk)",
                       cg_shown_path(path).text, format_name);
    char got[9];
    checksum_text(crc_of_data(0, topk->data, (size_t)cg_tensor_bytes(topk->dtype, &topk->shape)), texts, got);
    return !strcmp(got, want) ||
           cg_fail(error, CG_BAD_INPUT, "%s is damaged: its content has checksum %s, expected %s",
                   cg_shown_path(path).text, got, cg_shown(want).text);
}

/* A whole recording of the run that `id` tells of. */
static bool open_recording(const char *path, const identity *id, recording *r, cg_error *error) {
    const char *texts[N_KEYS];
    if (!(r->file = cg_safetensors_open(path, error)) || !check_whole(path, r, texts, error)) return false;
    for (int k = DATA; k < FIRST_STEP; k++)
        if (strcmp(texts[k], id->texts[k]))
            return cg_fail(error, CG_BAD_INPUT, "%s was recorded with %s %s, this run has %s",
                           cg_shown_path(path).text, keys[k], cg_shown(texts[k]).text, id->texts[k]);
    const cg_tensor *topk = cg_safetensors_find(r->file, "topk");
    const int64_t *dims = topk->shape.dims;
    char shape[160];
    if (topk->dtype != CG_I32 || topk->shape.n_dims != 4 || dims[0] % id->accumulate ||
        dims[1] != id->n_layers || dims[2] != id->n_rows || dims[3] != id->topk)
        return cg_fail(error, CG_BAD_INPUT,
                       "%s: topk is %s %s, expected i32 [%" PRId64 " * steps, %" PRId64 ", %" PRId64
                       ", %" PRId64 "] (micro-batches, CSA layers, rows, index_topk)",
                       cg_shown_path(path).text, cg_dtype_name(topk->dtype),
                       cg_shape_text(&topk->shape, shape, sizeof shape), id->accumulate, id->n_layers,
                       id->n_rows, id->topk);
    char *end;
    errno = 0;
    r->first_step = strtoll(texts[FIRST_STEP], &end, 10);
    if (errno || *end || r->first_step < 1 || r->first_step > INT64_MAX / 2)
        return cg_fail(error, CG_BAD_INPUT, "%s: first_step is \"%s\", expected a number from 1",
                       cg_shown_path(path).text, cg_shown(texts[FIRST_STEP]).text);
    r->topk = topk->data;
    r->n_steps = dims[0] / id->accumulate;
    return true;
}

/* An advisory lock: a recording that is read must not be cut meanwhile. A file system without locks is used without.
 */
static bool lock(int fd, int how, const char *path, cg_error *error) {
    if (flock(fd, how | LOCK_NB) == 0 || errno != EWOULDBLOCK) return true;
    return cg_fail(error, CG_BAD_INPUT, "%s is in use: another run records to it%s", cg_shown_path(path).text,
                   how == LOCK_EX ? " or replays it" : "");
}

/* ---- what a row may select ---- */

/* Rows of one segment, by what segment_rows says of them (ops/ops.h): row start + p sees the compressed rows from
 * `first` on, (p + 1) / ratio of them if it is real. The sentence comes without file and step. `taken` holds, by
 * compressed row, the last row that selected it. */
static bool check_segment(const identity *id, const int32_t *topk, int64_t start, int64_t physical,
                          int64_t real, int64_t first, int64_t *taken, cg_error *error) {
    for (int64_t p = 0; p < physical; p++) {
        int64_t row = start + p, visible = p < real ? (p + 1) / CG_RATIO_CSA : 0;
        for (int64_t j = 0; j < id->topk; j++) {
            int64_t chosen = topk[row * id->topk + j];
            if (chosen == -1) continue;
            if (chosen < first || chosen >= first + visible) {
                char range[64] = "";
                if (visible)
                    snprintf(range, sizeof range, " or %" PRId64 " to %" PRId64, first, first + visible - 1);
                return cg_fail(error, CG_BAD_INPUT,
                               "row %" PRId64 ": topk[%" PRId64 "] is %" PRId64
                               ", expected -1%s (the compressed rows that it sees)",
                               row, j, chosen, range);
            }
            if (taken[chosen] == row)
                return cg_fail(error, CG_BAD_INPUT,
                               "row %" PRId64 ": topk[%" PRId64 "] is %" PRId64 ", which it selects twice", row,
                               j, chosen);
            taken[chosen] = row;
        }
    }
    return true;
}

static bool check_selection(const identity *id, const int32_t *topk, const cg_batch *batch, int64_t *taken,
                            cg_error *error) {
    for (int64_t c = 0; c <= id->n_rows / CG_RATIO_CSA; c++) taken[c] = -1;
    int64_t first = 0;
    for (int64_t b = 0; b < batch->max_segments; b++) {
        int64_t start = batch->cu_seqlens[b], physical = batch->cu_seqlens[b + 1] - start;
        if (!check_segment(id, topk, start, physical, batch->seqlens[b], first, taken, error)) return false;
        first += physical / CG_RATIO_CSA;
    }
    int64_t end = batch->cu_seqlens[batch->max_segments];
    return check_segment(id, topk, end, id->n_rows - end, 0, first, taken, error);
}

/* ---- reading ---- */

struct cg_topk_reader {
    identity id;
    recording recording;
    int lock;
};

static bool check_steps(const cg_topk_reader *reader, const char *path, const cg_feed *feed, int64_t first,
                        int64_t last, cg_error *error) {
    const identity *id = &reader->id;
    cg_error inner = {0};
    cg_batch *batch = cg_batch_new(feed, &inner);
    int32_t *topk = malloc(selection_bytes(id));
    int64_t *taken = malloc(((size_t)(id->n_rows / CG_RATIO_CSA) + 1) * sizeof *taken);
    bool ok = batch && ((topk && taken) || cg_fail(&inner, CG_FAILED, "out of memory"));
    for (int64_t step = first; ok && step <= last; step++)
        for (int64_t i = 0; ok && i < id->accumulate; i++) {
            cg_feed_batch(feed, false, (uint64_t)((step - 1) * id->accumulate + i), batch);
            for (int l = 0; ok && l < id->n_layers; l++) {
                cg_topk_reader_get(reader, step, i, l, topk);
                if (!(ok = check_selection(id, topk, batch, taken, &inner)))
                    cg_error_at(&inner, "step %" PRId64 ", micro-batch %" PRId64 ", layer %d", step, i,
                                id->layers[l]);
            }
        }
    cg_batch_free(batch);
    free(topk);
    free(taken);
    return ok || cg_file_fail(error, &inner, path);
}

static bool open_reader(cg_topk_reader *reader, const char *path, const cg_config *config, const cg_feed *feed,
                        int64_t first, int64_t last, cg_error *error) {
    recording *r = &reader->recording;
    if (!identify(config, feed, &reader->id, error)) return false;
    reader->lock =
        open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY); /* what cannot be opened is named below */
    if (reader->lock >= 0 && !lock(reader->lock, LOCK_SH, path, error)) return false;
    if (!open_recording(path, &reader->id, r, error)) return false;
    if (first <= last && (first < r->first_step || last >= r->first_step + r->n_steps))
        return cg_fail(error, CG_BAD_INPUT,
                       "%s holds the selections of %" PRId64 " steps from step %" PRId64
                       " on, this run needs those of the steps %" PRId64 " to %" PRId64,
                       cg_shown_path(path).text, r->n_steps, r->first_step, first, last);
    return check_steps(reader, path, feed, first, last, error);
}

cg_topk_reader *cg_topk_reader_new(const char *path, const cg_config *config, const cg_feed *feed,
                                   int64_t first, int64_t last, cg_error *error) {
    cg_topk_reader *reader = calloc(1, sizeof *reader);
    if (!reader) {
        cg_fail(error, CG_FAILED, "out of memory while %s is opened", cg_shown_path(path).text);
        return NULL;
    }
    reader->lock = -1;
    if (open_reader(reader, path, config, feed, first, last, error)) return reader;
    cg_topk_reader_free(reader);
    return NULL;
}

void cg_topk_reader_free(cg_topk_reader *reader) {
    if (!reader) return;
    cg_safetensors_close(reader->recording.file);
    if (reader->lock >= 0) close(reader->lock);
    free(reader);
}

void cg_topk_reader_get(const cg_topk_reader *reader, int64_t step, int64_t micro_batch, int layer,
                        int32_t *topk) {
    const identity *id = &reader->id;
    int64_t n = (step - reader->recording.first_step) * id->accumulate + micro_batch;
    const char *from = reader->recording.topk + (size_t)(n * id->n_layers + layer) * selection_bytes(id);
    memcpy(topk, from, selection_bytes(id));
    cg_file_drop(from, selection_bytes(id));
}

/* ---- writing ---- */

struct cg_topk_writer {
    identity id;
    int fd;
    char *path;
    bool created;
    int64_t n_steps; /* that count; the file may hold later ones until the first is appended */
    uLong crc;       /* of the data of these steps */
    bool cut;        /* nothing lies behind them */
    int32_t *slots;
};

static off_t end_of(const cg_topk_writer *writer, int64_t n_steps) {
    return HEAD_BYTES + (off_t)n_steps * (off_t)step_bytes(&writer->id);
}

static bool fail_writing(const cg_topk_writer *writer, int number, cg_error *error) {
    return cg_fail(error, CG_FAILED, "%s cannot be written: %s", cg_shown_path(writer->path).text,
                   strerror(number));
}

static bool write_at(const cg_topk_writer *writer, const void *data, size_t bytes, off_t at, cg_error *error) {
    for (const char *next = data; bytes;) {
        ssize_t n = pwrite(writer->fd, next, bytes, at);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return fail_writing(writer, n < 0 ? errno : EIO, error);
        next += n;
        at += n;
        bytes -= (size_t)n;
    }
    return true;
}

static bool write_head(const cg_topk_writer *writer, int64_t n_steps, uLong crc, cg_error *error) {
    const identity *id = &writer->id;
    const char *texts[N_KEYS], *metadata[N_KEYS + 1][2];
    char sum[9];
    for (int k = 0; k < N_KEYS; k++) {
        texts[k] = metadata[k][1] = id->texts[k];
        metadata[k][0] = keys[k];
    }
    checksum_text(crc, texts, sum);
    metadata[N_KEYS][0] = "checksum";
    metadata[N_KEYS][1] = sum;
    const cg_named_tensor topk = {
        "topk", {CG_I32, CG_SHAPE(n_steps * id->accumulate, id->n_layers, id->n_rows, id->topk), NULL}};
    char *head = cg_safetensors_head(&topk, 1, metadata, N_KEYS + 1, HEAD_BYTES, error);
    bool ok = head && write_at(writer, head, HEAD_BYTES, 0, error);
    free(head);
    return ok;
}

static bool cut(cg_topk_writer *writer, cg_error *error) {
    writer->cut = ftruncate(writer->fd, end_of(writer, writer->n_steps)) == 0;
    return writer->cut || fail_writing(writer, errno, error);
}

/* Where the data ends by the head of a recording of ours, counted from HEAD_BYTES; -1: it is none. */
static int64_t headed_bytes(int fd) {
    char head[HEAD_BYTES];
    const char *format = NULL;
    json_int_t begin, end = -1;
    if (pread(fd, head, sizeof head, 0) != sizeof head) return -1;
    json_t *header = json_loadb(head + 8, sizeof head - 8, 0, NULL);
    if (json_unpack(header, "{s:{s:s}, s:{s:[I, I]}}", "__metadata__", keys[FORMAT], &format, "topk",
                    "data_offsets", &begin, &end) ||
        strcmp(format, format_name))
        end = -1;
    json_decref(header);
    return end;
}

/* What a killed program left behind the tensor of a recording. Anything else is left to the checks behind this. */
static void cut_torn_step(const cg_topk_writer *writer) {
    struct stat facts;
    int64_t end = headed_bytes(writer->fd);
    if (end >= 0 && !fstat(writer->fd, &facts) && end < facts.st_size - HEAD_BYTES &&
        ftruncate(writer->fd, HEAD_BYTES + (off_t)end)) { /* then the file is refused for these bytes */
    }
}

/* Nothing is lost with it: what a program leaves that is killed before its first step. */
static bool is_blank(int fd) {
    struct stat facts;
    return !fstat(fd, &facts) && S_ISREG(facts.st_mode) && (facts.st_size == 0 || headed_bytes(fd) == 0);
}

/* Take over what PATH holds of the steps before `next`. */
static bool go_on_with(cg_topk_writer *writer, int64_t next, cg_error *error) {
    identity *id = &writer->id;
    recording r = {0};
    struct stat facts;
    cut_torn_step(writer);
    bool ok = open_recording(writer->path, id, &r, error);
    if (ok && (fstat(writer->fd, &facts) || facts.st_size != end_of(writer, r.n_steps)))
        ok = cg_fail(
            error, CG_BAD_INPUT,
            "%s can be replayed, but a recording cannot go on in it: its data does not begin at byte %d",
            cg_shown_path(writer->path).text, HEAD_BYTES);
    if (ok && r.n_steps == 0) r.first_step = next;
    if (ok && (next < r.first_step || next > r.first_step + r.n_steps))
        ok = cg_fail(error, CG_BAD_INPUT,
                     "%s holds the selections of %" PRId64 " steps from step %" PRId64
                     " on: it cannot go on at step %" PRId64,
                     cg_shown_path(writer->path).text, r.n_steps, r.first_step, next);
    if (ok) {
        writer->n_steps = next - r.first_step;
        writer->crc = crc_of_data(0, r.topk, (size_t)writer->n_steps * step_bytes(id));
        sprintf(id->texts[FIRST_STEP], "%" PRId64, r.first_step);
    }
    cg_safetensors_close(r.file);
    return ok;
}

static bool make_folder_of(const char *path, cg_error *error) {
    char *folder = strdup(path), *slash = folder ? strrchr(folder, '/') : NULL;
    if (slash) *slash = 0;
    bool ok = folder ? !slash || slash == folder || cg_folder_make(folder, error)
                     : cg_fail(error, CG_FAILED, "out of memory while %s is made", cg_shown_path(path).text);
    free(folder);
    return ok;
}

static bool open_writer(cg_topk_writer *writer, const char *path, const cg_config *config, const cg_feed *feed,
                        int64_t next, bool go_on, cg_error *error) {
    identity *id = &writer->id;
    if (!identify(config, feed, id, error)) return false;
    sprintf(id->texts[FIRST_STEP], "%" PRId64, next);
    writer->path = strdup(path);
    writer->slots = malloc(step_bytes(id));
    if (!writer->path || !writer->slots)
        return cg_fail(error, CG_FAILED, "out of memory for the selections of a step");
    if (access(path, F_OK) == 0) {
        writer->fd = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
        if (writer->fd < 0 && go_on)
            return cg_fail(error, cg_errno_code(errno), "%s cannot be opened: %s", cg_shown_path(path).text,
                           strerror(errno));
        if (writer->fd >= 0 && (go_on || is_blank(writer->fd))) {
            if (!lock(writer->fd, LOCK_EX, path, error)) return false;
            if (!is_blank(writer->fd)) return go_on_with(writer, next, error);
            writer->created = true;
            return write_head(writer, 0, writer->crc, error);
        }
        return cg_fail(error, CG_BAD_INPUT, "%s is there already: name another file to record to",
                       cg_shown_path(path).text);
    }
    if (!make_folder_of(path, error)) return false;
    writer->fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (writer->fd < 0)
        return cg_fail(error, cg_errno_code(errno), "%s cannot be made: %s", cg_shown_path(path).text,
                       strerror(errno));
    writer->created = writer->cut = true;
    return lock(writer->fd, LOCK_EX, path, error) && write_head(writer, 0, writer->crc, error);
}

cg_topk_writer *cg_topk_writer_new(const char *path, const cg_config *config, const cg_feed *feed, int64_t next,
                                   bool go_on, cg_error *error) {
    cg_topk_writer *writer = calloc(1, sizeof *writer);
    if (!writer) {
        cg_fail(error, CG_FAILED, "out of memory for a recording");
        return NULL;
    }
    writer->fd = -1;
    if (open_writer(writer, path, config, feed, next, go_on, error)) return writer;
    cg_topk_writer_free(writer);
    return NULL;
}

int32_t *cg_topk_writer_slot(cg_topk_writer *writer, int64_t micro_batch, int layer) {
    const identity *id = &writer->id;
    return writer->slots + (micro_batch * id->n_layers + layer) * id->n_rows * id->topk;
}

bool cg_topk_writer_append(cg_topk_writer *writer, cg_error *error) {
    size_t bytes = step_bytes(&writer->id);
    if (!writer->cut && (!write_head(writer, writer->n_steps, writer->crc, error) || !cut(writer, error)))
        return false;
    uLong crc = crc32_z(writer->crc, (const Bytef *)writer->slots, bytes);
    if (!write_at(writer, writer->slots, bytes, end_of(writer, writer->n_steps), error) ||
        !write_head(writer, writer->n_steps + 1, crc, error)) {
        cut(writer, NULL);
        return false;
    }
    writer->n_steps++;
    writer->crc = crc;
    return true;
}

bool cg_topk_writer_sync(cg_topk_writer *writer, cg_error *error) {
    return fsync(writer->fd) == 0 || fail_writing(writer, errno, error);
}

void cg_topk_writer_free(cg_topk_writer *writer) {
    if (!writer) return;
    if (writer->created && writer->n_steps == 0) unlink(writer->path);
    if (writer->fd >= 0) close(writer->fd);
    free(writer->path);
    free(writer->slots);
    free(writer);
}
