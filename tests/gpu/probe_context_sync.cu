/* probe_context_sync.cu - asks the driver what galloc's rules rest on, and prints the answers. It tests nothing.

   1  While a stream is being captured: what do calls that an allocator makes return, and is the capture still good?
      For a non-blocking and a blocking stream, the three modes, from the capturing thread and from another, as they are
      and with the calling thread exchanged to relaxed mode.
   2  Which calls wait for the device, and do they end a capture?
   3  Are addresses of cuMemAlloc aligned to 2 MiB?
   4  What are the ids of the default streams, in several threads and contexts? */

#include <cuda.h>
#include <cuda_runtime.h>

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <chrono>
#include <thread>
#include <vector>

/* The driver's functions, fetched from the runtime so that nothing must be linked with it. */
#define FUNCTIONS(X)                                                                                                   \
    X(cuCtxCreate, 11000, CUresult, (CUcontext *, unsigned, CUdevice))                                                 \
    X(cuCtxDestroy, 12000, CUresult, (CUcontext))                                                                      \
    X(cuCtxGetCurrent, 12000, CUresult, (CUcontext *))                                                                 \
    X(cuCtxGetId, 12000, CUresult, (CUcontext, unsigned long long *))                                                  \
    X(cuCtxPopCurrent, 12000, CUresult, (CUcontext *))                                                                 \
    X(cuCtxPushCurrent, 12000, CUresult, (CUcontext))                                                                  \
    X(cuCtxSynchronize, 12000, CUresult, (void))                                                                       \
    X(cuEventCreate, 12000, CUresult, (CUevent *, unsigned))                                                           \
    X(cuEventDestroy, 12000, CUresult, (CUevent))                                                                      \
    X(cuEventQuery, 12000, CUresult, (CUevent))                                                                        \
    X(cuEventRecord, 12000, CUresult, (CUevent, CUstream))                                                             \
    X(cuEventSynchronize, 12000, CUresult, (CUevent))                                                                  \
    X(cuMemAddressFree, 12000, CUresult, (CUdeviceptr, size_t))                                                        \
    X(cuMemAddressReserve, 12000, CUresult, (CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long))          \
    X(cuMemAlloc, 12000, CUresult, (CUdeviceptr *, size_t))                                                            \
    X(cuMemCreate, 12000, CUresult,                                                                                    \
      (CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long))                       \
    X(cuMemFree, 12000, CUresult, (CUdeviceptr))                                                                       \
    X(cuMemFreeHost, 12000, CUresult, (void *))                                                                        \
    X(cuMemGetInfo, 12000, CUresult, (size_t *, size_t *))                                                             \
    X(cuMemHostAlloc, 12000, CUresult, (void **, size_t, unsigned))                                                    \
    X(cuMemMap, 12000, CUresult, (CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long))      \
    X(cuMemRelease, 12000, CUresult, (CUmemGenericAllocationHandle))                                                   \
    X(cuMemSetAccess, 12000, CUresult, (CUdeviceptr, size_t, const CUmemAccessDesc *, size_t))                         \
    X(cuMemUnmap, 12000, CUresult, (CUdeviceptr, size_t))                                                              \
    X(cuStreamGetCtx, 12000, CUresult, (CUstream, CUcontext *))                                                        \
    X(cuStreamGetFlags, 12000, CUresult, (CUstream, unsigned *))                                                       \
    X(cuStreamGetId, 12000, CUresult, (CUstream, unsigned long long *))                                                \
    X(cuStreamIsCapturing, 12000, CUresult, (CUstream, CUstreamCaptureStatus *))                                       \
    X(cuStreamSynchronize, 12000, CUresult, (CUstream))                                                                \
    X(cuStreamWaitEvent, 12000, CUresult, (CUstream, CUevent, unsigned))                                               \
    X(cuThreadExchangeStreamCaptureMode, 12000, CUresult, (CUstreamCaptureMode *))

#define DECLARE(name, version, type, arguments) static type(CUDAAPI *f_##name) arguments;
FUNCTIONS(DECLARE)

