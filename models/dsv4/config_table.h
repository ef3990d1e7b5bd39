/* The table of configuration keys, for the two files that read it: config.c (ranges, checks, help) and config_json.c
 * (values as JSON and as text). */
#ifndef CG_MODELS_CONFIG_TABLE_H
#define CG_MODELS_CONFIG_TABLE_H

#include "models/dsv4/config.h"

#include <stddef.h>

typedef enum cg_config_kind { INTEGER, REAL, BOOLEAN, CHOICE, RATIOS, POLICY } cg_config_kind;

typedef struct cg_config_choice {
    const char *name; /* NULL ends a list */
    int value;
} cg_config_choice;

typedef struct cg_config_entry {
    const char *name;
    cg_config_kind kind;
    size_t offset;
    int64_t least, most; /* INTEGER */
    double low, high;    /* REAL; a bound that is open does not belong to the range */
    bool low_open, high_open;
    const cg_config_choice *choices;
    const char *doc;
} cg_config_entry;

enum { CG_CONFIG_KEYS = 53 };

extern const cg_config_entry cg_config_entries[]; /* CG_CONFIG_KEYS of them */
extern const cg_config_choice cg_config_tasks[];

/* The entry of a key; NULL when there is none. */
const cg_config_entry *cg_config_find(const char *key);

/* What a key may have, in words. */
void cg_config_range(const cg_config_entry *e, char *text, size_t bytes);

/* "KEY must be RANGE, got GOT"; returns false. */
bool cg_config_refuse(const cg_config_entry *e, const char *got, cg_error *error);

bool cg_config_integer_fits(const cg_config_entry *e, int64_t number);
bool cg_config_real_fits(const cg_config_entry *e, double number);
bool cg_config_ratio_fits(int64_t ratio);
bool cg_config_is_policy(const char *text);

/* The word of a CHOICE; NULL when its value is none. */
const char *cg_config_choice_name(const cg_config *config, const cg_config_entry *e);

/* How values that are fine one by one fit together. */
bool cg_config_check_together(const cg_config *config, cg_error *error);

#endif
