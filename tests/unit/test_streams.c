/* test_streams.c - memory between streams: what must not be reused yet, and what may be reused without waiting. The
   ledger of the simulated device finds every use that is not ordered after the uses before it. */

#include "setup.h"

enum { COMPLETED = GALLOC_REUSE_COMPLETED, FOLLOWED = GALLOC_REUSE_FOLLOWED, WAIT = GALLOC_REUSE_WAIT };

/* A pool that may hold so much and no more, so that reuse is the only way to more memory. */
static galloc_pool *tight_pool(size_t limit, int reuse)
{
    galloc_config config = config_limit(limit);
    config.reuse = reuse;
    galloc_pool *pool = pool_new(&config);
    OK(galloc_pool_reserve(pool, limit));
    return pool;
}

/* The same without stream caches: what is freed merges at once. */
static galloc_pool *tight_pool_that_merges(size_t limit, int reuse)
{
    galloc_config config = config_limit(limit);
    config.reuse = reuse;
    config.stats_exact = 1;
    galloc_pool *pool = pool_new(&config);
    OK(galloc_pool_reserve(pool, limit));
    return pool;
}

/* A pool that creates new memory rather than have anybody wait or any page move. */
static galloc_pool *roomy_pool(void)
{
    galloc_config config = galloc_config_default();
    config.overhead = 100;
    return pool_new(&config);
}

/* Makes a second stream known to the pool: from then on there is somebody to record for. */
static void come_into_play(galloc_pool *pool, cudaStream_t stream) { OK(galloc_free(get(pool, 512, stream), stream)); }

/* ---- rule 1: the same stream ------------------------------------------------------------------------------------- */

TEST(own_memory_is_reused_at_once)
{
    begin_still();
    cudaStream_t s = stream_new();
    galloc_pool *pool = tight_pool(MIB(8), WAIT);
    long events = event_calls(), memory = memory_calls(), blocking = sim_blocking_calls();
    for (uint64_t i = 0; i < 50; i++) {
        void *p = get_used(pool, MIB(8), s, i);
        look(s, p, MIB(8), i);
        OK(galloc_free(p, s));
    }
    EXPECT_EQ(sim_pending(), 100);
    EXPECT_EQ(event_calls(), events);
    EXPECT_EQ(memory_calls(), memory);
    EXPECT_EQ(sim_blocking_calls(), blocking);
    pool_end(pool);
    finish();
}

TEST(own_memory_is_reused_at_once_beside_other_streams)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = tight_pool(MIB(16), 0);
    void *other = get_used(pool, MIB(8), t, 1);
    for (uint64_t i = 0; i < 50; i++) {
        void *p = get_used(pool, MIB(8), s, i);
        OK(galloc_free(p, s));
    }
    galloc_stats stats = stats_of(pool);
    EXPECT_EQ(stats.waits, 0);
    EXPECT_EQ(sim_blocking_calls(), 0);
    OK(galloc_free(other, t));
    pool_end(pool);
    finish();
}

TEST(one_stream_records_nothing)
{
    begin();
    dice d = {test_seed()};
    cudaStream_t s = stream_new();
    galloc_pool *pool = roomy_pool();
    void *p[32] = {NULL};
    for (int i = 0; i < 1000; i++) {
        uint32_t k = roll_below(&d, 32);
        if (p[k]) OK(galloc_free(p[k], s));
        p[k] = get_used(pool, roll_bytes(&d, MIB(32)), s, k);
    }
    for (int k = 0; k < 32; k++) OK(galloc_free(p[k], s));
    EXPECT_EQ(event_calls(), 0);
    EXPECT_EQ(stats_of(pool).marks, 0);
    pool_end(pool);
    finish();
}

/* ---- rules 2, 3 and 4: other streams ----------------------------------------------------------------------------- */

/* With more than 1024 streams each free has an event of its own, so that streams which were abandoned are forgotten. */
TEST(no_more_than_1024_abandoned_streams_are_kept)
{
    begin_with_devices(1, SIM_PACE_PROMPT);
    galloc_pool *pool = pool_new(NULL);
    int known = 0, most = 0;
    for (int i = 0; i < 1099; i++) {
        cudaStream_t s = stream_new();
        OK(galloc_free(get(pool, 4096, s), s));
        stream_end(s);
        OK(galloc_pool_streams(pool, NULL, 0, &known));
        if (known > most) most = known;
    }
    EXPECT(most >= 1024 && most <= 1024 + 64);
    pool_end(pool);
    finish();
}

TEST(completed_memory_is_reused_by_polling)
{
    for (int reuse = COMPLETED; reuse <= (COMPLETED | FOLLOWED | WAIT); reuse += 2) {
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = tight_pool(MIB(16), reuse);
        void *p = get_used(pool, MIB(12), s, 1);
        come_into_play(pool, t);
        OK(galloc_free(p, s));
        sim_run(-1);
        long blocking = sim_blocking_calls(), memory = memory_calls();
        void *q = get_used(pool, MIB(12), t, 2);
        EXPECT_EQ(sim_blocking_calls(), blocking);
        EXPECT_EQ(memory_calls(), memory);
        EXPECT_EQ(stats_of(pool).waits, 0);
        OK(galloc_free(q, t));
        pool_end(pool);
        finish();
    }
}

TEST(pending_memory_is_waited_for_under_pressure)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = tight_pool(MIB(16), COMPLETED | FOLLOWED | WAIT);
    void *p = get_used(pool, MIB(12), s, 1);
    come_into_play(pool, t);
    OK(galloc_free(p, s));
    void *q = get_used(pool, MIB(12), t, 2);
    EXPECT_EQ(stats_of(pool).waits, 1);
    EXPECT_EQ(sim_blocking_calls(), 0);
    EXPECT_EQ(sim_pending() > 0, 1);
    OK(galloc_free(q, t));
    pool_end(pool);
    finish();
}

TEST(without_pressure_nobody_waits)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = roomy_pool();
    void *p = get_used(pool, MIB(12), s, 1);
    come_into_play(pool, t);
    OK(galloc_free(p, s));
    void *q = get_used(pool, MIB(12), t, 2);
    EXPECT(q != p);
    EXPECT_EQ(stats_of(pool).waits, 0);
    EXPECT_EQ(sim_blocking_calls(), 0);
    OK(galloc_free(q, t));
    pool_end(pool);
    finish();
}

/* Where waits between streams are forbidden the host waits instead, and only then. */
TEST(forbidden_waits_are_not_queued)
{
    for (int reuse = 0; reuse < WAIT; reuse++) {
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = tight_pool(MIB(16), reuse);
        void *p = get_used(pool, MIB(12), s, 1);
        come_into_play(pool, t);
        OK(galloc_free(p, s));
        void *q = get_used(pool, MIB(12), t, 2);
        EXPECT_EQ(stats_of(pool).waits, 0);
        EXPECT_EQ(sim_calls("cuStreamWaitEvent"), 0);
        EXPECT(sim_blocking_calls() > 0);
        EXPECT(sim_physical_peak(0) <= MIB(16));
        OK(galloc_free(q, t));
        pool_end(pool);
        finish();
    }
}

/* A wait for a later point of S covers what S freed before it, if reuse:followed is on. */
TEST(what_a_stream_waited_for_it_need_not_wait_for_again)
{
    for (int followed = 0; followed < 2; followed++) {
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = tight_pool(MIB(16), followed ? FOLLOWED | WAIT : WAIT);
        void *small = get_used(pool, MIB(4), s, 1), *wall = get(pool, 512, s), *large = get_used(pool, MIB(8), s, 2);
        void *rest = get(pool, MIB(3), s);
        come_into_play(pool, t);
        OK(galloc_free(small, s));
        OK(galloc_free(large, s));
        void *p = get_used(pool, MIB(8), t, 3);
        EXPECT(p == large);
        EXPECT_EQ(stats_of(pool).waits, 1);
        void *q = get_used(pool, MIB(4), t, 4);
        EXPECT(q == small);
        EXPECT_EQ(stats_of(pool).waits, followed ? 1 : 2);
        EXPECT_EQ(sim_blocking_calls(), 0);
        OK(galloc_free(p, t));
        OK(galloc_free(q, t));
        OK(galloc_free(wall, s));
        OK(galloc_free(rest, s));
        pool_end(pool);
        finish();
    }
}

/* A wait for an earlier point does not cover what S freed after it. */
TEST(a_wait_covers_only_what_lies_before_it)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = tight_pool(MIB(16), FOLLOWED | WAIT);
    void *first = get_used(pool, MIB(8), s, 1), *wall = get(pool, 512, s), *second = get_used(pool, MIB(4), s, 2);
    void *rest = get(pool, MIB(3), s);
    come_into_play(pool, t);
    OK(galloc_free(first, s));
    void *p = get_used(pool, MIB(8), t, 3);
    EXPECT(p == first);
    put(s, second, MIB(4), 5); /* more work, after the point that T waits for */
    OK(galloc_free(second, s));
    void *q = get_used(pool, MIB(4), t, 4);
    EXPECT(q == second);
    EXPECT_EQ(stats_of(pool).waits, 2);
    OK(galloc_free(p, t));
    OK(galloc_free(q, t));
    OK(galloc_free(wall, s));
    OK(galloc_free(rest, s));
    pool_end(pool);
    finish();
}

/* Small blocks get no mark of their own; memory that runs out finds them all the same. */
TEST(the_unmarked_rest_is_found_when_memory_runs_out)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = tight_pool(MIB(2), COMPLETED);
    void *p = get_used(pool, MIB(2) - KIB(4), s, 1);
    come_into_play(pool, t);
    OK(galloc_free(p, s));
    long memory = memory_calls();
    void *q = get_used(pool, MIB(2) - KIB(4), t, 2);
    EXPECT_EQ(memory_calls(), memory);
    OK(galloc_free(q, t));
    pool_end(pool);
    finish();
}

TEST(few_events_are_recorded_for_many_small_blocks)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_new(NULL);
    come_into_play(pool, t);
    for (int i = 0; i < 4096; i++) OK(galloc_free(get_used(pool, KIB(4), s, 1), s)); /* 16 MiB in all */
    EXPECT(sim_calls("cuEventRecord") <= 16);
    pool_end(pool);
    finish();
}

/* Streams of which nothing is live after each free record no event for each. */
TEST(few_events_are_recorded_for_pairs_without_a_cache)
{
    enum { PAIRS = 4096 };
    begin();
    cudaStream_t s[2] = {stream_new(), stream_new()};
    galloc_config config = galloc_config_default();
    config.lane_bytes = 0;
    galloc_pool *pool = pool_new(&config);
    for (int i = 0; i < PAIRS; i++) OK(galloc_free(get_used(pool, 512, s[i % 2], 1), s[i % 2])); /* 2 MiB in all */
    EXPECT(sim_calls("cuEventRecord") <= 16);
    pool_end(pool);
    finish();
}

/* However far the device is behind, events do not pile up: the more of them wait, the more memory each stands for. */
TEST(a_device_far_behind_has_few_events)
{
    enum { FREES = 4096 };
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_new(NULL);
    come_into_play(pool, t);
    for (int i = 0; i < FREES; i++) OK(galloc_free(get_used(pool, MIB(2), s, 1), s));
    EXPECT(sim_calls("cuEventRecord") < FREES / 4);
    pool_end(pool);
    finish();
}

/* The same where each event stands for a number of small blocks after which nothing is live. */
TEST(a_device_far_behind_has_few_events_for_small_blocks)
{
    enum { TIMES = 512, BLOCKS = 66 };
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *p[BLOCKS];
    come_into_play(pool, t);
    put(s, NULL, 0, 0);
    for (int time = 0; time < TIMES; time++) {
        for (int i = 0; i < BLOCKS; i++) p[i] = get(pool, 512, s);
        for (int i = 0; i < BLOCKS; i++) OK(galloc_free(p[i], s));
        if (time == 100) EXPECT(sim_calls("cuEventRecord") >= 100);
    }
    EXPECT(sim_calls("cuEventRecord") < TIMES * 3 / 4);
    pool_end(pool);
    finish();
}

/* Once nothing is live, each stream records what it has freed at its next call, however little that is. */
TEST(streams_record_at_their_next_call_once_nothing_is_live)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_config config = galloc_config_default();
    config.stats_exact = 1;
    galloc_pool *pool = pool_new(&config);
    void *p = get_used(pool, KIB(64), s, 1), *q = get_used(pool, KIB(64), t, 2);
    OK(galloc_free(p, s));
    EXPECT_EQ(sim_calls("cuEventRecord"), 0);
    OK(galloc_free(q, t));
    EXPECT_EQ(sim_calls("cuEventRecord"), 1);
    p = get(pool, 512, s);
    EXPECT_EQ(sim_calls("cuEventRecord"), 2);
    OK(galloc_free(p, s));
    pool_end(pool);
    finish();
}

/* What an event was to stand for is still without one when the driver refuses it: all counts for the next event. */
TEST(frees_before_a_refused_event_are_still_unmarked)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_config config = galloc_config_default();
    config.stats_exact = 1;
    galloc_pool *pool = pool_new(&config);
    void *other = get(pool, 512, t), *p = get_used(pool, MIB(1), s, 1), *live = get(pool, 512, s);
    OK(galloc_free(p, s));
    EXPECT_EQ(inside_stream_of(pool, stream_id(s)).unmarked, MIB(1));
    inside_ask_for_event(pool, stream_id(s));
    sim_fail("cuEventRecord", 1, 0, 0);
    p = get(pool, 512, s);
    EXPECT_EQ(sim_failed(), 1);
    EXPECT_EQ(inside_stream_of(pool, stream_id(s)).unmarked, MIB(1));
    OK(galloc_free(p, s));
    EXPECT_EQ(sim_calls("cuEventRecord"), 2); /* this call tries again */
    EXPECT(inside_stream_of(pool, stream_id(s)).unmarked <= 512);
    OK(galloc_free(live, s));
    OK(galloc_free(other, t));
    pool_end(pool);
    finish();
}

/* A stream that has freed many blocks and holds none any more records an event, though others hold some: also where no
   stream cache serves the frees. */
TEST(a_stream_that_freed_many_blocks_by_full_calls_has_an_event)
{
    enum { BLOCKS = 100 };
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = roomy_pool();
    void *blocks[BLOCKS], *live = get(pool, 512, t);
    for (int i = 0; i < BLOCKS; i++) blocks[i] = get(pool, 512, s);
    for (int i = 0; i < BLOCKS; i++) {
        EXPECT_EQ(sim_calls("cuEventRecord"), 0);
        OK(galloc_free_after(blocks[i], &s, 1));
    }
    EXPECT_EQ(sim_calls("cuEventRecord"), 1);
    OK(galloc_free(live, t));
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* Where no stream has a cache, a stream that has freed many blocks and holds none has an event that others can use. */
TEST(many_small_frees_without_a_cache_have_an_event)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_config config = config_limit(MIB(2));
    config.lane_bytes = 0;
    config.wait_limit_ms = 0;
    galloc_pool *pool = pool_new(&config);
    void *other = get(pool, 512, t), *live = get_used(pool, 1000, s, 1);
    for (int i = 0; i < 100; i++) OK(galloc_free(get_used(pool, 1000, s, 1), s));
    OK(galloc_free(live, s));
    sim_run(-1);
    OK(galloc_free(get(pool, MIB(2) - 512, t), t));
    OK(galloc_free(other, t));
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* Neither the record nor a wait for it can break a capture, so the thread's mode of capture stays as it is. */
TEST(an_event_exchanges_no_mode_of_capture)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_config config = config_limit(MIB(4));
    galloc_pool *pool = pool_new(&config);
    come_into_play(pool, t);
    void *p = get_used(pool, MIB(4), s, 1);
    long exchanges = sim_calls("cuThreadExchangeStreamCaptureMode");
    OK(galloc_free(p, s));
    EXPECT_EQ(sim_calls("cuEventRecord"), 1);
    EXPECT_EQ(sim_calls("cuThreadExchangeStreamCaptureMode"), exchanges);
    long records = sim_calls("cuEventRecord");
    p = get(pool, MIB(4), t);
    EXPECT(p != NULL);
    EXPECT_EQ(sim_calls("cuStreamWaitEvent"), 1);
    EXPECT_EQ(sim_calls("cuEventRecord"), records);
    OK(galloc_free(p, t));
    sim_run(-1);
    pool_end(pool);
    finish();
}

