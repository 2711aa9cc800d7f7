/* test_lifetimes.c - pools, groups of graphs and streams that end: what was said of them is not said any more, whoever
   else is at work; and what was given out for them is refused. Run it under AddressSanitizer and ThreadSanitizer as
   well. */

#include "setup.h"

static galloc_config limited(size_t limit) { return limit ? config_limit(limit) : galloc_config_default(); }

/* ---- streams that retire ----------------------------------------------------------------------------------------- */

/* The stream is used in two pools; the driver fails for the pool that comes second. */
static void retire_in_half(const char *function, int again)
{
    begin_still();
    galloc_config config = limited(MIB(4));
    galloc_pool *second = pool_new(NULL), *first = pool_new(&config);
    cudaStream_t s = stream_new(), t = stream_new();
    void *p = get(first, MIB(4), s), *q, *r;
    order(s, t);
    OK(galloc_record_stream(p, t));
    q = get(second, MIB(1), t);
    OK(galloc_free(q, t));
    sim_fail(function, 2, 0, 0);
    EXPECT(galloc_stream_retire(t) != cudaSuccess);
    EXPECT(galloc_last_message()[0]);
    sim_fail_clear();
    if (again) OK(galloc_free(get(second, 512, t), t));
    sim_run(-1);
    put(t, p, MIB(4), 1);
    OK(galloc_free(p, s));
    sim_hold(t, 1);
    r = get(first, MIB(4), s);
    put(s, r, MIB(4), 2);
    sim_hold(t, 0);
    OK(galloc_free(r, s));
    OK(galloc_stream_retire(t));
    stream_end(t);
    pool_end(first);
    pool_end(second);
    finish();
}

static struct {
    galloc_pool *pool;
    cudaStream_t stream;
    void *block, *own;
    int records;
} meanwhile;

static void *poll_and_record(void *unused)
{
    sim_run(-1);
    meanwhile.own = get(meanwhile.pool, MIB(4), meanwhile.stream);
    OK(galloc_record_stream(meanwhile.block, meanwhile.stream));
    return unused;
}

static void before_the_second_record(const char *function)
{
    pthread_t thread;
    if (strcmp(function, "cuEventRecord") || ++meanwhile.records != 2) return;
    EXPECT_EQ(pthread_create(&thread, NULL, poll_and_record, NULL), 0);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
}

/* The first pool's part of a retire has succeeded, and its event is complete, when another thread names the block for a
   stream there. Then the second pool's part fails, and the stream goes on. */
TEST(a_retire_that_fails_in_one_pool_ends_no_recorded_use)
{
    begin_still();
    galloc_config config = limited(MIB(8));
    galloc_pool *second = pool_new(NULL), *first = pool_new(&config);
    cudaStream_t s = stream_new(), t = stream_new();
    void *p = get(first, MIB(4), s), *q = get_used(first, MIB(4), s, 9);
    memset(&meanwhile, 0, sizeof meanwhile);
    meanwhile.pool = first;
    meanwhile.stream = stream_new();
    meanwhile.block = p;
    OK(galloc_free(q, s));
    order(s, t);
    OK(galloc_record_stream(p, t));
    OK(galloc_free(get(second, MIB(1), t), t));
    sim_fail("cuEventRecord", 2, 0, 0);
    sim_hook(before_the_second_record, NULL);
    EXPECT(galloc_stream_retire(t) != cudaSuccess);
    sim_hook(NULL, NULL);
    sim_fail_clear();
    EXPECT(meanwhile.own != NULL);
    put(t, p, MIB(4), 1);
    OK(galloc_free(p, s));
    sim_hold(t, 1);
    q = get(first, MIB(4), s);
    put(s, q, MIB(4), 2);
    sim_hold(t, 0);
    OK(galloc_free(q, s));
    OK(galloc_free(meanwhile.own, meanwhile.stream));
    pool_end(first);
    pool_end(second);
    finish();
}

TEST(a_retire_that_fails_in_one_pool_changes_none)
{
    for (int again = 0; again < 2; again++) {
        retire_in_half("cuEventCreate", again);
        retire_in_half("cuEventRecord", again);
    }
}

/* A stream that was retired everywhere is not unretired by a second attempt that fails: it may be gone. */
TEST(a_retired_stream_stays_retired)
{
    begin_still();
    galloc_pool *pool = pool_new(NULL), *other = pool_new(NULL);
    cudaStream_t s = stream_new(), t = stream_new();
    void *p = get(pool, MIB(4), s), *q = get(other, MIB(4), s);
    OK(galloc_record_stream(p, t));
    OK(galloc_record_stream(q, t));
    OK(galloc_stream_retire(t));
    sim_fail("cuEventRecord", 2, 0, 0);
    EXPECT(galloc_stream_retire(t) != cudaSuccess);
    sim_fail_clear();
    stream_end(t);
    OK(galloc_free(p, s)); /* records nothing on what is gone */
    OK(galloc_free(q, s));
    pool_end(pool);
    pool_end(other);
    finish();
}

/* ---- what other threads do while a pool begins or ends ----------------------------------------------------------- */

enum { RETIRE, CREATE, FIRST_USE, TRIM, THREAD_ENDS, STATS, GRAPH, FREE, BESIDES };

/* One thread stops where it is about to call a function of CUDA's, until the other one has done something. */
static struct {
    const char *at;
    pthread_t stops;
    galloc_pool *other;
    cudaStream_t stream;
    int what, stopped, done, unreserved;
} beside;

static void stop_there(const char *function)
{
    int here = pthread_equal(pthread_self(), beside.stops), last;
    if (!here) return;
    last = beside.unreserved;
    if (!strcmp(function, "cuMemAddressFree")) beside.unreserved = 1;
    if (beside.at && !strcmp(beside.at, "cuDevicePrimaryCtxRelease") && !last) return; /* not the pool's own */
    if (beside.at && !strcmp(function, beside.at)) {
        beside.at = NULL;
        __atomic_store_n(&beside.stopped, 1, __ATOMIC_RELEASE);
        for (int i = 0; i < 20000 && !__atomic_load_n(&beside.done, __ATOMIC_ACQUIRE); i++) usleep(1000);
        EXPECT(__atomic_load_n(&beside.done, __ATOMIC_ACQUIRE));
    }
}

static void *use_per_thread(void *arg)
{
    (void)arg;
    OK(galloc_free(get(beside.other, 1000, cudaStreamPerThread), cudaStreamPerThread));
    return NULL;
}

static void do_beside(void)
{
    pthread_t thread;
    galloc_pool *made = NULL;
    galloc_graph *graph = NULL;
    void *p = NULL;
    switch (beside.what) {
    case RETIRE: OK(galloc_stream_retire(beside.stream)); break;
    case CREATE:
        if (OK(galloc_pool_create(&made, NULL))) pool_end(made);
        break;
    case FIRST_USE:
        if (OK(galloc_malloc(&p, 1000, beside.stream))) OK(galloc_free(p, beside.stream));
        break;
    case TRIM: OK(galloc_pool_trim(beside.other, SIZE_MAX, NULL)); break;
    case THREAD_ENDS:
        if (!pthread_create(&thread, NULL, use_per_thread, NULL)) pthread_join(thread, NULL);
        break;
    case STATS: (void)stats_of(beside.other); break;
    case GRAPH:
        OK(galloc_graph_begin(&graph, beside.other, beside.stream));
        OK(galloc_graph_end(graph));
        OK(galloc_graph_release(graph, beside.stream));
        break;
    default: OK(galloc_free(get(beside.other, MIB(3), beside.stream), beside.stream));
    }
}

static void *go_on(void *arg)
{
    (void)arg;
    OK(cudaSetDevice(0));
    while (!__atomic_load_n(&beside.stopped, __ATOMIC_ACQUIRE)) usleep(1000);
    do_beside();
    __atomic_store_n(&beside.done, 1, __ATOMIC_RELEASE);
    return NULL;
}

static void make_and_end(const galloc_config *config, const char *at)
{
    cudaStream_t s = stream_new(), t = stream_new();
    beside.at = !strcmp(at, "cuDevicePrimaryCtxRetain") ? at : NULL;
    galloc_pool *pool = pool_new(config);
    void *p = get(pool, MIB(1), s), *q = get(pool, MIB(3), t);
    put(s, p, MIB(1), 1);
    OK(galloc_free(p, s));
    OK(galloc_free(q, t));
    if (strcmp(at, "cuDevicePrimaryCtxRetain")) beside.at = at;
    pool_end(pool);
    EXPECT(!beside.at); /* it came by there */
}

static void stop_at(const char *at, const galloc_config *config)
{
    for (int what = 0; what < BESIDES; what++) {
        pthread_t thread;
        begin();
        memset(&beside, 0, sizeof beside);
        beside.other = pool_new(NULL);
        beside.stream = stream_new();
        beside.what = what;
        beside.stops = pthread_self();
        sim_hook(stop_there, NULL);
        EXPECT_EQ(pthread_create(&thread, NULL, go_on, NULL), 0);
        make_and_end(config, at);
        __atomic_store_n(&beside.stopped, 1, __ATOMIC_RELEASE);
        EXPECT_EQ(pthread_join(thread, NULL), 0);
        sim_hook(NULL, NULL);
        pool_end(beside.other);
        finish();
    }
}

/* Whatever the device, or the driver, makes a pool that ends wait for: nobody else waits along, since the device may be
   waiting for just that thread. */
TEST(a_pool_that_ends_holds_no_other_thread_up)
{
    static const char *const calls[] = {"cuMemFreeHost",    "cuMemUnmap",     "cuMemRelease",
                                        "cuMemAddressFree", "cuEventDestroy", "cuDevicePrimaryCtxRelease"};
    galloc_config fixed = config_fixed(), async = galloc_config_default();
    async.backend = GALLOC_BACKEND_CUDA_MALLOC_ASYNC;
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) stop_at(calls[i], NULL);
    stop_at("cuMemFree", &fixed);
    stop_at("cuMemPoolDestroy", &async);
}

TEST(a_pool_that_begins_holds_no_other_thread_up) { stop_at("cuDevicePrimaryCtxRetain", NULL); }

static int end_it(const galloc_report *report, void *user)
{
    int *asked = (int *)user;
    EXPECT_EQ(galloc_pool_destroy(report->pool), cudaErrorNotPermitted);
    EXPECT_EQ(galloc_pool_check(report->pool), 0);
    ++*asked;
    return 0;
}

