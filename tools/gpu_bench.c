/* Measures one part on a device, for tools/gpu-check: no Jansson, no file but the one asked for, a process per figure, so
 * that a part that fails leaves the others alone.
 *
 *     gpu_bench repeat PART DIMS TOKENS DTYPE RUNS         the same bits in all runs, and close to the CPU
 *     gpu_bench time PART DIMS TOKENS DTYPE RUNS FILE      a row of a table, and one of JSON at the end of FILE
 *     gpu_bench wgmma                                      are kernels made of wgmma, and does it do what mma.sync does
 *
 * Names are those of csagrad bench. Ends with 0, 1 (failed), 2 (bad usage or input), 77 (no device). */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/threads.h"
#include "models/measure/measure.h"
#include "ops/cuda/cuda_ops.h"
#include "tools/bench_row.h"

/* What an H200 can do: f32 and f64 without tensor cores by its data sheet; dense bf16 and memory at what its best kernels
 * reach of 989 TFLOP/s and 4.8 TB/s. In FLOP/s and bytes/s. */
static const double f32_flops = 67e12, f64_flops = 34e12, bf16_flops = 790e12, memory_bytes = 4.3e12;

/* How far a device may be from the CPU, as a norm relative to that of the CPU's result; sums have another order. A choice
 * between nearly equal scores may then turn out differently, in at most this share of entries. */
static const double f32_bound = 1e-4, f64_bound = 1e-10, bf16_bound = 3e-2, choices_bound = 0.01;

typedef struct task {
    const bench_part *part;
    const char *dims;
    cg_workload workload;
    int n_runs;
    cg_device *device;
    cg_backend backend;
} task;

static bool integer(const char *what, const char *text, int64_t most, int64_t *n, cg_error *error) {
    char *end;
    errno = 0;
    *n = strtoll(text, &end, 10);
    if (end != text && !*end && !errno && *n >= 1 && *n <= most) return true;
    return cg_fail(error, CG_BAD_INPUT, "%s must be an integer from 1 to %lld, got %s", what, (long long)most,
                   text);
}

/* arguments: PART DIMS TOKENS DTYPE RUNS */
static bool read_task(char **arguments, task *t, cg_error *error) {
    int64_t n_runs;
    for (int p = 0; p < BENCH_PARTS; p++)
        if (!strcmp(bench_parts[p].name, arguments[0])) t->part = &bench_parts[p];
    if (!t->part || t->part->whole_model)
        return cg_fail(error, CG_BAD_INPUT, "%s is no part of a layer", arguments[0]);
    t->dims = arguments[1];
    t->workload.part = t->part->part;
    t->workload.no_optimizer = t->part->no_optimizer;
    cg_config *config = &t->workload.config;
    if (!cg_config_dims(t->dims, config)) return cg_fail(error, CG_BAD_INPUT, "there are no dims %s", t->dims);
    int dtype = CG_DTYPES - 1;
    while (dtype >= 0 && strcmp(cg_dtype_name((cg_dtype)dtype), arguments[3])) dtype--;
    if (dtype < 0) return cg_fail(error, CG_BAD_INPUT, "%s is no dtype", arguments[3]);
    config->dtype = (cg_dtype)dtype;
    if (!integer("TOKENS", arguments[2], 1 << 24, &config->seq_len, error) ||
        !integer("RUNS", arguments[4], 1000, &n_runs, error))
        return false;
    t->n_runs = (int)n_runs;
    return cg_config_check(config, error);
}

/* Plan for the device, or for the CPU; reserve; fill. */
static bool set_up(const task *t, bool on_device, bool keep_results, cg_step *step, cg_measurement *planned,
                   cg_exec **exec, cg_error *error) {
    cg_workload w = t->workload;
    w.keep_results = keep_results;
    w.backend = on_device ? &t->backend : NULL;
    if (!cg_measure_plan(&w, step, planned, error) || !(*exec = cg_exec_new(step->plan, NULL, error)))
        return false;
    cg_measure_fill(&w, step, *exec);
    return true;
}

/* ---- repeat ---- */

static size_t bytes_of(const cg_value *value) { return (size_t)cg_tensor_bytes(value->dtype, &value->shape); }

static bool is_result(const cg_value *value) { return value->keep && !value->leaf; }

