/* test_override.c - GALLOC_OVERRIDE_CUDA: cudaMalloc, cudaFree, cudaMallocAsync and cudaFreeAsync of this file are
   galloc's. What they promise is CUDA's: memory of cudaMalloc is for every stream, and cudaFree waits. As C++, and in
   programs of several files: tests/compile/override.c. */

#define _GNU_SOURCE /* setup.h has it too, but is not the first to include something here */
#include <cuda_runtime_api.h>

static cudaError_t plain_malloc(void **p, size_t bytes) { return cudaMalloc(p, bytes); }
static cudaError_t plain_malloc_async(void **p, size_t bytes) { return cudaMallocAsync(p, bytes, 0); }

#define GALLOC_OVERRIDE_CUDA
#include "setup.h"

static void start(void)
{
    static int started;
    if (!started++) begin_with_devices(3, SIM_PACE_STILL);
    OK(cudaSetDevice(0));
}

static void no_findings(void)
{
    sim_run(-1);
    if (sim_finding(0)) printf("found: %s\n", sim_finding(0));
    EXPECT_EQ(sim_findings(SIM_ANY), 0);
}

static void *alloc(size_t bytes)
{
    void *p = NULL;
    OK(cudaMalloc(&p, bytes));
    return p;
}

static void *make_one(void *arg)
{
    (void)arg;
    OK(cudaSetDevice(1));
    void *p = NULL;
    OK(cudaMallocAsync(&p, KIB(64), 0));
    OK(cudaFreeAsync(p, 0)); /* which looks whether that pool is there already */
    p = alloc(KIB(64));
    galloc_pool *pool = info_of(p).pool;
    OK(cudaFree(p));
    return pool;
}

/* Whoever comes first makes the pool of a device, and all use that one. */
TEST(threads)
{
    start();
    pthread_t thread[4];
    void *pool[4];
    int i;
    for (i = 0; i < 4; i++) pthread_create(&thread[i], NULL, make_one, NULL);
    for (i = 0; i < 4; i++) pthread_join(thread[i], &pool[i]);
    for (i = 1; i < 4; i++) EXPECT(pool[i] == pool[0]);
    no_findings();
}

/* A stream is busy with memory that was freed on it. Other streams are not ordered with it. */
static void other_memory_is_not_for_all(cudaStream_t busy)
{
    cudaStream_t other = stream_new();
    void *p = NULL, *q;
    OK(cudaMallocAsync(&p, MIB(8), busy));
    put(busy, p, MIB(8), 1);
    OK(cudaFreeAsync(p, busy));
    EXPECT(sim_pending() > 0); /* nothing has waited */
    q = alloc(MIB(8));
    EXPECT(sim_pending() > 0);
    put(other, q, MIB(8), 2);
    OK(cudaFree(q));
    EXPECT_EQ(sim_pending(), 0);
    stream_end(other);
    no_findings();
}

TEST(memory_for_every_stream)
{
    start();
    other_memory_is_not_for_all(cudaStreamLegacy);
}

/* Memory that blocking streams use, in no other order than that of calls on the legacy stream between them. */
TEST(calls_on_the_legacy_stream_order_blocking_streams)
{
    start();
    for (int zero = 0; zero < 2; zero++) {
        cudaStream_t a = NULL, b = NULL, legacy = zero ? NULL : cudaStreamLegacy;
        void *p = NULL, *q = NULL;
        OK(cudaStreamCreate(&a));
        OK(cudaStreamCreate(&b));
        OK(cudaMallocAsync(&p, MIB(8), legacy));
        put(a, p, MIB(8), 1);
        OK(cudaFreeAsync(p, legacy)); /* after the work of a */
        OK(cudaMallocAsync(&q, MIB(8), legacy));
        EXPECT(q == p);
        put(b, q, MIB(8), 2);
        OK(cudaFreeAsync(q, b));
        OK(cudaMallocAsync(&p, MIB(8), legacy)); /* after that of b */
        put(a, p, MIB(8), 3);
        OK(cudaFreeAsync(p, a));
        OK(cudaMallocAsync(&q, MIB(8), b));
        put(b, q, MIB(8), 4);
        OK(cudaFreeAsync(q, b));
        stream_end(a);
        stream_end(b);
        no_findings();
    }
}

/* A free is refused as in CUDA, but the capture goes on. */
static long events_alive(void) { return sim_calls("cuEventCreate") - sim_calls("cuEventDestroy"); }

/* What orders a free behind the blocking streams does not stay, also when it fails. */
TEST(a_free_on_the_legacy_stream_leaves_no_event)
{
    start();
    void *p = NULL;
    for (int i = 0; i < 20; i++) {
        OK(cudaMallocAsync(&p, KIB(4), 0));
        long before = events_alive();
        if (i % 2) {
            sim_fail("cuEventRecord", 1, 0, cudaErrorUnknown);
            EXPECT_EQ(cudaFreeAsync(p, i % 4 == 1 ? NULL : cudaStreamLegacy), cudaErrorUnknown);
            sim_fail_clear();
        }
        OK(cudaFreeAsync(p, i % 4 < 2 ? NULL : cudaStreamLegacy));
        EXPECT_EQ(events_alive(), before);
    }
    no_findings();
}

TEST(a_call_on_the_legacy_stream_ends_no_capture)
{
    start();
    cudaStream_t blocking = NULL;
    cudaGraph_t graph = NULL;
    void *p = NULL, *q = NULL;
    OK(cudaMallocAsync(&p, KIB(64), 0));
    OK(cudaFreeAsync(p, 0)); /* the stream cache has it */
    OK(cudaMallocAsync(&q, KIB(32), 0));
    OK(cudaStreamCreate(&blocking));
    OK(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeGlobal));
    OK(cudaMallocAsync(&p, KIB(64), 0));
    EXPECT_EQ(cudaFreeAsync(q, 0), cudaErrorStreamCaptureImplicit);
    OK(cudaStreamEndCapture(blocking, &graph));
    OK(cudaFreeAsync(q, 0));
    OK(cudaFreeAsync(p, 0));
    OK(cudaGraphDestroy(graph));
    stream_end(blocking);
    (void)cudaGetLastError();
    no_findings();
}

