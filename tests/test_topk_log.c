/* Recordings of selections: what is written comes back, a replayed run is the recorded one, every file that does not
 * fit is refused in one sentence; and recompute that is certified while a run trains. */
#include "tests/support.h"

#include "graph/exec.h"
#include "models/train/checkpoint.h"
#include "models/train/topk_log.h"
#include "models/train/trainer.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

static char folder[] = "/tmp/csagrad_topk_XXXXXX";

/* FOLDER/NAME; the same text for the same name, as long as the program runs. */
static const char *path_of(const char *name) {
    static char paths[64][256];
    char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int i = 0;
    for (; i < 64 && *paths[i]; i++)
        if (!strcmp(paths[i], path)) return paths[i];
    ck_assert_int_lt(i, 64);
    return strcpy(paths[i], path);
}

/* Two CSA layers, two micro-batches a step, selection exercised. */
static cg_config small_config(void) {
    cg_config c = cg_config_toy();
    const char *settings[][2] = {
        {"hidden_size", "16"},        {"num_hidden_layers", "4"},  {"compress_ratios", "4,0,128,4"},
        {"num_attention_heads", "2"}, {"head_dim", "8"},           {"qk_rope_head_dim", "4"},
        {"q_lora_rank", "8"},         {"o_groups", "2"},           {"o_lora_rank", "4"},
        {"sliding_window", "4"},      {"index_n_heads", "2"},      {"index_head_dim", "8"},
        {"index_topk", "3"},          {"intermediate_size", "16"}, {"seq_len", "132"},
        {"batch_size", "2"},          {"accumulate", "2"},         {"steps", "6"},
        {"warmup_steps", "2"},        {"task", "recall"},          {"indexer_warmup", "0"},
        {"policy", "stream"}};
    cg_error error = {0};
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++)
        if (!cg_config_set(&c, settings[i][0], settings[i][1], &error)) ck_abort_msg("%s", error.text);
    if (!cg_config_check(&c, &error)) ck_abort_msg("%s", error.text);
    return c;
}

enum { T = 264, K = 3, C = T / 4, LAYERS = 2, MICRO = 2, STEP = MICRO * LAYERS * T * K };

static void set(cg_config *config, const char *key, const char *text) {
    cg_error error = {0};
    if (!cg_config_set(config, key, text, &error)) ck_abort_msg("%s", error.text);
}

static cg_feed *feed_of(const cg_config *config) {
    cg_error error = {0};
    cg_feed *feed = cg_feed_new(NULL, config, &error);
    if (!feed) ck_abort_msg("%s", error.text);
    return feed;
}

static char *slurp(const char *path, size_t *bytes) {
    FILE *file = fopen(path, "rb");
    if (!file) ck_abort_msg("%s cannot be opened", path);
    struct stat facts;
    ck_assert_int_eq(fstat(fileno(file), &facts), 0);
    *bytes = (size_t)facts.st_size;
    char *data = malloc(*bytes + 1);
    ck_assert_int_eq(fread(data, 1, *bytes, file), *bytes);
    fclose(file);
    return data;
}

static void expect_same_files(const char *a, const char *b) {
    size_t a_bytes, b_bytes;
    char *x = slurp(a, &a_bytes), *y = slurp(b, &b_bytes);
    if (a_bytes != b_bytes || memcmp(x, y, a_bytes)) ck_abort_msg("%s and %s differ", a, b);
    free(x);
    free(y);
}

/* ---- runs ---- */

typedef struct run {
    cg_metrics metrics[16];
    int n;
} run;

static cg_trainer *trainer_of(const cg_config *config, const cg_feed *feed, cg_trainer_options options) {
    cg_error error = {0};
    cg_trainer *trainer = cg_trainer_new(config, feed, &options, &error);
    if (!trainer) ck_abort_msg("%s", error.text);
    return trainer;
}

static void train(cg_trainer *trainer, int n, run *r) {
    cg_error error = {0};
    for (int i = 0; i < n; i++)
        if (!cg_trainer_step(trainer, &r->metrics[r->n++], &error)) ck_abort_msg("%s", error.text);
}

/* Train all steps and save as NAME; returns the metrics. */
static run run_all(const cg_config *config, const cg_feed *feed, cg_trainer_options options, const char *name) {
    run r = {0};
    cg_error error = {0};
    cg_trainer *trainer = trainer_of(config, feed, options);
    train(trainer, (int)(config->steps - cg_trainer_steps(trainer)), &r);
    if (!cg_trainer_save(trainer, path_of(name), &error)) ck_abort_msg("%s", error.text);
    cg_trainer_free(trainer);
    return r;
}

