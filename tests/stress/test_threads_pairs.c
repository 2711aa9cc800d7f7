/* test_threads_pairs.c - each public function in one thread while another thread is in each of the others, in pools of
   all kinds on two devices. What is read or written without its lock, or shown before it is complete, ThreadSanitizer
   sees; so nothing here orders the two threads while they are in galloc: what they share is relaxed.
   GALLOC_ROUNDS=50 makes it longer: so many times as long for each meeting; GALLOC_SEED another one. */

#include "setup.h"

enum { DEVICES = 2, SHARED = 2, BOXES = 4, TAGS = 8 };

#define LIMIT MIB(64)

/* Pools of these settings; those of NULL are default pools. */
static const struct {
    const char *settings;
    int device;
} kinds[] = {
    {NULL, 0},
    {NULL, 1},
    {"memory_limit:64M,history:64,history_stacks:4", 0},
    {"like:pytorch,expandable_segments:False,memory_limit:64M,garbage_collection_threshold:0.5", 0},
    {"strategy:heuristic,memory_limit:64M,device_limit:256M", 1},
    {"strategy:pooled,debug:guards+poison+quarantine,memory_limit:64M", 1},
    {"backend:cudaMallocAsync,memory_limit:64M", 0},
    {"backend:cudaMalloc,memory_limit:64M,stats:exact", 1},
    {"memory_limit:64M,gc_age:1ms,growth:2M,overhead:0", 0},
};
enum { KINDS = sizeof kinds / sizeof *kinds, NATIVE = 2, HEURISTIC = 4, ASYNC = 6 };

static struct {
    galloc_pool *pool[KINDS];
    cudaStream_t shared[DEVICES][SHARED];
    char json[60], pickle[60], trace[60]; /* files in a folder of their own */
    uint64_t span; /* nanoseconds that each meeting takes, at least */
    int fresh; /* nothing of galloc has been used yet: both threads make the default pool */

    /* Of this meeting. */
    int kind, device;
    int done[2];          /* calls so far */
    galloc_pool *pool_met;
    galloc_pool *brief;   /* a pool that will end soon, or NULL */
    void *box[BOXES];     /* blocks of the pool, of the device's first shared stream */
    long oom_calls, maps; /* of callbacks */
} m;

typedef struct caller {
    int side;
    dice d;
    cudaStream_t own[DEVICES];
    long got, freed, failed; /* blocks of the pool that is met */

    /* Of this call. */
    galloc_pool *pool;
    int is_brief;            /* that pool may end at any time */
    cudaStream_t stream, other;
} caller;

static void *shared_load(void *place) { return __atomic_load_n((void **)place, __ATOMIC_RELAXED); }
static void *shared_swap(void *place, void *p) { return __atomic_exchange_n((void **)place, p, __ATOMIC_RELAXED); }
static void shared_count(long *n) { __atomic_fetch_add(n, 1, __ATOMIC_RELAXED); }

/* Returns whether a call did what it should. It may also have failed with `also`, or for a pool that has ended. */
static int went_well(const caller *c, cudaError_t error, cudaError_t also, int line, const char *text)
{
    int excused = error == also || (c->is_brief && error == cudaErrorInvalidResourceHandle);
    if (error && excused) return 0;
    return test_equals(error, cudaSuccess, __FILE__, line, text);
}
#define WELL(call, also) went_well(c, call, also, __LINE__, #call)

/* ---- blocks ------------------------------------------------------------------------------------------------------ */

/* Counts an allocation; returns the block, or NULL. */
static void *obtained(caller *c, cudaError_t error, void *ptr, const galloc_pool *pool)
{
    if (!WELL(error, cudaErrorMemoryAllocation)) EXPECT(ptr == NULL);
    if (pool == m.pool_met && ptr) c->got++;
    if (pool == m.pool_met && error == cudaErrorMemoryAllocation) c->failed++;
    return ptr;
}

static void freed(caller *c, cudaError_t error, const galloc_pool *pool)
{
    OK(error);
    if (pool == m.pool_met) c->freed++;
}

static size_t some_bytes(caller *c) { return roll_bytes(&c->d, roll_below(&c->d, 4) ? KIB(96) : MIB(5)); }

static void *obtain(caller *c, size_t bytes, cudaStream_t stream)
{
    void *ptr = c;
    cudaError_t error = galloc_pool_malloc(c->pool, &ptr, bytes, stream);
    return obtained(c, error, ptr, c->pool);
}

static void release(caller *c, void *ptr, cudaStream_t stream) { freed(c, galloc_free(ptr, stream), c->pool); }

/* Leaves a block for the other thread and frees the one that was there. */
static void leave(caller *c, void *ptr)
{
    cudaStream_t stream = m.shared[m.device][0];
    if (c->pool == m.pool_met) ptr = shared_swap(&m.box[roll_below(&c->d, BOXES)], ptr);
    if (ptr) release(c, ptr, stream);
}

/* ---- the functions ----------------------------------------------------------------------------------------------- */

static galloc_pool *standard_pool(void) { return m.fresh ? m.pool_met : m.pool[m.device]; }

/* Often enough that the stream's cache serves it. */
static void call_malloc(caller *c)
{
    size_t bytes = 1 + roll_below(&c->d, KIB(64));
    for (int i = 0; i < 12; i++) {
        void *ptr = c;
        cudaError_t error = galloc_malloc(&ptr, bytes, c->stream);
        if (obtained(c, error, ptr, standard_pool())) freed(c, galloc_free(ptr, c->stream), standard_pool());
    }
}

static void call_malloc_per_thread(caller *c)
{
    void *ptr = c;
    cudaError_t error = galloc_malloc(&ptr, some_bytes(c), cudaStreamPerThread);
    if (obtained(c, error, ptr, standard_pool())) freed(c, galloc_free(ptr, cudaStreamPerThread), standard_pool());
}

