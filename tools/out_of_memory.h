/* When memory runs out where no error can be handed on.
 *
 * The engine's own functions report it like any failure. Jansson does not: an object that lacks what could not be added
 * prints as if it were whole. C++ code throws what C cannot catch, and oneDNN uses some of its blocks without looking. There
 * the program ends, with one sentence and exit code 1; what was written to files is whole or gone. */
#ifndef CG_TOOLS_OUT_OF_MEMORY_H
#define CG_TOOLS_OUT_OF_MEMORY_H

#include <stddef.h>

/* Ends the program this way from now on. `program` starts the sentence, and stays the caller's. */
void tool_end_without_memory(const char *program);

_Noreturn void tool_out_of_memory(void);

/* Memory or the end; tool_malloc for json_set_alloc_funcs. */
void *tool_malloc(size_t bytes);
void *tool_realloc(void *old, size_t bytes);

#endif