/* A program on two streams: S allocates and frees, again and again, then T has one block of what S gave back, which S
   frees when T has done with it. */
enum { PAIRS = 40 };

static void pairs_of(galloc_pool *pool, cudaStream_t s, int pairs)
{
    for (int i = 0; i < pairs; i++) OK(galloc_free(get_used(pool, MIB(5), s, 1), s));
}

static void turn_of(galloc_pool *pool, cudaStream_t s, cudaStream_t t, int pairs)
{
    pairs_of(pool, s, pairs);
    void *p = get_used(pool, MIB(5), t, 2);
    order(t, s);
    OK(galloc_free(p, s));
}

/* Something else is held all the time. */
static galloc_pool *pool_of_turns(cudaStream_t s, cudaStream_t t, size_t beside, void **wall)
{
    galloc_config config = galloc_config_default();
    config.growth = MIB(2); /* nothing is left over */
    galloc_pool *pool = pool_new(&config);
    come_into_play(pool, t);
    *wall = get(pool, beside, s);
    return pool;
}

TEST(marks_that_are_of_no_use_are_left_out)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    void *wall;
    galloc_pool *pool = pool_of_turns(s, t, GIB(1), &wall);
    for (int i = 0; i < 8; i++) turn_of(pool, s, t, PAIRS);
    long events = sim_calls("cuEventRecord"), memory = memory_calls();
    EXPECT(events > 3 * PAIRS);
    for (int i = 0; i < 8; i++) turn_of(pool, s, t, PAIRS);
    EXPECT(sim_calls("cuEventRecord") - events <= 8 * 4);
    EXPECT_EQ(memory_calls(), memory); /* T gets what it got before */
    events = sim_calls("cuEventRecord");
    for (int i = 0; i < 3; i++) turn_of(pool, s, t, PAIRS - 7); /* not what was expected */
    EXPECT(sim_calls("cuEventRecord") - events > PAIRS);
    expect_healthy(pool, 1);
    OK(galloc_free(wall, s));
    pool_end(pool);
    finish();
}

/* S runs ahead of the device, and in each turn T is made to wait for one event of S. That event is recorded again in
   the next turn, although at the end of this one it is found complete together with later ones. */
TEST(marks_that_were_waited_for_are_not_left_out)
{
    enum { TURNS = 40, LEARNT = 15 };
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_config config = config_limit(MIB(1000)); /* 250 MiB may be left out */
    config.growth = MIB(2);
    galloc_pool *pool = pool_new(&config);
    come_into_play(pool, t);
    void *wall = get(pool, MIB(900), s);
    long blocking = 0, waits = 0, events = 0;
    for (int i = 0; i < TURNS; i++) {
        if (i == LEARNT) {
            blocking = sim_blocking_calls();
            waits = sim_calls("cuStreamWaitEvent");
            events = sim_calls("cuEventRecord");
        }
        for (size_t k = 0; k < 20; k++) OK(galloc_free(get_used(pool, MIB(3) + 512 * k, s, 1), s));
        OK(galloc_free(get_used(pool, MIB(90), s, 1), s));
        void *p = get_used(pool, MIB(85), t, 2);
        order(t, s);
        OK(galloc_free(p, s));
        for (size_t k = 0; k < 20; k++) OK(galloc_free(get_used(pool, MIB(5) + 512 * k, s, 1), s));
        sim_run(-1);
        OK(galloc_pool_trim(pool, SIZE_MAX, NULL)); /* looks how far both are */
    }
    EXPECT_EQ(sim_blocking_calls(), blocking);
    EXPECT_EQ(sim_calls("cuStreamWaitEvent") - waits, TURNS - LEARNT);
    EXPECT(sim_calls("cuEventRecord") - events < 4 * (TURNS - LEARNT));
    OK(galloc_free(wall, s));
    pool_end(pool);
    finish();
}

/* However well the program is known, a stream that does not come again leaves no more than its share behind. */
TEST(what_is_left_out_is_bounded)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    void *wall;
    galloc_pool *pool = pool_of_turns(s, t, MIB(200), &wall);
    size_t most = 0;
    for (int i = 0; i < 16; i++) {
        for (int k = 0; k < PAIRS; k++) {
            pairs_of(pool, s, 1);
            galloc_stream_stats stats[2];
            OK(galloc_pool_streams(pool, stats, 2, NULL));
            most = stats[0].unmarked > most ? stats[0].unmarked : most;
            most = stats[1].unmarked > most ? stats[1].unmarked : most;
        }
        turn_of(pool, s, t, 0);
    }
    EXPECT(most > MIB(20));
    EXPECT(most <= stats_of(pool).reserved.current / 4);
    OK(galloc_free(wall, s));
    pool_end(pool);
    finish();
}

/* S frees much at the end of a step, T looks in the middle of the next one, when S has freed once more: what was freed
   at the end needs no marks of its own, until the program stops there. */
static void uneven_step(galloc_pool *pool, cudaStream_t s, cudaStream_t t)
{
    void *p[24];
    for (int i = 0; i < 24; i++) p[i] = get_used(pool, MIB(10), s, 1);
    OK(galloc_free(get_used(pool, MIB(6), s, 1), s));
    sim_run(-1);
    void *q = get_used(pool, MIB(5), t, 2);
    order(t, s);
    OK(galloc_free(q, s));
    for (int i = 0; i < 24; i++) OK(galloc_free(p[i], s));
}

/* So that 200 MiB of 600 may be left out. `limited`: with a wait_limit_ms. */
static galloc_pool *uneven_pool(cudaStream_t s, cudaStream_t t, void **wall, int limited)
{
    galloc_config config = config_limit(MIB(600));
    config.growth = MIB(2);
    if (limited) config.wait_limit_ms = 100;
    galloc_pool *pool = pool_new(&config);
    come_into_play(pool, t);
    *wall = get(pool, MIB(300), s);
    return pool;
}

static cudaError_t captured(galloc_pool *pool, size_t bytes, cudaStream_t s, cudaGraph_t *graph)
{
    void *p = NULL;
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    cudaError_t err = galloc_pool_malloc(pool, &p, bytes, s);
    if (err == cudaSuccess) OK(galloc_free(p, s));
    OK(cudaStreamEndCapture(s, graph));
    return err;
}

/* A capture cannot wait for the device, nor can who has a wait_limit_ms: what has no mark would be lost to them. */
TEST(where_nobody_may_wait_for_the_device_no_marks_are_left_out)
{
    for (int limited = 0; limited < 2; limited++) {
        begin();
        cudaStream_t s = stream_new(), t = stream_new(), u = stream_new();
        cudaGraph_t graph[2] = {NULL, NULL};
        void *wall, *p = NULL;
        galloc_pool *pool = uneven_pool(s, t, &wall, limited);
        if (!limited) OK(captured(pool, KIB(4), u, &graph[0]));
        for (int i = 0; i < 40; i++) uneven_step(pool, s, t);
        sim_run(-1);
        if (limited) {
            OK(galloc_pool_malloc(pool, &p, MIB(237), t));
            OK(galloc_free(p, t));
        } else {
            OK(captured(pool, MIB(237), u, &graph[1]));
        }
        EXPECT_EQ(sim_blocking_calls(), 0);
        for (int i = 0; i < 2; i++)
            if (graph[i]) OK(cudaGraphDestroy(graph[i]));
        expect_healthy(pool, 0);
        OK(galloc_free(wall, s));
        pool_end(pool);
        finish();
    }
}

/* In the first capture that is too late: but the next call on the stream makes up for what was left out, or the one
   behind it where the driver refuses the event. */
TEST(a_capture_asks_for_the_marks_that_were_left_out)
{
    for (int refused = 0; refused < 2; refused++) {
        begin();
        cudaStream_t s = stream_new(), t = stream_new(), u = stream_new();
        cudaGraph_t graph[2] = {NULL, NULL};
        void *wall, *p[2];
        galloc_pool *pool = uneven_pool(s, t, &wall, 0);
        for (int i = 0; i < 40; i++) uneven_step(pool, s, t);
        sim_run(-1);
        OK(captured(pool, KIB(4), u, &graph[0]));
        if (refused) sim_fail("cuEventRecord", 1, 0, cudaErrorMemoryAllocation);
        for (int i = 0; i < 2; i++) p[i] = get(pool, KIB(4), s);
        if (refused) EXPECT_EQ(sim_failed(), 1);
        sim_run(-1);
        OK(captured(pool, MIB(230), u, &graph[1]));
        for (int i = 0; i < 2; i++)
            if (graph[i]) OK(cudaGraphDestroy(graph[i]));
        expect_healthy(pool, 0);
        for (int i = 0; i < 2; i++) OK(galloc_free(p[i], s));
        OK(galloc_free(wall, s));
        pool_end(pool);
        finish();
    }
}

TEST(free_on_another_stream_than_malloc)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new(), u = stream_new();
    galloc_pool *pool = tight_pool(MIB(8), COMPLETED | FOLLOWED | WAIT);
    for (uint64_t i = 0; i < 10; i++) {
        void *p = get_used(pool, MIB(8), s, i);
        order(s, t);
        look(t, p, MIB(8), i);
        OK(galloc_free(p, t)); /* the work of T is what the next one must come after */
        p = get_used(pool, MIB(8), i % 2 ? t : u, 100 + i);
        OK(galloc_free(p, i % 2 ? t : u));
    }
    pool_end(pool);
    finish();
}

TEST(free_after_waits_for_every_stream)
{
    for (int reuse = 0; reuse <= (COMPLETED | FOLLOWED | WAIT); reuse++) {
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new(), u = stream_new();
        galloc_pool *pool = tight_pool(MIB(8), reuse);
        void *p = get_used(pool, MIB(8), s, 1);
        order(s, t);
        order(s, u);
        look(t, p, MIB(8), 1);
        look(u, p, MIB(8), 1);
        cudaStream_t both[3] = {t, u, t};
        OK(galloc_free_after(p, both, 3));
        void *q = get_used(pool, MIB(8), s, 2);
        OK(galloc_free(q, s));
        pool_end(pool);
        finish();
    }
}

/* The bytes of a free_after count once for each of its streams, also if the program names one several times. */
TEST(free_after_counts_each_stream_once)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    cudaStream_t all[] = {s, t, s, s, t};
    galloc_pool *pool = pool_new(NULL);
    galloc_stream_stats of[2];
    void *p = get(pool, 1000448, s), *keep = get(pool, 1000, t);
    int n = 0;
    OK(galloc_free_after(p, all, 5));
    OK(galloc_pool_streams(pool, of, 2, &n));
    EXPECT_EQ(n, 2);
    for (int i = 0; i < 2; i++) EXPECT_EQ(of[i].unmarked, 1000448);
    EXPECT_EQ(galloc_pool_check(pool), 0);
    OK(galloc_free(keep, t));
    pool_end(pool);
    stream_end(s), stream_end(t);
    finish();
}

/* The two streams of a free_after are in no order to each other: neither has the memory before the other is done. */
TEST(free_after_gives_nobody_a_head_start)
{
    for (int taker = 0; taker < 3; taker++) {
        begin_still();
        cudaStream_t s[3] = {stream_new(), stream_new(), stream_new()};
        galloc_pool *pool = roomy_pool();
        void *p = get_used(pool, MIB(8), s[0], 1);
        order(s[0], s[1]);
        look(s[1], p, MIB(8), 1);
        look(s[0], p, MIB(8), 1);
        OK(galloc_free_after(p, s, 2));
        void *q = get_used(pool, MIB(8), s[taker], 2);
        EXPECT(q != p);
        OK(galloc_free(q, s[taker]));
        sim_run(-1);
        for (int i = 0; i < 2; i++) { /* done: both pieces are there for anybody */
            long memory = memory_calls();
            OK(galloc_free(get_used(pool, MIB(8), s[i], 3), s[i]));
            EXPECT_EQ(memory_calls(), memory);
        }
        pool_end(pool);
        finish();
    }
}

/* What was freed when a mark could not be recorded is marked by the stream's next call, however little it frees. */
TEST(a_mark_that_fails_is_made_by_the_next_call)
{
    sim_options options = sim_defaults();
    options.pace = SIM_PACE_PROMPT;
    begin_with(options);
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_config config = config_limit(MIB(8));
    config.wait_limit_ms = 0; /* what has no mark cannot be had */
    galloc_pool *pool = pool_new(&config);
    come_into_play(pool, t);
    void *p = get_used(pool, MIB(4), s, 1);
    sim_fail("cuEventRecord", 1, 0, 0);
    OK(galloc_free(p, s));
    EXPECT_EQ(sim_failed(), 1);
    sim_fail_clear();
    void *q = get(pool, 1000, s);
    p = get_used(pool, MIB(5), t, 2);
    OK(galloc_free(p, t));
    OK(galloc_free(q, s));
    pool_end(pool);
    finish();
}

/* ---- rule 5: marks belong to bytes ------------------------------------------------------------------------------- */

/* [A freed on S, pending][B freed on T] are neighbours: T asks for what fits into B and waits for nothing; T asks for
   all of it and honours the mark of A. */
TEST(a_request_honours_the_marks_of_its_own_bytes_only)
{
    for (int swap = 0; swap < 2; swap++) {
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = tight_pool(MIB(16), COMPLETED | FOLLOWED | WAIT);
        void *a = get_used(pool, MIB(8), swap ? t : s, 1), *b = get_used(pool, MIB(8), swap ? s : t, 2);
        OK(galloc_free(a, swap ? t : s));
        OK(galloc_free(b, swap ? s : t));
        void *own = swap ? a : b;
        void *p = get_used(pool, MIB(8), t, 3);
        EXPECT(p == own);
        EXPECT_EQ(stats_of(pool).waits, 0);
        OK(galloc_free(p, t));
        void *q = get_used(pool, MIB(16), t, 4);
        EXPECT_EQ(stats_of(pool).waits, 1);
        EXPECT_EQ(sim_blocking_calls(), 0);
        OK(galloc_free(q, t));
        pool_end(pool);
        finish();
    }
}

/* T may still use the high end of a free block. A long-lived block of S, which is to be at the end, goes below that. */
TEST(a_long_lived_block_goes_below_what_another_stream_may_use)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new(), both[2] = {t, s};
    galloc_config config = galloc_config_default();
    config.growth = MIB(64);
    config.reuse = COMPLETED;
    galloc_pool *pool = pool_new(&config);
    galloc_request request = {0};
    void *a = get_used(pool, MIB(40), s, 1), *b = get(pool, MIB(20), s), *far = NULL;
    put(t, b, MIB(20), 2);
    OK(galloc_free_after(b, both, 2));
    OK(galloc_free(a, s));
    void *other = get(pool, MIB(2), t);
    size_t held = stats_of(pool).reserved.current;
    request.bytes = MIB(30);
    request.stream = s;
    request.pool = pool;
    request.lifetime = GALLOC_LIFETIME_LONG;
    OK(galloc_alloc(&far, &request));
    put(s, far, MIB(30), 3);
    EXPECT_EQ(stats_of(pool).reserved.current, held);
    OK(galloc_free(far, s));
    OK(galloc_free(other, t));
    sim_run(-1);
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* What S freed has merged with bytes that nobody used: those are anybody's at once, from either side. */
TEST(unused_bytes_beside_a_mark_are_free_for_all)
{
    for (int far = 0; far < 2; far++) {
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = tight_pool_that_merges(MIB(16), COMPLETED | FOLLOWED | WAIT);
        galloc_request request = {0};
        void *p = NULL;
        request.bytes = MIB(8);
        request.stream = s;
        request.pool = pool;
        request.lifetime = far ? GALLOC_LIFETIME_LONG : GALLOC_LIFETIME_ANY;
        OK(galloc_alloc(&p, &request));
        put(s, p, MIB(8), 1);
        OK(galloc_free(p, s));
        long memory = memory_calls();
        void *q = get_used(pool, MIB(8), t, 2);
        EXPECT(q != p);
        EXPECT_EQ(memory_calls(), memory);
        EXPECT_EQ(stats_of(pool).waits, 0);
        EXPECT_EQ(sim_blocking_calls(), 0);
        OK(galloc_free(q, t));
        pool_end(pool);
        finish();
    }
}

