/* Threads. Results never depend on their number: work is split into pieces whose size depends on shapes
 * alone, every piece is computed by one thread, and pieces are combined in a fixed order.
 */
#ifndef CG_CORE_THREADS_H
#define CG_CORE_THREADS_H

#include <stdint.h>

#include "core/base/error.h"

/* The most threads that may ever run at once: the processors this process may use when first asked. Scratch
 * memory has one slot for each, whatever number is in use, so that plans do not depend on that number. */
int cg_thread_slots(void);

/* Threads in use; all slots unless set. */
int cg_threads(void);

/* Use n threads from now on. Refuses n < 1 and n > cg_thread_slots(). */
bool cg_threads_set(int n, cg_error *error);

/* Slot of the calling thread inside a parallel region, 0 .. cg_threads()-1. */
int cg_thread_slot(void);

#endif
