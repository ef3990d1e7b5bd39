/* csagrad dump: write a CSA layer's inputs and everything that a contract computes from them, so that other code can
 * be tested against this one.
 *
 *     csagrad dump --out layer.safetensors --layout sbhd --seq 64 --batch 2
 *     csagrad dump --out mine.safetensors --contract teacher=compressed,kl=eps --seed 7
 *     csagrad dump --graded dumps/          a ready set, from easy to hard */
#include "tools/csagrad.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/file.h"
#include "core/base/rng.h"
#include "core/base/shown.h"
#include "models/check/dump_write.h"
#include "tools/json_number.h"
#include "tools/options.h"

enum { MAX_SEGMENTS = 4096 };

typedef struct arguments {
    tool_model model;
    tool_device device;
    const char *out, *graded, *layer, *layout, *segments, *contract, *gradients, *index, *lse, *dtype,
        *checkpoint;
    bool padded, anonymous, json;
} arguments;

enum {
    KEY_OUT = TOOL_OWN_KEYS,
    KEY_GRADED,
    KEY_LAYER,
    KEY_LAYOUT,
    KEY_SEGMENTS,
    KEY_CONTRACT,
    KEY_GRADIENTS,
    KEY_INDEX,
    KEY_LSE,
    KEY_DTYPE,
    KEY_CHECKPOINT,
    KEY_PADDED,
    KEY_ANONYMOUS
};

static error_t parse(int key, char *arg, struct argp_state *state) {
    arguments *a = state->input;
    const char **const texts[] = {&a->out,       &a->graded, &a->layer, &a->layout, &a->segments,  &a->contract,
                                  &a->gradients, &a->index,  &a->lse,   &a->dtype,  &a->checkpoint};
    if (key == ARGP_KEY_INIT) {
        state->child_inputs[0] = &a->model;
        state->child_inputs[1] = &a->device;
    } else if (key >= KEY_OUT && key <= KEY_CHECKPOINT) {
        *texts[key - KEY_OUT] = arg;
    } else if (key == KEY_PADDED) {
        a->padded = true;
    } else if (key == KEY_ANONYMOUS) {
        a->anonymous = true;
    } else if (key == TOOL_JSON) {
        a->json = true;
    } else {
        return ARGP_ERR_UNKNOWN;
    }
    return 0;
}

static const struct argp_option options[] = {
    {.name = "checkpoint",
     .key = KEY_CHECKPOINT,
     .arg = "FILE",
     .group = GROUP_INPUT,
     .doc = "weights of a trained model; give its --config too (default: random ones by the seed, none of them "
            "zero "
            "or one)"},
    {.name = "layer",
     .key = KEY_LAYER,
     .arg = "N",
     .group = GROUP_INPUT,
     .doc = "layer to dump, from 0; it must have ratio 4 (default: the first one that has)"},
    {.name = "segments",
     .key = KEY_SEGMENTS,
     .arg = "N,N,...",
     .group = GROUP_INPUT,
     .doc = "tokens of each segment, 0 allowed (default: --batch segments, of --seq tokens each, in layout thd "
            "of half "
            "as many up to that)"},
    {.name = "padded",
     .key = KEY_PADDED,
     .group = GROUP_INPUT,
     .doc = "the last 1 to 5 rows of each segment are padding (layout thd)"},
    {.name = "contract",
     .key = KEY_CONTRACT,
     .arg = "TEXT",
     .group = GROUP_MODEL,
     .doc = "which loss to compute: AXIS=VALUE,... over the default (default: --teacher and --support, the "
            "rest as the "
            "ops compute it)"},
    {.name = "gradients",
     .key = KEY_GRADIENTS,
     .arg = "TEXT",
     .group = GROUP_MODEL,
     .doc = "contract of the gradients, where it is another one"},
    TOOL_OUTPUT_HEADER,
    {.name = "out", .key = KEY_OUT, .arg = "FILE", .group = GROUP_OUTPUT, .doc = "safetensors file to write"},
    {.name = "graded",
     .key = KEY_GRADED,
     .arg = "DIR",
     .group = GROUP_OUTPUT,
     .doc = "write a ready set of dumps from easy to hard, and a README.md; takes --seed and --contract"},
    {.name = "layout",
     .key = KEY_LAYOUT,
     .arg = "NAME",
     .group = GROUP_OUTPUT,
     .doc = "sbhd, bshd, or thd: packed (default: thd)"},
    {.name = "dtype",
     .key = KEY_DTYPE,
     .arg = "NAME",
     .group = GROUP_OUTPUT,
     .doc =
         "f32, f64 or bf16; all is computed in f64 from inputs rounded to it (default: the configuration's)"},
    {.name = "index",
     .key = KEY_INDEX,
     .arg = "NAME",
     .group = GROUP_OUTPUT,
     .doc =
         "what lists count from: local, the segment's first compressed row, or global, the array's (default: "
         "local)"},
    {.name = "lse", .key = KEY_LSE, .arg = "BASE", .group = GROUP_OUTPUT, .doc = "e or 2 (default: e)"},
    {.name = "anonymous",
     .key = KEY_ANONYMOUS,
     .group = GROUP_OUTPUT,
     .doc = "do not write into the file which contract, list and base it has"},
    TOOL_JSON_OPTION,
    {0}};
