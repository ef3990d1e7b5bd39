/* Reading the description of one row. The table `keys` holds every key; sizes follow from the arrays. */
#include "models/check/row.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/shown.h"
#include "core/base/suggest.h"
#include "graph/op.h"

/* Numbers of one array, and of one result: beyond it the row op is the wrong tool. */
enum { MAX_NUMBERS = 1 << 22 };

enum {
    Q,
    WINDOW,
    COMPRESSED,
    SINK,
    SCALE,
    INDEX,
    SELECT,
    SCORES,
    Q_INDEX,
    W_INDEX,
    K_INDEX,
    TARGET,
    DOUT,
    LOGITS,
    WINDOW_LOGITS,
    COEFF,
    CONTRACT,
    DTYPE,
    KEYS
};

static const cg_row_key keys[KEYS] = {
    [Q] = {"q", "query", "query [H, D]; one list of numbers is one head"},
    [WINDOW] = {"window", "kv", "rows [W, D] that are key and value, all attended to"},
    [COMPRESSED] = {"compressed", "compressed_kv",
                    "rows [C, D] that are key and value, attended to where index names them"},
    [SINK] = {"sink", NULL, "logit [H] of the sink; \"-Infinity\": none, which is the default"},
    [SCALE] = {"scale", "softmax_scale", "factor of q.k (default: 1)"},
    [INDEX] = {"index", "topk",
               "list of compressed rows, -1 for none, repeated ones count each time (default: all rows)"},
    [SELECT] = {"select", NULL, "instead of index: let the engine select that many rows by score"},
    [SCORES] = {"scores", NULL, "index scores [C] of the compressed rows"},
    [Q_INDEX] = {"q_index", "q_indexer", "instead of scores: index query [Hi, Di], with w and k_index"},
    [W_INDEX] = {"w", "weights", "weights [Hi] of the index heads, every scale multiplied in"},
    [K_INDEX] = {"k_index", "k_indexer", "index keys [C, Di]"},
    [TARGET] = {"target", NULL, "a given target [C] in place of the teacher's"},
    [DOUT] = {"dout", NULL, "gradient [H, D] of the output: asks for the gradients of the attention"},
    [LOGITS] = {"logits", NULL, "instead of q and compressed: logits [H, C]"},
    [WINDOW_LOGITS] = {"window_logits", NULL, "instead of window: logits [H, W]"},
    [COEFF] = {"coeff", "loss_coeff", "factor of the loss (default: 1)"},
    [CONTRACT] = {"contract", NULL, "AXIS=VALUE[,...] of the loss (default: the engine's own)"},
    [DTYPE] = {"dtype", NULL, "what the engine's ops compute in: f64 or f32 (default: f64)"},
};

const cg_row_key *cg_row_key_at(int i) { return i >= 0 && i < KEYS ? &keys[i] : NULL; }

/* ---- arrays ---- */

typedef struct array {
    bool given;
    double *x;
    int64_t n, dims[2];
    int n_dims;
    int64_t odd; /* the first number that is not finite, -1: none */
} array;

typedef struct reader {
    array arrays[KEYS];
    char contract[CG_CONTRACT_TEXT], dtype[16];
    bool has_contract, has_dtype;
    cg_error *error;
} reader;

/* A value as JSON, fit for a sentence. */
static cg_shown_word shown(const json_t *value) {
    char *full = json_dumps(value, JSON_ENCODE_ANY | JSON_ENSURE_ASCII | JSON_COMPACT);
    cg_shown_word s = cg_shown(full ? full : "?");
    free(full);
    return s;
}

static bool number_of(const json_t *value, double *x) {
    static const struct {
        const char *word;
        double x;
    } words[] = {{"NaN", NAN}, {"Infinity", INFINITY}, {"-Infinity", -INFINITY}};
    if (json_is_number(value)) {
        *x = json_number_value(value);
        return true;
    }
    for (int i = 0; i < 3 && json_is_string(value); i++)
        if (!strcmp(json_string_value(value), words[i].word)) {
            *x = words[i].x;
            return true;
        }
    return false;
}

