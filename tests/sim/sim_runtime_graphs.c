/* sim_runtime_graphs.c - the runtime's functions for graphs that a program builds and changes itself. */

#include "sim_internal.h"

/* ---- graphs and nodes ------------------------------------------------------------------------------------------- */

static int add_copy(cudaGraphNode_t *out, cudaGraph_t g, const cudaGraphNode_t *after, size_t n, void *to,
                    const void *from, size_t bytes, int kind) {
    sm_work w;
    int error = sm_work_of_copy(&w, (uintptr_t)to, (uintptr_t)from, bytes, kind);
    return error ? error : sm_graph_add_work(out, g, after, n, &w);
}

static int add_set(cudaGraphNode_t *out, cudaGraph_t g, const cudaGraphNode_t *after, size_t n,
                   const struct cudaMemsetParams *p) {
    sm_work w;
    if (!p || !p->height) return E_VALUE;
    if (p->elementSize != 1 && p->elementSize != 2 && p->elementSize != 4) return E_VALUE;
    if ((uintptr_t)p->dst % p->elementSize) return E_VALUE;
    if (p->height != 1) return E_NOT_SUPPORTED;
    int error = sm_work_of_set(&w, (uintptr_t)p->dst, p->value, (int)p->elementSize, p->width * p->elementSize);
    return error ? error : sm_graph_add_work(out, g, after, n, &w);
}

static int add_host(cudaGraphNode_t *out, cudaGraph_t g, const cudaGraphNode_t *after, size_t n,
                    const struct cudaHostNodeParams *p) {
    if (!p || !p->fn) return E_VALUE;
    sm_work w = {.kind = WORK_ACCESS, .call = p->fn, .arg = p->userData};
    return sm_graph_add_work(out, g, after, n, &w);
}

static int node_type(cudaGraphNode_t node, enum cudaGraphNodeType *type) {
    int number = 0;
    int error = type ? sm_node_type(node, &number) : E_VALUE;
    if (!error) *type = (enum cudaGraphNodeType)number;
    return error;
}

cudaError_t CUDARTAPI cudaGraphCreate(cudaGraph_t *graph, unsigned int flags) {
    SM_RUNTIME(cudaGraphCreate, sm_graph_create(graph, flags));
}

cudaError_t CUDARTAPI cudaGraphAddEmptyNode(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *after,
                                            size_t n) {
    SM_RUNTIME(cudaGraphAddEmptyNode, sm_graph_add(node, graph, after, n, NODE_EMPTY));
}

cudaError_t CUDARTAPI cudaGraphAddChildGraphNode(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *after,
                                                 size_t n, cudaGraph_t child) {
    SM_RUNTIME(cudaGraphAddChildGraphNode, sm_graph_add_child(node, graph, after, n, child));
}

cudaError_t CUDARTAPI cudaGraphChildGraphNodeGetGraph(cudaGraphNode_t node, cudaGraph_t *graph) {
    SM_RUNTIME(cudaGraphChildGraphNodeGetGraph, sm_node_child(node, graph));
}

cudaError_t CUDARTAPI cudaGraphAddHostNode(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *after,
                                           size_t n, const struct cudaHostNodeParams *params) {
    SM_RUNTIME(cudaGraphAddHostNode, add_host(node, graph, after, n, params));
}

cudaError_t CUDARTAPI cudaGraphAddMemsetNode(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *after,
                                             size_t n, const struct cudaMemsetParams *params) {
    SM_RUNTIME(cudaGraphAddMemsetNode, add_set(node, graph, after, n, params));
}

cudaError_t CUDARTAPI cudaGraphAddMemcpyNode1D(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *after,
                                               size_t n, void *to, const void *from, size_t bytes,
                                               enum cudaMemcpyKind kind) {
    SM_RUNTIME(cudaGraphAddMemcpyNode1D, add_copy(node, graph, after, n, to, from, bytes, (int)kind));
}

cudaError_t CUDARTAPI cudaGraphAddEventRecordNode(cudaGraphNode_t *node, cudaGraph_t graph,
                                                  const cudaGraphNode_t *after, size_t n, cudaEvent_t event) {
    SM_RUNTIME(cudaGraphAddEventRecordNode, sm_graph_add_event(node, graph, after, n, event, false));
}

cudaError_t CUDARTAPI cudaGraphAddEventWaitNode(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *after,
                                                size_t n, cudaEvent_t event) {
    SM_RUNTIME(cudaGraphAddEventWaitNode, sm_graph_add_event(node, graph, after, n, event, true));
}

cudaError_t CUDARTAPI cudaGraphDestroyNode(cudaGraphNode_t node) {
    SM_RUNTIME(cudaGraphDestroyNode, sm_node_destroy(node));
}

cudaError_t CUDARTAPI cudaGraphNodeFindInClone(cudaGraphNode_t *node, cudaGraphNode_t original, cudaGraph_t clone) {
    SM_RUNTIME(cudaGraphNodeFindInClone, sm_node_in_clone(node, original, clone));
}

