#include "graph/cases.h"

#include "core/base/bf16.h"
#include "core/base/rng.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

double cg_real_get(cg_dtype dtype, const void *data, int64_t i) {
    return dtype == CG_F64   ? ((const double *)data)[i]
           : dtype == CG_F32 ? (double)((const float *)data)[i]
                             : cg_dtype_get(dtype, data, i);
}

void cg_real_set(cg_dtype dtype, void *data, int64_t i, double x) { cg_dtype_set(dtype, data, i, x); }

static int case_inputs(const cg_op *op, const cg_case *the_case) {
    if (the_case->n_in) return the_case->n_in;
    int n = 0;
    while (n < CG_MAX_IN && op->in[n]) n++;
    return n;
}

static void build_input(cg_case_graph *built, int i, cg_dtype real) {
    const cg_case_input *input = &built->the_case->in[i];
    if (input->absent) return;
    bool is_index = (input->i32 != NULL) != input->wrong_dtype;
    bool differentiable = built->op->differentiable & CG_BIT(built->op->variadic ? 0 : i);
    char name[64];
    snprintf(name, sizeof name, built->op->variadic ? "%s%d" : "%s", cg_op_in_name(built->op, i), i);
    cg_leaf_kind kind = !is_index && differentiable && !input->constant ? CG_LEAF_PARAMETER : CG_LEAF_INPUT;
    if (built->op->statistic_in & CG_BIT(built->op->variadic ? 0 : i)) real = cg_statistic_dtype(real);
    built->in[i] = cg_leaf(built->graph, kind, name, is_index ? CG_I32 : real, input->shape);
}

bool cg_case_build(const cg_op_set *ops, const cg_op *op, const cg_case *the_case, cg_dtype real,
                   cg_case_graph *built) {
    *built = (cg_case_graph){.graph = cg_graph_new(ops), .op = op, .the_case = the_case};
    if (!built->graph) return false;
    built->n_in = case_inputs(op, the_case);
    for (int i = 0; i < built->n_in; i++) build_input(built, i, real);
    cg_apply(built->graph, op, the_case->attr, built->in, built->n_in);
    if (cg_graph_error(built->graph)) return true;
    built->node = built->graph->nodes[0];
    for (int s = 0; s < built->node->n_out; s++) {
        cg_value *out = cg_keep(built->node->out[s]);
        if (!out->needs_grad) continue;
        char name[64];
        snprintf(name, sizeof name, "d%s", out->name);
        built->seeded[built->n_seeds] = out;
        built->seed[built->n_seeds++] = cg_leaf(built->graph, CG_LEAF_INPUT, name, out->dtype, out->shape);
    }
    for (int i = 0; i < built->n_in; i++)
        if (cg_wants_grad(built->node, i)) {
            built->wrt_input[built->n_wrt] = i;
            built->wrt[built->n_wrt++] = built->in[i];
        }
    if (built->n_seeds && cg_autodiff(built->graph, built->seeded, built->seed, built->n_seeds, built->wrt,
                                      built->n_wrt, built->grad))
        for (int k = 0; k < built->n_wrt; k++) cg_keep(built->grad[k]);
    return true;
}

void cg_case_free(cg_case_graph *built) {
    cg_graph_free(built->graph);
    built->graph = NULL;
}

static bool fill_normal(cg_exec *exec, const cg_value *leaf, double offset, double scale, const double *given,
                        bool as_bf16, cg_error *error) {
    int64_t n = cg_shape_count(&leaf->shape);
    uint64_t stream = cg_random_stream(leaf->name);
    void *data = malloc((size_t)cg_tensor_bytes(leaf->dtype, &leaf->shape) + 1);
    if (!data) return cg_fail(error, CG_FAILED, "out of memory for the input %s of a case", leaf->name);
    for (int64_t i = 0; i < n; i++) {
        float x = (float)(given ? given[i] : offset + scale * cg_random_normal(1, stream, (uint64_t)i));
        cg_real_set(leaf->dtype, data, i, as_bf16 ? cg_bf16_get(cg_bf16_of(x)) : x);
    }
    cg_exec_write(exec, leaf, data);
    free(data);
    return true;
}

bool cg_case_fill(const cg_case_graph *built, cg_exec *exec, cg_error *error) {
    bool ok = true;
    for (int i = 0; ok && i < built->n_in; i++) {
        const cg_case_input *input = &built->the_case->in[i];
        if (!built->in[i]) continue;
        if (built->in[i]->dtype == CG_I32)
            cg_exec_write(exec, built->in[i], input->i32);
        else
            ok = fill_normal(
                exec, built->in[i], input->offset, input->scale != 0 ? input->scale : 1, input->real,
                built->as_bf16 && !(built->op->statistic_in & CG_BIT(built->op->variadic ? 0 : i)), error);
    }
    for (int k = 0; ok && k < built->n_seeds; k++)
        ok = fill_normal(exec, built->seed[k], 0, 1, NULL,
                         built->as_bf16 && !(built->op->statistic_out & CG_BIT(built->seeded[k]->slot)), error);
    return ok;
}

static bool read_in_backward(const cg_graph *graph, const cg_value *value) {
    for (int n = 0; n < graph->n_nodes; n++) {
        const cg_node *node = graph->nodes[n];
        for (int i = 0; node->pass == CG_BACKWARD && !node->op->alias && i < node->n_in; i++)
            if (node->in[i] && cg_value_root(node->in[i]) == cg_value_root(value)) return true;
    }
    return false;
}

void cg_case_crosses(const cg_case_graph *built, char *text, size_t text_bytes) {
    size_t n = 0;
    text[0] = 0;
    const char *separator = "";
    for (int i = 0; i < built->node->n_in + built->node->n_out; i++) {
        bool is_input = i < built->node->n_in;
        const cg_value *value = is_input ? built->node->in[i] : built->node->out[i - built->node->n_in];
        if (!value || !read_in_backward(built->graph, value) || n >= text_bytes) continue;
        n += (size_t)snprintf(text + n, text_bytes - n, "%s%s", separator,
                              is_input ? cg_op_in_name(built->op, i) : value->name);
        separator = " ";
    }
}
