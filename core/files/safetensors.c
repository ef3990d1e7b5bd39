#include "core/files/safetensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "core/base/file.h"
#include "core/base/shown.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the data of a file is used as it is stored");

#define METADATA "__metadata__"

enum { LENGTH_BYTES = 8, HEADER_MAX = 100000000 };

static const char *const dtype_words[CG_DTYPES] = {
    [CG_F32] = "F32",   [CG_F64] = "F64", [CG_I32] = "I32", [CG_BF16] = "BF16", [CG_F16] = "F16",
    [CG_I64] = "I64",   [CG_U8] = "U8",   [CG_I8] = "I8",   [CG_I16] = "I16",   [CG_U16] = "U16",
    [CG_BOOL] = "BOOL", [CG_U32] = "U32", [CG_U64] = "U64",
};

/* Dtypes of the format whose sizes are known and whose elements are not read. */
static const struct {
    const char *word;
    int bits;
} unread_dtypes[] = {{"F8_E4M3", 8}, {"F8_E5M2", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8},
                     {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"F4", 4},      {"C64", 64}};

enum { N_UNREAD_DTYPES = sizeof unread_dtypes / sizeof unread_dtypes[0] };

struct cg_safetensors {
    void *map;
    size_t map_bytes;
    json_t *header;   /* owns all names */
    json_t *metadata; /* inside header; NULL when the file has none */
    int n_entries, n_tensors;
    cg_entry *entries;
    cg_named_tensor *tensors; /* those of the entries that are read */
};

static cg_shown_word shown_value(const json_t *value) {
    cg_shown_word s;
    switch (json_typeof(value)) {
    case JSON_INTEGER:
        snprintf(s.text, sizeof s.text, "%lld", (long long)json_integer_value(value));
        break;
    case JSON_REAL:
        snprintf(s.text, sizeof s.text, "%#.6g", json_real_value(value));
        break;
    case JSON_STRING:
        snprintf(s.text, sizeof s.text, "a string");
        break;
    case JSON_OBJECT:
        snprintf(s.text, sizeof s.text, "an object");
        break;
    case JSON_ARRAY:
        snprintf(s.text, sizeof s.text, "a list");
        break;
    case JSON_NULL:
        snprintf(s.text, sizeof s.text, "null");
        break;
    default:
        snprintf(s.text, sizeof s.text, "a truth value");
        break;
    }
    return s;
}

/* Jansson says that a key is repeated, but not which one; it stops right behind the key. So walk the strings
 * of the header up to that place, remembering the last name of the outermost object, which owns the key. */
static bool fail_repeated(const char *json, size_t stop, cg_error *error) {
    int depth = 0;
    size_t key = 0, key_bytes = 0, owner = 0, owner_bytes = 0;
    for (size_t i = 0; i < stop; i++) {
        if (json[i] == '{') depth++;
        if (json[i] == '}') depth--;
        if (json[i] != '"') continue;
        size_t begin = i++;
        while (i < stop && json[i] != '"') i += json[i] == '\\' ? 2 : 1;
        key = begin;
        key_bytes = i + 1 - begin;
        if (depth == 1 && i + 1 < stop) {
            owner = key;
            owner_bytes = key_bytes;
        }
    }
    json_t *key_word = json_loadb(json + key, key_bytes, JSON_DECODE_ANY, NULL);
    json_t *owner_word = json_loadb(json + owner, owner_bytes, JSON_DECODE_ANY, NULL);
    const char *key_text = key_word ? json_string_value(key_word) : "?";
    const char *owner_text = owner_word ? json_string_value(owner_word) : "?";
    if (depth <= 1)
        cg_fail(error, CG_BAD_INPUT, "the name '%s' is repeated", cg_shown(key_text).text);
    else
        cg_fail(error, CG_BAD_INPUT, "in '%s' the key '%s' is repeated", cg_shown(owner_text).text,
                cg_shown(key_text).text);
    json_decref(key_word);
    json_decref(owner_word);
    return false;
}

