/* Small f64 ops that only the suites of graph/ use, so that those suites test the graph and not ops/:
 * elementwise ones, one with a workspace, one with two outputs, a choice with its gather, one that changes a
 * leaf. */
#ifndef TESTS_GRAPH_OPS_H
#define TESTS_GRAPH_OPS_H

#include "tests/support.h"

#include "core/base/rng.h"

extern const cg_op cg_op_add, cg_op_scale, cg_op_reshape, cg_op_detach, cg_op_zeros;
static const cg_op t_mul, t_relu, t_relu_grad, t_sum, t_fill, t_join, t_part, t_pad, t_twin, t_choose, t_pick,
    t_unpick, t_bump;

static inline int64_t t_count(const cg_value *value) { return cg_shape_count(&value->shape); }
static inline int64_t t_size(const cg_tensor *tensor) { return cg_shape_count(&tensor->shape); }

/* Apply an op to the listed inputs. */
#define T_APPLY_IN(graph, op, attr, ...)                                                                       \
    cg_apply(graph, op, attr, (cg_value *[]){__VA_ARGS__},                                                     \
             (int)(sizeof((cg_value *[]){__VA_ARGS__}) / sizeof(void *)))
#define T_APPLY(...) T_APPLY_IN(graph, __VA_ARGS__)

/* Shape and dtype of input 0. */
static inline bool t_like_first(cg_infer *infer) {
    for (int i = 1; i < infer->n_in; i++)
        if (!cg_expect_same(infer, i, 0)) return false;
    for (int s = 0; s < infer->n_out; s++) cg_infer_out(infer, s, infer->in[0]->dtype, infer->in[0]->shape);
    return cg_expect_real(infer, 0);
}

/* y = a * b */
static bool t_mul_run(const cg_run_args *args) {
    const double *a = args->in[0].data, *b = args->in[1].data;
    double *y = args->out[0].data;
    for (int64_t i = 0; i < t_size(&args->out[0]); i++) y[i] = a[i] * b[i];
    return true;
}
static void t_mul_grad(cg_graph *graph, const cg_node *node, cg_value *const *dout, cg_value **din) {
    if (cg_wants_grad(node, 0)) din[0] = T_APPLY(&t_mul, NULL, dout[0], node->in[1]);
    if (cg_wants_grad(node, 1)) din[1] = T_APPLY(&t_mul, NULL, dout[0], node->in[0]);
}
static const cg_op t_mul = {.name = "mul",
                            .in = {"a", "b"},
                            .out = {"y"},
                            .infer = t_like_first,
                            .differentiable = 3,
                            .grad = t_mul_grad,
                            .overwrites = 3,
                            .run = {[CG_F64] = {t_mul_run}}};

/* y = max(x, 0); its gradient reads y */
static bool t_relu_run(const cg_run_args *args) {
    const double *x = args->in[0].data;
    double *y = args->out[0].data;
    for (int64_t i = 0; i < t_size(&args->out[0]); i++) y[i] = x[i] > 0 ? x[i] : 0;
    return true;
}
static bool t_relu_grad_run(const cg_run_args *args) {
    const double *dy = args->in[0].data, *y = args->in[1].data;
    double *dx = args->out[0].data;
    for (int64_t i = 0; i < t_size(&args->out[0]); i++) dx[i] = y[i] > 0 ? dy[i] : 0;
    return true;
}
static void t_relu_build(cg_graph *graph, const cg_node *node, cg_value *const *dout, cg_value **din) {
    din[0] = T_APPLY(&t_relu_grad, NULL, dout[0], node->out[0]);
}
static const cg_op t_relu_grad = {.name = "relu_grad",
                                  .in = {"dy", "y"},
                                  .out = {"dx"},
                                  .infer = t_like_first,
                                  .no_grad = "not yet",
                                  .overwrites = 3,
                                  .run = {[CG_F64] = {t_relu_grad_run}}};
static const cg_op t_relu = {.name = "relu",
                             .in = {"x"},
                             .out = {"y"},
                             .infer = t_like_first,
                             .differentiable = 1,
                             .grad = t_relu_build,
                             .overwrites = 1,
                             .run = {[CG_F64] = {t_relu_run}}};

