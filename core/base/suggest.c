#include "core/base/suggest.h"

#include <stddef.h>
#include <string.h>

enum { LONGEST = 127 };

static size_t min3(size_t a, size_t b, size_t c) {
    size_t least = a < b ? a : b;
    return least < c ? least : c;
}

/* Inserted, removed and replaced letters that turn a into b (Levenshtein), row by row. */
static size_t distance(const char *a, size_t n_a, const char *b, size_t n_b) {
    size_t row[LONGEST + 1];
    for (size_t j = 0; j <= n_b; j++) row[j] = j;
    for (size_t i = 1; i <= n_a; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= n_b; j++) {
            size_t above = row[j];
            row[j] = min3(above + 1, row[j - 1] + 1, diagonal + (a[i - 1] != b[j - 1]));
            diagonal = above;
        }
    }
    return row[n_b];
}

const char *cg_suggest(const char *word, const char *const *known, int n) {
    size_t length = strlen(word);
    if (length > LONGEST) return NULL;
    const char *nearest = NULL;
    size_t least = 2 + length / 4 + 1;
    for (int i = 0; i < n; i++) {
        size_t known_length = strlen(known[i]);
        if (known_length > LONGEST) continue;
        size_t d = distance(word, length, known[i], known_length);
        size_t longer = length > known_length ? length : known_length;
        if (d >= least || (d > 0 && d == longer)) continue;
        least = d;
        nearest = known[i];
    }
    return nearest;
}