static bool add_number(reader *r, int key, array *a, const json_t *value, const char *place) {
    double x;
    if (!number_of(value, &x))
        return cg_fail(r->error, CG_BAD_INPUT, "%s%s must be a number, got %s", keys[key].name, place,
                       shown(value).text);
    if ((key == INDEX || key == SELECT) && !json_is_integer(value))
        return cg_fail(r->error, CG_BAD_INPUT, "%s%s must be an integer, got %s", keys[key].name, place,
                       shown(value).text);
    if (!isfinite(x) && a->odd < 0) a->odd = a->n;
    a->x[a->n++] = x;
    return true;
}

/* A number, a list of numbers or, where the key has two sizes, a list of equally long lists. */
static bool read_array(reader *r, int key, const json_t *value) {
    array *a = &r->arrays[key];
    bool two = key == Q || key == WINDOW || key == COMPRESSED || key == Q_INDEX || key == K_INDEX ||
               key == DOUT || key == LOGITS || key == WINDOW_LOGITS;
    bool none = key == SCALE || key == SELECT || key == COEFF, outer = json_is_array(value);
    const json_t *first = outer ? json_array_get(value, 0) : NULL;
    bool inner = json_is_array(first);
    a->given = true;
    a->odd = -1;
    a->n_dims = outer + inner;
    if ((none && outer) || (inner && !two))
        return cg_fail(r->error, CG_BAD_INPUT, "%s must be %s, got %s", keys[key].name,
                       none ? "one number" : "a list of numbers", shown(value).text);
    size_t rows = outer ? json_array_size(value) : 1, columns = inner ? json_array_size(first) : 1;
    a->dims[0] = (int64_t)rows;
    a->dims[1] = (int64_t)columns;
    if (rows > MAX_NUMBERS || columns > MAX_NUMBERS || rows * columns > MAX_NUMBERS)
        return cg_fail(r->error, CG_BAD_INPUT, "%s has %zu * %zu numbers, at most %d are one row's",
                       keys[key].name, rows, columns, MAX_NUMBERS);
    a->x = malloc((rows * columns + 1) * sizeof *a->x);
    if (!a->x) return cg_fail(r->error, CG_FAILED, "out of memory while %s is read", keys[key].name);
    char place[64] = "";
    if (!outer) return add_number(r, key, a, value, place);
    for (size_t i = 0; i < rows; i++) {
        const json_t *row = json_array_get(value, i);
        snprintf(place, sizeof place, "[%zu]", i);
        if (!inner) {
            if (!add_number(r, key, a, row, place)) return false;
            continue;
        }
        if (!json_is_array(row) || json_array_size(row) != columns)
            return cg_fail(r->error, CG_BAD_INPUT, "%s%s must be a list of %zu numbers as %s[0] is, got %s",
                           keys[key].name, place, columns, keys[key].name, shown(row).text);
        for (size_t j = 0; j < columns; j++) {
            snprintf(place, sizeof place, "[%zu][%zu]", i, j);
            if (!add_number(r, key, a, json_array_get(row, j), place)) return false;
        }
    }
    return true;
}

static bool read_word(reader *r, int key, const json_t *value) {
    char *text = key == CONTRACT ? r->contract : r->dtype;
    size_t bytes = key == CONTRACT ? sizeof r->contract : sizeof r->dtype;
    const char *word = json_is_string(value) ? json_string_value(value) : "";
    bool odd = false;
    for (const char *c = word; *c; c++) odd |= (unsigned char)*c < ' ' || *c == 127;
    if (!json_is_string(value) || json_string_length(value) >= bytes || odd)
        return cg_fail(r->error, CG_BAD_INPUT, "%s must be a short text, got %s", keys[key].name,
                       shown(value).text);
    snprintf(text, bytes, "%s", word);
    *(key == CONTRACT ? &r->has_contract : &r->has_dtype) = true;
    return true;
}

/* ---- keys ---- */

static int find_key(const char *word, cg_error *error) {
    const char *names[2 * KEYS];
    int n = 0;
    for (int i = 0; i < KEYS; i++) {
        names[n++] = keys[i].name;
        if (keys[i].other_name) names[n++] = keys[i].other_name;
        if (!strcmp(word, keys[i].name) || (keys[i].other_name && !strcmp(word, keys[i].other_name))) return i;
    }
    const char *near = cg_suggest(word, names, n);
    json_t *quoted = json_string(word);
    cg_fail(error, CG_BAD_INPUT, "unknown key %s%s%s%s", quoted ? shown(quoted).text : "?",
            near ? ", did you mean " : "", near ? near : "", near ? "?" : "");
    json_decref(quoted);
    return -1;
}

