/* device_cuda.cu - device.h's work on a GPU. */

#include "device.h"

#include <cuda_runtime.h>

#define BEHIND_NS 20000ull /* how long an operation lasts at least, so that the device runs behind the host */

extern "C" const char *const device_backend = "cuda";

static bool behind_host;
static __device__ unsigned long long wrong_words;

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

static __device__ void last_until(unsigned long long ns)
{
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    while (now - start < ns);
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

long device_findings(FILE *out)
{
    unsigned long long wrong = 0;
    if (cudaMemcpyFromSymbol(&wrong, wrong_words, sizeof wrong)) wrong = 1;
    if (wrong) fprintf(out, "  found: %llu words in memory were not what had been written\n", wrong);
    return (long)wrong;
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
