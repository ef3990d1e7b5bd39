/* Sparse attention of bf16 on tensor cores: a block has a row, with its heads as the rows of all products. A key that is
 * gathered is read once for 64 heads; logits and weights never leave the chip (but for the teacher, below).
 *
 * For each tile of keys - first of the window, then of the chosen rows - eight warps
 *   1. wait for the tile, which was fetched during the last one (cp.async), and send for the next one;
 *   2. make logits x = scale q.key: a warp has 16 heads and a share of the keys, summed over all D;
 *   3. agree on the largest logit of each head, take exponentials relative to it and put them, in bf16, beside each other;
 *   4. bring what out has so far to the new largest logit, where it changed, and add weights times keys: a warp has all
 *      heads and an eighth of D, 128 sums per thread, which is what fills the registers.
 * Window and chosen rows have log-sums of their own, as in the plain kernel; out has one set of sums for both. Tiles beyond
 * the last place that is not empty are not visited; an empty place inside is a key of zeros with the weight 0.
 *
 * The teacher needs every chosen key's exponentials once lse is known. The logits of a row, [heads, places] in f32 in the
 * fragments' own order, go to a slot of the workspace that belongs to the block and come back to the threads that wrote
 * them: 2 * 4 H K bytes through L2 per row, in place of a third product. 512 slots of 128 KiB at K = 512, by T alone, of which
 * those of the blocks at work (132) stay in L2. More than 64 heads: one group after the other, masses brought to a common
 * share.
 *
 * Arithmetic, for H = 64, D = 512, W = 128, K = 512 on an H200 (790 TFLOP/s bf16, 4.3 TB/s; L2 taken as 5.5 TB/s):
 *
 *                                            per row          65536 rows
 *   products  4 H (W + K) D                  83.9 MFLOP       5.5 PFLOP     7.0 ms
 *   memory    q, out (4 H D), lse            131 KB           8.6 GB        2.0 ms
 *   L2        keys 2 (W + K) D, logits 8 H K 655 + 262 KB     60 GB         10.9 ms (7.8 without a teacher)
 *   exp       H (W + 2 K), 16 per cycle      4.6 kcycle                     1.3 ms, beside the products
 *   shared memory, 128 bytes per cycle:
 *     step 2: 3 ldmatrix (512 bytes) for 4 mma, step 4: 8 for 32; 256 bytes per mma of 4096 FLOP: 2 cycles
 *                                            20.5 kmma        41 kcycle     12 ms at 1.7 GHz
 *
 * so that shared memory is the floor of this kernel, 58 % of the tensor cores' own. With three barriers per tile and one
 * block of eight warps per multiprocessor, 55 - 65 % of that floor are expected: 18 - 22 ms, 250 - 300 TFLOP/s, a third of
 * 790. With tiles of 32 keys (step 2: 512 bytes per mma), for sm_80 and its 164 KiB, it is 2.5 cycles per mma, where the
 * tensor cores need 2.
 *
 * Next for mma.sync: step 2 with heads and keys cut in two and D cut in two (4 loads for 8 mma, and 32 KiB of partial sums
 * per tile): a fifth less shared memory in all.
 *
 * wgmma (sm_90a): the tensor cores read a tile from shared memory once for four warps. Two groups of four warps; in step 2 a
 * group has all heads and half of the keys, in step 4 all heads and half of D, so that a thread has 16 logits and 128 sums as
 * before, and steps 1 and 3 are the same code. Per tile of 64 keys:
 *
 *     step 2: 64 products m64n32k16                1024 cycles of the tensor cores; operands 3 KB each, 1536 of shared memory
 *     step 4: 8 products m64n256k16                1024 cycles; 10 KB each, 640
 *     keys put into shared memory, 64 KB           512
 *     step 3: 16 logits per thread                 ~400 of instructions and exp, with two barriers
 *
 * Steps follow each other, 3100 - 3400 cycles per tile; ten tiles per row, 31 - 34 kcycle, 9 - 10 ms for 65536 rows. That is
 * less than L2 takes for a tile and its logits: L2 is the floor, 10.9 ms with a teacher, 7.8 without. Tiles are fetched a
 * turn ahead, logits are not: 14 - 15 ms expected with a teacher, 11 - 12 without, 370 - 500 TFLOP/s, 75 % of the floor.
 * 209 KiB of shared memory, one block per multiprocessor.
 *
 * Next for wgmma: without a teacher, step 2 of the next tile beside step 4 of this one (a third buffer of keys does not fit:
 * 48 keys per tile would); with one, masses of the chosen rows summed per tile and brought to the final lse later, in the
 * place of logits through L2; step 2 with D cut between the groups, 1024 cycles of shared memory in the place of 1536.
 */