/* y = sum of x -> [1], and y = x[0] everywhere */
typedef struct t_range {
    int64_t from, n;
} t_range;
static bool t_sum_infer(cg_infer *infer) {
    cg_infer_out(infer, 0, infer->in[0]->dtype, CG_SHAPE(1));
    return true;
}
static bool t_sum_run(const cg_run_args *args) {
    const double *x = args->in[0].data;
    double sum = 0;
    for (int64_t i = 0; i < t_size(&args->in[0]); i++) sum += x[i];
    *(double *)args->out[0].data = sum;
    return true;
}
static bool t_fill_infer(cg_infer *infer) {
    cg_infer_out(infer, 0, infer->in[0]->dtype, *(const cg_shape *)infer->attr);
    return true;
}
static bool t_fill_run(const cg_run_args *args) {
    double *y = args->out[0].data;
    for (int64_t i = 0; i < t_size(&args->out[0]); i++) y[i] = *(const double *)args->in[0].data;
    return true;
}
static void t_sum_grad(cg_graph *graph, const cg_node *node, cg_value *const *dout, cg_value **din) {
    din[0] = T_APPLY(&t_fill, &node->in[0]->shape, dout[0]);
}
static const cg_op t_fill = {.name = "fill",
                             .in = {"x"},
                             .out = {"y"},
                             .attr_bytes = sizeof(cg_shape),
                             .infer = t_fill_infer,
                             .no_grad = "not yet",
                             .run = {[CG_F64] = {t_fill_run}}};
static const cg_op t_sum = {.name = "sum",
                            .in = {"x"},
                            .out = {"y"},
                            .infer = t_sum_infer,
                            .differentiable = 1,
                            .grad = t_sum_grad,
                            .run = {[CG_F64] = {t_sum_run}}};

/* y = a then b, by way of a workspace of all elements; its gradients are parts of dy */
static bool t_join_infer(cg_infer *infer) {
    cg_infer_out(infer, 0, infer->in[0]->dtype, CG_SHAPE(t_count(infer->in[0]) + t_count(infer->in[1])));
    return true;
}
static size_t t_join_workspace(const cg_node *node) { return 8 * (size_t)t_count(node->out[0]); }
static bool t_join_run(const cg_run_args *args) {
    double *scratch = args->workspace;
    int64_t n = t_size(&args->in[0]), m = t_size(&args->in[1]);
    for (int64_t i = 0; i < n; i++) scratch[i] = ((const double *)args->in[0].data)[i];
    for (int64_t i = 0; i < m; i++) scratch[n + i] = ((const double *)args->in[1].data)[i];
    for (int64_t i = 0; i < n + m; i++) ((double *)args->out[0].data)[i] = scratch[i];
    return true;
}
static bool t_part_infer(cg_infer *infer) {
    const t_range *range = infer->attr;
    if (range->from + range->n > t_count(infer->in[0])) return cg_refuse(infer, "x is too short");
    cg_infer_out(infer, 0, infer->in[0]->dtype, CG_SHAPE(range->n));
    return true;
}
static bool t_part_run(const cg_run_args *args) {
    const t_range *range = args->attr;
    for (int64_t i = 0; i < range->n; i++)
        ((double *)args->out[0].data)[i] = ((const double *)args->in[0].data)[range->from + i];
    return true;
}
static bool t_pad_infer(cg_infer *infer) { /* x at `from` of n zeros */
    cg_infer_out(infer, 0, infer->in[0]->dtype, CG_SHAPE(((const t_range *)infer->attr)->n));
    return true;
}
static bool t_pad_run(const cg_run_args *args) {
    const t_range *range = args->attr;
    int64_t n = t_size(&args->in[0]);
    for (int64_t i = 0; i < range->n; i++)
        ((double *)args->out[0].data)[i] =
            i < range->from || i >= range->from + n ? 0 : ((const double *)args->in[0].data)[i - range->from];
    return true;
}
static cg_value *t_shaped_like(cg_graph *graph, cg_value *x, const cg_value *like) {
    return x && cg_shape_equal(&x->shape, &like->shape) ? x : cg_reshape(graph, x, like->shape);
}
static void t_join_grad(cg_graph *graph, const cg_node *node, cg_value *const *dout, cg_value **din) {
    int64_t from = 0;
    for (int i = 0; i < 2; i++) {
        int64_t n = t_count(node->in[i]);
        if (cg_wants_grad(node, i))
            din[i] = t_shaped_like(graph, T_APPLY(&t_part, (&(t_range){from, n}), dout[0]), node->in[i]);
        from += n;
    }
}
static void t_part_grad(cg_graph *graph, const cg_node *node, cg_value *const *dout, cg_value **din) {
    const t_range *range = node->attr;
    din[0] = t_shaped_like(graph, T_APPLY(&t_pad, (&(t_range){range->from, t_count(node->in[0])}), dout[0]),
                           node->in[0]);
}
static void t_pad_grad(cg_graph *graph, const cg_node *node, cg_value *const *dout, cg_value **din) {
    t_range range = {((const t_range *)node->attr)->from, t_count(node->in[0])};
    din[0] = t_shaped_like(graph, T_APPLY(&t_part, &range, dout[0]), node->in[0]);
}
static const cg_op t_pad = {.name = "pad",
                            .in = {"x"},
                            .out = {"y"},
                            .attr_bytes = sizeof(t_range),
                            .infer = t_pad_infer,
                            .differentiable = 1,
                            .grad = t_pad_grad,
                            .run = {[CG_F64] = {t_pad_run}}};
