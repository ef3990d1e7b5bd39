/* Sparse attention in bf16 on the CPU in the place of a device, every variant, against the CPU's f64 kernels on the same
 * rounded numbers. Shapes are odd against the tiles of the fast kernels: rests of heads, columns, keys and places, several
 * tiles and groups of heads, places that are empty, rows that see nothing. */
#include "tests/cuda_device.h"

#include "core/base/bf16.h"
#include "core/base/rng.h"
#include "ops/attributes.h"

extern const cg_op cg_op_csa_attention, cg_op_csa_attention_grad;

enum { MOST = 16 };

/* Is a second order of threads run, for the same bits? Under the sanitizers, which are slow, one is enough: a race shows in
 * any, and test_cuda_ops has more. */
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
static const bool again_too = false;
#else
static const bool again_too = true;
#endif

/* One segment per entry of `segments`, up to a 0; `behind` rows follow the last. */
typedef struct shape {
    const char *name;
    int segments[4], behind, ratio;
    int64_t H, D, K, W; /* K = 0: no chosen rows at all */
    cg_teacher teacher;
    double logits; /* standard deviation, about */
    bool no_sink;  /* of weight 0, in one head */
} shape;

static const shape shapes[] = {
    {"one head, many places", {6}, 0, 1, 1, 8, 70, 3, CG_TEACHER_FULL, 2, false},
    {"several tiles of a window", {35}, 0, 2, 17, 8, 34, 34, CG_TEACHER_FULL, 1, false},
    {"two segments", {9, 8}, 2, 2, 5, 72, 7, 3, CG_TEACHER_FULL, 1, true},
    {"no window", {12}, 0, 2, 3, 16, 5, 0, CG_TEACHER_SINK, 1, false},
    {"window only", {7, 3}, 1, 4, 17, 128, 0, 5, CG_TEACHER_NONE, 1, false},
    {"no row chooses", {3}, 0, 4, 2, 8, 4, 2, CG_TEACHER_FULL, 1, false},
    {"many heads", {9}, 0, 2, 40, 88, 3, 2, CG_TEACHER_COMPRESSED, 3, false},
    {"wide keys", {6}, 0, 2, 16, 136, 4, 3, CG_TEACHER_FULL, 1, false},
    {"full size of a block", {5}, 0, 1, 64, 512, 5, 2, CG_TEACHER_FULL, 2, false},
    {"two groups of heads", {5}, 1, 1, 72, 264, 4, 3, CG_TEACHER_FULL, 4, true},
    {"many places of wide keys", {4}, 0, 1, 18, 136, 70, 9, CG_TEACHER_FULL, 1, false},
};

/* ---- data ---- */

typedef struct data {
    int64_t T, C, n[MOST]; /* elements of each input */
    double *real[MOST];    /* rounded to bf16 where the device reads bf16 */
    int32_t *topk, *rows;
} data;

enum { Q, KV, CKV, SINK, TOPK, ROWS, LSE, DOUT };

static double *normal(uint64_t stream, int64_t n, double scale) {
    double *x = malloc(((size_t)n + 1) * sizeof *x);
    for (int64_t i = 0; i < n; i++)
        x[i] = cg_bf16_get(cg_bf16_of((float)(scale * cg_random_normal(7, stream, (uint64_t)i))));
    return x;
}