static void call_pool_malloc(caller *c)
{
    void *ptr = obtain(c, some_bytes(c), m.shared[m.device][0]);
    if (ptr) put(m.shared[m.device][0], ptr, 512, c->side);
    if (ptr) leave(c, ptr);
}

static void call_alloc(caller *c)
{
    galloc_request request = {0};
    void *ptr = c;
    request.bytes = some_bytes(c);
    request.pool = c->pool;
    request.stream = m.shared[m.device][0];
    request.alignment = (size_t)256 << roll_below(&c->d, 6);
    request.tag = roll_below(&c->d, TAGS);
    request.lifetime = (int)roll_below(&c->d, 2);
    cudaError_t error = galloc_alloc(&ptr, &request);
    if (obtained(c, error, ptr, c->pool)) leave(c, ptr);
}

static void call_free(caller *c)
{
    static char nothing;
    if (c->pool == m.pool_met) leave(c, NULL);
    EXPECT_EQ(galloc_free(&nothing, c->stream), cudaErrorInvalidDevicePointer);
    EXPECT(strstr(galloc_last_message(), "galloc_free"));
}

static void call_free_after(caller *c)
{
    cudaStream_t both[] = {c->stream, c->other};
    void *ptr = obtain(c, some_bytes(c), c->stream);
    if (!ptr) return;
    put(c->stream, ptr, 256, 1);
    order(c->stream, c->other);
    look(c->other, ptr, 256, 1);
    freed(c, galloc_free_after(ptr, both, 2), c->pool);
}

static void call_override_free(caller *c)
{
    int how = roll_below(&c->d, 2) ? GALLOC_OVERRIDE_STREAM : GALLOC_OVERRIDE_ORDERED; /* the third ends captures */
    void *ptr = obtain(c, some_bytes(c), c->stream);
    if (!ptr) return;
    put(c->stream, ptr, 256, 1);
    freed(c, galloc_override_free(ptr, c->stream, how), c->pool);
}

static void call_override_malloc(caller *c)
{
    void *ptr = c;
    cudaError_t error = galloc_override_malloc(&ptr, some_bytes(c));
    if (!obtained(c, error, ptr, NULL)) return;
    put(c->stream, ptr, 256, 1);
    freed(c, galloc_override_free(ptr, c->stream, GALLOC_OVERRIDE_ORDERED), NULL);
}

static void call_resize(caller *c)
{
    galloc_request request = {0};
    void *ptr = c;
    request.bytes = some_bytes(c);
    request.max_bytes = roll_below(&c->d, 2) ? MIB(8) : 0;
    request.pool = c->pool;
    request.stream = c->stream;
    cudaError_t error = galloc_alloc(&ptr, &request);
    if (!obtained(c, error, ptr, c->pool)) return;
    error = galloc_resize(ptr, MIB(1 + roll_below(&c->d, 7)), c->stream);
    EXPECT(!error || error == cudaErrorNotSupported || error == cudaErrorMemoryAllocation);
    (void)WELL(galloc_resize(ptr, 1, c->stream), cudaErrorNotSupported);
    release(c, ptr, c->stream);
}

static void call_malloc_growable(caller *c)
{
    void *ptr = c;
    cudaError_t error = galloc_malloc_growable(&ptr, some_bytes(c), MIB(6), c->stream);
    if (obtained(c, error, ptr, standard_pool())) freed(c, galloc_free(ptr, c->stream), standard_pool());
}

static void call_record_stream(caller *c)
{
    void *ptr = obtain(c, some_bytes(c), c->stream);
    if (!ptr) return;
    put(c->stream, ptr, 256, 2);
    order(c->stream, c->other);
    OK(galloc_record_stream(ptr, c->other));
    look(c->other, ptr, 256, 2);
    release(c, ptr, c->stream);
}

static void call_stream_retire(caller *c)
{
    cudaStream_t guest = stream_new();
    void *ptr = obtain(c, some_bytes(c), guest);
    if (ptr) put(guest, ptr, 256, 3);
    if (ptr) release(c, ptr, guest);
    OK(galloc_stream_retire(guest));
    stream_end(guest);
}

/* A graph whose memory is its own, or belongs to a group. */
static void capture(caller *c)
{
    cudaStream_t stream = c->own[m.device];
    cudaGraph_t graph = NULL;
    OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    void *ptr = obtain(c, some_bytes(c), stream);
    if (ptr) put(stream, ptr, 256, 4);
    if (ptr) release(c, ptr, stream);
    OK(cudaStreamEndCapture(stream, &graph));
    OK(cudaGraphDestroy(graph));
}

static void call_graphs(caller *c)
{
    galloc_graph *group = NULL;
    if (!WELL(galloc_graph_begin(&group, c->pool, c->own[m.device]), cudaErrorNotSupported)) return;
    capture(c);
    (void)WELL(galloc_graph_end(group), cudaSuccess);
    (void)WELL(galloc_graph_release(group, c->own[m.device]), cudaSuccess);
}

static void call_config(caller *c)
{
    char text[GALLOC_CONFIG_TEXT], again[GALLOC_CONFIG_TEXT], message[200];
    galloc_config config = galloc_config_default(), other = config;
    if (!WELL(galloc_pool_config(c->pool, &config), cudaSuccess)) return;
    EXPECT_EQ(config.device, m.device);
    EXPECT(config.memory_limit <= LIMIT);
    OK(galloc_config_print(&config, text, sizeof text));
    OK(galloc_config_parse(&other, text, message, sizeof message));
    OK(galloc_config_print(&other, again, sizeof again));
    EXPECT(!strcmp(text, again));
}

