/* Dumps: they read back, say what the ops and the stored vectors say, do not depend on layout or threads, and refuse
 * what they cannot hold. */
#include "tests/support.h"

#include <stdint.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/base/file.h"
#include "models/check/dump_write.h"

static char folder[] = "/tmp/csagrad_dump_XXXXXX";

static const char *at(const char *name) {
    static char path[4][256];
    static int next;
    next = (next + 1) % 4;
    snprintf(path[next], sizeof path[0], "%s/%s", folder, name);
    return path[next];
}

static cg_dump_case new_case(const cg_dump_lengths *lengths, int64_t heads, int64_t topk, uint64_t seed) {
    cg_dump_case c = {.n_heads = heads,
                      .head_dim = 6,
                      .index_heads = 3,
                      .index_dim = 4,
                      .ratio = 4,
                      .window = 5,
                      .topk = topk,
                      .softmax_scale = 0.4,
                      .loss_coeff = 0.7};
    cg_error error = {0};
    if (!cg_dump_case_random(&c, lengths, seed, &error)) ck_abort_msg("%s", error.text);
    return c;
}

static cg_dump_contracts contracts_of(const char *text) {
    cg_dump_contracts contracts = {0};
    cg_error error = {0};
    if (!cg_contract_parse(text, &contracts.value, &error)) ck_abort_msg("%s", error.text);
    contracts.gradient = contracts.value;
    return contracts;
}

static cg_dump_results compute(const cg_dump_case *c, const cg_dump_contracts *contracts) {
    cg_dump_results r;
    cg_error error = {0};
    if (!cg_dump_compute(c, contracts, NULL, &r, &error)) ck_abort_msg("%s", error.text);
    return r;
}

/* ---- against the ops ---- */

static void expect_same(const char *what, const cg_dump_case *c, const cg_dump_results *a,
                        const cg_dump_results *b) {
    int64_t T = c->n_rows, C = c->n_compressed, n = T * a->n_keys;
    ck_assert_int_eq(a->width, b->width);
    if (memcmp(a->topk, b->topk, (size_t)(T * a->width) * sizeof *a->topk))
        ck_abort_msg("%s: lists differ", what);
    expect_close("target", a->target, b->target, n, 1e-12);
    expect_close("log_predict", a->log_predict, b->log_predict, n, 1e-12);
    expect_close("kl", a->kl, b->kl, T, 1e-12);
    expect_close("loss", &a->loss, &b->loss, 1, 1e-12);
    expect_close("dq", a->grad_q_indexer, b->grad_q_indexer, T * c->index_heads * c->index_dim, 1e-12);
    expect_close("dw", a->grad_weights, b->grad_weights, T * c->index_heads, 1e-12);
    expect_close("dk", a->grad_k_indexer, b->grad_k_indexer, C * c->index_dim, 1e-12);
    expect_close("output", a->output, b->output, T * c->n_heads * c->head_dim, 1e-12);
    expect_close("lse", a->lse, b->lse, T * c->n_heads, 1e-12);
    expect_close("grad query", a->grad_query, b->grad_query, T * c->n_heads * c->head_dim, 1e-12);
}

START_TEST(rows_say_what_the_ops_say) {
    static const struct {
        const char *what;
        int n;
        int64_t physical[8], real[8], behind, topk;
    } shapes[] = {
        {"one segment", 1, {37}, {37}, 0, 3},
        {"segments of all kinds", 8, {0, 21, 0, 1, 1, 16, 5, 0}, {0, 21, 0, 1, 1, 16, 5, 0}, 0, 3},
        {"padding and rows behind", 4, {12, 24, 8, 4}, {9, 21, 0, 2}, 3, 3},
        {"a list longer than anything", 2, {13, 22}, {13, 22}, 0, 99},
        {"nothing selected", 1, {20}, {20}, 0, 0},
        {"nothing visible", 2, {3, 2}, {3, 1}, 1, 4},
        {"all padding", 1, {12}, {0}, 0, 2},
        {"no row", 1, {0}, {0}, 0, 2},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int64_t heads = 1; heads <= 4; heads++) {
            cg_dump_lengths lengths = {shapes[i].n, shapes[i].physical, shapes[i].real, shapes[i].behind};
            cg_dump_case c = new_case(&lengths, heads, shapes[i].topk, 11 + (uint64_t)i);
            cg_dump_contracts ops = contracts_of(""), by_rows = ops;
            by_rows.by_rows = true;
            cg_dump_results a = compute(&c, &by_rows), b = compute(&c, &ops);
            expect_same(shapes[i].what, &c, &a, &b);
            cg_dump_results_free(&a);
            cg_dump_results_free(&b);
            cg_dump_case_free(&c);
        }
}
END_TEST

