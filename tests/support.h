/* Support for the suites: a small graph that runs, stored vectors, comparisons.
 *
 *     bench b = bench_new(CG_F64);
 *     cg_value *x = bench_real(&b, "x", CG_SHAPE(2, 3), (double[]){...});    a leaf whose gradient is wanted
 *     cg_value *i = bench_i32(&b, "index", CG_SHAPE(2), (int32_t[]){...});
 *     cg_value *y = cg_scale(b.graph, x, 2);
 *     bench_backward(&b, y, dout);                    builds dx; dout NULL: all ones
 *     bench_run(&b);                                  plans, runs with poisoned outputs in separate heap blocks
 *     double *got = bench_get(&b, y), *dx = bench_grad(&b, x);     freed by bench_free
 *
 * A value read with bench_get must have been kept with cg_keep before bench_run (bench_backward keeps its own).
 */
#ifndef TESTS_SUPPORT_H
#define TESTS_SUPPORT_H

#include <check.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/isa.h"
#include "core/files/safetensors.h"
#include "core/base/threads.h"
#include "graph/cases.h"
#include "ops/ops.h"

enum { BENCH_LEAVES = 64 };

typedef struct bench {
    cg_dtype dtype;
    cg_graph *graph;
    cg_plan *plan;
    cg_exec *exec;
    cg_error error;
    cg_exec_options options; /* separate and poison unless changed before bench_run */
    struct {
        cg_value *leaf, *grad;
        void *data; /* doubles for real leaves */
    } leaves[BENCH_LEAVES];
    int n_leaves;
    void *gotten[256];
    int n_gotten;
} bench;

static inline bench bench_new(cg_dtype dtype) {
    bench b = {
        .dtype = dtype, .graph = cg_graph_new(&cg_all_ops), .options = {.separate = true, .poison = true}};
    ck_assert_ptr_nonnull(b.graph);
    return b;
}

static inline cg_value *bench_leaf(bench *b, cg_leaf_kind kind, const char *name, cg_dtype dtype,
                                   cg_shape shape, const void *data, size_t element) {
    ck_assert_int_lt(b->n_leaves, BENCH_LEAVES);
    size_t bytes = (size_t)cg_shape_count(&shape) * element;
    void *copy = malloc(bytes + 1);
    if (data)
        memcpy(copy, data, bytes);
    else
        memset(copy, 0, bytes);
    cg_value *leaf = cg_leaf(b->graph, kind, name, dtype, shape);
    b->leaves[b->n_leaves].data = copy;
    b->leaves[b->n_leaves++].leaf = leaf;
    return leaf;
}

/* A real leaf whose gradient is wanted; data as doubles, NULL: zeros. */
static inline cg_value *bench_real(bench *b, const char *name, cg_shape shape, const double *data) {
    return bench_leaf(b, CG_LEAF_PARAMETER, name, b->dtype, shape, data, sizeof(double));
}

/* A real leaf without gradient. */
static inline cg_value *bench_constant(bench *b, const char *name, cg_shape shape, const double *data) {
    return bench_leaf(b, CG_LEAF_INPUT, name, b->dtype, shape, data, sizeof(double));
}

static inline cg_value *bench_i32(bench *b, const char *name, cg_shape shape, const int32_t *data) {
    return bench_leaf(b, CG_LEAF_INPUT, name, CG_I32, shape, data, sizeof(int32_t));
}

