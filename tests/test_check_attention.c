/* csagrad check on attention and selection: right answers however they are listed or rounded, planted mistakes
 * named by the rows that show them, and no name where they do not. */
#include "tests/support.h"

#include <unistd.h>

#include "core/base/bf16.h"
#include "models/check/dump_write.h"
#include "models/check/verdict.h"

static char folder[] = "/tmp/csagrad_attention_XXXXXX";

/* ---- dumps to change ---- */

typedef struct sample {
    cg_dump_case c;
    cg_dump_results r;
    cg_dump_form form;
    const char *less[16]; /* tensors that the file shall not have */
    double *scores;       /* [T, N] index scores to add, or NULL */
    bool loss;            /* with the indexer's loss and its gradients */
} sample;

static void compute(const cg_dump_case *c, cg_dump_results *r) {
    cg_dump_contracts contracts = {.value = cg_contract_default(), .gradient = cg_contract_default()};
    cg_error error = {0};
    if (!cg_dump_compute(c, &contracts, NULL, r, &error)) ck_abort_msg("%s", error.text);
}

static sample sample_of(cg_dtype dtype, int n, const int64_t *lengths, const int64_t *real, int64_t topk) {
    sample s = {.c = {.n_heads = 4,
                      .head_dim = 8,
                      .index_heads = 4,
                      .index_dim = 16,
                      .ratio = 4,
                      .window = 5,
                      .topk = topk,
                      .softmax_scale = 0.4,
                      .loss_coeff = 0.7},
                .form = {.layout = CG_LAYOUT_THD, .dtype = dtype, .anonymous = true}};
    const cg_dump_lengths l = {n, lengths, real, 0};
    cg_error error = {0};
    if (!cg_dump_case_random(&s.c, &l, 9, &error)) ck_abort_msg("%s", error.text);
    cg_dump_case_round(&s.c, dtype);
    compute(&s.c, &s.r);
    return s;
}

static sample small(cg_dtype dtype) { return sample_of(dtype, 2, (int64_t[]){32, 24}, NULL, 3); }

static void forget(sample *s) {
    cg_dump_results_free(&s->r);
    cg_dump_case_free(&s->c);
    free(s->scores);
}

/* The file as written, without some tensors, with scores. */
static const char *save(const sample *s) {
    static char path[2][256];
    static const char *const keys[] = {"layout",        "ratio",      "window", "topk",
                                       "softmax_scale", "loss_coeff", "index"};
    static const char *const of_loss[] = {"target",  "predict", "out.kl", "loss",
                                          "grad.q_", "grad.w",  "grad.k_"};
    cg_named_tensor kept[64];
    const char *meta[8][2];
    int n = 0, n_meta = 0;
    cg_error error = {0};
    for (int i = 0; i < 2; i++) snprintf(path[i], sizeof path[0], "%s/%d.safetensors", folder, i);
    cg_dump_contracts contracts = {.value = cg_contract_default(), .gradient = cg_contract_default()};
    if (!cg_dump_write(path[0], &s->c, &contracts, &s->r, &s->form, &error)) ck_abort_msg("%s", error.text);
    cg_safetensors *from = cg_safetensors_open(path[0], &error);
    if (!from) ck_abort_msg("%s", error.text);
    for (int i = 0; i < cg_safetensors_count(from); i++) {
        kept[n] = *cg_safetensors_at(from, i);
        bool less = false;
        for (int k = 0; k < 7 && !s->loss; k++) less |= strstr(kept[n].name, of_loss[k]) != NULL;
        for (int k = 0; k < 16 && s->less[k]; k++) less |= strstr(kept[n].name, s->less[k]) != NULL;
        n += !less;
    }
    if (s->scores)
        kept[n++] =
            (cg_named_tensor){"out.index_scores", {CG_F64, CG_SHAPE(s->c.n_rows, s->r.n_keys), s->scores}};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if ((meta[n_meta][1] = cg_safetensors_metadata(from, keys[i]))) meta[n_meta++][0] = keys[i];
    if (!cg_safetensors_write(path[1], kept, n, meta, n_meta, &error)) ck_abort_msg("%s", error.text);
    cg_safetensors_close(from);
    return path[1];
}

