/* gpu_graphs.cu - graphs that were captured with memory of galloc's keep it as long as they can be launched.

   Graphs are captured in a loop, with blocks that they allocate, fill, compare and free, on one stream and on others
   that it forks to, and with a result that they leave behind; then they are launched again and again, in between each
   other. All the while CROWD threads allocate, fill, compare and free in the same pool, which is too small for all of
   them. Whatever galloc gave to two at once shows as wrong words, in the graphs or in the crowd. The captures are in
   global mode: a call in any thread that polls or waits in the wrong way ends them.

   gpu_graphs [--seconds N] */

#include "work.h"

enum { CROWD = 16, GRAPHS = 8, HELD = 8 };

static int seconds = 8;

/* ---- the crowd --------------------------------------------------------------------------------------------------- */

typedef struct crowd {
    galloc_pool *pool;
    std::atomic<int> stop;
    std::atomic<uint32_t> tags;
    std::atomic<unsigned long long> blocks, refused;
} crowd;

typedef struct block {
    void *p;
    size_t bytes;
    uint32_t tag;
} block;

static size_t some_bytes(dice *d) { return ((size_t)512 << roll_below(d, 13)) + 4 * roll_below(d, 1000); }

/* Nothing here but galloc waits or looks at events: it is for galloc to leave the captures alone. */
static void live_in(crowd *c, uint64_t number)
{
    dice d = {number * 7919 + test_seed()};
    cudaStream_t s = stream_new(), t = stream_new();
    block held[HELD] = {};
    while (!c->stop) {
        block *b = &held[roll_below(&d, HELD)];
        if (b->p) {
            device_check(s, b->p, b->bytes, b->tag);
            if (roll_below(&d, 8) == 0) {
                order(s, t);
                device_check(t, b->p, b->bytes, b->tag);
                OK(galloc_record_stream(b->p, t));
            }
            OK(galloc_free(b->p, s));
        }
        b->p = NULL;
        b->bytes = some_bytes(&d);
        b->tag = ++c->tags;
        if (galloc_pool_malloc(c->pool, &b->p, b->bytes, s) == cudaSuccess) {
            device_fill(s, b->p, b->bytes, b->tag);
            c->blocks++;
        } else {
            c->refused++;
        }
        if (roll_below(&d, 500) == 0) (void)galloc_pool_trim(c->pool, mib(24), NULL);
    }
    for (int i = 0; i < HELD; i++) {
        if (held[i].p) device_check(s, held[i].p, held[i].bytes, held[i].tag);
        OK(galloc_free(held[i].p, s));
    }
    OK(galloc_stream_retire(s));
    OK(galloc_stream_retire(t));
}

/* ---- the graphs -------------------------------------------------------------------------------------------------- */

typedef struct graph {
    cudaGraphExec_t exec;
    block result; /* that each launch fills */
} graph;

typedef struct studio {
    galloc_pool *pool;
    cudaStream_t s, fork, late; /* captured; drawn in; where graphs are launched, one after the other */
    dice d;
    uint32_t tags;
    unsigned long long captured, launched, refused;
} studio;

/* Within the capture: gets, fills, compares and frees. */
static void pass_by(studio *w, cudaStream_t stream)
{
    void *p = NULL;
    size_t bytes = some_bytes(&w->d);
    uint32_t tag = ++w->tags;
    if (galloc_pool_malloc(w->pool, &p, bytes, stream) != cudaSuccess) {
        w->refused++;
        return;
    }
    device_fill(stream, p, bytes, tag);
    device_check(stream, p, bytes, tag);
    OK(galloc_free(p, stream));
}

static graph capture_one(studio *w)
{
    graph g = {};
    cudaGraph_t made = NULL;
    OK(cudaStreamBeginCapture(w->s, cudaStreamCaptureModeGlobal));
    for (int i = 0; i < 6; i++) pass_by(w, w->s);
    order(w->s, w->fork);
    for (int i = 0; i < 6; i++) pass_by(w, i % 2 ? w->s : w->fork);
    order(w->fork, w->s);
    g.result.bytes = some_bytes(&w->d);
    g.result.tag = ++w->tags;
    if (galloc_pool_malloc(w->pool, &g.result.p, g.result.bytes, w->s) == cudaSuccess)
        device_fill(w->s, g.result.p, g.result.bytes, g.result.tag);
    if (!OK(cudaStreamEndCapture(w->s, &made))) {
        (void)cudaGetLastError();
        return g;
    }
    OK(cudaGraphInstantiate(&g.exec, made, 0));
    OK(cudaGraphDestroy(made));
    w->captured++;
    return g;
}

