#include "core/files/archive.h"

#include <stdlib.h>
#include <string.h>

#include "core/base/file.h"
#include "core/files/npy.h"
#include "core/base/shown.h"
#include "core/files/zip.h"

/* Deflated members may grow to the larger of these together. */
enum { FREE_EXPANSION = 1 << 30, MOST_EXPANSION = 64 };

struct cg_archive {
    const char *format;
    cg_safetensors *safetensors; /* NULL for the others */
    void *map;                   /* NULL for safetensors */
    size_t map_bytes;
    cg_zip zip;
    char **names;  /* n_entries, owned; NULL for safetensors */
    char **words;  /* n_entries, owned: dtypes that are not read */
    void **copies; /* n_entries, NULL where the data lies in the file */
    int n_entries, n_tensors;
    cg_entry *entries;
    cg_named_tensor *tensors; /* those of the entries that are read */
};

static bool is_aligned(const void *data, cg_dtype dtype) {
    return (uintptr_t)data % cg_dtype_bytes(dtype) == 0;
}

static void *allocate(int64_t bytes, cg_error *error) {
    void *memory = malloc(bytes > 0 ? (size_t)bytes : 1);
    if (!memory) cg_fail(error, CG_FAILED, "no memory for %lld bytes", (long long)bytes);
    return memory;
}

static bool make_lists(cg_archive *archive, int n, cg_error *error) {
    archive->names = calloc((size_t)n + 1, sizeof *archive->names);
    archive->copies = calloc((size_t)n + 1, sizeof *archive->copies);
    archive->words = calloc((size_t)n + 1, sizeof *archive->words);
    archive->entries = calloc((size_t)n + 1, sizeof *archive->entries);
    archive->tensors = calloc((size_t)n + 1, sizeof *archive->tensors);
    archive->n_entries = n;
    return (archive->names && archive->copies && archive->words && archive->entries && archive->tensors) ||
           cg_fail(error, CG_FAILED, "no memory for the list of tensors");
}

static bool is_utf8(const char *text) {
    uint32_t letter;
    for (size_t n, left = strlen(text); left; text += n, left -= n)
        if (!(n = cg_utf8_letter(text, left, &letter))) return false;
    return true;
}

static bool set_name(cg_archive *archive, int i, const char *name, size_t bytes, cg_error *error) {
    char *copy = allocate((int64_t)bytes + 1, error);
    if (!copy) return false;
    memcpy(copy, name, bytes);
    copy[bytes] = 0;
    archive->names[i] = copy;
    archive->entries[i].name = copy;
    return is_utf8(copy) || cg_fail(error, CG_BAD_INPUT, "the name is not UTF-8");
}

/* Tensor i from the data of an array, which lies in the file, or in copies[i] already. */
static bool set_tensor(cg_archive *archive, int i, const cg_npy *npy, const char *from, cg_error *error) {
    enum { PIECE = 1 << 17 }; /* elements: the pages of a piece are given back before the next one is read */
    cg_entry *e = &archive->entries[i];
    cg_named_tensor *named = &archive->tensors[archive->n_tensors++];
    cg_tensor *t = &named->tensor;
    *named = (cg_named_tensor){e->name, {.dtype = npy->dtype, .shape = npy->shape, .data = (void *)from}};
    e->dtype = cg_dtype_name(npy->dtype);
    e->elements = npy->dtype;
    e->shape = npy->shape;
    e->bytes = npy->data_bytes;
    e->tensor = t;
    if (cg_npy_is_plain(npy) && is_aligned(from, npy->dtype)) return true;
    t->data = allocate(npy->data_bytes, error);
    if (!t->data) return false;
    int64_t element = (int64_t)cg_dtype_bytes(npy->dtype), n = npy->data_bytes / element;
    for (int64_t first = 0; first < n; first += PIECE) {
        int64_t piece = n - first < PIECE ? n - first : PIECE;
        cg_npy_copy(npy, from, first, piece, t->data);
        if (!archive->copies[i]) cg_file_drop(from + first * element, (size_t)(piece * element));
    }
    free(archive->copies[i]);
    archive->copies[i] = t->data;
    return true;
}

/* Array i, whose elements are not read: what its header says. */
static bool set_unread(cg_archive *archive, int i, const cg_npy *npy, cg_error *error) {
    cg_entry *e = &archive->entries[i];
    *e = (cg_entry){.name = e->name,
                    .elements = CG_DTYPES,
                    .shape = npy->shape,
                    .bytes = npy->data_bytes,
                    .advice = npy->advice};
    e->dtype = archive->words[i] = strdup(cg_npy_word(npy).text);
    return e->dtype || cg_fail(error, CG_FAILED, "no memory for the name of a dtype");
}

