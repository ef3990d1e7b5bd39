/* The configuration: what every key accepts and refuses, from files and from the command line, and that what is
 * written loads back equal. */
#include <check.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "models/dsv4/config.h"

static char path[] = "test_model_config_XXXXXX"; /* made by main */

static void put(const char *text) {
    FILE *f = fopen(path, "wb");
    ck_assert_ptr_nonnull(f);
    ck_assert_int_ge(fputs(text, f), 0);
    ck_assert_int_eq(fclose(f), 0);
}

static void expect_equal(const cg_config *a, const cg_config *b) {
    char *x = cg_config_json(a), *y = cg_config_json(b);
    ck_assert_ptr_nonnull(x);
    ck_assert_str_eq(x, y);
    free(x), free(y);
}

static cg_config load(const char *text) {
    put(text);
    cg_config config = cg_config_toy();
    cg_error error = {0};
    ck_assert_msg(cg_config_load(&config, path, &error), "%s", error.text);
    ck_assert_int_eq(error.code, CG_OK);
    return config;
}

/* Refused in one sentence with every part (separated by '|'), and nothing changed. */
static void expect_parts(const cg_error *error, const char *parts, const char *input) {
    ck_assert_int_eq(error->code, CG_BAD_INPUT);
    ck_assert_ptr_null(strchr(error->text, '\n'));
    char copy[400];
    snprintf(copy, sizeof copy, "%s", parts);
    for (char *part = strtok(copy, "|"); part; part = strtok(NULL, "|"))
        ck_assert_msg(strstr(error->text, part) != NULL, "%s: '%s' is not in: %s", input, part, error->text);
}

static void refuse_file(const char *text, const char *parts) {
    put(text);
    cg_config config = cg_config_toy(), before = config;
    cg_error error = {0};
    ck_assert_msg(!cg_config_load(&config, path, &error), "accepted: %s", text);
    expect_parts(&error, parts, text);
    ck_assert_msg(strstr(error.text, path) != NULL, "no file name: %s", error.text);
    expect_equal(&config, &before);
}

static void refuse_set(const char *key, const char *text, const char *parts) {
    cg_config config = cg_config_toy(), before = config;
    cg_error error = {0};
    ck_assert_msg(!cg_config_set(&config, key, text, &error), "accepted: %s=%s", key, text);
    expect_parts(&error, parts, text);
    expect_equal(&config, &before);
}

static void accept_set(cg_config *config, const char *key, const char *text) {
    cg_error error = {0};
    ck_assert_msg(cg_config_set(config, key, text, &error), "%s", error.text);
    ck_assert_int_eq(error.code, CG_OK);
}

START_TEST(toy_is_sound) {
    cg_config toy = cg_config_toy();
    cg_error error = {0};
    ck_assert_msg(cg_config_check(&toy, &error), "%s", error.text);
    ck_assert_int_eq(toy.num_hidden_layers, 4);
    ck_assert_int_eq(toy.compress_ratios[2], CG_RATIO_HCA);
}
END_TEST

START_TEST(dims_of_models_are_sound) {
    int n = 0;
    for (; cg_dims_name(n); n++) {
        cg_config config;
        cg_error error = {0};
        ck_assert(cg_config_dims(cg_dims_name(n), &config));
        ck_assert_msg(cg_config_check(&config, &error), "%s: %s", cg_dims_name(n), error.text);
        ck_assert(config.num_hidden_layers == 1 && config.compress_ratios[0] == CG_RATIO_CSA);
    }
    ck_assert_int_eq(n, 3);
    cg_config flash, pro, none;
    ck_assert(cg_config_dims("flash", &flash) && cg_config_dims("pro", &pro));
    ck_assert(flash.index_topk == 512 && pro.index_topk == 1024 && pro.num_attention_heads == 128);
    ck_assert(!cg_config_dims("flush", &none));
}
END_TEST

