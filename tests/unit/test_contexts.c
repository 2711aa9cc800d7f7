/* test_contexts.c - several contexts on a device, several devices, contexts that end: what is keyed by a context, waits
   for one, or outlives one. */

#include "setup.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* ---- contexts and devices ---------------------------------------------------------------------------------------- */

static void begin_devices(int devices, int pace)
{
    sim_options options = sim_defaults();
    options.devices = devices;
    options.memory = MIB(256);
    options.pace = pace;
    begin_with(options);
    OK(cudaSetDevice(0));
    OK(cudaFree(NULL));
}

static CUcontext current(void)
{
    CUcontext context = NULL;
    OK(cuCtxGetCurrent(&context));
    return context;
}

static void enter(CUcontext context) { OK(cuCtxSetCurrent(context)); }

/* The primary context of a device, which is current then. */
static CUcontext primary(int device)
{
    OK(cudaSetDevice(device));
    OK(cudaFree(NULL));
    return current();
}

/* A context beside the primary one; the current one stays. */
static CUcontext context_new(int device)
{
    CUcontext before = current(), context = NULL;
    OK(cuCtxCreate(&context, NULL, 0, device));
    enter(before);
    return context;
}

static cudaStream_t stream_in(CUcontext context)
{
    CUcontext before = current();
    enter(context);
    cudaStream_t stream = stream_new();
    enter(before);
    return stream;
}

/* The context that another stream than those of the primary context of device 0 has: of that device, or of the next. */
enum { BESIDE, NEXT_DEVICE, PLACES };

static CUcontext context_at(int place) { return place == BESIDE ? context_new(0) : primary(1); }

/* Devices that differ in all that galloc asks of one. */
enum { UNLIKE = 4 };
static const sim_unlike unlike[UNLIKE] = {{.memory = MIB(256), .granularity = MIB(2)},
                                          {.memory = MIB(128), .granularity = MIB(8), .no_pools = 1},
                                          {.memory = MIB(512), .granularity = MIB(4), .no_rdma = 1},
                                          {.memory = MIB(64), .granularity = MIB(2), .no_vmm = 1}};

static void begin_unlike(int pace)
{
    sim_options options = sim_defaults();
    options.devices = UNLIKE;
    options.pace = pace;
    memcpy(options.unlike, unlike, sizeof unlike);
    begin_with(options);
}

static void reset(int device)
{
    OK(cudaSetDevice(device));
    OK(cudaDeviceReset());
    (void)primary(device);
}

static galloc_config config_of(const char *text, int device)
{
    galloc_config config = galloc_config_default();
    char said[200];
    OK(galloc_config_parse(&config, text, said, sizeof said));
    config.device = device;
    return config;
}

static galloc_pool *pool_of(const char *text, int device)
{
    galloc_config config = config_of(text, device);
    return pool_new(&config);
}

static void pairs(galloc_pool *pool, size_t bytes, cudaStream_t stream, int n)
{
    while (n-- > 0) OK(galloc_free(get(pool, bytes, stream), stream));
}

/* A default pool is that of the stream's device. If the driver does not tell which that is, the call fails: device 0 is
   no guess. */
TEST(a_stream_whose_device_the_driver_does_not_tell_gets_no_memory)
{
    static const char *const calls[] = {"cuStreamGetCtx", "cuCtxGetId", "cuCtxPushCurrent", "cuCtxGetDevice"};
    for (size_t i = 0; i < COUNT(calls); i++) {
        begin_devices(2, SIM_PACE_STILL);
        cudaStream_t s = stream_in(primary(1));
        galloc_graph *group = NULL;
        void *p = NULL;
        (void)primary(0);
        sim_fail(calls[i], 1, 0, cudaErrorUnknown);
        EXPECT_EQ(galloc_malloc(&p, MIB(2), s), cudaErrorUnknown);
        EXPECT(sim_failed() == 1 && !p);
        sim_fail(calls[i], 1, 0, cudaErrorUnknown);
        EXPECT_EQ(galloc_graph_begin(&group, NULL, s), cudaErrorUnknown);
        sim_fail_clear();
        EXPECT_EQ(sim_physical(0) + sim_physical(1), 0);
        EXPECT(!group);
        OK(galloc_malloc(&p, MIB(2), s));
        EXPECT_EQ(info_of(p).device, 1);
        OK(galloc_free(p, s));
        finish();
    }
}

/* ---- waiting for all that may use memory ------------------------------------------------------------------------- */

/* The handle of a stream that died unannounced comes back in a context of the program's own. A free by it that did not
   ask is nobody's, and what was freed so is had only when that context has been waited for, too. */
TEST(a_handle_that_comes_back_in_another_context_is_waited_for)
{
    for (int place = 0; place < PLACES; place++) {
        begin_devices(2, SIM_PACE_STILL);
        CUcontext other = context_new(place == BESIDE ? 0 : 1), own = primary(0);
        galloc_pool *pool = pool_of("memory_limit:2M", 0);
        cudaStream_t s = stream_new(), keep = stream_new(), first = stream_in(other);
        pairs(pool, KIB(4), first, 1); /* galloc knows the context from then on */
        pairs(pool, KIB(64), s, 3);
        void *p = get(pool, KIB(64), s);
        put(s, p, KIB(64), 1);
        OK(cudaStreamSynchronize(s));
        stream_end(s);
        cudaStream_t t = stream_in(other);
        EXPECT(t == s);
        enter(other);
        if (place == BESIDE) put(t, p, KIB(64), 2);
        OK(galloc_free(p, t));
        enter(own);
        void *q = get(pool, MIB(2), keep);
        put(keep, q, MIB(2), 3);
        OK(galloc_free(q, keep));
        pool_end(pool);
        finish();
    }
}

/* A context at the address of one that has ended is another one, and is waited for as well. */
TEST(a_context_at_the_address_of_an_ended_one_is_waited_for)
{
    begin_devices(1, SIM_PACE_STILL);
    CUcontext own = primary(0), ended = context_new(0);
    galloc_pool *pool = pool_of("memory_limit:2M", 0);
    cudaStream_t s = stream_new(), keep = stream_new();
    pairs(pool, KIB(4), stream_in(ended), 1);
    OK(cuCtxDestroy(ended));
    CUcontext other = context_new(0);
    EXPECT(other == ended);
    pairs(pool, KIB(4), stream_in(other), 1);
    pairs(pool, KIB(64), s, 3);
    void *p = get_used(pool, KIB(64), s, 1);
    OK(cudaStreamSynchronize(s));
    stream_end(s);
    cudaStream_t t = stream_in(other);
    EXPECT(t == s);
    enter(other);
    put(t, p, KIB(64), 2);
    OK(galloc_free(p, t)); /* nobody's: the stream is taken for the one that has ended */
    enter(own);
    void *q = get_used(pool, MIB(2), keep, 3);
    OK(galloc_free(q, keep));
    pool_end(pool);
    finish();
}

/* The same while a context does not say whether it lives: then it is not left out. */
TEST(a_context_that_gives_no_answer_is_not_left_out_of_the_wait)
{
    long served = 0;
    for (int nth = 1; nth <= 40; nth++) {
        begin_devices(1, SIM_PACE_STILL);
        CUcontext other = context_new(0), own = primary(0);
        galloc_pool *pool = pool_of("memory_limit:2M", 0);
        cudaStream_t s = stream_new(), keep = stream_new(), first = stream_in(other);
        void *p, *q = NULL;
        pairs(pool, KIB(4), first, 1);
        pairs(pool, KIB(64), s, 3);
        p = get(pool, KIB(64), s);
        put(s, p, KIB(64), 1);
        OK(cudaStreamSynchronize(s));
        stream_end(s);
        cudaStream_t t = stream_in(other);
        enter(other);
        put(t, p, KIB(64), 2);
        OK(galloc_free(p, t));
        enter(own);
        sim_fail("cuCtxGetId", nth, 0, cudaErrorUnknown);
        cudaError_t error = galloc_pool_malloc(pool, &q, MIB(2), keep);
        sim_fail_clear();
        if (!error) put(keep, q, MIB(2), 3), served++;
        sim_run(-1);
        EXPECT_EQ(sim_findings(SIM_RACE), 0);
        if (!error) OK(galloc_free(q, keep));
        pool_end(pool);
        finish();
    }
    EXPECT(served > 0);
}

/* The same for what was used before a capture in which it is freed: nobody can say on which streams. */
TEST(what_was_used_before_a_capture_is_waited_for_in_every_context)
{
    for (int place = 0; place < PLACES; place++) {
        begin_devices(2, SIM_PACE_STILL);
        CUcontext other = context_new(place == BESIDE ? 0 : 1), own = primary(0);
        galloc_pool *pool = pool_of("memory_limit:2M", 0);
        cudaStream_t s = stream_new(), keep = stream_new(), t = stream_in(other);
        cudaGraph_t graph = NULL;
        pairs(pool, KIB(4), t, 1);
        void *p = get(pool, KIB(64), s);
        enter(other);
        if (place == BESIDE) put(t, p, KIB(64), 1);
        enter(own);
        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
        OK(galloc_free(p, s));
        OK(cudaStreamEndCapture(s, &graph));
        OK(cudaGraphDestroy(graph));
        void *q = get(pool, MIB(2), keep);
        put(keep, q, MIB(2), 2);
        OK(galloc_free(q, keep));
        pool_end(pool);
        finish();
    }
}

static cudaStream_t strangers[16]; /* of contexts that galloc does not know yet */
static int strangers_used, calls_to_pass;
static galloc_pool *strangers_pool;
static pthread_t learner;

static void *learn_another(void *arg)
{
    pairs(strangers_pool, KIB(4), strangers[strangers_used++], 1);
    return arg;
}

/* While one thread asks the driver for a context's id, another one comes with a stream of a new context. */
static void learn_meanwhile(const char *function)
{
    pthread_t thread;
    struct timespec until;
    if (strcmp(function, "cuCtxGetId") || !pthread_equal(pthread_self(), learner)) return;
    if (calls_to_pass-- > 0 || strangers_used == COUNT(strangers)) return;
    OK(pthread_create(&thread, NULL, learn_another, NULL));
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 20;
    if (!EXPECT_EQ(pthread_timedjoin_np(thread, NULL, &until), 0)) _exit(1); /* nothing can go on */
}

static long waits_for_strays(galloc_pool *pool, cudaStream_t s)
{
    cudaGraph_t graph = NULL;
    void *p = get(pool, KIB(64), s);
    long before;
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    OK(galloc_free(p, s));
    OK(cudaStreamEndCapture(s, &graph));
    OK(cudaGraphDestroy(graph));
    before = sim_calls("cuMemHostAlloc");
    OK(galloc_pool_trim(pool, 0, NULL));
    return sim_calls("cuMemHostAlloc") - before;
}

/* No lock is held while the driver is asked whether a known context has ended, and a context that two threads bring at
   once is noted once: it is waited for once. */
TEST(threads_bring_new_contexts_at_the_same_time)
{
    for (int way = 0; way < 4; way++) {
        int same = way & 1;
        begin_devices(1, SIM_PACE_PROMPT);
        CUcontext own = primary(0), first = context_new(0), second = context_new(0);
        galloc_pool *pool = pool_of("", 0);
        strangers_pool = pool_of("", 0);
        for (size_t i = 0; i < COUNT(strangers); i++)
            strangers[i] = stream_in(same ? second : context_new(0));
        strangers_used = 0;
        calls_to_pass = way / 2;
        learner = pthread_self();
        cudaStream_t s = stream_in(own), t = stream_in(second);
        pairs(pool, KIB(4), stream_in(first), 1);
        sim_hook(learn_meanwhile, NULL);
        pairs(pool, KIB(4), t, 1);
        sim_hook(NULL, NULL);
        EXPECT(strangers_used > 0);
        if (same) EXPECT_EQ(waits_for_strays(pool, s), 3); /* the primary context, the first and the second */
        pool_end(strangers_pool);
        pool_end(pool);
        finish();
    }
}

/* The same while the entry of a context that has ended is free for one of them. */
TEST(threads_bring_new_contexts_in_the_place_of_one_that_has_ended)
{
    for (int pass = 0, came = 1; came; pass++) {
        begin_devices(1, SIM_PACE_PROMPT);
        CUcontext own = primary(0), first = context_new(0), second = context_new(0);
        galloc_pool *pool = pool_of("", 0);
        strangers_pool = pool_of("", 0);
        strangers_used = COUNT(strangers) - 1;
        strangers[strangers_used] = stream_in(context_new(0));
        cudaStream_t s = stream_in(own), t = stream_in(second);
        pairs(pool, KIB(4), stream_in(first), 1);
        OK(cuCtxDestroy(first));
        calls_to_pass = pass;
        learner = pthread_self();
        sim_hook(learn_meanwhile, NULL);
        pairs(pool, KIB(4), t, 1);
        sim_hook(NULL, NULL);
        came = strangers_used == COUNT(strangers);
        if (came) EXPECT_EQ(waits_for_strays(pool, s), 3); /* the primary context, the second and the stranger's */
        pool_end(strangers_pool);
        pool_end(pool);
        finish();
        EXPECT(pass < 50);
    }
}

/* A free whose stream is unknown may be on any of sixteen devices. */
TEST(strays_are_waited_for_on_sixteen_devices)
{
    enum { DEVICES = 16 };
    begin_devices(DEVICES, SIM_PACE_STILL);
    cudaStream_t there[DEVICES], s;
    galloc_pool *pool = pool_of("", 0);
    for (int device = 0; device < DEVICES; device++) {
        (void)primary(device);
        there[device] = stream_new();
        for (int i = 0; i < 10 * (device + 1); i++) OK(sim_launch(there[device], NULL, 0));
    }
    (void)primary(0);
    s = stream_new();
    (void)waits_for_strays(pool, s);
    for (int device = 0; device < DEVICES; device++) EXPECT(sim_stream_done(there[device]));
    pool_end(pool);
    finish();
}

/* What is kept of a context serves for a later one once it has ended. */
TEST(contexts_that_come_and_go_do_not_pile_up)
{
    begin_devices(1, SIM_PACE_PROMPT);
    (void)primary(0);
    galloc_pool *pool = pool_of("", 0);
    size_t most = 0;
    for (int i = 0; i < 600; i++) {
        CUcontext other = context_new(0);
        cudaStream_t s = stream_in(other);
        pairs(pool, KIB(4), s, 1);
        OK(galloc_stream_retire(s));
        OK(cuCtxDestroy(other));
        if (i % 50 == 49) OK(galloc_pool_trim(pool, 0, NULL)); /* waits, so that the streams are forgotten */
        if (i == 249) most = sim_malloc_live();
        if (i > 249 && i % 50 == 49) EXPECT(sim_malloc_live() <= most + 8);
    }
    pool_end(pool);
    finish();
}

/* A known context that does not say whether it lives stays known when the next one is noted. */
TEST(a_context_that_does_not_answer_stays_known)
{
    for (int nth = 1; nth <= 8; nth++) {
        begin_devices(1, SIM_PACE_PROMPT);
        CUcontext own = primary(0), first = context_new(0), second = context_new(0);
        galloc_pool *pool = pool_of("", 0);
        cudaStream_t s = stream_in(own), t = stream_in(second);
        void *p = NULL;
        pairs(pool, KIB(4), stream_in(first), 1);
        sim_fail("cuCtxGetId", nth, 0, 999);
        (void)galloc_pool_malloc(pool, &p, KIB(4), t);
        sim_fail_clear();
        if (p) OK(galloc_free(p, t));
        else pairs(pool, KIB(4), t, 1);
        EXPECT_EQ(waits_for_strays(pool, s), 3); /* the primary context, the first and the second */
        pool_end(pool);
        finish();
    }
}

