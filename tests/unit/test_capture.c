/* test_capture.c - galloc on streams that are being captured: whose the memory of a graph is, and for how long. What is
   captured is launched, and the ledger looks at every access of every launch: memory that is given to somebody else too
   early is a race. Only the public interface is used, but for calls of the driver's that a test puts itself before. */

#include "setup.h"

enum { ANY_REUSE = GALLOC_REUSE_COMPLETED | GALLOC_REUSE_FOLLOWED | GALLOC_REUSE_WAIT };

static const enum cudaStreamCaptureMode modes[] = {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal,
                                                   cudaStreamCaptureModeRelaxed};

static void capture_begin(cudaStream_t stream) { OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal)); }

static cudaGraph_t capture_end(cudaStream_t stream)
{
    cudaGraph_t graph = NULL;
    OK(cudaStreamEndCapture(stream, &graph));
    EXPECT(graph != NULL);
    return graph;
}

/* The end of a capture as an instance, which alone keeps the graph. */
static cudaGraphExec_t capture_ready(cudaStream_t stream)
{
    cudaGraphExec_t exec = NULL;
    cudaGraph_t graph = capture_end(stream);
    OK(cudaGraphInstantiate(&exec, graph, 0));
    OK(cudaGraphDestroy(graph));
    return exec;
}

static void launch(cudaGraphExec_t exec, cudaStream_t stream) { OK(cudaGraphLaunch(exec, stream)); }

static void exec_end(cudaGraphExec_t exec) { OK(cudaGraphExecDestroy(exec)); }

/* Gets, uses and frees. */
static void *pass(galloc_pool *pool, size_t bytes, cudaStream_t stream, uint64_t tag)
{
    void *ptr = get_used(pool, bytes, stream, tag);
    look(stream, ptr, bytes, tag);
    OK(galloc_free(ptr, stream));
    return ptr;
}

/* A call that must not get anything. */
static void refused(galloc_pool *pool, size_t bytes, cudaStream_t stream)
{
    void *ptr = pool;
    EXPECT_EQ(galloc_pool_malloc(pool, &ptr, bytes, stream), cudaErrorMemoryAllocation);
    EXPECT(ptr == NULL);
}

/* The bytes may be had at once by whoever comes. */
static void expect_free_for_all(galloc_pool *pool, size_t bytes, cudaStream_t stream)
{
    OK(galloc_free(get_used(pool, bytes, stream, 77), stream));
}

/* The pools that most tests are made with: pages and fixed segments, with a limit or SIZE_MAX. */
static galloc_pool *pool_of(int fixed, size_t limit)
{
    galloc_config config = config_limit(limit);
    config.expandable_segments = !fixed;
    return pool_new(&config);
}

/* ---- allocating -------------------------------------------------------------------------------------------------- */

TEST(every_call_serves_a_captured_stream)
{
    for (int round = 0; round < 12; round++) { /* mode, segments, a blocking stream */
        begin();
        cudaStream_t s = stream_new(), captured = NULL;
        OK(cudaStreamCreateWithFlags(&captured, round / 6 ? cudaStreamDefault : cudaStreamNonBlocking));
        galloc_pool *pool = pool_of(round / 3 % 2, SIZE_MAX);
        galloc_request request = {0};
        void *p[6] = {NULL};
        cudaStream_t both[2] = {captured, s};
        request.bytes = 100;
        request.stream = captured;
        request.alignment = 4096;
        request.tag = 5;
        request.pool = pool;
        void *old = get_used(pool, MIB(1), s, 9);
        order(s, captured);
        OK(cudaStreamSynchronize(s));
        OK(cudaStreamBeginCapture(captured, modes[round % 3]));
        OK(galloc_malloc(&p[0], MIB(3), captured));
        OK(galloc_pool_malloc(pool, &p[1], 1000, captured));
        OK(galloc_alloc(&p[2], &request));
        EXPECT_EQ((uintptr_t)p[2] % 4096, 0);
        EXPECT_EQ(info_of(p[2]).tag, 5);
        OK(galloc_malloc_growable(&p[3], MIB(2), MIB(20), captured));
        p[4] = get(pool, MIB(2), captured);
        p[5] = get(pool, 1000, captured);
        put(captured, p[0], MIB(3), 1);
        put(captured, p[1], 1000, 2);
        put(captured, p[2], 100, 3);
        put(captured, p[3], MIB(2), 4);
        put(captured, p[4], MIB(2), 5);
        look(captured, old, MIB(1), 9);
        OK(galloc_record_stream(old, captured));
        for (int i = 0; i < 4; i++) OK(galloc_free(p[i], captured));
        OK(galloc_free_after(p[4], both, 2));
        OK(galloc_free(NULL, captured));
        void *none = pool;
        OK(galloc_malloc(&none, 0, captured));
        EXPECT(none == NULL);
        EXPECT_EQ(log_lines, 0);
        cudaGraphExec_t exec = capture_ready(captured);
        OK(cudaPeekAtLastError());
        for (int i = 0; i < 3; i++) launch(exec, s);
        OK(galloc_free(old, s));
        OK(galloc_free(p[5], s));
        expect_healthy(pool, 0);
        exec_end(exec);
        sim_run(-1);
        pool_end(pool);
        finish();
    }
}

/* The same stream, the same capture: at once, whatever the pace. */
TEST(a_graph_reuses_its_own_memory_in_captured_order)
{
    for (int fixed = 0; fixed < 2; fixed++) {
        begin_still();
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_of(fixed, MIB(8));
        capture_begin(s);
        for (uint64_t i = 0; i < 20; i++) (void)pass(pool, MIB(7), s, i);
        void *p = get_used(pool, MIB(2), s, 1), *q = get_used(pool, MIB(5), s, 2);
        look(s, p, MIB(2), 1);
        look(s, q, MIB(5), 2);
        OK(galloc_free(q, s));
        OK(galloc_free(p, s));
        (void)pass(pool, MIB(7), s, 3);
        EXPECT_EQ(galloc_pool_check(pool), 0);
        cudaGraphExec_t exec = capture_ready(s);
        for (int i = 0; i < 4; i++) launch(exec, s);
        exec_end(exec);
        EXPECT(stats_of(pool).reserved.peak <= MIB(8));
        EXPECT_EQ(stats_of(pool).waits, 0);
        sim_run(-1);
        pool_end(pool);
        finish();
    }
}

/* Not what a graph freed, by whoever asks, however short memory is; also not after everything has been waited for. */
TEST(what_a_graph_freed_is_nobody_elses)
{
    for (int round = 0; round < 8; round++) { /* segments, pace, is it launched meanwhile */
        sim_options options = sim_defaults();
        options.pace = round / 2 % 2 ? SIM_PACE_PROMPT : SIM_PACE_STILL;
        begin_with(options);
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = pool_of(round % 2, MIB(12));
        capture_begin(s);
        (void)pass(pool, MIB(8), s, 1);
        cudaGraphExec_t exec = capture_ready(s);
        for (int i = 0; i < 3; i++) {
            if (round / 4) launch(exec, t);
            EXPECT_EQ(stats_of(pool).graph_bytes, MIB(8));
            refused(pool, MIB(6), s);
            refused(pool, MIB(6), t);
            EXPECT(strstr(galloc_last_message(), "graphs own 8388608") != NULL);
            EXPECT_EQ(galloc_pool_reserve(pool, MIB(6)), cudaErrorMemoryAllocation);
            OK(galloc_pool_trim(pool, 0, NULL));
            EXPECT_EQ(stats_of(pool).reserved.current, MIB(8));
            (void)pass(pool, MIB(4), s, 2);
            (void)pass(pool, MIB(4), t, 3);
            OK(cudaDeviceSynchronize());
        }
        capture_begin(s); /* nor another graph's */
        refused(pool, MIB(6), s);
        OK(cudaGraphDestroy(capture_end(s)));
        launch(exec, s);
        exec_end(exec);
        OK(cudaDeviceSynchronize());
        EXPECT_EQ(stats_of(pool).graph_bytes, 0);
        (void)pass(pool, MIB(12), t, 4);
        pool_end(pool);
        finish();
    }
}

/* What comes in between: other memory of the pool goes on moving and being reused, small and large. */
TEST(streams_allocate_between_the_launches)
{
    for (int round = 0; round < 6; round++) {
        sim_options options = sim_defaults();
        options.seed = test_seed() + (uint64_t)round;
        options.lag = round % 3 ? 30 : 0;
        begin_with(options);
        galloc_config config = config_limit(MIB(64));
        config.overhead = 0;
        config.expandable_segments = round < 4;
        galloc_pool *pool = pool_new(&config);
        cudaStream_t s = stream_new(), t = stream_new();
        dice d = {(uint64_t)round + 1};
        void *held[8] = {NULL};
        capture_begin(s);
        void *p = get_used(pool, MIB(3), s, 1), *q = get_used(pool, 4000, s, 2);
        (void)pass(pool, MIB(5), s, 3);
        look(s, p, MIB(3), 1);
        OK(galloc_free(p, s));
        (void)pass(pool, MIB(9), s, 4);
        look(s, q, 4000, 2);
        cudaGraphExec_t exec = capture_ready(s);
        size_t owned = stats_of(pool).graph_bytes;
        for (int i = 0; i < 200; i++) {
            uint32_t k = roll_below(&d, 8);
            EXPECT_EQ(stats_of(pool).graph_bytes, owned); /* it takes nothing of its neighbours' */
            cudaStream_t on = k % 2 ? t : s;
            if (held[k]) OK(galloc_free(held[k], on));
            held[k] = NULL;
            void *r = NULL;
            size_t bytes = roll_bytes(&d, MIB(12));
            if (galloc_pool_malloc(pool, &r, bytes, on) == cudaSuccess) put(on, held[k] = r, bytes, (uint64_t)i);
            if (i % 5 == 0) launch(exec, i % 10 ? s : t);
        }
        look(s, q, 4000, 2); /* after the last launch on s, and that on t is the same instance's */
        OK(galloc_free(q, s));
        exec_end(exec);
        for (int i = 0; i < 8; i++)
            if (held[i]) OK(galloc_free(held[i], i % 2 ? t : s));
        EXPECT_EQ(sim_findings(SIM_RACE) + sim_findings(SIM_HOLE) + sim_findings(SIM_UNMAP_IN_USE), 0);
        sim_run(-1);
        expect_healthy(pool, 0);
        pool_end(pool);
        finish();
    }
}

/* Not by a block as it is, not by pages that move, not by old mappings: what others have not done with a capture does
   not get. What they have done with it gets, also by moves. */
TEST(a_capture_takes_only_what_is_complete)
{
    for (int round = 0; round < 8; round++) { /* blocking streams, own memory, done or not */
        begin_still();
        galloc_config config = config_limit(MIB(18));
        config.overhead = 0;
        galloc_pool *pool = pool_new(&config);
        cudaStream_t s = NULL, t = stream_new();
        OK(galloc_free(get(pool, MIB(2), t), t)); /* a second stream is in play */
        OK(cudaStreamCreateWithFlags(&s, round % 2 ? cudaStreamDefault : cudaStreamNonBlocking));
        cudaStream_t before = round / 2 % 2 ? s : round % 2 ? cudaStreamLegacy : t;
        void *p[8];
        for (int i = 0; i < 8; i++) p[i] = get_used(pool, MIB(2), before, 1);
        for (int i = 0; i < 8; i += 2) OK(galloc_free(p[i], before)); /* in four pieces */
        OK(galloc_stream_retire(before));
        if (round / 4) sim_run(-1);
        capture_begin(s);
        long waits = sim_calls("cuStreamWaitEvent"), blocking = sim_blocking_calls();
        uint64_t moves = stats_of(pool).moves;
        if (round / 4) {
            (void)pass(pool, MIB(8), s, 2);
            EXPECT(stats_of(pool).moves > moves);
        } else {
            refused(pool, MIB(8), s);
            refused(pool, MIB(2) + 512, s);
            EXPECT_EQ(stats_of(pool).moves, moves);
        }
        EXPECT_EQ(sim_calls("cuStreamWaitEvent"), waits);
        EXPECT_EQ(sim_blocking_calls(), blocking);
        cudaGraphExec_t exec = capture_ready(s);
        launch(exec, t);
        launch(exec, t);
        exec_end(exec);
        for (int i = 1; i < 8; i += 2) OK(galloc_free(p[i], before));
        EXPECT_EQ(sim_findings(SIM_RACE), 0);
        sim_run(-1);
        pool_end(pool);
        finish();
    }
}

/* Pieces that everybody may have, between pieces that a graph owns, are found without a look at the driver. */
TEST(memory_beside_a_graphs_is_found_at_once)
{
    enum { N = 16 };
    for (int fixed = 0; fixed < 2; fixed++) {
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = pool_of(fixed, MIB(40));
        void *p[2 * N], *q[N];
        OK(galloc_free(get(pool, MIB(2), s), s));
        for (int i = 0; i < 2 * N; i++) p[i] = get_used(pool, MIB(1), t, 1);
        for (int i = 0; i < 2 * N; i += 2) OK(galloc_free(p[i], t));
        OK(galloc_stream_retire(t));
        sim_run(-1);
        OK(galloc_pool_trim(pool, SIZE_MAX, NULL));
        capture_begin(s);
        for (int i = 0; i < N; i++) q[i] = get_used(pool, MIB(1), s, 2);
        for (int i = 0; i < N; i++) OK(galloc_free(q[i], s));
        cudaGraphExec_t exec = capture_ready(s);
        size_t owned = stats_of(pool).graph_bytes;
        EXPECT_EQ(owned, MIB(N));
        for (int i = 1; i < 2 * N; i += 2) OK(galloc_free(p[i], t));
        OK(galloc_stream_retire(t));
        sim_run(-1);
        OK(galloc_pool_trim(pool, SIZE_MAX, NULL)); /* what t freed is everybody's now */
        EXPECT_EQ(stats_of(pool).graph_bytes, owned);
        EXPECT_EQ(galloc_pool_check(pool), 0);
        long calls = sim_calls("cuCtxGetId"); /* what growing begins with */
        for (int i = 0; i < N; i++) q[i] = get(pool, MIB(1), s);
        EXPECT_EQ(sim_calls("cuCtxGetId"), calls);
        for (int i = 0; i < N; i++) OK(galloc_free(q[i], s));
        EXPECT_EQ(stats_of(pool).graph_bytes, owned);
        exec_end(exec);
        EXPECT_EQ(stats_of(pool).graph_bytes, 0);
        EXPECT_EQ(galloc_pool_check(pool), 0);
        pool_end(pool);
        finish();
    }
}

/* So are such pieces beside results that another stream has used last, which nobody else may have yet. */
TEST(memory_beside_results_in_use_is_found_at_once)
{
    enum { N = 16 };
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new(), u = stream_new();
    galloc_pool *pool = pool_of(0, MIB(40));
    void *p[2 * N], *q[N];
    OK(galloc_free(get(pool, MIB(2), s), s));
    OK(galloc_free(get(pool, MIB(2), u), u));
    for (int i = 0; i < 2 * N; i++) p[i] = get_used(pool, MIB(1), t, 1);
    for (int i = 0; i < 2 * N; i += 2) OK(galloc_free(p[i], t));
    OK(galloc_stream_retire(t));
    sim_run(-1);
    OK(galloc_pool_trim(pool, SIZE_MAX, NULL));
    capture_begin(s);
    for (int i = 0; i < N; i++) q[i] = get_used(pool, MIB(1), s, 2);
    cudaGraphExec_t exec = capture_ready(s);
    for (int i = 1; i < 2 * N; i += 2) OK(galloc_free(p[i], t));
    OK(galloc_stream_retire(t));
    sim_run(-1);
    OK(galloc_pool_trim(pool, SIZE_MAX, NULL)); /* what t freed is everybody's now */
    sim_hold(u, 1);
    for (int i = 0; i < N; i++) {
        put(u, q[i], MIB(1), 3);
        OK(galloc_free(q[i], u));
    }
    uint64_t merges = stats_of(pool).merges;
    long calls = sim_calls("cuCtxGetId"); /* what growing begins with */
    for (int i = 0; i < N; i++) q[i] = get(pool, MIB(1), s);
    EXPECT_EQ(sim_calls("cuCtxGetId"), calls);
    for (int i = 0; i < N; i++) OK(galloc_free(q[i], s));
    EXPECT_EQ(stats_of(pool).merges, merges);
    sim_hold(u, 0);
    sim_run(-1);
    exec_end(exec);
    EXPECT_EQ(stats_of(pool).graph_bytes, 0);
    pool_end(pool);
    finish();
}

/* Nobody waits, and the capture goes on, when there is no memory: with a limit, and when the device has no more. */
TEST(out_of_memory_in_a_capture)
{
    for (int round = 0; round < 8; round++) { /* segments, the device's end, mode */
        sim_options options = sim_defaults();
        options.pace = SIM_PACE_STILL;
        if (round / 2 % 2) options.memory = MIB(64);
        begin_with(options);
        galloc_pool *pool = pool_of(round % 2, round / 2 % 2 ? SIZE_MAX : MIB(64));
        cudaStream_t s = stream_new(), t = stream_new();
        void *p = get_used(pool, MIB(30), t, 1);
        OK(galloc_free(get_used(pool, MIB(16), s, 2), s));
        OK(galloc_free(get_used(pool, MIB(8), t, 2), t));
        OK(galloc_pool_reserve(pool, MIB(10))); /* could be given back; where that waits it is not */
        OK(cudaStreamBeginCapture(s, modes[round / 4]));
        long waits = sim_calls("cuStreamWaitEvent"), records = sim_calls("cuEventRecord");
        long blocking = sim_blocking_calls(), lines = log_lines;
        refused(pool, MIB(60), s);
        refused(pool, GIB(900), s);
        EXPECT_EQ(log_lines, lines + 2);
        EXPECT_EQ(sim_blocking_calls(), blocking);
        EXPECT(sim_calls("cuStreamWaitEvent") == waits && sim_calls("cuEventRecord") == records);
        put(s, p, MIB(30), 3);
        cudaGraphExec_t exec = capture_ready(s);
        order(t, s);
        launch(exec, s);
        look(s, p, MIB(30), 3);
        OK(galloc_free(p, s));
        exec_end(exec);
        expect_healthy(pool, 1);
        pool_end(pool);
        finish();
    }
}

