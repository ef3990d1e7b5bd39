/* npy and npz beside safetensors: good files of every form, and files that lie about themselves. */
#define _GNU_SOURCE /* nftw */
#include <check.h>
#include <ftw.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <zlib.h>

#include "core/files/archive.h"
#include "core/base/file.h"

static char root[] = "test_core_archive_XXXXXX"; /* made by main, one for all tests */
static char path[64];                            /* the file of the running test */

static void choose_path(const char *name) {
    snprintf(path, sizeof path, "%s/%d_%s", root, (int)getpid(), name);
}

static void put_bytes(const void *bytes, size_t n) {
    unlink(path); /* a file that is cut and filled anew is written to the disk at once */
    FILE *f = fopen(path, "wb");
    ck_assert_ptr_nonnull(f);
    ck_assert_uint_eq(fwrite(bytes, 1, n, f), n);
    ck_assert_int_eq(fclose(f), 0);
}

static cg_archive *open_good(void) {
    cg_error error = {0};
    cg_archive *file = cg_archive_open(path, &error);
    if (!file) ck_abort_msg("%s", error.text);
    ck_assert_int_eq(error.code, CG_OK);
    return file;
}

/* The file at `path` is refused with these words, its path, on one line. */
static void expect_refused(const char *words) {
    cg_error error = {0};
    cg_archive *file = cg_archive_open(path, &error);
    if (file) ck_abort_msg("accepted, although: %s", words);
    ck_assert_int_eq(error.code, CG_BAD_INPUT);
    ck_assert_msg(!strncmp(error.text, path, strlen(path)), "the path is not before: %s", error.text);
    ck_assert_msg(strstr(error.text, words) != NULL, "'%s' is not in: %s", words, error.text);
    ck_assert_msg(!strstr(error.text + strlen(path), path), "the path is there twice: %s", error.text);
    for (const char *c = error.text; *c; c++)
        ck_assert_msg((unsigned char)*c >= 0x20, "not one line: %s", error.text);
    ck_assert_ptr_null(cg_archive_open(path, NULL));
}

/* Nothing of a size that only the file claims may be allocated. */
static void limit_memory(void) {
#ifndef __SANITIZE_ADDRESS__ /* which needs terabytes of address space */
    struct rlimit limit;
    ck_assert_int_eq(getrlimit(RLIMIT_AS, &limit), 0);
    struct rlimit small = {.rlim_cur = 64 << 20, .rlim_max = limit.rlim_max};
    ck_assert_int_eq(setrlimit(RLIMIT_AS, &small), 0);
#endif
}

/* ---- building files ---- */

typedef struct bytes {
    unsigned char *data;
    size_t n;
} bytes;

static size_t add(bytes *b, const void *data, size_t n) {
    size_t at = b->n, room = 64;
    while (room < b->n + n) room *= 2;
    b->data = realloc(b->data, room);
    if (n) memcpy(b->data + b->n, data, n);
    b->n += n;
    return at;
}

static void add_number(bytes *b, uint64_t number, int n) {
    for (int i = 0; i < n; i++) add(b, &(unsigned char){(unsigned char)(i < 8 ? number >> 8 * i : 0)}, 1);
}

static void set_number(bytes *b, size_t at, uint64_t number, int n) {
    for (int i = 0; i < n; i++) b->data[at + (size_t)i] = (unsigned char)(number >> 8 * i);
}

/* Version, header text padded with blanks to `padded` bytes and a newline, data. */
static bytes npy_of(int version, const char *header, size_t padded, const void *data, size_t n) {
    bytes b = {0};
    size_t length = strlen(header) + 1 > padded ? strlen(header) + 1 : padded;
    add(&b, "\x93NUMPY", 6);
    add_number(&b, (uint64_t)version, 2);
    add_number(&b, length, version == 1 ? 2 : 4);
    add(&b, header, strlen(header));
    char *blanks = malloc(length);
    memset(blanks, ' ', length);
    blanks[length - strlen(header) - 1] = '\n';
    add(&b, blanks, length - strlen(header));
    free(blanks);
    add(&b, data, n);
    return b;
}

static void put_npy(const char *header, size_t n) {
    static const char zeros[64];
    bytes b = npy_of(1, header, 118, zeros, n);
    put_bytes(b.data, b.n);
    free(b.data);
}

#define DICT(descr, order, shape) "{'descr': " descr ", 'fortran_order': " order ", 'shape': " shape ", }"

typedef struct member {
    const char *name;
    bytes data;
    bool deflate, descriptor, marked, zip64; /* marked: a signature before the descriptor */
    uint32_t flags, method;                  /* when not 0: claimed in both headers */
    uint64_t claim;                          /* when not 0: the size claimed everywhere */
} member;

typedef struct places {
    size_t local[160], entry[160], end;
} places;

static bytes deflate_all(bytes in) {
    z_stream stream = {0};
    ck_assert_int_eq(deflateInit2(&stream, 9, Z_DEFLATED, -15, 9, Z_DEFAULT_STRATEGY), Z_OK);
    bytes out = {malloc(deflateBound(&stream, in.n)), 0};
    stream.next_in = in.data;
    stream.avail_in = (uInt)in.n;
    stream.next_out = out.data;
    stream.avail_out = (uInt)deflateBound(&stream, in.n);
    ck_assert_int_eq(deflate(&stream, Z_FINISH), Z_STREAM_END);
    out.n = stream.total_out;
    deflateEnd(&stream);
    return out;
}

