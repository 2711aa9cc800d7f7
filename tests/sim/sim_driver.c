/* sim_driver.c - the functions of the driver API, and the table by which they are looked up. They leave the runtime's
   last error alone. */

#include <string.h>

#include "sim_internal.h"

/* Functions that exist in several versions are defined by their full names, whatever the headers make of the short. */
#undef cuStreamGetCaptureInfo
#undef cuCtxCreate
#undef cuGraphNodeGetDependencies
CUresult CUDAAPI cuGraphNodeGetDependencies(CUgraphNode node, CUgraphNode *deps, size_t *n);

/* ---- shared with the runtime ------------------------------------------------------------------------------------ */

static const sm_error errors[] = {
    {0, "CUDA_SUCCESS", "cudaSuccess", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "cudaErrorInvalidValue", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "cudaErrorMemoryAllocation", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "cudaErrorInitializationError", "initialization error"},
    {4, "CUDA_ERROR_DEINITIALIZED", "cudaErrorCudartUnloading", "driver shutting down"},
    {9, "CUDA_ERROR_UNKNOWN", "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {12, "CUDA_ERROR_UNKNOWN", "cudaErrorInvalidPitchValue", "invalid pitch argument"},
    {13, "CUDA_ERROR_UNKNOWN", "cudaErrorInvalidSymbol", "invalid symbol"},
    {16, "CUDA_ERROR_UNKNOWN", "cudaErrorInvalidHostPointer", "invalid host pointer"},
    {17, "CUDA_ERROR_UNKNOWN", "cudaErrorInvalidDevicePointer", "invalid device pointer"},
    {21, "CUDA_ERROR_UNKNOWN", "cudaErrorInvalidMemcpyDirection", "invalid copy direction for memcpy"},
    {34, "CUDA_ERROR_STUB_LIBRARY", "cudaErrorStubLibrary", "stub library"},
    {35, "CUDA_ERROR_UNKNOWN", "cudaErrorInsufficientDriver",
     "CUDA driver version is insufficient for CUDA runtime version"},
    {36, "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER", "cudaErrorCallRequiresNewerDriver", "the call needs a newer driver"},
    {46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "cudaErrorDevicesUnavailable", "all devices are busy or unavailable"},
    {49, "CUDA_ERROR_UNKNOWN", "cudaErrorIncompatibleDriverContext", "incompatible driver context"},
    {98, "CUDA_ERROR_UNKNOWN", "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {100, "CUDA_ERROR_NO_DEVICE", "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "cudaErrorInvalidDevice", "invalid device ordinal"},
    {127, "CUDA_ERROR_UNKNOWN", "cudaErrorStartupFailure", "startup failure"},
    {200, "CUDA_ERROR_INVALID_IMAGE", "cudaErrorInvalidKernelImage", "the kernel image is invalid"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "cudaErrorDeviceUninitialized", "invalid device context"},
    {205, "CUDA_ERROR_MAP_FAILED", "cudaErrorMapBufferObjectFailed", "map buffer object failed"},
    {206, "CUDA_ERROR_UNMAP_FAILED", "cudaErrorUnmapBufferObjectFailed", "unmap buffer object failed"},
    {207, "CUDA_ERROR_ARRAY_IS_MAPPED", "cudaErrorArrayIsMapped", "array is mapped"},
    {208, "CUDA_ERROR_ALREADY_MAPPED", "cudaErrorAlreadyMapped", "already mapped"},
    {210, "CUDA_ERROR_ALREADY_ACQUIRED", "cudaErrorAlreadyAcquired", "already acquired"},
    {211, "CUDA_ERROR_NOT_MAPPED", "cudaErrorNotMapped", "not mapped"},
    {214, "CUDA_ERROR_ECC_UNCORRECTABLE", "cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"},
    {215, "CUDA_ERROR_UNSUPPORTED_LIMIT", "cudaErrorUnsupportedLimit", "unsupported limit"},
    {216, "CUDA_ERROR_CONTEXT_ALREADY_IN_USE", "cudaErrorDeviceAlreadyInUse", "device already in use"},
    {217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "cudaErrorPeerAccessUnsupported", "peer access unsupported"},
    {220, "CUDA_ERROR_NVLINK_UNCORRECTABLE", "cudaErrorNvlinkUncorrectable", "nvlink uncorrectable"},
    {226, "CUDA_ERROR_CONTAINED", "cudaErrorContained", "contained"},
    {304, "CUDA_ERROR_OPERATING_SYSTEM", "cudaErrorOperatingSystem", "a call of the operating system failed"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {401, "CUDA_ERROR_ILLEGAL_STATE", "cudaErrorIllegalState",
     "the operation cannot be performed in the present state"},
    {500, "CUDA_ERROR_NOT_FOUND", "cudaErrorSymbolNotFound", "named symbol not found"},
    {600, "CUDA_ERROR_NOT_READY", "cudaErrorNotReady", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "cudaErrorLaunchOutOfResources",
     "too many resources requested for a launch"},
    {702, "CUDA_ERROR_LAUNCH_TIMEOUT", "cudaErrorLaunchTimeout", "a kernel ran for too long"},
    {704, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "cudaErrorPeerAccessAlreadyEnabled",
     "peer access is already enabled"},
    {705, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", "cudaErrorPeerAccessNotEnabled",
     "peer access has not been enabled"},
    {708, "CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE", "cudaErrorSetOnActiveProcess", "set on active process"},
    {709, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "cudaErrorContextIsDestroyed", "context is destroyed"},
    {710, "CUDA_ERROR_ASSERT", "cudaErrorAssert", "device-side assert triggered"},
    {711, "CUDA_ERROR_TOO_MANY_PEERS", "cudaErrorTooManyPeers", "too many peers"},
    {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "cudaErrorHostMemoryAlreadyRegistered",
     "part or all of the requested memory range is already mapped"},
    {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "cudaErrorHostMemoryNotRegistered",
     "pointer does not correspond to a registered memory region"},
    {714, "CUDA_ERROR_HARDWARE_STACK_ERROR", "cudaErrorHardwareStackError", "hardware stack error"},
    {715, "CUDA_ERROR_ILLEGAL_INSTRUCTION", "cudaErrorIllegalInstruction", "illegal instruction in a kernel"},
    {716, "CUDA_ERROR_MISALIGNED_ADDRESS", "cudaErrorMisalignedAddress", "misaligned address in a kernel"},
    {717, "CUDA_ERROR_INVALID_ADDRESS_SPACE", "cudaErrorInvalidAddressSpace", "invalid address space"},
    {718, "CUDA_ERROR_INVALID_PC", "cudaErrorInvalidPc", "invalid program counter"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "cudaErrorLaunchFailure", "unspecified launch failure"},
    {721, "CUDA_ERROR_TENSOR_MEMORY_LEAK", "cudaErrorTensorMemoryLeak", "tensor memory leak"},
    {800, "CUDA_ERROR_NOT_PERMITTED", "cudaErrorNotPermitted", "operation not permitted"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "cudaErrorNotSupported", "operation not supported"},
    {802, "CUDA_ERROR_SYSTEM_NOT_READY", "cudaErrorSystemNotReady", "system not ready"},
    {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "cudaErrorSystemDriverMismatch", "system driver mismatch"},
    {804, "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE", "cudaErrorCompatNotSupportedOnDevice",
     "compat not supported on device"},
    {805, "CUDA_ERROR_MPS_CONNECTION_FAILED", "cudaErrorMpsConnectionFailed", "MPS connection failed"},
    {806, "CUDA_ERROR_MPS_RPC_FAILURE", "cudaErrorMpsRpcFailure", "MPS RPC failure"},
    {807, "CUDA_ERROR_MPS_SERVER_NOT_READY", "cudaErrorMpsServerNotReady", "MPS server not ready"},
    {808, "CUDA_ERROR_MPS_MAX_CLIENTS_REACHED", "cudaErrorMpsMaxClientsReached", "MPS max clients reached"},
    {809, "CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED", "cudaErrorMpsMaxConnectionsReached", "MPS max connections reached"},
    {810, "CUDA_ERROR_MPS_CLIENT_TERMINATED", "cudaErrorMpsClientTerminated", "MPS client terminated"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {902, "CUDA_ERROR_STREAM_CAPTURE_MERGE", "cudaErrorStreamCaptureMerge",
     "operation would result in a merge of separate capture sequences"},
    {903, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "cudaErrorStreamCaptureUnmatched",
     "capture was not ended in the same stream as it began"},
    {904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "cudaErrorStreamCaptureUnjoined",
     "capturing stream has unjoined work"},
    {905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "cudaErrorStreamCaptureIsolation",
     "dependency created on uncaptured work in another stream"},
    {906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "cudaErrorStreamCaptureImplicit",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {907, "CUDA_ERROR_CAPTURED_EVENT", "cudaErrorCapturedEvent",
     "operation not permitted on an event last recorded in a capturing stream"},
    {908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", "cudaErrorStreamCaptureWrongThread",
     "attempt to terminate a thread-local capture sequence from another thread"},
    {909, "CUDA_ERROR_TIMEOUT", "cudaErrorTimeout", "timeout"},
    {910, "CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE", "cudaErrorGraphExecUpdateFailure",
     "the graph update was not performed because it included changes which violated constraints specific to "
     "instantiated graph update"},
    {911, "CUDA_ERROR_EXTERNAL_DEVICE", "cudaErrorExternalDevice", "external device"},
    {999, "CUDA_ERROR_UNKNOWN", "cudaErrorUnknown", "unknown error"},
};

const sm_error *sm_error_of(int code) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) return &errors[i];
    return NULL;
}

static bool is_device(int device) { return device >= 0 && device < sm.opt.devices; }

int sm_attribute(int *value, int attribute, int device) {
    if (!value) return E_VALUE;
    if (!is_device(device)) return E_DEVICE;
    if (attribute == 110 && sm.opt.rdma < 0) return E_VALUE;
    switch (attribute) {
    case 1: case 2: case 3: *value = 1024; break; /* threads in a block */
    case 4: *value = 64; break;
    case 5: case 11: *value = INT32_MAX; break; /* blocks in a grid; pitch */
    case 6: case 7: *value = 65535; break;
    case 8: *value = 48 << 10; break;      /* shared memory of a block, */
    case 97: *value = 227 << 10; break;    /* when asked for, */
    case 81: *value = 228 << 10; break;    /* and of a multiprocessor */
    case 9: case 12: case 82: *value = 65536; break; /* constant memory, registers */
    case 13: *value = 1980000; break;      /* clock, of memory too, its bus */
    case 36: *value = 3201000; break;
    case 37: *value = 6144; break;
    case 38: *value = 60 << 20; break;     /* L2 cache */
    case 39: *value = 2048; break;         /* threads of a multiprocessor */
    case 40: *value = 3; break;            /* copy engines */
    case 83: case 84: case 88: case 89: case 95: *value = 0; break; /* managed memory, cooperative launch */
    case 106: *value = 32; break;          /* blocks of a multiprocessor */
    case 10: *value = 32; break;           /* threads in a warp */
    case 16: *value = 132; break;          /* multiprocessors */
    case 18: case 20: case 33: *value = 0; break; /* integrated, compute mode, bus */
    case 75: *value = 9; break;            /* compute capability */
    case 76: *value = 0; break;
    case 102: *value = !sm.device[device].has.no_vmm; break; /* virtual memory management */
    case 110: *value = !sm.device[device].has.no_rdma; break; /* pages for RDMA */
    case 115: *value = !sm.device[device].has.no_pools; break;
    case 104: case 128: *value = 0; break; /* handles for Windows, for fabric */
    default: *value = 1;
    }
    return 0;
}

int sm_peer(int *can, int device, int peer) {
    if (!can) return E_VALUE;
    if (!is_device(device) || !is_device(peer)) return E_DEVICE;
    *can = device != peer;
    return 0;
}

int sm_stream_id(CUstream handle, unsigned long long *id) {
    sm_stream *s;
    int error = sm_stream_find(handle, &s);
    if (error || !id) return error ? error : E_VALUE;
    error = sm_capture_touched(s);
    if (!error) *id = s->id;
    return error;
}

int sm_stream_flags(CUstream handle, unsigned *flags) {
    sm_stream *s;
    int error = sm_stream_find(handle, &s);
    if (error || !flags) return error ? error : E_VALUE;
    error = sm_capture_touched(s);
    if (!error) *flags = s->flags;
    return error;
}

int sm_stream_device(CUstream handle, int *device) {
    sm_stream *s;
    int error = sm_stream_find(handle, &s);
    if (error || !device) return error ? error : E_VALUE;
    *device = s->context->device;
    return 0;
}

int sm_host_function(CUstream handle, void (*call)(void *), void *arg) {
    sm_work w = {.kind = WORK_ACCESS, .call = call, .arg = arg};
    return call ? sm_work_queue(handle, &w, NULL) : E_VALUE;
}

/* A look at a default stream takes the driver longer. */
static CUstream looked_at(CUstream handle) {
    if (!handle || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD) sm_charge(0.022);
    return handle;
}

static int put(int *out, int value) {
    if (!out) return E_VALUE;
    *out = value;
    return 0;
}

/* ---- the driver and its devices --------------------------------------------------------------------------------- */

static int get_device(CUdevice *out, int ordinal) { return is_device(ordinal) ? put(out, ordinal) : E_DEVICE; }

static int total_memory(size_t *bytes, CUdevice device) {
    if (!bytes || !is_device(device)) return bytes ? E_DEVICE : E_VALUE;
    *bytes = sm.device[device].has.memory;
    return 0;
}

static CUresult error_text(int fn, CUresult error, const char **out, bool name) {
    sm_count(fn);
    const sm_error *e = sm_error_of((int)error);
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    *out = !e ? NULL : name ? e->driver : e->text;
    return e ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuInit(unsigned int flags) { SM_DRIVER(cuInit, flags ? E_VALUE : 0); }
CUresult CUDAAPI cuDeviceGet(CUdevice *out, int ordinal) { SM_DRIVER(cuDeviceGet, get_device(out, ordinal)); }
CUresult CUDAAPI cuDeviceGetCount(int *count) { SM_DRIVER(cuDeviceGetCount, put(count, sm.opt.devices)); }

CUresult CUDAAPI cuDriverGetVersion(int *version) {
    SM_DRIVER(cuDriverGetVersion, put(version, sm.opt.driver_version));
}

CUresult CUDAAPI cuDeviceTotalMem(size_t *bytes, CUdevice device) {
    SM_DRIVER(cuDeviceTotalMem, total_memory(bytes, device));
}

CUresult CUDAAPI cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    SM_DRIVER(cuDeviceGetAttribute, sm_attribute(value, (int)attribute, device));
}

CUresult CUDAAPI cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
    SM_DRIVER(cuDeviceCanAccessPeer, sm_peer(can, device, peer));
}

CUresult CUDAAPI cuGetErrorName(CUresult error, const char **out) {
    return error_text(FN_cuGetErrorName, error, out, true);
}

CUresult CUDAAPI cuGetErrorString(CUresult error, const char **out) {
    return error_text(FN_cuGetErrorString, error, out, false);
}

/* ---- contexts --------------------------------------------------------------------------------------------------- */

static int get_current(CUcontext *out) {
    if (!out) return E_VALUE;
    *out = sm_current();
    return 0;
}

static int set_current(CUcontext c) {
    sm_context_set(sm_self(), c);
    return 0;
}

static int push_current(CUcontext c) {
    if (!c) return E_VALUE;
    sm_context_push(sm_self(), c);
    return 0;
}

static int pop_current(CUcontext *out) {
    sm_thread *t = sm_self();
    if (!t->depth) return E_CONTEXT;
    t->depth--;
    if (out) *out = t->stack[t->depth];
    return 0;
}

static int context_id(CUcontext c, unsigned long long *id) {
    if (!c) c = sm_current();
    int error = sm_context_look(c);
    if (error || !id) return error ? error : E_VALUE;
    *id = c->id;
    return 0;
}

static int context_device(CUdevice *out, CUcontext c) {
    if (!c) c = sm_current();
    int error = sm_context_look(c);
    return error ? error : put(out, c->device);
}

static int context_wait(CUcontext c) {
    if (!c) c = sm_current();
    int error = sm_context_use(c);
    return error ? error : sm_synchronize(c);
}

/* At the address of one that has ended, if there is one. */
static sm_context *context_place(CUdevice device) {
    for (size_t i = 0; i < sm.ncontexts; i++)
        if (!sm.contexts[i]->live && sm.contexts[i]->device == device) return sm.contexts[i];
    sm_context *c = sm_alloc(sizeof *c);
    c->device = device;
    sm.contexts = sm_grow(sm.contexts, sm.ncontexts, &sm.capcontexts, sizeof *sm.contexts);
    sm.contexts[sm.ncontexts++] = c;
    return c;
}

static int context_new(CUcontext *out, CUdevice device, bool green) {
    if (!out || !is_device(device)) return out ? E_DEVICE : E_VALUE;
    sm_context *c = *out = context_place(device);
    c->green = green;
    sm_context_open(c);
    return 0;
}

static int context_create(CUcontext *out, CUdevice device) {
    int error = context_new(out, device, false);
    if (!error) sm_context_push(sm_self(), *out);
    return error;
}

static int context_destroy(CUcontext c) {
    if (!c || c->primary) return E_CONTEXT;
    if (!c->live) return E_CONTEXT_DEAD;
    sm_context_close(c);
    sm_thread *t = sm_self();
    if (t->depth && t->stack[t->depth - 1] == c) t->depth--;
    return 0;
}

cudaError_t sim_green_create(CUcontext *context, int device) {
    sm_lock();
    int error = context_new(context, device, true);
    sm_unlock();
    return (cudaError_t)error;
}

cudaError_t sim_green_destroy(CUcontext context) {
    sm_lock();
    int error = context_destroy(context);
    sm_unlock();
    return (cudaError_t)error;
}

static int primary_retain(CUcontext *out, CUdevice device) {
    if (!out || !is_device(device)) return out ? E_DEVICE : E_VALUE;
    sm_context *c = *out = &sm.device[device].primary;
    if (c->live) c->refs++;
    else sm_context_open(c);
    c->retained++;
    return 0;
}

static int primary_release(CUdevice device) {
    if (!is_device(device)) return E_DEVICE;
    sm_context *c = &sm.device[device].primary;
    if (!c->live) return E_CONTEXT;
    if (--c->refs == 0) sm_context_close(c);
    return 0;
}

static int primary_state(CUdevice device, unsigned *flags, int *active) {
    if (!is_device(device)) return E_DEVICE;
    if (flags) *flags = 0;
    return put(active, sm.device[device].primary.live);
}

/* An event recorded on a context is recorded on all its streams; here, on its legacy stream. */
static int record_context(CUcontext c, CUevent event) {
    if (!c) c = sm_current();
    int error = sm_context_use(c);
    if (error) return error;
    if (c->captures) {
        sm_capture_break_blocking(c);
        return E_CAPTURE_UNSUPPORTED;
    }
    if (!event || !event->live || event->context != c) return E_HANDLE;
    sm_event_mark(event, c->legacy);
    return 0;
}

CUresult CUDAAPI cuCtxGetCurrent(CUcontext *out) { SM_DRIVER(cuCtxGetCurrent, get_current(out)); }
CUresult CUDAAPI cuCtxSetCurrent(CUcontext c) { SM_DRIVER(cuCtxSetCurrent, set_current(c)); }
CUresult CUDAAPI cuCtxPushCurrent(CUcontext c) { SM_DRIVER(cuCtxPushCurrent, push_current(c)); }
CUresult CUDAAPI cuCtxPopCurrent(CUcontext *out) { SM_DRIVER(cuCtxPopCurrent, pop_current(out)); }
CUresult CUDAAPI cuCtxGetId(CUcontext c, unsigned long long *id) { SM_DRIVER(cuCtxGetId, context_id(c, id)); }
CUresult CUDAAPI cuCtxGetDevice(CUdevice *out) { SM_DRIVER(cuCtxGetDevice, context_device(out, NULL)); }
CUresult CUDAAPI cuCtxSynchronize(void) { SM_DRIVER(cuCtxSynchronize, context_wait(NULL)); }
CUresult CUDAAPI cuCtxDestroy(CUcontext c) { SM_DRIVER(cuCtxDestroy, context_destroy(c)); }
CUresult CUDAAPI cuCtxRecordEvent(CUcontext c, CUevent e) { SM_DRIVER(cuCtxRecordEvent, record_context(c, e)); }

CUresult CUDAAPI cuCtxGetDevice_v2(CUdevice *out, CUcontext c) { SM_DRIVER(cuCtxGetDevice, context_device(out, c)); }
CUresult CUDAAPI cuCtxSynchronize_v2(CUcontext c) { SM_DRIVER(cuCtxSynchronize, context_wait(c)); }

CUresult CUDAAPI cuCtxCreate_v2(CUcontext *out, unsigned int flags, CUdevice device) {
    (void)flags;
    SM_DRIVER(cuCtxCreate, context_create(out, device));
}

CUresult CUDAAPI cuCtxCreate_v4(CUcontext *out, CUctxCreateParams *params, unsigned int flags, CUdevice device) {
    (void)params;
    (void)flags;
    SM_DRIVER(cuCtxCreate, context_create(out, device));
}

CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device) {
    SM_DRIVER(cuDevicePrimaryCtxRetain, primary_retain(out, device));
}

