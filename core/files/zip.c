#include "core/files/zip.h"

#include <stdlib.h>
#include <string.h>

#include <zlib.h>

#include "core/base/file.h"
#include "core/base/shown.h"

/* Record sizes without their variable parts, and signatures, as the format (APPNOTE.TXT) gives them. */
enum { END_BYTES = 22, LOCATOR_BYTES = 20, END64_BYTES = 56, ENTRY_BYTES = 46, LOCAL_BYTES = 30 };
enum {
    END_MARK = 0x06054b50,
    LOCATOR_MARK = 0x07064b50,
    END64_MARK = 0x06064b50,
    ENTRY_MARK = 0x02014b50,
    LOCAL_MARK = 0x04034b50,
    DESCRIPTOR_MARK = 0x08074b50
};
enum { ENCRYPTED = 1, LEVEL = 6, DESCRIPTOR = 8, UTF8 = 1 << 11 }; /* flags */
enum { STORED = 0, DEFLATED = 8 };                                 /* methods */
enum { ZIP64_EXTRA = 1, EXTRA_HEAD_BYTES = 4 };

/* A field of this value is too narrow: the true one stands in a zip64 record. */
#define FULL16 0xffffu
#define FULL32 0xffffffffu

/* The most that one byte of deflate can become: a copy of 258 bytes takes at least two bits. */
enum { MOST_EXPANSION = 1032 };

static uint32_t u16(const unsigned char *b) { return b[0] | (uint32_t)b[1] << 8; }
static uint32_t u32(const unsigned char *b) { return u16(b) | u16(b + 2) << 16; }
static uint64_t u64(const unsigned char *b) { return u32(b) | (uint64_t)u32(b + 4) << 32; }

typedef struct archive {
    const unsigned char *start;
    uint64_t bytes;
} archive;

/* Does the archive have `n` bytes at `at`? Never adds what could wrap. */
static bool has(const archive *a, uint64_t at, uint64_t n) { return at <= a->bytes && n <= a->bytes - at; }

typedef struct directory {
    uint64_t begin, bytes, entries;
} directory;

/* The fields of the end record of zip64 must repeat those of the old one, or those be full. */
static bool agrees(uint64_t wide, uint64_t narrow, uint64_t full) { return narrow == full || narrow == wide; }

/* The directory that the end record at `end_at` tells of. */
static bool read_end(const archive *a, uint64_t end_at, directory *d, cg_error *error) {
    const unsigned char *end = a->start + end_at;
    bool one_disk = agrees(0, u16(end + 4), FULL16) && agrees(0, u16(end + 6), FULL16);
    uint64_t here = u16(end + 8); /* entries on this disk */
    *d = (directory){.begin = u32(end + 16), .bytes = u32(end + 12), .entries = u16(end + 10)};
    if (end_at >= LOCATOR_BYTES && u32(end - LOCATOR_BYTES) == LOCATOR_MARK) {
        const unsigned char *locator = end - LOCATOR_BYTES;
        uint64_t at = u64(locator + 8), locator_at = end_at - LOCATOR_BYTES;
        const unsigned char *wide = at > locator_at || locator_at - at < END64_BYTES ? NULL : a->start + at;
        if (!wide || u32(wide) != END64_MARK || u64(wide + 4) != locator_at - at - 12)
            return cg_fail(error, CG_BAD_INPUT, "the zip64 end record is not where its locator says");
        if (!agrees(u64(wide + 24), here, FULL16) || !agrees(u64(wide + 32), d->entries, FULL16) ||
            !agrees(u64(wide + 40), d->bytes, FULL32) || !agrees(u64(wide + 48), d->begin, FULL32))
            return cg_fail(error, CG_BAD_INPUT, "the two end records of the zip archive disagree");
        here = u64(wide + 24);
        *d = (directory){.begin = u64(wide + 48), .bytes = u64(wide + 40), .entries = u64(wide + 32)};
        one_disk =
            one_disk && !u32(locator + 4) && u32(locator + 16) <= 1 && !u32(wide + 16) && !u32(wide + 20);
        end_at = at;
    }
    if (!one_disk || here != d->entries)
        return cg_fail(error, CG_BAD_INPUT, "the zip archive spans several disks");
    if (d->begin > end_at || end_at - d->begin != d->bytes)
        return cg_fail(
            error, CG_BAD_INPUT,
            "the directory of the zip archive claims %llu bytes at %llu, but its end record is at %llu",
            (unsigned long long)d->bytes, (unsigned long long)d->begin, (unsigned long long)end_at);
    /* before anything is allocated by this number */
    if (d->entries > d->bytes / ENTRY_BYTES || d->entries > 1 << 24)
        return cg_fail(error, CG_BAD_INPUT, "the zip archive claims %llu members, its directory has %llu bytes",
                       (unsigned long long)d->entries, (unsigned long long)d->bytes);
    return true;
}

