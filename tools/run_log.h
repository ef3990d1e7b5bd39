/* DIR/metrics.jsonl: one JSON object per line and step, whole lines only. */
#ifndef CG_TOOLS_RUN_LOG_H
#define CG_TOOLS_RUN_LOG_H

#include <jansson.h>

#include "core/error.h"

typedef struct run_log run_log;

/* Open DIR/metrics.jsonl. Lines of steps behind `keep_step` and lines without a step are dropped: a resumed run
 * writes them again. keep_step 0 makes an empty file. The line of keep_step itself loses the keys of `drop` (NULL:
 * none; NULL ends the list). `first` receives the object of step 1 (NULL when absent). */
run_log *run_log_open(const char *dir, int64_t keep_step, const char *const *drop, json_t **first,
                      cg_error *error);

/* Append one line; takes over `line`. When the disk is full the file is cut back to whole lines. */
bool run_log_write(run_log *log, json_t *line, cg_error *error);

bool run_log_sync(run_log *log, cg_error *error);
bool run_log_close(run_log *log, cg_error *error); /* fsync; NULL is fine */

#endif
