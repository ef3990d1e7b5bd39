/* The indexer's kernels in bf16, on the CPU in the place of a device, every variant, against the CPU's f64 kernels on the
 * same rounded numbers; and their f32 kernels at sizes that ops' own cases leave out. Whole numbers, whose sums are exact
 * in any order, must give the same bits and ties; normal ones come close, and only scores that are nearly equal may change
 * places. */
#include "tests/cuda_device.h"

#include "core/base/bf16.h"
#include "core/base/rng.h"
#include "ops/attributes.h"

enum { MOST = 8 };

/* Is a second order of threads run, for the same bits? Under the sanitizers, which are slow, one is enough: a race shows in
 * any, and test_cuda_ops has more. */
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
static const bool again_too = false;
#else
static const bool again_too = true;
#endif

static void *device_memory(int64_t bytes, const void *data) {
    cg_error error = {0};
    void *memory = cg_device_alloc(device, bytes, &error);
    if (!memory || !(data ? cg_device_write(device, memory, data, bytes, &error)
                          : cg_device_fill(device, memory, 0xff, bytes, &error)))
        ck_abort_msg("%s", error.text);
    return memory;
}

/* ---- one call of a variant, for a node of a graph whose reals may have another dtype on the device ---- */

typedef struct call {
    const cg_node *node;          /* of an f64 graph */
    cg_dtype in[MOST], out[MOST]; /* on the device; CG_I32 as it is */
    const void *data[MOST];       /* doubles or i32 */
    double *got[MOST];            /* what came out, as doubles */
    cg_device_fault fault;
} call;

static cg_dtype dtype_on_device(const cg_value *value, bool statistic, cg_dtype real) {
    return value->dtype == CG_I32 ? CG_I32 : statistic ? cg_statistic_dtype(real) : real;
}

static void call_run(call *c, const cg_cuda_variant *variant, uint64_t seed) {
    cg_error error = {0};
    cg_tensor in[MOST] = {0}, out[MOST] = {0};
    cg_value values[MOST], *at[MOST] = {0};
    cg_node node = *c->node;
    cg_device_host_seed(seed);
    for (int i = 0; i < node.n_in; i++) {
        values[i] = *node.in[i];
        values[i].dtype = c->in[i];
        at[i] = &values[i];
        in[i] = (cg_tensor){.dtype = c->in[i], .shape = values[i].shape};
        const int64_t n = cg_shape_count(&in[i].shape), bytes = cg_tensor_bytes(in[i].dtype, &in[i].shape);
        void *numbers = malloc((size_t)bytes + 8);
        for (int64_t k = 0; k < n; k++) {
            if (c->in[i] == CG_I32)
                ((int32_t *)numbers)[k] = ((const int32_t *)c->data[i])[k];
            else
                cg_dtype_set(c->in[i], numbers, k, ((const double *)c->data[i])[k]);
        }
        in[i].data = device_memory(bytes, numbers);
        free(numbers);
    }
    for (int s = 0; s < node.n_out; s++) {
        out[s] = (cg_tensor){.dtype = c->out[s], .shape = node.out[s]->shape};
        out[s].data = device_memory(cg_tensor_bytes(out[s].dtype, &out[s].shape), NULL);
    }
    node.in = at;
    const int64_t workspace = variant->workspace ? (int64_t)variant->workspace(&node) : 0;
    const cg_device_fault none = {0};
    const cg_run_args args = {.n_in = node.n_in,
                              .n_out = node.n_out,
                              .in = in,
                              .out = out,
                              .attr = node.attr,
                              .workspace = device_memory(workspace, NULL),
                              .error = &error,
                              .fault = device_memory(sizeof none, &none)};
    cg_device_host_most_shared();
    if (!variant->launch[cg_node_dtype(&node)](&args, cg_device_stream(device)) ||
        !cg_device_wait(device, &error))
        ck_abort_msg("%s: %s", variant->name, error.text);
    expect_shared(variant, &node);
    ck_assert(cg_device_read(device, &c->fault, args.fault, sizeof c->fault, &error));
    for (int s = 0; s < node.n_out; s++) {
        const int64_t n = cg_shape_count(&out[s].shape), bytes = cg_tensor_bytes(out[s].dtype, &out[s].shape);
        void *numbers = malloc((size_t)bytes + 8);
        ck_assert(cg_device_read(device, numbers, out[s].data, bytes, &error));
        free(c->got[s]);
        c->got[s] = malloc(((size_t)n + 1) * sizeof(double));
        for (int64_t k = 0; k < n; k++) c->got[s][k] = cg_dtype_get(out[s].dtype, numbers, k);
        free(numbers);
        cg_device_free(device, out[s].data);
    }
    for (int i = 0; i < node.n_in; i++) cg_device_free(device, in[i].data);
    cg_device_free(device, args.workspace);
    cg_device_free(device, args.fault);
}