static bytes zip_of(const member *members, int n, places *where) {
    bytes b = {0}, directory = {0}, deflated = {0};
    uint32_t crc = 0;
    places unused;
    if (!where) where = &unused;
    for (int i = 0; i < n; i++) {
        const member *m = &members[i];
        size_t name = strlen(m->name);
        if (i == 0 || m->data.data != m[-1].data.data || m->data.n != m[-1].data.n) { /* else packed already */
            crc = (uint32_t)crc32(0, m->data.data, (uInt)m->data.n);
            free(deflated.data);
            deflated.data = NULL;
        }
        if (m->deflate && !deflated.data) deflated = deflate_all(m->data);
        const bytes packed = m->deflate ? deflated : m->data;
        uint32_t flags = m->flags        ? m->flags
                         : m->descriptor ? 8
                                         : 0,
                 method = m->method    ? m->method
                          : m->deflate ? 8
                                       : 0;
        uint64_t full = m->claim ? m->claim : m->data.n;
        where->local[i] = b.n;
        add(&b, "PK\3\4", 4);
        add_number(&b, 45, 2);
        add_number(&b, flags, 2);
        add_number(&b, method, 2);
        add_number(&b, 0, 4);
        add_number(&b, m->descriptor ? 0 : crc, 4);
        add_number(&b, m->zip64 ? 0xffffffff : m->descriptor ? 0 : packed.n, 4);
        add_number(&b, m->zip64 ? 0xffffffff : m->descriptor ? 0 : full, 4);
        add_number(&b, name, 2);
        add_number(&b, m->zip64 ? 20 : 0, 2);
        add(&b, m->name, name);
        if (m->zip64) {
            add_number(&b, 1, 2);
            add_number(&b, 16, 2);
            add_number(&b, m->descriptor ? 0 : full, 8);
            add_number(&b, m->descriptor ? 0 : packed.n, 8);
        }
        add(&b, packed.data, packed.n);
        if (m->descriptor) {
            if (m->marked) add(&b, "PK\7\10", 4);
            add_number(&b, crc, 4);
            add_number(&b, packed.n, m->zip64 ? 8 : 4);
            add_number(&b, full, m->zip64 ? 8 : 4);
        }
        where->entry[i] = directory.n;
        add(&directory, "PK\1\2", 4);
        add_number(&directory, 45, 2);
        add_number(&directory, 45, 2);
        add_number(&directory, flags, 2);
        add_number(&directory, method, 2);
        add_number(&directory, 0, 4);
        add_number(&directory, crc, 4);
        add_number(&directory, m->zip64 ? 0xffffffff : packed.n, 4);
        add_number(&directory, m->zip64 ? 0xffffffff : full, 4);
        add_number(&directory, name, 2);
        add_number(&directory, m->zip64 ? 28 : 0, 2);
        add_number(&directory, 0, 2 + 2 + 2 + 4);
        add_number(&directory, m->zip64 ? 0xffffffff : where->local[i], 4);
        add(&directory, m->name, name);
        if (m->zip64) {
            add_number(&directory, 1, 2);
            add_number(&directory, 24, 2);
            add_number(&directory, full, 8);
            add_number(&directory, packed.n, 8);
            add_number(&directory, where->local[i], 8);
        }
    }
    free(deflated.data);
    size_t begin = add(&b, directory.data, directory.n);
    for (int i = 0; i < n; i++) where->entry[i] += begin;
    bool wide = n > 0 && members[0].zip64;
    if (wide) {
        size_t at = b.n;
        add(&b, "PK\6\6", 4);
        add_number(&b, 44, 8);
        add_number(&b, 45, 2);
        add_number(&b, 45, 2);
        add_number(&b, 0, 8);
        add_number(&b, (uint64_t)n, 8);
        add_number(&b, (uint64_t)n, 8);
        add_number(&b, directory.n, 8);
        add_number(&b, begin, 8);
        add(&b, "PK\6\7", 4);
        add_number(&b, 0, 4);
        add_number(&b, at, 8);
        add_number(&b, 1, 4);
    }
    where->end = b.n;
    add(&b, "PK\5\6", 4);
    add_number(&b, 0, 4);
    add_number(&b, wide ? 0xffff : (uint64_t)n, 2);
    add_number(&b, wide ? 0xffff : (uint64_t)n, 2);
    add_number(&b, wide ? 0xffffffff : directory.n, 4);
    add_number(&b, wide ? 0xffffffff : begin, 4);
    add_number(&b, 0, 2);
    free(directory.data);
    return b;
}

static void put_zip(const member *members, int n) {
    bytes b = zip_of(members, n, NULL);
    put_bytes(b.data, b.n);
    free(b.data);
}

static const float three[] = {1.5f, -2, 3};

/* An array of three f32, as a whole npy file: 128 bytes and 12. */
static bytes small_npy(void) { return npy_of(1, DICT("'<f4'", "False", "(3,)"), 118, three, sizeof three); }

/* ---- npy ---- */

static void expect_one(const char *name, cg_dtype dtype, cg_shape shape, const void *data) {
    cg_archive *file = open_good();
    ck_assert_str_eq(cg_archive_format(file), "npy");
    ck_assert_int_eq(cg_archive_count(file), 1);
    const cg_named_tensor *t = cg_archive_at(file, 0);
    ck_assert_str_eq(t->name, name);
    ck_assert_int_eq(t->tensor.dtype, dtype);
    ck_assert(cg_shape_equal(&t->tensor.shape, &shape));
    ck_assert_uint_eq((uintptr_t)t->tensor.data % cg_dtype_bytes(dtype), 0);
    size_t n = (size_t)cg_tensor_bytes(dtype, &shape);
    if (n) ck_assert_mem_eq(t->tensor.data, data, n);
    ck_assert_ptr_eq(cg_archive_find(file, name), &t->tensor);
    ck_assert_ptr_null(cg_archive_find(file, "other"));
    ck_assert_ptr_null(cg_archive_metadata(file, "format"));
    void *at = NULL;
    const char *key, *value;
    ck_assert(!cg_archive_metadata_next(file, &at, &key, &value));
    cg_archive_close(file);
    cg_archive_close(NULL);
}

static void expect_npy(int version, const char *header, size_t padded, const void *data, size_t n,
                       cg_dtype dtype, cg_shape shape, const void *expected) {
    char name[64];
    choose_path("x.y.npy");
    snprintf(name, sizeof name, "%d_x.y", (int)getpid());
    bytes b = npy_of(version, header, padded, data, n);
    put_bytes(b.data, b.n);
    free(b.data);
    expect_one(name, dtype, shape, expected);
}

/* S43 (a), (b), (d) */
START_TEST(npy_headers_long_and_of_every_version) {
    static const size_t padded[] = {0, 1, 118, 512, 4096, 65526, 65527, 65535};
    for (size_t i = 0; i < sizeof padded / sizeof padded[0]; i++) /* odd ones leave the data at odd addresses */
        for (int version = 1; version <= 3; version++)
            expect_npy(version, DICT("'<f4'", "False", "(3,)"), padded[i], three, sizeof three, CG_F32,
                       CG_SHAPE(3), three);
    expect_npy(2, DICT("'<f4'", "False", "(3,)"), 1 << 20, three, sizeof three, CG_F32, CG_SHAPE(3), three);
    expect_npy(1, DICT("'<f4'", "False", "()"), 0, three, 4, CG_F32, (cg_shape){0}, three);
    expect_npy(1, DICT("'<f4'", "False", "(0, 4)"), 0, three, 0, CG_F32, CG_SHAPE(0, 4), NULL);
    expect_npy(1, DICT("'<f4'", "True", "(4, 0)"), 0, three, 0, CG_F32, CG_SHAPE(4, 0), NULL);
    expect_npy(1, DICT("'<f8'", "False", "(4611686018427387904, 4611686018427387904, 0)"), 0, three, 0, CG_F64,
               CG_SHAPE(INT64_C(1) << 62, INT64_C(1) << 62, 0), NULL);
    expect_npy(1, "{\"shape\":(3L,),\"fortran_order\":True,\"descr\":\"<f4\"}", 0, three, sizeof three, CG_F32,
               CG_SHAPE(3), three);
    expect_npy(1, DICT("'<f4'", "False", "( 1,1 ,3 , 1, 1,1)"), 0, three, sizeof three, CG_F32,
               CG_SHAPE(1, 1, 3, 1, 1, 1), three);
}
END_TEST

