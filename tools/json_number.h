/* Numbers in JSON, which has no word for those that are not finite: they are the strings "inf", "-inf" and "nan". */
#ifndef CG_TOOLS_JSON_NUMBER_H
#define CG_TOOLS_JSON_NUMBER_H

#include <jansson.h>
#include <math.h>

static inline json_t *json_number(double x) {
    return isfinite(x) ? json_real(x) : isnan(x) ? json_string("nan") : json_string(x > 0 ? "inf" : "-inf");
}

/* A figure that there may be none of: NaN stands for that, and is null. */
static inline json_t *json_figure(double x) { return isnan(x) ? json_null() : json_number(x); }

/* A text with words of the command line or a file, which may be no UTF-8: each byte beyond ASCII is a "?" then. */
json_t *json_words(const char *words);

/* Print to stdout, whole or not at all, and free. */
void json_print(json_t *root, size_t flags);

#endif
