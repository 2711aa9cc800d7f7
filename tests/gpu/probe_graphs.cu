/* probe_graphs.cu - asks the driver what galloc's ownership of graphs' memory rests on, and prints the answers. It
   tests nothing. Each question runs in a process of its own, for 20 seconds at most: an error ends that question only.

   galloc learns of a graph's end by a user object that the graph holds (made without synchronization of the destructor,
   moved to the graph while it is captured). So: when does the destructor of such an object run, if the graph is then
   instantiated, updated into another instance, added to another graph, launched into a capture, cloned, captured into,
   a body of a conditional node, edited? Further: which questions about a stream end its capture, what is true of
   streams of green contexts, and of pages that are capable of RDMA. */

#include <cuda.h>
#include <cuda_runtime.h>

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

#if CUDART_VERSION < 13000
int main(void) { return printf("skipped: built with a CUDA before 13.0\n"), 0; }
#else

/* The driver's functions, fetched from the runtime so that nothing must be linked with it. */
#define FUNCTIONS(X)                                                                                                   \
    X(cuCtxFromGreenCtx, 12040, CUresult, (CUcontext *, CUgreenCtx))                                                   \
    X(cuCtxGetCurrent, 12000, CUresult, (CUcontext *))                                                                 \
    X(cuCtxGetDevice, 12000, CUresult, (CUdevice *))                                                                   \
    X(cuCtxGetId, 12000, CUresult, (CUcontext, unsigned long long *))                                                  \
    X(cuCtxPopCurrent, 12000, CUresult, (CUcontext *))                                                                 \
    X(cuCtxPushCurrent, 12000, CUresult, (CUcontext))                                                                  \
    X(cuCtxSynchronize, 12000, CUresult, (void))                                                                       \
    X(cuDevResourceGenerateDesc, 12040, CUresult, (CUdevResourceDesc *, CUdevResource *, unsigned))                    \
    X(cuDevSmResourceSplitByCount, 12040, CUresult,                                                                    \
      (CUdevResource *, unsigned *, const CUdevResource *, CUdevResource *, unsigned, unsigned))                       \
    X(cuDeviceGetAttribute, 12000, CUresult, (int *, CUdevice_attribute, CUdevice))                                    \
    X(cuDeviceGetDevResource, 12040, CUresult, (CUdevice, CUdevResource *, CUdevResourceType))                         \
    X(cuEventCreate, 12000, CUresult, (CUevent *, unsigned))                                                           \
    X(cuEventQuery, 12000, CUresult, (CUevent))                                                                        \
    X(cuEventRecord, 12000, CUresult, (CUevent, CUstream))                                                             \
    X(cuGreenCtxCreate, 12040, CUresult, (CUgreenCtx *, CUdevResourceDesc, CUdevice, unsigned))                        \
    X(cuGreenCtxDestroy, 12040, CUresult, (CUgreenCtx))                                                                \
    X(cuGreenCtxStreamCreate, 12050, CUresult, (CUstream *, CUgreenCtx, unsigned, int))                                \
    X(cuMemAddressReserve, 12000, CUresult, (CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long))          \
    X(cuMemCreate, 12000, CUresult,                                                                                    \
      (CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long))                       \
    X(cuMemGetAllocationGranularity, 12000, CUresult,                                                                  \
      (size_t *, const CUmemAllocationProp *, CUmemAllocationGranularity_flags))                                       \
    X(cuMemMap, 12000, CUresult, (CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long))      \
    X(cuMemRelease, 12000, CUresult, (CUmemGenericAllocationHandle))                                                   \
    X(cuMemSetAccess, 12000, CUresult, (CUdeviceptr, size_t, const CUmemAccessDesc *, size_t))                         \
    X(cuStreamGetCtx, 9020, CUresult, (CUstream, CUcontext *))                                                         \
    X(cuStreamGetFlags, 12000, CUresult, (CUstream, unsigned *))                                                       \
    X(cuStreamGetId, 12000, CUresult, (CUstream, unsigned long long *))                                                \
    X(cuStreamIsCapturing, 12000, CUresult, (CUstream, CUstreamCaptureStatus *))                                       \
    X(cuStreamWaitEvent, 12000, CUresult, (CUstream, CUevent, unsigned))                                               \
    X(cuThreadExchangeStreamCaptureMode, 12000, CUresult, (CUstreamCaptureMode *))

#define DECLARE(name, version, type, arguments) static type(CUDAAPI *f_##name) arguments;
FUNCTIONS(DECLARE)

static void load(const char *name, unsigned version, void **slot)
{
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    cudaError_t error = cudaGetDriverEntryPointByVersion(name, slot, version, cudaEnableLegacyStream, &found);
    if (!error && found == cudaDriverEntryPointSuccess && *slot) return;
    printf("      the driver has no %s (%d)\n", name, (int)error);
    exit(1);
}

#define LOAD(name, version, type, arguments) load(#name, version, (void **)&f_##name);

/* An error ends the question. */
static void must(int result, const char *what)
{
    if (!result) return;
    printf("      error %d: %s\n", result, what);
    fflush(stdout);
    _exit(1);
}
#define MUST(call) must((int)(call), #call)

/* What a call returns, as an answer. */
static int ask(int result, const char *what)
{
    printf("      %s: %d\n", what, result);
    (void)cudaGetLastError();
    return result;
}
#define ASK(call) ask((int)(call), #call)

/* ---- work and notes ---------------------------------------------------------------------------------------------- */

/* Runs until `go` is set, two seconds at most. `id` tells one graph's node from another's. */
static __global__ void hold(volatile int *go, int id)
{
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    while (!*go && now - begin < 2000000000ull + id);
}

static __global__ void write_to(int *p) { *p = 1; }

static int *go;
static cudaStream_t stream, second;

/* A user object's end. */
struct note {
    std::atomic<int> gone;
};

static void CUDART_CB note_gone(void *data) { ((note *)data)->gone = 1; }

/* As galloc does it: the graph alone holds the object. */
static note *note_on(cudaGraph_t graph)
{
    cudaUserObject_t object;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    note *made = new note();
    MUST(f_cuThreadExchangeStreamCaptureMode(&mode));
    MUST(cudaUserObjectCreate(&object, made, note_gone, 1, cudaUserObjectNoDestructorSync));
    MUST(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove));
    MUST(f_cuThreadExchangeStreamCaptureMode(&mode));
    return made;
}

static cudaGraph_t graph_of(cudaStream_t captured)
{
    cudaStreamCaptureStatus status;
    unsigned long long id;
    cudaGraph_t graph = NULL;
    MUST(cudaStreamGetCaptureInfo(captured, &status, &id, &graph, NULL, NULL, NULL));
    return graph;
}

static void look(const char *when, const note *n)
{
    auto begin = std::chrono::steady_clock::now();
    double ms = 0;
    while (!n->gone && ms < 150) {
        usleep(20);
        ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
    }
    if (n->gone) printf("      %s: GONE, seen after %.2f ms\n", when, ms);
    else printf("      %s: held\n", when);
    fflush(stdout);
}

