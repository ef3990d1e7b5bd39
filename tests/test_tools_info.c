/* csagrad info from outside: S41, S42 and S43 as a user meets them, lists, JSON, exit codes. */
#include <check.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <jansson.h>

static char folder[] = "/tmp/csagrad_info_XXXXXX";

typedef struct outcome {
    int code;
    char out[8192], err[8192];
} outcome;

static void put(const char *name, const void *bytes, size_t n) {
    char path[200];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "wb");
    ck_assert_ptr_nonnull(file);
    ck_assert_uint_eq(fwrite(bytes, 1, n, file), n);
    ck_assert_int_eq(fclose(file), 0);
}

static void slurp(const char *name, char *text, size_t room) {
    char path[200];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "rb");
    ck_assert_ptr_nonnull(file);
    text[fread(text, 1, room - 1, file)] = 0;
    fclose(file);
}

static outcome info(const char *arguments) {
    outcome o = {0};
    char command[600];
    snprintf(command, sizeof command, "cd %s && '%s' info %s >out 2>err", folder, CSAGRAD_PROGRAM, arguments);
    int status = system(command);
    ck_assert(WIFEXITED(status));
    o.code = WEXITSTATUS(status);
    slurp("out", o.out, sizeof o.out);
    slurp("err", o.err, sizeof o.err);
    return o;
}

/* Exit code 2, nothing on stdout, and one line with these words on stderr; the same with --json. */
static void expect_refused(const char *arguments, const char *words) {
    for (int json = 0; json < 2; json++) {
        char with[300];
        snprintf(with, sizeof with, "%s%s", arguments, json ? " --json" : "");
        outcome o = info(with);
        ck_assert_msg(o.code == 2, "%s: exit code %d, %s", arguments, o.code, o.err);
        ck_assert_str_eq(o.out, "");
        ck_assert_msg(!strncmp(o.err, "csagrad info: ", 14), "%s", o.err);
        ck_assert_msg(strstr(o.err, words) != NULL, "'%s' is not in: %s", words, o.err);
        ck_assert_ptr_eq(strchr(o.err, '\n'), o.err + strlen(o.err) - 1);
    }
}

/* Header length and header as the reports give them, then n_data bytes of 0. */
static void put_safetensors(const char *name, int length, const char *header, size_t n_data) {
    char bytes[512] = {(char)length};
    size_t n = strlen(header);
    ck_assert_uint_eq(n, (size_t)length);
    memcpy(bytes + 8, header, n);
    put(name, bytes, 8 + n + n_data);
}

START_TEST(reported_safetensors) {
    put_safetensors(
        "s41", 107,
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},\"a\":{\"dtype\":\"F32\",\"shape\":"
        "[1],\"data_offsets\":[4,8]}}",
        8);
    expect_refused("s41", "s41: the name 'a' is repeated");
    put_safetensors("s42", 62, "{\"t\":{\"dtype\":\"F32\",\"shape\":[1000,1000],\"data_offsets\":[0,4]}}", 4);
    expect_refused(
        "s42", "s42: tensor 't': shape [1000, 1000] of F32 has 4000000 bytes, but data_offsets [0, 4] have 4");
    put_safetensors("s42b", 58, "{\"t\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,65536]}}", 4);
    expect_refused("s42b",
                   "s42b: tensor 't': shape [1] of F32 has 4 bytes, but data_offsets [0, 65536] have 65536");
}
END_TEST

/* An npy file of version 1 whose header is the dict and a newline. */
static void put_npy(const char *name, const char *dict, const void *data, size_t n) {
    char bytes[512] = "\x93NUMPY\1\0";
    size_t length = strlen(dict);
    bytes[8] = (char)(length + 1);
    memcpy(bytes + 10, dict, length);
    bytes[10 + length] = '\n';
    memcpy(bytes + 11 + length, data, n);
    put(name, bytes, 11 + length + n);
}

