/* galloc_preload.c - galloc as the allocator of a CUDA program that does not know it: cudaMalloc, cudaFree,
   cudaMallocAsync and cudaFreeAsync of an unmodified program.

   Build:  gcc -O2 -fPIC -shared -fvisibility=hidden -I<galloc> -I<cuda>/include galloc_preload.c \
               -o libgalloc_preload.so -lpthread -ldl
   Use:    LD_PRELOAD=/path/to/libgalloc_preload.so ./program     (README.md beside this file has the rest)

   A program reaches the driver, libcuda, in three ways: through the CUDA runtime, which nvcc links statically by
   default; through dlsym and cuGetProcAddress, as that runtime and many libraries do; or by linking libcuda. This file
   takes the place of the driver's memory functions in all three. It defines dlsym and cuGetProcAddress, which give the
   program the functions below in place of the driver's, and it exports them under the driver's names.

   galloc itself must reach the driver. It asks the CUDA runtime for the driver's functions; here a few functions of
   this file, hidden from the program, stand for the runtime, and give it the real ones. So the library needs no
   libcudart, and fits programs of any CUDA version from 12.0 on.

   What the functions promise is what CUDA promises:
   - Memory of cuMemAlloc may be used on every stream at once. It is allocated for a stream that has no work, the quiet
     stream, in a pool that queues no waits: galloc then gives only memory whose earlier work is complete.
   - cuMemFree waits for the device, and the memory then counts as freed on the quiet stream. GALLOC_PRELOAD_FREE=async
     does not wait, as a rule: the memory counts as freed on all streams of the device that the program has made.
   - cuMemAllocAsync and cuMemFreeAsync are ordered by their stream.

   The rest is left to the driver: other memory, explicit memory pools, captured streams, contexts that are not the
   primary one of their device, and devices that galloc cannot serve. */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* RTLD_NEXT, dlvsym */
#endif
#define GALLOC_STATIC /* a heap of its own: the program may contain a galloc, too */
#define GALLOC_IMPLEMENTATION
#define GALLOC_LOG(text) log_line(text)
static void log_line(const char *text);
#include "galloc.h"

#include <dlfcn.h>

#define HOOK __attribute__((visibility("default")))
#define HIDDEN __attribute__((visibility("hidden")))
#define MAX_DEVICES 64

/* ---- what the library says --------------------------------------------------------------------------------------- */

static __thread int inside; /* 1: this thread is in one of the hooks; what the driver calls then is left to it */
static __thread int trying; /* 1: a device is tried; one line says it all if that fails */
static char tried[4096];    /* what galloc said of that device; under the lock */

static void log_line(const char *text)
{
    size_t length = trying ? strlen(tried) : 0;
    if (trying) (void)snprintf(tried + length, sizeof tried - length, "galloc: %s\n", text);
    else (void)fprintf(stderr, "galloc: %s\n", text);
}

/* One line; a second one with the same number is not written. */
static void say_once(int number, const char *text)
{
    static int said;
    if (!(__atomic_fetch_or(&said, 1 << number, __ATOMIC_RELAXED) & 1 << number))
        (void)fprintf(stderr, "galloc_preload: %s\n", text);
}

/* Is a variable set to its one value? Says so if it has another, but for none and 0. */
static int environment_is(const char *name, const char *value)
{
    const char *text = getenv(name);
    int is = text && !strcmp(text, value);
    if (text && *text && !is && strcmp(text, "0"))
        (void)fprintf(stderr, "galloc_preload: %s=%s has no effect: its value is %s\n", name, text, value);
    return is;
}

/* ---- the functions of the driver that have a substitute ---------------------------------------------------------- */

/* A row: the name here, the name for cuGetProcAddress, the version of CUDA that this form came with, whether it is the
   form in which stream 0 is the per-thread default stream, the symbol of libcuda, and the arguments. Types that CUDA
   12.0 lacks, or that no line here looks into, are written as void * or int. */
#define HOOKS(X)                                                                                                       \
    X(look_up, "cuGetProcAddress", 11030, 0, "cuGetProcAddress", (const char *, void **, int, cuuint64_t))             \
    X(look_up_2, "cuGetProcAddress", 12000, 0, "cuGetProcAddress_v2",                                                  \
      (const char *, void **, int, cuuint64_t, void *))                                                                \
    X(alloc, "cuMemAlloc", 3020, 0, "cuMemAlloc_v2", (CUdeviceptr *, size_t))                                          \
    X(alloc_pitch, "cuMemAllocPitch", 3020, 0, "cuMemAllocPitch_v2",                                                   \
      (CUdeviceptr *, size_t *, size_t, size_t, unsigned int))                                                         \
    X(free_, "cuMemFree", 3020, 0, "cuMemFree_v2", (CUdeviceptr))                                                      \
    X(alloc_async, "cuMemAllocAsync", 11020, 0, "cuMemAllocAsync", (CUdeviceptr *, size_t, CUstream))                  \
    X(alloc_async_own, "cuMemAllocAsync", 11020, 1, "cuMemAllocAsync_ptsz", (CUdeviceptr *, size_t, CUstream))         \
    X(alloc_pool, "cuMemAllocFromPoolAsync", 11020, 0, "cuMemAllocFromPoolAsync",                                      \
      (CUdeviceptr *, size_t, CUmemoryPool, CUstream))                                                                 \
    X(alloc_pool_own, "cuMemAllocFromPoolAsync", 11020, 1, "cuMemAllocFromPoolAsync_ptsz",                             \
      (CUdeviceptr *, size_t, CUmemoryPool, CUstream))                                                                 \
    X(free_async, "cuMemFreeAsync", 11020, 0, "cuMemFreeAsync", (CUdeviceptr, CUstream))                               \
    X(free_async_own, "cuMemFreeAsync", 11020, 1, "cuMemFreeAsync_ptsz", (CUdeviceptr, CUstream))                      \
    X(mem_info, "cuMemGetInfo", 3020, 0, "cuMemGetInfo_v2", (size_t *, size_t *))                                      \
    X(address_range, "cuMemGetAddressRange", 3020, 0, "cuMemGetAddressRange_v2",                                       \
      (CUdeviceptr *, size_t *, CUdeviceptr))                                                                          \
    X(attribute, "cuPointerGetAttribute", 4000, 0, "cuPointerGetAttribute", (void *, int, CUdeviceptr))                \
    X(attributes, "cuPointerGetAttributes", 7000, 0, "cuPointerGetAttributes",                                         \
      (unsigned int, int *, void **, CUdeviceptr))                                                                     \
    X(ipc_handle, "cuIpcGetMemHandle", 4010, 0, "cuIpcGetMemHandle", (void *, CUdeviceptr))                            \
    X(pool_get, "cuMemPoolGetAttribute", 11020, 0, "cuMemPoolGetAttribute", (CUmemoryPool, int, void *))               \
    X(pool_set, "cuMemPoolSetAttribute", 11020, 0, "cuMemPoolSetAttribute", (CUmemoryPool, int, void *))               \
    X(pool_trim, "cuMemPoolTrimTo", 11020, 0, "cuMemPoolTrimTo", (CUmemoryPool, size_t))                               \
    X(pool_access, "cuMemPoolSetAccess", 11020, 0, "cuMemPoolSetAccess",                                               \
      (CUmemoryPool, const CUmemAccessDesc *, size_t))                                                                 \
    X(peer, "cuCtxEnablePeerAccess", 4000, 0, "cuCtxEnablePeerAccess", (CUcontext, unsigned int))                      \
    X(create_page, "cuMemCreate", 10020, 0, "cuMemCreate",                                                             \
      (CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long))                       \
    X(alloc_managed, "cuMemAllocManaged", 6000, 0, "cuMemAllocManaged", (CUdeviceptr *, size_t, unsigned int))         \
    X(create_array, "cuArrayCreate", 3020, 0, "cuArrayCreate_v2", (void *, const void *))                              \
    X(create_array_3d, "cuArray3DCreate", 3020, 0, "cuArray3DCreate_v2", (void *, const void *))                       \
    X(create_mipmap, "cuMipmappedArrayCreate", 5000, 0, "cuMipmappedArrayCreate",                                      \
      (void *, const void *, unsigned int))                                                                            \
    X(stream_create, "cuStreamCreate", 2000, 0, "cuStreamCreate", (CUstream *, unsigned int))                          \
    X(stream_create_at, "cuStreamCreateWithPriority", 5050, 0, "cuStreamCreateWithPriority",                           \
      (CUstream *, unsigned int, int))                                                                                 \
    X(stream_create_green, "cuGreenCtxStreamCreate", 12050, 0, "cuGreenCtxStreamCreate",                               \
      (CUstream *, void *, unsigned int, int))                                                                         \
    X(stream_destroy, "cuStreamDestroy", 4000, 0, "cuStreamDestroy_v2", (CUstream))                                    \
    X(capture_1, "cuStreamBeginCapture", 10000, 0, "cuStreamBeginCapture", (CUstream))                                 \
    X(capture_1_own, "cuStreamBeginCapture", 10000, 1, "cuStreamBeginCapture_ptsz", (CUstream))                        \
    X(capture, "cuStreamBeginCapture", 10010, 0, "cuStreamBeginCapture_v2", (CUstream, CUstreamCaptureMode))           \
    X(capture_own, "cuStreamBeginCapture", 10010, 1, "cuStreamBeginCapture_v2_ptsz", (CUstream, CUstreamCaptureMode))  \
    X(capture_to, "cuStreamBeginCaptureToGraph", 12030, 0, "cuStreamBeginCaptureToGraph",                              \
      (CUstream, CUgraph, const CUgraphNode *, const void *, size_t, CUstreamCaptureMode))                             \
    X(capture_to_own, "cuStreamBeginCaptureToGraph", 12030, 1, "cuStreamBeginCaptureToGraph_ptsz",                     \
      (CUstream, CUgraph, const CUgraphNode *, const void *, size_t, CUstreamCaptureMode))                             \
    X(capture_end, "cuStreamEndCapture", 10000, 0, "cuStreamEndCapture", (CUstream, CUgraph *))                        \
    X(capture_end_own, "cuStreamEndCapture", 10000, 1, "cuStreamEndCapture_ptsz", (CUstream, CUgraph *))               \
    X(context_destroy, "cuCtxDestroy", 4000, 0, "cuCtxDestroy_v2", (CUcontext))                                        \
    X(green_destroy, "cuGreenCtxDestroy", 12040, 0, "cuGreenCtxDestroy", (void *))                                     \
    COPY_HOOKS(X)

