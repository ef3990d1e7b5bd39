/* What the kernel says about the memory of this process. */
#ifndef CG_CORE_PROCESS_H
#define CG_CORE_PROCESS_H

#include <stdint.h>

/* Bytes in memory now, and the most there ever were; -1 where the kernel does not tell. */
int64_t cg_process_resident_bytes(void);
int64_t cg_process_peak_bytes(void);

/* Start the peak anew from what is in memory now. Where the kernel has no such switch the older peak stays. */
void cg_process_forget_peak(void);

/* The most memory that this process may ever have: the machine's, or less where a limit of its cgroup or of a group
 * around it (v1 or v2; a container has one) or of setrlimit (RLIMIT_AS, RLIMIT_DATA) is below that. */
typedef struct cg_memory_limit {
    int64_t bytes;
    const char *whose; /* for a sentence: "this machine has", "the cgroup of this process may have", ... */
} cg_memory_limit;

/* The kernel's files are read below a folder `root`: "" outside of tests. */
cg_memory_limit cg_process_memory_limit(const char *root);

#endif