static void expect_same_bits(const run *a, const run *b) {
    ck_assert_int_eq(a->n, b->n);
    for (int i = 0; i < a->n; i++) {
        ck_assert_int_eq(a->metrics[i].step, b->metrics[i].step);
        ck_assert(a->metrics[i].lm_loss == b->metrics[i].lm_loss);
        ck_assert(a->metrics[i].indexer_loss == b->metrics[i].indexer_loss);
        ck_assert(a->metrics[i].grad_norm == b->metrics[i].grad_norm);
    }
}

START_TEST(a_replayed_run_is_the_recorded_one) {
    cg_config config = small_config();
    set(&config, "indexer_warmup", "2");
    cg_feed *feed = feed_of(&config);
    const char *file = path_of("run.topk");
    run plain = run_all(&config, feed, (cg_trainer_options){0}, "plain");
    run recorded = run_all(&config, feed, (cg_trainer_options){.record_topk = file}, "recorded");
    expect_same_bits(&plain, &recorded);
    run replayed =
        run_all(&config, feed, (cg_trainer_options){.replay_topk = file, .record_topk = path_of("again.topk")},
                "replayed");
    expect_same_bits(&plain, &replayed);
    expect_same_files(path_of("plain"), path_of("recorded"));
    expect_same_files(path_of("plain"), path_of("replayed"));
    expect_same_files(path_of("run.topk"), path_of("again.topk"));
    cg_feed_free(feed);
}
END_TEST

/* The selection is the input, not what the scores of this run would choose: with other start values (the seed is that of
 * the data too, so the range is another) the replayed indices come out again. */
START_TEST(nothing_is_chosen_in_a_replay) {
    cg_config config = small_config(), other = config;
    set(&other, "initializer_range", "0.2");
    cg_feed *feed = feed_of(&config);
    run_all(&config, feed, (cg_trainer_options){.record_topk = path_of("one.topk")}, "one");
    run_all(&other, feed, (cg_trainer_options){.record_topk = path_of("two.topk")}, "two");
    size_t bytes;
    char *one = slurp(path_of("one.topk"), &bytes), *two = slurp(path_of("two.topk"), &bytes);
    ck_assert(memcmp(one, two, bytes));
    run_all(&other, feed,
            (cg_trainer_options){.replay_topk = path_of("one.topk"), .record_topk = path_of("copy.topk")},
            "three");
    expect_same_files(path_of("one.topk"), path_of("copy.topk"));
    cg_trainer *trainer = trainer_of(&config, feed, (cg_trainer_options){.replay_topk = path_of("one.topk")});
    const cg_plan *plan = cg_trainer_graph(trainer)->plan;
    for (int t = 0; t < plan->n_steps; t++)
        if (strstr(plan->steps[t]->op->name, "topk"))
            ck_abort_msg("%s runs in a replay", plan->steps[t]->op->name);
    cg_trainer_free(trainer);
    free(one);
    free(two);
    cg_feed_free(feed);
}
END_TEST

/* One file for all policies and both dtypes. Recomputing changes no bit; streaming and f64 are close. */
START_TEST(policies_on_one_selection) {
    static const char *const policies[] = {"save", "recompute", "*norm*,swiglu,indexer_head_scores@layer*",
                                           "stream", "stream+csa_attention,rope"};
    cg_config config = small_config();
    cg_feed *feed = feed_of(&config);
    const char *file = path_of("policies.topk");
    run_all(&config, feed, (cg_trainer_options){.record_topk = file}, "stream");
    run save = {0};
    for (int p = 0; p < 5; p++) {
        bool clones = p == 1 || p == 2 || p == 4;
        set(&config, "policy", policies[p]);
        run r =
            run_all(&config, feed, (cg_trainer_options){.replay_topk = file, .verify_recompute = clones}, "x");
        if (p == 0) save = r;
        if (p < 3) expect_same_bits(&save, &r);
        for (int i = 0; i < r.n; i++) {
            ck_assert_double_le(fabs(r.metrics[i].lm_loss / save.metrics[i].lm_loss - 1), 1e-5);
            ck_assert_double_le(fabs(r.metrics[i].indexer_loss / save.metrics[i].indexer_loss - 1), 1e-4);
        }
    }
    set(&config, "dtype", "f64");
    run f64 = run_all(&config, feed, (cg_trainer_options){.replay_topk = file}, "x");
    for (int i = 0; i < f64.n; i++)
        ck_assert_double_le(fabs(f64.metrics[i].lm_loss / save.metrics[i].lm_loss - 1), 1e-5);
    cg_feed_free(feed);
}
END_TEST