/* ---- how long ---------------------------------------------------------------------------------------------------- */

enum { BY_INSTANCE, BY_GRAPH, BY_CLONE, BY_ABORT, BY_UNJOINED, ENDS };

/* The graph is gone when the last of it is: its handle, an instance, a clone, a launch. */
TEST(memory_comes_back_when_the_last_of_a_graph_is_gone)
{
    for (int end = 0; end < ENDS; end++) {
        for (int fixed = 0; fixed < 2; fixed++) {
            begin_still();
            cudaStream_t s = stream_new(), t = stream_new(), u = stream_new();
            galloc_pool *pool = pool_of(fixed, MIB(8));
            cudaGraph_t graph = NULL, clone = NULL;
            cudaGraphExec_t exec = NULL;
            cudaEvent_t event = NULL;
            OK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
            OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
            (void)pass(pool, MIB(8), s, 1);
            EXPECT_EQ(stats_of(pool).graphs, 1);
            if (end == BY_ABORT || end == BY_UNJOINED) {
                OK(cudaEventRecord(event, s));
                OK(cudaStreamWaitEvent(t, event, 0));
                put(t, NULL, 0, 0);
                unsigned long long id = 0;
                if (end == BY_ABORT) EXPECT_EQ(cudaStreamGetId(s, &id), cudaErrorStreamCaptureUnsupported);
                refused(pool, MIB(1), u);
                EXPECT(cudaStreamEndCapture(s, &graph) != cudaSuccess);
                (void)cudaGetLastError();
                sim_findings_clear();
            } else {
                graph = capture_end(s);
            }
            if (end == BY_CLONE) OK(cudaGraphClone(&clone, graph));
            if (end == BY_INSTANCE || end == BY_CLONE) {
                OK(cudaGraphInstantiate(&exec, clone ? clone : graph, 0));
                refused(pool, MIB(1), u);
                OK(cudaGraphDestroy(graph));
                refused(pool, MIB(1), u);
                if (clone) OK(cudaGraphDestroy(clone));
                refused(pool, MIB(1), u);
                launch(exec, t);
                sim_hold(t, 1);
                exec_end(exec);
                EXPECT_EQ(stats_of(pool).graph_bytes, MIB(8)); /* the launch */
                sim_hold(t, 0);
                sim_run(-1);
            } else if (graph) {
                refused(pool, MIB(1), u);
                OK(cudaGraphDestroy(graph));
            }
            EXPECT_EQ(stats_of(pool).graph_bytes, 0);
            EXPECT_EQ(stats_of(pool).graphs, 0);
            long blocking = sim_blocking_calls(), calls = memory_calls();
            expect_free_for_all(pool, MIB(8), u);
            EXPECT_EQ(sim_blocking_calls(), blocking);
            EXPECT_EQ(memory_calls(), calls);
            OK(cudaEventDestroy(event));
            pool_end(pool);
            finish();
        }
    }
}

/* Nobody has looked meanwhile whether the graph has ended. */
TEST(what_an_ended_graph_had_goes_before_new_memory)
{
    for (int fixed = 0; fixed < 2; fixed++) {
        for (int reserve = 0; reserve < 2; reserve++) {
            begin();
            cudaStream_t s = stream_new(), t = stream_new();
            galloc_config config = galloc_config_default();
            config.expandable_segments = !fixed;
            config.reuse = 0; /* no request looks how far the streams are */
            galloc_pool *pool = pool_new(&config);
            capture_begin(s);
            (void)pass(pool, MIB(60), s, 1);
            cudaGraphExec_t exec = capture_ready(s);
            launch(exec, s);
            OK(cudaStreamSynchronize(s));
            size_t held = sim_physical(0);
            exec_end(exec);
            if (reserve) OK(galloc_pool_reserve(pool, MIB(60)));
            else expect_free_for_all(pool, MIB(60), t);
            EXPECT_EQ(sim_physical(0), held);
            pool_end(pool);
            stream_end(s);
            stream_end(t);
            finish();
        }
    }
}

/* Allocated in a capture and kept: the holder's, whatever becomes of the graph; freed, the graph's again. */
TEST(a_result_is_its_holders_and_then_the_graphs)
{
    for (int round = 0; round < 12; round++) { /* segments, what ends first, a cache bin in between */
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new(), u = stream_new();
        galloc_pool *pool = pool_of(round % 2, MIB(4));
        size_t bytes = round / 6 ? KIB(64) : MIB(4);
        capture_begin(s);
        void *p = get_used(pool, bytes, s, 1);
        EXPECT(info_of(p).capture_id != 0 && info_of(p).stream_id == 0);
        cudaGraphExec_t exec = capture_ready(s);
        launch(exec, t);
        look(t, p, bytes, 1);
        if (round / 2 % 3 == 0) { /* the graph is gone before the block */
            exec_end(exec);
            sim_run(-1);
            EXPECT_EQ(stats_of(pool).graph_bytes, 0);
            put(t, p, bytes, 2);
            OK(galloc_free(p, t)); /* then as any other */
            void *q = get_used(pool, MIB(4), u, 3);
            OK(galloc_free(q, u));
        } else {
            OK(galloc_free(p, t));
            EXPECT_EQ(stats_of(pool).graph_bytes, bytes);
            for (int i = 0; i < 3; i++) { /* on that stream neither: the next launch writes to it */
                if (bytes == MIB(4)) refused(pool, MIB(1), t);
                else (void)pass(pool, bytes, t, 5);
                launch(exec, t);
                sim_run(-1);
            }
            put(t, NULL, 0, 0);
            if (round / 2 % 3 == 1) launch(exec, t);
            exec_end(exec);
            expect_free_for_all(pool, MIB(4), u); /* if need be when the launch has been waited for */
        }
        EXPECT_EQ(sim_findings(SIM_RACE), 0);
        sim_run(-1);
        pool_end(pool);
        finish();
    }
}

/* The graph is gone, but the stream on which the result was freed has not done with it. */
TEST(a_result_waits_for_the_stream_that_freed_it_too)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new(), u = stream_new();
    galloc_pool *pool = pool_of(0, MIB(4));
    capture_begin(s);
    void *p = get_used(pool, MIB(4), s, 1);
    cudaGraph_t graph = capture_end(s);
    OK(cudaGraphDestroy(graph));
    put(t, p, MIB(4), 2);
    OK(galloc_free(p, t));
    EXPECT_EQ(stats_of(pool).graph_bytes, 0);
    expect_free_for_all(pool, MIB(4), u);
    EXPECT_EQ(sim_findings(SIM_RACE), 0);
    pool_end(pool);
    finish();
}

/* Used before the capture, freed in it, and the graph is gone at once: what the streams did with it before may still
   run, and they cannot be asked. By the captured stream itself, by another one whose work comes before. */
TEST(what_was_used_before_the_capture_outlives_its_graph)
{
    for (int round = 0; round < 16; round++) { /* whose block, segments, how it is freed */
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new(), u = stream_new();
        galloc_pool *pool = pool_of(round / 2 % 2, MIB(4));
        void *p = get_used(pool, MIB(4), round % 2 ? t : s, 1);
        if (round % 2) order(t, s);
        put(s, p, MIB(4), 2);
        cudaStream_t both[3] = {s, u, s};
        capture_begin(s);
        if (round / 4 == 0) OK(galloc_free(p, s));
        if (round / 4 == 1) OK(galloc_free_after(p, both, 2));
        if (round / 4 == 3) OK(galloc_free_after(p, both + 1, 2));
        if (round / 4 == 2) {
            unsigned long long id = 0;
            EXPECT_EQ(cudaStreamGetId(s, &id), cudaErrorStreamCaptureUnsupported);
            OK(galloc_free(p, s));
            cudaGraph_t none = NULL;
            EXPECT_EQ(cudaStreamEndCapture(s, &none), cudaErrorStreamCaptureInvalidated);
            (void)cudaGetLastError();
            sim_findings_clear();
        } else {
            refused(pool, MIB(4), s); /* in the capture neither: it may be launched before that work is done */
            OK(cudaGraphDestroy(capture_end(s)));
        }
        EXPECT_EQ(stats_of(pool).graph_bytes, 0);
        expect_free_for_all(pool, MIB(4), u); /* it waits for the device */
        EXPECT_EQ(sim_findings(SIM_RACE), 0);
        pool_end(pool);
        finish();
    }
}

/* What a cache gave out again has no mark for the work before: freed in a capture it gets one. */
TEST(a_block_from_a_cache_is_freed_in_a_capture)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_of(0, MIB(2));
    void *p = get_used(pool, KIB(512), s, 1);
    OK(galloc_free(p, s));
    EXPECT(get(pool, KIB(512), s) == p); /* not used again */
    capture_begin(t);
    OK(galloc_free(p, t));
    OK(cudaGraphDestroy(capture_end(t)));
    OK(galloc_free(get_used(pool, MIB(2), t, 2), t));
    EXPECT_EQ(sim_findings(SIM_RACE), 0);
    pool_end(pool);
    finish();
}

/* Recorded for a captured stream: not before the graph is gone, though it was freed elsewhere. */
TEST(what_is_recorded_for_a_graph_is_its_own)
{
    for (int round = 0; round < 4; round++) { /* is the graph gone before the free, segments */
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = pool_of(round / 2, MIB(4));
        void *p = get_used(pool, MIB(4), s, 1);
        OK(cudaStreamSynchronize(s));
        capture_begin(t);
        look(t, p, MIB(4), 1);
        OK(galloc_record_stream(p, t));
        OK(galloc_record_stream(p, t));
        cudaGraphExec_t exec = capture_ready(t);
        if (round % 2) exec_end(exec);
        OK(galloc_free(p, s));
        EXPECT_EQ(stats_of(pool).graph_bytes, round % 2 ? 0 : MIB(4));
        EXPECT_EQ(galloc_pool_check(pool), 0);
        if (!(round % 2)) {
            launch(exec, t);
            refused(pool, MIB(1), s);
            launch(exec, t);
            exec_end(exec);
        }
        expect_free_for_all(pool, MIB(4), s);
        EXPECT_EQ(sim_findings(SIM_RACE), 0);
        sim_run(-1);
        pool_end(pool);
        finish();
    }
}

/* Recorded for two graphs, it counts once as memory of graphs, and is that until both are gone. */
TEST(what_is_recorded_for_two_graphs_counts_once)
{
    for (int last = 0; last < 2; last++) {
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = pool_of(0, MIB(4));
        cudaGraphExec_t exec[2];
        void *p = get_used(pool, MIB(4), s, 1);
        OK(cudaStreamSynchronize(s));
        for (int i = 0; i < 2; i++) {
            capture_begin(t);
            look(t, p, MIB(4), 1);
            OK(galloc_record_stream(p, t));
            exec[i] = capture_ready(t);
        }
        OK(galloc_free(p, s));
        EXPECT_EQ(stats_of(pool).graph_bytes, MIB(4));
        refused(pool, MIB(1), s);
        exec_end(exec[!last]);
        EXPECT_EQ(stats_of(pool).graph_bytes, MIB(4));
        refused(pool, MIB(1), s);
        launch(exec[last], t);
        exec_end(exec[last]);
        sim_run(-1);
        EXPECT_EQ(stats_of(pool).graph_bytes, 0);
        expect_free_for_all(pool, MIB(4), s);
        pool_end(pool);
        stream_end(s);
        stream_end(t);
        finish();
    }
}

/* What another stream is recorded for later is the graph's still. */
TEST(what_is_recorded_for_a_graph_is_recorded_for_others_too)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new(), u = stream_new();
    galloc_pool *pool = pool_of(0, MIB(4));
    void *p = get_used(pool, MIB(4), s, 1);
    OK(cudaStreamSynchronize(s));
    capture_begin(t);
    look(t, p, MIB(4), 1);
    OK(galloc_record_stream(p, t));
    cudaGraphExec_t exec = capture_ready(t);
    OK(galloc_record_stream(p, u));
    OK(galloc_free(p, s));
    EXPECT_EQ(stats_of(pool).graph_bytes, MIB(4));
    refused(pool, MIB(1), s);
    launch(exec, t);
    sim_run(-1);
    exec_end(exec);
    expect_free_for_all(pool, MIB(4), s);
    pool_end(pool);
    finish();
}

/* A block with room, from a capture, grows later: the graph owns what it has grown by, too. */
TEST(what_a_result_grows_by_is_the_graphs)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_of(0, MIB(8));
    void *p = NULL;
    galloc_request request = {0};
    request.bytes = MIB(2);
    request.max_bytes = MIB(8);
    request.stream = s;
    request.pool = pool;
    capture_begin(s);
    OK(galloc_alloc(&p, &request));
    put(s, p, MIB(2), 1);
    EXPECT_EQ(galloc_resize(p, MIB(4), s), cudaErrorNotSupported);
    cudaGraphExec_t exec = capture_ready(s);
    OK(galloc_resize(p, MIB(6), s));
    EXPECT_EQ(galloc_pool_check(pool), 0);
    OK(galloc_resize(p, MIB(8), s));
    OK(galloc_resize(p, MIB(7), s));
    EXPECT_EQ(galloc_pool_check(pool), 0);
    launch(exec, s);
    OK(galloc_free(p, s));
    EXPECT_EQ(stats_of(pool).graph_bytes, MIB(8));
    refused(pool, MIB(1), t);
    exec_end(exec);
    sim_run(-1);
    expect_free_for_all(pool, MIB(8), t);
    pool_end(pool);
    finish();
}

/* ---- captures that go wrong -------------------------------------------------------------------------------------- */