static const struct argp_child children[] = {TOOL_CHILD(tool_model_argp), TOOL_CHILD(tool_device_argp), {0}};
static const struct argp argp = {
    options,
    parse,
    NULL,
    "Write the inputs of a CSA layer and its answers (selection, attention, indexer loss, "
    "all gradients) as safetensors, to test other code against.",
    children,
    NULL,
    NULL};

/* ---- options ---- */

static bool word(const char *option, const char *text, const char *const *names, int *value, cg_error *error) {
    int n = 0;
    for (; names[n]; n++)
        if (text && !strcmp(text, names[n])) *value = n;
    if (!text || !strcmp(text, names[*value])) return true;
    tool_unknown("name", text, names, n, error);
    cg_error_at(error, "%s", option);
    return false;
}

static bool read_form(const arguments *a, cg_dump_form *form, cg_error *error) {
    static const char *const indices[] = {"local", "global", NULL}, *const bases[] = {"e", "2", NULL},
                             *const dtypes[] = {"f32", "f64", "bf16", NULL};
    static const cg_dtype dtype_of[] = {CG_F32, CG_F64, CG_BF16};
    int layout = CG_LAYOUT_THD, index = 0, base = 0, dtype = 0;
    while (dtypes[dtype + 1] && dtype_of[dtype] != a->model.config.dtype) dtype++;
    if (!word("--layout", a->layout, cg_dump_layout_names, &layout, error) ||
        !word("--index", a->index, indices, &index, error) || !word("--lse", a->lse, bases, &base, error) ||
        !word("--dtype", a->dtype, dtypes, &dtype, error))
        return false;
    *form = (cg_dump_form){.layout = (cg_dump_layout)layout,
                           .dtype = dtype_of[dtype],
                           .global_lists = index == 1,
                           .lse_base_2 = base == 1,
                           .anonymous = a->anonymous,
                           .seed = (uint64_t)a->model.config.seed};
    return true;
}

static bool read_contract(const char *option, const char *text, cg_contract *contract, cg_error *error) {
    if (cg_contract_parse(text, contract, error)) return true;
    cg_error_at(error, "%s", option);
    return false;
}

/* --teacher and --support are axes too; what --contract says stands above them. */
static bool read_contracts(const arguments *a, cg_dump_contracts *contracts, cg_error *error) {
    const cg_config *config = &a->model.config;
    contracts->value = cg_contract_default();
    if (a->contract && !read_contract("--contract", a->contract, &contracts->value, error)) return false;
    int *value = contracts->value.value;
    if (!value[CG_AXIS_TEACHER]) value[CG_AXIS_TEACHER] = (int)config->teacher - CG_TEACHER_FULL;
    if (!value[CG_AXIS_SUPPORT]) value[CG_AXIS_SUPPORT] = (int)config->support;
    contracts->gradient = contracts->value;
    return !a->gradients || read_contract("--gradients", a->gradients, &contracts->gradient, error);
}

typedef struct lengths {
    int n;
    int64_t physical[MAX_SEGMENTS], real[MAX_SEGMENTS];
} lengths;

static bool read_segments(const char *text, lengths *l, cg_error *error) {
    for (const char *at = text; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
        char number[32];
        snprintf(number, sizeof number, "%.*s", (int)strcspn(at, ","), at);
        if (l->n == MAX_SEGMENTS)
            return cg_fail(error, CG_BAD_INPUT, "--segments: more than %d segments", MAX_SEGMENTS);
        if (!tool_integer("--segments", number, 0, 1 << 24, &l->physical[l->n++], error)) return false;
    }
    return true;
}

static bool read_lengths(const arguments *a, const cg_dump_form *form, lengths *l, cg_error *error) {
    const cg_config *config = &a->model.config;
    uint64_t seed = (uint64_t)config->seed, stream = cg_random_stream("dump/lengths");
    if (a->segments && !read_segments(a->segments, l, error)) return false;
    if (!a->segments && config->batch_size > MAX_SEGMENTS)
        return cg_fail(error, CG_BAD_INPUT, "--batch: a dump holds at most %d segments", MAX_SEGMENTS);
    for (; !a->segments && l->n < config->batch_size; l->n++) {
        int64_t spare = form->layout == CG_LAYOUT_THD && config->batch_size > 1 ? config->seq_len / 2 : 0;
        l->physical[l->n] = config->seq_len - cg_random_below(seed, stream, (uint64_t)l->n, spare + 1);
    }
    for (int b = 0; b < l->n; b++) {
        int64_t padding = a->padded ? 1 + cg_random_below(seed, stream + 1, (uint64_t)b, 5) : 0;
        l->real[b] = l->physical[b] > padding ? l->physical[b] - padding : 0;
    }
    if (a->padded && form->layout != CG_LAYOUT_THD)
        return cg_fail(error, CG_BAD_INPUT,
                       "--padded: layout %s has no lengths, so it holds no padding: use thd",
                       cg_dump_layout_names[form->layout]);
    return true;
}

