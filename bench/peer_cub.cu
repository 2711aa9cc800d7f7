/* peer_cub.cu - CUB's CachingDeviceAllocator, where nvcc comes with it. */

#include "allocator.h"

#include <stdio.h>

#if __has_include(<cub/util_allocator.cuh>)
#include <cub/util_allocator.cuh>

/* Bins are powers of two from 512 bytes; what is larger than the last one is not kept. */
enum { BIN_GROWTH = 2, BIN_FIRST = 9, BIN_LAST = 31 };

static cub::CachingDeviceAllocator *cache;
static cudaError_t last;

static cudaError_t noted(cudaError_t error)
{
    last = error;
    if (error) cudaGetLastError();
    return error;
}

static cudaError_t cub_alloc(void **ptr, size_t bytes, cudaStream_t stream)
{
    cudaError_t error = cache->DeviceAllocate(ptr, bytes, stream);
    if (!error) return cudaSuccess;
    *ptr = nullptr;
    return noted(error);
}

static cudaError_t cub_free(void *ptr, cudaStream_t)
{
    cudaError_t error = cache->DeviceFree(ptr);
    return error ? noted(error) : cudaSuccess;
}

static int failed(const char *what, cudaError_t error)
{
    if (!noted(error)) return 0;
    fprintf(stderr, "CUB's allocator cannot be %s: %s\n", what, cudaGetErrorString(error));
    return -1;
}

static int cub_open(const char *, size_t limit)
{
    void *first;
    if (limit != SIZE_MAX) {
        fprintf(stderr, "CUB's allocator keeps no limit on what it holds\n");
        return -1;
    }
    cache = new cub::CachingDeviceAllocator(BIN_GROWTH, BIN_FIRST, BIN_LAST, (size_t)-1, true);
    cudaError_t error = cub_alloc(&first, 512, 0);
    if (!error) error = cub_free(first, 0);
    if (!error) error = cache->FreeAllCached();
    return failed("set up", error);
}

static int cub_close()
{
    cudaError_t error = cache->FreeAllCached();
    delete cache;
    return failed("ended", error);
}

static const char *cub_message()
{
    return cudaGetErrorString(last);
}

static allocator made()
{
    allocator a = {};
    a.name = "cub";
    a.caching = true;
    a.keeps_stream = true;
    a.open = cub_open;
    a.alloc = cub_alloc;
    a.free = cub_free;
    a.close = cub_close;
    a.message = cub_message;
    return a;
}

static const allocator cub_allocator = made();
const allocator *const allocator_cub = &cub_allocator;

#else

const allocator *const allocator_cub = nullptr;

#endif
