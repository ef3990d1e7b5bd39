/* The device over the CUDA runtime, which is linked statically and finds the driver when it is first called, so that
 * the program starts on machines that have none. cuBLAS is loaded at the first product: it is hundreds of megabytes
 * that no other command should wait for. */
#include "core/device/device.h"

#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Scratch for cuBLAS, which takes it in place of memory of its own: enough for what it does on sm_80 by default. */
enum { CUBLAS_BYTES = 4 << 20, CUBLAS_ALIGN = 256 };

typedef struct block {
    void *memory;
    int64_t bytes;
} block;

struct cg_stream {
    cudaStream_t handle;
    cg_device *device;
};

typedef struct cublas {
    void *library;
    cublasHandle_t handle;
    cublasStatus_t (*create)(cublasHandle_t *);
    cublasStatus_t (*destroy)(cublasHandle_t);
    cublasStatus_t (*set_stream)(cublasHandle_t, cudaStream_t);
    cublasStatus_t (*set_workspace)(cublasHandle_t, void *, size_t);
    cublasStatus_t (*get_version)(cublasHandle_t, int *);
    const char *(*status_text)(cublasStatus_t);
    cublasStatus_t (*gemm)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int64_t, int64_t, int64_t,
                           const void *, const void *, cudaDataType, int64_t, long long int, const void *,
                           cudaDataType, int64_t, long long int, const void *, void *, cudaDataType, int64_t,
                           long long int, int64_t, cublasComputeType_t, cublasGemmAlgo_t);
} cublas;

struct cg_device {
    int index;
    cg_stream stream;
    cublas blas;
    cg_device_facts facts;
    block *blocks;
    int n_blocks, blocks_capacity;
    int64_t asked, asked_peak;
};

struct cg_event {
    cudaEvent_t handle;
    cg_device *device;
};

struct cg_recording {
    cudaGraphExec_t handle;
};

static bool failed(cudaError_t status, cg_error *error, const char *what) {
    return cg_fail(error, CG_FAILED, "the device could not %s: %s", what, cudaGetErrorString(status));
}

/* `what` completes "the device could not". */
static bool check(cudaError_t status, cg_error *error, const char *what) {
    return status == cudaSuccess || failed(status, error, what);
}

/* ---- open ---- */