static void load(const char *name, unsigned version, void **slot)
{
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    cudaError_t error = cudaGetDriverEntryPointByVersion(name, slot, version, cudaEnableLegacyStream, &found);
#else
    cudaError_t error = cudaGetDriverEntryPoint(name, slot, cudaEnableLegacyStream, &found);
    (void)version;
#endif
    if (error == cudaSuccess && found == cudaDriverEntryPointSuccess && *slot) return;
    fprintf(stderr, "the driver has no %s (%d)\n", name, (int)error);
    exit(2);
}

#define LOAD(name, version, type, arguments) load(#name, version, (void **)&f_##name);

static void must(int result, const char *what)
{
    if (!result) return;
    fprintf(stderr, "%s: error %d\n", what, result);
    fflush(stdout);
    _exit(1);
}
#define MUST(call) must((int)(call), #call)

static __global__ void nothing(void) {}

static __global__ void last_for(unsigned long long ns)
{
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    while (now - begin < ns);
}

/* ---- 1: calls during a capture ----------------------------------------------------------------------------------- */

static const size_t PAGE = (size_t)2 << 20;

/* What there is before the capture begins. */
static CUstream captured, other;
static CUevent done, pending;
static CUcontext context;
static CUdeviceptr addresses;
static CUmemGenericAllocationHandle page;

static CUmemAllocationProp page_properties(void)
{
    CUmemAllocationProp properties = {};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    return properties;
}

static int context_synchronize(void) { return f_cuCtxSynchronize(); }
static int event_synchronize(void) { return f_cuEventSynchronize(done); }
static int event_query(void) { return f_cuEventQuery(done); }
static int stream_synchronize(void) { return f_cuStreamSynchronize(other); }
static int stream_wait(void) { return f_cuStreamWaitEvent(other, done, 0); }
static int event_record(void) { return f_cuEventRecord(pending, other); }
static int event_record_legacy(void) { return f_cuEventRecord(pending, CU_STREAM_LEGACY); }

static int event_create_destroy(void)
{
    CUevent event;
    int result = f_cuEventCreate(&event, CU_EVENT_DISABLE_TIMING);
    return result ? result : f_cuEventDestroy(event);
}

static int alloc_free(void)
{
    CUdeviceptr p;
    int result = f_cuMemAlloc(&p, PAGE);
    return result ? result : f_cuMemFree(p);
}

static int host_alloc_free(void)
{
    void *p;
    int result = f_cuMemHostAlloc(&p, 512, 0);
    return result ? result : f_cuMemFreeHost(p);
}

static int reserve_free(void)
{
    CUdeviceptr p;
    int result = f_cuMemAddressReserve(&p, 64 * PAGE, 0, 0, 0);
    return result ? result : f_cuMemAddressFree(p, 64 * PAGE);
}

static int create_release(void)
{
    CUmemAllocationProp properties = page_properties();
    CUmemGenericAllocationHandle handle;
    int result = f_cuMemCreate(&handle, PAGE, &properties, 0);
    return result ? result : f_cuMemRelease(handle);
}

static int map_access_unmap(void)
{
    CUmemAccessDesc access = {};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    int result = f_cuMemMap(addresses, PAGE, 0, page, 0);
    if (!result) result = f_cuMemSetAccess(addresses, PAGE, &access, 1);
    int undone = f_cuMemUnmap(addresses, PAGE);
    return result ? result : undone;
}

static int get_info(void)
{
    size_t left, total;
    return f_cuMemGetInfo(&left, &total);
}

static int push_pop(void)
{
    CUcontext popped;
    int result = f_cuCtxPushCurrent(context);
    return result ? result : f_cuCtxPopCurrent(&popped);
}

static int context_id(void)
{
    unsigned long long id;
    return f_cuCtxGetId(context, &id);
}

static int ctx_of(CUstream stream)
{
    CUcontext found;
    return f_cuStreamGetCtx(stream, &found);
}

static int flags_of(CUstream stream)
{
    unsigned flags;
    return f_cuStreamGetFlags(stream, &flags);
}

static int id_of(CUstream stream)
{
    unsigned long long id;
    return f_cuStreamGetId(stream, &id);
}

static int capturing(CUstream stream)
{
    CUstreamCaptureStatus status;
    return f_cuStreamIsCapturing(stream, &status);
}

