#include "models/check/dump_write.h"

#include "core/base/file.h"
#include "core/base/rng.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One dump of the set. */
typedef struct member {
    const char *name, *what;
    cg_dump_layout layout;
    cg_dtype dtype;
    int64_t n_heads, head_dim, index_heads, index_dim, ratio, window, topk;
    int n_segments;
    int64_t physical[10], real[10]; /* real all 0: the same */
    int64_t behind;
    bool global_lists, lse_base_2;
    void (*change)(cg_dump_case *c, uint64_t seed);
} member;

/* ---- what makes them hard ---- */

/* Scores of a few small integers: exact in any float format and any order of sums. */
static void make_ties(cg_dump_case *c, uint64_t seed) {
    uint64_t stream = cg_random_stream("dump/ties");
    int64_t n_q = c->n_rows * c->index_heads * c->index_dim, n_w = c->n_rows * c->index_heads,
            n_k = c->n_compressed * c->index_dim;
    for (int64_t i = 0; i < n_q; i++)
        c->q_indexer[i] = (double)cg_random_below(seed, stream, (uint64_t)i, 3) - 1;
    for (int64_t i = 0; i < n_k; i++)
        c->k_indexer[i] = (double)cg_random_below(seed, stream + 1, (uint64_t)i, 3) - 1;
    for (int64_t i = 0; i < n_w; i++)
        c->weights[i] = ((double)cg_random_below(seed, stream + 2, (uint64_t)i, 5) - 2) / 2;
    /* every third key is its neighbour's double; rows whose queries are -0.0 score 0 everywhere */
    for (int64_t j = 1; j < c->n_compressed; j++)
        if (j % 3 == 1)
            memcpy(c->k_indexer + j * c->index_dim, c->k_indexer + (j - 1) * c->index_dim,
                   (size_t)c->index_dim * sizeof(double));
    for (int64_t t = 0; t < c->n_rows; t++)
        for (int64_t i = 0; t % 7 == 6 && i < c->index_heads * c->index_dim; i++)
            c->q_indexer[t * c->index_heads * c->index_dim + i] = -0.0;
}

/* Sinks so high that almost nothing is left for the compressed keys, not the same for all heads. */
static void raise_sinks(cg_dump_case *c, double decades) {
    for (int64_t h = 0; h < c->n_heads; h++) c->sink[h] = decades * log(10) + (double)(h % 2);
}
static void leave_1e_17(cg_dump_case *c, uint64_t seed) {
    (void)seed;
    raise_sinks(c, 17);
}
static void leave_1e_80(cg_dump_case *c, uint64_t seed) {
    (void)seed;
    raise_sinks(c, 80);
}

/* Heads that look at opposite keys; one of them mostly at its sink, so that it must count for little. */
static void oppose_heads(cg_dump_case *c, uint64_t seed) {
    (void)seed;
    int64_t H = c->n_heads, D = c->head_dim;
    for (int64_t j = 0; j < c->n_compressed; j++)
        for (int64_t d = 0; d < D; d++) c->ckv[j * D + d] *= 0.25;
    for (int64_t j = 0; j < c->n_compressed; j++) c->ckv[j * D] = j % 2 ? 2 : -2;
    for (int64_t t = 0; t < c->n_rows; t++)
        for (int64_t h = 0; h < H; h++) c->query[(t * H + h) * D] = (h % 2 ? 2 : -2) / c->softmax_scale / 2;
    for (int64_t h = 0; h < H; h++) c->sink[h] = h % 2 ? 4 : -1;
}

/* Students that are far off: keys with a hundred times less probability than an epsilon of 1e-10. */
static void sharpen_scores(cg_dump_case *c, uint64_t seed) {
    (void)seed;
    for (int64_t i = 0; i < c->n_rows * c->index_heads; i++) c->weights[i] *= 60;
}

