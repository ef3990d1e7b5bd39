/* csagrad check FILE for a file of gated pooling alone: compressed rows and gradients against csa_compress in f64.
 *
 *     csagrad check tests/data/compressor.safetensors */
#include "tools/csagrad.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>

#include "core/base/shown.h"
#include "models/check/compressor_check.h"
#include "tools/json_number.h"
#include "tools/options.h"
#include "tools/table.h"

static bool print_text(const char *path, const cg_compressor_quantity *q, int n) {
    bool match = true;
    printf("csagrad check: %s: gated pooling, %d tensors\n", cg_shown_path(path).text, n);
    table *t = table_new("lrllrr");
    static const char *const titles[] = {"quantity", "worst relative", "as expected", "first row that differs",
                                         "got",      "expected"};
    for (int c = 0; c < 6; c++) table_cell(t, "%s", titles[c]);
    for (int i = 0; i < n; i++) {
        match &= q[i].ok;
        table_cell(t, "%s", q[i].name);
        table_cell(t, "%.1e", q[i].worst_rel);
        table_cell(t, "%s", q[i].ok ? "yes" : "NO");
        if (q[i].ok) {
            for (int c = 0; c < 3; c++) table_cell(t, "%s", "");
            continue;
        }
        table_cell(t, "segment %lld, position %lld", (long long)q[i].segment, (long long)q[i].position);
        table_cell(t, "%.9g", q[i].got);
        table_cell(t, "%.9g", q[i].expected);
    }
    table_print(t);
    puts(match ? "\nmatch" : "\nno match");
    return match;
}

static bool print_json(const cg_compressor_quantity *q, int n) {
    bool match = true;
    json_t *list = json_array();
    for (int i = 0; i < n; i++) {
        match &= q[i].ok;
        json_t *first = json_null();
        if (!q[i].ok)
            first = json_pack("{s:I, s:I, s:n, s:o, s:o}", "segment", (json_int_t)q[i].segment, "position",
                              (json_int_t)q[i].position, "head", "got", json_number(q[i].got), "expected",
                              json_number(q[i].expected));
        json_array_append_new(list, json_pack("{s:s, s:b, s:o, s:o}", "name", q[i].name, "ok", q[i].ok,
                                              "worst_rel", json_number(q[i].worst_rel), "first", first));
    }
    json_t *root = json_pack("{s:b, s:{}, s:[], s:[], s:o}", "match", match, "contract", "undetermined",
                             "faults", "quantities", list);
    json_print(root, JSON_INDENT(2) | JSON_REAL_PRECISION(17));
    return match;
}

bool csagrad_check_compressor(const char *program, const char *path, const cg_backend *backend,
                              double tolerance, bool json, int *code) {
    cg_error error = {0}, unread = {0};
    cg_archive *archive =
        cg_archive_open(path, &unread); /* a file that cannot be read is the caller's to name */
    if (!archive &&
        unread.code == CG_FAILED) { /* the machine refuses: reading it again may give something else */
        *code = tool_failed(program, &unread);
        return true;
    }
    if (!archive || !cg_compressor_groups(archive)) {
        cg_archive_close(archive);
        return false;
    }
    cg_compressor_quantity q[CG_COMPRESSOR_QUANTITIES];
    int n;
    if (!cg_compressor_check(archive, backend, tolerance, q, &n, &error)) {
        cg_error_at(&error, "%s", path);
        *code = tool_failed(program, &error);
    } else {
        *code = (json ? print_json(q, n) : print_text(path, q, n)) ? 0 : CG_FAILED;
    }
    cg_archive_close(archive);
    return true;
}
