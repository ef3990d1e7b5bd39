/* Dumps of a big framework's own attention class, before and after its teacher was mended, and what is right to say of
 * each (tests/data/README.md). Then single changes of a right dump that users once got a wrong answer for. */
#include "tests/support.h"

#include "core/files/archive.h"
#include "core/base/bf16.h"
#include "models/check/dump_write.h"
#include "models/check/verdict.h"

/* ---- dumps as they came ---- */

enum { MATCH, CANNOT_TELL, NO_MATCH };
enum { NO_LOSS = -1 };

static const struct {
    const char *name, *expect;
    int verdict, teacher, support, kl;
    const char *faults; /* all of them, in order */
    double factor;
    bool attention; /* output and its gradients are there, and as expected */
} dumps[] = {
    {"sb_new", "", MATCH, CG_TEACHER_IS_FULL, CG_SUPPORT_IS_SPARSE, CG_KL_IS_EXACT, "", 1, true},
    {"sb_new_dense", "", MATCH, CG_TEACHER_IS_FULL, CG_SUPPORT_IS_DENSE, CG_KL_IS_EXACT, "", 1, true},
    {"sb_new_bf16", "", MATCH, CG_TEACHER_IS_FULL, CG_SUPPORT_IS_SPARSE, CG_KL_IS_EXACT, "", 1, true},
    {"bf16_tiny_qw", "", MATCH, CG_TEACHER_IS_FULL, CG_SUPPORT_IS_SPARSE, CG_KL_IS_EXACT, "", 1, false},
    {"sb_old", "", NO_MATCH, CG_TEACHER_IS_COMPRESSED, CG_SUPPORT_IS_SPARSE, CG_KL_IS_EPS,
     "selects-unseen-keys ", 1, true},
    {"sb_old_dense", "", NO_MATCH, CG_TEACHER_IS_COMPRESSED, CG_SUPPORT_IS_DENSE, CG_KL_IS_EPS,
     "selects-unseen-keys ", 1, true},
    {"sb_old_bf16", "", NO_MATCH, CG_TEACHER_IS_COMPRESSED, CG_SUPPORT_IS_SPARSE, CG_KL_IS_EPS,
     "selects-unseen-keys ", 1, true},
    {"cp_old_sparse", "", NO_MATCH, CG_TEACHER_IS_SINK, CG_SUPPORT_IS_SPARSE, CG_KL_IS_EXACT, "", 1, true},
    {"cp_new_sparse", "", MATCH, CG_TEACHER_IS_FULL, CG_SUPPORT_IS_SPARSE, CG_KL_IS_EXACT, "", 1, true},
    {"rev_f32", "", NO_MATCH, CG_TEACHER_IS_FULL, CG_SUPPORT_IS_SPARSE, CG_KL_IS_EXACT, "", 1, false},
    {"nokv_match", "", CANNOT_TELL, CG_TEACHER_IS_FULL, CG_SUPPORT_IS_SPARSE, CG_KL_IS_EXACT, "", 1, false},
    {"min_unseen", "", NO_MATCH, NO_LOSS, 0, 0, "selects-unseen-keys ", 0, true},
    {"min_keys", "", NO_MATCH, CG_TEACHER_IS_FULL, CG_SUPPORT_IS_SPARSE, CG_KL_IS_EXACT, "gradient-factor ",
     0.5, false},
    {"gscale_old", "", NO_MATCH, CG_TEACHER_IS_COMPRESSED, CG_SUPPORT_IS_SPARSE, CG_KL_IS_EPS,
     "selects-unseen-keys gradient-factor ", 0.25, true},
    {"thp_old_losspart", "", NO_MATCH, CG_TEACHER_IS_COMPRESSED, CG_SUPPORT_IS_SPARSE, CG_KL_IS_EXACT,
     "real-lengths-as-offsets selects-unseen-keys ", 1, false},
    {"expect_dense", "kl=target-floor", MATCH, CG_TEACHER_IS_FULL, CG_SUPPORT_IS_DENSE, CG_KL_IS_TARGET_FLOOR,
     "", 1, false},
    {"kl_new_dense", "", MATCH, CG_TEACHER_IS_FULL, CG_SUPPORT_IS_DENSE, CG_KL_IS_EXACT, "", 1, true},
    {"coeff0", "", MATCH, CG_TEACHER_IS_FULL, CG_SUPPORT_IS_SPARSE, CG_KL_IS_EXACT, "", 1, false},
};
enum { N_DUMPS = sizeof dumps / sizeof *dumps };