/* The last question of all: nothing is left that could use it. With a nudge, if need be. */
static void look_last(const char *when, const note *n)
{
    look(when, n);
    if (n->gone) return;
    hold<<<1, 1, 0, second>>>(go, 0);
    MUST(cudaDeviceSynchronize());
    look("  and after other work and cudaDeviceSynchronize", n);
}

/* A graph of one kernel, with a note. */
static cudaGraph_t captured(note **n, int id)
{
    cudaGraph_t graph;
    MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    hold<<<1, 1, 0, stream>>>(go, id);
    *n = note_on(graph_of(stream));
    MUST(cudaStreamEndCapture(stream, &graph));
    return graph;
}

static cudaGraphExec_t instance(cudaGraph_t graph)
{
    cudaGraphExec_t exec;
    MUST(cudaGraphInstantiate(&exec, graph, 0));
    return exec;
}

static void launch_and_wait(cudaGraphExec_t exec)
{
    MUST(cudaGraphLaunch(exec, stream));
    MUST(cudaStreamSynchronize(stream));
}

/* A launch that runs until release(). */
static void launch_and_hold(cudaGraphExec_t exec)
{
    *go = 0;
    MUST(cudaGraphLaunch(exec, stream));
}

static void release(void)
{
    bool ran = cudaStreamQuery(stream) == cudaErrorNotReady;
    (void)cudaGetLastError();
    *(volatile int *)go = 1;
    MUST(cudaStreamSynchronize(stream));
    if (!ran) printf("      (the launch had ended by itself)\n");
}

static int update(cudaGraphExec_t exec, cudaGraph_t graph)
{
    cudaGraphExecUpdateResultInfo info;
    memset(&info, 0, sizeof info);
    int result = cudaGraphExecUpdate(exec, graph, &info);
    printf("      cudaGraphExecUpdate: %d (%d)\n", result, (int)info.result);
    (void)cudaGetLastError();
    return result;
}

/* ---- instances --------------------------------------------------------------------------------------------------- */

static void graph_alone(void)
{
    note *a;
    cudaGraph_t graph = captured(&a, 1);
    look("a graph", a);
    MUST(cudaGraphDestroy(graph));
    look_last("destroyed", a);
}

static void capture_invalidated(void)
{
    cudaGraph_t graph = NULL;
    MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    hold<<<1, 1, 0, stream>>>(go, 1);
    note *a = note_on(graph_of(stream));
    ASK(cudaStreamSynchronize(stream));
    look("invalidated", a);
    ASK(cudaStreamEndCapture(stream, &graph));
    look_last("ended", a);
}

static void graph_instantiated(void)
{
    note *a;
    cudaGraph_t graph = captured(&a, 1);
    cudaGraphExec_t exec = instance(graph), again = instance(graph);
    MUST(cudaGraphDestroy(graph));
    look("instantiated twice, the graph destroyed", a);
    launch_and_wait(exec);
    MUST(cudaGraphExecDestroy(exec));
    look("one instance destroyed", a);
    MUST(cudaGraphExecDestroy(again));
    look_last("the other, that never ran, destroyed", a);
}

static void instance_destroyed_running(void)
{
    note *a;
    cudaGraph_t graph = captured(&a, 1);
    cudaGraphExec_t exec = instance(graph);
    MUST(cudaGraphDestroy(graph));
    launch_and_hold(exec);
    MUST(cudaGraphExecDestroy(exec));
    look("the instance destroyed while a launch runs", a);
    release();
    look_last("the launch has ended", a);
}

static void instantiated_for_device(void)
{
    note *a;
    cudaGraphExec_t exec;
    cudaGraph_t graph = captured(&a, 1);
    if (ASK(cudaGraphInstantiate(&exec, graph, cudaGraphInstantiateFlagDeviceLaunch))) return;
    MUST(cudaGraphDestroy(graph));
    look("an instance for launches from the device, the graph destroyed", a);
    MUST(cudaGraphUpload(exec, stream));
    MUST(cudaStreamSynchronize(stream));
    look("uploaded", a);
    MUST(cudaGraphExecDestroy(exec));
    look_last("destroyed", a);
}

static void freed_on_launch(void)
{
    note *a;
    cudaGraphExec_t exec;
    cudaGraph_t graph = captured(&a, 1);
    MUST(cudaGraphInstantiate(&exec, graph,
                              cudaGraphInstantiateFlagAutoFreeOnLaunch | cudaGraphInstantiateFlagUseNodePriority));
    MUST(cudaGraphDestroy(graph));
    look("an instance with auto-free and node priorities, the graph destroyed", a);
    MUST(cudaGraphExecDestroy(exec));
    look_last("destroyed", a);
}

static void retained_after(void)
{
    cudaGraph_t graph;
    MUST(cudaGraphCreate(&graph, 0));
    cudaGraphNode_t node;
    MUST(cudaGraphAddEmptyNode(&node, graph, NULL, 0));
    cudaGraphExec_t exec = instance(graph);
    note *a = note_on(graph);
    MUST(cudaGraphDestroy(graph));
    look("retained after the graph was instantiated; the graph destroyed", a);
    MUST(cudaGraphExecDestroy(exec));
    look_last("the instance destroyed", a);
}

/* ---- updates ----------------------------------------------------------------------------------------------------- */

static void updated(void)
{
    note *a, *b, *c;
    cudaGraph_t graph = captured(&a, 1);
    cudaGraphExec_t exec = instance(graph);
    MUST(cudaGraphDestroy(graph));
    launch_and_wait(exec);
    graph = captured(&b, 2);
    update(exec, graph);
    look("old graph's, once the instance is updated", a);
    MUST(cudaGraphDestroy(graph));
    look("new graph's, once it is destroyed too", b);
    launch_and_wait(exec);
    look("old graph's, after a launch", a);
    look("new graph's, after a launch", b);
    graph = captured(&c, 3);
    update(exec, graph);
    MUST(cudaGraphDestroy(graph));
    launch_and_wait(exec);
    look("first graph's, updated again and launched", a);
    look("second graph's", b);
    look("third graph's", c);
    MUST(cudaGraphExecDestroy(exec));
    look_last("first graph's, the instance destroyed", a);
    look_last("second graph's", b);
    look_last("third graph's", c);
}

static void updated_graph_kept(void)
{
    note *a, *b;
    cudaGraph_t first = captured(&a, 1), next = captured(&b, 2);
    cudaGraphExec_t exec = instance(first);
    update(exec, next);
    MUST(cudaGraphExecDestroy(exec));
    look("first graph's, graphs kept, the instance destroyed", a);
    look("second graph's, likewise", b);
    MUST(cudaGraphDestroy(first));
    MUST(cudaGraphDestroy(next));
    look_last("first graph's, graphs destroyed", a);
    look_last("second graph's", b);
}

static void updated_running(void)
{
    note *a, *b;
    cudaGraph_t graph = captured(&a, 1);
    cudaGraphExec_t exec = instance(graph);
    MUST(cudaGraphDestroy(graph));
    launch_and_wait(exec);
    graph = captured(&b, 2);
    launch_and_hold(exec);
    update(exec, graph);
    MUST(cudaGraphDestroy(graph));
    look("old graph's, updated while a launch of it runs", a);
    look("new graph's, destroyed, likewise", b);
    MUST(cudaGraphExecDestroy(exec));
    look("old graph's, the instance destroyed, the launch still runs", a);
    look("new graph's", b);
    release();
    look_last("old graph's, the launch has ended", a);
    look_last("new graph's", b);
}

