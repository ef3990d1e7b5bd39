/* safetensors: round trips, and files that lie about themselves in every way we know of. */
#define _GNU_SOURCE /* nftw */
#include <check.h>
#include <errno.h>
#include <ftw.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/base/file.h"
#include "core/files/safetensors.h"

static char root[] = "test_core_safetensors_XXXXXX"; /* made by main, one for all tests */
static char path[64];                                /* the file of the running test */

static void choose_path(void) {
    static int n;
    snprintf(path, sizeof path, "%s/%d_%d", root, (int)getpid(), n++);
}

static void put_bytes(const void *bytes, size_t n) {
    unlink(path); /* a file that is cut and filled anew is written to the disk at once */
    FILE *f = fopen(path, "wb");
    ck_assert_ptr_nonnull(f);
    ck_assert_uint_eq(fwrite(bytes, 1, n, f), n);
    ck_assert_int_eq(fclose(f), 0);
}

/* Length, header and n_data bytes that count up from 1. */
static void put_file(const char *header, size_t header_bytes, size_t n_data) {
    uint64_t length = header_bytes;
    char *all = malloc(8 + header_bytes + n_data);
    memcpy(all, &length, 8);
    memcpy(all + 8, header, header_bytes);
    for (size_t i = 0; i < n_data; i++) all[8 + header_bytes + i] = (char)(i + 1);
    put_bytes(all, 8 + header_bytes + n_data);
    free(all);
}

static void expect_sentence(const cg_error *error, cg_code code, const char *const *words) {
    ck_assert_int_eq(error->code, code);
    ck_assert_msg(strstr(error->text, path) != NULL, "the path is not in: %s", error->text);
    for (; *words; words++)
        ck_assert_msg(strstr(error->text, *words) != NULL, "'%s' is not in: %s", *words, error->text);
    for (const char *c = error->text; *c; c++)
        ck_assert_msg((unsigned char)*c >= 0x20, "not one line: %s", error->text);
}

/* The file at `path` is refused, with these words in the sentence. */
#define EXPECT_REFUSED(...)                                                                                    \
    do {                                                                                                       \
        cg_error refusal = {0};                                                                                \
        ck_assert_ptr_null(cg_safetensors_open(path, &refusal));                                               \
        expect_sentence(&refusal, CG_BAD_INPUT, (const char *const[]){__VA_ARGS__, NULL});                     \
        ck_assert_ptr_null(cg_safetensors_open(path, NULL));                                                   \
    } while (0)

static cg_safetensors *open_good(void) {
    cg_error error = {0};
    cg_safetensors *file = cg_safetensors_open(path, &error);
    ck_assert_msg(file != NULL, "%s", error.text);
    ck_assert_int_eq(error.code, CG_OK);
    return file;
}

/* A header of one good tensor of 4 bytes, with `members` in place of the members of its entry. */
static void expect_entry_refused(const char *members, const char *words) {
    char header[600];
    int n = snprintf(header, sizeof header,
                     "{\"good\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},\"t\":{%s}}", members);
    put_file(header, (size_t)n, 8);
    EXPECT_REFUSED("tensor 't'", words);
}

static void expect_header_refused(const char *header, size_t n_data, const char *words) {
    put_file(header, strlen(header), n_data);
    EXPECT_REFUSED(words);
}

START_TEST(open_plain_file) {
    const char *header = "{\"b\":{\"dtype\":\"I32\",\"shape\":[1,2],\"data_offsets\":[4,12]},"
                         "\"__metadata__\":{\"format\":\"pt\",\"empty\":\"\"},"
                         "\"a\":{\"data_offsets\":[0,4],\"shape\":[],\"dtype\":\"F32\"}}    ";
    put_file(header, strlen(header), 12);
    cg_safetensors *file = open_good();
    ck_assert_int_eq(cg_safetensors_count(file), 2);
    const cg_named_tensor *a = cg_safetensors_at(file, 0), *b = cg_safetensors_at(file, 1);
    ck_assert_str_eq(a->name, "a");
    ck_assert_int_eq(a->tensor.dtype, CG_F32);
    ck_assert_int_eq(a->tensor.shape.n_dims, 0);
    ck_assert_mem_eq(a->tensor.data, "\1\2\3\4", 4);
    ck_assert_str_eq(b->name, "b");
    ck_assert_int_eq(b->tensor.dtype, CG_I32);
    ck_assert(cg_shape_equal(&b->tensor.shape, &CG_SHAPE(1, 2)));
    ck_assert_mem_eq(b->tensor.data, "\5\6\7\10\11\12\13\14", 8);
    ck_assert_ptr_eq(cg_safetensors_find(file, "b"), &b->tensor);
    ck_assert_ptr_null(cg_safetensors_find(file, "c"));
    ck_assert_ptr_null(cg_safetensors_find(file, "__metadata__"));
    ck_assert_str_eq(cg_safetensors_metadata(file, "format"), "pt");
    ck_assert_str_eq(cg_safetensors_metadata(file, "empty"), "");
    ck_assert_ptr_null(cg_safetensors_metadata(file, "a"));
    cg_safetensors_close(file);
    cg_safetensors_close(NULL);
}
END_TEST