/* A run stopped and resumed at any step, in the warm-up and behind it, records what one without a stop does. */
START_TEST(a_recording_goes_on) {
    cg_config config = small_config();
    set(&config, "indexer_warmup", "2");
    cg_feed *feed = feed_of(&config);
    run_all(&config, feed, (cg_trainer_options){.record_topk = path_of("straight.topk")}, "straight");
    cg_error error = {0};
    for (int stop = 0; stop <= 6; stop++) {
        const char *file = path_of("parts.topk"), *checkpoint = path_of("parts");
        unlink(file);
        run r = {0};
        cg_trainer *trainer = trainer_of(&config, feed, (cg_trainer_options){.record_topk = file});
        train(trainer, stop, &r);
        ck_assert(cg_trainer_save(trainer, checkpoint, &error));
        if (stop < 6) train(trainer, 1, &r); /* not in the checkpoint: taken again */
        cg_trainer_free(trainer);
        ck_assert((access(file, F_OK) == 0) == (stop >= 2)); /* no step, no file */
        run_all(&config, feed, (cg_trainer_options){.record_topk = file, .checkpoint = checkpoint}, "whole");
        expect_same_files(file, path_of("straight.topk"));
        expect_same_files(path_of("whole"), path_of("straight"));
        /* a replay goes on, too */
        run_all(&config, feed, (cg_trainer_options){.replay_topk = file, .checkpoint = checkpoint}, "whole");
        expect_same_files(path_of("whole"), path_of("straight"));
    }
    cg_feed_free(feed);
}
END_TEST

/* ---- the file ---- */

/* A selection that is allowed: the newest rows that each row sees, shifted by `salt`. */
static void fill(int32_t *topk, int salt) {
    for (int t = 0; t < T; t++) {
        int first = t / 132 * 33, visible = (t % 132 + 1) / 4;
        for (int j = 0; j < K; j++)
            topk[t * K + j] = j < visible ? first + (visible - 1 - j + salt) % visible : -1;
    }
}

static void record(const char *path, const cg_config *config, const cg_feed *feed, int64_t first, int n_steps) {
    cg_error error = {0};
    cg_topk_writer *writer = cg_topk_writer_new(path, config, feed, first, false, &error);
    if (!writer) ck_abort_msg("%s", error.text);
    for (int s = 0; s < n_steps; s++) {
        for (int m = 0; m < MICRO; m++)
            for (int l = 0; l < LAYERS; l++) fill(cg_topk_writer_slot(writer, m, l), 100 * s + 10 * m + l);
        if (!cg_topk_writer_append(writer, &error)) ck_abort_msg("%s", error.text);
    }
    cg_topk_writer_free(writer);
}

START_TEST(what_is_written_comes_back) {
    cg_config config = small_config();
    cg_feed *feed = feed_of(&config);
    const char *file = path_of("made/on/the/way/back.topk");
    record(file, &config, feed, 3, 4);
    cg_error error = {0};
    cg_safetensors *whole = cg_safetensors_open(file, &error);
    if (!whole) ck_abort_msg("%s", error.text);
    const cg_tensor *topk = cg_safetensors_find(whole, "topk");
    ck_assert(topk->dtype == CG_I32 && cg_shape_equal(&topk->shape, &CG_SHAPE(4 * MICRO, LAYERS, T, K)));
    ck_assert_str_eq(cg_safetensors_metadata(whole, "format"), "csagrad topk 1");
    ck_assert_str_eq(cg_safetensors_metadata(whole, "layers"), "0,3");
    ck_assert_str_eq(cg_safetensors_metadata(whole, "first_step"), "3");
    size_t bytes;
    char *raw = slurp(file, &bytes); /* as the header says for Python */
    ck_assert_int_eq(bytes, 4096 + 4 * STEP * sizeof(int32_t));
    ck_assert_mem_eq(raw + 4096, topk->data, 4 * STEP * sizeof(int32_t));
    free(raw);
    cg_topk_reader *reader = cg_topk_reader_new(file, &config, feed, 4, 6, &error);
    if (!reader) ck_abort_msg("%s", error.text);
    int32_t got[T * K], want[T * K];
    for (int step = 4; step <= 6; step++)
        for (int m = 0; m < MICRO; m++)
            for (int l = 0; l < LAYERS; l++) {
                cg_topk_reader_get(reader, step, m, l, got);
                fill(want, 100 * (step - 3) + 10 * m + l);
                ck_assert_mem_eq(got, want, sizeof want);
            }
    cg_topk_reader_free(reader);
    cg_safetensors_close(whole);
    cg_feed_free(feed);
}
END_TEST

/* ---- refusals ---- */

