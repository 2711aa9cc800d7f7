/* 01_first_program.c - take device memory, use it, give it back, take it again.

   Shows the few lines that every program needs, that memory given back is there for the next request, and how to read
   what a pool holds. Plain C with a memset for the only work, so it runs on a GPU and on the simulated device.

   Run       make examples, then build/examples/01_first_program-cuda (GPU) or build/examples/01_first_program
   Expected  (the address differs)
       1048576 bytes at 0x7f2c4a000000
       given back, asked for again: 1048576 bytes at 0x7f2c4a000000, the same
       the pool was asked 2 times, added memory 1 time, holds 2097152 bytes
       shut down: no error */

#define GALLOC_IMPLEMENTATION
#include "galloc.h"

#include <stdio.h>

#define BYTES ((size_t)1 << 20)

int main(void)
{
    galloc_pool *pool;
    galloc_stats stats;
    cudaStream_t stream;
    void *p, *q;
    cudaError_t error;

    error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    if (error != cudaSuccess) return printf("no device: %s\n", cudaGetErrorString(error)), 1;
    if (galloc_malloc(&p, BYTES, stream) != cudaSuccess) return 1; /* galloc has said why on stderr */
    printf("%zu bytes at %p\n", BYTES, p);
    cudaMemsetAsync(p, 0, BYTES, stream); /* work that uses the memory, on the same stream */
    galloc_free(p, stream);               /* no need to wait for that work */

    if (galloc_malloc(&q, BYTES, stream) != cudaSuccess) return 1;
    printf("given back, asked for again: %zu bytes at %p, %s\n", BYTES, q, q == p ? "the same" : "another place");
    galloc_free(q, stream);

    if (galloc_pool_default(&pool, -1) != cudaSuccess || galloc_pool_stats(pool, &stats) != cudaSuccess) return 1;
    printf("the pool was asked %d times, added memory %d time, holds %zu bytes\n", (int)stats.mallocs, (int)stats.grows,
           stats.reserved.current);

    galloc_stream_retire(stream); /* before its end: so what it freed last is known to other streams */
    cudaStreamDestroy(stream);
    error = galloc_shutdown(); /* gives all memory back; at the end of a program it may be left out */
    printf("shut down: %s\n", cudaGetErrorString(error));
    return error != cudaSuccess || q != p;
}
