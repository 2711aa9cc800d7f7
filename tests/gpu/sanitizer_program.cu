/* sanitizer_program.cu - one mistake of a program, for compute-sanitizer to find inside galloc's memory, or none:
   tests/gpu/sanitizer.sh. Usage: sanitizer_program CASE. Prints what galloc does with the mistake's block. */

#define GALLOC_IMPLEMENTATION
#include "galloc.h"

#include <stdio.h>
#include <string.h>

#define OK(call)                                                                                                       \
    do {                                                                                                               \
        cudaError_t error_ = (call);                                                                                   \
        if (error_) printf("%s: %s\n", #call, cudaGetErrorString(error_));                                             \
    } while (0)

static __global__ void fill(unsigned char *p, size_t n)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (size_t)blockDim.x) p[i] = 1;
}

static __global__ void add(const unsigned char *p, size_t n, unsigned *sum)
{
    unsigned s = 0;
    for (size_t i = threadIdx.x; i < n; i += blockDim.x) s += p[i];
    atomicAdd(sum, s);
}

/* Writes after so many cycles. */
static __global__ void fill_late(unsigned char *p, size_t n, long long cycles)
{
    long long begin = clock64();
    while (clock64() - begin < cycles) continue;
    for (size_t i = threadIdx.x; i < n; i += blockDim.x) p[i] = 1;
}

static unsigned char *get(size_t bytes, cudaStream_t stream, uint32_t tag)
{
    galloc_request request;
    void *p = NULL;
    memset(&request, 0, sizeof request);
    request.bytes = bytes;
    request.stream = stream;
    request.tag = tag;
    OK(galloc_alloc(&p, &request));
    return (unsigned char *)p;
}

static cudaStream_t s, t;
static unsigned *sum; /* memory of cudaMalloc */

/* Blocks of many sizes, two streams, sizes that change, reuse. */
static void clean(void)
{
    void *grown = NULL;
    unsigned char *p[8];
    for (int round = 0; round < 4; round++) {
        for (int i = 0; i < 8; i++) {
            size_t bytes = (size_t)1 << (8 + 2 * i);
            p[i] = get(bytes - 3, i % 2 ? s : t, 7);
            fill<<<4, 128, 0, i % 2 ? s : t>>>(p[i], bytes - 3);
            add<<<1, 128, 0, i % 2 ? s : t>>>(p[i], bytes - 3, sum);
        }
        for (int i = 0; i < 8; i++) OK(galloc_free(p[i], i % 2 ? s : t));
    }
    OK(galloc_malloc_growable(&grown, 1000, 8 << 20, s));
    fill<<<1, 128, 0, s>>>((unsigned char *)grown, 1000);
    OK(galloc_resize(grown, 5 << 20, s));
    add<<<1, 128, 0, s>>>((unsigned char *)grown, 1000, sum);
    fill<<<4, 128, 0, s>>>((unsigned char *)grown, 5 << 20);
    OK(galloc_resize(grown, 700, s));
    add<<<1, 128, 0, s>>>((unsigned char *)grown, 700, sum);
    OK(galloc_free(grown, s));
}

/* Launches access what the graph has freed. */
static void graph(void)
{
    cudaGraph_t captured = NULL;
    cudaGraphExec_t exec = NULL;
    unsigned char *before = get(3000, s, 7), *p, *q;
    fill<<<1, 128, 0, s>>>(before, 3000);
    OK(cudaStreamSynchronize(s));
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    p = get(100000, s, 7);
    fill<<<1, 128, 0, s>>>(p, 100000);
    OK(galloc_free(p, s));
    q = get(5000, s, 7);
    fill<<<1, 128, 0, s>>>(q, 5000);
    add<<<1, 128, 0, s>>>(q, 5000, sum);
    add<<<1, 128, 0, s>>>(before, 3000, sum);
    OK(galloc_free(q, s));
    OK(cudaStreamEndCapture(s, &captured));
    OK(cudaGraphInstantiate(&exec, captured, 0));
    for (int i = 0; i < 3; i++) OK(cudaGraphLaunch(exec, s));
    OK(cudaStreamSynchronize(s));
    OK(cudaGraphExecDestroy(exec));
    OK(cudaGraphDestroy(captured));
    OK(galloc_free(before, s));
}

static void mistake(const char *name)
{
    unsigned char *p = get(1000, s, 7);
    if (!strcmp(name, "overrun")) {
        fill<<<1, 128, 0, s>>>(p, 1001);
    } else if (!strcmp(name, "use_after_free")) {
        fill<<<1, 128, 0, s>>>(p, 1000);
        OK(galloc_free(p, s));
        fill<<<1, 128, 0, s>>>(p, 1000);
        p = NULL;
    } else if (!strcmp(name, "late")) { /* no mistake: the kernel comes before the free */
        fill_late<<<1, 128, 0, s>>>(p, 1000, 300000000LL);
        OK(galloc_free(p, s));
        p = NULL;
    } else if (!strcmp(name, "shrunk")) {
        OK(galloc_resize(p, 300, s));
        fill<<<1, 128, 0, s>>>(p, 301);
    } else if (!strcmp(name, "uninitialised")) {
        fill<<<1, 128, 0, s>>>(p, 1000);
        OK(galloc_free(p, s));
        p = get(1000, s, 7);
        add<<<1, 128, 0, s>>>(p, 1000, sum);
    } else if (!strcmp(name, "leak")) {
        fill<<<1, 128, 0, s>>>(p, 1000);
        p = NULL;
    }
    if (p) OK(galloc_free(p, s));
}

int main(int argc, char **argv)
{
    const char *name = argc > 1 ? argv[1] : "clean";
    galloc_pool *pool = NULL;
    galloc_config config;
    OK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    OK(cudaStreamCreateWithFlags(&t, cudaStreamNonBlocking));
    OK(cudaMalloc((void **)&sum, sizeof *sum));
    OK(cudaMemset(sum, 0, sizeof *sum));
    OK(cudaDeviceSynchronize());
    OK(galloc_tag_name(7, "kv cache"));
    if (!strcmp(name, "clean")) clean();
    else if (!strcmp(name, "graph")) graph();
    else mistake(name);
    printf("end of the kernels: %s\n", cudaGetErrorString(cudaDeviceSynchronize()));
    OK(galloc_pool_default(&pool, 0));
    OK(galloc_pool_config(pool, &config));
    printf("segments: %s\n", config.expandable_segments ? "expandable" : "fixed");
    OK(cudaStreamDestroy(s));
    OK(cudaStreamDestroy(t));
    OK(cudaFree(sum));
    printf("galloc_shutdown: %s\n", cudaGetErrorString(galloc_shutdown()));
    printf("cudaDeviceReset: %s\n", cudaGetErrorString(cudaDeviceReset())); /* leaks are looked for here */
    return 0;
}