static void updated_queued(void)
{
    note *a, *b;
    cudaGraph_t graph = captured(&a, 1);
    cudaGraphExec_t exec = instance(graph);
    MUST(cudaGraphDestroy(graph));
    graph = captured(&b, 2);
    launch_and_hold(exec);
    update(exec, graph);
    MUST(cudaGraphDestroy(graph));
    MUST(cudaGraphLaunch(exec, stream));
    MUST(cudaGraphExecDestroy(exec));
    look("old graph's: launched, updated, launched, destroyed, the first launch runs", a);
    look("new graph's", b);
    release();
    look_last("old graph's, the launches have ended", a);
    look_last("new graph's", b);
}

static void updated_in_vain(void)
{
    note *a, *b;
    cudaGraph_t graph = captured(&a, 1);
    cudaGraphExec_t exec = instance(graph);
    MUST(cudaGraphDestroy(graph));
    MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    hold<<<1, 1, 0, stream>>>(go, 1);
    hold<<<1, 1, 0, stream>>>(go, 2);
    b = note_on(graph_of(stream));
    MUST(cudaStreamEndCapture(stream, &graph));
    update(exec, graph);
    look("old graph's, the update was refused", a);
    MUST(cudaGraphDestroy(graph));
    look("new graph's, destroyed", b);
    launch_and_wait(exec);
    MUST(cudaGraphExecDestroy(exec));
    look_last("old graph's, the instance destroyed", a);
    look_last("new graph's", b);
}

static void updated_from_nothing(void)
{
    cudaGraph_t graph;
    note *b;
    MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    hold<<<1, 1, 0, stream>>>(go, 1);
    MUST(cudaStreamEndCapture(stream, &graph));
    cudaGraphExec_t exec = instance(graph);
    MUST(cudaGraphDestroy(graph));
    graph = captured(&b, 2);
    update(exec, graph);
    MUST(cudaGraphDestroy(graph));
    look("instance of a graph without objects, updated by one with, that destroyed", b);
    MUST(cudaGraphExecDestroy(exec));
    look_last("the instance destroyed", b);
}

static cudaGraph_t parent_of(cudaGraph_t child, cudaGraphNode_t *node)
{
    cudaGraph_t parent;
    MUST(cudaGraphCreate(&parent, 0));
    MUST(cudaGraphAddChildGraphNode(node, parent, NULL, 0, child));
    return parent;
}

static void updated_with_child(void)
{
    note *a, *b;
    cudaGraphNode_t node;
    cudaGraph_t child = captured(&a, 1), parent = parent_of(child, &node);
    cudaGraphExec_t exec = instance(parent);
    MUST(cudaGraphDestroy(child));
    MUST(cudaGraphDestroy(parent));
    look("child of a graph that is instantiated, both destroyed", a);
    child = captured(&b, 2);
    parent = parent_of(child, &node);
    update(exec, parent);
    MUST(cudaGraphDestroy(child));
    MUST(cudaGraphDestroy(parent));
    look("old child's, updated by a graph with another child", a);
    look("new child's, both destroyed", b);
    MUST(cudaGraphExecDestroy(exec));
    look_last("old child's, the instance destroyed", a);
    look_last("new child's", b);
}

static void child_set_in_instance(void)
{
    note *a, *b;
    cudaGraphNode_t node;
    cudaGraph_t child = captured(&a, 1), parent = parent_of(child, &node);
    cudaGraphExec_t exec = instance(parent);
    MUST(cudaGraphDestroy(child));
    child = captured(&b, 2);
    ASK(cudaGraphExecChildGraphNodeSetParams(exec, node, child));
    MUST(cudaGraphDestroy(child));
    look("old child's, cudaGraphExecChildGraphNodeSetParams", a);
    look("new child's, destroyed", b);
    MUST(cudaGraphDestroy(parent));
    look("old child's, the graph destroyed", a);
    launch_and_wait(exec);
    MUST(cudaGraphExecDestroy(exec));
    look_last("old child's, the instance destroyed", a);
    look_last("new child's", b);
}

/* ---- graphs in graphs -------------------------------------------------------------------------------------------- */

static void added_as_child(void)
{
    note *a;
    cudaGraphNode_t node;
    cudaGraph_t child = captured(&a, 1), parent = parent_of(child, &node);
    MUST(cudaGraphDestroy(child));
    look("added to a graph as a child, destroyed", a);
    cudaGraphExec_t exec = instance(parent);
    MUST(cudaGraphDestroy(parent));
    look("the graph instantiated and destroyed", a);
    launch_and_hold(exec);
    MUST(cudaGraphExecDestroy(exec));
    look("the instance destroyed while a launch runs", a);
    release();
    look_last("the launch has ended", a);
}

static void child_removed(void)
{
    note *a;
    cudaGraphNode_t node;
    cudaGraph_t child = captured(&a, 1), parent = parent_of(child, &node);
    MUST(cudaGraphDestroy(child));
    MUST(cudaGraphDestroyNode(node));
    look("the child's node destroyed", a);
    MUST(cudaGraphDestroy(parent));
    look_last("the graph destroyed", a);
}

static void child_moved(void)
{
    note *a;
    cudaGraph_t child = captured(&a, 1), parent;
    cudaGraphNode_t node;
    cudaGraphNodeParams params = {};
    params.type = cudaGraphNodeTypeGraph;
    params.graph.graph = child;
    params.graph.ownership = cudaGraphChildGraphOwnershipMove;
    MUST(cudaGraphCreate(&parent, 0));
    if (ASK(cudaGraphAddNode(&node, parent, NULL, NULL, 0, &params))) return;
    look("moved to a graph as a child", a);
    cudaGraphExec_t exec = instance(parent);
    MUST(cudaGraphDestroy(parent));
    look("the graph instantiated and destroyed", a);
    MUST(cudaGraphExecDestroy(exec));
    look_last("the instance destroyed", a);
}

static void captured_into_child(void)
{
    note *a;
    cudaGraphNode_t node;
    cudaGraph_t child, inner, parent;
    MUST(cudaGraphCreate(&child, 0));
    parent = parent_of(child, &node);
    MUST(cudaGraphDestroy(child));
    MUST(cudaGraphChildGraphNodeGetGraph(node, &inner));
    if (ASK(cudaStreamBeginCaptureToGraph(stream, inner, NULL, NULL, 0, cudaStreamCaptureModeGlobal))) return;
    hold<<<1, 1, 0, stream>>>(go, 1);
    a = note_on(graph_of(stream));
    printf("      the capture's graph is the child: %d\n", graph_of(stream) == inner);
    MUST(cudaStreamEndCapture(stream, &inner));
    cudaGraphExec_t exec = instance(parent);
    MUST(cudaGraphDestroy(parent));
    look("captured into a child's graph, the graph instantiated and destroyed", a);
    MUST(cudaGraphExecDestroy(exec));
    look_last("the instance destroyed", a);
}

