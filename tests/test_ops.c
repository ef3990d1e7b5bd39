/* The loop over the op list: what every op must satisfy, whoever wrote it. */
#include "tests/support.h"

#include "graph/gradcheck.h"

/* One case, planned and run; `separate` gives each value a heap block of its own, else one arena. */
typedef struct case_run {
    cg_case_graph built;
    cg_plan *plan;
    cg_exec *exec;
    cg_error error;
    bool ok;
} case_run;

static case_run run_case(const cg_op *op, const cg_case *the_case, cg_dtype real, bool separate) {
    case_run run = {0};
    ck_assert(cg_case_build(&cg_all_ops, op, the_case, real, &run.built));
    const cg_error *refused = cg_graph_error(run.built.graph);
    if (refused) ck_abort_msg("%s, case %s: %s", op->name, the_case->name, refused->text);
    if (!(run.plan = cg_plan_make(run.built.graph, NULL, &run.error)))
        ck_abort_msg("%s: %s", op->name, run.error.text);
    run.exec = cg_exec_new(run.plan, &(cg_exec_options){.separate = separate, .poison = true}, &run.error);
    if (!run.exec) ck_abort_msg("%s: %s", op->name, run.error.text);
    run.ok = cg_case_fill(&run.built, run.exec, &run.error) && cg_exec_run(run.exec, CG_ALL_PASSES, &run.error);
    return run;
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

#define FOR_EACH_OP(op)                                                                                        \
    for (int o_ = 0; o_ < cg_all_ops.n; o_++)                                                                  \
        for (const cg_op *op = cg_all_ops.list[o_]; op; op = NULL)

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
        bool real = op->run[CG_F32] && op->run[CG_F64];
        if (!op->alias && !real && !op->run[CG_I32]) ck_abort_msg("%s lacks a kernel for f32 or f64", op->name);
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
START_TEST(f32_agrees_with_f64) {
    FOR_EACH_OP(op) FOR_EACH_CASE(op, c) {
        if (!runs(c)) continue;
        case_run a = run_case(op, c, CG_F32, true), b = run_case(op, c, CG_F64, true);
        if (!a.ok || !b.ok) ck_abort_msg("case %s: %s", c->name, a.ok ? b.error.text : a.error.text);
        const cg_value *va[3 * CG_MAX_IN], *vb[3 * CG_MAX_IN];
        int n = results(&a, va);
        results(&b, vb);
        for (int i = 0; i < n; i++) {
            const void *da = cg_exec_data(a.exec, va[i]), *db = cg_exec_data(b.exec, vb[i]);
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
            if (!(sqrt(difference) <= bound * fmax(sqrt(norm), 1e-6)))
                ck_abort_msg("%s, case %s: %s in f32 is %.3g off f64, norm %.3g, bound %.1e", op->name, c->name,
                             va[i]->name, sqrt(difference), sqrt(norm), bound);
        }
        run_free(&a);
        run_free(&b);
    }
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
            for (cg_dtype real = CG_F32; real <= CG_F64; real++) {
                case_run run = run_case(op, c, real, true);
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
    FOR_EACH_OP(op) FOR_EACH_CASE(op, c) {
        if (!runs(c)) continue;
        cg_error error = {0};
        ck_assert(cg_threads_set(1, &error));
        case_run one = run_case(op, c, CG_F32, true);
        ck_assert(cg_threads_set(cg_thread_slots(), &error));
        case_run all = run_case(op, c, CG_F32, false);
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

SUITE("ops", tables_are_complete, gradients_match_differences, f32_agrees_with_f64, saved_set_is_as_stated,
      bad_inputs_are_refused, same_bits_however_run)