START_TEST(open_smallest_files) {
    put_file("{}", 2, 0);
    cg_safetensors *file = open_good();
    ck_assert_int_eq(cg_safetensors_count(file), 0);
    ck_assert_ptr_null(cg_safetensors_find(file, "a"));
    ck_assert_ptr_null(cg_safetensors_metadata(file, "a"));
    cg_safetensors_close(file);

    /* no elements: before, between and behind the data; one whose other sides overflow; an empty name */
    const char *header = "{\"end\":{\"dtype\":\"F64\",\"shape\":[0],\"data_offsets\":[4,4]},"
                         "\"\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[2,4]},"
                         "\"one\":{\"dtype\":\"BF16\",\"shape\":[1],\"data_offsets\":[0,2]},"
                         "\"mid\":{\"dtype\":\"F16\",\"shape\":[4611686018427387904,4611686018427387904,0],"
                         "\"data_offsets\":[2,2]},"
                         "\"start\":{\"dtype\":\"I64\",\"shape\":[0,4],\"data_offsets\":[0,0]}}";
    put_file(header, strlen(header), 4);
    file = open_good();
    static const char *const order[] = {"start", "one", "mid", "", "end"};
    ck_assert_int_eq(cg_safetensors_count(file), 5);
    for (int i = 0; i < 5; i++) ck_assert_str_eq(cg_safetensors_at(file, i)->name, order[i]);
    cg_safetensors_close(file);
}
END_TEST

START_TEST(names_are_decoded) {
    const char *header = "{\"\\u0061\\n\\u00e9\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}";
    put_file(header, strlen(header), 1);
    cg_safetensors *file = open_good();
    ck_assert_str_eq(cg_safetensors_at(file, 0)->name, "a\n\xc3\xa9");
    cg_safetensors_close(file);
}
END_TEST

START_TEST(not_a_file) {
    EXPECT_REFUSED("cannot be opened", strerror(ENOENT));
    ck_assert_int_eq(mkdir(path, 0777), 0);
    EXPECT_REFUSED("is a folder, not a file");
    choose_path();
    ck_assert_int_eq(mkfifo(path, 0666), 0);
    EXPECT_REFUSED("is a device or pipe, not a file"); /* and does not wait */
}
END_TEST

START_TEST(length_lies) {
    put_bytes("", 0);
    EXPECT_REFUSED("has 0 bytes");
    put_bytes("\2\0\0\0\0\0\0", 7);
    EXPECT_REFUSED("has 7 bytes");
    put_bytes("\2\0\0\0\0\0\0\0", 8);
    EXPECT_REFUSED("claims a header of 2 bytes, but only 0 follow");
    put_bytes("\3\0\0\0\0\0\0\0{}", 10);
    EXPECT_REFUSED("claims a header of 3 bytes, but only 2 follow");
    put_bytes("\0\0\0\0\0\0\0\0{}", 10);
    EXPECT_REFUSED("does not begin with '{'");
    put_bytes("\xff\xff\xff\xff\xff\xff\xff\xff{}", 10); /* 8 + this wraps */
    EXPECT_REFUSED("claims a header of 18446744073709551615 bytes");
    put_bytes("\xf8\xff\xff\xff\xff\xff\xff\xff{}", 10);
    EXPECT_REFUSED("claims a header of 18446744073709551608 bytes");
    put_bytes("\0\0\0\0\0\0\0\x80{}", 10);
    EXPECT_REFUSED("claims a header of 9223372036854775808 bytes");
    put_bytes("\2\0\0\0\1\0\0\0{}", 10); /* 2 in 32 bits */
    EXPECT_REFUSED("claims a header of 4294967298 bytes");
    put_bytes("A text file of some other kind.\n", 32);
    EXPECT_REFUSED("not a safetensors file?");
}
END_TEST

START_TEST(header_limit) {
    put_file("{}", 2, 0);
    ck_assert_int_eq(truncate(path, 200000000), 0); /* holes, no disk space */
    FILE *f = fopen(path, "r+b");
    uint64_t length = 100000001;
    ck_assert_uint_eq(fwrite(&length, 8, 1, f), 1);
    ck_assert_int_eq(fclose(f), 0);
    EXPECT_REFUSED("has a header of 100000001 bytes, at most 100000000");
}
END_TEST

START_TEST(header_is_not_json) {
    expect_header_refused("[]", 0, "does not begin with '{'");
    expect_header_refused(" {}", 0, "does not begin with '{'");
    expect_header_refused("\xef\xbb\xbf{}", 0, "does not begin with '{'");
    expect_header_refused("{", 0, "not valid JSON at its byte 1");
    expect_header_refused("{\"a\":", 0, "not valid JSON");
    expect_header_refused("{\"a\"}", 0, "not valid JSON");
    expect_header_refused("{}}", 0, "not valid JSON");
    expect_header_refused("{} {}", 0, "not valid JSON");
    expect_header_refused("{\"a\":1,}", 0, "not valid JSON");
    expect_header_refused("{'a':1}", 0, "not valid JSON");
    expect_header_refused("{\"a\":NaN}", 0, "not valid JSON");
    expect_header_refused("{\"a\":01}", 0, "not valid JSON");
    expect_header_refused("{\"\xff\":1}", 0, "not valid JSON");
    expect_header_refused("{\"\xc0\xaf\":1}", 0, "not valid JSON");
    expect_header_refused("{\"\\ud800\":1}", 0, "not valid JSON");
    expect_header_refused("{\"a\n\":1}", 0, "not valid JSON");
    put_file("{}\0\0", 4, 0);
    EXPECT_REFUSED("not valid JSON");
    char deep[8000];
    memset(deep, '[', sizeof deep);
    memcpy(deep, "{\"a\":", 5);
    put_file(deep, sizeof deep, 0);
    EXPECT_REFUSED("not valid JSON");
}
END_TEST