static const char *const all_pools[] = {"expandable_segments:True", "expandable_segments:False", "like:pytorch",
                                        "backend:cudaMalloc", "strategy:pooled", "reuse:completed"};

/* What streams of several contexts have freed, and have left no event for, is found when memory runs out, on trim, and
   at the end of the pool: after the wait, not before. */
TEST(memory_is_waited_for_in_each_context_that_freed_it)
{
    for (size_t kind = 0; kind < COUNT(all_pools); kind++) {
        for (int how = 0; how < 3; how++) {
            begin_devices(1, SIM_PACE_STILL);
            CUcontext own = primary(0), other = context_new(0), third = context_new(0);
            CUcontext all[3] = {own, other, third};
            galloc_config config = config_of(all_pools[kind], 0);
            config.memory_limit = MIB(24);
            galloc_pool *pool = pool_new(&config);
            cudaStream_t s[3];
            for (int i = 0; i < 3; i++) {
                s[i] = i == 2 ? cudaStreamLegacy : stream_in(all[i]);
                enter(all[i]);
                void *p = get(pool, MIB(6), s[i]);
                put(s[i], p, MIB(6), 1);
                OK(galloc_free(p, s[i]));
            }
            enter(own);
            if (how == 0) {
                void *q = get(pool, MIB(24), s[0]);
                put(s[0], q, MIB(24), 2);
                OK(galloc_free(q, s[0]));
            }
            if (how == 1) OK(galloc_pool_trim(pool, 0, NULL));
            if (how == 1) EXPECT_EQ(sim_physical(0), 0);
            pool_end(pool);
            EXPECT_EQ(sim_physical(0), 0);
            finish();
        }
    }
}

/* Who waits for all devices makes no context on those that the program does not use: there may be no room for one. */
TEST(a_wait_for_all_devices_leaves_unused_ones_alone)
{
    begin_devices(3, SIM_PACE_PROMPT);
    (void)primary(2);
    (void)primary(0);
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *p[4], *q = get(pool, KIB(64), t);
    for (int i = 0; i < 4; i++) p[i] = get(pool, KIB(64), s);
    for (int i = 0; i < 4; i++) OK(galloc_free(p[i], s)); /* nothing confirms that these are for s only */
    long before = sim_calls("cuDevicePrimaryCtxRetain");
    sim_fail("cuDevicePrimaryCtxRetain", 3, 1, 0);
    OK(galloc_pool_trim(pool, 0, NULL));
    sim_fail_clear();
    EXPECT_EQ(sim_calls("cuDevicePrimaryCtxRetain"), before + 2); /* devices 0 and 2 */
    for (int device = 0; device < 3; device++) {
        unsigned flags = 0;
        int active = -1;
        OK(cuDevicePrimaryCtxGetState(device, &flags, &active));
        EXPECT_EQ(active, device != 1);
    }
    OK(galloc_free(q, t));
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* Where one of the calls of that wait fails, nothing that waits for all devices is taken for complete: the trim says
   so, gives nothing back, and the next one does. */
TEST(a_failed_wait_for_all_devices_completes_nothing)
{
    static const char *const calls[] = {"cuDeviceGetCount", "cuDevicePrimaryCtxGetState", "cuDevicePrimaryCtxRetain",
                                        "cuCtxPushCurrent", "cuMemHostAlloc", "cuMemFreeHost"};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        int fired = 1, nth;
        for (nth = 1; fired; nth++) {
            begin_devices(2, SIM_PACE_STILL);
            CUcontext beside = context_new(0);
            cudaStream_t far = stream_in(primary(1)), near = stream_in(beside);
            (void)primary(0);
            cudaStream_t s = stream_new();
            galloc_pool *pool = pool_new(NULL);
            size_t given = 1;
            OK(galloc_free(get(pool, KIB(64), far), far));
            OK(galloc_free(get(pool, KIB(64), near), near));
            /* Nothing confirms that these are for s only. */
            for (int k = 0; k < 4; k++) OK(galloc_free(get_used(pool, KIB(64), s, 1), s));
            long held = sim_calls("cuDevicePrimaryCtxRetain") - sim_calls("cuDevicePrimaryCtxRelease");
            sim_fail(calls[i], nth, 0, cudaErrorUnknown);
            cudaError_t result = galloc_pool_trim(pool, 0, &given);
            fired = sim_failed() > 0;
            held += fired && !strcmp(calls[i], "cuDevicePrimaryCtxRetain"); /* the call that failed */
            EXPECT_EQ(sim_calls("cuDevicePrimaryCtxRetain") - sim_calls("cuDevicePrimaryCtxRelease"), held);
            sim_fail_clear();
            EXPECT_EQ(result, fired ? cudaErrorUnknown : cudaSuccess);
            EXPECT_EQ(given, fired && nth < 4 ? 0 : MIB(2)); /* the fourth wait is for what is known of s alone */
            OK(galloc_pool_trim(pool, 0, NULL));
            EXPECT_EQ(stats_of(pool).reserved.current, 0);
            pool_end(pool);
            stream_end(s);
            finish();
        }
    }
}

/* The launches of a graph are waited for in the pool's context and in the one of the graph, and each of these waits may
   fail: then the trim has failed, though the waits after it do not. */
TEST(a_failed_wait_for_launches_is_not_forgotten)
{
    for (int nth = 1; nth <= 2; nth++) {
        begin_devices(2, SIM_PACE_STILL);
        cudaStream_t far = stream_in(primary(1));
        cudaGraph_t graph = NULL;
        (void)primary(0);
        galloc_pool *pool = pool_new(NULL);
        OK(galloc_free(get(pool, 4096, far), far));
        OK(cudaStreamBeginCapture(far, cudaStreamCaptureModeThreadLocal));
        OK(galloc_free(get(pool, MIB(4), far), far));
        OK(cudaStreamEndCapture(far, &graph));
        sim_fail("cuMemHostAlloc", nth, 0, cudaErrorUnknown);
        EXPECT_EQ(galloc_pool_trim(pool, 0, NULL), cudaErrorUnknown);
        EXPECT_EQ(sim_failed(), 1);
        sim_fail_clear();
        OK(galloc_pool_trim(pool, 0, NULL));
        OK(cudaGraphDestroy(graph));
        pool_end(pool);
        finish();
    }
}

/* The legacy streams of two contexts have one handle, and nothing to do with each other; so have per-thread ones. */
TEST(default_streams_of_two_contexts_are_two_streams)
{
    for (int per_thread = 0; per_thread < 2; per_thread++) {
        for (int place = 0; place < PLACES; place++) {
            begin_devices(2, SIM_PACE_STILL);
            CUcontext own = primary(0), other = context_at(place);
            galloc_pool *pool = pool_of("", 0);
            cudaStream_t zero = per_thread ? cudaStreamPerThread : cudaStreamLegacy;
            enter(own);
            pairs(pool, KIB(64), zero, 3);
            void *p = get(pool, KIB(64), zero);
            put(zero, p, KIB(64), 1);
            OK(galloc_free(p, zero));
            enter(other);
            for (int i = 0; i < 3; i++) {
                void *q = get(pool, KIB(64), zero);
                EXPECT(q != p); /* its work is not done */
                if (place == BESIDE) put(zero, q, KIB(64), 2);
                OK(galloc_free(q, zero));
            }
            enter(own);
            EXPECT(get(pool, KIB(64), zero) == p);
            put(zero, p, KIB(64), 3);
            OK(galloc_free(p, zero));
            pool_end(pool);
            finish();
        }
    }
}

/* However many contexts there are, beside a pool that by promise has one. */
TEST(default_streams_are_apart_beside_an_unchecked_pool)
{
    enum { CONTEXTS = 24 };
    for (int per_thread = 0; per_thread < 2; per_thread++) {
        begin_devices(1, SIM_PACE_STILL);
        CUcontext context[CONTEXTS];
        galloc_pool *unchecked = pool_of("stream_check:off", 0), *pool = pool_of("", 0);
        cudaStream_t zero = per_thread ? cudaStreamPerThread : cudaStreamLegacy;
        for (int i = 0; i < CONTEXTS; i++) context[i] = context_new(0);
        pairs(unchecked, KIB(64), zero, 1);
        for (int i = 0; i < 4 * CONTEXTS; i++) {
            enter(context[i % CONTEXTS]);
            void *p = get_used(pool, KIB(64), zero, 1);
            OK(galloc_free(p, zero));
        }
        (void)primary(0);
        pool_end(unchecked);
        pool_end(pool);
        finish();
    }
}

/* They are two streams to the driver, too: it allocates and frees on that of the current context. */
TEST(the_driver_has_default_streams_of_two_contexts)
{
    for (int per_thread = 0; per_thread < 2; per_thread++) {
        for (int turn = 0; turn < 2; turn++) {
            begin_devices(1, SIM_PACE_STILL);
            CUcontext own = primary(0), other = context_new(0);
            galloc_pool *pool = pool_of("backend:cudaMallocAsync", 0);
            cudaStream_t zero = per_thread ? cudaStreamPerThread : cudaStreamLegacy;
            for (int i = 0; i < 6; i++) {
                enter((turn + i) % 2 ? other : own);
                void *p = get_used(pool, MIB(2), zero, 1);
                OK(galloc_free(p, zero));
            }
            EXPECT_EQ(sim_pending() > 0, 1);
            EXPECT_EQ(sim_calls("cuMemAllocFromPoolAsync"), 6);
            pool_end(pool);
            finish();
        }
    }
}

/* The driver reuses memory in the order of a stream whichever context is current at its free. */
TEST(the_driver_gets_a_free_while_another_context_is_current)
{
    for (int place = 0; place < PLACES; place++) {
        begin_devices(2, SIM_PACE_STILL);
        CUcontext own = primary(0), other = context_at(place);
        galloc_pool *pool = pool_of("backend:cudaMallocAsync,memory_limit:4M,wait_limit_ms:0", 0);
        cudaStream_t s = stream_in(own);
        for (int i = 0; i < 3; i++) {
            enter(own);
            void *p = get_used(pool, MIB(4), s, 1);
            enter(other);
            OK(galloc_free(p, s));
        }
        EXPECT(sim_pending() > 0);
        enter(own);
        pool_end(pool);
        finish();
    }
}

/* A free for which host memory is missing waits for its stream: the default stream of the current context. */
TEST(a_free_without_host_memory_waits_in_the_current_context)
{
    for (int per_thread = 0; per_thread < 2; per_thread++) {
        begin_devices(1, SIM_PACE_STILL);
        CUcontext own = primary(0), other = context_new(0);
        galloc_pool *pool = pool_of("", 0);
        cudaStream_t zero = per_thread ? cudaStreamPerThread : cudaStreamLegacy, s = stream_in(own);
        void *p = get(pool, MIB(4), s);
        enter(other);
        put(zero, p, MIB(4), 1);
        sim_fail_malloc(1, 1);
        OK(galloc_free(p, zero));
        EXPECT(sim_failed_mallocs() > 0);
        sim_fail_clear();
        enter(own);
        p = get_used(pool, MIB(4), s, 2);
        OK(galloc_free(p, s));
        pool_end(pool);
        finish();
    }
}

/* A stream frees a block of another device. What it allocates next is memory of its own device all the same. */
TEST(a_free_of_another_devices_block_leads_no_allocation_there)
{
    enum { NAMED, LEGACY, PER_THREAD, KINDS };
    for (int kind = 0; kind < KINDS; kind++) {
        begin_devices(2, SIM_PACE_RANDOM);
        CUcontext own = current(), other = primary(1);
        cudaStream_t there = stream_in(other), here = kind == NAMED ? stream_in(own) : cudaStreamLegacy;
        if (kind == PER_THREAD) here = cudaStreamPerThread;
        for (int i = 0; i < 3; i++) {
            void *p = NULL, *q = NULL;
            enter(other);
            OK(galloc_malloc(&p, KIB(64), there));
            EXPECT_EQ(info_of(p).device, 1);
            enter(own);
            OK(galloc_free(p, here));
            OK(galloc_malloc(&q, KIB(64), here));
            EXPECT_EQ(info_of(q).device, 0);
            OK(galloc_free(q, here));
        }
        finish();
    }
}

/* However many devices a thread uses by their default streams: memory is the current device's. */
TEST(default_streams_of_sixteen_devices_are_apart)
{
    enum { DEVICES = 16 };
    begin_devices(DEVICES, SIM_PACE_STILL);
    for (int i = 0; i < 6 * DEVICES; i++) {
        cudaStream_t zero = i / DEVICES % 2 ? cudaStreamPerThread : cudaStreamLegacy;
        (void)primary(i % DEVICES);
        for (int k = 0; k < 3; k++) {
            void *p = NULL;
            OK(galloc_malloc(&p, KIB(64), zero));
            EXPECT_EQ(info_of(p).device, i % DEVICES);
            put(zero, p, KIB(64), 1);
            OK(galloc_free(p, zero));
        }
    }
    finish();
}

/* Nor does the default stream of one device lead to that of another, also where streams are not checked. */
TEST(default_streams_of_unchecked_pools_are_those_of_the_current_device)
{
    for (int per_thread = 0; per_thread < 2; per_thread++) {
        begin_devices(3, SIM_PACE_STILL);
        cudaStream_t zero = per_thread ? cudaStreamPerThread : NULL;
        setenv("GALLOC_CONF", "stream_check:off", 1);
        for (int i = 0; i < 12; i++) {
            void *p = NULL, *q = NULL;
            (void)primary(i % 3);
            OK(galloc_malloc(&p, KIB(64), zero));
            EXPECT_EQ(info_of(p).device, i % 3);
            put(zero, p, KIB(64), 1);
            OK(galloc_free(p, zero));
            OK(galloc_malloc(&q, KIB(64), zero));
            EXPECT(q == p);
            put(zero, q, KIB(64), 2);
            OK(galloc_free(q, zero));
        }
        unsetenv("GALLOC_CONF");
        finish();
    }
}

/* A use on the default stream of another context is marked there when the block is freed: once it is done, no call
   waits for it. */
TEST(a_noted_use_on_a_default_stream_of_another_context_is_marked_there)
{
    for (int per_thread = 0; per_thread < 2; per_thread++) {
        for (int place = 0; place < PLACES; place++) {
            begin_devices(2, SIM_PACE_STILL);
            CUcontext own = primary(0), other = context_at(place);
            galloc_pool *pool = pool_of("memory_limit:4M,wait_limit_ms:0,reuse:completed", 0);
            cudaStream_t zero = per_thread ? cudaStreamPerThread : cudaStreamLegacy;
            cudaStream_t s = stream_in(own), t = stream_in(own);
            void *p = get(pool, MIB(4), s), *q = NULL;
            enter(other);
            OK(galloc_record_stream(p, zero));
            OK(sim_launch(zero, NULL, 0));
            enter(own);
            OK(galloc_free(p, s));
            EXPECT_EQ(galloc_pool_malloc(pool, &q, MIB(4), t), cudaErrorMemoryAllocation);
            sim_run(-1);
            OK(galloc_free(get(pool, MIB(4), t), t));
            EXPECT_EQ(stats_of(pool).waits, 0);
            pool_end(pool);
            finish();
        }
    }
}

