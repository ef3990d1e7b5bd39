#include "core/error.h"

#include <stdio.h>
#include <string.h>

/* A path or a word of a file may hold anything; the sentence stays one line and moves no cursor. */
static void clean(char *text) {
    for (char *c = text; *c; c++)
        if ((unsigned char)*c < ' ' || *c == 0x7f) *c = '?';
}

bool cg_fail_va(cg_error *error, cg_code code, const char *format, va_list args) {
    if (error && error->code == CG_OK) {
        error->code = code;
        vsnprintf(error->text, sizeof error->text, format, args);
        clean(error->text);
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
    char sentence[CG_ERROR_TEXT];
    memcpy(sentence, error->text, sizeof sentence);
    va_list args;
    va_start(args, format);
    int n = vsnprintf(error->text, sizeof error->text, format, args);
    va_end(args);
    if (n < 0 || n >= CG_ERROR_TEXT - 3) n = CG_ERROR_TEXT - 3;
    size_t room = sizeof error->text - (size_t)n; /* a sentence that no longer fits is cut at its end */
    snprintf(error->text + n, room, ": %.*s", (int)room - 3, sentence);
    clean(error->text);
}
