/* Data feeds: what a batch holds, that it depends on seed and index alone, that training never sees held-out
 * text, and that recall can be solved by looking back and by nothing nearer. */
#define _GNU_SOURCE /* nftw */
#include <check.h>
#include <ftw.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "models/train/data.h"

static char root[] = "test_model_data_XXXXXX"; /* made by main, one for all tests */
static char folder[64];                        /* of the running test */

static void enter_folder(void) {
    static int n;
    snprintf(folder, sizeof folder, "%s/%d_%d", root, (int)getpid(), n++);
    ck_assert_int_eq(mkdir(folder, 0777), 0);
}

static const char *at(const char *name) {
    static char paths[4][512];
    static int next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

static void put(const char *name, const void *data, size_t bytes) {
    FILE *f = fopen(at(name), "wb");
    ck_assert_ptr_nonnull(f);
    ck_assert_uint_eq(fwrite(data, 1, bytes, f), bytes);
    ck_assert_int_eq(fclose(f), 0);
}

/* n lines of 8 bytes, "0000012\n", numbered from `first`: every place in the corpus can be told from its text.
 */
static void put_numbers(const char *name, int first, int n) {
    FILE *f = fopen(at(name), "wb");
    ck_assert_ptr_nonnull(f);
    for (int i = 0; i < n; i++) fprintf(f, "%07d\n", first + i);
    ck_assert_int_eq(fclose(f), 0);
}

static cg_config small(void) {
    cg_config config = cg_config_toy();
    config.seq_len = 100;
    config.batch_size = 3;
    return config;
}

static cg_feed *text(const char *path, const cg_config *config) {
    cg_error error = {0};
    cg_feed *feed = cg_feed_text(path, config, &error);
    ck_assert_msg(feed != NULL, "%s", error.text);
    ck_assert_int_eq(error.code, CG_OK);
    return feed;
}

static cg_feed *recall(const cg_config *config) {
    cg_error error = {0};
    cg_feed *feed = cg_feed_recall(config, &error);
    ck_assert_msg(feed != NULL, "%s", error.text);
    ck_assert_int_eq(error.code, CG_OK);
    return feed;
}

static cg_batch *batch_of(const cg_feed *feed) {
    cg_batch *batch = cg_batch_new(feed, NULL);
    ck_assert_ptr_nonnull(batch);
    return batch;
}

static bool same(const cg_batch *a, const cg_batch *b) {
    size_t rows = (size_t)a->n_rows * sizeof(int32_t), segments = (size_t)a->max_segments * sizeof(int32_t);
    return a->n_rows == b->n_rows && a->max_segments == b->max_segments && a->n_targets == b->n_targets &&
           a->n_real == b->n_real && memcmp(a->tokens, b->tokens, rows) == 0 &&
           memcmp(a->targets, b->targets, rows) == 0 && memcmp(a->distances, b->distances, rows) == 0 &&
           memcmp(a->cu_seqlens, b->cu_seqlens, segments + sizeof(int32_t)) == 0 &&
           memcmp(a->seqlens, b->seqlens, segments) == 0;
}

static void expect_refusal(cg_feed *feed, const cg_error *error, const char *parts) {
    ck_assert_ptr_null(feed);
    ck_assert_int_eq(error->code, CG_BAD_INPUT);
    ck_assert_ptr_null(strchr(error->text, '\n'));
    char copy[400];
    snprintf(copy, sizeof copy, "%s", parts);
    for (char *part = strtok(copy, "|"); part; part = strtok(NULL, "|"))
        ck_assert_msg(strstr(error->text, part) != NULL, "'%s' is not in: %s", part, error->text);
}

static void refuse_text(const char *path, const cg_config *config, const char *parts) {
    cg_error error = {0};
    expect_refusal(cg_feed_text(path, config, &error), &error, parts);
    ck_assert_ptr_null(cg_feed_text(path, config, NULL));
}

static void refuse_recall(const cg_config *config, const char *parts) {
    cg_error error = {0};
    expect_refusal(cg_feed_recall(config, &error), &error, parts);
}

/* Check's own assertions cost a system call each, too much for every token. */
#define EXPECT(condition)                                                                                      \
    do {                                                                                                       \
        if (!(condition)) ck_abort_msg("does not hold: %s", #condition);                                       \
    } while (0)

/* What every batch of any feed keeps. */
static void check_packing(const cg_feed *feed, const cg_batch *b) {
    const cg_feed_facts *facts = cg_feed_facts_of(feed);
    EXPECT(b->n_rows == facts->n_rows);
    EXPECT(b->max_segments == facts->max_segments);
    EXPECT(b->cu_seqlens[0] == 0);
    for (int64_t s = 0; s < b->max_segments; s++) {
        int32_t length = b->cu_seqlens[s + 1] - b->cu_seqlens[s];
        EXPECT(length >= 0);
        EXPECT(length <= facts->max_seqlen);
        EXPECT(b->seqlens[s] == length);
    }
    int64_t n_real = b->cu_seqlens[b->max_segments], n_targets = 0;
    EXPECT(n_real <= b->n_rows);
    EXPECT(b->n_real == n_real);
    EXPECT(n_real > 0);
    for (int64_t t = 0; t < b->n_rows; t++) {
        if (t < n_real)
            EXPECT(b->tokens[t] >= 0 && b->tokens[t] < 256);
        else
            EXPECT(b->tokens[t] == -1 && b->targets[t] == -1);
        n_targets += b->targets[t] >= 0;
        if (b->targets[t] < 0) EXPECT(b->distances[t] == -1);
    }
    EXPECT(b->n_targets == n_targets);
    EXPECT(n_targets > 0);
}

/* Batches of a feed in any order, again, and from a new feed, are the same; other indexes, seeds and parts are
 * not, but the held-out part does not know the seed. */
static void check_determinism(cg_feed *(*make)(const cg_config *config)) {
    cg_config config = small();
    cg_feed *feed = make(&config), *again = make(&config);
    config.seed++;
    cg_feed *other = make(&config);
    ck_assert_uint_eq(cg_feed_facts_of(feed)->fingerprint, cg_feed_facts_of(other)->fingerprint);
    cg_batch *a = batch_of(feed), *b = batch_of(again);
    for (int held_out = 0; held_out < 2; held_out++) {
        static const uint64_t indexes[] = {0, 1, 2, 77, 1000000, (UINT64_C(1) << 40) - 1};
        for (int i = 0; i < 6; i++) {
            cg_feed_batch(feed, held_out, indexes[i], a);
            cg_feed_batch(again, held_out, indexes[5 - i], b); /* something else in between */
            ck_assert(!same(a, b));
            cg_feed_batch(again, held_out, indexes[i], b);
            ck_assert(same(a, b));
            cg_feed_batch(other, held_out, indexes[i], b);
            ck_assert(same(a, b) == (bool)held_out);
            cg_feed_batch(feed, !held_out, indexes[i], b);
            ck_assert(!same(a, b));
        }
    }
    cg_batch_free(a), cg_batch_free(b);
    cg_feed_free(feed), cg_feed_free(again), cg_feed_free(other);
}

/* ---- text -------------------------------------------------------------------------------------------------
 */

static cg_feed *numbers_feed(const cg_config *config) { return text(folder, config); }

START_TEST(text_is_deterministic) {
    put_numbers("a", 0, 9000);
    put_numbers("b", 9000, 500);
    check_determinism(numbers_feed);
}
END_TEST

/* The place of a segment in a corpus of numbered lines, from its first whole line; -1 when it has none. */
static int64_t place_of(const int32_t *tokens, int64_t n) {
    for (int64_t i = 0; i + 8 <= n; i++) {
        if (i > 0 && tokens[i - 1] != '\n') continue;
        if (i == 0 && tokens[7] != '\n') continue;
        int64_t number = 0;
        for (int d = 0; d < 7; d++) number = number * 10 + tokens[i + d] - '0';
        return number * 8 - i;
    }
    return -1;
}

static int byte_at(int64_t place) {
    static const int64_t powers[] = {1000000, 100000, 10000, 1000, 100, 10, 1};
    return place % 8 == 7 ? '\n' : (int)('0' + place / 8 / powers[place % 8] % 10);
}

START_TEST(text_parts_do_not_overlap) {
    enum { DOCUMENTS = 9, LINES = 1500, BYTES = DOCUMENTS * LINES * 8 };
    char name[16];
    for (int d = 0; d < DOCUMENTS; d++) {
        snprintf(name, sizeof name, "%d.txt", d);
        put_numbers(name, d * LINES, LINES);
    }
    cg_config config = cg_config_toy();
    config.seq_len = 300;
    cg_feed *feed = text(folder, &config);
    const cg_feed_facts *facts = cg_feed_facts_of(feed);
    EXPECT(facts->documents == DOCUMENTS);
    EXPECT(facts->bytes == BYTES);
    EXPECT(facts->train_bytes + facts->held_out_bytes == BYTES);
    EXPECT(facts->held_out_bytes >= BYTES / 16);
    EXPECT(facts->held_out_bytes <= BYTES / 16 + 4096);
    EXPECT(facts->chance > 0.12 && facts->chance < 0.5);
    cg_batch *b = batch_of(feed);
    char *seen = calloc(BYTES, 1);
    for (int held_out = 0; held_out < 2; held_out++) {
        for (uint64_t index = 0; index < 200; index++) {
            if (held_out && index == 40) break;
            cg_feed_batch(feed, held_out, index, b);
            check_packing(feed, b);
            EXPECT(b->n_real > b->n_rows - 16);
            for (int64_t s = 0; s < b->max_segments; s++) {
                int64_t n = b->seqlens[s];
                const int32_t *tokens = b->tokens + b->cu_seqlens[s], *targets = b->targets + b->cu_seqlens[s];
                int64_t place = place_of(tokens, n);
                if (place < 0) continue;
                for (int64_t i = 0; i < n; i++) {
                    EXPECT(tokens[i] == byte_at(place + i));
                    EXPECT(targets[i] < 0 ? i == n - 1 : i == n - 1 || targets[i] == tokens[i + 1]);
                    seen[place + i] |= (char)(1 << held_out);
                }
                if (targets[n - 1] < 0) continue;
                EXPECT(targets[n - 1] == byte_at(place + n));
                EXPECT((place + n) % (LINES * 8) != 0); /* not beyond the document */
                seen[place + n] |= (char)(1 << held_out);
            }
        }
    }
    int64_t counts[4] = {0};
    for (int i = 0; i < BYTES; i++) counts[(int)seen[i]]++;
    EXPECT(counts[3] == 0);
    EXPECT(counts[1] > facts->train_bytes * 97 / 100);
    EXPECT(counts[2] > facts->held_out_bytes * 97 / 100);
    free(seen);
    cg_batch_free(b);
    cg_feed_free(feed);
}
END_TEST

START_TEST(short_documents_are_whole_segments) {
    char name[16];
    for (int d = 0; d < 300; d++) {
        snprintf(name, sizeof name, "%03d", d);
        put_numbers(name, d * 10, 5); /* 40 bytes */
    }
    cg_config config = small();
    config.seq_len = 95; /* seven of them, and 5 rows that are too few for an eighth */
    cg_feed *feed = text(folder, &config);
    cg_batch *b = batch_of(feed);
    for (uint64_t index = 0; index < 200; index++) {
        cg_feed_batch(feed, index % 2, index, b);
        check_packing(feed, b);
        EXPECT(b->n_real == 280 && b->n_rows == 285);
        for (int64_t s = 0; s < b->max_segments; s++) {
            const int32_t *targets = b->targets + b->cu_seqlens[s];
            bool last = s + 1 == b->max_segments || b->seqlens[s + 1] == 0;
            if (b->seqlens[s] > 0 && !last) EXPECT(b->seqlens[s] == 40);
            if (b->seqlens[s] == 40) {
                EXPECT(place_of(b->tokens + b->cu_seqlens[s], 40) % 80 == 0);
                EXPECT(targets[39] == -1);
                for (int i = 0; i < 39; i++) EXPECT(targets[i] >= 0);
            }
        }
    }
    cg_batch_free(b);
    cg_feed_free(feed);
}
END_TEST

/* A run that goes on must go on with the same: the text, what of it is held out, and the sizes of recall. */
START_TEST(fingerprints) {
    cg_config config = small();
    uint64_t of_name[2], of_size[6];
    for (int i = 0; i < 2; i++) { /* which blocks are held out depends on a document's name */
        enter_folder();
        put_numbers(i ? "one" : "other", 0, 8 * 4096);
        cg_feed *feed = text(folder, &config);
        of_name[i] = cg_feed_facts_of(feed)->fingerprint;
        cg_feed_free(feed);
    }
    ck_assert_uint_ne(of_name[0], of_name[1]);
    for (int i = 0; i < 6; i++) {
        config = cg_config_default(CG_TASK_RECALL);
        config.recall_keys += i == 1, config.recall_values += i == 2, config.recall_pairs -= i == 3;
        config.sliding_window += 8 * (i == 4), config.seq_len += 4 * (i == 5);
        cg_feed *feed = recall(&config);
        of_size[i] = cg_feed_facts_of(feed)->fingerprint;
        cg_feed_free(feed);
        for (int k = 0; k < i; k++) ck_assert_uint_ne(of_size[i], of_size[k]);
    }
}
END_TEST

START_TEST(one_sequence_and_two_tokens) {
    put_numbers("a", 0, 3000);
    cg_config config = small();
    config.batch_size = 1;
    config.seq_len = 2;
    cg_feed *feed = text(folder, &config);
    cg_batch *b = batch_of(feed);
    for (uint64_t index = 0; index < 50; index++) {
        cg_feed_batch(feed, false, index, b);
        ck_assert_int_eq(b->n_real, 2);
        ck_assert_int_eq(b->seqlens[0], 2);
        ck_assert_int_eq(b->targets[0], b->tokens[1]);
    }
    cg_batch_free(b);
    cg_feed_free(feed);
}
END_TEST

START_TEST(folders_are_walked) {
    ck_assert_int_eq(mkdir(at("sub"), 0777), 0);
    ck_assert_int_eq(mkdir(at("sub/deeper"), 0777), 0);
    ck_assert_int_eq(mkdir(at(".git"), 0777), 0);
    ck_assert_int_eq(mkdir(at("sub/build-x"), 0777), 0);
    put_numbers("one", 0, 1000);
    put_numbers("sub/two", 0, 1000);
    put_numbers("sub/deeper/three", 0, 1000);
    put_numbers("build.txt", 0, 1000); /* a file, so it counts */
    put_numbers(".git/no", 0, 1000);
    put_numbers("sub/build-x/no", 0, 1000);
    put("nul", "text\0text", 9);
    put("latin", "caf\xe9 et th\xe9", 11);
    put("empty", "", 0);
    ck_assert_int_eq(symlink("one", at("link")), 0);
    ck_assert_int_eq(symlink("..", at("sub/loop")), 0);
    ck_assert_int_eq(symlink("nowhere", at("dangling")), 0);
    ck_assert_int_eq(mkfifo(at("pipe"), 0666), 0);
    cg_config config = small();
    cg_feed *feed = text(folder, &config);
    const cg_feed_facts *facts = cg_feed_facts_of(feed);
    ck_assert_int_eq(facts->documents, 4);
    ck_assert_int_eq(facts->bytes, 4 * 8000);
    ck_assert_int_eq(facts->skipped_files, 3);
    ck_assert_str_eq(facts->name, "text");
    ck_assert_str_eq(facts->source, folder);

    /* the same files elsewhere, made in another order and reached through a link: the same feed */
    char first[64];
    snprintf(first, sizeof first, "%s", folder);
    enter_folder();
    ck_assert_int_eq(mkdir(at("sub"), 0777), 0);
    ck_assert_int_eq(mkdir(at("sub/deeper"), 0777), 0);
    put_numbers("sub/deeper/three", 0, 1000);
    put_numbers("sub/two", 0, 1000);
    put_numbers("build.txt", 0, 1000);
    put_numbers("one", 0, 1000);
    char link[80];
    snprintf(link, sizeof link, "%s_link", folder);
    ck_assert_int_eq(symlink(strrchr(folder, '/') + 1, link), 0);
    cg_feed *moved = text(link, &config);
    ck_assert_uint_eq(cg_feed_facts_of(moved)->fingerprint, facts->fingerprint);
    cg_batch *a = batch_of(feed), *b = batch_of(moved);
    cg_feed_batch(feed, false, 3, a);
    cg_feed_batch(moved, false, 3, b);
    ck_assert(same(a, b));
    cg_feed_free(moved);

    put("one", "changed", 7);
    moved = text(folder, &config);
    ck_assert_uint_ne(cg_feed_facts_of(moved)->fingerprint, facts->fingerprint);
    cg_batch_free(a), cg_batch_free(b);
    cg_feed_free(feed), cg_feed_free(moved);
}
END_TEST

/* One file that is of no use neither ends a run nor vanishes unsaid. */
START_TEST(useless_files_are_passed_over) {
    ck_assert_int_eq(mkdir(at("building"), 0777), 0);
    ck_assert_int_eq(mkdir(at("builds"), 0777), 0);
    ck_assert_int_eq(mkdir(at("build"), 0777), 0);
    put_numbers("building/site", 0, 1000);
    put_numbers("builds/two", 1000, 1000);
    put_numbers("build/no", 0, 1000);
    put("a.png", "PNG\0", 4);
    put("b.png", "PNG\0", 4);
    put("latin", "caf\xe9", 4);
    put("empty", "", 0);
    put("large", "", 0);
    ck_assert_int_eq(truncate(at("large"), ((off_t)1 << 30) + 1), 0);
    ck_assert_int_eq(symlink("nowhere", at("dangling")), 0);
    cg_config config = small();
    cg_feed *feed = text(folder, &config);
    const cg_feed_facts *facts = cg_feed_facts_of(feed);
    ck_assert_int_eq(facts->documents, 2);
    ck_assert_int_eq(facts->skipped_files, 5);
    ck_assert_str_eq(
        facts->skipped,
        "1 empty (empty: it is empty), 3 without text (the first: a.png: it holds a NUL byte), 1 unreadable "
        "(dangling: No such file or directory), 1 too large (large: 1073741825 bytes), 1 folders of builds "
        "(build: taken for the output of a build)");
    cg_feed_free(feed);
    refuse_text(at("a.png"), &config, "a.png is no text: it holds a NUL byte");
    refuse_text(at("large"), &config, "large|it has 1073741825 bytes");
    if (geteuid() == 0) {
        puts("useless_files_are_passed_over: permissions are not tested, as root has all");
        return;
    }
    ck_assert_int_eq(chmod(at("latin"), 0), 0);
    ck_assert_int_eq(chmod(at("builds"), 0), 0);
    feed = text(folder, &config);
    ck_assert_ptr_nonnull(
        strstr(cg_feed_facts_of(feed)->skipped, "3 unreadable (the first: builds: Permission denied)"));
    cg_feed_free(feed);
    chmod(at("builds"), 0777);
}
END_TEST

/* Links lead to files and folders anywhere; each is read once, under its own name where it has one below the
 * folder. */
START_TEST(links_are_followed_once) {
    char outside[64];
    put_numbers("file", 0, 1000);
    ck_assert_int_eq(mkdir(at("rooms"), 0777), 0);
    put_numbers("rooms/one", 1000, 1000);
    ck_assert_int_eq(symlink("..", at("rooms/up")), 0);
    snprintf(outside, sizeof outside, "../%s", strrchr(folder, '/') + 1);
    enter_folder();
    char to_file[80], to_rooms[80];
    snprintf(to_file, sizeof to_file, "%s/file", outside);
    snprintf(to_rooms, sizeof to_rooms, "%s/rooms", outside);
    put_numbers("own", 2000, 1000);
    ck_assert_int_eq(symlink(to_file, at("a_link")), 0);
    ck_assert_int_eq(symlink(to_file, at("the_same")), 0);
    ck_assert_int_eq(symlink("own", at("b_link")), 0);
    ck_assert_int_eq(symlink(to_rooms, at("c_folder")),
                     0); /* and through its link up to all of the first folder */
    ck_assert_int_eq(symlink(".", at("cycle")), 0);
    cg_config config = small();
    cg_feed *feed = text(folder, &config);
    const cg_feed_facts *facts = cg_feed_facts_of(feed);
    ck_assert_int_eq(facts->documents, 3);
    ck_assert_int_eq(facts->bytes, 3 * 8000);
    ck_assert_int_eq(facts->repeated_bytes, 0);
    ck_assert_str_eq(facts->skipped, "");
    cg_feed_free(feed);
}
END_TEST

/* The same text under two names: what is held out of one may be trained on in the other. */
START_TEST(repeated_texts_are_noticed) {
    cg_config config = small();
    put_numbers("once", 0, 30000);
    cg_feed *feed = text(folder, &config);
    ck_assert_int_eq(cg_feed_facts_of(feed)->repeated_bytes, 0);
    int64_t held_out = cg_feed_facts_of(feed)->held_out_bytes;
    cg_feed_free(feed);
    put_numbers("twice", 0, 30000);
    feed = text(folder, &config);
    int64_t repeated = cg_feed_facts_of(feed)->repeated_bytes;
    ck_assert_int_ge(repeated, held_out); /* nearly all: few blocks are held out under both names */
    ck_assert_int_le(repeated, cg_feed_facts_of(feed)->held_out_bytes);
    cg_feed_free(feed);
    put_numbers("twice", 30000, 30000);
    feed = text(folder, &config);
    ck_assert_int_eq(cg_feed_facts_of(feed)->repeated_bytes, 0);
    cg_feed_free(feed);
}
END_TEST

START_TEST(text_refusals) {
    cg_config config = small();
    refuse_text(at("absent"), &config, "absent|No such file");
    refuse_text("", &config, "No such file");
    refuse_text(folder, &config, "no text below|0 files");
    put("nul", "text\0text", 9);
    put("empty", "", 0);
    refuse_text(folder, &config, "no text below|2 files");
    refuse_text(at("nul"), &config, "nul is no text: it holds a NUL byte");
    refuse_text(at("empty"), &config, "empty is no text: it is empty");
    refuse_text("/dev/null", &config, "/dev/null|a device, not a file");
    refuse_text(at("nul/below"), &config, "Not a directory");
    put_numbers("short", 0, 5);
    refuse_text(at("short"), &config,
                "short is too short: of 40 bytes in 1 files|blocks of 4096, 40 are left|"
                "seq_len = 100|0 are held out");
    put_numbers("two_blocks", 0, 516); /* 4128: one block is held out, whichever */
    config.seq_len = 4097;
    refuse_text(at("two_blocks"), &config, "too short: of 4128 bytes|seq_len = 4097");
    config.seq_len = 8;
    cg_feed_free(text(at("two_blocks"), &config));
    config.vocab_size = 255;
    refuse_text(at("two_blocks"), &config, "vocab_size must be at least 256 for text|got 255");
}
END_TEST

START_TEST(utf8_is_checked) {
    static const struct {
        const char *bytes;
        bool fine;
    } known[] = {
        {"\x7f", true},
        {"\xc2\x80", true},
        {"\xdf\xbf", true},
        {"\xe0\xa0\x80", true},
        {"\xed\x9f\xbf", true},
        {"\xee\x80\x80", true},
        {"\xef\xbf\xbf", true},
        {"\xf0\x90\x80\x80", true},
        {"\xf4\x8f\xbf\xbf", true},
        {"\x80", false},
        {"\xc0\x80", false},
        {"\xc1\xbf", false},
        {"\xc2", false},
        {"\xc2z", false},
        {"\xe0\x9f\xbf", false},
        {"\xe2\x82", false},
        {"\xed\xa0\x80", false},
        {"\xf0\x8f\xbf\xbf", false},
        {"\xf0\x90\x80", false},
        {"\xf4\x90\x80\x80", false},
        {"\xf5\x80\x80\x80", false},
        {"\xff", false},
    };
    cg_config config = small();
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        put("f", known[i].bytes, strlen(known[i].bytes));
        refuse_text(at("f"), &config, known[i].fine ? "too short" : "not UTF-8");
    }
}
END_TEST

/* The default text is this project itself. Others may edit it meanwhile, so only its size is looked at. */
START_TEST(own_sources_are_the_default) {
    cg_config config = cg_config_toy();
    cg_error error = {0};
    cg_feed *feed = cg_feed_new(NULL, &config, &error);
    ck_assert_msg(feed != NULL, "%s", error.text);
    const cg_feed_facts *facts = cg_feed_facts_of(feed);
    ck_assert_str_eq(facts->source, CSAGRAD_SOURCE_DIR);
    ck_assert_int_gt(facts->documents, 40);
    ck_assert_int_gt(facts->bytes, 200000);
    cg_feed *all = text(CSAGRAD_SOURCE_DIR, &config); /* given by name, the folder is taken as it is */
    ck_assert_int_gt(cg_feed_facts_of(all)->documents, facts->documents);
    cg_feed_free(all);
    ck_assert(facts->chance > 0.05 && facts->chance < 0.4);
    cg_batch *b = batch_of(feed);
    for (uint64_t index = 0; index < 20; index++) {
        cg_feed_batch(feed, index % 2, index, b);
        check_packing(feed, b);
    }
    cg_batch_free(b);
    cg_feed_free(feed);
}
END_TEST

/* ---- recall -----------------------------------------------------------------------------------------------
 */

static cg_feed *recall_feed(const cg_config *config) {
    cg_config longer = *config;
    longer.seq_len = 203;
    return recall(&longer);
}

START_TEST(recall_is_deterministic) { check_determinism(recall_feed); }
END_TEST

/* The structure of all sequences of a batch, and the solution by looking back. */
static void check_recall(const cg_feed *feed, const cg_config *c, const cg_batch *b) {
    const cg_feed_facts *facts = cg_feed_facts_of(feed);
    int64_t values = c->recall_keys, fill = values + c->recall_values, questions = fill + 1;
    int64_t first_question = c->seq_len - facts->n_queries;
    check_packing(feed, b);
    EXPECT(b->n_targets == facts->n_queries * c->batch_size);
    EXPECT(b->n_real == b->n_rows);
    for (int64_t s = 0; s < c->batch_size; s++) {
        EXPECT(b->seqlens[s] == c->seq_len);
        const int32_t *tokens = b->tokens + s * c->seq_len, *targets = b->targets + s * c->seq_len;
        const int32_t *distances = b->distances + s * c->seq_len;
        for (int64_t p = 0; p < facts->n_pairs; p++) {
            const int32_t *pair = tokens + 4 * p;
            EXPECT(pair[0] >= 0 && pair[0] < values && pair[2] == pair[0]);
            EXPECT(pair[1] >= values && pair[1] < fill && pair[3] == pair[1]);
            for (int64_t q = 0; q < p; q++) EXPECT(pair[0] != tokens[4 * q]);
        }
        for (int64_t t = 4 * facts->n_pairs; t < first_question; t++) EXPECT(tokens[t] == fill);
        for (int64_t t = 0; t < c->seq_len; t++) {
            EXPECT((targets[t] >= 0) == (t >= first_question));
            if (targets[t] < 0) continue;
            int64_t back = t - 1; /* the solution: the value behind the key that is asked for */
            while (back >= 0 && tokens[back] != tokens[t] - questions) back--;
            EXPECT(back >= 0 && back < 4 * facts->n_pairs);
            EXPECT(targets[t] == tokens[back + 1]);
            EXPECT(distances[t] == t - (back + 1)); /* the last of the pair's four tokens */
            EXPECT(distances[t] > facts->reach && distances[t] >= facts->min_distance);
        }
    }
    EXPECT(facts->min_distance > facts->reach);
    EXPECT(facts->reach == c->num_hidden_layers * (c->sliding_window - 1));
}

START_TEST(recall_is_solved_by_looking_back) {
    cg_config config = cg_config_default(CG_TASK_RECALL);
    cg_feed *feed = recall(&config);
    const cg_feed_facts *facts = cg_feed_facts_of(feed);
    ck_assert_str_eq(facts->name, "recall");
    ck_assert_int_ge(facts->n_queries, config.seq_len / 2);
    /* where questions stand, several times as many compressed rows are visible as are selected, pairs alone too
     */
    ck_assert_int_ge((config.seq_len - facts->n_queries) / 4, 3 * config.index_topk);
    ck_assert_int_ge(facts->n_pairs, 3 * config.index_topk);
    cg_batch *b = batch_of(feed);
    for (uint64_t index = 0; index < 60; index++) {
        cg_feed_batch(feed, index % 3 == 0, index, b);
        check_recall(feed, &config, b);
    }
    cg_batch_free(b);
    cg_feed_free(feed);
}
END_TEST

/* Nothing within reach of a question tells its value: no value stands there, and values of pairs are
 * independent of keys and places. */
START_TEST(recall_needs_the_pairs) {
    cg_config config = cg_config_default(CG_TASK_RECALL);
    cg_feed *feed = recall(&config);
    const cg_feed_facts *facts = cg_feed_facts_of(feed);
    ck_assert(facts->chance == 1.0 / (double)config.recall_values);
    cg_batch *b = batch_of(feed);
    int64_t n = 0, by_value[64] = {0}, by_sum[64] = {0};
    for (uint64_t index = 0; index < 100; index++) {
        cg_feed_batch(feed, false, index, b);
        for (int64_t row = 0; row < b->n_rows; row++) {
            if (b->targets[row] < 0) continue;
            int64_t value = b->targets[row] - config.recall_keys;
            for (int64_t i = row - facts->reach; i <= row; i++)
                EXPECT(b->tokens[i] < config.recall_keys ||
                       b->tokens[i] >= config.recall_keys + config.recall_values);
            by_value[value]++;
            by_sum[(value + b->tokens[row]) %
                   config.recall_values]++; /* a value that the key tells would pile up */
            n++;
        }
    }
    /* questions of one sequence share its 24 pairs: that many are independent */
    double pairs = (double)(100 * config.batch_size * facts->n_pairs);
    double sigma = sqrt(facts->chance * (1 - facts->chance) / pairs);
    for (int64_t v = 0; v < config.recall_values; v++) {
        ck_assert_double_eq_tol((double)by_value[v] / (double)n, facts->chance, 6 * sigma);
        ck_assert_double_eq_tol((double)by_sum[v] / (double)n, facts->chance, 6 * sigma);
    }
    cg_batch_free(b);
    cg_feed_free(feed);
}
END_TEST

START_TEST(recall_of_other_sizes) {
    static const int64_t sizes[][3] = {{64, 16, 12}, {10, 2, 10}, {3, 100, 2}, {2, 2, 2}, {70, 100, 30}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        for (int window = 1; window <= 9; window++) {
            cg_config config = small();
            config.sliding_window = window;
            config.num_hidden_layers = 1 + window % 3;
            config.seq_len = 203;
            config.recall_keys = sizes[i][0];
            config.recall_values = sizes[i][1];
            config.recall_pairs = sizes[i][2];
            cg_feed *feed = recall(&config);
            cg_batch *b = batch_of(feed);
            for (uint64_t index = 0; index < 5; index++) {
                cg_feed_batch(feed, false, index, b);
                check_recall(feed, &config, b);
            }
            cg_batch_free(b);
            cg_feed_free(feed);
        }
    }
}
END_TEST

START_TEST(recall_refusals) {
    cg_config config = cg_config_toy(); /* 4 layers, window 16: a reach of 60 tokens, 24 pairs of 4 */
    config.seq_len = 161;
    cg_feed *feed = recall(&config);
    const cg_feed_facts *facts = cg_feed_facts_of(feed);
    ck_assert_int_eq(facts->n_pairs, 24);
    ck_assert_int_eq(facts->n_queries, 1);
    ck_assert_int_eq(facts->reach, 60);
    ck_assert_int_eq(facts->min_distance, 65);
    cg_feed_free(feed);
    config.seq_len = 160;
    refuse_recall(&config, "seq_len must be at least 161 for recall, got 160|4 layers|window of 16|60 tokens");
    config = cg_config_toy();
    config.vocab_size = 80;
    refuse_recall(&config, "vocab_size must be at least 81 for recall|got 80");
    config.vocab_size = 81;
    cg_feed_free(recall(&config));
    config.recall_pairs = 33;
    refuse_recall(&config, "recall_pairs must be at most recall_keys = 32, got 33");
    config = cg_config_default(CG_TASK_RECALL);
    feed = cg_feed_new("no/such/path", &config, NULL); /* the path is for text */
    ck_assert_ptr_nonnull(feed);
    cg_feed_free(feed);
    cg_feed_free(NULL);
    cg_batch_free(NULL);
}
END_TEST

static int remove_entry(const char *path, const struct stat *status, int flag, struct FTW *place) {
    (void)status, (void)flag, (void)place;
    return remove(path);
}

int main(void) {
    if (!mkdtemp(root)) return EXIT_FAILURE;
    Suite *suite = suite_create("model_data");
    TCase *texts = tcase_create("text"), *recalls = tcase_create("recall");
    tcase_add_checked_fixture(texts, enter_folder, NULL);
    tcase_set_timeout(texts, 60);
    tcase_set_timeout(recalls, 60);
    tcase_add_test(texts, text_is_deterministic);
    tcase_add_test(texts, text_parts_do_not_overlap);
    tcase_add_test(texts, short_documents_are_whole_segments);
    tcase_add_test(texts, fingerprints);
    tcase_add_test(texts, one_sequence_and_two_tokens);
    tcase_add_test(texts, folders_are_walked);
    tcase_add_test(texts, useless_files_are_passed_over);
    tcase_add_test(texts, links_are_followed_once);
    tcase_add_test(texts, repeated_texts_are_noticed);
    tcase_add_test(texts, text_refusals);
    tcase_add_test(texts, utf8_is_checked);
    tcase_add_test(texts, own_sources_are_the_default);
    tcase_add_test(recalls, recall_is_deterministic);
    tcase_add_test(recalls, recall_is_solved_by_looking_back);
    tcase_add_test(recalls, recall_needs_the_pairs);
    tcase_add_test(recalls, recall_of_other_sizes);
    tcase_add_test(recalls, recall_refusals);
    suite_add_tcase(suite, texts);
    suite_add_tcase(suite, recalls);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_ENV);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    nftw(root, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
    return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
