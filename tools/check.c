/* csagrad check: which contract does a dump follow, and where does it first differ?
 *
 * Every quantity of the dump (selection, attention, target, loss, gradients) beside what is expected, which is the
 * engine's default with the support and reduction that the dump declares; then the contract that explains the numbers,
 * where enough of them carry one.
 * Context and tensor parallel dumps must be gathered first.
 *
 *     csagrad check dump.safetensors --config model.json
 *     csagrad check step12.npz --map q_indexer=my.index_query --ratio 4 --window 128 --json */
#include "tools/csagrad.h"

#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/threads.h"
#include "models/check/verdict.h"
#include "tools/json_number.h"
#include "tools/options.h"
#include "tools/out_of_memory.h"
#include "tools/table.h"

enum { MAX_FILES = 64, MAX_MAPS = 64, MAX_SETTINGS = 32 };
enum {
    KEY_CONFIG = TOOL_OWN_KEYS,
    KEY_MAP,
    KEY_LAYOUT,
    KEY_INDEX,
    KEY_LSE,
    KEY_EXPECT,
    KEY_TOLERANCE,
    KEY_ROWS,
    KEY_THREADS,
    KEY_ROW,
    KEY_NUMBER
};

/* Options that give a number of the dump. */
static const struct {
    const char *option, *name;
} number_options[] = {{"--ratio", "ratio"},
                      {"--window", "window"},
                      {"--topk", "topk"},
                      {"--softmax-scale", "softmax_scale"},
                      {"--loss-coeff", "loss_coeff"}};

typedef struct arguments {
    const char *files[MAX_FILES], *maps[MAX_MAPS], *settings[MAX_SETTINGS][2];
    int n_files, n_maps, n_settings;
    const char *config, *layout, *index, *lse, *expect, *tolerance, *rows, *threads;
    tool_device device;
    bool json;
} arguments;