/* A pool that could not end goes on as before: its stream caches serve again. */
TEST(a_pool_whose_end_fails_has_its_caches_again)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    for (int i = 0; i < 2; i++) OK(galloc_free(get(pool, 4096, s), s));
    sim_fail("cuMemUnmap", 1, 1, cudaErrorUnknown);
    EXPECT(galloc_pool_destroy(pool) != cudaSuccess);
    sim_fail_clear();
    for (int i = 0; i < 2; i++) OK(galloc_free(get(pool, 4096, s), s));
    EXPECT(inside_stream_of(pool, stream_id(s)).open);
    pool_end(pool);
    finish();
}

/* The error of an end that cannot wait for the device is that of the wait, and the memory is still there. */
TEST(an_end_that_cannot_wait_has_the_error_of_the_wait)
{
    begin_still();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    OK(galloc_free(get_used(pool, MIB(4), s, 1), s));
    sim_fail("cuMemFreeHost", 1, 1, cudaErrorNotPermitted);
    EXPECT_EQ(galloc_pool_destroy(pool), cudaErrorNotPermitted);
    EXPECT(strstr(galloc_last_message(), "waiting for the device") != NULL);
    sim_fail_clear();
    OK(galloc_free(get_used(pool, MIB(4), s, 2), s));
    pool_end(pool);
    finish();
}

/* The pinned memory of a wait that failed goes with the pool, although that has nothing left to wait for. */
TEST(the_memory_of_a_failed_wait_goes_with_the_pool)
{
    for (int twice = 0; twice < 2; twice++) {
        begin_still();
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_new(NULL);
        void *p = get_used(pool, MIB(4), s, 1);
        inside_ask_for_event(pool, stream_id(s));
        OK(galloc_free(p, s));
        sim_fail("cuMemFreeHost", 1, 1, cudaErrorNotPermitted);
        EXPECT_EQ(galloc_pool_trim(pool, 0, NULL), cudaErrorNotPermitted);
        OK(cudaStreamSynchronize(s));
        if (twice) {
            EXPECT_EQ(galloc_pool_destroy(pool), cudaErrorNotPermitted);
            EXPECT(strstr(galloc_last_message(), "cuMemFreeHost") != NULL);
        }
        sim_fail_clear();
        pool_end(pool);
        finish();
    }
}

/* A pool that could give back only a part of its addresses counts the rest. */
TEST(addresses_that_an_end_gave_back_are_not_counted)
{
    sim_options options = sim_defaults();
    options.memory = MIB(256);
    begin_with(options);
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    OK(galloc_free(get(pool, MIB(2), s), s));
    void *p = NULL;
    OK(galloc_alloc(&p, &(galloc_request){.bytes = MIB(2), .max_bytes = GIB(2), .stream = s, .pool = pool}));
    OK(galloc_free(p, s)); /* it needed a range of its own */
    EXPECT_EQ(sim_calls("cuMemAddressReserve"), 2);
    EXPECT_EQ(stats_of(pool).addresses, sim_addresses());
    sim_fail("cuMemAddressFree", 2, 0, cudaErrorUnknown);
    EXPECT_EQ(galloc_pool_destroy(pool), cudaErrorUnknown);
    sim_fail_clear();
    EXPECT_EQ(stats_of(pool).addresses, sim_addresses());
    EXPECT(sim_addresses() > 0);
    pool_end(pool);
    finish();
}

/* A free that records an event has let go of the pool's lock. The pool's end waits for it: else the event would
   remain. */
static struct {
    galloc_pool *pool;
    pthread_t frees, ends;
    int begun, done;
} recording;

static void *end_it_meanwhile(void *unused)
{
    OK(cudaSetDevice(0));
    OK(galloc_pool_destroy(recording.pool));
    __atomic_store_n(&recording.done, 1, __ATOMIC_RELEASE);
    return unused;
}

static void end_while_recording(const char *function)
{
    if (recording.begun || strcmp(function, "cuEventRecord") || !pthread_equal(pthread_self(), recording.frees)) return;
    recording.begun = 1;
    EXPECT_EQ(pthread_create(&recording.ends, NULL, end_it_meanwhile, NULL), 0);
    for (int i = 0; i < 50 && !__atomic_load_n(&recording.done, __ATOMIC_ACQUIRE); i++) usleep(1000);
    EXPECT(!__atomic_load_n(&recording.done, __ATOMIC_ACQUIRE));
}

TEST(a_pool_does_not_end_while_an_event_is_recorded_in_it)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    memset(&recording, 0, sizeof recording);
    recording.pool = pool_new(NULL);
    recording.frees = pthread_self();
    OK(galloc_free(get(recording.pool, 512, t), t));
    void *p = get(recording.pool, MIB(4), s);
    sim_hook(end_while_recording, NULL);
    OK(galloc_free(p, s));
    EXPECT(recording.begun);
    if (recording.begun) EXPECT_EQ(pthread_join(recording.ends, NULL), 0);
    sim_hook(NULL, NULL);
    finish();
}

/* The call that asks the program is in the pool yet. */
TEST(a_callback_does_not_end_its_pool)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = limited(MIB(8));
    galloc_pool *pool = pool_new(&config);
    galloc_callbacks calls = {0};
    void *p = NULL;
    int asked = 0;
    calls.on_oom = end_it;
    calls.user = &asked;
    OK(galloc_pool_set_callbacks(pool, &calls));
    OK(galloc_free(get(pool, MIB(2), s), s));
    sim_fail("cuMemCreate", 1, 1, CUDA_ERROR_OUT_OF_MEMORY);
    EXPECT_EQ(galloc_pool_malloc(pool, &p, MIB(7), s), cudaErrorMemoryAllocation);
    sim_fail_clear();
    EXPECT(asked > 0);
    pool_end(pool);
    finish();
}

/* A pool that nobody uses, and a thread that is stopped in it while it retires a stream of its own. */
static struct {
    galloc_pool *pool;
    cudaStream_t stream;
    pthread_t retires;
    int inside, returned;
} quiet;

static void stop_in_retire(const char *function)
{
    if (!pthread_equal(pthread_self(), quiet.retires) || strcmp(function, "cuEventRecord")) return;
    __atomic_store_n(&quiet.inside, 1, __ATOMIC_RELEASE);
    while (!inside_ended(quiet.pool) && !__atomic_load_n(&quiet.returned, __ATOMIC_ACQUIRE))
        sched_yield();
}

static void *retire_it(void *unused)
{
    quiet.retires = pthread_self();
    sim_hook(stop_in_retire, NULL);
    OK(galloc_stream_retire(quiet.stream));
    __atomic_store_n(&quiet.inside, 1, __ATOMIC_RELEASE);
    return unused;
}

static int end_the_other(const galloc_report *report, void *user)
{
    pthread_t thread;
    EXPECT_EQ(pthread_create(&thread, NULL, retire_it, user), 0);
    while (!__atomic_load_n(&quiet.inside, __ATOMIC_ACQUIRE)) sched_yield();
    EXPECT(report->pool != quiet.pool);
    OK(galloc_pool_destroy(quiet.pool));
    __atomic_store_n(&quiet.returned, 1, __ATOMIC_RELEASE);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
    sim_hook(NULL, NULL);
    return 0;
}

/* Whoever retires a stream is in all pools, one after the other: no pool of the program's is in use by that. */
TEST(a_callback_ends_another_pool_while_a_stream_is_retired)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_config config = limited(MIB(8));
    galloc_pool *pool = pool_new(&config);
    galloc_callbacks calls = {0};
    void *p = get(pool, MIB(6), s), *q;
    memset(&quiet, 0, sizeof quiet);
    quiet.pool = pool_new(NULL);
    quiet.stream = t;
    q = get(quiet.pool, MIB(1), t);
    put(t, q, MIB(1), 1);
    OK(galloc_free(q, t));
    calls.on_oom = end_the_other;
    OK(galloc_pool_set_callbacks(pool, &calls));
    EXPECT_EQ(galloc_pool_malloc(pool, &q, MIB(7), s), cudaErrorMemoryAllocation);
    EXPECT(quiet.returned);
    OK(galloc_free(p, s));
    stream_end(t);
    pool_end(pool);
    finish();
}

/* The graphs of a pool that is about to end own memory: on_unmap is told of nothing, and the pool goes on. */
static void count_unmapped(galloc_pool *pool, void *addr, size_t bytes, void *user)
{
    (void)pool;
    (void)addr;
    *(size_t *)user += bytes;
}

TEST(a_pool_that_graphs_use_keeps_its_mappings)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    galloc_callbacks calls = {0};
    cudaGraph_t graph = NULL;
    size_t unmapped = 0;
    OK(galloc_free(get(pool, MIB(40), s), s));
    OK(cudaStreamSynchronize(s));
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    OK(galloc_free(get(pool, MIB(2), s), s));
    OK(cudaStreamEndCapture(s, &graph));
    calls.on_unmap = count_unmapped;
    calls.user = &unmapped;
    OK(galloc_pool_set_callbacks(pool, &calls));
    EXPECT_EQ(galloc_pool_destroy(pool), cudaErrorNotPermitted);
    EXPECT_EQ(unmapped, 0);
    expect_healthy(pool, 1);
    OK(cudaGraphDestroy(graph));
    pool_end(pool);
    EXPECT(unmapped > 0);
    stream_end(s);
    finish();
}

static struct {
    cudaGraph_t graph;
    cudaGraphExec_t instance;
    int at; /* the so many-th next call of the driver or the runtime */
} ending;

static void *end_graph(void *unused)
{
    OK(cudaGraphExecDestroy(ending.instance));
    OK(cudaGraphDestroy(ending.graph));
    ending.graph = NULL;
    return unused;
}

static void once_a_graph_ends(const char *function)
{
    pthread_t thread;
    (void)function;
    if (!ending.at || --ending.at) return;
    EXPECT_EQ(pthread_create(&thread, NULL, end_graph, NULL), 0);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
}