/* Results one behind the other; NULL when memory is out. */
static char *results_of(const cg_graph *graph, cg_exec *exec, size_t *bytes) {
    *bytes = 0;
    for (int v = 0; v < graph->n_values; v++)
        if (is_result(graph->values[v])) *bytes += bytes_of(graph->values[v]);
    char *data = malloc(*bytes + 1), *to = data;
    for (int v = 0; data && v < graph->n_values; v++) {
        if (!is_result(graph->values[v])) continue;
        cg_exec_read(exec, graph->values[v], to);
        to += bytes_of(graph->values[v]);
    }
    return data;
}

static bool near(const task *t, const cg_graph *graph, const char *cpu, const char *device, double *worst,
                 cg_error *error) {
    const cg_dtype dtype = t->workload.config.dtype;
    const double bound = dtype == CG_F64 ? f64_bound : dtype == CG_BF16 ? bf16_bound : f32_bound;
    size_t at = 0;
    for (int v = 0; v < graph->n_values; v++) {
        const cg_value *value = graph->values[v];
        if (!is_result(value)) continue;
        const int64_t n = cg_shape_count(&value->shape);
        double difference = 0, norm = 0;
        int64_t n_other = 0;
        for (int64_t i = 0; i < n; i++) {
            const double x = cg_dtype_get(value->dtype, cpu + at, i),
                         y = cg_dtype_get(value->dtype, device + at, i);
            n_other += x != y;
            difference += (x - y) * (x - y);
            norm += x * x;
        }
        at += bytes_of(value);
        if (value->dtype == CG_I32) {
            if ((double)n_other <= choices_bound * (double)n) continue;
            return cg_fail(error, CG_FAILED, "%s/%s: %lld of %lld entries are not those of the CPU",
                           value->scope, value->name, (long long)n_other, (long long)n);
        }
        const double relative = norm > 0 ? sqrt(difference / norm) : sqrt(difference);
        if (relative > *worst) *worst = relative;
        if (!(relative <= bound)) /* NaN as well */
            return cg_fail(error, CG_FAILED, "%s/%s differs from the CPU's by %.3g of its norm, bound %.1e",
                           value->scope, value->name, relative, bound);
    }
    return true;
}

/* Values of both graphs have the same order: they are built alike. */
static bool run_cpu(const task *t, const char *device, size_t device_bytes, double *worst, cg_error *error) {
    cg_step step = {0};
    cg_measurement planned = {0};
    cg_exec *exec = NULL;
    size_t bytes = 0;
    char *data = NULL;
    bool ok = set_up(t, false, true, &step, &planned, &exec, error) && cg_exec_run(exec, CG_ALL_PASSES, error);
    if (ok && !(data = results_of(step.graph, exec, &bytes)))
        ok = cg_fail(error, CG_FAILED, "out of memory for results");
    if (ok && bytes != device_bytes)
        ok = cg_fail(error, CG_FAILED, "the CPU has %zu bytes of results, the device %zu", bytes, device_bytes);
    ok = ok && near(t, step.graph, data, device, worst, error);
    free(data);
    cg_exec_free(exec);
    cg_measurement_free(&planned);
    cg_step_free(&step);
    return ok;
}

static bool repeat(const task *t, cg_error *error) {
    cg_step step = {0};
    cg_measurement planned = {0};
    cg_exec *exec = NULL;
    char *first = NULL;
    size_t bytes = 0;
    double worst = 0;
    bool ok = set_up(t, true, true, &step, &planned, &exec, error);
    for (int i = 0; ok && i < t->n_runs; i++) {
        size_t again;
        if (!(ok = cg_exec_run(exec, CG_ALL_PASSES, error))) break;
        char *data = results_of(step.graph, exec, &again);
        if (!data)
            ok = cg_fail(error, CG_FAILED, "out of memory for results");
        else if (!first)
            first = data, bytes = again;
        else if (memcmp(first, data, bytes))
            ok = cg_fail(error, CG_FAILED, "run %d of %d gave other bits than the first", i + 1, t->n_runs);
        if (data != first) free(data);
    }
    const int64_t asked = cg_device_asked_peak(t->device), peak = planned.planned_peak_bytes;
    if (ok && asked < peak)
        ok = cg_fail(error, CG_FAILED, "the plan needs %lld bytes, and the device was asked for %lld",
                     (long long)peak, (long long)asked);
    ok = ok && run_cpu(t, first, bytes, &worst, error);
    if (ok)
        printf("%s, %s, %lld tokens, %s: %d runs gave the same %zu bytes; at most %.2g from the CPU\n",
               t->part->name, t->dims, (long long)t->workload.config.seq_len,
               cg_dtype_name(t->workload.config.dtype), t->n_runs, bytes, worst);
    free(first);
    cg_exec_free(exec);
    cg_measurement_free(&planned);
    cg_step_free(&step);
    return ok;
}

