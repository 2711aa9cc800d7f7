/* uses_galloc.c - the smallest program with galloc, built by the CMakeLists.txt beside it. */

#include <stdio.h>

#include "galloc.h"

int main(void)
{
    cudaStream_t stream;
    void *p;
    if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) {
        printf("galloc %s: no GPU\n", GALLOC_VERSION_STRING);
        return 0;
    }
    if (galloc_malloc(&p, 1 << 20, stream) != cudaSuccess) return printf("%s\n", galloc_last_message()), 1;
    if (cudaMemsetAsync(p, 1, 1 << 20, stream) != cudaSuccess) return 1;
    if (galloc_free(p, stream) != cudaSuccess || galloc_stream_retire(stream) != cudaSuccess) return 1;
    printf("galloc %s: 1 MiB on the GPU\n", GALLOC_VERSION_STRING);
    return cudaStreamDestroy(stream) != cudaSuccess || galloc_shutdown() != cudaSuccess;
}
