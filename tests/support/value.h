/* value.h - reads JSON and pickles of protocol 2 into one tree of values, so that they can be compared. It knows what
   galloc_snapshot writes, and takes everything else for an error. */

#ifndef VALUE_H
#define VALUE_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct value {
    char type; /* { [ s(tring) n(umber) t(rue) f(alse); a pair is a list */
    char *key; /* in a dictionary */
    char *text;
    uint64_t number;
    struct value *first, *last, *next;
} value;

typedef struct reader {
    const unsigned char *at, *end;
    int wrong;
} reader;

static value *value_new(char type)
{
    value *v = calloc(1, sizeof *v);
    v->type = type;
    return v;
}

static void value_free(value *v)
{
    while (v) {
        value *next = v->next;
        value_free(v->first);
        free(v->key);
        free(v->text);
        free(v);
        v = next;
    }
}

static void value_add(value *to, value *v)
{
    if (to->last) to->last->next = v;
    else to->first = v;
    to->last = v;
}

static UNUSED size_t value_count(const value *v)
{
    size_t n = 0;
    for (v = v ? v->first : NULL; v; v = v->next) n++;
    return n;
}

static const value *value_of(const value *v, const char *key)
{
    for (v = v && v->type == '{' ? v->first : NULL; v; v = v->next)
        if (!strcmp(v->key, key)) return v;
    return NULL;
}

static UNUSED uint64_t number_of(const value *v, const char *key)
{
    v = value_of(v, key);
    return v && v->type == 'n' ? v->number : UINT64_MAX;
}

static const char *text_of(const value *v, const char *key)
{
    v = value_of(v, key);
    return v && v->type == 's' ? v->text : "";
}

static UNUSED int values_equal(const value *a, const value *b)
{
    for (; a && b; a = a->next, b = b->next) {
        if (a->type != b->type || a->number != b->number || !a->key != !b->key) return 0;
        if ((a->key && strcmp(a->key, b->key)) || (a->text && strcmp(a->text, b->text))) return 0;
        if (!values_equal(a->first, b->first)) return 0;
    }
    return !a && !b;
}

static value *value_copy(const value *v)
{
    value *copy = value_new(v->type);
    copy->key = v->key ? strdup(v->key) : NULL;
    copy->text = v->text ? strdup(v->text) : NULL;
    copy->number = v->number;
    for (v = v->first; v; v = v->next) value_add(copy, value_copy(v));
    return copy;
}

/* ---- JSON -------------------------------------------------------------------------------------------------------- */

static int json_next(reader *r, char c)
{
    if (r->at < r->end && *r->at == c) return r->at++, 1;
    return 0;
}

static char *json_string(reader *r)
{
    const unsigned char *end = r->at;
    char *text;
    size_t n = 0;
    while (end < r->end && *end != '"') end += *end == '\\' ? 2 : 1;
    text = malloc((size_t)(end - r->at) + 1);
    while (r->at < r->end && *r->at != '"') {
        if (*r->at == '\\') r->at++;
        if (r->at == r->end || *r->at < ' ') r->wrong = 1;
        else text[n++] = (char)*r->at++;
        if (r->wrong) break;
    }
    text[n] = 0;
    if (!json_next(r, '"')) r->wrong = 1;
    return text;
}

static value *json_value(reader *r)
{
    value *v;
    if (json_next(r, '{') || json_next(r, '[')) {
        char open = (char)r->at[-1], close = open == '{' ? '}' : ']';
        v = value_new(open);
        while (!r->wrong && !json_next(r, close)) {
            char *key = NULL;
            value *child;
            if (v->first && !json_next(r, ',')) r->wrong = 1;
            if (open == '{' && json_next(r, '"')) key = json_string(r);
            if (open == '{' && (!key || !json_next(r, ':'))) r->wrong = 1;
            if (r->wrong) return free(key), v;
            child = json_value(r);
            child->key = key;
            value_add(v, child);
        }
        return v;
    }
    if (json_next(r, '"')) {
        v = value_new('s');
        v->text = json_string(r);
        return v;
    }
    if (r->end - r->at >= 4 && !memcmp(r->at, "true", 4)) return r->at += 4, value_new('t');
    if (r->end - r->at >= 5 && !memcmp(r->at, "false", 5)) return r->at += 5, value_new('f');
    v = value_new('n');
    if (r->at == r->end || *r->at < '0' || *r->at > '9') r->wrong = 1;
    while (r->at < r->end && *r->at >= '0' && *r->at <= '9') v->number = v->number * 10 + (uint64_t)(*r->at++ - '0');
    return v;
}

/* NULL: not one well-formed value. */
static value *value_of_json(const void *data, size_t bytes)
{
    reader r = {data, (const unsigned char *)data + bytes, 0};
    value *v = json_value(&r);
    if (!r.wrong && r.at == r.end) return v;
    value_free(v);
    return NULL;
}