static const char *const keys[] = {"format",     "data",       "seed",   "seq_len",    "batch_size",
                                   "accumulate", "index_topk", "layers", "first_step", "checksum"};
enum { N_KEYS = sizeof keys / sizeof *keys, CHECKSUM = N_KEYS - 1 };

/* What a program in another language would do: a file with the tensors, the metadata and a checksum made from the
 * description in models/train/topk_log.h. One pair may be another one (value NULL: left out). */
static void forge(const char *path, const cg_config *config, const cg_feed *feed, const cg_tensor *topk,
                  const char *key, const char *value) {
    char texts[N_KEYS][64];
    const cg_feed_facts *facts = cg_feed_facts_of(feed);
    snprintf(texts[0], 64, "csagrad topk 1");
    snprintf(texts[1], 64, "%016llx", (unsigned long long)facts->fingerprint);
    const long long numbers[] = {config->seed, config->seq_len, config->batch_size, config->accumulate,
                                 config->index_topk};
    for (int i = 0; i < 5; i++) snprintf(texts[2 + i], 64, "%lld", numbers[i]);
    snprintf(texts[7], 64, "0,3");
    snprintf(texts[8], 64, "1");
    uLong sum = crc32(0, topk->data, (uInt)cg_tensor_bytes(topk->dtype, &topk->shape));
    const char *metadata[N_KEYS][2];
    int n = 0;
    for (int k = 0; k < N_KEYS; k++) {
        if (k == CHECKSUM) snprintf(texts[k], 64, "%08lx", sum);
        const char *text = key && !strcmp(key, keys[k]) ? value : texts[k];
        if (!text) continue;
        char line[160];
        sum = crc32(sum, (Bytef *)line, (uInt)snprintf(line, sizeof line, "%s=%s\n", keys[k], text));
        metadata[n][0] = keys[k];
        metadata[n++][1] = text;
    }
    cg_error error = {0};
    const cg_named_tensor tensor = {"topk", *topk};
    if (!cg_safetensors_write(path, &tensor, 1, metadata, n, &error)) ck_abort_msg("%s", error.text);
}

static void expect_unreadable(const char *path, const cg_config *config, const cg_feed *feed, int64_t first,
                              int64_t last, const char *part) {
    cg_error error = {0};
    cg_topk_reader *reader = cg_topk_reader_new(path, config, feed, first, last, &error);
    if (reader || error.code != CG_BAD_INPUT || !strstr(error.text, part) || !strstr(error.text, path))
        ck_abort_msg("expected a refusal of %s with \"%s\", got: %s", path, part,
                     reader ? "a reader" : error.text);
}

static void expect_unwritable(const char *path, const cg_config *config, const cg_feed *feed, int64_t next,
                              bool go_on, const char *part) {
    cg_error error = {0};
    cg_topk_writer *writer = cg_topk_writer_new(path, config, feed, next, go_on, &error);
    if (writer || error.code != CG_BAD_INPUT || !strstr(error.text, part))
        ck_abort_msg("expected a refusal of %s with \"%s\", got: %s", path, part,
                     writer ? "a writer" : error.text);
}

static int32_t *some_steps(int n) {
    int32_t *topk = malloc((size_t)n * STEP * sizeof *topk);
    for (int i = 0; i < n * MICRO * LAYERS; i++) fill(topk + i * T * K, i);
    return topk;
}

