/* Whole files: what is read, what is refused, and that a failed write leaves the old file and no litter. */
#define _GNU_SOURCE /* nftw */
#include <check.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "core/base/file.h"
#include "core/base/shown.h"

/* These stand before those of the C library, to act like a disk that is slow, interrupted or broken. */
static bool write_in_pieces;
static int n_writes, n_fsyncs, fail_fsync; /* fail_fsync: number of the call that fails, from 1 */
static int fail_fsync_errno;

ssize_t write(int fd, const void *data, size_t bytes) {
    if (write_in_pieces) {
        if (++n_writes % 2) {
            errno = EINTR;
            return -1;
        }
        if (bytes > 3) bytes = 3;
    }
    return syscall(SYS_write, fd, data, bytes);
}

int fsync(int fd) {
    if (++n_fsyncs == fail_fsync) {
        errno = fail_fsync_errno;
        return -1;
    }
    return (int)syscall(SYS_fsync, fd);
}

static char root[] = "test_core_file_XXXXXX"; /* made by main, one for all tests */
static char folder[64];                       /* of the running test */

static void enter_folder(void) {
    static int n;
    snprintf(folder, sizeof folder, "%s/%d_%d", root, (int)getpid(), n++);
    ck_assert_int_eq(mkdir(folder, 0777), 0);
}