/* Copies, in both forms. */
#define COPY_HOOKS(X)                                                                                                  \
    X(copy_any, "cuMemcpy", 4000, 0, "cuMemcpy", (CUdeviceptr, CUdeviceptr, size_t))                                   \
    X(copy_any_own, "cuMemcpy", 7000, 1, "cuMemcpy_ptds", (CUdeviceptr, CUdeviceptr, size_t))                          \
    X(copy_to, "cuMemcpyHtoD", 3020, 0, "cuMemcpyHtoD_v2", (CUdeviceptr, const void *, size_t))                        \
    X(copy_to_own, "cuMemcpyHtoD", 7000, 1, "cuMemcpyHtoD_v2_ptds", (CUdeviceptr, const void *, size_t))               \
    X(copy_from, "cuMemcpyDtoH", 3020, 0, "cuMemcpyDtoH_v2", (void *, CUdeviceptr, size_t))                            \
    X(copy_from_own, "cuMemcpyDtoH", 7000, 1, "cuMemcpyDtoH_v2_ptds", (void *, CUdeviceptr, size_t))                   \
    X(copy_device, "cuMemcpyDtoD", 3020, 0, "cuMemcpyDtoD_v2", (CUdeviceptr, CUdeviceptr, size_t))                     \
    X(copy_device_own, "cuMemcpyDtoD", 7000, 1, "cuMemcpyDtoD_v2_ptds", (CUdeviceptr, CUdeviceptr, size_t))            \
    X(copy_2d, "cuMemcpy2D", 3020, 0, "cuMemcpy2D_v2", (const CUDA_MEMCPY2D *))                                        \
    X(copy_2d_own, "cuMemcpy2D", 7000, 1, "cuMemcpy2D_v2_ptds", (const CUDA_MEMCPY2D *))                               \
    X(copy_rows, "cuMemcpy2DUnaligned", 3020, 0, "cuMemcpy2DUnaligned_v2", (const CUDA_MEMCPY2D *))                    \
    X(copy_rows_own, "cuMemcpy2DUnaligned", 7000, 1, "cuMemcpy2DUnaligned_v2_ptds", (const CUDA_MEMCPY2D *))           \
    X(copy_3d, "cuMemcpy3D", 3020, 0, "cuMemcpy3D_v2", (const CUDA_MEMCPY3D *))                                        \
    X(copy_3d_own, "cuMemcpy3D", 7000, 1, "cuMemcpy3D_v2_ptds", (const CUDA_MEMCPY3D *))                               \
    X(queue_any, "cuMemcpyAsync", 4000, 0, "cuMemcpyAsync", (CUdeviceptr, CUdeviceptr, size_t, CUstream))              \
    X(queue_any_own, "cuMemcpyAsync", 7000, 1, "cuMemcpyAsync_ptsz", (CUdeviceptr, CUdeviceptr, size_t, CUstream))     \
    X(queue_to, "cuMemcpyHtoDAsync", 3020, 0, "cuMemcpyHtoDAsync_v2", (CUdeviceptr, const void *, size_t, CUstream))   \
    X(queue_to_own, "cuMemcpyHtoDAsync", 7000, 1, "cuMemcpyHtoDAsync_v2_ptsz",                                         \
      (CUdeviceptr, const void *, size_t, CUstream))                                                                   \
    X(queue_from, "cuMemcpyDtoHAsync", 3020, 0, "cuMemcpyDtoHAsync_v2", (void *, CUdeviceptr, size_t, CUstream))       \
    X(queue_from_own, "cuMemcpyDtoHAsync", 7000, 1, "cuMemcpyDtoHAsync_v2_ptsz",                                       \
      (void *, CUdeviceptr, size_t, CUstream))                                                                         \
    X(queue_device, "cuMemcpyDtoDAsync", 3020, 0, "cuMemcpyDtoDAsync_v2",                                              \
      (CUdeviceptr, CUdeviceptr, size_t, CUstream))                                                                    \
    X(queue_device_own, "cuMemcpyDtoDAsync", 7000, 1, "cuMemcpyDtoDAsync_v2_ptsz",                                     \
      (CUdeviceptr, CUdeviceptr, size_t, CUstream))                                                                    \
    X(queue_2d, "cuMemcpy2DAsync", 3020, 0, "cuMemcpy2DAsync_v2", (const CUDA_MEMCPY2D *, CUstream))                   \
    X(queue_2d_own, "cuMemcpy2DAsync", 7000, 1, "cuMemcpy2DAsync_v2_ptsz", (const CUDA_MEMCPY2D *, CUstream))          \
    X(queue_3d, "cuMemcpy3DAsync", 3020, 0, "cuMemcpy3DAsync_v2", (const CUDA_MEMCPY3D *, CUstream))                   \
    X(queue_3d_own, "cuMemcpy3DAsync", 7000, 1, "cuMemcpy3DAsync_v2_ptsz", (const CUDA_MEMCPY3D *, CUstream))

/* Functions that are only called. */
#define CALLS(X)                                                                                                       \
    X(CtxGetCurrent, (CUcontext *))                                                                                    \
    X(CtxSetCurrent, (CUcontext))                                                                                      \
    X(CtxPushCurrent, (CUcontext))                                                                                     \
    X(CtxPopCurrent, (CUcontext *))                                                                                    \
    X(CtxGetDevice, (CUdevice *))                                                                                      \
    X(CtxGetId, (CUcontext, unsigned long long *))                                                                     \
    X(CtxSynchronize, (void))                                                                                          \
    X(DevicePrimaryCtxRetain, (CUcontext *, CUdevice))                                                                 \
    X(DevicePrimaryCtxRelease, (CUdevice))                                                                             \
    X(DevicePrimaryCtxGetState, (CUdevice, unsigned int *, int *))                                                     \
    X(DeviceGetAttribute, (int *, CUdevice_attribute, CUdevice))                                                       \
    X(DeviceTotalMem, (size_t *, CUdevice))                                                                            \
    X(DeviceGetDefaultMemPool, (CUmemoryPool *, CUdevice))                                                             \
    X(DeviceGetMemPool, (CUmemoryPool *, CUdevice))                                                                    \
    X(EventCreate, (CUevent *, unsigned int))                                                                          \
    X(EventRecord, (CUevent, CUstream))                                                                                \
    X(EventDestroy, (CUevent))                                                                                         \
    X(StreamQuery, (CUstream))                                                                                         \
    X(StreamSynchronize, (CUstream))                                                                                   \
    X(StreamGetCtx, (CUstream, CUcontext *))                                                                           \
    X(StreamIsCapturing, (CUstream, CUstreamCaptureStatus *))                                                          \
    X(ThreadExchangeStreamCaptureMode, (CUstreamCaptureMode *))                                                        \
    X(Memcpy3DPeer, (const CUDA_MEMCPY3D_PEER *))                                                                      \
    X(Memcpy3DPeerAsync, (const CUDA_MEMCPY3D_PEER *, CUstream))                                                       \
    X(MemHostAlloc, (void **, size_t, unsigned int))                                                                   \
    X(MemFreeHost, (void *))                                                                                           \
    X(MemSetAccess, (CUdeviceptr, size_t, const CUmemAccessDesc *, size_t))                                            \
    X(GetErrorString, (CUresult, const char **))

#define PROTOTYPE(id, name, since, own, symbol, arguments) HOOK CUresult CUDAAPI on_##id arguments __asm__(symbol);
HOOKS(PROTOTYPE)

#define POINTER(id, name, since, own, symbol, arguments) CUresult(CUDAAPI *id) arguments;
static struct {
    HOOKS(POINTER)
} real; /* the driver's; a function that it does not have is NULL, and then no program gets its substitute */

#define CALL_POINTER(name, arguments) CUresult(CUDAAPI *name) arguments;
static struct {
    CALLS(CALL_POINTER)
} cu;

/* A function and its substitute. `symbol` is what libcuda exports, `entry` what cuGetProcAddress gives; a newer form of
   the function has another entry, and is left alone. */
typedef struct hook {
    const char *name, *symbol;
    int since, own;
    void (*substitute)(void);
    void *entry;
    void **real;
} hook;

#define ROW(id, name, since, own, symbol, arguments) \
    {name, symbol, since, own, (void (*)(void))on_##id, NULL, (void **)(void *)&real.id},
static hook hooks[] = {HOOKS(ROW)};
#define HOOK_COUNT (sizeof hooks / sizeof *hooks)

/* ---- finding the driver ------------------------------------------------------------------------------------------ */

typedef void *look_up_symbol(void *library, const char *name);
static look_up_symbol *real_dlsym;
static pthread_once_t driver_once = PTHREAD_ONCE_INIT;
static int driver_found; /* 1: `real` and `cu` are filled, and devices may be served */
static int served;       /* 1: galloc serves a device */
static int met;          /* 1: the program has a context */
static int forked;       /* 1: a child made by fork of such a process: CUDA does not work in it */

/* The C library's dlsym. Its versions: of glibc 2.34, of x86-64, of aarch64. */
static look_up_symbol *find_dlsym(void)
{
    static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.2.5", "GLIBC_2.17"};
    look_up_symbol *found = __atomic_load_n(&real_dlsym, __ATOMIC_ACQUIRE);
    size_t i;
    for (i = 0; !found && i < sizeof versions / sizeof *versions; i++) {
        void *symbol = dlvsym(RTLD_NEXT, "dlsym", versions[i]);
        memcpy(&found, &symbol, sizeof found);
    }
    if (found) __atomic_store_n(&real_dlsym, found, __ATOMIC_RELEASE);
    return found;
}

/* What the driver's cuGetProcAddress gives, in the form of a version of CUDA; NULL: it has no such function. */
static void *entry_of(const char *name, int version, int own)
{
    cuuint64_t flags = own ? 2 : 1; /* stream 0 is the per-thread stream, the legacy stream */
    void *entry = NULL;
    int status = 0;
    CUresult result = real.look_up_2 ? real.look_up_2(name, &entry, version, flags, &status)
        : real.look_up               ? real.look_up(name, &entry, version, flags)
                                     : CUDA_ERROR_NOT_FOUND;
    return result ? NULL : entry;
}

static void forked_child(void);

#define FIND_CALL(name, arguments) found = entry_of("cu" #name, 12000, 0), memcpy(&cu.name, &found, sizeof cu.name);

/* Fills the tables. The program has loaded the driver, or is linked with it. */
static void find_driver(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD), *found;
    look_up_symbol *look_up = find_dlsym();
    size_t i;
    if (!library) library = dlopen("libcuda.so.1", RTLD_LAZY);
    if (!library || !look_up) return;
    for (i = 0; i < HOOK_COUNT; i++) *hooks[i].real = look_up(library, hooks[i].symbol);
    for (i = 0; i < HOOK_COUNT; i++) hooks[i].entry = entry_of(hooks[i].name, hooks[i].since, hooks[i].own);
    CALLS(FIND_CALL)
    if (!cu.CtxGetId || !real.look_up_2) {
        say_once(0, "the CUDA driver is older than 12.0: memory is left to it");
        return;
    }
    if (!pthread_atfork(NULL, NULL, forked_child)) driver_found = 1;
}

static int find_hooks(void)
{
    (void)pthread_once(&driver_once, find_driver);
    return real.look_up || real.look_up_2;
}

/* The substitute of a function that cuGetProcAddress has given, or the function itself. */
static void *substitute(const char *name, void *entry)
{
    void *to = entry;
    size_t i;
    for (i = 0; i < HOOK_COUNT; i++)
        if ((entry == hooks[i].entry || entry == *hooks[i].real) && !strcmp(hooks[i].name, name))
            memcpy(&to, &hooks[i].substitute, sizeof to);
    return to;
}

/* The driver's own function. */
#define DRIVER(id, arguments) (find_hooks() && real.id ? real.id arguments : CUDA_ERROR_NOT_INITIALIZED)

CUresult CUDAAPI on_look_up(const char *name, void **function, int version, cuuint64_t flags)
{
    CUresult result = DRIVER(look_up, (name, function, version, flags));
    if (!result && name && function && *function) *function = substitute(name, *function);
    return result;
}

CUresult CUDAAPI on_look_up_2(const char *name, void **function, int version, cuuint64_t flags, void *status)
{
    CUresult result = DRIVER(look_up_2, (name, function, version, flags, status));
    if (!result && name && function && *function) *function = substitute(name, *function);
    return result;
}

/* The row of a symbol of the driver, or NULL. */
static const hook *hook_of_symbol(const char *symbol)
{
    size_t i;
    if (symbol[0] != 'c' || symbol[1] != 'u') return NULL;
    for (i = 0; i < HOOK_COUNT; i++)
        if (!strcmp(hooks[i].symbol, symbol)) return &hooks[i];
    return NULL;
}

/* What the program gets for such a symbol. One that is nowhere else stays missing, though this library has it. */
static void *symbol_for_program(void *library, const hook *h)
{
    void *volatile found = real_dlsym(library, h->symbol); /* volatile: a call, no jump, so that this library asks */
    void *to;
    memcpy(&to, &h->substitute, sizeof to);
    if (found && find_hooks() && *h->real) return to;
    if (found == to) found = real_dlsym(RTLD_NEXT, h->symbol);
    return found;
}

