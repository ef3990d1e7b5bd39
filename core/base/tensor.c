#include "core/base/tensor.h"

#include "core/base/bf16.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

static const struct {
    const char *name;
    size_t bytes;
} dtypes[CG_DTYPES] = {
    [CG_F32] = {"f32", 4}, [CG_F64] = {"f64", 8}, [CG_I32] = {"i32", 4}, [CG_BF16] = {"bf16", 2},
    [CG_F16] = {"f16", 2}, [CG_I64] = {"i64", 8}, [CG_U8] = {"u8", 1},   [CG_BOOL] = {"bool", 1},
    [CG_I8] = {"i8", 1},   [CG_I16] = {"i16", 2}, [CG_U16] = {"u16", 2}, [CG_U32] = {"u32", 4},
    [CG_U64] = {"u64", 8},
};

size_t cg_dtype_bytes(cg_dtype dtype) { return dtypes[dtype].bytes; }

const char *cg_dtype_name(cg_dtype dtype) { return dtypes[dtype].name; }

bool cg_dtype_is_real(cg_dtype dtype) { return dtype == CG_F32 || dtype == CG_F64 || dtype == CG_BF16; }

bool cg_dtype_is_whole(cg_dtype dtype) {
    return dtype == CG_I32 || (dtype >= CG_I64 && dtype != CG_BOOL && dtype < CG_DTYPES);
}

bool cg_shape_equal(const cg_shape *a, const cg_shape *b) {
    if (a->n_dims != b->n_dims) return false;
    for (int i = 0; i < a->n_dims; i++)
        if (a->dims[i] != b->dims[i]) return false;
    return true;
}

int64_t cg_shape_count(const cg_shape *shape) {
    int64_t count = 1;
    bool too_large = false, empty = false; /* an empty tensor is empty however large its other sides are */
    for (int i = 0; i < shape->n_dims; i++) {
        if (shape->dims[i] < 0) return INT64_MAX;
        empty |= shape->dims[i] == 0;
        too_large |= __builtin_mul_overflow(count, shape->dims[i], &count);
    }
    return empty ? 0 : too_large ? INT64_MAX : count;
}

int64_t cg_tensor_bytes(cg_dtype dtype, const cg_shape *shape) {
    int64_t bytes;
    if (__builtin_mul_overflow(cg_shape_count(shape), (int64_t)cg_dtype_bytes(dtype), &bytes)) return INT64_MAX;
    return bytes;
}

const char *cg_shape_text(const cg_shape *shape, char *text, size_t text_bytes) {
    size_t n = (size_t)snprintf(text, text_bytes, "[");
    for (int i = 0; i < shape->n_dims && n < text_bytes; i++)
        n += (size_t)snprintf(text + n, text_bytes - n, "%s%lld", i ? ", " : "", (long long)shape->dims[i]);
    if (n < text_bytes) snprintf(text + n, text_bytes - n, "]");
    return text;
}

static double half(uint16_t bits) {
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    double size = exponent == 31 ? (fraction ? NAN : INFINITY)
                  : exponent     ? ldexp(1024 + fraction, exponent - 25)
                                 : ldexp(fraction, -24);
    return bits & 0x8000 ? -size : size;
}

typedef union element {
    float f32;
    double f64;
    int8_t i8;
    int16_t i16;
    int32_t i32;
    int64_t i64;
    uint8_t u8;
    uint16_t u16;
    uint32_t u32;
    uint64_t u64;
} element;

static element element_at(cg_dtype dtype, const void *data, int64_t i) {
    element x = {.u64 = 0};
    size_t bytes = cg_dtype_bytes(dtype);
    memcpy(&x, (const char *)data + i * (int64_t)bytes, bytes);
    return x;
}

double cg_dtype_get(cg_dtype dtype, const void *data, int64_t i) {
    element x = element_at(dtype, data, i);
    switch (dtype) {
    case CG_F32:
        return x.f32;
    case CG_F64:
        return x.f64;
    case CG_F16:
        return half(x.u16);
    case CG_BF16:
        return cg_bf16_get(x.u16);
    case CG_U64:
        return (double)x.u64;
    default:
        return (double)cg_dtype_whole(dtype, &x, 0);
    }
}

int64_t cg_dtype_whole(cg_dtype dtype, const void *data, int64_t i) {
    element x = element_at(dtype, data, i);
    switch (dtype) {
    case CG_I8:
        return x.i8;
    case CG_I16:
        return x.i16;
    case CG_I32:
        return x.i32;
    case CG_I64:
        return x.i64;
    case CG_U16:
        return x.u16;
    case CG_U32:
        return x.u32;
    case CG_U64:
        return x.u64 > INT64_MAX ? INT64_MAX : (int64_t)x.u64;
    case CG_BOOL:
        return x.u8 != 0;
    default:
        return x.u8;
    }
}

cg_whole_text cg_dtype_whole_text(cg_dtype dtype, const void *data, int64_t i) {
    cg_whole_text t;
    if (dtype == CG_U64)
        snprintf(t.text, sizeof t.text, "%" PRIu64, element_at(dtype, data, i).u64);
    else
        snprintf(t.text, sizeof t.text, "%" PRId64, cg_dtype_whole(dtype, data, i));
    return t;
}

void cg_dtype_set(cg_dtype dtype, void *data, int64_t i, double x) {
    if (dtype == CG_F64)
        ((double *)data)[i] = x;
    else if (dtype == CG_BF16)
        ((uint16_t *)data)[i] = cg_bf16_of((float)x);
    else
        ((float *)data)[i] = (float)x;
}
