/* preload_host.c [TEST] - a program of CUDA that does not know galloc, run with libgalloc_preload.so in LD_PRELOAD. It
   reaches the driver (preload_driver.c on the simulated device) as the CUDA runtime does: dlopen, dlsym,
   cuGetProcAddress, then each function by name and version. The variable WAY makes it ask dlsym for each symbol, or use
   the symbols that it is linked with.

   check_preload.sh runs each test in a process of its own: the library begins anew in each. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include "sim.h"
#include "test.h"

#define MiB ((size_t)1 << 20)
#define OK(call) EXPECT_EQ((call), CUDA_SUCCESS)

/* ---- the driver, as a program finds it --------------------------------------------------------------------------- */

/* As a static runtime has them: pointers. Name, version, flags, symbol, arguments. */
#define FUNCTIONS(X)                                                                                                   \
    X(Init, "cuInit", 2000, 0, cuInit, (unsigned))                                                                     \
    X(Alloc, "cuMemAlloc", 3020, 0, cuMemAlloc_v2, (CUdeviceptr *, size_t))                                            \
    X(Free, "cuMemFree", 3020, 0, cuMemFree_v2, (CUdeviceptr))                                                         \
    X(AllocPitch, "cuMemAllocPitch", 3020, 0, cuMemAllocPitch_v2,                                                      \
      (CUdeviceptr *, size_t *, size_t, size_t, unsigned))                                                             \
    X(AllocManaged, "cuMemAllocManaged", 6000, 0, cuMemAllocManaged, (CUdeviceptr *, size_t, unsigned))                \
    X(AllocAsync, "cuMemAllocAsync", 11020, 0, cuMemAllocAsync, (CUdeviceptr *, size_t, CUstream))                     \
    X(FreeAsync, "cuMemFreeAsync", 11020, 0, cuMemFreeAsync, (CUdeviceptr, CUstream))                                  \
    X(AllocOwn, "cuMemAllocAsync", 11020, 2, cuMemAllocAsync_ptsz, (CUdeviceptr *, size_t, CUstream))                  \
    X(FreeOwn, "cuMemFreeAsync", 11020, 2, cuMemFreeAsync_ptsz, (CUdeviceptr, CUstream))                               \
    X(AllocPool, "cuMemAllocFromPoolAsync", 11020, 0, cuMemAllocFromPoolAsync,                                         \
      (CUdeviceptr *, size_t, CUmemoryPool, CUstream))                                                                 \
    X(Info, "cuMemGetInfo", 3020, 0, cuMemGetInfo_v2, (size_t *, size_t *))                                            \
    X(Range, "cuMemGetAddressRange", 3020, 0, cuMemGetAddressRange_v2, (CUdeviceptr *, size_t *, CUdeviceptr))         \
    X(Attribute, "cuPointerGetAttribute", 4000, 0, cuPointerGetAttribute, (void *, int, CUdeviceptr))                  \
    X(Attributes, "cuPointerGetAttributes", 7000, 0, cuPointerGetAttributes,                                           \
      (unsigned, const int *, void **, CUdeviceptr))                                                                   \
    X(IpcHandle, "cuIpcGetMemHandle", 4010, 0, cuIpcGetMemHandle, (void *, CUdeviceptr))                               \
    X(DefaultPool, "cuDeviceGetDefaultMemPool", 11020, 0, cuDeviceGetDefaultMemPool, (CUmemoryPool *, CUdevice))       \
    X(SetPool, "cuDeviceSetMemPool", 11020, 0, cuDeviceSetMemPool, (CUdevice, CUmemoryPool))                           \
    X(PoolCreate, "cuMemPoolCreate", 11020, 0, cuMemPoolCreate, (CUmemoryPool *, const CUmemPoolProps *))              \
    X(PoolGet, "cuMemPoolGetAttribute", 11020, 0, cuMemPoolGetAttribute, (CUmemoryPool, CUmemPool_attribute, void *))  \
    X(PoolSet, "cuMemPoolSetAttribute", 11020, 0, cuMemPoolSetAttribute, (CUmemoryPool, CUmemPool_attribute, void *))  \
    X(PoolTrim, "cuMemPoolTrimTo", 11020, 0, cuMemPoolTrimTo, (CUmemoryPool, size_t))                                  \
    X(PoolAccess, "cuMemPoolSetAccess", 11020, 0, cuMemPoolSetAccess, (CUmemoryPool, const CUmemAccessDesc *, size_t)) \
    X(Peer, "cuCtxEnablePeerAccess", 4000, 0, cuCtxEnablePeerAccess, (CUcontext, unsigned))                            \
    X(CreatePage, "cuMemCreate", 10020, 0, cuMemCreate,                                                                \
      (CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long))                       \
    X(ReleasePage, "cuMemRelease", 10020, 0, cuMemRelease, (CUmemGenericAllocationHandle))                             \
    X(Retain, "cuDevicePrimaryCtxRetain", 7000, 0, cuDevicePrimaryCtxRetain, (CUcontext *, CUdevice))                  \
    X(Reset, "cuDevicePrimaryCtxReset", 11000, 0, cuDevicePrimaryCtxReset_v2, (CUdevice))                              \
    X(CtxCreate, "cuCtxCreate", 3020, 0, cuCtxCreate_v2, (CUcontext *, unsigned, CUdevice))                            \
    X(CtxDestroy, "cuCtxDestroy", 4000, 0, cuCtxDestroy_v2, (CUcontext))                                               \
    X(CtxSet, "cuCtxSetCurrent", 4000, 0, cuCtxSetCurrent, (CUcontext))                                                \
    X(CtxWait, "cuCtxSynchronize", 2000, 0, cuCtxSynchronize, (void))                                                  \
    X(StreamCreate, "cuStreamCreate", 2000, 0, cuStreamCreate, (CUstream *, unsigned))                                 \
    X(StreamCreateAt, "cuStreamCreateWithPriority", 5050, 0, cuStreamCreateWithPriority, (CUstream *, unsigned, int))  \
    X(StreamDestroy, "cuStreamDestroy", 4000, 0, cuStreamDestroy_v2, (CUstream))                                       \
    X(Begin, "cuStreamBeginCapture", 10010, 0, cuStreamBeginCapture_v2, (CUstream, CUstreamCaptureMode))               \
    X(End, "cuStreamEndCapture", 10000, 0, cuStreamEndCapture, (CUstream, CUgraph *))                                  \
    X(Mode, "cuThreadExchangeStreamCaptureMode", 10010, 0, cuThreadExchangeStreamCaptureMode, (CUstreamCaptureMode *)) \
    X(GraphDestroy, "cuGraphDestroy", 10000, 0, cuGraphDestroy, (CUgraph))                                             \
    X(Copy, "cuMemcpy", 4000, 0, cuMemcpy, (CUdeviceptr, CUdeviceptr, size_t))                                         \
    X(CopyOwn, "cuMemcpy", 7000, 2, cuMemcpy_ptds, (CUdeviceptr, CUdeviceptr, size_t))                                 \
    X(CopyTo, "cuMemcpyHtoD", 3020, 0, cuMemcpyHtoD_v2, (CUdeviceptr, const void *, size_t))                           \
    X(CopyToOwn, "cuMemcpyHtoD", 7000, 2, cuMemcpyHtoD_v2_ptds, (CUdeviceptr, const void *, size_t))                   \
    X(CopyFrom, "cuMemcpyDtoH", 3020, 0, cuMemcpyDtoH_v2, (void *, CUdeviceptr, size_t))                               \
    X(CopyFromOwn, "cuMemcpyDtoH", 7000, 2, cuMemcpyDtoH_v2_ptds, (void *, CUdeviceptr, size_t))                       \
    X(CopyDevice, "cuMemcpyDtoD", 3020, 0, cuMemcpyDtoD_v2, (CUdeviceptr, CUdeviceptr, size_t))                        \
    X(CopyDeviceOwn, "cuMemcpyDtoD", 7000, 2, cuMemcpyDtoD_v2_ptds, (CUdeviceptr, CUdeviceptr, size_t))                \
    X(Copy2D, "cuMemcpy2D", 3020, 0, cuMemcpy2D_v2, (const CUDA_MEMCPY2D *))                                           \
    X(Copy2DOwn, "cuMemcpy2D", 7000, 2, cuMemcpy2D_v2_ptds, (const CUDA_MEMCPY2D *))                                   \
    X(CopyRows, "cuMemcpy2DUnaligned", 3020, 0, cuMemcpy2DUnaligned_v2, (const CUDA_MEMCPY2D *))                       \
    X(CopyRowsOwn, "cuMemcpy2DUnaligned", 7000, 2, cuMemcpy2DUnaligned_v2_ptds, (const CUDA_MEMCPY2D *))               \
    X(Copy3D, "cuMemcpy3D", 3020, 0, cuMemcpy3D_v2, (const CUDA_MEMCPY3D *))                                           \
    X(Copy3DOwn, "cuMemcpy3D", 7000, 2, cuMemcpy3D_v2_ptds, (const CUDA_MEMCPY3D *))                                   \
    X(Queue, "cuMemcpyAsync", 4000, 0, cuMemcpyAsync, (CUdeviceptr, CUdeviceptr, size_t, CUstream))                    \
    X(QueueOwn, "cuMemcpyAsync", 7000, 2, cuMemcpyAsync_ptsz, (CUdeviceptr, CUdeviceptr, size_t, CUstream))            \
    X(QueueTo, "cuMemcpyHtoDAsync", 3020, 0, cuMemcpyHtoDAsync_v2, (CUdeviceptr, const void *, size_t, CUstream))      \
    X(QueueToOwn, "cuMemcpyHtoDAsync", 7000, 2, cuMemcpyHtoDAsync_v2_ptsz,                                             \
      (CUdeviceptr, const void *, size_t, CUstream))                                                                   \
    X(QueueFrom, "cuMemcpyDtoHAsync", 3020, 0, cuMemcpyDtoHAsync_v2, (void *, CUdeviceptr, size_t, CUstream))          \
    X(QueueFromOwn, "cuMemcpyDtoHAsync", 7000, 2, cuMemcpyDtoHAsync_v2_ptsz, (void *, CUdeviceptr, size_t, CUstream))  \
    X(QueueDevice, "cuMemcpyDtoDAsync", 3020, 0, cuMemcpyDtoDAsync_v2, (CUdeviceptr, CUdeviceptr, size_t, CUstream))   \
    X(QueueDeviceOwn, "cuMemcpyDtoDAsync", 7000, 2, cuMemcpyDtoDAsync_v2_ptsz,                                         \
      (CUdeviceptr, CUdeviceptr, size_t, CUstream))                                                                    \
    X(Queue2D, "cuMemcpy2DAsync", 3020, 0, cuMemcpy2DAsync_v2, (const CUDA_MEMCPY2D *, CUstream))                      \
    X(Queue2DOwn, "cuMemcpy2DAsync", 7000, 2, cuMemcpy2DAsync_v2_ptsz, (const CUDA_MEMCPY2D *, CUstream))              \
    X(Queue3D, "cuMemcpy3DAsync", 3020, 0, cuMemcpy3DAsync_v2, (const CUDA_MEMCPY3D *, CUstream))                      \
    X(Queue3DOwn, "cuMemcpy3DAsync", 7000, 2, cuMemcpy3DAsync_v2_ptsz, (const CUDA_MEMCPY3D *, CUstream))

void preload_after_wait(void (*call)(void)); /* preload_driver.c: called when a wait for a context has ended */

typedef CUresult CUDAAPI look_up_2(const char *, void **, int, cuuint64_t, int *);

#define DECLARE(id, name, version, flags, symbol, arguments) \
    extern CUresult CUDAAPI linked_##id arguments __asm__(#symbol);
FUNCTIONS(DECLARE)
#define POINTER(id, name, version, flags, symbol, arguments) CUresult(CUDAAPI *id) arguments;
static struct {
    FUNCTIONS(POINTER)
} cu;

static void *driver;

static void *look_up(const char *name, int version, int flags)
{
    look_up_2 *ask = NULL;
    void *found = dlsym(driver, "cuGetProcAddress_v2");
    memcpy(&ask, &found, sizeof ask);
    found = NULL;
    if (ask("cuGetProcAddress", &found, 12000, 0, NULL)) return NULL; /* and it by itself, as the runtime does */
    memcpy(&ask, &found, sizeof ask);
    found = NULL;
    return ask(name, &found, version, (cuuint64_t)flags, NULL) ? NULL : found;
}

static void find_functions(void)
{
    const char *way = getenv("WAY");
    void *found;
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver) puts(dlerror()), exit(2);
#define BY_LOOK_UP(id, name, version, flags, symbol, arguments) \
    found = look_up(name, version, flags), memcpy(&cu.id, &found, sizeof found);
#define BY_SYMBOL(id, name, version, flags, symbol, arguments) \
    found = dlsym(driver, #symbol), memcpy(&cu.id, &found, sizeof found);
#define BY_LINK(id, name, version, flags, symbol, arguments) cu.id = linked_##id;
    if (way && !strcmp(way, "dlsym")) {
        FUNCTIONS(BY_SYMBOL)
    } else if (way && !strcmp(way, "linked")) {
        FUNCTIONS(BY_LINK)
    } else {
        FUNCTIONS(BY_LOOK_UP)
    }
}

static CUcontext primary[8];

/* A device, and its primary context current. */
static sim_options options_of(int devices)
{
    sim_options options = sim_defaults();
    options.devices = devices;
    options.memory = 1024 * MiB;
    options.pace = SIM_PACE_STILL;
    return options;
}

