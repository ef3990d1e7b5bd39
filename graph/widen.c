#include "graph/widen.h"

#include "core/base/bf16.h"
#include "core/base/threads.h"

enum {
    MAX_TENSORS = CG_MAX_IN + CG_MAX_OUT,
    /* f32 copies of a block, per thread: a share of the second-level cache. And rows, so that a kernel that hands out
     * a few at a time has some for each thread. */
    BLOCK_BYTES = 512 << 10,
    BLOCK_ROWS = 8,
    /* The same for all threads together where the number of threads must not matter. */
    SUMMED_BYTES = 4 << 20,
    SUMMED_ROWS = 128,
    PARALLEL = 32768 /* elements from which converting is shared by threads */
};

/* How a tensor of the node gets to the kernel. */
typedef struct passage {
    bool cut;             /* a block of it at a time */
    bool copied;          /* in f32 */
    bool summed;          /* an output that blocks add to */
    int64_t row;          /* elements of a row (cut) */
    int64_t count;        /* elements of all of it */
    size_t copy, partial; /* places in the workspace; partial: what one block adds */
} passage;

/* The node as its f32 kernel sees it. */
typedef struct widened {
    cg_node twin;
    cg_value values[MAX_TENSORS], *in[CG_MAX_IN], *out[CG_MAX_OUT];
    passage passages[MAX_TENSORS]; /* inputs, then outputs */
    int64_t n_rows, block;         /* block == n_rows: one block */
    size_t workspace, bytes;       /* of the kernel, and of everything */
} widened;

static bool is_widened(const cg_node *node) {
    return cg_node_dtype(node) == CG_BF16 && !cg_op_kernel(node->op, CG_BF16);
}

bool cg_node_has_kernel(const cg_node *node) {
    const cg_op *op = node->op;
    if (op->alias) return true;
    return is_widened(node) ? cg_op_kernel(op, CG_F32) && !op->variadic && !op->mutates
                            : cg_op_kernel(op, cg_node_dtype(node)) != NULL;
}

static size_t aligned(size_t bytes) { return (bytes + 63) & ~(size_t)63; }

static const cg_value *tensor_of(const cg_node *node, int i) {
    return i < node->n_in ? node->in[i] : node->out[i - node->n_in];
}

/* Rows, when the node can be cut into some; else 0. */
static int64_t rows_of(const cg_node *node) {
    const cg_op *op = node->op;
    int64_t n_rows = 0;
    for (int i = 0; i < node->n_in + node->n_out; i++) {
        const cg_value *value = tensor_of(node, i);
        if (op->elementwise) return cg_shape_count(&value->shape);
        const bool cut =
            i < node->n_in ? op->by_row & CG_BIT(i) : op->by_row && !(op->summed & CG_BIT(i - node->n_in));
        if (!value || !cut) continue;
        if (value->dtype == CG_BF16 && value->shape.n_dims < 2)
            return 0; /* its one axis may be what a row runs along */
        n_rows = value->shape.dims[0];
    }
    return n_rows;
}

/* The shape of `rows` rows; elements of elementwise ops are rows of one. */
static void cut_shape(const cg_op *op, cg_shape *shape, int64_t rows) {
    if (op->elementwise)
        *shape = CG_SHAPE(rows);
    else
        shape->dims[0] = rows;
}

static void set_rows(widened *w, int64_t rows) {
    for (int i = 0; i < w->twin.n_in + w->twin.n_out; i++)
        if (w->passages[i].cut) cut_shape(w->twin.op, &w->values[i].shape, rows);
}

static size_t kernel_workspace(widened *w, int64_t rows) {
    set_rows(w, rows);
    return w->twin.op->workspace ? w->twin.op->workspace(&w->twin) : 0;
}

static int64_t block_rows(const widened *w, const cg_op *op) {
    int64_t row_bytes = 1;
    for (int i = 0; i < w->twin.n_in + w->twin.n_out; i++)
        if (w->passages[i].cut && w->passages[i].copied)
            row_bytes += w->passages[i].row * (int64_t)sizeof(float);
    const int64_t share = op->summed ? 1 : cg_thread_slots();
    int64_t rows = share * (op->summed ? SUMMED_BYTES : BLOCK_BYTES) / row_bytes,
            least = op->elementwise ? 1 : share * (op->summed ? SUMMED_ROWS : BLOCK_ROWS);
    if (rows < least) rows = least;
    return rows < w->n_rows ? rows : w->n_rows;
}

