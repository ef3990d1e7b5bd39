#include "models/dsv4/config_table.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/shown.h"

const cg_config_choice cg_config_tasks[] = {{"text", CG_TASK_TEXT}, {"recall", CG_TASK_RECALL}, {NULL, 0}};
static const cg_config_choice dtypes[] = {{"f32", CG_F32}, {"f64", CG_F64}, {"bf16", CG_BF16}, {NULL, 0}};
static const cg_config_choice supports[] = {
    {"sparse", CG_SUPPORT_SPARSE}, {"dense", CG_SUPPORT_DENSE}, {NULL, 0}};
static const cg_config_choice teachers[] = {
    {"full", CG_TEACHER_FULL}, {"sink", CG_TEACHER_SINK}, {"compressed", CG_TEACHER_COMPRESSED}, {NULL, 0}};

_Static_assert(sizeof(cg_task) == sizeof(int) && sizeof(cg_dtype) == sizeof(int) &&
                   sizeof(cg_support) == sizeof(int) && sizeof(cg_teacher) == sizeof(int),
               "choices are copied as int");

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

const cg_config_entry cg_config_entries[] = {
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

    ONE_OF(task, cg_config_tasks, "text: next byte of files; recall: generated key and value pairs"),
    INT(recall_keys, 2, 65536, "recall: different keys; a sequence uses recall_pairs of them"),
    INT(recall_values, 2, 65536, "recall: different values; chance is 1/recall_values"),
    INT(recall_pairs, 2, 65536, "recall: pairs in a sequence, one group of 4 tokens each"),
    INT(seq_len, 2, 1 << 24, "tokens of a sequence"),
    INT(batch_size, 1, 1 << 16, "sequences of a micro-batch, packed into batch_size * seq_len rows"),
    INT(accumulate, 1, 1 << 16, "micro-batches per step"),
    INT(steps, 1, INT64_C(1) << 40, "optimizer steps of the whole training"),
    INT(seed, 0, INT64_MAX, "seed of weights and data"),
    ONE_OF(dtype, dtypes, "number format; bf16: of activations and products alone, summed in f32, with weights and optimizer in f32"),
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
    INT(checkpoint_every, 0, INT64_C(1) << 40, "steps between checkpoints; 0: by time alone"),
    NUM(checkpoint_minutes, 0, 1e6, "minutes between checkpoints, the first behind step 1; 0: none by time"),
};
/* clang-format on */

_Static_assert(sizeof cg_config_entries / sizeof cg_config_entries[0] == CG_CONFIG_KEYS, "a key more or less");

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
        .checkpoint_minutes = 3,
    };
}

/* Recall is solved by the first compressed layer that sees the pairs, so two CSA layers do; half as many steps
 * as the run has teach all visible rows to be used, and the indexer which of them matter. At a learning rate of
 * 3e-3 the first steps, which are noise, may sharpen the attention onto rows that have nothing to do with the
 * question before any value can be read from it; nothing pulls it off them then, and a run stays at chance. */
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
    config.learning_rate = 1e-3;
    config.indexer_warmup = 200;
    config.steps = 400;
    config.eval_every = 25;
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

const cg_config_entry *cg_config_find(const char *key) {
    for (int i = 0; i < CG_CONFIG_KEYS; i++)
        if (strcmp(cg_config_entries[i].name, key) == 0) return &cg_config_entries[i];
    return NULL;
}

void cg_config_range(const cg_config_entry *e, char *text, size_t bytes) {
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
        for (const cg_config_choice *c = e->choices; c->name && n < bytes; c++)
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

bool cg_config_refuse(const cg_config_entry *e, const char *got, cg_error *error) {
    char range[160];
    cg_config_range(e, range, sizeof range);
    return cg_fail(error, CG_BAD_INPUT, "%s must be %s, got %s", e->name, range, got);
}

bool cg_config_integer_fits(const cg_config_entry *e, int64_t number) {
    return number >= e->least && number <= e->most;
}

bool cg_config_real_fits(const cg_config_entry *e, double number) {
    return isfinite(number) && number >= e->low && number <= e->high && !(e->low_open && number == e->low) &&
           !(e->high_open && number == e->high);
}

bool cg_config_ratio_fits(int64_t ratio) {
    return ratio == 0 || ratio == CG_RATIO_CSA || ratio == CG_RATIO_HCA;
}

const char *cg_config_choice_name(const cg_config *config, const cg_config_entry *e) {
    int value;
    memcpy(&value, (const char *)config + e->offset, sizeof value);
    for (const cg_config_choice *c = e->choices; c->name; c++)
        if (c->value == value) return c->name;
    return NULL;
}

bool cg_config_is_policy(const char *text) {
    static const char allowed[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_*?,@/:;.-=+";
    size_t length = strlen(text);
    return length > 0 && length < CG_POLICY_BYTES && strspn(text, allowed) == length;
}

/* ---- checks -----------------------------------------------------------------------------------------------
 */

bool cg_config_check_together(const cg_config *c, cg_error *error) {
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

/* What is no value of the key, as a JSON file would hold it where one could. */
static bool check_value(const cg_config *config, const cg_config_entry *e, cg_error *error) {
    const void *field = (const char *)config + e->offset;
    char got[360] = "what no file could hold";
    switch (e->kind) {
    case INTEGER: {
        int64_t number = *(const int64_t *)field;
        if (cg_config_integer_fits(e, number)) return true;
        snprintf(got, sizeof got, "%lld", (long long)number);
        break;
    }
    case REAL: {
        double number = *(const double *)field;
        if (cg_config_real_fits(e, number)) return true;
        if (isfinite(number)) snprintf(got, sizeof got, "%.12g", number);
        break;
    }
    case BOOLEAN:
        return true;
    case CHOICE:
        if (cg_config_choice_name(config, e)) return true;
        break;
    case RATIOS:
        if (config->n_compress_ratios < 1 || config->n_compress_ratios > CG_MAX_LAYERS) {
            snprintf(got, sizeof got, "%lld of them", (long long)config->n_compress_ratios);
            break;
        }
        for (int64_t i = 0; i < config->n_compress_ratios; i++) {
            int64_t ratio = config->compress_ratios[i];
            if (cg_config_ratio_fits(ratio)) continue;
            snprintf(got, sizeof got, "%lld for layer %lld", (long long)ratio, (long long)i);
            return cg_config_refuse(e, got, error);
        }
        return true;
    case POLICY:
        if (!memchr(config->policy, 0, sizeof config->policy)) break;
        if (cg_config_is_policy(config->policy)) return true;
        snprintf(got, sizeof got, "\"%s\"", cg_shown(config->policy).text);
        break;
    }
    return cg_config_refuse(e, got, error);
}

bool cg_config_check(const cg_config *config, cg_error *error) {
    for (int i = 0; i < CG_CONFIG_KEYS; i++)
        if (!check_value(config, &cg_config_entries[i], error)) return false;
    return cg_config_check_together(config, error);
}

bool cg_config_key_at(int i, cg_config_key *key) {
    if (i < 0 || i >= CG_CONFIG_KEYS) return false;
    key->name = cg_config_entries[i].name;
    key->doc = cg_config_entries[i].doc;
    cg_config_range(&cg_config_entries[i], key->range, sizeof key->range);
    return true;
}
