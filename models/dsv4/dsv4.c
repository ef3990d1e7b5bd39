#include "models/dsv4/dsv4.h"

#include "core/base/rng.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What all layers share. */
typedef struct builder {
    cg_graph *graph;
    const cg_config *config;
    const cg_dsv4_options *options;
    cg_dsv4 *model;
    cg_rows rows[3];      /* for ratio 0, 4 and 128; made when a layer first needs them */
    cg_value *visible[3]; /* index lists of all visible compressed rows, where there are any */
} builder;

/* In f32 beside bf16: updates are far smaller than a step between two numbers of bf16. */
static cg_value *param(builder *b, const char *name, cg_shape shape, cg_init init, bool decay, bool indexer) {
    cg_value *value = cg_leaf(b->graph, CG_LEAF_PARAMETER, name, cg_statistic_dtype(b->config->dtype), shape);
    if (!value) return NULL;
    value->external = b->options->external;
    if (b->model->n_params == CG_MAX_PARAMS)
        return cg_graph_fail(b->graph, "more than %d parameters", CG_MAX_PARAMS);
    b->model->params[b->model->n_params++] = (cg_dsv4_param){value, init, decay, indexer};
    return value;
}

/* A matrix as products take it. */
static cg_value *matrix(builder *b, cg_value *parameter) {
    return cg_cast(b->graph, parameter, b->config->dtype);
}

/* A projection without bias: its weight [out, in] decays. */
static cg_value *project(builder *b, cg_value *x, const char *name, int64_t out, bool indexer) {
    cg_value *weight = param(b, name, CG_SHAPE(out, cg_dim(x, 1)), CG_INIT_NORMAL, true, indexer);
    return cg_linear(b->graph, x, matrix(b, weight));
}

static cg_value *normalize(builder *b, cg_value *x, const char *name, bool indexer) {
    cg_value *weight = param(b, name, CG_SHAPE(cg_dim(x, 1)), CG_INIT_ONES, false, indexer);
    return cg_rms_norm(b->graph, x, weight, b->config->rms_norm_eps);
}

/* ---- rows ---- */

static int ratio_index(int64_t ratio) { return ratio == CG_RATIO_CSA ? 1 : ratio == CG_RATIO_HCA ? 2 : 0; }

static int64_t capacity(const builder *b, int64_t ratio) { return ratio ? b->options->n_rows / ratio : 0; }

/* Facts about the packed rows under one ratio, and the index list that makes sparse attention dense. All layers
 * of that ratio share them, so they belong to no layer's scope. */
static const cg_rows *rows_of(builder *b, int64_t ratio) {
    cg_rows *rows = &b->rows[ratio_index(ratio)];
    if (rows->rows || cg_graph_error(b->graph)) return rows;
    CG_WITHIN(b->graph, "", cg_pass_now(b->graph), NULL);
    CG_SCOPE(b->graph, "rows%lld", (long long)ratio);
    *rows = cg_segment_rows(b->graph, b->model->cu_seqlens, b->model->seqlens, b->options->n_rows, ratio,
                            capacity(b, ratio));
    if (ratio)
        b->visible[ratio_index(ratio)] =
            cg_visible_indices(b->graph, rows->rows, b->options->max_seqlen / ratio);
    return rows;
}

static cg_value *all_visible(builder *b, int64_t ratio) {
    rows_of(b, ratio);
    return b->visible[ratio_index(ratio)];
}

/* ---- attention ---- */

static cg_rope_attr rope_of(const cg_config *config, int64_t ratio, bool inverse) {
    cg_rope_attr attr = {.n_rotary = config->qk_rope_head_dim, .base = config->rope_theta, .inverse = inverse};
    if (!ratio) return attr;
    /* layers that compress use the other base everywhere, with YaRN when configured (spec 2.1) */
    attr.base = config->compress_rope_theta;
    attr.yarn_factor = config->rope_scaling_factor;
    attr.yarn_original_length = (double)config->rope_scaling_original_max_position_embeddings;
    attr.yarn_beta_fast = config->rope_scaling_beta_fast;
    attr.yarn_beta_slow = config->rope_scaling_beta_slow;
    return attr;
}