cudaError_t CUDARTAPI cudaGraphNodeGetType(cudaGraphNode_t node, enum cudaGraphNodeType *type) {
    SM_RUNTIME(cudaGraphNodeGetType, node_type(node, type));
}

cudaError_t CUDARTAPI cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *n) {
    SM_RUNTIME(cudaGraphGetNodes, sm_graph_nodes(graph, nodes, n, false));
}

cudaError_t CUDARTAPI cudaGraphGetRootNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *n) {
    SM_RUNTIME(cudaGraphGetRootNodes, sm_graph_nodes(graph, nodes, n, true));
}

cudaError_t CUDARTAPI cudaGraphReleaseUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned int count) {
    SM_RUNTIME(cudaGraphReleaseUserObject, sm_graph_release(graph, object, count));
}

/* ---- edges: since CUDA 13 with data, which the functions with PLAIN leave out ------------------------------------ */

#if CUDART_VERSION >= 13000
#define EDGES(how) , how cudaGraphEdgeData *edges
#define PLAIN      (void)edges
#define DATA       edges
#else
#define EDGES(how)
#define PLAIN      (void)0
#define DATA       NULL
#endif

cudaError_t CUDARTAPI cudaGraphGetEdges(cudaGraph_t graph, cudaGraphNode_t *from, cudaGraphNode_t *to EDGES(),
                                        size_t *n) {
    PLAIN;
    SM_RUNTIME(cudaGraphGetEdges, sm_graph_edges(graph, from, to, n));
}

cudaError_t CUDARTAPI cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t *nodes EDGES(), size_t *n) {
    SM_RUNTIME(cudaGraphNodeGetDependencies, sm_node_after(node, nodes, DATA, n));
}

cudaError_t CUDARTAPI cudaGraphNodeGetDependentNodes(cudaGraphNode_t node, cudaGraphNode_t *nodes EDGES(), size_t *n) {
    PLAIN;
    SM_RUNTIME(cudaGraphNodeGetDependentNodes, sm_node_before(node, nodes, n));
}

cudaError_t CUDARTAPI cudaGraphAddDependencies(cudaGraph_t graph, const cudaGraphNode_t *from,
                                               const cudaGraphNode_t *to EDGES(const), size_t n) {
    PLAIN;
    SM_RUNTIME(cudaGraphAddDependencies, sm_graph_connect(graph, from, to, n, true));
}

cudaError_t CUDARTAPI cudaGraphRemoveDependencies(cudaGraph_t graph, const cudaGraphNode_t *from,
                                                  const cudaGraphNode_t *to EDGES(const), size_t n) {
    PLAIN;
    SM_RUNTIME(cudaGraphRemoveDependencies, sm_graph_connect(graph, from, to, n, false));
}

cudaError_t CUDARTAPI cudaStreamUpdateCaptureDependencies(cudaStream_t stream, cudaGraphNode_t *nodes EDGES(const),
                                                          size_t n, unsigned int flags) {
    SM_RUNTIME(cudaStreamUpdateCaptureDependencies, sm_capture_dependencies(stream, nodes, DATA, n, flags));
}

#if CUDART_VERSION >= 12030
cudaError_t CUDARTAPI cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t graph,
                                                    const cudaGraphNode_t *after, const cudaGraphEdgeData *edges,
                                                    size_t n, enum cudaStreamCaptureMode mode) {
    (void)edges;
    SM_RUNTIME(cudaStreamBeginCaptureToGraph, sm_capture_begin_in(stream, graph, after, n, (int)mode));
}
#endif

/* ---- instances -------------------------------------------------------------------------------------------------- */

static int exec_update(cudaGraphExec_t x, cudaGraph_t graph, cudaGraphExecUpdateResultInfo *info) {
    int result = cudaGraphExecUpdateError;
    cudaGraphNode_t where = NULL;
    int error = sm_exec_update(x, graph, &result, &where);
    if (!info) return error;
    info->result = (enum cudaGraphExecUpdateResult)result;
    info->errorNode = where;
    info->errorFromNode = NULL;
    return error;
}

cudaError_t CUDARTAPI cudaGraphInstantiateWithFlags(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags) {
    (void)flags;
    SM_RUNTIME(cudaGraphInstantiateWithFlags, sm_graph_instantiate(out, graph));
}

cudaError_t CUDARTAPI cudaGraphUpload(cudaGraphExec_t exec, cudaStream_t stream) {
    SM_RUNTIME(cudaGraphUpload, sm_graph_upload(exec, stream));
}

cudaError_t CUDARTAPI cudaGraphExecUpdate(cudaGraphExec_t exec, cudaGraph_t graph,
                                          cudaGraphExecUpdateResultInfo *info) {
    SM_RUNTIME(cudaGraphExecUpdate, exec_update(exec, graph, info));
}

cudaError_t CUDARTAPI cudaGraphExecChildGraphNodeSetParams(cudaGraphExec_t exec, cudaGraphNode_t node,
                                                           cudaGraph_t child) {
    SM_RUNTIME(cudaGraphExecChildGraphNodeSetParams, sm_exec_child(exec, node, child));
}