/* In each capture mode, on the captured stream and on another one. */
TEST(a_free_of_cudamallocs_memory_ends_no_capture)
{
    start();
    cudaStream_t captured = stream_new(), s = stream_new();
    static const enum cudaStreamCaptureMode modes[] = {
        cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeRelaxed};
    for (int i = 0; i < 3; i++) {
        cudaGraph_t graph = NULL;
        void *p = alloc(KIB(64));
        put(s, p, KIB(64), 1);
        OK(cudaStreamBeginCapture(captured, modes[i]));
        EXPECT_EQ(cudaFreeAsync(p, captured), cudaErrorStreamCaptureUnsupported); /* it cannot be waited for */
        OK(cudaFreeAsync(p, s));
        EXPECT(sim_stream_done(s));
        OK(cudaStreamEndCapture(captured, &graph));
        OK(cudaGraphDestroy(graph));
    }
    stream_end(captured);
    stream_end(s);
    no_findings();
}

/* Also while a blocking stream is captured, when the legacy stream cannot be waited for. */
TEST(memory_for_every_stream_has_no_work_of_debug_left)
{
    static const char *const settings[] = {"debug:guards", "debug:poison", "debug:quarantine,quarantine_bytes:4096",
                                           "debug:guards+poison,debug_sample:64"};
    start();
    cudaStream_t s = stream_new(), captured = NULL;
    OK(cudaStreamCreate(&captured));
    for (int kind = 0; kind < 4; kind++) {
        cudaGraph_t graph = NULL;
        OK(galloc_shutdown());
        setenv("GALLOC_CONF", settings[kind], 1);
        for (int i = 0; i < 100; i++) {
            void *p = alloc(1000);
            put(s, p, 1000, 1);
            OK(i % 2 ? cudaFree(p) : cudaFreeAsync(p, s));
            OK(cudaStreamBeginCapture(captured, cudaStreamCaptureModeRelaxed));
            p = alloc(1000);
            put(s, p, 1000, 2);
            OK(cudaStreamSynchronize(s));
            OK(cudaStreamEndCapture(captured, &graph));
            OK(cudaGraphDestroy(graph));
            OK(cudaFree(p));
        }
        no_findings();
    }
    OK(galloc_shutdown());
    unsetenv("GALLOC_CONF");
    stream_end(s);
    stream_end(captured);
}

/* The wait for that work is made even if a call of it fails. */
TEST(a_call_that_fails_leaves_no_work_of_debug)
{
    static const char *const calls[] = {"cuCtxGetId", "cuCtxPushCurrent", "cuCtxGetCurrent", "cuStreamSynchronize",
                                        "cuThreadExchangeStreamCaptureMode"};
    start();
    OK(galloc_shutdown());
    setenv("GALLOC_CONF", "debug:poison,log:off", 1);
    cudaStream_t s = stream_new(), t = stream_new();
    for (size_t call = 0; call < sizeof calls / sizeof *calls; call++) {
        for (long nth = 1;; nth++) {
            void *p = alloc(MIB(16));
            put(s, p, MIB(16), 1);
            OK(cudaFreeAsync(p, s));
            sim_fail(calls[call], nth, 0, 0);
            int refused = cudaMalloc(&p, 1000) != cudaSuccess;
            long failed = sim_failed();
            sim_fail_clear();
            if (!refused) {
                put(t, p, 1000, 2);
                OK(cudaFreeAsync(p, t));
            }
            no_findings();
            if (!failed) break;
        }
    }
    OK(galloc_shutdown());
    unsetenv("GALLOC_CONF");
    stream_end(s);
    stream_end(t);
}

TEST(free_waits)
{
    start();
    cudaStream_t a = stream_new(), b = stream_new();
    void *p = alloc(MIB(8)), *q;
    put(a, p, MIB(8), 1);
    EXPECT(!sim_stream_done(a));
    OK(cudaFree(p));
    EXPECT(sim_stream_done(a));
    q = alloc(MIB(8));
    EXPECT(q == p); /* the same memory, on another stream */
    put(b, q, MIB(8), 2);
    OK(cudaFree(q));
    OK(cudaFree(NULL));
    OK(cudaMallocAsync(&q, 0, a)); /* gives NULL */
    OK(cudaFreeAsync(q, a));
    stream_end(a);
    stream_end(b);
    no_findings();
}

static void count(void *number) { ++*(int *)number; }
static void note_end(void *done) { *(int *)done = 1; }

/* A use on the legacy stream that the program has noted is waited for, as the next cudaMalloc gets what is free there
   at once. Without such a note the stream of the free is enough. */
TEST(a_free_waits_for_a_noted_use_on_the_legacy_stream)
{
    for (int how = 0; how < 3; how++) { /* 2: that of another context, which is not current at the free */
        start();
        int done = 0;
        void *p = NULL, *q = NULL;
        CUcontext other = NULL, own = NULL;
        cudaStream_t s = stream_new(), t = stream_new();
        OK(cudaMalloc(&p, MIB(1)));
        OK(cuCtxGetCurrent(&own));
        if (how == 2) OK(cuCtxCreate(&other, NULL, 0, 0));
        sim_access access = {p, MIB(1), SIM_WRITE, 1};
        OK(sim_launch_call(how ? cudaStreamLegacy : s, &access, 1, note_end, &done));
        if (how) OK(galloc_record_stream(p, cudaStreamLegacy));
        OK(cuCtxSetCurrent(own));
        long waits = sim_calls("cuStreamSynchronize");
        OK(cudaFreeAsync(p, s));
        EXPECT_EQ(sim_calls("cuStreamSynchronize") - waits, 1 + (how > 0));
        EXPECT_EQ(done, 1);
        if (how == 2) OK(cuCtxSetCurrent(other));
        OK(cudaMalloc(&q, MIB(1)));
        OK(cuCtxSetCurrent(own));
        put(t, q, MIB(1), 2);
        OK(cudaFree(q));
        stream_end(s);
        stream_end(t);
        if (how == 2) OK(cuCtxDestroy(other));
        no_findings();
    }
}

/* But nothing waits for the legacy stream without need: galloc has the memory of cudaMalloc at once, and a noted use is
   waited for on the stream of the free alone. */
TEST(work_on_the_legacy_stream_holds_up_nothing_else)
{
    start();
    int done = 0;
    galloc_config config = galloc_config_default();
    config.backend = GALLOC_BACKEND_CUDA_MALLOC_ASYNC;
    galloc_pool *beside = pool_new(&config); /* its memory the driver would allocate in order */
    cudaStream_t s = stream_new(), t = stream_new();
    void *p = alloc(MIB(1)), *q;
    OK(sim_launch_call(cudaStreamLegacy, NULL, 0, note_end, &done));
    q = alloc(MIB(1));
    EXPECT_EQ(done, 0);
    put(t, q, MIB(1), 1);
    OK(galloc_record_stream(q, t));
    OK(cudaFreeAsync(q, s));
    EXPECT_EQ(done, 0);
    OK(cudaFree(p));
    EXPECT_EQ(done, 1);
    pool_end(beside);
    stream_end(s);
    stream_end(t);
    no_findings();
}

