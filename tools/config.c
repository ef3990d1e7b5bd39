/* csagrad config: which keys does a configuration have, what may they be, and what do the given options make of
 * them?
 *
 *     csagrad config                      keys, ranges, defaults, meaning
 *     csagrad config --seq 64 --json      the whole configuration, as --config reads it */
#include "tools/csagrad.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/options.h"

typedef struct arguments {
    tool_model model;
    bool json;
} arguments;

static error_t parse(int key, char *arg, struct argp_state *state) {
    (void)arg;
    arguments *a = state->input;
    if (key == ARGP_KEY_INIT) {
        state->child_inputs[0] = state->child_inputs[1] = &a->model;
        return 0;
    }
    if (key != TOOL_JSON) return ARGP_ERR_UNKNOWN;
    a->json = true;
    return 0;
}

static const struct argp_option options[] = {
    TOOL_OUTPUT_HEADER,
    {.name = "json",
     .key = TOOL_JSON,
     .group = GROUP_OUTPUT,
     .doc = "print the configuration that the options give, as a file for --config"},
    {0}};
static const struct argp_child children[] = {TOOL_CHILD(tool_model_argp), TOOL_CHILD(tool_training_argp), {0}};
static const struct argp argp = {options,
                                 parse,
                                 NULL,
                                 "List the keys of the configuration with value, range and meaning. The value "
                                 "is the default, or what the options "
                                 "make of it.",
                                 children,
                                 NULL,
                                 NULL};

static int print_keys(const cg_config *config) {
    cg_config_key key;
    char value[CG_POLICY_BYTES + CG_MAX_LAYERS * 4];
    for (int i = 0; cg_config_key_at(i, &key); i++)
        printf("%s = %s\n    %s\n    %s\n", key.name, cg_config_get(config, key.name, value, sizeof value),
               key.doc, key.range);
    return 0;
}

int csagrad_config(int argc, char **argv) {
    arguments a = {0};
    cg_error error = {0};
    tool_parse(&argp, argc, argv, &a);
    if (!tool_model_apply(&a.model, &error)) return tool_failed(argv[0], &error);
    if (!a.json) return print_keys(&a.model.config);
    char *json = cg_config_json(&a.model.config);
    if (!json) {
        cg_fail(&error, CG_FAILED, "out of memory while the configuration is printed");
        return tool_failed(argv[0], &error);
    }
    fputs(json, stdout);
    free(json);
    return 0;
}