/* So are those between two blocks that one stream freed, one soon after the other. */
TEST(a_gap_between_two_frees_is_free_for_all)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = tight_pool_that_merges(MIB(6), COMPLETED);
    galloc_request request = {0};
    char *a = get_used(pool, MIB(1), s, 1), *b = NULL, *rest = NULL;
    request.bytes = MIB(1);
    request.alignment = MIB(4); /* there is a gap before it, of 1 MiB at least */
    request.stream = s;
    request.pool = pool;
    OK(galloc_alloc((void **)&b, &request));
    put(s, b, MIB(1), 2);
    size_t gap = (size_t)(b - a) - MIB(1), behind = MIB(6) - (size_t)(b - a) - MIB(1);
    EXPECT(gap >= MIB(1) && gap <= MIB(3));
    if (behind) rest = get(pool, behind, s);
    if (behind) EXPECT(rest == b + MIB(1));
    OK(galloc_free(a, s));
    OK(galloc_free(b, s));
    long memory = memory_calls();
    char *p = get_used(pool, gap, t, 3);
    EXPECT(p == a + MIB(1));
    EXPECT_EQ(memory_calls(), memory);
    EXPECT_EQ(sim_blocking_calls(), 0);
    OK(galloc_free(p, t));
    if (rest) OK(galloc_free(rest, s));
    pool_end(pool);
    finish();
}

/* Many frees that merge, each after an event of its own, do not leave a mark each: others would look at all of them. */
TEST(a_block_of_many_frees_has_few_marks)
{
    enum { FREES = 64 };
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *p[FREES];
    come_into_play(pool, t);
    OK(galloc_pool_reserve(pool, MIB(2) * FREES));
    for (int i = 0; i < FREES; i++) p[i] = get_used(pool, MIB(2), s, 1);
    void *wall = get(pool, 512, t);
    for (int i = 0; i < FREES; i++) OK(galloc_free(p[i], s));
    EXPECT(stats_of(pool).marks >= FREES / 2);
    EXPECT(inside_most_marks(pool) <= 16);
    OK(galloc_free(wall, t));
    pool_end(pool);
    finish();
}

/* What two streams have finished with is found behind much that is not finished, and merges with its neighbours. */
TEST(finished_memory_behind_unfinished_memory_is_found)
{
    enum { OTHERS = 12 };
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new(), u = stream_new(), late[2] = {stream_new(), stream_new()};
    galloc_config config = config_limit(MIB(16));
    config.reuse = COMPLETED;
    config.stats_exact = 1;
    config.wait_limit_ms = 0;
    galloc_pool *pool = pool_new(&config);
    char *other[OTHERS], *wall[OTHERS], *own, *both, *end;
    OK(galloc_pool_reserve(pool, MIB(16)));
    for (int i = 0; i < 2; i++) sim_hold(late[i], 1);
    for (int i = 0; i < OTHERS; i++) {
        other[i] = get(pool, KIB(512), s);
        wall[i] = get(pool, KIB(512), s);
        put(late[0], other[i], KIB(512), 1);
    }
    both = get(pool, MIB(1), s);
    own = get(pool, MIB(1), u);
    end = get(pool, MIB(2), s);
    EXPECT(own == both + MIB(1) && end == own + MIB(1));
    for (int i = 0; i < OTHERS; i++) OK(galloc_free_after(other[i], late, 2));
    put(s, both, MIB(1), 3);
    order(s, t);
    put(t, both, MIB(1), 4);
    cudaStream_t users[2] = {s, t};
    OK(galloc_free_after(both, users, 2));
    OK(galloc_stream_retire(s));
    OK(galloc_stream_retire(t));
    OK(galloc_free(own, u));
    sim_run(-1);
    void *p = get(pool, MIB(2), u);
    EXPECT(p == both);
    if (p) OK(galloc_free(p, u));
    for (int i = 0; i < 2; i++) sim_hold(late[i], 0);
    for (int i = 0; i < OTHERS; i++) OK(galloc_free(wall[i], u));
    OK(galloc_free(end, u));
    pool_end(pool);
    finish();
}

TEST(a_split_keeps_the_mark_on_both_parts)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new(), u = stream_new();
    galloc_pool *pool = tight_pool(MIB(16), COMPLETED | FOLLOWED | WAIT);
    come_into_play(pool, t);
    OK(galloc_free(get_used(pool, MIB(16), s, 1), s));
    void *p = get_used(pool, MIB(6), t, 2), *q = get_used(pool, MIB(6), u, 3), *r = get_used(pool, MIB(4), u, 4);
    EXPECT_EQ(stats_of(pool).waits, 2); /* of T and of U, once each */
    OK(galloc_free(p, t));
    OK(galloc_free(q, u));
    OK(galloc_free(r, u));
    pool_end(pool);
    finish();
}

/* Each of many neighbours is freed on a stream of its own; whoever takes it all comes after all of them. */
TEST(a_merge_keeps_every_mark)
{
    enum { N = 7 };
    for (int seed = 1; seed <= 12; seed++) {
        sim_options options = sim_defaults();
        options.seed = (uint64_t)seed;
        options.pace = seed % 3 - 1;
        begin_with(options);
        dice d = {(uint64_t)seed};
        galloc_pool *pool = tight_pool(MIB(4) * N, COMPLETED | FOLLOWED | WAIT);
        cudaStream_t s[N], taker = stream_new();
        void *p[N];
        for (int i = 0; i < N; i++) {
            s[i] = stream_new();
            p[i] = get_used(pool, MIB(4), s[i], (uint64_t)i);
        }
        for (uint32_t left = N; left > 0; left--) {
            uint32_t k = roll_below(&d, left);
            OK(galloc_free(p[k], s[k]));
            p[k] = p[left - 1];
            s[k] = s[left - 1];
        }
        EXPECT_EQ(galloc_pool_check(pool), 0);
        void *q = get_used(pool, MIB(4) * N, taker, 99);
        OK(galloc_free(q, taker));
        pool_end(pool);
        finish();
    }
}

/* Memory is short, and runs of free blocks of two streams may be had with a wait on the device: each run is merged at
   once, in whatever order its blocks were freed. The bytes of t are the more, so the blocks of s are looked at. */
TEST(neighbours_of_two_streams_merge_in_whatever_order_they_were_freed)
{
    enum { RUNS = 6, UP, DOWN, UP_BUT_LATE_FIRST };
    for (int order = UP; order <= UP_BUT_LATE_FIRST; order++) {
        for (int last = 0; last < RUNS; last += RUNS - 1) { /* the run that is long enough */
            begin_still();
            cudaStream_t s = stream_new(), t = stream_new(), u = stream_new();
            galloc_config config = config_limit(MIB(64));
            config.expandable_segments = 0; /* no pages move */
            galloc_pool *pool = pool_new(&config);
            char *low[RUNS], *middle[RUNS], *high[RUNS], *behind[RUNS], *p;
            OK(galloc_pool_reserve(pool, MIB(64)));
            for (int i = 0; i < RUNS; i++) {
                low[i] = get_used(pool, MIB(2), s, 1);
                middle[i] = get_used(pool, i == last ? MIB(8) : MIB(4), t, 1);
                high[i] = get_used(pool, MIB(2), s, 1);
                behind[i] = get(pool, MIB(2), u);
                EXPECT(middle[i] == low[i] + MIB(2) && behind[i] == high[i] + MIB(2));
            }
            for (int i = 0; i < RUNS; i++) OK(galloc_free(middle[i], t));
            for (int i = 0; i < RUNS; i++) {
                int k = order == DOWN ? RUNS - 1 - i : i;
                OK(galloc_free(order == UP ? low[k] : high[k], s));
                OK(galloc_free(order == UP ? high[k] : low[k], s));
            }
            p = get_used(pool, MIB(12), u, 2);
            EXPECT(p == low[last]);
            EXPECT_EQ(sim_blocking_calls(), 0);
            EXPECT_EQ(galloc_pool_check(pool), 0);
            OK(galloc_free(p, u));
            for (int i = 0; i < RUNS; i++) OK(galloc_free(behind[i], u));
            pool_end(pool);
            finish();
        }
    }
}

/* T takes by a wait what S freed; U takes it from T. The work of S lies before U only by way of T. */
TEST(a_third_stream_honours_what_was_handed_on)
{
    for (int use = 0; use < 2; use++) {
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new(), u = stream_new();
        galloc_pool *pool = tight_pool(MIB(8), COMPLETED | FOLLOWED | WAIT);
        come_into_play(pool, t);
        come_into_play(pool, u);
        OK(galloc_free(get_used(pool, MIB(8), s, 1), s));
        void *p = get(pool, MIB(8), t);
        if (use) put(t, p, MIB(8), 2);
        OK(galloc_free(p, t));
        p = get_used(pool, MIB(8), u, 3);
        OK(galloc_free(p, u));
        p = get_used(pool, MIB(8), s, 4);
        OK(galloc_free(p, s));
        pool_end(pool);
        finish();
    }
}

/* A program that gets memory on T and gives it back on U without a use of its own owes U no order after T. galloc does:
   what the bytes were waiting for is still to come. */
TEST(memory_that_was_not_used_may_be_freed_on_any_stream)
{
    for (int way = 0; way < 4; way++) { /* got by a wait for S, and by S itself; all of it, and a part */
        int same = way % 2;
        size_t bytes = way < 2 ? MIB(8) : MIB(4);
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new(), u = stream_new();
        galloc_pool *pool = tight_pool(MIB(10), COMPLETED | FOLLOWED | WAIT);
        void *live = get(pool, MIB(2), t); /* or else all pages would be parked */
        come_into_play(pool, t);
        come_into_play(pool, u);
        OK(galloc_free(get_used(pool, MIB(8), s, 1), s));
        void *p = get(pool, bytes, same ? s : t);
        OK(galloc_free(p, u));
        p = get_used(pool, bytes, u, 2);
        OK(galloc_free(p, u));
        OK(galloc_free(live, t));
        pool_end(pool);
        finish();
    }
}

/* A block of S's went to T's cache unused, T used it, and has it again. S, which frees it, does not get it before T's
   work is done. */
TEST(what_another_cache_served_is_not_its_first_streams)
{
    begin_still();
    galloc_pool *pool = pool_new(NULL);
    cudaStream_t s = stream_new(), t = stream_new();
    void *own = get(pool, KIB(8), t), *p = get(pool, KIB(64), s), *again = NULL;
    OK(galloc_free(p, t));
    EXPECT(get(pool, KIB(64), t) == p);
    put(t, p, KIB(64), 1);
    OK(galloc_free(p, t));
    EXPECT(get(pool, KIB(64), t) == p);
    OK(galloc_free(p, s)); /* not used since */
    again = get_used(pool, KIB(64), s, 2);
    OK(galloc_free(again, s));
    OK(galloc_free(own, t));
    sim_run(-1);
    pool_end(pool);
    finish();
}

/* S got memory again that it had used until an event which is done by now. It uses it once more, gives it back, and
   has it again out of its cache. T, which frees it, does not get it before that work is done. */
TEST(what_a_cache_served_again_was_used_since)
{
    begin_still();
    galloc_pool *pool = pool_new(NULL);
    cudaStream_t s = stream_new(), t = stream_new();
    void *own = get(pool, KIB(8), t), *p, *again;
    OK(galloc_free(get_used(pool, KIB(64), s, 1), s));
    p = get(pool, KIB(80), s); /* the cache lacks that size, so this comes from the pool */
    OK(galloc_pool_trim(pool, 0, NULL)); /* waits for the device */
    put(s, p, KIB(80), 2);
    OK(galloc_free(p, s));
    EXPECT(get(pool, KIB(80), s) == p);
    OK(galloc_free(p, t)); /* not used since */
    again = get_used(pool, KIB(80), t, 3);
    OK(galloc_free(again, t));
    OK(galloc_free(own, t));
    sim_run(-1);
    pool_end(pool);
    finish();
}

/* S gets its own memory again, does nothing with it, and never comes back; another stream frees it. What S did before
   has an event: nobody need wait for the device to know that it is done. */
TEST(memory_that_a_stream_got_again_does_not_need_it_back)
{
    for (int part = 0; part < 2; part++) {
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new(), u = stream_new();
        galloc_pool *pool = tight_pool(MIB(10), COMPLETED);
        void *live = get(pool, MIB(2), t);
        come_into_play(pool, t);
        come_into_play(pool, u);
        OK(galloc_free(get_used(pool, MIB(8), s, 1), s));
        void *p = get(pool, part ? MIB(4) : MIB(8), s);
        OK(galloc_free(p, u));
        OK(cudaStreamSynchronize(s));
        OK(cudaStreamSynchronize(u));
        uint64_t waits = stats_of(pool).driver.host_free;
        p = get_used(pool, MIB(8), t, 2);
        EXPECT_EQ(stats_of(pool).driver.host_free, waits);
        OK(galloc_free(p, t));
        OK(galloc_free(live, t));
        pool_end(pool);
        finish();
    }
}

/* The same, but S is retired meanwhile: what it did before it got its memory again has an event from then on. */
TEST(memory_that_a_stream_got_again_has_an_event_when_it_is_gone)
{
    begin_still();
    cudaStream_t s = stream_new();
    galloc_pool *pool = tight_pool_that_merges(MIB(8), COMPLETED | FOLLOWED | WAIT); /* no cache keeps the block */
    OK(galloc_free(get_used(pool, MIB(8), s, 1), s));
    void *p = get(pool, MIB(8), s);
    OK(galloc_stream_retire(s));
    OK(cudaStreamSynchronize(s));
    OK(cudaStreamDestroy(s));
    cudaStream_t u = stream_new();
    OK(galloc_free(p, u));
    p = get_used(pool, MIB(8), u, 2);
    EXPECT_EQ(stats_of(pool).driver.host_free, 0);
    OK(galloc_free(p, u));
    pool_end(pool);
    finish();
}

/* What T took by a wait and kept a part of: the rest, once free again, still lies behind S and T. */
TEST(the_rest_of_a_handed_on_block_keeps_its_marks)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new(), u = stream_new();
    galloc_pool *pool = tight_pool(MIB(16), COMPLETED | FOLLOWED | WAIT);
    come_into_play(pool, t);
    come_into_play(pool, u);
    OK(galloc_free(get_used(pool, MIB(16), s, 1), s));
    void *p = get(pool, MIB(16), t);
    put(t, p, MIB(16), 2);
    OK(galloc_resize(p, MIB(4), t));
    void *q = get_used(pool, MIB(12), u, 3);
    OK(galloc_free(q, u));
    OK(galloc_free(p, t));
    pool_end(pool);
    finish();
}

TEST(a_block_grows_only_into_bytes_that_its_stream_may_have)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = tight_pool(MIB(8), COMPLETED | FOLLOWED | WAIT);
    char *p = get_used(pool, MIB(4), s, 1);
    void *q = get_used(pool, MIB(4), t, 2);
    OK(galloc_free(q, t));
    cudaError_t err = galloc_resize(p, MIB(8), s);
    if (err == cudaSuccess) put(s, p + MIB(4), MIB(4), 3);
    else EXPECT(err == cudaErrorMemoryAllocation || err == cudaErrorNotSupported);
    OK(galloc_free(p, s));
    pool_end(pool);
    finish();
}

/* ---- rule 6: record_stream --------------------------------------------------------------------------------------- */

TEST(recorded_work_keeps_memory_from_everybody)
{
    for (int taker = 0; taker < 3; taker++) {
        begin_still();
        cudaStream_t s[3] = {stream_new(), stream_new(), stream_new()};
        galloc_pool *pool = tight_pool(MIB(16), COMPLETED);
        void *p = get_used(pool, MIB(8), s[0], 1);
        order(s[0], s[1]);
        OK(galloc_record_stream(p, s[1]));
        look(s[1], p, MIB(8), 1);
        OK(galloc_free(p, s[0]));
        void *q = get_used(pool, MIB(8), s[taker], 2);
        EXPECT(q != p);
        sim_run(-1);
        long memory = memory_calls(), blocking = sim_blocking_calls();
        void *r = get_used(pool, MIB(8), s[taker], 3);
        EXPECT(r == p);
        EXPECT_EQ(memory_calls(), memory);
        EXPECT_EQ(sim_blocking_calls(), blocking);
        OK(galloc_free(q, s[taker]));
        OK(galloc_free(r, s[taker]));
        pool_end(pool);
        finish();
    }
}