/* A release that was made to fail was asked for: who asks has done what he can. */
static void note_release(CUdevice device) {
    sm_lock();
    if (is_device(device)) sm.device[device].primary.retained--;
    sm_unlock();
}

CUresult CUDAAPI cuDevicePrimaryCtxRelease(CUdevice device) {
    note_release(device);
    SM_DRIVER(cuDevicePrimaryCtxRelease, primary_release(device));
}

CUresult CUDAAPI cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active) {
    SM_DRIVER(cuDevicePrimaryCtxGetState, primary_state(device, flags, active));
}

/* ---- streams ---------------------------------------------------------------------------------------------------- */

/* Captured streams do tell their context. */
static int stream_context(CUstream handle, CUcontext *out) {
    sm_stream *s;
    int error = sm_stream_find(handle, &s);
    if (error || !out) return error ? error : E_VALUE;
    if (s->legacy) error = sm_capture_touched(s);
    if (!error) *out = s->context;
    return error;
}

CUresult CUDAAPI cuStreamDestroy(CUstream stream) { SM_DRIVER(cuStreamDestroy, sm_stream_close(stream)); }
CUresult CUDAAPI cuStreamQuery(CUstream stream) { SM_DRIVER(cuStreamQuery, sm_stream_query(stream)); }
CUresult CUDAAPI cuStreamSynchronize(CUstream stream) { SM_DRIVER(cuStreamSynchronize, sm_stream_wait(stream)); }

