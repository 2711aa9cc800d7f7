/* override.c - GALLOC_OVERRIDE_CUDA, in a file that also has the implementation; as C and as C++. The other file of the
   program, override_use.c, shares its pool; neither its plain half nor galloc itself is affected. */

#define GALLOC_OVERRIDE_CUDA
#define GALLOC_IMPLEMENTATION
#include "galloc.h"

#include "override.h"
#include "sim.h"

#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            printf("%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            failures++; \
        } \
    } while (0)

#define MIB ((size_t)1 << 20)

static int failures;

static void write_on(cudaStream_t stream, const void *p, size_t bytes)
{
    sim_access access;
    access.ptr = p;
    access.bytes = bytes;
    access.how = SIM_WRITE;
    access.tag = 1;
    CHECK(sim_launch(stream, &access, 1) == cudaSuccess);
}

static galloc_pointer info_of(const void *p)
{
    galloc_pointer info;
    CHECK(galloc_pointer_info(p, &info) == cudaSuccess);
    return info;
}

static cudaStream_t stream_new(void)
{
    cudaStream_t stream = NULL;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    return stream;
}

/* Memory that a stream has freed is not given to all streams before its work is over; cudaFree waits. */
static void streams(void)
{
    cudaStream_t a = stream_new(), b = stream_new();
    void *p = NULL, *q = NULL;
    CHECK(cudaMallocAsync(&p, 8 * MIB, 0) == cudaSuccess);
    write_on(0, p, 8 * MIB);
    CHECK(cudaFreeAsync(p, 0) == cudaSuccess);
    CHECK(sim_pending() > 0);
    CHECK(cudaMalloc(&p, 8 * MIB) == cudaSuccess);
    CHECK(sim_pending() > 0);
    write_on(a, p, 8 * MIB);
    CHECK(cudaFree(p) == cudaSuccess);
    CHECK(sim_pending() == 0);
    CHECK(cudaMalloc(&q, 8 * MIB) == cudaSuccess);
    CHECK(q == p);
    write_on(b, q, 8 * MIB);
    CHECK(cudaFreeAsync(q, b) == cudaSuccess); /* of the other kind: waits for the stream */
    CHECK(sim_stream_done(b));
    CHECK(cudaMalloc(&q, 8 * MIB) == cudaSuccess);
    CHECK(q == p);
    write_on(a, q, 8 * MIB);
    CHECK(cudaFree(q) == cudaSuccess);
    CHECK(cudaMallocAsync(&p, MIB, a) == cudaSuccess);
    write_on(a, p, MIB);
    CHECK(cudaFreeAsync(p, a) == cudaSuccess);
    CHECK(!sim_stream_done(a));
    CHECK(cudaMallocAsync(&q, MIB, a) == cudaSuccess && q == p);
    write_on(a, q, MIB);
    CHECK(cudaFree(q) == cudaSuccess);
    CHECK(cudaStreamDestroy(a) == cudaSuccess && cudaStreamDestroy(b) == cudaSuccess);
}

/* The other file: one pool for both, memory of CUDA, and a file for per-thread default streams. */
static void files(void)
{
    void *p = NULL, *foreign = NULL, *ordered = NULL;
    CHECK(cudaMalloc(&p, MIB) == cudaSuccess);
    CHECK(info_of(p).state == GALLOC_STATE_USED);
    CHECK(override_use_free(p) == cudaSuccess);
    CHECK(override_use_malloc(&p, MIB) == cudaSuccess);
    CHECK(info_of(p).pool == gai_process.override_pool[0]);
    CHECK(cudaFree(p) == cudaSuccess);
    CHECK(sim_calls("cudaMalloc") == 0 && sim_calls("cudaFree") == 0);
    CHECK(plain_malloc(&foreign, MIB) == cudaSuccess && plain_malloc_async(&ordered, MIB) == cudaSuccess);
    CHECK(info_of(foreign).state == GALLOC_STATE_FOREIGN);
    CHECK(cudaFree(foreign) == cudaSuccess && cudaFree(NULL) == cudaSuccess);
    CHECK(sim_calls("cudaFree") == 2);
    CHECK(cudaFreeAsync(ordered, 0) == cudaSuccess);
    CHECK(sim_calls("cudaFreeAsync") == 1);
}

static void devices(void)
{
    void *p = NULL, *q = NULL;
    int device = -1;
    CHECK(cudaMalloc(&p, MIB) == cudaSuccess);
    write_on(0, p, MIB);
    CHECK(cudaSetDevice(1) == cudaSuccess);
    CHECK(cudaMalloc(&q, MIB) == cudaSuccess);
    CHECK(info_of(p).device == 0 && info_of(q).device == 1);
    CHECK(cudaFree(p) == cudaSuccess);
    CHECK(sim_pending() == 0); /* it has waited for the other device */
    CHECK(cudaGetDevice(&device) == cudaSuccess && device == 1);
    CHECK(cudaFree(q) == cudaSuccess);
    CHECK(cudaSetDevice(0) == cudaSuccess);
}

/* Errors, and settings with the names of functions, which are texts and stay as they are. */
static void errors(void)
{
    galloc_config config = galloc_config_default();
    void *p = &config;
    CHECK(cudaMalloc(&p, ~(size_t)0) == cudaErrorMemoryAllocation && !p);
    CHECK(cudaMalloc(&p, MIB) == cudaSuccess && cudaFree(p) == cudaSuccess);
    CHECK(cudaFree(p) == cudaErrorInvalidDevicePointer);
    CHECK(galloc_config_parse(&config, "backend:cudaMallocAsync", NULL, 0) == cudaSuccess);
    CHECK(config.backend == GALLOC_BACKEND_CUDA_MALLOC_ASYNC);
    sim_fail("cuCtxSynchronize", 1, 0, 999);
    CHECK(cudaMalloc(&p, MIB) == cudaSuccess && cudaFree(p) == cudaErrorUnknown && cudaFree(p) == cudaSuccess);
    sim_fail_clear();
    CHECK(cudaGetLastError() == cudaSuccess);
}

int main(void)
{
    sim_options options = sim_defaults();
    options.devices = 2;
    options.pace = SIM_PACE_STILL;
    if (sim_start(&options)) return 2;
    streams();
    files();
    devices();
    errors();
    CHECK(override_use_per_thread() == 0);
    if (override_use_typed) CHECK(override_use_typed() == 0);
    sim_run(-1);
    if (sim_findings(SIM_ANY)) printf("found: %s\n", sim_finding(0));
    return failures || sim_findings(SIM_ANY);
}
