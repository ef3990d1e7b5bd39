/* A row's step as a PyTorch memory snapshot: the pickle of what torch.cuda.memory._snapshot() returns, so that
 * `python -m torch.cuda._memory_viz` and pytorch.org/memory_viz draw it.
 *
 * The arena is the one segment, at ARENA, so that the last digits of an address are the planned offset. A storage is
 * allocated before its first step and freed behind its last one; a storage that is taken over in place is freed right
 * before its heir is allocated at the same address, so that no byte counts twice. Leaves come first; they and kept
 * values are never freed: they are the blocks of the segment. Sizes are reserved bytes (whole multiples of CG_ALIGN),
 * so the bytes alive reach plan->floor_bytes in the peak step, and the farthest one is plan->peak_bytes.
 *
 * Each storage has a stack, innermost frame first, which the tools print as filename:line:name:
 *
 *     layer1/attn/indexer:37:relu.y f32 [512, 8, 128], saved       scope and first step; what it is
 *     layer1/attn/indexer:210:kept for relu_grad of backward ...   scope and last step; why it lives until then
 *     layer1/attn/indexer:36:gradient of matmul                    in backward and recompute: on whose behalf
 *     layer1/attn/indexer:0:scope                                  and outwards, for flame graphs
 *     layer1/attn:0:scope
 *     layer1:0:scope
 *     forward:0:pass
 */
#include "tools/mem_export.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The viewer holds addresses in doubles, which are exact below ADDRESSES. */
static const int64_t ARENA = 1LL << 44, ADDRESSES = 1LL << 53;

/* ---- pickle, protocol 2, by the opcodes that the viewer's own reader knows ---- */

static void put_bytes(FILE *out, uint64_t value, int n_bytes) { /* the lowest byte first */
    for (int i = 0; i < n_bytes; i++) putc((int)(value >> 8 * i & 255), out);
}

static void put_int(FILE *out, int64_t value) {
    if (value >= INT32_MIN && value <= INT32_MAX) {
        putc('J', out); /* BININT */
        put_bytes(out, (uint64_t)value, 4);
    } else {
        fputs("\x8a\x08", out); /* LONG1, 8 bytes */
        put_bytes(out, (uint64_t)value, 8);
    }
}

static void put_text(FILE *out, const char *text) {
    putc('X', out); /* BINUNICODE */
    put_bytes(out, strlen(text), 4);
    fputs(text, out);
}

/* A dictionary is an empty one and its items, each a key and a value; a list is an empty one and its elements. */
static void put_dict(FILE *out) { putc('}', out); }
static void put_list(FILE *out) { putc(']', out); }
static void end_item(FILE *out) { putc('s', out); }
static void end_element(FILE *out) { putc('a', out); }

static void item_int(FILE *out, const char *key, int64_t value) {
    put_text(out, key);
    put_int(out, value);
    end_item(out);
}

static void item_text(FILE *out, const char *key, const char *value) {
    put_text(out, key);
    put_text(out, value);
    end_item(out);
}

static void item_false(FILE *out, const char *key) {
    put_text(out, key);
    putc(0x89, out); /* NEWFALSE */
    end_item(out);
}

/* ---- frames ---- */

typedef struct moment {
    int step, storage;
} moment;

typedef struct snapshot {
    FILE *out;
    const mem_row *row;
    const cg_plan *plan;
    mem_schedule schedule;
    moment *births, *deaths;   /* of all storages, in order; leaves are born before the first step */
    bool *handed_on;           /* by storage: another one takes it over when it dies */
    bool *has_stack;           /* by storage: its stack was written, and goes by the storage's number */
    const cg_saved **saved_of; /* by storage; NULL: not a saved one */
} snapshot;

static void frame(FILE *out, const char *filename, int line, const char *name) {
    put_dict(out);
    item_text(out, "filename", filename);
    item_int(out, "line", line);
    item_text(out, "name", name);
    end_element(out);
}

static const char *scope_or_top(const char *scope) { return scope[0] ? scope : "(top)"; }

/* A frame per component, by its whole path: "layer1/attn", then "layer1". */
static void frames_of_scope(FILE *out, const char *scope) {
    char path[256];
    snprintf(path, sizeof path, "%s", scope);
    for (char *end = path; end && path[0]; end = strrchr(path, '/')) {
        if (end != path) *end = 0;
        frame(out, path, 0, "scope");
    }
}

