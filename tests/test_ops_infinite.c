/* What every op makes of one infinite element, in each real input in turn: a table that names all of them.
 * Whatever that is, results that do not read the element keep their bits: 0 * inf is NaN, and what is masked,
 * unseen or not decayed must not be multiplied away. */
#include "tests/support.h"

/* Of each real input "name=ab": a for +inf, b for -inf, each one of
 *     f   finite: no result becomes infinite or NaN that was not
 *     i   infinite: some results become so, none becomes NaN
 *     p   propagates: some become NaN, as IEEE arithmetic has it; refused only where a finite number is too
 *     r   refused with a sentence, always
 *     n   f, or refused where a NaN comes of it
 * Results are outputs, gradients and leaves that it changes, but not the element itself. */
static const struct {
    const char *op, *inputs;
} table[] = {
    {"accumulate", "sum=ff grad=ii keep=ff"},
    {"adamw", "param=ff m=pp v=fp grad=pp norm=rr schedule=rr"},
    {"add", "a=ii b=ii"},
    {"argmax", "x=ff"},
    {"cast", "x=ii"},
    {"cross_entropy", "logits=pi"},
    {"cross_entropy_grad", "logits=if lse=fi dloss=pp"},
    {"csa_attention", "q=pp kv=pp ckv=pp sink=ri"},
    {"csa_attention_grad", "q=pp kv=pp ckv=pp sink=rf lse=fp dout=pp"},
    {"csa_compress", "kv=pp gate=pp ape=pp"},
    {"csa_compress_grad", "kv=pp gate=pf ape=pf dout=ii"},
    {"csa_teacher_at", "q=pp ckv=pp window_lse=ff sink=rf"},
    {"detach", "x=ii"},
    {"embedding", "table=ii"},
    {"embedding_grad", "dy=ii"},
    {"gather", "x=ii"},
    {"gather_grad", "dy=ii"},
    {"global_norm", "grad=ii"},
    {"grouped_linear", "x=ii w=ii"},
    {"grouped_outer", "a=ii b=ii"},
    {"hadamard", "x=ii"},
    {"hold", "x=ii"},
    {"indexer_dense_loss", "q_index=pp w=pp k_index=pp q=pp ckv=pp window_lse=pf sink=rf"},
    {"indexer_dense_loss_grad", "dloss=pp q_index=pp w=pp k_index=pp q=pp ckv=pp window_lse=ff sink=rf"},
    {"indexer_head_scores", "q=ii k=ii"},
    {"indexer_head_scores_grad", "dx=ii q=ii k=ii"},
    {"indexer_head_sum", "x=ii w=ii"},
    {"indexer_head_sum_grad", "dy=pp x=ii w=pp"},
    {"indexer_health", "scores=pi teacher=ip w=ff q=pp ckv=pp window_lse=ff"},
    {"indexer_kl", "scores=pn teacher=pp"},
    {"indexer_kl_grad", "dloss=pp scores=pf teacher=pp"},
    {"indexer_scores_at", "q=pp w=pp k=pp"},
    {"indexer_scores_at_grad", "dscores=pp q=pp w=ii k=pp"},
    {"indexer_topk", "q=ff w=nn k=nn"},
    {"kl_div", "log_p=ii target=pp"},
    {"kl_div_grad", "dloss=pp target=ii"},
    {"matmul", "a=ii b=ii"},
    {"mul", "a=ii b=ii"},
    {"relu", "x=if"},
    {"relu_grad", "y=ff dy=ii"},
    {"reshape", "x=ii"},
    {"rms_norm", "x=pp weight=pp"},
    {"rms_norm_grad", "x=pp weight=pp dy=pp"},
    {"rope", "x=pp"},
    {"scale", "x=ii"},
    {"segment_rows", ""},
    {"softmax", "x=pi"},
    {"softmax_grad", "dy=pp y=pp"},
    {"sum", "x=ii"},
    {"sum_grad", "dy=ii"},
    {"swiglu", "gate=pp up=pp"},
    {"swiglu_grad", "gate=fp up=ff dy=ii"},
    {"topk", "scores=ff"},
    {"visible_indices", ""},
    {"zeros", ""},
};

enum { MOST = 3 * CG_MAX_IN };

/* One case, built once and run many times. */
typedef struct subject {
    cg_case_graph built;
    cg_plan *plan;
    cg_exec *exec;
    cg_error error;
    const cg_value *result[MOST];
    int n_results;
    char *base[MOST];  /* the bytes of each result when no element is infinite */
    bool *reads[MOST]; /* by element: whether it depends on the element at hand */
    bool refuses;      /* whether it may not even have some finite value */
} subject;

static size_t bytes_of(const cg_value *value) { return (size_t)cg_tensor_bytes(value->dtype, &value->shape); }