START_TEST(json_loads_back_equal) {
    cg_config config = cg_config_toy();
    char *json = cg_config_json(&config);
    cg_config again = load(json);
    expect_equal(&config, &again);
    free(json);

    /* every key away from its default, with numbers that need all their digits */
    static const char *const other[][2] = {
        {"vocab_size", "300"},
        {"hidden_size", "96"},
        {"num_hidden_layers", "3"},
        {"num_attention_heads", "6"},
        {"head_dim", "24"},
        {"qk_rope_head_dim", "6"},
        {"q_lora_rank", "48"},
        {"o_groups", "3"},
        {"o_lora_rank", "20"},
        {"sliding_window", "12"},
        {"compress_ratios", "4,128,0"},
        {"index_n_heads", "5"},
        {"index_head_dim", "16"},
        {"index_topk", "0"},
        {"index_hadamard", "false"},
        {"intermediate_size", "100"},
        {"swiglu_limit", "7.25"},
        {"rms_norm_eps", "1.2345678901234567e-05"},
        {"initializer_range", "0.1"},
        {"rope_theta", "5000"},
        {"compress_rope_theta", "1e5"},
        {"rope_scaling_factor", "16"},
        {"task", "recall"},
        {"recall_keys", "40"},
        {"recall_values", "3"},
        {"recall_pairs", "7"},
        {"rope_scaling_original_max_position_embeddings", "65536"},
        {"seq_len", "203"},
        {"rope_scaling_beta_fast", "31.7"},
        {"batch_size", "3"},
        {"rope_scaling_beta_slow", "0.3333333333333333"},
        {"accumulate", "2"},
        {"steps", "7"},
        {"seed", "9223372036854775807"},
        {"dtype", "f64"},
        {"learning_rate", "2.7e-4"},
        {"min_lr_ratio", "0"},
        {"warmup_steps", "0"},
        {"beta1", "0"},
        {"beta2", "0.999"},
        {"adam_eps", "1e-8"},
        {"weight_decay", "0"},
        {"max_grad_norm", "0"},
        {"indexer_loss_coeff", "0"},
        {"teacher", "compressed"},
        {"support", "dense"},
        {"indexer_warmup", "5"},
        {"policy", "stream+indexer_head_scores,relu@layer*/attn;rms_norm"},
        {"eval_every", "0"},
        {"eval_batches", "1"},
        {"checkpoint_every", "50"},
        {"checkpoint_minutes", "0.5"},
        {"decay_steps", "900"},
    };
    int n_keys = 0;
    cg_config_key key;
    while (cg_config_key_at(n_keys, &key)) n_keys++;
    ck_assert_int_eq(n_keys, (int)(sizeof other / sizeof other[0]));
    cg_config toy = config;
    for (int i = 0; i < n_keys; i++) {
        char was[300], now[300];
        ck_assert_ptr_nonnull(cg_config_get(&toy, other[i][0], was, sizeof was));
        accept_set(&config, other[i][0], other[i][1]);
        ck_assert_str_ne(was, cg_config_get(&config, other[i][0], now, sizeof now));
        cg_config reread = toy;
        accept_set(&reread, other[i][0], now); /* what get gives, set takes */
        char text[300];
        ck_assert_str_eq(cg_config_get(&reread, other[i][0], text, sizeof text), now);
    }
    cg_error error = {0};
    ck_assert_msg(cg_config_check(&config, &error), "%s", error.text);
    json = cg_config_json(&config);
    again = load(json);
    expect_equal(&config, &again);
    ck_assert(again.rms_norm_eps == 1.2345678901234567e-05);
    ck_assert(again.initializer_range == 0.1);
    ck_assert_int_eq(again.seed, INT64_MAX);
    ck_assert_int_eq(again.teacher, CG_TEACHER_COMPRESSED);
    ck_assert_int_eq(again.dtype, CG_F64);
    ck_assert(strstr(json, "\"initializer_range\": 0.1,\n") != NULL);
    ck_assert(strstr(json, "\"compress_ratios\": [4,128,0],\n") != NULL);
    free(json);
}
END_TEST

START_TEST(file_over_defaults) {
    cg_config config = load("{\"seq_len\": 64, \"learning_rate\": 1, \"rope_theta\": 10000}");
    cg_config toy = cg_config_toy();
    toy.seq_len = 64;
    toy.learning_rate = 1;
    expect_equal(&config, &toy);
    config = load("{}");
    toy = cg_config_toy();
    expect_equal(&config, &toy);
}
END_TEST

