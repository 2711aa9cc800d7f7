/* sim_runtime.c - the functions of the runtime API. A failing one leaves its error for cudaGetLastError. */

#include "sim_internal.h"

static uint64_t number(const void *p) { return (uint64_t)(uintptr_t)p; }

static int put(int *out, int value) {
    if (!out) return E_VALUE;
    *out = value;
    return 0;
}

/* ---- errors and versions ---------------------------------------------------------------------------------------- */

static cudaError_t last_error(int fn, bool clear) {
    sm_begin(fn);
    sm_thread *t = sm_self();
    int error = sm_current() && sm_current()->sticky ? sm_current()->sticky : t->last;
    if (clear) t->last = 0;
    return (cudaError_t)sm_end(error);
}

cudaError_t CUDARTAPI cudaGetLastError(void) { return last_error(FN_cudaGetLastError, true); }
cudaError_t CUDARTAPI cudaPeekAtLastError(void) { return last_error(FN_cudaPeekAtLastError, false); }

const char *CUDARTAPI cudaGetErrorName(cudaError_t error) {
    sm_count(FN_cudaGetErrorName);
    const sm_error *e = sm_error_of((int)error);
    return e ? e->runtime : "unrecognized error code";
}

const char *CUDARTAPI cudaGetErrorString(cudaError_t error) {
    sm_count(FN_cudaGetErrorString);
    const sm_error *e = sm_error_of((int)error);
    return e ? e->text : "unrecognized error code";
}

cudaError_t CUDARTAPI cudaDriverGetVersion(int *version) {
    SM_RUNTIME(cudaDriverGetVersion, put(version, sm.opt.driver_version));
}

cudaError_t CUDARTAPI cudaRuntimeGetVersion(int *version) {
    SM_RUNTIME(cudaRuntimeGetVersion, put(version, CUDART_VERSION));
}

/* ---- entry points ----------------------------------------------------------------------------------------------- */

cudaError_t sm_runtime_entry_point(int fn, const char *symbol, void **out, unsigned version, unsigned long long flags,
                                   enum cudaDriverEntryPointQueryResult *status) {
    int result = cudaDriverEntryPointSymbolNotFound;
    int error = sm_begin(fn);
    if (!error) error = sm_entry_point(symbol, out, (int)version, flags, &result);
    if (status) *status = (enum cudaDriverEntryPointQueryResult)result;
    return (cudaError_t)sm_end_runtime(error);
}

/* The runtime looks driver functions up for the version that it was itself made for. */
cudaError_t CUDARTAPI cudaGetDriverEntryPoint(const char *symbol, void **out, unsigned long long flags,
                                              enum cudaDriverEntryPointQueryResult *status) {
    return sm_runtime_entry_point(FN_cudaGetDriverEntryPoint, symbol, out, CUDART_VERSION, flags, status);
}

cudaError_t CUDARTAPI cudaGetDriverEntryPointByVersion(const char *symbol, void **out, unsigned int version,
                                                       unsigned long long flags,
                                                       enum cudaDriverEntryPointQueryResult *status) {
    return sm_runtime_entry_point(FN_cudaGetDriverEntryPointByVersion, symbol, out, version, flags, status);
}

/* ---- devices ---------------------------------------------------------------------------------------------------- */

static int current_device(void) {
    sm_context *c = sm_current();
    return c ? c->device : sm_self()->device;
}

static int set_device(int device) {
    if (device < 0 || device >= sm.opt.devices) return E_DEVICE;
    sm_thread *t = sm_self();
    t->device = device;
    sm_context_keep(&sm.device[device].primary);
    sm_context_set(t, &sm.device[device].primary);
    return 0;
}

static int enable_peer(int peer, unsigned flags) {
    sm_context *c = sm_current();
    if (peer < 0 || peer >= sm.opt.devices || peer == c->device) return E_DEVICE;
    if (flags) return E_VALUE;
    if (c->peers >> peer & 1) return E_PEER_ENABLED;
    c->peers |= 1u << peer;
    return 0;
}

