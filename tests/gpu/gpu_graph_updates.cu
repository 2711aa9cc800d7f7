/* gpu_graph_updates.cu - what programs do with graphs besides capturing and launching them: instances that are updated,
   children, captures into a graph that is there, bodies of conditional nodes. All the while another stream allocates,
   fills and compares in the same pool. On a GPU also: streams of a green context, pages for RDMA. */

#include "work.h"

enum { ROUNDS = 40, BLOCKS = 3 };
static const size_t BLOCK = (size_t)2 << 20;

/* Another stream, which takes what it can get. */
typedef struct rival {
    galloc_pool *pool;
    cudaStream_t s;
    std::vector<void *> held;
    uint32_t tag;
} rival;

static void rival_turn(rival *r)
{
    void *p = NULL;
    for (; !r->held.empty(); r->held.pop_back()) {
        device_check(r->s, r->held.back(), BLOCK, r->tag);
        OK(galloc_free(r->held.back(), r->s));
    }
    r->tag++;
    while (r->held.size() < 24 && galloc_pool_malloc(r->pool, &p, BLOCK, r->s) == cudaSuccess) {
        r->held.push_back(p);
        device_fill(r->s, p, BLOCK, r->tag);
    }
}

static rival rival_new(galloc_pool *pool)
{
    rival r = {pool, stream_new(), {}, 1000000};
    rival_turn(&r);
    return r;
}

static void rival_end(rival *r)
{
    rival_turn(r);
    for (void *p : r->held) OK(galloc_free(p, r->s));
    OK(galloc_stream_retire(r->s));
}

/* In a capture: gets, fills, compares and frees. */
static void *pass(galloc_pool *pool, cudaStream_t s, uint32_t tag)
{
    void *p = get(pool, BLOCK, s);
    device_fill(s, p, BLOCK, tag);
    device_check(s, p, BLOCK, tag);
    OK(galloc_free(p, s));
    return p;
}

static cudaGraph_t graph_new(galloc_pool *pool, cudaStream_t s, uint32_t tag)
{
    cudaGraph_t graph = NULL;
    void *p[BLOCKS];
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    for (int i = 0; i < BLOCKS; i++) device_fill(s, p[i] = get(pool, BLOCK, s), BLOCK, tag + i);
    for (int i = 0; i < BLOCKS; i++) device_check(s, p[i], BLOCK, tag + i);
    for (int i = 0; i < BLOCKS; i++) OK(galloc_free(p[i], s));
    OK(cudaStreamEndCapture(s, &graph));
    return graph;
}

static cudaGraphExec_t instance(cudaGraph_t graph)
{
    cudaGraphExec_t exec = NULL;
    OK(cudaGraphInstantiate(&exec, graph, 0));
    return exec;
}