/* At whatever call of the pool's end another thread ends the last graph, it succeeds, or the graph was in the way. */
static void pool_ends_while_its_last_graph_does(int is_default)
{
    int at, ended = 0, kept = 0;
    for (at = 1; at && at < 1000; at++) {
        begin();
        cudaStream_t s = stream_new();
        galloc_pool *pool = NULL;
        galloc_callbacks calls = {0};
        size_t unmapped = 0;
        cudaError_t error;
        if (is_default) OK(galloc_pool_default(&pool, 0));
        else pool = pool_new(NULL);
        calls.on_unmap = count_unmapped;
        calls.user = &unmapped;
        OK(galloc_pool_set_callbacks(pool, &calls));
        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
        OK(galloc_free(get(pool, MIB(2), s), s));
        OK(cudaStreamEndCapture(s, &ending.graph));
        OK(cudaGraphInstantiate(&ending.instance, ending.graph, 0));
        sim_hook(once_a_graph_ends, NULL);
        ending.at = at;
        error = is_default ? galloc_shutdown() : galloc_pool_destroy(pool);
        sim_hook(NULL, NULL);
        if (ending.graph) at = -1;
        if (ending.graph) end_graph(NULL);
        if (!error) ended++;
        if (!error) EXPECT(unmapped > 0);
        if (error && EXPECT_EQ(error, cudaErrorNotPermitted)) kept++;
        if (error && !is_default) pool_end(pool);
        stream_end(s);
        finish();
    }
    EXPECT(ended > 0);
    EXPECT(kept > 0);
}

TEST(a_pool_ends_while_its_last_graph_does) { pool_ends_while_its_last_graph_does(0); }
TEST(a_default_pool_ends_while_its_last_graph_does) { pool_ends_while_its_last_graph_does(1); }

/* What keeps a pool from its end is named: its own blocks, not those of another pool. */
TEST(an_end_that_fails_names_what_this_pool_has)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool[2] = {pool_new(NULL), pool_new(NULL)};
    galloc_request request = {.bytes = 1000, .stream = s};
    void *p[2];
    for (uint32_t i = 0; i < 2; i++) {
        request.pool = pool[i];
        request.bytes = i ? MIB(30) : 1000; /* of all pools the second one has the most */
        request.tag = 70 + i;
        OK(galloc_alloc(&p[i], &request));
    }
    EXPECT_EQ(galloc_pool_destroy(pool[0]), cudaErrorNotPermitted);
    EXPECT(strstr(galloc_last_message(), "tag 70") && !strstr(galloc_last_message(), "tag 71"));
    for (int i = 0; i < 2; i++) OK(galloc_free(p[i], s));
    for (int i = 0; i < 2; i++) pool_end(pool[i]);
    stream_end(s);
    finish();
}

/* Each page of the default pool that goes lets the program free the block of another one. */
static struct {
    cudaStream_t stream;
    void *p[40];
    int n, calls;
} one_more;

static void free_one_more(galloc_pool *pool, void *addr, size_t bytes, void *user)
{
    (void)pool;
    (void)addr;
    (void)bytes;
    (void)user;
    one_more.calls++;
    if (one_more.n) OK(galloc_free(one_more.p[--one_more.n], one_more.stream));
}

/* An end of a pool has an end, whatever on_unmap does: it fails as long as the program has blocks. */
TEST(an_end_waits_for_what_on_unmap_frees_a_few_times_only)
{
    begin_still();
    galloc_pool *pool = NULL;
    galloc_callbacks calls = {0};
    int tries = 0;
    memset(&one_more, 0, sizeof one_more);
    one_more.stream = stream_new();
    setenv("GALLOC_CONF", "growth:2M", 1); /* a page for each block */
    OK(galloc_pool_default(&pool, 0));
    unsetenv("GALLOC_CONF");
    for (; one_more.n < 40; one_more.n++) one_more.p[one_more.n] = get(pool, MIB(2), one_more.stream);
    calls.on_unmap = free_one_more;
    OK(galloc_pool_set_callbacks(pool, &calls));
    OK(galloc_free(one_more.p[--one_more.n], one_more.stream));
    while (tries++ < 40) {
        cudaError_t error;
        one_more.calls = 0;
        error = galloc_shutdown();
        EXPECT(one_more.calls <= 16);
        if (!error) break;
        EXPECT_EQ(error, cudaErrorNotPermitted);
        EXPECT_EQ(galloc_pool_check(pool), 0);
    }
    EXPECT(tries > 1);
    EXPECT_EQ(one_more.n, 0);
    finish();
}

/* A call that is in a pool asks the program, and meanwhile another thread ends the pool: it waits for that call. */
static struct {
    galloc_pool *pool, *other;
    cudaStream_t stream, beside;
    pthread_t thread;
    cudaError_t ended;
    int what, asked, over;
} asked;

static void *end_the_asking(void *arg)
{
    (void)arg;
    OK(cudaSetDevice(0));
    asked.ended = galloc_pool_destroy(asked.pool);
    __atomic_store_n(&asked.over, 1, __ATOMIC_RELEASE);
    return NULL;
}

static void expect_block_of_ending(void *p)
{
    galloc_pointer info = info_of(p);
    EXPECT_EQ(info.state, GALLOC_STATE_USED);
    if (asked.what == 1) OK(galloc_record_stream(p, asked.beside));
    OK(galloc_free(p, asked.what == 2 ? asked.beside : asked.stream));
}

/* The block comes by the short way, which does not ask whether the pool is about to end. */
static int use_while_it_ends(const galloc_report *report, void *user)
{
    galloc_config config;
    void *p = NULL;
    (void)user;
    sim_fail_clear();
    if (asked.asked++) return 0;
    OK(galloc_free(get(report->pool, 4096, asked.stream), asked.stream));
    EXPECT_EQ(pthread_create(&asked.thread, NULL, end_the_asking, NULL), 0);
    while (galloc_pool_config(report->pool, &config) == cudaSuccess) usleep(100);
    if (asked.what == 3) {
        usleep(20000);
        EXPECT(!__atomic_load_n(&asked.over, __ATOMIC_ACQUIRE));
    } else if (OK(galloc_pool_malloc(report->pool, &p, 4096, asked.stream))) {
        expect_block_of_ending(p);
    }
    return 0;
}

TEST(a_callback_keeps_its_pool_from_ending)
{
    for (int what = 0; what < 4; what++) {
        begin();
        galloc_config config = limited(MIB(8));
        galloc_callbacks calls = {0};
        void *p = NULL;
        memset(&asked, 0, sizeof asked);
        asked.what = what;
        asked.stream = stream_new();
        asked.beside = stream_new();
        asked.pool = pool_new(&config);
        calls.on_oom = use_while_it_ends;
        OK(galloc_pool_set_callbacks(asked.pool, &calls));
        OK(galloc_free(get(asked.pool, 4096, asked.stream), asked.stream));
        sim_fail("cuMemCreate", 1, 1, CUDA_ERROR_OUT_OF_MEMORY);
        EXPECT_EQ(galloc_pool_malloc(asked.pool, &p, MIB(7), asked.stream), cudaErrorMemoryAllocation);
        sim_fail_clear();
        EXPECT_EQ(pthread_join(asked.thread, NULL), 0);
        EXPECT(asked.ended == cudaSuccess || asked.ended == cudaErrorNotPermitted);
        if (asked.ended) pool_end(asked.pool);
        finish();
    }
}

/* What a thread remembers of its calls is not what a callback in one of them has made it remember since. */
enum { ASKING = 48 };

static cudaStream_t asking[ASKING];

static int use_others(const galloc_report *report, void *user)
{
    cudaStream_t self = *(cudaStream_t *)user;
    (void)report;
    sim_fail_clear();
    asked.asked++;
    for (int i = 0; i < ASKING; i++)
        if (asking[i] != self) OK(galloc_free(get(asked.other, 4096, asking[i]), asking[i]));
    return 1;
}

static void ask_and_go_on(cudaStream_t *stream)
{
    galloc_callbacks calls = {0};
    void *p = NULL, *q;
    calls.on_oom = use_others;
    calls.user = stream;
    OK(galloc_pool_set_callbacks(asked.pool, &calls));
    OK(galloc_free(get(asked.pool, 4096, *stream), *stream));
    sim_fail("cuMemCreate", 1, 1, CUDA_ERROR_OUT_OF_MEMORY);
    OK(galloc_pool_malloc(asked.pool, &p, MIB(7), *stream));
    q = get(asked.other, 4096, *stream);
    EXPECT(info_of(q).pool == asked.other);
    OK(galloc_free(q, *stream));
    OK(galloc_free(p, *stream));
    OK(galloc_pool_trim(asked.pool, 0, NULL));
}

TEST(what_a_callback_does_leads_no_call_astray)
{
    begin();
    galloc_pool *other[16];
    memset(&asked, 0, sizeof asked);
    asked.pool = pool_new(NULL);
    for (int i = 0; i < ASKING; i++) asking[i] = stream_new();
    for (int i = 0; i < 16; i++) asked.other = other[i] = pool_new(NULL);
    for (int i = 0; i < 16; i++) {
        asked.other = other[i];
        for (int k = 0; k < ASKING; k += 6) ask_and_go_on(&asking[k]);
    }
    EXPECT_EQ(asked.asked, 16 * ASKING / 6);
    pool_end(asked.pool);
    for (int i = 0; i < 16; i++) pool_end(other[i]);
    finish();
}

/* ---- names of what has ended ------------------------------------------------------------------------------------- */

static void expect_gone(cudaError_t error)
{
    EXPECT_EQ(error, cudaErrorInvalidResourceHandle);
    EXPECT(galloc_last_message()[0] && log_text[0]);
    log_text[0] = 0;
}

static void expect_no_pool(galloc_pool *pool, cudaStream_t s)
{
    galloc_request request = {0};
    galloc_stats stats;
    galloc_torch_stats torch;
    galloc_config config;
    galloc_decision decision;
    galloc_stream_stats streams;
    galloc_graph *graph = NULL;
    void *p = &request;
    int count;
    size_t released;
    expect_gone(galloc_pool_malloc(pool, &p, 100, s));
    EXPECT(p == NULL);
    expect_gone(galloc_pool_malloc(pool, &p, 0, s));
    expect_gone(galloc_pool_malloc(pool, &p, MIB(300), cudaStreamPerThread));
    request.pool = pool;
    request.bytes = MIB(3);
    request.stream = s;
    expect_gone(galloc_alloc(&p, &request));
    request.max_bytes = MIB(30);
    expect_gone(galloc_alloc(&p, &request));
    expect_gone(galloc_pool_destroy(pool));
    expect_gone(galloc_pool_reserve(pool, MIB(2)));
    expect_gone(galloc_pool_reserve(pool, 0));
    expect_gone(galloc_pool_trim(pool, 0, &released));
    expect_gone(galloc_pool_sync_point(pool, &released));
    expect_gone(galloc_pool_set_limit(pool, MIB(1)));
    expect_gone(galloc_pool_set_callbacks(pool, NULL));
    expect_gone(galloc_pool_config(pool, &config));
    expect_gone(galloc_pool_decisions(pool, &decision, 1, &count));
    expect_gone(galloc_pool_freeze(pool));
    expect_gone(galloc_pool_stats(pool, &stats));
    expect_gone(galloc_pool_stats_reset(pool));
    expect_gone(galloc_pool_torch_stats(pool, &torch));
    expect_gone(galloc_pool_streams(pool, &streams, 1, &count));
    expect_gone(galloc_graph_begin(&graph, pool, s));
    EXPECT(graph == NULL);
    log_text[0] = 0;
    EXPECT_EQ(galloc_pool_check(pool), -1);
    EXPECT(log_text[0]);
}

