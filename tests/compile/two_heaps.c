/* two_heaps.c - a program of which two files have a heap of their own: one cannot free what the other has allocated,
   and is told why. With another_heap.c. */

#define GALLOC_STATIC
#define GALLOC_LOG(text) ((void)(text))
#define GALLOC_IMPLEMENTATION
#include "galloc.h"

#include <stdio.h>

#include "parts.h"
#include "sim.h"

int main(void)
{
    sim_options options = sim_defaults();
    void *ours = NULL, *theirs = NULL;
    int bad = sim_start(&options) != 0;
    bad |= galloc_malloc(&ours, 1000, 0) != cudaSuccess || another_heap_malloc(&theirs) ? 2 : 0;
    bad |= galloc_free(theirs, 0) != cudaErrorInvalidDevicePointer ? 4 : 0;
    bad |= strstr(galloc_last_message(), "with GALLOC_STATIC each file has a heap of its own") == NULL ? 8 : 0;
    bad |= galloc_free(ours, 0) != cudaSuccess || galloc_shutdown() != cudaSuccess || another_heap_end(theirs) ? 16 : 0;
    bad |= sim_findings(SIM_ANY) || sim_leaks(NULL, 0) ? 32 : 0;
    if (bad) printf("wrong: %d (%s)\n", bad, galloc_last_message());
    return bad;
}
