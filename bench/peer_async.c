/* peer_async.c - cudaMallocAsync and cudaFreeAsync, set to keep what is freed. */

#include "allocator.h"

#include <stdio.h>

enum { DEVICES_MAX = 16 };

static cudaMemPool_t pool[DEVICES_MAX]; /* the devices' default pools */
static int devices;
static cudaMemPool_t limited; /* that all memory comes from where a limit is kept; NULL: the default pools */
static cudaError_t last;

static cudaError_t noted(cudaError_t error)
{
    last = error;
    if (error) cudaGetLastError();
    return error;
}

static cudaError_t keep_freed(cudaMemPool_t p)
{
    uint64_t most = UINT64_MAX, none = 0;
    cudaError_t error = cudaMemPoolSetAttribute(p, cudaMemPoolAttrReleaseThreshold, &most);
    if (!error) error = cudaMemPoolTrimTo(p, 0);
    return error ? error : cudaMemPoolSetAttribute(p, cudaMemPoolAttrReservedMemHigh, &none);
}

static cudaError_t make_limited(size_t limit)
{
#if CUDART_VERSION >= 12020
    struct cudaMemPoolProps props = {.allocType = cudaMemAllocationTypePinned,
                                     .location = {.type = cudaMemLocationTypeDevice},
                                     .maxSize = limit};
    cudaError_t error = cudaMemPoolCreate(&limited, &props);
    return error ? error : keep_freed(limited);
#else
    (void)limit;
    return cudaErrorNotSupported;
#endif
}

static cudaError_t async_alloc(void **ptr, size_t bytes, cudaStream_t stream)
{
    cudaError_t error = limited ? cudaMallocFromPoolAsync(ptr, bytes, limited, stream)
                                : cudaMallocAsync(ptr, bytes, stream);
    if (!error) return cudaSuccess;
    *ptr = NULL;
    return noted(error);
}

static cudaError_t async_free(void *ptr, cudaStream_t stream)
{
    cudaError_t error = cudaFreeAsync(ptr, stream);
    return error ? noted(error) : cudaSuccess;
}

static cudaError_t open_all(size_t limit)
{
    void *first;
    cudaError_t error = cudaGetDeviceCount(&devices);
    if (devices > DEVICES_MAX) devices = DEVICES_MAX;
    for (int i = 0; i < devices && !error; i++) {
        error = cudaDeviceGetDefaultMemPool(&pool[i], i);
        if (!error) error = keep_freed(pool[i]);
    }
    if (!error) error = async_alloc(&first, 512, 0); /* the first one of a process takes long */
    if (!error) error = async_free(first, 0);
    if (!error) error = cudaDeviceSynchronize();
    if (!error) error = keep_freed(pool[0]);
    return error || limit == SIZE_MAX ? error : make_limited(limit);
}

static int failed(const char *what, cudaError_t error)
{
    if (!noted(error)) return 0;
    fprintf(stderr, "cudaMallocAsync cannot be %s: %s\n", what, cudaGetErrorString(error));
    return -1;
}

static int async_open(const char *conf, size_t limit)
{
    (void)conf;
    limited = NULL;
    return failed("set up", open_all(limit));
}

static int async_close(void)
{
    cudaError_t error = cudaDeviceSynchronize();
    for (int i = 0; i < devices && !error; i++) error = cudaMemPoolTrimTo(pool[i], 0);
    if (!error && limited) error = cudaMemPoolDestroy(limited);
    return failed("ended", error);
}

static size_t async_peak(void)
{
    uint64_t bytes = 0;
    cudaError_t error = cudaMemPoolGetAttribute(limited ? limited : pool[0], cudaMemPoolAttrReservedMemHigh, &bytes);
    return error ? 0 : (size_t)bytes;
}

static size_t async_held(void)
{
    uint64_t bytes = 0;
    cudaError_t error = cudaMemPoolGetAttribute(limited ? limited : pool[0], cudaMemPoolAttrReservedMemCurrent, &bytes);
    return error ? 0 : (size_t)bytes;
}

static const char *async_message(void)
{
    return cudaGetErrorString(last);
}

const allocator allocator_async = {
    .name = "async", .caching = true, .open = async_open, .alloc = async_alloc, .free = async_free,
    .close = async_close, .peak = async_peak, .held = async_held, .message = async_message
};
