#include "models/check/compressor_check.h"

#include "core/base/shown.h"
#include "graph/cases.h"
#include "models/check/dump.h"
#include "ops/ops.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char gate_name[] = "in.gate";
static const char real_kinds[] = "f32 or f64", whole_kinds[] = "whole numbers of 8 to 64 bits";

/* The prefix of group number `which`, with its dot; "" is one too. NULL behind the last. */
static const char *group_prefix(const cg_archive *archive, int which, char *prefix, size_t prefix_bytes) {
    for (int i = 0; i < cg_archive_count(archive); i++) {
        const char *name = cg_archive_at(archive, i)->name;
        size_t n = strlen(name), tail = sizeof gate_name - 1;
        if (n < tail || strcmp(name + n - tail, gate_name) || (n > tail && name[n - tail - 1] != '.')) continue;
        if (which--) continue;
        snprintf(prefix, prefix_bytes, "%.*s", (int)(n - tail), name);
        return prefix;
    }
    return NULL;
}

int cg_compressor_groups(const cg_archive *archive) {
    char prefix[64];
    int n = 0;
    while (group_prefix(archive, n, prefix, sizeof prefix)) n++;
    return n;
}

/* One group. Row t of packed rows is row (t % S) of sequence t / S. */
typedef struct group {
    const cg_backend *backend;
    const cg_archive *archive;
    char prefix[64];
    int64_t T, S, B, columns, ratio, d, C;
    int64_t keys; /* compressed rows of a sequence, when it is not packed */
    bool packed;
    int32_t *cu_seqlens;
    int64_t n_segments;
} group;

static const cg_tensor *part(const group *g, const char *name) {
    char full[96];
    snprintf(full, sizeof full, "%s%s", g->prefix, name);
    return cg_archive_find(g->archive, full);
}

/* False with a sentence when the file has it in elements that are not read. */
static bool is_read(const group *g, const char *name, const char *expected, cg_error *error) {
    char full[96];
    snprintf(full, sizeof full, "%s%s", g->prefix, name);
    const cg_entry *e = cg_archive_unread(g->archive, full);
    return !e || cg_fail(error, CG_BAD_INPUT, "%s is %s, expected %s", full, cg_shown(e->dtype).text, expected);
}

/* Element i of a tensor whose first two dimensions are position and sequence, packed: [S, B, w] -> row b*S + s. */
static double packed_get(const cg_tensor *t, int64_t S, int64_t B, int64_t width, int64_t i) {
    int64_t row = i / width, s = row % S, b = row / S;
    return cg_real_get(t->dtype, t->data, (s * B + b) * width + i % width);
}

static bool read_lengths(group *g, cg_error *error) {
    if (!is_read(g, "in.cu_seqlens", whole_kinds, error)) return false;
    const cg_tensor *cu = part(g, "in.cu_seqlens");
    char key[96];
    snprintf(key, sizeof key, "%.*s_segment_lengths", (int)(strlen(g->prefix) - (*g->prefix != 0)), g->prefix);
    const char *text = cg_archive_metadata(g->archive, key);
    json_t *list = text ? json_loads(text, 0, NULL) : NULL;
    g->packed = cu != NULL || list != NULL;
    g->n_segments = cu ? cg_shape_count(&cu->shape) - 1 : list ? (int64_t)json_array_size(list) : g->B;
    bool ok = !cu || cg_dtype_is_whole(cu->dtype) ||
              cg_fail(error, CG_BAD_INPUT, "%sin.cu_seqlens is %s, expected %s", g->prefix,
                      cg_dtype_name(cu->dtype), whole_kinds);
    if (ok && (g->n_segments < 1 || (g->packed && g->B != 1)))
        ok = cg_fail(error, CG_BAD_INPUT,
                     "%sin.kv holds %lld sequences beside segment lengths, expected one packed row of tokens",
                     g->prefix, (long long)g->B);
    g->cu_seqlens = ok ? calloc((size_t)g->n_segments + 1, sizeof *g->cu_seqlens) : NULL;
    if (ok && !g->cu_seqlens) ok = cg_fail(error, CG_FAILED, "out of memory");
    int64_t last = ok && cu ? cg_dtype_whole(cu->dtype, cu->data, 0) : 0;
    if (ok && last != 0)
        ok = cg_fail(error, CG_BAD_INPUT, "%sin.cu_seqlens[0] is %s, expected 0", g->prefix,
                     cg_dtype_whole_text(cu->dtype, cu->data, 0).text);
    for (int64_t b = 0; ok && b < g->n_segments; b++) {
        const json_t *entry = list ? json_array_get(list, (size_t)b) : NULL;
        int64_t length = cu      ? cg_dtype_whole(cu->dtype, cu->data, b + 1)
                         : entry ? (json_is_integer(entry) ? json_integer_value(entry) : -1)
                                 : g->S;
        if (cu && length >= 0) length -= last;
        if (length < 0 || length > g->T - last)
            ok = cg_fail(error, CG_BAD_INPUT,
                         "%s%s gives segment %lld another length than 0 to %lld, the rows that are left",
                         g->prefix, cu ? "in.cu_seqlens" : "the list of segment lengths", (long long)b,
                         (long long)(g->T - last));
        last += ok ? length : 0;
        g->cu_seqlens[b + 1] = (int32_t)last;
    }
    json_decref(list);
    return ok;
}