static data data_of(const shape *z) {
    data d = {0};
    int64_t c = 0;
    for (int s = 0; z->segments[s]; s++) {
        d.T += z->segments[s];
        d.C += z->segments[s] / z->ratio;
    }
    d.T += z->behind;
    d.rows = malloc((size_t)(d.T * CG_ROW_FIELDS + 1) * sizeof *d.rows);
    d.topk = malloc((size_t)(d.T * z->K + 1) * sizeof *d.topk);
    int64_t t = 0;
    for (int s = 0; z->segments[s]; s++) {
        const int64_t start = t;
        for (; t < start + z->segments[s]; t++) {
            const int32_t facts[] = {(int32_t)start, (int32_t)(t - start), (int32_t)c,
                                     (int32_t)((t - start + 1) / z->ratio), 1};
            memcpy(d.rows + t * CG_ROW_FIELDS, facts, sizeof facts);
        }
        c += z->segments[s] / z->ratio;
    }
    for (; t < d.T; t++)
        memcpy(d.rows + t * CG_ROW_FIELDS, (int32_t[]){(int32_t)t, -1, (int32_t)c, 0, 0},
               CG_ROW_FIELDS * sizeof(int32_t));
    /* some places stay empty, and some rows are chosen twice */
    for (int64_t i = 0; i < d.T * z->K; i++) {
        const int32_t *row = d.rows + i / z->K * CG_ROW_FIELDS;
        const uint32_t drawn = cg_random_u32(7, 99, (uint64_t)i);
        d.topk[i] = row[CG_ROW_VISIBLE] == 0 || drawn % 7 == 0
                        ? -1
                        : row[CG_ROW_COMPRESSED] + (int32_t)(drawn / 7 % (uint32_t)row[CG_ROW_VISIBLE]);
    }
    const int64_t n[] = {d.T * z->H * z->D, d.T * z->D,          d.C * z->D, z->H,
                         d.T * z->K,        d.T * CG_ROW_FIELDS, d.T * z->H, d.T * z->H * z->D};
    memcpy(d.n, n, sizeof n);
    d.real[Q] = normal(1, d.n[Q], z->logits);
    d.real[KV] = normal(2, d.n[KV], 1);
    d.real[CKV] = normal(3, d.n[CKV], 1);
    d.real[SINK] = normal(4, d.n[SINK], 1);
    /* of two groups of heads the second one has the larger shares in the teacher */
    for (int64_t h = 0; z->H > 64 && h < 64; h++) d.real[SINK][h] += 20;
    if (z->no_sink) d.real[SINK][z->H > 64 ? z->H - 1 : 0] = -INFINITY;
    d.real[DOUT] = normal(5, d.n[DOUT], 1);
    for (int64_t i = 0; d.T && i < z->H * z->D; i++) /* a row of negative ones is none of zeros */
        d.real[DOUT][i] = -fabs(d.real[DOUT][i]);
    return d;
}

static void data_free(data *d) {
    for (int i = 0; i < MOST; i++) free(d->real[i]);
    free(d->topk);
    free(d->rows);
}

/* ---- on the device ---- */

/* A call of one variant: inputs and outputs as their kernels take them, everything in memory of its own. */
typedef struct call {
    cg_tensor in[MOST], out[MOST];
    int64_t bytes[MOST];
    void *workspace;
    cg_device_fault *fault;
} call;

static void *device_memory(int64_t bytes, const void *source) {
    cg_error error = {0};
    void *memory = cg_device_alloc(device, bytes, &error);
    if (!memory || !(source ? cg_device_write(device, memory, source, bytes, &error)
                            : cg_device_fill(device, memory, 0xff, bytes, &error)))
        ck_abort_msg("%s", error.text);
    return memory;
}

/* Input i, rounded where it is no statistic. */
static cg_tensor device_tensor(const cg_value *value, cg_dtype real, const data *d, int i) {
    cg_tensor tensor = {.dtype = value->dtype == CG_I32 ? CG_I32 : real, .shape = value->shape};
    const int64_t bytes = cg_tensor_bytes(tensor.dtype, &tensor.shape), n = cg_shape_count(&tensor.shape);
    if (tensor.dtype == CG_I32) {
        tensor.data = device_memory(bytes, i == TOPK ? d->topk : d->rows);
        return tensor;
    }
    char *numbers = malloc((size_t)bytes + 1);
    for (int64_t k = 0; k < n; k++) {
        if (real == CG_BF16)
            ((uint16_t *)numbers)[k] = cg_bf16_of((float)d->real[i][k]);
        else
            ((float *)numbers)[k] = (float)d->real[i][k];
    }
    tensor.data = device_memory(bytes, numbers);
    free(numbers);
    return tensor;
}

/* A node of the f64 graph as it would be in bf16. */
typedef struct bf16_node {
    cg_node node;
    cg_value values[MOST], *in[MOST];
} bf16_node;

