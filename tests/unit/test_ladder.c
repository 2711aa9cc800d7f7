/* test_ladder.c - running out of memory: how long a call may wait, what the program is asked and told, what the report
   says. */

#include "setup.h"

static uint64_t clock_ns, clock_tick = 1000;
uint64_t inside_clock(void) { return __atomic_add_fetch(&clock_ns, clock_tick, __ATOMIC_RELAXED); }

static galloc_report report_of_failure(void)
{
    galloc_report report;
    memset(&report, 0, sizeof report);
    OK(galloc_oom_report(&report));
    return report;
}

static void expect_refused(galloc_pool *pool, size_t bytes, cudaStream_t stream)
{
    void *ptr = pool;
    EXPECT_EQ(galloc_pool_malloc(pool, &ptr, bytes, stream), cudaErrorMemoryAllocation);
    EXPECT(ptr == NULL);
}

static const galloc_step *step_of(const galloc_report *report, const char *name)
{
    static const galloc_step none = {"", "there is no such step", 0};
    EXPECT(report->steps[GALLOC_REPORT_STEPS - 1].name == NULL); /* the end, for loops that look for it */
    for (int i = 0; i < GALLOC_REPORT_STEPS && report->steps[i].name; i++)
        if (!strcmp(report->steps[i].name, name)) return &report->steps[i];
    return EXPECT(0) ? NULL : &none;
}

/* Was the step left out, for a reason with this in it? */
static int left_out(const galloc_report *report, const char *name, const char *why)
{
    const char *said = step_of(report, name)->left_out;
    return said && strstr(said, why);
}

/* ---- waiting --------------------------------------------------------------------------------------------------- */

/* All of a pool of 16 MiB was freed on one stream, whose work goes on; another asks, and is never made to wait. */
typedef struct busy {
    galloc_pool *pool;
    cudaStream_t s[2];
} busy;

static busy busy_pool(uint64_t wait_limit_ms, size_t piece, int fixed)
{
    galloc_config config = config_limit(MIB(16));
    busy b;
    void *p[64];
    int n = (int)(MIB(16) / piece);
    begin_still();
    config.reuse = GALLOC_REUSE_COMPLETED;
    config.wait_limit_ms = wait_limit_ms;
    config.expandable_segments = !fixed;
    b.pool = pool_new(&config);
    b.s[0] = stream_new();
    b.s[1] = stream_new();
    void *other = get(b.pool, 512, b.s[1]);
    OK(galloc_free(other, b.s[1]));
    OK(galloc_pool_trim(b.pool, 0, NULL));
    for (int i = 0; i < n; i++) p[i] = get(b.pool, piece, b.s[0]);
    for (int i = 0; i < n; i++) put(b.s[0], p[i], piece, 1);
    for (int i = 0; i < n; i++) OK(galloc_free(p[i], b.s[0]));
    return b;
}

static void busy_end(busy *b)
{
    sim_run(-1);
    expect_healthy(b->pool, 1);
    pool_end(b->pool);
    for (int i = 0; i < 2; i++) stream_end(b->s[i]);
    finish();
}

/* Two streams have freed as much each, the first to be met last. The host waits for the older event: the stream of the
   other one may never get on. */
TEST(the_host_waits_for_the_oldest_event)
{
    begin_still();
    galloc_config config = config_limit(MIB(64));
    config.reuse = GALLOC_REUSE_COMPLETED;
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s[3] = {stream_new(), stream_new(), stream_new()};
    void *p[2];
    for (int i = 0; i < 2; i++) p[i] = get_used(pool, MIB(30), s[i], 1);
    sim_hold(s[0], 1);
    OK(galloc_free(p[1], s[1]));
    OK(galloc_free(p[0], s[0]));
    void *q = get(pool, MIB(30), s[2]);
    EXPECT_EQ(sim_findings(SIM_DEADLOCK), 0);
    sim_hold(s[0], 0);
    OK(galloc_free(q, s[2]));
    pool_end(pool);
    finish();
}

/* The stream waits for the free that left the memory, not for a later one of the same stream, which may be long in
   coming. */
TEST(the_stream_waits_for_no_later_free)
{
    begin_still();
    galloc_config config = config_limit(MIB(44));
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new(), t = stream_new(), slow = stream_new();
    void *p = get_used(pool, MIB(32), s, 1), *wall = get(pool, MIB(2), s), *q = get(pool, MIB(8), s), *r;
    OK(galloc_free(get(pool, 512, t), t));
    OK(galloc_free(p, s));
    sim_hold(slow, 1);
    put(slow, wall, MIB(2), 2);
    order(slow, s);
    put(s, q, MIB(8), 2);
    OK(galloc_free(q, s));
    EXPECT_EQ(sim_calls("cuEventRecord"), 2); /* after both frees */
    r = get_used(pool, MIB(32), t, 3);
    EXPECT(r == p);
    EXPECT_EQ(stats_of(pool).waits, 1);
    sim_run(-1);
    EXPECT(sim_stream_done(t));
    EXPECT(!sim_stream_done(s));
    sim_hold(slow, 0);
    OK(galloc_free(r, t));
    OK(galloc_free_after(wall, (cudaStream_t[]){s, slow}, 2));
    pool_end(pool);
    finish();
}

/* A pool of 1/57 of its limit makes a stream wait, one of 1/70 grows instead. A device's limit is one, too. */
TEST(a_stream_waits_from_a_64th_of_the_limit_on)
{
    for (int of_device = 0; of_device < 2; of_device++) {
        for (int most = 57; most <= 70; most += 13) {
            begin_still();
            galloc_config config = galloc_config_default();
            *(of_device ? &config.device_limit : &config.memory_limit) = MIB(112) * (size_t)most;
            config.growth = MIB(2);
            galloc_pool *pool = pool_new(&config);
            cudaStream_t s = stream_new(), t = stream_new();
            void *p = get(pool, MIB(56), s), *q = get_used(pool, MIB(56), t, 1);
            OK(galloc_free(q, t));
            q = get(pool, MIB(56), s);
            EXPECT_EQ(stats_of(pool).waits, most == 57);
            EXPECT_EQ(stats_of(pool).reserved.current, most == 57 ? MIB(112) : MIB(168));
            OK(galloc_free(p, s));
            OK(galloc_free(q, s));
            pool_end(pool);
            finish();
        }
    }
}

/* throw_on_cudamalloc_oom leaves out what waits or gives memory back. The use of a part of a parked page does
   neither. */
TEST(parts_of_parked_pages_are_used_at_once)
{
    begin();
    galloc_config config = config_limit(MIB(64));
    config.throw_on_cudamalloc_oom = 1;
    config.growth = MIB(64);
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new(), t = stream_new();
    void *p = get(pool, MIB(32), s), *q = get_used(pool, MIB(32), t, 1);
    sim_hold(t, 1);
    OK(galloc_free(p, s));
    OK(galloc_free(q, t));
    p = get(pool, MIB(3), s);
    q = get(pool, MIB(5), s);
    EXPECT_EQ(stats_of(pool).rejections, 0);
    EXPECT_EQ(stats_of(pool).reserved.current, MIB(64));
    sim_hold(t, 0);
    OK(galloc_free(p, s));
    OK(galloc_free(q, s));
    pool_end(pool);
    finish();
}

/* S has its block again, with an event recorded for its use before. To wait for that event gains nothing. */
TEST(the_host_waits_for_no_event_that_keeps_no_memory)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_limited(MIB(8));
    void *other = get(pool, 512, t);
    void *p = get(pool, MIB(4), s);
    put(s, p, MIB(4), 1);
    OK(galloc_free(p, s));
    EXPECT(sim_calls("cuEventRecord") > 0);
    EXPECT(get(pool, MIB(4), s) == p);
    expect_refused(pool, MIB(4), t);
    EXPECT_EQ(sim_calls("cuEventSynchronize"), 0);
    OK(galloc_free(p, s));
    OK(galloc_free(other, t));
    pool_end(pool);
    finish();
}

/* Of several streams the host waits first for that with the most free memory, though its work was queued later. */
TEST(the_host_waits_for_the_stream_with_most_free_memory)
{
    begin_still();
    galloc_config config = config_limit(MIB(16));
    config.reuse = GALLOC_REUSE_COMPLETED;
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s[3] = {stream_new(), stream_new(), stream_new()};
    void *kept = get(pool, 512, s[2]), *little = get(pool, MIB(4), s[0]), *much = get(pool, MIB(10), s[1]);
    put(s[0], little, MIB(4), 1);
    put(s[1], much, MIB(10), 1);
    OK(galloc_free(little, s[0]));
    OK(galloc_free(much, s[1]));
    long waits = sim_calls("cuEventSynchronize");
    void *p = get(pool, MIB(10), s[2]);
    EXPECT_EQ(sim_calls("cuEventSynchronize"), waits + 1);
    EXPECT(!sim_stream_done(s[0]) && sim_stream_done(s[1]));
    OK(galloc_free(p, s[2]));
    OK(galloc_free(kept, s[2]));
    pool_end(pool);
    finish();
}

TEST(no_limit_waits_as_long_as_it_takes)
{
    busy b = busy_pool(UINT64_MAX, MIB(4), 0);
    long waits = sim_calls("cuEventSynchronize");
    void *p = get(b.pool, MIB(4), b.s[1]);
    EXPECT(sim_calls("cuEventSynchronize") > waits);
    OK(galloc_free(p, b.s[1]));
    busy_end(&b);
}

TEST(a_wait_limit_of_0_never_waits)
{
    busy b = busy_pool(0, MIB(4), 0);
    long blocking = sim_blocking_calls();
    expect_refused(b.pool, MIB(4), b.s[1]);
    galloc_report r = report_of_failure();
    EXPECT_EQ(sim_blocking_calls(), blocking);
    EXPECT_EQ(sim_calls("cuEventSynchronize"), 0);
    expect_sums(&r);
    EXPECT_EQ(r.stranded, MIB(16));
    EXPECT(left_out(&r, "wait on the host for events", "wait_limit_ms is 0"));
    EXPECT(left_out(&r, "wait for the device", "wait_limit_ms cannot limit this wait"));
    sim_run(-1);
    OK(galloc_free(get(b.pool, MIB(4), b.s[1]), b.s[1])); /* what is finished is had without a wait */
    busy_end(&b);
}

TEST(a_wait_ends_with_its_limit)
{
    busy b = busy_pool(5, MIB(4), 0);
    long blocking = sim_blocking_calls(), queries = sim_calls("cuEventQuery");
    clock_tick = 50000;
    uint64_t began = clock_ns;
    expect_refused(b.pool, MIB(4), b.s[1]);
    EXPECT(clock_ns - began >= 5000000 && clock_ns - began < 12000000);
    clock_tick = 1000;
    EXPECT(sim_calls("cuEventQuery") > queries + 4);
    EXPECT_EQ(sim_blocking_calls(), blocking);
    galloc_report r = report_of_failure();
    expect_sums(&r);
    EXPECT(left_out(&r, "wait on the host for events", "wait_limit_ms has passed"));
    busy_end(&b);
}

/* A limited wait asks for an event again and again: a driver that refuses to tell is named by the function that was
   asked. */
TEST(a_limited_wait_that_fails_names_the_question)
{
    int named = 0;
    for (int nth = 1; nth < 12; nth++) {
        busy b = busy_pool(5, MIB(4), 0);
        void *p = NULL;
        sim_fail("cuEventQuery", nth, 0, cudaErrorUnknown);
        clock_tick = 50000;
        cudaError_t error = galloc_pool_malloc(b.pool, &p, MIB(4), b.s[1]);
        clock_tick = 1000;
        sim_fail_clear();
        EXPECT(error == cudaErrorUnknown || error == cudaErrorMemoryAllocation);
        if (error == cudaErrorUnknown) named += EXPECT(strstr(galloc_last_message(), "cuEventQuery") != NULL);
        EXPECT_EQ(sim_calls("cuEventSynchronize"), 0);
        busy_end(&b);
    }
    EXPECT(named > 0); /* else nothing is tested */
}

static int queries_until_done, again_after;
static int done_after_some_queries(void)
{
    if (--queries_until_done != 0) return 0;
    queries_until_done = again_after;
    return 1;
}

TEST(a_limited_wait_gets_what_becomes_free_in_time)
{
    busy b = busy_pool(1000, MIB(4), 0);
    queries_until_done = 40;
    sim_hook(NULL, done_after_some_queries);
    void *p = get(b.pool, MIB(4), b.s[1]);
    sim_hook(NULL, NULL);
    EXPECT_EQ(sim_calls("cuEventSynchronize"), 0);
    OK(galloc_free(p, b.s[1]));
    busy_end(&b);
}

/* Each of several streams is waited for in vain: together no longer than the limit. */
TEST(the_limit_is_shared_by_all_events)
{
    galloc_config config = config_limit(MIB(32));
    begin_still();
    config.reuse = GALLOC_REUSE_COMPLETED;
    config.wait_limit_ms = 20;
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s[5];
    void *p[4];
    for (int i = 0; i < 5; i++) s[i] = stream_new();
    OK(galloc_free(get(pool, 512, s[4]), s[4]));
    for (int i = 0; i < 4; i++) p[i] = get(pool, MIB(4), s[i]);
    for (int i = 0; i < 4; i++) put(s[i], p[i], MIB(4), 1);
    for (int i = 0; i < 4; i++) OK(galloc_free(p[i], s[i]));
    p[0] = get(pool, MIB(13), s[4]);
    queries_until_done = again_after = 16;
    sim_hook(NULL, done_after_some_queries);
    clock_tick = 200000;
    uint64_t began = clock_ns;
    expect_refused(pool, MIB(12), s[4]);
    EXPECT(clock_ns - began < 30000000);
    clock_tick = 1000;
    again_after = 0;
    sim_hook(NULL, NULL);
    sim_run(-1);
    OK(galloc_free(p[0], s[4]));
    pool_end(pool);
    for (int i = 0; i < 5; i++) stream_end(s[i]);
    finish();
}

/* One piece after the other, and no more than is needed. */
TEST(a_limited_wait_is_for_just_enough)
{
    busy b = busy_pool(1000, MIB(4), 0);
    queries_until_done = 30;
    sim_hook(NULL, done_after_some_queries);
    void *p = get(b.pool, MIB(3), b.s[1]);
    sim_hook(NULL, NULL);
    EXPECT(!sim_stream_done(b.s[0]));
    OK(galloc_free(p, b.s[1]));
    busy_end(&b);
}

/* What has no event is proved free only by a wait for the device, which cannot be limited. */
TEST(the_device_is_waited_for_only_without_a_limit)
{
    for (int limited = 0; limited < 2; limited++) {
        galloc_config config = config_limit(MIB(2));
        begin_still();
        config.reuse = GALLOC_REUSE_COMPLETED;
        if (limited) config.wait_limit_ms = 1000;
        galloc_pool *pool = pool_new(&config);
        cudaStream_t s[2] = {stream_new(), stream_new()};
        OK(galloc_free(get(pool, 512, s[1]), s[1]));
        void *p = get(pool, MIB(1), s[0]);
        put(s[0], p, MIB(1), 1);
        OK(galloc_free(p, s[0]));
        long waits = sim_calls("cuMemFreeHost");
        if (limited) {
            expect_refused(pool, MIB(2), s[1]);
            galloc_report r = report_of_failure();
            EXPECT(left_out(&r, "wait for the device", "wait_limit_ms"));
        } else {
            OK(galloc_free(get(pool, MIB(2), s[1]), s[1]));
        }
        EXPECT_EQ(sim_calls("cuMemFreeHost") > waits, !limited);
        sim_run(-1);
        pool_end(pool);
        stream_end(s[0]);
        stream_end(s[1]);
        finish();
    }
}

