/* csagrad check from outside and inside: stored vectors, names and layouts of other frameworks, forms found by value,
 * known mistakes named, bad files refused in one sentence. The contracts one by one are in test_confusion.c. */
#include "tests/support.h"

#include <jansson.h>
#include <sys/wait.h>
#include <unistd.h>

#include "models/check/dump_write.h"
#include "models/check/verdict.h"

static char folder[] = "/tmp/csagrad_check_XXXXXX";

static const char *in_folder(const char *name) {
    static char path[8][256];
    static int turn;
    turn = (turn + 1) % 8;
    snprintf(path[turn], sizeof path[0], "%s/%s", folder, name);
    return path[turn];
}

static const char *vector(const char *name) {
    static char path[512];
    snprintf(path, sizeof path, "%s/%s.safetensors", TEST_DATA_DIR, name);
    return path;
}

/* ---- files to change ---- */

enum { MOST = 64 };

typedef struct file {
    cg_named_tensor tensors[MOST];
    char names[MOST][64];
    const char *meta[MOST][2];
    char *texts[MOST]; /* that the file owns */
    int n, n_meta, n_texts;
} file;

static cg_tensor *tensor_of(file *f, const char *name) {
    for (int i = 0; i < f->n; i++)
        if (!strcmp(f->names[i], name)) return &f->tensors[i].tensor;
    ck_abort_msg("no tensor %s", name);
    return NULL;
}

static void add(file *f, const char *name, cg_dtype dtype, cg_shape shape, const void *data) {
    const size_t bytes = (size_t)cg_tensor_bytes(dtype, &shape);
    ck_assert_int_lt(f->n, MOST);
    snprintf(f->names[f->n], sizeof f->names[0], "%s", name);
    f->tensors[f->n].name = f->names[f->n];
    f->tensors[f->n++].tensor = (cg_tensor){dtype, shape, memcpy(malloc(bytes + 8), data, bytes)};
}

static void set_meta(file *f, const char *key, const char *value) {
    for (int i = 0; i < f->n_meta; i++)
        if (!strcmp(f->meta[i][0], key)) {
            f->meta[i][1] = value;
            return;
        }
    f->meta[f->n_meta][0] = key;
    f->meta[f->n_meta++][1] = value;
}

static void drop_meta(file *f, const char *key) {
    for (int i = 0; i < f->n_meta; i++)
        if (!strcmp(f->meta[i][0], key)) {
            f->meta[i][0] = f->meta[f->n_meta - 1][0];
            f->meta[i][1] = f->meta[--f->n_meta][1];
            return;
        }
}

static void drop(file *f, const char *name) {
    for (int i = 0; i < f->n; i++)
        if (!strcmp(f->names[i], name)) {
            free(f->tensors[i].tensor.data);
            f->n--;
            f->tensors[i].tensor = f->tensors[f->n].tensor;
            memcpy(f->names[i], f->names[f->n], sizeof f->names[0]);
            return;
        }
    ck_abort_msg("no tensor %s", name);
}

static void call(file *f, const char *name, const char *other) {
    tensor_of(f, name);
    for (int i = 0; i < f->n; i++)
        if (!strcmp(f->names[i], name)) {
            snprintf(f->names[i], sizeof f->names[0], "%s", other);
            return;
        }
}

static file load(const char *path) {
    static const char *const keys[] = {"layout",     "ratio",  "window",    "topk",     "softmax_scale",
                                       "loss_coeff", "sparse", "reduction", "lse_base", "index"};
    file f = {.n = 0};
    cg_error error = {0};
    cg_safetensors *from = cg_safetensors_open(path, &error);
    if (!from) ck_abort_msg("%s", error.text);
    for (int i = 0; i < cg_safetensors_count(from); i++) {
        const cg_named_tensor *t = cg_safetensors_at(from, i);
        if (strncmp(t->name, "oracle.", 7)) add(&f, t->name, t->tensor.dtype, t->tensor.shape, t->tensor.data);
    }
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        const char *value = cg_safetensors_metadata(from, keys[i]);
        if (value) set_meta(&f, keys[i], f.texts[f.n_texts++] = strdup(value));
    }
    cg_safetensors_close(from);
    return f;
}

static const char *save(file *f, const char *name) {
    cg_error error = {0};
    for (int i = 0; i < f->n; i++) f->tensors[i].name = f->names[i]; /* the file may have been copied */
    const char *path = in_folder(name);
    if (!cg_safetensors_write(path, f->tensors, f->n, f->meta, f->n_meta, &error))
        ck_abort_msg("%s", error.text);
    return path;
}

static void forget(file *f) {
    for (int i = 0; i < f->n; i++) free(f->tensors[i].tensor.data);
    for (int i = 0; i < f->n_texts; i++) free(f->texts[i]);
    f->n = f->n_texts = 0;
}

/* ---- verdicts ---- */

static cg_verdict *judge(const cg_dump_options *from, const cg_verdict_options *how, cg_error *error) {
    cg_dump *dump = cg_dump_open(from, error);
    cg_verdict *v = dump ? cg_verdict_make(dump, how, error) : NULL;
    cg_dump_close(dump);
    return v;
}

static cg_verdict *verdict_with(const char *path, const char *const *maps, int n_maps) {
    const cg_dump_options from = {.paths = &path, .n_paths = 1, .maps = maps, .n_maps = n_maps};
    const cg_verdict_options how = {0};
    cg_error error = {0};
    cg_verdict *v = judge(&from, &how, &error);
    if (!v) ck_abort_msg("%s: %s", path, error.text);
    return v;
}

static cg_verdict *verdict(const char *path) { return verdict_with(path, NULL, 0); }

static const cg_quantity *find(const cg_verdict *v, const char *name) {
    for (int i = 0; i < v->n_quantities; i++)
        if (!strcmp(v->quantities[i].name, name)) return &v->quantities[i];
    ck_abort_msg("%s is not judged", name);
    return NULL;
}

static bool has_fault(const cg_verdict *v, const char *name) {
    for (int i = 0; i < v->n_faults; i++)
        if (!strcmp(v->faults[i], name)) return true;
    return false;
}

static void expect_match(const char *path, int n_quantities) {
    cg_verdict *v = verdict(path);
    for (int i = 0; i < v->n_quantities; i++)
        if (!v->quantities[i].ok)
            ck_abort_msg("%s: %s is off by %g units: %s", path, v->quantities[i].name,
                         v->quantities[i].worst_units, v->quantities[i].says);
    ck_assert(v->match);
    ck_assert_msg(v->n_quantities == n_quantities, "%s: %d quantities", path, v->n_quantities);
    free(v);
}

