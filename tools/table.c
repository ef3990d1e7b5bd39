#define _GNU_SOURCE /* vasprintf */
#include "tools/table.h"

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/out_of_memory.h"

struct table {
    const char *columns;
    char **cells;
    size_t n, capacity;
};

table *table_new(const char *columns) {
    table *t = tool_realloc(NULL, sizeof *t);
    *t = (table){.columns = columns};
    return t;
}

void table_cell(table *t, const char *format, ...) {
    if (t->n == t->capacity) {
        t->capacity = t->capacity ? 2 * t->capacity : 64;
        t->cells = tool_realloc(t->cells, t->capacity * sizeof *t->cells);
    }
    va_list args;
    va_start(args, format);
    char *text = NULL;
    if (vasprintf(&text, format, args) < 0) tool_out_of_memory();
    va_end(args);
    t->cells[t->n++] = text;
}

static const char *text_of(const table *t, size_t i) { return i < t->n ? t->cells[i] : ""; }

void table_print(table *t) {
    size_t n_columns = strlen(t->columns), n_rows = (t->n + n_columns - 1) / n_columns;
    size_t *width = tool_realloc(NULL, n_columns * sizeof *width);
    memset(width, 0, n_columns * sizeof *width);
    for (size_t i = 0; i < t->n; i++) {
        size_t length = strlen(text_of(t, i));
        if (length > width[i % n_columns]) width[i % n_columns] = length;
    }
    for (size_t r = 0; r < n_rows; r++) {
        for (size_t c = 0; c < n_columns; c++) {
            const char *text = text_of(t, r * n_columns + c), *gap = c ? "  " : "";
            bool last = c + 1 == n_columns;
            if (t->columns[c] == 'r')
                printf("%s%*s", gap, (int)width[c], text);
            else
                printf("%s%-*s", gap, last ? 0 : (int)width[c], text);
        }
        putchar('\n');
        if (r > 0) continue;
        size_t total = 2 * (n_columns - 1);
        for (size_t c = 0; c < n_columns; c++) total += width[c];
        while (total--) putchar('-');
        putchar('\n');
    }
    free(width);
    for (size_t i = 0; i < t->n; i++) free(t->cells[i]);
    free(t->cells);
    free(t);
}