/* A name cut at the NUL would be another name: "a" here, which could even be in the file as well. */
START_TEST(nul_in_words) {
    static const char good[] = "\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]";
    char header[300];
    snprintf(header, sizeof header, "{\"a\\u0000b\":{%s}}", good);
    expect_header_refused(header, 1, "NUL character");
    snprintf(header, sizeof header, "{\"a\":{%s,\"x\\u0000\":1}}", good);
    expect_header_refused(header, 1, "NUL character");
    snprintf(header, sizeof header, "{\"a\":{%s},\"__metadata__\":{\"k\":\"v\\u0000w\"}}", good);
    expect_header_refused(header, 1, "NUL character");
    expect_header_refused("{\"a\":{\"dtype\":\"U8\\u0000\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1,
                          "NUL character");
    put_file("{\"a\0b\":1}", 9, 0);
    EXPECT_REFUSED("not valid JSON");
}
END_TEST

#define ENTRY(begin, end) "{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[" #begin "," #end "]}"

START_TEST(repeated_names) {
    /* byte for byte the file of the report */
    static const char reported[] = "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},\"a\":{"
                                   "\"dtype\":\"F32\",\"shape\":[1],"
                                   "\"data_offsets\":[4,8]}}";
    ck_assert_uint_eq(strlen(reported), 107);
    expect_header_refused(reported, 8, "the name 'a' is repeated");
    expect_header_refused("{\"a\":" ENTRY(0, 4) ",\"\\u0061\":" ENTRY(4, 8) "}", 8, "the name 'a' is repeated");
    expect_header_refused("{\"\\u0061\":" ENTRY(0, 4) ",\"a\":" ENTRY(4, 8) "}", 8, "the name 'a' is repeated");
    expect_header_refused("{\"\":" ENTRY(0, 4) ",\"\":" ENTRY(4, 8) "}", 8, "the name '' is repeated");
    /* quotes, braces and backslashes inside words must not lead the search for the name astray */
    expect_header_refused(
        "{\"}\\\"{\\\\\":" ENTRY(0, 4) ",\"b\":" ENTRY(4, 8) ",\"}\\\"{\\\\\":" ENTRY(8, 12) "}", 12,
        "the name '}\"{\\' is repeated");
    expect_header_refused("{\"model.layers.11.attention.wq.weight\":" ENTRY(0, 4) ",\"{\":" ENTRY(
                              4, 8) ",\"model.layers.11.attention.wq.weight\" : " ENTRY(8, 12) "}",
                          12, "the name 'model.layers.11.attention.wq.weight' is repeated");
    expect_header_refused("{\"__metadata__\":{},\"__metadata__\":{}}", 0,
                          "the name '__metadata__' is repeated");
    /* the same bytes twice are no excuse */
    expect_header_refused("{\"a\":" ENTRY(0, 4) ",\"a\":" ENTRY(0, 4) "}", 4, "the name 'a' is repeated");
}
END_TEST

START_TEST(repeated_keys) {
    expect_header_refused(
        "{\"a\":" ENTRY(0, 4) ",\"t\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8],"
                              "\"dtype\":\"F32\"}}",
        8, "in 't' the key 'dtype' is repeated");
    expect_header_refused(
        "{\"t\":{\"shape\":[1],\"dtype\":\"F32\",\"data_offsets\":[0,4],\"sh\\u0061pe\":[1]}}", 4,
        "in 't' the key 'shape' is repeated");
    expect_header_refused("{\"a\":" ENTRY(0, 4) ",\"__metadata__\":{\"k\":\"1\",\"k\":\"1\"}}", 4,
                          "in '__metadata__' the key 'k' is repeated");
}
END_TEST

START_TEST(long_and_strange_names_in_sentences) {
    char header[2000], name[1000];
    memset(name, 'n', sizeof name);
    name[sizeof name - 1] = 0;
    snprintf(header, sizeof header, "{\"%s\":1}", name);
    put_file(header, strlen(header), 0);
    EXPECT_REFUSED("tensor 'nnnn", "...'", "got 1");
    for (int i = 0; i + 2 < (int)sizeof name; i += 2) memcpy(name + i, "\xc3\xa9", 2);
    snprintf(header, sizeof header, "{\"x%s\":1}", name);
    put_file(header, strlen(header), 0);
    EXPECT_REFUSED("\xc3\xa9...'", "got 1");
    expect_header_refused("{\"a\\nb\\u001b\":1}", 0, "tensor 'a\\x0ab\\x1b'");
}
END_TEST

START_TEST(bad_metadata) {
    expect_header_refused("{\"__metadata__\":[]}", 0,
                          "__metadata__: expected an object of strings, got a list");
    expect_header_refused("{\"__metadata__\":null}", 0,
                          "__metadata__: expected an object of strings, got null");
    expect_header_refused("{\"__metadata__\":\"x\"}", 0, "got a string");
    expect_header_refused("{\"__metadata__\":{\"a\":\"b\",\"k\":1}}", 0, "'k' must be a string, got 1");
    expect_header_refused("{\"__metadata__\":{\"k\":{}}}", 0, "'k' must be a string, got an object");
    expect_header_refused("{\"__metadata__\":{\"k\":true}}", 0, "'k' must be a string, got a truth value");
    /* an entry that looks like a tensor is not one under this name */
    expect_header_refused("{\"__metadata__\":" ENTRY(0, 4) "}", 4, "must be a string, got a list");
}
END_TEST

