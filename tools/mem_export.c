#include "tools/mem_export.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "core/base/file.h"

const char *mem_clock_name(const mem_row *row) { return row->m.node_us ? "measured" : "estimated"; }

const char *mem_row_text(const mem_row *row, char *text, size_t text_bytes) {
    snprintf(text, text_bytes, "%s, %s dims, S=%lld, T=%lld, %s, times %s", row->policy, row->dims,
             (long long)row->seq, (long long)row->n_rows, cg_dtype_name(row->dtype), mem_clock_name(row));
    return text;
}

bool mem_schedule_make(const mem_row *row, mem_schedule *schedule, cg_error *error) {
    *schedule = (mem_schedule){0};
    const cg_plan *plan = row->step.plan;
    if (!plan)
        return cg_fail(error, CG_BAD_INPUT, "there is no step to show: %s",
                       row->refused ? row->refused : "nothing was planned");
    schedule->start_ns = malloc(((size_t)plan->n_steps + 1) * sizeof *schedule->start_ns);
    schedule->step_of = malloc(((size_t)plan->graph->n_nodes + 1) * sizeof *schedule->step_of);
    if (!schedule->start_ns || !schedule->step_of)
        return cg_fail(error, CG_FAILED, "out of memory while the times of a step are laid out");
    for (int n = 0; n < plan->graph->n_nodes; n++) schedule->step_of[n] = -1;
    schedule->start_ns[0] = 0;
    for (int t = 0; t < plan->n_steps; t++) {
        int64_t ns = llround(mem_step_us(row, t) * 1e3);
        schedule->start_ns[t + 1] = schedule->start_ns[t] + (ns < 1 ? 1 : ns);
        schedule->step_of[plan->steps[t]->id] = t;
    }
    return true;
}

void mem_schedule_free(mem_schedule *schedule) {
    free(schedule->start_ns);
    free(schedule->step_of);
}

bool mem_file_write(const char *path, const char *data, size_t bytes, cg_error *error) {
    cg_file_writer *writer = cg_file_begin(path, error);
    if (!writer) return false;
    if (cg_file_write(writer, data, bytes, error)) return cg_file_commit(writer, error);
    cg_file_cancel(writer);
    return false;
}
