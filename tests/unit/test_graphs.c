/* test_graphs.c - galloc and what a program does with graphs besides capturing and launching them: captures into a
   graph that is there, updates of instances, children, clones, nodes that go. The ledger looks at every access of every
   launch: memory that is given to somebody else too early is a race. */

#include "setup.h"
#include "sim_kernel.h"

#if CUDART_VERSION >= 13000
#define PLAIN_EDGES NULL,
#else
#define PLAIN_EDGES
#endif

enum { BLOCK = 6 << 20 };

static void *get_block(galloc_pool *pool, cudaStream_t stream, uint64_t tag)
{
    return get_used(pool, BLOCK, stream, tag);
}

/* Gets, uses and frees. */
static void *pass(galloc_pool *pool, cudaStream_t stream, uint64_t tag)
{
    void *ptr = get_block(pool, stream, tag);
    look(stream, ptr, BLOCK, tag);
    OK(galloc_free(ptr, stream));
    return ptr;
}

/* So many blocks can be had for a stream that has never been captured, at once, and no more. */
static void expect_room(galloc_pool *pool, int blocks)
{
    void *p[8] = {NULL};
    cudaStream_t s = stream_new();
    for (int i = 0; i < blocks; i++) p[i] = get_block(pool, s, 70);
    EXPECT_EQ(galloc_pool_malloc(pool, &p[blocks], BLOCK, s), cudaErrorMemoryAllocation);
    for (int i = 0; i < blocks; i++) OK(galloc_free(p[i], s));
    OK(cudaStreamSynchronize(s));
    OK(galloc_stream_retire(s));
    stream_end(s);
}

static galloc_pool *pool_for(int blocks)
{
    galloc_config config = config_limit((size_t)blocks * BLOCK);
    return pool_new(&config);
}

static void capture_begin(cudaStream_t s) { OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal)); }

static cudaGraph_t capture_end(cudaStream_t s)
{
    cudaGraph_t graph = NULL;
    OK(cudaStreamEndCapture(s, &graph));
    return graph;
}

/* A graph that uses one block of its own. */
static cudaGraph_t graph_new(galloc_pool *pool, cudaStream_t s, uint64_t tag, void **ptr)
{
    capture_begin(s);
    *ptr = pass(pool, s, tag);
    return capture_end(s);
}

static cudaGraphExec_t instance(cudaGraph_t graph)
{
    cudaGraphExec_t exec = NULL;
    OK(cudaGraphInstantiate(&exec, graph, 0));
    return exec;
}

static void capture_into(cudaGraph_t graph, cudaStream_t s, const cudaGraphNode_t *after, size_t n)
{
    OK(cudaStreamBeginCaptureToGraph(s, graph, after, NULL, n, cudaStreamCaptureModeGlobal));
}

static cudaGraphNode_t last_node(cudaGraph_t graph)
{
    cudaGraphNode_t nodes[64] = {NULL};
    size_t n = 64, i = 0, after;
    OK(cudaGraphGetNodes(graph, nodes, &n));
    for (; i < n; i++) {
        after = 0;
        OK(cudaGraphNodeGetDependentNodes(nodes[i], NULL, PLAIN_EDGES &after));
        if (!after) return nodes[i];
    }
    return NULL;
}

/* ---- captures into one graph ------------------------------------------------------------------------------------- */

/* CUDA gives them one id. A stream that takes part again goes on only if it comes after what it did before. */
TEST(captures_into_one_graph_share_memory_in_its_order_only)
{
    for (int way = 0; way < 4; way++) { /* into a new graph or one that was captured; beside what is there or after */
        begin();
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_for(3);
        cudaGraph_t graph = NULL;
        void *p = NULL;
        if (way / 2) graph = graph_new(pool, s, 1, &p);
        else OK(cudaGraphCreate(&graph, 0));
        if (!p) {
            capture_into(graph, s, NULL, 0);
            p = pass(pool, s, 1);
            EXPECT(capture_end(s) == graph);
        }
        cudaGraphNode_t last = last_node(graph);
        capture_into(graph, s, &last, way % 2);
        void *q = pass(pool, s, 2);
        EXPECT(pass(pool, s, 3) == q);
        EXPECT(capture_end(s) == graph);
        EXPECT_EQ(q == p, way % 2);
        cudaGraphExec_t exec = instance(graph);
        OK(cudaGraphDestroy(graph));
        OK(cudaGraphLaunch(exec, s));
        expect_room(pool, way % 2 ? 2 : 1);
        OK(cudaGraphLaunch(exec, s));
        OK(cudaGraphExecDestroy(exec));
        OK(cudaStreamSynchronize(s));
        expect_room(pool, 3);
        pool_end(pool);
        finish();
    }
}

/* An input is freed or cut during the capture or after it, a result after it: on a stream that is not captured, so it
   is not known where in the graph they were used. No later capture into the graph has them. */
TEST(what_is_freed_outside_a_capture_is_no_later_captures)
{
    enum { INPUT, EARLY, CUT, RESULT, WAYS };
    for (int way = 0; way < 2 * WAYS; way++) {
        int how = way / 2;
        size_t bytes = how == CUT ? 2 * BLOCK : BLOCK;
        begin();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = pool_for(3);
        cudaGraph_t graph = NULL;
        void *p = NULL, *q;
        OK(cudaGraphCreate(&graph, 0));
        if (how != RESULT) p = get(pool, bytes, t);
        capture_into(graph, s, NULL, 0);
        if (how == RESULT) p = get(pool, bytes, s);
        else OK(galloc_record_stream(p, s));
        put(s, p, bytes, 1);
        if (how == EARLY) OK(galloc_free(p, t));
        EXPECT(capture_end(s) == graph);
        if (how == CUT) OK(galloc_resize(p, BLOCK, t));
        else if (how != EARLY) OK(galloc_free(p, t));
        OK(cudaStreamSynchronize(t));
        cudaGraphNode_t last = last_node(graph);
        capture_into(graph, s, &last, way % 2);
        q = pass(pool, s, 2);
        EXPECT(q != p && (how != CUT || q != (char *)p + BLOCK));
        EXPECT(capture_end(s) == graph);
        if (how == CUT) OK(galloc_free(p, t));
        EXPECT_EQ(galloc_pool_check(pool), 0);
        cudaGraphExec_t exec = instance(graph);
        OK(cudaGraphDestroy(graph));
        OK(cudaGraphLaunch(exec, s));
        expect_room(pool, how == CUT ? 0 : 1);
        OK(cudaGraphExecDestroy(exec));
        OK(cudaStreamSynchronize(s));
        expect_room(pool, 3);
        pool_end(pool);
        finish();
    }
}