/* All that graphs had comes back, a little after they are gone. */
static void expect_all_back(galloc_pool *pool)
{
    size_t owned = 1;
    OK(cudaDeviceSynchronize());
    for (int i = 0; i < 2000 && owned; i++) {
        cudaStream_t s = stream_new();
        (void)galloc_pool_trim(pool, 0, NULL);
        owned = stats_of(pool).graphs;
        OK(cudaStreamDestroy(s));
        if (owned) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_EQ(owned, 0);
}

/* Captured anew at each step, updated into the one instance, destroyed, launched. */
TEST(an_instance_that_is_updated_for_ever)
{
    galloc_pool *pool = pool_new(1, mib(160), REUSE_ALL);
    cudaStream_t s = stream_new();
    cudaGraphExec_t exec = NULL;
    rival r = rival_new(pool);
    for (uint32_t i = 0; i < ROUNDS; i++) {
        cudaGraph_t graph = graph_new(pool, s, 10 * i);
        cudaGraphExecUpdateResultInfo info;
        if (exec) OK(cudaGraphExecUpdate(exec, graph, &info));
        else exec = instance(graph);
        OK(cudaGraphDestroy(graph));
        for (int n = 0; n < 3; n++) {
            OK(cudaGraphLaunch(exec, s));
            rival_turn(&r);
        }
        if (i % 4 == 0) OK(cudaStreamSynchronize(s));
    }
    OK(cudaGraphExecDestroy(exec));
    rival_end(&r);
    expect_all_back(pool);
    pool_end(pool);
    OK(cudaStreamDestroy(s));
    finish();
}

TEST(children_and_clones)
{
    galloc_pool *pool = pool_new(1, mib(160), REUSE_ALL);
    cudaStream_t s = stream_new();
    rival r = rival_new(pool);
    for (uint32_t i = 0; i < ROUNDS / 4; i++) {
        cudaGraph_t inner = graph_new(pool, s, 10 * i), clone = NULL, outer = NULL;
        cudaGraphNode_t nodes[2];
        OK(cudaGraphClone(&clone, inner));
        OK(cudaGraphCreate(&outer, 0));
        OK(cudaGraphAddChildGraphNode(&nodes[0], outer, NULL, 0, inner));
        OK(cudaGraphAddChildGraphNode(&nodes[1], outer, &nodes[0], 1, clone));
        OK(cudaGraphDestroy(inner));
        OK(cudaGraphDestroy(clone));
        cudaGraphExec_t exec = instance(outer);
        inner = graph_new(pool, s, 10 * i + 5);
        OK(cudaGraphExecChildGraphNodeSetParams(exec, nodes[0], inner));
        OK(cudaGraphDestroy(inner));
        OK(cudaGraphDestroy(outer));
        for (int n = 0; n < 5; n++) {
            OK(cudaGraphLaunch(exec, s));
            rival_turn(&r);
        }
        OK(cudaGraphExecDestroy(exec));
    }
    rival_end(&r);
    expect_all_back(pool);
    pool_end(pool);
    OK(cudaStreamDestroy(s));
    finish();
}

#if CUDART_VERSION >= 12030

static void capture_into(cudaGraph_t graph, cudaStream_t s, const cudaGraphNode_t *after, size_t n)
{
    OK(cudaStreamBeginCaptureToGraph(s, graph, after, NULL, n, cudaStreamCaptureModeGlobal));
}

static void capture_done(cudaGraph_t graph, cudaStream_t s)
{
    cudaGraph_t same = NULL;
    OK(cudaStreamEndCapture(s, &same));
    EXPECT(same == graph);
}

/* One capture at a time, as CUDA demands; what they capture is unordered in the graph, or in order. */
TEST(captures_into_one_graph)
{
    for (int ordered = 0; ordered < 2; ordered++) {
        galloc_pool *pool = pool_new(1, mib(160), REUSE_ALL);
        cudaStream_t s = stream_new();
        rival r = rival_new(pool);
        cudaGraph_t graph = NULL;
        void *p[BLOCKS];
        OK(cudaGraphCreate(&graph, 0));
        for (uint32_t i = 0; i < BLOCKS; i++) {
            cudaGraphNode_t nodes[64];
            size_t n = 64;
            OK(cudaGraphGetNodes(graph, nodes, &n));
            capture_into(graph, s, nodes, ordered ? n : 0);
            p[i] = pass(pool, s, i);
            EXPECT(pass(pool, s, 10 + i) == p[i]);
            for (uint32_t k = 0; k < i; k++) EXPECT_EQ(p[k] == p[i], ordered);
            capture_done(graph, s);
        }
        cudaGraphExec_t exec = instance(graph);
        OK(cudaGraphDestroy(graph));
        for (int n = 0; n < ROUNDS; n++) {
            OK(cudaGraphLaunch(exec, s));
            rival_turn(&r);
        }
        OK(cudaGraphExecDestroy(exec));
        rival_end(&r);
        expect_all_back(pool);
        pool_end(pool);
        OK(cudaStreamDestroy(s));
    }
    finish();
}

/* CUDA refuses the launch of a graph on a captured stream, in every mode, and the capture is lost. If it was into a
   graph that existed before, that graph is destroyed; an instance of it can still be launched. */
TEST(launches_into_captures)
{
    galloc_pool *pool = pool_new(1, mib(160), REUSE_ALL);
    cudaStream_t s = stream_new();
    rival r = rival_new(pool);
    const cudaStreamCaptureMode modes[] = {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal,
                                           cudaStreamCaptureModeRelaxed};
    for (uint32_t i = 0; i < ROUNDS; i++) {
        cudaGraph_t graph = graph_new(pool, s, 10 * i), ended = NULL;
        cudaGraphExec_t exec = instance(graph);
        int into = i / 3 % 2;
        if (into) OK(cudaStreamBeginCaptureToGraph(s, graph, NULL, NULL, 0, modes[i % 3]));
        else OK(cudaStreamBeginCapture(s, modes[i % 3]));
        (void)pass(pool, s, 10 * i + 5);
        EXPECT_EQ(cudaGraphLaunch(exec, s), cudaErrorStreamCaptureUnsupported);
        EXPECT_EQ(cudaStreamEndCapture(s, &ended), cudaErrorStreamCaptureInvalidated);
        EXPECT(!ended);
        (void)cudaGetLastError();
#ifdef GALLOC_ON_SIM
        EXPECT_EQ(sim_findings(SIM_ANY), sim_findings(SIM_CAPTURE_BROKEN));
        sim_findings_clear();
#endif
        if (!into) OK(cudaGraphDestroy(graph));
        for (int n = 0; n < 2; n++) {
            OK(cudaGraphLaunch(exec, s));
            rival_turn(&r);
        }
        OK(cudaGraphExecDestroy(exec));
    }
    rival_end(&r);
    expect_all_back(pool);
    pool_end(pool);
    OK(cudaStreamDestroy(s));
    finish();
}

#endif

#if !defined(GALLOC_ON_SIM) && CUDART_VERSION >= 13000

/* The driver's functions, fetched from the runtime so that nothing must be linked with it. */
template <typename function> static function *driver(const char *name, unsigned version)
{
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    void *at = NULL;
    OK(cudaGetDriverEntryPointByVersion(name, &at, version, cudaEnableLegacyStream, &found));
    EXPECT(found == cudaDriverEntryPointSuccess && at);
    return (function *)at;
}
#define DRIVER(name, version) driver<decltype(name)>(#name, version)

/* Captured into by a stream of its own, while the graph around it is captured: the body's capture has another id. */
TEST(bodies_of_conditional_nodes)
{
    galloc_pool *pool = pool_new(1, mib(160), REUSE_ALL);
    cudaStream_t s = stream_new(), t = stream_new();
    rival r = rival_new(pool);
    cudaGraph_t graph = NULL, ended = NULL;
    const cudaGraphNode_t *after = NULL;
    cudaStreamCaptureStatus status;
    cudaGraphConditionalHandle handle;
    cudaGraphNodeParams params = {};
    cudaGraphNode_t node;
    size_t n = 0;
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    void *p = pass(pool, s, 1);
    OK(cudaStreamGetCaptureInfo(s, &status, NULL, &graph, &after, NULL, &n));
    OK(cudaGraphConditionalHandleCreate(&handle, graph, 1, cudaGraphCondAssignDefault));
    params.type = cudaGraphNodeTypeConditional;
    params.conditional.handle = handle;
    params.conditional.type = cudaGraphCondTypeIf;
    params.conditional.size = 1;
    OK(cudaGraphAddNode(&node, graph, after, NULL, n, &params));
    OK(cudaStreamUpdateCaptureDependencies(s, &node, NULL, 1, cudaStreamSetCaptureDependencies));
    capture_into(params.conditional.phGraph_out[0], t, NULL, 0);
    void *q = pass(pool, t, 2);
    EXPECT(q != p);
    EXPECT(pass(pool, t, 3) == q);
    capture_done(params.conditional.phGraph_out[0], t);
    EXPECT(pass(pool, s, 4) == p); /* it has gone on: the node comes after what was there */
    OK(cudaStreamEndCapture(s, &ended));
    cudaGraphExec_t exec = instance(ended);
    OK(cudaGraphDestroy(ended));
    for (int i = 0; i < ROUNDS; i++) {
        OK(cudaGraphLaunch(exec, s));
        rival_turn(&r);
    }
    OK(cudaGraphExecDestroy(exec));
    rival_end(&r);
    expect_all_back(pool);
    pool_end(pool);
    finish();
}

/* Its streams are of a context of its own, of the same device. */
TEST(streams_of_a_green_context)
{
    CUdevResource all, part, rest;
    CUdevResourceDesc description;
    CUgreenCtx green;
    CUstream s = NULL;
    unsigned n = 1;
    OK(DRIVER(cuDeviceGetDevResource, 12040)(0, &all, CU_DEV_RESOURCE_TYPE_SM));
    OK(DRIVER(cuDevSmResourceSplitByCount, 12040)(&part, &n, &all, &rest, 0, 16));
    OK(DRIVER(cuDevResourceGenerateDesc, 12040)(&description, &part, 1));
    OK(DRIVER(cuGreenCtxCreate, 12040)(&green, description, 0, CU_GREEN_CTX_DEFAULT_STREAM));
    OK(DRIVER(cuGreenCtxStreamCreate, 12050)(&s, green, CU_STREAM_NON_BLOCKING, 0));
    galloc_pool *pool = pool_new(1, mib(64), REUSE_ALL);
    cudaStream_t t = stream_new();
    void *p[30];
    for (uint32_t round = 0; round < ROUNDS; round++) { /* nearly all there is, handed to and fro */
        cudaStream_t now = round % 2 ? t : s;
        for (uint32_t i = 0; i < 30; i++) device_fill(now, p[i] = get(pool, BLOCK, now), BLOCK, 100 * round + i);
        for (uint32_t i = 0; i < 30; i++) device_check(now, p[i], BLOCK, 100 * round + i);
        for (uint32_t i = 0; i < 30; i++) OK(galloc_free(p[i], now));
    }
    OK(cudaDeviceSynchronize());
    cudaGraph_t graph = graph_new(pool, s, 7);
    cudaGraphExec_t exec = instance(graph);
    OK(cudaGraphDestroy(graph));
    rival r = rival_new(pool);
    for (int i = 0; i < ROUNDS; i++) {
        OK(cudaGraphLaunch(exec, i % 2 ? t : s));
        order(i % 2 ? t : s, i % 2 ? s : t);
        rival_turn(&r);
    }
    OK(cudaGraphExecDestroy(exec));
    rival_end(&r);
    OK(galloc_stream_retire(s));
    OK(cudaStreamDestroy(s));
    expect_all_back(pool);
    pool_end(pool);
    finish();
    OK(DRIVER(cuGreenCtxDestroy, 12040)(green));
}

/* What the driver says of an address is what was asked for. */
TEST(pages_for_rdma)
{
    int can = 0;
    OK(DRIVER(cuDeviceGetAttribute, 12000)(&can, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, 0));
    for (int asked = 0; asked < 2; asked++) {
        galloc_config config = galloc_config_default();
        galloc_pool *pool = NULL;
        cudaStream_t s = stream_new();
        unsigned capable = 9;
        config.gpu_direct_rdma = asked;
        OK(galloc_pool_create(&pool, &config));
        OK(galloc_pool_config(pool, &config));
        EXPECT_EQ(config.gpu_direct_rdma, asked && can);
        void *p = get(pool, mib(50), s);
        device_fill(s, p, mib(50), 1);
        device_check(s, p, mib(50), 1);
        OK(DRIVER(cuPointerGetAttribute, 12000)(&capable, CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE,
                                               (CUdeviceptr)p));
        printf("    asked for %d, the device can %d: the driver says %u\n", asked, can, capable);
        if (asked && can) EXPECT_EQ(capable, 1);
        OK(galloc_free(p, s));
        OK(galloc_pool_destroy(pool));
    }
    finish();
}

#endif

int main(int argc, char **argv)
{
    int status = work_start();
    return status ? status : test_main(argc, argv);
}
