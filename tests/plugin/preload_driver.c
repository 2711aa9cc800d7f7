/* preload_driver.c - what a libcuda.so.1 has beyond the simulated device: cuGetProcAddress, and memory functions that
   galloc itself does not call. check_preload.sh links it with the device into a library of that name. Calls count as
   cuMemGetInfo where the device has no number for them. */

#include <string.h>

#include "sim_internal.h"

static bool is_primary(CUcontext c) { return c && c->primary; }

/* ---- memory of cudaMalloc's kind --------------------------------------------------------------------------------- */

static int allocate(CUdeviceptr *out, size_t bytes) {
    uint64_t address = 0;
    int error = out ? sm_malloc_block(&address, bytes) : E_VALUE;
    if (!error) *out = address;
    return error;
}

/* Another pitch than galloc's, so that a test sees who answers. */
CUresult CUDAAPI cuMemAllocPitch_v2(CUdeviceptr *out, size_t *pitch, size_t width, size_t height, unsigned element);
CUresult CUDAAPI cuMemAllocPitch_v2(CUdeviceptr *out, size_t *pitch, size_t width, size_t height, unsigned element) {
    (void)element;
    *pitch = (width + 1023) & ~(size_t)1023;
    SM_DRIVER(cuMemAlloc, height > SIZE_MAX / *pitch ? E_MEMORY : allocate(out, *pitch * height));
}

CUresult CUDAAPI cuMemAllocManaged(CUdeviceptr *out, size_t bytes, unsigned flags);
CUresult CUDAAPI cuMemAllocManaged(CUdeviceptr *out, size_t bytes, unsigned flags) {
    (void)flags;
    SM_DRIVER(cuMemAlloc, allocate(out, bytes));
}

/* ---- questions --------------------------------------------------------------------------------------------------- */

/* Of a page, as the driver sees mapped memory: no context, and the page's range. */
static int attribute_of(void *data, int attribute, CUdeviceptr p) {
    size_t left;
    const sm_mapping *m = sm_mapping_at(p, &left);
    if (!m) return E_VALUE;
    switch (attribute) {
    case 1: *(CUcontext *)data = NULL; return 0;
    case 2: *(unsigned *)data = 2; return 0;
    case 7: *(unsigned long long *)data = m->handle->id; return 0;
    case 9: *(int *)data = m->handle->device; return 0;
    case 11: *(CUdeviceptr *)data = m->address; return 0;
    case 12: *(size_t *)data = m->handle->size; return 0;
    }
    return E_VALUE;
}

CUresult CUDAAPI cuPointerGetAttribute(void *data, int attribute, CUdeviceptr p);
CUresult CUDAAPI cuPointerGetAttribute(void *data, int attribute, CUdeviceptr p) {
    SM_DRIVER(cuMemGetInfo, attribute_of(data, attribute, p));
}

CUresult CUDAAPI cuPointerGetAttributes(unsigned n, const int *attributes, void **data, CUdeviceptr p);
CUresult CUDAAPI cuPointerGetAttributes(unsigned n, const int *attributes, void **data, CUdeviceptr p) {
    for (unsigned i = 0; i < n; i++) (void)cuPointerGetAttribute(data[i], attributes[i], p);
    return CUDA_SUCCESS;
}

static int ipc_of(uint64_t *handle, CUdeviceptr p) {
    size_t left;
    const sm_mapping *m = sm_mapping_at(p, &left);
    if (!m || !m->plain) return E_VALUE;
    handle[0] = m->address;
    return 0;
}

CUresult CUDAAPI cuIpcGetMemHandle(void *handle, CUdeviceptr p);
CUresult CUDAAPI cuIpcGetMemHandle(void *handle, CUdeviceptr p) { SM_DRIVER(cuMemGetInfo, ipc_of(handle, p)); }

/* ---- pools ------------------------------------------------------------------------------------------------------- */

static CUmemoryPool current_pool[SM_DEVICES];

static int default_pool(CUmemoryPool *out, CUdevice device) { return sm_pool_default(out, device); }

static int get_pool(CUmemoryPool *out, CUdevice device) {
    if (!current_pool[device]) return sm_pool_default(out, device);
    *out = current_pool[device];
    return 0;
}

CUresult CUDAAPI cuDeviceGetDefaultMemPool(CUmemoryPool *out, CUdevice device);
CUresult CUDAAPI cuDeviceGetDefaultMemPool(CUmemoryPool *out, CUdevice device) {
    SM_DRIVER(cudaDeviceGetDefaultMemPool, default_pool(out, device));
}

CUresult CUDAAPI cuDeviceGetMemPool(CUmemoryPool *out, CUdevice device);
CUresult CUDAAPI cuDeviceGetMemPool(CUmemoryPool *out, CUdevice device) {
    SM_DRIVER(cudaDeviceGetDefaultMemPool, get_pool(out, device));
}

