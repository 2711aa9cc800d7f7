/* device_cuda.cu - device.h's work on a GPU. */

#include "device.h"

#include <cuda_runtime.h>

#define GIVE_UP_NS 2000000000ull
#define BEHIND_NS 20000ull /* how long an operation lasts at least, so that the device runs behind the host */

extern "C" const char *const device_backend = "cuda";

static bool behind_host;
static __device__ unsigned long long wrong_words;

/* Between the host and the kernel that is held. */
typedef struct hold_words {
    uint32_t open, sign, given_up;
} hold_words;

static volatile hold_words *hold_words_of_host;
static hold_words *hold_words_of_device;
static cudaStream_t held_stream;

/* ---- kernels ----------------------------------------------------------------------------------------------------- */

/* The i-th word of a block is a number that depends on the tag and on i, so that bytes in the wrong place are seen. */
static __device__ unsigned long long word(unsigned long long tag, size_t i)
{
    return (tag * 0x9E3779B97F4A7C15ull) ^ (i * 0xD1B54A32D192ED03ull);
}

static __device__ unsigned char byte_of(unsigned long long tag, size_t i)
{
    return (unsigned char)(word(tag, i / 8) >> (i % 8 * 8));
}

static __device__ unsigned long long nanoseconds(void)
{
    unsigned long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

static __device__ void last_until(unsigned long long ns)
{
    unsigned long long start = nanoseconds();
    while (nanoseconds() - start < ns) continue;
}

static __global__ void write_block(unsigned char *block, size_t bytes, unsigned long long tag, unsigned long long ns)
{
    unsigned long long *words = (unsigned long long *)block;
    size_t first = blockIdx.x * (size_t)blockDim.x + threadIdx.x, step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = first; i < bytes / 8; i += step) words[i] = word(tag, i);
    for (size_t i = bytes / 8 * 8 + first; i < bytes; i += step) block[i] = byte_of(tag, i);
    if (ns && first == 0) last_until(ns);
}

static __global__ void check_block(const unsigned char *block, size_t bytes, unsigned long long tag,
                                   unsigned long long ns)
{
    const unsigned long long *words = (const unsigned long long *)block;
    size_t first = blockIdx.x * (size_t)blockDim.x + threadIdx.x, step = (size_t)gridDim.x * blockDim.x;
    unsigned long long wrong = 0;
    if (ns && first == 0) last_until(ns);
    for (size_t i = first; i < bytes / 8; i += step) wrong += words[i] != word(tag, i);
    for (size_t i = bytes / 8 * 8 + first; i < bytes; i += step) wrong += block[i] != byte_of(tag, i);
    if (wrong) atomicAdd(&wrong_words, wrong);
}

static __global__ void hold_until_open(volatile hold_words *words)
{
    unsigned long long since = nanoseconds();
    for (uint32_t sign = words->sign; !words->open; __nanosleep(10000)) {
        if (words->sign != sign) since = nanoseconds();
        sign = words->sign;
        if (nanoseconds() - since < GIVE_UP_NS) continue;
        words->given_up = 1;
        return;
    }
}

static unsigned grid_for(size_t bytes)
{
    size_t blocks = (bytes / 8 + 1023) / 1024;
    return blocks < 1 ? 1 : blocks > 264 ? 264 : (unsigned)blocks;
}

/* ---- start and stop ---------------------------------------------------------------------------------------------- */

int device_start(bool behind)
{
    unsigned long long none = 0;
    cudaError_t error = cudaSetDevice(0);
    if (!error) error = cudaMemcpyToSymbol(wrong_words, &none, sizeof none);
    behind_host = behind;
    if (!error) return 0;
    fprintf(stderr, "no GPU can be used: %s\n", cudaGetErrorString(error));
    return -1;
}

void device_count(int)
{
}

void device_stop(void)
{
}

void device_describe(char *text, size_t size)
{
    cudaDeviceProp properties;
    int driver = 0;
    if (cudaGetDeviceProperties(&properties, 0) || cudaDriverGetVersion(&driver)) {
        snprintf(text, size, "no GPU that can be used");
        return;
    }
    snprintf(text, size, "%s, %zu GiB, driver for CUDA %d.%d", properties.name, properties.totalGlobalMem >> 30,
             driver / 1000, driver % 1000 / 10);
}

