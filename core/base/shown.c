#include "core/base/shown.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

size_t cg_utf8_letter(const char *text, size_t bytes, uint32_t *letter) {
    static const uint32_t least[] = {0, 0, 0x80, 0x800,
                                     0x10000}; /* of so many bytes: no long form of a short one */
    const unsigned char *c = (const unsigned char *)text;
    if (bytes == 0) return 0;
    const size_t n = *c < 0x80             ? 1
                     : (*c & 0xe0) == 0xc0 ? 2
                     : (*c & 0xf0) == 0xe0 ? 3
                     : (*c & 0xf8) == 0xf0 ? 4
                                           : 0;
    if (n == 0 || n > bytes) return 0;
    *letter = n == 1 ? *c : *c & (0x7fu >> n);
    for (size_t i = 1; i < n; i++) {
        if ((c[i] & 0xc0) != 0x80) return 0;
        *letter = *letter << 6 | (c[i] & 0x3f);
    }
    const bool surrogate = *letter >= 0xd800 && *letter < 0xe000;
    return *letter < least[n] || *letter > 0x10ffff || surrogate ? 0 : n;
}

/* Terminals obey these, or turn what follows around; line ends of Unicode among them. */
static bool is_control(uint32_t letter) {
    return letter < 0x20 || (letter >= 0x7f && letter < 0xa0) || letter == 0x61c || letter == 0x200e ||
           letter == 0x200f || (letter >= 0x2028 && letter <= 0x202e) || (letter >= 0x2066 && letter <= 0x2069);
}

size_t cg_control_bytes(const char *text, size_t bytes) {
    uint32_t letter = 0;
    size_t n = cg_utf8_letter(text, bytes, &letter);
    return n && is_control(letter) ? n : 0;
}

size_t cg_shown_letter(char **to, const char *from, size_t bytes) {
    uint32_t letter = 0;
    size_t n = cg_utf8_letter(from, bytes, &letter);
    if (n == 0 || (n == 1 && is_control(letter)))
        *to += sprintf(*to, "\\x%02x", (unsigned char)*from);
    else if (is_control(letter))
        *to += sprintf(*to, "\\u%04x", (unsigned)letter);
    else
        *to = (char *)memcpy(*to, from, n) + n;
    return n ? n : 1;
}

cg_shown_word cg_shown_bytes(const char *word, size_t bytes) {
    enum { SHOWN = 76 };
    cg_shown_word s;
    char *to = s.text;
    size_t i = 0;
    while (i < bytes && i < SHOWN) i += cg_shown_letter(&to, word + i, bytes - i);
    strcpy(to, i < bytes ? "..." : "");
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
    char *to = s.text + n;
    for (const char *end = path + strlen(path); path < end;)
        path += cg_shown_letter(&to, path, (size_t)(end - path));
    *to = 0;
    return s;
}

void cg_shown_trim(char *text) {
    size_t n = strlen(text);
    while (n > 0 && ((unsigned char)text[n - 1] & 0xc0) == 0x80) n--;
    if (n > 0 && (unsigned char)text[n - 1] >= 0xc0) n--;
    text[n] = 0;
}
