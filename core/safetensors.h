/* safetensors files: 8-byte little-endian header length, JSON header, raw little-endian data. */
#ifndef CG_CORE_SAFETENSORS_H
#define CG_CORE_SAFETENSORS_H

#include "core/tensor.h"

typedef struct cg_named_tensor {
    const char *name;
    cg_tensor tensor;
} cg_named_tensor;

typedef struct cg_safetensors cg_safetensors;

/* Open and check a whole file (the data is memory-mapped, nothing is copied). Refuses, in one sentence with
 * file and tensor name: a header that is cut or longer than the file, JSON that does not parse, a repeated
 * name or key (also through an escape), an unknown dtype, a shape whose bytes differ from the byte range,
 * ranges that overlap, leave a hole, or leave bytes at the end. NULL on failure. */
cg_safetensors *cg_safetensors_open(const char *path, cg_error *error);
void cg_safetensors_close(cg_safetensors *file);

int cg_safetensors_count(const cg_safetensors *file);
const cg_named_tensor *cg_safetensors_at(const cg_safetensors *file, int i); /* in order of their data */
const cg_tensor *cg_safetensors_find(const cg_safetensors *file, const char *name); /* NULL: absent */
const char *cg_safetensors_metadata(const cg_safetensors *file, const char *key);   /* NULL: absent */

/* Write a file atomically. `metadata` is n_metadata pairs of key and value. Data starts on a multiple of 8
 * bytes; larger elements come first, so every tensor is aligned. */
bool cg_safetensors_write(const char *path, const cg_named_tensor *tensors, int n_tensors,
                          const char *const (*metadata)[2], int n_metadata, cg_error *error);

#endif
