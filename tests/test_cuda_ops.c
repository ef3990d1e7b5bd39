/* Every CUDA kernel, run on the CPU in the place of a device (ops/cuda/host), against the CPU kernel of the same op: all
 * cases of ops/<op>.c, every variant, f32, f64 and bf16 (against f64 on the same rounded inputs), several orders of threads,
 * once with a block of memory per value and once in one arena whose runs are recorded and played. */
#include "tests/cuda_device.h"

#include <math.h>

/* Relative norms of the difference; f32 and bf16 cases may state a wider one. */
static const double f32_bound = 1e-5, f64_bound = 1e-12, bf16_bound = 0x1p-8;

/* For ThreadSanitizer one run in f32 is enough: a race shows whatever the order of threads, and slowly. */
#ifdef __SANITIZE_THREAD__
static const bool races = true;
#else
static const bool races = false;
#endif

/* Recordings launch the same kernels: AddressSanitizer, which is slow, sees two orders of threads without them. */
#ifdef __SANITIZE_ADDRESS__
static const bool records = false;
#else
static const bool records = true;
#endif

enum { ERROR_SEEDS = 3, MOST_VALUES = 3 * CG_MAX_IN };

/* ---- one case, on the CPU or the device ---- */

typedef struct case_run {
    cg_case the_case;
    cg_case_graph built;
    cg_backend backend;
    cg_plan *plan;
    cg_exec *exec;
    cg_error error;
    int n; /* outputs, gradients, and inputs changed in place */
    const cg_value *values[MOST_VALUES];
    void *data[MOST_VALUES]; /* as read after the last run */
} case_run;

static size_t bytes_of(const cg_value *value) { return (size_t)cg_tensor_bytes(value->dtype, &value->shape); }

/* variant NULL: the CPU. */
static bool case_build(case_run *run, const cg_op *op, const cg_case *the_case, cg_dtype real,
                       const char *variant, const cg_exec_options *options) {
    memset(run, 0, sizeof *run);
    run->the_case = *the_case;
    ck_assert(cg_case_build(&cg_all_ops, op, &run->the_case, real, &run->built));
    const cg_error *refused = cg_graph_error(run->built.graph);
    if (refused) ck_abort_msg("%s, case %s: %s", op->name, the_case->name, refused->text);
    if (variant && !cg_cuda_backend(&run->backend, device, variant, &run->error)) return false;
    run->plan = cg_plan_make(run->built.graph, &(cg_plan_options){.backend = variant ? &run->backend : NULL},
                             &run->error);
    if (!run->plan || !(run->exec = cg_exec_new(run->plan, options, &run->error))) return false;
    for (int s = 0; s < run->built.node->n_out; s++) run->values[run->n++] = run->built.node->out[s];
    for (int k = 0; k < run->built.n_wrt && run->built.n_seeds; k++) run->values[run->n++] = run->built.grad[k];
    for (int i = 0; i < run->built.n_in; i++)
        if (op->mutates & CG_BIT(i)) run->values[run->n++] = run->built.in[i];
    for (int i = 0; i < run->n; i++) run->data[i] = malloc(bytes_of(run->values[i]) + 1);
    return true;
}

static bool case_again(case_run *run) {
    if (!cg_case_fill(&run->built, run->exec, &run->error) ||
        !cg_exec_run(run->exec, CG_ALL_PASSES, &run->error))
        return false;
    for (int i = 0; i < run->n; i++) cg_exec_read(run->exec, run->values[i], run->data[i]);
    return true;
}

static void case_free(case_run *run) {
    for (int i = 0; i < run->n; i++) free(run->data[i]);
    cg_exec_free(run->exec);
    cg_plan_free(run->plan);
    cg_case_free(&run->built);
}

/* ---- comparisons ---- */

static void abort_in(const case_run *run, const char *variant, const char *how, const char *what) {
    ck_abort_msg("%s, case %s, variant %s, %s: %s", run->built.op->name, run->the_case.name, variant, how,
                 what);
}

static void expect_same_bits(const case_run *a, const case_run *b, const char *variant, const char *how) {
    ck_assert_int_eq(a->n, b->n);
    for (int i = 0; i < a->n; i++)
        if (memcmp(a->data[i], b->data[i], bytes_of(a->values[i])))
            abort_in(a, variant, how, "the bits differ");
}