static json_t *parse_header(const char *json, size_t bytes, cg_error *error) {
    json_error_t problem;
    if (bytes == 0 || json[0] != '{') { /* blanks are allowed behind the header, not before it */
        cg_fail(error, CG_BAD_INPUT, "the header does not begin with '{': is this a safetensors file?");
        return NULL;
    }
    json_t *header = json_loadb(json, bytes, JSON_REJECT_DUPLICATES, &problem);
    if (header) return header;
    if (!problem.text[0]) { /* Jansson has no words for it */
        cg_fail(error, CG_FAILED, "no memory for a header of %zu bytes", bytes);
        return NULL;
    }
    switch (json_error_code(&problem)) {
    case json_error_duplicate_key:
        fail_repeated(json, (size_t)problem.position, error);
        break;
    case json_error_null_character:
    case json_error_null_byte_in_key:
        cg_fail(error, CG_BAD_INPUT,
                "the header has a NUL character (\\u0000) in a name or text, at its byte %d", problem.position);
        break;
    default:
        cg_fail(error, CG_BAD_INPUT, "the header is not valid JSON at its byte %d: %s", problem.position,
                cg_shown(problem.text).text);
    }
    return NULL;
}

static bool check_metadata(const json_t *metadata, cg_error *error) {
    if (!json_is_object(metadata))
        return cg_fail(error, CG_BAD_INPUT, METADATA ": expected an object of strings, got %s",
                       shown_value(metadata).text);
    for (void *at = json_object_iter((json_t *)metadata); at;
         at = json_object_iter_next((json_t *)metadata, at))
        if (!json_is_string(json_object_iter_value(at)))
            return cg_fail(error, CG_BAD_INPUT, METADATA ": '%s' must be a string, got %s",
                           cg_shown(json_object_iter_key(at)).text,
                           shown_value(json_object_iter_value(at)).text);
    return true;
}

/* A list of whole numbers >= 0, at most `most` of them. The sentences are without the tensor's name. */
static bool read_numbers(const json_t *list, const char *key, int most, int64_t *numbers, int *n,
                         cg_error *error) {
    if (!json_is_array(list))
        return cg_fail(error, CG_BAD_INPUT, "%s must be a list of numbers, got %s", key,
                       shown_value(list).text);
    if (json_array_size(list) > (size_t)most)
        return cg_fail(error, CG_BAD_INPUT, "%s has %zu numbers, at most %d are supported", key,
                       json_array_size(list), most);
    *n = (int)json_array_size(list);
    for (int i = 0; i < *n; i++) {
        const json_t *number = json_array_get(list, (size_t)i);
        if (!json_is_integer(number) || json_integer_value(number) < 0)
            return cg_fail(error, CG_BAD_INPUT, "%s must hold whole numbers of at least 0, got %s", key,
                           shown_value(number).text);
        numbers[i] = json_integer_value(number);
    }
    return true;
}

/* The dtype, CG_DTYPES for one that is not read, and the bits of an element, 0 where they are not known. */
static bool read_dtype(const json_t *value, cg_dtype *dtype, int *bits, cg_error *error) {
    const char *word = json_string_value(value);
    if (!word) return cg_fail(error, CG_BAD_INPUT, "dtype must be a string, got %s", shown_value(value).text);
    int i = 0, k = 0;
    while (i < CG_DTYPES && strcmp(word, dtype_words[i])) i++;
    while (k < N_UNREAD_DTYPES && strcmp(word, unread_dtypes[k].word)) k++;
    *dtype = (cg_dtype)i;
    *bits = i < CG_DTYPES ? 8 * (int)cg_dtype_bytes(*dtype) : k < N_UNREAD_DTYPES ? unread_dtypes[k].bits : 0;
    return true;
}

/* Whole bytes of a shape; INT64_MAX when they do not fit 64 bits. */
static int64_t packed_bytes(const cg_shape *shape, int bits) {
    int64_t all;
    if (bits % 8 == 0) {
        if (__builtin_mul_overflow(cg_shape_count(shape), (int64_t)bits / 8, &all)) return INT64_MAX;
        return all;
    }
    if (__builtin_mul_overflow(cg_shape_count(shape), (int64_t)bits, &all)) return INT64_MAX;
    return all / 8 + (all % 8 != 0);
}