/* What was mapped into a result's room is the graph's too, though the growth as a whole is refused. */
TEST(what_a_refused_growth_has_mapped_is_the_graphs)
{
    sim_options options = sim_defaults();
    options.pace = SIM_PACE_PROMPT;
    begin_with(options);
    galloc_config config = config_limit(MIB(64));
    config.overhead = 0;
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new();
    galloc_request request = {0};
    void *p = NULL, *plain = NULL;
    cudaGraph_t graph;
    request.bytes = MIB(2);
    request.max_bytes = MIB(16);
    request.stream = s;
    request.pool = pool;
    OK(galloc_alloc(&plain, &request));
    OK(galloc_resize(plain, MIB(12), s));
    OK(galloc_free(plain, s));
    sim_run(-1);
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    OK(galloc_alloc(&p, &request));
    OK(cudaStreamEndCapture(s, &graph));
    EXPECT(p == plain); /* whose pages come back to it, as far as there are any */
    sim_fail("cuMemCreate", 1, 1, 0);
    EXPECT_EQ(galloc_resize(p, MIB(16), s), cudaErrorMemoryAllocation);
    sim_fail_clear();
    EXPECT_EQ(info_of(p).usable, MIB(12));
    EXPECT_EQ(galloc_pool_check(pool), 0);
    OK(galloc_resize(p, MIB(16), s));
    EXPECT_EQ(galloc_pool_check(pool), 0);
    OK(galloc_free(p, s));
    OK(cudaGraphDestroy(graph));
    sim_run(-1);
    OK(galloc_pool_trim(pool, 0, NULL));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* Each counts as a failure, in the default pool too, though no search for memory begins. */
TEST(allocations_in_an_invalidated_capture_are_counted)
{
    begin_still();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_of(0, MIB(8)), *own = NULL;
    unsigned long long id = 0;
    cudaGraph_t none = NULL;
    void *p = NULL;
    capture_begin(s);
    EXPECT_EQ(cudaStreamGetId(s, &id), cudaErrorStreamCaptureUnsupported);
    for (uint64_t n = 1; n <= 3; n++) {
        EXPECT_EQ(galloc_pool_malloc(pool, &p, MIB(1), s), cudaErrorStreamCaptureInvalidated);
        EXPECT_EQ(stats_of(pool).failures, n);
        EXPECT_EQ(galloc_malloc(&p, MIB(1), s), cudaErrorStreamCaptureInvalidated);
        OK(galloc_pool_default(&own, 0));
        EXPECT_EQ(stats_of(own).failures, n);
    }
    EXPECT_EQ(galloc_pool_malloc(pool, NULL, MIB(1), s), cudaErrorInvalidValue);
    EXPECT_EQ(stats_of(pool).failures, 4);
    EXPECT_EQ(stats_of(pool).rejections, 0);
    EXPECT_EQ(log_lines, 7);
    EXPECT_EQ(cudaStreamEndCapture(s, &none), cudaErrorStreamCaptureInvalidated);
    (void)cudaGetLastError();
    sim_findings_clear();
    pool_end(pool);
    finish();
}

/* Nor does the stream cache serve them, although it has blocks of the size. */
TEST(an_invalidated_capture_gets_nothing_from_a_stream_cache)
{
    for (int per_thread = 0; per_thread < 2; per_thread++) {
        begin_still();
        cudaStream_t s = per_thread ? cudaStreamPerThread : stream_new();
        galloc_pool *pool = pool_new(NULL);
        unsigned long long id = 0;
        cudaGraph_t none = NULL;
        void *p = NULL;
        for (int i = 0; i < 3; i++) OK(galloc_free(get(pool, KIB(4), s), s));
        capture_begin(s);
        EXPECT_EQ(cudaStreamGetId(s, &id), cudaErrorStreamCaptureUnsupported);
        EXPECT_EQ(galloc_pool_malloc(pool, &p, KIB(4), s), cudaErrorStreamCaptureInvalidated);
        EXPECT(p == NULL);
        EXPECT_EQ(stats_of(pool).failures, 1);
        EXPECT_EQ(cudaStreamEndCapture(s, &none), cudaErrorStreamCaptureInvalidated);
        (void)cudaGetLastError();
        sim_findings_clear();
        OK(galloc_free(get(pool, KIB(4), s), s));
        pool_end(pool);
        finish();
    }
}

/* Allocating is of no use any more; what is freed is free as soon as it is known who used it. */
TEST(frees_succeed_in_an_invalidated_capture)
{
    for (int own = 0; own < 2; own++) { /* was the pool in use in this capture before */
        begin_still();
        cudaStream_t s = stream_new(), u = stream_new();
        galloc_pool *pool = pool_of(0, MIB(8));
        unsigned long long id = 0;
        cudaGraph_t none = NULL;
        cudaStream_t both[2] = {u, s};
        void *p = get_used(pool, MIB(2), s, 1), *q = get_used(pool, MIB(2), u, 1), *r = pool, *own_block = NULL;
        capture_begin(s);
        if (own) own_block = get_used(pool, MIB(2), s, 2);
        EXPECT_EQ(cudaStreamGetId(s, &id), cudaErrorStreamCaptureUnsupported);
        EXPECT_EQ(galloc_pool_malloc(pool, &r, MIB(1), s), cudaErrorStreamCaptureInvalidated);
        EXPECT(r == NULL);
        EXPECT_EQ(galloc_malloc(&r, MIB(1), s), cudaErrorStreamCaptureInvalidated);
        EXPECT_EQ(galloc_record_stream(p, s), cudaErrorStreamCaptureInvalidated);
        EXPECT_EQ(galloc_resize(p, MIB(1), s), cudaErrorNotSupported);
        EXPECT_EQ(galloc_stream_retire(s), cudaErrorStreamCaptureUnsupported);
        galloc_graph *group = NULL;
        EXPECT_EQ(galloc_graph_begin(&group, pool, s), cudaErrorStreamCaptureInvalidated);
        EXPECT(group == NULL);
        EXPECT_EQ(log_lines, 6);
        OK(galloc_free(p, s));
        OK(galloc_free_after(q, both, 2));
        OK(galloc_free(own_block, s));
        EXPECT_EQ(galloc_pool_check(pool), 0);
        EXPECT_EQ(cudaStreamEndCapture(s, &none), cudaErrorStreamCaptureInvalidated);
        (void)cudaGetLastError();
        EXPECT_EQ(sim_findings(SIM_CAPTURE_BROKEN), 1);
        sim_findings_clear();
        expect_free_for_all(pool, MIB(8), u);
        (void)pass(pool, MIB(8), s, 3);
        pool_end(pool);
        finish();
    }
}

/* Another stream may have used the block last. A stream cache would give it to the stream of the capture too early. */
TEST(a_free_in_an_invalidated_capture_is_in_no_stream_cache)
{
    for (int per_thread = 0; per_thread < 2; per_thread++) {
        begin_still();
        cudaStream_t s = per_thread ? cudaStreamPerThread : stream_new(), t = stream_new();
        galloc_pool *pool = pool_new(NULL);
        unsigned long long id = 0;
        cudaGraph_t none = NULL;
        for (int i = 0; i < 3; i++) OK(galloc_free(get(pool, KIB(4), s), s));
        void *p = get(pool, KIB(4), s);
        capture_begin(s);
        EXPECT_EQ(cudaStreamGetId(s, &id), cudaErrorStreamCaptureUnsupported);
        put(t, p, KIB(4), 1);
        OK(galloc_free(p, s));
        EXPECT_EQ(cudaStreamEndCapture(s, &none), cudaErrorStreamCaptureInvalidated);
        (void)cudaGetLastError();
        sim_findings_clear();
        p = get_used(pool, KIB(4), s, 2);
        OK(galloc_free(p, s));
        pool_end(pool);
        finish();
    }
}

/* The pool is first met in a capture that is invalid already, with no host memory left. */
TEST(a_free_in_an_invalidated_capture_needs_no_host_memory)
{
    begin_still();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_of(0, MIB(8));
    unsigned long long id = 0;
    cudaGraph_t none = NULL;
    void *p = get_used(pool, MIB(2), s, 1);
    capture_begin(s);
    EXPECT_EQ(cudaStreamGetId(s, &id), cudaErrorStreamCaptureUnsupported);
    sim_fail_malloc(1, 1);
    OK(galloc_free(p, s));
    sim_fail_clear();
    EXPECT_EQ(cudaStreamEndCapture(s, &none), cudaErrorStreamCaptureInvalidated);
    (void)cudaGetLastError();
    sim_findings_clear();
    pool_end(pool);
    finish();
}

/* Whatever of it finds no host memory: the block stays the program's, to be freed again. */
TEST(a_free_after_that_fails_leaves_the_block_as_it_was)
{
    int failures = 0;
    for (int nth = 1, fired = 1; fired && nth < 20; nth++) {
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = pool_of(0, MIB(64));
        void *p = get_used(pool, MIB(2), s, 1);
        capture_begin(t);
        inside_drain_all(pool);
        sim_fail_malloc(nth, 100);
        cudaError_t error = galloc_free_after(p, &t, 1);
        fired = sim_failed_mallocs() > 0;
        sim_fail_clear();
        if (error) {
            failures++;
            EXPECT_EQ(error, cudaErrorMemoryAllocation);
            EXPECT_EQ(info_of(p).state, GALLOC_STATE_USED);
            EXPECT_EQ(galloc_pool_check(pool), 0);
            OK(galloc_free_after(p, &t, 1));
        }
        EXPECT_EQ(info_of(p).state == GALLOC_STATE_USED, 0);
        OK(cudaGraphDestroy(capture_end(t)));
        pool_end(pool);
        finish();
    }
    EXPECT(failures > 0);
}

static struct {
    galloc_pool *pool;
    void *taken[8192];
    int n, left; /* steps until all marks are taken */
} marks_of;

static void take_all_marks(const char *function, int locks)
{
    (void)function, (void)locks;
    if (marks_of.left-- != 0) return;
    inside_on_step = NULL;
    sim_fail_malloc(1, 1);
    while (marks_of.n < 8192 && (marks_of.taken[marks_of.n] = inside_descriptor_take(marks_of.pool, INSIDE_MARKS)))
        marks_of.n++;
}

/* Other calls take the last marks meanwhile: the block stays the program's, or is free and waits for the streams that
   used it before the capture. */
TEST(a_free_after_without_marks_fails_or_waits)
{
    int failures = 0;
    marks_of.n = 1;
    for (int step = 0; marks_of.n; step++) {
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new(), u = stream_new();
        galloc_pool *pool = pool_of(0, MIB(2));
        void *p = get_used(pool, MIB(2), s, 1);
        capture_begin(t);
        marks_of.pool = pool;
        marks_of.n = 0;
        marks_of.left = step;
        inside_on_step = take_all_marks;
        cudaError_t error = galloc_free_after(p, &t, 1);
        inside_on_step = NULL;
        sim_fail_clear();
        for (int i = 0; i < marks_of.n; i++) inside_descriptor_give(pool, INSIDE_MARKS, marks_of.taken[i]);
        EXPECT_EQ(galloc_pool_check(pool), 0);
        EXPECT_EQ(info_of(p).state == GALLOC_STATE_USED, error != cudaSuccess);
        if (error) OK(galloc_free_after(p, &t, 1));
        failures += error != cudaSuccess;
        OK(cudaGraphDestroy(capture_end(t)));
        OK(galloc_free(get_used(pool, MIB(2), u, 2), u));
        pool_end(pool);
        finish();
        EXPECT(step < 100);
    }
    EXPECT(failures > 0);
}

/* The same on one stream: beside its own mark the free needs one more, of the streams that used the block before. */
TEST(a_free_that_fails_leaves_the_block_as_it_was)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_of(0, MIB(64));
    void *p = get_used(pool, MIB(2), s, 1), *taken[8192];
    int n = 0;
    capture_begin(t);
    (void)pass(pool, MIB(2), t, 2);
    sim_fail_malloc(1, 1);
    while (n < 8192 && (taken[n] = inside_descriptor_take(pool, INSIDE_MARKS)) != NULL) n++;
    EXPECT_EQ(galloc_free(p, t), cudaErrorMemoryAllocation);
    sim_fail_clear();
    for (int i = 0; i < n; i++) inside_descriptor_give(pool, INSIDE_MARKS, taken[i]);
    EXPECT(n > 0);
    EXPECT_EQ(info_of(p).state, GALLOC_STATE_USED);
    EXPECT_EQ(galloc_pool_check(pool), 0);
    OK(galloc_free(p, t));
    OK(cudaGraphDestroy(capture_end(t)));
    pool_end(pool);
    finish();
}

/* The state of the captured stream cannot be made: the error is that of the host's memory or of the driver, and
   nothing is waited for, since that would end the capture. */
TEST(a_captured_free_that_is_refused_leaves_the_block_as_it_was)
{
    for (int driver = 0; driver < 2; driver++) {
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = pool_of(0, MIB(64));
        void *p = get_used(pool, MIB(2), s, 1);
        capture_begin(t);
        if (driver) sim_fail("cuUserObjectCreate", 1, 1, cudaErrorUnknown);
        else inside_drain_all(pool);
        if (!driver) sim_fail_malloc(1, 1);
        EXPECT_EQ(galloc_free(p, t), driver ? cudaErrorUnknown : cudaErrorMemoryAllocation);
        sim_fail_clear();
        EXPECT_EQ(info_of(p).state, GALLOC_STATE_USED);
        EXPECT_EQ(sim_calls("cuStreamSynchronize"), 0);
        EXPECT_EQ(galloc_pool_check(pool), 0);
        OK(galloc_free(p, t));
        OK(cudaGraphDestroy(capture_end(t)));
        pool_end(pool);
        finish();
    }
}

/* The per-thread stream of a group is that of its context: if the driver does not tell it, the group does not begin. */
TEST(a_group_of_a_per_thread_stream_without_a_context_does_not_begin)
{
    static const char *const calls[] = {"cuCtxGetCurrent", "cuCtxGetId", "cuStreamGetCtx"};
    int failed = 0;
    for (int i = 0; i < 3; i++) {
        begin_still();
        galloc_pool *pool = pool_of(0, MIB(64));
        galloc_graph *graph = NULL;
        sim_fail(calls[i], 1, 1, cudaErrorUnknown);
        cudaError_t error = galloc_graph_begin(&graph, pool, cudaStreamPerThread);
        EXPECT_EQ(error != cudaSuccess, sim_failed() > 0);
        EXPECT_EQ(error != cudaSuccess, graph == NULL);
        failed += error != cudaSuccess;
        sim_fail_clear();
        if (error) OK(galloc_graph_begin(&graph, pool, cudaStreamPerThread));
        capture_begin(cudaStreamPerThread);
        (void)pass(pool, MIB(2), cudaStreamPerThread, 1);
        OK(galloc_graph_end(graph));
        cudaGraph_t made = capture_end(cudaStreamPerThread);
        EXPECT_EQ(stats_of(pool).graph_bytes, MIB(2));
        OK(galloc_graph_release(graph, cudaStreamPerThread));
        OK(cudaGraphDestroy(made));
        pool_end(pool);
        finish();
    }
    EXPECT(failed > 0);
}

/* Free memory that a graph and a stream may still use is the graph's in a report, whichever of them freed it first. */
TEST(memory_of_a_graph_and_of_a_stream_is_reported_as_the_graphs)
{
    for (int first = 0; first < 2; first++) {
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new(), u = stream_new();
        galloc_pool *pool = pool_of(0, MIB(8));
        void *p = get_used(pool, MIB(8), s, 1), *q = NULL;
        galloc_report report;
        capture_begin(t);
        cudaStream_t both[2] = {first ? s : t, first ? t : s};
        OK(galloc_free_after(p, both, 2));
        cudaGraphExec_t exec = capture_ready(t);
        capture_begin(u); /* nothing may be waited for */
        EXPECT_EQ(galloc_pool_malloc(pool, &q, MIB(8), u), cudaErrorMemoryAllocation);
        OK(galloc_oom_report(&report));
        EXPECT_EQ(report.graph_bytes, MIB(8));
        EXPECT_EQ(report.stranded, 0);
        OK(cudaGraphDestroy(capture_end(u)));
        OK(cudaGraphExecDestroy(exec));
        pool_end(pool);
        finish();
    }
}

/* Of several streams one is captured, and the driver does not tell when its graph ends: the free names it and does
   nothing. */
TEST(a_free_after_a_capture_that_is_refused_leaves_the_block_as_it_was)
{
    begin_still();
    cudaStream_t s[2] = {stream_new(), stream_new()};
    galloc_pool *pool = pool_of(0, MIB(64));
    void *p = get_used(pool, MIB(2), s[0], 1);
    capture_begin(s[1]);
    sim_fail("cuUserObjectCreate", 1, 1, cudaErrorUnknown);
    EXPECT_EQ(galloc_free_after(p, s, 2), cudaErrorUnknown);
    EXPECT_EQ(log_lines, 1);
    sim_fail_clear();
    EXPECT_EQ(info_of(p).state, GALLOC_STATE_USED);
    EXPECT_EQ(galloc_pool_check(pool), 0);
    OK(galloc_free_after(p, s, 2));
    OK(cudaGraphDestroy(capture_end(s[1])));
    pool_end(pool);
    finish();
}

/* ---- several streams --------------------------------------------------------------------------------------------- */

/* Streams of one capture are in no order but that of its events: the one does not get what the other freed. */
TEST(forked_streams_keep_their_own)
{
    for (int fixed = 0; fixed < 2; fixed++) {
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = pool_of(fixed, MIB(8));
        capture_begin(s);
        order(s, t);
        for (uint64_t i = 0; i < 4; i++) {
            (void)pass(pool, MIB(4), s, 10 + i);
            (void)pass(pool, MIB(4), t, 20 + i);
        }
        refused(pool, MIB(6), s);
        refused(pool, MIB(6), t);
        void *p = get_used(pool, MIB(2), t, 1); /* handed over by an event it is anybody's to use and free */
        order(t, s);
        look(s, p, MIB(2), 1);
        OK(galloc_free(p, s));
        EXPECT_EQ(stats_of(pool).graphs, 1);
        cudaGraphExec_t exec = capture_ready(s);
        for (int i = 0; i < 3; i++) launch(exec, i % 2 ? s : t);
        exec_end(exec);
        EXPECT_EQ(sim_findings(SIM_RACE), 0);
        sim_run(-1);
        EXPECT_EQ(stats_of(pool).graph_bytes, 0);
        pool_end(pool);
        finish();
    }
}

/* The legacy stream records no event while a blocking stream is captured, but does so afterwards, although the thread
   got to know it meanwhile. */
TEST(the_legacy_stream_records_again_after_the_capture)
{
    begin_still();
    galloc_config config = config_limit(MIB(8));
    config.wait_limit_ms = 0;
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new(), captured = NULL;
    OK(cudaStreamCreate(&captured));
    OK(cudaStreamBeginCapture(captured, cudaStreamCaptureModeRelaxed));
    void *p = get(pool, MIB(6), cudaStreamLegacy);
    OK(cudaGraphDestroy(capture_end(captured)));
    void *keep = get(pool, 512, s); /* a pool where nothing is live asks for events of itself */
    put(cudaStreamLegacy, p, MIB(6), 1);
    OK(galloc_free(p, cudaStreamLegacy));
    refused(pool, MIB(6), s);
    EXPECT_EQ(stats_of(pool).marks, 0);
    OK(galloc_free(get(pool, 4096, cudaStreamLegacy), cudaStreamLegacy));
    EXPECT_EQ(stats_of(pool).marks, 1);
    OK(galloc_free(get_used(pool, MIB(6), s, 2), s));
    OK(galloc_free(keep, s));
    pool_end(pool);
    finish();
}

/* To retire the legacy stream takes an event on it, which would break the capture of a blocking stream: it is refused,
   and what was freed there is not lost. */
TEST(the_legacy_stream_is_not_retired_during_a_capture)
{
    begin_still();
    galloc_pool *pool = pool_limited(MIB(8));
    cudaStream_t s = stream_new(), captured = NULL;
    void *p = get_used(pool, MIB(6), cudaStreamLegacy, 1), *keep = get(pool, 512, s);
    OK(cudaStreamCreate(&captured));
    OK(galloc_free(p, cudaStreamLegacy));
    OK(cudaStreamBeginCapture(captured, cudaStreamCaptureModeRelaxed));
    EXPECT_EQ(galloc_stream_retire(cudaStreamLegacy), cudaErrorStreamCaptureImplicit);
    EXPECT(strstr(galloc_last_message(), "galloc_stream_retire: "));
    OK(cudaGraphDestroy(capture_end(captured)));
    EXPECT_EQ(stats_of(pool).marks, 0);
    OK(galloc_stream_retire(cudaStreamLegacy));
    EXPECT_EQ(stats_of(pool).marks, 1);
    OK(galloc_free(get_used(pool, MIB(6), s, 2), s));
    OK(galloc_free(keep, s));
    pool_end(pool);
    finish();
}

static struct {
    galloc_pool *pool;
    cudaStream_t stream;
    void *ptr;
    int left;
} same_stream;

static void allocate_on_the_same(const char *function)
{
    if (!same_stream.left || strcmp(function, "cuStreamGetCtx")) return;
    same_stream.left = 0;
    same_stream.ptr = get(same_stream.pool, MIB(2), same_stream.stream);
}