static void launch(studio *w, const graph *g)
{
    if (!g->exec) return;
    OK(cudaGraphLaunch(g->exec, w->late));
    if (g->result.p) device_check(w->late, g->result.p, g->result.bytes, g->result.tag);
    w->launched++;
}

/* The result goes before its graph, or after. */
static void graph_end(studio *w, graph *g)
{
    if (roll_below(&w->d, 2)) {
        OK(galloc_free(g->result.p, w->late));
        g->result.p = NULL;
    }
    launch(w, g); /* it writes there in either case */
    if (g->exec) OK(cudaGraphExecDestroy(g->exec));
    OK(galloc_free(g->result.p, w->late));
    memset(g, 0, sizeof *g);
}

static void run_round(const char *name, int expandable, int grouped)
{
    crowd c = {};
    studio w = {};
    graph graphs[GRAPHS] = {};
    galloc_graph *group = NULL;
    std::vector<std::thread> threads;
    int ours = seconds / 4 > 0 ? seconds / 4 : 1;
    w.pool = c.pool = pool_new(expandable, mib(72), REUSE_ALL);
    w.d.state = test_seed() + (uint64_t)grouped;
    w.s = stream_new();
    w.fork = stream_new();
    w.late = stream_new();
    for (int i = 0; i < CROWD; i++) threads.push_back(std::thread(live_in, &c, (uint64_t)i + 1));
    if (grouped) OK(galloc_graph_begin(&group, w.pool, w.s));
    std::chrono::steady_clock::time_point end = std::chrono::steady_clock::now() + std::chrono::seconds(ours);
    while (std::chrono::steady_clock::now() < end) {
        uint32_t i = roll_below(&w.d, GRAPHS);
        if (graphs[i].exec) graph_end(&w, &graphs[i]);
        graphs[i] = capture_one(&w);
        for (int n = 0; n < 6; n++) launch(&w, &graphs[roll_below(&w.d, GRAPHS)]);
    }
    c.stop = 1;
    for (size_t i = 0; i < threads.size(); i++) threads[i].join();
    size_t owned = stats_of(w.pool).graph_bytes;
    if (grouped) OK(galloc_graph_end(group));
    for (int i = 0; i < GRAPHS; i++) graph_end(&w, &graphs[i]);
    if (grouped) OK(galloc_graph_release(group, w.late));
    OK(cudaDeviceSynchronize());
    unsigned long long wrong = device_wrong();
    galloc_stats stats = stats_of(w.pool);
    printf("%s: %llu captures, %llu launches, %llu blocks of the crowd, %llu wrong words\n", name, w.captured,
           w.launched, c.blocks.load(), wrong);
    printf("    %llu and %llu requests refused, %zu KiB owned by %d graphs at the end, %llu pages moved, %llu waits\n",
           w.refused, c.refused.load(), owned >> 10, (int)GRAPHS, (unsigned long long)stats.moves,
           (unsigned long long)stats.waits);
    EXPECT_EQ(wrong, 0);
    EXPECT(w.captured > 0 && w.launched > 0 && c.blocks > 0);
    EXPECT_EQ(stats.live.current, 0);
    pool_end(w.pool);
    finish();
}

TEST(graphs_keep_their_memory) { run_round("pages", 1, 0); }

TEST(graphs_keep_their_memory_in_fixed_segments) { run_round("fixed segments", 0, 0); }

TEST(graphs_of_a_group_keep_their_memory) { run_round("a group, pages", 1, 1); }

TEST(graphs_of_a_group_keep_their_memory_in_fixed_segments) { run_round("a group, fixed segments", 0, 1); }

/* ---- the end of a graph ------------------------------------------------------------------------------------------ */

/* Milliseconds until the pool knows that no graph owns anything; -1: not within two seconds. */
static double ms_until_known(galloc_pool *pool)
{
    std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();
    for (;;) {
        double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
        if (!stats_of(pool).graph_bytes) return ms;
        if (ms > 2000) return -1;
        std::this_thread::yield();
    }
}