/* So are such uses in several contexts, all of them. */
TEST(a_free_waits_for_noted_uses_on_each_legacy_stream)
{
    enum { N = 3, LONG = 50 };
    for (int longest = 0; longest < N; longest++) {
        start();
        CUcontext context[N] = {NULL}, own = NULL;
        int done[N] = {0};
        cudaStream_t s = stream_new();
        char *p = alloc(MIB(1));
        OK(cuCtxGetCurrent(&own));
        for (int i = 0; i < N; i++) {
            sim_access access = {p + (size_t)i * KIB(64), KIB(64), SIM_WRITE, (uint64_t)i + 1};
            OK(cuCtxCreate(&context[i], NULL, 0, 0));
            for (int k = i == longest ? 0 : LONG - 1; k < LONG; k++)
                OK(sim_launch_call(cudaStreamLegacy, &access, 1, count, &done[i]));
            OK(galloc_record_stream(p, cudaStreamLegacy));
        }
        OK(cuCtxSetCurrent(own));
        OK(cudaFreeAsync(p, s));
        for (int i = 0; i < N; i++) EXPECT_EQ(done[i], i == longest ? LONG : 1);
        for (int i = 0; i < N; i++) OK(cuCtxDestroy(context[i]));
        OK(cuCtxSetCurrent(own));
        stream_end(s);
        no_findings();
    }
}

/* One whose context has ended has nothing to wait for. The free waits for the others, noted before or after it. */
TEST(a_noted_use_on_the_legacy_stream_of_a_context_that_has_ended)
{
    enum { LONG = 50 };
    for (int first = 0; first < 2; first++) {
        start();
        CUcontext green = NULL, own = NULL;
        cudaStream_t s = stream_new();
        char *p = alloc(MIB(1));
        galloc_pool *pool = info_of(p).pool;
        int done = 0;
        sim_access access = {p, KIB(64), SIM_WRITE, 1};
        OK(cuCtxGetCurrent(&own));
        if (first) OK(galloc_record_stream(p, cudaStreamLegacy));
        OK(sim_green_create(&green, 0));
        OK(cuCtxSetCurrent(green));
        OK(galloc_record_stream(p, cudaStreamLegacy));
        OK(cuCtxSetCurrent(own));
        if (!first) OK(galloc_record_stream(p, cudaStreamLegacy));
        OK(sim_green_destroy(green));
        for (int i = 0; i < LONG; i++) OK(sim_launch_call(cudaStreamLegacy, &access, 1, count, &done));
        OK(cudaFreeAsync(p, s));
        EXPECT_EQ(done, LONG);
        EXPECT(info_of(p).state != GALLOC_STATE_USED);
        OK(galloc_pool_trim(pool, 0, NULL));
        stream_end(s);
        no_findings();
    }
}

/* Where that wait is not possible, the memory stays the program's. */
TEST(a_noted_use_on_the_legacy_stream_that_cannot_be_waited_for)
{
    for (int captured = 0; captured < 2; captured++) {
        start();
        void *p = NULL;
        cudaStream_t s = stream_new(), blocking = NULL;
        cudaGraph_t graph = NULL;
        OK(cudaStreamCreate(&blocking));
        OK(cudaMalloc(&p, MIB(1)));
        OK(galloc_record_stream(p, cudaStreamLegacy));
        if (captured) OK(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeRelaxed));
        else sim_fail("cuStreamSynchronize", 2, 0, cudaErrorUnknown);
        EXPECT_EQ(cudaFreeAsync(p, s), captured ? cudaErrorStreamCaptureImplicit : cudaErrorUnknown);
        EXPECT(strstr(galloc_last_message(), "legacy stream") != NULL);
        sim_fail_clear();
        if (captured) OK(cudaStreamEndCapture(blocking, &graph));
        if (captured) OK(cudaGraphDestroy(graph));
        EXPECT_EQ(info_of(p).state, GALLOC_STATE_USED);
        OK(cudaFreeAsync(p, s));
        stream_end(s);
        stream_end(blocking);
        no_findings();
    }
}

/* Or that of a context that cannot be entered: the free fails, and the current context stays. */
TEST(a_noted_use_on_the_legacy_stream_of_a_context_that_cannot_be_entered)
{
    start();
    int failures = 0;
    cudaStream_t s = stream_new();
    CUcontext own = NULL, other = NULL, now = NULL;
    void *p = alloc(MIB(1));
    OK(cuCtxGetCurrent(&own));
    OK(cuCtxCreate(&other, NULL, 0, 0));
    for (int nth = 1, fired = 1; fired; nth++) {
        OK(cuCtxSetCurrent(other));
        OK(galloc_record_stream(p, cudaStreamLegacy));
        OK(cuCtxSetCurrent(own));
        sim_fail("cuCtxPushCurrent", nth, 0, cudaErrorUnknown);
        cudaError_t error = cudaFreeAsync(p, s);
        fired = sim_failed() > 0;
        sim_fail_clear();
        OK(cuCtxGetCurrent(&now));
        EXPECT(now == own);
        if (error) EXPECT_EQ(info_of(p).state, GALLOC_STATE_USED);
        failures += error != cudaSuccess;
        if (!error) p = alloc(MIB(1));
        EXPECT(nth < 20);
    }
    EXPECT(failures > 0);
    OK(cudaFree(p));
    OK(cuCtxDestroy(other));
    OK(cuCtxSetCurrent(own));
    stream_end(s);
    no_findings();
}

/* In CUDA, that is the order of a blocking stream's operations, also of one that has had none so far. */
TEST(a_free_on_a_blocking_stream_comes_after_the_legacy_streams_work)
{
    start();
    cudaStream_t blocking = NULL, other = stream_new();
    OK(cudaStreamCreate(&blocking));
    for (int i = 0; i < 2; i++) {
        void *p = alloc(MIB(8)), *q;
        put(0, p, MIB(8), 1);
        OK(cudaFreeAsync(p, i ? cudaStreamPerThread : blocking));
        q = alloc(MIB(8));
        EXPECT(q == p);
        put(other, q, MIB(8), 2);
        OK(cudaFree(q));
    }
    stream_end(blocking);
    stream_end(other);
    no_findings();
}