/* Append the backward pass of `output`, whose gradient is `dout` (NULL: ones), to all leaves that want one. */
static inline void bench_backward(bench *b, cg_value *output, const double *dout) {
    if (cg_graph_error(b->graph)) ck_abort_msg("%s", cg_graph_error(b->graph)->text);
    int64_t n = cg_shape_count(&output->shape);
    double *seed_data = malloc(((size_t)n + 1) * sizeof *seed_data);
    for (int64_t i = 0; i < n; i++) seed_data[i] = dout ? dout[i] : 1;
    cg_keep(output);
    cg_value *seed = bench_constant(b, "seed of the output", output->shape, seed_data);
    free(seed_data);
    cg_value *wrt[BENCH_LEAVES], *grads[BENCH_LEAVES];
    int place[BENCH_LEAVES], n_wrt = 0;
    for (int i = 0; i < b->n_leaves; i++)
        if (b->leaves[i].leaf->needs_grad) {
            place[n_wrt] = i;
            wrt[n_wrt++] = b->leaves[i].leaf;
        }
    cg_autodiff(b->graph, &output, &seed, 1, wrt, n_wrt, grads);
    for (int k = 0; k < n_wrt; k++) b->leaves[place[k]].grad = cg_keep(grads[k]);
}

/* Plan, fill the leaves, run. Returns the run's success; a graph or plan that fails is a test failure. */
static inline bool bench_try(bench *b) {
    if (!b->exec) {
        b->plan = cg_plan_make(b->graph, NULL, &b->error);
        if (!b->plan) ck_abort_msg("plan: %s", b->error.text);
        b->exec = cg_exec_new(b->plan, &b->options, &b->error);
        if (!b->exec) ck_abort_msg("executor: %s", b->error.text);
    }
    for (int i = 0; i < b->n_leaves; i++) {
        const cg_value *leaf = b->leaves[i].leaf;
        void *data = cg_exec_data(b->exec, leaf);
        int64_t n = cg_shape_count(&leaf->shape);
        if (leaf->dtype == CG_I32)
            memcpy(data, b->leaves[i].data, (size_t)n * sizeof(int32_t));
        else
            for (int64_t k = 0; k < n; k++) cg_real_set(leaf->dtype, data, k, ((double *)b->leaves[i].data)[k]);
    }
    b->error = (cg_error){0};
    return cg_exec_run(b->exec, CG_ALL_PASSES, &b->error);
}

static inline void bench_run(bench *b) {
    if (!bench_try(b)) ck_abort_msg("run: %s", b->error.text);
}

/* A real value's elements as doubles. */
static inline double *bench_get(bench *b, const cg_value *value) {
    ck_assert_ptr_nonnull(value);
    const void *data = cg_exec_data(b->exec, value);
    if (!data) ck_abort_msg("a value that was not kept is read");
    int64_t n = cg_shape_count(&value->shape);
    double *copy = malloc(((size_t)n + 1) * sizeof *copy);
    for (int64_t i = 0; i < n; i++)
        copy[i] = value->dtype == CG_I32 ? ((const int32_t *)data)[i] : cg_real_get(value->dtype, data, i);
    ck_assert_int_lt(b->n_gotten, 256);
    b->gotten[b->n_gotten++] = copy;
    return copy;
}

/* An i32 value's elements. */
static inline const int32_t *bench_get_i32(bench *b, const cg_value *value) {
    ck_assert_int_eq(value->dtype, CG_I32);
    return cg_exec_data(b->exec, value);
}

/* The gradient of a leaf after bench_backward and bench_run. */
static inline double *bench_grad(bench *b, const cg_value *leaf) {
    for (int i = 0; i < b->n_leaves; i++)
        if (b->leaves[i].leaf == leaf) return bench_get(b, b->leaves[i].grad);
    ck_abort_msg("not a leaf");
    return NULL;
}

static inline void bench_free(bench *b) {
    cg_exec_free(b->exec);
    cg_plan_free(b->plan);
    cg_graph_free(b->graph);
    for (int i = 0; i < b->n_leaves; i++) free(b->leaves[i].data);
    for (int i = 0; i < b->n_gotten; i++) free(b->gotten[i]);
}