static void begin_with(const sim_options *options)
{
    int i;
    EXPECT_EQ(sim_start(options), 0);
    find_functions();
    OK(cu.Init(0));
    for (i = 0; i < options->devices; i++) OK(cu.Retain(&primary[i], i));
    OK(cu.CtxSet(primary[0]));
}

static void begin(int devices)
{
    sim_options options = options_of(devices);
    begin_with(&options);
}

static void finish(void)
{
    long i;
    sim_run(-1);
    for (i = 0; sim_finding(i); i++) printf("    found: %s\n", sim_finding(i));
    EXPECT_EQ(sim_findings(SIM_ANY), 0);
}

static CUstream stream_new(void)
{
    CUstream stream = NULL;
    OK(cu.StreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    return stream;
}

static void write_tag(CUstream stream, CUdeviceptr p, size_t bytes, uint64_t tag)
{
    sim_access access = {(const void *)(uintptr_t)p, bytes, SIM_WRITE, tag};
    EXPECT_EQ(sim_launch(stream, &access, 1), cudaSuccess);
}

static void write_on(CUstream stream, CUdeviceptr p, size_t bytes)
{
    write_tag(stream, p, bytes, 7);
}

static void check_tag(CUstream stream, CUdeviceptr p, size_t bytes, uint64_t tag)
{
    sim_access access = {(const void *)(uintptr_t)p, bytes, SIM_READ | SIM_CHECK, tag};
    EXPECT_EQ(sim_launch(stream, &access, 1), cudaSuccess);
}

static CUdeviceptr alloc(size_t bytes)
{
    CUdeviceptr p = 0;
    OK(cu.Alloc(&p, bytes));
    EXPECT(p);
    return p;
}

static CUdeviceptr alloc_async(size_t bytes, CUstream stream)
{
    CUdeviceptr p = 0;
    OK(cu.AllocAsync(&p, bytes, stream));
    EXPECT(p);
    return p;
}

/* Allocations that the driver itself has served. */
static long by_driver(void)
{
    return sim_calls("cuMemAlloc") + sim_calls("cuMemAllocAsync") + sim_calls("cuMemAllocFromPoolAsync");
}

/* What the library writes to stderr while a function runs. */
static char said[4096];
static void listen_to(void (*call)(void))
{
    FILE *file = tmpfile();
    int before = dup(2);
    size_t n;
    fflush(stderr);
    dup2(fileno(file), 2);
    call();
    fflush(stderr);
    dup2(before, 2);
    rewind(file);
    n = fread(said, 1, sizeof said - 1, file);
    said[n] = 0;
    fclose(file);
    close(before);
}

static int lines_said(void)
{
    int n = 0;
    const char *c;
    for (c = said; *c; c++) n += *c == '\n';
    return n;
}

/* ---- finding the driver ------------------------------------------------------------------------------------------ */

TEST(serves_alloc_and_free)
{
    CUdeviceptr p;
    begin(1);
    p = alloc(3 * MiB);
    EXPECT_EQ(by_driver(), 0);
    EXPECT(sim_calls("cuMemCreate") > 0);
    write_on(CU_STREAM_LEGACY, p, 3 * MiB);
    OK(cu.Free(p));
    EXPECT_EQ(sim_calls("cuMemFree"), 0);
    EXPECT_EQ(alloc(3 * MiB), p);
    finish();
}

TEST(serves_stream_ordered_memory)
{
    CUstream stream;
    CUdeviceptr p, q = 0;
    begin(1);
    stream = stream_new();
    p = alloc_async(3 * MiB, stream);
    write_on(stream, p, 3 * MiB);
    OK(cu.FreeAsync(p, stream));
    EXPECT(!sim_stream_done(stream)); /* nothing has waited */
    OK(cu.AllocPool(&q, 3 * MiB, NULL, stream) == CUDA_ERROR_INVALID_VALUE ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN);
    EXPECT_EQ(alloc_async(3 * MiB, stream), p);
    write_on(stream, p, 3 * MiB);
    OK(cu.FreeAsync(p, stream));
    OK(cu.StreamDestroy(stream));
    EXPECT_EQ(by_driver(), 1); /* the call with no pool */
    finish();
}

TEST(forms_of_a_function)
{
    look_up_2 *ask = NULL;
    CUresult(CUDAAPI * ask_1)(const char *, void **, int, cuuint64_t) = NULL;
    void *found, *old, *ours, *newer = NULL;
    begin(1);
    found = dlsym(driver, "cuGetProcAddress_v2");
    memcpy(&ask, &found, sizeof ask);
    ours = look_up("cuMemGetInfo", 12000, 0);
    EXPECT(ours == dlsym(driver, "cuMemGetInfo_v2"));
    /* A form that is newer than the library keeps its own function. */
    OK(ask("cuMemGetInfo", &newer, 99000, 0, NULL));
    EXPECT(newer && newer != ours);
    EXPECT(look_up("cuMemAllocAsync", 12000, 1) == dlsym(driver, "cuMemAllocAsync"));
    EXPECT(look_up("cuMemAllocAsync", 12000, 2) == dlsym(driver, "cuMemAllocAsync_ptsz"));
    EXPECT(look_up("cuMemAllocAsync", 12000, 1) != look_up("cuMemAllocAsync", 12000, 2));
    /* The form with four arguments, too, gives substitutes. */
    old = look_up("cuGetProcAddress", 11030, 0);
    EXPECT(old == dlsym(driver, "cuGetProcAddress"));
    memcpy(&ask_1, &old, sizeof ask_1);
    found = NULL;
    OK(ask_1("cuMemGetInfo", &found, 12000, 0));
    EXPECT(found == ours);
    EXPECT_EQ(ask_1("cuNoSuchFunction", &found, 12000, 0), CUDA_ERROR_NOT_FOUND);
    EXPECT(dlsym(driver, "cuInit") == look_up("cuInit", 12000, 0));
    finish();
}

/* preload_next.c is in LD_PRELOAD twice, under two names. The first asks for the next one. */
TEST(dlsym_knows_who_calls)
{
    int (*depth)(void) = NULL;
    void *found;
    begin(1);
    found = dlsym(RTLD_DEFAULT, "galloc_test_next");
    EXPECT(found);
    memcpy(&depth, &found, sizeof depth);
    EXPECT_EQ(depth(), 2);
    EXPECT(!dlsym(RTLD_DEFAULT, "cuNoSuchFunction"));
    EXPECT(strstr(dlerror(), "cuNoSuchFunction"));
    EXPECT(!dlsym(RTLD_DEFAULT, "cuArrayCreate_v2")); /* this driver lacks it, though the library has a substitute */
}

/* ---- cudaMalloc's promises --------------------------------------------------------------------------------------- */

/* What a busy stream has freed is not memory for all streams; nor is it waited for. */
TEST(memory_for_every_stream)
{
    CUstream busy, other;
    CUdeviceptr p, q;
    long waits;
    begin(1);
    busy = stream_new();
    other = stream_new();
    p = alloc_async(64 * MiB, busy);
    write_on(busy, p, 64 * MiB);
    OK(cu.FreeAsync(p, busy));
    waits = sim_blocking_calls();
    q = alloc(64 * MiB);
    EXPECT_EQ(sim_blocking_calls(), waits);
    EXPECT(!sim_stream_done(busy));
    write_on(other, q, 64 * MiB);
    sim_run(-1);
    OK(cu.Free(q));
    q = alloc(64 * MiB);
    write_on(other, q, 32 * MiB);
    write_on(busy, q + 32 * MiB, 32 * MiB);
    write_on(CU_STREAM_LEGACY, q, 1); /* unordered with `other`: the device must object */
    sim_run(-1);
    EXPECT_EQ(sim_findings(SIM_RACE), 1);
    sim_findings_clear();
    finish();
}

/* Memory that busy streams have freed is taken once they are done, without a wait and without growth. */
TEST(memory_of_streams_that_are_done)
{
    CUstream a, b, other;
    CUdeviceptr p, q;
    size_t held;
    begin(1);
    a = stream_new();
    b = stream_new();
    other = stream_new();
    p = alloc_async(64 * MiB, a);
    q = alloc_async(64 * MiB, b);
    write_on(a, p, 64 * MiB);
    write_on(b, q, 64 * MiB);
    OK(cu.FreeAsync(p, a));
    OK(cu.FreeAsync(q, b));
    held = sim_physical(0);
    sim_run(-1);
    p = alloc(64 * MiB);
    q = alloc(64 * MiB);
    EXPECT(sim_physical(0) <= held + 4 * MiB);
    write_on(other, p, 64 * MiB);
    write_on(other, q, 64 * MiB);
    finish();
}

/* The driver's pool orders memory by the quiet stream alone: the library must wait for that stream. */
TEST(memory_of_another_backend)
{
    CUstream other, busy;
    CUdeviceptr p;
    int i;
    setenv("GALLOC_CONF", "backend:cudaMallocAsync", 1);
    begin(1);
    other = stream_new();
    busy = stream_new();
    for (i = 0; i < 8; i++) {
        p = alloc(8 * MiB);
        write_on(other, p, 8 * MiB);
        OK(cu.FreeAsync(p, other));
        p = alloc_async(8 * MiB, busy);
        write_on(busy, p, 8 * MiB);
        OK(cu.FreeAsync(p, busy));
    }
    finish();
}

/* An earlier kernel's error comes to light while cuMemAlloc waits. The block that it took cannot be freed then, and is
   after the reset. */
TEST(an_error_that_ends_the_context_during_an_allocation)
{
    CUdeviceptr p;
    size_t held;
    begin(1);
    OK(cu.Free(alloc(MiB)));
    p = alloc(100 * MiB);
    OK(cu.Free(p));
    held = sim_physical(0);
    sim_fail("cuStreamQuery", 1, 0, CUDA_ERROR_ILLEGAL_ADDRESS);
    EXPECT_EQ(cu.Alloc(&p, 100 * MiB), CUDA_ERROR_ILLEGAL_ADDRESS);
    sim_fail_clear();
    OK(cu.Reset(0));
    OK(cu.CtxSet(primary[0]));
    OK(cu.Free(alloc(100 * MiB)));
    EXPECT(sim_physical(0) <= held + 4 * MiB);
    finish();
}

static pthread_barrier_t together;

static void *allocate_together(void *none)
{
    CUdeviceptr p;
    OK(cu.CtxSet(primary[0]));
    pthread_barrier_wait(&together);
    EXPECT_EQ(cu.Alloc(&p, 50 * MiB), CUDA_ERROR_ILLEGAL_ADDRESS);
    return none;
}

/* The error meets several threads, each of which has taken a block. */
TEST(an_error_that_ends_the_context_during_several_allocations)
{
    enum { THREADS = 8 };
    CUdeviceptr p[THREADS];
    pthread_t thread[THREADS];
    size_t held;
    int i;
    begin(1);
    for (i = 0; i < THREADS; i++) p[i] = alloc(50 * MiB);
    for (i = 0; i < THREADS; i++) OK(cu.Free(p[i]));
    held = sim_physical(0);
    OK(pthread_barrier_init(&together, NULL, THREADS));
    sim_fail("cuStreamQuery", 1, 0, CUDA_ERROR_ILLEGAL_ADDRESS);
    for (i = 0; i < THREADS; i++) OK(pthread_create(&thread[i], NULL, allocate_together, NULL));
    for (i = 0; i < THREADS; i++) OK(pthread_join(thread[i], NULL));
    OK(pthread_barrier_destroy(&together));
    sim_fail_clear();
    OK(cu.Reset(0));
    OK(cu.CtxSet(primary[0]));
    for (i = 0; i < THREADS; i++) p[i] = alloc(50 * MiB);
    for (i = 0; i < THREADS; i++) OK(cu.Free(p[i]));
    EXPECT(sim_physical(0) <= held + 4 * MiB);
    finish();
}

/* What the driver queues for new memory on the library's own stream is over when cuMemAlloc returns. That stream gets
   the handle of one that was destroyed, so that work can be queued there. */
TEST(new_memory_is_settled)
{
    CUstream stream;
    CUdeviceptr p;
    begin(1);
    stream = stream_new();
    OK(cu.StreamDestroy(stream));
    p = alloc(3 * MiB);
    write_on(stream, p, 3 * MiB);
    EXPECT(!sim_stream_done(stream));
    (void)alloc(3 * MiB);
    EXPECT(sim_stream_done(stream));
    finish();
}

TEST(memory_that_does_not_settle)
{
    CUdeviceptr p, q = 0;
    begin(1);
    p = alloc(3 * MiB);
    OK(cu.Free(p));
    sim_fail("cuStreamQuery", 1, 0, CUDA_ERROR_UNKNOWN);
    EXPECT_EQ(cu.Alloc(&q, 3 * MiB), CUDA_ERROR_UNKNOWN);
    EXPECT_EQ(sim_failed(), 1);
    sim_fail_clear();
    EXPECT_EQ(alloc(3 * MiB), p); /* nothing is lost */
    finish();
}

/* As that of cudaMalloc. */
TEST(memory_for_network_cards)
{
    begin(1);
    (void)alloc(3 * MiB);
    EXPECT_EQ(sim_rdma(0), sim_physical(0));
    finish();
}

TEST(plain_free_waits)
{
    CUstream stream;
    CUdeviceptr p;
    begin(1);
    stream = stream_new();
    p = alloc(3 * MiB);
    write_on(stream, p, 3 * MiB);
    EXPECT(!sim_stream_done(stream));
    OK(cu.Free(p));
    EXPECT(sim_stream_done(stream));
    EXPECT_EQ(sim_calls("cuMemHostAlloc"), 0); /* the dear way of waiting is for programs that capture */
    finish();
}

TEST(free_on_request_does_not_wait)
{
    CUstream stream, blocking, other;
    CUdeviceptr p, q;
    size_t held;
    setenv("GALLOC_PRELOAD_FREE", "async", 1); /* read when the library was loaded: check_preload.sh sets it */
    begin(1);
    OK(cu.StreamCreateAt(&stream, CU_STREAM_NON_BLOCKING, 0));
    OK(cu.StreamCreate(&blocking, 0));
    other = stream_new();
    p = alloc(64 * MiB);
    write_on(blocking, p, 64 * MiB);
    OK(cu.CtxWait());
    write_on(stream, p, 32 * MiB);
    write_on(blocking, p + 32 * MiB, 32 * MiB);
    OK(cu.Free(p));
    EXPECT(!sim_stream_done(stream));
    EXPECT(!sim_stream_done(blocking));
    q = alloc(64 * MiB); /* not the same memory: its work is not done */
    write_on(other, q, 64 * MiB);
    held = sim_physical(0);
    sim_run(-1);
    p = alloc(64 * MiB);
    EXPECT_EQ(sim_physical(0), held);
    write_on(other, p, 64 * MiB);
    OK(cu.StreamDestroy(stream));
    OK(cu.Free(p));
    OK(cu.Free(q));
    finish();
}

/* Blocks that a blocking stream each uses, which nothing but the calls for memory orders. */
TEST(free_on_request_orders_blocking_streams)
{
    CUstream stream[2];
    int i;
    sim_options options = options_of(1);
    options.pace = SIM_PACE_RANDOM;
    setenv("GALLOC_PRELOAD_FREE", "async", 1);
    begin_with(&options);
    for (i = 0; i < 2; i++) OK(cu.StreamCreate(&stream[i], 0));
    for (i = 0; i < 200; i++) {
        CUdeviceptr p = 0;
        if (i % 4 < 2) p = alloc(3 * MiB);
        else OK(cu.AllocAsync(&p, 3 * MiB, stream[i & 1]));
        write_on(stream[i & 1], p, 3 * MiB);
        OK(cu.Free(p));
    }
    finish();
}

TEST(the_legacy_stream_orders_blocking_streams)
{
    CUstream a, b;
    int i;
    begin(1);
    OK(cu.StreamCreate(&a, 0));
    OK(cu.StreamCreate(&b, 0));
    for (i = 0; i < 20; i++) {
        CUdeviceptr p = 0, q = 0;
        OK(cu.AllocAsync(&p, 3 * MiB, NULL)); /* after the work of b */
        write_on(a, p, 3 * MiB);
        OK(cu.FreeAsync(p, NULL)); /* after that of a */
        OK(cu.AllocAsync(&q, 3 * MiB, i % 2 ? b : NULL));
        write_on(b, q, 3 * MiB);
        OK(cu.FreeAsync(q, i % 2 ? b : NULL));
    }
    finish();
}

/* The work of a stream goes on when the stream is destroyed. The free after it waits: nothing else knows that work. */
TEST(free_on_request_after_a_stream_was_destroyed)
{
    CUstream other, stream;
    CUdeviceptr p, q;
    CUevent event = NULL;
    unsigned flags;
    begin(1);
    OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    other = stream_new();
    for (flags = 0; flags <= CU_STREAM_NON_BLOCKING; flags++) {
        p = alloc(3 * MiB);
        q = alloc(3 * MiB);
        OK(cu.StreamCreate(&stream, flags));
        write_on(stream, p, 3 * MiB);
        OK(cuEventRecord(event, stream));
        OK(cu.StreamDestroy(stream));
        EXPECT_EQ(cuEventQuery(event), CUDA_ERROR_NOT_READY);
        OK(cu.Free(p));
        OK(cuEventQuery(event));
        write_on(other, q, 3 * MiB);
        OK(cu.Free(q)); /* that work is over */
        EXPECT(!sim_stream_done(other));
        sim_run(-1);
    }
    finish();
}

static struct {
    CUstream stream;
    CUdeviceptr p;
    CUevent event;
} late;

static void *use_and_destroy(void *unused)
{
    OK(cu.CtxSet(primary[0]));
    write_on(late.stream, late.p, 3 * MiB);
    OK(cuEventRecord(late.event, late.stream));
    OK(cu.StreamDestroy(late.stream));
    return unused;
}

static void use_and_destroy_in_another_thread(void)
{
    pthread_t thread;
    preload_after_wait(NULL);
    EXPECT_EQ(pthread_create(&thread, NULL, use_and_destroy, NULL), 0);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
}

/* The wait of one thread's free is over when another thread queues work and destroys its stream: the next free waits. */
TEST(free_on_request_after_another_ended_a_stream_meanwhile)
{
    CUstream stream, other;
    CUdeviceptr p;
    begin(1);
    OK(cuEventCreate(&late.event, CU_EVENT_DISABLE_TIMING));
    stream = stream_new();
    other = stream_new();
    late.stream = stream_new();
    late.p = alloc(3 * MiB);
    p = alloc(3 * MiB);
    write_on(stream, p, 3 * MiB);
    OK(cu.StreamDestroy(stream));
    preload_after_wait(use_and_destroy_in_another_thread);
    OK(cu.Free(p));
    EXPECT_EQ(cuEventQuery(late.event), CUDA_ERROR_NOT_READY);
    OK(cu.Free(late.p));
    OK(cuEventQuery(late.event));
    p = alloc(3 * MiB);
    write_on(other, p, 3 * MiB);
    finish();
}

/* A stream that the driver did not destroy is in use as before. */
TEST(free_on_request_after_a_stream_was_not_destroyed)
{
    CUstream stream, other;
    CUdeviceptr p, q;
    begin(1);
    stream = stream_new();
    other = stream_new();
    p = alloc(3 * MiB);
    sim_fail("cuStreamDestroy", 1, 0, CUDA_ERROR_UNKNOWN);
    EXPECT_EQ(cu.StreamDestroy(stream), CUDA_ERROR_UNKNOWN);
    sim_fail_clear();
    write_on(stream, p, 3 * MiB);
    OK(cu.Free(p));
    sim_hold((cudaStream_t)stream, 1);
    sim_run(-1); /* all other work is over */
    q = alloc(3 * MiB);
    write_on(other, q, 3 * MiB);
    sim_hold((cudaStream_t)stream, 0);
    finish();
}

/* A capture of another stream goes on, whether the stream that is destroyed is busy or idle. */
TEST(free_on_request_destroys_streams_during_a_capture)
{
    CUstreamCaptureMode modes[] = {CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL}, mode;
    CUstream captured, stream;
    CUgraph graph;
    CUdeviceptr p;
    int i;
    begin(1);
    captured = stream_new();
    for (i = 0; i < 8; i++) {
        graph = NULL;
        p = alloc(3 * MiB);
        OK(cu.StreamCreate(&stream, i & 2 ? CU_STREAM_NON_BLOCKING : 0));
        OK(cu.Begin(captured, modes[i & 1]));
        if (i & 4) write_on(stream, p, 3 * MiB);
        OK(cu.StreamDestroy(stream));
        mode = modes[1];
        OK(cu.Mode(&mode));
        EXPECT_EQ(mode, CU_STREAM_CAPTURE_MODE_GLOBAL); /* the thread's own */
        OK(cu.Mode(&mode));
        OK(cu.End(captured, &graph));
        EXPECT(graph);
        OK(cu.GraphDestroy(graph));
        OK(cu.Free(p));
        sim_run(-1);
    }
    finish();
}

TEST(pitch)
{
    CUdeviceptr p = 0, base = 0;
    size_t pitch = 0, bytes = 0;
    begin(1);
    OK(cu.AllocPitch(&p, &pitch, 1000, 30, 4));
    EXPECT_EQ(pitch, 1024);
    EXPECT_EQ(by_driver(), 0);
    OK(cu.Range(&base, &bytes, p + 5));
    EXPECT_EQ(base, p);
    EXPECT_EQ(bytes, 1024 * 30);
    OK(cu.Free(p));
    OK(cu.AllocPitch(&p, &pitch, 1100, 2, 5)); /* an element size that only the driver can judge */
    EXPECT_EQ(pitch, 2048);
    EXPECT_EQ(by_driver(), 1);
    OK(cu.Free(p));
    EXPECT_EQ(sim_calls("cuMemFree"), 1);
    /* More bytes than size_t can count: the driver refuses that. */
    EXPECT_EQ(cu.AllocPitch(&p, &pitch, 1000, SIZE_MAX / 1024 + 2, 4), CUDA_ERROR_OUT_OF_MEMORY);
    finish();
}

TEST(wrong_calls)
{
    CUdeviceptr p, q = 0;
    begin(1);
    p = alloc(MiB);
    EXPECT_EQ(cu.Free(p + 512), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(cu.FreeAsync(p + 512, CU_STREAM_LEGACY), CUDA_ERROR_INVALID_VALUE);
    OK(cu.Free(p));
    EXPECT_EQ(cu.Free(p), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(cu.FreeAsync(p, CU_STREAM_LEGACY), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(sim_calls("cuMemFree"), 0);
    EXPECT(cu.Free((CUdeviceptr)(uintptr_t)&p) != CUDA_SUCCESS);
    EXPECT_EQ(sim_calls("cuMemFree"), 1); /* foreign: the driver's error */
    EXPECT(cu.Alloc(NULL, 1) != CUDA_SUCCESS);
    OK(cu.Free(0) == CUDA_SUCCESS ? CUDA_SUCCESS : CUDA_SUCCESS);
    (void)cu.Alloc(&q, 0);
    EXPECT_EQ(sim_calls("cuMemAlloc"), 2);
    finish();
}

TEST(no_context)
{
    CUdeviceptr p = 0;
    begin(1);
    OK(cu.CtxSet(NULL));
    EXPECT_EQ(cu.Alloc(&p, MiB), CUDA_ERROR_INVALID_CONTEXT);
    finish();
}

/* ---- questions --------------------------------------------------------------------------------------------------- */

TEST(address_range)
{
    CUdeviceptr p, q, base = 0;
    size_t bytes = 0;
    begin(1);
    p = alloc(100);
    q = alloc(70 * MiB + 1); /* over several pages */
    OK(cu.Range(&base, &bytes, q + 69 * MiB));
    EXPECT_EQ(base, q);
    EXPECT_EQ(bytes, 70 * MiB + 1);
    OK(cu.Range(&base, NULL, p));
    EXPECT_EQ(base, p);
    OK(cu.Range(NULL, &bytes, p));
    EXPECT_EQ(bytes, 100);
    OK(cu.Free(q));
    EXPECT_EQ(cu.Range(&base, &bytes, q), CUDA_ERROR_NOT_FOUND);
    finish();
}

TEST(attributes)
{
    CUdeviceptr p, q, start = 0, starts[2] = {0, 0};
    CUcontext context = NULL;
    unsigned type = 0;
    unsigned long long id = 0, other = 0;
    size_t bytes = 0;
    int ordinal = -1;
    const int asked[] = {1, 2, 9, 11, 12, 7};
    void *answers[] = {&context, &type, &ordinal, &start, &bytes, &id};
    begin(2);
    p = alloc(3 * MiB);
    q = alloc(100);
    OK(cu.Attributes(6, asked, answers, p + 4));
    EXPECT(context == primary[0]);
    EXPECT_EQ(type, 2);
    EXPECT_EQ(ordinal, 0);
    EXPECT_EQ(start, p);
    EXPECT_EQ(bytes, 3 * MiB);
    OK(cu.Attribute(&other, 7, p));
    EXPECT_EQ(other, id);
    OK(cu.Attribute(&other, 7, q));
    EXPECT(other != id);
    OK(cu.Attribute(starts, 11, q + 99));
    EXPECT_EQ(starts[0], q);
    EXPECT_EQ(starts[1], 0);
    OK(cu.Attribute(&bytes, 12, q));
    EXPECT_EQ(bytes, 100);
    OK(cu.Free(p));
    p = alloc(3 * MiB);
    OK(cu.Attribute(&other, 7, p));
    EXPECT(other != id); /* another allocation at the same address */
    finish();
}

TEST(memory_info)
{
    CUdeviceptr p;
    size_t left = 0, total = 0, after = 0;
    begin(1);
    p = alloc(100 * MiB);
    OK(cu.Info(&left, &total));
    EXPECT_EQ(total, 1024 * MiB);
    EXPECT(left <= 924 * MiB);
    OK(cu.Free(p));
    OK(cu.Info(&after, &total));
    EXPECT(after >= left + 100 * MiB); /* what galloc keeps is free for the program */
    EXPECT(after <= total);
    finish();
}

TEST(memory_limit)
{
    CUdeviceptr p = 0, q = 0;
    size_t left = 0, total = 0;
    setenv("GALLOC_CONF", "memory_limit:100M,log:off", 1);
    begin(1);
    p = alloc(60 * MiB);
    OK(cu.Info(&left, &total));
    EXPECT_EQ(left, 40 * MiB);
    EXPECT_EQ(cu.Alloc(&q, 60 * MiB), CUDA_ERROR_OUT_OF_MEMORY);
    OK(cu.Free(p));
    p = alloc(90 * MiB);
    EXPECT_EQ(by_driver(), 0);
    finish();
}

static CUresult ipc_result;
static CUdeviceptr ipc_block;
static uint64_t ipc_handle[8];
static void ask_for_a_handle(void)
{
    ipc_result = cu.IpcHandle(ipc_handle, ipc_block);
    (void)cu.IpcHandle(ipc_handle, ipc_block);
}

TEST(ipc_of_pages)
{
    begin(1);
    (void)alloc(MiB);
    ipc_block = alloc(MiB);
    listen_to(ask_for_a_handle);
    EXPECT_EQ(ipc_result, CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(lines_said(), 1); /* for two calls */
    EXPECT(strstr(said, "backend:cudaMalloc"));
    finish();
}

TEST(ipc_of_fixed_segments)
{
    setenv("GALLOC_CONF", "expandable_segments:False", 1);
    begin(1);
    ipc_block = alloc(MiB / 2);
    listen_to(ask_for_a_handle);
    OK(ipc_result); /* at the start of a segment */
    EXPECT_EQ(ipc_handle[0], ipc_block);
    EXPECT_EQ(lines_said(), 0);
    ipc_block = alloc(MiB / 2);
    listen_to(ask_for_a_handle);
    EXPECT_EQ(ipc_result, CUDA_ERROR_INVALID_VALUE); /* the other process would get the segment's start */
    EXPECT_EQ(lines_said(), 1);
    finish();
}

TEST(ipc_of_a_backend)
{
    setenv("GALLOC_CONF", "backend:cudaMalloc", 1);
    begin(1);
    (void)alloc(3 * MiB);
    ipc_block = alloc(3 * MiB);
    listen_to(ask_for_a_handle);
    OK(ipc_result);
    EXPECT_EQ(ipc_handle[0], ipc_block);
    finish();
}

/* ---- pools ------------------------------------------------------------------------------------------------------- */

static CUmemoryPool pool_new(void)
{
    CUmemPoolProps properties;
    CUmemoryPool pool = NULL;
    memset(&properties, 0, sizeof properties);
    properties.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    OK(cu.PoolCreate(&pool, &properties));
    return pool;
}

TEST(pools)
{
    CUmemoryPool standard = NULL, own;
    CUdeviceptr p = 0, q = 0;
    CUstream stream;
    uint64_t before = 0, reserved = 0;
    begin(1);
    stream = stream_new();
    own = pool_new();
    OK(cu.DefaultPool(&standard, 0));
    OK(cu.PoolGet(standard, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &before));
    OK(cu.AllocPool(&p, MiB, standard, stream));
    EXPECT_EQ(by_driver(), 0);
    OK(cu.PoolGet(standard, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved));
    EXPECT_EQ(reserved, before + sim_physical(0));
    OK(cu.AllocPool(&q, MiB, own, stream));
    EXPECT_EQ(by_driver(), 1);
    OK(cu.FreeAsync(q, stream));
    EXPECT_EQ(sim_calls("cuMemFreeAsync"), 1);
    OK(cu.FreeAsync(p, stream));
    EXPECT_EQ(sim_calls("cuMemFreeAsync"), 1);
    sim_run(-1);
    OK(cu.PoolTrim(standard, 0));
    OK(cu.PoolGet(standard, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved));
    EXPECT_EQ(reserved, before);
    OK(cu.SetPool(0, own)); /* from now on cuMemAllocAsync means this one */
    q = alloc_async(MiB, stream);
    EXPECT_EQ(by_driver(), 2);
    OK(cu.FreeAsync(q, stream));
    OK(cu.SetPool(0, standard));
    q = alloc_async(MiB, stream);
    EXPECT_EQ(by_driver(), 2);
    OK(cu.Free(q)); /* either function frees memory of the other's kind */
    p = alloc(MiB);
    OK(cu.FreeAsync(p, stream));
    EXPECT_EQ(sim_calls("cuMemFree"), 0);
    finish();
}

/* The highest value is one since the last reset. */
TEST(pool_high)
{
    CUmemoryPool pool = NULL;
    cuuint64_t zero = 0, high = 0, now = 0;
    CUdeviceptr p;
    int i;
    begin(1);
    OK(cu.DefaultPool(&pool, 0));
    p = alloc(100 * MiB);
    OK(cu.Free(p));
    OK(cu.PoolTrim(pool, 0));
    for (i = 0; i < 2; i++) {
        OK(cu.PoolGet(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, &high));
        OK(cu.PoolGet(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &now));
        EXPECT(high >= 100 * MiB && now < 50 * MiB);
        sim_fail("cuMemPoolSetAttribute", 1, 0, CUDA_ERROR_UNKNOWN);
        if (!i) EXPECT_EQ(cu.PoolSet(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, &zero), CUDA_ERROR_UNKNOWN);
        sim_fail_clear();
    }
    OK(cu.PoolSet(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, &zero));
    OK(cu.PoolGet(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, &high));
    EXPECT_EQ(high, now);
    p = alloc(60 * MiB);
    OK(cu.PoolGet(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, &high));
    EXPECT(high >= 60 * MiB && high < 100 * MiB);
    OK(cu.Free(p));
    finish();
}

TEST(per_thread_streams)
{
    CUdeviceptr p = 0, q = 0;
    begin(1);
    OK(cu.AllocOwn(&p, 3 * MiB, NULL));
    write_on(CU_STREAM_PER_THREAD, p, 3 * MiB);
    OK(cu.FreeOwn(p, NULL));
    OK(cu.AllocOwn(&q, 3 * MiB, NULL));
    EXPECT_EQ(p, q);
    write_on(CU_STREAM_PER_THREAD, q, 3 * MiB);
    OK(cu.FreeOwn(q, NULL));
    p = alloc_async(3 * MiB, NULL); /* the legacy stream, which is ordered after it */
    write_on(CU_STREAM_LEGACY, p, 3 * MiB);
    OK(cu.FreeAsync(p, NULL));
    EXPECT_EQ(by_driver(), 0);
    finish();
}

/* Each thread has one of its own, and nothing orders them with each other. */
static void *on_my_own_stream(void *arg)
{
    CUdeviceptr p = 0;
    (void)arg;
    OK(cu.CtxSet(primary[0]));
    OK(cu.AllocOwn(&p, 3 * MiB, NULL));
    write_on(CU_STREAM_PER_THREAD, p, 3 * MiB);
    OK(cu.FreeOwn(p, NULL));
    return NULL;
}

TEST(streams_of_two_callers)
{
    pthread_t thread;
    begin(1);
    (void)on_my_own_stream(NULL);
    EXPECT(sim_pending() > 0);
    pthread_create(&thread, NULL, on_my_own_stream, NULL);
    pthread_join(thread, NULL);
    EXPECT_EQ(by_driver(), 0);
    finish();
}

/* What a stream freed last is found when the stream is destroyed. */
TEST(destroyed_streams)
{
    CUdeviceptr p;
    CUstream stream;
    size_t held;
    begin(1);
    stream = stream_new();
    p = alloc_async(64 * MiB, stream);
    write_on(stream, p, 64 * MiB);
    OK(cu.FreeAsync(p, stream));
    OK(cu.StreamDestroy(stream));
    OK(cu.CtxWait());
    held = sim_physical(0);
    p = alloc(64 * MiB);
    EXPECT_EQ(sim_physical(0), held);
    write_on(CU_STREAM_LEGACY, p, 64 * MiB);
    finish();
}

/* ---- captures ---------------------------------------------------------------------------------------------------- */

TEST(captured_streams)
{
    CUstream stream, other;
    CUdeviceptr p, held, of_graph = 0, elsewhere = 0;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    long waits;
    CUgraph graph = NULL;
    begin(1);
    stream = stream_new();
    other = stream_new();
    p = alloc(3 * MiB);
    held = alloc(3 * MiB);
    write_on(other, held, 3 * MiB);
    OK(cu.Begin(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    OK(cu.AllocAsync(&of_graph, MiB, stream));
    EXPECT_EQ(sim_calls("cuMemAllocAsync"), 1); /* a node of the graph: the driver's */
    OK(cu.FreeAsync(of_graph, stream));
    EXPECT_EQ(sim_calls("cuMemFreeAsync"), 1);
    OK(cu.Alloc(&elsewhere, MiB)); /* where CUDA would end the capture */
    OK(cu.Free(held));
    EXPECT(sim_stream_done(other)); /* it has waited, without harm to the capture */
    OK(cu.Mode(&mode));
    EXPECT_EQ(mode, CU_STREAM_CAPTURE_MODE_GLOBAL); /* the thread's own is back */
    OK(cu.End(stream, &graph));
    EXPECT(graph);
    OK(cu.GraphDestroy(graph));
    waits = sim_calls("cuMemHostAlloc");
    EXPECT(waits > 0);
    OK(cu.Free(p));
    EXPECT_EQ(cu.Begin(stream, (CUstreamCaptureMode)7), CUDA_ERROR_INVALID_VALUE);
    OK(cu.Begin(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    OK(cu.End(stream, &graph));
    OK(cu.GraphDestroy(graph));
    OK(cu.Free(elsewhere));
    EXPECT_EQ(sim_calls("cuMemHostAlloc"), waits); /* no capture is under way */
    finish();
}

/* The driver decides what a captured free of other memory means: it refuses. */
static CUstream to_capture;
static pthread_t beginner;
static int waits_for_context, begins;

static void *begin_capture(void *none)
{
    OK(cu.CtxSet(primary[0]));
    __atomic_store_n(&begins, 1, __ATOMIC_SEQ_CST);
    OK(cu.Begin(to_capture, CU_STREAM_CAPTURE_MODE_RELAXED));
    return none;
}

static void begin_before_the_wait(const char *function)
{
    if (strcmp(function, "cuCtxSynchronize") || !__atomic_exchange_n(&waits_for_context, 0, __ATOMIC_SEQ_CST)) return;
    EXPECT_EQ(pthread_create(&beginner, NULL, begin_capture, NULL), 0);
    while (!__atomic_load_n(&begins, __ATOMIC_SEQ_CST)) usleep(100);
    usleep(20000);
}

/* A capture that another thread begins during the free's wait for the device goes on. */
TEST(captured_after_a_free_has_begun)
{
    CUdeviceptr p;
    CUgraph graph = NULL;
    begin(1);
    to_capture = stream_new();
    p = alloc(3 * MiB);
    waits_for_context = 1;
    sim_hook(begin_before_the_wait, NULL);
    OK(cu.Free(p));
    sim_hook(NULL, NULL);
    EXPECT_EQ(waits_for_context, 0);
    EXPECT_EQ(pthread_join(beginner, NULL), 0);
    OK(cu.End(to_capture, &graph));
    finish();
}

TEST(captured_free_of_other_memory)
{
    CUstream stream;
    CUdeviceptr p;
    CUgraph graph = NULL;
    begin(1);
    stream = stream_new();
    p = alloc(3 * MiB);
    OK(cu.Begin(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    EXPECT(cu.FreeAsync(p, stream) != CUDA_SUCCESS);
    EXPECT_EQ(sim_calls("cuMemFreeAsync"), 1);
    (void)cu.End(stream, &graph);
    OK(cu.Free(p));
    sim_findings_clear();
    finish();
}

/* ---- what else takes memory -------------------------------------------------------------------------------------- */

TEST(other_memory_gets_what_galloc_keeps)
{
    CUdeviceptr p, managed = 0;
    CUmemGenericAllocationHandle page = 0;
    CUmemAllocationProp properties;
    begin(1);
    memset(&properties, 0, sizeof properties);
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    p = alloc(900 * MiB);
    OK(cu.Free(p));
    EXPECT(sim_physical(0) >= 900 * MiB);
    OK(cu.AllocManaged(&managed, 800 * MiB, 1));
    EXPECT(sim_physical(0) <= 900 * MiB);
    OK(cu.Free(managed));
    EXPECT_EQ(sim_calls("cuMemFree"), 1);
    p = alloc(900 * MiB);
    OK(cu.Free(p));
    OK(cu.CreatePage(&page, 800 * MiB, &properties, 0));
    OK(cu.ReleasePage(page));
    finish();
}

TEST(out_of_memory)
{
    CUdeviceptr p, q = 7;
    setenv("GALLOC_CONF", "log:off", 1);
    begin(1);
    p = alloc(700 * MiB);
    EXPECT_EQ(cu.Alloc(&q, 700 * MiB), CUDA_ERROR_OUT_OF_MEMORY);
    EXPECT_EQ(cu.AllocAsync(&q, 700 * MiB, CU_STREAM_LEGACY), CUDA_ERROR_OUT_OF_MEMORY);
    EXPECT_EQ(q, 7);
    OK(cu.Free(p));
    p = alloc(700 * MiB);
    EXPECT_EQ(by_driver(), 0);
    finish();
}

/* ---- devices and contexts ---------------------------------------------------------------------------------------- */

TEST(several_devices)
{
    CUdeviceptr p, q;
    begin(2);
    p = alloc(100 * MiB);
    EXPECT_EQ(sim_physical(1), 0);
    OK(cu.CtxSet(primary[1]));
    q = alloc(200 * MiB);
    EXPECT(sim_physical(0) >= 100 * MiB && sim_physical(0) < 200 * MiB);
    EXPECT(sim_physical(1) >= 200 * MiB);
    write_on(CU_STREAM_LEGACY, q, 200 * MiB);
    OK(cu.Free(p)); /* of the other device */
    OK(cu.CtxSet(primary[0]));
    write_on(CU_STREAM_LEGACY, alloc(100 * MiB), 100 * MiB);
    EXPECT(sim_physical(0) < 200 * MiB);
    OK(cu.Free(q));
    EXPECT_EQ(by_driver(), 0);
    finish();
}

/* A free waits for the device of the memory, whichever is current. */
TEST(free_waits_for_its_device)
{
    CUstream stream;
    CUdeviceptr p;
    begin(2);
    stream = stream_new();
    p = alloc(MiB);
    write_on(stream, p, MiB);
    OK(cu.CtxSet(primary[1]));
    OK(cu.Free(p));
    EXPECT(sim_stream_done(stream));
    finish();
}

TEST(peers_after_the_first_allocation)
{
    CUdeviceptr p, q;
    CUstream stream;
    begin(2);
    p = alloc(3 * MiB);
    OK(cu.CtxSet(primary[1]));
    OK(cu.Peer(primary[0], 0));
    stream = stream_new(); /* of device 1 */
    write_on(stream, p, 3 * MiB);
    OK(cu.CtxSet(primary[0]));
    q = alloc(300 * MiB); /* new pages */
    OK(cu.CtxSet(primary[1]));
    write_on(stream, q, 300 * MiB);
    finish();
}

static int sharing, told, let_on;
static void stay_in_the_second_call(const char *function)
{
    if (!__atomic_load_n(&sharing, __ATOMIC_SEQ_CST) || strcmp(function, "cuMemSetAccess")) return;
    if (__atomic_add_fetch(&told, 1, __ATOMIC_SEQ_CST) != 2) return; /* galloc's own call; then one for the peer */
    while (!__atomic_load_n(&let_on, __ATOMIC_SEQ_CST)) usleep(100);
}

static void *make_pages(void *address)
{
    OK(cu.CtxSet(primary[0]));
    *(CUdeviceptr *)address = alloc(300 * MiB);
    return NULL;
}

static void *ask_for_a_second_peer(void *none)
{
    OK(cu.CtxSet(primary[2]));
    OK(cu.Peer(primary[0], 0));
    return none;
}

/* A second device becomes a peer while another thread gives the first one access to new pages. */
TEST(peers_while_pages_are_made)
{
    CUdeviceptr p, q = 0;
    CUstream stream;
    pthread_t maker, asker;
    begin(3);
    p = alloc(3 * MiB);
    OK(cu.CtxSet(primary[1]));
    OK(cu.Peer(primary[0], 0));
    sim_hook(stay_in_the_second_call, NULL);
    __atomic_store_n(&sharing, 1, __ATOMIC_SEQ_CST);
    EXPECT_EQ(pthread_create(&maker, NULL, make_pages, &q), 0);
    while (__atomic_load_n(&told, __ATOMIC_SEQ_CST) < 2) usleep(100);
    EXPECT_EQ(pthread_create(&asker, NULL, ask_for_a_second_peer, NULL), 0);
    usleep(20000);
    __atomic_store_n(&let_on, 1, __ATOMIC_SEQ_CST);
    EXPECT_EQ(pthread_join(maker, NULL), 0);
    EXPECT_EQ(pthread_join(asker, NULL), 0);
    OK(cu.CtxSet(primary[2]));
    stream = stream_new();
    write_on(stream, p, 3 * MiB);
    write_on(stream, q, 300 * MiB);
    finish();
}

/* A call that fails after the driver has enabled its own access can be made again. */
TEST(peers_at_the_second_attempt)
{
    CUdeviceptr p;
    CUstream stream;
    long nth = 0;
    CUresult result;
    begin(2);
    p = alloc(3 * MiB);
    OK(cu.CtxSet(primary[1]));
    do {
        sim_fail("cuCtxGetDevice", ++nth, 0, CUDA_ERROR_OUT_OF_MEMORY);
        result = cu.Peer(primary[0], 0);
        sim_fail_clear();
    } while (result == CUDA_ERROR_OUT_OF_MEMORY);
    EXPECT(nth > 1);
    EXPECT_EQ(result, CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
    OK(cu.CtxSet(primary[1]));
    stream = stream_new();
    write_on(stream, p, 3 * MiB);
    finish();
}

TEST(peers_before_the_first_allocation)
{
    CUdeviceptr p;
    CUstream stream;
    begin(2);
    OK(cu.CtxSet(primary[1]));
    OK(cu.Peer(primary[0], 0));
    stream = stream_new();
    OK(cu.CtxSet(primary[0]));
    p = alloc(3 * MiB);
    OK(cu.CtxSet(primary[1]));
    write_on(stream, p, 3 * MiB);
    finish();
}

TEST(peers_of_the_default_pool)
{
    CUmemoryPool pool = NULL;
    CUmemAccessDesc access;
    CUdeviceptr p;
    CUstream stream;
    begin(2);
    memset(&access, 0, sizeof access);
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = 1;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    p = alloc(3 * MiB);
    OK(cu.DefaultPool(&pool, 0));
    OK(cu.PoolAccess(pool, &access, 1));
    OK(cu.CtxSet(primary[1]));
    stream = stream_new();
    write_on(stream, p, 3 * MiB);
    finish();
}

/* Memory of cudaMalloc follows the driver's own peer access: there is nothing to do, and nothing to say. */
static CUdeviceptr shared_block;
static void share_by_context(void)
{
    CUstream stream;
    shared_block = alloc(3 * MiB);
    OK(cu.CtxSet(primary[1]));
    OK(cu.Peer(primary[0], 0));
    stream = stream_new();
    write_on(stream, shared_block, 3 * MiB);
    OK(cu.CtxWait());
    OK(cu.CtxSet(primary[0]));
    OK(cu.Free(shared_block));
    shared_block = alloc(30 * MiB);
    OK(cu.CtxSet(primary[1]));
    write_on(stream, shared_block, 30 * MiB);
    OK(cu.CtxSet(primary[0]));
}

static CUresult pool_result;
static void share_by_pool(void)
{
    CUmemoryPool pool = NULL;
    CUmemAccessDesc access;
    memset(&access, 0, sizeof access);
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = 1;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    OK(cu.DefaultPool(&pool, 0));
    pool_result = cu.PoolAccess(pool, &access, 1);
}

/* The access of a pool's memory has no such effect on memory of cudaMalloc; where the driver's own is enabled it need
   not have. */
static void peers_of_cuda_malloc(const char *conf)
{
    setenv("GALLOC_CONF", conf, 1);
    begin(2);
    listen_to(share_by_pool); /* before the first allocation */
    EXPECT_EQ(pool_result, CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
    EXPECT(strstr(said, "cuMemPoolSetAccess") && lines_said() == 1);
    listen_to(share_by_context);
    EXPECT_EQ(lines_said(), 0);
    listen_to(share_by_pool);
    OK(pool_result);
    EXPECT_EQ(lines_said(), 0);
    finish();
}

TEST(peers_of_a_backend) { peers_of_cuda_malloc("backend:cudaMalloc"); }
TEST(peers_of_fixed_segments) { peers_of_cuda_malloc("expandable_segments:False"); }
TEST(peers_like_pytorch) { peers_of_cuda_malloc("like:pytorch"); }

static CUresult peer_result;
static void ask_for_a_peer(void)
{
    OK(cu.CtxSet(primary[1]));
    peer_result = cu.Peer(primary[0], 0);
    OK(cu.CtxSet(primary[0]));
}

/* The driver's pool of that backend is out of the library's hands. */
TEST(peers_of_a_driver_pool)
{
    setenv("GALLOC_CONF", "backend:cudaMallocAsync", 1);
    begin(2);
    listen_to(ask_for_a_peer);
    EXPECT_EQ(peer_result, CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
    EXPECT(strstr(said, "cudaMallocAsync") && lines_said() == 1);
    EXPECT_EQ(sim_calls("cudaDeviceEnablePeerAccess"), 0);
    (void)alloc(3 * MiB);
    listen_to(share_by_pool);
    EXPECT_EQ(pool_result, CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
    EXPECT_EQ(lines_said(), 0); /* the same line */
    OK(cu.Alloc(&shared_block, MiB));
    OK(cu.Free(shared_block));
    finish();
}

/* The default pool's access is asked for before galloc serves the device. */
TEST(default_pool_access_before_the_first_allocation)
{
    CUdeviceptr p;
    CUstream stream;
    begin(2);
    share_by_pool();
    OK(pool_result);
    p = alloc(3 * MiB);
    OK(cu.CtxSet(primary[1]));
    stream = stream_new();
    write_on(stream, p, 3 * MiB);
    finish();
}

/* The memory of a context ends with it: the driver's business. */
TEST(memory_of_other_contexts)
{
    CUcontext context = NULL;
    CUdeviceptr p, q;
    CUstream stream;
    begin(1);
    p = alloc(MiB);
    OK(cu.CtxCreate(&context, 0, 0));
    q = alloc(MiB);
    EXPECT_EQ(by_driver(), 1);
    stream = stream_new();
    q = alloc_async(MiB, stream);
    EXPECT_EQ(by_driver(), 2);
    OK(cu.FreeAsync(q, stream));
    OK(cu.CtxSet(primary[0]));
    q = alloc(MiB);
    EXPECT_EQ(by_driver(), 2);
    OK(cu.Free(p));
    finish();
}

TEST(served_again_after_reset)
{
    CUdeviceptr p, q;
    CUstream stream;
    begin(1);
    p = alloc(3 * MiB);
    OK(cu.Free(p));
    OK(cu.Reset(0));
    OK(cu.CtxSet(primary[0]));
    q = alloc(3 * MiB);
    stream = stream_new();
    write_on(stream, q, 3 * MiB);
    OK(cu.Free(q));
    EXPECT(sim_stream_done(stream));
    EXPECT_EQ(by_driver(), 0);
    finish();
}

/* An error, as in CUDA: the memory ended with the context. The stream on which it would count as freed did, too. */
static void free_after_reset(void)
{
    CUdeviceptr p, q;
    begin(1);
    p = alloc(3 * MiB);
    OK(cu.Reset(0));
    OK(cu.CtxSet(primary[0]));
    EXPECT_EQ(cu.Free(p), CUDA_ERROR_INVALID_VALUE);
    q = alloc(3 * MiB);
    write_on(CU_STREAM_LEGACY, q, 3 * MiB);
    OK(cu.Free(q));
    finish();
}

TEST(free_first_after_reset) { free_after_reset(); }
TEST(free_on_request_first_after_reset) { free_after_reset(); }

/* A reset ends streams without a call for each. */
TEST(free_on_request_after_reset)
{
    CUdeviceptr p, q;
    CUstream stream, other;
    begin(1);
    (void)stream_new();
    p = alloc(3 * MiB);
    OK(cu.Free(p));
    OK(cu.Reset(0));
    OK(cu.CtxSet(primary[0]));
    p = alloc(3 * MiB);
    stream = stream_new();
    other = stream_new();
    write_on(stream, p, 3 * MiB);
    OK(cu.Free(p));
    EXPECT(!sim_stream_done(stream));
    q = alloc(3 * MiB);
    write_on(other, q, 3 * MiB);
    finish();
}

/* With cudaMalloc's memory, the driver gives the address that a reset took to memory that is its own. `noticed`: galloc
   knows of the reset. */
static void free_at_an_address_that_a_reset_took(int noticed)
{
    CUdeviceptr p, q = 0, managed = 0, base = 0;
    CUDA_MEMCPY2D copy = {0};
    unsigned long long range = 0;
    size_t before, bytes = 0;
    setenv("GALLOC_CONF", "backend:cudaMalloc", 1);
    begin(1);
    p = alloc(3 * MiB);
    OK(cu.Reset(0));
    OK(cu.CtxSet(primary[0]));
    before = sim_physical(0);
    OK(cu.AllocManaged(&managed, 4 * MiB, 1));
    EXPECT_EQ(managed, p);
    if (noticed) q = alloc(2 * MiB);
    OK(cu.Range(&base, &bytes, managed + 1));
    EXPECT(base == managed && bytes == 4 * MiB);
    OK(cu.Attribute(&range, 12, managed));
    EXPECT_EQ(range, 4 * MiB);
    copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    copy.srcDevice = managed;
    copy.dstDevice = managed + 2 * MiB;
    copy.WidthInBytes = copy.srcPitch = copy.dstPitch = 2 * MiB;
    copy.Height = 1;
    OK(cu.Copy2D(&copy));
    OK(cu.Free(managed));
    EXPECT_EQ(sim_physical(0), before + (noticed ? 2 * MiB : 0));
    if (noticed) OK(cu.Free(q));
    EXPECT_EQ(cu.Free(p), CUDA_ERROR_INVALID_VALUE);
    finish();
}

TEST(a_reset_that_galloc_has_not_noticed_frees_addresses) { free_at_an_address_that_a_reset_took(0); }
TEST(a_reset_that_galloc_has_noticed_frees_addresses) { free_at_an_address_that_a_reset_took(1); }

/* The same for memory that the program freed before. */
TEST(a_reset_that_galloc_has_not_noticed_took_free_memory)
{
    CUdeviceptr p, q = 0;
    CUmemPoolProps properties = {0};
    CUmemoryPool pool;
    CUstream stream;
    setenv("GALLOC_CONF", "backend:cudaMalloc", 1);
    begin(1);
    p = alloc(3 * MiB);
    OK(cu.Free(p));
    OK(cu.Reset(0));
    OK(cu.CtxSet(primary[0]));
    stream = stream_new();
    properties.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    OK(cu.PoolCreate(&pool, &properties));
    OK(cu.AllocPool(&q, 3 * MiB, pool, stream));
    EXPECT_EQ(q, p);
    OK(cu.FreeAsync(q, stream));
    EXPECT_EQ(cu.FreeAsync(q, stream), CUDA_ERROR_INVALID_VALUE);
    finish();
}

/* The default pool is asked for again: a reset may change it, and the first answer may have been an error. */
TEST(default_pool_after_reset)
{
    CUmemoryPool standard = NULL;
    uint64_t before = 0, reserved = 0;
    begin(1);
    OK(cu.DefaultPool(&standard, 0));
    OK(cu.PoolGet(standard, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &before));
    sim_fail("cudaDeviceGetDefaultMemPool", 1, 0, CUDA_ERROR_UNKNOWN);
    (void)alloc(3 * MiB);
    sim_fail_clear();
    OK(cu.Reset(0));
    OK(cu.CtxSet(primary[0]));
    (void)alloc(3 * MiB);
    OK(cu.PoolGet(standard, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved));
    EXPECT_EQ(reserved, before + sim_physical(0));
    finish();
}

/* Work with a block in another context of the device, on a stream of it or (`flags` is -1) on its default stream; the
   event tells of its end. With a stream, the primary context is current afterwards. */
static CUevent work_elsewhere(CUcontext context, int flags, CUdeviceptr p)
{
    CUstream stream = CU_STREAM_LEGACY;
    CUevent event = NULL;
    OK(cu.CtxSet(context));
    OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    if (flags >= 0) OK(cu.StreamCreate(&stream, (unsigned)flags));
    write_on(stream, p, 3 * MiB);
    OK(cuEventRecord(event, stream));
    if (flags >= 0) OK(cu.CtxSet(primary[0]));
    EXPECT_EQ(cuEventQuery(event), CUDA_ERROR_NOT_READY);
    return event;
}

/* Green contexts are parts of the primary one. */
static void free_with_other_contexts(void)
{
    CUcontext context[2] = {NULL, NULL};
    int i, flags;
    begin(1);
    EXPECT_EQ(sim_green_create(&context[0], 0), 0);
    OK(cu.CtxCreate(&context[1], 0, 0));
    for (i = 0; i < 2; i++)
        for (flags = -1; flags <= CU_STREAM_NON_BLOCKING; flags++) {
            CUdeviceptr p;
            CUevent event;
            OK(cu.CtxSet(primary[0]));
            p = alloc(3 * MiB);
            event = work_elsewhere(context[i], flags, p);
            OK(cu.Free(p));
            OK(cuEventQuery(event));
        }
    finish();
}

TEST(free_waits_for_other_contexts) { free_with_other_contexts(); }
TEST(free_on_request_waits_for_other_contexts) { free_with_other_contexts(); }

/* A context of which the driver does not say whether it lives is no dead one. */
static void free_without_answers(void)
{
    CUcontext context = NULL;
    long nth, hit = 0;
    begin(1);
    OK(cu.CtxCreate(&context, 0, 0));
    OK(cu.CtxSet(primary[0]));
    for (nth = 1; nth < 8; nth++) {
        CUdeviceptr p = alloc(3 * MiB);
        CUevent event = work_elsewhere(context, CU_STREAM_NON_BLOCKING, p);
        sim_fail("cuCtxGetId", nth, 0, CUDA_ERROR_UNKNOWN);
        if (cu.Free(p) == CUDA_ERROR_UNKNOWN) hit++, OK(cu.Free(p));
        sim_fail_clear();
        OK(cuEventQuery(event));
    }
    EXPECT(hit > 1);
    finish();
}

TEST(free_without_answers_about_contexts) { free_without_answers(); }
TEST(free_on_request_without_answers_about_contexts) { free_without_answers(); }

/* The work of a green context goes on after its end. Once it is over, a free need not wait any more. */
TEST(free_on_request_after_a_context_has_ended)
{
    CUcontext green = NULL;
    CUstream stream;
    CUdeviceptr p, q;
    begin(1);
    p = alloc(3 * MiB);
    q = alloc(3 * MiB);
    EXPECT_EQ(sim_green_create(&green, 0), 0);
    (void)work_elsewhere(green, CU_STREAM_NON_BLOCKING, p);
    EXPECT_EQ(sim_green_destroy(green), 0);
    stream = stream_new();
    OK(cu.Free(p));
    EXPECT_EQ(sim_pending(), 0);
    p = alloc(3 * MiB);
    OK(cu.Free(p));
    write_on(stream, q, 3 * MiB);
    OK(cu.Free(q));
    EXPECT(!sim_stream_done(stream));
    finish();
}

static pthread_t second;
static const char *slow_call = "cuEventQuery";
static int in_slow_call, has_second; /* of the second thread: it is in the call */

static void be_slow(const char *function)
{
    if (!__atomic_load_n(&has_second, __ATOMIC_ACQUIRE) || !pthread_equal(pthread_self(), second)) return;
    if (strcmp(function, slow_call) || __atomic_exchange_n(&in_slow_call, 1, __ATOMIC_SEQ_CST)) return;
    usleep(20000);
}

static void *use_the_primary_context(void *unused)
{
    second = pthread_self();
    __atomic_store_n(&has_second, 1, __ATOMIC_RELEASE);
    OK(cu.CtxSet(primary[0]));
    for (int i = 0; i < 1000 && !__atomic_load_n(&in_slow_call, __ATOMIC_ACQUIRE); i++) {
        CUdeviceptr p = alloc(3 * MiB), q = alloc(9 * MiB);
        OK(cu.Free(p));
        OK(cu.Free(q));
    }
    return unused;
}

static void *free_slowly(void *p)
{
    second = pthread_self();
    __atomic_store_n(&has_second, 1, __ATOMIC_RELEASE);
    OK(cu.CtxSet(primary[0]));
    OK(cu.Free(*(CUdeviceptr *)p));
    return NULL;
}

static void *free_on_the_legacy_stream(void *p)
{
    second = pthread_self();
    __atomic_store_n(&has_second, 1, __ATOMIC_RELEASE);
    OK(cu.CtxSet(primary[0]));
    OK(cu.FreeAsync(*(CUdeviceptr *)p, NULL));
    return NULL;
}

/* A capture begins while another thread is about to record an event on the legacy stream: not before it has. */
static void capture_beside(void *(*frees)(void *))
{
    CUdeviceptr p;
    CUstream blocking = NULL;
    CUgraph graph = NULL;
    pthread_t thread;
    begin(1);
    p = alloc(3 * MiB);
    OK(cu.StreamCreate(&blocking, CU_STREAM_DEFAULT));
    slow_call = "cuEventRecord";
    sim_hook(be_slow, NULL);
    EXPECT_EQ(pthread_create(&thread, NULL, frees, &p), 0);
    for (int i = 0; i < 10000 && !__atomic_load_n(&in_slow_call, __ATOMIC_ACQUIRE); i++) usleep(100);
    EXPECT(in_slow_call);
    OK(cu.Begin(blocking, CU_STREAM_CAPTURE_MODE_RELAXED));
    EXPECT_EQ(pthread_join(thread, NULL), 0);
    OK(cu.End(blocking, &graph));
    OK(cu.GraphDestroy(graph));
    sim_hook(NULL, NULL);
    finish();
}

TEST(free_on_request_beside_a_capture_that_begins) { capture_beside(free_slowly); }
TEST(a_capture_begins_beside_a_free_on_the_legacy_stream) { capture_beside(free_on_the_legacy_stream); }

static void *begin_a_capture(void *stream)
{
    OK(cu.CtxSet(primary[0]));
    OK(cu.Begin(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    pthread_testcancel();
    return NULL;
}

/* The thread that begins a capture is cancelled while it waits for the free of another one: the capture begins. */
TEST(free_on_request_beside_a_thread_that_is_cancelled)
{
    CUdeviceptr p;
    CUstream stream;
    CUgraph graph = NULL;
    pthread_t thread, begins;
    begin(1);
    p = alloc(3 * MiB);
    stream = stream_new();
    slow_call = "cuEventRecord";
    sim_hook(be_slow, NULL);
    EXPECT_EQ(pthread_create(&thread, NULL, free_slowly, &p), 0);
    for (int i = 0; i < 10000 && !__atomic_load_n(&in_slow_call, __ATOMIC_ACQUIRE); i++) usleep(100);
    EXPECT(in_slow_call);
    EXPECT_EQ(pthread_create(&begins, NULL, begin_a_capture, stream), 0);
    usleep(5000);
    EXPECT_EQ(pthread_cancel(begins), 0);
    EXPECT_EQ(pthread_join(begins, NULL), 0);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
    sim_hook(NULL, NULL);
    OK(cu.End(stream, &graph));
    OK(cu.GraphDestroy(graph));
    finish();
}

/* The driver is beginning a capture; how often slow_call is called until the other thread has come far enough. */
static int beginning, called, calls_left;

static void begin_slowly(const char *function)
{
    if (!strcmp(function, "cuStreamBeginCapture") && !__atomic_exchange_n(&beginning, 1, __ATOMIC_SEQ_CST))
        for (int i = 0; i < 500 && !__atomic_load_n(&called, __ATOMIC_ACQUIRE); i++) usleep(100);
    if (!pthread_equal(pthread_self(), second) || strcmp(function, slow_call) || --calls_left) return;
    __atomic_store_n(&called, 1, __ATOMIC_RELEASE);
    usleep(20000);
}

static void *capture_slowly(void *stream)
{
    CUgraph graph = NULL;
    OK(cu.CtxSet(primary[0]));
    OK(cu.Begin(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    usleep(100000);
    OK(cu.End(stream, &graph));
    OK(cu.GraphDestroy(graph));
    return NULL;
}

/* The same where the driver is beginning the capture already: the call waits until it has begun. */
static void in_the_beginning_of_a_capture(unsigned flags, const char *until, int calls, void *(*frees)(void *))
{
    CUdeviceptr p;
    CUstream stream = NULL;
    pthread_t thread;
    begin(1);
    p = alloc(3 * MiB);
    OK(cu.StreamCreate(&stream, flags));
    second = pthread_self();
    slow_call = until;
    calls_left = calls;
    sim_hook(begin_slowly, NULL);
    EXPECT_EQ(pthread_create(&thread, NULL, capture_slowly, stream), 0);
    for (int i = 0; i < 10000 && !__atomic_load_n(&beginning, __ATOMIC_ACQUIRE); i++) usleep(100);
    EXPECT(beginning);
    (void)frees(&p);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
    sim_hook(NULL, NULL);
    finish();
}

TEST(free_on_request_in_the_beginning_of_a_capture)
{
    in_the_beginning_of_a_capture(CU_STREAM_NON_BLOCKING, "cuStreamGetId", 3, free_slowly);
}

/* CUDA refuses it as well, once the capture has begun. */
static void *free_or_not(void *p)
{
    CUresult result = cu.FreeAsync(*(CUdeviceptr *)p, NULL);
    EXPECT(result == CUDA_SUCCESS || result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    if (result) OK(cu.Free(*(CUdeviceptr *)p));
    return NULL;
}

TEST(a_free_on_the_legacy_stream_in_the_beginning_of_a_capture)
{
    in_the_beginning_of_a_capture(CU_STREAM_DEFAULT, "cuEventRecord", 1, free_or_not);
}

/* CUDA's functions may be called while another thread ends a context that they do not use. galloc's calls, which may
   look at an event of that context, are over by then. */
TEST(a_context_ends_beside_calls_of_another_thread)
{
    CUcontext context = NULL;
    CUdeviceptr p;
    CUstream stream;
    pthread_t thread;
    begin(1);
    p = alloc(4 * MiB);
    OK(cu.CtxCreate(&context, 0, 0));
    stream = stream_new();
    write_on(stream, p, 4 * MiB);
    OK(cu.FreeAsync(p, stream));
    OK(cu.CtxWait());
    OK(cu.StreamDestroy(stream));
    sim_hook(be_slow, NULL);
    EXPECT_EQ(pthread_create(&thread, NULL, use_the_primary_context, NULL), 0);
    for (int i = 0; i < 10000 && !__atomic_load_n(&in_slow_call, __ATOMIC_ACQUIRE); i++) usleep(100);
    EXPECT(in_slow_call);
    OK(cu.CtxDestroy(context));
    EXPECT_EQ(pthread_join(thread, NULL), 0);
    sim_hook(NULL, NULL);
    OK(cu.CtxSet(primary[0]));
    OK(cu.Free(alloc(3 * MiB)));
    finish();
}

static void *end_the_context(void *context)
{
    OK(cu.CtxSet(primary[0]));
    OK(cu.CtxDestroy(context));
    pthread_testcancel();
    return NULL;
}

/* The thread that ends a context is cancelled while it waits for the calls of others: these go on afterwards. */
TEST(a_thread_is_cancelled_while_it_ends_a_context)
{
    CUcontext context = NULL;
    CUdeviceptr p;
    CUstream stream;
    pthread_t thread, ends;
    (void)alarm(20);
    begin(1);
    p = alloc(4 * MiB);
    OK(cu.CtxCreate(&context, 0, 0));
    stream = stream_new();
    write_on(stream, p, 4 * MiB);
    OK(cu.FreeAsync(p, stream));
    OK(cu.CtxWait());
    OK(cu.StreamDestroy(stream));
    OK(cu.CtxSet(primary[0]));
    sim_hook(be_slow, NULL);
    EXPECT_EQ(pthread_create(&thread, NULL, use_the_primary_context, NULL), 0);
    for (int i = 0; i < 10000 && !__atomic_load_n(&in_slow_call, __ATOMIC_ACQUIRE); i++) usleep(100);
    EXPECT(in_slow_call);
    EXPECT_EQ(pthread_create(&ends, NULL, end_the_context, context), 0);
    usleep(5000);
    EXPECT_EQ(pthread_cancel(ends), 0);
    EXPECT_EQ(pthread_join(ends, NULL), 0);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
    sim_hook(NULL, NULL);
    OK(cu.Free(alloc(3 * MiB)));
    finish();
}

static void *use_another_device(void *unused)
{
    OK(cu.CtxSet(primary[1]));
    OK(cu.Free(alloc(3 * MiB)));
    return unused;
}

static void let_another_device_be_used(const char *function)
{
    pthread_t thread;
    if (strcmp(function, "cudaDeviceReset")) return;
    EXPECT_EQ(pthread_create(&thread, NULL, use_another_device, NULL), 0);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
    in_slow_call = 1;
}

/* A reset takes its time, and a thread with another device goes on meanwhile. */
TEST(a_reset_beside_calls_for_another_device)
{
    (void)alarm(20);
    begin(2);
    OK(cu.Free(alloc(3 * MiB)));
    sim_hook(let_another_device_be_used, NULL);
    OK(cu.Reset(0));
    sim_hook(NULL, NULL);
    EXPECT(in_slow_call);
    finish();
}

/* A context that has failed for good runs nothing any more: no reason to keep the memory of the primary one. */
TEST(free_with_a_context_that_has_failed)
{
    CUcontext context = NULL;
    CUdeviceptr p;
    begin(1);
    p = alloc(3 * MiB);
    OK(cu.CtxCreate(&context, 0, 0));
    (void)stream_new();
    OK(cu.CtxSet(primary[0]));
    sim_fail("cuCtxSynchronize", 1, 0, CUDA_ERROR_ILLEGAL_ADDRESS);
    OK(cu.Free(p));
    EXPECT_EQ(sim_failed(), 1);
    sim_fail_clear();
    p = alloc(3 * MiB);
    sim_fail("cuCtxSynchronize", 1, 0, CUDA_ERROR_UNKNOWN);
    EXPECT_EQ(cu.Free(p), CUDA_ERROR_UNKNOWN);
    sim_fail_clear();
    OK(cu.Free(p));
    finish();
}

TEST(fork_child)
{
    CUdeviceptr p, q;
    pid_t child;
    int status = -1;
    begin(1);
    p = alloc(3 * MiB);
    child = fork();
    if (!child) {
        CUdeviceptr mine = 0;
        long before = by_driver();
        _exit(cu.Alloc(&mine, MiB) != CUDA_ERROR_NOT_INITIALIZED || by_driver() != before + 1);
    }
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    q = alloc(3 * MiB);
    write_on(CU_STREAM_LEGACY, q, 3 * MiB);
    OK(cu.Free(p));
    OK(cu.Free(q));
    finish();
}

static int opening; /* 1: a thread is in the call that opens the device; 2: it may go on */

static void wait_in_opening(const char *function)
{
    if (strcmp(function, "cuStreamCreate")) return;
    __atomic_store_n(&opening, 1, __ATOMIC_RELEASE);
    while (__atomic_load_n(&opening, __ATOMIC_ACQUIRE) < 2) usleep(1000);
}

static void *open_by_alloc(void *unused)
{
    OK(cu.CtxSet(primary[0]));
    OK(cu.Free(alloc(3 * MiB)));
    return unused;
}

/* A fork while another thread opens the device. */
TEST(fork_during_the_first_call)
{
    pthread_t thread;
    pid_t child;
    int status = -1;
    begin(1);
    sim_hook(wait_in_opening, NULL);
    EXPECT_EQ(pthread_create(&thread, NULL, open_by_alloc, NULL), 0);
    while (__atomic_load_n(&opening, __ATOMIC_ACQUIRE) < 1) usleep(1000);
    child = fork();
    if (!child) {
        CUdeviceptr mine = 0;
        (void)alarm(5);
        _exit(cu.Alloc(&mine, MiB) != CUDA_ERROR_NOT_INITIALIZED || by_driver() != 1);
    }
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    __atomic_store_n(&opening, 2, __ATOMIC_RELEASE);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
    sim_hook(NULL, NULL);
    finish();
}

static void *end_stream(void *stream)
{
    OK(cu.CtxSet(primary[0]));
    OK(cu.StreamDestroy((CUstream)stream));
    return NULL;
}

static void wait_in_end(const char *function)
{
    if (strcmp(function, "cuStreamDestroy") || __atomic_load_n(&opening, __ATOMIC_ACQUIRE)) return;
    __atomic_store_n(&opening, 1, __ATOMIC_RELEASE);
    while (__atomic_load_n(&opening, __ATOMIC_ACQUIRE) < 2) usleep(1000);
}

/* A fork before the first allocation, while another thread ends a stream. */
TEST(free_on_request_fork_during_the_end_of_a_stream)
{
    pthread_t thread;
    pid_t child;
    int status = -1;
    CUstream stream, other;
    setenv("GALLOC_PRELOAD_FREE", "async", 1);
    begin(1);
    stream = stream_new();
    other = stream_new();
    sim_hook(wait_in_end, NULL);
    EXPECT_EQ(pthread_create(&thread, NULL, end_stream, stream), 0);
    while (__atomic_load_n(&opening, __ATOMIC_ACQUIRE) < 1) usleep(1000);
    child = fork();
    if (!child) {
        (void)alarm(10);
        (void)cu.StreamDestroy(other);
        _exit(0);
    }
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    __atomic_store_n(&opening, 2, __ATOMIC_RELEASE);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
    OK(cu.StreamDestroy(other));
    sim_hook(NULL, NULL);
    finish();
}

/* A fork before the first use of CUDA leaves a child that may use it. */
TEST(fork_before_cuda)
{
    sim_options options = options_of(1);
    pid_t child;
    int status = -1;
    EXPECT_EQ(sim_start(&options), 0);
    EXPECT(dlopen("libcuda.so.1", RTLD_NOW));
    EXPECT(dlsym(RTLD_DEFAULT, "cuGetProcAddress_v2"));
    child = fork();
    if (!child) {
        begin(1);
        (void)alloc(MiB);
        _exit(by_driver() || test_failures);
    }
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
}

TEST(driver_gone)
{
    CUdeviceptr p, q = 0;
    begin(1);
    p = alloc(3 * MiB);
    sim_driver_exit();
    EXPECT_EQ(cu.Free(p), CUDA_ERROR_DEINITIALIZED);
    EXPECT_EQ(cu.Alloc(&q, MiB), CUDA_ERROR_DEINITIALIZED);
}

/* ---- copies ------------------------------------------------------------------------------------------------------ */

/* Waits for both devices; `current` is current then. */
static void settle(int current)
{
    int i;
    for (i = 0; i < 3; i++) {
        OK(cu.CtxSet(primary[i < 2 ? i : current]));
        OK(cu.CtxWait());
    }
}

/* Every function that copies, once. Returns how many refused. */
static int copy_all(int current, CUdeviceptr to, CUdeviceptr from, CUstream stream)
{
    static char host[4096];
    CUDA_MEMCPY2D flat;
    CUDA_MEMCPY3D box;
    int refused = 0;
    memset(&flat, 0, sizeof flat);
    flat.srcMemoryType = flat.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    flat.srcDevice = from;
    flat.dstDevice = to;
    flat.srcXInBytes = 64;
    flat.dstY = 3;
    flat.srcPitch = flat.dstPitch = 512;
    flat.WidthInBytes = 100;
    flat.Height = 4;
    memset(&box, 0, sizeof box);
    box.srcMemoryType = CU_MEMORYTYPE_HOST;
    box.srcHost = host;
    box.dstMemoryType = CU_MEMORYTYPE_UNIFIED;
    box.dstDevice = to;
    box.dstZ = 1;
    box.srcPitch = box.dstPitch = 128;
    box.srcHeight = box.dstHeight = 4;
    box.WidthInBytes = 100;
    box.Height = 4;
    box.Depth = 2;
#define REFUSED(call) refused += (call) == CUDA_ERROR_INVALID_VALUE
    REFUSED(cu.CopyTo(to, host, 2000));
    REFUSED(cu.CopyToOwn(to, host, 2000));
    REFUSED(cu.CopyTo(from, host, 4096));
    REFUSED(cu.Copy(to, from, 4096));
    REFUSED(cu.CopyOwn(to, from, 4096));
    REFUSED(cu.CopyDevice(to, from, 4096));
    REFUSED(cu.CopyDeviceOwn(to, from, 4096));
    REFUSED(cu.CopyFrom(host, from, 4096));
    REFUSED(cu.CopyFromOwn(host, from, 4096));
    OK(cuStreamQuery(CU_STREAM_PER_THREAD)); /* it is done */
    REFUSED(cu.Copy2D(&flat));
    REFUSED(cu.Copy2DOwn(&flat));
    REFUSED(cu.CopyRows(&flat));
    REFUSED(cu.CopyRowsOwn(&flat));
    REFUSED(cu.Copy3D(&box));
    REFUSED(cu.Copy3DOwn(&box));
    settle(current);
    REFUSED(cu.Queue(to, from, 4096, stream));
    REFUSED(cu.QueueTo(to, host, 4096, stream));
    REFUSED(cu.QueueFrom(host, to, 4096, stream));
    REFUSED(cu.QueueDevice(to, from, 4096, stream));
    REFUSED(cu.Queue2D(&flat, stream));
    REFUSED(cu.Queue3D(&box, stream));
    settle(current);
    REFUSED(cu.QueueOwn(to, from, 4096, NULL));
    EXPECT_EQ(cuStreamQuery(CU_STREAM_PER_THREAD), CUDA_ERROR_NOT_READY);
    REFUSED(cu.QueueToOwn(to, host, 4096, NULL));
    REFUSED(cu.QueueFromOwn(host, to, 4096, NULL));
    REFUSED(cu.QueueDeviceOwn(to, from, 4096, NULL));
    REFUSED(cu.Queue2DOwn(&flat, NULL));
    REFUSED(cu.Queue3DOwn(&box, NULL));
    settle(current);
    return refused;
}

/* Copies of cuMemAlloc's memory do not ask which device is current. */
TEST(each_copy_while_another_device_is_current)
{
    CUdeviceptr p, q, r;
    CUstream stream[2];
    int i, j;
    begin(2);
    stream[0] = stream_new();
    p = alloc(MiB);
    OK(cu.CtxSet(primary[1]));
    stream[1] = stream_new();
    q = alloc(MiB);
    r = alloc(MiB);
    for (i = 0; i < 2; i++)
        for (j = i; j < 2; j++) {
            OK(cu.CtxSet(primary[i]));
            EXPECT_EQ(copy_all(i, q, r, stream[j]), 0);
            if (i != j) continue;
            EXPECT_EQ(copy_all(i, p, q, stream[j]), 0); /* between devices, without peer access */
            EXPECT_EQ(copy_all(i, q, p, stream[j]), 0);
        }
    finish();
}

/* The bytes arrive where the program wants them. */
TEST(places_of_copies_while_another_device_is_current)
{
    CUdeviceptr p, q;
    CUDA_MEMCPY2D flat;
    CUDA_MEMCPY3D box;
    int i;
    begin(2);
    p = alloc(MiB);
    q = alloc(MiB);
    memset(&flat, 0, sizeof flat);
    memset(&box, 0, sizeof box);
    flat.srcMemoryType = flat.dstMemoryType = box.srcMemoryType = box.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    flat.srcDevice = box.srcDevice = p;
    flat.dstDevice = box.dstDevice = q;
    flat.srcPitch = box.srcPitch = 256;
    flat.dstPitch = box.dstPitch = 512;
    flat.srcXInBytes = box.srcXInBytes = 64;
    flat.dstXInBytes = box.dstXInBytes = 32;
    flat.srcY = box.srcY = 1;
    flat.dstY = box.dstY = 3;
    flat.WidthInBytes = box.WidthInBytes = 16;
    flat.Height = box.Height = 2;
    box.srcZ = 5;
    box.dstZ = 6;
    box.srcHeight = 10;
    box.dstHeight = 20;
    box.Depth = 2;
    for (i = 0; i < 2; i++) {
        CUstream stream = CU_STREAM_LEGACY;
        write_tag(stream, p, MiB, 1);
        write_tag(stream, q, MiB, 1);
        write_tag(stream, p + 256 + 64, 16, 2);
        write_tag(stream, p + 2 * 256 + 64, 16, 3);
        write_tag(stream, p + (6 * 10 + 2) * 256 + 64, 16, 4);
        settle(1);
        OK(i ? cu.Copy2D(&flat) : cu.Queue2D(&flat, stream));
        OK(i ? cu.Copy3D(&box) : cu.Queue3D(&box, stream));
        settle(0);
        check_tag(stream, q + 3 * 512 + 32, 16, 2);
        check_tag(stream, q + 4 * 512 + 32, 16, 3);
        check_tag(stream, q + 4 * 512 + 48, 16, 1);
        check_tag(stream, q + (7 * 20 + 4) * 512 + 32, 16, 4);
        settle(0);
    }
    finish();
}

TEST(captured_copies_while_another_device_is_current)
{
    CUdeviceptr p, q;
    CUstream stream;
    CUgraph graph = NULL;
    begin(2);
    OK(cu.CtxSet(primary[1]));
    stream = stream_new();
    p = alloc(MiB);
    q = alloc(MiB);
    write_tag(stream, p, MiB, 5);
    settle(0);
    OK(cu.Begin(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    OK(cu.QueueDevice(q, p, MiB, stream));
    OK(cu.End(stream, &graph));
    OK(cu.GraphDestroy(graph));
    finish();
}

/* The driver's limit of a row does not limit a copy. */
TEST(long_copies_while_another_device_is_current)
{
    sim_options options = options_of(2);
    CUdeviceptr p, q;
    options.memory = 8192 * MiB;
    begin_with(&options);
    p = alloc(2500 * MiB);
    q = alloc(2500 * MiB);
    write_tag(CU_STREAM_LEGACY, p, 2500 * MiB, 7);
    write_tag(CU_STREAM_LEGACY, q, 2500 * MiB, 8);
    settle(1);
    OK(cu.Queue(q, p, 2500 * MiB - 3, NULL));
    settle(0);
    check_tag(CU_STREAM_LEGACY, q, 2500 * MiB - 3, 7);
    check_tag(CU_STREAM_LEGACY, q + 2500 * MiB - 3, 3, 8);
    finish();
}

/* A copy that is wrong stays wrong, whichever device is current: an address that is nothing, memory that is not of the
   kind which the function's name says, a length beyond a block. Nothing of it is done. */
TEST(wrong_copies)
{
    static char host[4096];
    CUdeviceptr p, q, pages = 0, at_host = (CUdeviceptr)(uintptr_t)host;
    int i;
    sim_options options = options_of(2);
    options.memory = 8192 * MiB;
    begin_with(&options);
    p = alloc(MiB);
    q = alloc(3000 * MiB);
    OK(cuMemAddressReserve(&pages, 2 * MiB, 0, 0, 0));
    write_tag(CU_STREAM_LEGACY, q, 3000 * MiB, 8);
    write_tag(CU_STREAM_LEGACY, q + 1500 * MiB, 1500 * MiB, 9);
    for (i = 0; i < 2; i++) {
        settle(i);
        EXPECT_EQ(cu.CopyFrom(host, pages, 64), CUDA_ERROR_INVALID_VALUE);
        EXPECT_EQ(cu.CopyDevice(p, pages, 64), CUDA_ERROR_INVALID_VALUE);
        EXPECT_EQ(cu.Queue(pages, p, 64, NULL), CUDA_ERROR_INVALID_VALUE);
        EXPECT_EQ(cu.CopyDevice(p, at_host, 64), CUDA_ERROR_INVALID_VALUE);
        EXPECT_EQ(cu.QueueDevice(at_host, p, 64, NULL), CUDA_ERROR_INVALID_VALUE);
        EXPECT_EQ(cu.CopyTo(p, (const void *)(uintptr_t)q, 64), CUDA_ERROR_INVALID_VALUE);
        EXPECT_EQ(cu.CopyFrom((void *)(uintptr_t)q, p, 64), CUDA_ERROR_INVALID_VALUE);
        EXPECT_EQ(cu.Queue(q, q + 1500 * MiB, 2500 * MiB, NULL), CUDA_ERROR_INVALID_VALUE);
    }
    settle(0);
    sim_findings_clear(); /* of addresses that are nothing */
    check_tag(CU_STREAM_LEGACY, q, 1500 * MiB, 8);
    finish();
}

/* Pages that the program has mapped, and memory of its own pool, have no context. */
TEST(copies_between_galloc_and_pages_of_the_program)
{
    CUmemAllocationProp prop;
    CUmemAccessDesc access;
    CUmemGenericAllocationHandle page = 0;
    CUdeviceptr p, own = 0;
    int i;
    begin(2);
    p = alloc(MiB);
    memset(&prop, 0, sizeof prop);
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.location.id = 1;
    OK(cu.CreatePage(&page, 2 * MiB, &prop, 0));
    OK(cuMemAddressReserve(&own, 2 * MiB, 0, 0, 0));
    OK(cuMemMap(own, 2 * MiB, 0, page, 0));
    access.location = prop.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    OK(cuMemSetAccess(own, 2 * MiB, &access, 1));
    write_tag(CU_STREAM_LEGACY, p, MiB, 6);
    settle(1);
    OK(cu.CopyDevice(own, p, MiB));
    settle(1);
    check_tag(CU_STREAM_LEGACY, own, MiB, 6);
    OK(cu.QueueDevice(p, own, MiB, NULL));
    settle(1);
    for (i = 0; i < 2; i++) settle(i);
    finish();
}

/* ---- standing aside ---------------------------------------------------------------------------------------------- */

static void use_a_little(void)
{
    CUdeviceptr p = alloc(3 * MiB), q = alloc(3 * MiB);
    OK(cu.Free(p));
    OK(cu.Free(q));
}

static sim_options odd_device;
static void use_an_odd_device(void)
{
    begin_with(&odd_device);
    use_a_little();
}

static void stands_aside(const sim_options *options, const char *why)
{
    odd_device = *options;
    listen_to(use_an_odd_device);
    EXPECT_EQ(by_driver(), 2);
    EXPECT_EQ(sim_calls("cuMemFree"), 2);
    EXPECT_EQ(lines_said(), 1);
    if (!EXPECT(strstr(said, why))) printf("it said: %s", said);
    finish();
}

TEST(no_virtual_memory_management)
{
    sim_options options = options_of(1);
    options.vmm = 0;
    stands_aside(&options, "device 0 is left to CUDA: it has no virtual memory management");
}

TEST(segments_without_virtual_memory)
{
    sim_options options = options_of(1);
    options.vmm = 0;
    setenv("GALLOC_CONF", "expandable_segments:False", 1);
    begin_with(&options);
    listen_to(use_a_little);
    EXPECT_EQ(lines_said(), 0);
    EXPECT_EQ(by_driver(), 1); /* a segment */
    finish();
}

TEST(wrong_settings)
{
    sim_options options = options_of(1);
    setenv("GALLOC_CONF", "memory_limit:nonsense", 1);
    stands_aside(&options, "GALLOC_CONF");
}

TEST(old_driver)
{
    sim_options options = options_of(1);
    options.driver_version = 11080;
    stands_aside(&options, "older than 12.0");
}

/* ---- calls that fail --------------------------------------------------------------------------------------------- */

/* A program that allocates and frees in all ways. Returns the number of errors that it got other than `error`. */
static int wrong_errors, errors;
static int no_stream; /* 1: the call that fails says which stream it is: galloc then lacks memory for its state */
#define fails(result, error) fails_at(result, error, __LINE__)
static int fails_at(CUresult result, CUresult error, int line)
{
    errors += result != CUDA_SUCCESS;
    if (no_stream && result == CUDA_ERROR_OUT_OF_MEMORY) result = error;
    if (result != CUDA_SUCCESS && result != error) printf("line %d: error %d\n", line, (int)result);
    wrong_errors += result != CUDA_SUCCESS && result != error;
    return result != CUDA_SUCCESS;
}

static void program(CUresult error)
{
    CUdeviceptr p[6];
    CUstream stream = NULL;
    size_t left, total, pitch;
    int i;
    memset(p, 0, sizeof p);
    if (fails(cu.StreamCreate(&stream, CU_STREAM_NON_BLOCKING), error)) return;
    (void)fails(cu.Alloc(&p[0], 3 * MiB), error);
    (void)fails(cu.Alloc(&p[1], 100), error);
    (void)fails(cu.AllocAsync(&p[2], 40 * MiB, stream), error);
    (void)fails(cu.AllocPitch(&p[3], &pitch, 100, 100, 4), error);
    (void)fails(cu.Info(&left, &total), error);
    if (p[2]) write_on(stream, p[2], 40 * MiB);
    if (p[0]) write_on(stream, p[0], 3 * MiB);
    if (p[2] && !fails(cu.FreeAsync(p[2], stream), error)) p[2] = 0;
    (void)fails(cu.Alloc(&p[4], 40 * MiB), error);
    (void)fails(cu.AllocAsync(&p[5], 10 * MiB, stream), error);
    if (p[5]) write_on(stream, p[5], 10 * MiB);
    /* A free that has failed may be tried again. */
    for (i = 0; i < 6; i++)
        if (p[i] && fails(cu.Free(p[i]), error)) (void)fails(cu.Free(p[i]), error);
    if (fails(cu.StreamDestroy(stream), error)) (void)fails(cu.StreamDestroy(stream), error);
}

static const char *const callable[] = {
    "cuCtxGetId", "cuCtxGetDevice", "cuCtxSetCurrent", "cuCtxPushCurrent", "cuCtxSynchronize", "cuDeviceGetAttribute",
    "cuDeviceTotalMem", "cuDeviceGetCount", "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease",
    "cuDevicePrimaryCtxGetState", "cudaDeviceGetDefaultMemPool", "cuStreamCreate", "cuStreamQuery",
    "cuStreamSynchronize", "cuStreamGetCtx", "cuStreamGetId", "cuStreamIsCapturing", "cuStreamDestroy",
    "cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease", "cuMemGetInfo",
    "cuMemGetAllocationGranularity", "cuEventCreate", "cuEventRecord", "cuEventQuery", "cuMemAlloc", "cuMemFree",
    "cuMemAllocAsync", "cuMemFreeAsync"};

/* In a process of its own for each call: the nth call of one function fails. Returns whether there was such a call. */
static int one_fault(const char *function, long nth, CUresult error, int captured)
{
    int status = -1;
    CUstream stream = NULL;
    CUgraph graph = NULL;
    pid_t child;
    fflush(stdout);
    child = fork();
    if (!child) {
        test_failures = 0;
        setenv("GALLOC_CONF", "log:off", 1);
        begin(1);
        if (captured) OK(cu.Begin(stream = stream_new(), CU_STREAM_CAPTURE_MODE_RELAXED));
        if (!freopen("/dev/null", "w", stderr)) _exit(3); /* a device that is left to the driver is said to be */
        no_stream = !strcmp(function, "cuCtxGetId") || !strcmp(function, "cuStreamGetCtx");
        sim_fail(function, nth, 0, (int)error);
        program(error);
        if (!sim_failed()) _exit(2);
        sim_fail_clear();
        if (wrong_errors) printf("%s %ld: another error than the driver's\n", function, nth);
        if (errors > 2) printf("%s %ld: %d errors for one\n", function, nth, errors);
        wrong_errors += errors > 2;
        errors = 0;
        program(CUDA_SUCCESS);
        if (errors) printf("%s %ld: the program does not go on\n", function, nth);
        if (captured) OK(cu.End(stream, &graph));
        finish();
        _exit(wrong_errors || errors || test_failures);
    }
    if (waitpid(child, &status, 0) != child || !WIFEXITED(status)) status = 0x100;
    status = WIFEXITED(status) ? WEXITSTATUS(status) : 1;
    if (status != 2 && !EXPECT_EQ(status, 0)) printf("    at call %ld of %s\n", nth, function);
    return status != 2;
}

static void all_faults(int captured)
{
    static const CUresult codes[] = {CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_UNKNOWN};
    size_t i, c;
    long nth, hit = 0;
    for (c = 0; c < 2; c++)
        for (i = 0; i < sizeof callable / sizeof *callable; i++)
            for (nth = 1; nth < 30 && one_fault(callable[i], nth, codes[c], captured); nth++) hit++;
    printf("%ld calls failed in turn\n", hit);
    EXPECT(hit > 100);
}

TEST(each_call_fails) { all_faults(0); }

TEST(waits_that_fail_during_a_capture)
{
    long nth, hit = 0;
    for (nth = 1; nth < 30 && one_fault("cuMemHostAlloc", nth, CUDA_ERROR_UNKNOWN, 1); nth++) hit++;
    for (nth = 1; nth < 30 && one_fault("cuMemFreeHost", nth, CUDA_ERROR_UNKNOWN, 1); nth++) hit++;
    EXPECT(hit > 4);
}

/* ---- threads ----------------------------------------------------------------------------------------------------- */

static void *churn(void *arg)
{
    CUstream stream = NULL;
    CUdeviceptr p[8] = {0};
    unsigned random = (unsigned)(uintptr_t)arg;
    int i;
    OK(cu.CtxSet(primary[0]));
    OK(cu.StreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    for (i = 0; i < 300; i++) {
        unsigned at = (random = random * 1103515245 + 12345) >> 16 & 7;
        size_t bytes = 512 * (1 + (random >> 20 & 1023));
        if (p[at]) {
            if (random & 1 << 19) OK(cu.Free(p[at]));
            else OK(cu.FreeAsync(p[at], stream));
            p[at] = 0;
        } else {
            if (random & 1 << 19) OK(cu.Alloc(&p[at], bytes));
            else OK(cu.AllocAsync(&p[at], bytes, stream));
            write_on(stream, p[at], bytes);
        }
    }
    for (i = 0; i < 8; i++)
        if (p[i]) OK(cu.Free(p[i]));
    OK(cu.StreamDestroy(stream));
    return NULL;
}

TEST(threads)
{
    sim_options options = options_of(1);
    pthread_t thread[4];
    uintptr_t i;
    options.pace = SIM_PACE_RANDOM;
    begin_with(&options);
    for (i = 0; i < 4; i++) pthread_create(&thread[i], NULL, churn, (void *)(i + 1));
    for (i = 0; i < 4; i++) pthread_join(thread[i], NULL);
    EXPECT_EQ(by_driver(), 0);
    finish();
}

/* The line at the end: check_preload.sh reads it. */
TEST(report)
{
    begin(1);
    use_a_little();
    finish();
}

TEST_MAIN()