static void expect_no_graph(galloc_graph *graph, galloc_pool *pool, cudaStream_t s)
{
    galloc_graph *same = graph;
    expect_gone(galloc_graph_begin(&same, NULL, s));
    if (pool) expect_gone(galloc_graph_begin(&same, pool, s));
    EXPECT(same == graph);
    expect_gone(galloc_graph_end(graph));
    expect_gone(galloc_graph_release(graph, s));
}

/* All kinds of pools, each in the place of the one before. */
enum { ASYNC = 5, KINDS };

static galloc_config kind_of_pool(int kind)
{
    galloc_config config = galloc_config_default();
    if (kind == 1) config.expandable_segments = 0;
    if (kind == 2) config.backend = GALLOC_BACKEND_CUDA_MALLOC;
    if (kind == 3) config.strategy = GALLOC_STRATEGY_POOLED;
    if (kind == 4) config.stats_exact = 1;
    if (kind == ASYNC) config.backend = GALLOC_BACKEND_CUDA_MALLOC_ASYNC;
    return config;
}

TEST(a_pool_that_ended_is_refused)
{
    enum { MANY = 12 };
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *ended[MANY], *pool;
    void *stale[MANY], *p;
    for (int i = 0; i < MANY; i++) {
        galloc_config config = kind_of_pool(i % KINDS);
        galloc_pointer info;
        pool = pool_new(&config);
        for (int k = 0; k < i; k++) expect_no_pool(ended[k], s); /* that another pool is there now is nothing to them */
        for (int k = 0; k < 3; k++) {
            p = get(pool, KIB(100), s);
            EXPECT(info_of(p).pool == pool);
            OK(galloc_free(p, s));
        }
        stale[i] = p;
        pool_end(pool);
        ended[i] = pool;
        for (int k = 0; k <= i; k++) expect_no_pool(ended[k], s);
        for (int k = 0; k <= i; k++) {
            EXPECT_EQ(galloc_free(stale[k], s), cudaErrorInvalidDevicePointer);
            EXPECT_EQ(galloc_free_after(stale[k], &s, 1), cudaErrorInvalidDevicePointer);
            EXPECT_EQ(galloc_resize(stale[k], 100, s), cudaErrorInvalidDevicePointer);
            EXPECT_EQ(galloc_record_stream(stale[k], s), cudaErrorInvalidDevicePointer);
            OK(galloc_pointer_info(stale[k], &info));
            EXPECT_EQ(info.state, GALLOC_STATE_FOREIGN);
        }
    }
    OK(galloc_pool_default(&pool, 0));
    OK(galloc_shutdown());
    expect_no_pool(pool, s);
    finish();
}

TEST(what_is_no_pool_is_refused)
{
    char memory[4096];
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    expect_no_pool((galloc_pool *)(void *)(memory + 1024), s);
    expect_no_pool((galloc_pool *)(void *)((char *)pool + 64), s);
    expect_no_pool((galloc_pool *)(uintptr_t)64, s);
    pool_end(pool);
    finish();
}

static struct {
    galloc_pool *pool;
    long mapped, unmapped, asked, rejected;
} named;

static void name_mapped(galloc_pool *pool, void *addr, size_t bytes, void *user)
{
    EXPECT(addr && bytes && user == &named && pool == named.pool);
    named.mapped++;
}

static void name_unmapped(galloc_pool *pool, void *addr, size_t bytes, void *user)
{
    EXPECT(addr && bytes && user == &named && pool == named.pool);
    named.unmapped++;
}

static int name_asked(const galloc_report *report, void *user)
{
    EXPECT(user == &named && report->pool == named.pool);
    named.asked++;
    return 0;
}

static void name_rejected(const galloc_report *report, void *user)
{
    EXPECT(user == &named && report->pool == named.pool);
    named.rejected++;
}

/* A pool has the host memory of one that ended, and yet its callbacks get the handle that the program has. */
TEST(callbacks_get_the_handle_of_their_pool)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *former = NULL;
    void *p = NULL;
    for (int round = 0; round < 3; round++) {
        galloc_callbacks calls = {.on_oom = name_asked, .on_reject = name_rejected, .on_map = name_mapped,
                                  .on_unmap = name_unmapped, .user = &named};
        galloc_pool *pool = pool_limited(MIB(8));
        EXPECT(pool != former);
        memset(&named, 0, sizeof named);
        named.pool = pool;
        void *before = get(pool, MIB(2), s);
        OK(galloc_pool_set_callbacks(pool, &calls));
        EXPECT(named.mapped > 0); /* of what there was */
        long mapped = named.mapped;
        void *q = get(pool, MIB(4), s);
        EXPECT(named.mapped > mapped);
        EXPECT_EQ(galloc_pool_malloc(pool, &p, MIB(4), s), cudaErrorMemoryAllocation);
        EXPECT_EQ(named.asked, 1);
        EXPECT_EQ(galloc_pool_malloc(pool, &p, MIB(9), s), cudaErrorMemoryAllocation);
        EXPECT_EQ(named.rejected, 1);
        OK(galloc_free(before, s));
        OK(galloc_free(q, s));
        OK(galloc_pool_trim(pool, 0, NULL));
        EXPECT(named.unmapped > 0);
        EXPECT_EQ(named.unmapped, named.mapped);
        former = pool;
        pool_end(pool);
    }
    finish();
}

/* What stays for calls that come late does not pile up. */
TEST(pools_that_come_and_go_leave_no_more_than_they_needed)
{
    begin();
    cudaStream_t s = stream_new();
    size_t most = 0;
    for (int i = 0; i < 400; i++) {
        galloc_config config = kind_of_pool(i % KINDS);
        galloc_pool *pool = pool_new(&config);
        void *p[50];
        for (int k = 0; k < 50; k++) p[k] = get(pool, KIB(4) * (size_t)(k + 1), s);
        for (int k = 0; k < 50; k++) OK(galloc_free(p[k], s));
        pool_end(pool);
        if (i == 100) most = sim_malloc_live();
        if (i > 100) EXPECT(sim_malloc_live() <= most + 8); /* nodes of the map of addresses */
    }
    OK(galloc_shutdown());
    EXPECT_EQ(sim_malloc_live(), 0);
    finish();
}

/* A long-lived block, recorded in each of many captures: those whose graphs are gone are forgotten, though the program
   does nothing else with the pool. */
TEST(captures_that_only_record_do_not_pile_up)
{
    begin_with_devices(1, SIM_PACE_PROMPT);
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *p = get(pool, MIB(1), s);
    size_t most = 0;
    for (int i = 0; i < 1000; i++) {
        cudaGraph_t graph;
        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
        OK(galloc_record_stream(p, s));
        OK(cudaStreamEndCapture(s, &graph));
        OK(cudaGraphDestroy(graph));
        if (i == 200) most = sim_malloc_live();
        if (i > 200) EXPECT(sim_malloc_live() <= most + 8);
    }
    OK(galloc_free(p, s));
    stream_end(s);
    pool_end(pool);
    finish();
}

/* The recorded use of a retired stream lasts until its work is complete. A stream that was retired may be passed to
   galloc again, and be recorded again. */
TEST(the_use_of_a_retired_stream_lasts)
{
    for (int again = 0; again < 2; again++) {
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new(), u;
        galloc_pool *pool = pool_new(NULL);
        void *p = get(pool, MIB(20), s), *q, *x = NULL;
        put(s, p, MIB(20), 1);
        order(s, t);
        OK(galloc_record_stream(p, t));
        put(t, p, MIB(20), 2);
        OK(galloc_stream_retire(t));
        if (again) OK(cudaStreamSynchronize(t));
        for (int i = 0; i < 200; i++) {
            u = stream_new();
            OK(galloc_record_stream(p, u));
            OK(galloc_stream_retire(u));
            OK(cudaStreamDestroy(u));
        }
        if (again) { /* it is not retired any more */
            OK(galloc_pool_trim(pool, SIZE_MAX, NULL));
            OK(galloc_record_stream(p, s));
            x = get(pool, KIB(4), t);
            OK(galloc_record_stream(p, t));
            put(t, p, MIB(20), 3);
        }
        OK(galloc_record_stream(p, s)); /* which looks at all of them */
        OK(galloc_free(p, s));
        q = get(pool, MIB(20), s);
        put(s, q, MIB(20), 4);
        EXPECT(q != p);
        OK(galloc_free(q, s));
        if (x) OK(galloc_free(x, t));
        stream_end(s);
        OK(cudaStreamSynchronize(t));
        OK(galloc_stream_retire(t));
        stream_end(t);
        pool_end(pool);
        finish();
    }
}

TEST(a_group_that_ended_is_refused)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL), *other = pool_new(NULL);
    galloc_graph *graph[4] = {NULL}, *last = NULL;
    for (int i = 0; i < 4; i++) {
        OK(galloc_graph_begin(&graph[i], pool, s));
        for (int k = 0; k < i; k++) expect_no_graph(graph[k], pool, s);
        EXPECT_EQ(galloc_graph_release(graph[i], s), cudaErrorNotPermitted);
        OK(galloc_graph_end(graph[i]));
        EXPECT_EQ(galloc_graph_end(graph[i]), cudaErrorNotPermitted);
        OK(galloc_graph_release(graph[i], s));
        expect_no_graph(graph[i], pool, s);
        expect_no_graph(graph[i], other, s);
    }
    OK(galloc_graph_begin(&last, other, s));
    OK(galloc_graph_end(last));
    EXPECT_EQ(galloc_graph_begin(&last, pool, s), cudaErrorInvalidValue);
    pool_end(other);
    expect_no_graph(last, NULL, s);
    expect_gone(galloc_graph_begin(&last, other, s));
    pool_end(pool);
    finish();
}