/* ---- against the stored vectors ---- */

static int32_t *cumulated(const cg_safetensors *file, const char *name, int64_t n, int64_t length) {
    if (cg_safetensors_find(file, name)) return golden_get_i32(file, name);
    int32_t *cu = malloc((size_t)(n + 1) * sizeof *cu);
    for (int64_t b = 0; b <= n; b++) cu[b] = (int32_t)(b * length);
    return cu;
}

/* A stored vector's inputs as a case. */
static cg_dump_case case_of_vector(const cg_safetensors *file, int64_t *batch) {
    bool packed = !strcmp(cg_safetensors_metadata(file, "layout"), "thd");
    const cg_shape *q = &cg_safetensors_find(file, "in.query")->shape,
                   *g = &cg_safetensors_find(file, "in.q_indexer")->shape;
    *batch = packed ? 0 : q->dims[1];
    cg_dump_case c = {.n_segments =
                          packed ? cg_safetensors_find(file, "in.cu_seqlens_q")->shape.dims[0] - 1 : *batch,
                      .n_rows = packed ? q->dims[0] : q->dims[0] * *batch,
                      .n_heads = q->dims[q->n_dims - 2],
                      .head_dim = q->dims[q->n_dims - 1],
                      .index_heads = g->dims[g->n_dims - 2],
                      .index_dim = g->dims[g->n_dims - 1],
                      .ratio = (int64_t)golden_number(file, "ratio"),
                      .window = (int64_t)golden_number(file, "window"),
                      .topk = (int64_t)golden_number(file, "topk"),
                      .softmax_scale = golden_number(file, "softmax_scale"),
                      .loss_coeff = golden_number(file, "loss_coeff")};
    int64_t length = packed ? 0 : q->dims[0];
    c.cu_seqlens = cumulated(file, "in.cu_seqlens_q", c.n_segments, length);
    c.cu_compressed = cumulated(file, "in.cu_seqlens_compressed", c.n_segments, length / c.ratio);
    int32_t *real = cumulated(file, "in.cu_seqlens_q_real", c.n_segments, length);
    c.n_compressed = c.cu_compressed[c.n_segments];
    c.seqlens = malloc((size_t)(c.n_segments + 1) * sizeof *c.seqlens);
    for (int64_t b = 0; b < c.n_segments; b++) c.seqlens[b] = real[b + 1] - real[b];
    free(real);
    c.query = golden_get(file, "in.query", *batch);
    c.kv = golden_get(file, "in.kv", *batch);
    c.ckv = golden_get(file, "in.compressed_kv", *batch);
    c.sink = golden_get(file, "in.sink", 0);
    c.q_indexer = golden_get(file, "in.q_indexer", *batch);
    c.weights = golden_get(file, "in.weights", *batch);
    c.k_indexer = golden_get(file, "in.k_indexer", *batch);
    c.dout = calloc((size_t)(c.n_rows * c.n_heads * c.head_dim) + 1, sizeof *c.dout);
    return c;
}

/* [B,S,n] or packed columns [T,C] against columns counted from the segment's first. */
static void expect_columns(const cg_safetensors *file, const char *name, const cg_dump_case *c, int64_t batch,
                           const double *got, int64_t N) {
    double *want = golden_get(file, name, 0), *flat = calloc((size_t)(c->n_rows * N) + 1, sizeof *flat);
    for (int64_t b = 0; b < c->n_segments; b++)
        for (int64_t t = c->cu_seqlens[b]; t < c->cu_seqlens[b + 1]; t++)
            for (int64_t j = 0; j < c->cu_compressed[b + 1] - c->cu_compressed[b]; j++)
                flat[t * N + j] = want[batch ? t * N + j : t * c->n_compressed + c->cu_compressed[b] + j];
    expect_close(name, got, flat, c->n_rows * N, 1e-12);
    free(want);
    free(flat);
}