/* The first call for a default stream of another context releases a group: its launches there go on. */
TEST(a_group_is_released_on_the_default_stream_of_the_current_context)
{
    for (int per_thread = 0; per_thread < 2; per_thread++) {
        begin_devices(1, SIM_PACE_STILL);
        CUcontext own = primary(0), other = context_new(0);
        galloc_pool *pool = pool_of("", 0);
        galloc_graph *group = NULL;
        cudaStream_t zero = per_thread ? cudaStreamPerThread : cudaStreamLegacy;
        cudaGraph_t graph = NULL;
        cudaGraphExec_t instance = NULL;
        enter(other);
        cudaStream_t s = stream_new(), t = stream_new();
        OK(galloc_graph_begin(&group, pool, s));
        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
        void *p = get(pool, MIB(9), s);
        put(s, p, MIB(9), 1);
        OK(galloc_free(p, s));
        OK(cudaStreamEndCapture(s, &graph));
        OK(galloc_graph_end(group));
        OK(cudaGraphInstantiate(&instance, graph, 0));
        OK(cudaGraphLaunch(instance, zero));
        OK(galloc_graph_release(group, zero));
        void *q = get(pool, MIB(9), t);
        put(t, q, MIB(9), 2);
        OK(galloc_free(q, t));
        p = get(pool, MIB(9), zero);
        put(zero, p, MIB(9), 3);
        OK(galloc_free(p, zero));
        q = get(pool, MIB(9), t);
        put(t, q, MIB(9), 4);
        OK(galloc_free(q, t));
        OK(cudaGraphExecDestroy(instance));
        OK(cudaGraphDestroy(graph));
        enter(own);
        pool_end(pool);
        finish();
    }
}

/* A thread has a per-thread default stream in each context. In one capture they are two streams: what one of them read
   is not given to the other. */
static void *captured_on_two_devices(void *before)
{
    cudaStream_t own = cudaStreamPerThread, s = NULL;
    cudaEvent_t fork = NULL, made = NULL, read = NULL;
    cudaGraph_t graph = NULL;
    cudaGraphExec_t instance = NULL;
    if (before) {
        (void)primary(2);
        OK(cudaStreamBeginCapture(own, cudaStreamCaptureModeRelaxed));
        OK(galloc_malloc(&before, 1000, own));
        OK(galloc_free(before, own));
        OK(cudaStreamEndCapture(own, &graph));
        OK(cudaGraphDestroy(graph));
    }
    (void)primary(1);
    OK(cudaDeviceEnablePeerAccess(0, 0));
    OK(cudaEventCreate(&read));
    (void)primary(0);
    galloc_pool *pool = pool_of("expandable_segments:False", 0);
    OK(cudaEventCreate(&fork));
    OK(cudaEventCreate(&made));
    s = stream_new();
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    OK(cudaEventRecord(fork, s));
    OK(cudaStreamWaitEvent(own, fork, 0));
    void *p = get(pool, MIB(9), own);
    put(own, p, MIB(9), 1);
    OK(cudaEventRecord(made, own));
    OK(cudaSetDevice(1));
    OK(cudaStreamWaitEvent(own, made, 0));
    OK(galloc_record_stream(p, own));
    look(own, p, MIB(9), 1);
    OK(cudaEventRecord(read, own));
    OK(cudaSetDevice(0));
    OK(galloc_free(p, own));
    void *q = get(pool, MIB(9), own);
    put(own, q, MIB(9), 2);
    OK(galloc_free(q, own));
    OK(cudaEventRecord(made, own));
    OK(cudaStreamWaitEvent(s, made, 0));
    OK(cudaStreamWaitEvent(s, read, 0));
    OK(cudaStreamEndCapture(s, &graph));
    OK(cudaGraphInstantiate(&instance, graph, 0));
    OK(cudaGraphLaunch(instance, s));
    OK(cudaDeviceSynchronize());
    OK(cudaGraphExecDestroy(instance));
    OK(cudaGraphDestroy(graph));
    OK(cudaEventDestroy(fork));
    OK(cudaEventDestroy(made));
    OK(cudaEventDestroy(read));
    pool_end(pool);
    stream_end(s);
    return NULL;
}

TEST(per_thread_streams_of_two_devices_in_one_capture_are_two)
{
    for (int third = 0; third < 2; third++) { /* the thread has captured on a third device before */
        pthread_t thread;
        begin_devices(3, SIM_PACE_STILL);
        EXPECT_EQ(pthread_create(&thread, NULL, captured_on_two_devices, third ? &thread : NULL), 0);
        EXPECT_EQ(pthread_join(thread, NULL), 0);
        finish();
    }
}

/* A new group without a pool is of the default pool of its stream's device, which need not be the current one. */
TEST(a_group_is_of_its_streams_device)
{
    for (int device = 0; device < 3; device++) {
        begin_devices(3, SIM_PACE_RANDOM);
        cudaStream_t s = stream_in(primary(device));
        cudaGraph_t graph = NULL;
        galloc_graph *group = NULL;
        galloc_pool *pool = NULL;
        void *p = NULL;
        (void)primary((device + 1) % 3);
        OK(galloc_pool_default(&pool, device));
        OK(galloc_graph_begin(&group, NULL, s));
        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
        OK(galloc_malloc(&p, MIB(4), s));
        EXPECT(info_of(p).pool == pool);
        OK(galloc_free(p, s));
        OK(cudaStreamEndCapture(s, &graph));
        OK(galloc_graph_end(group));
        OK(galloc_graph_begin(&group, pool, s));
        OK(galloc_graph_end(group));
        OK(cudaGraphDestroy(graph));
        OK(galloc_graph_release(group, s));
        finish();
    }
}

typedef struct joining {
    galloc_pool *pool;
    cudaEvent_t fork, done;
    int way; /* so many nodes lie between the fork and the allocation */
    void *ptr;
} joining;

/* Captures the thread's default stream of device 1, then that of device 0, which joins a capture. */
static void *joins_a_capture(void *arg)
{
    joining *j = arg;
    cudaStream_t own = cudaStreamPerThread;
    cudaGraph_t graph = NULL;
    void *p = NULL;
    (void)primary(1);
    OK(cudaStreamBeginCapture(own, cudaStreamCaptureModeRelaxed));
    OK(galloc_malloc(&p, 1000, own));
    OK(galloc_free(p, own));
    OK(cudaStreamEndCapture(own, &graph));
    OK(cudaGraphDestroy(graph));
    (void)primary(0);
    OK(cudaStreamWaitEvent(own, j->fork, 0));
    for (int i = 0; i < j->way; i++) OK(sim_launch(own, NULL, 0));
    j->ptr = get_used(j->pool, MIB(9), own, (uint64_t)j->way + 1);
    OK(galloc_free(j->ptr, own));
    OK(cudaEventRecord(j->done, own));
    return NULL;
}

/* So have two threads, in each context. Nothing orders what one of them freed before the other one's work. */
TEST(per_thread_streams_of_two_threads_in_a_second_context_are_two)
{
    joining j[2] = {{.way = 0}, {.way = 700}};
    cudaEvent_t fork = NULL;
    cudaGraph_t graph = NULL;
    cudaGraphExec_t instance = NULL;
    begin_devices(2, SIM_PACE_STILL);
    galloc_pool *pool = pool_of("", 0);
    cudaStream_t s = stream_new();
    OK(cudaEventCreate(&fork));
    for (int i = 0; i < 2; i++) OK(cudaEventCreate(&j[i].done));
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    OK(cudaEventRecord(fork, s));
    for (int i = 0; i < 2; i++) {
        pthread_t thread;
        j[i].pool = pool;
        j[i].fork = fork;
        EXPECT_EQ(pthread_create(&thread, NULL, joins_a_capture, &j[i]), 0);
        EXPECT_EQ(pthread_join(thread, NULL), 0);
        OK(cudaStreamWaitEvent(s, j[i].done, 0));
    }
    EXPECT(j[0].ptr != j[1].ptr);
    OK(cudaStreamEndCapture(s, &graph));
    OK(cudaGraphInstantiate(&instance, graph, 0));
    OK(cudaGraphLaunch(instance, s));
    OK(cudaDeviceSynchronize());
    OK(cudaGraphExecDestroy(instance));
    OK(cudaGraphDestroy(graph));
    OK(cudaEventDestroy(fork));
    for (int i = 0; i < 2; i++) OK(cudaEventDestroy(j[i].done));
    pool_end(pool);
    stream_end(s);
    finish();
}

static void *frees_in_two_contexts(void *pool)
{
    for (int device = 0; device < 2; device++) {
        (void)primary(device);
        void *p[8];
        for (int i = 0; i < 8; i++) p[i] = get(pool, 1000, cudaStreamPerThread);
        for (int i = 0; i < 8; i++) OK(galloc_free(p[i], cudaStreamPerThread));
    }
    size_t cached = 0;
    for (size_t i = 0; i < inside_streams(pool); i++) cached += inside_stream_at(pool, i).blocks > 0;
    EXPECT_EQ(cached, 2);
    return NULL;
}

TEST(a_thread_that_ends_leaves_nothing_in_the_caches_of_its_streams_in_any_context)
{
    pthread_t thread;
    begin_devices(2, SIM_PACE_PROMPT);
    galloc_pool *pools[2] = {pool_of("", 0), pool_of("", 0)};
    for (int k = 0; k < 2; k++) {
        EXPECT_EQ(pthread_create(&thread, NULL, frees_in_two_contexts, pools[k]), 0);
        EXPECT_EQ(pthread_join(thread, NULL), 0);
        for (size_t i = 0; i < inside_streams(pools[k]); i++) EXPECT_EQ(inside_stream_at(pools[k], i).blocks, 0);
    }
    for (int k = 0; k < 2; k++) pool_end(pools[k]);
    finish();
}

/* At its limit a pool looks in the graph for what the stream follows: the one that the program named, not the default
   stream of the pool's context, which the pool has made current. */
TEST(a_per_thread_stream_of_another_device_follows_what_it_waited_for)
{
    for (int follows = 0; follows < 2; follows++) {
        begin_devices(2, SIM_PACE_STILL);
        cudaStream_t own = cudaStreamPerThread, s = NULL, first = NULL;
        cudaEvent_t fork = NULL, freed = NULL, end = NULL;
        cudaGraph_t graph = NULL;
        void *q = NULL;
        (void)primary(1);
        OK(cudaDeviceEnablePeerAccess(0, 0));
        OK(cudaEventCreate(&end));
        (void)primary(0);
        galloc_pool *pool = pool_of("expandable_segments:False,memory_limit:10M", 0);
        OK(cudaEventCreate(&fork));
        OK(cudaEventCreate(&freed));
        s = stream_new();
        first = follows ? stream_new() : own; /* the default stream of the pool's own device */
        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
        OK(cudaEventRecord(fork, s));
        OK(cudaStreamWaitEvent(first, fork, 0));
        void *p = get(pool, MIB(9), first);
        put(first, p, MIB(9), 1);
        OK(galloc_free(p, first));
        OK(cudaEventRecord(freed, first));
        OK(cudaStreamWaitEvent(s, freed, 0));
        OK(cudaSetDevice(1));
        OK(cudaStreamWaitEvent(own, follows ? freed : fork, 0));
        EXPECT_EQ(galloc_pool_malloc(pool, &q, MIB(9), own), follows ? cudaSuccess : cudaErrorMemoryAllocation);
        if (q) OK(galloc_free(q, own));
        OK(sim_launch(own, NULL, 0));
        OK(cudaEventRecord(end, own));
        OK(cudaStreamWaitEvent(s, end, 0));
        OK(cudaStreamEndCapture(s, &graph));
        OK(cudaGraphDestroy(graph));
        OK(cudaSetDevice(0));
        OK(cudaEventDestroy(fork));
        OK(cudaEventDestroy(freed));
        OK(cudaEventDestroy(end));
        pool_end(pool);
        stream_end(s);
        if (follows) stream_end(first);
        finish();
    }
}

TEST(groups_take_captures_of_their_threads_stream_in_one_context)
{
    begin_devices(2, SIM_PACE_STILL);
    cudaStream_t own = cudaStreamPerThread;
    galloc_graph *group = NULL, *other = NULL;
    cudaGraph_t graphs[2];
    void *p[2];
    (void)primary(1);
    (void)primary(0);
    galloc_pool *pool = pool_of("expandable_segments:False", 0);
    OK(galloc_graph_begin(&group, pool, own));
    for (int device = 0; device < 2; device++) {
        OK(cudaSetDevice(device));
        if (device) OK(galloc_graph_begin(&other, pool, own));
        OK(cudaStreamBeginCapture(own, cudaStreamCaptureModeRelaxed));
        p[device] = get(pool, MIB(9), own);
        OK(sim_launch(own, NULL, 0));
        OK(galloc_free(p[device], own));
        OK(cudaStreamEndCapture(own, &graphs[device]));
    }
    EXPECT(p[0] != p[1]);
    OK(galloc_graph_end(group));
    OK(galloc_graph_end(other));
    OK(cudaSetDevice(0));
    for (int device = 0; device < 2; device++) OK(cudaGraphDestroy(graphs[device]));
    pool_end(pool);
    finish();
}

/* A per-thread stream that went with its context, or whose context cannot be entered, is no part of another capture. */
TEST(a_group_whose_context_is_gone_takes_no_capture)
{
    for (int how = 0; how < 3; how++) { /* the context is destroyed, reset, or cannot be entered */
        begin_devices(2, SIM_PACE_STILL);
        galloc_graph *group = NULL;
        cudaGraph_t graph = NULL;
        CUcontext other = how == 1 ? primary(1) : context_new(0), own = primary(0);
        cudaStream_t s = cudaStreamPerThread;
        galloc_pool *pool = pool_of("expandable_segments:False", 0);
        enter(other);
        OK(galloc_graph_begin(&group, pool, cudaStreamPerThread));
        enter(own);
        if (how == 0) OK(cuCtxDestroy(other));
        if (how == 1) reset(1);
        enter(own);
        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
        if (how == 2) sim_fail("cuCtxPushCurrent", 1, 0, cudaErrorUnknown);
        void *p = get(pool, MIB(9), s);
        if (how == 2) EXPECT_EQ(sim_failed(), 1);
        sim_fail_clear();
        put(s, p, MIB(9), 1);
        OK(galloc_free(p, s));
        OK(cudaStreamEndCapture(s, &graph));
        EXPECT_EQ(current() == own, 1);
        OK(galloc_graph_end(group));
        OK(galloc_graph_release(group, s)); /* the graph's memory is not the group's */
        EXPECT_EQ(stats_of(pool).graph_bytes, MIB(9));
        OK(cudaGraphDestroy(graph));
        pool_end(pool);
        if (how == 2) OK(cuCtxDestroy(other));
        finish();
    }
}

/* The per-thread stream of a context is another one after a reset, also where a capture allocates first on its fork. */
TEST(a_group_from_before_a_reset_takes_no_capture_of_the_new_context)
{
    for (int forked = 0; forked < 2; forked++) {
        begin_devices(1, SIM_PACE_STILL);
        galloc_graph *group = NULL;
        cudaGraph_t graph = NULL;
        cudaStream_t s = cudaStreamPerThread;
        galloc_pool *pool = pool_of("expandable_segments:False", 0);
        OK(galloc_graph_begin(&group, pool, s));
        reset(0);
        cudaStream_t fork = stream_new(), first = forked ? fork : s;
        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
        order(s, fork);
        void *p = get(pool, MIB(9), first);
        put(first, p, MIB(9), 1);
        OK(galloc_free(p, first));
        order(fork, s);
        OK(cudaStreamEndCapture(s, &graph));
        OK(galloc_graph_end(group));
        OK(galloc_graph_release(group, s)); /* the graph can still be launched */
        EXPECT_EQ(stats_of(pool).graph_bytes, MIB(9));
        OK(cudaGraphDestroy(graph));
        stream_end(fork);
        pool_end(pool);
        finish();
    }
}