static const cg_quantity *find(const cg_verdict *v, const char *name) {
    for (int i = 0; i < v->n_quantities; i++)
        if (!strcmp(v->quantities[i].name, name)) return &v->quantities[i];
    return NULL;
}

static const char *faults_of(const cg_verdict *v, char text[512]) {
    text[0] = 0;
    for (int i = 0; i < v->n_faults; i++) strcat(strcat(text, v->faults[i]), " ");
    return text;
}

static cg_verdict *judge(const cg_dump_options *from, const char *expect) {
    cg_error error = {0};
    cg_dump *d = cg_dump_open(from, &error);
    if (!d) ck_abort_msg("%s", error.text);
    cg_contract expected = d->declared;
    if (!cg_contract_parse_over(expect, &expected, &error)) ck_abort_msg("%s", error.text);
    cg_verdict *v = cg_verdict_make(d, &(cg_verdict_options){.expected = &expected}, &error);
    if (!v) ck_abort_msg("%s", error.text);
    cg_dump_close(d);
    return v;
}

static int verdict_of(const cg_verdict *v) {
    return v->match ? MATCH : v->cannot_tell ? CANNOT_TELL : NO_MATCH;
}

START_TEST(each_is_answered_right) {
    static const char *const attention[] = {"output", "grad.query", "grad.kv", "grad.compressed_kv",
                                            "grad.sink"};
    for (int i = 0; i < N_DUMPS; i++) {
        char path[512], faults[512];
        snprintf(path, sizeof path, "%s/dumps/%s.safetensors", TEST_DATA_DIR, dumps[i].name);
        cg_verdict *v =
            judge(&(cg_dump_options){.paths = (const char *[]){path}, .n_paths = 1}, dumps[i].expect);
        const int *c = v->contract.value;
        if (verdict_of(v) != dumps[i].verdict || strcmp(faults_of(v, faults), dumps[i].faults))
            ck_abort_msg("%s: verdict %d, faults %s: %s", dumps[i].name, verdict_of(v), faults, v->sentence);
        if (dumps[i].teacher != NO_LOSS &&
            (c[CG_AXIS_TEACHER] != dumps[i].teacher || c[CG_AXIS_SUPPORT] != dumps[i].support ||
             c[CG_AXIS_KL] != dumps[i].kl || v->factor != dumps[i].factor || v->gradient_differs))
            ck_abort_msg("%s: factor %g: %s", dumps[i].name, v->factor, v->sentence);
        for (int k = 0; k < 5; k++) {
            const cg_quantity *q = find(v, attention[k]);
            if (q && !q->ok) ck_abort_msg("%s: %s: %s", dumps[i].name, q->name, q->says);
        }
        ck_assert(!dumps[i].attention || find(v, "output"));
        free(v);
    }
}
END_TEST