/* CUDA's functions take a stream of any device, whichever is current. */
TEST(a_free_on_a_stream_of_another_device)
{
    start();
    for (int i = 0; i < 4; i++) {
        cudaStream_t s = NULL;
        OK(cudaSetDevice(1));
        OK(cudaStreamCreateWithFlags(&s, i % 2 ? cudaStreamNonBlocking : 0));
        void *p = alloc(MIB(1));
        put(s, p, MIB(1), 1);
        OK(cudaSetDevice(0));
        if (i < 2) OK(cudaFreeAsync(p, s));
        else OK(galloc_override_free(p, s, GALLOC_OVERRIDE_STREAM));
        EXPECT(sim_stream_done(s));
        OK(cudaSetDevice(1));
        stream_end(s);
    }
    OK(cudaSetDevice(0));
    no_findings();
}

/* A wait for a stream of another device leaves the current device and the thread's capture mode as they were. */
TEST(a_wait_on_another_device_leaves_no_trace)
{
    enum cudaStreamCaptureMode before = cudaStreamCaptureModeGlobal, mode = cudaStreamCaptureModeGlobal;
    int device = -1;
    void *p = NULL;
    start();
    OK(cudaThreadExchangeStreamCaptureMode(&before));
    OK(cudaSetDevice(1));
    cudaStream_t other = stream_new();
    OK(cudaSetDevice(0));
    OK(galloc_override_malloc(&p, 1000));
    OK(galloc_override_free(p, other, GALLOC_OVERRIDE_STREAM));
    OK(cudaGetDevice(&device));
    EXPECT_EQ(device, 0);
    OK(cudaThreadExchangeStreamCaptureMode(&mode));
    EXPECT_EQ(mode, cudaStreamCaptureModeGlobal);
    OK(cudaThreadExchangeStreamCaptureMode(&before));
    OK(cudaSetDevice(1));
    stream_end(other);
    OK(cudaSetDevice(0));
    no_findings();
}

TEST(either_function_frees)
{
    start();
    cudaStream_t a = stream_new(), b = stream_new();
    void *p = alloc(MIB(8)), *q;
    put(a, p, MIB(8), 1);
    OK(cudaFreeAsync(p, a));
    EXPECT(sim_stream_done(a)); /* the next cudaMalloc may be for another stream */
    q = alloc(MIB(8));
    EXPECT(q == p);
    put(b, q, MIB(8), 2);
    OK(cudaFree(q));
    OK(cudaMallocAsync(&p, MIB(1), a));
    put(a, p, MIB(1), 1);
    OK(cudaFreeAsync(p, a));
    EXPECT(!sim_stream_done(a));
    OK(cudaMallocAsync(&q, MIB(1), a));
    EXPECT(q == p);
    put(a, q, MIB(1), 2);
    OK(cudaFree(q));
    EXPECT(sim_stream_done(a));
    OK(galloc_malloc(&p, MIB(1), a));
    OK(cudaFreeAsync(p, a));
    stream_end(a);
    stream_end(b);
    no_findings();
}

TEST(foreign_memory)
{
    start();
    void *p = NULL, *q = NULL;
    long frees = sim_calls("cudaFree"), frees_async = sim_calls("cudaFreeAsync");
    OK(plain_malloc(&p, MIB(1)));
    OK(plain_malloc_async(&q, MIB(1)));
    EXPECT_EQ(info_of(p).state, GALLOC_STATE_FOREIGN);
    OK(cudaFree(p));
    OK(cudaFreeAsync(q, 0));
    EXPECT_EQ(sim_calls("cudaFree"), frees + 1);
    EXPECT_EQ(sim_calls("cudaFreeAsync"), frees_async + 1);
    no_findings();
}

TEST(several_devices)
{
    start();
    void *p = alloc(MIB(1)), *q;
    int device = -1;
    put(cudaStreamLegacy, p, MIB(1), 1);
    OK(cudaSetDevice(1));
    q = alloc(MIB(1));
    EXPECT_EQ(info_of(p).device, 0);
    EXPECT_EQ(info_of(q).device, 1);
    OK(cudaFree(p));
    EXPECT_EQ(sim_pending(), 0); /* it has waited for the other device */
    OK(cudaGetDevice(&device));
    EXPECT_EQ(device, 1);
    OK(cudaFree(q));
    OK(cudaSetDevice(0));
    EXPECT(alloc(MIB(1)) == p);
    OK(cudaFree(p));
    no_findings();
}

/* Work in each context that galloc has met is waited for, whichever it met first, and whichever of them has ended or
   failed since. */
TEST(a_free_waits_for_work_in_several_contexts)
{
    enum { N = 3 };
    for (int out = -1; out < 2 * N; out++) {
        CUcontext context[N] = {NULL}, now = NULL;
        CUstream stream[N] = {NULL};
        int done[N] = {0};
        start();
        OK(cudaSetDevice(0));
        char *p = alloc(MIB(1));
        for (int i = 0; i < N; i++) {
            sim_access access = {p + (size_t)i * KIB(64), KIB(64), SIM_WRITE, (uint64_t)i + 1};
            OK(cuCtxCreate(&context[i], NULL, 0, 0));
            OK(cuStreamCreate(&stream[i], CU_STREAM_NON_BLOCKING));
            OK(galloc_record_stream(p, stream[i]));
            for (int k = 0; i != out % N && k < 20 * (N - i); k++)
                OK(sim_launch_call(stream[i], &access, 1, count, &done[i]));
            OK(cuCtxPopCurrent(&now));
        }
        if (out >= N) sim_context_fail(context[out % N], cudaErrorIllegalAddress);
        else if (out >= 0) OK(cuCtxDestroy(context[out]));
        OK(cudaFree(p));
        for (int i = 0; i < N; i++)
            if (out < 0 || i != out % N) EXPECT_EQ(done[i], 20 * (N - i));
        for (int i = 0; i < N; i++)
            if (i != out) OK(cuCtxDestroy(context[i]));
        no_findings();
    }
}

