/* The loop over the op list: what every op must satisfy, whoever wrote it. */
#include "tests/support.h"

#include "graph/gradcheck.h"
#include "graph/widen.h"
#include "ops/attributes.h"

/* One case, planned and run; `separate` gives each value a heap block of its own, else one arena. */
typedef struct case_run {
    cg_case_graph built;
    cg_plan *plan;
    cg_exec *exec;
    cg_error error;
    bool ok;
} case_run;

static case_run run_case_on(const cg_op *op, const cg_case *the_case, cg_dtype real, bool as_bf16,
                            bool separate) {
    case_run run = {0};
    ck_assert(cg_case_build(&cg_all_ops, op, the_case, real, &run.built));
    run.built.as_bf16 = as_bf16;
    const cg_error *refused = cg_graph_error(run.built.graph);
    if (refused) ck_abort_msg("%s, case %s: %s", op->name, the_case->name, refused->text);
    if (!(run.plan = cg_plan_make(run.built.graph, NULL, &run.error)))
        ck_abort_msg("%s: %s", op->name, run.error.text);
    run.exec = cg_exec_new(run.plan, &(cg_exec_options){.separate = separate, .poison = true}, &run.error);
    if (!run.exec) ck_abort_msg("%s: %s", op->name, run.error.text);
    run.ok = cg_case_fill(&run.built, run.exec, &run.error) && cg_exec_run(run.exec, CG_ALL_PASSES, &run.error);
    return run;
}

static case_run run_case(const cg_op *op, const cg_case *the_case, cg_dtype real, bool separate) {
    return run_case_on(op, the_case, real, false, separate);
}

static void run_free(case_run *run) {
    cg_exec_free(run->exec);
    cg_plan_free(run->plan);
    cg_case_free(&run->built);
}

/* Everything a case produces: outputs, gradients, and inputs changed in place. */
static int results(const case_run *run, const cg_value *list[3 * CG_MAX_IN]) {
    int n = 0;
    for (int s = 0; s < run->built.node->n_out; s++) list[n++] = run->built.node->out[s];
    for (int k = 0; k < run->built.n_wrt && run->built.n_seeds; k++) list[n++] = run->built.grad[k];
    for (int i = 0; i < run->built.n_in; i++)
        if (run->built.op->mutates & CG_BIT(i)) list[n++] = run->built.in[i];
    return n;
}

static void expect_same_bits(const case_run *a, const case_run *b, const char *how) {
    const cg_value *va[3 * CG_MAX_IN], *vb[3 * CG_MAX_IN];
    int n = results(a, va);
    ck_assert_int_eq(n, results(b, vb));
    for (int i = 0; i < n; i++) {
        size_t bytes = (size_t)cg_tensor_bytes(va[i]->dtype, &va[i]->shape);
        if (memcmp(cg_exec_data(a->exec, va[i]), cg_exec_data(b->exec, vb[i]), bytes))
            ck_abort_msg("%s, case %s: %s differs %s", a->built.op->name, a->built.the_case->name, va[i]->name,
                         how);
    }
}

static bool runs(const cg_case *the_case) { return !the_case->refuses && !the_case->run_error; }

/* Ops on statistics and indices alone are the same in bf16 as in f32. */
static bool holds_bf16(const case_run *run) {
    for (int n = 0; n < run->built.graph->n_nodes; n++)
        if (cg_node_dtype(run->built.graph->nodes[n]) == CG_BF16) return true;
    return false;
}

static void expect_text(const char *part, const char *text) {
    if (!strstr(text, part)) ck_abort_msg("\"%s\", expected \"%s\" in it", text, part);
}

static const cg_dtype reals[] = {CG_F32, CG_F64, CG_BF16};

/* NULL when another op alone is asked for, by whoever works on one: CSAGRAD_TEST_OP=relu. */
static const cg_op *is_wanted(const cg_op *op) {
    const char *only = getenv("CSAGRAD_TEST_OP");
    return !only || !strcmp(only, op->name) ? op : NULL;
}