static bool same_shape(const group *g, const char *name, const char *as, bool needed, cg_error *error) {
    const cg_tensor *t = part(g, name), *model = part(g, as);
    if (!is_read(g, name, real_kinds, error)) return false;
    if (!t) return !needed || cg_fail(error, CG_BAD_INPUT, "%s%s is missing", g->prefix, name);
    char a[128], b[128];
    if (t->dtype != CG_F32 && t->dtype != CG_F64)
        return cg_fail(error, CG_BAD_INPUT, "%s%s is %s, expected f32 or f64", g->prefix, name,
                       cg_dtype_name(t->dtype));
    if (cg_shape_equal(&t->shape, &model->shape)) return true;
    return cg_fail(error, CG_BAD_INPUT, "%s%s has shape %s, expected %s as %s%s has", g->prefix, name,
                   cg_shape_text(&t->shape, a, sizeof a), cg_shape_text(&model->shape, b, sizeof b), g->prefix,
                   as);
}

static bool read_shapes(group *g, cg_error *error) {
    const cg_tensor *gate = part(g, gate_name), *ape = part(g, "in.ape"), *out = part(g, "out.compressed");
    if (!is_read(g, "in.ape", real_kinds, error) || !is_read(g, "out.compressed", real_kinds, error))
        return false;
    if (!ape || !out)
        return cg_fail(error, CG_BAD_INPUT, "%s%s is missing", g->prefix, ape ? "out.compressed" : "in.ape");
    if (!same_shape(g, gate_name, gate_name, true, error) || !same_shape(g, "in.kv", gate_name, true, error) ||
        !same_shape(g, "in.dout", "out.compressed", false, error) ||
        !same_shape(g, "grad.kv", gate_name, false, error) ||
        !same_shape(g, "grad.gate", gate_name, false, error) ||
        !same_shape(g, "grad.ape", "in.ape", false, error) || !same_shape(g, "in.ape", "in.ape", true, error) ||
        !same_shape(g, "out.compressed", "out.compressed", true, error))
        return false;
    bool wide = gate->shape.n_dims == 3;
    if ((!wide && gate->shape.n_dims != 2) || ape->shape.n_dims != 2 || out->shape.n_dims != gate->shape.n_dims)
        return cg_fail(
            error, CG_BAD_INPUT,
            "%sin.gate, in.ape and out.compressed have %d, %d and %d dimensions, expected 3, 2, 3 or 2, 2, 2",
            g->prefix, gate->shape.n_dims, ape->shape.n_dims, out->shape.n_dims);
    g->S = gate->shape.dims[0];
    g->B = wide ? gate->shape.dims[1] : 1;
    g->columns = gate->shape.dims[gate->shape.n_dims - 1];
    g->ratio = ape->shape.dims[0];
    g->keys = out->shape.dims[0];
    g->d = out->shape.dims[out->shape.n_dims - 1];
    g->T = cg_shape_count(&CG_SHAPE(g->S, g->B));
    if (g->T > INT32_MAX || (wide && out->shape.dims[1] != g->B) || ape->shape.dims[1] != g->columns ||
        (g->columns != g->d && g->columns != 2 * g->d) || g->ratio < 1)
        return cg_fail(error, CG_BAD_INPUT,
                       "%sin.gate has %lld columns, in.ape %lld by %lld, out.compressed %lld: expected the "
                       "same, and once or twice those of the output",
                       g->prefix, (long long)g->columns, (long long)g->ratio, (long long)ape->shape.dims[1],
                       (long long)g->d);
    if (!read_lengths(g, error)) return false;
    for (int64_t b = 0; b < g->n_segments; b++) g->C += (g->cu_seqlens[b + 1] - g->cu_seqlens[b]) / g->ratio;
    if (g->C == g->keys * (g->packed ? 1 : g->B)) return true;
    return cg_fail(error, CG_BAD_INPUT,
                   "%sout.compressed has %lld rows, expected %lld (floor(length / %lld) of each segment)",
                   g->prefix, (long long)(g->keys * g->B), (long long)g->C, (long long)g->ratio);
}