CUresult CUDAAPI cuStreamCreate(CUstream *out, unsigned int flags) {
    SM_DRIVER(cuStreamCreate, sm_stream_open(out, flags, 0));
}

CUresult CUDAAPI cuStreamGetCtx(CUstream stream, CUcontext *out) {
    SM_DRIVER(cuStreamGetCtx, stream_context(stream, out));
}

CUresult CUDAAPI cuStreamGetCtx_v2(CUstream stream, CUcontext *out, struct CUgreenCtx_st **green) {
    if (green) *green = NULL;
    SM_DRIVER(cuStreamGetCtx, stream_context(stream, out));
}

CUresult CUDAAPI cuStreamGetId(CUstream stream, unsigned long long *id) {
    SM_DRIVER(cuStreamGetId, sm_stream_id(looked_at(stream), id));
}

CUresult CUDAAPI cuStreamGetFlags(CUstream stream, unsigned int *flags) {
    SM_DRIVER(cuStreamGetFlags, sm_stream_flags(stream, flags));
}

CUresult CUDAAPI cuStreamGetDevice(CUstream stream, CUdevice *device) {
    SM_DRIVER(cuStreamGetDevice, sm_stream_device(stream, device));
}

CUresult CUDAAPI cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags) {
    SM_DRIVER(cuStreamWaitEvent, sm_stream_after(stream, event, flags));
}

