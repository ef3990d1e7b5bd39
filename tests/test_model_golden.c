/* The attention layers against those of the transformers library's DeepSeek-V4 (tests/data/layer_*.safetensors,
 * made by tools/python/make_layer_vectors.py), for the three kinds of layer: output, index scores, selection,
 * indexer loss, and the gradients of sum(attended * dout) plus that loss at the residual stream and at every
 * weight. The loss alone is not the library's own: it stands on the library's attention weights and scores.
 *
 * A model of one layer gets the library's residual rows as its embedding table and one token per row.
 *
 * The library never rotates index queries and keys by a Hadamard matrix. The matrix is orthonormal, so the
 * selection and all that follows must be the same with index_hadamard.
 */
#include "tests/support.h"

#include "models/dsv4/dsv4.h"

typedef struct layer_run {
    cg_safetensors *file;
    cg_config config;
    cg_graph *graph;
    cg_dsv4 *model;
    cg_value *dout, *loss_seed, *grads[CG_MAX_PARAMS];
    cg_value *scores; /* spelled out: [T, C] */
    cg_plan *plan;
    cg_exec *exec;
    char what[128];
} layer_run;

/* The settings of a file stand in its metadata under the names of config keys. */
static cg_config config_from(const cg_safetensors *file) {
    cg_config config = cg_config_toy();
    cg_config_key key;
    cg_error error = {0};
    int n = 0;
    for (int i = 0; cg_config_key_at(i, &key); i++) {
        const char *text = cg_safetensors_metadata(file, key.name);
        if (!text) continue;
        if (!cg_config_set(&config, key.name, text, &error)) ck_abort_msg("%s", error.text);
        n++;
    }
    ck_assert_int_ge(n, 20);
    return config;
}

static void build(layer_run *r, cg_form form, bool attend_all) {
    cg_error error = {0};
    if (!cg_config_check(&r->config, &error)) ck_abort_msg("%s", error.text);
    int64_t n_rows = r->config.vocab_size;
    cg_dsv4_options options = {.n_rows = n_rows,
                               .max_segments = 1,
                               .max_seqlen = n_rows,
                               .form = form,
                               .with_loss = true,
                               .attend_all = attend_all};
    cg_value *wrt[CG_MAX_PARAMS];
    r->graph = cg_graph_new(&cg_all_ops);
    r->model = calloc(1, sizeof *r->model);
    ck_assert(r->graph && r->model);
    if (cg_dsv4_build(r->graph, &r->config, &options, r->model)) {
        const cg_dsv4_layer *layer = &r->model->layers[0];
        cg_value *outputs[2] = {cg_keep(layer->attended), cg_keep(layer->indexer_loss)};
        cg_keep(layer->topk);
        if (layer->ratio == CG_RATIO_CSA && form == CG_FORM_SPELLED && !attend_all)
            r->scores = cg_keep(layer->topk->producer->in[0]);
        for (int p = 0; p < r->model->n_params; p++) wrt[p] = r->model->params[p].value;
        r->dout = cg_leaf(r->graph, CG_LEAF_INPUT, "dout", r->config.dtype, layer->attended->shape);
        r->loss_seed = cg_leaf(r->graph, CG_LEAF_INPUT, "loss_seed", r->config.dtype, CG_SHAPE(1));
        cg_autodiff(r->graph, outputs, (cg_value *[]){r->dout, r->loss_seed}, layer->indexer_loss ? 2 : 1, wrt,
                    r->model->n_params, r->grads);
        for (int p = 0; p < r->model->n_params; p++) cg_keep(r->grads[p]);
    }
    if (cg_graph_error(r->graph)) ck_abort_msg("%s", cg_graph_error(r->graph)->text);
    r->plan = cg_plan_make(r->graph, NULL, &error);
    if (r->plan) r->exec = cg_exec_new(r->plan, &(cg_exec_options){.separate = true, .poison = true}, &error);
    if (!r->exec) ck_abort_msg("%s", error.text);
}

