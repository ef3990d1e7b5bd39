#include "models/check/dump.h"

#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/files/archive.h"
#include "core/base/bf16.h"
#include "core/base/file.h"
#include "core/base/shown.h"
#include "core/base/suggest.h"

/* ---- names ---- */

const char *const cg_dump_names[CG_DUMP_ARRAYS + 1] = {"q_indexer",
                                                       "weights",
                                                       "k_indexer",
                                                       "query",
                                                       "kv",
                                                       "compressed_kv",
                                                       "sink",
                                                       "dout",
                                                       "topk",
                                                       "attn_topk",
                                                       "index_scores",
                                                       "output",
                                                       "lse",
                                                       "non_compressed_lse",
                                                       "target",
                                                       "log_predict",
                                                       "predict",
                                                       "kl",
                                                       "loss",
                                                       "grad.q_indexer",
                                                       "grad.weights",
                                                       "grad.k_indexer",
                                                       "grad.query",
                                                       "grad.kv",
                                                       "grad.compressed_kv",
                                                       "grad.sink",
                                                       "cu_seqlens_q",
                                                       "cu_seqlens_q_real",
                                                       "cu_seqlens_compressed",
                                                       "query_valid_rows",
                                                       NULL};

/* What else a tensor is called, the first one that a file has counts. q and k mean the indexer's where the
 * attention's have longer names, as in Megatron's fused loss (q, weights, k, query, key, topk_indices). */
enum { ALIASES = 16 };
static const char *const aliases[CG_DUMP_ARRAYS][ALIASES] = {
    [CG_DUMP_Q_INDEXER] = {"q_indexer", "indexer_q", "index_q", "q_index", "idx_q", "q_idx", "qi",
                           "indexer_query", "index_query", "query_indexer"},
    [CG_DUMP_WEIGHTS] = {"weights", "indexer_weights", "index_weights", "head_weights", "w_indexer",
                         "idx_weights", "w", "weights_indexer"},
    [CG_DUMP_K_INDEXER] = {"k_indexer", "indexer_k", "index_k", "k_index", "idx_k", "k_idx", "ki",
                           "indexer_key", "index_key", "key_indexer", "indexer_compressed_k"},
    [CG_DUMP_QUERY] = {"query", "attn_q", "q_attn", "queries", "query_states", "query_layer"},
    [CG_DUMP_KV] = {"kv", "window_kv", "local_kv", "raw_kv", "swa_kv", "uncompressed_kv", "kv_states",
                    "sliding_kv", "kv_window"},
    [CG_DUMP_COMPRESSED_KV] = {"compressed_kv", "ckv", "kv_compressed", "compressed_k", "compressed_key", "key",
                               "kv_comp", "compressed_kv_states", "compressed_key_states"},
    [CG_DUMP_SINK] = {"sink", "attn_sink", "sinks", "attn_sinks", "attention_sink", "attention_sinks",
                      "softmax_offset", "s_aux", "learnable_sink"},
    [CG_DUMP_DOUT] = {"dout", "grad_output", "grad_out", "d_out", "do", "dO", "grad.output", "d_output",
                      "grad_outputs", "grad_attn_output"},
    [CG_DUMP_TOPK] = {"topk", "topk_indices", "topk_idx", "topk_idxs", "topk_ids", "index_topk_indices",
                      "selected_indices", "indices", "top_k_indices", "topk_indexes", "topk_index"},
    [CG_DUMP_ATTN_TOPK] = {"attn_topk", "attn_topk_indices", "attn_indices", "attn_topk_idxs",
                           "attention_topk_indices"},
    [CG_DUMP_SCORES] = {"index_scores", "indexer_scores", "scores", "index_logits", "indexer_logits",
                        "index_score"},
    [CG_DUMP_OUTPUT] = {"output", "out", "attn_output", "attn_out", "core_attn_out", "o", "attention_output",
                        "context_layer"},
    [CG_DUMP_LSE] = {"lse", "softmax_lse", "attn_lse", "full_lse", "logsumexp"},
    [CG_DUMP_WINDOW_LSE] = {"non_compressed_lse", "window_lse", "window_sink_lse", "swa_lse", "local_lse"},
    [CG_DUMP_TARGET] = {"target", "teacher", "attn_target", "target_probs", "attn_dist", "target_dist"},
    [CG_DUMP_LOG_PREDICT] = {"log_predict", "log_p", "log_probs", "index_log_probs", "student_log_probs"},
    [CG_DUMP_PREDICT] = {"predict", "index_probs", "student_probs", "index_dist"},
    [CG_DUMP_KL] = {"kl", "kl_per_row", "row_kl", "kl_rows", "kl_div"},
    [CG_DUMP_LOSS] = {"loss", "indexer_loss", "index_loss", "kl_loss", "indexer_kl_loss"},
    [CG_DUMP_CU_REAL] = {"cu_seqlens_q_real", "cu_seqlens_real"},
    [CG_DUMP_CU_SEQLENS] = {"cu_seqlens_q_padded", "cu_seqlens_padded", "cu_seqlens_q", "cu_seqlens",
                            "cu_seq_lens", "cu_seqlen", "cu_seq_lens_q"},
    [CG_DUMP_CU_COMPRESSED] = {"cu_seqlens_compressed", "cu_seqlens_comp", "cu_compressed",
                               "cu_seqlens_kv_padded", "cu_seqlens_kv", "cu_seqlens_k", "cu_seq_lens_k"},
    [CG_DUMP_VALID_ROWS] = {"query_valid_rows", "valid_rows", "row_mask", "query_mask", "valid_mask"},
};

static const int gradient_of[CG_DUMP_ARRAYS] = {
    [CG_DUMP_GRAD_Q_INDEXER] = 1 + CG_DUMP_Q_INDEXER,
    [CG_DUMP_GRAD_WEIGHTS] = 1 + CG_DUMP_WEIGHTS,
    [CG_DUMP_GRAD_K_INDEXER] = 1 + CG_DUMP_K_INDEXER,
    [CG_DUMP_GRAD_QUERY] = 1 + CG_DUMP_QUERY,
    [CG_DUMP_GRAD_KV] = 1 + CG_DUMP_KV,
    [CG_DUMP_GRAD_COMPRESSED_KV] = 1 + CG_DUMP_COMPRESSED_KV,
    [CG_DUMP_GRAD_SINK] = 1 + CG_DUMP_SINK,
};

/* ---- the files ---- */

typedef struct found {
    const char *name, *file;
    const cg_tensor *tensor; /* NULL: its elements are not read */
    const cg_entry *unread;  /* then: what the file says of it */
    bool used;
} found;

enum { COLUMNS_LOCAL, COLUMNS_PACKED, COLUMNS_SLOTS };

struct cg_dump_private {
    cg_archive **archives;
    int n_archives;
    found *list;
    int n;
    json_t *config;
    const char **unused;
    const cg_dump_options *options;
    int columns[CG_DUMP_ARRAYS];
};

static const char in_memory[] = "memory"; /* in the place of a file's name */

static found *find_exact(cg_dump *d, const char *name) {
    for (int i = 0; i < d->own->n; i++)
        if (!strcmp(d->own->list[i].name, name)) return &d->own->list[i];
    return NULL;
}

static bool open_files(cg_dump *d, const cg_dump_options *o, cg_error *error) {
    struct cg_dump_private *own = d->own;
    own->archives = calloc((size_t)o->n_paths + 1, sizeof(cg_archive *));
    if (!own->archives) return cg_fail(error, CG_FAILED, "out of memory for the list of files");
    int n = 0;
    for (int i = 0; i < o->n_paths; i++) {
        if (!(own->archives[i] = cg_archive_open(o->paths[i], error))) return false;
        own->n_archives++;
        n += cg_archive_n_entries(own->archives[i]);
    }
    n += o->n_tensors;
    own->list = calloc((size_t)n + 1, sizeof *own->list);
    own->unused = calloc((size_t)n + 1, sizeof *own->unused);
    if (!own->list || !own->unused) return cg_fail(error, CG_FAILED, "out of memory for the list of tensors");
    for (int i = 0; i < own->n_archives; i++)
        for (int k = 0; k < cg_archive_n_entries(own->archives[i]); k++) {
            const cg_entry *t = cg_archive_entry(own->archives[i], k);
            for (int other = 0; other < i; other++)
                if (cg_archive_find(own->archives[other], t->name) ||
                    cg_archive_unread(own->archives[other], t->name))
                    return cg_fail(error, CG_BAD_INPUT,
                                   "%s: tensor \"%s\" is also in %s: a name may stand in one file only",
                                   o->paths[i], cg_shown(t->name).text, o->paths[other]);
            own->list[own->n++] = (found){t->name, o->paths[i], t->tensor, t->tensor ? NULL : t, false};
        }
    for (int i = 0; i < o->n_tensors; i++) {
        const cg_named_tensor *t = &o->tensors[i];
        const found *twin = find_exact(d, t->name);
        if (twin)
            return cg_fail(error, CG_BAD_INPUT, "%s: tensor \"%s\" is also in %s: a name may stand once only",
                           in_memory, cg_shown(t->name).text, twin->file);
        own->list[own->n++] = (found){t->name, in_memory, &t->tensor, NULL, false};
    }
    return true;
}