static const cg_op t_part = {.name = "part",
                             .in = {"x"},
                             .out = {"y"},
                             .attr_bytes = sizeof(t_range),
                             .infer = t_part_infer,
                             .differentiable = 1,
                             .grad = t_part_grad,
                             .run = {[CG_F64] = {t_part_run}}};
static const cg_op t_join = {.name = "join",
                             .in = {"a", "b"},
                             .out = {"y"},
                             .infer = t_join_infer,
                             .differentiable = 3,
                             .grad = t_join_grad,
                             .workspace = t_join_workspace,
                             .run = {[CG_F64] = {t_join_run}}};

/* y = 2 x and z = x * x; either gradient may be missing */
static bool t_twin_run(const cg_run_args *args) {
    const double *x = args->in[0].data;
    double *y = args->out[0].data, *z = args->out[1].data;
    for (int64_t i = 0; i < t_size(&args->in[0]); i++) {
        double v = x[i]; /* y may lie where x does */
        y[i] = 2 * v;
        z[i] = v * v;
    }
    return true;
}
static void t_twin_grad(cg_graph *graph, const cg_node *node, cg_value *const *dout, cg_value **din) {
    cg_value *dy = dout[0] ? cg_scale(graph, dout[0], 2) : NULL;
    cg_value *dz = dout[1] ? cg_scale(graph, T_APPLY(&t_mul, NULL, dout[1], node->in[0]), 2) : NULL;
    din[0] = dy && dz ? cg_add(graph, dy, dz) : dy ? dy : dz;
}
static const cg_op t_twin = {.name = "twin",
                             .in = {"x"},
                             .out = {"y", "z"},
                             .infer = t_like_first,
                             .differentiable = 1,
                             .grad = t_twin_grad,
                             .overwrites = 1,
                             .run = {[CG_F64] = {t_twin_run}}};

/* index = the places of the larger half of x, falling; y = x at index */
static bool t_choose_infer(cg_infer *infer) {
    cg_infer_out(infer, 0, CG_I32, CG_SHAPE((t_count(infer->in[0]) + 1) / 2));
    return true;
}
static bool t_choose_run(const cg_run_args *args) {
    const double *x = args->in[0].data;
    int32_t *index = args->out[0].data;
    for (int64_t k = 0; k < t_size(&args->out[0]); k++) {
        int32_t best = -1;
        for (int32_t i = 0; i < t_size(&args->in[0]); i++) {
            bool used = best >= 0 && x[i] <= x[best];
            for (int64_t j = 0; j < k; j++) used |= index[j] == i;
            if (!used) best = i;
        }
        if (best < 0) return cg_fail(args->error, CG_BAD_INPUT, "x has a NaN");
        index[k] = best;
    }
    return true;
}
static bool t_pick_infer(cg_infer *infer) {
    if (!cg_expect_dtype(infer, 1, CG_I32)) return false;
    cg_infer_out(infer, 0, infer->in[0]->dtype, infer->in[1]->shape);
    return true;
}
static bool t_pick_run(const cg_run_args *args) {
    const int32_t *index = args->in[1].data;
    for (int64_t k = 0; k < t_size(&args->in[1]); k++) {
        if (index[k] < 0 || index[k] >= t_size(&args->in[0]))
            return cg_fail(args->error, CG_BAD_INPUT, "index %d at %lld", index[k], (long long)k);
        ((double *)args->out[0].data)[k] = ((const double *)args->in[0].data)[index[k]];
    }
    return true;
}
static bool t_unpick_run(const cg_run_args *args) {
    const int32_t *index = args->in[1].data;
    double *dx = args->out[0].data;
    for (int64_t i = 0; i < t_size(&args->out[0]); i++) dx[i] = 0;
    for (int64_t k = 0; k < t_size(&args->in[1]); k++) {
        if (index[k] < 0 || index[k] >= t_size(&args->out[0]))
            return cg_fail(args->error, CG_BAD_INPUT, "index %d at %lld", index[k], (long long)k);
        dx[index[k]] += ((const double *)args->in[0].data)[k];
    }
    return true;
}
static void t_pick_grad(cg_graph *graph, const cg_node *node, cg_value *const *dout, cg_value **din) {
    din[0] = T_APPLY(&t_unpick, &node->in[0]->shape, dout[0], node->in[1]);
}
static const cg_op t_choose = {.name = "choose",
                               .in = {"x"},
                               .out = {"index"},
                               .infer = t_choose_infer,
                               .no_grad = "cannot: indices",
                               .replay = CG_REPLAY_CHOICE,
                               .run = {[CG_F64] = {t_choose_run}}};