/* The settings of the pool that is met. */
static galloc_config some_config(void)
{
    galloc_config config = galloc_config_default();
    const char *settings = kinds[m.kind].settings;
    OK(galloc_config_parse(&config, settings ? settings : "memory_limit:64M", NULL, 0));
    config.device = m.device;
    return config;
}

/* A pool that the other thread may be in, and may have a block of, when it is to end. */
static void call_pool_create(caller *c)
{
    galloc_config config = some_config();
    galloc_pool *pool = NULL;
    cudaError_t error;
    if (!OK(galloc_pool_create(&pool, &config))) return;
    c->pool = pool;
    (void)shared_swap(&m.brief, pool);
    for (int i = 0; i < 3; i++) {
        void *ptr = obtain(c, some_bytes(c), c->stream);
        if (ptr) release(c, ptr, c->stream);
    }
    (void)shared_swap(&m.brief, NULL);
    while ((error = galloc_pool_destroy(pool)) == cudaErrorNotPermitted) sched_yield();
    OK(error);
    EXPECT_EQ(galloc_pool_check(pool), -1);
}

static void call_pool_default(caller *c)
{
    galloc_pool *pool = NULL;
    int device = (int)roll_below(&c->d, DEVICES + 1) - 1;
    OK(galloc_pool_default(&pool, device));
    if (!m.fresh) EXPECT(pool == m.pool[device < 0 ? m.device : device]);
    EXPECT_EQ(galloc_pool_destroy(pool), cudaErrorNotPermitted);
}

static void call_pool_reserve(caller *c)
{
    cudaError_t error = galloc_pool_reserve(c->pool, MIB(1 + roll_below(&c->d, 12)));
    if (error != cudaErrorNotSupported) (void)WELL(error, cudaErrorMemoryAllocation);
}

static void call_pool_trim(caller *c)
{
    static const size_t keep[] = {0, MIB(4), MIB(16), SIZE_MAX};
    size_t released = 1;
    (void)WELL(galloc_pool_trim(c->pool, keep[roll_below(&c->d, 4)], &released), cudaSuccess);
    EXPECT(released <= GIB(1));
}

/* Nearly all that the pool may hold, and then less: strategy:heuristic decides each time. */
static void fill(caller *c)
{
    static const size_t bytes[] = {LIMIT - MIB(3), MIB(3)};
    for (int i = 0; i < 2; i++) {
        void *ptr = obtain(c, bytes[i], c->stream);
        if (ptr) release(c, ptr, c->stream);
        (void)WELL(galloc_pool_trim(c->pool, 0, NULL), cudaSuccess);
    }
}

static void call_pool_sync_point(caller *c) { (void)WELL(galloc_pool_sync_point(c->pool, NULL), cudaSuccess); }

static void call_pool_set_limit(caller *c)
{
    (void)WELL(galloc_pool_set_limit(c->pool, LIMIT - MIB(8) * roll_below(&c->d, 6)), cudaSuccess);
}

static int on_oom(const galloc_report *report, void *user)
{
    shared_count(user);
    return report->rounds < 1;
}

static void on_reject(const galloc_report *report, void *user)
{
    EXPECT(report->rejected);
    shared_count(user);
}

static void on_map(galloc_pool *pool, void *addr, size_t bytes, void *user)
{
    EXPECT(pool && addr && bytes);
    shared_count(user);
}

static void call_pool_set_callbacks(caller *c)
{
    galloc_callbacks calls = {0};
    int pages = !c->is_brief && !roll_below(&c->d, 4);
    calls.on_oom = on_oom;
    calls.on_reject = on_reject;
    calls.on_map = calls.on_unmap = pages ? on_map : NULL;
    calls.user = pages ? &m.maps : &m.oom_calls;
    cudaError_t error = galloc_pool_set_callbacks(c->pool, &calls);
    if (error != cudaErrorNotSupported) (void)WELL(error, cudaErrorNotPermitted);
    sched_yield();
    if (roll_below(&c->d, 2) || pages) (void)WELL(galloc_pool_set_callbacks(c->pool, NULL), cudaErrorNotPermitted);
}

/* The pool has no room for two such blocks, or may never hold what is asked. */
static void call_oom_report(caller *c)
{
    char text[GALLOC_REPORT_TEXT];
    galloc_report report;
    size_t bytes = roll_below(&c->d, 4) ? LIMIT / 2 + MIB(2) : 2 * LIMIT;
    void *first = obtain(c, bytes, c->stream), *next = first ? obtain(c, bytes, c->stream) : NULL;
    EXPECT(next == NULL);
    cudaError_t error = galloc_oom_report(&report);
    if (first) release(c, first, c->stream);
    if (error == cudaErrorNotReady && c->is_brief) return;
    if (!OK(error)) return;
    if (!c->is_brief) EXPECT_EQ(report.asked, bytes);
    EXPECT_EQ(report.live + report.rounding + report.cached, report.held);
    OK(galloc_report_text(&report, text, sizeof text));
    EXPECT(text[0] && galloc_last_message()[0]);
}

static void call_pool_decisions(caller *c)
{
    galloc_decision decisions[4];
    int n = 0;
    if (!WELL(galloc_pool_decisions(c->pool, decisions, 4, &n), cudaSuccess)) return;
    for (int i = 0; i < n && i < 4; i++) EXPECT(decisions[i].reason && decisions[i].overhead >= 0);
}

static void call_pool_freeze(caller *c) { (void)WELL(galloc_pool_freeze(c->pool), cudaSuccess); }

static void call_pool_stats(caller *c)
{
    galloc_stats s;
    size_t held = 0;
    if (!WELL(galloc_pool_stats(c->pool, &s), cudaSuccess)) return;
    EXPECT(s.live.current <= s.allocated.current);
    EXPECT(s.live.current <= s.live.peak && s.reserved.current <= s.reserved.peak);
    EXPECT_EQ(s.allocated.current + s.cached.current, s.reserved.current);
    for (int i = 0; i < GALLOC_PAGE_SIZES; i++) held += s.pages[i].bytes;
    EXPECT_EQ(held, s.reserved.current);
}