/* One entry of the header. Every claim is held against the size of the file before it becomes an address. */
static bool read_entry(const json_t *entry, char *data, int64_t data_bytes, cg_entry *e, cg_error *error) {
    static const char *const keys[] = {"dtype", "shape", "data_offsets"};
    const json_t *values[3];
    if (!json_is_object(entry))
        return cg_fail(error, CG_BAD_INPUT, "expected an object with dtype, shape and data_offsets, got %s",
                       shown_value(entry).text);
    for (int i = 0; i < 3; i++)
        if (!(values[i] = json_object_get(entry, keys[i])))
            return cg_fail(error, CG_BAD_INPUT, "the key '%s' is missing", keys[i]);
    for (void *at = json_object_iter((json_t *)entry); at; at = json_object_iter_next((json_t *)entry, at)) {
        const json_t *value = json_object_iter_value(at);
        if (value != values[0] && value != values[1] && value != values[2])
            return cg_fail(error, CG_BAD_INPUT, "unknown key '%s', expected dtype, shape and data_offsets",
                           cg_shown(json_object_iter_key(at)).text);
    }

    int n_offsets, bits = 0;
    int64_t offsets[3]; /* one more than right, so that the sentence can tell three from many */
    if (!read_dtype(values[0], &e->elements, &bits, error) ||
        !read_numbers(values[1], "shape", CG_MAX_DIMS, e->shape.dims, &e->shape.n_dims, error) ||
        !read_numbers(values[2], "data_offsets", 3, offsets, &n_offsets, error))
        return false;
    if (n_offsets != 2)
        return cg_fail(error, CG_BAD_INPUT, "data_offsets has %d numbers, expected 2 (begin and end)",
                       n_offsets);

    int64_t begin = offsets[0], end = offsets[1];
    int64_t expected = bits ? packed_bytes(&e->shape, bits) : end - begin;
    cg_shown_word word = cg_shown(json_string_value(values[0]));
    char shape[160];
    cg_shape_text(&e->shape, shape, sizeof shape);
    if (begin > end)
        return cg_fail(error, CG_BAD_INPUT, "data_offsets [%lld, %lld] end before they begin", (long long)begin,
                       (long long)end);
    if (expected == INT64_MAX)
        return cg_fail(error, CG_BAD_INPUT, "the bytes of shape %s of %s do not fit 64 bits", shape, word.text);
    if (end - begin != expected)
        return cg_fail(
            error, CG_BAD_INPUT, "shape %s of %s has %lld bytes, but data_offsets [%lld, %lld] have %lld",
            shape, word.text, (long long)expected, (long long)begin, (long long)end, (long long)(end - begin));
    if (end > data_bytes)
        return cg_fail(error, CG_BAD_INPUT,
                       "data_offsets [%lld, %lld] end past the file, which has %lld bytes of data: is it cut?",
                       (long long)begin, (long long)end, (long long)data_bytes);
    e->dtype = e->elements < CG_DTYPES ? cg_dtype_name(e->elements) : json_string_value(values[0]);
    e->bytes = end - begin;
    e->data = data + begin;
    return true;
}

static int64_t tensor_bytes(const cg_named_tensor *t) {
    return cg_tensor_bytes(t->tensor.dtype, &t->tensor.shape);
}

/* In order of the data; a tensor of no element before the one that begins at the same place. */
static int compare_places(const void *left, const void *right) {
    const cg_entry *a = left, *b = right;
    uintptr_t a_begin = (uintptr_t)a->data, b_begin = (uintptr_t)b->data;
    if (a_begin != b_begin) return a_begin < b_begin ? -1 : 1;
    if (a->bytes != b->bytes) return a->bytes < b->bytes ? -1 : 1;
    return strcmp(a->name, b->name);
}

/* The tensors must tile the data: bytes of none could hide something, bytes of two are a broken writer. */
static bool check_places(const cg_safetensors *file, const char *data, int64_t data_bytes, cg_error *error) {
    int64_t last_end = 0;
    for (int i = 0; i < file->n_entries; i++) {
        const cg_entry *t = &file->entries[i];
        int64_t begin = t->data - data;
        if (begin < last_end) /* so i > 0 */
            return cg_fail(error, CG_BAD_INPUT,
                           "tensors '%s' and '%s' overlap: the second begins at %lld, the first ends at %lld",
                           cg_shown(t[-1].name).text, cg_shown(t->name).text, (long long)begin,
                           (long long)last_end);
        if (begin > last_end)
            return cg_fail(error, CG_BAD_INPUT,
                           "tensor '%s': it begins at %lld, which leaves a hole of %lld bytes before it",
                           cg_shown(t->name).text, (long long)begin, (long long)(begin - last_end));
        last_end = begin + t->bytes;
    }
    if (last_end != data_bytes)
        return cg_fail(error, CG_BAD_INPUT,
                       "%lld bytes follow the last tensor: the tensors end at %lld of %lld bytes of data",
                       (long long)(data_bytes - last_end), (long long)last_end, (long long)data_bytes);
    return true;
}

