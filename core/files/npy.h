/* npy arrays, NumPy's format for one array: magic bytes, version, header length, a Python dict with dtype, order
 * and shape, then the raw data. Versions 1, 2 and 3 (length of 2, 4 and 4 bytes; ASCII, Latin-1 and UTF-8).
 *
 * Read: f4 f8 f2, i1 to i8, u1 to u8 and b1; little- or big-endian, row-major or Fortran order. Listed, and not
 * read: complex numbers, texts, dates, structures and Python objects. bfloat16 has no name in this format: the
 * ml_dtypes package writes it as 'V2', two bytes of any meaning, which goes with the advice to save float32, or
 * safetensors.
 */
#ifndef CG_CORE_NPY_H
#define CG_CORE_NPY_H

#include "core/base/shown.h"
#include "core/base/tensor.h"

enum { CG_NPY_MAGIC_BYTES = 6, CG_NPY_START_BYTES = 12, CG_NPY_HEADER_MAX = 1 << 20 };
#define CG_NPY_MAGIC "\x93NUMPY"

typedef struct cg_npy {
    cg_dtype dtype;   /* CG_DTYPES: such elements are not read here */
    const char *word; /* the dtype as it stands in the header, word_bytes of it */
    int64_t word_bytes;
    const char *advice; /* about elements that are not read; NULL: none is known */
    cg_shape shape;
    bool big_endian;      /* elements of more than one byte stand the other way round */
    bool fortran;         /* first dimension fastest; false where both orders are the same */
    int64_t header_bytes; /* the data begins here */
    int64_t data_bytes;   /* -1: as many as there are, for elements whose size the header does not say */
} cg_npy;

/* Bytes of magic, version, length and header together, from the first CG_NPY_START_BYTES bytes (or all, when there
 * are fewer). Refuses a header of more than CG_NPY_HEADER_MAX bytes. */
bool cg_npy_header_bytes(const void *start, size_t bytes, int64_t *header_bytes, cg_error *error);

/* Parse them. The sentence comes without file and name. */
bool cg_npy_parse(const void *start, int64_t header_bytes, cg_npy *npy, cg_error *error);

/* "f32", ...; of elements that are not read, the word of the header, while that is there. */
cg_shown_word cg_npy_word(const cg_npy *npy);

/* Is the stored data a row-major array of this machine already? */
bool cg_npy_is_plain(const cg_npy *npy);

/* Copy n stored elements, from element number `first` on, to where they belong in `to`, which becomes a row-major
 * array of this machine. `from` is where the data begins, and need not be aligned. Parts can be copied one after the
 * other. */
void cg_npy_copy(const cg_npy *npy, const void *from, int64_t first, int64_t n, void *to);

#endif