static found *find_with(cg_dump *d, const char *first, const char *middle, const char *last) {
    char name[128];
    snprintf(name, sizeof name, "%s%s%s", first, middle, last);
    return find_exact(d, name);
}

/* A tensor by one alias, with the prefixes that dumps have. */
static found *find_alias(cg_dump *d, const char *alias) {
    static const char *const prefixes[] = {"out.", "", "in.", "inputs.", "outputs.", "input.", "output."};
    found *f = NULL;
    for (size_t i = 0; i < sizeof prefixes / sizeof *prefixes && !f; i++)
        f = find_with(d, prefixes[i], alias, "");
    return f;
}

static found *find_gradient(cg_dump *d, const char *alias) {
    static const char *const before[] = {"grad.", "grad_", "d_", "d", "grads.", "out.grad_", "out.d"};
    static const char *const after[] = {".grad", "_grad"};
    found *f = NULL;
    for (size_t i = 0; i < sizeof before / sizeof *before && !f; i++) f = find_with(d, before[i], alias, "");
    for (size_t i = 0; i < sizeof after / sizeof *after && !f; i++) f = find_with(d, "", alias, after[i]);
    for (size_t i = 0; i < sizeof after / sizeof *after && !f; i++) f = find_with(d, "in.", alias, after[i]);
    return f;
}

static found *find_id(cg_dump *d, cg_dump_id id, const char *extra) {
    const int base = gradient_of[id] ? gradient_of[id] - 1 : (int)id;
    found *f = NULL;
    for (int i = 0; i < ALIASES && aliases[base][i] && !f; i++)
        f = gradient_of[id] ? find_gradient(d, aliases[base][i]) : find_alias(d, aliases[base][i]);
    if (!f && extra) f = gradient_of[id] ? find_gradient(d, extra) : find_alias(d, extra);
    return f && !f->used ? f : NULL;
}

static void take(cg_dump *d, cg_dump_id id, found *f) {
    if (!f || d->array[id].name) return;
    const cg_shape *shape = f->tensor ? &f->tensor->shape : &f->unread->shape;
    if (id == CG_DUMP_TOPK && shape->n_dims < 2) return; /* a number, not lists */
    f->used = true;
    d->array[id] = (cg_dump_array){.name = f->name,
                                   .file = f->file,
                                   .dtype = f->tensor ? f->tensor->dtype : CG_DTYPES,
                                   .shape = *shape,
                                   .data = f->tensor ? f->tensor->data : NULL};
}

bool cg_dump_has(const cg_dump *d, cg_dump_id id) { return d->array[id].name != NULL; }

static bool apply_maps(cg_dump *d, const cg_dump_options *o, cg_error *error) {
    for (int m = 0; m < o->n_maps; m++) {
        const char *equals = strchr(o->maps[m], '=');
        char canonical[64] = "";
        int id = 0;
        if (!equals)
            return cg_fail(error, CG_BAD_INPUT, "--map needs NAME=THEIRS, got \"%s\"",
                           cg_shown(o->maps[m]).text);
        snprintf(canonical, sizeof canonical, "%.*s",
                 (int)(equals - o->maps[m] < 60 ? equals - o->maps[m] : 60), o->maps[m]);
        while (id < CG_DUMP_ARRAYS && strcmp(canonical, cg_dump_names[id])) id++;
        if (id == CG_DUMP_ARRAYS) {
            const char *near = cg_suggest(canonical, cg_dump_names, CG_DUMP_ARRAYS);
            return cg_fail(error, CG_BAD_INPUT, "--map: no tensor is called \"%s\" here%s%s%s",
                           cg_shown(canonical).text,
                           near ? ", did you mean " : "; names are those of csagrad check --help",
                           near ? near : "", near ? "?" : "");
        }
        found *f = find_exact(d, equals + 1);
        if (!f)
            return cg_fail(error, CG_BAD_INPUT, "--map %s: no file has a tensor \"%s\"", canonical,
                           cg_shown(equals + 1).text);
        if (d->array[id].name) return cg_fail(error, CG_BAD_INPUT, "--map: %s is given twice", canonical);
        take(d, (cg_dump_id)id, f);
    }
    return true;
}

static void find_tensors(cg_dump *d) {
    found *query = find_id(d, CG_DUMP_QUERY, NULL), *ckv = find_id(d, CG_DUMP_COMPRESSED_KV, NULL);
    const bool q_is_index = query || d->array[CG_DUMP_QUERY].name,
               k_is_index = ckv || d->array[CG_DUMP_COMPRESSED_KV].name;
    for (int id = 0; id < CG_DUMP_ARRAYS; id++) {
        if (d->array[id].name) continue;
        const int base = gradient_of[id] ? gradient_of[id] - 1 : id;
        const char *extra = NULL;
        if (base == (q_is_index ? CG_DUMP_Q_INDEXER : CG_DUMP_QUERY)) extra = "q";
        if (base == (k_is_index ? CG_DUMP_K_INDEXER : CG_DUMP_COMPRESSED_KV)) extra = "k";
        take(d, (cg_dump_id)id, find_id(d, (cg_dump_id)id, extra));
    }
    /* beside padded offsets, the plain ones are running sums of real lengths (Transformer Engine's names) */
    const char *name = d->array[CG_DUMP_CU_SEQLENS].name;
    if (name && strstr(name, "_padded") && !cg_dump_has(d, CG_DUMP_CU_REAL)) {
        found *f = find_alias(d, "cu_seqlens_q");
        take(d, CG_DUMP_CU_REAL, f ? f : find_alias(d, "cu_seqlens"));
    }
    /* without window rows and sink an lse can only be the part beside the compressed keys */
    if (!cg_dump_has(d, CG_DUMP_KV) && !cg_dump_has(d, CG_DUMP_WINDOW_LSE) && cg_dump_has(d, CG_DUMP_LSE)) {
        d->array[CG_DUMP_WINDOW_LSE] = d->array[CG_DUMP_LSE];
        d->array[CG_DUMP_LSE] = (cg_dump_array){0};
    }
}

/* Names that stand for nothing, and a sentence of those among them whose elements are not read. */
static void list_unused(cg_dump *d) {
    const found *unread = NULL;
    int n = 0;
    for (int i = 0; i < d->own->n; i++) {
        const found *f = &d->own->list[i];
        if (f->unread && n++ == 0) unread = f;
        if (!f->used && strncmp(f->name, "oracle.", 7) && strncmp(f->name, "info.", 5))
            d->own->unused[d->n_unused++] = f->name;
    }
    d->unused = d->own->unused;
    if (n == 1)
        snprintf(d->passed_over, sizeof d->passed_over, "passed over: %s, whose elements are not read (%s)",
                 cg_shown(unread->name).text, cg_shown(unread->unread->dtype).text);
    else if (n)
        snprintf(d->passed_over, sizeof d->passed_over,
                 "passed over: %d tensors whose elements are not read, the first is %s (%s)", n,
                 cg_shown(unread->name).text, cg_shown(unread->unread->dtype).text);
}

/* ---- elements ---- */

static double half_value(uint16_t bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    double x = exponent == 0 ? ldexp(fraction, -24) : ldexp(fraction + 1024, exponent - 25);
    if (exponent == 31) x = fraction ? (double)NAN : (double)INFINITY;
    return bits >> 15 ? -x : x;
}

static void convert(cg_dtype dtype, const void *data, int64_t from, int64_t n, double *out) {
    switch (dtype) {
    case CG_F32:
        for (int64_t i = 0; i < n; i++) out[i] = (double)((const float *)data)[from + i];
        return;
    case CG_F64:
        memcpy(out, (const double *)data + from, (size_t)n * sizeof *out);
        return;
    case CG_BF16:
        for (int64_t i = 0; i < n; i++) out[i] = (double)cg_bf16_get(((const uint16_t *)data)[from + i]);
        return;
    case CG_F16:
        for (int64_t i = 0; i < n; i++) out[i] = half_value(((const uint16_t *)data)[from + i]);
        return;
    case CG_I32:
        for (int64_t i = 0; i < n; i++) out[i] = ((const int32_t *)data)[from + i];
        return;
    default:
        for (int64_t i = 0; i < n; i++) out[i] = cg_dtype_get(dtype, data, from + i);
    }
}