/* ---- time ---- */

/* The time that an H200 needs at least for so much work on so many bytes. */
static double floor_us(cg_dtype dtype, double flops, double bytes) {
    const double rate = dtype == CG_BF16 ? bf16_flops : dtype == CG_F64 ? f64_flops : f32_flops;
    return 1e6 * fmax(flops / rate, bytes / memory_bytes);
}

/* What the part takes beyond inputs and their gradients when every head's scores are saved: planned alone. */
static bool plan_saved(const task *t, int64_t *bytes, cg_error *error) {
    task saved = *t;
    cg_step step = {0};
    cg_measurement planned = {0};
    saved.workload.backend = &t->backend;
    snprintf(saved.workload.config.policy, sizeof saved.workload.config.policy, "save");
    const bool ok = cg_measure_plan(&saved.workload, &step, &planned, error);
    *bytes = planned.planned_peak_bytes - planned.boundary_bytes;
    cg_measurement_free(&planned);
    cg_step_free(&step);
    return ok;
}

/* Bytes of a timed part: its planned peak, what was asked of the driver for it, by how much the driver's free memory fell
 * (kernels that were loaded meanwhile included), and plan_saved. */
typedef struct part_bytes {
    int64_t planned, asked, driver, saved;
} part_bytes;

static bool write_json(FILE *file, const bench_row *r, const part_bytes *b) {
    const double floor = floor_us(r->dtype, r->flops, r->bytes);
    fprintf(
        file,
        "{\"name\": \"%s\", \"dims\": \"%s\", \"policy\": \"%s\", \"seq\": %lld, \"dtype\": \"%s\", "
        "\"threads\": %d, \"fwd_us\": %.9g, \"bwd_us\": %.9g, \"optimize_us\": %.9g, \"step_us\": %.9g, "
        "\"flops\": %.9g, \"bytes\": %.9g, \"gflops\": %.9g, \"peak_share\": %.9g, \"extra_peak_bytes\": %lld, "
        "\"extra_peak_bytes_save\": %lld, \"planned_peak_bytes\": %lld, \"asked_bytes\": %lld, "
        "\"driver_bytes\": %lld, "
        "\"floor_us\": %.9g, \"ops\": [",
        r->name, r->dims, r->policy, (long long)r->seq, cg_dtype_name(r->dtype), cg_threads(),
        r->us[CG_FORWARD], bench_row_backward_us(r), r->us[CG_OPTIMIZE], r->step_us, r->flops, r->bytes,
        r->flops / bench_row_us(r) * 1e-3, r->flops / bench_row_us(r) * 1e-3 / r->peak_gflops,
        (long long)r->extra_peak_bytes, (long long)b->saved, (long long)b->planned, (long long)b->asked,
        (long long)b->driver, floor);
    for (int k = 0; k < r->n_ops; k++)
        fprintf(file,
                "%s\n  {\"op\": \"%s\", \"variant\": \"%s\", \"pass\": \"%s\", \"nodes\": %d, \"us\": %.9g, "
                "\"flops\": %.9g, \"bytes\": %.9g, \"floor_us\": %.9g}",
                k ? "," : "", r->ops[k].op, r->ops[k].variant, cg_pass_name(r->ops[k].pass), r->ops[k].n_nodes,
                r->ops[k].us, r->ops[k].flops, r->ops[k].bytes,
                floor_us(r->dtype, r->ops[k].flops, r->ops[k].bytes));
    fprintf(file, "]}\n");
    return !ferror(file);
}

static bool append(const char *path, const bench_row *row, const part_bytes *bytes, cg_error *error) {
    FILE *file = fopen(path, "a");
    bool ok = file && write_json(file, row, bytes);
    if (file) ok &= fclose(file) == 0;
    return ok || cg_fail(error, CG_FAILED, "%s: %s", path, strerror(errno));
}

