/* Reading a dump: the tensors of one CSA layer and its indexer loss, from whatever names, layout and element type a
 * framework gave them, as packed rows.
 *
 * Nothing is converted ahead: a row is read from the mapped file when it is asked for. What cannot be told from
 * names, shapes and values is asked for in one sentence that names the option. */
#ifndef CG_MODELS_DUMP_H
#define CG_MODELS_DUMP_H

#include "core/files/safetensors.h"
#include "models/check/contract.h"

/* The tensors, by the names of the stored vectors. */
typedef enum cg_dump_id {
    CG_DUMP_Q_INDEXER,     /* [T, Hi, Di] */
    CG_DUMP_WEIGHTS,       /* [T, Hi], every scale in them */
    CG_DUMP_K_INDEXER,     /* [C, Di] */
    CG_DUMP_QUERY,         /* [T, H, D] */
    CG_DUMP_KV,            /* [T, D] */
    CG_DUMP_COMPRESSED_KV, /* [C, D] */
    CG_DUMP_SINK,          /* [H] */
    CG_DUMP_DOUT,          /* [T, H, D] */
    CG_DUMP_TOPK,          /* [T, K] */
    CG_DUMP_ATTN_TOPK,     /* [T, K]: attention's own list, where it differs */
    CG_DUMP_SCORES,        /* [T, N] index scores */
    CG_DUMP_OUTPUT,        /* [T, H, D] */
    CG_DUMP_LSE,           /* [T, H] */
    CG_DUMP_WINDOW_LSE,    /* [T, H] */
    CG_DUMP_TARGET,        /* [T, N] */
    CG_DUMP_LOG_PREDICT,   /* [T, N] */
    CG_DUMP_PREDICT,       /* [T, N] */
    CG_DUMP_KL,            /* [T] */
    CG_DUMP_LOSS,          /* [1] */
    CG_DUMP_GRAD_Q_INDEXER,
    CG_DUMP_GRAD_WEIGHTS,
    CG_DUMP_GRAD_K_INDEXER,
    CG_DUMP_GRAD_QUERY,
    CG_DUMP_GRAD_KV,
    CG_DUMP_GRAD_COMPRESSED_KV,
    CG_DUMP_GRAD_SINK,
    CG_DUMP_CU_SEQLENS,    /* [B+1] physical offsets */
    CG_DUMP_CU_REAL,       /* [B+1] running sums of real lengths */
    CG_DUMP_CU_COMPRESSED, /* [B+1] */
    CG_DUMP_VALID_ROWS,    /* [T] 1: real */
    CG_DUMP_ARRAYS
} cg_dump_id;

extern const char *const cg_dump_names[CG_DUMP_ARRAYS + 1]; /* "q_indexer", ..., NULL */

/* One tensor of the dump, as rows. Row t of the packed rows lies at (t / S) * batch_stride + (t % S) * row_stride
 * elements, S rows of each sequence; its `heads` parts of `width` contiguous elements head_stride apart. */
typedef struct cg_dump_array {
    const char *name, *file; /* as in the file; NULL: the dump lacks it */
    cg_dtype dtype;
    cg_shape shape;
    const void *data;
    int64_t batch_stride, row_stride, head_stride, heads, width;
} cg_dump_array;

typedef enum cg_dump_origin { CG_INDEX_LOCAL, CG_INDEX_GLOBAL } cg_dump_origin;

typedef struct cg_dump {
    cg_dump_array array[CG_DUMP_ARRAYS];
    const char *layout;  /* "sbhd", "bshd", "thd" */
    int64_t T, S, batch; /* packed rows; sequences of S rows (thd: one of T) */
    int64_t B;           /* segments */
    int64_t *start, *real, *physical, *first_key, *n_keys; /* [B] */
    int64_t *segment;                                      /* [T], -1: behind the last one */
    int64_t C, N;                                          /* compressed rows in all; of the longest segment */
    int64_t keys_per_sequence;
    int64_t H, D, Hi, Di; /* 0 where unknown */
    int64_t K;            /* width of the lists to read; without lists as k_asked */
    int64_t k_asked;      /* what selection is asked for, topk; not given: the width of the lists, else -1 */
    int64_t ratio, window;
    double scale, coeff;  /* NAN: not given */
    cg_dump_origin index; /* what lists count from */
    bool index_told;      /* ... follows from the values or an option */
    double lse_base;      /* 0: to be told from values */
    int lse_has_sink;     /* -1: to be told from values */
    cg_contract declared; /* support and reduction as the dump says, else the default */
    cg_contract claimed;  /* a whole contract that the dump names, for the report */
    bool has_claim;
    const char *const *unused; /* names that stand for nothing known */
    int n_unused;
    char passed_over[800]; /* a sentence of those whose elements are not read; "" when all are */
    struct cg_dump_private *own;
} cg_dump;

