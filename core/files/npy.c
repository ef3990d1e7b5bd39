#include "core/files/npy.h"

#include <string.h>

#include "core/base/shown.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "little-endian data is used as it is stored");

#define READ "f4 f8 f2, i1 to i8, u1 to u8, b1"

static int64_t number_of(const unsigned char *bytes, int n) {
    int64_t number = 0;
    for (int i = n; i-- > 0;) number = number << 8 | bytes[i];
    return number;
}

bool cg_npy_header_bytes(const void *start, size_t bytes, int64_t *header_bytes, cg_error *error) {
    const unsigned char *b = start;
    if (bytes < CG_NPY_MAGIC_BYTES || memcmp(b, CG_NPY_MAGIC, CG_NPY_MAGIC_BYTES))
        return cg_fail(error, CG_BAD_INPUT, "does not begin with the magic bytes of an npy array");
    int version = bytes > 6 ? b[6] : 0, length_bytes = version == 1 ? 2 : 4;
    if (bytes < (size_t)(8 + length_bytes))
        return cg_fail(error, CG_BAD_INPUT, "is cut within the first bytes of its npy header");
    if (version < 1 || version > 3 || b[7] != 0)
        return cg_fail(error, CG_BAD_INPUT, "has npy version %d.%d, these are read: 1.0, 2.0, 3.0", b[6], b[7]);
    int64_t length = number_of(b + 8, length_bytes);
    if (length > CG_NPY_HEADER_MAX)
        return cg_fail(error, CG_BAD_INPUT, "claims an npy header of %lld bytes, at most %d are accepted",
                       (long long)length, CG_NPY_HEADER_MAX);
    *header_bytes = 8 + length_bytes + length;
    return true;
}

/* ---- the Python dict of the header ---- */

typedef struct cursor {
    const char *start, *at, *end;
    cg_error *error;
} cursor;

typedef struct word {
    const char *text;
    size_t bytes;
} word;

static bool word_is(word w, const char *text) {
    return w.bytes == strlen(text) && !memcmp(w.text, text, w.bytes);
}

static char peek(cursor *c) {
    while (c->at < c->end && (*c->at == ' ' || *c->at == '\n' || *c->at == '\t' || *c->at == '\r')) c->at++;
    return c->at < c->end ? *c->at : 0;
}

static bool take(cursor *c, char wanted) {
    if (peek(c) != wanted || c->at == c->end) return false;
    c->at++;
    return true;
}

static bool fail_here(cursor *c, const char *expected) {
    peek(c);
    return cg_fail(c->error, CG_BAD_INPUT, "the npy header breaks at its byte %lld: expected %s",
                   (long long)(c->at - c->start), expected);
}

static bool read_word(cursor *c, word *w, const char *expected) {
    char quote = peek(c);
    if (quote != '\'' && quote != '"') return fail_here(c, expected);
    const char *begin = c->at + 1, *end = begin;
    while (end < c->end && *end != quote && *end != '\\' && *end != '\n') end++;
    if (end == c->end || *end != quote) return fail_here(c, "a plain string");
    *w = (word){begin, (size_t)(end - begin)};
    c->at = end + 1;
    return true;
}

/* Python's True and False. */
static bool read_truth(cursor *c, bool *value) {
    static const char *const words[] = {"False", "True"};
    peek(c);
    for (int i = 0; i < 2; i++) {
        size_t n = strlen(words[i]);
        if ((size_t)(c->end - c->at) < n || memcmp(c->at, words[i], n)) continue;
        c->at += n;
        *value = i;
        return true;
    }
    return fail_here(c, "True or False behind 'fortran_order'");
}

static bool read_size(cursor *c, int64_t *size) {
    if (peek(c) == '-')
        return cg_fail(c->error, CG_BAD_INPUT, "the shape of the npy header has a negative size");
    if (c->at == c->end || *c->at < '0' || *c->at > '9') return fail_here(c, "a whole number or ')'");
    *size = 0;
    for (; c->at < c->end && *c->at >= '0' && *c->at <= '9'; c->at++)
        if (__builtin_mul_overflow(*size, 10, size) || __builtin_add_overflow(*size, *c->at - '0', size))
            return cg_fail(c->error, CG_BAD_INPUT,
                           "the shape of the npy header has a size that does not fit 64 bits");
    if (c->at < c->end && *c->at == 'L') c->at++; /* a long of Python 2 */
    return true;
}