START_TEST(recordings_of_other_runs) {
    cg_config config = small_config();
    cg_feed *feed = feed_of(&config);
    int32_t *data = some_steps(6);
    const char *file = path_of("forged.topk");
    const cg_tensor good = {CG_I32, CG_SHAPE(6 * MICRO, LAYERS, T, K), data};
    cg_error error = {0};
    forge(file, &config, feed, &good, NULL, NULL);
    cg_topk_reader *reader =
        cg_topk_reader_new(file, &config, feed, 1, 6, &error); /* so what follows is the reason */
    if (!reader) ck_abort_msg("%s", error.text);
    cg_topk_reader_free(reader);
    expect_unwritable(file, &config, feed, 7, true, "can be replayed, but a recording cannot go on in it");
    static const struct {
        const char *key, *value, *part;
    } pairs[] = {
        {"format", "csagrad topk 2", "is not a recording of selections"},
        {"format", NULL, "is not a recording of selections"},
        {"checksum", NULL, "is not a recording of selections"},
        {"layers", NULL, "is not a recording of selections"},
        {"checksum", "00000000", "is damaged: its content has checksum"},
        {"data", "0123456789abcdef", "was recorded with data 0123456789abcdef, this run has "},
        {"seed", "7", "was recorded with seed 7, this run has 1"},
        {"seq_len", "264", "was recorded with seq_len 264, this run has 132"},
        {"batch_size", "1", "was recorded with batch_size 1, this run has 2"},
        {"accumulate", "4", "was recorded with accumulate 4, this run has 2"},
        {"index_topk", "4", "was recorded with index_topk 4, this run has 3"},
        {"layers", "0,2", "was recorded with layers 0,2, this run has 0,3"},
        {"first_step", "one", "first_step is \"one\", expected a number from 1"},
        {"first_step", "0", "first_step is \"0\", expected a number from 1"},
        {"first_step", "99999999999999999999", "expected a number from 1"},
        {"first_step", "2", "6 steps from step 2 on, this run needs those of the steps 1 to 6"},
    };
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        forge(file, &config, feed, &good, pairs[i].key, pairs[i].value);
        expect_unreadable(file, &config, feed, 1, 6, pairs[i].part);
    }
    const struct {
        cg_tensor topk;
        const char *part;
    } tensors[] = {
        {{CG_I32, CG_SHAPE(5 * MICRO, LAYERS, T, K), data},
         "of 5 steps from step 1 on, this run needs those of"},
        {{CG_I32, CG_SHAPE(0, LAYERS, T, K), data}, "of 0 steps from step 1 on"},
        {{CG_I32, CG_SHAPE(6 * MICRO - 1, LAYERS, T, K), data},
         "topk is i32 [11, 2, 264, 3], expected i32 [2 * steps"},
        {{CG_I32, CG_SHAPE(6 * MICRO, 1, T, K), data}, "topk is i32 [12, 1, 264, 3], expected"},
        {{CG_I32, CG_SHAPE(6 * MICRO, LAYERS, T - 4, K), data}, "topk is i32 [12, 2, 260, 3], expected"},
        {{CG_I32, CG_SHAPE(6 * MICRO, LAYERS, K, T), data}, "topk is i32 [12, 2, 3, 264], expected"},
        {{CG_I32, CG_SHAPE(6 * MICRO, LAYERS, T * K), data}, "topk is i32 [12, 2, 792], expected"},
        {{CG_F32, CG_SHAPE(6 * MICRO, LAYERS, T, K), data}, "topk is f32 [12, 2, 264, 3], expected i32"},
    };
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) {
        forge(file, &config, feed, &tensors[i].topk, NULL, NULL);
        expect_unreadable(file, &config, feed, 1, 6, tensors[i].part);
    }
    free(data);
    cg_feed_free(feed);
}
END_TEST

START_TEST(rows_that_a_row_does_not_see) {
    cg_config config = small_config();
    cg_feed *feed = feed_of(&config);
    static const struct {
        int row, place, chosen;
        const char *part;
    } list[] = {
        {2, 0, 0, "row 2: topk[0] is 0, expected -1 (the compressed rows that it sees)"},
        {3, 1, 1,
         "row 3: topk[1] is 1, expected -1 or 0 to 0"}, /* its own group, which ends with it, and the next */
        {3, 1, 0, "row 3: topk[1] is 0, which it selects twice"},
        {131, 2, 33, "row 131: topk[2] is 33, expected -1 or 0 to 32"}, /* of the next sequence */
        {263, 0, 32, "row 263: topk[0] is 32, expected -1 or 33 to 65"},
        {263, 0, 66, "row 263: topk[0] is 66, expected -1 or 33 to 65"},
        {263, 0, -2, "row 263: topk[0] is -2, expected -1 or 33 to 65"},
        {200, 0, INT32_MAX, "row 200: topk[0] is 2147483647, expected"},
        {200, 0, INT32_MIN, "row 200: topk[0] is -2147483648, expected"},
    };
    for (size_t i = 0; i < sizeof list / sizeof *list; i++)
        for (int place = 0; place < 2; place++) { /* the first selection of step 1, the last of step 6 */
            int32_t *data = some_steps(6);
            const cg_tensor topk = {CG_I32, CG_SHAPE(6 * MICRO, LAYERS, T, K), data};
            data[(place ? 6 * STEP - T * K : 0) + list[i].row * K + list[i].place] = list[i].chosen;
            forge(path_of("rows.topk"), &config, feed, &topk, NULL, NULL);
            expect_unreadable(path_of("rows.topk"), &config, feed, 1, 6, list[i].part);
            expect_unreadable(path_of("rows.topk"), &config, feed, 1, 6,
                              place ? "step 6, micro-batch 1, layer 3: " : "step 1, micro-batch 0, layer 0: ");
            cg_error error = {0}; /* steps that the run does not take may hold anything */
            cg_topk_reader *reader =
                cg_topk_reader_new(path_of("rows.topk"), &config, feed, place ? 1 : 2, place ? 5 : 6, &error);
            if (!reader) ck_abort_msg("%s", error.text);
            cg_topk_reader_free(reader);
            free(data);
        }
    cg_feed_free(feed);
}
END_TEST