START_TEST(npy_dtypes) {
    static const struct {
        const char *name;
        cg_dtype dtype;
    } good[] = {{"f4", CG_F32}, {"f8", CG_F64}, {"f2", CG_F16},  {"i4", CG_I32},
                {"i8", CG_I64}, {"u1", CG_U8},  {"b1", CG_BOOL}, {"i1", CG_I8},
                {"i2", CG_I16}, {"u2", CG_U16}, {"u4", CG_U32},  {"u8", CG_U64}};
    static const unsigned char data[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        char header[100];
        size_t bytes_each = cg_dtype_bytes(good[i].dtype);
        unsigned char swapped[16];
        for (size_t b = 0; b < 2 * bytes_each; b++)
            swapped[b] = data[b / bytes_each * bytes_each + bytes_each - 1 - b % bytes_each];
        for (const char *order = "<>|"; *order; order++) {
            snprintf(header, sizeof header, DICT("'%c%s'", "False", "(2,)"), *order, good[i].name);
            if (*order == '|' && bytes_each > 1) {
                put_npy(header, 2 * bytes_each);
                expect_refused("has dtype '|");
                continue;
            }
            expect_npy(1, header, 0, data, 2 * bytes_each, good[i].dtype, CG_SHAPE(2),
                       *order == '>' ? swapped : data);
        }
    }
    /* byte for byte the data of the report */
    expect_npy(1, DICT("'>f4'", "False", "(2,)"), 0, "\x3f\x80\0\0\x40\0\0\0", 8, CG_F32, CG_SHAPE(2),
               (float[]){1, 2});

    static const char *const bad[] = {"<x2", "|i2", "f4",   "=f4",   "",     "<",   "<f",
                                      "<i",  "|c8", "<c8x", "<U3[]", "<f4 ", "|O8", "<M"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        char header[100], words[100];
        snprintf(header, sizeof header, DICT("'%s'", "False", "(2,)"), bad[i]);
        snprintf(words, sizeof words, "has dtype '%s', these are read: f4 f8 f2, i1 to i8, u1 to u8, b1",
                 bad[i]);
        put_npy(header, 16);
        expect_refused(words);
    }
}
END_TEST

/* Elements that have no place here are listed, with their bytes, and are no tensors. */
START_TEST(npy_unread) {
    static const struct {
        const char *descr, *word, *advice;
        size_t bytes; /* of two elements; 0: the header does not say */
    } good[] = {{"'<c8'", "<c8", NULL, 16},
                {"'>c16'", ">c16", NULL, 32},
                {"'<f16'", "<f16", NULL, 32},
                {"'<U3'", "<U3", NULL, 24},
                {"'|S4'", "|S4", NULL, 8},
                {"'<M8[s]'", "<M8[s]", NULL, 16},
                {"'|V2'", "|V2", "if this is bfloat16, which npy has no name for, save it as float32", 4},
                {"'<V2'", "<V2", "bfloat16", 4},
                {"'|O'", "|O", "Python objects", 0},
                {"[('a]', '<f4'), ('b', '<i4', (2,))]", "[('a]', '<f4'), ('b', '<i4', (2,))]", "one by one", 0},
                {NULL, NULL, NULL, 0}};
    choose_path("unread.npy");
    char name[sizeof path];
    snprintf(name, sizeof name, "%s", strrchr(path, '/') + 1);
    *strrchr(name, '.') = 0;
    for (size_t i = 0; good[i].word; i++) {
        char header[200];
        snprintf(header, sizeof header, DICT("%s", "True", "(1, 2)"), good[i].descr);
        put_npy(header, good[i].bytes ? good[i].bytes : 7);
        cg_archive *file = open_good();
        ck_assert_int_eq(cg_archive_count(file), 0);
        ck_assert_int_eq(cg_archive_n_entries(file), 1);
        const cg_entry *e = cg_archive_entry(file, 0);
        ck_assert_str_eq(e->name, name);
        ck_assert_str_eq(e->dtype, good[i].word);
        ck_assert_int_eq(e->bytes, (int64_t)(good[i].bytes ? good[i].bytes : 7));
        ck_assert(cg_shape_equal(&e->shape, &CG_SHAPE(1, 2)));
        ck_assert(!good[i].advice == !e->advice);
        if (e->advice) ck_assert_ptr_nonnull(strstr(e->advice, good[i].advice));
        ck_assert_ptr_eq(cg_archive_unread(file, name), e);
        cg_archive_close(file);
        if (!good[i].bytes) continue;
        put_npy(header, good[i].bytes + 1);
        expect_refused("bytes, but");
    }
    put_npy(DICT("[('a', '<f4'", "False", "(2,)"), 8);
    expect_refused("expected ']' behind the fields of a dtype");
    put_npy(DICT("'<U1152921504606846976'", "False", "(2,)"), 8);
    expect_refused("has dtype '<U1152921504606846976'");
    put_npy(DICT("'<U200000000'", "False", "(2000000000000,)"), 8);
    expect_refused("the bytes of shape [2000000000000] of <U200000000 do not fit 64 bits");
}
END_TEST

START_TEST(npy_fortran_order) {
    float stored[24], wanted[24];
    for (int i = 0; i < 24; i++) stored[i] = (float)i;
    for (int a = 0; a < 2; a++) /* element (a, b, c) is stored at a + 2 b + 6 c */
        for (int b = 0; b < 3; b++)
            for (int c = 0; c < 4; c++) wanted[a * 12 + b * 4 + c] = (float)(a + 2 * b + 6 * c);
    expect_npy(1, DICT("'<f4'", "True", "(2, 3, 4)"), 0, stored, sizeof stored, CG_F32, CG_SHAPE(2, 3, 4),
               wanted);
    expect_npy(1, DICT("'<f4'", "True", "(1, 24, 1)"), 0, stored, sizeof stored, CG_F32, CG_SHAPE(1, 24, 1),
               stored);
    unsigned char swapped[sizeof stored];
    for (size_t i = 0; i < sizeof stored; i++) swapped[i] = ((unsigned char *)stored)[i ^ 3];
    expect_npy(1, DICT("'>f4'", "True", "(2, 3, 4)"), 0, swapped, sizeof stored, CG_F32, CG_SHAPE(2, 3, 4),
               wanted);
}
END_TEST

/* Large ones are turned and swapped piece by piece, each piece to its own place. */
START_TEST(npy_of_several_pieces) {
    enum { ROWS = 300, COLS = 1000 };
    static uint16_t wanted[ROWS * COLS], turned[ROWS * COLS], swapped[ROWS * COLS];
    for (int i = 0; i < ROWS; i++)
        for (int k = 0; k < COLS; k++) {
            const int at = i * COLS + k;
            wanted[at] = turned[k * ROWS + i] = (uint16_t)(at + (at >> 16) * 77);
            swapped[at] = (uint16_t)(wanted[at] << 8 | wanted[at] >> 8);
        }
    const cg_shape shape = CG_SHAPE(ROWS, COLS);
    expect_npy(1, DICT("'<u2'", "True", "(300, 1000)"), 0, turned, sizeof turned, CG_U16, shape, wanted);
    expect_npy(1, DICT("'>u2'", "False", "(300, 1000)"), 0, swapped, sizeof swapped, CG_U16, shape, wanted);
}
END_TEST

