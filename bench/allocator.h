/* allocator.h - the allocators that can be measured, behind one interface. */

#ifndef BENCH_ALLOCATOR_H
#define BENCH_ALLOCATOR_H

#include <stdbool.h>

#include "galloc.h"

typedef struct allocator {
    const char *name;
    /* Begins. conf: a text for galloc_config_parse, or NULL. limit: bytes to be held at most. Those without a pool know
       neither. Returns 0, or -1 with a line on stderr. */
    int (*open)(const char *conf, size_t limit);
    cudaError_t (*alloc)(void **ptr, size_t bytes, cudaStream_t stream);
    cudaError_t (*free)(void *ptr, cudaStream_t stream);
    int (*close)(void);           /* ends; as open */
    galloc_pool *(*pool)(void);   /* the pool under test; NULL for allocators that have none */
    const char *(*message)(void); /* what the last error was, in words */
} allocator;

extern const allocator allocator_galloc, allocator_cudamalloc;

/* By the name that --allocator takes; NULL with a line on stderr when it is unknown, or not built in. */
const allocator *allocator_find(const char *name);

/* The settings that a text for galloc_config_parse makes of the defaults; NULL: the defaults. False, with a line on
   stderr, when it is wrong. */
bool allocator_conf(galloc_config *config, const char *conf);

#endif