#ifndef CG_OPS_CUDA_CSA_ATTENTION_FAST_CUH
#define CG_OPS_CUDA_CSA_ATTENTION_FAST_CUH

#include "ops/cuda/csa/csa_attention_tiles.cuh"

namespace {

template <typename Shape> struct forward_shared {
    static constexpr int HEADS = Shape::HEADS;
    cg_bf16 q[HEADS * Shape::COLUMNS], p[HEADS * Shape::KEYS];
    key_buffers<Shape> buffers;
    float top[Shape::ALONG_KEYS][HEADS]; /* of a tile's logits, by warps; then sums */
    float sink[HEADS], factor[HEADS];    /* factor: of what out has so far */
    log_sum<float> part[2][HEADS];       /* of window and sink, of the chosen rows */
    double share[HEADS];                 /* of the teacher */
    float largest_share, shift[HEADS], mass[2][Shape::ALONG_HEADS][Shape::KEYS];
    double reduced[FAST_WARPS];
};

/* A block takes a row at a time, and of its heads HEADS at a time. */
template <typename Shape>
CG_GLOBAL CG_BOUNDS(FAST_THREADS, Shape::BLOCKS) void fast_attention_kernel(attention<cg_bf16> a, cg_bf16 *out,
                                                                            float *lse, float *window_lse,
                                                                            cg_teacher mode, float *teacher,
                                                                            float4 *logits) {
    constexpr int HEADS = Shape::HEADS, KEYS = Shape::KEYS, KEY_TILES = Shape::KEY_TILES,
                  HEAD_TILES = Shape::HEAD_TILES, COLUMN_TILES = Shape::COLUMN_TILES,
                  ALONG_KEYS = Shape::ALONG_KEYS, ALONG_HEADS = Shape::ALONG_HEADS;
    CG_DYNAMIC_SHARED(forward_shared<Shape>, s);
    const typename Shape::head_tile q_tile = {s->q};
    const typename Shape::weight_tile p_tile = {s->p};
    const thread_place<Shape> my;
    const int tid = my.tid, group = my.group, quad = my.quad, along_keys = my.along_keys, head = my.head;
    const auto q_lane = a_rows<typename Shape::head_tile>(my.along_heads * 16);
    const auto key_lane = key_rows<Shape>(along_keys), column_lane = b_columns<typename Shape::key_tile>(0);
    const auto p_lane = a_rows<typename Shape::weight_tile>(0);
    warpgroup products; /* of GROUPS */
    const int T = (int)a.T_, H = (int)a.H, D = (int)a.D, K = (int)a.K;
    const int most_chosen_tiles = (K + KEYS - 1) / KEYS;

    key_tiles<Shape>::clear_rest(s->buffers, D);
    for (int t = (int)blockIdx.x; t < T; t += (int)gridDim.x) {
        const key_tiles<Shape> tiles(a, s->buffers, t);
        const int n_tiles = tiles.n_tiles, window_tiles = tiles.window_tiles, n_places = tiles.n_places;
        for (int head0 = 0; head0 < H; head0 += HEADS) {
            const int heads = H - head0 < HEADS ? H - head0 : HEADS;
            __syncthreads(); /* the last turn has read what comes now */
            fetch_heads<Shape>(q_tile, a.q + ((int64_t)t * H + head0) * D, heads, D);
            if (n_tiles > 0) tiles.find(0, 0);
            if (n_tiles > 1) tiles.find(1, 1);
            __syncthreads();
            if (n_tiles > 0) tiles.fetch(0, 0);
            cg_cp_async_commit();

            float sum[HEAD_TILES][COLUMN_TILES][4] = {}; /* out, relative to the largest logit so far */
            /* of heads `head` and head + 8: the largest logit of this part, exponentials of own keys relative to it */
            float top[2], own_sum[2] = {0, 0};
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int h = head + 8 * r;
                top[r] = h < heads ? a.sink[head0 + h] : 0;
                if (quad == 0 && along_keys == 0) s->sink[h] = top[r];
            }

            /* The log-sum of a part is known: top and own_sum of all warps. */
            const auto close_part = [&](int part) {
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    float x = own_sum[r];
                    x += __shfl_xor_sync(0xffffffffu, x, 1);
                    x += __shfl_xor_sync(0xffffffffu, x, 2);
                    if (quad == 0) s->top[along_keys][head + 8 * r] = x;
                    if (quad == 0 && along_keys == 0) s->part[part][head + 8 * r] = {top[r], 0};
                }
                __syncthreads();
                if (tid < HEADS) {
                    float x = part == 0 ? exp_below(s->sink[tid], s->part[part][tid].top) : 0;
                    for (int w = 0; w < ALONG_KEYS; w++) x += s->top[w][tid];
                    s->part[part][tid].sum = x;
                }
                __syncthreads();
            };

            for (int i = 0; i < n_tiles; i++) {
                cg_cp_async_wait<0>();
                products.shared_written();
                __syncthreads();
                if (i == window_tiles) {
                    close_part(0);
#pragma unroll
                    for (int r = 0; r < 2; r++) top[r] = -cg_infinity<float>, own_sum[r] = 0;
                }
                if (i + 2 < n_tiles) tiles.find(i + 2, i + 2);
                if (i + 1 < n_tiles) tiles.fetch(i + 1, i + 1);
                cg_cp_async_commit();

                /* logits of 16 heads and OWN_KEYS keys */
                float logit[1][KEY_TILES][4] = {}, (&x)[KEY_TILES][4] = logit[0];
                if constexpr (Shape::GROUPS) {
                    products.begin();
                    products.set_rows(x, q_tile, 0, tiles.keys(i), along_keys * Shape::OWN_KEYS);
                    products.commit();
                    products.template wait<0>(x);
                } else {
                    row_products<Shape, 1>(logit, {q_tile}, q_lane, tiles.keys(i), key_lane);
                }
                float highest[2] = {-cg_infinity<float>, -cg_infinity<float>};
#pragma unroll
                for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        x[n][e] =
                            tiles.has(i, my.key + n * 8 + e % 2) ? x[n][e] * a.scale : -cg_infinity<float>;
                        highest[e / 2] = cg_max(x[n][e], highest[e / 2]);
                    }
                if (teacher && i >= window_tiles)
#pragma unroll
                    for (int n = 0; n < KEY_TILES; n++)
                        logits[(((int64_t)blockIdx.x * most_chosen_tiles + i - window_tiles) * KEY_TILES + n) *
                                   FAST_THREADS +
                               tid] = make_float4(x[n][0], x[n][1], x[n][2], x[n][3]);
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    highest[r] = cg_max(__shfl_xor_sync(0xffffffffu, highest[r], 1), highest[r]);
                    highest[r] = cg_max(__shfl_xor_sync(0xffffffffu, highest[r], 2), highest[r]);
                    if (quad == 0) s->top[along_keys][head + 8 * r] = highest[r];
                }
                __syncthreads();