/* ---- calls that come late ---------------------------------------------------------------------------------------- */

enum { LATE = 3 };

static struct {
    galloc_pool *pool;
    void *address;
    galloc_graph *graph;
    cudaStream_t stream[LATE];
    int stop;
} late;

static int is_one_of(cudaError_t error, cudaError_t a, cudaError_t b)
{
    return error == cudaSuccess || error == a || error == b;
}

static void ask_late(dice *d, cudaStream_t s)
{
    galloc_pool *pool = __atomic_load_n(&late.pool, __ATOMIC_ACQUIRE);
    void *ptr = __atomic_load_n(&late.address, __ATOMIC_ACQUIRE), *p = NULL;
    galloc_graph *graph = __atomic_load_n(&late.graph, __ATOMIC_ACQUIRE);
    const cudaError_t gone = cudaErrorInvalidResourceHandle;
    galloc_pointer info;
    galloc_stats stats;
    size_t released;
    cudaError_t error = cudaSuccess;
    switch (roll_below(d, 14)) {
    case 0: OK(galloc_pointer_info(ptr, &info)); break;
    case 1: EXPECT_EQ(galloc_free(ptr, s), cudaErrorInvalidDevicePointer); break;
    case 2: EXPECT_EQ(galloc_resize(ptr, 100, s), cudaErrorInvalidDevicePointer); break;
    case 3: EXPECT_EQ(galloc_record_stream(ptr, s), cudaErrorInvalidDevicePointer); break;
    case 4: EXPECT_EQ(galloc_free_after(ptr, &s, 1), cudaErrorInvalidDevicePointer); break;
    case 5: error = galloc_pool_stats(pool, &stats); break;
    case 6: error = galloc_pool_trim(pool, 0, &released); break;
    case 7: EXPECT(galloc_pool_check(pool) <= 0); break;
    case 8: EXPECT(is_one_of(galloc_graph_end(graph), gone, cudaErrorNotPermitted)); break;
    case 9: EXPECT(is_one_of(galloc_graph_release(graph, s), gone, cudaErrorNotPermitted)); break;
    case 10: OK(galloc_stream_retire(s)); break;
    default:
        error = galloc_pool_malloc(pool, &p, roll_bytes(d, MIB(4)), s);
        if (!error) put(s, p, 512, 1);
        if (!error) OK(galloc_free(p, s));
    }
    EXPECT(is_one_of(error, gone, gone));
}

static void *come_late(void *stream)
{
    dice d = {(uint64_t)(uintptr_t)stream};
    OK(cudaSetDevice(0));
    while (!__atomic_load_n(&late.stop, __ATOMIC_ACQUIRE)) ask_late(&d, *(cudaStream_t *)stream);
    return NULL;
}

/* Two threads release one group: the second has found its pool while the first is at it. */
static struct {
    galloc_graph *group;
    pthread_t first, second;
    cudaError_t error[2];
    int begun;
} releases;

static void *release_as_second(void *stream)
{
    OK(cudaSetDevice(0));
    __atomic_store_n(&releases.begun, 1, __ATOMIC_RELEASE);
    releases.error[1] = galloc_graph_release(releases.group, stream);
    return NULL;
}

static cudaStream_t second_stream;

static void let_the_second_in(const char *function)
{
    if (strcmp(function, "cuCtxGetId") || !pthread_equal(pthread_self(), releases.first) || releases.begun) return;
    EXPECT_EQ(pthread_create(&releases.second, NULL, release_as_second, second_stream), 0);
    while (!__atomic_load_n(&releases.begun, __ATOMIC_ACQUIRE)) usleep(100);
    usleep(20000);
}

TEST(a_group_is_released_by_one_of_two_threads)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    memset(&releases, 0, sizeof releases);
    second_stream = stream_new();
    OK(galloc_graph_begin(&releases.group, pool, s));
    OK(galloc_graph_end(releases.group));
    releases.first = pthread_self();
    sim_hook(let_the_second_in, NULL);
    releases.error[0] = galloc_graph_release(releases.group, s);
    EXPECT(releases.begun);
    EXPECT_EQ(pthread_join(releases.second, NULL), 0);
    sim_hook(NULL, NULL);
    for (int i = 0; i < 2; i++) EXPECT(is_one_of(releases.error[i], cudaErrorInvalidResourceHandle, cudaSuccess));
    EXPECT_EQ((releases.error[0] == cudaSuccess) + (releases.error[1] == cudaSuccess), 1);
    pool_end(pool);
    stream_end(second_stream);
    stream_end(s);
    finish();
}

static struct {
    galloc_graph *group;
    cudaStream_t stream;
    int left, over; /* steps until another call ends the group; it has done so */
    cudaError_t error;
} other_end;

static void end_the_group(const char *function, int locks)
{
    (void)function;
    if (locks || other_end.left-- != 0) return;
    inside_on_step = NULL;
    other_end.over = 1;
    (void)galloc_graph_end(other_end.group);
    other_end.error = galloc_graph_release(other_end.group, other_end.stream);
}

/* A group ends while another call, which ends a capture or the group, has found it and is about to use it. */
TEST(a_group_ends_in_the_middle_of_another_call)
{
    for (int release = 0; release < 3; release++) {
        int gone = 0, over = 1;
        for (int step = 0; over; step++) {
            begin();
            memset(&other_end, 0, sizeof other_end);
            cudaStream_t s = other_end.stream = stream_new();
            galloc_pool *pool = pool_new(NULL);
            OK(galloc_graph_begin(&other_end.group, pool, s));
            if (release) OK(galloc_graph_end(other_end.group));
            other_end.left = step;
            inside_on_step = end_the_group;
            cudaError_t error = release ? galloc_graph_release(other_end.group, release == 1 ? GALLOC_NO_STREAM : s)
                                        : galloc_graph_end(other_end.group);
            inside_on_step = NULL;
            over = other_end.over;
            EXPECT(is_one_of(error, cudaErrorInvalidResourceHandle, cudaSuccess));
            EXPECT(is_one_of(other_end.error, cudaErrorInvalidResourceHandle, cudaSuccess));
            if (over) EXPECT_EQ((release && !error) + (other_end.error == cudaSuccess), 1);
            if (!over && !release) OK(galloc_graph_release(other_end.group, s));
            gone += over && error;
            pool_end(pool);
            stream_end(s);
            finish();
            EXPECT(step < 100);
        }
        EXPECT(gone > 1);
    }
}

/* A group ends in the middle of the first call in a capture of the group, or of one on a stream that has just joined
   it: the call succeeds. */
TEST(a_group_ends_in_the_middle_of_a_call_of_its_capture)
{
    for (int way = 0; way < 3; way++) {
        int over = 1, frees = way == 1, is_first = way == 2;
        for (int step = 0; over; step++) {
            begin();
            memset(&other_end, 0, sizeof other_end);
            cudaStream_t s = stream_new(), joined = stream_new();
            cudaGraph_t graph = NULL;
            galloc_pool *pool = pool_new(NULL);
            void *p = NULL, *q = NULL;
            other_end.stream = stream_new();
            OK(galloc_graph_begin(&other_end.group, pool, s));
            OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
            if (!is_first) p = get(pool, MIB(1), s);
            order(s, joined);
            other_end.left = step;
            inside_on_step = end_the_group;
            if (frees) OK(galloc_free(p, joined));
            else OK(galloc_pool_malloc(pool, &q, MIB(1), joined));
            inside_on_step = NULL;
            over = other_end.over;
            EXPECT_EQ(galloc_pool_check(pool), 0);
            if (over) OK(other_end.error);
            else OK(galloc_graph_end(other_end.group));
            if (!frees) OK(galloc_free(q, joined));
            order(joined, s);
            if (p && !frees) OK(galloc_free(p, s));
            OK(cudaStreamEndCapture(s, &graph));
            OK(cudaGraphDestroy(graph));
            if (!over) OK(galloc_graph_release(other_end.group, other_end.stream));
            pool_end(pool);
            stream_end(s);
            stream_end(joined);
            stream_end(other_end.stream);
            finish();
            EXPECT(step < 100);
        }
    }
}

static struct {
    galloc_pool *pool;
    pthread_t first, second;
    int left; /* steps of the first until the second begins */
    int begun, over;
    cudaError_t error[2];
} destroys;

static void *destroy_as_second(void *unused)
{
    OK(cudaSetDevice(0));
    destroys.error[1] = galloc_pool_destroy(destroys.pool);
    __atomic_store_n(&destroys.over, 1, __ATOMIC_RELEASE);
    return unused;
}

static void let_the_second_destroy(const char *function, int locks)
{
    (void)function;
    if (locks || !pthread_equal(pthread_self(), destroys.first) || destroys.begun || destroys.left-- != 0) return;
    destroys.begun = 1;
    EXPECT_EQ(pthread_create(&destroys.second, NULL, destroy_as_second, NULL), 0);
    for (int i = 0; i < 200 && !__atomic_load_n(&destroys.over, __ATOMIC_ACQUIRE); i++) usleep(100);
}

/* A thread is anywhere in galloc_pool_destroy when another one ends the same pool: one of them ends it, and none waits
   for ever. */
TEST(a_pool_is_destroyed_by_one_of_two_threads)
{
    for (int step = 0; !step || destroys.begun; step++) {
        begin();
        memset(&destroys, 0, sizeof destroys);
        destroys.pool = pool_new(NULL);
        destroys.first = pthread_self();
        destroys.left = step;
        inside_on_step = let_the_second_destroy;
        destroys.error[0] = galloc_pool_destroy(destroys.pool);
        if (destroys.begun) EXPECT_EQ(pthread_join(destroys.second, NULL), 0);
        inside_on_step = NULL;
        for (int i = 0; destroys.begun && i < 2; i++)
            EXPECT(is_one_of(destroys.error[i], cudaErrorNotPermitted, cudaSuccess) ||
                   destroys.error[i] == cudaErrorInvalidResourceHandle);
        if (destroys.begun) EXPECT_EQ((destroys.error[0] == cudaSuccess) + (destroys.error[1] == cudaSuccess), 1);
        finish();
        EXPECT(step < 200);
    }
}