/* Write a tensor of the file into a leaf of the same shape. */
static void load(layer_run *r, const char *name, const cg_value *leaf) {
    const cg_tensor *tensor = cg_safetensors_find(r->file, name);
    if (!tensor) ck_abort_msg("no tensor %s", name);
    if (!cg_shape_equal(&tensor->shape, &leaf->shape)) ck_abort_msg("%s has another shape", name);
    double *data = golden_get(r->file, name, 0);
    for (int64_t i = 0; i < cg_shape_count(&leaf->shape); i++)
        cg_real_set(leaf->dtype, cg_exec_data(r->exec, leaf), i, data[i]);
    free(data);
}

/* Weights behind the attention (feed-forward, head) are not in the file and stay 0. */
static void feed(layer_run *r) {
    const cg_dsv4 *m = r->model;
    int n_loaded = 0;
    for (int p = 0; p < m->n_params; p++) {
        char name[256];
        cg_param_name(m->params[p].value, name, sizeof name);
        if (cg_safetensors_find(r->file, name)) {
            load(r, name, m->params[p].value);
            n_loaded++;
        } else {
            ck_assert(!strstr(name, "attn"));
        }
    }
    ck_assert_int_eq(n_loaded, m->layers[0].ratio == 0 ? 10 : m->layers[0].ratio == CG_RATIO_HCA ? 14 : 20);
    load(r, "in.dout", r->dout);
    cg_real_set(r->config.dtype, cg_exec_data(r->exec, r->loss_seed), 0, 1);
    int32_t n_rows = (int32_t)r->config.vocab_size;
    int32_t *tokens = cg_exec_data(r->exec, m->tokens), *targets = cg_exec_data(r->exec, m->targets);
    for (int32_t t = 0; t < n_rows; t++) {
        tokens[t] = t;
        targets[t] = -1;
    }
    memcpy(cg_exec_data(r->exec, m->cu_seqlens), (int32_t[]){0, n_rows}, 2 * sizeof(int32_t));
    memcpy(cg_exec_data(r->exec, m->seqlens), &n_rows, sizeof n_rows);
}

/* Which rows attention and indexer loss are over. */
typedef enum row_choice { SELECTED, SELECTED_DENSE_LOSS, ALL_VISIBLE } row_choice;

static layer_run run_new(const char *name, cg_dtype dtype, cg_form form, bool hadamard, row_choice choice) {
    layer_run r = {.file = golden_open(name)};
    cg_error error = {0};
    snprintf(r.what, sizeof r.what, "%s, %s, %s%s%s", name, dtype == CG_F32 ? "f32" : "f64",
             form == CG_FORM_STREAM ? "streamed" : "spelled out", hadamard ? ", Hadamard" : "",
             choice == SELECTED      ? ""
             : choice == ALL_VISIBLE ? ", attending to all"
                                     : ", dense loss");
    r.config = config_from(r.file);
    r.config.dtype = dtype;
    r.config.index_hadamard = hadamard;
    if (choice == SELECTED_DENSE_LOSS) r.config.support = CG_SUPPORT_DENSE;
    build(&r, form, choice == ALL_VISIBLE);
    feed(&r);
    if (!cg_exec_run(r.exec, CG_ALL_PASSES, &error)) ck_abort_msg("%s: %s", r.what, error.text);
    return r;
}

static void run_free(layer_run *r) {
    cg_exec_free(r->exec);
    cg_plan_free(r->plan);
    cg_graph_free(r->graph);
    free(r->model);
    cg_safetensors_close(r->file);
}

/* A value against a tensor of the file, relative to the tensor's largest entry. */
static void expect_tensor(const layer_run *r, const char *name, const cg_value *value, double bound) {
    char what[384];
    snprintf(what, sizeof what, "%s: %s", r->what, name);
    double *want = golden_get(r->file, name, 0);
    int64_t n = cg_shape_count(&value->shape);
    ck_assert_int_eq(n, cg_shape_count(&cg_safetensors_find(r->file, name)->shape));
    double *got = malloc((size_t)n * sizeof *got);
    for (int64_t i = 0; i < n; i++) got[i] = cg_real_get(value->dtype, cg_exec_data(r->exec, value), i);
    expect_close(what, got, want, n, bound);
    free(got);
    free(want);
}