/* A context of the program's own stays current, and the memory is free once no context of the device uses it. */
TEST(contexts)
{
    start();
    CUcontext mine = NULL, other = NULL, now = NULL;
    void *p, *q;
    cudaStream_t s = stream_new(), t;
    CUstream third = NULL;
    int third_done = 0;
    OK(cudaSetDevice(1));
    p = alloc(MIB(1));
    OK(cudaSetDevice(0));
    q = alloc(MIB(1));
    put(s, q, KIB(256), 1);
    OK(cuCtxCreate(&other, NULL, 0, 0));
    OK(cuStreamCreate(&third, CU_STREAM_NON_BLOCKING));
    OK(galloc_record_stream(q, third)); /* galloc has been passed a stream of this one */
    OK(cuCtxCreate(&mine, NULL, 0, 0));
    t = stream_new();
    put(t, (char *)q + KIB(512), KIB(512), 3);
    sim_access access = {(char *)q + KIB(256), KIB(256), SIM_WRITE, 2};
    OK(cuCtxPushCurrent(other));
    OK(sim_launch_call(third, &access, 1, count, &third_done));
    OK(cuCtxPopCurrent(&now));
    OK(cudaFree(p)); /* of another device */
    EXPECT(!sim_stream_done(t));
    OK(cuCtxGetCurrent(&now));
    EXPECT(now == mine);
    OK(cudaFree(q));
    EXPECT(sim_stream_done(s));
    EXPECT_EQ(third_done, 1);
    EXPECT(sim_stream_done(t));
    OK(cuCtxGetCurrent(&now));
    EXPECT(now == mine);
    p = alloc(MIB(1));
    put(t, p, MIB(1), 4);
    OK(cudaFreeAsync(p, t)); /* waits for the stream alone */
    EXPECT(sim_stream_done(t));
    OK(cuCtxGetCurrent(&now));
    EXPECT(now == mine);
    stream_end(t);
    OK(cuCtxDestroy(mine));
    OK(cuCtxDestroy(other));
    OK(cudaSetDevice(0));
    p = alloc(MIB(1));
    OK(cuCtxCreate(&mine, NULL, 0, 0)); /* galloc meets it in cudaFree */
    t = stream_new();
    put(t, p, MIB(1), 5);
    OK(cudaFree(p));
    EXPECT(sim_stream_done(t));
    OK(cudaStreamDestroy(t));
    OK(cuCtxDestroy(mine));
    OK(cudaSetDevice(0));
    stream_end(s);
    no_findings();
}

/* A thread that has made no call of CUDA yet frees on stream 0. */
typedef struct to_free {
    void *p;
    cudaError_t error;
} to_free;

static void *free_first(void *of)
{
    ((to_free *)of)->error = cudaFreeAsync(((to_free *)of)->p, 0);
    return NULL;
}

TEST(threads_without_a_context)
{
    start();
    to_free of = {NULL, cudaSuccess};
    for (int i = 0; i < 2; i++) {
        pthread_t thread;
        if (i) OK(cudaMallocAsync(&of.p, MIB(1), 0));
        else of.p = alloc(MIB(1));
        pthread_create(&thread, NULL, free_first, &of);
        pthread_join(thread, NULL);
        OK(of.error);
    }
    no_findings();
}

static void *free_for_all_streams(void *of)
{
    ((to_free *)of)->error = galloc_override_free(((to_free *)of)->p, NULL, GALLOC_OVERRIDE_DEVICE);
    return NULL;
}

/* cudaFree of such a thread waits for the device as any other. */
TEST(a_thread_without_a_context_waits_for_the_device)
{
    start();
    pthread_t thread;
    cudaStream_t other = stream_new();
    to_free of = {alloc(MIB(1)), cudaErrorUnknown};
    put(other, of.p, MIB(1), 1);
    pthread_create(&thread, NULL, free_for_all_streams, &of);
    pthread_join(thread, NULL);
    OK(of.error);
    EXPECT_EQ(cudaStreamQuery(other), cudaSuccess);
    stream_end(other);
    no_findings();
}

/* Another context of the device has failed: nothing runs there any more, and cudaFree goes on. If it cannot be said
   whether a context lives, it does not. */
TEST(contexts_that_failed_or_may_have)
{
    start();
    CUcontext other = NULL;
    CUstream t = NULL;
    void *p = alloc(MIB(1)), *q = alloc(MIB(1));
    OK(cuCtxCreate(&other, NULL, 0, 0));
    OK(cuStreamCreate(&t, CU_STREAM_NON_BLOCKING));
    OK(galloc_record_stream(p, t));
    put(t, p, MIB(1), 1);
    OK(cudaSetDevice(0));
    sim_fail("cuCtxGetId", 1, 0, cudaErrorUnknown);
    EXPECT_EQ(cudaFree(p), cudaErrorUnknown);
    sim_fail_clear();
    EXPECT_EQ(info_of(p).state, GALLOC_STATE_USED);
    OK(cudaFree(p));
    sim_context_fail(other, cudaErrorIllegalAddress);
    OK(cudaFree(q));
    p = alloc(512);
    EXPECT_EQ(galloc_override_free(p, NULL, 3), cudaErrorInvalidValue);
    EXPECT_EQ(galloc_override_free(p, NULL, -1), cudaErrorInvalidValue);
    OK(cudaFree(p));
    OK(cuCtxDestroy(other));
    OK(cudaSetDevice(0));
    no_findings();
}

/* A device's first cudaMalloc, in which another one comes in between and makes the pool. */
static struct {
    int retained; /* by the default pool, and then by the one of cudaMalloc */
    void *p;
} between;

static void make_it_first(const char *function)
{
    if (strcmp(function, "cuDevicePrimaryCtxRetain") || ++between.retained != 2) return;
    between.p = alloc(KIB(64));
}

TEST(the_first_of_a_device)
{
    start();
    void *p = &p;
    OK(cudaSetDevice(2));
    sim_fail("cuDevicePrimaryCtxRetain", 1, 1, cudaErrorUnknown);
    EXPECT_EQ(cudaMalloc(&p, KIB(64)), cudaErrorUnknown);
    sim_fail_clear();
    EXPECT(!p);
    memset(&between, 0, sizeof between);
    sim_hook(make_it_first, NULL);
    p = alloc(KIB(64));
    sim_hook(NULL, NULL);
    EXPECT(between.p && info_of(p).pool == info_of(between.p).pool);
    EXPECT_EQ(sim_retained(2), 2); /* the pool that came second is gone */
    OK(cudaFree(between.p));
    OK(cudaFree(p));
    OK(cudaSetDevice(0));
    no_findings();
}

/* A free by the address leaves the context retained as often as before. */
TEST(frees_leave_the_context_as_it_was)
{
    start();
    void *p = alloc(KIB(64)), *q = alloc(KIB(64));
    int retained = sim_retained(0);
    OK(cudaFree(p));
    OK(galloc_override_free(q, 0, GALLOC_OVERRIDE_DEVICE));
    EXPECT_EQ(sim_retained(0), retained);
    no_findings();
}

TEST(a_free_whose_wait_fails_leaves_the_context_as_it_was)
{
    start();
    void *p = alloc(KIB(64));
    int retained = sim_retained(0);
    sim_fail("cuCtxSynchronize", 1, 0, cudaErrorUnknown);
    EXPECT_EQ(galloc_override_free(p, 0, GALLOC_OVERRIDE_DEVICE), cudaErrorUnknown);
    sim_fail_clear();
    EXPECT_EQ(sim_retained(0), retained);
    OK(galloc_override_free(p, 0, GALLOC_OVERRIDE_DEVICE));
    no_findings();
}

