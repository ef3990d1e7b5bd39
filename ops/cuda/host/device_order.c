/* For suites that run on a device: it orders its threads itself, and has what it has. */
#include "ops/cuda/host/device_host.h"

void cg_device_host_seed(uint64_t seed) { (void)seed; }
void cg_device_host_shared(size_t bytes) { (void)bytes; }
size_t cg_device_host_most_shared(void) { return 0; }
