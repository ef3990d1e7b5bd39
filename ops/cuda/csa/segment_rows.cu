/* What every packed row needs to know of its segment: see ops/csa/segment_rows.c.
 *
 * One block checks the offsets and adds up the compressed rows of the segments; then each row, and each compressed row,
 * looks for its segment. */
#include "ops/cuda/reduce.cuh"

namespace {

enum { THREADS = 256 };
enum { BAD_FIRST = 1, BAD_SEGMENT, BAD_CAPACITY }; /* checks, in the order of the CPU kernel */
enum {
    DECREASING,
    BEYOND,
    BAD_LENGTH,
    SEGMENT_CHECKS
}; /* of one segment: place is SEGMENT_CHECKS * segment + one */

struct segments {
    int64_t n, n_rows, ratio, capacity;
};

void describe(const cg_run_args *args, const cg_device_fault *fault, cg_error *error) {
    const segment_rows_attr *attr = (const segment_rows_attr *)args->attr;
    const long long got[] = {fault->got[0], fault->got[1]}, b = fault->place / SEGMENT_CHECKS;
    if (fault->what == BAD_FIRST)
        cg_fail(error, CG_BAD_INPUT, "cu_seqlens[0] is %lld, expected 0", got[0]);
    else if (fault->what == BAD_CAPACITY)
        cg_fail(error, CG_BAD_INPUT,
                "the segments make %lld compressed rows at ratio %lld, but the capacity is %lld", got[0],
                (long long)attr->ratio, (long long)attr->capacity);
    else if (fault->place % SEGMENT_CHECKS == DECREASING)
        cg_fail(error, CG_BAD_INPUT, "cu_seqlens[%lld] is %lld, expected at least %lld as before it", b + 1,
                got[0], got[1]);
    else if (fault->place % SEGMENT_CHECKS == BEYOND)
        cg_fail(error, CG_BAD_INPUT, "cu_seqlens[%lld] is %lld, expected at most the %lld rows", b + 1, got[0],
                (long long)attr->n_rows);
    else
        cg_fail(error, CG_BAD_INPUT, "seqlens[%lld] is %lld, expected 0 to the %lld rows of segment %lld", b,
                got[0], got[1], b);
}

CG_DEVICE void check_segment(const int32_t *cu_seqlens, const int32_t *seqlens, int64_t b, int64_t n_rows,
                             cg_device_fault *fault) {
    const int64_t start = cu_seqlens[b], end = cu_seqlens[b + 1], place = b * SEGMENT_CHECKS;
    if (end < start)
        cg_report(fault, BAD_SEGMENT, place + DECREASING, end, start);
    else if (end > n_rows)
        cg_report(fault, BAD_SEGMENT, place + BEYOND, end);
    else if (seqlens && (seqlens[b] < 0 || seqlens[b] > end - start))
        cg_report(fault, BAD_SEGMENT, place + BAD_LENGTH, seqlens[b], end - start);
}

/* One block. Thread i holds a run of segments: it counts their compressed rows, then continues from where the
 * threads before it end. */
CG_GLOBAL void segment_offsets_kernel(const int32_t *cu_seqlens, const int32_t *seqlens, segments s,
                                      int32_t *cu_compressed, cg_device_fault *fault) {
    CG_SHARED(int64_t[THREADS], counts);
    const int64_t first = cg_cut(s.n, THREADS, threadIdx.x), end = cg_cut(s.n, THREADS, threadIdx.x + 1);
    int64_t mine = 0;
    for (int64_t b = first; b < end; b++) {
        check_segment(cu_seqlens, seqlens, b, s.n_rows, fault);
        if (s.ratio) mine += ((int64_t)cu_seqlens[b + 1] - cu_seqlens[b]) / s.ratio;
    }
    counts[threadIdx.x] = mine;
    __syncthreads();
    int64_t before = 0;
    for (unsigned i = 0; i < threadIdx.x; i++) before += counts[i];
    for (int64_t b = first; b < end; b++) {
        cu_compressed[b] = (int32_t)before;
        if (s.ratio) before += ((int64_t)cu_seqlens[b + 1] - cu_seqlens[b]) / s.ratio;
    }
    if (threadIdx.x != THREADS - 1) return;
    cu_compressed[s.n] = (int32_t)before;
    if (cu_seqlens[0] != 0) cg_report(fault, BAD_FIRST, 0, cu_seqlens[0]);
    if (before > s.capacity) cg_report(fault, BAD_CAPACITY, 0, before);
}

/* The last segment that starts at or before i, so the one that holds it where offsets are right; n when i lies behind
 * the last, 0 where they make no sense. */
CG_DEVICE int64_t segment_of(const int32_t *offsets, int64_t n, int64_t i) {
    int64_t low = 0, high = n; /* offsets[low] <= i, offsets[high + 1] > i */
    while (low < high) {
        const int64_t middle = (low + high + 1) / 2;
        if (offsets[middle] <= i)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

CG_GLOBAL void segment_rows_kernel(const int32_t *cu_seqlens, const int32_t *seqlens, segments s,
                                   const int32_t *cu_compressed, int32_t *rows, int32_t *positions) {
    CG_FOR(t, s.n_rows) {
        const int64_t b = segment_of(cu_seqlens, s.n, t);
        const int64_t start = cu_seqlens[b], position = b < s.n ? t - start : -1;
        bool is_real = false;
        if (b < s.n) is_real = position < (seqlens ? seqlens[b] : (int64_t)cu_seqlens[b + 1] - start);
        int32_t *row = rows + t * CG_ROW_FIELDS;
        row[CG_ROW_START] = (int32_t)start;
        row[CG_ROW_POSITION] = (int32_t)position;
        row[CG_ROW_COMPRESSED] = cu_compressed[b];
        row[CG_ROW_VISIBLE] = s.ratio && is_real ? (int32_t)((position + 1) / s.ratio) : 0;
        row[CG_ROW_REAL] = is_real;
        positions[t] = (int32_t)position;
    }
}

CG_GLOBAL void segment_entries_kernel(const int32_t *cu_seqlens, segments s, const int32_t *cu_compressed,
                                      int32_t *entries, int32_t *entry_positions) {
    CG_FOR(c, s.capacity) {
        const int64_t b = segment_of(cu_compressed, s.n, c);
        const int64_t position = (c - cu_compressed[b]) * s.ratio;
        entries[c] = b < s.n ? (int32_t)(cu_seqlens[b] + position) : -1;
        entry_positions[c] = b < s.n ? (int32_t)position : -1;
    }
}

bool segment_rows(const cg_run_args *args, cg_stream *stream) {
    const segment_rows_attr *attr = (const segment_rows_attr *)args->attr;
    const segments s = {args->in[0].shape.dims[0] - 1, attr->n_rows, attr->ratio, attr->capacity};
    const int32_t *cu_seqlens = (const int32_t *)args->in[0].data, *seqlens = (const int32_t *)args->in[1].data;
    int32_t *const out[] = {(int32_t *)args->out[0].data, (int32_t *)args->out[1].data,
                            (int32_t *)args->out[2].data, (int32_t *)args->out[3].data,
                            (int32_t *)args->out[4].data};
    return CG_LAUNCH(segment_offsets_kernel, 1, THREADS, 0, stream, cu_seqlens, seqlens, s, out[4],
                     args->fault) &&
           CG_LAUNCH(segment_rows_kernel, cg_blocks(s.n_rows, 256), 256, 0, stream, cu_seqlens, seqlens, s,
                     out[4], out[0], out[1]) &&
           CG_LAUNCH(segment_entries_kernel, cg_blocks(s.capacity, 256), 256, 0, stream, cu_seqlens, s, out[4],
                     out[2], out[3]);
}

} // namespace

extern "C" const cg_cuda_op cg_cuda_segment_rows = {
    .op = "segment_rows",
    .variants = {{.name = "plain", .launch = {nullptr, nullptr, segment_rows}}},
    .describe = describe,
};