static bool read_key(reader *r, const char *word, const json_t *value, bool replace) {
    int key = find_key(word, r->error);
    if (key < 0) return false;
    array *a = &r->arrays[key];
    bool is_word = key == CONTRACT || key == DTYPE;
    bool repeated = a->given || (key == CONTRACT && r->has_contract) || (key == DTYPE && r->has_dtype);
    if (repeated && !replace)
        return cg_fail(r->error, CG_BAD_INPUT, "%s is given twice, as %s and as %s", keys[key].name,
                       keys[key].name, keys[key].other_name);
    free(a->x);
    *a = (array){0};
    return is_word ? read_word(r, key, value) : read_array(r, key, value);
}

static bool not_json(const json_error_t *why, const char *key, cg_error *error) {
    char text[JSON_ERROR_TEXT_LENGTH];
    size_t n = 0;
    for (const char *c = why->text; *c && n + 1 < sizeof text; c++)
        if ((unsigned char)*c >= ' ' && (unsigned char)*c < 127) text[n++] = *c;
    text[n] = 0;
    if (key) return cg_fail(error, CG_BAD_INPUT, "%s is no JSON: %s", key, text);
    return cg_fail(error, CG_BAD_INPUT, "line %d: no JSON: %s", why->line, text);
}

static bool read_text(reader *r, const char *text, size_t bytes) {
    json_error_t why;
    json_t *root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &why);
    if (!root) return not_json(&why, NULL, r->error);
    bool ok = json_is_object(root);
    if (!ok) cg_fail(r->error, CG_BAD_INPUT, "a JSON object of keys is needed, got %s", shown(root).text);
    const char *key;
    json_t *value;
    json_object_foreach(root, key, value) {
        if (ok) ok = read_key(r, key, value, false);
    }
    json_decref(root);
    return ok;
}

static bool read_setting(reader *r, const char *key, const char *text) {
    json_error_t why;
    int k = find_key(key, r->error);
    if (k < 0) return false;
    json_t *value = k == CONTRACT || k == DTYPE
                        ? json_string(text)
                        : json_loads(text, JSON_DECODE_ANY | JSON_REJECT_DUPLICATES, &why);
    if (!value && (k == CONTRACT || k == DTYPE))
        return cg_fail(r->error, CG_BAD_INPUT, "%s is no text", keys[k].name);
    if (!value && (!strcmp(text, "-inf") || !strcmp(text, "-Infinity"))) value = json_string("-Infinity");
    if (!value) return not_json(&why, keys[k].name, r->error);
    bool ok = read_key(r, key, value, true);
    json_decref(value);
    return ok;
}

/* ---- from arrays to a row ---- */

/* As [rows, columns]: what has fewer sizes is one row, an empty list is no row. */
static void as_matrix(array *a) {
    if (a->n_dims == 2) return;
    a->dims[1] = a->n;
    a->dims[0] = a->n > 0;
}

static bool expect_size(reader *r, int key, int64_t got, int64_t want, const char *what) {
    if (got == want) return true;
    return cg_fail(r->error, CG_BAD_INPUT, "%s has %lld %s, expected %lld", keys[key].name, (long long)got,
                   what, (long long)want);
}

static bool expect_matrix(reader *r, int key, int64_t rows, int64_t columns) {
    array *a = &r->arrays[key];
    if (!a->given) return true;
    if (columns < 0) columns = a->dims[1];
    if (a->dims[0] == 0) columns = a->dims[1]; /* no row, any width */
    return (rows < 0 || expect_size(r, key, a->dims[0], rows, "rows")) &&
           expect_size(r, key, a->dims[1], columns, "columns");
}

static bool expect_vector(reader *r, int key, int64_t n) {
    return !r->arrays[key].given || expect_size(r, key, r->arrays[key].n, n, "numbers");
}