static const cg_op t_unpick = {.name = "unpick",
                               .in = {"dy", "index"},
                               .out = {"dx"},
                               .attr_bytes = sizeof(cg_shape),
                               .infer = t_fill_infer,
                               .no_grad = "not yet",
                               .run = {[CG_F64] = {t_unpick_run}}};
static const cg_op t_pick = {.name = "pick",
                             .in = {"x", "index"},
                             .out = {"y"},
                             .infer = t_pick_infer,
                             .differentiable = 1,
                             .grad = t_pick_grad,
                             .run = {[CG_F64] = {t_pick_run}}};

/* leaf += x, in place */
static bool t_bump_infer(cg_infer *infer) { return cg_expect_same(infer, 1, 0); }
static bool t_bump_run(const cg_run_args *args) {
    for (int64_t i = 0; i < t_size(&args->in[0]); i++)
        ((double *)args->in[0].data)[i] += ((const double *)args->in[1].data)[i];
    return true;
}
static const cg_op t_bump = {.name = "bump",
                             .in = {"leaf", "x"},
                             .infer = t_bump_infer,
                             .no_grad = "cannot: changes",
                             .mutates = 1,
                             .run = {[CG_F64] = {t_bump_run}}};

static const cg_op *const t_list[] = {&cg_op_add, &cg_op_scale, &cg_op_reshape, &cg_op_detach, &cg_op_zeros,
                                      &t_mul,     &t_relu,      &t_relu_grad,   &t_sum,        &t_fill,
                                      &t_join,    &t_part,      &t_pad,         &t_twin,       &t_choose,
                                      &t_pick,    &t_unpick,    &t_bump};
static const cg_op_set t_ops = {t_list, (int)(sizeof t_list / sizeof *t_list), &cg_op_add, &cg_op_zeros};

static inline cg_value *t_leaf(cg_graph *graph, cg_leaf_kind kind, const char *name, int64_t n) {
    return cg_leaf(graph, kind, name, CG_F64, CG_SHAPE(n));
}

/* Fill every leaf of a graph with normal numbers that depend on its name. */
static inline void t_fill_leaves(const cg_graph *graph, const cg_exec *exec, uint64_t seed) {
    for (int v = 0; v < graph->n_values; v++) {
        const cg_value *leaf = graph->values[v];
        double *data = leaf->leaf ? cg_exec_data(exec, leaf) : NULL;
        for (int64_t i = 0; data && i < t_count(leaf); i++)
            data[i] = cg_random_normal(seed, cg_random_stream(leaf->name), (uint64_t)i);
    }
}

static inline void t_expect_text(const char *text, const char *part) {
    if (!strstr(text, part)) ck_abort_msg("\"%s\", expected \"%s\" in it", text, part);
}

static inline void t_expect_failed(const cg_graph *graph, const char *part) {
    const cg_error *error = cg_graph_error(graph);
    if (!error) ck_abort_msg("the graph did not fail, expected \"%s\"", part);
    t_expect_text(error->text, part);
}

static inline void t_expect_fine(const cg_graph *graph) {
    if (cg_graph_error(graph)) ck_abort_msg("%s", cg_graph_error(graph)->text);
}

static inline cg_plan *t_plan(const cg_graph *graph, const cg_plan_options *options) {
    cg_error error = {0};
    cg_plan *plan = cg_plan_make(graph, options, &error);
    if (!plan) ck_abort_msg("plan: %s", error.text);
    return plan;
}

static inline cg_exec *t_exec(const cg_plan *plan, const cg_exec_options *options) {
    cg_error error = {0};
    cg_exec *exec = cg_exec_new(plan, options, &error);
    if (!exec) ck_abort_msg("executor: %s", error.text);
    return exec;
}

static inline void t_run(cg_exec *exec, unsigned passes) {
    cg_error error = {0};
    if (!cg_exec_run(exec, passes, &error)) ck_abort_msg("run: %s", error.text);
}

#endif
