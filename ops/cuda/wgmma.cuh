/* Products of a warpgroup, four warps from a multiple of 128 threads on, whose tensor cores read both sides from tiles in
 * shared memory: wgmma of sm_90a. Code for other devices has none, and cuda_ops.c chooses accordingly. In tests the same
 * numbers come to the same threads by ldmatrix and cg_mma_bf16_16x8x16, when they are waited for.
 *
 * x [64, 8 N] lies over the threads as the sums of cg_mma_bf16_16x8x16: warp w of the group has rows 16 w .. 16 w + 15, as
 * float x[N][4]. N is 4, 16 or 32.
 *
 *     warpgroup group;                       per thread; all threads of the group make the same calls
 *     group.shared_written();                before the barrier behind which products read what this thread wrote to shared
 *     __syncthreads();                       memory, or had copied and waited for
 *     group.begin(x);                        x: sums that were touched since their last product
 *     group.add_columns(x, a, b, piece);     or set_rows; as many as wanted
 *     group.commit();
 *     ...                                    neither x nor the tiles may be touched
 *     group.wait<0>(x);                      all but the newest 0 commits are done
 *
 * Tiles have slabs (ops/cuda/tile.cuh) and start on a multiple of 1024 bytes. A tile's descriptor, of section "Asynchronous
 * Warpgroup Level Matrix Instructions" of the PTX ISA, says in bits 0 - 13 where it starts, in 16 - 29 the leading and in
 * 32 - 45 the stride offset, each in units of 16 bytes, and in 62 - 63 how pieces are permuted: 1, within 128 bytes by the
 * number of the row. For a product that is summed over
 *
 *   columns (K-major): the stride is from 8 rows to the next 8, 1024 bytes; no leading offset; 16 columns further are 32
 *     bytes, 64 columns further a slab;
 *   rows (MN-major): the leading offset is from 64 columns to the next 64, a slab; the stride from 8 rows to the next 8,
 *     1024 bytes; 16 rows further are 2048 bytes.
 *
 * wgmma_check.cu tries all of it on the device itself. */
#ifndef CG_OPS_CUDA_WGMMA_CUH
#define CG_OPS_CUDA_WGMMA_CUH

#ifdef CG_CUDA_HOST
#include <functional>
#include <vector>
#endif

#include "ops/cuda/tile.cuh"

/* Is this code compiled for a device that has it? */
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define CG_WGMMA 1
#else
#define CG_WGMMA 0
#endif

