#include "graph/exec.h"

#include "core/base/process.h"
#include "graph/widen.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

/* The arguments of a step, made once: tensors whose data pointers never change (but for separate blocks). */
typedef struct step_args {
    cg_run_args args;
    cg_tensor *tensors;     /* inputs, then outputs */
    size_t workspace_bytes; /* asked of the op once more: what is measured must not come from the plan */
} step_args;

enum { CG_PASS_SETS = 1 << (CG_PASSES + 1) }; /* passes, and CG_HOLD_CHOICES */

struct cg_exec {
    const cg_plan *plan;
    cg_exec_options options;
    char *arena;
    size_t arena_bytes;
    void **data; /* by storage */
    step_args *steps;
    int64_t high_water;  /* the farthest byte handed out, or the most bytes in separate blocks */
    int64_t block_bytes; /* in separate blocks now */
    bool forward_ran;    /* since the last backward */
    cg_exec_watcher watcher;
    void *watcher_context;
    /* on a device */
    cg_device *device;       /* NULL: the CPU */
    cg_error failure;        /* of a copy in or out; reported by the next run */
    cg_event *begin, *end;   /* around a watched node */
    cg_device_fault *faults; /* as read at the end of a run */
    bool ran[CG_PASS_SETS];  /* by passes: a run launched all nodes */
    cg_recording *recordings[CG_PASS_SETS];
};

static bool is_pinned(const cg_storage *storage) {
    return storage->kept || (storage->value && storage->value->leaf);
}

/* ---- memory of the CPU or the device ---- */

static bool fill(const cg_exec *exec, void *to, unsigned char byte, size_t bytes, cg_error *error) {
    if (exec->device) return cg_device_fill(exec->device, to, byte, (int64_t)bytes, error);
    memset(to, byte, bytes);
    return true;
}

static bool copy_in(const cg_exec *exec, void *to, const void *from, size_t bytes, cg_error *error) {
    if (exec->device) return cg_device_write(exec->device, to, from, (int64_t)bytes, error);
    memcpy(to, from, bytes);
    return true;
}

static bool copy_out(const cg_exec *exec, void *to, const void *from, size_t bytes, cg_error *error) {
    if (exec->device) return cg_device_read(exec->device, to, from, (int64_t)bytes, error);
    memcpy(to, from, bytes);
    return true;
}

/* ---- separate blocks, for debugging ---- */

/* Exact size: the byte behind it belongs to nobody. */
static void *allocate(const cg_exec *exec, size_t bytes, cg_error *error) {
    void *block = NULL;
    if (exec->device) return cg_device_alloc(exec->device, (int64_t)bytes, error);
    if (!posix_memalign(&block, CG_ALIGN, bytes ? bytes : 1)) return block;
    cg_fail(error, CG_FAILED, "out of memory for a block of %zu bytes", bytes);
    return NULL;
}

static bool block_new(cg_exec *exec, int s, cg_error *error) {
    const cg_storage *storage = &exec->plan->storages[s];
    size_t bytes = (size_t)storage->bytes;
    void *block = allocate(exec, bytes, error);
    if (!block) return false;
    exec->data[s] = block;
    exec->block_bytes += storage->reserved;
    if (exec->block_bytes > exec->high_water) exec->high_water = exec->block_bytes;
    return fill(exec, block, storage->value && storage->value->leaf ? 0 : 0xff, bytes, error);
}

static void block_free(cg_exec *exec, int s) {
    if (!exec->data[s]) return;
    if (exec->device)
        cg_device_free(exec->device, exec->data[s]);
    else
        free(exec->data[s]);
    exec->data[s] = NULL;
    exec->block_bytes -= exec->plan->storages[s].reserved;
}

/* Blocks born at step t; a storage that takes another's place shares its block until the step is done. */
static bool blocks_born(cg_exec *exec, int t, cg_error *error) {
    const cg_storage *storages = exec->plan->storages;
    for (int s = 0; s < exec->plan->n_storages; s++) {
        if (storages[s].first != t || exec->data[s] || storages[s].taken_over >= 0) continue;
        if ((storages[s].value && storages[s].value->leaf) || s == exec->plan->faults) continue;
        if (!block_new(exec, s, error)) return false;
    }
    for (int s = 0; s < exec->plan->n_storages;
         s++) /* last, so that no failure leaves a block with two owners */
        if (storages[s].first == t && storages[s].taken_over >= 0 && !exec->data[s])
            exec->data[s] = exec->data[storages[s].taken_over];
    return true;
}

