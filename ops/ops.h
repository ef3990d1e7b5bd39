/* Builders of all ops. Shapes use the letters of core/base/tensor.h; "real" is f32, f64 or bf16, the same for all real
 * inputs of an op but for statistics, which are f32 beside bf16 (graph/op.h); indices are i32. Each op's file holds its formula, what it saves, and what it refuses.
 *
 * Packed rows. All sequences are packed: token rows [T, ...], segments (documents) laid end to end at physical
 * offsets cu_seqlens [B+1], each with a real length seqlens [B]. A batch of equal sequences is the packed batch
 * with equal segments. Rows of a segment behind its real length are padding: they attend to their own window,
 * see no compressed row, count nowhere, and no real row sees them. Rows behind the last segment see nothing,
 * the sink apart: output 0. segment_rows turns the offsets into per-row facts once; every other op reads those.
 *
 * Compressed rows are packed the same way, floor(physical length / ratio) of each segment, with a static
 * capacity C. Index lists (topk) hold rows of that packed array ("global"), -1 for none, at any place.
 */
#ifndef CG_OPS_OPS_H
#define CG_OPS_OPS_H

#include "graph/op.h"

extern const cg_op_set cg_all_ops;

/* ---- elementwise and shape ------------------------------------------------------------------------- */

cg_value *cg_add(cg_graph *graph, cg_value *a, cg_value *b);     /* same shape */
cg_value *cg_mul(cg_graph *graph, cg_value *a, cg_value *b);     /* same shape, elementwise */
cg_value *cg_scale(cg_graph *graph, cg_value *x, double factor); /* factor * x */
cg_value *cg_relu(cg_graph *graph, cg_value *x);                 /* max(x, 0); derivative 0 at 0 */
cg_value *cg_sum(cg_graph *graph, cg_value *x);                  /* any shape -> [1], fixed order */
cg_value *cg_zeros(cg_graph *graph, cg_dtype dtype, cg_shape shape);
/* x in another dtype, f32 or bf16: rounded, or the same number. x itself when it has that dtype, and f64 stays. */
cg_value *cg_cast(cg_graph *graph, cg_value *x, cg_dtype dtype);
cg_value *cg_reshape(cg_graph *graph, cg_value *x, cg_shape shape); /* no bytes, no kernel */
cg_value *cg_detach(cg_graph *graph, cg_value *x);                  /* the same bytes; gradients stop here */

/* ---- dense layers ---------------------------------------------------------------------------------- */

/* op(a) op(b) for a [m,k] (or [k,m] when trans_a) and b [k,n] (or [n,k] when trans_b) -> [m,n]. */
cg_value *cg_matmul(cg_graph *graph, cg_value *a, cg_value *b, bool trans_a, bool trans_b);

/* x [N, in] with w [out, in] -> x w^T [N, out]. */
cg_value *cg_linear(cg_graph *graph, cg_value *x, cg_value *w);

/* One matrix per group: x [T, G, in], w [G, out, in] -> [T, G, out], y[t,g] = w[g] x[t,g] (DSV4 output
 * projection). */
cg_value *cg_grouped_linear(cg_graph *graph, cg_value *x, cg_value *w);

/* x / sqrt(mean(x^2) + eps) over the last axis, times weight [last] unless weight is NULL. */
cg_value *cg_rms_norm(cg_graph *graph, cg_value *x, cg_value *weight, double eps);

/* silu(min(gate, limit)) * clamp(up, -limit, limit); limit <= 0: no clamp. Gradient 0 outside the clamp. */
cg_value *cg_swiglu(cg_graph *graph, cg_value *gate, cg_value *up, double limit);

/* Rows of table [V, D] at tokens [T] -> [T, D]. A token outside 0..V-1 is an error with its place; -1 gives
 * zeros and gets no gradient (padding). */
cg_value *cg_embedding(cg_graph *graph, cg_value *table, cg_value *tokens);

