#include "core/shown.h"

#include <stdio.h>
#include <string.h>

static size_t put(char *to, unsigned char c) {
    if (c < 0x20 || c == 0x7f) return (size_t)sprintf(to, "\\x%02x", c);
    *to = (char)c;
    return 1;
}

cg_shown_word cg_shown_bytes(const char *word, size_t bytes) {
    cg_shown_word s;
    size_t n = 0;
    for (size_t i = 0; i < bytes; i++) {
        unsigned char c = (unsigned char)word[i];
        int starts_letter = (c & 0xc0) != 0x80;
        if ((starts_letter && i >= 76) || i >= 80) { /* 80: in what is no UTF-8 no letter may start for long */
            snprintf(s.text + n, sizeof s.text - n, "...");
            return s;
        }
        n += put(s.text + n, c);
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
    for (; *path; path++) n += put(s.text + n, (unsigned char)*path);
    s.text[n] = 0;
    return s;
}