                /* weights, relative to the largest logit so far */
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const float window = i < window_tiles ? -cg_infinity<float> : s->part[0][head + 8 * r].top,
                                old = top[r];
#pragma unroll
                    for (int w = 0; w < ALONG_KEYS; w++) top[r] = cg_max(s->top[w][head + 8 * r], top[r]);
                    const float out_top = cg_max(window, top[r]), to_out = exp_below(top[r], out_top);
                    own_sum[r] *= exp_below(old, top[r]);
                    if (quad == 0 && along_keys == 0)
                        s->factor[head + 8 * r] = exp_below(cg_max(window, old), out_top);
#pragma unroll
                    for (int n = 0; n < KEY_TILES; n++) {
                        const float e0 = exp_below(x[n][2 * r], top[r]),
                                    e1 = exp_below(x[n][2 * r + 1], top[r]);
                        own_sum[r] += e0 + e1;
                        store_pair(p_tile, head + 8 * r, my.key + n * 8, e0 * to_out, e1 * to_out);
                    }
                }
                products.shared_written();
                __syncthreads();

                /* out */
                bool same = true;
#pragma unroll
                for (int m = 0; m < 2 * HEAD_TILES; m++) same = same && s->factor[my.sum_head + m * 8] == 1;
                if (!__all_sync(0xffffffffu, same))
#pragma unroll
                    for (int m = 0; m < HEAD_TILES; m++)
