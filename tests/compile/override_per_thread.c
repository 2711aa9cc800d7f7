/* override_per_thread.c - a file with GALLOC_OVERRIDE_CUDA compiled for per-thread default streams: its stream 0
   is the per-thread one. */

#ifndef CUDA_API_PER_THREAD_DEFAULT_STREAM
#error "override_per_thread.c: compile with -DCUDA_API_PER_THREAD_DEFAULT_STREAM"
#endif

#define GALLOC_OVERRIDE_CUDA
#include "galloc.h"

#include "override.h"

int override_use_per_thread(void)
{
    galloc_pointer info;
    unsigned long long id = 0;
    void *p = NULL;
    int bad = cudaStreamGetId(cudaStreamPerThread, &id) != cudaSuccess;
    bad |= cudaMallocAsync(&p, (size_t)1 << 22, 0) != cudaSuccess;
    bad |= galloc_pointer_info(p, &info) != cudaSuccess || info.stream_id != id;
    bad |= cudaFreeAsync(p, 0) != cudaSuccess;
    bad |= galloc_pointer_info(p, &info) != cudaSuccess || info.state == GALLOC_STATE_USED || info.stream_id != id;
    return bad;
}
