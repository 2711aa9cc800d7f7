/* Failures are reported by whoever made the call: to run out of memory is an expected result here. */
#define GALLOC_LOG(text) ((void)(text))
#define GALLOC_IMPLEMENTATION
#include "allocator.h"

#include <stdio.h>
#include <string.h>

/* ---- galloc ------------------------------------------------------------------------------------------------------ */

static galloc_pool *pool;

bool allocator_conf(galloc_config *config, const char *conf)
{
    char message[256];
    *config = galloc_config_default();
    if (!conf || !galloc_config_parse(config, conf, message, sizeof message)) return true;
    fprintf(stderr, "--conf %s: %s\n", conf, message);
    return false;
}

static int pool_open(const char *conf, size_t limit)
{
    galloc_config config;
    if (!allocator_conf(&config, conf)) return -1;
    if (limit < config.memory_limit) config.memory_limit = limit;
    if (!galloc_pool_create(&pool, &config)) return 0;
    fprintf(stderr, "galloc_pool_create: %s\n", galloc_last_message());
    return -1;
}

static cudaError_t pool_alloc(void **ptr, size_t bytes, cudaStream_t stream)
{
    return galloc_pool_malloc(pool, ptr, bytes, stream);
}

static int pool_close(void)
{
    cudaError_t error = galloc_pool_destroy(pool);
    if (!error) error = galloc_shutdown();
    if (!error) return 0;
    fprintf(stderr, "galloc_pool_destroy: %s\n", galloc_last_message());
    return -1;
}

static galloc_pool *pool_under_test(void)
{
    return pool;
}

const allocator allocator_galloc = {"galloc",   pool_open,       pool_alloc,         galloc_free,
                                    pool_close, pool_under_test, galloc_last_message};

/* ---- cudaMalloc and cudaFree ------------------------------------------------------------------------------------- */

static int plain_open(const char *conf, size_t limit)
{
    (void)conf;
    (void)limit;
    return 0;
}

static cudaError_t plain_alloc(void **ptr, size_t bytes, cudaStream_t stream)
{
    (void)stream;
    cudaError_t error = cudaMalloc(ptr, bytes);
    if (error) *ptr = NULL;
    if (error == cudaErrorMemoryAllocation) cudaGetLastError();
    return error;
}

static cudaError_t plain_free(void *ptr, cudaStream_t stream)
{
    (void)stream;
    return cudaFree(ptr);
}

static int plain_close(void)
{
    return 0;
}

static const char *plain_message(void)
{
    return cudaGetErrorString(cudaPeekAtLastError());
}

const allocator allocator_cudamalloc = {"cudamalloc", plain_open, plain_alloc,  plain_free,
                                        plain_close,  NULL,       plain_message};

/* ---- by name ----------------------------------------------------------------------------------------------------- */

const allocator *allocator_find(const char *name)
{
    static const char *const absent[] = {"async", "cub", "torch"};
    if (!strcmp(name, "galloc")) return &allocator_galloc;
    if (!strcmp(name, "cudamalloc")) return &allocator_cudamalloc;
    for (size_t i = 0; i < sizeof absent / sizeof *absent; i++) {
        if (strcmp(name, absent[i])) continue;
        fprintf(stderr, "allocator %s is not built in: galloc and cudamalloc are\n", name);
        return NULL;
    }
    fprintf(stderr, "unknown allocator \"%s\": galloc and cudamalloc are built in\n", name);
    return NULL;
}
