/* work.h - work for a GPU that a test can check, and what the programs of this folder share. Include it first.

   Compiled by nvcc it launches kernels. Compiled as C++ with GALLOC_ON_SIM it asks the simulated device for the same,
   so that the programs themselves can be tried where there is no GPU. */

#ifndef WORK_H
#define WORK_H

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cuda_runtime.h>

#include "../support/test.h"

/* ---- galloc, with its log caught --------------------------------------------------------------------------------- */

static std::atomic<long> log_lines;

static void log_line(const char *text)
{
    ++log_lines;
    if (getenv("GALLOC_TEST_LOG")) fprintf(stderr, "galloc: %s\n", text);
}

#define GALLOC_LOG(text) log_line(text)
#define GALLOC_STATIC
#define GALLOC_IMPLEMENTATION
#include "../../galloc.h"

/* A line for each failure, also for one that comes again. */
__attribute__((constructor)) static void log_everything(void)
{
    gai_process.log_is_read = 1;
    gai_process.log_level = GALLOC_LOG_DEBUG;
}

#define UNUSED __attribute__((unused))
#define OK(call) EXPECT_EQ((call), cudaSuccess)

static UNUSED size_t kib(size_t n) { return n << 10; }
static UNUSED size_t mib(size_t n) { return n << 20; }

/* ---- the device -------------------------------------------------------------------------------------------------- */

/* A gate holds a stream back: what is queued after gate_close waits until gate_open. One that nobody opens gives way
   after GATE_SECONDS, and the test that forgot it fails. */
enum { GATES = 1024, GATE_SECONDS = 20 };

typedef struct gate {
    volatile uint32_t *open; /* as the host sees it */
    uint32_t *flag;          /* as the device does */
} gate;

static UNUSED int behind; /* set before work_start: the simulated device runs so many operations behind the host */

static uint32_t *gate_words, *gate_words_on_device;
static std::atomic<int> gates_used;

#ifdef GALLOC_ON_SIM

#include "sim.h"

#define DEVICE_NAME "simulated device"
#define FINDINGS_SHOWN 5

static int device_start(void)
{
    sim_options options = sim_defaults();
    options.devices = 2;
    options.memory = mib(16384);
    options.seed = test_seed();
    options.lag = behind;
    return sim_start(&options);
}

static UNUSED void device_fill(cudaStream_t stream, void *ptr, size_t bytes, uint32_t tag)
{
    sim_access access = {ptr, bytes, SIM_WRITE, tag};
    OK(sim_launch(stream, &access, 1));
}

static UNUSED void device_check(cudaStream_t stream, const void *ptr, size_t bytes, uint32_t tag)
{
    sim_access access = {ptr, bytes, SIM_READ | SIM_CHECK, tag};
    OK(sim_launch(stream, &access, 1));
}

static UNUSED void device_delay(cudaStream_t stream, unsigned us)
{
    (void)us;
    OK(sim_launch(stream, NULL, 0));
}

static UNUSED void gate_hold(cudaStream_t stream, uint32_t *flag)
{
    OK(cuStreamWaitValue32(stream, (CUdeviceptr)(uintptr_t)flag, 1, CU_STREAM_WAIT_VALUE_EQ));
}

static UNUSED unsigned long long device_wrong(void)
{
    long found = sim_findings(SIM_ANY);
    for (long i = 0; i < found && i < FINDINGS_SHOWN; i++) printf("    found: %s\n", sim_finding(i));
    if (found > FINDINGS_SHOWN) printf("    and %ld more\n", found - FINDINGS_SHOWN);
    sim_findings_clear();
    return (unsigned long long)found;
}

#else

#define DEVICE_NAME "GPU"

/* The first words that were not what they should be. */
typedef struct wrong_word {
    const void *at;
    uint32_t expected, found, tag;
} wrong_word;

static __device__ unsigned long long wrong_words;
static __device__ wrong_word first_wrong;
static __device__ unsigned int gates_given_up;

static __device__ uint32_t word_of(uint32_t tag, size_t i)
{
    uint32_t x = tag * 0x9E3779B9u ^ (uint32_t)i * 0x85EBCA6Bu ^ (uint32_t)(i >> 32);
    return (x ^ x >> 15) * 0x2C1B3C6Du;
}

static __device__ unsigned long long nanoseconds(void)
{
    unsigned long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

static __global__ void fill_words(uint32_t *p, size_t n, size_t tail, uint32_t tag)
{
    size_t first = blockIdx.x * (size_t)blockDim.x + threadIdx.x, step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = first; i < n; i += step) p[i] = word_of(tag, i);
    if (first < tail) ((unsigned char *)(p + n))[first] = (unsigned char)(word_of(tag, n) >> 8 * first);
}

