#define _GNU_SOURCE /* RTLD_DEFAULT */
#include "tools/out_of_memory.h"

#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/base/file.h"
#include "core/math/gemm.h"

static const char *speaker = "csagrad";
static pid_t speaks; /* for a forked process its parent will */

/* Also for a signal handler. What standard output still holds is dropped: half a text is worse than none. */
void tool_out_of_memory(void) {
    char text[160]; /* no stream: it may want a buffer */
    if (getpid() != speaks) _exit(CG_FAILED);
    cg_file_remove_unfinished();
    int n = snprintf(text, sizeof text, "%s: out of memory\n", speaker);
    if (write(STDERR_FILENO, text, (size_t)n) < 0) _exit(CG_FAILED);
    _exit(CG_FAILED);
}

void *tool_realloc(void *old, size_t bytes) {
    void *block = realloc(old, bytes ? bytes : 1);
    if (!block) tool_out_of_memory();
    return block;
}

void *tool_malloc(size_t bytes) { return tool_realloc(NULL, bytes); }

/* oneDNN allocates small blocks while a kernel is made or called, and uses some of them unseen. A fault in there is taken
 * for that; any other is what it would be without this handler. */
static struct sigaction before;

static void on_fault(int number) {
    if (cg_in_onednn) tool_out_of_memory();
    sigaction(number, &before, NULL); /* the same instruction faults again */
}

void tool_end_without_memory(const char *program) {
    speaker = program;
    speaks = getpid();
    /* std::set_new_handler, where the C++ library is loaded: called instead of throwing from operator new */
    void *(*set_new_handler)(void (*)(void));
    *(void **)&set_new_handler = dlsym(RTLD_DEFAULT, "_ZSt15set_new_handlerPFvvE");
    if (set_new_handler) set_new_handler(tool_out_of_memory);
    struct sigaction action = {.sa_handler = on_fault};
    sigaction(SIGSEGV, &action, &before);
}
