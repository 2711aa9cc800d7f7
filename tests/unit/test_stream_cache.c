/* test_stream_cache.c - the fast path: what a stream's cache serves with no lock that others share and no call of CUDA
   but the looks at the stream; that it never gives out what it must not; and that what it holds is not lost to
   anybody. */

#include "setup.h"

enum { LEGACY, OWN, PER_THREAD, STREAM_KINDS };

static cudaStream_t stream_of_kind(int kind)
{
    return kind == LEGACY ? cudaStreamLegacy : kind == OWN ? stream_new() : cudaStreamPerThread;
}

/* One allocation and free, so that the next pair of this size is a hot one. */
static void warm(galloc_pool *pool, size_t bytes, cudaStream_t stream)
{
    for (int i = 0; i < 2; i++) OK(galloc_free(get(pool, bytes, stream), stream));
}

static inside_stream kept_of(galloc_pool *pool, cudaStream_t stream)
{
    inside_stream kept = inside_stream_of(pool, stream == cudaStreamLegacy ? 0 : stream_id(stream));
    EXPECT(kept.known);
    return kept;
}

/* ---- what a hot pair does ---------------------------------------------------------------------------------------- */

/* All locks are held by this very thread: whoever wants one stands still, and the alarm ends the program. */
TEST(a_hot_pair_takes_no_lock_that_others_share)
{
    for (int kind = 0; kind < STREAM_KINDS; kind++) {
        begin();
        cudaStream_t s = stream_of_kind(kind);
        galloc_pool *pool = NULL;
        void *p = NULL;
        OK(galloc_pool_default(&pool, 0));
        for (size_t bytes = KIB(64); bytes <= MIB(256); bytes *= 16) {
            for (int i = 0; i < 3; i++) {
                OK(galloc_malloc(&p, bytes, s));
                OK(galloc_free(p, s));
            }
            alarm(20);
            inside_hold_locks(pool, 1);
            for (int i = 0; i < 100; i++) {
                OK(galloc_malloc(&p, bytes, s));
                OK(galloc_free(p, s));
            }
            inside_hold_locks(pool, 0);
            alarm(0);
        }
        finish();
    }
}

/* Calls of CUDA that a pair makes, by kind of stream: the looks, and none of them when they are switched off, but with
   several devices the malloc's question whose default stream it is. */
TEST(a_hot_pair_calls_nothing_but_the_looks)
{
    static const long calls[2][2][STREAM_KINDS] = {{{0, 0, 0}, {4, 3, 6}}, {{1, 0, 1}, {4, 3, 6}}};
    static const size_t sizes[3] = {KIB(4), MIB(1), MIB(20)};
    for (int i = 0; i < 12 * STREAM_KINDS; i++) {
        int kind = i / 12, check = i / 3 % 2, devices = 1 + i / 6 % 2;
        size_t bytes = sizes[i % 3];
        begin_with_devices(devices, SIM_PACE_RANDOM);
        cudaStream_t s = stream_of_kind(kind);
        galloc_config config = galloc_config_default();
        config.stream_check = check;
        galloc_pool *pool = pool_new(&config);
        warm(pool, bytes, s);
        long before = sim_calls(NULL);
        for (int k = 0; k < 10; k++) OK(galloc_free(get(pool, bytes, s), s));
        EXPECT_EQ(sim_calls(NULL) - before, 10 * calls[devices - 1][check][kind]);
        pool_end(pool);
        finish();
    }
}

/* What the cache has not is asked of the pool with no more than that: on legacy, whether anything may be called on it
   at all. */
TEST(a_miss_calls_nothing_but_the_looks)
{
    static const long calls[2][STREAM_KINDS] = {{0, 0, 0}, {6, 4, 6}};
    for (int i = 0; i < 2 * STREAM_KINDS; i++) {
        int kind = i / 2, check = i % 2;
        begin();
        cudaStream_t s = stream_of_kind(kind);
        galloc_config config = galloc_config_default();
        config.stream_check = check;
        config.lane_bytes = 0;
        galloc_pool *pool = pool_new(&config);
        void *held = get(pool, MIB(4), s); /* so that the stream is never seen to have given everything back */
        warm(pool, MIB(20), s);
        long before = sim_calls(NULL);
        for (int k = 0; k < 10; k++) OK(galloc_free(get(pool, MIB(20) - KIB(4) * (size_t)k, s), s));
        EXPECT_EQ(sim_calls(NULL) - before, 10 * calls[check][kind]);
        OK(galloc_free(held, s));
        pool_end(pool);
        finish();
    }
}

/* Blocks of all sizes serve again as they are, the last one first. */
TEST(blocks_of_many_sizes_serve_again_as_they_are)
{
    begin();
    enum { N = 24 };
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *p[N];
    for (int i = 0; i < N; i++) p[i] = get(pool, KIB(1) + 512 * (size_t)(i / 2), s);
    for (int i = 0; i < N; i++) OK(galloc_free(p[i], s));
    galloc_stats before = stats_of(pool);
    for (int i = N - 1; i >= 0; i--) EXPECT(get(pool, KIB(1) + 512 * (size_t)(i / 2), s) == p[i]);
    EXPECT_EQ(stats_of(pool).splits, before.splits);
    EXPECT_EQ(stats_of(pool).merges, before.merges);
    EXPECT_EQ(stats_of(pool).hits, before.hits + N);
    for (int i = 0; i < N; i++) OK(galloc_free(p[i], s));
    expect_healthy(pool, 1);
    pool_end(pool);
    finish();
}

/* ---- what is known of a block in a cache bin --------------------------------------------------------------------- */

TEST(what_lies_in_a_cache_is_free)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    galloc_request request = {0};
    void *p = NULL;
    request.bytes = 1000;
    request.pool = pool;
    request.stream = s;
    request.tag = 7;
    warm(pool, 1000, s);
    for (int i = 0; i < 2; i++) {
        OK(galloc_alloc(&p, &request));
        galloc_stats stats = stats_of(pool);
        galloc_pointer info = info_of(p);
        EXPECT_EQ(info.state, GALLOC_STATE_USED);
        EXPECT_EQ(info.requested, 1000);
        EXPECT_EQ(info.tag, 7);
        EXPECT_EQ(stats.live.current, 1000);
        EXPECT_EQ(stats.blocks.current, 1);
        OK(galloc_free(p, s));
        EXPECT(kept_of(pool, s).blocks == 1);
        info = info_of(p);
        stats = stats_of(pool);
        EXPECT_EQ(info.state, GALLOC_STATE_FREE);
        EXPECT_EQ(info.requested, 0);
        EXPECT_EQ(info.tag, 0);
        EXPECT_EQ(info.stream_id, stream_id(s));
        EXPECT_EQ(stats.live.current + stats.allocated.current + stats.blocks.current, 0);
        EXPECT_EQ(stats.mallocs, (uint64_t)(3 + i));
        EXPECT_EQ(stats.frees, (uint64_t)(3 + i));
        EXPECT_EQ(galloc_pool_check(pool), 0);
    }
    pool_end(pool);
    finish();
}

TEST(a_second_free_is_refused_wherever_the_block_is)
{
    for (int way = 0; way < 3; way++) {
        begin();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = pool_new(NULL);
        warm(pool, 4096, s);
        warm(pool, 4096, t);
        void *p = get(pool, 4096, s);
        OK(galloc_free(p, s));
        if (way == 1) OK(galloc_pool_reserve(pool, 512)); /* out of the cache */
        cudaStream_t both[2] = {s, t};
        EXPECT_EQ(galloc_free(p, way == 2 ? t : s), cudaErrorInvalidDevicePointer);
        EXPECT(strstr(galloc_last_message(), "freed already") != NULL);
        EXPECT_EQ(galloc_free_after(p, both, 2), cudaErrorInvalidDevicePointer);
        EXPECT_EQ(galloc_record_stream(p, t), cudaErrorInvalidDevicePointer);
        EXPECT_EQ(galloc_resize(p, 512, s), cudaErrorInvalidDevicePointer);
        EXPECT_EQ(galloc_free((char *)p + 8, s), cudaErrorInvalidDevicePointer);
        expect_healthy(pool, 1);
        pool_end(pool);
        finish();
    }
}

/* ---- what must not be given out ---------------------------------------------------------------------------------- */

/* Unannounced: the handle is another stream's, and the first one's work is not done. */
TEST(a_cache_is_not_for_the_stream_that_has_the_handle_now)
{
    begin_still();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    warm(pool, MIB(1), s);
    void *p = get(pool, MIB(1), s);
    put(s, p, MIB(1), 1);
    OK(galloc_free(p, s));
    stream_end(s);
    cudaStream_t again = stream_new();
    EXPECT(again == s);
    void *q = get(pool, MIB(1), again);
    EXPECT(q != p);
    put(again, q, MIB(1), 2);
    OK(galloc_free(q, again));
    pool_end(pool);
    finish();
}

/* What S got from its cache, did not use, and gave back on T, comes after what S did with it before. */
TEST(what_left_a_cache_unused_may_be_freed_on_any_stream)
{
    for (int named = 0; named < 4; named++) {
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new(), u = stream_new();
        galloc_pool *pool = pool_new(NULL);
        warm(pool, MIB(1), s);
        warm(pool, MIB(1), t);
        void *p = get(pool, MIB(1), s);
        put(s, p, MIB(1), 1);
        OK(galloc_free(p, s));
        EXPECT(get(pool, MIB(1), s) == p);
        cudaStream_t both[2] = {t, u};
        if (named == 3) OK(galloc_stream_retire(s));
        if (named == 0 || named == 3) OK(galloc_free(p, t));
        if (named == 1) OK(galloc_free_after(p, both, 2));
        if (named == 2) OK(galloc_resize(p, KIB(512), t));
        void *q[4];
        for (int i = 0; i < 4; i++) q[i] = get_used(pool, i ? KIB(512) : MIB(1), t, 1);
        for (int i = 0; i < 4; i++) OK(galloc_free(q[i], t));
        if (named == 2) OK(galloc_free(p, s));
        pool_end(pool);
        finish();
    }
}

/* A block without marks goes into the cache of the stream that frees it, which may not be the one that got it. */
TEST(a_block_without_marks_is_kept_by_whom_it_was_freed_on)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_new(NULL);
    OK(galloc_pool_reserve(pool, MIB(8)));
    warm(pool, 512, s);
    warm(pool, 512, t);
    void *p = get_used(pool, KIB(64), s, 1);
    order(s, t);
    inside_stream before = kept_of(pool, t);
    OK(galloc_free(p, t));
    EXPECT_EQ(kept_of(pool, t).bytes, before.bytes + KIB(64));
    void *q = get_used(pool, KIB(64), t, 2);
    EXPECT(q == p);
    EXPECT_EQ(kept_of(pool, t).mallocs, before.mallocs + 1);
    OK(galloc_free(q, t));
    pool_end(pool);
    finish();
}