START_TEST(bad_entries) {
    expect_header_refused("{\"t\":[]}", 0, "tensor 't': expected an object with dtype, shape and data_offsets");
    expect_header_refused("{\"t\":null}", 0, "got null");
    expect_entry_refused("\"shape\":[4],\"data_offsets\":[4,8]", "'dtype' is missing");
    expect_entry_refused("\"dtype\":\"U8\",\"data_offsets\":[4,8]", "'shape' is missing");
    expect_entry_refused("\"dtype\":\"U8\",\"shape\":[4]", "'data_offsets' is missing");
    expect_entry_refused("\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[4,8],\"strides\":[1]",
                         "unknown key 'strides'");
    expect_entry_refused("\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[4,8],\"Dtype\":\"U8\"",
                         "unknown key 'Dtype'");
}
END_TEST

/* Dtypes that are not read are listed in the order of their data, beside those that are. */
START_TEST(unread_dtypes) {
    static const struct {
        const char *dtype;
        int bytes;
    } known[] = {{"F8_E4M3", 6}, {"F8_E5M2", 6}, {"F8_E8M0", 6}, {"F4", 3}, {"F6_E2M3", 5}, {"C64", 48}},
      unknown[] = {{"f32", 1}, {"F32 ", 7}, {"", 0}, {"F3", 2}, {"\\u001b[31m", 5}};
    char header[300], words[100];
    for (int i = 0; i < 6 + 5; i++) {
        const char *dtype = i < 6 ? known[i].dtype : unknown[i - 6].dtype;
        int bytes = i < 6 ? known[i].bytes : unknown[i - 6].bytes;
        for (int off = 0; off < 2; off++) {
            snprintf(header, sizeof header,
                     "{\"z\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[%d,%d]},"
                     "\"t\":{\"dtype\":\"%s\",\"shape\":[2,3],\"data_offsets\":[4,%d]},"
                     "\"good\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}",
                     4 + bytes + off, 5 + bytes + off, dtype, 4 + bytes + off);
            put_file(header, strlen(header), (size_t)(5 + bytes + off));
            if (off && i < 6) {
                snprintf(words, sizeof words, "tensor 't': shape [2, 3] of %s has %d bytes, but", dtype, bytes);
                expect_header_refused(header, (size_t)(5 + bytes + off), words);
                continue;
            }
            cg_safetensors *file = open_good();
            ck_assert_int_eq(cg_safetensors_n_entries(file), 3);
            ck_assert_int_eq(cg_safetensors_count(file), 2);
            const cg_entry *e = cg_safetensors_entry(file, 1);
            ck_assert_str_eq(e->name, "t");
            ck_assert_str_eq(e->dtype, i == 10 ? "\x1b[31m" : dtype);
            ck_assert_int_eq(e->bytes, bytes + off);
            ck_assert_ptr_null(e->tensor);
            ck_assert_ptr_null(cg_safetensors_find(file, "t"));
            ck_assert_ptr_eq(cg_safetensors_entry(file, 2)->tensor, cg_safetensors_find(file, "z"));
            ck_assert_ptr_eq(cg_safetensors_entry(file, 2)->tensor, &cg_safetensors_at(file, 1)->tensor);
            cg_safetensors_close(file);
        }
    }
    expect_entry_refused("\"dtype\":\"F4\",\"shape\":[4611686018427387904],\"data_offsets\":[4,8]",
                         "the bytes of shape [4611686018427387904] of F4 do not fit 64 bits");
    expect_entry_refused("\"dtype\":\"X\",\"shape\":[1],\"data_offsets\":[4,9]", "end past the file");
    expect_entry_refused("\"dtype\":\"X\",\"shape\":[1],\"data_offsets\":[6,8]", "leaves a hole of 2 bytes");
}
END_TEST

START_TEST(bad_dtypes) {
    expect_entry_refused("\"dtype\":0,\"shape\":[1],\"data_offsets\":[4,8]", "dtype must be a string, got 0");
    expect_entry_refused("\"dtype\":null,\"shape\":[1],\"data_offsets\":[4,8]",
                         "dtype must be a string, got null");
}
END_TEST

