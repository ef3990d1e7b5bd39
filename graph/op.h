/* What an op is: one const table per op, in one file ops/<room>/<op>.c. A sketch of such a file:
 *
 *     #include "graph/op.h"                       header comment, infer, grad, cases ...
 *     #define CG_KERNEL_FILE "ops/nn/scale.c"        kernels written once for float and double:
 *     #include "ops/kernel.h"                     see there
 *
 *     const cg_op cg_op_scale = {
 *         .name = "scale", .doc = "y = factor * x", .in = {"x"}, .out = {"y"}, ... };
 *
 * The build finds every such table; nothing else is edited. */
#ifndef CG_GRAPH_OP_H
#define CG_GRAPH_OP_H

#include "core/base/isa.h"
#include "graph/graph.h"

enum { CG_MAX_IN = 14, CG_MAX_OUT = 6 };

/* Bit i: input (or output) number i. */
#define CG_BIT(i) (1u << (i))

/* What infer sees and fills in. */
typedef struct cg_infer {
    cg_graph *graph;
    const cg_op *op;
    int n_in;
    cg_value *const *in; /* optional inputs may be NULL */
    const void *attr;
    int n_out; /* preset to the outputs named in the table; an op may give fewer */
    cg_dtype out_dtype[CG_MAX_OUT];
    cg_shape out_shape[CG_MAX_OUT];
} cg_infer;

