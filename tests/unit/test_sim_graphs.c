/* test_sim_graphs.c - graphs of the simulated device: nodes and edges, children, copies, instances and their updates,
   and how long user objects live in all of them. galloc takes no part. */

#include "sim.h"
#include "test.h"

#define PAGE ((size_t)2 << 20)
#define OK(call) EXPECT_EQ((call), 0)

/* ==== HELPERS ==================================================================================================== */

static void start_with(int pace, int devices, int panic)
{
    sim_options options = sim_defaults();
    options.pace = pace;
    options.devices = devices;
    options.panic = panic;
    OK(sim_start(&options));
    OK(cudaFree(NULL));
}

static void start(void) { start_with(SIM_PACE_RANDOM, 1, 1); }
static void start_still(void) { start_with(SIM_PACE_STILL, 1, 1); }

static cudaStream_t stream(void)
{
    cudaStream_t s = NULL;
    OK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    return s;
}

static cudaStream_t blocking_stream(void)
{
    cudaStream_t s = NULL;
    OK(cudaStreamCreate(&s));
    return s;
}

static void *memory(void)
{
    void *p = NULL;
    OK(cudaMalloc(&p, PAGE));
    return p;
}

static void put(cudaStream_t s, void *p, uint64_t tag)
{
    sim_access access = {p, PAGE, SIM_WRITE, tag};
    OK(sim_launch(s, &access, 1));
}

static void look(cudaStream_t s, void *p, uint64_t tag)
{
    sim_access access = {p, PAGE, SIM_READ | SIM_CHECK, tag};
    OK(sim_launch(s, &access, 1));
}

/* `later` waits for what `earlier` has been given; while `earlier` is captured this draws `later` in. */
static void order(cudaStream_t earlier, cudaStream_t later)
{
    cudaEvent_t e = NULL;
    OK(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
    OK(cudaEventRecord(e, earlier));
    OK(cudaStreamWaitEvent(later, e, 0));
    OK(cudaEventDestroy(e));
}

static void capture(cudaStream_t s) { OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal)); }

static cudaGraph_t captured(cudaStream_t s)
{
    cudaGraph_t graph = NULL;
    OK(cudaStreamEndCapture(s, &graph));
    return graph;
}

/* A graph of one node. */
static cudaGraph_t graph_that_puts(void *p, uint64_t tag)
{
    cudaStream_t s = stream();
    capture(s);
    put(s, p, tag);
    cudaGraph_t graph = captured(s);
    OK(cudaStreamDestroy(s));
    return graph;
}

static cudaGraph_t graph_that_looks(void *p, uint64_t tag)
{
    cudaStream_t s = stream();
    capture(s);
    look(s, p, tag);
    cudaGraph_t graph = captured(s);
    OK(cudaStreamDestroy(s));
    return graph;
}

static cudaGraphExec_t instance(cudaGraph_t graph)
{
    cudaGraphExec_t exec = NULL;
    OK(cudaGraphInstantiateWithFlags(&exec, graph, 0));
    return exec;
}

static cudaGraph_t new_graph(void)
{
    cudaGraph_t graph = NULL;
    OK(cudaGraphCreate(&graph, 0));
    return graph;
}

static cudaGraphNode_t only_node(cudaGraph_t graph)
{
    cudaGraphNode_t node = NULL;
    size_t n = 1, all = 0;
    OK(cudaGraphGetNodes(graph, NULL, &all));
    EXPECT_EQ(all, 1);
    OK(cudaGraphGetNodes(graph, &node, &n));
    return node;
}

static size_t count_nodes(cudaGraph_t graph)
{
    size_t n = 0;
    OK(cudaGraphGetNodes(graph, NULL, &n));
    return n;
}

static size_t count_roots(cudaGraph_t graph)
{
    size_t n = 0;
    OK(cudaGraphGetRootNodes(graph, NULL, &n));
    return n;
}

static int type_of(cudaGraphNode_t node)
{
    enum cudaGraphNodeType type = cudaGraphNodeTypeMemFree;
    OK(cudaGraphNodeGetType(node, &type));
    return (int)type;
}

#if CUDART_VERSION >= 13000
#define PLAIN_EDGES NULL,
#else
#define PLAIN_EDGES
#endif

static cudaError_t connect(cudaGraph_t graph, cudaGraphNode_t from, cudaGraphNode_t to)
{
    return cudaGraphAddDependencies(graph, &from, &to, PLAIN_EDGES 1);
}

static cudaError_t disconnect(cudaGraph_t graph, cudaGraphNode_t from, cudaGraphNode_t to)
{
    return cudaGraphRemoveDependencies(graph, &from, &to, PLAIN_EDGES 1);
}

static size_t count_dependencies(cudaGraphNode_t node)
{
    size_t n = 0;
    OK(cudaGraphNodeGetDependencies(node, NULL, PLAIN_EDGES &n));
    return n;
}

static size_t count_dependents(cudaGraphNode_t node)
{
    size_t n = 0;
    OK(cudaGraphNodeGetDependentNodes(node, NULL, PLAIN_EDGES &n));
    return n;
}