/* A block that a free on T has brought into T's cache is T's from its next use on, also in what is told of it. */
TEST(a_block_that_changed_over_to_a_stream_is_reported_with_it)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *q = get(pool, KIB(64), t), *r = get(pool, KIB(2), t);
    void *p = get(pool, KIB(1), s);
    EXPECT_EQ(info_of(p).stream_id, stream_id(s));
    OK(galloc_free(r, t)); /* the cache has room for what comes now */
    OK(galloc_free(p, t));
    void *e = get(pool, KIB(1), t);
    EXPECT(e == p);
    EXPECT_EQ(info_of(e).stream_id, stream_id(t));
    OK(galloc_free(e, t));
    OK(galloc_free(q, t));
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* A block with a wait for S in it that was never used on T: T may have it from its cache, U must wait for S as well. */
TEST(marks_of_others_keep_a_block_out_of_caches)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new(), u = stream_new();
    galloc_pool *pool = pool_limited(MIB(4));
    warm(pool, 512, t);
    warm(pool, 512, u);
    void *p[3];
    for (int i = 0; i < 3; i++) p[i] = get_used(pool, MIB(1), s, 1);
    for (int i = 0; i < 3; i++) OK(galloc_free(p[i], s));
    void *q = get(pool, MIB(1), t);
    EXPECT_EQ(stats_of(pool).waits, 1);
    OK(galloc_free(q, u));
    for (int i = 0; i < 3; i++) p[i] = get_used(pool, MIB(1), u, 1);
    for (int i = 0; i < 3; i++) OK(galloc_free(p[i], u));
    pool_end(pool);
    finish();
}

TEST(recorded_blocks_and_those_with_room_go_to_the_pool)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_new(NULL);
    galloc_request request = {0};
    void *p = get(pool, KIB(64), s), *room = NULL;
    warm(pool, KIB(64), s);
    request.bytes = MIB(2);
    request.max_bytes = MIB(8);
    request.pool = pool;
    request.stream = s;
    OK(galloc_alloc(&room, &request));
    put(s, p, KIB(64), 1);
    order(s, t);
    OK(galloc_record_stream(p, t));
    look(t, p, KIB(64), 1);
    OK(galloc_free(p, s));
    void *q = get(pool, KIB(64), s);
    put(s, q, KIB(64), 2);
    OK(galloc_free(room, s));
    EXPECT_EQ(galloc_pool_check(pool), 0);
    EXPECT_EQ(info_of(room).state, GALLOC_STATE_FREE);
    OK(galloc_free(q, s));
    pool_end(pool);
    finish();
}

/* After a reset the memory of cudaMalloc is gone, and what lay in fronts with it. Pages live on. */
TEST(a_reset_empties_the_caches_of_memory_that_is_gone)
{
    for (int kind = 0; kind < STREAM_KINDS; kind++) {
        for (int fixed = 0; fixed < 2; fixed++) {
            begin();
            galloc_config config = fixed ? config_fixed() : galloc_config_default();
            cudaStream_t s = stream_of_kind(kind);
            galloc_pool *pool = pool_new(&config);
            warm(pool, MIB(1), s);
            void *p = get(pool, MIB(1), s);
            put(s, p, MIB(1), 1);
            OK(galloc_free(p, s));
            OK(cudaDeviceReset());
            s = stream_of_kind(kind);
            p = get(pool, MIB(1), s);
            put(s, p, MIB(1), 2); /* a finding if there is nothing behind the address */
            OK(galloc_free(p, s));
            p = get(pool, MIB(1), s);
            put(s, p, MIB(1), 3);
            OK(galloc_free(p, s));
            pool_end(pool);
            finish();
        }
    }
}

/* A stream of another device was not reset, but the memory that its cache holds may be. */
TEST(caches_of_other_devices_lose_memory_too)
{
    begin_with_devices(2, SIM_PACE_RANDOM);
    galloc_pool *pool = pool_expandable(0);
    OK(cudaSetDevice(1));
    cudaStream_t s = stream_new();
    warm(pool, KIB(64), s);
    OK(cudaSetDevice(0));
    OK(cudaDeviceReset());
    OK(galloc_pool_reserve(pool, KIB(64))); /* here it is noticed */
    void *p = get(pool, KIB(64), s);
    EXPECT_EQ(inside_segment_is_lost(p), 0);
    void *q = get(pool, KIB(64), s); /* the address of what is gone is that of what was reserved */
    EXPECT(q != p);
    OK(galloc_free(p, s));
    OK(galloc_free(q, s));
    pool_end(pool);
    finish();
}

/* Nor does it take such memory later, when the program frees it. */
TEST(no_cache_takes_a_block_that_a_reset_has_ended)
{
    begin_with_devices(2, SIM_PACE_RANDOM);
    galloc_pool *pool = pool_expandable(0);
    OK(cudaSetDevice(1));
    cudaStream_t s = stream_new();
    warm(pool, KIB(64), s);
    void *lost = get(pool, KIB(64), s), *p[2];
    OK(cudaSetDevice(0));
    OK(cudaDeviceReset());
    OK(galloc_pool_reserve(pool, MIB(2))); /* here it is noticed */
    OK(cudaSetDevice(1));
    warm(pool, KIB(64), s);
    void *q = get(pool, KIB(64), s);
    OK(galloc_free(lost, s));
    for (int i = 0; i < 2; i++) {
        p[i] = get(pool, KIB(64), s);
        EXPECT(p[i] != lost);
        EXPECT_EQ(inside_segment_is_lost(p[i]), 0);
    }
    for (int i = 0; i < 2; i++) OK(galloc_free(p[i], s));
    OK(galloc_free(q, s));
    pool_end(pool);
    finish();
}

/* The stream of the free may be one of the new context, in the place of the one that the block was given to. */
TEST(a_lost_block_freed_on_a_new_stream_is_not_given_out)
{
    begin();
    galloc_pool *pool = pool_expandable(0);
    void *lost = get(pool, 4096, stream_new()), *p[3], *there;
    OK(cudaDeviceReset());
    OK(cudaMalloc(&there, MIB(2)));
    EXPECT(there == lost); /* or else the driver might give its addresses to the pool again */
    cudaStream_t s = stream_new();
    for (size_t i = 0; i < 2; i++) p[i] = get(pool, 8192 << i, s);
    OK(galloc_free(lost, s));
    p[2] = get(pool, 4096, s);
    EXPECT(p[2] != lost);
    EXPECT_EQ(inside_segment_is_lost(p[2]), 0);
    for (int i = 0; i < 3; i++) OK(galloc_free(p[i], s));
    OK(cudaFree(there));
    pool_end(pool);
    finish();
}

/* What was freed on a default stream after a reset is not taken for finished with what was freed before it. */
TEST(a_cache_of_before_a_reset_takes_nothing_after_it)
{
    begin_still();
    galloc_config config = config_limit(MIB(2));
    cudaStream_t legacy = cudaStreamLegacy;
    galloc_pool *pool = pool_new(&config);
    warm(pool, MIB(2), legacy);
    OK(cudaDeviceReset());
    void *p = get(pool, MIB(2), legacy);
    put(legacy, p, MIB(2), 1);
    OK(galloc_free(p, legacy));
    cudaStream_t t = stream_new();
    p = get(pool, MIB(2), t);
    put(t, p, MIB(2), 2);
    OK(galloc_free(p, t));
    pool_end(pool);
    finish();
}

/* ---- who confirms a free ----------------------------------------------------------------------------------------- */

/* What no cache takes is asked about at once. */
TEST(a_large_free_by_a_handle_that_came_back_is_the_new_streams)
{
    begin_still();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *p = get(pool, MIB(8), s), *kept = get(pool, KIB(64), s);
    unsigned long long id = stream_id(s);
    warm(pool, KIB(64), s);
    stream_end(s);
    cudaStream_t t = stream_new();
    EXPECT(t == s && stream_id(t) != id);
    put(t, p, MIB(8), 1);
    OK(galloc_free(p, t));
    EXPECT_EQ(info_of(p).stream_id, stream_id(t));
    OK(galloc_free(kept, t));
    EXPECT_EQ(galloc_pool_check(pool), 0);
    pool_end(pool);
    finish();
}

/* S has died, and T has its handle. A free on T goes into the cache of S, since nobody has looked at the id. The work
   of T is not done: neither T's next call nor a third stream's must have that memory. The block given last is as much
   nobody's, whatever its size. */
TEST(a_free_by_a_handle_that_came_back_is_nobodys)
{
    for (int i = 0; i < 6; i++) {
        int who = i % 3;
        size_t bytes = i < 3 ? KIB(64) : MIB(8), limit = bytes < MIB(8) ? MIB(2) : MIB(10);
        begin_still();
        cudaStream_t s = stream_new(), u = stream_new();
        galloc_pool *pool = pool_limited(limit);
        unsigned long long id = stream_id(s);
        void *q = get(pool, KIB(64), s), *p = get(pool, bytes, s), *r = NULL;
        if (bytes < MIB(8)) warm(pool, KIB(64), s);
        put(s, p, bytes, 1);
        OK(cudaStreamSynchronize(s)); /* so that the program may go on with its memory on T */
        stream_end(s);
        cudaStream_t t = stream_new();
        EXPECT(t == s && stream_id(t) != id);
        put(t, p, bytes, 2);
        put(t, q, KIB(64), 2);
        OK(galloc_free(p, t)); /* T is not asked who it is */
        EXPECT(inside_stream_of(pool, id).fresh_bytes >= bytes);
        EXPECT_EQ(galloc_pool_check(pool), 0);
        if (who == 0) r = get_used(pool, KIB(64), u, 1); /* from elsewhere */
        if (who == 1) r = get_used(pool, limit - bytes - KIB(128), u, 1);
        if (who == 2) r = get_used(pool, KIB(64), t, 1);
        EXPECT(r != p);
        OK(galloc_free(r, who == 2 ? t : u));
        OK(galloc_free(q, t));
        if (who == 1) { /* all of it: the devices are waited for */
            void *all = get_used(pool, limit, u, 1);
            OK(galloc_free(all, u));
        }
        pool_end(pool);
        finish();
    }
}

/* The cache of S is full of such frees when T frees: T is asked who it is. Its free is none of S, and serves others as
   soon as T is retired and done, though nobody may wait. */
