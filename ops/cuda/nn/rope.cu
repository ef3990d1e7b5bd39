/* Rotary position embedding: see ops/nn/rope.c. A row's sines and cosines are computed in f64 once, in shared memory, for all
 * of its heads.
 *
 * In f32, 8 bytes per channel that turns, and per channel that does not where the output lies elsewhere: T = 8192 rows
 * of 64 heads of 512 channels are 2.1 GB in all, 0.5 ms at 4.3 TB/s; in place, where 64 channels turn, 0.27 GB, 62 us.
 * A sine and cosine in f64 takes some 100 instructions at 64 a clock on each of 132 multiprocessors: 0.15 * 10^12 a
 * second, 1.8 us for 8192 rows of 32 pairs. Keys have one head: 128 channels, 32 pairs, 0.24 ns of memory and 0.21 ns of
 * sines a row, so that both count. Fast reads 16 bytes at a time, and takes several short rows per block. */
#include "ops/cuda/pack.cuh"

namespace {

constexpr int THREADS = 256, MOST_PAIRS = 64; /* 512 bytes of arguments */

struct rotation {
    int64_t n_rows, heads, length, lead; /* lead: channels before those that turn */
    int64_t first_pair;
    int pairs; /* that turn in this launch */
    bool in_place, inverse;
    double frequency[MOST_PAIRS];
};

rotation rotation_of(const cg_run_args *args, int64_t first_pair) {
    const cg_rope_attr *attr = (const cg_rope_attr *)args->attr;
    const cg_shape *shape = &args->in[0].shape;
    const int64_t more = attr->n_rotary / 2 - first_pair;
    rotation r = {.n_rows = shape->dims[0],
                  .heads = shape->n_dims == 3 ? shape->dims[1] : 1,
                  .length = shape->dims[shape->n_dims - 1],
                  .first_pair = first_pair,
                  .pairs = (int)(more < MOST_PAIRS ? more : MOST_PAIRS),
                  .in_place = args->in[0].data == args->out[0].data,
                  .inverse = attr->inverse};
    r.lead = r.length - attr->n_rotary;
    for (int i = 0; i < r.pairs; i++) r.frequency[i] = cg_rope_frequency(attr, first_pair + i);
    return r;
}

/* The cosine and sine by which pair i of a row at this position turns. */
template <typename S> CG_DEVICE void turn_of(const rotation &r, int32_t position, int i, S *cosine, S *sine) {
    double s, c;
    cg_sincos((double)position * r.frequency[i], &s, &c);
    *cosine = (S)c;
    *sine = (S)(r.inverse ? -s : s);
}

/* (a, b) of x turned, to y. */
template <typename T, typename S> CG_DEVICE void turn(const T *x, T *y, S cosine, S sine) {
    const S a = cg_up(x[0]), b = cg_up(x[1]);
    y[0] = cg_down<T>(a * cosine - b * sine);
    y[1] = cg_down<T>(a * sine + b * cosine);
}

/* ---- plain: a block per row ---- */

template <typename T> CG_GLOBAL void rope_kernel(const T *x, const int32_t *positions, T *y, rotation r) {
    typedef cg_sum_of<T> S;
    CG_SHARED(S[MOST_PAIRS], cosine);
    CG_SHARED(S[MOST_PAIRS], sine);
    for (int64_t n = blockIdx.x; n < r.n_rows; n += gridDim.x) {
        const bool turns = positions[n] >= 0;
        const int64_t row = n * r.heads * r.length, turned = r.lead + 2 * r.first_pair;
        __syncthreads(); /* the row before is done */
        if (turns && (int)threadIdx.x < r.pairs)
            turn_of(r, positions[n], (int)threadIdx.x, &cosine[threadIdx.x], &sine[threadIdx.x]);
        __syncthreads();
        for (int64_t k = threadIdx.x; k < r.heads * r.pairs; k += THREADS) {
            const int64_t i = k % r.pairs, at = row + k / r.pairs * r.length + turned + 2 * i;
            if (turns)
                turn(x + at, y + at, cosine[i], sine[i]);
            else
                y[at] = x[at], y[at + 1] = x[at + 1];
        }
        if (r.in_place || r.first_pair) continue;
        for (int64_t k = threadIdx.x; k < r.heads * r.lead; k += THREADS) {
            const int64_t at = row + k / r.lead * r.length + k % r.lead;
            y[at] = x[at];
        }
    }
}

template <typename T> bool rope(const cg_run_args *args, cg_stream *stream) {
    const int64_t pairs = ((const cg_rope_attr *)args->attr)->n_rotary / 2;
    for (int64_t first = 0; first < pairs; first += MOST_PAIRS) {
        const rotation r = rotation_of(args, first);
        if (!CG_LAUNCH(rope_kernel<T>, cg_blocks(r.n_rows, 1), THREADS, 0, stream, (const T *)args->in[0].data,
                       (const int32_t *)args->in[1].data, (T *)args->out[0].data, r))
            return false;
    }
    return true;
}

/* ---- fast: several rows per block, 16 bytes at a time ---- */

constexpr int MOST_ROWS = 16;

template <typename T>
CG_GLOBAL void rope_packed_kernel(const T *x, const int32_t *positions, T *y, rotation r, int rows) {
    typedef cg_sum_of<T> S;
    constexpr int N = pack<T>::N;
    CG_SHARED(S[MOST_ROWS * MOST_PAIRS], cosine);
    CG_SHARED(S[MOST_ROWS * MOST_PAIRS], sine);
    const int turning = 2 * r.pairs / N, resting = (int)(r.lead / N); /* packs of a head */
    for (int64_t n0 = (int64_t)blockIdx.x * rows; n0 < r.n_rows; n0 += (int64_t)gridDim.x * rows) {
        const int here = (int)cg_min((int64_t)rows, r.n_rows - n0);
        __syncthreads(); /* the rows before are done */
        for (int k = (int)threadIdx.x; k < here * r.pairs; k += THREADS)
            turn_of(r, positions[n0 + k / r.pairs], k % r.pairs, &cosine[k], &sine[k]);
        __syncthreads();
        const int64_t first = n0 * r.heads; /* heads of all rows so far */
        for (int k = (int)threadIdx.x; k < here * (int)r.heads * turning; k += THREADS) {
            const int head = k / turning, i = k % turning, row = head / (int)r.heads;
            const int64_t at = (first + head) * r.length / N + resting + i;
            const bool turns = positions[n0 + row] >= 0;
            if (!turns && r.in_place) continue;
            const pack<T> some = packs(x)[at];
            pack<T> turned = some;
            const int pair = row * r.pairs + i * (N / 2);
            if (turns)
                for (int j = 0; j < N / 2; j++)
                    turn(some.at + 2 * j, turned.at + 2 * j, cosine[pair + j], sine[pair + j]);
            packs(y)[at] = turned;
        }
        if (r.in_place) continue;
        for (int k = (int)threadIdx.x; k < here * (int)r.heads * resting; k += THREADS) {
            const int64_t at = (first + k / resting) * r.length / N + k % resting;
            packs(y)[at] = packs(x)[at];
        }
    }
}

/* Heads of whole packs on both sides of the first channel that turns, few enough for 32 bits. */
bool rope_fits(const cg_node *node) {
    const cg_shape *x = &node->in[0]->shape;
    const int64_t n_rotary = ((const cg_rope_attr *)node->attr)->n_rotary, length = x->dims[x->n_dims - 1];
    const int64_t heads = x->n_dims == 3 ? x->dims[1] : 1;
    return n_rotary / 2 <= MOST_PAIRS && rows_are_packs(node->in[0]->dtype, length) &&
           rows_are_packs(node->in[0]->dtype, n_rotary) && heads * length < (INT64_C(1) << 31) / MOST_ROWS;
}

template <typename T> bool rope_fast(const cg_run_args *args, cg_stream *stream) {
    const rotation r = rotation_of(args, 0);
    const int64_t packs_of_row = r.heads * r.length / pack<T>::N, enough = 4 * THREADS;
    int rows = 1;
    while (rows < MOST_ROWS && rows * packs_of_row < enough) rows *= 2;
    return CG_LAUNCH(rope_packed_kernel<T>, cg_blocks(r.n_rows, rows), THREADS, 0, stream,
                     (const T *)args->in[0].data, (const int32_t *)args->in[1].data, (T *)args->out[0].data, r,
                     rows);
}

} // namespace

extern "C" const cg_cuda_op cg_cuda_rope = {
    .op = "rope",
    .variants = {{.name = "plain", .launch = {rope<float>, rope<double>, nullptr, rope<cg_bf16>}},
                 {.name = "fast",
                  .launch = {rope_fast<float>, rope_fast<double>, nullptr, rope_fast<cg_bf16>},
                  .fits = rope_fits}},
};