/* Two threads bring a captured stream that is new to the pool, at the same time: it has one state. */
TEST(a_captured_stream_that_two_threads_bring_is_one)
{
    begin_still();
    cudaStream_t s = stream_new();
    cudaGraph_t graph = NULL;
    galloc_pool *pool = pool_new(NULL);
    capture_begin(s);
    same_stream.pool = pool;
    same_stream.stream = s;
    same_stream.left = 1;
    sim_hook(allocate_on_the_same, NULL);
    void *p = get(pool, MIB(2), s);
    sim_hook(NULL, NULL);
    EXPECT_EQ(same_stream.left, 0);
    EXPECT_EQ(inside_streams(pool), 1 + 2); /* each thread has noted the capture, with a state for work out of sight */
    put(s, p, MIB(2), 1);
    OK(galloc_free(p, s));
    EXPECT(get_used(pool, MIB(2), s, 2) == p); /* in the order of one stream */
    OK(galloc_free(p, s));
    OK(galloc_free(same_stream.ptr, s));
    OK(cudaStreamEndCapture(s, &graph));
    OK(cudaGraphDestroy(graph));
    EXPECT_EQ(galloc_pool_check(pool), 0);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* While the driver is asked where a captured stream stands, another call forgets streams of which nothing is left. */
static struct {
    galloc_pool *pool;
    int looks; /* into the capture before that */
} swept;

static void sweep_within(const char *function)
{
    if (!swept.looks || strcmp(function, "cuStreamGetCaptureInfo") || --swept.looks) return;
    OK(galloc_pool_trim(swept.pool, 0, NULL));
}

TEST(a_captured_stream_stays_while_the_driver_is_asked)
{
    enum { N = 70 };
    cudaStream_t others[N], s;
    void *p[N], *q;
    begin();
    EXPECT(N > inside_streams_kept());
    s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    for (int i = 0; i < N; i++) p[i] = get(pool, 4096, others[i] = stream_new());
    capture_begin(s);
    refused(pool, GIB(1000), s); /* the pool knows the stream now, and keeps nothing of it */
    swept.pool = pool;
    swept.looks = 2;
    sim_hook(sweep_within, NULL);
    q = get_used(pool, MIB(1), s, 1);
    sim_hook(NULL, NULL);
    EXPECT_EQ(swept.looks, 0);
    cudaStream_t last = stream_new();
    void *r = get(pool, 4096, last);
    EXPECT_EQ(galloc_pool_check(pool), 0);
    OK(galloc_free(q, s));
    EXPECT_EQ(galloc_pool_check(pool), 0);
    OK(cudaGraphDestroy(capture_end(s)));
    OK(galloc_free(r, last));
    for (int i = 0; i < N; i++) OK(galloc_free(p[i], others[i]));
    pool_end(pool);
    finish();
}

/* ---- in captured order ------------------------------------------------------------------------------------------- */

/* A capture on s, from which t and u fork, and a pool whose memory is 8 MiB. */
typedef struct forked {
    cudaStream_t s, t, u;
    galloc_pool *pool;
} forked;

static forked forked_begin(int fixed, int reuse)
{
    forked f;
    galloc_config config = config_limit(MIB(8));
    config.expandable_segments = !fixed;
    config.reuse = reuse;
    begin_still();
    f.s = stream_new();
    f.t = stream_new();
    f.u = stream_new();
    f.pool = pool_new(&config);
    capture_begin(f.s);
    order(f.s, f.t);
    order(f.s, f.u);
    return f;
}

/* Work of its own on a stream, so that what it is given has a place in the graph. */
static void step(forked *f, cudaStream_t stream, void *ptr, uint64_t tag)
{
    put(stream, ptr, 512, tag);
    EXPECT_EQ(galloc_pool_check(f->pool), 0);
}

static void forked_end(forked *f)
{
    order(f->t, f->s);
    order(f->u, f->s);
    EXPECT_EQ(galloc_pool_check(f->pool), 0);
    cudaGraphExec_t exec = capture_ready(f->s);
    for (int i = 0; i < 3; i++) launch(exec, i % 2 ? f->s : f->u);
    sim_run(-1);
    exec_end(exec);
    EXPECT_EQ(stats_of(f->pool).graph_bytes, 0);
    pool_end(f->pool);
    finish();
}

TEST(a_joined_stream_reuses_what_the_other_freed)
{
    for (int fixed = 0; fixed < 2; fixed++) {
        forked f = forked_begin(fixed, ANY_REUSE);
        void *p = pass(f.pool, MIB(6), f.t, 1);
        refused(f.pool, MIB(6), f.s);
        order(f.t, f.s);
        refused(f.pool, MIB(6), f.u);
        EXPECT(get_used(f.pool, MIB(6), f.s, 2) == p);
        look(f.s, p, MIB(6), 2);
        OK(galloc_free(p, f.s));
        refused(f.pool, MIB(6), f.t); /* and not back, which s does not come before */
        order(f.s, f.t);
        EXPECT(pass(f.pool, MIB(6), f.t, 3) == p);
        forked_end(&f);
    }
}

static struct {
    void *block;
    cudaStream_t stream;
    int calls; /* that come first */
} freed_meanwhile;

static void free_meanwhile(const char *function)
{
    void *block = freed_meanwhile.block;
    if (!block || strcmp(function, "cuStreamGetCaptureInfo") || freed_meanwhile.calls-- > 0) return;
    freed_meanwhile.block = NULL;
    OK(galloc_free(block, freed_meanwhile.stream));
}

/* Two frees on a captured stream at once, the later one faster: a joined stream then reuses the memory of both. */
TEST(a_joined_stream_reuses_what_two_frees_at_once_leave)
{
    int calls = 0, reached = 1;
    for (; reached && EXPECT(calls < 20); calls++) {
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = pool_of(0, MIB(8));
        capture_begin(s);
        void *p = get_used(pool, MIB(4), s, 1), *q = get_used(pool, MIB(4), s, 2);
        freed_meanwhile.block = q;
        freed_meanwhile.stream = s;
        freed_meanwhile.calls = calls;
        sim_hook(free_meanwhile, NULL);
        OK(galloc_free(p, s));
        sim_hook(NULL, NULL);
        reached = !freed_meanwhile.block;
        if (!reached) OK(galloc_free(q, s));
        order(s, t);
        void *one = get_used(pool, MIB(4), t, 3), *other = get_used(pool, MIB(4), t, 4);
        OK(galloc_free(one, t));
        OK(galloc_free(other, t));
        order(t, s);
        cudaGraphExec_t exec = capture_ready(s);
        launch(exec, s);
        sim_run(-1);
        exec_end(exec);
        expect_free_for_all(pool, MIB(8), s);
        pool_end(pool);
        finish();
    }
    EXPECT(calls > 1);
}

TEST(a_part_of_a_stream_that_is_joined_is_not_all_of_it)
{
    for (int fixed = 0; fixed < 2; fixed++) {
        forked f = forked_begin(fixed, ANY_REUSE);
        void *p = get_used(f.pool, MIB(3), f.t, 1), *q = get_used(f.pool, MIB(4), f.t, 2);
        OK(galloc_free(q, f.t));
        order(f.t, f.s); /* after q, before the last use of p */
        look(f.t, p, MIB(3), 1);
        OK(galloc_free(p, f.t));
        EXPECT(get_used(f.pool, MIB(4), f.s, 3) == q);
        refused(f.pool, MIB(3), f.s);
        order(f.t, f.s);
        EXPECT(pass(f.pool, MIB(3), f.s, 4) == p);
        OK(galloc_free(q, f.s));
        forked_end(&f);
    }
}

TEST(a_stream_that_forks_after_a_free_reuses_it)
{
    for (int fixed = 0; fixed < 2; fixed++) {
        forked f = forked_begin(fixed, ANY_REUSE);
        void *own = get_used(f.pool, 512, f.s, 9), *p = pass(f.pool, MIB(6), f.s, 1);
        order(f.s, f.t);
        step(&f, f.s, own, 10); /* the one goes on, which the other does not wait for */
        EXPECT(get_used(f.pool, MIB(6), f.t, 2) == p);
        look(f.t, p, MIB(6), 2);
        OK(galloc_free(p, f.t));
        refused(f.pool, MIB(6), f.s);
        OK(galloc_free(own, f.s));
        forked_end(&f);
    }
}

TEST(what_two_streams_used_needs_both_of_them)
{
    forked f = forked_begin(0, ANY_REUSE);
    cudaStream_t both[2] = {f.t, f.u};
    void *p = get_used(f.pool, MIB(6), f.t, 1);
    order(f.t, f.u);
    look(f.u, p, MIB(6), 1);
    look(f.t, p, MIB(6), 1);
    OK(galloc_free_after(p, both, 2));
    order(f.t, f.s);
    refused(f.pool, MIB(6), f.s);
    order(f.u, f.s);
    p = get_used(f.pool, MIB(6), f.s, 2);
    OK(galloc_record_stream(p, f.t));
    order(f.s, f.t);
    look(f.t, p, MIB(6), 2);
    OK(galloc_free(p, f.s));
    refused(f.pool, MIB(6), f.s); /* s has not come after t */
    order(f.t, f.s);
    OK(galloc_free(get_used(f.pool, 512, f.t, 5), f.t)); /* a call that is given t finds out where that is */
    order(f.t, f.s);
    (void)pass(f.pool, MIB(6), f.s, 3);
    forked_end(&f);
}

/* The stream that allocated it has used it since, though it has not been given anything by this call. */
TEST(a_result_freed_elsewhere_is_used_up_to_now)
{
    for (int shrunk = 0; shrunk < 2; shrunk++) {
        forked f = forked_begin(0, ANY_REUSE);
        cudaStream_t other = stream_new();
        void *p = get(f.pool, MIB(6), f.t);
        (void)pass(f.pool, 512, f.t, 7);
        order(f.t, f.u);
        put(f.t, p, MIB(6), 1);
        if (shrunk) OK(galloc_resize(p, 512, other));
        else OK(galloc_free(p, other));
        EXPECT_EQ(galloc_pool_check(f.pool), 0);
        sim_run(-1);
        refused(f.pool, MIB(5), f.u);
        if (shrunk) OK(galloc_free(p, other));
        sim_run(-1);
        (void)pass(f.pool, 512, f.t, 8);
        order(f.t, f.u);
        refused(f.pool, MIB(5), f.u); /* nor later: where in the graph that use was is not known */
        refused(f.pool, MIB(5), f.t);
        forked_end(&f);
    }
}

/* A block that a stream of the graph frees was used by the one that allocated it before that free only, whatever that
   one has captured since. Who follows the free has it. */
TEST(a_block_freed_by_another_stream_of_the_graph_was_used_until_then)
{
    forked f = forked_begin(0, ANY_REUSE);
    void *own = get_used(f.pool, 512, f.t, 9), *p = get_used(f.pool, MIB(5), f.t, 2);
    for (uint64_t i = 0; i < 2; i++) (void)pass(f.pool, 512, f.t, 4); /* a place behind the allocation is known */
    order(f.t, f.s);
    look(f.s, p, MIB(5), 2);
    step(&f, f.t, own, 3);
    (void)pass(f.pool, 512, f.t, 4);
    step(&f, f.t, own, 3);
    OK(galloc_free(p, f.s));
    order(f.s, f.u);
    EXPECT(pass(f.pool, MIB(5), f.u, 3) == p);
    OK(galloc_free(own, f.t));
    forked_end(&f);
}

/* The same with a block that was named for a captured stream: freed within the capture it is reused behind the use,
   freed elsewhere not before the graph is gone. */
TEST(an_input_freed_elsewhere_is_not_reused_in_the_graph)
{
    for (int elsewhere = 0; elsewhere < 2; elsewhere++) {
        forked f = forked_begin(0, ANY_REUSE);
        cudaStream_t other = stream_new();
        void *p = get(f.pool, MIB(6), f.s);
        OK(galloc_record_stream(p, f.t));
        order(f.s, f.t);
        put(f.t, p, MIB(6), 1);
        OK(galloc_free(p, elsewhere ? other : f.s));
        sim_run(-1);
        (void)pass(f.pool, 512, f.t, 8);
        order(f.t, f.s);
        if (elsewhere) refused(f.pool, MIB(5), f.s);
        else (void)pass(f.pool, MIB(5), f.s, 2);
        forked_end(&f);
    }
}

/* What another stream has cut off a result stays in its room, and the one that allocated it has used that until then.
   Who follows that stream up to an earlier point, and is given the result to free, knows nothing of it. */
TEST(what_is_cut_off_a_result_was_used_until_then)
{
    forked f = forked_begin(0, ANY_REUSE);
    cudaStream_t other = stream_new();
    galloc_request request = {0};
    void *p = NULL;
    request.bytes = MIB(6);
    request.max_bytes = MIB(8);
    request.stream = f.t;
    request.pool = f.pool;
    OK(galloc_alloc(&p, &request));
    put(f.t, p, MIB(2), 1);
    (void)pass(f.pool, 512, f.t, 7);
    order(f.t, f.u);
    refused(f.pool, MIB(6), f.u); /* which has looked whom it follows */
    put(f.t, (char *)p + MIB(2), MIB(4), 2);
    OK(galloc_resize(p, MIB(2), other));
    EXPECT_EQ(galloc_pool_check(f.pool), 0);
    look(f.u, p, MIB(2), 1);
    OK(galloc_free(p, f.u));
    sim_run(-1);
    order(f.u, f.s);
    refused(f.pool, MIB(5), f.s);
    (void)pass(f.pool, 512, f.t, 8);
    order(f.t, f.s);
    (void)pass(f.pool, MIB(5), f.s, 3);
    forked_end(&f);
}

TEST(another_graph_is_not_followed)
{
    forked f = forked_begin(0, ANY_REUSE);
    cudaStream_t other = stream_new();
    void *p = pass(f.pool, MIB(6), f.t, 1);
    capture_begin(other);
    OK(galloc_free(get(f.pool, MIB(2), other), other)); /* nothing is captured before that */
    order(f.t, f.s);
    EXPECT(get_used(f.pool, MIB(6), f.s, 3) == p);
    refused(f.pool, MIB(2), f.s);
    refused(f.pool, MIB(6), other);
    OK(galloc_free(p, f.s));
    cudaGraphExec_t exec = capture_ready(other);
    launch(exec, other);
    sim_run(-1);
    exec_end(exec);
    forked_end(&f);
}

TEST(nothing_is_followed_where_that_is_switched_off)
{
    forked f = forked_begin(0, GALLOC_REUSE_COMPLETED | GALLOC_REUSE_WAIT);
    (void)pass(f.pool, MIB(6), f.t, 1);
    order(f.t, f.s);
    refused(f.pool, MIB(6), f.s);
    EXPECT_EQ(sim_calls("cuGraphNodeGetDependencies"), 0);
    forked_end(&f);
}

/* What comes before others is looked for only when nothing fits, and what was found out is kept. A call walks from
   where its stream is to where it was at the last call. */
TEST(the_graph_is_not_asked_twice)
{
    forked f = forked_begin(0, ANY_REUSE);
    void *p = NULL;
    for (uint64_t i = 0; i < 10; i++) p = pass(f.pool, MIB(6), f.t, i);
    EXPECT(sim_calls("cuGraphNodeGetDependencies") <= 2 * 10);
    order(f.t, f.s);
    void *a = get_used(f.pool, MIB(3), f.s, 1);
    long calls = sim_calls("cuGraphNodeGetDependencies");
    EXPECT(a == p && calls > 10);
    void *b = get_used(f.pool, MIB(3), f.s, 2);
    EXPECT(sim_calls("cuGraphNodeGetDependencies") <= calls + 2);
    OK(galloc_free(a, f.s));
    OK(galloc_free(b, f.s));
    forked_end(&f);
}

/* What cannot be found out is not followed, and can be found out the next time. */
TEST(a_graph_that_cannot_be_asked_is_not_followed)
{
    static const char *const functions[] = {"cuGraphNodeGetDependencies", "cuStreamGetCaptureInfo"};
    for (int i = 0; i < 4; i++) {
        forked f = forked_begin(0, ANY_REUSE);
        void *own = get_used(f.pool, 512, f.s, 9), *kept = get(f.pool, 512, f.t);
        void *p = get_used(f.pool, MIB(6), f.t, 1);
        if (i == 3) sim_fail(functions[1], 3, 0, 0); /* where the free was is not noted: the next call is later */
        OK(galloc_free(p, f.t));
        EXPECT_EQ(sim_failed(), i == 3);
        order(f.t, f.s);
        step(&f, f.s, own, 10);
        if (i < 2) sim_fail(functions[i], 1 + 2 * i, 1 - i, 0);
        if (i == 2) sim_fail_malloc(1, 1);
        refused(f.pool, MIB(6), f.s);
        sim_fail_clear();
        OK(galloc_free(NULL, f.t));
        if (i == 3) OK(galloc_record_stream(kept, f.t));
        if (i == 3) order(f.t, f.s);
        EXPECT(pass(f.pool, MIB(6), f.s, 2) == p);
        OK(galloc_free(kept, f.t));
        OK(galloc_free(own, f.s));
        forked_end(&f);
    }
}

/* The walk ends somewhere; frees without number leave a bounded number of places. */
TEST(a_long_way_back)
{
    forked f = forked_begin(0, ANY_REUSE);
    void *own = get_used(f.pool, 512, f.s, 9), *p = NULL;
    for (uint64_t i = 0; i < 300; i++) {
        p = pass(f.pool, MIB(6), f.t, i);
        EXPECT_EQ(galloc_pool_check(f.pool), 0);
    }
    order(f.t, f.s);
    for (uint64_t i = 0; i < 600; i++) step(&f, f.s, own, i);
    refused(f.pool, MIB(6), f.s);
    order(f.t, f.s);
    EXPECT(pass(f.pool, MIB(6), f.s, 2) == p);
    OK(galloc_free(own, f.s));
    forked_end(&f);
}

/* Each node is visited once, though there are more and more ways to it the further back it is. */
TEST(a_stream_is_followed_over_many_forks_and_joins)
{
    forked f = forked_begin(0, ANY_REUSE);
    char *own = get(f.pool, 1024, f.s);
    void *p = pass(f.pool, MIB(6), f.t, 1);
    order(f.t, f.s);
    for (uint64_t i = 0; i < 12; i++) {
        order(f.s, f.u);
        step(&f, f.s, own, i);
        step(&f, f.u, own + 512, i);
        order(f.u, f.s);
    }
    EXPECT(pass(f.pool, MIB(6), f.s, 2) == p);
    OK(galloc_free(own, f.s));
    forked_end(&f);
}

/* However often the positions of a stream were thinned, the latest is there. */
TEST(a_joined_stream_is_followed_after_any_number_of_frees)
{
    for (uint64_t n = 60; n < 72; n++) {
        forked f = forked_begin(0, ANY_REUSE);
        void *p = NULL;
        for (uint64_t i = 0; i < n; i++) p = pass(f.pool, MIB(6), f.t, i);
        order(f.t, f.s);
        EXPECT(pass(f.pool, MIB(6), f.s, n) == p);
        forked_end(&f);
    }
}

static size_t allocated_by_galloc;

static void count_allocated(size_t bytes) { allocated_by_galloc += bytes; }

TEST(a_long_capture_needs_no_more_host_memory)
{
    forked f = forked_begin(0, ANY_REUSE);
    for (uint64_t i = 0; i < 100; i++) (void)pass(f.pool, MIB(6), f.t, i);
    allocated_by_galloc = 0;
    inside_on_malloc = count_allocated;
    for (uint64_t i = 0; i < 600; i++) (void)pass(f.pool, MIB(6), f.t, i);
    inside_on_malloc = NULL;
    EXPECT_EQ(allocated_by_galloc, 0);
    forked_end(&f);
}

/* Streams of one capture hand blocks on and wait for each other at random. */
/* A captured stream ends once another one has joined its work. A new one has its handle, and comes from a third. */
static void stream_replaced(cudaStream_t *stream, cudaStream_t joins, const cudaStream_t *from)
{
    cudaStream_t before = *stream;
    order(before, joins);
    OK(cudaStreamDestroy(before));
    *stream = stream_new();
    EXPECT(*stream == before);
    order(*from, *stream);
}

/* A new stream with the handle of a joined one has the other's memory only where it comes after that one's work. */
TEST(a_handle_that_comes_back_during_a_capture)
{
    for (int after = 0; after < 2; after++) {
        begin_still();
        galloc_pool *pool = pool_of(0, SIZE_MAX);
        cudaStream_t s = stream_new(), t = stream_new(), u = stream_new();
        void *before, *again;
        capture_begin(s);
        order(s, t);
        order(s, u);
        before = pass(pool, MIB(3), t, 1);
        stream_replaced(&t, u, after ? &u : &s);
        again = pass(pool, MIB(3), t, 2);
        EXPECT_EQ(again == before, after);
        order(t, s);
        order(u, s);
        cudaGraphExec_t exec = capture_ready(s);
        launch(exec, s);
        sim_run(-1);
        exec_end(exec);
        EXPECT_EQ(sim_findings(SIM_ANY), 0);
        pool_end(pool);
        finish();
    }
}

TEST(random_forks_and_joins)
{
    enum { STREAMS = 4, BLOCKS = 6 };
    long asked = 0;
    for (int round = 0; round < 300; round++) {
        dice d = {test_seed() + (uint64_t)round};
        cudaStream_t stream[STREAMS];
        struct {
            void *ptr;
            size_t bytes;
            int home;
        } block[BLOCKS] = {{NULL, 0, 0}};
        sim_options options = sim_defaults();
        options.seed = test_seed() + (uint64_t)round;
        begin_with(options);
        galloc_pool *pool = pool_of(round % 5 == 4, round % 5 == 4 ? MIB(60) : MIB(12));
        for (int i = 0; i < STREAMS; i++) stream[i] = stream_new();
        capture_begin(stream[0]);
        for (int i = 1; i < STREAMS; i++) order(stream[0], stream[i]);
        for (int i = 0; i < 150; i++) {
            uint32_t k = roll_below(&d, BLOCKS);
            int a = (int)roll_below(&d, STREAMS), b = (int)roll_below(&d, STREAMS);
            if (round % 2 && i % 15 == 14 && a && a != b) {
                int from = (a + 1 + (int)roll_below(&d, STREAMS - 1)) % STREAMS;
                stream_replaced(&stream[a], stream[b], &stream[from]);
                for (int n = 0; n < BLOCKS; n++)
                    if (block[n].home == a) block[n].home = b;
            } else if (roll_below(&d, 3) == 0) {
                order(stream[a], stream[b]);
            } else if (!block[k].ptr) {
                block[k].bytes = roll_bytes(&d, MIB(6));
                block[k].home = a;
                if (galloc_pool_malloc(pool, &block[k].ptr, block[k].bytes, stream[a])) continue;
                put(stream[a], block[k].ptr, block[k].bytes, k + 1);
            } else if (roll_below(&d, 3) == 0) {
                order(stream[block[k].home], stream[a]);
                block[k].home = a;
                look(stream[a], block[k].ptr, block[k].bytes, k + 1);
            } else {
                look(stream[block[k].home], block[k].ptr, block[k].bytes, k + 1);
                if (roll_below(&d, 4) == 0 && round % 2 == 0) {
                    OK(galloc_record_stream(block[k].ptr, stream[a]));
                    order(stream[block[k].home], stream[a]);
                    look(stream[a], block[k].ptr, block[k].bytes, k + 1);
                }
                OK(galloc_free(block[k].ptr, stream[block[k].home]));
                block[k].ptr = NULL;
            }
        }
        EXPECT_EQ(galloc_pool_check(pool), 0);
        for (uint32_t k = 0; k < BLOCKS; k++)
            if (block[k].ptr) OK(galloc_free(block[k].ptr, stream[block[k].home]));
        for (int i = 1; i < STREAMS; i++) order(stream[i], stream[0]);
        cudaGraphExec_t exec = capture_ready(stream[0]);
        for (int i = 0; i < 3; i++) launch(exec, stream[i]);
        sim_run(-1);
        exec_end(exec);
        asked += sim_calls("cuGraphNodeGetDependencies");
        if (!EXPECT_EQ(sim_findings(SIM_ANY), 0)) round = 300;
        pool_end(pool);
        finish();
    }
    EXPECT(asked > 1000);
}

/* The stream's device is what counts, not the current one; a pool may serve another device's captures. */
TEST(captures_on_two_devices)
{
    begin_with_devices(2, SIM_PACE_STILL);
    galloc_pool *pool = pool_of(0, MIB(8));
    cudaStream_t s[2];
    cudaGraphExec_t exec[2];
    for (int d = 0; d < 2; d++) {
        OK(cudaSetDevice(d));
        s[d] = stream_new();
    }
    OK(cudaSetDevice(0));
    for (int d = 0; d < 2; d++) {
        enum cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
        CUcontext before = NULL, after = NULL;
        void *p = NULL;
        capture_begin(s[d]);
        OK((cudaError_t)cuCtxGetCurrent(&before));
        OK(galloc_malloc(&p, MIB(4), s[d]));
        EXPECT_EQ(info_of(p).device, d);
        OK(galloc_free(p, s[d]));
        OK(galloc_free(get(pool, MIB(4), s[d]), s[d]));
        OK((cudaError_t)cuCtxGetCurrent(&after));
        OK(cudaThreadExchangeStreamCaptureMode(&mode));
        EXPECT(after == before && mode == cudaStreamCaptureModeGlobal); /* the thread's, as they were */
        OK(cudaSetDevice(d));
        exec[d] = capture_ready(s[d]);
        OK(cudaSetDevice(0));
    }
    EXPECT_EQ(stats_of(pool).graph_bytes, MIB(8));
    EXPECT_EQ(galloc_shutdown(), cudaErrorNotPermitted);
    for (int d = 0; d < 2; d++) exec_end(exec[d]);
    expect_free_for_all(pool, MIB(8), s[0]);
    pool_end(pool);
    for (int d = 0; d < 2; d++) {
        OK(cudaSetDevice(d));
        stream_end(s[d]);
    }
    OK(cudaSetDevice(0));
    finish();
}

static struct {
    galloc_pool *pool;
    cudaStream_t s;
    cudaEvent_t start, end;
    void *out;
} drawn;

static void *drawn_in(void *arg)
{
    OK(cudaStreamWaitEvent(cudaStreamPerThread, drawn.start, 0));
    drawn.out = pass(drawn.pool, MIB(4), cudaStreamPerThread, 2);
    OK(cudaEventRecord(drawn.end, cudaStreamPerThread));
    return arg;
}

/* The handle is the same in all threads, the streams are not. */
TEST(per_thread_streams_of_two_threads_in_one_capture)
{
    begin_still();
    pthread_t thread;
    drawn.pool = pool_of(0, MIB(8));
    OK(cudaEventCreateWithFlags(&drawn.start, cudaEventDisableTiming));
    OK(cudaEventCreateWithFlags(&drawn.end, cudaEventDisableTiming));
    OK(cudaStreamBeginCapture(cudaStreamPerThread, cudaStreamCaptureModeRelaxed));
    OK(cudaEventRecord(drawn.start, cudaStreamPerThread));
    void *p = pass(drawn.pool, MIB(4), cudaStreamPerThread, 1);
    EXPECT_EQ(pthread_create(&thread, NULL, drawn_in, NULL), 0);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
    EXPECT(drawn.out != p);
    OK(cudaStreamWaitEvent(cudaStreamPerThread, drawn.end, 0));
    EXPECT(pass(drawn.pool, MIB(4), cudaStreamPerThread, 3) == p);
    cudaGraphExec_t exec = capture_ready(cudaStreamPerThread);
    launch(exec, cudaStreamPerThread);
    (void)galloc_pool_trim(drawn.pool, 0, NULL);
    exec_end(exec);
    EXPECT_EQ(sim_findings(SIM_RACE), 0);
    sim_run(-1);
    OK(cudaEventDestroy(drawn.start));
    OK(cudaEventDestroy(drawn.end));
    pool_end(drawn.pool);
    finish();
}

static void *captured_beside(void *exec)
{
    capture_begin(cudaStreamPerThread);
    drawn.out = pass(drawn.pool, MIB(4), cudaStreamPerThread, 2);
    *(cudaGraphExec_t *)exec = capture_ready(cudaStreamPerThread);
    return exec;
}

/* So a group of one thread's stream is not that of another thread's: their graphs may run at the same time. */
TEST(per_thread_streams_of_two_threads_are_not_of_one_group)
{
    begin_still();
    pthread_t thread;
    galloc_graph *group = NULL;
    cudaGraphExec_t other = NULL;
    cudaStream_t s = stream_new();
    drawn.pool = pool_of(0, MIB(8));
    OK(galloc_graph_begin(&group, drawn.pool, cudaStreamPerThread));
    capture_begin(cudaStreamPerThread);
    void *p = pass(drawn.pool, MIB(4), cudaStreamPerThread, 1);
    cudaGraphExec_t exec = capture_ready(cudaStreamPerThread);
    EXPECT_EQ(pthread_create(&thread, NULL, captured_beside, &other), 0);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
    EXPECT(drawn.out != p);
    capture_begin(cudaStreamPerThread);
    EXPECT(pass(drawn.pool, MIB(4), cudaStreamPerThread, 3) == p);
    cudaGraphExec_t third = capture_ready(cudaStreamPerThread);
    OK(galloc_graph_end(group));
    OK(cudaGraphLaunch(exec, s));
    OK(cudaGraphLaunch(third, s));
    OK(cudaGraphLaunch(other, cudaStreamPerThread));
    sim_run(-1);
    EXPECT_EQ(sim_findings(SIM_RACE), 0);
    exec_end(exec);
    exec_end(third);
    exec_end(other);
    pool_end(drawn.pool);
    stream_end(s);
    finish();
}

/* A block with room that is a graph's is freed: later captured work of the stream may have it, whole or in parts. Once
   the graph is gone the next block with such a room has the place and its pages. */
TEST(a_room_that_a_graph_has_had_is_found_again)
{
    static const size_t sizes[] = {0, 512, MIB(2), MIB(8)};
    for (int result = 0; result < 2; result++) {
        for (size_t i = 0; i < (result ? 1 : sizeof sizes / sizeof sizes[0]); i++) {
            begin_still();
            cudaStream_t s = stream_new(), t = stream_new();
            galloc_pool *pool = pool_of(0, MIB(10));
            void *beside = get(pool, MIB(2), t), *q;
            capture_begin(s);
            void *p = get_growable(pool, MIB(8), MIB(16), s);
            put(s, p, MIB(8), 1);
            if (!result) OK(galloc_free(p, s));
            if (sizes[i]) EXPECT((q = get(pool, sizes[i], s)) == p);
            if (sizes[i]) OK(galloc_free(q, s));
            cudaGraphExec_t exec = capture_ready(s);
            if (result) OK(galloc_free(p, t));
            EXPECT_EQ(stats_of(pool).graph_bytes, MIB(8));
            exec_end(exec);
            sim_run(-1);
            long calls = memory_calls();
            q = get_growable(pool, MIB(2), MIB(16), t);
            EXPECT(sizes[i] || q == p);
            OK(galloc_resize(q, MIB(8), t));
            if (!sizes[i]) EXPECT_EQ(memory_calls(), calls);
            OK(galloc_free(q, t));
            OK(galloc_free(beside, t));
            pool_end(pool);
            finish();
        }
    }
}

/* A stream's memory from before is not lost while it is captured, nothing is recorded on it, and afterwards it is as if
   nothing had been. */
TEST(a_stream_has_its_own_memory_again_after_the_capture)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_of(0, MIB(8));
    OK(galloc_free(get(pool, 512, t), t));
    void *p = get_used(pool, MIB(1), s, 1), *small = get_used(pool, 3000, s, 1);
    OK(galloc_free(p, s));
    OK(galloc_free(small, s)); /* in its cache */
    OK(galloc_free(get(pool, MIB(1), t), t)); /* it would have liked that: a mark is wanted */
    capture_begin(s);
    long records = sim_calls("cuEventRecord");
    (void)pass(pool, MIB(2), s, 2);
    (void)pass(pool, 3000, s, 2);
    EXPECT_EQ(sim_calls("cuEventRecord"), records);
    cudaGraphExec_t exec = capture_ready(s);
    void *again = get_used(pool, 3000, s, 3), *big = get_used(pool, MIB(1), s, 3);
    EXPECT(big == p || again == small);
    OK(galloc_free(again, s));
    OK(galloc_free(big, s));
    launch(exec, t);
    OK(galloc_stream_retire(s));
    stream_end(s);
    exec_end(exec);
    expect_free_for_all(pool, MIB(8), t);
    EXPECT_EQ(sim_findings(SIM_RACE), 0);
    pool_end(pool);
    finish();
}

