#include "models/check/dump_case.h"

#include "core/base/bf16.h"
#include "core/base/rng.h"
#include "core/files/safetensors.h"
#include "core/base/shown.h"
#include "graph/cases.h"
#include "models/dsv4/layer_check.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- sizes ---- */

static bool fill_lengths(cg_dump_case *c, const cg_dump_lengths *lengths, cg_error *error) {
    size_t n = (size_t)lengths->n;
    c->n_segments = lengths->n;
    c->cu_seqlens = calloc(n + 1, sizeof *c->cu_seqlens);
    c->cu_compressed = calloc(n + 1, sizeof *c->cu_compressed);
    c->seqlens = calloc(n + 1, sizeof *c->seqlens);
    if (!c->cu_seqlens || !c->cu_compressed || !c->seqlens)
        return cg_fail(error, CG_FAILED, "out of memory for %d segments", lengths->n);
    int64_t end = 0, compressed = 0;
    for (size_t b = 0; b < n; b++) {
        int64_t physical = lengths->physical[b], real = lengths->real ? lengths->real[b] : physical;
        if (real < 0 || real > physical)
            return cg_fail(error, CG_BAD_INPUT, "segment %zu has %lld real rows of %lld, expected 0 to %lld", b,
                           (long long)real, (long long)physical, (long long)physical);
        end += physical;
        compressed += physical / c->ratio;
        if (end > INT32_MAX)
            return cg_fail(error, CG_BAD_INPUT, "the segments have more than %d rows", INT32_MAX);
        c->cu_seqlens[b + 1] = (int32_t)end;
        c->cu_compressed[b + 1] = (int32_t)compressed;
        c->seqlens[b] = (int32_t)real;
    }
    c->n_rows = end + lengths->behind;
    c->n_compressed = compressed;
    return true;
}

/* All real inputs: place, elements, name of the random stream. */
enum { QUERY, KV, CKV, SINK, Q_INDEXER, WEIGHTS, K_INDEXER, DOUT, N_INPUTS };

typedef struct input {
    double **data;
    int64_t count;
    const char *name;
} input;

static void list_inputs(cg_dump_case *c, input list[N_INPUTS]) {
    int64_t T = c->n_rows, C = c->n_compressed, H = c->n_heads, D = c->head_dim, G = c->index_heads,
            E = c->index_dim;
    list[QUERY] = (input){&c->query, T * H * D, "query"};
    list[KV] = (input){&c->kv, T * D, "kv"};
    list[CKV] = (input){&c->ckv, C * D, "compressed_kv"};
    list[SINK] = (input){&c->sink, H, "sink"};
    list[Q_INDEXER] = (input){&c->q_indexer, T * G * E, "q_indexer"};
    list[WEIGHTS] = (input){&c->weights, T * G, "weights"};
    list[K_INDEXER] = (input){&c->k_indexer, C * E, "k_indexer"};
    list[DOUT] = (input){&c->dout, T * H * D, "dout"};
}

static bool allocate(cg_dump_case *c, cg_error *error) {
    input list[N_INPUTS];
    list_inputs(c, list);
    for (int i = 0; i < N_INPUTS; i++)
        if (!(*list[i].data = calloc((size_t)list[i].count + 1, sizeof(double))))
            return cg_fail(error, CG_FAILED, "out of memory for %s, %lld numbers", list[i].name,
                           (long long)list[i].count);
    return true;
}

static void fill_normal(double *x, int64_t n, const char *name, uint64_t seed) {
    char stream[64];
    snprintf(stream, sizeof stream, "dump/%s", name);
    uint64_t number = cg_random_stream(stream);
    for (int64_t i = 0; i < n; i++) x[i] = cg_random_normal(seed, number, (uint64_t)i);
}

/* Frameworks differ in what rows of padding give, so nothing asks for their gradient. */
static void fill_dout(cg_dump_case *c, uint64_t seed) {
    int64_t width = c->n_heads * c->head_dim, real_end = 0;
    fill_normal(c->dout, c->n_rows * width, "dout", seed);
    for (int64_t b = 0; b <= c->n_segments; b++) {
        int64_t next = b < c->n_segments ? c->cu_seqlens[b] : c->n_rows;
        memset(c->dout + real_end * width, 0, (size_t)((next - real_end) * width) * sizeof(double));
        if (b < c->n_segments) real_end = next + c->seqlens[b];
    }
}