cudaError_t CUDARTAPI cudaGetDevice(int *device) { SM_RUNTIME(cudaGetDevice, put(device, current_device())); }
cudaError_t CUDARTAPI cudaSetDevice(int device) { SM_RUNTIME(cudaSetDevice, set_device(device)); }
cudaError_t CUDARTAPI cudaGetDeviceCount(int *count) { SM_RUNTIME(cudaGetDeviceCount, put(count, sm.opt.devices)); }
cudaError_t CUDARTAPI cudaDeviceReset(void) { SM_RUNTIME(cudaDeviceReset, sm_device_reset()); }
cudaError_t CUDARTAPI cudaDeviceSynchronize(void) { SM_RUNTIME(cudaDeviceSynchronize, sm_synchronize(sm_current())); }

cudaError_t CUDARTAPI cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attr, int device) {
    SM_RUNTIME(cudaDeviceGetAttribute, sm_attribute(value, (int)attr, device));
}

cudaError_t CUDARTAPI cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    SM_RUNTIME(cudaDeviceCanAccessPeer, sm_peer(can, device, peer));
}

cudaError_t CUDARTAPI cudaDeviceEnablePeerAccess(int peer, unsigned int flags) {
    SM_RUNTIME(cudaDeviceEnablePeerAccess, enable_peer(peer, flags));
}

/* ---- memory ----------------------------------------------------------------------------------------------------- */

static int malloc_into(void **out, size_t bytes) {
    uint64_t address = 0;
    if (!out) return E_VALUE;
    int error = bytes ? sm_malloc_block(&address, bytes) : 0;
    if (!error) *out = (void *)(uintptr_t)address;
    return error;
}

static int malloc_async_into(void **out, size_t bytes, cudaMemPool_t pool, CUstream stream) {
    uint64_t address = 0;
    if (!out) return E_VALUE;
    int error = bytes ? sm_malloc_async(&address, bytes, pool, stream) : 0;
    if (!error) *out = (void *)(uintptr_t)address;
    return error;
}

static int host_pointer(void **out, void *host) {
    if (!out || !sm_is_pinned(host, 1)) return E_VALUE;
    *out = host;
    return 0;
}

cudaError_t CUDARTAPI cudaMalloc(void **p, size_t bytes) { SM_RUNTIME(cudaMalloc, malloc_into(p, bytes)); }
cudaError_t CUDARTAPI cudaFree(void *p) { SM_RUNTIME(cudaFree, sm_free_block(number(p))); }

cudaError_t CUDARTAPI cudaMemGetInfo(size_t *left, size_t *total) {
    SM_RUNTIME(cudaMemGetInfo, sm_mem_info(left, total));
}

cudaError_t CUDARTAPI cudaMallocAsync(void **p, size_t bytes, cudaStream_t stream) {
    SM_RUNTIME(cudaMallocAsync, malloc_async_into(p, bytes, NULL, stream));
}

cudaError_t CUDARTAPI cudaMallocFromPoolAsync(void **p, size_t bytes, cudaMemPool_t pool, cudaStream_t stream) {
    SM_RUNTIME(cudaMallocFromPoolAsync, pool ? malloc_async_into(p, bytes, pool, stream) : E_VALUE);
}

cudaError_t CUDARTAPI cudaFreeAsync(void *p, cudaStream_t stream) {
    SM_RUNTIME(cudaFreeAsync, sm_free_async(number(p), stream));
}

cudaError_t CUDARTAPI cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
    SM_RUNTIME(cudaDeviceGetDefaultMemPool, sm_pool_default(pool, device));
}

cudaError_t CUDARTAPI cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
    SM_RUNTIME(cudaMemPoolSetAttribute, sm_pool_set(pool, (int)attribute, value));
}

cudaError_t CUDARTAPI cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
    SM_RUNTIME(cudaMemPoolGetAttribute, sm_pool_get(pool, (int)attribute, value));
}

cudaError_t CUDARTAPI cudaMemPoolTrimTo(cudaMemPool_t pool, size_t keep) {
    SM_RUNTIME(cudaMemPoolTrimTo, sm_pool_trim(pool, keep));
}

cudaError_t CUDARTAPI cudaMallocHost(void **p, size_t bytes) { SM_RUNTIME(cudaMallocHost, sm_host_malloc(p, bytes)); }

cudaError_t CUDARTAPI cudaHostAlloc(void **p, size_t bytes, unsigned int flags) {
    (void)flags;
    SM_RUNTIME(cudaHostAlloc, sm_host_malloc(p, bytes));
}

cudaError_t CUDARTAPI cudaFreeHost(void *p) { SM_RUNTIME(cudaFreeHost, sm_host_free(p)); }

