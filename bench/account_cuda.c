/* account_cuda.c - device.h's account on a GPU.

   CUDA does not say how much memory a library holds, nor what it calls. So the program is linked with --wrap for the
   few functions of the runtime by which one gets there (calls.c has that for the driver's), and what galloc believes
   to be the driver's functions are counting ones that stand before them. */

#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <pthread.h>
#include <string.h>

#include <cuda.h>

#include "device.h"
#include "map.h"

/* ---- memory ------------------------------------------------------------------------------------------------------ */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static map handle_bytes, handle_users; /* users: 1 while not released, and 1 for each mapping */
static map mapped;                     /* address -> handle */
static map blocks;                     /* of cudaMalloc and cuMemAlloc: address -> bytes */
static size_t held, peak;

static void hold(map *m, uint64_t key, size_t bytes)
{
    map_put(m, key, bytes);
    held += bytes;
    if (held > peak) peak = held;
}

/* The memory of a handle goes when it is released and mapped nowhere. */
static void drop_user(uint64_t handle)
{
    uint64_t *users = map_find(&handle_users, handle);
    if (!users || --*users) return;
    held -= (size_t)*map_find(&handle_bytes, handle);
    map_remove(&handle_users, handle);
    map_remove(&handle_bytes, handle);
}

static void note_create(uint64_t handle, size_t bytes)
{
    hold(&handle_bytes, handle, bytes);
    map_put(&handle_users, handle, 1);
}

static void note_map(uint64_t address, uint64_t handle)
{
    ++*map_find(&handle_users, handle);
    map_put(&mapped, address, handle);
}

static void note_unmap(uint64_t address, size_t bytes)
{
    for (uint64_t end = address + bytes, *handle; address < end && (handle = map_find(&mapped, address)) != NULL;) {
        uint64_t gone = *handle;
        map_remove(&mapped, address);
        address += *map_find(&handle_bytes, gone);
        drop_user(gone);
    }
}

/* What the driver really takes for a small block is not known. */
static void note_block(uint64_t address, size_t bytes)
{
    hold(&blocks, address, (bytes + 511) / 512 * 512);
}

static void note_block_gone(uint64_t address)
{
    uint64_t *bytes = address ? map_find(&blocks, address) : NULL;
    if (!bytes) return;
    held -= (size_t)*bytes;
    map_remove(&blocks, address);
}

/* ---- the driver's functions, counted ----------------------------------------------------------------------------- */

/* Name, parameters, arguments, and what is noted after a success. */
#define FUNCTIONS(X)                                                                                                   \
    X(cuMemAddressReserve, (CUdeviceptr *p, size_t n, size_t align, CUdeviceptr at, unsigned long long flags),         \
      (p, n, align, at, flags), (void)0)                                                                               \
    X(cuMemAddressFree, (CUdeviceptr p, size_t n), (p, n), (void)0)                                                    \
    X(cuMemCreate, (CUmemGenericAllocationHandle *h, size_t n, const CUmemAllocationProp *prop,                        \
                    unsigned long long flags), (h, n, prop, flags), note_create(*h, n))                                \
    X(cuMemRelease, (CUmemGenericAllocationHandle h), (h), drop_user(h))                                               \
    X(cuMemMap, (CUdeviceptr p, size_t n, size_t offset, CUmemGenericAllocationHandle h, unsigned long long flags),    \
      (p, n, offset, h, flags), note_map(p, h))                                                                        \
    X(cuMemUnmap, (CUdeviceptr p, size_t n), (p, n), note_unmap(p, n))                                                 \
    X(cuMemSetAccess, (CUdeviceptr p, size_t n, const CUmemAccessDesc *desc, size_t descs), (p, n, desc, descs),       \
      (void)0)                                                                                                         \
    X(cuMemAlloc, (CUdeviceptr *p, size_t n), (p, n), note_block(*p, n))                                               \
    X(cuMemFree, (CUdeviceptr p), (p), note_block_gone(p))                                                             \
    X(cuEventCreate, (CUevent *e, unsigned flags), (e, flags), (void)0)                                                \
    X(cuEventDestroy, (CUevent e), (e), (void)0)                                                                       \
    X(cuEventRecord, (CUevent e, CUstream s), (e, s), (void)0)                                                         \
    X(cuEventQuery, (CUevent e), (e), (void)0)                                                                         \
    X(cuEventSynchronize, (CUevent e), (e), (void)0)                                                                   \
    X(cuStreamWaitEvent, (CUstream s, CUevent e, unsigned flags), (s, e, flags), (void)0)                              \
    X(cuMemHostAlloc, (void **p, size_t n, unsigned flags), (p, n, flags), (void)0)                                    \
    X(cuMemFreeHost, (void *p), (p), (void)0)                                                                          \
    X(cuStreamSynchronize, (CUstream s), (s), (void)0)                                                                 \
    X(cuMemPoolCreate, (CUmemoryPool *m, const CUmemPoolProps *props), (m, props), (void)0)                            \
    X(cuMemPoolDestroy, (CUmemoryPool m), (m), (void)0)                                                                \
    X(cuMemPoolSetAttribute, (CUmemoryPool m, CUmemPool_attribute name, void *value), (m, name, value), (void)0)       \
    X(cuMemPoolGetAttribute, (CUmemoryPool m, CUmemPool_attribute name, void *value), (m, name, value), (void)0)       \
    X(cuMemPoolTrimTo, (CUmemoryPool m, size_t n), (m, n), (void)0)                                                    \
    X(cuMemAllocFromPoolAsync, (CUdeviceptr *p, size_t n, CUmemoryPool m, CUstream s), (p, n, m, s), (void)0)          \
    X(cuMemFreeAsync, (CUdeviceptr p, CUstream s), (p, s), (void)0)                                                    \
    X(cuMemsetD8Async, (CUdeviceptr p, unsigned char value, size_t n, CUstream s), (p, value, n, s), (void)0)          \
    X(cuMemcpyDtoHAsync, (void *to, CUdeviceptr from, size_t n, CUstream s), (to, from, n, s), (void)0)

