/* The page of csagrad mem: its figures are those of the plans, it asks for nothing outside itself, no text of a report
 * can end the element that holds it, and it appears whole or not at all. */
#include <check.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <jansson.h>

#include "core/base/file.h"
#include "ops/ops.h"
#include "tools/mem.h"

static char folder[] = "/tmp/csagrad_page_XXXXXX";

static const char *at(const char *name) {
    static char path[200];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void make_folder(void) { ck_assert_ptr_nonnull(mkdtemp(folder)); }

static void remove_folder(void) {
    char command[200];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    ck_assert_int_eq(system(command), 0);
}

/* ---- a report ---- */

static void plan_row(mem_row *row, const char *policy, const char *seq) {
    cg_error error = {0};
    cg_config *config = &row->workload.config;
    *config = cg_config_toy();
    const char *const settings[][2] = {{"seq_len", seq},
                                       {"batch_size", "2"},
                                       {"num_hidden_layers", "2"},
                                       {"compress_ratios", "4,128"},
                                       {"policy", policy}};
    for (size_t i = 0; i < sizeof settings / sizeof settings[0]; i++)
        if (!cg_config_set(config, settings[i][0], settings[i][1], &error)) ck_abort_msg("%s", error.text);
    if (!cg_config_check(config, &error)) ck_abort_msg("%s", error.text);
    snprintf(row->policy, sizeof row->policy, "%s", policy);
    row->dims = "config";
    row->seq = config->seq_len;
    row->n_rows = config->seq_len * config->batch_size;
    row->dtype = config->dtype;
    if (!mem_row_make(row, 0, &error)) ck_abort_msg("%s", error.text);
}

/* Three policies at two sizes, with all that a report can hold. */
static mem_report report_of_all(void) {
    static const char *const policies[] = {"save", "recompute", "stream"}, *const sizes[] = {"32", "64"};
    mem_report report = {.title = "csagrad mem", .rows = calloc(6, sizeof *report.rows)};
    cg_error error = {0};
    for (int s = 0; s < 2; s++)
        for (int p = 0; p < 3; p++) plan_row(&report.rows[report.n_rows++], policies[p], sizes[s]);
    for (int r = 0; r < report.n_rows; r++)
        if (!mem_what_if_make(&report.rows[r], &error)) ck_abort_msg("%s", error.text);
    if (!mem_growth_make(&report, &error)) ck_abort_msg("%s", error.text);
    /* as mem_curves_make would, with little search: any points will do */
    report.curves = calloc(1, sizeof *report.curves);
    report.n_curves = 1;
    report.curves[0] = (mem_curve){.base = "stream", .row = &report.rows[2]};
    report.curves[0].frontier = cg_frontier_make(report.rows[2].step.graph, NULL, NULL, 50, &error);
    if (!report.curves[0].frontier) ck_abort_msg("%s", error.text);
    return report;
}

static mem_report report_of_one(const char *title, const char *policy) {
    mem_report report = {.title = title, .rows = calloc(1, sizeof *report.rows), .n_rows = 1};
    plan_row(&report.rows[0], policy, "32");
    return report;
}

/* ---- a page, read back ---- */

static const char open_mark[] = "id=\"report\">", close_mark[] = "</script>";

static char *written(const mem_report *report) {
    cg_error error = {0};
    char *page;
    size_t bytes;
    if (!mem_page_write(report, at("page.html"), &error)) ck_abort_msg("%s", error.text);
    if (!cg_file_read(at("page.html"), 1 << 28, &page, &bytes, &error)) ck_abort_msg("%s", error.text);
    ck_assert_uint_eq(strlen(page), bytes);
    return page;
}

/* Take the report out of the page: `page` keeps the rest. */
static json_t *take_report(char *page) {
    char *begin = strstr(page, open_mark);
    ck_assert_ptr_nonnull(begin);
    begin += strlen(open_mark);
    char *end = strstr(begin, close_mark);
    ck_assert_ptr_nonnull(end);
    json_error_t error;
    json_t *report = json_loadb(begin, (size_t)(end - begin), 0, &error);
    if (!report) ck_abort_msg("%s at %d", error.text, error.position);
    memmove(begin, end, strlen(end) + 1);
    return report;
}

static int64_t number(const json_t *object, const char *key) {
    const json_t *value = json_object_get(object, key);
    ck_assert_msg(json_is_integer(value), "%s is no integer", key);
    return json_integer_value(value);
}

static int64_t item(const json_t *columns, const char *key, size_t i) {
    const json_t *list = json_object_get(columns, key);
    ck_assert_msg(i < json_array_size(list), "%s has no entry %zu", key, i);
    return json_integer_value(json_array_get(list, i));
}

static const char *text(const json_t *report, const json_t *columns, const char *key, size_t i) {
    const char *found =
        json_string_value(json_array_get(json_object_get(report, "texts"), (size_t)item(columns, key, i)));
    ck_assert_msg(found != NULL, "%s names no text at entry %zu", key, i);
    return found;
}

/* Bytes alive at a step by category, from the page alone. */
static void live(const json_t *plan, int64_t align, int64_t step, int64_t bytes[CG_CATEGORIES]) {
    const json_t *s = json_object_get(plan, "storages");
    memset(bytes, 0, CG_CATEGORIES * sizeof *bytes);
    for (size_t i = 0; i < json_array_size(json_object_get(s, "bytes")); i++) {
        bool takes_over = item(s, "over", i) >= 0 && step == item(s, "first", i);
        if (step < item(s, "first", i) || step > item(s, "last", i) || takes_over) continue;
        bytes[item(s, "category", i)] += (item(s, "bytes", i) + align - 1) / align * align;
    }
}

static void expect_live(const mem_row *row, const json_t *shown, int64_t align) {
    const json_t *plan = json_object_get(shown, "plan");
    int64_t most = 0, here[CG_CATEGORIES], expected[CG_CATEGORIES];
    for (int t = 0; t < row->step.plan->n_steps; t++) {
        live(plan, align, t, here);
        cg_plan_live(row->step.plan, t, expected);
        int64_t total = 0;
        for (int c = 0; c < CG_CATEGORIES; c++) {
            ck_assert_int_eq(here[c], expected[c]);
            total += here[c];
        }
        if (total > most) most = total;
        if (t == number(plan, "peak_step")) ck_assert_int_eq(total, row->step.plan->floor_bytes);
    }
    ck_assert_int_eq(most, row->step.plan->floor_bytes);
    ck_assert_int_eq(number(shown, "floor_bytes"), row->step.plan->floor_bytes);
    ck_assert_int_eq(number(shown, "planned_peak_bytes"), row->step.plan->peak_bytes);
}

static void expect_places(const mem_row *row, const json_t *shown, int64_t align) {
    const json_t *s = json_object_get(json_object_get(shown, "plan"), "storages");
    int64_t end = 0;
    ck_assert_uint_eq(json_array_size(json_object_get(s, "bytes")), (size_t)row->step.plan->n_storages);
    for (size_t i = 0; i < (size_t)row->step.plan->n_storages; i++) {
        int64_t top = item(s, "offset", i) + (item(s, "bytes", i) + align - 1) / align * align;
        if (top > end) end = top;
    }
    ck_assert_int_eq(end, row->step.plan->peak_bytes);
}

/* What a step reads is alive then, and a value that backward reads is what the plan calls saved. */
static void expect_reads(const mem_row *row, const json_t *shown) {
    const json_t *plan = json_object_get(shown, "plan"), *steps = json_object_get(plan, "steps");
    const json_t *s = json_object_get(plan, "storages");
    size_t n = (size_t)row->step.plan->n_storages;
    bool *late = calloc(n, sizeof *late);
    int64_t saved_bytes = 0;
    for (size_t t = 0; t < (size_t)row->step.plan->n_steps; t++) {
        const json_t *reads = json_array_get(json_object_get(steps, "reads"), t), *storage;
        size_t k;
        json_array_foreach(reads, k, storage) {
            size_t i = (size_t)json_integer_value(storage);
            ck_assert_uint_lt(i, n);
            ck_assert_int_le(item(s, "first", i), (int64_t)t);
            ck_assert_int_ge(item(s, "last", i), (int64_t)t);
            int64_t pass = item(steps, "pass", t);
            late[i] |= pass == CG_BACKWARD || pass == CG_RECOMPUTE;
        }
    }
    const json_t *saved = json_object_get(json_object_get(plan, "saved"), "storage");
    ck_assert_uint_eq(json_array_size(saved), (size_t)row->n_saved);
    ck_assert_int_gt(row->n_saved, 10);
    for (size_t k = 0; k < json_array_size(saved); k++) {
        size_t i = (size_t)json_integer_value(json_array_get(saved, k));
        ck_assert_msg(late[i], "saved value %zu has no late reader", k);
        ck_assert_int_eq(item(s, "category", i), CG_SAVED);
        saved_bytes += item(s, "bytes", i);
    }
    ck_assert_int_eq(saved_bytes, number(shown, "saved_bytes"));
    ck_assert_int_eq(saved_bytes, row->m.saved_bytes);
    free(late);
}

static void expect_steps(const mem_row *row, const json_t *report, const json_t *shown) {
    const json_t *steps = json_object_get(json_object_get(shown, "plan"), "steps");
    double flops = 0, extra = 0, us = 0, expected_us = 0;
    for (size_t t = 0; t < (size_t)row->step.plan->n_steps; t++) {
        const cg_node *node = row->step.plan->steps[t];
        ck_assert_str_eq(text(report, steps, "op", t), node->op->name);
        ck_assert_str_eq(text(report, steps, "scope", t), node->scope);
        double f = json_number_value(json_array_get(json_object_get(steps, "flops"), t));
        flops += f;
        if (item(steps, "pass", t) == CG_RECOMPUTE) extra += f;
        us += json_number_value(json_array_get(json_object_get(steps, "us"), t));
        expected_us += mem_step_us(row, (int)t);
    }
    ck_assert_double_eq_tol(flops, row->m.flops, 1e-6 * row->m.flops);
    ck_assert_double_eq_tol(extra, row->m.extra_flops, 1e-6 * row->m.flops);
    ck_assert_double_eq_tol(us, expected_us, .005 * row->step.plan->n_steps); /* each is rounded to .01 */
}

START_TEST(figures_are_those_of_the_plans) {
    mem_report report = report_of_all();
    char *page = written(&report);
    json_t *shown = take_report(page), *row;
    int64_t align = number(shown, "align");
    size_t r, recomputed = 0;
    ck_assert_uint_eq(json_array_size(json_object_get(shown, "rows")), (size_t)report.n_rows);
    json_array_foreach(json_object_get(shown, "rows"), r, row) {
        const mem_row *of = &report.rows[r];
        ck_assert_str_eq(json_string_value(json_object_get(row, "policy")), of->policy);
        ck_assert(
            json_is_null(json_object_get(row, "measured_peak_bytes"))); /* nothing ran: no figure, not -1 */
        ck_assert(json_is_null(json_object_get(row, "loss")));
        expect_live(of, row, align);
        expect_places(of, row, align);
        expect_reads(of, row);
        expect_steps(of, shown, row);
        recomputed += number(row, "n_clones") > 0;
        const json_t *saved = json_object_get(json_object_get(row, "plan"), "saved");
        for (int i = 0; i < of->n_saved; i++) {
            ck_assert_int_eq(item(saved, "possible", (size_t)i), of->what_if[i].possible);
            ck_assert_int_eq(item(saved, "peak_change_bytes", (size_t)i), of->what_if[i].peak_change_bytes);
        }
    }
    ck_assert_uint_eq(recomputed, 2);
    json_decref(shown);
    free(page);
    mem_report_free(&report);
}
END_TEST

START_TEST(growth_and_curves_are_those_of_the_report) {
    mem_report report = report_of_all();
    char *page = written(&report);
    json_t *shown = take_report(page);
    const json_t *growth = json_object_get(shown, "growth"), *curves = json_object_get(shown, "curves");
    ck_assert_uint_eq(json_array_size(growth), 3);
    for (int g = 0; g < report.n_growth; g++) {
        const json_t *of = json_array_get(growth, (size_t)g), *sizes = json_object_get(of, "sizes");
        ck_assert_double_eq_tol(json_real_value(json_object_get(of, "peak_exponent")),
                                report.growth[g].peak_exponent, 1e-9);
        for (size_t i = 0; i < 2; i++) {
            const mem_row *row = report.growth[g].rows[i];
            ck_assert_int_eq(item(sizes, "seq", i), row->seq);
            ck_assert_int_eq(item(sizes, "peak_bytes", i), row->m.planned_peak_bytes);
            ck_assert_int_eq(item(sizes, "extra_bytes", i), row->m.planned_peak_bytes - row->m.boundary_bytes);
        }
    }
    ck_assert_uint_eq(json_array_size(curves), (size_t)report.n_curves);
    for (int c = 0; c < report.n_curves; c++) {
        const cg_frontier *frontier = report.curves[c].frontier;
        const json_t *of = json_array_get(curves, (size_t)c), *points = json_object_get(of, "points");
        const json_t *nodes = json_object_get(of, "nodes");
        const cg_graph *graph = report.curves[c].row->step.graph;
        ck_assert_ptr_eq(&report.rows[number(of, "row")], report.curves[c].row);
        ck_assert_int_gt(frontier->n_points, 1);
        for (size_t p = 0; p < (size_t)frontier->n_points; p++) {
            ck_assert_int_eq(item(points, "peak_bytes", p), frontier->points[p].trial.peak_bytes);
            const json_t *chosen = json_array_get(json_object_get(points, "chosen"), p);
            size_t k = 0;
            for (int n = 0; n < frontier->n_nodes; n++) {
                if (!frontier->points[p].chosen[n]) continue;
                size_t place = (size_t)json_integer_value(json_array_get(chosen, k++));
                ck_assert_str_eq(text(shown, nodes, "op", place), graph->nodes[n]->op->name);
                ck_assert_str_eq(text(shown, nodes, "scope", place), graph->nodes[n]->scope);
            }
            ck_assert_uint_eq(json_array_size(chosen), k);
        }
    }
    json_decref(shown);
    free(page);
    mem_report_free(&report);
}
END_TEST

/* ---- nothing from outside ---- */

START_TEST(a_step_reads_a_value_once) {
    mem_report report = {.title = "csagrad mem", .rows = calloc(1, sizeof *report.rows), .n_rows = 1};
    mem_row *row = &report.rows[0];
    cg_error error = {0};
    cg_graph *graph = cg_graph_new(&cg_all_ops);
    cg_value *x = cg_leaf(graph, CG_LEAF_PARAMETER, "x", CG_F32, CG_SHAPE(16));
    cg_keep(cg_mul(graph, x, x));
    *row = (mem_row){.dims = "toy", .workload.config = cg_config_toy(), .step.graph = graph};
    row->step.plan = cg_plan_make(graph, NULL, &error);
    ck_assert_ptr_nonnull(row->step.plan);
    char *page = written(&report);
    json_t *read_back = take_report(page), *shown = json_array_get(json_object_get(read_back, "rows"), 0);
    const json_t *reads = json_object_get(json_object_get(json_object_get(shown, "plan"), "steps"), "reads");
    ck_assert_uint_eq(json_array_size(reads), 1);
    ck_assert_uint_eq(json_array_size(json_array_get(reads, 0)), 1);
    json_decref(read_back);
    free(page);
    mem_report_free(&report);
}
END_TEST

START_TEST(nothing_outside_the_page_is_named) {
    mem_report report = report_of_one("csagrad mem", "stream");
    char *page = written(&report);
    json_decref(take_report(page));
    static const char *const outside[] = {"http:",   "https:",         "src=",      "@import",     "url(",
                                          "fetch(",  "XMLHttpRequest", "WebSocket", "EventSource", "sendBeacon",
                                          "import(", "importScripts",  "<iframe",   "<img",        "<object",
                                          "<embed",  "@REPORT@"};
    for (size_t i = 0; i < sizeof outside / sizeof outside[0]; i++)
        ck_assert_msg(!strstr(page, outside[i]), "the page holds %s", outside[i]);
    ck_assert_ptr_nonnull(strstr(page, "default-src 'none'")); /* and the browser is told to load nothing */
    for (const char *link = page; (link = strstr(link, "href=")); link++)
        ck_assert_msg(!strncmp(link, "href=\"data:,\"", 13), "a link: %.40s", link);
    free(page);
    mem_report_free(&report);
}
END_TEST

static int count(const char *page, const char *word) {
    int n = 0;
    for (const char *found = page; (found = strstr(found, word)); found++) n++;
    return n;
}

START_TEST(texts_cannot_leave_their_element) {
    static const char hostile[] = "csagrad mem '</script><script>alert(1)//' \"&<!-- \\u003c";
    mem_report report = report_of_one("csagrad mem", "stream");
    char *plain = written(&report), *page;
    report.title = hostile;
    snprintf(report.rows[0].policy, sizeof report.rows[0].policy, "</script>");
    page = written(&report);
    ck_assert_int_eq(count(page, "</script>"), count(plain, "</script>"));
    ck_assert_int_eq(count(page, "<!--"), count(plain, "<!--"));
    ck_assert_int_eq(count(page, "alert(1)"), 1);
    json_t *shown = take_report(page);
    ck_assert_str_eq(json_string_value(json_object_get(shown, "command")), hostile);
    ck_assert_str_eq(
        json_string_value(json_object_get(json_array_get(json_object_get(shown, "rows"), 0), "policy")),
        "</script>");
    json_decref(shown);
    free(page);
    report.title = "csagrad mem --html caf\xe9.html"; /* a name on disk need not be UTF-8 */
    page = written(&report);
    shown = take_report(page);
    ck_assert_str_eq(json_string_value(json_object_get(shown, "command")), "csagrad mem --html caf?.html");
    json_decref(shown);
    free(page);
    free(plain);
    mem_report_free(&report);
}
END_TEST

START_TEST(refused_rows_have_a_sentence_and_no_figures) {
    mem_report report = {.title = "csagrad mem", .rows = calloc(1, sizeof *report.rows), .n_rows = 1};
    report.rows[0].dims = "flash";
    report.rows[0].refused = strdup("the step needs 9 GiB, this machine has 4");
    snprintf(report.rows[0].policy, sizeof report.rows[0].policy, "save");
    char *page = written(&report);
    json_t *shown = take_report(page), *row = json_array_get(json_object_get(shown, "rows"), 0);
    ck_assert_str_eq(json_string_value(json_object_get(row, "refused")), report.rows[0].refused);
    ck_assert_ptr_null(json_object_get(row, "planned_peak_bytes"));
    ck_assert_ptr_null(json_object_get(row, "plan"));
    json_decref(shown);
    free(page);
    mem_report_free(&report);
}
END_TEST

/* ---- whole or not at all ---- */

static void expect_refused(const mem_report *report, const char *path, cg_code code, const char *words) {
    cg_error error = {0};
    ck_assert(!mem_page_write(report, path, &error));
    ck_assert_int_eq(error.code, code);
    ck_assert_msg(strstr(error.text, words) != NULL, "'%s' is not in: %s", words, error.text);
    ck_assert_ptr_null(strchr(error.text, '\n'));
}

START_TEST(a_path_that_cannot_be_used_is_refused) {
    mem_report report = report_of_one("csagrad mem", "stream");
    struct stat status;
    expect_refused(&report, at("absent/page.html"), CG_BAD_INPUT, "absent/page.html");
    ck_assert_int_ne(stat(at("absent"), &status), 0);
    expect_refused(&report, folder, CG_BAD_INPUT, "folder");
    mem_report_free(&report);
}
END_TEST

START_TEST(a_full_disk_leaves_the_older_page) {
    mem_report report = report_of_one("csagrad mem", "stream");
    char *before = written(&report), *after;
    size_t bytes;
    cg_error error = {0};
    struct stat status;
    struct rlimit limit = {4096, 4096};
    signal(SIGXFSZ, SIG_IGN);
    ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &limit), 0);
    expect_refused(&report, at("page.html"), CG_FAILED, "page.html");
    expect_refused(&report, at("new.html"), CG_FAILED, "new.html");
    ck_assert_int_ne(stat(at("new.html"), &status), 0);
    ck_assert_int_ne(stat(at("new.html.tmp"), &status), 0);
    ck_assert(cg_file_read(at("page.html"), 1 << 28, &after, &bytes, &error));
    ck_assert_str_eq(before, after);
    free(before);
    free(after);
    mem_report_free(&report);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("tools_mem_page");
    TCase *page = tcase_create("page");
    tcase_add_checked_fixture(page, make_folder, remove_folder);
    tcase_set_timeout(page, 120);
    tcase_add_test(page, figures_are_those_of_the_plans);
    tcase_add_test(page, growth_and_curves_are_those_of_the_report);
    tcase_add_test(page, a_step_reads_a_value_once);
    tcase_add_test(page, nothing_outside_the_page_is_named);
    tcase_add_test(page, texts_cannot_leave_their_element);
    tcase_add_test(page, refused_rows_have_a_sentence_and_no_figures);
    tcase_add_test(page, a_path_that_cannot_be_used_is_refused);
    tcase_add_test(page, a_full_disk_leaves_the_older_page);
    suite_add_tcase(suite, page);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed != 0;
}