cudaError_t CUDARTAPI cudaHostGetDevicePointer(void **out, void *host, unsigned int flags) {
    (void)flags;
    SM_RUNTIME(cudaHostGetDevicePointer, host_pointer(out, host));
}

cudaError_t CUDARTAPI cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    SM_RUNTIME(cudaMemcpy, sm_copy(number(to), number(from), bytes, (int)kind, CU_STREAM_LEGACY, true));
}

cudaError_t CUDARTAPI cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                                      cudaStream_t stream) {
    SM_RUNTIME(cudaMemcpyAsync, sm_copy(number(to), number(from), bytes, (int)kind, stream, false));
}

cudaError_t CUDARTAPI cudaMemset(void *to, int value, size_t bytes) {
    SM_RUNTIME(cudaMemset, sm_set(number(to), value, bytes, CU_STREAM_LEGACY));
}

cudaError_t CUDARTAPI cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
    SM_RUNTIME(cudaMemsetAsync, sm_set(number(to), value, bytes, stream));
}

/* ---- streams ---------------------------------------------------------------------------------------------------- */

cudaError_t CUDARTAPI cudaStreamCreate(cudaStream_t *out) { SM_RUNTIME(cudaStreamCreate, sm_stream_open(out, 0, 0)); }

cudaError_t CUDARTAPI cudaStreamCreateWithFlags(cudaStream_t *out, unsigned int flags) {
    SM_RUNTIME(cudaStreamCreateWithFlags, sm_stream_open(out, flags, 0));
}

cudaError_t CUDARTAPI cudaStreamCreateWithPriority(cudaStream_t *out, unsigned int flags, int priority) {
    SM_RUNTIME(cudaStreamCreateWithPriority, sm_stream_open(out, flags, priority));
}

cudaError_t CUDARTAPI cudaStreamDestroy(cudaStream_t stream) { SM_RUNTIME(cudaStreamDestroy, sm_stream_close(stream)); }
cudaError_t CUDARTAPI cudaStreamQuery(cudaStream_t stream) { SM_RUNTIME(cudaStreamQuery, sm_stream_query(stream)); }

cudaError_t CUDARTAPI cudaStreamSynchronize(cudaStream_t stream) {
    SM_RUNTIME(cudaStreamSynchronize, sm_stream_wait(stream));
}

cudaError_t CUDARTAPI cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags) {
    SM_RUNTIME(cudaStreamWaitEvent, sm_stream_after(stream, event, flags));
}

cudaError_t CUDARTAPI cudaStreamGetId(cudaStream_t stream, unsigned long long *id) {
    SM_RUNTIME(cudaStreamGetId, sm_stream_id(stream, id));
}

cudaError_t CUDARTAPI cudaStreamGetFlags(cudaStream_t stream, unsigned int *flags) {
    SM_RUNTIME(cudaStreamGetFlags, sm_stream_flags(stream, flags));
}

cudaError_t CUDARTAPI cudaStreamGetDevice(cudaStream_t stream, int *device) {
    SM_RUNTIME(cudaStreamGetDevice, sm_stream_device(stream, device));
}

cudaError_t CUDARTAPI cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void *arg) {
    SM_RUNTIME(cudaLaunchHostFunc, sm_host_function(stream, call, arg));
}

/* ---- events ----------------------------------------------------------------------------------------------------- */

cudaError_t CUDARTAPI cudaEventCreate(cudaEvent_t *out) { SM_RUNTIME(cudaEventCreate, sm_event_open(out, 0)); }

cudaError_t CUDARTAPI cudaEventCreateWithFlags(cudaEvent_t *out, unsigned int flags) {
    SM_RUNTIME(cudaEventCreateWithFlags, sm_event_open(out, flags));
}

cudaError_t CUDARTAPI cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    SM_RUNTIME(cudaEventRecord, sm_event_record(event, stream, 0));
}

cudaError_t CUDARTAPI cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned int flags) {
    SM_RUNTIME(cudaEventRecordWithFlags, sm_event_record(event, stream, flags));
}

cudaError_t CUDARTAPI cudaEventQuery(cudaEvent_t event) { SM_RUNTIME(cudaEventQuery, sm_event_query(event)); }
cudaError_t CUDARTAPI cudaEventDestroy(cudaEvent_t event) { SM_RUNTIME(cudaEventDestroy, sm_event_close(event)); }

