/* csagrad info: what is in a file of tensors, safetensors, npy or npz? And without a file: which kernels run here?
 *
 *     csagrad info
 *     csagrad info dump.npz
 *     csagrad info checkpoint.safetensors --json
 *     csagrad info lengths.npy --values 8 */
#include "tools/csagrad.h"

#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "core/archive.h"
#include "core/isa.h"
#include "core/shown.h"
#include "tools/json_number.h"
#include "tools/options.h"
#include "tools/table.h"

enum { VALUES = TOOL_OWN_KEYS };

typedef struct info {
    const char *path;
    bool json;
    const char *values_text;
    int64_t values;
} info;

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
    "[FILE]",
    "Without a file: say which of the kernels that this processor can run do run (the environment variable "
    "CSAGRAD_ISA chooses among avx512, avx2 and portable; by default the first that can). Check a file of "
    "tensors (safetensors, npy or npz, told by its content) as a whole and list what it holds: "
    "names, "
    "dtypes, shapes, sizes in bytes and metadata. Exit code 2 and one sentence when it is damaged.",
    NULL,
    NULL,
    NULL};

static int64_t shown_values(const info *in, const cg_tensor *t) {
    int64_t n = cg_shape_count(&t->shape);
    return n < in->values ? n : in->values;
}

static bool is_real(cg_dtype dtype) {
    return dtype == CG_F32 || dtype == CG_F64 || dtype == CG_BF16 || dtype == CG_F16;
}

static json_t *values_json(const info *in, const cg_tensor *t) {
    json_t *list = json_array();
    for (int64_t i = 0; i < shown_values(in, t); i++) {
        double x = cg_dtype_get(t->dtype, t->data, i);
        bool wide = t->dtype == CG_I64; /* not all of them fit a double */
        json_array_append_new(list, is_real(t->dtype)
                                        ? json_number(x)
                                        : json_integer(wide ? ((const int64_t *)t->data)[i] : (json_int_t)x));
    }
    return list;
}

static int print_json(const info *in, const cg_archive *file) {
    json_t *tensors = json_array(), *metadata = json_object();
    for (int i = 0; i < cg_archive_count(file); i++) {
        const cg_named_tensor *t = cg_archive_at(file, i);
        json_t *shape = json_array();
        for (int d = 0; d < t->tensor.shape.n_dims; d++)
            json_array_append_new(shape, json_integer(t->tensor.shape.dims[d]));
        json_t *entry = json_pack("{s:o, s:s, s:o, s:I}", "name", json_words(t->name), "dtype",
                                  cg_dtype_name(t->tensor.dtype), "shape", shape, "bytes",
                                  (json_int_t)cg_tensor_bytes(t->tensor.dtype, &t->tensor.shape));
        if (in->values > 0) json_object_set_new(entry, "values", values_json(in, &t->tensor));
        json_array_append_new(tensors, entry);
    }
    void *at = NULL;
    const char *key, *value;
    while (cg_archive_metadata_next(file, &at, &key, &value))
        json_object_set_new(metadata, key, json_string(value));
    json_t *root = json_pack("{s:s, s:o, s:o}", "format", cg_archive_format(file), "tensors", tensors,
                             "metadata", metadata);
    json_print(root, JSON_INDENT(2));
    return 0;
}

static void print_values(const info *in, const cg_named_tensor *t) {
    int64_t n = shown_values(in, &t->tensor);
    printf("%s:", cg_shown(t->name).text);
    for (int64_t i = 0; i < n; i++) {
        if (t->tensor.dtype == CG_I64)
            printf(" %" PRId64, ((const int64_t *)t->tensor.data)[i]);
        else
            printf(" %.9g", cg_dtype_get(t->tensor.dtype, t->tensor.data, i));
    }
    puts(n < cg_shape_count(&t->tensor.shape) ? " ..." : "");
}

static int print_table(const info *in, const cg_archive *file) {
    static const char *const titles[] = {"name", "dtype", "shape", "bytes"};
    int n = cg_archive_count(file);
    printf("%s, %d tensor%s\n\n", cg_archive_format(file), n, n == 1 ? "" : "s");
    table *t = table_new("lllr");
    for (int c = 0; c < 4; c++) table_cell(t, "%s", titles[c]);
    for (int i = 0; i < n; i++) {
        const cg_named_tensor *tensor = cg_archive_at(file, i);
        char shape[160];
        table_cell(t, "%s", cg_shown(tensor->name).text);
        table_cell(t, "%s", cg_dtype_name(tensor->tensor.dtype));
        table_cell(t, "%s", cg_shape_text(&tensor->tensor.shape, shape, sizeof shape));
        table_cell(t, "%" PRId64, cg_tensor_bytes(tensor->tensor.dtype, &tensor->tensor.shape));
    }
    table_print(t);
    if (in->values > 0) putchar('\n');
    for (int i = 0; i < n && in->values > 0; i++) print_values(in, cg_archive_at(file, i));
    void *at = NULL;
    const char *key, *value;
    for (bool first = true; cg_archive_metadata_next(file, &at, &key, &value); first = false)
        printf("%s%s = %s\n", first ? "\nmetadata\n" : "", cg_shown(key).text, cg_shown(value).text);
    return 0;
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
    cg_archive *file = cg_archive_open(in.path, &error);
    if (!file) return tool_failed(argv[0], &error);
    int code = in.json ? print_json(&in, file) : print_table(&in, file);
    cg_archive_close(file);
    return code;
}