/* Each of them is asked at the free: none makes another call. */
TEST(all_recorded_streams_are_marked_at_the_free)
{
    begin_still();
    cudaStream_t s[4] = {stream_new(), stream_new(), stream_new(), stream_new()};
    galloc_pool *pool = tight_pool(MIB(16), COMPLETED);
    void *p = get_used(pool, MIB(8), s[0], 1);
    for (int i = 1; i < 3; i++) {
        order(s[0], s[i]);
        OK(galloc_record_stream(p, s[i]));
        look(s[i], p, MIB(8), 1);
    }
    OK(galloc_free(p, s[0]));
    sim_run(-1);
    void *q = get_used(pool, MIB(8), s[3], 2), *r = get_used(pool, MIB(8), s[3], 3);
    EXPECT(q == p || r == p);
    EXPECT_EQ(sim_blocking_calls(), 0);
    OK(galloc_free(q, s[3]));
    OK(galloc_free(r, s[3]));
    pool_end(pool);
    finish();
}

/* Small blocks go through the same door. */
TEST(recorded_small_blocks_are_kept_too)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *p = get_used(pool, 4096, s, 1);
    order(s, t);
    OK(galloc_record_stream(p, t));
    OK(galloc_record_stream(p, t));
    OK(galloc_record_stream(p, s));
    look(t, p, 4096, 1);
    OK(galloc_free(p, s));
    for (int i = 0; i < 20; i++) OK(galloc_free(get_used(pool, 4096, s, 2), s));
    pool_end(pool);
    finish();
}

TEST(recorded_work_is_waited_for_under_pressure)
{
    for (int reuse = 0; reuse <= (COMPLETED | FOLLOWED | WAIT); reuse++) {
        for (int taker = 0; taker < 2; taker++) {
            begin_still();
            cudaStream_t s[2] = {stream_new(), stream_new()};
            galloc_pool *pool = tight_pool(MIB(8), reuse);
            void *p = get_used(pool, MIB(8), s[0], 1);
            order(s[0], s[1]);
            OK(galloc_record_stream(p, s[1]));
            look(s[1], p, MIB(8), 1);
            look(s[0], p, MIB(8), 1);
            OK(galloc_free(p, s[0]));
            p = get_used(pool, MIB(8), s[taker], 2);
            if (!(reuse & WAIT)) EXPECT_EQ(stats_of(pool).waits, 0);
            OK(galloc_free(p, s[taker]));
            pool_end(pool);
            finish();
        }
    }
}

TEST(a_recorded_stream_may_be_retired_and_destroyed)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = tight_pool(MIB(8), COMPLETED | FOLLOWED | WAIT);
    void *p = get_used(pool, MIB(8), s, 1);
    order(s, t);
    OK(galloc_record_stream(p, t));
    look(t, p, MIB(8), 1);
    OK(galloc_stream_retire(t));
    stream_end(t);
    OK(galloc_free(p, s));
    p = get_used(pool, MIB(8), s, 2);
    OK(galloc_free(p, s));
    pool_end(pool);
    finish();
}

/* A thread has called with a stream that the pool knew. The pool forgets the stream, and the thread calls again: the
   pool's context has not been reset. */
TEST(a_stream_that_was_forgotten_comes_back_in_the_same_context)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = tight_pool(MIB(8), COMPLETED | FOLLOWED | WAIT);
    void *held = get(pool, MIB(4), t);
    OK(galloc_record_stream(held, s)); /* the pool knows it now */
    OK(galloc_free(get(pool, MIB(2), s), s));
    OK(galloc_free(held, t));
    OK(galloc_stream_retire(s));
    sim_run(-1);
    held = get(pool, MIB(4), t);
    OK(galloc_pool_trim(pool, 0, NULL)); /* notices that the work is complete */
    EXPECT(!inside_stream_of(pool, stream_id(s)).known);
    OK(galloc_free(get(pool, MIB(2), s), s));
    EXPECT_EQ(info_of(held).state, GALLOC_STATE_USED);
    EXPECT(stats_of(pool).reserved.current >= MIB(4));
    OK(galloc_free(held, t));
    expect_healthy(pool, 1);
    pool_end(pool);
    finish();
}

/* What a block gives up when it shrinks is as much in use by the recorded stream as the rest. */
TEST(recorded_work_keeps_the_tail_of_a_shrunk_block)
{
    for (int reuse = 0; reuse <= (COMPLETED | FOLLOWED | WAIT); reuse++) {
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = tight_pool(MIB(8), reuse);
        void *p = get_used(pool, MIB(8), s, 1);
        order(s, t);
        OK(galloc_record_stream(p, t));
        look(t, p, MIB(8), 1);
        OK(galloc_resize(p, MIB(4), s));
        void *q = get_used(pool, MIB(4), s, 2);
        OK(galloc_free(p, s));
        p = get_used(pool, MIB(4), s, 3);
        OK(galloc_free(p, s));
        OK(galloc_free(q, s));
        pool_end(pool);
        finish();
    }
}

/* A stream that uses a block again and again is noted once. */
TEST(recording_a_stream_again_needs_nothing)
{
    begin();
    galloc_pool *pool = roomy_pool();
    cudaStream_t s = stream_new(), t = stream_new();
    void *p = get_used(pool, MIB(4), s, 1);
    OK(galloc_record_stream(p, t));
    size_t before = sim_malloc_live();
    for (int i = 0; i < 10000; i++) OK(galloc_record_stream(p, t));
    EXPECT_EQ(sim_malloc_live(), before);
    OK(galloc_free(p, s));
    pool_end(pool);
    finish();
}

/* ---- streams that die -------------------------------------------------------------------------------------------- */

/* A new stream has the handle of a dead one whose work still runs. */
TEST(a_recycled_handle_is_another_stream)
{
    static const size_t sizes[] = {4096, KIB(512), MIB(2) - KIB(8), MIB(8)};
    for (int i = 0; i < 4; i++) {
        for (int retire = 0; retire < 2; retire++) {
            begin_still();
            cudaStream_t keep = stream_new(), s = stream_new();
            galloc_pool *pool = pool_new(NULL);
            if (i % 2) come_into_play(pool, keep);
            void *p = get_used(pool, sizes[i], s, 1);
            unsigned long long id = stream_id(s);
            OK(galloc_free(p, s));
            if (retire) OK(galloc_stream_retire(s));
            stream_end(s);
            cudaStream_t again = stream_new();
            EXPECT(again == s && stream_id(again) != id);
            void *q = get_used(pool, sizes[i], again, 2);
            EXPECT_EQ(info_of(q).stream_id, stream_id(again));
            OK(galloc_free(q, again));
            pool_end(pool);
            finish();
        }
    }
}

/* No call is ever made on a handle that the current call was not given: a dead one would crash. */
TEST(dead_streams_are_not_touched)
{
    for (int reuse = 0; reuse <= (COMPLETED | FOLLOWED | WAIT); reuse++) {
        begin();
        cudaStream_t t = stream_new();
        galloc_pool *pool = tight_pool(MIB(16), reuse);
        for (int i = 0; i < 30; i++) {
            cudaStream_t s = stream_new();
            void *p = get_used(pool, MIB(1) + KIB(300) * (size_t)(i % 5), s, 1);
            void *q = get_used(pool, 4096, s, 2);
            OK(galloc_free(p, s));
            OK(galloc_free(q, s));
            stream_end(s);
            OK(galloc_free(get_used(pool, MIB(14) + KIB(8) * (size_t)(i % 3), t, 3), t));
        }
        OK(galloc_pool_trim(pool, 0, NULL));
        EXPECT_EQ(sim_physical(0), 0);
        pool_end(pool);
        finish();
    }
}

/* A stream that holds nothing may still have used what it has given on unused. */
TEST(a_stream_whose_block_went_out_again_is_not_forgotten)
{
    enum { MANY = 80 };
    begin_still();
    galloc_pool *pool = pool_new(NULL);
    cudaStream_t many[MANY], a = stream_new(), s = stream_new(), n = stream_new();
    void *held[MANY];
    for (int i = 0; i < MANY; i++) held[i] = get(pool, 1000, many[i] = stream_new());
    void *first = get(pool, KIB(16), n), *hold = get(pool, MIB(4), s);
    char *p = get(pool, KIB(16), a);
    OK(cudaStreamSynchronize(a));
    put(s, p, KIB(16), 1);
    OK(galloc_free(p, s));
    char *again = get(pool, KIB(16), s);
    EXPECT(again == p);
    OK(galloc_free(hold, a));
    OK(galloc_pool_reserve(pool, MIB(64))); /* a miss, at which streams are forgotten */
    OK(galloc_free(again, n));              /* not used since: any stream may free it */
    for (int i = 0; i < 300; i++) {
        char *r = get(pool, KIB(16), n);
        if (r < p + KIB(16) && r + KIB(16) > p) put(n, r, KIB(16), 2);
    }
    EXPECT_EQ(sim_findings(SIM_RACE), 0);
    sim_run(-1);
    expect_healthy(pool, 1);
    OK(galloc_free(first, n));
    for (int i = 0; i < MANY; i++) OK(galloc_free(held[i], many[i]));
    for (void *ptr; (ptr = inside_live_block(pool)) != NULL && OK(galloc_free(ptr, n));) continue;
    pool_end(pool);
    for (int i = 0; i < MANY; i++) stream_end(many[i]);
    stream_end(a);
    stream_end(s);
    stream_end(n);
    finish();
}

/* Nor is one with a block that another stream was given and this one freed, since nobody has asked yet whether the
   handle was this stream's: the next new stream does not get it. */
TEST(a_stream_that_freed_what_another_was_given_is_not_forgotten)
{
    const int MANY = (int)inside_streams_kept() + 8;
    begin_still();
    cudaStream_t many[MANY], a = stream_new(), s = stream_new(), n = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *held[MANY], *p, *q, *hold;
    for (int i = 0; i < MANY; i++) held[i] = get(pool, 1000, many[i] = stream_new());
    hold = get(pool, MIB(4), s);
    p = get(pool, KIB(16), a);
    put(s, p, KIB(16), 1);
    OK(galloc_free(p, s));
    OK(galloc_free(hold, a));
    OK(galloc_pool_reserve(pool, MIB(64))); /* not served at once: what holds nothing is forgotten after it */
    EXPECT_EQ(galloc_pool_check(pool), 0);
    q = get_used(pool, KIB(16), n, 2);
    EXPECT(q != p);
    OK(galloc_free(q, n));
    EXPECT(get(pool, KIB(16), s) == p); /* its own it has again */
    OK(galloc_free(p, s));
    for (int i = 0; i < MANY; i++) OK(galloc_free(held[i], many[i]));
    sim_run(-1);
    pool_end(pool);
    finish();
}

/* A wait that is limited asks again and again, but leaves the processor to others in between. */
TEST(a_limited_wait_does_not_ask_without_a_pause)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_config config = config_limit(MIB(16));
    config.wait_limit_ms = 30;
    config.reuse = COMPLETED;
    galloc_pool *pool = pool_new(&config);
    void *used[4];
    OK(galloc_free(get(pool, 512, s), s));
    OK(galloc_pool_trim(pool, 0, NULL));
    for (int i = 0; i < 4; i++) used[i] = get_used(pool, MIB(4), t, 1);
    for (int i = 0; i < 4; i++) OK(galloc_free(used[i], t)); /* events are recorded */
    long before = sim_calls("cuEventQuery");
    void *p = NULL;
    EXPECT_EQ(galloc_pool_malloc(pool, &p, MIB(6), s), cudaErrorMemoryAllocation);
    EXPECT(sim_calls("cuEventQuery") > before);
    EXPECT(sim_calls("cuEventQuery") - before < 300); /* some at once, then one in a millisecond */
    sim_run(-1);
    pool_end(pool);
    finish();
}

/* The pool forgets a stream that this thread has just called with: what it frees there is free memory all the same. */
TEST(a_free_on_a_stream_that_was_forgotten_reaches_the_pool)
{
    const int MANY = (int)inside_streams_kept() + 8;
    begin();
    cudaStream_t many[MANY], a = stream_new(), n = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *held[MANY], *p = get(pool, KIB(16), n);
    for (int i = 0; i < MANY; i++) held[i] = get(pool, 1000, many[i] = stream_new());
    OK(galloc_free(get(pool, KIB(16), a), n));
    void *q = get(pool, KIB(64), n); /* a miss: that block leaves the cache of N, and A has none */
    unsigned long long id = stream_id(a);
    OK(galloc_pool_reserve(pool, MIB(64))); /* not served at once: what holds nothing is forgotten after it */
    EXPECT(!inside_stream_of(pool, id).known);
    OK(galloc_free(p, a));
    EXPECT_EQ(stats_of(pool).blocks.current, MANY + 1);
    EXPECT_EQ(galloc_pool_check(pool), 0);
    OK(galloc_free(q, n));
    for (int i = 0; i < MANY; i++) OK(galloc_free(held[i], many[i]));
    expect_healthy(pool, 1);
    pool_end(pool);
    finish();
}

/* What galloc remembers of streams that nobody retired does not grow for ever. */
TEST(forgotten_streams_do_not_pile_up)
{
    begin();
    cudaStream_t t = stream_new();
    galloc_pool *pool = pool_new(NULL);
    size_t most = 0;
    for (int i = 0; i < 5000; i++) {
        cudaStream_t s = stream_new();
        OK(galloc_free(get_used(pool, 512, s, 1), s));
        stream_end(s);
        if (i % 100 == 0) OK(galloc_free(get_used(pool, MIB(1) * (size_t)(1 + i / 100), t, 2), t));
        if (sim_malloc_live() > most) most = sim_malloc_live();
    }
    EXPECT(most < 2000);
    pool_end(pool);
    finish();
}

/* Nor does what is noted of the waits that such streams have queued. */
TEST(waits_of_forgotten_streams_do_not_pile_up)
{
    begin_still();
    cudaStream_t s = stream_new();
    galloc_pool *pool = tight_pool(MIB(16), COMPLETED | FOLLOWED | WAIT);
    size_t live = 0;
    uint64_t waits = 0;
    for (int i = 0; i < 4000; i++) {
        cudaStream_t t = stream_new();
        come_into_play(pool, t);
        OK(galloc_free(get_used(pool, MIB(12), s, 1), s));
        OK(galloc_free(get_used(pool, MIB(12), t, 2), t));
        OK(galloc_stream_retire(t));
        stream_end(t);
        sim_run(-1);
        if (i == 100) waits = stats_of(pool).waits, live = sim_malloc_live();
    }
    EXPECT(stats_of(pool).waits >= waits + 3800);
    EXPECT_EQ(sim_malloc_live(), live);
    pool_end(pool);
    finish();
}

/* Nor while the pool neither grows nor runs out: captures, retired streams and abandoned ones in turn. */
TEST(stream_states_do_not_pile_up_while_a_pool_serves_all_from_its_cache)
{
    enum { ROUNDS = 3000, KINDS = 3 };
    for (int kind = 0; kind < KINDS; kind++) {
        begin();
        cudaStream_t t = stream_new();
        galloc_pool *pool = pool_new(NULL);
        size_t most = 0;
        void *p;
        OK(galloc_pool_reserve(pool, MIB(64)));
        for (int i = 0; i < ROUNDS; i++) {
            cudaStream_t s = kind == 0 ? t : stream_new();
            cudaGraph_t graph;
            if (kind == 0) OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
            OK(galloc_free(get_used(pool, 512, s, 1), s));
            if (kind == 0) OK(cudaStreamEndCapture(s, &graph)), OK(cudaGraphDestroy(graph));
            if (kind == 1) OK(galloc_stream_retire(s));
            if (kind != 0) stream_end(s);
            if (inside_streams(pool) > most) most = inside_streams(pool);
        }
        EXPECT(most <= (kind == 2 ? 1100 : inside_streams_kept() + 8));
        EXPECT_EQ(galloc_pool_check(pool), 0);
        p = get(pool, MIB(1), t);
        OK(galloc_free(p, t));
        pool_end(pool);
        finish();
    }
}

/* Nor where their blocks stay in quarantine. */
TEST(stream_states_do_not_pile_up_behind_a_quarantine)
{
    for (int retires = 0; retires < 2; retires++) {
        sim_options options = sim_defaults();
        options.pace = SIM_PACE_PROMPT;
        begin_with(options);
        galloc_config config = galloc_config_default();
        OK(galloc_config_parse(&config, "debug:quarantine", NULL, 0));
        galloc_pool *pool = pool_new(&config);
        cudaStream_t t = stream_new();
        size_t most = 0;
        OK(galloc_free(get(pool, MIB(256), t), t));
        for (int i = 0; i < 4000; i++) {
            cudaStream_t s = stream_new();
            OK(galloc_free(get_used(pool, 512, s, 1), s));
            if (retires) OK(galloc_stream_retire(s));
            stream_end(s);
            if (inside_streams(pool) > most) most = inside_streams(pool);
        }
        EXPECT(most <= (retires ? 2 * inside_streams_kept() + 8 : 1100));
        expect_healthy(pool, 1);
        pool_end(pool);
        finish();
    }
}