START_TEST(reported_npy) {
    put_npy("big.npy", "{'descr': '>f4', 'fortran_order': False, 'shape': (2,)}", "\x3f\x80\0\0\x40\0\0\0", 8);
    outcome o = info("big.npy --values 5");
    ck_assert_int_eq(o.code, 0);
    ck_assert_str_eq(o.err, "");
    ck_assert_str_eq(o.out, "npy, 1 tensor\n\n"
                            "name  dtype  shape  bytes\n"
                            "-------------------------\n"
                            "big   f32    [2]        8\n\n"
                            "big: 1 2\n");
    put_npy("f.npy", "{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296)}", "12345678",
            8);
    expect_refused("f.npy", "f.npy: the bytes of shape [4294967296, 4294967296] of f32 do not fit 64 bits");
    put_npy("g.npy", "{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", "12345678", 8);
    o = info("g.npy");
    ck_assert_int_eq(o.code, 0);
    ck_assert_ptr_nonnull(strstr(o.out, "g     |O     [1]        8\n"));
    ck_assert_ptr_nonnull(strstr(o.out, "\ng: elements |O are not read: Python objects"));
    o = info("g.npy --json --values 2");
    ck_assert_ptr_nonnull(strstr(o.out, "\"read\": false"));
    put("e.npy", "\x93NUMPY\1\0\xff\x7f{}", 12);
    expect_refused("e.npy", "e.npy: claims 32777 bytes up to the end of its npy header, but has 12");
    put_npy("none.npy", "{'descr': '<f8', 'fortran_order': False, 'shape': (0, 4)}", "", 0);
    o = info("none.npy --values 5");
    ck_assert_int_eq(o.code, 0);
    ck_assert_ptr_nonnull(strstr(o.out, "none  f64    [0, 4]      0"));
    put_npy("odd.npy", "{'descr': '<f8', 'fortran_order': False, 'shape': (4,)}",
            "\0\0\0\0\0\0\xf8\x7f\0\0\0\0\0\0\xf0\x7f\0\0\0\0\0\0\xf0\xff\0\0\0\0\0\0\xf0\x3f", 32);
    o = info("odd.npy --values 4 --json");
    ck_assert_int_eq(o.code, 0);
    json_t *root = json_loads(o.out, JSON_REJECT_DUPLICATES, NULL);
    json_t *values = json_object_get(json_array_get(json_object_get(root, "tensors"), 0), "values");
    ck_assert_uint_eq(json_array_size(values), 4);
    for (size_t i = 0; i < 3; i++) /* JSON has no word for these */
        ck_assert_str_eq(json_string_value(json_array_get(values, i)),
                         ((const char *[]){"nan", "inf", "-inf"})[i]);
    ck_assert(json_real_value(json_array_get(values, 3)) == 1);
    json_decref(root);
}
END_TEST

START_TEST(lists) {
    outcome o = info(TEST_DATA_DIR "/sbhd_sparse_mean.safetensors --json");
    ck_assert_int_eq(o.code, 0);
    json_t *root = json_loads(o.out, JSON_REJECT_DUPLICATES, NULL);
    ck_assert_ptr_nonnull(root);
    ck_assert_str_eq(json_string_value(json_object_get(root, "format")), "safetensors");
    json_t *metadata = json_object_get(root, "metadata"), *tensors = json_object_get(root, "tensors");
    ck_assert_str_eq(json_string_value(json_object_get(metadata, "layout")), "sbhd");
    json_int_t bytes = 0;
    for (size_t i = 0; i < json_array_size(tensors); i++) {
        json_t *t = json_array_get(tensors, i);
        bytes += json_integer_value(json_object_get(t, "bytes"));
        if (!strcmp(json_string_value(json_object_get(t, "name")), "in.sink")) {
            ck_assert_str_eq(json_string_value(json_object_get(t, "dtype")), "f32");
            ck_assert_uint_eq(json_array_size(json_object_get(t, "shape")), 1);
        }
    }
    ck_assert_int_gt(bytes, 200000);
    json_decref(root);
    o = info(TEST_DATA_DIR "/sbhd_sparse_mean.safetensors");
    ck_assert_int_eq(o.code, 0);
    ck_assert_ptr_nonnull(strstr(o.out, "\nmetadata\n"));
    ck_assert_ptr_nonnull(strstr(o.out, "layout = sbhd\n"));
}
END_TEST

/* Elements of every kind beside those that are not read; names that are wide, joined, or obeyed by
 * terminals. */
