/* sim_internal.h - declarations shared by the files of the simulated device. Programs include sim.h.

   sim_core.c     state, threads, contexts, accounts, faults, findings
   sim_ledger.c   vector clocks, and the history of each physical page
   sim_queue.c    streams, events, operations, the scheduler
   sim_capture.c  captures
   sim_graph.c    graphs, instances, user objects
   sim_memory.c   addresses, physical handles, mappings, cudaMalloc
   sim_work.c     copies, memsets, and kernels given as a list of accesses
   sim_kernel.c   kernels with a body
   sim_runtime.c  the runtime API            sim_driver.c   the driver API and its entry points
   sim_user.c     programs that do not call sim_start
   sim_ptsz.c     both APIs for programs compiled for per-thread default streams

   One lock guards everything: sm_begin takes it, and sm_end releases it. Errors are plain ints, because both APIs use
   the same numbers. */

#ifndef SIM_INTERNAL_H
#define SIM_INTERNAL_H

#include <stdbool.h>

/* Whatever the program is compiled for: sim_ptsz.c has the functions for per-thread default streams. */
#undef CUDA_API_PER_THREAD_DEFAULT_STREAM
#undef __CUDA_API_PER_THREAD_DEFAULT_STREAM
#include "sim.h"

#define SM_DEVICES 16                  /* the most devices */
#define SM_PAGE    ((size_t)2 << 20)   /* the ledger keeps one history per this many bytes of a handle */
#define SM_COPY    8                   /* access of a copy, which can reach cudaMalloc memory on any device */
#define SM_PEER    16                  /* of cudaMemcpyPeer, which reaches mapped memory of each device too */
#define SM_LANES   1024                /* the most streams in one capture */

/* Error numbers that both APIs share. They have names here because each API uses other names. */
enum {
    E_VALUE = 1, E_MEMORY = 2, E_NOT_INITIALIZED = 3, E_EXITING = 4, E_CONFIGURATION = 9,
    E_PITCH = 12, E_FUNCTION = 98, E_DEVICE = 101, E_CONTEXT = 201, E_HANDLE = 400,
    E_STATE = 401, E_NOT_FOUND = 500, E_NOT_READY = 600, E_PEER_ENABLED = 704, E_PEER_DISABLED = 705,
    E_REGISTERED = 712, E_NOT_REGISTERED = 713, E_CONTEXT_DEAD = 709,
    E_LOSSY = 402, E_NOT_PERMITTED = 800, E_NOT_SUPPORTED = 801, E_CAPTURE_UNSUPPORTED = 900, E_CAPTURE_LOST = 901,
    E_CAPTURE_MERGE = 902, E_CAPTURE_UNMATCHED = 903, E_CAPTURE_UNJOINED = 904, E_CAPTURE_ISOLATION = 905,
    E_CAPTURE_IMPLICIT = 906, E_CAPTURED_EVENT = 907, E_CAPTURE_THREAD = 908, E_UPDATE_FAILURE = 910,
    E_UNKNOWN = 999
};

/* ---- the functions of CUDA ------------------------------------------------------------------------------------- */

enum {
    F_CTX = 1,    /* needs a current context: the runtime creates one, the driver returns 201 */
    F_SURE = 2,   /* a fault that names no function does not hit it */
    F_ALWAYS = 4, /* works in a context with a sticky error */
    F_LOOK = 8,   /* unsafe during a capture: forbidden in threads that a capture concerns */
    F_EARLY = 16, /* works before cuInit */
    F_WORK = 32   /* sim_launch, not a CUDA function: not counted, never made to fail */
};

/* Name, flags, cost in ns. If the cost depends on a size, the function adds that part. A function that was never
   measured has the cost of the most similar measured one. */