static void expect_vector(const cg_safetensors *file, const char *name, int64_t batch, const double *got,
                          int64_t n) {
    if (!cg_safetensors_find(file, name)) return;
    double *want = golden_get(file, name, batch);
    expect_close(name, got, want, n, 1e-12);
    free(want);
}

START_TEST(stored_vectors_come_out_again) {
    static const char *const names[] = {"sbhd_sparse_mean",       "sbhd_dense_mean", "sbhd_sparse_sum",
                                        "thd_sparse_mean",        "thd_dense_sum",   "topk_boundary",
                                        "thd_padded_sparse_mean", "ratio128_dense"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        cg_safetensors *file = golden_open(names[i]);
        int64_t batch;
        cg_dump_case c = case_of_vector(file, &batch);
        char text[128];
        snprintf(text, sizeof text, "support=%s,reduction=%s",
                 strcmp(cg_safetensors_metadata(file, "sparse"), "true") ? "dense" : "sparse",
                 strcmp(cg_safetensors_metadata(file, "reduction"), "sum") ? "mean-real" : "sum");
        cg_dump_contracts contracts = contracts_of(text);
        cg_dump_results r = compute(&c, &contracts);
        int32_t *topk = golden_get_i32(file, "out.topk");
        for (int64_t b = 0; b < c.n_segments; b++)
            for (int64_t k = c.cu_seqlens[b] * r.width; k < c.cu_seqlens[b + 1] * r.width; k++)
                if (r.topk[k] != (topk[k] < 0 ? -1 : topk[k] + c.cu_compressed[b]))
                    ck_abort_msg("%s: entry %lld of the lists is %d", names[i], (long long)k, r.topk[k]);
        free(topk);
        expect_columns(file, "oracle.target", &c, batch, r.target, r.n_keys);
        expect_vector(file, "oracle.kl", 0, r.kl, c.n_rows);
        expect_vector(file, "oracle.loss", 0, &r.loss, 1);
        expect_vector(file, "oracle.grad.q_indexer", batch, r.grad_q_indexer,
                      c.n_rows * c.index_heads * c.index_dim);
        expect_vector(file, "oracle.grad.weights", batch, r.grad_weights, c.n_rows * c.index_heads);
        expect_vector(file, "oracle.grad.k_indexer", batch, r.grad_k_indexer, c.n_compressed * c.index_dim);
        cg_dump_results_free(&r);
        cg_dump_case_free(&c);
        cg_safetensors_close(file);
    }
}
END_TEST

START_TEST(teachers_of_the_stored_vectors) {
    static const char *const teachers[] = {"full", "sink", "compressed"}, *const supports[] = {"sparse",
                                                                                               "dense"};
    cg_safetensors *file = golden_open("teacher_modes");
    int64_t batch;
    cg_dump_case c = case_of_vector(file, &batch);
    for (int i = 0; i < 6; i++) {
        char text[128], name[64];
        snprintf(text, sizeof text, "teacher=%s,support=%s", teachers[i / 2], supports[i % 2]);
        cg_dump_contracts contracts = contracts_of(text);
        cg_dump_results r = compute(&c, &contracts);
        snprintf(name, sizeof name, "oracle.target_%s_%s", teachers[i / 2], supports[i % 2]);
        ck_assert_ptr_nonnull(cg_safetensors_find(file, name));
        expect_columns(file, name, &c, batch, r.target, r.n_keys);
        snprintf(name, sizeof name, "oracle.loss_%s_%s", teachers[i / 2], supports[i % 2]);
        expect_vector(file, name, 0, &r.loss, 1);
        cg_dump_results_free(&r);
    }
    cg_dump_case_free(&c);
    cg_safetensors_close(file);
}
END_TEST

/* ---- files ---- */

static cg_safetensors *opened(const char *path) {
    cg_error error = {0};
    cg_safetensors *file = cg_safetensors_open(path, &error);
    if (!file) ck_abort_msg("%s", error.text);
    return file;
}

static void write_dump(const char *path, const cg_dump_case *c, const cg_dump_form *form,
                       const char *contract) {
    cg_dump_contracts contracts = contracts_of(contract);
    cg_dump_results r = compute(c, &contracts);
    cg_error error = {0};
    if (!cg_dump_write(path, c, &contracts, &r, form, &error)) ck_abort_msg("%s", error.text);
    cg_dump_results_free(&r);
}