namespace {

enum { GROUP_THREADS = 128, GROUP_ALIGN = 1024 };

#if CG_WGMMA

#define CG_TEN(t) "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9,"
#define CG_4(n) "+f"(x[n][0]), "+f"(x[n][1]), "+f"(x[n][2]), "+f"(x[n][3])
#define CG_16(n) CG_4(n), CG_4(n + 1), CG_4(n + 2), CG_4(n + 3)
#define CG_64(n) CG_16(n), CG_16(n + 4), CG_16(n + 8), CG_16(n + 12)
/* sums: names of the registers of x; a, b, add, turned: of the other operands */
#define CG_WGMMA_TEXT(n, sums, a, b, add, turned)                                                              \
    "{ .reg .pred add; setp.ne.b32 add, " add ", 0;\n"                                                         \
    "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" sums "}, " a ", " b ", add, 1, 1, 0, " turned \
    "; }"

/* x = (add: +) a b, 16 products each. TURNED: b is MN-major. */
template <int TURNED> CG_DEVICE void wgmma(float (&x)[4][4], uint64_t a, uint64_t b, int add) {
    asm volatile(CG_WGMMA_TEXT(32, CG_TEN() "%10,%11,%12,%13,%14,%15", "%16", "%17", "%18", "%19")
                 : CG_16(0)
                 : "l"(a), "l"(b), "r"(add), "n"(TURNED));
}
template <int TURNED> CG_DEVICE void wgmma(float (&x)[16][4], uint64_t a, uint64_t b, int add) {
    asm volatile(CG_WGMMA_TEXT(128,
                               CG_TEN() CG_TEN(1) CG_TEN(2) CG_TEN(3) CG_TEN(4) CG_TEN(5) "%60,%61,%62,%63",
                               "%64", "%65", "%66", "%67")
                 : CG_64(0)
                 : "l"(a), "l"(b), "r"(add), "n"(TURNED));
}
template <int TURNED> CG_DEVICE void wgmma(float (&x)[32][4], uint64_t a, uint64_t b, int add) {
    asm volatile(CG_WGMMA_TEXT(256,
                               CG_TEN() CG_TEN(1) CG_TEN(2) CG_TEN(3) CG_TEN(4) CG_TEN(5) CG_TEN(6) CG_TEN(7)
                                   CG_TEN(8) CG_TEN(9) CG_TEN(10)
                                       CG_TEN(11) "%120,%121,%122,%123,%124,%125,%126,%127",
                               "%128", "%129", "%130", "%131")
                 : CG_64(0), CG_64(16)
                 : "l"(a), "l"(b), "r"(add), "n"(TURNED));
}

#undef CG_TEN
#undef CG_4
#undef CG_16
#undef CG_64
#undef CG_WGMMA_TEXT

/* The descriptor of a tile from a row on, a multiple of 8, and a slab; `leading` bytes. */
template <typename Tile> CG_DEVICE uint64_t described(Tile x, int row0, int slab, int leading) {
    const uint32_t start = (uint32_t)__cvta_generic_to_shared(x.data + row0 * Tile::PITCH + slab * Tile::SLAB);
    return (uint64_t)((start & 0x3ffff) >> 4) | (uint64_t)(leading >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 |
           (uint64_t)1 << 62;
}

/* The compiler must neither move what touches x across this place nor keep it elsewhere. */
template <int N> CG_DEVICE void settle(float (&x)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++)
        asm volatile("" : "+f"(x[n][0]), "+f"(x[n][1]), "+f"(x[n][2]), "+f"(x[n][3])::"memory");
}

#endif

/* x += 16 rows of a from a_row0 on times N rows of b from b_row0 on, over all columns: a warp. */
template <int N, typename A, typename B>
CG_DEVICE void warp_add_rows(float (&x)[N][4], A a, int a_row0, B b, int b_row0) {
    const auto a_lane = a_rows<A>(a_row0);
    const auto b_lane = b_rows<B>(b_row0);
    for (int p8 = 0; p8 < A::PIECES; p8 += 8)
#pragma unroll
        for (int p = 0; p < 8; p += 2) {
            uint32_t left[4], right[4];
            load_a_rows(left, a, a_lane, p8, p);
#pragma unroll
            for (int n = 0; n < N; n += 2) {
                load_b_rows(right, down(b, n * 8), b_lane, p8, p);
                cg_mma_bf16_16x8x16(x[n], left, right);
                cg_mma_bf16_16x8x16(x[n + 1], left, right + 2);
            }
        }
}

/* x += 16 rows of a from a_row0 on times columns of b from a piece on, over all columns of a, rows of b: a warp. */
template <int N, typename A, typename B>
CG_DEVICE void warp_add_columns(float (&x)[N][4], A a, int a_row0, B b, int piece) {
    const auto a_lane = a_rows<A>(a_row0);
    const auto b_lane = b_columns<B>(0);
#pragma unroll
    for (int p = 0; p < A::PIECES; p += 2) {
        uint32_t left[4], right[4];
        load_a_rows(left, a, a_lane, p & ~7, p & 7);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            load_b_columns(right, down(b, p * PIECE), b_lane, (piece + n) & ~7, (piece + n) & 7);
            cg_mma_bf16_16x8x16(x[n], left, right);
            cg_mma_bf16_16x8x16(x[n + 1], left, right + 2);
        }
    }
}

struct warpgroup {
    static CG_MEMBER int warp() { return (int)threadIdx.x / 32 % 4; }