static cudaGraphNode_t child_after(cudaGraph_t graph, cudaGraphNode_t after, cudaGraph_t child)
{
    cudaGraphNode_t node = NULL;
    OK(cudaGraphAddChildGraphNode(&node, graph, after ? &after : NULL, after != NULL, child));
    return node;
}

/* The graph that the stream is captured into, and the nodes that its next one comes after. */
static cudaGraph_t captured_into(cudaStream_t s, const cudaGraphNode_t **after, size_t *n)
{
    cudaGraph_t graph = NULL;
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
#if CUDART_VERSION >= 13000
    OK(cudaStreamGetCaptureInfo(s, &status, NULL, &graph, after, NULL, n));
#else
    OK(cudaStreamGetCaptureInfo_v2(s, &status, NULL, &graph, after, n));
#endif
    EXPECT_EQ(status, cudaStreamCaptureStatusActive);
    return graph;
}

/* The next node of the captured stream runs a copy of the graph. */
static void add_child(cudaStream_t s, cudaGraph_t child)
{
    const cudaGraphNode_t *after = NULL;
    cudaGraphNode_t node = NULL;
    size_t n = 0;
    cudaGraph_t graph = captured_into(s, &after, &n);
    OK(cudaGraphAddChildGraphNode(&node, graph, after, n, child));
    OK(cudaStreamUpdateCaptureDependencies(s, &node, PLAIN_EDGES 1, cudaStreamSetCaptureDependencies));
}

static void raise_flag(void *flag) { ++*(int *)flag; }

/* The graph alone holds it. */
static void retain(cudaGraph_t graph, int *gone)
{
    cudaUserObject_t object = NULL;
    *gone = 0;
    OK(cudaUserObjectCreate(&object, gone, raise_flag, 1, cudaUserObjectNoDestructorSync));
    OK(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove));
}

static void finish(void)
{
    OK(cudaDeviceSynchronize());
    EXPECT_EQ(sim_findings(SIM_ANY), 0);
    for (long i = 0; sim_finding(i); i++) printf("    found: %s\n", sim_finding(i));
    sim_stop();
}

/* ==== ORDER ====================================================================================================== */

TEST(a_graph_runs_its_nodes_in_the_order_of_its_edges)
{
    for (int edge = 0; edge < 2; edge++) {
        start();
        void *p = memory();
        cudaGraph_t first = graph_that_puts(p, 1), second = graph_that_puts(p, 2), graph = new_graph();
        cudaGraphNode_t a = child_after(graph, NULL, first), b = child_after(graph, NULL, second);
        if (edge) OK(connect(graph, b, a));
        cudaStream_t s = stream();
        OK(cudaGraphLaunch(instance(graph), s));
        EXPECT_EQ(sim_findings(SIM_RACE), !edge);
        if (edge) look(s, p, 1);
        sim_run(-1);
        EXPECT_EQ(sim_findings(SIM_ANY), !edge);
        sim_stop();
    }
}

TEST(nodes_without_edges_come_after_what_the_launch_stream_had)
{
    start();
    void *p = memory(), *q = memory();
    cudaGraph_t graph = new_graph(), one = graph_that_puts(p, 1), two = graph_that_puts(q, 2);
    child_after(graph, NULL, one);
    child_after(graph, NULL, two);
    cudaStream_t s = stream(), t = stream();
    cudaGraphExec_t exec = instance(graph);
    for (int i = 0; i < 3; i++) {
        put(s, p, 7);
        put(s, q, 8);
        OK(cudaGraphLaunch(exec, s));
        look(s, p, 1);
        look(s, q, 2);
    }
    order(s, t);
    OK(cudaGraphLaunch(exec, t));
    look(t, q, 2);
    finish();
}

/* The first thing such a graph does is an edge, not work. */
TEST(a_graph_that_forks_at_once_comes_after_the_legacy_stream)
{
    for (int blocking = 0; blocking < 2; blocking++) {
        start();
        void *p = memory();
        cudaStream_t s = blocking ? blocking_stream() : stream(), t = stream();
        capture(s);
        order(s, t);
        put(t, p, 2);
        order(t, s);
        cudaGraphExec_t exec = instance(captured(s));
        put(cudaStreamLegacy, p, 1);
        OK(cudaGraphLaunch(exec, s));
        sim_run(-1);
        EXPECT_EQ(sim_findings(SIM_RACE), !blocking);
        put(cudaStreamLegacy, p, 3);
        EXPECT_EQ(sim_findings(SIM_ANY), blocking ? 0 : 2);
        sim_stop();
    }
}

TEST(a_graph_in_a_cycle_cannot_be_made_ready)
{
    start();
    cudaGraph_t graph = new_graph();
    cudaGraphNode_t a = NULL, b = NULL;
    cudaGraphExec_t exec = NULL;
    OK(cudaGraphAddEmptyNode(&a, graph, NULL, 0));
    OK(cudaGraphAddEmptyNode(&b, graph, &a, 1));
    OK(connect(graph, b, a));
    EXPECT_EQ(cudaGraphInstantiateWithFlags(&exec, graph, 0), cudaErrorInvalidValue);
    EXPECT(!exec);
    OK(disconnect(graph, b, a));
    OK(cudaGraphInstantiateWithFlags(&exec, graph, 0));
    (void)cudaGetLastError();
    finish();
}