static cg_verdict *verdict(const sample *s) {
    const char *path = save(s);
    const cg_dump_options from = {.paths = &path, .n_paths = 1};
    const cg_verdict_options how = {0};
    cg_error error = {0};
    cg_dump *dump = cg_dump_open(&from, &error);
    cg_verdict *v = dump ? cg_verdict_make(dump, &how, &error) : NULL;
    if (!v) ck_abort_msg("%s", error.text);
    cg_dump_close(dump);
    return v;
}

static const cg_quantity *find(const cg_verdict *v, const char *name) {
    for (int i = 0; i < v->n_quantities; i++)
        if (!strcmp(v->quantities[i].name, name)) return &v->quantities[i];
    ck_abort_msg("%s is not judged", name);
    return NULL;
}

static bool notes(const cg_verdict *v, const char *text) {
    for (int i = 0; i < v->n_notes; i++)
        if (strstr(v->notes[i], text)) return true;
    return false;
}

static const char *const attended[] = {
    "output", "lse", "non_compressed_lse", "grad.query", "grad.kv", "grad.compressed_kv", "grad.sink"};

/* The faults, in order, are these and no others; NULL: none. */
static void expect_faults(const cg_verdict *v, const char *first, const char *second) {
    const char *const want[] = {first, second};
    const int n = (first != NULL) + (second != NULL);
    if (v->n_faults != n)
        ck_abort_msg("%d faults, the first is %s; expected %s", v->n_faults, v->n_faults ? v->faults[0] : "-",
                     first ? first : "none");
    for (int i = 0; i < n; i++) ck_assert_str_eq(v->faults[i], want[i]);
}

static void expect_says(const cg_verdict *v, const char *name, const char *text) {
    const cg_quantity *q = find(v, name);
    if (q->ok || !strstr(q->says, text))
        ck_abort_msg("%s is %s: \"%s\"", name, q->ok ? "fine" : "wrong", q->says);
}

static void expect_attention(const cg_verdict *v) {
    for (size_t i = 0; i < sizeof attended / sizeof *attended; i++) {
        const cg_quantity *q = find(v, attended[i]);
        if (!q->ok) ck_abort_msg("%s: %g units, %s", q->name, q->worst_units, q->says);
    }
}

/* ---- attention by hand ---- */

static int64_t segment_of(const cg_dump_case *c, int64_t t) {
    int64_t s = 0;
    while (c->cu_seqlens[s + 1] <= t) s++;
    return s;
}

static int64_t visible(const cg_dump_case *c, int64_t t) {
    return (t - c->cu_seqlens[segment_of(c, t)] + 1) / c->ratio;
}

/* Output of row t over its window, its sink and the n rows of ckv in a list, -1 passed over, each as often as
 * it stands there. */
static void attend(const sample *s, int64_t t, const int32_t *list, int64_t n, double *out) {
    const cg_dump_case *c = &s->c;
    const int64_t D = c->head_dim, start = c->cu_seqlens[segment_of(c, t)];
    for (int64_t h = 0; h < c->n_heads; h++) {
        const double *q = c->query + (t * c->n_heads + h) * D;
        double sum = exp(c->sink[h]), *o = out + h * D;
        memset(o, 0, (size_t)D * sizeof *o);
        for (int64_t i = 0; i < c->window + n; i++) {
            const int64_t row = i < c->window ? t - i : list[i - c->window];
            if (i < c->window ? row < start : row < 0) continue;
            const double *k = (i < c->window ? c->kv : c->ckv) + row * D;
            double x = 0;
            for (int64_t d = 0; d < D; d++) x += q[d] * k[d];
            x = exp(x * c->softmax_scale);
            sum += x;
            for (int64_t d = 0; d < D; d++) o[d] += x * k[d];
        }
        for (int64_t d = 0; d < D; d++) o[d] /= sum;
    }
}

static void attend_all(sample *s) {
    const int64_t HD = s->c.n_heads * s->c.head_dim;
    for (int64_t t = 0; t < s->c.n_rows; t++)
        attend(s, t, s->r.topk + t * s->r.width, s->r.width, s->r.output + t * HD);
}

/* Free slots of the lists: the next key that the row does not see yet, in rows below `rows`. */
static void list_unseen(sample *s, int64_t rows) {
    for (int64_t t = 0; t < rows; t++) {
        const int64_t b = segment_of(&s->c, t), next = s->c.cu_compressed[b] + visible(&s->c, t);
        for (int64_t k = 0; k < s->r.width; k++)
            if (s->r.topk[t * s->r.width + k] < 0 && next < s->c.cu_compressed[b + 1]) {
                s->r.topk[t * s->r.width + k] = (int32_t)next;
                break;
            }
    }
}

