/* csagrad info: what is in a file of tensors, safetensors, npy or npz? And without a file: which kernels run here?
 *
 *     csagrad info
 *     csagrad info dump.npz
 *     csagrad info checkpoint.safetensors --json
 *     csagrad info lengths.npy --values 8
 *     csagrad info model.safetensors.index.json
 *     csagrad info checkpoint/ */
#include "tools/info.h"

#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "core/base/isa.h"
#include "core/base/shown.h"
#include "tools/json_number.h"
#include "tools/csagrad.h"
#include "tools/options.h"

enum { VALUES = TOOL_OWN_KEYS };

static error_t parse(int key, char *arg, struct argp_state *state) {
    info *in = state->input;
    cg_error error = {0};
    switch (key) {
    case TOOL_JSON:
        in->json = true;
        return 0;
    case VALUES:
        in->values_text = arg;
        return 0;
    case ARGP_KEY_ARG:
        if (in->path) cg_fail(&error, CG_BAD_INPUT, "one file is wanted, got \"%.80s\" as well", arg);
        in->path = arg;
        break;
    default:
        return ARGP_ERR_UNKNOWN;
    }
    if (error.code) exit(tool_failed(state->name, &error));
    return 0;
}

static const struct argp_option options[] = {
    TOOL_OUTPUT_HEADER,
    TOOL_JSON_OPTION,
    {.name = "values",
     .key = VALUES,
     .arg = "N",
     .group = GROUP_OUTPUT,
     .doc = "show the first N elements of each tensor as well, at most 1000 (default: 0)"},
    {0}};
static const struct argp argp = {
    options,
    parse,
    "[FILE|FOLDER]",
    "Without a file: say which of the kernels that this processor can run do run (the environment variable "
    "CSAGRAD_ISA chooses among avx512, avx2 and portable; by default the first that can). Check a file of "
    "tensors (safetensors, npy or npz, told by its content) as a whole and list what it holds: names, "
    "dtypes, shapes, sizes in bytes and metadata. An index of shards (model.safetensors.index.json) is held "
    "against its shards; of a folder, its index, or else all its files. Exit code 2 and one sentence when "
    "something is damaged, missing or contradicts.",
    NULL,
    NULL,
    NULL};

static int64_t shown_values(const info *in, const cg_tensor *t) {
    int64_t n = cg_shape_count(&t->shape);
    return n < in->values ? n : in->values;
}

static bool is_whole(cg_dtype dtype) { return dtype == CG_BOOL || cg_dtype_is_whole(dtype); }

static json_t *whole_json(const cg_tensor *t, int64_t i) {
    if (t->dtype == CG_BOOL) return json_boolean(cg_dtype_whole(t->dtype, t->data, i));
    int64_t x = cg_dtype_whole(t->dtype, t->data, i);
    return t->dtype != CG_U64 || x < INT64_MAX ? json_integer(x)
                                               : json_string(cg_dtype_whole_text(t->dtype, t->data, i).text);
}

static json_t *values_json(const info *in, const cg_tensor *t) {
    json_t *list = json_array();
    for (int64_t i = 0; i < shown_values(in, t); i++)
        json_array_append_new(list, is_whole(t->dtype) ? whole_json(t, i)
                                                       : json_number(cg_dtype_get(t->dtype, t->data, i)));
    return list;
}

json_t *info_entry_json(const info *in, const cg_entry *e) {
    json_t *shape = json_array();
    for (int d = 0; d < e->shape.n_dims; d++) json_array_append_new(shape, json_integer(e->shape.dims[d]));
    json_t *entry = json_pack("{s:s, s:s, s:o, s:I, s:b}", "name", e->name, "dtype", e->dtype, "shape", shape,
                              "bytes", (json_int_t)e->bytes, "read", e->tensor != NULL);
    if (in->values > 0 && e->tensor) json_object_set_new(entry, "values", values_json(in, e->tensor));
    return entry;
}

/* {"format": ..., "tensors": [...], "metadata": {...}} */
json_t *info_archive_json(const info *in, const cg_archive *file) {
    json_t *tensors = json_array(), *metadata = json_object();
    for (int i = 0; i < cg_archive_n_entries(file); i++)
        json_array_append_new(tensors, info_entry_json(in, cg_archive_entry(file, i)));
    void *at = NULL;
    const char *key, *value;
    while (cg_archive_metadata_next(file, &at, &key, &value))
        json_object_set_new(metadata, key, json_string(value));
    return json_pack("{s:s, s:o, s:o}", "format", cg_archive_format(file), "tensors", tensors, "metadata",
                     metadata);
}

