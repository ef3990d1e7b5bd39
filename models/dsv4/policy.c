#include "models/dsv4/policy.h"

#include "core/base/suggest.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The nodes whose outputs are per-head scores. What follows them, summed over heads and gathered, is small: to clone that
 * too would read all scores once more and lower no peak. */
static const char recompute_terms[] = "indexer_head_scores,relu@layer*/attn/indexer";

/* One word that is no op is meant as a form. */
static bool is_a_term(const char *text, cg_error *error) {
    static const char *const forms[] = {"save", "recompute", "stream", "auto:BYTES"};
    if (text[strcspn(text, ",@;*?=+/")] || cg_op_find(&cg_all_ops, text)) return true;
    const char *near = cg_suggest(text, forms, 4), **names = calloc((size_t)cg_all_ops.n, sizeof *names);
    for (int i = 0; names && i < cg_all_ops.n; i++) names[i] = cg_all_ops.list[i]->name;
    if (!near && names) near = cg_suggest(text, names, cg_all_ops.n);
    cg_fail(error, CG_BAD_INPUT,
            "unknown policy \"%s\"%s%s%s, expected save, recompute, stream, auto:BYTES, or "
            "OP[,OP...][@SCOPE][;...]",
            text, near ? " (did you mean " : "", near ? near : "", near ? "?)" : "");
    free(names);
    return false;
}

/* "200MiB", "1.5GiB", "12345": at least one byte. */
static bool parse_bytes(const char *text, int64_t *bytes, cg_error *error) {
    static const struct {
        const char *name;
        double bytes;
    } units[] = {{"", 1}, {"KiB", 1024}, {"MiB", 1048576}, {"GiB", 1073741824}};
    size_t digits = strspn(text, "0123456789."), u = 0, n_units = sizeof units / sizeof *units;
    char *end = NULL;
    double number = digits ? strtod(text, &end) : 0;
    while (u < n_units && strcmp(text + digits, units[u].name)) u++;
    bool ok =
        end == text + digits && u < n_units && number * units[u].bytes >= 1 && number * units[u].bytes < 9e18;
    if (ok) *bytes = (int64_t)(number * units[u].bytes);
    return ok ||
           cg_fail(error, CG_BAD_INPUT,
                   "auto: expected a budget of bytes such as 200000000, 190MiB or 1.5GiB, got \"%s\"", text);
}

/* Step over a word at the start of a text. */
static bool starts_with(const char **text, const char *word) {
    size_t n = strlen(word);
    if (strncmp(*text, word, n)) return false;
    *text += n;
    return true;
}

bool cg_policy_parse(const char *text, cg_policy *policy, cg_error *error) {
    *policy = (cg_policy){.form = CG_FORM_SPELLED};
    if (!strcmp(text, "save")) return true;
    if (!strcmp(text, "recompute")) text = recompute_terms;
    if (!strcmp(text, "stream") || starts_with(&text, "stream+")) policy->form = CG_FORM_STREAM;
    if (!strcmp(text, "stream")) return true;
    const char *budget = text;
    bool spelled = starts_with(&budget, "save+"), is_auto = starts_with(&budget, "auto:");
    if (is_auto) {
        if (!spelled) policy->form = CG_FORM_STREAM;
        return parse_bytes(budget, &policy->budget_bytes, error);
    }
    starts_with(&text, "recompute=");
    if (!text[strspn(text, ";")])
        return cg_fail(
            error, CG_BAD_INPUT,
            "policy is empty, expected save, recompute, stream, auto:BYTES, or OP[,OP...][@SCOPE][;...]");
    if (policy->form == CG_FORM_SPELLED && !is_a_term(text, error)) return false;
    if (strlen(text) >= CG_POLICY_BYTES)
        return cg_fail(error, CG_BAD_INPUT, "policy is %zu characters long, at most %d fit", strlen(text),
                       CG_POLICY_BYTES - 1);
    snprintf(policy->terms, sizeof policy->terms, "%s", text);
    return true;
}

static bool apply_budget(cg_graph *graph, int64_t budget, const cg_plan_options *plan, int *n_clones,
                         cg_frontier **frontier) {
    cg_error error = {0};
    cg_plan_options options = plan ? *plan : (cg_plan_options){0};
    options.keep_cloned_originals = false; /* a check must not change what is checked */
    *frontier = cg_frontier_make(graph, NULL, &options, 0, &error);
    if (!*frontier) {
        cg_fail(&graph->error, error.code, "%s", error.text);
        return false;
    }
    const cg_frontier_point *point = cg_frontier_fit(*frontier, budget);
    if (point) return cg_recompute_nodes(graph, point->chosen, n_clones);
    int64_t smallest = (*frontier)->points[(*frontier)->n_points - 1].trial.peak_bytes,
            least = (*frontier)->least_bytes;
    bool proven = smallest == least;
    cg_graph_fail(
        graph,
        "no set of recomputations brings the peak below the budget of %lld bytes: the smallest %s is %lld "
        "bytes (%.2f MiB)",
        (long long)budget, proven ? "possible" : "found", (long long)smallest, (double)smallest / 1048576);
    return false;
}

bool cg_policy_apply(cg_graph *graph, const cg_policy *policy, const cg_plan_options *plan, int *n_clones,
                     cg_frontier **frontier) {
    *n_clones = 0;
    *frontier = NULL;
    if (cg_graph_error(graph)) return false;
    if (policy->budget_bytes) return apply_budget(graph, policy->budget_bytes, plan, n_clones, frontier);
    return cg_recompute(graph, policy->terms, n_clones);
}