TEST(a_full_cache_takes_no_free_by_a_handle_that_came_back)
{
    enum { SMALL = 64 };
    begin_still();
    cudaStream_t u = stream_new(), s = stream_new();
    galloc_config config = config_limit(MIB(2));
    config.wait_limit_ms = 0;
    galloc_pool *pool = pool_new(&config);
    unsigned long long id = stream_id(s);
    void *small[SMALL], *p = get(pool, KIB(1100), u), *q = get(pool, KIB(800), s), *kept;
    for (int i = 0; i < SMALL; i++) small[i] = get(pool, 512, s);
    kept = get(pool, 512, s);
    for (int i = 0; i < SMALL; i++) OK(galloc_free(small[i], s));
    OK(cudaStreamSynchronize(s)); /* so that the program may go on with its memory on T */
    stream_end(s);
    cudaStream_t t = stream_new();
    EXPECT(t == s && stream_id(t) != id);
    put(t, q, KIB(800), 1);
    OK(galloc_free(q, t));
    OK(galloc_stream_retire(t));
    OK(cudaStreamSynchronize(t));
    void *r = get_used(pool, KIB(800), u, 2);
    EXPECT(r == q);
    OK(galloc_free(r, u));
    OK(galloc_free(p, u));
    OK(galloc_free(kept, u));
    pool_end(pool);
    stream_end(t);
    stream_end(u);
    finish();
}

/* A free that comes after the device was waited for, and before the wait is over for the pool, is not covered by it:
   neither one that nobody confirms, nor one with a mark. */
static struct {
    const char *at;
    cudaStream_t stream;
    void *p;
    int named, freed;
} after_wait;

static void free_after_the_wait(const char *function)
{
    if (after_wait.freed || strcmp(function, after_wait.at) || !sim_calls("cuMemFreeHost")) return;
    after_wait.freed = 1;
    put(after_wait.stream, after_wait.p, KIB(512), 1);
    if (after_wait.named) OK(galloc_free_after(after_wait.p, &after_wait.stream, 1));
    else OK(galloc_free(after_wait.p, after_wait.stream));
}

TEST(a_free_after_the_device_was_waited_for_is_nobodys)
{
    for (int named = 0; named < 2; named++) {
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = pool_limited(MIB(2));
        void *p = NULL, *wall = get(pool, MIB(1), t);
        memset(&after_wait, 0, sizeof after_wait);
        after_wait.at = named ? "cuThreadExchangeStreamCaptureMode" : "cuDevicePrimaryCtxRelease";
        after_wait.stream = s;
        after_wait.named = named;
        after_wait.p = get(pool, KIB(512), s);
        void *other = get_used(pool, KIB(32), s, 1);
        if (named) OK(galloc_free_after(other, &s, 1)); /* why the context is waited for */
        else warm(pool, KIB(64), s);
        EXPECT_EQ(kept_of(pool, s).fresh_blocks, !named); /* why all devices are */
        void *rest = get(pool, KIB(416), t);
        sim_hook(free_after_the_wait, NULL);
        EXPECT_EQ(galloc_pool_malloc(pool, &p, KIB(512), t), cudaErrorMemoryAllocation);
        sim_hook(NULL, NULL);
        EXPECT_EQ(after_wait.freed, 1);
        if (p) put(t, p, KIB(512), 2);
        if (p) OK(galloc_free(p, t));
        if (!named) OK(galloc_free(other, s));
        OK(galloc_free(wall, t));
        OK(galloc_free(rest, t));
        pool_end(pool);
        finish();
    }
}

/* A call of the stream confirms what it freed, also while all devices are waited for because nobody had: one block
   serves the call, and the other is not lost. */
static struct {
    galloc_pool *pool;
    cudaStream_t stream;
    void *p;
} within_wait;

static void get_within_the_wait(const char *function)
{
    if (within_wait.p || strcmp(function, "cuMemFreeHost")) return;
    within_wait.p = get(within_wait.pool, KIB(64), within_wait.stream);
}