/* Rotary embedding of the last n_rotary channels of x [N, D] or [N, heads, D]: neighbouring pairs (2i, 2i+1)
 * turn by positions[n] * f_i. f_i = base^(-2i/n_rotary), blended by YaRN when yarn_factor > 1 (dsv4 spec: 2.1).
 * Other channels are copied bit for bit. inverse turns back. A negative position (no row) turns by 0. */
typedef struct cg_rope_attr {
    int64_t n_rotary; /* even, at most D */
    double base;
    double yarn_factor; /* <= 1: none */
    double yarn_original_length, yarn_beta_fast, yarn_beta_slow;
    bool inverse;
} cg_rope_attr;
cg_value *cg_rope(cg_graph *graph, cg_value *x, cg_value *positions, const cg_rope_attr *attr);

/* Frequency f_i of the rotary pair i. */
double cg_rope_frequency(const cg_rope_attr *attr, int64_t i);

/* Softmax cross-entropy summed over the rows whose target is not -1: logits [T, V], targets [T] -> loss [1] in
 * nats; output 1 is lse [T]. */
cg_value *cg_cross_entropy(cg_graph *graph, cg_value *logits, cg_value *targets);

/* Index of the largest entry of each row of x [T, V] -> [T] i32; ties to the lower index; NaN is an error. */
cg_value *cg_argmax(cg_graph *graph, cg_value *x);

/* ---- packed rows ----------------------------------------------------------------------------------- */

/* Columns of `rows` [T, CG_ROW_FIELDS]. */
enum {
    CG_ROW_START,      /* first token row of the segment */
    CG_ROW_POSITION,   /* position inside it, from 0; -1: behind the last segment */
    CG_ROW_COMPRESSED, /* first compressed row of the segment */
    CG_ROW_VISIBLE,    /* compressed rows it sees: START_OF_C .. +VISIBLE-1; floor((position+1)/ratio), 0 for
                          padding */
    CG_ROW_REAL,       /* 1: a real token; 0: padding or behind the last segment */
    CG_ROW_FIELDS
};

typedef struct cg_rows {
    cg_value *rows;      /* [T, CG_ROW_FIELDS] i32 */
    cg_value *positions; /* [T] i32, -1 behind the last segment */
    cg_value
        *entries; /* [C] i32: first token row of the group that a compressed row pools; -1: unused capacity */
    cg_value *entry_positions; /* [C] i32: position of that token (s * ratio); -1 for unused capacity */
    cg_value *cu_compressed;   /* [B+1] i32 offsets of the compressed rows */
} cg_rows;

/* cu_seqlens [B+1], seqlens [B] or NULL (all rows real). n_rows = T; capacity = C, at least the compressed rows
 * there will be (n_rows / ratio always suffices). ratio 0: no compression, capacity 0. Running fails on a first
 * offset other than 0, a decreasing one, a last one above T, or a real length outside 0..physical. */
cg_rows cg_segment_rows(cg_graph *graph, cg_value *cu_seqlens, cg_value *seqlens, int64_t n_rows, int64_t ratio,
                        int64_t capacity);

/* All visible compressed rows as an index list: rows -> [T, width] i32, rising, then -1. A row that sees more
 * than width is an error. With this list sparse attention is dense attention. */
cg_value *cg_visible_indices(cg_graph *graph, cg_value *rows, int64_t width);

/* ---- CSA ------------------------------------------------------------------------------------------- */

/* Gated pooling: kv, gate [T, c*d], ape [ratio, c*d], entries [C], entry_positions [C] -> [C, d]. c is 2 with
 * overlap (first half of the columns: previous group, second half: own group), else 1. Unused capacity gives 0.
 */
cg_value *cg_csa_compress(cg_graph *graph, cg_value *kv, cg_value *gate, cg_value *ape, cg_value *entries,
                          cg_value *entry_positions, int64_t ratio, bool overlap);

/* What stands beside the compressed keys in each head's denominator of the teacher. */
typedef enum cg_teacher {
    CG_TEACHER_NONE,      /* no teacher wanted */
    CG_TEACHER_FULL,      /* window and sink */
    CG_TEACHER_SINK,      /* the sink */
    CG_TEACHER_COMPRESSED /* nothing */
} cg_teacher;

