/* One target for libFuzzer, built by tools/fuzz with -DFUZZ_TARGET=fuzz_<name>. */
#include "tests/fuzz/targets.h"

#include <errno.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
void *fuzz_mmap(void *place, size_t bytes, int protection, int flags, int fd, off_t offset);
int fuzz_munmap(void *map, size_t bytes);
int fuzz_madvise(void *place, size_t bytes, int advice);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    FUZZ_TARGET(data, size);
    return 0;
}

/* core/base/file.c calls these for mmap, munmap and madvise: a mapping ends at a page, memory from malloc at its last byte, so that
 * AddressSanitizer sees every read past the end of a file. */
void *fuzz_mmap(void *place, size_t bytes, int protection, int flags, int fd, off_t offset) {
    (void)place, (void)protection, (void)flags;
    char *map = malloc(bytes);
    if (map && pread(fd, map, bytes, offset) == (ssize_t)bytes) return map;
    free(map);
    errno = ENOMEM;
    return MAP_FAILED;
}

int fuzz_munmap(void *map, size_t bytes) {
    (void)bytes;
    free(map);
    return 0;
}

int fuzz_madvise(void *place, size_t bytes, int advice) {
    (void)place, (void)bytes, (void)advice;
    return 0;
}