static __device__ void is_wrong(const void *at, uint32_t expected, uint32_t found, uint32_t tag)
{
    if (atomicAdd(&wrong_words, 1ull) > 0) return;
    first_wrong.at = at;
    first_wrong.expected = expected;
    first_wrong.found = found;
    first_wrong.tag = tag;
}

static __global__ void check_words(const uint32_t *p, size_t n, size_t tail, uint32_t tag)
{
    size_t first = blockIdx.x * (size_t)blockDim.x + threadIdx.x, step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = first; i < n; i += step)
        if (p[i] != word_of(tag, i)) is_wrong(p + i, word_of(tag, i), p[i], tag);
    if (first < tail) {
        unsigned char expected = (unsigned char)(word_of(tag, n) >> 8 * first);
        unsigned char found = ((const unsigned char *)(p + n))[first];
        if (found != expected) is_wrong((const unsigned char *)(p + n) + first, expected, found, tag);
    }
}

static __global__ void spend(unsigned long long ns)
{
    unsigned long long begin = nanoseconds();
    while (nanoseconds() - begin < ns) continue;
}

static __global__ void hold(volatile uint32_t *flag)
{
    unsigned long long begin = nanoseconds();
    while (!*flag)
        if (nanoseconds() - begin > GATE_SECONDS * 1000000000ull) {
            atomicAdd(&gates_given_up, 1u);
            return;
        }
}

static unsigned grid_for(size_t bytes)
{
    size_t blocks = bytes / 4096 + 1;
    return blocks > 528 ? 528 : (unsigned)blocks;
}

static UNUSED void device_fill(cudaStream_t stream, void *ptr, size_t bytes, uint32_t tag)
{
    fill_words<<<grid_for(bytes), 256, 0, stream>>>((uint32_t *)ptr, bytes / 4, bytes % 4, tag);
}

static UNUSED void device_check(cudaStream_t stream, const void *ptr, size_t bytes, uint32_t tag)
{
    check_words<<<grid_for(bytes), 256, 0, stream>>>((const uint32_t *)ptr, bytes / 4, bytes % 4, tag);
}

static UNUSED void device_delay(cudaStream_t stream, unsigned us) { spend<<<1, 1, 0, stream>>>(us * 1000ull); }

static UNUSED void gate_hold(cudaStream_t stream, uint32_t *flag) { hold<<<1, 1, 0, stream>>>(flag); }

/* A kernel is loaded at its first launch, which may wait for others that run: all are launched before any test. */
static int device_start(void)
{
    int devices = 0;
    void *p = NULL;
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0); /* streams that a gate holds back must not hold back others */
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) return -1;
    for (int device = devices - 1; device >= 0; device--) {
        if (cudaSetDevice(device) != cudaSuccess || cudaMalloc(&p, 4096) != cudaSuccess) return -1;
        device_fill(NULL, p, 4096, 1);
        device_check(NULL, p, 4096, 1);
        device_delay(NULL, 1);
        if (cudaDeviceSynchronize() != cudaSuccess || cudaFree(p) != cudaSuccess) return -1;
    }
    return 0;
}

/* Words that were wrong since it was last asked, gates that gave way too. Waits for the device. */
static UNUSED unsigned long long device_wrong(void)
{
    unsigned long long wrong = 0, none = 0;
    unsigned int given_up = 0, nothing = 0;
    wrong_word first;
    OK(cudaDeviceSynchronize());
    OK(cudaMemcpyFromSymbol(&wrong, wrong_words, sizeof wrong));
    OK(cudaMemcpyFromSymbol(&first, first_wrong, sizeof first));
    OK(cudaMemcpyFromSymbol(&given_up, gates_given_up, sizeof given_up));
    OK(cudaMemcpyToSymbol(wrong_words, &none, sizeof none));
    OK(cudaMemcpyToSymbol(gates_given_up, &nothing, sizeof nothing));
    if (wrong)
        printf("    %llu words are wrong; the first at %p: %08x instead of %08x, tag %u\n", wrong, first.at,
               first.found, first.expected, first.tag);
    if (given_up) printf("    %u gates were never opened\n", given_up);
    return wrong + given_up;
}

#endif

static UNUSED gate gate_close(cudaStream_t stream)
{
    int i = gates_used++ % GATES;
    gate g = {gate_words + i, gate_words_on_device + i};
    *g.open = 0;
    gate_hold(stream, g.flag);
    return g;
}

static UNUSED void gate_open(gate g)
{
    std::atomic_thread_fence(std::memory_order_seq_cst);
    *g.open = 1;
}