static double bound_of(const cg_case *c, cg_dtype dtype) {
    if (dtype == CG_F64) return f64_bound;
    if (dtype == CG_BF16) return c->bf16_bound > 0 ? c->bf16_bound : bf16_bound;
    return c->f32_bound > f32_bound ? c->f32_bound : f32_bound;
}

/* Markers (NaN, infinities) must be the same, and the rest close. */
static void expect_near(const case_run *cpu, const case_run *gpu, cg_dtype real, const char *variant) {
    char what[300];
    for (int i = 0; i < cpu->n; i++) {
        const cg_value *want = cpu->values[i], *got = gpu->values[i];
        double difference = 0, norm = 0;
        for (int64_t k = 0; k < cg_shape_count(&want->shape); k++) {
            double x = cg_dtype_get(want->dtype, cpu->data[i], k),
                   y = cg_dtype_get(got->dtype, gpu->data[i], k);
            bool marker = !isfinite(x) || !isfinite(y) || want->dtype == CG_I32;
            if (marker && !(x == y || (isnan(x) && isnan(y)))) {
                snprintf(what, sizeof what, "%s[%lld] is %g, on the CPU %g", want->name, (long long)k, y, x);
                abort_in(gpu, variant, cg_dtype_name(real), what);
            }
            if (marker) continue;
            difference += (x - y) * (x - y);
            norm += x * x;
        }
        const double bound = bound_of(&cpu->the_case, got->dtype);
        if (sqrt(difference) <= bound * sqrt(norm)) continue;
        snprintf(what, sizeof what, "%s differs by %.3g of norm %.3g, bound %.1e", want->name, sqrt(difference),
                 sqrt(norm), bound);
        abort_in(gpu, variant, cg_dtype_name(real), what);
    }
}

/* ---- all cases ---- */

static void check_runs(const cg_op *op, const cg_case *c, cg_dtype real, const char *variant) {
    case_run cpu, first, arena;
    bool ok =
        case_build(&cpu, op, c, real == CG_BF16 ? CG_F64 : real, NULL, &(cg_exec_options){.poison = true});
    cpu.built.as_bf16 = real == CG_BF16;
    if (!ok || !case_again(&cpu)) abort_in(&cpu, "of the CPU", cg_dtype_name(real), cpu.error.text);
    cg_device_host_seed(1);
    if (!case_build(&first, op, c, real, variant, &(cg_exec_options){.separate = true, .poison = true}) ||
        !case_again(&first))
        abort_in(&first, variant, cg_dtype_name(real), first.error.text);
    expect_near(&cpu, &first, real, variant);
    if (races) {
        case_free(&cpu);
        case_free(&first);
        return;
    }
    if (!case_build(&arena, op, c, real, variant, NULL))
        abort_in(&arena, variant, cg_dtype_name(real), arena.error.text);
    static const char *const runs[] = {"in one arena", "recorded", "played again"};
    for (int i = 0; i < (records ? 3 : 1); i++) {
        cg_device_host_seed(2 + (uint64_t)i); /* other orders of threads */
        if (!case_again(&arena)) abort_in(&arena, variant, runs[i], arena.error.text);
        expect_same_bits(&first, &arena, variant, runs[i]);
    }
    if (cg_exec_measured_bytes(arena.exec) != arena.plan->peak_bytes)
        abort_in(&arena, variant, "in one arena", "measured bytes are not the planned ones");
    case_free(&cpu);
    case_free(&first);
    case_free(&arena);
}

static void check_error(const cg_op *op, const cg_case *c, cg_dtype real, const char *variant) {
    case_run cpu, gpu;
    if (!case_build(&cpu, op, c, real, NULL, NULL)) abort_in(&cpu, "of the CPU", "building", cpu.error.text);
    ck_assert(!case_again(&cpu));
    for (uint64_t seed = 1; seed <= ERROR_SEEDS; seed++) {
        cg_device_host_seed(seed);
        if (!case_build(&gpu, op, c, real, variant, &(cg_exec_options){.separate = true, .poison = true}))
            abort_in(&gpu, variant, "building", gpu.error.text);
        if (case_again(&gpu)) abort_in(&gpu, variant, "wrong data", "it ran");
        if (strcmp(gpu.error.text, cpu.error.text)) abort_in(&gpu, variant, cpu.error.text, gpu.error.text);
        ck_assert_int_eq(gpu.error.code, cpu.error.code);
        case_free(&gpu);
    }
    case_free(&cpu);
}

