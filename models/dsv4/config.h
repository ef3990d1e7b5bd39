/* Configuration of the toy DSV4 model and of its training.
 *
 * One table in config.c holds every key: its type, its range and one line about it. Reading a file, overriding
 * from the command line, writing beside a checkpoint and help all come from that table. Nothing is silently
 * replaced: what cannot be used is refused with the name of the key and what it may be.
 */
#ifndef CG_MODELS_CONFIG_H
#define CG_MODELS_CONFIG_H

#include "core/base/error.h"
#include "ops/ops.h"

enum { CG_MAX_LAYERS = 128, CG_POLICY_BYTES = 256 };

/* Tokens per compressed row that a layer may have; 0: the window alone. */
enum { CG_RATIO_CSA = 4, CG_RATIO_HCA = 128 };

typedef enum cg_task { CG_TASK_TEXT, CG_TASK_RECALL } cg_task;
typedef enum cg_support { CG_SUPPORT_SPARSE, CG_SUPPORT_DENSE } cg_support;

/* A field has the name of its key; help has the meaning. */
typedef struct cg_config {
    int64_t vocab_size, hidden_size, num_hidden_layers;
    int64_t num_attention_heads, head_dim, qk_rope_head_dim, q_lora_rank, o_groups, o_lora_rank;
    int64_t sliding_window;
    int64_t n_compress_ratios; /* equals num_hidden_layers in a checked config */
    int64_t compress_ratios[CG_MAX_LAYERS];
    int64_t index_n_heads, index_head_dim, index_topk;
    bool index_hadamard;
    int64_t intermediate_size;
    double swiglu_limit, rms_norm_eps, initializer_range;
    double rope_theta, compress_rope_theta;
    double rope_scaling_factor;
    int64_t rope_scaling_original_max_position_embeddings;
    double rope_scaling_beta_fast, rope_scaling_beta_slow;

    cg_task task;
    int64_t recall_keys, recall_values, recall_pairs;
    int64_t seq_len, batch_size, accumulate, steps, seed;
    cg_dtype dtype;
    double learning_rate, min_lr_ratio;
    int64_t warmup_steps, decay_steps;
    double beta1, beta2, adam_eps, weight_decay, max_grad_norm;
    double indexer_loss_coeff;
    cg_teacher teacher;
    cg_support support;
    int64_t indexer_warmup;
    char policy[CG_POLICY_BYTES]; /* for cg_policy_parse */
    int64_t eval_every, eval_batches, checkpoint_every;
    double checkpoint_minutes;
} cg_config;

/* The built-in toy: four layers, ratios 0 4 128 4, under a million parameters. */
cg_config cg_config_toy(void);

/* The defaults of a task: the toy for text, a smaller one with two CSA layers for recall. */
cg_config cg_config_default(cg_task task);

/* One CSA layer with the attention and indexer sizes of a model, batch 1, 512 tokens: what memory figures are shown for.
 * The vocabulary is 256, since embedding and head are not the question, and the feed-forward half has the width of one
 * expert. Names: toy, flash, pro (DeepSeek-V4 report, arXiv 2606.19348, section 4.2.1). Number i from 0, NULL behind
 * the last. */
const char *cg_dims_name(int i);

/* The configuration of a name; false when there is none of that name. */
bool cg_config_dims(const char *name, cg_config *config);

/* Read a JSON object over `config`: keys that the file lacks keep their values. A file that names another task
 * is read over that task's defaults instead. The YaRN keys may also stand in a nested object "rope_scaling"
 * {type, factor, original_max_position_embeddings, beta_fast, beta_slow}, and "rope_scaling": null means
 * factor 1. Refuses a repeated key, an unknown one (naming the nearest), a wrong type or range, and what
 * cg_config_check refuses. On failure `config` is as before. */
bool cg_config_load(cg_config *config, const char *path, cg_error *error);

/* The same from a text that ends with a 0; the sentence names no file. */
bool cg_config_parse(cg_config *config, const char *json, cg_error *error);

/* Override one key from text. Numbers are written as in JSON (0.5, 1e-3, no blanks, no hexadecimal, no plus),
 * true and false as such, lists as 0,4,128 with or without brackets, words without quotes. Keys that depend on
 * each other can be set one after the other: call cg_config_check behind the last. On failure `config` is as
 * before. */
bool cg_config_set(cg_config *config, const char *key, const char *text, cg_error *error);

/* Check every value and how they fit together. */
bool cg_config_check(const cg_config *config, cg_error *error);

/* All keys as a JSON object, one per line, in the order of help; cg_config_load gives the same configuration
 * back. malloc'd; NULL when memory is out. */
char *cg_config_json(const cg_config *config);

/* A line of help. Texts that are not constant are written into the struct. */
typedef struct cg_config_key {
    const char *name;
    const char *doc; /* one line, with the unit */
    char range[160]; /* "an integer from 1 to 65536" */
} cg_config_key;

/* Key number i from 0; false when there is none. */
bool cg_config_key_at(int i, cg_config_key *key);

/* The value of a key as cg_config_set would read it, into text; returns text. NULL for an unknown key. */
const char *cg_config_get(const cg_config *config, const char *key, char *text, size_t text_bytes);

#endif