#define FOR_EACH_OP(op)                                                                                        \
    for (int o_ = 0; o_ < cg_all_ops.n; o_++)                                                                  \
        for (const cg_op *op = is_wanted(cg_all_ops.list[o_]); op; op = NULL)

#define FOR_EACH_CASE(op, c)                                                                                   \
    for (int c_ = 0; c_ < (op)->n_cases; c_++)                                                                 \
        for (const cg_case *c = &(op)->cases[c_]; c; c = NULL)

START_TEST(tables_are_complete) {
    ck_assert_int_gt(cg_all_ops.n, 20);
    FOR_EACH_OP(op) {
        if (!op->name || !op->doc || !op->infer || !op->cost)
            ck_abort_msg("an op lacks name, doc, infer or cost: %s", op->name);
        if (op->n_cases < 1) ck_abort_msg("%s has no case", op->name);
        if ((op->differentiable != 0) == (op->no_grad != NULL))
            ck_abort_msg("%s must have either a gradient or a reason why not", op->name);
        if (op->differentiable && !op->grad) ck_abort_msg("%s has no grad", op->name);
        bool real = cg_op_kernel(op, CG_F32) && cg_op_kernel(op, CG_F64);
        if (!op->alias && !real && !cg_op_kernel(op, CG_I32))
            ck_abort_msg("%s lacks a kernel for f32 or f64", op->name);
        ck_assert_ptr_eq(cg_op_find(&cg_all_ops, op->name), op);
    }
}
END_TEST

START_TEST(gradients_match_differences) {
    FOR_EACH_OP(op) {
        cg_gradcheck_report report;
        cg_error error = {0};
        int n_cases;
        if (!cg_gradcheck_op(&cg_all_ops, op, NULL, &n_cases, &report, &error)) ck_abort_msg("%s", error.text);
        if (!report.ok)
            ck_abort_msg("%s: %lld entries, worst %.3g: %s", op->name, (long long)report.n_entries,
                         report.worst_rel, report.worst);
    }
}
END_TEST

/* Relative norm of the difference; indices must be equal. */
static void expect_close_to_f64(const case_run *a, const case_run *b) {
    const cg_case *c = a->built.the_case;
    if (!a->ok || !b->ok) ck_abort_msg("case %s: %s", c->name, a->ok ? b->error.text : a->error.text);
    const cg_value *va[3 * CG_MAX_IN], *vb[3 * CG_MAX_IN];
    int n = results(a, va);
    results(b, vb);
    for (int i = 0; i < n; i++) {
        const void *da = cg_exec_data(a->exec, va[i]), *db = cg_exec_data(b->exec, vb[i]);
        int64_t count = cg_shape_count(&va[i]->shape);
        double difference = 0, norm = 0;
        for (int64_t k = 0; k < count; k++) {
            if (va[i]->dtype == CG_I32) {
                difference += ((const int32_t *)da)[k] != ((const int32_t *)db)[k];
                continue;
            }
            double x = cg_real_get(va[i]->dtype, da, k), y = cg_real_get(vb[i]->dtype, db, k);
            if (isinf(y) && x == y) continue;
            difference += (x - y) * (x - y);
            norm += y * y;
        }
        double bound = c->f32_bound > 0 ? c->f32_bound : 1e-5;
        if (va[i]->dtype == CG_BF16) bound = c->bf16_bound > 0 ? c->bf16_bound : 0x1p-8;
        if (!(sqrt(difference) <= bound * fmax(sqrt(norm), 1e-6)))
            ck_abort_msg("%s, case %s: %s in %s is %.3g off f64, norm %.3g, bound %.1e", a->built.op->name,
                         c->name, va[i]->name, cg_dtype_name(va[i]->dtype), sqrt(difference), sqrt(norm),
                         bound);
    }
}

