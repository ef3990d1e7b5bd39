/* zip archives in memory, as far as .npz files need: where the members are, and their bytes.
 *
 * Read: stored and deflated members, zip64, sizes behind the data (data descriptors), a comment at the end. The
 * rest is refused: archives of several disks, or with bytes before or behind them, encrypted members, other
 * packing methods.
 */
#ifndef CG_CORE_ZIP_H
#define CG_CORE_ZIP_H

#include <stddef.h>
#include <stdint.h>

#include "core/base/error.h"

typedef struct cg_zip_member {
    const char *name;
    const unsigned char *data; /* packed_bytes, inside the archive */
    uint64_t packed_bytes, bytes;
    uint32_t crc;
    bool deflated;
    uint64_t begin, end; /* its place in the archive, header and descriptor included */
} cg_zip_member;

typedef struct cg_zip {
    int n;
    cg_zip_member *members; /* in the order of the directory */
    char *names;
} cg_zip;

/* Read the directory of the archive of `bytes` bytes at `start`, a mapping of core/base/file.h that outlives the result.
 * Refuses members
 * whose local header says something else than the directory, a repeated name, members that overlap, bytes between
 * members, and sizes that deflate cannot reach (more than 1032 to 1). Sentences come without the file; cg_zip_free
 * in any case. */
bool cg_zip_open(const void *start, size_t bytes, cg_zip *zip, cg_error *error);
void cg_zip_free(cg_zip *zip);

/* The first `wanted` bytes of a member, or all that it has, into `to`. Checks no CRC. */
bool cg_zip_peek(const cg_zip_member *member, void *to, size_t wanted, size_t *got, cg_error *error);

/* Check the CRC; a deflated member's bytes go to `to`, those of a stored one stay where they are (`to` is not used).
 * Refuses deflated data that is damaged or has another length than stated. */
bool cg_zip_unpack(const cg_zip_member *member, void *to, cg_error *error);

#endif