/* Nor do events while the pool serves all from free memory: of recorded uses, of frees on other streams, of blocks with
   room. */
TEST(events_do_not_pile_up_while_a_pool_serves_all_from_free_memory)
{
    for (int way = 0; way < 4; way++) {
        sim_options options = sim_defaults();
        options.pace = SIM_PACE_PROMPT;
        begin_with(options);
        cudaStream_t t = stream_new(), u = stream_new(), both[2] = {t, u};
        galloc_pool *pool = pool_new(NULL);
        void *ballast = get(pool, MIB(64), t), *kept = get(pool, 4096, way < 3 ? u : t);
        OK(galloc_free(ballast, t));
        for (int i = 0; i < 6000; i++) {
            void *p = way < 3 ? get(pool, 4096, t) : get_growable(pool, 4096, 8192, t);
            if (way == 0) OK(galloc_record_stream(p, u));
            if (way == 1) OK(galloc_free_after(p, both, 2));
            else OK(galloc_free(p, way == 2 ? u : t));
        }
        EXPECT(sim_calls("cuEventCreate") <= 300);
        OK(galloc_free(kept, way < 3 ? u : t));
        expect_healthy(pool, 1);
        pool_end(pool);
        finish();
    }
}

/* Nor where all blocks are one lasting stream's, whose calls take the short path: other streams only use them. */
TEST(stream_states_do_not_pile_up_where_streams_use_blocks_of_another)
{
    for (int way = 0; way < 4; way++) {
        sim_options options = sim_defaults();
        options.pace = SIM_PACE_PROMPT;
        begin_with(options);
        cudaStream_t t = stream_new();
        galloc_pool *pool = pool_new(NULL);
        void *ballast = get(pool, MIB(64), t), *kept = get(pool, 4096, t);
        size_t most = 0;
        OK(galloc_free(ballast, t));
        for (int i = 0; i < 4000; i++) {
            cudaStream_t s = stream_new(), both[2] = {s, t};
            void *p = get(pool, 4096, t);
            if (way % 2) {
                OK(galloc_record_stream(p, s));
                OK(galloc_free(p, t));
            } else {
                OK(galloc_free_after(p, both, 2));
            }
            if (way < 2) OK(galloc_stream_retire(s));
            stream_end(s);
            if (inside_streams(pool) > most) most = inside_streams(pool);
        }
        EXPECT(most <= (way < 2 ? inside_streams_kept() + 8 : 1100));
        EXPECT_EQ(galloc_pool_check(pool), 0);
        OK(galloc_free(kept, t));
        pool_end(pool);
        finish();
    }
}

/* Nor while a block that stays, such as a model's weights, is recorded for each of them. */
TEST(stream_states_do_not_pile_up_on_a_block_that_stays)
{
    begin();
    cudaStream_t t = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *stays = get_used(pool, MIB(8), t, 1);
    size_t most = 0;
    OK(cudaStreamSynchronize(t));
    for (int i = 0; i < 1000; i++) {
        cudaStream_t s = stream_new();
        void *p = get_used(pool, MIB(1), s, 2);
        OK(galloc_record_stream(stays, s));
        look(s, stays, MIB(8), 1);
        OK(galloc_free(p, s));
        OK(cudaStreamSynchronize(s));
        OK(galloc_stream_retire(s));
        stream_end(s);
        if (inside_streams(pool) > most) most = inside_streams(pool);
    }
    EXPECT(most <= inside_streams_kept() + 8);
    OK(galloc_free(stays, t));
    pool_end(pool);
    finish();
}

/* Work of a retired stream that is still under way counts until it ends, whoever is recorded meanwhile. */
TEST(a_recorded_use_by_a_retired_stream_lasts_as_long_as_its_work)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new(), u = stream_new();
    galloc_pool *pool = tight_pool(MIB(8), COMPLETED | FOLLOWED | WAIT);
    void *p = get_used(pool, MIB(8), s, 1);
    order(s, t);
    OK(galloc_record_stream(p, t));
    look(t, p, MIB(8), 1);
    OK(galloc_stream_retire(t));
    stream_end(t);
    OK(galloc_record_stream(p, u));
    OK(galloc_free(p, s));
    p = get_used(pool, MIB(8), s, 2);
    OK(galloc_free(p, s));
    pool_end(pool);
    finish();
}

static struct {
    galloc_pool *pool;
    cudaStream_t stream;
    void *block;
} overtakes;

static void free_and_record(const char *function)
{
    void *block = overtakes.block;
    if (!block || strcmp(function, "cuEventRecord")) return;
    overtakes.block = NULL;
    inside_ask_for_event(overtakes.pool, stream_id(overtakes.stream));
    OK(galloc_free(block, overtakes.stream));
}

/* A thread begins to record an event on a stream, another one records a later event there first, and an earlier one is
   not done either. */
TEST(an_event_that_is_overtaken_has_its_place)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *p[3], *wall = get(pool, MIB(2), t);
    for (int i = 0; i < 3; i++) p[i] = get_used(pool, MIB(2), s, 1);
    inside_ask_for_event(pool, stream_id(s));
    OK(galloc_free(p[0], s));
    EXPECT_EQ(sim_calls("cuEventRecord"), 1);
    put(s, p[1], MIB(2), 2);
    inside_ask_for_event(pool, stream_id(s));
    overtakes.pool = pool;
    overtakes.stream = s;
    overtakes.block = p[2];
    sim_hook(free_and_record, NULL);
    OK(galloc_free(p[1], s));
    sim_hook(NULL, NULL);
    EXPECT(overtakes.block == NULL);
    EXPECT_EQ(sim_calls("cuEventRecord"), 3);
    expect_healthy(pool, 1);
    void *all = get_used(pool, MIB(6), t, 3);
    sim_run(-1);
    expect_healthy(pool, 1);
    OK(galloc_free(all, t));
    OK(galloc_free(wall, t));
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* However many streams have unfinished work, no request waits for the device while there is memory, whether free memory
   serves it or the pool grows for it. */
TEST(no_request_waits_for_many_living_streams)
{
    enum { STREAMS = 1300 };
    for (int limited = 0; limited < 2; limited++) {
        begin_still();
        galloc_config config = galloc_config_default();
        if (limited) config.wait_limit_ms = 0;
        galloc_pool *pool = pool_new(&config);
        cudaStream_t many[STREAMS];
        OK(galloc_pool_reserve(pool, MIB(16)));
        long waits = sim_blocking_calls();
        for (int i = 0; i < STREAMS; i++) {
            many[i] = stream_new();
            void *p = get_used(pool, 4096, many[i], 1), *q = i % 64 ? NULL : get_used(pool, MIB(8), many[i], 1);
            OK(galloc_free(p, many[i]));
            OK(galloc_free(q, many[i]));
        }
        EXPECT_EQ(sim_blocking_calls(), waits);
        EXPECT(sim_pending() > 0);
        sim_run(-1);
        expect_healthy(pool, 1);
        pool_end(pool);
        for (int i = 0; i < STREAMS; i++) stream_end(many[i]);
        finish();
    }
}

/* Among so many streams no free records an event on the legacy stream, where blocking streams would wait for it. On
   others events do not pile up while the device is behind. */
TEST(few_events_are_pending_among_many_streams)
{
    enum { STREAMS = 1100 };
    begin_still();
    cudaStream_t many[STREAMS];
    galloc_pool *pool = pool_new(NULL);
    void *held[STREAMS];
    OK(galloc_free(get_used(pool, 512, 0, 1), 0));
    for (int i = 0; i < STREAMS; i++) held[i] = get(pool, 512, many[i] = stream_new());
    uint64_t marks = stats_of(pool).marks;
    for (int i = 0; i < 10; i++) OK(galloc_free(get_used(pool, 512, 0, 1), 0));
    EXPECT_EQ(stats_of(pool).marks, marks);
    OK(galloc_free(get_used(pool, 512, many[0], 1), many[0]));
    EXPECT_EQ(stats_of(pool).marks, marks + 1);
    for (int i = 0; i < 1000; i++) OK(galloc_free(get_used(pool, 512, many[0], 1), many[0]));
    EXPECT(stats_of(pool).marks > marks + 100 && stats_of(pool).marks < marks + 200);
    for (int i = 0; i < STREAMS; i++) OK(galloc_free(held[i], many[i]));
    pool_end(pool);
    for (int i = 0; i < STREAMS; i++) stream_end(many[i]);
    finish();
}

/* Streams that were retired end with events of their own: no request waits for them, however many have work. */
TEST(no_request_waits_for_many_retired_streams)
{
    enum { STREAMS = 1200 };
    begin_still();
    galloc_pool *pool = pool_new(NULL);
    long waits = -1;
    int n = 0;
    for (int i = 0; i < STREAMS; i++) {
        cudaStream_t s = stream_new();
        void *p = get_used(pool, 4096, s, 1);
        if (!i) waits = sim_blocking_calls();
        OK(galloc_free(p, s));
        OK(galloc_stream_retire(s));
        stream_end(s);
    }
    EXPECT_EQ(sim_blocking_calls(), waits);
    OK(galloc_pool_streams(pool, NULL, 0, &n));
    EXPECT(n > 1100);
    sim_run(-1);
    OK(galloc_pool_trim(pool, 0, NULL));
    OK(galloc_pool_streams(pool, NULL, 0, &n));
    EXPECT(n < 100);
    pool_end(pool);
    finish();
}

/* Large heaps record fewer events; but what streams leave behind that never come again is a small part of the heap,
   however many they are. */
TEST(forgotten_streams_leave_little_behind)
{
    enum { STREAMS = 100, BLOCKS = 8 };
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *p = get(pool, GIB(32), s);
    for (int i = 0; i < STREAMS; i++) {
        void *b[BLOCKS];
        cudaStream_t t = stream_new();
        for (int k = 0; k < BLOCKS; k++) b[k] = get_used(pool, MIB(4), t, 1);
        for (int k = 0; k < BLOCKS; k++) OK(galloc_free(b[k], t));
        sim_run(-1);
    }
    EXPECT(stats_of(pool).reserved.current <= GIB(32) + GIB(32) / 64);
    OK(galloc_free(p, s));
    pool_end(pool);
    finish();
}

TEST(a_block_outlives_its_stream)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *p = get_used(pool, MIB(4), s, 1);
    unsigned long long id = stream_id(s);
    order(s, t);
    stream_end(s);
    EXPECT_EQ(info_of(p).stream_id, id);
    look(t, p, MIB(4), 1);
    OK(galloc_free(p, t));
    p = get_used(pool, MIB(4), t, 2);
    OK(galloc_free(p, t));
    pool_end(pool);
    finish();
}

TEST(retiring_makes_the_rest_available_without_waiting)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = tight_pool(MIB(2), COMPLETED | FOLLOWED | WAIT);
    void *p = get_used(pool, KIB(1020), s, 1);
    come_into_play(pool, t);
    OK(galloc_free(p, s));
    OK(galloc_stream_retire(s));
    stream_end(s);
    void *keep = get_used(pool, KIB(1020), t, 2); /* pending or not, there is no other memory than that of S */
    sim_run(-1);
    long blocking = sim_blocking_calls();
    EXPECT_EQ(blocking, 0);
    void *q = get_used(pool, KIB(1020), t, 3);
    EXPECT(keep == p || q == p);
    EXPECT_EQ(sim_blocking_calls(), 0);
    OK(galloc_free(keep, t));
    OK(galloc_free(q, t));
    OK(galloc_stream_retire(t));
    OK(galloc_stream_retire(t)); /* a stream that galloc does not know is fine */
    pool_end(pool);
    finish();
}

TEST(retiring_marks_every_pool)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool[2] = {tight_pool(MIB(2), COMPLETED), tight_pool(MIB(2), COMPLETED)};
    for (int i = 0; i < 2; i++) {
        come_into_play(pool[i], t);
        OK(galloc_free(get_used(pool[i], MIB(1), s, 1), s));
    }
    OK(galloc_stream_retire(s));
    stream_end(s);
    sim_run(-1);
    for (int i = 0; i < 2; i++) {
        void *p = get_used(pool[i], MIB(2) - 512, t, 2);
        OK(galloc_free(p, t));
    }
    EXPECT_EQ(sim_blocking_calls(), 0);
    pool_end(pool[0]);
    pool_end(pool[1]);
    finish();
}

/* ---- rule 7: the default streams --------------------------------------------------------------------------------- */

TEST(legacy_and_blocking_streams_race_nowhere)
{
    for (int seed = 1; seed <= 10; seed++) {
        sim_options options = sim_defaults();
        options.seed = (uint64_t)seed;
        options.pace = seed % 3 - 1;
        begin_with(options);
        dice d = {(uint64_t)seed};
        cudaStream_t s[4] = {0, NULL, NULL, stream_new()};
        OK(cudaStreamCreate(&s[1]));
        OK(cudaStreamCreate(&s[2]));
        galloc_pool *pool = tight_pool(MIB(24), COMPLETED | FOLLOWED | WAIT);
        for (int i = 0; i < 100; i++) {
            cudaStream_t a = s[roll_below(&d, 4)];
            size_t bytes = MIB(1) + KIB(512) * roll_below(&d, 40);
            OK(galloc_free(get_used(pool, bytes, a, (uint64_t)i), a));
        }
        pool_end(pool);
        finish();
    }
}

/* A free or an allocation for the legacy stream is no work there, which CUDA would order with that of blocking
   streams. */
TEST(calls_for_legacy_order_no_blocking_streams)
{
    for (int round = 0; round < 2; round++) {
        begin_still();
        cudaStream_t a, b;
        OK(cudaStreamCreate(&a));
        OK(cudaStreamCreate(&b));
        galloc_config config = galloc_config_default();
        config.reuse = COMPLETED | FOLLOWED;
        galloc_pool *pool = pool_new(&config);
        void *p = get(pool, MIB(8), round ? a : 0);
        put(a, p, MIB(8), 1);
        OK(galloc_free(p, round ? a : 0));
        void *q = get(pool, MIB(8), round ? 0 : b);
        put(b, q, MIB(8), 2);
        EXPECT(q != p);
        OK(galloc_free(q, b));
        sim_run(-1);
        pool_end(pool);
        finish();
    }
}

/* Two blocking streams are in no order to each other, whatever legacy did. */
TEST(blocking_streams_are_not_ordered_by_legacy)
{
    begin_still();
    cudaStream_t a = NULL, b = NULL;
    OK(cudaStreamCreate(&a));
    OK(cudaStreamCreate(&b));
    galloc_pool *pool = tight_pool(MIB(8), COMPLETED | FOLLOWED | WAIT);
    come_into_play(pool, 0);
    OK(galloc_free(get_used(pool, MIB(8), 0, 1), 0));
    OK(galloc_free(get_used(pool, MIB(8), a, 2), a));
    void *p = get_used(pool, MIB(8), b, 3);
    OK(galloc_free(p, b));
    pool_end(pool);
    finish();
}

/* A wait of the legacy stream would hold up every blocking stream: the host waits instead. */
TEST(legacy_is_never_made_to_wait)
{
    begin_still();
    cudaStream_t s = stream_new();
    galloc_pool *pool = tight_pool(MIB(8), COMPLETED | FOLLOWED | WAIT);
    come_into_play(pool, 0);
    OK(galloc_free(get_used(pool, MIB(8), s, 1), s));
    void *p = get_used(pool, MIB(8), 0, 2);
    EXPECT_EQ(sim_calls("cuStreamWaitEvent"), 0);
    EXPECT_EQ(stats_of(pool).waits, 0);
    OK(galloc_free(p, 0));
    pool_end(pool);
    finish();
}