typedef struct cg_attention {
    cg_value *out;        /* [T, H, D] */
    cg_value *lse;        /* [T, H], natural log, window + selected + sink; constant */
    cg_value *window_lse; /* [T, H], window + sink; constant */
    cg_value *teacher; /* [T, K], sums to 1 over the selected rows; 0 where topk is -1; constant. NULL: none */
} cg_attention;

/* One softmax per head over window, selected compressed rows and sink. q [T,H,D], kv [T,D], ckv [C,D] or NULL,
 * sink [H], topk [T,K] or NULL (with ckv NULL), rows. scale multiplies q.k. A selected row outside what the
 * token sees is an error with its place. */
cg_attention cg_csa_attention(cg_graph *graph, cg_value *q, cg_value *kv, cg_value *ckv, cg_value *sink,
                              cg_value *topk, cg_value *rows, int64_t window, double scale, cg_teacher teacher);

/* The teacher over a given support: q [T,H,D], ckv [C,D], index [T,N], window_lse [T,H] (FULL) or NULL, sink
 * [H] (SINK) or NULL -> [T,N]; the denominator holds the keys of the list and, per mode, window + sink, the
 * sink, or nothing. For the dense contract: index = visible_indices. A constant: no gradient. */
cg_value *cg_csa_teacher_at(cg_graph *graph, cg_value *q, cg_value *ckv, cg_value *index, cg_value *window_lse,
                            cg_value *sink, double scale, cg_teacher teacher);

/* Orthonormal Hadamard rotation of the last axis (a power of two), Sylvester order. Its own inverse and
 * gradient. */
cg_value *cg_hadamard(cg_graph *graph, cg_value *x);

/* ---- the indexer: first-class, streaming ------------------------------------------------------------ */

/* The topk visible rows of largest score, falling, ties to the lower index, then -1: q [T,Hi,Di], w [T,Hi]
 * (every scale multiplied in), k [C,Di], rows -> [T, topk] i32. score = sum_h w relu(q.k). A choice; NaN is an
 * error. */
cg_value *cg_indexer_topk(cg_graph *graph, cg_value *q, cg_value *w, cg_value *k, cg_value *rows, int64_t topk);

/* Scores at given rows: topk [T,K] -> [T,K], -inf where topk is -1. */
cg_value *cg_indexer_scores_at(cg_graph *graph, cg_value *q, cg_value *w, cg_value *k, cg_value *topk);

typedef enum cg_reduction {
    CG_REDUCE_MEAN_REAL,     /* divide by the real rows; those that see nothing count, padding does not */
    CG_REDUCE_MEAN_PHYSICAL, /* divide by T */
    CG_REDUCE_SUM
} cg_reduction;

/* coeff * KL(teacher || softmax(scores)) over the rows' lists, reduced: scores [T,K] (-inf where absent),
 * teacher [T,K], rows -> loss [1]; output 1 is kl [T] per row, unscaled (constant). An empty row adds 0. */
cg_value *cg_indexer_kl(cg_graph *graph, cg_value *scores, cg_value *teacher, cg_value *rows,
                        cg_reduction reduction, double coeff);

/* The dense-support loss, streamed over key tiles: KL over all visible rows, whose denominators hold all
 * visible rows too. q_index [T,Hi,Di], w [T,Hi], k_index [C,Di]: differentiable; q [T,H,D], ckv [C,D],
 * window_lse [T,H] or NULL, sink [H] or NULL as in csa_teacher_at: constants. -> loss [1], output 1: kl [T]. */
cg_value *cg_indexer_dense_loss(cg_graph *graph, cg_value *q_index, cg_value *w, cg_value *k_index, cg_value *q,
                                cg_value *ckv, cg_value *window_lse, cg_value *sink, cg_value *rows,
                                double scale, cg_teacher teacher, cg_reduction reduction, double coeff);

/* ---- the same objective spelled out, so that ordinary autograd has something to save ---------------- */