#if defined(__has_attribute)
#if __has_attribute(musttail)
#define JUMP __attribute__((musttail)) return
#endif
#endif
#ifndef JUMP
#define JUMP return
#endif

/* The program's dlsym. RTLD_NEXT goes by who calls, that is by the return address; so the C library's function must be
   jumped to and not called, which gcc does at -O2. */
#if defined(__GNUC__) && !defined(__clang__)
__attribute__((optimize("O2")))
#endif
HOOK void *dlsym(void *library, const char *name)
{
    const hook *h;
    if (!find_dlsym()) return NULL;
    h = hook_of_symbol(name);
    if (h) return symbol_for_program(library, h);
    JUMP real_dlsym(library, name);
}

/* ---- what galloc asks of the CUDA runtime ------------------------------------------------------------------------ */

/* Gives galloc the driver's own functions. */
static cudaError_t give_entry(const char *name, void **function, unsigned version,
                              enum cudaDriverEntryPointQueryResult *status)
{
    *function = entry_of(name, (int)version, 0);
    *status = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

#if CUDART_VERSION >= 12050
HIDDEN cudaError_t CUDARTAPI cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned int version,
                                                              unsigned long long flags,
                                                              enum cudaDriverEntryPointQueryResult *status)
{
    (void)flags;
    return give_entry(name, function, version, status);
}
#else
HIDDEN cudaError_t CUDARTAPI cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags,
                                                     enum cudaDriverEntryPointQueryResult *status)
{
    (void)flags;
    return give_entry(name, function, CUDART_VERSION, status);
}
#endif

/* The hooks leave no error in the program's runtime, since they do not call it. */
HIDDEN cudaError_t CUDARTAPI cudaGetLastError(void) { return cudaSuccess; }
HIDDEN cudaError_t CUDARTAPI cudaPeekAtLastError(void) { return cudaSuccess; }

HIDDEN const char *CUDARTAPI cudaGetErrorString(cudaError_t error)
{
    const char *text = NULL;
    if (error == cudaErrorInsufficientDriver) return "the CUDA driver is too old";
    return cu.GetErrorString && !cu.GetErrorString((CUresult)error, &text) && text ? text : "unknown error";
}

HIDDEN cudaError_t CUDARTAPI cudaGetDevice(int *device)
{
    CUcontext context = NULL;
    CUresult result = cu.CtxGetCurrent(&context);
    *device = 0;
    return (cudaError_t)(result || !context ? result : cu.CtxGetDevice(device));
}

HIDDEN cudaError_t CUDARTAPI cudaSetDevice(int device)
{
    CUcontext context = NULL;
    CUresult result = cu.DevicePrimaryCtxRetain(&context, device);
    return (cudaError_t)(result ? result : cu.CtxSetCurrent(context));
}

/* ---- devices ----------------------------------------------------------------------------------------------------- */

enum { UNSEEN, SERVED, ASIDE };

typedef struct unfreed {
    struct unfreed *next;
    void *p;
} unfreed;

typedef struct device {
    int state;                     /* UNSEEN: no allocation yet; ASIDE: left to the driver */
    int ordinal;
    CUcontext context;             /* its primary context */
    unsigned long long context_id; /* cudaDeviceReset changes it, and ends the quiet stream */
    CUstream quiet;                /* has no work, so that what is free for it is free for every stream */
    CUmemoryPool driver_pool;      /* the driver's default pool, in whose place galloc stands; NULL: there is none */
    galloc_pool *pool;
    size_t limit;                  /* the most that the pool may hold */
    uint64_t peers;                /* bit mask of the devices that may use the memory, too */
    uint64_t allocations, frees;   /* that galloc served */
    struct unfreed *unfreed;       /* blocks that nobody has: the context had failed when they were to be freed */
    uint64_t orphans, waited;      /* times that work lost its stream; as many of them as a wait has covered */
    /* galloc's counters are reset when the program resets one of the default pool. From before: */
    uint64_t reserved_high, used_high; /* since the program's last reset of each */
    uint64_t most_reserved, most_used; /* ever */
    uint64_t driver_calls;
} device;

