#define _GNU_SOURCE /* asprintf */
#include "models/train/data.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "core/base/file.h"
#include "core/base/rng.h"
#include "core/base/shown.h"

enum {
    BLOCK = 4096,        /* bytes that are held out or trained on together */
    HELD_OUT_SHARE = 16, /* one byte of so many */
    MIN_PIECE = 16,      /* fewer rows at the end of a batch stay empty */
    MIN_REPEAT = 64,     /* shorter texts may well stand twice */
    MAX_SEGMENTS = 1 << 18,
    DRAW_BITS = 24 /* random draws of one batch and stream */
};
static const size_t max_corpus_bytes = (size_t)1 << 30;

struct document {
    char *name; /* below the folder */
    int64_t start, bytes;
};

struct region {
    int64_t start, bytes;
    int64_t end; /* bytes of all regions of the part up to this one */
};

struct part {
    struct region *regions;
    int64_t n, bytes;
};

enum { PAIR_TOKENS = CG_RATIO_CSA };

/* Sizes of the recall task. */
typedef struct recall {
    int64_t n_keys, n_values, n_pairs;
    int64_t reach, questions_at; /* tokens that stacked windows see back; the first question's place */
} recall;

struct cg_feed {
    cg_task task;
    int64_t batch_size, seq_len;
    uint64_t seed;
    char *source;
    cg_feed_facts facts;
    char *skipped;        /* text: what was passed over, in words */
    unsigned char *bytes; /* text: all documents end to end */
    struct part parts[2]; /* to train on, held out */
    recall recall;
};

/* ---- collecting documents ------------------------------------------------------------------------------- */

/* Why a file is passed over. */
enum { EMPTY, NO_TEXT, UNREADABLE, TOO_LARGE, BUILT, N_REASONS };

struct passed_over {
    int64_t n;
    char first[sizeof(cg_shown_end) + 80]; /* "name: why" */
};

/* A file or folder by device and inode, however it is reached. */
struct identity {
    dev_t device;
    ino_t inode;
    bool used;
};

struct link {
    char *path, *name;
};

struct corpus {
    unsigned char *bytes;
    size_t n_bytes, room;
    struct document *documents;
    int64_t n_documents, documents_room;
    int64_t n_files; /* regular files seen */
    struct passed_over passed_over[N_REASONS];
    struct identity *seen; /* files that were read and folders that were walked: a hash table, never full */
    size_t n_seen, seen_room;
    struct link *links; /* met on the way; they are followed behind everything else */
    size_t n_links, links_room;
    bool own_only; /* of the first folder only the project's rooms */
};

static bool fail_memory(cg_error *error) {
    return cg_fail(error, CG_FAILED, "memory is out while reading the text");
}

/* Bytes of the UTF-8 character at c, 0 when it is none. c may be read up to the 0 byte behind the text. */
static int utf8_character(const unsigned char *c) {
    if (c[0] < 0x80) return 1;
    int n = c[0] >= 0xf0 ? 4 : c[0] >= 0xe0 ? 3 : 2;
    if (c[0] < 0xc2 || c[0] > 0xf4) return 0; /* a byte from inside, an overlong form, beyond U+10FFFF */
    for (int i = 1; i < n; i++)
        if ((c[i] & 0xc0) != 0x80) return 0;
    if (c[0] == 0xe0 && c[1] < 0xa0) return 0; /* overlong */
    if (c[0] == 0xf0 && c[1] < 0x90) return 0;
    if (c[0] == 0xed && c[1] > 0x9f) return 0; /* a surrogate */
    if (c[0] == 0xf4 && c[1] > 0x8f) return 0; /* beyond U+10FFFF */
    return n;
}

/* NULL when the bytes are text, else why not. */
static const char *not_text(const char *data, size_t bytes) {
    if (bytes == 0) return "it is empty";
    if (memchr(data, 0, bytes)) return "it holds a NUL byte";
    const unsigned char *c = (const unsigned char *)data, *end = c + bytes;
    while (c < end) {
        int n = utf8_character(c);
        if (n == 0) return "it is not UTF-8";
        c += n;
    }
    return NULL;
}

