/* Configurations as JSON files, and single values as the text of a command line. */
#define _GNU_SOURCE /* open_memstream */
#include "models/dsv4/config_table.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/file.h"
#include "core/base/suggest.h"

typedef struct shown_text {
    char text[72];
} shown_text;

/* A value as in a JSON file, cut where it is long, with nothing that would break a line. */
static shown_text shown(const json_t *value) {
    shown_text s;
    char *full =
        value ? json_dumps(value, JSON_ENCODE_ANY | JSON_ENSURE_ASCII | JSON_REAL_PRECISION(12)) : NULL;
    bool cut = full && strlen(full) >= sizeof s.text;
    snprintf(s.text, sizeof s.text, "%.*s%s", (int)sizeof s.text - 5, full ? full : "bytes that are no text",
             cut ? "..." : "");
    if (!cut && full) snprintf(s.text, sizeof s.text, "%s", full);
    free(full);
    return s;
}

/* Put a value into its field if the key may have it. */
static bool read_value(cg_config *config, const cg_config_entry *e, const json_t *value, cg_error *error) {
    void *field = (char *)config + e->offset;
    switch (e->kind) {
    case INTEGER: {
        if (!json_is_integer(value)) break;
        int64_t number = json_integer_value(value);
        if (!cg_config_integer_fits(e, number)) break;
        *(int64_t *)field = number;
        return true;
    }
    case REAL: {
        if (!json_is_number(value)) break;
        double number = json_number_value(value) + 0.0; /* -0 becomes 0 */
        if (!cg_config_real_fits(e, number)) break;
        *(double *)field = number;
        return true;
    }
    case BOOLEAN:
        if (!json_is_boolean(value)) break;
        *(bool *)field = json_is_true(value);
        return true;
    case CHOICE:
        if (!json_is_string(value)) break;
        for (const cg_config_choice *c = e->choices; c->name; c++) {
            if (strcmp(c->name, json_string_value(value)) == 0) {
                memcpy(field, &c->value, sizeof c->value);
                return true;
            }
        }
        break;
    case RATIOS: {
        if (!json_is_array(value)) break;
        size_t n = json_array_size(value);
        if (n < 1 || n > CG_MAX_LAYERS) {
            char got[40];
            snprintf(got, sizeof got, "%zu of them", n);
            return cg_config_refuse(e, got, error);
        }
        int64_t ratios[CG_MAX_LAYERS] = {0};
        for (size_t i = 0; i < n; i++) {
            const json_t *item = json_array_get(value, i);
            int64_t ratio = json_is_integer(item) ? json_integer_value(item) : -1;
            if (!cg_config_ratio_fits(ratio)) {
                char got[100];
                snprintf(got, sizeof got, "%s for layer %zu", shown(item).text, i);
                return cg_config_refuse(e, got, error);
            }
            ratios[i] = ratio;
        }
        memcpy(config->compress_ratios, ratios, sizeof ratios);
        config->n_compress_ratios = (int64_t)n;
        return true;
    }
    case POLICY:
        if (!json_is_string(value) || !cg_config_is_policy(json_string_value(value))) break;
        memset(config->policy, 0, sizeof config->policy);
        memcpy(config->policy, json_string_value(value), strlen(json_string_value(value)));
        return true;
    }
    return cg_config_refuse(e, shown(value).text, error);
}

/* The other way; NULL for what JSON cannot hold (NaN, a choice that is none) and when memory is out. */
static json_t *write_value(const cg_config *config, const cg_config_entry *e) {
    const void *field = (const char *)config + e->offset;
    switch (e->kind) {
    case INTEGER:
        return json_integer(*(const int64_t *)field);
    case REAL:
        return json_real(*(const double *)field);
    case BOOLEAN:
        return json_boolean(*(const bool *)field);
    case CHOICE: {
        const char *name = cg_config_choice_name(config, e);
        return name ? json_string(name) : NULL;
    }
    case RATIOS: {
        json_t *list = json_array();
        for (int64_t i = 0; list && i < config->n_compress_ratios && i < CG_MAX_LAYERS; i++)
            json_array_append_new(list, json_integer(config->compress_ratios[i]));
        return list;
    }
    case POLICY:
        return memchr(config->policy, 0, sizeof config->policy) ? json_string(config->policy) : NULL;
    }
    return NULL;
}

/* A short text that reads back as the same value. */
static char *value_text(const json_t *value) {
    if (!json_is_real(value)) return json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT);
    for (size_t precision = 6;; precision++) {
        char *text = json_dumps(value, JSON_ENCODE_ANY | JSON_REAL_PRECISION(precision));
        json_t *again = text ? json_loads(text, JSON_DECODE_ANY, NULL) : NULL;
        bool same = again && json_number_value(again) == json_real_value(value);
        json_decref(again);
        if (!text || same || precision == 17) return text;
        free(text);
    }
}