static int falling(const void *a, const void *b) {
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x < y) - (x > y);
}

/* The same rows, in any order; the library's list is no longer than there are compressed rows. Returns the number
 * of rows that see more than they select. */
static int expect_selection(const layer_run *r) {
    const cg_value *topk = r->model->layers[0].topk;
    int32_t *want = golden_get_i32(r->file, "out.topk");
    const int32_t *got = cg_exec_data(r->exec, topk);
    int64_t n_rows = cg_dim(topk, 0), width = cg_dim(topk, 1),
            n_want = cg_safetensors_find(r->file, "out.topk")->shape.dims[1];
    int n_choosing = 0;
    ck_assert(n_want <= width && width <= 64);
    for (int64_t t = 0; t < n_rows; t++) {
        int32_t row[64], want_row[64];
        for (int64_t k = 0; k < width; k++) {
            row[k] = got[t * width + k];
            want_row[k] = k < n_want ? want[t * n_want + k] : -1;
        }
        qsort(row, (size_t)width, sizeof *row, falling);
        qsort(want_row, (size_t)width, sizeof *row, falling);
        if (memcmp(row, want_row, (size_t)width * sizeof *row))
            ck_abort_msg("%s: row %lld selects other rows", r->what, (long long)t);
        n_choosing += (t + 1) / CG_RATIO_CSA > width;
    }
    free(want);
    return n_choosing;
}

/* Each gradient of the file, and exactly 0 behind the attention, of which the file has none. */
static void expect_gradients(const layer_run *r, double bound) {
    for (int p = 0; p < r->model->n_params; p++) {
        char name[256] = "grad.";
        cg_param_name(r->model->params[p].value, name + 5, sizeof name - 5);
        const cg_value *grad = r->grads[p];
        if (cg_safetensors_find(r->file, name)) {
            expect_tensor(r, name, grad, bound);
            continue;
        }
        for (int64_t i = 0; i < cg_shape_count(&grad->shape); i++)
            if (cg_real_get(grad->dtype, cg_exec_data(r->exec, grad), i) != 0)
                ck_abort_msg("%s: %s is not 0", r->what, name);
    }
}

static void expect_layer(const char *name, row_choice choice, int n_choosing) {
    for (int i = 0; i < 8; i++) {
        layer_run r =
            run_new(name, i & 1 ? CG_F32 : CG_F64, i & 2 ? CG_FORM_SPELLED : CG_FORM_STREAM, i & 4, choice);
        const cg_dsv4_layer *layer = &r.model->layers[0];
        double bound = r.config.dtype == CG_F64 ? 1e-12 : 1e-5;
        expect_tensor(&r, "out.attended", layer->attended, bound);
        if (layer->ratio == CG_RATIO_CSA) {
            ck_assert_int_eq(expect_selection(&r), n_choosing);
            expect_tensor(&r, "out.indexer_loss", layer->indexer_loss, bound);
        }
        if (r.scores) expect_tensor(&r, "out.scores", r.scores, bound);
        expect_gradients(&r, bound);
        run_free(&r);
    }
}

START_TEST(window_layer_is_the_library_s) { expect_layer("layer_sliding", SELECTED, 0); }
END_TEST

/* Rows 23 to 74 see six compressed rows or more, and select five. */
START_TEST(csa_layer_is_the_library_s) { expect_layer("layer_compressed_sparse", SELECTED, 52); }
END_TEST

/* With everything visible selected, the three ways to have it must agree. */
START_TEST(csa_layer_that_selects_all_is_the_library_s) {
    for (int choice = SELECTED; choice <= ALL_VISIBLE; choice++)
        expect_layer("layer_compressed_all", (row_choice)choice, 0);
}
END_TEST

START_TEST(hca_layer_is_the_library_s) { expect_layer("layer_heavily_compressed", SELECTED, 0); }
END_TEST

SUITE("model_golden", window_layer_is_the_library_s, csa_layer_is_the_library_s,
      csa_layer_that_selects_all_is_the_library_s, hca_layer_is_the_library_s)
