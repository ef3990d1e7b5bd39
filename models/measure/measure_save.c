#include "models/measure/measure.h"

#include "core/files/safetensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NAME_BYTES = 512, PREFIX_BYTES = 8 };

/* Tensors that lie in an executor's memory, under the names of the file. */
typedef struct collection {
    const cg_exec *exec;
    cg_named_tensor *tensors;
    char (*names)[NAME_BYTES + PREFIX_BYTES];
    int n;
} collection;

static void add(collection *c, const char *prefix, const char *name, const cg_value *value) {
    if (!value) return;
    snprintf(c->names[c->n], sizeof *c->names, "%s%s", prefix, name);
    c->tensors[c->n] =
        (cg_named_tensor){c->names[c->n], {value->dtype, value->shape, cg_exec_data(c->exec, value)}};
    c->n++;
}

/* Under its full name: a leaf's scope and name, an output's scope and name without the op, which another form of the
 * objective would change. */
static void add_named(collection *c, const char *prefix, const cg_value *of, const cg_value *value) {
    char name[NAME_BYTES];
    snprintf(name, sizeof name, "%s%s%s", of->scope, of->scope[0] ? "/" : "", of->name);
    add(c, prefix, name, value);
}

static void collect_step(collection *c, const cg_step *step) {
    const cg_dsv4 *m = step->model;
    const cg_value *inputs[] = {m->tokens,   m->targets,   m->cu_seqlens, m->seqlens,
                                m->lm_scale, m->row_scale, step->schedule};
    for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++)
        if (inputs[i]) add_named(c, "in.", inputs[i], inputs[i]);
    for (int p = 0; p < m->n_params; p++) {
        char name[NAME_BYTES];
        cg_param_name(m->params[p].value, name, sizeof name);
        add(c, "", name, m->params[p].value);
        add(c, "grad.", name, step->grads[p]);
    }
    for (int i = 0; i < m->n_layers; i++)
        if (m->layers[i].topk) add_named(c, "out.", m->layers[i].topk, m->layers[i].topk);
    add(c, "out.", "lm_loss", m->lm_loss);
    add(c, "out.", "indexer_loss", m->indexer_loss);
}

static void collect_part(collection *c, const cg_step *step) {
    const cg_graph *g = step->graph;
    int n_grads = 0;
    for (int v = 0; v < g->n_values; v++) {
        const cg_value *leaf = g->values[v];
        if (!leaf->leaf) continue;
        add_named(c, "in.", leaf, leaf);
        if (leaf->needs_grad) add_named(c, "grad.", leaf, step->grads[n_grads++]);
    }
    for (int t = 0; t < step->plan->n_steps; t++) {
        const cg_node *node = step->plan->steps[t];
        for (int s = 0; s < node->n_out && node->pass == CG_FORWARD; s++)
            if (node->out[s]->keep) add_named(c, "out.", node->out[s], node->out[s]);
    }
}

/* What a whole step tells: the norm of its gradients, and the losses behind it. */
typedef struct step_taken {
    double grad_norm, next_lm, next_indexer;
} step_taken;

static bool take_step(const cg_step *step, cg_exec *exec, step_taken *taken, cg_error *error) {
    const cg_dsv4 *m = step->model;
    if (!cg_exec_run(exec, CG_ALL_PASSES, error)) return false;
    taken->grad_norm = cg_exec_get(exec, step->grad_norm, 0);
    if (!cg_exec_run(exec, CG_PASS_BIT(CG_FORWARD), error)) return false;
    taken->next_lm = cg_exec_get(exec, m->lm_loss, 0);
    taken->next_indexer = m->indexer_loss ? cg_exec_get(exec, m->indexer_loss, 0) : 0;
    return true;
}

static void add_scalar(collection *c, const char *name, const double *x) {
    snprintf(c->names[c->n], sizeof *c->names, "out.%s", name);
    c->tensors[c->n] = (cg_named_tensor){c->names[c->n], {CG_F64, CG_SHAPE(1), (void *)(uintptr_t)x}};
    c->n++;
}

static bool write_file(const cg_workload *w, const cg_step *step, const cg_exec *exec, const step_taken *taken,
                       const char *path, cg_error *error) {
    size_t room = 2 * (size_t)step->graph->n_values + 8;
    collection c = {
        .exec = exec, .tensors = calloc(room, sizeof *c.tensors), .names = calloc(room, sizeof *c.names)};
    char *config = cg_config_json(&w->config);
    bool ok = c.tensors && c.names && config;
    if (!ok) {
        cg_fail(error, CG_FAILED, "out of memory for a list of tensors");
    } else {
        if (step->model)
            collect_step(&c, step);
        else
            collect_part(&c, step);
        if (taken) {
            add_scalar(&c, "grad_norm", &taken->grad_norm);
            add_scalar(&c, "next_lm_loss", &taken->next_lm);
            if (step->model->indexer_loss) add_scalar(&c, "next_indexer_loss", &taken->next_indexer);
        }
        ok = cg_safetensors_write(path, c.tensors, c.n, (const char *const[][2]){{"config", config}}, 1, error);
    }
    free(config);
    free(c.names);
    free(c.tensors);
    return ok;
}

bool cg_measure_save(const cg_workload *workload, const char *path, cg_error *error) {
    cg_workload w = *workload;
    w.keep_results = true;
    cg_step step;
    cg_measurement plan;
    step_taken taken;
    bool ok = cg_measure_plan(&w, &step, &plan, error);
    bool steps = ok && step.model && !w.no_optimizer;
    cg_exec *exec = ok ? cg_exec_new(step.plan, NULL, error) : NULL;
    if (exec) cg_measure_fill(&w, &step, exec);
    ok = exec && (!steps || take_step(&step, exec, &taken, error));
    if (ok) cg_measure_fill(&w, &step, exec); /* parameters and moments as they were */
    ok = ok && cg_exec_run(exec, CG_PASS_BIT(CG_FORWARD) | CG_PASS_BIT(CG_BACKWARD), error) &&
         write_file(&w, &step, exec, steps ? &taken : NULL, path, error);
    cg_exec_free(exec);
    cg_step_free(&step);
    return ok;
}
