/* Preloaded into a program (LD_PRELOAD), makes memory run out at a chosen moment, in libraries too: with FAIL_ALLOC=N the
 * N-th request is refused, with FAIL_ALLOC=N+ that one and all behind it, with FAIL_ALLOC=0 none. Requests count from 1 in
 * each program that is started; a forked process goes on counting. How many there were is written to the file
 * FAIL_ALLOC_COUNT, if there is that variable, at a regular end.
 *
 * Refused are the C library's allocations and the anonymous mappings. */
#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

/* The C library's own, below what is replaced here. */
void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t n, size_t bytes);
void *__libc_realloc(void *old, size_t bytes);
void *__libc_memalign(size_t alignment, size_t bytes);

static atomic_long requests;
static long first;
static bool all_behind;

static void __attribute__((constructor)) read_plan(void) {
    const char *text = getenv("FAIL_ALLOC");
    char *end = NULL;
    atomic_store(&requests, 0);
    if (!text) return;
    first = strtol(text, &end, 10);
    all_behind = *end == '+';
}

static void __attribute__((destructor)) write_count(void) {
    long n = atomic_load(&requests);
    const char *path = getenv("FAIL_ALLOC_COUNT");
    first = 0;
    FILE *file = path ? fopen(path, "w") : NULL;
    if (!file) return;
    fprintf(file, "%ld\n", n);
    fclose(file);
}

static bool refused(void) {
    long n = atomic_fetch_add(&requests, 1) + 1;
    bool now = first > 0 && (all_behind ? n >= first : n == first);
    if (now) errno = ENOMEM;
    return now;
}

void *malloc(size_t bytes) { return refused() ? NULL : __libc_malloc(bytes); }

void *calloc(size_t n, size_t bytes) { return refused() ? NULL : __libc_calloc(n, bytes); }

void *realloc(void *old, size_t bytes) { return refused() ? NULL : __libc_realloc(old, bytes); }

void *memalign(size_t alignment, size_t bytes) { return refused() ? NULL : __libc_memalign(alignment, bytes); }

void *aligned_alloc(size_t alignment, size_t bytes) { return memalign(alignment, bytes); }

int posix_memalign(void **block, size_t alignment, size_t bytes) {
    int before = errno;
    void *got = memalign(alignment, bytes);
    errno = before;
    if (!got) return ENOMEM;
    *block = got;
    return 0;
}

void *mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset) {
    if ((flags & MAP_ANONYMOUS) && refused()) return MAP_FAILED;
    return (void *)syscall(SYS_mmap, at, bytes, protection, flags, fd, offset);
}