static const char *at(const char *name) {
    static char paths[4][512];
    static int next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

static void put(const char *path, const void *data, size_t bytes) {
    FILE *f = fopen(path, "wb");
    ck_assert_ptr_nonnull(f);
    ck_assert_uint_eq(fwrite(data, 1, bytes, f), bytes);
    ck_assert_int_eq(fclose(f), 0);
}

static void expect_content(const char *path, const void *data, size_t bytes) {
    char *got = NULL;
    size_t got_bytes = 99;
    cg_error error = {0};
    ck_assert_msg(cg_file_read(path, SIZE_MAX, &got, &got_bytes, &error), "%s", error.text);
    ck_assert_int_eq(error.code, CG_OK);
    ck_assert_uint_eq(got_bytes, bytes);
    ck_assert_mem_eq(got, data, bytes);
    ck_assert_int_eq(got[bytes], 0);
    free(got);
}

static int n_entries(void) {
    DIR *dir = opendir(folder);
    ck_assert_ptr_nonnull(dir);
    int n = 0;
    while (readdir(dir)) n++;
    closedir(dir);
    return n - 2; /* . and .. */
}

static void expect_error(const cg_error *error, cg_code code, const char *path, const char *why) {
    ck_assert_int_eq(error->code, code);
    ck_assert_msg(strstr(error->text, path) != NULL, "'%s' is not in: %s", path, error->text);
    ck_assert_msg(strstr(error->text, why) != NULL, "'%s' is not in: %s", why, error->text);
    ck_assert_ptr_null(strchr(error->text, '\n'));
}

static void expect_unreadable(const char *path, size_t max_bytes, cg_code code, const char *why) {
    char *data = NULL;
    size_t bytes = 99;
    cg_error error = {0};
    ck_assert(!cg_file_read(path, max_bytes, &data, &bytes, &error));
    ck_assert_ptr_null(data);
    ck_assert_uint_eq(bytes, 99);
    expect_error(&error, code, path, why);
}

static void expect_unwritable(const char *path, cg_code code, const char *why) {
    cg_error error = {0};
    ck_assert_ptr_null(cg_file_begin(path, &error));
    expect_error(&error, code, path, why);
}

static bool write_whole(const char *path, const void *data, size_t bytes, cg_error *error) {
    cg_file_writer *writer = cg_file_begin(path, error);
    if (!writer) return false;
    if (cg_file_write(writer, data, bytes, error)) return cg_file_commit(writer, error);
    cg_file_cancel(writer);
    return false;
}

START_TEST(read_files) {
    put(at("text"), "one\ntwo\n", 8);
    expect_content(at("text"), "one\ntwo\n", 8);
    put(at("nul"), "a\0b\xff", 4);
    expect_content(at("nul"), "a\0b\xff", 4);
    put(at("empty"), "", 0);
    expect_content(at("empty"), "", 0);
    size_t bytes = 3000000;
    char *large = malloc(bytes);
    for (size_t i = 0; i < bytes; i++) large[i] = (char)(i * 7 + i / 251);
    put(at("large"), large, bytes);
    expect_content(at("large"), large, bytes);
    free(large);
}
END_TEST

START_TEST(read_limit) {
    put(at("ten"), "0123456789", 10);
    char *data;
    size_t bytes;
    ck_assert(cg_file_read(at("ten"), 10, &data, &bytes, NULL));
    ck_assert_uint_eq(bytes, 10);
    free(data);
    expect_unreadable(at("ten"), 9, CG_BAD_INPUT, "10 bytes, at most 9");
    expect_unreadable(at("ten"), 0, CG_BAD_INPUT, "10 bytes, at most 0");
}
END_TEST

/* The size of these files is said to be 0. */
START_TEST(read_files_of_unknown_size) {
    char *data = NULL;
    size_t bytes;
    cg_error error = {0};
    ck_assert_msg(cg_file_read("/proc/self/status", 1 << 20, &data, &bytes, &error), "%s", error.text);
    ck_assert_uint_gt(bytes, 100);
    ck_assert_uint_eq(strlen(data), bytes);
    ck_assert_ptr_nonnull(strstr(data, "Pid:"));
    free(data);
    expect_unreadable("/proc/self/status", 100, CG_BAD_INPUT, "more than 100 bytes");
}
END_TEST

START_TEST(read_refusals) {
    expect_unreadable(at("absent"), SIZE_MAX, CG_BAD_INPUT, strerror(ENOENT));
    expect_unreadable("", SIZE_MAX, CG_BAD_INPUT, strerror(ENOENT));
    expect_unreadable(folder, SIZE_MAX, CG_BAD_INPUT, "it is a folder, not a file");
    expect_unreadable("/dev/null", SIZE_MAX, CG_BAD_INPUT, "it is a device, not a file");
    expect_unreadable("/dev/zero", SIZE_MAX, CG_BAD_INPUT, "it is a device, not a file");
    ck_assert_int_eq(mkfifo(at("pipe"), 0666), 0);
    expect_unreadable(at("pipe"), SIZE_MAX, CG_BAD_INPUT, "it is a pipe, not a file"); /* and does not wait */
    put(at("file"), "x", 1);
    expect_unreadable(at("file/below"), SIZE_MAX, CG_BAD_INPUT, strerror(ENOTDIR));
    ck_assert_int_eq(symlink("loop", at("loop")), 0);
    expect_unreadable(at("loop"), SIZE_MAX, CG_BAD_INPUT, strerror(ELOOP));
    char *data;
    size_t bytes;
    ck_assert(!cg_file_read(at("absent"), SIZE_MAX, &data, &bytes, NULL));
}
END_TEST

/* Permission bits do not stop root, so this says something only for other users. */
START_TEST(read_without_permission) {
    if (geteuid() == 0) return;
    put(at("secret"), "x", 1);
    ck_assert_int_eq(chmod(at("secret"), 0), 0);
    expect_unreadable(at("secret"), SIZE_MAX, CG_BAD_INPUT, strerror(EACCES));
}
END_TEST

/* A file that opens but cannot be read: address 0 of this process is mapped to nothing. */
START_TEST(read_that_fails_midway) {
    int fd = open("/proc/self/mem", O_RDONLY);
    char byte;
    bool usable = fd >= 0 && read(fd, &byte, 1) < 0 && errno == EIO;
    if (fd >= 0) close(fd);
    if (usable) expect_unreadable("/proc/self/mem", SIZE_MAX, CG_FAILED, strerror(EIO));
}
END_TEST

START_TEST(long_paths_leave_room_for_the_reason) {
    char path[6000];
    memset(path, 'p', sizeof path);
    strcpy(path + sizeof path - 10, "/last.txt");
    char *data;
    size_t bytes;
    cg_error error = {0};
    ck_assert(!cg_file_read(path, SIZE_MAX, &data, &bytes, &error));
    expect_error(&error, CG_BAD_INPUT, "/last.txt", strerror(ENAMETOOLONG));
    error = (cg_error){0};
    ck_assert_ptr_null(cg_file_begin(path, &error));
    expect_error(&error, CG_BAD_INPUT, "/last.txt", strerror(ENAMETOOLONG));
}
END_TEST

START_TEST(write_new_and_over) {
    cg_error error = {0};
    ck_assert_msg(write_whole(at("f"), "first", 5, &error), "%s", error.text);
    expect_content(at("f"), "first", 5);
    cg_file_writer *writer = cg_file_begin(at("f"), &error);
    ck_assert_ptr_nonnull(writer);
    ck_assert(cg_file_write(writer, "a\0", 2, &error));
    ck_assert(cg_file_write(writer, NULL, 0, &error));
    ck_assert(cg_file_write(writer, "b", 1, &error));
    expect_content(at("f"), "first", 5); /* until commit the old one is there */
    ck_assert_int_eq(access(at("f.tmp"), F_OK), 0);
    ck_assert(cg_file_commit(writer, &error));
    expect_content(at("f"), "a\0b", 3);
    ck_assert(write_whole(at("f"), "", 0, &error));
    expect_content(at("f"), "", 0);
    ck_assert_int_eq(n_entries(), 1);
    ck_assert_int_eq(error.code, CG_OK);
}
END_TEST

START_TEST(write_in_the_current_folder) {
    int here = open(".", O_RDONLY | O_DIRECTORY);
    ck_assert_int_eq(chdir(folder), 0);
    cg_error error = {0};
    bool ok = write_whole("plain", "x", 1, &error);
    ck_assert_int_eq(fchdir(here), 0);
    close(here);
    ck_assert_msg(ok, "%s", error.text);
    expect_content(at("plain"), "x", 1);
    expect_unwritable("/absent_folder/x", CG_BAD_INPUT, strerror(ENOENT));
}
END_TEST

START_TEST(cancel_leaves_nothing) {
    cg_file_cancel(NULL);
    cg_file_writer *writer = cg_file_begin(at("f"), NULL);
    ck_assert(cg_file_write(writer, "x", 1, NULL));
    cg_file_cancel(writer);
    ck_assert_int_eq(n_entries(), 0);
    put(at("f"), "old", 3);
    cg_file_cancel(cg_file_begin(at("f"), NULL));
    expect_content(at("f"), "old", 3);
    ck_assert_int_eq(n_entries(), 1);
}
END_TEST

START_TEST(stale_tmp_is_overwritten) {
    put(at("f.tmp"), "a long rest of a killed program", 31);
    cg_error error = {0};
    ck_assert_msg(write_whole(at("f"), "new", 3, &error), "%s", error.text);
    expect_content(at("f"), "new", 3);
    ck_assert_int_eq(n_entries(), 1);
}
END_TEST

/* What a killed program left goes, what a program is writing stays. */
/* Asked before the work, without a trace. */
START_TEST(what_could_be_written) {
    put(at("f"), "old", 3);
    ck_assert(cg_file_can_write(at("f"), NULL) && cg_file_can_write(at("new"), NULL));
    ck_assert(!cg_file_can_write(at("absent/f"), NULL) && !cg_file_can_write(folder, NULL));
    ck_assert(cg_folder_can_make(folder, NULL) && cg_folder_can_make(at("a/b/c"), NULL));
    ck_assert(cg_folder_can_make("a/b", NULL) && cg_folder_can_make("a", NULL));
    ck_assert(cg_folder_can_make("/no/such/folder", NULL) == (access("/", W_OK) == 0));
    cg_error error = {0};
    ck_assert(!cg_folder_can_make(at("f"), &error));
    expect_error(&error, CG_BAD_INPUT, "/f", "a file of this name is in the way");
    ck_assert(!cg_folder_can_make(at("f/below"), NULL) && !cg_folder_can_make("", NULL));
    ck_assert_int_eq(n_entries(), 1);
    expect_content(at("f"), "old", 3);
}
END_TEST

START_TEST(control_characters_are_escaped) {
    cg_error error = {0};
    cg_fail(&error, CG_BAD_INPUT, "%s is no path", "a\nb\x1b[2J\x7f\xc2\x9b\xc2\xa0\xc3\xa9");
    ck_assert_str_eq(error.text, "a\\x0ab\\x1b[2J\\x7f\\u009b\xc2\xa0\xc3\xa9 is no path");
    cg_error_at(&error, "--out\t");
    ck_assert_ptr_nonnull(strstr(error.text, "--out\\x09: a\\x0ab"));
    char many[CG_ERROR_TEXT];
    memset(many, 1, sizeof many - 1);
    many[sizeof many - 1] = 0;
    error = (cg_error){0};
    cg_fail(&error, CG_BAD_INPUT, "%s", many);
    ck_assert_ptr_nonnull(memchr(error.text, 0, CG_ERROR_TEXT));
    ck_assert_int_gt(strlen(error.text), CG_ERROR_TEXT - 8);
    error = (cg_error){0}; /* a long form of a line end, half of a pair, the end of an isolate */
    cg_fail(&error, CG_BAD_INPUT, "%s", "\xc0\x8a \xed\xa0\x80 \xe2\x81\xa9");
    ck_assert_str_eq(error.text, "\\xc0\\x8a \\xed\\xa0\\x80 \\u2069");
}
END_TEST

/* Words are cut at their end, paths at their begin, and neither inside a letter. */
START_TEST(what_is_shown_is_cut_between_letters) {
    char word[304] = "x";
    for (int i = 0; i < 150; i++) memcpy(word + 1 + 2 * i, "\xc3\xa9", 3);
    const cg_shown_word cut = cg_shown(word);
    const cg_shown_end end = cg_shown_path(word), odd = cg_shown_path(strcat(word, "x"));
    ck_assert_uint_eq(strlen(cut.text), 77 + 3);
    ck_assert_int_eq(strncmp(cut.text, word, 77), 0);
    ck_assert_str_eq(cut.text + 77, "...");
    ck_assert_str_eq(cg_shown("x").text, "x");
    ck_assert_int_eq(strncmp(end.text, "...", 3), 0);
    ck_assert_uint_eq(strlen(end.text), 3 + 160);
    ck_assert_int_eq(strncmp(odd.text, "...\xc3\xa9", 5), 0);
    ck_assert_uint_eq(strlen(odd.text), 3 + 159);
}
END_TEST

/* What the machine lacks is no mistake of the user's. */
START_TEST(whose_failure_it_is) {
    static const int machine[] = {ENOSPC, EDQUOT, EFBIG, EIO, ENOMEM, EMFILE, ENFILE, ESTALE},
                     user[] = {ENOENT, EACCES, ENOTDIR, EISDIR, EROFS, ENAMETOOLONG};
    for (size_t i = 0; i < sizeof machine / sizeof *machine; i++)
        ck_assert_int_eq(cg_errno_code(machine[i]), CG_FAILED);
    for (size_t i = 0; i < sizeof user / sizeof *user; i++)
        ck_assert_int_eq(cg_errno_code(user[i]), CG_BAD_INPUT);
}
END_TEST

START_TEST(stale_tmp_is_removed) {
    put(at("f.tmp"), "half", 4);
    put(at("f"), "whole", 5);
    cg_file_writer *writer = cg_file_begin(at("g"), NULL);
    ck_assert_ptr_nonnull(writer);
    cg_file_remove_stale(at("f"));
    cg_file_remove_stale(at("g"));
    cg_file_remove_stale(at("absent"));
    ck_assert_int_eq(access(at("f.tmp"), F_OK), -1);
    ck_assert_int_eq(access(at("g.tmp"), F_OK), 0);
    expect_content(at("f"), "whole", 5);
    ck_assert(cg_file_commit(writer, NULL));
    ck_assert_int_eq(n_entries(), 2);
}
END_TEST

/* What a signal handler removes: all that is being written, and nothing that was written before. */
START_TEST(unfinished_files_are_removed) {
    ck_assert(write_whole(at("done"), "x", 1, NULL));
    cg_file_cancel(cg_file_begin(at("cancelled"), NULL));
    put(at("done.tmp"), "another's", 9);
    put(at("cancelled.tmp"), "another's", 9);
    cg_file_writer *writers[20];
    for (int i = 0; i < 20; i++) {
        char name[16];
        snprintf(name, sizeof name, "w%d", i);
        ck_assert_ptr_nonnull(writers[i] = cg_file_begin(at(name), NULL));
    }
    ck_assert_int_eq(n_entries(), 23);
    cg_file_remove_unfinished();
    ck_assert_int_eq(n_entries(), 23 - 16);
    for (int i = 0; i < 20; i++) cg_file_cancel(writers[i]);
    ck_assert_int_eq(n_entries(), 3);
}
END_TEST

START_TEST(two_writers_do_not_mix) {
    cg_error error = {0};
    cg_file_writer *first = cg_file_begin(at("f"), &error);
    ck_assert_ptr_nonnull(first);
    ck_assert(cg_file_write(first, "first", 5, &error));
    expect_unwritable(at("f"), CG_FAILED, "another writer holds it");
    ck_assert(cg_file_commit(first, &error));
    expect_content(at("f"), "first", 5);
    ck_assert(write_whole(at("f"), "second", 6, &error)); /* the first one's lock is gone */
    expect_content(at("f"), "second", 6);
}
END_TEST

START_TEST(permissions_are_kept) {
    struct stat status;
    umask(022);
    ck_assert(write_whole(at("new"), "x", 1, NULL));
    ck_assert_int_eq(stat(at("new"), &status), 0);
    ck_assert_uint_eq(status.st_mode & 0777, 0644);
    put(at("private"), "x", 1);
    ck_assert_int_eq(chmod(at("private"), 0600), 0);
    ck_assert(write_whole(at("private"), "y", 1, NULL));
    ck_assert_int_eq(stat(at("private"), &status), 0);
    ck_assert_uint_eq(status.st_mode & 0777, 0600);
}
END_TEST

START_TEST(links_are_followed) {
    ck_assert_int_eq(mkdir(at("real"), 0777), 0);
    put(at("real/f"), "old", 3);
    ck_assert_int_eq(symlink("real/f", at("link")), 0);
    cg_error error = {0};
    ck_assert_msg(write_whole(at("link"), "new", 3, &error), "%s", error.text);
    expect_content(at("real/f"), "new", 3);
    struct stat status;
    ck_assert_int_eq(lstat(at("link"), &status), 0);
    ck_assert(S_ISLNK(status.st_mode));
    ck_assert_int_eq(n_entries(), 2);
    ck_assert_int_eq(symlink("nowhere", at("dangling")), 0);
    expect_unwritable(at("dangling"), CG_BAD_INPUT, strerror(ENOENT));
    ck_assert_int_eq(symlink("/dev/null", at("sink")), 0);
    expect_unwritable(at("sink"), CG_BAD_INPUT, "it is a device, not a file");
    ck_assert_int_eq(symlink("real/f", at("g.tmp")), 0); /* a planted link is not written through */
    expect_unwritable(at("g"), CG_BAD_INPUT, strerror(ELOOP));
    expect_content(at("real/f"), "new", 3);
}
END_TEST

START_TEST(write_refusals) {
    put(at("file"), "x", 1);
    expect_unwritable(at("file/below"), CG_BAD_INPUT, strerror(ENOTDIR));
    expect_unwritable(at("absent/f"), CG_BAD_INPUT, strerror(ENOENT));
    expect_unwritable("", CG_BAD_INPUT, strerror(ENOENT));
    expect_unwritable(folder, CG_BAD_INPUT, "it is a folder, not a file");
    expect_unwritable("/dev/null", CG_BAD_INPUT, "it is a device, not a file");
    ck_assert_int_eq(mkfifo(at("pipe"), 0666), 0);
    expect_unwritable(at("pipe"), CG_BAD_INPUT, "it is a pipe, not a file");
    ck_assert_int_eq(mkdir(at("f.tmp"), 0777), 0);
    expect_unwritable(at("f"), CG_BAD_INPUT, strerror(EISDIR));
    ck_assert_int_eq(n_entries(), 3);
    ck_assert_ptr_null(cg_file_begin(at("absent/f"), NULL));
    struct stat status;
    ck_assert_int_eq(stat("/dev/null", &status), 0);
    ck_assert(S_ISCHR(status.st_mode));
}
END_TEST

/* A limit on file size stands in for a full disk: the write stops in the middle in the same way. */
START_TEST(disk_full_keeps_the_old_file) {
    put(at("f"), "old", 3);
    static char data[100000];
    struct rlimit limit;
    ck_assert_int_eq(getrlimit(RLIMIT_FSIZE, &limit), 0);
    struct rlimit small = {.rlim_cur = 5000, .rlim_max = limit.rlim_max};
    signal(SIGXFSZ, SIG_IGN);
    cg_error error = {0}, again = {0};
    cg_file_writer *writer = cg_file_begin(at("f"), &error);
    ck_assert_ptr_nonnull(writer);
    ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &small), 0);
    bool first = cg_file_write(writer, data, 4000, &error);
    bool second = cg_file_write(writer, data, sizeof data, &error);
    ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &limit), 0);
    ck_assert(first && !second);
    expect_error(&error, CG_FAILED, at("f"), strerror(EFBIG));
    struct stat status;
    ck_assert_int_eq(stat(at("f.tmp"), &status), 0);
    ck_assert_int_eq(status.st_size, 5000); /* it did stop in the middle */
    /* A caller that overlooks the failure gets no cut file. */
    ck_assert(!cg_file_commit(writer, &again));
    expect_error(&again, CG_FAILED, at("f"), "an earlier part");
    expect_content(at("f"), "old", 3);
    ck_assert_int_eq(n_entries(), 1);
}
END_TEST

