/* test_exhaust.c - allocates until nothing is left, frees at random, and goes on: under limits of 16 MiB to 1 GiB, in
   pages and in fixed segments, on several streams that are busy, with calls into the driver that fail now and then, and
   with any waits, retries and callbacks. The limit is never passed, counters add up, each failure's report says what
   the test knows, nothing leaks. GALLOC_SEED chooses the numbers, EXHAUST_ROUNDS how often memory runs out. */

#include "setup.h"

static uint64_t clock_ns;
uint64_t inside_clock(void) { return __atomic_add_fetch(&clock_ns, 100000, __ATOMIC_RELAXED); }

enum { STREAMS = 4, BLOCKS = 256, WORLD_ROUNDS = 100 };

typedef struct block {
    void *ptr;
    size_t bytes;
    uint32_t home;
} block;

typedef struct world {
    dice d;
    galloc_pool *pool;
    cudaStream_t s[STREAMS];
    block block[BLOCKS];
    int count;
    size_t limit, live, told;
    void *foreign; /* the program's own, so that the device is full before the pool is */
    size_t outside;
    int faults;  /* may be armed */
    int quiet;   /* none was */
    int allocates, frees; /* what callbacks do */
} world;

/* Of all worlds. */
static struct {
    long rounds, served, refused, reports, rejections, asked, maps, unmaps, failed_calls, odd;
} sum;

static int coin(world *w, uint32_t one_in) { return roll_below(&w->d, one_in) == 0; }

static size_t device_held(const world *w) { return sim_physical(0) - w->outside; }

/* ---- the program's side ----------------------------------------------------------------------------------------- */

/* Calls into the driver may fail under a free as well: then the block is the program's still. */
static void give_back(world *w, int i)
{
    block b = w->block[i];
    uint32_t stream = coin(w, 3) ? roll_below(&w->d, STREAMS) : b.home;
    if (stream != b.home) order(w->s[b.home], w->s[stream]);
    cudaError_t err = galloc_free(b.ptr, w->s[stream]);
    if (err != cudaSuccess) {
        if (!EXPECT(w->faults)) printf("    %s\n", galloc_last_message());
        return;
    }
    w->live -= b.bytes;
    w->block[i] = w->block[--w->count];
}

static void check_report(const world *w, const galloc_report *r)
{
    size_t streams = r->more_stranded, held = r->held;
    for (int i = 0; i < GALLOC_REPORT_STREAMS; i++) streams += r->streams[i].bytes;
    EXPECT(r->pool == w->pool && r->device == 0 && r->cause[0]);
    EXPECT_EQ(r->live, w->live);
    EXPECT_EQ(r->live + r->rounding + r->cached, r->held);
    EXPECT_EQ(r->usable + r->stranded + r->graph_bytes + r->quarantined + r->busy, r->cached);
    if (!inside_in_mapping()) EXPECT_EQ(r->busy, 0);
    EXPECT_EQ(streams, r->stranded);
    EXPECT(r->usable_in_pages <= r->usable && r->in_slots <= r->usable && r->largest_usable <= r->usable - r->in_slots);
    EXPECT(r->limit == w->limit && held + r->room == r->limit);
    if (r->device_known) EXPECT_EQ(held + r->others_held + r->outside + r->device_free, r->device_total);
    if (r->device_known) EXPECT_EQ(r->outside, w->outside);
    EXPECT_EQ(r->other_pools, 0);
    if (w->quiet && !r->stranded && !inside_in_mapping()) EXPECT(r->largest_possible < r->rounded || r->rejected);
}

static int on_oom(const galloc_report *report, void *user)
{
    world *w = user;
    sum.asked++;
    check_report(w, report);
    EXPECT_EQ(report->held, device_held(w));
    EXPECT_EQ(galloc_pool_check(w->pool), 0);
    if (coin(w, 4)) return 0;
    for (int n = w->frees; n > 0 && w->count; n--) give_back(w, (int)roll_below(&w->d, (uint32_t)w->count));
    return 1;
}

static void on_reject(const galloc_report *report, void *user)
{
    world *w = user;
    check_report(w, report);
    EXPECT(report->rejected);
}

static void in_a_callback(world *w)
{
    void *p = NULL;
    cudaStream_t s = w->s[roll_below(&w->d, STREAMS)];
    if (coin(w, 16)) EXPECT_EQ(galloc_pool_check(w->pool), 0);
    EXPECT(stats_of(w->pool).reserved.current <= w->limit);
    if (!w->allocates || galloc_pool_malloc(w->pool, &p, roll_bytes(&w->d, w->limit / 16), s)) return;
    if (galloc_free(p, s) == cudaSuccess) return;
    EXPECT(w->faults);
    w->live += info_of(p).requested;
    w->block[w->count].bytes = info_of(p).requested;
    w->block[w->count].home = 0;
    w->block[w->count++].ptr = p;
}