void info_print_values(const info *in, const cg_entry *e) {
    const cg_tensor *t = e->tensor;
    if (!t) return;
    int64_t n = shown_values(in, t);
    printf("%s:", cg_shown(e->name).text);
    for (int64_t i = 0; i < n; i++) {
        if (is_whole(t->dtype))
            printf(" %s", cg_dtype_whole_text(t->dtype, t->data, i).text);
        else
            printf(" %.9g", cg_dtype_get(t->dtype, t->data, i));
    }
    puts(n < cg_shape_count(&t->shape) ? " ..." : "");
}

void info_titles(table *t) {
    static const char *const titles[] = {"name", "dtype", "shape", "bytes"};
    for (int c = 0; c < 4; c++) table_cell(t, "%s", titles[c]);
}

void info_entry_cells(table *t, const cg_entry *e) {
    char shape[160];
    table_cell(t, "%s", cg_shown(e->name).text);
    table_cell(t, "%s", cg_shown(e->dtype).text);
    table_cell(t, "%s", cg_shape_text(&e->shape, shape, sizeof shape));
    table_cell(t, "%" PRId64, e->bytes);
}

void info_print_archive(const info *in, const cg_archive *file) {
    int n = cg_archive_n_entries(file);
    printf("%s, %d tensor%s\n\n", cg_archive_format(file), n, n == 1 ? "" : "s");
    table *t = table_new("lllr");
    info_titles(t);
    for (int i = 0; i < n; i++) info_entry_cells(t, cg_archive_entry(file, i));
    table_print(t);
    for (int i = 0; i < n; i++) {
        const cg_entry *e = cg_archive_entry(file, i);
        if (e->advice)
            printf("%s: elements %s are not read: %s\n", cg_shown(e->name).text, cg_shown(e->dtype).text,
                   e->advice);
    }
    if (in->values > 0) putchar('\n');
    for (int i = 0; i < n && in->values > 0; i++) info_print_values(in, cg_archive_entry(file, i));
    void *at = NULL;
    const char *key, *value;
    for (bool first = true; cg_archive_metadata_next(file, &at, &key, &value); first = false)
        printf("%s%s = %s\n", first ? "\nmetadata\n" : "", cg_shown(key).text, cg_shown(value).text);
}

/* The paths that this processor has, the highest first, and the one in use. */
static int print_isas(const info *in) {
    const char *used = cg_isa_name(cg_isa_used());
    json_t *isas = json_array();
    for (int isa = CG_ISAS - 1; isa >= 0; isa--)
        if (cg_isa_exists((cg_isa)isa)) json_array_append_new(isas, json_string(cg_isa_name((cg_isa)isa)));
    if (in->json) {
        json_t *root = json_pack("{s:s, s:s, s:O}", "version", CSAGRAD_VERSION, "isa", used, "isas", isas);
        json_print(root, JSON_INDENT(2));
    } else {
        printf("%s\nkernels: %s; this processor has", CSAGRAD_VERSION, used);
        for (size_t i = 0; i < json_array_size(isas); i++)
            printf("%s %s", i ? "," : "", json_string_value(json_array_get(isas, i)));
        puts("; CSAGRAD_ISA chooses");
    }
    json_decref(isas);
    return 0;
}

int csagrad_info(int argc, char **argv) {
    info in = {0};
    cg_error error = {0};
    tool_parse(&argp, argc, argv, &in);
    if (in.values_text && !tool_integer("--values", in.values_text, 0, 1000, &in.values, &error))
        return tool_failed(argv[0], &error);
    if (!in.path && in.values_text) {
        cg_fail(&error, CG_BAD_INPUT, "--values needs a file");
        return tool_failed(argv[0], &error);
    }
    if (!in.path) return print_isas(&in);
    if (info_is_folder(in.path) || info_is_index(in.path)) return info_shards(&in, argv[0]);
    cg_archive *file = cg_archive_open(in.path, &error);
    if (!file) return tool_failed(argv[0], &error);
    if (in.json)
        json_print(info_archive_json(&in, file), JSON_INDENT(2));
    else
        info_print_archive(&in, file);
    cg_archive_close(file);
    return CG_OK;
}