/* The end record stands before a comment of at most 65535 bytes, which may hold what looks like one. So all
 * that reach to the end of the archive are tried: one alone must fit, or readers would see different
 * archives. */
static bool find_directory(const archive *a, directory *found, cg_error *error) {
    cg_error misfit = {0};
    int n_fit = 0;
    for (uint64_t comment = 0; comment <= FULL16 && has(a, 0, END_BYTES + comment); comment++) {
        uint64_t at = a->bytes - END_BYTES - comment;
        uint32_t claimed = u16(a->start + at + 20);
        directory d;
        if (u32(a->start + at) != END_MARK) continue;
        if (claimed != comment) {
            if (!misfit.code)
                cg_fail(&misfit, CG_BAD_INPUT,
                        "the zip archive claims a comment of %u bytes, but %llu follow its end record", claimed,
                        (unsigned long long)comment);
        } else if (read_end(a, at, &d, &misfit)) {
            *found = d;
            n_fit++;
        }
    }
    if (n_fit == 1) return true;
    if (n_fit > 1)
        return cg_fail(error, CG_BAD_INPUT,
                       "the zip archive has %d end records that fit, one in the comment of another", n_fit);
    return misfit.code
               ? cg_fail(error, misfit.code, "%s", misfit.text)
               : cg_fail(error, CG_BAD_INPUT, "does not end with the end record of a zip archive: is it cut?");
}

/* Replace the sizes and the offset that are full by those of the zip64 extra field, in this fixed order. */
static bool read_extra(const unsigned char *extra, uint32_t bytes, uint64_t **fields, int n, cg_error *error) {
    bool wanted = false, found = false;
    for (int i = 0; i < n; i++) wanted = wanted || *fields[i] == FULL32;
    while (bytes > 0) {
        uint32_t size = bytes < EXTRA_HEAD_BYTES ? 0 : u16(extra + 2);
        if (bytes < EXTRA_HEAD_BYTES || size > bytes - EXTRA_HEAD_BYTES)
            return cg_fail(error, CG_BAD_INPUT, "an extra field of its zip header is cut");
        const unsigned char *data = extra + EXTRA_HEAD_BYTES, *end = data + size;
        if (u16(extra) == ZIP64_EXTRA) {
            if (found) return cg_fail(error, CG_BAD_INPUT, "its zip64 field is repeated");
            found = true;
            for (int i = 0; i < n; i++) {
                if (*fields[i] != FULL32) continue;
                if (end - data < 8) return cg_fail(error, CG_BAD_INPUT, "its zip64 field is too short");
                *fields[i] = u64(data);
                data += 8;
            }
        }
        extra = end;
        bytes -= EXTRA_HEAD_BYTES + size;
    }
    return found || !wanted || cg_fail(error, CG_BAD_INPUT, "its zip64 field is missing");
}

/* The descriptor behind the data: CRC and both sizes, of 4 or 8 bytes, with or without a signature before them. */
static bool read_descriptor(const archive *a, cg_zip_member *m, cg_error *error) {
    for (int form = 0; form < 4; form++) {
        uint64_t mark = form & 1 ? 0 : 4, size = form & 2 ? 4 : 8, bytes = mark + 4 + 2 * size;
        if (!has(a, m->end, bytes)) continue;
        const unsigned char *d = a->start + m->end;
        if (mark && u32(d) != DESCRIPTOR_MARK) continue;
        d += mark;
        uint64_t packed = size == 8 ? u64(d + 4) : u32(d + 4);
        uint64_t full = size == 8 ? u64(d + 12) : u32(d + 8);
        if (u32(d) != m->crc || packed != m->packed_bytes || full != m->bytes) continue;
        m->end += bytes;
        return true;
    }
    return cg_fail(error, CG_BAD_INPUT,
                   "the sizes and CRC behind its data differ from those of the zip directory");
}

/* A field of a local header may be 0 when a descriptor follows. */
static bool local_agrees(uint64_t local, uint64_t central, uint32_t flags) {
    return local == central || (local == 0 && (flags & DESCRIPTOR));
}

