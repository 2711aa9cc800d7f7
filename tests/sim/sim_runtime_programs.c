/* sim_runtime_programs.c - functions of the runtime that ordinary programs call and galloc does not: kernels, pitched
   and peer copies, properties, callbacks. */

#include <stdlib.h>
#include <string.h>

#include "sim_internal.h"

static uint64_t number(const void *p) { return (uint64_t)(uintptr_t)p; }

static int put(int *out, int value) {
    if (!out) return E_VALUE;
    *out = value;
    return 0;
}

/* ---- kernels ---------------------------------------------------------------------------------------------------- */

static int launch_config(const cudaLaunchConfig_t *c, const void *function, void **arguments) {
    if (!c || (c->numAttrs && !c->attrs)) return E_VALUE;
    int error = sm_kernel_launch(function, c->gridDim, c->blockDim, arguments, c->dynamicSmemBytes, c->stream);
    for (unsigned i = 0; !error && i < c->numAttrs; i++)
        if (c->attrs[i].id == cudaLaunchAttributeProgrammaticStreamSerialization &&
            c->attrs[i].val.programmaticStreamSerializationAllowed)
            sm_capture_programmatic(c->stream);
    return error;
}

static int function_attributes(struct cudaFuncAttributes *out, const void *function) {
    int error = out ? sm_kernel_check(function) : E_VALUE;
    if (error) return error;
    memset(out, 0, sizeof *out);
    out->maxThreadsPerBlock = 1024;
    out->numRegs = 32;
    out->ptxVersion = out->binaryVersion = 90;
    return 0;
}

static int blocks_of(int *out, const void *function, int threads, size_t shared) {
    int error = out && threads > 0 ? sm_kernel_check(function) : E_VALUE;
    if (error) return error;
    size_t blocks = threads > 1024 ? 0 : 2048 / sm_round_up((size_t)threads, 32);
    if (blocks > 32) blocks = 32;
    if (shared && blocks > ((size_t)228 << 10) / (shared + 1024)) blocks = ((size_t)228 << 10) / (shared + 1024);
    return put(out, (int)blocks);
}

cudaError_t CUDARTAPI cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                                       cudaStream_t stream) {
    SM_RUNTIME(cudaLaunchKernel, sm_kernel_launch(function, grid, block, arguments, shared, stream));
}

cudaError_t CUDARTAPI cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments) {
    SM_RUNTIME(cudaLaunchKernelExC, launch_config(config, function, arguments));
}

cudaError_t CUDARTAPI cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value) {
    (void)attribute;
    (void)value;
    SM_RUNTIME(cudaFuncSetAttribute, sm_kernel_check(function));
}

cudaError_t CUDARTAPI cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *function) {
    SM_RUNTIME(cudaFuncGetAttributes, function_attributes(out, function));
}

cudaError_t CUDARTAPI cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads,
                                                                    size_t shared) {
    SM_RUNTIME(cudaOccupancyMaxActiveBlocksPerMultiprocessor, blocks_of(blocks, function, threads, shared));
}

static int add_kernel(cudaGraphNode_t *out, cudaGraph_t g, const cudaGraphNode_t *after, size_t n,
                      const struct cudaKernelNodeParams *p) {
    sm_work w;
    if (!p) return E_VALUE;
    int error = sm_work_of_kernel(&w, p->func, p->gridDim, p->blockDim, p->kernelParams, p->sharedMemBytes);
    if (!error) error = sm_graph_add_work(out, g, after, n, &w);
    sm_work_drop(&w);
    return error;
}

/* With x of the instance's node that the graph's has become. */
static int set_kernel(cudaGraphExec_t x, cudaGraphNode_t node, const struct cudaKernelNodeParams *p) {
    sm_work w;
    if (!p) return E_VALUE;
    int error = sm_work_of_kernel(&w, p->func, p->gridDim, p->blockDim, p->kernelParams, p->sharedMemBytes);
    if (!error) error = x ? sm_exec_set_work(x, node, &w) : sm_node_set_work(node, &w);
    sm_work_drop(&w);
    return error;
}

cudaError_t CUDARTAPI cudaGraphAddKernelNode(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *after,
                                             size_t n, const struct cudaKernelNodeParams *params) {
    SM_RUNTIME(cudaGraphAddKernelNode, add_kernel(node, graph, after, n, params));
}

cudaError_t CUDARTAPI cudaGraphKernelNodeSetParams(cudaGraphNode_t node, const struct cudaKernelNodeParams *params) {
    SM_RUNTIME(cudaGraphKernelNodeSetParams, set_kernel(NULL, node, params));
}

cudaError_t CUDARTAPI cudaGraphExecKernelNodeSetParams(cudaGraphExec_t exec, cudaGraphNode_t node,
                                                       const struct cudaKernelNodeParams *params) {
    SM_RUNTIME(cudaGraphExecKernelNodeSetParams, exec ? set_kernel(exec, node, params) : E_VALUE);
}