TEST(a_graph_tells_its_nodes_and_edges)
{
    start();
    void *p = memory();
    cudaGraph_t graph = new_graph();
    cudaGraphNode_t a = NULL, b = NULL, c = NULL, from[4], to[4];
    struct cudaHostNodeParams host = {raise_flag, NULL};
    struct cudaMemsetParams set = {p, 0, 5, 1, PAGE, 1};
    OK(cudaGraphAddMemsetNode(&a, graph, NULL, 0, &set));
    OK(cudaGraphAddHostNode(&b, graph, &a, 1, &host));
    OK(cudaGraphAddMemcpyNode1D(&c, graph, &a, 1, p, (char *)p + 4096, 4096, cudaMemcpyDeviceToDevice));
    EXPECT_EQ(type_of(a), cudaGraphNodeTypeMemset);
    EXPECT_EQ(type_of(b), cudaGraphNodeTypeHost);
    EXPECT_EQ(type_of(c), cudaGraphNodeTypeMemcpy);
    EXPECT_EQ(count_nodes(graph), 3);
    EXPECT_EQ(count_roots(graph), 1);
    EXPECT_EQ(count_dependencies(c), 1);
    EXPECT_EQ(count_dependents(a), 2);
    size_t n = 4;
    OK(cudaGraphGetEdges(graph, from, to, PLAIN_EDGES &n));
    EXPECT_EQ(n, 2);
    EXPECT(from[0] == a && to[0] == b && from[1] == a && to[1] == c && !from[2] && !to[3]);
    EXPECT_EQ(connect(graph, a, b), cudaErrorInvalidValue);    /* is there */
    EXPECT_EQ(disconnect(graph, b, c), cudaErrorInvalidValue); /* is not */
    EXPECT_EQ(cudaGraphAddEmptyNode(&b, new_graph(), &a, 1), cudaErrorInvalidValue);
    EXPECT_EQ(count_nodes(graph), 3);
    (void)cudaGetLastError();
    finish();
}

TEST(a_node_that_is_destroyed_takes_its_edges_along)
{
    start();
    void *p = memory();
    cudaGraph_t graph = new_graph();
    cudaGraphNode_t a = child_after(graph, NULL, graph_that_puts(p, 1)), b = NULL;
    OK(cudaGraphAddEmptyNode(&b, graph, &a, 1));
    cudaGraphNode_t c = child_after(graph, b, graph_that_puts(p, 2));
    cudaGraphExec_t before = instance(graph);
    OK(cudaGraphDestroyNode(b));
    EXPECT_EQ(count_nodes(graph), 2);
    EXPECT_EQ(count_dependencies(c), 0);
    EXPECT_EQ(count_dependents(a), 0);
    cudaStream_t s = stream();
    OK(cudaGraphLaunch(before, s)); /* an instance is as the graph was */
    look(s, p, 2);
    EXPECT_EQ(sim_findings(SIM_ANY), 0);
    OK(cudaGraphLaunch(instance(graph), s));
    EXPECT_EQ(sim_findings(SIM_RACE), 1);
    sim_stop();
}

TEST(each_node_runs_on_the_device_where_it_was_captured)
{
    start_with(SIM_PACE_RANDOM, 2, 1);
    OK(cudaSetDevice(1));
    void *there = memory();
    cudaStream_t t = stream();
    OK(cudaSetDevice(0));
    void *here = memory();
    cudaStream_t s = stream();
    capture(s);
    put(s, here, 1);
    order(s, t);
    OK(cudaSetDevice(1));
    put(t, there, 2);
    order(t, s);
    cudaGraphExec_t exec = instance(captured(s));
    OK(cudaGraphLaunch(exec, t));
    look(t, there, 2);
    order(t, s);
    OK(cudaSetDevice(0));
    OK(cudaGraphLaunch(exec, s));
    look(s, here, 1);
    OK(cudaDeviceSynchronize());
    OK(cudaSetDevice(1));
    finish();
}

/* ==== CHILDREN AND COPIES ======================================================================================== */

TEST(a_child_runs_where_its_node_stands)
{
    for (int together = 0; together < 2; together++) {
        start();
        void *p = memory();
        cudaStream_t s = stream(), t = stream();
        cudaGraph_t graph = graph_that_puts(p, 1), child = graph_that_puts(p, 2), last = graph_that_looks(p, 2);
        child_after(graph, child_after(graph, only_node(graph), child), last);
        EXPECT_EQ(count_nodes(graph), 3);
        EXPECT_EQ(count_roots(graph), 1);
        OK(cudaGraphDestroy(child)); /* the node has a copy */
        cudaGraphExec_t exec = instance(graph);
        OK(cudaGraphDestroy(graph));
        look(s, p, 0); /* nothing has run */
        EXPECT_EQ(sim_findings(SIM_STALE), 1);
        sim_findings_clear();
        OK(cudaGraphLaunch(exec, s));
        OK(cudaGraphLaunch(exec, s));
        look(together ? s : t, p, 2);
        EXPECT_EQ(sim_findings(SIM_RACE), !together);
        sim_stop();
    }
}

