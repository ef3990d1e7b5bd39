#include "core/base/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/base/shown.h"

/* "cannot DOING PATH: REASON". Only the end of a very long path is shown: the reason must fit into the
 * sentence too. */
static bool __attribute__((format(printf, 5, 6)))
fail_path(cg_error *error, cg_code code, const char *doing, const char *path, const char *format, ...) {
    enum { SHOWN = 240 };
    char reason[200];
    va_list args;
    va_start(args, format);
    vsnprintf(reason, sizeof reason, format, args);
    va_end(args);
    size_t length = strlen(path);
    bool clip = length > SHOWN;
    return cg_fail(error, code, "cannot %s %s%s: %s", doing, clip ? "..." : "",
                   clip ? path + length - SHOWN : path, reason);
}

cg_code cg_errno_code(int number) {
    bool machine = number == ENOSPC || number == EDQUOT || number == EFBIG || number == EIO ||
                   number == ENOMEM || number == EMFILE || number == ENFILE || number == ESTALE;
    return machine ? CG_FAILED : CG_BAD_INPUT;
}

static bool fail_errno(cg_error *error, int number, const char *doing, const char *path) {
    return fail_path(error, cg_errno_code(number), doing, path, "%s", strerror(number));
}

static const char *kind(mode_t mode) {
    if (S_ISDIR(mode)) return "a folder";
    if (S_ISFIFO(mode)) return "a pipe";
    if (S_ISSOCK(mode)) return "a socket";
    return "a device";
}

/* Read to the end, whatever the size said: files under /proc say 0, and a file may grow meanwhile. */
static bool read_all(int fd, const char *path, size_t expected, size_t max_bytes, char **data, size_t *bytes,
                     cg_error *error) {
    size_t n = 0, room = expected < SIZE_MAX - 1 ? expected + 1 : expected; /* the 1 is for noticing the end */
    char *buffer = malloc(room);
    if (!buffer) return fail_errno(error, ENOMEM, "read", path);
    for (;;) {
        if (n == room) {
            char *larger = room > SIZE_MAX / 2 ? NULL : realloc(buffer, room * 2);
            if (!larger) {
                free(buffer);
                return fail_errno(error, ENOMEM, "read", path);
            }
            buffer = larger;
            room *= 2;
        }
        ssize_t got = read(fd, buffer + n, room - n);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) {
            int number = errno;
            free(buffer);
            return fail_errno(error, number, "read", path);
        }
        if (got == 0) break;
        n += (size_t)got;
        if (n > max_bytes) {
            free(buffer);
            return fail_path(error, CG_BAD_INPUT, "read", path, "it has more than %zu bytes", max_bytes);
        }
    }
    buffer[n] = 0; /* the loop ends with room left */
    *data = buffer;
    *bytes = n;
    return true;
}