static void read_facts(cg_device *device, const struct cudaDeviceProp *p) {
    cg_device_facts *facts = &device->facts;
    int driver = 0, runtime = 0;
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    snprintf(facts->name, sizeof facts->name, "%.*s", (int)sizeof facts->name - 1, p->name);
    snprintf(facts->driver, sizeof facts->driver, "driver %d.%d, runtime %d.%d", driver / 1000,
             driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    facts->sm = 10 * p->major + p->minor;
    facts->multiprocessors = p->multiProcessorCount;
    facts->shared_bytes = p->sharedMemPerBlockOptin;
    facts->memory_bytes = (int64_t)p->totalGlobalMem;
}

cg_device *cg_device_open(int index, cg_error *error) {
    int n = 0;
    struct cudaDeviceProp properties;
    int driver = 0;
    cudaError_t status = cudaGetDeviceCount(&n);
    if (status != cudaSuccess) { /* without a driver, the reason given is that it is too old */
        bool none = cudaDriverGetVersion(&driver) == cudaSuccess && !driver;
        cg_fail(error, CG_NO_DEVICE, "no CUDA device can be used: %s%s%s",
                none ? "no driver is installed (" : "", cudaGetErrorString(status), none ? ")" : "");
        return NULL;
    }
    if (index < 0 || index >= n) {
        cg_fail(error, CG_NO_DEVICE, "there is no CUDA device number %d, the driver lists %d", index, n);
        return NULL;
    }
    cg_device *device = calloc(1, sizeof *device);
    if (!device) {
        cg_fail(error, CG_FAILED, "out of memory for a device");
        return NULL;
    }
    device->index = index;
    device->stream.device = device;
    status = cudaSetDevice(index);
    if (status == cudaSuccess) status = cudaGetDeviceProperties(&properties, index);
    if (status == cudaSuccess)
        status = cudaStreamCreateWithFlags(&device->stream.handle, cudaStreamNonBlocking);
    if (status != cudaSuccess) {
        cg_fail(error, CG_NO_DEVICE, "CUDA device %d cannot be used: %s", index, cudaGetErrorString(status));
        free(device);
        return NULL;
    }
    read_facts(device, &properties);
    return device;
}

void cg_device_close(cg_device *device) {
    if (!device) return;
    cudaStreamSynchronize(device->stream.handle);
    if (device->blas.handle) device->blas.destroy(device->blas.handle);
    for (int b = 0; b < device->n_blocks; b++) cudaFree(device->blocks[b].memory);
    cudaStreamDestroy(device->stream.handle);
    free(device->blocks);
    free(device); /* the library of cuBLAS stays: unloading it is not supported */
}

void cg_device_facts_of(const cg_device *device, cg_device_facts *facts) { *facts = device->facts; }

bool cg_device_free_bytes(const cg_device *device, int64_t *bytes, cg_error *error) {
    (void)device;
    size_t unused = 0, all = 0;
    if (!check(cudaMemGetInfo(&unused, &all), error, "tell how much memory is free")) return false;
    *bytes = (int64_t)unused;
    return true;
}

/* ---- memory ---- */

void *cg_device_alloc(cg_device *device, int64_t bytes, cg_error *error) {
    if (device->n_blocks == device->blocks_capacity) {
        int capacity = 2 * device->blocks_capacity + 8;
        block *blocks = realloc(device->blocks, (size_t)capacity * sizeof *blocks);
        if (!blocks) {
            cg_fail(error, CG_FAILED, "out of memory for a list of device memory");
            return NULL;
        }
        device->blocks = blocks;
        device->blocks_capacity = capacity;
    }
    void *memory = NULL;
    cudaError_t status = cudaMalloc(&memory, bytes > 0 ? (size_t)bytes : 1);
    if (status != cudaSuccess) {
        int64_t unused = 0;
        cudaGetLastError(); /* too little memory is no lasting error */
        cg_device_free_bytes(device, &unused, NULL);
        cg_fail(error, CG_FAILED, "%s refuses %lld bytes (%lld of its %lld are free): %s", device->facts.name,
                (long long)bytes, (long long)unused, (long long)device->facts.memory_bytes,
                cudaGetErrorString(status));
        return NULL;
    }
    device->blocks[device->n_blocks++] = (block){memory, bytes};
    device->asked += bytes;
    if (device->asked > device->asked_peak) device->asked_peak = device->asked;
    return memory;
}

void cg_device_free(cg_device *device, void *memory) {
    for (int b = 0; memory && b < device->n_blocks; b++) {
        if (device->blocks[b].memory != memory) continue;
        cudaStreamSynchronize(device->stream.handle);
        cudaFree(memory);
        device->asked -= device->blocks[b].bytes;
        device->blocks[b] = device->blocks[--device->n_blocks];
        return;
    }
}

int64_t cg_device_asked_bytes(const cg_device *device) { return device->asked; }
int64_t cg_device_asked_peak(const cg_device *device) { return device->asked_peak; }

/* From pageable memory the copy is made before the call is back, as far as the host's side goes. */
bool cg_device_write(cg_device *device, void *to, const void *from_host, int64_t bytes, cg_error *error) {
    if (!bytes) return true;
    return check(cudaMemcpyAsync(to, from_host, (size_t)bytes, cudaMemcpyHostToDevice, device->stream.handle),
                 error, "take data from the host");
}

bool cg_device_read(cg_device *device, void *to_host, const void *from, int64_t bytes, cg_error *error) {
    if (!bytes) return cg_device_wait(device, error);
    return check(cudaMemcpyAsync(to_host, from, (size_t)bytes, cudaMemcpyDeviceToHost, device->stream.handle),
                 error, "give data to the host") &&
           cg_device_wait(device, error);
}

bool cg_device_copy(cg_device *device, void *to, const void *from, int64_t bytes, cg_error *error) {
    if (!bytes) return true;
    return check(cudaMemcpyAsync(to, from, (size_t)bytes, cudaMemcpyDeviceToDevice, device->stream.handle),
                 error, "copy");
}

bool cg_device_fill(cg_device *device, void *to, unsigned char byte, int64_t bytes, cg_error *error) {
    if (!bytes) return true;
    return check(cudaMemsetAsync(to, byte, (size_t)bytes, device->stream.handle), error, "fill memory");
}

bool cg_device_wait(cg_device *device, cg_error *error) {
    return check(cudaStreamSynchronize(device->stream.handle), error, "finish its work");
}

/* ---- stream, events, recordings ---- */

cg_stream *cg_device_stream(cg_device *device) { return &device->stream; }
void *cg_stream_handle(const cg_stream *stream) { return stream->handle; }

cg_event *cg_event_new(cg_device *device, cg_error *error) {
    cg_event *event = calloc(1, sizeof *event);
    if (!event) {
        cg_fail(error, CG_FAILED, "out of memory for an event");
        return NULL;
    }
    event->device = device;
    if (check(cudaEventCreate(&event->handle), error, "make an event")) return event;
    free(event);
    return NULL;
}

void cg_event_free(cg_event *event) {
    if (!event) return;
    cudaEventDestroy(event->handle);
    free(event);
}

bool cg_event_mark(cg_event *event, cg_error *error) {
    return check(cudaEventRecord(event->handle, event->device->stream.handle), error, "mark the time");
}

bool cg_event_elapsed(const cg_event *begin, const cg_event *end, double *us, cg_error *error) {
    float ms = 0;
    if (!check(cudaEventSynchronize(end->handle), error, "finish its work") ||
        !check(cudaEventElapsedTime(&ms, begin->handle, end->handle), error, "tell the time"))
        return false;
    *us = 1e3 * (double)ms;
    return true;
}

bool cg_device_record_begin(cg_device *device, cg_error *error) {
    return check(cudaStreamBeginCapture(device->stream.handle, cudaStreamCaptureModeThreadLocal), error,
                 "begin a recording");
}

cg_recording *cg_device_record_end(cg_device *device, cg_error *error) {
    cudaGraph_t graph = NULL;
    cg_recording *recording = calloc(1, sizeof *recording);
    bool ok = check(cudaStreamEndCapture(device->stream.handle, &graph), error, "record the work") &&
              (recording || cg_fail(error, CG_FAILED, "out of memory for a recording")) &&
              check(cudaGraphInstantiate(&recording->handle, graph, 0), error, "prepare the recorded work");
    if (graph) cudaGraphDestroy(graph);
    if (ok) return recording;
    free(recording);
    return NULL;
}

bool cg_device_play(cg_device *device, cg_recording *recording, cg_error *error) {
    return check(cudaGraphLaunch(recording->handle, device->stream.handle), error, "play the recorded work");
}

void cg_recording_free(cg_recording *recording) {
    if (!recording) return;
    cudaGraphExecDestroy(recording->handle);
    free(recording);
}

/* ---- products ---- */

static bool find(cublas *blas, const char *name, void *function, cg_error *error) {
    void *found = dlsym(blas->library, name);
    if (!found) return cg_fail(error, CG_NO_DEVICE, "cuBLAS lacks %s: %s", name, dlerror());
    memcpy(function, &found, sizeof found);
    return true;
}

static bool blas_failed(const cublas *blas, cublasStatus_t status, cg_error *error) {
    return cg_fail(error, CG_FAILED, "cuBLAS: %s", blas->status_text(status));
}

/* The library of the toolkit's own version: from where the loader looks, else from the toolkit that built this. */
static bool load_blas(cg_device *device, cg_error *error) {
    static const char *const places[] = {CSAGRAD_CUBLAS, CSAGRAD_CUDA_LIBRARIES "/" CSAGRAD_CUBLAS};
    cublas *blas = &device->blas;
    if (blas->handle) return true;
    for (size_t i = 0; !blas->library && i < sizeof places / sizeof places[0]; i++)
        blas->library = dlopen(places[i], RTLD_NOW | RTLD_LOCAL);
    if (!blas->library) return cg_fail(error, CG_NO_DEVICE, "cuBLAS cannot be loaded: %s", dlerror());
    if (!find(blas, "cublasGetStatusString", &blas->status_text, error) ||
        !find(blas, "cublasCreate_v2", &blas->create, error) ||
        !find(blas, "cublasDestroy_v2", &blas->destroy, error) ||
        !find(blas, "cublasSetStream_v2", &blas->set_stream, error) ||
        !find(blas, "cublasSetWorkspace_v2", &blas->set_workspace, error) ||
        !find(blas, "cublasGetVersion_v2", &blas->get_version, error) ||
        !find(blas, "cublasGemmStridedBatchedEx_64", &blas->gemm, error))
        return false;
    cublasStatus_t status = blas->create(&blas->handle);
    if (status != CUBLAS_STATUS_SUCCESS) {
        blas->handle = NULL;
        return blas_failed(blas, status, error);
    }
    int version = 0;
    size_t used = strlen(device->facts.driver);
    if (blas->get_version(blas->handle, &version) == CUBLAS_STATUS_SUCCESS)
        snprintf(device->facts.driver + used, sizeof device->facts.driver - used, ", cuBLAS %d", version);
    status = blas->set_stream(blas->handle, device->stream.handle);
    return status == CUBLAS_STATUS_SUCCESS || blas_failed(blas, status, error);
}

/* The arena places scratch on multiples of CG_ALIGN, cuBLAS wants larger ones. */
size_t cg_device_gemm_workspace(const cg_device_gemm *gemm) {
    return gemm->each.m && gemm->each.n && gemm->n_batch ? CUBLAS_BYTES + CUBLAS_ALIGN : 0;
}

/* A sum of nothing, which cuBLAS refuses. */
static bool gemm_zeros(cg_stream *stream, const cg_device_gemm *gemm, size_t element, void *c,
                       cg_error *error) {
    const cg_gemm *g = &gemm->each;
    for (int64_t i = 0; i < gemm->n_batch && !g->accumulate; i++) {
        char *each = (char *)c + (size_t)(i * gemm->stride_c) * element;
        if (!check(cudaMemset2DAsync(each, (size_t)g->ldc * element, 0, (size_t)g->n * element, (size_t)g->m,
                                     stream->handle),
                   error, "fill memory"))
            return false;
    }
    return true;
}

bool cg_device_gemm_run(cg_stream *stream, const cg_device_gemm *gemm, const void *a, const void *b, void *c,
                        void *workspace, cg_error *error) {
    const cg_gemm *g = &gemm->each;
    cg_device *device = stream->device;
    cublas *blas = &device->blas;
    const bool c_is_f32 = g->dtype == CG_BF16 && g->c_is_f32;
    if (!g->m || !g->n || !gemm->n_batch) return true;
    if (!g->k) return gemm_zeros(stream, gemm, cg_dtype_bytes(c_is_f32 ? CG_F32 : g->dtype), c, error);
    if (!load_blas(device, error)) return false;
    const double one_f64 = 1, beta_f64 = g->accumulate;
    const float one_f32 = 1, beta_f32 = (float)beta_f64;
    const bool f64 = g->dtype == CG_F64;
    const cudaDataType in = f64 ? CUDA_R_64F : g->dtype == CG_BF16 ? CUDA_R_16BF : CUDA_R_32F;
    const cudaDataType out = c_is_f32 ? CUDA_R_32F : in;
    const cublasComputeType_t compute = f64          ? CUBLAS_COMPUTE_64F
                                        : gemm->tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32
                                                     : CUBLAS_COMPUTE_32F;
    char *scratch = (char *)workspace + CUBLAS_ALIGN - 1;
    scratch -= (uintptr_t)scratch % CUBLAS_ALIGN;
    cublasStatus_t status = blas->set_workspace(blas->handle, scratch, CUBLAS_BYTES);
    /* cuBLAS is column-major: there our rows are columns, and C^T = op(B)^T op(A)^T. */
    if (status == CUBLAS_STATUS_SUCCESS)
        status = blas->gemm(blas->handle, g->trans_b ? CUBLAS_OP_T : CUBLAS_OP_N,
                            g->trans_a ? CUBLAS_OP_T : CUBLAS_OP_N, g->n, g->m, g->k,
                            f64 ? (const void *)&one_f64 : &one_f32, b, in, g->ldb, gemm->stride_b, a, in,
                            g->lda, gemm->stride_a, f64 ? (const void *)&beta_f64 : &beta_f32, c, out, g->ldc,
                            gemm->stride_c, gemm->n_batch, compute, CUBLAS_GEMM_DEFAULT);
    return status == CUBLAS_STATUS_SUCCESS || blas_failed(blas, status, error);
}