/* Once an allocation has needed an event of the legacy stream, it gets further ones like any other stream. */
TEST(legacy_gets_events_once_they_were_needed)
{
    begin_still();
    cudaStream_t s = stream_new();
    galloc_pool *pool = tight_pool(MIB(18), COMPLETED | FOLLOWED | WAIT);
    void *kept = get(pool, MIB(2), s); /* once nothing is live all streams are asked for events */
    for (int i = 0; i < 3; i++) OK(galloc_free(get_used(pool, MIB(4), 0, 1), 0));
    EXPECT_EQ(sim_calls("cuEventRecord"), 0);
    OK(galloc_free(get_used(pool, MIB(16), s, 2), s)); /* it asks legacy for an event */
    sim_run(-1);
    OK(galloc_free(get_used(pool, MIB(4), 0, 3), 0));
    long records = sim_calls("cuEventRecord");
    for (int i = 0; i < 3; i++) OK(galloc_free(get_used(pool, MIB(4), 0, 4), 0));
    EXPECT_EQ(sim_calls("cuEventRecord"), records + 3);
    OK(galloc_free(kept, s));
    pool_end(pool);
    finish();
}

TEST(legacy_is_left_alone_while_a_blocking_stream_captures)
{
    for (int mode = 0; mode < 3; mode++) {
        begin_still();
        static const enum cudaStreamCaptureMode modes[] = {
            cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeRelaxed};
        cudaStream_t blocking = NULL, s = stream_new();
        cudaGraph_t graph = NULL;
        OK(cudaStreamCreate(&blocking));
        galloc_pool *pool = tight_pool(MIB(24), COMPLETED | FOLLOWED | WAIT);
        for (uint64_t i = 0; i < 3; i++) { /* somebody wants what legacy frees */
            OK(galloc_free(get_used(pool, MIB(20), 0, i), 0));
            OK(galloc_free(get_used(pool, MIB(20), s, i), s));
        }
        void *p = get_used(pool, MIB(8), 0, 1), *q = NULL;
        void *other = get_used(pool, MIB(8), s, 1);
        OK(cudaStreamBeginCapture(blocking, modes[mode]));
        OK(galloc_free(p, 0));
        OK(galloc_free(other, s));
        if (galloc_pool_malloc(pool, &q, MIB(4), 0) == cudaSuccess) OK(galloc_free(q, 0));
        OK(galloc_free(get(pool, MIB(4), s), s));
        (void)galloc_stream_retire(0);
        OK(cudaStreamEndCapture(blocking, &graph));
        EXPECT(graph != NULL);
        OK(cudaGraphDestroy(graph));
        q = get_used(pool, MIB(8), 0, 2);
        OK(galloc_free(q, 0));
        pool_end(pool);
        finish();
    }
}

/* A free elsewhere of a block that legacy used, or the captured stream itself before. */
TEST(a_free_records_nothing_on_streams_that_capture)
{
    for (int legacy = 0; legacy < 2; legacy++) {
        begin_still();
        cudaStream_t blocking = NULL, s = stream_new();
        cudaGraph_t graph = NULL;
        OK(cudaStreamCreate(&blocking));
        cudaStream_t user = legacy ? 0 : blocking;
        galloc_pool *pool = pool_new(NULL);
        void *p = get_used(pool, MIB(8), s, 1);
        OK(galloc_record_stream(p, user));
        order(s, user);
        put(user, p, MIB(8), 2);
        OK(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeThreadLocal));
        long records = sim_calls("cuEventRecord");
        OK(galloc_free(p, s));
        EXPECT(sim_calls("cuEventRecord") <= records + 1); /* on s */
        void *q = get_used(pool, MIB(8), s, 3);
        EXPECT(q != p);
        OK(cudaStreamEndCapture(blocking, &graph));
        EXPECT(graph != NULL);
        OK(cudaGraphDestroy(graph));
        OK(galloc_free(q, s));
        pool_end(pool);
        finish();
    }
}

static galloc_pool *thread_pool;
static void *thread_ptr;

static void *use_per_thread_stream(void *arg)
{
    void *p = get_used(thread_pool, MIB(8), cudaStreamPerThread, 2);
    EXPECT(p != thread_ptr);
    OK(galloc_free(p, cudaStreamPerThread));
    return arg;
}

/* One handle, a stream for each thread. */
TEST(per_thread_streams_are_different_streams)
{
    begin_still();
    pthread_t thread;
    thread_pool = pool_new(NULL);
    thread_ptr = get_used(thread_pool, MIB(8), cudaStreamPerThread, 1);
    OK(galloc_free(thread_ptr, cudaStreamPerThread));
    EXPECT_EQ(pthread_create(&thread, NULL, use_per_thread_stream, NULL), 0);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
    void *p = get_used(thread_pool, MIB(8), cudaStreamPerThread, 3);
    EXPECT(p == thread_ptr);
    OK(galloc_free(p, cudaStreamPerThread));
    pool_end(thread_pool);
    finish();
}

static void *look_on_per_thread_stream(void *stream)
{
    order(stream, cudaStreamPerThread);
    OK(galloc_record_stream(thread_ptr, cudaStreamPerThread));
    look(cudaStreamPerThread, thread_ptr, MIB(8), 1);
    return NULL;
}

/* record_stream's stream was another thread's: an event of this thread's says nothing about it. */
TEST(a_recorded_per_thread_stream_stays_its_threads)
{
    begin_still();
    pthread_t thread;
    cudaStream_t s = stream_new();
    galloc_pool *pool = tight_pool(MIB(8), COMPLETED | FOLLOWED | WAIT);
    thread_ptr = get_used(pool, MIB(8), s, 1);
    EXPECT_EQ(pthread_create(&thread, NULL, look_on_per_thread_stream, s), 0);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
    OK(galloc_free(thread_ptr, s));
    void *p = get_used(pool, MIB(8), s, 2);
    OK(galloc_free(p, s));
    pool_end(pool);
    finish();
}

TEST(the_default_streams_by_handle_and_by_zero_are_the_same)
{
    begin_still();
    galloc_pool *pool = pool_new(NULL);
    void *p = get_used(pool, MIB(4), 0, 1);
    EXPECT_EQ(info_of(p).stream_id, 0); /* the legacy stream's own id cannot be asked for at all times */
    OK(galloc_free(p, cudaStreamLegacy));
    void *q = get_used(pool, MIB(4), 0, 2);
    EXPECT(q == p);
    EXPECT_EQ(event_calls(), 0);
    OK(galloc_free(q, 0));
    pool_end(pool);
    finish();
}

/* ---- files for per-thread default streams ------------------------------------------------------------------------ */

/* galloc.h declares these to such files, under the names without _ptsz; in them stream 0 is the per-thread one. */
cudaError_t galloc_malloc_ptsz(void **ptr, size_t bytes, cudaStream_t stream);
cudaError_t galloc_malloc_growable_ptsz(void **ptr, size_t bytes, size_t max_bytes, cudaStream_t stream);
cudaError_t galloc_free_ptsz(void *ptr, cudaStream_t stream);
cudaError_t galloc_free_after_ptsz(void *ptr, const cudaStream_t *streams, int n);
cudaError_t galloc_alloc_ptsz(void **ptr, const galloc_request *request);
cudaError_t galloc_pool_malloc_ptsz(galloc_pool *pool, void **ptr, size_t bytes, cudaStream_t stream);
cudaError_t galloc_record_stream_ptsz(void *ptr, cudaStream_t stream);
cudaError_t galloc_stream_retire_ptsz(cudaStream_t stream);
cudaError_t galloc_resize_ptsz(void *ptr, size_t bytes, cudaStream_t stream);
cudaError_t galloc_graph_begin_ptsz(galloc_graph **graph, galloc_pool *pool, cudaStream_t stream);
cudaError_t galloc_graph_release_ptsz(galloc_graph *graph, cudaStream_t stream);

static galloc_pool *pool_without_reuse(void)
{
    galloc_config config = galloc_config_default();
    config.reuse = 0;
    return pool_new(&config);
}

static galloc_stream_stats per_thread_stats(galloc_pool *pool)
{
    galloc_stream_stats streams[8], none = {0};
    int n = 0, i = 0;
    OK(galloc_pool_streams(pool, streams, 8, &n));
    while (i < n && streams[i].stream_id != stream_id(cudaStreamPerThread)) i++;
    return i < n ? streams[i] : none;
}

TEST(stream_0_allocates_on_the_per_thread_stream_where_that_is_meant)
{
    begin_still();
    galloc_pool *pool = pool_new(NULL);
    galloc_request request = {0};
    void *p[5] = {NULL};
    OK(galloc_malloc_ptsz(&p[0], MIB(2), 0));
    OK(galloc_malloc_growable_ptsz(&p[1], MIB(2), MIB(64), 0));
    request.bytes = MIB(2);
    OK(galloc_alloc_ptsz(&p[2], &request));
    request.pool = pool;
    OK(galloc_alloc_ptsz(&p[3], &request));
    OK(galloc_pool_malloc_ptsz(pool, &p[4], MIB(2), 0));
    EXPECT(info_of(p[1]).room >= MIB(64));
    for (int i = 0; i < 5; i++) {
        EXPECT_EQ(info_of(p[i]).stream_id, stream_id(cudaStreamPerThread));
        EXPECT_EQ(info_of(p[i]).pool == pool, i > 2);
        OK(galloc_free_ptsz(p[i], 0));
    }
    EXPECT(per_thread_stats(pool).unmarked > 0);
    OK(galloc_stream_retire_ptsz(0)); /* its event covers the frees */
    EXPECT_EQ(per_thread_stats(pool).unmarked, 0);
    pool_end(pool);
    finish();
}

/* What the per-thread stream has freed is its own again at once; memory of another stream would not be. */
TEST(stream_0_frees_on_the_per_thread_stream_where_that_is_meant)
{
    enum { FREE, FREE_AFTER, SHRINK, RECORD, WAYS };
    for (int way = 0; way < WAYS; way++) {
        begin_still();
        galloc_pool *pool = pool_without_reuse();
        cudaStream_t here = cudaStreamPerThread, other = stream_new(), zero = 0;
        come_into_play(pool, other);
        come_into_play(pool, 0);
        char *p = get_used(pool, MIB(8), way == RECORD ? other : here, 1), *q;
        size_t bytes = way == SHRINK ? MIB(4) : MIB(8);
        switch (way) {
        case FREE: OK(galloc_free_ptsz(p, 0)); break;
        case FREE_AFTER: OK(galloc_free_after_ptsz(p, &zero, 1)); break;
        case SHRINK: OK(galloc_resize_ptsz(p, MIB(4), 0)); break;
        default:
            order(other, here);
            look(here, p, MIB(8), 1);
            OK(galloc_record_stream_ptsz(p, 0));
            OK(galloc_free(p, other));
        }
        if (way == RECORD) EXPECT_EQ(per_thread_stats(pool).stranded, MIB(8));
        q = get_used(pool, bytes, way == RECORD ? other : here, 2);
        EXPECT_EQ(q == p + MIB(8) - bytes, way != RECORD);
        OK(galloc_free(q, way == RECORD ? other : here));
        if (way == SHRINK) OK(galloc_free(p, here));
        pool_end(pool);
        stream_end(other);
        finish();
    }
}

/* Graphs of a group that begins and ends there share memory, which is the per-thread stream's at once afterwards. */
TEST(stream_0_is_the_per_thread_one_of_a_group_where_that_is_meant)
{
    begin_still();
    galloc_pool *pool = pool_without_reuse();
    galloc_graph *group = NULL;
    cudaStream_t here = cudaStreamPerThread, other = stream_new();
    cudaGraph_t graph[2];
    void *p[2], *q;
    come_into_play(pool, other);
    come_into_play(pool, 0);
    OK(galloc_graph_begin_ptsz(&group, pool, 0));
    for (int i = 0; i < 2; i++) {
        OK(cudaStreamBeginCapture(here, cudaStreamCaptureModeRelaxed));
        p[i] = get_used(pool, MIB(32), here, 1);
        OK(galloc_free(p[i], here));
        OK(cudaStreamEndCapture(here, &graph[i]));
    }
    EXPECT(p[1] == p[0]);
    OK(galloc_graph_end(group));
    OK(galloc_graph_release_ptsz(group, 0));
    q = get_used(pool, MIB(32), here, 2);
    EXPECT(q == p[0]);
    OK(galloc_free(q, here));
    for (int i = 0; i < 2; i++) OK(cudaGraphDestroy(graph[i]));
    pool_end(pool);
    stream_end(other);
    finish();
}

/* ---- other devices ----------------------------------------------------------------------------------------------- */

TEST(streams_of_other_devices_are_kept_apart)
{
    for (int pace = -1; pace <= 1; pace++) {
        begin_with_devices(2, pace);
        cudaStream_t s[2];
        for (int d = 1; d >= 0; d--) {
            OK(cudaSetDevice(d));
            s[d] = stream_new();
        }
        galloc_pool *pool = tight_pool(MIB(16), COMPLETED | FOLLOWED | WAIT);
        for (int i = 0; i < 20; i++) {
            void *p = get(pool, MIB(12), s[i % 2]);
            EXPECT_EQ(info_of(p).device, 0);
            if (i % 2 == 0) put(s[0], p, MIB(12), 1);
            if (i % 4 == 2) order(s[0], s[1]);
            OK(galloc_free(p, i % 4 == 2 ? s[1] : s[i % 2]));
        }
        EXPECT_EQ(sim_physical(1), 0);
        int device = -1;
        OK(cudaGetDevice(&device));
        EXPECT_EQ(device, 0);
        pool_end(pool);
        finish();
    }
}

/* ---- rule 8: what another thread may see between the steps of a call --------------------------------------------- */

/* The driver's function is replaced by one that before or after its work, once, lets another thread do something; it
   does not wait for ever, since that thread may have to wait for the very call that it comes between. */
typedef struct interlude {
    void (*run)(void);
    int after;
    cudaStream_t at; /* where a look at this stream is the moment */
    galloc_pool *pool;
    cudaStream_t s, t;
    void *ptr;
} interlude;

enum { PATIENCE_MS = 50 };

static interlude between;
static inside_driver real_driver;
static pthread_t between_thread;
static int between_done;

static void *run_interlude(void *arg)
{
    between.run();
    __atomic_store_n(&between_done, 1, __ATOMIC_RELEASE);
    return arg;
}

static void other_thread(int now)
{
    if (!now || between_done != -1) return;
    between_done = 0;
    EXPECT_EQ(pthread_create(&between_thread, NULL, run_interlude, NULL), 0);
    for (int ms = 0; !__atomic_load_n(&between_done, __ATOMIC_ACQUIRE) && ms < PATIENCE_MS; ms++) usleep(1000);
}

static CUresult CUDAAPI record_with_interlude(CUevent event, CUstream stream)
{
    other_thread(!between.at && !between.after);
    CUresult result = real_driver.EventRecord(event, stream);
    other_thread(!between.at && between.after);
    return result;
}

static CUresult CUDAAPI wait_with_interlude(CUstream stream, CUevent event, unsigned int flags)
{
    other_thread(!between.at && !between.after);
    CUresult result = real_driver.StreamWaitEvent(stream, event, flags);
    other_thread(!between.at && between.after);
    return result;
}

static CUresult CUDAAPI look_with_interlude(CUstream stream, CUstreamCaptureStatus *status)
{
    other_thread(between.at && stream == between.at);
    return real_driver.StreamIsCapturing(stream, status);
}

static void interlude_begin(interlude all)
{
    between = all;
    between_done = -1;
    inside_driver mine = real_driver = inside_driver_in_use();
    mine.EventRecord = record_with_interlude;
    mine.StreamWaitEvent = wait_with_interlude;
    mine.StreamIsCapturing = look_with_interlude;
    inside_driver_use(mine);
}

static void interlude_end(void)
{
    if (EXPECT(between_done != -1)) EXPECT_EQ(pthread_join(between_thread, NULL), 0);
    inside_driver_use(real_driver);
}

static void take_on_t(void)
{
    void *p = get_used(between.pool, MIB(8), between.t, 2);
    OK(galloc_free(p, between.t));
}

TEST(an_event_is_shown_after_it_is_recorded)
{
    for (int after = 0; after < 2; after++) {
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = tight_pool(MIB(10), COMPLETED);
        void *p = get_used(pool, MIB(8), s, 1);
        come_into_play(pool, t);
        interlude_begin((interlude){take_on_t, after, NULL, pool, s, t, NULL});
        OK(galloc_free(p, s));
        interlude_end();
        EXPECT_EQ(galloc_pool_check(pool), 0);
        pool_end(pool);
        finish();
    }
}

static void use_and_free_on_s(void)
{
    put(between.s, between.ptr, MIB(4), 3);
    OK(galloc_free(between.ptr, between.s));
}

