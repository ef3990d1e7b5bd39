/* What csagrad info prints of one file, and of many. */
#ifndef CG_TOOLS_INFO_H
#define CG_TOOLS_INFO_H

#include <jansson.h>

#include "core/files/archive.h"
#include "tools/table.h"

typedef struct info {
    const char *path;
    bool json;
    const char *values_text;
    int64_t values; /* of each tensor, to be shown */
} info;

json_t *info_entry_json(const info *in, const cg_entry *entry);
json_t *info_archive_json(const info *in, const cg_archive *file);

void info_titles(table *t); /* of the four cells of an entry */
void info_entry_cells(table *t, const cg_entry *entry);
void info_print_values(const info *in, const cg_entry *entry);
void info_print_archive(const info *in, const cg_archive *file);

bool info_is_folder(const char *path);
bool info_is_index(const char *path); /* a file that begins as a JSON object, as no file of tensors does */

/* List a folder, or the shards of an index, and say where they contradict. Returns the exit code. */
int info_shards(const info *in, const char *program);

#endif
