/* allocator.h - the allocators that can be measured, behind one interface. */

#ifndef BENCH_ALLOCATOR_H
#define BENCH_ALLOCATOR_H

#include <stdbool.h>
#include <stdio.h>

#include "galloc.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct allocator {
    const char *name;
    const char *variable; /* of the environment, that settings can come from; NULL: it has no settings */
    bool caching;         /* keeps what is freed, and a limit if it takes one */
    bool counted;         /* the device's account sees all calls that it makes */
    bool keeps_stream;    /* a block goes back to the stream it was allocated for, whichever the free names */
    /* Begins. conf: settings, NULL for those in `variable`. limit: bytes to be held at most, SIZE_MAX for no limit.
       Returns 0, or -1 with a line on stderr. What is done once in a process is done here, not in the first alloc. */
    int (*open)(const char *conf, size_t limit);
    cudaError_t (*alloc)(void **ptr, size_t bytes, cudaStream_t stream);
    cudaError_t (*free)(void *ptr, cudaStream_t stream);
    /* What galloc's log tells beyond alloc and free; NULL: plain calls take the place of these. */
    cudaError_t (*request)(void **ptr, galloc_request request);
    cudaError_t (*resize)(void *ptr, size_t bytes, cudaStream_t stream);
    cudaError_t (*record)(void *ptr, cudaStream_t stream);
    cudaError_t (*free_after)(void *ptr, const cudaStream_t *streams, int n);
    cudaError_t (*retire)(cudaStream_t stream); /* the stream may be destroyed from now on; NULL: leave it open */
    int (*close)(void);           /* ends; as open */
    cudaError_t (*set_device)(int device); /* for allocators with a CUDA runtime of their own; NULL: cudaSetDevice */
    size_t (*peak)(void);         /* bytes held at most since open, by its own account; NULL: the device's sees them */
    size_t (*held)(void);         /* bytes held now, likewise; there where `peak` is */
    galloc_pool *(*pool)(void);   /* the pool under test; NULL for allocators that have none */
    const char *(*message)(void); /* what the last error was, in words */
} allocator;

/* galloc by a pool of its own, and by what a program calls: galloc_malloc and galloc_free. */
extern const allocator allocator_galloc, allocator_galloc_default;
extern const allocator allocator_cudamalloc;

/* Peers, in programs for a GPU. */
extern const allocator allocator_async;
extern const allocator *const allocator_cub; /* NULL: nvcc came without CUB */

/* By the name that --allocator takes, ready to be opened with `conf`; NULL with a line on stderr when it is unknown,
   not built in, or has no such settings. */
const allocator *allocator_load(const char *name, const char *conf);

/* The settings that it has when opened with `conf`; "" when there are none. */
const char *allocator_settings(const allocator *a, const char *conf);

/* Whether a name that allocator_load knows can be loaded here. */
bool allocator_built(const char *name);

/* A line for each of them: whether it was built in, and if not, why. */
void allocator_list(FILE *out);

/* The settings that a text for galloc_config_parse makes of the defaults; NULL: the defaults. False, with a line on
   stderr, when it is wrong. */
bool allocator_conf(galloc_config *config, const char *conf);

#ifdef __cplusplus
}
#endif
#endif