static device devices[MAX_DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of devices that are opened, of their peers and peaks */
static uint64_t left_to_driver;                          /* allocations */
static uint32_t tags;                                    /* of blocks, for cuPointerGetAttribute */

/* Another context made current, and capture mode relaxed, in which no call harms a capture that is under way. */
typedef struct scope {
    int pushed;
    CUstreamCaptureMode mode;
} scope;

static CUresult scope_enter(scope *s, CUcontext context)
{
    CUcontext current = NULL;
    CUresult result = cu.CtxGetCurrent(&current);
    s->pushed = !result && current != context;
    if (s->pushed) result = cu.CtxPushCurrent(context);
    if (result) return result;
    s->mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    (void)cu.ThreadExchangeStreamCaptureMode(&s->mode);
    return CUDA_SUCCESS;
}

static void scope_leave(scope *s)
{
    CUcontext context;
    (void)cu.ThreadExchangeStreamCaptureMode(&s->mode);
    if (s->pushed) (void)cu.CtxPopCurrent(&context);
}

/* The runtime's errors have the numbers of the driver's, but for one. */
static CUresult as_driver(cudaError_t error)
{
    return error == cudaErrorInvalidDevicePointer ? CUDA_ERROR_INVALID_VALUE : (CUresult)(int)error;
}

/* on_map of the pool: what cudaMalloc gives, devices with peer access can use. */
static void give_access(galloc_pool *pool, void *addr, size_t bytes, void *user)
{
    const device *d = (const device *)user;
    uint64_t peers = __atomic_load_n(&d->peers, __ATOMIC_RELAXED);
    CUmemAccessDesc access;
    int i;
    (void)pool;
    memset(&access, 0, sizeof access);
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    for (i = 0; i < MAX_DEVICES; i++) {
        access.location.id = i;
        if (peers >> i & 1 && cu.MemSetAccess((CUdeviceptr)(uintptr_t)addr, bytes, &access, 1))
            say_once(1, "cuMemSetAccess failed: a peer device cannot use some of the memory");
    }
}

enum { BY_PAGES, AS_CUDA_MALLOC, NEVER }; /* how a peer comes to use a pool's memory */

static int reach_of(const device *d)
{
    galloc_config config;
    if (galloc_pool_config(d->pool, &config) || config.backend == GALLOC_BACKEND_CUDA_MALLOC_ASYNC) return NEVER;
    return config.backend == GALLOC_BACKEND_CUDA_MALLOC || !config.expandable_segments ? AS_CUDA_MALLOC : BY_PAGES;
}

static void say_never(void)
{
    say_once(3, "with GALLOC_CONF=backend:cudaMallocAsync peer devices cannot use the memory");
}

/* Lets the pool tell give_access of all memory, present and new. Memory of cudaMalloc follows the driver's own peer
   access. The caller holds the lock. */
static CUresult tell_peers(device *d)
{
    galloc_callbacks callbacks;
    int reach = d->peers ? reach_of(d) : AS_CUDA_MALLOC;
    if (reach == NEVER) say_never();
    if (reach != BY_PAGES) return CUDA_SUCCESS;
    memset(&callbacks, 0, sizeof callbacks);
    callbacks.on_map = give_access;
    callbacks.user = d;
    return as_driver(galloc_pool_set_callbacks(d->pool, &callbacks));
}

static CUresult add_peers(device *d, uint64_t peers)
{
    CUresult result = CUDA_SUCCESS;
    (void)pthread_mutex_lock(&lock);
    if (peers & ~d->peers) {
        uint64_t before = d->peers;
        __atomic_store_n(&d->peers, before | peers, __ATOMIC_RELAXED);
        if (d->state == SERVED) result = tell_peers(d);
        if (result) __atomic_store_n(&d->peers, before, __ATOMIC_RELAXED);
    }
    (void)pthread_mutex_unlock(&lock);
    return result;
}

/* Makes the pool of a device, with the settings of the default pool, which GALLOC_CONF has. Returns what prevents it,
   or NULL. */
static const char *make_pool(device *d)
{
    const char *conf = getenv("GALLOC_CONF");
    galloc_config config;
    size_t total = 0;
    int pages = 0;
    if (cu.DeviceGetAttribute(&pages, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, d->ordinal)) pages = 0;
    if (!pages && !(conf && (strstr(conf, "expandable_segments") || strstr(conf, "backend"))))
        return "it has no virtual memory management (GALLOC_CONF=expandable_segments:False does without)";
    if (galloc_pool_default(&d->pool, d->ordinal) || galloc_pool_config(d->pool, &config)) return galloc_last_message();
    config.reuse &= ~GALLOC_REUSE_WAIT; /* a wait on the quiet stream says nothing to the stream that uses the memory */
    config.gpu_direct_rdma = 1;         /* as memory of cudaMalloc */
    if (galloc_pool_create(&d->pool, &config)) return galloc_last_message();
    if (cu.DeviceTotalMem(&total, d->ordinal)) total = SIZE_MAX;
    d->limit = (size_t)(config.per_process_memory_fraction * (double)total);
    if (d->limit > config.memory_limit) d->limit = config.memory_limit;
    if (d->limit > config.device_limit) d->limit = config.device_limit;
    return NULL;
}

/* In a context that has failed no block can be freed before the reset. Without host memory the block stays held. */
static void free_later(device *d, void *p)
{
    unfreed *u = (unfreed *)malloc(sizeof *u);
    if (!u) return;
    u->p = p;
    u->next = __atomic_load_n(&d->unfreed, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(&d->unfreed, &u->next, u, 1, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) continue;
}

static void free_unfreed(device *d, CUstream stream)
{
    unfreed *u = __atomic_exchange_n(&d->unfreed, NULL, __ATOMIC_ACQUIRE);
    while (u) {
        unfreed *next = u->next;
        if (galloc_free(u->p, stream)) free_later(d, u->p);
        free(u);
        u = next;
    }
}

/* Makes the quiet stream, and finds the default pool, for the first time or after a reset. */
static CUresult make_quiet(device *d)
{
    CUstream stream = NULL;
    unsigned long long id = 0;
    scope s;
    CUresult result = scope_enter(&s, d->context);
    if (result) return result;
    result = cu.CtxGetId(d->context, &id);
    if (!result) result = real.stream_create(&stream, CU_STREAM_NON_BLOCKING);
    scope_leave(&s);
    if (result) return result;
    if (cu.DeviceGetDefaultMemPool && cu.DeviceGetDefaultMemPool(&d->driver_pool, d->ordinal)) d->driver_pool = NULL;
    __atomic_store_n(&d->quiet, stream, __ATOMIC_RELAXED);
    __atomic_store_n(&d->context_id, id, __ATOMIC_RELEASE);
    free_unfreed(d, stream);
    return CUDA_SUCCESS;
}

/* Opens a device, whose primary context is given. The caller holds the lock. */
static CUresult open_device(device *d, CUcontext context)
{
    const char *obstacle;
    CUresult result;
    d->context = context;
    result = make_quiet(d);
    if (result) return result;
    tried[0] = 0;
    trying = 1;
    obstacle = make_pool(d);
    trying = 0;
    if (!obstacle) (void)fputs(tried, stderr);
    if (obstacle)
        (void)fprintf(stderr, "galloc_preload: device %d is left to CUDA: %s\n", d->ordinal, obstacle);
    else (void)tell_peers(d);
    served |= !obstacle;
    __atomic_store_n(&d->state, obstacle ? ASIDE : SERVED, __ATOMIC_RELEASE);
    return CUDA_SUCCESS;
}

/* The primary context of a device, or NULL. */
static CUcontext primary_of(int ordinal)
{
    CUcontext context = NULL;
    unsigned int flags;
    int active = 0;
    if (cu.DevicePrimaryCtxGetState(ordinal, &flags, &active) || !active) return NULL;
    if (cu.DevicePrimaryCtxRetain(&context, ordinal)) return NULL;
    (void)cu.DevicePrimaryCtxRelease(ordinal);
    return context;
}

static CUresult ordinal_of(CUcontext context, int *ordinal)
{
    scope s;
    CUresult result = scope_enter(&s, context);
    if (result) return result;
    result = cu.CtxGetDevice(ordinal);
    scope_leave(&s);
    return result;
}

/* Whether this is still the context that had the id. */
static CUresult look_at(CUcontext context, unsigned long long id, int *alive)
{
    unsigned long long now = 0;
    CUresult result = cu.CtxGetId(context, &now);
    *alive = !result && now == id;
    return result == CUDA_ERROR_CONTEXT_IS_DESTROYED || result == CUDA_ERROR_INVALID_CONTEXT ? CUDA_SUCCESS : result;
}

/* ---- the end of contexts ----------------------------------------------------------------------------------------- */

/* While a context ends, no other thread may be in a call of galloc, which may be about to use its events. So a call
   that ends a context waits until no thread is in a hook, and meanwhile none comes in. */
enum { GATES = 64 };

static struct {
    _Alignas(64) int inside; /* threads in hooks */
} gates[GATES];

static int ending;                                            /* 1: no thread comes in */
static pthread_mutex_t end_lock = PTHREAD_MUTEX_INITIALIZER; /* of contexts that end, one after the other */

static int *own_gate(void)
{
    static int threads;
    static __thread int number; /* of the thread's gate, from 1 on */
    if (!number) number = 1 + (int)((unsigned)__atomic_fetch_add(&threads, 1, __ATOMIC_RELAXED) % GATES);
    return &gates[number - 1].inside;
}

/* No cancellation point, as cuMemAlloc is none. */
static void rest(void)
{
    static const struct timespec moment = { 0, 50000 };
    int cancels;
    (void)pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancels);
    (void)nanosleep(&moment, NULL);
    (void)pthread_setcancelstate(cancels, &cancels);
}

static void go_out(void) { (void)__atomic_sub_fetch(own_gate(), 1, __ATOMIC_SEQ_CST); }

static void come_in(void)
{
    for (;;) {
        (void)__atomic_add_fetch(own_gate(), 1, __ATOMIC_SEQ_CST);
        if (!__atomic_load_n(&ending, __ATOMIC_SEQ_CST)) return;
        go_out();
        rest();
    }
}

static int anybody_is_in(void)
{
    int i;
    for (i = 0; i < GATES && !__atomic_load_n(&gates[i].inside, __ATOMIC_SEQ_CST); i++) continue;
    return i < GATES;
}

/* A thread in a hook may wait for the device, and that for a thread that has to come in; so all may now and then.
   After a second the context ends all the same, since that wait may be for its end. */
static void close_gates(void)
{
    int tries = 10, left;
    (void)pthread_mutex_lock(&end_lock);
    while (tries-- > 0) {
        __atomic_store_n(&ending, 1, __ATOMIC_SEQ_CST);
        for (left = 1000; left > 0 && anybody_is_in(); left--) rest();
        if (left) return;
        __atomic_store_n(&ending, 0, __ATOMIC_SEQ_CST);
        rest();
    }
}

static void open_gates(void)
{
    __atomic_store_n(&ending, 0, __ATOMIC_SEQ_CST);
    (void)pthread_mutex_unlock(&end_lock);
}

/* ---- other contexts ---------------------------------------------------------------------------------------------- */

/* Those of the program that are not the primary one of their device: their work may use galloc's memory, and no stream
   of the primary context is ordered with it. */
typedef struct known_context {
    CUcontext context;
    unsigned long long id;
    int ordinal;
} known_context;

static pthread_mutex_t stream_lock = PTHREAD_MUTEX_INITIALIZER; /* of these, of streams, and of work without a stream */
static known_context *known_contexts;
static size_t context_count, context_room;

static int known_overflow; /* 1: no host memory for one of all these, or no answer about it, so that free must wait */

/* Another thread may have held the locks, so the child gets new ones. What they guard is of use at any moment. */
static void forked_child(void)
{
    forked = __atomic_load_n(&met, __ATOMIC_RELAXED);
    lock = stream_lock = end_lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    memset(gates, 0, sizeof gates);
    ending = 0;
}

/* Takes note of a context; the caller may give any. */
static void know_context(CUcontext context)
{
    unsigned long long id = 0;
    int ordinal = -1;
    size_t i;
    if (cu.CtxGetId(context, &id) || ordinal_of(context, &ordinal) || primary_of(ordinal) == context) return;
    (void)pthread_mutex_lock(&stream_lock);
    for (i = 0; i < context_count && known_contexts[i].id != id; i++) continue;
    if (i == context_room) {
        size_t room = context_room ? 2 * context_room : 16;
        known_context *more = (known_context *)realloc(known_contexts, room * sizeof *more);
        if (more) known_contexts = more, context_room = room;
        else known_overflow = 1;
    }
    if (i == context_count && i < context_room) {
        known_context *c = &known_contexts[context_count++];
        c->context = context;
        c->id = id;
        c->ordinal = ordinal;
    }
    (void)pthread_mutex_unlock(&stream_lock);
}

/* ---- from a context to its device -------------------------------------------------------------------------------- */

/* The device of a context that was not met before, or whose device was reset. */
static CUresult meet(CUcontext context, device **found)
{
    int ordinal = -1;
    CUresult result = ordinal_of(context, &ordinal);
    device *d;
    *found = NULL;
    __atomic_store_n(&met, 1, __ATOMIC_RELAXED);
    if (result || ordinal < 0 || ordinal >= MAX_DEVICES) return CUDA_SUCCESS; /* the driver knows what is wrong */
    d = &devices[ordinal];
    if (__atomic_load_n(&d->state, __ATOMIC_ACQUIRE) == ASIDE) return CUDA_SUCCESS;
    if (primary_of(ordinal) != context) return know_context(context), CUDA_SUCCESS;
    (void)pthread_mutex_lock(&lock);
    d->ordinal = ordinal;
    if (d->state == UNSEEN) {
        result = open_device(d, context);
    } else if (d->state == SERVED) {
        unsigned long long id = 0;
        d->context = context;
        if (cu.CtxGetId(context, &id) || id != d->context_id) result = make_quiet(d);
    }
    (void)pthread_mutex_unlock(&lock);
    if (!result && d->state == SERVED) *found = d;
    return result;
}

/* The device that galloc serves for a context. NULL: what is asked is left to the driver. */
static CUresult device_of(CUcontext context, device **found)
{
    unsigned long long id = 0;
    int i;
    *found = NULL;
    if (!context) return CUDA_SUCCESS;
    for (i = 0; i < MAX_DEVICES; i++) {
        device *d = &devices[i];
        if (__atomic_load_n(&d->state, __ATOMIC_ACQUIRE) != SERVED || d->context != context) continue;
        if (cu.CtxGetId(context, &id) || id != __atomic_load_n(&d->context_id, __ATOMIC_ACQUIRE)) break;
        *found = d;
        return CUDA_SUCCESS;
    }
    return meet(context, found);
}

static CUresult current_device(device **found)
{
    CUcontext context = NULL;
    *found = NULL;
    return cu.CtxGetCurrent(&context) ? CUDA_SUCCESS : device_of(context, found);
}

/* The device of a stream; NULL also for a stream that is being captured: memory of a graph is the driver's. */
static CUresult device_of_stream(CUstream stream, device **found)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    CUcontext context = NULL;
    *found = NULL;
    if (cu.StreamIsCapturing(stream, &status) || status != CU_STREAM_CAPTURE_STATUS_NONE) return CUDA_SUCCESS;
    return cu.StreamGetCtx(stream, &context) ? CUDA_SUCCESS : device_of(context, found);
}

/* Every hook that may use galloc begins with this. 0: the call is the driver's. */
static int enter(void)
{
    if (!find_hooks() || !driver_found || forked || inside) return 0;
    come_in();
    inside = 1;
    return 1;
}

static void leave(void)
{
    inside = 0;
    go_out();
}

/* Whether an address lies in galloc's memory, and what it is. An address that a reset has taken is the driver's. */
static int is_ours(CUdeviceptr address, galloc_pointer *info)
{
    if (!__atomic_load_n(&served, __ATOMIC_RELAXED)) return 0;
    return galloc_pointer_info((void *)(uintptr_t)address, info) == cudaSuccess &&
           info->state != GALLOC_STATE_FOREIGN && (info->state == GALLOC_STATE_FREE || info->usable > 0);
}

/* The device's streams and memory are gone after a reset that no allocation has noticed yet: then cudaFree is the
   driver's. cudaFreeAsync does not ask, for its cost. *result: an error of the driver when it was asked. */
static int was_reset(const galloc_pointer *info, CUresult *result)
{
    const device *d = &devices[info->device];
    int alive;
    *result = look_at(d->context, __atomic_load_n(&d->context_id, __ATOMIC_ACQUIRE), &alive);
    return !*result && !alive;
}

/* The same as is_ours, also after such a reset. An error of the driver leaves the address as it was. */
static int is_still_ours(CUdeviceptr address, galloc_pointer *info)
{
    CUresult result;
    return is_ours(address, info) && !was_reset(info, &result);
}

/* ---- streams ----------------------------------------------------------------------------------------------------- */

static int free_is_async; /* GALLOC_PRELOAD_FREE=async */
static int captures;      /* that are under way; a capture that ends in an odd way may count for ever */
static int beginning;     /* captures that the driver is beginning */
static int waits;         /* that would end a capture, for a context; and calls that record on the legacy stream */

/* From now on no capture begins, and those that have begun are known to the driver. A call for a stream other than the
   legacy one records no event on that. */
static void wait_begins(CUstream stream)
{
    int left;
    if (stream != CU_STREAM_LEGACY) return;
    (void)__atomic_add_fetch(&waits, 1, __ATOMIC_SEQ_CST);
    for (left = 1000000; left && __atomic_load_n(&beginning, __ATOMIC_SEQ_CST); left--) (void)sched_yield();
}

static void wait_ends(CUstream stream)
{
    if (stream == CU_STREAM_LEGACY) (void)__atomic_sub_fetch(&waits, 1, __ATOMIC_SEQ_CST);
}

/* With free_is_async: the program's non-blocking streams in primary contexts. The legacy stream, where an event is
   recorded, stands for the others there. */
typedef struct known_stream {
    CUstream stream;
    unsigned long long context_id; /* when its context ends, as by cudaDeviceReset, no call tells of the stream */
    int ordinal;
} known_stream;

static known_stream *known_streams;
static size_t known_count, known_room;

/* The caller holds the lock. */
static void forget_stream(CUstream stream)
{
    size_t i;
    for (i = 0; i < known_count && known_streams[i].stream != stream; i++) continue;
    if (i < known_count) known_streams[i] = known_streams[--known_count];
}

static void know_stream(CUstream stream, unsigned flags)
{
    CUcontext context = NULL;
    unsigned long long id = 0;
    int ordinal = -1, unknown;
    if (!enter()) return;
    unknown = cu.StreamGetCtx(stream, &context) || cu.CtxGetId(context, &id) || ordinal_of(context, &ordinal);
    if (!unknown) know_context(context);
    leave();
    (void)pthread_mutex_lock(&stream_lock);
    forget_stream(stream); /* an earlier one with this handle */
    known_overflow |= unknown;
    flags = free_is_async ? flags & CU_STREAM_NON_BLOCKING : 0;
    if (flags && known_count == known_room) {
        size_t room = known_room ? 2 * known_room : 64;
        known_stream *more = (known_stream *)realloc(known_streams, room * sizeof *more);
        if (more) known_streams = more, known_room = room;
        else known_overflow = 1;
    }
    if (flags && known_count < known_room) {
        known_stream *s = &known_streams[known_count++];
        s->stream = stream;
        s->context_id = id;
        s->ordinal = ordinal;
    }
    (void)pthread_mutex_unlock(&stream_lock);
}