/* Any real dtype of a file. */
static double element(const cg_tensor *tensor, int64_t i) {
    if (tensor->dtype == CG_I32) return ((const int32_t *)tensor->data)[i];
    if (tensor->dtype != CG_BF16) return cg_real_get(tensor->dtype, tensor->data, i);
    uint32_t bits = (uint32_t)((const uint16_t *)tensor->data)[i] << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static const cg_tensor *tensor_of(const cg_safetensors *file, const char *name) {
    const cg_tensor *tensor = cg_safetensors_find(file, name);
    if (!tensor) ck_abort_msg("no tensor %s", name);
    return tensor;
}

START_TEST(files_hold_what_was_computed) {
    static const cg_dtype dtypes[] = {CG_F32, CG_F64, CG_BF16};
    static const double bounds[] = {1e-7, 0, 4e-3};
    int64_t physical[] = {12, 0, 22}, real[] = {12, 0, 20};
    cg_dump_lengths lengths = {3, physical, real, 2};
    for (int d = 0; d < 3; d++) {
        cg_dump_case c = new_case(&lengths, 2, 3, 5);
        cg_dump_case_round(&c, dtypes[d]);
        cg_dump_form form = {.layout = CG_LAYOUT_THD, .dtype = dtypes[d], .global_lists = d == 1};
        write_dump(at("a"), &c, &form, "");
        cg_dump_contracts contracts = contracts_of("");
        cg_dump_results r = compute(&c, &contracts);
        cg_safetensors *file = opened(at("a"));
        const struct {
            const char *name;
            const double *want;
            int64_t n;
            bool exact; /* inputs were rounded before */
        } all[] = {
            {"in.query", c.query, c.n_rows * 12, true},
            {"in.kv", c.kv, c.n_rows * 6, true},
            {"in.compressed_kv", c.ckv, c.n_compressed * 6, true},
            {"in.sink", c.sink, 2, true},
            {"in.q_indexer", c.q_indexer, c.n_rows * 12, true},
            {"in.weights", c.weights, c.n_rows * 3, true},
            {"in.k_indexer", c.k_indexer, c.n_compressed * 4, true},
            {"in.dout", c.dout, c.n_rows * 12, true},
            {"out.output", r.output, c.n_rows * 12, false},
            {"grad.query", r.grad_query, c.n_rows * 12, false},
            {"grad.kv", r.grad_kv, c.n_rows * 6, false},
            {"grad.compressed_kv", r.grad_ckv, c.n_compressed * 6, false},
            {"grad.sink", r.grad_sink, 2, false},
            {"grad.q_indexer", r.grad_q_indexer, c.n_rows * 12, false},
            {"grad.weights", r.grad_weights, c.n_rows * 3, false},
            {"grad.k_indexer", r.grad_k_indexer, c.n_compressed * 4, false},
            {"out.loss", &r.loss, 1, false},
        };
        for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
            const cg_tensor *tensor = tensor_of(file, all[i].name);
            ck_assert_int_eq(cg_shape_count(&tensor->shape), all[i].n);
            double *got = malloc((size_t)all[i].n * sizeof *got);
            for (int64_t k = 0; k < all[i].n; k++) got[k] = element(tensor, k);
            expect_close(all[i].name, got, all[i].want, all[i].n, all[i].exact ? 0 : bounds[d]);
            free(got);
        }
        const cg_tensor *lse = tensor_of(file, "out.non_compressed_lse"),
                        *target = tensor_of(file, "out.target"), *topk = tensor_of(file, "out.topk");
        ck_assert_int_eq(lse->shape.dims[0], 2);
        ck_assert_int_eq(target->shape.dims[1], 3 + 5);
        for (int64_t t = 0; t < c.n_rows; t++) {
            int64_t first = t < 12 ? 0 : 3, n = t < 12 ? 3 : t < 34 ? 5 : 0;
            for (int64_t h = 0; h < 2; h++)
                ck_assert_double_eq_tol(element(lse, h * c.n_rows + t), r.window_lse[t * 2 + h], 1e-6);
            for (int64_t j = 0; j < 8; j++) {
                double want = j >= first && j < first + n ? r.target[t * 5 + j - first] : 0;
                ck_assert_double_eq_tol(element(target, t * 8 + j), want, 1e-7);
            }
            for (int64_t k = 0; k < 3; k++) {
                int32_t want = r.topk[t * 3 + k];
                if (want >= 0 && !form.global_lists) want -= (int32_t)first;
                ck_assert_int_eq((int)element(topk, t * 3 + k), want);
            }
        }
        ck_assert_str_eq(cg_safetensors_metadata(file, "index"), form.global_lists ? "global" : "local");
        cg_safetensors_close(file);
        cg_dump_results_free(&r);
        cg_dump_case_free(&c);
    }
}
END_TEST