TEST(the_nodes_of_a_child_lie_between_what_is_before_and_after_it)
{
    start();
    void *p = memory(), *q = memory();
    cudaStream_t s = stream(), t = stream();
    capture(s);
    order(s, t);
    put(s, p, 1);
    put(t, q, 2);
    order(t, s);
    cudaGraph_t two = captured(s);
    capture(s);
    put(s, p, 5);
    put(s, q, 6);
    add_child(s, two);
    look(s, p, 1);
    look(s, q, 2);
    add_child(s, two);
    cudaGraphExec_t exec = instance(captured(s));
    for (int i = 0; i < 2; i++) {
        OK(cudaGraphLaunch(exec, s));
        put(s, q, 9);
    }
    finish();
}

TEST(children_on_both_sides_of_a_fork_are_unordered)
{
    start();
    void *p = memory();
    cudaStream_t s = stream(), t = stream();
    cudaGraph_t inner = graph_that_puts(p, 2);
    capture(s);
    order(s, t);
    add_child(s, inner);
    add_child(t, inner);
    order(t, s);
    OK(cudaGraphLaunch(instance(captured(s)), s));
    EXPECT_EQ(sim_findings(SIM_RACE), 1);
    sim_stop();
}

TEST(a_child_is_a_copy_that_the_program_can_look_at_and_change)
{
    start();
    void *p = memory(), *q = memory();
    cudaGraph_t child = graph_that_puts(p, 1), graph = new_graph(), inside = NULL;
    cudaGraphNode_t node = child_after(graph, NULL, child), added = NULL;
    EXPECT_EQ(type_of(node), cudaGraphNodeTypeGraph);
    OK(cudaGraphDestroyNode(only_node(child)));
    OK(cudaGraphDestroy(child));
    OK(cudaGraphChildGraphNodeGetGraph(node, &inside));
    EXPECT(inside != child);
    EXPECT_EQ(type_of(only_node(inside)), cudaGraphNodeTypeKernel);
    struct cudaMemsetParams set = {q, 0, 7, 1, PAGE, 1};
    OK(cudaGraphAddMemsetNode(&added, inside, NULL, 0, &set));
    EXPECT_EQ(cudaGraphDestroy(inside), cudaErrorInvalidValue); /* its node's */
    (void)cudaGetLastError();
    cudaStream_t s = stream();
    OK(cudaGraphLaunch(instance(graph), s));
    look(s, p, 1);
    look(s, q, 0x0707070707070707u);
    finish();
}

TEST(a_graph_can_be_its_own_child)
{
    start();
    void *p = memory();
    cudaGraph_t graph = graph_that_puts(p, 1), inside = NULL;
    cudaGraphNode_t node = child_after(graph, only_node(graph), graph);
    EXPECT_EQ(count_nodes(graph), 2);
    OK(cudaGraphChildGraphNodeGetGraph(node, &inside));
    EXPECT_EQ(count_nodes(inside), 1);
    cudaStream_t s = stream();
    OK(cudaGraphLaunch(instance(graph), s));
    look(s, p, 1);
    finish();
}

TEST(a_clone_knows_the_nodes_of_its_original)
{
    start();
    void *p = memory();
    cudaGraph_t graph = graph_that_puts(p, 1), clone = NULL, inside = NULL;
    cudaGraphNode_t node = only_node(graph), in_clone = NULL;
    cudaGraphNode_t child = child_after(graph, node, graph_that_puts(p, 3)), child_in_clone = NULL;
    OK(cudaGraphClone(&clone, graph));
    OK(cudaGraphNodeFindInClone(&in_clone, node, clone));
    OK(cudaGraphNodeFindInClone(&child_in_clone, child, clone));
    EXPECT(in_clone != node && child_in_clone != child);
    EXPECT_EQ(type_of(child_in_clone), cudaGraphNodeTypeGraph);
    EXPECT_EQ(count_dependents(in_clone), 1);
    EXPECT_EQ(cudaGraphNodeFindInClone(&in_clone, in_clone, graph), cudaErrorInvalidValue);
    (void)cudaGetLastError();
    OK(cudaGraphDestroyNode(child_in_clone)); /* each has its own */
    EXPECT_EQ(count_nodes(graph), 2);
    EXPECT_EQ(count_nodes(clone), 1);
    OK(cudaGraphChildGraphNodeGetGraph(child, &inside));
    OK(cudaGraphDestroy(graph));
    cudaStream_t s = stream();
    OK(cudaGraphLaunch(instance(clone), s));
    look(s, p, 1);
    finish();
}

TEST(a_graph_that_allocates_is_neither_child_nor_clone)
{
    start();
    void *p = NULL;
    cudaStream_t s = stream();
    capture(s);
    OK(cudaMallocAsync(&p, PAGE, s));
    put(s, p, 1);
    OK(cudaFreeAsync(p, s));
    cudaGraph_t graph = captured(s), other = new_graph(), clone = NULL;
    cudaGraphExec_t exec = instance(graph);
    cudaGraphNode_t node = NULL;
    EXPECT_EQ(cudaGraphAddChildGraphNode(&node, other, NULL, 0, graph), cudaErrorNotSupported);
    EXPECT_EQ(cudaGraphClone(&clone, graph), cudaErrorNotSupported);
    EXPECT_EQ(cudaGraphDestroyNode(only_node(graph)), cudaErrorNotSupported);
    EXPECT_EQ(count_nodes(other), 0);
    OK(cudaGraphDestroy(graph));
    OK(cudaGraphLaunch(exec, s)); /* its memory is still there */
    OK(cudaStreamSynchronize(s));
    EXPECT(sim_physical(0) > 0);
    OK(cudaGraphExecDestroy(exec));
    EXPECT_EQ(sim_physical(0), 0);
    (void)cudaGetLastError();
    finish();
}

