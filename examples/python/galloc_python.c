/* galloc_python.c - galloc as the shared library of galloc.py. `make adapters` builds it.

   Besides galloc's own functions the library has these few. They take plain numbers, so that galloc.py needs to know no
   struct of galloc.h, and each names its device: galloc takes the current device for streams 0, 1 and 2, but Python may
   free a block while another device is current. All return a cudaError_t; galloc_last_message() has the text. */

#define GALLOC_IMPLEMENTATION
#include "galloc.h"

#include <string.h>

/* conf: the settings of a new pool. NULL: the device's default pool, whose settings are those of GALLOC_CONF. */
GALLOC_API cudaError_t galloc_python_pool(galloc_pool **pool, const char *conf, int device)
{
    galloc_config config = galloc_config_default();
    cudaError_t error;
    *pool = NULL;
    if (!conf) return galloc_pool_default(pool, device);
    config.device = device;
    error = galloc_config_parse(&config, conf, NULL, 0);
    return error == cudaSuccess ? galloc_pool_create(pool, &config) : error;
}

/* An error that galloc did not find, as the thread's message and in the log, as if it had. */
static cudaError_t says(cudaError_t error, const char *what)
{
    return gai_end("galloc_python", gai_fail(error, "%s: %s", what, cudaGetErrorString(error)));
}

/* Makes the device current. *before: the device to go back to. */
static cudaError_t enter(int device, int *before)
{
    cudaError_t error = cudaGetDevice(before);
    if (error == cudaSuccess && *before != device) error = cudaSetDevice(device);
    if (error == cudaSuccess || error == cudaErrorCudartUnloading) return error;
    return says(error, "the device cannot be made current");
}

static void leave(int device, int before)
{
    if (before != device) (void)cudaSetDevice(before);
}

/* Python frees a block in any thread, and there the per-thread default stream is another one than where the block was
   allocated, whose work the free does not know. So the tag of such a block is the number of its thread. */
static uint32_t thread_of(size_t stream)
{
    return stream == (uintptr_t)cudaStreamPerThread ? (uint32_t)gai_stream_key(CU_STREAM_PER_THREAD) : 0;
}

static int is_of_another_thread(const void *ptr, size_t stream)
{
    galloc_pointer block;
    uint32_t thread = thread_of(stream);
    return thread && galloc_pointer_info(ptr, &block) == cudaSuccess && block.tag && block.tag != thread;
}

GALLOC_API cudaError_t galloc_python_malloc(galloc_pool *pool, void **ptr, size_t bytes, size_t stream, int device)
{
    int before = device;
    cudaError_t error = enter(device, &before);
    *ptr = NULL;
    if (error == cudaSuccess) {
        galloc_request request;
        memset(&request, 0, sizeof request);
        request.bytes = bytes;
        request.stream = (cudaStream_t)stream;
        request.pool = pool;
        request.tag = thread_of(stream);
        error = galloc_alloc(ptr, &request);
    }
    leave(device, before);
    return error;
}

/* Waits for all work of the device. Unlike cudaDeviceSynchronize, freeing pinned memory harms no capture. */
static cudaError_t wait_beside_captures(void)
{
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    void *fence = NULL;
    cudaError_t error = cudaThreadExchangeStreamCaptureMode(&mode);
    if (error != cudaSuccess) return error;
    error = cudaHostAlloc(&fence, 512, cudaHostAllocDefault);
    if (error == cudaSuccess) error = cudaFreeHost(fence);
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    return error;
}

/* wait: all work of the device is waited for before, as cudaFree does. */
GALLOC_API cudaError_t galloc_python_free(void *ptr, size_t stream, int device, int wait)
{
    int before = device;
    cudaError_t error = enter(device, &before);
    if (error == cudaErrorCudartUnloading) return cudaSuccess; /* the process ends, and the driver is gone */
    if (error == cudaSuccess && (wait || is_of_another_thread(ptr, stream))) {
        error = wait ? cudaDeviceSynchronize() : wait_beside_captures();
        if (error != cudaSuccess) error = says(error, "waiting for the device");
    }
    if (error == cudaSuccess) error = galloc_free(ptr, (cudaStream_t)stream);
    leave(device, before);
    return error;
}

/* device: the block's. Its default streams are meant. */
GALLOC_API cudaError_t galloc_python_record_stream(void *ptr, size_t stream, int device)
{
    int before = device;
    cudaError_t error = enter(device, &before);
    if (error == cudaSuccess) error = galloc_record_stream(ptr, (cudaStream_t)stream);
    leave(device, before);
    return error;
}

/* Bytes live, their peak, bytes held, their peak. */
GALLOC_API cudaError_t galloc_python_memory(galloc_pool *pool, size_t numbers[4])
{
    galloc_stats stats;
    cudaError_t error = galloc_pool_stats(pool, &stats);
    memset(numbers, 0, 4 * sizeof *numbers);
    if (error != cudaSuccess) return error;
    numbers[0] = stats.live.current;
    numbers[1] = stats.live.peak;
    numbers[2] = stats.reserved.current;
    numbers[3] = stats.reserved.peak;
    return cudaSuccess;
}
