/* Tables for people: columns as wide as their widest cell on a terminal, where letters may be wide or join
 * others. */
#ifndef CG_TOOLS_TABLE_H
#define CG_TOOLS_TABLE_H

typedef struct table table;

/* One letter per column: 'l' left, 'r' right. Where memory runs out, the program ends. */
table *table_new(const char *columns);

/* The next cell, row by row; the first row is the title and is underlined. NULL: nothing, where JSON is wanted instead. */
void table_cell(table *t, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Print to stdout and free. */
void table_print(table *t);

#endif
