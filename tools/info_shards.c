/* csagrad info of many files: an index of shards, held against them, or a folder. */
#include "tools/info.h"
#include "tools/json_number.h"

#include <dirent.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "core/base/file.h"
#include "core/base/shown.h"
#include "tools/csagrad.h"
#include "tools/options.h"

static const char index_end[] = ".safetensors.index.json";

/* ---- what is wrong ---- */

static void problem(json_t *problems, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void problem(json_t *problems, const char *format, ...) {
    char text[CG_ERROR_TEXT];
    va_list args;
    va_start(args, format);
    if (vsnprintf(text, sizeof text, format, args) >= (int)sizeof text) cg_shown_trim(text);
    va_end(args);
    json_array_append_new(problems, json_string(text));
}

static void print_problems(const json_t *problems) {
    enum { SHOWN = 20 };
    size_t n = json_array_size(problems);
    if (n) printf("\nproblems\n");
    for (size_t i = 0; i < n && i < SHOWN; i++) puts(json_string_value(json_array_get(problems, i)));
    if (n > SHOWN) printf("... and %zu more (--json has them all)\n", n - SHOWN);
}

/* The exit code, with a sentence about the first problem. */
static int end_with(const char *program, const char *path, json_t *problems) {
    size_t n = json_array_size(problems);
    cg_error error = {0};
    if (n)
        cg_fail(&error, CG_BAD_INPUT, "%s: %zu problem%s, the first: %s", cg_shown_path(path).text, n,
                n == 1 ? "" : "s", json_string_value(json_array_get(problems, 0)));
    json_decref(problems);
    return n ? tool_failed(program, &error) : CG_OK;
}

/* ---- an index ---- */

typedef struct shards {
    const info *in;
    char folder[4096];
    json_t *map, *metadata; /* of the index */
    json_t *files;          /* name of a shard -> null */
    json_t *found;          /* name of a tensor -> null, where the index says */
    json_t *tensors, *problems;
    table *table;
    int64_t bytes;
    bool all_open;
} shards;

/* Shards lie beside or below their index. */
static bool stays_inside(const char *name) {
    if (!*name || *name == '/') return false;
    for (const char *part = name; part; part = strchr(part, '/') ? strchr(part, '/') + 1 : NULL)
        if (!strncmp(part, "..", 2) && (part[2] == '/' || !part[2])) return false;
    return true;
}

static void add_entry(shards *s, const char *file, const cg_entry *e) {
    const char *told = json_string_value(json_object_get(s->map, e->name));
    if (!told)
        problem(s->problems, "%s holds %s, which the index lacks", cg_shown(file).text, cg_shown(e->name).text);
    else if (strcmp(told, file))
        problem(s->problems, "%s holds %s, which the index has in %s", cg_shown(file).text,
                cg_shown(e->name).text, cg_shown(told).text);
    else
        json_object_set_new(s->found, e->name, json_null());
    if (told && !strcmp(told, file)) s->bytes += e->bytes;
    if (s->in->json) {
        json_t *entry = info_entry_json(s->in, e);
        json_object_set_new(entry, "file", json_string(file));
        json_array_append_new(s->tensors, entry);
    } else {
        table_cell(s->table, "%s", cg_shown(file).text);
        info_entry_cells(s->table, e);
    }
}

static void add_shard(shards *s, const char *file) {
    char path[sizeof s->folder + 256];
    cg_error error = {0};
    cg_safetensors *shard = NULL;
    if (!stays_inside(file) || strlen(file) > 255)
        problem(s->problems, "the index names the shard %s, which is no file beside it", cg_shown(file).text);
    else if (snprintf(path, sizeof path, "%s%s", s->folder, file), !(shard = cg_safetensors_open(path, &error)))
        problem(s->problems, "%s", error.text);
    s->all_open &= shard != NULL;
    const char *name;
    json_t *told;
    for (int i = 0; shard && i < cg_safetensors_n_entries(shard); i++)
        add_entry(s, file, cg_safetensors_entry(shard, i));
    if (shard) json_object_foreach(s->map, name, told) {
            if (strcmp(json_string_value(told), file) || json_object_get(s->found, name)) continue;
            problem(s->problems, "%s lacks %s, which the index has in it", cg_shown(file).text,
                    cg_shown(name).text);
        }
    cg_safetensors_close(shard);
}

static void check_total(shards *s) {
    const json_t *total = json_object_get(s->metadata, "total_size");
    if (total && !json_is_integer(total))
        problem(s->problems, "metadata.total_size of the index is no whole number");
    else if (total && s->all_open && json_integer_value(total) != s->bytes)
        problem(s->problems,
                "metadata.total_size of the index is %" JSON_INTEGER_FORMAT
                ", but the tensors that it names have %" PRId64 " bytes",
                json_integer_value(total), s->bytes);
}

static json_t *read_index(const char *path, cg_error *error) {
    char *text;
    size_t bytes;
    json_error_t why;
    if (!cg_file_read(path, 1 << 28, &text, &bytes, error)) return NULL;
    json_t *root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &why),
           *map = json_object_get(root, "weight_map");
    const char *name;
    json_t *shard;
    free(text);
    bool ok = root ? json_is_object(map) ||
                         cg_fail(error, CG_BAD_INPUT, "%s: has no object weight_map: is it an index of shards?",
                                 cg_shown_path(path).text)
                   : cg_fail(error, CG_BAD_INPUT, "%s: is not valid JSON at its byte %d: %s",
                             cg_shown_path(path).text, why.position, cg_shown(why.text).text);
    if (ok) json_object_foreach(map, name, shard) {
            if (ok && !json_is_string(shard))
                ok = cg_fail(error, CG_BAD_INPUT,
                             "%s: weight_map has no name of a file for %s, expected a string",
                             cg_shown_path(path).text, cg_shown(name).text);
        }
    if (ok) return root;
    json_decref(root);
    return NULL;
}

