/* test_known.c - mistakes that other allocators made between streams, each as a program that shows it: RAPIDS RMM's
   (its issues and pull requests by number), CUB's and PyTorch's. Each test says what went wrong there. Only the public
   interface is used. */

#include "setup.h"

enum { ANY_REUSE = GALLOC_REUSE_COMPLETED | GALLOC_REUSE_FOLLOWED | GALLOC_REUSE_WAIT };

/* A pool that holds all it may, so that reuse is the only way to more memory. */
static galloc_pool *full_pool(size_t limit, int reuse)
{
    galloc_config config = config_limit(limit);
    config.reuse = reuse;
    galloc_pool *pool = pool_new(&config);
    OK(galloc_pool_reserve(pool, limit));
    return pool;
}

/* The pool knows the stream from now on, so that there is somebody to record events for. */
static void introduce(galloc_pool *pool, cudaStream_t stream) { OK(galloc_free(get(pool, 512, stream), stream)); }

/* ---- RMM 2489: the mark lost in a merge -------------------------------------------------------------------------- */

/* T gets what S freed by a wait, merged with memory of its own, and frees it: the merged list had T's event only, which
   lay before the wait, and a third stream waited for nothing. */
TEST(rmm_2489_mark_lost_in_a_merge)
{
    for (int first = 0; first < 2; first++) { /* which of the two lies at the lower address */
        for (int reuse = GALLOC_REUSE_WAIT; reuse <= ANY_REUSE; reuse++) {
            begin_still();
            cudaStream_t s = stream_new(), t = stream_new(), u = stream_new();
            galloc_pool *pool = full_pool(MIB(8), reuse);
            void *low = get_used(pool, MIB(4), first ? s : t, 1), *high = get_used(pool, MIB(4), first ? t : s, 1);
            OK(galloc_free(low, first ? s : t));
            OK(galloc_free(high, first ? t : s));
            void *all = get(pool, MIB(8), t);
            OK(galloc_free(all, t));
            void *third = get_used(pool, MIB(8), u, 2);
            EXPECT_EQ(sim_findings(SIM_RACE), 0);
            OK(galloc_free(third, u));
            pool_end(pool);
            finish();
        }
    }
}

/* ---- RMM 2251, 2252: the handle that comes back ------------------------------------------------------------------ */

/* A stream is destroyed while its work runs, and the next one has its handle: what was known of the handle was taken
   for the new stream's. */
TEST(rmm_2251_handle_that_comes_back)
{
    for (int retire = 0; retire < 2; retire++) {
        begin_still();
        cudaStream_t s = stream_new(), keep = stream_new();
        galloc_pool *pool = full_pool(MIB(4), ANY_REUSE);
        introduce(pool, keep);
        OK(galloc_free(get_used(pool, MIB(4) - 512, s, 1), s));
        if (retire) OK(galloc_stream_retire(s));
        stream_end(s);
        cudaStream_t again = stream_new();
        EXPECT(again == s);
        void *p = get_used(pool, MIB(4) - 512, again, 2);
        EXPECT_EQ(sim_findings(SIM_RACE), 0);
        OK(galloc_free(p, again));
        pool_end(pool);
        finish();
    }
}

/* The new stream may even be of another device, where the old one's event cannot be recorded. */
TEST(rmm_2252_handle_that_comes_back_on_another_device)
{
    begin_with_devices(2, SIM_PACE_STILL);
    galloc_pool *pool = full_pool(MIB(8), ANY_REUSE);
    cudaStream_t keep = stream_new(), s = stream_new();
    introduce(pool, keep);
    OK(galloc_free(get_used(pool, MIB(4), s, 1), s)); /* leaves an event for what comes next on the stream */
    stream_end(s);
    OK(cudaSetDevice(1));
    cudaStream_t again = stream_new();
    EXPECT(again == s);
    OK(galloc_free(get(pool, MIB(8) - 512, again), again));
    OK(galloc_free(get(pool, MIB(4), again), again));
    EXPECT_EQ(sim_findings(SIM_BAD_EVENT), 0);
    stream_end(again);
    OK(cudaSetDevice(0));
    pool_end(pool);
    finish();
}