/* ---- work -------------------------------------------------------------------------------------------------------- */

cudaError_t device_write(cudaStream_t stream, void *ptr, size_t bytes, uint64_t tag)
{
    write_block<<<grid_for(bytes), 256, 0, stream>>>((unsigned char *)ptr, bytes, tag, behind_host ? BEHIND_NS : 0);
    return cudaGetLastError();
}

cudaError_t device_check(cudaStream_t stream, void *ptr, size_t bytes, uint64_t tag)
{
    check_block<<<grid_for(bytes), 256, 0, stream>>>((const unsigned char *)ptr, bytes, tag,
                                                     behind_host ? BEHIND_NS : 0);
    return cudaGetLastError();
}

cudaError_t device_use(cudaStream_t stream, void *ptr, size_t bytes)
{
    return device_write(stream, ptr, bytes < 512 ? bytes : 512, 0);
}

cudaError_t device_order(cudaStream_t earlier, cudaStream_t later)
{
    cudaEvent_t event;
    cudaError_t error = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    if (error) return error;
    error = cudaEventRecord(event, earlier);
    if (!error) error = cudaStreamWaitEvent(later, event, 0);
    cudaEventDestroy(event);
    return error;
}

cudaError_t device_stream_open(cudaStream_t *stream)
{
    return cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking);
}

cudaError_t device_stream_close(cudaStream_t stream)
{
    return cudaStreamDestroy(stream);
}

bool device_idle(cudaStream_t stream)
{
    if (cudaStreamQuery(stream) == cudaSuccess) return true;
    cudaGetLastError();
    return false;
}

cudaError_t device_finish(void)
{
    return cudaDeviceSynchronize();
}

static cudaError_t hold_words_make(void)
{
    void *host = NULL, *device = NULL;
    cudaError_t error;
    if (hold_words_of_host) return cudaSuccess;
    error = cudaHostAlloc(&host, sizeof(hold_words), cudaHostAllocMapped);
    if (!error) error = cudaHostGetDevicePointer(&device, host, 0);
    if (error) return error;
    hold_words_of_host = (volatile hold_words *)host;
    hold_words_of_device = (hold_words *)device;
    return cudaSuccess;
}

/* A kernel is loaded at its first launch, which may wait for others that run: so all are launched before. */
static cudaError_t launch_each_once(void)
{
    hold_words_of_host->open = 1;
    hold_words_of_host->given_up = 0;
    hold_until_open<<<1, 1, 0, held_stream>>>(hold_words_of_device);
    write_block<<<1, 1, 0, held_stream>>>(NULL, 0, 0, 0);
    check_block<<<1, 1, 0, held_stream>>>(NULL, 0, 0, 0);
    return cudaStreamSynchronize(held_stream);
}

int device_hold(void)
{
    cudaError_t error = hold_words_make();
    if (!error) error = cudaStreamCreateWithFlags(&held_stream, cudaStreamNonBlocking);
    if (!error) error = launch_each_once();
    if (!error) {
        hold_words_of_host->open = 0;
        hold_until_open<<<1, 1, 0, held_stream>>>(hold_words_of_device);
        error = cudaGetLastError();
    }
    if (!error) return 0;
    fprintf(stderr, "no work can be held: %s\n", cudaGetErrorString(error));
    return -1;
}

void device_sign(void)
{
    hold_words_of_host->sign = hold_words_of_host->sign + 1;
}

void device_let_go(void)
{
    hold_words_of_host->open = 1;
    cudaStreamSynchronize(held_stream);
    cudaStreamDestroy(held_stream);
}

long device_findings(FILE *out)
{
    unsigned long long wrong = 0;
    bool given_up = hold_words_of_host && hold_words_of_host->given_up;
    if (cudaMemcpyFromSymbol(&wrong, wrong_words, sizeof wrong)) wrong = 1;
    if (wrong) fprintf(out, "  found: %llu words in memory were not what had been written\n", wrong);
    if (given_up) fprintf(out, "  found: the host stood still for two seconds while the device was held\n");
    return (long)wrong + given_up;
}

bool device_past_of(cudaStream_t stream, void *ptr, size_t bytes, device_past *past)
{
    (void)stream, (void)ptr, (void)bytes, (void)past;
    return false;
}

long device_races(void)
{
    return -1;
}