START_TEST(f32_agrees_with_f64) {
    FOR_EACH_OP(op) FOR_EACH_CASE(op, c) {
        if (!runs(c)) continue;
        case_run a = run_case(op, c, CG_F32, true), b = run_case(op, c, CG_F64, true);
        expect_close_to_f64(&a, &b);
        run_free(&a);
        run_free(&b);
    }
}
END_TEST

/* From the same inputs, rounded to bf16: what differs is rounding on the way and at the end. Statistics are f32 and
 * as good as f32. */
START_TEST(bf16_agrees_with_f64) {
    int n_ops = 0;
    FOR_EACH_OP(op) {
        bool some = false;
        FOR_EACH_CASE(op, c) {
            if (!runs(c)) continue;
            case_run a = run_case(op, c, CG_BF16, true);
            if (holds_bf16(&a)) {
                case_run b = run_case_on(op, c, CG_F64, true, true);
                expect_close_to_f64(&a, &b);
                run_free(&b);
                some = true;
            }
            run_free(&a);
        }
        n_ops += some;
    }
    ck_assert_int_gt(n_ops, 30);
}
END_TEST

START_TEST(saved_set_is_as_stated) {
    FOR_EACH_OP(op) {
        bool stated = !op->differentiable;
        FOR_EACH_CASE(op, c) {
            if (!runs(c) || !c->crosses) continue;
            cg_case_graph built;
            ck_assert(cg_case_build(&cg_all_ops, op, c, CG_F32, &built));
            char text[256];
            cg_case_crosses(&built, text, sizeof text);
            if (strcmp(text, c->crosses))
                ck_abort_msg("%s, case %s saves \"%s\", stated \"%s\"", op->name, c->name, text, c->crosses);
            cg_case_free(&built);
            stated = true;
        }
        if (!stated) ck_abort_msg("%s: no case states the saved set", op->name);
    }
}
END_TEST

START_TEST(bad_inputs_are_refused) {
    FOR_EACH_OP(op) FOR_EACH_CASE(op, c) {
        if (c->refuses) {
            cg_case_graph built;
            ck_assert(cg_case_build(&cg_all_ops, op, c, CG_F32, &built));
            const cg_error *error = cg_graph_error(built.graph);
            if (!error) ck_abort_msg("%s, case %s was not refused", op->name, c->name);
            if (!strstr(error->text, c->refuses) || !strstr(error->text, op->name))
                ck_abort_msg("%s, case %s says \"%s\", expected \"%s\" in it", op->name, c->name, error->text,
                             c->refuses);
            cg_case_free(&built);
        } else if (c->run_error) {
            for (int r = 0; r < 3; r++) {
                case_run run = run_case(op, c, reals[r], true);
                if (run.ok) ck_abort_msg("%s, case %s ran", op->name, c->name);
                if (!strstr(run.error.text, c->run_error) || !strstr(run.error.text, op->name))
                    ck_abort_msg("%s, case %s says \"%s\", expected \"%s\" in it", op->name, c->name,
                                 run.error.text, c->run_error);
                run_free(&run);
            }
        }
    }
}
END_TEST

/* Separate blocks (AddressSanitizer sees every overrun) against one arena, one thread against all, run twice.
 */
START_TEST(same_bits_however_run) {
    FOR_EACH_OP(op) FOR_EACH_CASE(op, c) for (int r = 0; r < 3; r++) {
        if (!runs(c) || reals[r] == CG_F64) continue;
        cg_error error = {0};
        ck_assert(cg_threads_set(1, &error));
        case_run one = run_case(op, c, reals[r], true);
        ck_assert(cg_threads_set(cg_thread_slots(), &error));
        case_run all = run_case(op, c, reals[r], false);
        ck_assert(one.ok && all.ok);
        expect_same_bits(&one, &all, "with the number of threads, or between separate blocks and one arena");
        ck_assert_int_eq(cg_exec_measured_bytes(all.exec), all.plan->peak_bytes);
        if (!op->mutates) {
            ck_assert(cg_exec_run(all.exec, CG_ALL_PASSES, &error));
            expect_same_bits(&one, &all, "when it is run again");
        }
        run_free(&one);
        run_free(&all);
    }
}
END_TEST