static const member members[] = {
    {"plain_thd",
     "three packed segments, the middle one shorter than the ratio; start here",
     CG_LAYOUT_THD,
     CG_F32,
     4,
     16,
     4,
     16,
     4,
     8,
     3,
     3,
     {21, 3, 30}},
    {"plain_sbhd",
     "two sequences of one length, [S, B, ...]",
     CG_LAYOUT_SBHD,
     CG_F32,
     4,
     16,
     4,
     16,
     4,
     8,
     3,
     2,
     {40, 40}},
    {"plain_bshd",
     "the numbers of plain_sbhd as [B, S, ...]",
     CG_LAYOUT_BSHD,
     CG_F32,
     4,
     16,
     4,
     16,
     4,
     8,
     3,
     2,
     {40, 40}},
    {"padded",
     "rows of padding in each segment: they see no compressed key and are not in the divisor",
     CG_LAYOUT_THD,
     CG_F32,
     4,
     16,
     4,
     16,
     4,
     8,
     3,
     4,
     {12, 24, 8, 4},
     {9, 21, 8, 2}},
    {"many_segments",
     "ten segments, three of them empty and two of one token, then three rows behind the last",
     CG_LAYOUT_THD,
     CG_F32,
     4,
     16,
     4,
     16,
     4,
     8,
     3,
     10,
     {0, 21, 0, 1, 1, 11, 12, 0, 5, 0},
     {0},
     3},
    {"no_visible_key",
     "all segments shorter than the ratio: loss 0, window and sink alone",
     CG_LAYOUT_THD,
     CG_F32,
     2,
     16,
     4,
     16,
     4,
     8,
     3,
     3,
     {3, 2, 1}},
    {"few_visible_keys",
     "half of the rows see no compressed key; they count in the divisor all the same",
     CG_LAYOUT_THD,
     CG_F32,
     2,
     16,
     4,
     16,
     4,
     8,
     2,
     3,
     {9, 3, 11}},
    {"ties",
     "scores of small integers with many ties at the cut, double keys, rows of -0.0: ties go to the lower "
     "index",
     CG_LAYOUT_SBHD,
     CG_F32,
     4,
     16,
     2,
     4,
     4,
     4,
     4,
     2,
     {40, 40},
     .change = make_ties},
    {"opposite_heads",
     "two heads with opposite tastes: window and sink in the denominator decide whose counts",
     CG_LAYOUT_THD,
     CG_F32,
     2,
     8,
     4,
     16,
     4,
     4,
     4,
     2,
     {24, 17},
     .change = oppose_heads},
    {"tiny_mass_1e-17",
     "compressed keys hold 1e-17 of each head's mass: a floor of 1e-10 erases the target",
     CG_LAYOUT_THD,
     CG_F32,
     4,
     16,
     4,
     16,
     4,
     8,
     3,
     2,
     {24, 17},
     .change = leave_1e_17},
    {"tiny_mass_1e-80",
     "1e-80 of the mass: below f32, exact when normalised in logarithms",
     CG_LAYOUT_THD,
     CG_F32,
     4,
     16,
     4,
     16,
     4,
     8,
     3,
     2,
     {24, 17},
     .change = leave_1e_80},
    {"far_student",
     "predictions below 1e-10: where an epsilon in the logarithms changes value and gradient",
     CG_LAYOUT_THD,
     CG_F32,
     4,
     16,
     4,
     16,
     4,
     8,
     4,
     2,
     {24, 17},
     .change = sharpen_scores},
    {"one_head",
     "one head: the denominator cancels, so teacher=full, sink, compressed are one number",
     CG_LAYOUT_THD,
     CG_F32,
     1,
     16,
     4,
     16,
     4,
     8,
     3,
     2,
     {24, 17}},
    {"all_selected",
     "the list is longer than any row sees: sparse and dense are one number, selection is untested",
     CG_LAYOUT_THD,
     CG_F32,
     4,
     16,
     4,
     16,
     4,
     8,
     64,
     2,
     {24, 17}},
    {"global_base_2",
     "lists of rows of the whole compressed_kv, LSE in base 2",
     CG_LAYOUT_THD,
     CG_F32,
     4,
     16,
     4,
     16,
     4,
     8,
     3,
     3,
     {21, 3, 30},
     .global_lists = true,
     .lse_base_2 = true},
    {"bf16",
     "inputs, output and gradients in bf16; loss, target and LSE in f32",
     CG_LAYOUT_THD,
     CG_BF16,
     4,
     16,
     4,
     16,
     4,
     8,
     3,
     2,
     {40, 24}},
    {"f64", "everything in f64", CG_LAYOUT_THD, CG_F64, 4, 16, 4, 16, 4, 8, 3, 3, {21, 3, 30}},
    {"ratio_128", "ratio 128", CG_LAYOUT_THD, CG_F32, 2, 16, 4, 16, 128, 16, 1, 2, {400, 150}},
    {"middle", "two segments of 128 and 64 rows", CG_LAYOUT_THD, CG_F32, 4, 32, 8, 16, 4, 16, 8, 2, {128, 64}},
    {"large",
     "8 heads, 512 rows",
     CG_LAYOUT_THD,
     CG_F32,
     8,
     32,
     8,
     32,
     4,
     32,
     16,
     3,
     {300, 112, 100},
     {300, 100, 99}},
};