/* ==== CAPTURES INTO GRAPHS ======================================================================================= */

TEST(a_capture_goes_on_with_a_graph_where_it_is_told_to)
{
    for (int after = 0; after < 2; after++) {
        start();
        void *p = memory();
        cudaGraph_t graph = graph_that_puts(p, 1), same = NULL;
        cudaGraphNode_t first = only_node(graph);
        cudaStream_t s = stream();
        OK(cudaStreamBeginCaptureToGraph(s, graph, after ? &first : NULL, NULL, (size_t)after,
                                         cudaStreamCaptureModeGlobal));
        put(s, p, 2);
        OK(cudaStreamEndCapture(s, &same));
        EXPECT(same == graph);
        EXPECT_EQ(count_nodes(graph), 2);
        EXPECT_EQ(count_roots(graph), after ? 1 : 2);
        OK(cudaGraphLaunch(instance(graph), s));
        EXPECT_EQ(sim_findings(SIM_RACE), !after);
        sim_stop();
    }
}

/* Invalidated by a query, or ended while a stream has not joined. */
TEST(a_capture_into_a_graph_that_is_lost_destroys_the_graph)
{
    for (int unjoined = 0; unjoined < 2; unjoined++) {
        start_with(SIM_PACE_RANDOM, 1, 0);
        void *p = memory();
        cudaGraph_t graph = graph_that_puts(p, 1), same = graph;
        cudaStream_t s = stream(), t = stream();
        int gone, objects = 0;
        retain(graph, &gone);
        OK(cudaStreamBeginCaptureToGraph(s, graph, NULL, NULL, 0, cudaStreamCaptureModeGlobal));
        if (unjoined) {
            order(s, t);
            put(t, p, 2);
        } else EXPECT_EQ(cudaStreamQuery(s), cudaErrorStreamCaptureUnsupported);
        EXPECT_EQ(gone, 0);
        EXPECT_EQ(cudaStreamEndCapture(s, &same),
                  unjoined ? cudaErrorStreamCaptureUnjoined : cudaErrorStreamCaptureInvalidated);
        EXPECT(!same);
        EXPECT_EQ(gone, 1);
        EXPECT_EQ(sim_findings(SIM_ANY), sim_findings(SIM_CAPTURE_BROKEN));
        cudaUserObject_t object = NULL;
        cudaGraphExec_t exec = NULL;
        size_t n = 0;
        EXPECT_EQ(cudaGraphGetNodes(graph, NULL, &n), cudaErrorInvalidValue);
        EXPECT_EQ(cudaGraphInstantiateWithFlags(&exec, graph, 0), cudaErrorInvalidValue);
        OK(cudaUserObjectCreate(&object, &objects, raise_flag, 1, cudaUserObjectNoDestructorSync));
        EXPECT_EQ(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove), cudaErrorInvalidValue);
        EXPECT_EQ(cudaGraphDestroy(graph), cudaErrorInvalidValue);
        EXPECT_EQ(sim_findings(SIM_DEAD_HANDLE), 4);
        OK(cudaUserObjectRelease(object, 1));
        sim_stop();
    }
}

/* Its node owns it, and goes on with what was there before. */
TEST(a_capture_into_a_child_that_is_lost_leaves_the_child_to_its_node)
{
    start();
    void *p = memory();
    cudaGraph_t graph = new_graph(), child = NULL, none = NULL;
    cudaGraphNode_t node = child_after(graph, NULL, graph_that_puts(p, 1));
    cudaStream_t s = stream();
    OK(cudaGraphChildGraphNodeGetGraph(node, &child));
    OK(cudaStreamBeginCaptureToGraph(s, child, NULL, NULL, 0, cudaStreamCaptureModeGlobal));
    EXPECT_EQ(cudaStreamQuery(s), cudaErrorStreamCaptureUnsupported);
    EXPECT_EQ(cudaStreamEndCapture(s, &none), cudaErrorStreamCaptureInvalidated);
    EXPECT(!none);
    EXPECT_EQ(count_nodes(child), 1);
    OK(cudaGraphLaunch(instance(graph), s));
    look(s, p, 1);
    EXPECT_EQ(sim_findings(SIM_ANY), sim_findings(SIM_CAPTURE_BROKEN));
    sim_stop();
}