/* Run twice, in two orders of threads: the same bits. */
static void call_twice(call *c, const cg_cuda_variant *variant, const char *name) {
    double *first[MOST] = {0};
    call_run(c, variant, 1);
    for (int s = 0; s < c->node->n_out && again_too; s++) {
        first[s] = c->got[s];
        c->got[s] = NULL;
    }
    if (again_too) call_run(c, variant, 2);
    for (int s = 0; s < c->node->n_out && again_too; s++) {
        if (memcmp(first[s], c->got[s], (size_t)cg_shape_count(&c->node->out[s]->shape) * sizeof(double)))
            ck_abort_msg("%s, %s in %s, variant %s: other bits in another order of threads", name,
                         c->node->op->name, cg_dtype_name(cg_node_dtype(c->node)), variant->name);
        free(first[s]);
    }
}

static void call_of(call *c, const cg_node *node, cg_dtype real, const void *const *data) {
    *c = (call){.node = node};
    for (int i = 0; i < node->n_in; i++) {
        c->in[i] = dtype_on_device(node->in[i], node->op->statistic_in & CG_BIT(i), real);
        c->data[i] = data[i];
    }
    for (int s = 0; s < node->n_out; s++)
        c->out[s] = dtype_on_device(node->out[s], node->op->statistic_out & CG_BIT(s), real);
}

static void call_free(call *c) {
    for (int s = 0; s < MOST; s++) free(c->got[s]);
}

/* Variants of a node's op that can run it in a dtype; of so many in tests, where all can that a device might. */
static int variants_of(const cg_node *node, cg_dtype real, const cg_cuda_variant *variants[CG_CUDA_VARIANTS],
                       int expected) {
    const cg_cuda_op *op = cg_cuda_op_find(node->op->name);
    ck_assert_ptr_nonnull(op);
    cg_value values[MOST], *at[MOST] = {0};
    cg_node as_real = *node;
    for (int i = 0; i < node->n_in; i++) {
        values[i] = *node->in[i];
        values[i].dtype = dtype_on_device(node->in[i], node->op->statistic_in & CG_BIT(i), real);
        at[i] = &values[i];
    }
    as_real.in = at;
    int n = 0;
    for (int v = 0; v < CG_CUDA_VARIANTS; v++)
        if (cg_cuda_can_run(&backend, &op->variants[v], &as_real)) variants[n++] = &op->variants[v];
    if (device_is_emulated())
        ck_assert_int_eq(n, expected);
    else
        ck_assert_int_ge(n, 1);
    return n;
}

/* ---- data ---- */

typedef enum numbers { NORMAL, WHOLE, RISING } numbers;

/* Row t sees every (t % 3 == 0 ? C - t : C * t / T)-th and so on: see rows_of. */
typedef struct shape {
    const char *name;
    int64_t T, Hi, Di, C, K;
    numbers numbers; /* RISING: scores rise with the key, so that all of them come in */
    int variants;    /* how many can run it in bf16 */
} shape;