static void call_pool_stats_reset(caller *c) { (void)WELL(galloc_pool_stats_reset(c->pool), cudaSuccess); }

static void call_pool_torch_stats(caller *c)
{
    galloc_torch_stats s;
    if (!WELL(galloc_pool_torch_stats(c->pool, &s), cudaErrorNotSupported)) return;
    EXPECT(s.allocated_bytes.all.current + s.inactive_split_bytes.all.current <= s.reserved_bytes.all.current);
    EXPECT(s.allocated_bytes.all.current <= s.active_bytes.all.current);
    EXPECT_EQ(s.allocation.all.current, s.allocation.small_pool.current + s.allocation.large_pool.current);
}

static void call_pool_streams(caller *c)
{
    galloc_stream_stats array[4];
    int n = 0;
    if (WELL(galloc_pool_streams(c->pool, array, 4, &n), cudaSuccess)) EXPECT(n >= 0 && n < 1000);
}

static void call_pool_history(caller *c)
{
    (void)WELL(galloc_pool_history(c->pool, roll_below(&c->d, 2) ? 1 + roll_below(&c->d, 100) : 0), cudaSuccess);
}

static void call_pool_history_stacks(caller *c)
{
    cudaError_t error = galloc_pool_history_stacks(c->pool, roll_below(&c->d, 5));
    (void)WELL(error, cudaErrorNotSupported);
}

static void call_annotate(caller *c)
{
    static const char *const texts[] = {"step 1", "the next step", "a text that is longer than what is kept of one"};
    OK(galloc_annotate(texts[roll_below(&c->d, 3)]));
}

static void call_tag_name(caller *c)
{
    static const char *const names[] = {"weights", "a cache of keys and values", NULL};
    OK(galloc_tag_name(roll_below(&c->d, TAGS), names[roll_below(&c->d, 3)]));
}

static int count_part(void *user, const void *data, size_t bytes)
{
    (void)data;
    *(size_t *)user += bytes;
    return 0;
}

static galloc_pool *it_or_all(caller *c) { return roll_below(&c->d, 3) ? c->pool : NULL; }

static void call_snapshot(caller *c)
{
    size_t bytes = 0;
    int format = roll_below(&c->d, 2) ? GALLOC_SNAPSHOT_JSON : GALLOC_SNAPSHOT_PICKLE;
    if (WELL(galloc_snapshot(it_or_all(c), format, count_part, &bytes), cudaSuccess)) EXPECT(bytes > 100);
}

static void call_snapshot_save(caller *c)
{
    const char *path = roll_below(&c->d, 2) ? m.json : m.pickle;
    (void)WELL(galloc_snapshot_save(it_or_all(c), path), cudaSuccess);
}

static void call_live_text(caller *c)
{
    char text[GALLOC_REPORT_TEXT];
    if (WELL(galloc_live_text(it_or_all(c), text, sizeof text), cudaSuccess)) EXPECT(text[0]);
}

static void call_pool_check(caller *c)
{
    int broken = galloc_pool_check(c->pool);
    EXPECT(broken == 0 || (broken == -1 && c->is_brief));
}

static void call_pointer_info(caller *c)
{
    galloc_pointer info;
    OK(galloc_pointer_info(shared_load(&m.box[roll_below(&c->d, BOXES)]), &info));
    OK(galloc_pointer_info(c, &info));
    EXPECT_EQ(info.state, GALLOC_STATE_FOREIGN);
    void *ptr = obtain(c, 1000, c->stream);
    if (!ptr) return;
    OK(galloc_pointer_info(ptr, &info));
    EXPECT(info.base == ptr && info.pool == c->pool && info.requested == 1000 && info.state == GALLOC_STATE_USED);
    release(c, ptr, c->stream);
}

static void hear(int level, const char *text, void *user)
{
    EXPECT(level && text[0] && user == &m);
}

static void call_set_log(caller *c)
{
    galloc_set_log(roll_below(&c->d, 2) ? hear : NULL, &m);
    sched_yield();
    galloc_set_log(NULL, NULL);
}

typedef void call(caller *c);

static call *const calls[] = {
    call_malloc,           call_malloc_per_thread, call_pool_malloc,         call_alloc,
    call_free,             call_free_after,        call_resize,              call_malloc_growable,
    call_record_stream,    call_stream_retire,     capture,                  call_graphs,
    call_config,           call_pool_create,       call_pool_default,        call_pool_reserve,
    call_pool_trim,        call_pool_sync_point,   call_pool_set_limit,      call_pool_set_callbacks,
    call_oom_report,       call_pool_decisions,    call_pool_freeze,         call_pool_stats,
    call_pool_stats_reset, call_pool_torch_stats,  call_pool_streams,        call_pool_history,
    call_annotate,         call_tag_name,          call_pool_history_stacks, call_snapshot,
    call_snapshot_save,    call_live_text,         call_pool_check,          call_pointer_info,
    call_set_log,          call_override_malloc,   call_override_free,       fill,
};
enum { CALLS = sizeof calls / sizeof *calls };

/* ---- the first call of the process ------------------------------------------------------------------------------- */

static struct {
    int loads, loaded, overtaken;
} first;

static void wait_for_flag(const int *flag)
{
    while (!__atomic_load_n(flag, __ATOMIC_RELAXED)) usleep(100);
}

static void linger_while_loading(const char *function)
{
    if (strncmp(function, "cudaGetDriverEntryPoint", 23)) return;
    if (__atomic_exchange_n(&first.loads, 1, __ATOMIC_RELAXED)) return;
    usleep(100000);
    EXPECT(!__atomic_load_n(&first.overtaken, __ATOMIC_RELAXED));
}