static bool add_document(struct corpus *corpus, const char *name, const char *data, size_t bytes,
                         cg_error *error) {
    if (corpus->n_bytes + bytes > corpus->room) {
        size_t room = 2 * (corpus->n_bytes + bytes);
        unsigned char *larger = realloc(corpus->bytes, room);
        if (!larger) return fail_memory(error);
        corpus->bytes = larger;
        corpus->room = room;
    }
    if (corpus->n_documents == corpus->documents_room) {
        int64_t room = 2 * corpus->documents_room + 16;
        struct document *larger = realloc(corpus->documents, (size_t)room * sizeof *larger);
        if (!larger) return fail_memory(error);
        corpus->documents = larger;
        corpus->documents_room = room;
    }
    char *copy = strdup(name);
    if (!copy) return fail_memory(error);
    memcpy(corpus->bytes + corpus->n_bytes, data, bytes);
    corpus->documents[corpus->n_documents++] =
        (struct document){.name = copy, .start = (int64_t)corpus->n_bytes, .bytes = (int64_t)bytes};
    corpus->n_bytes += bytes;
    return true;
}

static void pass_over(struct corpus *corpus, int reason, const char *name, const char *why) {
    struct passed_over *p = &corpus->passed_over[reason];
    if (p->n++ == 0) snprintf(p->first, sizeof p->first, "%s: %.60s", cg_shown_path(name).text, why);
}

/* All that was passed over in words, malloc'd: "3 files without text (sub/a.png: it holds a NUL byte), ...". */
static char *passed_over_text(const struct corpus *corpus) {
    static const char *const words[N_REASONS] = {"empty", "without text", "unreadable", "too large",
                                                 "folders of builds"};
    char *text = NULL;
    size_t bytes = 0;
    FILE *stream = open_memstream(&text, &bytes);
    if (!stream) return NULL;
    bool some = false;
    for (int i = 0; i < N_REASONS; i++) {
        const struct passed_over *p = &corpus->passed_over[i];
        if (!p->n) continue;
        fprintf(stream, "%s%lld %s (%s%s)", some ? ", " : "", (long long)p->n, words[i],
                p->n > 1 ? "the first: " : "", p->first);
        some = true;
    }
    if (fclose(stream) == 0) return text;
    free(text);
    return NULL;
}

/* Add to the seen ones; *seen tells whether it was there before. False when memory is out. */
static bool see(struct corpus *corpus, const struct stat *status, bool *seen, cg_error *error) {
    if (2 * corpus->n_seen >= corpus->seen_room) {
        struct corpus larger = {.seen_room = 4 * corpus->seen_room + 64};
        larger.seen = calloc(larger.seen_room, sizeof *larger.seen);
        if (!larger.seen) return fail_memory(error);
        for (size_t i = 0; i < corpus->seen_room; i++) {
            const struct identity *old = &corpus->seen[i];
            struct stat facts = {.st_dev = old->device, .st_ino = old->inode};
            if (old->used) see(&larger, &facts, seen, error);
        }
        free(corpus->seen);
        corpus->seen = larger.seen;
        corpus->seen_room = larger.seen_room;
    }
    size_t at = ((size_t)status->st_ino * 0x9e3779b97f4a7c15u >> 20) + (size_t)status->st_dev;
    for (;; at++) {
        struct identity *one = &corpus->seen[at % corpus->seen_room];
        *seen = one->used && one->device == status->st_dev && one->inode == status->st_ino;
        if (*seen) return true;
        if (one->used) continue;
        *one = (struct identity){status->st_dev, status->st_ino, true};
        corpus->n_seen++;
        return true;
    }
}

static bool read_document(struct corpus *corpus, const char *path, const char *name, const struct stat *status,
                          cg_error *error) {
    char *data;
    size_t bytes;
    cg_error own = {0};
    corpus->n_files++;
    if ((uintmax_t)status->st_size > max_corpus_bytes) {
        char why[64];
        snprintf(why, sizeof why, "%lld bytes", (long long)status->st_size);
        pass_over(corpus, TOO_LARGE, name, why);
        return true;
    }
    if (!cg_file_read(path, max_corpus_bytes, &data, &bytes, &own)) {
        if (own.code == CG_FAILED)
            return cg_fail(error, own.code, "%s", own.text); /* the machine, not the file */
        const char *why = strrchr(own.text, ':');
        pass_over(corpus, UNREADABLE, name, why ? why + 2 : own.text);
        return true;
    }
    const char *reason = not_text(data, bytes);
    bool fine = true;
    if (reason)
        pass_over(corpus, bytes ? NO_TEXT : EMPTY, name, reason);
    else if (corpus->n_bytes + bytes > max_corpus_bytes)
        fine = cg_fail(error, CG_BAD_INPUT, "with %s the text has more than %zu bytes",
                       cg_shown_path(path).text, max_corpus_bytes);
    else
        fine = add_document(corpus, name, data, bytes, error);
    free(data);
    return fine;
}