START_TEST(every_kind) {
    static const struct {
        const char *name, *dtype, *shape;
        int bytes;
    } list[] = {{"日本", "U64", "[2]", 16},      {"e\xcc\x81", "I16", "[2]", 4},
                {"\xc2\x9b!", "BOOL", "[2]", 2}, {"a\xe2\x80\xaez", "F8_E4M3", "[2]", 2},
                {"plain", "X9", "[7]", 3},       {"c", "C64", "[1]", 8}};
    char header[800] = "{", bytes[900] = {0};
    int n = 1, end = 0;
    for (int i = 0; i < 6; i++) {
        n += snprintf(header + n, sizeof header - (size_t)n,
                      "%s\"%s\":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[%d,%d]}", i ? "," : "",
                      list[i].name, list[i].dtype, list[i].shape, end, end + list[i].bytes);
        end += list[i].bytes;
    }
    n += snprintf(header + n, sizeof header - (size_t)n, "}");
    memcpy(bytes, (uint64_t[]){(uint64_t)n}, 8);
    memcpy(bytes + 8, header, (size_t)n);
    memcpy(bytes + 8 + n, (uint64_t[]){7, UINT64_MAX}, 16);
    memcpy(bytes + 8 + n + 16, (int16_t[]){-3, 300}, 4);
    bytes[8 + n + 21] = 2;
    put("kinds", bytes, (size_t)(8 + n + end));
    outcome o = info("kinds --values 3");
    ck_assert_str_eq(o.err, "");
    ck_assert_str_eq(o.out, "safetensors, 6 tensors\n\n"
                            "name      dtype    shape  bytes\n"
                            "-------------------------------\n"
                            "日本      u64      [2]       16\n"
                            "e\xcc\x81         i16      [2]        4\n"
                            "\\u009b!   bool     [2]        2\n"
                            "a\\u202ez  F8_E4M3  [2]        2\n"
                            "plain     X9       [7]        3\n"
                            "c         C64      [1]        8\n\n"
                            "日本: 7 18446744073709551615\n"
                            "e\xcc\x81: -3 300\n"
                            "\\u009b!: 0 1\n");
    o = info("kinds --json --values 3");
    json_t *root = json_loads(o.out, JSON_REJECT_DUPLICATES, NULL), *tensors = json_object_get(root, "tensors");
    ck_assert_uint_eq(json_array_size(tensors), 6);
    for (size_t i = 0; i < 6; i++) {
        json_t *t = json_array_get(tensors, i);
        ck_assert_str_eq(json_string_value(json_object_get(t, "name")), list[i].name);
        ck_assert_int_eq(json_integer_value(json_object_get(t, "bytes")), list[i].bytes);
        ck_assert(json_is_true(json_object_get(t, "read")) == (i < 3));
        ck_assert((json_object_get(t, "values") != NULL) == (i < 3));
    }
    json_t *wide = json_object_get(json_array_get(tensors, 0), "values");
    ck_assert_int_eq(json_integer_value(json_array_get(wide, 0)), 7);
    ck_assert_str_eq(json_string_value(json_array_get(wide, 1)), "18446744073709551615");
    ck_assert(json_is_true(json_array_get(json_object_get(json_array_get(tensors, 2), "values"), 1)));
    json_decref(root);
}
END_TEST

/* ---- indexes and folders ---- */

static void make_folder(const char *name) {
    char place[200];
    snprintf(place, sizeof place, "%s/%s", folder, name);
    ck_assert_int_eq(mkdir(place, 0700), 0);
}

/* A safetensors file of u8 tensors, each named by one letter and of so many bytes. */
static void put_letters(const char *name, const char *letters, int each) {
    char header[500] = "{", bytes[700] = {0};
    int n = 1, end = 0;
    for (const char *c = letters; *c; c++, end += each)
        n += snprintf(header + n, sizeof header - (size_t)n,
                      "%s\"%c\":{\"dtype\":\"U8\",\"shape\":[%d],\"data_offsets\":[%d,%d]}", end ? "," : "", *c,
                      each, end, end + each);
    n += snprintf(header + n, sizeof header - (size_t)n, "}");
    memcpy(bytes, (uint64_t[]){(uint64_t)n}, 8);
    memcpy(bytes + 8, header, (size_t)n);
    put(name, bytes, (size_t)(8 + n + end));
}

static void put_text(const char *name, const char *text) { put(name, text, strlen(text)); }

