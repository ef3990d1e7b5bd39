/* The CPU in the place of a device (core/device/device.h), for tests: memory is memory, and what is queued runs at once, or
 * goes to a recording. Launches of the files in ops/cuda come here and run as ops/cuda/host/cuda_host.h says.
 *
 * Memory of the device, while it is few blocks, is closed to everyone but queued work: a launch function that reads its data, or a caller that
 * takes a device pointer for one of its own, ends with a fault. Each block ends where it ends: under AddressSanitizer
 * to the byte, without it to 256 bytes. */
#ifndef TESTS_CUDA_HOST_DEVICE_HOST_H
#define TESTS_CUDA_HOST_DEVICE_HOST_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus

#include <functional>

#include "ops/cuda/host/cuda_host.h"

extern "C" {
#include "graph/backend.h"
}

/* Queue work. What it returns false for, with a sentence, is the failure of this call or of playing the recording. */
bool cg_host_queue(cg_stream *stream, const std::function<bool(cg_error *)> &work, cg_error *error);

/* A launch as queued work. */
template <typename... P, typename... A>
bool cg_host_queue_launch(const cg_run_args *args, const char *name, void (*kernel)(P...), dim3 grid,
                          dim3 block, size_t shared_bytes, cg_stream *stream, A... a) {
    const std::tuple<P...> bound(static_cast<P>(a)...);
    return cg_host_queue(
        stream,
        [=](cg_error *error) {
            const cg_run_args now = {.error = error};
            return std::apply(
                [&](P... p) {
                    return cg_host_launch(&now, name, kernel, grid, block, shared_bytes, stream, p...);
                },
                bound);
        },
        args->error);
}

#undef cg_launch
#define cg_launch(args, kernel, ...) cg_host_queue_launch(args, #kernel, kernel, __VA_ARGS__)

extern "C" {
#endif

/* The seed of the orders of threads and blocks, for C. */
void cg_device_host_seed(uint64_t seed);

/* The most shared memory of a block that the device says it has, from now on. */
void cg_device_host_shared(size_t bytes);

/* The most shared memory that a block had since the last call, static arrays included; 0: nothing was launched. */
size_t cg_device_host_most_shared(void);

#ifdef __cplusplus
}
#endif

#endif
