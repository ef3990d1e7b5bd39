#include "tools/bench_device.h"

#include <stdlib.h>

#include "graph/exec.h"
#include "models/measure/measure.h"
#include "ops/ops.h"

enum { RUNS = 3 };

static const double enough_us = 20e3;

/* Numbers that are not all alike: a device draws less power, and is faster, on zeros. */
static void fill(cg_exec *exec, const cg_value *leaf) {
    void *data = cg_exec_fill(exec, leaf);
    const int64_t n = data ? cg_shape_count(&leaf->shape) : 0;
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; i++) cg_dtype_set(leaf->dtype, data, i, (double)(i * 37 % 61) / 61 - 0.5);
    cg_exec_filled(exec, leaf, data);
}

/* The time of one node: a product of [n, n] by [n, n], or a sum of two arrays of n. */
static bool time_node(const cg_backend *backend, cg_dtype dtype, bool product, int64_t n, double *us,
                      cg_error *error) {
    cg_graph *graph = cg_graph_new(&cg_all_ops);
    if (!graph) return cg_fail(error, CG_FAILED, "out of memory for a graph");
    const cg_shape shape = product ? CG_SHAPE(n, n) : CG_SHAPE(n);
    cg_value *a = cg_leaf(graph, CG_LEAF_INPUT, "a", dtype, shape),
             *b = cg_leaf(graph, CG_LEAF_INPUT, "b", dtype, shape);
    cg_keep(product ? cg_matmul(graph, a, b, false, false) : cg_add(graph, a, b));
    cg_plan *plan = cg_plan_make(graph, &(cg_plan_options){.backend = backend}, error);
    cg_exec *exec = plan ? cg_exec_new(plan, NULL, error) : NULL;
    double step_us;
    if (exec) fill(exec, a);
    if (exec) fill(exec, b);
    bool ok = exec && cg_exec_run(exec, CG_ALL_PASSES, error) &&
              cg_measure_time(exec, plan->n_steps, RUNS, us, &step_us, error);
    cg_exec_free(exec);
    cg_plan_free(plan);
    cg_graph_free(graph);
    return ok;
}

bool bench_device_gemm(const cg_backend *backend, cg_dtype dtype, double *gflops, cg_error *error) {
    double us = 0;
    for (int64_t n = 16; n <= 8192 && us < enough_us; n *= 2) {
        if (!time_node(backend, dtype, true, n, &us, error)) return false;
        *gflops = 2e-3 * (double)n * (double)n * (double)n / us;
    }
    return true;
}

bool bench_device_memory(const cg_backend *backend, double *gbytes, cg_error *error) {
    double us = 0;
    for (int64_t n = 1 << 10; n <= 1 << 28 && us < enough_us; n *= 2) {
        if (!time_node(backend, CG_F32, false, n, &us, error)) return false;
        *gbytes = 12e-3 * (double)n / us;
    }
    return true;
}