static void cloned(void)
{
    note *a;
    cudaGraph_t graph = captured(&a, 1), clone;
    MUST(cudaGraphClone(&clone, graph));
    MUST(cudaGraphDestroy(graph));
    look("cloned, the graph destroyed", a);
    cudaGraphExec_t exec = instance(clone);
    MUST(cudaGraphDestroy(clone));
    look("the clone instantiated and destroyed", a);
    MUST(cudaGraphExecDestroy(exec));
    look_last("the instance destroyed", a);
}

static void node_destroyed(void)
{
    note *a;
    cudaGraph_t graph = captured(&a, 1);
    cudaGraphNode_t node;
    size_t n = 1;
    MUST(cudaGraphGetNodes(graph, &node, &n));
    MUST(cudaGraphDestroyNode(node));
    look("the only node destroyed", a);
    cudaGraphExec_t exec = instance(graph);
    MUST(cudaGraphDestroy(graph));
    look("instantiated, the graph destroyed", a);
    MUST(cudaGraphExecDestroy(exec));
    look_last("the instance destroyed", a);
}

/* ---- launches into a capture ------------------------------------------------------------------------------------- */

static cudaGraph_t capture_of_launch(cudaGraphExec_t exec, cudaStreamCaptureMode mode)
{
    cudaGraph_t graph = NULL;
    cudaGraphNode_t node;
    cudaGraphNodeType type;
    size_t n = 1;
    MUST(cudaStreamBeginCapture(second, mode));
    int result = ASK(cudaGraphLaunch(exec, second));
    ASK(cudaStreamEndCapture(second, &graph));
    if (result) return NULL;
    MUST(cudaGraphGetNodes(graph, &node, &n));
    MUST(cudaGraphNodeGetType(node, &type));
    printf("      %zu node of type %d (a child graph is %d)\n", n, (int)type, (int)cudaGraphNodeTypeGraph);
    return graph;
}

static void launched_into_capture(void)
{
    for (int way = 0; way < 6; way++) {
        note *a;
        cudaGraph_t graph = captured(&a, 1), outer;
        cudaGraphExec_t exec = instance(graph);
        MUST(cudaGraphDestroy(graph));
        if (way / 3) launch_and_wait(exec);
        printf("      capture mode %d, an instance that has %s before\n", way % 3, way / 3 ? "run" : "not run");
        outer = capture_of_launch(exec, (cudaStreamCaptureMode)(way % 3));
        MUST(cudaGraphExecDestroy(exec));
        if (!outer) continue;
        look("launched into a capture, graph and instance destroyed", a);
        MUST(cudaGraphDestroy(outer));
        look_last("the outer graph destroyed", a);
    }
}

/* ---- captures into graphs ---------------------------------------------------------------------------------------- */

static unsigned long long capture_id(cudaStream_t of)
{
    cudaStreamCaptureStatus status;
    unsigned long long id = 0;
    MUST(cudaStreamGetCaptureInfo(of, &status, &id, NULL, NULL, NULL, NULL));
    return id;
}

static void captured_to_graph(void)
{
    cudaGraph_t graph, ended = NULL;
    unsigned long long ids[2];
    note *notes[2];
    MUST(cudaGraphCreate(&graph, 0));
    for (int i = 0; i < 2; i++) {
        cudaGraphNode_t node;
        size_t n = i;
        if (i) MUST(cudaGraphGetNodes(graph, &node, &n));
        MUST(cudaStreamBeginCaptureToGraph(stream, graph, &node, NULL, n, cudaStreamCaptureModeGlobal));
        hold<<<1, 1, 0, stream>>>(go, i);
        ids[i] = capture_id(stream);
        printf("      the capture's graph is the one given: %d\n", graph_of(stream) == graph);
        notes[i] = note_on(graph_of(stream));
        MUST(cudaStreamEndCapture(stream, &ended));
        printf("      its end returns the one given: %d\n", ended == graph);
    }
    printf("      two captures into it have different ids: %d\n", ids[0] != ids[1]);
    look("first capture's", notes[0]);
    cudaGraphExec_t exec = instance(graph);
    MUST(cudaGraphDestroy(graph));
    look("first capture's, the graph instantiated and destroyed", notes[0]);
    look("second capture's", notes[1]);
    MUST(cudaGraphExecDestroy(exec));
    look_last("first capture's, the instance destroyed", notes[0]);
    look_last("second capture's", notes[1]);
}

static cudaGraph_t add_conditional(cudaGraph_t graph, const cudaGraphNode_t *after, size_t n, cudaGraphNode_t *node)
{
    cudaGraphConditionalHandle handle;
    cudaGraphNodeParams params = {};
    MUST(cudaGraphConditionalHandleCreate(&handle, graph, 1, cudaGraphCondAssignDefault));
    params.type = cudaGraphNodeTypeConditional;
    params.conditional.handle = handle;
    params.conditional.type = cudaGraphCondTypeIf;
    params.conditional.size = 1;
    MUST(cudaGraphAddNode(node, graph, after, NULL, n, &params));
    return params.conditional.phGraph_out[0];
}

static unsigned long long capture_to(cudaGraph_t graph)
{
    cudaGraph_t ended;
    MUST(cudaStreamBeginCaptureToGraph(stream, graph, NULL, NULL, 0, cudaStreamCaptureModeGlobal));
    hold<<<1, 1, 0, stream>>>(go, 1);
    unsigned long long id = capture_id(stream);
    MUST(cudaStreamEndCapture(stream, &ended));
    return id;
}

static void ids_of_captures(void)
{
    cudaGraph_t graph, body, clone;
    cudaGraphNode_t node;
    MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    hold<<<1, 1, 0, stream>>>(go, 1);
    printf("      an ordinary capture: %llu\n", capture_id(stream));
    MUST(cudaStreamEndCapture(stream, &graph));
    printf("      captured into its graph, twice: %llu", capture_to(graph));
    printf(" %llu\n", capture_to(graph));
    MUST(cudaGraphClone(&clone, graph));
    printf("      into its clone: %llu\n", capture_to(clone));
    cudaGraphExec_t exec = instance(graph);
    printf("      into it, once it was instantiated: %llu\n", capture_to(graph));
    MUST(cudaGraphExecDestroy(exec));
    MUST(cudaGraphDestroy(graph));
    MUST(cudaGraphCreate(&graph, 0));
    printf("      into a new graph, twice: %llu", capture_to(graph));
    printf(" %llu\n", capture_to(graph));
    body = add_conditional(graph, NULL, 0, &node);
    printf("      into a body in it, twice: %llu", capture_to(body));
    printf(" %llu\n", capture_to(body));
}

