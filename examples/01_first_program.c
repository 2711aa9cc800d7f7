/* 01_first_program.c - takes device memory, uses it, gives it back, takes it again.

   Shows    the calls that every program needs, and how to read what a pool holds.
   Gain     the pair of calls takes a tenth of cudaMallocAsync's time, and less than a hundredth of cudaMalloc's.
   Look up  galloc_malloc, galloc_free, galloc_pool_default, galloc_pool_stats, galloc_stream_retire, galloc_shutdown */

#define GALLOC_IMPLEMENTATION
#include "galloc.h"

#include "example.h"

#define BYTES ((size_t)1 << 20)

enum { PAIRS = 1000 };

/* The comparison: the same two calls again and again. */
static void take_and_give(void *state)
{
    cudaStream_t stream = *(cudaStream_t *)state;
    void *p;
    int i;
    for (i = 0; i < PAIRS; i++) {
        CHECK(galloc_malloc(&p, BYTES, stream));
        CHECK(galloc_free(p, stream));
    }
    CHECK(cudaStreamSynchronize(stream));
}

int main(void)
{
    static unsigned char host[BYTES];
    galloc_pool *pool;
    galloc_stats stats;
    cudaStream_t stream;
    void *p, *q;
    size_t i, wrong = 0;

    example_begin("01_first_program");
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));

    CHECK(galloc_malloc(&p, BYTES, stream));     /* for work on this stream */
    CHECK(cudaMemsetAsync(p, 7, BYTES, stream)); /* work that uses the memory */
    CHECK(cudaMemcpyAsync(host, p, BYTES, cudaMemcpyDeviceToHost, stream));
    CHECK(galloc_free(p, stream)); /* no need to wait for that work */

    CHECK(galloc_malloc(&q, BYTES, stream)); /* later work on the same stream may have the memory at once */
    CHECK(cudaMemsetAsync(q, 8, BYTES, stream));
    CHECK(galloc_free(q, stream));

    CHECK(cudaStreamSynchronize(stream));
    for (i = 0; i < BYTES; i++) wrong += host[i] != 7;
    example_result(wrong == 0);
    printf("%zu bytes, given back and taken again: %s\n", BYTES, q == p ? "the same" : "others");

    CHECK(galloc_pool_default(&pool, -1));
    CHECK(galloc_pool_stats(pool, &stats));
    printf("the pool served %d requests, added memory %d time, holds %zu bytes\n", (int)stats.mallocs,
           (int)stats.grows, stats.reserved.current);
    example_result_by_default(q == p && stats.grows == 1);

    example_compare("pair", PAIRS, take_and_give, &stream);

    CHECK(galloc_stream_retire(stream)); /* before its end: what it freed becomes available to other streams */
    CHECK(cudaStreamDestroy(stream));
    return example_end(); /* calls galloc_shutdown, which gives all memory back */
}