/* Does the variant run this case in this dtype? Another one does where it does not fit, and ops on statistics and indices
 * alone are the same in bf16 as in f32. */
static bool is_run_by(const cg_op *op, const cg_case *c, cg_dtype real, const char *variant) {
    cg_case the_case = *c;
    cg_case_graph built;
    cg_backend with_variant;
    cg_device_kernel kernel = {0};
    cg_error error = {0};
    ck_assert(cg_case_build(&cg_all_ops, op, &the_case, real, &built));
    ck_assert(cg_cuda_backend(&with_variant, device, variant, &error));
    const cg_dtype dtype = cg_node_dtype(built.node);
    bool is = (dtype == real || (dtype == CG_I32 && real == CG_F32)) &&
              with_variant.kernel_of(&with_variant, built.node, &kernel, &error) &&
              !strcmp(kernel.variant, variant);
    cg_case_free(&built);
    return is;
}

static void check_variant(const cg_op *op, const cg_cuda_variant *variant, cg_dtype real) {
    int n_cases = 0;
    for (int c = 0; c < op->n_cases; c++) {
        const cg_case *the_case = &op->cases[c];
        if (the_case->refuses || !is_run_by(op, the_case, real, variant->name)) continue;
        (the_case->run_error ? check_error : check_runs)(op, the_case, real, variant->name);
        n_cases++;
    }
    if (!n_cases && real != CG_BF16) /* tiles of tensor cores have sizes and suites of their own */
        ck_abort_msg("%s: no case for variant %s in %s", op->name, variant->name, cg_dtype_name(real));
}

static void check_op(const cg_op *op) {
    static const cg_dtype reals[] = {CG_F32, CG_F64, CG_BF16};
    const cg_cuda_op *kernels = cg_cuda_op_find(op->name);
    const char *only = getenv("CSAGRAD_TEST_OP"); /* for whoever works on one */
    if (!kernels || (only && strcmp(only, op->name))) return;
    cg_device_facts facts;
    cg_device_facts_of(device, &facts);
    for (int v = 0; v < CG_CUDA_VARIANTS && kernels->variants[v].name; v++)
        for (int d = 0; d < (races ? 1 : 3); d++) {
            const cg_cuda_variant *variant = &kernels->variants[v];
            const bool has = variant->launch[reals[d]] || (reals[d] == CG_F32 && variant->launch[CG_I32]);
            if (has && variant->least_sm <= facts.sm) check_variant(op, variant, reals[d]);
        }
}

/* One test per op, so that they run side by side and each has its own time. */
START_TEST(kernels_agree_with_the_cpu) {
    open_device();
    check_op(cg_all_ops.list[_i]);
    close_device();
}
END_TEST

/* Has the op, on statistics and indices alone maybe, values that become bf16 in one of its cases? */
static bool holds_bf16(const cg_op *op) {
    bool holds = false;
    for (int c = 0; c < op->n_cases && !holds; c++) {
        cg_case the_case = op->cases[c];
        cg_case_graph built;
        if (the_case.refuses) continue;
        ck_assert(cg_case_build(&cg_all_ops, op, &the_case, CG_BF16, &built));
        holds = cg_node_dtype(built.node) == CG_BF16;
        cg_case_free(&built);
    }
    return holds;
}

START_TEST(tables_are_complete) {
    for (int o = 0; o < cg_all_ops.n; o++) {
        const cg_op *op = cg_all_ops.list[o];
        const cg_cuda_op *kernels = cg_cuda_op_find(op->name);
        if (op->alias) continue;
        if (!kernels) ck_abort_msg("%s: no table in ops/cuda", op->name);
        const cg_cuda_variant *plain = &kernels->variants[0];
        if (!plain->name || strcmp(plain->name, "plain") || plain->fits || plain->least_sm)
            ck_abort_msg("%s: the first variant must be \"plain\" and run anywhere", op->name);
        for (cg_dtype d = CG_F32; d <= CG_I32; d++)
            if (!cg_op_kernel(op, d) != !plain->launch[d])
                ck_abort_msg("%s: the CPU and plain differ in what they do for %s", op->name, cg_dtype_name(d));
        if (holds_bf16(op) && !plain->launch[CG_BF16])
            ck_abort_msg("%s: plain has no kernel for bf16", op->name);
        bool errs = false;
        for (int c = 0; c < op->n_cases; c++) errs |= op->cases[c].run_error != NULL;
        if (errs != (kernels->describe != NULL))
            ck_abort_msg("%s: %s", op->name,
                         errs ? "wrong data have a case, but no sentence on a device"
                              : "wrong data have a sentence on a device, but no case");
    }
}
END_TEST