/* (), (3,), (3, 4), (3, 4,): one size without a comma is no tuple. */
static bool read_shape(cursor *c, cg_shape *shape) {
    *shape = (cg_shape){0};
    if (!take(c, '(')) return fail_here(c, "a tuple behind 'shape'");
    bool comma = true;
    while (!take(c, ')')) {
        if (!comma) return fail_here(c, "',' or ')'");
        int64_t size = 0;
        if (!read_size(c, &size)) return false;
        if (shape->n_dims == CG_MAX_DIMS)
            return cg_fail(c->error, CG_BAD_INPUT, "has more than the %d dimensions that are supported",
                           CG_MAX_DIMS);
        shape->dims[shape->n_dims++] = size;
        comma = take(c, ',');
    }
    if (shape->n_dims == 1 && !comma) return fail_here(c, "',' behind the only size");
    return true;
}

/* A list of fields up to its last bracket, brackets in names left out. */
static bool skip_fields(cursor *c) {
    char quote = 0;
    int depth = 0;
    for (; c->at < c->end; c->at++) {
        if (quote) {
            if (*c->at == quote) quote = 0;
        } else if (*c->at == '\'' || *c->at == '"') {
            quote = *c->at;
        } else if (*c->at == '[' || *c->at == '(') {
            depth++;
        } else if ((*c->at == ']' || *c->at == ')') && --depth == 0) {
            c->at++;
            return true;
        }
    }
    return fail_here(c, "']' behind the fields of a dtype");
}

/* Bytes of an element that is not read, from a letter and digits: c8, S3, U2 (of four bytes each), M8[ns]. 0:
 * the header does not say, as for objects, which are pickled. -1: no name of NumPy's. */
static int64_t unread_bytes(word name) {
    const char *digits = name.bytes > 1 ? name.text + 1 : "";
    int64_t n = 0, i = 0;
    if (word_is(name, "O")) return 0;
    for (; i < (int64_t)name.bytes - 1 && digits[i] >= '0' && digits[i] <= '9' && n < 1 << 28; i++)
        n = 10 * n + digits[i] - '0';
    if (i == 0 || !name.text[0] || !strchr("fciubSUVMm", name.text[0])) return -1;
    if (i < (int64_t)name.bytes - 1 && !(strchr("Mm", name.text[0]) && digits[i] == '[')) return -1;
    return name.text[0] == 'U' ? 4 * n : n;
}

static bool read_dtype(cursor *c, cg_npy *npy, int64_t *element) {
    static const struct {
        const char *name;
        cg_dtype dtype;
    } known[] = {{"f4", CG_F32}, {"f8", CG_F64}, {"f2", CG_F16}, {"b1", CG_BOOL},
                 {"i1", CG_I8},  {"i2", CG_I16}, {"i4", CG_I32}, {"i8", CG_I64},
                 {"u1", CG_U8},  {"u2", CG_U16}, {"u4", CG_U32}, {"u8", CG_U64}};
    word w;
    npy->dtype = CG_DTYPES;
    if (peek(c) == '[') {
        const char *begin = c->at;
        if (!skip_fields(c)) return false;
        npy->word = begin;
        npy->word_bytes = c->at - begin;
        npy->advice = "save its fields one by one";
        *element = 0;
        return true;
    }
    if (!read_word(c, &w, "a string behind 'descr'")) return false;
    npy->word = w.text;
    npy->word_bytes = (int64_t)w.bytes;
    char order = w.bytes > 1 ? w.text[0] : 0;
    word name = {w.text + 1, w.bytes - 1};
    bool has_order = order == '<' || order == '>' || order == '|';
    for (size_t i = 0; has_order && i < sizeof known / sizeof known[0]; i++) {
        if (!word_is(name, known[i].name)) continue;
        *element = (int64_t)cg_dtype_bytes(known[i].dtype);
        if (*element > 1 && order == '|') break;
        npy->dtype = known[i].dtype;
        npy->big_endian = *element > 1 && order == '>';
        return true;
    }
    *element = has_order && npy->dtype == CG_DTYPES ? unread_bytes(name) : -1;
    if (*element < 0 || (order == '|' && strchr("fciu", name.text[0])))
        return cg_fail(c->error, CG_BAD_INPUT,
                       "has dtype '%s', these are read: " READ ", with '<' or '>' before them",
                       cg_shown_bytes(w.text, w.bytes).text);
    if (word_is(name, "O")) npy->advice = "Python objects; save numbers, for example as float32";
    if (word_is(name, "V2"))
        npy->advice =
            "two bytes of any meaning; if this is bfloat16, which npy has no name for, save it as float32 or "
            "in a safetensors file";
    return true;
}

/* Are row-major and column-major order the same? */
static bool one_order(const cg_shape *shape) {
    int long_dims = 0;
    for (int i = 0; i < shape->n_dims; i++) {
        if (shape->dims[i] == 0) return true;
        long_dims += shape->dims[i] > 1;
    }
    return long_dims <= 1;
}

