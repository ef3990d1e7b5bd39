#define _GNU_SOURCE /* open_memstream */
#include "models/config.h"

#include <jansson.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/file.h"
#include "core/suggest.h"

typedef enum kind { INTEGER, REAL, BOOLEAN, CHOICE, RATIOS, POLICY } kind;

typedef struct choice {
    const char *name; /* NULL ends a list */
    int value;
} choice;

static const choice tasks[] = {{"text", CG_TASK_TEXT}, {"recall", CG_TASK_RECALL}, {NULL, 0}};
static const choice dtypes[] = {{"f32", CG_F32}, {"f64", CG_F64}, {NULL, 0}};
static const choice supports[] = {{"sparse", CG_SUPPORT_SPARSE}, {"dense", CG_SUPPORT_DENSE}, {NULL, 0}};
static const choice teachers[] = {
    {"full", CG_TEACHER_FULL}, {"sink", CG_TEACHER_SINK}, {"compressed", CG_TEACHER_COMPRESSED}, {NULL, 0}};

_Static_assert(sizeof(cg_task) == sizeof(int) && sizeof(cg_dtype) == sizeof(int) &&
                   sizeof(cg_support) == sizeof(int) && sizeof(cg_teacher) == sizeof(int),
               "choices are copied as int");

typedef struct entry {
    const char *name;
    kind kind;
    size_t offset;
    int64_t least, most; /* INTEGER */
    double low, high;    /* REAL; a bound that is open does not belong to the range */
    bool low_open, high_open;
    const choice *choices;
    const char *doc;
} entry;