static void blocks_dead(cg_exec *exec, int t) {
    const cg_storage *storages = exec->plan->storages;
    for (int s = 0; s < exec->plan->n_storages; s++) {
        int from = storages[s].taken_over;
        if (storages[s].first == t && from >= 0 && exec->data[from] == exec->data[s]) exec->data[from] = NULL;
    }
    for (int s = 0; s < exec->plan->n_storages; s++)
        if (storages[s].last == t && !is_pinned(&storages[s]) && s != exec->plan->faults) block_free(exec, s);
}

/* ---- arguments ---- */

/* Kernels divide their workspace among threads also where it is empty, and C forbids that on NULL. Only the end of
 * this is handed out: there is no byte to write. */
static _Alignas(CG_ALIGN) char no_workspace[CG_ALIGN];

static void *storage_data(const cg_exec *exec, const cg_value *value) {
    int s = exec->plan->storage_of[value->id];
    return s < 0 ? NULL : exec->data[s];
}

static void point_inputs(cg_exec *exec, int t) {
    const cg_node *node = exec->plan->steps[t];
    for (int i = 0; i < node->n_in; i++)
        if (node->in[i]) exec->steps[t].tensors[i].data = storage_data(exec, node->in[i]);
}

static void point_outputs(cg_exec *exec, int t) {
    const cg_node *node = exec->plan->steps[t];
    step_args *step = &exec->steps[t];
    for (int s = 0; s < node->n_out; s++) step->tensors[node->n_in + s].data = storage_data(exec, node->out[s]);
    int workspace = exec->plan->workspace_of[t];
    step->args.workspace = workspace >= 0 ? exec->data[workspace]
                           : exec->device ? NULL
                                          : no_workspace + sizeof no_workspace;
    if (exec->plan->fault_of[t] >= 0)
        step->args.fault = (cg_device_fault *)exec->data[exec->plan->faults] + exec->plan->fault_of[t];
}

static void point(cg_exec *exec, int t) {
    point_inputs(exec, t);
    point_outputs(exec, t);
}

static bool workspace_of(const cg_plan *plan, const cg_node *node, size_t *bytes, cg_error *error) {
    cg_device_kernel kernel = {0};
    if (plan->backend && !node->op->alias && !plan->backend->kernel_of(plan->backend, node, &kernel, error))
        return false;
    *bytes = plan->backend ? kernel.workspace : cg_node_workspace(node);
    return true;
}

static bool make_steps(cg_exec *exec, cg_error *error) {
    const cg_plan *plan = exec->plan;
    exec->steps = calloc((size_t)plan->n_steps + 1, sizeof *exec->steps);
    for (int t = 0; exec->steps && t < plan->n_steps; t++) {
        const cg_node *node = plan->steps[t];
        step_args *step = &exec->steps[t];
        step->tensors = calloc((size_t)(node->n_in + node->n_out) + 1, sizeof *step->tensors);
        if (!step->tensors) return cg_fail(error, CG_FAILED, "out of memory while an executor is made");
        for (int i = 0; i < node->n_in; i++)
            if (node->in[i]) step->tensors[i] = (cg_tensor){node->in[i]->dtype, node->in[i]->shape, NULL};
        for (int s = 0; s < node->n_out; s++)
            step->tensors[node->n_in + s] = (cg_tensor){node->out[s]->dtype, node->out[s]->shape, NULL};
        step->args = (cg_run_args){.n_in = node->n_in,
                                   .n_out = node->n_out,
                                   .in = step->tensors,
                                   .out = step->tensors + node->n_in,
                                   .attr = node->attr};
        if (!workspace_of(plan, node, &step->workspace_bytes, error)) return false;
        int planned = plan->workspace_of[t];
        if (step->workspace_bytes > (planned < 0 ? 0 : (size_t)plan->storages[planned].bytes))
            return cg_fail(error, CG_FAILED, "%s%s%s needs %zu bytes of workspace, the plan has fewer",
                           node->scope, node->scope[0] ? ": " : "", node->op->name, step->workspace_bytes);
        if (!plan->backend && !cg_node_has_kernel(node))
            return cg_fail(error, CG_BAD_INPUT, "%s%s%s has no kernel for %s", node->scope,
                           node->scope[0] ? ": " : "", node->op->name, cg_dtype_name(cg_node_dtype(node)));
    }
    return exec->steps || cg_fail(error, CG_FAILED, "out of memory while an executor is made");
}