static void *overtake(void *unused)
{
    wait_for_flag(&first.loads);
    OK(galloc_free(NULL, NULL)); /* needs no lock that the first call has */
    __atomic_store_n(&first.overtaken, 1, __ATOMIC_RELAXED);
    return unused;
}

static void *follow(void *unused)
{
    galloc_pool *pool = NULL;
    wait_for_flag(&first.loaded);
    OK(galloc_pool_create(&pool, NULL));
    OK(galloc_pool_destroy(pool));
    return unused;
}

/* The first of all tests: later on the table is full. A call that overtakes the first one waits, and a thread that
   learns of that one's end by nothing but a flag sees all that it has done. */
TEST(the_first_call_fills_the_table_of_the_driver)
{
    pthread_t threads[2];
    begin();
    pthread_create(&threads[0], NULL, overtake, NULL);
    pthread_create(&threads[1], NULL, follow, NULL);
    sim_hook(linger_while_loading, NULL);
    OK(galloc_free(NULL, NULL));
    __atomic_store_n(&first.loaded, 1, __ATOMIC_RELAXED);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    EXPECT(first.loads && first.overtaken);
    sim_hook(NULL, NULL);
    finish();
}

/* ---- two threads ------------------------------------------------------------------------------------------------- */

#ifdef __SANITIZE_THREAD__
enum { MEETING_NS = 150000 };
#else
enum { MEETING_NS = 30000 };
#endif

static uint64_t meeting_ns(void)
{
    const char *text = getenv("GALLOC_ROUNDS");
    return (text ? (uint64_t)atoi(text) : 1) * MEETING_NS;
}

static int needs_pool(call *function)
{
    return function != call_malloc && function != call_malloc_per_thread && function != call_malloc_growable &&
           function != call_pool_create && function != call_pool_default && function != call_annotate;
}

static void call_once(caller *c, call *function)
{
    galloc_pool *brief = roll_below(&c->d, 3) ? NULL : shared_load(&m.brief);
    int k = (int)roll_below(&c->d, 3);
    c->is_brief = brief != NULL;
    c->pool = brief ? brief : m.pool_met;
    if (m.fresh && !brief && needs_pool(function)) OK(galloc_pool_default(&c->pool, m.device));
    c->stream = k ? m.shared[m.device][k - 1] : c->own[m.device];
    c->other = k == 1 ? c->own[m.device] : m.shared[m.device][0];
    function(c);
}

/* Both threads come here before either goes on. They do so at once, since calls may take less than to wake a thread. */
static void gate(void)
{
    static unsigned come;
    unsigned all = (__atomic_fetch_add(&come, 1, __ATOMIC_ACQ_REL) | 1) + 1;
    for (unsigned i = 1; (int)(__atomic_load_n(&come, __ATOMIC_ACQUIRE) - all) < 0; i++)
        if (i % 1024 == 0) sched_yield();
}

/* Calls for a while, and until the other one has called too; but if that one does not run now, not for ever. */
static void meet(caller *c, call *function)
{
    int *mine = &m.done[c->side], *others = &m.done[!c->side], n = 0;
    gate();
    uint64_t end = inside_clock() + m.span;
    do {
        call_once(c, function);
        __atomic_store_n(mine, ++n, __ATOMIC_RELAXED);
    } while (inside_clock() < end ||
             (inside_clock() < end + 4 * m.span && !__atomic_load_n(others, __ATOMIC_RELAXED)));
    gate();
}

static caller callers[2];
static int row, column; /* what the first one calls, and the second */

static void open_meeting(int kind)
{
    m.kind = kind;
    m.device = kinds[kind].device;
    m.pool_met = m.pool[kind];
    m.done[0] = m.done[1] = 0;
}

static void open_pools(void)
{
    for (int kind = 0; kind < KINDS; kind++) {
        open_meeting(kind);
        galloc_config config = some_config();
        if (kinds[kind].settings) m.pool[kind] = pool_new(&config);
        else OK(galloc_pool_default(&m.pool[kind], m.device));
    }
}

static void renew_pool(void)
{
    galloc_config config = some_config();
    pool_end(m.pool_met);
    m.pool_met = m.pool[m.kind] = pool_new(&config);
}

/* A block with a tag is there from the beginning. */
static void stock(caller *c)
{
    c->pool = m.pool_met;
    c->is_brief = 0;
    call_alloc(c);
}

/* The threads have left galloc. */
static void close_meeting(const galloc_stats *before, uint64_t ooms_before)
{
    caller *a = &callers[0], *b = &callers[1];
    galloc_stats now;
    galloc_torch_stats torch;
    a->pool = m.pool_met;
    a->is_brief = 0;
    OK(cudaSetDevice(m.device));
    for (int i = 0; i < BOXES; i++) {
        if (m.box[i]) release(a, m.box[i], m.shared[m.device][0]);
        m.box[i] = NULL;
    }
    EXPECT_EQ(galloc_pool_check(m.pool_met), 0);
    now = stats_of(m.pool_met);
    EXPECT_EQ(now.live.current, 0);
    EXPECT_EQ(now.blocks.current, 0);
    EXPECT_EQ(a->got + b->got, a->freed + b->freed);
    if (calls[row] != call_pool_stats_reset && calls[column] != call_pool_stats_reset) {
        EXPECT_EQ(now.mallocs - before->mallocs, a->got + b->got);
        EXPECT_EQ(now.frees - before->frees, a->freed + b->freed);
        EXPECT(now.failures - before->failures >= (uint64_t)(a->failed + b->failed));
        /* A refused galloc_pool_reserve counts in num_ooms only. */
        if (calls[row] != call_pool_reserve && calls[column] != call_pool_reserve &&
            !galloc_pool_torch_stats(m.pool_met, &torch))
            EXPECT_EQ(torch.num_ooms - ooms_before, now.failures - before->failures);
    }
    a->got = a->freed = a->failed = b->got = b->freed = b->failed = 0;
}