bool cg_file_read(const char *path, size_t max_bytes, char **data, size_t *bytes, cg_error *error) {
    /* O_NONBLOCK: opening a pipe must not wait for a writer; it changes nothing for a regular file. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0) return fail_errno(error, errno, "read", path);
    struct stat status;
    bool ok;
    if (fstat(fd, &status) != 0)
        ok = fail_errno(error, errno, "read", path);
    else if (!S_ISREG(status.st_mode))
        ok = fail_path(error, CG_BAD_INPUT, "read", path, "it is %s, not a file", kind(status.st_mode));
    else if ((uintmax_t)status.st_size > max_bytes)
        ok = fail_path(error, CG_BAD_INPUT, "read", path, "it has %lld bytes, at most %zu are accepted",
                       (long long)status.st_size, max_bytes);
    else
        ok = read_all(fd, path, (size_t)status.st_size, max_bytes, data, bytes, error);
    close(fd);
    return ok;
}

bool cg_file_try(const char *path, cg_error *error) {
    enum { PIECE = 1 << 20 };
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0) return fail_errno(error, errno, "read", path);
    struct stat status;
    char *piece = malloc(PIECE);
    bool ok = piece || fail_errno(error, ENOMEM, "read", path);
    if (ok && fstat(fd, &status) != 0)
        ok = fail_errno(error, errno, "read", path);
    else if (ok && !S_ISREG(status.st_mode))
        ok = fail_path(error, CG_BAD_INPUT, "read", path, "it is %s, not a file", kind(status.st_mode));
    for (ssize_t got = 1; ok && got;) {
        got = read(fd, piece, PIECE);
        if (got < 0 && errno != EINTR) ok = fail_errno(error, errno, "read", path);
    }
    free(piece);
    close(fd);
    return ok;
}

bool cg_file_map(const char *path, void **map, size_t *bytes, cg_error *error) {
    *map = NULL;
    *bytes = 0;
    /* O_NONBLOCK: opening a pipe must not wait for a writer. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0) return cg_fail(error, cg_errno_code(errno), "cannot be opened: %s", strerror(errno));
    struct stat status;
    bool ok = true;
    if (fstat(fd, &status) != 0)
        ok = cg_fail(error, CG_FAILED, "cannot be read: %s", strerror(errno));
    else if (!S_ISREG(status.st_mode))
        ok = cg_fail(error, CG_BAD_INPUT, "is %s, not a file",
                     S_ISDIR(status.st_mode) ? "a folder" : "a device or pipe");
    else if (status.st_size > 0) {
        void *start = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        ok = start != MAP_FAILED ||
             cg_fail(error, CG_FAILED, "cannot be mapped into memory: %s", strerror(errno));
        if (ok) {
            *map = start;
            *bytes = (size_t)status.st_size;
        }
    }
    close(fd);
    return ok;
}

void cg_file_unmap(void *map, size_t bytes) {
    if (map) munmap(map, bytes);
}

void cg_file_drop(const void *begin, size_t bytes) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), first = (uintptr_t)begin, end = first + bytes;
    first += (page - first % page) % page; /* whole pages: the rest of the outer two may be in use */
    end -= end % page;
    if (first < end) madvise((void *)first, end - first, MADV_DONTNEED);
}

bool cg_file_fail(cg_error *error, const cg_error *inner, const char *path) {
    return cg_fail(error, inner->code, "%s: %s", cg_shown_path(path).text, inner->text);
}

struct cg_file_writer {
    int fd, folder_fd;
    bool failed;
    char *path, *tmp;
};

/* The names of half-written files, for a signal handler: a name is removed before it is freed. */
enum { UNFINISHED = 16 };
static _Atomic(const char *) unfinished[UNFINISHED];

static void list_unfinished(const char *tmp) {
    for (int i = 0; i < UNFINISHED; i++) {
        const char *none = NULL;
        if (atomic_compare_exchange_strong(&unfinished[i], &none, tmp)) return;
    }
}

static void delist_unfinished(const char *tmp) {
    for (int i = 0; i < UNFINISHED; i++) {
        const char *same = tmp;
        if (atomic_compare_exchange_strong(&unfinished[i], &same, NULL)) return;
    }
}

void cg_file_remove_unfinished(void) {
    for (int i = 0; i < UNFINISHED; i++) {
        const char *tmp = unfinished[i];
        if (tmp) unlink(tmp);
    }
}

static void writer_free(cg_file_writer *writer) {
    delist_unfinished(writer->tmp);
    if (writer->fd >= 0) close(writer->fd);
    if (writer->folder_fd >= 0) close(writer->folder_fd);
    free(writer->path);
    free(writer->tmp);
    free(writer);
}

/* The name to write: `path`, or the file that it leads to when it is a symbolic link. `mode` is the older
 * file's, 0 when there is none. */
