/* map.h - a table of 64-bit numbers by 64-bit numbers: open addressing, linear probing, no tombstones.

   The number 0 is no key. All zero is an empty map. */

#ifndef BENCH_MAP_H
#define BENCH_MAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

typedef struct map_entry {
    uint64_t key, value;
} map_entry;

typedef struct map {
    map_entry *entry;
    size_t size; /* of the table: 0 or a power of two */
    size_t n;    /* keys in it */
} map;

static inline size_t map_home(const map *m, uint64_t key)
{
    key *= 0x9E3779B97F4A7C15u;
    return (size_t)(key ^ key >> 32) & (m->size - 1);
}

/* Where the key is, or the empty place where it would be. */
static inline size_t map_place(const map *m, uint64_t key)
{
    size_t i = map_home(m, key);
    while (m->entry[i].key && m->entry[i].key != key) i = (i + 1) & (m->size - 1);
    return i;
}

/* The value of a key, or NULL. Valid until the next change. */
static inline uint64_t *map_find(const map *m, uint64_t key)
{
    if (!m->size) return NULL;
    map_entry *e = &m->entry[map_place(m, key)];
    return e->key ? &e->value : NULL;
}

static inline bool map_grow(map *m)
{
    map bigger = {NULL, m->size ? 2 * m->size : 64, m->n};
    bigger.entry = calloc(bigger.size, sizeof *bigger.entry);
    if (!bigger.entry) return false;
    for (size_t i = 0; i < m->size; i++)
        if (m->entry[i].key) bigger.entry[map_place(&bigger, m->entry[i].key)] = m->entry[i];
    free(m->entry);
    *m = bigger;
    return true;
}

/* False when the host has no memory. */
static inline bool map_put(map *m, uint64_t key, uint64_t value)
{
    if (2 * m->n >= m->size && !map_grow(m)) return false;
    map_entry *e = &m->entry[map_place(m, key)];
    if (!e->key) m->n++;
    e->key = key;
    e->value = value;
    return true;
}

/* Takes out a key that is there. Those that were pushed past its place move back, so that no search ends too early. */
static inline void map_remove(map *m, uint64_t key)
{
    size_t hole = map_place(m, key), mask = m->size - 1;
    for (size_t i = (hole + 1) & mask; m->entry[i].key; i = (i + 1) & mask) {
        size_t home = map_home(m, m->entry[i].key);
        if (((i - home) & mask) < ((i - hole) & mask)) continue;
        m->entry[hole] = m->entry[i];
        hole = i;
    }
    m->entry[hole].key = 0;
    m->n--;
}

static inline void map_free(map *m)
{
    free(m->entry);
    *m = (map){NULL, 0, 0};
}

#endif