/* A run to load kernels and one to record, the recording timed as a whole, then each node by the device's clock. */
static bool time_part(const task *t, const char *path, cg_error *error) {
    cg_step step = {0};
    cg_measurement planned = {0};
    cg_exec *exec = NULL;
    bench_row row = {.name = t->part->name,
                     .dims = t->dims,
                     .policy = t->workload.config.policy,
                     .seq = t->workload.config.seq_len,
                     .dtype = t->workload.config.dtype,
                     .peak_gflops = 1e-9 * f32_flops};
    if (row.dtype == CG_BF16) row.peak_gflops = 1e-9 * bf16_flops;
    if (row.dtype == CG_F64) row.peak_gflops = 1e-9 * f64_flops;
    part_bytes bytes = {0};
    int64_t before = 0, after = 0;
    const int64_t asked = cg_device_asked_bytes(t->device);
    bool ok = cg_device_free_bytes(t->device, &before, error) &&
              set_up(t, true, false, &step, &planned, &exec, error);
    bytes.asked = cg_device_asked_bytes(t->device) - asked;
    const int n_steps = ok ? step.plan->n_steps : 0;
    double *node_us = calloc((size_t)n_steps + 1, sizeof *node_us), watched_us;
    if (ok && !node_us) ok = cg_fail(error, CG_FAILED, "out of memory for the times of %d nodes", n_steps);
    ok = ok && cg_exec_run(exec, CG_ALL_PASSES, error) && cg_exec_run(exec, CG_ALL_PASSES, error) &&
         cg_measure_time(exec, n_steps, t->n_runs, NULL, &row.step_us, error) &&
         cg_measure_time(exec, n_steps, t->n_runs, node_us, &watched_us, error) &&
         bench_row_add_nodes(&row, step.plan, node_us, error);
    ok = ok && cg_device_free_bytes(t->device, &after, error) && plan_saved(t, &bytes.saved, error);
    bytes.planned = planned.planned_peak_bytes;
    bytes.driver = before - after;
    if (ok) {
        row.extra_peak_bytes = planned.planned_peak_bytes - planned.boundary_bytes;
        const double floor = floor_us(row.dtype, row.flops, row.bytes);
        printf("%-15s %-6s %7lld %-5s %11.3f %11.3f %11.3f %11.3f %7.1f %% %11.1f %9.2f %%\n", row.name,
               row.dims, (long long)row.seq, cg_dtype_name(row.dtype), row.us[CG_FORWARD] / 1e3,
               bench_row_backward_us(&row) / 1e3, row.step_us / 1e3, floor / 1e3, 100 * floor / row.step_us,
               (double)row.extra_peak_bytes / 1048576,
               100 * (double)row.extra_peak_bytes / (double)bytes.saved);
        ok = append(path, &row, &bytes, error);
    }
    free(node_us);
    free(row.ops);
    cg_exec_free(exec);
    cg_measurement_free(&planned);
    cg_step_free(&step);
    return ok;
}

static bool say_wgmma(cg_device *device, cg_error *error) {
    cg_cuda_wgmma found;
    if (!cg_cuda_try_wgmma(device, &found, error)) return false;
    if (found == CG_WGMMA_DIFFERS)
        return cg_fail(
            error, CG_FAILED,
            "wgmma and mma.sync give different bits: no kernel is made of wgmma, please report this");
    puts(found == CG_WGMMA_WORKS ? "wgmma and mma.sync give the same bits: kernels are made of wgmma"
                                 : "this device has no wgmma: kernels are made of mma.sync");
    return true;
}

int main(int argc, char **argv) {
    const bool repeats = argc == 7 && !strcmp(argv[1], "repeat"), times = argc == 8 && !strcmp(argv[1], "time"),
               tries_wgmma = argc == 2 && !strcmp(argv[1], "wgmma");
    cg_error error = {0};
    task t = {0};
    if (!repeats && !times && !tries_wgmma) {
        fprintf(stderr, "usage: gpu_bench repeat PART DIMS TOKENS DTYPE RUNS | "
                        "time PART DIMS TOKENS DTYPE RUNS FILE | wgmma\n");
        return CG_BAD_INPUT;
    }
    bool ok = tries_wgmma || read_task(argv + 2, &t, &error);
    ok = ok && (t.device = cg_device_open(0, &error)) != NULL &&
         cg_cuda_backend(&t.backend, t.device, getenv("CSAGRAD_CUDA_VARIANT"), &error);
    if (ok && tries_wgmma) ok = say_wgmma(t.device, &error);
    if (ok && repeats) ok = repeat(&t, &error);
    if (ok && times) ok = time_part(&t, argv[7], &error);
    cg_device_close(t.device);
    if (!ok) fprintf(stderr, "gpu_bench: %s\n", error.text);
    return ok ? 0 : (int)error.code;
}