/* The nodes of a capture, asked for while it goes on: of another capture into the same graph, and what that costs. */
static void nodes_of_captures(void)
{
    cudaGraph_t graph, ended;
    cudaGraphNode_t node;
    const cudaGraphNode_t *after;
    cudaStreamCaptureStatus status;
    unsigned long long id;
    size_t n, length = 0;
    MUST(cudaGraphCreate(&graph, 0));
    capture_to(graph);
    n = 1;
    MUST(cudaGraphGetNodes(graph, &node, &n));
    MUST(cudaStreamBeginCaptureToGraph(stream, graph, &node, NULL, 1, cudaStreamCaptureModeGlobal));
    for (int i = 0; i < 1000; i++) hold<<<1, 1, 0, stream>>>(go, i);
    auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < 1000; i++) MUST(cudaStreamGetCaptureInfo(stream, &status, &id, &ended, &after, NULL, &n));
    double us = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
    printf("      cudaStreamGetCaptureInfo with nodes: %.0f ns\n", us);
    cudaGraphNode_t at = after[0];
    begin = std::chrono::steady_clock::now();
    for (n = 1; n == 1; length++) {
        cudaGraphNode_t next;
        if (cudaGraphNodeGetDependencies(at, &next, NULL, &n) || n != 1) break;
        at = next;
    }
    us = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
    printf("      cudaGraphNodeGetDependencies, %zu steps down to the node of the first capture: %d, %.0f ns each\n",
           length, at == node, us * 1000 / (double)length);
    ASK(cudaStreamEndCapture(stream, &ended));
}

static void failed_to_graph(void)
{
    cudaGraph_t graph, ended = NULL;
    cudaGraphExec_t exec;
    size_t n = 0;
    MUST(cudaGraphCreate(&graph, 0));
    MUST(cudaStreamBeginCaptureToGraph(stream, graph, NULL, NULL, 0, cudaStreamCaptureModeGlobal));
    hold<<<1, 1, 0, stream>>>(go, 1);
    note *a = note_on(graph_of(stream));
    ASK(cudaStreamSynchronize(stream));
    ASK(cudaStreamEndCapture(stream, &ended));
    look("captured into a graph, invalidated and ended", a);
    printf("      the graph that the end returns is %s\n",
           ended == graph ? "the one given" : ended ? "another" : "NULL");
    if (!ASK(cudaGraphGetNodes(graph, NULL, &n))) printf("      the graph has %zu nodes\n", n);
    if (!ASK(cudaGraphInstantiate(&exec, graph, 0))) MUST(cudaGraphExecDestroy(exec));
    ASK(cudaGraphDestroy(graph));
    look_last("the graph destroyed", a);
}

static void two_at_once_to_graph(void)
{
    cudaGraph_t graph, ended;
    MUST(cudaGraphCreate(&graph, 0));
    MUST(cudaStreamBeginCaptureToGraph(stream, graph, NULL, NULL, 0, cudaStreamCaptureModeRelaxed));
    if (!ASK(cudaStreamBeginCaptureToGraph(second, graph, NULL, NULL, 0, cudaStreamCaptureModeRelaxed))) {
        printf("      two captures into one graph at once: ids %s\n",
               capture_id(stream) == capture_id(second) ? "the same" : "different");
        ASK(cudaStreamEndCapture(second, &ended));
    }
    ASK(cudaStreamEndCapture(stream, &ended));
}

static void graph_destroyed_in_capture(void)
{
    cudaGraph_t graph, ended = NULL;
    MUST(cudaGraphCreate(&graph, 0));
    MUST(cudaStreamBeginCaptureToGraph(stream, graph, NULL, NULL, 0, cudaStreamCaptureModeRelaxed));
    hold<<<1, 1, 0, stream>>>(go, 1);
    note *a = note_on(graph_of(stream));
    ASK(cudaGraphDestroy(graph));
    look("the graph destroyed while it is captured into", a);
    ASK(cudaStreamEndCapture(stream, &ended));
    look_last("the capture ended", a);
}

/* ---- conditional nodes ------------------------------------------------------------------------------------------- */

/* A graph whose conditional body is captured into, with a note on the body. */
static cudaGraph_t conditional(note **n, int id, cudaGraphNode_t *node)
{
    cudaGraph_t graph, body, ended = NULL;
    MUST(cudaGraphCreate(&graph, 0));
    body = add_conditional(graph, NULL, 0, node);
    MUST(cudaStreamBeginCaptureToGraph(stream, body, NULL, NULL, 0, cudaStreamCaptureModeGlobal));
    hold<<<1, 1, 0, stream>>>(go, id);
    printf("      the capture's graph is the body: %d\n", graph_of(stream) == body);
    *n = note_on(graph_of(stream));
    MUST(cudaStreamEndCapture(stream, &ended));
    return graph;
}

static void conditional_body(void)
{
    note *a;
    cudaGraphNode_t node;
    cudaGraph_t graph = conditional(&a, 1, &node);
    look("captured into a body", a);
    cudaGraphExec_t exec = instance(graph);
    MUST(cudaGraphDestroy(graph));
    look("instantiated, the graph destroyed", a);
    launch_and_hold(exec);
    usleep(50000);
    printf("      the launch runs: cudaStreamQuery %d\n", (int)cudaStreamQuery(stream));
    auto begin = std::chrono::steady_clock::now();
    MUST(cudaGraphExecDestroy(exec));
    double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
    printf("      cudaGraphExecDestroy takes %.1f ms\n", ms);
    look("the instance destroyed while a launch runs", a);
    release();
    look_last("the launch has ended", a);
}

static void conditional_graph_destroyed(void)
{
    note *a;
    cudaGraphNode_t node;
    cudaGraph_t graph = conditional(&a, 1, &node);
    MUST(cudaGraphDestroy(graph));
    look_last("captured into a body, the graph destroyed", a);
}

static void conditional_cloned(void)
{
    note *a;
    cudaGraphNode_t node;
    cudaGraph_t clone, graph = conditional(&a, 1, &node);
    if (ASK(cudaGraphClone(&clone, graph))) return;
    MUST(cudaGraphDestroy(graph));
    look("captured into a body, cloned, the graph destroyed", a);
    cudaGraphExec_t exec = instance(clone);
    MUST(cudaGraphDestroy(clone));
    look("the clone instantiated and destroyed", a);
    MUST(cudaGraphExecDestroy(exec));
    look_last("the instance destroyed", a);
}

static void conditional_node_destroyed(void)
{
    note *a;
    cudaGraphNode_t node;
    cudaGraph_t graph = conditional(&a, 1, &node);
    if (ASK(cudaGraphDestroyNode(node))) return;
    look("the conditional node destroyed", a);
    MUST(cudaGraphDestroy(graph));
    look_last("the graph destroyed", a);
}

static void conditional_updated(void)
{
    note *a, *b;
    cudaGraphNode_t node;
    cudaGraph_t graph = conditional(&a, 1, &node);
    cudaGraphExec_t exec = instance(graph);
    MUST(cudaGraphDestroy(graph));
    graph = conditional(&b, 2, &node);
    update(exec, graph);
    MUST(cudaGraphDestroy(graph));
    look("old body's, updated by a graph with another body", a);
    look("new body's, the graph destroyed", b);
    MUST(cudaGraphExecDestroy(exec));
    look_last("old body's, the instance destroyed", a);
    look_last("new body's", b);
}

