/* A word of a file as it may stand in a sentence. */
#ifndef CG_CORE_SHOWN_H
#define CG_CORE_SHOWN_H

#include <stddef.h>

/* Bytes of the control character that a text begins with: 1, 2 for those of UTF-8 from U+0080 to U+009F, 0 if it is none. */
size_t cg_control_bytes(const char *text, size_t bytes);

typedef struct cg_shown_word {
    char text[4 * 80 + 4];
} cg_shown_word;

/* On one line (control characters as \x1b), and cut behind about 76 bytes with "...", never inside a UTF-8
 * letter, so that it does not hide the rest of the sentence. */
cg_shown_word cg_shown(const char *word);

/* The same for bytes that no 0 ends. A 0 among them shows as \x00. */
cg_shown_word cg_shown_bytes(const char *word, size_t bytes);

/* The end of a path, where files differ: "..." and its last 160 bytes, so that a long one leaves room for the
 * reason. */
typedef struct cg_shown_end {
    char text[4 * 160 + 4];
} cg_shown_end;
cg_shown_end cg_shown_path(const char *path);

#endif
