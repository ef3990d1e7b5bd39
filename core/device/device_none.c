/* Built without CUDA: there is no device, and so nothing else here is ever reached. */
#include "core/device/device.h"

#include <string.h>

static bool none(cg_error *error) {
    return cg_fail(error, CG_NO_DEVICE, "this program was built without CUDA");
}

cg_device *cg_device_open(int index, cg_error *error) {
    (void)index;
    none(error);
    return NULL;
}

void cg_device_close(cg_device *device) { (void)device; }

void cg_device_facts_of(const cg_device *device, cg_device_facts *facts) {
    (void)device;
    memset(facts, 0, sizeof *facts);
}

bool cg_device_free_bytes(const cg_device *device, int64_t *bytes, cg_error *error) {
    (void)device, (void)bytes;
    return none(error);
}

void *cg_device_alloc(cg_device *device, int64_t bytes, cg_error *error) {
    (void)device, (void)bytes;
    none(error);
    return NULL;
}

void cg_device_free(cg_device *device, void *memory) { (void)device, (void)memory; }
int64_t cg_device_asked_bytes(const cg_device *device) { return (void)device, 0; }
int64_t cg_device_asked_peak(const cg_device *device) { return (void)device, 0; }

bool cg_device_write(cg_device *device, void *to, const void *from_host, int64_t bytes, cg_error *error) {
    (void)device, (void)to, (void)from_host, (void)bytes;
    return none(error);
}

bool cg_device_read(cg_device *device, void *to_host, const void *from, int64_t bytes, cg_error *error) {
    (void)device, (void)to_host, (void)from, (void)bytes;
    return none(error);
}

bool cg_device_copy(cg_device *device, void *to, const void *from, int64_t bytes, cg_error *error) {
    (void)device, (void)to, (void)from, (void)bytes;
    return none(error);
}

bool cg_device_fill(cg_device *device, void *to, unsigned char byte, int64_t bytes, cg_error *error) {
    (void)device, (void)to, (void)byte, (void)bytes;
    return none(error);
}

bool cg_device_wait(cg_device *device, cg_error *error) {
    (void)device;
    return none(error);
}

cg_stream *cg_device_stream(cg_device *device) { return (void)device, NULL; }
void *cg_stream_handle(const cg_stream *stream) { return (void)stream, NULL; }

cg_event *cg_event_new(cg_device *device, cg_error *error) {
    (void)device;
    none(error);
    return NULL;
}

void cg_event_free(cg_event *event) { (void)event; }

bool cg_event_mark(cg_event *event, cg_error *error) {
    (void)event;
    return none(error);
}

bool cg_event_elapsed(const cg_event *begin, const cg_event *end, double *us, cg_error *error) {
    (void)begin, (void)end, (void)us;
    return none(error);
}

bool cg_device_record_begin(cg_device *device, cg_error *error) {
    (void)device;
    return none(error);
}

cg_recording *cg_device_record_end(cg_device *device, cg_error *error) {
    (void)device;
    none(error);
    return NULL;
}

bool cg_device_play(cg_device *device, cg_recording *recording, cg_error *error) {
    (void)device, (void)recording;
    return none(error);
}

void cg_recording_free(cg_recording *recording) { (void)recording; }
size_t cg_device_gemm_workspace(const cg_device_gemm *gemm) { return (void)gemm, 0; }

bool cg_device_gemm_run(cg_stream *stream, const cg_device_gemm *gemm, const void *a, const void *b, void *c,
                        void *workspace, cg_error *error) {
    (void)stream, (void)gemm, (void)a, (void)b, (void)c, (void)workspace;
    return none(error);
}