/* ---- copies ----------------------------------------------------------------------------------------------------- */

/* Each row is an operation; all of them are possible, or none is queued. */
static int copy_rows(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                     int kind, CUstream stream, bool wait) {
    sm_work w;
    if (!width || !height) return 0;
    if (to_pitch < width || from_pitch < width) return E_PITCH;
    if (to_pitch == width && from_pitch == width)
        return sm_copy(number(to), number(from), width * height, kind, stream, wait);
    for (size_t i = 0; i < height; i++) {
        int error = sm_work_of_copy(&w, number(to) + i * to_pitch, number(from) + i * from_pitch, width, kind);
        if (error) return error;
    }
    int error = 0;
    for (size_t i = 0; i < height && !error; i++)
        error = sm_copy(number(to) + i * to_pitch, number(from) + i * from_pitch, width, kind, stream, wait);
    return error;
}

static int set_rows(void *to, size_t pitch, int value, size_t width, size_t height, CUstream stream) {
    sm_work w;
    if (!width || !height) return 0;
    if (pitch < width) return E_PITCH;
    if (pitch == width) return sm_set(number(to), value, width * height, stream);
    for (size_t i = 0; i < height; i++) {
        int error = sm_work_of_set(&w, number(to) + i * pitch, (unsigned)value, 1, width);
        if (error) return error;
    }
    int error = 0;
    for (size_t i = 0; i < height && !error; i++) error = sm_set(number(to) + i * pitch, value, width, stream);
    return error;
}

static int copy_peer(void *to, int to_device, const void *from, int from_device, size_t bytes, CUstream stream) {
    if (to_device < 0 || from_device < 0 || to_device >= sm.opt.devices || from_device >= sm.opt.devices)
        return E_DEVICE;
    sm_work w;
    int error = sm_work_of_copy(&w, number(to), number(from), bytes, 3);
    w.peer = true;
    return error || !bytes ? error : sm_work_queue(stream, &w, NULL);
}

static int malloc_rows(void **out, size_t *pitch, size_t width, size_t height) {
    uint64_t address = 0;
    if (!out || !pitch || !width || !height) return E_VALUE;
    size_t row = sm_round_up(width, 512);
    int error = row > SIZE_MAX / height ? E_MEMORY : sm_malloc_block(&address, row * height);
    if (error) return error;
    *out = (void *)(uintptr_t)address;
    *pitch = row;
    return 0;
}

cudaError_t CUDARTAPI cudaMallocPitch(void **p, size_t *pitch, size_t width, size_t height) {
    SM_RUNTIME(cudaMallocPitch, malloc_rows(p, pitch, width, height));
}

cudaError_t CUDARTAPI cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                                   size_t height, enum cudaMemcpyKind kind) {
    SM_RUNTIME(cudaMemcpy2D,
               copy_rows(to, to_pitch, from, from_pitch, width, height, (int)kind, CU_STREAM_LEGACY, true));
}

cudaError_t CUDARTAPI cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                                        size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    SM_RUNTIME(cudaMemcpy2DAsync, copy_rows(to, to_pitch, from, from_pitch, width, height, (int)kind, stream, false));
}

cudaError_t CUDARTAPI cudaMemset2D(void *to, size_t pitch, int value, size_t width, size_t height) {
    SM_RUNTIME(cudaMemset2D, set_rows(to, pitch, value, width, height, CU_STREAM_LEGACY));
}

cudaError_t CUDARTAPI cudaMemset2DAsync(void *to, size_t pitch, int value, size_t width, size_t height,
                                        cudaStream_t stream) {
    SM_RUNTIME(cudaMemset2DAsync, set_rows(to, pitch, value, width, height, stream));
}

cudaError_t CUDARTAPI cudaMemcpyPeer(void *to, int to_device, const void *from, int from_device, size_t bytes) {
    SM_RUNTIME(cudaMemcpyPeer, copy_peer(to, to_device, from, from_device, bytes, CU_STREAM_LEGACY));
}

cudaError_t CUDARTAPI cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t bytes,
                                          cudaStream_t stream) {
    SM_RUNTIME(cudaMemcpyPeerAsync, copy_peer(to, to_device, from, from_device, bytes, stream));
}

/* ---- pointers and host memory ----------------------------------------------------------------------------------- */

static int attributes_of(struct cudaPointerAttributes *out, const void *p) {
    if (!out) return E_VALUE;
    size_t left;
    const sm_mapping *m = sm_mapping_at(number(p), &left);
    bool pinned = !m && sm_is_pinned(p, 1);
    memset(out, 0, sizeof *out);
    out->type = m ? cudaMemoryTypeDevice : pinned ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    out->device = m ? m->handle->device : pinned ? sm_current()->device : -2;
    out->devicePointer = m || pinned ? (void *)(uintptr_t)p : NULL;
    out->hostPointer = m ? NULL : (void *)(uintptr_t)p;
    return 0;
}

