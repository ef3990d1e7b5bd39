/* Rotary position embedding of the last n_rotary channels, neighbouring channels paired (not half against
 * half).
 *
 *   x [N, D] or [N, heads, D]   positions [N] i32   -> y as x
 *
 *   a = positions[n] * f_i;  (y_2i, y_2i+1) = (x_2i cos a - x_2i+1 sin a, x_2i sin a + x_2i+1 cos a)
 *   f_i = base^(-2i/n_rotary), i = 0 .. n_rotary/2 - 1;  with YaRN a blend of f_i and f_i / factor (below)
 *
 * No magnitude factor: a pure rotation. Channels before the last n_rotary, and rows whose position is negative,
 * are copied bit for bit. Angles, sines and cosines are computed in f64, once per row for all heads: an f32
 * angle at position 10^6 would be off by a tenth of a radian. An angle is the sum of that of a multiple of 64 positions
 * and that of the rest, so that in a sequence few sines are taken: the library's cost more than the rotation.
 *
 * Saved:     positions                 (4*N bytes)
 * Recompute: same bits. May work in place. The gradient is the rotation by the opposite angle.
 * Refuses:   n_rotary odd, below 2 or above D; base not above 0; YaRN numbers that give no frequencies
 * Source:    Su et al. 2021 (interleaved pairs); Peng et al. 2023 (YaRN, the blend by wavelength)
 */
#ifndef REAL

#include "ops/chunks.h"
#include "ops/ops.h"

#include <math.h>

static bool rope_infer(cg_infer *infer) {
    const cg_rope_attr *attr = infer->attr;
    if (!cg_expect_real(infer, 0) || !cg_expect_dtype(infer, 1, CG_I32)) return false;
    const cg_shape *x = &infer->in[0]->shape;
    if (x->n_dims != 2 && x->n_dims != 3) {
        char text[128];
        return cg_refuse(infer, "x has shape %s, expected [N, D] or [N, heads, D]",
                         cg_shape_text(x, text, sizeof text));
    }
    if (!cg_expect_dims(infer, 1, 1) || !cg_expect_dim(infer, 1, 0, x->dims[0], "rows of x")) return false;
    const int64_t D = x->dims[x->n_dims - 1];
    if (attr->n_rotary < 2 || attr->n_rotary % 2 || attr->n_rotary > D)
        return cg_refuse(infer, "n_rotary is %lld, expected an even number from 2 to the %lld channels of x",
                         (long long)attr->n_rotary, (long long)D);
    if (!(attr->base > 0 && attr->base - attr->base == 0))
        return cg_refuse(infer, "base is %g, expected a finite number above 0", attr->base);
    if (!(attr->yarn_factor - attr->yarn_factor == 0))
        return cg_refuse(infer, "yarn_factor is %g, expected a finite number", attr->yarn_factor);
    if (attr->yarn_factor > 1) {
        if (!(attr->base > 1))
            return cg_refuse(infer, "base is %g, expected more than 1 with YaRN", attr->base);
        if (!(attr->yarn_original_length > 0 && attr->yarn_original_length - attr->yarn_original_length == 0))
            return cg_refuse(infer, "yarn_original_length is %g, expected a finite number above 0",
                             attr->yarn_original_length);
        if (!(attr->yarn_beta_slow > 0 && attr->yarn_beta_fast >= attr->yarn_beta_slow &&
              attr->yarn_beta_fast - attr->yarn_beta_fast == 0))
            return cg_refuse(infer, "yarn_beta_fast %g and yarn_beta_slow %g, expected fast >= slow > 0",
                             attr->yarn_beta_fast, attr->yarn_beta_slow);
    }
    cg_infer_out(infer, 0, infer->in[0]->dtype, *x);
    return true;
}

/* Positions of a stretch. */
enum { STRETCH = 64 };

/* A cosine and a sine for each pair of channels. */
typedef struct turn {
    double cosine, sine;
} turn;

static void turns_at(double position, int64_t pairs, const double *frequency, turn *turns) {
    for (int64_t i = 0; i < pairs; i++) {
        const double angle = position * frequency[i];
        turns[i] = (turn){cos(angle), sin(angle)};
    }
}

