/* sim_ptsz.c - the functions that a file compiled for per-thread default streams calls: in them stream 0 means
   cudaStreamPerThread. */

#include "sim_internal.h"

static CUstream own(CUstream stream) { return stream ? stream : CU_STREAM_PER_THREAD; }

/* ---- the driver ------------------------------------------------------------------------------------------------- */

CUresult CUDAAPI cuStreamGetId_ptsz(CUstream s, unsigned long long *id) { return cuStreamGetId(own(s), id); }
CUresult CUDAAPI cuStreamGetCtx_ptsz(CUstream s, CUcontext *out) { return cuStreamGetCtx(own(s), out); }
CUresult CUDAAPI cuStreamGetFlags_ptsz(CUstream s, unsigned int *flags) { return cuStreamGetFlags(own(s), flags); }
CUresult CUDAAPI cuStreamGetDevice_ptsz(CUstream s, CUdevice *out) { return cuStreamGetDevice(own(s), out); }
CUresult CUDAAPI cuStreamEndCapture_ptsz(CUstream s, CUgraph *out) { return cuStreamEndCapture(own(s), out); }
CUresult CUDAAPI cuStreamQuery_ptsz(CUstream s) { return cuStreamQuery(own(s)); }
CUresult CUDAAPI cuStreamSynchronize_ptsz(CUstream s) { return cuStreamSynchronize(own(s)); }
CUresult CUDAAPI cuEventRecord_ptsz(CUevent e, CUstream s) { return cuEventRecord(e, own(s)); }
CUresult CUDAAPI cuMemFreeAsync_ptsz(CUdeviceptr p, CUstream s) { return cuMemFreeAsync(p, own(s)); }

CUresult CUDAAPI cuStreamGetCtx_v2_ptsz(CUstream s, CUcontext *out, struct CUgreenCtx_st **green) {
    return cuStreamGetCtx_v2(own(s), out, green);
}

CUresult CUDAAPI cuStreamIsCapturing_ptsz(CUstream s, CUstreamCaptureStatus *status) {
    return cuStreamIsCapturing(own(s), status);
}

CUresult CUDAAPI cuStreamGetCaptureInfo_v2_ptsz(CUstream s, CUstreamCaptureStatus *status, cuuint64_t *id,
                                                CUgraph *graph, const CUgraphNode **deps, size_t *ndeps) {
    return cuStreamGetCaptureInfo_v2(own(s), status, id, graph, deps, ndeps);
}

CUresult CUDAAPI cuStreamGetCaptureInfo_v3_ptsz(CUstream s, CUstreamCaptureStatus *status, cuuint64_t *id,
                                                CUgraph *graph, const CUgraphNode **deps, const CUgraphEdgeData **edges,
                                                size_t *ndeps) {
    return cuStreamGetCaptureInfo_v3(own(s), status, id, graph, deps, edges, ndeps);
}

CUresult CUDAAPI cuStreamBeginCapture_v2_ptsz(CUstream s, CUstreamCaptureMode mode) {
    return cuStreamBeginCapture(own(s), mode);
}

CUresult CUDAAPI cuStreamWaitEvent_ptsz(CUstream s, CUevent e, unsigned int flags) {
    return cuStreamWaitEvent(own(s), e, flags);
}

CUresult CUDAAPI cuStreamWaitValue32_v2_ptsz(CUstream s, CUdeviceptr p, cuuint32_t value, unsigned int flags) {
    return cuStreamWaitValue32(own(s), p, value, flags);
}

CUresult CUDAAPI cuStreamWriteValue32_v2_ptsz(CUstream s, CUdeviceptr p, cuuint32_t value, unsigned int flags) {
    return cuStreamWriteValue32(own(s), p, value, flags);
}

CUresult CUDAAPI cuEventRecordWithFlags_ptsz(CUevent e, CUstream s, unsigned int flags) {
    return cuEventRecordWithFlags(e, own(s), flags);
}

CUresult CUDAAPI cuLaunchHostFunc_ptsz(CUstream s, void (*call)(void *), void *arg) {
    return cuLaunchHostFunc(own(s), call, arg);
}

CUresult CUDAAPI cuMemsetD8Async_ptsz(CUdeviceptr to, unsigned char value, size_t bytes, CUstream s) {
    return cuMemsetD8Async(to, value, bytes, own(s));
}