/* What several graphs of a group use counts once, also where their blocks begin and end at different places. */
TEST(what_graphs_of_a_group_share_counts_once)
{
    static const char *const settings[] = {"", "like:pytorch", "like:pytorch,expandable_segments:False"};
    for (int i = 0; i < 3; i++) {
        begin();
        cudaStream_t s = stream_new();
        galloc_config config = galloc_config_default();
        OK(galloc_config_parse(&config, settings[i], NULL, 0));
        galloc_pool *pool = pool_new(&config);
        galloc_graph *group = NULL;
        cudaGraph_t graphs[3];
        OK(galloc_graph_begin(&group, pool, s));
        for (int graph = 0; graph < 3; graph++) {
            capture_begin(s);
            void *p = get(pool, KIB(64) >> graph, s), *q = get(pool, KIB(64) >> graph, s), *r = get(pool, KIB(16), s);
            OK(galloc_free(p, s));
            OK(galloc_free(q, s));
            OK(galloc_free(r, s));
            graphs[graph] = capture_end(s);
            EXPECT_EQ(stats_of(pool).graph_bytes, KIB(144));
        }
        OK(galloc_graph_end(group));
        for (int graph = 0; graph < 3; graph++) OK(cudaGraphDestroy(graphs[graph]));
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

/* The same in a group, another graph of which may have that memory. */
TEST(a_later_graph_of_a_group_leaves_what_its_first_one_must_not_have)
{
    static const char *const settings[] = {"", "like:pytorch", "like:pytorch,expandable_segments:False"};
    for (int i = 0; i < 3; i++) {
        begin();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_config config = galloc_config_default();
        OK(galloc_config_parse(&config, settings[i], NULL, 0));
        galloc_pool *pool = pool_new(&config);
        cudaGraph_t graph = NULL;
        galloc_graph *group = NULL;
        void *own = get(pool, 512, t);
        OK(cudaGraphCreate(&graph, 0));
        OK(galloc_graph_begin(&group, pool, s));
        capture_into(graph, s, NULL, 0);
        put(s, own, 512, 9);
        void *p = get(pool, MIB(14), s), *q;
        cudaGraphNode_t first = last_node(graph);
        put(s, p, MIB(14), 1);
        EXPECT(capture_end(s) == graph);
        capture_begin(s);
        OK(galloc_free(get_used(pool, MIB(12), s, 5), s));
        cudaGraph_t other = capture_end(s);
        OK(galloc_free(p, t));
        OK(cudaStreamSynchronize(t));
        OK(galloc_free(get(pool, 512, t), t));
        capture_into(graph, s, &first, 1); /* beside the work on p */
        q = get_used(pool, MIB(14), s, 2);
        EXPECT(q != p);
        OK(galloc_free(q, s));
        EXPECT(capture_end(s) == graph);
        EXPECT_EQ(galloc_pool_check(pool), 0);
        OK(galloc_graph_end(group));
        cudaGraphExec_t exec = instance(graph);
        OK(cudaGraphLaunch(exec, s));
        OK(cudaStreamSynchronize(s));
        OK(cudaGraphExecDestroy(exec));
        OK(cudaGraphDestroy(graph));
        OK(cudaGraphDestroy(other));
        OK(galloc_graph_release(group, s));
        OK(galloc_free(own, t));
        pool_end(pool);
        finish();
    }
}

/* Stream states are forgotten when there are many, but not what stands for work of a capture at unknown positions. */
TEST(a_capture_beside_many_streams_is_not_forgotten)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new(), u;
    galloc_pool *pool = pool_for(3);
    cudaGraph_t graph = NULL;
    void *p = get(pool, BLOCK, t);
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    OK(galloc_record_stream(p, s));
    put(s, p, BLOCK, 1);
    for (int i = 0; i < 100; i++) {
        u = stream_new();
        OK(galloc_free(get(pool, 512, u), u));
    }
    OK(galloc_free(get(pool, BLOCK, u), u)); /* grows, and forgets stream states */
    OK(cudaStreamSynchronize(u));
    graph = capture_end(s);
    OK(galloc_free(p, t));
    EXPECT_EQ(galloc_pool_check(pool), 0);
    EXPECT_EQ(stats_of(pool).graph_bytes, BLOCK);
    cudaGraphExec_t exec = instance(graph);
    OK(cudaGraphLaunch(exec, s));
    OK(cudaGraphExecDestroy(exec));
    OK(cudaGraphDestroy(graph));
    OK(cudaStreamSynchronize(s));
    EXPECT_EQ(stats_of(pool).graph_bytes, 0);
    pool_end(pool);
    finish();
}

/* Three, on streams that come and go with the same handle; a fourth after all of them may have what they freed. */
TEST(a_capture_after_others_in_its_graph_takes_what_they_freed)
{
    begin();
    galloc_pool *pool = pool_for(4);
    cudaGraph_t graph = NULL;
    cudaGraphNode_t last[3];
    void *p[3];
    OK(cudaGraphCreate(&graph, 0));
    for (int i = 0; i < 3; i++) {
        cudaGraphNode_t nodes[64];
        size_t n = 64;
        cudaStream_t s = stream_new();
        capture_into(graph, s, NULL, 0);
        p[i] = pass(pool, s, (uint64_t)i);
        for (int k = 0; k < i; k++) EXPECT(p[i] != p[k]);
        (void)capture_end(s);
        OK(cudaGraphGetNodes(graph, nodes, &n));
        last[i] = nodes[n - 1];
        OK(galloc_stream_retire(s));
        stream_end(s);
    }
    cudaStream_t s = stream_new();
    capture_into(graph, s, last, 3);
    void *q[3];
    for (int i = 0; i < 3; i++) q[i] = get_block(pool, s, 9);
    for (int i = 0; i < 3; i++) EXPECT(q[i] == p[0] || q[i] == p[1] || q[i] == p[2]);
    for (int i = 0; i < 3; i++) OK(galloc_free(q[i], s));
    (void)capture_end(s);
    cudaGraphExec_t exec = instance(graph);
    OK(cudaGraphLaunch(exec, s));
    OK(cudaGraphExecDestroy(exec));
    OK(cudaGraphDestroy(graph));
    OK(cudaStreamSynchronize(s));
    expect_room(pool, 4);
    pool_end(pool);
    finish();
}

/* CUDA destroys the graph then. An instance that was made before runs on at the addresses of the first capture. */
TEST(a_lost_capture_into_a_graph_gives_back_what_no_instance_uses)
{
    for (int instances = 0; instances < 2; instances++) {
        begin();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = pool_for(3);
        void *p;
        cudaGraph_t graph = graph_new(pool, s, 1, &p), none = NULL;
        cudaGraphExec_t exec = instances ? instance(graph) : NULL;
        capture_into(graph, s, NULL, 0);
        EXPECT(pass(pool, s, 2) != p);
        void *held = get_block(pool, s, 3);
        EXPECT_EQ(cudaStreamQuery(s), cudaErrorStreamCaptureUnsupported);
        EXPECT_EQ(cudaStreamEndCapture(s, &none), cudaErrorStreamCaptureInvalidated);
        EXPECT(!none);
        (void)cudaGetLastError();
        OK(galloc_free(held, t));
        for (int i = 0; exec && i < 2; i++) {
            OK(cudaGraphLaunch(exec, s));
            void *others[3] = {NULL};
            for (int n = 0; n < 3; n++) {
                if (galloc_pool_malloc(pool, &others[n], BLOCK, t)) break;
                EXPECT(others[n] != p);
                put(t, others[n], BLOCK, 4);
            }
            EXPECT(others[0] && !others[2]);
            for (int n = 0; n < 3; n++) OK(galloc_free(others[n], t));
        }
        if (exec) OK(cudaGraphExecDestroy(exec));
        OK(cudaDeviceSynchronize());
        expect_room(pool, 3);
        pool_end(pool);
        EXPECT_EQ(sim_findings(SIM_ANY), sim_findings(SIM_CAPTURE_BROKEN));
        sim_findings_clear();
        finish();
    }
}

/* A program may set what a captured stream comes after, as it must for a node that it adds itself. */
TEST(a_captured_stream_that_is_set_back_shares_nothing)
{
    for (int back = 0; back < 2; back++) {
        begin();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = pool_for(3);
        cudaGraphNode_t last, node;
        cudaGraph_t graph = NULL;
        OK(cudaGraphCreate(&graph, 0));
        OK(cudaStreamBeginCaptureToGraph(s, graph, NULL, NULL, 0, cudaStreamCaptureModeRelaxed));
        void *p = pass(pool, s, 1);
        last = last_node(graph);
        OK(cudaGraphAddEmptyNode(&node, graph, &last, back ? 0 : 1));
        OK(cudaStreamUpdateCaptureDependencies(s, &node, PLAIN_EDGES 1, cudaStreamSetCaptureDependencies));
        void *q = pass(pool, s, 2);
        EXPECT_EQ(q == p, !back);
        if (back) OK(cudaStreamUpdateCaptureDependencies(s, &last, PLAIN_EDGES 1, cudaStreamAddCaptureDependencies));
        (void)capture_end(s);
        cudaGraphExec_t exec = instance(graph);
        OK(cudaGraphLaunch(exec, t));
        OK(cudaGraphExecDestroy(exec));
        OK(cudaGraphDestroy(graph));
        OK(cudaStreamSynchronize(t));
        expect_room(pool, 3);
        pool_end(pool);
        finish();
    }
}

/* Where a free was cannot be asked: then the stream may have been set back since, as far as galloc knows. */
TEST(a_stream_does_not_go_on_from_a_place_that_is_not_known)
{
    for (int nth = 1; nth <= 3; nth++) {
        begin();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = pool_for(3);
        cudaGraphNode_t last, node;
        cudaGraph_t graph = NULL;
        OK(cudaGraphCreate(&graph, 0));
        OK(cudaStreamBeginCaptureToGraph(s, graph, NULL, NULL, 0, cudaStreamCaptureModeRelaxed));
        void *p = get_block(pool, s, 1);
        last = last_node(graph);
        sim_fail("cuStreamGetCaptureInfo", nth, 0, 0);
        if (galloc_free(p, s)) OK(galloc_free(p, s));
        EXPECT_EQ(sim_failed(), 1);
        sim_fail_clear();
        OK(cudaGraphAddEmptyNode(&node, graph, NULL, 0));
        OK(cudaStreamUpdateCaptureDependencies(s, &node, PLAIN_EDGES 1, cudaStreamSetCaptureDependencies));
        EXPECT(pass(pool, s, 2) != p);
        OK(cudaStreamUpdateCaptureDependencies(s, &last, PLAIN_EDGES 1, cudaStreamAddCaptureDependencies));
        (void)capture_end(s);
        cudaGraphExec_t exec = instance(graph);
        OK(cudaGraphLaunch(exec, t));
        OK(cudaGraphExecDestroy(exec));
        OK(cudaGraphDestroy(graph));
        OK(cudaStreamSynchronize(t));
        (void)cudaGetLastError();
        expect_room(pool, 3);
        pool_end(pool);
        finish();
    }
}

/* Two captures into one graph are parts of it that nothing orders. Both may use what an earlier graph of their group
   has freed, but neither what the other one has. */
TEST(parts_of_a_graph_share_with_an_earlier_graph_only)
{
    static const char *const conf[] = {"", "like:pytorch", "strategy:pooled", "backend:cudaMalloc",
                                       "backend:cudaMallocAsync"};
    for (int i = 0; i < 5; i++) {
        begin();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_config config = galloc_config_default();
        galloc_graph *group = NULL;
        galloc_pool *pool;
        cudaGraph_t graph = NULL, earlier = NULL;
        OK(galloc_config_parse(&config, conf[i], NULL, 0));
        OK(galloc_pool_create(&pool, &config));
        OK(galloc_graph_begin(&group, pool, s));
        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
        void *p = get(pool, 600000, s);
        put(s, p, 600000, 1);
        OK(galloc_free(p, s));
        OK(cudaStreamEndCapture(s, &earlier));
        OK(cudaGraphCreate(&graph, 0));
        for (int part = 0; part < 2; part++) {
            OK(cudaStreamBeginCaptureToGraph(s, graph, NULL, NULL, 0, cudaStreamCaptureModeRelaxed));
            size_t bytes = part ? 592379 : 122368;
            p = get(pool, bytes, s);
            put(s, p, bytes, 2);
            OK(galloc_free(p, s));
            OK(cudaStreamEndCapture(s, &graph));
        }
        OK(galloc_graph_end(group));
        cudaGraphExec_t exec = instance(graph);
        OK(cudaGraphLaunch(exec, t));
        OK(cudaStreamSynchronize(t));
        OK(cudaGraphExecDestroy(exec));
        OK(cudaGraphDestroy(graph));
        OK(cudaGraphDestroy(earlier));
        pool_end(pool);
        finish();
    }
}

/* The same for a stream that had joined many others when it was asked last. Set back, it comes after some of the nodes
   that it had joined, but not after its own. */
TEST(a_stream_that_is_set_back_from_a_wide_join_shares_nothing)
{
    enum { MOST = 100 };
    for (int joined = 1; joined <= MOST; joined += joined < 40 ? 1 : 60) {
        for (int some = 0; some <= joined; some += joined) {
            begin();
            cudaStream_t s = stream_new();
            galloc_pool *pool = pool_for(3);
            cudaGraphNode_t after[MOST + 1], node;
            cudaGraph_t graph = NULL;
            OK(cudaGraphCreate(&graph, 0));
            OK(cudaStreamBeginCaptureToGraph(s, graph, NULL, NULL, 0, cudaStreamCaptureModeRelaxed));
            void *p = get(pool, MIB(2), s);
            put(s, p, MIB(2), 1);
            after[joined] = last_node(graph);
            for (int i = 0; i < joined; i++) OK(cudaGraphAddEmptyNode(&after[i], graph, NULL, 0));
            OK(cudaStreamUpdateCaptureDependencies(s, after, PLAIN_EDGES (size_t)joined + 1,
                                                   cudaStreamSetCaptureDependencies));
            OK(galloc_free(p, s));
            OK(cudaGraphAddEmptyNode(&node, graph, after, (size_t)some));
            OK(cudaStreamUpdateCaptureDependencies(s, &node, PLAIN_EDGES 1, cudaStreamSetCaptureDependencies));
            EXPECT(pass(pool, s, 2) != p);
            OK(cudaStreamUpdateCaptureDependencies(s, after, PLAIN_EDGES (size_t)joined + 1,
                                                   cudaStreamAddCaptureDependencies));
            (void)capture_end(s);
            OK(cudaGraphDestroy(graph));
            pool_end(pool);
            finish();
        }
    }
}

enum { JOINED = 150 };

/* A node that comes after many others: the stream's past is one of them. */
TEST(a_stream_goes_on_behind_a_join_of_many)
{
    for (int first = 0; first < 2; first++) {
        begin();
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_for(2);
        cudaGraphNode_t after[JOINED + 1], *others = first ? after + 1 : after, node;
        cudaGraph_t graph = NULL;
        OK(cudaGraphCreate(&graph, 0));
        OK(cudaStreamBeginCaptureToGraph(s, graph, NULL, NULL, 0, cudaStreamCaptureModeRelaxed));
        void *p = pass(pool, s, 1);
        after[first ? 0 : JOINED] = last_node(graph);
        for (int i = 0; i < JOINED; i++) OK(cudaGraphAddEmptyNode(&others[i], graph, NULL, 0));
        OK(cudaGraphAddEmptyNode(&node, graph, after, JOINED + 1));
        OK(cudaStreamUpdateCaptureDependencies(s, &node, PLAIN_EDGES 1, cudaStreamSetCaptureDependencies));
        EXPECT(pass(pool, s, 2) == p);
        (void)capture_end(s);
        OK(cudaGraphDestroy(graph));
        pool_end(pool);
        finish();
    }
}

static void refuse_all_joined(size_t bytes)
{
    if (bytes / (JOINED + 1) == 2 * sizeof(cudaGraphNode_t)) sim_fail_malloc(1, 0);
}

/* If a query of that node fails, or host memory for its answer, nothing is known of what it comes after. */
TEST(a_join_of_many_that_cannot_be_read_proves_nothing)
{
    enum { QUERIES = 3 };
    for (int nth = 1; nth <= QUERIES + 1; nth++) {
        begin();
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_for(2);
        cudaGraphNode_t after[JOINED + 1], node;
        cudaGraph_t graph = NULL;
        OK(cudaGraphCreate(&graph, 0));
        OK(cudaStreamBeginCaptureToGraph(s, graph, NULL, NULL, 0, cudaStreamCaptureModeRelaxed));
        void *p = pass(pool, s, 1), *q = NULL;
        after[JOINED] = last_node(graph);
        for (int i = 0; i < JOINED; i++) OK(cudaGraphAddEmptyNode(&after[i], graph, NULL, 0));
        OK(cudaGraphAddEmptyNode(&node, graph, after, JOINED + 1));
        OK(cudaStreamUpdateCaptureDependencies(s, &node, PLAIN_EDGES 1, cudaStreamSetCaptureDependencies));
        if (nth <= QUERIES) sim_fail("cuGraphNodeGetDependencies", nth, 0, 0);
        else inside_on_malloc = refuse_all_joined;
        OK(galloc_pool_malloc(pool, &q, BLOCK, s));
        EXPECT(q != p);
        if (nth <= QUERIES) EXPECT_EQ(sim_failed(), 1);
        else EXPECT_EQ(sim_failed_mallocs(), 1);
        inside_on_malloc = NULL;
        sim_fail_clear();
        OK(galloc_free(q, s));
        (void)capture_end(s);
        OK(cudaGraphDestroy(graph));
        EXPECT_EQ(galloc_pool_check(pool), 0);
        pool_end(pool);
        finish();
    }
}

/* The same without a node that joins them. */
TEST(a_stream_goes_on_behind_many)
{
    enum { NODES = 150 };
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_for(2);
    cudaGraphNode_t after[NODES + 1];
    cudaGraph_t graph = NULL;
    OK(cudaGraphCreate(&graph, 0));
    capture_into(graph, s, NULL, 0);
    void *p = pass(pool, s, 1);
    after[NODES] = last_node(graph);
    for (int i = 0; i < NODES; i++) OK(cudaGraphAddEmptyNode(&after[i], graph, NULL, 0));
    OK(cudaStreamUpdateCaptureDependencies(s, after, PLAIN_EDGES NODES + 1, cudaStreamSetCaptureDependencies));
    EXPECT(pass(pool, s, 2) == p);
    (void)capture_end(s);
    OK(cudaGraphDestroy(graph));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* A second branch of a graph, captured on the same stream: its first galloc call comes after many nodes, or it begins
   behind many. None of them comes after the first branch. */
TEST(a_long_or_wide_branch_of_a_graph_shares_nothing)
{
    enum { NODES = 1500 };
    for (int wide = 0; wide < 2; wide++) {
        begin();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = pool_for(3);
        static cudaGraphNode_t before[NODES];
        void *other;
        cudaGraph_t graph = NULL;
        OK(cudaMalloc(&other, BLOCK));
        OK(cudaGraphCreate(&graph, 0));
        capture_into(graph, s, NULL, 0);
        void *p = pass(pool, s, 1);
        (void)capture_end(s);
        for (int i = 0; i < NODES && wide; i++) OK(cudaGraphAddEmptyNode(&before[i], graph, NULL, 0));
        capture_into(graph, s, before, wide ? NODES : 0);
        for (int i = 0; i < NODES && !wide; i++) put(s, other, BLOCK, 3);
        void *q = pass(pool, s, 2);
        EXPECT(q != p);
        if (!wide) EXPECT(pass(pool, s, 3) == q);
        (void)capture_end(s);
        cudaGraphExec_t exec = instance(graph);
        OK(cudaGraphLaunch(exec, t));
        OK(cudaStreamSynchronize(t));
        OK(cudaGraphExecDestroy(exec));
        OK(cudaGraphDestroy(graph));
        OK(cudaFree(other));
        expect_room(pool, 3);
        pool_end(pool);
        finish();
    }
}

/* A side stream that was joined and destroyed, and another one with its handle, which forks from an earlier event. */
TEST(a_stream_with_the_handle_of_a_joined_one_is_another_branch)
{
    begin();
    cudaStream_t s = stream_new(), side[2];
    galloc_pool *pool = pool_for(3);
    cudaEvent_t fork, join;
    void *other, *p[2];
    OK(cudaMalloc(&other, BLOCK));
    OK(cudaEventCreate(&fork));
    OK(cudaEventCreate(&join));
    capture_begin(s);
    for (int i = 0; i < 600; i++) put(s, other, BLOCK, 3);
    OK(cudaEventRecord(fork, s));
    for (int i = 0; i < 2; i++) {
        side[i] = stream_new();
        OK(cudaStreamWaitEvent(side[i], fork, 0));
        p[i] = pass(pool, side[i], 1);
        OK(cudaEventRecord(join, side[i]));
        OK(cudaStreamWaitEvent(s, join, 0));
        stream_end(side[i]);
    }
    EXPECT(side[0] == side[1] && p[0] != p[1]);
    cudaGraph_t graph = capture_end(s);
    cudaGraphExec_t exec = instance(graph);
    OK(cudaGraphLaunch(exec, s));
    OK(cudaStreamSynchronize(s));
    OK(cudaGraphExecDestroy(exec));
    OK(cudaGraphDestroy(graph));
    OK(cudaEventDestroy(fork));
    OK(cudaEventDestroy(join));
    OK(cudaFree(other));
    pool_end(pool);
    finish();
}

/* However many nodes come before the branches, and however many branches there are, the graph is read but for a few
   nodes of each: what precedes the first call on such a stream cannot come after it. */
TEST(many_branches_read_little_of_their_graph)
{
    enum { NODES = 1000, BRANCHES = 30 };
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = config_limit((BRANCHES + 1) * BLOCK);
    config.reuse = GALLOC_REUSE_COMPLETED; /* memory of other branches is not looked for */
    galloc_pool *pool = pool_new(&config);
    cudaEvent_t fork, join;
    void *other;
    OK(cudaMalloc(&other, BLOCK));
    OK(cudaEventCreate(&fork));
    OK(cudaEventCreate(&join));
    capture_begin(s);
    for (int i = 0; i < NODES; i++) put(s, other, BLOCK, 3);
    OK(cudaEventRecord(fork, s));
    long read = sim_calls("cuGraphNodeGetDependencies");
    for (int i = 0; i < BRANCHES; i++) {
        cudaStream_t side = stream_new();
        OK(cudaStreamWaitEvent(side, fork, 0));
        (void)pass(pool, side, 1);
        OK(cudaEventRecord(join, side));
        OK(cudaStreamWaitEvent(s, join, 0));
        stream_end(side);
    }
    EXPECT(sim_calls("cuGraphNodeGetDependencies") - read <= 10 * BRANCHES);
    OK(cudaGraphDestroy(capture_end(s)));
    OK(cudaEventDestroy(fork));
    OK(cudaEventDestroy(join));
    OK(cudaFree(other));
    pool_end(pool);
    finish();
}

/* Behind many dependencies, with no node captured between the calls, the stream goes on. */
TEST(calls_at_one_wide_place_share_a_state)
{
    enum { NODES = 150, PAIRS = 50 };
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_for(2);
    cudaGraphNode_t before[NODES];
    cudaGraph_t graph = NULL;
    OK(cudaGraphCreate(&graph, 0));
    for (int i = 0; i < NODES; i++) OK(cudaGraphAddEmptyNode(&before[i], graph, NULL, 0));
    capture_into(graph, s, before, NODES);
    void *p = get(pool, BLOCK, s);
    OK(galloc_free(p, s));
    size_t streams = inside_streams(pool);
    for (int i = 0; i < PAIRS; i++) {
        EXPECT(get(pool, BLOCK, s) == p);
        OK(galloc_free(p, s));
    }
    EXPECT_EQ(inside_streams(pool), streams);
    (void)capture_end(s);
    OK(cudaGraphDestroy(graph));
    pool_end(pool);
    finish();
}

/* What the driver does not tell of a graph counts as another branch. */
TEST(what_the_driver_does_not_tell_of_a_graph_is_another_branch)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_for(3);
    capture_begin(s);
    void *other = get_block(pool, s, 1), *p = pass(pool, s, 2);
    put(s, other, BLOCK, 3);
    sim_fail("cuGraphNodeGetDependencies", 1, 1, cudaErrorUnknown);
    EXPECT(pass(pool, s, 4) != p);
    sim_fail_clear();
    OK(galloc_free(other, s));
    cudaGraph_t graph = capture_end(s);
    OK(cudaGraphDestroy(graph));
    expect_room(pool, 3);
    pool_end(pool);
    finish();
}

SIM_KERNEL(touch, (char *, p))
{
    (void)p;
}

/* As cudaLaunchKernelEx with programmatic stream serialization. */
static void launch_early(cudaStream_t s, char *p)
{
    void *arguments[] = {&p};
    cudaLaunchAttribute attribute = {.id = cudaLaunchAttributeProgrammaticStreamSerialization};
    cudaLaunchConfig_t config = {.gridDim = {1, 1, 1}, .blockDim = {1, 1, 1}, .stream = s, .attrs = &attribute,
                                 .numAttrs = 1};
    attribute.val.programmaticStreamSerializationAllowed = 1;
    OK(cudaLaunchKernelExC(&config, touch, arguments));
}

/* Three programmatic launches; the capture's newest node. The last two nodes have edges with data. */
static cudaGraphNode_t launch_chain(cudaStream_t s, void *ptr)
{
    cudaGraph_t graph = NULL;
    enum cudaStreamCaptureStatus status;
    for (int i = 0; i < 3; i++) launch_early(s, ptr);
#if CUDART_VERSION >= 13000
    OK(cudaStreamGetCaptureInfo(s, &status, NULL, &graph, NULL, NULL, NULL));
#else
    OK(cudaStreamGetCaptureInfo_v2(s, &status, NULL, &graph, NULL, NULL));
#endif
    return last_node(graph);
}

/* A driver before 12.3 tells of no edge with data: then the stream reuses less. 12.3 does tell. */
TEST(a_stream_goes_on_behind_programmatic_launches)
{
    static const int versions[] = {0, 12030, 12020};
    for (int i = 0; i < 3; i++) {
        int old = i == 2;
        sim_options options = sim_defaults();
        if (versions[i]) options.driver_version = versions[i];
        begin_with(options);
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_for(3);
        capture_begin(s);
        void *other = get_block(pool, s, 1), *p = pass(pool, s, 2);
        (void)launch_chain(s, other);
        EXPECT_EQ(pass(pool, s, 4) == p, !old);
        OK(galloc_free(other, s));
        cudaGraph_t graph = capture_end(s);
        OK(cudaGraphDestroy(graph));
        expect_room(pool, 3);
        pool_end(pool);
        finish();
    }
}

#if CUDART_VERSION >= 13000
/* The program itself says that the next launch may begin before the newest node ends. The stream is the same, and goes
   on; only a driver before 12.3 cannot say where it is. */
TEST(a_stream_goes_on_behind_an_edge_with_data)
{
    for (int old = 0; old < 2; old++) {
        sim_options options = sim_defaults();
        if (old) options.driver_version = 12020;
        begin_with(options);
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_for(3);
        cudaGraphEdgeData early = {.from_port = 1, .type = 1}; /* programmatic */
        capture_begin(s);
        void *other = get_block(pool, s, 1), *p = pass(pool, s, 2);
        cudaGraphNode_t node = launch_chain(s, other);
        OK(cudaStreamUpdateCaptureDependencies(s, &node, &early, 1, cudaStreamSetCaptureDependencies));
        EXPECT_EQ(pass(pool, s, 4) == p, !old);
        OK(galloc_free(other, s));
        cudaGraph_t graph = capture_end(s);
        OK(cudaGraphDestroy(graph));
        expect_room(pool, 3);
        pool_end(pool);
        finish();
    }
}

/* Another stream's next launch may begin before that node ends, too. */
TEST(another_stream_does_not_follow_over_its_own_edge_with_data)
{
    for (int early = 0; early < 2; early++) {
        begin();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = pool_for(3);
        cudaGraphEdgeData edge = {.from_port = (unsigned char)early, .type = (unsigned char)early};
        cudaEvent_t event;
        OK(cudaEventCreate(&event));
        capture_begin(s);
        void *p = get_block(pool, s, 1);
        cudaGraphNode_t node = launch_chain(s, p);
        OK(galloc_free(p, s));
        OK(cudaEventRecord(event, s));
        OK(cudaStreamWaitEvent(t, event, 0));
        OK(cudaStreamUpdateCaptureDependencies(t, &node, &edge, 1, cudaStreamSetCaptureDependencies));
        EXPECT_EQ(pass(pool, t, 4) == p, !early);
        OK(cudaEventRecord(event, t));
        OK(cudaStreamWaitEvent(s, event, 0));
        cudaGraph_t graph = capture_end(s);
        OK(cudaGraphDestroy(graph));
        OK(cudaEventDestroy(event));
        expect_room(pool, 3);
        pool_end(pool);
        finish();
    }
}
#endif

/* Two branches that begin behind programmatic launches: what one frees is no memory for the other. */
TEST(branches_behind_programmatic_launches_share_nothing)
{
    for (int old = 0; old < 2; old++) {
        sim_options options = sim_defaults();
        if (old) options.driver_version = 12020;
        begin_with(options);
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = pool_for(4);
        capture_begin(s);
        void *other = get_block(pool, s, 1);
        cudaGraphNode_t fork = launch_chain(s, other);
        void *p = pass(pool, s, 2);
        OK(cudaStreamUpdateCaptureDependencies(s, &fork, PLAIN_EDGES 1, cudaStreamSetCaptureDependencies));
        EXPECT(pass(pool, s, 3) != p);
        OK(cudaStreamUpdateCaptureDependencies(s, &fork, PLAIN_EDGES 1, cudaStreamSetCaptureDependencies));
        (void)launch_chain(s, other);
        OK(galloc_free(other, s));
        cudaGraph_t graph = capture_end(s);
        cudaGraphExec_t exec = instance(graph);
        OK(cudaGraphLaunch(exec, t));
        OK(cudaStreamSynchronize(t));
        OK(cudaGraphExecDestroy(exec));
        OK(cudaGraphDestroy(graph));
        expect_room(pool, 4);
        pool_end(pool);
        finish();
    }
}

/* A kernel that was launched so may begin before the work that it comes after ends: what that work used is not free
   behind it on another stream. */
TEST(another_stream_does_not_follow_over_a_programmatic_launch)
{
    for (int early = 0; early < 2; early++) {
        begin();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = pool_for(3);
        cudaEvent_t event;
        OK(cudaEventCreate(&event));
        capture_begin(s);
        void *other = get_block(pool, s, 1), *p = get_block(pool, s, 2);
        launch_early(s, p);
        OK(galloc_free(p, s));
        OK(cudaEventRecord(event, s));
        OK(cudaStreamWaitEvent(t, event, 0));
        if (early) launch_early(t, other);
        else put(t, other, BLOCK, 3);
        EXPECT_EQ(pass(pool, t, 4) == p, !early);
        OK(cudaEventRecord(event, t));
        OK(cudaStreamWaitEvent(s, event, 0));
        OK(galloc_free(other, s));
        cudaGraph_t graph = capture_end(s);
        OK(cudaGraphDestroy(graph));
        OK(cudaEventDestroy(event));
        expect_room(pool, 3);
        pool_end(pool);
        finish();
    }
}

/* As many nodes as before, the last one among them, are another place. */
TEST(a_wide_place_is_known_by_all_of_its_nodes)
{
    enum { MOST = 70 };
    for (int n = 62; n <= MOST; n++) {
        begin();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = pool_for(3);
        cudaGraphNode_t one[MOST], two[MOST];
        cudaGraph_t graph = NULL;
        OK(cudaGraphCreate(&graph, 0));
        capture_into(graph, s, NULL, 0);
        void *p = get_block(pool, s, 1);
        one[0] = last_node(graph);
        for (int i = 1; i < n; i++) OK(cudaGraphAddEmptyNode(&one[i], graph, NULL, 0));
        for (int i = 0; i + 1 < n; i++) OK(cudaGraphAddEmptyNode(&two[i], graph, NULL, 0));
        two[n - 1] = one[n - 1];
        OK(cudaStreamUpdateCaptureDependencies(s, one, PLAIN_EDGES (size_t)n, cudaStreamSetCaptureDependencies));
        OK(galloc_free(p, s));
        EXPECT(get(pool, BLOCK, s) == p); /* the same place */
        OK(galloc_free(p, s));
        OK(cudaStreamUpdateCaptureDependencies(s, two, PLAIN_EDGES (size_t)n, cudaStreamSetCaptureDependencies));
        EXPECT(pass(pool, s, 2) != p);
        OK(cudaStreamUpdateCaptureDependencies(s, one, PLAIN_EDGES (size_t)n, cudaStreamAddCaptureDependencies));
        (void)capture_end(s);
        cudaGraphExec_t exec = instance(graph);
        OK(cudaGraphLaunch(exec, t));
        OK(cudaStreamSynchronize(t));
        OK(cudaGraphExecDestroy(exec));
        OK(cudaGraphDestroy(graph));
        expect_room(pool, 3);
        pool_end(pool);
        finish();
    }
}

/* A place that shares all nodes but the last one, which uses the block, does not come after it. */
TEST(a_wide_place_is_known_by_its_last_node_too)
{
    enum { MOST = 70 };
    for (int n = 62; n <= MOST; n++) {
        begin();
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_for(3);
        cudaGraphNode_t one[MOST], two[MOST];
        cudaGraph_t graph = NULL;
        OK(cudaGraphCreate(&graph, 0));
        capture_into(graph, s, NULL, 0);
        void *p = get_block(pool, s, 1);
        one[n - 1] = last_node(graph);
        for (int i = 0; i + 1 < n; i++) OK(cudaGraphAddEmptyNode(&one[i], graph, NULL, 0));
        memcpy(two, one, sizeof two);
        OK(cudaGraphAddEmptyNode(&two[n - 1], graph, NULL, 0));
        OK(cudaStreamUpdateCaptureDependencies(s, one, PLAIN_EDGES (size_t)n, cudaStreamSetCaptureDependencies));
        OK(galloc_free(p, s));
        OK(cudaStreamUpdateCaptureDependencies(s, two, PLAIN_EDGES (size_t)n, cudaStreamSetCaptureDependencies));
        EXPECT(pass(pool, s, 2) != p);
        OK(cudaStreamUpdateCaptureDependencies(s, one, PLAIN_EDGES (size_t)n, cudaStreamAddCaptureDependencies));
        (void)capture_end(s);
        OK(cudaGraphDestroy(graph));
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

/* Without host memory the nodes of a place are read in part, and those may be the same at another one. */
TEST(a_place_that_was_read_in_part_is_not_known_again)
{
    enum { NODES = 600, READ = 512 };
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_for(3);
    cudaGraphNode_t one[NODES], two[NODES];
    cudaGraph_t graph = NULL;
    OK(cudaGraphCreate(&graph, 0));
    capture_into(graph, s, NULL, 0);
    void *p = get_block(pool, s, 1);
    for (int i = 0; i < NODES; i++) OK(cudaGraphAddEmptyNode(&one[i], graph, NULL, 0));
    memcpy(two, one, sizeof two);
    for (int i = READ; i < NODES; i++) OK(cudaGraphAddEmptyNode(&two[i], graph, NULL, 0));
    one[NODES - 1] = last_node(graph);
    OK(cudaStreamUpdateCaptureDependencies(s, one, PLAIN_EDGES NODES, cudaStreamSetCaptureDependencies));
    sim_fail_malloc(1, 0);
    OK(galloc_free(p, s));
    EXPECT_EQ(sim_failed_mallocs(), 1);
    OK(cudaStreamUpdateCaptureDependencies(s, two, PLAIN_EDGES NODES, cudaStreamSetCaptureDependencies));
    sim_fail_malloc(1, 0);
    EXPECT(pass(pool, s, 2) != p);
    EXPECT(sim_failed_mallocs() > 0);
    sim_fail_clear();
    OK(cudaStreamUpdateCaptureDependencies(s, one, PLAIN_EDGES NODES, cudaStreamAddCaptureDependencies));
    (void)capture_end(s);
    cudaGraphExec_t exec = instance(graph);
    OK(cudaGraphLaunch(exec, t));
    OK(cudaStreamSynchronize(t));
    OK(cudaGraphExecDestroy(exec));
    OK(cudaGraphDestroy(graph));
    pool_end(pool);
    finish();
}

/* A look at the graph from a place that was read in part leaves no host memory behind. */
TEST(a_wide_place_after_one_that_was_read_in_part_leaves_nothing_behind)
{
    enum { NODES = 600 };
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_for(3);
    cudaGraphNode_t one[NODES];
    cudaGraph_t graph = NULL;
    OK(cudaGraphCreate(&graph, 0));
    capture_into(graph, s, NULL, 0);
    void *p = get_block(pool, s, 1);
    for (int i = 0; i < NODES; i++) OK(cudaGraphAddEmptyNode(&one[i], graph, NULL, 0));
    one[NODES - 1] = last_node(graph);
    OK(cudaStreamUpdateCaptureDependencies(s, one, PLAIN_EDGES NODES, cudaStreamSetCaptureDependencies));
    sim_fail_malloc(1, 0);
    OK(galloc_free(p, s));
    EXPECT_EQ(sim_failed_mallocs(), 1);
    sim_fail_clear();
    (void)pass(pool, s, 2);
    (void)capture_end(s);
    OK(cudaGraphDestroy(graph));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* Of the two nodes of a place one is near and the other is far behind. */
TEST(a_stream_goes_on_behind_a_near_and_a_far_node)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_for(3);
    cudaGraphNode_t place[2], later[2];
    cudaGraph_t graph = NULL;
    OK(cudaGraphCreate(&graph, 0));
    capture_into(graph, s, NULL, 0);
    void *p = get_block(pool, s, 1);
    place[0] = last_node(graph);
    OK(cudaGraphAddEmptyNode(&place[1], graph, NULL, 0));
    OK(cudaStreamUpdateCaptureDependencies(s, place, PLAIN_EDGES 2, cudaStreamSetCaptureDependencies));
    OK(galloc_free(p, s));
    OK(cudaGraphAddEmptyNode(&later[0], graph, &place[0], 1));
    later[1] = place[1];
    for (int i = 0; i < 700; i++) OK(cudaGraphAddEmptyNode(&later[1], graph, &later[1], 1));
    OK(cudaStreamUpdateCaptureDependencies(s, later, PLAIN_EDGES 2, cudaStreamSetCaptureDependencies));
    EXPECT(pass(pool, s, 2) == p);
    (void)capture_end(s);
    OK(cudaGraphDestroy(graph));
    expect_room(pool, 3);
    pool_end(pool);
    finish();
}

/* Many nodes between two calls: the stream goes on, however far away its past is. */
TEST(a_stream_goes_on_however_much_was_captured_since)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_for(2);
    capture_begin(s);
    void *other = get_block(pool, s, 1), *p = pass(pool, s, 2);
    for (int i = 0; i < 1000; i++) put(s, other, BLOCK, 3);
    EXPECT(pass(pool, s, 4) == p);
    OK(galloc_free(other, s));
    cudaGraph_t graph = capture_end(s);
    OK(cudaGraphDestroy(graph));
    expect_room(pool, 2);
    pool_end(pool);
    finish();
}

/* The past is the first node that a walk of 512 nodes has no room for. Which slots of the index are the node's depends
   on its address, so the test looks at many nodes. */
TEST(a_stream_goes_on_from_a_place_for_which_the_walk_grows)
{
    enum { NODES = 512, TIMES = 20 };
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_for(TIMES + 2);
    void *other = get_block(pool, s, 1);
    cudaGraph_t graph[TIMES]; /* kept, so that each has nodes elsewhere */
    for (int time = 0; time < TIMES; time++) {
        capture_begin(s);
        void *p = pass(pool, s, 2);
        for (int i = 0; i < NODES; i++) put(s, other, BLOCK, 3);
        EXPECT(pass(pool, s, 4) == p);
        graph[time] = capture_end(s);
    }
    for (int time = 0; time < TIMES; time++) OK(cudaGraphDestroy(graph[time]));
    OK(galloc_free(other, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* ---- updates ----------------------------------------------------------------------------------------------------- */

/* The memory of the new capture lives as long as the instance, that of the old one until its launches have ended. */
TEST(an_instance_that_is_updated_has_the_new_captures_memory)
{
    begin_still();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_for(3);
    void *p, *q;
    cudaGraph_t first = graph_new(pool, s, 1, &p), next;
    cudaGraphExec_t exec = instance(first);
    OK(cudaGraphDestroy(first));
    OK(cudaGraphLaunch(exec, s));
    next = graph_new(pool, s, 2, &q);
    EXPECT(p != q);
    OK(cudaGraphExecUpdate(exec, next, &(cudaGraphExecUpdateResultInfo){0}));
    OK(cudaGraphDestroy(next));
    EXPECT_EQ(stats_of(pool).graphs, 2); /* the launch has not run yet */
    OK(cudaStreamSynchronize(s));
    for (int i = 0; i < 3; i++) {
        OK(cudaGraphLaunch(exec, s));
        expect_room(pool, 2);
        EXPECT_EQ(stats_of(pool).graphs, 1);
    }
    OK(cudaGraphExecDestroy(exec));
    OK(cudaStreamSynchronize(s));
    expect_room(pool, 3);
    pool_end(pool);
    finish();
}

/* As engines do at each step: capture anew, update, destroy the graph, launch. Two graphs' memory is all they need. */
TEST(captures_that_update_one_instance_for_ever_need_two_graphs_memory)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_for(4);
    cudaGraphExec_t exec = NULL;
    void *p, *beside = get_block(pool, t, 5);
    for (uint64_t i = 0; i < 50; i++) {
        cudaGraph_t graph = graph_new(pool, s, i, &p);
        if (exec) OK(cudaGraphExecUpdate(exec, graph, &(cudaGraphExecUpdateResultInfo){0}));
        else exec = instance(graph);
        OK(cudaGraphDestroy(graph));
        OK(cudaGraphLaunch(exec, s));
        OK(galloc_free(beside, t));
        beside = get_block(pool, t, i); /* never the graph's */
        EXPECT(beside != p);
        if (i % 3 == 0) OK(cudaStreamSynchronize(s));
        EXPECT(stats_of(pool).graphs <= 4);
    }
    OK(galloc_free(beside, t));
    OK(cudaGraphExecDestroy(exec));
    OK(cudaDeviceSynchronize());
    expect_room(pool, 4);
    pool_end(pool);
    finish();
}

TEST(an_update_that_is_refused_changes_nothing)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_for(3);
    void *p;
    cudaGraph_t graph = graph_new(pool, s, 1, &p);
    cudaGraphExec_t exec = instance(graph);
    OK(cudaGraphDestroy(graph));
    capture_begin(s);
    (void)pass(pool, s, 2);
    (void)pass(pool, s, 3);
    graph = capture_end(s);
    EXPECT_EQ(cudaGraphExecUpdate(exec, graph, &(cudaGraphExecUpdateResultInfo){0}), cudaErrorGraphExecUpdateFailure);
    (void)cudaGetLastError();
    OK(cudaGraphDestroy(graph));
    OK(cudaGraphLaunch(exec, s));
    expect_room(pool, 2);
    OK(cudaGraphExecDestroy(exec));
    OK(cudaStreamSynchronize(s));
    expect_room(pool, 3);
    pool_end(pool);
    finish();
}

/* ---- children and clones ----------------------------------------------------------------------------------------- */

/* A child is a copy, and holds what its original holds, as long as the graph around it or an instance has it. */
TEST(a_childs_memory_lives_with_the_graph_around_it)
{
    for (int removed = 0; removed < 2; removed++) {
        begin();
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_for(2);
        cudaGraphNode_t node;
        cudaGraph_t outer = NULL;
        cudaGraphExec_t exec = NULL;
        void *p;
        cudaGraph_t inner = graph_new(pool, s, 1, &p);
        OK(cudaGraphCreate(&outer, 0));
        OK(cudaGraphAddChildGraphNode(&node, outer, NULL, 0, inner));
        OK(cudaGraphDestroy(inner));
        expect_room(pool, 1);
        if (removed) OK(cudaGraphDestroyNode(node));
        else exec = instance(outer);
        if (exec) OK(cudaGraphDestroy(outer));
        for (int i = 0; exec && i < 2; i++) {
            OK(cudaGraphLaunch(exec, s));
            expect_room(pool, 1);
        }
        if (exec) OK(cudaGraphExecDestroy(exec));
        OK(cudaStreamSynchronize(s));
        expect_room(pool, 2);
        if (removed) OK(cudaGraphDestroy(outer));
        pool_end(pool);
        finish();
    }
}

TEST(a_child_of_an_instance_that_is_set_brings_its_memory_along)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_for(3);
    cudaGraphNode_t node;
    cudaGraph_t outer = NULL;
    void *p, *q;
    cudaGraph_t inner = graph_new(pool, s, 1, &p);
    OK(cudaGraphCreate(&outer, 0));
    OK(cudaGraphAddChildGraphNode(&node, outer, NULL, 0, inner));
    OK(cudaGraphDestroy(inner));
    cudaGraphExec_t exec = instance(outer);
    inner = graph_new(pool, s, 2, &q);
    OK(cudaGraphExecChildGraphNodeSetParams(exec, node, inner));
    OK(cudaGraphDestroy(inner));
    expect_room(pool, 1); /* the outer graph has the first one's yet */
    OK(cudaGraphDestroy(outer));
    OK(cudaGraphLaunch(exec, s));
    expect_room(pool, 2);
    OK(cudaGraphExecDestroy(exec));
    OK(cudaStreamSynchronize(s));
    expect_room(pool, 3);
    pool_end(pool);
    finish();
}

TEST(a_clones_memory_is_its_originals_until_both_are_gone)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_for(2);
    cudaGraph_t clone = NULL;
    void *p;
    cudaGraph_t graph = graph_new(pool, s, 1, &p);
    OK(cudaGraphClone(&clone, graph));
    OK(cudaGraphDestroy(graph));
    expect_room(pool, 1);
    capture_into(clone, s, NULL, 0);
    EXPECT(pass(pool, s, 2) != p);
    EXPECT(capture_end(s) == clone);
    cudaGraphExec_t exec = instance(clone);
    OK(cudaGraphDestroy(clone));
    OK(cudaGraphLaunch(exec, s));
    OK(cudaGraphExecDestroy(exec));
    OK(cudaStreamSynchronize(s));
    expect_room(pool, 2);
    pool_end(pool);
    finish();
}

/* Nodes that are destroyed take no memory with them: the graph has it. */
TEST(nodes_that_are_destroyed_leave_the_graphs_memory_alone)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_for(2);
    void *p;
    cudaGraph_t graph = graph_new(pool, s, 1, &p);
    OK(cudaGraphDestroyNode(last_node(graph)));
    expect_room(pool, 1);
    cudaGraphExec_t exec = instance(graph);
    OK(cudaGraphDestroy(graph));
    OK(cudaGraphLaunch(exec, s));
    expect_room(pool, 1);
    OK(cudaGraphExecDestroy(exec));
    OK(cudaStreamSynchronize(s));
    expect_room(pool, 2);
    pool_end(pool);
    finish();
}