START_TEST(lists_hold_keys_not_seen_yet) {
    const cg_dtype dtypes[] = {CG_F32, CG_F64, CG_BF16};
    for (int i = 0; i < 3; i++) { /* attention passes over them */
        sample s = small(dtypes[i]);
        list_unseen(&s, s.c.n_rows);
        cg_verdict *v = verdict(&s);
        expect_attention(v);
        expect_faults(v, "selects-unseen-keys", NULL);
        expect_says(v, "selection", "beside those that are expected");
        free(v);
        attend_all(&s); /* ... or does not */
        s.less[0] = "grad.";
        s.less[1] = "out.lse";
        v = verdict(&s);
        expect_faults(v, "selects-unseen-keys", "attends-unseen-keys");
        expect_says(v, "output", "22 of which tell it from what is expected");
        free(v);
        forget(&s);
    }
    sample s = small(CG_F32); /* one row shows nothing */
    list_unseen(&s, 1);
    attend_all(&s);
    s.less[0] = "grad.";
    s.less[1] = "out.lse";
    cg_verdict *v = verdict(&s);
    expect_faults(v, "selects-unseen-keys", NULL);
    ck_assert(!find(v, "output")->ok);
    ck_assert_str_eq(find(v, "output")->says, "");
    free(v);
    forget(&s);
}
END_TEST

START_TEST(a_key_listed_twice) {
    sample s = small(CG_F32);
    for (int64_t t = 0; t < s.c.n_rows; t++) /* rows that see one or two keys list the first one again */
        if (visible(&s.c, t) > 0 && visible(&s.c, t) < 3) s.r.topk[t * s.r.width + 2] = s.r.topk[t * s.r.width];
    for (int often = 0; often < 2; often++) {
        if (often) attend_all(&s);
        s.less[0] = often ? "grad." : NULL;
        s.less[1] = often ? "out.lse" : NULL;
        cg_verdict *v = verdict(&s);
        if (!find(v, "output")->ok) ck_abort_msg("%s", find(v, "output")->says);
        if (!often) expect_attention(v);
        expect_faults(v, "selects-a-key-twice", NULL);
        if (!notes(v, often ? "as often as" : "more than once once"))
            ck_abort_msg("%d: %s", often, v->n_notes ? v->notes[0] : "no note");
        free(v);
    }
    forget(&s);
}
END_TEST

/* ---- mistakes by name ---- */

typedef void (*change)(cg_dump_case *c);
static void no_sink(cg_dump_case *c) {
    for (int64_t h = 0; h < c->n_heads; h++) c->sink[h] = -1e30;
}
static void short_window(cg_dump_case *c) { c->window--; }
static void long_window(cg_dump_case *c) { c->window++; }
static void all_visible(cg_dump_case *c) { c->topk = 100; }

/* Answers of attention from a changed case, everything else from the sample. */
static void answers_of(sample *s, change f, double scale) {
    cg_dump_case c = s->c;
    cg_dump_results other = {0};
    double *const sink = c.sink, *const ckv = c.ckv;
    const size_t H = (size_t)c.n_heads, n = (size_t)(c.n_compressed * c.head_dim);
    c.sink = memcpy(malloc(H * sizeof *sink), sink, H * sizeof *sink);
    c.ckv = memcpy(malloc(n * sizeof *ckv), ckv, n * sizeof *ckv);
    c.softmax_scale *= scale;
    if (f) f(&c);
    compute(&c, &other);
    double **const to[] = {&s->r.output,  &s->r.lse,      &s->r.window_lse, &s->r.grad_query,
                           &s->r.grad_kv, &s->r.grad_ckv, &s->r.grad_sink};
    double **const from[] = {&other.output,  &other.lse,      &other.window_lse, &other.grad_query,
                             &other.grad_kv, &other.grad_ckv, &other.grad_sink};
    for (int i = 0; i < 7; i++) {
        double *x = *to[i];
        *to[i] = *from[i];
        *from[i] = x;
    }
    free(c.sink);
    free(c.ckv);
    cg_dump_results_free(&other);
}