START_TEST(npy_bad_headers) {
    static const struct {
        const char *header, *words;
    } bad[] = {
        {DICT("'<f4'", "False", "(4294967296, 4294967296)"), "do not fit 64 bits"}, /* S43 (f) */
        {DICT("'<f4'", "False", "(4611686018427387905,)"), "do not fit 64 bits"},
        {DICT("'<f4'", "False", "(18446744073709551618,)"), "a size that does not fit 64 bits"},
        {DICT("'<f4'", "False", "(1000, 1000)"), "shape [1000, 1000] of f32 has 4000000 bytes, but 8 follow"},
        {DICT("'<f4'", "False", "(1,)"), "shape [1] of f32 has 4 bytes, but 8 follow"},
        {DICT("'<f4'", "False", "(0,)"), "has 0 bytes, but 8 follow"},
        {DICT("'<f4'", "False", "(-2,)"), "negative size"},
        {DICT("'<f4'", "False", "(-0, -2)"), "negative size"},
        {DICT("'<f4'", "False", "(2.0,)"), "expected ',' or ')'"},
        {DICT("'<f4'", "False", "(2)"), "expected ',' behind the only size"},
        {DICT("'<f4'", "False", "2"), "expected a tuple behind 'shape'"},
        {DICT("'<f4'", "False", "[2]"), "expected a tuple behind 'shape'"},
        {DICT("'<f4'", "False", "(,)"), "expected a whole number or ')'"},
        {DICT("'<f4'", "False", "(2,,)"), "expected a whole number or ')'"},
        {DICT("'<f4'", "False", "(2 2)"), "expected ',' or ')'"},
        {DICT("'<f4'", "False", "(2"), "expected a whole number or ')'"},
        {DICT("'<f4'", "False", "(1, 1, 1, 1, 1, 1, 2)"), "more than the 6 dimensions"},
        {DICT("'<f4'", "0", "(2,)"), "expected True or False"},
        {DICT("'<f4'", "'False'", "(2,)"), "expected True or False"},
        {DICT("'<f\\x34'", "False", "(2,)"), "expected a plain string"},
        {DICT("None", "False", "(2,)"), "expected a string behind 'descr'"},
        {"{'descr': '<f4', 'shape': (2,)}", "lacks the key 'fortran_order'"},
        {"{'fortran_order': False, 'shape': (2,)}", "lacks the key 'descr'"},
        {"{'descr': '<f4', 'fortran_order': False}", "lacks the key 'shape'"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (2,), 'shape': (2,)}", "the repeated key 'shape'"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (2,), 'order': 1}", "the unknown key 'order'"},
        {"{'descr': '<f4' 'fortran_order': False, 'shape': (2,)}", "expected ',' or '}'"},
        {"{'descr' '<f4', 'fortran_order': False, 'shape': (2,)}", "expected ':'"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (2,)", "expected ',' or '}'"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (2,)} {}", "expected nothing more"},
        {"{", "expected a key or '}'"},
        {"{}", "lacks the key 'descr'"},
        {"", "expected '{'"},
        {"(2,)", "expected '{'"},
        {"{'descr", "expected a plain string"},
    };
    choose_path("bad.npy");
    limit_memory();
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        put_npy(bad[i].header, 8);
        expect_refused(bad[i].words);
    }
}
END_TEST

START_TEST(npy_bad_starts) {
    choose_path("bad.npy");
    put_bytes("", 0);
    expect_refused("is empty");
    put_bytes("\x93NUMP", 5);
    expect_refused("is no file of tensors that is read here");
    put_bytes("a text of some length", 21);
    expect_refused("is no file of tensors that is read here");
    for (size_t n = 6; n < 10; n++) {
        put_bytes("\x93NUMPY\1\0\0\0", n);
        expect_refused("cut within the first bytes");
    }
    put_bytes("\x93NUMPY\2\0\0\0\0", 11);
    expect_refused("cut within the first bytes");
    put_bytes("\x93NUMPY\4\0\0\0\0\0", 12);
    expect_refused("has npy version 4.0");
    put_bytes("\x93NUMPY\0\0\0\0\0\0", 12);
    expect_refused("has npy version 0.0");
    put_bytes("\x93NUMPY\1\1\0\0\0\0", 12);
    expect_refused("has npy version 1.1");
    put_bytes("\x93NUMPY\1\0\377\377{}", 12); /* S43 (e) */
    expect_refused("claims 65545 bytes up to the end of its npy header, but has 12: is it cut?");
    put_bytes("\x93NUMPY\2\0\377\377\377\377", 12);
    expect_refused("claims an npy header of 4294967295 bytes, at most 1048576");
    put_bytes("\x93NUMPY\3\0\1\0\20\0", 12);
    expect_refused("claims an npy header of 1048577 bytes");
    put_bytes("\x93NUMPY\1\0\0\0", 10);
    expect_refused("expected '{'");
}
END_TEST

/* A file cut anywhere is refused; with any byte of the header changed it is refused or a whole file in its bounds. */
START_TEST(npy_cut_and_damaged) {
    choose_path("cut.npy");
    bytes b = small_npy();
    for (size_t cut = 0; cut < b.n; cut++) {
        put_bytes(b.data, cut);
        ck_assert_ptr_null(cg_archive_open(path, NULL));
    }
    for (size_t i = 0; i < 138; i++)
        for (int change = 1; change < 256; change += 7) {
            b.data[i] ^= (unsigned char)change;
            put_bytes(b.data, b.n);
            cg_archive *file = cg_archive_open(path, NULL);
            for (int t = 0; file && t < cg_archive_count(file); t++) {
                const cg_tensor *x = &cg_archive_at(file, t)->tensor;
                ck_assert_int_le(cg_tensor_bytes(x->dtype, &x->shape), (int64_t)b.n);
            }
            cg_archive_close(file);
            b.data[i] ^= (unsigned char)change;
        }
    free(b.data);
}
END_TEST

/* ---- npz ---- */