/* clang-format off */
#define INT(key, first, last, text) \
    {.name = #key, .kind = INTEGER, .offset = offsetof(cg_config, key), .least = first, .most = last, .doc = text}
#define NUM(key, first, last, text) \
    {.name = #key, .kind = REAL, .offset = offsetof(cg_config, key), .low = first, .high = last, .doc = text}
#define ABOVE(key, first, last, text) \
    {.name = #key, .kind = REAL, .offset = offsetof(cg_config, key), .low = first, .high = last, .low_open = true, .doc = text}
#define BELOW(key, first, last, text) \
    {.name = #key, .kind = REAL, .offset = offsetof(cg_config, key), .low = first, .high = last, .high_open = true, .doc = text}
#define ONE_OF(key, list, text) \
    {.name = #key, .kind = CHOICE, .offset = offsetof(cg_config, key), .choices = list, .doc = text}

static const entry entries[] = {
    INT(vocab_size, 2, 1 << 24, "tokens of the vocabulary; text needs 256"),
    INT(hidden_size, 1, 1 << 16, "channels of the residual stream"),
    INT(num_hidden_layers, 1, CG_MAX_LAYERS, "decoder layers"),
    INT(num_attention_heads, 1, 1024, "query heads"),
    INT(head_dim, 2, 4096, "channels of a query head and of the one shared key and value"),
    INT(qk_rope_head_dim, 2, 4096, "rotary channels, the last ones of a head; even"),
    INT(q_lora_rank, 1, 1 << 16, "channels of the query latent, which the indexer reads too"),
    INT(o_groups, 1, 1024, "groups of heads in the output projection; divides num_attention_heads"),
    INT(o_lora_rank, 1, 1 << 16, "rank of the output projection per group"),
    INT(sliding_window, 1, 1 << 30, "tokens of the window, the query's own included"),
    {.name = "compress_ratios", .kind = RATIOS, .offset = offsetof(cg_config, compress_ratios),
     .doc = "tokens per compressed row, one entry per layer: 0 window only, 4 CSA with an indexer, 128 HCA"},
    INT(index_n_heads, 1, 1024, "indexer heads"),
    INT(index_head_dim, 2, 4096, "channels of an indexer head; a power of two, at least qk_rope_head_dim"),
    INT(index_topk, 0, 1 << 20, "compressed rows that a token selects; 0: none, window and sink are left and the indexer loss is 0"),
    {.name = "index_hadamard", .kind = BOOLEAN, .offset = offsetof(cg_config, index_hadamard),
     .doc = "rotate index queries and keys by a Hadamard matrix, as the release does"},
    INT(intermediate_size, 1, 1 << 20, "channels inside the dense SwiGLU"),
    NUM(swiglu_limit, 0, 1e6, "clamp of the SwiGLU's gate and up; 0: none"),
    ABOVE(rms_norm_eps, 0, 1, "added to the mean square in a norm"),
    ABOVE(initializer_range, 0, 10, "standard deviation of the first weights"),
    ABOVE(rope_theta, 1, 1e12, "rotary base of window-only layers"),
    ABOVE(compress_rope_theta, 1, 1e12, "rotary base of layers with compressed rows"),
    NUM(rope_scaling_factor, 1, 1e6, "YaRN stretch in layers with compressed rows; 1: none"),
    INT(rope_scaling_original_max_position_embeddings, 1, INT64_C(1) << 31, "YaRN: tokens before the stretch"),
    ABOVE(rope_scaling_beta_fast, 0, 1e6, "YaRN: turns from which a frequency keeps its value"),
    ABOVE(rope_scaling_beta_slow, 0, 1e6, "YaRN: turns up to which a frequency is divided by the factor"),

    ONE_OF(task, tasks, "text: next byte of files; recall: generated key and value pairs"),
    INT(recall_keys, 2, 65536, "recall: different keys; a sequence uses recall_pairs of them"),
    INT(recall_values, 2, 65536, "recall: different values; chance is 1/recall_values"),
    INT(recall_pairs, 2, 65536, "recall: pairs in a sequence, one group of 4 tokens each"),
    INT(seq_len, 2, 1 << 24, "tokens of a sequence"),
    INT(batch_size, 1, 1 << 16, "sequences of a micro-batch, packed into batch_size * seq_len rows"),
    INT(accumulate, 1, 1 << 16, "micro-batches per step"),
    INT(steps, 1, INT64_C(1) << 40, "optimizer steps of the whole training"),
    INT(seed, 0, INT64_MAX, "seed of weights and data"),
    ONE_OF(dtype, dtypes, "number format of weights and activations"),
    NUM(learning_rate, 0, 10, "peak step size of AdamW"),
    NUM(min_lr_ratio, 0, 1, "last learning rate as a share of the peak (cosine)"),
    INT(warmup_steps, 0, INT64_C(1) << 40, "steps of linear rise to the peak"),
    INT(decay_steps, 1, INT64_C(1) << 40,
        "step at which the cosine reaches its end; not tied to steps, so a run cut short and resumed is the same run"),
    BELOW(beta1, 0, 1, "decay of AdamW's first moment"),
    BELOW(beta2, 0, 1, "decay of AdamW's second moment"),
    ABOVE(adam_eps, 0, 1, "added to the root of the second moment"),
    NUM(weight_decay, 0, 10, "AdamW: share of a matrix taken away per unit of learning rate"),
    NUM(max_grad_norm, 0, 1e12, "gradients are scaled down to this norm; 0: no clipping"),
    NUM(indexer_loss_coeff, 0, 1e6, "factor of the indexer loss; 0: off, the indexer stays untrained"),
    ONE_OF(teacher, teachers, "what stands beside the compressed keys in the teacher's softmax: window and sink, the sink, nothing"),
    ONE_OF(support, supports, "rows of the indexer loss: the selected ones, or all visible ones"),
    INT(indexer_warmup, 0, INT64_C(1) << 40, "first steps that train the indexer alone, with dense attention and support"),
    {.name = "policy", .kind = POLICY, .offset = offsetof(cg_config, policy),
     .doc = "how index scores reach the backward pass: save, recompute, stream, TERMS or stream+TERMS, where TERMS are OP[,OP...][@SCOPE] joined by ';'"},
    INT(eval_every, 0, INT64_C(1) << 40, "steps between evaluations; 0: only at the end"),
    INT(eval_batches, 1, 1 << 20, "held-out micro-batches per evaluation"),
    INT(checkpoint_every, 0, INT64_C(1) << 40, "steps between checkpoints; 0: only at the end"),
};
/* clang-format on */

enum { N_ENTRIES = sizeof entries / sizeof entries[0] };

cg_config cg_config_toy(void) {
    return (cg_config){
        .vocab_size = 256,
        .hidden_size = 128,
        .num_hidden_layers = 4,
        .num_attention_heads = 4,
        .head_dim = 32,
        .qk_rope_head_dim = 8,
        .q_lora_rank = 64,
        .o_groups = 2,
        .o_lora_rank = 32,
        .sliding_window = 16,
        .n_compress_ratios = 4,
        .compress_ratios = {0, CG_RATIO_CSA, CG_RATIO_HCA, CG_RATIO_CSA},
        .index_n_heads = 8,
        .index_head_dim = 32,
        .index_topk = 16,
        .index_hadamard = true,
        .intermediate_size = 256,
        .swiglu_limit = 10,
        .rms_norm_eps = 1e-6,
        .initializer_range = 0.02,
        .rope_theta = 10000,
        .compress_rope_theta = 160000,
        .rope_scaling_factor = 4,
        .rope_scaling_original_max_position_embeddings = 64,
        .rope_scaling_beta_fast = 32,
        .rope_scaling_beta_slow = 1,
        .task = CG_TASK_TEXT,
        .recall_keys = 32,
        .recall_values = 16,
        .recall_pairs = 24,
        .seq_len = 512,
        .batch_size = 8,
        .accumulate = 1,
        .steps = 1000,
        .seed = 1,
        .dtype = CG_F32,
        .learning_rate = 2e-3,
        .min_lr_ratio = 0.1,
        .warmup_steps = 50,
        .decay_steps = 1000,
        .beta1 = 0.9,
        .beta2 = 0.95,
        .adam_eps = 1e-20,
        .weight_decay = 0.1,
        .max_grad_norm = 1,
        .indexer_loss_coeff = 1,
        .teacher = CG_TEACHER_FULL,
        .support = CG_SUPPORT_SPARSE,
        .indexer_warmup = 0,
        .policy = "stream",
        .eval_every = 100,
        .eval_batches = 8,
        .checkpoint_every = 0,
    };
}

/* Recall is solved by the first compressed layer that sees the pairs, so two CSA layers do; half as many steps
 * as the run has teach all visible rows to be used, and the indexer which of them matter. */
cg_config cg_config_default(cg_task task) {
    cg_config config = cg_config_toy();
    if (task != CG_TASK_RECALL) return config;
    config.task = task;
    config.num_hidden_layers = config.n_compress_ratios = 2;
    memset(config.compress_ratios, 0, sizeof config.compress_ratios);
    config.compress_ratios[0] = config.compress_ratios[1] = CG_RATIO_CSA;
    config.head_dim = 64;
    config.sliding_window = 8;
    config.index_topk = 8;
    config.seq_len = 256;
    config.learning_rate = 3e-3;
    config.indexer_warmup = 200;
    config.steps = 800;
    return config;
}

typedef struct layer_dims {
    const char *name;
    int64_t hidden, heads, head_dim, rope, q_rank, groups, o_rank, window, index_heads, index_dim, topk, inner;
    double yarn_factor;
    int64_t yarn_original;
} layer_dims;

static const layer_dims dims[] = {
    {"toy", 128, 8, 64, 16, 64, 2, 32, 64, 8, 32, 64, 256, 4, 64},
    {"flash", 4096, 64, 512, 64, 1024, 8, 1024, 128, 64, 128, 512, 2048, 16, 65536},
    {"pro", 7168, 128, 512, 64, 1536, 16, 1024, 128, 64, 128, 1024, 3072, 16, 65536},
};

const char *cg_dims_name(int i) {
    return i >= 0 && i < (int)(sizeof dims / sizeof dims[0]) ? dims[i].name : NULL;
}

bool cg_config_dims(const char *name, cg_config *config) {
    for (int i = 0; cg_dims_name(i); i++) {
        const layer_dims *d = &dims[i];
        if (strcmp(d->name, name)) continue;
        *config = cg_config_toy();
        config->num_hidden_layers = config->n_compress_ratios = 1;
        memset(config->compress_ratios, 0, sizeof config->compress_ratios);
        config->compress_ratios[0] = CG_RATIO_CSA;
        config->batch_size = 1;
        config->hidden_size = d->hidden;
        config->num_attention_heads = d->heads;
        config->head_dim = d->head_dim;
        config->qk_rope_head_dim = d->rope;
        config->q_lora_rank = d->q_rank;
        config->o_groups = d->groups;
        config->o_lora_rank = d->o_rank;
        config->sliding_window = d->window;
        config->index_n_heads = d->index_heads;
        config->index_head_dim = d->index_dim;
        config->index_topk = d->topk;
        config->intermediate_size = d->inner;
        config->rope_scaling_factor = d->yarn_factor;
        config->rope_scaling_original_max_position_embeddings = d->yarn_original;
        return true;
    }
    return false;
}

/* ---- the table: ranges and values ---------------------------------------------------------------------- */

static const entry *find(const char *key) {
    for (int i = 0; i < N_ENTRIES; i++)
        if (strcmp(entries[i].name, key) == 0) return &entries[i];
    return NULL;
}

static void range_text(const entry *e, char *text, size_t bytes) {
    switch (e->kind) {
    case INTEGER:
        snprintf(text, bytes, "an integer from %lld to %lld", (long long)e->least, (long long)e->most);
        return;
    case REAL:
        if (e->low_open)
            snprintf(text, bytes, "a number above %g and at most %g", e->low, e->high);
        else if (e->high_open)
            snprintf(text, bytes, "a number of at least %g and below %g", e->low, e->high);
        else
            snprintf(text, bytes, "a number from %g to %g", e->low, e->high);
        return;
    case BOOLEAN:
        snprintf(text, bytes, "true or false");
        return;
    case CHOICE: {
        size_t n = (size_t)snprintf(text, bytes, "one of");
        for (const choice *c = e->choices; c->name && n < bytes; c++)
            n += (size_t)snprintf(text + n, bytes - n, "%s %s", c == e->choices ? "" : ",", c->name);
        return;
    }
    case RATIOS:
        snprintf(text, bytes, "a list of 1 to %d ratios, each 0, %d or %d", CG_MAX_LAYERS, CG_RATIO_CSA,
                 CG_RATIO_HCA);
        return;
    case POLICY:
        snprintf(text, bytes,
                 "save, recompute, stream, auto:BYTES, or terms of letters, digits and _*?,@/:;.-=+ (below %d "
                 "bytes)",
                 CG_POLICY_BYTES);
        return;
    }
}

typedef struct shown_text {
    char text[72];
} shown_text;

/* A value as in a JSON file, cut where it is long, with nothing that would break a line. */
static shown_text shown(const json_t *value) {
    shown_text s;
    char *full =
        value ? json_dumps(value, JSON_ENCODE_ANY | JSON_ENSURE_ASCII | JSON_REAL_PRECISION(12)) : NULL;
    bool cut = full && strlen(full) >= sizeof s.text;
    snprintf(s.text, sizeof s.text, "%.*s%s", (int)sizeof s.text - 5, full ? full : "bytes that are no text",
             cut ? "..." : "");
    if (!cut && full) snprintf(s.text, sizeof s.text, "%s", full);
    free(full);
    return s;
}

static bool refuse(const entry *e, const char *got, cg_error *error) {
    char range[160];
    range_text(e, range, sizeof range);
    return cg_fail(error, CG_BAD_INPUT, "%s must be %s, got %s", e->name, range, got);
}

static bool is_policy(const char *text) {
    static const char allowed[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_*?,@/:;.-=+";
    size_t length = strlen(text);
    return length > 0 && length < CG_POLICY_BYTES && strspn(text, allowed) == length;
}

/* Put a value into its field if the key may have it. */
static bool read_value(cg_config *config, const entry *e, const json_t *value, cg_error *error) {
    void *field = (char *)config + e->offset;
    switch (e->kind) {
    case INTEGER: {
        if (!json_is_integer(value)) break;
        int64_t number = json_integer_value(value);
        if (number < e->least || number > e->most) break;
        *(int64_t *)field = number;
        return true;
    }
    case REAL: {
        if (!json_is_number(value)) break;
        double number = json_number_value(value) + 0.0; /* -0 becomes 0 */
        if (!isfinite(number) || number < e->low || number > e->high) break;
        if ((e->low_open && number == e->low) || (e->high_open && number == e->high)) break;
        *(double *)field = number;
        return true;
    }
    case BOOLEAN:
        if (!json_is_boolean(value)) break;
        *(bool *)field = json_is_true(value);
        return true;
    case CHOICE:
        if (!json_is_string(value)) break;
        for (const choice *c = e->choices; c->name; c++) {
            if (strcmp(c->name, json_string_value(value)) == 0) {
                memcpy(field, &c->value, sizeof c->value);
                return true;
            }
        }
        break;
    case RATIOS: {
        if (!json_is_array(value)) break;
        size_t n = json_array_size(value);
        if (n < 1 || n > CG_MAX_LAYERS) {
            char got[40];
            snprintf(got, sizeof got, "%zu of them", n);
            return refuse(e, got, error);
        }
        int64_t ratios[CG_MAX_LAYERS] = {0};
        for (size_t i = 0; i < n; i++) {
            const json_t *item = json_array_get(value, i);
            int64_t ratio = json_is_integer(item) ? json_integer_value(item) : -1;
            if (ratio != 0 && ratio != CG_RATIO_CSA && ratio != CG_RATIO_HCA) {
                char got[100];
                snprintf(got, sizeof got, "%s for layer %zu", shown(item).text, i);
                return refuse(e, got, error);
            }
            ratios[i] = ratio;
        }
        memcpy(config->compress_ratios, ratios, sizeof ratios);
        config->n_compress_ratios = (int64_t)n;
        return true;
    }
    case POLICY:
        if (!json_is_string(value) || !is_policy(json_string_value(value))) break;
        memset(config->policy, 0, sizeof config->policy);
        memcpy(config->policy, json_string_value(value), strlen(json_string_value(value)));
        return true;
    }
    return refuse(e, shown(value).text, error);
}

/* The other way; NULL for what JSON cannot hold (NaN, a choice that is none) and when memory is out. */
static json_t *write_value(const cg_config *config, const entry *e) {
    const void *field = (const char *)config + e->offset;
    switch (e->kind) {
    case INTEGER:
        return json_integer(*(const int64_t *)field);
    case REAL:
        return json_real(*(const double *)field);
    case BOOLEAN:
        return json_boolean(*(const bool *)field);
    case CHOICE: {
        int value;
        memcpy(&value, field, sizeof value);
        for (const choice *c = e->choices; c->name; c++)
            if (c->value == value) return json_string(c->name);
        return NULL;
    }
    case RATIOS: {
        json_t *list = json_array();
        for (int64_t i = 0; list && i < config->n_compress_ratios && i < CG_MAX_LAYERS; i++)
            json_array_append_new(list, json_integer(config->compress_ratios[i]));
        return list;
    }
    case POLICY:
        return memchr(config->policy, 0, sizeof config->policy) ? json_string(config->policy) : NULL;
    }
    return NULL;
}

/* A short text that reads back as the same value. */
static char *value_text(const json_t *value) {
    if (!json_is_real(value)) return json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT);
    for (size_t precision = 6;; precision++) {
        char *text = json_dumps(value, JSON_ENCODE_ANY | JSON_REAL_PRECISION(precision));
        json_t *again = text ? json_loads(text, JSON_DECODE_ANY, NULL) : NULL;
        bool same = again && json_number_value(again) == json_real_value(value);
        json_decref(again);
        if (!text || same || precision == 17) return text;
        free(text);
    }
}

static bool fail_unknown(const char *key, const char *prefix, cg_error *error) {
    const char *names[N_ENTRIES];
    int n = 0;
    for (int i = 0; i < N_ENTRIES; i++)
        if (strncmp(entries[i].name, prefix, strlen(prefix)) == 0)
            names[n++] = entries[i].name + strlen(prefix);
    const char *near = cg_suggest(key, names, n);
    json_t *word = json_string(key);
    cg_fail(error, CG_BAD_INPUT, "unknown key %s%s%s%s", shown(word).text, near ? ", did you mean " : "",
            near ? near : "", near ? "?" : "");
    json_decref(word);
    return false;
}

/* ---- checks -----------------------------------------------------------------------------------------------
 */

static bool check_together(const cg_config *c, cg_error *error) {
    if (c->n_compress_ratios != c->num_hidden_layers)
        return cg_fail(
            error, CG_BAD_INPUT,
            "compress_ratios has %lld entries and num_hidden_layers is %lld: one entry per layer is needed",
            (long long)c->n_compress_ratios, (long long)c->num_hidden_layers);
    if (c->qk_rope_head_dim % 2 != 0)
        return cg_fail(error, CG_BAD_INPUT,
                       "qk_rope_head_dim must be even, as channels turn in pairs, got %lld",
                       (long long)c->qk_rope_head_dim);
    if (c->qk_rope_head_dim > c->head_dim)
        return cg_fail(error, CG_BAD_INPUT,
                       "qk_rope_head_dim must be at most head_dim, which is %lld, got %lld",
                       (long long)c->head_dim, (long long)c->qk_rope_head_dim);
    if ((c->index_head_dim & (c->index_head_dim - 1)) != 0)
        return cg_fail(error, CG_BAD_INPUT,
                       "index_head_dim must be a power of two (Hadamard rotation), got %lld",
                       (long long)c->index_head_dim);
    if (c->qk_rope_head_dim > c->index_head_dim)
        return cg_fail(
            error, CG_BAD_INPUT,
            "index_head_dim must be at least qk_rope_head_dim, which is %lld and turns in the indexer too, "
            "got %lld",
            (long long)c->qk_rope_head_dim, (long long)c->index_head_dim);
    if (c->num_attention_heads % c->o_groups != 0)
        return cg_fail(error, CG_BAD_INPUT, "o_groups must divide num_attention_heads, which is %lld, got %lld",
                       (long long)c->num_attention_heads, (long long)c->o_groups);
    if (c->rope_scaling_beta_fast < c->rope_scaling_beta_slow)
        return cg_fail(error, CG_BAD_INPUT,
                       "rope_scaling_beta_fast must be at least rope_scaling_beta_slow, which is %g, got %g",
                       c->rope_scaling_beta_slow, c->rope_scaling_beta_fast);
    if (c->batch_size * c->seq_len > INT64_C(1) << 30)
        return cg_fail(error, CG_BAD_INPUT,
                       "batch_size * seq_len must be at most %lld packed rows, got %lld * %lld", 1LL << 30,
                       (long long)c->batch_size, (long long)c->seq_len);
    return true;
}

bool cg_config_check(const cg_config *config, cg_error *error) {
    cg_config copy = *config;
    for (int i = 0; i < N_ENTRIES; i++) {
        json_t *value = write_value(config, &entries[i]);
        bool fine = value ? read_value(&copy, &entries[i], value, error)
                          : refuse(&entries[i], "what no file could hold", error);
        json_decref(value);
        if (!fine) return false;
    }
    return check_together(config, error);
}

/* ---- reading and writing ----------------------------------------------------------------------------------
 */

/* The last key before an offset of a JSON text that does not parse: `nan` and 0x10 are syntax errors to a JSON
 * reader, but to the user they are bad values of a key. */
static const entry *key_before(const char *json, size_t stop) {
    const entry *last = NULL;
    for (size_t i = 0; i < stop; i++) {
        if (json[i] != '"') continue;
        size_t start = ++i;
        while (i < stop && json[i] != '"') i += json[i] == '\\' ? 2 : 1;
        size_t after = i + 1;
        while (after < stop && strchr(" \t\r\n", json[after]) && json[after]) after++;
        if (after >= stop || json[after] != ':') continue;
        char key[64] = "";
        if (i - start < sizeof key) memcpy(key, json + start, i - start);
        last = find(key);
    }
    return last;
}

static bool fail_parse(const char *json, size_t bytes, const json_error_t *problem, cg_error *error) {
    size_t stop = problem->position > 0 ? (size_t)problem->position : 0;
    const entry *e = key_before(json, stop < bytes ? stop : bytes);
    char reason[JSON_ERROR_TEXT_LENGTH + 1];
    snprintf(reason, sizeof reason, "%s", problem->text);
    for (char *c = reason; *c; c++)
        if ((unsigned char)*c < ' ') *c = ' ';
    bool is_value = json_error_code(problem) == json_error_invalid_syntax ||
                    json_error_code(problem) == json_error_numeric_overflow;
    if (!e || !is_value) return cg_fail(error, CG_BAD_INPUT, "line %d is no JSON: %s", problem->line, reason);
    char range[160];
    range_text(e, range, sizeof range);
    return cg_fail(error, CG_BAD_INPUT, "line %d is no JSON, at or behind %s, which must be %s: %s",
                   problem->line, e->name, range, reason);
}

static bool read_key(cg_config *config, const char *prefix, const char *key, const json_t *value, bool *seen,
                     cg_error *error) {
    char name[128];
    snprintf(name, sizeof name, "%s%s", prefix, key);
    const entry *e = find(name);
    if (!e) return fail_unknown(key, prefix, error);
    if (seen[e - entries])
        return cg_fail(error, CG_BAD_INPUT, "%s stands twice, by itself and inside rope_scaling", e->name);
    seen[e - entries] = true;
    return read_value(config, e, value, error);
}

/* The release's form of the YaRN keys. */
static bool read_rope_scaling(cg_config *config, const json_t *object, bool *seen, cg_error *error) {
    if (json_is_null(object)) {
        json_t *one = json_integer(1);
        bool read = read_key(config, "rope_scaling_", "factor", one, seen, error);
        json_decref(one);
        return read;
    }
    if (!json_is_object(object))
        return cg_fail(error, CG_BAD_INPUT, "rope_scaling must be an object or null, got %s",
                       shown(object).text);
    bool fine = true;
    for (void *at = json_object_iter((json_t *)object); at && fine;
         at = json_object_iter_next((json_t *)object, at)) {
        const char *key = json_object_iter_key(at);
        const json_t *value = json_object_iter_value(at);
        if (strcmp(key, "type") == 0 || strcmp(key, "rope_type") == 0) {
            const char *type = json_string_value(value);
            if (!type || strcmp(type, "yarn") != 0)
                fine = cg_fail(error, CG_BAD_INPUT, "%s must be \"yarn\", got %s", key, shown(value).text);
        } else {
            fine = read_key(config, "rope_scaling_", key, value, seen, error);
        }
    }
    if (!fine) cg_error_at(error, "rope_scaling");
    return fine;
}

static bool read_object(cg_config *config, const json_t *root, cg_error *error) {
    if (!json_is_object(root))
        return cg_fail(error, CG_BAD_INPUT, "a JSON object of keys is needed, got %s", shown(root).text);
    bool seen[N_ENTRIES] = {false};
    for (void *at = json_object_iter((json_t *)root); at; at = json_object_iter_next((json_t *)root, at)) {
        const char *key = json_object_iter_key(at);
        const json_t *value = json_object_iter_value(at);
        bool fine = strcmp(key, "rope_scaling") == 0 ? read_rope_scaling(config, value, seen, error)
                                                     : read_key(config, "", key, value, seen, error);
        if (!fine) return false;
    }
    return check_together(config, error);
}

bool cg_config_load(cg_config *config, const char *path, cg_error *error) {
    char *json;
    size_t bytes;
    if (!cg_file_read(path, 1 << 20, &json, &bytes, error)) return false;
    cg_config copy = *config;
    cg_error own = {0};
    json_error_t problem;
    json_t *root = json_loadb(json, bytes, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, &problem);
    const char *task = json_string_value(json_object_get(root, "task"));
    for (int i = 0; task && tasks[i].name; i++)
        if (!strcmp(task, tasks[i].name) && tasks[i].value != (int)config->task)
            copy = cg_config_default(tasks[i].value);
    bool fine = root ? read_object(&copy, root, &own) : fail_parse(json, bytes, &problem, &own);
    json_decref(root);
    free(json);
    if (fine) {
        *config = copy;
        return true;
    }
    size_t length = strlen(path), skip = length > 120 ? length - 120 : 0; /* the reason must fit too */
    return cg_fail(error, own.code, "%s%s: %s", skip ? "..." : "", path + skip, own.text);
}

/* What a text of the command line would be in a file. NULL when it is nothing. */
static json_t *parse_text(const entry *e, const char *text) {
    if (e->kind == CHOICE || e->kind == POLICY) return json_string(text);
    if (strpbrk(text, " \t\r\n\v\f")) return NULL;
    if (e->kind != RATIOS || text[0] == '[') return json_loads(text, JSON_DECODE_ANY, NULL);
    size_t bytes = strlen(text) + 3;
    char *list = malloc(bytes);
    if (!list) return NULL;
    snprintf(list, bytes, "[%s]", text);
    json_t *value = json_loads(list, 0, NULL);
    free(list);
    return value;
}

bool cg_config_set(cg_config *config, const char *key, const char *text, cg_error *error) {
    const entry *e = find(key);
    if (!e) return fail_unknown(key, "", error);
    json_t *value = parse_text(e, text);
    json_t *raw = json_string(text);
    bool fine = value ? read_value(config, e, value, error) : refuse(e, shown(raw).text, error);
    json_decref(value);
    json_decref(raw);
    return fine;
}

char *cg_config_json(const cg_config *config) {
    char *json = NULL;
    size_t bytes = 0;
    FILE *stream = open_memstream(&json, &bytes);
    if (!stream) return NULL;
    bool fine = true;
    for (int i = 0; i < N_ENTRIES; i++) {
        json_t *value = write_value(config, &entries[i]);
        char *text = value ? value_text(value) : NULL;
        fine &= text != NULL;
        fprintf(stream, "%s  \"%s\": %s", i ? ",\n" : "{\n", entries[i].name, text ? text : "null");
        free(text);
        json_decref(value);
    }
    fputs("\n}\n", stream);
    fine &= !ferror(stream);
    fine &= fclose(stream) == 0;
    if (fine) return json;
    free(json);
    return NULL;
}

bool cg_config_key_at(int i, cg_config_key *key) {
    if (i < 0 || i >= N_ENTRIES) return false;
    key->name = entries[i].name;
    key->doc = entries[i].doc;
    range_text(&entries[i], key->range, sizeof key->range);
    return true;
}

const char *cg_config_get(const cg_config *config, const char *key, char *text, size_t text_bytes) {
    const entry *e = find(key);
    if (!e) return NULL;
    json_t *value = write_value(config, e);
    char *dumped = value && !json_is_string(value) ? value_text(value) : NULL;
    snprintf(text, text_bytes, "%s", json_is_string(value) ? json_string_value(value) : dumped ? dumped : "?");
    free(dumped);
    json_decref(value);
    return text;
}