enum { HUGE_PAGE = 1 << 21 };

/* In huge pages where the system gives them, beginning at one's start: a step walks through all of the arena, and each
 * small page's address would be looked up. A last page that is not filled stays small, so the process's memory is that of
 * the plan. */
static bool map_arena(cg_exec *exec, cg_error *error) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), bytes = (exec->arena_bytes / page + 1) * page;
    char *map = mmap(NULL, bytes + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED)
        return cg_fail(error, CG_FAILED, "the machine refuses %lld bytes of memory for the step",
                       (long long)exec->plan->peak_bytes);
    const size_t before = -(uintptr_t)map % HUGE_PAGE;
    exec->arena = map + before;
    if (before > 0) munmap(map, before);
    munmap(exec->arena + bytes, HUGE_PAGE - before);
    madvise(exec->arena, exec->arena_bytes, MADV_HUGEPAGE);
    return true;
}

static bool make_arena(cg_exec *exec, cg_error *error) {
    const cg_plan *plan = exec->plan;
    exec->arena_bytes = (size_t)plan->peak_bytes;
    if (exec->device) {
        exec->arena = cg_device_alloc(exec->device, plan->peak_bytes, error);
        if (!exec->arena || !fill(exec, exec->arena, 0, exec->arena_bytes, error)) return false;
    } else if (!map_arena(exec, error)) {
        return false;
    }
    for (int s = 0; s < plan->n_storages; s++)
        if (plan->storages[s].offset >= 0) exec->data[s] = exec->arena + plan->storages[s].offset;
    return true;
}

/* Originals that died before their clones would be compared with whatever lies there by then. */
static bool originals_are_kept(const cg_plan *plan, cg_error *error) {
    for (int t = 0; t < plan->n_steps; t++) {
        const cg_node *clone = plan->steps[t];
        if (clone->pass != CG_RECOMPUTE) continue;
        for (int s = 0; s < clone->n_out; s++) {
            int original = plan->storage_of[clone->cause->out[s]->id];
            if (original >= 0 && plan->storages[original].last < t)
                return cg_fail(error, CG_BAD_INPUT,
                               "verify_recompute needs a plan made with keep_cloned_originals");
        }
    }
    return true;
}

bool cg_exec_has_room(const cg_plan *plan, cg_error *error) {
    const cg_memory_limit limit = cg_process_memory_limit("");
    return plan->backend || plan->peak_bytes <= limit.bytes ||
           cg_fail(error, CG_FAILED, "the step needs %lld bytes, %s %lld", (long long)plan->peak_bytes,
                   limit.whose, (long long)limit.bytes);
}

cg_exec *cg_exec_new(const cg_plan *plan, const cg_exec_options *options, cg_error *error) {
    if (!cg_exec_has_room(plan, error)) return NULL;
    cg_exec *exec = calloc(1, sizeof *exec);
    if (!exec) {
        cg_fail(error, CG_FAILED, "out of memory while an executor is made");
        return NULL;
    }
    exec->plan = plan;
    exec->device = plan->backend ? plan->backend->device : NULL;
    if (options) exec->options = *options;
    exec->data = calloc((size_t)plan->n_storages + 1, sizeof *exec->data);
    bool ok = exec->data || cg_fail(error, CG_FAILED, "out of memory while an executor is made");
    ok = ok && make_steps(exec, error);
    if (ok && exec->device) {
        exec->faults = calloc((size_t)plan->n_faults + 1, sizeof *exec->faults);
        ok = (exec->faults || cg_fail(error, CG_FAILED, "out of memory while an executor is made")) &&
             (exec->begin = cg_event_new(exec->device, error)) &&
             (exec->end = cg_event_new(exec->device, error));
    }
    if (ok && exec->options.verify_recompute) ok = originals_are_kept(plan, error);
    if (ok && exec->options.separate) {
        for (int s = 0; ok && s < plan->n_storages; s++) {
            const cg_value *value = plan->storages[s].value;
            if ((value && value->leaf && !value->external) || s == plan->faults) ok = block_new(exec, s, error);
        }
    } else if (ok) {
        ok = make_arena(exec, error);
        for (int t = 0; ok && t < plan->n_steps; t++) point(exec, t);
    }
    if (ok) return exec;
    cg_exec_free(exec);
    return NULL;
}