bool cg_dump_case_random(cg_dump_case *c, const cg_dump_lengths *lengths, uint64_t seed, cg_error *error) {
    if (!fill_lengths(c, lengths, error) || !allocate(c, error)) return false;
    input list[N_INPUTS];
    list_inputs(c, list);
    for (int i = 0; i < DOUT; i++) fill_normal(*list[i].data, list[i].count, list[i].name, seed);
    for (int64_t i = 0; i < list[WEIGHTS].count; i++)
        c->weights[i] /= sqrt((double)(c->index_heads * c->index_dim));
    fill_dout(c, seed);
    return true;
}

void cg_dump_case_free(cg_dump_case *c) {
    input list[N_INPUTS];
    list_inputs(c, list);
    for (int i = 0; i < N_INPUTS; i++) free(*list[i].data);
    free(c->cu_seqlens);
    free(c->cu_compressed);
    free(c->seqlens);
    memset(c, 0, sizeof *c);
}

/* ---- rounding ---- */

static double rounded(double x, cg_dtype dtype) {
    if (dtype == CG_F64) return x;
    if (dtype == CG_F32) return (float)x;
    return cg_bf16_get(cg_bf16_of((float)x));
}

void cg_dump_case_round(cg_dump_case *c, cg_dtype dtype) {
    input list[N_INPUTS];
    list_inputs(c, list);
    for (int i = 0; i < N_INPUTS; i++)
        for (int64_t k = 0; k < list[i].count; k++)
            (*list[i].data)[k] = rounded((*list[i].data)[k], i == SINK && dtype == CG_BF16 ? CG_F32 : dtype);
}

/* ---- the toy model ---- */

/* The values of the graph that a layer reads: inputs of its attention and of its choice. */
typedef struct layer_values {
    cg_value *query, *kv, *ckv, *sink, *q_indexer, *weights, *k_indexer;
} layer_values;

static layer_values find_values(const cg_dsv4_layer *layer) {
    cg_value *const *attention = layer->lse->producer->in, *const *choice = layer->topk->producer->in;
    return (layer_values){attention[0], attention[1], attention[2], attention[3],
                          choice[0],    choice[1],    choice[2]};
}

static bool refuse_layer(const cg_config *config, int64_t layer, cg_error *error) {
    char with[256] = "";
    for (int64_t i = 0; i < config->num_hidden_layers; i++)
        if (config->compress_ratios[i] == CG_RATIO_CSA && strlen(with) < 200)
            snprintf(with + strlen(with), sizeof with - strlen(with), "%s%lld", *with ? ", " : "",
                     (long long)i);
    if (layer < 0 || layer >= config->num_hidden_layers)
        return cg_fail(error, CG_BAD_INPUT, "layer %lld: the model has layers 0 to %lld", (long long)layer,
                       (long long)config->num_hidden_layers - 1);
    return cg_fail(error, CG_BAD_INPUT, "layer %lld has ratio %lld and no indexer; layers with one: %s",
                   (long long)layer, (long long)config->compress_ratios[layer], *with ? with : "none");
}

/* Weights of a file over the scattered ones; moments and whatever else it holds are left alone. */
static bool load_weights(const cg_probe *probe, const char *path, cg_error *error) {
    cg_safetensors *file = cg_safetensors_open(path, error);
    bool ok = file != NULL;
    for (int p = 0; ok && p < probe->model->n_params; p++) {
        const cg_value *value = probe->model->params[p].value;
        char name[256], a[128], b[128];
        const cg_tensor *got = cg_safetensors_find(file, cg_param_name(value, name, sizeof name));
        if (!got) {
            ok = cg_fail(error, CG_BAD_INPUT, "%s lacks %s: is it of another model?", cg_shown_path(path).text,
                         name);
        } else if (!cg_dtype_is_real(got->dtype) || !cg_shape_equal(&got->shape, &value->shape)) {
            ok = cg_fail(error, CG_BAD_INPUT,
                         "%s: %s is %s %s, expected f32, f64 or bf16 %s: is it of another model?", path, name,
                         cg_dtype_name(got->dtype), cg_shape_text(&got->shape, a, sizeof a),
                         cg_shape_text(&value->shape, b, sizeof b));
        } else {
            size_t size = cg_dtype_bytes(got->dtype);
            for (int64_t i = 0; i < cg_shape_count(&value->shape); i++) {
                double x; /* by its bytes: data of a file may lie anywhere */
                memcpy(&x, (const char *)got->data + (size_t)i * size, size);
                cg_exec_set(probe->exec, value, i, cg_real_get(got->dtype, &x, 0));
            }
        }
    }
    cg_safetensors_close(file);
    return ok;
}

