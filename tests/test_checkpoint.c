/* Checkpoints as files: what their checksum sees, files of the older format, what counts as damaged. */
#include "tests/support.h"

#include "models/train/checkpoint.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <zlib.h> /* where it is missing there are no checkpoints, and this suite is left out */

static char folder[] = "/tmp/csagrad_checkpoint_XXXXXX";

/* This stands before that of the C library, to act like a disk that cannot read what it holds. */
static bool reads_fail;
ssize_t read(int fd, void *data, size_t bytes) {
    if (!reads_fail) return syscall(SYS_read, fd, data, bytes);
    errno = EIO;
    return -1;
}

static const char *at(const char *name) {
    static char paths[4][128];
    static int next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

/* Names whose bytes add up to the same, alone or in their last letter. */
static float a[] = {1, 2, 3, 4}, b[] = {5, 6, 7, 8};
static int32_t c[] = {1, 2, 3, 4};
static float turned_data[] = {2, 1, 3, 4};
static const cg_checkpoint_facts facts = {.step = 7, .data = 42, .config_json = "{\"steps\": 9}"};

static void list_tensors(cg_named_tensor t[3]) {
    t[0] = (cg_named_tensor){"layer.1.wq", {CG_F32, CG_SHAPE(2, 2), a}};
    t[1] = (cg_named_tensor){"layer.2.wq", {CG_F32, CG_SHAPE(2, 2), b}};
    t[2] = (cg_named_tensor){"layer.1.qw", {CG_I32, CG_SHAPE(4), c}};
}

static void write_good(const char *path) {
    cg_named_tensor t[3];
    list_tensors(t);
    cg_error error = {0};
    ck_assert_msg(cg_checkpoint_write(path, t, 3, &facts, &error), "%s", error.text);
}

/* Write tensors with the metadata of a good checkpoint, its checksum included. */
static void write_with_sum_of(const char *good, const char *path, const cg_named_tensor *t, int n,
                              const char *key, const char *value) {
    cg_error error = {0};
    cg_safetensors *file = cg_safetensors_open(good, &error);
    ck_assert_msg(file != NULL, "%s", error.text);
    const char *metadata[8][2];
    int n_metadata = 0;
    void *place = NULL;
    while (cg_safetensors_metadata_next(file, &place, &metadata[n_metadata][0], &metadata[n_metadata][1])) {
        if (key && !strcmp(metadata[n_metadata][0], key)) metadata[n_metadata][1] = value;
        n_metadata++;
    }
    ck_assert_msg(cg_safetensors_write(path, t, n, metadata, n_metadata, &error), "%s", error.text);
    cg_safetensors_close(file);
}

static void expect_state(const char *path, cg_checkpoint_state state, const char *part) {
    cg_error error = {0};
    cg_checkpoint_state got = cg_checkpoint_look(path, &error);
    ck_assert_msg(got == state && strstr(error.text, part), "%s: state %d, expected %d with \"%s\": %s", path,
                  (int)got, (int)state, part, error.text);
    ck_assert_int_eq(error.code == CG_OK, state == CG_CHECKPOINT_WHOLE);
}

static void swap(cg_tensor *x, cg_tensor *y) {
    cg_tensor z = *x;
    *x = *y;
    *y = z;
}

/* All that a reader takes over is in the sum: who has which name, dtype, shape, bytes; step, data, config. */
START_TEST(everything_is_summed) {
    const char *good = at("good"), *bad = at("bad");
    write_good(good);
    expect_state(good, CG_CHECKPOINT_WHOLE, "");
    cg_named_tensor t[3];
    list_tensors(t);
    write_with_sum_of(good, bad, t, 3, NULL, NULL);
    expect_state(bad, CG_CHECKPOINT_WHOLE, ""); /* so the changes below are what is seen */
    for (int kind = 0; kind < 6; kind++) {
        list_tensors(t);
        if (kind == 0) swap(&t[0].tensor, &t[1].tensor);
        if (kind == 1) swap(&t[0].tensor, &t[2].tensor);
        if (kind == 2) t[0].tensor.dtype = CG_I32;
        if (kind == 3) t[0].tensor.shape = CG_SHAPE(4, 1);
        if (kind == 4) t[0].name = "layer.3.wq";
        if (kind == 5) t[0].tensor.data = turned_data;
        write_with_sum_of(good, bad, t, 3, NULL, NULL);
        expect_state(bad, CG_CHECKPOINT_DAMAGED, "is damaged: its content has checksum");
    }
    list_tensors(t);
    write_with_sum_of(good, bad, t, 2, NULL, NULL);
    expect_state(bad, CG_CHECKPOINT_DAMAGED, "is damaged: its content has checksum");
    static const char *const texts[][2] = {{"step", "8"}, {"data", "000000000000002b"}, {"config", "{}"}};
    for (int i = 0; i < 3; i++) {
        write_with_sum_of(good, bad, t, 3, texts[i][0], texts[i][1]);
        expect_state(bad, CG_CHECKPOINT_DAMAGED, "is damaged: its content has checksum");
    }
    /* the order in the file is the writer's business */
    cg_named_tensor turned[3] = {t[1], t[2], t[0]};
    write_with_sum_of(good, bad, turned, 3, NULL, NULL);
    expect_state(bad, CG_CHECKPOINT_WHOLE, "");
}
END_TEST

/* Whole files, but not of the model at hand: the reader says what is too many, too few or another, and
 * takes nothing. */
START_TEST(tensors_must_be_those_of_the_model) {
    cg_named_tensor t[3];
    write_good(at("three"));
    for (int n = 1; n <= 3; n++) {
        float x[4] = {-1, -1, -1, -1}, y[4];
        int32_t z[4];
        list_tensors(t);
        t[0].tensor.data = x, t[1].tensor.data = y, t[2].tensor.data = z;
        cg_checkpoint_facts got = {.step = -1, .data = 42};
        cg_error error = {0};
        ck_assert_int_eq(cg_checkpoint_read(at("three"), t, n, &got, &error), n == 3);
        if (n == 3) continue;
        char part[64];
        snprintf(part, sizeof part, "holds 3 tensors, expected %d", n);
        ck_assert_msg(error.code == CG_BAD_INPUT && strstr(error.text, part), "%s", error.text);
        ck_assert(x[0] == -1 && got.step == -1);
    }
    t[2].name = "layer.3.wq";
    cg_checkpoint_facts got = {.data = 42};
    cg_error error = {0};
    ck_assert(!cg_checkpoint_read(at("three"), t, 3, &got, &error));
    ck_assert_msg(strstr(error.text, "lacks layer.3.wq"), "%s", error.text);
}
END_TEST

static uint64_t fnv(uint64_t hash, const void *data, size_t bytes) {
    for (const unsigned char *p = data, *end = p + bytes; p < end; p++) hash = (hash ^ *p) * 1099511628211u;
    return hash;
}

static void write_old(const char *path, uint64_t wrong) {
    cg_named_tensor t[3];
    list_tensors(t);
    const char *metadata[5][2] = {{"format", "csagrad checkpoint 1"},
                                  {"step", "7"},
                                  {"data", "000000000000002a"},
                                  {"config", facts.config_json},
                                  {"checksum", NULL}};
    uint64_t sum = wrong;
    for (int i = 0; i < 3; i++)
        sum += fnv(fnv(14695981039346656037u, t[i].name, strlen(t[i].name) + 1), t[i].tensor.data, 16);
    for (int i = 0; i < 4; i++) sum = fnv(sum, metadata[i][1], strlen(metadata[i][1]) + 1);
    char text[32];
    snprintf(text, sizeof text, "%016llx", (unsigned long long)sum);
    metadata[4][1] = text;
    cg_error error = {0};
    ck_assert_msg(cg_safetensors_write(path, t, 3, metadata, 5, &error), "%s", error.text);
}

/* Newest first, as many as asked for; copies and half-written files are none. */
START_TEST(list_of_a_folder) {
    static const char *const names[] = {
        "checkpoint-00000003.safetensors",  "checkpoint-00000012.safetensors",
        "checkpoint-00000007.safetensors",  "checkpoint-00000020.safetensors.tmp",
        "checkpoint-30.safetensors",        "checkpoint-00000040.safetensors.old",
        "checkpoint-123456789.safetensors", "other"};
    cg_error error = {0};
    int64_t steps[3] = {0};
    ck_assert_int_eq(mkdir(at("list"), 0777), 0);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char path[256];
        snprintf(path, sizeof path, "%s/%s", at("list"), names[i]);
        FILE *file = fopen(path, "w");
        ck_assert(file && !fclose(file));
    }
    ck_assert_int_eq(cg_checkpoint_list(at("list"), steps, 3, &error), 3);
    ck_assert(steps[0] == 123456789 && steps[1] == 12 && steps[2] == 7);
    ck_assert_int_eq(cg_checkpoint_list(at("list"), steps, 1, &error), 1);
    ck_assert_int_eq(steps[0], 123456789);
    ck_assert_int_eq(cg_checkpoint_list(at("no_list"), steps, 3, &error), 0);
}
END_TEST

