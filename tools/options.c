#define _GNU_SOURCE /* asprintf */
#include "tools/options.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/suggest.h"
#include "core/base/threads.h"
#include "ops/cuda/cuda_ops.h"
#include "tools/out_of_memory.h"

/* ---- options that set a key of the configuration ---- */

enum { KEY_CONFIG = 1001, KEY_SET, KEY_THREADS, KEY_DEVICE, KEY_FIRST };

typedef struct shortcut {
    const char *option, *key;
} shortcut;

/* The option's argp key is KEY_FIRST + place. */
static const shortcut shortcuts[] = {
    {"--task", "task"},     {"--seq", "seq_len"},     {"--batch", "batch_size"},
    {"--seed", "seed"},     {"--teacher", "teacher"}, {"--support", "support"},
    {"--policy", "policy"}, {"--steps", "steps"},     {"--indexer-warmup", "indexer_warmup"},
    {"--dtype", "dtype"},
};

enum { TASK, SEQ, BATCH, SEED, TEACHER, SUPPORT, POLICY, STEPS, INDEXER_WARMUP, DTYPE };

#define SHORTCUT(place, word, value, number)                                                                   \
    { .name = word, .key = KEY_FIRST + place, .arg = value, .doc = "", .group = number }

static const struct argp_option model_options[] = {
    {.doc = "Input:", .group = GROUP_INPUT},
    {.name = "config",
     .key = KEY_CONFIG,
     .arg = "FILE",
     .group = GROUP_INPUT,
     .doc =
         "JSON file of keys; keys that it lacks keep their defaults (csagrad config lists all), and the other "
         "options override it"},
    {.name = "set",
     .key = KEY_SET,
     .arg = "KEY=VALUE",
     .group = GROUP_INPUT,
     .doc = "set any key of the configuration; may be repeated, the last one counts"},
    SHORTCUT(TASK, "task", "NAME", GROUP_INPUT),
    SHORTCUT(SEED, "seed", "N", GROUP_INPUT),
    SHORTCUT(SEQ, "seq", "TOKENS", GROUP_INPUT),
    SHORTCUT(BATCH, "batch", "N", GROUP_INPUT),
    {.doc = "Model:", .group = GROUP_MODEL},
    SHORTCUT(TEACHER, "teacher", "NAME", GROUP_MODEL),
    SHORTCUT(SUPPORT, "support", "NAME", GROUP_MODEL),
    {.doc = "Policy:", .group = GROUP_POLICY},
    SHORTCUT(POLICY, "policy", "TEXT", GROUP_POLICY),
    {.name = "threads",
     .key = KEY_THREADS,
     .arg = "N",
     .group = GROUP_POLICY,
     .doc = "threads that compute; results do not depend on it (default: all processors)"},
    {0}};

static const struct argp_option training_options[] = {
    SHORTCUT(STEPS, "steps", "N", GROUP_INPUT),
    SHORTCUT(INDEXER_WARMUP, "indexer-warmup", "STEPS", GROUP_MODEL),
    SHORTCUT(DTYPE, "dtype", "NAME", GROUP_MODEL),
    {0}};

static void add_setting(struct argp_state *state, const char *option, const char *key, size_t key_length,
                        const char *text) {
    tool_model *model = state->input;
    if (model->n_settings == TOOL_SETTINGS)
        argp_failure(state, CG_BAD_INPUT, 0, "%s: more than %d settings", option, TOOL_SETTINGS);
    model->settings[model->n_settings].option = option;
    model->settings[model->n_settings].text = text;
    snprintf(model->settings[model->n_settings].key, sizeof model->settings[0].key, "%.*s", (int)key_length,
             key);
    model->n_settings++;
}