/* Compare a tensor of the dump with computed rows. */
static void compare_with(const group *g, const char *name, const double *want, int64_t rows, int64_t width,
                         double tolerance, double terms, cg_compressor_quantity *q) {
    const cg_tensor *t = part(g, name);
    bool by_token = rows == g->T && strcmp(name, "grad.ape") != 0, by_key = !strcmp(name, "out.compressed");
    int64_t S = by_key     ? (g->packed ? g->C : g->keys)
                : by_token ? g->S
                           : rows,
            B = by_key     ? (g->packed ? 1 : g->B)
                : by_token ? g->B
                           : 1;
    double largest = 0, allowed = tolerance > 0 ? tolerance : 4 * cg_dtype_rounding(t->dtype) * sqrt(terms + 1);
    *q = (cg_compressor_quantity){.ok = true, .segment = -1, .position = -1};
    snprintf(q->name, sizeof q->name, "%s%s", g->prefix, name);
    for (int64_t i = 0; i < rows * width; i++) largest = fmax(largest, fabs(want[i]));
    if (!(largest > 0)) largest = 1;
    for (int64_t i = 0; i < rows * width; i++) {
        double got = packed_get(t, S, B, width, i), error = fabs(got - want[i]) / largest;
        if (isnan(error)) error = INFINITY;
        q->worst_rel = fmax(q->worst_rel, error);
        if (error <= allowed || !q->ok) continue;
        int64_t row = i / width, s = 0;
        q->ok = false;
        q->got = got;
        q->expected = want[i];
        if (by_token)
            while (s + 1 < g->n_segments && row >= g->cu_seqlens[s + 1]) s++;
        q->segment = by_token ? s : by_key && !g->packed ? row / S : 0;
        q->position = by_token ? row - g->cu_seqlens[s] : by_key && !g->packed ? row % S : row;
    }
}

static bool compare(const group *g, cg_exec *exec, const char *name, const cg_value *value, double tolerance,
                    double terms, cg_compressor_quantity *q, cg_error *error) {
    int64_t rows = value->shape.dims[0], width = value->shape.dims[1];
    double *want = malloc((size_t)(rows * width + 1) * sizeof *want);
    if (!want) return cg_fail(error, CG_FAILED, "out of memory");
    cg_exec_read_real(exec, value, 0, rows * width, want);
    compare_with(g, name, want, rows, width, tolerance, terms, q);
    free(want);
    return true;
}

static cg_value *leaf(cg_graph *graph, const char *name, cg_leaf_kind kind, int64_t rows, int64_t columns) {
    return cg_leaf(graph, kind, name, CG_F64, CG_SHAPE(rows, columns));
}

