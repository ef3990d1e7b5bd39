/* A word of a file as it may stand in a sentence. */
#ifndef CG_CORE_SHOWN_H
#define CG_CORE_SHOWN_H

#include <stddef.h>
#include <stdint.h>

/* Bytes of the control character that a text begins with, those that turn the direction of writing among them; 0: none. */
size_t cg_control_bytes(const char *text, size_t bytes);

typedef struct cg_shown_word {
    char text[4 * 80 + 4];
} cg_shown_word;

/* On one line: control characters, those that turn the direction of writing among them, show as \x1b or \u202e,
 * bytes that are no UTF-8 as \xff; and cut behind about 76 bytes with "...", never inside a letter, so that it
 * does not hide the rest of the sentence. What comes out is UTF-8. */
cg_shown_word cg_shown(const char *word);

/* The same for bytes that no 0 ends. A 0 among them shows as \x00. */
cg_shown_word cg_shown_bytes(const char *word, size_t bytes);

/* The letter at `text`, which has `bytes` more: its length, and its number in *letter. 0: no UTF-8. */
size_t cg_utf8_letter(const char *text, size_t bytes, uint32_t *letter);

/* One letter, or one byte that is none, as it may be shown; *to moves on behind it, by CG_SHOWN_LETTER bytes at
 * most, and needs room for a 0 as well. Returns how many bytes were taken. */
enum { CG_SHOWN_LETTER = 6 };
size_t cg_shown_letter(char **to, const char *from, size_t bytes);

/* The end of a path, where files differ: "..." and its last 160 bytes, so that a long one leaves room for the
 * reason. */
typedef struct cg_shown_end {
    char text[4 * 160 + 4];
} cg_shown_end;
cg_shown_end cg_shown_path(const char *path);

/* Take the last letter of a text that a full buffer has cut, where it may be a part of one. */
void cg_shown_trim(char *text);

#endif
