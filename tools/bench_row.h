/* What is measured, and what a measurement gives: shared by csagrad bench and tools/gpu_bench.c. */
#ifndef CG_TOOLS_BENCH_ROW_H
#define CG_TOOLS_BENCH_ROW_H

#include "models/measure/measure.h"

/* A part of a layer, the layer, the whole model's step. */
typedef struct bench_part {
    const char *name;
    cg_part part;
    bool no_optimizer, whole_model;
} bench_part;

enum { BENCH_PARTS = 5 };
extern const bench_part bench_parts[BENCH_PARTS];

/* One op in one pass by one kind of kernel, all its nodes together. */
typedef struct bench_op {
    const char *op, *variant; /* variant: of a device's kernels; "" on the CPU */
    cg_pass pass;
    int n_nodes;
    double us, flops, bytes;
} bench_op;

typedef struct bench_row {
    const char *name, *dims, *policy;
    int64_t seq;
    cg_dtype dtype;
    int64_t extra_peak_bytes, rss_peak_bytes;
    double loss; /* NaN: the attention alone has none */
    double us[CG_PASSES], step_us, flops, bytes, peak_gflops;
    bench_op *ops; /* dearest first; malloc'd */
    int n_ops;
} bench_row;

/* Add up the times of a plan's nodes, and what their ops cost, by op and by pass. */
bool bench_row_add_nodes(bench_row *row, const cg_plan *plan, const double *node_us, cg_error *error);

/* Backward with what it computes again; all passes. */
double bench_row_backward_us(const bench_row *row);
double bench_row_us(const bench_row *row);

#endif