CUresult CUDAAPI cuMemcpyDtoHAsync_v2_ptsz(void *to, CUdeviceptr from, size_t bytes, CUstream s) {
    return cuMemcpyDtoHAsync(to, from, bytes, own(s));
}

CUresult CUDAAPI cuMemAllocAsync_ptsz(CUdeviceptr *out, size_t bytes, CUstream s) {
    return cuMemAllocAsync(out, bytes, own(s));
}

CUresult CUDAAPI cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream s) {
    return cuMemAllocFromPoolAsync(out, bytes, pool, own(s));
}

/* ---- the runtime ------------------------------------------------------------------------------------------------ */

cudaError_t CUDARTAPI cudaMemcpy_ptds(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind);
cudaError_t CUDARTAPI cudaMemcpy_ptds(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    SM_RUNTIME(cudaMemcpy, sm_copy((uintptr_t)to, (uintptr_t)from, bytes, (int)kind, CU_STREAM_PER_THREAD, true));
}

cudaError_t CUDARTAPI cudaMemset_ptds(void *to, int value, size_t bytes);
cudaError_t CUDARTAPI cudaMemset_ptds(void *to, int value, size_t bytes) {
    SM_RUNTIME(cudaMemset, sm_set((uintptr_t)to, value, bytes, CU_STREAM_PER_THREAD));
}

cudaError_t CUDARTAPI cudaMemcpy2D_ptds(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                                        size_t height, enum cudaMemcpyKind kind);
cudaError_t CUDARTAPI cudaMemcpy2D_ptds(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                                        size_t height, enum cudaMemcpyKind kind) {
    cudaError_t error = cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, height, kind, CU_STREAM_PER_THREAD);
    return error ? error : cudaStreamSynchronize(CU_STREAM_PER_THREAD);
}

cudaError_t CUDARTAPI cudaMemset2D_ptds(void *to, size_t pitch, int value, size_t width, size_t height);
cudaError_t CUDARTAPI cudaMemset2D_ptds(void *to, size_t pitch, int value, size_t width, size_t height) {
    return cudaMemset2DAsync(to, pitch, value, width, height, CU_STREAM_PER_THREAD);
}

/* Declares and defines name_ptsz by what it calls. */
#define PTSZ(name, parameters, arguments) \
    cudaError_t CUDARTAPI name##_ptsz parameters; \
    cudaError_t CUDARTAPI name##_ptsz parameters { return name arguments; }

PTSZ(cudaMemcpyAsync, (void *to, const void *from, size_t n, enum cudaMemcpyKind kind, cudaStream_t s),
     (to, from, n, kind, own(s)))
PTSZ(cudaMemsetAsync, (void *to, int value, size_t n, cudaStream_t s), (to, value, n, own(s)))
PTSZ(cudaMallocAsync, (void **p, size_t n, cudaStream_t s), (p, n, own(s)))
PTSZ(cudaMallocFromPoolAsync, (void **p, size_t n, cudaMemPool_t pool, cudaStream_t s), (p, n, pool, own(s)))
PTSZ(cudaFreeAsync, (void *p, cudaStream_t s), (p, own(s)))
PTSZ(cudaGraphLaunch, (cudaGraphExec_t x, cudaStream_t s), (x, own(s)))
PTSZ(cudaMemcpy2DAsync,
     (void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
      enum cudaMemcpyKind kind, cudaStream_t s),
     (to, to_pitch, from, from_pitch, width, height, kind, own(s)))
PTSZ(cudaMemset2DAsync, (void *to, size_t pitch, int value, size_t width, size_t height, cudaStream_t s),
     (to, pitch, value, width, height, own(s)))
PTSZ(cudaLaunchKernel,
     (const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t s),
     (function, grid, block, arguments, shared, own(s)))
PTSZ(cudaStreamGetPriority, (cudaStream_t s, int *priority), (own(s), priority))
PTSZ(cudaStreamAddCallback, (cudaStream_t s, cudaStreamCallback_t call, void *arg, unsigned int flags),
     (own(s), call, arg, flags))
