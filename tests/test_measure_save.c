/* What is saved of a measured part or step: the inputs, and what came of them, against plain loops over the file. */
#include "tests/program.h"

#include "core/files/safetensors.h"
#include "models/measure/measure.h"

#include <math.h>

static const char *path_of(const char *name) {
    static char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static cg_workload one_layer(cg_part part, int64_t seq_len) {
    cg_workload w = {.part = part};
    ck_assert(cg_config_dims("toy", &w.config));
    w.config.seq_len = seq_len;
    w.config.dtype = CG_F64;
    return w;
}

static cg_workload small_step(void) {
    cg_workload w = {.config = cg_config_toy(), .part = CG_PART_STEP};
    w.config.seq_len = 144;
    w.config.batch_size = 2;
    w.config.dtype = CG_F64;
    return w;
}

static cg_safetensors *saved(const cg_workload *w) {
    cg_error error = {0};
    if (!cg_measure_save(w, path_of("saved"), &error)) ck_abort_msg("%s", error.text);
    cg_safetensors *file = cg_safetensors_open(path_of("saved"), &error);
    if (!file) ck_abort_msg("%s", error.text);
    return file;
}

static const void *data(const cg_safetensors *file, const char *name, cg_dtype dtype, int64_t count) {
    const cg_tensor *t = cg_safetensors_find(file, name);
    if (!t) ck_abort_msg("%s is absent", name);
    ck_assert_int_eq(t->dtype, dtype);
    ck_assert_int_eq(cg_shape_count(&t->shape), count);
    return t->data;
}

static const double *reals(const cg_safetensors *file, const char *name, int64_t count) {
    return data(file, name, CG_F64, count);
}

static double loss_measured(const cg_workload *w) {
    cg_step step;
    cg_measurement m;
    cg_error error = {0};
    if (!cg_measure_run(w, 1, &step, &m, &error)) ck_abort_msg("%s", error.text);
    cg_step_free(&step);
    cg_measurement_free(&m);
    return m.loss;
}

static void expect_near(const char *what, double got, double expected) {
    if (!(fabs(got - expected) <= 1e-11 * fabs(expected)))
        ck_abort_msg("%s is %.15g, expected %.15g", what, got, expected);
}

static double dot(const double *a, const double *b, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

/* ---- the indexer's loss ---- */

enum { T = 300, C = T / CG_RATIO_CSA, HI = 8, DI = 32, K = 64, H = 8, D = 64, W = 64 }; /* toy dims; C > K */

typedef struct indexer {
    const double *q, *w, *k;
} indexer;

static double score(const indexer *ix, int64_t t, int64_t c) {
    double sum = 0;
    for (int64_t h = 0; h < HI; h++)
        sum += ix->w[t * HI + h] * fmax(0, dot(ix->q + (t * HI + h) * DI, ix->k + c * DI, DI));
    return sum;
}

/* Chosen are visible rows, each once, and none that was left out scores higher. Returns how many. */
static int expect_best(const indexer *ix, const int32_t *chosen, int64_t t) {
    int n = 0;
    int64_t visible = (t + 1) / CG_RATIO_CSA;
    bool is_chosen[C] = {false};
    double least = INFINITY;
    for (; n < K && chosen[n] >= 0; n++) {
        ck_assert(chosen[n] < visible && !is_chosen[chosen[n]]);
        is_chosen[chosen[n]] = true;
        least = fmin(least, score(ix, t, chosen[n]));
    }
    ck_assert_int_eq(n, visible < K ? visible : K);
    for (int64_t c = 0; c < visible; c++) ck_assert(is_chosen[c] || score(ix, t, c) <= least);
    return n;
}

START_TEST(an_indexer_loss) {
    cg_workload w = one_layer(CG_PART_INDEXER_LOSS, T);
    cg_safetensors *file = saved(&w);
    indexer ix = {reals(file, "in.layer0/attn/indexer/q", T * HI * DI),
                  reals(file, "in.layer0/attn/indexer/w", T * HI),
                  reals(file, "in.layer0/attn/indexer/k", C * DI)};
    const double *teacher = reals(file, "in.layer0/attn/indexer/teacher", T * K),
                 *dw = reals(file, "grad.layer0/attn/indexer/w", T * HI);
    const int32_t *topk = data(file, "out.layer0/attn/indexer/topk", CG_I32, T * K);
    double loss = 0;
    for (int64_t t = 0; t < T; t++) {
        const int32_t *chosen = topk + t * K;
        int n = expect_best(&ix, chosen, t);
        double s[K], sum = 0, dw0 = 0;
        for (int j = 0; j < n; j++) sum += exp(s[j] = score(&ix, t, chosen[j]));
        for (int j = 0; j < n; j++) {
            double target = teacher[t * K + j], p = exp(s[j]) / sum;
            loss += w.config.indexer_loss_coeff * target * (log(target) - log(p));
            dw0 += w.config.indexer_loss_coeff * (p - target) *
                   fmax(0, dot(ix.q + t * HI * DI, ix.k + chosen[j] * DI, DI));
        }
        ck_assert_double_le(fabs(dw[t * HI] - dw0), 1e-12 * (1 + fabs(dw0)));
    }
    expect_near("the loss", *reals(file, "out.layer0/attn/indexer/loss", 1), loss);
    expect_near("the measured loss", loss_measured(&w), loss);
    reals(file, "grad.layer0/attn/indexer/q", T * HI * DI);
    reals(file, "grad.layer0/attn/indexer/k", C * DI);
    ck_assert_ptr_null(cg_safetensors_find(file, "grad.layer0/attn/indexer/teacher"));
    ck_assert_ptr_nonnull(strstr(cg_safetensors_metadata(file, "config"), "\"index_topk\": 64"));
    cg_safetensors_close(file);
}
END_TEST

/* The spelled-out form has other ops and the same names. */
START_TEST(another_form) {
    cg_workload w = one_layer(CG_PART_ATTENTION_LOSS, 64);
    cg_safetensors *stream = saved(&w);
    strcpy(w.config.policy, "save");
    cg_safetensors *spelled = saved(&w);
    int n = cg_safetensors_count(stream);
    ck_assert_int_eq(cg_safetensors_count(spelled), n);
    for (int i = 0; i < n; i++)
        ck_assert_ptr_nonnull(cg_safetensors_find(spelled, cg_safetensors_at(stream, i)->name));
    expect_near("the loss", *reals(spelled, "out.layer0/attn/indexer/loss", 1),
                *reals(stream, "out.layer0/attn/indexer/loss", 1));
    cg_safetensors_close(stream);
    cg_safetensors_close(spelled);
}
END_TEST

/* ---- attention ---- */

START_TEST(an_attention) {
    cg_workload w = one_layer(CG_PART_ATTENTION, T);
    cg_safetensors *file = saved(&w);
    const double *q = reals(file, "in.layer0/attn/q", T * H * D), *kv = reals(file, "in.layer0/attn/kv", T * D),
                 *ckv = reals(file, "in.layer0/attn/ckv", C * D), *sink = reals(file, "in.layer0/attn/sink", H),
                 *out = reals(file, "out.layer0/attn/out", T * H * D),
                 *dout = reals(file, "in.layer0/attn/dout", T * H * D),
                 *dsink = reals(file, "grad.layer0/attn/sink", H),
                 *teacher = reals(file, "out.layer0/attn/teacher", T * K);
    const int32_t *topk = data(file, "in.layer0/attn/indexer/topk", CG_I32, T * K);
    double dsink0 = 0, scale = 1 / sqrt(D);
    for (int64_t t = 0; t < T; t++) {
        double z = exp(sink[0]), o[D] = {0}, shares = 0;
        const double *q0 = q + t * H * D;
        for (int64_t s = t < W ? 0 : t - W + 1; s <= t; s++) {
            double e = exp(scale * dot(q0, kv + s * D, D));
            z += e;
            for (int64_t d = 0; d < D; d++) o[d] += e * kv[s * D + d];
        }
        for (int64_t j = 0; j < K; j++) {
            if (topk[t * K + j] < 0) continue;
            const double *key = ckv + topk[t * K + j] * D;
            double e = exp(scale * dot(q0, key, D));
            z += e;
            for (int64_t d = 0; d < D; d++) o[d] += e * key[d];
        }
        for (int64_t d = 0; d < D; d++) ck_assert_double_le(fabs(out[t * H * D + d] - o[d] / z), 1e-12);
        dsink0 -= exp(sink[0]) / z * dot(out + t * H * D, dout + t * H * D, D);
        for (int64_t j = 0; j < K; j++) shares += teacher[t * K + j];
        ck_assert_double_le(fabs(shares - (t >= CG_RATIO_CSA - 1)), 1e-12);
    }
    expect_near("the sink's gradient", dsink[0], dsink0);
    cg_safetensors_close(file);
}
END_TEST

/* ---- a step ---- */

static bool is_gradient(const char *name) { return !strncmp(name, "grad.", 5); }

START_TEST(a_step) {
    cg_workload w = small_step();
    cg_safetensors *file = saved(&w);
    const int64_t rows = w.config.batch_size * w.config.seq_len;
    double squares = 0;
    int n_gradients = 0;
    for (int i = 0; i < cg_safetensors_count(file); i++) {
        const cg_named_tensor *t = cg_safetensors_at(file, i);
        if (!is_gradient(t->name)) continue;
        const cg_tensor *param = cg_safetensors_find(file, t->name + 5);
        ck_assert_ptr_nonnull(param);
        ck_assert(cg_shape_equal(&param->shape, &t->tensor.shape));
        int64_t n = cg_shape_count(&t->tensor.shape);
        squares += dot(t->tensor.data, t->tensor.data, n);
        n_gradients++;
    }
    ck_assert_int_gt(n_gradients, 40);
    expect_near("the norm of all gradients", *reals(file, "out.grad_norm", 1), sqrt(squares));
    double lm = *reals(file, "out.lm_loss", 1), row = *reals(file, "out.indexer_loss", 1);
    expect_near("the measured loss", loss_measured(&w), lm + row);
    /* one step down the gradient, and the parameters of the file are those before it */
    double next = *reals(file, "out.next_lm_loss", 1), next_indexer = *reals(file, "out.next_indexer_loss", 1);
    ck_assert(next < lm && next > 0.9 * lm && next_indexer != row && next_indexer > 0);
    const double *norm = reals(file, "layers.0.attn_norm.weight", w.config.hidden_size);
    for (int64_t i = 0; i < w.config.hidden_size; i++) ck_assert(norm[i] == 1);
    const int32_t *tokens = data(file, "in.tokens", CG_I32, rows),
                  *targets = data(file, "in.targets", CG_I32, rows);
    ck_assert(targets[0] == tokens[1] && targets[w.config.seq_len - 1] == -1);
    data(file, "out.layer1/attn/indexer/topk", CG_I32, rows * w.config.index_topk);
    data(file, "out.layer3/attn/indexer/topk", CG_I32, rows * w.config.index_topk);
    cg_safetensors_close(file);
}
END_TEST

START_TEST(a_step_without_optimizer) {
    cg_workload w = small_step();
    w.no_optimizer = true;
    cg_safetensors *file = saved(&w);
    ck_assert_ptr_nonnull(cg_safetensors_find(file, "grad.head.weight"));
    ck_assert_ptr_null(cg_safetensors_find(file, "out.grad_norm"));
    ck_assert_ptr_null(cg_safetensors_find(file, "out.next_lm_loss"));
    cg_safetensors_close(file);
}
END_TEST

START_TEST(no_place_for_it) {
    cg_workload w = one_layer(CG_PART_INDEXER_LOSS, 64);
    cg_error error = {0};
    ck_assert(!cg_measure_save(&w, path_of("absent/x"), &error));
    ck_assert_int_eq(error.code, CG_BAD_INPUT);
    ck_assert_ptr_nonnull(strstr(error.text, "absent/x"));
    w.config.support = CG_SUPPORT_DENSE;
    ck_assert(!cg_measure_save(&w, path_of("dense"), &error));
    ck_assert_int_ne(access(path_of("dense"), F_OK), 0);
}
END_TEST

/* ---- csagrad bench --save ---- */

START_TEST(the_program) {
    json_t *root =
        good_json("bench --parts indexer-loss,attention --seqs 64,80 --runs 1 --save made/here --json");
    const json_t *rows = json_object_get(root, "rows");
    ck_assert_uint_eq(json_array_size(rows), 4);
    for (size_t i = 0; i < 4; i++) {
        const json_t *row = json_array_get(rows, i), *loss = json_object_get(row, "loss");
        const char *part = json_string_value(json_object_get(row, "name"));
        char name[128];
        snprintf(name, sizeof name, "made/here/%s-toy-%d-f32.safetensors", part,
                 (int)json_integer_value(json_object_get(row, "seq")));
        cg_error error = {0};
        cg_safetensors *file = cg_safetensors_open(path_of(name), &error);
        if (!file) ck_abort_msg("%s", error.text);
        ck_assert_str_eq(json_string_value(json_object_get(row, "policy")), "stream");
        ck_assert_int_ge(json_integer_value(json_object_get(row, "rss_peak_bytes")), 0);
        if (i < 2)
            ck_assert_float_eq((float)json_real_value(loss),
                               *(const float *)data(file, "out.layer0/attn/indexer/loss", CG_F32, 1));
        else
            ck_assert(json_is_null(loss)); /* the attention alone has none */
        cg_safetensors_close(file);
    }
    json_decref(root);
    /* "out" is a file, the program's output */
    bad("bench --parts indexer-loss --seqs 64 --runs 1 --save out/x", CG_BAD_INPUT, "the folder out");
}
END_TEST

START_TEST(remove_files) {
    char command[128];
    snprintf(command, sizeof command, "rm -r %s", folder);
    ck_assert_int_eq(system(command), 0);
}
END_TEST

int main(void) {
    if (!mkdtemp(folder)) return EXIT_FAILURE;
    const TTest *const tests[] = {an_indexer_loss,          another_form,    an_attention, a_step,
                                  a_step_without_optimizer, no_place_for_it, the_program,  remove_files};
    return suite_run("measure_save", tests, (int)(sizeof tests / sizeof *tests));
}