/* That a pool is used by others while it ends is the program's mistake, and costs it an error, no more. */
TEST(calls_come_late_to_a_pool_that_ends)
{
    pthread_t thread[LATE];
    const char *rounds = getenv("GALLOC_ROUNDS");
    int n = rounds && *rounds ? 2 * atoi(rounds) : 60;
    begin();
    memset(&late, 0, sizeof late);
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    late.pool = pool;
    late.address = &late;
    late.graph = (galloc_graph *)(void *)&late;
    for (int i = 0; i < LATE; i++) late.stream[i] = stream_new();
    for (int i = 0; i < LATE; i++) EXPECT_EQ(pthread_create(&thread[i], NULL, come_late, &late.stream[i]), 0);
    for (int i = 0; i < n; i++) {
        galloc_config config = kind_of_pool(i % ASYNC);
        galloc_graph *graph = NULL;
        cudaError_t error;
        void *p = NULL, *q = NULL;
        error = galloc_pool_malloc(pool, &p, MIB(3), s);
        if (!error) (void)galloc_graph_begin(&graph, pool, s);
        if (graph) __atomic_store_n(&late.graph, graph, __ATOMIC_RELEASE);
        OK(galloc_free(p, s));
        if (p && galloc_malloc(&q, MIB(3), s) == cudaSuccess) OK(galloc_free(q, s));
        if (p) __atomic_store_n(&late.address, (char *)p + 1, __ATOMIC_RELEASE);
        while ((error = galloc_pool_destroy(pool)) == cudaErrorNotPermitted) usleep(100);
        OK(error);
        pool = pool_new(&config);
        __atomic_store_n(&late.pool, pool, __ATOMIC_RELEASE);
    }
    __atomic_store_n(&late.stop, 1, __ATOMIC_RELEASE);
    for (int i = 0; i < LATE; i++) EXPECT_EQ(pthread_join(thread[i], NULL), 0);
    pool_end(pool);
    finish();
}

/* A call is in the default pool, and another thread waits to end that: nothing else finds the pool meanwhile. */
static struct {
    cudaStream_t stream;
    pthread_t thread;
    galloc_graph *group;
    void *freed;
    int asked;
    cudaError_t ended;
} waiting;

static void *end_the_default(void *unused)
{
    OK(cudaSetDevice(0));
    waiting.ended = galloc_shutdown();
    return unused;
}

static int call_what_waits_for_its_end(const galloc_report *report, void *user)
{
    void *p = &p;
    (void)user;
    sim_fail_clear();
    if (waiting.asked++) return 0;
    EXPECT_EQ(pthread_create(&waiting.thread, NULL, end_the_default, NULL), 0);
    while (!inside_ended(report->pool)) usleep(100);
    EXPECT_EQ(galloc_free(waiting.freed, waiting.stream), cudaErrorInvalidDevicePointer);
    EXPECT(strstr(galloc_last_message(), "not memory of galloc"));
    EXPECT_EQ(info_of(waiting.freed).state, GALLOC_STATE_FOREIGN);
    EXPECT_EQ(galloc_malloc(&p, MIB(20), waiting.stream), cudaErrorInvalidResourceHandle);
    EXPECT(p == NULL);
    expect_no_graph(waiting.group, NULL, waiting.stream);
    OK(galloc_shutdown()); /* the other thread ends the pool */
    return 0;
}

TEST(nothing_finds_a_pool_that_waits_for_its_end)
{
    begin_still();
    galloc_pool *pool = NULL;
    galloc_callbacks calls = {0};
    void *p = NULL;
    memset(&waiting, 0, sizeof waiting);
    waiting.stream = stream_new();
    setenv("GALLOC_CONF", "wait_limit_ms:0", 1); /* what was freed keeps its pages while work may use it */
    OK(galloc_pool_default(&pool, 0));
    unsetenv("GALLOC_CONF");
    OK(galloc_graph_begin(&waiting.group, NULL, waiting.stream));
    OK(galloc_graph_end(waiting.group));
    waiting.freed = get_used(pool, MIB(4), waiting.stream, 1);
    OK(galloc_free(waiting.freed, waiting.stream));
    calls.on_oom = call_what_waits_for_its_end;
    OK(galloc_pool_set_callbacks(pool, &calls));
    sim_fail("cuMemCreate", 1, 1, CUDA_ERROR_OUT_OF_MEMORY);
    EXPECT_EQ(galloc_malloc(&p, MIB(30), waiting.stream), cudaErrorMemoryAllocation);
    sim_fail_clear();
    EXPECT_EQ(pthread_join(waiting.thread, NULL), 0);
    OK(waiting.ended);
    finish();
}

/* A thread that has used the pool asks for memory of it, without asking whether it ends, when it has been found unused
   and is about to be given back. */
static struct {
    galloc_pool *pool;
    cudaStream_t stream;
    pthread_t ends;
    int warm, now, done;
    int left; /* steps of the end until then */
    cudaError_t error;
    void *got;
} last_moment;

static void *ask_at_the_last_moment(void *arg)
{
    void *p = NULL;
    (void)arg;
    OK(cudaSetDevice(0));
    for (int i = 0; i < 3; i++) OK(galloc_free(get(last_moment.pool, 4096, last_moment.stream), last_moment.stream));
    __atomic_store_n(&last_moment.warm, 1, __ATOMIC_RELEASE);
    while (!__atomic_load_n(&last_moment.now, __ATOMIC_ACQUIRE)) usleep(100);
    last_moment.error = galloc_pool_malloc(last_moment.pool, &p, 4096, last_moment.stream);
    last_moment.got = p;
    __atomic_store_n(&last_moment.done, 1, __ATOMIC_RELEASE);
    return NULL;
}

static void at_the_last_moment(const char *function)
{
    if (last_moment.now || strcmp(function, "cuEventQuery") || !pthread_equal(pthread_self(), last_moment.ends)) return;
    __atomic_store_n(&last_moment.now, 1, __ATOMIC_RELEASE);
    while (!__atomic_load_n(&last_moment.done, __ATOMIC_ACQUIRE)) usleep(100);
}

static void end_at_the_last_moment(const char *conf)
{
    pthread_t thread;
    begin();
    galloc_config config = galloc_config_default();
    OK(galloc_config_parse(&config, conf, NULL, 0));
    memset(&last_moment, 0, sizeof last_moment);
    last_moment.pool = pool_new(&config);
    last_moment.stream = stream_new();
    last_moment.ends = pthread_self();
    EXPECT_EQ(pthread_create(&thread, NULL, ask_at_the_last_moment, NULL), 0);
    while (!__atomic_load_n(&last_moment.warm, __ATOMIC_ACQUIRE)) usleep(100);
    cudaStream_t s = stream_new(), t = stream_new();
    void *p = get(last_moment.pool, MIB(4), s);
    sim_hold(t, 1);
    put(t, p, MIB(4), 1);
    OK(galloc_record_stream(p, t));
    OK(galloc_free(p, s));
    sim_hold(t, 0);
    sim_hook(at_the_last_moment, NULL);
    OK(galloc_pool_destroy(last_moment.pool));
    sim_hook(NULL, NULL);
    EXPECT(last_moment.now);
    last_moment.now = 1;
    EXPECT_EQ(pthread_join(thread, NULL), 0);
    EXPECT_EQ(last_moment.error, cudaErrorInvalidResourceHandle);
    finish();
}

TEST(what_is_free_at_the_end_stays_so)
{
    end_at_the_last_moment("");
    end_at_the_last_moment("strategy:pooled");
    end_at_the_last_moment("roundup_power2_divisions:4");
}

static void at_one_step(const char *function, int locks)
{
    (void)function, (void)locks;
    if (last_moment.now || !pthread_equal(pthread_self(), last_moment.ends) || last_moment.left-- != 0) return;
    __atomic_store_n(&last_moment.now, 1, __ATOMIC_RELEASE);
    while (!__atomic_load_n(&last_moment.done, __ATOMIC_ACQUIRE)) usleep(100);
}

/* At any step of the end: either the thread is refused, or the pool, which is in use then. */
TEST(a_pool_ends_or_gives_memory)
{
    for (int step = 0, came = 1; came; step++) {
        pthread_t thread;
        begin();
        memset(&last_moment, 0, sizeof last_moment);
        last_moment.pool = pool_new(NULL);
        last_moment.stream = stream_new();
        last_moment.ends = pthread_self();
        last_moment.left = step;
        EXPECT_EQ(pthread_create(&thread, NULL, ask_at_the_last_moment, NULL), 0);
        while (!__atomic_load_n(&last_moment.warm, __ATOMIC_ACQUIRE)) usleep(100);
        inside_on_step = at_one_step;
        cudaError_t error = galloc_pool_destroy(last_moment.pool);
        inside_on_step = NULL;
        came = last_moment.now;
        __atomic_store_n(&last_moment.now, 1, __ATOMIC_RELEASE);
        EXPECT_EQ(pthread_join(thread, NULL), 0);
        EXPECT_EQ(error, last_moment.got ? cudaErrorNotPermitted : cudaSuccess);
        if (last_moment.got) OK(galloc_free(last_moment.got, last_moment.stream));
        if (error) pool_end(last_moment.pool);
        finish();
        EXPECT(step < 200);
    }
}

/* A free looks whether something is to be collected, and another thread ends the pool at one of its steps. */
static struct {
    galloc_pool *pool;
    pthread_t frees, ends;
    int left; /* steps until then */
    int refused, ended;
    int late; /* steps of the free after the end */
} end_beside;

static void *end_beside_it(void *unused)
{
    cudaError_t error = galloc_pool_destroy(end_beside.pool);
    EXPECT(!error || error == cudaErrorNotPermitted); /* the block is in use still */
    __atomic_store_n(error ? &end_beside.refused : &end_beside.ended, 1, __ATOMIC_RELEASE);
    return unused;
}

static void end_at_one_step(const char *function, int locks)
{
    (void)function, (void)locks;
    if (!pthread_equal(pthread_self(), end_beside.frees)) return;
    end_beside.late += __atomic_load_n(&end_beside.ended, __ATOMIC_ACQUIRE);
    if (end_beside.left-- != 0) return;
    EXPECT_EQ(pthread_create(&end_beside.ends, NULL, end_beside_it, NULL), 0);
    for (int i = 0; i < 100 && !__atomic_load_n(&end_beside.ended, __ATOMIC_ACQUIRE); i++) usleep(100);
}