#pragma unroll
                        for (int r = 0; r < 2; r++) {
                            const float factor = s->factor[my.sum_head + m * 16 + 8 * r];
#pragma unroll
                            for (int n = 0; n < COLUMN_TILES; n++) {
                                sum[m][n][2 * r] *= factor;
                                sum[m][n][2 * r + 1] *= factor;
                            }
                        }
                if constexpr (Shape::GROUPS) {
                    products.begin(sum[0]);
                    products.add_columns(sum[0], p_tile, tiles.keys(i), my.own_pieces);
                    products.commit();
                    products.template wait<0>(sum[0]);
                } else {
                    add_weighted_tile<Shape>(sum, p_tile, p_lane, tiles.keys(i), column_lane, my.own_pieces);
                }
            }
            cg_cp_async_wait<0>();
            __syncthreads();
            if (n_places > 0) {
                close_part(1);
            } else {
                close_part(0);
                if (tid < HEADS) s->part[1][tid] = {-cg_infinity<float>, 0};
            }

            /* a thread per head */
            if (tid < HEADS) {
                const log_sum<float> window = s->part[0][tid], chosen = s->part[1][tid],
                                     all = log_sum_plus(window, chosen);
                s->factor[tid] = all.sum == 0 ? 0 : 1 / all.sum;
                s->share[tid] = -cg_infinity<double>;
                if (tid < heads) {
                    const int64_t i = (int64_t)t * H + head0 + tid;
                    lse[i] = log_of(all);
                    window_lse[i] = log_of(window);
                    const double rest = mode == CG_TEACHER_FULL   ? (double)window.top + log((double)window.sum)
                                        : mode == CG_TEACHER_SINK ? (double)s->sink[tid]
                                                                  : -cg_infinity<double>;
                    if (teacher) s->share[tid] = teacher_share(chosen, rest);
                }
            }
            __syncthreads();

            store_heads<Shape>(
                sum, [&](int h) { return s->factor[h]; }, q_tile, out + ((int64_t)t * H + head0) * D, heads, D);

            /* The teacher: masses of the chosen rows over these heads, from the logits that this thread left behind. Those
             * of earlier heads are made relative to the largest share of all. */
            if (!teacher || n_places == 0) continue;
            double largest = -cg_infinity<double>;
            for (int h = 0; h < heads; h++) largest = s->share[h] > largest ? s->share[h] : largest;
            const float before = s->largest_share,
                        now = head0 == 0 || (float)largest > before ? (float)largest : before,
                        keep = head0 == 0 ? 0 : cg_exp(before - now);
            __syncthreads();
            if (tid == 0) s->largest_share = now;
            if (tid < HEADS) s->shift[tid] = s->part[1][tid].top - (float)(s->share[tid] - (double)now);
            __syncthreads();
            const int chosen_tiles = n_tiles - window_tiles;
            for (int i = 0; i < chosen_tiles; i++) {
                float mass[KEY_TILES][2];
#pragma unroll
                for (int n = 0; n < KEY_TILES; n++) {
                    const float4 x =
                        logits[(((int64_t)blockIdx.x * most_chosen_tiles + i) * KEY_TILES + n) * FAST_THREADS +
                               tid];
                    const float a0 = s->shift[head], a1 = s->shift[head + 8];
                    mass[n][0] = cg_exp(x.x - a0) + cg_exp(x.z - a1);
                    mass[n][1] = cg_exp(x.y - a0) + cg_exp(x.w - a1);
#pragma unroll
                    for (int by = 4; by < 32; by *= 2) {
                        mass[n][0] += __shfl_xor_sync(0xffffffffu, mass[n][0], by);
                        mass[n][1] += __shfl_xor_sync(0xffffffffu, mass[n][1], by);
                    }
                    if (group == 0) {
                        float *to = &s->mass[i % 2][my.along_heads][my.key + n * 8];
                        to[0] = mass[n][0];
                        to[1] = mass[n][1];
                    }
                }
                __syncthreads();
                const int place = i * KEYS + tid;
                if (tid < KEYS && place < n_places) {
                    float all = keep == 0 ? 0 : teacher[(int64_t)t * K + place] * keep;
                    for (int w = 0; w < ALONG_HEADS; w++) all += s->mass[i % 2][w][tid];
                    teacher[(int64_t)t * K + place] = all;
                }
            }
        }

        /* The teacher sums to 1. */
        if (!teacher) continue;
        double mass = 0;
        for (int k = tid; k < KEYS; k += FAST_THREADS)
            for (int place = k; place < n_places; place += KEYS)
                mass += (double)teacher[(int64_t)t * K + place];
        mass = cg_warp_sum(mass);
        if (tid % 32 == 0) s->reduced[my.warp] = mass;
        __syncthreads();
        mass = 0;
        for (int w = 0; w < FAST_WARPS; w++) mass += s->reduced[w];
        for (int k = tid; k < KEYS; k += FAST_THREADS)
            for (int place = k; place < K; place += KEYS)
                teacher[(int64_t)t * K + place] =
                    place < n_places && mass > 0 ? teacher[(int64_t)t * K + place] * (float)(1 / mass) : 0;
    }
}

