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

static void *get_used(galloc_pool *pool, size_t bytes, cudaStream_t stream, uint64_t tag)
{
    void *ptr = get(pool, bytes, stream);
    put(stream, ptr, bytes, tag);
    return ptr;
}

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
    if (!EXPECT_EQ(galloc_pool_malloc(pool, &ptr, bytes, stream), cudaErrorMemoryAllocation)) abort();
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
            OK(galloc_pool_trim(pool, 0));
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
        for (int i = 0; i < 200; i++) {
            uint32_t k = roll_below(&d, 8);
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

/* Allocated in a capture and kept: the holder's, whatever becomes of the graph; freed, the graph's again. */
TEST(a_result_is_its_holders_and_then_the_graphs)
{
    for (int round = 0; round < 12; round++) { /* segments, what ends first, a shelf in between */
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
    for (int round = 0; round < 12; round++) { /* whose block, segments, how it is freed */
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new(), u = stream_new();
        galloc_pool *pool = pool_of(round / 2 % 2, MIB(4));
        void *p = get_used(pool, MIB(4), round % 2 ? t : s, 1);
        if (round % 2) order(t, s);
        put(s, p, MIB(4), 2);
        cudaStream_t both[2] = {s, u};
        capture_begin(s);
        if (round / 4 == 0) OK(galloc_free(p, s));
        if (round / 4 == 1) OK(galloc_free_after(p, both, 2));
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

/* What a front gave out again has no mark for the work before: freed in a capture it gets one. */
TEST(a_block_from_a_front_is_freed_in_a_capture)
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
    (void)galloc_pool_trim(drawn.pool, 0);
    exec_end(exec);
    EXPECT_EQ(sim_findings(SIM_RACE), 0);
    sim_run(-1);
    OK(cudaEventDestroy(drawn.start));
    OK(cudaEventDestroy(drawn.end));
    pool_end(drawn.pool);
    finish();
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
    OK(galloc_free(small, s)); /* in its front */
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

TEST_MAIN()
