#include "core/base/process.h"

#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

/* A line of /proc/self/status, "VmRSS:     1234 kB". */
static int64_t status_bytes(const char *key) {
    FILE *file = fopen("/proc/self/status", "r");
    char line[256];
    long long kib = -1;
    size_t length = strlen(key);
    while (file && kib < 0 && fgets(line, sizeof line, file))
        if (!strncmp(line, key, length) && sscanf(line + length, ": %lld kB", &kib) != 1) break;
    if (file) fclose(file);
    return kib < 0 ? -1 : kib * 1024;
}

int64_t cg_process_resident_bytes(void) { return status_bytes("VmRSS"); }

int64_t cg_process_peak_bytes(void) { return status_bytes("VmHWM"); }

void cg_process_forget_peak(void) {
    FILE *file = fopen("/proc/self/clear_refs", "w");
    if (!file) return;
    fputs("5", file);
    fclose(file);
}

/* ---- the most there may be ---- */

static void lower(cg_memory_limit *limit, long long bytes, const char *whose) {
    if (bytes >= 0 && bytes < limit->bytes) *limit = (cg_memory_limit){bytes, whose};
}

/* A file of one number; "max", which is none, leaves the limit as it is. */
static void lower_by_file(cg_memory_limit *limit, const char *path) {
    FILE *file = fopen(path, "r");
    long long bytes;
    if (!file) return;
    if (fscanf(file, "%lld", &bytes) == 1) lower(limit, bytes, "the cgroup of this process may have");
    fclose(file);
}

/* The group and all around it up to the mount's own. A container may see its group as the mount's root, under which the
 * path that the kernel tells does not exist: what is not there limits nothing. */
static void lower_by_groups(cg_memory_limit *limit, const char *root, const char *mount, char *group,
                            const char *name) {
    char path[2 * PATH_MAX];
    for (;;) {
        snprintf(path, sizeof path, "%s/sys/fs/cgroup%s%s/%s", root, mount, group, name);
        lower_by_file(limit, path);
        char *slash = strrchr(group, '/');
        if (!slash) return;
        *slash = 0;
    }
}

/* Does a list "cpu,memory" hold the controller of memory? */
static bool has_memory(const char *list, size_t length) {
    for (const char *at = list, *end = list + length; at < end;) {
        size_t word = strcspn(at, ",:");
        if (word == strlen("memory") && !strncmp(at, "memory", word)) return true;
        at += word + 1;
    }
    return false;
}

/* Lines "NUMBER:CONTROLLERS:PATH"; that of version 2 names no controllers, and has a mount of its own beside those of
 * version 1. */
static void lower_by_cgroup(cg_memory_limit *limit, const char *root) {
    char path[PATH_MAX], line[PATH_MAX + 256];
    snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    FILE *file = fopen(path, "r");
    while (file && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        char *list = strchr(line, ':'), *group = list ? strchr(++list, ':') : NULL;
        if (!group) continue;
        size_t length = (size_t)(group++ - list);
        if (has_memory(list, length)) {
            lower_by_groups(limit, root, "/memory", group, "memory.limit_in_bytes");
        } else if (!strncmp(line, "0::", 3)) {
            char again[sizeof line];
            snprintf(again, sizeof again, "%s", group);
            lower_by_groups(limit, root, "/unified", again, "memory.max");
            lower_by_groups(limit, root, "", group, "memory.max");
        }
    }
    if (file) fclose(file);
}

static void lower_by_rlimit(cg_memory_limit *limit, int resource, const char *whose) {
    struct rlimit r;
    if (getrlimit(resource, &r) == 0 && r.rlim_cur != RLIM_INFINITY && r.rlim_cur <= INT64_MAX)
        lower(limit, (long long)r.rlim_cur, whose);
}

cg_memory_limit cg_process_memory_limit(const char *root) {
    cg_memory_limit limit = {(int64_t)sysconf(_SC_PHYS_PAGES) * (int64_t)sysconf(_SC_PAGE_SIZE),
                             "this machine has"};
    lower_by_cgroup(&limit, root);
    lower_by_rlimit(&limit, RLIMIT_AS, "RLIMIT_AS (ulimit -v) allows this process");
    lower_by_rlimit(&limit, RLIMIT_DATA, "RLIMIT_DATA (ulimit -d) allows this process");
    return limit;
}
