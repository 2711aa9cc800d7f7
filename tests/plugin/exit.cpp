// exit.cpp [gone] - a program that frees memory when all is over: in static destructors, in functions of atexit, in a
// thread that outlives main. With `gone` the driver has shut down before.

#define GALLOC_STATIC
#define GALLOC_IMPLEMENTATION
#include "galloc.h"

#include "sim.h"
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

static long calls; // of CUDA functions, since they are counted
static int counts, gone, ended;

static void count(const char *) { calls += counts; }

static void check(cudaError_t error)
{
    if (error != cudaSuccess) _exit(3);
}

struct keeper {
    void *ptr;
    explicit keeper(size_t bytes) : ptr(NULL)
    {
        sim_options options = sim_defaults();
        if (!ended++ && sim_start(&options)) _exit(2);
        sim_hook(count, NULL);
        check(galloc_malloc(&ptr, bytes, cudaStreamPerThread));
    }
    ~keeper() { check(galloc_free(ptr, cudaStreamPerThread)); }
};

static keeper first(1000), second(3000000);

static void free_late()
{
    static void *more;
    if (!gone) check(galloc_malloc(&more, 100, cudaStreamPerThread));
    check(galloc_free(more, cudaStreamPerThread));
}

static void driver_ends()
{
    if (gone) sim_driver_exit();
}

static int told;

static void *outlive(void *)
{
    void *ptr = NULL;
    check(galloc_malloc(&ptr, 1000, cudaStreamPerThread));
    check(galloc_free(ptr, cudaStreamPerThread));
    __atomic_store_n(&told, 1, __ATOMIC_RELEASE);
    for (;;) pause();
}

static void *end_at_once(void *arg)
{
    void *ptr = NULL;
    check(galloc_malloc(&ptr, 1000, cudaStreamPerThread));
    check(galloc_free(ptr, cudaStreamPerThread));
    counts = 1;
    return arg;
}

int main(int argc, char **)
{
    pthread_t thread;
    gone = argc > 1;
    atexit(free_late);
    atexit(driver_ends);
    pthread_create(&thread, NULL, outlive, NULL);
    while (!__atomic_load_n(&told, __ATOMIC_ACQUIRE)) usleep(1000);
    pthread_create(&thread, NULL, end_at_once, NULL);
    pthread_join(thread, NULL);
    if (calls) return 4; // a thread's end calls no CUDA
    counts = 0;
    gai_unload(); // nor does what stands for the end of the code, whenever it comes
    return 0;
}