static int print_index(const info *in, const char *program, const char *path) {
    cg_error error = {0};
    json_t *root = read_index(path, &error), *value;
    const char *slash = strrchr(path, '/'), *name;
    if (root && slash && slash - path >= 4095)
        cg_fail(&error, CG_BAD_INPUT, "%s: its path is too long", cg_shown_path(path).text);
    if (error.code) {
        json_decref(root);
        return tool_failed(program, &error);
    }
    shards s = {.in = in,
                .files = json_object(),
                .found = json_object(),
                .tensors = json_array(),
                .problems = json_array(),
                .table = in->json ? NULL : table_new("llllr"),
                .all_open = true};
    snprintf(s.folder, sizeof s.folder, "%.*s", slash ? (int)(slash - path + 1) : 0, path);
    s.map = json_object_get(root, "weight_map");
    s.metadata = json_object_get(root, "metadata");
    table_cell(s.table, "file");
    info_titles(s.table);
    json_object_foreach(s.map, name, value) json_object_set_new(s.files, json_string_value(value), json_null());
    json_object_foreach(s.files, name, value) add_shard(&s, name);
    check_total(&s);
    if (in->json) {
        json_t *metadata = s.metadata ? json_incref(s.metadata) : json_object();
        json_print(json_pack("{s:s, s:O, s:I, s:o, s:O}", "format", "index", "tensors", s.tensors, "bytes",
                             (json_int_t)s.bytes, "metadata", metadata, "problems", s.problems),
                   JSON_INDENT(2));
    } else {
        printf("index of %zu shard%s, %zu tensors, %" PRId64 " bytes\n\n", json_object_size(s.files),
               json_object_size(s.files) == 1 ? "" : "s", json_object_size(s.map), s.bytes);
        table_print(s.table);
        print_problems(s.problems);
    }
    json_decref(s.files);
    json_decref(s.found);
    json_decref(s.tensors);
    json_decref(root);
    return end_with(program, path, s.problems);
}

bool info_is_index(const char *path) {
    char start[9] = "";
    FILE *file = fopen(path, "rb");
    size_t n = file ? fread(start, 1, sizeof start - 1, file) : 0;
    if (file) fclose(file);
    /* the length that a safetensors file begins with has zeros */
    return strlen(start) == n && start[strspn(start, " \t\r\n")] == '{';
}

/* ---- a folder ---- */

static bool ends_with(const char *name, const char *end) {
    size_t n = strlen(name), m = strlen(end);
    return n >= m && !strcmp(name + n - m, end);
}

bool info_is_folder(const char *path) {
    struct stat facts;
    return !stat(path, &facts) && S_ISDIR(facts.st_mode);
}

static bool is_file(const char *path) {
    struct stat facts;
    return !stat(path, &facts) && S_ISREG(facts.st_mode);
}

/* One file of the folder. What is no file of tensors is passed over, unless its name says that it is one. */
static void add_file(const info *in, const char *path, const char *name, json_t *files, json_t *problems) {
    cg_error error = {0};
    cg_archive *file = cg_archive_open(path, &error);
    if (!file && (ends_with(name, ".safetensors") || ends_with(name, ".npy") || ends_with(name, ".npz")))
        problem(problems, "%s", error.text);
    if (!file) return;
    json_t *listed = in->json ? info_archive_json(in, file) : json_object();
    json_object_set_new(listed, "file", json_words(name));
    if (!in->json) {
        printf("%s%s: ", json_array_size(files) ? "\n" : "", cg_shown(name).text);
        info_print_archive(in, file);
    }
    json_array_append_new(files, listed);
    cg_archive_close(file);
}

static int print_folder(const info *in, const char *program) {
    struct dirent **names = NULL;
    json_t *files = json_array(), *problems = json_array();
    char path[8192];
    int n = scandir(in->path, &names, NULL, alphasort), n_indexes = 0, code = CG_OK;
    cg_error error = {0};
    if (n < 0) cg_fail(&error, CG_BAD_INPUT, "%s: cannot be listed", cg_shown_path(in->path).text);
    for (int i = 0; i < n; i++) n_indexes += ends_with(names[i]->d_name, index_end);
    if (n_indexes > 1)
        cg_fail(&error, CG_BAD_INPUT, "%s: has %d indexes of shards (*%s), name one of them",
                cg_shown_path(in->path).text, n_indexes, index_end);
    for (int i = 0; i < n && !error.code; i++) {
        const char *name = names[i]->d_name;
        if (snprintf(path, sizeof path, "%s/%s", in->path, name) >= (int)sizeof path || !is_file(path))
            continue;
        if (!n_indexes)
            add_file(in, path, name, files, problems);
        else if (ends_with(name, index_end))
            code = print_index(in, program, path);
    }
    if (!error.code && !n_indexes && !json_array_size(files) && !json_array_size(problems))
        cg_fail(&error, CG_BAD_INPUT, "%s: is a folder without a file of tensors (safetensors, npy or npz)",
                cg_shown_path(in->path).text);
    for (int i = 0; i < n; i++) free(names[i]);
    free(names);
    if (error.code || n_indexes) {
        json_decref(files);
        json_decref(problems);
        return error.code ? tool_failed(program, &error) : code;
    }
    if (in->json)
        json_print(json_pack("{s:s, s:O, s:O}", "format", "folder", "files", files, "problems", problems),
                   JSON_INDENT(2));
    else
        print_problems(problems);
    json_decref(files);
    return end_with(program, in->path, problems);
}

int info_shards(const info *in, const char *program) {
    return info_is_folder(in->path) ? print_folder(in, program) : print_index(in, program, in->path);
}