/* max|got - want| <= bound * max|want|, NaN fails; with want all 0 the bound is absolute. */
static inline void expect_close(const char *what, const double *got, const double *want, int64_t n,
                                double bound) {
    double largest = 0, worst = 0;
    int64_t place = 0;
    for (int64_t i = 0; i < n; i++) largest = fmax(largest, fabs(want[i]));
    for (int64_t i = 0; i < n; i++) {
        double error = fabs(got[i] - want[i]);
        if (!(error <= worst)) {
            worst = isnan(error) ? INFINITY : error;
            place = i;
        }
    }
    double limit = bound * (largest > 0 ? largest : 1);
    if (!(worst <= limit))
        ck_abort_msg("%s[%lld]: got %.17g, expected %.17g; error %.3g, bound %.3g", what, (long long)place,
                     got[place], want[place], worst, limit);
}

/* ---- stored vectors, tests/data/<name>.safetensors ---- */

static inline cg_safetensors *golden_open(const char *name) {
    char path[512];
    cg_error error = {0};
    snprintf(path, sizeof path, "%s/%s.safetensors", TEST_DATA_DIR, name);
    cg_safetensors *file = cg_safetensors_open(path, &error);
    if (!file) ck_abort_msg("%s", error.text);
    return file;
}

static inline double golden_number(const cg_safetensors *file, const char *key) {
    const char *text = cg_safetensors_metadata(file, key);
    if (!text) ck_abort_msg("no metadata %s", key);
    return atof(text);
}

/* A tensor's elements as doubles (malloc'd). With batch > 0 a [S, B, ...] tensor becomes packed rows [B*S,
 * ...]. */
static inline double *golden_get(const cg_safetensors *file, const char *name, int64_t batch) {
    const cg_tensor *tensor = cg_safetensors_find(file, name);
    if (!tensor) ck_abort_msg("no tensor %s", name);
    int64_t n = cg_shape_count(&tensor->shape);
    double *out = malloc(((size_t)n + 1) * sizeof *out);
    int64_t steps = batch > 0 ? tensor->shape.dims[0] : 1, width = batch > 0 ? n / (steps * batch) : n;
    if (batch > 0) ck_assert_int_eq(tensor->shape.dims[1], batch);
    for (int64_t i = 0; i < n; i++) {
        int64_t s = i / width / (batch > 0 ? batch : 1), b = batch > 0 ? i / width % batch : 0;
        int64_t to = (b * steps + s) * width + i % width;
        out[to] = tensor->dtype == CG_I32 ? ((const int32_t *)tensor->data)[i]
                                          : cg_real_get(tensor->dtype, tensor->data, i);
    }
    return out;
}

/* The same for i32 tensors that already are batch-major ([B, S, K]) or packed. */
static inline int32_t *golden_get_i32(const cg_safetensors *file, const char *name) {
    const cg_tensor *tensor = cg_safetensors_find(file, name);
    if (!tensor) ck_abort_msg("no tensor %s", name);
    ck_assert_int_eq(tensor->dtype, CG_I32);
    size_t bytes = (size_t)cg_tensor_bytes(CG_I32, &tensor->shape);
    return memcpy(malloc(bytes + 1), tensor->data, bytes);
}

/* A suite that is to run on a path (CSAGRAD_ISA) runs on no other: ctest skips it when it reads this sentence. */
static void __attribute__((constructor)) suite_on_its_path(void) {
    cg_error error = {0};
    if (cg_isa_obeyed(&error)) return;
    puts(error.text);
    exit(error.code);
}

/* main() of a suite of one list of tests: SUITE("name", test_a, test_b). Each is a case of its own name, so that
 * CK_RUN_CASE=test_a runs that one. */
static inline int suite_run(const char *name, const TTest *const *tests, int n) {
    Suite *suite = suite_create(name);
    for (int i = 0; i < n; i++) {
        TCase *tcase = tcase_create(tests[i]->name);
        tcase_set_timeout(tcase, 240);
        tcase_add_test(tcase, tests[i]);
        suite_add_tcase(suite, tcase);
    }
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
#define SUITE(name, ...)                                                                                       \
    int main(void) {                                                                                           \
        const TTest *const tests[] = {__VA_ARGS__};                                                            \
        return suite_run(name, tests, (int)(sizeof tests / sizeof *tests));                                    \
    }

#endif