static void fill(cg_exec *exec, const cg_value *value, const cg_tensor *from, int64_t S, int64_t B) {
    for (int64_t i = 0; i < cg_shape_count(&value->shape); i++)
        cg_exec_set(exec, value, i, packed_get(from, S, B, value->shape.dims[1], i));
}

static bool check_group(group *g, double tolerance, cg_compressor_quantity *quantities, int *n,
                        cg_error *error) {
    bool with_grads = part(g, "in.dout") != NULL;
    cg_graph *graph = cg_graph_new(&cg_all_ops);
    if (!graph) return cg_fail(error, CG_FAILED, "out of memory");
    cg_value *cu = cg_leaf(graph, CG_LEAF_INPUT, "cu_seqlens", CG_I32, CG_SHAPE(g->n_segments + 1));
    cg_value *wrt[3] = {leaf(graph, "kv", CG_LEAF_PARAMETER, g->T, g->columns),
                        leaf(graph, "gate", CG_LEAF_PARAMETER, g->T, g->columns),
                        leaf(graph, "ape", CG_LEAF_PARAMETER, g->ratio, g->columns)};
    cg_value *dout = leaf(graph, "dout", CG_LEAF_INPUT, g->C, g->d), *grads[3];
    cg_rows rows = cg_segment_rows(graph, cu, NULL, g->T, g->ratio, g->C);
    cg_value *out = cg_keep(cg_csa_compress(graph, wrt[0], wrt[1], wrt[2], rows.entries, rows.entry_positions,
                                            g->ratio, g->columns == 2 * g->d));
    cg_autodiff(graph, &out, &dout, 1, wrt, 3, grads);
    for (int k = 0; k < 3; k++) cg_keep(grads[k]);
    cg_plan *plan = cg_plan_make(graph, &(cg_plan_options){.backend = g->backend}, error);
    cg_exec *exec = plan ? cg_exec_new(plan, NULL, error) : NULL;
    bool ok = exec != NULL;
    if (ok) {
        int64_t keys = g->packed ? g->C : g->keys, batch = g->packed ? 1 : g->B;
        cg_exec_write(exec, cu, g->cu_seqlens);
        fill(exec, wrt[0], part(g, "in.kv"), g->S, g->B);
        fill(exec, wrt[1], part(g, gate_name), g->S, g->B);
        fill(exec, wrt[2], part(g, "in.ape"), g->ratio, 1);
        if (with_grads) fill(exec, dout, part(g, "in.dout"), keys, batch);
        ok = cg_exec_run(exec, CG_ALL_PASSES, error);
    }
    static const char *const names[3] = {"grad.kv", "grad.gate", "grad.ape"};
    double slots = (double)(2 * g->ratio);
    ok = ok && compare(g, exec, "out.compressed", out, tolerance, slots, &quantities[(*n)++], error);
    for (int k = 0; ok && with_grads && k < 3; k++)
        if (part(g, names[k]))
            ok = compare(g, exec, names[k], grads[k], tolerance, k == 2 ? slots + (double)g->C : slots,
                         &quantities[(*n)++], error);
    cg_exec_free(exec);
    cg_plan_free(plan);
    cg_graph_free(graph);
    return ok;
}

bool cg_compressor_check(const cg_archive *archive, const cg_backend *backend, double tolerance,
                         cg_compressor_quantity *quantities, int *n, cg_error *error) {
    *n = 0;
    for (int i = 0; *n + 4 <= CG_COMPRESSOR_QUANTITIES; i++) {
        group g = {.archive = archive, .backend = backend};
        if (!group_prefix(archive, i, g.prefix, sizeof g.prefix)) return true;
        bool ok = read_shapes(&g, error) && check_group(&g, tolerance, quantities, n, error);
        free(g.cu_seqlens);
        if (!ok) return false;
    }
    return cg_fail(error, CG_BAD_INPUT, "more than %d groups of compressor tensors in one file",
                   CG_COMPRESSOR_QUANTITIES / 4);
}
