/* DIR/metrics.jsonl: one JSON object per line and step, whole lines only. */
#ifndef CG_TOOLS_RUN_LOG_H
#define CG_TOOLS_RUN_LOG_H

#include <jansson.h>

#include "core/base/error.h"

typedef struct run_log run_log;

/* In the first line of a log that does not begin at step 1, as an older one is gone. */
#define RUN_LOG_BEGINS "log_begins"

/* What DIR/metrics.jsonl holds of the steps up to keep_step. Their lines must stand there one by one; the first that
 * does not is named. What comes behind them is not looked at. */
typedef struct run_log_past {
    json_t *first, *last; /* the objects of the first line and of keep_step's; NULL: there is no log */
    int64_t reached; /* the first step before keep_step whose val_accuracy is at least `accuracy`; 0: none */
} run_log_past;

bool run_log_read(const char *dir, int64_t keep_step, double accuracy, run_log_past *past, cg_error *error);

/* Does the line of a step hold an evaluation whose val_accuracy is at least this? */
bool run_log_reaches(const json_t *line, double accuracy);

/* Open DIR/metrics.jsonl. The lines behind the first n_lines are dropped: a resumed run writes them again. The
 * last one that stays is replaced by `last` (NULL: it stays as it is). */
run_log *run_log_open(const char *dir, int64_t n_lines, const json_t *last, cg_error *error);

/* Append one line; takes over `line`. When the disk is full the file is cut back to whole lines. */
bool run_log_write(run_log *log, json_t *line, cg_error *error);

bool run_log_sync(run_log *log, cg_error *error);
bool run_log_close(run_log *log, cg_error *error); /* fsync; NULL is fine */

#endif