/* Refuse: fails the graph with "scope: op: sentence" and returns false. */
bool cg_refuse(cg_infer *infer, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The usual checks, each with its own sentence; false when refused. `dim` of expect_dim is the size that the
 * axis must have, `because` says whose size that is ("columns of x"). real: f32, f64 or bf16. A statistic (see cg_op)
 * is expected in cg_statistic_dtype of what is asked for, and is never bf16. */
bool cg_expect_dims(cg_infer *infer, int i, int n_dims);
bool cg_expect_dim(cg_infer *infer, int i, int axis, int64_t dim, const char *because);
bool cg_expect_dtype(cg_infer *infer, int i, cg_dtype dtype);
bool cg_expect_real(cg_infer *infer, int i);
bool cg_expect_same(cg_infer *infer, int i, int j); /* dtype and shape of i equal those of j */

/* The dtype of statistics beside values of a dtype: f32 beside bf16, else the same. */
cg_dtype cg_statistic_dtype(cg_dtype dtype);

/* Set output `slot`; where that is a statistic, to cg_statistic_dtype of the dtype. */
void cg_infer_out(cg_infer *infer, int slot, cg_dtype dtype, cg_shape shape);

/* What recompute may do with a node. */
typedef enum cg_replay {
    CG_REPLAY_SAME_BITS, /* a clone gives the same bits */
    CG_REPLAY_COUNTER,   /* random, by counter: a clone with the same counter gives the same bits */
    CG_REPLAY_CHOICE     /* selects; never cloned, its indices are kept */
} cg_replay;

typedef struct cg_cost {
    double flops; /* multiplications and additions, each counts 1; exp, log and division too */
    double bytes; /* bytes that must move to and from memory */
} cg_cost;

typedef struct cg_device_fault cg_device_fault;

/* What a kernel sees. It fills the outputs, allocates nothing, keeps nothing, reads nothing else. */
typedef struct cg_run_args {
    int n_in, n_out;
    const cg_tensor *in; /* .data is NULL for an absent optional input */
    const cg_tensor *out;
    const void *attr;
    void *workspace;        /* as many bytes as the op's workspace() said, 64-byte aligned */
    cg_error *error;        /* the executor puts scope and op before the sentence */
    cg_device_fault *fault; /* on a device alone: where its kernels report wrong data (graph/backend.h) */
    int64_t first_row; /* of an op that is cut by_row: number, in the whole, of the first row that is here */
} cg_run_args;

typedef bool (*cg_kernel)(const cg_run_args *args);

/* One input of a case. Real inputs run as f32, f64 and bf16. */
typedef struct cg_case_input {
    bool absent;      /* an optional input left out */
    bool constant;    /* a real input with no gradient wanted */
    bool wrong_dtype; /* for refusals: a real input is given as i32, an i32 input as f32 */
    cg_shape shape;
    const int32_t *i32;   /* an i32 input and its data */
    const double *real;   /* given data; NULL: offset + scale * standard normal, drawn from the seed */
    double scale, offset; /* scale 0 means 1 */
} cg_case_input;

/* A case: tiny for the gradient check, odd for the edges, or one that must be refused. */
typedef struct cg_case {
    const char *name;
    cg_case_input in[CG_MAX_IN];
    int n_in; /* for variadic ops; 0: as many as the table names */
    const void *attr;
    const char *crosses;   /* the saved set: names of this op's inputs and outputs that its backward reads */
    const char *refuses;   /* building must fail with a sentence holding this text; nothing is run */
    const char *run_error; /* running must fail with a sentence holding this text (bad data) */
    bool large;            /* too large for a gradient check: f32 and bf16 against f64 only */
    double f32_bound;      /* relative norm of f32 against f64; 0 means 1e-5 */
    double bf16_bound;     /* that of values in bf16, from inputs in bf16; 0 means 2^-8, a rounding of each */
} cg_case;

#define CG_CASES(array) .cases = (array), .n_cases = (int)(sizeof(array) / sizeof((array)[0]))

struct cg_op {
    const char *name;                            /* the one word used in files, messages, policies and traces */
    const char *doc;                             /* one line for lists */
    const char *in[CG_MAX_IN], *out[CG_MAX_OUT]; /* names used in every message */
    bool variadic;                               /* any number (>= 1) of inputs, all named in[0] */
    unsigned optional;                           /* bits of inputs that may be absent */
    size_t attr_bytes;                           /* sizeof the attribute struct; 0: none */
    bool (*infer)(cg_infer *infer);              /* pure: outputs and refusals, no data */

    unsigned differentiable; /* bits of inputs that gradients flow to; 0: none, and no_grad says why */
    unsigned constant_out;   /* bits of real outputs through which no gradient flows (a teacher, a statistic) */
    const char *no_grad;     /* "cannot: ..." (indices) or "not yet: ..." (second derivatives) */
    /* Build backward nodes. dout[s] is the gradient of output s or NULL; set din[i] for the inputs for which
     * cg_wants_grad holds. Every forward value named here becomes a saved value: be stingy. */
    void (*grad)(cg_graph *graph, const cg_node *node, cg_value *const *dout, cg_value **din);

    bool alias;          /* output 0 is input 0 under another shape or name: no bytes, no kernel */
    unsigned overwrites; /* bits of inputs whose place output 0 may take when they die here (elementwise) */
    unsigned mutates;    /* bits of leaf inputs changed in place (optimizer, gradient sums) */

    /* bf16 is for values there are many of. Bits of real inputs and outputs that are f32 beside it: sums over rows,
     * log-sums, probabilities, scores that are chosen by, losses, and parameters of which each row reads all. */
    unsigned statistic_in, statistic_out;
    /* How the f32 kernel may be run on bf16 values a block at a time, where there is no kernel for them
     * (graph/widen.h). Bits of inputs, cut along axis 0: row t of an output depends on row t of these, on all of the
     * other inputs, and on t. 0: only the whole can be run. */
    unsigned by_row;
    unsigned summed;  /* bits of outputs that are sums over the rows instead of having any */
    bool elementwise; /* an element depends on its place in every input alone: any block of elements will do */

    cg_replay replay;

    cg_cost (*cost)(const cg_node *node);
    size_t (*workspace)(const cg_node *node); /* exact scratch bytes, library scratch included; NULL: none */
    /* By cg_node_dtype, and compiled for each path (ops/kernel.h) or only for the portable one: [CG_F32] = {kernel}. None
     * for bf16: the one for f32 is run (graph/widen.h). */
    cg_kernel run[CG_DTYPES][CG_ISAS];

    const cg_case *cases; /* an op without cases is refused by the test run */
    int n_cases;
};

/* All ops, and those that autodiff and the gradient check need themselves. */
struct cg_op_set {
    const cg_op *const *list;
    int n;
    const cg_op *sum;   /* y = a + b: two gradients of one value */
    const cg_op *zeros; /* a zero tensor: the gradient of what nothing reaches; attr is a cg_zeros_attr */
    const cg_op *cast;  /* f32 to bf16 and back; attr is a cg_cast_attr. NULL: only where nothing is bf16 */
    const cg_op *hold;  /* a copy that is a choice, for gradient checks (cg_hold_constants) */
};

typedef struct cg_zeros_attr {
    cg_dtype dtype;
    cg_shape shape;
} cg_zeros_attr;

typedef struct cg_cast_attr {
    cg_dtype to; /* f32 or bf16 */
} cg_cast_attr;

/* The dtype that is best for a gradient of a value: f32 where the value is a bf16 copy of an f32 one (by cast, perhaps
 * reshaped), since the gradient ends in f32 then; else that of the value. Autodiff takes both, and adds them up in f32. */
cg_dtype cg_gradient_dtype(const cg_graph *graph, const cg_value *value);

/* An op by name; NULL when there is none. */
const cg_op *cg_op_find(const cg_op_set *ops, const char *name);

/* An op's kernel for a dtype on the path in use; NULL when there is none. */
cg_kernel cg_op_kernel(const cg_op *op, cg_dtype dtype);

/* The dtype whose kernel a node runs: bf16 when any input or output is, else that of the first real one, CG_I32 when
 * there is none. */
cg_dtype cg_node_dtype(const cg_node *node);

/* True when the gradient of input i is wanted. */
bool cg_wants_grad(const cg_node *node, int i);

/* Bytes of a node's inputs and outputs: the usual .bytes of a cost. */
double cg_node_bytes(const cg_node *node);

/* The table's name of input i ("grad" for every input of a variadic op). */
const char *cg_op_in_name(const cg_op *op, int i);

#endif
