/* The PyTorch snapshot and the Chrome trace of a planned step, read back and held against the plan: a reader of pickles
 * that shares nothing with the writer, an allocator that replays the events, and the clock of each slice. */
#include "tests/graph_ops.h"

#include "core/base/file.h"
#include "models/train/step.h"
#include "tools/mem.h"

#include <jansson.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- pickle to JSON: lists and tuples become arrays, dictionaries objects ---- */

typedef struct reader {
    const unsigned char *at, *end;
    json_t *stack[64], *memo[1 << 14];
    int depth;
} reader;

static const unsigned char *take(reader *r, size_t n) {
    if ((size_t)(r->end - r->at) < n) ck_abort_msg("the pickle ends too early");
    r->at += n;
    return r->at - n;
}

static uint64_t take_number(reader *r, size_t n) {
    const unsigned char *bytes = take(r, n);
    uint64_t value = 0;
    for (size_t i = n; i-- > 0;) value = value << 8 | bytes[i];
    return value;
}

static void push(reader *r, json_t *value) {
    ck_assert_ptr_nonnull(value);
    ck_assert_int_lt(r->depth, 64);
    r->stack[r->depth++] = value;
}

static json_t *pop(reader *r) {
    ck_assert_int_gt(r->depth, 0);
    return r->stack[--r->depth];
}

static json_t *unpickle(const char *data, size_t bytes) {
    reader *r = calloc(1, sizeof *r);
    r->at = (const unsigned char *)data;
    r->end = r->at + bytes;
    ck_assert_int_eq(*take(r, 1), 0x80);
    ck_assert_int_eq(*take(r, 1), 2);
    for (int code; (code = *take(r, 1)) != '.';) {
        json_t *value, *key;
        uint64_t n;
        switch (code) {
        case '}':
            push(r, json_object());
            break;
        case ']':
            push(r, json_array());
            break;
        case 'a':
            value = pop(r);
            ck_assert_int_eq(json_array_append_new(r->stack[r->depth - 1], value), 0);
            break;
        case 's':
            value = pop(r);
            key = pop(r);
            ck_assert_ptr_null(json_object_get(r->stack[r->depth - 1], json_string_value(key)));
            ck_assert_int_eq(json_object_set_new(r->stack[r->depth - 1], json_string_value(key), value), 0);
            json_decref(key);
            break;
        case 'X':
            n = take_number(r, 4);
            push(r, json_stringn((const char *)take(r, n), n));
            break;
        case 'J':
            push(r, json_integer((int32_t)take_number(r, 4)));
            break;
        case 0x8a:
            ck_assert_int_eq(take_number(r, 1), 8);
            push(r, json_integer((json_int_t)take_number(r, 8)));
            break;
        case 0x88:
        case 0x89:
            push(r, json_boolean(code == 0x88));
            break;
        case 0x86:
            value = pop(r);
            key = pop(r);
            push(r, json_pack("[o,o]", key, value));
            break;
        case 'r':
            n = take_number(r, 4);
            ck_assert(n < sizeof r->memo / sizeof *r->memo && !r->memo[n]);
            r->memo[n] = json_incref(r->stack[r->depth - 1]);
            break;
        case 'j':
            n = take_number(r, 4);
            ck_assert(n < sizeof r->memo / sizeof *r->memo);
            push(r, json_incref(r->memo[n]));
            break;
        default:
            ck_abort_msg("opcode %d is not one that the viewer needs to know", code);
        }
    }
    ck_assert_ptr_eq(r->at, r->end);
    ck_assert_int_eq(r->depth, 1);
    json_t *root = pop(r);
    for (size_t i = 0; i < sizeof r->memo / sizeof *r->memo; i++) json_decref(r->memo[i]);
    free(r);
    return root;
}

/* ---- rows ---- */

static char folder[] = "/tmp/csagrad_export_XXXXXX";

