/* What the kernels of csa_attention and its gradient work on: see ops/csa/csa_attention.c. */
#ifndef CG_OPS_CUDA_CSA_ATTENTION_CUH
#define CG_OPS_CUDA_CSA_ATTENTION_CUH

#include "ops/cuda/csa/csa_teacher.cuh"

namespace {

enum { Q, KV, CKV, SINK, TOPK, ROWS, LSE, DOUT }; /* inputs, the last two of the gradient */

/* What a call works on; arguments of every kernel. */
template <typename T> struct attention {
    int64_t T_, H, D, C, K, W;
    const int32_t *rows, *topk;
    cg_sum_of<T> scale;
    const T *q, *kv, *ckv;
    const cg_sum_of<T> *sink;
};

template <typename T> attention<T> attention_of(const cg_run_args *args) {
    const csa_attention_attr *attr = (const csa_attention_attr *)args->attr;
    const cg_tensor *in = args->in;
    return {.T_ = in[Q].shape.dims[0],
            .H = in[Q].shape.dims[1],
            .D = in[Q].shape.dims[2],
            .C = in[CKV].data ? in[CKV].shape.dims[0] : 0,
            .K = in[TOPK].data ? in[TOPK].shape.dims[1] : 0,
            .W = attr->window,
            .rows = (const int32_t *)in[ROWS].data,
            .topk = (const int32_t *)in[TOPK].data,
            .scale = (cg_sum_of<T>)attr->scale,
            .q = (const T *)in[Q].data,
            .kv = (const T *)in[KV].data,
            .ckv = (const T *)in[CKV].data,
            .sink = (const cg_sum_of<T> *)in[SINK].data};
}

/* The first of the kv rows that row t sees up to itself; t + 1 when it sees none. Inside the tensor whatever the facts
 * say. */
CG_DEVICE int64_t window_low(const int32_t *rows, int64_t t, int64_t W) {
    const int32_t *row = rows + t * CG_ROW_FIELDS;
    if (row[CG_ROW_POSITION] < 0) return t + 1;
    const int64_t low = cg_max((int64_t)row[CG_ROW_START], t - W + 1);
    return low < 0 ? 0 : low > t ? t + 1 : low;
}

} // namespace

#endif
