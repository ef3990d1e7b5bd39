/* Data feeds: packed micro-batches that depend on (seed, index) alone.
 *
 * A feed has no state: micro-batch number `index` of the training part, or of the held-out part, is the same
 * whenever and in whatever order it is asked for. So a resumed run needs nothing but its position. The held-out
 * part does not depend on the seed either: runs with other seeds are measured on the same batches.
 *
 * Text. Files are documents of bytes. Each is cut into blocks of 4096 bytes; about 1/16 of all bytes, blocks
 * chosen by a hash of the file's name below the folder and the block's number, is held out, and what is left of
 * a document between such blocks is a region. Every piece of a micro-batch is one segment and lies inside one
 * region, targets included, so training never sees a held-out byte. A region is drawn with probability
 * proportional to its length; one of at most seq_len bytes is taken whole, from a longer one a window of
 * seq_len at a random place, until the rows are full. The last piece is cut to what is left. The target of a
 * byte is the next one of its region, -1 at its end.
 *
 * Recall. A sequence is recall_pairs groups `key value key value`, keys in random order and none twice, values
 * drawn at random with replacement; then a gap of fill; then questions up to the end, each row a random one of
 * the pairs, whose value is its target. No other row has a target. A question has a token of its own, not the
 * key's, and no answer follows it: nothing behind the pairs tells a value. The gap is longer than layers that
 * see the window alone can reach together, num_hidden_layers * (sliding_window - 1) tokens, so without
 * compressed rows a question's value is independent of everything in sight, and the best accuracy is
 * 1/recall_values. A pair fills one group of ratio 4, so one compressed row of its own holds it, and the right
 * row answers the question.
 */
#ifndef CG_MODELS_DATA_H
#define CG_MODELS_DATA_H

#include "models/dsv4/config.h"

typedef struct cg_feed cg_feed;

typedef struct cg_feed_facts {
    const char *name;     /* "text", "recall" */
    const char *source;   /* the path read; "generated" */
    int64_t n_rows;       /* T = batch_size * seq_len */
    int64_t max_segments; /* B: segments that a batch has room for; those not needed are empty */
    int64_t max_seqlen;   /* no segment is longer */
    double chance; /* accuracy of the best answer that looks at nothing: the most frequent byte, or 1/values */
    uint64_t fingerprint; /* of the data and of how it is cut: a resumed run must find the same */
    /* text */
    int64_t documents, bytes, train_bytes, held_out_bytes; /* parts: bytes in regions that can be used */
    int64_t skipped_files;  /* regular ones: no text, empty, unreadable, too large */
    const char *skipped;    /* in words, links that lead nowhere and folders included; "" when nothing was */
    int64_t repeated_bytes; /* held out, but to be found word for word in the training part too */
    /* recall, per sequence */
    int64_t n_pairs, n_queries;
    int64_t reach;        /* tokens that the stacked windows see back */
    int64_t min_distance; /* of any question from the last token of its pair; above reach */
} cg_feed_facts;

/* A packed micro-batch. Rows behind the last segment have token and target -1. */
typedef struct cg_batch {
    int64_t n_rows, max_segments;
    int32_t *tokens, *targets;     /* [T]; target -1: none */
    int32_t *cu_seqlens, *seqlens; /* [B+1], [B] */
    int32_t *distances; /* [T]: tokens from a question back to its pair's end; -1 where that says nothing */
    int64_t n_targets;  /* rows with a target */
    int64_t n_real;     /* rows of segments */
    int32_t *scratch;
} cg_batch;

/* A feed over a file, or over all text files below a folder, sorted by name; then those that symbolic links
 * lead to, each file and folder once, so that no cycle is walked. Folders named .git are left out. Passed over,
 * and told in the facts: files that hold a NUL byte, are empty or not UTF-8, cannot be read or have more than 1
 * GiB; folders named build or build-*. NULL as path: the sources and documents of this project. Refuses a path
 * that cannot be read, a file named itself that is no text, a folder without any, more than 1 GiB in all, and a
 * text too short to be divided. */
cg_feed *cg_feed_text(const char *path, const cg_config *config, cg_error *error);

/* Generated recall sequences. Refuses a vocabulary or a seq_len too small, and more pairs than keys. */
cg_feed *cg_feed_recall(const cg_config *config, cg_error *error);

/* The feed that config->task names; path is for text. */
cg_feed *cg_feed_new(const char *path, const cg_config *config, cg_error *error);

void cg_feed_free(cg_feed *feed); /* NULL is fine */

const cg_feed_facts *cg_feed_facts_of(const cg_feed *feed);

/* Room for batches of this feed; NULL when memory is out. */
cg_batch *cg_batch_new(const cg_feed *feed, cg_error *error);
void cg_batch_free(cg_batch *batch); /* NULL is fine */

/* Fill in micro-batch number `index` of a part (in training: step * accumulate + micro-batch, below 2^40). */
void cg_feed_batch(const cg_feed *feed, bool held_out, uint64_t index, cg_batch *batch);

#endif