static void frame_of_birth(snapshot *s, const cg_storage *storage) {
    const cg_value *value = storage->value;
    char text[512], shape[128];
    if (!value) {
        snprintf(text, sizeof text, "workspace of %s", storage->node->op->name);
    } else if (value->leaf) {
        snprintf(text, sizeof text, "%s %s %s, %s", value->name, cg_dtype_name(value->dtype),
                 cg_shape_text(&value->shape, shape, sizeof shape), cg_category_name(storage->category));
    } else {
        const cg_value *parameter = mem_parameter_of(value);
        snprintf(text, sizeof text, "%s.%s%s%s %s %s, %s", value->producer->op->name, value->name,
                 parameter ? " of " : "", parameter ? parameter->name : "", cg_dtype_name(value->dtype),
                 cg_shape_text(&value->shape, shape, sizeof shape), cg_category_name(storage->category));
    }
    frame(s->out, scope_or_top(value ? value->scope : storage->node->scope), storage->first, text);
}

static bool stays(const cg_storage *storage) {
    return storage->kept || (storage->value && storage->value->leaf);
}

static void frame_of_death(snapshot *s, int index) {
    const cg_storage *storage = &s->plan->storages[index];
    const cg_node *last = s->plan->steps[storage->last];
    char text[512] = "", readers[400];
    if (s->saved_of[index])
        snprintf(text, sizeof text, "kept for %s%s",
                 mem_readers_text(s->saved_of[index], readers, sizeof readers),
                 stays(storage) ? "; readable after the step" : "");
    else if (stays(storage))
        snprintf(text, sizeof text, "readable after the step");
    else
        snprintf(text, sizeof text, "last used by %s of %s", last->op->name, cg_pass_name(last->pass));
    frame(s->out, stays(storage) ? "(end)" : scope_or_top(last->scope), storage->last, text);
}

static void frame_of_cause(snapshot *s, const cg_node *node) {
    if (!node->cause) return;
    char text[128];
    int step = s->schedule.step_of[node->cause->id];
    snprintf(text, sizeof text, "%s %s%s", node->pass == CG_RECOMPUTE ? "runs again:" : "gradient of",
             node->cause->op->name, step < 0 ? ", which does not run itself" : "");
    frame(s->out, scope_or_top(node->cause->scope), step < 0 ? 0 : step, text);
}

/* The stack of a storage; behind the first time only its number in the pickle's memo. */
static void put_stack(snapshot *s, int index) {
    const cg_storage *storage = &s->plan->storages[index];
    const cg_node *node = storage->value ? storage->value->producer : storage->node;
    if (s->has_stack[index]) {
        putc('j', s->out); /* LONG_BINGET */
        put_bytes(s->out, (uint64_t)index, 4);
        return;
    }
    put_list(s->out);
    putc('r', s->out); /* LONG_BINPUT */
    put_bytes(s->out, (uint64_t)index, 4);
    s->has_stack[index] = true;
    frame_of_birth(s, storage);
    frame_of_death(s, index);
    if (storage->taken_over >= 0) {
        const cg_storage *before = &s->plan->storages[storage->taken_over];
        char text[256], name[160];
        snprintf(text, sizeof text, "in place of %s", cg_value_text(before->value, name, sizeof name));
        frame(s->out, scope_or_top(before->value->scope), before->first, text);
    }
    if (node) frame_of_cause(s, node);
    frames_of_scope(s->out, node ? node->scope : storage->value->scope);
    frame(s->out, node ? cg_pass_name(node->pass) : "leaf", 0,
          node ? "pass" : cg_category_name(storage->category));
}

/* The stack of the arena itself: which step this is. */
static void put_arena_stack(snapshot *s) {
    char text[512];
    put_list(s->out);
    frame(s->out, "csagrad", 0, mem_row_text(s->row, text, sizeof text));
}

/* ---- what happened, in order ---- */

static void begin_event(FILE *out, const char *action, int64_t address, int64_t bytes, int64_t ns) {
    put_dict(out);
    item_text(out, "action", action);
    item_int(out, "addr", address);
    item_int(out, "size", bytes);
    item_int(out, "stream", 0);
    item_int(out, "time_us", ns / 1000);
}

/* category NULL: none. */
static void put_event(snapshot *s, const char *action, int index, const char *category, int64_t ns) {
    const cg_storage *storage = &s->plan->storages[index];
    begin_event(s->out, action, ARENA + storage->offset, storage->reserved, ns);
    if (category) item_text(s->out, "category", category);
    put_text(s->out, "frames");
    put_stack(s, index);
    end_item(s->out);
    end_element(s->out);
}