/* Of the two meetings of a pair, in which the threads change places, each one is in half of the kinds of pools. */
static int is_left_out(int kind) { return row != column && (row < column) == kind % 2; }

static void *second(void *unused)
{
    caller *c = &callers[1];
    for (gate(); m.kind >= 0; gate()) {
        OK(cudaSetDevice(m.device));
        meet(c, calls[column]);
    }
    return unused;
}

static void name_files(const char *folder)
{
    snprintf(m.json, sizeof m.json, "%s/snapshot.json", folder);
    snprintf(m.pickle, sizeof m.pickle, "%s/snapshot.pickle", folder);
    snprintf(m.trace, sizeof m.trace, "%s/trace.csv", folder);
}

static void remove_files(const char *folder)
{
    (void)remove(m.json);
    (void)remove(m.pickle);
    (void)remove(m.trace);
    EXPECT(!rmdir(folder));
}

static void set_out(const char *settings, const char *folder)
{
    char text[200];
    sim_options options = sim_defaults();
    options.devices = DEVICES;
    options.seed = test_seed() + (uint64_t)row;
    begin_with(options);
    memset(&m, 0, sizeof m);
    name_files(folder);
    snprintf(text, sizeof text, settings, m.trace, m.json);
    setenv("GALLOC_CONF", text, 1);
    m.span = meeting_ns();
    for (int device = 0; device < DEVICES; device++) {
        OK(cudaSetDevice(device));
        for (int i = 0; i < SHARED; i++) m.shared[device][i] = stream_new();
        for (int i = 0; i < 2; i++) callers[i].own[device] = stream_new();
    }
    for (int i = 0; i < 2; i++) {
        callers[i].side = i;
        callers[i].d.state = options.seed * 2 + (uint64_t)i;
    }
}

static void settle(void)
{
    for (int kind = DEVICES; kind < KINDS; kind++)
        if (m.pool[kind]) pool_end(m.pool[kind]);
    for (int device = 0; device < DEVICES; device++) {
        for (int i = 0; i < SHARED; i++) stream_end(m.shared[device][i]);
        for (int i = 0; i < 2; i++) stream_end(callers[i].own[device]);
    }
    OK(cudaSetDevice(0));
    finish();
    unsetenv("GALLOC_CONF");
}

/* The functions [from, end) meet all that there are. */
static void meet_all(int from, int end)
{
    char folder[] = "/tmp/galloc_pairs.XXXXXX";
    EXPECT(mkdtemp(folder));
    for (row = from; row < end; row++) {
        pthread_t thread;
        set_out(row % 2 ? "memory_limit:64M" : "memory_limit:64M,trace:%s,snapshot_on_oom:%s", folder);
        open_pools();
        pthread_create(&thread, NULL, second, NULL);
        for (int i = 0; i < CALLS * KINDS; i++) {
            column = i / KINDS;
            if (is_left_out(i % KINDS)) continue;
            open_meeting(i % KINDS);
            if (m.kind == HEURISTIC) renew_pool(); /* the number of its decisions is bounded */
            galloc_stats before = stats_of(m.pool_met);
            galloc_torch_stats torch = {0};
            (void)galloc_pool_torch_stats(m.pool_met, &torch); /* refused by other pools */
            OK(cudaSetDevice(m.device));
            stock(&callers[0]);
            gate();
            meet(&callers[0], calls[row]);
            close_meeting(&before, torch.num_ooms);
        }
        m.kind = -1;
        gate();
        pthread_join(thread, NULL);
        settle();
    }
    remove_files(folder);
}

TEST(functions_that_allocate_meet_all) { meet_all(0, 12); }
TEST(functions_that_set_or_end_meet_all) { meet_all(12, 21); }
TEST(functions_that_ask_meet_all) { meet_all(21, CALLS); }

/* ---- between two locks ------------------------------------------------------------------------------------------- */

/* The first thread stops before each lock, after each and before each call of the driver, and the second one calls a
   function meanwhile. They tell each other so by relaxed numbers: what the first one does next without the lock that
   the second one had is a race, whatever the time of day. */
static struct {
    call *const *asks, *const *others; /* while the first one has a long lock, and while it has none */
    int n_asks, n_others;
    int at; /* the only stop, of those without a long lock, or 0 for all */
    int stops, next, begun, come, gone, over;
} between;

static __thread int stops;

/* The looks at a stream before its cache serves it: the latch of that may be held. */
static int is_look(const char *function)
{
    static const char *const looks[] = {"cuStreamIsCapturing", "cuStreamGetId", "cuStreamGetCtx", "cuCtxGetCurrent",
                                        "cuCtxGetId"};
    for (size_t i = 0; i < sizeof looks / sizeof *looks; i++)
        if (!strncmp(function, looks[i], strlen(looks[i]))) return 1;
    return 0;
}

/* Goes on after a while, too: the other one may need what this thread has. */
static void let_the_other_call(const char *function, int locks)
{
    uint64_t end;
    if (!stops || (function && is_look(function))) return;
    if (between.at && (locks || ++between.stops != between.at)) return;
    if (__atomic_load_n(&between.gone, __ATOMIC_RELAXED) != between.come) return;
    stops = 0;
    __atomic_store_n(&between.come, between.come + 2 + !locks - between.come % 2, __ATOMIC_RELAXED);
    end = inside_clock() + 50000000;
    while (__atomic_load_n(&between.gone, __ATOMIC_RELAXED) != between.come && inside_clock() < end) sched_yield();
    stops = 1;
}

static void call_in_the_pool(caller *c, call *function)
{
    c->is_brief = 0;
    c->pool = m.pool_met;
    c->stream = m.shared[m.device][0];
    c->other = c->own[m.device];
    function(c);
}