/* A capture of the group's stream may allocate first on a stream of another device that it forks to. */
TEST(a_capture_that_allocates_first_on_another_devices_fork_joins_its_group)
{
    for (int per_thread = 0; per_thread < 2; per_thread++) {
        begin_devices(2, SIM_PACE_STILL);
        cudaEvent_t fork = NULL, join = NULL;
        galloc_graph *group = NULL;
        cudaGraph_t graphs[2];
        void *p[2];
        (void)primary(1);
        OK(cudaDeviceEnablePeerAccess(0, 0));
        cudaStream_t there = stream_new();
        OK(cudaEventCreate(&join));
        (void)primary(0);
        galloc_pool *pool = pool_of("expandable_segments:False", 0);
        cudaStream_t here = per_thread ? cudaStreamPerThread : stream_new();
        OK(cudaEventCreate(&fork));
        OK(galloc_graph_begin(&group, pool, here));
        for (int i = 0; i < 2; i++) {
            OK(cudaStreamBeginCapture(here, cudaStreamCaptureModeRelaxed));
            OK(cudaEventRecord(fork, here));
            OK(cudaSetDevice(1));
            OK(cudaStreamWaitEvent(there, fork, 0));
            p[i] = get(pool, MIB(9), there);
            put(there, p[i], MIB(9), 1);
            OK(galloc_free(p[i], there));
            OK(cudaEventRecord(join, there));
            OK(cudaSetDevice(0));
            OK(cudaStreamWaitEvent(here, join, 0));
            OK(cudaStreamEndCapture(here, &graphs[i]));
        }
        EXPECT(p[0] == p[1]);
        OK(galloc_graph_end(group));
        for (int i = 0; i < 2; i++) OK(cudaGraphDestroy(graphs[i]));
        OK(cudaEventDestroy(fork));
        OK(cudaEventDestroy(join));
        pool_end(pool);
        if (!per_thread) stream_end(here);
        OK(cudaSetDevice(1));
        stream_end(there);
        OK(cudaSetDevice(0));
        finish();
    }
}

/* ---- contexts with a sticky error -------------------------------------------------------------------------------- */

static const char *const failing_pools[] = {"expandable_segments:True", "expandable_segments:False", "like:pytorch",
                                            "backend:cudaMalloc", "backend:cudaMallocAsync", "strategy:pooled",
                                            "reuse:completed", "wait_limit_ms:1"};

static void end_context(CUcontext other, int place)
{
    CUcontext own = current();
    if (place == BESIDE) OK(cuCtxDestroy(other));
    else reset(1);
    enter(own);
}

/* The pool serves its own streams, and those of no other context. */
static void expect_open(galloc_pool *pool, cudaStream_t own)
{
    for (int i = 0; i < 2; i++) {
        void *p = get(pool, MIB(6), own);
        put(own, p, MIB(6), 2);
        OK(galloc_free(p, own));
    }
    void *q = get(pool, 512, own);
    OK(galloc_resize(q, 256, own));
    OK(galloc_free(q, own));
    EXPECT_EQ(galloc_pool_check(pool), 0);
}

/* An illegal address in another context is that context's alone. The pool goes on without what was freed there, whose
   work nobody can wait for; once that context has ended it has that memory, too. */
static void survive(const char *settings, int place, int how)
{
    begin_devices(2, SIM_PACE_STILL);
    CUcontext own = primary(0), other = context_at(place);
    enter(own);
    galloc_config config = config_of(settings, 0);
    config.memory_limit = config.like ? MIB(44) : MIB(24);
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new(), t = stream_in(other);
    void *p = get(pool, MIB(6), t), *q = NULL, *small = get(pool, 512, s);
    enter(other);
    if (place == BESIDE) put(t, p, MIB(6), 1);
    enter(own);
    OK(galloc_free(p, t));
    if (how == 1) OK(galloc_stream_retire(t));
    sim_context_fail(other, cudaErrorIllegalAddress);
    expect_open(pool, s);
    EXPECT_EQ(galloc_pool_malloc(pool, &q, MIB(40), s), cudaErrorMemoryAllocation);
    EXPECT_EQ(galloc_pool_malloc(pool, &q, MIB(24), s), cudaErrorMemoryAllocation);
    EXPECT_EQ(galloc_pool_malloc(pool, &q, MIB(6), t), cudaErrorIllegalAddress);
    EXPECT_EQ(galloc_free(small, t), cudaErrorIllegalAddress);
    OK(galloc_free(small, s));
    (void)galloc_pool_trim(pool, 0, NULL);
    expect_open(pool, s);
    end_context(other, place);
    if (config.wait_limit_ms != UINT64_MAX) OK(galloc_pool_trim(pool, 0, NULL)); /* no allocation waits for that */
    q = get(pool, MIB(24), s);
    put(s, q, MIB(24), 3);
    OK(galloc_free(q, s));
    pool_end(pool);
    finish();
}

TEST(a_pool_survives_the_error_of_another_context)
{
    for (size_t kind = 0; kind < COUNT(failing_pools); kind++) {
        for (int place = 0; place < PLACES; place++) {
            for (int how = 0; how < 2; how++) {
                long before = test_failures;
                survive(failing_pools[kind], place, how);
                if (test_failures > before) printf("    %s, place %d, %d\n", failing_pools[kind], place, how);
            }
        }
    }
}

static CUcontext context_to_fail;
static long calls_before_it_fails;

static void fail_in_time(const char *function)
{
    (void)function;
    if (!context_to_fail || calls_before_it_fails-- > 0) return;
    sim_context_fail(context_to_fail, cudaErrorIllegalAddress);
    context_to_fail = NULL;
}

static void *try_to_get(galloc_pool *pool, size_t bytes, cudaStream_t stream)
{
    void *p = NULL;
    cudaError_t error = galloc_pool_malloc(pool, &p, bytes, stream);
    if (error) EXPECT_EQ(error, cudaErrorMemoryAllocation);
    else put(stream, p, bytes, 4);
    return p;
}

static void try_to_grow(void *p, size_t bytes, cudaStream_t stream)
{
    cudaError_t error = galloc_resize(p, bytes, stream);
    if (error && error != cudaErrorNotSupported) EXPECT_EQ(error, cudaErrorMemoryAllocation);
    if (!error) put(stream, p, bytes, 5);
}

/* Returns whether the context failed: before the n-th call of CUDA. */
static int survive_from(const char *settings, int place, long nth)
{
    begin_devices(2, SIM_PACE_STILL);
    CUcontext own = primary(0), other = context_at(place);
    enter(own);
    galloc_config config = config_of(settings, 0);
    config.memory_limit = config.like ? MIB(64) : MIB(24);
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new(), t = stream_in(other), u = stream_in(other);
    void *p[3] = {get(pool, MIB(4), t), get(pool, MIB(2), s), get(pool, MIB(6), u)}, *q[4];
    enter(other);
    if (place == BESIDE) put(t, p[0], MIB(4), 1);
    if (place == BESIDE) put(u, p[2], MIB(6), 1);
    enter(own);
    OK(galloc_free(p[2], u));
    OK(galloc_free(p[0], t));
    OK(galloc_stream_retire(t));
    context_to_fail = other;
    calls_before_it_fails = nth;
    sim_hook(fail_in_time, NULL);
    try_to_grow(p[1], MIB(6), s);
    q[0] = try_to_get(pool, MIB(8), s);
    q[1] = try_to_get(pool, MIB(8), s);
    try_to_grow(p[1], MIB(12), s);
    q[2] = try_to_get(pool, MIB(4), s);
    q[3] = try_to_get(pool, KIB(64), s);
    for (int i = 0; i < 4; i++)
        if (q[i]) OK(galloc_free(q[i], s));
    OK(galloc_free(p[1], s));
    (void)galloc_pool_trim(pool, 0, NULL);
    sim_hook(NULL, NULL);
    int failed = !context_to_fail;
    expect_open(pool, s);
    end_context(other, place);
    expect_open(pool, s);
    pool_end(pool);
    finish();
    return failed;
}

/* The same whenever the context fails: no call on another stream returns the error, also where it waits at that time
   for work of the context. */
TEST(a_pool_survives_the_error_of_another_context_at_any_time)
{
    for (size_t kind = 0; kind < COUNT(failing_pools); kind++) {
        for (int place = 0; place < PLACES; place++) {
            long nth = 0, before = test_failures;
            while (test_failures == before && survive_from(failing_pools[kind], place, nth)) nth++;
            if (test_failures > before) printf("    %s, place %d, call %ld\n", failing_pools[kind], place, nth);
        }
    }
}

/* Nor is it the pool's error where that context is current. */
TEST(a_pool_survives_the_error_of_the_current_context)
{
    for (int place = 0; place < PLACES; place++) {
        begin_devices(2, SIM_PACE_STILL);
        CUcontext own = primary(0), other = context_at(place);
        galloc_pool *pool = pool_of("memory_limit:24M", 0);
        cudaStream_t s = stream_in(own), t = stream_in(other);
        enter(other);
        OK(galloc_free(get(pool, MIB(4), t), t));
        sim_fail("cuEventRecord", 1, 0, cudaErrorIllegalAddress);
        (void)galloc_stream_retire(t);
        EXPECT_EQ(sim_failed(), 1);
        sim_fail_clear();
        enter(own);
        expect_open(pool, s);
        end_context(other, place);
        expect_open(pool, s);
        pool_end(pool);
        finish();
    }
}

/* Returns whether the context failed. It is that of the stream that asks, and waits for another one. */
static int fail_from(int place, long nth)
{
    begin_devices(2, SIM_PACE_STILL);
    CUcontext own = primary(0), other = context_at(place);
    enter(own);
    galloc_pool *pool = pool_of("memory_limit:24M", 0);
    cudaStream_t s = stream_new(), t = stream_in(other);
    void *p = get(pool, MIB(20), s), *q = NULL;
    pairs(pool, 512, t, 1);
    put(s, p, MIB(20), 1);
    OK(galloc_free(p, s));
    context_to_fail = other;
    calls_before_it_fails = nth;
    sim_hook(fail_in_time, NULL);
    cudaError_t error = galloc_pool_malloc(pool, &q, MIB(20), t);
    sim_hook(NULL, NULL);
    int failed = !context_to_fail;
    if (error && error != cudaErrorMemoryAllocation) EXPECT_EQ(error, cudaErrorIllegalAddress);
    if (!failed) OK(error);
    if (q) OK(galloc_free(q, s));
    expect_open(pool, s);
    end_context(other, place);
    expect_open(pool, s);
    pool_end(pool);
    finish();
    return failed;
}

TEST(a_pool_survives_the_error_of_the_context_that_asks)
{
    for (int place = 0; place < PLACES; place++) {
        long nth = 0, before = test_failures;
        while (test_failures == before && fail_from(place, nth)) nth++;
        if (test_failures > before) printf("    place %d, call %ld\n", place, nth);
    }
}

/* The error of the pool's own context closes the pool for streams of all contexts: nothing it has at hand is given
   out. */
TEST(a_pool_whose_context_failed_serves_no_other_context)
{
    static const char *const settings[] = {"", "roundup_power2_divisions:4", "strategy:pooled"};
    for (int i = 0; i < 6; i++) {
        int shared = i % 2;
        begin_devices(1, SIM_PACE_STILL);
        CUcontext own = primary(0), other = context_new(0);
        galloc_pool *pool = pool_of(settings[i / 2], 0);
        cudaStream_t t = stream_in(other), u = stream_in(other);
        enter(other);
        if (shared) pairs(pool, KIB(64), u, 1);
        pairs(pool, KIB(64), t, 3);
        pairs(pool, MIB(4), t, 1);
        void *p = get_growable(pool, MIB(2), MIB(8), t), *q = get(pool, MIB(2), t), *r = NULL;
        OK(galloc_resize(p, MIB(8), t));
        OK(galloc_resize(p, MIB(2), t)); /* the rest is at hand */
        put(t, q, MIB(2), 1);
        OK(galloc_free(q, t));
        sim_context_fail(own, cudaErrorIllegalAddress);
        EXPECT_EQ(galloc_pool_malloc(pool, &r, MIB(100), t), cudaErrorIllegalAddress);
        EXPECT_EQ(galloc_resize(p, MIB(4), t), cudaErrorIllegalAddress);
        for (size_t bytes = 512; bytes <= MIB(16); bytes *= 2) {
            EXPECT_EQ(galloc_pool_malloc(pool, &r, bytes, t), cudaErrorIllegalAddress);
            EXPECT_EQ(galloc_pool_malloc(pool, &r, bytes, u), cudaErrorIllegalAddress);
        }
        EXPECT_EQ(galloc_resize(p, MIB(1), t), 0); /* that needs nothing */
        OK(galloc_free(p, t));
        EXPECT_EQ(galloc_pool_check(pool), 0);
        enter(own);
        reset(0);
        enter(other);
        p = get(pool, MIB(16), t);
        put(t, p, MIB(16), 2);
        OK(galloc_free(p, t));
        pool_end(pool);
        enter(own);
        finish();
    }
}

/* Frees in another context want to know how far the checks of debug are, which the failed context cannot say: they
   leave no lock behind. */
TEST(frees_in_another_context_after_the_error_of_the_pools_hold_up_nobody)
{
    enum { CHECKED = 8, FREED = 64 };
    begin_devices(1, SIM_PACE_STILL);
    CUcontext own = primary(0), other = context_new(0);
    galloc_pool *pool = pool_of("debug:guards", 0);
    cudaStream_t s = stream_new(), t = stream_in(other);
    void *p[CHECKED], *q[FREED];
    for (int i = 0; i < CHECKED; i++) p[i] = get(pool, 1000, s);
    for (int i = 0; i < FREED; i++) q[i] = get(pool, 1000, t);
    for (int i = 0; i < CHECKED; i++) OK(galloc_free(p[i], s));
    sim_context_fail(own, cudaErrorIllegalAddress);
    EXPECT_EQ(galloc_pool_trim(pool, 0, NULL), cudaErrorIllegalAddress);
    enter(other);
    for (int i = 0; i < FREED; i++) OK(galloc_free(q[i], t));
    alarm(20); /* a lock that is held would hold it up for ever */
    EXPECT_EQ(galloc_pool_trim(pool, 0, NULL), cudaErrorIllegalAddress);
    alarm(0);
    enter(own);
    reset(0);
    OK(galloc_pool_trim(pool, 0, NULL));
    pool_end(pool);
    finish();
}

/* The pool's own context fails. Events of a healthy context are destroyed all the same when their stream is retired, or
   when the pool ends. */