PTSZ(cudaGraphUpload, (cudaGraphExec_t x, cudaStream_t s), (x, own(s)))
PTSZ(cudaLaunchHostFunc, (cudaStream_t s, cudaHostFn_t call, void *arg), (own(s), call, arg))
PTSZ(cudaStreamBeginCapture, (cudaStream_t s, enum cudaStreamCaptureMode mode), (own(s), mode))
PTSZ(cudaStreamEndCapture, (cudaStream_t s, cudaGraph_t *out), (own(s), out))
PTSZ(cudaStreamIsCapturing, (cudaStream_t s, enum cudaStreamCaptureStatus *status), (own(s), status))
PTSZ(cudaStreamQuery, (cudaStream_t s), (own(s)))
PTSZ(cudaStreamSynchronize, (cudaStream_t s), (own(s)))
PTSZ(cudaStreamWaitEvent, (cudaStream_t s, cudaEvent_t e, unsigned int flags), (own(s), e, flags))
PTSZ(cudaStreamGetId, (cudaStream_t s, unsigned long long *id), (own(s), id))
PTSZ(cudaStreamGetFlags, (cudaStream_t s, unsigned int *flags), (own(s), flags))
PTSZ(cudaStreamGetDevice, (cudaStream_t s, int *device), (own(s), device))
PTSZ(cudaEventRecord, (cudaEvent_t e, cudaStream_t s), (e, own(s)))
PTSZ(cudaEventRecordWithFlags, (cudaEvent_t e, cudaStream_t s, unsigned int flags), (e, own(s), flags))

#if CUDART_VERSION >= 12030
PTSZ(cudaStreamBeginCaptureToGraph,
     (cudaStream_t s, cudaGraph_t graph, const cudaGraphNode_t *after, const cudaGraphEdgeData *edges, size_t n,
      enum cudaStreamCaptureMode mode),
     (own(s), graph, after, edges, n, mode))
#endif
#if CUDART_VERSION >= 13000
PTSZ(cudaStreamUpdateCaptureDependencies,
     (cudaStream_t s, cudaGraphNode_t *nodes, const cudaGraphEdgeData *edges, size_t n, unsigned int flags),
     (own(s), nodes, edges, n, flags))
PTSZ(cudaStreamGetCaptureInfo,
     (cudaStream_t s, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
      const cudaGraphNode_t **deps, const cudaGraphEdgeData **edges, size_t *ndeps),
     (own(s), status, id, graph, deps, edges, ndeps))
#else
PTSZ(cudaStreamUpdateCaptureDependencies, (cudaStream_t s, cudaGraphNode_t *nodes, size_t n, unsigned int flags),
     (own(s), nodes, n, flags))
PTSZ(cudaStreamGetCaptureInfo_v2,
     (cudaStream_t s, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
      const cudaGraphNode_t **deps, size_t *ndeps),
     (own(s), status, id, graph, deps, ndeps))
#endif

cudaError_t CUDARTAPI cudaLaunchKernelExC_ptsz(const cudaLaunchConfig_t *config, const void *function,
                                               void **arguments);
cudaError_t CUDARTAPI cudaLaunchKernelExC_ptsz(const cudaLaunchConfig_t *config, const void *function,
                                               void **arguments) {
    cudaLaunchConfig_t c;
    if (!config) return cudaLaunchKernelExC(NULL, function, arguments);
    c = *config;
    c.stream = own(c.stream);
    return cudaLaunchKernelExC(&c, function, arguments);
}

/* Here the default is the driver's functions of the same kind. */
static unsigned long long own_flags(unsigned long long flags) {
    return flags & cudaEnableLegacyStream ? flags : flags | cudaEnablePerThreadDefaultStream;
}

cudaError_t CUDARTAPI cudaGetDriverEntryPoint_ptsz(const char *symbol, void **out, unsigned long long flags,
                                                   enum cudaDriverEntryPointQueryResult *status);
cudaError_t CUDARTAPI cudaGetDriverEntryPoint_ptsz(const char *symbol, void **out, unsigned long long flags,
                                                   enum cudaDriverEntryPointQueryResult *status) {
    return sm_runtime_entry_point(FN_cudaGetDriverEntryPoint, symbol, out, CUDART_VERSION, own_flags(flags), status);
}

cudaError_t CUDARTAPI cudaGetDriverEntryPointByVersion_ptsz(const char *symbol, void **out, unsigned int version,
                                                            unsigned long long flags,
                                                            enum cudaDriverEntryPointQueryResult *status);
cudaError_t CUDARTAPI cudaGetDriverEntryPointByVersion_ptsz(const char *symbol, void **out, unsigned int version,
                                                            unsigned long long flags,
                                                            enum cudaDriverEntryPointQueryResult *status) {
    return sm_runtime_entry_point(FN_cudaGetDriverEntryPointByVersion, symbol, out, version, own_flags(flags), status);
}
