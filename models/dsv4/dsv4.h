/* The toy DeepSeek-V4 model as a graph: attention layers of three kinds (window only, CSA, HCA, by
 * compress_ratios), pre-norm residual blocks with a dense SwiGLU, language-model loss and indexer loss.
 *
 * In bf16 what the layers hand on is bf16, the residual stream and the logits too; parameters, their gradients, losses
 * and whatever ops call statistics are f32. A matrix is cast once, and its copy serves forward and backward.
 *
 * Source of the formulas: DeepSeek-V4 report (arXiv 2606.19348), sections 2.1 to 2.3; indexer loss:
 * DeepSeek-V3.2 report (arXiv 2512.02556), section 2.1, with the full attention denominator.
 */
#ifndef CG_MODELS_DSV4_H
#define CG_MODELS_DSV4_H

#include "graph/exec.h"
#include "models/dsv4/config.h"
#include "models/dsv4/objective.h"

typedef struct cg_dsv4_options {
    int64_t n_rows;       /* T */
    int64_t max_segments; /* B: cu_seqlens has B+1 entries; unused segments are empty */
    int64_t max_seqlen;   /* no segment is longer */
    cg_form form;
    bool attend_all;  /* CSA layers attend to all visible compressed rows, and the indexer loss is dense */
    bool given_topk;  /* CSA layers read their selection from an input instead of choosing, unless attend_all */
    bool with_health; /* build indexer_health for each CSA layer */
    bool with_loss;   /* build the indexer loss (when the coefficient is not 0 either) */
    bool external;    /* parameters are lent by another executor */
} cg_dsv4_options;

typedef enum cg_init { CG_INIT_NORMAL, CG_INIT_ONES, CG_INIT_ZEROS } cg_init;

typedef struct cg_dsv4_param {
    cg_value *value;
    cg_init init;
    bool decay; /* weight decay applies: matrices do, norms, sinks, biases of position and embeddings do not */
    bool indexer; /* trained by the indexer loss alone */
} cg_dsv4_param;

enum { CG_MAX_PARAMS = CG_MAX_LAYERS * 32 };

typedef struct cg_dsv4_layer {
    int64_t ratio;
    cg_value *attended;     /* [T, hidden]: what the attention half adds to the stream */
    cg_value *topk;         /* CSA: the selection [T, K] i32, an input with given_topk; NULL elsewhere */
    cg_value *lse;          /* [T, H] */
    cg_value *health;       /* [CG_HEALTH_FIELDS]; NULL unless wanted */
    cg_value *indexer_loss; /* [1], summed over rows, coefficient included; NULL when there is none */
} cg_dsv4_layer;

typedef struct cg_dsv4 {
    cg_graph *graph;
    /* inputs */
    cg_value *tokens, *targets;     /* [T] i32; target -1: none */
    cg_value *cu_seqlens, *seqlens; /* [B+1], [B] i32 */
    cg_value *lm_scale,
        *row_scale; /* [1]: 1 / targets and 1 / real rows of the whole step, all micro-batches */
    /* outputs */
    cg_value *logits;       /* [T, V] */
    cg_value *lm_loss;      /* [1]: this micro-batch's share of the mean over all targets of the step, nats */
    cg_value *indexer_loss; /* [1]: likewise over real rows, summed over CSA layers, times the coefficient;
                               NULL: none */
    cg_dsv4_layer layers[CG_MAX_LAYERS];
    int n_layers;
    cg_dsv4_param params[CG_MAX_PARAMS];
    int n_params;
} cg_dsv4;

/* Build the forward graph. The config must have passed cg_config_check. On failure the sentence is in
 * cg_graph_error(graph). `model` is large: allocate it. */
bool cg_dsv4_build(cg_graph *graph, const cg_config *config, const cg_dsv4_options *options, cg_dsv4 *model);

/* The name of a parameter in checkpoints: "layers.0.attn.wq_a.weight", as in DeepSeek's release. */
const char *cg_param_name(const cg_value *param, char *text, size_t text_bytes);

/* Write start values: normal(0, initializer_range) by (seed, name), ones or zeros. */
void cg_param_init(const cg_dsv4_param *param, const cg_config *config, cg_exec *exec);

#endif
