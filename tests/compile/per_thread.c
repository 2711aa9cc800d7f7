/* per_thread.c - a file compiled for per-thread default streams, in a program whose other files are not: its stream 0
   is the per-thread one, and the memory comes from the same pool. */

#ifndef CUDA_API_PER_THREAD_DEFAULT_STREAM
#error "per_thread.c: compile with -DCUDA_API_PER_THREAD_DEFAULT_STREAM"
#endif

#include "galloc.h"
#include "parts.h"

static int on_per_thread_stream(const void *ptr)
{
    galloc_pointer info;
    galloc_pool *pool = NULL;
    unsigned long long id = 0;
    return cudaStreamGetId(cudaStreamPerThread, &id) == cudaSuccess && galloc_pool_default(&pool, 0) == cudaSuccess &&
           galloc_pointer_info(ptr, &info) == cudaSuccess && info.stream_id == id && info.pool == pool;
}

int use_per_thread(void)
{
    void *p[5] = {NULL, NULL, NULL, NULL, NULL};
    galloc_pool *pool = NULL;
    galloc_request request = {0};
    cudaStream_t zero = 0;
    int bad = galloc_malloc(&p[0], 5000, 0) != cudaSuccess || !on_per_thread_stream(p[0]);
    request.bytes = 5000;
    bad |= galloc_alloc(&p[1], &request) != cudaSuccess || !on_per_thread_stream(p[1]);
    bad |= galloc_pool_default(&pool, -1) != cudaSuccess;
    bad |= galloc_pool_malloc(pool, &p[2], 5000, 0) != cudaSuccess || !on_per_thread_stream(p[2]);
    bad |= galloc_malloc(&p[3], 5000, cudaStreamLegacy) != cudaSuccess || on_per_thread_stream(p[3]);
    bad |= galloc_record_stream(p[3], 0) != cudaSuccess;
    bad |= galloc_malloc_growable(&p[4], 100, 5000, 0) != cudaSuccess || !on_per_thread_stream(p[4]);
    bad |= galloc_resize(p[0], 100, 0) != cudaSuccess || galloc_resize(p[4], 5000, 0) != cudaSuccess;
    bad |= galloc_free(p[0], 0) != cudaSuccess || !on_per_thread_stream(p[0]);
    bad |= galloc_free_after(p[1], &zero, 1) != cudaSuccess || !on_per_thread_stream(p[1]);
    bad |= galloc_free(p[2], cudaStreamPerThread) != cudaSuccess;
    bad |= galloc_free(p[3], cudaStreamLegacy) != cudaSuccess;
    bad |= galloc_free(p[4], 0) != cudaSuccess;
    bad |= galloc_stream_retire(0) != cudaSuccess;
    return bad;
}