static void conditional_in_capture(void)
{
    cudaGraph_t outer, body, ended;
    cudaGraphNode_t node;
    const cudaGraphNode_t *after;
    cudaStreamCaptureStatus status;
    unsigned long long id;
    size_t n;
    MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    hold<<<1, 1, 0, stream>>>(go, 1);
    MUST(cudaStreamGetCaptureInfo(stream, &status, &id, &outer, &after, NULL, &n));
    note *a = note_on(outer);
    body = add_conditional(outer, after, n, &node);
    MUST(cudaStreamUpdateCaptureDependencies(stream, &node, NULL, 1, cudaStreamSetCaptureDependencies));
    MUST(cudaStreamBeginCaptureToGraph(second, body, NULL, NULL, 0, cudaStreamCaptureModeGlobal));
    hold<<<1, 1, 0, second>>>(go, 2);
    note *b = note_on(graph_of(second));
    printf("      the body's capture has an id of its own: %d\n", capture_id(second) != id);
    MUST(cudaStreamEndCapture(second, &ended));
    MUST(cudaStreamEndCapture(stream, &ended));
    cudaGraphExec_t exec = instance(ended);
    MUST(cudaGraphDestroy(ended));
    look("outer's, instantiated, the graph destroyed", a);
    look("body's", b);
    launch_and_wait(exec);
    MUST(cudaGraphExecDestroy(exec));
    look_last("outer's, the instance destroyed", a);
    look_last("body's", b);
}

/* ---- questions about a captured stream --------------------------------------------------------------------------- */

static int ask_capturing(CUstream of)
{
    CUstreamCaptureStatus status;
    return f_cuStreamIsCapturing(of, &status);
}

static int ask_id(CUstream of)
{
    unsigned long long id;
    return f_cuStreamGetId(of, &id);
}

static int ask_flags(CUstream of)
{
    unsigned flags;
    return f_cuStreamGetFlags(of, &flags);
}

static int ask_context(CUstream of)
{
    CUcontext context;
    return f_cuStreamGetCtx(of, &context);
}

static int ask_id_runtime(CUstream of)
{
    unsigned long long id;
    return cudaStreamGetId(of, &id);
}

static int ask_info(CUstream of)
{
    cudaStreamCaptureStatus status;
    unsigned long long id;
    return cudaStreamGetCaptureInfo(of, &status, &id, NULL, NULL, NULL, NULL);
}

static const struct question {
    const char *name;
    int (*ask)(CUstream);
} asked[] = {
    {"cuStreamIsCapturing", ask_capturing}, {"cuStreamGetId", ask_id},
    {"cuStreamGetFlags", ask_flags},        {"cuStreamGetCtx", ask_context},
    {"cudaStreamGetId", ask_id_runtime},    {"cudaStreamGetCaptureInfo", ask_info},
};

static void ask_in_mode(const question *q, CUstream of, bool relaxed, int *result)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    MUST(cudaSetDevice(0));
    if (relaxed) MUST(f_cuThreadExchangeStreamCaptureMode(&mode));
    *result = q->ask(of);
    if (relaxed) MUST(f_cuThreadExchangeStreamCaptureMode(&mode));
}

/* kind: of the stream that is asked about, see below. */
static void ask_once(const question *q, int kind, int mode, bool other_thread, bool relaxed)
{
    cudaStream_t made, of;
    cudaGraph_t graph = NULL;
    int result = -1;
    MUST(cudaStreamCreateWithFlags(&made, kind ? cudaStreamDefault : cudaStreamNonBlocking));
    of = kind == 2 ? cudaStreamPerThread : made;
    MUST(cudaStreamBeginCapture(of, (cudaStreamCaptureMode)mode));
    hold<<<1, 1, 0, of>>>(go, 0);
    CUstream about = kind == 3 ? CU_STREAM_LEGACY : of;
    if (other_thread) std::thread(ask_in_mode, q, about, relaxed, &result).join();
    else ask_in_mode(q, about, relaxed, &result);
    int end = cudaStreamEndCapture(of, &graph);
    (void)cudaGetLastError();
    if (graph) MUST(cudaGraphDestroy(graph));
    printf(" %3d/%-3d", result, end);
    MUST(cudaDeviceSynchronize());
    MUST(cudaStreamDestroy(made));
}

static void questions_in_capture(void)
{
    static const char *const kinds[] = {"non-blocking", "blocking", "per-thread",
                                        "legacy while a blocking one is captured"};
    printf("      in each field: what the call returned / what the end of the capture returned; by the capturing\n"
           "      thread, by it in relaxed mode, by another, likewise; global mode, then relaxed mode\n");
    for (int kind = 0; kind < 4; kind++) {
        printf("      %s\n", kinds[kind]);
        for (size_t i = 0; i < sizeof asked / sizeof asked[0]; i++) {
            printf("        %-26s", asked[i].name);
            for (int mode = 0; mode < 3; mode += 2)
                for (int way = 0; way < 4; way++) ask_once(&asked[i], kind, mode, way / 2, way % 2);
            printf("\n");
        }
    }
}

/* ---- green contexts ---------------------------------------------------------------------------------------------- */

static CUgreenCtx green;
static CUcontext primary;
static CUstream green_stream;

static void make_green(void)
{
    CUdevResource all, part, rest;
    CUdevResourceDesc description;
    unsigned n = 1;
    MUST(f_cuCtxGetCurrent(&primary));
    MUST(f_cuDeviceGetDevResource(0, &all, CU_DEV_RESOURCE_TYPE_SM));
    MUST(f_cuDevSmResourceSplitByCount(&part, &n, &all, &rest, 0, 16));
    MUST(f_cuDevResourceGenerateDesc(&description, &part, 1));
    MUST(f_cuGreenCtxCreate(&green, description, 0, CU_GREEN_CTX_DEFAULT_STREAM));
    MUST(f_cuGreenCtxStreamCreate(&green_stream, green, CU_STREAM_NON_BLOCKING, 0));
}

static void about_stream(const char *name, CUstream of)
{
    CUcontext context = NULL;
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    unsigned long long id = 0, context_id = 0;
    unsigned flags = 0;
    int got = f_cuStreamGetCtx(of, &context), id_got = f_cuStreamGetId(of, &id);
    int flags_got = f_cuStreamGetFlags(of, &flags);
    int capturing = f_cuStreamIsCapturing(of, &status);
    int context_got = context ? f_cuCtxGetId(context, &context_id) : -1;
    printf("      %s: cuStreamGetCtx %d %s (%p), its id %d %llu; cuStreamGetId %d %llu; flags %d %u; capturing %d %d\n",
           name, got, context == primary ? "the primary" : "another", (void *)context, context_got, context_id, id_got,
           id, flags_got, flags, capturing, (int)status);
}