#define SM_FUNCTIONS(X) \
    X(sim_launch, F_CTX | F_WORK, 0) \
    X(cudaGetDriverEntryPoint, F_ALWAYS, 200) X(cudaGetDriverEntryPointByVersion, F_ALWAYS, 200) \
    X(cudaGetDevice, F_ALWAYS, 33) X(cudaSetDevice, F_ALWAYS, 50) X(cudaGetDeviceCount, F_ALWAYS, 33) \
    X(cudaDeviceGetAttribute, F_ALWAYS, 33) \
    X(cudaDeviceReset, F_ALWAYS, 1000000) X(cudaDeviceSynchronize, F_CTX, 1000) \
    X(cudaDriverGetVersion, F_ALWAYS, 33) X(cudaRuntimeGetVersion, F_ALWAYS, 33) \
    X(cudaDeviceCanAccessPeer, 0, 100) X(cudaDeviceEnablePeerAccess, F_CTX, 1000) \
    X(cudaMalloc, F_CTX | F_LOOK, 0) X(cudaFree, F_CTX | F_LOOK, 0) X(cudaMemGetInfo, F_CTX, 6300) \
    X(cudaMallocAsync, F_CTX, 600) X(cudaMallocFromPoolAsync, F_CTX, 600) X(cudaFreeAsync, F_CTX, 600) \
    X(cudaDeviceGetDefaultMemPool, 0, 100) \
    X(cudaMemPoolSetAttribute, 0, 100) X(cudaMemPoolGetAttribute, 0, 100) X(cudaMemPoolTrimTo, 0, 1000) \
    X(cudaMallocHost, F_CTX | F_LOOK, 600000) X(cudaHostAlloc, F_CTX | F_LOOK, 600000) \
    X(cudaFreeHost, F_CTX | F_LOOK, 10000) X(cudaHostGetDevicePointer, F_CTX, 50) \
    X(cudaMemcpy, F_CTX | F_LOOK, 4300) X(cudaMemcpyAsync, F_CTX, 4300) \
    X(cudaMemset, F_CTX, 4300) X(cudaMemsetAsync, F_CTX, 4300) \
    X(cudaStreamCreate, F_CTX, 11000) X(cudaStreamCreateWithFlags, F_CTX, 11000) \
    X(cudaStreamCreateWithPriority, F_CTX, 11000) X(cudaStreamDestroy, F_CTX, 11000) \
    X(cudaStreamQuery, F_CTX, 257) X(cudaStreamSynchronize, F_CTX, 1000) X(cudaStreamWaitEvent, F_CTX, 316) \
    X(cudaStreamGetId, F_CTX, 50) X(cudaStreamGetFlags, F_CTX, 50) X(cudaStreamGetDevice, F_CTX, 50) \
    X(cudaStreamIsCapturing, F_CTX, 49) X(cudaStreamBeginCapture, F_CTX, 1000) X(cudaStreamEndCapture, F_CTX, 1000) \
    X(cudaStreamGetCaptureInfo, F_CTX, 50) X(cudaThreadExchangeStreamCaptureMode, F_SURE | F_ALWAYS, 40) \
    X(cudaEventCreate, F_CTX, 100) X(cudaEventCreateWithFlags, F_CTX, 100) X(cudaEventRecord, F_CTX, 187) \
    X(cudaEventRecordWithFlags, F_CTX, 187) X(cudaEventQuery, F_CTX | F_LOOK, 257) \
    X(cudaEventSynchronize, F_CTX | F_LOOK, 257) X(cudaEventDestroy, F_CTX | F_SURE, 100) \
    X(cudaEventElapsedTime, F_CTX, 257) \
    X(cudaGetLastError, F_SURE | F_ALWAYS, 8) X(cudaPeekAtLastError, F_SURE | F_ALWAYS, 8) \
    X(cudaGetErrorName, F_SURE | F_ALWAYS, 8) X(cudaGetErrorString, F_SURE | F_ALWAYS, 8) \
    X(cudaLaunchHostFunc, F_CTX, 4300) X(cudaGraphInstantiate, F_CTX, 10000) X(cudaGraphLaunch, F_CTX, 4300) \
    X(cudaGraphClone, 0, 2000) X(cudaGraphDestroy, 0, 1000) X(cudaGraphExecDestroy, 0, 1000) \
    X(cudaGraphInstantiateWithFlags, F_CTX, 10000) X(cudaGraphUpload, F_CTX, 4300) X(cudaGraphExecUpdate, 0, 10000) \
    X(cudaGraphExecChildGraphNodeSetParams, 0, 10000) X(cudaGraphCreate, 0, 1000) X(cudaGraphAddEmptyNode, F_CTX, 500) \
    X(cudaGraphAddChildGraphNode, F_CTX, 2000) X(cudaGraphChildGraphNodeGetGraph, 0, 50) \
    X(cudaGraphAddHostNode, F_CTX, 500) X(cudaGraphAddMemsetNode, F_CTX, 500) X(cudaGraphAddMemcpyNode1D, F_CTX, 500) \
    X(cudaGraphAddEventRecordNode, F_CTX, 500) X(cudaGraphAddEventWaitNode, F_CTX, 500) \
    X(cudaGraphNodeGetType, 0, 50) X(cudaGraphGetNodes, 0, 100) X(cudaGraphGetRootNodes, 0, 100) \
    X(cudaGraphGetEdges, 0, 100) X(cudaGraphNodeGetDependencies, 0, 100) X(cudaGraphNodeGetDependentNodes, 0, 100) \
    X(cudaGraphAddDependencies, 0, 100) X(cudaGraphRemoveDependencies, 0, 100) X(cudaGraphDestroyNode, 0, 500) \
    X(cudaGraphNodeFindInClone, 0, 100) X(cudaGraphReleaseUserObject, 0, 100) \
    X(cudaStreamBeginCaptureToGraph, F_CTX, 1000) X(cudaStreamUpdateCaptureDependencies, F_CTX, 100) \
    X(cudaUserObjectCreate, 0, 200) X(cudaUserObjectRetain, 0, 50) X(cudaUserObjectRelease, F_SURE, 50) \
    X(cudaGraphRetainUserObject, 0, 100) \
    X(cudaLaunchKernel, F_CTX, 2000) X(cudaLaunchKernelExC, F_CTX, 2000) X(cudaFuncSetAttribute, F_CTX, 100) \
    X(cudaFuncGetAttributes, F_CTX, 100) X(cudaOccupancyMaxActiveBlocksPerMultiprocessor, F_CTX, 100) \
    X(cudaGraphAddKernelNode, F_CTX, 500) X(cudaGraphKernelNodeSetParams, F_CTX, 500) \
    X(cudaGraphExecKernelNodeSetParams, F_CTX, 500) X(cudaMallocPitch, F_CTX | F_LOOK, 0) \
    X(cudaMemcpy2D, F_CTX | F_LOOK, 4300) X(cudaMemcpy2DAsync, F_CTX, 4300) X(cudaMemset2D, F_CTX, 4300) \
    X(cudaMemset2DAsync, F_CTX, 4300) X(cudaMemcpyPeer, F_CTX, 4300) X(cudaMemcpyPeerAsync, F_CTX, 4300) \
    X(cudaPointerGetAttributes, F_CTX, 100) X(cudaHostRegister, F_CTX | F_LOOK, 600000) \
    X(cudaHostUnregister, F_CTX | F_LOOK, 10000) X(cudaGetDeviceProperties, 0, 100000) X(cudaSetDeviceFlags, 0, 100) \
    X(cudaDeviceGetStreamPriorityRange, F_CTX, 50) X(cudaDeviceDisablePeerAccess, F_CTX, 1000) \
    X(cudaStreamAddCallback, F_CTX, 4300) X(cudaStreamGetPriority, F_CTX, 50) \
    X(cuInit, F_EARLY, 1000) X(cuDriverGetVersion, F_EARLY, 8) X(cuDeviceGet, F_ALWAYS, 8) \
    X(cuDeviceGetCount, F_ALWAYS, 8) X(cuDeviceGetAttribute, F_ALWAYS, 8) X(cuDeviceTotalMem, F_ALWAYS, 8) X(cuDeviceCanAccessPeer, 0, 100) \
    X(cuCtxGetCurrent, F_SURE | F_ALWAYS, 8) X(cuCtxSetCurrent, F_ALWAYS, 16) \
    X(cuCtxPushCurrent, F_ALWAYS, 16) X(cuCtxPopCurrent, F_SURE | F_ALWAYS, 16) X(cuCtxGetId, F_ALWAYS, 16) \
    X(cuCtxGetDevice, F_CTX | F_ALWAYS, 8) X(cuCtxSynchronize, F_CTX, 1000) \
    X(cuCtxCreate, F_ALWAYS, 1000000) X(cuCtxDestroy, F_ALWAYS, 1000000) \
    X(cuCtxRecordEvent, F_CTX, 187) \
    X(cuDevicePrimaryCtxRetain, F_ALWAYS, 1000) X(cuDevicePrimaryCtxRelease, F_ALWAYS, 1000) \
    X(cuDevicePrimaryCtxGetState, F_ALWAYS, 100) \
    X(cuStreamCreate, F_CTX, 11000) X(cuStreamDestroy, F_CTX, 11000) X(cuStreamGetId, F_CTX, 20) \
    X(cuStreamGetCtx, F_CTX, 15) X(cuStreamGetFlags, F_CTX, 15) X(cuStreamGetDevice, F_CTX, 15) \
    X(cuStreamIsCapturing, F_CTX, 15) \
    X(cuStreamGetCaptureInfo, F_CTX, 20) X(cuStreamBeginCapture, F_CTX, 1000) X(cuStreamEndCapture, F_CTX, 1000) \
    X(cuStreamWaitEvent, F_CTX, 316) X(cuStreamQuery, F_CTX, 257) X(cuStreamSynchronize, F_CTX, 1000) \
    X(cuStreamWaitValue32, F_CTX, 500) X(cuStreamWriteValue32, F_CTX, 500) \
    X(cuThreadExchangeStreamCaptureMode, F_SURE | F_ALWAYS, 8) \
    X(cuEventCreate, F_CTX, 100) X(cuEventRecord, F_CTX, 187) X(cuEventRecordWithFlags, F_CTX, 187) \
    X(cuEventQuery, F_LOOK, 257) X(cuEventSynchronize, F_LOOK, 257) X(cuEventDestroy, F_SURE, 100) \
    X(cuLaunchHostFunc, F_CTX, 4300) \
    X(cuUserObjectCreate, 0, 200) X(cuUserObjectRetain, 0, 50) X(cuUserObjectRelease, F_SURE, 50) \
    X(cuGraphRetainUserObject, 0, 100) X(cuGraphDestroy, 0, 1000) X(cuGraphNodeGetDependencies, 0, 100) \
    X(cuMemGetInfo, F_CTX, 6300) X(cuMemAlloc, F_CTX | F_LOOK, 0) X(cuMemFree, F_CTX | F_LOOK, 0) \
    X(cuMemGetAddressRange, F_CTX, 100) \
    X(cuMemHostAlloc, F_CTX | F_LOOK, 600000) X(cuMemFreeHost, F_CTX | F_LOOK, 10000) \
    X(cuMemsetD8Async, F_CTX, 4300) X(cuMemcpyDtoHAsync, F_CTX, 4300) \
    X(cuMemAllocAsync, F_CTX, 600) X(cuMemFreeAsync, F_CTX, 600) X(cuMemAllocFromPoolAsync, F_CTX, 600) \
    X(cuMemPoolCreate, 0, 10000) X(cuMemPoolDestroy, 0, 10000) X(cuMemPoolSetAttribute, 0, 100) \
    X(cuMemPoolGetAttribute, 0, 100) X(cuMemPoolTrimTo, 0, 1000) \
    X(cuMemGetAllocationGranularity, 0, 100) X(cuMemAddressReserve, 0, 33000) X(cuMemAddressFree, 0, 10000) \
    X(cuMemCreate, 0, 0) X(cuMemRelease, 0, 0) X(cuMemMap, 0, 1000) X(cuMemUnmap, 0, 0) X(cuMemSetAccess, 0, 0) \
    X(cuGetErrorName, F_SURE | F_ALWAYS | F_EARLY, 8) X(cuGetErrorString, F_SURE | F_ALWAYS | F_EARLY, 8)