/* A u64 that no index can be reads as INT64_MAX, which none can be either. */
static int64_t integer(const cg_dump_array *a, int64_t i) {
    return a->dtype == CG_I64   ? ((const int64_t *)a->data)[i]
           : a->dtype == CG_I32 ? ((const int32_t *)a->data)[i]
                                : cg_dtype_whole(a->dtype, a->data, i);
}
static cg_whole_text integer_text(const cg_dump_array *a, int64_t i) {
    return cg_dtype_whole_text(a->dtype, a->data, i);
}

double cg_dtype_rounding(cg_dtype dtype) {
    return dtype == CG_F64 ? 0x1p-53 : dtype == CG_BF16 ? 0x1p-9 : dtype == CG_F16 ? 0x1p-11 : 0x1p-24;
}

static void read_parts(const cg_dump_array *a, int64_t at, double *out) {
    for (int64_t h = 0; h < a->heads; h++)
        convert(a->dtype, a->data, at + h * a->head_stride, a->width, out + h * a->width);
}

/* Where row t begins. */
static int64_t place_of(const cg_dump *d, const cg_dump_array *a, int64_t t) {
    const int64_t S = d->S > 0 ? d->S : 1; /* without rows, vectors can be read all the same */
    return t / S * a->batch_stride + t % S * a->row_stride;
}

void cg_dump_row(const cg_dump *d, cg_dump_id id, int64_t t, double *out) {
    const cg_dump_array *a = &d->array[id];
    read_parts(a, place_of(d, a, t), out);
}

void cg_dump_key(const cg_dump *d, cg_dump_id id, int64_t segment, int64_t key, double *out) {
    const cg_dump_array *a = &d->array[id];
    const bool packed = d->batch == 1;
    read_parts(a,
               packed ? (d->first_key[segment] + key) * a->row_stride
                      : segment * a->batch_stride + key * a->row_stride,
               out);
}

/* An entry of a list as a key of its segment, -1: none of them. */
static int64_t key_of(const cg_dump *d, int64_t segment, int64_t x) {
    if (x < 0 || segment < 0) return -1;
    if (d->index == CG_INDEX_GLOBAL) x -= d->first_key[segment];
    return x >= 0 && x < d->n_keys[segment] ? x : -1;
}

void cg_dump_list(const cg_dump *d, cg_dump_id id, int64_t t, int64_t *out) {
    const cg_dump_array *a = &d->array[id];
    const int64_t at = place_of(d, a, t);
    for (int64_t k = 0; k < a->width; k++) out[k] = key_of(d, d->segment[t], integer(a, at + k));
}

void cg_dump_columns(const cg_dump *d, cg_dump_id id, int64_t t, int64_t n, double *out) {
    const cg_dump_array *a = &d->array[id];
    const int64_t at = place_of(d, a, t), s = d->segment[t];
    if (d->own->columns[id] == COLUMNS_SLOTS) {
        const cg_dump_array *list = &d->array[CG_DUMP_TOPK];
        const int64_t from = place_of(d, list, t);
        for (int64_t j = 0; j < n; j++) out[j] = 0;
        for (int64_t k = 0; k < list->width; k++) {
            const int64_t x = key_of(d, s, integer(list, from + k));
            if (x >= 0 && x < n) convert(a->dtype, a->data, at + k, 1, &out[x]);
        }
        return;
    }
    const int64_t first = d->own->columns[id] == COLUMNS_PACKED && s >= 0 ? d->first_key[s] : 0;
    convert(a->dtype, a->data, at + first, n, out);
}

int64_t cg_dump_visible(const cg_dump *d, int64_t t) {
    const int64_t s = d->segment[t];
    if (s < 0) return 0;
    const int64_t n = (t - d->start[s] + 1) / d->ratio;
    return n < d->n_keys[s] ? n : d->n_keys[s];
}

bool cg_dump_is_real(const cg_dump *d, int64_t t) {
    const int64_t s = d->segment[t];
    return s >= 0 && t - d->start[s] < d->real[s];
}

/* ---- what elements need ---- */

/* Numbers of a type have so many bits from the first to the last that is set, within these powers of 2. */
static const struct {
    cg_dtype dtype;
    int bits, least, most;
} kinds[] = {{CG_BF16, 8, -133, 127}, {CG_F16, 11, -24, 15}, {CG_F32, 24, -149, 127}};

enum { KINDS = sizeof kinds / sizeof *kinds };

cg_dtype cg_dump_holds(const cg_dump *d, cg_dump_id id) {
    const cg_dump_array *a = &d->array[id];
    if (!a->name || a->dtype == CG_BOOL || cg_dtype_is_whole(a->dtype)) return a->dtype;
    const int64_t n = cg_shape_count(&a->shape);
    bool fits[KINDS] = {true, true, true}, says = false;
    int first = 0, stored = 0; /* the first kind that fits so far; what is stored fits */
    while (stored < KINDS && kinds[stored].dtype != a->dtype) stored++;
    for (int64_t i = 0; i < n && first < stored; i++) {
        double x;
        uint64_t u;
        convert(a->dtype, a->data, i, 1, &x);
        if (x == 0 || !isfinite(x)) continue;
        memcpy(&u, &x, sizeof u);
        const int most = (int)(u >> 52 & 2047) - 1023; /* -1023: below the normal f64, and below every kind */
        const uint64_t fraction = (u & 0xfffffffffffff) | UINT64_C(1) << 52;
        const int zeros = __builtin_ctzll(fraction), bits = 53 - zeros, least = most - 52 + zeros;
        says |= bits > 4; /* others fit every type that reaches them */
        for (int k = first; k < stored; k++)
            fits[k] &= bits <= kinds[k].bits && least >= kinds[k].least && most <= kinds[k].most;
        while (first < stored && !fits[first]) first++;
    }
    return says && first < stored ? kinds[first].dtype : a->dtype;
}

/* ---- numbers ---- */

typedef struct number {
    const char *names[6];
    double least, most;
    bool whole;
} number;

enum { RATIO, WINDOW, TOPK, SCALE, COEFF, NUMBERS };

static const number numbers[NUMBERS] = {
    [RATIO] = {{"ratio", "compress_ratio", "compression_ratio"}, 1, 1e9, true},
    [WINDOW] = {{"window", "sliding_window", "window_size", "csa_window_size"}, 1, 1e15, true},
    [TOPK] = {{"topk", "index_topk", "dsa_indexer_topk", "topk_requested"}, 0, 1e9, true},
    [SCALE] = {{"softmax_scale", "scale", "sm_scale", "scaling"}, -1e30, 1e30, false},
    [COEFF] = {{"loss_coeff", "indexer_loss_coeff", "dsa_indexer_loss_coeff", "coeff"}, -1e30, 1e30, false},
};

static const char *metadata(const cg_dump *d, const char *key) {
    for (int i = 0; i < d->own->n_archives; i++) {
        const char *text = cg_archive_metadata(d->own->archives[i], key);
        if (text) return text;
    }
    const cg_dump_options *o = d->own->options;
    for (int i = 0; i < o->n_metadata; i++)
        if (!strcmp(o->metadata[i][0], key)) return o->metadata[i][1];
    return NULL;
}

/* The word that a source gives for a key, in `text`: --set, the config, the file's metadata, a tensor of one
 * element. Returns where it stands, or NULL. */
static const char *word_of(cg_dump *d, const char *key, char *text, size_t bytes) {
    const cg_dump_options *o = d->own->options;
    for (int i = o->n_settings - 1; i >= 0; i--)
        if (!strcmp(o->settings[i][0], key)) {
            snprintf(text, bytes, "%s", o->settings[i][1]);
            return "the command line";
        }
    json_t *value = d->own->config ? json_object_get(d->own->config, key) : NULL;
    if (value && !json_is_array(value) && !json_is_object(value) && !json_is_null(value)) {
        if (json_is_string(value))
            snprintf(text, bytes, "%s", json_string_value(value));
        else if (json_is_boolean(value))
            snprintf(text, bytes, "%s", json_is_true(value) ? "true" : "false");
        else
            snprintf(text, bytes, "%.17g", json_number_value(value));
        return o->config;
    }
    const char *told = metadata(d, key);
    if (told) {
        snprintf(text, bytes, "%s", told);
        return "the metadata";
    }
    found *f = find_alias(d, key);
    if (f && !f->used && f->unread &&
        cg_shape_count(&f->unread->shape) == 1) { /* then no number, and refused as none */
        snprintf(text, bytes, "elements %s", cg_shown(f->unread->dtype).text);
        return f->file;
    }
    if (f && f->tensor && cg_shape_count(&f->tensor->shape) == 1 && !f->used) {
        double x;
        convert(f->tensor->dtype, f->tensor->data, 0, 1, &x);
        f->used = true;
        snprintf(text, bytes, "%.17g", x);
        return f->file;
    }
    return NULL;
}