/* The handle of a stream that was captured comes back, and is captured again: another capture, and nothing shared. */
TEST(a_handle_that_comes_back_is_captured_again)
{
    begin_still();
    galloc_pool *pool = pool_of(0, MIB(8));
    cudaStream_t s = stream_new(), t = stream_new();
    cudaGraphExec_t exec[2];
    for (int i = 0; i < 2; i++) {
        capture_begin(s);
        (void)pass(pool, MIB(4), s, (uint64_t)i);
        exec[i] = capture_ready(s);
        cudaStream_t before = s;
        stream_end(s);
        s = stream_new();
        EXPECT(s == before);
    }
    EXPECT_EQ(stats_of(pool).graphs, 2);
    launch(exec[0], s);
    launch(exec[1], t);
    exec_end(exec[0]);
    exec_end(exec[1]);
    EXPECT_EQ(sim_findings(SIM_RACE), 0);
    sim_run(-1);
    pool_end(pool);
    finish();
}

/* ---- groups ------------------------------------------------------------------------------------------------------ */

static galloc_graph *group_begin(galloc_graph *group, galloc_pool *pool, cudaStream_t stream)
{
    OK(galloc_graph_begin(&group, pool, stream));
    EXPECT(group != NULL);
    return group;
}

/* A group that begins within a capture has what the capture has allocated so far. */
TEST(a_group_has_what_its_first_capture_did_before)
{
    begin_still();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_of(0, MIB(4));
    capture_begin(s);
    void *p = pass(pool, MIB(4), s, 1), *q = NULL;
    galloc_graph *group = group_begin(NULL, pool, s);
    cudaGraphExec_t first = capture_ready(s);
    capture_begin(s);
    OK(galloc_pool_malloc(pool, &q, MIB(4), s));
    EXPECT(q == p);
    if (q) OK(galloc_free(q, s));
    cudaGraphExec_t second = capture_ready(s);
    OK(galloc_graph_end(group));
    OK(galloc_graph_release(group, s));
    exec_end(first);
    exec_end(second);
    pool_end(pool);
    finish();
}

/* A long capture keeps some positions of its stream only. Each of them stands for what was freed up to there. */
TEST(positions_that_are_kept_cover_no_later_frees)
{
    enum { FREES = 100 };
    for (int joined = 40; joined < 44; joined++) {
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = pool_of(0, SIZE_MAX);
        void *p[FREES], *wall[FREES], *q[FREES + 1];
        int n = 0;
        capture_begin(s);
        for (int i = 0; i < FREES; i++) {
            p[i] = get(pool, MIB(1), s);
            wall[i] = get(pool, 512, s);
        }
        for (int i = 0; i < FREES; i++) {
            put(s, p[i], MIB(1), (uint64_t)i);
            OK(galloc_free(p[i], s));
            if (i == joined) order(s, t);
        }
        inside_set_memory_limit(pool, stats_of(pool).reserved.current);
        while (n <= FREES && galloc_pool_malloc(pool, &q[n], MIB(1), t) == cudaSuccess) {
            put(t, q[n], MIB(1), 200);
            n++;
        }
        EXPECT(n > joined / 2); /* of what was freed before the fork most is found */
        for (int i = 0; i < n; i++)
            for (int k = joined + 1; k < FREES; k++) EXPECT(q[i] != p[k]);
        for (int i = 0; i < n; i++) OK(galloc_free(q[i], t));
        for (int i = 0; i < FREES; i++) OK(galloc_free(wall[i], s));
        order(t, s);
        cudaGraphExec_t exec = capture_ready(s);
        launch(exec, s);
        exec_end(exec);
        sim_run(-1);
        pool_end(pool);
        finish();
    }
}

/* Many graphs, one after the other, in the memory of the largest; nobody else gets it; released, it is everybody's
   though the graphs live. */