static const shape shapes[] = {
    {"one tile", 3, 5, 8, 9, 4, NORMAL, 2},
    {"odd sizes", 19, 11, 40, 203, 17, NORMAL, 3},
    {"full heads", 9, 64, 128, 150, 70, NORMAL, 3},
    {"whole numbers, many ties", 17, 7, 40, 300, 20, WHOLE, 3},
    {"whole numbers, full heads", 8, 64, 128, 97, 33, WHOLE, 3},
    {"rising scores", 2, 2, 16, 700, 64, RISING, 2},
    {"more than there is", 9, 3, 16, 40, 50, NORMAL, 2},
    {"nothing chosen", 3, 3, 16, 140, 0, NORMAL, 2},
    {"channels not in eights", 5, 3, 12, 70, 9, WHOLE, 1},
    {"too many heads", 3, 65, 16, 40, 9, WHOLE, 1},
};

static double *real_data(const shape *z, uint64_t stream, int64_t n) {
    double *x = malloc(((size_t)n + 1) * sizeof *x);
    for (int64_t i = 0; i < n; i++) {
        const float normal = (float)cg_random_normal(7, stream, (uint64_t)i);
        const int whole = (int)(cg_random_u32(7, stream, (uint64_t)i) % 3) - 1;
        x[i] = z->numbers == NORMAL ? (double)cg_bf16_get(cg_bf16_of(normal)) : whole;
    }
    return x;
}

/* Ranges of every kind: nothing, all, from the middle, to the middle. */
static int32_t *rows_of(const shape *z) {
    int32_t *rows = malloc((size_t)(z->T * CG_ROW_FIELDS + 1) * sizeof *rows);
    for (int64_t t = 0; t < z->T; t++) {
        int64_t first = 0, n = z->C;
        if (t % 5 == 1) n = z->C * t / z->T;
        if (t % 5 == 2) first = z->C / 3, n = z->C - z->C / 3;
        if (t % 5 == 3) first = z->C / 4, n = z->C / 2;
        if (t % 5 == 4) first = z->C, n = 0;
        memcpy(rows + t * CG_ROW_FIELDS, (int32_t[]){0, (int32_t)t, (int32_t)first, (int32_t)n, 1},
               CG_ROW_FIELDS * sizeof *rows);
    }
    return rows;
}

typedef struct data {
    double *q, *w, *k;
    int32_t *rows;
} data;

static data data_of(const shape *z) {
    data d = {real_data(z, 1, z->T * z->Hi * z->Di), real_data(z, 2, z->T * z->Hi),
              real_data(z, 3, z->C * z->Di), rows_of(z)};
    if (z->numbers != RISING) return d;
    for (int64_t i = 0; i < z->T * z->Hi * z->Di; i++) d.q[i] = i % z->Di == 0;
    for (int64_t i = 0; i < z->T * z->Hi; i++) d.w[i] = 1;
    for (int64_t i = 0; i < z->C * z->Di; i++)
        d.k[i] = i % z->Di ? 0 : (double)(i / z->Di / 4); /* by fours equal */
    return d;
}

static void data_free(data *d) {
    free(d->q);
    free(d->w);
    free(d->k);
    free(d->rows);
}

/* ---- the choice ---- */

/* Index scores in f64. */
static double score_of(const shape *z, const data *d, int64_t t, int64_t c) {
    double score = 0;
    for (int64_t h = 0; h < z->Hi; h++) {
        double dot = 0;
        for (int64_t i = 0; i < z->Di; i++) dot += d->q[(t * z->Hi + h) * z->Di + i] * d->k[c * z->Di + i];
        if (dot > 0) score += d->w[t * z->Hi + h] * dot;
    }
    return score;
}