static int by_name(const struct dirent **a, const struct dirent **b) {
    return strcmp((*a)->d_name, (*b)->d_name);
}

/* What a build leaves: of this project, what its ignore rules name. */
static bool is_build(const struct corpus *corpus, const char *name) {
    return corpus->own_only ? strncmp(name, "build", 5) == 0
                            : strcmp(name, "build") == 0 || strncmp(name, "build-", 6) == 0;
}

/* The project's own text: its rooms and its front page, not what runs and tests leave beside them. */
static bool is_own(const char *name) {
    static const char *const own[] = {"core",  "graph", "models",         "ops",
                                      "tests", "tools", "CMakeLists.txt", "README.md"};
    for (size_t i = 0; i < sizeof own / sizeof own[0]; i++)
        if (strcmp(name, own[i]) == 0) return true;
    return false;
}

/* Takes over the two names. */
static bool add_link(struct corpus *corpus, char *path, char *name, cg_error *error) {
    if (corpus->n_links == corpus->links_room) {
        size_t room = 2 * corpus->links_room + 16;
        struct link *larger = realloc(corpus->links, room * sizeof *larger);
        if (!larger) {
            free(path), free(name);
            return fail_memory(error);
        }
        corpus->links = larger;
        corpus->links_room = room;
    }
    corpus->links[corpus->n_links++] = (struct link){path, name};
    return true;
}

static bool walk(struct corpus *corpus, const char *path, const char *name, cg_error *error);

/* A file or folder that was reached, through a link or not. What was reached before is not taken again. */
static bool visit(struct corpus *corpus, const char *path, const char *name, const struct stat *status,
                  cg_error *error) {
    bool seen;
    const char *slash = strrchr(name, '/'), *last = slash ? slash + 1 : name;
    if (!S_ISDIR(status->st_mode) && !S_ISREG(status->st_mode)) return true;
    if (S_ISDIR(status->st_mode) && strcmp(last, ".git") == 0) return true;
    if (S_ISDIR(status->st_mode) && is_build(corpus, last)) {
        pass_over(corpus, BUILT, name, "taken for the output of a build");
        return true;
    }
    if (!see(corpus, status, &seen, error)) return false;
    if (seen) return true;
    return S_ISDIR(status->st_mode) ? walk(corpus, path, name, error)
                                    : read_document(corpus, path, name, status, error);
}

/* Read what lies below a folder; `name` is the folder's own name below the first one, "" for that. */
static bool walk(struct corpus *corpus, const char *path, const char *name, cg_error *error) {
    struct dirent **list;
    int n = scandir(path, &list, NULL, by_name);
    if (n < 0 && *name && cg_errno_code(errno) == CG_BAD_INPUT) {
        pass_over(corpus, UNREADABLE, name, strerror(errno));
        return true;
    }
    if (n < 0)
        return cg_fail(error, cg_errno_code(errno), "cannot read folder %s: %s", cg_shown_path(path).text,
                       strerror(errno));
    bool fine = true;
    for (int i = 0; i < n; i++) {
        const char *entry = list[i]->d_name;
        bool left_out = corpus->own_only && !*name && !is_own(entry);
        if (fine && strcmp(entry, ".") != 0 && strcmp(entry, "..") != 0 && !left_out) {
            char *below = NULL, *entry_name = NULL;
            struct stat status;
            if (asprintf(&below, "%s/%s", path, entry) < 0) below = NULL;
            if (asprintf(&entry_name, "%s%s%s", name, *name ? "/" : "", entry) < 0) entry_name = NULL;
            if (!below || !entry_name) {
                fine = fail_memory(error);
            } else if (lstat(below, &status) != 0) {
                pass_over(corpus, UNREADABLE, entry_name, strerror(errno));
            } else if (S_ISLNK(status.st_mode)) {
                fine = add_link(corpus, below, entry_name, error);
                below = entry_name = NULL;
            } else {
                fine = visit(corpus, below, entry_name, &status, error);
            }
            free(below), free(entry_name);
        }
        free(list[i]);
    }
    free(list);
    return fine;
}

/* Behind everything else, so that a text has the name of its file and not that of a link to it; folders that a
 * link leads to may hold further ones. */
static bool follow_links(struct corpus *corpus, cg_error *error) {
    struct stat status;
    for (size_t i = 0; i < corpus->n_links; i++) {
        const struct link link = corpus->links[i]; /* the list may move */
        if (stat(link.path, &status) != 0)
            pass_over(corpus, UNREADABLE, link.name, strerror(errno));
        else if (!visit(corpus, link.path, link.name, &status, error))
            return false;
    }
    return true;
}