TEST(events_of_other_contexts_do_not_stay_when_the_pools_fails)
{
    static const char *const settings[] = {"", "expandable_segments:False", "backend:cudaMalloc", "like:pytorch"};
    for (int i = 0; i < 16; i++) {
        int place = i % 2, ends = i / 2 % 2;
        begin_devices(2, SIM_PACE_STILL);
        CUcontext own = primary(0), other = context_at(place);
        enter(own);
        galloc_pool *pool = pool_of(settings[i / 4], 0);
        cudaStream_t s = stream_new(), t = stream_in(other);
        void *p = get(pool, MIB(1), s), *q = get(pool, MIB(1), s);
        enter(other);
        OK(galloc_free(p, t)); /* records an event */
        enter(own);
        OK(galloc_free(q, s));
        sim_context_fail(own, cudaErrorIllegalAddress);
        enter(other);
        OK(galloc_stream_retire(t));
        if (ends) (void)galloc_pool_destroy(pool);
        else (void)galloc_pool_trim(pool, 0, NULL);
        enter(own);
        reset(0);
        if (galloc_pool_check(pool) >= 0) pool_end(pool);
        enter(other);
        stream_end(t);
        enter(own);
        finish(); /* which finds what is left */
    }
}

/* The pinned memory of a wait stays behind when the driver does not take it back. It goes with its context, and holds
   up no wait in another one. */
TEST(a_wait_that_a_failed_context_left_behind_is_over)
{
    for (int place = 0; place < PLACES; place++) {
        begin_devices(2, SIM_PACE_STILL);
        CUcontext own = primary(0), other = context_at(place);
        enter(own);
        galloc_pool *pool = pool_of("", 0);
        cudaStream_t s = stream_new(), t = stream_in(other);
        void *p = get(pool, MIB(6), s);
        pairs(pool, KIB(64), t, 1);
        sim_fail("cuMemFreeHost", 2, 1, cudaErrorUnknown); /* the second one is in the other context */
        EXPECT_EQ(galloc_pool_trim(pool, 0, NULL), cudaErrorUnknown);
        sim_fail_clear();
        sim_context_fail(other, cudaErrorIllegalAddress);
        put(s, p, MIB(6), 1);
        OK(galloc_free(p, s));
        EXPECT_EQ(galloc_pool_trim(pool, 0, NULL), cudaErrorIllegalAddress);
        EXPECT_EQ(stats_of(pool).reserved.current, MIB(2)); /* what was freed in the other context */
        end_context(other, place);
        OK(galloc_pool_trim(pool, 0, NULL));
        EXPECT_EQ(stats_of(pool).reserved.current, 0);
        pool_end(pool);
        finish();
    }
}

/* A pool whose context has failed refuses on a stream of another one, too, whatever the driver tells of contexts. */
TEST(a_broken_pool_refuses_where_the_driver_does_not_tell_contexts)
{
    for (int nth = 1; nth < 5; nth++) {
        begin_devices(1, SIM_PACE_STILL);
        galloc_pool *pool = pool_of("", 0);
        CUcontext other = context_new(0), own = current();
        cudaStream_t s = stream_new(), t = stream_in(other);
        OK(galloc_free(get(pool, MIB(1), t), t));
        void *p = get(pool, MIB(4), s), *q = get(pool, MIB(4), s), *r = NULL;
        OK(galloc_free(p, s)); /* there is memory for more */
        sim_fail("cuMemCreate", 1, 0, cudaErrorIllegalAddress);
        EXPECT_EQ(galloc_pool_malloc(pool, &r, MIB(40), s), cudaErrorIllegalAddress);
        enter(other);
        sim_fail("cuCtxGetId", nth, 1, cudaErrorUnknown);
        EXPECT(galloc_pool_malloc(pool, &r, MIB(1), t) != cudaSuccess);
        EXPECT(r == NULL);
        sim_fail_clear();
        enter(own);
        OK(cudaDeviceReset());
        (void)cudaGetLastError();
        OK(cudaSetDevice(0));
        OK(galloc_free(q, NULL));
        pool_end(pool);
        OK(cuCtxDestroy(other));
        finish();
    }
}

/* ---- contexts that end ------------------------------------------------------------------------------------------- */

/* What was queued in a context is over when it ends; its events are gone, and nobody asks for them. */
TEST(a_context_that_is_destroyed_leaves_its_memory)
{
    for (size_t kind = 0; kind < COUNT(all_pools); kind++) {
        for (int retire = 0; retire < 2; retire++) {
            begin_devices(1, SIM_PACE_STILL);
            CUcontext own = primary(0), other = context_new(0);
            galloc_config config = config_of(all_pools[kind], 0);
            config.memory_limit = config.like ? MIB(44) : MIB(24); /* PyTorch has a segment for each stream */
            galloc_pool *pool = pool_new(&config);
            cudaStream_t s = stream_new(), t = stream_in(other);
            void *p = get(pool, MIB(4), t), *q = get(pool, MIB(4), t), *r = get(pool, MIB(4), s);
            enter(other);
            put(t, p, MIB(4), 1);
            put(t, q, MIB(4), 1);
            OK(galloc_free(p, t));
            OK(galloc_record_stream(r, t));
            if (retire) OK(galloc_stream_retire(t));
            enter(own);
            OK(cuCtxDestroy(other));
            OK(galloc_free(q, s));
            OK(galloc_free(r, s));
            EXPECT_EQ(galloc_pool_check(pool), 0);
            void *all = get(pool, MIB(24), s);
            put(s, all, MIB(24), 2);
            OK(galloc_free(all, s));
            pool_end(pool);
            finish();
        }
    }
}

static CUcontext green_new(int device)
{
    CUcontext context = NULL;
    OK(sim_green_create(&context, device));
    return context;
}

/* A green context does not take its work along when it is destroyed. Nobody gets the memory before a wait that covers
   the device: neither by polling, nor on a stream of a context that has come to the same address. */
TEST(the_work_of_a_green_context_goes_on_after_its_end)
{
    for (size_t kind = 0; kind < COUNT(all_pools); kind++) {
        for (int how = 0; how < 8; how++) {
            int retire = how & 1, comes_back = how & 2, legacy = how & 4;
            begin_devices(1, SIM_PACE_STILL);
            CUcontext own = primary(0), green = green_new(0);
            galloc_config config = config_of(all_pools[kind], 0);
            config.memory_limit = config.like ? MIB(44) : MIB(24);
            galloc_pool *pool = pool_new(&config);
            cudaStream_t s = stream_new(), t = legacy ? cudaStreamLegacy : stream_in(green);
            enter(green);
            void *p = get(pool, MIB(4), t), *q = get(pool, MIB(4), t), *r = get(pool, MIB(4), t);
            put(t, p, MIB(4), 1);
            put(t, q, MIB(4), 1);
            put(t, r, MIB(4), 1);
            OK(galloc_free(p, t));
            if (!legacy) OK(galloc_record_stream(r, t));
            if (retire) OK(galloc_free(q, t));
            if (retire && legacy) OK(galloc_free(r, t));
            if (retire) OK(galloc_stream_retire(t));
            enter(own);
            OK(sim_green_destroy(green));
            if (comes_back) {
                green = green_new(0);
                enter(green);
                t = stream_in(green);
            }
            for (int i = 0; i < 2; i++) { /* on the new stream, or the primary context's */
                cudaStream_t u = comes_back ? i ? t : cudaStreamLegacy : s;
                void *one = get(pool, MIB(4), u);
                put(u, one, MIB(4), 2);
                OK(galloc_free(one, u));
            }
            enter(own);
            EXPECT_EQ(galloc_pool_check(pool), 0);
            if (!retire) OK(cudaDeviceSynchronize()); /* what is freed on s now is not used any more */
            if (!retire) OK(galloc_free(q, s));
            if (!retire || !legacy) OK(galloc_free(r, s));
            void *all = get(pool, MIB(24), s);
            put(s, all, MIB(24), 3);
            OK(galloc_free(all, s));
            OK(galloc_pool_trim(pool, 0, NULL));
            EXPECT_EQ(sim_physical(0), 0);
            pool_end(pool);
            if (comes_back) OK(sim_green_destroy(green));
            finish();
        }
    }
}

/* The wait for all devices fails, and the wait for the context at the address of the one that has ended succeeds: this
   says nothing about the work of that one. */
TEST(a_wait_for_a_context_says_nothing_of_the_one_before_it_at_its_address)
{
    begin_devices(1, SIM_PACE_STILL);
    CUcontext own = primary(0), ended = green_new(0);
    galloc_pool *pool = pool_of("memory_limit:24M,lane_bytes:0", 0);
    cudaStream_t s = stream_new(), t = stream_in(ended);
    void *live = get(pool, MIB(2), s), *all = NULL;
    enter(ended);
    OK(galloc_free(get_used(pool, MIB(12), t, 1), t));
    enter(own);
    OK(sim_green_destroy(ended));
    CUcontext other = green_new(0);
    EXPECT(other == ended);
    cudaStream_t u = stream_in(other);
    enter(other);
    OK(galloc_free(get_used(pool, MIB(1), u, 1), u));
    enter(own);
    sim_fail("cuMemHostAlloc", 1, 0, CUDA_ERROR_OUT_OF_MEMORY);
    EXPECT_EQ(galloc_pool_malloc(pool, &all, MIB(20), s), cudaErrorMemoryAllocation);
    sim_fail_clear();
    if (!all) all = get(pool, MIB(20), s); /* this wait succeeds */
    put(s, all, MIB(20), 2);
    OK(galloc_free(all, s));
    OK(galloc_free(live, s));
    pool_end(pool);
    OK(sim_green_destroy(other));
    finish();
}

/* Nor does it take the launches of graphs along that were captured there: their memory is theirs until the graph and
   its launches are gone. */
TEST(a_launch_goes_on_after_the_end_of_its_green_context)
{
    begin_devices(1, SIM_PACE_STILL);
    CUcontext own = primary(0), green = green_new(0);
    galloc_pool *pool = pool_of("", 0);
    cudaStream_t s = stream_new(), t = stream_in(green);
    cudaGraph_t graph = NULL;
    cudaGraphExec_t instance = NULL;
    enter(green);
    OK(cudaStreamBeginCapture(t, cudaStreamCaptureModeRelaxed));
    void *p = get(pool, MIB(4), t);
    put(t, p, MIB(4), 1);
    OK(galloc_free(p, t));
    OK(cudaStreamEndCapture(t, &graph));
    OK(cudaGraphInstantiate(&instance, graph, 0));
    OK(cudaGraphLaunch(instance, t));
    enter(own);
    OK(sim_green_destroy(green));
    for (int i = 0; i < 3; i++) {
        void *q = get(pool, MIB(4) << i, s);
        EXPECT(q != p);
        put(s, q, MIB(4) << i, 2);
        OK(galloc_free(q, s));
    }
    EXPECT(stats_of(pool).graph_bytes >= MIB(4));
    OK(cudaGraphExecDestroy(instance));
    OK(cudaGraphDestroy(graph));
    OK(cudaDeviceSynchronize());
    OK(galloc_pool_trim(pool, 0, NULL));
    EXPECT_EQ(sim_physical(0), 0);
    pool_end(pool);
    finish();
}

/* Work in another context goes on when the primary one is reset: pages that it uses are not given to anybody else. */
/* A page has moved behind work of a context that has failed since. Nobody says when that work is over, so the page
   stays, and its old range with it, though the stream that waited for the work is done with the page. */
TEST(a_page_that_a_failed_context_used_is_not_given_back)
{
    enum { PAGE = 2 << 20 };
    begin_devices(1, SIM_PACE_STILL);
    CUcontext own = primary(0), other = context_new(0);
    enter(own);
    galloc_pool *pool = pool_of("memory_limit:8M,overhead:0,growth:2M", 0);
    cudaStream_t s = stream_new(), t = stream_in(other);
    void *p[2], *wall[2];
    for (int i = 0; i < 2; i++) {
        p[i] = get(pool, PAGE, t);
        wall[i] = get(pool, PAGE, s);
    }
    enter(other);
    for (int i = 0; i < 2; i++) put(t, p[i], PAGE, 1);
    enter(own);
    for (int i = 0; i < 2; i++) OK(galloc_free(p[i], t));
    void *q = get_used(pool, 2 * PAGE, s, 2);
    EXPECT_EQ(stats_of(pool).moves, 2);
    OK(galloc_free(q, s));
    sim_run(-1);
    sim_context_fail(other, cudaErrorIllegalAddress);
    (void)galloc_pool_trim(pool, 0, NULL);
    EXPECT_EQ(stats_of(pool).reserved.current, 4 * PAGE);
    EXPECT_EQ(sim_physical(0), 4 * PAGE);
    end_context(other, BESIDE);
    OK(galloc_pool_trim(pool, 0, NULL));
    EXPECT_EQ(stats_of(pool).reserved.current, 2 * PAGE);
    for (int i = 0; i < 2; i++) OK(galloc_free(wall[i], s));
    pool_end(pool);
    finish();
}

/* The context of a stream ends while a pool ends that has events there: they went with it. */
static int reset_in_time;

static void reset_the_other(const char *function)
{
    if (!reset_in_time || strcmp(function, "cuMemAddressFree")) return;
    reset_in_time = 0;
    reset(1);
    (void)primary(0);
}

TEST(a_context_may_end_while_a_pool_ends_that_has_events_there)
{
    begin_devices(2, SIM_PACE_PROMPT);
    CUcontext own = primary(0), other = primary(1);
    enter(own);
    galloc_pool *pool = pool_of("", 0);
    cudaStream_t s = stream_new(), t = stream_in(other);
    pairs(pool, 512, s, 1);
    pairs(pool, MIB(4), t, 2);
    EXPECT(sim_calls("cuEventRecord") > 0);
    reset_in_time = 1;
    sim_hook(reset_the_other, NULL);
    pool_end(pool);
    sim_hook(NULL, NULL);
    EXPECT(!reset_in_time);
    finish();
}

TEST(a_reset_does_not_end_the_work_of_other_contexts)
{
    begin_devices(1, SIM_PACE_STILL);
    CUcontext other = context_new(0);
    galloc_pool *pool = pool_of("memory_limit:4M", 0);
    cudaStream_t t = stream_in(other);
    void *p = get(pool, MIB(4), t);
    enter(other);
    put(t, p, MIB(4), 1);
    OK(galloc_free(p, t));
    reset(0);
    cudaStream_t s = stream_new();
    EXPECT_EQ(sim_stream_done(t), 0);
    p = get(pool, MIB(4), s);
    put(s, p, MIB(4), 2);
    OK(galloc_free(p, s));
    enter(other);
    stream_end(t);
    pool_end(pool);
    finish();
}

/* The thread's context is still the one that the reset has ended. */
TEST(the_current_device_is_found_right_after_its_reset)
{
    for (int used = 0; used < 2; used++) {
        begin_devices(2, SIM_PACE_RANDOM);
        (void)primary(1);
        galloc_pool *pool = NULL, *of_device = NULL, *own = NULL;
        galloc_config config;
        if (used) OK(galloc_pool_default(&pool, -1));
        if (used) pairs(pool, MIB(1), stream_new(), 1);
        OK(cudaDeviceReset());
        OK(galloc_pool_create(&own, NULL));
        OK(cudaDeviceReset());
        OK(galloc_pool_default(&pool, -1));
        OK(galloc_pool_default(&of_device, 1));
        EXPECT(pool == of_device);
        OK(galloc_pool_config(own, &config));
        EXPECT_EQ(config.device, 1);
        pairs(own, MIB(1), 0, 1);
        pool_end(own);
        finish();
    }
}

