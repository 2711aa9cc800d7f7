/* events.h - snapshots of a pool as trees of values, and the events of its history. Include setup.h first. */

#ifndef EVENTS_H
#define EVENTS_H

#include "value.h"

typedef struct text {
    char *data;
    size_t n, room;
} text;

static UNUSED int keep(void *user, const void *data, size_t bytes)
{
    text *t = user;
    if (t->n + bytes > t->room) {
        t->room = 2 * (t->n + bytes);
        t->data = realloc(t->data, t->room);
    }
    memcpy(t->data + t->n, data, bytes);
    t->n += bytes;
    return 0;
}

static UNUSED value *snapshot(galloc_pool *pool, int format)
{
    text t = {NULL, 0, 0};
    value *v;
    OK(galloc_snapshot(pool, format, keep, &t));
    v = format == GALLOC_SNAPSHOT_JSON ? value_of_json(t.data, t.n) : value_of_pickle(t.data, t.n);
    EXPECT(v);
    free(t.data);
    return v;
}

static UNUSED const value *events_of(const value *v) { return value_of(v, "device_traces")->first; }

static UNUSED size_t events_named(const value *v, const char *action)
{
    size_t n = 0;
    const value *e;
    for (e = events_of(v)->first; e; e = e->next) n += !strcmp(text_of(e, "action"), action);
    return n;
}

/* The last event of that name, or NULL. */
static UNUSED const value *event_named(const value *v, const char *action)
{
    const value *e, *found = NULL;
    for (e = events_of(v)->first; e; e = e->next)
        if (!strcmp(text_of(e, "action"), action)) found = e;
    return found;
}

#endif
