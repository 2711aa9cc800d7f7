/* test_threads_random.c - threads that allocate, work, resize and free in several pools and hand blocks to each other,
   in every way that the manual allows; beside them one that trims, checks, captures graphs, and makes and ends streams
   and pools. Contents are checked by the simulated device.
   GALLOC_ROUNDS=1000 makes it longer: so many tens of operations for each thread; GALLOC_SEED another one. */

#include "setup.h"

enum { WORKERS = 4, STREAMS = 6, POOLS = 3, SLOTS = 16, LETTERS = 32 };

/* A block on its way to another thread, ordered after the event. */
typedef struct letter {
    void *ptr;
    size_t bytes;
    uint64_t tag;
    cudaEvent_t ready;
} letter;

static struct {
    galloc_pool *pool[POOLS];
    cudaStream_t stream[STREAMS];
    pthread_mutex_t post;
    letter box[LETTERS];
    int letters, steps, working;
    uint64_t tags;
} w;

typedef struct slot {
    void *ptr;
    size_t bytes;
    uint64_t tag;
    cudaStream_t stream;
} slot;

typedef struct worker {
    dice d;
    slot slots[SLOTS];
    int n;
} worker;

static uint64_t new_tag(void) { return __atomic_add_fetch(&w.tags, 1, __ATOMIC_RELAXED); }

static cudaStream_t some_stream(dice *d)
{
    uint32_t k = roll_below(d, STREAMS + 1);
    return k < STREAMS ? w.stream[k] : cudaStreamPerThread;
}

static galloc_pool *some_pool(dice *d) { return w.pool[roll_below(d, POOLS)]; }

static slot *some_slot(worker *own) { return &own->slots[roll_below(&own->d, (uint32_t)own->n)]; }

static void forget(worker *own, slot *s) { *s = own->slots[--own->n]; }

static int is_scarce(cudaError_t error) { return error == cudaErrorMemoryAllocation; }

static void free_slot(worker *own, slot *s)
{
    look(s->stream, s->ptr, s->bytes, s->tag);
    OK(galloc_free(s->ptr, s->stream));
    forget(own, s);
}

static void allocate(worker *own)
{
    slot *s = &own->slots[own->n];
    cudaError_t error;
    if (own->n == SLOTS) return;
    s->stream = some_stream(&own->d);
    s->bytes = roll_bytes(&own->d, MIB(6));
    error = galloc_pool_malloc(some_pool(&own->d), &s->ptr, s->bytes, s->stream);
    if (is_scarce(error) && own->n) free_slot(own, some_slot(own));
    if (!is_scarce(error)) OK(error);
    if (error) return;
    put(s->stream, s->ptr, s->bytes, s->tag = new_tag());
    own->n++;
}

static void send(worker *own)
{
    slot *s = some_slot(own);
    letter l = {s->ptr, s->bytes, s->tag, NULL};
    int sent;
    OK(cudaEventCreateWithFlags(&l.ready, cudaEventDisableTiming));
    OK(cudaEventRecord(l.ready, s->stream));
    pthread_mutex_lock(&w.post);
    sent = w.letters < LETTERS;
    if (sent) w.box[w.letters++] = l;
    pthread_mutex_unlock(&w.post);
    if (sent) forget(own, s);
    else OK(cudaEventDestroy(l.ready));
}

/* The block is used on one stream and freed on it, on another one, or after both. */
static void use_letter(dice *d, const letter *l)
{
    cudaStream_t used = some_stream(d), freed = some_stream(d), both[2] = {freed, used};
    uint32_t how = roll_below(d, 3);
    OK(cudaStreamWaitEvent(used, l->ready, 0));
    look(used, l->ptr, l->bytes, l->tag);
    if (how) OK(cudaStreamWaitEvent(freed, l->ready, 0));
    if (how == 2) OK(galloc_record_stream(l->ptr, used));
    if (how == 1) OK(galloc_free_after(l->ptr, both, 2));
    else OK(galloc_free(l->ptr, how ? freed : used));
    OK(cudaEventDestroy(l->ready));
}