static bool read_number(cg_dump *d, int which, double *out, cg_error *error) {
    const number *n = &numbers[which];
    char text[128];
    *out = NAN;
    for (int i = 0; i < 6 && n->names[i]; i++) {
        const char *where = word_of(d, n->names[i], text, sizeof text);
        if (!where) continue;
        char *end;
        errno = 0;
        *out = strtod(text, &end);
        if (end == text || *end || !isfinite(*out) || *out < n->least || *out > n->most ||
            (n->whole && *out != floor(*out)))
            return cg_fail(error, CG_BAD_INPUT, "%s of %s: expected %s %s %g, got \"%s\"", n->names[i], where,
                           n->whole ? "an integer" : "a number", n->whole ? "from" : "of magnitude below",
                           n->whole ? n->least : n->most, cg_shown(text).text);
        return true;
    }
    return true;
}

static bool read_numbers(cg_dump *d, cg_error *error) {
    double x[NUMBERS];
    const cg_dump_options *o = d->own->options;
    if (o->config) {
        char *data;
        size_t bytes;
        json_error_t why;
        if (!cg_file_read(o->config, 1 << 24, &data, &bytes, error)) return false;
        d->own->config = json_loadb(data, bytes, JSON_REJECT_DUPLICATES, &why);
        free(data);
        if (!d->own->config || !json_is_object(d->own->config))
            return cg_fail(error, CG_BAD_INPUT, "%s: expected a JSON object, %s", o->config,
                           d->own->config ? "got another value" : cg_shown(why.text).text);
    }
    for (int i = 0; i < NUMBERS; i++)
        if (!read_number(d, i, &x[i], error)) return false;
    d->ratio = isnan(x[RATIO]) ? 0 : (int64_t)x[RATIO];
    d->window = isnan(x[WINDOW]) ? 0 : (int64_t)x[WINDOW];
    d->k_asked = isnan(x[TOPK]) ? -1 : (int64_t)x[TOPK];
    d->scale = x[SCALE];
    d->coeff = x[COEFF];
    if (!d->ratio)
        return cg_fail(error, CG_BAD_INPUT, "ratio is needed (tokens per compressed row): give --ratio N");
    return true;
}

/* "mean" counts real rows, as everywhere else. */
static bool read_reduction(const char *where, const char *text, int *value, cg_error *error) {
    const char *const *names = cg_axis_values(CG_AXIS_REDUCTION);
    char known[256] = "mean";
    size_t n = strlen(known);
    *value = CG_REDUCTION_IS_MEAN_REAL;
    if (!strcmp(text, known)) return true;
    for (int i = 0; names[i]; i++) {
        *value = i;
        if (!strcmp(text, names[i])) return true;
        n += (size_t)snprintf(known + n, sizeof known - n, "%s%s", names[i + 1] ? ", " : " or ", names[i]);
    }
    return cg_fail(error, CG_BAD_INPUT, "reduction of %s: expected %s, got \"%s\"", where, known,
                   cg_shown(text).text);
}

/* Support and reduction are settings that every framework has: where the dump says which, that one is expected. */
static bool read_declared(cg_dump *d, cg_error *error) {
    char text[CG_CONTRACT_TEXT];
    d->declared = cg_contract_default();
    static const char *const sparse_keys[] = {"sparse", "sparse_loss", "use_sparse_loss",
                                              "dsa_indexer_use_sparse_loss"};
    for (int i = 0; i < 4; i++) {
        const char *where = word_of(d, sparse_keys[i], text, sizeof text);
        if (!where) continue;
        const bool yes = !strcmp(text, "true") || !strcmp(text, "True") || !strcmp(text, "1");
        if (!yes && strcmp(text, "false") && strcmp(text, "False") && strcmp(text, "0"))
            return cg_fail(error, CG_BAD_INPUT, "%s of %s: expected true or false, got \"%s\"", sparse_keys[i],
                           where, cg_shown(text).text);
        d->declared.value[CG_AXIS_SUPPORT] = yes ? CG_SUPPORT_IS_SPARSE : CG_SUPPORT_IS_DENSE;
        break;
    }
    const char *where = word_of(d, "reduction", text, sizeof text);
    if (where && !read_reduction(where, text, &d->declared.value[CG_AXIS_REDUCTION], error)) return false;
    const char *contract = metadata(d, "contract");
    if (contract) d->has_claim = cg_contract_parse(contract, &d->claimed, NULL);
    return true;
}

/* ---- layout ---- */

static bool misfit(const cg_dump_array *a, const char *expected, cg_error *error) {
    char text[96];
    return cg_fail(error, CG_BAD_INPUT, "%s: %s has shape %s, expected %s", a->file, cg_shown(a->name).text,
                   cg_shape_text(&a->shape, text, sizeof text), expected);
}

/* The shape without sizes of 1 that a framework puts in: one batch of packed rows, one head of keys. */
static bool place(cg_dump_array *a, const char *pattern, const int64_t *size) {
    int64_t stride[CG_MAX_DIMS + 1] = {0}, dims[CG_MAX_DIMS + 1] = {0};
    const int wanted = (int)strlen(pattern);
    int n = a->shape.n_dims, i = 0;
    int64_t step = 1;
    int64_t strides[CG_MAX_DIMS];
    for (int k = n - 1; k >= 0; k--) {
        strides[k] = step;
        step *= a->shape.dims[k];
    }
    a->batch_stride = a->row_stride = a->head_stride = 0;
    a->heads = a->width = 1;
    for (int k = 0; k < n; k++) { /* match from the left; a size of 1 that does not fit is passed over */
        const int64_t want = i < wanted ? size[(int)pattern[i]] : -2;
        if (i < wanted && (want == -1 || a->shape.dims[k] == want)) {
            dims[i] = a->shape.dims[k];
            stride[i++] = strides[k];
        } else if (a->shape.dims[k] != 1) {
            return false;
        }
    }
    if (i < wanted) return false;
    for (i = 0; i < wanted; i++) switch (pattern[i]) {
        case 'B':
            a->batch_stride = stride[i];
            break;
        case 'S':
        case 'n':
            a->row_stride = stride[i];
            break;
        case 'H':
        case 'G':
            a->heads = dims[i];
            a->head_stride = stride[i];
            break;
        case 'X':
        case 'Y':
            a->width = size[pattern[i] == 'X' ? 'D' : 'E'];
            a->heads = dims[i] / a->width;
            a->head_stride = a->width * stride[i];
            break;
        default:
            a->width = dims[i];
        }
    return true;
}

/* ... by the first of some patterns that fits. */
static bool place_any(cg_dump *d, cg_dump_id id, const char *const *patterns, const int64_t *size,
                      const char *expected, cg_error *error) {
    if (!cg_dump_has(d, id)) return true;
    for (int i = 0; patterns[i]; i++)
        if (place(&d->array[id], patterns[i], size)) return true;
    for (int i = 0; d->batch == 1 && patterns[i]; i++) { /* one sequence may go without its batch size */
        char bare[16];
        int n = 0;
        for (const char *c = patterns[i]; *c; c++)
            if (*c != 'B') bare[n++] = *c;
        bare[n] = 0;
        if (place(&d->array[id], bare, size)) return true;
    }
    return misfit(&d->array[id], expected, error);
}

/* Packed, or which of the first two sizes of `a` is the batch; `inner` sizes stand behind those of rows. */
static bool find_layout(cg_dump *d, const cg_dump_array *a, int inner, cg_error *error) {
    const cg_dump_options *o = d->own->options;
    const char *told = o->layout ? o->layout : metadata(d, "layout");
    const int n = a->shape.n_dims;
    const int64_t x = a->shape.dims[0], y = n > 1 ? a->shape.dims[1] : 1;
    char text[96];
    if (told && strcmp(told, "sbhd") && strcmp(told, "bshd") && strcmp(told, "thd"))
        return cg_fail(error, CG_BAD_INPUT, "%s: expected sbhd, bshd or thd, got \"%s\"",
                       o->layout ? "--layout" : "layout", cg_shown(told).text);
    if (n != inner + 1 && n != inner + 2)
        return misfit(a, inner == 2 ? "3 sizes (packed) or 4" : "2 sizes (packed) or 3", error);
    if (!told) told = n == inner + 1 || cg_dump_has(d, CG_DUMP_CU_SEQLENS) ? "thd" : NULL;
    if (!told && (x == 1 || y == 1)) told = y == 1 ? "sbhd" : "bshd";
    if (!told) { /* compressed rows have the same order */
        const cg_dump_array *k =
            &d->array[cg_dump_has(d, CG_DUMP_COMPRESSED_KV) ? CG_DUMP_COMPRESSED_KV : CG_DUMP_K_INDEXER];
        const cg_dump_array *list = &d->array[CG_DUMP_TOPK], *rows = &d->array[CG_DUMP_TARGET];
        const bool keys = k->name && k->shape.n_dims >= 3;
        bool s_first = true, b_first = true;
        if (keys) {
            s_first &= k->shape.dims[1] == y && k->shape.dims[0] == x / d->ratio;
            b_first &= k->shape.dims[0] == x && k->shape.dims[1] == y / d->ratio;
        }
        for (int i = 0; i < 2;
             i++, list = rows) /* lists and distributions stand batch first in either layout */
            if (list->name && list->shape.n_dims == 3 && x != y && s_first && b_first &&
                list->shape.dims[0] == y && list->shape.dims[1] == x)
                b_first = false;
        if (s_first == b_first)
            return cg_fail(error, CG_BAD_INPUT,
                           "%s: the order of %s %s cannot be told: give --layout sbhd or bshd", a->file,
                           cg_shown(a->name).text, cg_shape_text(&a->shape, text, sizeof text));
        told = s_first ? "sbhd" : "bshd";
    }
    d->layout = !strcmp(told, "thd") ? "thd" : !strcmp(told, "sbhd") ? "sbhd" : "bshd";
    const bool packed = !strcmp(told, "thd"), s_first = !strcmp(told, "sbhd");
    if (packed && n == inner + 2 && x != 1 && y != 1)
        return misfit(a, "packed rows, that is one size less", error);
    if (!packed && n == inner + 1) return misfit(a, "a batch size as well (or --layout thd)", error);
    d->S = packed ? (n == inner + 1 || y == 1 ? x : y) : s_first ? x : y;
    d->batch = packed ? 1 : s_first ? y : x;
    d->T = d->S * d->batch;
    return true;
}

