/* What snapshot and trace share: when the steps of a row's plan begin, what the row is called, one whole file. */
#ifndef CG_TOOLS_MEM_EXPORT_H
#define CG_TOOLS_MEM_EXPORT_H

#include "tools/mem.h"

typedef struct mem_schedule {
    int64_t *start_ns; /* [n_steps+1] from 0, rising: step t runs from start_ns[t] to start_ns[t+1] */
    int *step_of;      /* by node number: its step, -1 when the plan leaves it out */
} mem_schedule;

/* Steps follow each other without gaps and take mem_step_us, rounded to whole nanoseconds but at least one, so that
 * every step can be seen and none meets another. Refuses a row without a plan. Free it in any case. */
bool mem_schedule_make(const mem_row *row, mem_schedule *schedule, cg_error *error);
void mem_schedule_free(mem_schedule *schedule);

/* "measured" or "estimated": where the times come from. */
const char *mem_clock_name(const mem_row *row);

/* "recompute, toy dims, S=512, T=1024, f32, times measured" into text; returns text. */
const char *mem_row_text(const mem_row *row, char *text, size_t text_bytes);

/* A file with these bytes; it appears whole or not at all. */
bool mem_file_write(const char *path, const char *data, size_t bytes, cg_error *error);

#endif