static void expect_refused(const char *path, const char *const *maps, int n_maps, const char *says) {
    const cg_dump_options from = {.paths = &path, .n_paths = 1, .maps = maps, .n_maps = n_maps};
    const cg_verdict_options how = {0};
    cg_error error = {0};
    cg_verdict *v = judge(&from, &how, &error);
    if (v) ck_abort_msg("not refused: %s", says);
    if (!strstr(error.text, says) || error.code != CG_BAD_INPUT || strchr(error.text, '\n'))
        ck_abort_msg("expected \"%s\", got %d \"%s\"", says, (int)error.code, error.text);
}

/* ---- stored vectors ---- */

START_TEST(stored_vectors_match) {
    const struct {
        const char *name;
        int n_quantities, support, reduction;
    } files[] = {{"sbhd_sparse_mean", 8, CG_SUPPORT_IS_SPARSE, CG_REDUCTION_IS_MEAN_REAL},
                 {"sbhd_dense_mean", 8, CG_SUPPORT_IS_DENSE, CG_REDUCTION_IS_MEAN_REAL},
                 {"sbhd_sparse_sum", 8, CG_SUPPORT_IS_SPARSE, CG_REDUCTION_IS_SUM},
                 {"thd_sparse_mean", 8, CG_SUPPORT_IS_SPARSE, CG_REDUCTION_IS_MEAN_REAL},
                 {"thd_dense_sum", 8, CG_SUPPORT_IS_DENSE, CG_REDUCTION_IS_SUM},
                 {"thd_padded_sparse_mean", 8, CG_SUPPORT_IS_SPARSE, CG_REDUCTION_IS_MEAN_REAL},
                 {"topk_boundary", 9, CG_SUPPORT_IS_SPARSE, CG_REDUCTION_IS_MEAN_REAL},
                 {"ratio128_dense", 13, CG_SUPPORT_IS_DENSE, CG_REDUCTION_IS_MEAN_REAL},
                 {"core_attention_sbhd", 5, 0, 0},
                 {"core_attention_thd", 5, 0, 0}};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        cg_verdict *v = verdict(vector(files[i].name));
        if (!v->match || v->n_faults) ck_abort_msg("%s: %s", files[i].name, v->sentence);
        ck_assert_int_eq(v->contract.value[CG_AXIS_TEACHER], CG_TEACHER_IS_FULL);
        ck_assert_int_eq(v->contract.value[CG_AXIS_SUPPORT], files[i].support);
        ck_assert_int_eq(v->contract.value[CG_AXIS_REDUCTION], files[i].reduction);
        free(v);
    }
    expect_refused(vector("compressor"), NULL, 0, "neither query nor q_indexer");
}
END_TEST

/* The same numbers without what the file says of them. */
START_TEST(stored_contracts_are_found) {
    const struct {
        const char *name;
        int support, reduction;
    } files[] = {{"sbhd_sparse_mean", CG_SUPPORT_IS_SPARSE, CG_REDUCTION_IS_MEAN_REAL},
                 {"sbhd_dense_mean", CG_SUPPORT_IS_DENSE, CG_REDUCTION_IS_MEAN_REAL},
                 {"sbhd_sparse_sum", CG_SUPPORT_IS_SPARSE, CG_REDUCTION_IS_SUM},
                 {"thd_padded_sparse_mean", CG_SUPPORT_IS_SPARSE, CG_REDUCTION_IS_MEAN_REAL}};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        file f = load(vector(files[i].name));
        drop_meta(&f, "sparse");
        drop_meta(&f, "reduction");
        cg_verdict *v = verdict(save(&f, "unsaid.safetensors"));
        ck_assert(v->identified);
        ck_assert_int_eq(v->contract.value[CG_AXIS_SUPPORT], files[i].support);
        ck_assert_int_eq(v->contract.value[CG_AXIS_REDUCTION], files[i].reduction);
        ck_assert_int_eq(v->match,
                         files[i].support == CG_SUPPORT_IS_SPARSE && files[i].reduction != CG_REDUCTION_IS_SUM);
        free(v);
        forget(&f);
    }
}
END_TEST

START_TEST(stored_teachers_are_named) {
    const char *const teachers[] = {"full", "sink", "compressed"}, *const supports[] = {"sparse", "dense"};
    for (int t = 0; t < 3; t++)
        for (int s = 0; s < 2; s++) {
            char target[64], loss[64];
            snprintf(target, sizeof target, "target=out.target_%s_%s", teachers[t], supports[s]);
            snprintf(loss, sizeof loss, "loss=out.loss_%s_%s", teachers[t], supports[s]);
            const char *maps[] = {target, loss};
            cg_verdict *v = verdict_with(vector("teacher_modes"), maps, 2);
            ck_assert(v->identified);
            ck_assert_int_eq(v->contract.value[CG_AXIS_TEACHER], t);
            ck_assert_int_eq(v->contract.value[CG_AXIS_SUPPORT], s);
            ck_assert(!v->undetermined[CG_AXIS_SUPPORT] && !v->undetermined[CG_AXIS_TEACHER]);
            /* four quarters of four heads are each head by itself, where nothing beside the keys counts */
            bool combined = false;
            for (int i = 0; i < v->n_notes; i++)
                combined |=
                    strstr(v->notes[i], "another combination") && strstr(v->notes[i], "local-normalised-4");
            ck_assert_int_eq(combined, t == 2);
            ck_assert_int_eq(v->match, t == 0 && s == 0);
            free(v);
        }
}
END_TEST

/* ---- names, layouts, elements ---- */