TEST(a_call_confirms_frees_while_the_device_is_waited_for)
{
    begin_still();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *p = get(pool, KIB(64), s), *q = get(pool, KIB(32), s);
    OK(galloc_free(p, s));
    OK(galloc_free(q, s));
    EXPECT_EQ(kept_of(pool, s).fresh_blocks, 2);
    memset(&within_wait, 0, sizeof within_wait);
    within_wait.pool = pool;
    within_wait.stream = s;
    sim_hook(get_within_the_wait, NULL);
    OK(galloc_pool_trim(pool, 0, NULL));
    sim_hook(NULL, NULL);
    EXPECT(within_wait.p == p);
    OK(galloc_free(p, s));
    EXPECT(get(pool, KIB(32), s) == q);
    OK(galloc_free(q, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* The same on another device: that is waited for as well. */
TEST(a_handle_may_come_back_on_another_device)
{
    begin_with_devices(2, SIM_PACE_STILL);
    cudaStream_t s = stream_new(), t;
    galloc_pool *pool = pool_limited(MIB(2));
    void *p = get(pool, KIB(256), s);
    warm(pool, KIB(256), s);
    stream_end(s);
    OK(cudaSetDevice(1));
    t = stream_new();
    void *other = NULL;
    OK(cudaMalloc(&other, 512));
    put(t, other, 512, 1);
    if (EXPECT(t == s)) OK(galloc_free(p, t));
    OK(cudaSetDevice(0));
    cudaStream_t u = stream_new();
    EXPECT_EQ(sim_stream_done(t), 0);
    OK(galloc_free(get_used(pool, MIB(2), u, 1), u));
    EXPECT_EQ(sim_stream_done(t), 1);
    OK(cudaFree(other));
    pool_end(pool);
    finish();
}

/* S lives: a call that asks confirms what was freed before, and all of it goes the usual ways. */
TEST(a_stream_that_lives_confirms_its_frees)
{
    begin_still();
    enum { N = 30 };
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_limited(MIB(2));
    void *p[N];
    for (int i = 0; i < N; i++) p[i] = get(pool, KIB(16) + 512 * (size_t)i, s);
    for (int i = 0; i < N; i++) OK(galloc_free(p[i], s));
    EXPECT_EQ(kept_of(pool, s).fresh_blocks, N);
    EXPECT(get(pool, KIB(16), s) == p[0]);
    EXPECT_EQ(kept_of(pool, s).fresh_blocks, 0);
    EXPECT_EQ(galloc_pool_check(pool), 0);
    OK(galloc_free(p[0], s));
    OK(galloc_free(get(pool, MIB(2), s), s));
    EXPECT_EQ(sim_blocking_calls(), 0);
    pool_end(pool);
    finish();
}

/* What nobody has confirmed is bounded, in blocks and bytes: the free that would be one too many asks. */
TEST(few_frees_go_unconfirmed)
{
    for (int large = 0; large < 2; large++) {
        begin();
        enum { N = 200 };
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_new(NULL);
        void *p[N];
        size_t blocks = 0, bytes = 0;
        for (int i = 0; i < N; i++) p[i] = get(pool, large ? KIB(300) : 512, s);
        for (int i = 0; i < N; i++) {
            OK(galloc_free(p[i], s));
            blocks = larger(blocks, kept_of(pool, s).fresh_blocks);
            bytes = larger(bytes, kept_of(pool, s).fresh_bytes);
            EXPECT_EQ(galloc_pool_check(pool), 0);
        }
        EXPECT(blocks > 0 && blocks <= inside_most_fresh_blocks());
        EXPECT(bytes > 0 && bytes <= MIB(2));
        pool_end(pool);
        finish();
    }
}

/* A peak that was told stays until it is reset, although a cache serves what reaches it. */
TEST(a_peak_that_was_told_does_not_fall)
{
    begin();
    galloc_pool *pool = pool_new(NULL);
    cudaStream_t s = stream_new();
    void *p = get(pool, 600, s);
    OK(galloc_free(p, s));
    EXPECT(get(pool, 1000, s) == p); /* from the cache: the pool's own counter has the 600 bytes of before */
    galloc_stats told = stats_of(pool);
    EXPECT_EQ(told.live.peak, 1000);
    OK(galloc_free(p, s));
    galloc_stats later = stats_of(pool);
    EXPECT_EQ(later.live.current, 0);
    EXPECT_EQ(later.live.peak, told.live.peak);
    EXPECT_EQ(later.allocated.peak, told.allocated.peak);
    EXPECT_EQ(later.blocks.peak, told.blocks.peak);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* A block in a cache is none that the program has: another one raises no peak, the same one again does. */
TEST(the_peak_of_blocks_goes_by_what_caches_hold)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *p = get(pool, 600, s);
    OK(galloc_free(p, s));
    void *q = get(pool, 600, t);
    EXPECT(q != p);
    EXPECT_EQ(stats_of(pool).blocks.peak, 1);
    EXPECT(get(pool, 600, s) == p);
    EXPECT_EQ(stats_of(pool).blocks.peak, 2);
    OK(galloc_free(p, s));
    EXPECT_EQ(stats_of(pool).blocks.current, 1);
    EXPECT_EQ(stats_of(pool).blocks.peak, 2); /* what was told does not fall */
    OK(galloc_free(q, t));
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* The counters, set back while there is something fresh, say what comes after. */
TEST(counters_are_set_back_with_what_caches_hold)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *p = get(pool, 700, s), *q = get(pool, 5000, s);
    warm(pool, 1000, s);
    OK(galloc_free(p, s));
    OK(galloc_pool_stats_reset(pool));
    galloc_stats stats = stats_of(pool);
    EXPECT_EQ(stats.mallocs + stats.frees + stats.hits, 0);
    EXPECT_EQ(stats.live.peak, 5000);
    EXPECT_EQ(stats.live.total + stats.allocated.total + stats.blocks.total, 0);
    EXPECT(get(pool, 600, s) == p);
    stats = stats_of(pool);
    EXPECT_EQ(stats.mallocs, 1);
    EXPECT_EQ(stats.frees, 0);
    EXPECT_EQ(stats.live.total, 600);
    EXPECT_EQ(stats.live.current, 5600);
    EXPECT_EQ(stats.blocks.peak, 2);
    OK(galloc_free(p, s));
    OK(galloc_free(q, s));
    pool_end(pool);
    finish();
}

/* What a cache has served is counted once, however often the pool takes over its counts. */
TEST(totals_have_what_a_cache_served_once)
{
    enum { PAIRS = 10, BYTES = 60000 };
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    for (uint64_t round = 1; round <= 4; round++) {
        for (int i = 0; i < PAIRS; i++) OK(galloc_free(get(pool, BYTES, s), s));
        if (round > 1) OK(galloc_pool_trim(pool, SIZE_MAX, NULL));
        galloc_stats stats = stats_of(pool);
        EXPECT_EQ(stats.mallocs, round * PAIRS);
        EXPECT_EQ(stats.frees, round * PAIRS);
        EXPECT_EQ(stats.blocks.total, round * PAIRS);
        EXPECT_EQ(stats.live.total, round * PAIRS * BYTES);
        EXPECT_EQ(stats.allocated.total, round * PAIRS * enough(BYTES, 512));
        EXPECT_EQ(stats.live.current + stats.allocated.current + stats.blocks.current, 0);
        EXPECT(stats.hits >= round * (PAIRS - 2));
    }
    pool_end(pool);
    stream_end(s);
    finish();
}

/* ---- nothing is lost --------------------------------------------------------------------------------------------- */

TEST(a_miss_sees_all_that_was_freed)
{
    begin_still();
    enum { N = 64 };
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_limited(MIB(2));
    void *p[N];
    for (int i = 0; i < N; i++) p[i] = get_used(pool, MIB(2) / N, s, 1);
    for (int i = 0; i < N; i++) OK(galloc_free(p[i], s));
    alarm(20);
    inside_hold_paging(pool, 1); /* by this thread: nothing is grown, moved or waited for */
    void *q = get(pool, MIB(2), s);
    inside_hold_paging(pool, 0);
    alarm(0);
    OK(galloc_free(q, s));
    pool_end(pool);
    finish();
}

/* Another call makes pages for a long time: whatever a request asks for besides its size, free memory serves it. */
TEST(free_memory_serves_all_requests_while_pages_are_made)
{
    static const galloc_request requests[] = {{.bytes = 5000, .alignment = 4096},
                                              {.bytes = MIB(3), .alignment = MIB(2)},
                                              {.bytes = MIB(1), .lifetime = GALLOC_LIFETIME_LONG},
                                              {.bytes = MIB(4), .tag = 7}};
    begin_still();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *p[4] = {NULL};
    OK(galloc_pool_reserve(pool, MIB(64)));
    OK(galloc_free(get(pool, MIB(1), s), s));
    alarm(20);
    inside_hold_paging(pool, 1);
    for (int i = 0; i < 4; i++) {
        galloc_request request = requests[i];
        request.stream = s;
        request.pool = pool;
        OK(galloc_alloc(&p[i], &request));
    }
    for (int i = 0; i < 4; i++) OK(galloc_free(p[i], s));
    inside_hold_paging(pool, 0);
    alarm(0);
    EXPECT_EQ(stats_of(pool).hits, 5);
    pool_end(pool);
    finish();
}

/* S does nothing more: what lies in its cache serves T all the same. */
TEST(an_idle_cache_keeps_nothing_from_others)
{
    begin();
    enum { N = 8 };
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_limited(MIB(2));
    void *p[N];
    for (int i = 0; i < N; i++) p[i] = get(pool, MIB(2) / N, s);
    for (int i = 0; i < N; i++) OK(galloc_free(p[i], s));
    OK(galloc_free(get(pool, MIB(2), t), t));
    EXPECT_EQ(kept_of(pool, s).blocks, 0);
    pool_end(pool);
    finish();
}

/* Nor do several, each with a block that a call has confirmed and one that none has. */
TEST(idle_caches_keep_nothing_from_others)
{
    enum { STREAMS = 4 };
    for (int trim = 0; trim < 2; trim++) {
        begin_still();
        cudaStream_t s[STREAMS], t = stream_new();
        galloc_pool *pool = pool_limited(MIB(2));
        for (int i = 0; i < STREAMS; i++) {
            s[i] = i ? stream_new() : cudaStreamLegacy;
            void *p = get(pool, KIB(256), s[i]), *q = get(pool, KIB(128), s[i]);
            OK(galloc_free(p, s[i]));
            OK(galloc_free(q, s[i]));
            EXPECT(get(pool, KIB(256), s[i]) == p);
            OK(galloc_free(p, s[i]));
        }
        for (int i = 0; i < STREAMS; i++) EXPECT_EQ(kept_of(pool, s[i]).blocks, 2);
        for (int i = 0; i < STREAMS; i++) EXPECT_EQ(kept_of(pool, s[i]).fresh_blocks, 1);
        galloc_stream_stats told[STREAMS] = {{0}};
        OK(galloc_pool_streams(pool, told, STREAMS, NULL));
        for (int i = 0; i < STREAMS; i++) EXPECT_EQ(told[i].stranded, KIB(256 + 128));
        for (int i = 0; i < STREAMS; i++) EXPECT_EQ(told[i].unmarked, KIB(256 + 128));
        if (trim) OK(galloc_pool_trim(pool, 0, NULL));
        else OK(galloc_free(get_used(pool, MIB(2), t, 1), t));
        for (int i = 0; i < STREAMS; i++) EXPECT_EQ(kept_of(pool, s[i]).blocks, 0);
        if (trim) EXPECT_EQ(sim_physical(0), 0);
        pool_end(pool);
        for (int i = 1; i < STREAMS; i++) stream_end(s[i]);
        stream_end(t);
        finish();
    }
}

TEST(trim_reserve_and_destroy_empty_the_caches)
{
    for (int what = 0; what < 3; what++) {
        begin();
        cudaStream_t s = what == 1 ? cudaStreamLegacy : stream_new();
        galloc_pool *pool = pool_new(NULL);
        warm(pool, KIB(64), s);
        EXPECT_EQ(kept_of(pool, s).blocks, 1);
        if (what == 0) OK(galloc_pool_trim(pool, 0, NULL));
        if (what == 0) EXPECT_EQ(sim_physical(0), 0);
        if (what == 1) OK(galloc_pool_reserve(pool, MIB(2)));
        if (what < 2) EXPECT_EQ(kept_of(pool, s).blocks, 0);
        pool_end(pool);
        finish();
    }
}

static void *free_and_end(void *pool)
{
    warm(pool, KIB(64), cudaStreamPerThread);
    return NULL;
}

TEST(a_thread_that_ends_leaves_nothing_in_its_cache)
{
    begin();
    galloc_pool *pool = pool_new(NULL), *other = pool_new(NULL);
    pthread_t thread;
    EXPECT_EQ(pthread_create(&thread, NULL, free_and_end, pool), 0);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
    EXPECT_EQ(inside_stream_at(pool, 0).blocks, 0);
    EXPECT_EQ(galloc_pool_check(pool), 0);
    EXPECT_EQ(pthread_create(&thread, NULL, free_and_end, other), 0); /* watched again after a pool has ended */
    pool_end(pool);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
    EXPECT_EQ(inside_stream_at(other, 0).blocks, 0);
    pool_end(other);
    finish();
}

static volatile int gone_on;

static void pair_by_default_pool(void)
{
    void *p = NULL;
    OK(galloc_malloc(&p, KIB(64), cudaStreamPerThread));
    OK(galloc_free(p, cudaStreamPerThread));
}

static void *outlive_a_shutdown(void *unused)
{
    (void)unused;
    pair_by_default_pool();
    __atomic_store_n(&gone_on, 1, __ATOMIC_RELEASE);
    while (__atomic_load_n(&gone_on, __ATOMIC_ACQUIRE) < 2) usleep(500);
    pair_by_default_pool();
    return NULL;
}

TEST(a_thread_that_outlives_a_shutdown_leaves_nothing_in_its_cache)
{
    begin();
    galloc_pool *pool = NULL;
    pthread_t thread;
    gone_on = 0;
    EXPECT_EQ(pthread_create(&thread, NULL, outlive_a_shutdown, NULL), 0);
    while (!__atomic_load_n(&gone_on, __ATOMIC_ACQUIRE)) usleep(500);
    OK(galloc_shutdown());
    __atomic_store_n(&gone_on, 2, __ATOMIC_RELEASE);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
    OK(galloc_pool_default(&pool, 0));
    EXPECT(inside_streams(pool) > 0);
    EXPECT_EQ(inside_stream_at(pool, 0).blocks, 0);
    finish();
}

/* How many keys of thread-specific values can be made. */
static int keys_left(void)
{
    enum { MOST = 4096 };
    static pthread_key_t key[MOST];
    int n = 0;
    while (n < MOST && !pthread_key_create(&key[n], NULL)) n++;
    for (int i = 0; i < n; i++) OK(pthread_key_delete(key[i]));
    return n;
}

/* After galloc_shutdown no thread calls anything of galloc's at its end: it may be unloaded. */
TEST(a_shutdown_gives_back_what_tells_of_threads_that_end)
{
    begin();
    pair_by_default_pool();
    int left = keys_left();
    OK(galloc_shutdown());
    EXPECT_EQ(keys_left(), left + 1);
    finish();
}

static galloc_pool *many_pools[40];

/* Forty pools, and a hundred streams after them: more than a thread remembers ways to. */
static void *free_use_others_and_end(void *unused)
{
    enum { STREAMS = 100 };
    cudaStream_t s[STREAMS];
    (void)unused;
    for (int i = 0; i < 40; i++) warm(many_pools[i], KIB(64), cudaStreamPerThread);
    for (int i = 0; i < STREAMS; i++) warm(many_pools[0], 512, s[i] = stream_new());
    for (int i = 0; i < STREAMS; i++) {
        OK(galloc_stream_retire(s[i]));
        stream_end(s[i]);
    }
    return NULL;
}

/* The main thread's own, which goes on, keeps what it has. */
TEST(a_thread_that_ends_leaves_nothing_in_caches_it_has_forgotten)
{
    begin();
    pthread_t thread;
    for (int i = 0; i < 40; i++) many_pools[i] = pool_new(NULL);
    warm(many_pools[0], KIB(64), cudaStreamPerThread);
    const unsigned long long mine = stream_id(cudaStreamPerThread);
    EXPECT(inside_stream_of(many_pools[0], mine).known);
    EXPECT_EQ(pthread_create(&thread, NULL, free_use_others_and_end, NULL), 0);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
    for (int i = 0; i < 40; i++)
        for (size_t k = 0; k < inside_streams(many_pools[i]); k++) {
            inside_stream kept = inside_stream_at(many_pools[i], k);
            EXPECT_EQ(kept.blocks, !i && kept.id == mine);
        }
    for (int i = 0; i < 40; i++) pool_end(many_pools[i]);
    finish();
}

/* ---- bounds and marks -------------------------------------------------------------------------------------------- */

/* With a second stream in play what a cache holds counts as unmarked: 2 MiB of it are marked at the free. */
TEST(what_a_cache_holds_counts_as_unmarked)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *p[64];
    warm(pool, 512, t);
    for (int i = 0; i < 64; i++) p[i] = get(pool, KIB(64), s);
    long events = sim_calls("cuEventRecord");
    for (int i = 0; i < 64; i++) {
        OK(galloc_free(p[i], s));
        inside_stream kept = kept_of(pool, s);
        EXPECT(kept.bytes + kept.unmarked < MIB(2));
    }
    EXPECT_EQ(sim_calls("cuEventRecord") - events, 2);
    pool_end(pool);
    finish();
}

/* A free elsewhere marks a cached block's earlier use again: the stream's unmarked bytes leave its cache less room. */
TEST(a_free_elsewhere_leaves_the_cache_less_room)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *other = get(pool, 4096, t), *p = get(pool, KIB(900), s), *q = get(pool, KIB(901), s);
    void *keep = get(pool, 4096, s), *moved = get(pool, MIB(1), s);
    OK(galloc_free(moved, s));
    moved = get(pool, MIB(1), s);
    OK(galloc_free(moved, t));
    void *freed[] = {p, q};
    for (int i = 0; i < 2; i++) {
        OK(galloc_free(freed[i], s));
        inside_stream kept = kept_of(pool, s);
        EXPECT(kept.bytes + kept.unmarked <= MIB(2));
    }
    OK(galloc_free(keep, s));
    OK(galloc_free(other, t));
    pool_end(pool);
    finish();
}

/* What a cache serves was free: the peak of free memory counts it, though nobody has read the counters meanwhile. */
TEST(the_peak_of_cached_counts_what_a_cache_holds)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_new(NULL);
    OK(galloc_free(get(pool, MIB(1), s), s));
    void *q = get(pool, MIB(2), t), *p = get(pool, MIB(1), s);
    galloc_stats stats = stats_of(pool);
    EXPECT(stats.cached.peak >= stats.cached.current + MIB(1));
    OK(galloc_free(p, s));
    OK(galloc_free(q, t));
    pool_end(pool);
    finish();
}