/* A thread's turn to the start of its stretch, its row's in the stretch, and the cosines and sines of its row. */
static size_t rope_thread_bytes(size_t pairs, size_t real) {
    return cg_piece(2 * pairs * sizeof(turn)) + cg_piece(2 * pairs * real);
}

#define CG_KERNEL_FILE "ops/nn/rope.c"
#include "ops/kernel.h"

/* The (fractional) pair whose wavelength fits `turns` times into the original length. */
static double pair_of_turns(const cg_rope_attr *attr, double turns) {
    return (double)attr->n_rotary * log(attr->yarn_original_length / (2 * M_PI * turns)) /
           (2 * log(attr->base));
}

double cg_rope_frequency(const cg_rope_attr *attr, int64_t i) {
    const double f = pow(attr->base, -2.0 * (double)i / (double)attr->n_rotary);
    if (!(attr->yarn_factor > 1)) return f;
    /* pairs below `low` turn often enough to be kept, pairs above `high` are stretched, between them a ramp */
    double low = fmax(floor(pair_of_turns(attr, attr->yarn_beta_fast)), 0);
    double high = fmin(ceil(pair_of_turns(attr, attr->yarn_beta_slow)), (double)attr->n_rotary - 1);
    if (low == high) high += 0.001;
    double ramp = fmin(fmax(((double)i - low) / (high - low), 0), 1);
    return f * (1 - ramp) + f / attr->yarn_factor * ramp;
}

static void rope_build_grad(cg_graph *graph, const cg_node *node, cg_value *const *dout, cg_value **din) {
    cg_rope_attr attr = *(const cg_rope_attr *)node->attr;
    attr.inverse = !attr.inverse;
    din[0] = cg_rope(graph, dout[0], node->in[1], &attr);
}

/* The frequencies, the turns in a stretch, and each thread's. */
static size_t rope_workspace(const cg_node *node) {
    size_t pairs = (size_t)((const cg_rope_attr *)node->attr)->n_rotary / 2;
    return cg_piece(sizeof(double) * pairs) + cg_piece(STRETCH * pairs * sizeof(turn)) +
           (size_t)cg_thread_slots() * rope_thread_bytes(pairs, cg_dtype_bytes(node->in[0]->dtype));
}

static cg_cost rope_cost(const cg_node *node) {
    const cg_shape *x = &node->in[0]->shape;
    const int64_t pairs = ((const cg_rope_attr *)node->attr)->n_rotary / 2;
    const double heads = x->n_dims == 3 ? (double)x->dims[1] : 1;
    return (cg_cost){.flops = (double)x->dims[0] * (double)pairs * (6 * heads + 3),
                     .bytes = cg_node_bytes(node)};
}

#define PLAIN                                                                                                  \
    &(cg_rope_attr) { .n_rotary = 4, .base = 100 }
#define INVERSE                                                                                                \
    &(cg_rope_attr) { .n_rotary = 4, .base = 100, .inverse = true }
#define YARN                                                                                                   \
    &(cg_rope_attr) {                                                                                          \
        .n_rotary = 8, .base = 50, .yarn_factor = 4, .yarn_original_length = 64, .yarn_beta_fast = 8,          \
        .yarn_beta_slow = 1                                                                                    \
    }
#define FIVE                                                                                                   \
    .shape = CG_DIMS(5), .i32 = (const int32_t[]) { 0, 1, 7, -1, 3 }