static bool parse_npy(const void *start, int64_t bytes, int64_t header_bytes, cg_npy *npy, cg_error *error) {
    if (header_bytes > bytes)
        return cg_fail(error, CG_BAD_INPUT,
                       "claims %lld bytes up to the end of its npy header, but has %lld: is it cut?",
                       (long long)header_bytes, (long long)bytes);
    if (!cg_npy_parse(start, header_bytes, npy, error)) return false;
    char shape[160];
    if (npy->data_bytes < 0) npy->data_bytes = bytes - header_bytes;
    if (npy->data_bytes != bytes - header_bytes)
        return cg_fail(error, CG_BAD_INPUT, "shape %s of %s has %lld bytes, but %lld follow the npy header",
                       cg_shape_text(&npy->shape, shape, sizeof shape), cg_npy_word(npy).text,
                       (long long)npy->data_bytes, (long long)(bytes - header_bytes));
    return true;
}

static bool open_npy(cg_archive *archive, const char *path, cg_error *error) {
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path, *dot = strrchr(name, '.');
    int64_t header_bytes;
    cg_npy npy;
    return cg_npy_header_bytes(archive->map, archive->map_bytes, &header_bytes, error) &&
           parse_npy(archive->map, (int64_t)archive->map_bytes, header_bytes, &npy, error) &&
           make_lists(archive, 1, error) &&
           set_name(archive, 0, name, dot && dot > name ? (size_t)(dot - name) : strlen(name), error) &&
           (npy.dtype == CG_DTYPES
                ? set_unread(archive, 0, &npy, error)
                : set_tensor(archive, 0, &npy, (const char *)archive->map + header_bytes, error));
}

static bool check_member(const cg_zip_member *m, cg_error *error) {
    size_t n = strlen(m->name);
    if (n >= 4 && !strcmp(m->name + n - 4, ".npy")) return true;
    bool torch = n >= 8 && !strcmp(m->name + n - 8, "data.pkl");
    return cg_fail(error, CG_BAD_INPUT, "its name does not end with .npy%s",
                   torch ? ": a file of torch.save is not read, save safetensors or npz" : "");
}

/* One member. A stored one stays in the file; a deflated one is inflated whole, header included, and used there. */
static bool add_member(cg_archive *archive, int i, cg_error *error) {
    const cg_zip_member *m = &archive->zip.members[i];
    char start[CG_NPY_START_BYTES], *header = NULL;
    size_t got;
    int64_t header_bytes;
    cg_npy npy;
    if (!check_member(m, error) || !set_name(archive, i, m->name, strlen(m->name) - 4, error)) return false;
    bool ok = cg_zip_peek(m, start, sizeof start, &got, error) &&
              cg_npy_header_bytes(start, got, &header_bytes, error);
    if (!ok) return false;
    if ((uint64_t)header_bytes > m->bytes)
        return cg_fail(error, CG_BAD_INPUT,
                       "claims %lld bytes up to the end of its npy header, but has %llu: is it cut?",
                       (long long)header_bytes, (unsigned long long)m->bytes);
    /* The header first, so that its claim and the directory's must agree before memory is taken for either. */
    if (m->deflated) {
        header = allocate(header_bytes, error);
        ok = header && cg_zip_peek(m, header, (size_t)header_bytes, &got, error);
    }
    ok = ok && parse_npy(header ? header : (const char *)m->data, (int64_t)m->bytes, header_bytes, &npy, error);
    const bool is_read = ok && npy.dtype < CG_DTYPES;
    ok = ok && (is_read || set_unread(archive, i, &npy, error));
    free(header);
    if (ok && m->deflated) archive->copies[i] = allocate((int64_t)m->bytes, error);
    if (!ok || (m->deflated && !archive->copies[i]) || !cg_zip_unpack(m, archive->copies[i], error))
        return false;
    if (!is_read) { /* its CRC alone was wanted */
        free(archive->copies[i]);
        archive->copies[i] = NULL;
        return true;
    }
    const char *data = m->deflated ? archive->copies[i] : (const char *)m->data;
    return set_tensor(archive, i, &npy, data + header_bytes, error);
}

static bool open_npz(cg_archive *archive, cg_error *error) {
    if (!cg_zip_open(archive->map, archive->map_bytes, &archive->zip, error)) return false;
    uint64_t expanded = 0; /* at most 1032 times the file: cannot wrap */
    for (int i = 0; i < archive->zip.n; i++)
        if (archive->zip.members[i].deflated) expanded += archive->zip.members[i].bytes;
    if (expanded > FREE_EXPANSION && expanded / MOST_EXPANSION > archive->map_bytes)
        return cg_fail(
            error, CG_BAD_INPUT,
            "its deflated members grow to %llu bytes, more than 1 GiB and more than %d times the file: "
            "if that is meant, save it without compression",
            (unsigned long long)expanded, MOST_EXPANSION);
    if (!make_lists(archive, archive->zip.n, error)) return false;
    for (int i = 0; i < archive->zip.n; i++)
        if (!add_member(archive, i, error)) {
            cg_error_at(error, "member '%s'", cg_shown(archive->zip.members[i].name).text);
            return false;
        }
    return true;
}