/* A pool waits for the launches of graphs that are gone wherever those run. */
TEST(launches_in_another_context_are_waited_for)
{
    for (int place = 0; place < PLACES; place++) {
        begin_devices(2, SIM_PACE_STILL);
        CUcontext own = primary(0), other = context_new(place == BESIDE ? 0 : 1);
        galloc_pool *pool = pool_of("", 0);
        cudaStream_t t = stream_in(other);
        cudaGraph_t graph = NULL;
        cudaGraphExec_t instance = NULL;
        enter(other);
        OK(cudaStreamBeginCapture(t, cudaStreamCaptureModeRelaxed));
        void *p = get(pool, MIB(2), t);
        if (place == BESIDE) put(t, p, MIB(2), 1);
        else OK(sim_launch(t, NULL, 0));
        OK(galloc_free(p, t));
        OK(cudaStreamEndCapture(t, &graph));
        OK(cudaGraphInstantiate(&instance, graph, 0));
        OK(cudaGraphLaunch(instance, t));
        OK(cudaGraphExecDestroy(instance));
        OK(cudaGraphDestroy(graph));
        enter(own);
        pool_end(pool);
        EXPECT_EQ(sim_stream_done(t), 1);
        finish();
    }
}

/* The same with two contexts, and with one that has ended: the others are waited for all the same. */
TEST(launches_in_each_of_several_contexts_are_waited_for)
{
    for (int ended = 0; ended < 3; ended++) { /* 2: none of them, and both streams are of one */
        begin_devices(1, SIM_PACE_STILL);
        CUcontext own = primary(0), other[2];
        other[0] = context_new(0);
        other[1] = ended == 2 ? other[0] : context_new(0);
        galloc_pool *pool = pool_of("", 0);
        cudaStream_t t[2];
        for (int i = 0; i < 2; i++) {
            cudaGraph_t graph = NULL;
            cudaGraphExec_t instance = NULL;
            t[i] = stream_in(other[i]);
            enter(other[i]);
            OK(cudaStreamBeginCapture(t[i], cudaStreamCaptureModeRelaxed));
            void *p = get_used(pool, MIB(2), t[i], 1);
            OK(galloc_free(p, t[i]));
            OK(cudaStreamEndCapture(t[i], &graph));
            OK(cudaGraphInstantiate(&instance, graph, 0));
            OK(cudaGraphLaunch(instance, t[i]));
            if (ended == 1 && i) OK(cudaStreamSynchronize(t[i]));
            OK(cudaGraphExecDestroy(instance));
            OK(cudaGraphDestroy(graph));
        }
        enter(own);
        if (ended == 1) OK(cuCtxDestroy(other[1]));
        long waits = sim_calls("cuMemHostAlloc");
        OK(galloc_pool_trim(pool, 0, NULL));
        if (ended == 2) EXPECT_EQ(sim_calls("cuMemHostAlloc") - waits, 2); /* one of its own context */
        EXPECT_EQ(stats_of(pool).reserved.current, 0);
        EXPECT_EQ(sim_stream_done(t[0]), 1);
        if (ended != 1) EXPECT_EQ(sim_stream_done(t[1]), 1);
        pool_end(pool);
        finish();
    }
}

/* A captured stream brings a context that the host has no memory to note: the request is refused. */
TEST(a_captured_stream_of_a_context_that_cannot_be_noted_is_refused)
{
    cudaError_t error = cudaErrorMemoryAllocation;
    for (int nth = 1; error && EXPECT(nth < 100); nth++) {
        begin_devices(1, SIM_PACE_STILL);
        CUcontext own = primary(0), other = context_new(0);
        galloc_pool *pool = pool_of("", 0);
        OK(galloc_pool_reserve(pool, MIB(4)));
        cudaStream_t t = stream_in(other);
        cudaGraph_t graph = NULL;
        void *p = NULL;
        enter(other);
        OK(cudaStreamBeginCapture(t, cudaStreamCaptureModeRelaxed));
        sim_fail_malloc(nth, 0);
        error = galloc_pool_malloc(pool, &p, MIB(2), t);
        EXPECT_EQ(error != cudaSuccess, sim_failed_mallocs() > 0);
        sim_fail_malloc(0, 0);
        OK(galloc_free(p, t));
        OK(cudaStreamEndCapture(t, &graph));
        OK(cudaGraphDestroy(graph));
        enter(own);
        pool_end(pool);
        finish();
    }
}

/* ---- the driver's pool ------------------------------------------------------------------------------------------- */

/* Blocks of cudaMallocAsync may be had and freed on streams of any context, and the pool outlives each of them. */
TEST(memory_of_the_driver_is_had_on_streams_of_other_contexts)
{
    for (int place = 0; place < PLACES; place++) {
        begin_devices(2, SIM_PACE_RANDOM);
        CUcontext own = primary(0), other = context_new(place == BESIDE ? 0 : 1);
        galloc_pool *pool = pool_of("backend:cudaMallocAsync", 0);
        cudaStream_t s = stream_in(own), t = stream_in(other);
        for (int i = 0; i < 8; i++) {
            cudaStream_t first = i & 1 ? s : t, last = i & 2 ? s : t;
            void *p = get(pool, MIB(1), first);
            if (i & 4) OK(galloc_record_stream(p, first));
            OK(galloc_free(p, last));
            EXPECT_EQ(galloc_pool_check(pool), 0);
        }
        OK(galloc_pool_trim(pool, 0, NULL));
        EXPECT_EQ(stats_of(pool).reserved.current, 0);
        void *p = get(pool, MIB(1), t);
        enter(own);
        OK(galloc_stream_retire(t));
        OK(cuCtxDestroy(other));
        OK(galloc_free(p, s));
        EXPECT_EQ(galloc_pool_check(pool), 0);
        pairs(pool, MIB(1), s, 2);
        pool_end(pool);
        finish();
    }
}

/* A free from another context that cannot enter the stream's leaves the current one as it is, and the memory goes back
   later, if not at once. */
TEST(a_free_that_cannot_enter_the_streams_context_leaves_the_current_one)
{
    static const char *const calls[] = {"cuCtxPushCurrent", "cuThreadExchangeStreamCaptureMode"};
    for (int nth = 1, fired = 3; fired; nth++) {
        fired = 0;
        for (int i = 0; i < 2; i++) {
            begin_devices(2, SIM_PACE_STILL);
            CUcontext far = primary(1), own = primary(0);
            cudaStream_t s = stream_new();
            galloc_pool *pool = pool_of("backend:cudaMallocAsync", 0);
            void *p = get_used(pool, MIB(4), s, 1);
            enter(far);
            sim_fail(calls[i], nth, 0, cudaErrorUnknown);
            cudaError_t error = galloc_free(p, s);
            fired |= (sim_failed() > 0) << i;
            sim_fail_clear();
            EXPECT(current() == far);
            if (error) OK(galloc_free(p, s));
            EXPECT(current() == far);
            enter(own);
            OK(galloc_pool_trim(pool, 0, NULL));
            EXPECT_EQ(stats_of(pool).reserved.current, 0);
            pool_end(pool);
            stream_end(s);
            finish();
        }
    }
}

/* ---- memory that went with its context --------------------------------------------------------------------------- */

static const char *const fixed_pools[] = {"expandable_segments:False", "like:pytorch",
                                          "expandable_segments:False,strategy:pooled",
                                          "expandable_segments:False,stats:exact",
                                          "expandable_segments:False,stream_check:off"};

/* cudaMalloc memory goes with the primary context of its device. A stream of another context, which lives on, does not
   get what a cache or the pool has of it. */
TEST(a_stream_of_another_context_gets_no_memory_that_is_gone)
{
    for (size_t kind = 0; kind < COUNT(fixed_pools); kind++) {
        for (int place = 0; place < PLACES; place++) {
            for (int room = 0; room < 2; room++) {
                begin_devices(2, SIM_PACE_RANDOM);
                galloc_pool *pool = pool_of(fixed_pools[kind], 0);
                CUcontext other = context_at(place);
                cudaStream_t t = stream_in(other);
                pairs(pool, MIB(1), t, 3);
                reset(0);
                EXPECT_EQ(sim_physical(0), 0);
                galloc_request request = {.bytes = MIB(1), .stream = t, .pool = pool, .max_bytes = room ? MIB(2) : 0};
                void *p = NULL;
                OK(galloc_alloc(&p, &request));
                EXPECT(sim_physical(0) >= MIB(2)); /* it is there */
                enter(other);
                OK(galloc_free(p, t));
                pairs(pool, MIB(1), t, 3);
                stream_end(t);
                pool_end(pool);
                finish();
            }
        }
    }
}

static const char *const losing_pools[] = {"expandable_segments:False", "like:pytorch", "backend:cudaMalloc",
                                           "backend:cudaMallocAsync"};
static const char *const gaining_pools[] = {"expandable_segments:False", "like:pytorch", "backend:cudaMalloc",
                                            "backend:cudaMallocAsync", "expandable_segments:True"};

static void expect_pool_of(galloc_pool *pool, const char *ptr, size_t bytes)
{
    for (size_t at = 0; at < bytes; at += KIB(16)) {
        galloc_pointer info = info_of(ptr + at);
        EXPECT(info.pool == pool && info.base == ptr && info.requested == bytes && info.state == GALLOC_STATE_USED);
    }
}

/* After a reset the addresses of cudaMalloc memory are given out anew, perhaps to another pool, before the pool that
   had them has noticed. They are the new owner's, whatever the old one still has in use or free there. */
enum { LOST = 5 };

static void addresses_change_hands(const char *loser, const char *gainer, int used, int device)
{
    begin_devices(2, SIM_PACE_RANDOM);
    galloc_pool *b = pool_of(gainer, device), *a = pool_of(loser, 0);
    cudaStream_t s = stream_new();
    void *lost[LOST];
    for (int i = 0; i < LOST; i++) lost[i] = get(a, i + 1 < LOST ? KIB(64) : MIB(12), s);
    for (int i = LOST; i-- > used;) OK(galloc_free(lost[i], s));
    reset(0);
    (void)primary(device);
    s = stream_new();
    char *q = get(b, MIB(1), s);
    put(s, q, MIB(1), 1);
    if (q == lost[0] && !used && !strstr(loser, "backend")) EXPECT_EQ(stats_of(a).reserved.current, 0);
    EXPECT_EQ(galloc_pool_check(b), 0);
    expect_pool_of(b, q, MIB(1));
    for (int i = 0; i < used; i++) /* an address that is another block's by now is no longer the program's to free */
        if ((char *)lost[i] != q) (void)galloc_free(lost[i], s);
    EXPECT_EQ(galloc_pool_check(a), 0);
    EXPECT_EQ(galloc_pool_check(b), 0);
    expect_pool_of(b, q, MIB(1));
    look(s, q, MIB(1), 1);
    OK(galloc_free(q, s));
    EXPECT_EQ(stats_of(a).blocks.current, 0);
    EXPECT_EQ(stats_of(a).live.current, 0);
    EXPECT_EQ(stats_of(a).mallocs, LOST);
    EXPECT_EQ(stats_of(a).frees, LOST); /* those whose addresses came back too */
    OK(galloc_pool_trim(a, 0, NULL));
    expect_healthy(a, 0);
    EXPECT_EQ(stats_of(a).reserved.current, 0);
    EXPECT_EQ(stats_of(a).free_bytes, 0);
    for (int i = 0; i < GALLOC_PAGE_SIZES; i++) EXPECT_EQ(stats_of(a).pages[i].count, 0);
    pool_end(a);
    pool_end(b);
    finish();
}

TEST(addresses_that_come_back_are_their_new_owners)
{
    for (size_t loser = 0; loser < COUNT(losing_pools); loser++)
        for (size_t gainer = 0; gainer < COUNT(gaining_pools); gainer++)
            for (int used = 0; used < LOST; used += 2)
                for (int device = 0; device < 2; device++) {
                    long before = test_failures;
                    addresses_change_hands(losing_pools[loser], gaining_pools[gainer], used, device);
                    if (test_failures != before)
                        printf("    from %s to %s, %d used, device %d\n", losing_pools[loser], gaining_pools[gainer],
                               used, device);
                }
}

/* A reserved range may lie there, too, if no larger one can be had than the memory that was lost. */
TEST(addresses_that_come_back_may_be_reserved)
{
    for (int used = 0; used < 2; used++) {
        begin_devices(1, SIM_PACE_RANDOM);
        galloc_pool *a = pool_of("expandable_segments:False", 0), *b = pool_of("", 0);
        cudaStream_t s = stream_new();
        char *lost = get(a, MIB(12), s);
        if (!used) OK(galloc_free(lost, s));
        reset(0);
        s = stream_new();
        for (int i = 1; i <= 6; i++) sim_fail("cuMemAddressReserve", i, 0, 0);
        char *p = get(b, MIB(10), s), *q = get(b, MIB(1), s);
        sim_fail_clear();
        EXPECT(p == lost);
        put(s, p, MIB(10), 1);
        put(s, q, MIB(1), 2);
        EXPECT_EQ(stats_of(a).reserved.current, 0);
        EXPECT_EQ(stats_of(a).blocks.current, 0);
        expect_pool_of(b, p, MIB(10));
        OK(galloc_free(p, s));
        OK(galloc_free(q, s));
        pool_end(a);
        pool_end(b);
        finish();
    }
}

/* A block whose address comes back counts as freed on the streams of galloc_record_stream, too. */
TEST(recorded_streams_of_an_address_that_comes_back_are_forgotten)
{
    begin_devices(1, SIM_PACE_RANDOM);
    galloc_pool *a = pool_of("expandable_segments:False", 0), *b = pool_of("expandable_segments:False", 0);
    cudaStream_t s = stream_new(), t = stream_new();
    unsigned long long id = stream_id(t);
    char *lost = get(a, MIB(12), s);
    OK(galloc_record_stream(lost, t));
    OK(galloc_stream_retire(t));
    EXPECT(inside_stream_of(a, id).known);
    reset(0);
    s = stream_new();
    char *p = get(b, MIB(12), s);
    EXPECT(p == lost);
    OK(galloc_pool_trim(a, 0, NULL));
    EXPECT(!inside_stream_of(a, id).known);
    OK(galloc_free(p, s));
    pool_end(a);
    pool_end(b);
    finish();
}

/* ---- a context that does not say whether it lives ---------------------------------------------------------------- */

/* Only a context that says so lives: events of one that was reset are not touched, whatever error the driver gives
   when it is asked for its id. */
TEST(nothing_is_asked_of_a_context_that_does_not_answer)
{
    for (int fixed = 0; fixed < 2; fixed++) {
        for (int nth = 1; nth < 36; nth++) {
            begin_devices(2, SIM_PACE_STILL);
            galloc_pool *pool = pool_of(fixed ? "expandable_segments:False,memory_limit:24M" : "memory_limit:24M", 1);
            (void)primary(0);
            cudaStream_t s = stream_new(), t = stream_new();
            void *p = get(pool, MIB(4), s), *q = get(pool, MIB(4), t);
            OK(galloc_free(p, s));
            OK(galloc_free(q, t));
            if (nth % 2) sim_run(-1);
            if (nth % 2) OK(galloc_pool_trim(pool, SIZE_MAX, NULL)); /* its events are seen to be complete */
            reset(0);
            (void)primary(1);
            cudaStream_t u = stream_new();
            for (int on = nth % 3 == 0 ? 2 : 0; on < 2; on++) { /* or its end is the pool's first call */
                sim_fail("cuCtxGetId", nth, on, 999);
                void *r = NULL;
                (void)galloc_pool_malloc(pool, &r, MIB(20), u);
                (void)galloc_pool_trim(pool, 0, NULL);
                sim_fail_clear();
                EXPECT_EQ(galloc_pool_check(pool), 0);
                if (r) OK(galloc_free(r, u));
            }
            if (nth % 3) pairs(pool, MIB(20), u, 1);
            sim_fail("cuCtxGetId", nth, 1, 999);
            cudaError_t error = galloc_pool_destroy(pool);
            sim_fail_clear();
            if (error) pool_end(pool);
            finish();
        }
    }
}