/* The local header of a member must say what its entry in the directory (`entry`) says: readers that trust the one
 * and readers that trust the other must see the same. */
static bool read_local(const archive *a, const unsigned char *entry, uint64_t data_end, cg_zip_member *m,
                       cg_error *error) {
    uint32_t flags = u16(entry + 8), method = u16(entry + 10), name_bytes = u16(entry + 28);
    const unsigned char *h =
        m->begin > data_end || data_end - m->begin < LOCAL_BYTES ? NULL : a->start + m->begin;
    if (!h || u32(h) != LOCAL_MARK)
        return cg_fail(error, CG_BAD_INPUT, "its local zip header is not at %llu, where the directory says",
                       (unsigned long long)m->begin);
    uint64_t room = data_end - m->begin - LOCAL_BYTES;
    uint32_t local_name = u16(h + 26), extra_bytes = u16(h + 28);
    if (local_name + extra_bytes > room)
        return cg_fail(error, CG_BAD_INPUT, "its local zip header runs into the directory");
    if (local_name != name_bytes || memcmp(h + LOCAL_BYTES, entry + ENTRY_BYTES, name_bytes))
        return cg_fail(error, CG_BAD_INPUT, "its local zip header has another name, '%s'",
                       cg_shown_bytes((const char *)h + LOCAL_BYTES, local_name).text);
    uint64_t packed = u32(h + 18), full = u32(h + 22);
    if (!read_extra(h + LOCAL_BYTES + local_name, extra_bytes, (uint64_t *[]){&full, &packed}, 2, error))
        return false;
    if (u16(h + 6) != flags || u16(h + 8) != method || !local_agrees(u32(h + 14), m->crc, flags) ||
        !local_agrees(packed, m->packed_bytes, flags) || !local_agrees(full, m->bytes, flags))
        return cg_fail(error, CG_BAD_INPUT,
                       "its local zip header and the directory disagree on size, CRC or method");
    room -= local_name + extra_bytes;
    if (m->packed_bytes > room)
        return cg_fail(error, CG_BAD_INPUT,
                       "claims %llu packed bytes, but only %llu are left before the directory",
                       (unsigned long long)m->packed_bytes, (unsigned long long)room);
    m->data = h + LOCAL_BYTES + local_name + extra_bytes;
    m->end = (uint64_t)(m->data - a->start) + m->packed_bytes;
    archive before = {a->start, data_end};
    return !(flags & DESCRIPTOR) || read_descriptor(&before, m, error);
}

static const char *method_name(uint32_t method) {
    switch (method) {
    case 9:
        return " (deflate64)";
    case 12:
        return " (bzip2)";
    case 14:
        return " (lzma)";
    case 93:
        return " (zstd)";
    case 95:
        return " (xz)";
    case 99:
        return " (encrypted)";
    }
    return "";
}

static bool read_entry(const archive *a, const unsigned char *entry, uint64_t data_end, cg_zip_member *m,
                       cg_error *error) {
    uint32_t flags = u16(entry + 8), method = u16(entry + 10), name_bytes = u16(entry + 28);
    if (flags & ENCRYPTED) return cg_fail(error, CG_BAD_INPUT, "is encrypted");
    if (flags & ~(uint32_t)(LEVEL | DESCRIPTOR | UTF8))
        return cg_fail(error, CG_BAD_INPUT, "has the zip flags 0x%x, which are not supported", flags);
    if (method != STORED && method != DEFLATED)
        return cg_fail(error, CG_BAD_INPUT,
                       "is packed with method %u%s, only stored and deflated members are read", method,
                       method_name(method));
    m->crc = u32(entry + 16);
    m->packed_bytes = u32(entry + 20);
    m->bytes = u32(entry + 24);
    m->begin = u32(entry + 42);
    m->deflated = method == DEFLATED;
    if (!read_extra(entry + ENTRY_BYTES + name_bytes, u16(entry + 30),
                    (uint64_t *[]){&m->bytes, &m->packed_bytes, &m->begin}, 3, error))
        return false;
    if (u16(entry + 34) && u16(entry + 34) != FULL16)
        return cg_fail(error, CG_BAD_INPUT, "lies on another disk");
    if (!m->deflated && m->bytes != m->packed_bytes)
        return cg_fail(error, CG_BAD_INPUT, "is stored, with %llu bytes that come from %llu",
                       (unsigned long long)m->bytes, (unsigned long long)m->packed_bytes);
    if (m->deflated && m->bytes / MOST_EXPANSION > m->packed_bytes)
        return cg_fail(error, CG_BAD_INPUT,
                       "claims %llu bytes from %llu deflated ones, more than deflate can hold",
                       (unsigned long long)m->bytes, (unsigned long long)m->packed_bytes);
    return read_local(a, entry, data_end, m, error);
}