static void put_free(snapshot *s, int index, int64_t ns) {
    put_event(s, "free_requested", index, NULL, ns);
    put_event(s, "free_completed", index, NULL, ns);
}

static bool has_bytes(const cg_storage *storage) { return storage->offset >= 0 && storage->reserved > 0; }

static void put_trace(snapshot *s) {
    const cg_plan *plan = s->plan;
    const int64_t *start_ns = s->schedule.start_ns;
    int n = plan->n_storages, born = 0, dead = 0;
    put_list(s->out);
    begin_event(s->out, "segment_alloc", ARENA, plan->peak_bytes, 0);
    /* once any event has a category, the viewer wants one that is called unknown: the arena holds all kinds */
    item_text(s->out, "category", "unknown");
    put_text(s->out, "frames");
    put_arena_stack(s);
    end_item(s->out);
    end_element(s->out);
    for (int t = 0; t < plan->n_steps; t++) {
        for (; born < n && s->births[born].step <= t; born++) {
            int index = s->births[born].storage;
            const cg_storage *storage = &plan->storages[index];
            if (!has_bytes(storage)) continue;
            if (storage->taken_over >= 0) put_free(s, storage->taken_over, start_ns[t]);
            put_event(s, "alloc", index, cg_category_name(storage->category), start_ns[t]);
        }
        for (; dead < n && s->deaths[dead].step == t; dead++) {
            int index = s->deaths[dead].storage;
            const cg_storage *storage = &plan->storages[index];
            if (has_bytes(storage) && !stays(storage) && !s->handed_on[index])
                put_free(s, index, start_ns[t + 1]);
        }
    }
}

/* ---- what is there in the end ---- */

static int lower_first(const void *a, const void *b) {
    const cg_storage *x = *(const cg_storage *const *)a, *y = *(const cg_storage *const *)b;
    return x->offset < y->offset ? -1 : x->offset > y->offset;
}

static void put_block(snapshot *s, int64_t offset, int64_t bytes, const cg_storage *storage) {
    put_dict(s->out);
    item_int(s->out, "address", ARENA + offset);
    item_int(s->out, "size", bytes);
    item_int(s->out, "requested_size", storage ? storage->bytes : 0);
    item_text(s->out, "state", storage ? "active_allocated" : "inactive");
    put_text(s->out, "frames");
    if (storage)
        put_stack(s, (int)(storage - s->plan->storages));
    else
        put_list(s->out);
    end_item(s->out);
    end_element(s->out);
}

/* The arena behind the step: what stays, and the room between. */
static bool put_segment(snapshot *s) {
    const cg_plan *plan = s->plan;
    const cg_storage **staying = malloc(((size_t)plan->n_storages + 1) * sizeof *staying);
    if (!staying) return false;
    int n = 0;
    int64_t reserved = 0, bytes = 0, end = 0;
    for (int i = 0; i < plan->n_storages; i++) {
        const cg_storage *storage = &plan->storages[i];
        if (!has_bytes(storage) || !stays(storage)) continue;
        staying[n++] = storage;
        reserved += storage->reserved;
        bytes += storage->bytes;
    }
    qsort(staying, (size_t)n, sizeof *staying, lower_first);
    put_dict(s->out);
    item_int(s->out, "device", 0);
    item_int(s->out, "address", ARENA);
    item_int(s->out, "total_size", plan->peak_bytes);
    item_int(s->out, "allocated_size", reserved);
    item_int(s->out, "active_size", reserved);
    item_int(s->out, "requested_size", bytes);
    item_int(s->out, "stream", 0);
    item_text(s->out, "segment_type", "large");
    put_text(s->out, "segment_pool_id"); /* the default pool */
    put_int(s->out, 0);
    put_int(s->out, 0);
    putc(0x86, s->out); /* TUPLE2 */
    end_item(s->out);
    item_false(s->out, "is_expandable");
    put_text(s->out, "frames");
    put_arena_stack(s);
    end_item(s->out);
    put_text(s->out, "blocks");
    put_list(s->out);
    for (int i = 0; i < n; i++) {
        if (staying[i]->offset > end) put_block(s, end, staying[i]->offset - end, NULL);
        put_block(s, staying[i]->offset, staying[i]->reserved, staying[i]);
        end = staying[i]->offset + staying[i]->reserved;
    }
    if (end < plan->peak_bytes) put_block(s, end, plan->peak_bytes - end, NULL);
    end_item(s->out);
    end_element(s->out);
    free(staying);
    return true;
}

