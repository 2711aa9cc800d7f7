/* 03_growing_vector.c - a vector on the device that grows where it stands: its address stays, nothing is copied.

   Shows galloc_malloc_growable, which keeps addresses behind a block but takes no memory for them, galloc_resize, and
   what to do for a block without room, for which galloc_resize may say no. A program with many vectors that come and go
   gives all of them the same max_bytes: each then stands where another was, whose pages it gets with no driver call.
   Plain C with memsets and copies for the only work, so it runs on a GPU and on the simulated device.

   Run       make examples, then build/examples/03_growing_vector-cuda (GPU) or build/examples/03_growing_vector
   Expected
       room for 256 MiB, holding 2 MiB
       64 chunks of 1 MiB pushed, 0 of them by copying, the same address: yes
       the pool holds 64 MiB
       a plain block between others cannot grow: operation not supported, so it moves
       shut down: no error
             and on stderr (the address differs), as for each call that fails, also one that the program expects to
       galloc: galloc_resize: the block at 0x7f2c54000000 cannot grow in place to 2097152 bytes */

#define GALLOC_IMPLEMENTATION
#include "galloc.h"

#include <stdio.h>

#define MIB ((size_t)1 << 20)

typedef struct vector {
    void *data;
    size_t bytes;
    int copies; /* times that it had to move house */
} vector;

/* Makes the vector longer: where it stands if that can be, else by a copy to another place, in stream order. */
static cudaError_t vector_grow(vector *v, size_t bytes, cudaStream_t stream)
{
    void *to;
    cudaError_t error = galloc_resize(v->data, bytes, stream);
    if (error == cudaErrorNotSupported) {
        error = galloc_malloc(&to, bytes, stream);
        if (error != cudaSuccess) return error;
        error = cudaMemcpyAsync(to, v->data, v->bytes, cudaMemcpyDeviceToDevice, stream);
        galloc_free(error == cudaSuccess ? v->data : to, stream); /* when the copy is done; no copy: all stays */
        if (error == cudaSuccess) v->data = to, v->copies++;
    }
    if (error == cudaSuccess) v->bytes = bytes;
    return error;
}

int main(void)
{
    galloc_pool *pool;
    galloc_stats stats;
    galloc_pointer info;
    cudaStream_t stream;
    vector v = {NULL, MIB, 0}, plain = {NULL, MIB, 0};
    void *start, *neighbour;
    int i, chunks = 64;
    cudaError_t error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    if (error != cudaSuccess) return printf("no device: %s\n", cudaGetErrorString(error)), 1;

    if (galloc_malloc_growable(&v.data, v.bytes, 256 * MIB, stream) != cudaSuccess) return 1; /* stderr says why */
    if (galloc_pointer_info(v.data, &info) != cudaSuccess) return 1;
    printf("room for %zu MiB, holding %zu MiB\n", info.room / MIB, info.usable / MIB);

    start = v.data;
    for (i = 0; i < chunks; i++) {
        if (vector_grow(&v, (size_t)(i + 1) * MIB, stream) != cudaSuccess) return 1;
        cudaMemsetAsync((char *)v.data + (size_t)i * MIB, i, MIB, stream); /* what is new, on the same stream */
    }
    printf("%d chunks of 1 MiB pushed, %d of them by copying, the same address: %s\n", chunks, v.copies,
           v.data == start ? "yes" : "no");
    if (galloc_pool_default(&pool, -1) != cudaSuccess || galloc_pool_stats(pool, &stats) != cudaSuccess) return 1;
    printf("the pool holds %zu MiB\n", stats.reserved.current / MIB);

    if (galloc_malloc(&plain.data, plain.bytes, stream) != cudaSuccess) return 1;
    if (galloc_malloc(&neighbour, MIB, stream) != cudaSuccess) return 1;
    if (vector_grow(&plain, 2 * MIB, stream) != cudaSuccess) return 1;
    if (plain.copies)
        printf("a plain block between others cannot grow: %s, so it moves\n",
               cudaGetErrorString(cudaErrorNotSupported));

    galloc_free(v.data, stream);
    galloc_free(plain.data, stream);
    galloc_free(neighbour, stream);
    galloc_stream_retire(stream);
    cudaStreamDestroy(stream);
    error = galloc_shutdown();
    printf("shut down: %s\n", cudaGetErrorString(error));
    return error != cudaSuccess || v.copies || plain.copies != 1;
}