CUresult CUDAAPI cuStreamWaitValue32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned int flags) {
    SM_DRIVER(cuStreamWaitValue32, sm_value(stream, address, value, flags, false));
}

CUresult CUDAAPI cuStreamWriteValue32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned int flags) {
    SM_DRIVER(cuStreamWriteValue32, sm_value(stream, address, value, flags, true));
}

CUresult CUDAAPI cuLaunchHostFunc(CUstream stream, void (*call)(void *), void *arg) {
    SM_DRIVER(cuLaunchHostFunc, sm_host_function(stream, call, arg));
}

/* ---- events ----------------------------------------------------------------------------------------------------- */

CUresult CUDAAPI cuEventQuery(CUevent event) { SM_DRIVER(cuEventQuery, sm_event_query(event)); }
CUresult CUDAAPI cuEventSynchronize(CUevent event) { SM_DRIVER(cuEventSynchronize, sm_event_wait(event)); }
CUresult CUDAAPI cuEventDestroy(CUevent event) { SM_DRIVER(cuEventDestroy, sm_event_close(event)); }

CUresult CUDAAPI cuEventCreate(CUevent *out, unsigned int flags) {
    SM_DRIVER(cuEventCreate, sm_event_open(out, flags));
}

CUresult CUDAAPI cuEventRecord(CUevent event, CUstream stream) {
    SM_DRIVER(cuEventRecord, sm_event_record(event, stream, 0));
}