static void *answer(void *unused)
{
    int come, gone = 0, n = between.next;
    OK(cudaSetDevice(m.device));
    __atomic_store_n(&between.begun, 1, __ATOMIC_RELAXED);
    while (!__atomic_load_n(&between.over, __ATOMIC_RELAXED)) {
        come = __atomic_load_n(&between.come, __ATOMIC_RELAXED);
        if (come == gone) {
            sched_yield();
            continue;
        }
        call *function = come % 2 ? between.others[n % between.n_others] : between.asks[n % between.n_asks];
        call_in_the_pool(&callers[1], function);
        n++;
        gone = come;
        __atomic_store_n(&between.gone, gone, __ATOMIC_RELAXED);
    }
    return unused;
}

/* The first thread calls `function` while the second one calls what `between` says. */
static void meet_between(call *function, int times)
{
    pthread_t thread;
    OK(cudaSetDevice(m.device));
    between.stops = between.begun = between.come = between.gone = between.over = 0;
    inside_on_step = let_the_other_call;
    pthread_create(&thread, NULL, answer, NULL);
    wait_for_flag(&between.begun);
    stops = 1;
    for (int i = 0; i < times; i++) call_in_the_pool(&callers[0], function);
    stops = 0;
    __atomic_store_n(&between.over, 1, __ATOMIC_RELAXED);
    pthread_join(thread, NULL);
    inside_on_step = NULL;
}

/* It waits for the device as cudaFree does, which ends captures. */
static void call_override_free_of_all(caller *c)
{
    if (calls[row] == capture || calls[row] == call_graphs) return;
    void *ptr = obtain(c, some_bytes(c), c->stream);
    if (ptr) freed(c, galloc_override_free(ptr, c->stream, GALLOC_OVERRIDE_DEVICE), c->pool);
}

/* These mostly need no lock but that of the pool, which is free whenever a thread stops. */
static call *const asks[] = {call_pool_stats, call_pool_malloc,    call_pool_torch_stats, call_pool_streams,
                             call_config,     call_pool_decisions, call_malloc};
static call *const others[] = {call_pool_stats,         call_malloc,     call_pool_malloc, call_pool_trim,
                               call_pool_set_callbacks, call_snapshot,   call_pool_check,  call_stream_retire,
                               call_pool_history,       call_oom_report, capture,          call_pool_set_limit,
                               call_pool_torch_stats,   call_live_text,  call_resize,      call_override_free_of_all};

TEST(functions_meet_between_two_locks)
{
    char folder[] = "/tmp/galloc_pairs.XXXXXX";
    EXPECT(mkdtemp(folder));
    row = 0;
    set_out("memory_limit:64M", folder);
    open_pools();
    between.asks = asks;
    between.others = others;
    between.n_asks = sizeof asks / sizeof *asks;
    between.n_others = sizeof others / sizeof *others;
    for (int kind = 0; kind < KINDS; kind++) {
        for (row = column = 0; row < CALLS; row++, column++) {
            open_meeting(kind);
            if (kinds[kind].settings) renew_pool();
            galloc_stats before = stats_of(m.pool_met);
            between.next = row;
            meet_between(calls[row], 2);
            close_meeting(&before, 0);
        }
    }
    settle();
    remove_files(folder);
}

/* A function in the first thread with always the same one in the second. */
TEST(pairs_meet_again_between_two_locks)
{
    static const struct {
        int kind;
        call *first, *second;
    } pairs[] = {
        {NATIVE, call_alloc, call_pool_stats},
        {ASYNC, fill, call_pool_stats},
    };
    char folder[] = "/tmp/galloc_pairs.XXXXXX";
    EXPECT(mkdtemp(folder));
    row = column = 0;
    set_out("memory_limit:64M", folder);
    open_pools();
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        open_meeting(pairs[i].kind);
        renew_pool();
        galloc_stats before = stats_of(m.pool_met);
        between.asks = between.others = &pairs[i].second;
        between.n_asks = between.n_others = 1;
        meet_between(pairs[i].first, 10);
        close_meeting(&before, 0);
    }
    settle();
    remove_files(folder);
}

/* Both threads are the first ones to call a function, one of them in the midst of the call of the other. */
TEST(first_calls_meet_between_two_locks)
{
    static call *const firsts[] = {call_override_malloc, call_malloc_per_thread};
    char folder[] = "/tmp/galloc_pairs.XXXXXX";
    EXPECT(mkdtemp(folder));
    row = column = 0;
    for (size_t i = 0; i < sizeof firsts / sizeof *firsts; i++) {
        between.asks = between.others = &firsts[i];
        between.n_asks = between.n_others = 1;
        between.at = 0;
        do {
            between.at++;
            set_out("memory_limit:64M", folder);
            m.fresh = 1;
            meet_between(firsts[i], 1);
            settle();
        } while (between.stops >= between.at);
    }
    between.at = 0;
    remove_files(folder);
}

static void *first_calls(void *unused)
{
    for (gate(); m.kind >= 0; gate()) {
        OK(cudaSetDevice(0));
        meet(&callers[1], calls[column]);
    }
    return unused;
}

/* The first calls of a process, or after galloc_shutdown: both threads begin all that there is. */
TEST(first_calls_meet)
{
    static const char *const settings[] = {"memory_limit:64M,trace:%s", "memory_limit:64M,history:50,history_stacks:3",
                                           "memory_limit:64M,debug:guards,strategy:heuristic"};
    char folder[] = "/tmp/galloc_pairs.XXXXXX";
    pthread_t thread;
    int n = 0;
    EXPECT(mkdtemp(folder));
    pthread_create(&thread, NULL, first_calls, NULL);
    for (row = 0; row < CALLS; row++) {
        for (column = row % 2; column <= row; column += 2) {
            set_out(settings[n++ % 3], folder);
            m.fresh = 1;
            m.span = 1;
            gate();
            OK(cudaSetDevice(0));
            meet(&callers[0], calls[row]);
            settle();
        }
    }
    m.kind = -1;
    gate();
    pthread_join(thread, NULL);
    remove_files(folder);
}