/* ---- the backend as a whole ---- */

START_TEST(variants_are_chosen) {
    open_device();
    cg_graph *g = cg_graph_new(&cg_all_ops);
    cg_value *x = cg_leaf(g, CG_LEAF_INPUT, "x", CG_F32, CG_SHAPE(20, 20));
    cg_keep(cg_scale(g, cg_matmul(g, x, x, false, false), 2));
    static const struct {
        const char *forced, *matmul, *scale;
    } want[] = {{NULL, "fast", "plain"}, {"plain", "plain", "plain"}, {"fast", "fast", "plain"}};
    for (int i = 0; i < 3; i++) {
        cg_error error = {0};
        cg_backend with_variant;
        cg_device_kernel kernel;
        ck_assert(cg_cuda_backend(&with_variant, device, want[i].forced, &error));
        ck_assert(with_variant.kernel_of(&with_variant, g->nodes[0], &kernel, &error));
        ck_assert_str_eq(kernel.variant, want[i].matmul);
        ck_assert(with_variant.kernel_of(&with_variant, g->nodes[1], &kernel, &error));
        ck_assert_str_eq(kernel.variant, want[i].scale);
    }
    cg_error error = {0};
    cg_backend with_variant;
    ck_assert(!cg_cuda_backend(&with_variant, device, "plan", &error));
    ck_assert_str_eq(error.text, "no CUDA kernel has a variant \"plan\", did you mean plain?");
    cg_graph_free(g);
    close_device();
}
END_TEST

/* Every op that has a faster kernel still has it. */
START_TEST(no_variant_is_missing) {
    static const char *const fast[] = {"accumulate",
                                       "adamw",
                                       "add",
                                       "cast",
                                       "cross_entropy",
                                       "csa_attention",
                                       "embedding",
                                       "global_norm",
                                       "grouped_linear",
                                       "grouped_outer",
                                       "hadamard",
                                       "indexer_head_scores_grad",
                                       "indexer_kl",
                                       "indexer_kl_grad",
                                       "indexer_topk",
                                       "indexer_scores_at",
                                       "matmul",
                                       "mul",
                                       "relu",
                                       "relu_grad",
                                       "rms_norm",
                                       "rms_norm_grad",
                                       "rope",
                                       "swiglu",
                                       "swiglu_grad",
                                       "topk",
                                       "embedding_grad",
                                       "cross_entropy_grad",
                                       "csa_attention_grad",
                                       "indexer_scores_at_grad"};
    static const char *const others[][2] = {{"csa_attention", "fast_wide"},
                                            {"csa_attention", "wgmma"},
                                            {"csa_attention_grad", "fast_wide"},
                                            {"csa_attention_grad", "wgmma"},
                                            {"indexer_topk", "wgmma"}};
    const int n_fast = (int)(sizeof fast / sizeof *fast), n = n_fast + (int)(sizeof others / sizeof *others);
    for (int i = 0; i < n; i++) {
        const char *op = i < n_fast ? fast[i] : others[i - n_fast][0],
                   *name = i < n_fast ? "fast" : others[i - n_fast][1];
        const cg_cuda_op *kernels = cg_cuda_op_find(op);
        bool found = false;
        for (int v = 0; kernels && v < CG_CUDA_VARIANTS && kernels->variants[v].name; v++)
            found |= !strcmp(kernels->variants[v].name, name);
        if (!found) ck_abort_msg("%s has no variant %s", op, name);
    }
}
END_TEST