/* Gated pooling of the rows of x into compressed rows of `width` channels, normed and rotated (spec 3). */
static cg_value *compress(builder *b, cg_value *x, int64_t ratio, int64_t width, bool indexer) {
    cg_graph *g = b->graph;
    const cg_rows *rows = rows_of(b, ratio);
    bool overlap = ratio == CG_RATIO_CSA;
    int64_t columns = overlap ? 2 * width : width;
    CG_SCOPE(g, "compressor");
    cg_value *content = project(b, x, "wkv.weight", columns, indexer);
    cg_value *gate = project(b, x, "wgate.weight", columns, indexer);
    cg_value *ape = param(b, "ape", CG_SHAPE(ratio, columns), CG_INIT_NORMAL, false, indexer);
    cg_value *pooled =
        cg_csa_compress(g, content, gate, ape, rows->entries, rows->entry_positions, ratio, overlap);
    pooled = normalize(b, pooled, "norm.weight", indexer);
    cg_rope_attr rope = rope_of(b->config, ratio, false);
    return cg_rope(g, pooled, rows->entry_positions, &rope);
}

/* Queries, head weights and keys of the Lightning Indexer (spec 4), from detached hidden states and query
 * latents: nothing of its loss reaches the rest of the model. */
static cg_indexer build_indexer(builder *b, cg_value *x, cg_value *q_latent) {
    cg_graph *g = b->graph;
    const cg_config *c = b->config;
    int64_t n_rows = b->options->n_rows, n_heads = c->index_n_heads, width = c->index_head_dim;
    x = cg_detach(g, x);
    q_latent = cg_detach(g, q_latent);
    cg_rope_attr rope = rope_of(c, CG_RATIO_CSA, false);
    cg_value *q = cg_reshape(g, project(b, q_latent, "wq_b.weight", n_heads * width, true),
                             CG_SHAPE(n_rows, n_heads, width));
    q = cg_rope(g, q, rows_of(b, CG_RATIO_CSA)->positions, &rope);
    cg_value *k = compress(b, x, CG_RATIO_CSA, width, true);
    if (c->index_hadamard) {
        q = cg_hadamard(g, q);
        k = cg_hadamard(g, k);
    }
    cg_value *w =
        cg_scale(g, project(b, x, "weights_proj.weight", n_heads, true), 1 / sqrt((double)(n_heads * width)));
    return cg_indexer_new(g, b->options->form, q, w, k);
}

static cg_value *select_rows(builder *b, const cg_indexer *ix) {
    if (b->options->attend_all) return all_visible(b, CG_RATIO_CSA);
    if (b->options->given_topk)
        return cg_leaf(b->graph, CG_LEAF_INPUT, "topk", CG_I32,
                       CG_SHAPE(b->options->n_rows, b->config->index_topk));
    return cg_indexer_select(b->graph, ix, rows_of(b, CG_RATIO_CSA)->rows, b->config->index_topk);
}

/* KL of the attention's own distribution over compressed rows against the indexer's (spec 6.2), summed over
 * rows. */
static cg_value *indexer_loss(builder *b, const cg_indexer *ix, const cg_attention *attention, cg_value *q,
                              cg_value *ckv, cg_value *sink, cg_value *topk, double scale) {
    cg_graph *g = b->graph;
    const cg_config *c = b->config;
    cg_value *rows = rows_of(b, CG_RATIO_CSA)->rows;
    bool dense = b->options->attend_all || c->support == CG_SUPPORT_DENSE;
    cg_value *window_lse = c->teacher == CG_TEACHER_FULL ? attention->window_lse : NULL;
    cg_value *teacher_sink = c->teacher == CG_TEACHER_SINK ? sink : NULL;
    if (!dense) return cg_indexer_loss(g, ix, topk, attention->teacher, rows, c->indexer_loss_coeff);
    if (b->options->form == CG_FORM_STREAM)
        return cg_indexer_dense_loss(g, ix->q, ix->w, ix->k, cg_detach(g, q), cg_detach(g, ckv), window_lse,
                                     teacher_sink, rows, scale, c->teacher, CG_REDUCE_SUM,
                                     c->indexer_loss_coeff);
    cg_value *support = all_visible(b, CG_RATIO_CSA);
    cg_value *teacher = cg_csa_teacher_at(g, cg_detach(g, q), cg_detach(g, ckv), support, window_lse,
                                          teacher_sink, scale, c->teacher);
    return cg_indexer_loss(g, ix, support, teacher, rows, c->indexer_loss_coeff);
}

static cg_value *build_health(builder *b, const cg_indexer *ix, const cg_attention *attention, cg_value *q,
                              cg_value *ckv, cg_value *topk, double scale) {
    cg_value *scores = cg_indexer_scores_at(b->graph, ix->q, ix->w, ix->k, topk);
    return cg_indexer_health(b->graph, scores, attention->teacher, topk, ix->w, q, ckv, attention->window_lse,
                             rows_of(b, CG_RATIO_CSA)->rows, scale, CG_RATIO_CSA);
}