TEST(a_cache_is_bounded)
{
    begin();
    enum { N = 2000 };
    static void *p[N];
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    size_t most = 0, bytes = 0;
    for (int i = 0; i < N; i++) p[i] = get(pool, i % 8 ? 512 : KIB(700), s);
    for (int i = 0; i < N; i++) {
        OK(galloc_free(p[i], s));
        inside_stream kept = kept_of(pool, s);
        most = larger(most, kept.blocks);
        bytes = larger(bytes, kept.bytes);
    }
    EXPECT(most > 8 && most <= inside_most_blocks());
    EXPECT(bytes > KIB(700) && bytes <= MIB(2));
    pool_end(pool);
    finish();
}

/* Beside other streams, also that of the per-thread stream: others can have what it has freed, once that is done. */
TEST(the_cache_of_a_per_thread_stream_is_bounded_beside_others)
{
    enum { N = 5 };
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = config_limit(MIB(32));
    config.lane_bytes = MIB(64);
    config.wait_limit_ms = 0;
    galloc_pool *pool = pool_new(&config);
    void *p[N], *kept = get(pool, KIB(4), s);
    for (int i = 0; i < N; i++) p[i] = get(pool, MIB(4), cudaStreamPerThread);
    for (int i = 0; i < N; i++) {
        OK(galloc_free(p[i], cudaStreamPerThread));
        EXPECT(kept_of(pool, cudaStreamPerThread).bytes <= MIB(2));
    }
    OK(cudaDeviceSynchronize());
    void *q = get(pool, MIB(24), s);
    OK(galloc_free(q, s));
    OK(galloc_free(kept, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* Small blocks meet the bound on their number long before that on their bytes. */
TEST(a_cache_of_small_blocks_is_bounded)
{
    begin();
    enum { N = 600 };
    void *p[N];
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    size_t most = 0;
    for (int i = 0; i < N; i++) p[i] = get(pool, 512, s);
    for (int i = 0; i < N; i++) {
        OK(galloc_free(p[i], s));
        most = larger(most, kept_of(pool, s).blocks);
        EXPECT_EQ(galloc_pool_check(pool), 0);
    }
    EXPECT_EQ(most, inside_most_blocks());
    pool_end(pool);
    finish();
}

/* lane_bytes is what the cache of a pool's one stream holds at most, and no more than 2 MiB of it may be unconfirmed,
   also in an empty cache. */
TEST(lane_bytes_is_what_a_cache_holds)
{
    static const size_t lane_bytes[] = {0, 1, KIB(64), MIB(1), MIB(16), MIB(64)};
    for (size_t i = 0; i < sizeof lane_bytes / sizeof *lane_bytes; i++) {
        for (int check = 0; check < 2; check++) {
            begin();
            cudaStream_t s = stream_new();
            galloc_config config = galloc_config_default();
            config.lane_bytes = lane_bytes[i];
            config.stream_check = check;
            galloc_pool *pool = pool_new(&config);
            void *p[80];
            size_t most = 0;
            for (int k = 0; k < 80; k++)
                p[k] = get(pool, !k && lane_bytes[i] > MIB(5) ? MIB(5) : k % 2 ? MIB(1) : 512, s);
            for (int k = 0; k < 80; k++) {
                OK(galloc_free(p[k], s));
                inside_stream kept = kept_of(pool, s);
                most = larger(most, kept.bytes);
                EXPECT(kept.bytes <= lane_bytes[i]);
                EXPECT(!check || kept.fresh_bytes <= MIB(2));
                EXPECT_EQ(galloc_pool_check(pool), 0);
            }
            EXPECT(most + MIB(1) > smaller(lane_bytes[i], MIB(40)));
            pool_end(pool);
            finish();
        }
    }
}

/* With several streams too, lane_bytes 0 means that there are no caches: each free goes to the pool. */
TEST(without_lane_bytes_no_stream_has_a_cache)
{
    for (int check = 0; check < 2; check++) {
        begin_still();
        cudaStream_t s[2] = {stream_new(), stream_new()};
        galloc_config config = galloc_config_default();
        config.lane_bytes = 0;
        config.stream_check = check;
        galloc_pool *pool = pool_new(&config);
        void *p[2][2];
        for (int i = 0; i < 4; i++) p[i / 2][i % 2] = get(pool, KIB(64), s[i / 2]);
        for (int i = 0; i < 4; i++) {
            OK(galloc_free(p[i / 2][i % 2], s[i / 2]));
            EXPECT_EQ(kept_of(pool, s[i / 2]).blocks, 0);
            EXPECT_EQ(kept_of(pool, s[i / 2]).bytes, 0);
        }
        pool_end(pool);
        for (int i = 0; i < 2; i++) {
            if (!check) OK(galloc_stream_retire(s[i]));
            stream_end(s[i]);
        }
        finish();
    }
}

TEST(large_blocks_are_served_by_a_cache_that_may_hold_them)
{
    for (int check = 0; check < 2; check++) {
        for (int large = 0; large < 2; large++) {
            begin();
            cudaStream_t s = stream_new();
            galloc_config config = galloc_config_default();
            config.lane_bytes = large ? MIB(32) : MIB(1);
            config.stream_check = check;
            galloc_pool *pool = pool_new(&config);
            void *p[3];
            uint64_t splits = 0;
            for (int round = 0; round < 4; round++) {
                for (int k = 0; k < 3; k++) p[k] = get(pool, MIB(5) + MIB(1) * (size_t)k, s);
                for (int k = 0; k < 3; k++) OK(galloc_free(p[k], s));
                if (!round) splits = stats_of(pool).splits;
            }
            EXPECT_EQ(stats_of(pool).splits == splits, large);
            pool_end(pool);
            finish();
        }
    }
}

/* A large block that was just allocated is freed into an empty cache: the cache shows that it has it, and all bytes
   serve the next request of another size. */
TEST(a_large_block_in_a_cache_serves_other_sizes)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    for (int i = 0; i < 3; i++) OK(galloc_free(get(pool, MIB(40), s), s));
    EXPECT_EQ(kept_of(pool, s).bytes, MIB(40));
    OK(galloc_free(get(pool, KIB(4), s), s)); /* a miss, and a free that the cache takes beside nothing */
    EXPECT_EQ(kept_of(pool, s).bytes, KIB(4));
    for (int i = 0; i < 3; i++) OK(galloc_free(get(pool, MIB(40), s), s));
    void *p[3];
    for (int i = 0; i < 3; i++) p[i] = get(pool, MIB(13), s);
    EXPECT_EQ(stats_of(pool).reserved.current, MIB(40));
    expect_healthy(pool, 1);
    for (int i = 0; i < 3; i++) OK(galloc_free(p[i], s));
    p[0] = get(pool, KIB(8), s); /* confirmed by the free of another block, it leaves with that one */
    OK(galloc_free(get(pool, MIB(39), s), s));
    OK(galloc_free(p[0], s));
    EXPECT_EQ(kept_of(pool, s).bytes, MIB(39) + KIB(8));
    EXPECT_EQ(kept_of(pool, s).fresh_bytes, 0);
    OK(galloc_free(get(pool, KIB(16), s), s));
    EXPECT_EQ(kept_of(pool, s).bytes, KIB(16));
    EXPECT_EQ(galloc_pool_check(pool), 0);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* Nor does it matter whether the pool had the block at hand for it, or made it. */
TEST(a_large_block_that_a_miss_has_found_enters_the_cache)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    OK(galloc_pool_reserve(pool, MIB(64)));
    warm(pool, KIB(4), s);
    void *p = get(pool, MIB(40), s);
    EXPECT_EQ(stats_of(pool).reserved.current, MIB(64)); /* else it was not at hand */
    OK(galloc_free(p, s));
    EXPECT_EQ(kept_of(pool, s).bytes, MIB(40));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* A large block that has left the cache changes nothing of its bound. */
TEST(a_cache_has_its_bound_after_a_large_block_was_in_it)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *p[20], *small, *large;
    size_t most = 0;
    for (int i = 0; i < 20; i++) p[i] = get(pool, KIB(256), s);
    small = get(pool, KIB(8), s);
    OK(galloc_free(get(pool, MIB(40), s), s));
    OK(galloc_free(small, s)); /* confirms both */
    EXPECT_EQ(kept_of(pool, s).bytes, MIB(40) + KIB(8));
    EXPECT_EQ(kept_of(pool, s).fresh_bytes, 0);
    large = get(pool, MIB(40), s);
    EXPECT_EQ(kept_of(pool, s).bytes, KIB(8));
    EXPECT_EQ(galloc_pool_check(pool), 0);
    for (int i = 0; i < 20; i++) {
        OK(galloc_free(p[i], s));
        most = larger(most, kept_of(pool, s).bytes);
    }
    EXPECT(most <= MIB(1) && most > KIB(700));
    EXPECT_EQ(galloc_pool_check(pool), 0);
    OK(galloc_free(large, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* Where a free block was filed since, or the block is not the last one, the search may choose another place. */
TEST(a_large_block_enters_no_cache_when_another_place_may_serve_better)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    OK(galloc_pool_reserve(pool, MIB(256)));
    void *hole = get(pool, MIB(20), s), *wall = get(pool, MIB(2), s);
    void *p = get(pool, MIB(20), s);
    OK(galloc_free(hole, s));
    OK(galloc_free(p, s)); /* merges with the rest of the reserved pages */
    EXPECT(get(pool, MIB(20), s) == hole);
    p = get(pool, MIB(20), s);
    void *q = get(pool, MIB(30), s);
    OK(galloc_free(p, s));
    EXPECT_EQ(kept_of(pool, s).bytes, 0);
    OK(galloc_free(q, s));
    OK(galloc_free(wall, s));
    OK(galloc_free(hole, s));
    expect_healthy(pool, 1);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* A large block that no call has confirmed when a second stream comes goes to the pool with the first stream's next
   call, of whatever size, with an event: then the second stream may have it. */
TEST(a_large_block_is_left_to_a_second_stream)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *small = get(pool, KIB(64), s);
    OK(galloc_free(get(pool, MIB(40), s), s));
    EXPECT_EQ(kept_of(pool, s).fresh_bytes, MIB(40));
    OK(galloc_free(get(pool, KIB(4), t), t));
    OK(galloc_free(small, s));
    for (int k = 0; k < 20; k++) OK(galloc_free(get(pool, KIB(64), s), s));
    EXPECT(kept_of(pool, s).bytes < MIB(1));
    OK(cudaDeviceSynchronize());
    void *p = get_used(pool, MIB(40), t, 1);
    EXPECT(stats_of(pool).reserved.current < MIB(60));
    OK(galloc_free(p, t));
    expect_healthy(pool, 1);
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* A second stream finds what the cache of the first one held, and from then on large blocks are nobody's alone. The
   block is confirmed by a later call on its stream, or by the wait for the device, unless each call confirms. */
TEST(a_large_block_leaves_the_cache_when_a_second_stream_comes)
{
    for (int i = 0; i < 4; i++) {
        int check = i % 2, again = i / 2;
        begin();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_config config = galloc_config_default();
        config.memory_limit = MIB(64);
        config.stream_check = check;
        galloc_pool *pool = pool_new(&config);
        OK(galloc_pool_reserve(pool, MIB(64)));
        for (int k = 0; k < 3; k++) OK(galloc_free(get(pool, MIB(40), s), s));
        EXPECT_EQ(kept_of(pool, s).bytes, MIB(40));
        void *p = get(pool, KIB(4), t); /* of memory that nobody has used */
        EXPECT_EQ(kept_of(pool, s).bytes, check ? MIB(40) : 0);
        EXPECT_EQ(galloc_pool_check(pool), 0);
        if (again) OK(galloc_free(get(pool, KIB(8), s), s));
        EXPECT_EQ(kept_of(pool, s).bytes, !again && check ? MIB(40) : again ? KIB(8) : 0);
        void *q = get_used(pool, MIB(40), t, 1);
        OK(galloc_free(p, t));
        OK(galloc_free(q, t));
        for (int k = 0; k < 3; k++) OK(galloc_free(get(pool, MIB(40), s), s));
        EXPECT_EQ(kept_of(pool, s).bytes, 0);
        expect_healthy(pool, 1);
        pool_end(pool);
        if (!check) OK(galloc_stream_retire(s));
        stream_end(s);
        stream_end(t);
        finish();
    }
}

/* When a second stream comes, a cache of the first one with more than 2 MiB goes to the pool: that stream may never
   come again, and nobody could be given what is in its cache. */
TEST(lane_bytes_do_not_bind_memory_once_there_are_more_streams)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_config config = galloc_config_default();
    config.lane_bytes = MIB(64);
    galloc_pool *pool = pool_new(&config);
    void *p[40];
    OK(galloc_pool_reserve(pool, MIB(64))); /* so that the call that is the first on its stream grows nothing */
    for (int k = 0; k < 40; k++) p[k] = get(pool, MIB(1), s);
    for (int k = 0; k < 40; k++) OK(galloc_free(p[k], s));
    EXPECT(kept_of(pool, s).bytes > MIB(32));
    void *q = get(pool, 512, t);
    EXPECT(kept_of(pool, s).bytes <= MIB(2));
    expect_healthy(pool, 1);
    for (int k = 0; k < 40; k++) p[k] = get(pool, MIB(1), s);
    for (int k = 0; k < 40; k++) {
        OK(galloc_free(p[k], s));
        inside_stream kept = kept_of(pool, s);
        EXPECT(kept.bytes + kept.unmarked < MIB(2));
    }
    OK(galloc_free(q, t));
    pool_end(pool);
    finish();
}

/* It may be the stream's last call for long, and others are to have its memory. Few frees are not worth an event. */
TEST(many_frees_into_a_cache_end_with_an_event)
{
    for (int many = 0; many < 2; many++) {
        begin_still();
        galloc_pool *pool = pool_new(NULL);
        cudaStream_t s = stream_new(), t = stream_new();
        void *other = get(pool, KIB(4), t), *p = get(pool, KIB(4), s), *q = NULL;
        OK(galloc_free(get(pool, KIB(4), s), s));
        uint64_t marks = stats_of(pool).marks, hits = inside_stream_of(pool, stream_id(s)).mallocs;
        for (int i = 0; i < (many ? 100 : 10); i++) {
            q = get(pool, KIB(4), s); /* so the stream has a block all the time */
            OK(galloc_free(p, s));
            p = q;
        }
        EXPECT(inside_stream_of(pool, stream_id(s)).mallocs >= hits + (many ? 90 : 9));
        EXPECT_EQ(stats_of(pool).marks, marks);
        OK(galloc_free(p, s));
        EXPECT_EQ(stats_of(pool).marks, marks + (uint64_t)many);
        OK(galloc_free(other, t));
        pool_end(pool);
        stream_end(s);
        stream_end(t);
        finish();
    }
}

/* Somebody waits for a mark of S: its next call, hot or not, takes one. */
TEST(a_mark_that_is_asked_for_is_taken_by_the_next_call)
{
    for (int mallocs = 0; mallocs < 2; mallocs++) {
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_config config = config_limit(MIB(4));
        config.reuse = 0;
        galloc_pool *pool = pool_new(&config);
        void *hot = get(pool, 512, s), *p = get(pool, MIB(1), s);
        void *rest = get(pool, MIB(2), t);
        put(s, p, MIB(1), 1);
        OK(galloc_free(p, s));
        if (mallocs) OK(galloc_free(hot, s));
        sim_hold(s, 1);
        inside_ask_for_event(pool, stream_id(s));
        long events = sim_calls("cuEventRecord");
        if (mallocs) hot = get(pool, 512, s);
        else OK(galloc_free(hot, s));
        EXPECT_EQ(sim_calls("cuEventRecord") - events, 1);
        sim_hold(s, 0);
        if (mallocs) OK(galloc_free(hot, s));
        OK(galloc_free(rest, t));
        pool_end(pool);
        finish();
    }
}

/* A retired stream's cache is marked with the rest. */
TEST(retiring_marks_what_the_cache_holds)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_limited(MIB(2));
    warm(pool, 512, t);
    void *p = get(pool, MIB(1), s);
    warm(pool, MIB(1) / 2, s);
    put(s, p, MIB(1), 1);
    OK(galloc_free(p, s));
    OK(galloc_stream_retire(s));
    stream_end(s);
    sim_run(-1);
    OK(galloc_free(get(pool, MIB(2), t), t));
    EXPECT_EQ(sim_blocking_calls(), 0);
    pool_end(pool);
    finish();
}

static struct {
    void *p, *q;
    cudaStream_t stream;
    int calls;
} late;

/* Another thread frees two blocks on the stream that is being retired: the first free finds the cache shut, and leaves
   it open for the second. */
static void free_while_retiring(const char *function)
{
    if (strcmp(function, "cuEventCreate") || late.calls++) return;
    OK(galloc_free(late.p, late.stream));
    OK(galloc_free(late.q, late.stream));
}

TEST(retiring_marks_what_is_freed_while_its_event_is_made)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_limited(MIB(2));
    warm(pool, 512, t);
    memset(&late, 0, sizeof late);
    late.stream = s;
    late.p = get(pool, MIB(1), s);
    late.q = get(pool, 4096, s);
    void *r = get(pool, MIB(1) / 4, s);
    put(s, r, MIB(1) / 4, 1);
    OK(galloc_free(r, s));
    sim_hook(free_while_retiring, NULL);
    OK(galloc_stream_retire(s));
    sim_hook(NULL, NULL);
    EXPECT_EQ(late.calls, 1);
    stream_end(s);
    sim_run(-1);
    OK(galloc_free(get(pool, MIB(2), t), t));
    EXPECT_EQ(sim_calls("cuMemFreeHost"), 0); /* nor was the device waited for */
    pool_end(pool);
    finish();
}

/* ---- pools, devices, threads, processes -------------------------------------------------------------------------- */

/* One stream in several pools, several devices with their default streams: each is led to its own. */
TEST(every_pool_and_device_has_its_own_way)
{
    begin_with_devices(3, SIM_PACE_RANDOM);
    cudaStream_t own[3];
    galloc_pool *pool[3];
    for (int d = 0; d < 3; d++) {
        OK(cudaSetDevice(d));
        own[d] = stream_new();
        pool[d] = pool_new(NULL);
    }
    for (int i = 0; i < 60; i++) {
        int d = i % 3;
        cudaStream_t s[3] = {own[d], 0, cudaStreamPerThread};
        OK(cudaSetDevice(d));
        for (int kind = 0; kind < 3; kind++) {
            void *p = NULL, *q = get(pool[(d + i / 3) % 3], KIB(4), s[kind]);
            OK(galloc_malloc(&p, KIB(4), s[kind]));
            EXPECT_EQ(info_of(p).device, d);
            EXPECT_EQ(info_of(q).device, (d + i / 3) % 3);
            EXPECT(info_of(p).pool != info_of(q).pool);
            OK(galloc_free(p, i % 2 ? own[(d + 1) % 3] : s[kind]));
            OK(galloc_free(q, s[kind]));
        }
    }
    for (int d = 0; d < 3; d++) pool_end(pool[d]);
    finish();
}

/* Where by promise the free of what was allocated last asks for no context, that is still what was allocated here: its
   address may have come back since, on another device's default stream, by a call that goes the long way. */
TEST(an_address_that_comes_back_on_another_device_is_freed_there)
{
    for (int check = 0; check < 2; check++) {
        begin_with_devices(2, SIM_PACE_STILL);
        galloc_config config = config_limit(MIB(2));
        config.stream_check = check;
        galloc_pool *pool = pool_new(&config);
        CUmemAccessDesc peer = {.location = {CU_MEM_LOCATION_TYPE_DEVICE, 1},
                                .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
        void *held = get(pool, MIB(1) - KIB(64), cudaStreamLegacy), *small = get(pool, KIB(64), cudaStreamLegacy);
        OK(cuMemSetAccess((CUdeviceptr)(uintptr_t)held & ~(CUdeviceptr)(MIB(2) - 1), MIB(2), &peer, 1));
        warm(pool, MIB(1), cudaStreamLegacy);
        void *p = get_used(pool, MIB(1), cudaStreamLegacy, 1);
        OK(galloc_free(p, cudaStreamLegacy));
        OK(cudaDeviceSynchronize());
        OK(cudaSetDevice(1));
        void *q = get_used(pool, MIB(1), cudaStreamLegacy, 1);
        EXPECT(q == p);
        OK(cudaSetDevice(0));
        OK(galloc_free(small, cudaStreamLegacy)); /* this cache takes blocks again */
        OK(cudaSetDevice(1));
        OK(galloc_free(q, cudaStreamLegacy));
        OK(cudaSetDevice(0));
        OK(galloc_free(get_used(pool, MIB(1), cudaStreamLegacy, 1), cudaStreamLegacy)); /* not before that has ended */
        OK(galloc_free(held, cudaStreamLegacy));
        pool_end(pool);
        finish();
    }
}

/* Where no context is asked for, a default stream still leads to each pool's own stream state, in every thread. */
static void *use_default_streams(void *arg)
{
    galloc_pool **pool = (galloc_pool **)arg;
    for (int i = 0; i < 60; i++) {
        for (int kind = 0; kind < 2; kind++) {
            cudaStream_t s = kind ? cudaStreamPerThread : (cudaStream_t)0;
            void *p = get(pool[i % 8], KIB(4), s);
            EXPECT(info_of(p).pool == pool[i % 8]);
            if (kind) EXPECT_EQ(info_of(p).stream_id, stream_id(s));
            put(s, p, KIB(4), (uint64_t)i);
            OK(galloc_free(p, i % 3 || kind ? s : cudaStreamLegacy));
        }
    }
    return NULL;
}

TEST(without_looks_default_streams_lead_to_every_pool)
{
    begin();
    galloc_pool *pool[8];
    pthread_t thread;
    galloc_config config = galloc_config_default();
    config.stream_check = 0;
    for (int i = 0; i < 8; i++) pool[i] = pool_new(&config);
    use_default_streams(pool);
    EXPECT_EQ(pthread_create(&thread, NULL, use_default_streams, pool), 0);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
    for (int i = 0; i < 8; i++) {
        EXPECT_EQ(galloc_pool_check(pool[i]), 0);
        pool_end(pool[i]);
    }
    finish();
}

/* A new pool where an old one was is not the old one. */
TEST(ways_end_with_their_pool)
{
    begin();
    cudaStream_t s = stream_new();
    for (int i = 0; i < 20; i++) {
        galloc_pool *pool = pool_new(NULL);
        void *p = NULL;
        warm(pool, KIB(64), s);
        OK(galloc_malloc(&p, KIB(64), s));
        OK(galloc_free(p, s));
        EXPECT(inside_remembers(s, pool) && inside_remembers(s, NULL));
        pool_end(pool);
        EXPECT(!inside_remembers(s, pool) && !inside_remembers(s, NULL));
        if (i % 3 == 0) OK(galloc_shutdown());
    }
    finish();
}

/* Where a thread remembers its way to a pool, it remembers that to another one next. What it allocated last on the old
   way is still the old pool's. */
TEST(a_way_that_leads_to_another_pool_forgets_its_last_block)
{
    enum { OTHERS = 96 };
    begin_still();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL), *gone = pool_new(NULL), *other[OTHERS];
    void *q[OTHERS];
    for (int i = 0; i < OTHERS; i++) other[i] = pool_new(NULL);
    OK(galloc_free(get(pool, 512, s), s));
    void *p = get(pool, 512, s); /* by the way */
    pool_end(gone);              /* with a pool all ways end */
    for (int i = 0; i < OTHERS; i++) q[i] = get(other[i], 512, s);
    OK(galloc_free(p, s));
    EXPECT_EQ(stats_of(pool).blocks.current, 0);
    for (int i = 0; i < OTHERS; i++) {
        EXPECT_EQ(stats_of(other[i]).blocks.current, 1);
        OK(galloc_free(q[i], s));
        EXPECT_EQ(galloc_pool_check(other[i]), 0);
        pool_end(other[i]);
    }
    EXPECT_EQ(galloc_pool_check(pool), 0);
    pool_end(pool);
    finish();
}

/* Lanes are used again for other streams: an old way must not lead there. */
TEST(a_stream_used_again_is_another_stream)
{
    begin();
    cudaStream_t s[100];
    galloc_pool *pool = pool_new(NULL);
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 100; i++) {
            s[i] = stream_new();
            warm(pool, 512, s[i]);
            OK(galloc_stream_retire(s[i]));
        }
        OK(galloc_pool_trim(pool, 0, NULL));
        EXPECT(inside_unused_streams(pool) > 0);
        for (int i = 99; i >= 0; i--) {
            OK(galloc_free(get(pool, 512, s[i]), s[i]));
            (void)kept_of(pool, s[i]);
        }
        EXPECT_EQ(galloc_pool_check(pool), 0);
        for (int i = 0; i < 100; i++) stream_end(s[i]);
    }
    pool_end(pool);
    finish();
}