/* Nor when a stream is forgotten of which nothing is left but events: they may be gone. */
TEST(events_of_a_context_that_does_not_answer_are_left_alone)
{
    for (int nth = 1; nth < 12; nth++) {
        begin_devices(1, SIM_PACE_STILL);
        CUcontext own = primary(0), other = context_new(0);
        galloc_pool *pool = pool_of("", 0);
        cudaStream_t s = stream_in(own), t = stream_in(other);
        void *p = get(pool, MIB(4), t), *q = get(pool, MIB(4), t);
        pairs(pool, 512, s, 1);
        OK(galloc_free(p, t));
        OK(galloc_stream_retire(t));
        sim_run(-1);
        OK(galloc_pool_trim(pool, SIZE_MAX, NULL)); /* its event is seen to be complete */
        OK(galloc_free(q, s));
        OK(cuCtxDestroy(other));
        sim_fail("cuCtxGetId", nth, 1, 999);
        (void)galloc_pool_trim(pool, 0, NULL);
        sim_fail_clear();
        EXPECT_EQ(galloc_pool_check(pool), 0);
        pool_end(pool);
        finish();
    }
}

/* A graph's block that per-thread streams of two contexts used is freed by a node of the graph, so the graph may be
   launched again, and its memory comes back. */
TEST(the_driver_frees_a_graphs_block_after_a_per_thread_stream_of_another_context)
{
    begin_devices(1, SIM_PACE_STILL);
    CUcontext own = primary(0), other = context_new(0);
    cudaStream_t s = cudaStreamPerThread;
    cudaEvent_t fork = NULL, join = NULL;
    cudaGraph_t graph = NULL;
    cudaGraphExec_t instance = NULL;
    size_t before = sim_physical(0);
    OK(cudaEventCreate(&fork));
    galloc_pool *pool = pool_of("backend:cudaMallocAsync", 0);
    enter(other);
    OK(cudaEventCreate(&join));
    enter(own);
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    void *p = get_used(pool, MIB(1), s, 1);
    OK(cudaEventRecord(fork, s));
    enter(other);
    OK(cudaStreamWaitEvent(s, fork, 0));
    OK(galloc_record_stream(p, s));
    put(s, p, MIB(1), 2);
    OK(cudaEventRecord(join, s));
    enter(own);
    OK(galloc_free(p, s));
    OK(cudaStreamWaitEvent(s, join, 0));
    OK(cudaStreamEndCapture(s, &graph));
    OK(cudaGraphInstantiate(&instance, graph, 0));
    for (int i = 0; i < 2; i++) {
        OK(cudaGraphLaunch(instance, s));
        OK(cudaStreamSynchronize(s));
    }
    OK(cudaGraphExecDestroy(instance));
    OK(cudaGraphDestroy(graph));
    OK(cudaEventDestroy(fork));
    OK(cudaEventDestroy(join));
    pool_end(pool);
    EXPECT_EQ(sim_physical(0), before);
    finish();
}

/* A block that went with its context is not given to the driver, which may have given its address to the program. The
   block may be one that a graph has left. */
TEST(a_lost_block_of_the_drivers_is_not_freed_there)
{
    for (int of_graph = 0; of_graph < 2; of_graph++) {
        begin_devices(1, SIM_PACE_RANDOM);
        CUcontext other = context_new(0);
        galloc_pool *pool = pool_of("backend:cudaMallocAsync", 0);
        cudaStream_t t = stream_in(other);
        cudaGraph_t graph = NULL;
        if (of_graph) OK(cudaStreamBeginCapture(t, cudaStreamCaptureModeRelaxed));
        void *p = get(pool, MIB(4), t), *own = NULL;
        if (of_graph) OK(cudaStreamEndCapture(t, &graph));
        reset(0);
        OK(cudaMalloc(&own, MIB(4)));
        if (!of_graph) EXPECT(own == p);
        enter(other);
        OK(galloc_free(p, t));
        (void)primary(0);
        OK(cudaFree(own)); /* it is still the program's */
        enter(other);
        if (of_graph) OK(cudaGraphDestroy(graph));
        pairs(pool, MIB(4), t, 2);
        pool_end(pool);
        finish();
    }
}

/* Launches of a graph that is gone may still run there: a trim that cannot wait for them says so, and does not leave
   their memory as though there were none. */
TEST(a_trim_tells_that_a_context_with_launches_does_not_answer)
{
    int failed = 0;
    for (int nth = 1; nth <= 12; nth++) {
        begin_devices(1, SIM_PACE_STILL);
        CUcontext own = primary(0), other = context_new(0);
        galloc_pool *pool = pool_of("", 0);
        cudaStream_t s = stream_in(other), t = stream_in(other);
        cudaGraph_t graph = NULL;
        cudaGraphExec_t instance = NULL;
        enter(other);
        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
        void *p = get_used(pool, MIB(32), s, 1);
        OK(galloc_free(p, s));
        OK(cudaStreamEndCapture(s, &graph));
        OK(cudaGraphInstantiate(&instance, graph, 0));
        OK(cudaGraphLaunch(instance, t));
        OK(cudaGraphExecDestroy(instance));
        OK(cudaGraphDestroy(graph));
        enter(own);
        sim_fail("cuCtxGetId", nth, 0, 999);
        cudaError_t error = galloc_pool_trim(pool, 0, NULL);
        sim_fail_clear();
        failed += error != cudaSuccess;
        EXPECT(error || !stats_of(pool).reserved.current);
        OK(galloc_pool_trim(pool, 0, NULL));
        EXPECT_EQ(stats_of(pool).reserved.current, 0);
        pool_end(pool);
        finish();
    }
    EXPECT(failed > 0);
}

/* The end of a pool frees its pinned memory, or fails and leaves that to the next attempt. */
TEST(pinned_memory_is_not_lost_to_a_context_that_does_not_answer)
{
    int failed = 0;
    for (int nth = 1; nth <= 12; nth++) {
        begin_devices(1, SIM_PACE_PROMPT);
        galloc_pool *pool = pool_of("debug:guards", 0);
        pairs(pool, KIB(4), stream_new(), 1);
        EXPECT(sim_calls("cuMemHostAlloc") > 0);
        sim_fail("cuCtxGetId", nth, 0, 999);
        cudaError_t error = galloc_pool_destroy(pool);
        sim_fail_clear();
        failed += error != cudaSuccess;
        if (error) pool_end(pool);
        EXPECT_EQ(sim_calls("cuMemFreeHost"), sim_calls("cuMemHostAlloc"));
        finish();
    }
    EXPECT(failed > 0);
}

/* What a wait could not give back goes with its context. Its address is not the pool's to free afterwards. */
TEST(pinned_memory_of_a_context_that_was_reset_is_not_given_back)
{
    begin_devices(1, SIM_PACE_STILL);
    galloc_pool *pool = pool_of("memory_limit:2M", 0);
    for (int round = 0; round < 2; round++) { /* the second time with a context that is there */
        cudaStream_t s = stream_new();
        void *p = get(pool, MIB(1), s);
        put(s, p, MIB(1), 1);
        OK(galloc_free(p, s));
        sim_fail("cuMemFreeHost", 1, 0, 999);
        EXPECT_EQ(galloc_pool_trim(pool, 0, NULL), cudaErrorUnknown);
        sim_fail_clear();
        if (!round) reset(0);
        s = stream_new();
        long made = sim_calls("cuMemHostAlloc"), freed = sim_calls("cuMemFreeHost");
        p = get(pool, MIB(1), s);
        put(s, p, MIB(1), 1);
        OK(galloc_free(p, s));
        OK(galloc_pool_trim(pool, 0, NULL));
        made = sim_calls("cuMemHostAlloc") - made;
        EXPECT(made > 0);
        EXPECT_EQ(sim_calls("cuMemFreeHost") - freed, made + round);
    }
    pool_end(pool);
    finish();
}

/* Nor is that of another context, once that has ended: the address may be the program's. */
TEST(pinned_memory_of_another_context_ends_with_that)
{
    enum { N = 16 };
    for (int place = 0; place < PLACES; place++) {
        begin_devices(2, SIM_PACE_STILL);
        CUcontext own = primary(0), other = context_at(place);
        galloc_pool *pool = pool_of("", 0);
        cudaStream_t t = stream_in(other);
        void *mine[N];
        enter(own);
        OK(galloc_free(get(pool, MIB(4), stream_in(own)), t));
        sim_fail("cuMemFreeHost", 1, 0, 999);
        EXPECT_EQ(galloc_pool_trim(pool, 0, NULL), cudaErrorUnknown);
        sim_fail_clear();
        if (place == BESIDE) OK(cuCtxDestroy(other));
        else reset(1);
        enter(own);
        for (int i = 0; i < N; i++) OK(cudaMallocHost(&mine[i], 512));
        OK(galloc_free(get(pool, MIB(8), NULL), NULL));
        OK(galloc_pool_trim(pool, 0, NULL));
        for (int i = 0; i < N; i++) OK(cudaFreeHost(mine[i]));
        pool_end(pool);
        finish();
    }
}

/* The driver gives addresses out again to another pool: the old block counts no more, on any device. */
TEST(addresses_of_any_device_come_back_in_another_pool)
{
    for (int device = 0; device < 4; device++) {
        begin_devices(4, SIM_PACE_PROMPT);
        (void)primary(device);
        galloc_pool *old = pool_of("expandable_segments:False", device);
        galloc_pool *pool = pool_of("expandable_segments:False", device);
        void *lost = get(old, 4096, NULL);
        OK(cudaDeviceReset());
        (void)primary(device);
        void *p = get(pool, 4096, NULL);
        EXPECT(p == lost);
        EXPECT_EQ(stats_of(old).blocks.current, 0);
        EXPECT(info_of(p).pool == pool);
        EXPECT_EQ(galloc_pool_check(old), 0);
        OK(galloc_free(p, NULL));
        pool_end(pool);
        pool_end(old);
        finish();
    }
}

/* Makes the primary context of a device current, or another one of the device after those, or none. */
static void enter_nth(int n)
{
    enter(NULL);
    if (n < UNLIKE) (void)primary(n);
    else if (n < 2 * UNLIKE) enter(context_new(n % UNLIKE));
}

/* A pool has the page size, the memory and the abilities of its own device, whichever context is current. */
TEST(a_pool_goes_by_its_device_in_any_context)
{
    for (int device = 0; device < UNLIKE; device++) {
        for (int now = 0; now <= 2 * UNLIKE; now++) {
            const sim_unlike *own = &unlike[device];
            begin_unlike(SIM_PACE_PROMPT);
            CUcontext home = primary(device);
            cudaStream_t s = stream_new();
            CUdeviceptr taken = 0;
            OK(cuMemAddressReserve(&taken, MIB(2), 0, 0, 0)); /* what follows it lies at no multiple of larger pages */
            galloc_config config = config_of("per_process_memory_fraction:0.5,gpu_direct_rdma:True", device);
            galloc_pool *pool = NULL, *before = pool_of("", (device + 1) % UNLIKE);
            galloc_report report;
            void *p, *q = NULL;
            enter_nth(now);
            CUcontext here = current();
            pool = pool_new(&config);
            OK(galloc_pool_config(pool, &config));
            EXPECT_EQ(config.device, device);
            EXPECT_EQ(config.expandable_segments, !own->no_vmm);
            EXPECT_EQ(config.gpu_direct_rdma, !own->no_vmm && !own->no_rdma);
            p = get(pool, 1, s);
            EXPECT_EQ(stats_of(pool).reserved.current, own->granularity);
            EXPECT_EQ(sim_physical(device), own->granularity);
            EXPECT_EQ(sim_rdma(device), config.gpu_direct_rdma ? own->granularity : 0);
            EXPECT_EQ(galloc_pool_malloc(pool, &q, own->memory / 2 + 1, s), cudaErrorMemoryAllocation);
            OK(galloc_oom_report(&report));
            EXPECT_EQ(report.device, device);
            EXPECT_EQ(report.device_total, own->memory);
            EXPECT_EQ(report.device_free, own->memory - own->granularity);
            EXPECT_EQ(report.limit, own->memory / 2);
            enter(home);
            put(s, p, 1, 1);
            enter(here);
            OK(galloc_free(p, s));
            pool_end(pool);
            config.backend = GALLOC_BACKEND_CUDA_MALLOC_ASYNC;
            cudaError_t error = galloc_pool_create(&pool, &config);
            EXPECT_EQ(error, own->no_pools ? cudaErrorNotSupported : cudaSuccess);
            if (!error) p = get(pool, MIB(2), s);
            if (!error) EXPECT_EQ(sim_physical(device), MIB(2));
            if (!error) OK(galloc_free(p, s));
            if (!error) pool_end(pool);
            if (here) EXPECT(current() == here);
            pool_end(before);
            OK(cuMemAddressFree(taken, MIB(2)));
            finish();
        }
    }
}

/* What a reset took of one device may come back as memory of another one, beside pools of all devices. */
TEST(addresses_of_a_device_come_back_on_another)
{
    enum { DEVICES = 4 };
    for (int way = 0; way < DEVICES * DEVICES; way++) {
        int from = way / DEVICES, to = way % DEVICES;
        begin_devices(DEVICES, SIM_PACE_PROMPT);
        galloc_pool *pool[DEVICES];
        for (int device = 0; device < DEVICES; device++) {
            (void)primary(device);
            pool[device] = pool_of("expandable_segments:False", device);
        }
        (void)primary(to);
        galloc_pool *gains = pool_of("expandable_segments:False", to);
        (void)primary(from);
        void *lost = get(pool[from], MIB(12), NULL);
        reset(from);
        (void)primary(to);
        void *p = get(gains, MIB(12), NULL);
        EXPECT(p == lost);
        EXPECT_EQ(stats_of(pool[from]).blocks.current, 0);
        EXPECT(info_of(p).pool == gains);
        EXPECT_EQ(info_of(p).device, to);
        put(NULL, p, MIB(12), 1);
        OK(galloc_free(p, NULL));
        pool_end(gains);
        for (int device = 0; device < DEVICES; device++) pool_end(pool[device]);
        finish();
    }
}

/* A pool is of a device, not of the context of the program's own that was current when it was made. */
TEST(a_pool_outlives_the_context_it_was_made_in)
{
    for (size_t i = 0; i < COUNT(all_pools); i++) {
        for (int device = 0; device < 2; device++) {
            begin_devices(2, SIM_PACE_STILL);
            CUcontext home = primary(device), own = context_new(device);
            cudaStream_t s = stream_new();
            enter(own);
            galloc_pool *pool = pool_of(all_pools[i], device);
            void *p = get(pool, MIB(4), s);
            enter(home);
            put(s, p, MIB(4), 1);
            OK(cuCtxDestroy(own));
            look(s, p, MIB(4), 1);
            pairs(pool, MIB(8), s, 2);
            OK(galloc_free(p, s));
            pool_end(pool);
            finish();
        }
    }
}

/* Pools of unlike devices, while now this context is current and now that, and devices are reset: each has the memory
   of its own device and no other. */
