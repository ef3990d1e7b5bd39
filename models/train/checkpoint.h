/* Checkpoints: safetensors files with weights (DeepSeek's release names), optimizer moments ("adamw.m.NAME",
 * "adamw.v.NAME"), and in the metadata the step, the configuration, a fingerprint of the data and a checksum
 * over all of it (CRC-32; files of older versions have another one and are still read). The data position and
 * all random numbers follow from (seed, step), so nothing else is needed to go on bit for bit. */
#ifndef CG_MODELS_CHECKPOINT_H
#define CG_MODELS_CHECKPOINT_H

#include "core/files/safetensors.h"
#include "models/dsv4/config.h"

/* What stands beside the tensors. */
typedef struct cg_checkpoint_facts {
    int64_t step;
    uint64_t data;           /* fingerprint of the feed */
    const char *config_json; /* not read back with the tensors: cg_checkpoint_config */
} cg_checkpoint_facts;

/* DAMAGED: read to its end, and found cut, of a wrong checksum, or no checkpoint. UNREADABLE says nothing about
 * its content: it cannot be opened or read now, memory is out, or a newer version of csagrad wrote it. */
typedef enum cg_checkpoint_state {
    CG_CHECKPOINT_WHOLE,
    CG_CHECKPOINT_DAMAGED,
    CG_CHECKPOINT_UNREADABLE
} cg_checkpoint_state;

/* Anything but whole comes with a sentence that names the file. */
cg_checkpoint_state cg_checkpoint_look(const char *path, cg_error *error);

/* Write atomically. */
bool cg_checkpoint_write(const char *path, const cg_named_tensor *tensors, int n_tensors,
                         const cg_checkpoint_facts *facts, cg_error *error);

/* Read into the memory of `tensors`, whose names, dtypes and shapes must be the file's, and facts->step;
 * facts->data must be that of the file. Refused, with nothing changed: a file that is damaged (structure or
 * checksum), no checkpoint, or of another model or other data. */
bool cg_checkpoint_read(const char *path, const cg_named_tensor *tensors, int n_tensors,
                        cg_checkpoint_facts *facts, cg_error *error);

/* The configuration that a checkpoint was trained with, from its metadata; the rest is not looked at. */
bool cg_checkpoint_config(const char *path, cg_config *config, cg_error *error);

/* "DIR/checkpoint-00000100.safetensors". */
void cg_checkpoint_path(const char *dir, int64_t step, char *path, size_t path_bytes);

/* Steps of the checkpoints in a folder, newest first; the max newest. 0 also when the folder is absent; -1 with
 * a sentence when it cannot be read. */
int cg_checkpoint_list(const char *dir, int64_t *steps, int max, cg_error *error);

/* Remove half-written checkpoints of programs that were killed. */
void cg_checkpoint_remove_stale(const char *dir);

#endif