START_TEST(names_of_frameworks) {
    /* Megatron's fused loss */
    file f = load(vector("sbhd_sparse_mean"));
    const char *const megatron[][2] = {{"in.q_indexer", "q"},
                                       {"in.weights", "weights"},
                                       {"in.k_indexer", "k"},
                                       {"in.query", "query"},
                                       {"in.compressed_kv", "key"},
                                       {"out.topk", "topk_indices"},
                                       {"out.non_compressed_lse", "lse"},
                                       {"grad.q_indexer", "dq"},
                                       {"grad.weights", "dweights"},
                                       {"grad.k_indexer", "dk"},
                                       {"out.loss", "indexer_loss"},
                                       {"out.target", "target_probs"}};
    for (size_t i = 0; i < sizeof megatron / sizeof *megatron; i++) call(&f, megatron[i][0], megatron[i][1]);
    drop(&f, "in.kv"); /* the loss takes the part beside the compressed keys ready made */
    drop(&f, "in.sink");
    expect_match(save(&f, "megatron.safetensors"), 7);
    forget(&f);

    /* index_q beside q */
    f = load(vector("thd_sparse_mean"));
    const char *const other[][2] = {{"in.q_indexer", "index_q"},        {"in.k_indexer", "index_k"},
                                    {"in.weights", "index_weights"},    {"in.query", "q"},
                                    {"in.compressed_kv", "ckv"},        {"in.kv", "window_kv"},
                                    {"in.sink", "attn_sink"},           {"grad.q_indexer", "index_q.grad"},
                                    {"grad.k_indexer", "index_k.grad"}, {"grad.weights", "grad_index_weights"},
                                    {"in.cu_seqlens_q", "cu_seqlens"}};
    for (size_t i = 0; i < sizeof other / sizeof *other; i++) call(&f, other[i][0], other[i][1]);
    expect_match(save(&f, "other.safetensors"), 8);
    forget(&f);

    /* offsets as Transformer Engine has them */
    f = load(vector("thd_padded_sparse_mean"));
    call(&f, "in.cu_seqlens_q", "cu_seqlens_q_padded");
    call(&f, "in.cu_seqlens_q_real", "cu_seqlens_q");
    drop(&f, "out.query_valid_rows");
    drop(&f, "in.cu_seqlens_compressed");
    expect_match(save(&f, "padded.safetensors"), 8);
    /* only which rows are real */
    call(&f, "cu_seqlens_q_padded", "cu_seqlens_q_");
    forget(&f);
    f = load(vector("thd_padded_sparse_mean"));
    drop(&f, "in.cu_seqlens_q_real");
    expect_match(save(&f, "valid.safetensors"), 8);
    forget(&f);

    /* --map, two files */
    f = load(vector("sbhd_sparse_mean"));
    call(&f, "in.q_indexer", "layers.0/q");
    const char *maps[] = {"q_indexer=layers.0/q"};
    cg_verdict *v = verdict_with(save(&f, "mapped.safetensors"), maps, 1);
    ck_assert(v->match);
    ck_assert_int_eq(v->n_quantities, 8);
    free(v);
    const char *wrong[] = {"q_indexr=layers.0/q"}, *absent[] = {"q_indexer=layers.1/q"};
    expect_refused(in_folder("mapped.safetensors"), wrong, 1, "did you mean q_indexer?");
    expect_refused(in_folder("mapped.safetensors"), absent, 1, "no file has a tensor");
    forget(&f);
}
END_TEST

static cg_dump_case small_case(cg_dtype dtype) {
    static const int64_t lengths[] = {24, 24};
    cg_dump_case c = {.n_heads = 4,
                      .head_dim = 8,
                      .index_heads = 3,
                      .index_dim = 4,
                      .ratio = 4,
                      .window = 5,
                      .topk = 3,
                      .softmax_scale = 0.4,
                      .loss_coeff = 0.7};
    const cg_dump_lengths l = {2, lengths, lengths, 0};
    cg_error error = {0};
    if (!cg_dump_case_random(&c, &l, 9, &error)) ck_abort_msg("%s", error.text);
    cg_dump_case_round(&c, dtype);
    return c;
}

static const char *small_dump(const char *name, const cg_dump_form *form, const char *text) {
    cg_dump_case c = small_case(form->dtype);
    cg_dump_contracts contracts;
    cg_dump_results r;
    cg_error error = {0};
    if (!cg_contract_parse(text, &contracts.value, &error)) ck_abort_msg("%s", error.text);
    contracts.gradient = contracts.value;
    contracts.by_rows = false;
    const char *path = in_folder(name);
    if (!cg_dump_compute(&c, &contracts, NULL, &r, &error) ||
        !cg_dump_write(path, &c, &contracts, &r, form, &error))
        ck_abort_msg("%s", error.text);
    cg_dump_results_free(&r);
    cg_dump_case_free(&c);
    return path;
}

START_TEST(layouts_and_elements) {
    const cg_dtype dtypes[] = {CG_F32, CG_F64, CG_BF16};
    for (int layout = 0; layout < CG_LAYOUTS; layout++)
        for (int i = 0; i < 3; i++)
            for (int other = 0; other < 2; other++) {
                const cg_dump_form form = {.layout = (cg_dump_layout)layout,
                                           .dtype = dtypes[i],
                                           .global_lists = other,
                                           .lse_base_2 = other,
                                           .anonymous = true};
                const char *path = small_dump("form.safetensors", &form, "");
                file f = load(path);
                drop_meta(&f, "layout");
                expect_match(save(&f, "unsaid.safetensors"), 14);
                forget(&f);
            }
    /* f16 and i64 */
    const cg_dump_form form = {.layout = CG_LAYOUT_SBHD, .dtype = CG_F32};
    file f = load(small_dump("form.safetensors", &form, ""));
    cg_tensor *t = tensor_of(&f, "out.topk");
    const int64_t n = cg_shape_count(&t->shape);
    int64_t *wide = malloc((size_t)n * sizeof *wide);
    for (int64_t i = 0; i < n; i++) wide[i] = ((int32_t *)t->data)[i];
    free(t->data);
    t->data = wide;
    t->dtype = CG_I64;
    t = tensor_of(&f, "out.output");
    const int64_t n_out = cg_shape_count(&t->shape);
    for (int64_t i = 0; i < n_out; i++) {
        const _Float16 x = (_Float16)((float *)t->data)[i];
        memcpy((char *)t->data + i * 2, &x, 2);
    }
    t->dtype = CG_F16;
    expect_match(save(&f, "half.safetensors"), 14);
    forget(&f);
}
END_TEST

