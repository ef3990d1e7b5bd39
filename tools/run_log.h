/* DIR/metrics.jsonl: one JSON object per line and step, whole lines only. */
#ifndef CG_TOOLS_RUN_LOG_H
#define CG_TOOLS_RUN_LOG_H

#include <jansson.h>

#include "core/error.h"

typedef struct run_log run_log;

/* In the first line of a log that does not begin at step 1, as an older one is gone. */
#define RUN_LOG_BEGINS "log_begins"

/* What DIR/metrics.jsonl holds of the steps up to keep_step: `first` gets the object of its first line, `last`
 * that of keep_step (NULL: there is no log). Their lines must stand there one by one; the first that does not
 * is named. What comes behind them is not looked at. */
bool run_log_read(const char *dir, int64_t keep_step, json_t **first, json_t **last, cg_error *error);

/* Open DIR/metrics.jsonl. The lines behind the first n_lines are dropped: a resumed run writes them again. The
 * last one that stays is replaced by `last` (NULL: it stays as it is). */
run_log *run_log_open(const char *dir, int64_t n_lines, const json_t *last, cg_error *error);

/* Append one line; takes over `line`. When the disk is full the file is cut back to whole lines. */
bool run_log_write(run_log *log, json_t *line, cg_error *error);

bool run_log_sync(run_log *log, cg_error *error);
bool run_log_close(run_log *log, cg_error *error); /* fsync; NULL is fine */

#endif
