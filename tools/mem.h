/* What csagrad mem found out, for its reports: the table, the page, the snapshot and the trace show the same rows. */
#ifndef CG_TOOLS_MEM_H
#define CG_TOOLS_MEM_H

#include "graph/frontier.h"
#include "models/measure/measure.h"

/* One saved value with its counterfactual: what recomputing the node that made it, and nothing else on top of the
 * row's policy, would change. */
typedef struct mem_what_if {
    const cg_value *value;
    bool possible; /* false: a choice, a leaf, or a form that recompute does not rewrite; the rest is 0 */
    int64_t peak_change_bytes; /* negative: the peak falls */
    double
        extra_us; /* time of the clones: of their originals as measured, where the row was run, else cg_node_us */
} mem_what_if;

/* One row of the table: a policy at a size, planned and perhaps measured. */
typedef struct mem_row {
    char policy[CG_POLICY_BYTES]; /* as it was asked for */
    const char *dims;             /* "toy", "flash", "pro"; "config": as the options make it */
    int64_t seq;                  /* seq_len; with segments: the longest physical one */
    int64_t n_rows;               /* T, all packed rows, padding included */
    cg_dtype dtype;
    cg_workload workload;
    cg_step step; /* step.graph and step.plan; both NULL in a refused row */
    cg_measurement m;
    cg_saved *saved; /* the plan's saved values in order of birth; NULL in a refused row */
    int n_saved;
    mem_what_if *what_if; /* one per saved value, in the same order; NULL: not asked for */
    char *refused;        /* one sentence; the row has no figures */
    cg_code refused_code;
} mem_row;

/* Growth with the sequence length: the exponent p of "bytes ~ S^p", a line by least squares through the logarithms of
 * a policy's rows. `extra` is the peak beyond boundary_bytes, which the caller holds anyway. */
typedef struct mem_growth {
    const char *policy;
    cg_dtype dtype;
    int n_sizes;
    const mem_row **rows; /* [n_sizes], rising in seq */
    double peak_exponent, extra_exponent;
} mem_growth;

/* The curve of peak against extra time. */
typedef struct mem_curve {
    const char *base;   /* the form that is rewritten: "stream" or "save" */
    const mem_row *row; /* the row of that policy: its graph is what the points' `chosen` speaks of */
    cg_frontier *frontier;
    const double
        *node_us; /* by node number of the row's graph: the times behind it, measured where the row was run;
                              NULL: cg_node_us */
} mem_curve;

typedef struct mem_report {
    const char *title; /* the command that makes it again */
    mem_row *rows;     /* every size, dtype and policy, the policies of one size next to each other */
    int n_rows;
    mem_growth *growth; /* empty with one size */
    int n_growth;
    mem_curve *curves; /* empty: not asked for */
    int n_curves;
} mem_report;

/* Plan a row whose workload is set, and run it n_runs times (0: not at all). A workload that the machine refuses gives a
 * refused row; one that makes no sense is an error. */
bool mem_row_make(mem_row *row, int n_runs, cg_error *error);

/* The counterfactuals of a row. */
bool mem_what_if_make(mem_row *row, cg_error *error);

/* Growth and curves of a report whose rows are made. A curve is made for every row that recomputes nothing. */
bool mem_growth_make(mem_report *report, cg_error *error);
bool mem_curves_make(mem_report *report, cg_error *error);

/* Free all that a report holds, but for what the workloads point to. */
void mem_report_free(mem_report *report);

/* Tables to stdout: the rows with growth and curves; the saved values of each row. As JSON: a list of rows. */
void mem_print(const mem_report *report);
void mem_print_values(const mem_row *row);
void mem_print_json(const mem_report *report);

/* The point that an auto policy took; NULL for others. Its times are estimated. */
const cg_frontier_point *mem_budget_point(const mem_row *row);

/* Saved bytes in the scopes of indexers. */
int64_t mem_saved_in_indexers(const mem_row *row);

/* Time of the whole step: the sum of mem_step_us where nothing ran. */
double mem_row_us(const mem_row *row);

/* Time of the plan's step: measured where the row was run, else cg_node_us. */
double mem_step_us(const mem_row *row, int step);

/* The parameter that the producer of a value reads, which tells apart the many products of one scope; NULL: none. */
const cg_value *mem_parameter_of(const cg_value *value);

/* "matmul_grad of backward at 41, 2 more, last at 60": who keeps a saved value, and when. Into text; returns text. */
const char *mem_readers_text(const cg_saved *saved, char *text, size_t text_bytes);

/* The offline page, the PyTorch memory snapshot, the Chrome trace. False with a sentence; nothing half-written. */
bool mem_page_write(const mem_report *report, const char *path, cg_error *error);
bool mem_snapshot_write(const mem_row *row, const char *path, cg_error *error);
bool mem_trace_write(const mem_row *row, const char *path, cg_error *error);

#endif
