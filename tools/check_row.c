/* csagrad check --row: what does one query row give? Every part of its attention and of its indexer loss, and all
 * gradients, for rows given by hand.
 *
 *     csagrad check --row --q '[[2,0],[0,1]]' --window '[[0,3]]' --compressed '[[1,0],[0,1]]' --sink '[0,0]' \
 *         --scores '[0.3,-0.2]'
 *     csagrad check --row case.json --contract teacher=compressed --json      - reads standard input */
#include "tools/csagrad.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/file.h"
#include "models/check/row.h"
#include "tools/options.h"

enum { MAX_KEYS = 32, KEY_ROW = TOOL_OWN_KEYS, KEY_FIRST, MAX_BYTES = 1 << 28 };

typedef struct arguments {
    const char *settings[MAX_KEYS][2];
    int n_settings;
    tool_device device;
    bool json;
} arguments;

static char option_names[MAX_KEYS][32];
static struct argp_option options[MAX_KEYS + 4];

/* The options are the keys of a description, with dashes. */
static void list_options(void) {
    int n = 0;
    options[n++] = (struct argp_option){.name = "row",
                                        .key = KEY_ROW,
                                        .group = GROUP_INPUT,
                                        .doc = "one query row, from FILE, - (standard input) and options"};
    for (int i = 0; cg_row_key_at(i) && i < MAX_KEYS; i++) {
        snprintf(option_names[i], sizeof option_names[i], "%s", cg_row_key_at(i)->name);
        for (char *c = option_names[i]; *c; c++)
            if (*c == '_') *c = '-';
        options[n++] = (struct argp_option){.name = option_names[i],
                                            .key = KEY_FIRST + i,
                                            .arg = "JSON",
                                            .group = GROUP_MODEL,
                                            .doc = cg_row_key_at(i)->doc};
    }
    options[n++] = (struct argp_option)TOOL_JSON_OPTION;
}

static error_t parse(int key, char *arg, struct argp_state *state) {
    arguments *a = state->input;
    if (key == KEY_ROW) return 0;
    if (key == ARGP_KEY_INIT) {
        state->child_inputs[0] = &a->device;
        return 0;
    }
    if (key == TOOL_JSON) {
        a->json = true;
        return 0;
    }
    if (key < KEY_FIRST || key >= KEY_FIRST + MAX_KEYS) return ARGP_ERR_UNKNOWN;
    int at = 0; /* the last of repeated options counts */
    while (at < a->n_settings && strcmp(a->settings[at][0], cg_row_key_at(key - KEY_FIRST)->name)) at++;
    a->settings[at][0] = cg_row_key_at(key - KEY_FIRST)->name;
    a->settings[at][1] = arg;
    if (at == a->n_settings) a->n_settings++;
    return 0;
}

static const struct argp_child children[] = {TOOL_CHILD(tool_device_argp), {0}};
static const struct argp argp = {
    options,
    parse,
    "[FILE]",
    "Compute one query row: weights, output, lse, the indexer's target and loss, and all "
    "gradients. FILE is a JSON object whose keys are the options below (with _ for -); "
    "options override it. Numbers, lists and lists of lists are written as JSON.",
    children,
    NULL,
    NULL};

/* The word that is no option and no option's value: taken out of argv. */
static bool take_file(int *argc, char **argv, const char **taken, cg_error *error) {
    const char *file = NULL;
    int kept = 1;
    for (int i = 1; i < *argc; i++) {
        const bool option = !strncmp(argv[i], "--", 2) && argv[i][2];
        if (!option && (argv[i][0] != '-' || !argv[i][1])) {
            if (file)
                return cg_fail(error, CG_BAD_INPUT, "one file is wanted, got \"%.60s\" and \"%.60s\"", file,
                               argv[i]);
            file = argv[i];
            continue;
        }
        argv[kept++] = argv[i];
        if (!option || strchr(argv[i], '=')) continue;
        bool has_value = !strncmp(argv[i] + 2, "device", strlen(argv[i] + 2));
        for (int k = 0; k < MAX_KEYS && cg_row_key_at(k); k++)
            has_value |= !strncmp(argv[i] + 2, option_names[k], strlen(argv[i] + 2));
        if (has_value && i + 1 < *argc) argv[kept++] = argv[++i];
    }
    *argc = kept;
    argv[kept] = NULL;
    *taken = file;
    return true;
}