/* ---- pickle ------------------------------------------------------------------------------------------------------ */

static uint64_t pickle_little(reader *r, int bytes)
{
    uint64_t n = 0;
    int i;
    if (r->end - r->at < bytes) return r->wrong = 1, 0;
    for (i = 0; i < bytes; i++) n |= (uint64_t)r->at[i] << 8 * i;
    r->at += bytes;
    return n;
}

static value *pickle_number(uint64_t number)
{
    value *v = value_new('n');
    v->number = number;
    return v;
}

static value *pickle_text(const char *text, size_t n)
{
    value *v = value_new('s');
    v->text = malloc(n + 1);
    memcpy(v->text, text, n);
    v->text[n] = 0;
    return v;
}

#ifndef MEMO
#define MEMO (1 << 17)
#endif

/* Remembers a text, which is copied, or a list, which is filled later. Numbers follow one another. */
static int pickle_put(value **memo, uint64_t number, value *v)
{
    if (number >= MEMO || memo[number] || (number && !memo[number - 1]) || (v->type != 's' && v->type != '[')) return 0;
    memo[number] = v->type == 's' ? value_copy(v) : v;
    return 1;
}

/* One step of the machine: stack[0 .. n). */
static size_t pickle_step(reader *r, value **stack, size_t n, value **memo)
{
    int code = (int)pickle_little(r, 1);
    uint64_t length;
    value *v;
    if (r->wrong || n > 60) return r->wrong = 1, n;
    switch (code) {
    case '}': return stack[n] = value_new('{'), n + 1;
    case ']': return stack[n] = value_new('['), n + 1;
    case 0x88: return stack[n] = value_new('t'), n + 1;
    case 0x89: return stack[n] = value_new('f'), n + 1;
    case 'K': return stack[n] = pickle_number(pickle_little(r, 1)), n + 1;
    case 'M': return stack[n] = pickle_number(pickle_little(r, 2)), n + 1;
    case 'J':
        length = pickle_little(r, 4);
        if (length >> 31) r->wrong = 1;
        return stack[n] = pickle_number(length), n + 1;
    case 0x8a:
        if (pickle_little(r, 1) != 9) r->wrong = 1;
        length = pickle_little(r, 8);
        if (pickle_little(r, 1)) r->wrong = 1;
        return stack[n] = pickle_number(length), n + 1;
    case 'X':
        length = pickle_little(r, 4);
        if (length > (uint64_t)(r->end - r->at)) return r->wrong = 1, n;
        stack[n] = pickle_text((const char *)r->at, (size_t)length);
        r->at += length;
        return n + 1;
    case 'q':
    case 'r':
        length = pickle_little(r, code == 'q' ? 1 : 4);
        if (!n || !pickle_put(memo, length, stack[n - 1])) r->wrong = 1;
        return n;
    case 'h':
    case 'j':
        length = pickle_little(r, code == 'h' ? 1 : 4);
        if (length >= MEMO || !memo[length]) return r->wrong = 1, n;
        v = value_copy(memo[length]);
        free(v->key);
        v->key = NULL;
        return stack[n] = v, n + 1;
    case 's':
        if (n < 3 || stack[n - 3]->type != '{' || stack[n - 2]->type != 's') return r->wrong = 1, n;
        stack[n - 1]->key = strdup(stack[n - 2]->text);
        value_free(stack[n - 2]);
        value_add(stack[n - 3], stack[n - 1]);
        return n - 2;
    case 'a':
        if (n < 2 || stack[n - 2]->type != '[') return r->wrong = 1, n;
        value_add(stack[n - 2], stack[n - 1]);
        return n - 1;
    case 0x86:
        if (n < 2) return r->wrong = 1, n;
        v = value_new('[');
        value_add(v, stack[n - 2]);
        value_add(v, stack[n - 1]);
        stack[n - 2] = v;
        return n - 1;
    default: return r->wrong = 1, n;
    }
}

/* NULL: not one well-formed pickle. */
static value *value_of_pickle(const void *data, size_t bytes)
{
    reader r = {data, (const unsigned char *)data + bytes, 0};
    value *stack[64], *v;
    value **memo = calloc(MEMO, sizeof *memo);
    size_t n = 0, i;
    if (pickle_little(&r, 2) != 0x280) r.wrong = 1;
    while (!r.wrong && !(r.at < r.end && *r.at == '.')) n = pickle_step(&r, stack, n, memo);
    for (i = 0; i < MEMO && memo[i]; i++)
        if (memo[i]->type == 's') value_free(memo[i]);
    free(memo);
    v = n ? stack[0] : NULL;
    if (!r.wrong && n == 1 && r.at + 1 == r.end) return v;
    for (i = 0; i < n; i++) value_free(stack[i]);
    return NULL;
}

#endif