/* Sizes at which bf16 values are widened in several blocks: rows of one segment at ratio 4, lists of five. */
enum { ROWS = 1500, PLACES = 5, HEADS = 8, WIDTH = 64, CHANNELS = 1000, COMPRESSED = ROWS / 4 };
static int32_t row_facts[ROWS * CG_ROW_FIELDS], lists[ROWS * PLACES], positions[ROWS], tokens[ROWS];
static double scores[ROWS * 40];

static void fill_rows(void) {
    for (int32_t t = 0; t < ROWS; t++) {
        const int32_t facts[CG_ROW_FIELDS] = {0, t, 0, (t + 1) / 4, 1};
        memcpy(row_facts + t * CG_ROW_FIELDS, facts, sizeof facts);
        for (int32_t j = 0; j < PLACES; j++)
            lists[t * PLACES + j] = j == 2 || t < 3 ? -1 : (t * 7 + j * j * 5) % facts[CG_ROW_VISIBLE];
        positions[t] = t;
        tokens[t] = t * 37 % 53 - 1;
        for (int32_t j = 0; j < 40; j++) scores[t * 40 + j] = (t * 13 + j * 29) % 64 - 31.5;
    }
}

#define REALS(...)                                                                                             \
    { .shape = CG_DIMS(__VA_ARGS__) }
#define INDICES(data, ...)                                                                                     \
    { .shape = CG_DIMS(__VA_ARGS__), .i32 = (data) }
#define ABSENT                                                                                                 \
    { .absent = true }
static const struct {
    const char *op;
    cg_case the_case;
} wide_cases[] = {
    {"mul", {.in = {REALS(ROWS, CHANNELS), REALS(ROWS, CHANNELS)}}},
    {"swiglu", {.in = {REALS(ROWS, CHANNELS), REALS(ROWS, CHANNELS)}, .attr = &(swiglu_attr){1}}},
    {"rms_norm", {.in = {REALS(ROWS, CHANNELS), REALS(CHANNELS)}, .attr = &(rms_norm_attr){1e-6}}},
    {"rope",
     {.in = {REALS(ROWS, HEADS, WIDTH), INDICES(positions, ROWS)},
      .attr = &(cg_rope_attr){.n_rotary = 16, .base = 100}}},
    {"embedding", {.in = {REALS(52, CHANNELS), INDICES(tokens, ROWS)}}},
    {"cross_entropy", {.in = {REALS(ROWS, CHANNELS), INDICES(tokens, ROWS)}}},
    {"csa_attention",
     {.in = {REALS(ROWS, HEADS, WIDTH), REALS(ROWS, WIDTH), REALS(COMPRESSED, WIDTH), REALS(HEADS),
             INDICES(lists, ROWS, PLACES), INDICES(row_facts, ROWS, CG_ROW_FIELDS)},
      .attr = &(csa_attention_attr){21, 0.12, CG_TEACHER_FULL}}},
    {"indexer_scores_at",
     {.in = {REALS(ROWS, HEADS, WIDTH), REALS(ROWS, HEADS), REALS(COMPRESSED, WIDTH),
             INDICES(lists, ROWS, PLACES)}}},
    {"indexer_dense_loss",
     {.in = {REALS(ROWS, HEADS, 32),
             {.shape = CG_DIMS(ROWS, HEADS), .scale = 0.05},
             REALS(COMPRESSED, 32),
             {.shape = CG_DIMS(ROWS, HEADS, WIDTH), .scale = 0.5},
             REALS(COMPRESSED, WIDTH),
             REALS(ROWS, HEADS),
             ABSENT,
             INDICES(row_facts, ROWS, CG_ROW_FIELDS)},
      .attr = &(indexer_dense_loss_attr){0.12, 1, CG_TEACHER_FULL, CG_REDUCE_MEAN_REAL}}},
    {"indexer_health",
     {.in = {REALS(ROWS, PLACES),
             {.shape = CG_DIMS(ROWS, PLACES), .offset = 2, .scale = 0.1},
             INDICES(lists, ROWS, PLACES),
             REALS(ROWS, 256),
             REALS(ROWS, HEADS, WIDTH),
             REALS(COMPRESSED, WIDTH),
             REALS(ROWS, HEADS),
             INDICES(row_facts, ROWS, CG_ROW_FIELDS)},
      .attr = &(indexer_health_attr){0.12, 4}}},
};