static int64_t last_size(const cg_dump_array *a) {
    return a->shape.n_dims ? a->shape.dims[a->shape.n_dims - 1] : 1;
}
static int64_t size_before_last(const cg_dump_array *a) {
    return a->shape.n_dims > 1 ? a->shape.dims[a->shape.n_dims - 2] : 1;
}

/* Heads, and the width of one. Frameworks also merge the two sizes, [.., heads * width]: then the width is that
 * of `keys`, which all heads share, and the heads are n_per_head where that is known (not 0). True: merged. */
static bool find_heads(const cg_dump_array *a, const cg_dump_array *keys, int64_t n_per_head, int64_t *heads,
                       int64_t *width) {
    const int64_t last = a->name ? last_size(a) : 0, shared = keys->name ? last_size(keys) : 0;
    const bool merged = last > 0 && shared > 0 && last % shared == 0 &&
                        (last != shared || a->shape.n_dims == 2) &&
                        (!n_per_head || last / shared == n_per_head);
    *heads = !a->name ? 0 : merged ? last / shared : size_before_last(a);
    *width = merged || !a->name ? shared : last;
    return merged;
}

static bool expect_kind(cg_dump *d, cg_dump_id id, bool integers, cg_error *error) {
    const cg_dump_array *a = &d->array[id];
    const bool mask = id == CG_DUMP_VALID_ROWS, whole = cg_dtype_is_whole(a->dtype),
               real = cg_dtype_is_real(a->dtype) || a->dtype == CG_F16;
    if (!a->name || (integers ? whole || (mask && a->dtype == CG_BOOL) : real)) return true;
    const cg_entry *unread = a->dtype == CG_DTYPES ? find_exact(d, a->name)->unread : NULL;
    return cg_fail(error, CG_BAD_INPUT, "%s: %s has elements %s, expected %s%s%s", a->file,
                   cg_shown(a->name).text, unread ? cg_shown(unread->dtype).text : cg_dtype_name(a->dtype),
                   !integers ? "f32, f64, bf16 or f16"
                   : mask    ? "truth values or whole numbers of 8 to 64 bits"
                             : "whole numbers of 8 to 64 bits",
                   unread && unread->advice ? ": " : "", unread && unread->advice ? unread->advice : "");
}

static bool place_arrays(cg_dump *d, cg_error *error) {
    static const cg_dump_id integers[] = {CG_DUMP_TOPK,    CG_DUMP_ATTN_TOPK,     CG_DUMP_CU_SEQLENS,
                                          CG_DUMP_CU_REAL, CG_DUMP_CU_COMPRESSED, CG_DUMP_VALID_ROWS};
    for (int id = 0; id < CG_DUMP_ARRAYS; id++) {
        bool whole = false;
        for (int i = 0; i < 6; i++) whole |= (cg_dump_id)id == integers[i];
        if (!expect_kind(d, (cg_dump_id)id, whole, error)) return false;
    }
    const cg_dump_array *query = &d->array[CG_DUMP_QUERY], *index = &d->array[CG_DUMP_Q_INDEXER];
    const cg_dump_array *kv = &d->array[CG_DUMP_KV], *sink = &d->array[CG_DUMP_SINK],
                        *weights = &d->array[CG_DUMP_WEIGHTS];
    const bool query_merged = find_heads(query, kv->name ? kv : &d->array[CG_DUMP_COMPRESSED_KV],
                                         sink->name ? cg_shape_count(&sink->shape) : 0, &d->H, &d->D),
               index_merged = find_heads(index, &d->array[CG_DUMP_K_INDEXER],
                                         weights->name ? last_size(weights) : 0, &d->Hi, &d->Di);
    if (!find_layout(d, query->name ? query : index, (query->name ? query_merged : index_merged) ? 1 : 2,
                     error))
        return false;
    d->K = cg_dump_has(d, CG_DUMP_TOPK) ? last_size(&d->array[CG_DUMP_TOPK]) : d->k_asked;
    if (d->k_asked < 0) d->k_asked = d->K;

    if (query->name && (d->H < 1 || d->D < 1)) return misfit(query, "at least one head and one channel", error);
    if (index->name && (d->Hi < 1 || d->Di < 1))
        return misfit(index, "at least one head and one channel", error);

    int64_t size[128];
    for (int i = 0; i < 128; i++) size[i] = -1;
    size['S'] = d->S;
    size['B'] = d->batch;
    size['H'] = d->H ? d->H : -1;
    size['D'] = d->D ? d->D : -1;
    size['G'] = d->Hi ? d->Hi : -1;
    size['E'] = d->Di ? d->Di : -1;
    size['X'] = d->H ? d->H * d->D : -2; /* merged, only where the split is known */
    size['Y'] = d->Hi ? d->Hi * d->Di : -2;
    const bool packed = !strcmp(d->layout, "thd"), s_first = !strcmp(d->layout, "sbhd");
    char sizes[160];
    snprintf(sizes, sizeof sizes,
             "layout %s of %lld rows, %lld sequences, %lld heads of %lld, %lld index heads of %lld", d->layout,
             (long long)d->S, (long long)d->batch, (long long)d->H, (long long)d->D, (long long)d->Hi,
             (long long)d->Di);
    const struct {
        cg_dump_id id;
        const char *packed[3], *s_first[5], *b_first[5];
    } forms[] = {
        {CG_DUMP_Q_INDEXER, {"SGE", "SY"}, {"SBGE", "SBY"}, {"BSGE", "BSY"}},
        {CG_DUMP_WEIGHTS, {"SG"}, {"SBG"}, {"BSG"}},
        {CG_DUMP_QUERY, {"SHD", "SX"}, {"SBHD", "SBX"}, {"BSHD", "BSX"}},
        {CG_DUMP_KV, {"SD"}, {"SBD"}, {"BSD"}},
        {CG_DUMP_DOUT, {"SHD", "SX"}, {"SBHD", "SBX"}, {"BSHD", "BSX"}},
        {CG_DUMP_OUTPUT, {"SHD", "SX"}, {"SBHD", "SBX"}, {"BSHD", "BSX"}},
        {CG_DUMP_K_INDEXER, {"nE"}, {"nBE"}, {"BnE"}},
        {CG_DUMP_COMPRESSED_KV, {"nD"}, {"nBD"}, {"BnD"}},
        {CG_DUMP_TOPK, {"SK"}, {"BSK", "SBK"}, {"BSK", "SBK"}},
        {CG_DUMP_ATTN_TOPK, {"SK"}, {"BSK", "SBK"}, {"BSK", "SBK"}},
        {CG_DUMP_SCORES, {"SN"}, {"BSN", "SBN"}, {"BSN", "SBN"}},
        {CG_DUMP_TARGET, {"SN"}, {"BSN", "SBN"}, {"BSN", "SBN"}},
        {CG_DUMP_LOG_PREDICT, {"SN"}, {"BSN", "SBN"}, {"BSN", "SBN"}},
        {CG_DUMP_PREDICT, {"SN"}, {"BSN", "SBN"}, {"BSN", "SBN"}},
        {CG_DUMP_KL, {"S"}, {"BS", "SB"}, {"BS", "SB"}},
        {CG_DUMP_VALID_ROWS, {"S"}, {"BS", "SB"}, {"BS", "SB"}},
        {CG_DUMP_LSE, {"HS", "SH"}, {"BHS", "BSH", "SBH"}, {"BHS", "BSH"}},
        {CG_DUMP_WINDOW_LSE, {"HS", "SH"}, {"BHS", "BSH", "SBH"}, {"BHS", "BSH"}},
        {CG_DUMP_SINK, {"H"}, {"H"}, {"H"}},
        {CG_DUMP_GRAD_SINK, {"H"}, {"H"}, {"H"}},
        {CG_DUMP_GRAD_Q_INDEXER, {"SGE", "SY"}, {"SBGE", "SBY"}, {"BSGE", "BSY"}},
        {CG_DUMP_GRAD_WEIGHTS, {"SG"}, {"SBG"}, {"BSG"}},
        {CG_DUMP_GRAD_K_INDEXER, {"nE"}, {"nBE"}, {"BnE"}},
        {CG_DUMP_GRAD_QUERY, {"SHD", "SX"}, {"SBHD", "SBX"}, {"BSHD", "BSX"}},
        {CG_DUMP_GRAD_KV, {"SD"}, {"SBD"}, {"BSD"}},
        {CG_DUMP_GRAD_COMPRESSED_KV, {"nD"}, {"nBD"}, {"BnD"}},
        {CG_DUMP_LOSS, {""}, {""}, {""}},
        {CG_DUMP_CU_SEQLENS, {"b"}, {"b"}, {"b"}},
        {CG_DUMP_CU_REAL, {"b"}, {"b"}, {"b"}},
        {CG_DUMP_CU_COMPRESSED, {"b"}, {"b"}, {"b"}},
    };
    size['B'] = packed ? 1 : d->batch;
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        const char *const *patterns = packed ? forms[i].packed : s_first ? forms[i].s_first : forms[i].b_first;
        if (!place_any(d, forms[i].id, patterns, size, sizes, error)) return false;
        const cg_dump_array *a = &d->array[forms[i].id];
        if (!a->name) continue;
        if (forms[i].id == CG_DUMP_K_INDEXER ||
            forms[i].id == CG_DUMP_COMPRESSED_KV) { /* the second one must agree */
            const int64_t row = a->width * d->batch, n = row > 0 ? cg_shape_count(&a->shape) / row : 0;
            d->keys_per_sequence = n;
            size['n'] = n;
        }
    }
    if (cg_dump_has(d, CG_DUMP_SINK)) { /* a vector: one part */
        cg_dump_array *a = &d->array[CG_DUMP_SINK];
        *a = (cg_dump_array){.name = a->name,
                             .file = a->file,
                             .dtype = a->dtype,
                             .shape = a->shape,
                             .data = a->data,
                             .heads = 1,
                             .width = d->H};
    }
    if (cg_dump_has(d, CG_DUMP_GRAD_SINK)) {
        cg_dump_array *a = &d->array[CG_DUMP_GRAD_SINK];
        *a = (cg_dump_array){.name = a->name,
                             .file = a->file,
                             .dtype = a->dtype,
                             .shape = a->shape,
                             .data = a->data,
                             .heads = 1,
                             .width = d->H};
    }
    return true;
}

