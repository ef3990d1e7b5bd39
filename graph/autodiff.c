#include "graph/op.h"

#include <stdlib.h>
#include <string.h>

/* One walk over the forward nodes, last first. grads[id] is the gradient of a value as far as its readers
 * have been visited; creation order is a topological order, so all of them have been when its producer is. */

cg_dtype cg_gradient_dtype(const cg_graph *graph, const cg_value *value) {
    const cg_node *node = cg_value_root(value)->producer;
    return node && node->op == graph->ops->cast && value->dtype == CG_BF16 ? node->in[0]->dtype : value->dtype;
}

static cg_value *widened(cg_graph *graph, cg_value *x) {
    if (x->dtype == CG_F32) return x;
    return cg_apply(graph, graph->ops->cast, &(cg_cast_attr){CG_F32}, &x, 1);
}

static void add_gradient(cg_graph *graph, cg_value **grads, const cg_value *value, cg_value *grad) {
    if (!grad) return;
    const bool fits = grad->dtype == value->dtype || grad->dtype == cg_gradient_dtype(graph, value);
    if (!fits || !cg_shape_equal(&grad->shape, &value->shape)) {
        char name[256], want[128], got[128];
        cg_graph_fail(graph, "the gradient of %s is %s %s, expected %s %s",
                      cg_value_text(value, name, sizeof name), cg_dtype_name(grad->dtype),
                      cg_shape_text(&grad->shape, got, sizeof got), cg_dtype_name(value->dtype),
                      cg_shape_text(&value->shape, want, sizeof want));
        return;
    }
    cg_value **sum = &grads[value->id];
    if (!*sum) {
        *sum = grad;
        return;
    }
    cg_value *terms[2] = {*sum, grad};
    for (int i = 0; i < 2 && terms[0]->dtype != terms[1]->dtype; i++) terms[i] = widened(graph, terms[i]);
    *sum = cg_apply(graph, graph->ops->sum, NULL, terms, 2);
}

static void differentiate(cg_graph *graph, const cg_node *node, cg_value **grads) {
    cg_value *dout[CG_MAX_OUT] = {0};
    bool any = false;
    for (int s = 0; s < node->n_out; s++)
        if (node->out[s]->needs_grad) any |= (dout[s] = grads[node->out[s]->id]) != NULL;
    if (!any) return;
    if (node->pass != CG_FORWARD || !node->op->grad) { /* to stop here would be a wrong gradient */
        CG_WITHIN(graph, node->scope, CG_BACKWARD, node);
        cg_graph_fail(graph, "%s: %s", node->op->name,
                      node->op->no_grad ? node->op->no_grad : "not yet: second derivatives");
        return;
    }
    cg_value **din = calloc((size_t)node->n_in, sizeof *din);
    if (!din) {
        cg_graph_no_memory(graph, "in autodiff");
        return;
    }
    CG_WITHIN(graph, node->scope, CG_BACKWARD, node);
    node->op->grad(graph, node, dout, din);
    for (int i = 0; i < node->n_in; i++)
        if (cg_wants_grad(node, i)) add_gradient(graph, grads, node->in[i], din[i]);
    free(din);
}

bool cg_autodiff(cg_graph *graph, cg_value *const *outputs, cg_value *const *seeds, int n_outputs,
                 cg_value *const *wrt, int n_wrt, cg_value **grads) {
    for (int k = 0; k < n_wrt; k++) grads[k] = NULL;
    if (graph->error.code != CG_OK) return false;
    for (int i = 0; i < n_outputs; i++)
        if (!outputs[i] || !seeds[i]) cg_graph_fail(graph, "autodiff: output %d or its gradient is missing", i);
    for (int k = 0; k < n_wrt; k++)
        if (!wrt[k]) cg_graph_fail(graph, "autodiff: value %d to differentiate by is missing", k);
    if (graph->error.code != CG_OK) return false;
    int n_forward = graph->n_nodes, n_values = graph->n_values;
    cg_value **of_value = calloc((size_t)n_values + 1, sizeof *of_value);
    if (!of_value) {
        cg_graph_no_memory(graph, "in autodiff");
        return false;
    }
    CG_WITHIN(graph, NULL, CG_BACKWARD, NULL);
    for (int i = 0; i < n_outputs; i++) add_gradient(graph, of_value, outputs[i], seeds[i]);
    for (int n = n_forward - 1; n >= 0 && graph->error.code == CG_OK; n--)
        differentiate(graph, graph->nodes[n], of_value);
    for (int k = 0; k < n_wrt && graph->error.code == CG_OK; k++) {
        grads[k] = of_value[wrt[k]->id];
        if (grads[k]) continue;
        CG_WITHIN(graph, wrt[k]->scope, CG_BACKWARD, NULL);
        cg_zeros_attr zeros = {wrt[k]->dtype, wrt[k]->shape};
        grads[k] = cg_apply(graph, graph->ops->zeros, &zeros, NULL, 0);
    }
    free(of_value);
    return graph->error.code == CG_OK;
}