START_TEST(rope_scaling_nested_and_flat) {
    cg_config config = load("{\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 16, \"beta_fast\": 30,"
                            "\"original_max_position_embeddings\": 65536, \"beta_slow\": 2.5}}");
    ck_assert(config.rope_scaling_factor == 16 && config.rope_scaling_beta_fast == 30);
    ck_assert(config.rope_scaling_beta_slow == 2.5);
    ck_assert_int_eq(config.rope_scaling_original_max_position_embeddings, 65536);
    config = load("{\"rope_scaling\": null}");
    ck_assert(config.rope_scaling_factor == 1);
    config =
        load("{\"rope_scaling_factor\": 3, \"rope_scaling\": {\"rope_type\": \"yarn\", \"beta_fast\": 9}}");
    ck_assert(config.rope_scaling_factor == 3 && config.rope_scaling_beta_fast == 9);
    refuse_file("{\"rope_scaling_factor\": 3, \"rope_scaling\": {\"factor\": 4}}", "rope_scaling_factor|twice");
    refuse_file("{\"rope_scaling_factor\": 3, \"rope_scaling\": null}", "rope_scaling_factor|twice");
    refuse_file("{\"rope_scaling\": {\"type\": \"linear\"}}", "rope_scaling|\"yarn\"|\"linear\"");
    refuse_file("{\"rope_scaling\": {\"factro\": 4}}",
                "rope_scaling|unknown key \"factro\"|did you mean factor");
    refuse_file("{\"rope_scaling\": {\"factor\": 0.5}}", "rope_scaling_factor|from 1 to");
    refuse_file("{\"rope_scaling\": 4}", "rope_scaling must be an object or null, got 4");
    refuse_file("{\"rope_scaling_beta_fast\": 1, \"rope_scaling_beta_slow\": 2}",
                "beta_fast|at least|2, got 1");
}
END_TEST

/* Every key: wrong types, and for numbers both sides of the range. */
START_TEST(every_key_refuses) {
    cg_config_key key;
    for (int i = 0; cg_config_key_at(i, &key); i++) {
        ck_assert_uint_gt(strlen(key.doc), 10);
        ck_assert_ptr_null(strchr(key.doc, '\n'));
        char parts[300], json[300];
        snprintf(parts, sizeof parts, "%s must be %s, got", key.name, key.range);
        static const char *const never[] = {"null", "{}",  "\"\"", "-1",
                                            "[[]]", "[3]", "[]",   "\"no such word\""};
        for (size_t n = 0; n < sizeof never / sizeof never[0]; n++) {
            snprintf(json, sizeof json, "{\"%s\": %s}", key.name, never[n]);
            refuse_file(json, parts);
        }
        static const char *const words[] = {"", "-1#", "nul l", "\xff", "\"x\"", "a\nb"};
        for (size_t n = 0; n < sizeof words / sizeof words[0]; n++) refuse_set(key.name, words[n], parts);
        if (strncmp(key.range, "an integer", 10) == 0) {
            static const char *const bad[] = {"3.5",
                                              "3.0",
                                              "1e3",
                                              "-1",
                                              "nan",
                                              "inf",
                                              "0x10",
                                              "\"4\"",
                                              "true",
                                              "false",
                                              "+4",
                                              "04",
                                              "4abc",
                                              " 4",
                                              "4 ",
                                              "1,2",
                                              "9223372036854775808",
                                              "-9223372036854775809"};
            for (size_t n = 0; n < sizeof bad / sizeof bad[0]; n++) refuse_set(key.name, bad[n], parts);
        }
        if (strncmp(key.range, "a number", 8) == 0) {
            static const char *const bad[] = {"-1",    "-1e-9", "nan",    "NaN",     "inf", "-inf", "infinity",
                                              "1e999", "1e99",  "0x1p-3", "1e-3abc", "1e",  ".5",   "5.",
                                              "+0.5",  "0,5",   "true",   "\"0.5\"", "1 ",  "1e-"};
            for (size_t n = 0; n < sizeof bad / sizeof bad[0]; n++) refuse_set(key.name, bad[n], parts);
            static const char *const in_file[] = {"true", "false", "\"0.5\"", "\"false\"", "-1", "1e99"};
            for (size_t n = 0; n < sizeof in_file / sizeof in_file[0]; n++) {
                snprintf(json, sizeof json, "{\"%s\": %s}", key.name, in_file[n]);
                refuse_file(json, parts);
            }
        }
        if (strcmp(key.range, "true or false") == 0) {
            static const char *const bad[] = {"\"false\"", "\"true\"", "0",   "1",     "False",
                                              "TRUE",      "yes",      "off", "falsee"};
            for (size_t n = 0; n < sizeof bad / sizeof bad[0]; n++) refuse_set(key.name, bad[n], parts);
            snprintf(json, sizeof json, "{\"%s\": \"false\"}", key.name);
            refuse_file(json, "got \"false\"");
        }
    }
}
END_TEST

