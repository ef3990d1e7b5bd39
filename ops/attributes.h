/* The attributes of every op, apart from those that builders take (ops/ops.h): what the kernels of all backends read. */
#ifndef CG_OPS_ATTRIBUTES_H
#define CG_OPS_ATTRIBUTES_H

#include "ops/ops.h"

typedef struct csa_attention_attr {
    int64_t window;
    double scale;
    cg_teacher teacher;
} csa_attention_attr;

typedef struct csa_compress_attr {
    int64_t ratio;
    bool overlap;
} csa_compress_attr;

typedef struct csa_teacher_at_attr {
    double scale;
    cg_teacher teacher;
} csa_teacher_at_attr;

typedef struct embedding_grad_attr {
    int64_t n_rows; /* V */
} embedding_grad_attr;

typedef struct gather_grad_attr {
    int64_t n_columns; /* C, so that x need not be kept for its shape */
} gather_grad_attr;

typedef struct grouped_outer_attr {
    bool f32_out; /* beside bf16: w is f32, as the gradient of a parameter is */
} grouped_outer_attr;

typedef struct grouped_linear_attr {
    bool transposed;
} grouped_linear_attr;

typedef struct indexer_dense_loss_attr {
    double scale, coeff;
    cg_teacher teacher;
    cg_reduction reduction;
} indexer_dense_loss_attr;

typedef struct indexer_health_attr {
    double scale;
    int64_t ratio;
} indexer_health_attr;

typedef struct indexer_kl_attr {
    cg_reduction reduction;
    double coeff;
} indexer_kl_attr;

typedef struct indexer_topk_attr {
    int64_t topk;
} indexer_topk_attr;

typedef struct kl_div_attr {
    cg_reduction reduction;
    double coeff;
} kl_div_attr;

typedef struct matmul_attr {
    bool trans_a, trans_b;
    bool f32_out; /* beside bf16: y is f32, as the gradient of a parameter is */
} matmul_attr;

typedef struct reshape_attr {
    cg_shape shape;
} reshape_attr;

typedef struct rms_norm_attr {
    double eps;
} rms_norm_attr;

typedef struct scale_attr {
    double factor;
} scale_attr;

typedef struct segment_rows_attr {
    int64_t n_rows, ratio, capacity;
} segment_rows_attr;

typedef struct softmax_attr {
    bool log;
} softmax_attr;

typedef struct sum_grad_attr {
    cg_shape shape;
} sum_grad_attr;

typedef struct swiglu_attr {
    double limit;
} swiglu_attr;

typedef struct topk_attr {
    int64_t topk;
} topk_attr;

typedef struct visible_indices_attr {
    int64_t width;
} visible_indices_attr;

#endif
