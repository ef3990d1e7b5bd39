/* What feeds draw: every place that may be drawn is, the first and the last as often as those between, and
 * no two sequences share their draws. */
#include "tests/support.h"

#include "models/train/data.h"

#include <sys/stat.h>
#include <unistd.h>

enum { DOCUMENTS = 32, BYTES = 20, LENGTH = 18, PLACES = BYTES - LENGTH + 1 };

static char folder[] = "/tmp/csagrad-draws-XXXXXX"; /* made by main: the text */

/* Of three bytes one tells the place i, two the document d. */
static char byte_of(int d, int i) { return (char)(i % 3 == 2 ? 'a' + i : i % 3 ? 'A' + d / 8 : '0' + d % 8); }

static bool write_text(void) {
    for (int d = 0; d < DOCUMENTS; d++) {
        char path[64];
        snprintf(path, sizeof path, "%s/%02d", folder, d);
        FILE *file = fopen(path, "w");
        for (int i = 0; file && i < BYTES; i++) fputc(byte_of(d, i), file);
        if (!file || fclose(file)) return false;
    }
    return true;
}

/* Which window a whole piece is: its document, then its place there. */
static int window_of(const int32_t *tokens) {
    for (int d = 0; d < DOCUMENTS; d++)
        for (int at = 0; at < PLACES; at++) {
            int i = 0;
            while (i < LENGTH && tokens[i] == byte_of(d, at + i)) i++;
            if (i == LENGTH) return d * PLACES + at;
        }
    ck_abort_msg("a piece is none of the text");
    return -1;
}

static cg_feed *feed_of(cg_task task, int64_t seq_len) {
    cg_config c = cg_config_default(task);
    cg_error error = {0};
    c.seq_len = seq_len;
    c.batch_size = 8;
    c.seed = 3;
    c.num_hidden_layers = c.n_compress_ratios = 2;
    c.sliding_window = 4;
    c.recall_keys = 12, c.recall_values = 5, c.recall_pairs = 10;
    cg_feed *feed = cg_feed_new(folder, &c, &error);
    if (!feed) ck_abort_msg("%s", error.text);
    return feed;
}

static cg_batch *batch_of(const cg_feed *feed) {
    cg_batch *batch = cg_batch_new(feed, NULL);
    ck_assert_ptr_nonnull(batch);
    return batch;
}

/* Each of `of` outcomes as often as another, within five deviations; those that cannot be have count 0 and
 * are `never`. */
static void expect_even(const char *what, const int64_t *counts, int n, int never) {
    double total = 0;
    for (int i = 0; i < n; i++) total += (double)counts[i];
    const double mean = total / (n - never), bound = 5 * sqrt(mean);
    int absent = 0;
    for (int i = 0; i < n; i++) {
        absent += counts[i] == 0;
        if (counts[i] && fabs((double)counts[i] - mean) > bound)
            ck_abort_msg("%s %d is drawn %lld times, expected %.0f +- %.0f", what, i, (long long)counts[i],
                         mean, bound);
    }
    if (absent != never) ck_abort_msg("%d of %d are never drawn as %s, expected %d", absent, n, what, never);
}

/* Sequences of draws, `length` of each: no run of `run` of them stands in two sequences, or twice in one. */
static void expect_apart(const int *draws, int n, int length, int run) {
    for (int a = 0; a < n; a++)
        for (int b = a; b < n; b++)
            for (int i = 0; i + run <= length; i++)
                for (int k = a == b ? i + 1 : 0; k + run <= length; k++)
                    if (!memcmp(draws + a * length + i, draws + b * length + k, (size_t)run * sizeof *draws))
                        ck_abort_msg("draws %d to %d of sequence %d are those from %d on of sequence %d", i,
                                     i + run - 1, a, k, b);
}

/* Documents of 20 bytes and windows of 18: three places in each, two of which have an edge. The held-out
 * part is two documents. */