static void green_identity(void)
{
    CUcontext context = NULL, current = NULL, popped;
    CUdevice device = -1;
    unsigned long long id = 0, primary_id = 0;
    make_green();
    MUST(f_cuCtxGetId(primary, &primary_id));
    printf("      primary %p, id %llu\n", (void *)primary, primary_id);
    about_stream("a stream of it, the primary current", green_stream);
    about_stream("a stream of the primary", stream);
    about_stream("legacy, the primary current", CU_STREAM_LEGACY);
    about_stream("per-thread, the primary current", CU_STREAM_PER_THREAD);
    ASK(f_cuCtxFromGreenCtx(&context, green));
    ASK(f_cuCtxGetId(context, &id));
    printf("      cuCtxFromGreenCtx: %s (%p), id %llu\n", context == primary ? "the primary" : "another",
           (void *)context, id);
    if (ASK(f_cuCtxPushCurrent(context))) return;
    ASK(f_cuCtxGetCurrent(&current));
    ASK(f_cuCtxGetDevice(&device));
    printf("      pushed: cuCtxGetCurrent %s (%p), device %d\n",
           current == context ? "the same" : current == primary ? "the primary" : "another", (void *)current, device);
    about_stream("a stream of it, it current", green_stream);
    about_stream("a stream of the primary", stream);
    about_stream("legacy, it current", CU_STREAM_LEGACY);
    about_stream("per-thread, it current", CU_STREAM_PER_THREAD);
    cudaStream_t made;
    if (!ASK(cudaStreamCreate(&made))) about_stream("made by cudaStreamCreate, it current", made);
    if (!ASK(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking))) about_stream("likewise, non-blocking", made);
    int runtime = -1;
    ASK(cudaGetDevice(&runtime));
    MUST(f_cuCtxPopCurrent(&popped));
    ASK(f_cuGreenCtxStreamCreate(&made, green, CU_STREAM_DEFAULT, 0));
}

/* Is work on `from` covered by an event, a wait, cuCtxSynchronize? `context`: where the event is made and recorded. */
static void event_covers(const char *name, CUstream from, CUstream to, CUcontext context)
{
    CUevent event;
    CUcontext popped;
    *go = 0;
    hold<<<1, 1, 0, from>>>(go, 0);
    MUST(cudaGetLastError());
    MUST(f_cuCtxPushCurrent(context));
    int made = f_cuEventCreate(&event, CU_EVENT_DISABLE_TIMING), recorded = f_cuEventRecord(event, from);
    int query = f_cuEventQuery(event), waited = f_cuStreamWaitEvent(to, event, 0);
    MUST(f_cuCtxPopCurrent(&popped));
    int queue = cudaStreamQuery(to);
    *(volatile int *)go = 1;
    MUST(cudaStreamSynchronize(from));
    MUST(cudaStreamSynchronize(to));
    printf("      %s: create %d, record %d, query while it runs %d, wait %d, the other stream then %d\n", name, made,
           recorded, query, waited, queue);
    (void)cudaGetLastError();
}

static void green_events(void)
{
    CUcontext context;
    make_green();
    MUST(f_cuCtxFromGreenCtx(&context, green));
    event_covers("green stream to primary's, event of the primary", green_stream, second, primary);
    event_covers("green stream to primary's, event of the green context", green_stream, second, context);
    event_covers("primary's stream to green, event of the primary", stream, green_stream, primary);
    event_covers("primary's stream to green, event of the green context", stream, green_stream, context);
    event_covers("legacy to green, event of the primary", CU_STREAM_LEGACY, green_stream, primary);
}

/* Does a wait in one context cover work that runs for 200 ms on a stream of the other? */
static void wait_covers(const char *name, CUcontext current, CUstream on)
{
    CUcontext popped;
    *go = 0;
    hold<<<1, 1, 0, on>>>(go, 0);
    MUST(cudaGetLastError());
    std::thread later([] {
        usleep(200000);
        *(volatile int *)go = 1;
    });
    MUST(f_cuCtxPushCurrent(current));
    int result = f_cuCtxSynchronize();
    int done = cudaStreamQuery(on);
    MUST(f_cuCtxPopCurrent(&popped));
    later.join();
    MUST(cudaStreamSynchronize(on));
    printf("      %s: cuCtxSynchronize %d, the work then %s\n", name, result, done ? "RUNS" : "is done");
    (void)cudaGetLastError();
}