static bool fail_unknown(const char *key, const char *prefix, cg_error *error) {
    const char *names[CG_CONFIG_KEYS];
    int n = 0;
    for (int i = 0; i < CG_CONFIG_KEYS; i++)
        if (strncmp(cg_config_entries[i].name, prefix, strlen(prefix)) == 0)
            names[n++] = cg_config_entries[i].name + strlen(prefix);
    const char *near = cg_suggest(key, names, n);
    json_t *word = json_string(key);
    cg_fail(error, CG_BAD_INPUT, "unknown key %s%s%s%s", shown(word).text, near ? ", did you mean " : "",
            near ? near : "", near ? "?" : "");
    json_decref(word);
    return false;
}

/* ---- reading and writing ----------------------------------------------------------------------------------
 */

/* The last key before an offset of a JSON text that does not parse: `nan` and 0x10 are syntax errors to a JSON
 * reader, but to the user they are bad values of a key. */
static const cg_config_entry *key_before(const char *json, size_t stop) {
    const cg_config_entry *last = NULL;
    for (size_t i = 0; i < stop; i++) {
        if (json[i] != '"') continue;
        size_t start = ++i;
        while (i < stop && json[i] != '"') i += json[i] == '\\' ? 2 : 1;
        size_t after = i + 1;
        while (after < stop && strchr(" \t\r\n", json[after]) && json[after]) after++;
        if (after >= stop || json[after] != ':') continue;
        char key[64] = "";
        if (i - start < sizeof key) memcpy(key, json + start, i - start);
        last = cg_config_find(key);
    }
    return last;
}

static bool fail_parse(const char *json, size_t bytes, const json_error_t *problem, cg_error *error) {
    size_t stop = problem->position > 0 ? (size_t)problem->position : 0;
    const cg_config_entry *e = key_before(json, stop < bytes ? stop : bytes);
    char reason[JSON_ERROR_TEXT_LENGTH + 1];
    snprintf(reason, sizeof reason, "%s", problem->text);
    for (char *c = reason; *c; c++)
        if ((unsigned char)*c < ' ') *c = ' ';
    bool is_value = json_error_code(problem) == json_error_invalid_syntax ||
                    json_error_code(problem) == json_error_numeric_overflow;
    if (!e || !is_value) return cg_fail(error, CG_BAD_INPUT, "line %d is no JSON: %s", problem->line, reason);
    char range[160];
    cg_config_range(e, range, sizeof range);
    return cg_fail(error, CG_BAD_INPUT, "line %d is no JSON, at or behind %s, which must be %s: %s",
                   problem->line, e->name, range, reason);
}

static bool read_key(cg_config *config, const char *prefix, const char *key, const json_t *value, bool *seen,
                     cg_error *error) {
    char name[128];
    snprintf(name, sizeof name, "%s%s", prefix, key);
    const cg_config_entry *e = cg_config_find(name);
    if (!e) return fail_unknown(key, prefix, error);
    if (seen[e - cg_config_entries])
        return cg_fail(error, CG_BAD_INPUT, "%s stands twice, by itself and inside rope_scaling", e->name);
    seen[e - cg_config_entries] = true;
    return read_value(config, e, value, error);
}

/* The release's form of the YaRN keys. */
static bool read_rope_scaling(cg_config *config, const json_t *object, bool *seen, cg_error *error) {
    if (json_is_null(object)) {
        json_t *one = json_integer(1);
        bool read = read_key(config, "rope_scaling_", "factor", one, seen, error);
        json_decref(one);
        return read;
    }
    if (!json_is_object(object))
        return cg_fail(error, CG_BAD_INPUT, "rope_scaling must be an object or null, got %s",
                       shown(object).text);
    bool fine = true;
    for (void *at = json_object_iter((json_t *)object); at && fine;
         at = json_object_iter_next((json_t *)object, at)) {
        const char *key = json_object_iter_key(at);
        const json_t *value = json_object_iter_value(at);
        if (strcmp(key, "type") == 0 || strcmp(key, "rope_type") == 0) {
            const char *type = json_string_value(value);
            if (!type || strcmp(type, "yarn") != 0)
                fine = cg_fail(error, CG_BAD_INPUT, "%s must be \"yarn\", got %s", key, shown(value).text);
        } else {
            fine = read_key(config, "rope_scaling_", key, value, seen, error);
        }
    }
    if (!fine) cg_error_at(error, "rope_scaling");
    return fine;
}