static void on_map(galloc_pool *pool, void *addr, size_t bytes, void *user)
{
    world *w = user;
    EXPECT(pool == w->pool && addr && bytes);
    w->told += bytes;
    sum.maps++;
    in_a_callback(w);
}

static void on_unmap(galloc_pool *pool, void *addr, size_t bytes, void *user)
{
    world *w = user;
    EXPECT(pool == w->pool && addr && bytes && bytes <= w->told);
    w->told -= bytes;
    sum.unmaps++;
    in_a_callback(w);
}

/* ---- a round ----------------------------------------------------------------------------------------------------- */

static void arm(world *w)
{
    static const char *const calls[] = {
        "cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease", "cuMemAddressReserve", "cuMemAlloc",
        "cuMemFree", "cuEventCreate", "cuEventRecord", "cuEventQuery", "cuEventSynchronize", "cuStreamWaitEvent",
        "cuMemHostAlloc", "cuMemFreeHost", "cuMemGetInfo", "cuCtxPushCurrent", "cuCtxGetId", "cuStreamGetId",
        "cuStreamIsCapturing", "cuDevicePrimaryCtxGetState", "cuDeviceGetCount"};
    int n = sizeof calls / sizeof *calls, i = (int)roll_below(&w->d, (uint32_t)n + 1);
    long nth = 1 + (long)roll_below(&w->d, i == n ? 200 : 12);
    if (i == n) sim_fail("cuMemCreate", nth, 1, 0); /* the device has no more, from there on */
    else sim_fail(calls[i], nth, coin(w, 8), coin(w, 3) ? (int)cudaErrorUnknown : 0);
}

/* A refusal is for want of memory, or there was a fault; and its report is right. */
static void refused(world *w, cudaError_t err, size_t bytes)
{
    galloc_report r;
    sum.refused++;
    EXPECT_EQ(device_held(w), stats_of(w->pool).reserved.current);
    if (galloc_oom_report(&r) != cudaSuccess) {
        if (!EXPECT(w->faults)) printf("    %d: %s\n", (int)err, log_text);
        sum.odd++;
        return;
    }
    EXPECT_EQ(err, cudaErrorMemoryAllocation);
    EXPECT_EQ(r.asked, bytes);
    EXPECT_EQ(r.held, device_held(w));
    check_report(w, &r);
    sum.reports++;
    if (coin(w, 64)) {
        static char text[GALLOC_REPORT_TEXT];
        OK(galloc_report_text(&r, text, sizeof text));
        EXPECT(strstr(text, "what would help\n- ") != NULL);
        EXPECT(!strstr(text, "reuse:wait is off") || !(r.reuse & GALLOC_REUSE_WAIT));
        EXPECT(!strstr(text, "expandable_segments is False") || !r.expandable_segments);
    }
}

static void fill(world *w)
{
    for (int n = 0; n < 3 * BLOCKS && w->count < BLOCKS - 8; n++) {
        size_t bytes = roll_bytes(&w->d, w->limit / 4);
        uint32_t stream = roll_below(&w->d, STREAMS);
        void *ptr = NULL;
        long lines = log_lines;
        int allocates = w->allocates;
        cudaError_t err = galloc_pool_malloc(w->pool, &ptr, bytes, w->s[stream]);
        if (err != cudaSuccess) {
            EXPECT(ptr == NULL);
            EXPECT(log_lines > lines && (allocates || w->faults || log_lines == lines + 1));
            refused(w, err, bytes);
            return;
        }
        sum.served++;
        w->live += bytes;
        w->block[w->count].ptr = ptr;
        w->block[w->count].bytes = bytes;
        w->block[w->count++].home = stream;
        put(w->s[stream], ptr, bytes, (uintptr_t)ptr);
    }
}

static void play_round(world *w)
{
    if (w->faults && coin(w, 3)) {
        arm(w);
        w->quiet = 0;
    }
    fill(w);
    sum.failed_calls += sim_failed();
    sim_fail_clear();
    EXPECT(sim_physical_peak(0) <= w->limit + w->outside);
    EXPECT_EQ(stats_of(w->pool).live.current, w->live);
    if (!w->faults && w->told) EXPECT_EQ(w->told, sim_mapped(0) - w->outside);
    if (coin(w, 8)) EXPECT_EQ(galloc_pool_check(w->pool), 0);
    if (coin(w, 10)) sim_run(-1);
    if (coin(w, 20)) (void)galloc_pool_trim(w->pool, roll_bytes(&w->d, w->limit), NULL);
    uint32_t part = 1 + roll_below(&w->d, 8);
    for (int i = w->count - 1; i >= 0; i--)
        if (roll_below(&w->d, 8) < part) give_back(w, i);
    if (w->count > BLOCKS / 2)
        while (w->count > BLOCKS / 4) give_back(w, 0);
}