TEST(a_free_during_the_record_is_not_covered)
{
    for (int after = 0; after < 2; after++) {
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = tight_pool(MIB(10), COMPLETED | FOLLOWED | WAIT);
        void *y = get_used(pool, MIB(4), s, 1), *p = get_used(pool, MIB(5), s, 1);
        come_into_play(pool, t);
        interlude_begin((interlude){use_and_free_on_s, after, NULL, pool, s, t, y});
        OK(galloc_free(p, s));
        interlude_end();
        void *q = get_used(pool, MIB(4), t, 2);
        EXPECT(q == y);
        OK(galloc_free(q, t));
        pool_end(pool);
        finish();
    }
}

/* The second event covers it, and not the first one, whenever that is seen to be complete. */
TEST(a_free_during_the_record_waits_for_its_own_event)
{
    for (int operations = 0; operations < 8; operations++) {
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = tight_pool(MIB(10), COMPLETED);
        void *y = get_used(pool, MIB(4), s, 1), *p = get_used(pool, MIB(5), s, 1);
        come_into_play(pool, t);
        interlude_begin((interlude){use_and_free_on_s, 1, NULL, pool, s, t, y});
        OK(galloc_free(p, s));
        interlude_end();
        sim_run(operations);
        void *q = get_used(pool, MIB(5), t, 2), *r = get_used(pool, MIB(4), t, 4);
        EXPECT_EQ(galloc_pool_check(pool), 0);
        OK(galloc_free(q, t));
        OK(galloc_free(r, t));
        pool_end(pool);
        finish();
    }
}

static void free_on_t(void) { OK(galloc_free(between.ptr, between.t)); }

/* A block that S got from its own pending memory, and did not use, is freed on T while T's wait for S is being queued:
   a mark of T that lies before the wait does not stand for S. */
TEST(a_wait_is_known_after_it_is_queued)
{
    for (int after = 0; after < 2; after++) {
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new(), u = stream_new();
        galloc_pool *pool = tight_pool(MIB(18), COMPLETED | FOLLOWED | WAIT);
        void *rest = get(pool, MIB(1), t);
        OK(galloc_free(get_used(pool, MIB(8), s, 1), s));
        void *x = get(pool, MIB(8), s), *g = get_used(pool, MIB(8), s, 2);
        OK(galloc_free(g, s));
        interlude_begin((interlude){free_on_t, after, NULL, pool, s, t, x});
        void *p = get_used(pool, MIB(8), t, 3);
        interlude_end();
        EXPECT(p == g);
        void *q = get_used(pool, MIB(8), u, 4);
        EXPECT(q == x);
        OK(galloc_free(p, t));
        OK(galloc_free(q, u));
        OK(galloc_free(rest, t));
        pool_end(pool);
        finish();
    }
}

static void retire_s(void) { OK(galloc_stream_retire(between.s)); }

/* A stream that is retired while a free_after names it is marked all the same. */
TEST(retiring_during_free_after_loses_nothing)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new(), u = stream_new();
    galloc_pool *pool = tight_pool(MIB(4), COMPLETED | FOLLOWED | WAIT);
    void *p = get_used(pool, MIB(4), t, 1);
    order(t, s);
    look(s, p, MIB(4), 1);
    cudaStream_t both[2] = {s, t};
    interlude_begin((interlude){retire_s, 0, t, pool, s, t, p});
    OK(galloc_free_after(p, both, 2));
    interlude_end();
    p = get_used(pool, MIB(4), u, 2);
    OK(galloc_free(p, u));
    pool_end(pool);
    finish();
}

static void retire_and_destroy_s(void)
{
    OK(galloc_stream_retire(between.s));
    stream_end(between.s);
}

/* Once retire has returned nobody calls on the stream any more, also not a free that was about to mark it. */
TEST(retiring_ends_what_others_do_with_the_stream)
{
    sim_options options = sim_defaults();
    options.pace = SIM_PACE_STILL;
    options.panic = 0;
    begin_with(options);
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *p = get_used(pool, MIB(4), t, 1), *other = get(pool, MIB(1), s);
    OK(galloc_record_stream(p, s));
    order(t, s);
    look(s, p, MIB(4), 1);
    interlude_begin((interlude){retire_and_destroy_s, 0, s, pool, s, t, p});
    OK(galloc_free(p, t));
    interlude_end();
    OK(galloc_free(get_used(pool, MIB(4), t, 2), t));
    OK(galloc_free(other, t));
    pool_end(pool);
    finish();
}

static struct {
    galloc_pool *pool;
    cudaStream_t stream;
    void *ptr;
    pthread_t thread, retires;
    int begun, freed, gone; /* freed: it has the lock of marks to wait for; gone: the stream has been destroyed */
} late_free;

static void *free_late(void *unused)
{
    OK(galloc_free(late_free.ptr, late_free.stream));
    return unused;
}

/* While the event of a retirement is created, another thread frees a block that the stream was recorded for. What it
   calls after that waits until the stream is gone. */
static void free_beside(const char *function)
{
    if (!pthread_equal(pthread_self(), late_free.retires)) {
        int waits = __atomic_load_n(&late_free.freed, __ATOMIC_ACQUIRE);
        while (waits && !__atomic_load_n(&late_free.gone, __ATOMIC_ACQUIRE)) sched_yield();
        return;
    }
    if (strcmp(function, "cuEventCreate") || late_free.begun++) return;
    uint64_t frees = stats_of(late_free.pool).frees;
    pthread_create(&late_free.thread, NULL, free_late, NULL);
    while (stats_of(late_free.pool).frees == frees) sched_yield();
    __atomic_store_n(&late_free.freed, 1, __ATOMIC_RELEASE);
}

/* A stream whose retirement fails goes on: it still gets the events that others need. */
TEST(a_stream_whose_retirement_fails_is_not_retired)
{
    begin_with_devices(1, SIM_PACE_PROMPT);
    galloc_config config = config_limit(MIB(2));
    config.wait_limit_ms = 0;
    galloc_pool *pool = pool_new(&config);
    cudaStream_t b = stream_new(), s = stream_new(), d = stream_new();
    void *p = get(pool, KIB(64), b), *q = NULL;
    put(b, p, KIB(64), 1);
    OK(cudaStreamSynchronize(b));
    OK(galloc_record_stream(p, s));
    put(s, p, KIB(64), 2);
    sim_fail("cuEventRecord", 1, 0, cudaErrorUnknown);
    EXPECT_EQ(galloc_stream_retire(s), cudaErrorUnknown);
    sim_fail_clear();
    OK(galloc_free(p, b));
    OK(galloc_stream_retire(b));
    sim_run(-1);
    OK(galloc_pool_malloc(pool, &q, MIB(2), d));
    OK(galloc_free(q, d));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* The last event of a stream stands for that free as well, which then has none to record: the stream may be gone. */
TEST(a_free_during_the_retirement_records_nothing_after_it)
{
    sim_options options = sim_defaults();
    options.pace = SIM_PACE_STILL;
    options.panic = 0;
    begin_with(options);
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *p = get_used(pool, MIB(4), t, 1);
    OK(galloc_record_stream(p, s));
    order(t, s);
    look(s, p, MIB(4), 1);
    memset(&late_free, 0, sizeof late_free);
    late_free.pool = pool;
    late_free.stream = t;
    late_free.ptr = p;
    late_free.retires = pthread_self();
    sim_hook(free_beside, NULL);
    OK(galloc_stream_retire(s));
    stream_end(s);
    __atomic_store_n(&late_free.gone, 1, __ATOMIC_RELEASE);
    if (EXPECT(late_free.begun > 0)) pthread_join(late_free.thread, NULL);
    sim_hook(NULL, NULL);
    OK(galloc_free(get_used(pool, MIB(4), t, 2), t));
    pool_end(pool);
    finish();
}

static cudaStream_t retired_within;
static const char *retired_at;

static void retire_within(const char *function)
{
    cudaStream_t stream = retired_within;
    if (!stream || strcmp(function, retired_at)) return;
    retired_within = NULL;
    OK(galloc_stream_retire(stream));
}

/* A free has found that the stream cache takes no block of this size, and asks for the stream's id; another thread
   retires the stream meanwhile. There was nothing to record for; the free is later than that. */
TEST(a_free_that_a_retirement_overtakes_is_waited_for)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = tight_pool(MIB(18), COMPLETED | FOLLOWED | WAIT);
    come_into_play(pool, t);
    void *rest = get(pool, KIB(4), s), *p = get_used(pool, MIB(16), s, 1);
    retired_within = s;
    retired_at = "cuStreamGetId";
    sim_hook(retire_within, NULL);
    OK(galloc_free(p, s));
    sim_hook(NULL, NULL);
    EXPECT(!retired_within);
    p = get_used(pool, MIB(16), t, 2);
    OK(galloc_free(p, t));
    OK(galloc_free(rest, s));
    pool_end(pool);
    finish();
}

/* A stream that was retired allocates again, on the short path of each kind: it is not retired any more, and what it
   does with a block of another stream is waited for. */
TEST(an_allocation_takes_a_retirement_back)
{
    const char *conf[] = {"strategy:caching", "roundup_power2_divisions:2", "strategy:pooled"};
    for (int i = 0; i < 3; i++) {
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new(), u = stream_new();
        galloc_config config = config_limit(MIB(18));
        OK(galloc_config_parse(&config, conf[i], NULL, 0));
        galloc_pool *pool = pool_new(&config);
        void *p = get_used(pool, MIB(16), s, 1), *rest = get(pool, KIB(1), t), *next;
        come_into_play(pool, u);
        OK(galloc_record_stream(p, t));
        OK(galloc_stream_retire(t));
        sim_run(-1);
        next = get(pool, KIB(1), t);
        order(s, t);
        put(t, p, MIB(16), 2);
        OK(galloc_free(p, s));
        p = get_used(pool, MIB(16), u, 3);
        OK(galloc_free(p, u));
        OK(galloc_free(rest, t));
        OK(galloc_free(next, t));
        pool_end(pool);
        finish();
    }
}

/* An allocation has found the stream cache empty, and asks whether a capture forbids calls on the legacy stream.
   Another thread retires the stream meanwhile. What the stream does next is later than that. */
TEST(an_allocation_that_a_retirement_overtakes_takes_it_back)
{
    begin_still();
    cudaStream_t legacy = cudaStreamLegacy, s = stream_new(), t = stream_new();
    galloc_pool *pool = tight_pool(MIB(18), COMPLETED | WAIT);
    come_into_play(pool, t);
    void *p = get_used(pool, MIB(16), s, 1), *rest = get(pool, KIB(4), legacy), *next;
    OK(galloc_record_stream(p, legacy));
    retired_within = legacy;
    retired_at = "cuStreamIsCapturing";
    sim_hook(retire_within, NULL);
    next = get(pool, KIB(32), legacy);
    sim_hook(NULL, NULL);
    EXPECT(!retired_within);
    order(s, legacy);
    put(legacy, p, MIB(16), 2);
    OK(galloc_free(p, s));
    p = get_used(pool, MIB(16), t, 3);
    OK(galloc_free(p, t));
    OK(galloc_free(rest, legacy));
    OK(galloc_free(next, legacy));
    pool_end(pool);
    finish();
}

static struct first_call {
    galloc_pool *pool;
    cudaStream_t stream;
    int calls;
} first_call;

/* While a stream is asked for what must be known of it, another call names it too. */
static void call_first(const char *function)
{
    if (strcmp(function, "cuStreamGetCtx") || first_call.calls++) return;
    OK(galloc_free(get(first_call.pool, MIB(4), first_call.stream), first_call.stream));
}

TEST(a_stream_that_two_calls_name_first_is_one)
{
    begin();
    galloc_pool *pool = roomy_pool();
    cudaStream_t s = stream_new();
    galloc_stream_stats streams[4];
    int n = 0;
    first_call = (struct first_call){pool, s, 0};
    sim_hook(call_first, NULL);
    void *p = get(pool, 1000, s);
    sim_hook(NULL, NULL);
    EXPECT(first_call.calls > 0);
    OK(galloc_pool_streams(pool, streams, 4, &n));
    EXPECT_EQ(n, 1);
    OK(galloc_free(p, s));
    pool_end(pool);
    finish();
}

/* ---- waiting for just enough ------------------------------------------------------------------------------------- */

/* A stream that never ends is not waited for when the memory of another suffices. */
TEST(the_host_waits_for_no_more_than_it_needs)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new(), endless = stream_new();
    galloc_pool *pool = tight_pool(MIB(10), COMPLETED);
    void *p = get_used(pool, MIB(8), s, 1), *other = NULL;
    come_into_play(pool, t);
    OK(cudaMalloc(&other, 512));
    put(endless, other, 512, 1);
    sim_hold(endless, 1);
    OK(galloc_free(p, s));
    void *q = get_used(pool, MIB(8), t, 2);
    EXPECT(q == p);
    EXPECT_EQ(sim_findings(SIM_DEADLOCK), 0);
    EXPECT_EQ(sim_stream_done(endless), 0);
    sim_hold(endless, 0);
    OK(galloc_free(q, t));
    OK(cudaFree(other));
    pool_end(pool);
    finish();
}