static int ctx_of_captured(void) { return ctx_of(captured); }
static int flags_of_captured(void) { return flags_of(captured); }
static int id_of_captured(void) { return id_of(captured); }
static int captured_capturing(void) { return capturing(captured); }
static int ctx_of_legacy(void) { return ctx_of(CU_STREAM_LEGACY); }
static int flags_of_legacy(void) { return flags_of(CU_STREAM_LEGACY); }
static int id_of_legacy(void) { return id_of(CU_STREAM_LEGACY); }
static int legacy_capturing(void) { return capturing(CU_STREAM_LEGACY); }

static const struct probe {
    const char *name;
    int (*call)(void);
} probes[] = {
    {"cuCtxSynchronize", context_synchronize},
    {"cuEventSynchronize (done)", event_synchronize},
    {"cuEventQuery (done)", event_query},
    {"cuStreamSynchronize (other)", stream_synchronize},
    {"cuStreamWaitEvent (other, done)", stream_wait},
    {"cuEventRecord (other)", event_record},
    {"cuEventRecord (legacy)", event_record_legacy},
    {"cuEventCreate, Destroy", event_create_destroy},
    {"cuMemAlloc, Free", alloc_free},
    {"cuMemHostAlloc, FreeHost", host_alloc_free},
    {"cuMemAddressReserve, Free", reserve_free},
    {"cuMemCreate, Release", create_release},
    {"cuMemMap, SetAccess, Unmap", map_access_unmap},
    {"cuMemGetInfo", get_info},
    {"cuCtxPushCurrent, Pop", push_pop},
    {"cuCtxGetId", context_id},
    {"cuStreamGetCtx (captured)", ctx_of_captured},
    {"cuStreamGetFlags (captured)", flags_of_captured},
    {"cuStreamGetId (captured)", id_of_captured},
    {"cuStreamIsCapturing (captured)", captured_capturing},
    {"cuStreamGetCtx (legacy)", ctx_of_legacy},
    {"cuStreamGetFlags (legacy)", flags_of_legacy},
    {"cuStreamGetId (legacy)", id_of_legacy},
    {"cuStreamIsCapturing (legacy)", legacy_capturing},
};

static void call_in_mode(const probe *p, bool relaxed, int *result)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    MUST(cudaSetDevice(0));
    if (relaxed) MUST(f_cuThreadExchangeStreamCaptureMode(&mode));
    *result = p->call();
    if (relaxed) MUST(f_cuThreadExchangeStreamCaptureMode(&mode));
}

/* One capture with one call in it: what the call returned, and what the end of the capture did. */
static void try_call(const probe *p, unsigned flags, int mode, bool other_thread, bool relaxed)
{
    cudaGraph_t graph = NULL;
    int result = -1;
    MUST(cudaStreamCreateWithFlags(&captured, flags));
    MUST(cudaStreamBeginCapture(captured, (cudaStreamCaptureMode)mode));
    nothing<<<1, 1, 0, captured>>>();
    if (other_thread) std::thread(call_in_mode, p, relaxed, &result).join();
    else call_in_mode(p, relaxed, &result);
    int end = cudaStreamEndCapture(captured, &graph);
    (void)cudaGetLastError();
    if (graph) MUST(cudaGraphDestroy(graph));
    if (result || end) printf(" %3d/%-3d", result, end);
    else printf("    .   ");
    fflush(stdout);
    MUST(cudaDeviceSynchronize());
    MUST(cudaStreamDestroy(captured));
}

static void probe_captures(unsigned flags, const char *kind)
{
    printf("\n1. A %s stream is captured. In each field: what the call returned / what the end of the capture\n", kind);
    printf("   returned; a dot: both 0. By the capturing thread, by it in relaxed mode, by another, likewise.\n\n");
    printf("%-33s", "");
    const char *const names[] = {"global", "thread-local", "relaxed"};
    for (int mode = 0; mode < 3; mode++) printf("| %-31s ", names[mode]);
    printf("\n%-33s", "");
    for (int mode = 0; mode < 3; mode++) printf("|  same   relaxed other  relaxed  ");
    printf("\n");
    for (size_t i = 0; i < sizeof probes / sizeof probes[0]; i++) {
        printf("%-33s", probes[i].name);
        for (int mode = 0; mode < 3; mode++) {
            printf("|");
            for (int way = 0; way < 4; way++) try_call(&probes[i], flags, mode, way / 2, way % 2);
        }
        printf("\n");
    }
}

