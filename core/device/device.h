/* A device with memory of its own that runs work in order: one narrow front over CUDA, with no CUDA type in it.
 *
 * Three implementations, chosen when a program is linked: core/device/device_cuda.c (the CUDA runtime, and cuBLAS loaded when
 * it is first needed), core/device/device_none.c (built without CUDA: opening fails), and ops/cuda/host/device_host.cpp (the
 * CPU in the place of a device, for tests).
 *
 * Everything is queued on one stream and runs in order; the calls that wait say so. A call that fails says what the
 * driver said. Errors of queued work come from whichever later call notices them, cg_device_wait at the latest, and
 * after such an error the device is of no further use.
 */
#ifndef CG_CORE_DEVICE_H
#define CG_CORE_DEVICE_H

#include "core/math/gemm.h"

typedef struct cg_device cg_device;
typedef struct cg_stream cg_stream;
typedef struct cg_event cg_event;
typedef struct cg_recording cg_recording;

/* Open device number `index`, counted from 0. NULL with CG_NO_DEVICE and the driver's reason when it cannot be used.
 * The same device may be opened more than once. NULL is fine to close. */
cg_device *cg_device_open(int index, cg_error *error);
void cg_device_close(cg_device *device);

typedef struct cg_device_facts {
    char name[128];
    int sm; /* compute capability: 80 is 8.0 */
    int multiprocessors;
    size_t shared_bytes; /* the most shared memory that a block may have */
    int64_t memory_bytes;
    char driver[64]; /* version of the driver, of the runtime and of cuBLAS, as far as loaded */
    bool emulated;   /* the CPU in the place of a device */
} cg_device_facts;

void cg_device_facts_of(const cg_device *device, cg_device_facts *facts);

/* Memory that no one uses, as the driver reports it. */
bool cg_device_free_bytes(const cg_device *device, int64_t *bytes, cg_error *error);

/* Memory of the device, on a multiple of 256 bytes; its contents are anything. NULL with a sentence when the driver
 * refuses. Freeing waits for all queued work. */
void *cg_device_alloc(cg_device *device, int64_t bytes, cg_error *error);
void cg_device_free(cg_device *device, void *memory);

/* Bytes asked of the driver by cg_device_alloc and not freed: now, and the most so far. */
int64_t cg_device_asked_bytes(const cg_device *device);
int64_t cg_device_asked_peak(const cg_device *device);

/* Copies, queued. write: from memory of the host, which may change once the call is back. read waits until the data are
 * there. */
bool cg_device_write(cg_device *device, void *to, const void *from_host, int64_t bytes, cg_error *error);
bool cg_device_read(cg_device *device, void *to_host, const void *from, int64_t bytes, cg_error *error);
bool cg_device_copy(cg_device *device, void *to, const void *from, int64_t bytes, cg_error *error);
bool cg_device_fill(cg_device *device, void *to, unsigned char byte, int64_t bytes, cg_error *error);

/* Wait for all queued work. */
bool cg_device_wait(cg_device *device, cg_error *error);

/* The stream that kernels are launched on, and what CUDA calls it (cudaStream_t). */
cg_stream *cg_device_stream(cg_device *device);
void *cg_stream_handle(const cg_stream *stream);

/* A mark in the stream. elapsed waits for `end` and gives the time between two marks. */
cg_event *cg_event_new(cg_device *device, cg_error *error);
void cg_event_free(cg_event *event);
bool cg_event_mark(cg_event *event, cg_error *error);
bool cg_event_elapsed(const cg_event *begin, const cg_event *end, double *us, cg_error *error);

/* Record what is queued between begin and end (launches, products, copy and fill; no write, read, alloc or wait)
 * instead of running it, and play it as often as wanted: a CUDA graph. After begin, end must be called in any case; it
 * gives NULL with a sentence when something in between cannot be recorded. */
bool cg_device_record_begin(cg_device *device, cg_error *error);
cg_recording *cg_device_record_end(cg_device *device, cg_error *error);
bool cg_device_play(cg_device *device, cg_recording *recording, cg_error *error);
void cg_recording_free(cg_recording *recording);

/* n_batch products of one shape, row-major as in core/math/gemm.h: number i reads A + i * stride_a (elements; 0: the same
 * for all). each.dtype CG_F32: in full f32 unless tf32. */
typedef struct cg_device_gemm {
    cg_gemm each;
    int64_t n_batch, stride_a, stride_b, stride_c;
    bool tf32;
} cg_device_gemm;

/* Bytes of workspace that cg_device_gemm_run needs. */
size_t cg_device_gemm_workspace(const cg_device_gemm *gemm);

/* Queue the products. The same bits every time, on the same device with the same libraries. */
bool cg_device_gemm_run(cg_stream *stream, const cg_device_gemm *gemm, const void *a, const void *b, void *c,
                        void *workspace, cg_error *error);

#endif