cudaError_t CUDARTAPI cudaEventSynchronize(cudaEvent_t event) {
    SM_RUNTIME(cudaEventSynchronize, sm_event_wait(event));
}

cudaError_t CUDARTAPI cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
    SM_RUNTIME(cudaEventElapsedTime, sm_event_time(ms, from, to));
}

/* ---- capture and graphs ----------------------------------------------------------------------------------------- */

static int capture_info(CUstream stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                        cudaGraph_t *graph, const cudaGraphNode_t **deps, const void **edges, size_t *ndeps) {
    int now = 0;
    int error = sm_capture_status(stream, &now, id, graph);
    if (error || !status) return error ? error : E_VALUE;
    *status = (enum cudaStreamCaptureStatus)now;
    return deps || ndeps ? sm_capture_end_nodes(stream, deps, edges, ndeps) : 0;
}

static int exchange_mode(enum cudaStreamCaptureMode *mode) {
    int value = mode ? (int)*mode : -1;
    int error = sm_capture_mode(&value);
    if (!error) *mode = (enum cudaStreamCaptureMode)value;
    return error;
}

cudaError_t CUDARTAPI cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    SM_RUNTIME(cudaStreamBeginCapture, sm_capture_begin(stream, (int)mode));
}

cudaError_t CUDARTAPI cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    SM_RUNTIME(cudaStreamEndCapture, sm_capture_end(stream, graph));
}

cudaError_t CUDARTAPI cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    SM_RUNTIME(cudaStreamIsCapturing, capture_info(stream, status, NULL, NULL, NULL, NULL, NULL));
}

#if CUDART_VERSION >= 13000
cudaError_t CUDARTAPI cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                               unsigned long long *id, cudaGraph_t *graph,
                                               const cudaGraphNode_t **deps, const cudaGraphEdgeData **edges,
                                               size_t *ndeps) {
    if (edges) *edges = NULL;
    SM_RUNTIME(cudaStreamGetCaptureInfo, capture_info(stream, status, id, graph, deps, (const void **)edges, ndeps));
}
#else
cudaError_t CUDARTAPI cudaStreamGetCaptureInfo_v2(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                                  unsigned long long *id, cudaGraph_t *graph,
                                                  const cudaGraphNode_t **deps, size_t *ndeps) {
    SM_RUNTIME(cudaStreamGetCaptureInfo, capture_info(stream, status, id, graph, deps, NULL, ndeps));
}
#endif

cudaError_t CUDARTAPI cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    SM_RUNTIME(cudaThreadExchangeStreamCaptureMode, exchange_mode(mode));
}

cudaError_t CUDARTAPI cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags) {
    (void)flags;
    SM_RUNTIME(cudaGraphInstantiate, sm_graph_instantiate(out, graph));
}

cudaError_t CUDARTAPI cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
    SM_RUNTIME(cudaGraphLaunch, sm_graph_launch(exec, stream));
}

cudaError_t CUDARTAPI cudaGraphClone(cudaGraph_t *out, cudaGraph_t from) {
    SM_RUNTIME(cudaGraphClone, sm_graph_clone(out, from));
}

cudaError_t CUDARTAPI cudaGraphDestroy(cudaGraph_t graph) { SM_RUNTIME(cudaGraphDestroy, sm_graph_destroy(graph)); }
cudaError_t CUDARTAPI cudaGraphExecDestroy(cudaGraphExec_t x) { SM_RUNTIME(cudaGraphExecDestroy, sm_exec_destroy(x)); }

cudaError_t CUDARTAPI cudaUserObjectCreate(cudaUserObject_t *out, void *ptr, cudaHostFn_t destroy, unsigned int refs,
                                           unsigned int flags) {
    SM_RUNTIME(cudaUserObjectCreate, sm_object_create(out, ptr, destroy, refs, flags));
}

cudaError_t CUDARTAPI cudaUserObjectRetain(cudaUserObject_t object, unsigned int count) {
    SM_RUNTIME(cudaUserObjectRetain, sm_object_retain(object, count));
}

cudaError_t CUDARTAPI cudaUserObjectRelease(cudaUserObject_t object, unsigned int count) {
    SM_RUNTIME(cudaUserObjectRelease, sm_object_release(object, count));
}

cudaError_t CUDARTAPI cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned int count,
                                                unsigned int flags) {
    SM_RUNTIME(cudaGraphRetainUserObject, sm_graph_retain(graph, object, count, flags));
}