static void bf16_node_init(bf16_node *b, const cg_node *node) {
    b->node = *node;
    for (int i = 0; i < node->n_in; i++) {
        b->in[i] = node->in[i] ? &b->values[i] : NULL;
        if (!node->in[i]) continue;
        b->values[i] = *node->in[i];
        if (b->values[i].dtype != CG_I32) b->values[i].dtype = CG_BF16;
    }
    b->node.in = b->in;
}

/* Runs a node of the f64 graph on the device, and reads its outputs as doubles. */
static void run_on_device(const cg_node *node, const cg_cuda_variant *variant, const data *d, uint64_t seed,
                          double *out[MOST]) {
    cg_error error = {0};
    call c = {0};
    cg_device_host_seed(seed);
    for (int i = 0; i < node->n_in; i++)
        if (node->in[i])
            c.in[i] = device_tensor(node->in[i], node->op->statistic_in >> i & 1 ? CG_F32 : CG_BF16, d, i);
    for (int s = 0; s < node->n_out; s++) {
        c.out[s] = (cg_tensor){.dtype = node->op->statistic_out >> s & 1 ? CG_F32 : CG_BF16,
                               .shape = node->out[s]->shape};
        c.bytes[s] = cg_tensor_bytes(c.out[s].dtype, &c.out[s].shape);
        c.out[s].data = device_memory(c.bytes[s], NULL);
    }
    bf16_node as_bf16;
    bf16_node_init(&as_bf16, node);
    const int64_t workspace = variant->workspace ? (int64_t)variant->workspace(&as_bf16.node) : 0;
    c.workspace = device_memory(workspace, NULL);
    const cg_device_fault none = {0};
    c.fault = device_memory(sizeof none, &none);
    const cg_run_args args = {.n_in = node->n_in,
                              .n_out = node->n_out,
                              .in = c.in,
                              .out = c.out,
                              .attr = node->attr,
                              .workspace = c.workspace,
                              .error = &error,
                              .fault = c.fault};
    cg_device_host_most_shared();
    if (!variant->launch[CG_BF16](&args, cg_device_stream(device)) || !cg_device_wait(device, &error))
        ck_abort_msg("%s: %s", variant->name, error.text);
    expect_shared(variant, &as_bf16.node);
    cg_device_fault fault;
    ck_assert(cg_device_read(device, &fault, c.fault, sizeof fault, &error));
    ck_assert_int_eq(fault.what, 0);
    for (int s = 0; s < node->n_out; s++) {
        const int64_t n = cg_shape_count(&c.out[s].shape);
        void *numbers = malloc((size_t)c.bytes[s] + 1);
        ck_assert(cg_device_read(device, numbers, c.out[s].data, c.bytes[s], &error));
        out[s] = malloc(((size_t)n + 1) * sizeof(double));
        for (int64_t k = 0; k < n; k++)
            out[s][k] = c.out[s].dtype == CG_F32 ? (double)((float *)numbers)[k]
                                                 : (double)cg_bf16_get(((uint16_t *)numbers)[k]);
        free(numbers);
        cg_device_free(device, c.out[s].data);
    }
    for (int i = 0; i < node->n_in; i++)
        if (c.in[i].data) cg_device_free(device, c.in[i].data);
    cg_device_free(device, c.workspace);
    cg_device_free(device, c.fault);
}

/* ---- comparisons ---- */

/* Relative norm; infinities must be the same. */
static void expect_norm(const char *where, const char *variant, const char *what, int64_t n, const double *got,
                        const double *want, double bound) {
    double difference = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        if (isinf(want[i]) && want[i] == got[i]) continue;
        difference += (got[i] - want[i]) * (got[i] - want[i]);
        norm += want[i] * want[i];
    }
    if (!(sqrt(difference) <= bound * sqrt(norm)))
        ck_abort_msg("%s, variant %s: %s differs by %.3g of norm %.3g, bound %.1e", where, variant, what,
                     sqrt(difference), sqrt(norm), bound);
}

static const double rounding = 1. / 256; /* half a step of bf16 is the worst, a third of it usual */

