#include "tools/json_number.h"

#include <stdio.h>
#include <stdlib.h>

#include "core/error.h"

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