static bool runs(subject *s, const cg_value *input, int64_t element, double x) {
    s->error = (cg_error){0};
    if (!cg_case_fill(&s->built, s->exec, &s->error)) ck_abort_msg("%s", s->error.text);
    if (input) cg_exec_set(s->exec, input, element, x);
    return cg_exec_run(s->exec, CG_ALL_PASSES, &s->error);
}

static subject begin(const cg_op *op, const cg_case *the_case, cg_dtype real) {
    subject s = {0};
    ck_assert(cg_case_build(&cg_all_ops, op, the_case, real, &s.built));
    s.plan = cg_plan_make(s.built.graph, NULL, &s.error);
    if (s.plan) s.exec = cg_exec_new(s.plan, NULL, &s.error);
    if (!s.exec) ck_abort_msg("%s, case %s: %s", op->name, the_case->name, s.error.text);
    for (int o = 0; o < s.built.node->n_out; o++) s.result[s.n_results++] = s.built.node->out[o];
    for (int k = 0; k < s.built.n_wrt && s.built.n_seeds; k++) s.result[s.n_results++] = s.built.grad[k];
    for (int i = 0; i < s.built.n_in; i++)
        if (op->mutates & CG_BIT(i)) s.result[s.n_results++] = s.built.in[i];
    if (!runs(&s, NULL, 0, 0)) ck_abort_msg("%s, case %s: %s", op->name, the_case->name, s.error.text);
    for (int r = 0; r < s.n_results; r++) {
        s.base[r] = malloc(bytes_of(s.result[r]) + 1);
        s.reads[r] = calloc((size_t)cg_shape_count(&s.result[r]->shape) + 1, sizeof(bool));
        memcpy(s.base[r], cg_exec_data(s.exec, s.result[r]), bytes_of(s.result[r]));
    }
    return s;
}

static void end(subject *s) {
    for (int r = 0; r < s->n_results; r++) free(s->base[r]), free(s->reads[r]);
    cg_exec_free(s->exec);
    cg_plan_free(s->plan);
    cg_case_free(&s->built);
}

static bool differs(const subject *s, int r, int64_t i) {
    const size_t size = cg_dtype_bytes(s->result[r]->dtype), at = (size_t)i * size;
    return memcmp(s->base[r] + at, (const char *)cg_exec_data(s->exec, s->result[r]) + at, size) != 0;
}

static double number(const cg_value *value, const void *data, int64_t i) {
    return value->dtype == CG_I32 ? ((const int32_t *)data)[i] : cg_real_get(value->dtype, data, i);
}

/* Row t of every result of n rows reads what one of them reads, or one before it. */
static void row_reads(subject *s, int64_t n, int64_t t, bool reads) {
    for (int pass = 0; pass < 2; pass++)
        for (int r = 0; r < s->n_results; r++) {
            if (s->result[r]->shape.n_dims == 0 || s->result[r]->shape.dims[0] != n) continue;
            const int64_t width = cg_shape_count(&s->result[r]->shape) / n;
            for (int64_t i = t * width; i < (t + 1) * width; i++)
                if (pass == 0)
                    reads |= s->reads[r][i];
                else
                    s->reads[r][i] |= reads;
        }
}

/* Find what reads the element: rows of results in which something changes when it has some other value, and its
 * own row. (Of one visible key the weight is 1 whatever its logit: no number changes, but inf - inf is NaN.) */
static void find_readers(subject *s, const cg_value *input, int64_t element) {
    static const double values[] = {-300, -3, 0, 2, 300, NAN};
    s->refuses = false;
    for (int r = 0; r < s->n_results; r++)
        memset(s->reads[r], 0, (size_t)cg_shape_count(&s->result[r]->shape) * sizeof(bool));
    for (size_t v = 0; v < sizeof values / sizeof *values; v++) {
        const bool ok = runs(s, input, element, values[v]); /* where it is refused, anything may read it */
        s->refuses |= !ok && isfinite(values[v]);
        for (int r = 0; r < s->n_results; r++)
            for (int64_t i = 0; i < cg_shape_count(&s->result[r]->shape); i++)
                s->reads[r][i] |= !ok || differs(s, r, i);
    }
    const int64_t n_own = input->shape.dims[0], own = element / (cg_shape_count(&input->shape) / n_own);
    for (int r = 0; r < s->n_results; r++) {
        const int64_t n = s->result[r]->shape.n_dims ? s->result[r]->shape.dims[0] : 0;
        for (int64_t t = 0; t < n; t++) row_reads(s, n, t, n == n_own && t == own);
    }
}

/* What the letters stand for ... */
enum { FINITE, INFINITE, NAN_, REFUSED, WAYS };

static bool is_allowed(const subject *s, char letter, int way) {
    return way == REFUSED    ? letter == 'r' || letter == 'n' || (letter == 'p' && s->refuses)
           : way == FINITE   ? letter != 'r'
           : way == INFINITE ? letter == 'i' || letter == 'p'
                             : letter == 'p';
}