/* Those that are read, in the order of the entries. */
static void list_tensors(cg_safetensors *file) {
    for (int i = 0; i < file->n_entries; i++) {
        cg_entry *e = &file->entries[i];
        if (e->elements == CG_DTYPES) continue;
        cg_named_tensor *t = &file->tensors[file->n_tensors++];
        *t = (cg_named_tensor){e->name, {e->elements, e->shape, (char *)e->data}};
        e->tensor = &t->tensor;
    }
}

static bool open_file(cg_safetensors *file, const char *path, cg_error *error) {
    if (!cg_file_map(path, &file->map, &file->map_bytes, error)) return false;
    if (file->map_bytes < LENGTH_BYTES)
        return cg_fail(error, CG_BAD_INPUT,
                       "has %zu bytes, a safetensors file begins with %d bytes of header length",
                       file->map_bytes, LENGTH_BYTES);

    char *start = file->map;
    uint64_t header_bytes;
    memcpy(&header_bytes, start, LENGTH_BYTES);
    if (header_bytes > file->map_bytes - LENGTH_BYTES)
        return cg_fail(
            error, CG_BAD_INPUT,
            "claims a header of %llu bytes, but only %zu follow: is it cut, or not a safetensors file?",
            (unsigned long long)header_bytes, file->map_bytes - LENGTH_BYTES);
    if (header_bytes > HEADER_MAX)
        return cg_fail(error, CG_BAD_INPUT, "has a header of %llu bytes, at most %d are accepted",
                       (unsigned long long)header_bytes, HEADER_MAX);
    char *data = start + LENGTH_BYTES + header_bytes;
    int64_t data_bytes = (int64_t)(file->map_bytes - LENGTH_BYTES - header_bytes);

    file->header = parse_header(start + LENGTH_BYTES, header_bytes, error);
    if (!file->header) return false;
    file->metadata = json_object_get(file->header, METADATA);
    if (file->metadata && !check_metadata(file->metadata, error)) return false;

    const size_t most = json_object_size(file->header) + 1;
    file->entries = calloc(most, sizeof *file->entries);
    file->tensors = calloc(most, sizeof *file->tensors);
    if (!file->entries || !file->tensors) return cg_fail(error, CG_FAILED, "no memory for the list of tensors");
    for (void *at = json_object_iter(file->header); at; at = json_object_iter_next(file->header, at)) {
        const json_t *entry = json_object_iter_value(at);
        if (entry == file->metadata) continue;
        cg_entry *e = &file->entries[file->n_entries];
        e->name = json_object_iter_key(at);
        if (!read_entry(entry, data, data_bytes, e, error)) {
            cg_error_at(error, "tensor '%s'", cg_shown(e->name).text);
            return false;
        }
        file->n_entries++;
    }
    qsort(file->entries, (size_t)file->n_entries, sizeof *file->entries, compare_places);
    list_tensors(file);
    return check_places(file, data, data_bytes, error);
}

cg_safetensors *cg_safetensors_open(const char *path, cg_error *error) {
    cg_error inner = {0}; /* of its own, so that an older error of the caller gets no second place in front */
    cg_safetensors *file = calloc(1, sizeof *file);
    if (!file) cg_fail(&inner, CG_FAILED, "no memory to open it");
    if (file && open_file(file, path, &inner)) return file;
    cg_file_fail(error, &inner, path);
    cg_safetensors_close(file);
    return NULL;
}

void cg_safetensors_close(cg_safetensors *file) {
    if (!file) return;
    cg_file_unmap(file->map, file->map_bytes);
    json_decref(file->header);
    free(file->entries);
    free(file->tensors);
    free(file);
}

int cg_safetensors_n_entries(const cg_safetensors *file) { return file->n_entries; }

const cg_entry *cg_safetensors_entry(const cg_safetensors *file, int i) { return &file->entries[i]; }

int cg_safetensors_count(const cg_safetensors *file) { return file->n_tensors; }

const cg_named_tensor *cg_safetensors_at(const cg_safetensors *file, int i) { return &file->tensors[i]; }

