/* csagrad plan: what does one training step keep in memory, who caused it, why is it kept, and what is the
 * peak?
 *
 * The step is built and planned as training would, nothing is allocated or run, so sizes beyond this machine
 * are fine. The peak is the size of the one arena, which training reserves; memory outside it (code, libraries,
 * the data feed) is not counted.
 *
 *     csagrad plan --task recall --seq 2048 --policy save --json */
#include "tools/csagrad.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "models/data.h"
#include "models/step.h"
#include "tools/options.h"
#include "tools/table.h"

enum { KEY_DATA = TOOL_OWN_KEYS, KEY_NO_OPTIMIZER, KEY_DENSE, KEY_COMPARE };

typedef struct arguments {
    tool_model model;
    const char *data;
    bool json, no_optimizer, warmup, compare;
} arguments;

static error_t parse(int key, char *arg, struct argp_state *state) {
    arguments *a = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &a->model;
        return 0;
    case KEY_DATA:
        a->data = arg;
        return 0;
    case KEY_NO_OPTIMIZER:
        a->no_optimizer = true;
        return 0;
    case KEY_DENSE:
        a->warmup = true;
        return 0;
    case KEY_COMPARE:
        a->compare = true;
        return 0;
    case TOOL_JSON:
        a->json = true;
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_option options[] = {
    {.name = "data",
     .key = KEY_DATA,
     .arg = "PATH",
     .group = GROUP_INPUT,
     .doc = "file or folder of text that training would read; it decides how many segments the rows may hold "
            "(default: the sources and documents of this project)"},
    {.name = "no-optimizer",
     .key = KEY_NO_OPTIMIZER,
     .group = GROUP_MODEL,
     .doc = "forward and backward alone: no moments, no clipping, no update"},
    {.name = "warm-up",
     .key = KEY_DENSE,
     .group = GROUP_MODEL,
     .doc = "plan a step of the indexer's warm-up: dense attention and dense support"},
    TOOL_OUTPUT_HEADER,
    {.name = "compare",
     .key = KEY_COMPARE,
     .group = GROUP_OUTPUT,
     .doc = "one line each for the policies save, recompute and stream, and --policy where it is another"},
    TOOL_JSON_OPTION,
    {0}};
static const struct argp_child children[] = {TOOL_CHILD(tool_model_argp), {0}};
static const struct argp argp = {
    options,
    parse,
    NULL,
    "Plan one training step without running it: every value that is saved for the backward pass, who reads it "
    "and "
    "when, and the exact peak of memory. Tables are in MiB (2^20 bytes), JSON in bytes.",
    children,
    NULL,
    NULL};

/* Segments that the rows may hold, as training would ask of the feed; batch_size when there is no such feed. */
static bool segments(const arguments *a, int64_t *n, cg_error *error) {
    *n = a->model.config.batch_size;
    if (a->model.config.task == CG_TASK_RECALL && !a->data) return true;
    cg_error own = {0};
    cg_feed *feed = cg_feed_new(a->data, &a->model.config, a->data ? error : &own);
    if (feed) *n = cg_feed_facts_of(feed)->max_segments;
    cg_feed_free(feed);
    if (!feed && a->data) cg_error_at(error, "--data");
    return feed || !a->data;
}

/* The parameter that the producer of a value reads, which tells apart the many products of one scope; NULL:
 * none. */
static const cg_value *parameter_of(const cg_value *value) {
    const cg_node *node = value->producer;
    for (int i = 0; i < node->n_in; i++)
        if (node->in[i] && cg_value_root(node->in[i])->leaf == CG_LEAF_PARAMETER)
            return cg_value_root(node->in[i]);
    return NULL;
}

/* ---- JSON ---- */

static json_t *shape_json(const cg_shape *shape) {
    json_t *list = json_array();
    for (int d = 0; d < shape->n_dims; d++) json_array_append_new(list, json_integer(shape->dims[d]));
    return list;
}

static json_t *saved_json(const cg_plan *plan, const cg_saved *saved, int n) {
    json_t *list = json_array();
    for (int i = 0; i < n; i++) {
        const cg_value *value = saved[i].value;
        const cg_storage *storage = &plan->storages[plan->storage_of[value->id]];
        json_t *readers = json_array();
        for (int r = 0; r < saved[i].n_readers; r++) {
            const cg_node *reader = saved[i].readers[r];
            json_array_append_new(readers, json_pack("{s:s, s:s, s:s, s:i}", "op", reader->op->name, "scope",
                                                     reader->scope, "pass", cg_pass_name(reader->pass), "step",
                                                     saved[i].reader_steps[r]));
        }
        const cg_value *parameter = parameter_of(value);
        char name[256];
        json_array_append_new(
            list, json_pack("{s:s, s:s, s:s, s:s?, s:s, s:o, s:I, s:i, s:i, s:o}", "name", value->name, "scope",
                            value->scope, "op", value->producer->op->name, "parameter",
                            parameter ? cg_param_name(parameter, name, sizeof name) : NULL, "dtype",
                            cg_dtype_name(value->dtype), "shape", shape_json(&value->shape), "bytes",
                            (json_int_t)saved[i].bytes, "first_step", storage->first, "last_step",
                            storage->last, "readers", readers));
    }
    return list;
}

static json_t *categories_json(const cg_plan *plan) {
    int64_t bytes[CG_CATEGORIES];
    cg_plan_live(plan, plan->peak_step, bytes);
    json_t *object = json_object();
    for (int c = 0; c < CG_CATEGORIES; c++)
        json_object_set_new(object, cg_category_name((cg_category)c), json_integer(bytes[c]));
    return object;
}

static int print_json(const cg_config *config, const cg_step *step, const cg_saved *saved, int n) {
    const cg_plan *plan = step->plan;
    char *text = cg_config_json(config);
    json_t *root = json_pack("{s:I, s:I, s:i, s:i, s:i, s:o, s:o, s:o*}", "planned_peak_bytes",
                             (json_int_t)plan->peak_bytes, "floor_bytes", (json_int_t)plan->floor_bytes,
                             "peak_step", plan->peak_step, "steps", plan->n_steps, "recomputed_nodes",
                             step->n_clones, "peak_categories", categories_json(plan), "saved",
                             saved_json(plan, saved, n), "config", text ? json_loads(text, 0, NULL) : NULL);
    free(text);
    int failed = root ? json_dumpf(root, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(12)) : -1;
    putchar('\n');
    json_decref(root);
    return failed ? CG_FAILED : 0;
}

/* ---- table ---- */

static double mib(int64_t bytes) { return (double)bytes / 1048576; }

static void print_saved(const cg_plan *plan, const cg_saved *saved, int n) {
    table *t = table_new("rllllll");
    static const char *const titles[] = {"MiB", "value", "op", "dtype", "shape", "steps", "kept for"};
    for (int c = 0; c < 7; c++) table_cell(t, "%s", titles[c]);
    for (int i = 0; i < n; i++) {
        const cg_value *value = saved[i].value;
        const cg_storage *storage = &plan->storages[plan->storage_of[value->id]];
        const cg_node *reader = saved[i].n_readers ? saved[i].readers[0] : NULL;
        char shape[128], name[256];
        snprintf(name, sizeof name, "%s%s%s", value->scope, value->scope[0] ? "/" : "", value->name);
        table_cell(t, "%.3f", mib(saved[i].bytes));
        table_cell(t, "%s", name);
        const cg_value *parameter = parameter_of(value);
        table_cell(t, "%s%s%s", value->producer->op->name, parameter ? " " : "",
                   parameter ? parameter->name : "");
        table_cell(t, "%s", cg_dtype_name(value->dtype));
        table_cell(t, "%s", cg_shape_text(&value->shape, shape, sizeof shape));
        table_cell(t, "%d to %d", storage->first, storage->last);
        if (!reader)
            table_cell(t, "-");
        else if (saved[i].n_readers == 1)
            table_cell(t, "%s of %s at %d", reader->op->name, cg_pass_name(reader->pass),
                       saved[i].reader_steps[0]);
        else
            table_cell(t, "%s of %s at %d, %d more, last at %d", reader->op->name, cg_pass_name(reader->pass),
                       saved[i].reader_steps[0], saved[i].n_readers - 1,
                       saved[i].reader_steps[saved[i].n_readers - 1]);
    }
    table_print(t);
}

static int print_table(const char *program, const cg_config *config, const cg_step *step, const cg_saved *saved,
                       int n) {
    const cg_plan *plan = step->plan;
    tool_print_model(program, config);
    puts("\nSaved for backward, in order of birth; a step is one node, counted from 0");
    print_saved(plan, saved, n);
    int64_t bytes[CG_CATEGORIES], total = 0;
    cg_plan_live(plan, plan->peak_step, bytes);
    const cg_node *peak = plan->steps[plan->peak_step];
    printf("\nAlive at step %d of %d, the fullest: %s in %s, %s\n", plan->peak_step, plan->n_steps,
           peak->op->name, peak->scope[0] ? peak->scope : "the whole model", cg_pass_name(peak->pass));
    table *t = table_new("lr");
    table_cell(t, "category");
    table_cell(t, "MiB");
    for (int c = 0; c < CG_CATEGORIES; c++) {
        table_cell(t, "%s", cg_category_name((cg_category)c));
        table_cell(t, "%.3f", mib(bytes[c]));
        total += bytes[c];
    }
    table_cell(t, "together");
    table_cell(t, "%.3f", mib(total));
    table_print(t);
    int64_t all = 0;
    for (int i = 0; i < n; i++) all += saved[i].bytes;
    printf("\nsaved values     %d, together %.3f MiB\n", n, mib(all));
    printf("recomputed nodes %d\n", step->n_clones);
    printf("planned peak     %.3f MiB (%lld bytes), no layout can be below %.3f MiB\n", mib(plan->peak_bytes),
           (long long)plan->peak_bytes, mib(plan->floor_bytes));
    return 0;
}

/* ---- policies side by side ---- */

typedef struct summary {
    const char *policy;
    int64_t planned, saved, of_indexer; /* bytes; of_indexer: saved in the indexers' scopes */
    int n_clones;
} summary;

static bool summarize(cg_config *config, const cg_step_options *how, const char *policy, summary *s,
                      cg_error *error) {
    cg_step step;
    int n = 0;
    snprintf(config->policy, sizeof config->policy, "%s", policy);
    bool ok = cg_step_build(&step, config, how, error);
    cg_saved *saved = ok ? cg_plan_saved(step.plan, &n) : NULL;
    if (ok && !saved) ok = cg_fail(error, CG_FAILED, "out of memory while the plan is printed");
    if (ok) *s = (summary){.policy = policy, .planned = step.plan->peak_bytes, .n_clones = step.n_clones};
    for (int i = 0; ok && i < n; i++) {
        s->saved += saved[i].bytes;
        if (strstr(saved[i].value->scope, "/indexer")) s->of_indexer += saved[i].bytes;
    }
    cg_saved_free(saved, n);
    cg_step_free(&step);
    return ok;
}

static int compare(const char *program, const arguments *a, const cg_step_options *how) {
    const char *policies[4] = {"save", "recompute", "stream", a->model.config.policy};
    int n = 4;
    for (int i = 0; i < 3; i++)
        if (!strcmp(policies[i], policies[3])) n = 3;
    cg_config config = a->model.config;
    summary all[4];
    cg_error error = {0};
    for (int i = 0; i < n; i++)
        if (!summarize(&config, how, policies[i], &all[i], &error)) return tool_failed(program, &error);
    if (a->json) {
        json_t *list = json_array();
        for (int i = 0; i < n; i++)
            json_array_append_new(list, json_pack("{s:s, s:I, s:I, s:I, s:i}", "policy", all[i].policy,
                                                  "planned_peak_bytes", (json_int_t)all[i].planned,
                                                  "saved_bytes", (json_int_t)all[i].saved,
                                                  "saved_in_indexers_bytes", (json_int_t)all[i].of_indexer,
                                                  "recomputed_nodes", all[i].n_clones));
        int failed = json_dumpf(list, stdout, JSON_INDENT(2));
        putchar('\n');
        json_decref(list);
        return failed ? CG_FAILED : 0;
    }
    tool_print_model(program, &a->model.config);
    table *t = table_new("lrrrr");
    static const char *const titles[] = {"policy", "planned peak MiB", "saved MiB", "of it in indexers",
                                         "recomputed nodes"};
    for (int c = 0; c < 5; c++) table_cell(t, "%s", titles[c]);
    for (int i = 0; i < n; i++) {
        table_cell(t, "%s", all[i].policy);
        table_cell(t, "%.3f", mib(all[i].planned));
        table_cell(t, "%.3f", mib(all[i].saved));
        table_cell(t, "%.3f", mib(all[i].of_indexer));
        table_cell(t, "%d", all[i].n_clones);
    }
    table_print(t);
    return 0;
}

int csagrad_plan(int argc, char **argv) {
    arguments a = {0};
    cg_error error = {0};
    tool_parse(&argp, argc, argv, &a);
    cg_step step = {0};
    cg_step_options how = {
        .no_optimizer = a.no_optimizer, .keep_gradients = a.no_optimizer, .attend_all = a.warmup};
    const cg_config *config = &a.model.config;
    bool ok = tool_model_apply(&a.model, &error) && segments(&a, &how.max_segments, &error);
    if (ok && a.compare) return compare(argv[0], &a, &how);
    ok = ok && cg_step_build(&step, config, &how, &error);
    int n = 0, code = CG_FAILED;
    cg_saved *saved = ok ? cg_plan_saved(step.plan, &n) : NULL;
    if (ok && !saved) ok = cg_fail(&error, CG_FAILED, "out of memory while the plan is printed");
    if (!ok)
        code = tool_failed(argv[0], &error);
    else
        code = a.json ? print_json(config, &step, saved, n) : print_table(argv[0], config, &step, saved, n);
    cg_saved_free(saved, n);
    cg_step_free(&step);
    return code;
}