static const char *at(const char *name) {
    static char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void in_a_folder(void) { ck_assert_ptr_nonnull(mkdtemp(folder)); }

static int64_t step_ns(int step) { return 10000 + 1000 * (step % 7); }

/* With made-up times of whole microseconds, so that an event's time tells its step. */
static void row_of(mem_row *row, cg_graph *graph, cg_plan *plan, bool measured) {
    row->dims = "toy";
    row->dtype = CG_F32;
    row->step.graph = graph;
    row->step.plan = plan;
    row->saved = cg_plan_saved(plan, &row->n_saved);
    if (!measured) return;
    row->m.node_us = malloc(((size_t)plan->n_steps + 1) * sizeof(double));
    for (int t = 0; t < plan->n_steps; t++) row->m.node_us[t] = (double)step_ns(t) / 1e3;
}

static void row_free(mem_row *row) {
    cg_saved_free(row->saved, row->n_saved);
    free(row->m.node_us);
    cg_step_free(&row->step);
    free(row);
}

/* A row of the toy under a policy, two layers of it. */
static mem_row *toy_row(const char *policy, cg_dtype dtype, bool measured) {
    mem_row *row = calloc(1, sizeof *row);
    cg_error error = {0};
    cg_config *config = &row->workload.config;
    *config = cg_config_toy();
    static const char *const settings[][2] = {
        {"seq_len", "32"}, {"batch_size", "2"}, {"num_hidden_layers", "2"}, {"compress_ratios", "4,128"}};
    for (int i = 0; i < 4; i++)
        if (!cg_config_set(config, settings[i][0], settings[i][1], &error)) ck_abort_msg("%s", error.text);
    config->dtype = dtype;
    snprintf(config->policy, sizeof config->policy, "%s", policy);
    snprintf(row->policy, sizeof row->policy, "%s", policy);
    row->seq = 32;
    row->n_rows = 64;
    cg_step step;
    if (!cg_step_build(&step, config, &(cg_step_options){.max_segments = 2}, &error))
        ck_abort_msg("%s", error.text);
    row_of(row, step.graph, step.plan, measured);
    row->dtype = dtype;
    row->step = step;
    return row;
}

static int64_t live_bytes(const cg_plan *plan, int step) {
    int64_t bytes[CG_CATEGORIES], sum = 0;
    cg_plan_live(plan, step, bytes);
    for (int c = 0; c < CG_CATEGORIES; c++) sum += bytes[c];
    return sum;
}

/* ---- JSON, short ---- */

static json_int_t number(const json_t *object, const char *key) {
    const json_t *value = json_object_get(object, key);
    if (!json_is_integer(value)) ck_abort_msg("%s is not an integer", key);
    return json_integer_value(value);
}

static const char *text(const json_t *object, const char *key) {
    const json_t *value = json_object_get(object, key);
    if (!json_is_string(value)) ck_abort_msg("%s is not a text", key);
    return json_string_value(value);
}

static json_int_t ns_of(const json_t *object, const char *key) {
    const json_t *value = json_object_get(object, key);
    if (!json_is_real(value)) ck_abort_msg("%s is not a time", key);
    double us = json_real_value(value);
    json_int_t ns = (json_int_t)llround(us * 1e3);
    ck_assert(fabs(us * 1e3 - (double)ns) < 1e-3);
    return ns;
}

/* ---- snapshots ---- */

static json_t *snapshot_of(const mem_row *row) {
    cg_error error = {0};
    if (!mem_snapshot_write(row, at("s.pickle"), &error)) ck_abort_msg("%s", error.text);
    char *data;
    size_t bytes;
    if (!cg_file_read(at("s.pickle"), 1 << 28, &data, &bytes, &error)) ck_abort_msg("%s", error.text);
    json_t *root = unpickle(data, bytes);
    free(data);
    return root;
}

typedef struct live_block {
    json_int_t address, bytes;
    const json_t *frames;
} live_block;

typedef struct replay {
    live_block blocks[4096];
    int n;
    json_int_t bytes, peak, farthest;
} replay;

static int block_at(const replay *r, json_int_t address) {
    for (int i = 0; i < r->n; i++)
        if (r->blocks[i].address == address) return i;
    return -1;
}

static void allocate(replay *r, json_int_t address, json_int_t bytes, const json_t *frames) {
    for (int i = 0; i < r->n; i++)
        if (address < r->blocks[i].address + r->blocks[i].bytes && r->blocks[i].address < address + bytes)
            ck_abort_msg("two live blocks meet at %llx", (unsigned long long)address);
    ck_assert_int_lt(r->n, 4096);
    r->blocks[r->n++] = (live_block){address, bytes, frames};
    r->bytes += bytes;
    if (r->bytes > r->peak) r->peak = r->bytes;
    if (address + bytes > r->farthest) r->farthest = address + bytes;
}

static void release(replay *r, json_int_t address, json_int_t bytes, const json_t *frames) {
    int i = block_at(r, address);
    if (i < 0) ck_abort_msg("%llx is freed and not alive", (unsigned long long)address);
    ck_assert_int_eq(r->blocks[i].bytes, bytes);
    ck_assert_ptr_eq(r->blocks[i].frames, frames);
    r->blocks[i] = r->blocks[--r->n];
    r->bytes -= bytes;
}

static void expect_frames(const json_t *frames, const cg_plan *plan) {
    ck_assert_int_ge(json_array_size(frames), 3);
    for (size_t i = 0; i < json_array_size(frames); i++) {
        const json_t *frame = json_array_get(frames, i);
        ck_assert_int_eq(json_object_size(frame), 3);
        ck_assert(text(frame, "filename")[0] && text(frame, "name")[0]);
        ck_assert(number(frame, "line") >= 0 && number(frame, "line") < plan->n_steps);
        const char *name = text(frame, "name"), *left_out = ", which does not run itself";
        if (strncmp(name, "runs again: ", 12) && strncmp(name, "gradient of ", 12)) continue;
        if (strstr(name, left_out)) continue;
        const cg_node *cause = plan->steps[number(frame, "line")];
        ck_assert_str_eq(name + 12, cause->op->name);
        ck_assert_str_eq(text(frame, "filename"), cause->scope[0] ? cause->scope : "(top)");
        ck_assert_int_eq(cause->pass, CG_FORWARD);
    }
}

/* The blocks of the segment tile it, and are what is alive in the end. */
static void expect_segment(const json_t *root, const replay *r, const cg_plan *plan) {
    const json_t *segments = json_object_get(root, "segments"), *segment = json_array_get(segments, 0);
    ck_assert_int_eq(json_array_size(segments), 1);
    ck_assert_int_eq(number(segment, "device"), 0);
    ck_assert_int_eq(number(segment, "total_size"), plan->peak_bytes);
    ck_assert_int_eq(number(segment, "stream"), 0);
    json_int_t address = number(segment, "address"), active = 0, requested = 0;
    int n_active = 0;
    const json_t *blocks = json_object_get(segment, "blocks");
    for (size_t i = 0; i < json_array_size(blocks); i++) {
        const json_t *block = json_array_get(blocks, i);
        ck_assert_int_eq(number(block, "address"), address);
        ck_assert_int_gt(number(block, "size"), 0);
        address += number(block, "size");
        if (!strcmp(text(block, "state"), "inactive")) continue;
        ck_assert_str_eq(text(block, "state"), "active_allocated");
        int k = block_at(r, number(block, "address"));
        ck_assert_int_ge(k, 0);
        ck_assert_int_eq(r->blocks[k].bytes, number(block, "size"));
        ck_assert_ptr_eq(r->blocks[k].frames, json_object_get(block, "frames"));
        ck_assert(number(block, "requested_size") > number(block, "size") - CG_ALIGN &&
                  number(block, "requested_size") <= number(block, "size"));
        active += number(block, "size");
        requested += number(block, "requested_size");
        n_active++;
    }
    ck_assert_int_eq(address, number(segment, "address") + plan->peak_bytes);
    ck_assert_int_eq(n_active, r->n);
    ck_assert_int_eq(active, r->bytes);
    ck_assert_int_eq(number(segment, "allocated_size"), active);
    ck_assert_int_eq(number(segment, "active_size"), active);
    ck_assert_int_eq(number(segment, "requested_size"), requested);
}

/* Replays the events of a row with made-up times against the plan, step by step. */
static void expect_snapshot(const mem_row *row, const json_t *root) {
    const cg_plan *plan = row->step.plan;
    const json_t *traces = json_object_get(root, "device_traces"), *events = json_array_get(traces, 0);
    ck_assert_int_eq(json_array_size(traces), 1);
    replay *r = calloc(1, sizeof *r);
    int step = 0, n_allocated = 0, n_storages = 0;
    json_int_t now = 0, base = 0, start_us = 0;
    for (size_t i = 0; i < json_array_size(events); i++) {
        const json_t *event = json_array_get(events, i), *frames = json_object_get(event, "frames");
        const char *action = text(event, "action");
        json_int_t address = number(event, "addr"), bytes = number(event, "size");
        ck_assert_int_eq(number(event, "stream"), 0);
        ck_assert_int_ge(number(event, "time_us"), now);
        now = number(event, "time_us");
        for (; step < plan->n_steps && now > start_us; step++, start_us += step_ns(step - 1) / 1000) {
            /* all that happened up to the beginning of this step is told: what is alive while it runs? */
            ck_assert_int_eq(r->bytes, live_bytes(plan, step));
        }
        if (i == 0) {
            ck_assert_str_eq(action, "segment_alloc");
            ck_assert_int_eq(bytes, plan->peak_bytes);
            ck_assert_str_eq(text(event, "category"), "unknown"); /* else the viewer stumbles over categories */
            base = address;
            ck_assert_int_eq(base % 0x100000000, 0);
        } else if (!strcmp(action, "alloc")) {
            ck_assert_int_eq(now, start_us);
            ck_assert_int_ge(address, base);
            allocate(r, address, bytes, frames);
            expect_frames(frames, plan);
            n_allocated++;
        } else {
            ck_assert_str_eq(action, "free_requested");
            release(r, address, bytes, frames);
            const json_t *next = json_array_get(events, ++i);
            ck_assert_str_eq(text(next, "action"), "free_completed");
            ck_assert_int_eq(number(next, "addr"), address);
            ck_assert_int_eq(number(next, "size"), bytes);
            ck_assert_int_eq(number(next, "time_us"), now);
        }
    }
    ck_assert_int_ge(step, plan->n_steps - 1); /* nothing may die behind the last step */
    for (int s = 0; s < plan->n_storages; s++) n_storages += plan->storages[s].reserved > 0;
    ck_assert_int_eq(n_allocated, n_storages);
    ck_assert_int_eq(r->peak, plan->floor_bytes);
    ck_assert_int_eq(r->farthest - base, plan->peak_bytes);
    expect_segment(root, r, plan);
    free(r);
    const json_t *settings = json_object_get(root, "allocator_settings");
    ck_assert_str_eq(text(settings, "policy"), row->policy);
    ck_assert_int_eq(number(settings, "planned_peak_bytes"), plan->peak_bytes);
    ck_assert_int_eq(number(settings, "floor_bytes"), plan->floor_bytes);
}

/* How many stacks hold a frame whose name begins so. */
static int stacks_with(const json_t *root, const char *begin) {
    const json_t *events = json_array_get(json_object_get(root, "device_traces"), 0);
    int n = 0;
    for (size_t i = 0; i < json_array_size(events); i++) {
        const json_t *event = json_array_get(events, i), *frames = json_object_get(event, "frames");
        if (strcmp(text(event, "action"), "alloc")) continue;
        bool found = false;
        for (size_t k = 0; k < json_array_size(frames); k++)
            found |= !strncmp(text(json_array_get(frames, k), "name"), begin, strlen(begin));
        n += found;
    }
    return n;
}

static const char *const policies[] = {"save", "recompute", "stream", "stream+rms_norm,swiglu@layer*/ffn"};
enum { POLICIES = sizeof policies / sizeof *policies };

START_TEST(snapshots_replay_the_plan) {
    for (int i = 0; i < POLICIES; i++) {
        mem_row *row = toy_row(policies[i], i % 2 ? CG_F64 : CG_F32, true);
        const cg_plan *plan = row->step.plan;
        json_t *root = snapshot_of(row);
        expect_snapshot(row, root);
        int saved = 0, in_place = 0, clones = 0;
        for (int s = 0; s < plan->n_storages; s++) {
            const cg_storage *storage = &plan->storages[s];
            saved += storage->category == CG_SAVED && storage->reserved > 0;
            in_place += storage->taken_over >= 0 && storage->reserved > 0;
            clones += storage->category == CG_RECOMPUTED && storage->reserved > 0;
        }
        ck_assert(saved > 10 && in_place > 10);
        ck_assert_int_eq(clones > 0, row->step.n_clones > 0);
        ck_assert_int_eq(stacks_with(root, "kept for "), saved);
        ck_assert_int_eq(stacks_with(root, "in place of "), in_place);
        ck_assert_int_ge(stacks_with(root, "runs again: "), clones);
        json_decref(root);
        row_free(row);
    }
}
END_TEST

/* The events of a graph small enough to write them down. */
START_TEST(snapshot_of_a_small_graph) {
    cg_graph *graph = cg_graph_new(&t_ops);
    cg_value *w = t_leaf(graph, CG_LEAF_PARAMETER, "w", 16); /* 128 bytes */
    {
        CG_SCOPE(graph, "layer%d", 0);
        CG_SCOPE(graph, "attn");
        cg_value *x = cg_scale(graph, w, 2);                                        /* 0 */
        cg_value *y = T_APPLY(&t_relu, NULL, cg_reshape(graph, x, CG_SHAPE(4, 4))); /* 1, 2: takes x's place */
        cg_keep(T_APPLY(&t_join, NULL, y, y)); /* 3: 256 bytes of workspace */
    }
    cg_error error = {0};
    mem_row *row = calloc(1, sizeof *row);
    row_of(row, graph, cg_plan_make(graph, NULL, &error), true);
    json_t *root = snapshot_of(row);
    expect_snapshot(row, root);
    static const struct {
        const char *action;
        int us, bytes;
        const char *category, *top; /* the innermost frame */
    } expected[] = {{"segment_alloc", 0, 768, "unknown", NULL},
                    {"alloc", 0, 128, "parameter", ":0:w f64 [16], parameter"},
                    {"alloc", 0, 128, "activation", "layer0/attn:0:scale.y of w f64 [16], activation"},
                    {"free_requested", 21, 128, NULL, "layer0/attn:0:scale.y of w f64 [16], activation"},
                    {"free_completed", 21, 128, NULL, "layer0/attn:0:scale.y of w f64 [16], activation"},
                    {"alloc", 21, 128, "activation", "layer0/attn:2:relu.y f64 [4, 4], activation"},
                    {"alloc", 33, 256, "activation", "layer0/attn:3:join.y f64 [32], activation"},
                    {"alloc", 33, 256, "workspace", "layer0/attn:3:workspace of join"},
                    {"free_requested", 46, 128, NULL, "layer0/attn:2:relu.y f64 [4, 4], activation"},
                    {"free_completed", 46, 128, NULL, "layer0/attn:2:relu.y f64 [4, 4], activation"},
                    {"free_requested", 46, 256, NULL, "layer0/attn:3:workspace of join"},
                    {"free_completed", 46, 256, NULL, "layer0/attn:3:workspace of join"}};
    const json_t *events = json_array_get(json_object_get(root, "device_traces"), 0);
    ck_assert_int_eq(json_array_size(events), sizeof expected / sizeof *expected);
    for (size_t i = 0; i < json_array_size(events); i++) {
        const json_t *event = json_array_get(events, i), *frames = json_object_get(event, "frames");
        ck_assert_str_eq(text(event, "action"), expected[i].action);
        ck_assert_int_eq(number(event, "time_us"), expected[i].us);
        ck_assert_int_eq(number(event, "size"), expected[i].bytes);
        if (expected[i].category) ck_assert_str_eq(text(event, "category"), expected[i].category);
        char top[256];
        const json_t *frame = json_array_get(frames, 0);
        snprintf(top, sizeof top, "%s:%d:%s", text(frame, "filename"), (int)number(frame, "line"),
                 text(frame, "name"));
        const char *place = strcmp(text(frame, "filename"), "(top)") ? top : top + 5;
        if (expected[i].top) ck_assert_str_eq(place, expected[i].top);
    }
    const json_t *frames = json_object_get(json_array_get(events, 5), "frames"); /* of relu's output */
    static const char *const names[] = {"relu.y f64 [4, 4], activation",
                                        "last used by join of forward",
                                        "in place of layer0/attn/scale.y",
                                        "scope",
                                        "scope",
                                        "pass"};
    static const char *const files[] = {"layer0/attn", "layer0/attn", "layer0/attn",
                                        "layer0/attn", "layer0",      "forward"};
    ck_assert_int_eq(json_array_size(frames), 6);
    for (size_t k = 0; k < 6; k++) {
        ck_assert_str_eq(text(json_array_get(frames, k), "name"), names[k]);
        ck_assert_str_eq(text(json_array_get(frames, k), "filename"), files[k]);
    }
    json_decref(root);
    row_free(row);
}
END_TEST

/* ---- traces ---- */

static json_t *trace_of(const mem_row *row) {
    cg_error error = {0};
    json_error_t at_line;
    if (!mem_trace_write(row, at("t.json"), &error)) ck_abort_msg("%s", error.text);
    json_t *root = json_load_file(at("t.json"), JSON_REJECT_DUPLICATES, &at_line);
    if (!root) ck_abort_msg("the trace is no JSON: %s", at_line.text);
    return root;
}

/* Starts of all steps, [n_steps+1]. */
static json_int_t *starts(const cg_plan *plan) {
    json_int_t *ns = calloc((size_t)plan->n_steps + 1, sizeof *ns);
    for (int t = 0; t < plan->n_steps; t++) ns[t + 1] = ns[t] + step_ns(t);
    return ns;
}

static void expect_slice(const mem_row *row, const json_t *event, int step, const json_int_t *start) {
    const cg_plan *plan = row->step.plan;
    const cg_node *node = plan->steps[step];
    const json_t *args = json_object_get(event, "args");
    ck_assert_str_eq(text(event, "name"), node->op->name);
    ck_assert_str_eq(text(event, "cat"), cg_pass_name(node->pass));
    ck_assert_int_eq(number(event, "tid"), 1 + (int)node->pass);
    ck_assert_int_eq(ns_of(event, "ts"), start[step]);
    ck_assert_int_eq(ns_of(event, "dur"), start[step + 1] - start[step]);
    ck_assert_int_eq(number(args, "step"), step);
    ck_assert_str_eq(text(args, "scope"), node->scope);
    ck_assert_int_eq(number(args, "live_bytes"), live_bytes(plan, step));
    int scratch = plan->workspace_of[step];
    ck_assert_int_eq(number(args, "workspace_bytes"), scratch < 0 ? 0 : plan->storages[scratch].bytes);
    double flops = node->op->cost(node).flops;
    ck_assert(json_real_value(json_object_get(args, "flops")) == flops);
    double rate = json_real_value(json_object_get(args, "gflops_per_s"));
    ck_assert(fabs(rate * (double)step_ns(step) - flops) <= 1e-9 * flops);
    if (node->op->alias) {
        ck_assert_int_eq(number(args, "read_bytes") + number(args, "written_bytes"), 0);
    } else if (node->n_out == 1 && !node->op->mutates) {
        ck_assert_int_eq(number(args, "written_bytes"),
                         cg_tensor_bytes(node->out[0]->dtype, &node->out[0]->shape));
    }
    int64_t read = 0, changed = 0; /* each input once */
    for (int i = 0; i < node->n_in && !node->op->alias; i++) {
        const cg_value *in = node->in[i];
        bool again = !in;
        for (int k = 0; k < i; k++)
            again |= node->in[k] && in && cg_value_root(node->in[k]) == cg_value_root(in);
        if (!again) read += cg_tensor_bytes(in->dtype, &in->shape);
        if (in && i < CG_MAX_IN && node->op->mutates & CG_BIT(i))
            changed += cg_tensor_bytes(in->dtype, &in->shape);
    }
    ck_assert_int_eq(number(args, "read_bytes"), read);
    ck_assert_int_ge(number(args, "written_bytes"), changed);
    ck_assert_int_eq(json_object_get(args, "cause") != NULL, node->cause != NULL);
    if (node->cause && json_is_integer(json_object_get(args, "cause_step")))
        ck_assert_ptr_eq(plan->steps[number(args, "cause_step")], node->cause);
}

static void expect_counter(const cg_plan *plan, const json_t *event, int step) {
    const json_t *args = json_object_get(event, "args");
    int64_t bytes[CG_CATEGORIES];
    if (!strcmp(text(event, "name"), "live bytes, all")) {
        ck_assert_int_eq(json_object_size(args), 1);
        if (step < plan->n_steps) ck_assert_int_eq(number(args, "bytes"), live_bytes(plan, step));
        return;
    }
    ck_assert_str_eq(text(event, "name"), "live bytes");
    ck_assert_int_eq(json_object_size(args), CG_CATEGORIES);
    if (step == plan->n_steps) { /* what stays: leaves, and what the caller keeps */
        int64_t left = 0, all = 0;
        for (int s = 0; s < plan->n_storages; s++) {
            const cg_storage *storage = &plan->storages[s];
            if (storage->kept || (storage->value && storage->value->leaf)) left += storage->reserved;
        }
        for (int c = 0; c < CG_CATEGORIES; c++) all += number(args, cg_category_name((cg_category)c));
        ck_assert_int_eq(all, left);
        return;
    }
    cg_plan_live(plan, step, bytes);
    for (int c = 0; c < CG_CATEGORIES; c++)
        ck_assert_int_eq(number(args, cg_category_name((cg_category)c)), bytes[c]);
}

/* Returns the number of flows. */
static int expect_trace(const mem_row *row, const json_t *root) {
    const cg_plan *plan = row->step.plan;
    json_int_t *start = starts(plan), now = 0;
    int *flow_from = calloc((size_t)plan->n_steps + 1, sizeof *flow_from);
    int step = 0, n_counters = 0, n_peaks = 0, n_names = 0, n_flows = 0, n_causes = 0;
    const json_t *events = json_object_get(root, "traceEvents");
    for (size_t i = 0; i < json_array_size(events); i++) {
        const json_t *event = json_array_get(events, i);
        char kind = text(event, "ph")[0];
        ck_assert_int_eq(number(event, "pid"), 1);
        if (kind == 'M') {
            n_names += !strcmp(text(event, "name"), "thread_name");
            continue;
        }
        ck_assert_int_ge(ns_of(event, "ts"), now);
        now = ns_of(event, "ts");
        switch (kind) {
        case 'X':
            expect_slice(row, event, step++, start);
            break;
        case 'C': /* both counters come before the slice of their step */
            ck_assert_int_eq(now, start[step]);
            expect_counter(plan, event, step);
            n_counters++;
            break;
        case 'i':
            ck_assert_int_eq(now, start[plan->peak_step]);
            ck_assert_int_eq(number(json_object_get(event, "args"), "live_bytes"), plan->floor_bytes);
            n_peaks++;
            break;
        case 's':
            ck_assert_int_eq(now, start[step - 1]);
            ck_assert_int_eq(number(event, "tid"), 1 + (int)plan->steps[step - 1]->pass);
            ck_assert_ptr_eq(plan->steps[number(event, "id")]->cause, plan->steps[step - 1]);
            ck_assert_int_eq(flow_from[number(event, "id")]++, 0);
            break;
        case 'f':
            ck_assert_int_eq(now, start[step - 1]);
            ck_assert_int_eq(number(event, "id"), step - 1);
            ck_assert_int_eq(number(event, "tid"), 1 + (int)plan->steps[step - 1]->pass);
            ck_assert_str_eq(text(event, "bp"), "e");
            ck_assert_int_eq(flow_from[step - 1]++, 1);
            n_flows++;
            break;
        default:
            ck_abort_msg("an event of kind %c", kind);
        }
    }
    for (int t = 0; t < plan->n_steps; t++) {
        bool has_cause = false; /* in the plan */
        for (int k = 0; k < t; k++) has_cause |= plan->steps[t]->cause == plan->steps[k];
        ck_assert_int_eq(flow_from[t], has_cause ? 2 : 0);
        n_causes += has_cause;
    }
    ck_assert_int_eq(n_flows, n_causes);
    ck_assert_int_eq(step, plan->n_steps);
    ck_assert_int_eq(n_counters, 2 * (plan->n_steps + 1));
    ck_assert_int_eq(n_peaks, 1);
    ck_assert_int_eq(n_names, CG_PASSES);
    free(flow_from);
    free(start);
    return n_flows;
}

START_TEST(traces_tell_the_plan) {
    for (int i = 0; i < POLICIES; i++) {
        mem_row *row = toy_row(policies[i], i % 2 ? CG_F64 : CG_F32, true);
        json_t *root = trace_of(row);
        ck_assert_int_gt(expect_trace(row, root), 50);
        json_decref(root);
        row_free(row);
    }
}
END_TEST

START_TEST(a_value_that_is_read_twice_counts_once) {
    cg_graph *graph = cg_graph_new(&cg_all_ops);
    cg_value *x = cg_leaf(graph, CG_LEAF_PARAMETER, "x", CG_F32, CG_SHAPE(16));
    cg_keep(cg_mul(graph, x, x));
    t_expect_fine(graph);
    cg_error error = {0};
    mem_row *row = calloc(1, sizeof *row);
    row_of(row, graph, cg_plan_make(graph, NULL, &error), true);
    json_t *root = trace_of(row);
    ck_assert_int_eq(expect_trace(row, root), 0);
    json_decref(root);
    row_free(row);
}
END_TEST

START_TEST(a_row_that_did_not_run_says_so) {
    mem_row *row = toy_row("recompute", CG_F32, false);
    json_t *trace = trace_of(row), *snapshot = snapshot_of(row);
    ck_assert_str_eq(text(json_object_get(trace, "otherData"), "times"), "estimated");
    ck_assert_str_eq(text(json_object_get(snapshot, "allocator_settings"), "times"), "estimated");
    const json_t *events = json_object_get(trace, "traceEvents");
    json_int_t end = 0;
    int n = 0;
    for (size_t i = 0; i < json_array_size(events); i++) {
        const json_t *event = json_array_get(events, i);
        if (strcmp(text(event, "ph"), "X")) continue;
        ck_assert_int_eq(ns_of(event, "ts"), end);
        ck_assert_int_gt(ns_of(event, "dur"), 0);
        ck_assert_ptr_null(json_object_get(json_object_get(event, "args"), "gflops_per_s"));
        end += ns_of(event, "dur");
        n++;
    }
    ck_assert_int_eq(n, row->step.plan->n_steps);
    json_decref(trace);
    json_decref(snapshot);
    row_free(row);
}
END_TEST

START_TEST(same_row_same_bytes) {
    char *first[2], *again[2];
    size_t first_bytes[2], again_bytes[2];
    mem_row *row = toy_row("recompute", CG_F32, true);
    for (int k = 0; k < 2; k++) {
        char **data = k ? again : first;
        size_t *bytes = k ? again_bytes : first_bytes;
        ck_assert(mem_snapshot_write(row, at("s"), NULL) && mem_trace_write(row, at("t"), NULL));
        ck_assert(cg_file_read(at("s"), 1 << 28, &data[0], &bytes[0], NULL));
        ck_assert(cg_file_read(at("t"), 1 << 28, &data[1], &bytes[1], NULL));
    }
    for (int f = 0; f < 2; f++) {
        ck_assert(first_bytes[f] == again_bytes[f] && !memcmp(first[f], again[f], first_bytes[f]));
        free(first[f]);
        free(again[f]);
    }
    row_free(row);
}
END_TEST

/* ---- files that cannot be written ---- */

typedef bool (*writer)(const mem_row *row, const char *path, cg_error *error);

static void expect_refusal(writer write, const mem_row *row, const char *path, int64_t disk_bytes, cg_code code,
                           const char *part) {
    cg_error error = {0};
    struct rlimit before, limit;
    getrlimit(RLIMIT_FSIZE, &before);
    limit = before;
    if (disk_bytes) limit.rlim_cur = (rlim_t)disk_bytes;
    setrlimit(RLIMIT_FSIZE, &limit);
    bool ok = write(row, path, &error);
    setrlimit(RLIMIT_FSIZE, &before); /* at once, as Check writes files too */
    if (ok || error.code != code || !strstr(error.text, part) || strchr(error.text, '\n'))
        ck_abort_msg("code %d, expected %d and one line with \"%s\", got: %s", error.code, code, part,
                     error.text);
}

START_TEST(failures_leave_no_half_file) {
    static const writer writers[] = {mem_snapshot_write, mem_trace_write};
    mem_row *row = toy_row("stream", CG_F32, true);
    char refusal[] = "the step needs more than 1 GiB";
    mem_row refused = {.dims = "toy", .refused = refusal};
    signal(SIGXFSZ, SIG_IGN);
    for (int k = 0; k < 2; k++) {
        FILE *older = fopen(at("older"), "w");
        fputs("older", older);
        fclose(older);
        expect_refusal(writers[k], row, at("absent/file"), 0, CG_BAD_INPUT, "absent/file");
        expect_refusal(writers[k], row, folder, 0, CG_BAD_INPUT, "folder");
        expect_refusal(writers[k], &refused, at("older"), 0, CG_BAD_INPUT, refusal);
        expect_refusal(writers[k], &refused, at("fresh"), 0, CG_BAD_INPUT, refusal);
        expect_refusal(writers[k], row, at("older"), 1000, CG_FAILED, "older");
        expect_refusal(writers[k], row, at("fresh"), 1000, CG_FAILED, "fresh");
        char *data;
        size_t bytes;
        ck_assert(cg_file_read(at("older"), 100, &data, &bytes, NULL));
        ck_assert_str_eq(data, "older");
        free(data);
        ck_assert(access(at("fresh"), F_OK) && access(at("fresh.tmp"), F_OK) && access(at("older.tmp"), F_OK));
    }
    row_free(row);
}
END_TEST

/* Sizes of more than 31 bits and of less than 32. */
START_TEST(sizes_have_no_sign) {
    cg_graph *graph = cg_graph_new(&t_ops);
    cg_keep(T_APPLY(&t_sum, NULL, t_leaf(graph, CG_LEAF_PARAMETER, "x", INT64_C(3) << 27)));
    t_expect_fine(graph);
    cg_error error = {0};
    mem_row *row = calloc(1, sizeof *row);
    row_of(row, graph, cg_plan_make(graph, NULL, &error), true);
    json_t *root = snapshot_of(row);
    expect_snapshot(row, root);
    json_decref(root);
    row_free(row);
}
END_TEST

/* The step of a plan whose arena has addresses that a double cannot hold. */
START_TEST(a_step_beyond_all_addresses_is_refused) {
    cg_graph *graph = cg_graph_new(&t_ops);
    for (int i = 0; i < 8; i++) { /* 8 of 2^50 - 2^41 bytes, which would fit without their sums */
        CG_SCOPE(graph, "part%d", i);
        cg_keep(T_APPLY(&t_sum, NULL, t_leaf(graph, CG_LEAF_PARAMETER, "x", INT64_C(511) << 38)));
    }
    t_expect_fine(graph);
    cg_error error = {0};
    mem_row *row = calloc(1, sizeof *row);
    row_of(row, graph, cg_plan_make(graph, NULL, &error), true);
    expect_refusal(mem_snapshot_write, row, at("s"), 0, CG_BAD_INPUT,
                   "a snapshot shows at most 8989607068696576 bytes");
    ck_assert(mem_trace_write(row, at("t"), &error)); /* has no addresses */
    row_free(row);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("tools_mem_export");
    TCase *tcase = tcase_create("tools_mem_export");
    tcase_add_unchecked_fixture(tcase, in_a_folder, NULL);
    const TTest *const tests[] = {snapshots_replay_the_plan,
                                  snapshot_of_a_small_graph,
                                  traces_tell_the_plan,
                                  a_value_that_is_read_twice_counts_once,
                                  a_row_that_did_not_run_says_so,
                                  same_row_same_bytes,
                                  failures_leave_no_half_file,
                                  sizes_have_no_sign,
                                  a_step_beyond_all_addresses_is_refused};
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) tcase_add_test(tcase, tests[i]);
    tcase_set_timeout(tcase, 240);
    suite_add_tcase(suite, tcase);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    char command[64];
    snprintf(command, sizeof command, "rm -r %s", folder);
    return system(command) || failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
