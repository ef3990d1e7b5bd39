/* The device of the suites of ops/cuda, the CPU in the place of one or a real one (tests/CMakeLists.txt), with its preferred
 * kernels. */
#ifndef CG_TESTS_CUDA_DEVICE_H
#define CG_TESTS_CUDA_DEVICE_H

#include "tests/support.h"

#include "ops/cuda/cuda_ops.h"
#include "ops/cuda/host/device_host.h"

static cg_device *device;
static cg_backend backend;

static inline void open_device(void) {
    cg_error error = {0};
    if (!(device = cg_device_open(0, &error)) || !cg_cuda_backend(&backend, device, NULL, &error))
        ck_abort_msg("%s", error.text);
}

static inline bool device_is_emulated(void) {
    cg_device_facts facts;
    cg_device_facts_of(device, &facts);
    return facts.emulated;
}

/* What blocks had since the last call is what the variant claims for the node, but for 1024 bytes of static arrays: one
 * that claims less is chosen where it cannot run, one that claims more is not where it can. */
static inline void expect_shared(const cg_cuda_variant *variant, const cg_node *node) {
    const size_t most = cg_device_host_most_shared(),
                 claim = variant->shared ? variant->shared(node) : (size_t)48 << 10;
    if (most > claim || (most && variant->shared && most + 1024 < claim))
        ck_abort_msg("%s, variant %s claims %zu bytes of shared memory, its blocks had %zu", node->op->name,
                     variant->name, claim, most);
}

/* All that was asked of it has been given back. */
static inline void close_device(void) {
    ck_assert_int_eq(cg_device_asked_bytes(device), 0);
    cg_device_close(device);
}

#endif