/* ... and which of it comes about. Stops at a result that does not read the element and differs. */
static int way_of(subject *s, const cg_value *in, int64_t element, double x) {
    const char *op = s->built.op->name, *name = s->built.the_case->name, *real = cg_dtype_name(in->dtype);
    int way = FINITE;
    find_readers(s, in, element);
    if (!runs(s, in, element, x)) return REFUSED;
    for (int r = 0; r < s->n_results; r++)
        for (int64_t i = 0; i < cg_shape_count(&s->result[r]->shape); i++) {
            const cg_value *result = s->result[r];
            const double got = number(result, cg_exec_data(s->exec, result), i),
                         was = number(result, s->base[r], i);
            if (!s->reads[r][i] && differs(s, r, i))
                ck_abort_msg(
                    "%s, case %s, %s: %s[%lld] is %g and was %g, but does not read element %lld of %s, %g", op,
                    name, real, result->name, (long long)i, got, was, (long long)element, in->name, x);
            const bool itself = result == in && i == element; /* changed in place */
            if (isnan(got) && !isnan(was)) way = NAN_;
            if (isinf(got) && isfinite(was) && !itself && way == FINITE) way = INFINITE;
        }
    return way;
}

/* The two letters of an input, NULL when there are none. */
static const char *letters_of(const char *inputs, const char *name) {
    const size_t n = strlen(name);
    for (const char *at = inputs; (at = strstr(at, name)); at += n)
        if ((at == inputs || at[-1] == ' ') && at[n] == '=') return at + n + 1;
    return NULL;
}

static const char *inputs_of(const cg_op *op) {
    for (size_t k = 0; k < sizeof table / sizeof *table; k++)
        if (!strcmp(table[k].op, op->name)) return table[k].inputs;
    ck_abort_msg("the table lacks %s", op->name);
    return NULL;
}

static void sweep_input(const cg_op *op, int input, const char *letters) {
    static const cg_dtype reals[] = {CG_F32, CG_F64, CG_BF16};
    for (int sign = 0; sign < 2; sign++) {
        int n_ways[WAYS] = {0};
        const char letter = letters[sign];
        for (int c = 0; c < op->n_cases; c++) {
            const cg_case *the_case = &op->cases[c];
            if (the_case->refuses || the_case->run_error || the_case->large) continue;
            for (int r = 0; r < 3; r++) {
                subject s = begin(op, the_case, reals[r]);
                const cg_value *in = input < s.built.n_in ? s.built.in[input] : NULL;
                const int64_t n = in && in->dtype != CG_I32 ? cg_shape_count(&in->shape) : 0;
                const int64_t used = n < 5 ? n : 5; /* the first, the last, and some between */
                for (int64_t k = 0; k < used; k++) {
                    const int64_t element = k * (n - 1) / (used > 1 ? used - 1 : 1);
                    const int way = way_of(&s, in, element, sign ? -INFINITY : INFINITY);
                    n_ways[way]++;
                    if (is_allowed(&s, letter, way)) continue;
                    ck_abort_msg("%s, case %s, %s: %cinf at element %lld of %s gives '%c', expected '%c' %s",
                                 op->name, the_case->name, cg_dtype_name(in->dtype), "+-"[sign],
                                 (long long)element, in -> name, "fipr"[way], letter, s.error.text);
                }
                end(&s);
            }
        }
        const int shown = n_ways[letter == 'f'   ? FINITE
                                 : letter == 'i' ? INFINITE
                                 : letter == 'p' ? NAN_
                                                 : REFUSED];
        ck_assert_msg(shown > 0, "%s: no case shows '%c' of %cinf in %s", op->name, letter, "+-"[sign],
                      cg_op_in_name(op, input));
    }
}

static bool is_real(const cg_op *op, int input) {
    for (int c = 0; c < op->n_cases; c++)
        if (!op->cases[c].refuses && !op->cases[c].in[input].absent && op->cases[c].in[input].shape.n_dims > 0)
            return !op->cases[c].in[input].i32;
    return false;
}

START_TEST(one_infinite_element) {
    cg_threads_set(1, NULL); /* shapes are tiny */
    for (int o = 0; o < cg_all_ops.n; o++) {
        const cg_op *op = cg_all_ops.list[o];
        const char *inputs = inputs_of(op);
        for (int i = 0; i < CG_MAX_IN && op->in[i]; i++) {
            const char *letters = letters_of(inputs, op->in[i]);
            ck_assert_msg((letters != NULL) == is_real(op, i), "%s: %s is %s the table", op->name, op->in[i],
                          letters ? "no real input, but in" : "missing in");
            if (letters) sweep_input(op, i, letters);
        }
    }
}
END_TEST

/* No line for an op that does not exist. */
START_TEST(the_table_names_ops) {
    for (size_t k = 0; k < sizeof table / sizeof *table; k++)
        ck_assert_msg(cg_op_find(&cg_all_ops, table[k].op) != NULL, "there is no op %s", table[k].op);
}
END_TEST

SUITE("ops_infinite", one_infinite_element, the_table_names_ops)