static int compare_places(const void *left, const void *right) {
    const cg_zip_member *const *l = left, *const *r = right;
    return (*l)->begin < (*r)->begin ? -1 : (*l)->begin > (*r)->begin;
}

static int compare_names(const void *left, const void *right) {
    const cg_zip_member *const *l = left, *const *r = right;
    return strcmp((*l)->name, (*r)->name);
}

/* Members must tile the archive up to the directory: bytes of two are a bomb, bytes of none could hide something. */
static bool check_places(cg_zip_member **sorted, int n, uint64_t data_end, cg_error *error) {
    uint64_t last_end = 0;
    qsort(sorted, (size_t)n, sizeof *sorted, compare_places);
    for (int i = 0; i < n; i++) {
        const cg_zip_member *m = sorted[i];
        if (m->begin < last_end) /* so i > 0 */
            return cg_fail(
                error, CG_BAD_INPUT,
                "zip members '%s' and '%s' overlap: the second begins at %llu, the first ends at %llu",
                cg_shown(sorted[i - 1]->name).text, cg_shown(m->name).text, (unsigned long long)m->begin,
                (unsigned long long)last_end);
        if (m->begin > last_end)
            return cg_fail(error, CG_BAD_INPUT, "%llu bytes before the zip member '%s' belong to none",
                           (unsigned long long)(m->begin - last_end), cg_shown(m->name).text);
        last_end = m->end;
    }
    if (last_end != data_end)
        return cg_fail(error, CG_BAD_INPUT, "%llu bytes before the zip directory belong to no member",
                       (unsigned long long)(data_end - last_end));
    return true;
}

static bool check_names(cg_zip_member **sorted, int n, cg_error *error) {
    qsort(sorted, (size_t)n, sizeof *sorted, compare_names);
    for (int i = 1; i < n; i++)
        if (!strcmp(sorted[i - 1]->name, sorted[i]->name))
            return cg_fail(error, CG_BAD_INPUT, "the name '%s' is repeated in the zip archive",
                           cg_shown(sorted[i]->name).text);
    return true;
}

static bool read_members(const archive *a, const directory *d, cg_zip *zip, cg_error *error) {
    const unsigned char *entry = a->start + d->begin;
    uint64_t left = d->bytes;
    char *name = zip->names;
    for (uint64_t i = 0; i < d->entries; i++) {
        uint64_t bytes =
            left < ENTRY_BYTES ? 0 : ENTRY_BYTES + u16(entry + 28) + u16(entry + 30) + u16(entry + 32);
        if (!bytes || bytes > left || u32(entry) != ENTRY_MARK)
            return cg_fail(error, CG_BAD_INPUT, "entry %llu of the zip directory is damaged or cut",
                           (unsigned long long)i + 1);
        cg_zip_member *m = &zip->members[zip->n++];
        size_t name_bytes = u16(entry + 28);
        m->name = memcpy(name, entry + ENTRY_BYTES, name_bytes);
        name[name_bytes] = 0;
        if (strlen(name) != name_bytes)
            return cg_fail(error, CG_BAD_INPUT, "a name in the zip directory has a 0 byte in it: '%s'",
                           cg_shown_bytes(name, name_bytes).text);
        name += name_bytes + 1;
        if (!read_entry(a, entry, d->begin, m, error)) {
            cg_error_at(error, "member '%s'", cg_shown(m->name).text);
            return false;
        }
        entry += bytes;
        left -= bytes;
    }
    return left == 0 || cg_fail(error, CG_BAD_INPUT, "%llu bytes of the zip directory belong to no entry",
                                (unsigned long long)left);
}