/* What a per-thread stream has freed serves others once it is done, though nobody may wait. */
TEST(frees_on_a_per_thread_stream_serve_others_without_a_wait)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = config_limit(MIB(64));
    config.wait_limit_ms = 0;
    galloc_pool *pool = pool_new(&config);
    void *kept = get(pool, KIB(4), s), *p = get(pool, MIB(48), cudaStreamPerThread);
    OK(galloc_free(p, cudaStreamPerThread));
    OK(cudaDeviceSynchronize());
    OK(galloc_free(get_used(pool, MIB(40), s, 1), s));
    OK(galloc_free(kept, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* It waits for requests on default streams, too, also where it may not wait for the whole device. */
TEST(the_host_waits_for_requests_on_default_streams)
{
    cudaStream_t streams[] = {NULL, cudaStreamLegacy, cudaStreamPerThread};
    for (int i = 0; i < 3; i++) {
        begin();
        cudaStream_t s = stream_new();
        galloc_config config = config_limit(MIB(10));
        config.reuse = COMPLETED;
        config.wait_limit_ms = 5000;
        galloc_pool *pool = pool_new(&config);
        void *p = get(pool, MIB(8), s);
        come_into_play(pool, streams[i]);
        for (uint64_t n = 0; n < 1000; n++) put(s, p, MIB(8), n);
        OK(galloc_free(p, s));
        void *q = get_used(pool, MIB(8), streams[i], 2);
        EXPECT(q == p);
        OK(galloc_free(q, streams[i]));
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

/* Of two streams the host waits for the one whose memory is enough, also when the other freed some before and after. */
TEST(the_host_waits_for_the_stream_that_can_help)
{
    for (int turn = 0; turn < 2; turn++) {
        begin_still();
        cudaStream_t s[2] = {stream_new(), stream_new()}, t = stream_new();
        cudaStream_t helps = s[turn], endless = s[1 - turn];
        galloc_pool *pool = tight_pool(MIB(64), COMPLETED);
        void *q = get(pool, MIB(4), endless), *r = get(pool, MIB(4), endless), *p = get_used(pool, MIB(32), helps, 1);
        void *rest = get(pool, MIB(4), t);
        put(endless, q, MIB(4), 2);
        put(endless, r, MIB(4), 2);
        sim_hold(endless, 1);
        OK(galloc_free(q, endless));
        OK(galloc_free(p, helps));
        OK(galloc_free(r, endless));
        p = get_used(pool, MIB(48), t, 3);
        EXPECT_EQ(sim_findings(SIM_DEADLOCK), 0);
        sim_hold(endless, 0);
        OK(galloc_free(p, t));
        OK(galloc_free(rest, t));
        pool_end(pool);
        finish();
    }
}

/* ---- no deadlocks of galloc's making ----------------------------------------------------------------------------- */

/* S frees p and then waits for a flag that T sets later; T takes p by a wait. The point that T waits for lies before
   the flag, since it was taken at the free. */
TEST(a_mark_is_taken_at_the_free)
{
    for (int pace = -1; pace <= 1; pace++) {
        sim_options options = sim_defaults();
        options.pace = pace;
        begin_with(options);
        cudaStream_t s = stream_new(), t = stream_new();
        void *flag = NULL;
        OK(cudaMallocHost(&flag, sizeof(uint32_t)));
        *(uint32_t *)flag = 0;
        CUdeviceptr address = (CUdeviceptr)(uintptr_t)flag;
        galloc_pool *pool = tight_pool(MIB(10), COMPLETED | FOLLOWED | WAIT);
        void *p = get_used(pool, MIB(8), s, 1);
        come_into_play(pool, t);
        OK(galloc_free(p, s));
        EXPECT_EQ(cuStreamWaitValue32(s, address, 1, CU_STREAM_WAIT_VALUE_EQ), CUDA_SUCCESS);
        p = get_used(pool, MIB(8), t, 2);
        EXPECT_EQ(cuStreamWriteValue32(t, address, 1, 0), CUDA_SUCCESS);
        OK(galloc_free(p, t));
        sim_run(-1);
        EXPECT_EQ(sim_pending(), 0);
        OK(cudaFreeHost(flag));
        pool_end(pool);
        finish();
    }
}

/* ---- capture ----------------------------------------------------------------------------------------------------- */

/* What has no meaning for a graph is refused, and the capture is not harmed. */
TEST(what_a_captured_stream_is_refused_leaves_it_unharmed)
{
    begin();
    cudaStream_t s = stream_new(), captured = stream_new();
    cudaGraph_t graph = NULL;
    galloc_graph *group = NULL;
    galloc_pool *pool = pool_new(NULL);
    void *p = get_used(pool, MIB(8), s, 1);
    OK(galloc_graph_begin(&group, pool, captured));
    OK(galloc_graph_end(group));
    OK(cudaStreamSynchronize(s));
    OK(cudaStreamBeginCapture(captured, cudaStreamCaptureModeGlobal));
    put(captured, p, MIB(8), 2);
    EXPECT_EQ(galloc_resize(p, MIB(4), captured), cudaErrorNotSupported);
    EXPECT_EQ(galloc_stream_retire(captured), cudaErrorStreamCaptureUnsupported);
    EXPECT_EQ(galloc_graph_release(group, captured), cudaErrorStreamCaptureUnsupported);
    EXPECT_EQ(log_lines, 3);
    put(captured, p, MIB(8), 3);
    OK(cudaStreamEndCapture(captured, &graph));
    EXPECT(graph != NULL);
    OK(cudaGraphDestroy(graph));
    EXPECT_EQ(info_of(p).requested, MIB(8));
    void *q = get(pool, 100, captured);
    OK(galloc_free(q, captured));
    OK(galloc_free(p, s));
    OK(galloc_graph_release(group, s));
    expect_healthy(pool, 0);
    pool_end(pool);
    finish();
}

typedef struct capture_world {
    galloc_pool *pool, *other;
    cudaStream_t s, t;
} capture_world;

/* Every kind of call, with marks pending, so that there is something to poll, to wait for and to give back. */
static void *call_everything(void *arg)
{
    capture_world *w = arg;
    galloc_config config = galloc_config_default();
    w->other = pool_new(&config);
    void *p = get_used(w->pool, MIB(8), w->s, 1), *q = get_used(w->pool, MIB(4), w->t, 2), *r = NULL;
    order(w->s, w->t);
    OK(galloc_record_stream(p, w->t));
    OK(galloc_resize(p, MIB(6), w->s));
    OK(galloc_free(p, w->s));
    OK(galloc_free(q, w->t));
    if (galloc_pool_malloc(w->pool, &r, MIB(14), w->t) == cudaSuccess) {
        put(w->t, r, MIB(14), 3);
        OK(galloc_free_after(r, &w->t, 1));
    }
    (void)galloc_pool_reserve(w->pool, MIB(16));
    (void)galloc_pool_trim(w->pool, 0, NULL);
    OK(galloc_stream_retire(w->s));
    OK(galloc_free(get(w->other, MIB(3), w->s), w->s));
    if (galloc_pool_destroy(w->other) == cudaSuccess) w->other = NULL;
    (void)galloc_shutdown();
    return NULL;
}

TEST(no_call_breaks_a_capture)
{
    static const enum cudaStreamCaptureMode modes[] = {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal,
                                                       cudaStreamCaptureModeRelaxed};
    for (int round = 0; round < 24; round++) { /* mode, kind of segments, which thread calls, pace */
        sim_options options = sim_defaults();
        options.pace = round / 12 ? SIM_PACE_STILL : SIM_PACE_PROMPT;
        begin_with(options);
        galloc_config config = config_limit(MIB(24));
        config.expandable_segments = round / 3 % 2;
        capture_world w = {pool_new(&config), NULL, stream_new(), stream_new()};
        cudaStream_t captured = stream_new();
        cudaGraph_t graph = NULL;
        void *p = get(w.pool, MIB(2), captured);
        OK(cudaStreamBeginCapture(captured, modes[round % 3]));
        put(captured, p, MIB(2), 1);
        if (round / 6 % 2) {
            call_everything(&w);
        } else {
            pthread_t thread;
            EXPECT_EQ(pthread_create(&thread, NULL, call_everything, &w), 0);
            EXPECT_EQ(pthread_join(thread, NULL), 0);
        }
        put(captured, p, MIB(2), 2);
        OK(cudaStreamEndCapture(captured, &graph));
        EXPECT(graph != NULL);
        if (graph) OK(cudaGraphDestroy(graph));
        OK(galloc_free(p, captured));
        expect_healthy(w.pool, 0);
        if (w.other) pool_end(w.other);
        pool_end(w.pool);
        finish();
    }
}

/* ---- all of it at once ------------------------------------------------------------------------------------------- */

/* A pipeline over four streams whose blocks wander, in a pool that is too small for it. */
static void pipeline(uint64_t seed, int pace, int lag, int expandable, int reuse)
{
    enum { STREAMS = 4, SLOTS = 12 };
    sim_options options = sim_defaults();
    options.seed = seed;
    options.pace = pace;
    options.lag = lag;
    begin_with(options);
    dice d = {seed * 977 + (uint64_t)reuse};
    galloc_config config = config_limit(MIB(48));
    config.expandable_segments = expandable;
    config.reuse = reuse;
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s[STREAMS];
    void *p[SLOTS] = {NULL};
    size_t bytes[SLOTS];
    uint32_t home[SLOTS] = {0};
    for (int i = 0; i < STREAMS; i++) s[i] = stream_new();
    for (uint64_t i = 0; i < 150; i++) {
        uint32_t k = roll_below(&d, SLOTS), other = roll_below(&d, STREAMS);
        if (!p[k]) {
            home[k] = other;
            bytes[k] = roll_bytes(&d, MIB(9));
            if (galloc_pool_malloc(pool, &p[k], bytes[k], s[other]) == cudaSuccess) put(s[other], p[k], bytes[k], k);
            continue;
        }
        order(s[home[k]], s[other]);
        look(s[other], p[k], bytes[k], k);
        if (roll_below(&d, 2)) { /* its own stream frees it, with the other's use recorded */
            OK(galloc_record_stream(p[k], s[other]));
            OK(galloc_free(p[k], s[home[k]]));
        } else {
            OK(galloc_free(p[k], s[other]));
        }
        p[k] = NULL;
    }
    for (uint32_t k = 0; k < SLOTS; k++) OK(galloc_free(p[k], s[home[p[k] ? k : 0]]));
    expect_healthy(pool, 1);
    EXPECT(sim_physical_peak(0) <= MIB(48));
    pool_end(pool);
    finish();
}

TEST(pipelines_have_no_race_under_any_schedule)
{
    for (uint64_t seed = 1; seed <= 96; seed++)
        pipeline(test_seed() + seed, (int)(seed % 3) - 1, seed % 5 == 0 ? 20 : 0, seed % 7 != 0, (int)(seed % 8));
}

/* What a stream keeps from others counts also where it is parked. */
TEST(parked_pages_count_as_stranded)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_new(NULL);
    galloc_stream_stats streams[4];
    int n = 0;
    size_t most = 0;
    OK(galloc_free(get(pool, KIB(4), t), t));
    void *p = get(pool, MIB(64), s);
    put(s, p, MIB(64), 1);
    OK(galloc_free(p, s)); /* nothing is live */
    OK(galloc_pool_streams(pool, streams, 4, &n));
    for (int i = 0; i < n; i++) most = streams[i].stranded > most ? streams[i].stranded : most;
    EXPECT_EQ(most, MIB(64));
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* The rest of a block that is cut keeps the block's place by age. Else unfinished rests would stand before older blocks
   whose work is done, and another stream would not find these. */
TEST(rests_of_cut_blocks_do_not_hide_older_blocks_whose_work_is_done)
{
    enum { DONE = 100, CUT = 300, ALL = DONE + 100 + CUT + 80 };
    static void *p[ALL], *kept[ALL], *cut[CUT];
    begin_still();
    galloc_pool *pool = pool_limited((size_t)16 << 30);
    cudaStream_t s = stream_new(), t = stream_new();
    void *q = get(pool, 4096, t);
    for (int i = 0; i < ALL; i++) {
        p[i] = get(pool, i >= ALL - 80 - CUT && i < ALL - 80 ? MIB(6) : MIB(3), s);
        kept[i] = get(pool, 4096, s);
    }
    for (int i = 0; i < DONE; i++) OK(galloc_free(p[i], s));
    OK(cudaStreamSynchronize(s));
    OK(sim_launch(s, NULL, 0)); /* does not end before sim_run */
    for (int i = DONE; i < ALL; i++) OK(galloc_free(p[i], s));
    for (int i = 0; i < CUT; i++) {
        galloc_request request = {0};
        request.pool = pool, request.stream = s, request.bytes = MIB(5), request.alignment = 4096;
        OK(galloc_alloc(&cut[i], &request));
    }
    size_t held = stats_of(pool).reserved.current;
    for (int i = 0; i < DONE; i++) p[i] = get(pool, MIB(3), t);
    EXPECT_EQ(stats_of(pool).reserved.current, held);
    for (int i = 0; i < DONE; i++) OK(galloc_free(p[i], t));
    for (int i = 0; i < CUT; i++) OK(galloc_free(cut[i], s));
    for (int i = 0; i < ALL; i++) OK(galloc_free(kept[i], s));
    OK(galloc_free(q, t));
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

static void hand_over(galloc_pool *pool, cudaStream_t s, cudaStream_t t, int times)
{
    for (int i = 0; i < times; i++) {
        void *p = get_used(pool, MIB(8), s, 1 + (uint64_t)i);
        OK(galloc_free(p, s));
        p = get_used(pool, MIB(8), t, 100 + (uint64_t)i);
        OK(galloc_free(p, t));
    }
}

/* The note of a wait may have been another pair of streams' before; a wait is queued for each reuse all the same. */
TEST(new_streams_wait_for_each_other_from_the_start)
{
    begin_still();
    galloc_pool *pool = pool_limited(MIB(8));
    cudaStream_t s = stream_new(), t = stream_new();
    hand_over(pool, s, t, 10);
    OK(cudaDeviceSynchronize());
    OK(galloc_stream_retire(s));
    OK(galloc_stream_retire(t));
    stream_end(s);
    stream_end(t);
    OK(galloc_pool_trim(pool, 0, NULL));
    s = stream_new();
    t = stream_new();
    uint64_t before = stats_of(pool).waits;
    hand_over(pool, s, t, 5);
    EXPECT(stats_of(pool).waits > before);
    pool_end(pool);
    finish();
}

/* ---- a stream is forgotten while an event is due on it ----------------------------------------------------------- */

enum { KEPT = 64, FORGETS = 80 }; /* as many as are kept have a block */

static struct {
    galloc_pool *pool;
    pthread_t frees, forgets;
    cudaStream_t kept[KEPT], streams[FORGETS];
    int left, begun, done; /* left: steps of the free until then */
} due_beside;

/* All work is complete then, and so many new streams come that the pool looks for idle ones. */
static void *forget_idle_streams(void *unused)
{
    OK(galloc_pool_trim(due_beside.pool, 0, NULL));
    for (int i = 0; i < FORGETS; i++)
        OK(galloc_free(get(due_beside.pool, 4096, due_beside.streams[i]), due_beside.streams[i]));
    OK(galloc_pool_trim(due_beside.pool, 0, NULL));
    __atomic_store_n(&due_beside.done, 1, __ATOMIC_RELEASE);
    return unused;
}

static void forget_at_one_step(const char *function, int locks)
{
    (void)function, (void)locks;
    if (due_beside.begun || !pthread_equal(pthread_self(), due_beside.frees) || due_beside.left-- != 0) return;
    due_beside.begun = 1;
    EXPECT_EQ(pthread_create(&due_beside.forgets, NULL, forget_idle_streams, NULL), 0);
    for (int i = 0; i < 200 && !__atomic_load_n(&due_beside.done, __ATOMIC_ACQUIRE); i++) usleep(100);
}

TEST(a_stream_on_which_an_event_is_due_is_not_forgotten)
{
    for (int step = 0, came = 1; came; step++) {
        begin();
        memset(&due_beside, 0, sizeof due_beside);
        due_beside.pool = pool_new(NULL);
        due_beside.frees = pthread_self();
        due_beside.left = step;
        void *blocks[KEPT];
        for (int i = 0; i < KEPT; i++) blocks[i] = get(due_beside.pool, 4096, due_beside.kept[i] = stream_new());
        for (int i = 0; i < FORGETS; i++) due_beside.streams[i] = stream_new();
        cudaStream_t s = stream_new(), t = stream_new();
        void *p = get_used(due_beside.pool, MIB(4), s, 1);
        OK(galloc_free(get_used(due_beside.pool, 4096, t, 2), t));
        OK(galloc_record_stream(p, t));
        inside_on_step = forget_at_one_step;
        OK(galloc_free(p, s));
        __atomic_store_n(&inside_on_step, NULL, __ATOMIC_RELAXED); /* the other thread may be in a call still */
        came = due_beside.begun;
        if (came) EXPECT_EQ(pthread_join(due_beside.forgets, NULL), 0);
        expect_healthy(due_beside.pool, 0);
        OK(galloc_free(get_used(due_beside.pool, 4096, t, 2), t));
        for (int i = 0; i < KEPT; i++) OK(galloc_free(blocks[i], due_beside.kept[i]));
        pool_end(due_beside.pool);
        finish();
        EXPECT(step < 200);
    }
}

/* ---- an event is asked for while another one is recorded --------------------------------------------------------- */

static struct {
    galloc_pool *pool;
    cudaStream_t s, t;
    void *block; /* of s */
    int done;
} meanwhile;

static void *free_and_ask(void *unused)
{
    void *p;
    OK(galloc_free(meanwhile.block, meanwhile.s));
    EXPECT_EQ(galloc_pool_malloc(meanwhile.pool, &p, MIB(1), meanwhile.t), cudaErrorMemoryAllocation);
    return unused;
}

static void ask_beside(const char *function)
{
    pthread_t thread;
    if (meanwhile.done || strcmp(function, "cuEventRecord")) return;
    meanwhile.done = 1;
    EXPECT_EQ(pthread_create(&thread, NULL, free_and_ask, NULL), 0);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
}

/* The event under way does not cover what is freed meanwhile: the next call on the stream records one that does. */
TEST(an_event_that_is_asked_for_while_another_is_recorded_is_recorded_next)
{
    begin_still();
    galloc_config config = config_limit(MIB(6));
    config.wait_limit_ms = 0;
    config.lane_bytes = 0;
    memset(&meanwhile, 0, sizeof meanwhile);
    meanwhile.pool = pool_new(&config);
    meanwhile.s = stream_new();
    meanwhile.t = stream_new();
    void *p = get_used(meanwhile.pool, MIB(4), meanwhile.s, 1);
    meanwhile.block = get_used(meanwhile.pool, MIB(1), meanwhile.s, 1);
    void *q = get(meanwhile.pool, MIB(1), meanwhile.t);
    sim_hook(ask_beside, NULL);
    OK(galloc_free(p, meanwhile.s));
    sim_hook(NULL, NULL);
    EXPECT(meanwhile.done);
    p = get(meanwhile.pool, MIB(4), meanwhile.s);
    sim_run(-1);
    void *r = get(meanwhile.pool, MIB(1), meanwhile.t);
    OK(galloc_free(p, meanwhile.s));
    OK(galloc_free(q, meanwhile.t));
    OK(galloc_free(r, meanwhile.t));
    pool_end(meanwhile.pool);
    stream_end(meanwhile.s);
    stream_end(meanwhile.t);
    finish();
}

TEST_MAIN()