TEST(a_graph_is_captured_into_by_one_capture_at_a_time)
{
    for (int given = 0; given < 2; given++) { /* the program's graph, or the capture's own */
        start();
        void *p = memory();
        cudaStream_t s = stream(), t = stream();
        cudaGraph_t graph = NULL, same = NULL;
        if (given) OK(cudaStreamBeginCaptureToGraph(s, new_graph(), NULL, NULL, 0, cudaStreamCaptureModeRelaxed));
        else OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
        graph = captured_into(s, NULL, NULL);
        EXPECT_EQ(cudaStreamBeginCaptureToGraph(t, graph, NULL, NULL, 0, cudaStreamCaptureModeRelaxed),
                  cudaErrorIllegalState);
        put(s, p, 1);
        OK(cudaStreamEndCapture(s, &same));
        EXPECT(same == graph);
        OK(cudaStreamBeginCaptureToGraph(t, graph, NULL, NULL, 0, cudaStreamCaptureModeRelaxed));
        OK(cudaStreamEndCapture(t, &same));
        EXPECT_EQ(count_nodes(graph), 1);
        (void)cudaGetLastError();
        finish();
    }
}

TEST(a_graph_cannot_be_destroyed_while_it_is_captured_into)
{
    for (int inside = 0; inside < 2; inside++) { /* it, or a child of it */
        start();
        void *p = memory();
        cudaStream_t s = stream();
        cudaGraph_t graph = new_graph(), into = graph, same = NULL;
        cudaGraphNode_t node = child_after(graph, NULL, graph_that_puts(p, 1));
        int gone;
        retain(graph, &gone);
        if (inside) OK(cudaGraphChildGraphNodeGetGraph(node, &into));
        OK(cudaStreamBeginCaptureToGraph(s, into, NULL, NULL, 0, cudaStreamCaptureModeRelaxed));
        EXPECT_EQ(cudaGraphDestroy(graph), cudaErrorIllegalState);
        if (inside) EXPECT_EQ(cudaGraphDestroyNode(node), cudaErrorIllegalState);
        EXPECT_EQ(gone, 0);
        OK(cudaStreamEndCapture(s, &same));
        EXPECT(same == into);
        OK(cudaGraphDestroy(graph));
        EXPECT_EQ(gone, 1);
        (void)cudaGetLastError();
        finish();
    }
}

TEST(a_launch_on_a_captured_stream_is_refused_and_loses_the_capture)
{
    for (int mode = 0; mode < 3; mode++) {
        for (int ran = 0; ran < 2; ran++) {
            start();
            void *p = memory();
            cudaStream_t s = stream();
            cudaGraph_t graph = NULL;
            cudaGraphExec_t exec = instance(graph_that_puts(p, 1));
            if (ran) OK(cudaGraphLaunch(exec, s));
            OK(cudaStreamBeginCapture(s, (enum cudaStreamCaptureMode)mode));
            EXPECT_EQ(cudaGraphLaunch(exec, s), cudaErrorStreamCaptureUnsupported);
            EXPECT_EQ(sim_findings(SIM_CAPTURE_BROKEN), 1);
            EXPECT_EQ(cudaStreamEndCapture(s, &graph), cudaErrorStreamCaptureInvalidated);
            EXPECT(!graph);
            OK(cudaGraphLaunch(exec, s));
            look(s, p, 1);
            OK(cudaStreamSynchronize(s));
            EXPECT_EQ(sim_findings(SIM_ANY), 1);
            sim_stop();
        }
    }
}

TEST(a_program_may_say_what_a_captured_stream_depends_on)
{
    for (int set = 0; set < 2; set++) {
        start();
        void *p = memory(), *q = memory();
        cudaStream_t s = stream();
        cudaGraphNode_t node = NULL;
        cudaGraph_t graph = NULL;
        capture(s);
        put(s, p, 1);
        graph = captured_into(s, NULL, NULL);
        OK(cudaGraphAddEmptyNode(&node, graph, NULL, 0));
        unsigned how = set ? cudaStreamSetCaptureDependencies : cudaStreamAddCaptureDependencies;
        OK(cudaStreamUpdateCaptureDependencies(s, &node, PLAIN_EDGES 1, how));
        put(s, set ? q : p, 2);
        graph = captured(s);
        EXPECT_EQ(count_nodes(graph), 3);
        EXPECT_EQ(count_dependents(node), 1);
        OK(cudaGraphLaunch(instance(graph), s));
        look(s, set ? q : p, 2);
        finish();
    }
}

TEST(work_that_nothing_joins_cannot_end_a_capture)
{
    start();
    void *p = memory();
    cudaStream_t s = stream(), t = stream();
    cudaGraph_t graph = NULL;
    cudaGraph_t inner = graph_that_puts(p, 1);
    capture(s);
    order(s, t);
    add_child(t, inner);
    EXPECT_EQ(cudaStreamEndCapture(s, &graph), cudaErrorStreamCaptureUnjoined);
    EXPECT(!graph);
    (void)cudaGetLastError();
    sim_stop();
}

/* ==== UPDATES ==================================================================================================== */

static int update(cudaGraphExec_t exec, cudaGraph_t graph, cudaError_t expected)
{
    cudaGraphExecUpdateResultInfo info;
    memset(&info, 0, sizeof info);
    EXPECT_EQ(cudaGraphExecUpdate(exec, graph, &info), expected);
    if (expected) (void)cudaGetLastError();
    return (int)info.result;
}