/* Exit code 2, one line on stderr that counts the problems and names the first, all of them on stdout. */
static void expect_problems(const char *arguments, const char *const *problems, size_t n) {
    char count[300], with[200];
    snprintf(count, sizeof count, "%zu problem%s, the first: %s", n, n == 1 ? "" : "s", problems[0]);
    outcome o = info(arguments);
    ck_assert_int_eq(o.code, 2);
    ck_assert_msg(strstr(o.err, count) != NULL, "'%s' is not in: %s", count, o.err);
    const char *list = strstr(o.out, "\nproblems\n");
    ck_assert_ptr_nonnull(list);
    for (size_t i = 0; i < n; i++)
        ck_assert_msg(strstr(list, problems[i]) != NULL, "%s: %s", problems[i], o.out);
    snprintf(with, sizeof with, "%s --json", arguments);
    o = info(with);
    ck_assert_int_eq(o.code, 2);
    json_t *root = json_loads(o.out, JSON_REJECT_DUPLICATES, NULL), *all = json_object_get(root, "problems");
    ck_assert_uint_eq(json_array_size(all), n);
    for (size_t i = 0; i < n; i++)
        ck_assert_ptr_nonnull(strstr(json_string_value(json_array_get(all, i)), problems[i]));
    json_decref(root);
}

START_TEST(index_of_shards) {
    static const char index[] = "m/model.safetensors.index.json";
    make_folder("m");
    put_letters("m/1.safetensors", "ab", 3);
    put_letters("m/2.safetensors", "c", 5);
    put_text(index, " {\"metadata\": {\"total_size\": 11}, \"weight_map\": {\"a\": \"1.safetensors\", "
                    "\"b\": \"1.safetensors\", \"c\": \"2.safetensors\"}}");
    const char *const ways[] = {index, "m", "m/"};
    for (int i = 0; i < 3; i++) {
        outcome o = info(ways[i]);
        ck_assert_int_eq(o.code, 0);
        ck_assert_str_eq(o.err, "");
        ck_assert_str_eq(o.out, "index of 2 shards, 3 tensors, 11 bytes\n\n"
                                "file           name  dtype  shape  bytes\n"
                                "----------------------------------------\n"
                                "1.safetensors  a     u8     [3]        3\n"
                                "1.safetensors  b     u8     [3]        3\n"
                                "2.safetensors  c     u8     [5]        5\n");
    }
    outcome o = info("m --json");
    json_t *root = json_loads(o.out, JSON_REJECT_DUPLICATES, NULL), *tensors = json_object_get(root, "tensors");
    ck_assert_str_eq(json_string_value(json_object_get(root, "format")), "index");
    ck_assert_int_eq(json_integer_value(json_object_get(root, "bytes")), 11);
    ck_assert_uint_eq(json_array_size(tensors), 3);
    ck_assert_str_eq(json_string_value(json_object_get(json_array_get(tensors, 2), "file")), "2.safetensors");
    ck_assert_uint_eq(json_array_size(json_object_get(root, "problems")), 0);
    json_decref(root);

    put_text(index, "{\"metadata\": {\"total_size\": 12}, \"weight_map\": {\"a\": \"1.safetensors\", "
                    "\"b\": \"1.safetensors\", \"c\": \"2.safetensors\"}}");
    expect_problems(
        "m",
        (const char *[]){"metadata.total_size of the index is 12, but the tensors that it names have "
                         "11 bytes"},
        1);
    put_text(index,
             "{\"metadata\": {\"total_size\": 12}, \"weight_map\": {\"a\": \"1.safetensors\", \"b\": "
             "\"2.safetensors\", \"d\": \"2.safetensors\", \"e\": \"3.safetensors\", \"f\": \"../m\", \"g\": "
             "\"/1.safetensors\", \"h\": \"..\"}}");
    expect_problems(index,
                    (const char *[]){"1.safetensors holds b, which the index has in 2.safetensors",
                                     "2.safetensors holds c, which the index lacks",
                                     "2.safetensors lacks b, which the index has in it",
                                     "2.safetensors lacks d, which the index has in it",
                                     "m/3.safetensors: cannot be opened: No such file",
                                     "the index names the shard ../m, which is no file beside it",
                                     "the index names the shard /1.safetensors, which is no file beside it",
                                     "the index names the shard .., which is no file beside it"},
                    8);
    put_text(index, "{\"metadata\": {\"total_size\": 8}, \"weight_map\": {\"a\": \"1.safetensors\", \"b\": "
                    "\"2.safetensors\", \"c\": \"2.safetensors\"}}"); /* b is not where it should be */
    expect_problems(index,
                    (const char *[]){"1.safetensors holds b, which the index has in 2.safetensors",
                                     "2.safetensors lacks b, which the index has in it"},
                    2);
    put("m/2.safetensors", "\x40\0\0\0\0\0\0\0{}", 10);
    put_text(index, "{\"metadata\": {\"total_size\": 1.5}, \"weight_map\": {\"c\": \"2.safetensors\"}}");
    expect_problems("m",
                    (const char *[]){"m/2.safetensors: claims a header of 64 bytes",
                                     "metadata.total_size of the index is no whole number"},
                    2);

    put_text("other.json", "{\"weights\": {}}");
    expect_refused("other.json", "other.json: has no object weight_map: is it an index of shards?");
    put_text("other.json", "{\"weight_map\": {\"a\": 1}}");
    expect_refused("other.json", "weight_map has no name of a file for a, expected a string");
    put_text("other.json", "{\"weight_map\": {\"a\": \"x\", \"a\": \"y\"}}");
    expect_refused("other.json", "is not valid JSON at its byte");
    put_text("m/b.safetensors.index.json", "{\"weight_map\": {}}");
    expect_refused("m", "m: has 2 indexes of shards (*.safetensors.index.json), name one of them");
}
END_TEST