/* ---- worlds ------------------------------------------------------------------------------------------------------ */

static void open_world(world *w, uint64_t seed)
{
    static const uint64_t waits[] = {UINT64_MAX, UINT64_MAX, 0, 1, 4};
    galloc_callbacks calls = {on_oom, on_reject, on_map, on_unmap, w};
    galloc_config config;
    sim_options options = sim_defaults();
    memset(w, 0, sizeof *w);
    w->d.state = seed * 7919;
    w->limit = MIB(16) << roll_below(&w->d, 7);
    if (coin(w, 2)) w->limit -= MIB(2) * roll_below(&w->d, 3);
    options.seed = seed;
    options.memory = GIB(2);
    if (coin(w, 4)) {
        options.memory = w->limit;
        w->outside = MIB(2) * (1 + roll_below(&w->d, (uint32_t)(w->limit / MIB(4))));
    }
    options.pace = (int)roll_below(&w->d, 3) - 1;
    begin_with(options);
    for (int i = 0; i < STREAMS; i++) w->s[i] = stream_new();
    if (w->outside) OK(cudaMalloc(&w->foreign, w->outside));
    config = config_limit(w->limit);
    config.expandable_segments = !coin(w, 3);
    config.reuse = coin(w, 2) ? 7 : (int)roll_below(&w->d, 8);
    config.overhead = coin(w, 2) ? 0.02 : 0.3;
    config.wait_limit_ms = waits[roll_below(&w->d, 5)];
    config.max_retries = roll_below(&w->d, 5);
    config.throw_on_cudamalloc_oom = coin(w, 8);
    config.stats_exact = coin(w, 8);
    w->pool = pool_new(&config);
    w->faults = coin(w, 2);
    w->quiet = 1;
    w->frees = (int)roll_below(&w->d, 4);
    w->allocates = coin(w, 2);
    if (coin(w, 2)) calls.on_map = NULL, calls.on_unmap = NULL;
    if (coin(w, 3)) calls.on_oom = NULL;
    if (!coin(w, 4)) OK(galloc_pool_set_callbacks(w->pool, &calls));
}

static void close_world(world *w)
{
    for (int i = w->count - 1; i >= 0; i--) {
        look(w->s[w->block[i].home], w->block[i].ptr, w->block[i].bytes, (uintptr_t)w->block[i].ptr);
        OK(galloc_free(w->block[i].ptr, w->s[w->block[i].home]));
        w->live -= w->block[i].bytes;
    }
    w->count = 0;
    w->allocates = 0; /* or a callback's block would keep a page from being given back */
    sum.rejections += (long)stats_of(w->pool).rejections;
    OK(galloc_pool_trim(w->pool, 0, NULL));
    EXPECT_EQ(stats_of(w->pool).reserved.current, 0);
    EXPECT_EQ(device_held(w), 0);
    if (w->foreign) OK(cudaFree(w->foreign));
    expect_healthy(w->pool, 1);
    pool_end(w->pool);
    if (!w->faults) EXPECT_EQ(w->told, 0);
    for (int i = 0; i < STREAMS; i++) stream_end(w->s[i]);
    finish();
}

static long rounds(void)
{
    const char *text = getenv("EXHAUST_ROUNDS");
    return text && *text ? atol(text) : 2000;
}

TEST(memory_runs_out_again_and_again)
{
    static world all;
    for (uint64_t seed = test_seed(); sum.rounds < rounds(); seed++) {
        long before = test_failures, n;
        open_world(&all, seed);
        for (n = 0; n < WORLD_ROUNDS; n++) play_round(&all);
        sum.rounds += n;
        close_world(&all);
        if (test_failures > before) {
            printf("    first failure with GALLOC_SEED=%llu EXHAUST_ROUNDS=1\n", (unsigned long long)seed);
            break;
        }
        if (sum.rounds % 50000 == 0) fprintf(stderr, "%ld rounds\n", sum.rounds);
    }
    EXPECT(sum.refused > sum.rounds / 2); /* memory did run out, and each thing that is to be seen did happen */
    if (sum.rounds >= 2000) {
        EXPECT(sum.reports > sum.refused / 2 && sum.rejections > 0 && sum.asked > sum.rounds / 10);
        EXPECT(sum.maps > sum.rounds / 10 && sum.unmaps == sum.maps && sum.failed_calls > sum.rounds / 100);
    }
    printf("%ld rounds, %ld allocations, %ld refused: %ld reports, %ld for other reasons; %ld refused at once\n",
           sum.rounds, sum.served, sum.refused, sum.reports, sum.odd, sum.rejections);
    printf("on_oom %ld, on_map %ld, on_unmap %ld times; %ld calls into the driver failed\n", sum.asked, sum.maps,
           sum.unmaps, sum.failed_calls);
}

TEST_MAIN()