    /* x = rows of a times rows of b, over all columns: 64 rows from a_row0 on, 8 N from b_row0 on, multiples of 8. */
    template <int N, typename A, typename B>
    CG_MEMBER void set_rows(float (&x)[N][4], A a, int a_row0, B b, int b_row0) {
        static_assert(A::PIECES == B::PIECES && A::PIECES % 8 == 0, "one sum");
#if CG_WGMMA
        const uint64_t left = described(a, a_row0, 0, 16), right = described(b, b_row0, 0, 16);
#pragma unroll
        for (int p = 0; p < A::PIECES; p += 2) {
            const int within = p % 8 * 16;
            wgmma<0>(x, left + ((p / 8 * A::SLAB * 2 + within) >> 4),
                     right + ((p / 8 * B::SLAB * 2 + within) >> 4), p > 0);
        }
#else
        expect_operands(a, b);
        run([&x, a, a_row0, b, b_row0] {
            for (int n = 0; n < N; n++) x[n][0] = x[n][1] = x[n][2] = x[n][3] = 0;
            warp_add_rows(x, a, a_row0 + 16 * warp(), b, b_row0);
        });
#endif
    }

    /* x += a [64, K] times b [K, columns of 8 N numbers from a piece on]: a has 64 K columns, b as many rows. `piece` is a
     * multiple of 8. */
    template <int N, typename A, typename B> CG_MEMBER void add_columns(float (&x)[N][4], A a, B b, int piece) {
#if CG_WGMMA
        const uint64_t left = described(a, 0, 0, 16), right = described(b, 0, piece / 8, B::SLAB * 2);
#pragma unroll
        for (int p = 0; p < A::PIECES; p += 2)
            wgmma<1>(x, left + ((p / 8 * A::SLAB * 2 + p % 8 * 16) >> 4), right + ((p * PIECE * 128) >> 4), 1);
#else
        expect_operands(a, b);
        run([&x, a, b, piece] { warp_add_columns(x, a, 16 * warp(), b, piece); });
#endif
    }

#if CG_WGMMA
    CG_MEMBER void shared_written() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
    template <typename... X> CG_MEMBER void begin(X &...x) {
        (settle(x), ...);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    }
    CG_MEMBER void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
    template <int LEFT, typename... X> CG_MEMBER void wait(X &...x) {
        asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(LEFT) : "memory");
        (settle(x), ...);
    }
#elif defined CG_CUDA_HOST
    typedef std::vector<std::function<void()>> products;
    std::vector<products> queued; /* commits not waited for, oldest first */
    products open;
    bool begun = false; /* since the last wait */
    warpgroup() {}
    warpgroup(const warpgroup &) = delete;
    void run(const std::function<void()> &product) { open.push_back(product); }
    void shared_written() { cg_host_fence_tiles(); }
    template <typename... X> void begin(X &...) { begun = true; }
    void commit() {
        queued.push_back(open);
        open.clear();
    }
    template <int LEFT, typename... X> void wait(X &...) {
        for (; queued.size() > LEFT; queued.erase(queued.begin()))
            for (const auto &product : queued[0]) product();
        begun = false;
    }
    template <typename A, typename B> void expect_operands(A a, B b) const {
        static_assert(A::SLAB > 0 && B::SLAB > 0, "tiles have slabs");
        if ((uintptr_t)a.data % GROUP_ALIGN || (uintptr_t)b.data % GROUP_ALIGN)
            cg_host_fault(__FILE__, __LINE__,
                          "a tile of a warpgroup does not start on a multiple of 1024 bytes");
        if (!cg_host_tiles_are_fenced())
            cg_host_fault(__FILE__, __LINE__,
                          "a warpgroup multiplies what was written without shared_written() behind it");
        if (!begun) cg_host_fault(__FILE__, __LINE__, "a warpgroup multiplies without begin() before");
    }
#else
    template <typename F> CG_MEMBER void run(const F &) { __trap(); } /* no variant is chosen that comes here */
    CG_MEMBER void shared_written() {}
    template <typename... X> CG_MEMBER void begin(X &...) {}
    CG_MEMBER void commit() {}
    template <int LEFT, typename... X> CG_MEMBER void wait(X &...) {}
    template <typename A, typename B> static CG_MEMBER void expect_operands(A, B) {}
#endif
};

} // namespace

#endif