const cg_tensor *cg_safetensors_find(const cg_safetensors *file, const char *name) {
    for (int i = 0; i < file->n_tensors; i++)
        if (strcmp(file->tensors[i].name, name) == 0) return &file->tensors[i].tensor;
    return NULL;
}

const char *cg_safetensors_metadata(const cg_safetensors *file, const char *key) {
    return json_string_value(json_object_get(file->metadata, key));
}

bool cg_safetensors_metadata_next(const cg_safetensors *file, void **at, const char **key, const char **value) {
    *at = *at ? json_object_iter_next(file->metadata, *at) : json_object_iter(file->metadata);
    if (!*at) return false;
    *key = json_object_iter_key(*at);
    *value = json_string_value(json_object_iter_value(*at));
    return true;
}

static bool check_writable(const cg_named_tensor *t, cg_error *error) {
    const cg_shape *shape = &t->tensor.shape;
    if ((unsigned)t->tensor.dtype >= CG_DTYPES)
        return cg_fail(error, CG_BAD_INPUT, "dtype number %d is unknown", (int)t->tensor.dtype);
    if (shape->n_dims < 0 || shape->n_dims > CG_MAX_DIMS)
        return cg_fail(error, CG_BAD_INPUT, "has %d dimensions, expected 0 to %d", shape->n_dims, CG_MAX_DIMS);
    for (int i = 0; i < shape->n_dims; i++)
        if (shape->dims[i] < 0)
            return cg_fail(error, CG_BAD_INPUT, "its dimension %d has the negative size %lld", i,
                           (long long)shape->dims[i]);
    char text[160];
    if (tensor_bytes(t) == INT64_MAX)
        return cg_fail(error, CG_BAD_INPUT, "the bytes of shape %s of %s do not fit 64 bits",
                       cg_shape_text(shape, text, sizeof text), dtype_words[t->tensor.dtype]);
    return true;
}

/* Put one more member into a JSON object; takes `value`. */
static bool add_member(json_t *object, const char *key, json_t *value, const char *what, cg_error *error) {
    if (json_object_get(object, key)) {
        json_decref(value);
        return cg_fail(error, CG_BAD_INPUT, "the %s '%s' is repeated", what, cg_shown(key).text);
    }
    /* NULL as value fails here as well; UTF-8 is the only thing in it that can be wrong */
    if (json_object_set_new(object, key, value) == 0) return true;
    return cg_fail(error, CG_BAD_INPUT, "the %s '%s' cannot be written as JSON: not UTF-8, or no memory", what,
                   cg_shown(key).text);
}

static bool add_tensor(json_t *header, const cg_named_tensor *t, int64_t *offset, cg_error *error) {
    int64_t end;
    if (__builtin_add_overflow(*offset, tensor_bytes(t), &end))
        return cg_fail(error, CG_BAD_INPUT, "tensor '%s': the bytes up to its end do not fit 64 bits",
                       cg_shown(t->name).text);
    json_t *dims = json_array();
    for (int i = 0; i < t->tensor.shape.n_dims; i++)
        json_array_append_new(dims, json_integer(t->tensor.shape.dims[i]));
    json_t *entry = json_pack("{s:s, s:o, s:[I, I]}", "dtype", dtype_words[t->tensor.dtype], "shape", dims,
                              "data_offsets", (json_int_t)*offset, (json_int_t)end);
    *offset = end;
    return add_member(header, t->name, entry, "name", error);
}

/* Elements of 8 bytes first, then 4, 2 and 1: then every tensor begins on a multiple of its element. */
static const size_t element_order[] = {8, 4, 2, 1};
enum { N_ELEMENT_SIZES = sizeof element_order / sizeof element_order[0] };

