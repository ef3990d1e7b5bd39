/* Says what device number 0 is, for tools/gpu-check: two lines, its compute capability as CMake names it (90 is 9.0) and a
 * sentence. Ends with 77 and the driver's reason where none can be used. */
#include <stdio.h>

#include "core/device/device.h"

int main(void) {
    cg_error error = {0};
    cg_device *device = cg_device_open(0, &error);
    if (!device) {
        fprintf(stderr, "%s\n", error.text);
        return (int)error.code;
    }
    cg_device_facts f;
    cg_device_facts_of(device, &f);
    printf("%d\n%s, compute capability %d.%d, %d multiprocessors, %.1f GiB; %s\n", f.sm, f.name, f.sm / 10,
           f.sm % 10, f.multiprocessors, (double)f.memory_bytes / 1073741824, f.driver);
    cg_device_close(device);
    return 0;
}