START_TEST(bad_shapes) {
    static const struct {
        const char *shape, *words;
    } bad[] = {
        {"4", "shape must be a list of numbers, got 4"},
        {"{}", "shape must be a list of numbers, got an object"},
        {"[-4]", "shape must hold whole numbers of at least 0, got -4"},
        {"[-2,-2]", "shape must hold whole numbers of at least 0, got -2"},
        {"[0,-1]", "shape must hold whole numbers of at least 0, got -1"},
        {"[4.0]", "shape must hold whole numbers of at least 0, got 4.0"},
        {"[1.5]", "got 1.5"},
        {"[4e0]", "got 4.0"},
        {"[\"4\"]", "got a string"},
        {"[true]", "got a truth value"},
        {"[[4]]", "got a list"},
        {"[1,1,1,1,1,1,4]", "shape has 7 numbers, at most 6 are supported"},
        {"[9223372036854775807]", "do not fit 64 bits"},
        {"[9223372036854775807,2]", "do not fit 64 bits"},
        {"[4294967296,4294967296]", "do not fit 64 bits"}, /* wraps to 0 */
        {"[4294967297,4294967297,2]", "do not fit 64 bits"},
        {"[4611686018427387905]", "4611686018427387905 bytes"}, /* wraps to 4 when multiplied by 4 */
        {"[2147483648,4,536870912,2]", "do not fit 64 bits"},
        {"[9223372036854775808]", "not valid JSON"},  /* one more than 63 bits */
        {"[18446744073709551620]", "not valid JSON"}, /* 4 in 64 bits */
        {"[3]", "shape [3] of U8 has 3 bytes, but data_offsets [4, 8] have 4"},
        {"[5]", "shape [5] of U8 has 5 bytes"},
        {"[]", "shape [] of U8 has 1 bytes"},
        {"[0]", "shape [0] of U8 has 0 bytes"},
        {"[2,0]", "shape [2, 0] of U8 has 0 bytes"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        char header[300];
        int n = snprintf(header, sizeof header,
                         "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
                         "\"t\":{\"dtype\":\"U8\",\"shape\":%s,\"data_offsets\":[4,8]}}",
                         bad[i].shape);
        put_file(header, (size_t)n, 8);
        EXPECT_REFUSED(bad[i].words);
    }
    expect_entry_refused("\"dtype\":\"F32\",\"shape\":[4611686018427387905],\"data_offsets\":[4,8]",
                         "do not fit 64 bits");
    expect_entry_refused("\"dtype\":\"F64\",\"shape\":[1],\"data_offsets\":[4,8]",
                         "shape [1] of F64 has 8 bytes");
}
END_TEST

START_TEST(bad_offsets) {
    static const struct {
        const char *offsets, *words;
    } bad[] = {
        {"4", "data_offsets must be a list of numbers, got 4"},
        {"{\"begin\":4}", "data_offsets must be a list of numbers, got an object"},
        {"[]", "data_offsets has 0 numbers, expected 2"},
        {"[4]", "data_offsets has 1 numbers, expected 2"},
        {"[4,8,8]", "data_offsets has 3 numbers, expected 2"},
        {"[4,8,8,8]", "data_offsets has 4 numbers"},
        {"[8,4]", "data_offsets [8, 4] end before they begin"},
        {"[-4,0]", "data_offsets must hold whole numbers of at least 0, got -4"},
        {"[4,-8]", "data_offsets must hold whole numbers of at least 0, got -8"},
        {"[4.0,8]", "got 4.0"},
        {"[4,8.5]", "got 8.5"},
        {"[4,\"8\"]", "got a string"},
        {"[4,null]", "got null"},
        {"[4,9]", "data_offsets [4, 9] have 5"},
        {"[4,7]", "data_offsets [4, 7] have 3"},
        {"[5,9]", "end past the file, which has 8 bytes of data"},
        {"[9223372036854775803,9223372036854775807]", "end past the file"},
        {"[4294967300,4294967304]", "end past the file"}, /* 4 and 8 in 32 bits */
        {"[18446744073709551612,0]", "not valid JSON"},   /* -4 in 64 bits */
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        char header[300];
        int n = snprintf(header, sizeof header,
                         "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
                         "\"t\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":%s}}",
                         bad[i].offsets);
        put_file(header, (size_t)n, 8);
        EXPECT_REFUSED(bad[i].words);
    }
}
END_TEST

/* The file of the report claims 4 MB and has 4 bytes; nothing of the claimed size may be allocated. */
START_TEST(shape_and_range_disagree) {
#ifndef __SANITIZE_ADDRESS__ /* which needs terabytes of address space */
    struct rlimit limit;
    ck_assert_int_eq(getrlimit(RLIMIT_AS, &limit), 0);
    struct rlimit small = {.rlim_cur = 64 << 20, .rlim_max = limit.rlim_max};
    ck_assert_int_eq(setrlimit(RLIMIT_AS, &small), 0);
#endif
    static const char reported[] = "{\"t\":{\"dtype\":\"F32\",\"shape\":[1000,1000],\"data_offsets\":[0,4]}}";
    expect_header_refused(reported, 4,
                          "shape [1000, 1000] of F32 has 4000000 bytes, but data_offsets [0, 4] have 4");
    expect_header_refused("{\"t\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,65536]}}", 4,
                          "shape [1] of F32 has 4 bytes, but data_offsets [0, 65536] have 65536");
    expect_header_refused(
        "{\"t\":{\"dtype\":\"F32\",\"shape\":[1000000,1000000],\"data_offsets\":[0,4000000000000]}}", 4,
        "end past the file, which has 4 bytes of data");
#ifndef __SANITIZE_ADDRESS__
    ck_assert_int_eq(setrlimit(RLIMIT_AS, &limit), 0);
#endif
}
END_TEST

START_TEST(bad_places) {
    expect_header_refused("{\"a\":" ENTRY(0, 4) ",\"b\":" ENTRY(0, 4) "}", 4, "tensors 'a' and 'b' overlap");
    expect_header_refused("{\"a\":" ENTRY(0, 4) ",\"b\":" ENTRY(0, 4) "}", 8, "tensors 'a' and 'b' overlap");
    expect_header_refused("{\"b\":" ENTRY(2, 6) ",\"a\":" ENTRY(0, 4) "}", 6,
                          "tensors 'a' and 'b' overlap: the second begins at 2, the first ends at 4");
    expect_header_refused(
        "{\"in\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[2,2]},\"a\":" ENTRY(0, 4) "}", 4,
        "tensors 'a' and 'in' overlap");
    expect_header_refused("{\"a\":" ENTRY(0, 4) ",\"b\":" ENTRY(5, 9) "}", 9,
                          "tensor 'b': it begins at 5, which leaves a hole of 1 bytes");
    expect_header_refused("{\"a\":" ENTRY(4, 8) "}", 8,
                          "tensor 'a': it begins at 4, which leaves a hole of 4 bytes");
    expect_header_refused(
        "{\"a\":" ENTRY(0, 4) ",\"z\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[6,6]}}", 6,
        "tensor 'z': it begins at 6, which leaves a hole of 2 bytes");
    expect_header_refused("{\"a\":" ENTRY(0, 4) "}", 5, "1 bytes follow the last tensor");
    expect_header_refused("{}", 3, "3 bytes follow the last tensor");
    expect_header_refused("{\"a\":" ENTRY(0, 4) ",\"b\":" ENTRY(4, 8) "}", 7, "is it cut?");
}
END_TEST