static void forget_recordings(cg_exec *exec) {
    for (int p = 0; p < CG_PASS_SETS; p++) {
        cg_recording_free(exec->recordings[p]);
        exec->recordings[p] = NULL;
        exec->ran[p] = false;
    }
}

void cg_exec_free(cg_exec *exec) {
    if (!exec) return;
    if (exec->options.separate && exec->data)
        for (int s = 0; s < exec->plan->n_storages; s++)
            if (!(exec->plan->storages[s].value && exec->plan->storages[s].value->external))
                block_free(exec, s);
    if (exec->arena && exec->device)
        cg_device_free(exec->device, exec->arena);
    else if (exec->arena)
        munmap(exec->arena, exec->arena_bytes + 1);
    forget_recordings(exec);
    cg_event_free(exec->begin);
    cg_event_free(exec->end);
    free(exec->faults);
    for (int t = 0; exec->steps && t < exec->plan->n_steps; t++) free(exec->steps[t].tensors);
    free(exec->steps);
    free(exec->data);
    free(exec);
}

static void lend(cg_exec *exec, const cg_value *leaf, void *data) {
    int s = exec->plan->storage_of[leaf->id];
    if (s < 0 || !leaf->external) return;
    exec->data[s] = data;
    forget_recordings(exec);
    if (!exec->options.separate)
        for (int t = 0; t < exec->plan->n_steps; t++) point(exec, t);
}

void cg_exec_bind(cg_exec *exec, const cg_value *leaf, void *data) {
    if (!exec->device) lend(exec, leaf, data);
}

void cg_exec_bind_value(cg_exec *exec, const cg_value *leaf, const cg_exec *lender, const cg_value *value) {
    if (exec->device == lender->device) lend(exec, leaf, storage_data(lender, value));
}

void cg_exec_watch(cg_exec *exec, cg_exec_watcher watcher, void *context) {
    exec->watcher = watcher;
    exec->watcher_context = context;
}

int64_t cg_exec_measured_bytes(const cg_exec *exec) { return exec->high_water; }

static void measure(cg_exec *exec, const void *data, int64_t bytes) {
    const char *p = data;
    if (!p || p < exec->arena || p >= exec->arena + exec->arena_bytes) return; /* lent, or nothing */
    bytes += CG_ALIGN - 1;
    bytes -= bytes % CG_ALIGN;
    int64_t end = p - exec->arena + bytes;
    if (end > exec->high_water) exec->high_water = end;
}

/* What the caller is handed counts too: a leaf that no node reads is memory all the same. */
static char *callers_data(const cg_exec *exec, const cg_value *value) {
    void *data = storage_data(exec, value);
    if (exec->arena) measure((cg_exec *)exec, data, cg_tensor_bytes(value->dtype, &value->shape));
    return data;
}

void *cg_exec_data(const cg_exec *exec, const cg_value *value) {
    void *data = callers_data(exec, value);
    return exec->device ? NULL : data;
}

void cg_exec_write_part(cg_exec *exec, const cg_value *value, int64_t first, int64_t n, const void *data) {
    char *to = callers_data(exec, value);
    size_t element = cg_dtype_bytes(value->dtype);
    if (to) copy_in(exec, to + (size_t)first * element, data, (size_t)n * element, &exec->failure);
}

void cg_exec_read_part(cg_exec *exec, const cg_value *value, int64_t first, int64_t n, void *data) {
    const char *from = callers_data(exec, value);
    size_t element = cg_dtype_bytes(value->dtype), bytes = (size_t)n * element;
    if (from && !copy_out(exec, data, from + (size_t)first * element, bytes, &exec->failure))
        memset(data, 0xff, bytes);
}

void cg_exec_write(cg_exec *exec, const cg_value *value, const void *data) {
    cg_exec_write_part(exec, value, 0, cg_shape_count(&value->shape), data);
}

void cg_exec_read(cg_exec *exec, const cg_value *value, void *data) {
    cg_exec_read_part(exec, value, 0, cg_shape_count(&value->shape), data);
}