CUresult CUDAAPI cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned int flags) {
    SM_DRIVER(cuEventRecordWithFlags, sm_event_record(event, stream, flags));
}

/* ---- capture ---------------------------------------------------------------------------------------------------- */

static int capture_info(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph) {
    int now = 0;
    unsigned long long number = 0;
    int error = sm_capture_status(looked_at(stream), &now, &number, graph);
    if (error || !status) return error ? error : E_VALUE;
    *status = (CUstreamCaptureStatus)now;
    if (id) *id = number;
    return 0;
}

static int capture_info_and_nodes(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
                                  const CUgraphNode **deps, const CUgraphEdgeData **edges, size_t *ndeps) {
    int error = capture_info(stream, status, id, graph);
    return error || !(deps || ndeps) ? error : sm_capture_end_nodes(looked_at(stream), deps, (const void **)edges, ndeps);
}

static int exchange_mode(CUstreamCaptureMode *mode) {
    int value = mode ? (int)*mode : -1;
    int error = sm_capture_mode(&value);
    if (!error) *mode = (CUstreamCaptureMode)value;
    return error;
}

CUresult CUDAAPI cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    SM_DRIVER(cuStreamIsCapturing, capture_info(stream, status, NULL, NULL));
}

CUresult CUDAAPI cuStreamGetCaptureInfo_v2(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id,
                                           CUgraph *graph, const CUgraphNode **deps, size_t *ndeps) {
    SM_DRIVER(cuStreamGetCaptureInfo, capture_info_and_nodes(stream, status, id, graph, deps, NULL, ndeps));
}