/* What is said beside the verdict. */
START_TEST(what_is_said_of_them) {
    static const struct {
        const char *name, *says;
    } said[] = {{"nokv_match", "fit the loss, which is one number, the simplest is teacher=compressed, kl=eps"},
                {"gscale_old", "the indexer's gradients are all 0.25 times those of this contract"},
                {"thp_old_losspart", "running sums of real lengths for the offsets of physical rows"},
                {"coeff0", "loss_coeff is 0"},
                {"sb_old", "independent numbers in"}};
    for (int i = 0; i < 5; i++) {
        char path[512];
        snprintf(path, sizeof path, "%s/dumps/%s.safetensors", TEST_DATA_DIR, said[i].name);
        cg_verdict *v = judge(&(cg_dump_options){.paths = (const char *[]){path}, .n_paths = 1}, "");
        if (!strstr(v->sentence, said[i].says)) ck_abort_msg("%s: %s", said[i].name, v->sentence);
        free(v);
    }
    char path[512];
    snprintf(path, sizeof path, "%s/dumps/kl_new_dense.safetensors", TEST_DATA_DIR);
    cg_verdict *v = judge(&(cg_dump_options){.paths = (const char *[]){path}, .n_paths = 1}, "");
    ck_assert_uint_eq(v->remaining[CG_AXIS_KL], 1u << CG_KL_IS_EXACT | 1u << CG_KL_IS_TARGET_FLOOR);
    ck_assert_ptr_nonnull(strstr(v->tell_apart[CG_AXIS_KL], "excluded: eps, clamp-tiny, eps-value-exact-grad"));
    ck_assert_ptr_nonnull(strstr(v->tell_apart[CG_AXIS_KL], "4e-11"));
    free(v);
}
END_TEST

/* ---- one thing changed ---- */

enum { MOST = 48 };
typedef struct changed {
    cg_archive *archive;
    cg_named_tensor tensors[MOST];
    int n;
    const char *metadata[MOST][2];
    int n_metadata;
} changed;

/* The tensors of a file, to be changed. */
static changed copy_of(const char *path) {
    cg_error error = {0};
    changed y = {.archive = cg_archive_open(path, &error)};
    if (!y.archive) ck_abort_msg("%s", error.text);
    for (int i = 0; i < cg_archive_count(y.archive); i++) {
        y.tensors[y.n] = *cg_archive_at(y.archive, i);
        const size_t bytes = (size_t)cg_tensor_bytes(y.tensors[y.n].tensor.dtype, &y.tensors[y.n].tensor.shape);
        y.tensors[y.n].tensor.data = memcpy(malloc(bytes + 1), y.tensors[y.n].tensor.data, bytes);
        y.n++;
    }
    void *at = NULL;
    while (cg_archive_metadata_next(y.archive, &at, &y.metadata[y.n_metadata][0], &y.metadata[y.n_metadata][1]))
        y.n_metadata++;
    return y;
}

/* Random inputs of packed documents of `rows` rows each, computed by the default contract, in f32. */
static changed dump_of(int64_t n_documents, int64_t rows, int64_t topk, bool bf16_weights) {
    cg_dump_case c = {.n_heads = 4,
                      .head_dim = 16,
                      .index_heads = 4,
                      .index_dim = 16,
                      .ratio = 4,
                      .window = 8,
                      .topk = topk,
                      .softmax_scale = 0.25,
                      .loss_coeff = 0.7};
    int64_t physical[8];
    for (int i = 0; i < n_documents; i++) physical[i] = rows;
    const cg_dump_lengths lengths = {(int)n_documents, physical, NULL, 0};
    const cg_dump_contracts contracts = {.by_rows = true};
    const cg_dump_form form = {.layout = CG_LAYOUT_THD, .dtype = CG_F32, .anonymous = true};
    cg_dump_results r;
    cg_error error = {0};
    char path[] = "/tmp/csagrad_changed_XXXXXX";
    ck_assert_int_ge(mkstemp(path), 0);
    bool ok = cg_dump_case_random(&c, &lengths, 5, &error);
    for (int64_t i = 0; ok && bf16_weights && i < c.n_rows * c.index_heads; i++)
        c.weights[i] = (double)cg_bf16_get(cg_bf16_of((float)c.weights[i]));
    if (ok) cg_dump_case_round(&c, CG_F32);
    if (!ok || !cg_dump_compute(&c, &contracts, NULL, &r, &error) ||
        !cg_dump_write(path, &c, &contracts, &r, &form, &error))
        ck_abort_msg("%s", error.text);
    cg_dump_results_free(&r);
    cg_dump_case_free(&c);
    changed y = copy_of(path);
    remove(path);
    return y;
}