START_TEST(mistakes_are_named_by_rows_that_show_them) {
    const struct {
        change f;
        const char *fault, *says;
    } cases[] = {
        {no_sink, "sink-ignored", "the sink is missing"},
        {short_window, "window-short", "one token too short"},
        {long_window, "window-long", "one token too long"},
        {all_visible, "attends-all-visible", "all visible compressed rows, not to their list: it gives all"}};
    const cg_dtype dtypes[] = {CG_F32, CG_F64, CG_BF16};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int k = 0; k < 3; k++) {
            sample s = small(dtypes[k]);
            answers_of(&s, cases[i].f, 1);
            cg_verdict *v = verdict(&s);
            expect_faults(v, cases[i].fault, NULL);
            expect_says(v, "output", cases[i].says);
            expect_says(v, "grad.kv", "as expected where");
            if (i == 3) expect_says(v, "output", "26 of which tell"); /* more than three keys, no fewer */
            ck_assert(find(v, "selection")->ok && !v->match);
            free(v);
            forget(&s);
        }
    /* one row is no evidence, whatever explains it */
    sample s = small(CG_F32), wrong = small(CG_F32);
    answers_of(&wrong, all_visible, 1);
    const int64_t HD = s.c.n_heads * s.c.head_dim, row = 31;
    memcpy(s.r.output + row * HD, wrong.r.output + row * HD, (size_t)HD * sizeof(double));
    cg_verdict *v = verdict(&s);
    expect_faults(v, NULL, NULL);
    ck_assert(!find(v, "output")->ok && find(v, "grad.query")->ok);
    ck_assert_int_eq(find(v, "output")->first.position, row);
    free(v);
    forget(&wrong);
    forget(&s);
    /* a window of one token: too short is none at all */
    s = small(CG_F32);
    s.c.window = 1;
    for (int64_t t = 0; t < s.c.n_rows; t++)
        for (int64_t h = 0; h < s.c.n_heads; h++) {
            const int64_t K = s.r.width, D = s.c.head_dim;
            double *kv = s.c.kv + t * D, keep[8], *out = s.r.output + t * HD;
            memcpy(keep, kv, sizeof keep);
            s.c.window = 0;
            attend(&s, t, s.r.topk + t * K, K, out);
            s.c.window = 1;
            memcpy(kv, keep, sizeof keep);
        }
    s.less[0] = "grad.";
    s.less[1] = "lse";
    v = verdict(&s);
    expect_faults(v, NULL, NULL);
    expect_says(v, "output",
                "the dump does not tell apart: the window is missing from the softmax, or the window is one");
    free(v);
    forget(&s);
}
END_TEST

/* ---- numbers times a number ---- */

static void times(double *x, int64_t n, double f) {
    for (int64_t i = 0; i < n; i++) x[i] *= f;
}

START_TEST(factors) {
    const cg_dtype dtypes[] = {CG_F32, CG_F64, CG_BF16};
    for (int i = 0; i < 3; i++) {
        sample s = small(dtypes[i]);
        const int64_t T = s.c.n_rows, H = s.c.n_heads, D = s.c.head_dim;
        times(s.r.grad_kv, T * D, 0.25);
        cg_verdict *v = verdict(&s);
        expect_faults(v, "grad.kv-factor", NULL);
        expect_says(v, "grad.kv", "it is 0.25 times the one expected");
        ck_assert(find(v, "grad.query")->ok && find(v, "output")->ok);
        free(v);
        s.r.grad_sink[1] *= 1.1; /* one number is no factor */
        v = verdict(&s);
        expect_faults(v, "grad.kv-factor", NULL);
        ck_assert(!find(v, "grad.sink")->ok);
        ck_assert_str_eq(find(v, "grad.sink")->says, "");
        free(v);
        s.r.grad_sink[1] /= 1.1;
        times(s.r.grad_query, T * H * D, 0.25);
        times(s.r.grad_ckv, s.c.n_compressed * D, 0.25);
        times(s.r.grad_sink, H, 0.25);
        v = verdict(&s);
        expect_faults(v, "attention-gradient-factor", NULL);
        expect_says(v, "grad.sink", "all gradients of attention are 0.25 times those expected");
        free(v);
        times(s.r.output, T * H * D, 1.5);
        v = verdict(&s);
        expect_faults(v, "attention-gradient-factor", "output-factor");
        expect_says(v, "output", "it is 1.5 times the one expected");
        free(v);
        forget(&s);
    }
}
END_TEST