/* A list is right when it is the CPU's, or differs from it where scores nearly equal each other. */
static void expect_choice(const shape *z, const data *d, const char *variant, const double *got,
                          const int32_t *want) {
    const double near = z->numbers == NORMAL ? 1e-5 * (double)z->Hi * sqrt((double)z->Di) : 0;
    for (int64_t t = 0; t < z->T; t++) {
        bool *taken = calloc((size_t)z->C + 1, 1);
        for (int64_t j = 0; j < z->K; j++) {
            const int64_t a = (int64_t)got[t * z->K + j], b = want[t * z->K + j];
            const char *wrong = NULL;
            if (a < -1 || a >= z->C || (a < 0) != (b < 0))
                wrong = "is no row";
            else if (a >= 0 && taken[a])
                wrong = "comes twice";
            else if (a != b && fabs(score_of(z, d, t, a) - score_of(z, d, t, b)) > near)
                wrong = "has another score";
            else if (a != b && near == 0)
                wrong = "has the score, but not the index";
            if (wrong)
                ck_abort_msg("%s, variant %s: topk[%lld][%lld] is %lld, on the CPU %lld: it %s", z->name,
                             variant, (long long)t, (long long)j, (long long)a, (long long)b, wrong);
            if (a >= 0) taken[a] = true;
        }
        free(taken);
    }
}

START_TEST(rows_are_chosen) {
    const shape *z = &shapes[_i];
    open_device();
    data d = data_of(z);
    for (cg_dtype real = CG_F32; real <= CG_BF16; real += CG_BF16 - CG_F32) {
        bench b = bench_new(real == CG_F32 ? CG_F32 : CG_F64);
        cg_value *q = bench_constant(&b, "q", CG_SHAPE(z->T, z->Hi, z->Di), d.q);
        cg_value *w = bench_constant(&b, "w", CG_SHAPE(z->T, z->Hi), d.w);
        cg_value *k = bench_constant(&b, "k", CG_SHAPE(z->C, z->Di), d.k);
        cg_value *rows = bench_i32(&b, "rows", CG_SHAPE(z->T, CG_ROW_FIELDS), d.rows);
        cg_value *topk = cg_keep(cg_indexer_topk(b.graph, q, w, k, rows, z->K));
        bench_run(&b);
        const int32_t *want = bench_get_i32(&b, topk);
        const cg_cuda_variant *variants[CG_CUDA_VARIANTS];
        const int n = variants_of(topk->producer, real, variants, real == CG_BF16 ? z->variants : 2);
        for (int v = 0; v < n; v++) {
            call c;
            call_of(&c, topk->producer, real, (const void *[]){d.q, d.w, d.k, d.rows});
            call_twice(&c, variants[v], z->name);
            ck_assert_int_eq(c.fault.what, 0);
            expect_choice(z, &d, variants[v]->name, c.got[0], want);
            for (int64_t i = 0; real == CG_F32 && i < z->T * z->K; i++) /* f32: the CPU's order of sums */
                if (c.got[0][i] != want[i])
                    ck_abort_msg("%s, f32 %s: not the CPU's choice", z->name, variants[v]->name);
            call_free(&c);
        }
        bench_free(&b);
    }
    data_free(&d);
    close_device();
}
END_TEST