TEST(graphs_of_a_group_share_memory)
{
    for (int round = 0; round < 8; round++) { /* segments; begun in the capture; does a fork come first */
        enum { GRAPHS = 5 };
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new(), u = stream_new();
        size_t limit = round & 4 ? MIB(20) : MIB(12);
        galloc_pool *pool = pool_of(round % 2, limit);
        galloc_graph *group = NULL;
        cudaGraphExec_t exec[GRAPHS];
        if (!(round & 2)) group = group_begin(group, pool, s);
        for (uint64_t i = 0; i < GRAPHS; i++) {
            capture_begin(s);
            if (round & 2) group = group_begin(group, group ? NULL : pool, s);
            if (round & 4) {
                order(s, t);
                (void)pass(pool, MIB(4), t, 100 + i);
                order(t, s);
            }
            void *p = get_used(pool, MIB(4), s, i);
            (void)pass(pool, MIB(2) * (i % 2 + 1), s, 10 + i);
            look(s, p, MIB(4), i);
            OK(galloc_free(p, s));
            exec[i] = capture_ready(s);
            if (round & 2) OK(galloc_graph_end(group));
            EXPECT_EQ(galloc_pool_check(pool), 0);
        }
        if (!(round & 2)) OK(galloc_graph_end(group));
        EXPECT_EQ(stats_of(pool).graphs, GRAPHS);
        EXPECT(stats_of(pool).graph_bytes >= MIB(6));
        capture_begin(s); /* another one has nothing of it */
        refused(pool, limit - MIB(5), s);
        OK(cudaGraphDestroy(capture_end(s)));
        for (int i = 0; i < 2 * GRAPHS; i++) launch(exec[i * 3 % GRAPHS], t);
        refused(pool, limit - MIB(5), u);
        OK(galloc_graph_release(group, t));
        EXPECT_EQ(galloc_pool_check(pool), 0);
        EXPECT_EQ(stats_of(pool).graph_bytes, 0);
        EXPECT_EQ(stats_of(pool).graphs, 0);
        long blocking = sim_blocking_calls();
        if (round % 2 != round / 4) expect_free_for_all(pool, MIB(10), u); /* not before its launches */
        blocking = sim_blocking_calls();
        OK(galloc_free(get_used(pool, MIB(4), t, 50), t)); /* at once, by the stream it was released on */
        EXPECT_EQ(sim_blocking_calls(), blocking);
        expect_free_for_all(pool, MIB(10), u);
        EXPECT_EQ(sim_findings(SIM_RACE), 0);
        for (int i = 0; i < GRAPHS; i++) exec_end(exec[i]);
        sim_run(-1);
        pool_end(pool);
        finish();
    }
}

/* A result of one graph is not what another one gets, until the program frees it and has done with it. */
TEST(a_group_does_not_share_results)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_of(0, MIB(8));
    galloc_graph *group = group_begin(NULL, pool, s);
    cudaGraphExec_t exec[3];
    capture_begin(s);
    void *result = get_used(pool, MIB(4), s, 1);
    exec[0] = capture_ready(s);
    capture_begin(s);
    refused(pool, MIB(6), s);
    void *q = pass(pool, MIB(4), s, 2);
    EXPECT(q != result);
    exec[1] = capture_ready(s);
    launch(exec[0], t);
    launch(exec[1], t);
    look(t, result, MIB(4), 1);
    OK(galloc_free(result, t));
    capture_begin(s);
    refused(pool, MIB(8), s); /* the look is not known to be done */
    sim_run(-1);
    OK(galloc_pool_trim(pool, SIZE_MAX, NULL));
    void *both = pass(pool, MIB(8), s, 3);
    exec[2] = capture_ready(s);
    (void)both;
    for (int i = 2; i >= 0; i--) launch(exec[i], t);
    OK(galloc_graph_end(group));
    for (int i = 0; i < 3; i++) exec_end(exec[i]);
    sim_run(-1);
    EXPECT_EQ(stats_of(pool).graph_bytes, 0); /* also without a release */
    expect_free_for_all(pool, MIB(8), s);
    OK(galloc_graph_release(group, s));
    EXPECT_EQ(sim_findings(SIM_RACE), 0);
    pool_end(pool);
    finish();
}

/* Nor does a result last: an earlier graph that had the same memory writes to it when it is launched again. */
TEST(an_earlier_graph_of_a_group_may_write_to_a_result)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_of(0, MIB(8));
    galloc_graph *group = group_begin(NULL, pool, s);
    capture_begin(s);
    void *before = pass(pool, MIB(4), s, 1);
    cudaGraphExec_t earlier = capture_ready(s);
    capture_begin(s);
    void *result = get_used(pool, MIB(4), s, 2);
    cudaGraphExec_t later = capture_ready(s);
    EXPECT(result == before);
    launch(earlier, s);
    launch(later, s);
    order(s, t);
    look(t, result, MIB(4), 2);
    order(t, s);
    launch(earlier, s);
    EXPECT_EQ(sim_findings(SIM_RACE), 0); /* for the launch came after all use of it */
    launch(later, s);
    look(s, result, MIB(4), 2);
    OK(galloc_free(result, s));
    OK(galloc_graph_end(group));
    OK(galloc_graph_release(group, s));
    exec_end(earlier);
    exec_end(later);
    sim_run(-1);
    pool_end(pool);
    finish();
}

/* Results and blocks that were recorded are released with the rest: then they are as if freed where that was. */
TEST(a_group_releases_what_is_still_held)
{
    for (int order_of = 0; order_of < 2; order_of++) {
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new(), u = stream_new();
        galloc_pool *pool = pool_of(0, MIB(8));
        galloc_graph *group = group_begin(NULL, pool, s);
        void *input = get_used(pool, MIB(2), u, 9);
        OK(cudaStreamSynchronize(u));
        capture_begin(s);
        look(s, input, MIB(2), 9);
        OK(galloc_record_stream(input, s));
        void *result = get_used(pool, MIB(2), s, 1);
        (void)pass(pool, MIB(4), s, 2);
        cudaGraphExec_t exec = capture_ready(s);
        OK(galloc_graph_end(group));
        launch(exec, t);
        if (order_of) OK(galloc_graph_release(group, t));
        OK(galloc_free(input, u));
        if (order_of) expect_free_for_all(pool, MIB(2), u); /* not what it freed, while a launch reads it */
        look(t, result, MIB(2), 1);
        OK(galloc_free(result, t));
        if (!order_of) refused(pool, MIB(1), u);
        if (!order_of) OK(galloc_graph_release(group, t));
        EXPECT_EQ(galloc_pool_check(pool), 0);
        expect_free_for_all(pool, MIB(8), u);
        EXPECT_EQ(sim_findings(SIM_RACE), 0);
        exec_end(exec);
        sim_run(-1);
        pool_end(pool);
        finish();
    }
}

static long host_blocks; /* that galloc has allocated */
static void count_malloc(size_t bytes) { host_blocks += bytes > 0; }
static void count_free(void) { host_blocks--; }

/* Nothing is left of them but the memory, while a graph may run. */
TEST(a_group_that_is_released_without_a_stream_ends_with_its_graphs)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    long before = 0;
    inside_on_malloc = count_malloc;
    inside_on_free = count_free;
    for (int i = 0; i < 200; i++) {
        cudaGraph_t graph[2];
        galloc_graph *group = group_begin(NULL, pool, s);
        for (int k = 0; k < 2; k++) {
            capture_begin(s);
            (void)pass(pool, MIB(4), s, 1);
            graph[k] = capture_end(s);
        }
        EXPECT_EQ(galloc_graph_release(group, GALLOC_NO_STREAM), cudaErrorNotPermitted);
        OK(galloc_graph_end(group));
        if (i % 2) OK(cudaGraphDestroy(graph[0]));
        if (i % 4 == 3) OK(cudaGraphDestroy(graph[1]));
        OK(galloc_graph_release(group, GALLOC_NO_STREAM));
        EXPECT_EQ(galloc_graph_release(group, GALLOC_NO_STREAM), cudaErrorInvalidResourceHandle);
        EXPECT_EQ(galloc_graph_begin(&group, NULL, s), cudaErrorInvalidResourceHandle);
        EXPECT_EQ(stats_of(pool).graph_bytes, i % 4 == 3 ? 0 : MIB(4));
        EXPECT_EQ(galloc_pool_check(pool), 0);
        if (i % 2 == 0) OK(cudaGraphDestroy(graph[0]));
        EXPECT_EQ(stats_of(pool).graph_bytes, i % 4 == 3 ? 0 : MIB(4));
        if (i % 4 != 3) OK(cudaGraphDestroy(graph[1]));
        EXPECT_EQ(stats_of(pool).graph_bytes, 0);
        EXPECT_EQ(galloc_pool_check(pool), 0);
        if (i == 99) before = host_blocks;
        if (i > 99) EXPECT_EQ(host_blocks, before);
    }
    inside_on_malloc = NULL;
    inside_on_free = NULL;
    pool_end(pool);
    finish();
}

/* A second stream of a capture whose context cannot be had is none of it, and the capture goes on as it was. */
TEST(a_stream_without_a_context_does_not_end_a_graph)
{
    static const char *const calls[] = {"cuStreamGetCtx", "cuCtxGetId"};
    for (size_t i = 0; i < 2; i++) {
        begin_still();
        cudaStream_t s = stream_new(), fork = stream_new(), t = stream_new();
        galloc_pool *pool = pool_of(0, MIB(8));
        void *q = NULL;
        capture_begin(s);
        order(s, fork);
        void *p = pass(pool, MIB(4), s, 1);
        sim_fail(calls[i], 1, 0, 0);
        EXPECT(galloc_pool_malloc(pool, &q, MIB(2), fork) != cudaSuccess);
        EXPECT_EQ(sim_failed(), 1);
        sim_fail_clear();
        EXPECT_EQ(galloc_pool_check(pool), 0);
        OK(galloc_pool_trim(pool, 0, NULL));
        EXPECT_EQ(stats_of(pool).graph_bytes, MIB(4));
        EXPECT(pass(pool, MIB(2), fork, 2) != p);
        order(fork, s);
        cudaGraphExec_t exec = capture_ready(s);
        launch(exec, t);
        exec_end(exec);
        sim_run(-1);
        pool_end(pool);
        finish();
    }
}

/* A program that captures anew each time, and records the same input each time, leaves nothing behind. */
TEST(captures_that_are_gone_are_forgotten)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *input = get_used(pool, MIB(1), s, 1);
    for (int i = 0; i < 100; i++) {
        capture_begin(s);
        OK(galloc_record_stream(input, s));
        look(s, input, MIB(1), 1);
        EXPECT(inside_captures(pool) == 1);
        OK(cudaGraphDestroy(capture_end(s)));
    }
    OK(galloc_pool_trim(pool, SIZE_MAX, NULL));
    EXPECT(inside_streams(pool) <= 2); /* the last capture's is in the block's list yet */
    EXPECT_EQ(galloc_pool_check(pool), 0);
    OK(galloc_free(input, s));
    pool_end(pool);
    finish();
}

/* Several graphs end between two calls, of groups that are released, while an older one stays: no host memory is kept
   of them. */
TEST(groups_and_captures_that_end_together_are_forgotten)
{
    enum { GROUPS = 4 };
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    size_t kept = 0;
    capture_begin(s);
    (void)pass(pool, MIB(3), s, 1);
    cudaGraph_t older = capture_end(s);
    for (int round = 0; round < 4; round++) {
        galloc_graph *group[GROUPS] = {NULL};
        cudaGraph_t graph[GROUPS];
        for (int i = 0; i < GROUPS; i++) {
            OK(galloc_graph_begin(&group[i], pool, s));
            capture_begin(s);
            (void)pass(pool, MIB(2), s, (uint64_t)i);
            graph[i] = capture_end(s);
            OK(galloc_graph_end(group[i]));
            OK(galloc_graph_release(group[i], GALLOC_NO_STREAM));
        }
        EXPECT_EQ(inside_captures(pool), GROUPS + 1);
        EXPECT(stats_of(pool).graph_bytes >= MIB(5));
        for (int i = 0; i < GROUPS; i++) OK(cudaGraphDestroy(graph[i]));
        EXPECT_EQ(stats_of(pool).graph_bytes, MIB(3));
        EXPECT_EQ(inside_captures(pool), 1);
        OK(galloc_pool_trim(pool, SIZE_MAX, NULL));
        EXPECT_EQ(galloc_pool_check(pool), 0);
        if (round > 1) EXPECT_EQ(sim_malloc_live(), kept);
        kept = sim_malloc_live();
    }
    OK(cudaGraphDestroy(older));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* Results of a graph are freed by a thread that needs no lock for that, while their group is released. */
enum { RESULTS = 400 };

static struct {
    galloc_pool *pool;
    void *result[RESULTS];
    cudaStream_t stream;
    int go;
} at_once;

static void *frees_results(void *arg)
{
    cudaStream_t s = at_once.stream;
    void *p = get(at_once.pool, KIB(4), s), *own = get(at_once.pool, KIB(4), s);
    OK(galloc_free(p, s));
    __atomic_store_n(&at_once.go, 1, __ATOMIC_RELEASE);
    for (int i = 0; i < RESULTS; i++) OK(galloc_free(at_once.result[i], s));
    OK(galloc_free(own, s));
    return arg;
}

TEST(a_group_is_released_while_results_are_freed)
{
    for (int round = 0; round < 20; round++) {
        begin();
        cudaStream_t s = stream_new(), t = stream_new();
        pthread_t thread;
        at_once.pool = pool_of(0, MIB(8));
        at_once.stream = stream_new();
        at_once.go = 0;
        galloc_graph *group = group_begin(NULL, at_once.pool, s);
        capture_begin(s);
        for (int i = 0; i < RESULTS; i++) at_once.result[i] = get_used(at_once.pool, KIB(1), s, 1);
        cudaGraphExec_t exec = capture_ready(s);
        OK(galloc_graph_end(group));
        launch(exec, t);
        order(t, at_once.stream);
        EXPECT_EQ(galloc_pool_check(at_once.pool), 0);
        EXPECT_EQ(pthread_create(&thread, NULL, frees_results, NULL), 0);
        while (!__atomic_load_n(&at_once.go, __ATOMIC_ACQUIRE)) sched_yield();
        OK(galloc_graph_release(group, t));
        EXPECT_EQ(pthread_join(thread, NULL), 0);
        exec_end(exec);
        OK(cudaDeviceSynchronize());
        EXPECT_EQ(stats_of(at_once.pool).graph_bytes, 0);
        expect_healthy(at_once.pool, 1);
        pool_end(at_once.pool);
        finish();
    }
}

/* Released while one of its streams is being captured: what is captured from then on is that graph's alone. */
TEST(a_group_is_released_in_the_middle_of_a_capture)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new(), u = stream_new();
    galloc_pool *pool = pool_of(0, MIB(8));
    galloc_graph *group = group_begin(NULL, pool, s);
    capture_begin(s);
    void *before = get(pool, MIB(2), s); /* that it was given is all: the promise is that it is not launched */
    OK(galloc_graph_end(group));
    OK(galloc_graph_release(group, t));
    EXPECT_EQ(stats_of(pool).graphs, 0);
    (void)pass(pool, MIB(4), s, 1);
    EXPECT_EQ(stats_of(pool).graphs, 1);
    OK(galloc_free(before, t));
    cudaGraphExec_t exec = capture_ready(s);
    launch(exec, t);
    refused(pool, MIB(6), u);
    (void)pass(pool, MIB(4), u, 2);
    launch(exec, t);
    EXPECT_EQ(galloc_pool_check(pool), 0);
    exec_end(exec);
    sim_run(-1);
    EXPECT_EQ(sim_findings(SIM_RACE), 0);
    pool_end(pool);
    finish();
}

/* The group goes on: its graph keeps its memory, on whichever stream the release was tried. */
TEST(a_release_that_is_refused_leaves_a_group_its_memory)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_new(NULL);
    galloc_graph *group = group_begin(NULL, pool, s);
    cudaGraphExec_t exec;
    capture_begin(s);
    void *p = pass(pool, MIB(4), s, 1);
    cudaGraph_t graph = capture_end(s);
    EXPECT_EQ(galloc_graph_release(group, t), cudaErrorNotPermitted);
    EXPECT_EQ(stats_of(pool).graph_bytes, MIB(4));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    OK(cudaGraphDestroy(graph));
    EXPECT_EQ(galloc_pool_check(pool), 0);
    capture_begin(t);
    (void)pass(pool, MIB(1), t, 1);
    OK(cudaGraphDestroy(capture_end(t))); /* the pool looks for graphs that have ended */
    for (int i = 0; i < 3; i++) {
        EXPECT(pass(pool, MIB(4), t, 2) != p);
        OK(cudaGraphLaunch(exec, s));
    }
    OK(galloc_graph_end(group));
    OK(galloc_graph_release(group, s));
    OK(cudaGraphExecDestroy(exec));
    expect_healthy(pool, 1);
    pool_end(pool);
    finish();
}