TEST(an_instance_is_updated_from_a_graph_of_the_same_form)
{
    start();
    void *p = memory(), *q = memory();
    cudaGraph_t graph = graph_that_puts(p, 1), like = graph_that_puts(q, 2);
    cudaGraphExec_t exec = instance(graph);
    cudaStream_t s = stream();
    OK(cudaGraphLaunch(exec, s));
    EXPECT_EQ(update(exec, like, cudaSuccess), cudaGraphExecUpdateSuccess);
    OK(cudaGraphDestroy(like));
    put(s, p, 7);
    OK(cudaGraphLaunch(exec, s));
    look(s, p, 7);
    look(s, q, 2);
    finish();
}

TEST(an_update_of_another_form_changes_nothing)
{
    start();
    void *p = memory();
    cudaStream_t s = stream();
    cudaGraph_t graph = graph_that_puts(p, 1), longer = graph_that_puts(p, 2), other = new_graph();
    cudaGraph_t chain = new_graph(), apart = new_graph();
    cudaGraphNode_t node = NULL, next = NULL;
    cudaGraphExec_t exec = instance(graph);
    int gone;
    retain(longer, &gone);
    OK(cudaGraphAddEmptyNode(&node, longer, NULL, 0));
    EXPECT_EQ(update(exec, longer, cudaErrorGraphExecUpdateFailure), cudaGraphExecUpdateErrorTopologyChanged);
    OK(cudaGraphDestroy(longer));
    EXPECT_EQ(gone, 1);
    OK(cudaGraphAddEmptyNode(&node, other, NULL, 0));
    EXPECT_EQ(update(exec, other, cudaErrorGraphExecUpdateFailure), cudaGraphExecUpdateErrorNodeTypeChanged);
    OK(cudaGraphAddEmptyNode(&node, chain, NULL, 0));
    OK(cudaGraphAddEmptyNode(&next, chain, &node, 1));
    OK(cudaGraphAddEmptyNode(&node, apart, NULL, 0));
    OK(cudaGraphAddEmptyNode(&next, apart, NULL, 0));
    EXPECT_EQ(update(instance(chain), apart, cudaErrorGraphExecUpdateFailure), cudaGraphExecUpdateErrorTopologyChanged);
    OK(cudaGraphLaunch(exec, s));
    look(s, p, 1);
    finish();
}

TEST(a_child_of_an_instance_can_be_changed)
{
    start_still();
    void *p = memory();
    cudaStream_t s = stream();
    cudaGraph_t graph = new_graph(), one = graph_that_puts(p, 1), two = graph_that_puts(p, 2), other = new_graph();
    cudaGraphNode_t node = child_after(graph, NULL, one);
    cudaGraphExec_t exec = instance(graph);
    int first, second;
    retain(two, &second);
    OK(cudaGraphExecChildGraphNodeSetParams(exec, node, two));
    EXPECT_EQ(cudaGraphExecChildGraphNodeSetParams(exec, node, other), cudaErrorInvalidValue);
    (void)cudaGetLastError();
    OK(cudaGraphLaunch(exec, s));
    look(s, p, 2);
    retain(one, &first);
    OK(cudaGraphExecChildGraphNodeSetParams(exec, node, one));
    OK(cudaGraphDestroy(one));
    OK(cudaGraphDestroy(two));
    OK(cudaStreamSynchronize(s));
    EXPECT_EQ(second, 1);
    OK(cudaGraphLaunch(exec, s));
    look(s, p, 1);
    OK(cudaGraphExecDestroy(exec));
    EXPECT_EQ(first, 0);
    OK(cudaStreamSynchronize(s));
    EXPECT_EQ(first, 1);
    finish();
}

/* ==== USER OBJECTS =============================================================================================== */

TEST(a_user_object_stays_while_a_launch_with_its_graph_as_a_child_can_run)
{
    start_still();
    void *p = memory();
    cudaStream_t s = stream();
    cudaGraph_t graph = graph_that_puts(p, 1);
    int gone;
    retain(graph, &gone);
    capture(s);
    add_child(s, graph);
    cudaGraph_t outer = captured(s);
    OK(cudaGraphDestroy(graph));
    EXPECT_EQ(gone, 0);
    cudaGraphExec_t exec = instance(outer);
    OK(cudaGraphDestroy(outer));
    EXPECT_EQ(gone, 0);
    OK(cudaGraphLaunch(exec, s));
    OK(cudaGraphExecDestroy(exec));
    EXPECT_EQ(gone, 0);
    OK(cudaStreamSynchronize(s));
    EXPECT_EQ(gone, 1);
    finish();
}

TEST(a_user_object_goes_with_a_capture_that_held_it_as_a_child)
{
    start();
    void *p = memory();
    cudaStream_t s = stream();
    cudaGraph_t graph = graph_that_puts(p, 1), none = NULL;
    int gone;
    retain(graph, &gone);
    capture(s);
    add_child(s, graph);
    OK(cudaGraphDestroy(graph));
    EXPECT_EQ(gone, 0);
    EXPECT_EQ(cudaStreamQuery(s), cudaErrorStreamCaptureUnsupported);
    EXPECT_EQ(cudaStreamEndCapture(s, &none), cudaErrorStreamCaptureInvalidated);
    EXPECT_EQ(gone, 1);
    sim_stop();
}

