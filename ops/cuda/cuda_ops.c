/* The list of all CUDA tables, read by the build from the files of this folder, and the choice of a variant. */
#include "ops/cuda/cuda_ops.h"

#include <string.h>

#include "core/base/suggest.h"

#ifdef CG_CUDA_KERNELS /* compiled, by nvcc or for tests */

#define CG_CUDA_OP(name) extern const cg_cuda_op cg_cuda_##name;
#include "cuda_op_list.inc"
#undef CG_CUDA_OP

static const cg_cuda_op *const list[] = {
#define CG_CUDA_OP(name) &cg_cuda_##name,
#include "cuda_op_list.inc"
#undef CG_CUDA_OP
    NULL};

#else

static const cg_cuda_op *const list[] = {NULL};

bool cg_cuda_try_wgmma(cg_device *device, cg_cuda_wgmma *found, cg_error *error) {
    (void)device, (void)error;
    *found = CG_WGMMA_NONE;
    return true;
}

#endif

const cg_cuda_op *cg_cuda_op_find(const char *op) {
    for (int i = 0; list[i]; i++)
        if (!strcmp(list[i]->op, op)) return list[i];
    return NULL;
}

bool cg_cuda_can_run(const cg_backend *backend, const cg_cuda_variant *variant, const cg_node *node) {
    cg_device_facts facts;
    cg_device_facts_of(backend->device, &facts);
    return variant->name && variant->launch[cg_node_dtype(node)] && facts.sm >= variant->least_sm &&
           (!variant->wgmma || backend->abilities == CG_WGMMA_WORKS) &&
           (!variant->fits || variant->fits(node)) &&
           (!variant->shared || variant->shared(node) <= facts.shared_bytes);
}

static bool kernel_of(const cg_backend *backend, const cg_node *node, cg_device_kernel *kernel,
                      cg_error *error) {
    const char *forced = backend->kernels;
    const cg_cuda_op *op = cg_cuda_op_find(node->op->name);
    const cg_cuda_variant *chosen = NULL;
    for (int v = 0; op && v < CG_CUDA_VARIANTS; v++) {
        if (!cg_cuda_can_run(backend, &op->variants[v], node)) continue;
        chosen = &op->variants[v];
        if (forced && !strcmp(chosen->name, forced)) break;
    }
    if (!chosen)
        return cg_fail(error, CG_BAD_INPUT, "%s%s%s has no CUDA kernel for %s", node->scope,
                       node->scope[0] ? ": " : "", node->op->name, cg_dtype_name(cg_node_dtype(node)));
    *kernel = (cg_device_kernel){.variant = chosen->name,
                                 .launch = chosen->launch[cg_node_dtype(node)],
                                 .workspace = chosen->workspace ? chosen->workspace(node) : 0,
                                 .describe = op->describe};
    return true;
}

bool cg_cuda_backend(cg_backend *backend, cg_device *device, const char *variant, cg_error *error) {
    enum { MOST_NAMES = 32 };
    const char *names[MOST_NAMES] = {NULL};
    int n = 0;
    cg_device_facts facts;
    cg_device_facts_of(device, &facts);
    cg_cuda_wgmma wgmma = facts.emulated ? CG_WGMMA_WORKS : CG_WGMMA_NONE;
    if (facts.sm == 90 && !facts.emulated && !cg_cuda_try_wgmma(device, &wgmma, error)) return false;
    *backend = (cg_backend){device, NULL, wgmma, kernel_of};
    for (int i = 0; variant && list[i]; i++)
        for (int v = 0; v < CG_CUDA_VARIANTS && list[i]->variants[v].name; v++) {
            const char *name = list[i]->variants[v].name;
            if (!strcmp(name, variant)) backend->kernels = name; /* lives as long as the program */
            bool known = false;
            for (int k = 0; k < n; k++) known |= !strcmp(names[k], name);
            if (!known && n < MOST_NAMES) names[n++] = name;
        }
    if (!variant || backend->kernels) return true;
    const char *near = cg_suggest(variant, names, n);
    return cg_fail(error, CG_BAD_INPUT, "no CUDA kernel has a variant \"%.60s\"%s%s%s", variant,
                   near ? ", did you mean " : "", near ? near : "", near ? "?" : "");
}