START_TEST(windows_of_text) {
    enum { BATCHES = 900, PIECES = 8, APART = 40 };
    for (int held_out = 0; held_out < 2; held_out++) {
        cg_feed *feed = feed_of(CG_TASK_TEXT, LENGTH);
        cg_batch *b = batch_of(feed);
        int64_t windows[DOCUMENTS * PLACES] = {0}, places[PLACES] = {0};
        int draws[APART * PIECES];
        for (int i = 0; i < BATCHES; i++) {
            cg_feed_batch(feed, held_out, (uint64_t)i, b);
            for (int s = 0; s < PIECES; s++) {
                ck_assert_int_eq(b->seqlens[s], LENGTH);
                const int32_t *targets = b->targets + b->cu_seqlens[s];
                const int window = window_of(b->tokens + b->cu_seqlens[s]), at = window % PLACES;
                const int next = at + LENGTH < BYTES ? byte_of(window / PLACES, at + LENGTH) : -1;
                if (targets[LENGTH - 1] != next)
                    ck_abort_msg("the last target is %d, expected %d", targets[LENGTH - 1], next);
                windows[window]++;
                places[at]++;
                if (i < APART) draws[i * PIECES + s] = window;
            }
        }
        const int other =
            (int)(held_out ? cg_feed_facts_of(feed)->train_bytes : cg_feed_facts_of(feed)->held_out_bytes);
        expect_even("place", places, PLACES, 0);
        expect_even("window", windows, DOCUMENTS * PLACES, other / BYTES * PLACES);
        if (!held_out) expect_apart(draws, APART, PIECES, 4);
        cg_batch_free(b);
        cg_feed_free(feed);
    }
}
END_TEST

/* Whatever their tokens are called: every pair is asked for, with every key and every value. */
START_TEST(questions_of_recall) {
    enum { BATCHES = 60, SEQUENCES = 8, LENGTH_OF_ONE = 80, APART = 5, RUN = 9 };
    cg_feed *feed = feed_of(CG_TASK_RECALL, LENGTH_OF_ONE);
    const cg_feed_facts *facts = cg_feed_facts_of(feed);
    const int n_questions = (int)facts->n_queries;
    ck_assert_int_gt(n_questions, 2 * RUN);
    cg_batch *b = batch_of(feed);
    int64_t pairs[LENGTH_OF_ONE] = {0}, keys[256] = {0}, values[256] = {0};
    int draws[APART * SEQUENCES * LENGTH_OF_ONE], n = 0;
    for (int i = 0; i < BATCHES; i++) {
        cg_feed_batch(feed, false, (uint64_t)i, b);
        for (int64_t t = 0; t < b->n_rows; t++) {
            if (b->targets[t] < 0) continue;
            const int64_t pair = t % LENGTH_OF_ONE - b->distances[t];
            pairs[pair]++, keys[b->tokens[t]]++, values[b->targets[t]]++;
            if (i < APART) draws[n++] = (int)pair;
        }
    }
    ck_assert_int_eq(n, APART * SEQUENCES * n_questions);
    expect_even("pair", pairs, LENGTH_OF_ONE, LENGTH_OF_ONE - 10);
    /* questions of one sequence share its keys and values, so that these are counted alone */
    int n_keys = 0, n_values = 0;
    for (int k = 0; k < 256; k++) n_keys += keys[k] > 0, n_values += values[k] > 0;
    ck_assert_int_eq(n_keys, 12);
    ck_assert_int_eq(n_values, 5);
    expect_apart(draws, APART * SEQUENCES, n_questions, RUN);
    cg_batch_free(b);
    cg_feed_free(feed);
}
END_TEST

int main(void) {
    if (!mkdtemp(folder) || !write_text()) return EXIT_FAILURE;
    const TTest *const tests[] = {windows_of_text, questions_of_recall};
    int failed = suite_run("feed_draws", tests, (int)(sizeof tests / sizeof *tests));
    char command[64];
    snprintf(command, sizeof command, "rm -r %s", folder);
    return system(command) ? EXIT_FAILURE : failed;
}