cudaError_t CUDARTAPI cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *p) {
    SM_RUNTIME(cudaPointerGetAttributes, attributes_of(out, p));
}

cudaError_t CUDARTAPI cudaHostRegister(void *p, size_t bytes, unsigned int flags) {
    (void)flags;
    SM_RUNTIME(cudaHostRegister, sm_host_register(p, bytes));
}

cudaError_t CUDARTAPI cudaHostUnregister(void *p) { SM_RUNTIME(cudaHostUnregister, sm_host_unregister(p)); }

/* ---- devices ---------------------------------------------------------------------------------------------------- */

static int attribute(int which, int device) {
    int value = 0;
    (void)sm_attribute(&value, which, device);
    return value;
}

static int properties(struct cudaDeviceProp *p, int device) {
    if (!p) return E_VALUE;
    if (device < 0 || device >= sm.opt.devices) return E_DEVICE;
    memset(p, 0, sizeof *p);
    strcpy(p->name, "simulated device");
    p->totalGlobalMem = sm.device[device].has.memory;
    p->sharedMemPerBlock = (size_t)attribute(8, device);
    p->sharedMemPerBlockOptin = (size_t)attribute(97, device);
    p->sharedMemPerMultiprocessor = (size_t)attribute(81, device);
    p->regsPerBlock = attribute(12, device);
    p->regsPerMultiprocessor = attribute(82, device);
    p->warpSize = attribute(10, device);
    p->maxThreadsPerBlock = attribute(1, device);
    p->maxThreadsPerMultiProcessor = attribute(39, device);
    for (int i = 0; i < 3; i++) {
        p->maxThreadsDim[i] = attribute(2 + i, device);
        p->maxGridSize[i] = attribute(5 + i, device);
    }
    p->totalConstMem = (size_t)attribute(9, device);
    p->memPitch = (size_t)attribute(11, device);
    p->major = attribute(75, device);
    p->minor = attribute(76, device);
    p->multiProcessorCount = attribute(16, device);
    p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = p->memoryPoolsSupported = 1;
    p->streamPrioritiesSupported = p->hostRegisterSupported = 1;
    p->asyncEngineCount = attribute(40, device);
    p->memoryBusWidth = attribute(37, device);
    p->l2CacheSize = attribute(38, device);
    p->pciDeviceID = device;
    return 0;
}

static int priorities(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return 0;
}

static int disable_peer(int peer) {
    sm_context *c = sm_current();
    if (peer < 0 || peer >= sm.opt.devices) return E_DEVICE;
    if (!(c->peers >> peer & 1)) return E_PEER_DISABLED;
    c->peers &= ~(1u << peer);
    return 0;
}

cudaError_t CUDARTAPI cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    SM_RUNTIME(cudaGetDeviceProperties, properties(p, device));
}

cudaError_t CUDARTAPI cudaSetDeviceFlags(unsigned int flags) {
    (void)flags;
    SM_RUNTIME(cudaSetDeviceFlags, 0);
}

cudaError_t CUDARTAPI cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    SM_RUNTIME(cudaDeviceGetStreamPriorityRange, priorities(least, greatest));
}

cudaError_t CUDARTAPI cudaDeviceDisablePeerAccess(int peer) {
    SM_RUNTIME(cudaDeviceDisablePeerAccess, disable_peer(peer));
}

/* ---- streams ---------------------------------------------------------------------------------------------------- */

typedef struct callback {
    cudaStreamCallback_t call;
    cudaStream_t stream;
    void *arg;
} callback;

static void run_callback(void *arg) {
    callback c = *(callback *)arg;
    free(arg);
    c.call(c.stream, cudaSuccess, c.arg);
}

static int add_callback(CUstream stream, cudaStreamCallback_t call, void *arg, unsigned flags) {
    int status = 0;
    if (!call || flags) return E_VALUE;
    int error = sm_capture_status(stream, &status, NULL, NULL);
    if (error || status) return error ? error : E_CAPTURE_UNSUPPORTED;
    callback *c = sm_alloc(sizeof *c);
    *c = (callback){call, stream, arg};
    error = sm_host_function(stream, run_callback, c);
    if (error) free(c);
    return error;
}

static int priority_of(CUstream handle, int *priority) {
    sm_stream *s;
    int error = sm_stream_find(handle, &s);
    return error ? error : put(priority, s->priority);
}

cudaError_t CUDARTAPI cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void *arg,
                                            unsigned int flags) {
    SM_RUNTIME(cudaStreamAddCallback, add_callback(stream, call, arg, flags));
}

cudaError_t CUDARTAPI cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    SM_RUNTIME(cudaStreamGetPriority, priority_of(stream, priority));
}