static bool collect(struct corpus *corpus, const char *path, char **skipped, cg_error *error) {
    struct stat status;
    bool seen;
    if (stat(path, &status) != 0)
        return cg_fail(error, cg_errno_code(errno), "cannot read %s: %s", cg_shown_path(path).text,
                       strerror(errno));
    if (S_ISDIR(status.st_mode)) {
        if (!see(corpus, &status, &seen, error) || !walk(corpus, path, "", error) ||
            !follow_links(corpus, error))
            return false;
        if (!(*skipped = passed_over_text(corpus))) return fail_memory(error);
        if (corpus->n_documents > 0) return true;
        return cg_fail(error, CG_BAD_INPUT, "no text below %s: %lld files%s%s", cg_shown_path(path).text,
                       (long long)corpus->n_files, **skipped ? ", passed over: " : "", *skipped);
    }
    /* named itself, so that it is refused rather than passed over */
    corpus->n_files = 1;
    char *data;
    size_t bytes;
    const char *slash = strrchr(path, '/');
    if (!cg_file_read(path, max_corpus_bytes, &data, &bytes, error)) return false;
    const char *reason = not_text(data, bytes);
    bool fine = reason ? cg_fail(error, CG_BAD_INPUT, "%s is no text: %s", cg_shown_path(path).text, reason)
                       : add_document(corpus, slash ? slash + 1 : path, data, bytes, error);
    free(data);
    return fine;
}

static void corpus_free(struct corpus *corpus) {
    for (int64_t i = 0; i < corpus->n_documents; i++) free(corpus->documents[i].name);
    for (size_t i = 0; i < corpus->n_links; i++) free(corpus->links[i].path), free(corpus->links[i].name);
    free(corpus->documents);
    free(corpus->links);
    free(corpus->seen);
    free(corpus->bytes);
}

/* ---- dividing them ----------------------------------------------------------------------------------------
 */

struct block {
    int64_t start, bytes;
    uint32_t hash;
    bool held_out;
    bool first; /* of its document */
    const unsigned char *text;
    uint64_t text_hash;
};

static int by_hash(const void *a, const void *b) {
    const struct block *x = *(struct block *const *)a, *y = *(struct block *const *)b;
    if (x->hash != y->hash) return x->hash < y->hash ? -1 : 1;
    return (x > y) - (x < y);
}

/* Blocks of least hash are held out until their share is reached; the last one is never taken. */
static void choose_held_out(struct block **sorted, int64_t n, int64_t bytes) {
    qsort(sorted, (size_t)n, sizeof *sorted, by_hash);
    int64_t held_out = 0;
    for (int64_t i = 0; i + 1 < n && held_out * HELD_OUT_SHARE < bytes; i++) {
        sorted[i]->held_out = true;
        held_out += sorted[i]->bytes;
    }
}

static uint64_t fingerprint_add(uint64_t hash, const void *data, size_t bytes) {
    const unsigned char *c = data;
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ c[i]) * UINT64_C(0x100000001b3); /* FNV-1a */
    return hash;
}

static int by_text(const void *a, const void *b) {
    const struct block *x = *(struct block *const *)a, *y = *(struct block *const *)b;
    if (x->bytes != y->bytes) return x->bytes < y->bytes ? -1 : 1;
    if (x->text_hash != y->text_hash) return x->text_hash < y->text_hash ? -1 : 1;
    return memcmp(x->text, y->text, (size_t)x->bytes);
}

/* Bytes of held-out blocks that stand word for word among those to train on: files that are there twice. */
static int64_t repeated_bytes(struct block **sorted, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        sorted[i]->text_hash = fingerprint_add(0, sorted[i]->text, (size_t)sorted[i]->bytes);
    qsort(sorted, (size_t)n, sizeof *sorted, by_text);
    int64_t repeated = 0;
    for (int64_t i = 0, end; i < n; i = end) {
        int64_t held_out = 0;
        for (end = i; end < n && by_text(&sorted[i], &sorted[end]) == 0; end++)
            held_out += sorted[end]->held_out;
        if (held_out < end - i && sorted[i]->bytes >= MIN_REPEAT) repeated += held_out * sorted[i]->bytes;
    }
    return repeated;
}

static void add_region(struct part *part, int64_t start, int64_t bytes) {
    if (bytes < 2) return; /* no target in it */
    part->bytes += bytes;
    part->regions[part->n++] = (struct region){start, bytes, part->bytes};
}