/* ---- at one moment ----------------------------------------------------------------------------------------------- */

static struct {
    galloc_pool *pool;
    unsigned refused;
    int done;
} both;

enum { REFUSALS = 50 };

/* Both threads leave at once, and neither has seen anything of the other. */
static void wait_for_the_other(const galloc_report *report, void *user)
{
    unsigned all = (__atomic_fetch_add((unsigned *)user, 1, __ATOMIC_RELAXED) | 1) + 1;
    EXPECT(report->rejected);
    for (unsigned i = 1; (int)(__atomic_load_n((unsigned *)user, __ATOMIC_RELAXED) - all) < 0; i++)
        if (i % 1024 == 0) sched_yield();
}

static void *be_refused(void *unused)
{
    cudaStream_t stream = stream_new();
    for (int i = 0; i < REFUSALS; i++) {
        void *ptr = unused;
        EXPECT_EQ(galloc_pool_malloc(both.pool, &ptr, 2 * LIMIT, stream), cudaErrorMemoryAllocation);
    }
    stream_end(stream);
    return unused;
}

TEST(requests_refused_at_one_moment_are_all_counted)
{
    static const char *const settings[] = {"memory_limit:64M,history:200",
                                           "like:pytorch,expandable_segments:False,memory_limit:64M"};
    for (int k = 0; k < 2; k++) {
        galloc_config config = galloc_config_default();
        galloc_callbacks calls_back = {0};
        galloc_torch_stats torch;
        pthread_t thread;
        begin();
        OK(galloc_config_parse(&config, settings[k], NULL, 0));
        memset(&both, 0, sizeof both);
        both.pool = pool_new(&config);
        calls_back.on_reject = wait_for_the_other;
        calls_back.user = &both.refused;
        OK(galloc_pool_set_callbacks(both.pool, &calls_back));
        pthread_create(&thread, NULL, be_refused, NULL);
        be_refused(NULL);
        pthread_join(thread, NULL);
        galloc_stats stats = stats_of(both.pool);
        EXPECT_EQ(stats.failures, 2 * REFUSALS);
        EXPECT_EQ(stats.rejections, 2 * REFUSALS);
        if (k && OK(galloc_pool_torch_stats(both.pool, &torch))) EXPECT_EQ(torch.num_ooms, 2 * REFUSALS);
        pool_end(both.pool);
        finish();
    }
}

static void *decide(void *unused)
{
    cudaStream_t stream = stream_new();
    for (int i = 0; i < GALLOC_DECISIONS; i++) {
        OK(galloc_free(get(both.pool, i % 2 ? MIB(3) : LIMIT - MIB(3), stream), stream));
        OK(galloc_pool_trim(both.pool, 0, NULL));
    }
    stream_end(stream);
    __atomic_store_n(&both.done, 1, __ATOMIC_RELAXED);
    return unused;
}

TEST(decisions_are_read_while_they_are_made)
{
    galloc_config config = config_limit(LIMIT);
    galloc_decision decisions[GALLOC_DECISIONS];
    pthread_t thread;
    int n = 0, before = 0, last;
    begin();
    config.strategy = GALLOC_STRATEGY_HEURISTIC;
    memset(&both, 0, sizeof both);
    both.pool = pool_new(&config);
    pthread_create(&thread, NULL, decide, NULL);
    do {
        last = __atomic_load_n(&both.done, __ATOMIC_RELAXED);
        OK(galloc_pool_decisions(both.pool, decisions, GALLOC_DECISIONS, &n));
        EXPECT(n >= before);
        for (int i = before; i < n; i++) EXPECT(decisions[i].reason != NULL);
        before = n;
    } while (!last);
    EXPECT_EQ(n, GALLOC_DECISIONS);
    pthread_join(thread, NULL);
    pool_end(both.pool);
    finish();
}

static void *make_pools(void *unused)
{
    for (int i = 0; i < 200; i++) pool_end(pool_new(NULL));
    __atomic_store_n(&both.done, 1, __ATOMIC_RELAXED);
    return unused;
}

TEST(streams_are_retired_while_pools_come_and_go)
{
    pthread_t thread;
    begin();
    cudaStream_t stream = stream_new();
    memset(&both, 0, sizeof both);
    pthread_create(&thread, NULL, make_pools, NULL);
    while (!__atomic_load_n(&both.done, __ATOMIC_RELAXED)) OK(galloc_stream_retire(stream));
    pthread_join(thread, NULL);
    stream_end(stream);
    finish();
}

static void *ask_for_the_default(void *unused)
{
    galloc_pool *pool = NULL;
    OK(galloc_pool_default(&pool, 0));
    EXPECT(pool != NULL);
    __atomic_fetch_add(&both.done, 1, __ATOMIC_RELAXED);
    return unused;
}

/* While the budget is held no pool can join its device, so that none is complete, whatever else has been done. */
TEST(nobody_has_a_default_pool_before_it_is_complete)
{
    pthread_t threads[2];
    begin();
    pool_end(pool_new(NULL));
    memset(&both, 0, sizeof both);
    inside_hold_budget(1);
    for (int i = 0; i < 2; i++) {
        pthread_create(&threads[i], NULL, ask_for_the_default, NULL);
        usleep(100000);
    }
    EXPECT_EQ(__atomic_load_n(&both.done, __ATOMIC_RELAXED), 0);
    inside_hold_budget(0);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    EXPECT_EQ(both.done, 2);
    finish();
}

TEST_MAIN()