static bool read_stream(FILE *in, char **data, size_t *bytes, cg_error *error) {
    size_t room = 1 << 16;
    *bytes = 0;
    for (*data = NULL;; room *= 2) {
        char *larger = realloc(*data, room);
        if (!larger) return cg_fail(error, CG_FAILED, "out of memory while standard input is read");
        *data = larger;
        *bytes += fread(*data + *bytes, 1, room - *bytes, in);
        if (ferror(in)) return cg_fail(error, CG_BAD_INPUT, "standard input: %s", strerror(errno));
        if (*bytes < room) return true;
        if (room >= MAX_BYTES)
            return cg_fail(error, CG_BAD_INPUT, "standard input is longer than %d bytes", MAX_BYTES);
    }
}

/* ---- printing ---- */

static void print_number(double x, int digits) {
    if (isnan(x))
        printf("\"NaN\"");
    else if (isinf(x))
        printf(x > 0 ? "\"Infinity\"" : "\"-Infinity\"");
    else
        printf("%.*g", digits, x);
}

static void print_array(const cg_row_array *a, int digits) {
    const bool one = !strcmp(a->name, "kl") || !strcmp(a->name, "loss");
    printf(",\n \"%s\": %s", a->name, one ? "" : "[");
    for (int64_t r = 0; r < a->rows; r++) {
        if (a->matrix) printf(r ? ", [" : "[");
        for (int64_t c = 0; c < a->columns; c++) {
            if (c) printf(", ");
            print_number(a->x[r * a->columns + c], digits);
        }
        if (a->matrix) printf("]");
    }
    if (!one) printf("]");
}

static void print_json(const cg_row *row, const cg_row_result *result) {
    char contract[CG_CONTRACT_TEXT];
    printf("{\"contract\": \"%s\", \"dtype\": \"%s\", \"loss_by_ops\": %s",
           cg_contract_text(&row->contract, contract, sizeof contract), cg_dtype_name(row->dtype),
           result->by_ops ? "true" : "false");
    for (int i = 0; i < result->n; i++) print_array(&result->arrays[i], row->dtype == CG_F64 ? 17 : 9);
    puts("}");
}

static void print_table(const cg_row *row, const cg_row_result *result) {
    char contract[CG_CONTRACT_TEXT];
    printf("csagrad check --row: heads=%lldx%lld window=%lld compressed=%lld list=%lld dtype=%s\n%s\n",
           (long long)row->H, (long long)row->D, (long long)row->W, (long long)row->C, (long long)row->K,
           cg_dtype_name(row->dtype), cg_contract_text(&row->contract, contract, sizeof contract));
    for (int i = 0; i < result->n; i++) {
        const cg_row_array *a = &result->arrays[i];
        if (a->rows * a->columns == 0) continue;
        for (int64_t r = 0; r < a->rows; r++) {
            char name[48];
            if (a->matrix)
                snprintf(name, sizeof name, "%s[%lld]", a->name, (long long)r);
            else
                snprintf(name, sizeof name, "%s", a->name);
            printf("%-18s", name);
            for (int64_t c = 0; c < a->columns; c++)
                printf(" %*.*g", row->dtype == CG_F64 ? 18 : 13, row->dtype == CG_F64 ? 12 : 7,
                       a->x[r * a->columns + c]);
            printf("%s%s\n", r ? "" : "   ", r ? "" : a->doc);
        }
    }
}

int csagrad_check_row(int argc, char **argv) {
    arguments a = {0};
    cg_error error = {0};
    list_options();
    const char *file = NULL;
    if (!take_file(&argc, argv, &file, &error)) return tool_failed(argv[0], &error);
    tool_parse(&argp, argc, argv, &a);
    char *text = NULL;
    size_t bytes = 0;
    bool ok = !file || (strcmp(file, "-") ? cg_file_read(file, MAX_BYTES, &text, &bytes, &error)
                                          : read_stream(stdin, &text, &bytes, &error));
    cg_row *row =
        ok ? cg_row_read(text, bytes, (const char *const(*)[2])a.settings, a.n_settings, &error) : NULL;
    if (!row && ok && file) cg_error_at(&error, "%s", strcmp(file, "-") ? file : "standard input");
    free(text);
    cg_row_result *result =
        row && tool_device_open(&a.device, &error) ? cg_row_run(row, a.device.backend, &error) : NULL;
    if (result) (a.json ? print_json : print_table)(row, result);
    const int code = result ? 0 : tool_failed(argv[0], &error);
    cg_row_result_free(result);
    cg_row_free(row);
    tool_device_close(&a.device);
    return code;
}
