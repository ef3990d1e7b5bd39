/* Scores of the compressed rows that the indexer chose, and the gradients: see ops/indexer_scores_at.c. */
#include "ops/cuda/csa_invert.cuh"
#include "ops/cuda/indexer.cuh"

namespace {

enum {
    Q,
    W,
    KEYS,
    TOPK,
    FORWARD_INPUTS,
    DSCORES = 0,
    GRAD_INPUTS
}; /* the gradient takes dscores before them */
enum { BAD_INDEX = 1 };

struct sizes {
    int64_t T, Hi, Di, C, K;
};

/* in: of q. */
sizes sizes_of(const cg_tensor *in) {
    const int64_t *q = in[Q].shape.dims;
    return {q[0], q[1], q[2], in[KEYS].shape.dims[0], in[TOPK].shape.dims[1]};
}

sizes sizes_of(cg_value *const *in) {
    return {cg_dim(in[Q], 0), cg_dim(in[Q], 1), cg_dim(in[Q], 2), cg_dim(in[KEYS], 0), cg_dim(in[TOPK], 1)};
}

void describe(const cg_run_args *args, const cg_device_fault *fault, cg_error *error) {
    const sizes z = sizes_of(args->in + (args->n_in > FORWARD_INPUTS));
    describe_listed("topk", z.K, z.C, fault, error);
}

/* ---- plain ---- */

template <typename T>
CG_GLOBAL void plain_kernel(const T *q, const T *w, const T *k, const int32_t *topk, T *scores, sizes z,
                            cg_device_fault *fault) {
    CG_FOR(i, z.T * z.K) {
        const int64_t c = listed(topk, i, z.C, BAD_INDEX, fault), t = i / z.K;
        cg_sum_of<T> score = -cg_infinity<cg_sum_of<T>>;
        if (c >= 0) score = index_score(q + t * z.Hi * z.Di, w + t * z.Hi, k + c * z.Di, z.Hi, z.Di);
        scores[i] = cg_down<T>(score);
    }
}

template <typename T> bool plain(const cg_run_args *args, cg_stream *stream) {
    const cg_tensor *in = args->in;
    const sizes z = sizes_of(in);
    return CG_LAUNCH(plain_kernel<T>, cg_blocks(z.T * z.K, 128), 128, 0, stream, (const T *)in[Q].data,
                     (const T *)in[W].data, (const T *)in[KEYS].data, (const int32_t *)in[TOPK].data,
                     (T *)args->out[0].data, z, args->fault);
}

enum { THREADS = 64 };

/* dq and dw. A block takes a head of a row at a time, and the slots in tiles: first a slot per thread, then a channel.
 */
template <typename T>
CG_GLOBAL void plain_queries_kernel(const T *ds, const T *q, const T *w, const T *k, const int32_t *topk, T *dq,
                                    T *dw, sizes z, cg_device_fault *fault) {
    typedef cg_sum_of<T> S;
    CG_SHARED(S[THREADS], factor); /* of each key of a tile in dq */
    CG_SHARED(int64_t[THREADS], key);
    for (int64_t i = blockIdx.x; i < z.T * z.Hi; i += gridDim.x) {
        const int64_t t = i / z.Hi, h = i % z.Hi;
        const S weight = cg_up(w[i]);
        for (int64_t d0 = 0; d0 == 0 || d0 < z.Di; d0 += THREADS) {
            const int64_t d = d0 + threadIdx.x;
            S dw_mine = 0, dq_mine = 0;
            for (int64_t j0 = 0; j0 < z.K; j0 += THREADS) {
                const int64_t j = j0 + threadIdx.x;
                key[threadIdx.x] = -1;
                if (j < z.K) {
                    const int64_t slot = t * z.K + j,
                                  c = listed(topk, slot, z.C, BAD_INDEX, h ? nullptr : fault);
                    const S dot = c < 0 ? 0 : index_dot(q + i * z.Di, k + c * z.Di, z.Di);
                    if (dot > 0) {
                        key[threadIdx.x] = c;
                        factor[threadIdx.x] = weight * cg_up(ds[slot]);
                        dw_mine += cg_up(ds[slot]) * dot;
                    }
                }
                __syncthreads();
                for (int n = 0; n < THREADS && d < z.Di; n++)
                    if (key[n] >= 0) dq_mine += factor[n] * cg_up(k[key[n] * z.Di + d]);
                __syncthreads();
            }
            if (d < z.Di) dq[i * z.Di + d] = cg_down<T>(dq_mine);
            dw_mine = cg_block_sum(dw_mine);
            if (d == 0) dw[i] = cg_down<T>(dw_mine);
        }
    }
}

/* dk. A block takes a key at a time, and the heads of the rows that chose it in tiles: first a head per thread, then a
 * channel. */
template <typename T>
CG_GLOBAL void plain_keys_kernel(const T *ds, const T *q, const T *w, const T *k, const int32_t *topk, T *dk,
                                 sizes z, inversion chosen) {
    typedef cg_sum_of<T> S;
    CG_SHARED(S[THREADS], factor); /* of each head of a tile */
    for (int64_t c = blockIdx.x; c < z.C; c += gridDim.x)
        for (int64_t d0 = 0; d0 < z.Di; d0 += THREADS) {
            const int64_t d = d0 + threadIdx.x;
            S sum = 0;
            for (int64_t p = chosen.start[c]; p < chosen.start[c + 1]; p++) {
                const int64_t t = chosen.reader[p];
                if (p > chosen.start[c] && t == chosen.reader[p - 1]) continue; /* all of its slots are done */
                S ds_row = 0;
                for (int64_t i = t * z.K + threadIdx.x; i < (t + 1) * z.K; i += THREADS)
                    if (topk[i] == c) ds_row += cg_up(ds[i]);
                ds_row = cg_block_sum(ds_row);
                for (int64_t h0 = 0; h0 < z.Hi; h0 += THREADS) {
                    const int64_t h = h0 + threadIdx.x, head = t * z.Hi + h;
                    factor[threadIdx.x] = 0;
                    if (h < z.Hi && index_dot(q + head * z.Di, k + c * z.Di, z.Di) > 0)
                        factor[threadIdx.x] = ds_row * cg_up(w[head]);
                    __syncthreads();
                    for (int n = 0; n < THREADS && h0 + n < z.Hi && d < z.Di; n++)
                        if (factor[n] != 0) sum += factor[n] * cg_up(q[(t * z.Hi + h0 + n) * z.Di + d]);
                    __syncthreads();
                }
            }
            if (d < z.Di) dk[c * z.Di + d] = cg_down<T>(sum);
        }
}

size_t plain_grad_workspace(const cg_node *node) {
    const sizes z = sizes_of(node->in + GRAD_INPUTS);
    carver from = {};
    inversion_in(from, z.T, z.K, z.C);
    return from.used;
}

template <typename T> bool plain_grad(const cg_run_args *args, cg_stream *stream) {
    const cg_tensor *in = args->in + GRAD_INPUTS;
    const sizes z = sizes_of(in);
    const T *ds = (const T *)args->in[DSCORES].data, *q = (const T *)in[Q].data, *w = (const T *)in[W].data,
            *k = (const T *)in[KEYS].data;
    const int32_t *topk = (const int32_t *)in[TOPK].data;
    carver from = {(char *)args->workspace, 0};
    const inversion chosen = inversion_in(from, z.T, z.K, z.C);
    return CG_LAUNCH(plain_queries_kernel<T>, cg_blocks(z.T * z.Hi, 1), THREADS, 0, stream, ds, q, w, k, topk,
                     (T *)args->out[0].data, (T *)args->out[1].data, z, args->fault) &&
           invert(args, stream, topk, chosen) &&
           CG_LAUNCH(plain_keys_kernel<T>, cg_blocks(z.C, 1), THREADS, 0, stream, ds, q, w, k, topk,
                     (T *)args->out[2].data, z, chosen);
}

} // namespace

extern "C" const cg_cuda_op cg_cuda_indexer_scores_at = {
    .op = "indexer_scores_at",
    .variants = {{.name = "plain", .launch = {plain<float>, plain<double>, nullptr, plain<cg_bf16>}}},
    .describe = describe,
};

extern "C" const cg_cuda_op cg_cuda_indexer_scores_at_grad = {
    .op = "indexer_scores_at_grad",
    .variants = {{.name = "plain",
                  .launch = {plain_grad<float>, plain_grad<double>, nullptr, plain_grad<cg_bf16>},
                  .workspace = plain_grad_workspace}},
    .describe = describe,
};