static const cg_case rope_cases[] = {
    {.name = "heads", .in = {{.shape = CG_DIMS(5, 2, 6)}, {FIVE}}, .attr = PLAIN, .crosses = "positions"},
    {.name = "one head", .in = {{.shape = CG_DIMS(5, 7)}, {FIVE}}, .attr = PLAIN, .crosses = "positions"},
    {.name = "inverse", .in = {{.shape = CG_DIMS(5, 2, 6)}, {FIVE}}, .attr = INVERSE, .crosses = "positions"},
    {.name = "yarn", .in = {{.shape = CG_DIMS(5, 8)}, {FIVE}}, .attr = YARN, .crosses = "positions"},
    {.name = "one row",
     .in = {{.shape = CG_DIMS(1, 1, 4)}, {.shape = CG_DIMS(1), .i32 = (const int32_t[]){1000000}}},
     .attr = PLAIN,
     .crosses = "positions"},
    {.name = "no rows",
     .in = {{.shape = CG_DIMS(0, 2, 6)}, {.shape = CG_DIMS(0), .i32 = (const int32_t[]){0}}},
     .attr = PLAIN,
     .crosses = "positions"},
    {.name = "no heads", .in = {{.shape = CG_DIMS(5, 0, 6)}, {FIVE}}, .attr = PLAIN, .crosses = "positions"},
    {.name = "large",
     .in = {{.shape = CG_DIMS(5, 41, 331)}, {FIVE}},
     .attr = &(cg_rope_attr){.n_rotary = 64, .base = 10000},
     .crosses = "positions",
     .large = true},
    {.name = "large, whole packs",
     .in = {{.shape = CG_DIMS(5, 41, 48)}, {FIVE}},
     .attr = &(cg_rope_attr){.n_rotary = 32, .base = 10000},
     .crosses = "positions",
     .large = true},
    {.name = "many short rows of whole packs",
     .in = {{.shape = CG_DIMS(90, 24)},
            {.shape = CG_DIMS(90), .i32 = (const int32_t[]){[5 ... 40] = 12345, [50] = -1, [70 ... 89] = 3}}},
     .attr = &(cg_rope_attr){.n_rotary = 8, .base = 100, .inverse = true},
     .crosses = "positions",
     .large = true},
    {.name = "many pairs",
     .in = {{.shape = CG_DIMS(5, 3, 161)}, {FIVE}},
     .attr = &(cg_rope_attr){.n_rotary = 160, .base = 10000},
     .crosses = "positions",
     .large = true},
    {.name = "odd n_rotary",
     .in = {{.shape = CG_DIMS(5, 7)}, {FIVE}},
     .attr = &(cg_rope_attr){.n_rotary = 3, .base = 100},
     .refuses = "n_rotary is 3"},
    {.name = "n_rotary above D",
     .in = {{.shape = CG_DIMS(5, 7)}, {FIVE}},
     .attr = &(cg_rope_attr){.n_rotary = 8, .base = 100},
     .refuses = "from 2 to the 7 channels of x"},
    {.name = "no base",
     .in = {{.shape = CG_DIMS(5, 7)}, {FIVE}},
     .attr = &(cg_rope_attr){.n_rotary = 4},
     .refuses = "base is 0"},
    {.name = "yarn without length",
     .in = {{.shape = CG_DIMS(5, 7)}, {FIVE}},
     .attr = &(
         cg_rope_attr){.n_rotary = 4, .base = 100, .yarn_factor = 2, .yarn_beta_fast = 32, .yarn_beta_slow = 1},
     .refuses = "yarn_original_length is 0"},
    {.name = "yarn betas",
     .in = {{.shape = CG_DIMS(5, 7)}, {FIVE}},
     .attr = &(cg_rope_attr){.n_rotary = 4,
                             .base = 100,
                             .yarn_factor = 2,
                             .yarn_original_length = 64,
                             .yarn_beta_fast = 1,
                             .yarn_beta_slow = 32},
     .refuses = "expected fast >= slow > 0"},
    {.name = "positions differ",
     .in = {{.shape = CG_DIMS(4, 7)}, {FIVE}},
     .attr = PLAIN,
     .refuses = "positions has shape [5], expected 4 in dimension 0 (rows of x)"},
    {.name = "positions are real",
     .in = {{.shape = CG_DIMS(5, 7)}, {FIVE, .wrong_dtype = true}},
     .attr = PLAIN,
     .refuses = "expected i32"},
    {.name = "one dimension",
     .in = {{.shape = CG_DIMS(5)}, {FIVE}},
     .attr = PLAIN,
     .refuses = "expected [N, D] or [N, heads, D]"},
};