/* Captures of a group one after the other, each of three blocks of its own sizes. Returns the most that one needs. */
static size_t capture_sizes(galloc_pool *pool, cudaStream_t s, cudaGraph_t *graphs, int captures, int falling)
{
    size_t most = 0;
    for (int i = 0; i < captures; i++) {
        size_t bytes = (size_t)(falling ? captures - i : i + 1) * 300000;
        void *p[3];
        capture_begin(s);
        for (int k = 0; k < 3; k++) p[k] = get_used(pool, bytes * (size_t)(k + 1), s, (uint64_t)k + 1);
        for (int k = 0; k < 3; k++) OK(galloc_free(p[k], s));
        graphs[i] = capture_end(s);
        if (6 * bytes > most) most = 6 * bytes;
        EXPECT_EQ(galloc_pool_check(pool), 0);
    }
    return most;
}

/* Whatever the order of their sizes: free memory of the group's graphs merges. */
TEST(a_group_needs_the_memory_of_its_largest_graph)
{
    enum { GRAPHS = 60 };
    for (int falling = 0; falling < 2; falling++) {
        begin();
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_new(NULL);
        galloc_graph *group = NULL;
        cudaGraph_t graphs[GRAPHS];
        size_t most;
        OK(galloc_graph_begin(&group, pool, s));
        most = capture_sizes(pool, s, graphs, GRAPHS, falling);
        EXPECT(stats_of(pool).graph_bytes <= most + most / 20 + MIB(2));
        EXPECT(stats_of(pool).reserved.current <= most + most / 20 + MIB(4));
        OK(galloc_graph_end(group));
        OK(galloc_graph_release(group, s));
        for (int i = 0; i < GRAPHS; i++) OK(cudaGraphDestroy(graphs[i]));
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

/* Free memory of the pool that fits better is left alone as long as the group has some that is large enough. */
TEST(a_group_uses_its_own_memory_first)
{
    enum { GRAPHS = 4 };
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    galloc_graph *group = NULL;
    cudaGraph_t graphs[GRAPHS];
    void *apart[GRAPHS], *hole[GRAPHS], *other;
    cudaStream_t t = stream_new();
    other = get(pool, KIB(4), t);
    for (int i = 0; i < GRAPHS; i++) { /* free blocks of the sizes that the captures ask for */
        hole[i] = get(pool, MIB(8) >> i, s);
        apart[i] = get(pool, KIB(4), s);
    }
    for (int i = 0; i < GRAPHS; i++) OK(galloc_free(hole[i], s));
    OK(galloc_free(get(pool, KIB(4), s), s));
    OK(cudaDeviceSynchronize());
    OK(galloc_free(get(pool, MIB(100), t), t)); /* which looks what is complete: any stream may have them now */
    OK(galloc_graph_begin(&group, pool, s));
    for (int i = 0; i < GRAPHS; i++) {
        void *p, *q;
        capture_begin(s);
        p = get_used(pool, MIB(8) >> i, s, 1);
        q = get_used(pool, MIB(8) >> i, s, 2);
        OK(galloc_free(p, s));
        OK(galloc_free(q, s));
        graphs[i] = capture_end(s);
        EXPECT_EQ(stats_of(pool).graph_bytes, MIB(16));
    }
    OK(galloc_graph_end(group));
    OK(galloc_graph_release(group, s));
    for (int i = 0; i < GRAPHS; i++) OK(cudaGraphDestroy(graphs[i]));
    for (int i = 0; i < GRAPHS; i++) OK(galloc_free(apart[i], s));
    OK(galloc_free(other, t));
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* So it is where several streams of the first capture have used the memory. */
TEST(a_group_reuses_what_was_freed_after_several_streams)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new(), both[2] = {s, t};
    galloc_pool *pool = pool_new(NULL);
    galloc_graph *group = NULL;
    cudaGraph_t graphs[2];
    void *p, *q, *live = get(pool, 1000, s);
    OK(galloc_pool_reserve(pool, MIB(32)));
    OK(galloc_graph_begin(&group, pool, s));
    capture_begin(s);
    p = get_block(pool, s, 1);
    order(s, t);
    look(t, p, BLOCK, 1);
    OK(galloc_free_after(p, both, 2));
    order(t, s);
    graphs[0] = capture_end(s);
    capture_begin(s);
    q = pass(pool, s, 2);
    graphs[1] = capture_end(s);
    EXPECT(q == p);
    EXPECT_EQ(stats_of(pool).graph_bytes, BLOCK);
    OK(galloc_graph_end(group));
    OK(galloc_graph_release(group, s));
    for (int i = 0; i < 2; i++) OK(cudaGraphDestroy(graphs[i]));
    OK(galloc_free(live, s));
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* Two captures at once used two neighbours: `first` belongs to the group and `second` does not. The blocks name them in
   opposite order, so they do not merge before the group is released. */
static void record_crosswise(galloc_pool *pool, cudaStream_t first, cudaStream_t second, void **p, void **q)
{
    *p = get_used(pool, MIB(1), first, 1);
    *q = get_used(pool, MIB(1), second, 2);
    OK(galloc_record_stream(*p, second));
    OK(galloc_record_stream(*q, first));
    look(first, *p, MIB(1), 1);
    OK(galloc_free(*p, first));
    OK(galloc_free(*q, second));
}

/* What a released group owned is free after the stream's work, even where its neighbour, which another graph owns too,
   has lost its mark of the group already and merges with it. */
TEST(a_released_group_leaves_no_mark_behind_where_blocks_merge)
{
    for (int way = 0; way < 2; way++) {
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new(), x = stream_new(), y = stream_new();
        galloc_pool *pool = pool_limited(MIB(2));
        galloc_graph *group = NULL;
        cudaGraph_t of_group, other;
        cudaGraphExec_t exec;
        void *p, *q, *r[2];
        OK(galloc_graph_begin(&group, pool, s));
        capture_begin(s);
        capture_begin(t);
        if (way) record_crosswise(pool, t, s, &p, &q);
        else record_crosswise(pool, s, t, &p, &q);
        of_group = capture_end(s);
        other = capture_end(t);
        OK(galloc_graph_end(group));
        EXPECT_EQ(galloc_pool_check(pool), 0);
        exec = instance(of_group);
        OK(cudaGraphLaunch(exec, x));
        OK(galloc_graph_release(group, x));
        EXPECT_EQ(galloc_pool_check(pool), 0);
        OK(cudaGraphDestroy(other));
        for (int i = 0; i < 2; i++) r[i] = get_used(pool, MIB(1), y, 3); /* the launch may still be queued */
        sim_run(-1);
        for (int i = 0; i < 2; i++) OK(galloc_free(r[i], y));
        OK(cudaGraphExecDestroy(exec));
        OK(cudaGraphDestroy(of_group));
        pool_end(pool);
        stream_end(s);
        stream_end(t);
        stream_end(x);
        stream_end(y);
        finish();
    }
}

/* A result that a stream of the graph uses and one outside is held by both; the release of the group ends the one. */
TEST(a_released_group_leaves_the_uses_of_other_streams)
{
    begin_still();
    cudaStream_t s = stream_new(), u = stream_new(), x = stream_new(), other = stream_new();
    galloc_pool *pool = pool_for(1);
    galloc_graph *group = NULL;
    OK(galloc_graph_begin(&group, pool, s));
    capture_begin(s);
    void *p = get_block(pool, s, 1), *q = NULL;
    OK(galloc_record_stream(p, other));
    order(s, u);
    look(u, p, BLOCK, 1);
    OK(galloc_record_stream(p, u));
    order(u, s);
    cudaGraph_t graph = capture_end(s);
    cudaGraphExec_t exec = instance(graph);
    OK(galloc_graph_end(group));
    OK(cudaGraphLaunch(exec, x));
    order(x, other);
    look(other, p, BLOCK, 1);
    OK(galloc_record_stream(p, other));
    OK(galloc_graph_release(group, x));
    EXPECT_EQ(galloc_pool_check(pool), 0);
    sim_hold(other, 1);
    OK(galloc_free(p, x));
    EXPECT_EQ(galloc_pool_check(pool), 0);
    OK(cudaGraphExecDestroy(exec));
    OK(cudaGraphDestroy(graph));
    sim_hold(other, 0);
    q = get_block(pool, x, 2);
    sim_run(-1);
    OK(galloc_free(q, x));
    expect_room(pool, 1);
    pool_end(pool);
    stream_end(s);
    stream_end(u);
    stream_end(x);
    stream_end(other);
    finish();
}

/* What two graphs freed after the same streams does not merge: each graph's memory comes back when that graph ends. */
TEST(memory_of_two_graphs_is_not_one_block)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new(), both[2] = {s, t};
    galloc_pool *pool = pool_new(NULL);
    cudaGraph_t graph[2];
    void *p[2], *other = get(pool, 1000, s);
    OK(galloc_pool_reserve(pool, MIB(32)));
    for (int i = 0; i < 2; i++) {
        capture_begin(s);
        p[i] = get_block(pool, s, 1);
        order(s, t);
        look(t, p[i], BLOCK, 1);
        OK(galloc_free_after(p[i], both, 2));
        order(t, s);
        graph[i] = capture_end(s);
    }
    EXPECT_EQ((char *)p[1] - (char *)p[0], BLOCK);
    for (int i = 0; i < 2; i++) {
        EXPECT(info_of(p[i]).base == p[i]);
        EXPECT_EQ(info_of(p[i]).usable, BLOCK);
    }
    EXPECT_EQ(stats_of(pool).graph_bytes, 2 * BLOCK);
    OK(cudaGraphDestroy(graph[0]));
    OK(galloc_free(get(pool, 1000, s), s)); /* the pool learns that the graph has ended */
    EXPECT_EQ(stats_of(pool).graph_bytes, BLOCK);
    OK(cudaGraphDestroy(graph[1]));
    OK(galloc_free(other, s));
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* A capture that is under way joins a group: its free blocks meet those of the group's graphs from then on. */
TEST(free_blocks_meet_when_their_capture_joins_a_group)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_new(NULL);
    galloc_graph *group = NULL;
    cudaGraph_t graph[2];
    void *p[2];
    OK(galloc_graph_begin(&group, pool, s));
    for (int i = 0; i < 2; i++) {
        capture_begin(s);
        p[i] = get_used(pool, MIB(1), s, 1);
        OK(galloc_record_stream(p[i], t));
        OK(galloc_free(p[i], s));
        if (i) OK(galloc_graph_begin(&group, pool, s));
        EXPECT_EQ(galloc_pool_check(pool), 0);
        graph[i] = capture_end(s);
        OK(galloc_graph_end(group));
    }
    EXPECT_EQ((char *)p[1] - (char *)p[0], MIB(1));
    OK(galloc_graph_release(group, s));
    for (int i = 0; i < 2; i++) OK(cudaGraphDestroy(graph[i]));
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* A group takes a stream from other groups of its pool, not from those of other pools. */
TEST(groups_of_two_pools_begin_with_one_stream)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pools[2] = {pool_for(3), pool_for(3)};
    galloc_graph *groups[2] = {NULL, NULL}, *third = NULL;
    for (int i = 0; i < 2; i++) OK(galloc_graph_begin(&groups[i], pools[i], s));
    for (int i = 0; i < 2; i++) EXPECT_EQ(galloc_graph_begin(&third, pools[i], s), cudaErrorNotPermitted);
    capture_begin(s);
    for (int i = 0; i < 2; i++) (void)pass(pools[i], s, 1);
    cudaGraph_t graph = capture_end(s);
    for (int i = 0; i < 2; i++) EXPECT_EQ(stats_of(pools[i]).graphs, 1);
    OK(cudaGraphDestroy(graph));
    for (int i = 0; i < 2; i++) {
        OK(galloc_graph_end(groups[i]));
        OK(galloc_graph_release(groups[i], s));
        pool_end(pools[i]);
    }
    stream_end(s);
    finish();
}

static galloc_graph *ending_group; /* until it is released */

static void release_the_group(const char *function)
{
    galloc_graph *group = ending_group;
    if (!group || strcmp(function, "cuCtxGetId")) return;
    ending_group = NULL;
    OK(galloc_graph_release(group, GALLOC_NO_STREAM));
}

/* A group is released while another call begins it again: that one finds no group. */
TEST(a_group_that_is_released_before_it_begins_again_is_gone)
{
    begin();
    galloc_pool *pool = pool_for(3);
    galloc_graph *group = NULL;
    OK(galloc_graph_begin(&group, pool, cudaStreamPerThread));
    OK(galloc_graph_end(group));
    ending_group = group;
    sim_hook(release_the_group, NULL);
    EXPECT_EQ(galloc_graph_begin(&group, pool, cudaStreamPerThread), cudaErrorInvalidResourceHandle);
    sim_hook(NULL, NULL);
    EXPECT(!ending_group);
    pool_end(pool);
    finish();
}

/* A capture stays in the group that it began in, though another group begins on its stream once the first has ended. */
TEST(a_capture_of_one_group_goes_over_to_no_other)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_for(3);
    galloc_graph *first = NULL, *second = NULL;
    OK(galloc_graph_begin(&first, pool, s));
    capture_begin(s);
    (void)pass(pool, s, 1);
    OK(galloc_graph_end(first));
    EXPECT_EQ(galloc_graph_begin(&second, pool, s), cudaErrorNotPermitted);
    EXPECT(second == NULL);
    OK(galloc_graph_begin(&first, pool, s)); /* the group itself may go on */
    (void)pass(pool, s, 2);
    OK(galloc_graph_end(first));
    cudaGraph_t graph = capture_end(s);
    OK(galloc_graph_begin(&second, pool, s));
    OK(galloc_graph_end(second));
    OK(cudaGraphDestroy(graph));
    OK(galloc_graph_release(first, s));
    OK(galloc_graph_release(second, s));
    expect_room(pool, 3);
    pool_end(pool);
    finish();
}

/* A capture that joins its own group a second time is still one capture. */
TEST(a_group_that_begins_again_in_a_capture_ends_with_its_graph)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_for(3);
    size_t blocks = 0; /* of host memory */
    for (int i = 0; i < 20; i++) {
        galloc_graph *group = NULL;
        OK(galloc_graph_begin(&group, pool, s));
        capture_begin(s);
        (void)pass(pool, s, 1);
        OK(galloc_graph_end(group));
        OK(galloc_graph_begin(&group, pool, s));
        OK(galloc_graph_end(group));
        EXPECT_EQ(galloc_pool_check(pool), 0);
        cudaGraph_t graph = capture_end(s);
        OK(galloc_graph_release(group, GALLOC_NO_STREAM));
        OK(cudaGraphDestroy(graph));
        expect_room(pool, 3);
        if (i == 10) blocks = sim_malloc_live();
        if (i > 10) EXPECT_EQ(sim_malloc_live(), blocks);
    }
    pool_end(pool);
    stream_end(s);
    finish();
}