static error_t parse(int key, char *arg, struct argp_state *state) {
    arguments *a = state->input;
    if (key >= KEY_NUMBER && key < KEY_NUMBER + 5) {
        if (a->n_settings == MAX_SETTINGS)
            argp_failure(state, CG_BAD_INPUT, 0, "more than %d settings", MAX_SETTINGS);
        a->settings[a->n_settings][0] = number_options[key - KEY_NUMBER].name;
        a->settings[a->n_settings++][1] = arg;
        return 0;
    }
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &a->device;
        return 0;
    case ARGP_KEY_ARG:
        if (a->n_files == MAX_FILES) argp_failure(state, CG_BAD_INPUT, 0, "more than %d files", MAX_FILES);
        a->files[a->n_files++] = arg;
        return 0;
    case KEY_MAP:
        if (a->n_maps == MAX_MAPS) argp_failure(state, CG_BAD_INPUT, 0, "--map: more than %d", MAX_MAPS);
        a->maps[a->n_maps++] = arg;
        return 0;
    case KEY_CONFIG:
        a->config = arg;
        return 0;
    case KEY_LAYOUT:
        a->layout = arg;
        return 0;
    case KEY_INDEX:
        a->index = arg;
        return 0;
    case KEY_LSE:
        a->lse = arg;
        return 0;
    case KEY_EXPECT:
        a->expect = arg;
        return 0;
    case KEY_TOLERANCE:
        a->tolerance = arg;
        return 0;
    case KEY_ROWS:
        a->rows = arg;
        return 0;
    case KEY_THREADS:
        a->threads = arg;
        return 0;
    case KEY_ROW:
        return 0;
    case TOOL_JSON:
        a->json = true;
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

#define OPTION(word, number, value, where, text)                                                               \
    { .name = word, .key = number, .arg = value, .group = where, .doc = text }

static const struct argp_option options[] = {
    {.doc = "Input:", .group = GROUP_INPUT},
    OPTION("config", KEY_CONFIG, "FILE", GROUP_INPUT,
           "JSON object with ratio, window, topk, softmax_scale, loss_coeff, sparse, reduction, where the dump "
           "lacks them"),
    OPTION("map", KEY_MAP, "NAME=THEIRS", GROUP_INPUT,
           "tensor THEIRS of the dump is NAME: q_indexer, weights, k_indexer, query, kv, compressed_kv, sink, "
           "dout, topk, "
           "attn_topk, index_scores, output, lse, non_compressed_lse, target, log_predict, predict, kl, loss, "
           "grad.NAME, "
           "cu_seqlens_q, cu_seqlens_q_real, cu_seqlens_compressed, query_valid_rows; may be repeated "
           "(default: by name)"),
    OPTION("layout", KEY_LAYOUT, "NAME", GROUP_INPUT, "sbhd, bshd or thd: packed (default: from shapes)"),
    OPTION("index", KEY_INDEX, "NAME", GROUP_INPUT,
           "lists count from the segment's first compressed row, local, or from the array's, global (default: "
           "from values)"),
    OPTION("lse", KEY_LSE, "FORM", GROUP_INPUT, "e, 2, e-no-sink or 2-no-sink (default: from values)"),
    OPTION("ratio", KEY_NUMBER, "TOKENS", GROUP_INPUT, "tokens per compressed row (default: the dump's)"),
    OPTION("window", KEY_NUMBER + 1, "TOKENS", GROUP_INPUT, "the query's own included (default: the dump's)"),
    OPTION("topk", KEY_NUMBER + 2, "N", GROUP_INPUT, "compressed rows a token selects (default: the dump's)"),
    OPTION("softmax-scale", KEY_NUMBER + 3, "X", GROUP_INPUT,
           "what q.k is multiplied by (default: the dump's)"),
    OPTION("loss-coeff", KEY_NUMBER + 4, "X", GROUP_INPUT,
           "what the loss is multiplied by (default: the dump's)"),
    OPTION("row", KEY_ROW, NULL, GROUP_INPUT, "one query row, given by hand: see csagrad check --row --help"),
    {.doc = "Policy:", .group = GROUP_POLICY},
    OPTION("expect", KEY_EXPECT, "CONTRACT", GROUP_POLICY,
           "AXIS=VALUE,... that the dump should follow; axes that are not named stay as the dump declares them "
           "(default: the engine's, with the dump's support and reduction)"),
    OPTION("tolerance", KEY_TOLERANCE, "X", GROUP_POLICY,
           "allowed error relative to a row's largest magnitude (default: 4 units of expected rounding)"),
    OPTION("threads", KEY_THREADS, "N", GROUP_POLICY, "results do not depend on it (default: all processors)"),
    TOOL_OUTPUT_HEADER,
    OPTION("rows", KEY_ROWS, "N", GROUP_OUTPUT,
           "list the N worst rows of each quantity, at most 64 (default: 0)"),
    {.name = "json", .key = TOOL_JSON, .group = GROUP_OUTPUT, .doc = "print JSON"},
    {0}};
static const struct argp_child children[] = {TOOL_CHILD(tool_device_argp), {0}};
static const struct argp argp = {options,
                                 parse,
                                 "FILE...",
                                 "Say which contract a dump of CSA attention and its indexer loss follows, and "
                                 "where it first differs. Reads "
                                 "safetensors, npy and npz. Ends with match, no match or cannot tell. Exits "
                                 "with 0 when every answer is judged "
                                 "and as the default contract has it, with 1 when something differs, another "
                                 "contract is found or not all could "
                                 "be judged, with 2 for bad input. --device is for gated pooling and "
                                 "--row: attention and its loss are judged row by row, on the CPU.",
                                 children,
                                 NULL,
                                 NULL};

/* ---- output ---- */

static json_t *difference(const cg_difference *d) {
    json_t *o = json_object();
    json_object_set_new(o, "segment", d->segment < 0 ? json_null() : json_integer(d->segment));
    json_object_set_new(o, "position", d->position < 0 ? json_null() : json_integer(d->position));
    json_object_set_new(o, "head", d->head < 0 ? json_null() : json_integer(d->head));
    json_object_set_new(o, "got", json_number(d->got));
    json_object_set_new(o, "expected", json_number(d->expected));
    json_object_set_new(o, "units", json_number(d->units));
    return o;
}

static json_t *contract_json(const cg_contract *c) {
    json_t *o = json_object();
    for (int a = 0; a < CG_AXES; a++)
        json_object_set_new(o, cg_axis_names[a], json_string(cg_axis_values((cg_axis)a)[c->value[a]]));
    return o;
}

/* The last line. */
static const char *word_of(const cg_verdict *v) {
    return v->match ? "match" : v->cannot_tell ? "cannot tell" : "no match";
}

static void print_json(const cg_verdict *v, int n_rows) {
    json_t *root = json_object(), *undetermined = json_array(), *faults = json_array(),
           *quantities = json_array(), *notes = json_array(), *apart = json_array();
    json_object_set_new(root, "match", json_boolean(v->match));
    json_object_set_new(root, "verdict", json_string(word_of(v)));
    json_object_set_new(root, "contract", v->judged_loss ? contract_json(&v->contract) : json_object());
    if (v->gradient_differs) json_object_set_new(root, "gradient_contract", contract_json(&v->gradient));
    json_object_set_new(root, "expected", contract_json(&v->expected));
    json_object_set_new(root, "identified", json_boolean(v->identified));
    for (int a = 0; a < CG_AXES; a++) {
        if (!v->undetermined[a]) continue;
        json_array_append_new(undetermined, json_string(cg_axis_names[a]));
        json_array_append_new(apart, json_string(v->tell_apart[a]));
    }
    json_object_set_new(root, "undetermined", undetermined);
    json_t *remaining = json_object();
    for (int a = 0; a < CG_AXES; a++) {
        json_t *values = json_array();
        for (int k = 0; k < cg_axis_count((cg_axis)a); k++)
            if (v->remaining[a] >> k & 1)
                json_array_append_new(values, json_string(cg_axis_values((cg_axis)a)[k]));
        if (json_array_size(values))
            json_object_set_new(remaining, cg_axis_names[a], values);
        else
            json_decref(values);
    }
    json_object_set_new(root, "remaining", remaining);
    json_object_set_new(root, "numbers", json_integer(v->numbers));
    json_object_set_new(root, "rows", json_integer(v->rows));
    json_object_set_new(root, "contracts_that_fit", v->n_fit ? json_integer(v->n_fit) : json_null());
    json_object_set_new(root, "gradient_factor", json_number(v->factor));
    json_object_set_new(root, "tell_apart", apart);
    for (int i = 0; i < v->n_faults; i++) json_array_append_new(faults, json_string(v->faults[i]));
    json_object_set_new(root, "faults", faults);
    for (int i = 0; i < v->n_quantities; i++) {
        const cg_quantity *q = &v->quantities[i];
        json_t *o = json_pack("{s:s, s:b}", "name", q->name, "ok", q->ok);
        json_object_set_new(o, "worst_rel", json_number(q->worst_rel));
        json_object_set_new(o, "worst_units", json_number(q->worst_units));
        if (q->unsure || q->unjudged) json_object_set_new(o, q->unsure ? "unsure" : "unjudged", json_true());
        json_object_set_new(o, "first", q->has_first ? difference(&q->first) : json_null());
        json_object_set_new(o, "tensor", q->tensor ? json_string(q->tensor) : json_null());
        json_object_set_new(o, "says", json_string(q->says));
        json_t *rows = json_array();
        for (int k = 0; k < q->n_worst && k < n_rows; k++)
            json_array_append_new(rows, difference(&q->worst[k]));
        if (n_rows)
            json_object_set_new(o, "rows", rows);
        else
            json_decref(rows);
        json_array_append_new(quantities, o);
    }
    json_object_set_new(root, "quantities", quantities);
    json_object_set_new(root, "sentence", json_string(v->sentence));
    for (int i = 0; i < v->n_notes; i++) json_array_append_new(notes, json_string(v->notes[i]));
    json_object_set_new(root, "notes", notes);
    json_print(root, JSON_INDENT(2) | JSON_REAL_PRECISION(17));
}

static void place_cells(table *t, const cg_difference *d) {
    if (d->segment < 0 && d->position < 0)
        table_cell(t, "whole");
    else if (d->head < 0)
        table_cell(t, "segment %lld, position %lld", (long long)d->segment, (long long)d->position);
    else
        table_cell(t, "segment %lld, position %lld, head %lld", (long long)d->segment, (long long)d->position,
                   (long long)d->head);
    table_cell(t, "%.9g", d->got);
    table_cell(t, "%.9g", d->expected);
}

static void print_text(const cg_verdict *v, const cg_dump *d, int n_rows) {
    printf("csagrad check: layout=%s rows=%lld segments=%lld compressed=%lld heads=%lldx%lld "
           "index_heads=%lldx%lld ratio=%lld "
           "window=%lld\n",
           d->layout, (long long)d->T, (long long)d->B, (long long)d->C, (long long)d->H, (long long)d->D,
           (long long)d->Hi, (long long)d->Di, (long long)d->ratio, (long long)d->window);
    table *t = table_new("lrrllrr");
    const char *const titles[] = {"quantity",    "worst relative",         "units of rounding",
                                  "as expected", "first row that differs", "got",
                                  "expected"};
    for (int i = 0; i < 7; i++) table_cell(t, "%s", titles[i]);
    for (int i = 0; i < v->n_quantities; i++) {
        const cg_quantity *q = &v->quantities[i];
        table_cell(t, "%s", q->name);
        if (q->unjudged) {
            for (int k = 0; k < 2; k++) table_cell(t, "%s", "");
        } else {
            table_cell(t, "%.1e", q->worst_rel);
            table_cell(t, "%.3g", q->worst_units);
        }
        table_cell(t, "%s", q->ok ? "yes" : q->unjudged ? "not judged" : q->unsure ? "cannot tell" : "NO");
        if (q->has_first) {
            place_cells(t, &q->first);
        } else {
            for (int k = 0; k < 3; k++) table_cell(t, "%s", "");
        }
    }
    table_print(t);
    for (int i = 0; i < v->n_quantities && n_rows; i++) {
        const cg_quantity *q = &v->quantities[i];
        if (!q->n_worst) continue;
        printf("\nworst rows of %s\n", q->name);
        t = table_new("lrrr");
        table_cell(t, "row"), table_cell(t, "got"), table_cell(t, "expected"),
            table_cell(t, "units of rounding");
        for (int k = 0; k < q->n_worst && k < n_rows; k++) {
            place_cells(t, &q->worst[k]);
            table_cell(t, "%.3g", q->worst[k].units);
        }
        table_print(t);
    }
    putchar('\n');
    for (int i = 0; i < v->n_quantities; i++)
        if (v->quantities[i].says[0]) printf("%s: %s.\n", v->quantities[i].name, v->quantities[i].says);
    if (v->sentence[0]) printf("%s.\n", v->sentence);
    for (int i = 0; i < v->n_faults; i++)
        printf("%s%s%s", i ? ", " : "known faults: ", v->faults[i], i + 1 == v->n_faults ? ".\n" : "");
    for (int a = 0; a < CG_AXES; a++)
        if (v->undetermined[a]) printf("cannot tell %s.\n", v->tell_apart[a]);
    for (int i = 0; i < v->n_notes; i++) printf("note: %s.\n", v->notes[i]);
    puts(word_of(v));
}

/* ---- the command ---- */

static bool read_tolerance(const char *text, double *x, cg_error *error) {
    char *end;
    *x = 0;
    if (!text) return true;
    *x = strtod(text, &end);
    if (end == text || *end || !(*x > 0) || *x > 1)
        return cg_fail(error, CG_BAD_INPUT, "--tolerance must be a number above 0, at most 1, got \"%.60s\"",
                       text);
    return true;
}

int csagrad_check(int argc, char **argv) {
    for (int i = 1; i < argc; i++)
        if (!strcmp(argv[i], "--row")) return csagrad_check_row(argc, argv);
    arguments *a = calloc(1, sizeof *a);
    cg_error error = {0};
    if (!a) tool_out_of_memory();
    tool_parse(&argp, argc, argv, a);

    cg_verdict_options o = {0};
    int64_t n_rows = 0, threads = 0;
    cg_dump *dump = NULL;
    cg_verdict *v = NULL;
    bool ok = a->n_files > 0 || cg_fail(&error, CG_BAD_INPUT, "a file is needed, see --help");
    ok = ok && read_tolerance(a->tolerance, &o.tolerance, &error);
    ok = ok && (!a->rows || tool_integer("--rows", a->rows, 0, CG_WORST_ROWS, &n_rows, &error));
    ok = ok && (!a->threads || (tool_integer("--threads", a->threads, 1, 1 << 20, &threads, &error) &&
                                cg_threads_set((int)threads, &error)));
    int code = CG_OK;
    ok = ok && tool_device_open(&a->device, &error);
    if (ok && a->n_files == 1 &&
        csagrad_check_compressor(argv[0], a->files[0], a->device.backend, o.tolerance, a->json, &code)) {
        tool_device_close(&a->device);
        free(a);
        return code;
    }
    if (ok && a->device.backend)
        ok = cg_fail(&error, CG_BAD_INPUT,
                     "--device: attention and its loss are judged on the CPU, row by row; to judge "
                     "a device, write a dump with csagrad dump --device");
    if (ok) {
        const cg_dump_options from = {.paths = a->files,
                                      .n_paths = a->n_files,
                                      .config = a->config,
                                      .settings = (const char *const(*)[2])a->settings,
                                      .n_settings = a->n_settings,
                                      .maps = a->maps,
                                      .n_maps = a->n_maps,
                                      .layout = a->layout,
                                      .index = a->index,
                                      .lse = a->lse};
        o.n_worst = (int)n_rows;
        dump = cg_dump_open(&from, &error);
        cg_contract expected =
            dump ? dump->declared : cg_contract_default(); /* for axes that --expect does not name */
        o.expected = &expected;
        if (dump && a->expect && !cg_contract_parse_over(a->expect, &expected, &error))
            cg_error_at(&error, "--expect");
        else
            v = dump ? cg_verdict_make(dump, &o, &error) : NULL;
    }
    if (!v) {
        code = tool_failed(argv[0], &error);
    } else {
        if (a->json)
            print_json(v, (int)n_rows);
        else
            print_text(v, dump, (int)n_rows);
        code = v->match ? CG_OK : CG_FAILED;
    }
    free(v);
    cg_dump_close(dump);
    tool_device_close(&a->device);
    free(a);
    return code;
}