TEST(pools_of_unlike_devices_go_side_by_side)
{
    enum { BLOCKS = 12 };
    static const char *const kinds[] = {"expandable_segments:True", "expandable_segments:False", "like:pytorch",
                                        "backend:cudaMalloc", "strategy:pooled", "strategy:heuristic"};
    dice d = {test_seed()};
    for (size_t i = 0; i < COUNT(kinds); i++) {
        struct {
            galloc_pool *pool;
            cudaStream_t stream;
            void *block[BLOCKS];
            size_t bytes[BLOCKS];
        } of[UNLIKE];
        memset(of, 0, sizeof of);
        begin_unlike(SIM_PACE_RANDOM);
        for (int device = 0; device < UNLIKE; device++) {
            (void)primary(device);
            of[device].stream = stream_new();
        }
        for (int device = 0; device < UNLIKE; device++) of[device].pool = pool_of(kinds[i], device);
        for (int step = 0; step < 400; step++) {
            int device = (int)roll_below(&d, UNLIKE), k = (int)roll_below(&d, BLOCKS), n = 0;
            size_t bytes = roll_bytes(&d, MIB(6));
            (void)primary(device);
            if (of[device].block[k]) look(of[device].stream, of[device].block[k], of[device].bytes[k], (uint64_t)k);
            (void)primary((int)roll_below(&d, UNLIKE));
            if (!roll_below(&d, 9)) enter(NULL);
            if (of[device].block[k]) {
                OK(galloc_free(of[device].block[k], of[device].stream));
                of[device].block[k] = NULL;
                continue;
            }
            of[device].block[k] = get(of[device].pool, bytes, of[device].stream);
            of[device].bytes[k] = bytes;
            EXPECT_EQ(info_of(of[device].block[k]).device, device);
            EXPECT(stats_of(of[device].pool).reserved.current <= sim_physical(device));
            (void)primary(device);
            put(of[device].stream, of[device].block[k], bytes, (uint64_t)k);
            if (roll_below(&d, 40)) continue;
            for (n = 0; n < BLOCKS; n++) {
                if (of[device].block[n]) OK(galloc_free(of[device].block[n], of[device].stream));
                of[device].block[n] = NULL;
            }
            reset(device);
            of[device].stream = stream_new();
        }
        for (int device = 0; device < UNLIKE; device++) {
            for (int k = 0; k < BLOCKS; k++)
                if (of[device].block[k]) OK(galloc_free(of[device].block[k], of[device].stream));
            EXPECT_EQ(galloc_pool_check(of[device].pool), 0);
            pool_end(of[device].pool);
            EXPECT_EQ(sim_physical(device), 0);
        }
        finish();
    }
}

/* Under each strategy and each backend a default pool has its fraction of its own device, and cudaMalloc's pool too. */
TEST(fractions_are_of_the_pools_device)
{
    static const char *const kinds[] = {"strategy:caching", "strategy:pooled", "strategy:heuristic", "like:pytorch",
                                        "expandable_segments:False", "backend:cudaMalloc"};
    for (size_t i = 0; i < COUNT(kinds); i++) {
        char text[100];
        snprintf(text, sizeof text, "%s,per_process_memory_fraction:0.5", kinds[i]);
        begin_unlike(SIM_PACE_PROMPT);
        setenv("GALLOC_CONF", text, 1);
        for (int device = 0; device < UNLIKE; device++) {
            size_t memory = unlike[device].memory;
            cudaStream_t s = stream_in(primary(device));
            galloc_report report;
            void *p = NULL, *q = NULL;
            EXPECT_EQ(galloc_override_malloc(&p, memory * 5 / 8), cudaErrorMemoryAllocation);
            OK(galloc_override_malloc(&p, memory / 4));
            EXPECT_EQ(info_of(p).device, device);
            OK(galloc_override_free(p, NULL, GALLOC_OVERRIDE_DEVICE));
            (void)primary((device + 1) % UNLIKE);
            EXPECT_EQ(galloc_malloc(&q, memory * 5 / 8, s), cudaErrorMemoryAllocation);
            OK(galloc_oom_report(&report));
            EXPECT_EQ(report.device, device);
            EXPECT_EQ(report.limit, memory / 2);
            OK(galloc_malloc(&q, memory * 3 / 8, s));
            EXPECT_EQ(info_of(q).device, device);
            OK(galloc_free(q, s));
        }
        unsetenv("GALLOC_CONF");
        finish();
    }
}

/* A capture of one device's stream gets memory of the pool's device, also where other calls get it in stream order. */
TEST(a_capture_on_another_device_has_memory_of_the_pools)
{
    static const char *const kinds[] = {"expandable_segments:True", "expandable_segments:False", "backend:cudaMalloc",
                                        "backend:cudaMallocAsync"};
    for (size_t i = 0; i < COUNT(kinds); i++) {
        for (int device = 0; device < 2; device++) {
            begin_devices(2, SIM_PACE_STILL);
            cudaStream_t s = stream_in(primary(!device)), blocking = NULL;
            cudaGraph_t graph = NULL;
            OK(cudaStreamCreate(&blocking));
            galloc_pool *pool = pool_of(kinds[i], device);
            for (int way = 0; way < 2; way++) { /* 1: the legacy stream, beside the capture of a blocking one */
                OK(cudaStreamBeginCapture(way ? blocking : s, cudaStreamCaptureModeRelaxed));
                void *p = get(pool, MIB(4), way ? NULL : s);
                EXPECT_EQ(info_of(p).device, device);
                EXPECT(sim_physical(device) >= MIB(4));
                EXPECT_EQ(sim_physical(!device), 0);
                if (!way) OK(galloc_free(p, s));
                OK(cudaStreamEndCapture(way ? blocking : s, &graph));
                if (way) OK(galloc_free(p, NULL));
                OK(cudaGraphDestroy(graph));
            }
            OK(cudaStreamDestroy(blocking));
            pool_end(pool);
            finish();
        }
    }
}

/* A setting that suits the pages of one device does for one whose pages are larger. */
TEST(growth_is_a_page_of_the_device_at_least)
{
    for (int device = 0; device < 3; device++) {
        begin_unlike(SIM_PACE_PROMPT);
        galloc_pool *pool = pool_of("growth:2M", device);
        (void)primary(device);
        cudaStream_t s = stream_new();
        size_t page = unlike[device].granularity;
        void *p = get_used(pool, 1000, s, 1), *q = get_used(pool, 3 * page, s, 2);
        EXPECT_EQ(stats_of(pool).reserved.current, 4 * page);
        for (int i = 0; i < GALLOC_PAGE_SIZES; i++)
            EXPECT_EQ(stats_of(pool).pages[i].bytes, MIB(2) << i == page ? 4 * page : 0);
        OK(galloc_free(p, s));
        OK(galloc_free(q, s));
        pool_end(pool);
        finish();
    }
}

static void give_access(galloc_pool *pool, void *addr, size_t bytes, void *device)
{
    CUmemAccessDesc access = {.location = {CU_MEM_LOCATION_TYPE_DEVICE, *(const int *)device},
                              .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    (void)pool;
    OK(cuMemSetAccess((CUdeviceptr)(uintptr_t)addr, bytes, &access, 1));
}

/* Another device reaches what on_map gives it, also where pages move. They are made for RDMA if their device can. */
TEST(another_device_reaches_what_on_map_gives_it)
{
    enum { BLOCKS = 8 };
    dice d = {test_seed()};
    uint64_t moves = 0;
    for (int device = 0; device < 3; device++) {
        int peer = (device + 1) % 3;
        galloc_callbacks callbacks = {.on_map = give_access, .user = &peer};
        void *block[BLOCKS] = {NULL};
        begin_unlike(SIM_PACE_RANDOM);
        CUcontext at[2] = {primary(device), primary(peer)};
        cudaStream_t stream[2] = {stream_in(at[0]), stream_in(at[1])};
        galloc_pool *pool = pool_of("memory_limit:64M", device);
        OK(galloc_pool_set_callbacks(pool, &callbacks));
        for (int step = 0; step < 400; step++) {
            int k = (int)roll_below(&d, BLOCKS);
            cudaStream_t s = stream[k % 2];
            size_t bytes = roll_bytes(&d, MIB(30));
            if (block[k]) {
                OK(galloc_free(block[k], s));
                block[k] = NULL;
            } else if (!galloc_pool_malloc(pool, &block[k], bytes, s)) {
                enter(at[k % 2]);
                put(s, block[k], bytes, (uint64_t)k);
                enter(at[roll_below(&d, 2)]);
            }
            EXPECT_EQ(sim_rdma(device), unlike[device].no_rdma ? 0 : sim_physical(device));
        }
        for (int k = 0; k < BLOCKS; k++)
            if (block[k]) OK(galloc_free(block[k], stream[k % 2]));
        EXPECT_EQ(sim_physical(peer), 0);
        moves += stats_of(pool).moves;
        pool_end(pool);
        finish();
    }
    EXPECT(moves > 0);
}

/* A sticky error ends with the context that had it: the first request after the reset is served, and the next one. */
TEST(an_error_of_a_context_ends_with_a_reset)
{
    begin_devices(1, SIM_PACE_PROMPT);
    galloc_pool *pool = pool_of("", 0);
    void *keep = get(pool, 4096, NULL), *p = NULL;
    sim_fail("cuMemCreate", 1, 1, CUDA_ERROR_ILLEGAL_ADDRESS);
    EXPECT_EQ(galloc_pool_malloc(pool, &p, MIB(64), NULL), cudaErrorIllegalAddress);
    EXPECT_EQ(galloc_pool_malloc(pool, &p, MIB(64), NULL), cudaErrorIllegalAddress);
    sim_fail_clear();
    OK(cudaDeviceReset());
    (void)primary(0);
    for (int i = 0; i < 2; i++) OK(galloc_free(get(pool, MIB(64), NULL), NULL));
    OK(galloc_free(keep, NULL));
    pool_end(pool);
    finish();
}

static int resets_left;

static void reset_before_the_free(const char *function)
{
    if (!resets_left || strcmp(function, "cuMemFreeHost")) return;
    resets_left = 0;
    reset(0);
}

/* The context is reset while the pool ends: memory that the driver does not know any more is nothing to free. */
TEST(pinned_memory_of_a_context_that_is_reset_meanwhile_is_gone)
{
    begin_devices(1, SIM_PACE_PROMPT);
    galloc_pool *pool = pool_of("debug:guards", 0);
    EXPECT(sim_calls("cuMemHostAlloc") > 0);
    resets_left = 1;
    sim_hook(reset_before_the_free, NULL);
    cudaError_t error = galloc_pool_destroy(pool);
    sim_hook(NULL, NULL);
    EXPECT_EQ(resets_left, 0);
    EXPECT_EQ(error, cudaSuccess);
    finish();
}

/* What was freed before the reset of the pool's context has no events to come. */
TEST(nothing_is_unmarked_after_a_reset)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_config config = galloc_config_default();
    galloc_stream_stats streams[8];
    int n = 0;
    config.lane_bytes = 0;
    galloc_pool *pool = pool_new(&config);
    void *p = get_used(pool, MIB(1), s, 1), *q = get_used(pool, MIB(1), t, 2);
    unsigned long long id = stream_id(s);
    OK(galloc_free(p, s));
    OK(galloc_free(q, t));
    OK(cudaDeviceReset());
    OK(cudaSetDevice(0));
    OK(galloc_pool_trim(pool, SIZE_MAX, NULL));
    OK(galloc_pool_trim(pool, SIZE_MAX, NULL));
    OK(galloc_pool_streams(pool, streams, 8, &n));
    EXPECT(n > 0 && n <= 8);
    for (int i = 0; i < n; i++)
        if (streams[i].stream_id == id) EXPECT_EQ(streams[i].unmarked, 0);
    pool_end(pool);
    finish();
}

/* Nor is anything left to wait for: the work has ended with the context. */
TEST(memory_freed_before_a_reset_needs_no_wait)
{
    begin_still();
    galloc_config config = config_limit(MIB(4));
    config.wait_limit_ms = 0;
    config.lane_bytes = 0; /* no call confirms the frees in the cache of a stream that has ended */
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new();
    void *p = get_used(pool, MIB(4), s, 1);
    OK(galloc_free(p, s));
    OK(cudaDeviceReset());
    OK(cudaSetDevice(0));
    s = stream_new();
    p = get_used(pool, MIB(4), s, 2);
    OK(galloc_free(p, s));
    EXPECT_EQ(stats_of(pool).waits, 0);
    pool_end(pool);
    finish();
}

/* Free memory that may have gone with its context is given to nobody, on a stream of another context neither. */
TEST(nobody_gets_memory_of_a_context_that_may_have_ended)
{
    begin_devices(1, SIM_PACE_STILL);
    CUcontext own = current(), other = context_new(0);
    cudaStream_t t = stream_in(other);
    galloc_pool *pool = pool_of("expandable_segments:False", 0);
    enter(other);
    void *p = NULL;
    OK(galloc_free(get(pool, MIB(4), t), t));
    enter(own);
    reset(0);
    enter(other);
    sim_fail("cuCtxGetId", 1, 1, cudaErrorUnknown);
    cudaError_t error = galloc_pool_malloc(pool, &p, MIB(4), t);
    sim_fail_clear();
    if (error) p = get(pool, MIB(4), t);
    put(t, p, MIB(4), 1);
    OK(galloc_free(p, t));
    pool_end(pool);
    OK(cuCtxDestroy(other));
    finish();
}

/* A free of the driver's memory that may have gone with its context is none for the driver. */
TEST(the_driver_frees_nothing_where_it_does_not_tell_contexts)
{
    int failed = 1;
    for (int nth = 1; failed; nth++) {
        begin_devices(1, SIM_PACE_STILL);
        galloc_pool *pool = pool_of("backend:cudaMallocAsync", 0);
        CUcontext other = context_new(0);
        cudaStream_t t = stream_in(other);
        enter(other);
        void *p = get(pool, MIB(4), t);
        reset(0);
        enter(other);
        sim_fail("cuCtxGetId", nth, 0, cudaErrorUnknown);
        (void)galloc_free(p, t);
        failed = sim_failed() > 0;
        sim_fail_clear();
        EXPECT_EQ(sim_calls("cuMemFreeAsync"), 0);
        if (info_of(p).state == GALLOC_STATE_USED) OK(galloc_free(p, t));
        (void)primary(0);
        pool_end(pool);
        OK(cuCtxDestroy(other));
        finish();
    }
}

/* Another pool gets the addresses of memory that a reset took, whatever the driver tells of the first pool's context:
   that pool does not have them any more, and ends. */
TEST(lost_addresses_come_back_where_the_driver_does_not_tell_contexts)
{
    int failed = 1;
    for (int nth = 1; failed; nth++) {
        begin_devices(1, SIM_PACE_STILL);
        galloc_pool *first = pool_of("expandable_segments:False", 0), *second = pool_of("expandable_segments:False", 0);
        void *lost = get(first, MIB(12), stream_new()), *p = NULL;
        reset(0);
        cudaStream_t s = stream_new();
        sim_fail("cuCtxGetId", nth, 0, cudaErrorUnknown);
        cudaError_t error = galloc_pool_malloc(second, &p, MIB(12), s);
        failed = sim_failed() > 0;
        sim_fail_clear();
        if (error) p = get(second, MIB(12), s);
        EXPECT(p == lost);
        put(s, p, MIB(12), 1);
        OK(galloc_pool_trim(first, 0, NULL));
        EXPECT(info_of(p).pool == second);
        EXPECT_EQ(info_of(p).state, GALLOC_STATE_USED);
        OK(galloc_free(p, s));
        pool_end(first);
        pool_end(second);
        stream_end(s);
        finish();
    }
}

TEST_MAIN()