/* Is a block smaller than the whole? A whole one has room for f32 copies of all that is bf16, beside what the same node
 * in f32 needs. */
static bool is_cut(const cg_node *node, const cg_node *in_f32) {
    int64_t whole = (int64_t)cg_node_workspace(in_f32);
    for (int i = 0; i < node->n_in + node->n_out; i++) {
        const cg_value *value = i < node->n_in ? node->in[i] : node->out[i - node->n_in];
        if (value && value->dtype == CG_BF16) whole += cg_tensor_bytes(CG_F32, &value->shape);
    }
    return (int64_t)cg_node_workspace(node) < whole;
}

/* Forward and backward in several blocks: sums over rows, windows that reach into the block before, and the numbers of
 * rows themselves. */
START_TEST(blocks_make_up_the_whole) {
    fill_rows();
    for (int i = 0; i < (int)(sizeof wide_cases / sizeof wide_cases[0]); i++) {
        const cg_op *op = cg_op_find(&cg_all_ops, wide_cases[i].op);
        cg_case c = wide_cases[i].the_case;
        c.name = "several blocks";
        case_run a = run_case(op, &c, CG_BF16, false), b = run_case_on(op, &c, CG_F64, true, false);
        expect_close_to_f64(&a, &b);
        cg_case_graph f32;
        ck_assert(cg_case_build(&cg_all_ops, op, &c, CG_F32, &f32));
        for (int n = 0; n < a.built.graph->n_nodes; n++) { /* other blocks grow with the number of processors */
            const cg_node *node = a.built.graph->nodes[n];
            if (node->op->summed && !is_cut(node, f32.graph->nodes[n]))
                ck_abort_msg("%s runs as a whole", node->op->name);
        }
        cg_case_free(&f32);
        ck_assert_int_eq(cg_exec_measured_bytes(a.exec), a.plan->peak_bytes);
        run_free(&a);
        run_free(&b);
    }
}
END_TEST

/* Rows are named by their number in the whole. */
START_TEST(errors_name_rows_behind_the_first_block) {
    fill_rows();
    scores[1400 * 40 + 3] = NAN;
    const cg_case wrong = {.name = "NaN", .in = {{.shape = CG_DIMS(ROWS, 40), .real = scores}}};
    case_run run = run_case(cg_op_find(&cg_all_ops, "argmax"), &wrong, CG_BF16, true);
    ck_assert(!run.ok);
    expect_text("row 1400 of x holds NaN", run.error.text);
    run_free(&run);
    tokens[1399] = 1000;
    const cg_case token = {.name = "token", .in = {REALS(52, CHANNELS), INDICES(tokens, ROWS)}};
    run = run_case(cg_op_find(&cg_all_ops, "embedding"), &token, CG_BF16, true);
    ck_assert(!run.ok);
    expect_text("row 1399 of tokens is 1000", run.error.text);
    run_free(&run);
    lists[1398 * PLACES] = ROWS;
    cg_case list = wide_cases[6].the_case;
    list.name = "list";
    run = run_case(cg_op_find(&cg_all_ops, "csa_attention"), &list, CG_BF16, true);
    ck_assert(!run.ok);
    expect_text("topk of row 1398, place 0 is 1500", run.error.text);
    run_free(&run);
}
END_TEST

SUITE("ops", tables_are_complete, gradients_match_differences, f32_agrees_with_f64, bf16_agrees_with_f64,
      saved_set_is_as_stated, blocks_make_up_the_whole, errors_name_rows_behind_the_first_block,
      bad_inputs_are_refused, same_bits_however_run)