/* sbhd, bshd and thd hold the same numbers. */
START_TEST(layouts_are_permutations) {
    enum { S = 18, B = 3, H = 2 };
    int64_t physical[B] = {S, S, S};
    cg_dump_lengths lengths = {B, physical, NULL, 0};
    cg_dump_case c = new_case(&lengths, H, 3, 9);
    cg_dump_case_round(&c, CG_F32);
    cg_safetensors *files[CG_LAYOUTS];
    for (int l = 0; l < CG_LAYOUTS; l++) {
        cg_dump_form form = {.layout = (cg_dump_layout)l, .dtype = CG_F32};
        write_dump(at(cg_dump_layout_names[l]), &c, &form, "support=dense");
        files[l] = opened(at(cg_dump_layout_names[l]));
    }
    int compared = 0;
    for (int i = 0; i < cg_safetensors_count(files[CG_LAYOUT_SBHD]); i++) {
        const cg_named_tensor *named = cg_safetensors_at(files[CG_LAYOUT_SBHD], i);
        const cg_tensor *a = &named->tensor, *b = tensor_of(files[CG_LAYOUT_BSHD], named->name),
                        *packed = tensor_of(files[CG_LAYOUT_THD], named->name);
        int64_t n = cg_shape_count(&a->shape);
        ck_assert_int_eq(cg_shape_count(&b->shape), n);
        compared++;
        bool by_batch = strstr(named->name, "lse") || strstr(named->name, "topk") ||
                        strstr(named->name, "target") ||
                        strstr(named->name, "log_predict"); /* [B, ...] in both */
        bool keys = strstr(named->name, "k_indexer") || strstr(named->name, "compressed_kv");
        int64_t steps = keys ? S / 4 : S, width = n / (steps * B);
        if (n == 1 || n == H) { /* loss, sink */
            for (int64_t k = 0; k < n; k++) ck_assert(element(a, k) == element(b, k));
            continue;
        }
        for (int64_t k = 0; k < n; k++) {
            int64_t s = k / width / B, in_batch = k / width % B;
            int64_t other = by_batch ? k : (in_batch * steps + s) * width + k % width;
            if (element(a, k) != element(b, other))
                ck_abort_msg("%s differs between sbhd and bshd", named->name);
        }
        if (strstr(named->name, "lse")) {
            for (int64_t k = 0; k < n; k++)
                ck_assert(element(b, k) == element(packed, k / S % H * S * B + k / S / H * S + k % S));
        } else if (strstr(named->name, "target") || strstr(named->name, "log_predict")) {
            int64_t m = S / 4;
            for (int64_t k = 0; k < n; k++)
                ck_assert(element(b, k) == element(packed, k / m * m * B + k / m / S * m + k % m));
        } else {
            for (int64_t k = 0; k < n; k++)
                if (element(b, k) != element(packed, k))
                    ck_abort_msg("%s differs between bshd and thd", named->name);
        }
    }
    ck_assert_int_ge(compared, 22);
    for (int l = 0; l < CG_LAYOUTS; l++) cg_safetensors_close(files[l]);
    cg_dump_case_free(&c);
}
END_TEST

START_TEST(base_2_is_a_factor) {
    int64_t physical[] = {15, 6};
    cg_dump_lengths lengths = {2, physical, NULL, 0};
    cg_dump_case c = new_case(&lengths, 2, 3, 9);
    cg_dump_form form = {.layout = CG_LAYOUT_THD, .dtype = CG_F64}, two = form;
    two.lse_base_2 = true;
    write_dump(at("e"), &c, &form, "");
    write_dump(at("2"), &c, &two, "");
    cg_safetensors *a = opened(at("e")), *b = opened(at("2"));
    for (int i = 0; i < 2; i++) {
        const char *name = i ? "out.lse" : "out.non_compressed_lse";
        for (int64_t k = 0; k < 2 * c.n_rows; k++)
            ck_assert_double_eq_tol(element(tensor_of(a, name), k), element(tensor_of(b, name), k) * log(2),
                                    1e-14);
    }
    cg_safetensors_close(a);
    cg_safetensors_close(b);
    cg_dump_case_free(&c);
}
END_TEST