TEST(errors)
{
    start();
    void *p = &p;
    EXPECT_EQ(cudaMalloc(&p, SIZE_MAX), cudaErrorMemoryAllocation);
    EXPECT(!p);
    p = alloc(MIB(1));
    OK(cudaFree(p));
    EXPECT_EQ(cudaFree(p), cudaErrorInvalidDevicePointer);
    EXPECT_EQ(cudaFreeAsync(p, 0), cudaErrorInvalidDevicePointer);
    OK(cudaMalloc(&p, 0));
    EXPECT(!p);
    p = alloc(MIB(1));
    put(cudaStreamLegacy, p, MIB(1), 1);
    static const char *const calls[] = {"cuDevicePrimaryCtxRetain", "cuCtxPushCurrent", "cuCtxGetDevice",
                                        "cuCtxSynchronize"};
    CUcontext now = NULL, mine = NULL;
    OK(cuCtxCreate(&mine, NULL, 0, 0));
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        sim_fail(calls[i], 1, 0, cudaErrorUnknown);
        EXPECT_EQ(cudaFree(p), cudaErrorUnknown);
        sim_fail_clear();
        EXPECT_EQ(info_of(p).state, GALLOC_STATE_USED);
        EXPECT(strstr(galloc_last_message(), "galloc_override_free: "));
        OK(cudaPeekAtLastError());
        OK(cuCtxGetCurrent(&now));
        EXPECT(now == mine);
    }
    OK(cuCtxDestroy(mine));
    OK(cudaSetDevice(0));
    sim_fail("cuStreamSynchronize", 1, 0, cudaErrorUnknown);
    EXPECT_EQ(cudaFreeAsync(p, 0), cudaErrorUnknown);
    sim_fail_clear();
    OK(cudaFree(p));
    OK(cudaMallocAsync(&p, MIB(1), 0));
    static const char *const of_order[] = {"cuStreamIsCapturing", "cuEventCreate", "cuEventRecord"};
    for (size_t i = 0; i < sizeof of_order / sizeof *of_order; i++) {
        sim_fail(of_order[i], 1, 0, cudaErrorUnknown);
        EXPECT_EQ(cudaFreeAsync(p, 0), cudaErrorUnknown);
        sim_fail_clear();
        EXPECT_EQ(info_of(p).state, GALLOC_STATE_USED);
        EXPECT(strstr(galloc_last_message(), "galloc_override_free: "));
    }
    OK(cudaFreeAsync(p, 0));
    OK(cudaPeekAtLastError());
    no_findings();
}

/* What the legacy stream has freed may still be in use there: no cudaMalloc gives it to other streams. */
static void memory_is_for_all(void)
{
    void *p = alloc(MIB(8));
    put(0, p, MIB(8), 1);
    OK(cudaFreeAsync(p, 0));
    cudaStream_t other = stream_new();
    void *q = alloc(MIB(8));
    put(other, q, MIB(8), 2);
    OK(cudaFree(q));
    stream_end(other);
    no_findings();
}

/* Another context is current: that of the device is made current for the wait, and once more for the free. Whichever
   step fails, the block stays the program's, and the context is as it was. */
TEST(a_free_from_another_context_fails_as_a_whole)
{
    start();
    CUcontext mine = NULL, now = NULL;
    void *p = alloc(MIB(1));
    int failures = 0;
    OK(cuCtxCreate(&mine, NULL, 0, 0));
    for (int nth = 1; nth < 8; nth++) {
        sim_fail("cuCtxPushCurrent", nth, 0, cudaErrorUnknown);
        cudaError_t error = galloc_override_free(p, cudaStreamPerThread, GALLOC_OVERRIDE_STREAM);
        sim_fail_clear();
        OK(cuCtxGetCurrent(&now));
        EXPECT(now == mine);
        failures += error != cudaSuccess;
        if (error) EXPECT_EQ(error, cudaErrorUnknown);
        if (error) EXPECT_EQ(info_of(p).state, GALLOC_STATE_USED);
        if (error) EXPECT(strstr(galloc_last_message(), "cuCtxPushCurrent"));
        if (!error) p = NULL;
        OK(cudaSetDevice(0));
        if (!p) p = alloc(MIB(1));
        OK(cuCtxSetCurrent(mine));
    }
    EXPECT(failures > 0);
    OK(cudaSetDevice(0));
    OK(cudaFree(p));
    OK(cuCtxDestroy(mine));
    OK(cudaSetDevice(0));
    no_findings();
}

/* So does one that cannot learn of its stream's context or enter it. */
TEST(a_free_on_a_stream_of_another_context_fails_as_a_whole)
{
    static const char *const calls[] = {"cuStreamGetCtx", "cuCtxPushCurrent", "cuThreadExchangeStreamCaptureMode"};
    start();
    cudaStream_t s = stream_new();
    CUcontext mine = NULL, now = NULL;
    void *p = alloc(MIB(1));
    OK(galloc_stream_retire(s));
    OK(cuCtxCreate(&mine, NULL, 0, 0));
    for (int i = 0; i < 3; i++) {
        for (int nth = 1; nth < 8; nth++) {
            sim_fail(calls[i], nth, 0, cudaErrorUnknown);
            cudaError_t error = galloc_override_free(p, s, GALLOC_OVERRIDE_STREAM);
            int failed = sim_failed() > 0;
            sim_fail_clear();
            OK(cuCtxGetCurrent(&now));
            EXPECT(now == mine);
            if (error) EXPECT(failed && error == cudaErrorUnknown);
            if (error) EXPECT_EQ(info_of(p).state, GALLOC_STATE_USED);
            OK(cudaSetDevice(0));
            if (!error) p = alloc(MIB(1));
            OK(cuCtxSetCurrent(mine));
            if (nth == 1 && !EXPECT(error)) printf("    %s\n", calls[i]);
        }
    }
    OK(cudaSetDevice(0));
    OK(cudaFree(p));
    OK(cuCtxDestroy(mine));
    OK(cudaSetDevice(0));
    stream_end(s);
    no_findings();
}

