/* Errors: one sentence, one code, the first one wins.
 *
 * Every function that can fail returns bool (true: fine) and takes a cg_error last. The sentence says
 * where, what, expected and got; library code never prints it and never ends the process.
 */
#ifndef CG_CORE_ERROR_H
#define CG_CORE_ERROR_H

#include <stdbool.h>
#include <stdarg.h>

/* The value is also the exit code of a program that stops for this reason. */
typedef enum cg_code {
    CG_OK = 0,
    CG_FAILED = 1,    /* a check that the user asked for does not hold, or the machine refused (disk, memory) */
    CG_BAD_INPUT = 2, /* an argument, a file or a number that cannot be used */
    CG_NO_DEVICE = 77 /* the work needs a device that is absent */
} cg_code;

enum { CG_ERROR_TEXT = 512 };

typedef struct cg_error {
    cg_code code;
    char text[CG_ERROR_TEXT]; /* one sentence, no newline */
} cg_error;

/* Record a failure and return false, so that a caller can write `return cg_fail(...)`. An error that is
 * already set stays: the first sentence is the cause, later ones are its echoes. `error` may be NULL. */
bool cg_fail(cg_error *error, cg_code code, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* The same with a va_list. */
bool cg_fail_va(cg_error *error, cg_code code, const char *format, va_list args);

/* Put "prefix: " before the sentence, for a caller that knows the place. Does nothing when no error is set. */
void cg_error_at(cg_error *error, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
