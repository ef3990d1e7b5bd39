/* All compressed rows that a row sees: see ops/csa/visible_indices.c. A block takes a row at a time. */
#include "ops/cuda/kernel.cuh"

namespace {

enum { THREADS = 128 };

void describe(const cg_run_args *args, const cg_device_fault *fault, cg_error *error) {
    cg_fail(error, CG_BAD_INPUT, "row %lld sees %lld compressed rows, expected 0 to the width %lld",
            (long long)fault->place, (long long)fault->got[0], (long long)args->out[0].shape.dims[1]);
}

CG_GLOBAL void visible_indices_kernel(const int32_t *rows, int32_t *index, int64_t n_rows, int64_t width,
                                      cg_device_fault *fault) {
    for (int64_t t = blockIdx.x; t < n_rows; t += gridDim.x) {
        const int32_t first = rows[t * CG_ROW_FIELDS + CG_ROW_COMPRESSED];
        const int32_t visible = rows[t * CG_ROW_FIELDS + CG_ROW_VISIBLE];
        if ((visible < 0 || visible > width) && threadIdx.x == 0) cg_report(fault, 1, t, visible);
        for (int64_t j = threadIdx.x; j < width; j += THREADS)
            index[t * width + j] = j < visible ? (int32_t)(first + j) : -1;
    }
}

bool visible_indices(const cg_run_args *args, cg_stream *stream) {
    const int64_t *index = args->out[0].shape.dims;
    return CG_LAUNCH(visible_indices_kernel, cg_blocks(index[0], 1), THREADS, 0, stream,
                     (const int32_t *)args->in[0].data, (int32_t *)args->out[0].data, index[0], index[1],
                     args->fault);
}

} // namespace

extern "C" const cg_cuda_op cg_cuda_visible_indices = {
    .op = "visible_indices",
    .variants = {{.name = "plain", .launch = {nullptr, nullptr, visible_indices}}},
    .describe = describe,
};
