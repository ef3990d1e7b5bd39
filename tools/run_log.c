#include "tools/run_log.h"

#include "core/base/file.h"
#include "core/base/shown.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PATH_BYTES = 512 };

struct run_log {
    int fd;
    off_t end; /* of the last whole line */
    char path[PATH_BYTES];
};

static bool fail_log(const run_log *log, const char *what, int number, cg_error *error) {
    return cg_fail(error, CG_FAILED, "%s cannot be %s: %s", cg_shown_path(log->path).text, what,
                   strerror(number));
}

/* A line as text with its newline, malloc'd. */
static char *line_text(const json_t *line, size_t *bytes) {
    char *text = json_dumps(line, JSON_COMPACT | JSON_PRESERVE_ORDER | JSON_REAL_PRECISION(17));
    if (!text) return NULL;
    *bytes = strlen(text);
    text[(*bytes)++] = '\n'; /* in the place of the final 0 */
    return text;
}

static void path_of(const char *dir, char path[PATH_BYTES]) {
    snprintf(path, PATH_BYTES, "%s/metrics.jsonl", dir);
}

/* The whole text, malloc'd; NULL without an error when there is none. */
static char *read_text(const char *path, size_t *bytes, cg_error *error) {
    char *text = NULL;
    struct stat facts;
    *bytes = 0;
    if (stat(path, &facts) && errno == ENOENT) return NULL;
    cg_file_read(path, (size_t)1 << 40, &text, bytes, error);
    return text;
}

/* The end of the line at `line`: its newline; NULL when the text ends before. */
static const char *end_of(const char *line, const char *text, size_t bytes) {
    return memchr(line, '\n', bytes - (size_t)(line - text));
}

bool run_log_reaches(const json_t *line, double accuracy) {
    const json_t *value = json_object_get(line, "val_accuracy");
    return json_is_number(value) && json_number_value(value) >= accuracy;
}

bool run_log_read(const char *dir, int64_t keep_step, double accuracy, run_log_past *past, cg_error *error) {
    char path[PATH_BYTES], wrong[64] = "";
    size_t bytes;
    cg_error own = {0};
    *past = (run_log_past){0};
    path_of(dir, path);
    char *text = read_text(path, &bytes, &own);
    if (!text) return own.code == CG_OK || cg_fail(error, own.code, "%s", own.text);
    const char *line = text, *end;
    int64_t number = 1, step = 0;
    for (; step < keep_step && !*wrong; number++, line = end + 1) {
        if (!(end = end_of(line, text, bytes))) {
            snprintf(wrong, sizeof wrong, "the log ends before it");
            break;
        }
        json_t *object = json_loadb(line, (size_t)(end - line), JSON_REJECT_DUPLICATES, NULL);
        const json_t *value = json_object_get(object, "step");
        json_int_t got = json_integer_value(value);
        bool begins = number == 1 && json_is_true(json_object_get(object, RUN_LOG_BEGINS));
        if (!json_is_object(object))
            snprintf(wrong, sizeof wrong, "it is no JSON object");
        else if (!json_is_integer(value))
            snprintf(wrong, sizeof wrong, "it has no step");
        else if (begins ? got < 1 || got > keep_step : got != step + 1)
            snprintf(wrong, sizeof wrong, "it is of step %lld", (long long)got);
        if (*wrong) {
            json_decref(object);
            break;
        }
        step = got;
        if (number == 1) past->first = json_incref(object);
        if (step == keep_step)
            past->last = json_incref(object);
        else if (!past->reached && run_log_reaches(object, accuracy))
            past->reached = step;
        json_decref(object);
    }
    free(text);
    if (!*wrong) return true;
    json_decref(past->first);
    past->first = NULL;
    return cg_fail(error, CG_BAD_INPUT,
                   "%s, line %lld: %s, expected the line of step %lld; mend the log, or remove it to go on "
                   "without what it holds",
                   cg_shown_path(path).text, (long long)number, wrong, (long long)step + 1);
}

/* The lines to keep go to a new file that takes the old one's place. */
static bool drop_later_lines(const char *path, int64_t n_lines, const json_t *last, cg_error *error) {
    size_t bytes, last_bytes = 0;
    cg_error own = {0};
    char *text = read_text(path, &bytes, &own), *last_text = NULL;
    if (!text) return own.code == CG_OK || cg_fail(error, own.code, "%s", own.text);
    const char *keep = text, *end; /* up to here the lines stay as they are */
    for (int64_t i = 0; i < n_lines - (last != NULL) && (end = end_of(keep, text, bytes)); i++) keep = end + 1;
    cg_file_writer *writer = cg_file_begin(path, error);
    bool ok = writer && cg_file_write(writer, text, (size_t)(keep - text), error);
    if (ok && last) {
        last_text = line_text(last, &last_bytes);
        ok = last_text ? cg_file_write(writer, last_text, last_bytes, error)
                       : cg_fail(error, CG_FAILED, "out of memory for a line of %s", cg_shown_path(path).text);
    }
    free(text);
    free(last_text);
    if (ok) return cg_file_commit(writer, error);
    cg_file_cancel(writer);
    return false;
}

run_log *run_log_open(const char *dir, int64_t n_lines, const json_t *last, cg_error *error) {
    run_log *log = calloc(1, sizeof *log);
    if (!log) {
        cg_fail(error, CG_FAILED, "out of memory for a log");
        return NULL;
    }
    path_of(dir, log->path);
    if (drop_later_lines(log->path, n_lines, last, error)) {
        log->fd = open(log->path, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
        if (log->fd >= 0 && (log->end = lseek(log->fd, 0, SEEK_END)) >= 0) return log;
        fail_log(log, "opened", errno, error);
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
    if (!text)
        return cg_fail(error, CG_FAILED, "out of memory for a line of %s", cg_shown_path(log->path).text);
    bool ok = write_all(log->fd, text, bytes);
    if (!ok) {
        fail_log(log, "written", errno, error);
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
    return fsync(log->fd) == 0 || fail_log(log, "written", errno, error);
}

bool run_log_close(run_log *log, cg_error *error) {
    if (!log) return true;
    bool ok = fsync(log->fd) == 0 && close(log->fd) == 0;
    if (!ok) fail_log(log, "written", errno, error);
    free(log);
    return ok;
}