CUresult CUDAAPI cuStreamGetCaptureInfo_v3(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id,
                                           CUgraph *graph, const CUgraphNode **deps, const CUgraphEdgeData **edges,
                                           size_t *ndeps) {
    if (edges) *edges = NULL;
    SM_DRIVER(cuStreamGetCaptureInfo, capture_info_and_nodes(stream, status, id, graph, deps, edges, ndeps));
}

CUresult CUDAAPI cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode) {
    SM_DRIVER(cuStreamBeginCapture, sm_capture_begin(stream, (int)mode));
}

CUresult CUDAAPI cuStreamEndCapture(CUstream stream, CUgraph *graph) {
    SM_DRIVER(cuStreamEndCapture, sm_capture_end(stream, graph));
}

CUresult CUDAAPI cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    SM_DRIVER(cuThreadExchangeStreamCaptureMode, exchange_mode(mode));
}

CUresult CUDAAPI cuGraphDestroy(CUgraph graph) { SM_DRIVER(cuGraphDestroy, sm_graph_destroy(graph)); }

CUresult CUDAAPI cuGraphNodeGetDependencies(CUgraphNode node, CUgraphNode *deps, size_t *n) {
    SM_DRIVER(cuGraphNodeGetDependencies, sm_node_after(node, deps, NULL, n));
}

CUresult CUDAAPI cuGraphNodeGetDependencies_v2(CUgraphNode node, CUgraphNode *deps, CUgraphEdgeData *edges, size_t *n) {
    SM_DRIVER(cuGraphNodeGetDependencies, sm_node_after(node, deps, edges, n));
}

CUresult CUDAAPI cuUserObjectCreate(struct CUuserObject_st **out, void *ptr, void (*destroy)(void *), unsigned int refs,
                                    unsigned int flags) {
    SM_DRIVER(cuUserObjectCreate, sm_object_create(out, ptr, destroy, refs, flags));
}

CUresult CUDAAPI cuUserObjectRetain(struct CUuserObject_st *object, unsigned int count) {
    SM_DRIVER(cuUserObjectRetain, sm_object_retain(object, count));
}

CUresult CUDAAPI cuUserObjectRelease(struct CUuserObject_st *object, unsigned int count) {
    SM_DRIVER(cuUserObjectRelease, sm_object_release(object, count));
}

CUresult CUDAAPI cuGraphRetainUserObject(CUgraph graph, struct CUuserObject_st *object, unsigned int count,
                                         unsigned int flags) {
    SM_DRIVER(cuGraphRetainUserObject, sm_graph_retain(graph, object, count, flags));
}

/* ---- memory ----------------------------------------------------------------------------------------------------- */

static int malloc_into(CUdeviceptr *out, size_t bytes) {
    uint64_t address = 0;
    int error = out ? sm_malloc_block(&address, bytes) : E_VALUE;
    if (!error) *out = address;
    return error;
}

static int malloc_async_into(CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream stream) {
    uint64_t address = 0;
    int error = out ? sm_malloc_async(&address, bytes, pool, stream) : E_VALUE;
    if (!error) *out = address;
    return error;
}

CUresult CUDAAPI cuMemGetAddressRange(CUdeviceptr *base, size_t *size, CUdeviceptr address) {
    SM_DRIVER(cuMemGetAddressRange, sm_address_range(base, size, address));
}

CUresult CUDAAPI cuMemGetInfo(size_t *left, size_t *total) { SM_DRIVER(cuMemGetInfo, sm_mem_info(left, total)); }
CUresult CUDAAPI cuMemAlloc(CUdeviceptr *out, size_t bytes) { SM_DRIVER(cuMemAlloc, malloc_into(out, bytes)); }
CUresult CUDAAPI cuMemFree(CUdeviceptr address) { SM_DRIVER(cuMemFree, sm_free_block(address)); }

CUresult CUDAAPI cuMemFreeHost(void *p) { SM_DRIVER(cuMemFreeHost, sm_host_free(p)); }

CUresult CUDAAPI cuMemHostAlloc(void **out, size_t bytes, unsigned int flags) {
    SM_DRIVER(cuMemHostAlloc, flags > 7 ? E_VALUE : sm_host_malloc(out, bytes));
}

CUresult CUDAAPI cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream) {
    SM_DRIVER(cuMemsetD8Async, sm_set(to, value, bytes, stream));
}

CUresult CUDAAPI cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t bytes, CUstream stream) {
    SM_DRIVER(cuMemcpyDtoHAsync, sm_copy((uintptr_t)to, from, bytes, (int)cudaMemcpyDeviceToHost, stream, false));
}