CUresult CUDAAPI on_stream_create(CUstream *stream, unsigned int flags)
{
    CUresult result = DRIVER(stream_create, (stream, flags));
    if (!result) know_stream(*stream, flags);
    return result;
}

CUresult CUDAAPI on_stream_create_at(CUstream *stream, unsigned int flags, int priority)
{
    CUresult result = DRIVER(stream_create_at, (stream, flags, priority));
    if (!result) know_stream(*stream, flags);
    return result;
}

CUresult CUDAAPI on_stream_create_green(CUstream *stream, void *green, unsigned int flags, int priority)
{
    CUresult result = DRIVER(stream_create_green, (stream, green, flags, priority));
    if (!result) know_stream(*stream, flags);
    return result;
}

/* Destroys a stream. If it is busy its work goes on, and the next free must wait for it. */
static CUresult destroy_known(CUstream stream, int busy)
{
    CUcontext context = NULL;
    CUresult result;
    int ordinal = -1;
    (void)pthread_mutex_lock(&stream_lock);
    if (busy && (cu.StreamGetCtx(stream, &context) || ordinal_of(context, &ordinal))) ordinal = -1;
    result = real.stream_destroy(stream);
    if (!result) forget_stream(stream);
    if (!result && busy && ordinal >= 0 && ordinal < MAX_DEVICES) devices[ordinal].orphans++;
    else if (!result && busy) known_overflow = 1;
    (void)pthread_mutex_unlock(&stream_lock);
    return result;
}

/* Whether a stream has work, or cannot say so. The question harms no capture of another stream. */
static int is_busy(CUstream stream)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    int busy;
    (void)cu.ThreadExchangeStreamCaptureMode(&mode);
    busy = cu.StreamQuery(stream) != CUDA_SUCCESS;
    (void)cu.ThreadExchangeStreamCaptureMode(&mode);
    return busy;
}

CUresult CUDAAPI on_stream_destroy(CUstream stream)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    CUresult result;
    int is_captured, busy;
    if (!stream || !enter()) return DRIVER(stream_destroy, (stream));
    is_captured = cu.StreamIsCapturing(stream, &status) || status != CU_STREAM_CAPTURE_STATUS_NONE;
    busy = free_is_async && (is_captured || is_busy(stream)); /* before galloc queues an event there */
    if (served && !is_captured) (void)galloc_stream_retire(stream);
    result = free_is_async ? destroy_known(stream, busy) : real.stream_destroy(stream);
    leave();
    return result;
}

/* A capture begins after the waits that would end it, or after 100 ms: what is waited for may need this thread. */
static void begins(void)
{
    int left;
    (void)__atomic_add_fetch(&captures, 1, __ATOMIC_SEQ_CST);
    (void)__atomic_add_fetch(&beginning, 1, __ATOMIC_SEQ_CST);
    for (left = 2000; left && __atomic_load_n(&waits, __ATOMIC_SEQ_CST); left--) {
        (void)__atomic_sub_fetch(&beginning, 1, __ATOMIC_SEQ_CST);
        rest();
        (void)__atomic_add_fetch(&beginning, 1, __ATOMIC_SEQ_CST);
    }
}

static CUresult begun(CUresult result)
{
    (void)__atomic_sub_fetch(&beginning, 1, __ATOMIC_SEQ_CST);
    if (result) (void)__atomic_sub_fetch(&captures, 1, __ATOMIC_SEQ_CST);
    return result;
}