static bool expect_finite(reader *r, int key) {
    const array *a = &r->arrays[key];
    if (!a->given || a->odd < 0 || key == COMPRESSED || key == K_INDEX) return true;
    double x = a->x[a->odd];
    if (key == SINK && x < 0) { /* no sink */
        for (int64_t i = a->odd; i < a->n; i++)
            if (isnan(a->x[i]) || a->x[i] == INFINITY)
                return cg_fail(r->error, CG_BAD_INPUT, "sink must be finite or -Infinity");
        return true;
    }
    return cg_fail(r->error, CG_BAD_INPUT, "number %lld of %s is %s, expected a finite one", (long long)a->odd,
                   keys[key].name,
                   isnan(x) ? "NaN"
                   : x > 0  ? "Infinity"
                            : "-Infinity");
}

static bool excludes(reader *r, int a, int b) {
    if (!r->arrays[a].given || !r->arrays[b].given) return true;
    return cg_fail(r->error, CG_BAD_INPUT, "%s and %s exclude each other", keys[a].name, keys[b].name);
}

static bool needs(reader *r, int a, int b) {
    if (!r->arrays[a].given || r->arrays[b].given) return true;
    return cg_fail(r->error, CG_BAD_INPUT, "%s needs %s beside it", keys[a].name, keys[b].name);
}

static bool fits_together(reader *r) {
    static const int exclude[][2] = {{Q, LOGITS},      {COMPRESSED, LOGITS}, {WINDOW, LOGITS},
                                     {DOUT, LOGITS},   {SCALE, LOGITS},      {WINDOW, WINDOW_LOGITS},
                                     {INDEX, SELECT},  {SCORES, Q_INDEX},    {SCORES, K_INDEX},
                                     {SCORES, W_INDEX}};
    static const int need[][2] = {
        {WINDOW_LOGITS, LOGITS}, {WINDOW, Q},        {COMPRESSED, Q},    {DOUT, Q},
        {Q_INDEX, K_INDEX},      {Q_INDEX, W_INDEX}, {W_INDEX, Q_INDEX}, {K_INDEX, Q_INDEX}};
    for (size_t i = 0; i < sizeof exclude / sizeof *exclude; i++)
        if (!excludes(r, exclude[i][0], exclude[i][1])) return false;
    for (size_t i = 0; i < sizeof need / sizeof *need; i++)
        if (!needs(r, need[i][0], need[i][1])) return false;
    const array *a = r->arrays;
    if (!a[Q].given && !a[LOGITS].given && !a[TARGET].given)
        return cg_fail(r->error, CG_BAD_INPUT, "q, logits or target is needed: there is no row to compute");
    if (a[SELECT].given && !a[SCORES].given && !a[Q_INDEX].given)
        return cg_fail(r->error, CG_BAD_INPUT, "select needs scores, or q_index, w and k_index");
    if (a[TARGET].given && !a[SCORES].given && !a[Q_INDEX].given)
        return cg_fail(r->error, CG_BAD_INPUT, "target needs scores, or q_index, w and k_index");
    return true;
}

/* Logits as the rows of a problem that has them: q is the identity, key j holds the logits of row j. */
static double *keys_of_logits(const array *logits, int64_t H) {
    int64_t n = logits->given ? logits->dims[1] : 0;
    double *x = malloc(sizeof *x * (size_t)(n * H + 1));
    for (int64_t j = 0; x && j < n; j++)
        for (int64_t h = 0; h < H; h++) x[j * H + h] = logits->x[h * n + j];
    return x;
}

static bool take_logits(reader *r, cg_row *row) {
    array *logits = &r->arrays[LOGITS];
    row->from_logits = true;
    row->q = calloc((size_t)(row->H * row->H + 1), sizeof *row->q);
    row->compressed = keys_of_logits(logits, row->H);
    row->window = keys_of_logits(&r->arrays[WINDOW_LOGITS], row->H);
    if (!row->q || !row->compressed || !row->window)
        return cg_fail(r->error, CG_FAILED, "out of memory while logits are read");
    for (int64_t h = 0; h < row->H; h++) row->q[h * row->H + h] = 1;
    return true;
}

