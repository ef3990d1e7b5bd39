/* Dtypes, shapes and tensors. A tensor is contiguous, row-major, last dimension fastest.
 *
 * The letters used for dimensions everywhere:
 *   T  packed token rows        C   compressed rows          K   compressed rows chosen per token
 *   H  attention heads          D   attention head size      W   sliding window, the token itself included
 *   Hi indexer heads            Di  indexer head size        B   segments (documents) in the packed rows
 *   V  vocabulary               G R output groups and rank   m   tokens per compressed row (ratio)
 */
#ifndef CG_CORE_TENSOR_H
#define CG_CORE_TENSOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/base/error.h"

typedef enum cg_dtype {
    CG_F32,
    CG_F64,
    CG_I32,
    CG_BF16, /* stored alone: computed with in f32 (core/base/bf16.h) */
    CG_F16,  /* this and all below: files only */
    CG_I64,
    CG_U8,
    CG_BOOL, /* one byte: 0 is false, all others are true */
    CG_I8,
    CG_I16,
    CG_U16,
    CG_U32,
    CG_U64,
    CG_DTYPES
} cg_dtype;

enum { CG_MAX_DIMS = 6 };

typedef struct cg_shape {
    int n_dims;
    int64_t dims[CG_MAX_DIMS];
} cg_shape;

typedef struct cg_tensor {
    cg_dtype dtype;
    cg_shape shape;
    void *data;
} cg_tensor;

/* Bytes of one element. */
size_t cg_dtype_bytes(cg_dtype dtype);

/* "f32", "f64", "i32", "bf16", "f16", "i64", "u8", "bool", "i8", "i16", "u16", "u32", "u64". */
const char *cg_dtype_name(cg_dtype dtype);

/* True for f32, f64 and bf16, the dtypes of real numbers in graphs. */
bool cg_dtype_is_real(cg_dtype dtype);

/* True for whole numbers, with a sign or without. A truth value is none. */
bool cg_dtype_is_whole(cg_dtype dtype);

/* The shape with the given sizes: CG_SHAPE(T, D) as a value, CG_DIMS(3, 5) in a static initializer. */
#define CG_DIMS(...)                                                                                           \
    {                                                                                                          \
        (int)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), { __VA_ARGS__ }                             \
    }
#define CG_SHAPE(...) ((cg_shape)CG_DIMS(__VA_ARGS__))

bool cg_shape_equal(const cg_shape *a, const cg_shape *b);

/* Elements, 1 for a scalar shape of no dimension. INT64_MAX when the product does not fit 63 bits, or a
 * size is negative: compare with a limit before use. */
int64_t cg_shape_count(const cg_shape *shape);

/* Bytes, checked the same way: INT64_MAX when they do not fit. */
int64_t cg_tensor_bytes(cg_dtype dtype, const cg_shape *shape);

/* "[40, 8, 16]" into `text`; returns `text`. */
const char *cg_shape_text(const cg_shape *shape, char *text, size_t text_bytes);

/* Element i of data of any dtype, exact except for whole numbers above 2^53. The data need not be aligned. */
double cg_dtype_get(cg_dtype dtype, const void *data, int64_t i);

/* Element i of data of whole numbers or truth values, exact; a u64 above INT64_MAX gives INT64_MAX. */
int64_t cg_dtype_whole(cg_dtype dtype, const void *data, int64_t i);

/* ... as its digits, those above INT64_MAX too. */
typedef struct cg_whole_text {
    char text[24];
} cg_whole_text;
cg_whole_text cg_dtype_whole_text(cg_dtype dtype, const void *data, int64_t i);

/* Set element i of aligned data in f32, f64 or bf16 to the number of that dtype next to x. To bf16 by way of f32. */
void cg_dtype_set(cg_dtype dtype, void *data, int64_t i, double x);

#endif