TEST(what_is_wrong_with_a_group_is_said)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_new(NULL), *other = pool_new(NULL);
    galloc_graph *a = NULL, *b = NULL, *c = NULL;
    EXPECT_EQ(galloc_graph_begin(NULL, pool, s), cudaErrorInvalidValue);
    EXPECT_EQ(galloc_graph_begin(&a, pool, 0), cudaErrorInvalidValue);
    EXPECT_EQ(galloc_graph_begin(&a, pool, cudaStreamLegacy), cudaErrorInvalidValue);
    EXPECT(a == NULL);
    EXPECT_EQ(galloc_graph_end(NULL), cudaErrorInvalidValue);
    EXPECT_EQ(galloc_graph_release(NULL, s), cudaErrorInvalidValue);
    OK(galloc_graph_begin(&a, pool, s));
    EXPECT_EQ(galloc_graph_begin(&a, pool, t), cudaErrorNotPermitted);
    EXPECT_EQ(galloc_graph_begin(&b, pool, s), cudaErrorNotPermitted);
    EXPECT(b == NULL);
    EXPECT_EQ(galloc_graph_begin(&a, other, t), cudaErrorInvalidValue);
    EXPECT_EQ(galloc_graph_release(a, t), cudaErrorNotPermitted);
    OK(galloc_graph_begin(&b, pool, t));
    OK(galloc_graph_begin(&c, NULL, cudaStreamPerThread));
    OK(galloc_graph_end(a));
    EXPECT_EQ(galloc_graph_end(a), cudaErrorNotPermitted);
    capture_begin(s);
    OK(galloc_graph_begin(&a, NULL, s));
    (void)pass(pool, MIB(1), s, 1);
    OK(galloc_graph_end(a));
    galloc_graph *d = NULL;
    EXPECT_EQ(galloc_graph_begin(&d, pool, s), cudaErrorNotPermitted); /* the capture is another one's */
    EXPECT(d == NULL);
    OK(cudaGraphDestroy(capture_end(s)));
    EXPECT_EQ(log_lines, 11);
    sim_fail_malloc(1, 0);
    EXPECT_EQ(galloc_graph_begin(&d, pool, s), cudaErrorMemoryAllocation);
    EXPECT(d == NULL);
    sim_fail_clear();
    OK(galloc_graph_release(a, s));
    OK(galloc_graph_end(b));
    OK(galloc_graph_release(b, s));
    OK(galloc_graph_end(c)); /* ends with its pool */
    pool_end(pool);
    pool_end(other);
    finish();
}

/* ---- others' captures -------------------------------------------------------------------------------------------- */

static struct {
    inside_driver driver;
    cudaStream_t captured;
    int armed;
    int invalidates; /* the capture, once the event is recorded */
    CUhostFn late[4];
    void *late_of[4];
    int nlate;
} real;

static void *begin_capture(void *arg)
{
    OK(cudaStreamBeginCapture(real.captured, cudaStreamCaptureModeRelaxed));
    return arg;
}

static void now_captured(CUstream stream)
{
    pthread_t thread;
    if (!real.armed || stream != real.captured) return;
    real.armed = 0;
    EXPECT_EQ(pthread_create(&thread, NULL, begin_capture, NULL), 0);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
}

static CUresult CUDAAPI record_once_captured(CUevent event, CUstream stream)
{
    unsigned long long id = 0;
    CUresult result;
    now_captured(stream);
    result = real.driver.EventRecord(event, stream);
    if (real.invalidates) EXPECT_EQ(cudaStreamGetId(stream, &id), cudaErrorStreamCaptureUnsupported);
    real.invalidates = 0;
    return result;
}

static CUresult CUDAAPI captured_once_looked_at(CUstream stream, CUstreamCaptureStatus *status)
{
    CUresult result = real.driver.StreamIsCapturing(stream, status);
    now_captured(stream);
    return result;
}

enum { ONCE_LOOKED_AT = 1, INVALIDATED = 2 };

/* Another thread begins to capture a stream of record_stream's just when an event is to be recorded on it for a block
   that this one frees: the event is in the capture then, and to ask for it, or for the stream's id, would end that. The
   capture may be invalidated right after. */
static void begin_in_between(int how)
{
    cudaGraph_t none = NULL;
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_of(0, MIB(8));
    void *p = get_used(pool, MIB(8), s, 1);
    OK(cudaStreamSynchronize(s));
    put(t, p, MIB(8), 2);
    OK(galloc_record_stream(p, t));
    inside_driver mine = real.driver = inside_driver_in_use();
    real.captured = t;
    real.armed = 1;
    real.invalidates = how == INVALIDATED;
    if (how == ONCE_LOOKED_AT) mine.StreamIsCapturing = captured_once_looked_at;
    else mine.EventRecord = record_once_captured;
    inside_driver_use(mine);
    OK(galloc_free(p, s));
    inside_driver_use(real.driver);
    EXPECT_EQ(real.armed, 0);
    OK(galloc_pool_trim(pool, SIZE_MAX, NULL)); /* asks for events */
    if (how == INVALIDATED) {
        EXPECT_EQ(cudaStreamEndCapture(t, &none), cudaErrorStreamCaptureInvalidated);
        (void)cudaGetLastError();
        EXPECT_EQ(sim_findings(SIM_ANY), 1);
        sim_findings_clear();
    } else {
        put(t, NULL, 0, 0);
        exec_end(capture_ready(t));
        OK(galloc_free(NULL, t));
        OK(galloc_stream_retire(t));
        sim_run(-1);
    }
    OK(galloc_pool_trim(pool, SIZE_MAX, NULL));
    expect_free_for_all(pool, MIB(8), s);
    EXPECT_EQ(sim_findings(SIM_ANY), 0);
    pool_end(pool);
    finish();
}

TEST(a_capture_begins_while_an_event_is_recorded)
{
    begin_in_between(0);
    begin_in_between(ONCE_LOOKED_AT);
    begin_in_between(INVALIDATED);
}

/* The stream that a call was given, which another thread begins to capture before the call's nth call of CUDA. */
static struct {
    cudaStream_t s;
    long left;
} intruder;

static void begin_uninvited(const char *function)
{
    (void)function;
    if (intruder.left && --intruder.left == 0) OK(cudaStreamBeginCapture(intruder.s, cudaStreamCaptureModeRelaxed));
}

/* The capture may be lost, and the call fail; memory is given to nobody too early. 0: the call made fewer calls. */
static int capture_begins_within(int what, long nth)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_of(0, MIB(16));
    cudaGraph_t graph = NULL;
    void *own = get_used(pool, MIB(6), s, 1), *other = get_used(pool, MIB(10), t, 2), *p = NULL;
    if (what != 1) OK(galloc_free(own, s));
    OK(galloc_free(other, t)); /* that work is not done */
    intruder.s = s;
    intruder.left = nth;
    sim_hook(begin_uninvited, NULL);
    cudaError_t error = what == 0   ? galloc_pool_malloc(pool, &p, MIB(8), s)
                        : what == 1 ? galloc_free(own, s)
                                    : galloc_pool_malloc(pool, &p, MIB(6), s);
    sim_hook(NULL, NULL);
    int began = !intruder.left;
    if (began && cudaStreamEndCapture(s, &graph) == cudaSuccess) OK(cudaGraphDestroy(graph));
    (void)cudaGetLastError();
    if (what == 1 && error) OK(galloc_free(own, s));
    if (p) put(s, p, what ? MIB(6) : MIB(8), 3);
    OK(galloc_free(p, s));
    void *all = get_used(pool, MIB(4), t, 4);
    OK(galloc_free(all, t));
    sim_run(-1);
    EXPECT_EQ(sim_findings(SIM_ANY), sim_findings(SIM_CAPTURE_BROKEN));
    if (sim_findings(SIM_ANY) != sim_findings(SIM_CAPTURE_BROKEN)) print_findings();
    sim_findings_clear();
    pool_end(pool);
    finish();
    return began;
}

TEST(a_capture_begins_before_any_call_of_cuda)
{
    for (int what = 0; what < 3; what++) {
        long nth = 1;
        while (capture_begins_within(what, nth)) nth++;
        EXPECT(nth > 3);
    }
}

enum { THREADS = 16 };

static struct {
    galloc_pool *pool;
    cudaStream_t stream[THREADS];
    int stop;
} crowd;

static void *crowd_member(void *arg)
{
    int me = (int)(intptr_t)arg;
    dice d = {(uint64_t)me * 77 + 1};
    cudaStream_t s = crowd.stream[me];
    void *held[6] = {NULL};
    while (!__atomic_load_n(&crowd.stop, __ATOMIC_ACQUIRE)) {
        uint32_t k = roll_below(&d, 6);
        size_t bytes = roll_bytes(&d, MIB(3));
        if (held[k]) OK(galloc_free(held[k], s));
        held[k] = NULL;
        if (galloc_pool_malloc(crowd.pool, &held[k], bytes, s) == cudaSuccess) put(s, held[k], bytes, (uint64_t)me);
        if (roll_below(&d, 200) == 0) (void)galloc_pool_trim(crowd.pool, MIB(32), NULL);
    }
    for (int k = 0; k < 6; k++) OK(galloc_free(held[k], s));
    return NULL;
}

/* Captures in global mode, the most easily broken ones, while threads allocate, free, grow, move, poll, wait, trim. */
TEST(threads_allocate_while_graphs_are_captured_and_launched)
{
    for (int fixed = 0; fixed < 2; fixed++) {
        enum { GRAPHS = 6 };
        begin();
        pthread_t thread[THREADS];
        cudaStream_t s = stream_new(), t = stream_new();
        cudaGraphExec_t exec[GRAPHS] = {NULL};
        void *result[GRAPHS] = {NULL};
        crowd.pool = pool_of(fixed, MIB(96));
        crowd.stop = 0;
        for (intptr_t i = 0; i < THREADS; i++) crowd.stream[i] = stream_new();
        for (intptr_t i = 0; i < THREADS; i++)
            EXPECT_EQ(pthread_create(&thread[i], NULL, crowd_member, (void *)i), 0);
        for (int i = 0; i < 60; i++) {
            int k = i % GRAPHS;
            if (exec[k]) exec_end(exec[k]);
            if (result[k]) OK(galloc_free(result[k], t));
            result[k] = NULL;
            capture_begin(s);
            for (uint64_t n = 0; n < 5; n++) {
                void *p = NULL;
                if (galloc_pool_malloc(crowd.pool, &p, MIB(1) << n % 3, s) != cudaSuccess) continue;
                put(s, p, MIB(1) << n % 3, n);
                look(s, p, MIB(1) << n % 3, n);
                OK(galloc_free(p, s));
            }
            if (galloc_pool_malloc(crowd.pool, &result[k], KIB(256), s) == cudaSuccess)
                put(s, result[k], KIB(256), (uint64_t)k);
            exec[k] = capture_ready(s);
            for (int n = 0; n < GRAPHS; n++) {
                if (!exec[n]) continue;
                launch(exec[n], t);
                if (result[n]) look(t, result[n], KIB(256), (uint64_t)n);
            }
        }
        __atomic_store_n(&crowd.stop, 1, __ATOMIC_RELEASE);
        for (int i = 0; i < THREADS; i++) EXPECT_EQ(pthread_join(thread[i], NULL), 0);
        for (int k = 0; k < GRAPHS; k++) {
            exec_end(exec[k]);
            OK(galloc_free(result[k], t));
        }
        OK(cudaDeviceSynchronize());
        EXPECT_EQ(sim_findings(SIM_ANY), 0);
        expect_healthy(crowd.pool, 1);
        pool_end(crowd.pool);
        finish();
    }
}

/* ---- the end ----------------------------------------------------------------------------------------------------- */

TEST(a_pool_does_not_end_before_its_graphs)
{
    for (int fixed = 0; fixed < 2; fixed++) {
        begin_still();
        galloc_pool *pool = pool_of(fixed, SIZE_MAX);
        cudaStream_t s = stream_new();
        void *own = NULL;
        capture_begin(s);
        (void)pass(pool, MIB(4), s, 1);
        OK(galloc_malloc(&own, MIB(4), s));
        put(s, own, MIB(4), 2);
        OK(galloc_free(own, s));
        cudaGraphExec_t exec = capture_ready(s);
        launch(exec, s);
        EXPECT_EQ(galloc_pool_destroy(pool), cudaErrorNotPermitted);
        EXPECT(strstr(galloc_last_message(), "graphs own 4194304") != NULL);
        EXPECT_EQ(galloc_shutdown(), cudaErrorNotPermitted);
        EXPECT_EQ(galloc_pool_check(pool), 0);
        launch(exec, s);
        exec_end(exec); /* its launches are waited for */
        pool_end(pool);
        finish();
    }
}

/* CUDA may call the destructor of a user object at any time after the graph is gone, in a thread of its own. */
static void CUDAAPI goes_late(void *i)
{
    int at = (int)(intptr_t)i;
    __atomic_store_n(&real.armed, at + 1, __ATOMIC_RELEASE);
}

static CUresult CUDAAPI create_late(CUuserObject *out, void *ptr, CUhostFn destroy, unsigned int refs,
                                    unsigned int flags)
{
    real.late[real.nlate] = destroy;
    real.late_of[real.nlate] = ptr;
    return real.driver.UserObjectCreate(out, (void *)(intptr_t)real.nlate++, goes_late, refs, flags);
}

static void *deliver_late(void *arg)
{
    usleep(3000);
    real.late[0](real.late_of[0]);
    return arg;
}

TEST(word_of_a_graphs_end_may_come_late)
{
    for (int used = 0; used < 2; used++) { /* of a graph with memory of the pool; of one without, after the pool */
        begin_still();
        pthread_t thread;
        galloc_pool *pool = pool_of(0, MIB(4));
        cudaStream_t s = stream_new();
        memset(&real, 0, sizeof real);
        inside_driver mine = real.driver = inside_driver_in_use();
        mine.UserObjectCreate = create_late;
        inside_driver_use(mine);
        capture_begin(s);
        if (used) (void)pass(pool, MIB(4), s, 1);
        else refused(pool, MIB(5), s);
        inside_driver_use(real.driver);
        EXPECT_EQ(real.nlate, 1);
        OK(cudaGraphDestroy(capture_end(s)));
        EXPECT_EQ(real.armed, 1);
        if (used) EXPECT_EQ(stats_of(pool).graph_bytes, MIB(4));
        else pool_end(pool);
        EXPECT_EQ(pthread_create(&thread, NULL, deliver_late, NULL), 0);
        if (used) pool_end(pool);
        EXPECT_EQ(pthread_join(thread, NULL), 0);
        finish();
    }
}

TEST(a_reset_ends_all_graphs)
{
    for (int released = 0; released < 2; released++) {
        begin_still();
        galloc_pool *pool = pool_of(0, MIB(4));
        cudaStream_t s = stream_new();
        capture_begin(s);
        (void)pass(pool, MIB(4), s, 1);
        cudaGraphExec_t exec = capture_ready(s);
        launch(exec, s);
        OK(cudaDeviceReset());
        if (released) exec_end(exec);
        cudaStream_t t = stream_new();
        OK(galloc_free(get_used(pool, MIB(4), t, 2), t));
        EXPECT_EQ(stats_of(pool).graph_bytes, 0);
        EXPECT_EQ(galloc_pool_check(pool), 0);
        if (!released) exec_end(exec);
        pool_end(pool);
        finish();
    }
}

/* ---- calls that fail --------------------------------------------------------------------------------------------- */

static long faulty; /* calls that failed */

/* Success, or an error with one line and nothing changed. */
static int may_fail(cudaError_t error, long lines)
{
    EXPECT_EQ(log_lines - lines, error != cudaSuccess);
    OK(cudaPeekAtLastError());
    faulty += error != cudaSuccess;
    return error == cudaSuccess;
}

static void *try_get(galloc_pool *pool, size_t bytes, cudaStream_t stream, uint64_t tag)
{
    void *ptr = pool;
    long lines = log_lines;
    if (!may_fail(galloc_pool_malloc(pool, &ptr, bytes, stream), lines)) {
        EXPECT(ptr == NULL);
        return NULL;
    }
    put(stream, ptr, bytes, tag);
    return ptr;
}

/* NULL once it is freed. */
static void *try_free(void *ptr, cudaStream_t stream, cudaStream_t other)
{
    cudaStream_t both[2] = {stream, other};
    long lines = log_lines;
    if (may_fail(other ? galloc_free_after(ptr, both, 2) : galloc_free(ptr, stream), lines)) return NULL;
    EXPECT_EQ(info_of(ptr).state, GALLOC_STATE_USED);
    return ptr;
}

/* A capture with everything in it, under a fault that is armed; it must come to a good end whatever fails. */
static void capture_with_faults(galloc_pool *pool, cudaStream_t s, cudaStream_t t)
{
    galloc_graph *group = NULL;
    void *p[6];
    long lines = log_lines;
    int begun = may_fail(galloc_graph_begin(&group, pool, s), lines);
    EXPECT_EQ(begun, group != NULL);
    p[0] = try_get(pool, MIB(2), t, 1);
    p[5] = try_get(pool, 3000, s, 1);
    capture_begin(s);
    p[1] = try_get(pool, MIB(1), s, 2);
    p[2] = try_get(pool, MIB(2), s, 3);
    p[1] = try_free(p[1], s, NULL);
    order(s, t);
    p[3] = try_get(pool, MIB(1), t, 4);
    p[3] = try_free(p[3], t, s);
    lines = log_lines;
    if (p[0]) (void)may_fail(galloc_record_stream(p[0], s), lines);
    p[4] = try_get(pool, MIB(1), s, 5);
    p[2] = try_free(p[2], s, NULL);
    p[5] = try_free(p[5], s, NULL);
    order(t, s);
    cudaGraphExec_t exec = capture_ready(s);
    launch(exec, t);
    order(t, s);
    p[4] = try_free(p[4], t, NULL);
    p[0] = try_free(p[0], t, NULL);
    if (begun) {
        lines = log_lines;
        OK(galloc_graph_end(group));
        if (!may_fail(galloc_graph_release(group, t), lines)) {
            sim_fail_clear();
            OK(galloc_graph_release(group, t));
        }
    }
    sim_fail_clear();
    for (int i = 0; i < 6; i++) OK(galloc_free(p[i], i == 5 ? s : t));
    exec_end(exec);
}

static int sweep_one(const char *function, long nth, int on, int fixed)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_of(fixed, MIB(64));
    faulty = 0;
    if (function) sim_fail(function, nth, on, 0);
    else sim_fail_malloc(nth, on);
    capture_with_faults(pool, s, t);
    EXPECT_EQ(galloc_pool_check(pool), 0);
    OK(cudaDeviceSynchronize());
    EXPECT_EQ(sim_findings(SIM_ANY), 0);
    pool_end(pool);
    finish();
    return faulty != 0;
}

