#include "tools/bench_row.h"

#include <stdlib.h>
#include <string.h>

const bench_part bench_parts[BENCH_PARTS] = {{"indexer-loss", CG_PART_INDEXER_LOSS, false, false},
                                             {"attention", CG_PART_ATTENTION, false, false},
                                             {"attention+loss", CG_PART_ATTENTION_LOSS, false, false},
                                             {"layer", CG_PART_STEP, true, false},
                                             {"step", CG_PART_STEP, false, true}};

static int dearer(const void *a, const void *b) {
    const bench_op *x = a, *y = b;
    if (x->us != y->us) return x->us < y->us ? 1 : -1;
    int order = strcmp(x->op, y->op);
    return order ? order : (int)x->pass - (int)y->pass;
}

bool bench_row_add_nodes(bench_row *r, const cg_plan *plan, const double *node_us, cg_error *error) {
    r->ops = calloc((size_t)plan->n_steps + 1, sizeof *r->ops);
    if (!r->ops) return cg_fail(error, CG_FAILED, "out of memory for the times of %d nodes", plan->n_steps);
    for (int t = 0; t < plan->n_steps; t++) {
        const cg_node *node = plan->steps[t];
        if (node->op->alias) continue;
        cg_cost cost = node->op->cost ? node->op->cost(node) : (cg_cost){0, cg_node_bytes(node)};
        const char *variant = plan->backend ? plan->kernels[t].variant : "";
        int k = 0;
        while (k < r->n_ops && (strcmp(r->ops[k].op, node->op->name) || r->ops[k].pass != node->pass ||
                                strcmp(r->ops[k].variant, variant)))
            k++;
        if (k == r->n_ops)
            r->ops[r->n_ops++] = (bench_op){.op = node->op->name, .variant = variant, .pass = node->pass};
        r->ops[k].n_nodes++;
        r->ops[k].us += node_us[t];
        r->ops[k].flops += cost.flops;
        r->ops[k].bytes += cost.bytes;
        r->us[node->pass] += node_us[t];
        r->flops += cost.flops;
        r->bytes += cost.bytes;
    }
    qsort(r->ops, (size_t)r->n_ops, sizeof *r->ops, dearer);
    return true;
}

double bench_row_backward_us(const bench_row *r) { return r->us[CG_BACKWARD] + r->us[CG_RECOMPUTE]; }

double bench_row_us(const bench_row *r) {
    return r->us[CG_FORWARD] + bench_row_backward_us(r) + r->us[CG_OPTIMIZE];
}