/* A call does nothing more with a pool that has ended; else the pool waits for the call. */
TEST(a_free_goes_no_further_in_a_pool_that_has_ended)
{
    for (int step = 0, came = 1; came; step++) {
        begin();
        galloc_config config = galloc_config_default();
        config.gc_threshold = 1e-6; /* there is something to collect after each free */
        config.lane_bytes = 0;
        memset(&end_beside, 0, sizeof end_beside);
        end_beside.pool = pool_new(&config);
        end_beside.frees = pthread_self();
        end_beside.left = step;
        cudaStream_t s = stream_new();
        void *p = get(end_beside.pool, MIB(4), s);
        inside_on_step = end_at_one_step;
        OK(galloc_free(p, s));
        __atomic_store_n(&inside_on_step, NULL, __ATOMIC_RELAXED); /* the other thread may be in a call still */
        came = end_beside.left < 0;
        if (came) EXPECT_EQ(pthread_join(end_beside.ends, NULL), 0);
        if (!came || end_beside.refused) OK(galloc_pool_destroy(end_beside.pool));
        EXPECT_EQ(end_beside.late, 0);
        stream_end(s);
        finish();
        EXPECT(step < 200);
    }
}

/* Fills the stream's cache when the call that ends the pool has emptied all caches, and has not shut them yet. */
static void *fill_a_cache(void *arg)
{
    cudaStream_t s = last_moment.stream;
    (void)arg;
    OK(cudaSetDevice(0));
    OK(galloc_free(get(last_moment.pool, 4096, s), s));
    __atomic_store_n(&last_moment.warm, 1, __ATOMIC_RELEASE);
    while (!__atomic_load_n(&last_moment.now, __ATOMIC_ACQUIRE)) usleep(100);
    void *p = get(last_moment.pool, 4096, s), *q = get(last_moment.pool, 8192, s);
    OK(galloc_free(p, s));
    OK(galloc_free(q, s));
    OK(galloc_free(get(last_moment.pool, 4096, s), s)); /* confirms the other one */
    __atomic_store_n(&last_moment.done, 1, __ATOMIC_RELEASE);
    return NULL;
}

static void when_caches_are_empty(const char *function)
{
    static int entered;
    if (last_moment.now || !pthread_equal(pthread_self(), last_moment.ends)) return;
    if (!strcmp(function, "cuThreadExchangeStreamCaptureMode")) entered = 1;
    if (!entered || strcmp(function, "cuCtxGetId")) return;
    entered = 0;
    __atomic_store_n(&last_moment.now, 1, __ATOMIC_RELEASE);
    while (!__atomic_load_n(&last_moment.done, __ATOMIC_ACQUIRE)) usleep(100);
}

TEST(what_comes_into_a_cache_while_its_pool_ends_is_found)
{
    pthread_t thread;
    begin();
    memset(&last_moment, 0, sizeof last_moment);
    last_moment.pool = pool_new(NULL);
    last_moment.stream = stream_new();
    last_moment.ends = pthread_self();
    EXPECT_EQ(pthread_create(&thread, NULL, fill_a_cache, NULL), 0);
    while (!__atomic_load_n(&last_moment.warm, __ATOMIC_ACQUIRE)) usleep(100);
    sim_hook(when_caches_are_empty, NULL);
    OK(galloc_pool_destroy(last_moment.pool));
    sim_hook(NULL, NULL);
    EXPECT(last_moment.now);
    __atomic_store_n(&last_moment.now, 1, __ATOMIC_RELEASE);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
    finish();
}

/* ---- the end of a pool, seen by threads that nothing else orders ----------------------------------------------- */

/* Two threads tell each other how far they are without ordering their accesses to memory. So ThreadSanitizer finds what
   galloc itself leaves without order. */
static struct {
    galloc_pool *pool;
    cudaStream_t stream;
    pthread_t ends;
    int warm, now, done, over;
    cudaError_t error;
} unordered;

static void say(int *what) { __atomic_store_n(what, 1, __ATOMIC_RELAXED); }

static void hear(const int *what)
{
    while (!__atomic_load_n(what, __ATOMIC_RELAXED)) usleep(100);
}

static void *ask_a_shut_cache(void *arg)
{
    void *p = NULL;
    (void)arg;
    OK(cudaSetDevice(0));
    for (int i = 0; i < 3; i++) OK(galloc_free(get(unordered.pool, 4096, unordered.stream), unordered.stream));
    say(&unordered.warm);
    hear(&unordered.now);
    unordered.error = galloc_pool_malloc(unordered.pool, &p, 4096, unordered.stream);
    say(&unordered.done);
    hear(&unordered.over); /* the end of a thread takes a lock of the simulated device */
    return NULL;
}

static void while_addresses_go(const char *function)
{
    if (!pthread_equal(pthread_self(), unordered.ends) || unordered.now || strcmp(function, "cuMemAddressFree")) return;
    say(&unordered.now);
    hear(&unordered.done);
}

/* Without looks at the stream the call touches only the stream's cache, which is shut by then. */
TEST(a_late_call_and_the_end_of_its_pool_share_a_cache_in_order)
{
    pthread_t thread;
    begin();
    galloc_config config = galloc_config_default();
    OK(galloc_config_parse(&config, "stream_check:off", NULL, 0));
    memset(&unordered, 0, sizeof unordered);
    unordered.pool = pool_new(&config);
    unordered.stream = stream_new();
    unordered.ends = pthread_self();
    EXPECT_EQ(pthread_create(&thread, NULL, ask_a_shut_cache, NULL), 0);
    hear(&unordered.warm);
    sim_hook(while_addresses_go, NULL);
    OK(galloc_pool_destroy(unordered.pool));
    sim_hook(NULL, NULL);
    EXPECT(unordered.now);
    say(&unordered.now);
    say(&unordered.over);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
    EXPECT_EQ(unordered.error, cudaErrorInvalidResourceHandle);
    finish();
}

static int stop_in_the_middle(void *unused, const void *data, size_t bytes)
{
    (void)unused, (void)data, (void)bytes;
    say(&unordered.now);
    hear(&unordered.done);
    return 0;
}

static void *copy_a_pool(void *arg)
{
    (void)arg;
    OK(galloc_snapshot(unordered.pool, GALLOC_SNAPSHOT_JSON, stop_in_the_middle, NULL));
    return NULL;
}

/* The thread that writes a snapshot has left the pool, but has released no lock since it read from it. ThreadSanitizer
   remembers only some of the accesses, hence the rounds. */
TEST(a_pool_is_written_anew_after_all_calls_in_it)
{
    begin();
    for (int i = 0; i < 20; i++) {
        pthread_t thread;
        memset(&unordered, 0, sizeof unordered);
        unordered.pool = pool_new(NULL);
        EXPECT_EQ(pthread_create(&thread, NULL, copy_a_pool, NULL), 0);
        hear(&unordered.now);
        OK(galloc_pool_destroy(unordered.pool));
        galloc_pool *next = pool_new(NULL);
        say(&unordered.done);
        EXPECT_EQ(pthread_join(thread, NULL), 0);
        pool_end(next);
    }
    finish();
}

static void *name_the_former_pool(void *arg)
{
    galloc_config config;
    (void)arg;
    hear(&unordered.now);
    unordered.error = galloc_pool_config(unordered.pool, &config);
    return NULL;
}

/* A call that names a pool that has ended comes to the next one in its memory, which has just begun. */
TEST(a_late_call_sees_all_of_the_next_pool)
{
    begin();
    for (int i = 0; i < 20; i++) {
        pthread_t thread;
        memset(&unordered, 0, sizeof unordered);
        unordered.pool = pool_new(NULL);
        pool_end(unordered.pool);
        EXPECT_EQ(pthread_create(&thread, NULL, name_the_former_pool, NULL), 0);
        galloc_pool *next = pool_new(NULL);
        say(&unordered.now);
        EXPECT_EQ(pthread_join(thread, NULL), 0);
        EXPECT_EQ(unordered.error, cudaErrorInvalidResourceHandle);
        pool_end(next);
    }
    finish();
}

static void stop_when_forgotten(void)
{
    if (!pthread_equal(pthread_self(), unordered.ends) || unordered.now || inside_captures(unordered.pool)) return;
    say(&unordered.now);
    hear(&unordered.done);
}

static void stop_at_a_call(const char *function)
{
    (void)function;
    stop_when_forgotten();
}

static void *end_the_graph(void *graph)
{
    hear(&unordered.now);
    OK(cudaGraphDestroy(graph));
    say(&unordered.done);
    return NULL;
}

/* The pool has given up its share in a capture, and has released no lock since. The graph's is the last. */
TEST(a_capture_is_freed_after_all_that_the_pool_did_with_it)
{
    pthread_t thread;
    cudaGraph_t graph = NULL;
    galloc_graph *group = NULL;
    begin();
    memset(&unordered, 0, sizeof unordered);
    unordered.pool = pool_new(NULL);
    unordered.ends = pthread_self();
    cudaStream_t s = stream_new();
    OK(galloc_graph_begin(&group, unordered.pool, s));
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    OK(galloc_free(get(unordered.pool, 4096, s), s));
    OK(cudaStreamEndCapture(s, &graph));
    OK(galloc_graph_end(group));
    EXPECT_EQ(inside_captures(unordered.pool), 1);
    sim_hook(stop_at_a_call, NULL);
    inside_on_free = stop_when_forgotten;
    EXPECT_EQ(pthread_create(&thread, NULL, end_the_graph, graph), 0);
    OK(galloc_graph_release(group, s));
    EXPECT(unordered.now);
    say(&unordered.now);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
    inside_on_free = NULL;
    sim_hook(NULL, NULL);
    pool_end(unordered.pool);
    finish();
}

/* A call finds what its thread remembers of a pool, and its stream cache does not serve it. Before it gets to the pool,
   that has ended and another one has its memory. On legacy such a call asks whether anything may be called on it. */
static struct {
    galloc_pool *pool, *next;
    galloc_config config;
    int go;
} replaced;

static void replace(const char *function)
{
    if (!replaced.go || strcmp(function, "cuStreamIsCapturing")) return;
    replaced.go = 0;
    OK(galloc_pool_destroy(replaced.pool));
    replaced.next = pool_new(&replaced.config);
}

