/* The indexer's teacher over a list of compressed rows: see ops/csa/csa_teacher_at.c. */
#include "ops/cuda/csa/csa_teacher.cuh"

namespace {

enum { Q, CKV, INDEX, WINDOW_LSE, SINK };
enum { WARPS = 4, THREADS = 32 * WARPS };

struct sizes {
    int64_t T, H, D, C, N;
};

template <typename S>
CG_GLOBAL void check_data_kernel(const int32_t *index, const S *sink, sizes z, cg_device_fault *fault) {
    CG_FOR(i, z.T * z.N) {
        if (index[i] < -1 || index[i] >= z.C) cg_report(fault, 1, i, index[i]);
    }
    CG_FOR(h, sink ? z.H : 0) check_sink(sink, h, fault);
}

void describe(const cg_run_args *args, const cg_device_fault *fault, cg_error *error) {
    if (fault->what == BAD_SINK) return describe_sink(fault, error);
    const int64_t C = args->in[CKV].shape.dims[0], N = args->in[INDEX].shape.dims[1];
    cg_fail(error, CG_BAD_INPUT, "index of row %lld, place %lld is %lld, expected -1 to %lld",
            (long long)(fault->place / N), (long long)(fault->place % N), (long long)fault->got[0],
            (long long)C - 1);
}

/* Top and share of every head and row: a warp each, a key per lane. */
template <typename T>
CG_GLOBAL void teacher_shares_kernel(const T *q, const T *ckv, const int32_t *index,
                                     const cg_sum_of<T> *window_lse, const cg_sum_of<T> *sink, sizes z,
                                     cg_sum_of<T> scale, double *share, cg_sum_of<T> *top) {
    typedef cg_sum_of<T> S;
    const int64_t warps = (int64_t)gridDim.x * WARPS;
    for (int64_t i = (int64_t)blockIdx.x * WARPS + threadIdx.x / CG_WARP; i < z.T * z.H; i += warps) {
        const int64_t t = i / z.H, h = i % z.H;
        const listed_keys keys = {index + t * z.N, z.N, z.C};
        const log_sum<S> all = head_log_sum(q + i * z.D, ckv, keys, z.D, scale);
        if (threadIdx.x % CG_WARP) continue;
        const double rest = window_lse ? (double)window_lse[i] : sink ? (double)sink[h] : -cg_infinity<double>;
        share[i] = teacher_share(all, rest);
        top[i] = all.top;
    }
}

template <typename T>
CG_GLOBAL void teacher_kernel(const T *q, const T *ckv, const int32_t *index, sizes z, cg_sum_of<T> scale,
                              const double *share, const cg_sum_of<T> *top, cg_sum_of<T> *teacher) {
    for (int64_t t = blockIdx.x; t < z.T; t += gridDim.x)
        teach_row(q + t * z.H * z.D, ckv, listed_keys{index + t * z.N, z.N, z.C},
                  teacher_heads<cg_sum_of<T>>(share + t * z.H, top + t * z.H, z.H), z.H, z.D, scale,
                  teacher + t * z.N);
}

size_t workspace(const cg_node *node) {
    const size_t rows = (size_t)(cg_dim(node->in[Q], 0) * cg_dim(node->in[Q], 1));
    return cg_piece(rows * sizeof(double)) +
           rows * (node->in[Q]->dtype == CG_F64 ? sizeof(double) : sizeof(float));
}

template <typename T> bool csa_teacher_at(const cg_run_args *args, cg_stream *stream) {
    typedef cg_sum_of<T> S;
    const cg_tensor *in = args->in;
    const sizes z = {.T = in[Q].shape.dims[0],
                     .H = in[Q].shape.dims[1],
                     .D = in[Q].shape.dims[2],
                     .C = in[CKV].shape.dims[0],
                     .N = in[INDEX].shape.dims[1]};
    const S scale = (S)((const csa_teacher_at_attr *)args->attr)->scale;
    const T *q = (const T *)in[Q].data, *ckv = (const T *)in[CKV].data;
    const int32_t *index = (const int32_t *)in[INDEX].data;
    double *share = (double *)args->workspace;
    S *top = (S *)((char *)args->workspace + cg_piece((size_t)(z.T * z.H) * sizeof(double)));
    return CG_LAUNCH(check_data_kernel<S>, cg_blocks(z.T * z.N + z.H, 256), 256, 0, stream, index,
                     (const S *)in[SINK].data, z, args->fault) &&
           CG_LAUNCH(teacher_shares_kernel<T>, cg_blocks(z.T * z.H, WARPS), THREADS, 0, stream, q, ckv, index,
                     (const S *)in[WINDOW_LSE].data, (const S *)in[SINK].data, z, scale, share, top) &&
           CG_LAUNCH(teacher_kernel<T>, cg_blocks(z.T, 1), THREADS, 0, stream, q, ckv, index, z, scale, share,
                     top, (S *)args->out[0].data);
}

} // namespace

extern "C" const cg_cuda_op cg_cuda_csa_teacher_at = {
    .op = "csa_teacher_at",
    .variants = {{.name = "plain",
                  .launch = {csa_teacher_at<float>, csa_teacher_at<double>, nullptr, csa_teacher_at<cg_bf16>},
                  .workspace = workspace}},
    .describe = describe,
};