START_TEST(what_cannot_be_told_is_asked_for) {
    const cg_dump_form form = {.layout = CG_LAYOUT_SBHD, .dtype = CG_F32};
    const char *path = small_dump("asked.safetensors", &form, "");
    const char *const needed[][2] = {{"ratio", "give --ratio N"},
                                     {"window", "give --window N"},
                                     {"softmax_scale", "give --softmax-scale X"},
                                     {"loss_coeff", "give --loss-coeff X"}};
    for (int i = 0; i < 4; i++) {
        file f = load(path);
        drop_meta(&f, needed[i][0]);
        expect_refused(save(&f, "less.safetensors"), NULL, 0, needed[i][1]);
        forget(&f);
    }
    /* [S, B, ...] with S / ratio = B: either order fits */
    file f = {.n = 0};
    static float zeros[4 * 4 * 2 * 2];
    add(&f, "query", CG_F32, CG_SHAPE(4, 4, 2, 2), zeros);
    add(&f, "compressed_kv", CG_F32, CG_SHAPE(4, 4, 2), zeros);
    add(&f, "output", CG_F32, CG_SHAPE(4, 4, 2, 2), zeros);
    set_meta(&f, "ratio", "1");
    set_meta(&f, "softmax_scale", "1");
    expect_refused(save(&f, "square.safetensors"), NULL, 0, "give --layout sbhd or bshd");
    forget(&f);
    /* both segments long, the second one's picks fit either origin */
    f = load(vector("core_attention_thd"));
    cg_tensor *lists = tensor_of(&f, "in.topk");
    for (int64_t i = 0; i < cg_shape_count(&lists->shape); i++)
        ((int32_t *)lists->data)[i] = i / 3 == 53 && i % 3 == 0 ? 6 : -1;
    expect_refused(save(&f, "origin.safetensors"), NULL, 0, "--index local or global");
    forget(&f);
}
END_TEST

/* ---- bad files ---- */