/* ---- RMM 510: the list of a destroyed stream --------------------------------------------------------------------- */

/* Streams allocate and free, and are destroyed; then somebody takes what lies in their lists: it crashed on a stream,
   or an event, that was gone. */
TEST(rmm_510_list_of_a_destroyed_stream)
{
    enum { N = 8 };
    for (int pace = -1; pace <= 1; pace++) {
        sim_options options = sim_defaults();
        options.pace = pace;
        begin_with(options);
        cudaStream_t s[N], rest = stream_new();
        void *p[N];
        galloc_pool *pool = full_pool(MIB(2) * N, ANY_REUSE);
        for (int i = 0; i < N; i++) s[i] = stream_new();
        for (int i = 0; i < N; i++) p[i] = get_used(pool, MIB(2), s[i], 1);
        for (int i = 0; i < N; i++) OK(galloc_free(p[i], s[i]));
        for (int i = 0; i < N; i++) stream_end(s[i]);
        void *q = get_used(pool, MIB(4), rest, 2), *all;
        OK(galloc_free(q, rest));
        all = get_used(pool, MIB(2) * N, cudaStreamLegacy, 3);
        OK(galloc_free(all, cudaStreamLegacy));
        pool_end(pool);
        finish();
    }
}

/* ---- RMM 1306, 1333: per-thread default streams on several devices ----------------------------------------------- */

/* One thread uses its default stream on one device after the other: the handle is the same, the streams are not, and an
   event kept for the thread belonged to the device that came first. */
TEST(rmm_1306_per_thread_streams_on_several_devices)
{
    for (int pools = 1; pools <= 2; pools++) { /* one for both devices' streams; one for each */
        begin_with_devices(2, SIM_PACE_STILL);
        galloc_config config = config_limit(MIB(8));
        galloc_pool *pool[2];
        for (int d = 0; d < pools; d++) {
            config.device = d;
            pool[d] = pool_new(&config);
        }
        for (int i = 0; i < 8; i++) {
            int d = i % 2;
            galloc_pool *mine = pool[d % pools];
            OK(cudaSetDevice(d));
            cudaStream_t other = stream_new();
            introduce(mine, other);
            void *p = get(mine, MIB(6), cudaStreamPerThread);
            if (d < pools) put(cudaStreamPerThread, p, MIB(6), 1);
            OK(galloc_free(p, cudaStreamPerThread));
            OK(galloc_free(get(mine, MIB(7), cudaStreamPerThread), cudaStreamPerThread));
            stream_end(other);
        }
        OK(cudaSetDevice(0));
        EXPECT_EQ(sim_findings(SIM_BAD_EVENT), 0);
        for (int d = 0; d < pools; d++) pool_end(pool[d]);
        finish();
    }
}

/* A pool in memory that both devices may use: a block goes from one's default stream to the other's. */
TEST(rmm_1333_per_thread_streams_that_share_memory)
{
    begin_with_devices(2, SIM_PACE_STILL);
    OK(cudaSetDevice(1));
    OK(cudaDeviceEnablePeerAccess(0, 0));
    OK(cudaSetDevice(0));
    galloc_config config = config_fixed();
    config.memory_limit = MIB(8);
    galloc_pool *pool = pool_new(&config);
    for (int d = 0; d < 2; d++) {
        OK(cudaSetDevice(d));
        void *p = get_used(pool, MIB(6), cudaStreamPerThread, (uint64_t)d);
        OK(galloc_free(p, cudaStreamPerThread));
    }
    EXPECT_EQ(sim_findings(SIM_RACE), 0);
    OK(cudaSetDevice(0));
    pool_end(pool);
    finish();
}

/* ---- CUB 156: the event recorded after the block is visible ------------------------------------------------------ */

static struct {
    pthread_t self;
    galloc_pool *pool;
    cudaStream_t t;
    int times;
} taker;

static void *take(void *arg)
{
    OK(galloc_free(get_used(taker.pool, MIB(4), taker.t, 2), taker.t));
    return arg;
}