/* As many numbers in another shape, and a run on other data. */
START_TEST(shape_and_data_must_fit) {
    float space[3][4];
    cg_named_tensor t[3];
    cg_checkpoint_facts now = {.data = facts.data};
    cg_error error = {0};
    write_good(at("fits"));
    list_tensors(t);
    for (int i = 0; i < 3; i++) t[i].tensor.data = space[i];
    ck_assert_msg(cg_checkpoint_read(at("fits"), t, 3, &now, &error), "%s", error.text);
    ck_assert(now.step == facts.step && space[1][2] == b[2]);
    now.data++;
    ck_assert(!cg_checkpoint_read(at("fits"), t, 3, &now, &error));
    ck_assert_msg(strstr(error.text, "was trained on other data (fingerprint 000000000000002a"), "%s",
                  error.text);
    now.data--;
    error = (cg_error){0};
    t[0].tensor.shape = CG_SHAPE(4, 1);
    ck_assert(!cg_checkpoint_read(at("fits"), t, 3, &now, &error));
    ck_assert_msg(strstr(error.text, "layer.1.wq is f32 [2, 2], expected f32 [4, 1]"), "%s", error.text);
}
END_TEST

START_TEST(older_files_are_read) {
    float x[4], y[4];
    int32_t z[4];
    cg_named_tensor t[3];
    list_tensors(t);
    t[0].tensor.data = x, t[1].tensor.data = y, t[2].tensor.data = z;
    write_old(at("old"), 0);
    cg_checkpoint_facts got = {.data = 42};
    cg_error error = {0};
    ck_assert_msg(cg_checkpoint_read(at("old"), t, 3, &got, &error), "%s", error.text);
    ck_assert_int_eq(got.step, 7);
    ck_assert(!memcmp(x, a, sizeof a) && !memcmp(y, b, sizeof b) && !memcmp(z, c, sizeof c));
    write_old(at("old"), 1);
    expect_state(at("old"), CG_CHECKPOINT_DAMAGED, "is damaged: its content has checksum");
}
END_TEST