/* NaN, once in a row that is seen and many times where nobody looks. */
START_TEST(nan_is_found) {
    const shape z = {"NaN", 20, 3, 40, 150, 10, NORMAL, 3};
    open_device();
    data d = data_of(&z);
    for (int64_t t = 0; t < z.T; t++) d.rows[t * CG_ROW_FIELDS + CG_ROW_VISIBLE] = 0;
    for (int64_t i = 120 * z.Di; i < z.C * z.Di; i++) d.k[i] = NAN;
    d.rows[13 * CG_ROW_FIELDS + CG_ROW_COMPRESSED] = 3;
    d.rows[13 * CG_ROW_FIELDS + CG_ROW_VISIBLE] = 120; /* the last three are NaN */
    d.rows[12 * CG_ROW_FIELDS + CG_ROW_COMPRESSED] = 0;
    d.rows[12 * CG_ROW_FIELDS + CG_ROW_VISIBLE] = 120; /* none */
    d.rows[17 * CG_ROW_FIELDS + CG_ROW_COMPRESSED] = 0;
    d.rows[17 * CG_ROW_FIELDS + CG_ROW_VISIBLE] = 150; /* later */
    bench b = bench_new(CG_F64);
    cg_value *topk = cg_indexer_topk(b.graph, bench_constant(&b, "q", CG_SHAPE(z.T, z.Hi, z.Di), NULL),
                                     bench_constant(&b, "w", CG_SHAPE(z.T, z.Hi), NULL),
                                     bench_constant(&b, "k", CG_SHAPE(z.C, z.Di), NULL),
                                     bench_i32(&b, "rows", CG_SHAPE(z.T, CG_ROW_FIELDS), NULL), z.K);
    const cg_dtype reals[] = {CG_F32, CG_BF16};
    for (int r = 0; r < 2; r++) {
        const cg_cuda_variant *variants[CG_CUDA_VARIANTS];
        const int n = variants_of(topk->producer, reals[r], variants, r ? z.variants : 2);
        for (int v = 0; v < n; v++) {
            call c;
            call_of(&c, topk->producer, reals[r], (const void *[]){d.q, d.w, d.k, d.rows});
            call_run(&c, variants[v], 1);
            ck_assert_int_eq(c.fault.what, 2);
            ck_assert_int_eq(c.fault.place, 13 * z.C + 120);
            call_free(&c);
        }
    }
    bench_free(&b);
    data_free(&d);
    close_device();
}
END_TEST

/* ---- scores of what was chosen ---- */

static const shape list_shapes[] = {
    {"one row", 1, 1, 8, 5, 3, NORMAL, 2},
    {"odd sizes", 29, 11, 40, 300, 37, NORMAL, 2},
    {"full heads", 7, 64, 128, 600, 130, NORMAL, 2},
    {"whole numbers", 50, 37, 24, 520, 33, WHOLE, 2},
    {"whole numbers, full heads", 5, 64, 128, 70, 64, WHOLE, 2},
    {"lists of many", 3, 3, 16, 900, 700, WHOLE, 2},
    {"no slot", 3, 2, 8, 5, 0, NORMAL, 2},
    {"no row", 0, 2, 8, 5, 3, NORMAL, 2},
    {"no key", 3, 2, 8, 0, 3, NORMAL, 2},
    {"channels not in eights", 5, 3, 12, 70, 9, WHOLE, 1},
    {"too many heads", 3, 65, 16, 40, 9, WHOLE, 1},
};

/* Lists in any order with gaps; some rows name a key twice or more, some the same as the row before, some nothing. */
static int32_t *lists_of(const shape *z) {
    int32_t *topk = malloc((size_t)(z->T * z->K + 1) * sizeof *topk);
    for (int64_t i = 0; i < z->T * z->K; i++) {
        const int64_t t = i / z->K, j = i % z->K;
        const uint32_t drawn = cg_random_u32(7, 11, (uint64_t)i);
        if (z->C == 0 || t % 6 == 4 || (t % 6 < 3 && drawn % 5 == 0))
            topk[i] = -1;
        else if (t % 6 == 3) /* each key once */
            topk[i] = j < z->C ? (int32_t)((j * 7 + t) % z->C) : -1;
        else
            topk[i] = (int32_t)(drawn / 5 % (uint32_t)(t % 6 == 5 ? z->C / 4 + 1 : z->C));
    }
    return topk;
}

/* Whole numbers must be right to the bit, after rounding to the dtype; others close. */
static void expect_near(const shape *z, const char *variant, const call *c, int s, const double *want,
                        double bound) {
    const cg_value *value = c->node->out[s];
    double difference = 0, norm = 0;
    for (int64_t i = 0; i < cg_shape_count(&value->shape); i++) {
        double x = want[i];
        const double y = c->got[s][i];
        if (z->numbers == WHOLE) {
            cg_dtype_set(c->out[s], &x, 0, x);
            x = cg_dtype_get(c->out[s], &x, 0);
        }
        if (z->numbers == WHOLE || isinf(x) || isinf(y)) {
            if (x != y)
                ck_abort_msg("%s, variant %s: %s[%lld] is %.9g, on the CPU %.9g", z->name, variant, value->name,
                             (long long)i, y, x);
            continue;
        }
        difference += (x - y) * (x - y);
        norm += x * x;
    }
    if (!(sqrt(difference) <= bound * sqrt(norm)))
        ck_abort_msg("%s, variant %s: %s differs by %.3g of norm %.3g", z->name, variant, value->name,
                     sqrt(difference), sqrt(norm));
}