void *cg_exec_fill(cg_exec *exec, const cg_value *leaf) {
    char *data = callers_data(exec, leaf);
    if (!exec->device || !data) return data;
    size_t bytes = (size_t)cg_tensor_bytes(leaf->dtype, &leaf->shape);
    void *copy = malloc(bytes + 1);
    if (copy)
        cg_exec_read(exec, leaf, copy);
    else
        cg_fail(&exec->failure, CG_FAILED, "out of memory for a copy of %s, %zu bytes", leaf->name, bytes);
    return copy;
}

void cg_exec_filled(cg_exec *exec, const cg_value *leaf, void *data) {
    if (!exec->device || !data) return;
    cg_exec_write(exec, leaf, data);
    free(data);
}

const cg_plan *cg_exec_plan(const cg_exec *exec) { return exec->plan; }

enum { CHUNK = 1024 };

void cg_exec_write_real(cg_exec *exec, const cg_value *value, int64_t first, int64_t n, const double *x) {
    char *to = callers_data(exec, value);
    const size_t element = cg_dtype_bytes(value->dtype);
    _Alignas(CG_ALIGN) char chunk[CHUNK * sizeof(double)];
    for (int64_t i = 0; to && i < n; i += CHUNK) {
        const int64_t some = n - i < CHUNK ? n - i : CHUNK;
        for (int64_t k = 0; k < some; k++) cg_dtype_set(value->dtype, chunk, k, x[i + k]);
        if (!copy_in(exec, to + (size_t)(first + i) * element, chunk, (size_t)some * element, &exec->failure))
            return;
    }
}

void cg_exec_read_real(cg_exec *exec, const cg_value *value, int64_t first, int64_t n, double *x) {
    const char *from = callers_data(exec, value);
    const size_t element = cg_dtype_bytes(value->dtype);
    _Alignas(CG_ALIGN) char chunk[CHUNK * sizeof(double)];
    for (int64_t i = 0; i < n; i += CHUNK) {
        const int64_t some = n - i < CHUNK ? n - i : CHUNK;
        const bool ok = from && copy_out(exec, chunk, from + (size_t)(first + i) * element,
                                         (size_t)some * element, &exec->failure);
        for (int64_t k = 0; k < some; k++) x[i + k] = ok ? cg_dtype_get(value->dtype, chunk, k) : NAN;
    }
}

void cg_exec_set(cg_exec *exec, const cg_value *value, int64_t i, double x) {
    cg_exec_write_real(exec, value, i, 1, &x);
}

double cg_exec_get(cg_exec *exec, const cg_value *value, int64_t i) {
    double x;
    cg_exec_read_real(exec, value, i, 1, &x);
    return x;
}

/* ---- running ---- */

static void measure_step(cg_exec *exec, int t) {
    const step_args *step = &exec->steps[t];
    for (int i = 0; i < step->args.n_in + step->args.n_out; i++) {
        const cg_tensor *tensor = &step->tensors[i];
        if (tensor->data) measure(exec, tensor->data, cg_tensor_bytes(tensor->dtype, &tensor->shape));
    }
    if (step->workspace_bytes) measure(exec, step->args.workspace, (int64_t)step->workspace_bytes);
}

static bool poison(cg_exec *exec, int t, cg_error *error) {
    const cg_node *node = exec->plan->steps[t];
    const step_args *step = &exec->steps[t];
    for (int s = 0; s < node->n_out; s++) {
        const cg_storage *storage = &exec->plan->storages[exec->plan->storage_of[node->out[s]->id]];
        if (storage->taken_over >= 0) continue; /* its bytes are the input */
        if (!fill(exec, step->args.out[s].data, 0xff, (size_t)storage->bytes, error)) return false;
    }
    return !step->workspace_bytes || fill(exec, step->args.workspace, 0xff, step->workspace_bytes, error);
}

static bool same_bits(const cg_node *clone, int slot, const char *a, const char *b, cg_error *error) {
    size_t element = cg_dtype_bytes(clone->out[slot]->dtype);
    int64_t n = cg_shape_count(&clone->out[slot]->shape);
    for (int64_t i = 0; i < n; i++)
        if (memcmp(a + (size_t)i * element, b + (size_t)i * element, element))
            return cg_fail(error, CG_FAILED,
                           "the recomputed output %s differs from the original at element %lld",
                           clone->op->out[slot], (long long)i);
    return true;
}