static void green_waits(void)
{
    CUcontext context, popped;
    make_green();
    MUST(f_cuCtxFromGreenCtx(&context, green));
    MUST(f_cuCtxPushCurrent(context));
    cudaStream_t made;
    MUST(cudaStreamCreate(&made));
    MUST(f_cuCtxPopCurrent(&popped));
    wait_covers("green stream, the primary current", primary, green_stream);
    wait_covers("blocking stream made in the green context, the primary current", primary, made);
    wait_covers("primary's stream, the green context current", context, stream);
    wait_covers("green stream, the green context current", context, green_stream);
    *go = 0;
    hold<<<1, 1, 0, made>>>(go, 0);
    MUST(cudaGetLastError());
    CUevent event;
    MUST(f_cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    int recorded = f_cuEventRecord(event, CU_STREAM_LEGACY), query = f_cuEventQuery(event);
    *(volatile int *)go = 1;
    MUST(cudaDeviceSynchronize());
    printf("      an event on the primary's legacy, while work runs on a blocking stream of the green context: "
           "record %d, query %d\n", recorded, query);
    (void)cudaGetLastError();
}

/* By its documentation a green context can be current to one thread at a time. */
static void green_in_two_threads(void)
{
    CUcontext context, popped;
    make_green();
    MUST(f_cuCtxFromGreenCtx(&context, green));
    MUST(f_cuCtxPushCurrent(context));
    std::thread([context] {
        CUcontext gone, current = NULL;
        CUevent event;
        MUST(cudaSetDevice(0));
        if (!ASK(f_cuCtxPushCurrent(context))) {
            ASK(f_cuCtxGetCurrent(&current));
            printf("      pushed in another thread: it is current there: %d\n", current == context);
            ASK(f_cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
            ASK(f_cuEventRecord(event, green_stream));
            ASK(f_cuCtxPopCurrent(&gone));
        }
    }).join();
    CUcontext current = NULL;
    ASK(f_cuCtxGetCurrent(&current));
    printf("      still current in the first: %d\n", current == context);
    write_to<<<1, 1, 0, green_stream>>>(go);
    ASK(cudaGetLastError());
    ASK(cudaStreamSynchronize(green_stream));
    MUST(f_cuCtxPopCurrent(&popped));
    ASK(f_cuGreenCtxDestroy(green));
    printf("      after the green context was destroyed:\n");
    unsigned long long id = 0;
    ASK(f_cuCtxGetId(context, &id));
    ASK(f_cuStreamGetId(green_stream, &id));
}

/* Is work over once its green context is destroyed? The stream is destroyed before, as CUDA 13.0 demands, or not. */
static void green_destroyed_running(void)
{
    for (int stream_too = 1; stream_too >= 0; stream_too--) {
        CUcontext context;
        unsigned long long id = 0;
        int *done;
        cudaEvent_t event;
        make_green();
        MUST(f_cuCtxFromGreenCtx(&context, green));
        MUST(cudaHostAlloc(&done, sizeof *done, cudaHostAllocDefault));
        MUST(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
        *(volatile int *)done = 0;
        *go = 0;
        hold<<<1, 1, 0, green_stream>>>(go, 0);
        write_to<<<1, 1, 0, green_stream>>>(done);
        MUST(cudaGetLastError());
        MUST(cudaEventRecord(event, green_stream));
        if (stream_too) MUST(cudaStreamDestroy(green_stream));
        auto begin = std::chrono::steady_clock::now();
        ASK(f_cuGreenCtxDestroy(green));
        double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
        printf("      %s: it took %.1f ms, the work then %s\n", stream_too ? "stream destroyed before" : "stream not",
               ms, *(volatile int *)done ? "is done" : "is NOT done");
        ASK(f_cuCtxGetId(context, &id));
        ASK(cudaEventQuery(event));
        *(volatile int *)go = 1;
        ASK(cudaDeviceSynchronize());
        printf("      after cudaDeviceSynchronize the work %s\n", *(volatile int *)done ? "is done" : "never ran");
    }
}

static CUmemAllocationProp page_properties(bool rdma)
{
    CUmemAllocationProp properties;
    memset(&properties, 0, sizeof properties);
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.allocFlags.gpuDirectRDMACapable = rdma;
    return properties;
}

static const size_t PAGE = (size_t)2 << 20;

static void green_memory_and_graphs(void)
{
    CUdeviceptr addresses;
    CUmemGenericAllocationHandle page;
    CUmemAllocationProp properties = page_properties(false);
    CUmemAccessDesc access;
    note *a;
    make_green();
    memset(&access, 0, sizeof access);
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    MUST(f_cuMemAddressReserve(&addresses, PAGE, 0, 0, 0));
    MUST(f_cuMemCreate(&page, PAGE, &properties, 0));
    MUST(f_cuMemMap(addresses, PAGE, 0, page, 0));
    MUST(f_cuMemSetAccess(addresses, PAGE, &access, 1));
    write_to<<<1, 1, 0, green_stream>>>((int *)addresses);
    ASK(cudaStreamSynchronize(green_stream));
    cudaGraph_t graph;
    MUST(cudaStreamBeginCapture(green_stream, cudaStreamCaptureModeGlobal));
    write_to<<<1, 1, 0, green_stream>>>((int *)addresses);
    CUcontext context = NULL;
    int got = f_cuStreamGetCtx(green_stream, &context);
    printf("      captured: cuStreamGetCtx %d %s\n", got, context == primary ? "the primary" : "another");
    a = note_on(graph_of(green_stream));
    if (ASK(cudaStreamEndCapture(green_stream, &graph))) return;
    cudaGraphExec_t exec = instance(graph);
    MUST(cudaGraphDestroy(graph));
    ASK(cudaGraphLaunch(exec, green_stream));
    ASK(cudaGraphLaunch(exec, stream));
    MUST(cudaDeviceSynchronize());
    look("captured on a green stream, instantiated, the graph destroyed", a);
    MUST(cudaGraphExecDestroy(exec));
    look_last("the instance destroyed", a);
}

/* ---- pages for RDMA ---------------------------------------------------------------------------------------------- */

static double create_and_release(bool rdma, size_t bytes, int *result)
{
    CUmemAllocationProp properties = page_properties(rdma);
    CUmemGenericAllocationHandle page;
    auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < 20; i++) {
        *result = f_cuMemCreate(&page, bytes, &properties, 0);
        if (*result) return 0;
        MUST(f_cuMemRelease(page));
    }
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count() / 20;
}

static void rdma_pages(void)
{
    for (int attribute = 110; attribute < 2110; attribute += 1000) {
        int value = -1, result = f_cuDeviceGetAttribute(&value, (CUdevice_attribute)attribute, 0);
        printf("      cuDeviceGetAttribute %d: %d, value %d\n", attribute, result, value);
    }
    for (int rdma = 0; rdma < 2; rdma++) {
        CUmemAllocationProp properties = page_properties(rdma);
        size_t granularity = 0;
        int asked_for = f_cuMemGetAllocationGranularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
        printf("      %s: granularity %d, %zu", rdma ? "capable" : "plain", asked_for, granularity);
        for (size_t pages = 1; pages <= 256; pages *= 16) {
            int result;
            double us = create_and_release(rdma, pages * PAGE, &result);
            printf("; %zu MiB: %d, %.1f us", pages * 2, result, us);
        }
        printf("\n");
    }
}

/* ------------------------------------------------------------------------------------------------------------------ */

#define QUESTION(name) {#name, name}
static const struct {
    const char *name;
    void (*ask)(void);
} questions[] = {
    QUESTION(graph_alone),
    QUESTION(capture_invalidated),
    QUESTION(graph_instantiated),
    QUESTION(instance_destroyed_running),
    QUESTION(instantiated_for_device),
    QUESTION(freed_on_launch),
    QUESTION(retained_after),
    QUESTION(updated),
    QUESTION(updated_graph_kept),
    QUESTION(updated_running),
    QUESTION(updated_queued),
    QUESTION(updated_in_vain),
    QUESTION(updated_from_nothing),
    QUESTION(updated_with_child),
    QUESTION(child_set_in_instance),
    QUESTION(added_as_child),
    QUESTION(child_removed),
    QUESTION(child_moved),
    QUESTION(captured_into_child),
    QUESTION(cloned),
    QUESTION(node_destroyed),
    QUESTION(launched_into_capture),
    QUESTION(captured_to_graph),
    QUESTION(ids_of_captures),
    QUESTION(nodes_of_captures),
    QUESTION(failed_to_graph),
    QUESTION(two_at_once_to_graph),
    QUESTION(graph_destroyed_in_capture),
    QUESTION(conditional_body),
    QUESTION(conditional_graph_destroyed),
    QUESTION(conditional_cloned),
    QUESTION(conditional_node_destroyed),
    QUESTION(conditional_updated),
    QUESTION(conditional_in_capture),
    QUESTION(questions_in_capture),
    QUESTION(green_identity),
    QUESTION(green_events),
    QUESTION(green_waits),
    QUESTION(green_memory_and_graphs),
    QUESTION(green_in_two_threads),
    QUESTION(green_destroyed_running),
    QUESTION(rdma_pages),
};

/* In a process of its own: CUDA must not have been used before the fork. */
static void answer(void (*question)(void))
{
    alarm(20);
    FUNCTIONS(LOAD)
    MUST(cudaSetDevice(0));
    MUST(cudaHostAlloc(&go, sizeof *go, cudaHostAllocDefault));
    *go = 1;
    MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    MUST(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
    hold<<<1, 1, 0, second>>>(go, 0);
    MUST(cudaDeviceSynchronize());
    question();
    fflush(stdout);
    _exit(0);
}

/* An argument: the one question of that name. */
int main(int argc, char **argv)
{
    int unanswered = 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (size_t i = 0; i < sizeof questions / sizeof questions[0]; i++) {
        if (argc > 1 && strcmp(argv[1], questions[i].name)) continue;
        int status = 0;
        printf("\n%2zu  %s\n", i + 1, questions[i].name);
        fflush(stdout);
        pid_t child = fork();
        if (child < 0) return perror("fork"), 1;
        if (!child) answer(questions[i].ask);
        if (waitpid(child, &status, 0) != child) return perror("waitpid"), 1;
        if (WIFSIGNALED(status)) printf("      ended by signal %d\n", WTERMSIG(status));
        unanswered += status != 0;
    }
    printf("\n%d questions ended early\n", unanswered);
    return 0;
}
#endif
