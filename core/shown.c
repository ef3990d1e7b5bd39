#include "core/shown.h"

#include <stdio.h>
#include <string.h>

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
        if (c < 0x20 || c == 0x7f)
            n += (size_t)sprintf(s.text + n, "\\x%02x", c);
        else
            s.text[n++] = (char)c;
    }
    s.text[n] = 0;
    return s;
}

cg_shown_word cg_shown(const char *word) { return cg_shown_bytes(word, strlen(word)); }
