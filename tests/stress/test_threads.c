/* test_threads.c - several host threads at once, each with a stream of its own and all with shared ones, in one pool;
   blocks also pass from thread to thread. Run it under ThreadSanitizer as well. */

#include "setup.h"

enum { THREADS = 6, SHARED = 2, SLOTS = 24, MAILBOXES = 16 };

/* A block on its way to another thread, ordered after the event. */
typedef struct letter {
    void *ptr;
    size_t bytes;
    uint64_t tag;
    cudaEvent_t ready;
} letter;

typedef struct hall {
    galloc_pool *pool;
    cudaStream_t shared[SHARED];
    pthread_mutex_t post;
    pthread_barrier_t start;
    letter box[MAILBOXES];
    int steps;
    int retires; /* threads also destroy their streams */
} hall;

typedef struct worker {
    hall *hall;
    dice d;
    cudaStream_t own;
    uint64_t tag;
    struct {
        void *ptr;
        size_t bytes;
        uint64_t tag;
        cudaStream_t stream;
    } slot[SLOTS];
} worker;

static cudaStream_t some_stream(worker *w)
{
    uint32_t k = roll_below(&w->d, 3 + SHARED);
    return k < SHARED ? w->hall->shared[k] : w->own;
}

/* Puts a letter into a box and takes out what was there. */
static letter exchange(worker *w, letter in)
{
    letter *box = &w->hall->box[roll_below(&w->d, MAILBOXES)];
    pthread_mutex_lock(&w->hall->post);
    letter out = *box;
    *box = in;
    pthread_mutex_unlock(&w->hall->post);
    return out;
}

static void receive(const letter *mail, cudaStream_t stream)
{
    if (!mail->ptr) return;
    OK(cudaStreamWaitEvent(stream, mail->ready, 0));
    OK(cudaEventDestroy(mail->ready));
    look(stream, mail->ptr, mail->bytes, mail->tag);
    OK(galloc_free(mail->ptr, stream));
}

static void send(worker *w, uint32_t k)
{
    letter mail = {w->slot[k].ptr, w->slot[k].bytes, w->slot[k].tag, NULL};
    OK(cudaEventCreateWithFlags(&mail.ready, cudaEventDisableTiming));
    OK(cudaEventRecord(mail.ready, w->slot[k].stream));
    w->slot[k].ptr = NULL;
    mail = exchange(w, mail);
    receive(&mail, some_stream(w));
}

static void release(worker *w, uint32_t k)
{
    look(w->slot[k].stream, w->slot[k].ptr, w->slot[k].bytes, w->slot[k].tag);
    OK(galloc_free(w->slot[k].ptr, w->slot[k].stream));
    w->slot[k].ptr = NULL;
}

static void obtain(worker *w, uint32_t k)
{
    void *ptr = w;
    size_t bytes = roll_bytes(&w->d, roll_below(&w->d, 4) ? KIB(256) : MIB(6));
    cudaStream_t stream = some_stream(w);
    cudaError_t err = galloc_pool_malloc(w->hall->pool, &ptr, bytes, stream);
    EXPECT(err == cudaSuccess || err == cudaErrorMemoryAllocation);
    if (err != cudaSuccess) {
        EXPECT(ptr == NULL);
        return;
    }
    w->slot[k].ptr = ptr;
    w->slot[k].bytes = bytes;
    w->slot[k].stream = stream;
    w->slot[k].tag = ++w->tag;
    put(stream, ptr, bytes, w->tag);
    EXPECT(info_of(ptr).base == ptr);
}

static void replace_own(worker *w)
{
    for (uint32_t k = 0; k < SLOTS; k++)
        if (w->slot[k].ptr && w->slot[k].stream == w->own) release(w, k);
    if (roll_below(&w->d, 2)) OK(galloc_stream_retire(w->own));
    stream_end(w->own);
    w->own = stream_new();
}

/* A stream that uses a block for a while and is gone as soon as the block is free. */
static void be_guest(worker *w)
{
    void *ptr = NULL;
    cudaStream_t host = w->hall->shared[0], guest;
    if (galloc_pool_malloc(w->hall->pool, &ptr, KIB(64), host) != cudaSuccess) return;
    guest = stream_new();
    put(host, ptr, KIB(64), ++w->tag);
    order(host, guest);
    OK(galloc_record_stream(ptr, guest));
    look(guest, ptr, KIB(64), w->tag);
    OK(galloc_free(ptr, host));
    stream_end(guest);
}

static void *work(void *arg)
{
    worker *w = arg;
    w->own = stream_new();
    pthread_barrier_wait(&w->hall->start);
    for (int i = 0; i < w->hall->steps; i++) {
        uint32_t k = roll_below(&w->d, SLOTS), act = roll_below(&w->d, 100);
        if (act % 16 == 0) sched_yield();
        if (act == 0) (void)galloc_pool_trim(w->hall->pool, MIB(16), NULL);
        else if (act == 1 && w->hall->retires) replace_own(w);
        else if (act < 5) be_guest(w);
        else if (act == 5) (void)stats_of(w->hall->pool);
        else if (act == 6) EXPECT_EQ(galloc_pool_check(w->hall->pool), 0);
        else if (!w->slot[k].ptr) obtain(w, k);
        else if (act < 22) send(w, k);
        else release(w, k);
    }
    for (uint32_t k = 0; k < SLOTS; k++)
        if (w->slot[k].ptr) release(w, k);
    return NULL;
}