static char *target_path(const char *path, mode_t *mode, cg_error *error) {
    struct stat status;
    *mode = 0;
    if (lstat(path, &status) != 0) {
        if (errno != ENOENT || !*path) {
            fail_errno(error, errno, "write", path);
            return NULL;
        }
        char *copy = strdup(path);
        if (!copy) fail_errno(error, ENOMEM, "write", path);
        return copy;
    }
    char *target = S_ISLNK(status.st_mode) ? realpath(path, NULL) : strdup(path);
    if (!target || stat(target, &status) != 0) {
        fail_errno(error, errno, "write", path);
    } else if (!S_ISREG(status.st_mode)) {
        fail_path(error, CG_BAD_INPUT, "write", path, "it is %s, not a file", kind(status.st_mode));
    } else {
        *mode = status.st_mode;
        return target;
    }
    free(target);
    return NULL;
}

/* Open PATH.tmp and hold its lock, so that two programs never write one PATH.tmp and rename the mixture. */
static bool open_tmp(cg_file_writer *writer, cg_error *error) {
    for (;;) {
        writer->fd = open(writer->tmp, O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666);
        if (writer->fd < 0) return fail_errno(error, errno, "write", writer->tmp);
        if (flock(writer->fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
            return fail_path(error, CG_FAILED, "write", writer->tmp, "another writer holds it");
        /* Between open and lock another writer may have renamed this very file into its place. */
        struct stat held, named;
        if (fstat(writer->fd, &held) != 0) return fail_errno(error, errno, "write", writer->tmp);
        if (!S_ISREG(held.st_mode))
            return fail_path(error, CG_BAD_INPUT, "write", writer->tmp, "it is %s, not a file",
                             kind(held.st_mode));
        if (lstat(writer->tmp, &named) == 0 && held.st_ino == named.st_ino && held.st_dev == named.st_dev)
            break;
        close(writer->fd);
    }
    list_unfinished(writer->tmp);
    return ftruncate(writer->fd, 0) == 0 || fail_errno(error, errno, "write", writer->tmp);
}

static bool open_folder(cg_file_writer *writer, cg_error *error) {
    char *folder = strdup(writer->path);
    if (!folder) return fail_errno(error, ENOMEM, "write", writer->path);
    char *slash = strrchr(folder, '/');
    if (slash) slash[slash == folder] = 0; /* "/file" lies in "/" */
    writer->folder_fd = open(slash ? folder : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int number = errno;
    free(folder);
    return writer->folder_fd >= 0 || fail_errno(error, number, "write", writer->path);
}

cg_file_writer *cg_file_begin(const char *path, cg_error *error) {
    mode_t mode;
    char *target = target_path(path, &mode, error);
    if (!target) return NULL;
    cg_file_writer *writer = calloc(1, sizeof *writer);
    char *tmp = malloc(strlen(target) + sizeof ".tmp");
    if (!writer || !tmp) {
        free(target);
        free(writer);
        free(tmp);
        fail_errno(error, ENOMEM, "write", path);
        return NULL;
    }
    sprintf(tmp, "%s.tmp", target);
    *writer = (cg_file_writer){.fd = -1, .folder_fd = -1, .path = target, .tmp = tmp};
    if (!open_folder(writer, error) || !open_tmp(writer, error)) {
        writer_free(writer);
        return NULL;
    }
    /* Before any byte is written: a private file must not become readable to others by being rewritten. */
    if (mode && fchmod(writer->fd, mode & 0777) != 0) {
        fail_errno(error, errno, "set the permissions of", tmp);
        cg_file_cancel(writer);
        return NULL;
    }
    return writer;
}

bool cg_file_write(cg_file_writer *writer, const void *data, size_t bytes, cg_error *error) {
    const char *next = data;
    while (bytes > 0) {
        size_t piece = bytes < (size_t)1 << 30 ? bytes : (size_t)1 << 30;
        ssize_t done = write(writer->fd, next, piece);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) {
            writer->failed = true;
            return fail_errno(error, done < 0 ? errno : EIO, "write", writer->path);
        }
        next += done;
        bytes -= (size_t)done;
    }
    return true;
}

static int sync_fd(int fd) {
    int result;
    do result = fsync(fd);
    while (result != 0 && errno == EINTR);
    return result;
}

bool cg_file_commit(cg_file_writer *writer, cg_error *error) {
    bool ok = true;
    if (writer->failed)
        ok = fail_path(error, CG_FAILED, "write", writer->path, "an earlier part of it could not be written");
    else if (sync_fd(writer->fd) != 0)
        ok = fail_errno(error, errno, "write", writer->path);
    /* The lock is held until after the rename, and so is the descriptor; fsync has reported what close would.
     */
    else if (rename(writer->tmp, writer->path) != 0)
        ok = fail_errno(error, errno, "rename to", writer->path);
    if (!ok) {
        cg_file_cancel(writer);
        return false;
    }
    delist_unfinished(writer->tmp);
    /* EINVAL: a file system without fsync of folders (some network and FUSE ones); nothing can be done there.
     */
    if (sync_fd(writer->folder_fd) != 0 && errno != EINVAL)
        ok = fail_path(error, CG_FAILED, "secure", writer->path,
                       "it is written, but may not survive a power cut, as fsync of its folder failed: %s",
                       strerror(errno));
    writer_free(writer);
    return ok;
}

void cg_file_cancel(cg_file_writer *writer) {
    if (!writer) return;
    unlink(writer->tmp);
    writer_free(writer);
}

bool cg_file_can_write(const char *path, cg_error *error) {
    cg_file_writer *writer = cg_file_begin(path, error);
    cg_file_cancel(writer);
    return writer != NULL;
}

void cg_file_remove_stale(const char *path) {
    char *tmp = malloc(strlen(path) + sizeof ".tmp");
    if (!tmp) return;
    sprintf(tmp, "%s.tmp", path);
    int fd = open(tmp, O_WRONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    struct stat held, named; /* its lock is held while the name is removed: no writer takes it up meanwhile */
    if (fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) == 0 && !fstat(fd, &held) && !lstat(tmp, &named) &&
        held.st_ino == named.st_ino && held.st_dev == named.st_dev)
        unlink(tmp);
    if (fd >= 0) close(fd);
    free(tmp);
}

/* Made now or there before. mkdir gives other reasons than EEXIST for a folder that is there, such as EROFS. */
static bool make_one(const char *path, cg_error *error) {
    if (mkdir(path, 0777) == 0) return true;
    int number = errno;
    struct stat status;
    if (stat(path, &status) == 0) {
        if (S_ISDIR(status.st_mode)) return true;
        return fail_path(error, CG_BAD_INPUT, "make the folder", path, "a file of this name is in the way");
    }
    return fail_errno(error, number, "make the folder", path);
}

bool cg_folder_make(const char *path, cg_error *error) {
    if (!*path) return fail_errno(error, ENOENT, "make the folder", "\"\"");
    char *part = strdup(path);
    if (!part) return fail_errno(error, ENOMEM, "make the folder", path);
    bool ok = true;
    for (char *slash = strchr(part + 1, '/'); ok && slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        ok = make_one(part, error);
        *slash = '/';
    }
    ok = ok && make_one(part, error);
    free(part);
    return ok;
}

bool cg_folder_can_make(const char *path, cg_error *error) {
    char *part = strdup(*path ? path : "");
    if (!part) return fail_errno(error, ENOMEM, "make the folder", path);
    struct stat status;
    bool found = false, ok = *path || fail_errno(error, ENOENT, "make the folder", "\"\"");
    while (ok && !found) { /* up to the first one that is there */
        found = stat(part, &status) == 0;
        if (!found && errno != ENOENT) ok = fail_errno(error, errno, "make the folder", path);
        if (!ok || found) break;
        char *slash = strrchr(part, '/');
        if (!slash)
            strcpy(part, "."); /* a path has a byte and its 0 */
        else
            slash[slash == part] = 0;
    }
    if (ok && !S_ISDIR(status.st_mode))
        ok = fail_path(error, CG_BAD_INPUT, "make the folder", path, "a file of this name is in the way");
    else if (ok && access(part, W_OK | X_OK) != 0)
        ok = fail_errno(error, errno, "write to the folder", part);
    free(part);
    return ok;
}