/* An error that is told where it arises is told once. */
TEST(a_free_that_fails_inside_has_one_line)
{
    start();
    OK(galloc_shutdown());
    cudaStream_t other = stream_new();
    void *p = NULL;
    inside_log_level(GALLOC_LOG_DEBUG);
    OK(galloc_malloc(&p, MIB(1), other));
    log_lines = 0;
    sim_fail_malloc(1, 1); /* the state of the legacy stream */
    sim_fail("cuStreamSynchronize", 1, 1, cudaErrorUnknown);
    EXPECT_EQ(galloc_override_free(p, NULL, GALLOC_OVERRIDE_DEVICE), cudaErrorUnknown);
    sim_fail_clear();
    EXPECT_EQ(log_lines, 1);
    EXPECT(strstr(galloc_last_message(), "galloc_free: "));
    EXPECT_EQ(info_of(p).state, GALLOC_STATE_USED);
    OK(cudaFree(p));
    stream_end(other);
    no_findings();
}

/* The pool of a device's cudaMalloc can be destroyed as any other: a shutdown passes over it. */
TEST(a_shutdown_passes_over_a_pool_of_cudamalloc_that_is_gone)
{
    start();
    void *p = alloc(MIB(1));
    galloc_pool *pool = info_of(p).pool;
    OK(cudaFree(p));
    OK(galloc_pool_destroy(pool));
    EXPECT_EQ(galloc_override_malloc(&p, MIB(1)), cudaErrorInvalidResourceHandle);
    EXPECT(p == NULL);
    OK(galloc_shutdown());
    memory_is_for_all();
}

/* Whatever host memory the pool of a device's first cudaMalloc lacks, the next call makes it. */
TEST(a_pool_of_cudamalloc_that_fails_is_made_by_the_next)
{
    start();
    int fired = 1;
    for (int nth = 1; fired && nth < 40; nth++) {
        for (int nowhere = 0; nowhere < 2; nowhere++) {
            galloc_pool *pool = NULL;
            void *p = &p;
            OK(galloc_shutdown());
            sim_fail_malloc(nth, 0);
            cudaError_t error = galloc_override_malloc(nowhere ? NULL : &p, MIB(1));
            fired = sim_failed_mallocs() > 0;
            sim_fail_clear();
            if (error) EXPECT(error == cudaErrorMemoryAllocation || nowhere);
            OK(galloc_pool_default(&pool, 0));
            if (nowhere) EXPECT(error != cudaSuccess);
            else if (error) EXPECT(p == NULL);
            else EXPECT(info_of(p).pool != pool); /* what is free there is not for all streams */
            if (!error) OK(cudaFree(p));
            OK(cudaFree(alloc(MIB(1))));
        }
    }
    EXPECT(!fired);
    no_findings();
}

/* galloc_shutdown fails while memory of cudaMalloc is used, and ends default pools. cudaMalloc goes on, and its memory
   is for every stream as before. */
TEST(shutdowns_that_fail_leave_cudamalloc)
{
    start();
    void *p = alloc(MIB(1));
    for (int i = 0; i < 40; i++) {
        memory_is_for_all();
        EXPECT_EQ(galloc_shutdown(), cudaErrorNotPermitted);
        EXPECT(strstr(galloc_last_message(), "blocks of the pool of device 0 are in use: 1, of 1048576 bytes"));
    }
    OK(cudaFree(p));
    no_findings();
}

/* The error is the pool's own, not that the pool still exists. */
TEST(a_shutdown_has_the_error_of_the_pool_of_cudamalloc)
{
    start();
    OK(cudaFree(alloc(MIB(1))));
    sim_fail("cuMemAddressFree", 1, 0, cudaErrorUnknown);
    sim_fail("cuMemAddressFree", 2, 0, cudaErrorUnknown);
    EXPECT_EQ(galloc_shutdown(), cudaErrorUnknown);
    EXPECT_EQ(sim_failed(), 2);
    EXPECT(strstr(galloc_last_message(), "cuMemAddressFree") != NULL);
    sim_fail_clear();
    OK(galloc_shutdown());
    no_findings();
}

TEST(shutdowns_end_pools_of_cudamalloc)
{
    start();
    for (int i = 0; i < 3; i++) {
        galloc_pool *pool;
        void *p;
        memory_is_for_all();
        OK(cudaSetDevice(1));
        p = alloc(MIB(1));
        pool = info_of(p).pool;
        OK(cudaFree(p));
        OK(galloc_shutdown());
        EXPECT_EQ(galloc_pool_check(pool), -1);
        EXPECT_EQ(sim_physical(0) + sim_physical(1), 0u);
        OK(cudaSetDevice(0));
    }
    no_findings();
}

/* What the driver allocates in stream order is for all streams once that has been done. */
TEST(the_driver_has_allocated_what_cudamalloc_returns)
{
    start();
    OK(galloc_shutdown());
    setenv("GALLOC_CONF", "backend:cudaMallocAsync,log:off", 1);
    void *held = alloc(MIB(1)), *p = NULL;
    put(0, held, MIB(1), 1);
    EXPECT(sim_pending() > 0);
    p = alloc(MIB(2));
    EXPECT_EQ(sim_pending(), 0);
    OK(cudaFree(p));
    cudaStream_t captured = stream_new();
    cudaGraph_t graph = NULL;
    OK(cudaStreamBeginCapture(captured, cudaStreamCaptureModeGlobal));
    p = alloc(MIB(2));
    OK(cudaStreamEndCapture(captured, &graph));
    OK(cudaGraphDestroy(graph));
    stream_end(captured);
    OK(cudaFree(p));
    cudaStream_t blocking = NULL; /* the legacy stream cannot be waited for beside its capture, and need not be */
    OK(cudaStreamCreate(&blocking));
    OK(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeGlobal));
    p = alloc(MIB(2));
    OK(cudaStreamEndCapture(blocking, &graph));
    OK(cudaGraphDestroy(graph));
    stream_end(blocking);
    OK(cudaFree(p));
    put(0, held, MIB(1), 2);
    size_t live = stats_of(info_of(held).pool).live.current;
    sim_fail("cuStreamSynchronize", 1, 0, cudaErrorUnknown);
    EXPECT_EQ(cudaMalloc(&p, MIB(2)), cudaErrorUnknown);
    EXPECT(p == NULL);
    EXPECT_EQ(stats_of(info_of(held).pool).live.current, live);
    EXPECT(strstr(galloc_last_message(), "galloc_override_malloc: cuStreamSynchronize"));
    OK(cudaFree(held));
    OK(galloc_shutdown());
    unsetenv("GALLOC_CONF");
    no_findings();
}