/* A node of an op, or the gradient of one, on leaves of sizes a, b and K; what they are is said below. */
static const cg_node *sized_node(cg_graph *g, const char *op, cg_dtype real, int64_t a, int64_t b, int64_t K) {
    const cg_dtype statistic = cg_statistic_dtype(real);
#define LEAF(name, dtype, ...) cg_leaf(g, CG_LEAF_PARAMETER, name, dtype, CG_SHAPE(__VA_ARGS__))
#define INTS(name, ...) cg_leaf(g, CG_LEAF_INPUT, name, CG_I32, CG_SHAPE(__VA_ARGS__))
    cg_value *y = NULL;
    if (!strncmp(op, "cross_entropy", 13))
        y = cg_cross_entropy(g, LEAF("logits", real, 3, a), INTS("targets", 3));
    if (!strncmp(op, "embedding", 9)) y = cg_embedding(g, LEAF("table", real, 5, a), INTS("tokens", 3));
    if (!strcmp(op, "hadamard")) y = cg_hadamard(g, LEAF("x", real, 2, a));
    if (!strncmp(op, "rms_norm", 8)) y = cg_rms_norm(g, LEAF("x", real, 2, a), LEAF("w", statistic, a), 1e-6);
    if (!strcmp(op, "rope"))
        y = cg_rope(g, LEAF("x", real, 2, a), INTS("positions", 2),
                    &(cg_rope_attr){.n_rotary = b, .base = 100});
    if (!strncmp(op, "indexer_kl", 10))
        y = cg_indexer_kl(g, LEAF("scores", real, 2, K), cg_detach(g, LEAF("teacher", real, 2, K)),
                          INTS("rows", 2, CG_ROW_FIELDS), CG_REDUCE_SUM, 1);
    if (!strcmp(op, "topk")) y = cg_topk(g, LEAF("scores", real, 2, 5000), INTS("rows", 2, CG_ROW_FIELDS), K);
    if (!strcmp(op, "indexer_topk"))
        y = cg_indexer_topk(g, LEAF("q", real, 2, a, b), LEAF("w", real, 2, a), LEAF("k", real, 3000, b),
                            INTS("rows", 2, CG_ROW_FIELDS), K);
    if (!strncmp(op, "indexer_scores_at", 17))
        y = cg_indexer_scores_at(g, LEAF("q", real, 2, a, b), LEAF("w", real, 2, a), LEAF("k", real, 3000, b),
                                 INTS("topk", 2, K));
    if (!strncmp(op, "csa_attention", 13))
        y = cg_csa_attention(g, LEAF("q", real, 2, a, b), LEAF("kv", real, 2, b), LEAF("ckv", real, 3, b),
                             LEAF("sink", statistic, a), INTS("topk", 2, K), INTS("rows", 2, CG_ROW_FIELDS), 4,
                             1, CG_TEACHER_NONE)
                .out;
#undef LEAF
#undef INTS
    if (cg_graph_error(g) || !y) ck_abort_msg("%s: %s", op, y ? cg_graph_error(g)->text : "no such node");
    if (!strcmp(y->producer->op->name, op)) return y->producer;
    cg_value *seed = cg_leaf(g, CG_LEAF_INPUT, "seed", y->dtype, y->shape), *wrt[8], *grads[8];
    int n = 0;
    for (int v = 0; v < g->n_values && n < 8; v++)
        if (g->values[v]->leaf && g->values[v]->needs_grad) wrt[n++] = g->values[v];
    if (!cg_autodiff(g, &y, &seed, 1, wrt, n, grads)) ck_abort_msg("%s: %s", op, cg_graph_error(g)->text);
    for (int i = 0; i < g->n_nodes; i++)
        if (!strcmp(g->nodes[i]->op->name, op)) return g->nodes[i];
    ck_abort_msg("%s was not built", op);
    return NULL;
}

/* What runs a node of the largest size that a variant can do, and of the next. Packs are of 16 bytes; bf16 tiles have pieces
 * of 8 columns. */