/* Attention of one layer (spec 2, 5): x [T, hidden] -> [T, hidden]. */
static cg_value *attention_block(builder *b, cg_value *x, cg_dsv4_layer *layer) {
    cg_graph *g = b->graph;
    const cg_config *c = b->config;
    int64_t n_rows = b->options->n_rows, n_heads = c->num_attention_heads, width = c->head_dim,
            ratio = layer->ratio;
    double scale = 1 / sqrt((double)width);
    const cg_rows *rows = rows_of(b, ratio);
    cg_rope_attr rope = rope_of(c, ratio, false), unrope = rope_of(c, ratio, true);

    cg_value *q_latent =
        normalize(b, project(b, x, "wq_a.weight", c->q_lora_rank, false), "q_norm.weight", false);
    cg_value *q = cg_reshape(g, project(b, q_latent, "wq_b.weight", n_heads * width, false),
                             CG_SHAPE(n_rows, n_heads, width));
    q = cg_rope(g, cg_rms_norm(g, q, NULL, c->rms_norm_eps), rows->positions, &rope);
    cg_value *kv = normalize(b, project(b, x, "wkv.weight", width, false), "kv_norm.weight", false);
    kv = cg_rope(g, kv, rows->positions, &rope);
    cg_value *sink = param(b, "attn_sink", CG_SHAPE(n_heads), CG_INIT_ZEROS, false, false);

    cg_value *ckv = ratio ? compress(b, x, ratio, width, false) : NULL, *topk = NULL;
    bool wants_loss = ratio == CG_RATIO_CSA && b->options->with_loss && c->indexer_loss_coeff != 0;
    bool wants_health = ratio == CG_RATIO_CSA && b->options->with_health;
    cg_indexer ix = {0};
    if (ratio == CG_RATIO_CSA) {
        CG_SCOPE(g, "indexer");
        ix = build_indexer(b, x, q_latent);
        topk = layer->topk = select_rows(b, &ix);
    } else if (ratio) {
        topk = all_visible(b, ratio);
    }
    bool sparse_teacher =
        wants_health || (wants_loss && !b->options->attend_all && c->support == CG_SUPPORT_SPARSE);
    cg_attention attention = cg_csa_attention(g, q, kv, ckv, sink, topk, rows->rows, c->sliding_window, scale,
                                              sparse_teacher ? c->teacher : CG_TEACHER_NONE);
    layer->lse = attention.lse;
    {
        CG_SCOPE(g, "indexer");
        if (wants_loss) layer->indexer_loss = indexer_loss(b, &ix, &attention, q, ckv, sink, topk, scale);
        if (wants_health) layer->health = build_health(b, &ix, &attention, q, ckv, topk, scale);
    }

    /* values carry the rotation of their own position; turning back by the query's makes it relative (spec 2.2)
     */
    cg_value *out = cg_rope(g, attention.out, rows->positions, &unrope);
    int64_t groups = c->o_groups, rank = c->o_lora_rank, group_width = n_heads / groups * width;
    cg_value *wo_a = param(b, "wo_a.weight", CG_SHAPE(groups * rank, group_width), CG_INIT_NORMAL, true, false);
    out = cg_grouped_linear(g, cg_reshape(g, out, CG_SHAPE(n_rows, groups, group_width)),
                            cg_reshape(g, matrix(b, wo_a), CG_SHAPE(groups, rank, group_width)));
    return project(b, cg_reshape(g, out, CG_SHAPE(n_rows, groups * rank)), "wo_b.weight", c->hidden_size,
                   false);
}

/* The feed-forward half: one dense SwiGLU. Experts take its place behind the same signature. */
static cg_value *feed_forward(builder *b, cg_value *x) {
    CG_SCOPE(b->graph, "ffn");
    const cg_config *c = b->config;
    cg_value *gate = project(b, x, "w1.weight", c->intermediate_size, false);
    cg_value *up = project(b, x, "w3.weight", c->intermediate_size, false);
    return project(b, cg_swiglu(b->graph, gate, up, c->swiglu_limit), "w2.weight", c->hidden_size, false);
}

/* One block: each half reads the normed stream and is added to it. Hyper-connections would replace the two
 * additions. */