static void forget(changed *y) {
    for (int i = 0; i < y->n; i++) free(y->tensors[i].tensor.data);
    cg_archive_close(y->archive);
}

static cg_tensor *tensor_of(changed *y, const char *name) {
    for (int i = 0; i < y->n; i++)
        if (!strcmp(y->tensors[i].name, name)) return &y->tensors[i].tensor;
    ck_abort_msg("no %s", name);
    return NULL;
}

static void leave_out(changed *y, int i) {
    free(y->tensors[i].tensor.data);
    y->tensors[i] = y->tensors[--y->n];
}

/* Inputs, the lists, and what is named: nothing else. */
static void keep(changed *y, const char *answers) {
    for (int i = y->n - 1; i >= 0; i--) {
        const char *name = y->tensors[i].name;
        if (!strncmp(name, "in.", 3) || !strcmp(name, "out.topk") || strstr(answers, name)) continue;
        leave_out(y, i);
    }
}

static void multiply(changed *y, const char *name, float by) {
    cg_tensor *t = tensor_of(y, name);
    for (int64_t i = 0; i < cg_shape_count(&t->shape); i++) ((float *)t->data)[i] *= by;
}

static cg_verdict *judge_changed(const changed *y) {
    return judge(&(cg_dump_options){.tensors = y->tensors,
                                    .n_tensors = y->n,
                                    .metadata = (const char *const(*)[2])y->metadata,
                                    .n_metadata = y->n_metadata},
                 "");
}

/* A loss a little off is a loss a little off, with one document and with several equal ones. */
START_TEST(rounding_is_no_contract) {
    for (int i = 0; i < 3; i++) {
        changed y = dump_of(i == 1 ? 3 : 1, i == 2 ? 200 : 24, 3, false);
        keep(&y, "out.loss");
        multiply(&y, "out.loss", i == 2 ? 1.001F : 1.0001F);
        cg_verdict *v = judge_changed(&y);
        const cg_quantity *loss = find(v, "loss");
        const cg_contract right = cg_contract_default();
        if (v->match || v->identified || v->n_faults || memcmp(&v->contract, &right, sizeof right))
            ck_abort_msg("%s", v->sentence);
        if (!strstr(loss->says, i == 2 ? "no known contract; 1.001 times the expected"
                                       : "no known contract; 1.0001 times the expected"))
            ck_abort_msg("%s", loss->says);
        free(v);
        forget(&y);
    }
}
END_TEST

/* Without what stands beside the compressed keys nothing is known of the default contract: it is not accused. */
START_TEST(what_cannot_be_formed_is_not_judged) {
    changed y = dump_of(2, 40, 3, false);
    keep(&y, "out.loss");
    for (int i = y.n - 1; i >= 0; i--)
        if (!strcmp(y.tensors[i].name, "in.kv") || !strcmp(y.tensors[i].name, "in.sink")) {
            free(y.tensors[i].tensor.data);
            y.tensors[i] = y.tensors[--y.n];
        }
    cg_verdict *v = judge_changed(&y);
    ck_assert(!v->match && v->cannot_tell && !v->identified && v->n_faults == 0 && find(v, "loss")->unjudged);
    if (!strstr(v->sentence, "no other can be formed without kv and sink")) ck_abort_msg("%s", v->sentence);
    free(v);
    forget(&y);
}
END_TEST