static bool verify_clone(cg_exec *exec, int t, cg_error *error) {
    const cg_node *clone = exec->plan->steps[t], *original = clone->cause;
    bool ok = true;
    for (int s = 0; ok && s < clone->n_out; s++) {
        const char *a = storage_data(exec, original->out[s]), *b = storage_data(exec, clone->out[s]);
        if (!a) continue; /* nothing of the plan needed the original itself */
        size_t bytes = (size_t)cg_tensor_bytes(clone->out[s]->dtype, &clone->out[s]->shape);
        char *copies = exec->device ? malloc(2 * bytes + 1) : NULL;
        if (exec->device) {
            ok = (copies || cg_fail(error, CG_FAILED, "out of memory for the outputs of a clone")) &&
                 copy_out(exec, copies, a, bytes, error) && copy_out(exec, copies + bytes, b, bytes, error);
            a = copies;
            b = copies + bytes;
        }
        ok = ok && same_bits(clone, s, a, b, error);
        free(copies);
    }
    return ok;
}

/* Without memory a kernel would crash: a leaf that was not lent, or, in separate blocks, a value of a pass that
 * did not run before. */
static bool has_inputs(const cg_exec *exec, int t, cg_error *error) {
    const cg_node *node = exec->plan->steps[t];
    for (int i = 0; i < node->n_in; i++) {
        if (!node->in[i] || exec->steps[t].tensors[i].data) continue;
        char name[256];
        return cg_fail(error, CG_BAD_INPUT, "%s has no memory: %s",
                       cg_value_text(node->in[i], name, sizeof name),
                       cg_value_root(node->in[i])->external ? "bind it with cg_exec_bind"
                                                            : "the pass that computes it did not run before");
    }
    return true;
}

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

/* The node's work, done or queued. */
static bool run_kernel(cg_exec *exec, int t, cg_error *error) {
    cg_run_args *args = &exec->steps[t].args;
    args->error = error;
    if (exec->device) return exec->plan->kernels[t].launch(args, cg_device_stream(exec->device));
    return cg_node_run(exec->plan->steps[t], args);
}

static bool run_watched(cg_exec *exec, int t, cg_error *error) {
    double us, start = now_us();
    bool ok = (!exec->device || cg_event_mark(exec->begin, error)) && run_kernel(exec, t, error);
    us = now_us() - start;
    if (ok && exec->device)
        ok = cg_event_mark(exec->end, error) && cg_event_elapsed(exec->begin, exec->end, &us, error);
    exec->watcher(exec->watcher_context, t, exec->plan->steps[t], us);
    return ok;
}

static void at_node(cg_error *error, const cg_node *node) {
    cg_error_at(error, "%s", node->op->name);
    if (node->scope[0]) cg_error_at(error, "%s", node->scope);
}

static bool run_step(cg_exec *exec, int t, cg_error *error) {
    const cg_node *node = exec->plan->steps[t];
    if (exec->options.separate) {
        point_inputs(exec, t); /* before an output takes over the block of one */
        if (!blocks_born(exec, t, error)) return false;
        point_outputs(exec, t);
    } else {
        measure_step(exec, t);
    }
    bool ok = true;
    if (!node->op->alias) {
        ok = has_inputs(exec, t, error);
        if (ok && exec->options.poison) ok = poison(exec, t, error);
        ok = ok && (exec->watcher ? run_watched(exec, t, error) : run_kernel(exec, t, error));
        if (!ok) cg_fail(error, CG_FAILED, "failed");
        if (ok && exec->options.verify_recompute && node->pass == CG_RECOMPUTE)
            ok = verify_clone(exec, t, error);
        if (!ok) at_node(error, node);
    }
    if (exec->options.separate) blocks_dead(exec, t);
    return ok;
}

static bool runs_now(const cg_node *node, unsigned passes) {
    if (!(passes & CG_PASS_BIT(node->pass))) return false;
    return !(passes & CG_HOLD_CHOICES) || node->op->replay != CG_REPLAY_CHOICE;
}

/* Backward gives the memory of what it has read to others, so it cannot run twice on one forward. */
static bool has_forward(const cg_exec *exec, unsigned passes, cg_error *error) {
    if (!(passes & CG_PASS_BIT(CG_BACKWARD)) || (passes & CG_PASS_BIT(CG_FORWARD)) || exec->forward_ran)
        return true;
    for (int t = 0; t < exec->plan->n_steps; t++)
        if (exec->plan->steps[t]->pass == CG_FORWARD)
            return cg_fail(error, CG_BAD_INPUT, "backward needs a forward run of its own before it");
    return true;
}

