/* override_library.c - GALLOC_OVERRIDE_CUDA in a shared library with a heap of its own. NAME: its function. */

#define GALLOC_OVERRIDE_CUDA
#define GALLOC_IMPLEMENTATION
#include "galloc.h"

cudaError_t NAME(void);

/* Memory of either kind is got, and freed by the other function. */
cudaError_t NAME(void)
{
    void *p = NULL, *q = NULL;
    cudaError_t error = cudaMalloc(&p, 1000);
    if (!error) error = cudaMallocAsync(&q, 1000, 0);
    if (!error) error = cudaFreeAsync(p, 0);
    return error ? error : cudaFree(q);
}