/* One factor for all is one fault. */
START_TEST(factors_are_named_once) {
    static const char *const gradients[] = {"grad.q_indexer", "grad.weights", "grad.k_indexer"};
    changed y = dump_of(2, 40, 3, false);
    char faults[512];
    keep(&y, "out.loss grad.q_indexer grad.weights grad.k_indexer");
    for (int i = 0; i < 3; i++) multiply(&y, gradients[i], 3);
    cg_verdict *v = judge_changed(&y);
    ck_assert_str_eq(faults_of(v, faults), "gradient-factor ");
    ck_assert_double_eq(v->factor, 3);
    if (!strstr(v->sentence, "all 3 times")) ck_abort_msg("%s", v->sentence);
    free(v);
    multiply(&y, "grad.q_indexer", 1.0F / 3), multiply(&y, "grad.weights", 1.0F / 3);
    v = judge_changed(&y); /* the keys' alone: the others are as expected */
    ck_assert_str_eq(faults_of(v, faults), "gradient-factor ");
    ck_assert(find(v, "grad.q_indexer")->ok && find(v, "grad.weights")->ok && !find(v, "grad.k_indexer")->ok);
    if (!strstr(v->sentence, "grad.k_indexer is 3 times the expected, the others are as they should be"))
        ck_abort_msg("%s", v->sentence);
    free(v);
    multiply(&y, "grad.k_indexer", 1.0F / 3), multiply(&y, "grad.weights", 0);
    v = judge_changed(&y);
    if (!strstr(v->sentence, "grad.weights is 0 times the expected, the others are as they should be"))
        ck_abort_msg("%s", v->sentence);
    free(v);
    forget(&y);
}
END_TEST

/* Where the sink is missing from a dump, what then differs a little is not "computed in bfloat16", neither beside the
 * output nor in the loss, whose teacher is made of the attention. */
START_TEST(coarse_arithmetic_excuses_nothing_unexplained) {
    changed y = copy_of(TEST_DATA_DIR "/dumps/sb_new.safetensors");
    for (int i = y.n - 1; i >= 0; i--)
        if (strstr(y.tensors[i].name, "sink")) leave_out(&y, i);
    cg_verdict *v = judge_changed(&y);
    ck_assert(!v->match && !v->cannot_tell && !find(v, "output")->ok);
    ck_assert(find(v, "grad.compressed_kv")->unsure && find(v, "grad.q_indexer")->unsure);
    for (int i = 0; i < v->n_notes; i++)
        if (strstr(v->notes[i], "probably computed")) ck_abort_msg("%s", v->notes[i]);
    free(v);
    forget(&y);
}
END_TEST

/* Scales of the inputs that are not those in use: head weights before theirs, queries twice as large. */
START_TEST(scales_are_found) {
    static const struct {
        const char *tensor, *gradient, *fault, *says;
        float by;
    } scaled[] = {
        {"in.weights", "grad.weights", "head-weights-scale ",
         "the head weights in use are 0.0625 times those in the dump", 16},
        {"in.query", "grad.query", "softmax-scale ", "the softmax scale in use is 0.5 times the one given", 2},
    };
    for (int i = 0; i < 2; i++) {
        changed y = dump_of(2, 40, 3, false);
        char faults[512];
        keep(&y, i ? "out.output grad.query out.loss grad.q_indexer grad.weights"
                   : "out.loss grad.q_indexer grad.weights");
        multiply(&y, scaled[i].tensor, scaled[i].by);
        multiply(&y, scaled[i].gradient, 1 / scaled[i].by); /* the chain rule */
        cg_verdict *v = judge_changed(&y);
        bool said = false;
        for (int k = 0; k < v->n_notes; k++) said |= strstr(v->notes[k], scaled[i].says) != NULL;
        for (int k = 0; k < v->n_quantities; k++) said |= strstr(v->quantities[k].says, scaled[i].says) != NULL;
        if (strcmp(faults_of(v, faults), scaled[i].fault) || !said || v->match)
            ck_abort_msg("%s: %s", faults, v->sentence);
        const cg_contract right = cg_contract_default();
        ck_assert(!memcmp(&v->contract, &right, sizeof right));
        free(v);
        forget(&y);
    }
}
END_TEST