/* Segments of many lengths, some empty: what the engine records is within what the check allows. */
START_TEST(packed_documents) {
    cg_config config = small_config();
    set(&config, "task", "text");
    set(&config, "seq_len", "52");
    set(&config, "batch_size", "3");
    cg_error error = {0};
    ck_assert_int_eq(mkdir(path_of("text"), 0777), 0);
    for (int f = 0; f < 40; f++) {
        char name[32];
        snprintf(name, sizeof name, "text/%d", f);
        FILE *file = fopen(path_of(name), "w");
        for (int i = 0; i < (f < 4 ? 9000 : 5 + 3 * f); i++) fputc("abcdefgh "[(i * i + f) % 9], file);
        fclose(file);
    }
    cg_feed *feed = cg_feed_text(path_of("text"), &config, &error);
    if (!feed) ck_abort_msg("%s", error.text);
    const char *file = path_of("packed.topk");
    run recorded = run_all(&config, feed, (cg_trainer_options){.record_topk = file}, "packed");
    run replayed = run_all(&config, feed, (cg_trainer_options){.replay_topk = file}, "packed_again");
    expect_same_bits(&recorded, &replayed);
    cg_feed_free(feed);
}
END_TEST

START_TEST(damaged_files) {
    cg_config config = small_config();
    cg_feed *feed = feed_of(&config);
    const char *file = path_of("damaged.topk");
    record(file, &config, feed, 1, 6);
    size_t bytes;
    char *good = slurp(file, &bytes);
    for (size_t at = 0; at < bytes; at += at < 1000 ? 7 : 997) { /* every part of the head, and the data */
        if (at >= 1000 && at < 4096) at = 4096;                  /* blanks */
        FILE *out = fopen(file, "wb");
        good[at] ^= 0x10;
        fwrite(good, 1, bytes, out);
        good[at] ^= 0x10;
        fclose(out);
        cg_error error = {0};
        cg_topk_reader *reader = cg_topk_reader_new(file, &config, feed, 1, 6, &error);
        if (reader) ck_abort_msg("byte %zu was changed and the file is still read", at);
        ck_assert_int_eq(error.code, CG_BAD_INPUT);
        expect_unwritable(file, &config, feed, 7, true, file);
    }
    for (size_t cut = 1; cut < bytes; cut = cut * 3 + 1) {
        FILE *out = fopen(file, "wb");
        fwrite(good, 1, bytes - cut, out);
        fclose(out);
        expect_unreadable(file, &config, feed, 1, 6, file);
        expect_unwritable(file, &config, feed, 7, true, file);
    }
    expect_unreadable(path_of("nothing"), &config, feed, 1, 6, "cannot be opened");
    expect_unreadable(folder, &config, feed, 1, 6, "is a folder");
    free(good);
    cg_feed_free(feed);
}
END_TEST

/* A program killed between data and head leaves a file that readers refuse and a recording cuts. */
START_TEST(torn_step) {
    cg_config config = small_config();
    cg_feed *feed = feed_of(&config);
    const char *file = path_of("torn.topk");
    record(path_of("untorn.topk"), &config, feed, 1, 2);
    record(file, &config, feed, 1, 2);
    FILE *out = fopen(file, "ab");
    for (int i = 0; i < 100; i++) fputc(i, out);
    fclose(out);
    expect_unreadable(file, &config, feed, 1, 2, "100 bytes follow the last tensor");
    cg_error error = {0};
    cg_topk_writer_free(cg_topk_writer_new(file, &config, feed, 3, true, &error));
    if (error.code) ck_abort_msg("%s", error.text);
    expect_same_files(file, path_of("untorn.topk"));
    cg_feed_free(feed);
}
END_TEST