static bool run_steps(cg_exec *exec, unsigned passes, cg_error *error) {
    static const volatile sig_atomic_t never;
    const bool may_stop = exec->options.stop && !exec->device && (passes & CG_PASS_BIT(CG_FORWARD)) &&
                          !(passes & CG_PASS_BIT(CG_OPTIMIZE));
    const volatile sig_atomic_t *stop = may_stop ? exec->options.stop : &never;
    for (int t = 0; t < exec->plan->n_steps; t++)
        if (*stop || (runs_now(exec->plan->steps[t], passes) && !run_step(exec, t, error))) return false;
    return true;
}

/* ---- on a device ---- */

/* Wait, and turn what the first kernel found wrong with its data into a sentence. */
static bool check_faults(cg_exec *exec, cg_error *error) {
    const cg_plan *plan = exec->plan;
    if (plan->faults < 0) return cg_device_wait(exec->device, error);
    if (!copy_out(exec, exec->faults, exec->data[plan->faults], (size_t)plan->storages[plan->faults].bytes,
                  error))
        return false;
    for (int t = 0; t < plan->n_steps; t++) {
        if (plan->fault_of[t] < 0 || !exec->faults[plan->fault_of[t]].what) continue;
        plan->kernels[t].describe(&exec->steps[t].args, &exec->faults[plan->fault_of[t]], error);
        cg_fail(error, CG_FAILED, "failed");
        at_node(error, plan->steps[t]);
        return false;
    }
    return true;
}

static bool record(cg_exec *exec, unsigned passes, cg_error *error) {
    if (!cg_device_record_begin(exec->device, error)) return false;
    bool ok = run_steps(exec, passes, error);
    cg_recording *recording = cg_device_record_end(exec->device, error);
    if (ok && recording) {
        exec->recordings[passes] = recording;
        return true;
    }
    cg_recording_free(recording);
    return false;
}

static bool run_queued(cg_exec *exec, unsigned passes, cg_error *error) {
    const cg_exec_options *options = &exec->options;
    const int faults = exec->plan->faults;
    if (faults >= 0) {
        size_t bytes = (size_t)exec->plan->storages[faults].bytes;
        if (!options->separate) measure(exec, exec->data[faults], (int64_t)bytes);
        if (!fill(exec, exec->data[faults], 0, bytes, error)) return false;
    }
    bool plays = exec->ran[passes] && !options->separate && !options->poison && !options->verify_recompute &&
                 !options->no_recording && !exec->watcher;
    bool ok;
    if (plays)
        ok = (exec->recordings[passes] || record(exec, passes, error)) &&
             cg_device_play(exec->device, exec->recordings[passes], error);
    else
        ok = run_steps(exec, passes, error);
    exec->ran[passes] |= ok; /* libraries have loaded by now what cannot be recorded */
    return ok && check_faults(exec, error);
}

/* The optimizer starts when everything before it is known to be fine. */
static bool run_on_device(cg_exec *exec, unsigned passes, cg_error *error) {
    const unsigned optimize = CG_PASS_BIT(CG_OPTIMIZE);
    return (!(passes & CG_ALL_PASSES & ~optimize) || run_queued(exec, passes & ~optimize, error)) &&
           (!(passes & optimize) || run_queued(exec, passes & (optimize | CG_HOLD_CHOICES), error));
}

bool cg_exec_run(cg_exec *exec, unsigned passes, cg_error *error) {
    const cg_plan *plan = exec->plan;
    if (passes & CG_PASS_BIT(CG_BACKWARD)) passes |= CG_PASS_BIT(CG_RECOMPUTE); /* it reads the clones */
    if (exec->failure.code) return cg_fail(error, exec->failure.code, "%s", exec->failure.text);
    if (!has_forward(exec, passes, error)) return false;
    exec->forward_ran = false;
    if (exec->options.separate) /* what an earlier run left and this one makes again is not alive until then */
        for (int s = 0; s < plan->n_storages; s++) {
            const cg_value *value = plan->storages[s].value;
            if (value && value->producer && runs_now(value->producer, passes)) block_free(exec, s);
        }
    if (!(exec->device ? run_on_device(exec, passes, error) : run_steps(exec, passes, error))) return false;
    exec->forward_ran = (passes & CG_PASS_BIT(CG_FORWARD)) && !(passes & CG_PASS_BIT(CG_BACKWARD));
    return true;
}