START_TEST(folders) {
    make_folder("f");
    expect_refused("f", "f: is a folder without a file of tensors (safetensors, npy or npz)");
    put_text("f/notes.txt", "a text of some length");
    make_folder("f/x.npy"); /* no file */
    put_letters("f/b.bin", "q", 2);
    put_npy("f/a.npy", "{'descr': '|i1', 'fortran_order': False, 'shape': (1,)}", "\xff", 1);
    outcome o = info("f --values 1");
    ck_assert_int_eq(o.code, 0);
    ck_assert_str_eq(o.out, "a.npy: npy, 1 tensor\n\n"
                            "name  dtype  shape  bytes\n"
                            "-------------------------\n"
                            "a     i8     [1]        1\n\n"
                            "a: -1\n\n"
                            "b.bin: safetensors, 1 tensor\n\n"
                            "name  dtype  shape  bytes\n"
                            "-------------------------\n"
                            "q     u8     [2]        2\n\n"
                            "q: 0 ...\n");
    o = info("f --json");
    ck_assert_int_eq(o.code, 0);
    json_t *root = json_loads(o.out, JSON_REJECT_DUPLICATES, NULL), *files = json_object_get(root, "files");
    ck_assert_uint_eq(json_array_size(files), 2);
    ck_assert_str_eq(json_string_value(json_object_get(json_array_get(files, 0), "file")), "a.npy");
    ck_assert_str_eq(json_string_value(json_object_get(json_array_get(files, 1), "format")), "safetensors");
    json_decref(root);
    put_text("f/bad\x1b\xff.npz", "PK\3\4");
    expect_problems("f", (const char *[]){"f/bad\\x1b\\xff.npz: does not end with the end record"}, 1);
}
END_TEST

START_TEST(usage) {
    expect_refused("--values=2", "--values needs a file");
    expect_refused("one two", "one file is wanted, got \"two\" as well");
    expect_refused("absent", "absent: cannot be opened: No such file");
    expect_refused("--values=-1 x", "--values must be an integer from 0 to 1000");
    expect_refused("--vales=1 x", "did you mean --values");
    outcome o = info("--help");
    ck_assert_int_eq(o.code, 0);
    ck_assert_ptr_nonnull(strstr(o.out, "FILE"));
}
END_TEST

int main(void) {
    if (!mkdtemp(folder)) return EXIT_FAILURE;
    Suite *suite = suite_create("tools_info");
    TCase *tcase = tcase_create("tools_info");
    tcase_set_timeout(tcase, 120);
    suite_add_tcase(suite, tcase);
    tcase_add_test(tcase, reported_safetensors);
    tcase_add_test(tcase, reported_npy);
    tcase_add_test(tcase, lists);
    tcase_add_test(tcase, every_kind);
    tcase_add_test(tcase, index_of_shards);
    tcase_add_test(tcase, folders);
    tcase_add_test(tcase, usage);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    char command[100];
    snprintf(command, sizeof command, "rm -r %s", folder);
    return system(command) != 0 || failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