/* Damage is what was read and is wrong; what was not read may be whole. */
START_TEST(damaged_or_unreadable) {
    const char *path = at("one");
    write_good(path);
    struct stat status;
    ck_assert_int_eq(stat(path, &status), 0);
    for (off_t bytes = 0; bytes < status.st_size; bytes += 1 + bytes / 3) {
        write_good(path);
        ck_assert_int_eq(truncate(path, bytes), 0);
        expect_state(path, CG_CHECKPOINT_DAMAGED, path);
    }
    write_good(path);
    cg_named_tensor t[3];
    list_tensors(t);
    write_with_sum_of(path, at("newer"), t, 3, "format", "csagrad checkpoint 3");
    expect_state(at("newer"), CG_CHECKPOINT_UNREADABLE, "\"csagrad checkpoint 3\", which this version");
    write_with_sum_of(path, at("other"), t, 3, "format", "somebody's");
    expect_state(at("other"), CG_CHECKPOINT_DAMAGED, "is not a checkpoint of csagrad");

    reads_fail = true;
    expect_state(path, CG_CHECKPOINT_UNREADABLE, "Input/output error");
    reads_fail = false;
    struct rlimit files, none;
    ck_assert_int_eq(getrlimit(RLIMIT_NOFILE, &files), 0);
    none = (struct rlimit){0, files.rlim_max};
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &none), 0);
    cg_checkpoint_state state = cg_checkpoint_look(path, NULL);
    int64_t step;
    int listed = cg_checkpoint_list(folder, &step, 1, NULL);
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &files), 0);
    ck_assert_int_eq(state, CG_CHECKPOINT_UNREADABLE);
    ck_assert_int_eq(listed, -1);
    ck_assert_int_eq(symlink("loop", at("loop")), 0);
    expect_state(at("loop"), CG_CHECKPOINT_UNREADABLE, "loop");
    ck_assert_int_eq(mkdir(at("folder"), 0777), 0);
    expect_state(at("folder"), CG_CHECKPOINT_UNREADABLE, "it is a folder");
    if (geteuid() == 0) {
        puts("damaged_or_unreadable: permissions are not tested, as root has all");
    } else {
        chmod(path, 0);
        expect_state(path, CG_CHECKPOINT_UNREADABLE, "Permission denied");
    }
    expect_state(at("absent"), CG_CHECKPOINT_UNREADABLE, "No such file");
    ck_assert_int_eq(cg_checkpoint_list(at("absent"), &step, 1, NULL), 0);
}
END_TEST

int main(void) {
    if (!mkdtemp(folder)) return EXIT_FAILURE;
    const TTest *const tests[] = {everything_is_summed, tensors_must_be_those_of_the_model,
                                  list_of_a_folder,     shape_and_data_must_fit,
                                  older_files_are_read, damaged_or_unreadable};
    int failed = suite_run("checkpoint", tests, (int)(sizeof tests / sizeof *tests));
    char command[64];
    snprintf(command, sizeof command, "rm -r %s", folder);
    return system(command) ? EXIT_FAILURE : failed;
}
