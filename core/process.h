/* What the kernel says about the memory of this process. */
#ifndef CG_CORE_PROCESS_H
#define CG_CORE_PROCESS_H

#include <stdint.h>

/* Bytes in memory now, and the most there ever were; -1 where the kernel does not tell. */
int64_t cg_process_resident_bytes(void);
int64_t cg_process_peak_bytes(void);

/* Start the peak anew from what is in memory now. Where the kernel has no such switch the older peak stays. */
void cg_process_forget_peak(void);

#endif