/* The products that results and the engine's values are as large as. */
static bool small_enough(reader *r, const cg_row *row) {
    const int64_t T = row->W > 1 ? row->W : 1, n = row->K > row->C ? row->K : row->C;
    const int64_t sizes[] = {T * row->H, T * n, row->H * (n + row->W), row->Hi * n, T * row->Hi};
    int64_t most = 0;
    for (int i = 0; i < 5; i++)
        if (sizes[i] > most) most = sizes[i];
    if (T * row->H <= MAX_NUMBERS && T * row->H * row->D > most) most = T * row->H * row->D;
    if (T * row->Hi <= MAX_NUMBERS && T * row->Hi * row->Di > most) most = T * row->Hi * row->Di;
    if (most <= MAX_NUMBERS) return true;
    return cg_fail(
        r->error, CG_BAD_INPUT,
        "%lld heads of %lld, %lld window rows, %lld compressed rows and a list of %lld make arrays of "
        "%lld numbers, at most %d are one row's",
        (long long)row->H, (long long)row->D, (long long)row->W, (long long)row->C, (long long)row->K,
        (long long)most, MAX_NUMBERS);
}

static bool take_index(reader *r, cg_row *row) {
    const array *index = &r->arrays[INDEX], *select = &r->arrays[SELECT];
    if (select->given) {
        if (!(select->x[0] >= 0 && select->x[0] <= MAX_NUMBERS))
            return cg_fail(r->error, CG_BAD_INPUT, "select must be an integer from 0 to %d, got %.17g",
                           MAX_NUMBERS, select->x[0]);
        row->K = (int64_t)select->x[0];
        return true;
    }
    row->K = index->given ? index->n : row->C;
    row->index = malloc(sizeof *row->index * (size_t)(row->K + 1));
    if (!row->index) return cg_fail(r->error, CG_FAILED, "out of memory while index is read");
    for (int64_t k = 0; k < row->K; k++) {
        double j = index->given ? index->x[k] : (double)k;
        if (!(j >= -1 && j < (double)row->C))
            return cg_fail(r->error, CG_BAD_INPUT,
                           "index[%lld] is %.17g, expected -1 or one of %lld compressed rows", (long long)k, j,
                           (long long)row->C);
        row->index[k] = (int32_t)j;
    }
    return true;
}

/* A row that is read must be finite: compressed rows that the list names, in the dense support all. */
static bool expect_named_finite(reader *r, const cg_row *row, int key) {
    const array *a = &r->arrays[key];
    if (!a->given || a->odd < 0) return true;
    bool all = !row->index || row->contract.value[CG_AXIS_SUPPORT] == CG_SUPPORT_IS_DENSE,
         loss = row->scores || row->q_index;
    for (int64_t i = 0; i < a->n; i++) {
        int64_t j = i / a->dims[1];
        bool named = all && (loss || key == K_INDEX);
        for (int64_t k = 0; k < row->K && row->index && !named; k++) named = row->index[k] == j;
        if (named && !isfinite(a->x[i]))
            return cg_fail(r->error, CG_BAD_INPUT, "%s[%lld] is read and holds %s", keys[key].name,
                           (long long)j, isnan(a->x[i]) ? "NaN" : "an infinity");
        if (!named) i = (j + 1) * a->dims[1] - 1;
    }
    return true;
}

static double *take(reader *r, int key) {
    double *x = r->arrays[key].x;
    r->arrays[key].x = NULL;
    return x;
}

static bool take_sizes(reader *r, cg_row *row) {
    array *a = r->arrays;
    static const int matrices[] = {Q, WINDOW, COMPRESSED, Q_INDEX, K_INDEX, DOUT, LOGITS, WINDOW_LOGITS};
    for (size_t i = 0; i < sizeof matrices / sizeof *matrices; i++) as_matrix(&a[matrices[i]]);
    if (a[Q].given && a[Q].n == 0)
        return cg_fail(r->error, CG_BAD_INPUT, "q is empty, expected [H, D] numbers");
    if (a[LOGITS].given && a[LOGITS].dims[0] == 0)
        return cg_fail(r->error, CG_BAD_INPUT, "logits is empty, expected [H, C] numbers");
    if (a[Q_INDEX].given && a[Q_INDEX].n == 0)
        return cg_fail(r->error, CG_BAD_INPUT, "q_index is empty, expected [Hi, Di] numbers");
    if (a[Q].given) row->H = a[Q].dims[0], row->D = a[Q].dims[1];
    if (a[LOGITS].given) row->H = row->D = a[LOGITS].dims[0];
    row->W = a[WINDOW].given ? a[WINDOW].dims[0] : a[WINDOW_LOGITS].given ? a[WINDOW_LOGITS].dims[1] : 0;
    row->C = a[COMPRESSED].given              ? a[COMPRESSED].dims[0]
             : a[LOGITS].given                ? a[LOGITS].dims[1]
             : a[TARGET].given && !a[Q].given ? a[TARGET].n
                                              : 0;
    if (a[Q_INDEX].given) row->Hi = a[Q_INDEX].dims[0], row->Di = a[Q_INDEX].dims[1];
    return expect_matrix(r, WINDOW, -1, row->D) && expect_matrix(r, COMPRESSED, -1, row->D) &&
           expect_matrix(r, DOUT, row->H, row->D) && expect_matrix(r, WINDOW_LOGITS, row->H, -1) &&
           expect_matrix(r, K_INDEX, row->C, row->Di) && expect_vector(r, SINK, row->H) &&
           expect_vector(r, SCORES, row->C) && expect_vector(r, TARGET, row->C) &&
           expect_vector(r, W_INDEX, row->Hi);
}

