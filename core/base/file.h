/* Whole files, read and written safely.
 *
 * A path or a file that cannot be used is CG_BAD_INPUT; a machine that refuses (disk full, input/output
 * error, no memory) is CG_FAILED. */
#ifndef CG_CORE_FILE_H
#define CG_CORE_FILE_H

#include <stddef.h>
#include <stdint.h>

#include "core/base/error.h"

/* CG_FAILED when errno says that the machine refuses, CG_BAD_INPUT when the path is at fault. */
cg_code cg_errno_code(int number);

/* Read a whole regular file into malloc'd memory with one 0 byte behind it. Refuses more than max_bytes. */
bool cg_file_read(const char *path, size_t max_bytes, char **data, size_t *bytes, cg_error *error);

/* Can a regular file be read to its end? Asked before a file is mapped whose damage is to be told from a disk
 * that refuses: a page of a mapping that cannot be read ends the program. */
bool cg_file_try(const char *path, cg_error *error);

/* Map a whole regular file into read-only memory; an empty file gives NULL and 0 bytes. The sentence comes
 * without the path, for cg_file_fail. */
bool cg_file_map(const char *path, void **map, size_t *bytes, cg_error *error);
void cg_file_unmap(void *map, size_t bytes); /* NULL is fine */

/* A part of a mapping that has been read and is not needed for now: its memory goes back to the machine, and comes
 * from the file again when it is read once more. Only for memory of cg_file_map. */
void cg_file_drop(const void *begin, size_t bytes);

/* Hand on a sentence with "PATH: " before it, into an error that may hold an older one; returns false. Only the
 * end of a very long path is shown. */
bool cg_file_fail(cg_error *error, const cg_error *inner, const char *path);

/* A file that appears whole or not at all: written beside its place as PATH.tmp, then fsync, rename and
 * fsync of the folder. Until commit, and when anything fails, an older PATH stays as it was; only when the
 * last of these steps fails is the new file there, not yet safe from a power cut, and the failure says so.
 * A PATH.tmp left by a killed program is overwritten; one that a running program holds is refused. An older
 * PATH keeps its permissions, and a symbolic link is followed. Devices and folders are refused. */
typedef struct cg_file_writer cg_file_writer;
cg_file_writer *cg_file_begin(const char *path, cg_error *error);
bool cg_file_write(cg_file_writer *writer, const void *data, size_t bytes, cg_error *error);
bool cg_file_commit(cg_file_writer *writer, cg_error *error); /* frees the writer, also on failure; fails after
                                                                 a failed write */
void cg_file_cancel(cg_file_writer *writer);                  /* removes PATH.tmp; NULL is fine */

/* Could PATH be written now? Asked before long work whose result goes there; nothing is left behind. */
bool cg_file_can_write(const char *path, cg_error *error);

/* Remove the PATH.tmp of a program that was killed; one that a running program holds stays. */
void cg_file_remove_stale(const char *path);

/* Remove the PATH.tmp of all files that this program is writing. For a signal handler that ends the program. */
void cg_file_remove_unfinished(void);

/* Make a folder and its parents. Fine when it is there already. */
bool cg_folder_make(const char *path, cg_error *error);

/* Could the folder be made now, or be written to if it is there? Nothing is made. */
bool cg_folder_can_make(const char *path, cg_error *error);

#endif