/* Random tokens; behind the last segment there are none. No row is a target. */
static bool feed_tokens(const cg_probe *probe, const cg_dump_case *c, const cg_config *config,
                        cg_error *error) {
    size_t n = (size_t)c->n_rows;
    int32_t *tokens = malloc((2 * n + 1) * sizeof *tokens);
    if (!tokens) return cg_fail(error, CG_FAILED, "out of memory for %zu tokens", n);
    uint64_t stream = cg_random_stream("dump/tokens");
    for (size_t t = 0; t < n; t++) {
        bool inside = (int64_t)t < c->cu_seqlens[c->n_segments];
        tokens[t] =
            inside ? (int32_t)cg_random_below((uint64_t)config->seed, stream, t, config->vocab_size) : -1;
        tokens[n + t] = -1;
    }
    cg_probe_feed(probe, c->cu_seqlens, c->seqlens, tokens, tokens + n);
    free(tokens);
    return true;
}

static bool run_model(cg_dump_case *c, cg_probe *probe, const cg_config *config, int64_t layer,
                      const char *checkpoint, cg_error *error) {
    int64_t longest = 1;
    for (int64_t b = 0; b < c->n_segments; b++)
        if (c->cu_seqlens[b + 1] - c->cu_seqlens[b] > longest)
            longest = c->cu_seqlens[b + 1] - c->cu_seqlens[b];
    cg_dsv4_options options = {
        .n_rows = c->n_rows, .max_segments = c->n_segments, .max_seqlen = longest, .form = CG_FORM_STREAM};
    probe->graph = cg_graph_new(&cg_all_ops);
    probe->model = calloc(1, sizeof *probe->model);
    if (!probe->graph || !probe->model)
        return cg_fail(error, CG_FAILED, "out of memory while a model is built");
    layer_values values = {0};
    cg_value **all = (cg_value **)&values;
    if (cg_dsv4_build(probe->graph, config, &options, probe->model)) {
        values = find_values(&probe->model->layers[layer]);
        for (size_t i = 0; i < sizeof values / sizeof *all; i++) cg_keep(all[i]);
    }
    if (!(probe->plan = cg_plan_make(probe->graph, NULL, error)) ||
        !(probe->exec = cg_exec_new(probe->plan, NULL, error)))
        return false;
    cg_probe_scatter(probe, (uint64_t)config->seed);
    if (checkpoint && !load_weights(probe, checkpoint, error)) return false;
    if (!feed_tokens(probe, c, config, error) || !cg_exec_run(probe->exec, CG_ALL_PASSES, error)) return false;
    double *to[] = {c->query, c->kv, c->ckv, c->sink, c->q_indexer, c->weights, c->k_indexer};
    input list[N_INPUTS];
    list_inputs(c, list);
    for (int i = 0; i < DOUT; i++) cg_exec_read_real(probe->exec, all[i], 0, list[i].count, to[i]);
    return true;
}

bool cg_dump_case_of_model(cg_dump_case *c, const cg_config *config, int64_t layer,
                           const cg_dump_lengths *lengths, const char *checkpoint, cg_error *error) {
    if (layer < 0 || layer >= config->num_hidden_layers || config->compress_ratios[layer] != CG_RATIO_CSA)
        return refuse_layer(config, layer, error);
    *c = (cg_dump_case){.n_heads = config->num_attention_heads,
                        .head_dim = config->head_dim,
                        .index_heads = config->index_n_heads,
                        .index_dim = config->index_head_dim,
                        .ratio = CG_RATIO_CSA,
                        .window = config->sliding_window,
                        .topk = config->index_topk,
                        .softmax_scale = 1 / sqrt((double)config->head_dim),
                        .loss_coeff = config->indexer_loss_coeff};
    cg_probe probe = {0};
    bool ok = fill_lengths(c, lengths, error) && allocate(c, error) &&
              run_model(c, &probe, config, layer, checkpoint, error);
    if (ok) fill_dout(c, (uint64_t)config->seed);
    cg_probe_free(&probe);
    return ok;
}