/* Memory of a graph that galloc does not know would be free for other streams at once. */
TEST(a_stream_whose_capture_is_not_told_gets_no_memory)
{
    begin();
    cudaStream_t s = stream_new();
    cudaGraph_t graph = NULL;
    galloc_pool *pool = pool_new(NULL);
    void *p = NULL;
    OK(galloc_free(get(pool, MIB(4), s), s));
    OK(cudaStreamSynchronize(s));
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    for (int known = 0; known < 2; known++) {
        sim_fail("cuStreamGetCaptureInfo", 1, 0, cudaErrorUnknown);
        EXPECT_EQ(galloc_pool_malloc(pool, &p, MIB(4), s), cudaErrorUnknown);
        EXPECT(p == NULL);
        EXPECT_EQ(sim_failed(), 1);
        EXPECT(strstr(galloc_last_message(), "looking at the stream") != NULL);
        sim_fail_clear();
        void *q = get(pool, MIB(4), s);
        EXPECT(info_of(q).capture_id != 0);
        sim_fail("cuStreamGetCaptureInfo", 1, 0, cudaErrorUnknown);
        EXPECT_EQ(galloc_record_stream(q, s), cudaErrorUnknown);
        EXPECT_EQ(sim_failed(), 1);
        sim_fail_clear();
        OK(galloc_free(q, s));
    }
    OK(cudaStreamEndCapture(s, &graph));
    OK(cudaGraphDestroy(graph));
    pool_end(pool);
    stream_end(s);
    finish();
}

TEST(a_capture_survives_every_call_that_fails)
{
    static const char *const functions[] = {
        "cuStreamIsCapturing", "cuStreamGetCaptureInfo", "cuStreamGetCtx", "cuCtxGetId", "cuCtxGetCurrent",
        "cuUserObjectCreate", "cuGraphRetainUserObject", "cuEventRecord", "cuEventCreate", "cuEventQuery",
        "cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemAlloc", "cuMemAddressReserve", NULL};
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        for (int way = 0; way < 4; way++) {
            int misses = 0, hits = 0;
            for (long nth = 1; nth < 60 && misses < 8; nth++) {
                int hit = sweep_one(functions[i], nth, way % 2, way / 2);
                misses = hit ? 0 : misses + 1;
                hits += hit;
            }
            if (functions[i] && strstr(functions[i], "UserObject")) EXPECT(hits > 0);
        }
}

/* ---- all of it, at random ---------------------------------------------------------------------------------------- */

enum { STREAMS = 4, BLOCKS = 24, GRAPHS = 6 };

/* What one stream, or the graph that it captures, has. */
typedef struct owner {
    cudaStream_t stream;
    int capturing;
    galloc_graph *group;
} owner;

typedef struct mixture {
    dice d;
    galloc_pool *pool;
    owner o[STREAMS];
    cudaStream_t late; /* where graphs are launched, one after the other; it is never captured */
    struct {
        void *ptr;
        size_t bytes;
        uint64_t tag;
        int home;    /* of which stream it is, or was captured */
        int capture; /* number of the capture; 0: none */
    } block[BLOCKS];
    struct {
        cudaGraphExec_t exec;
        int capture;
    } graph[GRAPHS];
    galloc_graph *group;
    int captures, numbers[STREAMS];
    uint64_t tags;
} mixture;

static void mix_get(mixture *m, uint32_t k, int i)
{
    void *ptr = NULL;
    owner *o = &m->o[i];
    size_t bytes = roll_bytes(&m->d, MIB(6));
    if (m->block[k].ptr || galloc_pool_malloc(m->pool, &ptr, bytes, o->stream) != cudaSuccess) return;
    m->block[k].ptr = ptr;
    m->block[k].bytes = bytes;
    m->block[k].tag = ++m->tags;
    m->block[k].home = i;
    m->block[k].capture = o->capturing ? m->numbers[i] : 0;
    put(o->stream, ptr, bytes, m->tags);
}

/* Frees it where it is, in its capture, after that, or, if it is older than the capture of its stream, in that. */
static void mix_free(mixture *m, uint32_t k)
{
    owner *o = &m->o[m->block[k].home];
    int number = m->block[k].capture, within = o->capturing && m->numbers[m->block[k].home] == number;
    if (!m->block[k].ptr) return;
    if (!number && !o->capturing) look(o->stream, m->block[k].ptr, m->block[k].bytes, m->block[k].tag);
    if (number && within) look(o->stream, m->block[k].ptr, m->block[k].bytes, m->block[k].tag);
    if (number && !within) OK(galloc_free(m->block[k].ptr, m->late));
    else OK(galloc_free(m->block[k].ptr, o->stream));
    m->block[k].ptr = NULL;
}

static void mix_capture(mixture *m, int i)
{
    owner *o = &m->o[i];
    if (o->capturing) return;
    OK(cudaStreamBeginCapture(o->stream, modes[roll_below(&m->d, 3)]));
    o->capturing = 1;
    m->numbers[i] = ++m->captures;
}

static void mix_ready(mixture *m, int i)
{
    owner *o = &m->o[i];
    uint32_t g = roll_below(&m->d, GRAPHS);
    if (!o->capturing) return;
    o->capturing = 0;
    if (m->graph[g].exec) exec_end(m->graph[g].exec);
    m->graph[g].exec = NULL;
    cudaGraph_t graph = capture_end(o->stream), clone = NULL;
    if (roll_below(&m->d, 4) == 0) { /* thrown away */
        OK(cudaGraphDestroy(graph));
        return;
    }
    OK(cudaGraphClone(&clone, graph));
    OK(cudaGraphInstantiate(&m->graph[g].exec, roll_below(&m->d, 2) ? clone : graph, 0));
    OK(cudaGraphDestroy(clone));
    OK(cudaGraphDestroy(graph));
    m->graph[g].capture = m->numbers[i];
}

static void mix_launch(mixture *m)
{
    uint32_t g = roll_below(&m->d, GRAPHS);
    if (!m->graph[g].exec) return;
    launch(m->graph[g].exec, m->late);
    for (int k = 0; k < BLOCKS; k++)
        if (m->block[k].ptr && m->block[k].capture == m->graph[g].capture)
            look(m->late, m->block[k].ptr, m->block[k].bytes, m->block[k].tag);
}

/* A result becomes shorter, or longer where it stands; an eager block likewise. Not in captures. */
static void mix_resize(mixture *m, uint32_t k)
{
    owner *o = &m->o[m->block[k].home];
    size_t bytes = 1 + m->block[k].bytes * (1 + roll_below(&m->d, 8)) / 4;
    if (!m->block[k].ptr || o->capturing) return;
    if (galloc_resize(m->block[k].ptr, bytes, m->block[k].capture ? m->late : o->stream) != cudaSuccess) return;
    if (bytes > m->block[k].bytes && !m->block[k].capture) put(o->stream, m->block[k].ptr, bytes, m->block[k].tag);
    if (bytes < m->block[k].bytes || !m->block[k].capture) m->block[k].bytes = bytes;
}

static void mix_step(mixture *m)
{
    uint32_t k = roll_below(&m->d, BLOCKS);
    int i = (int)roll_below(&m->d, STREAMS);
    switch (roll_below(&m->d, 16)) {
    case 0: mix_capture(m, i); break;
    case 1: mix_ready(m, i); break;
    case 2:
    case 3: mix_launch(m); break;
    case 4:
        if (roll_below(&m->d, 4) == 0) (void)galloc_pool_trim(m->pool, MIB(4), NULL);
        else mix_resize(m, k);
        break;
    case 5:
        if (m->block[k].ptr) OK(galloc_record_stream(m->block[k].ptr, m->o[i].stream));
        break;
    case 6:
    case 7:
    case 8:
    case 9: mix_free(m, k); break;
    default: mix_get(m, k, i);
    }
}

static void mix_open(mixture *m, int round)
{
    sim_options options = sim_defaults();
    options.seed = test_seed() + (uint64_t)round;
    options.pace = round % 3 - 1;
    begin_with(options);
    galloc_config config = config_limit(MIB(48) + MIB(16) * (size_t)(round % 4));
    config.expandable_segments = round % 5 != 4;
    config.overhead = round % 2 ? 0 : 0.02;
    memset(m, 0, sizeof *m);
    m->d.state = test_seed() * 31 + (uint64_t)round;
    m->pool = pool_new(&config);
    for (int i = 0; i < STREAMS; i++) m->o[i].stream = stream_new();
    m->late = stream_new();
    if (round % 2) m->group = group_begin(NULL, m->pool, m->o[0].stream);
}

TEST(random_captures_launches_and_ends)
{
    static mixture m;
    for (int round = 0; round < 400; round++) {
        mix_open(&m, round);
        for (int i = 0; i < 400; i++) {
            mix_step(&m);
            if (i % 50 == 0) EXPECT_EQ(galloc_pool_check(m.pool), 0);
        }
        for (int i = 0; i < STREAMS; i++) mix_ready(&m, i);
        for (uint32_t k = 0; k < BLOCKS; k++) mix_free(&m, k);
        for (int i = 0; i < 8; i++) mix_launch(&m);
        if (m.group) OK(galloc_graph_end(m.group));
        if (m.group && round % 4 == 1) OK(galloc_graph_release(m.group, m.late));
        for (int g = 0; g < GRAPHS; g++)
            if (m.graph[g].exec) exec_end(m.graph[g].exec);
        OK(cudaDeviceSynchronize());
        if (m.group && round % 4 == 3) OK(galloc_graph_release(m.group, m.late));
        EXPECT_EQ(stats_of(m.pool).graph_bytes, 0);
        EXPECT_EQ(stats_of(m.pool).graphs, 0);
        expect_healthy(m.pool, 1);
        pool_end(m.pool);
        finish();
    }
}

/* The capture of `s` that `t` is part of ends; `q` is freed on `t`. */
static void end_with_capture(galloc_pool *pool, cudaStream_t s, cudaStream_t t, void *q)
{
    cudaGraph_t graph;
    OK(galloc_free(q, t));
    order(t, s);
    OK(cudaStreamEndCapture(s, &graph));
    OK(cudaGraphDestroy(graph));
    pool_end(pool);
    finish();
}

/* What is freed where a captured stream has joined three others serves a stream that comes after it. */
TEST(memory_freed_where_streams_join_serves_who_comes_after)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new(), others[3];
    galloc_pool *pool = pool_limited(MIB(64));
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    void *p = get_used(pool, MIB(4), s, 1);
    for (int i = 0; i < 3; i++) {
        others[i] = stream_new();
        order(s, others[i]);
        look(others[i], p, MIB(4), 1);
        order(others[i], s);
    }
    OK(galloc_free(p, s));
    order(s, t);
    void *q = get(pool, MIB(4), t);
    EXPECT(p == q);
    end_with_capture(pool, s, t, q);
}

/* A stream that follows an earlier place of another one has what was freed there, not what was freed later. */
TEST(memory_freed_at_an_earlier_place_serves_who_follows_that)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_limited(MIB(64));
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    void *early = get_used(pool, MIB(4), s, 1), *between = get_used(pool, MIB(2), s, 2);
    void *late = get_used(pool, MIB(4), s, 3);
    OK(galloc_free(early, s));
    order(s, t);
    put(s, between, MIB(2), 2);
    OK(galloc_free(late, s));
    void *q = get(pool, MIB(4), t);
    EXPECT(q == early);
    OK(galloc_free(between, s));
    end_with_capture(pool, s, t, q);
}

/* What another thread frees on the captured stream before the nth look into the capture. */
static struct {
    cudaStream_t s;
    void *p;
    int looks;
} overtaking;

static void overtake(const char *function)
{
    if (!overtaking.looks || strcmp(function, "cuStreamGetCaptureInfo") || --overtaking.looks) return;
    OK(galloc_free(overtaking.p, overtaking.s));
}

/* Two threads free on a captured stream, the second one in the middle of the first one's call: a stream that the graph
   orders after both has the memory of both. */
TEST(frees_on_a_captured_stream_may_overtake_each_other)
{
    int overtaken = 1;
    for (int look = 1; overtaken; look++) {
        begin();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = pool_limited(MIB(8));
        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
        void *p = get_used(pool, MIB(4), s, 1), *q = get_used(pool, MIB(4), s, 2);
        overtaking.s = s;
        overtaking.p = q;
        overtaking.looks = look;
        sim_hook(overtake, NULL);
        OK(galloc_free(p, s));
        sim_hook(NULL, NULL);
        overtaken = !overtaking.looks;
        EXPECT(overtaken || look > 2);
        if (!overtaken) OK(galloc_free(q, s));
        EXPECT_EQ(galloc_pool_check(pool), 0);
        order(s, t);
        end_with_capture(pool, s, t, get_used(pool, MIB(8), t, 3));
    }
}

/* The stream on which another capture begins before the nth look into the first one. */
static struct {
    cudaStream_t s;
    int looks;
} replaced;

static void replace_the_capture(const char *function)
{
    if (!replaced.looks || strcmp(function, "cuStreamGetCaptureInfo") || --replaced.looks) return;
    OK(cudaGraphDestroy(capture_end(replaced.s)));
    OK(cudaStreamBeginCapture(replaced.s, cudaStreamCaptureModeRelaxed));
}

/* Another thread ends the capture and begins one before the pool has noted the first: that one's request is refused. */
TEST(a_request_gets_no_memory_of_the_next_capture)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_limited(MIB(8));
    void *p = NULL;
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    replaced.s = s;
    replaced.looks = 2;
    sim_hook(replace_the_capture, NULL);
    EXPECT_EQ(galloc_pool_malloc(pool, &p, MIB(4), s), cudaErrorStreamCaptureInvalidated);
    sim_hook(NULL, NULL);
    EXPECT(!replaced.looks && !p);
    (void)pass(pool, MIB(8), s, 1); /* memory of the graph that is captured now */
    EXPECT_EQ(galloc_pool_check(pool), 0);
    exec_end(capture_ready(s));
    pool_end(pool);
    finish();
}

/* The captured stream whose graph ends before the nth look into its capture. */
static struct {
    galloc_pool *pool;
    cudaStream_t s;
    int looks;
} cut_short;

static void end_the_graph(const char *function)
{
    if (!cut_short.looks || strcmp(function, "cuStreamGetCaptureInfo") || --cut_short.looks) return;
    OK(cudaGraphDestroy(capture_end(cut_short.s)));
    OK(galloc_pool_trim(cut_short.pool, 0, NULL)); /* finds that the graph is gone */
}

/* Another thread ends the capture and its graph in the middle of a free: all memory is common again. */
TEST(a_graph_ends_in_the_middle_of_a_captured_free)
{
    int cut = 1;
    for (int look = 1; cut; look++) {
        begin();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = pool_limited(MIB(8));
        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
        void *p = get_used(pool, MIB(4), s, 1);
        cut_short.s = s;
        cut_short.pool = pool;
        cut_short.looks = look;
        sim_hook(end_the_graph, NULL);
        OK(galloc_free(p, s));
        sim_hook(NULL, NULL);
        cut = !cut_short.looks;
        EXPECT(cut || look > 2);
        if (!cut) OK(cudaGraphDestroy(capture_end(s)));
        EXPECT_EQ(galloc_pool_check(pool), 0);
        OK(galloc_free(get(pool, MIB(8), t), t));
        EXPECT_EQ(galloc_pool_check(pool), 0);
        pool_end(pool);
        finish();
    }
}

/* throw_on_cudamalloc_oom leaves out steps that wait or give memory back. To follow the graph's order does neither. */
TEST(a_request_that_is_not_to_wait_follows_the_graph)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_config config = config_limit(MIB(4));
    config.throw_on_cudamalloc_oom = 1;
    galloc_pool *pool = pool_new(&config);
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    void *p = get_used(pool, MIB(4), s, 1);
    OK(galloc_free(p, s));
    order(s, t);
    void *q = get(pool, MIB(4), t);
    EXPECT(q == p);
    end_with_capture(pool, s, t, q);
}

/* A pool ends although a graph exists in whose capture it was asked in vain: the graph owns nothing of it. */
TEST(a_graph_without_memory_of_a_pool_does_not_keep_the_pool)
{
    begin();
    cudaStream_t s = stream_new();
    cudaGraph_t graph;
    galloc_pool *pool = pool_limited(MIB(2));
    void *p = get(pool, MIB(2), s), *q = NULL;
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    EXPECT_EQ(galloc_pool_malloc(pool, &q, MIB(1), s), cudaErrorMemoryAllocation);
    OK(cudaStreamEndCapture(s, &graph));
    OK(galloc_free(p, s));
    EXPECT_EQ(stats_of(pool).graph_bytes, 0);
    pool_end(pool);
    OK(cudaGraphDestroy(graph));
    finish();
}

/* What a captured stream frees behind a join of 13 nodes is reused by a stream that the graph orders after it. */
TEST(what_is_freed_behind_a_join_of_13_nodes_is_reused_behind_it)
{
    begin();
    enum { SIDES = 12 };
    cudaStream_t s = stream_new(), t = stream_new(), u[SIDES];
    galloc_pool *pool = pool_new(NULL);
    cudaGraph_t graph = NULL;
    void *p, *q, *other[SIDES];
    for (int i = 0; i < SIDES; i++) OK(cudaMalloc(&other[i], 4096));
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    put(s, other[0], 4096, 1);
    order(s, t);
    p = get_used(pool, MIB(4), t, 2);
    for (int i = 0; i < SIDES; i++) {
        u[i] = stream_new();
        order(t, u[i]);
        put(u[i], other[i], 4096, 3);
    }
    for (int i = 0; i < SIDES; i++) order(u[i], t);
    OK(galloc_free(p, t)); /* t's next work would depend on 13 nodes: its own and those of the sides */
    order(t, s);
    q = get_used(pool, MIB(4), s, 4);
    EXPECT(p == q);
    OK(galloc_free(q, s));
    OK(cudaStreamEndCapture(s, &graph));
    OK(cudaGraphDestroy(graph));
    sim_run(-1);
    for (int i = 0; i < SIDES; i++) {
        OK(cudaFree(other[i]));
        stream_end(u[i]);
    }
    stream_end(s);
    stream_end(t);
    pool_end(pool);
    finish();
}

TEST_MAIN()