/* One row of one gradient half a percent off: no type of another tensor excuses it. */
START_TEST(no_tensor_borrows_another_ones_rounding) {
    for (int bf16 = 0; bf16 < 2; bf16++) {
        changed y = dump_of(2, 40, 3, bf16);
        cg_tensor *w = tensor_of(&y, "in.weights"), *q = tensor_of(&y, "grad.q_indexer");
        const int64_t n = cg_shape_count(&w->shape), row = q->shape.dims[1] * q->shape.dims[2];
        if (bf16) {
            uint16_t *x = malloc((size_t)n * sizeof *x + 1);
            for (int64_t i = 0; i < n; i++) x[i] = cg_bf16_of(((float *)w->data)[i]);
            free(w->data);
            w->data = x, w->dtype = CG_BF16;
        }
        cg_verdict *v = judge_changed(&y);
        ck_assert(v->match);
        free(v);
        for (int64_t i = 0; i < row; i++) ((float *)q->data)[30 * row + i] *= 1.005F;
        v = judge_changed(&y);
        ck_assert(!v->match && !v->cannot_tell && !find(v, "grad.q_indexer")->ok &&
                  find(v, "grad.weights")->ok);
        ck_assert_ptr_nonnull(strstr(find(v, "grad.q_indexer")->says, "1 of"));
        free(v);
        forget(&y);
    }
}
END_TEST

/* Gradients weighted row by row have no common factor. */
START_TEST(factors_that_differ_are_no_factor) {
    changed y = dump_of(2, 40, 3, false);
    char faults[512];
    keep(&y, "out.loss grad.q_indexer grad.weights");
    for (int i = 0; i < 2; i++) {
        cg_tensor *t = tensor_of(&y, i ? "grad.weights" : "grad.q_indexer");
        const int64_t width = cg_shape_count(&t->shape) / t->shape.dims[0];
        for (int64_t k = 0; k < cg_shape_count(&t->shape); k++)
            ((float *)t->data)[k] *= 0.2F + 0.1F * (float)(k / width % 7);
    }
    cg_verdict *v = judge_changed(&y);
    ck_assert_str_eq(faults_of(v, faults), "");
    if (!strstr(v->sentence, "the factors differ from row to row, from 0.2 to 0.8"))
        ck_abort_msg("%s", v->sentence);
    free(v);
    forget(&y);
}
END_TEST

/* A loss kept as a Python float is no finer than the arithmetic that made it. */
START_TEST(a_float32_loss_in_float64) {
    changed y = dump_of(1, 40, 3, false);
    cg_tensor *t = tensor_of(&y, "out.loss");
    double *x = malloc(sizeof *x);
    *x = (double)((float *)t->data)[0] * (1 + 3e-8);
    free(t->data);
    t->data = x, t->dtype = CG_F64;
    cg_verdict *v = judge_changed(&y);
    if (!v->match) ck_abort_msg("%s", find(v, "loss")->says);
    free(v);
    forget(&y);
}
END_TEST

/* Where inputs are so large that rounding explains everything, no scale of them can be told: none is looked
 * for. */
START_TEST(numbers_that_say_nothing_cost_little) {
    changed y = copy_of(TEST_DATA_DIR "/dumps/sb_old.safetensors");
    cg_tensor *query = tensor_of(&y, "in.query");
    for (int64_t i = 0; i < cg_shape_count(&query->shape); i += 2) ((float *)query->data)[i] = 1e38F;
    cg_verdict *v = judge_changed(&y);
    ck_assert(!v->match);
    ck_assert_msg(v->n_looks >= 1 && v->n_looks <= 8, "%d looks", v->n_looks);
    free(v);
    forget(&y);
}
END_TEST

int main(void) {
    const TTest *const tests[] = {each_is_answered_right,
                                  numbers_that_say_nothing_cost_little,
                                  what_is_said_of_them,
                                  rounding_is_no_contract,
                                  what_cannot_be_formed_is_not_judged,
                                  factors_are_named_once,
                                  coarse_arithmetic_excuses_nothing_unexplained,
                                  scales_are_found,
                                  no_tensor_borrows_another_ones_rounding,
                                  factors_that_differ_are_no_factor,
                                  a_float32_loss_in_float64};
    return suite_run("real_dumps", tests, (int)(sizeof tests / sizeof *tests));
}
