/* One training step, or a part of it, planned and then measured: the figures behind every memory report.
 *
 * Two accounts of the same bytes, which must agree: the plan's peak, and the farthest byte that any kernel was
 * handed while the step ran. The kernel of the operating system is the third witness (VmHWM).
 */
#ifndef CG_MODELS_MEASURE_H
#define CG_MODELS_MEASURE_H

#include "graph/exec.h"
#include "models/train/step.h"

/* What is measured. A part is a graph of its own: its inputs are leaves, and the gradients of its real inputs
 * are kept, as a caller would want them. */
typedef enum cg_part {
    CG_PART_STEP,         /* the whole training step of the config */
    CG_PART_INDEXER_LOSS, /* one layer's selection, chosen scores and KL, from index queries, keys, head weights and a
                              given teacher, forward and backward */
    CG_PART_ATTENTION, /* one layer's csa_attention, teacher included, over given selections of visible rows, forward
                              and backward */
    CG_PART_ATTENTION_LOSS /* both: the indexer selects, the attention teaches, the loss follows */
} cg_part;

typedef struct cg_workload {
    cg_config config; /* checked; its policy decides the form */
    cg_part part;
    /* packed rows: [n_segments+1] physical offsets and [n_segments] real lengths; NULL: batch_size equal segments of
     * seq_len without padding */
    int n_segments;
    const int32_t *cu_seqlens, *seqlens;
    int64_t max_segments; /* the graph has room for so many, empty ones behind; 0: as many as there are */
    bool no_optimizer, attend_all;
    bool verify_recompute;     /* compare every clone with its original while it runs */
    bool keep_results;         /* gradients and selections stay readable behind a run, which takes memory */
    const cg_backend *backend; /* where it is planned for and runs; NULL: the CPU */
} cg_workload;

typedef struct cg_measurement {
    /* planned */
    int64_t planned_peak_bytes, floor_bytes;
    int64_t boundary_bytes;   /* leaves and kept values (losses, gradients): what the caller holds anyway */
    int64_t saved_bytes;      /* values that cross from forward to backward, aliases once */
    int64_t recomputed_bytes; /* outputs of all clones together, each counted once */
    int64_t workspace_bytes;  /* the most scratch of any one node */
    int n_clones;
    double flops, extra_flops; /* of the whole step; of the clones alone */
    /* measured; -1 where nothing ran (for the loss: NaN) */
    int64_t measured_peak_bytes; /* by the pointers that kernels were handed */
    int64_t rss_peak_bytes; /* growth of the process, by the operating system, from before the arena was made */
    int64_t
        driver_peak_bytes; /* on a device instead: by how much its free memory fell meanwhile, by its driver, which
                                  gives memory in large pieces */
    double loss;           /* language model plus indexer; of a part: its loss, NaN for the attention alone */
    double step_us;        /* median over the runs behind the first */
    double *node_us;       /* by step of the plan: median; NULL when nothing ran */
    int n_steps;
} cg_measurement;

/* The planned half, of a step that is built already; the measured half says that nothing ran. */
cg_measurement cg_measurement_planned(const cg_step *step);

/* Build and plan. Runs nothing, so sizes beyond the machine are fine. The step holds graph and plan for reports (of a
 * part: no model); free both in any case (cg_step_free, cg_measurement_free). */
bool cg_measure_plan(const cg_workload *workload, cg_step *step, cg_measurement *out, cg_error *error);

/* The same, then run on generated inputs (by the config's seed), once to warm up and n_runs >= 1 times for the
 * clock. Inputs are the same for every policy, so losses can be compared. Runs in a child process, so that the
 * operating system's high-water mark is that of this step alone and an end by lack of memory is an error here; on a
 * device, which no child inherits, in this process. */
bool cg_measure_run(const cg_workload *workload, int n_runs, cg_step *step, cg_measurement *out,
                    cg_error *error);

/* Time n_runs runs of an executor whose inputs are there: medians of the whole and, by step of its plan, of each node.
 * node_us NULL: nodes are not timed one by one, and a device plays its recording. */
bool cg_measure_time(cg_exec *exec, int n_steps, int n_runs, double *node_us, double *step_us, cg_error *error);

/* Write those inputs, parameters and moments into an executor of the step. */
void cg_measure_fill(const cg_workload *workload, const cg_step *step, cg_exec *exec);

void cg_measurement_free(cg_measurement *measurement);

/* Write a safetensors file of the inputs of a workload on the CPU and of what comes of them, so that other programs can
 * compute the same and compare. Names of tensors:
 *
 *     in.SCOPE/NAME        leaves of a part; of a step: tokens, targets, scales, offsets, schedule
 *     NAME, grad.NAME      of a step: parameters as in checkpoints, their gradients before clipping
 *     grad.SCOPE/NAME      of a part: gradients of its leaves
 *     out.SCOPE/NAME       what forward gives: topk, out, teacher, loss; of a step: topk, lm_loss, indexer_loss
 *     out.grad_norm, out.next_lm_loss, out.next_indexer_loss    of a step: before clipping; behind one AdamW step
 *
 * The metadata holds the configuration as JSON ("config"). Written whole or not at all. */
bool cg_measure_save(const cg_workload *workload, const char *path, cg_error *error);

#endif