static error_t parse_model(int key, char *arg, struct argp_state *state) {
    tool_model *model = state->input;
    const int n_shortcuts = sizeof shortcuts / sizeof shortcuts[0];
    if (key >= KEY_FIRST && key < KEY_FIRST + n_shortcuts) {
        const shortcut *s = &shortcuts[key - KEY_FIRST];
        add_setting(state, s->option, s->key, strlen(s->key), arg);
        return 0;
    }
    switch (key) {
    case KEY_CONFIG:
        model->config_file = arg;
        return 0;
    case KEY_SET: {
        const char *equals = strchr(arg, '=');
        if (!equals) {
            cg_error error = {0};
            cg_fail(&error, CG_BAD_INPUT, "--set needs KEY=VALUE, got \"%.100s\"", arg);
            exit(tool_failed(state->name, &error));
        }
        add_setting(state, "--set", arg, (size_t)(equals - arg), equals + 1);
        return 0;
    }
    case KEY_THREADS:
        model->threads = arg;
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

/* The help of an option that sets a key is the key's own, with range and default. */
static char *help_of_key(int key, const char *text, void *input) {
    (void)input;
    cg_config toy = cg_config_toy();
    cg_config_key line;
    char fallback[CG_POLICY_BYTES], *help = NULL;
    if (key < KEY_FIRST || key >= KEY_FIRST + (int)(sizeof shortcuts / sizeof shortcuts[0]))
        return (char *)text;
    const char *name = shortcuts[key - KEY_FIRST].key;
    for (int i = 0; cg_config_key_at(i, &line); i++) {
        if (strcmp(line.name, name)) continue;
        const char *standard = cg_config_get(&toy, name, fallback, sizeof fallback);
        if (asprintf(&help, "%s; %s (default: %s)", line.doc, line.range, standard) < 0) tool_out_of_memory();
        break;
    }
    return help;
}

const struct argp tool_model_argp = {
    .options = model_options, .parser = parse_model, .help_filter = help_of_key};
const struct argp tool_training_argp = {
    .options = training_options, .parser = parse_model, .help_filter = help_of_key};

/* ---- where it computes ---- */

static const struct argp_option device_options[] = {
    {.name = "device",
     .key = KEY_DEVICE,
     .arg = "NAME",
     .group = GROUP_POLICY,
     .doc = "cpu, cuda, or cuda:N for another than the first one (default: cpu)"},
    {0}};

static error_t parse_device(int key, char *arg, struct argp_state *state) {
    tool_device *device = state->input;
    if (key != KEY_DEVICE) return ARGP_ERR_UNKNOWN;
    device->word = arg;
    return 0;
}

const struct argp tool_device_argp = {.options = device_options, .parser = parse_device};

bool tool_device_open(tool_device *device, cg_error *error) {
    static const char *const names[] = {"cpu", "cuda"};
    const char *word = device->word ? device->word : "cpu";
    int64_t index = 0;
    snprintf(device->name, sizeof device->name, "cpu");
    if (!strcmp(word, "cpu")) return true;
    bool ok = true;
    if (!strncmp(word, "cuda:", 5))
        ok = tool_integer("--device cuda:N", word + 5, 0, 1023, &index, error);
    else if (strcmp(word, "cuda"))
        ok = tool_unknown("device", word, names, 2, error);
    ok = ok && (device->device = cg_device_open((int)index, error));
    ok = ok && cg_cuda_backend(&device->cuda, device->device, getenv("CSAGRAD_CUDA_VARIANT"), error);
    if (!ok) {
        cg_error_at(error, "--device");
        tool_device_close(device);
        return false;
    }
    cg_device_facts facts;
    cg_device_facts_of(device->device, &facts);
    snprintf(device->name, sizeof device->name, "%.100s, sm_%d, %.1f GiB", facts.name, facts.sm,
             (double)facts.memory_bytes / (1 << 30));
    device->backend = &device->cuda;
    return true;
}

void tool_device_close(tool_device *device) {
    cg_device_close(device->device);
    device->device = NULL;
    device->backend = NULL;
}

/* ---- the whole configuration ---- */

static bool load_file(tool_model *model, cg_error *error) {
    if (!model->config_file || cg_config_load(&model->config, model->config_file, error)) return true;
    cg_error_at(error, "--config");
    return false;
}

static bool apply_settings(tool_model *model, const char *only, cg_error *error) {
    for (int i = 0; i < model->n_settings; i++) {
        if (only && strcmp(model->settings[i].key, only)) continue;
        if (cg_config_set(&model->config, model->settings[i].key, model->settings[i].text, error)) continue;
        cg_error_at(error, "%s", model->settings[i].option);
        return false;
    }
    return true;
}

bool tool_model_apply(tool_model *model, cg_error *error) {
    if (!model->config_given) { /* the task first: it decides what the defaults are */
        model->config = cg_config_toy();
        if (!apply_settings(model, "task", error)) return false;
        model->config = cg_config_default(model->config.task);
    }
    if (!load_file(model, error) || !apply_settings(model, NULL, error)) return false;
    if (!cg_config_check(&model->config, error)) return false;
    int64_t n;
    if (!model->threads) return true;
    return tool_integer("--threads", model->threads, 1, cg_thread_slots(), &n, error) &&
           cg_threads_set((int)n, error);
}

/* ---- command lines ---- */

enum { MAX_OPTIONS = 64 };

/* All options that an argp and its children know. */
static int list_options(const struct argp *argp, const struct argp_option *list[MAX_OPTIONS], int n) {
    for (const struct argp_option *o = argp->options; o && (o->name || o->key || o->doc || o->group); o++)
        if (o->name && n < MAX_OPTIONS) list[n++] = o;
    for (const struct argp_child *c = argp->children; c && c->argp; c++) n = list_options(c->argp, list, n);
    return n;
}

/* The option that a word such as "--seq=5" or "--se" means; NULL with a sentence. An unambiguous start will do.
 */
static const struct argp_option *find_option(const char *word, const struct argp_option *const *list, int n,
                                             cg_error *error) {
    size_t length = strcspn(word, "=") - 2;
    const struct argp_option *found = NULL;
    const char *names[MAX_OPTIONS];
    for (int i = 0; i < n; i++) {
        names[i] = list[i]->name;
        if (strncmp(word + 2, list[i]->name, length)) continue;
        if (list[i]->name[length] == 0) return list[i];
        if (found) {
            cg_fail(error, CG_BAD_INPUT, "%.100s may be --%s or --%s", word, found->name, list[i]->name);
            return NULL;
        }
        found = list[i];
    }
    if (found) return found;
    char name[100];
    snprintf(name, sizeof name, "%.*s", (int)length, word + 2);
    const char *near = cg_suggest(name, names, n);
    cg_fail(error, CG_BAD_INPUT, "unknown option --%s%s%s%s", name, near ? ", did you mean --" : ", see --help",
            near ? near : "", near ? "?" : "");
    return NULL;
}

/* Refuse what getopt would refuse in words of its own and in two lines. */
static bool check_words(const struct argp *argp, int argc, char **argv, cg_error *error) {
    static const struct argp_option built_in[] = {{.name = "help"}, {.name = "usage"}, {.name = "version"}};
    const struct argp_option *list[MAX_OPTIONS + 3];
    int n = list_options(argp, list, 0);
    for (int i = 0; i < 3; i++) list[n++] = &built_in[i];
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "-?") || !strcmp(argv[i], "-V")) continue;
        if (argv[i][0] != '-' && argp->args_doc) continue;
        if (argv[i][0] != '-' || !strcmp(argv[i], "--") || !strcmp(argv[i], "-"))
            return cg_fail(error, CG_BAD_INPUT, "argument \"%.100s\" is not wanted: options start with --",
                           argv[i]);
        if (argv[i][1] != '-')
            return cg_fail(error, CG_BAD_INPUT, "unknown option %.100s, see --help", argv[i]);
        const struct argp_option *option = find_option(argv[i], list, n, error);
        if (!option) return false;
        bool has_value = strchr(argv[i], '=') != NULL;
        if (has_value && !option->arg) return cg_fail(error, CG_BAD_INPUT, "--%s takes no value", option->name);
        if (!has_value && option->arg && ++i == argc)
            return cg_fail(error, CG_BAD_INPUT, "--%s needs a value, %s", option->name, option->arg);
    }
    return true;
}