cg_value *cg_indexer_head_scores(cg_graph *graph, cg_value *q,
                                 cg_value *k); /* [T,Hi,Di], [C,Di] -> q.k [T,Hi,C] */
cg_value *cg_indexer_head_sum(cg_graph *graph, cg_value *x,
                              cg_value *w); /* [T,Hi,C], [T,Hi] -> sum_h w x [T,C] */
cg_value *cg_topk(cg_graph *graph, cg_value *scores, cg_value *rows,
                  int64_t topk);                                    /* [T,C] -> [T,topk], as indexer_topk */
cg_value *cg_gather(cg_graph *graph, cg_value *x, cg_value *index); /* [T,C], [T,K] -> [T,K], -inf at -1 */

/* Softmax, or its logarithm, over the last axis of x [T,N] where index [T,N] >= 0 (NULL: everywhere); 0
 * elsewhere, and 0 for a row where nothing is left. */
cg_value *cg_softmax(cg_graph *graph, cg_value *x, cg_value *index, bool log);

/* coeff * sum_j target (log target - log_p), reduced like indexer_kl: log_p, target [T,K], rows -> loss [1];
 * output 1: kl [T]. Where target is 0 the term is 0. */
cg_value *cg_kl_div(cg_graph *graph, cg_value *log_p, cg_value *target, cg_value *rows, cg_reduction reduction,
                    double coeff);

/* ---- how good an indexer is ------------------------------------------------------------------------- */

/* Sums over the rows that see more compressed rows than K, where selecting matters (entry CG_HEALTH_ROWS counts
 * them). */
enum {
    CG_HEALTH_ROWS,
    CG_HEALTH_KL_UNIFORM,  /* KL of the sparse teacher against uniform over the selected set, nats */
    CG_HEALTH_KL,          /* KL of the sparse teacher against the indexer's softmax over it */
    CG_HEALTH_RECALL,      /* share of the dense teacher's own top K that was selected */
    CG_HEALTH_MASS,        /* the dense teacher's mass on the selected rows */
    CG_HEALTH_TOP1_MISSED, /* 1 when the dense teacher's largest row was not selected */
    CG_HEALTH_NEGATIVE,    /* share of negative head weights */
    CG_HEALTH_DISTANCE,    /* mean distance in tokens from the row to the first token of its selected groups */
    CG_HEALTH_FIELDS
};

/* scores [T,K] of the selected rows, teacher [T,K] (sparse), topk [T,K], w [T,Hi], q, ckv, window_lse, rows;
 * ratio for distances -> [CG_HEALTH_FIELDS]. */
cg_value *cg_indexer_health(cg_graph *graph, cg_value *scores, cg_value *teacher, cg_value *topk, cg_value *w,
                            cg_value *q, cg_value *ckv, cg_value *window_lse, cg_value *rows, double scale,
                            int64_t ratio);

/* ---- optimizer: nodes that change leaves, built in the pass CG_OPTIMIZE (accumulate: CG_BACKWARD) ---------
 */

/* sum = keep[0] == 0 ? grad : sum + grad, in place. sum: a CG_LEAF_GRADIENT; keep: an input [1] of the same
 * dtype. */
void cg_accumulate(cg_graph *graph, cg_value *sum, cg_value *grad, cg_value *keep);

/* sqrt of the sum of all squares -> [1]. */
cg_value *cg_global_norm(cg_graph *graph, cg_value *const *grads, int n);

typedef struct cg_adamw_attr {
    double beta1, beta2, eps, weight_decay;
    double max_norm; /* gradients are scaled by min(1, max_norm / norm); <= 0: no clipping */
} cg_adamw_attr;

/* One AdamW step in place (Loshchilov and Hutter 2019, algorithm 2, decay times lr): param, m, v leaves; norm
 * [1] from global_norm; schedule [2] = {lr, step counted from 1}. */
void cg_adamw(cg_graph *graph, cg_value *param, cg_value *m, cg_value *v, cg_value *grad, cg_value *norm,
              cg_value *schedule, const cg_adamw_attr *attr);

#endif