bool cg_zip_open(const void *start, size_t bytes, cg_zip *zip, cg_error *error) {
    archive a = {start, bytes};
    directory d;
    *zip = (cg_zip){0};
    if (!find_directory(&a, &d, error)) return false;
    zip->members = calloc(d.entries + 1, sizeof *zip->members);
    zip->names = malloc(d.bytes + d.entries + 1); /* every name and a 0 behind each */
    cg_zip_member **sorted = malloc((d.entries + 1) * sizeof *sorted);
    bool ok = (zip->members && zip->names && sorted) ||
              cg_fail(error, CG_FAILED, "no memory for the directory of the zip archive");
    ok = ok && read_members(&a, &d, zip, error);
    for (int i = 0; ok && i < zip->n; i++) sorted[i] = &zip->members[i];
    ok = ok && check_names(sorted, zip->n, error) && check_places(sorted, zip->n, d.begin, error);
    free(sorted);
    return ok;
}

void cg_zip_free(cg_zip *zip) {
    free(zip->members);
    free(zip->names);
    *zip = (cg_zip){0};
}

/* Packed data is read in pieces, whose memory goes back to the machine before the next one is read: beside what it
 * becomes, an archive takes no memory. zlib counts in 32 bits anyway. */
static uInt piece(uint64_t left) { return left < 1u << 20 ? (uInt)left : 1u << 20; }

/* Inflate up to `wanted` bytes. *whole: the deflate stream has ended, and all packed bytes are used. */
static bool inflate_to(const cg_zip_member *m, unsigned char *to, uint64_t wanted, uint64_t *got, bool *whole,
                       cg_error *error) {
    z_stream stream = {0};
    if (inflateInit2(&stream, -MAX_WBITS) != Z_OK) return cg_fail(error, CG_FAILED, "no memory to inflate it");
    uint64_t in_left = m->packed_bytes, out_left = wanted;
    const unsigned char *in = m->data;
    unsigned char none; /* a place for the byte that must not come */
    int status = Z_OK;
    while (status == Z_OK) {
        uInt in_piece = piece(in_left), out_piece = piece(out_left);
        stream.next_in = (unsigned char *)in;
        stream.avail_in = in_piece;
        stream.next_out = out_left ? to : &none;
        stream.avail_out = out_piece;
        status = inflate(&stream, Z_NO_FLUSH);
        cg_file_drop(in, in_piece - stream.avail_in);
        in += in_piece - stream.avail_in;
        in_left -= in_piece - stream.avail_in;
        to += out_piece - stream.avail_out;
        out_left -= out_piece - stream.avail_out;
    }
    inflateEnd(&stream);
    *got = wanted - out_left;
    *whole = status == Z_STREAM_END && in_left == 0;
    if (status == Z_MEM_ERROR) return cg_fail(error, CG_FAILED, "no memory to inflate it");
    /* Z_BUF_ERROR: no progress, as the room is full or the packed bytes are at their end. */
    return status == Z_STREAM_END || status == Z_BUF_ERROR ||
           cg_fail(error, CG_BAD_INPUT, "its deflated data is damaged");
}

bool cg_zip_peek(const cg_zip_member *member, void *to, size_t wanted, size_t *got, cg_error *error) {
    uint64_t n = wanted < member->bytes ? wanted : member->bytes;
    bool whole;
    if (!member->deflated) {
        memcpy(to, member->data, n);
    } else {
        uint64_t inflated;
        if (!inflate_to(member, to, n, &inflated, &whole, error)) return false;
        if (inflated < n)
            return cg_fail(error, CG_BAD_INPUT, "its deflated data is shorter than the zip directory says");
    }
    *got = n;
    return true;
}

static uint32_t crc_of(const cg_zip_member *m) {
    uint32_t crc = 0;
    const unsigned char *at = m->data;
    for (uint64_t left = m->bytes; left > 0; at += piece(left), left -= piece(left)) {
        crc = (uint32_t)crc32_z(crc, at, piece(left));
        cg_file_drop(at, piece(left));
    }
    return crc;
}

bool cg_zip_unpack(const cg_zip_member *member, void *to, cg_error *error) {
    uint32_t crc;
    if (member->deflated) {
        uint64_t got;
        bool whole;
        if (!inflate_to(member, to, member->bytes, &got, &whole, error)) return false;
        if (got < member->bytes || !whole)
            return cg_fail(error, CG_BAD_INPUT, "its deflated data is %s than the zip directory says",
                           got < member->bytes ? "shorter" : "longer");
        crc = (uint32_t)crc32_z(0, to, member->bytes);
    } else {
        crc = crc_of(member);
    }
    if (crc != member->crc)
        return cg_fail(error, CG_BAD_INPUT, "its CRC is %08x, the zip directory says %08x: the data is damaged",
                       crc, member->crc);
    return true;
}