void tool_parse(const struct argp *argp, int argc, char **argv, void *input) {
    cg_error error = {0};
    if (!check_words(argp, argc, argv, &error)) exit(tool_failed(argv[0], &error));
    free(tool_malloc(1 << 20)); /* argp writes a help text, and ends by an assertion without memory for it */
    error_t code = argp_parse(argp, argc, argv, 0, NULL, input);
    if (!code) return;
    cg_fail(&error, CG_FAILED, "%s", strerror(code));
    exit(tool_failed(argv[0], &error));
}

bool tool_integer(const char *option, const char *text, int64_t least, int64_t most, int64_t *value,
                  cg_error *error) {
    char *end;
    errno = 0;
    long long number = strtoll(text, &end, 10);
    bool strict = (text[0] >= '0' && text[0] <= '9') || (text[0] == '-' && text[1] >= '0' && text[1] <= '9');
    if (!strict || *end || errno || number < least || number > most)
        return cg_fail(error, CG_BAD_INPUT, "%s must be an integer from %lld to %lld, got \"%.60s\"", option,
                       (long long)least, (long long)most, text);
    *value = number;
    return true;
}

bool tool_next_item(const char **list, char *text, size_t text_bytes) {
    if (!*list) return false;
    size_t length = strcspn(*list, ",");
    snprintf(text, text_bytes, "%.*s", (int)length, *list);
    *list = (*list)[length] ? *list + length + 1 : NULL;
    return true;
}

bool tool_dtypes(const char *option, const char *list, const cg_config *config, cg_dtype dtypes[CG_DTYPES],
                 int *n, cg_error *error) {
    char item[40];
    *n = 0;
    if (!list) dtypes[(*n)++] = config->dtype;
    while (tool_next_item(&list, item, sizeof item)) {
        cg_config probe = *config;
        if (!cg_config_set(&probe, "dtype", item, error)) {
            cg_error_at(error, option);
            return false;
        }
        for (int i = 0; i < *n; i++)
            if (dtypes[i] == probe.dtype)
                return cg_fail(error, CG_BAD_INPUT, "%s names %s twice", option, item);
        dtypes[(*n)++] = probe.dtype;
    }
    return true;
}

/* ---- messages ---- */

void tool_print_model(const char *program, const cg_config *config) {
    static const char *const keys[] = {"task",    "seq_len",         "batch_size", "seed",
                                       "dtype",   "compress_ratios", "index_topk", "teacher",
                                       "support", "policy"};
    printf("%s:", program);
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        char text[CG_POLICY_BYTES + CG_MAX_LAYERS * 4];
        const char *value = cg_config_get(config, keys[i], text, sizeof text);
        printf(" %s=%s", keys[i], value ? value : "?");
    }
    putchar('\n');
}

int tool_failed(const char *program, const cg_error *error) {
    fflush(stdout);
    fprintf(stderr, "%s: %s\n", program, error->text);
    return error->code == CG_OK ? CG_FAILED : error->code;
}

bool tool_unknown(const char *what, const char *word, const char *const *names, int n, cg_error *error) {
    const char *near = cg_suggest(word, names, n);
    return cg_fail(error, CG_BAD_INPUT, "unknown %s \"%.100s\"%s%s%s", what, word,
                   near ? ", did you mean " : "", near ? near : "", near ? "?" : "");
}
