/* override_user.c - GALLOC_OVERRIDE_CUDA in a shared library whose heap is another's. NAME(f): its functions. */

#define GALLOC_OVERRIDE_CUDA
#include "galloc.h"

cudaError_t NAME(malloc)(void **ptr, size_t bytes);
cudaError_t NAME(free_async)(void *ptr);

cudaError_t NAME(malloc)(void **ptr, size_t bytes) { return cudaMalloc(ptr, bytes); }
cudaError_t NAME(free_async)(void *ptr) { return cudaFreeAsync(ptr, 0); }