START_TEST(another_softmax_scale) {
    const struct {
        double factor;
        const char *says;
        cg_dtype dtype;
    } cases[] = {{0.5, "0.5 times the one given", CG_F32},
                 {2.828427124746190, "2.82842712 times the one given", CG_F32}, /* sqrt(D) */
                 {1.442695040888963, "1.44269504 times the one given", CG_F64},
                 {1.3721, "1.3721 times the one given", CG_F32},
                 {0.5, "0.5 times the one given", CG_BF16}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int less = 0; less < 2; less++) { /* the lse alone tells it as well */
            sample s = small(cases[i].dtype);
            answers_of(&s, NULL, cases[i].factor);
            s.less[0] = less ? "out.output" : NULL;
            cg_verdict *v = verdict(&s);
            if (!v->n_faults || strcmp(v->faults[0], "softmax-scale"))
                ck_abort_msg("%g: %s", cases[i].factor, find(v, less ? "lse" : "output")->says);
            expect_says(v, less ? "lse" : "output", cases[i].says);
            expect_says(v, "grad.kv", "as expected where the softmax scale");
            free(v);
            forget(&s);
        }
    /* the loss is judged with it: its teacher was computed so too */
    sample other = small(CG_F32);
    const double scale = other.c.softmax_scale;
    other.loss = true;
    other.c.softmax_scale *= 0.5;
    cg_dump_results_free(&other.r);
    compute(&other.c, &other.r);
    other.c.softmax_scale = scale;
    cg_verdict *v = verdict(&other);
    expect_faults(v, "softmax-scale", NULL);
    ck_assert(find(v, "target")->ok && find(v, "loss")->ok && find(v, "grad.q_indexer")->ok && !v->match);
    free(v);
    forget(&other);
}
END_TEST