typedef struct cg_dump_options {
    const char *const *paths;
    int n_paths;
    const char *config;               /* JSON file of numbers; NULL: none */
    const char *const (*settings)[2]; /* numbers by name, above the file's: {"ratio", "4"} */
    int n_settings;
    const char *const *maps; /* "canonical=theirs" */
    int n_maps;
    const char *layout; /* NULL: to be found */
    const char *index;  /* "local", "global" or NULL */
    const char *lse;    /* "e", "2", "e-no-sink", "2-no-sink" or NULL */
    /* A dump in memory, in place of files or beside them: tensors, aligned to their elements and alive until
     * close, and what a file's metadata would say. */
    const cg_named_tensor *tensors;
    int n_tensors;
    const char *const (*metadata)[2];
    int n_metadata;
} cg_dump_options;

/* The files, checked: shapes, offsets, index lists, and that no input that a real row reads is NaN or infinite.
 * NULL with one sentence: file ("memory" for tensors given there), tensor, place, expected, got.
 *
 * Entries of a real row's list are -1, which stands for none, or keys of the segment, visible or not; lists may
 * be wider than topk or narrower. Rows of padding may hold anything, in lists too. Facts that contradict are
 * refused: a mask of rows beside other offsets, offsets that are swapped.
 *
 * Lists, offsets and masks may have whole numbers of any size, masks truth values too. A tensor whose elements
 * are not read (core/files/safetensors.h) is refused where it has one of the names above, and passed over where it
 * has none. */
cg_dump *cg_dump_open(const cg_dump_options *options, cg_error *error);
void cg_dump_close(cg_dump *dump); /* NULL is fine */

bool cg_dump_has(const cg_dump *dump, cg_dump_id id);

/* Row t (or key, or all of a vector) as doubles, heads * width of them. */
void cg_dump_row(const cg_dump *dump, cg_dump_id id, int64_t t, double *out);

/* Compressed row `key` of the segment's, 0 .. n_keys-1. */
void cg_dump_key(const cg_dump *dump, cg_dump_id id, int64_t segment, int64_t key, double *out);

/* Columns of row t that stand for the segment's keys 0 .. n-1, from a [T, N] tensor; width K ones are spread by
 * the row's list. */
void cg_dump_columns(const cg_dump *dump, cg_dump_id id, int64_t t, int64_t n, double *out);

/* The list of row t, as wide as the array, counted from the segment's first key. -1: none; in padding also what
 * is no key of the segment. */
void cg_dump_list(const cg_dump *dump, cg_dump_id id, int64_t t, int64_t *out);

/* Compressed rows that row t may see; 0 behind the last segment. Padding rows: as if they were real. */
int64_t cg_dump_visible(const cg_dump *dump, int64_t t);
bool cg_dump_is_real(const cg_dump *dump, int64_t t);

/* The type that an array's numbers need, whatever they are stored in: the first of bf16, f16, f32 and f64 that
 * holds all of them exactly (NaN and infinities fit any). The stored one where no number has more than 4 bits
 * from the first to the last that is set, as 0, 0.75 and 10 have: those say nothing. */
cg_dtype cg_dump_holds(const cg_dump *dump, cg_dump_id id);

/* The dump as code sees it that takes running sums of REAL lengths for PHYSICAL offsets: segment b starts at
 * the sum of the real lengths before it and all its rows are real, real / ratio compressed rows belong to it,
 * and rows behind the last segment to none. A second view of the same tensors, to be closed before the dump is.
 * Lists are read by the same origin and not checked again (what is no key of the segment reads as -1), and rows
 * that count as real here may be padding that holds anything. NULL without an error where there is nothing to
 * misread: another layout than thd, no cu_seqlens_q_real, or one that is the same as the physical offsets. */
typedef enum cg_dump_misreading {
    CG_MISREAD_KEYS_PACKED, /* compressed rows of the segments one after another, without gaps */
    CG_MISREAD_KEYS_KEPT    /* each segment's compressed rows begin where cu_seqlens_compressed says */
} cg_dump_misreading;

cg_dump *cg_dump_misread(const cg_dump *dump, cg_dump_misreading how, cg_error *error);

/* Half the distance of neighbouring numbers near 1 in the tensor's type. */
double cg_dtype_rounding(cg_dtype dtype);

#endif