/* Runs of blocks of one document and one part become regions. */
static void make_regions(const struct block *blocks, int64_t n, struct part parts[2]) {
    for (int64_t i = 0, next; i < n; i = next) {
        int64_t bytes = blocks[i].bytes;
        for (next = i + 1; next < n && !blocks[next].first && blocks[next].held_out == blocks[i].held_out;
             next++)
            bytes += blocks[next].bytes;
        add_region(&parts[blocks[i].held_out], blocks[i].start, bytes);
    }
}

static bool divide(cg_feed *feed, const struct corpus *corpus, cg_error *error) {
    int64_t n = 0;
    for (int64_t d = 0; d < corpus->n_documents; d++) n += (corpus->documents[d].bytes + BLOCK - 1) / BLOCK;
    struct block *blocks = calloc((size_t)n, sizeof *blocks), **sorted = calloc((size_t)n, sizeof *sorted);
    for (int p = 0; p < 2; p++) feed->parts[p].regions = calloc((size_t)n, sizeof *feed->parts[p].regions);
    bool fine = blocks && sorted && feed->parts[0].regions && feed->parts[1].regions;
    if (!fine) fail_memory(error);
    for (int64_t d = 0, i = 0; fine && d < corpus->n_documents; d++) {
        const struct document *document = &corpus->documents[d];
        uint64_t stream = cg_random_stream(document->name);
        for (int64_t at = 0; at < document->bytes; at += BLOCK, i++) {
            int64_t left = document->bytes - at;
            blocks[i] = (struct block){.start = document->start + at,
                                       .bytes = left < BLOCK ? left : BLOCK,
                                       .hash = cg_random_u32(0, stream, (uint64_t)(at / BLOCK)),
                                       .first = at == 0,
                                       .text = corpus->bytes + document->start + at};
            sorted[i] = &blocks[i];
        }
    }
    if (fine) {
        choose_held_out(sorted, n, (int64_t)corpus->n_bytes);
        make_regions(blocks, n, feed->parts);
        feed->facts.repeated_bytes = repeated_bytes(sorted, n);
    }
    free(blocks), free(sorted);
    return fine;
}

/* Share in the held-out part of the byte that is most frequent in the other. */
static double constant_accuracy(const cg_feed *feed) {
    int64_t counts[2][256] = {{0}};
    for (int p = 0; p < 2; p++)
        for (int64_t r = 0; r < feed->parts[p].n; r++)
            for (int64_t i = 0; i < feed->parts[p].regions[r].bytes; i++)
                counts[p][feed->bytes[feed->parts[p].regions[r].start + i]]++;
    int best = 0;
    for (int c = 1; c < 256; c++)
        if (counts[0][c] > counts[0][best]) best = c;
    return (double)counts[1][best] / (double)feed->parts[1].bytes;
}

static uint64_t fingerprint_numbers(uint64_t hash, const int64_t *numbers, int n) {
    for (int i = 0; i < n; i++) {
        unsigned char bytes[8];
        for (int b = 0; b < 8; b++) bytes[b] = (unsigned char)((uint64_t)numbers[i] >> (8 * b));
        hash = fingerprint_add(hash, bytes, sizeof bytes);
    }
    return hash;
}

/* Segments that nearly every batch has room in: twice what the mean length of a piece asks for. */
static int64_t segments_for(const struct part *part, int64_t n_rows, int64_t seq_len) {
    double weighted = 0;
    for (int64_t r = 0; r < part->n; r++) {
        int64_t bytes = part->regions[r].bytes;
        weighted += (double)bytes * (double)(bytes < seq_len ? bytes : seq_len);
    }
    int64_t n = (int64_t)(2.0 * (double)n_rows * (double)part->bytes / weighted) + 8;
    return n < MAX_SEGMENTS ? n : MAX_SEGMENTS;
}

/* ---- feeds ------------------------------------------------------------------------------------------------
 */

static cg_feed *feed_new(cg_task task, const char *name, const char *source, const cg_config *config,
                         cg_error *error) {
    cg_feed *feed = calloc(1, sizeof *feed);
    char *copy = strdup(source);
    if (!feed || !copy) {
        free(feed), free(copy);
        cg_fail(error, CG_FAILED, "memory is out for the data feed");
        return NULL;
    }
    feed->task = task;
    feed->batch_size = config->batch_size;
    feed->seq_len = config->seq_len;
    feed->seed = (uint64_t)config->seed;
    feed->source = copy;
    feed->facts = (cg_feed_facts){.name = name,
                                  .skipped = "",
                                  .source = copy,
                                  .n_rows = config->batch_size * config->seq_len,
                                  .max_segments = config->batch_size,
                                  .max_seqlen = config->seq_len};
    return feed;
}