CUresult CUDAAPI cuMemAllocAsync(CUdeviceptr *out, size_t bytes, CUstream stream) {
    SM_DRIVER(cuMemAllocAsync, malloc_async_into(out, bytes, NULL, stream));
}

CUresult CUDAAPI cuMemAllocFromPoolAsync(CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream stream) {
    SM_DRIVER(cuMemAllocFromPoolAsync, pool ? malloc_async_into(out, bytes, pool, stream) : E_VALUE);
}

CUresult CUDAAPI cuMemPoolCreate(CUmemoryPool *out, const CUmemPoolProps *props) {
    SM_DRIVER(cuMemPoolCreate, sm_pool_create(out, props));
}

CUresult CUDAAPI cuMemPoolDestroy(CUmemoryPool pool) { SM_DRIVER(cuMemPoolDestroy, sm_pool_destroy(pool)); }

CUresult CUDAAPI cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value) {
    SM_DRIVER(cuMemPoolSetAttribute, sm_pool_set(pool, (int)attribute, value));
}

CUresult CUDAAPI cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value) {
    SM_DRIVER(cuMemPoolGetAttribute, sm_pool_get(pool, (int)attribute, value));
}

CUresult CUDAAPI cuMemPoolTrimTo(CUmemoryPool pool, size_t keep) {
    SM_DRIVER(cuMemPoolTrimTo, sm_pool_trim(pool, keep));
}

CUresult CUDAAPI cuMemFreeAsync(CUdeviceptr address, CUstream stream) {
    SM_DRIVER(cuMemFreeAsync, sm_free_async(address, stream));
}

CUresult CUDAAPI cuMemGetAllocationGranularity(size_t *out, const CUmemAllocationProp *prop,
                                               CUmemAllocationGranularity_flags option) {
    (void)option;
    SM_DRIVER(cuMemGetAllocationGranularity, sm_granularity(out, prop));
}

CUresult CUDAAPI cuMemAddressReserve(CUdeviceptr *out, size_t size, size_t alignment, CUdeviceptr hint,
                                     unsigned long long flags) {
    SM_DRIVER(cuMemAddressReserve, flags ? E_VALUE : sm_reserve(out, size, alignment, hint));
}

CUresult CUDAAPI cuMemAddressFree(CUdeviceptr address, size_t size) {
    SM_DRIVER(cuMemAddressFree, sm_unreserve(address, size));
}

CUresult CUDAAPI cuMemCreate(CUmemGenericAllocationHandle *out, size_t size, const CUmemAllocationProp *prop,
                             unsigned long long flags) {
    if (out) *out = ~0ull; /* CUDA says nothing of what a call that fails leaves here */
    SM_DRIVER(cuMemCreate, flags ? E_VALUE : sm_create(out, size, prop));
}

CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle) { SM_DRIVER(cuMemRelease, sm_release(handle)); }

CUresult CUDAAPI cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                          unsigned long long flags) {
    SM_DRIVER(cuMemMap, flags ? E_VALUE : sm_map(address, size, offset, handle));
}

CUresult CUDAAPI cuMemUnmap(CUdeviceptr address, size_t size) { SM_DRIVER(cuMemUnmap, sm_unmap(address, size)); }

CUresult CUDAAPI cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *desc, size_t count) {
    SM_DRIVER(cuMemSetAccess, sm_set_access(address, size, desc, count));
}

/* ---- entry points ----------------------------------------------------------------------------------------------- */

/* A function in one of its versions. Of several the newest is meant that the caller's version of CUDA has, so that a
   program must ask for the version whose prototype it will call by. */
typedef struct entry {
    const char *name;
    int since;
    void (*function)(void);
    void (*per_thread)(void); /* where stream 0 means another stream */
} entry;

#define ENTRY(name, since)         {#name, since, (void (*)(void))(name), NULL}
#define VERSION(name, since, full) {#name, since, (void (*)(void))(full), NULL}
#define STREAM(name, since, full)  {#name, since, (void (*)(void))(full), (void (*)(void))(SM_PTSZ(full))}

/* cuGetProcAddress in the form of CUDA 12. */
static CUresult CUDAAPI search_by_version(const char *name, void **out, int version, cuuint64_t flags, int *status) {
    return (CUresult)sm_entry_point(name, out, version, flags, status);
}