static bool read_object(cg_config *config, const json_t *root, cg_error *error) {
    if (!json_is_object(root))
        return cg_fail(error, CG_BAD_INPUT, "a JSON object of keys is needed, got %s", shown(root).text);
    bool seen[CG_CONFIG_KEYS] = {false};
    for (void *at = json_object_iter((json_t *)root); at; at = json_object_iter_next((json_t *)root, at)) {
        const char *key = json_object_iter_key(at);
        const json_t *value = json_object_iter_value(at);
        bool fine = strcmp(key, "rope_scaling") == 0 ? read_rope_scaling(config, value, seen, error)
                                                     : read_key(config, "", key, value, seen, error);
        if (!fine) return false;
    }
    return cg_config_check_together(config, error);
}

static bool parse(cg_config *config, const char *json, size_t bytes, cg_error *error) {
    cg_config copy = *config;
    json_error_t problem;
    json_t *root = json_loadb(json, bytes, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, &problem);
    const char *task = json_string_value(json_object_get(root, "task"));
    for (int i = 0; task && cg_config_tasks[i].name; i++)
        if (!strcmp(task, cg_config_tasks[i].name) && cg_config_tasks[i].value != (int)config->task)
            copy = cg_config_default(cg_config_tasks[i].value);
    bool fine = root ? read_object(&copy, root, error) : fail_parse(json, bytes, &problem, error);
    json_decref(root);
    if (fine) *config = copy;
    return fine;
}

bool cg_config_parse(cg_config *config, const char *json, cg_error *error) {
    return parse(config, json, strlen(json), error);
}

bool cg_config_load(cg_config *config, const char *path, cg_error *error) {
    char *json;
    size_t bytes;
    cg_error own = {0};
    if (!cg_file_read(path, 1 << 20, &json, &bytes, error)) return false;
    bool fine = parse(config, json, bytes, &own);
    free(json);
    if (fine) return true;
    size_t length = strlen(path), skip = length > 120 ? length - 120 : 0; /* the reason must fit too */
    return cg_fail(error, own.code, "%s%s: %s", skip ? "..." : "", path + skip, own.text);
}

/* What a text of the command line would be in a file. NULL when it is nothing. */
static json_t *parse_text(const cg_config_entry *e, const char *text) {
    if (e->kind == CHOICE || e->kind == POLICY) return json_string(text);
    if (strpbrk(text, " \t\r\n\v\f")) return NULL;
    if (e->kind != RATIOS || text[0] == '[') return json_loads(text, JSON_DECODE_ANY, NULL);
    size_t bytes = strlen(text) + 3;
    char *list = malloc(bytes);
    if (!list) return NULL;
    snprintf(list, bytes, "[%s]", text);
    json_t *value = json_loads(list, 0, NULL);
    free(list);
    return value;
}

bool cg_config_set(cg_config *config, const char *key, const char *text, cg_error *error) {
    const cg_config_entry *e = cg_config_find(key);
    if (!e) return fail_unknown(key, "", error);
    json_t *value = parse_text(e, text);
    json_t *raw = json_string(text);
    bool fine = value ? read_value(config, e, value, error) : cg_config_refuse(e, shown(raw).text, error);
    json_decref(value);
    json_decref(raw);
    return fine;
}

char *cg_config_json(const cg_config *config) {
    char *json = NULL;
    size_t bytes = 0;
    FILE *stream = open_memstream(&json, &bytes);
    if (!stream) return NULL;
    bool fine = true;
    for (int i = 0; i < CG_CONFIG_KEYS; i++) {
        json_t *value = write_value(config, &cg_config_entries[i]);
        char *text = value ? value_text(value) : NULL;
        fine &= text != NULL;
        fprintf(stream, "%s  \"%s\": %s", i ? ",\n" : "{\n", cg_config_entries[i].name, text ? text : "null");
        free(text);
        json_decref(value);
    }
    fputs("\n}\n", stream);
    fine &= !ferror(stream);
    fine &= fclose(stream) == 0;
    if (fine) return json;
    free(json);
    return NULL;
}

const char *cg_config_get(const cg_config *config, const char *key, char *text, size_t text_bytes) {
    const cg_config_entry *e = cg_config_find(key);
    if (!e) return NULL;
    json_t *value = write_value(config, e);
    char *dumped = value && !json_is_string(value) ? value_text(value) : NULL;
    snprintf(text, text_bytes, "%s", json_is_string(value) ? json_string_value(value) : dumped ? dumped : "?");
    free(dumped);
    json_decref(value);
    return text;
}