void cg_feed_free(cg_feed *feed) {
    if (!feed) return;
    free(feed->parts[0].regions), free(feed->parts[1].regions);
    free(feed->bytes);
    free(feed->source);
    free(feed->skipped);
    free(feed);
}

const cg_feed_facts *cg_feed_facts_of(const cg_feed *feed) { return &feed->facts; }

static bool text_facts(cg_feed *feed, const struct corpus *corpus, cg_error *error) {
    cg_feed_facts *facts = &feed->facts;
    const struct part *train = &feed->parts[0], *held_out = &feed->parts[1];
    facts->documents = corpus->n_documents;
    facts->bytes = (int64_t)corpus->n_bytes;
    facts->skipped_files = corpus->n_files - corpus->n_documents;
    facts->skipped = feed->skipped ? feed->skipped : "";
    facts->train_bytes = train->bytes;
    facts->held_out_bytes = held_out->bytes;
    if (train->bytes < feed->seq_len || held_out->bytes < 2)
        return cg_fail(
            error, CG_BAD_INPUT,
            "%s is too short: of %lld bytes in %lld files, cut into blocks of %d, %lld are left to train on "
            "(at least seq_len = %lld are needed) and %lld are held out (at least 2)",
            cg_shown_path(feed->source).text, (long long)facts->bytes, (long long)facts->documents, BLOCK,
            (long long)train->bytes, (long long)feed->seq_len, (long long)held_out->bytes);
    int64_t both[2];
    for (int p = 0; p < 2; p++) both[p] = segments_for(&feed->parts[p], facts->n_rows, feed->seq_len);
    facts->max_segments = both[0] > both[1] ? both[0] : both[1];
    facts->chance = constant_accuracy(feed);
    uint64_t hash = fingerprint_add(cg_random_stream("text"), feed->bytes, corpus->n_bytes);
    for (int p = 0; p < 2; p++)
        for (int64_t r = 0; r < feed->parts[p].n; r++)
            hash = fingerprint_numbers(hash, &feed->parts[p].regions[r].start, 1);
    facts->fingerprint = hash;
    return true;
}