/* ---- 2: waiting -------------------------------------------------------------------------------------------------- */

static CUdeviceptr block;
static void *on_host;

static int alloc_64k(void) { return f_cuMemAlloc(&block, 64 << 10); }
static int alloc_2m(void) { return f_cuMemAlloc(&block, PAGE); }
static int alloc_20m(void) { return f_cuMemAlloc(&block, 10 * PAGE); }
static int free_block(void) { return f_cuMemFree(block); }
static int alloc_host(void) { return f_cuMemHostAlloc(&on_host, 512, 0); }
static int free_host(void) { return f_cuMemFreeHost(on_host); }
static int no_preparation(void) { return 0; }

static const struct waiter {
    const char *name;
    int (*prepare)(void), (*call)(void);
} waiters[] = {
    {"cuMemFree, 64 KiB", alloc_64k, free_block},
    {"cuMemFree, 2 MiB", alloc_2m, free_block},
    {"cuMemFree, 20 MiB", alloc_20m, free_block},
    {"cuMemFreeHost, 512 B", alloc_host, free_host},
    {"cuMemCreate, Release", no_preparation, create_release},
    {"cuMemMap, SetAccess, Unmap", no_preparation, map_access_unmap},
    {"cuCtxSynchronize", no_preparation, context_synchronize},
};

/* While a kernel of 20 ms runs on a stream that is neither captured nor the caller's: mode < 0 without a capture. */
static void try_waiting(const waiter *w, int mode)
{
    CUstreamCaptureMode relaxed = CU_STREAM_CAPTURE_MODE_RELAXED;
    cudaGraph_t graph = NULL;
    int end = 0;
    MUST(w->prepare());
    MUST(cudaStreamCreateWithFlags(&captured, cudaStreamNonBlocking));
    MUST(f_cuThreadExchangeStreamCaptureMode(&relaxed));
    last_for<<<1, 1, 0, other>>>(20000000);
    MUST(f_cuEventRecord(pending, other));
    if (mode >= 0) {
        MUST(cudaStreamBeginCapture(captured, (cudaStreamCaptureMode)mode));
        nothing<<<1, 1, 0, captured>>>();
    }
    auto begin = std::chrono::steady_clock::now();
    int result = w->call();
    double us = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
    int done = f_cuEventQuery(pending);
    if (mode >= 0) end = cudaStreamEndCapture(captured, &graph);
    (void)cudaGetLastError();
    if (graph) MUST(cudaGraphDestroy(graph));
    MUST(f_cuThreadExchangeStreamCaptureMode(&relaxed));
    printf("| %3d %8.0f us %-6s %3d ", result, us, done == 0 ? "done" : "runs", end);
    MUST(cudaDeviceSynchronize());
    MUST(cudaStreamDestroy(captured));
}

static void probe_waiting(void)
{
    printf("\n2. While a kernel of 20 ms runs on another, non-blocking stream, in relaxed mode: what the call "
           "returned,\n");
    printf("   how long it took, whether the kernel was done then, and what the end of the capture returned.\n\n");
    printf("%-33s| %-26s| %-26s| %-26s| %s\n", "", "no capture", "global", "thread-local", "relaxed");
    for (size_t i = 0; i < sizeof waiters / sizeof waiters[0]; i++) {
        printf("%-33s", waiters[i].name);
        for (int mode = -1; mode < 3; mode++) try_waiting(&waiters[i], mode);
        printf("\n");
    }
}

/* ---- 3: alignment ------------------------------------------------------------------------------------------------ */

/* `tries` blocks at once; with `mixed`, blocks of 64 KiB in between. */
static void probe_alignment(size_t bytes, bool mixed)
{
    std::vector<CUdeviceptr> blocks;
    const int tries = 200;
    int aligned = 0, total = 0;
    for (int i = 0; i < tries; i++) {
        CUdeviceptr p, small;
        if (f_cuMemAlloc(&p, bytes)) break;
        blocks.push_back(p);
        total++;
        aligned += p % PAGE == 0;
        if (mixed && !f_cuMemAlloc(&small, 64 << 10)) blocks.push_back(small);
    }
    printf("   %2zu MiB%s: %d of %d are aligned to 2 MiB\n", bytes >> 20, mixed ? ", with 64 KiB between" : "", aligned,
           total);
    for (size_t i = 0; i < blocks.size(); i++) MUST(f_cuMemFree(blocks[i]));
}

