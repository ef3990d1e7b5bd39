/* Recordings of selections: which compressed rows every CSA layer chose, in every micro-batch of every step.
 *
 * A safetensors file with one tensor:
 *
 *   topk [N, L, T, K] i32   N micro-batches, step after step; the L CSA layers from below; K chosen rows of the packed
 *                           array of compressed rows for each of T token rows, -1: none
 *
 * and metadata: format "csagrad topk 1"; what chosen rows mean: data (fingerprint of the feed), seed, seq_len,
 * batch_size, accumulate, index_topk, layers ("1,3"); first_step, the step (from 1) of the first micro-batch; checksum,
 * 8 hexadecimal digits: CRC-32 of the data and then of "KEY=VALUE\n" of all the others, in this order. The indexer's
 * warm-up attends to all visible rows and chooses nothing, so a recording begins behind it.
 *
 *     topk = safetensors.numpy.load_file(path)["topk"]                         # or, of a file that csagrad wrote:
 *     topk = numpy.memmap(path, "<i4", offset=4096).reshape(N, L, T, K)
 *     topk[(step - first_step) * accumulate + micro_batch, layer, row]
 *
 * A recording grows by whole steps: its data is appended, then the head is written anew in its place. So the file can
 * be read at any time and holds what was done so far. A program that is killed between the two leaves bytes behind the
 * tensor: readers refuse that, a recording that goes on cuts them off. A power cut may leave a checksum that is wrong.
 */
#ifndef CG_MODELS_TOPK_LOG_H
#define CG_MODELS_TOPK_LOG_H

#include "models/train/data.h"

typedef struct cg_topk_reader cg_topk_reader;
typedef struct cg_topk_writer cg_topk_writer;

/* Open the recording of a run of this config and feed that holds the steps first to last. Everything is checked here.
 * Refused: a file that is damaged, no recording, of other data, seed, sizes or layers, or that lacks a step; a row that
 * selects one compressed row twice or one that it does not see; a run that chooses nothing; a file that is being
 * recorded. */
cg_topk_reader *cg_topk_reader_new(const char *path, const cg_config *config, const cg_feed *feed,
                                   int64_t first, int64_t last, cg_error *error);
void cg_topk_reader_free(cg_topk_reader *reader); /* NULL is fine */

/* Copy out a selection [T, K] of a step from first to last; CSA layers are counted from 0. */
void cg_topk_reader_get(const cg_topk_reader *reader, int64_t step, int64_t micro_batch, int layer,
                        int32_t *topk);

/* Record from the step `next` on: a new file, with its folder; one that is there and empty, or of no step, is
 * taken for new. With go_on, PATH may hold a recording of the same run that reaches at least to the step
 * before: it goes on, and what it holds from `next` on is dropped when the first step comes. Refused, with
 * nothing changed: a file that is there (without go_on), that is another run's or damaged, or that ends too
 * early; a run that chooses nothing; a file that another run reads or writes. */
cg_topk_writer *cg_topk_writer_new(const char *path, const cg_config *config, const cg_feed *feed, int64_t next,
                                   bool go_on, cg_error *error);

/* Where the caller writes a selection [T, K] of the step at hand. */
int32_t *cg_topk_writer_slot(cg_topk_writer *writer, int64_t micro_batch, int layer);

/* Append the slots as the next step. When the disk is full the file still holds the steps before. */
bool cg_topk_writer_append(cg_topk_writer *writer, cg_error *error);

/* Wait until all steps are on the disk. */
bool cg_topk_writer_sync(cg_topk_writer *writer, cg_error *error);

/* A new recording without a step is removed. NULL is fine. */
void cg_topk_writer_free(cg_topk_writer *writer);

#endif