static CUresult ended(CUresult result)
{
    if (!result || result == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
        (void)__atomic_sub_fetch(&captures, 1, __ATOMIC_SEQ_CST);
    return result;
}

CUresult CUDAAPI on_capture_1(CUstream stream) { return begins(), begun(DRIVER(capture_1, (stream))); }
CUresult CUDAAPI on_capture_1_own(CUstream stream) { return begins(), begun(DRIVER(capture_1_own, (stream))); }

CUresult CUDAAPI on_capture(CUstream stream, CUstreamCaptureMode mode)
{
    return begins(), begun(DRIVER(capture, (stream, mode)));
}

CUresult CUDAAPI on_capture_own(CUstream stream, CUstreamCaptureMode mode)
{
    return begins(), begun(DRIVER(capture_own, (stream, mode)));
}

CUresult CUDAAPI on_capture_to(CUstream stream, CUgraph graph, const CUgraphNode *after, const void *edges, size_t n,
                               CUstreamCaptureMode mode)
{
    return begins(), begun(DRIVER(capture_to, (stream, graph, after, edges, n, mode)));
}

CUresult CUDAAPI on_capture_to_own(CUstream stream, CUgraph graph, const CUgraphNode *after, const void *edges,
                                   size_t n, CUstreamCaptureMode mode)
{
    return begins(), begun(DRIVER(capture_to_own, (stream, graph, after, edges, n, mode)));
}

CUresult CUDAAPI on_capture_end(CUstream stream, CUgraph *graph) { return ended(DRIVER(capture_end, (stream, graph))); }

CUresult CUDAAPI on_capture_end_own(CUstream stream, CUgraph *graph)
{
    return ended(DRIVER(capture_end_own, (stream, graph)));
}

/* ---- allocation -------------------------------------------------------------------------------------------------- */

static CUresult take(device *d, CUdeviceptr *out, size_t bytes, CUstream stream)
{
    galloc_request request;
    void *p = NULL;
    CUresult result;
    memset(&request, 0, sizeof request);
    request.bytes = bytes;
    request.stream = stream;
    request.pool = d->pool;
    request.tag = __atomic_add_fetch(&tags, 1, __ATOMIC_RELAXED);
    result = as_driver(galloc_alloc(&p, &request));
    if (result) return result;
    __atomic_add_fetch(&d->allocations, 1, __ATOMIC_RELAXED);
    *out = (CUdeviceptr)(uintptr_t)p;
    return CUDA_SUCCESS;
}

/* Memory that every stream may use at once. What galloc or the driver has queued on the quiet stream must be over. */
static CUresult take_for_all(device *d, CUdeviceptr *out, size_t bytes)
{
    CUstream quiet = __atomic_load_n(&d->quiet, __ATOMIC_RELAXED);
    CUdeviceptr p = 0;
    scope s;
    CUresult result = take(d, &p, bytes, quiet);
    if (result) return result;
    result = scope_enter(&s, d->context);
    if (!result) {
        result = cu.StreamQuery(quiet);
        if (result == CUDA_ERROR_NOT_READY) result = cu.StreamSynchronize(quiet);
        scope_leave(&s);
    }
    if (result) {
        if (galloc_free((void *)(uintptr_t)p, quiet)) free_later(d, (void *)(uintptr_t)p);
        return result;
    }
    *out = p;
    return CUDA_SUCCESS;
}

/* The driver has no memory for something that is its own: gives it what galloc does not use. Returns whether there was
   any. */
static int give_back(CUresult result)
{
    size_t released = 0, more;
    int i;
    if (result != CUDA_ERROR_OUT_OF_MEMORY || !served || !enter()) return 0;
    for (i = 0; i < MAX_DEVICES; i++)
        if (__atomic_load_n(&devices[i].state, __ATOMIC_ACQUIRE) == SERVED &&
            !galloc_pool_trim(devices[i].pool, 0, &more))
            released += more;
    leave();
    return released > 0;
}

/* An allocation by the driver, which is tried again after give_back. */
#define BY_DRIVER(id, arguments)                                        \
    do {                                                                \
        CUresult result_ = DRIVER(id, arguments);                       \
        __atomic_add_fetch(&left_to_driver, 1, __ATOMIC_RELAXED);       \
        return give_back(result_) ? real.id arguments : result_;        \
    } while (0)

CUresult CUDAAPI on_alloc(CUdeviceptr *p, size_t bytes)
{
    device *d = NULL;
    if (p && bytes && enter()) {
        CUresult result = current_device(&d);
        if (!result && d) result = take_for_all(d, p, bytes);
        leave();
        if (result || d) return result;
    }
    BY_DRIVER(alloc, (p, bytes));
}

CUresult CUDAAPI on_alloc_pitch(CUdeviceptr *p, size_t *pitch, size_t width, size_t height, unsigned int element)
{
    size_t row = (width + 511) & ~(size_t)511;
    int valid = p && pitch && width && height && row >= width && height <= SIZE_MAX / row &&
        (element == 4 || element == 8 || element == 16);
    device *d = NULL;
    if (valid && enter()) {
        CUresult result = current_device(&d);
        if (!result && d) result = take_for_all(d, p, row * height);
        leave();
        if (!result && d) *pitch = row;
        if (result || d) return result;
    }
    BY_DRIVER(alloc_pitch, (p, pitch, width, height, element));
}

/* Whether cuMemAllocAsync on this device takes memory from the driver's default pool. */
static int default_pool_is_current(const device *d)
{
    CUmemoryPool pool = NULL;
    return !d->driver_pool || !cu.DeviceGetMemPool || cu.DeviceGetMemPool(&pool, d->ordinal) || pool == d->driver_pool;
}

/* In CUDA, a free on the legacy stream is work there: it comes after earlier work of all blocking streams, and before
   their later work. galloc queues no work, so an event does it. */
static CUresult order_by_legacy(void)
{
    CUstreamCaptureStatus status;
    CUevent event = NULL;
    CUresult result = cu.StreamIsCapturing(CU_STREAM_LEGACY, &status); /* an event would end a capture */
    if (!result) result = cu.EventCreate(&event, CU_EVENT_DISABLE_TIMING);
    if (result) return result;
    result = cu.EventRecord(event, CU_STREAM_LEGACY);
    (void)cu.EventDestroy(event);
    return result;
}

/* Allocates for a stream, from a pool of the driver; NULL: from the current one. 0: the call is the driver's. */
static int take_for_stream(CUdeviceptr *p, size_t bytes, CUmemoryPool pool, CUstream stream, CUresult *result)
{
    device *d = NULL;
    if (!p || !bytes || !enter()) return 0;
    *result = device_of_stream(stream, &d);
    if (!*result && d && (pool ? pool != d->driver_pool : !default_pool_is_current(d))) d = NULL;
    wait_begins(stream);
    if (!*result && d) *result = take(d, p, bytes, stream);
    wait_ends(stream);
    leave();
    return *result || d;
}

static CUstream legacy(CUstream stream) { return stream ? stream : CU_STREAM_LEGACY; }
static CUstream per_thread(CUstream stream) { return stream ? stream : CU_STREAM_PER_THREAD; }

CUresult CUDAAPI on_alloc_async(CUdeviceptr *p, size_t bytes, CUstream stream)
{
    CUresult result;
    if (take_for_stream(p, bytes, NULL, legacy(stream), &result)) return result;
    BY_DRIVER(alloc_async, (p, bytes, stream));
}

CUresult CUDAAPI on_alloc_async_own(CUdeviceptr *p, size_t bytes, CUstream stream)
{
    CUresult result;
    if (take_for_stream(p, bytes, NULL, per_thread(stream), &result)) return result;
    BY_DRIVER(alloc_async_own, (p, bytes, stream));
}

CUresult CUDAAPI on_alloc_pool(CUdeviceptr *p, size_t bytes, CUmemoryPool pool, CUstream stream)
{
    CUresult result;
    if (pool && take_for_stream(p, bytes, pool, legacy(stream), &result)) return result;
    BY_DRIVER(alloc_pool, (p, bytes, pool, stream));
}

CUresult CUDAAPI on_alloc_pool_own(CUdeviceptr *p, size_t bytes, CUmemoryPool pool, CUstream stream)
{
    CUresult result;
    if (pool && take_for_stream(p, bytes, pool, per_thread(stream), &result)) return result;
    BY_DRIVER(alloc_pool_own, (p, bytes, pool, stream));
}

/* Other memory of the device, for which galloc's unused memory may have to go. */
CUresult CUDAAPI on_create_page(CUmemGenericAllocationHandle *page, size_t bytes, const CUmemAllocationProp *properties,
                                unsigned long long flags)
{
    BY_DRIVER(create_page, (page, bytes, properties, flags));
}

CUresult CUDAAPI on_alloc_managed(CUdeviceptr *p, size_t bytes, unsigned int flags)
{
    BY_DRIVER(alloc_managed, (p, bytes, flags));
}

CUresult CUDAAPI on_create_array(void *array, const void *shape) { BY_DRIVER(create_array, (array, shape)); }
CUresult CUDAAPI on_create_array_3d(void *array, const void *shape) { BY_DRIVER(create_array_3d, (array, shape)); }

CUresult CUDAAPI on_create_mipmap(void *array, const void *shape, unsigned int levels)
{
    BY_DRIVER(create_mipmap, (array, shape, levels));
}

/* ---- freeing ----------------------------------------------------------------------------------------------------- */

/* Waits for all work of the current context, as cuMemFree does. cuCtxSynchronize ends a capture that is under way;
   freeing pinned memory waits, too, and harms none. */
static CUresult wait_for_context(void)
{
    void *fence = NULL;
    CUresult result;
    int captured;
    wait_begins(CU_STREAM_LEGACY);
    captured = __atomic_load_n(&captures, __ATOMIC_SEQ_CST);
    result = captured ? CUDA_SUCCESS : cu.CtxSynchronize();
    wait_ends(CU_STREAM_LEGACY);
    if (!captured) return result;
    result = cu.MemHostAlloc(&fence, 512, 0);
    return result ? result : cu.MemFreeHost(fence);
}

/* The same in no hook: other threads may end other contexts, and the work may be waiting for that. */
static CUresult wait_outside(void)
{
    CUresult result;
    go_out();
    result = wait_for_context();
    come_in();
    return result;
}

/* Waits for one of the other contexts. In one that has failed for good, where each call returns that error, nothing
   runs any more. */
static CUresult wait_for_other(const known_context *c)
{
    scope s;
    size_t left, total;
    CUresult result = scope_enter(&s, c->context);
    if (result) return result;
    result = wait_for_context();
    if (result && real.mem_info(&left, &total) == result) result = CUDA_SUCCESS;
    scope_leave(&s);
    return result;
}

/* Waits for the device's other contexts, and forgets those that have ended. The work of a green one may go on then, for
   which the next wait for the primary context must be. */
static CUresult wait_for_others(device *d)
{
    CUresult result = CUDA_SUCCESS;
    size_t i;
    (void)pthread_mutex_lock(&stream_lock);
    for (i = context_count; !result && i-- > 0;) { /* backwards: the last one takes the place of one that goes */
        known_context c;
        int alive;
        if (i >= context_count || known_contexts[i].ordinal != d->ordinal) continue;
        c = known_contexts[i];
        result = look_at(c.context, c.id, &alive);
        if (result) continue;
        if (!alive) {
            known_contexts[i] = known_contexts[--context_count];
            d->orphans++;
            continue;
        }
        (void)pthread_mutex_unlock(&stream_lock); /* what it waits for may need a new stream */
        result = wait_for_other(&c);
        (void)pthread_mutex_lock(&stream_lock);
    }
    (void)pthread_mutex_unlock(&stream_lock);
    return result;
}

/* Waits for all work of a device, whose primary context is current; also for work that has no stream any more. */
static CUresult wait_for_device(device *d)
{
    uint64_t orphans;
    CUresult result = wait_for_others(d);
    if (result) return result;
    (void)pthread_mutex_lock(&stream_lock);
    orphans = d->orphans;
    (void)pthread_mutex_unlock(&stream_lock);
    result = wait_outside();
    if (result) return result;
    (void)pthread_mutex_lock(&stream_lock);
    if (d->waited < orphans) d->waited = orphans;
    (void)pthread_mutex_unlock(&stream_lock);
    return CUDA_SUCCESS;
}

static int has_others(const device *d)
{
    size_t i;
    for (i = 0; i < context_count && known_contexts[i].ordinal != d->ordinal; i++) continue;
    return i < context_count;
}

/* Frees on all streams of the device's primary context. 0: it cannot be done without a wait. */
static int free_on_all_streams(device *d, void *p)
{
    CUstreamCaptureStatus status;
    cudaStream_t *streams = NULL;
    size_t i;
    int n = 0, done = 0;
    (void)pthread_mutex_lock(&stream_lock); /* no stream is destroyed meanwhile */
    if (!known_overflow && d->orphans == d->waited && !has_others(d))
        streams = (cudaStream_t *)malloc((known_count + 2) * sizeof *streams);
    if (streams) {
        streams[n++] = d->quiet;
        streams[n++] = CU_STREAM_LEGACY;
        done = !cu.StreamIsCapturing(CU_STREAM_LEGACY, &status);
        for (i = known_count; i-- > 0 && done;) {
            if (known_streams[i].ordinal != d->ordinal) continue;
            if (known_streams[i].context_id != d->context_id) {
                known_streams[i] = known_streams[--known_count]; /* it ended with its context */
                continue;
            }
            streams[n++] = known_streams[i].stream;
            done = !cu.StreamIsCapturing(known_streams[i].stream, &status) && status == CU_STREAM_CAPTURE_STATUS_NONE;
        }
        done = done && !order_by_legacy() && galloc_free_after(p, streams, n) == cudaSuccess;
        free(streams);
    }
    (void)pthread_mutex_unlock(&stream_lock);
    return done;
}

static CUresult give(const galloc_pointer *info)
{
    device *d = &devices[info->device];
    CUcontext current = NULL;
    scope s;
    CUresult result;
    int done;
    if (!cu.CtxGetCurrent(&current) && current && current != d->context) know_context(current);
    result = scope_enter(&s, d->context);
    if (result) return result;
    wait_begins(CU_STREAM_LEGACY);
    done = free_is_async && free_on_all_streams(d, info->base);
    wait_ends(CU_STREAM_LEGACY);
    if (!done) {
        result = wait_for_device(d);
        if (!result) result = as_driver(galloc_free(info->base, d->quiet));
    }
    scope_leave(&s);
    if (!result) __atomic_add_fetch(&d->frees, 1, __ATOMIC_RELAXED);
    return result;
}

/* Whether an address is the start of a block that the program holds. */
static int is_block(const galloc_pointer *info, CUdeviceptr p)
{
    return info->state == GALLOC_STATE_USED && (CUdeviceptr)(uintptr_t)info->base == p;
}

CUresult CUDAAPI on_free_(CUdeviceptr p)
{
    galloc_pointer info;
    if (p && enter()) {
        CUresult result = CUDA_SUCCESS;
        int ours = is_ours(p, &info) && !was_reset(&info, &result);
        if (ours && !result) result = is_block(&info, p) ? give(&info) : CUDA_ERROR_INVALID_VALUE;
        leave();
        if (ours) return result;
    }
    return DRIVER(free_, (p));
}

/* 0: the call is the driver's. That of a captured stream is: only memory of its own graph can be freed there. */
static int give_on_stream(CUdeviceptr p, CUstream stream, CUresult *result)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    galloc_pointer info;
    int ours;
    if (!p || !enter()) return 0;
    ours = is_ours(p, &info);
    *result = ours ? cu.StreamIsCapturing(stream, &status) : CUDA_SUCCESS;
    ours = ours && status == CU_STREAM_CAPTURE_STATUS_NONE;
    if (ours && !*result) {
        wait_begins(stream);
        *result = !is_block(&info, p) ? CUDA_ERROR_INVALID_VALUE :
            stream == CU_STREAM_LEGACY ? order_by_legacy() : CUDA_SUCCESS;
        if (!*result) *result = as_driver(galloc_free(info.base, stream));
        wait_ends(stream);
        if (!*result) __atomic_add_fetch(&devices[info.device].frees, 1, __ATOMIC_RELAXED);
    }
    leave();
    return ours;
}

CUresult CUDAAPI on_free_async(CUdeviceptr p, CUstream stream)
{
    CUresult result;
    if (give_on_stream(p, legacy(stream), &result)) return result;
    return DRIVER(free_async, (p, stream));
}

CUresult CUDAAPI on_free_async_own(CUdeviceptr p, CUstream stream)
{
    CUresult result;
    if (give_on_stream(p, per_thread(stream), &result)) return result;
    return DRIVER(free_async_own, (p, stream));
}

/* ---- the calls that end contexts --------------------------------------------------------------------------------- */

/* A reset is not among them: CUDA leaves it to the caller that nobody uses the device then. The thread is not cancelled
   while others cannot come in, and the calls of its signal handlers are the driver's. */
#define END_CONTEXT(id, arguments)                                      \
    do {                                                                \
        CUresult result_;                                               \
        int cancels_;                                                   \
        if (!enter()) return DRIVER(id, arguments);                     \
        leave();                                                        \
        (void)pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancels_);\
        inside = 1;                                                     \
        close_gates();                                                  \
        result_ = real.id arguments;                                    \
        open_gates();                                                   \
        inside = 0;                                                     \
        (void)pthread_setcancelstate(cancels_, &cancels_);              \
        return result_;                                                 \
    } while (0)

/* Waits for the work of a context that is about to end: it may need other threads, which may have to come in. */
static void wait_for_last_work(CUcontext context)
{
    unsigned long long id;
    scope s;
    if (!enter()) return;
    if (!cu.CtxGetId(context, &id) && !scope_enter(&s, context)) {
        (void)wait_outside();
        scope_leave(&s);
    }
    leave();
}

CUresult CUDAAPI on_context_destroy(CUcontext context)
{
    if (context) wait_for_last_work(context);
    END_CONTEXT(context_destroy, (context));
}

CUresult CUDAAPI on_green_destroy(void *green) { END_CONTEXT(green_destroy, (green)); }

/* ---- questions --------------------------------------------------------------------------------------------------- */

/* Memory that galloc keeps is free for the program, as far as the limit goes. */
CUresult CUDAAPI on_mem_info(size_t *left, size_t *total)
{
    CUresult result = DRIVER(mem_info, (left, total));
    galloc_stats stats;
    device *d = NULL;
    if (result || !left || !enter()) return result;
    if (!current_device(&d) && d && !galloc_pool_stats(d->pool, &stats)) {
        size_t room = d->limit > stats.allocated.current ? d->limit - stats.allocated.current : 0;
        *left += stats.cached.current;
        if (*left > room) *left = room;
    }
    leave();
    return CUDA_SUCCESS;
}

/* The driver would tell of the page, which has other blocks beside this one, or only a part of it. */
CUresult CUDAAPI on_address_range(CUdeviceptr *base, size_t *bytes, CUdeviceptr p)
{
    galloc_pointer info;
    if (enter()) {
        int ours = is_still_ours(p, &info);
        leave();
        if (ours && info.state != GALLOC_STATE_USED) return CUDA_ERROR_NOT_FOUND;
        if (ours && base) *base = (CUdeviceptr)(uintptr_t)info.base;
        if (ours && bytes) *bytes = info.requested;
        if (ours) return CUDA_SUCCESS;
    }
    return DRIVER(address_range, (base, bytes, p));
}