START_TEST(npz_every_form) {
    bytes npy = small_npy();
    choose_path("good.npz");
    for (int form = 0; form < 16; form++) {
        bool deflate = form & 1, descriptor = form & 2, marked = form & 4, zip64 = form & 8;
        member m[] = {{"q.npy", npy, deflate, descriptor, marked, zip64},
                      {"a/b.npy", npy, deflate, descriptor, marked, zip64},
                      {"odd.npy",
                       npy_of(1, DICT("'>f4'", "True", "(1, 3)"), 77, "\x3f\x80\0\0\x40\0\0\0\x40\x40\0\0", 12),
                       !deflate, descriptor, !marked, zip64}};
        put_zip(m, 3);
        cg_archive *file = open_good();
        ck_assert_str_eq(cg_archive_format(file), "npz");
        ck_assert_int_eq(cg_archive_count(file), 3);
        ck_assert_str_eq(cg_archive_at(file, 0)->name, "q");
        ck_assert_str_eq(cg_archive_at(file, 1)->name, "a/b");
        for (int i = 0; i < 2; i++) {
            const cg_tensor *t = &cg_archive_at(file, i)->tensor;
            ck_assert_int_eq(t->dtype, CG_F32);
            ck_assert(cg_shape_equal(&t->shape, &CG_SHAPE(3)));
            ck_assert_uint_eq((uintptr_t)t->data % 4, 0);
            ck_assert_mem_eq(t->data, three, sizeof three);
        }
        const cg_tensor *odd = cg_archive_find(file, "odd");
        ck_assert_ptr_nonnull(odd);
        ck_assert_mem_eq(odd->data, ((float[]){1, 2, 3}), 12);
        ck_assert_ptr_null(cg_archive_metadata(file, "q"));
        cg_archive_close(file);
        free(m[2].data.data);
    }
    put_zip(NULL, 0);
    cg_archive *file = open_good();
    ck_assert_int_eq(cg_archive_count(file), 0);
    cg_archive_close(file);
    free(npy.data);
}
END_TEST

static void expect_zip_refused(const member *members, int n, const char *words) {
    put_zip(members, n);
    expect_refused(words);
}

START_TEST(npz_bad_members) {
    bytes npy = small_npy(), text = {(unsigned char *)"no array", 8};
    choose_path("bad.npz");
    /* S41, the members of an npz */
    expect_zip_refused((member[]){{"q.npy", npy}, {"k.npy", npy}, {"q.npy", npy, .deflate = true}}, 3,
                       "the name 'q.npy' is repeated in the zip archive");
    expect_zip_refused((member[]){{"q.txt", npy}}, 1, "member 'q.txt': its name does not end with .npy");
    expect_zip_refused((member[]){{"x/data.pkl", npy}}, 1, "a file of torch.save is not read");
    expect_zip_refused((member[]){{"q\xff.npy", npy}}, 1, "the name is not UTF-8");
    expect_zip_refused((member[]){{"q\x1b.npy", text}}, 1,
                       "member 'q\\x1b.npy': does not begin with the magic bytes");
    expect_zip_refused((member[]){{"q.npy", npy, .flags = 1}}, 1, "member 'q.npy': is encrypted");
    expect_zip_refused((member[]){{"q.npy", npy, .flags = 64}}, 1, "has the zip flags 0x40");
    expect_zip_refused((member[]){{"q.npy", npy, .flags = 1 << 13}}, 1, "has the zip flags 0x2000");
    expect_zip_refused((member[]){{"q.npy", npy, .method = 12}}, 1, "is packed with method 12 (bzip2)");
    expect_zip_refused((member[]){{"q.npy", npy, .method = 14}}, 1, "is packed with method 14 (lzma)");
    expect_zip_refused((member[]){{"q.npy", npy, .method = 77}}, 1, "is packed with method 77, only");
    expect_zip_refused((member[]){{"q.npy", npy, .claim = 1}}, 1, "is stored, with 1 bytes that come from 140");
    expect_zip_refused((member[]){{"q.npy", npy, .deflate = true, .claim = 139}}, 1,
                       "shape [3] of f32 has 12 bytes, but 11 follow");
    expect_zip_refused((member[]){{"q.npy", npy, .deflate = true, .claim = 141}}, 1,
                       "shape [3] of f32 has 12 bytes, but 13 follow");
    expect_zip_refused((member[]){{"q.npy", npy, .deflate = true, .claim = 1 << 20}}, 1,
                       "claims 1048576 bytes from 79 deflated ones, more than deflate can hold");
    for (int deflate = 0; deflate < 2; deflate++) {
        bytes cut = {npy.data, 100};
        expect_zip_refused((member[]){{"q.npy", cut, .deflate = deflate}}, 1, "claims 128 bytes up to the end");
        cut.n = 9;
        expect_zip_refused((member[]){{"q.npy", cut, .deflate = deflate}}, 1, "cut within the first bytes");
        cut.n = 0;
        expect_zip_refused((member[]){{"q.npy", cut, .deflate = deflate}}, 1,
                           "does not begin with the magic bytes");
    }
    free(npy.data);
}
END_TEST

/* A deflated file of an array of zeros, of `size` bytes; its headers claim another. */
static member zeros_member(size_t size, size_t claim) {
    char header[200];
    snprintf(header, sizeof header, DICT("'|u1'", "False", "(%zu,)"), claim - 128);
    bytes b = npy_of(1, header, 118, "", 0);
    b.data = realloc(b.data, size);
    memset(b.data + b.n, 0, size - b.n);
    b.n = size;
    return (member){"zeros.npy", b, .deflate = true, .claim = claim};
}

/* Bombs: small files that grow. What is large and honest is read. */
START_TEST(npz_bombs) {
    choose_path("bomb.npz");
    member honest = zeros_member(8 << 20, 8 << 20);
    put_zip(&honest, 1);
    cg_archive *file = open_good();
    ck_assert_int_eq(cg_archive_at(file, 0)->tensor.shape.dims[0], (8 << 20) - 128);
    cg_archive_close(file);
    free(honest.data.data);

    /* within what deflate can hold, but the data ends early or goes on */
    member less = zeros_member(7 << 20, (7 << 20) + 1000), more = zeros_member(8 << 20, (8 << 20) - 1000);
    expect_zip_refused(&less, 1, "its deflated data is shorter than the zip directory says");
    expect_zip_refused(&more, 1, "its deflated data is longer than the zip directory says");
    free(less.data.data);

    /* Over 1 GiB together and over 64 times the file, all of it honest: refused before any member is inflated. */
    member many[160];
    char names[160][16];
    for (int i = 0; i < 160; i++) {
        snprintf(names[i], sizeof names[i], "%d.npy", i);
        many[i] = (member){names[i], more.data, .deflate = true};
    }
    put_zip(many, 160);
    limit_memory();
    expect_refused(
        "its deflated members grow to 1342177280 bytes, more than 1 GiB and more than 64 times the file");
    free(more.data.data);
}
END_TEST

static void expect_patched(const bytes *zip, size_t at, uint64_t number, int n, const char *words) {
    bytes b = {0};
    add(&b, zip->data, zip->n);
    set_number(&b, at, number, n);
    put_bytes(b.data, b.n);
    expect_refused(words);
    free(b.data);
}