static float floats[6] = {1.5f, -2, 3, 4, 5, 6};
static double doubles[2] = {0.1, -0.2};
static int32_t ints[3] = {-1, 2, INT32_MIN};
static int64_t longs[1] = {INT64_MIN};
static uint16_t halves[3] = {0x3f80, 0x4000, 0xffff};
static unsigned char bytes[5] = {0, 1, 2, 254, 255};

#define N_MIXED 9
static void mixed_tensors(cg_named_tensor *t) {
    const cg_named_tensor all[N_MIXED] = {
        {"u8", {CG_U8, CG_SHAPE(5), bytes}},
        {"f32", {CG_F32, CG_SHAPE(2, 3), floats}},
        {"bf16", {CG_BF16, CG_SHAPE(3), halves}},
        {"i64", {CG_I64, CG_SHAPE(1, 1, 1, 1, 1, 1), longs}},
        {"i32", {CG_I32, CG_SHAPE(3), ints}},
        {"none", {CG_F32, CG_SHAPE(3, 0), NULL}},
        {"f16", {CG_F16, CG_SHAPE(1, 3), halves}},
        {"scalar", {CG_F64, {0}, doubles}},
        {"f64 \"\\/\n\xc3\xa9", {CG_F64, CG_SHAPE(2), doubles}},
    };
    memcpy(t, all, sizeof all);
}
static const char *const mixed_metadata[][2] = {{"step", "12"}, {"a \"quoted\" key", ""}};

static void write_good(const cg_named_tensor *t, int n, const char *const (*metadata)[2], int n_metadata) {
    cg_error error = {0};
    ck_assert_msg(cg_safetensors_write(path, t, n, metadata, n_metadata, &error), "%s", error.text);
    ck_assert_int_eq(error.code, CG_OK);
}

START_TEST(round_trip) {
    cg_named_tensor t[N_MIXED];
    mixed_tensors(t);
    write_good(t, N_MIXED, mixed_metadata, 2);
    cg_safetensors *file = open_good();
    ck_assert_int_eq(cg_safetensors_count(file), N_MIXED);
    for (int i = 0; i < N_MIXED; i++) {
        const cg_tensor *got = cg_safetensors_find(file, t[i].name);
        ck_assert_msg(got != NULL, "%s is lost", t[i].name);
        ck_assert_int_eq(got->dtype, t[i].tensor.dtype);
        ck_assert(cg_shape_equal(&got->shape, &t[i].tensor.shape));
        size_t n = (size_t)cg_tensor_bytes(got->dtype, &got->shape);
        if (n > 0) ck_assert_mem_eq(got->data, t[i].tensor.data, n);
        ck_assert_uint_eq((uintptr_t)got->data % cg_dtype_bytes(got->dtype), 0);
    }
    for (int i = 1; i < N_MIXED; i++) /* larger elements first */
        ck_assert_uint_ge(cg_dtype_bytes(cg_safetensors_at(file, i - 1)->tensor.dtype),
                          cg_dtype_bytes(cg_safetensors_at(file, i)->tensor.dtype));
    ck_assert_str_eq(cg_safetensors_metadata(file, "step"), "12");
    ck_assert_str_eq(cg_safetensors_metadata(file, "a \"quoted\" key"), "");
    cg_safetensors_close(file);
}
END_TEST

/* The exact bytes: the header's length is a multiple of 8, so the data begins on one; order as given. */
START_TEST(written_bytes) {
    cg_named_tensor t[] = {{"b", {CG_U8, CG_SHAPE(2), "\7\10"}},
                           {"f", {CG_F32, {0}, "\1\2\3\4"}},
                           {"c", {CG_U8, CG_SHAPE(1), "\11"}}};
    static const char *const metadata[][2] = {{"k", "v"}};
    static const char expected[] = "\xb8\0\0\0\0\0\0\0"
                                   "{\"__metadata__\":{\"k\":\"v\"},"
                                   "\"f\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]},"
                                   "\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[4,6]},"
                                   "\"c\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[6,7]}}  "
                                   "\1\2\3\4\7\10\11";
    for (int again = 0; again < 2; again++) {
        write_good(t, 3, metadata, 1);
        char *data;
        size_t n;
        ck_assert(cg_file_read(path, 1 << 20, &data, &n, NULL));
        ck_assert_uint_eq(n, sizeof expected - 1);
        ck_assert_mem_eq(data, expected, n);
        free(data);
    }
    write_good(NULL, 0, NULL, 0);
    char *data;
    size_t n;
    ck_assert(cg_file_read(path, 1 << 20, &data, &n, NULL));
    ck_assert_uint_eq(n, 16);
    ck_assert_mem_eq(data, "\10\0\0\0\0\0\0\0{}      ", n);
    free(data);
}
END_TEST

/* A checkpoint is often written over the one that is being read. */
START_TEST(write_over_an_open_file) {
    cg_named_tensor t = {"x", {CG_F64, CG_SHAPE(2), doubles}};
    write_good(&t, 1, NULL, 0);
    cg_safetensors *file = open_good();
    t.tensor = *cg_safetensors_find(file, "x");
    write_good(&t, 1, mixed_metadata, 2);
    ck_assert_mem_eq(t.tensor.data, doubles, sizeof doubles);
    cg_safetensors_close(file);
    file = open_good();
    ck_assert_mem_eq(cg_safetensors_find(file, "x")->data, doubles, sizeof doubles);
    ck_assert_str_eq(cg_safetensors_metadata(file, "step"), "12");
    cg_safetensors_close(file);
}
END_TEST