enum {
    ATTRIBUTE_CONTEXT = 1,
    ATTRIBUTE_MEMORY_TYPE = 2,
    ATTRIBUTE_BUFFER_ID = 7,
    ATTRIBUTE_ORDINAL = 9,
    ATTRIBUTE_RANGE_START = 11,
    ATTRIBUTE_RANGE_SIZE = 12
};

/* Corrects an answer that the driver has given for the page. */
static void answer(void *data, int attribute, const galloc_pointer *info)
{
    unsigned long long id = 0x67616c6cULL << 32 | info->tag; /* apart from the driver's numbers, which are small */
    if (attribute == ATTRIBUTE_CONTEXT) *(CUcontext *)data = devices[info->device].context;
    if (attribute == ATTRIBUTE_BUFFER_ID) *(unsigned long long *)data = id;
    if (attribute == ATTRIBUTE_RANGE_START) *(CUdeviceptr *)data = (CUdeviceptr)(uintptr_t)info->base;
    if (attribute == ATTRIBUTE_RANGE_SIZE) *(size_t *)data = info->requested;
}

static int is_used(CUdeviceptr p, galloc_pointer *info)
{
    int used;
    if (!enter()) return 0;
    used = is_still_ours(p, info) && info->state == GALLOC_STATE_USED;
    leave();
    return used;
}

CUresult CUDAAPI on_attribute(void *data, int attribute, CUdeviceptr p)
{
    CUresult result = DRIVER(attribute, (data, attribute, p));
    galloc_pointer info;
    if (!result && data && is_used(p, &info)) answer(data, attribute, &info);
    return result;
}

CUresult CUDAAPI on_attributes(unsigned int n, int *attributes, void **data, CUdeviceptr p)
{
    CUresult result = DRIVER(attributes, (n, attributes, data, p));
    galloc_pointer info;
    unsigned i;
    if (result || !attributes || !data || !is_used(p, &info)) return result;
    for (i = 0; i < n; i++)
        if (data[i]) answer(data[i], attributes[i], &info);
    return CUDA_SUCCESS;
}

/* A process that opens a handle gets the start of the driver's allocation, which is rarely a block's. */
CUresult CUDAAPI on_ipc_handle(void *handle, CUdeviceptr p)
{
    galloc_pointer info;
    CUdeviceptr base = 0;
    int used = is_used(p, &info);
    CUresult result = used ? DRIVER(address_range, (&base, NULL, p)) : CUDA_SUCCESS;
    if (!result && used && base != (CUdeviceptr)(uintptr_t)info.base) result = CUDA_ERROR_INVALID_VALUE;
    if (!result) result = DRIVER(ipc_handle, (handle, p));
    if (used && result)
        say_once(2, "cuIpcGetMemHandle: memory in galloc's pages cannot be shared with other processes; with "
                    "GALLOC_CONF=backend:cudaMalloc it can be");
    return result;
}

/* ---- the driver's default pool ----------------------------------------------------------------------------------- */

/* The device whose default pool this is, and which galloc serves. */
static device *device_of_pool(CUmemoryPool pool)
{
    int i;
    for (i = 0; pool && i < MAX_DEVICES; i++)
        if (__atomic_load_n(&devices[i].state, __ATOMIC_ACQUIRE) == SERVED && devices[i].driver_pool == pool)
            return &devices[i];
    return NULL;
}

static uint64_t higher(uint64_t a, uint64_t b) { return a > b ? a : b; }

CUresult CUDAAPI on_pool_get(CUmemoryPool pool, int attribute, void *value)
{
    CUresult result = DRIVER(pool_get, (pool, attribute, value));
    device *d = device_of_pool(pool);
    galloc_stats stats;
    if (result || !value || !d || !enter()) return result;
    (void)pthread_mutex_lock(&lock);
    if (!galloc_pool_stats(d->pool, &stats)) {
        cuuint64_t *bytes = (cuuint64_t *)value;
        if (attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) *bytes += stats.reserved.current;
        if (attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH) *bytes += higher(stats.reserved.peak, d->reserved_high);
        if (attribute == CU_MEMPOOL_ATTR_USED_MEM_CURRENT) *bytes += stats.allocated.current;
        if (attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH) *bytes += higher(stats.allocated.peak, d->used_high);
    }
    (void)pthread_mutex_unlock(&lock);
    leave();
    return CUDA_SUCCESS;
}

static uint64_t calls_of(const galloc_driver *calls)
{
    uint64_t sum = 0;
#define ADD_CALLS(name, function) sum += calls->name;
    GALLOC_DRIVER_CALLS(ADD_CALLS)
    return sum;
}

/* Resets one peak. galloc resets all of its counters at once, so the others are kept here. */
static void reset_high(device *d, int attribute)
{
    galloc_stats stats;
    (void)pthread_mutex_lock(&lock);
    if (!galloc_pool_stats(d->pool, &stats) && !galloc_pool_stats_reset(d->pool)) {
        d->most_reserved = higher(stats.reserved.peak, d->most_reserved);
        d->most_used = higher(stats.allocated.peak, d->most_used);
        d->driver_calls += calls_of(&stats.driver);
        d->reserved_high = higher(stats.reserved.peak, d->reserved_high);
        d->used_high = higher(stats.allocated.peak, d->used_high);
        if (attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH) d->reserved_high = 0;
        else d->used_high = 0;
    }
    (void)pthread_mutex_unlock(&lock);
}

CUresult CUDAAPI on_pool_set(CUmemoryPool pool, int attribute, void *value)
{
    CUresult result = DRIVER(pool_set, (pool, attribute, value));
    device *d = device_of_pool(pool);
    if (attribute != CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH && attribute != CU_MEMPOOL_ATTR_USED_MEM_HIGH) return result;
    if (result || !d || !enter()) return result;
    reset_high(d, attribute);
    leave();
    return CUDA_SUCCESS;
}

CUresult CUDAAPI on_pool_trim(CUmemoryPool pool, size_t keep)
{
    CUresult result = DRIVER(pool_trim, (pool, keep));
    device *d = device_of_pool(pool);
    if (result || !d || !enter()) return result;
    result = as_driver(galloc_pool_trim(d->pool, keep, NULL));
    leave();
    return result;
}

/* ---- peers ------------------------------------------------------------------------------------------------------- */

/* Before the driver enables access: whether galloc's memory can follow. NULL: it serves no such device. */
static CUresult may_share(const device *d, uint64_t peers, int of_pool)
{
    int reach = d && peers & ~d->peers ? reach_of(d) : BY_PAGES;
    if (reach == NEVER) say_never();
    else if (reach == AS_CUDA_MALLOC && of_pool)
        say_once(4, "cuMemPoolSetAccess: with these settings peer devices can use the memory only after "
                    "cuCtxEnablePeerAccess");
    else return CUDA_SUCCESS;
    return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
}

/* Whose default pool this is; -1: nobody's. */
static int ordinal_of_pool(CUmemoryPool pool)
{
    CUmemoryPool its = NULL;
    int i;
    for (i = 0; i < MAX_DEVICES && cu.DeviceGetDefaultMemPool && !cu.DeviceGetDefaultMemPool(&its, i); i++)
        if (its == pool) return i;
    return -1;
}

/* For the default pool of a device, which galloc may not have served yet. */
static CUresult share_pool(int ordinal, CUmemoryPool pool, const CUmemAccessDesc *access, size_t n)
{
    device *d = NULL;
    uint64_t peers = 0;
    size_t i;
    CUresult result;
    for (i = 0; i < n; i++) {
        int id = access[i].location.id;
        if (access[i].flags && id >= 0 && id < MAX_DEVICES && id != ordinal) peers |= (uint64_t)1 << id;
    }
    (void)device_of(primary_of(ordinal), &d);
    result = may_share(d, peers, 1);
    if (!result) result = real.pool_access(pool, access, n);
    return result ? result : add_peers(&devices[ordinal], peers);
}

CUresult CUDAAPI on_pool_access(CUmemoryPool pool, const CUmemAccessDesc *access, size_t n)
{
    if (pool && access && enter()) {
        int ordinal = ordinal_of_pool(pool);
        CUresult result = ordinal < 0 ? CUDA_SUCCESS : share_pool(ordinal, pool, access, n);
        leave();
        if (ordinal >= 0) return result;
    }
    return DRIVER(pool_access, (pool, access, n));
}

/* The current context may use the memory of the other one. If a call before failed after the driver had enabled its
   access, this one gives galloc's. */
static CUresult share_context(CUcontext owner, unsigned int flags)
{
    device *d = NULL;
    uint64_t peers = 0;
    int user = -1, of = -1, i;
    CUresult added, result = cu.CtxGetDevice(&user);
    if (result) return result;
    if (user >= 0 && user < MAX_DEVICES) peers = (uint64_t)1 << user;
    for (i = 0; i < MAX_DEVICES && primary_of(i) != owner; i++) continue; /* it may be no context at all */
    if (i < MAX_DEVICES) (void)device_of(owner, &d);
    result = may_share(d, peers, 0);
    if (!result) result = real.peer(owner, flags);
    if (result && result != CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED) return result;
    added = ordinal_of(owner, &of);
    if (!added && of >= 0 && of < MAX_DEVICES) added = add_peers(&devices[of], peers);
    return added ? added : result;
}

CUresult CUDAAPI on_peer(CUcontext owner, unsigned int flags)
{
    CUresult result;
    if (!owner || !enter()) return DRIVER(peer, (owner, flags));
    result = share_context(owner, flags);
    leave();
    return result;
}

/* ---- copies ------------------------------------------------------------------------------------------------------ */

/* Mapped memory, as galloc's is, is found by a copy only if the current context's device has the access; memory of
   cuMemAlloc is found whichever device is current. A copy between devices finds both. So a copy of galloc's memory that
   the driver refuses for this reason is done as one between devices, on the same stream. What is wrong otherwise stays
   the driver's to refuse. (tests/gpu/probe_copies.cu) */

/* A copy of more bytes is done in parts: the driver limits the length of a row. */
#define COPY_PART ((size_t)1 << 30)

enum { AT_ONCE, AT_ONCE_OWN, QUEUED, QUEUED_OWN }; /* own: stream 0 is the per-thread default stream */

enum { OTHERS, OURS, WRONG }; /* memory of a side */

/* The context of device memory that is not galloc's. Memory of the driver's pools and mapped memory has none; that of
   its device stands for it. */
static CUcontext context_of(CUdeviceptr p)
{
    CUcontext context = NULL;
    int ordinal = -1;
    if (!real.attribute(&context, ATTRIBUTE_CONTEXT, p) && context) return context;
    return real.attribute(&ordinal, ATTRIBUTE_ORDINAL, p) || ordinal < 0 ? NULL : primary_of(ordinal);
}

/* Whose memory one side of a copy is. A type that the program has named must be right. */
static int find_side(CUmemorytype *type, CUdeviceptr *address, const void *host, size_t bytes, CUcontext *context)
{
    CUmemorytype is = CU_MEMORYTYPE_HOST; /* pageable, if the driver does not know it */
    galloc_pointer info;
    if (*type == CU_MEMORYTYPE_ARRAY) return cu.CtxGetCurrent(context), OTHERS;
    if (*type == CU_MEMORYTYPE_HOST) *address = (CUdeviceptr)(uintptr_t)host;
    if (is_still_ours(*address, &info)) {
        size_t at = (size_t)(*address - (CUdeviceptr)(uintptr_t)info.base);
        if (*type == CU_MEMORYTYPE_HOST || at > info.usable || bytes > info.usable - at) return WRONG;
        *type = CU_MEMORYTYPE_DEVICE;
        *context = devices[info.device].context;
        return OURS;
    }
    if (*type == CU_MEMORYTYPE_HOST) return OTHERS;
    if (!real.attribute || real.attribute(&is, ATTRIBUTE_MEMORY_TYPE, *address)) is = CU_MEMORYTYPE_HOST;
    if (*type == CU_MEMORYTYPE_DEVICE && is != CU_MEMORYTYPE_DEVICE) return WRONG;
    *type = is;
    if (is == CU_MEMORYTYPE_DEVICE) *context = context_of(*address);
    return is == CU_MEMORYTYPE_DEVICE && !*context ? WRONG : OTHERS;
}

