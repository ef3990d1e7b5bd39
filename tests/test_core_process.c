/* The most memory that this process may ever have: read from a tree of the kernel's files made here, and from limits of
 * the process itself. */
#define _GNU_SOURCE /* nftw, MAP_POPULATE */
#include "tests/support.h"

#include <ftw.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/base/file.h"
#include "core/base/process.h"

static char root[] = "/tmp/csagrad_process_XXXXXX";

static int remove_one(const char *path, const struct stat *status, int kind, struct FTW *place) {
    (void)status, (void)kind, (void)place;
    return remove(path);
}

static void new_tree(void) {
    strcpy(root + strlen(root) - 6, "XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(root));
}

static void remove_tree(void) { ck_assert_int_eq(nftw(root, remove_one, 16, FTW_DEPTH | FTW_PHYS), 0); }

/* A file of the tree; its folders are made. */
static void put(const char *name, const char *text) {
    char path[512];
    snprintf(path, sizeof path, "%s%s", root, name);
    char *slash = strrchr(path, '/');
    *slash = 0;
    ck_assert(cg_folder_make(path, NULL));
    *slash = '/';
    FILE *file = fopen(path, "w");
    ck_assert_ptr_nonnull(file);
    fputs(text, file);
    ck_assert_int_eq(fclose(file), 0);
}

typedef struct groups {
    const char *cgroup; /* of /proc/self */
    const char *files[4][2];
    int64_t limit; /* 0: the machine's */
} groups;

#define V2 "/sys/fs/cgroup"
#define V1 "/sys/fs/cgroup/memory"
#define V1_FILE "/memory.limit_in_bytes"

static const groups cases[] = {
    {"0::/\n", {{V2 "/memory.max", "4096000\n"}}, 4096000}, /* a container that sees itself as the root */
    {"0::/\n", {{V2 "/memory.max", "max\n"}}, 0},
    {"0::/\n", {{NULL}}, 0},
    {"0::/a/b\n", {{V2 "/a/b/memory.max", "max\n"}, {V2 "/a/memory.max", "8192\n"}}, 8192}, /* a parent's */
    {"0::/a/b\n", {{V2 "/a/b/memory.max", "100\n"}, {V2 "/a/memory.max", "200\n"}}, 100},
    {"0::/a/b\n", {{V2 "/a/b/memory.max", "200\n"}, {V2 "/a/memory.max", "100\n"}}, 100},
    {"0::/a\n", {{V2 "/memory.max", "300\n"}, {V2 "/b/memory.max", "100\n"}}, 300}, /* not a sister's */
    {"0::/a:b\n", {{V2 "/a:b/memory.max", "300\n"}}, 300},
    {"0::/a\n", {{V2 "/a/memory.max", "0\n"}}, 0},
    {"0::/a\n", {{V2 "/a/memory.max", "9223372036854775807\n"}}, 0},
    {"0::/a\n", {{V2 "/a/memory.max", ""}}, 0},
    {"4:memory:/x/y\n0::/\n", {{V1 "/x/y" V1_FILE, "9223372036854771712\n"}, {V1 "/x" V1_FILE, "500\n"}}, 500},
    {"5:cpu,memory:/x\n", {{V1 "/x" V1_FILE, "500\n"}}, 500},
    {"5:cpu,memory2:/x\n", {{V1 "/x" V1_FILE, "500\n"}}, 0},
    /* version 1 in a container: the path is that of the host, and does not exist inside */
    {"4:memory:/docker/0123\n0::/docker/0123\n", {{V1 V1_FILE, "700\n"}}, 700},
    {"4:memory:/x\n0::/y\n", {{V1 "/x" V1_FILE, "900\n"}, {V2 "/unified/y/memory.max", "800\n"}}, 800},
    {"nothing of use\n::\n:\n", {{V2 "/memory.max", "5\n"}}, 0},
};

static const char machine[] = "this machine has", group[] = "the cgroup of this process may have";

START_TEST(limits_of_groups) {
    struct rlimit none;
    ck_assert(getrlimit(RLIMIT_AS, &none) == 0 && none.rlim_cur == RLIM_INFINITY);
    new_tree();
    const cg_memory_limit most = cg_process_memory_limit(root); /* nothing is there */
    ck_assert_str_eq(most.whose, machine);
    ck_assert_int_gt(most.bytes, 1 << 26);
    remove_tree();
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        new_tree();
        put("/proc/self/cgroup", cases[c].cgroup);
        for (int f = 0; f < 4 && cases[c].files[f][0]; f++) put(cases[c].files[f][0], cases[c].files[f][1]);
        cg_memory_limit limit = cg_process_memory_limit(root);
        bool zero = cases[c].files[0][1] && !strcmp(cases[c].files[0][1], "0\n");
        int64_t want = cases[c].limit || zero ? cases[c].limit : most.bytes;
        if (limit.bytes != want) ck_abort_msg("case %zu: %lld bytes", c, (long long)limit.bytes);
        ck_assert_str_eq(limit.whose, want == most.bytes ? machine : group);
        remove_tree();
    }
}
END_TEST

/* Executors are refused before the arena is mapped, with both numbers. Without the sanitizers, which reserve terabytes. */
START_TEST(limits_of_the_process) {
#ifndef __SANITIZE_ADDRESS__
    static const struct {
        int resource;
        const char *name;
    } limits[] = {{RLIMIT_AS, "RLIMIT_AS (ulimit -v)"}, {RLIMIT_DATA, "RLIMIT_DATA (ulimit -d)"}};
    cg_graph *graph = cg_graph_new(&cg_all_ops);
    cg_value *x = cg_leaf(graph, CG_LEAF_INPUT, "x", CG_F32, CG_SHAPE(1 << 27));
    cg_keep(cg_scale(graph, x, 2));
    cg_plan *plan = cg_plan_make(graph, NULL, NULL);
    ck_assert_ptr_nonnull(plan);
    ck_assert_int_eq(plan->peak_bytes, 1 << 30);
    for (int l = 0; l < 2; l++) {
        pid_t child = fork();
        if (child == 0) {
            struct rlimit limit = {(1 << 30) - 4096, RLIM_INFINITY};
            char want[160];
            cg_error error = {0};
            snprintf(want, sizeof want, "the step needs 1073741824 bytes, %s allows this process 1073737728",
                     limits[l].name);
            bool ok = setrlimit(limits[l].resource, &limit) == 0 && !cg_exec_new(plan, NULL, &error) &&
                      error.code == CG_FAILED && !strcmp(error.text, want);
            if (!ok) fprintf(stderr, "%s\n", error.text);
            _exit(ok ? 0 : 1);
        }
        int status;
        ck_assert_int_eq(waitpid(child, &status, 0), child);
        ck_assert_int_eq(status, 0);
    }
    cg_plan_free(plan);
    cg_graph_free(graph);
#endif
}
END_TEST

/* The kernel counts in kB, which are 1024 bytes. */
START_TEST(memory_in_use) {
    const int64_t bytes = 64 << 20, before = cg_process_resident_bytes();
    void *memory =
        mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    ck_assert(memory != MAP_FAILED);
    const int64_t after = cg_process_resident_bytes();
    ck_assert_int_gt(before, 0);
    ck_assert_int_ge(after - before, bytes - bytes / 100);
    ck_assert_int_le(after - before, bytes + bytes / 100);
    ck_assert_int_eq(munmap(memory, (size_t)bytes), 0);
    ck_assert_int_ge(cg_process_peak_bytes(), before + bytes - bytes / 100);
}
END_TEST

SUITE("process", limits_of_groups, limits_of_the_process, memory_in_use)