cg_feed *cg_feed_text(const char *path, const cg_config *config, cg_error *error) {
    if (config->vocab_size < 256) {
        cg_fail(error, CG_BAD_INPUT, "vocab_size must be at least 256 for text, a token per byte, got %lld",
                (long long)config->vocab_size);
        return NULL;
    }
    struct stat status;
    bool own_only = !path;
    if (!path) {
        path = CSAGRAD_SOURCE_DIR;
        if (stat(path, &status) != 0 || !S_ISDIR(status.st_mode)) {
            cg_fail(error, CG_BAD_INPUT,
                    "the sources at %s, the text to train on by default, are gone: name a file or "
                    "a folder of text with --data",
                    path);
            return NULL;
        }
    }
    struct corpus corpus = {.own_only = own_only};
    cg_feed *feed = feed_new(CG_TASK_TEXT, "text", path, config, error);
    bool fine = feed && collect(&corpus, path, &feed->skipped, error) && divide(feed, &corpus, error);
    if (fine) {
        feed->bytes = corpus.bytes; /* taken over */
        corpus.bytes = NULL;
        fine = text_facts(feed, &corpus, error);
    }
    corpus_free(&corpus);
    if (fine) return feed;
    cg_feed_free(feed);
    return NULL;
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Token numbers of recall: keys, values, the fill, questions, from 0. A question is its key's number further.
 */
static int64_t first_value(const recall *r) { return r->n_keys; }
static int64_t fill_token(const recall *r) { return r->n_keys + r->n_values; }
static int64_t first_question(const recall *r) { return fill_token(r) + 1; }

static bool check_recall(const recall *r, const cg_config *config, cg_error *error) {
    if (r->n_pairs > r->n_keys)
        return cg_fail(error, CG_BAD_INPUT, "recall_pairs must be at most recall_keys = %lld, got %lld",
                       (long long)r->n_keys, (long long)r->n_pairs);
    int64_t tokens = first_question(r) + r->n_keys;
    if (tokens > config->vocab_size)
        return cg_fail(
            error, CG_BAD_INPUT,
            "vocab_size must be at least %lld for recall (%lld keys, %lld values, fill, %lld questions), "
            "got %lld",
            (long long)tokens, (long long)r->n_keys, (long long)r->n_values, (long long)r->n_keys,
            (long long)config->vocab_size);
    if (config->seq_len <= r->questions_at)
        return cg_fail(
            error, CG_BAD_INPUT,
            "seq_len must be at least %lld for recall, got %lld: %lld pairs of %d tokens, and a gap beyond "
            "the %lld tokens that %lld layers with a window of %lld reach back",
            (long long)r->questions_at + 1, (long long)config->seq_len, (long long)r->n_pairs, PAIR_TOKENS,
            (long long)r->reach, (long long)config->num_hidden_layers, (long long)config->sliding_window);
    return true;
}

cg_feed *cg_feed_recall(const cg_config *config, cg_error *error) {
    recall r = {
        .n_keys = config->recall_keys, .n_values = config->recall_values, .n_pairs = config->recall_pairs};
    r.reach = config->num_hidden_layers * (config->sliding_window - 1);
    /* the first question is more than reach tokens behind the last pair's end, on a group's first token */
    r.questions_at = PAIR_TOKENS * (r.n_pairs + r.reach / PAIR_TOKENS + 1);
    if (!check_recall(&r, config, error)) return NULL;
    cg_feed *feed = feed_new(CG_TASK_RECALL, "recall", "generated", config, error);
    if (!feed) return NULL;
    feed->recall = r;
    feed->facts.chance = 1.0 / (double)r.n_values;
    feed->facts.n_pairs = r.n_pairs;
    feed->facts.n_queries = config->seq_len - r.questions_at;
    feed->facts.reach = r.reach;
    feed->facts.min_distance = r.questions_at - (PAIR_TOKENS * r.n_pairs - 1);
    int64_t numbers[] = {r.n_keys, r.n_values, r.n_pairs, r.questions_at, config->seq_len};
    feed->facts.fingerprint =
        fingerprint_numbers(cg_random_stream("recall"), numbers, sizeof numbers / sizeof numbers[0]);
    return feed;
}

cg_feed *cg_feed_new(const char *path, const cg_config *config, cg_error *error) {
    return config->task == CG_TASK_RECALL ? cg_feed_recall(config, error) : cg_feed_text(path, config, error);
}

/* ---- batches ----------------------------------------------------------------------------------------------
 */

cg_batch *cg_batch_new(const cg_feed *feed, cg_error *error) {
    cg_batch *batch = calloc(1, sizeof *batch);
    size_t n_rows = (size_t)feed->facts.n_rows, n_segments = (size_t)feed->facts.max_segments;
    if (batch) {
        batch->n_rows = feed->facts.n_rows;
        batch->max_segments = feed->facts.max_segments;
        batch->tokens = malloc(n_rows * sizeof *batch->tokens);
        batch->targets = malloc(n_rows * sizeof *batch->targets);
        batch->distances = malloc(n_rows * sizeof *batch->distances);
        batch->cu_seqlens = malloc((n_segments + 1) * sizeof *batch->cu_seqlens);
        batch->seqlens = malloc(n_segments * sizeof *batch->seqlens);
        batch->scratch = malloc((size_t)(feed->recall.n_keys + 1) * sizeof *batch->scratch);
        if (batch->tokens && batch->targets && batch->distances && batch->cu_seqlens && batch->seqlens &&
            batch->scratch)
            return batch;
    }
    cg_batch_free(batch);
    cg_fail(error, CG_FAILED, "memory is out for a batch of %zu rows", n_rows);
    return NULL;
}

void cg_batch_free(cg_batch *batch) {
    if (!batch) return;
    free(batch->tokens), free(batch->targets), free(batch->distances);
    free(batch->cu_seqlens), free(batch->seqlens), free(batch->scratch);
    free(batch);
}

/* Random draws of one batch for one purpose. */
struct draws {
    uint64_t seed, stream, next;
};

static struct draws draws_for(const cg_feed *feed, bool held_out, uint64_t index, const char *purpose,
                              int64_t sequence) {
    char name[64];
    snprintf(name, sizeof name, "data.%s.%s.%s", feed->facts.name, held_out ? "held_out" : "train", purpose);
    return (struct draws){.seed = held_out ? 0 : feed->seed,
                          .stream = cg_random_stream(name) + (uint64_t)sequence,
                          .next = index << DRAW_BITS};
}

static int64_t draw(struct draws *draws, int64_t n) {
    return cg_random_below(draws->seed, draws->stream, draws->next++, n);
}

/* The region that holds byte number `at` of a part. */
static const struct region *region_at(const struct part *part, int64_t at) {
    int64_t low = 0, high = part->n - 1;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (at < part->regions[middle].end)
            high = middle;
        else
            low = middle + 1;
    }
    return &part->regions[low];
}