/* ---- segments ---- */

static bool read_offsets(const cg_dump *d, cg_dump_id id, int64_t n, int64_t most, int64_t *out,
                         cg_error *error) {
    const cg_dump_array *a = &d->array[id];
    if (a->width != n)
        return cg_fail(error, CG_BAD_INPUT, "%s: %s has %lld entries, expected %lld", a->file,
                       cg_shown(a->name).text, (long long)a->width, (long long)n);
    for (int64_t i = 0; i < n; i++) {
        out[i] = integer(a, i);
        if (i == 0 && out[0] != 0)
            return cg_fail(error, CG_BAD_INPUT, "%s: %s[0] is %s, expected 0", a->file, cg_shown(a->name).text,
                           integer_text(a, 0).text);
        if (i > 0 && out[i] < out[i - 1])
            return cg_fail(error, CG_BAD_INPUT,
                           "%s: %s[%lld] is %lld, expected at least %lld, the entry before", a->file,
                           cg_shown(a->name).text, (long long)i, (long long)out[i], (long long)out[i - 1]);
        if (out[i] > most)
            return cg_fail(error, CG_BAD_INPUT, "%s: %s[%lld] is %s, but there are %lld rows", a->file,
                           cg_shown(a->name).text, (long long)i, integer_text(a, i).text, (long long)most);
    }
    return true;
}

static bool masked_real(const cg_dump *d, int64_t t) {
    const cg_dump_array *a = &d->array[CG_DUMP_VALID_ROWS];
    return integer(a, place_of(d, a, t)) != 0;
}

/* Real rows by running sums of their numbers. */
static bool read_real_offsets(cg_dump *d, int64_t *offsets, cg_error *error) {
    const cg_dump_array *real = &d->array[CG_DUMP_CU_REAL], *physical = &d->array[CG_DUMP_CU_SEQLENS];
    if (!read_offsets(d, CG_DUMP_CU_REAL, d->B + 1, d->T, offsets, error)) return false;
    int64_t smaller = 0;
    bool swapped = physical->name && physical->width == d->B + 1;
    for (int64_t b = d->B; b >= 0 && swapped; b--) {
        const int64_t x = integer(physical, b);
        swapped = x <= offsets[b];
        if (x < offsets[b]) smaller = b;
    }
    if (swapped && smaller)
        return cg_fail(
            error, CG_BAD_INPUT,
            "%s: %s and %s look swapped: entry %lld of the offsets of physical rows is %lld, that of "
            "the running sums of real lengths %lld, and none is larger",
            physical->file, cg_shown(physical->name).text, cg_shown(real->name).text, (long long)smaller,
            (long long)integer(physical, smaller), (long long)offsets[smaller]);
    for (int64_t b = 0; b < d->B; b++) {
        d->real[b] = offsets[b + 1] - offsets[b];
        if (d->real[b] > d->physical[b])
            return cg_fail(error, CG_BAD_INPUT, "%s: %s gives segment %lld %lld real rows, but it has %lld",
                           real->file, cg_shown(real->name).text, (long long)b, (long long)d->real[b],
                           (long long)d->physical[b]);
    }
    return true;
}

/* Real rows by a mask over rows. */
static bool read_mask(cg_dump *d, cg_error *error) {
    const cg_dump_array *a = &d->array[CG_DUMP_VALID_ROWS];
    for (int64_t b = 0; b < d->B; b++) {
        bool ended = false;
        d->real[b] = 0;
        for (int64_t p = 0; p < d->physical[b]; p++) {
            const bool real = masked_real(d, d->start[b] + p);
            if (real && ended)
                return cg_fail(error, CG_BAD_INPUT,
                               "%s: %s has a real row (segment %lld, position %lld) behind padding: "
                               "real rows must come first",
                               a->file, cg_shown(a->name).text, (long long)b, (long long)p);
            ended |= !real;
            d->real[b] += real;
        }
    }
    return true;
}

/* The mask beside offsets must say the same of every row. */
static bool check_mask(const cg_dump *d, bool real_told, cg_error *error) {
    const cg_dump_array *a = &d->array[CG_DUMP_VALID_ROWS],
                        *other = &d->array[real_told ? CG_DUMP_CU_REAL : CG_DUMP_CU_SEQLENS];
    for (int64_t t = 0; t < d->T; t++) {
        const int64_t s = d->segment[t];
        const bool real = masked_real(d, t);
        if (real == cg_dump_is_real(d, t)) continue;
        const long long mask = (long long)integer(a, place_of(d, a, t));
        const cg_shown_word name = cg_shown(a->name), other_name = cg_shown(other->name);
        if (s < 0)
            return cg_fail(error, CG_BAD_INPUT,
                           "%s: %s of row %lld is %lld, but %s has no segment with that row", a->file,
                           name.text, (long long)t, mask, other_name.text);
        return cg_fail(error, CG_BAD_INPUT,
                       "%s: %s of segment %lld, position %lld is %lld, but %s gives the segment %lld real rows",
                       a->file, name.text, (long long)s, (long long)(t - d->start[s]), mask, other_name.text,
                       (long long)d->real[s]);
    }
    return true;
}

/* Where frameworks have offsets of keys, those of tokens may stand in their place. */
static bool are_token_offsets(const cg_dump *d, const cg_dump_array *a) {
    static const cg_dump_id tokens[] = {CG_DUMP_CU_SEQLENS, CG_DUMP_CU_REAL};
    bool equal = false;
    for (int i = 0; i < 2 && !equal && !strstr(a->name, "comp"); i++) {
        const cg_dump_array *b = &d->array[tokens[i]];
        equal = b->name && a->width == b->width;
        for (int64_t k = 0; k < a->width && equal; k++) equal = integer(a, k) == integer(b, k);
    }
    return equal && d->ratio > 1;
}