/* A safetensors file of another writer may place data anywhere: copy what is not aligned. */
static bool open_safetensors(cg_archive *archive, const char *path, cg_error *error) {
    archive->safetensors = cg_safetensors_open(path, error);
    if (!archive->safetensors) return false;
    int n = cg_safetensors_n_entries(archive->safetensors);
    cg_error inner = {0};
    if (!make_lists(archive, n, &inner)) return cg_file_fail(error, &inner, path);
    for (int i = 0; i < n; i++) {
        const cg_entry *e = cg_safetensors_entry(archive->safetensors, i);
        archive->entries[i] = *e;
        if (!e->tensor) continue;
        cg_npy as_stored = {.dtype = e->elements, .shape = e->shape, .data_bytes = e->bytes};
        if (!set_tensor(archive, i, &as_stored, e->data, &inner)) return cg_file_fail(error, &inner, path);
    }
    return true;
}

/* Bytes of the file that tell what it is; safetensors has no magic bytes, but a '{' behind the header length. */
static bool starts_with(const cg_archive *archive, size_t at, const char *bytes, size_t n) {
    return archive->map_bytes >= at + n && !memcmp((const char *)archive->map + at, bytes, n);
}

static bool open_map(cg_archive *archive, const char *path, cg_error *error) {
    if (starts_with(archive, 0, CG_NPY_MAGIC, CG_NPY_MAGIC_BYTES)) {
        archive->format = "npy";
        return open_npy(archive, path, error);
    }
    if (starts_with(archive, 0, "PK\3\4", 4) || starts_with(archive, 0, "PK\5\6", 4)) {
        archive->format = "npz";
        return open_npz(archive, error);
    }
    if (archive->map_bytes == 0) return cg_fail(error, CG_BAD_INPUT, "is empty");
    return cg_fail(error, CG_BAD_INPUT, "is no file of tensors that is read here: safetensors, npy or npz");
}

cg_archive *cg_archive_open(const char *path, cg_error *error) {
    cg_error inner = {0};
    cg_archive *archive = calloc(1, sizeof *archive);
    bool ok = archive ? cg_file_map(path, &archive->map, &archive->map_bytes, &inner)
                      : cg_fail(&inner, CG_FAILED, "no memory to open it");
    if (ok && starts_with(archive, 8, "{", 1)) {
        cg_file_unmap(archive->map, archive->map_bytes);
        archive->map = NULL;
        archive->format = "safetensors";
        if (open_safetensors(archive, path, error)) return archive;
    } else if (ok && open_map(archive, path, &inner)) {
        return archive;
    }
    if (inner.code) cg_file_fail(error, &inner, path);
    cg_archive_close(archive);
    return NULL;
}

void cg_archive_close(cg_archive *archive) {
    if (!archive) return;
    for (int i = 0; archive->names && i < archive->n_entries; i++) free(archive->names[i]);
    for (int i = 0; archive->words && i < archive->n_entries; i++) free(archive->words[i]);
    for (int i = 0; archive->copies && i < archive->n_entries; i++) free(archive->copies[i]);
    free(archive->names);
    free(archive->words);
    free(archive->entries);
    free(archive->copies);
    free(archive->tensors);
    cg_zip_free(&archive->zip);
    cg_safetensors_close(archive->safetensors);
    cg_file_unmap(archive->map, archive->map_bytes);
    free(archive);
}

const char *cg_archive_format(const cg_archive *archive) { return archive->format; }

int cg_archive_n_entries(const cg_archive *archive) { return archive->n_entries; }

const cg_entry *cg_archive_entry(const cg_archive *archive, int i) { return &archive->entries[i]; }

const cg_entry *cg_archive_unread(const cg_archive *archive, const char *name) {
    for (int i = 0; i < archive->n_entries; i++)
        if (!archive->entries[i].tensor && !strcmp(archive->entries[i].name, name)) return &archive->entries[i];
    return NULL;
}

int cg_archive_count(const cg_archive *archive) { return archive->n_tensors; }

const cg_named_tensor *cg_archive_at(const cg_archive *archive, int i) { return &archive->tensors[i]; }

const cg_tensor *cg_archive_find(const cg_archive *archive, const char *name) {
    for (int i = 0; i < archive->n_tensors; i++)
        if (!strcmp(archive->tensors[i].name, name)) return &archive->tensors[i].tensor;
    return NULL;
}

const char *cg_archive_metadata(const cg_archive *archive, const char *key) {
    return archive->safetensors ? cg_safetensors_metadata(archive->safetensors, key) : NULL;
}

bool cg_archive_metadata_next(const cg_archive *archive, void **at, const char **key, const char **value) {
    return archive->safetensors && cg_safetensors_metadata_next(archive->safetensors, at, key, value);
}