START_TEST(what_cannot_be_recorded_to) {
    cg_config config = small_config(), other = config;
    cg_feed *feed = feed_of(&config);
    const char *file = path_of("there.topk"), *text = path_of("text_file");
    record(file, &config, feed, 3, 2); /* steps 3 and 4 */
    record(path_of("there_copy.topk"), &config, feed, 3, 2);
    FILE *out = fopen(text, "w");
    fputs("not a recording, and longer than the head of one", out);
    for (int i = 0; i < 5000; i++) fputc('x', out);
    fclose(out);
    size_t text_bytes, after_bytes;
    char *text_before = slurp(text, &text_bytes);
    expect_unwritable(file, &config, feed, 1, false, "is there already: name another file");
    expect_unwritable(text, &config, feed, 1, false, "is there already");
    expect_unwritable(folder, &config, feed, 1, false, "is there already");
    expect_unwritable(text, &config, feed, 3, true, "safetensors");
    expect_unwritable(folder, &config, feed, 3, true, "Is a directory");
    expect_unwritable(file, &config, feed, 6, true, "2 steps from step 3 on: it cannot go on at step 6");
    expect_unwritable(file, &config, feed, 2, true, "2 steps from step 3 on: it cannot go on at step 2");
    set(&other, "seed", "5");
    expect_unwritable(file, &other, feed, 5, true, "was recorded with seed 1, this run has 5");
    expect_unwritable(path_of("text_file/below"), &config, feed, 1, false, "a file of this name is in the way");
    expect_same_files(file, path_of("there_copy.topk"));
    char *text_after = slurp(text, &after_bytes);
    ck_assert(text_bytes == after_bytes && !memcmp(text_before, text_after, text_bytes));
    /* in use */
    cg_error error = {0};
    cg_topk_reader *reader = cg_topk_reader_new(file, &config, feed, 3, 4, &error);
    expect_unwritable(file, &config, feed, 5, true, "is in use: another run records to it or replays it");
    cg_topk_reader *second = cg_topk_reader_new(file, &config, feed, 3, 4, &error); /* reading is shared */
    ck_assert(reader && second);
    cg_topk_reader_free(reader);
    cg_topk_reader_free(second);
    cg_topk_writer *writer = cg_topk_writer_new(file, &config, feed, 5, true, &error);
    expect_unreadable(file, &config, feed, 3, 4, "is in use: another run records to it");
    cg_topk_writer_free(writer);
    expect_same_files(file, path_of("there_copy.topk"));
    /* a new one without a step leaves nothing */
    cg_topk_writer_free(cg_topk_writer_new(path_of("empty.topk"), &config, feed, 1, false, &error));
    ck_assert_int_ne(access(path_of("empty.topk"), F_OK), 0);
    free(text_before);
    free(text_after);
    cg_feed_free(feed);
}
END_TEST

START_TEST(full_disk_keeps_whole_steps) {
    cg_config config = small_config();
    cg_feed *feed = feed_of(&config);
    const char *file = path_of("full.topk");
    record(path_of("one_step.topk"), &config, feed, 1, 1);
    cg_error error = {0};
    cg_topk_writer *writer = cg_topk_writer_new(file, &config, feed, 1, false, &error);
    signal(SIGXFSZ, SIG_IGN);
    const rlim_t limit = 4096 + STEP * sizeof(int32_t) * 3 / 2;
    for (int m = 0; m < MICRO; m++)
        for (int l = 0; l < LAYERS; l++) fill(cg_topk_writer_slot(writer, m, l), 10 * m + l);
    ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &(struct rlimit){limit, limit}), 0);
    ck_assert(cg_topk_writer_append(writer, &error));
    ck_assert(!cg_topk_writer_append(writer, &error));
    ck_assert_int_eq(error.code, CG_FAILED);
    ck_assert(strstr(error.text, file) && strstr(error.text, "cannot be written"));
    cg_topk_writer_free(writer);
    expect_same_files(file, path_of("one_step.topk"));
    cg_feed_free(feed);
}
END_TEST

/* ---- what a trainer refuses ---- */

static void expect_no_trainer(const cg_config *config, const cg_feed *feed, cg_trainer_options options,
                              const char *part) {
    cg_error error = {0};
    cg_trainer *trainer = cg_trainer_new(config, feed, &options, &error);
    if (trainer || error.code != CG_BAD_INPUT || !strstr(error.text, part))
        ck_abort_msg("expected a refusal with \"%s\", got: %s", part, trainer ? "a trainer" : error.text);
}

