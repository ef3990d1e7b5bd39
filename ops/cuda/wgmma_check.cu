/* Does wgmma do here what its emulation does? Whole numbers, whose sums are exact, multiplied in the forms that kernels use,
 * by wgmma and by mma.sync: the same bits, or no variant is made of it. A mistake in a descriptor would change nearly all of
 * them. Run once for each backend on a device of sm_90; a launch of one block. */
#include "ops/cuda/wgmma.cuh"

namespace {

enum { NUMBERS = 3 * 128 * 128 }; /* in shared memory; all tiles are views of them */

enum { PART = 4 }; /* fragments that mma.sync makes at a time */

/* How many of this thread's sums differ; other(y, i) makes fragments i .. i + PART - 1, added to what is in y. */
template <int N, typename Other>
CG_DEVICE int differences(const float (&x)[N][4], float before, const Other &other) {
    int n = 0;
#pragma unroll
    for (int i = 0; i < N; i += PART) {
        float y[PART][4];
        for (int k = 0; k < PART; k++) y[k][0] = y[k][1] = y[k][2] = y[k][3] = before;
        other(y, i);
        for (int k = 0; k < PART; k++)
            for (int e = 0; e < 4; e++) n += !(x[i + k][e] == y[k][e]);
    }
    return n;
}

/* Rows by rows: 64 from a_row0 on by 8 N from b_row0 on, over several slabs. */
template <int N, typename A, typename B> CG_DEVICE int rows_differ(A a, int a_row0, B b, int b_row0) {
    warpgroup group;
    float x[N][4];
    group.begin();
    group.set_rows(x, a, a_row0, b, b_row0);
    group.commit();
    group.wait<0>(x);
    return differences(x, 0, [&](float(&y)[PART][4], int i) {
        warp_add_rows(y, a, a_row0 + 16 * warpgroup::warp(), b, b_row0 + 8 * i);
    });
}

/* Columns from a piece on, added to what is there. */
template <int N, typename A, typename B> CG_DEVICE int columns_differ(A a, B b, int piece) {
    warpgroup group;
    const float before = (float)threadIdx.x;
    float x[N][4];
    for (int i = 0; i < N; i++) x[i][0] = x[i][1] = x[i][2] = x[i][3] = before;
    group.begin(x);
    group.add_columns(x, a, b, piece);
    group.commit();
    group.wait<0>(x);
    return differences(x, before, [&](float(&y)[PART][4], int i) {
        warp_add_columns(y, a, 16 * warpgroup::warp(), b, piece + i);
    });
}

/* found [2]: is this code made of wgmma (in tests: of its emulation); how many threads found a difference. */
CG_GLOBAL void wgmma_check_kernel(int32_t *found) {
    CG_DYNAMIC_SHARED(cg_bf16, numbers);
    for (int i = (int)threadIdx.x; i < NUMBERS; i += GROUP_THREADS)
        numbers[i] = cg_bf16_from_float((float)((int)((uint32_t)i * 2654435761u >> 16) % 7 - 3));
    warpgroup().shared_written();
    __syncthreads();
    const tile<128, 128> left = {numbers};
    const tile<128, 256> right = {numbers + 128 * 128};
    const tile<64, 64> weights = {numbers};
    const tile<512, 64> keys = {numbers + 64 * 64};
    int different = rows_differ<16>(left, 64, right, 128);
    different += rows_differ<4>(left, 0, right, 32);
    different += columns_differ<32>(weights, keys, 32);
    different = __syncthreads_count(different > 0);
    if (threadIdx.x > 0) return;
#ifdef CG_CUDA_HOST
    found[0] = 1;
#else
    found[0] = CG_WGMMA;
#endif
    found[1] = different;
}

} // namespace

extern "C" bool cg_cuda_try_wgmma(cg_device *device, cg_cuda_wgmma *found, cg_error *error) {
    const cg_run_args launch = {.error = error}, *args = &launch;
    int32_t result[2] = {0, 0};
    void *memory = cg_device_alloc(device, sizeof result, error);
    const bool ok = memory &&
                    CG_LAUNCH(wgmma_check_kernel, 1, GROUP_THREADS, NUMBERS * sizeof(cg_bf16),
                              cg_device_stream(device), (int32_t *)memory) &&
                    cg_device_read(device, result, memory, sizeof result, error);
    cg_device_free(device, memory);
    *found = !result[0] ? CG_WGMMA_NONE : result[1] ? CG_WGMMA_DIFFERS : CG_WGMMA_WORKS;
    return ok;
}