static void expect_unwritten(const cg_named_tensor *t, int n, const char *const (*metadata)[2], int n_metadata,
                             cg_code code, const char *words) {
    cg_error error = {0};
    ck_assert(!cg_safetensors_write(path, t, n, metadata, n_metadata, &error));
    expect_sentence(&error, code, (const char *const[]){words, NULL});
    ck_assert(!cg_safetensors_write(path, t, n, metadata, n_metadata, NULL));
    ck_assert_int_ne(access(path, F_OK), 0);
}

START_TEST(write_refusals) {
    const cg_tensor x = {CG_U8, CG_SHAPE(1), bytes};
    cg_named_tensor twice[] = {{"a", x}, {"b", x}, {"a", x}};
    expect_unwritten(twice, 3, NULL, 0, CG_BAD_INPUT, "the name 'a' is repeated");
    /* not of one element size, so not neighbours in the file */
    cg_named_tensor apart[] = {{"a", x}, {"a", {CG_F64, CG_SHAPE(1), doubles}}};
    expect_unwritten(apart, 2, NULL, 0, CG_BAD_INPUT, "the name 'a' is repeated");
    const struct {
        cg_named_tensor t;
        const char *words;
    } bad[] = {
        {{"__metadata__", x}, "a tensor cannot have the name '__metadata__'"},
        {{"caf\xe9", x}, "not UTF-8"},
        {{"t", {CG_U8, CG_SHAPE(1), NULL}}, "tensor 't': shape [1] has no data"},
        {{"t", {CG_U8, CG_SHAPE(2, -1), bytes}}, "tensor 't': its dimension 1 has the negative size -1"},
        {{"t", {CG_U8, CG_SHAPE(0, -1), bytes}}, "tensor 't': its dimension 1 has the negative size -1"},
        {{"t", {CG_F64, CG_SHAPE(INT64_C(1) << 60), bytes}},
         "tensor 't': the bytes of shape [1152921504606846976]"},
        {{"t", {CG_DTYPES, CG_SHAPE(1), bytes}}, "tensor 't': dtype number 13 is unknown"},
        {{"t", {(cg_dtype)-1, CG_SHAPE(1), bytes}}, "tensor 't': dtype number -1 is unknown"},
        {{"t", {CG_U8, {.n_dims = 7}, bytes}}, "tensor 't': has 7 dimensions"},
        {{"t", {CG_U8, {.n_dims = -1}, bytes}}, "tensor 't': has -1 dimensions"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        expect_unwritten(&bad[i].t, 1, NULL, 0, CG_BAD_INPUT, bad[i].words);
    const cg_tensor half = {CG_U8, CG_SHAPE(INT64_C(1) << 62), bytes};
    cg_named_tensor too_much[] = {{"a", half}, {"b", half}};
    expect_unwritten(too_much, 2, NULL, 0, CG_BAD_INPUT,
                     "tensor 'b': the bytes up to its end do not fit 64 bits");

    static const char *const repeated[][2] = {{"k", "1"}, {"k", "2"}}, *const not_utf8[][2] = {{"k", "\xff"}};
    expect_unwritten(twice, 1, repeated, 2, CG_BAD_INPUT, "the metadata key 'k' is repeated");
    expect_unwritten(twice, 1, not_utf8, 1, CG_BAD_INPUT, "the metadata key 'k' cannot be written");
}
END_TEST

/* A file that grows: its head is written anew in the same bytes. */
START_TEST(head_of_a_growing_file) {
    enum { HEAD = 512 };
    char file_bytes[HEAD + sizeof doubles];
    cg_error error = {0};
    for (int n = 0; n <= 2; n++) {
        const cg_named_tensor t = {"x", {CG_F64, CG_SHAPE(n), NULL}};
        char *head = cg_safetensors_head(&t, 1, mixed_metadata, 2, HEAD, &error);
        if (!head) ck_abort_msg("%s", error.text);
        memcpy(file_bytes, head, HEAD);
        memcpy(file_bytes + HEAD, doubles, (size_t)n * sizeof *doubles);
        put_bytes(file_bytes, HEAD + (size_t)n * sizeof *doubles);
        cg_safetensors *file = open_good();
        ck_assert_int_eq(cg_safetensors_find(file, "x")->shape.dims[0], n);
        ck_assert_mem_eq(cg_safetensors_find(file, "x")->data, doubles, (size_t)n * sizeof *doubles);
        ck_assert_str_eq(cg_safetensors_metadata(file, "step"), "12");
        cg_safetensors_close(file);
        free(head);
    }
    const cg_named_tensor t = {"x", {CG_F64, CG_SHAPE(2), NULL}};
    ck_assert_ptr_null(cg_safetensors_head(&t, 1, mixed_metadata, 2, 64, &error));
    ck_assert_int_eq(error.code, CG_BAD_INPUT);
    ck_assert_str_eq(error.text, "the header needs 120 bytes, 64 are set aside for it");
}
END_TEST

START_TEST(write_to_no_place) {
    cg_named_tensor t = {"x", {CG_F64, CG_SHAPE(2), doubles}};
    put_bytes("x", 1);
    strcat(path, "/below");
    expect_unwritten(&t, 1, NULL, 0, CG_BAD_INPUT, strerror(ENOTDIR));
}
END_TEST

START_TEST(disk_full_keeps_the_old_file) {
    cg_named_tensor t = {"x", {CG_F64, CG_SHAPE(2), doubles}};
    write_good(&t, 1, NULL, 0);
    static double large[10000];
    cg_named_tensor more = {"x", {CG_F64, CG_SHAPE(10000), large}};
    struct rlimit limit;
    ck_assert_int_eq(getrlimit(RLIMIT_FSIZE, &limit), 0);
    struct rlimit small = {.rlim_cur = 5000, .rlim_max = limit.rlim_max};
    signal(SIGXFSZ, SIG_IGN);
    cg_error error = {0};
    ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &small), 0);
    bool ok = cg_safetensors_write(path, &more, 1, NULL, 0, &error);
    ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &limit), 0);
    ck_assert(!ok);
    expect_sentence(&error, CG_FAILED, (const char *const[]){strerror(EFBIG), NULL});
    cg_safetensors *file = open_good();
    ck_assert(cg_shape_equal(&cg_safetensors_find(file, "x")->shape, &t.tensor.shape));
    cg_safetensors_close(file);
    char tmp[100];
    snprintf(tmp, sizeof tmp, "%s.tmp", path);
    ck_assert_int_ne(access(tmp, F_OK), 0);
}
END_TEST

