/* One AdamW step in place: see ops/train/adamw.c.
 *
 * 28 bytes an element in f32 (param, m, v and grad read, the first three written): 10^9 parameters take 6.5 ms at 4.3
 * TB/s. Per element a root, a division and a dozen products, some 40 instructions for 7 numbers: 29 * 10^12
 * instructions a second do 0.7 * 10^12 elements, memory 0.15 * 10^12. The numbers of the step cost two powers in f64,
 * by one thread of each block: 1 us, in up to 4096 blocks of which 1000 run at once, 4 us of an update of any size.
 * Expected: 85 to 90 % of 4.3 TB/s for parameters of a million elements on. What limits next: a launch per parameter,
 * which the executor could gather into one. */
#include "ops/cuda/nn/elementwise.cuh"

namespace {

enum { PARAM, M, V, GRAD, NORM, SCHEDULE };
enum { BAD_NORM = 1, BAD_RATE, BAD_STEP }; /* number: what it is */

void describe(const cg_run_args *, const cg_device_fault *fault, cg_error *error) {
    switch (fault->what) {
    case BAD_NORM:
        cg_fail(error, CG_BAD_INPUT, "norm is %g, expected a finite number: a gradient is not finite",
                fault->number);
        break;
    case BAD_RATE:
        cg_fail(error, CG_BAD_INPUT, "schedule holds a rate of %g, expected a finite number from 0 on",
                fault->number);
        break;
    default:
        cg_fail(error, CG_BAD_INPUT, "schedule holds step %g, expected a number from 1 on", fault->number);
    }
}

/* The first thing that forbids a step; 0: nothing. */
CG_DEVICE int wrong_number(double norm, double rate, double step, double *number) {
    *number = norm;
    if (!(norm >= 0 && norm - norm == 0)) return BAD_NORM;
    *number = rate;
    if (!(rate >= 0 && rate - rate == 0)) return BAD_RATE;
    *number = step;
    return step >= 1 && step - step == 0 ? 0 : BAD_STEP;
}

/* An element of param, m, v and grad -> of param, m, v. */
template <typename S> struct adamw_of {
    S b1, c1, b2, c2, eps, decay;       /* of the attributes */
    S clip, rate, correct_m, correct_v; /* of this step */
    CG_MEMBER void operator()(const S *x, S *y) const {
        const S g = clip * x[GRAD];
        const S m = b1 * x[M] + c1 * g, v = b2 * x[V] + c2 * g * g;
        const S p = x[PARAM], decayed = p - p == 0 ? decay * p : (S)0;
        y[PARAM] = p - rate * (correct_m * m / (cg_sqrt(correct_v * v) + eps) + decayed);
        y[M] = m;
        y[V] = v;
    }
};

/* What the host knows of a step. */
struct adamw_numbers {
    cg_adamw_attr attr;
    cg_device_fault *fault;
};

/* The formula with the numbers of this step. False, with a report, when there can be no step: no leaf may change then.
 * All threads of the block call. */
template <typename T>
CG_DEVICE bool begin_step(const T *norm_at, const T *schedule, const adamw_numbers &n,
                          adamw_of<cg_sum_of<T>> *step) {
    typedef cg_sum_of<T> S;
    CG_SHARED(S[2], correct);
    const double norm = (double)cg_up(norm_at[0]), rate = (double)cg_up(schedule[0]),
                 at = (double)cg_up(schedule[1]);
    double number;
    const int wrong = wrong_number(norm, rate, at, &number);
    if (wrong) {
        if (blockIdx.x == 0 && threadIdx.x == 0) cg_report(n.fault, wrong, 0, 0, 0, 0, 0, number);
        return false;
    }
    if (threadIdx.x == 0) {
        correct[0] = (S)(1 / (1 - cg_pow(n.attr.beta1, at)));
        correct[1] = (S)(1 / (1 - cg_pow(n.attr.beta2, at)));
    }
    __syncthreads();
    const double most = n.attr.max_norm;
    step->b1 = (S)n.attr.beta1, step->c1 = (S)(1 - n.attr.beta1);
    step->b2 = (S)n.attr.beta2, step->c2 = (S)(1 - n.attr.beta2);
    step->eps = (S)n.attr.eps, step->decay = (S)n.attr.weight_decay;
    step->clip = (S)(most > 0 && norm > most ? most / norm : 1), step->rate = (S)rate;
    step->correct_m = correct[0], step->correct_v = correct[1];
    return true;
}

template <typename T>
CG_GLOBAL void adamw_kernel(arrays<T, 4, 3> a, const T *norm, const T *schedule, int64_t n,
                            adamw_numbers numbers) {
    adamw_of<cg_sum_of<T>> step;
    if (!begin_step(norm, schedule, numbers, &step)) return;
    CG_FOR(i, n) each_one(a, i, step);
}

template <typename T>
CG_GLOBAL void adamw_packed_kernel(arrays<T, 4, 3> a, const T *norm, const T *schedule, int64_t n,
                                   adamw_numbers numbers) {
    adamw_of<cg_sum_of<T>> step;
    if (!begin_step(norm, schedule, numbers, &step)) return;
    each_packed(a, n, step);
}

template <typename T, bool PACKED> bool adamw(const cg_run_args *args, cg_stream *stream) {
    arrays<T, 4, 3> a;
    for (int k = PARAM; k <= GRAD; k++) a.in[k] = (const T *)args->in[k].data;
    for (int k = PARAM; k <= V; k++) a.out[k] = (T *)args->in[k].data;
    const int64_t n = cg_shape_count(&args->in[PARAM].shape);
    const unsigned blocks = PACKED ? packed_blocks<T>(n) : cg_blocks(n, EACH_THREADS);
    return CG_LAUNCH(PACKED ? adamw_packed_kernel<T> : adamw_kernel<T>,
                     blocks ? blocks : 1 /* it also checks */, EACH_THREADS, 0, stream, a,
                     (const T *)args->in[NORM].data, (const T *)args->in[SCHEDULE].data, n,
                     (adamw_numbers{*(const cg_adamw_attr *)args->attr, args->fault}));
}

} // namespace

extern "C" const cg_cuda_op cg_cuda_adamw = {
    .op = "adamw",
    .variants = {{.name = "plain", .launch = {adamw<float, false>, adamw<double, false>}},
                 {.name = "fast", .launch = {adamw<float, true>, adamw<double, true>}}},
    .describe = describe,
};
