/* use.c - a file that only calls. */

#include "galloc.h"
#include "parts.h"

int use_from_c(void)
{
    void *p = NULL, *q = NULL;
    galloc_request request = {0};
    galloc_pointer info;
    unsigned long long legacy = 0;
    int bad = galloc_malloc(&p, 1000, 0) != cudaSuccess;
    bad |= cudaStreamGetId(cudaStreamLegacy, &legacy) != cudaSuccess;
    bad |= galloc_pointer_info(p, &info) != cudaSuccess || info.stream_id != legacy;
    request.bytes = 1000;
    bad |= galloc_alloc(&q, &request) != cudaSuccess;
    bad |= galloc_pointer_info(q, &info) != cudaSuccess || info.stream_id != legacy;
    bad |= galloc_free(p, 0) != cudaSuccess;
    bad |= galloc_free(q, cudaStreamLegacy) != cudaSuccess;
    return bad;
}
