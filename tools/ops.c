/* csagrad ops: which ops are there, what does each save for backward, may recompute clone it, has it a
 * gradient?
 *
 * The saved set is what the op's own cases state; the tests compare it with what the graph derives.
 *
 *     csagrad ops --json */
#include "tools/csagrad.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ops/ops.h"
#include "tools/json_number.h"
#include "tools/options.h"
#include "tools/table.h"

static error_t parse(int key, char *arg, struct argp_state *state) {
    (void)arg;
    if (key != TOOL_JSON) return ARGP_ERR_UNKNOWN;
    *(bool *)state->input = true;
    return 0;
}

static const struct argp_option options[] = {
    TOOL_OUTPUT_HEADER, {.name = "json", .key = TOOL_JSON, .group = GROUP_OUTPUT, .doc = "print JSON"}, {0}};
static const struct argp argp = {options,
                                 parse,
                                 NULL,
                                 "List all ops: what each saves for its backward pass, what recompute may do "
                                 "with it, and which inputs have a "
                                 "gradient.",
                                 NULL,
                                 NULL,
                                 NULL};

/* True when a list "q k w" holds a name. */
static bool has_word(const char *list, const char *name) {
    size_t length = strlen(name);
    for (const char *at = list; at && (at = strstr(at, name)); at += length)
        if ((at == list || at[-1] == ' ') && (at[length] == 0 || at[length] == ' ')) return true;
    return false;
}

/* Does any case of the op save it? */
static bool saves(const cg_op *op, const char *name) {
    for (int c = 0; c < op->n_cases; c++)
        if (op->cases[c].crosses && has_word(op->cases[c].crosses, name)) return true;
    return false;
}

/* Names in table order that `wanted` asks for. */
typedef enum column { SAVED, DIFFERENTIABLE } column;

static json_t *names(const cg_op *op, column wanted) {
    json_t *list = json_array();
    for (int i = 0; i < CG_MAX_IN && op->in[i]; i++)
        if (wanted == SAVED ? saves(op, op->in[i]) : (op->differentiable & CG_BIT(i)) != 0)
            json_array_append_new(list, json_string(op->in[i]));
    for (int s = 0; s < CG_MAX_OUT && op->out[s] && wanted == SAVED; s++)
        if (saves(op, op->out[s])) json_array_append_new(list, json_string(op->out[s]));
    return list;
}

static void join(const json_t *list, char *text, size_t bytes) {
    size_t n = 0;
    text[0] = 0;
    for (size_t i = 0; i < json_array_size(list) && n < bytes; i++)
        n += (size_t)snprintf(text + n, bytes - n, "%s%s", i ? " " : "",
                              json_string_value(json_array_get(list, i)));
}

static const char *replay_name(cg_replay replay) {
    static const char *const words[] = {"same bits", "counter", "choice"};
    return words[replay];
}

static int print_json(void) {
    json_t *list = json_array();
    for (int o = 0; o < cg_all_ops.n; o++) {
        const cg_op *op = cg_all_ops.list[o];
        json_t *entry = json_pack("{s:s, s:s, s:s, s:o, s:o, s:i}", "op", op->name, "doc", op->doc, "replay",
                                  replay_name(op->replay), "saves", names(op, SAVED), "differentiable",
                                  names(op, DIFFERENTIABLE), "cases", op->n_cases);
        json_object_set_new(entry, "no_gradient", op->no_grad ? json_string(op->no_grad) : json_null());
        json_array_append_new(list, entry);
    }
    json_t *root = json_pack("{s:o}", "ops", list);
    json_print(root, JSON_INDENT(2));
    return 0;
}

static void cell_names(table *t, const cg_op *op, column wanted) {
    char text[256];
    json_t *list = names(op, wanted);
    join(list, text, sizeof text);
    json_decref(list);
    table_cell(t, "%s", text[0] ? text : wanted == SAVED ? "-" : op->no_grad);
}

static int print_table(void) {
    table *t = table_new("lllll");
    static const char *const titles[] = {"op", "saves for backward", "recompute", "gradient to",
                                         "what it computes"};
    for (int c = 0; c < 5; c++) table_cell(t, "%s", titles[c]);
    for (int o = 0; o < cg_all_ops.n; o++) {
        const cg_op *op = cg_all_ops.list[o];
        table_cell(t, "%s", op->name);
        cell_names(t, op, SAVED);
        table_cell(t, "%s", op->replay == CG_REPLAY_CHOICE ? "never: it chooses" : replay_name(op->replay));
        cell_names(t, op, DIFFERENTIABLE);
        table_cell(t, "%s", op->doc);
    }
    table_print(t);
    return 0;
}

int csagrad_ops(int argc, char **argv) {
    bool json = false;
    tool_parse(&argp, argc, argv, &json);
    return json ? print_json() : print_table();
}