enum { BY_HANDLE, BY_INSTANCE, BY_LAUNCH, BY_CLONE, BY_ABORT, ENDS };
static const char *const end_names[] = {"its handle", "an instance", "a launch", "a clone", "the broken capture"};

/* The last of a graph goes: not before that, and soon after, its memory is everybody's. */
TEST(the_end_of_a_graph_is_told)
{
    for (int how = 0; how < ENDS; how++) {
        galloc_pool *pool = pool_new(1, mib(16), REUSE_ALL);
        cudaStream_t s = stream_new(), t = stream_new();
        cudaGraph_t made = NULL, clone = NULL;
        cudaGraphExec_t exec = NULL;
        unsigned long long id = 0;
        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
        void *p = get(pool, mib(16), s), *q = NULL;
        device_fill(s, p, mib(16), 1);
        OK(galloc_free(p, s));
        if (how == BY_ABORT) {
            EXPECT(cudaStreamGetId(s, &id) != cudaSuccess);
            EXPECT(cudaStreamEndCapture(s, &made) != cudaSuccess);
            (void)cudaGetLastError();
#ifdef GALLOC_ON_SIM
            sim_findings_clear();
#endif
        } else {
            OK(cudaStreamEndCapture(s, &made));
            if (how == BY_CLONE) OK(cudaGraphClone(&clone, made));
            if (how != BY_HANDLE) OK(cudaGraphInstantiate(&exec, clone ? clone : made, 0));
            EXPECT_EQ(galloc_pool_malloc(pool, &q, mib(1), t), cudaErrorMemoryAllocation);
            OK(cudaGraphDestroy(made));
            if (clone) EXPECT_EQ(stats_of(pool).graph_bytes, mib(16));
            if (clone) OK(cudaGraphDestroy(clone));
            if (exec) EXPECT_EQ(stats_of(pool).graph_bytes, mib(16));
            if (how == BY_LAUNCH) {
                gate g = gate_close(s);
                OK(cudaGraphLaunch(exec, s));
                OK(cudaGraphExecDestroy(exec));
                std::this_thread::sleep_for(std::chrono::milliseconds(20));
                EXPECT_EQ(stats_of(pool).graph_bytes, mib(16));
                gate_open(g);
                OK(cudaStreamSynchronize(s));
            } else if (exec) {
                OK(cudaGraphExecDestroy(exec));
            }
        }
        double ms = ms_until_known(pool);
        printf("told %.3f ms after the end of %s\n", ms, end_names[how]);
        EXPECT(ms >= 0);
        OK(galloc_free(get(pool, mib(16), t), t));
        pool_end(pool);
        OK(cudaStreamDestroy(s));
        OK(cudaStreamDestroy(t));
    }
    finish();
}

/* A pool that is ended right after its graphs were destroyed. */
TEST(a_pool_ends_right_after_its_graphs)
{
    for (int i = 0; i < 50; i++) {
        galloc_pool *pool = pool_new(i % 2, mib(64), REUSE_ALL);
        cudaStream_t s = stream_new();
        cudaGraph_t made = NULL;
        cudaGraphExec_t exec = NULL;
        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
        void *p = get(pool, mib(4), s);
        device_fill(s, p, mib(4), 1);
        device_check(s, p, mib(4), 1);
        OK(galloc_free(p, s));
        OK(cudaStreamEndCapture(s, &made));
        OK(cudaGraphInstantiate(&exec, made, 0));
        for (int n = 0; n < 10; n++) OK(cudaGraphLaunch(exec, s));
        EXPECT_EQ(galloc_pool_destroy(pool), cudaErrorNotPermitted);
        for (int n = 0; n < 10; n++) OK(cudaGraphLaunch(exec, s));
        OK(cudaGraphDestroy(made));
        OK(cudaGraphExecDestroy(exec));
        pool_end(pool);
        OK(cudaStreamDestroy(s));
    }
    finish();
}

int main(int argc, char **argv)
{
    if (argc > 2 && !strcmp(argv[1], "--seconds") && atoi(argv[2]) > 0) seconds = atoi(argv[2]), argc = 1;
    int status = work_start();
    return status ? status : test_main(argc, argv);
}