static void text_batch(const cg_feed *feed, bool held_out, uint64_t index, cg_batch *batch) {
    const struct part *part = &feed->parts[held_out];
    struct draws draws = draws_for(feed, held_out, index, "pieces", 0);
    int64_t row = 0, n_segments = 0;
    while (n_segments < batch->max_segments && (n_segments == 0 || batch->n_rows - row >= MIN_PIECE)) {
        const struct region *region = region_at(part, draw(&draws, part->bytes));
        int64_t length = least(least(feed->seq_len, batch->n_rows - row), region->bytes);
        int64_t offset = draw(&draws, region->bytes - length + 1);
        const unsigned char *bytes = feed->bytes + region->start + offset;
        for (int64_t i = 0; i < length; i++) {
            bool last = offset + i + 1 == region->bytes;
            batch->tokens[row + i] = bytes[i];
            batch->targets[row + i] = last ? -1 : bytes[i + 1];
            batch->n_targets += !last;
        }
        batch->seqlens[n_segments] = (int32_t)length;
        row += length;
        batch->cu_seqlens[++n_segments] = (int32_t)row;
    }
    batch->n_real = row;
    for (; n_segments < batch->max_segments; n_segments++) {
        batch->seqlens[n_segments] = 0;
        batch->cu_seqlens[n_segments + 1] = (int32_t)row;
    }
}

/* The first n of the numbers 0 .. of-1 in random order (Fisher and Yates). */
static void choose(struct draws *draws, int32_t *numbers, int64_t n, int64_t of) {
    for (int64_t i = 0; i < of; i++) numbers[i] = (int32_t)i;
    for (int64_t i = 0; i < n; i++) {
        int64_t j = i + draw(draws, of - i);
        int32_t moved = numbers[i];
        numbers[i] = numbers[j];
        numbers[j] = moved;
    }
}

static void recall_sequence(const cg_feed *feed, bool held_out, uint64_t index, int64_t sequence,
                            cg_batch *batch) {
    const recall *r = &feed->recall;
    int64_t first = sequence * feed->seq_len;
    int32_t *tokens = batch->tokens + first, *targets = batch->targets + first, *keys = batch->scratch;
    struct draws values = draws_for(feed, held_out, index, "values", sequence);
    struct draws key_draws = draws_for(feed, held_out, index, "keys", sequence);
    struct draws questions = draws_for(feed, held_out, index, "questions", sequence);

    choose(&key_draws, keys, r->n_pairs, r->n_keys);
    for (int64_t p = 0; p < r->n_pairs; p++) {
        int32_t *pair = tokens + PAIR_TOKENS * p;
        pair[0] = pair[2] = keys[p];
        pair[1] = pair[3] = (int32_t)(first_value(r) + draw(&values, r->n_values));
    }
    for (int64_t t = PAIR_TOKENS * r->n_pairs; t < r->questions_at; t++) tokens[t] = (int32_t)fill_token(r);
    for (int64_t t = r->questions_at; t < feed->seq_len; t++) {
        const int32_t *pair = tokens + PAIR_TOKENS * draw(&questions, r->n_pairs);
        tokens[t] = (int32_t)first_question(r) + pair[0];
        targets[t] = pair[1];
        batch->distances[first + t] = (int32_t)(tokens + t - (pair + PAIR_TOKENS - 1));
    }
    batch->n_targets += feed->seq_len - r->questions_at;
}

static void recall_batch(const cg_feed *feed, bool held_out, uint64_t index, cg_batch *batch) {
    for (int64_t s = 0; s < feed->batch_size; s++) {
        recall_sequence(feed, held_out, index, s, batch);
        batch->seqlens[s] = (int32_t)feed->seq_len;
        batch->cu_seqlens[s + 1] = (int32_t)((s + 1) * feed->seq_len);
    }
    batch->n_real = batch->n_rows;
}

void cg_feed_batch(const cg_feed *feed, bool held_out, uint64_t index, cg_batch *batch) {
    batch->n_targets = batch->n_real = 0;
    batch->cu_seqlens[0] = 0;
    for (int64_t t = 0; t < batch->n_rows; t++) batch->tokens[t] = batch->targets[t] = batch->distances[t] = -1;
    if (feed->task == CG_TASK_TEXT)
        text_batch(feed, held_out, index, batch);
    else
        recall_batch(feed, held_out, index, batch);
}
