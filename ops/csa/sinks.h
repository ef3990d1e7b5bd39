/* The sinks that a softmax may hold: a number, or -inf for none. At +inf a head would have no mass left for any key, and
 * its weights would be inf - inf; who hands that over is told so. */
#ifndef CG_OPS_SINKS_H
#define CG_OPS_SINKS_H

#include <math.h>

#include "graph/cases.h"

/* True when each of input i [H] is a number or -inf, or there is no input i. */
static inline bool cg_sinks_fit(const cg_run_args *args, int i) {
    const cg_tensor *sink = &args->in[i];
    for (int64_t h = 0; sink->data && h < sink->shape.dims[0]; h++) {
        const double x = cg_real_get(sink->dtype, sink->data, h);
        if (!(x < INFINITY))
            return cg_fail(args->error, CG_BAD_INPUT, "sink of head %lld is %s, expected a number or -inf",
                           (long long)h, isnan(x) ? "NaN" : "inf");
    }
    return true;
}

#endif
