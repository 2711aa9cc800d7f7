/* another_heap.c - the other file of two_heaps.c. */

#define GALLOC_STATIC
#define GALLOC_IMPLEMENTATION
#include "galloc.h"

#include "parts.h"

int another_heap_malloc(void **ptr) { return galloc_malloc(ptr, 1000, 0) != cudaSuccess; }

int another_heap_end(void *ptr)
{
    int bad = galloc_free(ptr, 0) != cudaSuccess;
    return bad | (galloc_shutdown() != cudaSuccess);
}