static void expect_equal_files(const char *a, const char *b, bool equal) {
    cg_error error = {0};
    char *x = NULL, *y = NULL;
    size_t n = 0, m = 0;
    if (!cg_file_read(a, 1 << 28, &x, &n, &error) || !cg_file_read(b, 1 << 28, &y, &m, &error))
        ck_abort_msg("%s", error.text);
    if ((n == m && !memcmp(x, y, n)) != equal)
        ck_abort_msg("%s and %s %s", a, b, equal ? "differ" : "are the same");
    free(x);
    free(y);
}

START_TEST(threads_do_not_change_a_bit) {
    int64_t physical[] = {90, 40, 33};
    cg_dump_lengths lengths = {3, physical, NULL, 0};
    cg_error error = {0};
    static const char *const texts[] = {"", "teacher=sink,support=dense,kl=eps"};
    for (int i = 0; i < 2; i++) {
        cg_dump_form form = {.layout = CG_LAYOUT_THD, .dtype = CG_F64};
        for (int n = 1; n <= 2; n++) {
            ck_assert(cg_threads_set(n, &error));
            cg_dump_case c = new_case(&lengths, 3, 4, 1);
            write_dump(at(n == 1 ? "one" : "two"), &c, &form, texts[i]);
            cg_dump_case_free(&c);
        }
        expect_equal_files(at("one"), at("two"), true);
    }
}
END_TEST

/* ---- the program ---- */