START_TEST(runs_that_cannot_be) {
    cg_config config = small_config(), other;
    cg_feed *feed = feed_of(&config);
    const char *file = path_of("six.topk"), *none = path_of("none.topk");
    record(file, &config, feed, 1, 6);
    other = config;
    set(&other, "steps", "7");
    expect_no_trainer(&other, feed, (cg_trainer_options){.replay_topk = file},
                      "needs those of the steps 1 to 7");
    set(&other, "indexer_warmup", "7");
    expect_no_trainer(&other, feed, (cg_trainer_options){.replay_topk = file}, "warm-up takes all 7 steps");
    expect_no_trainer(&other, feed, (cg_trainer_options){.record_topk = none}, "warm-up takes all 7 steps");
    other = config;
    set(&other, "compress_ratios", "0,0,128,0");
    expect_no_trainer(&other, feed, (cg_trainer_options){.record_topk = none}, "compress_ratios holds no 4");
    expect_no_trainer(&other, feed, (cg_trainer_options){.replay_topk = file}, "compress_ratios holds no 4");
    other = config;
    set(&other, "index_topk", "0");
    expect_no_trainer(&other, feed, (cg_trainer_options){.record_topk = none}, "index_topk is 0");
    expect_no_trainer(&config, feed, (cg_trainer_options){.record_topk = file, .replay_topk = file},
                      "cannot be replayed and recorded to at once");
    char linked[300];
    snprintf(linked, sizeof linked, "%s/./link.topk", folder);
    ck_assert_int_eq(symlink(file, linked), 0);
    expect_no_trainer(&config, feed, (cg_trainer_options){.record_topk = linked, .replay_topk = file},
                      "cannot be replayed and recorded to at once");
    expect_no_trainer(&config, feed, (cg_trainer_options){.verify_recompute = true},
                      "policy stream computes nothing again");
    set(&config, "policy", "save");
    expect_no_trainer(&config, feed, (cg_trainer_options){.verify_recompute = true},
                      "policy save computes nothing again");
    ck_assert_int_ne(access(none, F_OK), 0);
    cg_feed_free(feed);
}
END_TEST

/* ---- recompute, certified ---- */

static const cg_op *honest;

/* Right but for the last bit of one element, as an op that is not pure would be. */
static bool lie(const cg_run_args *args) {
    if (!cg_op_kernel(honest, CG_F32)(args)) return false;
    ((unsigned char *)args->out[0].data)[4 * 5] ^= 1; /* the last bit of element 5 */
    return true;
}

START_TEST(a_clone_that_differs_ends_the_run) {
    cg_config config = small_config();
    set(&config, "policy", "stream+swiglu@layer3");
    cg_feed *feed = feed_of(&config);
    run plain = run_all(&config, feed, (cg_trainer_options){0}, "plain_recompute");
    for (int verify = 0; verify < 2; verify++) {
        cg_trainer *trainer = trainer_of(&config, feed, (cg_trainer_options){.verify_recompute = verify});
        const cg_step *step = cg_trainer_graph(trainer);
        run r = {0};
        train(trainer, 2, &r);
        ck_assert_int_eq(step->n_clones, 1);
        int64_t planned = plain.metrics[0].planned_peak_bytes;
        ck_assert(r.metrics[1].lm_loss == plain.metrics[1].lm_loss &&
                  r.metrics[1].grad_norm == plain.metrics[1].grad_norm);
        ck_assert_int_eq(r.metrics[1].planned_peak_bytes, r.metrics[1].measured_peak_bytes);
        ck_assert_int_ge(r.metrics[1].planned_peak_bytes, planned);
        cg_op liar = {0};
        for (int n = 0; n < step->graph->n_nodes; n++) {
            cg_node *node = step->graph->nodes[n];
            if (node->pass != CG_RECOMPUTE) continue;
            honest = node->op;
            liar = *honest;
            for (int isa = 0; isa < CG_ISAS; isa++) liar.run[CG_F32][isa] = lie;
            node->op = &liar;
        }
        ck_assert_ptr_nonnull(honest);
        cg_metrics m;
        cg_error error = {0};
        ck_assert(cg_trainer_step(trainer, &m, &error) == !verify);
        if (verify) {
            ck_assert_int_eq(error.code, CG_FAILED);
            ck_assert_str_eq(
                error.text,
                "step 3: layer3/ffn: swiglu: the recomputed output y differs from the original at element 5; "
                "parameters are as before this step");
            ck_assert_int_eq(cg_trainer_steps(trainer), 2);
        }
        cg_trainer_free(trainer);
    }
    cg_feed_free(feed);
}
END_TEST

int main(void) {
    if (!mkdtemp(folder)) return EXIT_FAILURE;
    const TTest *const tests[] = {a_replayed_run_is_the_recorded_one,
                                  nothing_is_chosen_in_a_replay,
                                  policies_on_one_selection,
                                  a_recording_goes_on,
                                  what_is_written_comes_back,
                                  recordings_of_other_runs,
                                  rows_that_a_row_does_not_see,
                                  packed_documents,
                                  damaged_files,
                                  torn_step,
                                  what_cannot_be_recorded_to,
                                  full_disk_keeps_whole_steps,
                                  runs_that_cannot_be,
                                  a_clone_that_differs_ends_the_run};
    int failed = suite_run("topk_log", tests, (int)(sizeof tests / sizeof *tests));
    char command[64];
    snprintf(command, sizeof command, "rm -r %s", folder);
    return system(command) ? EXIT_FAILURE : failed;
}
