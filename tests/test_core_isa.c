/* Paths: which one a process runs on, and that each op has kernels for all of them. */
#include "tests/support.h"

static void ask_for(const char *name) { ck_assert_int_eq(setenv("CSAGRAD_ISA", name, 1), 0); }

static cg_isa highest(void) {
    int isa = CG_ISAS - 1;
    while (!cg_isa_exists((cg_isa)isa)) isa--;
    return (cg_isa)isa;
}

START_TEST(the_highest_by_default) {
    ask_for(""); /* none */
    ck_assert(cg_isa_obeyed(NULL));
    unsetenv("CSAGRAD_ISA");
    ck_assert(cg_isa_obeyed(NULL));
    ck_assert_int_eq(cg_isa_used(), highest());
    ck_assert(cg_isa_exists(CG_PORTABLE));
    if (cg_isa_exists(CG_AVX512)) ck_assert(cg_isa_exists(CG_AVX2));
}
END_TEST

START_TEST(the_one_asked_for_and_no_other_later) {
    ask_for("portable");
    ck_assert(cg_isa_obeyed(NULL));
    ck_assert_int_eq(cg_isa_used(), CG_PORTABLE);
    ask_for(cg_isa_name(highest()));
    ck_assert_int_eq(cg_isa_used(), CG_PORTABLE);
}
END_TEST

START_TEST(one_sentence_for_what_cannot_be) {
    cg_error error = {0};
    ask_for("avx-2");
    ck_assert(!cg_isa_obeyed(&error));
    ck_assert_int_eq(error.code, CG_BAD_INPUT);
    ck_assert_str_eq(error.text,
                     "CSAGRAD_ISA is \"avx-2\", expected avx512, avx2 or portable, did you mean avx2?");
    ck_assert_int_eq(cg_isa_used(), highest()); /* as if unset */
    for (int isa = 0; isa < CG_ISAS; isa++) {
        error = (cg_error){0};
        ask_for(cg_isa_name((cg_isa)isa));
        ck_assert(cg_isa_obeyed(&error) == cg_isa_exists((cg_isa)isa));
        if (!cg_isa_exists((cg_isa)isa))
            ck_assert_ptr_nonnull(strstr(error.text, "which this processor or build lacks"));
    }
}
END_TEST

/* Most ops have a kernel of their own for each path (the others move numbers or call cg_gemm), never for some paths;
 * that of the path in use is the one that runs. */
START_TEST(ops_have_kernels_for_all_paths) {
    unsetenv("CSAGRAD_ISA");
    int n_with = 0, n_without = 0;
    for (int i = 0; i < cg_all_ops.n; i++) {
        const cg_op *op = cg_all_ops.list[i];
        for (int dtype = 0; dtype < CG_DTYPES; dtype++) {
            const cg_kernel *run = op->run[dtype];
            int own = 0;
            for (int isa = 1; isa < CG_ISAS; isa++) {
                own += run[isa] != NULL;
                for (int other = 0; run[isa] && other < isa; other++) ck_assert(run[isa] != run[other]);
            }
            if (own && own != CG_ISAS - 1) ck_abort_msg("%s has kernels for some paths", op->name);
            const cg_kernel here = run[highest()];
            ck_assert(cg_op_kernel(op, (cg_dtype)dtype) == (here ? here : run[CG_PORTABLE]));
            n_with += own > 0;
            n_without += run[CG_PORTABLE] && !own;
        }
    }
    if (highest() > CG_PORTABLE) ck_assert_int_gt(n_with, n_without);
}
END_TEST

SUITE("core_isa", the_highest_by_default, the_one_asked_for_and_no_other_later, one_sentence_for_what_cannot_be,
      ops_have_kernels_for_all_paths)
