/* override_use.c - before galloc.h is included, CUDA's functions; after that, galloc's. */

#include "override.h"

cudaError_t plain_malloc(void **ptr, size_t bytes) { return cudaMalloc(ptr, bytes); }
cudaError_t plain_malloc_async(void **ptr, size_t bytes) { return cudaMallocAsync(ptr, bytes, 0); }

#define GALLOC_OVERRIDE_CUDA
#include "galloc.h"

cudaError_t override_use_malloc(void **ptr, size_t bytes) { return cudaMalloc(ptr, bytes); }

/* Also through a pointer. */
cudaError_t override_use_free(void *ptr)
{
    cudaError_t (*release)(void *) = cudaFree;
    return release(ptr);
}