START_TEST(short_and_interrupted_writes) {
    cg_error error = {0};
    write_in_pieces = true;
    bool ok = write_whole(at("f"), "0123456789", 10, &error);
    write_in_pieces = false;
    ck_assert_msg(ok, "%s", error.text);
    ck_assert_int_eq(n_writes, 8); /* 3 3 3 1, each interrupted once */
    expect_content(at("f"), "0123456789", 10);
}
END_TEST

START_TEST(fsync_of_file_and_folder) {
    cg_error error = {0};
    n_fsyncs = 0;
    ck_assert(write_whole(at("f"), "old", 3, &error));
    ck_assert_int_eq(n_fsyncs, 2);

    n_fsyncs = 0, fail_fsync = 1, fail_fsync_errno = EIO; /* the disk refuses late */
    ck_assert(!write_whole(at("f"), "new", 3, &error));
    expect_error(&error, CG_FAILED, at("f"), strerror(EIO));
    expect_content(at("f"), "old", 3);
    ck_assert_int_eq(n_entries(), 1);

    error = (cg_error){0};
    n_fsyncs = 0, fail_fsync = 1, fail_fsync_errno = EINTR;
    ck_assert_msg(write_whole(at("f"), "2nd", 3, &error), "%s", error.text);
    ck_assert_int_eq(n_fsyncs, 3);

    n_fsyncs = 0, fail_fsync = 2, fail_fsync_errno = EIO; /* the folder: the new file is in its place already */
    ck_assert(!write_whole(at("f"), "3rd", 3, &error));
    expect_error(&error, CG_FAILED, at("f"), "may not survive a power cut");
    expect_content(at("f"), "3rd", 3);

    error = (cg_error){0};
    n_fsyncs = 0, fail_fsync = 2, fail_fsync_errno = EINVAL; /* a file system that has no fsync of folders */
    ck_assert_msg(write_whole(at("f"), "4th", 3, &error), "%s", error.text);
}
END_TEST

