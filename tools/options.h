/* What the subcommands share: model options, strict numbers, messages.
 *
 * A subcommand has a struct with a tool_model in it, an argp with tool_model_argp among its children (and, for
 * training, tool_training_argp with the same input), and calls tool_parse, then tool_model_apply:
 *
 *     static const struct argp_child children[] = {TOOL_CHILD(tool_model_argp), {0}};
 *     case ARGP_KEY_INIT: state->child_inputs[0] = &mine->model; return 0;
 *
 *     tool_parse(&argp, argc, argv, &mine);
 *     if (!tool_model_apply(&mine.model, &error)) return tool_failed(argv[0], &error);
 */
#ifndef CG_TOOLS_OPTIONS_H
#define CG_TOOLS_OPTIONS_H

#include <argp.h>

#include "graph/backend.h"
#include "models/dsv4/config.h"

/* Groups of --help, in this order. Options of a subcommand join them by number. */
enum { GROUP_INPUT = 1, GROUP_MODEL, GROUP_POLICY, GROUP_OUTPUT };

/* Keys of options without a letter; a subcommand's own start at TOOL_OWN_KEYS. */
enum { TOOL_JSON = 1000, TOOL_OWN_KEYS = 2000 };

#define TOOL_OUTPUT_HEADER                                                                                     \
    { .doc = "Output:", .group = GROUP_OUTPUT }
#define TOOL_JSON_OPTION                                                                                       \
    {                                                                                                          \
        .name = "json", .key = TOOL_JSON, .doc = "print JSON, sizes as exact integers in bytes",               \
        .group = GROUP_OUTPUT                                                                                  \
    }
#define TOOL_CHILD(argp)                                                                                       \
    { &(argp), 0, NULL, 0 }

enum { TOOL_SETTINGS = 128 };

/* The model options of a command line. */
typedef struct tool_model {
    cg_config config;  /* after tool_model_apply: what the options make of the task's defaults */
    bool config_given; /* `config` holds a whole configuration already: the options override that one */
    const char *config_file;
    struct {
        const char *option; /* as the user wrote it, for messages: "--seq", "--set seq_len=5" */
        char key[64];
        const char *text;
    } settings[TOOL_SETTINGS]; /* in order of the command line */
    int n_settings;
    const char *threads; /* NULL: all */
} tool_model;

/* Where a command computes: --device. Children of an argp take it by tool_device_argp. */
typedef struct tool_device {
    const char *word; /* as the user wrote it; NULL: cpu */
    char name[160];   /* for people: "cpu", or the name of the device and what it can */
    cg_device *device;
    cg_backend cuda;
    const cg_backend *backend; /* after tool_device_open; NULL: the CPU */
} tool_device;

extern const struct argp tool_device_argp;

/* Open the device that was asked for. False with the driver's reason and CG_NO_DEVICE when it cannot be used. The
 * environment's CSAGRAD_CUDA_VARIANT names a variant of kernels that is taken wherever there is one ("plain"). */
bool tool_device_open(tool_device *device, cg_error *error);
void tool_device_close(tool_device *device);

extern const struct argp tool_model_argp;    /* --config --set --task --seq --batch --seed ... */
extern const struct argp tool_training_argp; /* --steps --indexer-warmup --dtype */

/* Parse a command line. Arguments beside options are refused unless argp.args_doc names some. A bad line ends the
 * program: one sentence, exit code 2. */
void tool_parse(const struct argp *argp, int argc, char **argv, void *input);

/* Start from the defaults of the task that the options or else the file name, read the file over them, then the
 * settings in order, and check the whole; use --threads. */
bool tool_model_apply(tool_model *model, cg_error *error);

/* An integer written in decimal, within bounds; the sentence names the option. */
bool tool_integer(const char *option, const char *text, int64_t least, int64_t most, int64_t *value,
                  cg_error *error);

/* Lists "a,b,c": the next item, false at the end. An item too long for text is cut, and then is no number and no name. */
bool tool_next_item(const char **list, char *text, size_t text_bytes);

/* A list of number formats, none twice; without one that of the configuration. */
bool tool_dtypes(const char *option, const char *list, const cg_config *config, cg_dtype dtypes[CG_DTYPES],
                 int *n, cg_error *error);

/* One line that makes a pasted result run again: task, sizes, seed, policy. */
void tool_print_model(const char *program, const cg_config *config);

/* Print "program: sentence" to stderr; returns the exit code. */
int tool_failed(const char *program, const cg_error *error);

/* "did you mean": refuse a word that is none of n names. */
bool tool_unknown(const char *what, const char *word, const char *const *names, int n, cg_error *error);

#endif
