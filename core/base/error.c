#include "core/base/error.h"

#include <stdio.h>
#include <string.h>

#include "core/base/shown.h"

/* A path or a word of a file may hold anything; the sentence stays one line, moves no cursor and is UTF-8. */
static void put_clean(char *to, size_t room, const char *from) {
    for (size_t left = strlen(from), n; left > 0; from += n, left -= n) {
        char letter[CG_SHOWN_LETTER + 1], *end = letter;
        n = cg_shown_letter(&end, from, left);
        const size_t bytes = (size_t)(end - letter);
        if (bytes >= room) break;
        to = (char *)memcpy(to, letter, bytes) + bytes;
        room -= bytes;
    }
    *to = 0;
}

bool cg_fail_va(cg_error *error, cg_code code, const char *format, va_list args) {
    if (error && error->code == CG_OK) {
        char raw[CG_ERROR_TEXT];
        error->code = code;
        vsnprintf(raw, sizeof raw, format, args);
        put_clean(error->text, sizeof error->text, raw);
    }
    return false;
}

bool cg_fail(cg_error *error, cg_code code, const char *format, ...) {
    va_list args;
    va_start(args, format);
    cg_fail_va(error, code, format, args);
    va_end(args);
    return false;
}

void cg_error_at(cg_error *error, const char *format, ...) {
    if (!error || error->code == CG_OK) return;
    char sentence[CG_ERROR_TEXT], raw[CG_ERROR_TEXT];
    memcpy(sentence, error->text, sizeof sentence);
    va_list args;
    va_start(args, format);
    int n = vsnprintf(raw, sizeof raw, format, args);
    va_end(args);
    if (n < 0 || n >= CG_ERROR_TEXT - 3) n = CG_ERROR_TEXT - 3;
    /* a sentence that no longer fits is cut at its end */
    snprintf(raw + n, sizeof raw - (size_t)n, ": %.*s", (int)sizeof raw - n - 3, sentence);
    put_clean(error->text, sizeof error->text, raw);
}