enum {
#define NUMBER(name, parameters, arguments, note) N_##name,
    FUNCTIONS(NUMBER) N_cudaMalloc, N_cudaFree, N_FUNCTIONS
};

static uint64_t calls[N_FUNCTIONS];
static void *real[N_FUNCTIONS];

static void count(int function)
{
    __atomic_add_fetch(&calls[function], 1, __ATOMIC_RELAXED);
}

#define COUNTED(name, parameters, arguments, note)                                                                     \
    static CUresult counted_##name parameters                                                                          \
    {                                                                                                                  \
        count(N_##name);                                                                                               \
        CUresult result = ((CUresult(*) parameters)real[N_##name]) arguments;                                          \
        pthread_mutex_lock(&lock);                                                                                     \
        if (!result) note;                                                                                             \
        pthread_mutex_unlock(&lock);                                                                                   \
        return result;                                                                                                 \
    }
FUNCTIONS(COUNTED)

typedef struct counted_function {
    const char *name;
    void *stand_in;
} counted_function;

static const counted_function functions[N_FUNCTIONS] = {
#define ENTRY(name, parameters, arguments, note) {#name, (void *)counted_##name},
    FUNCTIONS(ENTRY) {"cudaMalloc", NULL}, {"cudaFree", NULL}
};

void account_stand_before(const char *symbol, void **function)
{
    for (int i = 0; i < N_FUNCTIONS; i++) {
        if (strcmp(symbol, functions[i].name) || !functions[i].stand_in || !*function) continue;
        real[i] = *function;
        *function = functions[i].stand_in;
    }
}

/* ---- the runtime's, wrapped by the linker ------------------------------------------------------------------------ */

cudaError_t __real_cudaMalloc(void **ptr, size_t bytes);
cudaError_t __wrap_cudaMalloc(void **ptr, size_t bytes);
cudaError_t __real_cudaFree(void *ptr);
cudaError_t __wrap_cudaFree(void *ptr);

cudaError_t __wrap_cudaMalloc(void **ptr, size_t bytes)
{
    count(N_cudaMalloc);
    cudaError_t error = __real_cudaMalloc(ptr, bytes);
    pthread_mutex_lock(&lock);
    if (!error) note_block((uint64_t)(uintptr_t)*ptr, bytes);
    pthread_mutex_unlock(&lock);
    return error;
}

cudaError_t __wrap_cudaFree(void *ptr)
{
    count(N_cudaFree);
    cudaError_t error = __real_cudaFree(ptr);
    pthread_mutex_lock(&lock);
    if (!error) note_block_gone((uint64_t)(uintptr_t)ptr);
    pthread_mutex_unlock(&lock);
    return error;
}

/* ---- the account ------------------------------------------------------------------------------------------------- */

void account_reset(void)
{
    memset(calls, 0, sizeof calls);
    held = peak = 0;
    map_free(&handle_bytes);
    map_free(&handle_users);
    map_free(&mapped);
    map_free(&blocks);
}

size_t account_held(void)
{
    return held;
}

size_t account_peak(void)
{
    return peak;
}

uint64_t account_calls(const char *function)
{
    for (int i = 0; i < N_FUNCTIONS; i++)
        if (!strcmp(function, functions[i].name)) return calls[i];
    return 0;
}

/* Looks are the calls whose own cost would be changed by counting them. */
int64_t account_looks(void)
{
    return -1;
}

double account_looks_us(void)
{
    return NAN;
}

double account_us(void)
{
    return NAN;
}
