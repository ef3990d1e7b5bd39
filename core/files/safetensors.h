/* safetensors files: 8-byte little-endian header length, JSON header, raw little-endian data.
 *
 * Read: F32 F64 BF16 F16, whole numbers of 8 to 64 bits with sign and without, BOOL; at most CG_MAX_DIMS
 * dimensions, scalars (shape []) and tensors of no element, a header of at most 100 MB as in the reference
 * implementation. Tensors of other dtypes (F8_E4M3, C64, one that is not known here) are listed and not read.
 * Unknown keys are refused.
 */
#ifndef CG_CORE_SAFETENSORS_H
#define CG_CORE_SAFETENSORS_H

#include "core/base/tensor.h"

typedef struct cg_named_tensor {
    const char *name;
    cg_tensor tensor;
} cg_named_tensor;

/* What a file says of one tensor. */
typedef struct cg_entry {
    const char *name, *dtype; /* "f32", ...; of a tensor that is not read: the word of the file */
    cg_shape shape;
    int64_t bytes;           /* in the file */
    const char *data;        /* ... at any address */
    cg_dtype elements;       /* CG_DTYPES: such elements are not read here */
    const cg_tensor *tensor; /* NULL then */
    const char *advice;      /* what to do about that, behind a colon; NULL: nothing is known */
} cg_entry;

typedef struct cg_safetensors cg_safetensors;

/* Open and check a whole file (the data is memory-mapped, nothing is copied). Refuses, in one sentence with
 * file and tensor name: a header that is cut or longer than the file, JSON that does not parse, a repeated name
 * or key (also through an escape), a shape whose bytes differ from the byte range, where the dtype is known,
 * ranges that overlap, leave a hole, or leave bytes at the end. NULL on failure.
 *
 * The data is read-only memory, and a file of another writer may place it at any byte address: copy it out
 * with memcpy. Replacing the file by a rename is harmless while it is open; cutting it short in place is not.
 */
cg_safetensors *cg_safetensors_open(const char *path, cg_error *error);
void cg_safetensors_close(cg_safetensors *file); /* ends the life of all names and data; NULL is fine */

/* All tensors, in order of their data. */
int cg_safetensors_n_entries(const cg_safetensors *file);
const cg_entry *cg_safetensors_entry(const cg_safetensors *file, int i);

/* Those that are read. */
int cg_safetensors_count(const cg_safetensors *file);
const cg_named_tensor *cg_safetensors_at(const cg_safetensors *file, int i);        /* in order of their data */
const cg_tensor *cg_safetensors_find(const cg_safetensors *file, const char *name); /* NULL: absent */
const char *cg_safetensors_metadata(const cg_safetensors *file, const char *key);   /* NULL: absent */

/* One pair of metadata after the other: start with *at = NULL; false behind the last. */
bool cg_safetensors_metadata_next(const cg_safetensors *file, void **at, const char **key, const char **value);

/* Write a file atomically. `metadata` is n_metadata pairs of key and value. Data starts on a multiple of 8
 * bytes; larger elements come first, so every tensor is aligned. Equal arguments give equal bytes. Refuses
 * what the reader would refuse, before the file is touched. */
bool cg_safetensors_write(const char *path, const cg_named_tensor *tensors, int n_tensors,
                          const char *const (*metadata)[2], int n_metadata, cg_error *error);

/* What stands before the data (length and header), with blanks at its end that make it `bytes` long, a multiple of 8.
 * For a file that grows: data is appended, and the head of the larger tensors takes this one's place. Needs no data.
 * malloc'd; NULL with a sentence when it would be longer. */
char *cg_safetensors_head(const cg_named_tensor *tensors, int n_tensors, const char *const (*metadata)[2],
                          int n_metadata, size_t bytes, cg_error *error);

#endif