START_TEST(rename_that_fails_leaves_nothing) {
    cg_error error = {0};
    cg_file_writer *writer = cg_file_begin(at("f"), &error);
    ck_assert_ptr_nonnull(writer);
    ck_assert_int_eq(mkdir(at("f"), 0777), 0); /* meanwhile someone makes a folder of that name */
    ck_assert(!cg_file_commit(writer, &error));
    expect_error(&error, CG_BAD_INPUT, at("f"), strerror(EISDIR));
    ck_assert_int_eq(n_entries(), 1);
}
END_TEST

START_TEST(make_folders) {
    struct stat status;
    cg_error error = {0};
    ck_assert_msg(cg_folder_make(at("a/b//c/"), &error), "%s", error.text);
    ck_assert_int_eq(stat(at("a/b/c"), &status), 0);
    ck_assert(S_ISDIR(status.st_mode));
    ck_assert(cg_folder_make(at("a/b/c"), &error)); /* there already */
    ck_assert(cg_folder_make("/", &error));
    ck_assert(cg_folder_make(".", &error));
    ck_assert_int_eq(symlink("a", at("link")), 0);
    ck_assert(cg_folder_make(at("link/d"), &error));
    ck_assert_int_eq(stat(at("a/d"), &status), 0);
    ck_assert_int_eq(error.code, CG_OK);
}
END_TEST