static cg_value *block(builder *b, cg_value *stream, cg_dsv4_layer *layer) {
    cg_graph *g = b->graph;
    cg_value *x = normalize(b, stream, "attn_norm.weight", false);
    {
        CG_SCOPE(g, "attn");
        layer->attended = attention_block(b, x, layer);
    }
    stream = cg_add(g, stream, layer->attended);
    x = normalize(b, stream, "ffn_norm.weight", false);
    return cg_add(g, stream, feed_forward(b, x));
}

static void build_inputs(builder *b) {
    cg_graph *g = b->graph;
    cg_dsv4 *m = b->model;
    int64_t n_rows = b->options->n_rows, n_segments = b->options->max_segments;
    m->tokens = cg_leaf(g, CG_LEAF_INPUT, "tokens", CG_I32, CG_SHAPE(n_rows));
    m->targets = cg_leaf(g, CG_LEAF_INPUT, "targets", CG_I32, CG_SHAPE(n_rows));
    m->cu_seqlens = cg_leaf(g, CG_LEAF_INPUT, "cu_seqlens", CG_I32, CG_SHAPE(n_segments + 1));
    m->seqlens = cg_leaf(g, CG_LEAF_INPUT, "seqlens", CG_I32, CG_SHAPE(n_segments));
    const cg_dtype scalar = cg_statistic_dtype(b->config->dtype);
    m->lm_scale = cg_leaf(g, CG_LEAF_INPUT, "lm_scale", scalar, CG_SHAPE(1));
    m->row_scale = cg_leaf(g, CG_LEAF_INPUT, "row_scale", scalar, CG_SHAPE(1));
}

bool cg_dsv4_build(cg_graph *graph, const cg_config *config, const cg_dsv4_options *options, cg_dsv4 *model) {
    memset(model, 0, sizeof *model);
    model->graph = graph;
    builder b = {graph, config, options, model, {{0}}, {0}};
    build_inputs(&b);
    cg_value *table = param(&b, "embed.weight", CG_SHAPE(config->vocab_size, config->hidden_size),
                            CG_INIT_NORMAL, false, false);
    cg_value *stream = matrix(&b, cg_embedding(graph, table, model->tokens)), *loss = NULL;
    model->n_layers = (int)config->num_hidden_layers;
    for (int i = 0; i < model->n_layers && !cg_graph_error(graph); i++) {
        cg_dsv4_layer *layer = &model->layers[i];
        layer->ratio = config->compress_ratios[i];
        {
            CG_SCOPE(graph, "layer%d", i);
            stream = block(&b, stream, layer);
        }
        if (layer->indexer_loss) loss = loss ? cg_add(graph, loss, layer->indexer_loss) : layer->indexer_loss;
    }
    stream = normalize(&b, stream, "norm.weight", false);
    model->logits = project(&b, stream, "head.weight", config->vocab_size, false);
    model->lm_loss = cg_mul(graph, cg_cross_entropy(graph, model->logits, model->targets), model->lm_scale);
    if (loss) model->indexer_loss = cg_mul(graph, loss, model->row_scale);
    return cg_graph_error(graph) == NULL;
}

/* ---- parameters ---- */

const char *cg_param_name(const cg_value *value, char *text, size_t text_bytes) {
    const char *scope = value->scope;
    int n = 0;
    if (!strncmp(scope, "layer", 5)) {
        n = snprintf(text, text_bytes, "layers.%s", scope + 5);
    } else {
        n = snprintf(text, text_bytes, "%s", scope);
    }
    for (char *p = text; *p; p++)
        if (*p == '/') *p = '.';
    if (n >= 0 && (size_t)n < text_bytes)
        snprintf(text + n, text_bytes - (size_t)n, "%s%s", n ? "." : "", value->name);
    return text;
}

void cg_param_init(const cg_dsv4_param *p, const cg_config *config, cg_exec *exec) {
    enum { CHUNK = 1024 };
    char name[256];
    double x[CHUNK];
    uint64_t stream = cg_random_stream(cg_param_name(p->value, name, sizeof name));
    for (int64_t i = 0, n = cg_shape_count(&p->value->shape); i < n; i += CHUNK) {
        int64_t some = n - i < CHUNK ? n - i : CHUNK;
        for (int64_t k = 0; k < some; k++)
            x[k] = p->init == CG_INIT_NORMAL
                       ? config->initializer_range *
                             cg_random_normal((uint64_t)config->seed, stream, (uint64_t)(i + k))
                       : p->init == CG_INIT_ONES;
        cg_exec_write_real(exec, p->value, i, some, x);
    }
}