START_TEST(npz_headers_disagree) {
    bytes npy = small_npy();
    places w;
    choose_path("bad.npz");
    member m[] = {{"q.npy", npy}, {"k.npy", npy, .deflate = true, .descriptor = true, .marked = true}};
    bytes zip = zip_of(m, 2, &w);
    size_t q = w.local[0], k = w.local[1], eq = w.entry[0], ek = w.entry[1], end = w.end;

    expect_patched(&zip, k, 0, 1, "member 'k.npy': its local zip header is not at 175");
    expect_patched(&zip, eq + 42, 5, 4, "its local zip header is not at 5");
    expect_patched(&zip, eq + 42, 0x7fffffff, 4, "its local zip header is not at 2147483647");
    expect_patched(&zip, q + 30, 'p', 1, "another name, 'p.npy'");
    expect_patched(&zip, q + 26, 4, 2, "another name, 'q.np'");
    expect_patched(&zip, q + 26, 65535, 2, "runs into the directory");
    expect_patched(&zip, q + 28, 65535, 2, "runs into the directory");
    expect_patched(&zip, q + 8, 8, 2, "disagree on size, CRC or method");
    expect_patched(&zip, q + 6, 2, 2, "disagree on size, CRC or method");
    expect_patched(&zip, q + 14, 1, 4, "disagree on size, CRC or method");
    expect_patched(&zip, q + 18, 139, 4, "disagree on size, CRC or method");
    expect_patched(&zip, q + 22, 0, 4,
                   "disagree on size, CRC or method"); /* 0 is for those with a descriptor */
    expect_patched(&zip, k + 14, 1, 4, "member 'k.npy': its local zip header and the directory disagree");
    expect_patched(&zip, eq - 4, 141, 4, "the sizes and CRC behind its data differ");
    expect_patched(&zip, ek + 24, 141, 4, "the sizes and CRC behind its data differ");
    expect_patched(&zip, eq + 16, 0, 4, "disagree on size, CRC or method");
    expect_patched(&zip, eq + 34, 1, 2, "lies on another disk");
    expect_patched(&zip, eq + 28, 65535, 2, "entry 1 of the zip directory is damaged or cut");
    expect_patched(&zip, ek + 30, 1, 2, "entry 2 of the zip directory is damaged or cut");
    expect_patched(&zip, ek, 0, 4, "entry 2 of the zip directory is damaged or cut");
    expect_patched(&zip, eq + 47, 0, 1, "a name in the zip directory has a 0 byte in it: 'q\\x00npy'");
    expect_patched(&zip, end + 4, 1, 2, "spans several disks");
    expect_patched(&zip, end + 8, 1, 2, "spans several disks");
    expect_patched(&zip, end + 8, 0x00010001, 4, "bytes of the zip directory belong to no entry");
    expect_patched(&zip, end + 8, 0x00030003, 4, "claims 3 members");
    expect_patched(&zip, end + 8, 0xffffffff, 4, "claims 65535 members, its directory has 102 bytes");
    expect_patched(&zip, end + 12, 1, 4, "the directory of the zip archive claims 1 bytes");
    expect_patched(&zip, end + 16, 0xfffffff0, 4, "the directory of the zip archive claims");
    expect_patched(&zip, end + 20, 1, 2, "claims a comment of 1 bytes, but 0 follow");
    expect_patched(&zip, end, 0, 4, "does not end with the end record");
    expect_patched(&zip, q + 30 + 5 + 128, 0x3f, 1, "member 'q.npy': its CRC is ");
    expect_patched(&zip, eq + 20, 0xffffffff, 4, "its zip64 field is missing");

    size_t n = zip.n;
    add(&zip, "x", 1);
    put_bytes(zip.data, zip.n);
    expect_refused("claims a comment of 0 bytes, but 1 follow its end record");
    zip.n = n;
    free(zip.data);

    /* bytes of no member: a hole between, before the first, and behind the last */
    zip = zip_of((member[]){{"q.npy", npy}, {"hidden.npy", npy}, {"k.npy", npy}}, 3, &w);
    bytes holes = {0};
    add(&holes, zip.data, w.entry[1]);
    add(&holes, zip.data + w.entry[2], zip.n - w.entry[2]);
    set_number(&holes, holes.n - 14, 0x00020002, 4);
    set_number(&holes, holes.n - 10, 2 * 51, 4);
    put_bytes(holes.data, holes.n);
    expect_refused("180 bytes before the zip member 'k.npy' belong to none");
    free(holes.data);
    /* two entries for one place */
    expect_patched(&zip, w.entry[2] + 42, 0, 4,
                   "member 'k.npy': its local zip header has another name, 'q.npy'");
    free(zip.data);
    free(npy.data);
}
END_TEST

/* Stored, deflated, streamed and zip64 members before a comment, which may look like the end of another
 * archive. */
START_TEST(npz_comments) {
    bytes npy = small_npy();
    choose_path("comment.npz");
    static const unsigned char none[22] = "PK\5\6"; /* a whole archive of nothing */
    char *longest = malloc(70000);
    memset(longest, 'c', 70000);
    for (int form = 0; form < 8; form++) {
        const member m[] = {{"q.npy", npy, .deflate = form & 1, .descriptor = form & 2, .zip64 = form & 4}};
        places w;
        bytes zip = zip_of(m, 1, &w);
        const size_t end = w.end;
        const struct {
            const void *text;
            size_t bytes, claim;
            const char *refusal;
        } comments[] = {
            {"by hand", 7, 7, NULL},
            {longest, 65535, 65535, NULL},
            {longest, 65536, 65535, "does not end with the end record of a zip archive: is it cut?"},
            {"by hand", 7, 6, "claims a comment of 6 bytes, but 7 follow its end record"},
            {"PK\5\6 is no record", 17, 17, NULL},
            {none, 22, 22, NULL}, /* reaches to the end, but its directory does not fit */
        };
        for (size_t i = form ? 3 : 0; i < sizeof comments / sizeof *comments; i++) {
            bytes b = {0};
            add(&b, zip.data, zip.n);
            set_number(&b, end + 20, comments[i].claim, 2);
            add(&b, comments[i].text, comments[i].bytes);
            put_bytes(b.data, b.n);
            free(b.data);
            if (comments[i].refusal) {
                expect_refused(comments[i].refusal);
                continue;
            }
            cg_archive *file = open_good();
            ck_assert_mem_eq(cg_archive_find(file, "q")->data, three, sizeof three);
            cg_archive_close(file);
        }
        /* one that fits as well: the directory of nothing ends where it begins */
        bytes twice = {0};
        add(&twice, zip.data, zip.n);
        set_number(&twice, end + 20, sizeof none, 2);
        add(&twice, none, sizeof none);
        set_number(&twice, end + 22 + 16, end + 22, 4);
        put_bytes(twice.data, twice.n);
        expect_refused("has 2 end records that fit, one in the comment of another");
        free(twice.data);
        /* bytes before the archive shift every place in it */
        bytes shifted = {0};
        add(&shifted, "#!", 2);
        add(&shifted, zip.data, zip.n);
        put_bytes(shifted.data, shifted.n);
        expect_refused("is no file of tensors that is read here");
        free(shifted.data);
        free(zip.data);
    }
    free(longest);
    free(npy.data);
}
END_TEST