/* Bytes from the first to the last one of a side. */
static size_t extent(size_t width, size_t rows, size_t pitch) { return rows ? (rows - 1) * pitch + width : 0; }

/* The device of a context, if galloc serves it and the current device cannot use its memory. */
static int is_out_of_reach(CUcontext context)
{
    device *d = NULL;
    int current = -1;
    if (!context || cu.CtxGetDevice(&current) || device_of(context, &d) || !d || d->ordinal == current) return 0;
    return current < 0 || current >= MAX_DEVICES || !(d->peers >> current & 1);
}

/* The same as a copy between devices. Returns the context of galloc's memory that the current device cannot use; NULL:
   there is none, or the copy is wrong. */
static CUcontext between_devices(CUDA_MEMCPY3D_PEER *to, const CUDA_MEMCPY3D *from)
{
    size_t rows;
    int source, target;
    memset(to, 0, sizeof *to);
#define SIDE(s)                                         \
    to->s##XInBytes = from->s##XInBytes;                \
    to->s##Y = from->s##Y, to->s##Z = from->s##Z;       \
    to->s##LOD = from->s##LOD;                          \
    to->s##MemoryType = from->s##MemoryType;            \
    to->s##Host = from->s##Host;                        \
    to->s##Device = from->s##Device;                    \
    to->s##Array = from->s##Array;                      \
    to->s##Pitch = from->s##Pitch;                      \
    to->s##Height = from->s##Height;
    SIDE(src)
    SIDE(dst)
#undef SIDE
    to->WidthInBytes = from->WidthInBytes;
    to->Height = from->Height;
    to->Depth = from->Depth;
    if (!to->Depth) return NULL;
    rows = to->srcZ * to->srcHeight + to->srcY + (to->Depth - 1) * to->srcHeight + to->Height;
    source = find_side(&to->srcMemoryType, &to->srcDevice, to->srcHost,
                       extent(to->srcXInBytes + to->WidthInBytes, rows, to->srcPitch), &to->srcContext);
    rows = to->dstZ * to->dstHeight + to->dstY + (to->Depth - 1) * to->dstHeight + to->Height;
    target = find_side(&to->dstMemoryType, &to->dstDevice, to->dstHost,
                       extent(to->dstXInBytes + to->WidthInBytes, rows, to->dstPitch), &to->dstContext);
    if (to->srcMemoryType == CU_MEMORYTYPE_HOST) to->srcHost = (const void *)(uintptr_t)to->srcDevice;
    if (to->dstMemoryType == CU_MEMORYTYPE_HOST) to->dstHost = (void *)(uintptr_t)to->dstDevice;
    if (source == WRONG || target == WRONG) return NULL;
    if (target == OURS && is_out_of_reach(to->dstContext)) return to->dstContext;
    return source == OURS && is_out_of_reach(to->srcContext) ? to->srcContext : NULL;
}

/* A copy between devices was not seen to work in a capture. In the context of its memory a captured copy is one as any
   other, unless its sides are on two devices. */
static CUresult capture_copy(const CUDA_MEMCPY3D *copy, CUcontext context, CUstream stream)
{
    scope s;
    CUresult result = scope_enter(&s, context);
    if (result) return result;
    result = real.queue_3d ? real.queue_3d(copy, stream) : CUDA_ERROR_INVALID_VALUE;
    scope_leave(&s);
    return result;
}

/* A copy of one row, which may be longer than the driver takes at once. */
static CUresult copy_in_parts(CUDA_MEMCPY3D_PEER *c, CUstream stream, int how)
{
    size_t left = c->WidthInBytes;
    CUresult result = CUDA_SUCCESS;
    int parts = c->Height == 1 && c->Depth == 1;
    while (!result && left) {
        size_t now = parts && left > COPY_PART ? COPY_PART : left;
        c->WidthInBytes = now;
        result = how == AT_ONCE ? cu.Memcpy3DPeer(c) : cu.Memcpy3DPeerAsync(c, stream);
        c->srcXInBytes += now;
        c->dstXInBytes += now;
        left -= now;
    }
    if (!result && how == AT_ONCE_OWN) result = cu.StreamSynchronize(stream);
    return result;
}

/* Result of a copy: that of the driver's function, or success of the second attempt. */
static CUresult again_3d(CUresult result, const CUDA_MEMCPY3D *copy, CUstream stream, int how)
{
    CUDA_MEMCPY3D_PEER peer;
    CUcontext context;
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    CUresult second = CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_ERROR_INVALID_VALUE || !copy || !cu.Memcpy3DPeer || !cu.Memcpy3DPeerAsync || !enter())
        return result;
    context = between_devices(&peer, copy);
    if (context) {
        if (!stream && how != QUEUED) stream = CU_STREAM_PER_THREAD;
        if (stream && !cu.StreamIsCapturing(stream, &status) && status != CU_STREAM_CAPTURE_STATUS_NONE)
            second = capture_copy(copy, context, stream);
        else second = copy_in_parts(&peer, stream, how);
    }
    leave();
    return second ? result : second;
}

static CUresult again_2d(CUresult result, const CUDA_MEMCPY2D *copy, CUstream stream, int how)
{
    CUDA_MEMCPY3D c;
    if (result != CUDA_ERROR_INVALID_VALUE || !copy) return result;
    memset(&c, 0, sizeof c);
#define SIDE(s)                             \
    c.s##XInBytes = copy->s##XInBytes;      \
    c.s##Y = copy->s##Y;                    \
    c.s##MemoryType = copy->s##MemoryType;  \
    c.s##Host = copy->s##Host;              \
    c.s##Device = copy->s##Device;          \
    c.s##Array = copy->s##Array;            \
    c.s##Pitch = copy->s##Pitch;
    SIDE(src)
    SIDE(dst)
#undef SIDE
    c.WidthInBytes = copy->WidthInBytes;
    c.Height = copy->Height;
    c.Depth = 1;
    return again_3d(result, &c, stream, how);
}

/* Of one row; the name of the driver's function says what memory its sides are. */
static CUresult again(CUresult result, CUdeviceptr to, CUmemorytype to_type, CUdeviceptr from, CUmemorytype from_type,
                      size_t bytes, CUstream stream, int how)
{
    CUDA_MEMCPY3D c;
    if (result != CUDA_ERROR_INVALID_VALUE) return result;
    memset(&c, 0, sizeof c);
    c.srcMemoryType = from_type;
    c.dstMemoryType = to_type;
    c.srcDevice = from;
    c.dstDevice = to;
    c.srcHost = (const void *)(uintptr_t)from;
    c.dstHost = (void *)(uintptr_t)to;
    c.WidthInBytes = bytes;
    c.Height = c.Depth = 1;
    return again_3d(result, &c, stream, how);
}

#define ADDRESS(p) ((CUdeviceptr)(uintptr_t)(p))
#define COPY(id, how, to_type, to_is, from_type, from_is)                                                             \
    CUresult CUDAAPI on_##id(to_type to, from_type from, size_t bytes)                                                \
    {                                                                                                                 \
        return again(DRIVER(id, (to, from, bytes)), ADDRESS(to), CU_MEMORYTYPE_##to_is, ADDRESS(from),                \
                     CU_MEMORYTYPE_##from_is, bytes, NULL, how);                                                      \
    }
#define QUEUE_COPY(id, how, to_type, to_is, from_type, from_is)                                                       \
    CUresult CUDAAPI on_##id(to_type to, from_type from, size_t bytes, CUstream stream)                               \
    {                                                                                                                 \
        return again(DRIVER(id, (to, from, bytes, stream)), ADDRESS(to), CU_MEMORYTYPE_##to_is, ADDRESS(from),        \
                     CU_MEMORYTYPE_##from_is, bytes, stream, how);                                                    \
    }
#define ALL_FORMS(id, to_type, to_is, from_type, from_is)                     \
    COPY(copy##id, AT_ONCE, to_type, to_is, from_type, from_is)               \
    COPY(copy##id##_own, AT_ONCE_OWN, to_type, to_is, from_type, from_is)     \
    QUEUE_COPY(queue##id, QUEUED, to_type, to_is, from_type, from_is)         \
    QUEUE_COPY(queue##id##_own, QUEUED_OWN, to_type, to_is, from_type, from_is)
ALL_FORMS(_any, CUdeviceptr, UNIFIED, CUdeviceptr, UNIFIED)
ALL_FORMS(_to, CUdeviceptr, DEVICE, const void *, HOST)
ALL_FORMS(_from, void *, HOST, CUdeviceptr, DEVICE)
ALL_FORMS(_device, CUdeviceptr, DEVICE, CUdeviceptr, DEVICE)

#define COPY_BOX(id, type, retry, how) \
    CUresult CUDAAPI on_##id(const type *copy) { return retry(DRIVER(id, (copy)), copy, NULL, how); }
#define QUEUE_BOX(id, type, retry, how)                                  \
    CUresult CUDAAPI on_##id(const type *copy, CUstream stream)          \
    {                                                                    \
        return retry(DRIVER(id, (copy, stream)), copy, stream, how);     \
    }
COPY_BOX(copy_2d, CUDA_MEMCPY2D, again_2d, AT_ONCE)
COPY_BOX(copy_2d_own, CUDA_MEMCPY2D, again_2d, AT_ONCE_OWN)
COPY_BOX(copy_rows, CUDA_MEMCPY2D, again_2d, AT_ONCE)
COPY_BOX(copy_rows_own, CUDA_MEMCPY2D, again_2d, AT_ONCE_OWN)
COPY_BOX(copy_3d, CUDA_MEMCPY3D, again_3d, AT_ONCE)
COPY_BOX(copy_3d_own, CUDA_MEMCPY3D, again_3d, AT_ONCE_OWN)
QUEUE_BOX(queue_2d, CUDA_MEMCPY2D, again_2d, QUEUED)
QUEUE_BOX(queue_2d_own, CUDA_MEMCPY2D, again_2d, QUEUED_OWN)
QUEUE_BOX(queue_3d, CUDA_MEMCPY3D, again_3d, QUEUED)
QUEUE_BOX(queue_3d_own, CUDA_MEMCPY3D, again_3d, QUEUED_OWN)

/* ---- begin and end ----------------------------------------------------------------------------------------------- */

__attribute__((constructor)) static void begin(void)
{
    free_is_async = environment_is("GALLOC_PRELOAD_FREE", "async");
}

/* GALLOC_PRELOAD_REPORT=1: a line for each device, when the program ends. No call of CUDA. */
__attribute__((destructor)) static void report(void)
{
    galloc_stats stats;
    int i;
    if (!environment_is("GALLOC_PRELOAD_REPORT", "1") || forked) return;
    for (i = 0; i < MAX_DEVICES; i++) {
        const device *d = &devices[i];
        if (d->state != SERVED || galloc_pool_stats(d->pool, &stats)) continue;
        (void)fprintf(stderr,
                      "galloc_preload: process %ld, device %d: %llu allocations and %llu frees took %llu driver calls; "
                      "held %.1f MiB at most, %.1f MiB in use; %llu allocations left to the driver\n",
                      (long)getpid(), i, (unsigned long long)d->allocations, (unsigned long long)d->frees,
                      (unsigned long long)(d->driver_calls + calls_of(&stats.driver)),
                      (double)higher(stats.reserved.peak, d->most_reserved) / (1 << 20),
                      (double)higher(stats.allocated.peak, d->most_used) / (1 << 20),
                      (unsigned long long)left_to_driver);
    }
}