/* ---- launching ---- */

#ifdef CG_CUDA_HOST
enum { FAST_SLOTS = 3 }; /* small tests go through all turns */
#else
enum { FAST_SLOTS = 512 };
#endif

/* Blocks: with a teacher no more than there are slots for the logits of a row. */
inline unsigned fast_blocks(int64_t T, bool taught) {
    return cg_blocks(taught && T > FAST_SLOTS ? (int64_t)FAST_SLOTS : T, 1);
}

template <typename Shape> size_t fast_logits_bytes(int64_t T, int64_t K) {
    return (size_t)fast_blocks(T, true) * (size_t)((K + Shape::KEYS - 1) / Shape::KEYS) * Shape::HEADS *
           Shape::KEYS * sizeof(float);
}

/* Which products: of warps, with tiles of keys that 163 KiB of shared memory hold or of twice as many, or of groups. */
enum forward_form { FORWARD_FAST, FORWARD_WIDE, FORWARD_GROUPS };

/* Calls use(shape) with the tiles for rows of H heads of D numbers. */
template <forward_form FORM, typename F> auto with_forward_shape(int64_t H, int64_t D, F use) {
    if constexpr (FORM == FORWARD_WIDE) {
        return use(tile_shape<64, 512, 64, 1>());
    } else if constexpr (FORM == FORWARD_GROUPS) {
        return use(tile_shape<64, 512, 64, 1, BY_GROUPS>());
    } else {
        if (D <= 128) return H <= 16 ? use(tile_shape<16, 128, 64, 2>()) : use(tile_shape<64, 128, 32, 2>());
        return H <= 16 ? use(tile_shape<16, 512, 64, 1>()) : use(tile_shape<64, 512, 32, 1>());
    }
}

template <forward_form FORM, typename F> auto with_forward_shape_of(const cg_node *node, F use) {
    return with_forward_shape<FORM>(cg_dim(node->in[Q], 1), cg_dim(node->in[Q], 2), use);
}

inline bool fast_fits(const cg_node *node) {
    const int64_t H = cg_dim(node->in[Q], 1), D = cg_dim(node->in[Q], 2);
    return H > 0 && D > 0 && D <= 512 && D % PIECE == 0;
}

inline bool fast_wide_fits(const cg_node *node) {
    return fast_fits(node) && cg_dim(node->in[Q], 1) > 16 && cg_dim(node->in[Q], 2) > 128;
}

template <forward_form FORM> size_t fast_workspace(const cg_node *node) {
    if (((const csa_attention_attr *)node->attr)->teacher == CG_TEACHER_NONE) return 0;
    const int64_t T = cg_dim(node->in[Q], 0), K = cg_dim(node->in[TOPK], 1);
    return with_forward_shape_of<FORM>(node,
                                       [&](auto shape) { return fast_logits_bytes<decltype(shape)>(T, K); });
}

template <forward_form FORM> size_t fast_shared(const cg_node *node) {
    return with_forward_shape_of<FORM>(
        node, [](auto shape) { return CG_STATIC_BYTES + sizeof(forward_shared<decltype(shape)>); });
}

template <forward_form FORM> bool fast_attention(const cg_run_args *args, cg_stream *stream) {
    const attention<cg_bf16> a = attention_of<cg_bf16>(args);
    const cg_teacher mode = ((const csa_attention_attr *)args->attr)->teacher;
    const bool taught = mode != CG_TEACHER_NONE;
    return with_forward_shape<FORM>(a.H, a.D, [&](auto shape) {
        typedef decltype(shape) Shape;
        return CG_LAUNCH(fast_attention_kernel<Shape>, fast_blocks(a.T_, taught), FAST_THREADS,
                         sizeof(forward_shared<Shape>), stream, a, (cg_bf16 *)args->out[0].data,
                         (float *)args->out[1].data, (float *)args->out[2].data, mode,
                         taught ? (float *)args->out[3].data : nullptr, (float4 *)args->workspace);
    });
}

} // namespace

#endif