/* What a stream has waited for is no other stream's work, though that has the same description now. */
TEST(a_wait_is_for_no_stream_that_comes_after)
{
    begin_still();
    cudaStream_t a[3] = {stream_new(), stream_new(), stream_new()}, b = stream_new();
    galloc_pool *pool = pool_limited(MIB(8));
    for (int i = 0; i < 4; i++) {
        for (int k = 0; k < 3; k++) {
            OK(galloc_free(get_used(pool, MIB(8), b, 1), b));
            OK(galloc_free(get_used(pool, MIB(8), a[k], 1), a[k])); /* it waits for b */
        }
        OK(galloc_stream_retire(b));
        stream_end(b);
        sim_run(-1);
        OK(galloc_pool_trim(pool, 0, NULL));
        EXPECT_EQ(galloc_pool_check(pool), 0);
        b = stream_new();
    }
    EXPECT(stats_of(pool).waits > 0);
    pool_end(pool);
    finish();
}

/* A is used and retired, and B gets the state that the pool kept of it. Returns a block that B has used and freed. */
static void *hand_on(galloc_pool *pool, cudaStream_t a, cudaStream_t b)
{
    warm(pool, MIB(1), a);
    OK(galloc_stream_retire(a));
    sim_run(-1);
    OK(galloc_pool_trim(pool, 0, NULL));
    EXPECT(inside_unused_streams(pool) > 0);
    warm(pool, MIB(1), b);
    EXPECT_EQ(inside_unused_streams(pool), 0);
    void *p = get_used(pool, MIB(1), b, 1);
    OK(galloc_free(p, b));
    return p;
}