START_TEST(what_cannot_be_judged_is_no_match) {
    const struct {
        const char *less[4], *name, *says;
    } cases[] = {{{"in.kv"}, "output", "not judged: kv is needed"},
                 {{"in.dout"}, "grad.query", "not judged: dout is needed"},
                 {{"in.dout"}, "grad.sink", "not judged: dout is needed"},
                 {{"in.sink"}, "grad.sink", "not judged: sink is needed"},
                 {{"in.compressed_kv"}, "output", "not judged: compressed_kv is needed"},
                 {{"out.topk", "_indexer", "weights"}, "output", "not judged: topk is needed"},
                 {{"_indexer", "weights"}, "selection", "not judged: q_indexer, weights and k_indexer"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        sample s = small(CG_F32);
        memcpy(s.less, cases[i].less, sizeof cases[i].less);
        cg_verdict *v = verdict(&s);
        const cg_quantity *q = find(v, cases[i].name);
        if (!q->unjudged || q->ok || !strstr(q->says, cases[i].says) || v->match)
            ck_abort_msg("%s: %s", cases[i].name, q->says);
        free(v);
        forget(&s);
    }
    sample s = sample_of(CG_F32, 2, (int64_t[]){32, 24}, NULL, 2);
    s.less[0] = "out.topk"; /* without lists, the scores say which keys are meant */
    cg_verdict *v = verdict(&s);
    expect_attention(v);
    free(v);
    forget(&s);
}
END_TEST

/* ---- selection ---- */

static sample segments_of(int64_t n, int64_t topk) { return sample_of(CG_F32, 1, (int64_t[]){n}, NULL, topk); }

static void expect_selection(const sample *s, const char *fault, const char *says) {
    cg_verdict *v = verdict(s);
    expect_faults(v, fault, NULL);
    if (says)
        expect_says(v, "selection", says);
    else
        ck_assert(find(v, "selection")->ok);
    free(v);
}

/* The lists alone are judged. */
static sample lists_alone(sample s) {
    const char *const less[] = {"grad.", "lse", "output", "kv"};
    memcpy(s.less, less, sizeof less);
    return s;
}

/* Lists by other scores: the `topk` largest of the first n(t). */
static void select_by(sample *s, double (*score)(const sample *s, int64_t t, int64_t key), int64_t late) {
    for (int64_t t = 0; t < s->c.n_rows; t++) {
        const int64_t b = segment_of(&s->c, t), K = s->r.width, first = s->c.cu_compressed[b];
        const int64_t n = (t - s->c.cu_seqlens[b] + 1 - late) / s->c.ratio;
        int32_t *list = s->r.topk + t * K;
        for (int64_t k = 0; k < K; k++) {
            double best = -INFINITY;
            list[k] = -1;
            for (int64_t i = 0; i < n; i++) {
                bool taken = false;
                for (int64_t m = 0; m < k; m++) taken |= list[m] == first + i;
                if (taken || !(score(s, t, first + i) > best)) continue;
                best = score(s, t, first + i);
                list[k] = (int32_t)(first + i);
            }
        }
    }
}

static double score_of(const sample *s, int64_t t, int64_t key, bool linear) {
    const cg_dump_case *c = &s->c;
    double sum = 0;
    for (int64_t g = 0; g < c->index_heads; g++) {
        double x = 0;
        for (int64_t d = 0; d < c->index_dim; d++)
            x += c->q_indexer[(t * c->index_heads + g) * c->index_dim + d] *
                 c->k_indexer[key * c->index_dim + d];
        sum += c->weights[t * c->index_heads + g] * (linear || x > 0 ? x : 0);
    }
    return sum;
}
static double by_score(const sample *s, int64_t t, int64_t key) { return score_of(s, t, key, false); }
static double by_linear(const sample *s, int64_t t, int64_t key) { return score_of(s, t, key, true); }
static double by_bf16(const sample *s, int64_t t, int64_t key) {
    return (double)cg_bf16_get(cg_bf16_of((float)score_of(s, t, key, false)));
}
static double by_index(const sample *s, int64_t t, int64_t key) { return (void)s, (void)t, (double)key; }
static double by_low_index(const sample *s, int64_t t, int64_t key) { return (void)s, (void)t, (double)-key; }
static double by_low_score(const sample *s, int64_t t, int64_t key) { return -score_of(s, t, key, false); }

START_TEST(rules_of_selection_need_rows) {
    sample s = lists_alone(segments_of(4, 1));
    s.r.topk[3] = -1;
    expect_selection(&s, NULL, "1 row selects fewer keys than it could");
    forget(&s);

    s = lists_alone(segments_of(24, 16));
    select_by(&s, by_score, 0);
    expect_selection(&s, NULL, NULL);
    select_by(&s, by_score, 1);
    expect_selection(&s, "sees-keys-too-late", "(6 rows tell)");
    select_by(&s, by_score, 0);
    s.r.topk[23 * s.r.width + 5] = -1;
    expect_selection(&s, NULL, "1 row selects fewer keys than it could");
    forget(&s);

    const struct {
        double (*score)(const sample *s, int64_t t, int64_t key);
        const char *fault, *says;
    } rules[] = {{by_linear, "selection-by-linear-scores", "without ReLU"},
                 {by_index, "selects-last-keys", "the last keys"},
                 {by_low_index, "selects-first-keys", "the first keys"},
                 {by_low_score, "selects-lowest-scores", "of lowest score"}};
    for (int i = 0; i < 4; i++) {
        s = lists_alone(small(CG_F32));
        select_by(&s, rules[i].score, 0);
        expect_selection(&s, rules[i].fault, rules[i].says);
        /* but for one row: no rule */
        s.r.topk[31 * s.r.width] = -1;
        expect_selection(&s, NULL, "fewer");
        forget(&s);
    }
}
END_TEST

/* Scores that differ by less than their rounding in bf16. */
START_TEST(selection_in_coarser_arithmetic) {
    sample s = lists_alone(sample_of(CG_F32, 1, (int64_t[]){640}, NULL, 16));
    select_by(&s, by_bf16, 0);
    cg_verdict *v = verdict(&s);
    expect_faults(v, NULL, NULL);
    if (!find(v, "selection")->ok) ck_abort_msg("%s", find(v, "selection")->says);
    ck_assert(notes(v, "selection was probably made by scores in"));
    free(v);
    /* in one row that happened otherwise */
    int64_t row = -1;
    for (int64_t t = 0; t < s.c.n_rows && row < 0; t++) {
        int32_t theirs[16];
        memcpy(theirs, s.r.topk + t * 16, sizeof theirs);
        for (int i = 0; i < 16 && row < 0; i++)
            for (int64_t key = 0; key < visible(&s.c, t); key++) {
                bool listed = false;
                for (int m = 0; m < 16; m++) listed |= theirs[m] == key;
                if (!listed && theirs[i] >= 0 && by_score(&s, t, key) > by_score(&s, t, theirs[i])) row = t;
            }
    }
    ck_assert_int_ge(row, 0);
    int32_t kept[16];
    memcpy(kept, s.r.topk + row * 16, sizeof kept);
    select_by(&s, by_score, 0);
    memcpy(s.r.topk + row * 16, kept, sizeof kept);
    v = verdict(&s);
    expect_faults(v, NULL, NULL);
    ck_assert(!find(v, "selection")->ok && find(v, "selection")->unsure && !v->match);
    free(v);
    forget(&s);
}
END_TEST

START_TEST(lists_wider_than_asked_and_padding) {
    sample s = lists_alone(small(CG_F32));
    s.c.topk = 2;
    expect_selection(&s, "selects-too-many", "rows select more than 2 keys");
    for (int64_t t = 0; t < s.c.n_rows; t++) s.r.topk[t * s.r.width + 2] = -1; /* padded with -1 is fine */
    expect_selection(&s, NULL, NULL);
    forget(&s);

    s = sample_of(CG_F32, 2, (int64_t[]){32, 24}, (int64_t[]){29, 21}, 3);
    for (int64_t t = 29; t < 32; t++)
        for (int k = 0; k < 3; k++) s.r.topk[t * 3 + k] = k;
    cg_verdict *v = verdict(&s);
    expect_attention(v);
    expect_faults(v, NULL, NULL);
    ck_assert(find(v, "selection")->ok && !notes(v, "padding"));
    free(v);
    forget(&s);
}
END_TEST

static void set_scores(sample *s, bool linear, double factor) {
    const int64_t N = s->r.n_keys;
    free(s->scores);
    s->scores = calloc((size_t)(s->c.n_rows * N), sizeof *s->scores);
    for (int64_t t = 0; t < s->c.n_rows; t++)
        for (int64_t i = 0; i < N; i++)
            s->scores[t * N + i] =
                i < visible(&s->c, t)
                    ? (double)(float)(factor *
                                      score_of(s, t, s->c.cu_compressed[segment_of(&s->c, t)] + i, linear))
                    : -INFINITY;
}

START_TEST(scores_are_an_answer) {
    sample s = small(CG_F32);
    set_scores(&s, false, 1);
    cg_verdict *v = verdict(&s);
    ck_assert(v->match && find(v, "index_scores")->ok);
    free(v);
    set_scores(&s, true, 1);
    v = verdict(&s);
    expect_faults(v, "index-scores-linear", NULL);
    expect_says(v, "index_scores", "scores without ReLU");
    free(v);
    set_scores(&s, false, 3);
    v = verdict(&s);
    ck_assert_str_eq(v->faults[0], "index-scores-factor");
    expect_says(v, "index_scores", "they are 3 times those expected");
    free(v);
    set_scores(&s, false, 1);
    s.scores[20 * s.r.n_keys] = (double)(float)(1.01 * s.scores[20 * s.r.n_keys]);
    v = verdict(&s);
    expect_faults(v, NULL, NULL);
    ck_assert(!find(v, "index_scores")->ok);
    ck_assert_int_eq(find(v, "index_scores")->first.position, 20);
    free(v);
    /* head weights before their scale: what the dump's loss is made of has it */
    s.loss = true;
    set_scores(&s, false, 1);
    times(s.c.weights, s.c.n_rows * s.c.index_heads, 8);
    v = verdict(&s);
    ck_assert_str_eq(v->faults[0], "head-weights-unscaled");
    expect_says(v, "index_scores", "0.125 times those expected: the head weights are given before their scale");
    ck_assert(find(v, "selection")->ok && find(v, "loss")->ok && !v->match);
    free(v);
    forget(&s);
}
END_TEST

int main(void) {
    if (!mkdtemp(folder)) return EXIT_FAILURE;
    const TTest *const tests[] = {lists_hold_keys_not_seen_yet,
                                  a_key_listed_twice,
                                  mistakes_are_named_by_rows_that_show_them,
                                  factors,
                                  another_softmax_scale,
                                  what_cannot_be_judged_is_no_match,
                                  rules_of_selection_need_rows,
                                  selection_in_coarser_arithmetic,
                                  lists_wider_than_asked_and_padding,
                                  scores_are_an_answer};
    const int code = suite_run("check_attention", tests, (int)(sizeof tests / sizeof *tests));
    char command[256];
    snprintf(command, sizeof command, "rm -rf %s", folder);
    return system(command) ? EXIT_FAILURE : code;
}