/* The quoted-overlap bomb: the data of the first member holds the second as a whole, header and all. */
START_TEST(npz_overlap) {
    bytes npy = small_npy(), inner = {0};
    places w, iw;
    choose_path("overlap.npz");
    bytes one = zip_of((member[]){{"b.npy", npy}}, 1, &iw);
    bytes header = npy_of(1, DICT("'|u1'", "False", "(175,)"), 118, "", 0);
    add(&inner, header.data, header.n);
    add(&inner, one.data, iw.entry[0]); /* local header and data of b */
    ck_assert_uint_eq(iw.entry[0], 175);
    bytes zip = zip_of((member[]){{"a.npy", inner}, {"b.npy", npy}}, 2, &w);
    set_number(&zip, w.entry[1] + 42, 30 + 5 + 128, 4);
    put_bytes(zip.data, zip.n);
    expect_refused("zip members 'a.npy' and 'b.npy' overlap: the second begins at 163, the first ends at 338");
    free(zip.data);
    free(one.data);
    free(header.data);
    free(inner.data);
    free(npy.data);
}
END_TEST

START_TEST(npz_zip64_lies) {
    bytes npy = small_npy();
    places w;
    choose_path("bad.npz");
    bytes zip = zip_of((member[]){{"q.npy", npy, .zip64 = true}}, 1, &w);
    size_t wide = w.end - 76, extra = w.entry[0] + 46 + 5;
    expect_patched(&zip, w.end - 12, UINT64_MAX - 3, 8, "the zip64 end record is not where its locator says");
    expect_patched(&zip, w.end - 12, wide + 1, 8, "the zip64 end record is not where its locator says");
    expect_patched(&zip, wide + 4, 45, 8, "the zip64 end record is not where its locator says");
    expect_patched(&zip, wide + 4, UINT64_MAX, 8, "the zip64 end record is not where its locator says");
    expect_patched(&zip, wide + 48, UINT64_MAX, 8, "the directory of the zip archive claims");
    expect_patched(&zip, wide + 40, UINT64_MAX, 8, "the directory of the zip archive claims");
    expect_patched(&zip, wide + 32, 2, 8, "spans several disks");
    expect_patched(&zip, wide + 16, 1, 4, "spans several disks");
    expect_patched(&zip, w.end + 16, 0, 4, "the two end records of the zip archive disagree");
    expect_patched(&zip, w.end + 8, 2, 2, "the two end records of the zip archive disagree");
    expect_patched(&zip, extra + 2, 16, 2, "its zip64 field is too short");
    expect_patched(&zip, extra + 2, 25, 2, "an extra field of its zip header is cut");
    expect_patched(&zip, extra, 2, 2, "its zip64 field is missing");
    expect_patched(&zip, extra + 4, UINT64_MAX, 8, "is stored, with 18446744073709551615 bytes");
    expect_patched(&zip, extra + 20, UINT64_MAX, 8, "its local zip header is not at 18446744073709551615");
    bytes b = {0}; /* both sizes huge: more than the file has */
    add(&b, zip.data, zip.n);
    for (int i = 0; i < 2; i++) {
        set_number(&b, extra + 4 + 8 * (size_t)i, UINT64_MAX - 50, 8);
        set_number(&b, 30 + 5 + 4 + 8 * (size_t)i, UINT64_MAX - 50, 8);
    }
    put_bytes(b.data, b.n);
    limit_memory();
    expect_refused("claims 18446744073709551565 packed bytes, but only 140 are left before the directory");
    free(b.data);
    free(zip.data);
    free(npy.data);
}
END_TEST

/* Cut anywhere: refused. Any byte changed: refused, or only what no reader looks at (times, versions, attributes),
 * or the name, and then the data is as it was, since a CRC sees every single change. */
START_TEST(npz_cut_and_damaged) {
    choose_path("cut.npz");
    bytes npy = small_npy();
    bytes zip = zip_of((member[]){{"q.npy", npy, .zip64 = true},
                                  {"k.npy", npy, .deflate = true, .descriptor = true, .marked = true}},
                       2, NULL);
    for (size_t cut = 0; cut < zip.n; cut++) {
        put_bytes(zip.data, cut);
        ck_assert_ptr_null(cg_archive_open(path, NULL));
    }
    int accepted = 0;
    for (size_t i = 0; i < zip.n; i++)
        for (int bit = 0; bit < 8; bit++) {
            zip.data[i] ^= (unsigned char)(1 << bit);
            put_bytes(zip.data, zip.n);
            cg_archive *file = cg_archive_open(path, NULL);
            zip.data[i] ^= (unsigned char)(1 << bit);
            if (!file) continue;
            accepted++;
            ck_assert_int_eq(cg_archive_count(file), 2);
            for (int t = 0; t < 2; t++)
                ck_assert_mem_eq(cg_archive_at(file, t)->tensor.data, three, sizeof three);
            cg_archive_close(file);
        }
    /* Per member 6 bytes of version and time in the local header, 8 of them and 6 of attributes in the entry; 4
     * bytes of versions in the zip64 end record, the number of disks (0 for 1) in its locator, and the bits that
     * fill the last byte of deflated data. */
    ck_assert_int_le(accepted, 8 * (2 * (6 + 8 + 6) + 4) + 1 + 7);
    free(zip.data);
    free(npy.data);
}
END_TEST

/* ---- files that NumPy wrote: np.save, np.savez, np.savez_compressed and zipfile on a pipe ---- */

START_TEST(files_of_numpy) {
    static const struct {
        const char *file, *name, *turned; /* turned: the transpose, which NumPy stores in Fortran order */
    } written[] = {{"npy-f4", "seed-npy-f4", NULL},
                   {"npy-version2", "seed-npy-version2", NULL},
                   {"npy-version3", "seed-npy-version3", NULL},
                   {"npy-fortran", NULL, "seed-npy-fortran"},
                   {"npz-stored", "a", "b"},
                   {"npz-deflated", "a", NULL},
                   {"npz-stream0", "q", NULL},
                   {"npz-stream1", "q", NULL}};
    static const float plain[] = {0, 1, 2, 3, 4, 5}, transposed[] = {0, 3, 1, 4, 2, 5};
    for (size_t i = 0; i < sizeof written / sizeof written[0]; i++) {
        char place[400];
        cg_error error = {0};
        snprintf(place, sizeof place, "%s/tests/fuzz/corpus/archive/seed-%s", CSAGRAD_SOURCE_DIR,
                 written[i].file);
        cg_archive *file = cg_archive_open(place, &error);
        if (!file) ck_abort_msg("%s", error.text);
        for (int turned = 0; turned < 2; turned++) {
            const char *name = turned ? written[i].turned : written[i].name;
            if (!name) continue;
            const cg_tensor *t = cg_archive_find(file, name);
            ck_assert_msg(t != NULL, "%s has no %s", place, name);
            ck_assert_int_eq(t->dtype, CG_F32);
            ck_assert(cg_shape_equal(&t->shape, turned ? &CG_SHAPE(3, 2) : &CG_SHAPE(2, 3)));
            ck_assert_mem_eq(t->data, turned ? transposed : plain, sizeof plain);
        }
        cg_archive_close(file);
    }
}
END_TEST