/* A group begins on the per-thread stream, and the first to allocate in the capture is a stream that joined it. */
TEST(a_stream_that_joins_a_capture_of_the_per_thread_stream_is_of_its_group)
{
    begin();
    cudaStream_t own = cudaStreamPerThread, s = stream_new();
    galloc_pool *pool = pool_for(2);
    galloc_graph *group = NULL;
    void *p[2];
    cudaGraph_t graph[2];
    OK(galloc_graph_begin(&group, pool, own));
    for (int i = 0; i < 2; i++) {
        capture_begin(own);
        order(own, s);
        p[i] = pass(pool, s, 1);
        order(s, own);
        graph[i] = capture_end(own);
    }
    OK(galloc_graph_end(group));
    EXPECT(p[0] == p[1]); /* graphs of one group share memory */
    expect_room(pool, 1);
    for (int i = 0; i < 2; i++) OK(cudaGraphDestroy(graph[i]));
    OK(galloc_graph_release(group, s));
    expect_room(pool, 2);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* A group that has a graph begins again in a capture that has allocated already: that is of the group from then on. */
TEST(a_capture_under_way_joins_a_group_that_has_others)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    galloc_graph *group = NULL;
    OK(galloc_graph_begin(&group, pool, s));
    capture_begin(s);
    void *p = get_used(pool, MIB(9), s, 1);
    OK(galloc_free(p, s));
    cudaGraph_t first = capture_end(s);
    OK(galloc_graph_end(group));
    capture_begin(s);
    void *small = get(pool, 1000, s);
    OK(galloc_graph_begin(&group, pool, s));
    void *q = get_used(pool, MIB(9), s, 2);
    EXPECT(q == p);
    OK(galloc_free(q, s));
    OK(galloc_free(small, s));
    cudaGraph_t second = capture_end(s);
    OK(galloc_graph_end(group));
    OK(cudaGraphDestroy(first));
    OK(cudaGraphDestroy(second));
    OK(galloc_graph_release(group, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* A group may begin on the per-thread stream first and then on a created one: it has the forks of that one as well. */
TEST(a_group_that_begins_again_on_a_created_stream_has_its_forks)
{
    begin_still();
    galloc_pool *pool = pool_limited(MIB(16)); /* no room for the memory of two graphs */
    cudaStream_t s = stream_new(), fork = stream_new();
    galloc_graph *group = NULL;
    cudaGraph_t graph[2] = {NULL, NULL};
    OK(galloc_graph_begin(&group, pool, cudaStreamPerThread));
    OK(galloc_graph_end(group));
    OK(galloc_graph_begin(&group, pool, s));
    for (int i = 0; i < 2; i++) {
        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
        order(s, fork);
        OK(galloc_free(get_used(pool, MIB(10), fork, 1), fork));
        order(fork, s);
        OK(cudaStreamEndCapture(s, &graph[i]));
    }
    OK(galloc_graph_end(group));
    for (int i = 0; i < 2; i++) OK(cudaGraphDestroy(graph[i]));
    OK(galloc_graph_release(group, s));
    pool_end(pool);
    stream_end(s);
    stream_end(fork);
    finish();
}

/* A capture with streams of two groups belongs to neither: the pool's first call in it is refused, whichever of its
   streams that names. In a capture with a stream of one group no other one begins. Once the second group has ended, or
   the capture is known to be of the first, all goes on. */
TEST(a_capture_with_streams_of_two_groups_is_refused)
{
    enum { ON_FIRST, ON_SECOND, BEGIN_BESIDE_BOTH, BEGIN_BESIDE_ONE, WAYS };
    for (int way = 0; way < WAYS; way++) {
        begin();
        cudaStream_t s = stream_new(), t = stream_new(), u = stream_new();
        galloc_pool *pool = pool_for(2);
        galloc_graph *first = NULL, *second = NULL, *third = NULL;
        void *p = NULL;
        OK(galloc_graph_begin(&second, pool, t));
        OK(galloc_graph_begin(&first, pool, s));
        if (way == BEGIN_BESIDE_ONE) OK(galloc_graph_end(second));
        capture_begin(s);
        order(s, t);
        order(s, u);
        if (way <= ON_SECOND) {
            cudaStream_t named = way == ON_FIRST ? s : t;
            EXPECT_EQ(galloc_pool_malloc(pool, &p, BLOCK, named), cudaErrorNotPermitted);
            EXPECT(p == NULL);
        } else {
            EXPECT_EQ(galloc_graph_begin(&third, pool, u), cudaErrorNotPermitted);
            EXPECT(third == NULL);
        }
        EXPECT_EQ(galloc_pool_check(pool), 0);
        if (way != BEGIN_BESIDE_ONE) OK(galloc_graph_end(second));
        void *q = pass(pool, s, 1);
        EXPECT_EQ(galloc_graph_begin(&second, NULL, t), cudaErrorNotPermitted);
        order(t, s);
        order(u, s);
        cudaGraph_t graph = capture_end(s);
        OK(galloc_graph_begin(&second, NULL, t));
        capture_begin(s);
        EXPECT(pass(pool, s, 2) == q);
        order(s, t); /* the capture has been met */
        EXPECT(pass(pool, t, 3) == q);
        order(t, s);
        cudaGraph_t next = capture_end(s);
        OK(galloc_graph_end(first));
        OK(galloc_graph_end(second));
        expect_room(pool, 1);
        OK(cudaGraphDestroy(graph));
        OK(cudaGraphDestroy(next));
        OK(galloc_graph_release(first, GALLOC_NO_STREAM));
        OK(galloc_graph_release(second, GALLOC_NO_STREAM));
        expect_room(pool, 2);
        pool_end(pool);
        stream_end(s);
        stream_end(t);
        stream_end(u);
        finish();
    }
}

static struct {
    galloc_pool *pool;
    CUcontext second;
    pthread_barrier_t all;
} in_two_contexts;

static void *begin_in_two_contexts(void *unused)
{
    cudaStream_t own = cudaStreamPerThread;
    galloc_graph *first = NULL, *second = NULL;
    OK(galloc_graph_begin(&first, in_two_contexts.pool, own));
    OK(cuCtxSetCurrent(in_two_contexts.second));
    OK(galloc_graph_begin(&second, in_two_contexts.pool, own));
    pthread_barrier_wait(&in_two_contexts.all);
    OK(galloc_graph_end(first));
    OK(galloc_graph_end(second));
    OK(galloc_graph_release(first, GALLOC_NO_STREAM));
    OK(galloc_graph_release(second, GALLOC_NO_STREAM));
    return unused;
}

/* Each thread has a per-thread default stream in each context: four streams, on each of which a group begins. */
TEST(groups_begin_on_the_per_thread_streams_of_two_contexts)
{
    pthread_t threads[2];
    CUcontext own = NULL;
    begin();
    in_two_contexts.pool = pool_for(2);
    OK(cuCtxGetCurrent(&own));
    OK(sim_green_create(&in_two_contexts.second, 0));
    OK(cuCtxSetCurrent(own));
    EXPECT_EQ(pthread_barrier_init(&in_two_contexts.all, NULL, 2), 0);
    for (int i = 0; i < 2; i++) EXPECT_EQ(pthread_create(&threads[i], NULL, begin_in_two_contexts, NULL), 0);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    EXPECT_EQ(pthread_barrier_destroy(&in_two_contexts.all), 0);
    OK(sim_green_destroy(in_two_contexts.second));
    pool_end(in_two_contexts.pool);
    finish();
}

TEST_MAIN()
