#define _GNU_SOURCE /* vasprintf, wcwidth, newlocale */
#include "tools/table.h"

#include "core/base/shown.h"

#include <locale.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <wchar.h>

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
    if (!t) return;
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

/* Columns of a terminal that a text takes: a letter may take two, or none when it joins the one before. What is
 * no UTF-8 counts one for each byte, as does every letter where the machine has no UTF-8 locale to ask. */
static size_t columns_of(const char *text) {
    size_t columns = 0, left = strlen(text);
    while (left > 0) {
        uint32_t letter = 0;
        size_t n = cg_utf8_letter(text, left, &letter);
        int width = n > 1 ? wcwidth((wchar_t)letter) : 1;
        columns += width < 0 ? 1 : (size_t)width;
        text += n ? n : 1;
        left -= n ? n : 1;
    }
    return columns;
}

static void put_blanks(size_t n) {
    while (n--) putchar(' ');
}

static void print_rows(const table *t, size_t n_columns, size_t *width) {
    size_t n_rows = (t->n + n_columns - 1) / n_columns;
    for (size_t i = 0; i < t->n; i++) {
        size_t columns = columns_of(text_of(t, i));
        if (columns > width[i % n_columns]) width[i % n_columns] = columns;
    }
    for (size_t r = 0; r < n_rows; r++) {
        for (size_t c = 0; c < n_columns; c++) {
            const char *text = text_of(t, r * n_columns + c);
            size_t blanks = width[c] - columns_of(text);
            bool right = t->columns[c] == 'r', last = c + 1 == n_columns;
            put_blanks((c ? 2 : 0) + (right ? blanks : 0));
            fputs(text, stdout);
            put_blanks(right || last ? 0 : blanks);
        }
        putchar('\n');
        if (r > 0) continue;
        size_t total = 2 * (n_columns - 1);
        for (size_t c = 0; c < n_columns; c++) total += width[c];
        while (total--) putchar('-');
        putchar('\n');
    }
}

void table_print(table *t) {
    size_t n_columns = strlen(t->columns), *width = tool_realloc(NULL, n_columns * sizeof *width);
    memset(width, 0, n_columns * sizeof *width);
    locale_t utf8 = newlocale(LC_CTYPE_MASK, "C.UTF-8", (locale_t)0),
             before = utf8 ? uselocale(utf8) : (locale_t)0;
    print_rows(t, n_columns, width);
    if (utf8) uselocale(before);
    if (utf8) freelocale(utf8);
    free(width);
    for (size_t i = 0; i < t->n; i++) free(t->cells[i]);
    free(t->cells);
    free(t);
}