/* The stream state that was the first stream's is another's now, and the first one lives and is used again. */
TEST(a_miss_by_an_old_way_leads_to_no_other_stream)
{
    static const char *const settings[] = {"", "roundup_power2_divisions:4", "like:pytorch"};
    for (int i = 0; i < 3; i++) {
        begin_still();
        cudaStream_t a = stream_new(), b = stream_new();
        galloc_config config = galloc_config_default();
        OK(galloc_config_parse(&config, settings[i], NULL, 0));
        galloc_pool *pool = pool_new(&config);
        void *p = hand_on(pool, a, b);
        void *q = get_used(pool, MIB(1), a, 1);
        EXPECT(q != p);
        OK(galloc_free(q, a));
        EXPECT_EQ(galloc_pool_check(pool), 0);
        pool_end(pool);
        finish();
    }
}

/* The same with the free of a block of that other stream: its memory waits for the work of the stream that frees it. */
TEST(a_free_by_an_old_way_is_none_of_another_stream)
{
    static const size_t sizes[] = {512, MIB(1), MIB(4)};
    for (int i = 0; i < 6; i++) {
        begin_still();
        cudaStream_t a = stream_new(), b = stream_new();
        galloc_config config = galloc_config_default();
        config.stats_exact = i / 3;
        galloc_pool *pool = pool_new(&config);
        (void)hand_on(pool, a, b);
        void *p = get(pool, sizes[i % 3], b), *q;
        order(b, a);
        put(a, p, sizes[i % 3], 1);
        OK(galloc_free(p, a));
        q = get_used(pool, sizes[i % 3], b, 2);
        EXPECT(q != p);
        OK(galloc_free(q, b));
        EXPECT_EQ(galloc_pool_check(pool), 0);
        pool_end(pool);
        finish();
    }
}

/* What a thread remembers of T leads to a state that U has by now, and the host has no memory for another one. The
   block has been claimed before that is found out; it is freed all the same, after a wait. */
TEST(a_free_by_an_old_way_needs_no_host_memory)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new(), u = stream_new();
    galloc_pool *pool = pool_new(NULL);
    warm(pool, KIB(64), s);
    warm(pool, 512, t);
    OK(galloc_stream_retire(t));
    sim_run(-1);
    OK(galloc_pool_trim(pool, SIZE_MAX, NULL));
    EXPECT_EQ(inside_unused_streams(pool), 1);
    warm(pool, 512, u);
    EXPECT_EQ(inside_unused_streams(pool), 0);
    warm(pool, KIB(64), s);
    void *p = get(pool, KIB(64), s); /* from the cache: it is not known whether it has been used */
    sim_fail_malloc(1, 1);
    OK(galloc_free(p, t));
    EXPECT(sim_failed_mallocs() > 0);
    sim_fail_clear();
    EXPECT_EQ(stats_of(pool).blocks.current, 0);
    EXPECT_EQ(galloc_pool_check(pool), 0);
    pool_end(pool);
    finish();
}