/* ---- safetensors through the same front ---- */

START_TEST(safetensors_too) {
    float x[] = {1, 2};
    static const char *const metadata[][2] = {{"k", "v"}, {"l", "w"}};
    cg_named_tensor t[] = {{"x", {CG_F32, CG_SHAPE(2), x}}, {"y", {CG_U8, CG_SHAPE(3), "abc"}}};
    choose_path("named.npy"); /* the name says nothing */
    ck_assert(cg_safetensors_write(path, t, 2, metadata, 2, NULL));
    cg_archive *file = open_good();
    ck_assert_str_eq(cg_archive_format(file), "safetensors");
    ck_assert_int_eq(cg_archive_count(file), 2);
    ck_assert_mem_eq(cg_archive_find(file, "x")->data, x, sizeof x);
    ck_assert_str_eq(cg_archive_metadata(file, "l"), "w");
    void *at = NULL;
    const char *key, *value;
    for (int i = 0; i < 2; i++) {
        ck_assert(cg_archive_metadata_next(file, &at, &key, &value));
        ck_assert_str_eq(key, metadata[i][0]);
        ck_assert_str_eq(value, metadata[i][1]);
    }
    ck_assert(!cg_archive_metadata_next(file, &at, &key, &value));
    cg_archive_close(file);

    /* data at an odd address is copied, so that it can be used in place */
    static const char header[] = "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
                                 "\"b\":{\"dtype\":\"F64\",\"shape\":[1],\"data_offsets\":[1,9]}}";
    bytes b = {0};
    double pi = 3.25;
    add_number(&b, sizeof header - 1, 8);
    add(&b, header, sizeof header - 1);
    add(&b, "x", 1);
    add(&b, &pi, 8);
    put_bytes(b.data, b.n);
    file = open_good();
    const cg_tensor *odd = cg_archive_find(file, "b");
    ck_assert_uint_eq((uintptr_t)odd->data % 8, 0);
    ck_assert_double_eq(*(const double *)odd->data, pi);
    cg_archive_close(file);
    free(b.data);

    /* S41 and S42 keep their words */
    static const char twice[] =
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},\"a\":{\"dtype\":"
        "\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}        ";
    b = (bytes){0};
    add_number(&b, 107, 8);
    add(&b, twice, 107 + 8);
    put_bytes(b.data, b.n);
    expect_refused("the name 'a' is repeated");
    free(b.data);
    choose_path("none.npz");
    unlink(path);
    expect_refused("cannot be opened: No such file");
    ck_assert_int_eq(mkdir(path, 0777), 0);
    expect_refused("is a folder, not a file");
}
END_TEST

/* Bits of every dtype as numbers, at odd addresses too. */
START_TEST(elements_as_doubles) {
    char room[9];
#define GET(dtype, ...) (memcpy(room + 1, (unsigned char[8]){__VA_ARGS__}, 8), cg_dtype_get(dtype, room + 1, 0))
    ck_assert_double_eq(GET(CG_F32, 0, 0, 0xc0, 0x3f), 1.5);
    ck_assert_double_eq(GET(CG_F64, 0, 0, 0, 0, 0, 0, 0xf8, 0xbf), -1.5);
    ck_assert_double_eq(GET(CG_I32, 0xff, 0xff, 0xff, 0xff), -1);
    ck_assert_double_eq(GET(CG_I64, 0, 0, 0, 0, 1), 4294967296.0);
    ck_assert_double_eq(GET(CG_U8, 0xff), 255);
    ck_assert_double_eq(GET(CG_BF16, 0xc0, 0xbf), -1.5);
    ck_assert_double_eq(GET(CG_F16, 0, 0x3e), 1.5);
    ck_assert_double_eq(GET(CG_F16, 0xff, 0x7b), 65504);
    ck_assert_double_eq(GET(CG_F16, 1, 0x80), -0x1p-24);
    ck_assert_double_eq(GET(CG_F16, 0xff, 0x03), 1023 * 0x1p-24);
    ck_assert_double_eq(GET(CG_F16, 0, 0x04), 0x1p-14);
    ck_assert_double_eq(GET(CG_F16, 0, 0xfc), -INFINITY);
    ck_assert_double_nan(GET(CG_F16, 1, 0x7c));
    ck_assert_double_eq(cg_dtype_get(CG_F32, (float[]){1, 2, 3}, 2), 3);
    ck_assert_double_eq(cg_dtype_get(CG_U64, (uint64_t[]){UINT64_MAX}, 0), 0x1p64);
    ck_assert_int_eq(cg_dtype_whole(CG_U64, (uint64_t[]){0, UINT64_MAX}, 1), INT64_MAX);
    ck_assert_int_eq(cg_dtype_whole(CG_U64, (uint64_t[]){INT64_MAX}, 0), INT64_MAX);
}
END_TEST

static int remove_one(const char *name, const struct stat *status, int type, struct FTW *ftw) {
    (void)status, (void)type, (void)ftw;
    return remove(name);
}

int main(void) {
    if (!mkdtemp(root)) return EXIT_FAILURE;
    Suite *suite = suite_create("archive");
    TCase *tcase = tcase_create("archive");
    tcase_set_timeout(tcase, 120);
    suite_add_tcase(suite, tcase);
    tcase_add_test(tcase, npy_headers_long_and_of_every_version);
    tcase_add_test(tcase, npy_dtypes);
    tcase_add_test(tcase, npy_unread);
    tcase_add_test(tcase, npy_fortran_order);
    tcase_add_test(tcase, npy_of_several_pieces);
    tcase_add_test(tcase, npy_bad_headers);
    tcase_add_test(tcase, npy_bad_starts);
    tcase_add_test(tcase, npy_cut_and_damaged);
    tcase_add_test(tcase, npz_every_form);
    tcase_add_test(tcase, npz_bad_members);
    tcase_add_test(tcase, npz_bombs);
    tcase_add_test(tcase, npz_headers_disagree);
    tcase_add_test(tcase, npz_overlap);
    tcase_add_test(tcase, npz_comments);
    tcase_add_test(tcase, npz_zip64_lies);
    tcase_add_test(tcase, npz_cut_and_damaged);
    tcase_add_test(tcase, files_of_numpy);
    tcase_add_test(tcase, safetensors_too);
    tcase_add_test(tcase, elements_as_doubles);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    nftw(root, remove_one, 8, FTW_DEPTH | FTW_PHYS);
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