static void widened_of(const cg_node *node, widened *w) {
    const cg_op *op = node->op;
    w->twin = *node;
    w->twin.in = w->in;
    w->twin.out = w->out;
    w->n_rows = rows_of(node);
    const bool is_cut = op->elementwise || w->n_rows > 0;
    for (int i = 0; i < node->n_in + node->n_out; i++) {
        const cg_value *value = tensor_of(node, i);
        const bool is_in = i < node->n_in;
        passage *p = &w->passages[i];
        *p = (passage){0};
        if (is_in) w->in[i] = value ? &w->values[i] : NULL;
        if (!value) continue;
        if (!is_in) w->out[i - node->n_in] = &w->values[i];
        w->values[i] = *value;
        p->copied = value->dtype == CG_BF16;
        if (p->copied) w->values[i].dtype = CG_F32;
        p->count = cg_shape_count(&value->shape);
        p->summed = !is_in && (op->summed & CG_BIT(i - node->n_in));
        p->cut = is_cut && (op->elementwise || (is_in ? op->by_row & CG_BIT(i) : !p->summed));
        p->row = p->cut && w->n_rows ? p->count / w->n_rows : 0;
    }
    w->block = is_cut ? block_rows(w, op) : 0;
    w->bytes = 0;
    for (int i = 0; i < node->n_in + node->n_out; i++) {
        passage *p = &w->passages[i];
        const size_t count = (size_t)(p->cut ? w->block * p->row : p->count);
        p->copy = w->bytes;
        if (p->copied) w->bytes += aligned(count * sizeof(float));
        p->partial = w->bytes;
        if (p->summed && w->block < w->n_rows) w->bytes += aligned(count * sizeof(float));
    }
    w->workspace = w->bytes;
    const int64_t rest = w->block ? w->n_rows % w->block : 0;
    const size_t block = kernel_workspace(w, w->block), last = rest ? kernel_workspace(w, rest) : 0;
    const size_t more = block > last ? block : last;
    w->bytes = more > SIZE_MAX - w->bytes ? SIZE_MAX : w->bytes + more;
}

size_t cg_node_workspace(const cg_node *node) {
    const cg_op *op = node->op;
    if (op->alias) return 0;
    if (!is_widened(node)) return op->workspace ? op->workspace(node) : 0;
    if (!cg_node_has_kernel(node)) return 0; /* it is refused when it is to be run */
    widened w;
    widened_of(node, &w);
    return w.bytes;
}

static void widen(int64_t n, const uint16_t *x, float *y) {
#pragma omp parallel for schedule(static) if (n > PARALLEL)
    for (int64_t i = 0; i < n; i += 4096) cg_bf16_widen(n - i < 4096 ? n - i : 4096, x + i, y + i);
}

static void narrow(int64_t n, const float *x, uint16_t *y) {
#pragma omp parallel for schedule(static) if (n > PARALLEL)
    for (int64_t i = 0; i < n; i += 4096) cg_bf16_narrow(n - i < 4096 ? n - i : 4096, x + i, y + i);
}

static void add(int64_t n, const float *x, float *y) {
#pragma omp parallel for simd if (n > PARALLEL)
    for (int64_t i = 0; i < n; i++) y[i] += x[i];
}

/* Where the sum over blocks is made. */
static float *sum_of(const cg_run_args *args, const passage *p, const cg_tensor *tensor) {
    return p->copied ? (float *)((char *)args->workspace + p->copy) : tensor->data;
}

/* Rows first .. first + rows - 1 of the node's tensors. */
static bool run_block(const widened *w, const cg_run_args *args, int64_t first, int64_t rows) {
    const int n_in = args->n_in, n = n_in + args->n_out;
    cg_tensor tensors[MAX_TENSORS];
    cg_run_args block = *args;
    block.in = tensors;
    block.out = tensors + n_in;
    block.workspace = (char *)args->workspace + w->workspace;
    block.first_row = first;
    for (int i = 0; i < n; i++) {
        const passage *p = &w->passages[i];
        const cg_tensor *tensor = i < n_in ? &args->in[i] : &args->out[i - n_in];
        tensors[i] = *tensor;
        if (!tensor->data) continue;
        const int64_t at = p->cut ? first * p->row : 0, count = p->cut ? rows * p->row : p->count;
        char *data = (char *)tensor->data + (size_t)at * cg_dtype_bytes(tensor->dtype);
        if (p->cut) cut_shape(w->twin.op, &tensors[i].shape, rows);
        tensors[i].data = data;
        if (p->copied) {
            tensors[i].dtype = CG_F32;
            tensors[i].data = (char *)args->workspace + p->copy;
            if (i < n_in && (p->cut || first == 0)) widen(count, (const uint16_t *)data, tensors[i].data);
        }
        if (p->summed && first > 0) tensors[i].data = (char *)args->workspace + p->partial;
    }
    if (!cg_op_kernel(w->twin.op, CG_F32)(&block)) return false;
    for (int i = n_in; i < n; i++) {
        const passage *p = &w->passages[i];
        const cg_tensor *tensor = &args->out[i - n_in];
        if (p->summed && first > 0) add(p->count, tensors[i].data, sum_of(args, p, tensor));
        if (!p->copied) continue;
        if (p->cut)
            narrow(rows * p->row, tensors[i].data, (uint16_t *)tensor->data + first * p->row);
        else if (first + rows == w->n_rows || !w->block)
            narrow(p->count, sum_of(args, p, tensor), tensor->data);
    }
    return true;
}

bool cg_node_run(const cg_node *node, const cg_run_args *args) {
    if (!is_widened(node)) return cg_op_kernel(node->op, cg_node_dtype(node))(args);
    widened w;
    widened_of(node, &w);
    if (!w.block) return run_block(&w, args, 0, 0); /* the whole, or no row at all */
    for (int64_t first = 0; first < w.n_rows; first += w.block)
        if (!run_block(&w, args, first, w.n_rows - first < w.block ? w.n_rows - first : w.block)) return false;
    return true;
}