/* The page "allocator settings" of the viewer: an allocator that PyTorch's settings say little about. */
static void put_settings(snapshot *s) {
    const mem_row *row = s->row;
    put_dict(s->out);
    item_text(s->out, "PYTORCH_CUDA_ALLOC_CONF", "");
    item_int(s->out, "max_split_size", -1);
    item_false(s->out, "expandable_segments");
    item_text(s->out, "allocator", "csagrad: one arena, each address planned before the step runs");
    item_int(s->out, "alignment_bytes", CG_ALIGN);
    item_text(s->out, "policy", row->policy);
    item_text(s->out, "dims", row->dims);
    item_int(s->out, "seq", row->seq);
    item_text(s->out, "dtype", cg_dtype_name(row->dtype));
    item_text(s->out, "times", mem_clock_name(row));
    item_int(s->out, "steps", s->plan->n_steps);
    item_int(s->out, "peak_step", s->plan->peak_step);
    item_int(s->out, "floor_bytes", s->plan->floor_bytes);
    item_int(s->out, "planned_peak_bytes", s->plan->peak_bytes);
}

static bool put_snapshot(snapshot *s) {
    fputs("\x80\x02", s->out); /* PROTO 2 */
    put_dict(s->out);
    put_text(s->out, "segments");
    put_list(s->out);
    bool ok = put_segment(s);
    end_item(s->out);
    put_text(s->out, "device_traces");
    put_list(s->out);
    put_trace(s);
    end_element(s->out);
    end_item(s->out);
    put_text(s->out, "allocator_settings");
    put_settings(s);
    end_item(s->out);
    putc('.', s->out); /* STOP */
    return ok;
}

/* ---- the whole ---- */

static int earlier_first(const void *a, const void *b) {
    const moment *x = a, *y = b;
    return x->step != y->step ? (x->step < y->step ? -1 : 1) : x->storage - y->storage;
}

static bool prepare(snapshot *s, cg_error *error) {
    const cg_plan *plan = s->plan;
    size_t n = (size_t)plan->n_storages + 1;
    s->births = calloc(n, sizeof *s->births);
    s->deaths = calloc(n, sizeof *s->deaths);
    s->handed_on = calloc(n, sizeof *s->handed_on);
    s->has_stack = calloc(n, sizeof *s->has_stack);
    s->saved_of = calloc(n, sizeof *s->saved_of);
    if (!s->births || !s->deaths || !s->handed_on || !s->has_stack || !s->saved_of)
        return cg_fail(error, CG_FAILED, "out of memory while a snapshot is made");
    for (int i = 0; i < plan->n_storages; i++) {
        const cg_storage *storage = &plan->storages[i];
        s->births[i] = (moment){storage->value && storage->value->leaf ? -1 : storage->first, i};
        s->deaths[i] = (moment){storage->last, i};
        if (storage->taken_over >= 0) s->handed_on[storage->taken_over] = true;
    }
    for (int i = 0; i < s->row->n_saved; i++)
        s->saved_of[plan->storage_of[s->row->saved[i].value->id]] = &s->row->saved[i];
    qsort(s->births, (size_t)plan->n_storages, sizeof *s->births, earlier_first);
    qsort(s->deaths, (size_t)plan->n_storages, sizeof *s->deaths, earlier_first);
    return true;
}

bool mem_snapshot_write(const mem_row *row, const char *path, cg_error *error) {
    snapshot s = {.row = row, .plan = row->step.plan};
    char *data = NULL;
    size_t bytes = 0;
    bool ok = mem_schedule_make(row, &s.schedule, error) && prepare(&s, error);
    if (ok && s.plan->peak_bytes > ADDRESSES - ARENA)
        ok =
            cg_fail(error, CG_BAD_INPUT,
                    "a snapshot shows at most %lld bytes, and this step needs %lld: plan it without --snapshot",
                    (long long)(ADDRESSES - ARENA), (long long)s.plan->peak_bytes);
    if (ok) {
        s.out = open_memstream(&data, &bytes);
        ok = s.out && put_snapshot(&s);
        if (s.out) ok &= !ferror(s.out) & !fclose(s.out);
        if (!ok) cg_fail(error, CG_FAILED, "out of memory while a snapshot is made");
    }
    ok = ok && mem_file_write(path, data, bytes, error);
    free(data);
    free(s.births);
    free(s.deaths);
    free(s.handed_on);
    free(s.has_stack);
    free(s.saved_of);
    mem_schedule_free(&s.schedule);
    return ok;
}