extern const cg_op cg_op_indexer_scores_at_grad;

static void check_node(const shape *z, const cg_node *node, cg_dtype real, const void *const *inputs,
                       double *const *want) {
    const cg_cuda_variant *variants[CG_CUDA_VARIANTS];
    const int n =
        variants_of(node, real, variants, real == CG_BF16 || z->variants == 2 || z->Hi > 64 ? z->variants : 2);
    for (int v = 0; v < n; v++) {
        call c;
        call_of(&c, node, real, inputs);
        call_twice(&c, variants[v], z->name);
        ck_assert_int_eq(c.fault.what, 0);
        for (int s = 0; s < node->n_out; s++)
            expect_near(z, variants[v]->name, &c, s, want[s], c.out[s] == CG_BF16 ? 1. / 256 : 1e-5);
        call_free(&c);
    }
}

START_TEST(chosen_rows_are_scored) {
    const shape *z = &list_shapes[_i];
    open_device();
    data d = data_of(z);
    int32_t *topk = lists_of(z);
    double *ds = real_data(z, 4, z->T * z->K);
    for (int64_t i = 0; i < z->T * z->K; i++) {
        if (z->numbers == NORMAL) ds[i] = (double)(float)cg_random_normal(7, 4, (uint64_t)i);
        if (topk[i] < 0) ds[i] = NAN;
    }
    bench b = bench_new(CG_F64);
    cg_value *q = bench_real(&b, "q", CG_SHAPE(z->T, z->Hi, z->Di), d.q);
    cg_value *w = bench_real(&b, "w", CG_SHAPE(z->T, z->Hi), d.w);
    cg_value *k = bench_real(&b, "k", CG_SHAPE(z->C, z->Di), d.k);
    cg_value *scores =
        cg_indexer_scores_at(b.graph, q, w, k, bench_i32(&b, "topk", CG_SHAPE(z->T, z->K), topk));
    bench_backward(&b, scores, ds);
    bench_run(&b);
    const cg_node *grad = NULL;
    for (int n = 0; n < b.graph->n_nodes; n++)
        if (b.graph->nodes[n]->op == &cg_op_indexer_scores_at_grad) grad = b.graph->nodes[n];
    double *const want[] = {bench_get(&b, scores)};
    double *const want_grad[] = {bench_grad(&b, q), bench_grad(&b, w), bench_grad(&b, k)};
    for (cg_dtype real = CG_F32; real <= CG_BF16; real += CG_BF16 - CG_F32) {
        check_node(z, scores->producer, real, (const void *[]){d.q, d.w, d.k, topk}, want);
        check_node(z, grad, real, (const void *[]){ds, d.q, d.w, d.k, topk}, want_grad);
    }
    bench_free(&b);
    data_free(&d);
    free(topk);
    free(ds);
    close_device();
}
END_TEST

int main(void) {
    Suite *suite = suite_create("cuda_indexer");
    TCase *tcase = tcase_create("cuda_indexer");
    tcase_set_timeout(tcase, 240);
    suite_add_tcase(suite, tcase);
    tcase_add_loop_test(tcase, rows_are_chosen, 0, (int)(sizeof shapes / sizeof *shapes));
    tcase_add_test(tcase, nan_is_found);
    tcase_add_loop_test(tcase, chosen_rows_are_scored, 0, (int)(sizeof list_shapes / sizeof *list_shapes));
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    const int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