TEST(a_user_object_stays_with_children_clones_and_children_of_clones)
{
    start();
    void *p = memory();
    cudaGraph_t graph = graph_that_puts(p, 1), parent = new_graph(), clone = NULL;
    int gone;
    retain(graph, &gone);
    cudaGraphNode_t node = child_after(parent, NULL, graph);
    OK(cudaGraphClone(&clone, parent));
    OK(cudaGraphDestroy(graph));
    OK(cudaGraphDestroyNode(node));
    EXPECT_EQ(gone, 0);
    OK(cudaGraphDestroy(parent));
    cudaGraphExec_t exec = instance(clone);
    OK(cudaGraphDestroy(clone));
    EXPECT_EQ(gone, 0);
    OK(cudaGraphExecDestroy(exec));
    EXPECT_EQ(gone, 1);
    finish();
}

TEST(a_user_object_goes_with_the_child_node_that_alone_held_it)
{
    start();
    void *p = memory();
    cudaGraph_t graph = graph_that_puts(p, 1), parent = new_graph();
    int gone;
    retain(graph, &gone);
    cudaGraphNode_t node = child_after(parent, NULL, graph);
    OK(cudaGraphDestroy(graph));
    EXPECT_EQ(gone, 0);
    OK(cudaGraphDestroyNode(node));
    EXPECT_EQ(gone, 1);
    finish();
}

TEST(an_instance_holds_what_its_graph_held_when_it_was_made)
{
    start();
    void *p = memory();
    cudaGraph_t graph = graph_that_puts(p, 1);
    int early, late;
    retain(graph, &early);
    cudaGraphExec_t exec = instance(graph);
    retain(graph, &late);
    OK(cudaGraphDestroy(graph));
    EXPECT_EQ(early, 0);
    EXPECT_EQ(late, 1);
    OK(cudaGraphExecDestroy(exec));
    EXPECT_EQ(early, 1);
    finish();
}

TEST(an_update_takes_the_user_objects_of_the_new_graph)
{
    start_still();
    void *p = memory();
    cudaStream_t s = stream();
    cudaGraph_t old = graph_that_puts(p, 1), new = graph_that_puts(p, 2);
    int of_old, of_new;
    retain(old, &of_old);
    retain(new, &of_new);
    cudaGraphExec_t exec = instance(old);
    OK(cudaGraphDestroy(old));
    OK(cudaGraphLaunch(exec, s));
    EXPECT_EQ(update(exec, new, cudaSuccess), cudaGraphExecUpdateSuccess);
    OK(cudaGraphDestroy(new));
    EXPECT_EQ(of_old, 0); /* a launch still runs */
    OK(cudaStreamSynchronize(s));
    EXPECT_EQ(of_old, 1);
    EXPECT_EQ(of_new, 0);
    OK(cudaGraphExecDestroy(exec));
    EXPECT_EQ(of_new, 1);
    finish();
}

TEST(a_graph_gives_back_references_by_number)
{
    start();
    cudaGraph_t graph = new_graph();
    cudaUserObject_t object = NULL;
    int gone = 0;
    OK(cudaUserObjectCreate(&object, &gone, raise_flag, 1, cudaUserObjectNoDestructorSync));
    OK(cudaGraphRetainUserObject(graph, object, 2, 0));
    OK(cudaUserObjectRelease(object, 1));
    EXPECT_EQ(cudaGraphReleaseUserObject(graph, object, 3), cudaErrorInvalidValue);
    OK(cudaGraphReleaseUserObject(graph, object, 1));
    EXPECT_EQ(gone, 0);
    OK(cudaGraphReleaseUserObject(graph, object, 1));
    EXPECT_EQ(gone, 1);
    OK(cudaGraphDestroy(graph));
    (void)cudaGetLastError();
    finish();
}

/* ==== MISTAKES =================================================================================================== */

TEST(what_was_destroyed_is_told_of)
{
    start_with(SIM_PACE_RANDOM, 1, 0);
    void *p = memory();
    cudaStream_t s = stream();
    cudaGraph_t graph = graph_that_puts(p, 1), clone = NULL;
    cudaGraphNode_t node = only_node(graph);
    cudaGraphExec_t exec = instance(graph), again = NULL;
    OK(cudaGraphDestroyNode(node));
    EXPECT_EQ(cudaGraphDestroyNode(node), cudaErrorInvalidValue);
    EXPECT_EQ(sim_findings(SIM_DEAD_HANDLE), 1);
    OK(cudaGraphDestroy(graph));
    EXPECT_EQ(cudaGraphInstantiateWithFlags(&again, graph, 0), cudaErrorInvalidValue);
    EXPECT_EQ(cudaGraphClone(&clone, graph), cudaErrorInvalidValue);
    EXPECT_EQ(cudaGraphDestroy(graph), cudaErrorInvalidValue);
    EXPECT_EQ(sim_findings(SIM_DEAD_HANDLE), 4);
    OK(cudaGraphExecDestroy(exec));
    EXPECT_EQ(cudaGraphLaunch(exec, s), cudaErrorInvalidValue);
    EXPECT_EQ(cudaGraphExecDestroy(exec), cudaErrorInvalidValue);
    EXPECT_EQ(sim_findings(SIM_DEAD_HANDLE), 6);
    sim_stop();
}

TEST_MAIN()