/* Another thread asks for the memory just before each event is recorded. */
static void take_before_the_record(const char *function)
{
    pthread_t thread;
    if (strcmp(function, "cuEventRecord") || !pthread_equal(taker.self, pthread_self())) return;
    if (taker.times++) return;
    EXPECT_EQ(pthread_create(&thread, NULL, take, NULL), 0);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
}

/* The block stood in the free list with an event that was not recorded yet, and so seemed to be done. */
TEST(cub_156_event_recorded_after_the_block_is_visible)
{
    for (int again = 0; again < 2; again++) { /* an event that was never recorded; one that was, and is done */
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = full_pool(MIB(4), GALLOC_REUSE_COMPLETED);
        OK(galloc_free(get(pool, MIB(1), t), t));
        if (again) {
            OK(galloc_free(get_used(pool, MIB(4), s, 1), s));
            sim_run(-1);
            OK(galloc_free(get(pool, MIB(4), t), t));
        }
        void *p = get_used(pool, MIB(4), s, 1);
        taker.self = pthread_self();
        taker.pool = pool;
        taker.t = t;
        taker.times = 0;
        sim_hook(take_before_the_record, NULL);
        OK(galloc_free(p, s));
        sim_hook(NULL, NULL);
        EXPECT(taker.times > 0);
        EXPECT_EQ(sim_findings(SIM_RACE), 0);
        pool_end(pool);
        finish();
    }
}

/* ---- PyTorch 189504: the free set not searched again after waiting ----------------------------------------------- */

/* The block that would do is freed, but a recorded stream still uses it. The allocator waited for that stream, so that
   the block was free, then asked the device for new memory instead of looking, and said that there is none. */
TEST(pytorch_189504_not_searched_again_after_waiting)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new(), endless = stream_new();
    galloc_pool *pool = full_pool(MIB(4), GALLOC_REUSE_COMPLETED);
    void *p = get_used(pool, MIB(3), s, 1);
    sim_hold(endless, 1); /* to wait for the whole device is no way out */
    OK(galloc_free(get_used(pool, 512, endless, 1), endless));
    order(s, t);
    OK(galloc_record_stream(p, t));
    look(t, p, MIB(3), 1);
    OK(galloc_free(p, s));
    void *q = get_used(pool, MIB(3), t, 2);
    EXPECT(q == p);
    EXPECT_EQ(sim_findings(SIM_DEADLOCK), 0);
    EXPECT_EQ(log_lines, 0);
    sim_hold(endless, 0);
    OK(galloc_free(q, t));
    pool_end(pool);
    finish();
}

/* The same where there is only the device to wait for: nothing was recorded, as no other stream was known. */
TEST(pytorch_189504_not_searched_again_after_waiting_for_the_device)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = full_pool(MIB(4), GALLOC_REUSE_COMPLETED);
    OK(galloc_free(get_used(pool, MIB(4), s, 1), s));
    long created = sim_calls("cuMemCreate");
    OK(galloc_free(get_used(pool, MIB(4), t, 2), t));
    EXPECT_EQ(sim_calls("cuMemCreate"), created); /* what was free was found, not replaced */
    EXPECT_EQ(log_lines, 0);
    pool_end(pool);
    finish();
}

/* ---- the mark taken too late ------------------------------------------------------------------------------------- */

/* S frees, then waits for a flag that T sets after it got the memory. An event recorded on S only when T asks lies
   behind that wait, and neither goes on. */
TEST(mark_taken_too_late_deadlocks)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    void *flag = NULL;
    OK(cudaMallocHost(&flag, sizeof(uint32_t)));
    *(uint32_t *)flag = 0;
    CUdeviceptr address = (CUdeviceptr)(uintptr_t)flag;
    galloc_pool *pool = full_pool(MIB(4), GALLOC_REUSE_WAIT | GALLOC_REUSE_FOLLOWED);
    introduce(pool, t);
    void *p = get_used(pool, MIB(3), s, 1);
    OK(galloc_free(p, s));
    EXPECT_EQ(cuStreamWaitValue32(s, address, 1, CU_STREAM_WAIT_VALUE_EQ), CUDA_SUCCESS);
    p = get_used(pool, MIB(3), t, 2);
    EXPECT_EQ(cuStreamWriteValue32(t, address, 1, 0), CUDA_SUCCESS);
    sim_run(-1);
    EXPECT_EQ(sim_pending(), 0);
    EXPECT_EQ(sim_findings(SIM_DEADLOCK), 0);
    OK(galloc_free(p, t));
    OK(cudaFreeHost(flag));
    pool_end(pool);
    finish();
}

