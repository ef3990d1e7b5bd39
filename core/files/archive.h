/* One front over the files that hold named tensors: safetensors, .npy (one array) and .npz (a zip of them).
 *
 * What a file is follows from its first bytes, never from its name. The single tensor of a .npy has the name
 * of the file without folder and extension; a member "q.npy" of a .npz has the name "q".
 */
#ifndef CG_CORE_ARCHIVE_H
#define CG_CORE_ARCHIVE_H

#include "core/files/safetensors.h"

typedef struct cg_archive cg_archive;

/* Open and check a whole file; every claim in it is held against its size before anything of the claimed size
 * is allocated. Refuses, in one sentence with file and tensor name, what core/files/safetensors.h, core/files/npy.h and
 * core/files/zip.h refuse. NULL on failure.
 *
 * The file is memory-mapped. Data is copied only where the file does not hold it as an aligned, row-major,
 * little-endian array: deflated members, big-endian ones, Fortran order, odd places. So all data is aligned to
 * its element. Copies are made while opening. Data is read-only; it and the names live until close. Replacing the
 * file by a rename is harmless while it is open; cutting it short in place is not. */
cg_archive *cg_archive_open(const char *path, cg_error *error);
void cg_archive_close(cg_archive *archive); /* NULL is fine */

const char *cg_archive_format(const cg_archive *archive); /* "safetensors", "npy" or "npz" */

/* All that the file holds, in its order, and of that what is read. Data and its copies are those of
 * `tensor`. */
int cg_archive_n_entries(const cg_archive *archive);
const cg_entry *cg_archive_entry(const cg_archive *archive, int i);
const cg_entry *cg_archive_unread(const cg_archive *archive, const char *name); /* NULL: absent, or read */

int cg_archive_count(const cg_archive *archive);
const cg_named_tensor *cg_archive_at(const cg_archive *archive, int i);        /* in the order of the file */
const cg_tensor *cg_archive_find(const cg_archive *archive, const char *name); /* NULL: absent */

/* Only safetensors files have metadata. NULL: absent. */
const char *cg_archive_metadata(const cg_archive *archive, const char *key);

/* One pair after the other: start with *at = NULL; false behind the last. */
bool cg_archive_metadata_next(const cg_archive *archive, void **at, const char **key, const char **value);

#endif