static json_t *build_header(const cg_named_tensor *tensors, int n_tensors, const char *const (*metadata)[2],
                            int n_metadata, cg_error *error) {
    json_t *header = json_object();
    if (!header) cg_fail(error, CG_FAILED, "no memory for the header");
    bool ok = header != NULL;
    if (ok && n_metadata > 0) {
        json_t *pairs = json_object();
        ok = add_member(header, METADATA, pairs, "name", error);
        for (int i = 0; ok && i < n_metadata; i++)
            ok = add_member(pairs, metadata[i][0], json_string(metadata[i][1]), "metadata key", error);
    }
    for (int i = 0; ok && i < n_tensors; i++) {
        if (strcmp(tensors[i].name, METADATA) == 0)
            ok = cg_fail(error, CG_BAD_INPUT, "a tensor cannot have the name '" METADATA "'");
        else if (!(ok = check_writable(&tensors[i], error)))
            cg_error_at(error, "tensor '%s'", cg_shown(tensors[i].name).text);
    }
    int64_t offset = 0;
    for (int pass = 0; ok && pass < N_ELEMENT_SIZES; pass++)
        for (int i = 0; ok && i < n_tensors; i++)
            if (cg_dtype_bytes(tensors[i].tensor.dtype) == element_order[pass])
                ok = add_tensor(header, &tensors[i], &offset, error);
    if (ok) return header;
    json_decref(header);
    return NULL;
}

/* Length, JSON, and blanks up to a multiple of 8 and to `least` bytes in all, in malloc'd memory. */
static char *encode_header(const json_t *header, size_t least, size_t *bytes, cg_error *error) {
    size_t json_bytes = json_dumpb(header, NULL, 0, JSON_COMPACT);
    uint64_t padded = (json_bytes + 7) / 8 * 8;
    if (json_bytes > 0 && LENGTH_BYTES + padded < least) padded = least - LENGTH_BYTES;
    char *text = NULL;
    if (padded > HEADER_MAX)
        cg_fail(error, CG_BAD_INPUT, "the header would have %llu bytes, at most %d are accepted",
                (unsigned long long)padded, HEADER_MAX);
    else if (json_bytes == 0 || !(text = malloc(LENGTH_BYTES + padded)))
        cg_fail(error, CG_FAILED, "no memory for the header");
    if (!text) return NULL;
    memset(text, ' ', LENGTH_BYTES + padded);
    memcpy(text, &padded, LENGTH_BYTES);
    json_dumpb(header, text + LENGTH_BYTES, json_bytes, JSON_COMPACT);
    *bytes = LENGTH_BYTES + padded;
    return text;
}

char *cg_safetensors_head(const cg_named_tensor *tensors, int n_tensors, const char *const (*metadata)[2],
                          int n_metadata, size_t bytes, cg_error *error) {
    size_t head_bytes = 0;
    json_t *header = build_header(tensors, n_tensors, metadata, n_metadata, error);
    char *head = header ? encode_header(header, bytes, &head_bytes, error) : NULL;
    json_decref(header);
    if (!head || head_bytes == bytes) return head;
    free(head);
    cg_fail(error, CG_BAD_INPUT, "the header needs %zu bytes, %zu are set aside for it", head_bytes, bytes);
    return NULL;
}

static bool have_data(const cg_named_tensor *tensors, int n_tensors, cg_error *error) {
    char text[160];
    for (int i = 0; i < n_tensors; i++)
        if (!tensors[i].tensor.data && tensor_bytes(&tensors[i]) > 0)
            return cg_fail(error, CG_BAD_INPUT, "tensor '%s': shape %s has no data",
                           cg_shown(tensors[i].name).text,
                           cg_shape_text(&tensors[i].tensor.shape, text, sizeof text));
    return true;
}

bool cg_safetensors_write(const char *path, const cg_named_tensor *tensors, int n_tensors,
                          const char *const (*metadata)[2], int n_metadata, cg_error *error) {
    cg_error inner = {0};
    size_t head_bytes = 0;
    json_t *header = build_header(tensors, n_tensors, metadata, n_metadata, &inner);
    char *head =
        header && have_data(tensors, n_tensors, &inner) ? encode_header(header, 0, &head_bytes, &inner) : NULL;
    json_decref(header);
    if (!head) return cg_file_fail(error, &inner, path);

    cg_file_writer *writer = cg_file_begin(path, error);
    bool ok = writer && cg_file_write(writer, head, head_bytes, error);
    for (int pass = 0; ok && pass < N_ELEMENT_SIZES; pass++)
        for (int i = 0; ok && i < n_tensors; i++)
            if (cg_dtype_bytes(tensors[i].tensor.dtype) == element_order[pass])
                ok = cg_file_write(writer, tensors[i].tensor.data, (size_t)tensor_bytes(&tensors[i]), error);
    free(head);
    if (ok) return cg_file_commit(writer, error);
    cg_file_cancel(writer);
    return false;
}