/* ---- 4: ids of the default streams ------------------------------------------------------------------------------- */

static void show_ids(const char *who)
{
    unsigned long long legacy = 0, per_thread = 0, id = 0;
    CUcontext current = NULL, of_legacy = NULL, of_per_thread = NULL;
    MUST(f_cuCtxGetCurrent(&current));
    MUST(f_cuCtxGetId(current, &id));
    int a = f_cuStreamGetId(CU_STREAM_LEGACY, &legacy), b = f_cuStreamGetId(CU_STREAM_PER_THREAD, &per_thread);
    int c = f_cuStreamGetCtx(CU_STREAM_LEGACY, &of_legacy), d = f_cuStreamGetCtx(CU_STREAM_PER_THREAD, &of_per_thread);
    printf("   %-34s context id %llu: legacy id %llu (%d), per-thread id %llu (%d)", who, id, legacy, a, per_thread, b);
    printf("; contexts right: %d %d (%d, %d)\n", of_legacy == current, of_per_thread == current, c, d);
}

static void show_ids_of_thread(const char *who)
{
    MUST(cudaSetDevice(0));
    MUST(cudaFree(NULL));
    show_ids(who);
}

static void probe_ids(void)
{
    CUcontext second;
    printf("\n4. Ids of the default streams (result in brackets)\n\n");
    show_ids("main thread");
    std::thread(show_ids_of_thread, "second thread").join();
    std::thread(show_ids_of_thread, "third thread").join();
    if (!f_cuCtxCreate(&second, 0, 0)) {
        show_ids("main thread, context of its own");
        MUST(f_cuCtxPopCurrent(&second));
        MUST(f_cuCtxDestroy(second));
    }
    show_ids("main thread again");
    int devices = 0;
    MUST(cudaGetDeviceCount(&devices));
    for (int device = 1; device < devices; device++) {
        MUST(cudaSetDevice(device));
        MUST(cudaFree(NULL));
        show_ids("main thread, another device");
    }
    MUST(cudaSetDevice(0));
    int bound = -1;
    std::thread([&bound] {
        unsigned long long id = 0;
        bound = f_cuStreamGetId(CU_STREAM_LEGACY, &id);
    }).join();
    printf("   a thread without a context: cuStreamGetId(legacy) returns %d\n", bound);
    std::thread([&bound] {
        CUcontext found = NULL;
        bound = f_cuStreamGetCtx(other, &found);
    }).join();
    printf("   a thread without a context: cuStreamGetCtx(a stream) returns %d\n", bound);
}

int main(void)
{
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) return fprintf(stderr, "no GPU\n"), 2;
    FUNCTIONS(LOAD)
    CUmemAllocationProp properties = page_properties();
    MUST(cudaSetDevice(0));
    nothing<<<1, 1>>>();
    last_for<<<1, 1>>>(1);
    MUST(cudaDeviceSynchronize());
    MUST(f_cuCtxGetCurrent(&context));
    MUST(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    MUST(f_cuEventCreate(&done, CU_EVENT_DISABLE_TIMING));
    MUST(f_cuEventCreate(&pending, CU_EVENT_DISABLE_TIMING));
    MUST(f_cuEventRecord(done, other));
    MUST(f_cuMemAddressReserve(&addresses, PAGE, 0, 0, 0));
    MUST(f_cuMemCreate(&page, PAGE, &properties, 0));
    MUST(cudaDeviceSynchronize());

    probe_captures(cudaStreamNonBlocking, "non-blocking");
    probe_captures(cudaStreamDefault, "blocking");
    probe_waiting();
    printf("\n3. Addresses of cuMemAlloc\n\n");
    const size_t sizes[] = {2, 20, 22};
    for (int i = 0; i < 6; i++) probe_alignment(sizes[i % 3] << 20, i >= 3);
    probe_ids();
    fflush(stdout);
    return 0;
}
