#include "ops/cuda/host/device_host.h"

#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

extern "C" {
#include "core/device/device.h"
}

namespace {

enum { ALIGN = 256 };

[[maybe_unused]] size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

/* ---- memory that can be closed ---- */

struct block {
    char *memory;
    int64_t bytes;
    void *mapping; /* with its guard page; unused under AddressSanitizer */
    size_t mapped;
    bool open;
};

size_t page() { return (size_t)sysconf(_SC_PAGESIZE); }

#if defined(__SANITIZE_ADDRESS__)

bool block_new(block *b) {
    void *memory = nullptr;
    if (posix_memalign(&memory, ALIGN, b->bytes ? (size_t)b->bytes : 1)) return false;
    b->memory = (char *)memory;
    return true;
}

void block_open(const block &b, bool open) {
    if (open)
        ASAN_UNPOISON_MEMORY_REGION(b.memory, (size_t)b.bytes);
    else
        ASAN_POISON_MEMORY_REGION(b.memory, (size_t)b.bytes);
}

void block_free(const block &b) {
    block_open(b, true);
    free(b.memory);
}

#else

/* The block ends at a page that nobody may touch. */
bool block_new(block *b) {
    size_t used = round_up((size_t)b->bytes, ALIGN);
    b->mapped = round_up(used, page()) + page();
    b->mapping = mmap(nullptr, b->mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (b->mapping == MAP_FAILED) return false;
    b->memory = (char *)b->mapping + b->mapped - page() - used;
    return true;
}

void block_open(const block &b, bool open) {
    if (b.mapped > page()) mprotect(b.mapping, b.mapped - page(), open ? PROT_READ | PROT_WRITE : PROT_NONE);
}

void block_free(const block &b) { munmap(b.mapping, b.mapped); }

#endif

size_t shared_bytes = (size_t)227 << 10; /* of sm_90, as cuda_host.cpp has them */

double now_us() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

} // namespace

struct cg_recording {
    std::vector<std::function<bool(cg_error *)>> work;
};

struct cg_stream {
    cg_device *device;
    cg_recording *recording; /* being made, or NULL */
    bool spoiled;            /* something that cannot be recorded came by */
};

struct cg_device {
    cg_stream stream;
    std::vector<block> blocks;
    int64_t asked, asked_peak;
};

struct cg_event {
    double us;
};

namespace {

/* With a block per value, closing all of them around each launch would take longer than the launches; the same work is
 * tested in one arena too. */
const size_t most_closed = 8;

void open_memory(cg_device *device, bool open) {
    for (block &b : device->blocks) {
        if (b.open == open || (!open && device->blocks.size() > most_closed)) continue;
        block_open(b, open);
        b.open = open;
    }
}

bool is_device(const cg_device *device, const void *p, int64_t bytes) {
    for (const block &b : device->blocks)
        if ((const char *)p >= b.memory && (const char *)p + bytes <= b.memory + b.bytes) return true;
    return bytes == 0;
}

bool expect_device(const cg_device *device, const void *p, int64_t bytes, cg_error *error) {
    return is_device(device, p, bytes) ||
           cg_fail(error, CG_FAILED, "the device has no memory of %lld bytes at %p", (long long)bytes, p);
}

/* Work that a recording cannot hold. */
bool expect_direct(cg_device *device, const char *what, cg_error *error) {
    if (!device->stream.recording) return true;
    device->stream.spoiled = true;
    return cg_fail(error, CG_FAILED, "the device cannot %s while it records", what);
}

} // namespace

bool cg_host_queue(cg_stream *stream, const std::function<bool(cg_error *)> &work, cg_error *error) {
    if (stream->recording) {
        stream->recording->work.push_back(work);
        return true;
    }
    open_memory(stream->device, true);
    bool ok = work(error);
    open_memory(stream->device, false);
    return ok;
}

extern "C" {

void cg_device_host_seed(uint64_t seed) { cg_host_seed(seed); }
void cg_device_host_shared(size_t bytes) { shared_bytes = bytes; }
size_t cg_device_host_most_shared(void) { return cg_host_most_shared(); }

/* ---- device, memory ---- */

cg_device *cg_device_open(int index, cg_error *error) {
    if (index) {
        cg_fail(error, CG_NO_DEVICE, "there is no CUDA device number %d, the CPU in its place lists 1", index);
        return nullptr;
    }
    cg_device *device = new cg_device();
    device->stream.device = device;
    return device;
}

void cg_device_close(cg_device *device) {
    if (!device) return;
    for (const block &b : device->blocks) block_free(b);
    delete device;
}

/* Everything that can be emulated is, so it says that it can do all. */
void cg_device_facts_of(const cg_device *, cg_device_facts *facts) {
    *facts = {};
    snprintf(facts->name, sizeof facts->name, "the CPU in the place of a CUDA device");
    snprintf(facts->driver, sizeof facts->driver, "%s", cg_host_mode);
    facts->sm = 90;
    facts->multiprocessors = 1;
    facts->shared_bytes = shared_bytes;
    facts->memory_bytes = (int64_t)sysconf(_SC_PHYS_PAGES) * (int64_t)page();
    facts->emulated = true;
}

bool cg_device_free_bytes(const cg_device *device, int64_t *bytes, cg_error *) {
    cg_device_facts facts;
    cg_device_facts_of(device, &facts);
    *bytes = facts.memory_bytes - device->asked;
    return true;
}

void *cg_device_alloc(cg_device *device, int64_t bytes, cg_error *error) {
    int64_t unused;
    if (!expect_direct(device, "allocate", error)) return nullptr;
    cg_device_free_bytes(device, &unused, nullptr);
    block b = {nullptr, bytes, nullptr, 0, false};
    if (bytes > unused || !block_new(&b)) {
        cg_fail(error, CG_FAILED, "the CPU in the place of a CUDA device refuses %lld bytes", (long long)bytes);
        return nullptr;
    }
    block_open(b, true);
    memset(b.memory, 0xa5, (size_t)bytes);
    block_open(b, false);
    device->blocks.push_back(b);
    device->asked += bytes;
    if (device->asked > device->asked_peak) device->asked_peak = device->asked;
    return b.memory;
}

void cg_device_free(cg_device *device, void *memory) {
    for (size_t i = 0; i < device->blocks.size(); i++) {
        if (device->blocks[i].memory != memory) continue;
        device->asked -= device->blocks[i].bytes;
        block_free(device->blocks[i]);
        device->blocks.erase(device->blocks.begin() + (long)i);
        return;
    }
}

int64_t cg_device_asked_bytes(const cg_device *device) { return device->asked; }
int64_t cg_device_asked_peak(const cg_device *device) { return device->asked_peak; }

bool cg_device_write(cg_device *device, void *to, const void *from_host, int64_t bytes, cg_error *error) {
    if (!expect_direct(device, "take data from the host", error) || !expect_device(device, to, bytes, error))
        return false;
    open_memory(device, true);
    if (bytes) memcpy(to, from_host, (size_t)bytes);
    open_memory(device, false);
    return true;
}

bool cg_device_read(cg_device *device, void *to_host, const void *from, int64_t bytes, cg_error *error) {
    if (!expect_direct(device, "give data to the host", error) || !expect_device(device, from, bytes, error))
        return false;
    open_memory(device, true);
    if (bytes) memcpy(to_host, from, (size_t)bytes);
    open_memory(device, false);
    return true;
}

bool cg_device_copy(cg_device *device, void *to, const void *from, int64_t bytes, cg_error *error) {
    if (!expect_device(device, to, bytes, error) || !expect_device(device, from, bytes, error)) return false;
    return cg_host_queue(
        &device->stream,
        [=](cg_error *) {
            if (bytes) memcpy(to, from, (size_t)bytes);
            return true;
        },
        error);
}

bool cg_device_fill(cg_device *device, void *to, unsigned char byte, int64_t bytes, cg_error *error) {
    if (!expect_device(device, to, bytes, error)) return false;
    return cg_host_queue(
        &device->stream,
        [=](cg_error *) {
            if (bytes) memset(to, byte, (size_t)bytes);
            return true;
        },
        error);
}

bool cg_device_wait(cg_device *device, cg_error *error) {
    return expect_direct(device, "be waited for", error);
}

/* ---- stream, events, recordings ---- */

cg_stream *cg_device_stream(cg_device *device) { return &device->stream; }
void *cg_stream_handle(const cg_stream *) { return nullptr; }

cg_event *cg_event_new(cg_device *, cg_error *) { return new cg_event(); }
void cg_event_free(cg_event *event) { delete event; }

bool cg_event_mark(cg_event *event, cg_error *) {
    event->us = now_us();
    return true;
}

bool cg_event_elapsed(const cg_event *begin, const cg_event *end, double *us, cg_error *) {
    *us = end->us - begin->us;
    return true;
}

bool cg_device_record_begin(cg_device *device, cg_error *error) {
    if (!expect_direct(device, "begin a recording", error)) return false;
    device->stream.recording = new cg_recording();
    device->stream.spoiled = false;
    return true;
}

cg_recording *cg_device_record_end(cg_device *device, cg_error *error) {
    cg_recording *recording = device->stream.recording;
    device->stream.recording = nullptr;
    if (recording && !device->stream.spoiled) return recording;
    cg_fail(error, CG_FAILED, "the device could not record the work");
    delete recording;
    return nullptr;
}

bool cg_device_play(cg_device *device, cg_recording *recording, cg_error *error) {
    if (!expect_direct(device, "play the recorded work", error)) return false;
    for (const auto &work : recording->work)
        if (!cg_host_queue(&device->stream, work, error)) return false;
    return true;
}

void cg_recording_free(cg_recording *recording) { delete recording; }

/* ---- products ---- */

size_t cg_device_gemm_workspace(const cg_device_gemm *gemm) {
    return gemm->each.dtype == CG_BF16 ? 0 : cg_gemm_serial_workspace(&gemm->each);
}

} // extern "C"

namespace {

float bf16_at(const void *data, int64_t i) { return cg_bf16_to_float(((const cg_bf16 *)data)[i]); }

void gemm_bf16(const cg_device_gemm &gemm, const void *a, const void *b, void *c) {
    const cg_gemm &g = gemm.each;
    for (int64_t i = 0; i < g.m; i++)
        for (int64_t j = 0; j < g.n; j++) {
            float *c_f32 = (float *)c + i * g.ldc + j;
            cg_bf16 *c_bf16 = (cg_bf16 *)c + i * g.ldc + j;
            float sum = !g.accumulate ? 0 : gemm.each.c_is_f32 ? *c_f32 : cg_bf16_to_float(*c_bf16);
            for (int64_t k = 0; k < g.k; k++)
                sum += bf16_at(a, g.trans_a ? k * g.lda + i : i * g.lda + k) *
                       bf16_at(b, g.trans_b ? j * g.ldb + k : k * g.ldb + j);
            if (gemm.each.c_is_f32)
                *c_f32 = sum;
            else
                *c_bf16 = cg_bf16_from_float(sum);
        }
}

bool gemm_one(const cg_device_gemm &gemm, int64_t i, const void *a, const void *b, void *c, void *workspace,
              cg_error *error) {
    const int64_t size = (int64_t)cg_dtype_bytes(gemm.each.dtype);
    const char *ai = (const char *)a + i * gemm.stride_a * size,
               *bi = (const char *)b + i * gemm.stride_b * size;
    if (gemm.each.dtype != CG_BF16)
        return cg_gemm_serial(&gemm.each, ai, bi, (char *)c + i * gemm.stride_c * size, workspace, error);
    gemm_bf16(gemm, ai, bi, (char *)c + i * gemm.stride_c * (gemm.each.c_is_f32 ? 4 : 2));
    return true;
}

} // namespace

extern "C" bool cg_device_gemm_run(cg_stream *stream, const cg_device_gemm *gemm, const void *a, const void *b,
                                   void *c, void *workspace, cg_error *error) {
    const cg_device_gemm what = *gemm;
    return cg_host_queue(
        stream,
        [=](cg_error *why) {
            for (int64_t i = 0; i < what.n_batch; i++)
                if (!gemm_one(what, i, a, b, c, workspace, why)) return false;
            return true;
        },
        error);
}