/* cudaFree waits for the device, which would end a capture. */
TEST(fixed_segments_are_not_given_back_in_a_capture)
{
    galloc_config config = config_limit(MIB(64));
    begin();
    config.expandable_segments = 0;
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new();
    cudaGraph_t graph = NULL;
    void *p[2] = {get(pool, MIB(20), s), get(pool, MIB(20), s)};
    for (int i = 0; i < 2; i++) OK(galloc_free(p[i], s));
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    expect_refused(pool, MIB(50), s);
    galloc_report r = report_of_failure();
    EXPECT(left_out(&r, "return free pages and create others", "cudaFree waits, which a capture forbids"));
    EXPECT_EQ(sim_calls("cuMemFree"), 0);
    OK(cudaStreamEndCapture(s, &graph));
    OK(cudaGraphDestroy(graph));
    OK(galloc_free(get(pool, MIB(50), s), s));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* cudaFree waits for the device. */
TEST(fixed_segments_are_not_given_back_within_a_wait_limit)
{
    for (int limited = 0; limited < 2; limited++) {
        galloc_config config = config_limit(MIB(64));
        begin_still();
        config.expandable_segments = 0;
        if (limited) config.wait_limit_ms = 10;
        galloc_pool *pool = pool_new(&config);
        cudaStream_t s = stream_new();
        void *p[2] = {get(pool, MIB(20), s), get(pool, MIB(20), s)};
        for (int i = 0; i < 2; i++) OK(galloc_free(p[i], s));
        OK(galloc_pool_trim(pool, SIZE_MAX, NULL));
        sim_run(-1);
        if (limited) {
            expect_refused(pool, MIB(50), s);
            galloc_report r = report_of_failure();
            expect_sums(&r);
            EXPECT(left_out(&r, "return free pages and create others", "wait_limit_ms"));
            EXPECT_EQ(r.usable, MIB(40));
            EXPECT_EQ(r.largest_usable, MIB(20));
        } else {
            OK(galloc_free(get(pool, MIB(50), s), s));
        }
        EXPECT_EQ(sim_calls("cuMemFree") > 0, !limited);
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

/* ---- on_oom and on_reject -------------------------------------------------------------------------------------- */

typedef struct asked {
    galloc_pool *pool;
    cudaStream_t s;
    void *give[16]; /* one is freed each time */
    int calls, rejects, given, again, nested;
    long waits; /* for the device, when it was asked last */
    galloc_report last;
} asked;

/* Nothing of galloc's is locked while the program is called. */
static void expect_unlocked(galloc_pool *pool) { EXPECT(inside_unlocked(pool)); }

static int on_oom(const galloc_report *report, void *user)
{
    asked *a = user;
    void *p;
    expect_unlocked(a->pool);
    expect_sums(report);
    a->calls++;
    a->last = *report;
    a->waits = sim_calls("cuMemFreeHost");
    EXPECT_EQ(galloc_pool_check(a->pool), 0);
    if (a->nested) { /* is not asked about again */
        EXPECT_EQ(galloc_pool_malloc(a->pool, &p, report->asked, a->s), cudaErrorMemoryAllocation);
        EXPECT_EQ(galloc_free(a, a->s), cudaErrorInvalidDevicePointer);
    }
    if (a->given < 16 && a->give[a->given]) OK(galloc_free(a->give[a->given++], a->s));
    return a->again;
}

static void on_reject(const galloc_report *report, void *user)
{
    asked *a = user;
    void *p;
    expect_unlocked(a->pool);
    expect_sums(report);
    EXPECT(report->rejected);
    a->rejects++;
    a->last = *report;
    if (a->nested) EXPECT_EQ(galloc_pool_malloc(a->pool, &p, report->asked, a->s), cudaErrorMemoryAllocation);
}

static void ask(asked *a, unsigned max_retries, int at_once)
{
    galloc_callbacks calls = {on_oom, on_reject, NULL, NULL, a};
    galloc_config config = config_limit(MIB(32));
    memset(a, 0, sizeof *a);
    begin();
    config.max_retries = max_retries;
    config.throw_on_cudamalloc_oom = at_once;
    a->pool = pool_new(&config);
    a->s = stream_new();
    OK(galloc_pool_set_callbacks(a->pool, &calls));
    for (int i = 0; i < 16; i++) a->give[i] = get(a->pool, MIB(2), a->s);
    a->again = 1;
}

static void ask_end(asked *a)
{
    for (; a->given < 16; a->given++) OK(galloc_free(a->give[a->given], a->s));
    sim_run(-1);
    expect_healthy(a->pool, 1);
    pool_end(a->pool);
    stream_end(a->s);
    finish();
}

TEST(the_program_frees_until_it_fits)
{
    asked a;
    ask(&a, 8, 0);
    a.nested = 1;
    void *p = get(a.pool, MIB(6), a.s);
    EXPECT_EQ(a.calls, 3);
    EXPECT_EQ(a.last.rounds, 2);
    EXPECT_EQ(log_lines, 6); /* those of what failed in the callback */
    EXPECT_EQ(stats_of(a.pool).failures, 3);
    OK(galloc_free(p, a.s));
    ask_end(&a);
}

/* Small blocks go to the stream's cache when they are freed: that is looked into as well. */
TEST(what_the_program_frees_for_the_stream_itself_is_found)
{
    asked a;
    ask(&a, 8, 0);
    void *whole = a.give[0];
    OK(galloc_free(a.give[15], a.s));
    a.give[15] = get(a.pool, KIB(1536), a.s);
    a.give[0] = get(a.pool, KIB(512), a.s);
    void *p = get(a.pool, 512, a.s);
    EXPECT_EQ(a.calls, 1);
    EXPECT_EQ(sim_calls("cuMemFreeHost"), a.waits);
    OK(galloc_free(p, a.s));
    OK(galloc_free(whole, a.s));
    ask_end(&a);
}

/* The text has all rounds, the first one included; nothing if there was no other. */
static void expect_rounds(const galloc_report *report, unsigned again)
{
    char text[GALLOC_REPORT_TEXT], rounds[32] = "gained\n";
    if (again) snprintf(rounds, sizeof rounds, "gained in %u rounds\n", again + 1);
    OK(galloc_report_text(report, text, sizeof text));
    EXPECT(strstr(text, rounds) != NULL);
}

static int try_again_once(const galloc_report *report, void *user)
{
    (void)user;
    return !report->rounds;
}

/* The steps of a second round gain nothing more: the report has what the first ones did. */
TEST(the_gains_of_all_rounds_add_up)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_limited(MIB(64));
    galloc_callbacks calls = {try_again_once, NULL, NULL, NULL, NULL};
    size_t gained = 0;
    OK(galloc_pool_set_callbacks(pool, &calls));
    void *q = get(pool, MIB(30), s), *p = get_used(pool, MIB(20), t, 1);
    OK(galloc_free(p, t));
    expect_refused(pool, MIB(50), s);
    galloc_report r = report_of_failure();
    EXPECT_EQ(r.rounds, 1);
    for (int i = 0; i < GALLOC_REPORT_STEPS && r.steps[i].name; i++) gained += r.steps[i].gained;
    EXPECT(gained >= MIB(20) && gained < MIB(64));
    OK(galloc_free(q, s));
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* The second round waits no longer than the first one has left of the limit. */
TEST(the_limit_of_waits_is_shared_by_all_rounds)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_config config = config_limit(MIB(64));
    galloc_callbacks calls = {.on_oom = try_again_once};
    config.reuse = GALLOC_REUSE_COMPLETED;
    config.wait_limit_ms = 20;
    galloc_pool *pool = pool_new(&config);
    OK(galloc_pool_set_callbacks(pool, &calls));
    void *small = get(pool, 512, s);
    OK(galloc_free(get_used(pool, MIB(40), t, 1), t));
    sim_hold(t, 1);
    clock_tick = 200000;
    uint64_t began = clock_ns;
    expect_refused(pool, MIB(40), s);
    EXPECT(clock_ns - began < 30000000);
    clock_tick = 1000;
    EXPECT_EQ(report_of_failure().rounds, 1);
    sim_hold(t, 0);
    OK(galloc_free(small, s));
    sim_run(-1);
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

static int get_more_once(const galloc_report *report, void *user)
{
    asked *a = user;
    if (report->rounds) return 0;
    a->last = *report;
    a->give[0] = get(a->pool, MIB(20), a->s);
    return 1;
}

/* What the program does in on_oom may make a step apply that did not: the report has what the last round left out. */
TEST(the_report_says_what_the_last_round_left_out)
{
    static const char step[] = "make the stream wait, in a large pool";
    asked a = {0};
    galloc_callbacks calls = {get_more_once, NULL, NULL, NULL, &a};
    begin();
    a.s = stream_new();
    a.pool = pool_limited(MIB(256));
    OK(galloc_pool_set_callbacks(a.pool, &calls));
    void *p = get(a.pool, MIB(1), a.s);
    expect_refused(a.pool, MIB(256), a.s);
    EXPECT(left_out(&a.last, step, "the pool is small"));
    galloc_report r = report_of_failure();
    EXPECT_EQ(r.rounds, 1);
    EXPECT(!step_of(&r, step)->left_out);
    OK(galloc_free(a.give[0], a.s));
    OK(galloc_free(p, a.s));
    pool_end(a.pool);
    stream_end(a.s);
    finish();
}

/* The work of another stream was complete, so that the block is free for its own stream, whose work goes on. */
TEST(a_gain_counts_memory_that_only_its_stream_may_use)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_config config = config_limit(MIB(64));
    config.wait_limit_ms = 0;
    galloc_pool *pool = pool_new(&config);
    void *other = get(pool, MIB(2), t), *q = get(pool, MIB(30), s), *p = get_used(pool, MIB(20), s, 1);
    OK(galloc_record_stream(p, t));
    OK(galloc_free(p, s));
    OK(cudaStreamSynchronize(t));
    expect_refused(pool, MIB(50), s);
    EXPECT(sim_pending() > 0);
    galloc_report r = report_of_failure();
    EXPECT_EQ(step_of(&r, "use memory whose work is complete")->gained, MIB(20));
    OK(galloc_free(q, s));
    OK(galloc_free(other, t));
    sim_run(-1);
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

TEST(rounds_are_bounded)
{
    for (unsigned most = 0; most < 4; most++) {
        asked a;
        ask(&a, most, 0);
        expect_refused(a.pool, MIB(20), a.s);
        EXPECT_EQ(a.calls, most);
        galloc_report r = report_of_failure();
        EXPECT_EQ(r.rounds, most);
        expect_rounds(&r, most);
        EXPECT_EQ(r.asked, MIB(20));
        EXPECT_EQ(r.live, MIB(32) - MIB(2) * most);
        EXPECT(strstr(log_text, "memory_limit") != NULL);
        EXPECT_EQ(log_lines, 1);
        ask_end(&a);
    }
}

TEST(the_program_says_no)
{
    asked a;
    ask(&a, 8, 0);
    a.again = 0;
    expect_refused(a.pool, MIB(20), a.s);
    EXPECT_EQ(a.calls, 1);
    expect_refused(a.pool, MIB(33), a.s); /* could never be held: refused at once */
    EXPECT_EQ(a.calls, 1);
    EXPECT_EQ(a.rejects, 1);
    galloc_report r = report_of_failure();
    EXPECT(r.rejected && !r.steps_taken);
    EXPECT_EQ(stats_of(a.pool).rejections, 1);
    EXPECT_EQ(stats_of(a.pool).failures, 2);
    OK(galloc_pool_set_callbacks(a.pool, NULL));
    expect_refused(a.pool, MIB(20), a.s);
    EXPECT_EQ(a.calls, 1);
    ask_end(&a);
}

TEST(throw_refuses_at_once)
{
    asked a;
    ask(&a, 8, 1);
    a.nested = 1;
    long released = sim_calls("cuMemRelease");
    expect_refused(a.pool, MIB(2), a.s);
    EXPECT_EQ(a.calls, 0);
    EXPECT_EQ(a.rejects, 1);
    EXPECT_EQ(sim_calls("cuMemRelease"), released);
    EXPECT_EQ(stats_of(a.pool).rejections, 2); /* with the one in the callback */
    EXPECT(strstr(log_text, "refused at once") != NULL);
    galloc_report r = report_of_failure();
    EXPECT(left_out(&r, "return free pages and create others", "throw_on_cudamalloc_oom"));
    OK(galloc_free(a.give[0], a.s));
    OK(galloc_free(a.give[2], a.s));
    a.give[0] = get(a.pool, MIB(4), a.s); /* pages still move */
    a.give[2] = NULL;
    OK(galloc_pool_stats_reset(a.pool));
    EXPECT_EQ(stats_of(a.pool).rejections, 0);
    for (int i = 0; i < 16; i++) OK(galloc_free(a.give[i], a.s));
    a.given = 16;
    ask_end(&a);
}

/* ---- on_map and on_unmap --------------------------------------------------------------------------------------- */

enum { RANGES = 512 };

typedef struct map {
    galloc_pool *pool;
    cudaStream_t s;
    struct {
        char *addr;
        size_t bytes;
    } range[RANGES];
    int n, maps, unmaps;
    size_t bytes;
    size_t more; /* another thread allocates so much while on_map is under way */
    int allocate, reenter;
} map;

static void *allocate_meanwhile(void *user)
{
    map *m = user;
    void *p = NULL;
    size_t more = m->more;
    m->more = 0;
    if (galloc_pool_malloc(m->pool, &p, more, m->s) == cudaSuccess) OK(galloc_free(p, m->s));
    return NULL;
}

static void in_a_callback(map *m)
{
    galloc_callbacks none;
    void *p = NULL;
    expect_unlocked(m->pool);
    EXPECT_EQ(galloc_pool_check(m->pool), 0);
    EXPECT(stats_of(m->pool).reserved.current >= sim_physical(0));
    memset(&none, 0, sizeof none);
    if (m->reenter) EXPECT_EQ(galloc_pool_set_callbacks(m->pool, &none), cudaErrorNotPermitted);
    long changes = memory_calls();
    if (m->allocate && galloc_pool_malloc(m->pool, &p, m->allocate == 1 ? 4096 : MIB(3), m->s) == cudaSuccess)
        OK(galloc_free(p, m->s));
    EXPECT_EQ(memory_calls(), changes); /* it makes do with what there is */
    if (m->more) {
        pthread_t other;
        pthread_create(&other, NULL, allocate_meanwhile, m);
        pthread_join(other, NULL);
    }
}

static void on_map(galloc_pool *pool, void *addr, size_t bytes, void *user)
{
    map *m = user;
    EXPECT(pool == m->pool);
    for (int i = 0; i < m->n; i++)
        EXPECT((char *)addr + bytes <= m->range[i].addr || m->range[i].addr + m->range[i].bytes <= (char *)addr);
    m->range[m->n].addr = addr;
    m->range[m->n++].bytes = bytes;
    m->maps++;
    m->bytes += bytes;
    put(m->s, addr, bytes, 7); /* it can be used */
    OK(cudaStreamSynchronize(m->s));
    in_a_callback(m);
}

static void on_unmap(galloc_pool *pool, void *addr, size_t bytes, void *user)
{
    map *m = user;
    int i = 0;
    EXPECT(pool == m->pool);
    while (i < m->n && (m->range[i].addr != (char *)addr || m->range[i].bytes != bytes)) i++;
    if (EXPECT(i < m->n)) m->range[i] = m->range[--m->n];
    m->unmaps++;
    m->bytes -= bytes;
    EXPECT(info_of(addr).state == GALLOC_STATE_FOREIGN); /* it is nobody's any more */
    in_a_callback(m);
}

static galloc_callbacks map_calls(map *m)
{
    galloc_callbacks calls = {NULL, NULL, on_map, on_unmap, m};
    return calls;
}

/* What the program was told is what the device says. */
static void expect_told(const map *m) { EXPECT_EQ(m->bytes, sim_mapped(0)); }

static void map_open(map *m, const galloc_config *config)
{
    galloc_callbacks calls = map_calls(m);
    memset(m, 0, sizeof *m);
    m->pool = pool_new(config);
    m->s = stream_new();
    OK(galloc_pool_set_callbacks(m->pool, &calls));
}

static void map_start(map *m, int fixed, size_t limit)
{
    galloc_config config = config_limit(limit);
    begin();
    config.expandable_segments = !fixed;
    config.overhead = 0;
    map_open(m, &config);
}

static void map_end(map *m)
{
    sim_run(-1);
    expect_told(m);
    pool_end(m->pool);
    EXPECT_EQ(m->n, 0);
    EXPECT_EQ(m->bytes, 0);
    EXPECT_EQ(m->maps, m->unmaps);
    stream_end(m->s);
    finish();
}

/* Pages that are created, that move, that are given back, and old mappings that go. */
static void play_maps(map *m)
{
    void *p[24];
    for (int i = 0; i < 24; i++) p[i] = get(m->pool, MIB(2), m->s);
    expect_told(m);
    for (int i = 0; i < 24; i += 2) OK(galloc_free(p[i], m->s));
    void *big = get(m->pool, MIB(12), m->s);
    expect_told(m);
    OK(galloc_free(big, m->s));
    for (int i = 1; i < 24; i += 2) OK(galloc_free(p[i], m->s));
    big = get(m->pool, MIB(40), m->s);
    expect_told(m);
    OK(galloc_free(big, m->s));
    OK(galloc_pool_trim(m->pool, MIB(8), NULL));
    expect_told(m);
    OK(galloc_pool_trim(m->pool, 0, NULL));
    EXPECT_EQ(m->n, 0);
    OK(galloc_free(get(m->pool, MIB(5), m->s), m->s));
}

TEST(the_program_is_told_of_all_mappings)
{
    for (int fixed = 0; fixed < 2; fixed++) {
        for (int allocate = 0; allocate < 3; allocate++) {
            map m;
            map_start(&m, fixed, MIB(96));
            m.allocate = allocate;
            m.reenter = 1;
            play_maps(&m);
            EXPECT(m.maps > 0 && m.unmaps > 0);
            map_end(&m);
        }
    }
}

static void *reserve_in_vain(void *user)
{
    map *m = user;
    sim_fail("cuMemAlloc", 1, 1, 0);
    EXPECT_EQ(galloc_pool_reserve(m->pool, MIB(2)), cudaErrorMemoryAllocation);
    sim_fail_clear();
    return NULL;
}

/* ---- pages for RDMA ---------------------------------------------------------------------------------------------- */

static void told(galloc_pool *pool, void *addr, size_t bytes, void *user)
{
    (void)pool, (void)addr, (void)bytes, (void)user;
}

static galloc_pool *rdma_pool(int device_can, const char *text)
{
    sim_options options = sim_defaults();
    galloc_config config = galloc_config_default();
    options.rdma = device_can;
    begin_with(options);
    OK(galloc_config_parse(&config, text, NULL, 0));
    return pool_new(&config);
}

/* By a setting, for all pages, also those of a pool that moves them and gives some back; or for none. */
TEST(pages_are_made_for_rdma_where_that_is_asked_for)
{
    for (int wanted = 0; wanted < 2; wanted++) {
        galloc_pool *pool = rdma_pool(1, wanted ? "gpu_direct_rdma:True" : "");
        galloc_config config;
        cudaStream_t s = stream_new();
        void *p[8];
        for (int i = 0; i < 8; i++) p[i] = get(pool, MIB(10), s);
        for (int i = 0; i < 8; i += 2) OK(galloc_free(p[i], s));
        OK(cudaStreamSynchronize(s));
        void *large = get(pool, MIB(60), s);
        put(s, large, MIB(60), 1);
        OK(galloc_pool_config(pool, &config));
        EXPECT_EQ(config.gpu_direct_rdma, wanted);
        EXPECT(sim_physical(0) >= MIB(100));
        EXPECT_EQ(sim_rdma(0), wanted ? sim_physical(0) : 0);
        OK(galloc_free(large, s));
        for (int i = 1; i < 8; i += 2) OK(galloc_free(p[i], s));
        OK(galloc_pool_trim(pool, 0, NULL));
        EXPECT_EQ(sim_rdma(0), 0);
        pool_end(pool);
        finish();
    }
}

static struct {
    galloc_pool *pool;
    pthread_t first, second;
    int left, begun; /* steps until another thread sets other callbacks; it has begun to */
    long calls;
} other_callbacks;

static int of_the_first_set(const galloc_report *report, void *user)
{
    (void)report;
    EXPECT_EQ((uintptr_t)user, 1);
    other_callbacks.calls++;
    return 0;
}

static int of_the_second_set(const galloc_report *report, void *user)
{
    (void)report;
    EXPECT_EQ((uintptr_t)user, 2);
    other_callbacks.calls++;
    return 0;
}

static void of_the_first_pages(galloc_pool *pool, void *addr, size_t bytes, void *user)
{
    (void)pool;
    (void)addr;
    (void)bytes;
    EXPECT_EQ((uintptr_t)user, 1);
}

static void of_the_second_pages(galloc_pool *pool, void *addr, size_t bytes, void *user)
{
    (void)pool;
    (void)addr;
    (void)bytes;
    EXPECT_EQ((uintptr_t)user, 2);
}

static void *set_the_second(void *unused)
{
    galloc_callbacks calls = {of_the_second_set, NULL, of_the_second_pages, of_the_second_pages, (void *)2};
    OK(galloc_pool_set_callbacks(other_callbacks.pool, &calls));
    return unused;
}

static void let_another_set(const char *function, int locks)
{
    (void)function;
    if (locks > 1 || !pthread_equal(pthread_self(), other_callbacks.first) || other_callbacks.begun ||
        other_callbacks.left-- != 0)
        return;
    other_callbacks.begun = 1;
    EXPECT_EQ(pthread_create(&other_callbacks.second, NULL, set_the_second, NULL), 0);
    usleep(2000); /* it may have to wait for this thread */
}

/* Another thread sets other callbacks at any moment of a request: each function gets the user that was set with it. */
TEST(a_callback_gets_the_user_that_was_set_with_it)
{
    other_callbacks.calls = 0;
    for (int step = 0; !step || other_callbacks.begun; step++) {
        galloc_callbacks calls = {of_the_first_set, NULL, of_the_first_pages, of_the_first_pages, (void *)1};
        begin();
        other_callbacks.pool = pool_limited(MIB(8));
        other_callbacks.first = pthread_self();
        other_callbacks.begun = 0;
        other_callbacks.left = step;
        cudaStream_t s = stream_new();
        OK(galloc_pool_set_callbacks(other_callbacks.pool, &calls));
        void *p = get(other_callbacks.pool, MIB(4), s), *q = NULL;
        inside_on_step = let_another_set;
        EXPECT_EQ(galloc_pool_malloc(other_callbacks.pool, &q, MIB(6), s), cudaErrorMemoryAllocation);
        OK(galloc_free(p, s));
        OK(galloc_pool_trim(other_callbacks.pool, 0, NULL));
        inside_on_step = NULL;
        if (other_callbacks.begun) EXPECT_EQ(pthread_join(other_callbacks.second, NULL), 0);
        pool_end(other_callbacks.pool);
        finish();
        EXPECT(step < 500);
    }
    EXPECT(other_callbacks.calls > 0);
}

static struct {
    galloc_pool *pool;
    int inside[2], go_on[2]; /* a thread is in on_oom, and may leave it */
    int set;                 /* galloc_pool_set_callbacks has returned */
} askers;

static int stay_in_on_oom(const galloc_report *report, void *user)
{
    int which = report->asked > MIB(6);
    (void)user;
    __atomic_store_n(&askers.inside[which], 1, __ATOMIC_RELEASE);
    while (!__atomic_load_n(&askers.go_on[which], __ATOMIC_ACQUIRE)) usleep(100);
    return 0;
}

static void *run_out(void *which)
{
    void *p = NULL;
    OK(cudaSetDevice(0));
    EXPECT_EQ(galloc_pool_malloc(askers.pool, &p, which ? MIB(7) : MIB(5), NULL), cudaErrorMemoryAllocation);
    return NULL;
}

static void *take_callbacks_away(void *unused)
{
    OK(galloc_pool_set_callbacks(askers.pool, NULL));
    __atomic_store_n(&askers.set, 1, __ATOMIC_RELEASE);
    return unused;
}

/* Two threads are in on_oom, and either leaves it first: new callbacks are set once both have left it. */
TEST(callbacks_are_set_once_no_thread_is_in_an_old_one)
{
    for (int first = 0; first < 2; first++) {
        galloc_callbacks calls = {stay_in_on_oom, NULL, NULL, NULL, NULL};
        pthread_t thread[2], sets;
        begin();
        memset(&askers, 0, sizeof askers);
        askers.pool = pool_limited(MIB(8));
        void *p = get(askers.pool, MIB(4), NULL);
        OK(galloc_pool_set_callbacks(askers.pool, &calls));
        for (int i = 0; i < 2; i++) {
            EXPECT_EQ(pthread_create(&thread[i], NULL, run_out, i ? &askers : NULL), 0);
            while (!__atomic_load_n(&askers.inside[i], __ATOMIC_ACQUIRE)) usleep(100);
        }
        __atomic_store_n(&askers.go_on[first], 1, __ATOMIC_RELEASE);
        EXPECT_EQ(pthread_join(thread[first], NULL), 0);
        EXPECT_EQ(pthread_create(&sets, NULL, take_callbacks_away, NULL), 0);
        usleep(20000);
        EXPECT(!__atomic_load_n(&askers.set, __ATOMIC_ACQUIRE));
        __atomic_store_n(&askers.go_on[!first], 1, __ATOMIC_RELEASE);
        EXPECT_EQ(pthread_join(thread[!first], NULL), 0);
        EXPECT_EQ(pthread_join(sets, NULL), 0);
        OK(galloc_free(p, NULL));
        pool_end(askers.pool);
        finish();
    }
}

/* Nor on fixed segments, which are the driver's to make. A driver that does not know of it has none. */
TEST(no_page_is_made_for_rdma_where_the_device_cannot)
{
    static const int can[] = {0, -1, 1};
    for (int i = 0; i < 3; i++) {
        galloc_pool *pool = rdma_pool(can[i], i < 2 ? "gpu_direct_rdma:True"
                                                    : "gpu_direct_rdma:True,expandable_segments:False");
        galloc_callbacks calls = {NULL, NULL, told, told, NULL};
        galloc_config config;
        cudaStream_t s = stream_new();
        OK(galloc_pool_set_callbacks(pool, &calls));
        OK(galloc_free(get(pool, MIB(10), s), s));
        OK(galloc_pool_config(pool, &config));
        EXPECT_EQ(config.gpu_direct_rdma, 0);
        EXPECT(sim_physical(0) >= MIB(10));
        EXPECT_EQ(sim_rdma(0), 0);
        OK(galloc_pool_set_callbacks(pool, NULL));
        pool_end(pool);
        finish();
    }
}

/* Those that are created while on_map is set; not those before and after. */
TEST(pages_that_on_map_is_told_of_are_made_for_rdma)
{
    galloc_pool *pool = rdma_pool(1, "");
    galloc_callbacks calls = {NULL, NULL, told, NULL, NULL}, neither = {NULL, NULL, NULL, told, NULL};
    cudaStream_t s = stream_new();
    void *p[3];
    p[0] = get(pool, MIB(10), s);
    size_t before = sim_physical(0);
    OK(galloc_pool_set_callbacks(pool, &calls));
    EXPECT_EQ(sim_rdma(0), 0);
    p[1] = get(pool, MIB(40), s);
    EXPECT(sim_physical(0) > before);
    size_t during = sim_physical(0);
    EXPECT_EQ(sim_rdma(0), during - before);
    OK(galloc_pool_set_callbacks(pool, &neither));
    p[2] = get(pool, MIB(40), s);
    EXPECT(sim_physical(0) > during);
    EXPECT_EQ(sim_rdma(0), during - before);
    for (int i = 0; i < 3; i++) OK(galloc_free(p[i], s));
    OK(galloc_pool_set_callbacks(pool, NULL));
    pool_end(pool);
    finish();
}

static void on_map_and_reserve(galloc_pool *pool, void *addr, size_t bytes, void *user)
{
    pthread_t other;
    on_map(pool, addr, bytes, user);
    pthread_create(&other, NULL, reserve_in_vain, user);
    pthread_join(other, NULL);
}

/* Of two threads that reserve memory nobody has asked for yet, one is told of its segment while the other fails. */
TEST(reserved_while_another_fails_to)
{
    map m;
    galloc_config config = config_limit(MIB(96));
    begin();
    config.like = GALLOC_LIKE_PYTORCH;
    config.expandable_segments = 0;
    map_open(&m, &config);
    galloc_callbacks calls = map_calls(&m);
    calls.on_map = on_map_and_reserve;
    OK(galloc_pool_set_callbacks(m.pool, &calls));
    OK(galloc_pool_reserve(m.pool, MIB(30)));
    EXPECT_EQ(galloc_pool_check(m.pool), 0);
    expect_told(&m);
    OK(galloc_free(get(m.pool, MIB(30), m.s), m.s));
    EXPECT_EQ(m.maps, 1);
    map_end(&m);
}

/* A block grows to where pages were that have moved: they are unmapped there. */
/* A program that frees at the first on_unmap of a trim. */
typedef struct free_late {
    galloc_pool *pool;
    cudaStream_t s;
    void *held[2];
} free_late;

static void free_on_unmap(galloc_pool *pool, void *addr, size_t bytes, void *user)
{
    free_late *f = user;
    (void)addr, (void)bytes;
    if (!f->held[0]) return;
    for (int i = 0; i < 2; i++) OK(galloc_free(f->held[i], f->s));
    f->held[0] = NULL;
    OK(galloc_free(get(pool, MIB(4), f->s), f->s)); /* into the stream cache */
}

TEST(trim_returns_what_on_unmap_frees)
{
    begin();
    galloc_config config = galloc_config_default();
    config.growth = MIB(2);
    config.lane_bytes = MIB(64);
    free_late f = {pool_new(&config), stream_new(), {NULL, NULL}};
    galloc_callbacks calls = {.on_unmap = free_on_unmap, .user = &f};
    void *p = get(f.pool, MIB(4), f.s), *first = get(f.pool, MIB(4), f.s);
    f.held[1] = get(f.pool, MIB(2), f.s);
    size_t released = 0;
    OK(galloc_free(p, f.s));
    OK(galloc_pool_trim(f.pool, MIB(8), NULL)); /* what follows waits for nothing */
    OK(galloc_pool_set_callbacks(f.pool, &calls));
    f.held[0] = first;
    OK(galloc_pool_trim(f.pool, 0, &released));
    EXPECT(!f.held[0]);
    EXPECT_EQ(released, MIB(8));
    EXPECT_EQ(stats_of(f.pool).reserved.current, 0);
    pool_end(f.pool);
    stream_end(f.s);
    finish();
}

static void *grow_meanwhile(void *user)
{
    free_late *f = user;
    f->held[0] = get(f->pool, MIB(64), NULL);
    return NULL;
}

static void grow_on_unmap(galloc_pool *pool, void *addr, size_t bytes, void *user)
{
    free_late *f = user;
    pthread_t other;
    (void)pool, (void)addr, (void)bytes;
    if (f->held[0]) return;
    pthread_create(&other, NULL, grow_meanwhile, f);
    pthread_join(other, NULL);
}

/* What another thread creates while on_unmap runs is not taken from what the trim says that it gave back. */
TEST(trim_says_what_it_gives_back_beside_a_pool_that_grows)
{
    begin();
    free_late f = {pool_new(NULL), stream_new(), {NULL, NULL}};
    size_t released = 0;
    galloc_callbacks calls = {.on_unmap = grow_on_unmap, .user = &f};
    OK(galloc_free(get(f.pool, MIB(8), f.s), f.s));
    OK(galloc_pool_set_callbacks(f.pool, &calls));
    OK(galloc_pool_trim(f.pool, 0, &released));
    EXPECT_EQ(released, MIB(8));
    EXPECT_EQ(stats_of(f.pool).reserved.current, MIB(64));
    OK(galloc_pool_set_callbacks(f.pool, NULL));
    OK(galloc_free(f.held[0], NULL));
    pool_end(f.pool);
    stream_end(f.s);
    finish();
}

TEST(old_mappings_are_told_of)
{
    map m;
    void *p[8];
    map_start(&m, 0, MIB(16));
    for (int i = 0; i < 8; i++) p[i] = get(m.pool, MIB(2), m.s);
    for (int i = 1; i < 8; i += 2) OK(galloc_free(p[i], m.s));
    void *big = get(m.pool, MIB(6), m.s);
    EXPECT(stats_of(m.pool).leaving > 0);
    OK(galloc_resize(p[0], MIB(4), m.s));
    EXPECT(m.unmaps > 0);
    expect_told(&m);
    OK(galloc_free(big, m.s));
    for (int i = 0; i < 8; i += 2) OK(galloc_free(p[i], m.s));
    map_end(&m);
}

/* What is being told of counts as held: another thread cannot create it once more, and is told so. */
TEST(pages_are_held_while_told)
{
    for (int fixed = 0; fixed < 2; fixed++) {
        map m;
        map_start(&m, fixed, MIB(40));
        m.more = MIB(30);
        void *p = get(m.pool, MIB(30), m.s);
        EXPECT(sim_physical_peak(0) <= MIB(40));
        EXPECT(stats_of(m.pool).reserved.peak <= MIB(40));
        OK(galloc_free(p, m.s));
        map_end(&m);
    }
}

static galloc_pool *checked_pool;
static int checks_between;

static void check_as_another_thread_could(const char *function, int locks)
{
    if (function || locks) return;
    inside_on_step = NULL;
    EXPECT_EQ(galloc_pool_check(checked_pool), 0);
    inside_on_step = check_as_another_thread_could;
    checks_between++;
}

/* Pages are on their way from before on_map or on_unmap is called until after that: no check takes them for lost. */
TEST(a_check_around_callbacks_finds_nothing_broken)
{
    for (int fixed = 0; fixed < 2; fixed++) {
        galloc_callbacks calls = {NULL, NULL, told, told, NULL};
        begin();
        galloc_pool *pool = checked_pool = pool_expandable(!fixed);
        void *p = get(pool, MIB(4), NULL);
        checks_between = 0;
        inside_on_step = check_as_another_thread_could;
        OK(galloc_pool_set_callbacks(pool, &calls));
        void *q = get(pool, MIB(30), NULL);
        OK(galloc_free(q, NULL));
        OK(galloc_pool_trim(pool, 0, NULL));
        inside_on_step = NULL;
        EXPECT(checks_between > 10);
        OK(galloc_free(p, NULL));
        pool_end(pool);
        finish();
    }
}

static size_t trimmed;
static void *trim_all(void *pool)
{
    size_t gone = 0;
    OK(galloc_pool_trim((galloc_pool *)pool, 0, &gone));
    trimmed += gone;
    return NULL;
}

static void on_map_and_trim(galloc_pool *pool, void *addr, size_t bytes, void *user)
{
    pthread_t thread;
    (void)trim_all(pool);
    pthread_create(&thread, NULL, trim_all, pool);
    pthread_join(thread, NULL);
    on_map(pool, addr, bytes, user);
}

TEST(callbacks_that_come_late_are_told_of_what_is_there)
{
    for (int fixed = 0; fixed < 2; fixed++) {
        map m;
        map_start(&m, fixed, MIB(96));
        OK(galloc_pool_set_callbacks(m.pool, NULL));
        void *p[8], *big;
        for (int i = 0; i < 8; i++) p[i] = get(m.pool, MIB(2), m.s);
        for (int i = 0; i < 8; i += 2) OK(galloc_free(p[i], m.s));
        big = get(m.pool, MIB(8), m.s);
        OK(galloc_free(big, m.s));
        EXPECT_EQ(m.maps, 0);
        galloc_callbacks calls = map_calls(&m);
        calls.on_map = on_map_and_trim;
        trimmed = 0;
        sim_fail_malloc(1, 0);
        EXPECT_EQ(galloc_pool_set_callbacks(m.pool, &calls), cudaErrorMemoryAllocation);
        EXPECT_EQ(m.maps, 0);
        OK(galloc_pool_set_callbacks(m.pool, &calls));
        EXPECT_EQ(trimmed, 0);
        expect_told(&m);
        calls.on_map = on_map;
        m.n = 0;
        m.maps = m.unmaps = 0;
        m.bytes = 0;
        OK(galloc_pool_set_callbacks(m.pool, &calls)); /* others: they know of nothing yet */
        expect_told(&m);
        for (int i = 1; i < 8; i += 2) OK(galloc_free(p[i], m.s));
        map_end(&m);
    }
}

/* A reset takes memory of cudaMalloc: there is nothing at its addresses that the program could register. Pages stay. */
TEST(callbacks_that_come_late_are_not_told_of_what_a_reset_took)
{
    for (int fixed = 0; fixed < 2; fixed++) {
        map m;
        map_start(&m, fixed, MIB(96));
        OK(galloc_pool_set_callbacks(m.pool, NULL));
        void *used = get(m.pool, MIB(4), 0), *freed = get(m.pool, MIB(4), 0);
        OK(galloc_free(freed, 0));
        OK(cudaDeviceReset());
        OK(cudaFree(0));
        m.s = stream_new();
        galloc_callbacks calls = map_calls(&m);
        OK(galloc_pool_set_callbacks(m.pool, &calls));
        EXPECT_EQ(m.bytes, fixed ? 0 : MIB(8));
        expect_told(&m);
        OK(galloc_free(used, 0));
        void *p = get(m.pool, MIB(12), m.s);
        EXPECT(m.bytes >= MIB(12));
        expect_told(&m);
        OK(galloc_free(p, m.s));
        map_end(&m);
    }
}

/* A default pool ends without the program's calling it by its name. */
TEST(shutdown_tells_of_what_goes)
{
    map m;
    void *p = NULL;
    memset(&m, 0, sizeof m);
    begin();
    m.s = stream_new();
    OK(galloc_pool_default(&m.pool, 0));
    galloc_callbacks calls = map_calls(&m);
    OK(galloc_pool_set_callbacks(m.pool, &calls));
    OK(galloc_malloc(&p, MIB(30), m.s));
    expect_told(&m);
    OK(galloc_free(p, m.s));
    OK(galloc_shutdown());
    EXPECT(m.maps > 0);
    EXPECT_EQ(m.n, 0);
    stream_end(m.s);
    finish();
}

TEST(a_pool_that_is_used_does_not_part_with_anything)
{
    map m;
    map_start(&m, 0, MIB(96));
    void *p = get(m.pool, MIB(20), m.s);
    OK(galloc_free(get(m.pool, MIB(30), m.s), m.s)); /* nor with what is free */
    size_t held = stats_of(m.pool).reserved.current;
    EXPECT_EQ(galloc_pool_destroy(m.pool), cudaErrorNotPermitted);
    EXPECT_EQ(m.unmaps, 0);
    EXPECT_EQ(stats_of(m.pool).reserved.current, held);
    OK(galloc_free(p, m.s));
    map_end(&m);
}

/* ---- like:pytorch ---- */

static int nested;

static void allocate_in_a_callback(galloc_pool *pool, void *addr, size_t bytes, void *user)
{
    void *p = NULL;
    (void)addr;
    (void)bytes;
    (void)user;
    if (nested++ > 3) return;
    EXPECT_EQ(galloc_pool_malloc(pool, &p, MIB(40), NULL), cudaErrorMemoryAllocation);
    if (p) OK(galloc_free(p, NULL));
}

/* PyTorch's own steps give segments back too: above the threshold, and those that only large requests can use. */
TEST(segments_that_pytorchs_steps_give_back_are_told_of)
{
    for (int how = 0; how < 6; how++) {
        galloc_config config = config_limit(MIB(100));
        map m;
        begin();
        config.like = GALLOC_LIKE_PYTORCH;
        config.expandable_segments = 0;
        if (how % 2) config.max_split_size = MIB(24);
        else config.gc_threshold = 0.5;
        map_open(&m, &config);
        m.allocate = how / 2;
        OK(galloc_free(get(m.pool, MIB(60), m.s), m.s));
        void *p = get(m.pool, MIB(90), m.s);
        EXPECT_EQ(m.unmaps, 1);
        EXPECT_EQ(m.bytes, MIB(90));
        expect_told(&m);
        OK(galloc_free(p, m.s));
        map_end(&m);
    }
}

/* A callback's own request is served from what there is: a new segment would be told of by another callback. */
TEST(pytorchs_segments_are_not_made_in_a_callback)
{
    galloc_config config = galloc_config_default();
    galloc_callbacks calls = {NULL, NULL, allocate_in_a_callback, NULL, NULL};
    begin();
    config.like = GALLOC_LIKE_PYTORCH;
    config.expandable_segments = 0;
    galloc_pool *pool = pool_new(&config);
    nested = 0;
    OK(galloc_pool_set_callbacks(pool, &calls));
    OK(galloc_free(get(pool, MIB(30), NULL), NULL));
    EXPECT_EQ(nested, 1);
    pool_end(pool);
    finish();
}

/* ---- a pool that ends ---- */

static galloc_pool *ending;
static pthread_t ender;
static int enders;

static void *end_it(void *pool)
{
    EXPECT_EQ(galloc_pool_destroy((galloc_pool *)pool), cudaSuccess);
    return NULL;
}

static long asked_within;

static void ask_within(galloc_pool *pool, void *addr, size_t bytes, void *user)
{
    void *p = NULL;
    long changes = memory_calls();
    (void)addr;
    (void)bytes;
    asked_within++;
    EXPECT_EQ(galloc_pool_malloc(pool, &p, MIB(40), user), cudaErrorMemoryAllocation);
    EXPECT_EQ(memory_calls(), changes);
}

/* In on_map and in on_unmap no page comes or goes, also in a pool that has only this one of them. */
TEST(either_callback_alone_keeps_pages_where_they_are)
{
    for (int unmaps = 0; unmaps < 2; unmaps++) {
        begin();
        cudaStream_t s = stream_new();
        galloc_callbacks calls = {NULL, NULL, unmaps ? NULL : ask_within, unmaps ? ask_within : NULL, s};
        galloc_pool *pool = pool_new(NULL);
        OK(galloc_pool_set_callbacks(pool, &calls));
        asked_within = 0;
        OK(galloc_free(get(pool, MIB(4), s), s));
        OK(galloc_pool_trim(pool, 0, NULL));
        EXPECT(asked_within > 0);
        EXPECT_EQ(sim_physical(0), 0);
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

static void end_meanwhile(galloc_pool *pool, void *addr, size_t bytes, void *user)
{
    (void)addr;
    (void)bytes;
    (void)user;
    if (enders++) return;
    EXPECT_EQ(pthread_create(&ender, NULL, end_it, pool), 0);
    usleep(50000);
}

/* Another pool borrows from one, and while the program is told it ends that. */
TEST(a_pool_ends_while_another_has_it_tell_of_what_goes)
{
    galloc_config config = galloc_config_default();
    galloc_callbacks calls = {NULL, NULL, NULL, end_meanwhile, NULL};
    begin();
    cudaStream_t s = stream_new();
    config.device_limit = MIB(64);
    galloc_pool *lender = pool_new(&config), *pool = pool_new(&config);
    enders = 0;
    OK(galloc_free(get(lender, MIB(40), s), s));
    OK(galloc_pool_set_callbacks(lender, &calls));
    void *p = get(pool, MIB(60), s);
    EXPECT(enders > 0);
    EXPECT_EQ(pthread_join(ender, NULL), 0);
    OK(galloc_free(p, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

static void end_in_a_callback(galloc_pool *pool, void *addr, size_t bytes, void *user)
{
    (void)pool;
    (void)addr;
    (void)bytes;
    (void)user;
    EXPECT_EQ(galloc_pool_destroy(ending), cudaErrorNotPermitted);
    EXPECT(strstr(galloc_last_message(), "on_map or on_unmap") != NULL);
}

/* In a callback nothing is unmapped that the program would have to be told of: the pool stays, and is told why. */
TEST(a_pool_with_callbacks_does_not_end_in_one)
{
    galloc_callbacks calls = {NULL, NULL, end_in_a_callback, NULL, NULL}, told;
    map m;
    begin();
    memset(&m, 0, sizeof m);
    ending = m.pool = pool_new(NULL);
    m.s = stream_new();
    told = map_calls(&m);
    galloc_pool *pool = pool_new(NULL);
    OK(galloc_pool_set_callbacks(ending, &told));
    OK(galloc_free(get(ending, MIB(40), m.s), m.s));
    OK(galloc_pool_set_callbacks(pool, &calls));
    OK(galloc_free(get(pool, MIB(4), m.s), m.s));
    OK(galloc_pool_set_callbacks(pool, NULL));
    pool_end(pool);
    pool_end(ending);
    EXPECT_EQ(m.maps, m.unmaps);
    stream_end(m.s);
    finish();
}

static int tries;

static void end_within_itself(galloc_pool *pool, void *addr, size_t bytes, void *user)
{
    (void)addr;
    (void)bytes;
    (void)user;
    tries++;
    EXPECT_EQ(galloc_pool_destroy(pool), cudaErrorNotPermitted);
    EXPECT_EQ(galloc_pool_check(pool), 0);
}

/* Nor does it in one of its own, though none of its blocks is used. */
TEST(an_unused_pool_does_not_end_in_its_own_callback)
{
    for (int fixed = 0; fixed < 2; fixed++) {
        begin();
        galloc_pool *pool = pool_expandable(!fixed);
        cudaStream_t s = stream_new();
        for (int kind = 0; kind < 3; kind++) { /* on_map, on_unmap, and both */
            galloc_callbacks calls = {NULL, NULL, kind != 1 ? end_within_itself : NULL,
                                      kind != 0 ? end_within_itself : NULL, NULL};
            OK(galloc_pool_set_callbacks(pool, &calls));
            tries = 0;
            OK(galloc_free(get(pool, MIB(4), s), s));
            EXPECT_EQ(tries > 0, kind != 1);
            tries = 0;
            OK(galloc_pool_trim(pool, 0, NULL));
            EXPECT_EQ(tries > 0, kind != 0);
        }
        OK(galloc_pool_set_callbacks(pool, NULL));
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

static int being_told, may_return, has_returned;

static void stay_until_let(galloc_pool *pool, void *addr, size_t bytes, void *user)
{
    (void)pool;
    (void)addr;
    (void)bytes;
    (void)user;
    __atomic_store_n(&being_told, 1, __ATOMIC_SEQ_CST);
    while (!__atomic_load_n(&may_return, __ATOMIC_SEQ_CST)) usleep(100);
    usleep(1000);
    __atomic_store_n(&has_returned, 1, __ATOMIC_SEQ_CST);
}

static void *set_no_callbacks(void *pool)
{
    OK(galloc_pool_set_callbacks((galloc_pool *)pool, NULL));
    EXPECT(__atomic_load_n(&has_returned, __ATOMIC_SEQ_CST)); /* a library may be unloaded now */
    return NULL;
}

static void tell_nobody(galloc_pool *pool, void *addr, size_t bytes, void *user)
{
    (void)pool, (void)addr, (void)bytes, (void)user;
}

static void *set_others(void *pool)
{
    galloc_callbacks calls = {NULL, NULL, tell_nobody, NULL, NULL};
    OK(galloc_pool_set_callbacks((galloc_pool *)pool, &calls));
    EXPECT(__atomic_load_n(&has_returned, __ATOMIC_SEQ_CST));
    return NULL;
}

static void *grow(void *pool)
{
    cudaStream_t s = stream_new();
    OK(galloc_free(get((galloc_pool *)pool, MIB(40), s), s));
    stream_end(s);
    return NULL;
}

/* When callbacks have been replaced, none of the old ones runs any more. */
TEST(callbacks_are_set_after_those_under_way)
{
    galloc_callbacks calls = {NULL, NULL, stay_until_let, NULL, NULL};
    pthread_t growing, setting;
    begin();
    galloc_pool *pool = pool_new(NULL);
    OK(galloc_pool_set_callbacks(pool, &calls));
    EXPECT_EQ(pthread_create(&growing, NULL, grow, pool), 0);
    while (!__atomic_load_n(&being_told, __ATOMIC_SEQ_CST)) usleep(100);
    EXPECT_EQ(pthread_create(&setting, NULL, set_no_callbacks, pool), 0);
    usleep(10000);
    __atomic_store_n(&may_return, 1, __ATOMIC_SEQ_CST);
    EXPECT_EQ(pthread_join(growing, NULL), 0);
    EXPECT_EQ(pthread_join(setting, NULL), 0);
    pool_end(pool);
    finish();
}

static void stay_rejected_until_let(const galloc_report *report, void *user)
{
    (void)report;
    stay_until_let(NULL, NULL, 0, user);
}

static int stay_asked_until_let(const galloc_report *report, void *user)
{
    stay_rejected_until_let(report, user);
    return 1;
}

static void *ask_for_more(void *pool)
{
    expect_refused((galloc_pool *)pool, MIB(6), NULL);
    return NULL;
}

static void *ask_for_too_much(void *pool)
{
    expect_refused((galloc_pool *)pool, MIB(16), NULL);
    return NULL;
}

/* So it is with those that are asked when memory runs out, whoever else is asked by then. */
TEST(callbacks_are_set_after_those_that_are_asked)
{
    for (int i = 0; i < 4; i++) {
        int rejects = i & 1;
        galloc_callbacks calls = {stay_asked_until_let, stay_rejected_until_let, NULL, NULL, NULL};
        pthread_t asking, setting;
        begin();
        galloc_pool *pool = pool_limited(MIB(8));
        void *p = get(pool, MIB(4), NULL);
        being_told = may_return = has_returned = 0;
        OK(galloc_pool_set_callbacks(pool, &calls));
        EXPECT_EQ(pthread_create(&asking, NULL, rejects ? ask_for_too_much : ask_for_more, pool), 0);
        while (!__atomic_load_n(&being_told, __ATOMIC_SEQ_CST)) usleep(100);
        EXPECT_EQ(pthread_create(&setting, NULL, i & 2 ? set_others : set_no_callbacks, pool), 0);
        usleep(10000);
        OK(galloc_pool_trim(pool, 0, NULL)); /* the pool goes on meanwhile */
        __atomic_store_n(&may_return, 1, __ATOMIC_SEQ_CST);
        EXPECT_EQ(pthread_join(asking, NULL), 0);
        EXPECT_EQ(pthread_join(setting, NULL), 0);
        OK(galloc_free(p, NULL));
        pool_end(pool);
        finish();
    }
}

static int stay_and_set(const galloc_report *report, void *user)
{
    (void)report;
    __atomic_add_fetch(&being_told, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&being_told, __ATOMIC_SEQ_CST) < 2) usleep(100);
    OK(galloc_pool_set_callbacks((galloc_pool *)user, NULL));
    return 0;
}

/* Two calls on_oom that set callbacks wait neither for themselves nor for each other. */
TEST(callbacks_that_set_callbacks_do_not_wait)
{
    galloc_pool *pool[2];
    void *p[2];
    pthread_t asking[2];
    begin();
    being_told = 0;
    for (int i = 0; i < 2; i++) p[i] = get(pool[i] = pool_limited(MIB(8)), MIB(4), NULL);
    for (int i = 0; i < 2; i++) {
        galloc_callbacks calls = {stay_and_set, NULL, NULL, NULL, pool[!i]};
        OK(galloc_pool_set_callbacks(pool[i], &calls));
        EXPECT_EQ(pthread_create(&asking[i], NULL, ask_for_more, pool[i]), 0);
    }
    for (int i = 0; i < 2; i++) EXPECT_EQ(pthread_join(asking[i], NULL), 0);
    for (int i = 0; i < 2; i++) {
        OK(galloc_free(p[i], NULL));
        pool_end(pool[i]);
    }
    finish();
}

static int has_set;

static int stay_until_set(const galloc_report *report, void *user)
{
    (void)report, (void)user;
    __atomic_store_n(&being_told, 1, __ATOMIC_SEQ_CST);
    for (int i = 0; i < 20000 && !__atomic_load_n(&has_set, __ATOMIC_SEQ_CST); i++) usleep(100);
    EXPECT(__atomic_load_n(&has_set, __ATOMIC_SEQ_CST));
    return 0;
}

static void set_none(galloc_pool *pool, void *addr, size_t bytes, void *other)
{
    (void)pool, (void)addr, (void)bytes;
    OK(galloc_pool_set_callbacks((galloc_pool *)other, NULL));
    __atomic_store_n(&has_set, 1, __ATOMIC_SEQ_CST);
}

/* Nor does a call on_map that sets those of another pool, whose on_oom may be waiting for it. */
TEST(a_call_on_map_that_sets_callbacks_does_not_wait)
{
    pthread_t asking;
    begin();
    galloc_pool *pool = pool_new(NULL), *other = pool_limited(MIB(8));
    galloc_callbacks calls = {NULL, NULL, set_none, NULL, other}, oom = {stay_until_set, NULL, NULL, NULL, NULL};
    void *p = get(other, MIB(4), NULL);
    being_told = has_set = 0;
    OK(galloc_pool_set_callbacks(pool, &calls));
    OK(galloc_pool_set_callbacks(other, &oom));
    EXPECT_EQ(pthread_create(&asking, NULL, ask_for_more, other), 0);
    while (!__atomic_load_n(&being_told, __ATOMIC_SEQ_CST)) usleep(100);
    OK(galloc_free(get(pool, MIB(4), NULL), NULL));
    EXPECT_EQ(pthread_join(asking, NULL), 0);
    OK(galloc_pool_set_callbacks(pool, NULL));
    OK(galloc_free(p, NULL));
    pool_end(pool);
    pool_end(other);
    finish();
}

static int let_go_and_await_the_setter(const galloc_report *report, void *user)
{
    (void)report;
    OK(galloc_pool_set_callbacks((galloc_pool *)user, NULL)); /* this makes these no older for the setter */
    __atomic_store_n(&may_return, 1, __ATOMIC_SEQ_CST);
    while (!__atomic_load_n(&has_set, __ATOMIC_SEQ_CST)) usleep(100);
    return 0;
}

static void *set_other_callbacks(void *pool)
{
    galloc_callbacks calls = {let_go_and_await_the_setter, NULL, NULL, NULL, pool};
    OK(galloc_pool_set_callbacks((galloc_pool *)pool, &calls));
    EXPECT(__atomic_load_n(&has_returned, __ATOMIC_SEQ_CST));
    __atomic_store_n(&has_set, 1, __ATOMIC_SEQ_CST);
    return NULL;
}

static int stay_if_first(const galloc_report *report, void *user)
{
    if (!__atomic_load_n(&being_told, __ATOMIC_SEQ_CST)) (void)stay_asked_until_let(report, user);
    return 0;
}

/* Nor does a call that sets callbacks wait for the ones that it has set. */
TEST(callbacks_are_set_beside_the_new_ones)
{
    galloc_callbacks calls = {stay_if_first, NULL, NULL, NULL, NULL};
    pthread_t asking, setting;
    begin();
    galloc_pool *pool = pool_limited(MIB(8));
    void *p = get(pool, MIB(4), NULL);
    being_told = may_return = has_returned = has_set = 0;
    OK(galloc_pool_set_callbacks(pool, &calls));
    EXPECT_EQ(pthread_create(&asking, NULL, ask_for_more, pool), 0);
    while (!__atomic_load_n(&being_told, __ATOMIC_SEQ_CST)) usleep(100);
    EXPECT_EQ(pthread_create(&setting, NULL, set_other_callbacks, pool), 0);
    while (!__atomic_load_n(&has_set, __ATOMIC_SEQ_CST)) ask_for_more(pool);
    EXPECT_EQ(pthread_join(asking, NULL), 0);
    EXPECT_EQ(pthread_join(setting, NULL), 0);
    OK(galloc_free(p, NULL));
    pool_end(pool);
    finish();
}

/* A pool whose end fails at any call of the driver tells of each mapping once, of some at the next attempt. */
TEST(an_end_that_fails_tells_of_each_mapping)
{
    for (int nth = 1, fired = 1; fired; nth++) {
        map m;
        map_start(&m, 0, MIB(64));
        OK(galloc_free(get(m.pool, MIB(4), m.s), m.s));
        sim_run(-1);
        sim_fail(NULL, nth, 0, cudaErrorUnknown);
        cudaError_t error = galloc_pool_destroy(m.pool);
        fired = sim_failed() > 0;
        sim_fail_clear();
        expect_told(&m);
        if (error) {
            EXPECT(inside_unlocked(m.pool));
            pool_end(m.pool);
        }
        EXPECT_EQ(m.n, 0);
        EXPECT(m.maps > 0 && m.maps == m.unmaps);
        stream_end(m.s);
        finish();
        EXPECT(nth < 100);
    }
}

/* What the driver refuses in the middle is never told of, or told of to the end. */
TEST(mappings_that_fail_are_not_told_of)
{
    static const char *const calls[] = {"cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease"};
    for (int i = 0; i < 5; i++) {
        long failed = 0;
        for (long nth = 1; nth < 6; nth++) {
            map m;
            void *p = NULL;
            map_start(&m, 0, MIB(64));
            void *keep = get(m.pool, MIB(4), m.s);
            sim_fail(calls[i], nth, 0, 0);
            if (galloc_pool_malloc(m.pool, &p, MIB(20), m.s) == cudaSuccess) OK(galloc_free(p, m.s));
            OK(galloc_free(keep, m.s));
            (void)galloc_pool_trim(m.pool, 0, NULL);
            failed += sim_failed();
            sim_fail_clear();
            (void)galloc_pool_trim(m.pool, 0, NULL);
            EXPECT_EQ(stats_of(m.pool).quarantined, 0);
            map_end(&m);
        }
        EXPECT(failed > 0);
    }
}

/* ---- the report ------------------------------------------------------------------------------------------------ */

TEST(there_is_no_report_without_a_failure)
{
    galloc_report r;
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_limited(MIB(8));
    expect_refused(pool, MIB(9), s);
    OK(galloc_oom_report(&r));
    void *p = pool;
    galloc_request request = {0};
    request.bytes = 1;
    request.alignment = 3;
    request.pool = pool;
    request.stream = s;
    EXPECT_EQ(galloc_alloc(&p, &request), cudaErrorInvalidValue); /* the last failure is another one */
    EXPECT_EQ(galloc_oom_report(&r), cudaErrorNotReady);
    EXPECT_EQ(galloc_oom_report(NULL), cudaErrorInvalidValue);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* Every call that can leave a report takes an earlier one away when it fails for another reason. */
TEST(each_call_that_fails_otherwise_takes_the_report_away)
{
    begin();
    cudaStream_t s = stream_new(), c = stream_new();
    galloc_pool *pool = pool_limited(MIB(8)), *ended = pool_limited(MIB(8));
    galloc_request request = {.bytes = 1, .stream = s, .pool = pool};
    cudaGraph_t graph = NULL;
    galloc_report r;
    pool_end(ended);
    void *p = get(pool, 512, s), *freed = get(pool, MIB(1), s), *q;
    OK(galloc_free(freed, s));
    OK(cudaStreamBeginCapture(c, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < 12; i++) {
        expect_refused(pool, MIB(9), s);
        OK(galloc_free(get(pool, 512, s), s)); /* a success leaves it */
        OK(galloc_resize(p, 300 + (size_t)i, s));
        OK(galloc_oom_report(&r));
        switch (i) {
        case 0: EXPECT_EQ(galloc_malloc(NULL, 1, s), cudaErrorInvalidValue); break;
        case 1: EXPECT_EQ(galloc_pool_malloc(NULL, &q, 1, s), cudaErrorInvalidValue); break;
        case 2: EXPECT_EQ(galloc_alloc(&q, NULL), cudaErrorInvalidValue); break;
        case 3: EXPECT_EQ(galloc_alloc(NULL, &request), cudaErrorInvalidValue); break;
        case 4: EXPECT_EQ(galloc_malloc_growable(NULL, 1, 2, s), cudaErrorInvalidValue); break;
        case 5: EXPECT_EQ(galloc_resize(NULL, 1, s), cudaErrorInvalidDevicePointer); break;
        case 6: EXPECT_EQ(galloc_resize(p, 0, s), cudaErrorInvalidValue); break;
        case 7: EXPECT_EQ(galloc_resize(p, SIZE_MAX, s), cudaErrorNotSupported); break;
        case 8: EXPECT_EQ(galloc_resize(&r, 1, s), cudaErrorInvalidDevicePointer); break;
        case 9: EXPECT_EQ(galloc_resize(freed, 1, s), cudaErrorInvalidDevicePointer); break;
        case 10: EXPECT_EQ(galloc_pool_malloc(ended, &q, 1, s), cudaErrorInvalidResourceHandle); break;
        default: EXPECT_EQ(galloc_resize(p, 1, c), cudaErrorNotSupported); break;
        }
        EXPECT_EQ(galloc_oom_report(&r), cudaErrorNotReady);
    }
    OK(cudaStreamEndCapture(c, &graph));
    OK(cudaGraphDestroy(graph));
    OK(galloc_free(p, s));
    pool_end(pool);
    stream_end(s);
    stream_end(c);
    finish();
}

static char report_text[GALLOC_REPORT_TEXT];

static int says(const galloc_report *report, const char *what)
{
    OK(galloc_report_text(report, report_text, sizeof report_text));
    return strstr(report_text, what) != NULL;
}

/* A second report counts anew. */
TEST(the_report_says_which_streams_strand_what)
{
    enum { MANY = 11 };
    galloc_config config = config_limit(MIB(160));
    cudaStream_t s[MANY];
    void *p[MANY];
    begin_still();
    config.reuse = GALLOC_REUSE_COMPLETED;
    config.wait_limit_ms = 0;
    galloc_pool *pool = pool_new(&config);
    for (int i = 0; i < MANY; i++) s[i] = stream_new();
    for (int i = 0; i < MANY; i++) {
        size_t bytes = MIB(2) * (size_t)(i + 1);
        p[i] = get(pool, bytes, s[i]);
        put(s[i], p[i], bytes, 1);
    }
    for (int i = 1; i < MANY; i++) OK(galloc_free(p[i], s[i]));
    for (int i = 0; i < 2; i++) expect_refused(pool, MIB(60), s[0]);
    galloc_report r = report_of_failure();
    expect_sums(&r);
    EXPECT_EQ(r.live, MIB(2));
    EXPECT_EQ(r.stranded, MIB(130));
    EXPECT_EQ(r.streams[0].stream_id, stream_id(s[MANY - 1]));
    EXPECT_EQ(r.streams[0].bytes, MIB(22));
    EXPECT_EQ(r.streams[7].bytes, MIB(8));
    unsigned long long context = 0;
    OK(cuCtxGetId(NULL, &context));
    for (int i = 0; i < 8; i++) EXPECT_EQ(r.streams[i].context_id, context);
    EXPECT_EQ(r.more_streams, 2);
    EXPECT_EQ(r.more_stranded, MIB(10));
    EXPECT_EQ(r.stream_id, stream_id(s[0]));
    EXPECT(says(&r, "reuse:wait is off") && says(&r, "wait_limit_ms is 0") && says(&r, "galloc_stream_retire"));
    EXPECT(!says(&r, "expandable_segments is False") && !says(&r, "graphs"));
    EXPECT(strstr(log_text, "wait for other streams") != NULL);
    sim_run(-1);
    OK(galloc_free(p[0], s[0]));
    pool_end(pool);
    for (int i = 0; i < MANY; i++) stream_end(s[i]);
    finish();
}

/* The report has the setting, which the advice heeds. */
TEST(the_report_has_the_pools_reuse_and_bound_of_waits)
{
    static const int reuse[] = {0, GALLOC_REUSE_COMPLETED, GALLOC_REUSE_WAIT,
                                GALLOC_REUSE_COMPLETED | GALLOC_REUSE_FOLLOWED | GALLOC_REUSE_WAIT};
    for (int i = 0; i < 4; i++) {
        begin_still();
        galloc_config config = config_limit(MIB(16));
        config.reuse = reuse[i];
        config.wait_limit_ms = i ? (uint64_t)i * 70 : UINT64_MAX;
        galloc_pool *pool = pool_new(&config);
        cudaStream_t s = stream_new();
        expect_refused(pool, MIB(17), s);
        galloc_report r = report_of_failure();
        EXPECT_EQ(r.reuse, reuse[i]);
        EXPECT(r.wait_limit_ms == config.wait_limit_ms);
        r.stranded = r.rounded; /* then the advice depends on it */
        EXPECT_EQ(says(&r, "reuse:wait is off"), !(reuse[i] & GALLOC_REUSE_WAIT));
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

/* A step that could do nothing here is not said to have been tried. */
TEST(steps_that_do_not_apply_are_left_out)
{
    galloc_config config = config_limit(MIB(16));
    cudaGraph_t graph = NULL;
    begin();
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new();
    galloc_request request = {.bytes = MIB(12), .max_bytes = MIB(16), .pool = pool, .stream = s};
    void *p = NULL, *q = get(pool, MIB(2), s);
    OK(galloc_alloc(&p, &request));
    expect_refused(pool, MIB(8), s);
    galloc_report r = report_of_failure();
    EXPECT(!r.captured);
    EXPECT(left_out(&r, "use memory freed earlier in the capture", "not captured"));
    EXPECT(left_out(&r, "collect idle memory", "neither gc_threshold nor gc_age"));
    EXPECT(left_out(&r, "find addresses behind the block", "the request does not grow a block"));
    EXPECT(left_out(&r, "use idle memory of other pools", "there is no other pool"));
    EXPECT(left_out(&r, "use idle memory of other pools, with a wait", "there is no other pool"));
    EXPECT(!step_of(&r, "use memory whose work is complete")->left_out);
    galloc_pool *other = pool_new(NULL);
    expect_refused(pool, MIB(8), s);
    r = report_of_failure();
    EXPECT(left_out(&r, "use idle memory of other pools", "the pool's own limit"));
    pool_end(other);
    EXPECT_EQ(galloc_resize(p, MIB(16), s), cudaErrorMemoryAllocation);
    r = report_of_failure();
    EXPECT(r.grows && !step_of(&r, "find addresses behind the block")->left_out);
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    expect_refused(pool, MIB(8), s);
    OK(cudaStreamEndCapture(s, &graph));
    OK(cudaGraphDestroy(graph));
    r = report_of_failure();
    EXPECT(r.captured);
    EXPECT(!step_of(&r, "use memory freed earlier in the capture")->left_out);
    EXPECT(left_out(&r, "wait for the device", "captured"));
    OK(galloc_free(p, s));
    OK(galloc_free(q, s));
    pool_end(pool);
    config.like = GALLOC_LIKE_PYTORCH;
    config.expandable_segments = 0;
    pool = pool_new(&config);
    p = get(pool, MIB(12), s);
    expect_refused(pool, MIB(12), s);
    r = report_of_failure();
    EXPECT(left_out(&r, "collect idle memory", "gc_threshold is 0"));
    EXPECT(left_out(&r, "return oversize segments and create one", "max_split_size is none"));
    OK(galloc_free(p, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* Waits that gained too little were made. The search for memory after them leaves some ways out: segments are fixed,
   and cudaFree may take longer than the limit. */
TEST(waits_that_gain_too_little_are_not_left_out)
{
    begin_still();
    galloc_config config = config_fixed();
    config.memory_limit = MIB(64);
    config.wait_limit_ms = 2000;
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new(), t = stream_new();
    void *keep = get(pool, MIB(20), t), *p = get_used(pool, MIB(20), s, 1);
    OK(galloc_free(p, s));
    queries_until_done = 10;
    sim_hook(NULL, done_after_some_queries);
    expect_refused(pool, MIB(50), t);
    sim_hook(NULL, NULL);
    EXPECT(sim_stream_done(s));
    galloc_report r = report_of_failure();
    EXPECT(!step_of(&r, "make the stream wait")->left_out);
    EXPECT(!step_of(&r, "wait on the host for events")->left_out);
    OK(galloc_free(keep, t));
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* Bytes that two streams used, and parts of blocks, are counted once. */
TEST(bytes_of_several_streams_are_counted_once)
{
    galloc_config config = config_limit(MIB(16));
    begin_still();
    config.reuse = GALLOC_REUSE_COMPLETED;
    config.wait_limit_ms = 0;
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s[3] = {stream_new(), stream_new(), stream_new()};
    void *p[4];
    for (int i = 0; i < 4; i++) p[i] = get(pool, MIB(4), s[0]);
    for (int i = 0; i < 3; i++) put(s[i], p[i], MIB(4), 1);
    cudaStream_t both[2] = {s[1], s[2]};
    OK(galloc_free_after(p[0], both, 2));
    OK(galloc_free(p[1], s[1]));
    OK(galloc_free(p[2], s[0]));
    expect_refused(pool, MIB(8), s[0]);
    galloc_report r = report_of_failure();
    expect_sums(&r);
    EXPECT_EQ(r.usable, MIB(4));
    EXPECT_EQ(r.largest_usable, MIB(4));
    EXPECT_EQ(r.stranded, MIB(8));
    sim_run(-1);
    OK(galloc_free(p[3], s[0]));
    pool_end(pool);
    for (int i = 0; i < 3; i++) stream_end(s[i]);
    finish();
}

/* Streams of any device may strand memory: the report has their own context. */
TEST(the_report_says_of_which_context_a_stream_is)
{
    begin_with_devices(2, SIM_PACE_STILL);
    galloc_config config = config_limit(MIB(8));
    config.reuse = GALLOC_REUSE_COMPLETED;
    config.wait_limit_ms = 0;
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new(), t;
    unsigned long long context = 0, own = 0;
    OK(cuCtxGetId(NULL, &own));
    OK(cudaSetDevice(1));
    t = stream_new();
    OK(cuCtxGetId(NULL, &context));
    EXPECT(context != own);
    OK(cudaSetDevice(0));
    void *p = get(pool, MIB(8), s);
    OK(cudaSetDevice(1));
    OK(sim_launch(t, NULL, 0));
    OK(cudaSetDevice(0));
    OK(galloc_free(p, t));
    expect_refused(pool, MIB(8), s);
    galloc_report r = report_of_failure();
    EXPECT_EQ(r.streams[0].stream_id, stream_id(t));
    EXPECT_EQ(r.streams[0].context_id, context);
    EXPECT_EQ(r.streams[0].bytes, MIB(8));
    sim_run(-1);
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* A block of which another stream still uses the beginning is usable from there on. */
TEST(the_largest_usable_piece_begins_behind_what_is_in_use)
{
    galloc_config config = config_limit(MIB(2));
    begin_still();
    config.reuse = GALLOC_REUSE_COMPLETED;
    config.wait_limit_ms = 0;
    config.stats_exact = 1; /* what is freed merges at once */
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new(), t = stream_new();
    OK(galloc_pool_reserve(pool, MIB(2)));
    void *p = get_used(pool, KIB(1280), s, 1);
    OK(galloc_free(p, s));
    expect_refused(pool, KIB(1024), t);
    galloc_report r = report_of_failure();
    expect_sums(&r);
    EXPECT_EQ(r.usable, KIB(768));
    EXPECT_EQ(r.largest_usable, KIB(768));
    EXPECT_EQ(r.stranded, KIB(1280));
    void *q = get(pool, r.largest_usable, t);
    EXPECT_EQ((char *)q - (char *)p, KIB(1280));
    OK(galloc_free(q, t));
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* Where the pool's limit is the cause, it does not matter who else holds the device's memory. */
TEST(a_limit_that_is_the_cause_is_the_only_one)
{
    sim_options options = sim_defaults();
    void *foreign = NULL;
    options.memory = MIB(300);
    options.pace = SIM_PACE_STILL;
    begin_with(options);
    galloc_config config = config_limit(MIB(128));
    config.wait_limit_ms = 0; /* so that what the stream has freed is its own, and does not go back */
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new();
    OK(cudaMalloc(&foreign, MIB(150)));
    void *p = get(pool, MIB(60), s), *q = get_used(pool, MIB(40), s, 1);
    OK(galloc_free(q, s));
    expect_refused(pool, MIB(80), s);
    galloc_report r = report_of_failure();
    EXPECT(r.device_free < MIB(80));
    EXPECT(says(&r, "- the limit of"));
    EXPECT(!says(&r, "held outside galloc"));
    OK(galloc_free(p, s));
    OK(cudaFree(foreign));
    pool_end(pool);
    finish();
}

/* A request that may take few steps only, and meets an error of the driver's, was not refused for lack of memory. */
TEST(an_error_of_the_driver_is_no_rejection)
{
    begin();
    galloc_config config = galloc_config_default();
    config.throw_on_cudamalloc_oom = 1;
    galloc_pool *pool = pool_new(&config);
    void *p = NULL;
    sim_fail("cuMemCreate", 1, 1, cudaErrorUnknown);
    EXPECT_EQ(galloc_pool_malloc(pool, &p, MIB(4), NULL), cudaErrorUnknown);
    sim_fail_clear();
    EXPECT_EQ(stats_of(pool).failures, 1);
    EXPECT_EQ(stats_of(pool).rejections, 0);
    pool_end(pool);
    finish();
}

TEST(the_report_leaves_pools_of_other_devices_out)
{
    for (int device = 0; device < 2; device++) {
        begin_with_devices(2, SIM_PACE_STILL);
        galloc_config config = config_limit(MIB(16));
        config.device = device;
        galloc_pool *pool = pool_new(&config);
        config.device = 1 - device;
        galloc_pool *elsewhere = pool_new(&config);
        cudaStream_t s = stream_new();
        OK(galloc_free(get(elsewhere, MIB(8), s), s));
        void *p = get(pool, MIB(10), s);
        expect_refused(pool, MIB(10), s);
        galloc_report r = report_of_failure();
        expect_sums(&r);
        EXPECT_EQ(r.device, device);
        EXPECT_EQ(r.other_pools, 0);
        EXPECT_EQ(r.others_held + r.others_cached, 0);
        OK(galloc_free(p, s));
        pool_end(pool);
        pool_end(elsewhere);
        finish();
    }
}

/* Where memory lacks, other pools of the device give back what they do not use; those of other devices keep it. */
TEST(pools_of_other_devices_give_nothing_back)
{
    enum { DEVICES = 3 };
    for (int lacks = 0; lacks < 2 * DEVICES; lacks++) {
        int device = lacks % DEVICES;
        sim_options options = sim_defaults();
        options.devices = DEVICES;
        options.pace = SIM_PACE_PROMPT;
        for (int d = 0; d < DEVICES; d++) options.unlike[d].memory = MIB(64) + MIB(16) * (size_t)d;
        begin_with(options);
        galloc_config config = galloc_config_default();
        galloc_pool *idle[DEVICES];
        cudaStream_t s[DEVICES];
        if (lacks >= DEVICES) config.device_limit = MIB(48);
        size_t most = lacks >= DEVICES ? MIB(48) : options.unlike[device].memory;
        for (int d = 0; d < DEVICES; d++) {
            OK(cudaSetDevice(d));
            s[d] = stream_new();
            config.device = d;
            idle[d] = pool_new(&config);
            OK(galloc_free(get(idle[d], MIB(32), s[d]), s[d]));
        }
        config.device = device;
        galloc_pool *pool = pool_new(&config);
        void *p = get(pool, most, s[device]); /* the device's other pool gives all of it */
        expect_refused(pool, 512, s[device]);
        for (int d = 0; d < DEVICES; d++) EXPECT_EQ(stats_of(idle[d]).reserved.current, d == device ? 0 : MIB(32));
        pool_end(idle[device]);
        expect_refused(pool, 512, s[device]);
        galloc_report r = report_of_failure();
        EXPECT(left_out(&r, "use idle memory of other pools", "there is no other pool"));
        EXPECT_EQ(r.limit, most);
        EXPECT_EQ(r.device_total, options.unlike[device].memory);
        OK(galloc_free(p, s[device]));
        pool_end(pool);
        for (int d = 0; d < DEVICES; d++)
            if (d != device) pool_end(idle[d]);
        finish();
    }
}

/* Pages of one device may be larger than those of another. The report of each counts in its own. */
TEST(a_report_counts_in_pages_of_its_device)
{
    for (int device = 0; device < 2; device++) {
        size_t page = device ? MIB(8) : MIB(2), more = device ? MIB(18) : MIB(21);
        sim_options options = sim_defaults();
        options.devices = 2;
        options.pace = SIM_PACE_PROMPT;
        options.unlike[1].granularity = MIB(8);
        begin_with(options);
        galloc_config config = config_limit(MIB(44));
        config.device = device;
        galloc_pool *pool = pool_new(&config);
        OK(cudaSetDevice(device));
        cudaStream_t s = stream_new();
        OK(cudaSetDevice(!device));
        void *p = get_growable(pool, MIB(24), MIB(64), s);
        expect_refused(pool, more, s);
        galloc_report r = report_of_failure();
        expect_sums(&r);
        EXPECT_EQ(r.held, MIB(24));
        EXPECT_EQ(r.largest_possible, whole(MIB(20), page));
        EXPECT_EQ(strstr(r.cause, "pages have 8388608 bytes") != NULL, device);
        EXPECT_EQ(r.shrunk, 0);
        EXPECT_EQ(galloc_resize(p, MIB(45), s), cudaErrorMemoryAllocation);
        r = report_of_failure();
        EXPECT_EQ(r.rounded, enough(MIB(21), page));
        OK(galloc_resize(p, MIB(9), s));
        expect_refused(pool, MIB(40), s);
        r = report_of_failure();
        EXPECT_EQ(r.held, MIB(24));
        EXPECT_EQ(r.shrunk, MIB(24) - enough(MIB(9), page));
        OK(galloc_free(p, s));
        pool_end(pool);
        OK(cudaSetDevice(0));
        finish();
    }
}

TEST(the_report_knows_the_device_and_other_pools)
{
    galloc_config config = config_limit(SIZE_MAX);
    sim_options options = sim_defaults();
    void *foreign = NULL, *p[2];
    options.memory = MIB(128);
    begin_with(options);
    galloc_pool *pool = pool_new(&config), *other = pool_new(&config);
    cudaStream_t s = stream_new();
    OK(cudaMalloc(&foreign, MIB(20)));
    p[0] = get(pool, MIB(30), s);
    p[1] = get(other, MIB(10), s);
    void *cached = get(other, MIB(12), s);
    OK(galloc_free(cached, s));
    expect_refused(pool, MIB(100), s);
    galloc_report r = report_of_failure();
    expect_sums(&r);
    EXPECT(r.device_known && r.device_total == MIB(128));
    EXPECT_EQ(r.held, stats_of(pool).reserved.current);
    EXPECT_EQ(r.other_pools, 1);
    EXPECT_EQ(r.others_held, stats_of(other).reserved.current);
    EXPECT_EQ(r.others_cached, stats_of(other).cached.current);
    EXPECT_EQ(r.outside, MIB(20));
    EXPECT_EQ(r.device_free, MIB(128) - sim_physical(0));
    EXPECT(says(&r, "outside galloc: by other processes") && !says(&r, "other pools of galloc hold"));
    EXPECT(!says(&r, "the limit of") && !says(&r, "reuse:wait is off") && !says(&r, "expandable_segments is False"));
    sim_fail("cuMemGetInfo", 1, 0, 0);
    expect_refused(pool, MIB(100), s);
    r = report_of_failure();
    sim_fail_clear();
    expect_sums(&r);
    EXPECT(!r.device_known && !r.device_free && !r.outside && r.device_total == MIB(128));
    OK(galloc_free(p[0], s));
    OK(galloc_free(p[1], s));
    OK(cudaFree(foreign));
    pool_end(pool);
    pool_end(other);
    stream_end(s);
    finish();
}

/* Without a limit, a pool that holds all of the device's memory is refused by its own count; no driver call is made. */
/* All other pools are added up; those of which nothing is free, too. */
TEST(the_report_adds_up_other_pools)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_limited(MIB(64)), *other[3];
    void *p[3];
    for (int i = 0; i < 3; i++) {
        other[i] = pool_new(NULL);
        p[i] = get(other[i], MIB(20), s);
        if (i != 1) OK(galloc_free(get(other[i], MIB(10), s), s));
    }
    expect_refused(pool, MIB(100), s);
    galloc_report r = report_of_failure();
    size_t held = 0, cached = 0;
    for (int i = 0; i < 3; i++) {
        galloc_stats stats = stats_of(other[i]);
        EXPECT(stats.reserved.current >= MIB(20) && (i == 1 || stats.cached.current >= MIB(10)));
        held += stats.reserved.current;
        cached += stats.cached.current;
    }
    EXPECT_EQ(r.other_pools, 3);
    EXPECT_EQ(r.others_held, held);
    EXPECT_EQ(r.others_cached, cached);
    EXPECT_EQ(r.outside, 0);
    for (int i = 0; i < 3; i++) OK(galloc_free(p[i], s));
    for (int i = 0; i < 3; i++) pool_end(other[i]);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* Pages that wait for their next block can move; so a block as large as all of them is possible. Nothing is done for a
   request beyond the limit, so the report is of the pool as it was. */
TEST(the_report_counts_parked_pages_as_movable)
{
    begin();
    galloc_config config = config_limit(MIB(64));
    config.stats_exact = 1;
    config.growth = MIB(2);
    galloc_pool *pool = pool_new(&config);
    void *p[8];
    for (int i = 0; i < 8; i++) p[i] = get(pool, MIB(2), 0);
    for (int i = 0; i < 8; i++) OK(galloc_free(p[i], 0));
    EXPECT_EQ(inside_parked(pool), MIB(16));
    expect_refused(pool, MIB(65), 0);
    galloc_report r = report_of_failure();
    expect_sums(&r);
    EXPECT(!r.steps_taken);
    EXPECT_EQ(r.usable, MIB(16));
    EXPECT_EQ(r.usable_in_pages, 0);
    EXPECT_EQ(r.largest_possible, MIB(64));
    EXPECT(r.fragmentation == stats_of(pool).external_fragmentation);
    pool_end(pool);
    finish();
}

/* But not for a stream that may not have them. */
TEST(the_report_counts_parked_pages_of_others_as_stranded)
{
    begin_still();
    galloc_config config = config_limit(MIB(64));
    config.stats_exact = 1;
    config.reuse = 0;
    config.wait_limit_ms = 0;
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_new(&config);
    void *q = get(pool, 512, s), *p = get_used(pool, MIB(40), t, 1);
    OK(galloc_free(q, s));
    OK(galloc_free(p, t));
    EXPECT(inside_parked(pool) >= MIB(40));
    expect_refused(pool, MIB(100), s);
    galloc_report r = report_of_failure();
    expect_sums(&r);
    EXPECT(r.stranded >= MIB(40));
    EXPECT(r.largest_possible < MIB(40));
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* What a stream's cache holds, or keeps for nobody yet, is free for that stream, in pieces, and stranded for others. */
TEST(the_report_counts_what_stream_caches_hold)
{
    for (int own = 0; own < 2; own++) {
        begin_still();
        galloc_config config = config_limit(MIB(64));
        config.growth = MIB(2);
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = pool_new(&config);
        void *p[32], *wall = get(pool, MIB(2), t);
        for (int i = 0; i < 32; i++) p[i] = get(pool, KIB(64), s);
        EXPECT_EQ(stats_of(pool).cached.current, 0);
        for (int i = 0; i < 8; i += 2) OK(galloc_free(p[i], s));
        galloc_stats now = stats_of(pool);
        EXPECT_EQ(now.cached.current, KIB(256));
        EXPECT(now.external_fragmentation > 0.5);
        expect_refused(pool, MIB(65), own ? s : t);
        galloc_report r = report_of_failure();
        expect_sums(&r);
        EXPECT(!r.steps_taken);
        EXPECT_EQ(r.usable, own ? KIB(256) : 0);
        EXPECT_EQ(r.largest_usable, own ? KIB(64) : 0);
        EXPECT_EQ(r.stranded, own ? 0 : KIB(256));
        EXPECT_EQ(r.streams[0].stream_id, own ? 0 : stream_id(s));
        EXPECT_EQ(r.busy, 0);
        EXPECT(r.fragmentation == now.external_fragmentation);
        for (int i = 0; i < 32; i++)
            if (i >= 8 || i % 2) OK(galloc_free(p[i], s));
        OK(galloc_free(wall, t));
        pool_end(pool);
        stream_end(s);
        stream_end(t);
        finish();
    }
}

static struct {
    galloc_pool *pool;
    cudaStream_t stream;
    pthread_t asks, frees;
    void *block;
    int left, ready, now, done; /* left: steps of the request until then */
} beside_report;

static void *free_beside(void *unused)
{
    OK(galloc_free(get(beside_report.pool, KIB(4), beside_report.stream), beside_report.stream));
    __atomic_store_n(&beside_report.ready, 1, __ATOMIC_RELEASE);
    while (!__atomic_load_n(&beside_report.now, __ATOMIC_ACQUIRE)) usleep(100);
    OK(galloc_free(beside_report.block, beside_report.stream));
    __atomic_store_n(&beside_report.done, 1, __ATOMIC_RELEASE);
    return unused;
}

static void free_at_one_step(const char *function, int locks)
{
    (void)function;
    if (locks || !pthread_equal(pthread_self(), beside_report.asks) || beside_report.left-- != 0) return;
    __atomic_store_n(&beside_report.now, 1, __ATOMIC_RELEASE);
    for (int i = 0; i < 100 && !__atomic_load_n(&beside_report.done, __ATOMIC_ACQUIRE); i++) usleep(100);
}

/* Also what comes into a stream cache while the request fails. */
TEST(what_the_report_counts_as_usable_is_usable_in_some_piece)
{
    for (int step = 0, came = 1; came; step++) {
        begin_still();
        galloc_config config = config_limit(MIB(4));
        config.wait_limit_ms = 0;
        memset(&beside_report, 0, sizeof beside_report);
        beside_report.asks = pthread_self();
        beside_report.left = step;
        cudaStream_t s = beside_report.stream = stream_new();
        galloc_pool *pool = beside_report.pool = pool_new(&config);
        void *p = get(pool, MIB(3), s), *q, *r = NULL;
        EXPECT_EQ(pthread_create(&beside_report.frees, NULL, free_beside, NULL), 0);
        while (!__atomic_load_n(&beside_report.ready, __ATOMIC_ACQUIRE)) usleep(100);
        beside_report.block = get(pool, KIB(512), s);
        q = get(pool, KIB(512), s);
        inside_on_step = free_at_one_step;
        EXPECT_EQ(galloc_pool_malloc(pool, &r, MIB(3), s), cudaErrorMemoryAllocation);
        __atomic_store_n(&inside_on_step, NULL, __ATOMIC_RELAXED); /* the other thread may be in a call still */
        came = beside_report.now;
        galloc_report report = report_of_failure();
        EXPECT_EQ(report.largest_usable, report.usable);
        __atomic_store_n(&beside_report.now, 1, __ATOMIC_RELEASE);
        EXPECT_EQ(pthread_join(beside_report.frees, NULL), 0);
        OK(galloc_free(p, s));
        OK(galloc_free(q, s));
        pool_end(pool);
        stream_end(s);
        finish();
        EXPECT(step < 500);
    }
}

TEST(a_full_device_is_no_limit_of_the_pool)
{
    sim_options options = sim_defaults();
    options.memory = MIB(64);
    begin_with(options);
    galloc_pool *pool = pool_new(NULL);
    cudaStream_t s = stream_new();
    void *p = get(pool, MIB(64), s);
    expect_refused(pool, MIB(4), s);
    galloc_report r = report_of_failure();
    EXPECT(left_out(&r, "use idle memory of other pools", "there is no other pool"));
    galloc_pool *other = pool_new(NULL);
    expect_refused(pool, MIB(4), s);
    r = report_of_failure();
    EXPECT(left_out(&r, "use idle memory of other pools", "the device's memory is the cause"));
    EXPECT(left_out(&r, "use idle memory of other pools, with a wait", "the device's memory is the cause"));
    OK(galloc_free(p, s));
    pool_end(pool);
    pool_end(other);
    stream_end(s);
    finish();
}

/* PyTorch's order knows of no other pools, but a limit is shared with them. */
TEST(advice_names_pools_that_share_a_limit)
{
    char text[GALLOC_REPORT_TEXT];
    galloc_config config = galloc_config_default();
    galloc_report report;
    void *p = NULL;
    begin();
    config.device_limit = MIB(64);
    galloc_pool *other = pool_new(&config);
    config.like = GALLOC_LIKE_PYTORCH;
    config.expandable_segments = 0;
    config.throw_on_cudamalloc_oom = 1; /* or it would take it */
    galloc_pool *pool = pool_new(&config);
    OK(galloc_free(get(other, MIB(40), NULL), NULL));
    EXPECT_EQ(galloc_pool_malloc(pool, &p, MIB(40), NULL), cudaErrorMemoryAllocation);
    OK(galloc_oom_report(&report));
    OK(galloc_report_text(&report, text, sizeof text));
    EXPECT(strstr(text, "- other pools of galloc hold 41943040 bytes that they do not use") != NULL);
    pool_end(pool);
    pool_end(other);
    finish();
}

TEST(the_report_advises_against_what_refused_at_once)
{
    begin_still();
    galloc_config config = config_limit(MIB(64));
    galloc_report report;
    config.throw_on_cudamalloc_oom = 1;
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new(), t = stream_new();
    void *p = get(pool, MIB(64), s);
    put(s, p, MIB(64), 1);
    OK(galloc_free(p, s));
    EXPECT_EQ(galloc_pool_malloc(pool, &p, MIB(40), t), cudaErrorMemoryAllocation);
    OK(galloc_oom_report(&report));
    EXPECT(says(&report, "- throw_on_cudamalloc_oom is on"));
    EXPECT_EQ(galloc_pool_malloc(pool, &p, MIB(80), t), cudaErrorMemoryAllocation); /* nothing would help that */
    OK(galloc_oom_report(&report));
    EXPECT(!says(&report, "- throw_on_cudamalloc_oom is on"));
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

TEST(the_report_tells_of_shrunk_blocks_that_keep_their_memory)
{
    begin();
    galloc_config config = config_limit(MIB(64));
    galloc_report report;
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new();
    galloc_request request = {.bytes = MIB(48), .max_bytes = MIB(48), .pool = pool, .stream = s};
    void *p = NULL, *q = NULL;
    OK(galloc_alloc(&p, &request));
    OK(galloc_resize(p, 100, s));
    EXPECT_EQ(galloc_pool_malloc(pool, &q, MIB(40), s), cudaErrorMemoryAllocation);
    OK(galloc_oom_report(&report));
    EXPECT_EQ(report.shrunk, MIB(46));
    EXPECT(says(&report, "- blocks with room have shrunk and keep 48234496 bytes: free them and allocate them again"));
    OK(galloc_free(p, s)); /* as advised */
    request.bytes = 100;
    OK(galloc_alloc(&p, &request));
    OK(galloc_pool_malloc(pool, &q, MIB(40), s));
    OK(galloc_free(q, s));
    OK(galloc_free(p, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* Likewise of a single page. */
TEST(the_report_tells_of_a_block_that_shrank_by_one_page)
{
    begin();
    galloc_config config = config_limit(MIB(8));
    galloc_report report;
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new();
    void *p = get_growable(pool, MIB(4), MIB(4), s), *q = NULL;
    OK(galloc_resize(p, MIB(2), s));
    EXPECT_EQ(galloc_pool_malloc(pool, &q, MIB(6), s), cudaErrorMemoryAllocation);
    OK(galloc_oom_report(&report));
    EXPECT_EQ(report.rounding, MIB(2));
    EXPECT_EQ(report.shrunk, MIB(2));
    OK(galloc_free(p, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* Blocks with room are larger than requested even when none has shrunk; in fixed segments they have all their room. */
TEST(the_report_advises_nothing_for_blocks_that_have_not_shrunk)
{
    for (int fixed = 0; fixed < 2; fixed++) {
        begin();
        galloc_config config = config_limit(MIB(64));
        galloc_report report;
        void *p[40];
        int n = 0;
        config.expandable_segments = !fixed;
        galloc_pool *pool = pool_new(&config);
        cudaStream_t s = stream_new();
        galloc_request request = {.bytes = MIB(1), .max_bytes = MIB(4), .pool = pool, .stream = s};
        while (n < 40 && !galloc_alloc(&p[n], &request)) n++;
        report = report_of_failure();
        EXPECT(n >= 8 && report.rounding >= MIB(24));
        EXPECT_EQ(report.shrunk, 0);
        EXPECT(!says(&report, "shrunk"));
        while (n) OK(galloc_free(p[--n], s));
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

/* Half a MiB of what is missing lies in the block. */
TEST(the_report_of_a_growth_has_the_pages_that_were_missing)
{
    begin();
    galloc_pool *pool = pool_limited(MIB(4));
    cudaStream_t s = stream_new();
    galloc_request request = {.bytes = KIB(1536), .max_bytes = MIB(64), .pool = pool, .stream = s};
    void *p = NULL;
    OK(galloc_alloc(&p, &request));
    EXPECT_EQ(galloc_resize(p, MIB(5), s), cudaErrorMemoryAllocation);
    galloc_report report = report_of_failure();
    EXPECT_EQ(report.asked, KIB(3584));
    EXPECT_EQ(report.rounded, MIB(4));
    EXPECT(says(&report, "out of memory: 3670016 more bytes (4194304 in further pages) on stream"));
    EXPECT_EQ(galloc_resize(p, MIB(7), s), cudaErrorMemoryAllocation);
    report = report_of_failure();
    EXPECT_EQ(report.rounded, MIB(6));
    OK(galloc_free(p, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* And one of which another stream still uses the end, up to there. */
TEST(the_largest_usable_piece_ends_before_what_is_in_use)
{
    galloc_config config = config_limit(MIB(2));
    begin_still();
    config.reuse = GALLOC_REUSE_COMPLETED;
    config.wait_limit_ms = 0;
    config.stats_exact = 1;
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new(), t = stream_new();
    OK(galloc_pool_reserve(pool, MIB(2)));
    void *p = get(pool, KIB(768), s), *q = get_used(pool, KIB(1280), t, 1);
    EXPECT_EQ((char *)q - (char *)p, KIB(768));
    OK(galloc_free(p, s));
    OK(cudaStreamSynchronize(s));
    OK(galloc_free(q, t));
    expect_refused(pool, KIB(1024), s);
    galloc_report r = report_of_failure();
    expect_sums(&r);
    EXPECT_EQ(r.usable, KIB(768));
    EXPECT_EQ(r.largest_usable, KIB(768));
    EXPECT_EQ(r.stranded, KIB(1280));
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* Segments are as large as PyTorch makes them, and reuse has no effect. */
TEST(the_report_fits_segments_like_those_of_pytorch)
{
    for (int limit = 24; limit >= 18; limit -= 6) {
        galloc_config config = config_limit(MIB(limit));
        begin_still();
        config.like = GALLOC_LIKE_PYTORCH;
        config.expandable_segments = 0;
        config.reuse = 0;
        config.wait_limit_ms = 0;
        galloc_pool *pool = pool_new(&config);
        cudaStream_t s = stream_new(), t = stream_new();
        void *p = get(pool, MIB(12), s), *q = NULL;
        put(s, p, MIB(12), 1);
        OK(galloc_free(p, s));
        expect_refused(pool, MIB(7), t);
        galloc_report r = report_of_failure();
        EXPECT_EQ(r.stranded, MIB(12));
        EXPECT(says(&r, "; the request needs a segment of 20971520"));
        EXPECT(!says(&r, "reuse:wait is off"));
        EXPECT(says(&r, "wait_limit_ms is 0"));
        EXPECT_EQ(r.largest_possible, limit == 24 ? MIB(12) : MIB(1));
        expect_refused(pool, limit == 24 ? MIB(14) : MIB(1) + 512, t);
        OK(galloc_pool_malloc(pool, &q, r.largest_possible, t));
        OK(galloc_free(q, t));
        pool_end(pool);
        stream_end(s);
        stream_end(t);
        finish();
    }
}

/* A free piece of a small segment serves no large request. */
TEST(what_is_free_in_a_small_segment_is_possible_for_small_requests)
{
    begin();
    galloc_config config = config_limit(MIB(2));
    config.like = GALLOC_LIKE_PYTORCH;
    config.expandable_segments = 0;
    galloc_pool *pool = pool_new(&config);
    void *p = get(pool, KIB(4), 0), *q = NULL;
    expect_refused(pool, MIB(1) + 512, 0);
    galloc_report r = report_of_failure();
    EXPECT_EQ(r.largest_possible, MIB(1));
    OK(galloc_pool_malloc(pool, &q, r.largest_possible, 0));
    OK(galloc_free(q, 0));
    OK(galloc_free(p, 0));
    pool_end(pool);
    finish();
}

/* What a limit leaves for a large segment exactly, is not cut down to a small one. */
TEST(the_smallest_large_segment_is_possible)
{
    for (int less = 0; less < 2; less++) {
        galloc_config config = config_limit(MIB(30) - (less ? MIB(2) : 0));
        begin();
        config.like = GALLOC_LIKE_PYTORCH;
        config.expandable_segments = 0;
        galloc_pool *pool = pool_new(&config);
        void *p = get(pool, MIB(20), 0), *q = NULL;
        expect_refused(pool, MIB(20), 0);
        galloc_report r = report_of_failure();
        EXPECT_EQ(r.largest_possible, less ? MIB(1) : MIB(10));
        OK(galloc_pool_malloc(pool, &q, r.largest_possible, 0));
        OK(galloc_free(q, 0));
        OK(galloc_free(p, 0));
        pool_end(pool);
        finish();
    }
}

TEST(the_largest_possible_block_is_possible)
{
    for (int fixed = 0; fixed < 2; fixed++) {
        for (uint64_t seed = 1; seed <= 12; seed++) {
            galloc_config config = config_limit(MIB(96));
            dice d = {seed};
            void *p[40], *q = NULL;
            begin();
            config.expandable_segments = !fixed;
            galloc_pool *pool = pool_new(&config);
            cudaStream_t s = stream_new();
            for (int i = 0; i < 40; i++) p[i] = get(pool, KIB(256) + roll_bytes(&d, MIB(3)) / 2, s);
            for (int i = 0; i < 40; i++)
                if (roll_below(&d, 3)) OK(galloc_free(p[i], s)), p[i] = NULL;
            expect_refused(pool, MIB(95), s);
            galloc_report r = report_of_failure();
            expect_sums(&r);
            EXPECT(r.largest_possible > 0 && r.largest_possible < r.rounded);
            OK(galloc_pool_malloc(pool, &q, r.largest_possible, s));
            OK(galloc_free(q, s));
            if (!fixed) EXPECT(says(&r, "the limit of"));
            for (int i = 0; i < 40; i++) OK(galloc_free(p[i], s));
            pool_end(pool);
            stream_end(s);
            finish();
        }
    }
}

/* On a device that others use, what is free there bounds it. */
TEST(the_largest_possible_block_fits_the_device)
{
    for (int uneven = 0; uneven < 2; uneven++) {
        sim_options options = sim_defaults();
        options.memory = MIB(64) + (uneven ? KIB(512) : 0);
        begin_with(options);
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_new(NULL);
        void *foreign = NULL, *p = NULL;
        OK(cudaMalloc(&foreign, MIB(32)));
        expect_refused(pool, MIB(48), s);
        galloc_report r = report_of_failure();
        EXPECT_EQ(r.room, options.memory);
        EXPECT_EQ(r.device_free, MIB(32) + (uneven ? KIB(512) : 0));
        EXPECT_EQ(r.largest_possible, MIB(32)); /* whole pages */
        OK(galloc_pool_malloc(pool, &p, r.largest_possible, s));
        OK(galloc_free(p, s));
        OK(cudaFree(foreign));
        pool_end(pool);
        finish();
    }
}

TEST(advice_fits_fixed_segments)
{
    galloc_config config = config_limit(MIB(40));
    begin();
    config.expandable_segments = 0;
    config.wait_limit_ms = 0; /* nothing is given back */
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new();
    void *p[2] = {get(pool, MIB(16), s), get(pool, MIB(16), s)};
    for (int i = 0; i < 2; i++) OK(galloc_free(p[i], s));
    expect_refused(pool, MIB(20), s);
    galloc_report r = report_of_failure();
    expect_sums(&r);
    EXPECT_EQ(r.usable_in_pages, r.usable);
    EXPECT(says(&r, "expandable_segments is False"));
    EXPECT(!says(&r, "GALLOC_LIFETIME_LONG"));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* A device that has too little for a segment of the usual size may have enough for the request. */
/* Where room is memory, a small block may be refused for it: the message and the report say so. */
TEST(room_that_is_memory_is_named)
{
    for (int kind = 0; kind < 4; kind++) { /* pages, fixed segments, cudaMalloc, segments like PyTorch's */
        galloc_config config = config_limit(MIB(100));
        void *p = NULL;
        begin();
        config.expandable_segments = kind == 0;
        if (kind == 2) config.backend = GALLOC_BACKEND_CUDA_MALLOC;
        if (kind == 3) config.like = GALLOC_LIKE_PYTORCH;
        galloc_pool *pool = pool_new(&config);
        cudaStream_t s = stream_new();
        galloc_request request = {.pool = pool, .bytes = 3520, .max_bytes = MIB(200), .stream = s};
        EXPECT_EQ(galloc_alloc(&p, &request), kind ? cudaErrorMemoryAllocation : cudaSuccess);
        if (kind) {
            galloc_report r = report_of_failure();
            EXPECT(r.room_is_memory && r.asked == 3520 && r.rounded == MIB(200));
            EXPECT(strstr(galloc_last_message(), "asked for 3520 bytes, with its room 209715200 bytes of memory, on "));
            EXPECT(says(&r, "out of memory: 3520 bytes (209715200 with its room, which is memory here) on stream"));
            EXPECT(says(&r, "- the block takes 209715200 bytes since its room (max_bytes) is memory here; less room"));
            EXPECT_EQ(says(&r, "expandable_segments:True"), kind != 2);
        } else {
            OK(galloc_free(p, s));
        }
        request.bytes = MIB(200); /* the room is not what is too large */
        EXPECT_EQ(galloc_alloc(&p, &request), cudaErrorMemoryAllocation);
        galloc_report r = report_of_failure();
        EXPECT(!r.room_is_memory && !says(&r, "room"));
        EXPECT(!strstr(galloc_last_message(), "room"));
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

/* Also behind the longest name. */
TEST(what_is_said_of_a_step_stands_apart_from_its_name)
{
    for (int like = 0; like < 2; like++) {
        galloc_config config = config_limit(MIB(16));
        begin();
        config.wait_limit_ms = 0;
        config.like = like;
        galloc_pool *pool = pool_new(&config);
        cudaStream_t s = stream_new();
        void *p = get(pool, MIB(10), s);
        expect_refused(pool, MIB(10), s);
        galloc_report r = report_of_failure();
        for (int i = 0; r.steps[i].name; i++) {
            char line[128];
            snprintf(line, sizeof line, "\n  %s  ", r.steps[i].name);
            if (!EXPECT(says(&r, line))) printf("    %s\n", r.steps[i].name);
        }
        OK(galloc_free(p, s));
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

TEST(a_small_rest_of_the_device_is_used)
{
    for (int fixed = 0; fixed < 2; fixed++) {
        galloc_config config = fixed ? config_fixed() : galloc_config_default();
        sim_options options = sim_defaults();
        void *foreign = NULL;
        config.growth = fixed ? 0 : MIB(32);
        options.memory = MIB(64);
        begin_with(options);
        galloc_pool *pool = pool_new(&config);
        cudaStream_t s = stream_new();
        OK(cudaMalloc(&foreign, MIB(54)));
        void *p = get(pool, MIB(3), s);
        EXPECT_EQ(stats_of(pool).reserved.current, MIB(4));
        expect_healthy(pool, 0);
        OK(galloc_free(p, s));
        OK(cudaFree(foreign));
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

/* A thread that has waited while another one created pages finds what is free there, and asks the driver nothing. */
static struct {
    galloc_pool *pool;
    cudaStream_t stream;
    pthread_t other;
    long asked;
    int begun;
} second;

static void *get_second(void *unused)
{
    OK(cudaSetDevice(0));
    void *p = get(second.pool, MIB(40), second.stream);
    OK(galloc_free(p, second.stream));
    return unused;
}

static void come_second(const char *function)
{
    if (second.begun || strcmp(function, "cuMemCreate")) return;
    second.begun = 1;
    EXPECT_EQ(pthread_create(&second.other, NULL, get_second, NULL), 0);
    usleep(20000); /* it waits for this thread then; if it comes later, it finds the page at once */
    second.asked = sim_calls("cuEventQuery");
}

TEST(who_waits_for_growth_is_served_from_it)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    memset(&second, 0, sizeof second);
    galloc_config config = galloc_config_default();
    config.growth = MIB(64);
    second.pool = pool_new(&config);
    second.stream = stream_new();
    OK(galloc_free(get(second.pool, 512, second.stream), second.stream));
    void *p = get_used(second.pool, MIB(60), s, 1);
    OK(galloc_free(p, s)); /* with an event that one could ask for */
    EXPECT(sim_calls("cuEventRecord") > 0);
    sim_hook(come_second, NULL);
    void *q = get(second.pool, MIB(20), t);
    EXPECT(second.begun);
    if (second.begun) EXPECT_EQ(pthread_join(second.other, NULL), 0);
    sim_hook(NULL, NULL);
    EXPECT_EQ(sim_calls("cuEventQuery"), second.asked);
    OK(galloc_free(q, t));
    pool_end(second.pool);
    finish();
}

/* A call lets go of all locks for a callback. The state of its stream stays meanwhile, however many there are. */
static struct {
    cudaStream_t stream;
    int asked;
} crowd;

static void ask_in_the_crowd(galloc_pool *pool, void *addr, size_t bytes, void *user)
{
    void *p = NULL;
    (void)addr, (void)bytes, (void)user;
    if (crowd.asked++) return;
    EXPECT_EQ(galloc_pool_malloc(pool, &p, MIB(32), crowd.stream), cudaErrorMemoryAllocation);
}

TEST(a_stream_is_not_forgotten_during_a_callback_of_its_call)
{
    begin();
    galloc_pool *pool = pool_limited(MIB(64));
    galloc_callbacks calls = {0};
    calls.on_map = ask_in_the_crowd;
    memset(&crowd, 0, sizeof crowd);
    for (size_t i = 0; i < inside_streams_kept() + 8; i++) {
        crowd.stream = stream_new();
        OK(galloc_free(get(pool, 512, crowd.stream), crowd.stream));
    }
    OK(cudaDeviceSynchronize());
    OK(galloc_pool_trim(pool, 0, NULL));
    OK(galloc_pool_trim(pool, 0, NULL));
    OK(galloc_pool_set_callbacks(pool, &calls));
    cudaStream_t s = stream_new();
    void *p = get_used(pool, MIB(4), s, 1);
    EXPECT(crowd.asked > 0);
    EXPECT_EQ(galloc_pool_check(pool), 0);
    EXPECT(inside_stream_of(pool, stream_id(s)).known);
    OK(galloc_free(p, s));
    pool_end(pool);
    finish();
}

/* The device is full before the pool is. Pages that the stream may have move all the same, though they cannot be given
   back while it works with them. */
TEST(pages_move_when_the_device_is_full)
{
    galloc_config config = galloc_config_default();
    sim_options options = sim_defaults();
    void *foreign = NULL, *p[8];
    options.memory = MIB(64);
    options.pace = SIM_PACE_STILL;
    begin_with(options);
    config.wait_limit_ms = 0;
    config.overhead = 1;
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new();
    for (int i = 0; i < 8; i++) p[i] = get(pool, MIB(2), s);
    OK(cudaMalloc(&foreign, MIB(64) - sim_physical(0)));
    for (int i = 0; i < 8; i++) put(s, p[i], MIB(2), 1);
    for (int i = 0; i < 8; i += 2) OK(galloc_free(p[i], s));
    void *big = get(pool, MIB(6), s);
    put(s, big, MIB(6), 2);
    expect_healthy(pool, 0);
    OK(galloc_free(big, s));
    for (int i = 1; i < 8; i += 2) OK(galloc_free(p[i], s));
    sim_run(-1);
    OK(cudaFree(foreign));
    pool_end(pool);
    stream_end(s);
    finish();
}

TEST(the_report_knows_what_graphs_own)
{
    galloc_config config = config_limit(MIB(32));
    cudaGraph_t graph = NULL;
    begin();
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new(), c = stream_new();
    OK(cudaStreamBeginCapture(c, cudaStreamCaptureModeGlobal));
    void *p = get(pool, MIB(20), c);
    put(c, p, MIB(20), 1);
    OK(galloc_free(p, c));
    OK(cudaStreamEndCapture(c, &graph));
    expect_refused(pool, MIB(16), s);
    galloc_report r = report_of_failure();
    expect_sums(&r);
    EXPECT_EQ(r.graph_bytes, MIB(20));
    EXPECT_EQ(r.graph_bytes, stats_of(pool).graph_bytes);
    EXPECT(says(&r, "graphs own 20971520 bytes"));
    EXPECT(!says(&r, "stranded by other streams"));
    OK(cudaGraphDestroy(graph));
    pool_end(pool);
    stream_end(s);
    stream_end(c);
    finish();
}

/* The text has a line of this name, with the bytes and what follows them. */
static void expect_line(const galloc_report *report, const char *name, size_t bytes, const char *more)
{
    char start[64], end[96];
    int found = 0;
    snprintf(start, sizeof start, "  %s ", name);
    snprintf(end, sizeof end, " MiB  %zu%s%s", bytes, more[0] ? "  " : "", more);
    OK(galloc_report_text(report, report_text, sizeof report_text));
    for (char *line = strtok(report_text, "\n"); line; line = strtok(NULL, "\n")) {
        const char *at = strstr(line, end);
        found += !strncmp(line, start, strlen(start)) && at && !at[strlen(end)];
    }
    if (!EXPECT_EQ(found, 1)) printf("    no line \"%s\" with \"%s\"\n", name, end);
}

/* Each figure stands in its own line; those of what there is not are left out. */
TEST(the_text_has_each_figure_of_the_report)
{
    galloc_report r = {.held = 1, .live = 2, .rounding = 3, .cached = 4, .usable = 5, .largest_usable = 6,
                       .usable_in_pages = 7, .in_slots = 8, .stranded = 9, .more_streams = 10, .more_stranded = 11,
                       .graph_bytes = 12, .quarantined = 13, .busy = 14, .limit = 15, .largest_possible = 16,
                       .fragmentation = 0.125, .device = 5, .device_known = 1, .device_total = 17, .device_free = 18,
                       .other_pools = 19, .others_held = 20, .others_cached = 21, .outside = 22, .asked = 23,
                       .rounded = 24, .stream_id = 25, .cause = "a cause"};
    static const char *const optional[] = {"that cannot move", "in slots", "more streams", "graphs' own",
                                           "not taken back", "on the way", "other pools", "in pieces of",
                                           "outside galloc", "    stream ", "  free   "};
    begin();
    for (int i = 0; i < 2; i++) {
        r.streams[i].stream_id = 26 + (unsigned)i;
        r.streams[i].bytes = 28 + (unsigned)i;
    }
    EXPECT(says(&r, "out of memory: 23 bytes (24 after rounding) on stream 25\ncause: a cause\n"));
    r.captured = 1;
    EXPECT(says(&r, "(24 after rounding) on stream 25, which is being captured\ncause: a cause\n"));
    r.captured = 0;
    EXPECT(says(&r, "no step was taken"));
    r.steps_taken = 1;
    r.steps[0].name = "first";
    r.steps[0].gained = 31;
    r.steps[1].name = "second";
    r.steps[1].left_out = "a reason";
    EXPECT(says(&r, "steps taken, and the bytes gained\n  first ") && says(&r, "  31\n  second ") &&
           says(&r, "  left out: a reason\nwhat would help\n"));
    r.steps[1].gained = 32;
    EXPECT(says(&r, "  32; then left out: a reason\n"));
    r.rounds = 1;
    EXPECT(says(&r, "steps taken, and the bytes gained in 2 rounds\n  first ") && !says(&r, "no step was taken"));
    expect_line(&r, "live", 2, "");
    expect_line(&r, "rounding", 3, "");
    expect_line(&r, "cached", 4, "of it:");
    expect_line(&r, "  free for the stream", 5, "in pieces of up to 6");
    expect_line(&r, "    that cannot move", 7, "");
    expect_line(&r, "    in slots of other sizes", 8, "strategy:pooled");
    expect_line(&r, "  stranded by streams", 9, "");
    expect_line(&r, "    stream 26", 28, "");
    expect_line(&r, "    stream 27", 29, "");
    expect_line(&r, "    10 more streams", 11, "");
    expect_line(&r, "  graphs' own", 12, "");
    expect_line(&r, "  not taken back", 13, "");
    expect_line(&r, "  on the way", 14, "");
    expect_line(&r, "held", 1, "");
    expect_line(&r, "of at most", 15, "");
    expect_line(&r, "largest possible block", 16, "");
    EXPECT(says(&r, "fragmentation") && says(&r, " 0.125\n"));
    EXPECT(says(&r, "device 5\n"));
    expect_line(&r, "total", 17, "");
    expect_line(&r, "free", 18, "");
    expect_line(&r, "this pool", 1, "");
    expect_line(&r, "galloc's other pools", 20, "21 of it cached");
    expect_line(&r, "outside galloc", 22, "");
    for (size_t i = 0; i < sizeof optional / sizeof *optional; i++) EXPECT(says(&r, optional[i]));
    memset(&r, 0, sizeof r);
    for (size_t i = 0; i < sizeof optional / sizeof *optional; i++) EXPECT(!says(&r, optional[i]));
    finish();
}

/* A request of 200 MiB lacks 100; nothing is known that would help. */
static galloc_report helpless(void)
{
    galloc_report r = {.rounded = MIB(200), .largest_possible = MIB(100), .limit = GIB(1), .room = GIB(1),
                       .device_known = 1, .device_total = GIB(1), .device_free = GIB(1), .expandable_segments = 1,
                       .reuse = GALLOC_REUSE_WAIT, .wait_limit_ms = UINT64_MAX};
    return r;
}

/* Only this advice is given, which begins so; NULL: none. */
static void expect_advice(const galloc_report *report, const char *text)
{
    static const char title[] = "what would help\n";
    if (!text) text = "- fewer bytes live at once, or more memory\n";
    OK(galloc_report_text(report, report_text, sizeof report_text));
    const char *all = strstr(report_text, title), *end;
    if (!EXPECT(all)) return;
    all += strlen(title);
    end = strchr(all, '\n');
    if (!EXPECT(end && !end[1] && !strncmp(all, text, strlen(text)))) printf("    not only \"%s\" but:\n%s", text, all);
}

/* `advice` is all that is said of a report with these fields, and nothing of one that has the others as well. */
#define ADVISES(advice, fields, others)                                                                                \
    do {                                                                                                               \
        galloc_report r = helpless();                                                                                  \
        fields;                                                                                                        \
        expect_advice(&r, advice);                                                                                     \
        others;                                                                                                        \
        expect_advice(&r, NULL);                                                                                       \
    } while (0)

#define OTHERS(fields) (r.others_cached = 1, r.wait_limit_ms = 5, fields)

/* Of each advice: that its cause suffices, and that it is not given for one byte less, or where it does not apply. */
TEST(each_advice_has_its_cause)
{
    const size_t lacks = MIB(100);
    begin();
    ADVISES(NULL, r.stranded = lacks - 1, r.stranded = lacks); /* these will be waited for */
    ADVISES("- a captured stream cannot wait for others, and 104857600 bytes wait for other streams",
            (r.stranded = lacks, r.captured = 1, r.reuse = 0, r.wait_limit_ms = 5), r.stranded--);
    ADVISES("- reuse:wait is off while 104857600 bytes are stranded", (r.stranded = lacks, r.reuse = 0), r.stranded--);
    ADVISES("- reuse:wait is off", (r.stranded = lacks, r.reuse = 0), r.reuse = GALLOC_REUSE_WAIT);
    ADVISES("- reuse:wait is off", (r.stranded = lacks, r.reuse = 0), r.backend = GALLOC_BACKEND_CUDA_MALLOC);
    ADVISES("- reuse:wait is off", (r.stranded = lacks, r.reuse = 0, r.like = GALLOC_LIKE_PYTORCH),
            r.expandable_segments = 0);
    ADVISES("- wait_limit_ms is 5 while 104857600 bytes are stranded", (r.stranded = lacks, r.wait_limit_ms = 5),
            r.stranded--);
    ADVISES("- wait_limit_ms is 0", (r.stranded = lacks, r.wait_limit_ms = 0), r.wait_limit_ms = UINT64_MAX);
    ADVISES("- many streams strand memory", (r.stranded = 1, r.more_streams = 1), r.more_streams = 0);
    ADVISES("- expandable_segments is False: 209715200 bytes are free, but the largest piece has 7",
            (r.expandable_segments = 0, r.usable = MIB(201), r.in_slots = MIB(1), r.largest_usable = 7), r.usable--);
    ADVISES("- expandable_segments is False", (r.expandable_segments = 0, r.usable = MIB(200)), r.backend = 1);
    ADVISES("- expandable_segments is False", (r.expandable_segments = 0, r.usable = MIB(200)),
            r.expandable_segments = 1);
    ADVISES("- strategy:pooled keeps 104857600 bytes", r.in_slots = r.usable = lacks, r.in_slots--);
    ADVISES("- like:pytorch keeps 104857600 bytes in segments for",
            (r.in_slots = r.usable = lacks, r.like = GALLOC_LIKE_PYTORCH), r.in_slots--);
    ADVISES("- 104857600 bytes lie beside used blocks", r.usable_in_pages = r.usable = lacks, r.usable_in_pages--);
    ADVISES("- 104857600 bytes lie beside used blocks", r.usable_in_pages = r.usable = lacks,
            r.expandable_segments = 0);
    ADVISES("- graphs own 104857600 bytes", r.graph_bytes = lacks, r.graph_bytes--);
    ADVISES("- the driver refused to take back 1 bytes", r.quarantined = 1, r.quarantined = 0);
    ADVISES("- throw_on_cudamalloc_oom is on", (r.rejected = 1, r.rounded = r.limit), r.rounded++);
    ADVISES("- the block takes 209715200 bytes since its room (max_bytes) is memory here; less room takes less; in "
            "pages", r.room_is_memory = 1, r.room_is_memory = 0);
    ADVISES("- the block takes 209715200 bytes since its room (max_bytes) is memory here; less room takes less\n",
            (r.room_is_memory = 1, r.backend = 1), r.room_is_memory = 0);
    ADVISES("- blocks with room have shrunk and keep 104857600 bytes", r.shrunk = lacks, r.shrunk--);
    ADVISES("- the limit of 536870912 is the cause: the device has 157286400 free",
            (r.limit = MIB(512), r.room = MIB(50), r.device_free = MIB(150)), r.device_free--);
    ADVISES("- the limit of 536870912 is the cause", (r.limit = MIB(512), r.room = 0), r.limit = r.room = GIB(1));
    ADVISES("- 67108864 bytes are held outside galloc", (r.device_free = MIB(200) - 1, r.outside = MIB(64)),
            r.outside--);
    ADVISES("- 67108864 bytes are held outside galloc", (r.device_free = MIB(200) - 1, r.outside = MIB(64)),
            r.device_free++);
    ADVISES("- other pools of galloc hold 1 bytes", OTHERS(r.device_free = MIB(200) - 1), r.device_free++);
    ADVISES("- other pools of galloc hold 1 bytes", OTHERS(r.device_free = 0), r.device_known = 0);
    ADVISES("- other pools of galloc hold 1 bytes", OTHERS((r.held = MIB(100), r.room -= r.held + 1)), r.room++);
    ADVISES("- other pools of galloc hold 1 bytes", OTHERS(r.device_free = 0), r.others_cached = 0);
    /* Its own limit is the cause; or nothing has kept it from their memory, which is not to be had. */
    ADVISES("- other pools of galloc hold 1 bytes",
            OTHERS((r.device_free = 0, r.limit = MIB(300), r.held = MIB(200), r.room = lacks)), (r.held++, r.room--));
    ADVISES("- other pools of galloc hold 1 bytes", OTHERS(r.device_free = 0), r.wait_limit_ms = UINT64_MAX);
    ADVISES("- other pools of galloc hold 1 bytes",
            (OTHERS(r.device_free = 0), r.captured = 1, r.wait_limit_ms = UINT64_MAX), r.captured = 0);
    finish();
}

/* Large figures, the longest names, and nearly all advice. */
TEST(the_longest_text_of_a_report_fits)
{
    galloc_report r;
    begin();
    memset(&r, 0xFF, sizeof r);
    memset(r.cause, 'c', sizeof r.cause - 1);
    r.cause[sizeof r.cause - 1] = 0;
    r.fragmentation = 1;
    r.rounds--; /* the text has one more */
    r.wait_limit_ms = UINT64_MAX - 1;
    r.captured = r.grows = r.backend = r.like = r.reuse = 0;
    r.in_slots = r.room = r.limit = SIZE_MAX / 2;
    for (int expandable = 0; expandable < 2; expandable++) {
        r.expandable_segments = expandable;
        for (int i = 0; i < GALLOC_REPORT_STEPS; i++) {
            r.steps[i].name = "use idle memory of other pools, with a wait";
            r.steps[i].left_out = "neither gc_threshold nor gc_age is in effect";
        }
        OK(galloc_report_text(&r, report_text, sizeof report_text));
        EXPECT(strlen(report_text) > 4096);
    }
    finish();
}

TEST(a_text_that_does_not_fit_is_empty)
{
    galloc_report r;
    begin();
    galloc_pool *pool = pool_limited(MIB(8));
    cudaStream_t s = stream_new();
    expect_refused(pool, MIB(9), s);
    r = report_of_failure();
    EXPECT(says(&r, "no step was taken"));
    size_t length = strlen(report_text);
    EXPECT(length > 500 && length < 4096);
    OK(galloc_report_text(&r, report_text, length + 1));
    EXPECT_EQ(strlen(report_text), length);
    EXPECT_EQ(galloc_report_text(&r, report_text, length), cudaErrorInvalidValue);
    EXPECT_EQ(report_text[0], 0);
    EXPECT_EQ(galloc_report_text(&r, report_text, 0), cudaErrorInvalidValue);
    EXPECT_EQ(galloc_report_text(NULL, report_text, sizeof report_text), cudaErrorInvalidValue);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* A wait for the device has made memory at a hole usable, which is less than the request: with a new page beside it the
   request is served, and not only when it comes again. */
TEST(pages_are_created_beside_what_a_wait_has_freed)
{
    begin_with_devices(1, SIM_PACE_PROMPT);
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_limited(MIB(8));
    void *a = get(pool, KIB(4352), s), *b = get(pool, KIB(1536), s), *c = get(pool, MIB(1), s);
    OK(galloc_free(a, s));
    a = get(pool, KIB(768), s);
    OK(galloc_free(b, t));
    void *d = get(pool, KIB(512), t), *e = get(pool, MIB(1), t), *f = get(pool, MIB(2), s);
    OK(galloc_free(e, s));
    void *last = get(pool, KIB(3584), s), *all[] = {a, c, d, f, last};
    for (int i = 0; i < 5; i++) OK(galloc_free(all[i], s));
    pool_end(pool);
    finish();
}

static galloc_pool *small_pool;
static int shortages;

static int counts_shortages(const galloc_report *report, void *user)
{
    (void)report, (void)user;
    shortages++;
    return 0;
}

static void runs_out_elsewhere(galloc_pool *pool, void *addr, size_t bytes, void *user)
{
    void *p;
    (void)pool, (void)addr, (void)bytes, (void)user;
    EXPECT_EQ(galloc_pool_malloc(small_pool, &p, MIB(64), 0), cudaErrorMemoryAllocation);
}

/* A callback is not called within another one: running out in on_map calls no on_oom, of another pool neither. */
TEST(on_oom_is_not_called_within_on_map)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_callbacks callbacks = {0};
    small_pool = pool_limited(MIB(64));
    void *held = get(small_pool, MIB(32), s);
    callbacks.on_oom = counts_shortages;
    OK(galloc_pool_set_callbacks(small_pool, &callbacks));
    galloc_pool *pool = pool_new(NULL);
    callbacks.on_oom = NULL;
    callbacks.on_map = runs_out_elsewhere;
    OK(galloc_pool_set_callbacks(pool, &callbacks));
    shortages = 0;
    void *p = get(pool, MIB(4), s);
    EXPECT_EQ(shortages, 0);
    OK(galloc_free(p, s));
    OK(galloc_free(held, s));
    pool_end(pool);
    pool_end(small_pool);
    stream_end(s);
    finish();
}

static void counts_rejections(const galloc_report *report, void *user)
{
    EXPECT(report->rejected);
    ++*(int *)user;
}

static void asks_too_much(galloc_pool *pool, void *addr, size_t bytes, void *user)
{
    void *p;
    (void)addr, (void)bytes, (void)user;
    EXPECT_EQ(galloc_pool_malloc(pool, &p, GIB(1), 0), cudaErrorMemoryAllocation);
}

static int counts_calls(const galloc_report *report, void *user)
{
    EXPECT(!report->rejected);
    ++((int *)user)[1];
    return 0;
}

/* A growth beyond all that the pool may ever hold fails at once: the program is told, and not asked. */
TEST(a_growth_beyond_all_that_the_pool_may_hold_fails_at_once)
{
    int counts[2] = {0, 0};
    galloc_callbacks calls = {counts_calls, counts_rejections, NULL, NULL, counts};
    begin();
    galloc_pool *pool = pool_limited(MIB(64));
    cudaStream_t s = stream_new();
    OK(galloc_pool_set_callbacks(pool, &calls));
    void *p = get_growable(pool, 512, GIB(1), s);
    EXPECT_EQ(galloc_resize(p, GIB(1), s), cudaErrorMemoryAllocation);
    EXPECT_EQ(counts[0], 1);
    EXPECT_EQ(counts[1], 0);
    OK(galloc_resize(p, MIB(60), s));
    OK(galloc_free(p, s));
    pool_end(pool);
    finish();
}

/* The program is asked about requests of all kinds, and told of those that fail at once. */
TEST(the_program_hears_of_requests_of_all_kinds)
{
    for (int kind = 0; kind < RUN_OUT_KINDS; kind++) {
        for (int at_once = 0; at_once < 2; at_once++) {
            begin();
            cudaStream_t s = stream_new();
            galloc_config config = config_limit(MIB(64));
            config.throw_on_cudamalloc_oom = at_once;
            galloc_pool *pool = pool_new(&config);
            int calls[2] = {0, 0};
            galloc_callbacks callbacks = {counts_calls, counts_rejections, NULL, NULL, calls};
            OK(galloc_pool_set_callbacks(pool, &callbacks));
            void *p = get(pool, MIB(40), s);
            ask_in_vain(pool, kind, MIB(40), s);
            EXPECT_EQ(calls[0], at_once);
            EXPECT_EQ(calls[1], !at_once);
            OK(galloc_free(p, s));
            pool_end(pool);
            stream_end(s);
            finish();
        }
    }
}

/* Unlike on_oom, on_reject is called within on_map and on_unmap. */
TEST(on_reject_is_called_within_on_map)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_limited(MIB(64));
    int rejections = 0;
    galloc_callbacks callbacks = {NULL, counts_rejections, asks_too_much, asks_too_much, &rejections};
    OK(galloc_pool_set_callbacks(pool, &callbacks));
    void *p = get(pool, MIB(4), s);
    EXPECT(rejections > 0);
    EXPECT_EQ(rejections, stats_of(pool).rejections);
    OK(galloc_free(p, s));
    rejections = 0;
    OK(galloc_pool_trim(pool, 0, NULL));
    EXPECT(rejections > 0);
    OK(galloc_pool_set_callbacks(pool, NULL));
    pool_end(pool);
    stream_end(s);
    finish();
}

static int lowers_the_limit(const galloc_report *report, void *user)
{
    (void)report;
    OK(galloc_pool_set_limit((galloc_pool *)user, MIB(32)));
    return 1;
}

/* The cause is that of the last attempt. The driver refused the first one, the limit the second one. */
TEST(the_cause_is_that_of_the_last_attempt)
{
    sim_options options = sim_defaults();
    options.memory = MIB(128);
    begin_with(options);
    cudaStream_t s = stream_new();
    galloc_callbacks callbacks = {0};
    galloc_report report;
    void *outside = NULL, *p = NULL;
    OK(cudaMalloc(&outside, MIB(64)));
    galloc_pool *pool = pool_new(NULL);
    callbacks.on_oom = lowers_the_limit;
    callbacks.user = pool;
    OK(galloc_pool_set_callbacks(pool, &callbacks));
    EXPECT_EQ(galloc_pool_malloc(pool, &p, MIB(80), s), cudaErrorMemoryAllocation);
    OK(galloc_oom_report(&report));
    EXPECT(strstr(report.cause, "limit"));
    EXPECT(!strstr(report.cause, "cuMemCreate"));
    OK(cudaFree(outside));
    pool_end(pool);
    stream_end(s);
    finish();
}

static void lowers_the_limit_at_unmap(galloc_pool *pool, void *addr, size_t bytes, void *user)
{
    (void)addr;
    (void)bytes;
    (void)user;
    OK(galloc_pool_set_limit(pool, MIB(16)));
}

/* Within one attempt it is that of the last step: the driver refused, and what went back to it led to a lower limit. */
TEST(the_cause_is_that_of_the_last_step)
{
    for (int expandable = 0; expandable < 2; expandable++) {
        sim_options options = sim_defaults();
        options.memory = MIB(64);
        begin_with(options);
        cudaStream_t s = stream_new();
        galloc_callbacks callbacks = {.on_unmap = lowers_the_limit_at_unmap};
        galloc_report report;
        void *outside = NULL, *p = NULL;
        OK(cudaMalloc(&outside, MIB(24)));
        galloc_pool *pool = pool_expandable(expandable);
        OK(galloc_pool_set_callbacks(pool, &callbacks));
        OK(galloc_free(get(pool, MIB(12), s), s));
        EXPECT_EQ(galloc_pool_malloc(pool, &p, MIB(50), s), cudaErrorMemoryAllocation);
        OK(galloc_oom_report(&report));
        EXPECT(strstr(report.cause, "limit"));
        EXPECT(!strstr(report.cause, "cuMem"));
        EXPECT_EQ(stats_of(pool).reserved.current, 0);
        OK(cudaFree(outside));
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

static int asks_once_more(const galloc_report *report, void *user)
{
    (void)user;
    return report->rounds == 0;
}

/* galloc_pool_reserve runs out, on_oom asks for another attempt: there is no stream whose cache it could look into. */
TEST(on_oom_may_ask_again_for_a_reserve)
{
    begin();
    galloc_config config = config_limit(MIB(16));
    galloc_pool *pool = pool_new(&config);
    galloc_callbacks callbacks = {0};
    void *p = get(pool, MIB(10), 0);
    callbacks.on_oom = asks_once_more;
    OK(galloc_pool_set_callbacks(pool, &callbacks));
    EXPECT_EQ(galloc_pool_reserve(pool, MIB(12)), cudaErrorMemoryAllocation);
    galloc_report report;
    OK(galloc_oom_report(&report));
    EXPECT_EQ(report.rounds, 1);
    expect_healthy(pool, 1);
    OK(galloc_free(p, 0));
    pool_end(pool);
    finish();
}

/* What a reset took is free in the driver already: the pools behind are asked all the same. */
TEST(what_a_reset_took_from_other_pools_is_not_what_they_give)
{
    enum { LOST = 5 };
    sim_options options = sim_defaults();
    options.memory = GIB(16);
    begin_with(options);
    galloc_pool *lost[LOST], *idle, *pool;
    galloc_config config = config_limit(GIB(64));
    idle = pool_new(&config); /* pools are asked from the latest to the first */
    config.expandable_segments = 0;
    for (int i = 0; i < LOST; i++) lost[i] = pool_new(&config);
    config.expandable_segments = 1;
    pool = pool_new(&config);
    for (int i = 0; i < LOST; i++) OK(galloc_free(get(lost[i], MIB(1300), 0), 0));
    OK(cudaDeviceReset());
    OK(cudaSetDevice(0));
    OK(galloc_free(get(idle, GIB(15), 0), 0));
    sim_run(-1);
    OK(galloc_free(get(pool, MIB(1200), 0), 0));
    pool_end(pool);
    for (int i = 0; i < LOST; i++) pool_end(lost[i]);
    pool_end(idle);
    finish();
}

/* A reset took another pool's cudaMalloc memory, which fills the device_limit until that pool is looked at. */
TEST(what_a_reset_took_from_another_pool_is_found_in_time)
{
    for (int limit = 0; limit < 3; limit++) {
        begin();
        galloc_config config = config_limit(GIB(1));
        config.expandable_segments = 0;
        config.device_limit = MIB(128);
        galloc_pool *other = pool_new(&config);
        config = config_limit(GIB(1));
        config.wait_limit_ms = limit == 1 ? 0 : limit == 2 ? 1000 : config.wait_limit_ms;
        galloc_pool *pool = pool_new(&config);
        OK(galloc_free(get(other, MIB(100), 0), 0));
        OK(cudaDeviceReset());
        OK(cudaSetDevice(0));
        OK(galloc_free(get(pool, MIB(60), 0), 0));
        pool_end(pool);
        pool_end(other);
        finish();
    }
}

/* Blocks without room have not shrunk, however far their requests were rounded. */
TEST(blocks_that_were_rounded_have_not_shrunk)
{
    begin();
    galloc_config config = config_limit(MIB(32));
    galloc_report report;
    char text[GALLOC_REPORT_TEXT];
    void *q = NULL;
    for (int i = 0; i < GALLOC_DIVISIONS; i++) config.roundup_power2_divisions[i] = 2;
    galloc_pool *pool = pool_new(&config);
    void *p = get(pool, MIB(17), NULL);
    EXPECT_EQ(galloc_pool_malloc(pool, &q, MIB(12), NULL), cudaErrorMemoryAllocation);
    OK(galloc_oom_report(&report));
    EXPECT_EQ(report.shrunk, 0);
    OK(galloc_report_text(&report, text, sizeof text));
    EXPECT(!strstr(text, "have shrunk"));
    OK(galloc_free(p, NULL));
    pool_end(pool);
    finish();
}

/* With throw_on_cudamalloc_oom, memory of another stream whose work is complete serves. */
TEST(a_request_that_is_not_to_wait_has_what_others_have_done_with)
{
    begin();
    galloc_config config = config_limit(MIB(4));
    config.throw_on_cudamalloc_oom = 1;
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new(), t = stream_new();
    OK(galloc_free(get(pool, 512, t), t));
    OK(galloc_free(get_used(pool, MIB(3), s, 1), s));
    OK(cudaDeviceSynchronize());
    void *q = get(pool, MIB(3), t);
    OK(galloc_free(q, t));
    pool_end(pool);
    finish();
}

/* With a wait_limit_ms, no request waits for the work of another pool. */
TEST(a_limited_request_does_not_wait_for_another_pool)
{
    begin_still();
    galloc_config config = galloc_config_default();
    config.device_limit = MIB(64);
    galloc_pool *other = pool_new(&config);
    config.wait_limit_ms = 0;
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new(), t = stream_new();
    void *q = NULL;
    OK(galloc_free(get_used(other, MIB(60), s, 1), s));
    long fences = sim_calls("cuMemHostAlloc"), blocking = sim_blocking_calls();
    (void)galloc_pool_malloc(pool, &q, MIB(30), t);
    EXPECT_EQ(sim_calls("cuMemHostAlloc"), fences);
    EXPECT_EQ(sim_blocking_calls(), blocking);
    if (q) OK(galloc_free(q, t));
    pool_end(pool);
    pool_end(other);
    finish();
}

typedef struct beside {
    galloc_pool *other;
    cudaStream_t stream;
    void *got;
} beside;

static void allocate_beside(galloc_pool *pool, void *addr, size_t bytes, void *user)
{
    beside *b = user;
    (void)pool, (void)addr, (void)bytes;
    if (!b->got) OK(galloc_pool_malloc(b->other, &b->got, MIB(4), b->stream));
}

/* Within on_map and on_unmap only pools that have such callbacks map nothing. */
TEST(a_pool_without_callbacks_grows_within_those_of_another)
{
    for (int unmaps = 0; unmaps < 2; unmaps++) {
        begin();
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_expandable(1);
        beside b = {pool_expandable(1), s, NULL};
        galloc_callbacks calls = {.user = &b};
        if (unmaps) calls.on_unmap = allocate_beside;
        else calls.on_map = allocate_beside;
        OK(galloc_pool_set_callbacks(pool, &calls));
        OK(galloc_free(get(pool, MIB(2), s), s));
        OK(galloc_pool_trim(pool, 0, NULL));
        EXPECT(b.got != NULL);
        EXPECT_EQ(stats_of(b.other).reserved.current, MIB(4));
        if (b.got) OK(galloc_free(b.got, s));
        pool_end(b.other);
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

TEST_MAIN()