/* ---- capture ----------------------------------------------------------------------------------------------------- */

/* A captured stream must not be given memory that other work still uses: the graph runs later, and elsewhere, and no
   wait of the capture's protects it. Where there is no other memory the request fails; the capture goes on, and what
   is found to be done with meanwhile it may have. */
TEST(pending_block_given_to_a_capture)
{
    for (int own = 0; own < 2; own++) { /* freed on another stream; on the captured one before the capture */
        begin_still();
        cudaStream_t s = stream_new(), captured = stream_new(), late = stream_new();
        galloc_pool *pool = full_pool(MIB(4), ANY_REUSE);
        cudaGraph_t graph = NULL;
        cudaGraphExec_t exec = NULL;
        introduce(pool, late);
        void *p = get_used(pool, MIB(4), own ? captured : s, 1), *q = &graph;
        OK(galloc_free(p, own ? captured : s));
        OK(cudaStreamBeginCapture(captured, cudaStreamCaptureModeRelaxed));
        long waits = sim_calls("cuStreamWaitEvent"), records = sim_calls("cuEventRecord");
        long blocking = sim_blocking_calls();
        EXPECT_EQ(galloc_pool_malloc(pool, &q, MIB(4), captured), cudaErrorMemoryAllocation);
        EXPECT(q == NULL);
        EXPECT(sim_calls("cuStreamWaitEvent") == waits && sim_calls("cuEventRecord") == records);
        EXPECT_EQ(sim_blocking_calls(), blocking);
        sim_run(-1);
        q = get_used(pool, MIB(4), captured, 2);
        OK(cudaStreamEndCapture(captured, &graph));
        EXPECT(graph != NULL);
        OK(cudaGraphInstantiate(&exec, graph, 0));
        OK(cudaGraphLaunch(exec, late));
        order(late, s);
        OK(galloc_free(q, s));
        OK(cudaGraphExecDestroy(exec));
        OK(cudaGraphDestroy(graph));
        EXPECT_EQ(sim_findings(SIM_RACE), 0);
        sim_run(-1);
        pool_end(pool);
        finish();
    }
}

/* While one thread captures, another misses, so that events are asked how far they are. A plain cudaEventQuery, in
   whatever thread, ends every capture in global mode. */
static void *miss(void *arg)
{
    OK(galloc_free(get_used(taker.pool, MIB(4), taker.t, 2), taker.t));
    return arg;
}

TEST(capture_broken_by_another_threads_query)
{
    for (int reuse = 0; reuse <= ANY_REUSE; reuse++) {
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new(), captured = stream_new();
        galloc_pool *pool = full_pool(MIB(4), reuse);
        pthread_t thread;
        cudaGraph_t graph = NULL;
        void *own = NULL;
        OK(cudaMalloc(&own, 512));
        OK(galloc_free(get(pool, MIB(1), t), t));
        OK(galloc_free(get_used(pool, MIB(4), s, 1), s));
        taker.pool = pool;
        taker.t = t;
        OK(cudaStreamBeginCapture(captured, cudaStreamCaptureModeGlobal));
        put(captured, own, 512, 1);
        long queries = sim_calls("cuEventQuery");
        EXPECT_EQ(pthread_create(&thread, NULL, miss, NULL), 0);
        EXPECT_EQ(pthread_join(thread, NULL), 0);
        if (reuse & GALLOC_REUSE_COMPLETED) EXPECT(sim_calls("cuEventQuery") > queries);
        put(captured, own, 512, 2);
        OK(cudaStreamEndCapture(captured, &graph));
        EXPECT(graph != NULL);
        if (graph) OK(cudaGraphDestroy(graph));
        EXPECT_EQ(sim_findings(SIM_CAPTURE_BROKEN), 0);
        OK(cudaFree(own));
        pool_end(pool);
        finish();
    }
}

TEST_MAIN()