const cg_op cg_op_rope = {
    .name = "rope",
    .doc = "rotary embedding of the last channels, neighbouring pairs",
    .in = {"x", "positions"},
    .out = {"y"},
    .attr_bytes = sizeof(cg_rope_attr),
    .infer = rope_infer,
    .differentiable = CG_BIT(0),
    .grad = rope_build_grad,
    .overwrites = CG_BIT(0),
    .by_row = CG_BIT(0) | CG_BIT(1),
    .replay = CG_REPLAY_SAME_BITS,
    .cost = rope_cost,
    .workspace = rope_workspace,
    .run = CG_RUN(rope),
    CG_CASES(rope_cases),
};

cg_value *cg_rope(cg_graph *graph, cg_value *x, cg_value *positions, const cg_rope_attr *attr) {
    return cg_apply(graph, &cg_op_rope, attr, (cg_value *[]){x, positions}, 2);
}

#else

static bool KERNEL(rope)(const cg_run_args *args) {
    const cg_rope_attr *attr = args->attr;
    const cg_shape *shape = &args->in[0].shape;
    const int32_t *positions = args->in[1].data;
    const int64_t N = shape->dims[0], heads = shape->n_dims == 3 ? shape->dims[1] : 1;
    const int64_t D = shape->dims[shape->n_dims - 1], pairs = attr->n_rotary / 2, lead = D - 2 * pairs;
    const bool in_place = args->in[0].data == args->out[0].data;
    const double sign = attr->inverse ? -1 : 1;
    double *frequency = args->workspace;
    turn *in_stretch = (turn *)((char *)args->workspace + cg_piece(sizeof(double) * (size_t)pairs));
    char *scratch = (char *)in_stretch + cg_piece((size_t)(STRETCH * pairs) * sizeof(turn));
    for (int64_t i = 0; i < pairs; i++) frequency[i] = cg_rope_frequency(attr, i);
    const turn *table = N < STRETCH ? NULL : in_stretch; /* few rows have their own made: the same numbers */
    for (int64_t p = 0; table && p < STRETCH; p++)
        turns_at((double)p, pairs, frequency, in_stretch + p * pairs);
#pragma omp parallel if (N * heads * D > 16384)
    {
        char *at = scratch + (size_t)cg_thread_slot() * rope_thread_bytes((size_t)pairs, sizeof(REAL));
        turn *to_stretch = (turn *)at, *of_row = to_stretch + pairs;
        REAL *cosine = (REAL *)(at + cg_piece(2 * (size_t)pairs * sizeof(turn))), *sine = cosine + pairs;
        int32_t stretch = -1;
#pragma omp for schedule(static)
        for (int64_t n = 0; n < N; n++) {
            const REAL *x = (const REAL *)args->in[0].data + n * heads * D;
            REAL *y = (REAL *)args->out[0].data + n * heads * D;
            if (positions[n] < 0) {
                if (!in_place) memcpy(y, x, sizeof(REAL) * (size_t)(heads * D));
                continue;
            }
            if (positions[n] / STRETCH != stretch) {
                stretch = positions[n] / STRETCH;
                turns_at((double)stretch * STRETCH, pairs, frequency, to_stretch);
            }
            const int64_t rest = positions[n] % STRETCH;
            const turn *in_row = table ? table + rest * pairs : of_row;
            if (!table) turns_at((double)rest, pairs, frequency, of_row);
            for (int64_t i = 0; i < pairs; i++) {
                const turn a = to_stretch[i], b = in_row[i];
                cosine[i] = (REAL)(a.cosine * b.cosine - a.sine * b.sine);
                sine[i] = (REAL)(sign * (a.sine * b.cosine + a.cosine * b.sine));
            }
            for (int64_t h = 0; h < heads; h++, x += D, y += D) {
                if (!in_place) memcpy(y, x, sizeof(REAL) * (size_t)lead);
                const REAL *from = x + lead;
                REAL *to = y + lead;
#pragma omp simd
                for (int64_t i = 0; i < pairs; i++) {
                    const REAL a = from[2 * i], b = from[2 * i + 1];
                    to[2 * i] = a * cosine[i] - b * sine[i];
                    to[2 * i + 1] = a * sine[i] + b * cosine[i];
                }
            }
        }
    }
    return true;
}

#endif