START_TEST(bad_values_are_refused) {
    const struct {
        const char *tensor;
        int64_t at;
        double x;
        const char *says;
    } bad[] = {
        {"in.query", 8, NAN, "in.query of segment 0, position 0, element 8 is NaN"},
        {"in.q_indexer", 40 * 8 * 16, INFINITY, "is infinite, expected a finite number"},
        {"in.k_indexer", 5, NAN, "compressed row 0, element 5 is NaN"},
        {"in.sink", 2, NAN, "of head 2 is NaN, expected a number or -inf"},
        {"in.cu_seqlens_q", 0, 1, "[0] is 1, expected 0"},
        {"in.cu_seqlens_q", 2, -5, "[2] is -5, expected at least 12"},
        {"in.cu_seqlens_q", 4, 49, "[4] is 49, but there are 48 rows"},
        {"in.cu_seqlens_q_real", 1, 13, "gives segment 0 13 real rows, but it has 12"},
        {"in.cu_seqlens_compressed", 1, 4, "compressed rows, expected 3: 12 tokens at ratio 4"},
        {"out.topk", 3 * 8, 7, "is 7, expected -1 or 0 to 2"},
        {"out.topk", 3 * 8, -2, "position 8, slot 0 is -2, expected -1 or 0 to 2"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        file f = load(vector("thd_padded_sparse_mean"));
        cg_tensor *t = tensor_of(&f, bad[i].tensor);
        if (t->dtype == CG_I32)
            ((int32_t *)t->data)[bad[i].at] = (int32_t)bad[i].x;
        else
            ((float *)t->data)[bad[i].at] = (float)bad[i].x;
        if (!strcmp(bad[i].tensor, "out.topk")) ((int32_t *)t->data)[3 * 30] = 5; /* segment 1 has 6: local */
        expect_refused(save(&f, "bad.safetensors"), NULL, 0, bad[i].says);
        forget(&f);
    }
    /* padding may hold anything */
    file f = load(vector("thd_padded_sparse_mean"));
    for (int i = 0; i < 4 * 16; i++) ((float *)tensor_of(&f, "in.query")->data)[10 * 4 * 16 + i] = NAN;
    for (int i = 0; i < 8 * 16; i++) ((float *)tensor_of(&f, "in.q_indexer")->data)[10 * 8 * 16 + i] = NAN;
    expect_match(save(&f, "garbage.safetensors"), 8);
    forget(&f);

    const struct {
        const char *tensor;
        cg_shape shape;
        cg_dtype dtype;
        const char *says;
    } shapes[] = {
        {"in.weights", CG_DIMS(48, 7), CG_F32, "in.weights has shape [48, 7], expected"},
        {"in.kv", CG_DIMS(47, 16), CG_F32, "in.kv has shape [47, 16], expected"},
        {"in.k_indexer", CG_DIMS(11, 16), CG_F32, "in.compressed_kv has shape"},
        {"out.topk", CG_DIMS(48, 3), CG_F32, "has elements f32, expected whole numbers of 8 to 64 bits"},
        {"in.query", CG_DIMS(48, 4, 16), CG_I32, "has elements i32, expected f32, f64, bf16 or f16"},
        {"out.target", CG_DIMS(48, 11), CG_F32, "has 11 columns, expected 12"},
        {"in.query", CG_DIMS(48, 60), CG_F32, "expected 3 sizes (packed) or 4"},
        {"in.query", CG_DIMS(48, 0, 16), CG_F32, "in.query has shape [48, 0, 16], expected at least one head"},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        f = load(vector("thd_padded_sparse_mean"));
        cg_tensor *t = tensor_of(&f, shapes[i].tensor);
        t->shape = shapes[i].shape;
        t->dtype = shapes[i].dtype;
        expect_refused(save(&f, "shape.safetensors"), NULL, 0, shapes[i].says);
        forget(&f);
    }
    const char *const numbers[][3] = {{"ratio", "0", "expected an integer from 1, got \"0\""},
                                      {"ratio", "4x", "got \"4x\""},
                                      {"window", "-3", "window of the metadata"},
                                      {"softmax_scale", "nan", "softmax_scale of the metadata"},
                                      {"loss_coeff", "1e-3abc", "got \"1e-3abc\""},
                                      {"sparse", "maybe", "expected true or false"},
                                      {"reduction", "foo", "mean-twice or mean-of-means, got \"foo\""},
                                      {"layout", "bhsd", "expected sbhd, bshd or thd"}};
    for (int i = 0; i < 8; i++) {
        f = load(vector("thd_padded_sparse_mean"));
        set_meta(&f, numbers[i][0], numbers[i][1]);
        expect_refused(save(&f, "number.safetensors"), NULL, 0, numbers[i][2]);
        forget(&f);
    }
    const char *twice[] = {vector("thd_sparse_mean"), vector("thd_sparse_mean")};
    const cg_dump_options from = {.paths = twice, .n_paths = 2};
    cg_error error = {0};
    ck_assert_ptr_null(cg_dump_open(&from, &error));
    ck_assert(strstr(error.text, "a name may stand in one file only"));
}
END_TEST

/* ---- what it says ---- */

/* Two heads, two compressed keys, one window row: the last of 8 rows has the numbers of the first case of the list. */
START_TEST(the_sentence) {
    float query[8 * 4], kv[8 * 2], ckv[] = {1, 0, 0, 1}, sink[] = {0, 0}, qi[8 * 4], w[8 * 2],
                                   ki[] = {0.5F, -1, 1, 2};
    int32_t lists[16];
    for (int t = 0; t < 8; t++) {
        memcpy(query + t * 4, (float[]){2, 0, 0, 1}, 4 * sizeof(float));
        memcpy(kv + t * 2, (float[]){0, 3}, 2 * sizeof(float));
        memcpy(qi + t * 4, (float[]){1, 0, 0, 1}, 4 * sizeof(float));
        memcpy(w + t * 2, (float[]){0.6F, -0.4F}, 2 * sizeof(float));
        lists[t * 2] = t >= 3 ? 0 : -1;
        lists[t * 2 + 1] = t == 7 ? 1 : -1;
    }
    file f = {.n = 0};
    add(&f, "query", CG_F32, CG_SHAPE(8, 2, 2), query);
    add(&f, "kv", CG_F32, CG_SHAPE(8, 2), kv);
    add(&f, "compressed_kv", CG_F32, CG_SHAPE(2, 2), ckv);
    add(&f, "sink", CG_F32, CG_SHAPE(2), sink);
    add(&f, "q_indexer", CG_F32, CG_SHAPE(8, 2, 2), qi);
    add(&f, "weights", CG_F32, CG_SHAPE(8, 2), w);
    add(&f, "k_indexer", CG_F32, CG_SHAPE(2, 2), ki);
    add(&f, "topk", CG_I32, CG_SHAPE(8, 2), lists);
    const char *const meta[][2] = {
        {"ratio", "4"}, {"window", "1"}, {"softmax_scale", "1"}, {"loss_coeff", "1"}, {"reduction", "sum"}};
    for (int i = 0; i < 5; i++) set_meta(&f, meta[i][0], meta[i][1]);
    const struct {
        float loss;
        const char *says, *numbers;
    } cases[] = {{0.0610656464345F, "teacher=full", "it is one number, which"},
                 {0.0047482623F, "the simplest is teacher=compressed:", "0.004748262 against 0.06106565"},
                 {0.0649118282F, "the simplest is teacher=window:", "against 0.06106565"},
                 {0.0017012967F, "the simplest is teacher=sink:", "against 0.06106565"}};
    add(&f, "loss", CG_F32, CG_SHAPE(1), &cases[0].loss);
    for (int i = 0; i < 4; i++) {
        *(float *)tensor_of(&f, "loss")->data = cases[i].loss;
        cg_verdict *v = verdict(save(&f, "sentence.safetensors"));
        ck_assert_int_eq(v->match, i == 0);
        ck_assert_int_eq(v->identified, i == 0); /* one number names no contract */
        if (!v->n_fit || v->n_faults) ck_abort_msg("%d %s", i, v->sentence);
        if (!strstr(v->sentence, cases[i].says) || !strstr(v->sentence, cases[i].numbers))
            ck_abort_msg("%s", v->sentence);
        ck_assert(i > 0 || v->undetermined[CG_AXIS_SUPPORT]); /* everything is selected */
        ck_assert(i > 0 || strstr(v->tell_apart[CG_AXIS_SUPPORT], "more keys than are selected"));
        free(v);
    }
    *(float *)tensor_of(&f, "loss")->data = 0.05F;
    cg_verdict *v = verdict(save(&f, "sentence.safetensors"));
    ck_assert(!v->match && !v->identified);
    ck_assert(strstr(v->sentence, "no known contract"));
    ck_assert(strstr(find(v, "loss")->says, "times the expected"));
    free(v);
    forget(&f);
}
END_TEST

/* Answers rounded to bf16 and saved as f32 are judged at the rounding of bf16, and only those. */
START_TEST(bf16_numbers_in_f32) {
    file f = load(vector("sbhd_sparse_mean"));
    static const char *const names[] = {"out.target", "grad.q_indexer", "grad.weights", "grad.k_indexer"};
    for (int k = 0; k < 4; k++) {
        cg_tensor *t = tensor_of(&f, names[k]);
        uint32_t *bits = t->data;
        for (int64_t i = 0; i < cg_shape_count(&t->shape); i++)
            bits[i] = (bits[i] + 0x7fff + (bits[i] >> 16 & 1)) & 0xffff0000;
    }
    cg_verdict *v = verdict(save(&f, "bf16_in_f32.safetensors"));
    int n_notes = 0;
    for (int i = 0; i < v->n_notes; i++) n_notes += strstr(v->notes[i], "holds bf16 numbers in f32") != NULL;
    ck_assert_int_eq(n_notes, 4);
    ck_assert(v->match && find(v, "target")->ok && find(v, "grad.weights")->ok);
    free(v);
    float *target = tensor_of(&f, "out.target")->data;
    int64_t at = 0;
    while (target[at] < 0.1F) at++;
    target[at] *= 1.05F; /* beyond the rounding of bf16 */
    uint32_t *bits = (uint32_t *)target + at;
    *bits &= 0xffff0000;
    v = verdict(save(&f, "bf16_in_f32.safetensors"));
    ck_assert(!v->match && !find(v, "target")->ok);
    free(v);
    forget(&f);
}
END_TEST

/* 0/0 of an empty softmax: NaN, or any number, in a row that sees no key is named, and what is right elsewhere is said. */
START_TEST(rows_that_see_nothing_hold_nothing) {
    for (int nan = 0; nan < 2; nan++) {
        file f = load(vector("sbhd_sparse_mean")); /* [40, 2, 8, ...]: positions 0 to 2 see no key */
        const float bad = nan ? NAN : 0.01F;
        for (int i = 0; i < 3 * 2 * 8; i++) ((float *)tensor_of(&f, "grad.weights")->data)[i] = bad;
        if (nan)
            for (int i = 0; i < 16; i++) ((float *)tensor_of(&f, "grad.k_indexer")->data)[i] = NAN;
        cg_verdict *v = verdict(save(&f, "empty_rows.safetensors"));
        ck_assert(!v->match && has_fault(v, "empty-row-not-zero"));
        ck_assert_ptr_nonnull(strstr(v->sentence, "rows that see no key hold a gradient"));
        ck_assert_ptr_nonnull(
            strstr(find(v, "grad.weights")->says, "not zero in 6 rows that see no key; elsewhere as"));
        ck_assert(find(v, "grad.q_indexer")->ok && find(v, "loss")->ok);
        ck_assert_int_eq(find(v, "grad.k_indexer")->ok, !nan);
        ck_assert(!has_fault(v, "gradient-of-keys"));
        ck_assert_int_eq(v->contract.value[CG_AXIS_TEACHER], CG_TEACHER_IS_FULL);
        free(v);
        forget(&f);
    }
}
END_TEST

START_TEST(value_and_gradient_apart) {
    cg_dump_case c = small_case(CG_F32);
    const char *const pairs[][2] = {{"", "teacher=compressed"},
                                    {"", "reduction=mean-twice"},
                                    {"support=dense", ""},
                                    {"teacher=sink", "scores=linear"}};
    for (int i = 0; i < 4; i++) {
        cg_dump_contracts contracts = {.by_rows = true};
        cg_dump_results r;
        cg_error error = {0};
        const cg_dump_form form = {.layout = CG_LAYOUT_THD, .dtype = CG_F32, .anonymous = true};
        if (!cg_contract_parse(pairs[i][0], &contracts.value, &error) ||
            !cg_contract_parse(pairs[i][1], &contracts.gradient, &error) ||
            !cg_dump_compute(&c, &contracts, NULL, &r, &error) ||
            !cg_dump_write(in_folder("pair.safetensors"), &c, &contracts, &r, &form, &error))
            ck_abort_msg("%s", error.text);
        cg_dump_results_free(&r);
        cg_verdict *v = verdict(in_folder("pair.safetensors"));
        ck_assert(v->identified && v->gradient_differs && !v->match);
        for (int a = 0; a < CG_AXES; a++) {
            if (v->undetermined[a] || a == CG_AXIS_KL || a == CG_AXIS_NORMALISE || a == CG_AXIS_HEADS) continue;
            ck_assert_int_eq(v->contract.value[a], contracts.value.value[a]);
            if (a != CG_AXIS_REDUCTION || i == 1)
                ck_assert_int_eq(v->gradient.value[a], contracts.gradient.value[a]);
        }
        if (!strstr(v->sentence, "the gradients follow")) ck_abort_msg("%s", v->sentence);
        free(v);
    }
    cg_dump_case_free(&c);
}
END_TEST

/* A gradient that grew with the micro-batches: no named factor, but a direction and a number. */
START_TEST(gradients_times_a_number) {
    const cg_dump_form form = {.layout = CG_LAYOUT_THD, .dtype = CG_F32, .anonymous = true};
    file f = load(small_dump("times.safetensors", &form, ""));
    const char *const names[] = {"grad.q_indexer", "grad.weights", "grad.k_indexer"};
    for (int i = 0; i < 3; i++) {
        cg_tensor *t = tensor_of(&f, names[i]);
        for (int64_t k = 0; k < cg_shape_count(&t->shape); k++) ((float *)t->data)[k] *= 4;
    }
    cg_verdict *v = verdict(save(&f, "times.safetensors"));
    if (!strstr(v->sentence, "all 4 times those expected")) ck_abort_msg("%s", v->sentence);
    ck_assert(has_fault(v, "gradient-factor") && find(v, "loss")->ok && !v->match);
    free(v);
    forget(&f);
}
END_TEST

/* Lists that break ties otherwise are no fault; other wrong lists are named. */
START_TEST(selections) {
    const char *maps[] = {"topk=info.topk_torch"};
    cg_verdict *v = verdict_with(vector("topk_boundary"), maps, 1);
    ck_assert(find(v, "selection")->ok);
    ck_assert(strstr(find(v, "selection")->says, "ties broken otherwise"));
    free(v);

    file f = load(vector("thd_sparse_mean"));
    int32_t *lists = tensor_of(&f, "out.topk")->data;
    for (int t = 0; t < 54; t++) { /* rising order */
        int32_t *l = lists + 3 * t, a = l[0], b = l[1], c = l[2];
        if (c >= 0) l[0] = c, l[1] = b, l[2] = a;
    }
    v = verdict(save(&f, "order.safetensors"));
    ck_assert(find(v, "selection")->ok);
    ck_assert(strstr(find(v, "selection")->says, "not by falling score"));
    free(v);
    lists[3 * 10] = 2; /* row 10 of segment 0 sees 2 keys */
    v = verdict(save(&f, "unseen.safetensors"));
    ck_assert(!find(v, "selection")->ok && has_fault(v, "selects-unseen-keys"));
    ck_assert_int_eq(find(v, "selection")->first.segment, 0);
    ck_assert_int_eq(find(v, "selection")->first.position, 10);
    free(v);
    forget(&f);

    const cg_dump_form form = {.layout = CG_LAYOUT_THD, .dtype = CG_F32, .anonymous = true};
    v = verdict(small_dump("linear.safetensors", &form, "scores=linear"));
    ck_assert(has_fault(v, "selection-by-linear-scores"));
    ck_assert_int_eq(v->contract.value[CG_AXIS_SCORES], CG_SCORES_ARE_LINEAR);
    free(v);
}
END_TEST

/* Ratio 1; the last of 3 rows has two compressed rows, its window weighs nothing. */
static file row_case(void) {
    file f = {.n = 0};
    const double q[] = {1, 0.5, 1, 0.5, 1, 0.5}, kv[] = {-4000, 0, -4000, 0, -4000, 0},
                 ckv[] = {1, 0, 0, 3, 5, 7}, sink = 0.25;
    const double dout[] = {0, 0, 0, 0, 1, 3}, zeros[6] = {0};
    const int32_t lists[] = {-1, -1, -1, -1, -1, -1, -1, -1, 0, 1, -1, -1};
    add(&f, "query", CG_F64, CG_SHAPE(3, 1, 2), q);
    add(&f, "kv", CG_F64, CG_SHAPE(3, 2), kv);
    add(&f, "compressed_kv", CG_F64, CG_SHAPE(3, 2), ckv);
    add(&f, "sink", CG_F64, CG_SHAPE(1), &sink);
    add(&f, "dout", CG_F64, CG_SHAPE(3, 1, 2), dout);
    add(&f, "topk", CG_I32, CG_SHAPE(3, 4), lists);
    add(&f, "output", CG_F64, CG_SHAPE(3, 1, 2), zeros);
    add(&f, "grad.query", CG_F64, CG_SHAPE(3, 1, 2), zeros);
    add(&f, "grad.compressed_kv", CG_F64, CG_SHAPE(3, 2), zeros);
    add(&f, "grad.sink", CG_F64, CG_SHAPE(1), zeros);
    set_meta(&f, "ratio", "1");
    set_meta(&f, "window", "1");
    set_meta(&f, "softmax_scale", "0.5");
    return f;
}

START_TEST(mistakes_of_attention) {
    const double right_out[] = {0.3264958358, 1.2576868548}, right_dq[] = {-0.5059961288, 3.0816117491};
    const double right_dkv[] = {-0.1795002930, 0.7264894430, 1.4464328680, 1.7712888130},
                 right_sink = -1.0424155752;
    const struct {
        const char *tensor, *fault;
        double x[4];
    } cases[] = {
        {"output", "", {0.3264958358, 1.2576868548}},
        {"output", "sink-ignored", {0.4378234991, 1.6865295027}},
        {"output", "minus-one-wrapped", {4.8375332547, 6.8003778548}},
        {"output", "minus-one-clamped", {0.5925544116, 0.7608549253}},
        {"grad.query", "backward-lse-without-sink", {-0.6785293144, 4.1323713535}},
        {"grad.sink", "sink-gradient-without-sink", {-1.3978556068}},
        {"grad.compressed_kv", "gradient-of-value-role-only", {0.3264958, 0.9794875, 0.4192290, 1.2576869}},
        {"grad.compressed_kv", "gradient-of-key-role-only", {-0.5059961, -0.2529981, 1.0272039, 0.5136020}}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        file f = row_case();
        memcpy((double *)tensor_of(&f, "output")->data + 4, right_out, sizeof right_out);
        memcpy((double *)tensor_of(&f, "grad.query")->data + 4, right_dq, sizeof right_dq);
        memcpy(tensor_of(&f, "grad.compressed_kv")->data, right_dkv, sizeof right_dkv);
        memcpy(tensor_of(&f, "grad.sink")->data, &right_sink, sizeof right_sink);
        const bool row = !strcmp(cases[i].tensor, "output") || !strcmp(cases[i].tensor, "grad.query");
        const size_t n = row ? 2 : !strcmp(cases[i].tensor, "grad.sink") ? 1 : 4;
        memcpy((double *)tensor_of(&f, cases[i].tensor)->data + (row ? 4 : 0), cases[i].x, n * sizeof(double));
        for (int t = 0; t < 2; t++) { /* rows without keys: four times -1 */
            double *out = (double *)tensor_of(&f, "output")->data + 2 * t;
            const double last = 4 * exp(4.25) / (4 * exp(4.25) + exp(0.25)),
                         first = 4 * exp(0.5) / (4 * exp(0.5) + exp(0.25));
            if (!strcmp(cases[i].fault, "sink-ignored")) out[0] = -4000; /* their window alone */
            if (!strcmp(cases[i].fault, "minus-one-wrapped")) out[0] = 5 * last, out[1] = 7 * last;
            if (!strcmp(cases[i].fault, "minus-one-clamped")) out[0] = first;
        }
        const char *path = save(&f, "attention.safetensors");
        const cg_dump_options from = {.paths = &path, .n_paths = 1};
        const cg_verdict_options how = {.tolerance = 1e-6}; /* the numbers have seven digits */
        cg_error error = {0};
        cg_verdict *v = judge(&from, &how, &error);
        if (!v) ck_abort_msg("%s", error.text);
        ck_assert_int_eq(v->match, i == 0);
        for (int k = 0; k < v->n_quantities; k++)
            if (v->quantities[k].ok == !strcmp(v->quantities[k].name, cases[i].tensor) && i)
                ck_abort_msg("%s: %s is %s", cases[i].fault, v->quantities[k].name,
                             v->quantities[k].ok ? "fine" : "wrong");
        if (i && !has_fault(v, cases[i].fault)) ck_abort_msg("%s is not named", cases[i].fault);
        free(v);
        forget(&f);
    }
}
END_TEST

/* A dump of a window of 5 tokens, read as if of 4 or 6; one whose sink was ignored; lists without offset. */
START_TEST(mistakes_of_windows_and_origins) {
    const cg_dump_form form = {.layout = CG_LAYOUT_THD, .dtype = CG_F32, .anonymous = true};
    file f = load(small_dump("window.safetensors", &form, ""));
    set_meta(&f, "window", "6");
    cg_verdict *v = verdict(save(&f, "window.safetensors"));
    ck_assert(has_fault(v, "window-short") && !find(v, "output")->ok);
    free(v);
    set_meta(&f, "window", "4");
    v = verdict(save(&f, "window.safetensors"));
    ck_assert(has_fault(v, "window-long") && !find(v, "grad.query")->ok);
    free(v);
    forget(&f);

    f = load(small_dump("window.safetensors", &form, ""));
    for (int which = 0; which < 2; which++) { /* lse: without the sink, in base 2 */
        float *lse = tensor_of(&f, "out.lse")->data, *sink = tensor_of(&f, "in.sink")->data;
        for (int h = 0; h < 4 && which == 0; h++)
            for (int t = 0; t < 48; t++)
                lse[h * 48 + t] =
                    (float)(((double)lse[h * 48 + t] + log1p(-exp((double)sink[h] - (double)lse[h * 48 + t]))) /
                            log(2));
        v = verdict(save(&f, "lse.safetensors"));
        if (!find(v, "lse")->ok || strcmp(find(v, "lse")->says, "it is in base 2, without the sink"))
            ck_abort_msg("%g units: %s", find(v, "lse")->worst_units, find(v, "lse")->says);
        free(v);
    }
    forget(&f);
}
END_TEST

/* ---- the program ---- */

static int run_check(const char *arguments, char *text, size_t bytes) {
    char command[2048];
    snprintf(command, sizeof command, "%s check %s 2>&1", CSAGRAD_PROGRAM, arguments);
    FILE *pipe = popen(command, "r");
    ck_assert_ptr_nonnull(pipe);
    size_t n = fread(text, 1, bytes - 1, pipe);
    text[n] = 0;
    const int status = pclose(pipe);
    ck_assert(WIFEXITED(status));
    return WEXITSTATUS(status);
}

START_TEST(the_program) {
    static char text[1 << 17], again[1 << 17];
    char arguments[1024];
    ck_assert_int_eq(run_check("--help", text, sizeof text), 0);
    snprintf(arguments, sizeof arguments, "%s --json --rows 3", vector("sbhd_sparse_mean"));
    ck_assert_int_eq(run_check(arguments, text, sizeof text), 0);
    json_error_t why;
    json_t *root = json_loads(text, 0, &why);
    if (!root) ck_abort_msg("%s", why.text);
    ck_assert(json_is_true(json_object_get(root, "match")));
    ck_assert_str_eq(json_string_value(json_object_get(json_object_get(root, "contract"), "teacher")), "full");
    ck_assert(json_is_array(json_object_get(root, "undetermined")) &&
              json_is_array(json_object_get(root, "faults")));
    const json_t *quantity = json_array_get(json_object_get(root, "quantities"), 1);
    ck_assert_str_eq(json_string_value(json_object_get(quantity, "name")), "non_compressed_lse");
    ck_assert(json_is_true(json_object_get(quantity, "ok")) &&
              json_is_null(json_object_get(quantity, "first")));
    ck_assert(json_number_value(json_object_get(quantity, "worst_rel")) < 1e-5);
    ck_assert_int_eq((int)json_array_size(json_object_get(quantity, "rows")), 3);
    const json_t *teachers = json_object_get(json_object_get(root, "remaining"), "teacher");
    ck_assert_uint_eq(json_array_size(teachers), 1);
    ck_assert_str_eq(json_string_value(json_array_get(teachers, 0)), "full");
    json_decref(root);

    /* any number of threads says the same */
    snprintf(arguments, sizeof arguments, "%s --json --rows 3 --threads 1", vector("sbhd_sparse_mean"));
    ck_assert_int_eq(run_check(arguments, again, sizeof again), 0);
    ck_assert_str_eq(text, again);

    /* another contract is exit 1, with the place of the first difference */
    snprintf(arguments, sizeof arguments, "%s --map target=out.target_sink_sparse --json",
             vector("teacher_modes"));
    ck_assert_int_eq(run_check(arguments, text, sizeof text), 1);
    root = json_loads(text, 0, &why);
    ck_assert_ptr_nonnull(root);
    quantity = json_array_get(json_object_get(root, "quantities"), 2);
    ck_assert_str_eq(json_string_value(json_object_get(quantity, "name")), "target");
    const json_t *first = json_object_get(quantity, "first");
    ck_assert_int_eq((int)json_integer_value(json_object_get(first, "position")), 7);
    ck_assert(json_is_null(json_object_get(first, "head")));
    ck_assert(json_number_value(json_object_get(quantity, "worst_units")) >
              100 * json_number_value(json_object_get(quantity, "worst_rel")));
    json_decref(root);
    snprintf(arguments, sizeof arguments, "%s --map target=out.target_sink_sparse --expect teacher=sink",
             vector("teacher_modes"));
    ck_assert_int_eq(run_check(arguments, text, sizeof text), 0);

    /* axes that are not named stay as the dump declares them */
    snprintf(arguments, sizeof arguments, "%s --expect teacher=full", vector("sbhd_dense_mean"));
    ck_assert_int_eq(run_check(arguments, text, sizeof text), 0);

    /* numbers from a file and from options */
    FILE *config = fopen(in_folder("numbers.json"), "w");
    fputs("{\"compress_ratio\": 4, \"sliding_window\": 8, \"softmax_scale\": 0.25}", config);
    fclose(config);
    file f = load(vector("sbhd_sparse_mean"));
    f.n_meta = 0;
    save(&f, "bare.safetensors");
    forget(&f);
    snprintf(arguments, sizeof arguments, "%s --config %s --loss-coeff 1", in_folder("bare.safetensors"),
             in_folder("numbers.json"));
    if (run_check(arguments, text, sizeof text)) ck_abort_msg("%s", text);

    /* the loss alone, without what other contracts are formed of */
    f = load(vector("sbhd_sparse_mean"));
    for (int i = f.n - 1; i >= 0; i--)
        if ((strncmp(f.names[i], "in.", 3) && strcmp(f.names[i], "out.loss")) || !strcmp(f.names[i], "in.kv") ||
            !strcmp(f.names[i], "in.sink"))
            drop(&f, f.names[i]);
    ck_assert_int_eq(run_check(save(&f, "loss.safetensors"), text, sizeof text), 1);
    ck_assert_str_eq(text + strlen(text) - 12, "cannot tell\n");
    forget(&f);

    /* gated pooling, of which an element is changed */
    f = load(vector("compressor"));
    set_meta(&f, "r4_thd_segment_lengths", "[21, 3, 14]");
    ((float *)tensor_of(&f, "r4_thd.out.compressed")->data)[0] += 0.01F;
    snprintf(arguments, sizeof arguments, "%s --json", save(&f, "pooled.safetensors"));
    forget(&f);
    ck_assert_int_eq(run_check(arguments, text, sizeof text), 1);
    root = json_loads(text, 0, &why);
    ck_assert_ptr_nonnull(root);
    size_t q;
    int n_wrong = 0;
    json_array_foreach(json_object_get(root, "quantities"), q, quantity) {
        first = json_object_get(quantity, "first");
        if (json_is_null(first)) continue;
        ck_assert_double_eq_tol(json_number_value(json_object_get(first, "got")) -
                                    json_number_value(json_object_get(first, "expected")),
                                0.01, 1e-4);
        n_wrong++;
    }
    ck_assert_int_eq(n_wrong, 1);
    json_decref(root);

    const struct {
        const char *arguments, *says;
    } bad[] = {{"", "a file is needed"},
               {"/nowhere/dump.npz", "dump.npz"},
               {"x --tolerance 0", "--tolerance"},
               {"x --rows 65", "--rows must be"},
               {"x --expect teacher=ful", "did you mean full?"},
               {"x --map q", "--map needs NAME=THEIRS"},
               {"x --ratoi 4", "did you mean --ratio?"}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char real[600];
        const bool file_wanted = bad[i].arguments[0] == 'x';
        snprintf(real, sizeof real, "%s%s", file_wanted ? vector("sbhd_sparse_mean") : "",
                 bad[i].arguments + file_wanted);
        const int code = run_check(real, text, sizeof text);
        if (code != 2 || !strstr(text, bad[i].says)) ck_abort_msg("%s: %d %s", bad[i].arguments, code, text);
        ck_assert_ptr_eq(strchr(text, '\n'), text + strlen(text) - 1); /* one line */
    }
}
END_TEST

int main(void) {
    if (!mkdtemp(folder)) return EXIT_FAILURE;
    const TTest *const tests[] = {stored_vectors_match,
                                  stored_contracts_are_found,
                                  stored_teachers_are_named,
                                  names_of_frameworks,
                                  layouts_and_elements,
                                  what_cannot_be_told_is_asked_for,
                                  bad_values_are_refused,
                                  the_sentence,
                                  rows_that_see_nothing_hold_nothing,
                                  bf16_numbers_in_f32,
                                  value_and_gradient_apart,
                                  gradients_times_a_number,
                                  selections,
                                  mistakes_of_attention,
                                  mistakes_of_windows_and_origins,
                                  the_program};
    int code = suite_run("check", tests, (int)(sizeof tests / sizeof *tests));
    char command[256];
    snprintf(command, sizeof command, "rm -rf %s", folder);
    return system(command) ? EXIT_FAILURE : code;
}