static bool place_keys(cg_dump *d, int64_t *offsets, cg_error *error) {
    const bool packed = !strcmp(d->layout, "thd");
    const int64_t there = d->keys_per_sequence;
    if (packed) {
        const cg_dump_array *a = &d->array[CG_DUMP_CU_COMPRESSED];
        for (int64_t b = 0; b < d->B; b++) d->first_key[b + 1] = d->first_key[b] + d->n_keys[b];
        d->C = d->first_key[d->B];
        if (a->name && !are_token_offsets(d, a)) {
            if (!read_offsets(d, CG_DUMP_CU_COMPRESSED, d->B + 1, there ? there : INT64_MAX, offsets, error))
                return false;
            for (int64_t b = 0; b < d->B; b++)
                if (offsets[b + 1] - offsets[b] != d->n_keys[b])
                    return cg_fail(error, CG_BAD_INPUT,
                                   "%s: %s gives segment %lld %lld compressed rows, expected %lld: %lld "
                                   "tokens at ratio %lld",
                                   a->file, cg_shown(a->name).text, (long long)b,
                                   (long long)(offsets[b + 1] - offsets[b]), (long long)d->n_keys[b],
                                   (long long)d->physical[b], (long long)d->ratio);
        }
    } else {
        for (int64_t b = 0; b < d->B; b++) d->first_key[b] = b * (there ? there : d->N);
        d->C = d->B * (there ? there : d->N);
    }
    const int64_t needed = packed ? d->C : d->N;
    static const cg_dump_id keys[] = {CG_DUMP_K_INDEXER, CG_DUMP_COMPRESSED_KV};
    for (int i = 0; i < 2; i++) {
        const cg_dump_array *a = &d->array[keys[i]];
        if (a->name && there < needed)
            return cg_fail(error, CG_BAD_INPUT, "%s: %s has %lld compressed rows, expected %lld at ratio %lld",
                           a->file, cg_shown(a->name).text, (long long)there, (long long)needed,
                           (long long)d->ratio);
    }
    return true;
}

/* Room for B segments and T rows; also for B + 1 offsets, which are returned. NULL: no memory. */
static int64_t *new_segments(cg_dump *d) {
    const size_t n = (size_t)d->B + 2;
    int64_t *block = d->start = calloc(6 * n + (size_t)d->T, sizeof *block);
    if (!block) return NULL;
    d->real = block + n;
    d->physical = block + 2 * n;
    d->first_key = block + 3 * n;
    d->n_keys = block + 4 * n;
    d->segment = block + 6 * n;
    return block + 5 * n;
}

/* Segments of all the rows between their offsets. */
static void fill_segments(cg_dump *d, const int64_t *offsets) {
    d->N = 0;
    for (int64_t t = 0; t < d->T; t++) d->segment[t] = -1;
    for (int64_t b = 0; b < d->B; b++) {
        d->start[b] = offsets[b];
        d->real[b] = d->physical[b] = offsets[b + 1] - offsets[b];
        d->n_keys[b] = d->physical[b] / d->ratio;
        d->N = d->n_keys[b] > d->N ? d->n_keys[b] : d->N;
        for (int64_t t = offsets[b]; t < offsets[b + 1]; t++) d->segment[t] = b;
    }
}

static bool make_segments(cg_dump *d, cg_error *error) {
    const bool packed = !strcmp(d->layout, "thd"), told = packed && cg_dump_has(d, CG_DUMP_CU_SEQLENS),
               real_told = packed && cg_dump_has(d, CG_DUMP_CU_REAL),
               masked = cg_dump_has(d, CG_DUMP_VALID_ROWS);
    if (told && d->array[CG_DUMP_CU_SEQLENS].width < 1)
        return misfit(&d->array[CG_DUMP_CU_SEQLENS], "at least one entry, 0", error);
    d->B = told ? d->array[CG_DUMP_CU_SEQLENS].width - 1 : packed ? 1 : d->batch;
    if (packed && !told && d->keys_per_sequence && d->keys_per_sequence != d->T / d->ratio)
        return cg_fail(error, CG_BAD_INPUT,
                       "cu_seqlens_q is needed: %lld compressed rows are not those of one segment of "
                       "%lld tokens at ratio %lld",
                       (long long)d->keys_per_sequence, (long long)d->T, (long long)d->ratio);
    int64_t *offsets = new_segments(d);
    if (!offsets) return cg_fail(error, CG_FAILED, "out of memory for %lld segments", (long long)d->B);
    if (told) {
        if (!read_offsets(d, CG_DUMP_CU_SEQLENS, d->B + 1, d->T, offsets, error)) return false;
    } else {
        for (int64_t b = 0; b <= d->B; b++) offsets[b] = b * d->S;
    }
    fill_segments(d, offsets);
    if (real_told && !read_real_offsets(d, offsets, error)) return false;
    if (masked && !real_told && !read_mask(d, error)) return false;
    if (masked && !check_mask(d, real_told, error)) return false;
    return place_keys(d, offsets, error);
}

/* [T, N] tensors: whose columns are they? */
static bool place_columns(cg_dump *d, cg_error *error) {
    static const cg_dump_id ids[] = {CG_DUMP_SCORES, CG_DUMP_TARGET, CG_DUMP_LOG_PREDICT, CG_DUMP_PREDICT};
    for (int i = 0; i < 4; i++) {
        const cg_dump_array *a = &d->array[ids[i]];
        const bool packed = d->batch == 1 && !strcmp(d->layout, "thd");
        if (!a->name) continue;
        int form;
        const int64_t local = packed || !d->keys_per_sequence ? d->N : d->keys_per_sequence;
        if (packed && (a->width == d->C || a->width == d->keys_per_sequence))
            form = COLUMNS_PACKED;
        else if (a->width == local || a->width == d->N)
            form = COLUMNS_LOCAL;
        else if (cg_dump_has(d, CG_DUMP_TOPK) && a->width == d->K)
            form = COLUMNS_SLOTS;
        else
            return cg_fail(error, CG_BAD_INPUT, "%s: %s has %lld columns, expected %lld compressed rows%s",
                           a->file, cg_shown(a->name).text, (long long)a->width,
                           (long long)(packed ? d->C : local),
                           cg_dump_has(d, CG_DUMP_TOPK) ? " or one per slot of topk" : "");
        d->own->columns[ids[i]] = form;
    }
    return true;
}

/* ---- values ---- */

static const cg_dump_id list_ids[] = {CG_DUMP_TOPK, CG_DUMP_ATTN_TOPK};

static bool lists_fit(const cg_dump *d) {
    for (int i = 0; i < 2; i++) {
        const cg_dump_array *a = &d->array[list_ids[i]];
        for (int64_t t = 0; a->name && t < d->T; t++)
            for (int64_t k = 0; cg_dump_is_real(d, t) && k < a->width; k++) {
                const int64_t x = integer(a, place_of(d, a, t) + k);
                if (x != -1 && key_of(d, d->segment[t], x) < 0) return false;
            }
    }
    return true;
}

/* A sentence of the first entry that is no key of its row's segment. */
static bool refuse_lists(const cg_dump *d, cg_error *error) {
    cg_dump *misread = cg_dump_misread(d, CG_MISREAD_KEYS_PACKED, NULL);
    const bool explained = misread && lists_fit(misread);
    cg_dump_close(misread);
    for (int i = 0; i < 2; i++) {
        const cg_dump_array *a = &d->array[list_ids[i]];
        for (int64_t t = 0; a->name && t < d->T; t++)
            for (int64_t k = 0; cg_dump_is_real(d, t) && k < a->width; k++) {
                const int64_t at = place_of(d, a, t) + k, x = integer(a, at), s = d->segment[t],
                              first = d->index == CG_INDEX_GLOBAL ? d->first_key[s] : 0;
                if (x == -1 || key_of(d, s, x) >= 0) continue;
                char range[64] = "";
                if (d->n_keys[s])
                    snprintf(range, sizeof range, " or %lld to %lld", (long long)first,
                             (long long)(first + d->n_keys[s] - 1));
                return cg_fail(error, CG_BAD_INPUT,
                               "%s: %s of segment %lld, position %lld, slot %lld is %s, expected -1%s%s",
                               a->file, cg_shown(a->name).text, (long long)s, (long long)(t - d->start[s]),
                               (long long)k, integer_text(a, at).text, range,
                               explained ? " (all lists fit where running sums of real lengths are taken for "
                                           "the offsets of physical rows)"
                                         : "");
            }
    }
    return true;
}