static const entry entries[] = {
    VERSION(cuGetProcAddress, 12000, search_by_version),
    ENTRY(cuInit, 2000), ENTRY(cuDriverGetVersion, 2020), ENTRY(cuDeviceGet, 2000), ENTRY(cuDeviceGetCount, 2000),
    ENTRY(cuDeviceGetAttribute, 2000), ENTRY(cuDeviceTotalMem, 3020), ENTRY(cuDeviceCanAccessPeer, 4000),
    ENTRY(cuGetErrorName, 6000), ENTRY(cuGetErrorString, 6000),
    ENTRY(cuCtxGetCurrent, 4000), ENTRY(cuCtxSetCurrent, 4000), ENTRY(cuCtxPushCurrent, 4000),
    ENTRY(cuCtxPopCurrent, 4000), ENTRY(cuCtxGetId, 12000), ENTRY(cuCtxDestroy, 4000), ENTRY(cuCtxRecordEvent, 12050),
    VERSION(cuCtxGetDevice, 2000, cuCtxGetDevice), VERSION(cuCtxGetDevice, 13000, cuCtxGetDevice_v2),
    VERSION(cuCtxSynchronize, 2000, cuCtxSynchronize), VERSION(cuCtxSynchronize, 13000, cuCtxSynchronize_v2),
    VERSION(cuCtxCreate, 3020, cuCtxCreate_v2), VERSION(cuCtxCreate, 12050, cuCtxCreate_v4),
    ENTRY(cuDevicePrimaryCtxRetain, 7000), ENTRY(cuDevicePrimaryCtxRelease, 11000),
    ENTRY(cuDevicePrimaryCtxGetState, 7000),
    ENTRY(cuStreamCreate, 2000), ENTRY(cuStreamDestroy, 4000),
    ENTRY(cuEventCreate, 2000), ENTRY(cuEventQuery, 2000), ENTRY(cuEventSynchronize, 2000), ENTRY(cuEventDestroy, 4000),
    ENTRY(cuThreadExchangeStreamCaptureMode, 10010), ENTRY(cuGraphDestroy, 10000),
    ENTRY(cuUserObjectCreate, 11030), ENTRY(cuUserObjectRetain, 11030), ENTRY(cuUserObjectRelease, 11030),
    ENTRY(cuGraphRetainUserObject, 11030), ENTRY(cuGraphNodeGetDependencies, 10000),
    VERSION(cuGraphNodeGetDependencies, 12030, cuGraphNodeGetDependencies_v2),
    ENTRY(cuMemGetInfo, 3020), ENTRY(cuMemAlloc, 3020), ENTRY(cuMemFree, 3020), ENTRY(cuMemGetAddressRange, 3020),
    ENTRY(cuMemHostAlloc, 2020), ENTRY(cuMemFreeHost, 2000),
    ENTRY(cuMemGetAllocationGranularity, 10020), ENTRY(cuMemAddressReserve, 10020), ENTRY(cuMemAddressFree, 10020),
    ENTRY(cuMemCreate, 10020), ENTRY(cuMemRelease, 10020), ENTRY(cuMemMap, 10020), ENTRY(cuMemUnmap, 10020),
    ENTRY(cuMemSetAccess, 10020),
    STREAM(cuStreamGetId, 12000, cuStreamGetId), STREAM(cuStreamGetCtx, 9020, cuStreamGetCtx),
    STREAM(cuStreamGetCtx, 12050, cuStreamGetCtx_v2), STREAM(cuStreamGetFlags, 5050, cuStreamGetFlags),
    STREAM(cuStreamGetDevice, 12080, cuStreamGetDevice), STREAM(cuStreamIsCapturing, 10000, cuStreamIsCapturing),
    STREAM(cuStreamGetCaptureInfo, 11030, cuStreamGetCaptureInfo_v2),
    STREAM(cuStreamGetCaptureInfo, 12030, cuStreamGetCaptureInfo_v3),
    STREAM(cuStreamBeginCapture, 10010, cuStreamBeginCapture_v2), STREAM(cuStreamEndCapture, 10000, cuStreamEndCapture),
    STREAM(cuStreamWaitEvent, 3020, cuStreamWaitEvent), STREAM(cuStreamQuery, 2000, cuStreamQuery),
    STREAM(cuStreamSynchronize, 2000, cuStreamSynchronize),
    STREAM(cuStreamWaitValue32, 11070, cuStreamWaitValue32_v2),
    STREAM(cuStreamWriteValue32, 11070, cuStreamWriteValue32_v2),
    STREAM(cuEventRecord, 2000, cuEventRecord), STREAM(cuEventRecordWithFlags, 11010, cuEventRecordWithFlags),
    STREAM(cuLaunchHostFunc, 10000, cuLaunchHostFunc), STREAM(cuMemAllocAsync, 11020, cuMemAllocAsync),
    STREAM(cuMemsetD8Async, 3020, cuMemsetD8Async), STREAM(cuMemcpyDtoHAsync, 3020, cuMemcpyDtoHAsync),
    STREAM(cuMemFreeAsync, 11020, cuMemFreeAsync), STREAM(cuMemAllocFromPoolAsync, 11020, cuMemAllocFromPoolAsync),
    ENTRY(cuMemPoolCreate, 11020), ENTRY(cuMemPoolDestroy, 11020), ENTRY(cuMemPoolSetAttribute, 11020),
    ENTRY(cuMemPoolGetAttribute, 11020), ENTRY(cuMemPoolTrimTo, 11020),
};

/* Finding nothing is no error: the answer lies in *out and *result. */
int sm_entry_point(const char *name, void **out, int version, unsigned long long flags, int *result) {
    if (!name || !out) return E_VALUE;
    const entry *best = NULL;
    *out = NULL;
    *result = cudaDriverEntryPointSymbolNotFound;
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
        const entry *e = &entries[i];
        if (strcmp(name, e->name)) continue;
        if (e->since > version || e->since > sm.opt.driver_version) *result = cudaDriverEntryPointVersionNotSufficent;
        else if (!best || best->since < e->since) best = e;
    }
    if (!best) return 0;
    void (*f)(void) = flags & cudaEnablePerThreadDefaultStream && best->per_thread ? best->per_thread : best->function;
    memcpy(out, &f, sizeof f);
    *result = cudaDriverEntryPointSuccess;
    return 0;
}