static void check_node(const shape *z, const cg_node *node, const data *d, const double *const *want,
                       const double *bounds, int least_variants) {
    const cg_cuda_op *op = cg_cuda_op_find(node->op->name);
    int n_variants = 0;
    bf16_node as_bf16;
    bf16_node_init(&as_bf16, node);
    for (int v = 0; v < CG_CUDA_VARIANTS && op->variants[v].name; v++) {
        const cg_cuda_variant *variant = &op->variants[v];
        double *out[MOST], *again[MOST];
        if (!cg_cuda_can_run(&backend, variant, &as_bf16.node)) continue;
        n_variants++;
        run_on_device(node, variant, d, 1, out);
        if (again_too) run_on_device(node, variant, d, 2, again);
        for (int s = 0; s < node->n_out; s++) {
            const int64_t n = cg_shape_count(&node->out[s]->shape);
            expect_norm(z->name, variant->name, node->op->out[s], n, out[s], want[s], bounds[s]);
            if (again_too && memcmp(out[s], again[s], (size_t)n * sizeof(double)))
                ck_abort_msg("%s, variant %s: %s has other bits in another order of threads", z->name,
                             variant->name, node->op->out[s]);
            free(out[s]);
            if (again_too) free(again[s]);
        }
    }
    ck_assert_int_ge(n_variants, least_variants);
}

START_TEST(bf16_agrees_with_f64) {
    const shape *z = &shapes[_i];
    open_device();
    data d = data_of(z);
    bench b = bench_new(CG_F64);
    cg_value *q = bench_real(&b, "q", CG_SHAPE(d.T, z->H, z->D), d.real[Q]);
    cg_value *kv = bench_real(&b, "kv", CG_SHAPE(d.T, z->D), d.real[KV]);
    cg_value *ckv = z->K ? bench_real(&b, "ckv", CG_SHAPE(d.C, z->D), d.real[CKV]) : NULL;
    cg_value *sink = bench_real(&b, "sink", CG_SHAPE(z->H), d.real[SINK]);
    cg_value *topk = z->K ? bench_i32(&b, "topk", CG_SHAPE(d.T, z->K), d.topk) : NULL;
    cg_value *rows = bench_i32(&b, "rows", CG_SHAPE(d.T, CG_ROW_FIELDS), d.rows);
    const cg_attention attention =
        cg_csa_attention(b.graph, q, kv, ckv, sink, topk, rows, z->W, 1 / sqrt((double)z->D), z->teacher);
    const cg_node *node = attention.out->producer;
    for (int s = 0; s < node->n_out; s++) cg_keep(node->out[s]);
    bench_backward(&b, attention.out, d.real[DOUT]);
    bench_run(&b);
    const double *want[MOST];
    for (int s = 0; s < node->n_out; s++) want[s] = bench_get(&b, node->out[s]);
    check_node(z, node, &d, want, (double[]){rounding, 1e-6, 1e-6, 1e-5}, 2);

    /* lse as the forward kernel rounds it */
    d.real[LSE] = malloc(((size_t)d.n[LSE] + 1) * sizeof(double));
    for (int64_t i = 0; i < d.n[LSE]; i++) d.real[LSE][i] = (double)(float)want[1][i];
    const cg_node *grad = NULL;
    for (int n = 0; n < b.graph->n_nodes; n++)
        if (b.graph->nodes[n]->op == &cg_op_csa_attention_grad) grad = b.graph->nodes[n];
    want[0] = bench_grad(&b, q);
    want[1] = bench_grad(&b, kv);
    want[2] = bench_grad(&b, sink);
    if (ckv) want[3] = bench_grad(&b, ckv);
    check_node(z, grad, &d, want, (double[]){2 * rounding, 2 * rounding, 2 * rounding, 2 * rounding}, 2);
    bench_free(&b);
    data_free(&d);
    close_device();
}
END_TEST

int main(void) {
    Suite *suite = suite_create("cuda_attention");
    TCase *tcase = tcase_create("cuda_attention");
    tcase_set_timeout(tcase, 240);
    suite_add_tcase(suite, tcase);
    tcase_add_loop_test(tcase, bf16_agrees_with_f64, 0, (int)(sizeof shapes / sizeof *shapes));
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    const int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