/* The values that other trainers let pass (see the coefficient in particular). */
START_TEST(values_that_look_like_a_setting) {
    static const char *const coefficients[] = {"false", "0x1p-3", "1e-3abc", "",     "-1",
                                               "nan",   "inf",    "-inf",    "1e400"};
    for (size_t i = 0; i < sizeof coefficients / sizeof coefficients[0]; i++)
        refuse_set("indexer_loss_coeff", coefficients[i], "indexer_loss_coeff|a number from 0 to");
    refuse_file("{\"indexer_loss_coeff\": \"false\"}", "indexer_loss_coeff|from 0 to|\"false\"");
    refuse_file("{\"indexer_loss_coeff\": false}", "indexer_loss_coeff|from 0 to|got false");
    refuse_file("{\"indexer_loss_coeff\": -0.01}", "indexer_loss_coeff|from 0 to|got -0.01");
    refuse_file("{\n\"indexer_loss_coeff\": NaN}", "line 2|indexer_loss_coeff|from 0 to|NaN");
    refuse_file("{\"seq_len\": 5,\n\n\"indexer_loss_coeff\": 0x10}", "line 3|indexer_loss_coeff|from 0 to");
    refuse_file("{\"indexer_loss_coeff\": 1e999}", "indexer_loss_coeff|from 0 to");
    refuse_file("{\"steps\": 99999999999999999999}", "steps|an integer from 1 to");
    static const char *const topk[] = {"-1", "3.5", "sixteen"};
    for (size_t i = 0; i < 3; i++) refuse_set("index_topk", topk[i], "index_topk|an integer from 0 to");
    cg_config config = cg_config_toy();
    accept_set(&config, "index_topk", "0"); /* window and sink alone */
    ck_assert(cg_config_check(&config, NULL));
    refuse_set("sliding_window", "0", "sliding_window|an integer from 1 to");
    refuse_set("compress_ratios", "0,4,3,4", "compress_ratios|0, 4 or 128|3 for layer 2");
    refuse_set("compress_ratios", "0,4,1,4", "compress_ratios|0, 4 or 128|1 for layer 2");
    refuse_set("compress_ratios", "0,4,4.0", "compress_ratios|4.0 for layer 2");
    refuse_set("compress_ratios", "0,4,,4", "compress_ratios");
    refuse_set("compress_ratios", "[0,4", "compress_ratios");
    refuse_set("compress_ratios", "0,4]", "compress_ratios");
    refuse_set("compress_ratios", "0 4", "compress_ratios");
    refuse_file("{\"compress_ratios\": 4}", "compress_ratios|a list");
    refuse_set("task", "Recall", "task must be one of text, recall, got \"Recall\"");
    refuse_set("teacher", "none", "teacher must be one of full, sink, compressed, got \"none\"");
    refuse_set("support", "", "support must be one of sparse, dense, got \"\"");
    refuse_set("dtype", "f16", "dtype must be one of f32, f64, bf16, got \"f16\"");
    refuse_set("policy", "save all", "policy must be save, recompute, stream");
    char policy[CG_POLICY_BYTES + 1];
    memset(policy, 'a', CG_POLICY_BYTES);
    policy[CG_POLICY_BYTES] = 0;
    refuse_set("policy", policy, "policy must be|aaa...");
    accept_set(&config, "policy", policy + 1);
    ck_assert_uint_eq(strlen(config.policy), CG_POLICY_BYTES - 1);
    accept_set(&config, "weight_decay", "-0");
    ck_assert(!signbit(config.weight_decay));
    refuse_set("beta1", "1", "beta1 must be a number of at least 0 and below 1, got 1");
    refuse_set("adam_eps", "0", "adam_eps must be a number above 0 and at most 1, got 0");
    refuse_set("rope_theta", "1", "rope_theta must be a number above 1");
}
END_TEST

START_TEST(unknown_keys) {
    refuse_file("{\"learning_rat\": 0.1}", "unknown key \"learning_rat\", did you mean learning_rate?");
    refuse_file("{\"Seq_len\": 0.1}", "unknown key \"Seq_len\", did you mean seq_len?");
    refuse_file("{\"\": 1}", "unknown key \"\"");
    refuse_file("{\"quantum\\nleap\": 1}", "unknown key \"quantum\\nleap\"");
    refuse_set("indexer_loss_coef", "0.1",
               "unknown key \"indexer_loss_coef\", did you mean indexer_loss_coeff?");
    refuse_set("", "0.1", "unknown key \"\"");
    refuse_set("zzz", "0.1", "unknown key \"zzz\"");
    cg_config config = cg_config_toy();
    char text[8];
    ck_assert_ptr_null(cg_config_get(&config, "zzz", text, sizeof text));
    cg_config_key key;
    ck_assert(!cg_config_key_at(-1, &key));
    ck_assert(!cg_config_key_at(10000, &key));
}
END_TEST