static int receive(dice *d)
{
    letter l = {NULL, 0, 0, NULL};
    pthread_mutex_lock(&w.post);
    if (w.letters) {
        letter *taken = &w.box[roll_below(d, (uint32_t)w.letters)];
        l = *taken;
        *taken = w.box[--w.letters];
    }
    pthread_mutex_unlock(&w.post);
    if (l.ptr) use_letter(d, &l);
    return l.ptr != NULL;
}

static void resize(worker *own)
{
    slot *s = some_slot(own);
    size_t bytes = roll_bytes(&own->d, MIB(6));
    cudaError_t error = galloc_resize(s->ptr, bytes, s->stream);
    if (error == cudaErrorNotSupported || is_scarce(error)) return;
    if (!OK(error)) return;
    s->bytes = bytes;
    put(s->stream, s->ptr, bytes, s->tag = new_tag());
}

static void *work(void *arg)
{
    worker *own = (worker *)arg;
    OK(cudaSetDevice(0));
    for (int i = 0; i < w.steps; i++) {
        uint32_t what = roll_below(&own->d, 10);
        if (what < 4) allocate(own);
        else if (what == 4) (void)receive(&own->d);
        else if (!own->n) continue;
        else if (what < 8) free_slot(own, some_slot(own));
        else if (what == 8) send(own);
        else resize(own);
    }
    while (own->n) free_slot(own, &own->slots[0]);
    __atomic_sub_fetch(&w.working, 1, __ATOMIC_ACQ_REL);
    return NULL;
}

/* ---- what goes on beside ----------------------------------------------------------------------------------------- */

static void use_a_stream(dice *d)
{
    cudaStream_t s = stream_new();
    for (uint32_t i = roll_below(d, 6); i > 0; i--) {
        size_t bytes = roll_bytes(d, MIB(6));
        uint64_t tag = new_tag();
        void *p;
        if (galloc_pool_malloc(some_pool(d), &p, bytes, s) != cudaSuccess) continue;
        put(s, p, bytes, tag);
        look(s, p, bytes, tag);
        OK(galloc_free(p, s));
    }
    if (roll_below(d, 2)) OK(galloc_stream_retire(s));
    stream_end(s);
}

/* Nobody else uses the pool; its stream they do. */
static void use_a_pool(dice *d)
{
    galloc_pool *pool = pool_new(NULL);
    galloc_stats stats;
    cudaStream_t s = w.stream[roll_below(d, STREAMS)];
    void *p = NULL;
    if (galloc_pool_malloc(pool, &p, roll_bytes(d, MIB(6)), s) == cudaSuccess) OK(galloc_free(p, s));
    pool_end(pool);
    EXPECT_EQ(galloc_pool_stats(pool, &stats), cudaErrorInvalidResourceHandle);
}

/* Work of one captured stream, of which the second step may be a forked one's. */
static void capture_some(dice *d, galloc_pool *pool, cudaStream_t s, cudaStream_t forked, void **result)
{
    for (int i = 0; i < 4; i++) {
        size_t bytes = roll_bytes(d, MIB(2));
        uint64_t tag = new_tag();
        void *p;
        if (galloc_pool_malloc(pool, &p, bytes, s) != cudaSuccess) continue;
        put(s, p, bytes, tag);
        if (i == 1) order(s, forked);
        look(i == 1 ? forked : s, p, bytes, tag);
        if (i == 1) order(forked, s);
        if (i == 3) *result = p;
        else OK(galloc_free(p, s));
    }
}

static void use_a_graph(dice *d)
{
    cudaStream_t s = stream_new(), forked = stream_new();
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    void *result = NULL;
    OK(cudaStreamBeginCapture(s, roll_below(d, 2) ? cudaStreamCaptureModeRelaxed : cudaStreamCaptureModeThreadLocal));
    capture_some(d, some_pool(d), s, forked, &result);
    OK(cudaStreamEndCapture(s, &graph));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    for (uint32_t i = roll_below(d, 3); i > 0; i--) OK(cudaGraphLaunch(exec, s));
    OK(galloc_free(result, s));
    OK(cudaStreamSynchronize(s));
    OK(cudaGraphExecDestroy(exec));
    OK(cudaGraphDestroy(graph));
    if (roll_below(d, 2)) OK(galloc_stream_retire(s));
    stream_end(s);
    stream_end(forked);
}