/* That wait fails, and so does one more call of the driver: the block is freed all the same. */
TEST(a_cudamalloc_that_fails_keeps_no_block)
{
    static const char *const names[] = {"cuEventRecord", "cuEventCreate", "cuEventQuery", "cuStreamIsCapturing",
                                        "cuStreamGetCaptureInfo", "cuStreamGetId", "cuCtxGetCurrent", "cuCtxGetId",
                                        "cuCtxSetCurrent", "cuMemFreeAsync"};
    start();
    OK(galloc_shutdown());
    setenv("GALLOC_CONF", "backend:cudaMallocAsync,log:off", 1);
    void *held = alloc(MIB(1)), *p = NULL;
    galloc_pool *pool = info_of(held).pool;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        for (int n = 1; n < 7; n++) {
            size_t live = stats_of(pool).live.current;
            sim_fail("cuStreamSynchronize", 1, 0, cudaErrorUnknown);
            sim_fail(names[i], n, 0, cudaErrorUnknown);
            cudaError_t error = cudaMalloc(&p, MIB(2));
            sim_fail_clear();
            EXPECT_EQ(stats_of(pool).live.current, live + (error ? 0 : MIB(2)));
            if (!error) OK(cudaFree(p));
        }
    }
    OK(cudaFree(held));
    OK(galloc_shutdown());
    unsetenv("GALLOC_CONF");
    no_findings();
}

/* Each device waits for itself: its legacy stream is done, and what others do goes on. */
TEST(the_driver_of_each_device_has_allocated)
{
    enum { DEVICES = 3 };
    start();
    OK(galloc_shutdown());
    setenv("GALLOC_CONF", "backend:cudaMallocAsync,log:off", 1);
    for (int device = 0; device < DEVICES; device++) {
        int other = (device + 1) % DEVICES, done = 0;
        cudaStream_t far;
        OK(cudaSetDevice(other));
        far = stream_new();
        for (int i = 0; i < 100; i++) OK(sim_launch(far, NULL, 0));
        OK(cudaSetDevice(device));
        OK(sim_launch_call(0, NULL, 0, count, &done));
        void *p = alloc(MIB(2));
        EXPECT_EQ(done, 1);
        EXPECT(!sim_stream_done(far));
        EXPECT_EQ(info_of(p).device, device);
        OK(cudaFree(p));
        EXPECT(!sim_stream_done(far));
        stream_end(far);
        sim_run(-1);
    }
    OK(galloc_shutdown());
    unsetenv("GALLOC_CONF");
    OK(cudaSetDevice(0));
    no_findings();
}

/* An earlier kernel's error comes to light while cudaMalloc waits. Nothing can be freed then, so the block is the
   program's, which frees it after the reset. */
TEST(an_error_that_ends_the_context_during_cudamalloc)
{
    start();
    OK(galloc_shutdown());
    setenv("GALLOC_CONF", "backend:cudaMallocAsync,log:off", 1);
    void *p = alloc(MIB(1)), *q = NULL;
    OK(cudaFree(p));
    sim_fail("cuStreamSynchronize", 1, 0, cudaErrorIllegalAddress);
    p = alloc(MIB(2));
    EXPECT_EQ(cudaMalloc(&q, MIB(1)), cudaErrorIllegalAddress);
    EXPECT(q == NULL);
    EXPECT_EQ(cudaFree(p), cudaErrorIllegalAddress);
    sim_fail_clear();
    OK(cudaDeviceReset());
    OK(cudaFree(p));
    OK(galloc_shutdown());
    unsetenv("GALLOC_CONF");
    (void)cudaGetLastError();
    no_findings();
}

/* A reset ends free memory of CUDA's allocators. CUDA may give its address out again; then the memory is CUDA's. */
TEST(memory_of_cuda_at_an_address_that_a_reset_took)
{
    start();
    OK(galloc_shutdown());
    setenv("GALLOC_CONF", "backend:cudaMalloc", 1);
    void *p = alloc(MIB(2)), *q;
    galloc_pointer info;
    OK(cudaFree(p));
    OK(galloc_pointer_info(p, &info));
    EXPECT_EQ(info.state, GALLOC_STATE_FREE);
    OK(cudaDeviceReset());
    OK(galloc_pointer_info(p, &info));
    EXPECT(info.state == GALLOC_STATE_FOREIGN && !info.pool);
    size_t before = sim_physical(0), pitch;
    OK(cudaMallocPitch(&q, &pitch, MIB(1), 2));
    EXPECT(q == p);
    OK(cudaFree(q));
    cudaStream_t s = stream_new();
    cudaMemPool_t driver_pool;
    OK(cudaDeviceGetDefaultMemPool(&driver_pool, 0));
    OK(cudaMallocFromPoolAsync(&q, MIB(2), driver_pool, s));
    EXPECT(q == p);
    OK(cudaFreeAsync(q, s));
    OK(cudaStreamSynchronize(s));
    EXPECT_EQ(sim_physical(0), before);
    stream_end(s);
    OK(galloc_shutdown());
    unsetenv("GALLOC_CONF");
    no_findings();
}

/* A noted use on the legacy stream is waited for also where that is retired while its work is under way. */
TEST(a_free_waits_for_a_noted_use_on_a_retired_legacy_stream)
{
    start();
    int done = 0;
    void *p = alloc(MIB(1));
    cudaStream_t s = stream_new();
    sim_access access = {p, MIB(1), SIM_WRITE, 1};
    OK(sim_launch_call(cudaStreamLegacy, &access, 1, note_end, &done));
    OK(galloc_record_stream(p, cudaStreamLegacy));
    OK(galloc_stream_retire(cudaStreamLegacy));
    OK(cudaFreeAsync(p, s));
    EXPECT_EQ(done, 1);
    stream_end(s);
    no_findings();
}

/* Uses by other streams that were noted before or after it do not hide it. */
TEST(a_noted_use_on_the_legacy_stream_among_others)
{
    for (int last = 0; last < 3; last++) {
        start();
        cudaStream_t s = stream_new(), t[2] = {stream_new(), stream_new()};
        char *p = alloc(MIB(1));
        int done = 0;
        sim_access access = {p, KIB(64), SIM_WRITE, 1};
        for (int i = 0; i < 3; i++) {
            if (i == last) OK(galloc_record_stream(p, cudaStreamLegacy));
            if (i < 2) OK(galloc_record_stream(p, t[i]));
        }
        for (int i = 0; i < 50; i++) OK(sim_launch_call(cudaStreamLegacy, &access, 1, count, &done));
        OK(cudaFreeAsync(p, s));
        EXPECT_EQ(done, 50);
        stream_end(s);
        for (int i = 0; i < 2; i++) stream_end(t[i]);
        no_findings();
    }
}

TEST_MAIN()