static bool read_layer(const arguments *a, int64_t *layer, cg_error *error) {
    const cg_config *config = &a->model.config;
    *layer = 0;
    while (*layer + 1 < config->num_hidden_layers && config->compress_ratios[*layer] != CG_RATIO_CSA) ++*layer;
    return !a->layer || tool_integer("--layer", a->layer, 0, config->num_hidden_layers - 1, layer, error);
}

/* ---- the dump ---- */

static void report(const arguments *a, const char *program, const cg_dump_case *c, const cg_dump_results *r,
                   const cg_dump_contracts *contracts) {
    char text[CG_CONTRACT_TEXT];
    cg_contract_text(&contracts->value, text, sizeof text);
    if (!a->json) {
        printf("%s: %s: %lld rows in %lld segment%s, %lld compressed rows, %lld heads, %lld selected at most, "
               "loss "
               "%.9g nats under %s\n",
               program, cg_shown_path(a->out).text, (long long)c->n_rows, (long long)c->n_segments,
               c->n_segments == 1 ? "" : "s", (long long)c->n_compressed, (long long)c->n_heads,
               (long long)r->width, r->loss, text);
        return;
    }
    json_t *line = json_pack("{s:o, s:I, s:I, s:I, s:I, s:I, s:o, s:s}", "file", json_words(a->out), "rows",
                             (json_int_t)c->n_rows, "segments", (json_int_t)c->n_segments, "compressed_rows",
                             (json_int_t)c->n_compressed, "heads", (json_int_t)c->n_heads, "selected",
                             (json_int_t)r->width, "loss", json_number(r->loss), "contract", text);
    json_print(line, JSON_INDENT(2));
}

static bool write_one(const arguments *a, const char *program, const cg_dump_contracts *contracts,
                      cg_error *error) {
    cg_dump_form form;
    cg_dump_case c = {0};
    cg_dump_results results = {0};
    int64_t layer;
    lengths *l = calloc(1, sizeof *l);
    bool ok = l != NULL || cg_fail(error, CG_FAILED, "out of memory for the segments");
    if (ok && !(ok = cg_file_can_write(a->out, error))) cg_error_at(error, "--out");
    ok = ok && read_form(a, &form, error) && read_lengths(a, &form, l, error) && read_layer(a, &layer, error);
    if (ok) {
        cg_config config = a->model.config;
        config.dtype = form.dtype == CG_F64 ? CG_F64 : CG_F32;
        cg_dump_lengths lengths_of = {l->n, l->physical, l->real, 0};
        ok = cg_dump_case_of_model(&c, &config, layer, &lengths_of, a->checkpoint, error) &&
             cg_dump_form_fits(&c, &form, error);
    }
    if (ok) {
        cg_dump_case_round(&c, form.dtype);
        ok = cg_dump_compute(&c, contracts, a->device.backend, &results, error) &&
             cg_dump_write(a->out, &c, contracts, &results, &form, error);
    }
    if (ok) report(a, program, &c, &results, contracts);
    cg_dump_results_free(&results);
    cg_dump_case_free(&c);
    free(l);
    return ok;
}

int csagrad_dump(int argc, char **argv) {
    arguments a = {0};
    cg_error error = {0};
    cg_dump_contracts contracts = {0};
    tool_parse(&argp, argc, argv, &a);
    bool ok = tool_model_apply(&a.model, &error) && read_contracts(&a, &contracts, &error) &&
              tool_device_open(&a.device, &error);
    if (ok && !a.out == !a.graded)
        ok = cg_fail(&error, CG_BAD_INPUT, "give --out FILE for one dump, or --graded DIR for a set");
    if (ok && a.graded) {
        ok = cg_dump_set_write(a.graded, &contracts, a.device.backend, (uint64_t)a.model.config.seed, &error);
        if (ok && !a.json)
            printf("%s: %s/README.md says what each file is for\n", argv[0], cg_shown_path(a.graded).text);
    } else if (ok) {
        ok = write_one(&a, argv[0], &contracts, &error);
    }
    tool_device_close(&a.device);
    return ok ? 0 : tool_failed(argv[0], &error);
}
