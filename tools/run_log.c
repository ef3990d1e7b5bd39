#include "tools/run_log.h"

#include "core/file.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct run_log {
    int fd;
    off_t end; /* of the last whole line */
    char path[512];
};

/* A line as text with its newline, malloc'd. */
static char *line_text(const json_t *line, size_t *bytes) {
    char *text = json_dumps(line, JSON_COMPACT | JSON_PRESERVE_ORDER | JSON_REAL_PRECISION(17));
    if (!text) return NULL;
    *bytes = strlen(text);
    text[(*bytes)++] = '\n'; /* in the place of the final 0 */
    return text;
}

static bool write_without(cg_file_writer *writer, json_t *line, const char *const *drop, cg_error *error) {
    for (; *drop; drop++) json_object_del(line, *drop);
    size_t bytes;
    char *text = line_text(line, &bytes);
    bool ok = text ? cg_file_write(writer, text, bytes, error) : cg_fail(error, CG_FAILED, "out of memory");
    free(text);
    return ok;
}

/* The lines to keep go to a new file that takes the old one's place. */
static bool drop_later_lines(const char *path, int64_t keep_step, const char *const *drop, json_t **first,
                             cg_error *error) {
    char *text = NULL;
    size_t bytes = 0;
    struct stat facts;
    if (stat(path, &facts) && errno == ENOENT) return true;
    if (!cg_file_read(path, (size_t)1 << 32, &text, &bytes, error)) return false;
    cg_file_writer *writer = cg_file_begin(path, error);
    bool ok = writer != NULL;
    for (char *line = text, *end; ok && (end = memchr(line, '\n', bytes - (size_t)(line - text)));
         line = end + 1) {
        json_t *object = json_loadb(line, (size_t)(end - line), 0, NULL);
        json_int_t step = json_integer_value(json_object_get(object, "step"));
        if (step == 1 && !*first) *first = json_incref(object);
        if (step == keep_step && drop && object)
            ok = write_without(writer, object, drop, error);
        else if (step >= 1 && step <= keep_step)
            ok = cg_file_write(writer, line, (size_t)(end - line) + 1, error);
        json_decref(object);
    }
    free(text);
    if (ok) return cg_file_commit(writer, error);
    cg_file_cancel(writer);
    return false;
}

run_log *run_log_open(const char *dir, int64_t keep_step, const char *const *drop, json_t **first,
                      cg_error *error) {
    run_log *log = calloc(1, sizeof *log);
    *first = NULL;
    if (!log) {
        cg_fail(error, CG_FAILED, "out of memory for a log");
        return NULL;
    }
    snprintf(log->path, sizeof log->path, "%s/metrics.jsonl", dir);
    if (drop_later_lines(log->path, keep_step, drop, first, error)) {
        log->fd = open(log->path, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
        if (log->fd >= 0 && (log->end = lseek(log->fd, 0, SEEK_END)) >= 0) return log;
        cg_fail(error, CG_FAILED, "%s cannot be opened: %s", log->path, strerror(errno));
        if (log->fd >= 0) close(log->fd);
    }
    free(log);
    return NULL;
}

static bool write_all(int fd, const char *text, size_t bytes) {
    while (bytes) {
        ssize_t n = write(fd, text, bytes);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        text += n;
        bytes -= (size_t)n;
    }
    return true;
}

bool run_log_write(run_log *log, json_t *line, cg_error *error) {
    size_t bytes;
    char *text = line_text(line, &bytes);
    json_decref(line);
    if (!text) return cg_fail(error, CG_FAILED, "out of memory for a line of %s", log->path);
    bool ok = write_all(log->fd, text, bytes);
    if (!ok) {
        cg_fail(error, CG_FAILED, "%s cannot be written: %s", log->path, strerror(errno));
        if (ftruncate(log->fd, log->end)) { /* half a line may stay, and a later resume drops it */
        }
        lseek(log->fd, log->end, SEEK_SET);
    } else {
        log->end += (off_t)bytes;
    }
    free(text);
    return ok;
}

bool run_log_sync(run_log *log, cg_error *error) {
    return fsync(log->fd) == 0 ||
           cg_fail(error, CG_FAILED, "%s cannot be written: %s", log->path, strerror(errno));
}

bool run_log_close(run_log *log, cg_error *error) {
    if (!log) return true;
    bool ok = fsync(log->fd) == 0 && close(log->fd) == 0;
    if (!ok) cg_fail(error, CG_FAILED, "%s cannot be written: %s", log->path, strerror(errno));
    free(log);
    return ok;
}