enum { N_MEMBERS = sizeof members / sizeof members[0] };

static bool write_member(const char *folder, const member *m, const cg_dump_contracts *contracts,
                         const cg_backend *backend, uint64_t seed, double *loss, int64_t *n_rows,
                         cg_error *error) {
    cg_dump_case c = {.n_heads = m->n_heads,
                      .head_dim = m->head_dim,
                      .index_heads = m->index_heads,
                      .index_dim = m->index_dim,
                      .ratio = m->ratio,
                      .window = m->window,
                      .topk = m->topk,
                      .softmax_scale = 1 / sqrt((double)m->head_dim),
                      .loss_coeff = 0.5};
    cg_dump_form form = {.layout = m->layout,
                         .dtype = m->dtype,
                         .global_lists = m->global_lists,
                         .lse_base_2 = m->lse_base_2,
                         .seed = seed};
    bool padded = false;
    for (int b = 0; b < m->n_segments; b++) padded |= m->real[b] > 0;
    cg_dump_lengths lengths = {m->n_segments, m->physical, padded ? m->real : NULL, m->behind};
    cg_dump_results results = {0};
    char path[4096];
    snprintf(path, sizeof path, "%s/%s.safetensors", folder, m->name);
    bool ok = cg_dump_case_random(&c, &lengths, seed, error);
    if (ok && m->change) m->change(&c, seed);
    if (ok) cg_dump_case_round(&c, m->dtype);
    ok = ok && cg_dump_compute(&c, contracts, backend, &results, error) &&
         cg_dump_write(path, &c, contracts, &results, &form, error);
    *loss = results.loss;
    *n_rows = c.n_rows;
    cg_dump_results_free(&results);
    cg_dump_case_free(&c);
    return ok;
}

bool cg_dump_set_write(const char *folder, const cg_dump_contracts *contracts, const cg_backend *backend,
                       uint64_t seed, cg_error *error) {
    if (!cg_folder_make(folder, error)) return false;
    char *text = NULL, contract[CG_CONTRACT_TEXT], path[4096];
    size_t bytes = 0;
    FILE *readme = open_memstream(&text, &bytes);
    if (!readme) return cg_fail(error, CG_FAILED, "out of memory while %s is written", folder);
    fprintf(readme,
            "# Dumps of graded difficulty\n\n"
            "Inputs (`in.*`) and answers (`out.*`, `grad.*`) of one CSA layer, made by `csagrad dump` with "
            "seed %llu.\n"
            "Read `in.*`, run your own code, compare with the rest; or put your own answers in their place and "
            "ask\n"
            "`csagrad check`. Settings stand in each file's `__metadata__`.\n\n"
            "Contract: `%s`\n\n| file | rows | loss | what it tests |\n| --- | ---: | ---: | --- |\n",
            (unsigned long long)seed, cg_contract_text(&contracts->value, contract, sizeof contract));
    bool ok = true;
    for (int i = 0; ok && i < N_MEMBERS; i++) {
        double loss = 0;
        int64_t n_rows = 0;
        ok = write_member(folder, &members[i], contracts, backend, seed, &loss, &n_rows, error);
        fprintf(readme, "| `%s.safetensors` | %lld | %.9g | %s |\n", members[i].name, (long long)n_rows, loss,
                members[i].what);
    }
    ok = !fclose(readme) && ok;
    snprintf(path, sizeof path, "%s/README.md", folder);
    cg_file_writer *writer = ok ? cg_file_begin(path, error) : NULL;
    if (ok) ok = writer && cg_file_write(writer, text, bytes, error);
    if (ok)
        ok = cg_file_commit(writer, error);
    else
        cg_file_cancel(writer);
    free(text);
    return ok;
}
