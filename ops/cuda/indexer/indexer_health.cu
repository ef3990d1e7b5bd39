/* How good an indexer is: see ops/indexer/indexer_health.c. A block takes a row at a time and holds its dense teacher in the
 * workspace; it adds up its rows, and the blocks are added up in order. */
#include "ops/cuda/csa/csa_teacher.cuh"
#include "ops/cuda/indexer/indexer.cuh"

namespace {

enum { SCORES, TEACHER_AT, TOPK, W, Q, CKV, WINDOW_LSE, ROWS };
enum { BAD_ROW = 1, BAD_INDEX };
constexpr int WARPS = 4, THREADS = WARPS * CG_WARP, MOST_BLOCKS = 256;

struct sizes {
    int64_t T, K, Hi, H, D, C, ratio, blocks;
};

sizes sizes_of(const cg_shape *scores, const cg_shape *w, const cg_shape *q, const cg_shape *ckv,
               const void *attr) {
    const int64_t T = scores->dims[0], blocks = cg_blocks(T, 1);
    return {T,
            scores->dims[1],
            w->dims[1],
            q->dims[1],
            q->dims[2],
            ckv->dims[0],
            ((const indexer_health_attr *)attr)->ratio,
            blocks < MOST_BLOCKS ? blocks : (int64_t)MOST_BLOCKS};
}

void describe(const cg_run_args *args, const cg_device_fault *fault, cg_error *error) {
    const long long K = args->in[TOPK].shape.dims[1], row = fault->what == BAD_ROW ? 0 : fault->place / K;
    if (fault->what == BAD_ROW)
        describe_seen(fault, error);
    else
        cg_fail(error, CG_BAD_INPUT, "row %lld: topk[%lld] is %lld, but the row sees %lld to %lld", row,
                fault->place % K, (long long)fault->got[0], (long long)fault->got[1], (long long)fault->got[2]);
}

template <typename T> struct inputs {
    const cg_sum_of<T> *scores, *teacher;
    const int32_t *topk;
    const T *w, *q, *ckv;
    const cg_sum_of<T> *window_lse;
    const int32_t *rows;
};

/* Scratch of all blocks, then of one. */
template <typename T> struct scratch {
    double *sums;        /* [blocks, CG_HEALTH_FIELDS] */
    double *share;       /* [blocks, H] */
    cg_sum_of<T> *top;   /* [blocks, H] */
    cg_sum_of<T> *dense; /* [blocks, C] */
};

/* The pieces of a workspace; returns the bytes of all. */
template <typename T> size_t carve(const sizes &z, void *workspace, scratch<T> *all) {
    const size_t blocks = (size_t)z.blocks, sums = cg_piece(blocks * CG_HEALTH_FIELDS * sizeof(double)),
                 shares = cg_piece(blocks * (size_t)z.H * sizeof(double)),
                 tops = cg_piece(blocks * (size_t)z.H * sizeof(cg_sum_of<T>));
    char *at = (char *)workspace;
    if (all)
        *all = {(double *)at, (double *)(at + sums), (cg_sum_of<T> *)(at + sums + shares),
                (cg_sum_of<T> *)(at + sums + shares + tops)};
    return sums + shares + tops + blocks * (size_t)z.C * sizeof(cg_sum_of<T>);
}

/* Slot j of a row as a place among what it sees; -1: none, or not seen, which is reported. */
CG_DEVICE int64_t seen_place(const int32_t *topk, int64_t i, seen_rows seen, cg_device_fault *fault) {
    const int64_t c = topk[i];
    if (c >= seen.first && c < seen.first + seen.n) return c - seen.first;
    if (c != -1) cg_report(fault, BAD_INDEX, i, c, seen.first, seen.first + seen.n - 1);
    return -1;
}

/* Shares and tops of the heads of row t, a head per warp. */
template <typename T>
CG_DEVICE void share_heads(const inputs<T> &in, const sizes &z, int64_t t, key_range keys, cg_sum_of<T> scale,
                           const scratch<T> &own) {
    for (int64_t h = threadIdx.x / CG_WARP; h < z.H; h += WARPS) {
        const log_sum<cg_sum_of<T>> all = head_log_sum(in.q + (t * z.H + h) * z.D, in.ckv, keys, z.D, scale);
        if (threadIdx.x % CG_WARP) continue;
        own.share[h] = teacher_share(all, (double)in.window_lse[t * z.H + h]);
        own.top[h] = all.top;
    }
}

/* KL of the listed teacher against the softmax of the listed scores, by the whole block. */
template <typename S> CG_DEVICE double row_kl(const S *scores, const S *teacher, int64_t K) {
    S top = -cg_infinity<S>, sum = 0, kl = 0;
    for (int64_t j = threadIdx.x; j < K; j += THREADS) top = cg_larger()(top, scores[j]);
    top = cg_block_max(top);
    if (top == -cg_infinity<S>) return 0;
    for (int64_t j = threadIdx.x; j < K; j += THREADS) sum += cg_exp(scores[j] - top);
    const S log_sum_exp = cg_log(cg_block_sum(sum));
    for (int64_t j = threadIdx.x; j < K; j += THREADS)
        if (teacher[j] != 0) kl += teacher[j] * (cg_log(teacher[j]) - (scores[j] - top - log_sum_exp));
    return (double)cg_block_sum(kl);
}

/* One row's share of the sums, by the whole block; thread 0 adds it. */
template <typename T>
CG_DEVICE void add_row(const inputs<T> &in, const sizes &z, int64_t t, seen_rows seen,
                       const cg_sum_of<T> *dense, double *sums, cg_device_fault *fault) {
    const int32_t *list = in.topk + t * z.K;
    const int64_t position = in.rows[t * CG_ROW_FIELDS + CG_ROW_POSITION];
    double mass = 0, distance = 0, entropy = 0;
    int64_t chosen = 0, found = 0, top_found = 0, negative = 0;
    for (int64_t j = threadIdx.x; j < z.K; j += THREADS) {
        const double p = (double)in.teacher[t * z.K + j];
        if (p != 0) entropy += p * log(p);
        const int64_t place = seen_place(in.topk, t * z.K + j, seen, fault);
        if (place < 0) continue;
        chosen++;
        mass += (double)dense[place];
        distance += (double)(position - place * z.ratio);
        bool again = false; /* a row that stands in the list twice is found once */
        for (int64_t i = 0; i < j; i++) again |= list[i] == list[j];
        int64_t better = 0;
        for (int64_t i = 0; i < seen.n; i++)
            better += dense[i] > dense[place] || (dense[i] == dense[place] && i < place);
        found += !again && better < z.K;
        top_found += better == 0;
    }
    for (int64_t h = threadIdx.x; h < z.Hi; h += THREADS) negative += cg_up(in.w[t * z.Hi + h]) < 0;
    mass = cg_block_sum(mass);
    distance = cg_block_sum(distance);
    entropy = cg_block_sum(entropy);
    chosen = cg_block_sum(chosen);
    found = cg_block_sum(found);
    top_found = cg_block_sum(top_found);
    negative = cg_block_sum(negative);
    const double kl = row_kl(in.scores + t * z.K, in.teacher + t * z.K, z.K);
    if (threadIdx.x) return;
    sums[CG_HEALTH_ROWS] += 1;
    sums[CG_HEALTH_MASS] += mass;
    sums[CG_HEALTH_TOP1_MISSED] += top_found == 0;
    if (z.Hi > 0) sums[CG_HEALTH_NEGATIVE] += (double)negative / (double)z.Hi;
    if (z.K > 0) sums[CG_HEALTH_RECALL] += (double)found / (double)z.K;
    if (chosen == 0) return;
    sums[CG_HEALTH_DISTANCE] += distance / (double)chosen;
    sums[CG_HEALTH_KL_UNIFORM] += entropy + log((double)chosen);
    sums[CG_HEALTH_KL] += kl;
}

template <typename T>
CG_GLOBAL void health_kernel(inputs<T> in, sizes z, cg_sum_of<T> scale, scratch<T> all,
                             cg_device_fault *fault) {
    const int64_t b = blockIdx.x;
    const scratch<T> own = {all.sums + b * CG_HEALTH_FIELDS, all.share + b * z.H, all.top + b * z.H,
                            all.dense + b * z.C};
    if (threadIdx.x == 0)
        for (int field = 0; field < CG_HEALTH_FIELDS; field++) own.sums[field] = 0;
    for (int64_t t = blockIdx.x; t < z.T; t += gridDim.x) {
        const seen_rows seen = seen_of(in.rows, t, z.C, BAD_ROW, threadIdx.x == 0 ? fault : nullptr);
        if (seen.n <= z.K || !in.rows[t * CG_ROW_FIELDS + CG_ROW_REAL]) continue;
        const key_range keys = {seen.first, seen.n};
        share_heads(in, z, t, keys, scale, own);
        __syncthreads();
        const teacher_heads<cg_sum_of<T>> heads(own.share, own.top, z.H);
        teach_row(in.q + t * z.H * z.D, in.ckv, keys, heads, z.H, z.D, scale, own.dense);
        __syncthreads();
        add_row(in, z, t, seen, own.dense, own.sums, fault);
        __syncthreads();
    }
}

template <typename S> CG_GLOBAL void health_sum_kernel(const double *sums, int64_t blocks, S *health) {
    CG_FOR(field, CG_HEALTH_FIELDS) {
        double sum = 0;
        for (int64_t b = 0; b < blocks; b++) sum += sums[b * CG_HEALTH_FIELDS + field];
        health[field] = (S)sum;
    }
}

size_t workspace(const cg_node *node) {
    const sizes z = sizes_of(&node->in[SCORES]->shape, &node->in[W]->shape, &node->in[Q]->shape,
                             &node->in[CKV]->shape, node->attr);
    return node->in[Q]->dtype == CG_F64 ? carve<double>(z, nullptr, nullptr)
                                        : carve<float>(z, nullptr, nullptr);
}

template <typename T> bool health(const cg_run_args *args, cg_stream *stream) {
    const cg_tensor *in = args->in;
    const sizes z = sizes_of(&in[SCORES].shape, &in[W].shape, &in[Q].shape, &in[CKV].shape, args->attr);
    typedef cg_sum_of<T> S;
    const inputs<T> data = {(const S *)in[SCORES].data,     (const S *)in[TEACHER_AT].data,
                            (const int32_t *)in[TOPK].data, (const T *)in[W].data,
                            (const T *)in[Q].data,          (const T *)in[CKV].data,
                            (const S *)in[WINDOW_LSE].data, (const int32_t *)in[ROWS].data};
    scratch<T> all;
    carve(z, args->workspace, &all);
    return CG_LAUNCH(health_kernel<T>, z.blocks, THREADS, 0, stream, data, z,
                     (S)((const indexer_health_attr *)args->attr)->scale, all, args->fault) &&
           CG_LAUNCH(health_sum_kernel<S>, 1, CG_WARP, 0, stream, all.sums, z.blocks, (S *)args->out[0].data);
}

} // namespace

extern "C" const cg_cuda_op cg_cuda_indexer_health = {
    .op = "indexer_health",
    .variants = {{.name = "plain",
                  .launch = {health<float>, health<double>, nullptr, health<cg_bf16>},
                  .workspace = workspace}},
    .describe = describe,
};