#define SM_ENUM(name, flags, ns) FN_##name,
enum { SM_FUNCTIONS(SM_ENUM) SM_FUNCTION_COUNT };

/* The body of an API function. `call` is evaluated under the lock, and its value is the error. */
#define SM_DRIVER(name, call) \
    do { int error_ = sm_begin(FN_##name); if (!error_) error_ = (call); return (CUresult)sm_end(error_); } while (0)
#define SM_RUNTIME(name, call) \
    do { int error_ = sm_begin(FN_##name); if (!error_) error_ = (call); \
         return (cudaError_t)sm_end_runtime(error_); } while (0)

/* ---- clocks ---------------------------------------------------------------------------------------------------- */

typedef struct sm_stream sm_stream;
typedef struct sm_op sm_op;
typedef struct sm_capture sm_capture;
typedef struct CUgraph_st sm_graph;
typedef struct CUctx_st sm_context;
typedef struct CUevent_st sm_event;

/* The no-th operation of a stream; 0: none. */
typedef struct sm_epoch {
    uint32_t stream;
    uint64_t no;
} sm_epoch;

/* For each of some streams, the last operation that happens before some point. Immutable, because it is shared. */
typedef struct sm_clock {
    int refs, n;
    sm_epoch e[]; /* sorted by stream */
} sm_clock;

/* A point in a stream: after its no-th operation, and after all operations in `clock`. */
typedef struct sm_stamp {
    sm_stream *stream; /* NULL: no point */
    uint64_t no;
    sm_clock *clock;
} sm_stamp;

/* A set of mutually unordered operations, almost always a single one. */
typedef struct sm_front {
    sm_epoch last;
    sm_clock *more;
} sm_front;

/* ---- memory ---------------------------------------------------------------------------------------------------- */

/* The last accesses to a range of bytes of a page. */
typedef struct sm_span {
    uint32_t begin, end;
    sm_epoch write; /* no == 0: never written */
    uint64_t tag;
    sm_front reads; /* since that write */
} sm_span;

typedef struct sm_page {
    sm_span *span; /* sorted, without gaps; none before the first access */
    int n, cap;
} sm_page;

/* A physical memory handle. It is freed once it is released, is mapped nowhere, and no operation uses it. */
typedef struct sm_handle {
    uint64_t id;
    size_t size;
    int device;
    bool held;       /* not released yet */
    bool counted;    /* counts as used physical memory */
    bool rdma;       /* created for RDMA */
    int maps;
    int users; /* operations that point to it (backed mode) */
    uint64_t seen_at; /* address of its last use; 0: never used */
    sm_page *page;
    char *view;      /* backed mode: a host mapping of the bytes that always exists */
    int64_t offset;  /* offset of the bytes in the device's memfd */
} sm_handle;

typedef struct sm_mapping {
    uint64_t address;
    sm_handle *handle;     /* maps all of it */
    unsigned read, write;  /* bit mask of the devices with this right */
    bool plain;            /* of cudaMalloc: devices with enabled peer access may use it */
    sm_front uses;
} sm_mapping;

/* The small cudaMalloc blocks of a slab. */
enum { SM_UNIT = 512, SM_UNITS = (2 << 20) / 512 };
typedef struct sm_slab {
    uint16_t length[SM_UNITS]; /* at the first unit of a block: its length in units; 0 elsewhere */
    bool taken[SM_UNITS];
    int blocks;
} sm_slab;

/* A range of addresses: a reservation, one cudaMalloc, or a slab of small ones. */
typedef struct sm_region {
    uint64_t address;
    size_t size;
    sm_mapping **slot;   /* reservations: one element per granule */
    long mapped;         /* reservations: number of mappings */
    sm_mapping *whole;   /* not in reservations */
    sm_context *context; /* not in reservations */
    sm_slab *slab;
    sm_stamp freed;      /* freed in stream order here; kept for the next cudaMallocAsync */
    struct CUmemPoolHandle_st *pool; /* the pool that it was allocated from; NULL: the device's default pool,
                                        before its handle was asked for */
    sm_graph *graph;     /* the graph with a node that allocates it */
    bool ran, node_frees, away; /* a launch has allocated it; another node frees it; the program has freed it */
} sm_region;

/* A part of a physical handle that an operation really reads or writes (backed mode). */
typedef struct sm_part {
    sm_handle *handle;
    size_t offset, bytes;
} sm_part;

typedef struct sm_parts {
    sm_part *part;
    int n;
} sm_parts;

/* ---- work ------------------------------------------------------------------------------------------------------ */

typedef enum sm_work_kind { WORK_ACCESS, WORK_COPY, WORK_SET } sm_work_kind;

/* The parameters of an operation. A graph keeps them for its launches. */
typedef struct sm_work {
    sm_work_kind kind;
    sim_access *access;
    int n;
    void (*call)(void *);
    void *arg;
    uint64_t to, from;   /* COPY, SET */
    bool to_device, from_device, peer;
    size_t bytes;
    uint32_t value;      /* SET */
    int element;         /* size of the repeated element, in bytes */
    struct sm_frame *frame; /* ACCESS: a kernel with a body */
    void *staged;        /* COPY from pageable memory: a snapshot taken during the call */
} sm_work;

/* The resolved form of an sm_work, as it is executed. */
typedef struct sm_action {
    void (*call)(void *);
    void *arg;
    struct sm_frame *frame;
    sim_access *access;  /* backed mode: with `parts` */
    sm_parts *parts;
    int n;
    sm_work copy;        /* copies and memsets that move bytes */
    sm_parts to, from;
    uint64_t *runs;      /* ledger mode, copy to the host: pairs of a length and a tag */
    int nruns;
} sm_action;

/* ---- graphs ---------------------------------------------------------------------------------------------------- */

/* A list of nodes without duplicates. */
typedef struct sm_node_list {
    CUgraphNode *at;
    size_t n, cap;
} sm_node_list;

typedef enum sm_node_kind { NODE_EMPTY, NODE_WORK, NODE_VALUE, NODE_RECORD, NODE_WAIT, NODE_CHILD } sm_node_kind;

struct CUgraphNode_st {
    sm_graph *graph;
    sm_node_kind kind;
    sm_context *context;
    sm_node_list after;        /* its dependencies */
    bool programmatic;         /* in truth it may begin before they end; here it never does */
    sm_work work;              /* WORK */
    uint32_t *word, value;     /* VALUE */
    unsigned flags;
    bool write;
    sm_event *event;           /* RECORD, WAIT: an event outside the graph */
    unsigned long long birth;
    sm_graph *child;           /* CHILD: the node's own copy */
    CUgraphNode original;      /* the node that it was copied from; used as a key, never dereferenced */
    CUgraphNode copy;          /* while its graph is being copied */
    unsigned long long mark;   /* while a graph is being traversed */
    int step;                  /* while its graph is being instantiated: the step of the instance that ends it, or -1 */
};

typedef enum sm_op_kind { OP_WORK, OP_MARK, OP_WAIT_VALUE, OP_WRITE_VALUE } sm_op_kind;

typedef struct sm_dep {
    sm_stream *stream;
    uint64_t no;
} sm_dep;

struct sm_op {
    sm_op *next;
    sm_op_kind kind;
    bool running;
    uint64_t no;       /* number within its stream */
    uint64_t serial;   /* number among all operations */
    sm_dep *deps;      /* operations of other streams that must end first */
    int ndeps, capdeps;
    uint32_t *word;    /* WAIT_VALUE, WRITE_VALUE */
    uint32_t value;
    unsigned flags;
    sm_action *action; /* WORK, or NULL */
    sm_graph *graph;   /* referenced until this operation has run */
};

struct sm_stream {
    uint32_t index;        /* in sm.streams; never reused */
    unsigned long long id;
    unsigned flags;
    int priority;
    sm_context *context;   /* its place may be another one's by now */
    unsigned long long context_id;
    bool legacy;
    bool green;            /* of a green context */
    bool dead;             /* destroyed, possibly with pending work */
    bool held;             /* by sim_hold */
    struct CUstream_st *handle;
    sm_op *head, *tail;    /* pending operations */
    uint64_t queued, done; /* number of the last operation queued, and of the last one completed */
    uint64_t wanted;       /* a call waits for all operations up to this number */
    int active;            /* index in sm.active, or -1 */
    sm_clock *clock;       /* operations of other streams that the next one comes after, besides those that the host
                              has seen */
    uint64_t seen_legacy;  /* a blocking stream: the last legacy operation that it is ordered after */
    uint64_t legacy_saw;   /* a blocking stream: its last operation that the legacy stream is ordered after */
    sm_capture *capture;
    int lane;              /* its index in the capture */
};

/* The object behind a CUstream. Objects are reused, the last freed one first, and never freed, so that the use of a
   destroyed stream is detected. */
struct CUstream_st {
    sm_stream *stream; /* NULL: destroyed */
};

struct CUevent_st {
    bool live;
    unsigned flags;
    unsigned long long birth; /* distinguishes successive events in the same object */
    sm_context *context;
    sm_stamp stamp;           /* of the last record */
    unsigned long long capture; /* capture in which it was recorded */
    int mark;                 /* and the index of the position there */
    uint64_t time;            /* operations queued before the last record */
    struct CUevent_st *next;  /* list of destroyed events that await reuse */
};

struct CUctx_st {
    unsigned long long id;
    int device;
    bool primary, green, live;
    int refs;               /* primary: references by cuDevicePrimaryCtxRetain and by the runtime */
    int retained;           /* references by cuDevicePrimaryCtxRetain alone, since the context was opened */
    bool of_runtime;        /* primary: the runtime has one of these references */
    sm_stream *legacy;
    sm_stream **blocking;   /* streams that synchronize with the legacy stream */
    int nblocking, capblocking;
    int captures;           /* blocking streams that are being captured */
    unsigned peers;         /* bit mask of the devices with peer access enabled */
    int sticky;             /* the error that its calls return until it ends; 0: none */
};

typedef struct sm_device {
    struct CUctx_st primary;
    sim_unlike has;
    size_t used, peak, mapped, rdma;
    int memfd;
    int64_t offset; /* next unused offset in the memfd */
    struct CUmemPoolHandle_st *pool; /* its default pool, once somebody has asked for the handle */
} sm_device;

/* ---- threads --------------------------------------------------------------------------------------------------- */

typedef struct sm_default_stream {
    unsigned long long context_id;
    sm_stream *stream;
} sm_default_stream;

typedef struct sm_thread {
    struct sm_thread *next;
    sm_context **stack; /* stack of current contexts */
    int depth, cap;
    int device;         /* set by cudaSetDevice */
    int last;           /* the last error */
    int mode;           /* capture mode */
    bool calling;       /* runs a host function */
    sm_default_stream *streams;
    size_t nstreams, capstreams;
    sim_access *declared; /* accesses declared for its next kernel launch */
    size_t ndeclared, capdeclared;
} sm_thread;

/* ---- the state ------------------------------------------------------------------------------------------------- */

typedef struct sm_fault {
    int fn; /* -1: any function; SM_FUNCTION_COUNT: not armed */
    long nth;
    bool on;
    int error;
} sm_fault;

typedef struct sm_callback {
    void (*call)(void *);
    void *arg;
} sm_callback;

typedef struct sm_state {
    sim_options opt;
    size_t granule; /* the least granularity of a device */
    bool started, initialised, exiting;
    bool used, forked; /* this process has called cuInit or used a device; its parent had */
    bool user;                     /* started without sim_start */
    unsigned long long generation; /* counts calls of sim_start */
    uint64_t random;
    int fn;                        /* the function that is being called */
    sm_device device[SM_DEVICES];
    sm_context **contexts;         /* created by cuCtxCreate */
    size_t ncontexts, capcontexts;
    sm_thread *threads;
    int nthreads;

    sm_stream **streams;           /* by index, including destroyed ones */
    int nstreams, capstreams;
    uint64_t *host;                /* by index: the last operation that the host has seen complete */
    sm_stream **active;            /* streams with pending operations */
    int nactive;
    struct CUstream_st **slots, **free_slots;
    size_t nslots, capslots, nfree_slots, capfree_slots;
    sm_event **events, *oldest_dead, *newest_dead;
    size_t nevents, capevents, dead_events;
    sm_op *spare_ops;
    unsigned long long ids, context_ids, births;
    uint64_t operations;
    long pending;

    sm_capture *captures;
    sm_graph *graphs;
    struct CUgraphExec_st *execs;
    struct CUuserObject_st *objects;
    sm_callback *callbacks;        /* called after the lock is released */
    int ncallbacks;

    sm_region **regions;           /* sorted by address */
    size_t nregions, capregions;
    uint64_t next_address;
    struct { uint64_t address; size_t size; } freed[64]; /* ranges that are reused first */
    int nfreed;
    sm_region **slabs, **async;          /* regions with small blocks; regions freed in stream order */
    size_t nslabs, capslabs, nasync, capasync, ngraph_regions;
    struct CUmemPoolHandle_st *pools;
    sm_handle **handles;
    size_t nhandles, caphandles;         /* in use; an id consists of the index and a serial number that is never
                                            reused */
    uint32_t *free_handles;
    size_t nfree_handles, capfree_handles;
    uint32_t handle_serial;
    struct sm_pinned { char *p; size_t size; sm_context *context; bool theirs; } *pinned;
    size_t npinned, cappinned;
    size_t addresses, unmapped_under_work;

    void (*before)(const char *function); /* the callbacks of sim_hook */
    int (*at_query)(void);
    long calls[SM_FUNCTION_COUNT];
    long blocking;
    uint64_t ns, spent[SM_FUNCTION_COUNT]; /* cost of all calls, and of each function */
    sm_fault fault[8];
    int nfaults;
    long failed;
    long malloc_nth, malloc_failed;
    bool malloc_on, fault_paused;
    size_t malloc_live;
    long findings[SIM_KINDS];
    char *finding[100];
    long alike[100]; /* a program's: findings that differ in operations' numbers only count here */
    int nfindings;
} sm_state;

extern sm_state sm;
extern const char *const sm_names[];

static inline bool sm_backed(void) { return sm.opt.mode == SIM_BACKED; }
static inline size_t sm_round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

/* sim_core.c */
void *sm_alloc(size_t bytes);              /* zeroed; ends the program if host memory is missing */
void *sm_grow(void *p, size_t n, size_t *cap, size_t each);
void sm_lock(void);
int sm_lock_for(int seconds);
int sm_start(const sim_options *options);
void sm_unlock(void);
void sm_order_before(void *object); /* for ThreadSanitizer: what is done before its destructor is called */
sm_thread *sm_self(void);
int sm_begin(int fn);
int sm_end(int error);
void sm_count(int fn);                     /* for a call that needs no lock and cannot fail */
int sm_end_runtime(int error);
void sm_charge(double us);
void sm_find(sim_kind kind, const char *format, ...) __attribute__((format(printf, 2, 3)));
uint64_t sm_random(void);
void sm_later(void (*call)(void *), void *arg);
sm_context *sm_current(void);
int sm_context_look(const sm_context *c);  /* 0, or the error of a context that is none or has ended */
int sm_context_use(const sm_context *c);   /* the same, or the error that prevents the use of its streams and memory */
void sm_context_open(sm_context *c);
void sm_context_keep(sm_context *c);
void sm_context_close(sm_context *c);
void sm_context_set(sm_thread *t, sm_context *c);
void sm_context_push(sm_thread *t, sm_context *c);
int sm_device_reset(void);

/* sim_user.c */
void sm_user_start(void);
bool sm_user_found(const char *text);

/* sim_ledger.c */
void sm_clock_drop(sm_clock *c);
void sm_join(sm_stream *s, const sm_stamp *after);
void sm_host_saw(const sm_stamp *stamp);
bool sm_host_knows(const sm_front *f);
bool sm_before(const sm_stream *s, sm_epoch e);
void sm_front_add(sm_front *f, const sm_stream *s);
void sm_front_drop(sm_front *f);
void sm_touch(sm_stream *s, const sim_access *a);
int sm_tag_runs(uint64_t address, size_t bytes, uint64_t **runs);
void sm_pages_drop(sm_handle *h);

/* sim_queue.c */
sm_stream *sm_stream_new(sm_context *c, unsigned flags, int priority, bool legacy);
int sm_stream_find(CUstream handle, sm_stream **out);
int sm_stream_open(CUstream *out, unsigned flags, int priority);
int sm_stream_close(CUstream handle);
void sm_stream_end(sm_stream *s);
void sm_stream_abandon(sm_stream *s);
int sm_stream_query(CUstream handle);
int sm_stream_wait(CUstream handle);
sm_stamp sm_stamp_of(sm_stream *s);
void sm_stamp_set(sm_stamp *to, sm_stamp from);
int sm_event_open(CUevent *out, unsigned flags);
int sm_event_close(CUevent e);
int sm_event_record(CUevent e, CUstream handle, unsigned flags);
void sm_event_mark(CUevent e, sm_stream *s);
int sm_event_query(CUevent e);
int sm_event_wait(CUevent e);
int sm_event_time(float *ms, CUevent a, CUevent b);
int sm_stream_after(CUstream handle, CUevent e, unsigned flags);
void sm_after(sm_stream *s, const sm_stamp *stamp);
sm_op *sm_queue(sm_stream *s, sm_op_kind kind);
int sm_usable(sm_stream *s);
int sm_value(CUstream handle, CUdeviceptr address, uint32_t value, unsigned flags, bool write);
void sm_value_queue(sm_stream *s, uint32_t *word, uint32_t value, unsigned flags, bool write);
int sm_wait(const sm_stamp *stamp);
int sm_wait_context(sm_context *c);
int sm_synchronize(sm_context *c);
void sm_pace(void);
void sm_run_all(void);
void sm_events_of_context_die(sm_context *c);

/* sim_capture.c */
int sm_capture_begin(CUstream handle, int mode);
int sm_capture_begin_in(CUstream handle, cudaGraph_t g, const CUgraphNode *after, size_t n, int mode);
int sm_capture_dependencies(CUstream handle, const CUgraphNode *nodes, const void *edges, size_t n, unsigned flags);
void sm_capture_forget_node(CUgraphNode node);
sm_graph *sm_capture_graph(const sm_capture *c);
bool sm_is_captured_into(const sm_graph *g);
int sm_capture_end(CUstream handle, cudaGraph_t *out);
int sm_capture_status(CUstream handle, int *status, unsigned long long *id, cudaGraph_t *graph);
int sm_capture_end_nodes(CUstream handle, const CUgraphNode **nodes, const void **edges, size_t *n);
void sm_capture_programmatic(CUstream handle);
int sm_capture_mode(int *mode);
int sm_capture_look(void);
int sm_capture_touched(sm_stream *s);
int sm_capture_break_context(sm_context *c);
void sm_capture_stream_ends(sm_stream *s);
void sm_capture_break(sm_capture *c);
int sm_capture_break_blocking(sm_context *c);
bool sm_capture_lost(const sm_capture *c);
void sm_capture_work(sm_stream *s, const sm_work *w);
void sm_capture_value(sm_stream *s, uint32_t *word, uint32_t value, unsigned flags, bool write);
int sm_capture_record(sm_stream *s, sm_event *e, bool external);
int sm_capture_wait(sm_stream *s, sm_event *e, bool external);
int sm_capture_event_touched(const sm_event *e);
void sm_capture_of_context_dies(sm_context *c);
void sm_captures_clear(void);

/* sim_graph.c */
void sm_nodes_add(sm_node_list *list, CUgraphNode node);
void sm_nodes_add_all(sm_node_list *list, const sm_node_list *more);
void sm_nodes_remove(sm_node_list *list, CUgraphNode node);
void sm_nodes_drop(sm_node_list *list);
bool sm_nodes_before(const sm_node_list *nodes, const sm_node_list *end);
int sm_nodes_named(sm_node_list *list, cudaGraph_t g, const CUgraphNode *nodes, size_t n);
CUgraphNode sm_node_new(sm_graph *g, sm_node_kind kind, sm_context *context, const sm_node_list *after);
int sm_node_type(CUgraphNode node, int *type);
int sm_node_after(CUgraphNode node, CUgraphNode *nodes, void *edges, size_t *n);
int sm_node_before(CUgraphNode node, CUgraphNode *nodes, size_t *n);
int sm_node_child(CUgraphNode node, cudaGraph_t *out);
int sm_node_in_clone(CUgraphNode *out, CUgraphNode original, cudaGraph_t clone);
int sm_node_destroy(CUgraphNode node);
sm_graph *sm_graph_new(void);
unsigned long long sm_graph_capture_id(sm_graph *g); /* id of every capture into this graph */
int sm_graph_check(cudaGraph_t g);
int sm_graph_create(cudaGraph_t *out, unsigned flags);
int sm_graph_clone(cudaGraph_t *out, cudaGraph_t from);
int sm_graph_destroy(cudaGraph_t graph);
void sm_graph_capture_lost(sm_graph *g);
void sm_graph_drop(sm_graph *g);
int sm_graph_add(CUgraphNode *out, cudaGraph_t g, const CUgraphNode *after, size_t n, sm_node_kind kind);
int sm_graph_add_work(CUgraphNode *out, cudaGraph_t g, const CUgraphNode *after, size_t n, const sm_work *w);
int sm_graph_add_event(CUgraphNode *out, cudaGraph_t g, const CUgraphNode *after, size_t n, CUevent e, bool wait);
int sm_graph_add_child(CUgraphNode *out, cudaGraph_t g, const CUgraphNode *after, size_t n, cudaGraph_t child);
int sm_graph_nodes(cudaGraph_t g, CUgraphNode *nodes, size_t *n, bool roots);
int sm_graph_edges(cudaGraph_t g, CUgraphNode *from, CUgraphNode *to, size_t *n);
int sm_graph_connect(cudaGraph_t g, const CUgraphNode *from, const CUgraphNode *to, size_t n, bool on);
int sm_graph_retain(cudaGraph_t g, cudaUserObject_t o, unsigned count, unsigned flags);
int sm_graph_release(cudaGraph_t g, cudaUserObject_t o, unsigned count);
int sm_graph_instantiate(cudaGraphExec_t *out, cudaGraph_t graph);
int sm_graph_upload(cudaGraphExec_t x, CUstream handle);
int sm_graph_launch(cudaGraphExec_t exec, CUstream handle);
int sm_exec_update(cudaGraphExec_t x, cudaGraph_t g, int *result, CUgraphNode *where);
int sm_node_set_work(CUgraphNode node, const sm_work *w);
int sm_exec_set_work(cudaGraphExec_t x, CUgraphNode original, const sm_work *w);
int sm_exec_child(cudaGraphExec_t x, CUgraphNode original, cudaGraph_t child);
int sm_exec_destroy(cudaGraphExec_t exec);
int sm_object_create(cudaUserObject_t *out, void *ptr, cudaHostFn_t destroy, unsigned refs, unsigned flags);
int sm_object_retain(cudaUserObject_t o, unsigned count);
int sm_object_release(cudaUserObject_t o, unsigned count);
void sm_graphs_clear(void);

/* sim_memory.c */
int sm_memory_start(void);
void sm_memory_clear(void);
void sm_memory_of_context_dies(sm_context *c);
sm_region *sm_region_at(uint64_t address);
sm_mapping *sm_mapping_at(uint64_t address, size_t *left);
int sm_address_range(CUdeviceptr *base, size_t *size, uint64_t address);
void sm_handle_settle(sm_handle *h);
int sm_malloc_block(uint64_t *out, size_t bytes);
int sm_free_block(uint64_t address);
int sm_malloc_async(uint64_t *out, size_t bytes, CUmemoryPool pool, CUstream stream);
int sm_pool_create(CUmemoryPool *out, const CUmemPoolProps *props);
int sm_pool_default(CUmemoryPool *out, int device);
int sm_pool_destroy(CUmemoryPool pool);
int sm_pool_set(CUmemoryPool pool, int attribute, const void *value);
int sm_pool_get(CUmemoryPool pool, int attribute, void *value);
int sm_pool_trim(CUmemoryPool pool, size_t keep);
int sm_graph_memory_launch(const sm_graph *g);
void sm_graph_memory_drop(const sm_graph *g);
int sm_free_async(uint64_t address, CUstream stream);
void sm_trim_async(void);
int sm_host_malloc(void **out, size_t bytes);
int sm_host_free(void *p);
int sm_host_register(void *p, size_t bytes);
int sm_host_unregister(void *p);
bool sm_is_pinned(const void *p, size_t bytes);
int sm_mem_info(size_t *left, size_t *total);
int sm_reserve(CUdeviceptr *out, size_t size, size_t alignment, uint64_t hint);
int sm_unreserve(uint64_t address, size_t size);
int sm_create(CUmemGenericAllocationHandle *out, size_t size, const CUmemAllocationProp *prop);
int sm_release(CUmemGenericAllocationHandle id);
int sm_map(uint64_t address, size_t size, size_t offset, CUmemGenericAllocationHandle id);
int sm_unmap(uint64_t address, size_t size);
int sm_set_access(uint64_t address, size_t size, const CUmemAccessDesc *desc, size_t count);
int sm_granularity(size_t *out, const CUmemAllocationProp *prop);
size_t sm_memory_leaks(char *text, size_t size);

/* sim_work.c */
int sm_work_queue(CUstream handle, const sm_work *w, sm_stamp *stamp);
void sm_work_launch(sm_stream *s, const sm_work *w);
void sm_work_copy(sm_work *to, const sm_work *from);
void sm_work_drop(sm_work *w);
void sm_action_begin(sm_action *a);
void sm_action_end(sm_action *a);
void sm_action_drop(sm_action *a);
int sm_work_of_copy(sm_work *w, uint64_t to, uint64_t from, size_t bytes, int kind);
int sm_work_of_set(sm_work *w, uint64_t to, unsigned value, int element, size_t bytes);
int sm_copy(uint64_t to, uint64_t from, size_t bytes, int kind, CUstream stream, bool wait);
int sm_set(uint64_t to, int value, size_t bytes, CUstream stream);

/* sim_kernel.c */
typedef struct sm_frame sm_frame;
sm_frame *sm_frame_keep(sm_frame *f);
void sm_frame_drop(sm_frame *f);
void sm_frame_run(sm_frame *f);
int sm_kernel_check(const void *function);
int sm_work_of_kernel(sm_work *w, const void *function, dim3 grid, dim3 block, void **arguments, size_t shared);
int sm_kernel_launch(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, CUstream stream);

/* sim_driver.c */
typedef struct sm_error {
    int code;
    const char *driver, *runtime, *text;
} sm_error;
const sm_error *sm_error_of(int code);
int sm_attribute(int *value, int attribute, int device);
int sm_peer(int *can, int device, int peer);
int sm_stream_id(CUstream handle, unsigned long long *id);
int sm_stream_flags(CUstream handle, unsigned *flags);
int sm_stream_device(CUstream handle, int *device);
int sm_host_function(CUstream handle, void (*call)(void *), void *arg);
int sm_entry_point(const char *name, void **out, int version, unsigned long long flags, int *result);

/* sim_runtime.c */
cudaError_t sm_runtime_entry_point(int fn, const char *symbol, void **out, unsigned version, unsigned long long flags,
                                   enum cudaDriverEntryPointQueryResult *status);

/* Versions of functions that the headers declare only on request: sim_driver.c, sim_ptsz.c. */
#define SM_PTSZ(name) name##_ptsz
struct CUgreenCtx_st;
CUresult CUDAAPI cuCtxCreate_v2(CUcontext *out, unsigned int flags, CUdevice device);
CUresult CUDAAPI cuCtxCreate_v4(CUcontext *out, CUctxCreateParams *params, unsigned int flags, CUdevice device);
CUresult CUDAAPI cuCtxGetDevice_v2(CUdevice *out, CUcontext c);
CUresult CUDAAPI cuCtxSynchronize_v2(CUcontext c);
CUresult CUDAAPI cuStreamGetCtx_v2(CUstream stream, CUcontext *out, struct CUgreenCtx_st **green);
CUresult CUDAAPI cuStreamGetCaptureInfo_v2(CUstream s, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
                                           const CUgraphNode **deps, size_t *ndeps);
CUresult CUDAAPI cuStreamGetCaptureInfo_v3(CUstream s, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
                                           const CUgraphNode **deps, const CUgraphEdgeData **edges, size_t *ndeps);
CUresult CUDAAPI cuGraphNodeGetDependencies_v2(CUgraphNode node, CUgraphNode *deps, CUgraphEdgeData *edges, size_t *n);
CUresult CUDAAPI cuStreamGetDevice(CUstream s, CUdevice *device);
cudaError_t CUDARTAPI cudaStreamGetDevice(cudaStream_t s, int *device);
cudaError_t CUDARTAPI cudaGetDriverEntryPointByVersion(const char *symbol, void **out, unsigned int version,
                                                       unsigned long long flags,
                                                       enum cudaDriverEntryPointQueryResult *status);
CUresult CUDAAPI cuLaunchHostFunc(CUstream s, void (*call)(void *), void *arg);
CUresult CUDAAPI cuStreamGetId_ptsz(CUstream s, unsigned long long *id);
CUresult CUDAAPI cuStreamGetCtx_ptsz(CUstream s, CUcontext *out);
CUresult CUDAAPI cuStreamGetFlags_ptsz(CUstream s, unsigned int *flags);
CUresult CUDAAPI cuStreamGetDevice_ptsz(CUstream s, CUdevice *out);
CUresult CUDAAPI cuStreamEndCapture_ptsz(CUstream s, CUgraph *out);
CUresult CUDAAPI cuStreamQuery_ptsz(CUstream s);
CUresult CUDAAPI cuStreamSynchronize_ptsz(CUstream s);
CUresult CUDAAPI cuEventRecord_ptsz(CUevent e, CUstream s);
CUresult CUDAAPI cuMemFreeAsync_ptsz(CUdeviceptr p, CUstream s);
CUresult CUDAAPI cuMemsetD8Async_ptsz(CUdeviceptr to, unsigned char value, size_t bytes, CUstream s);
CUresult CUDAAPI cuMemcpyDtoHAsync_v2_ptsz(void *to, CUdeviceptr from, size_t bytes, CUstream s);
CUresult CUDAAPI cuStreamGetCtx_v2_ptsz(CUstream s, CUcontext *out, struct CUgreenCtx_st **green);
CUresult CUDAAPI cuStreamIsCapturing_ptsz(CUstream s, CUstreamCaptureStatus *status);
CUresult CUDAAPI cuStreamGetCaptureInfo_v2_ptsz(CUstream s, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph
                                        *graph, const CUgraphNode **deps, size_t *ndeps);
CUresult CUDAAPI cuStreamGetCaptureInfo_v3_ptsz(CUstream s, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph
                                        *graph, const CUgraphNode **deps, const CUgraphEdgeData **edges, size_t
                                        *ndeps);
CUresult CUDAAPI cuStreamBeginCapture_v2_ptsz(CUstream s, CUstreamCaptureMode mode);
CUresult CUDAAPI cuStreamWaitEvent_ptsz(CUstream s, CUevent e, unsigned int flags);
CUresult CUDAAPI cuStreamWaitValue32_v2_ptsz(CUstream s, CUdeviceptr p, cuuint32_t value, unsigned int flags);
CUresult CUDAAPI cuStreamWriteValue32_v2_ptsz(CUstream s, CUdeviceptr p, cuuint32_t value, unsigned int flags);
CUresult CUDAAPI cuEventRecordWithFlags_ptsz(CUevent e, CUstream s, unsigned int flags);
CUresult CUDAAPI cuLaunchHostFunc_ptsz(CUstream s, void (*call)(void *), void *arg);
CUresult CUDAAPI cuMemAllocAsync_ptsz(CUdeviceptr *out, size_t bytes, CUstream s);
CUresult CUDAAPI cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream s);

#endif
