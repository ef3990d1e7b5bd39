#include "tools/json_number.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/error.h"
#include "tools/out_of_memory.h"

json_t *json_words(const char *words) {
    json_t *fine = json_string(words);
    if (fine) return fine;
    char *copy = strcpy(tool_malloc(strlen(words) + 1), words);
    for (char *c = copy; *c; c++)
        if (*c & 0x80) *c = '?';
    fine = json_string(copy);
    free(copy);
    return fine;
}

/* Jansson writes piece by piece: what fails in the middle would leave the pieces before it. Memory that runs out ends the
 * program elsewhere (tools/out_of_memory.h). */
void json_print(json_t *root, size_t flags) {
    char *text = root ? json_dumps(root, flags) : NULL;
    json_decref(root);
    if (!text) {
        fputs("csagrad: the result cannot be written as JSON: a text in it is not UTF-8\n", stderr);
        exit(CG_FAILED);
    }
    puts(text);
    free(text);
}