static bool take_words(reader *r, cg_row *row) {
    row->dtype = CG_F64;
    if (!cg_contract_parse(r->contract, &row->contract, r->error)) return false;
    if (!r->has_dtype || !strcmp(r->dtype, "f64")) return true;
    row->dtype = CG_F32;
    if (!strcmp(r->dtype, "f32")) return true;
    return cg_fail(r->error, CG_BAD_INPUT, "dtype must be f64 or f32, got \"%.15s\"", r->dtype);
}

static bool take_row(reader *r, cg_row *row) {
    array *a = r->arrays;
    if (!fits_together(r)) return false;
    for (int key = 0; key < KEYS; key++)
        if (!expect_finite(r, key)) return false;
    if (!take_sizes(r, row) || !take_words(r, row) || !take_index(r, row) || !small_enough(r, row))
        return false;
    for (int64_t j = 0; a[TARGET].given && j < row->C; j++)
        if (a[TARGET].x[j] < 0)
            return cg_fail(r->error, CG_BAD_INPUT, "target[%lld] is %.17g, expected a share from 0 on",
                           (long long)j, a[TARGET].x[j]);
    row->scale = a[SCALE].given ? a[SCALE].x[0] : 1;
    row->coeff = a[COEFF].given ? a[COEFF].x[0] : 1;
    if (a[LOGITS].given && !take_logits(r, row)) return false;
    if (a[Q].given) row->q = take(r, Q), row->dout = take(r, DOUT);
    row->scores = take(r, SCORES);
    row->target = take(r, TARGET);
    row->q_index = take(r, Q_INDEX);
    row->w = take(r, W_INDEX);
    if (!expect_named_finite(r, row, COMPRESSED) || !expect_named_finite(r, row, K_INDEX)) return false;
    row->k_index = take(r, K_INDEX);
    if (a[Q].given && a[WINDOW].given) row->window = take(r, WINDOW);
    if (a[Q].given && a[COMPRESSED].given) row->compressed = take(r, COMPRESSED);
    row->sink = take(r, SINK);
    if (row->sink) return true;
    row->sink = malloc(sizeof *row->sink * (size_t)(row->H + 1));
    if (!row->sink) return cg_fail(r->error, CG_FAILED, "out of memory while a row is read");
    for (int64_t h = 0; h < row->H; h++) row->sink[h] = -INFINITY;
    return true;
}

cg_row *cg_row_read(const char *text, size_t bytes, const char *const (*settings)[2], int n_settings,
                    cg_error *error) {
    cg_error own = {0};
    reader r = {.error = error ? error : &own};
    cg_row *row = calloc(1, sizeof *row);
    bool ok = row || cg_fail(r.error, CG_FAILED, "out of memory while a row is read");
    if (ok && text) ok = read_text(&r, text, bytes);
    for (int i = 0; i < n_settings && ok; i++) ok = read_setting(&r, settings[i][0], settings[i][1]);
    if (ok) ok = take_row(&r, row);
    for (int key = 0; key < KEYS; key++) free(r.arrays[key].x);
    if (ok) return row;
    cg_row_free(row);
    return NULL;
}

void cg_row_free(cg_row *row) {
    if (!row) return;
    double *arrays[] = {row->q,      row->window,  row->compressed, row->sink,    row->dout,
                        row->scores, row->q_index, row->w,          row->k_index, row->target};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) free(arrays[i]);
    free(row->index);
    free(row);
}