START_TEST(sizes_choose_the_variant) {
    static const struct {
        const char *op;
        cg_dtype real;
        int64_t a, b, K;
        const char *want;
    } list[] = {
        {"cross_entropy", CG_F32, 20, 0, 0, "fast"}, /* rows of whole packs */
        {"cross_entropy", CG_F32, 22, 0, 0, "plain"},
        {"cross_entropy", CG_F64, 22, 0, 0, "fast"},
        {"cross_entropy", CG_F64, 21, 0, 0, "plain"},
        {"cross_entropy", CG_BF16, 24, 0, 0, "fast"},
        {"cross_entropy", CG_BF16, 20, 0, 0, "plain"},
        {"cross_entropy_grad", CG_F32, 20, 0, 0, "fast"},
        {"cross_entropy_grad", CG_F32, 22, 0, 0, "plain"},
        {"embedding", CG_F32, 20, 0, 0, "fast"},
        {"embedding", CG_F32, 18, 0, 0, "plain"},
        {"embedding_grad", CG_F32, 20, 0, 0, "fast"},
        {"embedding_grad", CG_F32, 18, 0, 0, "plain"},
        {"rms_norm", CG_F32, 20, 0, 0, "fast"},
        {"rms_norm", CG_F32, 18, 0, 0, "plain"},
        {"rms_norm", CG_F32, 8196, 0, 0, "fast"},
        {"rms_norm_grad", CG_F32, 18, 0, 0, "plain"},
        {"rms_norm_grad", CG_F32, 8192, 0, 0, "fast"}, /* 8 packs for each of 256 threads */
        {"rms_norm_grad", CG_F32, 8196, 0, 0, "plain"},
        {"rope", CG_F32, 200, 128, 0, "fast"}, /* 64 pairs */
        {"rope", CG_F32, 200, 132, 0, "plain"},
        {"rope", CG_F32, 200, 126, 0, "plain"},
        {"rope", CG_F32, 202, 128, 0, "plain"},
        {"hadamard", CG_F32, 1024, 0, 0, "fast"}, /* 32 numbers a lane */
        {"hadamard", CG_F32, 2048, 0, 0, "plain"},
        {"indexer_kl", CG_F32, 0, 0, 1024, "fast"},
        {"indexer_kl", CG_F32, 0, 0, 1025, "plain"},
        {"indexer_kl", CG_F64, 0, 0, 1024, "plain"},
        {"indexer_kl_grad", CG_F32, 0, 0, 1024, "fast"},
        {"indexer_kl_grad", CG_F32, 0, 0, 1025, "plain"},
        {"topk", CG_F32, 0, 0, 2048, "fast"}, /* what a warp keeps */
        {"topk", CG_F32, 0, 0, 2049, "plain"},
        {"indexer_topk", CG_F32, 65, 129, 2048, "fast"}, /* f32: any heads and channels */
        {"indexer_topk", CG_F32, 4, 16, 2049, "plain"},
        {"indexer_topk", CG_BF16, 64, 128, 16, "wgmma"},
        {"indexer_topk", CG_BF16, 64, 40, 16, "wgmma"},
        {"indexer_topk", CG_BF16, 64, 32, 16, "fast"},
        {"indexer_topk", CG_BF16, 65, 128, 16, "plain"},
        {"indexer_topk", CG_BF16, 64, 136, 16, "plain"},
        {"indexer_topk", CG_BF16, 64, 36, 16, "plain"},
        {"indexer_topk", CG_BF16, 4, 32, 2049, "plain"},
        {"indexer_scores_at", CG_F32, 64, 128, 16, "fast"},
        {"indexer_scores_at", CG_F32, 65, 128, 16, "plain"},
        {"indexer_scores_at", CG_F32, 64, 129, 16, "plain"},
        {"indexer_scores_at", CG_F32, 3, 13, 3000, "fast"},
        {"indexer_scores_at", CG_BF16, 64, 128, 16, "fast"},
        {"indexer_scores_at", CG_BF16, 64, 124, 16, "plain"},
        {"indexer_scores_at_grad", CG_F32, 64, 128, 16, "fast"},
        {"indexer_scores_at_grad", CG_F32, 65, 128, 16, "plain"},
        {"indexer_scores_at_grad", CG_F32, 64, 129, 16, "plain"},
        {"indexer_scores_at_grad", CG_F32, 4, 16, 2048, "fast"},
        {"indexer_scores_at_grad", CG_F32, 4, 16, 2049, "plain"},
        {"indexer_scores_at_grad", CG_BF16, 64, 124, 16, "plain"},
        {"csa_attention", CG_F32, 16, 128, 4, "plain"}, /* tensor cores take bf16 alone */
        {"csa_attention", CG_BF16, 17, 128, 4, "fast"},
        {"csa_attention", CG_BF16, 16, 136, 4, "fast"},
        {"csa_attention", CG_BF16, 17, 136, 4, "wgmma"},
        {"csa_attention", CG_BF16, 64, 512, 4, "wgmma"},
        {"csa_attention", CG_BF16, 64, 520, 4, "plain"},
        {"csa_attention", CG_BF16, 4, 20, 4, "plain"},
        {"csa_attention_grad", CG_BF16, 33, 128, 4, "fast"},
        {"csa_attention_grad", CG_BF16, 32, 136, 4, "fast"},
        {"csa_attention_grad", CG_BF16, 33, 136, 4, "wgmma"},
        {"csa_attention_grad", CG_BF16, 33, 520, 4, "plain"},
        {"csa_attention_grad", CG_BF16, 4, 20, 4, "plain"},
    };
    open_device();
    for (size_t i = 0; i < sizeof list / sizeof *list && device_is_emulated(); i++) {
        cg_error error = {0};
        cg_device_kernel kernel;
        cg_graph *g = cg_graph_new(&cg_all_ops);
        const cg_node *node = sized_node(g, list[i].op, list[i].real, list[i].a, list[i].b, list[i].K);
        if (!backend.kernel_of(&backend, node, &kernel, &error)) ck_abort_msg("%s", error.text);
        if (strcmp(kernel.variant, list[i].want))
            ck_abort_msg("%s in %s of %lld, %lld, %lld: variant %s is chosen, expected %s", list[i].op,
                         cg_dtype_name(list[i].real), (long long)list[i].a, (long long)list[i].b,
                         (long long)list[i].K, kernel.variant, list[i].want);
        cg_graph_free(g);
    }
    close_device();
}
END_TEST