/* The stream state that was the first stream's is another's now; the first one's handle is a third stream's. */
TEST(without_looks_an_old_way_leads_to_no_other_stream)
{
    begin_still();
    cudaStream_t a = stream_new(), b = stream_new();
    galloc_config config = galloc_config_default();
    config.stream_check = 0;
    galloc_pool *pool = pool_new(&config);
    void *p = hand_on(pool, a, b);
    stream_end(a);
    cudaStream_t c = stream_new();
    EXPECT(c == a);
    void *q = get_used(pool, MIB(1), c, 1);
    EXPECT(q != p);
    OK(galloc_free(q, c));
    pool_end(pool);
    finish();
}

TEST(a_child_of_fork_is_refused_by_the_fast_path_too)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    warm(pool, 512, s);
    void *p = get(pool, 512, s), *q = NULL;
    pid_t child = fork();
    if (!child) {
        int fine = galloc_free(p, s) == cudaErrorInitializationError;
        fine &= galloc_pool_malloc(pool, &q, 512, s) == cudaErrorInitializationError;
        fine &= galloc_pool_malloc(pool, &q, 512, 0) == cudaErrorInitializationError;
        _exit(fine ? 0 : 1);
    }
    int status = -1;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    OK(galloc_free(p, s));
    pool_end(pool);
    finish();
}

/* Peaks between two looks at the counters, to the byte, when every call takes the lock. */
TEST(exact_counters_use_no_cache)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = galloc_config_default();
    OK(galloc_config_parse(&config, "stats:exact", NULL, 0));
    EXPECT_EQ(config.stats_exact, 1);
    galloc_pool *pool = pool_new(&config);
    warm(pool, 512, s);
    OK(galloc_free(get(pool, 100, s), s));
    OK(galloc_pool_stats_reset(pool));
    OK(galloc_free(get(pool, 100, s), s));
    OK(galloc_free(get(pool, 512, s), s));
    OK(galloc_free(get(pool, 300, s), s));
    EXPECT_EQ(stats_of(pool).live.peak, 512);
    EXPECT_EQ(kept_of(pool, s).mallocs, 0);
    EXPECT_EQ(kept_of(pool, s).open, 0);
    pool_end(pool);
    finish();
}

/* A promise is taken at its word, and a retired stream is looked at all the same. */
TEST(without_looks_a_retired_stream_is_still_another_one)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_config config = galloc_config_default();
    OK(galloc_config_parse(&config, "stream_check:off", NULL, 0));
    galloc_pool *pool = pool_new(&config);
    warm(pool, MIB(1), t);
    for (int i = 0; i < 5; i++) {
        warm(pool, MIB(1), s);
        void *p = get(pool, MIB(1), s);
        put(s, p, MIB(1), 1);
        OK(galloc_free(p, s));
        OK(galloc_stream_retire(s));
        stream_end(s);
        s = stream_new();
        void *q = get(pool, MIB(1), s);
        EXPECT_EQ(info_of(q).stream_id, stream_id(s));
        put(s, q, MIB(1), 2);
        OK(galloc_free(q, s));
    }
    pool_end(pool);
    finish();
}

/* Nor by the free of a block that no cache would have: it is not asked, so it says nothing. */
TEST(without_looks_a_block_with_room_leads_to_no_retired_stream)
{
    begin_still();
    galloc_config config = galloc_config_default();
    OK(galloc_config_parse(&config, "stream_check:off", NULL, 0));
    galloc_pool *pool = pool_new(&config);
    cudaStream_t other = stream_new(), old = stream_new();
    galloc_request request = {0};
    void *p = get(pool, KIB(64), old), *room = NULL;
    request.bytes = MIB(2);
    request.max_bytes = MIB(4);
    request.stream = other;
    request.pool = pool;
    OK(galloc_alloc(&room, &request));
    put(old, p, KIB(64), 1);
    OK(galloc_free(p, old));
    OK(galloc_stream_retire(old));
    stream_end(old);
    cudaStream_t s = stream_new();
    EXPECT(s == old); /* the handle comes back */
    OK(galloc_free(room, s));
    p = get(pool, KIB(64), s);
    put(s, p, KIB(64), 2); /* the old stream's work is not done */
    EXPECT_EQ(info_of(p).stream_id, stream_id(s));
    OK(galloc_free(p, s));
    OK(galloc_stream_retire(s));
    stream_end(s);
    pool_end(pool);
    finish();
}

/* A block that a cache gave out again says nothing of who had it before. It grows on another stream, within its 512
   bytes: what had these before may still be under way. */
TEST(what_a_cache_gave_grows_on_another_stream)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *live = get(pool, KIB(4), t);
    warm(pool, 512, s);
    void *p = get_used(pool, 512, s, 1);
    OK(galloc_free(p, s));
    EXPECT(get(pool, 100, s) == p);
    if (!galloc_resize(p, 512, t)) put(t, (char *)p + 256, 256, 2);
    expect_healthy(pool, 1);
    sim_run(-1);
    OK(galloc_free(p, s));
    OK(galloc_free(live, t));
    pool_end(pool);
    finish();
}

/* What this thread was last given at an address came back from the device for another pool. */
TEST(an_address_that_another_pool_has_by_now_is_freed_there)
{
    begin_still();
    cudaStream_t s = stream_new();
    galloc_config config = config_fixed();
    galloc_pool *a = pool_new(&config), *b = pool_new(&config);
    void *p = get(a, MIB(2), s), *q, *again;
    OK(galloc_free(p, s));
    again = get(a, MIB(2), s); /* by the way */
    EXPECT(again == p);
    OK(galloc_free(p, s));
    sim_run(-1);
    OK(galloc_pool_trim(a, 0, NULL));
    q = get(b, MIB(2), s);
    EXPECT(q == p);
    OK(galloc_free(q, s));
    EXPECT_EQ(stats_of(b).blocks.current, 0);
    pool_end(a);
    pool_end(b);
    finish();
}

/* Errors that end the context shut the caches: nothing more is given out. */
TEST(a_broken_pool_gives_out_nothing_from_its_caches)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_config config = galloc_config_default();
    config.stream_check = 0;
    galloc_pool *pool = pool_new(&config);
    void *p = get(pool, MIB(4), s), *live = get(pool, 512, s);
    warm(pool, KIB(64), t);
    const unsigned long long id = stream_id(t);
    sim_fail("cuEventRecord", 1, 0, 700);
    OK(galloc_free(p, s));
    EXPECT_EQ(sim_failed(), 1);
    sim_fail_clear();
    EXPECT_EQ(inside_stream_of(pool, id).blocks, 1);
    EXPECT_EQ(galloc_pool_malloc(pool, &p, KIB(64), t), 700);
    OK(cudaDeviceReset());
    (void)cudaGetLastError();
    s = stream_new();
    warm(pool, KIB(64), s);
    OK(galloc_free(live, s));
    pool_end(pool);
    finish();
}

/* Nor is the cache of the stream opened again by the very call that met the error. */
TEST(a_call_that_breaks_its_pool_leaves_the_cache_shut)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = galloc_config_default();
    config.stream_check = 0;
    galloc_pool *pool = pool_new(&config);
    warm(pool, KIB(64), s);
    void *p = get(pool, KIB(64), s), *q;
    const unsigned long long id = stream_id(s);
    sim_fail("cuMemCreate", 1, 0, 700);
    EXPECT_EQ(galloc_pool_malloc(pool, &q, MIB(64), s), 700);
    EXPECT_EQ(sim_failed(), 1);
    sim_fail_clear();
    EXPECT(!inside_stream_of(pool, id).open);
    (void)galloc_free(p, s); /* the driver answers no question about the stream */
    EXPECT_EQ(galloc_pool_malloc(pool, &q, KIB(64), s), 700);
    OK(cudaDeviceReset());
    (void)cudaGetLastError();
    s = stream_new();
    if (info_of(p).state == GALLOC_STATE_USED) OK(galloc_free(p, s));
    pool_end(pool);
    finish();
}

/* More sizes than a cache has bins: what finds no bin is kept or given back, and nothing gets lost. */
TEST(blocks_of_any_number_of_sizes_come_out_of_the_cache)
{
    enum { SIZES = 240 };
    static void *p[SIZES];
    begin();
    galloc_config config = galloc_config_default();
    config.lane_bytes = MIB(64);
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new();
    for (int round = 0; round < 3; round++) {
        for (size_t i = 0; i < SIZES; i++) p[i] = get(pool, 512 * (i + 1), s);
        for (size_t i = 0; i < SIZES; i++) OK(galloc_free(p[i], s));
        EXPECT_EQ(galloc_pool_check(pool), 0);
        galloc_stats stats = stats_of(pool);
        EXPECT_EQ(stats.free_bytes, stats.reserved.current);
    }
    OK(galloc_pool_trim(pool, 0, NULL));
    EXPECT_EQ(stats_of(pool).reserved.current, 0);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* A cache holds 1/256 of the device at most, whatever lane_bytes says: the rest is free for other streams. */
TEST(a_cache_is_bounded_by_the_device)
{
    sim_options options = sim_defaults();
    options.memory = GIB(1);
    options.pace = SIM_PACE_STILL;
    begin_with(options);
    enum { N = 64 };
    cudaStream_t s = stream_new();
    galloc_config config = galloc_config_default();
    config.lane_bytes = MIB(64);
    galloc_pool *pool = pool_new(&config);
    void *p[N];
    for (int i = 0; i < N; i++) p[i] = get(pool, KIB(512), s);
    for (int i = 0; i < N; i++) OK(galloc_free(p[i], s));
    EXPECT(kept_of(pool, s).bytes <= MIB(4));
    EXPECT(kept_of(pool, s).bytes > 0);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* With several streams a stream cache takes no block while it holds more than lane_bytes. */
TEST(lane_bytes_bound_each_of_several_caches)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_config config = galloc_config_default();
    config.lane_bytes = KIB(64);
    galloc_pool *pool = pool_new(&config);
    void *p[60], *q = get(pool, 512, t);
    for (int i = 0; i < 60; i++) p[i] = get(pool, KIB(16), s);
    for (int i = 0; i < 60; i++) {
        OK(galloc_free(p[i], s));
        EXPECT(inside_stream_of(pool, stream_id(s)).bytes <= KIB(64 + 16));
    }
    OK(galloc_free(q, t));
    pool_end(pool);
    finish();
}

TEST_MAIN()
