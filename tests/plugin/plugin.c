/* plugin.c - a library that has galloc inside, for check_plugin.sh. It compiles as C and as C++; there a static
   destructor frees what is left. */

#include <poll.h>
#include <pthread.h>

/* A thread that is about to end takes long for each lock: so the library is unloaded while galloc is at its end. */
static __thread int ending;

static int plugin_lock(pthread_mutex_t *mutex)
{
    if (ending) (void)poll(NULL, 0, 50);
    return pthread_mutex_lock(mutex);
}

#define GALLOC_STATIC
#define GALLOC_IMPLEMENTATION
#define pthread_mutex_lock plugin_lock
#include "galloc.h"

#if defined(__cplusplus)
#define SHOWN extern "C" __attribute__((visibility("default")))
#else
#define SHOWN __attribute__((visibility("default")))
#endif

SHOWN int plugin_run(void);
SHOWN int plugin_end(void);
SHOWN int plugin_linger(void);
SHOWN int plugin_keep(void **ptr);
SHOWN int plugin_free(void *ptr);

#if defined(__cplusplus)
static struct keeper {
    void *ptr;
    ~keeper() { (void)plugin_free(ptr); }
} kept;
#endif

/* Blocks of many sizes, on a stream of its own and on the thread's default stream. */
SHOWN int plugin_run(void)
{
    void *p[10];
    cudaStream_t stream;
    int i;
    if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) return 1;
    for (i = 0; i < 10; i++)
        if (galloc_malloc(&p[i], (size_t)1000 << i, i & 1 ? stream : cudaStreamPerThread) != cudaSuccess) return 2;
    for (i = 0; i < 10; i++)
        if (galloc_free(p[i], i & 1 ? stream : cudaStreamPerThread) != cudaSuccess) return 3;
#if defined(__cplusplus)
    if (!kept.ptr && galloc_malloc(&kept.ptr, 1000, cudaStreamPerThread) != cudaSuccess) return 4;
#endif
    return galloc_stream_retire(stream) || cudaStreamDestroy(stream) ? 5 : 0;
}

SHOWN int plugin_keep(void **ptr) { return galloc_malloc(ptr, 5000, cudaStreamPerThread) != cudaSuccess; }

SHOWN int plugin_free(void *ptr) { return galloc_free(ptr, cudaStreamPerThread) != cudaSuccess; }

SHOWN int plugin_linger(void) { return !(ending = 1); }

SHOWN int plugin_end(void)
{
#if defined(__cplusplus)
    if (plugin_free(kept.ptr)) return 1;
    kept.ptr = NULL;
#endif
    return galloc_shutdown() != cudaSuccess;
}
