/* Running a plan: one arena, no allocation per run. On the CPU, or on the device of the backend it was planned for;
 * there a run is queued as a whole and waited for at its end. */
#ifndef CG_GRAPH_EXEC_H
#define CG_GRAPH_EXEC_H

#include <signal.h>

#include "graph/plan.h"

typedef struct cg_exec cg_exec;

typedef struct cg_exec_options {
    bool separate; /* debugging: each storage is a heap block of its own, allocated at its birth and freed at
                      its death, so that AddressSanitizer sees every access outside a value or its life */
    bool poison;   /* debugging: fill each output and workspace with NaN (all bits set) before its node runs */
    bool verify_recompute; /* compare every clone with its original, bit for bit (needs a plan made with
                              keep_cloned_originals); the first that differs is the error */
    bool
        no_recording; /* on a device: launch each node in every run. Without it the second run of some passes is
                          recorded, and later ones play the recording; watched runs and those with the options above
                          launch their nodes in any case */
    /* On the CPU: once it is not 0, a run with a forward pass returns false between two nodes, without an error. Passes
     * that update parameters are never left half done. */
    const volatile sig_atomic_t *stop;
} cg_exec_options;

/* False, with both numbers, for a plan of the CPU whose peak is above the machine's memory or a limit below that
 * (core/base/process.h): such a step would be killed in its middle. */
bool cg_exec_has_room(const cg_plan *plan, cg_error *error);

/* Reserve the arena, where there is room for it. The plan must outlive the executor. Leaves start as zeros. */
cg_exec *cg_exec_new(const cg_plan *plan, const cg_exec_options *options, cg_error *error);
void cg_exec_free(cg_exec *exec);
const cg_plan *cg_exec_plan(const cg_exec *exec);

/* Lend the memory of an external leaf; other leaves have memory of their own and stay as they are. A run that
 * reads an external leaf without memory fails. On the CPU; anywhere: the memory of a value that another executor, on the
 * same device, holds. */
void cg_exec_bind(cg_exec *exec, const cg_value *leaf, void *data);
void cg_exec_bind_value(cg_exec *exec, const cg_value *leaf, const cg_exec *lender, const cg_value *value);

/* Copy a whole leaf in, or a leaf or kept value out, or n elements from number `first` on; nothing happens where the plan
 * does not hold it. The last four speak of real elements as doubles. On a device that fails, the first failure
 * stays, what is read is NaN or all bits set, and the next run fails with the sentence. */
void cg_exec_write(cg_exec *exec, const cg_value *value, const void *data);
void cg_exec_read(cg_exec *exec, const cg_value *value, void *data);
void cg_exec_write_part(cg_exec *exec, const cg_value *value, int64_t first, int64_t n, const void *data);
void cg_exec_read_part(cg_exec *exec, const cg_value *value, int64_t first, int64_t n, void *data);
void cg_exec_write_real(cg_exec *exec, const cg_value *value, int64_t first, int64_t n, const double *x);
void cg_exec_read_real(cg_exec *exec, const cg_value *value, int64_t first, int64_t n, double *x);
void cg_exec_set(cg_exec *exec, const cg_value *value, int64_t i, double x);
double cg_exec_get(cg_exec *exec, const cg_value *value, int64_t i);

/* Memory to fill a whole leaf in, with its bytes at hand: on the CPU its own, for a device a copy that cg_exec_filled sends
 * there. NULL for what the plan does not hold, and when memory is out; the next run says so. */
void *cg_exec_fill(cg_exec *exec, const cg_value *leaf);
void cg_exec_filled(cg_exec *exec, const cg_value *leaf, void *data);

/* On the CPU, the memory of a leaf, or of a kept value after a run. NULL for what the plan does not hold, and on a
 * device. */
void *cg_exec_data(const cg_exec *exec, const cg_value *value);

#define CG_PASS_BIT(pass) (1u << (pass))
#define CG_ALL_PASSES ((1u << CG_PASSES) - 1)
#define CG_HOLD_CHOICES (1u << CG_PASSES) /* nodes that choose do not run again; their outputs must be kept */

/* Run the nodes of the given passes in order; backward takes recompute along. Values share memory, so each
 * backward needs a forward run of its own before it or with it: without one it is refused. On failure the
 * sentence names scope and op. A device runs on behind a node whose data were wrong, up to the optimizer: leaves that
 * it changes are as they were. */
bool cg_exec_run(cg_exec *exec, unsigned passes, cg_error *error);

/* Called after each node with its time, on a device by its own clock; NULL switches it off. */
typedef void (*cg_exec_watcher)(void *context, int step, const cg_node *node, double us);
void cg_exec_watch(cg_exec *exec, cg_exec_watcher watcher, void *context);

/* The measured peak: the farthest byte of the arena that any node was handed so far, or, with separate blocks,
 * the most bytes allocated at once. Taken from the pointers that kernels got, not from the plan's peak. */
int64_t cg_exec_measured_bytes(const cg_exec *exec);

#endif
