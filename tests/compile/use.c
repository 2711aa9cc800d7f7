/* use.c - a file that only calls. */

#include "galloc.h"
#include "parts.h"

static int on_legacy_stream(const void *ptr)
{
    galloc_pointer info;
    return galloc_pointer_info(ptr, &info) == cudaSuccess && info.stream_id == 0;
}

int use_from_c(void)
{
    void *p = NULL, *q = NULL;
    galloc_request request = {0};
    int bad = galloc_malloc(&p, 1000, 0) != cudaSuccess || !on_legacy_stream(p);
    request.bytes = 1000;
    bad |= galloc_alloc(&q, &request) != cudaSuccess || !on_legacy_stream(q);
    bad |= galloc_free(p, 0) != cudaSuccess;
    bad |= galloc_malloc_growable(&p, 1000, 5000, 0) != cudaSuccess || !on_legacy_stream(p);
    bad |= galloc_free(p, 0) != cudaSuccess;
    bad |= galloc_free(q, cudaStreamLegacy) != cudaSuccess;
    return bad;
}
