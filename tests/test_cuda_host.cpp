/* The stand-in for CUDA itself, with fibers (also under AddressSanitizer) and with threads of the system under
 * ThreadSanitizer: what each function gives, what each error says, and kernels with planted faults, whose going
 * unnoticed would be the failure. */
#include "ops/cuda/host/cuda_host.h"

#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
const bool address_sanitizer = true;
#else
const bool address_sanitizer = false;
#endif
#if defined(__SANITIZE_THREAD__)
const bool thread_sanitizer = true;
#else
const bool thread_sanitizer = false;
#endif
const bool fibers = cg_host_mode[0] == 'f';
const uint64_t seeds = fibers ? 8 : 1; /* the system's order follows none */

namespace {

/* As ops/cuda/kernel.cuh has it, for a local `args`. */
#define LAUNCH(kernel, grid, block, shared_bytes, ...)                                                         \
    cg_launch((&args), kernel, dim3(grid), dim3(block), shared_bytes, NULL, ##__VA_ARGS__)

struct launch_args {
    cg_error *error;
};

const unsigned ALL = 0xffffffffu;

/* Launches and expects success. */
#define RUN(...)                                                                                               \
    do {                                                                                                       \
        cg_error error = {};                                                                                   \
        launch_args args = {&error};                                                                           \
        if (!LAUNCH(__VA_ARGS__)) ck_abort_msg("%s", error.text);                                              \
    } while (0)

/* Launches and expects a failure whose sentence holds all the words. */
#define REFUSED(words, ...)                                                                                    \
    do {                                                                                                       \
        cg_error error = {};                                                                                   \
        launch_args args = {&error};                                                                           \
        ck_assert_msg(!LAUNCH(__VA_ARGS__), "a faulty launch went through; expected: %s", words);              \
        ck_assert_int_eq(error.code, CG_FAILED);                                                               \
        expect_words(error.text, words);                                                                       \
    } while (0)

/* `words`: parts of the text in order, separated by "...". */
void expect_words(const std::string &text, const std::string &words) {
    size_t from = 0, start = 0;
    while (start <= words.size()) {
        size_t end = words.find("...", start);
        if (end == std::string::npos) end = words.size();
        std::string part = words.substr(start, end - start);
        size_t found = text.find(part, from);
        ck_assert_msg(found != std::string::npos, "got \"%s\", expected \"%s\"", text.c_str(), words.c_str());
        from = found + part.size();
        start = end + 3;
    }
}

/* ---- launches ---- */

CG_GLOBAL void visit_kernel(unsigned *visits, uint3 *seen_block_dim, uint3 *seen_grid_dim) {
    size_t block = blockIdx.x + gridDim.x * (blockIdx.y + (size_t)gridDim.y * blockIdx.z);
    size_t thread = threadIdx.x + blockDim.x * (threadIdx.y + (size_t)blockDim.y * threadIdx.z);
    atomicAdd(&visits[block * blockDim.x * blockDim.y * blockDim.z + thread], 1);
    if (block == 0 && thread == 0) {
        *seen_block_dim = blockDim;
        *seen_grid_dim = gridDim;
    }
}

START_TEST(every_thread_of_every_block_runs_once) {
    const dim3 grids[] = {1, 2, 7, 64, {3, 5}, {4, 3, 2}, {1, 1, 6}}, blocks[] = {1, 32, 33, {4, 3, 2}, {1, 7}};
    for (dim3 grid : grids)
        for (dim3 block : blocks)
            for (uint64_t seed = 0; seed < seeds; seed++) {
                cg_host_seed(seed);
                std::vector<unsigned> visits((size_t)grid.x * grid.y * grid.z * block.x * block.y * block.z);
                uint3 seen_block_dim = {}, seen_grid_dim = {};
                RUN(visit_kernel, grid, block, 0, visits.data(), &seen_block_dim, &seen_grid_dim);
                for (unsigned n : visits) ck_assert_uint_eq(n, 1);
                ck_assert(seen_block_dim.x == block.x && seen_block_dim.y == block.y &&
                          seen_block_dim.z == block.z);
                ck_assert(seen_grid_dim.x == grid.x && seen_grid_dim.y == grid.y && seen_grid_dim.z == grid.z);
            }
}
END_TEST

CG_GLOBAL void take_arguments_kernel(float a, const double *b, int64_t c, double *sum) {
    *sum = a + *b + (double)c;
}

START_TEST(arguments_are_converted) {
    double b = 0.25, sum = 0;
    RUN(take_arguments_kernel, 1, 1, 0, 0.5, &b, 7, &sum);
    ck_assert_double_eq(sum, 7.75);
}
END_TEST

CG_GLOBAL void idle_kernel() {}

START_TEST(impossible_launches) {
    RUN(idle_kernel, 0, 32, 0); /* nothing to do is fine */
    RUN(idle_kernel, 1, 1024, 227 << 10);
    REFUSED("idle_kernel: a block of 1025 x 1 x 1 threads", idle_kernel, 1, 1025, 0);
    REFUSED("a block of 0 x 1 x 1", idle_kernel, 1, 0, 0);
    REFUSED("a block of 1 x 1 x 65", idle_kernel, 1, dim3(1, 1, 65), 0);
    REFUSED("a block of 32 x 33 x 1", idle_kernel, 1, dim3(32, 33), 0);
    REFUSED("a grid of 1 x 65536 x 1", idle_kernel, dim3(1, 65536), 1, 0);
    REFUSED("232449 bytes of shared memory", idle_kernel, 1, 1, (227 << 10) + 1);
}
END_TEST

/* ---- orders ---- */

CG_GLOBAL void arrival_kernel(int *next, int *order) {
    order[atomicAdd(next, 1)] = (int)(blockIdx.x * blockDim.x + threadIdx.x);
}

std::vector<int> arrivals(uint64_t seed, unsigned blocks, unsigned threads) {
    std::vector<int> order(blocks * threads);
    int next = 0;
    cg_host_seed(seed);
    RUN(arrival_kernel, blocks, threads, 0, &next, order.data());
    return order;
}

START_TEST(a_seed_gives_one_order_and_seeds_give_all) {
    if (!fibers) return; /* the system's order belongs to nobody */
    ck_assert(arrivals(5, 4, 64) == arrivals(5, 4, 64));
    ck_assert(arrivals(5, 4, 64) != arrivals(6, 4, 64));
    std::set<std::vector<int>> of_threads, of_blocks;
    for (uint64_t seed = 0; seed < 400; seed++) {
        of_threads.insert(arrivals(seed, 1, 4));
        of_blocks.insert(arrivals(seed, 3, 1));
    }
    ck_assert_uint_eq(of_threads.size(), 24);
    ck_assert_uint_eq(of_blocks.size(), 6);
}
END_TEST

/* ---- shared memory and barriers ---- */

template <typename T> CG_GLOBAL void sum_kernel(const T *x, T *y, int width) {
    CG_SHARED(T[256], partial);
    T sum = 0;
    for (int i = (int)threadIdx.x; i < width; i += (int)blockDim.x) sum += x[(size_t)blockIdx.x * width + i];
    partial[threadIdx.x] = sum;
    __syncthreads();
    for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) y[blockIdx.x] = partial[0];
}

START_TEST(barriers_order_shared_memory) {
    const int width = 1000, rows = 3;
    std::vector<double> x(width * rows);
    for (size_t i = 0; i < x.size(); i++) x[i] = (double)(i % 17);
    for (uint64_t seed = 0; seed < seeds; seed++) {
        cg_host_seed(seed);
        std::vector<double> y(rows);
        RUN(sum_kernel<double>, rows, 128, 0, x.data(), y.data(), width);
        for (int row = 0; row < rows; row++) {
            double want = 0;
            for (int i = 0; i < width; i++) want += x[row * width + i];
            ck_assert_double_eq(y[row], want);
        }
    }
}
END_TEST

CG_GLOBAL void vote_block_kernel(int *any, int *all, int *count, int rounds) {
    for (int round = 0; round < rounds; round++) {
        int p = (int)threadIdx.x % rounds < round; /* nobody in round 0 */
        int a = __syncthreads_or(p), b = __syncthreads_and(p), c = __syncthreads_count(p);
        if (threadIdx.x == blockDim.x - 1) any[round] = a, all[round] = b, count[round] = c;
    }
}

START_TEST(barriers_vote) {
    const int rounds = 9, threads = 45;
    std::vector<int> any(rounds), all(rounds), count(rounds);
    RUN(vote_block_kernel, 1, threads, 0, any.data(), all.data(), count.data(), rounds);
    for (int round = 0; round < rounds; round++) {
        int want = 0;
        for (int t = 0; t < threads; t++) want += t % rounds < round;
        ck_assert_int_eq(count[round], want);
        ck_assert_int_eq(any[round] != 0, want > 0);
        ck_assert_int_eq(all[round] != 0, want == threads);
    }
}
END_TEST

/* Each block looks at its shared memory before it writes to it. */
CG_GLOBAL void first_look_kernel(int *bad, size_t dynamic_bytes) {
    CG_SHARED(float[3][5], grid);
    CG_SHARED(int, number);
    CG_DYNAMIC_SHARED(unsigned char, bytes);
    if (threadIdx.x == 0) {
        if (!isnan(grid[2][4]) || !isnan(grid[0][0]) || number != -1) atomicAdd(bad, 1);
        for (size_t i = 0; i < dynamic_bytes; i++)
            if (bytes[i] != 0xff) atomicAdd(bad, 1);
        if ((uintptr_t)grid % 16 != 0 || (uintptr_t)bytes % 1024 != 0) atomicAdd(bad, 1);
        if ((uintptr_t)grid % 32 == 0 || (uintptr_t)bytes % 2048 == 0)
            atomicAdd(bad, 1); /* no more than promised */
    }
    __syncthreads();
    if (threadIdx.x < 15) grid[threadIdx.x / 5][threadIdx.x % 5] = 0;
    number = 0; /* one value from all */
    for (size_t i = threadIdx.x; i < dynamic_bytes; i += blockDim.x) bytes[i] = 0;
}

/* `number = 0` by all threads is a race in the eyes of ThreadSanitizer and of the standard. */
CG_GLOBAL void one_look_kernel(int *bad, size_t dynamic_bytes) {
    CG_SHARED(int, number);
    CG_DYNAMIC_SHARED(double, values);
    if (threadIdx.x == 0 && (number != -1 || !isnan(values[dynamic_bytes / 8 - 1]))) atomicAdd(bad, 1);
    __syncthreads();
    if (threadIdx.x == 0) number = 0, values[dynamic_bytes / 8 - 1] = 0;
}

START_TEST(shared_memory_starts_poisoned) {
    int bad = 0;
    if (!thread_sanitizer) RUN(first_look_kernel, 5, 64, 1001, &bad, 1001);
    RUN(one_look_kernel, 5, 64, 808, &bad, 808);
    ck_assert_int_eq(bad, 0);
}
END_TEST

template <int BYTES> CG_GLOBAL void large_kernel() {
    CG_SHARED(char[BYTES], room);
    room[threadIdx.x] = 0;
}

START_TEST(shared_memory_is_limited) {
    RUN(large_kernel<48 << 10>, 1, 1, 179 << 10);
    REFUSED("room...49153 bytes of static", large_kernel<(48 << 10) + 1>, 1, 1, 0);
    REFUSED("room...49152 bytes of static and 183297 of dynamic", large_kernel<48 << 10>, 1, 1,
            (179 << 10) + 1);
}
END_TEST

/* ---- warps ---- */

template <typename T> struct shuffled { T idx, up, down, exclusive; };

template <typename T> CG_GLOBAL void shuffle_kernel(shuffled<T> *out, int by, int width) {
    T mine = (T)(100 + threadIdx.x);
    shuffled<T> *to = &out[threadIdx.x];
    to->idx = __shfl_sync(ALL, mine, by, width);
    to->up = __shfl_up_sync(ALL, mine, (unsigned)by, width);
    to->down = __shfl_down_sync(ALL, mine, (unsigned)by, width);
    to->exclusive = __shfl_xor_sync(ALL, mine, by, width);
}

/* The source of each lane from the pseudo-code of the PTX ISA for shfl: a segment mask and a clamp. */
int ptx_source(int lane, char kind, int b, int width) {
    int segment = 32 - width, clamp = kind == 'u' ? 0 : 31;
    int least = lane & segment, most = (lane & segment) | (clamp & ~segment & 31), j;
    switch (kind) {
    case 'u':
        j = lane - b;
        return j >= most ? j : lane;
    case 'd':
        j = lane + b;
        return j <= most ? j : lane;
    case 'x':
        j = lane ^ b;
        return j <= most ? j : lane;
    default:
        return least | (b & ~segment & 31);
    }
}

template <typename T> void check_shuffles() {
    for (int width = 1; width <= 32; width *= 2)
        for (int by = 0; by < 32; by++) {
            shuffled<T> out[64];
            RUN(shuffle_kernel<T>, 1, 64, 0, out, by, width);
            for (int thread = 0; thread < 64; thread++) {
                int lane = thread % 32, warp = thread - lane;
                ck_assert(out[thread].idx == (T)(100 + warp + ptx_source(lane, 'i', by, width)));
                ck_assert(out[thread].up == (T)(100 + warp + ptx_source(lane, 'u', by, width)));
                ck_assert(out[thread].down == (T)(100 + warp + ptx_source(lane, 'd', by, width)));
                ck_assert(out[thread].exclusive == (T)(100 + warp + ptx_source(lane, 'x', by, width)));
            }
        }
}

START_TEST(shuffles) {
    check_shuffles<float>();
    if (!fibers) return; /* seconds each */
    check_shuffles<int>();
    check_shuffles<double>();
    check_shuffles<unsigned long long>();
}
END_TEST

/* Odd and even lanes of a warp on different ways through the kernel. */
CG_GLOBAL void half_warps_kernel(unsigned *ballots, int *any_all) {
    int lane = (int)threadIdx.x;
    if (lane % 2) {
        ballots[lane] = __ballot_sync(0xaaaaaaaau, lane > 15);
        any_all[lane] = __any_sync(0xaaaaaaaau, lane == 31) * 2 + __all_sync(0xaaaaaaaau, lane != 31);
    } else {
        ballots[lane] = __ballot_sync(0x55555555u, lane == __shfl_sync(0x55555555u, lane, 8));
        any_all[lane] = __any_sync(0x55555555u, lane > 30) * 2 + __all_sync(0x55555555u, lane <= 30);
    }
}

START_TEST(votes_and_masks) {
    for (uint64_t seed = 0; seed < seeds; seed++) {
        cg_host_seed(seed);
        unsigned ballots[32];
        int any_all[32];
        RUN(half_warps_kernel, 1, 32, 0, ballots, any_all);
        for (int lane = 0; lane < 32; lane++) {
            ck_assert_uint_eq(ballots[lane], lane % 2 ? 0xaaaa0000u : 0x100u);
            ck_assert_int_eq(any_all[lane], lane % 2 ? 2 : 1);
        }
    }
}
END_TEST

/* Values travel through shared memory within a warp, ordered by __syncwarp alone; each half of a warp by itself in
 * the second part. */
CG_GLOBAL void reverse_kernel(int *out) {
    CG_SHARED(int[96], slot);
    unsigned lane = threadIdx.x % 32, warp = threadIdx.x - lane;
    slot[threadIdx.x] = (int)threadIdx.x;
    __syncwarp();
    int other = slot[warp + 31 - lane];
    __syncwarp();
    slot[threadIdx.x] = other;
    unsigned half = lane / 16;
    __syncwarp(half ? 0xffff0000u : 0x0000ffffu);
    out[threadIdx.x] = slot[warp + 16 * half + 15 - lane % 16];
}

START_TEST(syncwarp_orders_memory) {
    for (uint64_t seed = 0; seed < seeds; seed++) {
        cg_host_seed(seed);
        int out[96];
        RUN(reverse_kernel, 1, 96, 0, out);
        for (int i = 0; i < 96; i++) ck_assert_int_eq(out[i], (i / 16 * 16) % 32 == 0 ? i + 16 : i - 16);
    }
}
END_TEST

/* ---- atomics ---- */

struct totals {
    int i, largest, smallest;
    unsigned u;
    unsigned long long l;
    float f;
    double d;
    int by_swap;
};

CG_GLOBAL void totals_kernel(totals *t) {
    int value = (int)(blockIdx.x * blockDim.x + threadIdx.x) - 50;
    atomicAdd(&t->i, value);
    atomicMax(&t->largest, value);
    atomicMin(&t->smallest, value);
    atomicAdd(&t->u, 1u);
    atomicAdd(&t->l, 1ull << 33);
    atomicAdd(&t->f, 0.5f);
    atomicAdd(&t->d, 0.25);
    for (int old = 0, seen; (seen = atomicCAS(&t->by_swap, old, old + 2)) != old;) old = seen;
}

START_TEST(atomics) {
    totals t = {};
    RUN(totals_kernel, 5, 64, 0, &t);
    const int n = 5 * 64;
    ck_assert_int_eq(t.i, n * (n - 1) / 2 - 50 * n);
    ck_assert_int_eq(t.largest, n - 51);
    ck_assert_int_eq(t.smallest, -50);
    ck_assert_uint_eq(t.u, n);
    ck_assert(t.l == (unsigned long long)n << 33);
    ck_assert_float_eq(t.f, n * 0.5f);
    ck_assert_double_eq(t.d, n * 0.25);
    ck_assert_int_eq(t.by_swap, 2 * n);
}
END_TEST

/* A lock of atomics and fences around plain accesses. */
CG_GLOBAL void locked_kernel(unsigned *lock, int *plain) {
    for (bool done = false; !done;) {
        if (atomicCAS(lock, 0u, 1u) != 0u) continue;
        CG_FENCE();
        *plain += 1;
        CG_FENCE();
        atomicCAS(lock, 1u, 0u);
        done = true;
    }
}

START_TEST(fences_order_memory) {
    unsigned lock = 0;
    int plain = 0;
    RUN(locked_kernel, 3, 40, 0, &lock, &plain);
    ck_assert_int_eq(plain, 120);
}
END_TEST

/* ---- numbers ---- */

START_TEST(small_functions) {
    ck_assert_int_eq(__popc(0xf0f00001u), 9);
    ck_assert_int_eq(__ffs(0), 0);
    ck_assert_int_eq(__ffs(0x50), 5);
    ck_assert_float_eq(rsqrtf(16), 0.25f);
    /* bf16 has 8 bits of mantissa, the leading one included: above 256, odd numbers are ties */
    ck_assert_float_eq(cg_bf16_to_float(cg_bf16_from_float(257)), 256);
    ck_assert_float_eq(cg_bf16_to_float(cg_bf16_from_float(259)), 260);
    ck_assert_float_eq(cg_bf16_to_float(cg_bf16_from_float(257.01f)), 258);
    ck_assert(isnan(cg_bf16_to_float(cg_bf16_from_float(NAN))));
    ck_assert(isinf(cg_bf16_to_float(cg_bf16_from_float(3.4e38f))));
    for (uint32_t bits = 0; bits < 0x10000; bits++) {
        float value = cg_bf16_to_float({(uint16_t)bits});
        if (!isnan(value)) ck_assert_uint_eq(cg_bf16_from_float(value).bits, bits);
    }
}
END_TEST

/* ---- tensor cores ---- */

uint64_t random_state = 1;

/* Small integers and halves: products and sums are exact in float, so results can be compared by ==. */
float draw_exact() {
    random_state = random_state * 6364136223846793005 + 1442695040888963407;
    return (float)((int)(random_state >> 40) % 31 - 15) / 2;
}

/* Fragments loaded one element at a time, by the layout. */
CG_GLOBAL void mma_kernel(const float *a, const float *b, const float *c, float *d) {
    int g = (int)threadIdx.x / 4, t = (int)threadIdx.x % 4;
    auto pair = [](float low, float high) {
        return cg_bf16_from_float(low).bits | (uint32_t)cg_bf16_from_float(high).bits << 16;
    };
    uint32_t left[4], right[2];
    for (int i = 0; i < 4; i++) {
        const float *at = a + (g + (i & 1) * 8) * 16 + 2 * t + (i >> 1) * 8;
        left[i] = pair(at[0], at[1]);
    }
    for (int i = 0; i < 2; i++) {
        const float *at = b + (2 * t + 8 * i) * 8 + g;
        right[i] = pair(at[0], at[8]);
    }
    float sum[4] = {c[g * 8 + 2 * t], c[g * 8 + 2 * t + 1], c[(g + 8) * 8 + 2 * t], c[(g + 8) * 8 + 2 * t + 1]};
    cg_mma_bf16_16x8x16(sum, left, right);
    d[g * 8 + 2 * t] = sum[0], d[g * 8 + 2 * t + 1] = sum[1];
    d[(g + 8) * 8 + 2 * t] = sum[2], d[(g + 8) * 8 + 2 * t + 1] = sum[3];
}

/* The usual way: a [16, 16] and b [16, 8] row-major in shared memory, a by ldmatrix, b transposed. b lies in columns
 * 0 to 7 of a tile of 16 so that four matrices are there to be loaded. */
CG_GLOBAL void mma_from_shared_kernel(const float *a, const float *b, const float *c, float *d) {
    CG_SHARED(cg_bf16[16][24], left_tile); /* padded rows */
    CG_SHARED(cg_bf16[16][16], right_tile);
    for (int i = (int)threadIdx.x; i < 256; i += 32) {
        left_tile[i / 16][i % 16] = cg_bf16_from_float(a[i]);
        right_tile[i / 16][i % 16] = cg_bf16_from_float(i % 16 < 8 ? b[i / 16 * 8 + i % 16] : NAN);
    }
    __syncwarp();
    int lane = (int)threadIdx.x, g = lane / 4, t = lane % 4;
    uint32_t left[4], right[4];
    cg_ldmatrix_x4(left, &left_tile[lane % 16][lane / 16 * 8]);
    cg_ldmatrix_x4_trans(right, &right_tile[lane % 16][lane / 16 * 8]);
    float sum[4] = {c[g * 8 + 2 * t], c[g * 8 + 2 * t + 1], c[(g + 8) * 8 + 2 * t], c[(g + 8) * 8 + 2 * t + 1]};
    cg_mma_bf16_16x8x16(sum, left, right);
    for (int i = 0; i < 4; i++) d[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = sum[i];
}

START_TEST(tensor_cores_multiply) {
    for (int turn = 0; turn < 4; turn++) {
        float a[256], b[128], c[128], d[128], e[128];
        std::generate(a, a + 256, draw_exact);
        std::generate(b, b + 128, draw_exact);
        std::generate(c, c + 128, draw_exact);
        RUN(mma_kernel, 1, 32, 0, a, b, c, d);
        RUN(mma_from_shared_kernel, 1, 32, 0, a, b, c, e);
        for (int row = 0; row < 16; row++)
            for (int column = 0; column < 8; column++) {
                float want = c[row * 8 + column];
                for (int k = 0; k < 16; k++) want += a[row * 16 + k] * b[k * 8 + column];
                ck_assert_float_eq(d[row * 8 + column], want);
                ck_assert_float_eq(e[row * 8 + column], want);
            }
    }
}
END_TEST

/* Element e of matrix m is 64 m + e; rows lie 8 or more elements apart, in an order of their own. */
CG_GLOBAL void ldmatrix_kernel(uint32_t *plain, uint32_t *transposed) {
    CG_SHARED(uint16_t[32][8], rows);
    int lane = (int)threadIdx.x, place = lane * 5 % 32;
    for (int i = 0; i < 8; i++) rows[place][i] = (uint16_t)(lane * 8 + i);
    __syncwarp();
    cg_ldmatrix_x4(plain + 4 * lane, rows[place]);
    cg_ldmatrix_x4_trans(transposed + 4 * lane, rows[place]);
}

START_TEST(ldmatrix_layout) {
    uint32_t plain[128], transposed[128];
    RUN(ldmatrix_kernel, 1, 32, 0, plain, transposed);
    for (uint32_t lane = 0; lane < 32; lane++)
        for (uint32_t m = 0; m < 4; m++) {
            uint32_t g = lane / 4, t = lane % 4;
            uint32_t row_pair = (64 * m + 8 * g + 2 * t) | (64 * m + 8 * g + 2 * t + 1) << 16;
            uint32_t column_pair = (64 * m + 8 * (2 * t) + g) | (64 * m + 8 * (2 * t + 1) + g) << 16;
            ck_assert_uint_eq(plain[4 * lane + m], row_pair);
            ck_assert_uint_eq(transposed[4 * lane + m], column_pair);
        }
}
END_TEST

/* ---- asynchronous copies ---- */

/* What is seen after each wait: the number, or -1 for what is not there yet. */
CG_GLOBAL void copies_kernel(const float4 *from, int *seen) {
    CG_SHARED(float4[32][4], to);
    float4 *mine = to[threadIdx.x];
    auto look = [&](int stage) {
        for (int i = 0; i < 4; i++)
            seen[(stage * 32 + threadIdx.x) * 4 + i] = isnan(mine[i].x) ? -1 : (int)mine[i].w;
    };
    cg_cp_async_16(&mine[0], &from[4 * threadIdx.x]);
    cg_cp_async_commit();
    cg_cp_async_16(&mine[1], &from[4 * threadIdx.x + 1]);
    cg_cp_async_16(&mine[2], NULL, false);
    cg_cp_async_commit();
    look(0);
    cg_cp_async_wait<1>();
    look(1);
    cg_cp_async_16(&mine[3], &from[4 * threadIdx.x + 3]);
    cg_cp_async_wait<0>(); /* the last copy is in no group yet */
    look(2);
    cg_cp_async_commit();
    cg_cp_async_wait<0>();
    look(3);
}

START_TEST(copies_appear_at_their_wait) {
    float4 from[128];
    for (int i = 0; i < 128; i++) from[i] = make_float4(0, 0, 0, (float)(i + 1));
    std::vector<int> seen(4 * 128);
    RUN(copies_kernel, 1, 32, 0, from, seen.data());
    for (int stage = 0; stage < 4; stage++)
        for (int i = 0; i < 128; i++) {
            bool there = i % 4 == 0 ? stage >= 1 : i % 4 == 3 ? stage >= 3 : stage >= 2;
            ck_assert_int_eq(seen[stage * 128 + i], !there ? -1 : i % 4 == 2 ? 0 : i + 1);
        }
}
END_TEST

CG_GLOBAL void bad_copy_kernel(const float4 *from, int fault) {
    CG_SHARED(float4[4], to);
    switch (fault) {
    case 0:
        cg_cp_async_16((float *)to + 1, from);
        break;
    case 1:
        cg_cp_async_16(to, (const float *)from + 2);
        break;
    case 2:
        cg_cp_async_16(to + 4, from);
        break;
    case 3:
        cg_cp_async_16((void *)from, from);
        break;
    case 4:
        cg_cp_async_16(to, to + 1);
        break;
    case 5:
        cg_cp_async_16(to, from);
        break;
    case 6: {
        uint32_t r[4];
        cg_ldmatrix_x4(r, fault == 6 ? (const char *)to + 8 : NULL);
        break;
    }
    default: {
        uint32_t r[4];
        cg_ldmatrix_x4(r, from);
    }
    }
}

START_TEST(faulty_copies) {
    float4 from[2] = {};
    REFUSED("bad_copy_kernel, block (0,0,0): thread (0,0,0)...not aligned...test_cuda_host.cpp:",
            bad_copy_kernel, 1, 1, 0, from, 0);
    REFUSED("not aligned", bad_copy_kernel, 1, 1, 0, from, 1);
    REFUSED("writes outside shared memory", bad_copy_kernel, 1, 1, 0, from, 2);
    REFUSED("writes outside shared memory", bad_copy_kernel, 1, 1, 0, from, 3);
    REFUSED("reads shared memory", bad_copy_kernel, 1, 1, 0, from, 4);
    REFUSED("ended with 1 copies of cp.async that no wait covered", bad_copy_kernel, 1, 1, 0, from, 5);
    REFUSED("ldmatrix reads a row that is not aligned", bad_copy_kernel, 1, 32, 0, from, 6);
    REFUSED("ldmatrix reads a row outside shared memory", bad_copy_kernel, 1, 32, 0, from, 7);
}
END_TEST

/* ---- divergence ---- */

CG_GLOBAL void missing_thread_kernel(bool late) {
    if (threadIdx.x == 40) {
        if (late)
            for (int i = 0; i < 3; i++) cg_host_pause();
        return;
    }
    __syncthreads();
}

CG_GLOBAL void two_barriers_kernel() {
    if (threadIdx.x % 2 == 0)
        __syncthreads();
    else
        __syncthreads();
}

CG_GLOBAL void two_kinds_kernel() {
    if (threadIdx.x == 7)
        __syncthreads_or(1);
    else
        __syncthreads();
}

START_TEST(divergent_barriers) {
    for (uint64_t seed = 0; seed < seeds; seed++) {
        cg_host_seed(seed);
        REFUSED("kernel missing_thread_kernel, block (...thread (40,0,0)...ended...every thread of the block",
                missing_thread_kernel, 2, 64, 0, false);
        REFUSED("thread (40,0,0)", missing_thread_kernel, 1, 64, 0, true);
        REFUSED("came to __syncthreads (test_cuda_host.cpp:...while thread (...waits at __syncthreads",
                two_barriers_kernel, 1, 64, 0);
        REFUSED("two_kinds_kernel...came to __syncthreads...while thread", two_kinds_kernel, 1, 8, 0);
    }
    int next = 0, order[4];
    RUN(arrival_kernel, 1, 4, 0, &next, order); /* and life goes on */
    ck_assert_int_eq(next, 4);
}
END_TEST

CG_GLOBAL void warp_fault_kernel(int fault, int *out) {
    unsigned lane = threadIdx.x % 32;
    int got = 0;
    switch (fault) {
    case 0:
        got = __shfl_sync(0xfffffffeu, 1, 1);
        break;
    case 1:
        got = __shfl_xor_sync(ALL, 1, 1);
        break;
    case 2:
    case 9: /* the lane ends after others wait; in 9, before any of them comes */
        if (lane == 9) {
            atomicAdd(&out[32], 1);
            return;
        }
        if (fault == 9)
            while (!atomicAdd(&out[32], 0)) cg_host_pause();
        got = __any_sync(ALL, 1);
        break;
    case 3:
        got = (int)__ballot_sync(lane < 16 ? ALL : 0xffff0000u, 1);
        break;
    case 4:
        got = lane < 16 ? __any_sync(ALL, 1) : __all_sync(ALL, 1);
        break;
    case 5:
        if (lane == 3) __syncthreads();
        __syncwarp();
        break;
    case 6:
        got = lane < 16 ? __shfl_sync(0x0000ffffu, 1, 20) : 0;
        break;
    case 7:
        got = __shfl_sync(ALL, 1, 0, 12);
        break;
    case 8:
        got = lane < 16 ? __shfl_down_sync(0x0000ffffu, 1, 1) : 0;
        break;
    }
    out[threadIdx.x] = got;
}

START_TEST(divergent_warps) {
    int out[64];
    for (uint64_t seed = 0; seed < seeds; seed++) {
        cg_host_seed(seed);
        REFUSED("thread (0,0,0) at __shfl_sync...does not name the lane that calls, 0", warp_fault_kernel, 1, 1,
                0, 0, out);
        REFUSED(
            "__shfl_xor_sync...mask 0xffffffff: the mask names lane 16, and the block's last warp has only 16",
            warp_fault_kernel, 1, 48, 0, 1, out);
        REFUSED("thread (9,0,0)...ended", warp_fault_kernel, 1, 32, 0, 2, out);
        out[32] = 0;
        REFUSED("thread (9,0,0)...ended", warp_fault_kernel, 1, 32, 0, 9, out);
        REFUSED("__ballot_sync", warp_fault_kernel, 1, 32, 0, 3, out);
        REFUSED("mask 0xffffffff...waits at __a", warp_fault_kernel, 1, 32, 0, 4, out);
        REFUSED("waits at __syncwarp...for lane 3, which waits at __syncthreads", warp_fault_kernel, 1, 32, 0,
                5, out);
        REFUSED("takes the value of lane 20, which the mask 0x0000ffff does not name", warp_fault_kernel, 1, 32,
                0, 6, out);
        REFUSED("the width is 12", warp_fault_kernel, 1, 32, 0, 7, out);
        REFUSED("thread (15,0,0)...takes the value of lane 16", warp_fault_kernel, 1, 32, 0, 8, out);
    }
}
END_TEST

/* ---- planted faults ---- */

/* Runs something in a process of its own; returns its exit code and what it wrote to stderr. */
template <typename F> int apart(F run, std::string *written) {
    int ends[2];
    ck_assert_int_eq(pipe(ends), 0);
    fflush(NULL);
    pid_t child = fork();
    ck_assert_int_ge(child, 0);
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        close(ends[0]);
        close(ends[1]);
        run();
        exit(0); /* where ThreadSanitizer turns reports into exit code 66 */
    }
    close(ends[1]);
    char piece[4096];
    for (ssize_t n; (n = read(ends[0], piece, sizeof piece)) > 0;) written->append(piece, (size_t)n);
    close(ends[0]);
    int status = 0;
    ck_assert_int_eq(waitpid(child, &status, 0), child);
    ck_assert_msg(WIFEXITED(status), "the process ended by signal %d: %s", WTERMSIG(status), written->c_str());
    return WEXITSTATUS(status);
}

/* Launches, whatever comes of it. */
#define LET(...)                                                                                               \
    do {                                                                                                       \
        cg_error error = {};                                                                                   \
        launch_args args = {&error};                                                                           \
        if (!LAUNCH(__VA_ARGS__)) fprintf(stderr, "%s\n", error.text);                                         \
    } while (0)

/* ThreadSanitizer reports a race in the kernel; other builds have nothing to say. */
#define EXPECT_RACE(name, ...)                                                                                 \
    do {                                                                                                       \
        std::string written;                                                                                   \
        int code = apart([&] { LET(__VA_ARGS__); }, &written);                                                 \
        if (thread_sanitizer) {                                                                                \
            expect_words(written, "ThreadSanitizer: data race..." name);                                       \
            expect_words(written, "(in kernel " name ", block (");                                             \
            ck_assert_int_eq(code, 66);                                                                        \
        } else {                                                                                               \
            ck_assert_str_eq(written.c_str(), "");                                                             \
            ck_assert_int_eq(code, 0);                                                                         \
        }                                                                                                      \
    } while (0)

/* sum_kernel with its first barrier forgotten. */
CG_GLOBAL void missing_barrier_kernel(const int *x, int *y) {
    CG_SHARED(int[64], partial);
    partial[threadIdx.x] = x[threadIdx.x];
    if (threadIdx.x < 32) partial[threadIdx.x] += partial[threadIdx.x + 32];
    __syncthreads();
    if (threadIdx.x == 0) {
        *y = 0;
        for (int i = 0; i < 32; i++) *y += partial[i];
    }
}

START_TEST(a_missing_barrier_shows) {
    int x[64], y = 0;
    std::fill(x, x + 64, 1);
    if (!thread_sanitizer) {
        int wrong = 0;
        for (uint64_t seed = 0; seed < seeds; seed++) {
            cg_host_seed(seed);
            RUN(missing_barrier_kernel, 1, 64, 0, x, &y);
            wrong += y != 64;
        }
        ck_assert_int_eq(wrong,
                         seeds); /* 32 reads that each find the write or the poison: luck has no chance */
    }
    if (thread_sanitizer) EXPECT_RACE("missing_barrier_kernel", missing_barrier_kernel, 1, 64, 0, x, &y);
}
END_TEST

/* Each thread but one reads what its neighbour wrote, without a barrier for the last word. */
CG_GLOBAL void off_by_one_kernel(int where, const float *x, float *y, int n) {
    CG_SHARED(float[5][13], fixed);
    CG_DYNAMIC_SHARED(float, dynamic);
    int i = (int)threadIdx.x;
    float *flat = &fixed[0][0];
    if (where == 0 && i <= n) y[i] = 1;
    if (where == 1 && i <= n) y[0] = x[i];
    if (where == 2 && i <= 65) flat[i] = 1;
    if (where == 3 && i <= n) dynamic[i] = 1;
    if (where == 4 && i == 0) dynamic[-1] = 1;
    if (where == 5 && i == n) y[0] = dynamic[i];
}

START_TEST(an_access_out_of_bounds_shows) {
    const int n = 50;
    static const char *const in_shared[] = {
        "", "", "shared array fixed of 260 bytes", "shared array of the launch", "shared array of the launch",
        ""};
    for (int where = 0; where < 6; where++) {
        std::string written;
        auto run = [&] {
            float *x = (float *)calloc(n, sizeof *x), *y = (float *)calloc(n, sizeof *y);
            LET(off_by_one_kernel, 1, 96, n * sizeof(float), where, x, y, n);
            free(x);
            free(y);
        };
        if (address_sanitizer) {
            ck_assert_int_ne(apart(run, &written), 0);
            expect_words(written, where < 2 ? "AddressSanitizer: heap-buffer-overflow...off_by_one_kernel"
                                            : "AddressSanitizer: use-after-poison...off_by_one_kernel");
            expect_words(written, "(in kernel off_by_one_kernel, block (0,0,0), thread (");
            expect_words(written, where == 0 || where == 2 || where == 3 || where == 4 ? "WRITE of size 4"
                                                                                       : "READ of size 4");
        } else if (*in_shared[where]) { /* without it, writes are noticed, in shared memory alone */
            apart(run, &written);
            expect_words(written, in_shared[where]);
            expect_words(written, "overwritten");
        }
    }
}
END_TEST

CG_GLOBAL void shared_race_kernel(int *y) {
    CG_SHARED(int, count);
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    count += 1; /* atomicAdd was meant */
    __syncthreads();
    if (threadIdx.x == 0) *y = count;
}

/* The sum over a row goes on while the first thread already writes the next one's. */
CG_GLOBAL void next_turn_race_kernel(const int *x, int *y) {
    CG_SHARED(int, shared_value);
    int sum = 0;
    for (int turn = 0; turn < 4; turn++) {
        if (threadIdx.x == 0) shared_value = x[turn];
        __syncthreads();
        sum += shared_value;
    }
    y[threadIdx.x] = sum;
}

/* Shuffles exchange values and order nothing. */
CG_GLOBAL void shuffle_is_no_barrier_kernel(int *y) {
    CG_SHARED(int[32], slot);
    slot[threadIdx.x] = (int)threadIdx.x;
    int first = __shfl_sync(ALL, (int)threadIdx.x, 0);
    y[threadIdx.x] = slot[31 - threadIdx.x] + first;
}

/* Each block takes up what another block left. */
CG_GLOBAL void between_blocks_kernel(int *y) {
    if (threadIdx.x == 0) y[0] += 1;
}

/* A plain read beside atomics. */
CG_GLOBAL void half_atomic_kernel(int *y) {
    if (threadIdx.x == 5)
        y[1] = y[0];
    else
        atomicAdd(&y[0], 1);
}

START_TEST(races_show) {
    int x[4] = {1, 2, 3, 4}, y[64] = {};
    EXPECT_RACE("shared_race_kernel", shared_race_kernel, 1, 64, 0, y);
    EXPECT_RACE("next_turn_race_kernel", next_turn_race_kernel, 1, 64, 0, x, y);
    EXPECT_RACE("shuffle_is_no_barrier_kernel", shuffle_is_no_barrier_kernel, 1, 32, 0, y);
    EXPECT_RACE("between_blocks_kernel", between_blocks_kernel, 4, 1, 0, y);
    EXPECT_RACE("half_atomic_kernel", half_atomic_kernel, 1, 32, 0, y);
}
END_TEST

/* Copies into the buffer that the others still read. */
template <bool WAITS> CG_GLOBAL void pipeline_kernel(const float4 *from, float *sum, int n) {
    CG_SHARED(float4[32], buffer);
    float total = 0;
    for (int i = 0; i < n; i++) {
        cg_cp_async_16(&buffer[threadIdx.x], &from[32 * i + threadIdx.x]);
        cg_cp_async_commit();
        if (WAITS || i == n - 1) cg_cp_async_wait<0>();
        __syncthreads();
        total += buffer[(threadIdx.x + 1) % 32].x;
        __syncthreads();
    }
    sum[threadIdx.x] = total;
}

START_TEST(a_missing_wait_shows) {
    std::vector<float4> from(96, make_float4(1, 0, 0, 0));
    float sum[32];
    RUN(pipeline_kernel<true>, 1, 32, 0, from.data(), sum, 3);
    for (float s : sum) ck_assert_float_eq(s, 3);
    RUN(pipeline_kernel<false>, 1, 32, 0, from.data(), sum, 3);
    for (float s : sum) ck_assert(isnan(s));
}
END_TEST

} // namespace

int main(void) {
    const TTest *const tests[] = {every_thread_of_every_block_runs_once,
                                  arguments_are_converted,
                                  impossible_launches,
                                  a_seed_gives_one_order_and_seeds_give_all,
                                  barriers_order_shared_memory,
                                  barriers_vote,
                                  shared_memory_starts_poisoned,
                                  shared_memory_is_limited,
                                  shuffles,
                                  votes_and_masks,
                                  syncwarp_orders_memory,
                                  atomics,
                                  fences_order_memory,
                                  small_functions,
                                  tensor_cores_multiply,
                                  ldmatrix_layout,
                                  copies_appear_at_their_wait,
                                  faulty_copies,
                                  divergent_barriers,
                                  divergent_warps,
                                  a_missing_barrier_shows,
                                  an_access_out_of_bounds_shows,
                                  races_show,
                                  a_missing_wait_shows};
    Suite *suite = suite_create("cuda_host");
    TCase *tcase = tcase_create(cg_host_mode);
    tcase_set_timeout(tcase, 120);
    suite_add_tcase(suite, tcase);
    for (const TTest *test : tests) tcase_add_test(tcase, test);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