static bool read_dict(cursor *c, cg_npy *npy, int64_t *element) {
    static const char *const keys[] = {"descr", "fortran_order", "shape"};
    bool seen[3] = {0};
    if (!take(c, '{')) return fail_here(c, "'{'");
    for (bool comma = true; !take(c, '}'); comma = take(c, ',')) {
        word key;
        int k = 0;
        if (!comma) return fail_here(c, "',' or '}'");
        if (!read_word(c, &key, "a key or '}'")) return false;
        while (k < 3 && !word_is(key, keys[k])) k++;
        if (k == 3 || seen[k])
            return cg_fail(c->error, CG_BAD_INPUT, "the npy header has the %s key '%s'",
                           k == 3 ? "unknown" : "repeated", cg_shown_bytes(key.text, key.bytes).text);
        seen[k] = true;
        if (!take(c, ':')) return fail_here(c, "':'");
        if (!(k == 0   ? read_dtype(c, npy, element)
              : k == 1 ? read_truth(c, &npy->fortran)
                       : read_shape(c, &npy->shape)))
            return false;
    }
    for (int k = 0; k < 3; k++)
        if (!seen[k]) return cg_fail(c->error, CG_BAD_INPUT, "the npy header lacks the key '%s'", keys[k]);
    if (peek(c) || c->at != c->end) return fail_here(c, "nothing more");
    return true;
}

cg_shown_word cg_npy_word(const cg_npy *npy) {
    return npy->dtype < CG_DTYPES ? cg_shown(cg_dtype_name(npy->dtype))
                                  : cg_shown_bytes(npy->word, (size_t)npy->word_bytes);
}

bool cg_npy_parse(const void *start, int64_t header_bytes, cg_npy *npy, cg_error *error) {
    const char *first = start;
    int prefix = first[6] == 1 ? 10 : 12;
    cursor c = {first + prefix, first + prefix, first + header_bytes, error};
    *npy = (cg_npy){.header_bytes = header_bytes};
    int64_t element = 0;
    if (!read_dict(&c, npy, &element)) return false;
    char text[160];
    if (__builtin_mul_overflow(cg_shape_count(&npy->shape), element, &npy->data_bytes) ||
        npy->data_bytes == INT64_MAX)
        return cg_fail(error, CG_BAD_INPUT, "the bytes of shape %s of %s do not fit 64 bits",
                       cg_shape_text(&npy->shape, text, sizeof text), cg_npy_word(npy).text);
    if (npy->dtype == CG_DTYPES && element == 0) npy->data_bytes = -1;
    if (npy->fortran && one_order(&npy->shape)) npy->fortran = false;
    return true;
}

/* ---- the data ---- */

bool cg_npy_is_plain(const cg_npy *npy) { return !npy->big_endian && !npy->fortran; }

static void swap_bytes(unsigned char *data, int64_t n, size_t element) {
    for (int64_t i = 0; i < n; i++, data += element)
        for (size_t b = 0; b < element / 2; b++) {
            unsigned char byte = data[b];
            data[b] = data[element - 1 - b];
            data[element - 1 - b] = byte;
        }
}

/* Walks the stored elements in their order; the places in the result jump. */
static void copy_turned(const cg_npy *npy, const char *from, int64_t first, int64_t n, char *to) {
    const cg_shape *shape = &npy->shape;
    int64_t element = (int64_t)cg_dtype_bytes(npy->dtype), place = 0, step = element, rest = first;
    int64_t index[CG_MAX_DIMS], stride[CG_MAX_DIMS];
    for (int d = shape->n_dims - 1; d >= 0; step *= shape->dims[d--]) stride[d] = step;
    for (int d = 0; d < shape->n_dims; rest /= shape->dims[d++]) {
        index[d] = rest % shape->dims[d];
        place += index[d] * stride[d];
    }
    for (int64_t i = 0; i < n; i++) {
        memcpy(to + place, from + (first + i) * element, (size_t)element);
        if (npy->big_endian) swap_bytes((unsigned char *)to + place, 1, (size_t)element);
        for (int d = 0; d < shape->n_dims; d++) {
            place += stride[d];
            if (++index[d] < shape->dims[d]) break;
            place -= index[d] * stride[d];
            index[d] = 0;
        }
    }
}

void cg_npy_copy(const cg_npy *npy, const void *from, int64_t first, int64_t n, void *to) {
    size_t element = cg_dtype_bytes(npy->dtype);
    if (n == 0) return;
    if (npy->fortran) {
        copy_turned(npy, from, first, n, to);
        return;
    }
    int64_t place = first * (int64_t)element;
    memcpy((char *)to + place, (const char *)from + place, (size_t)n * element);
    if (npy->big_endian) swap_bytes((unsigned char *)to + place, n, element);
}