/* What lists count from, and that those of real rows stay within the segment. Those of padding say nothing. */
static bool check_lists(cg_dump *d, cg_error *error) {
    const char *told = d->own->options->index ? d->own->options->index : metadata(d, "index");
    bool fits[2] = {true, true}, sees[2] = {true, true}, differ = false, marked = true;
    for (int i = 0; i < 2; i++) {
        const cg_dump_array *a = &d->array[list_ids[i]];
        for (int64_t t = 0; a->name && t < d->T; t++) {
            if (!cg_dump_is_real(d, t)) continue;
            const int64_t s = d->segment[t], at = place_of(d, a, t), visible = cg_dump_visible(d, t);
            for (int64_t k = 0; k < a->width; k++) {
                const int64_t x = integer(a, at + k), y = x - (x < 0 ? 0 : d->first_key[s]);
                marked &= x >= -1;
                if (x < 0) continue;
                fits[CG_INDEX_LOCAL] &= x < d->n_keys[s];
                fits[CG_INDEX_GLOBAL] &= y >= 0 && y < d->n_keys[s];
                sees[CG_INDEX_LOCAL] &= x < visible;
                sees[CG_INDEX_GLOBAL] &= y >= 0 && y < visible;
                differ |= d->first_key[s] != 0;
            }
        }
    }
    if (told && strcmp(told, "local") && strcmp(told, "global"))
        return cg_fail(error, CG_BAD_INPUT, "%s: expected local or global, got \"%s\"",
                       d->own->options->index ? "--index" : "index", cg_shown(told).text);
    d->index_told = true;
    if (told)
        d->index = !strcmp(told, "global") ? CG_INDEX_GLOBAL : CG_INDEX_LOCAL;
    else if (!differ || fits[0] != fits[1] || sees[0] != sees[1])
        d->index =
            differ && (fits[0] != fits[1] ? fits[1] : sees[1] && !sees[0]) ? CG_INDEX_GLOBAL : CG_INDEX_LOCAL;
    else if (fits[0] && marked)
        return cg_fail(error, CG_BAD_INPUT,
                       "the index lists may count from the segment or from the whole array: give "
                       "--index local or global");
    return (fits[d->index] && marked) || refuse_lists(d, error);
}

static bool not_finite(const cg_dump *d, cg_dump_id id, int64_t segment, int64_t place, bool key,
                       const double *x, int64_t n, cg_error *error) {
    const cg_dump_array *a = &d->array[id];
    for (int64_t i = 0; i < n; i++)
        if (!isfinite(x[i]))
            return !cg_fail(error, CG_BAD_INPUT,
                            "%s: %s of segment %lld, %s %lld, element %lld is %s, expected a finite number",
                            a->file, cg_shown(a->name).text, (long long)segment,
                            key ? "compressed row" : "position", (long long)place, (long long)i,
                            isnan(x[i]) ? "NaN" : "infinite");
    return false;
}

/* Inputs that real rows read. Padding may hold anything. */
static bool check_values(const cg_dump *d, cg_error *error) {
    static const cg_dump_id rows[] = {CG_DUMP_QUERY, CG_DUMP_Q_INDEXER, CG_DUMP_WEIGHTS,
                                      CG_DUMP_KV,    CG_DUMP_DOUT,      CG_DUMP_WINDOW_LSE};
    static const cg_dump_id keys[] = {CG_DUMP_COMPRESSED_KV, CG_DUMP_K_INDEXER};
    for (int i = 0; i < 6; i++) {
        const cg_dump_array *a = &d->array[rows[i]];
        if (!a->name) continue;
        int64_t bad = d->T;
        const int64_t n = a->heads * a->width;
        if (rows[i] == CG_DUMP_WINDOW_LSE && cg_dump_has(d, CG_DUMP_KV)) continue; /* an output then */
#pragma omp parallel reduction(min : bad)
        {
            double *x = malloc((size_t)(n + 1) * sizeof *x);
#pragma omp for schedule(static)
            for (int64_t t = 0; t < d->T; t++) {
                if (!x || !cg_dump_is_real(d, t) || t >= bad) continue;
                cg_dump_row(d, rows[i], t, x);
                double sum = 0;
                for (int64_t k = 0; k < n; k++) sum += x[k] * 0;
                if (sum != 0 && t < bad) bad = t;
            }
            free(x);
        }
        if (bad == d->T) continue;
        double *x = malloc((size_t)(n + 1) * sizeof *x);
        if (!x) return cg_fail(error, CG_FAILED, "out of memory for a row");
        const int64_t s = d->segment[bad];
        cg_dump_row(d, rows[i], bad, x);
        const bool said = not_finite(d, rows[i], s, bad - d->start[s], false, x, n, error);
        free(x);
        if (said) return false;
    }
    for (int i = 0; i < 2; i++) {
        const cg_dump_array *a = &d->array[keys[i]];
        double *x = a->name ? malloc((size_t)(a->heads * a->width + 1) * sizeof *x) : NULL;
        for (int64_t s = 0; x && s < d->B; s++)
            for (int64_t j = 0; j < d->real[s] / d->ratio; j++) {
                cg_dump_key(d, keys[i], s, j, x);
                if (not_finite(d, keys[i], s, j, true, x, a->heads * a->width, error)) {
                    free(x);
                    return false;
                }
            }
        free(x);
    }
    if (cg_dump_has(d, CG_DUMP_SINK)) {
        const cg_dump_array *a = &d->array[CG_DUMP_SINK];
        for (int64_t h = 0; h < d->H; h++) {
            double x;
            convert(a->dtype, a->data, h, 1, &x);
            if (isnan(x) || x == INFINITY)
                return cg_fail(error, CG_BAD_INPUT, "%s: %s of head %lld is %s, expected a number or -inf",
                               a->file, cg_shown(a->name).text, (long long)h, isnan(x) ? "NaN" : "infinite");
        }
    }
    return true;
}

static bool read_lse_form(cg_dump *d, cg_error *error) {
    const char *told = d->own->options->lse, *base = metadata(d, "lse_base");
    d->lse_has_sink = -1;
    if (told) {
        d->lse_base = told[0] == '2' ? 2 : exp(1);
        if ((told[0] != 'e' && told[0] != '2') || (told[1] && strcmp(told + 1, "-no-sink")))
            return cg_fail(error, CG_BAD_INPUT, "--lse: expected e, 2, e-no-sink or 2-no-sink, got \"%s\"",
                           cg_shown(told).text);
        d->lse_has_sink = !told[1];
    } else if (base) {
        d->lse_base = !strcmp(base, "2") ? 2 : !strcmp(base, "e") ? exp(1) : 0;
    }
    return true;
}

/* ---- open and close ---- */

cg_dump *cg_dump_open(const cg_dump_options *options, cg_error *error) {
    cg_dump *d = calloc(1, sizeof *d);
    struct cg_dump_private *own = calloc(1, sizeof *own);
    if (!d || !own) {
        free(d);
        free(own);
        cg_fail(error, CG_FAILED, "out of memory for a dump");
        return NULL;
    }
    d->own = own;
    own->options = options;
    if (open_files(d, options, error) && apply_maps(d, options, error)) {
        find_tensors(d);
        if (cg_dump_has(d, CG_DUMP_QUERY) || cg_dump_has(d, CG_DUMP_Q_INDEXER)) {
            if (read_numbers(d, error) && read_declared(d, error) && place_arrays(d, error) &&
                make_segments(d, error) && place_columns(d, error) && check_lists(d, error) &&
                check_values(d, error) && read_lse_form(d, error)) {
                list_unused(d);
                return d;
            }
        } else {
            cg_fail(error, CG_BAD_INPUT,
                    "%s: neither query nor q_indexer is there, so nothing of CSA can be judged; name them "
                    "with --map",
                    options->n_paths     ? options->paths[0]
                    : options->n_tensors ? in_memory
                                         : "no file");
        }
    }
    cg_dump_close(d);
    return NULL;
}

cg_dump *cg_dump_misread(const cg_dump *d, cg_dump_misreading how, cg_error *error) {
    bool differs = false;
    for (int64_t b = 0; b < d->B; b++) differs |= d->real[b] != d->physical[b];
    if (!differs || strcmp(d->layout, "thd") || !cg_dump_has(d, CG_DUMP_CU_REAL)) return NULL;
    cg_dump *view = malloc(sizeof *view);
    struct cg_dump_private *own = calloc(1, sizeof *own);
    if (view) *view = *d;
    int64_t *offsets = view ? new_segments(view) : NULL;
    if (!offsets || !own) {
        free(view);
        free(own);
        cg_fail(error, CG_FAILED, "out of memory for %lld segments", (long long)d->B);
        return NULL;
    }
    view->own = own; /* no archive: the tensors are borrowed */
    memcpy(own->columns, d->own->columns, sizeof own->columns);
    for (int64_t b = 0; b < d->B; b++) offsets[b + 1] = offsets[b] + d->real[b];
    fill_segments(view, offsets);
    for (int64_t b = 0; b < d->B; b++)
        view->first_key[b + 1] =
            how == CG_MISREAD_KEYS_PACKED ? view->first_key[b] + view->n_keys[b] : d->first_key[b + 1];
    view->C = view->first_key[d->B];
    return view;
}

void cg_dump_close(cg_dump *d) {
    if (!d) return;
    for (int i = 0; i < d->own->n_archives; i++) cg_archive_close(d->own->archives[i]);
    free(d->own->archives);
    free(d->own->list);
    free(d->own->unused);
    json_decref(d->own->config);
    free(d->own);
    free(d->start);
    free(d);
}