/* A variant whose blocks need more shared memory than the device has is not chosen: lists of 2048 beside tiles of keys. */
START_TEST(shared_memory_bounds_the_choice) {
    open_device();
    cg_device_facts facts;
    cg_device_facts_of(device, &facts);
    cg_graph *g = cg_graph_new(&cg_all_ops);
    const cg_value *topk =
        cg_indexer_topk(g, cg_leaf(g, CG_LEAF_INPUT, "q", CG_BF16, CG_SHAPE(3, 64, 128)),
                        cg_leaf(g, CG_LEAF_INPUT, "w", CG_BF16, CG_SHAPE(3, 64)),
                        cg_leaf(g, CG_LEAF_INPUT, "k", CG_BF16, CG_SHAPE(4000, 128)),
                        cg_leaf(g, CG_LEAF_INPUT, "rows", CG_I32, CG_SHAPE(3, CG_ROW_FIELDS)), 2048);
    static const struct {
        size_t kib;
        const char *variant;
    } want[] = {{99, "plain"}, {163, "plain"}, {200, "fast"}, {227, "wgmma"}};
    for (int i = 0; i < 4 && facts.emulated; i++) {
        cg_error error = {0};
        cg_backend with_variant;
        cg_device_kernel kernel;
        cg_device_host_shared(want[i].kib << 10);
        ck_assert(cg_cuda_backend(&with_variant, device, NULL, &error));
        ck_assert(with_variant.kernel_of(&with_variant, topk->producer, &kernel, &error));
        ck_assert_str_eq(kernel.variant, want[i].variant);
        with_variant.abilities = CG_WGMMA_NONE; /* as on a device that has no such instructions */
        ck_assert(with_variant.kernel_of(&with_variant, topk->producer, &kernel, &error));
        ck_assert_str_eq(kernel.variant, i < 2 ? "plain" : "fast");
    }
    cg_graph_free(g);
    close_device();
}
END_TEST

/* wgmma and mma.sync agree where there is wgmma; the emulation of it agrees with that of mma.sync. */
START_TEST(wgmma_works) {
    open_device();
    cg_error error = {0};
    cg_device_facts facts;
    cg_cuda_wgmma found;
    cg_device_facts_of(device, &facts);
    if (!cg_cuda_try_wgmma(device, &found, &error)) ck_abort_msg("%s", error.text);
    ck_assert_int_eq(found, facts.sm == 90 ? CG_WGMMA_WORKS : CG_WGMMA_NONE);
    close_device();
}
END_TEST

int main(void) {
    Suite *suite = suite_create("cuda_ops");
    TCase *tcase = tcase_create("cuda_ops");
    tcase_set_timeout(tcase, 240);
    suite_add_tcase(suite, tcase);
    tcase_add_test(tcase, tables_are_complete);
    tcase_add_loop_test(tcase, kernels_agree_with_the_cpu, 0, cg_all_ops.n);
    tcase_add_test(tcase, variants_are_chosen);
    tcase_add_test(tcase, no_variant_is_missing);
    tcase_add_test(tcase, sizes_choose_the_variant);
    tcase_add_test(tcase, shared_memory_bounds_the_choice);
    tcase_add_test(tcase, wgmma_works);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