static void *disturb(void *arg)
{
    dice *d = (dice *)arg;
    OK(cudaSetDevice(0));
    while (__atomic_load_n(&w.working, __ATOMIC_ACQUIRE)) {
        galloc_stats stats;
        switch (roll_below(d, 8)) {
        case 0: OK(galloc_pool_trim(some_pool(d), roll_bytes(d, MIB(16)), NULL)); break;
        case 1: OK(galloc_pool_sync_point(some_pool(d), NULL)); break;
        case 2: EXPECT_EQ(galloc_pool_check(some_pool(d)), 0); break;
        case 3:
            stats = stats_of(some_pool(d));
            EXPECT_EQ(stats.allocated.current + stats.cached.current, stats.reserved.current);
            break;
        case 4: use_a_pool(d); break;
        case 5: use_a_stream(d); break;
        default: use_a_graph(d);
        }
    }
    return NULL;
}

/* ---- rounds ------------------------------------------------------------------------------------------------------ */

static galloc_config config_of(int round, int k)
{
    static const char *const confs[] = {
        "",                           "memory_limit:24M",        "expandable_segments:False",
        "strategy:pooled",            "overhead:0",              "like:pytorch",
        "gc_age:1ms,overhead:0",      "strategy:heuristic",      "stats:exact",
        "lane_bytes:16M",             "reuse:completed+followed"};
    galloc_config config = galloc_config_default();
    OK(galloc_config_parse(&config, confs[(size_t)(round * 4 + k * 5) % (sizeof confs / sizeof confs[0])], NULL, 0));
    return config;
}

static void run_round(int round)
{
    static worker workers[WORKERS];
    pthread_t thread[WORKERS], beside;
    dice d = {test_seed() * 977 + (uint64_t)round};
    sim_options options = sim_defaults();
    const char *rounds = getenv("GALLOC_ROUNDS");
    options.seed = test_seed() + (uint64_t)round;
    options.lag = round % 2 ? 30 : 0;
    options.memory = round % 3 == 2 ? MIB(64) : GIB(1);
    begin_with(options);
    memset(&w, 0, sizeof w);
    memset(workers, 0, sizeof workers);
    w.steps = rounds && *rounds ? 10 * atoi(rounds) : 1500;
    w.working = WORKERS;
    EXPECT_EQ(pthread_mutex_init(&w.post, NULL), 0);
    for (int i = 0; i < STREAMS; i++) w.stream[i] = stream_new();
    for (int i = 0; i < POOLS; i++) {
        galloc_config config = config_of(round, i);
        w.pool[i] = pool_new(&config);
    }
    EXPECT_EQ(pthread_create(&beside, NULL, disturb, &d), 0);
    for (int i = 0; i < WORKERS; i++) {
        workers[i].d.state = test_seed() * 31 + (uint64_t)(round * WORKERS + i);
        EXPECT_EQ(pthread_create(&thread[i], NULL, work, &workers[i]), 0);
    }
    for (int i = 0; i < WORKERS; i++) EXPECT_EQ(pthread_join(thread[i], NULL), 0);
    EXPECT_EQ(pthread_join(beside, NULL), 0);
    while (receive(&d)) {}
    for (int i = 0; i < POOLS; i++) {
        expect_healthy(w.pool[i], 0);
        EXPECT_EQ(stats_of(w.pool[i]).live.current, 0);
        pool_end(w.pool[i]);
    }
    pthread_mutex_destroy(&w.post);
    finish();
}

TEST(threads_do_all_that_is_allowed)
{
    for (int round = 0; round < 6; round++) run_round(round);
}

TEST_MAIN()
