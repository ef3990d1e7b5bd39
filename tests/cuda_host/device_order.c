/* For suites that run on a device: it orders its threads itself. */
#include "tests/cuda_host/device_host.h"

void cg_device_host_seed(uint64_t seed) { (void)seed; }