/* The kernel behind a gate has to be loaded too, on each device; the first device stays the current one. */
static UNUSED int gates_make(void)
{
    unsigned flags = cudaHostAllocMapped | cudaHostAllocPortable;
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess) return -1;
    if (cudaHostAlloc((void **)&gate_words, GATES * sizeof(uint32_t), flags) != cudaSuccess) return -1;
    if (cudaHostGetDevicePointer((void **)&gate_words_on_device, gate_words, 0) != cudaSuccess) return -1;
    for (int device = devices - 1; device >= 0; device--) {
        if (cudaSetDevice(device) != cudaSuccess) return -1;
        gate_open(gate_close(NULL));
        if (cudaDeviceSynchronize() != cudaSuccess) return -1;
    }
    return 0;
}

/* What main calls first: 0, or the exit status when there is nothing to run on. */
static UNUSED int work_start(void)
{
    unsetenv("GALLOC_CONF");
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (device_start() == 0 && gates_make() == 0) return 0;
    printf("no " DEVICE_NAME ": nothing ran\n0 passed, 0 failed\n");
    return 2;
}

/* ---- small helpers ----------------------------------------------------------------------------------------------- */

static UNUSED cudaStream_t stream_new(void)
{
    cudaStream_t stream = NULL;
    OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
}

/* Work queued on `later` from now on comes after what `earlier` has been given. */
static UNUSED void order(cudaStream_t earlier, cudaStream_t later)
{
    cudaEvent_t event = NULL;
    OK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    OK(cudaEventRecord(event, earlier));
    OK(cudaStreamWaitEvent(later, event, 0));
    OK(cudaEventDestroy(event));
}

/* Has the stream work to do? Leaves no error behind. */
static UNUSED int is_busy(cudaStream_t stream)
{
    cudaError_t error = cudaStreamQuery(stream);
    if (error == cudaErrorNotReady) (void)cudaGetLastError();
    else EXPECT_EQ(error, cudaSuccess);
    return error == cudaErrorNotReady;
}

static UNUSED galloc_stats stats_of(galloc_pool *pool)
{
    galloc_stats stats;
    memset(&stats, 0, sizeof stats);
    OK(galloc_pool_stats(pool, &stats));
    return stats;
}

static UNUSED galloc_pointer info_of(const void *ptr)
{
    galloc_pointer info;
    memset(&info, 0, sizeof info);
    OK(galloc_pointer_info(ptr, &info));
    return info;
}

static UNUSED void *get(galloc_pool *pool, size_t bytes, cudaStream_t stream)
{
    void *ptr = NULL;
    OK(galloc_pool_malloc(pool, &ptr, bytes, stream));
    EXPECT(ptr != NULL);
    return ptr;
}

enum { REUSE_ALL = GALLOC_REUSE_COMPLETED | GALLOC_REUSE_FOLLOWED | GALLOC_REUSE_WAIT };

static UNUSED int overlap(const void *a, const void *b, size_t bytes)
{
    uintptr_t x = (uintptr_t)a, y = (uintptr_t)b;
    return x < y + bytes && y < x + bytes;
}

static UNUSED void expect_healthy(galloc_pool *pool)
{
    galloc_stats s = stats_of(pool);
    EXPECT_EQ(galloc_pool_check(pool), 0);
    EXPECT(s.live.current <= s.allocated.current);
    EXPECT_EQ(s.allocated.current + s.cached.current, s.reserved.current);
    EXPECT_EQ(s.quarantined, 0);
}

static UNUSED galloc_pool *pool_new(int expandable, size_t limit, int reuse)
{
    galloc_config config = galloc_config_default();
    galloc_pool *pool = NULL;
    config.expandable_segments = expandable;
    config.memory_limit = limit;
    config.reuse = reuse;
    OK(galloc_pool_create(&pool, &config));
    return pool;
}

static UNUSED void pool_end(galloc_pool *pool)
{
    expect_healthy(pool);
    OK(galloc_pool_destroy(pool));
}

/* What must hold when a test ends. */
static UNUSED void finish(void)
{
    OK(galloc_shutdown());
    OK(cudaPeekAtLastError());
    OK(cudaDeviceSynchronize());
    EXPECT_EQ(device_wrong(), 0);
}

/* ---- numbers at random, the same everywhere ---------------------------------------------------------------------- */

typedef struct dice {
    uint64_t state;
} dice;

static UNUSED uint32_t roll(dice *d)
{
    d->state = d->state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(d->state >> 33);
}

static UNUSED uint32_t roll_below(dice *d, uint32_t n) { return roll(d) % n; }

#endif
