/* Training: steps, evaluation, checkpoints. One trainer is one run; it prints nothing. */
#ifndef CG_MODELS_TRAINER_H
#define CG_MODELS_TRAINER_H

#include "models/train/data.h"
#include "models/train/step.h"

#include <signal.h>

typedef struct cg_metrics {
    int64_t step;        /* counted from 1 */
    double lm_loss;      /* nats per target */
    double indexer_loss; /* mean over real rows, summed over CSA layers, times the coefficient; 0 when off */
    double grad_norm;    /* before clipping */
    double lr;
    double tokens_per_s;
    bool warming; /* the indexer's warm-up: attention to all visible compressed rows */
    int64_t planned_peak_bytes, measured_peak_bytes;
    int64_t process_growth_bytes; /* by the kernel: from before the arena was made to the peak of the first step
                                     with the step's graph; -1 where the kernel does not tell */
} cg_metrics;

/* Health of one layer's indexer, means over the held-out rows that see more than K compressed rows. */
typedef struct cg_indexer_state {
    int layer;
    int64_t rows; /* how many such rows; 0: selection is not exercised, and the rest is 0 */
    double kl, kl_uniform;
    double captured;                                              /* 1 - kl / kl_uniform */
    double recall, mass, top1_missed, negative_weights, distance; /* see CG_HEALTH_* */
} cg_indexer_state;

typedef struct cg_evaluation {
    double val_loss;         /* nats per target */
    double val_accuracy;     /* share of targets predicted right */
    double val_accuracy_far; /* the same over targets whose cue lies beyond the stacked windows; NaN without
                                such */
    int64_t n_targets, n_far;
    double captured, recall; /* means over the CSA layers whose selection is exercised; NaN without such */
    int n_layers;
    cg_indexer_state layers[CG_MAX_LAYERS]; /* the CSA layers */
} cg_evaluation;

typedef struct cg_trainer cg_trainer;

typedef struct cg_trainer_options {
    const char *checkpoint; /* go on from this file; NULL: fresh parameters */
    /* Files of models/train/topk_log.h. Record: what CSA layers select, up to the step at hand; with a checkpoint an older
     * recording goes on. Replay: CSA layers take the recorded selections, nothing is chosen. Both are for the steps
     * behind the indexer's warm-up; evaluations choose for themselves. NULL: neither. */
    const char *record_topk, *replay_topk;
    /* The recording is what a run left that was killed before its first checkpoint: it is begun anew. */
    bool record_anew;
    /* Compare every clone with its original, bit for bit: the first that differs fails the step, with scope and op.
     * Originals live until their last clone has run, so the peak is near that of keeping them, plus the clones. */
    bool verify_recompute;
    const cg_backend *backend; /* where steps and evaluations run; it must outlive the trainer. NULL: the CPU */
    /* Not 0, as a signal may make it: a step or an evaluation gives up before its next micro-batch. NULL: none
     * does. */
    const volatile sig_atomic_t *stop;
} cg_trainer_options;

/* Start a run of a checked config; options may be NULL. The feed must outlive the trainer. Whatever can be wrong with
 * the files is refused here: a checkpoint that is damaged or of another model or other data, a recording that does not
 * fit, verify_recompute where nothing is computed again. */
cg_trainer *cg_trainer_new(const cg_config *config, const cg_feed *feed, const cg_trainer_options *options,
                           cg_error *error);
void cg_trainer_free(cg_trainer *trainer);

/* Steps taken so far. */
int64_t cg_trainer_steps(const cg_trainer *trainer);

/* Take one step. A loss or gradient that is not finite is an error, and parameters stay as they were; a recording then
 * ends with the selections of the step that failed. */
bool cg_trainer_step(cg_trainer *trainer, cg_metrics *metrics, cg_error *error);

/* Loss, accuracy and indexer health on the first eval_batches held-out batches, with the sparse attention. */
bool cg_trainer_evaluate(cg_trainer *trainer, cg_evaluation *evaluation, cg_error *error);

/* Did the last step or evaluation return false because it was told to stop? It then sets no error, and leaves
 * everything as it was before it. */
bool cg_trainer_stopped(const cg_trainer *trainer);

/* Write a checkpoint; a recording reaches the disk before it. */
bool cg_trainer_save(const cg_trainer *trainer, const char *path, cg_error *error);

/* The last step taken, or the first, for reports: its graph and plan, and the peak its executor measured so
 * far. */
int64_t cg_trainer_measured_bytes(const cg_trainer *trainer);
const cg_step *cg_trainer_graph(const cg_trainer *trainer);

/* True when some batch row of `feed` could see more than index_topk compressed rows: else every run selects all
 * that is visible, and selection is not tested. */
bool cg_selection_is_exercised(const cg_config *config, const cg_feed *feed);

#endif
