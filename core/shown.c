#include "core/shown.h"

#include <stdio.h>
#include <string.h>

size_t cg_control_bytes(const char *text, size_t bytes) {
    const unsigned char *c = (const unsigned char *)text;
    if (bytes && (c[0] < 0x20 || c[0] == 0x7f)) return 1;
    return bytes > 1 && c[0] == 0xc2 && c[1] >= 0x80 && c[1] < 0xa0 ? 2 : 0;
}

/* One byte, or a control character of two; *used of `left` bytes. */
static size_t put(char *to, const char *from, size_t left, size_t *used) {
    const size_t control = cg_control_bytes(from, left);
    *used = control ? control : 1;
    *to = *from;
    if (!control) return 1;
    for (size_t i = 0; i < control; i++) sprintf(to + 4 * i, "\\x%02x", (unsigned char)from[i]);
    return 4 * control;
}

cg_shown_word cg_shown_bytes(const char *word, size_t bytes) {
    cg_shown_word s;
    size_t n = 0;
    for (size_t i = 0, used; i < bytes; i += used) {
        unsigned char c = (unsigned char)word[i];
        int starts_letter = (c & 0xc0) != 0x80;
        if ((starts_letter && i >= 76) || i >= 80) { /* 80: in what is no UTF-8 no letter may start for long */
            snprintf(s.text + n, sizeof s.text - n, "...");
            return s;
        }
        n += put(s.text + n, word + i, bytes - i, &used);
    }
    s.text[n] = 0;
    return s;
}

cg_shown_word cg_shown(const char *word) { return cg_shown_bytes(word, strlen(word)); }

cg_shown_end cg_shown_path(const char *path) {
    enum { SHOWN = 160 };
    cg_shown_end s;
    size_t length = strlen(path), n = 0;
    if (length > SHOWN) {
        path += length - SHOWN;
        while (((unsigned char)*path & 0xc0) == 0x80) path++; /* no part of a letter */
        n = (size_t)sprintf(s.text, "...");
    }
    for (size_t used; *path; path += used) n += put(s.text + n, path, strlen(path), &used);
    s.text[n] = 0;
    return s;
}