CUresult CUDAAPI cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool);
CUresult CUDAAPI cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool) {
    current_pool[device] = pool;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *access, size_t n);
CUresult CUDAAPI cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *access, size_t n) {
    (void)access;
    return pool && n ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- contexts and streams ---------------------------------------------------------------------------------------- */

CUresult CUDAAPI cuCtxEnablePeerAccess(CUcontext owner, unsigned flags);
CUresult CUDAAPI cuCtxEnablePeerAccess(CUcontext owner, unsigned flags) {
    if (!is_primary(owner)) return CUDA_ERROR_INVALID_CONTEXT;
    return (CUresult)(int)cudaDeviceEnablePeerAccess(owner->device, flags);
}

CUresult CUDAAPI cuDevicePrimaryCtxReset_v2(CUdevice device);
CUresult CUDAAPI cuDevicePrimaryCtxReset_v2(CUdevice device) {
    int before = 0;
    if (cudaGetDevice(&before) || cudaSetDevice(device)) return CUDA_ERROR_INVALID_DEVICE;
    (void)cudaDeviceReset();
    return (CUresult)(int)cudaSetDevice(before);
}

CUresult CUDAAPI cuStreamCreateWithPriority(CUstream *out, unsigned flags, int priority);
CUresult CUDAAPI cuStreamCreateWithPriority(CUstream *out, unsigned flags, int priority) {
    SM_DRIVER(cuStreamCreate, sm_stream_open(out, flags, priority));
}

static void (*after_wait)(void);

/* The function is called in each thread whose wait for its context has just ended. NULL: none. */
void preload_after_wait(void (*call)(void));
void preload_after_wait(void (*call)(void)) { after_wait = call; }

static CUresult CUDAAPI wait_and_tell(void) {
    CUresult result = cuCtxSynchronize();
    if (after_wait) after_wait();
    return result;
}

/* ---- copies ------------------------------------------------------------------------------------------------------ */

/* Of any number of rows; each is an operation. Arrays there are none. */
static int copy_box(const CUDA_MEMCPY3D_PEER *c, CUstream stream, bool wait, bool peer) {
    int error = 0;
    for (size_t z = 0; z < c->Depth && !error; z++)
        for (size_t y = 0; y < c->Height && !error; y++) {
            uint64_t from = c->srcMemoryType == CU_MEMORYTYPE_HOST ? (uintptr_t)c->srcHost : c->srcDevice;
            uint64_t to = c->dstMemoryType == CU_MEMORYTYPE_HOST ? (uintptr_t)c->dstHost : c->dstDevice;
            from += ((c->srcZ + z) * c->srcHeight + c->srcY + y) * c->srcPitch + c->srcXInBytes;
            to += ((c->dstZ + z) * c->dstHeight + c->dstY + y) * c->dstPitch + c->dstXInBytes;
            if (!peer) {
                error = sm_copy(to, from, c->WidthInBytes, (int)cudaMemcpyDefault, stream, wait);
                continue;
            }
            sm_work w;
            error = c->WidthInBytes > (1u << 31) - 1 ? E_VALUE : 0; /* a pitch is no longer */
            if (!error) error = sm_work_of_copy(&w, to, from, c->WidthInBytes, (int)cudaMemcpyDefault);
            if (!error && ((w.to_device && !c->dstContext) || (w.from_device && !c->srcContext))) error = 201;
            w.peer = true;
            if (!error && c->WidthInBytes) error = sm_work_queue(stream, &w, NULL);
            if (!error && wait && !(w.to_device && w.from_device)) error = (int)cuStreamSynchronize(stream);
        }
    return error;
}

static int copy_3d(const CUDA_MEMCPY3D *c, CUstream stream, bool wait) {
    CUDA_MEMCPY3D_PEER p;
    memcpy(&p, c, sizeof p); /* the same members; a context is there in place of what is reserved */
    return copy_box(&p, stream, wait, false);
}

static int copy_2d(const CUDA_MEMCPY2D *c, CUstream stream, bool wait) {
    CUDA_MEMCPY3D_PEER p = {.srcXInBytes = c->srcXInBytes, .srcY = c->srcY, .srcMemoryType = c->srcMemoryType};
    p.srcHost = c->srcHost, p.srcDevice = c->srcDevice, p.srcPitch = c->srcPitch;
    p.dstXInBytes = c->dstXInBytes, p.dstY = c->dstY, p.dstMemoryType = c->dstMemoryType;
    p.dstHost = c->dstHost, p.dstDevice = c->dstDevice, p.dstPitch = c->dstPitch;
    p.WidthInBytes = c->WidthInBytes, p.Height = c->Height, p.Depth = 1;
    return copy_box(&p, stream, wait, false);
}

/* The kind must be right. */
static int copy_kind(uint64_t to, uint64_t from, size_t n, int kind, CUstream stream, bool wait) {
    bool to_device = sm_region_at(to), from_device = sm_region_at(from);
    if (kind != (int)cudaMemcpyDefault && kind != (from_device ? 2 : 0) + (to_device ? 1 : 0)) return E_VALUE;
    return sm_copy(to, from, n, (int)cudaMemcpyDefault, stream, wait);
}

/* A function that returns when the copy is done, one that queues it, and these with the per-thread default stream. */
#define FUNCTION(name, parameters, body) \
    CUresult CUDAAPI name parameters;    \
    CUresult CUDAAPI name parameters { SM_DRIVER(cuMemcpyDtoHAsync, body); }
#define OWN_OR(s) ((s) ? (s) : CU_STREAM_PER_THREAD)
#define COPIES(now, queued, to_type, from_type, kind) \
    FUNCTION(now, (to_type to, from_type from, size_t n), \
             copy_kind((uint64_t)to, (uint64_t)from, n, (int)kind, CU_STREAM_LEGACY, true)) \
    FUNCTION(now##_ptds, (to_type to, from_type from, size_t n), \
             copy_kind((uint64_t)to, (uint64_t)from, n, (int)kind, CU_STREAM_PER_THREAD, true)) \
    FUNCTION(queued, (to_type to, from_type from, size_t n, CUstream s), \
             copy_kind((uint64_t)to, (uint64_t)from, n, (int)kind, s, false)) \
    FUNCTION(queued##_ptsz, (to_type to, from_type from, size_t n, CUstream s), \
             copy_kind((uint64_t)to, (uint64_t)from, n, (int)kind, OWN_OR(s), false))
#define BOXES(now, queued, type, copy) \
    FUNCTION(now, (const type *c), copy(c, CU_STREAM_LEGACY, true)) \
    FUNCTION(now##_ptds, (const type *c), copy(c, CU_STREAM_PER_THREAD, true)) \
    FUNCTION(queued, (const type *c, CUstream s), copy(c, s, false)) \
    FUNCTION(queued##_ptsz, (const type *c, CUstream s), copy(c, OWN_OR(s), false))

COPIES(cuMemcpy, cuMemcpyAsync, CUdeviceptr, CUdeviceptr, cudaMemcpyDefault)
COPIES(cuMemcpyHtoD_v2, cuMemcpyHtoDAsync_v2, CUdeviceptr, const void *, cudaMemcpyHostToDevice)
COPIES(cuMemcpyDtoD_v2, cuMemcpyDtoDAsync_v2, CUdeviceptr, CUdeviceptr, cudaMemcpyDeviceToDevice)
BOXES(cuMemcpy2D_v2, cuMemcpy2DAsync_v2, CUDA_MEMCPY2D, copy_2d)
BOXES(cuMemcpy3D_v2, cuMemcpy3DAsync_v2, CUDA_MEMCPY3D, copy_3d)
FUNCTION(cuMemcpy2DUnaligned_v2, (const CUDA_MEMCPY2D *c), copy_2d(c, CU_STREAM_LEGACY, true))
FUNCTION(cuMemcpy2DUnaligned_v2_ptds, (const CUDA_MEMCPY2D *c), copy_2d(c, CU_STREAM_PER_THREAD, true))
FUNCTION(cuMemcpyDtoH_v2, (void *to, CUdeviceptr from, size_t n),
         copy_kind((uintptr_t)to, from, n, (int)cudaMemcpyDeviceToHost, CU_STREAM_LEGACY, true))
FUNCTION(cuMemcpyDtoH_v2_ptds, (void *to, CUdeviceptr from, size_t n),
         copy_kind((uintptr_t)to, from, n, (int)cudaMemcpyDeviceToHost, CU_STREAM_PER_THREAD, true))
FUNCTION(cuMemcpy3DPeer, (const CUDA_MEMCPY3D_PEER *c), copy_box(c, CU_STREAM_LEGACY, true, true))

/* Refused on a captured stream. */
static int queue_peer(const CUDA_MEMCPY3D_PEER *c, CUstream s) {
    int status = 0;
    int error = sm_capture_status(s, &status, NULL, NULL);
    return error ? error : status ? 900 : copy_box(c, s, false, true);
}
FUNCTION(cuMemcpy3DPeerAsync, (const CUDA_MEMCPY3D_PEER *c, CUstream s), queue_peer(c, s))

/* ---- entry points ------------------------------------------------------------------------------------------------ */

/* A form of a function that is newer than any program here: its arguments are not known. */
static int newer_form(void) { return 0; }

CUresult CUDAAPI cuGetProcAddress(const char *name, void **out, int version, cuuint64_t flags);
CUresult CUDAAPI cuGetProcAddress_v2(const char *name, void **out, int version, cuuint64_t flags, int *status);

static const struct {
    const char *name;
    int since;
    void (*function)(void), (*own)(void); /* own: with the per-thread default stream, where that is another function */
} more[] = {
#define MORE(name, since, function) {name, since, (void (*)(void))(function), (void (*)(void))(function)}
#define FORMS(name, function, own) \
    MORE(name, 3020, function), {name, 7000, (void (*)(void))(function), (void (*)(void))(own)}
    FORMS("cuMemcpy", cuMemcpy, cuMemcpy_ptds), FORMS("cuMemcpyAsync", cuMemcpyAsync, cuMemcpyAsync_ptsz),
    FORMS("cuMemcpyHtoD", cuMemcpyHtoD_v2, cuMemcpyHtoD_v2_ptds),
    FORMS("cuMemcpyHtoDAsync", cuMemcpyHtoDAsync_v2, cuMemcpyHtoDAsync_v2_ptsz),
    FORMS("cuMemcpyDtoD", cuMemcpyDtoD_v2, cuMemcpyDtoD_v2_ptds),
    FORMS("cuMemcpyDtoDAsync", cuMemcpyDtoDAsync_v2, cuMemcpyDtoDAsync_v2_ptsz),
    FORMS("cuMemcpyDtoH", cuMemcpyDtoH_v2, cuMemcpyDtoH_v2_ptds),
    FORMS("cuMemcpy2D", cuMemcpy2D_v2, cuMemcpy2D_v2_ptds),
    FORMS("cuMemcpy2DUnaligned", cuMemcpy2DUnaligned_v2, cuMemcpy2DUnaligned_v2_ptds),
    FORMS("cuMemcpy2DAsync", cuMemcpy2DAsync_v2, cuMemcpy2DAsync_v2_ptsz),
    FORMS("cuMemcpy3D", cuMemcpy3D_v2, cuMemcpy3D_v2_ptds),
    FORMS("cuMemcpy3DAsync", cuMemcpy3DAsync_v2, cuMemcpy3DAsync_v2_ptsz),
    MORE("cuMemcpy3DPeer", 4000, cuMemcpy3DPeer), MORE("cuMemcpy3DPeerAsync", 4000, cuMemcpy3DPeerAsync),
    MORE("cuGetProcAddress", 11030, cuGetProcAddress), MORE("cuGetProcAddress", 12000, cuGetProcAddress_v2),
    MORE("cuMemAllocPitch", 3020, cuMemAllocPitch_v2), MORE("cuMemAllocManaged", 6000, cuMemAllocManaged),
    MORE("cuPointerGetAttribute", 4000, cuPointerGetAttribute),
    MORE("cuPointerGetAttributes", 7000, cuPointerGetAttributes), MORE("cuIpcGetMemHandle", 4010, cuIpcGetMemHandle),
    MORE("cuDeviceGetDefaultMemPool", 11020, cuDeviceGetDefaultMemPool),
    MORE("cuDeviceGetMemPool", 11020, cuDeviceGetMemPool), MORE("cuDeviceSetMemPool", 11020, cuDeviceSetMemPool),
    MORE("cuMemPoolSetAccess", 11020, cuMemPoolSetAccess), MORE("cuCtxEnablePeerAccess", 4000, cuCtxEnablePeerAccess),
    MORE("cuCtxDestroy", 4000, cuCtxDestroy_v2),
    MORE("cuDevicePrimaryCtxReset", 11000, cuDevicePrimaryCtxReset_v2),
    MORE("cuStreamCreateWithPriority", 5050, cuStreamCreateWithPriority),
    MORE("cuCtxSynchronize", 2000, wait_and_tell), MORE("cuMemGetInfo", 99000, newer_form),
};

CUresult CUDAAPI cuGetProcAddress_v2(const char *name, void **out, int version, cuuint64_t flags, int *status) {
    int result = 1, since = 0, device_version = 0;
    if (!name || !out) return CUDA_ERROR_INVALID_VALUE;
    (void)cuDriverGetVersion(&device_version); /* a device that the program has not started begins now */
    (void)sm_entry_point(name, out, version, flags == 2 ? cudaEnablePerThreadDefaultStream : 0, &result);
    for (size_t i = 0; i < sizeof more / sizeof *more; i++) {
        if (strcmp(more[i].name, name) || more[i].since > version || more[i].since <= since) continue;
        since = more[i].since;
        memcpy(out, flags == 2 ? &more[i].own : &more[i].function, sizeof *out);
    }
    if (status) *status = *out ? 0 : result;
    return *out ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult CUDAAPI cuGetProcAddress(const char *name, void **out, int version, cuuint64_t flags) {
    return cuGetProcAddress_v2(name, out, version, flags, NULL);
}