static int run_dump(const char *arguments) {
    char command[2048];
    snprintf(command, sizeof command, "cd %s && '%s' dump %s >out 2>err", folder, CSAGRAD_PROGRAM, arguments);
    int status = system(command);
    ck_assert(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static void good(const char *arguments) {
    int code = run_dump(arguments);
    char *text = NULL;
    size_t bytes;
    cg_file_read(at("err"), 1 << 16, &text, &bytes, NULL);
    if (code) ck_abort_msg("csagrad dump %s: exit code %d: %s", arguments, code, text);
    free(text);
}

/* Exit code 2, one sentence that holds `part`, and no file. */
static void bad(const char *arguments, const char *part) {
    int code = run_dump(arguments);
    char *text = NULL;
    size_t bytes;
    ck_assert(cg_file_read(at("err"), 1 << 16, &text, &bytes, NULL));
    if (code != CG_BAD_INPUT || !strstr(text, part) || strchr(text, '\n') != text + bytes - 1)
        ck_abort_msg("csagrad dump %s: exit code %d: %s", arguments, code, text);
    free(text);
    ck_assert_int_ne(access(at("none"), F_OK), 0);
}

#define SMALL "--seq 24 --batch 2 "

START_TEST(seeds_decide_everything) {
    good(SMALL "--out a --seed 3");
    good(SMALL "--out b --seed 3 --threads 1");
    good(SMALL "--out c --seed 4");
    good(SMALL "--out d --seed 3 --contract teacher=compressed");
    good(SMALL "--out e --seed 3 --teacher compressed");
    good(SMALL "--out f --seed 3 --layer 3");
    expect_equal_files(at("a"), at("b"), true);
    expect_equal_files(at("a"), at("c"), false);
    expect_equal_files(at("a"), at("d"), false);
    expect_equal_files(at("d"), at("e"), true);
    expect_equal_files(at("a"), at("f"), false);
    cg_safetensors *file = opened(at("d"));
    ck_assert_ptr_nonnull(strstr(cg_safetensors_metadata(file, "contract"), "teacher=compressed"));
    /* parameters are scattered: sinks and head weights of both signs */
    const cg_tensor *sink = tensor_of(file, "in.sink");
    for (int64_t h = 0; h < cg_shape_count(&sink->shape); h++) ck_assert(element(sink, h) != 0);
    cg_safetensors_close(file);
    good(SMALL "--out g --seed 3 --contract teacher=compressed --anonymous");
    file = opened(at("g"));
    ck_assert_ptr_null(cg_safetensors_metadata(file, "contract"));
    ck_assert_ptr_null(cg_safetensors_metadata(file, "teacher"));
    ck_assert_ptr_null(cg_safetensors_metadata(file, "loss"));
    cg_safetensors_close(file);
}
END_TEST

START_TEST(weights_of_a_checkpoint) {
    char command[2048];
    snprintf(command, sizeof command,
             "cd %s && '%s' train --task recall --steps 2 --set eval_every=0 --out run >out 2>err && "
             "ls run/checkpoint-*.safetensors | head -1 >name",
             folder, CSAGRAD_PROGRAM);
    ck_assert_int_eq(system(command), 0);
    good("--task recall --seq 120 --batch 1 --checkpoint $(cat name) --out a");
    good("--task recall --seq 120 --batch 1 --out b");
    expect_equal_files(at("a"), at("b"), false);
    /* two steps from a start at 0 */
    cg_safetensors *file = opened(at("a"));
    for (int64_t h = 0; h < cg_shape_count(&tensor_of(file, "in.sink")->shape); h++)
        ck_assert(fabs(element(tensor_of(file, "in.sink"), h)) < 0.01);
    cg_safetensors_close(file);
    bad(SMALL "--checkpoint $(cat name) --out none", "another model");
    bad(SMALL "--checkpoint missing --out none", "missing");
}
END_TEST

START_TEST(refusals) {
    bad("", "--out FILE");
    bad("--out none --graded set", "--out FILE");
    bad(SMALL "--out none --layout sbdh", "did you mean sbhd");
    bad(SMALL "--out none --dtype f16", "--dtype");
    bad(SMALL "--out none --index both", "--index");
    bad(SMALL "--out none --lse 10", "--lse");
    bad(SMALL "--out none --layer 9", "--layer");
    bad(SMALL "--out none --layer 0", "no indexer");
    bad(SMALL "--out none --contract teachr=sink", "did you mean teacher");
    bad(SMALL "--out none --contract kl=epsilon", "--contract");
    bad(SMALL "--out none --gradients kl=epsilon", "--gradients");
    bad(SMALL "--out none --layout bshd --padded", "thd");
    bad(SMALL "--out none --layout sbhd --segments 3,4", "segment 1 has 4");
    bad(SMALL "--out none --segments 3,,4", "--segments");
    bad(SMALL "--out none --segments 3,-4", "--segments");
    bad(SMALL "--out none --seed x", "--seed");
    bad(SMALL "--out missing/none", "missing");
}
END_TEST

START_TEST(graded_set) {
    good("--graded set --seed 2");
    good("--graded again --seed 2 --threads 1");
    char *readme = NULL;
    size_t bytes;
    ck_assert(cg_file_read(at("set/README.md"), 1 << 16, &readme, &bytes, NULL));
    int n = 0;
    for (const char *line = strstr(readme, "| `"); line; line = strstr(line + 1, "| `"), n++) {
        char name[128], path[256], other[256];
        ck_assert_int_eq(sscanf(line, "| `%100[^`]`", name), 1);
        snprintf(path, sizeof path, "%s/set/%s", folder, name);
        snprintf(other, sizeof other, "%s/again/%s", folder, name);
        expect_equal_files(path, other, true);
        cg_safetensors *file = opened(path);
        for (int i = 0; i < cg_safetensors_count(file); i++) {
            const cg_named_tensor *named = cg_safetensors_at(file, i);
            for (int64_t k = 0; k < cg_shape_count(&named->tensor.shape); k++)
                if (!isfinite(element(&named->tensor, k)))
                    ck_abort_msg("%s: %s is not finite", name, named->name);
        }
        cg_safetensors_close(file);
    }
    ck_assert_int_ge(n, 18);
    free(readme);
}
END_TEST

int main(void) {
    if (!mkdtemp(folder)) return EXIT_FAILURE;
    const TTest *const tests[] = {rows_say_what_the_ops_say,
                                  stored_vectors_come_out_again,
                                  teachers_of_the_stored_vectors,
                                  files_hold_what_was_computed,
                                  layouts_are_permutations,
                                  base_2_is_a_factor,
                                  threads_do_not_change_a_bit,
                                  seeds_decide_everything,
                                  weights_of_a_checkpoint,
                                  refusals,
                                  graded_set};
    int code = suite_run("dump", tests, (int)(sizeof tests / sizeof *tests));
    char command[256];
    snprintf(command, sizeof command, "rm -rf %s", folder);
    return system(command) ? EXIT_FAILURE : code;
}