static void run_threads(hall *h)
{
    static worker workers[THREADS];
    pthread_t thread[THREADS];
    letter none = {NULL, 0, 0, NULL};
    memset(workers, 0, sizeof workers);
    EXPECT_EQ(pthread_mutex_init(&h->post, NULL), 0);
    EXPECT_EQ(pthread_barrier_init(&h->start, NULL, THREADS), 0);
    for (int i = 0; i < SHARED; i++) h->shared[i] = stream_new();
    for (int i = 0; i < THREADS; i++) {
        workers[i].hall = h;
        workers[i].d.state = test_seed() * 31 + (uint64_t)i;
        workers[i].tag = (uint64_t)(i + 1) << 32;
        EXPECT_EQ(pthread_create(&thread[i], NULL, work, &workers[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) EXPECT_EQ(pthread_join(thread[i], NULL), 0);
    for (int i = 0; i < MAILBOXES; i++) {
        receive(&h->box[i], h->shared[0]);
        h->box[i] = none;
    }
    EXPECT_EQ(stats_of(h->pool).live.current, 0);
    pthread_barrier_destroy(&h->start);
    pthread_mutex_destroy(&h->post);
    expect_healthy(h->pool, 1);
    pool_end(h->pool);
    finish();
}

static int steps(void)
{
    const char *text = getenv("GALLOC_ROUNDS");
    return text && *text ? atoi(text) * 100 : 10000;
}

TEST(threads_share_a_pool)
{
    for (int round = 0; round < 4; round++) { /* kind of segments; roomy and tight */
        static hall h;
        sim_options options = sim_defaults();
        options.seed = test_seed();
        options.lag = round / 2 ? 40 : 0; /* what is freed is mostly not complete */
        begin_with(options);
        galloc_config config = config_limit(round / 2 ? MIB(24) : SIZE_MAX);
        config.expandable_segments = round % 2;
        config.overhead = 0;
        memset(&h, 0, sizeof h);
        h.pool = pool_new(&config);
        h.steps = steps();
        h.retires = 1;
        run_threads(&h);
    }
}

static void *own_pool(void *arg)
{
    dice d = {(uint64_t)(uintptr_t)arg};
    cudaStream_t s = stream_new();
    for (int i = 0; i < 20; i++) {
        galloc_pool *pool = pool_new(NULL);
        void *p[8] = {NULL};
        for (int k = 0; k < 40; k++) {
            uint32_t at = roll_below(&d, 8);
            if (p[at]) OK(galloc_free(p[at], s));
            p[at] = get(pool, roll_bytes(&d, MIB(4)), s);
        }
        for (int at = 0; at < 8; at++) OK(galloc_free(p[at], s));
        pool_end(pool);
        void *ptr = NULL;
        OK(galloc_malloc(&ptr, 1000, cudaStreamPerThread)); /* the default pool is made by whoever comes first */
        OK(galloc_free(ptr, cudaStreamPerThread));
    }
    return NULL;
}

TEST(threads_make_and_destroy_pools)
{
    begin();
    pthread_t thread[THREADS];
    for (uintptr_t i = 0; i < THREADS; i++) EXPECT_EQ(pthread_create(&thread[i], NULL, own_pool, (void *)(i + 1)), 0);
    for (int i = 0; i < THREADS; i++) EXPECT_EQ(pthread_join(thread[i], NULL), 0);
    finish();
}

/* ---- hot pairs --------------------------------------------------------------------------------------------------- */

enum { STORM = 8, RACERS = 4 };

typedef struct storm {
    galloc_pool *pool;
    cudaStream_t shared;
    pthread_barrier_t start;
    int pairs;
} storm;

/* Small blocks come and go, mostly on one stream that all threads have in common; some wander to another stream. */
static void *be_stormy(void *arg)
{
    static const size_t sizes[] = {512, 1024, KIB(4), KIB(64), KIB(300)};
    storm *all = arg;
    cudaStream_t own = stream_new();
    dice d = {(uint64_t)(uintptr_t)&own};
    void *kept[4] = {NULL};
    size_t bytes[4] = {0};
    pthread_barrier_wait(&all->start);
    for (int i = 0; i < all->pairs; i++) {
        uint32_t k = roll_below(&d, 4), where = roll_below(&d, 8);
        cudaStream_t s = where < 5 ? all->shared : where < 7 ? own : cudaStreamPerThread;
        if (kept[k]) OK(galloc_free(kept[k], s)); /* never used: on any stream */
        bytes[k] = sizes[roll_below(&d, 5)];
        kept[k] = get(all->pool, bytes[k], s);
        if (i % 64 == 0) put(s, kept[k], bytes[k], 1);
        if (i % 64 == 0) OK(galloc_free(kept[k], s));
        if (i % 64 == 0) kept[k] = NULL;
        if (i % 512 == 0) EXPECT_EQ(galloc_pool_check(all->pool), 0);
        if (i % 300 == 0) OK(galloc_pool_trim(all->pool, MIB(2), NULL));
    }
    for (int k = 0; k < 4; k++) OK(galloc_free(kept[k], own));
    OK(galloc_stream_retire(own));
    stream_end(own);
    return NULL;
}

TEST(hot_pairs_from_many_threads)
{
    for (int check = 0; check < 2; check++) {
        begin();
        storm all;
        pthread_t thread[STORM];
        galloc_config config = galloc_config_default();
        config.stream_check = check;
        all.pool = pool_new(&config);
        all.shared = stream_new();
        all.pairs = steps() / 2;
        EXPECT_EQ(pthread_barrier_init(&all.start, NULL, STORM), 0);
        for (int i = 0; i < STORM; i++) EXPECT_EQ(pthread_create(&thread[i], NULL, be_stormy, &all), 0);
        for (int i = 0; i < STORM; i++) EXPECT_EQ(pthread_join(thread[i], NULL), 0);
        pthread_barrier_destroy(&all.start);
        galloc_stats stats = stats_of(all.pool);
        EXPECT_EQ(stats.live.current + stats.allocated.current + stats.blocks.current, 0);
        EXPECT_EQ(stats.mallocs, stats.frees);
        expect_healthy(all.pool, 1);
        pool_end(all.pool);
        finish();
    }
}

typedef struct race {
    pthread_barrier_t start, end;
    galloc_pool *pool;
    cudaStream_t shared;
    void *ptr;
    int freed, rounds;
} race;

/* All free the same block at once: one of them has freed it. */
static void *race_to_free(void *arg)
{
    race *r = arg;
    cudaStream_t own = stream_new();
    OK(galloc_free(get(r->pool, 4096, own), own));
    for (int i = 0; i < r->rounds; i++) {
        int got = pthread_barrier_wait(&r->start) == PTHREAD_BARRIER_SERIAL_THREAD;
        if (got) {
            r->freed = 0;
            r->ptr = get(r->pool, 4096, r->shared);
        }
        pthread_barrier_wait(&r->end);
        cudaStream_t both[2] = {own, r->shared}, one = i % 4 == 1 || (i % 4 == 2 && !got) ? own : r->shared;
        cudaError_t error = i % 4 == 3 ? galloc_free_after(r->ptr, both, 2) : galloc_free(r->ptr, one);
        if (error == cudaSuccess) __atomic_add_fetch(&r->freed, 1, __ATOMIC_RELAXED);
        else EXPECT_EQ(error, cudaErrorInvalidDevicePointer);
        if (pthread_barrier_wait(&r->end) == PTHREAD_BARRIER_SERIAL_THREAD) EXPECT_EQ(r->freed, 1);
    }
    return NULL;
}

TEST(a_block_is_freed_once_whoever_comes_first)
{
    begin();
    race r;
    pthread_t thread[RACERS];
    memset(&r, 0, sizeof r);
    r.pool = pool_new(NULL);
    r.shared = stream_new();
    r.rounds = steps() / 20;
    EXPECT_EQ(pthread_barrier_init(&r.start, NULL, RACERS), 0);
    EXPECT_EQ(pthread_barrier_init(&r.end, NULL, RACERS), 0);
    for (int i = 0; i < RACERS; i++) EXPECT_EQ(pthread_create(&thread[i], NULL, race_to_free, &r), 0);
    for (int i = 0; i < RACERS; i++) EXPECT_EQ(pthread_join(thread[i], NULL), 0);
    pthread_barrier_destroy(&r.start);
    pthread_barrier_destroy(&r.end);
    EXPECT_EQ(stats_of(r.pool).blocks.current, 0);
    expect_healthy(r.pool, 1);
    pool_end(r.pool);
    finish();
}

static void *shown; /* an address that may have been given back meanwhile */
static int stop;

static void *look_up(void *arg)
{
    while (!__atomic_load_n(&stop, __ATOMIC_RELAXED)) {
        galloc_pointer info = info_of(__atomic_load_n(&shown, __ATOMIC_RELAXED));
        EXPECT(info.state == GALLOC_STATE_FOREIGN || info.pool == arg);
    }
    return NULL;
}

TEST(any_address_may_be_asked_at_any_time)
{
    for (int expandable = 0; expandable < 2; expandable++) {
        begin();
        pthread_t thread;
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_expandable(expandable);
        stop = 0;
        EXPECT_EQ(pthread_create(&thread, NULL, look_up, pool), 0);
        for (int i = 0; i < 2000; i++) {
            void *p = get(pool, MIB(1) + MIB(2) * (size_t)(i % 3), s);
            __atomic_store_n(&shown, p, __ATOMIC_RELAXED);
            OK(galloc_free(p, s));
            OK(galloc_pool_trim(pool, 0, NULL));
        }
        __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
        EXPECT_EQ(pthread_join(thread, NULL), 0);
        pool_end(pool);
        finish();
    }
}

/* Small blocks come and go at addresses below all others. */
static void *play_below(void *pool)
{
    cudaStream_t s = stream_new();
    void *p[8] = {NULL};
    for (size_t i = 0; !__atomic_load_n(&stop, __ATOMIC_RELAXED); i++) {
        OK(galloc_free(p[i % 8], s));
        p[i % 8] = get(pool, 512 + 512 * (i % 5), s);
    }
    for (int i = 0; i < 8; i++) OK(galloc_free(p[i], s));
    return NULL;
}

/* While a page is on its way no block of its pool is at its address, and what precedes it is another pool's: that has
   a lock of its own. ThreadSanitizer sees it. */
TEST(addresses_of_pages_on_their_way_may_be_asked)
{
    begin();
    pthread_t thread[2];
    cudaStream_t s = stream_new();
    galloc_config config = config_limit(MIB(64));
    config.stats_exact = 1;
    galloc_pool *below = pool_new(&config), *pool = pool_new(&config);
    void *keep = get(below, 512, s);
    stop = 0;
    shown = get(pool, MIB(8), s);
    OK(galloc_free(shown, s));
    EXPECT_EQ(pthread_create(&thread[0], NULL, look_up, pool), 0);
    EXPECT_EQ(pthread_create(&thread[1], NULL, play_below, below), 0);
    for (int i = 0; i < 300; i++) {
        OK(galloc_free(get(pool, MIB(8), s), s));
        OK(galloc_free(get(pool, MIB(12), s), s));
        OK(galloc_pool_trim(pool, 0, NULL));
    }
    __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
    for (int i = 0; i < 2; i++) EXPECT_EQ(pthread_join(thread[i], NULL), 0);
    OK(galloc_free(keep, s));
    pool_end(below);
    pool_end(pool);
    finish();
}

/* Threads that miss together find what the first of them got. */
static void *miss(void *pool)
{
    cudaStream_t s = stream_new();
    void *p = get(pool, KIB(64), s);
    OK(galloc_free(p, s));
    return NULL;
}

TEST(threads_that_miss_together_grow_once)
{
    for (int round = 0; round < 10; round++) {
        begin();
        pthread_t thread[THREADS];
        galloc_pool *pool = pool_new(NULL);
        for (int i = 0; i < THREADS; i++) EXPECT_EQ(pthread_create(&thread[i], NULL, miss, pool), 0);
        for (int i = 0; i < THREADS; i++) EXPECT_EQ(pthread_join(thread[i], NULL), 0);
        EXPECT_EQ(stats_of(pool).grows, 1);
        pool_end(pool);
        finish();
    }
}

/* What is read of a stream includes what its cache serves meanwhile, which takes no other lock than its own. */
static int served;

static void *serve_from_a_cache(void *pool)
{
    cudaStream_t s = stream_new();
    for (int i = 0; i < 500; i++) OK(galloc_free(get(pool, 4096, s), s));
    __atomic_store_n(&served, 1, __ATOMIC_RELAXED);
    return NULL;
}

TEST(streams_are_read_while_their_caches_serve)
{
    begin();
    pthread_t thread;
    galloc_pool *pool = pool_new(NULL);
    galloc_stream_stats streams[2];
    int n = 0;
    served = 0;
    EXPECT_EQ(pthread_create(&thread, NULL, serve_from_a_cache, pool), 0);
    do OK(galloc_pool_streams(pool, streams, 2, &n));
    while (!__atomic_load_n(&served, __ATOMIC_RELAXED));
    EXPECT_EQ(pthread_join(thread, NULL), 0);
    OK(galloc_pool_streams(pool, streams, 2, &n));
    EXPECT_EQ(n, 1);
    EXPECT_EQ(streams[0].unmarked, 4096);
    pool_end(pool);
    finish();
}

/* ---- calls beside others, for ThreadSanitizer ---- */

/* Calls one function in another thread and another one in this thread, each so many times at least, but the first one
   no more than eight times as often: a lock may be had by the same thread again and again. */
static struct {
    void (*call)(void *pool);
    void *pool;
    int calls, most;
} beside;

static void *call_beside(void *unused)
{
    (void)unused;
    while (!__atomic_load_n(&stop, __ATOMIC_RELAXED) && beside.most-- > 0) {
        beside.call(beside.pool);
        __atomic_add_fetch(&beside.calls, 1, __ATOMIC_RELAXED);
    }
    return NULL;
}

static void side_by_side(void (*other)(void *), void (*own)(void *), galloc_pool *pool, int times)
{
    pthread_t thread;
    beside.call = other;
    beside.pool = pool;
    beside.most = 8 * times;
    beside.calls = stop = 0;
    EXPECT_EQ(pthread_create(&thread, NULL, call_beside, NULL), 0);
    for (int i = 0; i < times || __atomic_load_n(&beside.calls, __ATOMIC_RELAXED) < times; i++) own(pool);
    __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
}

static void ask_about_it(void *pool)
{
    galloc_pointer info = info_of(__atomic_load_n(&shown, __ATOMIC_RELAXED));
    EXPECT(info.pool == pool && info.requested <= 1024);
}

static void have_it_and_not(void *pool)
{
    galloc_request request = {.bytes = 600 + (size_t)(served % 400), .tag = (uint32_t)served % 7, .pool = pool};
    void *p = NULL;
    served++;
    OK(galloc_alloc(&p, &request));
    EXPECT(p == shown);
    (void)sched_yield(); /* so that it is asked about now */
    OK(galloc_free(p, NULL));
}

/* A block that its stream's cache serves under the cache's lock alone, and what is told of it under the pool's. */
TEST(a_block_is_asked_about_while_a_cache_serves_it)
{
    begin();
    galloc_pool *pool = pool_new(NULL);
    served = 0;
    void *p = get(pool, 1000, NULL);
    __atomic_store_n(&shown, p, __ATOMIC_RELAXED);
    OK(galloc_free(p, NULL));
    side_by_side(ask_about_it, have_it_and_not, pool, 3000);
    pool_end(pool);
    finish();
}

static void name_a_tag(void *pool)
{
    (void)pool;
    OK(galloc_tag_name(7, "a name"));
    OK(galloc_tag_name(7, NULL));
}

static void tell_of_tags(void *pool)
{
    char text[GALLOC_REPORT_TEXT];
    OK(galloc_live_text(pool, text, sizeof text));
    EXPECT(strstr(text, "tag 7,") || strstr(text, "tag 7 (a name),"));
}

TEST(a_tag_gets_its_name_while_texts_are_written)
{
    begin();
    galloc_pool *pool = pool_new(NULL);
    galloc_request request = {.bytes = 1000, .tag = 7, .pool = pool};
    void *p = NULL;
    OK(galloc_alloc(&p, &request));
    side_by_side(name_a_tag, tell_of_tags, pool, 500);
    OK(galloc_free(p, NULL));
    pool_end(pool);
    finish();
}

static int no_help(const galloc_report *report, void *user)
{
    EXPECT(report->asked == MIB(8) && user == shown);
    return 0;
}

static void set_and_unset(void *pool)
{
    galloc_callbacks calls = {no_help, NULL, NULL, NULL, shown};
    OK(galloc_pool_set_callbacks(pool, &calls));
    OK(galloc_pool_set_callbacks(pool, NULL));
}

static void ask_for_too_much(void *pool)
{
    void *p = NULL;
    EXPECT_EQ(galloc_pool_malloc(pool, &p, MIB(8), NULL), cudaErrorMemoryAllocation);
}

TEST(callbacks_are_set_while_memory_runs_out)
{
    begin();
    galloc_pool *pool = pool_limited(MIB(8));
    void *p = get(pool, MIB(4), NULL);
    side_by_side(set_and_unset, ask_for_too_much, pool, 4000);
    OK(galloc_free(p, NULL));
    pool_end(pool);
    finish();
}

enum { STREAMS_BESIDE = 200 };

static cudaStream_t streams_beside[STREAMS_BESIDE];

static void pass_a_sync_point(void *pool)
{
    size_t freed = 0;
    OK(galloc_pool_sync_point(pool, &freed));
}

static void leave_an_event(void *pool)
{
    cudaStream_t s = streams_beside[served++ % 2];
    OK(galloc_free(get(pool, MIB(3), s), s));
}

/* A sync point looks at the events of all streams; the first streams have theirs from another thread meanwhile. */
TEST(a_sync_point_looks_for_events_that_come_and_go)
{
    begin();
    galloc_config config = galloc_config_default();
    config.release_threshold = 0;
    galloc_pool *pool = pool_new(&config);
    void *p[STREAMS_BESIDE];
    for (int i = 0; i < STREAMS_BESIDE; i++) streams_beside[i] = stream_new();
    for (int i = 0; i < STREAMS_BESIDE; i++) p[i] = get(pool, 1000, streams_beside[i]);
    served = 0;
    side_by_side(pass_a_sync_point, leave_an_event, pool, 2000);
    for (int i = 0; i < STREAMS_BESIDE; i++) OK(galloc_free(p[i], streams_beside[i]));
    for (int i = 0; i < STREAMS_BESIDE; i++) stream_end(streams_beside[i]);
    pool_end(pool);
    finish();
}

enum { GROUPS_BESIDE = 2000 };

static galloc_graph *groups_beside[GROUPS_BESIDE];
static int released;

static void release_a_group(void *pool)
{
    (void)pool;
    if (released < GROUPS_BESIDE) OK(galloc_graph_release(groups_beside[released++], GALLOC_NO_STREAM));
}

static void capture_a_pair(void *pool)
{
    cudaStream_t s = streams_beside[1];
    cudaGraph_t graph = NULL;
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    OK(galloc_free(get(pool, 1000, s), s));
    OK(cudaStreamEndCapture(s, &graph));
    OK(cudaGraphDestroy(graph));
}

/* The first allocation of a capture looks through the groups that another thread releases. */
TEST(groups_are_released_beside_captures)
{
    begin();
    galloc_pool *pool = pool_new(NULL);
    for (int i = 0; i < 2; i++) streams_beside[i] = stream_new();
    for (int i = 0; i < GROUPS_BESIDE; i++) {
        OK(galloc_graph_begin(&groups_beside[i], pool, streams_beside[0]));
        OK(galloc_graph_end(groups_beside[i]));
    }
    released = 0;
    side_by_side(release_a_group, capture_a_pair, pool, GROUPS_BESIDE);
    EXPECT_EQ(released, GROUPS_BESIDE);
    for (int i = 0; i < 2; i++) stream_end(streams_beside[i]);
    pool_end(pool);
    finish();
}

static void have_a_group(galloc_pool *pool, cudaStream_t stream)
{
    galloc_graph *group = NULL;
    OK(galloc_graph_begin(&group, pool, stream));
    OK(galloc_graph_end(group));
    OK(galloc_graph_release(group, GALLOC_NO_STREAM));
}

static void have_one(void *pool) { have_a_group(pool, streams_beside[0]); }
static void have_another(void *pool) { have_a_group(pool, streams_beside[1]); }

TEST(groups_come_and_go_in_two_threads)
{
    begin();
    galloc_pool *pool = pool_new(NULL);
    for (int i = 0; i < 2; i++) streams_beside[i] = stream_new();
    side_by_side(have_one, have_another, pool, 8000);
    for (int i = 0; i < 2; i++) stream_end(streams_beside[i]);
    pool_end(pool);
    finish();
}

static void have_a_block(void *pool) { OK(galloc_free(get(pool, MIB(1), streams_beside[0]), streams_beside[0])); }
static void have_another_block(void *pool) { OK(galloc_free(get(pool, MIB(1), streams_beside[1]), streams_beside[1])); }

/* Below a limit each allocation from the driver's pool looks at what that has kept of earlier frees. */
TEST(blocks_of_the_drivers_pool_come_and_go_in_two_threads)
{
    begin();
    galloc_config config = config_limit(MIB(200));
    config.backend = GALLOC_BACKEND_CUDA_MALLOC_ASYNC;
    galloc_pool *pool = pool_new(&config);
    for (int i = 0; i < 2; i++) streams_beside[i] = stream_new();
    side_by_side(have_a_block, have_another_block, pool, 2000);
    for (int i = 0; i < 2; i++) stream_end(streams_beside[i]);
    pool_end(pool);
    finish();
}

static pthread_barrier_t both_begin;

static void *be_the_first(void *unused)
{
    void *p = NULL;
    pthread_barrier_wait(&both_begin);
    OK(galloc_malloc(&p, 1000, NULL));
    OK(galloc_free(p, NULL));
    return unused;
}

/* After galloc_shutdown two threads are the first to call galloc again: what one sets up the other one reads. */
TEST(threads_begin_together_after_a_shutdown)
{
    begin();
    EXPECT_EQ(pthread_barrier_init(&both_begin, NULL, 2), 0);
    for (int i = 0; i < 40; i++) {
        pthread_t thread[2];
        void *p = NULL;
        OK(galloc_malloc(&p, 1000, NULL));
        OK(galloc_free(p, NULL));
        OK(galloc_shutdown());
        for (int k = 0; k < 2; k++) EXPECT_EQ(pthread_create(&thread[k], NULL, be_the_first, NULL), 0);
        for (int k = 0; k < 2; k++) EXPECT_EQ(pthread_join(thread[k], NULL), 0);
    }
    pthread_barrier_destroy(&both_begin);
    finish();
}

/* ---- latches ---- */

enum { VISITORS = 3, VISITS = 30000 };

/* What a latch guards: two numbers that are equal whenever nobody is in. */
typedef struct guarded {
    long first, second, wrong;
    pthread_barrier_t start;
} guarded;

static void *visit(void *arg)
{
    guarded *g = arg;
    pthread_barrier_wait(&g->start);
    for (int i = 0; i < VISITS; i++) {
        inside_latch(1);
        g->wrong += g->first != g->second;
        g->first++;
        if (i % 1024 == 0) sched_yield(); /* on few processors others come while it is taken */
        g->second++;
        inside_latch(0);
    }
    return NULL;
}

TEST(a_latch_keeps_visitors_apart)
{
    begin();
    pthread_t thread[VISITORS];
    static guarded g;
    memset(&g, 0, sizeof g);
    pthread_barrier_init(&g.start, NULL, VISITORS);
    for (int i = 0; i < VISITORS; i++) EXPECT_EQ(pthread_create(&thread[i], NULL, visit, &g), 0);
    for (int i = 0; i < VISITORS; i++) EXPECT_EQ(pthread_join(thread[i], NULL), 0);
    EXPECT_EQ(g.wrong, 0);
    EXPECT_EQ(g.first, VISITORS * VISITS);
    EXPECT_EQ(g.second, g.first);
    pthread_barrier_destroy(&g.start);
    finish();
}

/* The cache lines that threads who share a cache wait for: it begins where one does. */
TEST(caches_begin_a_line_of_memory)
{
    begin();
    galloc_pool *pool = pool_new(NULL);
    for (int i = 0; i < 4; i++) {
        cudaStream_t s = stream_new();
        OK(galloc_free(get(pool, KIB(64), s), s));
        EXPECT(inside_cache_is_aligned(pool));
        stream_end(s);
    }
    pool_end(pool);
    finish();
}

/* ---- contexts ---------------------------------------------------------------------------------------------------- */

static struct {
    galloc_pool *pool;
    pthread_t first;
    int met, done; /* the first is in the middle of it; the second has ended */
} meeting;

static void *meet(void *user)
{
    CUcontext context = NULL;
    OK((cudaError_t)cuCtxCreate(&context, NULL, 0, 0));
    cudaStream_t s = stream_new();
    while (user && !__atomic_load_n(&meeting.met, __ATOMIC_RELAXED)) sched_yield();
    OK(galloc_free(get(meeting.pool, KIB(64), s), s));
    if (user) __atomic_store_n(&meeting.done, 1, __ATOMIC_RELAXED);
    OK(galloc_stream_retire(s));
    stream_end(s);
    return context;
}

/* The first one gets host memory for the description of its context, which is small. It waits a little for the second,
   which is to find its own way meanwhile as far as it may. */
static void meet_in_the_middle(size_t bytes)
{
    if (bytes >= 64 || !pthread_equal(pthread_self(), meeting.first)) return;
    __atomic_store_n(&meeting.met, 1, __ATOMIC_RELAXED);
    for (int i = 0; i < 300 && !__atomic_load_n(&meeting.done, __ATOMIC_RELAXED); i++) usleep(1000);
}

/* galloc learns of a context at the first allocation there, whatever other threads do. ThreadSanitizer sees how. */
TEST(threads_bring_contexts_of_their_own)
{
    pthread_t second;
    void *context;
    begin();
    memset(&meeting, 0, sizeof meeting);
    meeting.pool = pool_new(NULL);
    meeting.first = pthread_self();
    inside_on_malloc = meet_in_the_middle;
    EXPECT_EQ(pthread_create(&second, NULL, meet, &meeting), 0);
    CUcontext own = meet(NULL);
    EXPECT_EQ(meeting.met, 1);
    EXPECT_EQ(pthread_join(second, &context), 0);
    inside_on_malloc = NULL;
    pool_end(meeting.pool);
    OK((cudaError_t)cuCtxDestroy(own));
    OK((cudaError_t)cuCtxDestroy(context));
    finish();
}

static void *use_and_end(void *pool)
{
    void *p[24];
    for (size_t i = 0; i < 24; i++) p[i] = get(pool, 512 * (i + 1), cudaStreamPerThread);
    for (size_t i = 0; i < 24; i++) OK(galloc_free(p[i], cudaStreamPerThread));
    return NULL;
}

static int all_have_ended;

static void *go_on(void *pool)
{
    cudaStream_t s = stream_new();
    void *p[16];
    while (!__atomic_load_n(&all_have_ended, __ATOMIC_RELAXED)) {
        for (size_t i = 0; i < 16; i++) p[i] = get(pool, 100000 + 512 * i, s);
        for (size_t i = 0; i < 16; i++) OK(galloc_free(p[i], s));
    }
    return NULL;
}

/* What lies in a thread's cache goes back to the pool at its end, while other threads use the pool. */
TEST(threads_end_beside_others_that_go_on)
{
    begin();
    galloc_config config = galloc_config_default();
    config.lane_bytes = MIB(1);
    galloc_pool *pool = pool_new(&config);
    pthread_t other, thread[2];
    __atomic_store_n(&all_have_ended, 0, __ATOMIC_RELAXED);
    EXPECT_EQ(pthread_create(&other, NULL, go_on, pool), 0);
    for (int round = 0; round < 100; round++) {
        for (int i = 0; i < 2; i++) EXPECT_EQ(pthread_create(&thread[i], NULL, use_and_end, pool), 0);
        for (int i = 0; i < 2; i++) EXPECT_EQ(pthread_join(thread[i], NULL), 0);
        if (round % 25 == 0) EXPECT_EQ(galloc_pool_check(pool), 0);
    }
    __atomic_store_n(&all_have_ended, 1, __ATOMIC_RELAXED);
    EXPECT_EQ(pthread_join(other, NULL), 0);
    pool_end(pool);
    finish();
}

static struct {
    galloc_pool *pool;
    cudaStream_t stream[3];
} sampled;

static void *make_sampled_pairs(void *seed)
{
    dice d = {(uint32_t)(uintptr_t)seed};
    struct {
        void *ptr;
        cudaStream_t stream;
    } live[6] = {{NULL, NULL}};
    for (int i = 0; i < 4000; i++) {
        size_t at = (size_t)roll_below(&d, 6);
        if (live[at].ptr) OK(galloc_free(live[at].ptr, roll_below(&d, 8) ? live[at].stream : sampled.stream[0]));
        live[at].stream = sampled.stream[roll_below(&d, 3)];
        OK(galloc_pool_malloc(sampled.pool, &live[at].ptr, 400 + 300 * (size_t)roll_below(&d, 4), live[at].stream));
        if (i % 300 == 0) OK(galloc_pool_trim(sampled.pool, 0, NULL));
    }
    for (int i = 0; i < 6; i++)
        if (live[i].ptr) OK(galloc_free(live[i].ptr, live[i].stream));
    return NULL;
}

/* Blocks with guards are set and checked by threads that share streams. */
TEST(threads_share_sampled_guards)
{
    static const char *const settings[] = {"debug:guards,debug_sample:64", "debug:guards+poison,debug_sample:64"};
    for (int k = 0; k < 2; k++) {
        pthread_t thread[4];
        begin();
        for (int i = 0; i < 3; i++) sampled.stream[i] = stream_new();
        galloc_config config = galloc_config_default();
        OK(galloc_config_parse(&config, settings[k], NULL, 0));
        sampled.pool = pool_new(&config);
        for (uintptr_t i = 0; i < 4; i++)
            EXPECT_EQ(pthread_create(&thread[i], NULL, make_sampled_pairs, (void *)(i + 1)), 0);
        for (int i = 0; i < 4; i++) EXPECT_EQ(pthread_join(thread[i], NULL), 0);
        OK(cudaDeviceSynchronize());
        EXPECT_EQ(galloc_pool_check(sampled.pool), 0);
        EXPECT(stats_of(sampled.pool).checks > 0);
        pool_end(sampled.pool);
        for (int i = 0; i < 3; i++) stream_end(sampled.stream[i]);
        finish();
    }
}

static void *set_limits(void *pool)
{
    for (size_t i = 0; i < 20000; i++) OK(galloc_pool_set_limit((galloc_pool *)pool, MIB(64) + i % 1000 * MIB(1)));
    return NULL;
}

/* Settings are read while others change them. */
TEST(settings_are_read_while_the_limit_changes)
{
    begin();
    galloc_pool *pool = pool_new(NULL);
    galloc_config config;
    pthread_t thread;
    pthread_create(&thread, NULL, set_limits, pool);
    for (int i = 0; i < 20000; i++) OK(galloc_pool_config(pool, &config));
    pthread_join(thread, NULL);
    pool_end(pool);
    finish();
}

static struct {
    uint64_t most;
    int round, done;
} raised;

enum { RAISES = 400000 };

static void *raise_most(void *odd)
{
    for (int i = 0; i < RAISES; i++) {
        for (int n = 1; __atomic_load_n(&raised.round, __ATOMIC_ACQUIRE) != i; n++)
            if (n % 256 == 0) sched_yield(); /* on one processor the other thread could not run */
        for (volatile int n = odd ? i % 64 : i / 64 % 64; n; n--) {} /* each may be the later one by a little */
        inside_count_max(&raised.most, 2 * (uint64_t)i + (odd != NULL) + 1);
        if (__atomic_add_fetch(&raised.done, 1, __ATOMIC_ACQ_REL) == 2) {
            EXPECT_EQ(raised.most, 2 * (uint64_t)i + 2);
            raised.done = 0;
            __atomic_store_n(&raised.round, i + 1, __ATOMIC_RELEASE);
        }
    }
    return NULL;
}

/* Of two that are noted at once the larger one stays. */
TEST(the_longest_call_is_kept)
{
    pthread_t thread;
    pthread_create(&thread, NULL, raise_most, &raised);
    raise_most(NULL);
    pthread_join(thread, NULL);
}

static struct {
    galloc_pool *pool;
    int stop;
} busy;

static int write_nothing(void *user, const void *data, size_t bytes)
{
    (void)user, (void)data, (void)bytes;
    return 0;
}

/* Requests that fail and requests that make the heap grow. */
static void *run_out(void *turn)
{
    cudaStream_t stream = stream_new();
    while (!__atomic_load_n(&busy.stop, __ATOMIC_RELAXED)) {
        void *p = NULL, *q = get(busy.pool, MIB(2 + 3 * (size_t)(turn != NULL)), stream);
        EXPECT(galloc_pool_malloc(busy.pool, &p, MIB(100), stream) != cudaSuccess);
        OK(galloc_free(q, stream));
        (void)galloc_pool_trim(busy.pool, MIB(1), NULL);
    }
    sim_run(-1);
    stream_end(stream);
    return NULL;
}

/* Everything that can be asked, while requests fail in two threads and pools come and go in this one. */
static void *ask_all(void *unused)
{
    char text[200];
    while (!__atomic_load_n(&busy.stop, __ATOMIC_RELAXED)) {
        galloc_decision decisions[2];
        galloc_torch_stats torch;
        galloc_config config;
        galloc_stats stats;
        int n;
        OK(galloc_annotate("between"));
        OK(galloc_pool_decisions(busy.pool, decisions, 2, &n));
        (void)galloc_pool_torch_stats(busy.pool, &torch); /* like:pytorch only */
        OK(galloc_pool_config(busy.pool, &config));
        OK(galloc_pool_stats(busy.pool, &stats));
        OK(galloc_live_text(busy.pool, text, sizeof text));
        OK(galloc_snapshot(NULL, GALLOC_SNAPSHOT_JSON, write_nothing, NULL));
    }
    return unused;
}

TEST(all_is_asked_while_pools_come_and_go_and_run_out)
{
    static const char *const settings[] = {"memory_limit:64M,history:100", "like:pytorch,memory_limit:64M,history:100"};
    for (size_t k = 0; k < sizeof settings / sizeof *settings; k++) {
        pthread_t threads[3];
        galloc_config config = galloc_config_default();
        begin();
        OK(galloc_config_parse(&config, settings[k], NULL, 0));
        busy.pool = pool_new(&config);
        busy.stop = 0;
        pthread_create(&threads[0], NULL, run_out, NULL);
        pthread_create(&threads[1], NULL, run_out, &busy);
        pthread_create(&threads[2], NULL, ask_all, NULL);
        for (int i = 0; i < 200; i++) {
            galloc_pool *other = pool_new(&config);
            OK(galloc_free(get(other, MIB(1), NULL), NULL));
            pool_end(other);
        }
        __atomic_store_n(&busy.stop, 1, __ATOMIC_RELAXED);
        for (int i = 0; i < 3; i++) pthread_join(threads[i], NULL);
        pool_end(busy.pool);
        finish();
    }
}

static struct {
    galloc_pool *pool;
    cudaStream_t stream;
    int nth;  /* question about a context that the allocation takes long over */
    int asks; /* it does so */
} reset_met;

static __thread int reads_slowly;

static void sleep_in_the_question(const char *function)
{
    if (!reads_slowly || strcmp(function, "cuCtxGetId") || --reset_met.nth) return;
    __atomic_store_n(&reset_met.asks, 1, __ATOMIC_RELAXED);
    usleep(30000);
}

static void *allocate_slowly(void *unused)
{
    void *p = NULL;
    (void)unused;
    reads_slowly = 1;
    OK(galloc_pool_malloc(reset_met.pool, &p, 1000, reset_met.stream));
    reads_slowly = 0;
    __atomic_store_n(&reset_met.asks, 1, __ATOMIC_RELAXED);
    OK(galloc_free(p, reset_met.stream));
    return NULL;
}

/* After a reset of the device one thread allocates from memory that is there still. Meanwhile another one is the first
   to notice the reset. debug asks about the pool's context: for the guard, and before it waits for a default stream. */
TEST(a_reset_is_noticed_beside_an_allocation)
{
    for (int i = 0; i < 8; i++) {
        cudaStream_t legacy = cudaStreamLegacy;
        begin();
        galloc_config config = galloc_config_default();
        config.debug = GALLOC_DEBUG_GUARDS;
        galloc_pool *pool = reset_met.pool = pool_new(&config);
        pthread_t thread;
        OK(galloc_pool_reserve(pool, MIB(20)));
        OK(galloc_free(get(pool, 1000, legacy), legacy));
        void *p = get(pool, 1000, legacy);
        OK(cudaDeviceReset());
        reset_met.stream = i % 2 ? legacy : stream_new();
        reset_met.nth = 1 + i / 2;
        reset_met.asks = 0;
        if (i % 2) OK(galloc_free(p, legacy)); /* the next allocation there looks whether it waits for a check */
        sim_hook(sleep_in_the_question, NULL);
        pthread_create(&thread, NULL, allocate_slowly, NULL);
        while (!__atomic_load_n(&reset_met.asks, __ATOMIC_RELAXED)) usleep(100);
        for (int k = 0; k < 4; k++) {
            OK(galloc_pool_trim(pool, MIB(20), NULL));
            usleep(5000);
        }
        pthread_join(thread, NULL);
        sim_hook(NULL, NULL);
        if (i % 2 == 0) OK(galloc_free(p, legacy));
        pool_end(pool);
        finish();
    }
}

TEST_MAIN()