/* A file cut anywhere is refused; one with any byte changed is refused or is a whole file inside its bounds. */
START_TEST(cut_and_damaged_files) {
    cg_named_tensor t[N_MIXED];
    mixed_tensors(t);
    write_good(t, N_MIXED, mixed_metadata, 2);
    char *whole;
    size_t n;
    ck_assert(cg_file_read(path, 1 << 20, &whole, &n, NULL));
    choose_path();
    for (size_t cut = 0; cut < n; cut++) {
        put_bytes(whole, cut);
        EXPECT_REFUSED("");
    }
    int refused = 0, accepted = 0, sum = 0;
    static const unsigned char flips[] = {1, 2, 4, 0x10, 0x20, 0x80, 0xff};
    for (size_t i = 0; i < n; i++)
        for (size_t k = 0; k < sizeof flips; k++) {
            whole[i] ^= (char)flips[k];
            put_bytes(whole, n);
            whole[i] ^= (char)flips[k];
            cg_error error = {0};
            cg_safetensors *file = cg_safetensors_open(path, &error);
            if (!file) {
                refused++;
                expect_sentence(&error, CG_BAD_INPUT, (const char *const[]){NULL});
                continue;
            }
            accepted++;
            int64_t total = 0;
            for (int j = 0; j < cg_safetensors_count(file); j++) {
                const cg_tensor *x = &cg_safetensors_at(file, j)->tensor;
                int64_t x_bytes = cg_tensor_bytes(x->dtype, &x->shape);
                for (int64_t b = 0; b < x_bytes; b++) sum += ((unsigned char *)x->data)[b]; /* stays mapped */
                total += x_bytes;
            }
            ck_assert_int_le(total, (int64_t)n);
            cg_safetensors_close(file);
        }
    ck_assert_int_gt(refused, 1000);
    ck_assert_int_gt(accepted, 100); /* changed data and letters of names */
    ck_assert_int_gt(sum, 0);
    free(whole);
}
END_TEST

START_TEST(an_older_error_stays) {
    cg_error error = {0};
    cg_fail(&error, CG_FAILED, "the cause");
    ck_assert_ptr_null(cg_safetensors_open(path, &error));
    ck_assert_str_eq(error.text, "the cause");
}
END_TEST

static int remove_entry(const char *entry, const struct stat *status, int type, struct FTW *place) {
    (void)status, (void)type, (void)place;
    return remove(entry);
}

int main(void) {
    if (!mkdtemp(root)) return EXIT_FAILURE;
    Suite *suite = suite_create("core_safetensors");
    TCase *good = tcase_create("good"), *bad = tcase_create("bad"), *write = tcase_create("write");
    tcase_add_checked_fixture(good, choose_path, NULL);
    tcase_add_checked_fixture(bad, choose_path, NULL);
    tcase_add_checked_fixture(write, choose_path, NULL);
    tcase_set_timeout(bad, 60);
    tcase_add_test(good, open_plain_file);
    tcase_add_test(good, open_smallest_files);
    tcase_add_test(good, names_are_decoded);
    tcase_add_test(bad, not_a_file);
    tcase_add_test(bad, length_lies);
    tcase_add_test(bad, header_limit);
    tcase_add_test(bad, header_is_not_json);
    tcase_add_test(bad, nul_in_words);
    tcase_add_test(bad, repeated_names);
    tcase_add_test(bad, repeated_keys);
    tcase_add_test(bad, long_and_strange_names_in_sentences);
    tcase_add_test(bad, bad_metadata);
    tcase_add_test(bad, bad_entries);
    tcase_add_test(bad, bad_dtypes);
    tcase_add_test(bad, unread_dtypes);
    tcase_add_test(bad, bad_shapes);
    tcase_add_test(bad, bad_offsets);
    tcase_add_test(bad, shape_and_range_disagree);
    tcase_add_test(bad, bad_places);
    tcase_add_test(bad, cut_and_damaged_files);
    tcase_add_test(bad, an_older_error_stays);
    tcase_add_test(write, round_trip);
    tcase_add_test(write, written_bytes);
    tcase_add_test(write, write_over_an_open_file);
    tcase_add_test(write, write_refusals);
    tcase_add_test(write, head_of_a_growing_file);
    tcase_add_test(write, write_to_no_place);
    tcase_add_test(write, disk_full_keeps_the_old_file);
    suite_add_tcase(suite, good);
    suite_add_tcase(suite, bad);
    suite_add_tcase(suite, write);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_ENV);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    nftw(root, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
    return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