START_TEST(make_folder_refusals) {
    put(at("file"), "x", 1);
    cg_error error = {0};
    ck_assert(!cg_folder_make(at("file"), &error));
    expect_error(&error, CG_BAD_INPUT, at("file"), "a file of this name is in the way");
    error = (cg_error){0};
    ck_assert(!cg_folder_make(at("file/below"), &error));
    expect_error(&error, CG_BAD_INPUT, at("file"), "a file of this name is in the way");
    error = (cg_error){0};
    ck_assert(!cg_folder_make("", &error));
    expect_error(&error, CG_BAD_INPUT, "\"\"", strerror(ENOENT));
    ck_assert(!cg_folder_make(at("file"), NULL));
    expect_content(at("file"), "x", 1);
}
END_TEST

static int remove_entry(const char *path, const struct stat *status, int type, struct FTW *place) {
    (void)status, (void)type, (void)place;
    return remove(path);
}

int main(void) {
    if (!mkdtemp(root)) return EXIT_FAILURE;
    Suite *suite = suite_create("core_file");
    TCase *read = tcase_create("read"), *write = tcase_create("write"), *make = tcase_create("folder");
    tcase_add_checked_fixture(read, enter_folder, NULL);
    tcase_add_checked_fixture(write, enter_folder, NULL);
    tcase_add_checked_fixture(make, enter_folder, NULL);
    tcase_add_test(read, read_files);
    tcase_add_test(read, read_limit);
    tcase_add_test(read, read_files_of_unknown_size);
    tcase_add_test(read, read_refusals);
    tcase_add_test(read, read_without_permission);
    tcase_add_test(read, read_that_fails_midway);
    tcase_add_test(read, long_paths_leave_room_for_the_reason);
    tcase_add_test(write, write_new_and_over);
    tcase_add_test(write, write_in_the_current_folder);
    tcase_add_test(write, cancel_leaves_nothing);
    tcase_add_test(write, stale_tmp_is_overwritten);
    tcase_add_test(write, stale_tmp_is_removed);
    tcase_add_test(write, what_could_be_written);
    tcase_add_test(write, control_characters_are_escaped);
    tcase_add_test(write, what_is_shown_is_cut_between_letters);
    tcase_add_test(write, whose_failure_it_is);
    tcase_add_test(write, unfinished_files_are_removed);
    tcase_add_test(write, two_writers_do_not_mix);
    tcase_add_test(write, permissions_are_kept);
    tcase_add_test(write, links_are_followed);
    tcase_add_test(write, write_refusals);
    tcase_add_test(write, disk_full_keeps_the_old_file);
    tcase_add_test(write, short_and_interrupted_writes);
    tcase_add_test(write, fsync_of_file_and_folder);
    tcase_add_test(write, rename_that_fails_leaves_nothing);
    tcase_add_test(make, make_folders);
    tcase_add_test(make, make_folder_refusals);
    suite_add_tcase(suite, read);
    suite_add_tcase(suite, write);
    suite_add_tcase(suite, make);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_ENV);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    nftw(root, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
    return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