START_TEST(broken_files) {
    refuse_file("", "no JSON");
    refuse_file("{\"seq_len\": 5", "no JSON");
    refuse_file("{\"seq_len\": 5} x", "no JSON");
    refuse_file("{\"seq_len\": 5, \"seq_len\": 6}", "duplicate object key|seq_len");
    refuse_file("{\"seq_len\": 5, \"seq\\u005flen\": 6}", "duplicate object key");
    refuse_file("{seq_len: 5}", "no JSON");
    refuse_file("{\"seq_len\"", "no JSON");
    refuse_file("{\"seq_le", "no JSON");
    refuse_file("{\"a\\", "no JSON");
    refuse_file("[1, 2]", "a JSON object of keys is needed, got [1, 2]");
    refuse_file("7", "a JSON object of keys is needed, got 7");
    refuse_file("{\"task\": \"\xff\"}", "no JSON");
    cg_config config = cg_config_toy();
    cg_error error = {0};
    ck_assert(!cg_config_load(&config, "no/such/file.json", &error));
    expect_parts(&error, "no/such/file.json|No such file", "absent file");
    error = (cg_error){0};
    ck_assert(!cg_config_load(&config, ".", &error));
    expect_parts(&error, "folder", "a folder");
    ck_assert(!cg_config_load(&config, ".", NULL));
}
END_TEST

START_TEST(keys_that_do_not_fit_together) {
    refuse_file("{\"num_hidden_layers\": 2}", "compress_ratios has 4 entries|num_hidden_layers is 2");
    refuse_file("{\"compress_ratios\": [0, 4]}", "compress_ratios has 2 entries|num_hidden_layers is 4");
    refuse_file("{\"qk_rope_head_dim\": 7}", "qk_rope_head_dim must be even|got 7");
    refuse_file("{\"qk_rope_head_dim\": 34}", "at most head_dim, which is 32, got 34");
    refuse_file("{\"index_head_dim\": 24}", "index_head_dim must be a power of two|got 24");
    refuse_file("{\"index_head_dim\": 4}",
                "index_head_dim must be at least qk_rope_head_dim, which is 8|got 4");
    refuse_file("{\"o_groups\": 3}", "o_groups must divide num_attention_heads, which is 4, got 3");
    refuse_file("{\"batch_size\": 65536, \"seq_len\": 65536}", "batch_size * seq_len|65536 * 65536");
    /* one after the other on the command line: only the whole must fit */
    cg_config config = cg_config_toy();
    accept_set(&config, "num_hidden_layers", "2");
    ck_assert(!cg_config_check(&config, NULL));
    accept_set(&config, "compress_ratios", "[0,4]");
    cg_error error = {0};
    ck_assert_msg(cg_config_check(&config, &error), "%s", error.text);
}
END_TEST

START_TEST(check_sees_what_code_has_set) {
    cg_error error = {0};
    cg_config config = cg_config_toy();
    config.learning_rate = NAN;
    ck_assert(!cg_config_check(&config, &error));
    expect_parts(&error, "learning_rate|from 0 to 10", "NaN");
    error = (cg_error){0};
    config = cg_config_toy();
    config.teacher = CG_TEACHER_NONE;
    ck_assert(!cg_config_check(&config, &error));
    expect_parts(&error, "teacher|full, sink, compressed", "no teacher");
    error = (cg_error){0};
    config = cg_config_toy();
    config.sliding_window = 0;
    ck_assert(!cg_config_check(&config, &error));
    expect_parts(&error, "sliding_window|from 1 to", "window 0");
    error = (cg_error){0};
    config = cg_config_toy();
    memset(config.policy, 'a', sizeof config.policy);
    ck_assert(!cg_config_check(&config, &error));
    expect_parts(&error, "policy", "policy without an end");
    ck_assert_ptr_null(cg_config_json(&config));
}
END_TEST

int main(void) {
    int fd = mkstemp(path);
    if (fd < 0) return EXIT_FAILURE;
    close(fd);
    Suite *suite = suite_create("model_config");
    TCase *tests = tcase_create("config");
    tcase_set_timeout(tests, 60);
    tcase_add_test(tests, toy_is_sound);
    tcase_add_test(tests, dims_of_models_are_sound);
    tcase_add_test(tests, json_loads_back_equal);
    tcase_add_test(tests, file_over_defaults);
    tcase_add_test(tests, rope_scaling_nested_and_flat);
    tcase_add_test(tests, every_key_refuses);
    tcase_add_test(tests, values_that_look_like_a_setting);
    tcase_add_test(tests, unknown_keys);
    tcase_add_test(tests, broken_files);
    tcase_add_test(tests, keys_that_do_not_fit_together);
    tcase_add_test(tests, check_sees_what_code_has_set);
    suite_add_tcase(suite, tests);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_ENV);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    unlink(path);
    return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