TEST(what_a_thread_remembers_leads_to_no_other_pool)
{
    static const char *const confs[] = {"", "strategy:pooled", "roundup_power2_divisions:4", "stats:exact"};
    for (size_t i = 0; i < sizeof confs / sizeof confs[0]; i++) {
        begin();
        cudaStream_t s = cudaStreamLegacy;
        void *p = NULL;
        memset(&replaced, 0, sizeof replaced);
        replaced.config = galloc_config_default();
        OK(galloc_config_parse(&replaced.config, confs[i], NULL, 0));
        replaced.pool = pool_new(&replaced.config);
        for (int k = 0; k < 2; k++) OK(galloc_free(get(replaced.pool, 4096, s), s));
        EXPECT(inside_remembers(s, replaced.pool));
        replaced.go = 1;
        sim_hook(replace, NULL);
        EXPECT_EQ(galloc_pool_malloc(replaced.pool, &p, KIB(64), s), cudaErrorInvalidResourceHandle);
        sim_hook(NULL, NULL);
        EXPECT(p == NULL && !replaced.go);
        EXPECT_EQ(stats_of(replaced.next).mallocs, 0);
        pool_end(replaced.next);
        finish();
    }
}

/* Two threads that free one block at the same time, each on a stream of its own: one of them gets it. */
static struct {
    void *p;
    pthread_barrier_t ready;
    cudaError_t error[2];
} twice;

static void *free_it_too(void *i)
{
    OK(cudaSetDevice(0));
    cudaStream_t s = stream_new();
    galloc_pool *pool = info_of(twice.p).pool;
    for (int k = 0; k < 2; k++) OK(galloc_free(get(pool, 512, s), s));
    for (int k = 0; k < 2; k++) pthread_barrier_wait(&twice.ready);
    twice.error[(intptr_t)i] = galloc_free(twice.p, s);
    return NULL;
}

TEST(a_block_is_freed_by_one_of_two_threads)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    pthread_t thread[2];
    unsigned long long id = stream_id(s);
    twice.p = get(pool, KIB(64), s);
    EXPECT_EQ(pthread_barrier_init(&twice.ready, NULL, 3), 0);
    for (intptr_t i = 0; i < 2; i++) EXPECT_EQ(pthread_create(&thread[i], NULL, free_it_too, (void *)i), 0);
    pthread_barrier_wait(&twice.ready);
    inside_hold_cache(pool, id, 1);
    pthread_barrier_wait(&twice.ready);
    usleep(20000); /* both look at the block, and then wait for the latch that guards it */
    inside_hold_cache(pool, id, 0);
    for (int i = 0; i < 2; i++) EXPECT_EQ(pthread_join(thread[i], NULL), 0);
    pthread_barrier_destroy(&twice.ready);
    EXPECT((twice.error[0] == cudaSuccess) + (twice.error[1] == cudaSuccess) == 1);
    EXPECT((twice.error[0] == cudaErrorInvalidDevicePointer) + (twice.error[1] == cudaErrorInvalidDevicePointer) == 1);
    pool_end(pool);
    finish();
}

static struct {
    galloc_pool *former, *next;
    void *at, *taken; /* the block of the next pool */
    int left;         /* steps until the address changes hands */
} changing;

static void let_the_address_change_hands(const char *function, int locks)
{
    (void)function, (void)locks;
    if (changing.left-- != 0) return;
    inside_on_step = NULL;
    OK(galloc_pool_trim(changing.former, 0, NULL));
    changing.taken = get(changing.next, MIB(20), NULL);
    EXPECT(changing.taken == changing.at);
}

static void find_a_block_whose_address_changes_hands(int backend)
{
    for (int step = 0, changed = 1; changed; step++) {
        begin();
        galloc_config config = config_fixed();
        config.backend = backend;
        galloc_pool *former = pool_new(&config), *next = pool_new(&config);
        void *p = get(former, MIB(20), NULL);
        OK(galloc_free(p, NULL));
        changing.former = former;
        changing.next = next;
        changing.at = p;
        changing.taken = NULL;
        changing.left = step;
        inside_on_step = let_the_address_change_hands;
        galloc_pointer info = info_of(p);
        inside_on_step = NULL;
        changed = changing.taken != NULL;
        EXPECT(info.state != GALLOC_STATE_USED || info.pool == next);
        EXPECT(info.state != GALLOC_STATE_FREE || info.pool == former);
        if (changed) OK(galloc_free(p, NULL));
        pool_end(former);
        pool_end(next);
        finish();
        EXPECT(step < 100);
    }
}

/* The driver may give the addresses of a segment that a pool returned to another pool, while a call about one of them
   is about to ask the former. It finds no block of the next pool there. */
TEST(a_block_is_found_in_its_own_pool_only)
{
    find_a_block_whose_address_changes_hands(GALLOC_BACKEND_NATIVE);
    find_a_block_whose_address_changes_hands(GALLOC_BACKEND_CUDA_MALLOC);
}

/* ---- what may come while the default pool is made ---------------------------------------------------------------- */

static pthread_barrier_t first_use;

static void *use_first(void *pool)
{
    void *p = NULL;
    OK(cudaSetDevice(0));
    pthread_barrier_wait(&first_use);
    OK(galloc_pool_default((galloc_pool **)pool, 0));
    OK(galloc_malloc(&p, 1000, cudaStreamPerThread));
    EXPECT(info_of(p).pool == *(galloc_pool **)pool);
    OK(galloc_free(p, cudaStreamPerThread));
    return NULL;
}

/* Another call makes the default pool while this one does: its own, which nobody gets, leaves nothing behind. */
static int made_meanwhile;

static void make_meanwhile(const char *function)
{
    galloc_pool *pool = NULL;
    if (made_meanwhile || strcmp(function, "cuDevicePrimaryCtxRetain")) return;
    made_meanwhile = 1;
    OK(galloc_pool_default(&pool, 0));
}

TEST(a_default_pool_that_comes_second_leaves_nothing)
{
    static const char *const confs[] = {"", "backend:cudaMalloc", "backend:cudaMallocAsync", "like:pytorch",
                                        "history:100"};
    for (size_t i = 0; i < sizeof confs / sizeof confs[0]; i++) {
        galloc_pool *pool = NULL;
        begin();
        setenv("GALLOC_CONF", confs[i], 1);
        made_meanwhile = 0;
        sim_hook(make_meanwhile, NULL);
        OK(galloc_pool_default(&pool, 0));
        sim_hook(NULL, NULL);
        EXPECT(made_meanwhile);
        unsetenv("GALLOC_CONF");
        OK(galloc_shutdown());
        EXPECT_EQ(sim_calls("cuMemPoolDestroy"), sim_calls("cuMemPoolCreate"));
        finish();
    }
}

static long idle_settings;

static void count_idle_settings(void) { idle_settings += strstr(log_text, "no effect") != NULL; }

static void *make_as_another(void *unused)
{
    galloc_pool *pool = NULL;
    OK(galloc_pool_default(&pool, 0));
    return unused;
}

static void make_by_another_thread(const char *function)
{
    pthread_t thread;
    if (made_meanwhile || strcmp(function, "cuDevicePrimaryCtxRetain")) return;
    made_meanwhile = 1;
    EXPECT_EQ(pthread_create(&thread, NULL, make_as_another, NULL), 0);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
}

/* What the log says of the settings of the default pool it says once, of the pool that the calls get. */
TEST(a_default_pool_that_comes_second_says_nothing)
{
    galloc_pool *pool = NULL;
    begin();
    setenv("GALLOC_CONF", "backend:cudaMalloc,gc_age:1s", 1);
    made_meanwhile = 0;
    idle_settings = 0;
    log_hook = count_idle_settings;
    sim_hook(make_by_another_thread, NULL);
    OK(galloc_pool_default(&pool, 0));
    sim_hook(NULL, NULL);
    log_hook = NULL;
    EXPECT(made_meanwhile);
    EXPECT_EQ(idle_settings, 1);
    unsetenv("GALLOC_CONF");
    finish();
}

TEST(threads_that_come_first_together_get_one_default_pool)
{
    enum { TOGETHER = 4 };
    static const char *const confs[] = {"", "backend:cudaMallocAsync"};
    for (int round = 0; round < 20; round++) {
        pthread_t thread[TOGETHER];
        galloc_pool *pool[TOGETHER];
        begin();
        setenv("GALLOC_CONF", confs[round % 2], 1);
        OK(cudaFree(0));
        EXPECT_EQ(pthread_barrier_init(&first_use, NULL, TOGETHER), 0);
        for (int i = 0; i < TOGETHER; i++) EXPECT_EQ(pthread_create(&thread[i], NULL, use_first, &pool[i]), 0);
        for (int i = 0; i < TOGETHER; i++) EXPECT_EQ(pthread_join(thread[i], NULL), 0);
        for (int i = 1; i < TOGETHER; i++) EXPECT(pool[i] == pool[0]);
        pthread_barrier_destroy(&first_use);
        unsetenv("GALLOC_CONF");
        finish();
    }
}

/* A pool has the memory of one that ended: the message names the handle that the call was given. */
TEST(a_former_handle_is_named_as_it_was_given)
{
    begin();
    galloc_pool *former = NULL, *pool = NULL;
    for (int round = 0; round < 4; round++) {
        galloc_stats stats;
        char text[64];
        pool = pool_limited(MIB(8));
        if (former) {
            EXPECT(pool != former);
            EXPECT_EQ(galloc_pool_stats(former, &stats), cudaErrorInvalidResourceHandle);
            snprintf(text, sizeof text, "%p is no pool", (void *)former);
            EXPECT(strstr(galloc_last_message(), text) != NULL);
        }
        former = pool;
        pool_end(pool);
    }
    finish();
}

/* Handles repeat after as many pools as a pool has bytes. Those before and after are all accepted. */
TEST(each_handle_is_accepted_also_when_handles_repeat)
{
    begin();
    galloc_pool *pools[5];
    for (int i = 0; i < 5; i++) {
        galloc_config config;
        pools[i] = pool_new(NULL);
        OK(galloc_pool_config(pools[i], &config));
        if (i > 0) EXPECT_EQ(galloc_pool_config(pools[i - 1], &config), cudaErrorInvalidResourceHandle);
        if (i == 0) inside_leave_handles(pools[i], 2);
        pool_end(pools[i]);
    }
    EXPECT(pools[2] > pools[1] && pools[3] < pools[1]); /* they begin again */
    finish();
}

TEST_MAIN()
