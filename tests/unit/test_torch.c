/* test_torch.c - pools with like:pytorch: the figures of PyTorch's own tests (test/test_cuda.py, named at each test)
   and documents, its rules for rounding, segments, cutting, collecting and running out, and that all of it is safe. */

#include "setup.h"

#define MANY 16

static galloc_config torch_config(void)
{
    galloc_config config = galloc_config_default();
    char message[256];
    OK(galloc_config_parse(&config, "like:pytorch,expandable_segments:False", message, sizeof message));
    EXPECT_EQ(message[0], 0);
    return config;
}

static galloc_pool *torch_pool(size_t limit)
{
    galloc_config config = torch_config();
    config.memory_limit = limit;
    return pool_new(&config);
}

/* Changes settings by a text. */
static galloc_config with(galloc_config config, const char *text)
{
    char message[256];
    if (!OK(galloc_config_parse(&config, text, message, sizeof message))) printf("    %s\n", message);
    return config;
}

static galloc_torch_stats torch_of(galloc_pool *pool)
{
    galloc_torch_stats stats;
    memset(&stats, 0, sizeof stats);
    OK(galloc_pool_torch_stats(pool, &stats));
    EXPECT_EQ(stats.segment.all.current, stats.segment.small_pool.current + stats.segment.large_pool.current);
    EXPECT_EQ(stats.active_bytes.all.current,
              stats.active_bytes.small_pool.current + stats.active_bytes.large_pool.current);
    EXPECT_EQ(stats.reserved_bytes.all.current, stats_of(pool).reserved.current);
    EXPECT_EQ(stats.allocated_bytes.all.current, stats_of(pool).allocated.current);
    EXPECT_EQ(stats.requested_bytes.all.current, stats_of(pool).live.current);
    EXPECT_EQ(stats.allocation.all.current, stats_of(pool).blocks.current);
    EXPECT(stats.allocated_bytes.all.current <= stats.active_bytes.all.current);
    return stats;
}

static size_t reserved(galloc_pool *pool) { return torch_of(pool).reserved_bytes.all.current; }

static void give(void *ptr, cudaStream_t stream) { OK(galloc_free(ptr, stream)); }

static void empty(galloc_pool *pool) { OK(galloc_pool_trim(pool, 0, NULL)); }

static void refused(galloc_pool *pool, size_t bytes, cudaStream_t stream)
{
    void *ptr = pool;
    EXPECT_EQ(galloc_pool_malloc(pool, &ptr, bytes, stream), cudaErrorMemoryAllocation);
    EXPECT(ptr == NULL);
    EXPECT_EQ(galloc_pool_check(pool), 0);
}

static void end(galloc_pool *pool, cudaStream_t stream)
{
    expect_healthy(pool, 0);
    if (stream) stream_end(stream);
    pool_end(pool);
    finish();
}

/* What is reserved for one request, and nothing else. */
static size_t reserved_for(galloc_pool *pool, size_t bytes, cudaStream_t stream)
{
    size_t held;
    empty(pool);
    EXPECT_EQ(reserved(pool), 0);
    give(get(pool, bytes, stream), stream);
    held = reserved(pool);
    empty(pool);
    return held;
}

/* ---- sizes ------------------------------------------------------------------------------------------------------- */

/* The figures that PyTorch's FAQ on memory is asked about most: 3.81 MiB of floats, and 20 MiB held. */
TEST(a_million_floats_hold_20_mib)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = torch_pool(SIZE_MAX);
    void *p = get(pool, 4 * 1000000, s);
    EXPECT_EQ(torch_of(pool).allocated_bytes.all.current, 4000256);
    EXPECT_EQ(torch_of(pool).requested_bytes.all.current, 4000000);
    EXPECT_EQ(reserved(pool), MIB(20));
    give(p, s);
    EXPECT_EQ(torch_of(pool).allocated_bytes.all.current, 0);
    EXPECT_EQ(reserved(pool), MIB(20));
    empty(pool);
    EXPECT_EQ(torch_of(pool).allocated_bytes.all.current, 0);
    EXPECT_EQ(reserved(pool), 0);
    EXPECT_EQ(sim_physical(0), 0);
    end(pool, s);
}

/* Segments: 2 MiB, the size of large ones, or the request. */
TEST(segments_have_pytorchs_sizes)
{
    static const struct {
        size_t bytes, held;
    } cases[] = {{1, MIB(2)},           {512, MIB(2)},           {MIB(1), MIB(2)},         {MIB(1) + 1, MIB(20)},
                 {MIB(5), MIB(20)},     {MIB(10) - 512, MIB(20)}, {MIB(10) - 511, MIB(10)}, {MIB(10), MIB(10)},
                 {MIB(10) + 1, MIB(12)}, {MIB(20), MIB(20)},     {MIB(33), MIB(34)}};
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = torch_pool(SIZE_MAX);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        EXPECT_EQ(reserved_for(pool, cases[i].bytes, s), cases[i].held);
    end(pool, s);
}

TEST(large_segments_have_the_size_that_is_set)
{
    for (int like = 0; like < 2; like++) {
        begin();
        cudaStream_t s = stream_new();
        galloc_config config = with(like ? torch_config() : config_fixed(), "large_segment_size_mb:33");
        galloc_pool *pool = pool_new(&config);
        static const size_t bytes[] = {MIB(1), MIB(2), MIB(9), MIB(10), MIB(24)};
        static const size_t held[] = {MIB(2), MIB(34), MIB(34), MIB(10), MIB(24)};
        for (int i = 0; i < 5; i++) {
            give(get(pool, bytes[i], s), s);
            EXPECT_EQ(stats_of(pool).reserved.current, held[i]);
            empty(pool);
        }
        end(pool, s);
    }
}

/* test_allocator_settings: 84 MiB as they are; 96 with 4 divisions; 88 with 8 from 64 MiB on; 400 MiB are 512 with 2
   from 256 MiB on. What was requested stays exact. In every profile. */
TEST(requests_are_rounded_by_divisions)
{
    static const struct {
        const char *text;
        size_t bytes, held;
    } cases[] = {{"roundup_power2_divisions:0", MIB(84), MIB(84)},
                 {"roundup_power2_divisions:4", MIB(84), MIB(96)},
                 {"roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1]", MIB(84), MIB(88)},
                 {"roundup_power2_divisions:[256:2]", MIB(400), MIB(512)},
                 {"roundup_power2_divisions:[256:1,512:2,>:4]", MIB(400), MIB(400)},
                 {"roundup_power2_divisions:[256:1,512:2,>:4]", MIB(600), MIB(768)},
                 {"roundup_power2_divisions:[256:1,512:2,>:4]", MIB(1100), MIB(1280)},
                 {"roundup_power2_divisions:4", MIB(64), MIB(64)},
                 {"roundup_power2_divisions:4", 2048, 2048},
                 {"roundup_power2_divisions:4", 2049, 2560},
                 {"roundup_power2_divisions:4", 1200, 1536},
                 {"roundup_power2_divisions:4", 9000, 10240},
                 {"roundup_power2_divisions:8", 9000, 9216},
                 {"roundup_power2_divisions:2", 1, 512},
                 {"roundup_power2_divisions:1", 9001, 9216}};
    static const char *const profiles[] = {"like:galloc", "like:galloc,expandable_segments:False", "like:pytorch",
                                           "like:pytorch,expandable_segments:True"};
    for (int i = 0; i < 4; i++) {
        for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
            begin();
            cudaStream_t s = stream_new();
            galloc_config config = with(with(galloc_config_default(), profiles[i]), cases[k].text);
            galloc_pool *pool = pool_new(&config);
            void *p = get(pool, cases[k].bytes, s);
            EXPECT_EQ(stats_of(pool).allocated.current, cases[k].held);
            EXPECT_EQ(stats_of(pool).live.current, cases[k].bytes);
            EXPECT_EQ(info_of(p).requested, cases[k].bytes);
            give(p, s);
            EXPECT_EQ(stats_of(pool).live.current, 0);
            end(pool, s);
        }
    }
}

/* Blocks that were rounded further are served by the stream's cache like others, to all requests of their size. */
TEST(rounded_requests_are_served_by_caches)
{
    for (int check = 0; check < 2; check++) {
        begin();
        cudaStream_t s = stream_new();
        galloc_config config = with(galloc_config_default(), "roundup_power2_divisions:2");
        config.stream_check = check;
        galloc_pool *pool = pool_new(&config);
        void *p = get(pool, 9000, s);
        for (int i = 0; i < 4; i++) {
            give(p, s);
            EXPECT(get(pool, 8193 + (size_t)i * 1000, s) == p);
            EXPECT_EQ(stats_of(pool).live.current, 8193 + (size_t)i * 1000);
            EXPECT_EQ(stats_of(pool).allocated.current, 12288);
        }
        EXPECT(stats_of(pool).splits <= 2);
        give(p, s);
        void *none = pool;
        EXPECT_EQ(galloc_pool_malloc(pool, &none, SIZE_MAX, s), cudaErrorMemoryAllocation);
        EXPECT_EQ(galloc_pool_malloc(pool, &none, SIZE_MAX / 2, s), cudaErrorMemoryAllocation);
        OK(galloc_stream_retire(s));
        end(pool, s);
    }
}

/* A block with room to grow is as long as its program says. */
TEST(growable_blocks_are_not_rounded_by_divisions)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = with(torch_config(), "roundup_power2_divisions:2");
    galloc_pool *pool = pool_new(&config);
    galloc_request request = {0};
    void *p = NULL;
    request.bytes = MIB(5);
    request.max_bytes = MIB(14);
    request.stream = s;
    request.pool = pool;
    OK(galloc_alloc(&p, &request));
    EXPECT_EQ(info_of(p).room, MIB(14));
    OK(galloc_resize(p, MIB(13), s));
    EXPECT_EQ(torch_of(pool).requested_bytes.large_pool.current, MIB(13));
    OK(galloc_resize(p, MIB(1), s));
    expect_healthy(pool, 1);
    give(p, s);
    end(pool, s);
}

/* ---- cutting and merging ----------------------------------------------------------------------------------------- */

/* Small: whatever is left is cut off. Large: up to 1 MiB stays with the block. Cut at the low end. */
TEST(blocks_are_cut_as_in_pytorch)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = torch_pool(SIZE_MAX);
    char *p = get(pool, 512, s), *q = get(pool, MIB(1), s), *r = get(pool, MIB(1) - 512, s);
    EXPECT(q == p + 512 && r == q + MIB(1));
    EXPECT_EQ(reserved(pool), MIB(2));
    EXPECT_EQ(torch_of(pool).inactive_split.all.current, 0);
    give(q, s);
    EXPECT_EQ(torch_of(pool).inactive_split.small_pool.current, 1);
    EXPECT_EQ(torch_of(pool).inactive_split_bytes.small_pool.current, MIB(1));
    give(p, s);
    EXPECT_EQ(torch_of(pool).inactive_split.small_pool.current, 1);
    EXPECT_EQ(torch_of(pool).inactive_split_bytes.small_pool.current, MIB(1) + 512);
    give(r, s);
    EXPECT_EQ(torch_of(pool).inactive_split.small_pool.current, 0);
    empty(pool);
    char *a = get(pool, MIB(9), s), *b = get(pool, MIB(10) - 512, s);
    EXPECT(b == a + MIB(9));
    EXPECT_EQ(info_of(b).usable, MIB(10) - 512);
    EXPECT_EQ(torch_of(pool).inactive_split_bytes.large_pool.current, MIB(1) + 512);
    give(b, s);
    b = get(pool, MIB(10), s);
    EXPECT(b == a + MIB(9));
    EXPECT_EQ(info_of(b).usable, MIB(11));
    EXPECT_EQ(info_of(b).requested, MIB(10));
    EXPECT_EQ(torch_of(pool).inactive_split.all.current, 0);
    EXPECT_EQ(torch_of(pool).allocated_bytes.all.current, MIB(20));
    give(a, s);
    give(b, s);
    end(pool, s);
}

/* The smallest block that fits, of equals the lowest, however many there are. */
TEST(the_best_block_is_taken)
{
    enum { HOLES = 60 };
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = torch_pool(SIZE_MAX);
    static char *hole[HOLES], *wall[HOLES];
    for (int i = 0; i < HOLES; i++) {
        hole[i] = get(pool, KIB(24) + 512 * (size_t)(i * 7 % 5), s);
        wall[i] = get(pool, 512, s);
    }
    for (int i = HOLES - 1; i >= 0; i--) give(hole[i * 37 % HOLES], s);
    for (int size = 0; size < 5; size++) {
        char *last = NULL;
        for (int i = 0; i < HOLES / 5; i++) {
            char *p = get(pool, KIB(24) + 512 * (size_t)size, s);
            int known = 0;
            EXPECT(p > last);
            for (int k = 0; k < HOLES; k++) known |= hole[k] == p && k * 7 % 5 == size;
            EXPECT(known);
            last = p;
        }
    }
    for (int i = 0; i < HOLES; i++) give(hole[i], s);
    for (int i = 0; i < HOLES; i++) give(wall[i], s);
    empty(pool);
    EXPECT_EQ(reserved(pool), 0);
    end(pool, s);
}

/* PyTorch's developers on fragmentation: eight of 16 MiB, then four of 32: 256 MiB held, the other way round 128. */
TEST(what_is_large_does_not_fit_into_what_was_small)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = torch_pool(SIZE_MAX);
    void *p[8];
    for (int round = 0; round < 2; round++) {
        for (int turn = 0; turn < 2; turn++) {
            int n = turn == round ? 8 : 4;
            for (int i = 0; i < n; i++) p[i] = get(pool, MIB(128) / (size_t)n, s);
            for (int i = 0; i < n; i++) give(p[i], s);
        }
        EXPECT_EQ(reserved(pool), round ? MIB(128) : MIB(256));
        empty(pool);
    }
    end(pool, s);
}

TEST(small_and_large_requests_are_apart)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = torch_pool(SIZE_MAX);
    give(get(pool, MIB(5), s), s);
    void *p = get(pool, KIB(4), s);
    EXPECT_EQ(reserved(pool), MIB(22));
    give(p, s);
    p = get(pool, MIB(2), s); /* as large as the small segment, which is free */
    EXPECT_EQ(reserved(pool), MIB(22));
    EXPECT_EQ(torch_of(pool).allocation.large_pool.current, 1);
    EXPECT_EQ(torch_of(pool).allocation.large_pool.total, 2);
    EXPECT_EQ(torch_of(pool).allocation.small_pool.total, 1);
    give(p, s);
    end(pool, s);
}

TEST(alignment_and_lifetime_are_kept)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = torch_pool(SIZE_MAX);
    void *p[5] = {get(pool, 1536, s)};
    for (int i = 1; i < 5; i++) {
        galloc_request request = {0};
        request.bytes = i < 3 ? 1000 : MIB(3);
        request.alignment = (size_t)1 << (i == 4 ? 23 : 10 + 4 * i);
        request.stream = s;
        request.pool = pool;
        request.lifetime = GALLOC_LIFETIME_LONG;
        OK(galloc_alloc(&p[i], &request));
        EXPECT_EQ((uintptr_t)p[i] % request.alignment, 0);
        EXPECT_EQ(galloc_pool_check(pool), 0);
    }
    EXPECT_EQ((uintptr_t)p[1] - (uintptr_t)p[0], KIB(16));
    for (int i = 0; i < 5; i++) give(p[i], s);
    empty(pool);
    EXPECT_EQ(reserved(pool), 0);
    end(pool, s);
}

TEST(blocks_are_resized_within_their_segment)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = torch_pool(SIZE_MAX);
    char *p = get(pool, MIB(4), s);
    OK(galloc_resize(p, MIB(18), s));
    EXPECT_EQ(torch_of(pool).allocated_bytes.large_pool.current, MIB(18));
    put(s, p, MIB(18), 1);
    order(s, t);
    OK(galloc_resize(p, MIB(3), t)); /* what is cut off comes home when t has done */
    EXPECT_EQ(torch_of(pool).active_bytes.large_pool.current, MIB(18));
    EXPECT_EQ(torch_of(pool).requested_bytes.large_pool.current, MIB(3));
    EXPECT_EQ(galloc_pool_check(pool), 0);
    OK(galloc_resize(p, MIB(5), t));
    EXPECT_EQ(torch_of(pool).active_bytes.large_pool.current, MIB(18));
    EXPECT_EQ(galloc_resize(p, MIB(21), s), cudaErrorNotSupported);
    sim_run(-1);
    void *q = get(pool, MIB(9), s);
    EXPECT_EQ(reserved(pool), MIB(20));
    EXPECT_EQ(galloc_pool_check(pool), 0);
    give(p, s);
    give(q, s);
    stream_end(t);
    end(pool, s);
}

/* ---- streams ----------------------------------------------------------------------------------------------------- */

TEST(streams_have_segments_of_their_own)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = torch_pool(SIZE_MAX);
    give(get(pool, MIB(5), s), s);
    give(get(pool, KIB(5), s), s);
    sim_run(-1);
    void *p = get(pool, MIB(5), t), *q = get(pool, KIB(5), t);
    EXPECT_EQ(reserved(pool), 2 * MIB(22));
    give(p, t);
    give(q, t);
    OK(galloc_pool_trim(pool, SIZE_MAX, NULL));
    q = get(pool, MIB(18), s);
    EXPECT_EQ(reserved(pool), 2 * MIB(22));
    give(q, s);
    EXPECT_EQ(sim_calls("cuEventRecord"), 0);
    empty(pool);
    give(get(pool, MIB(12), s), s);
    give(get(pool, MIB(14), s), s);
    OK(galloc_pool_trim(pool, MIB(20), NULL)); /* nobody works with the one that is left */
    EXPECT_EQ(reserved(pool), MIB(14));
    give(get(pool, MIB(14), t), t);
    EXPECT_EQ(reserved(pool), MIB(28));
    stream_end(t);
    end(pool, s);
}

/* Freed on another stream a block goes home, but not before that one's work is done; and to nobody else. */
TEST(blocks_freed_elsewhere_come_home)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = torch_pool(SIZE_MAX);
    void *p = get(pool, MIB(15), s);
    put(s, p, MIB(15), 1);
    order(s, t);
    look(t, p, MIB(15), 1);
    give(p, t);
    EXPECT_EQ(torch_of(pool).allocation.all.current, 0);
    EXPECT_EQ(torch_of(pool).active.large_pool.current, 1);
    EXPECT_EQ(torch_of(pool).active_bytes.large_pool.current, MIB(16));
    EXPECT_EQ(galloc_pool_check(pool), 0);
    void *q = get(pool, MIB(15), t), *r = get(pool, MIB(15), s);
    EXPECT(q != p && r != p);
    EXPECT_EQ(reserved(pool), MIB(48));
    sim_run(-1);
    void *again = get(pool, MIB(15), s);
    EXPECT(again == p);
    put(s, again, MIB(15), 2);
    EXPECT_EQ(torch_of(pool).active.all.current, 3);
    EXPECT_EQ(reserved(pool), MIB(48));
    give(q, t);
    give(r, s);
    give(again, s);
    EXPECT_EQ(torch_of(pool).active.all.current, 0);
    EXPECT_EQ(sim_calls("cuStreamWaitEvent"), 0);
    r = get(pool, MIB(18), s);
    q = get(pool, MIB(15), s);
    give(r, s);
    give(q, t);
    sim_run(-1);
    again = get(pool, MIB(15), s); /* there is another place, but this one is better */
    EXPECT(again == q);
    give(again, s);
    stream_end(t);
    end(pool, s);
}

/* test_record_stream: not before the work is done, and then at the same address. */
TEST(a_recorded_block_is_reused_after_the_work)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = torch_pool(SIZE_MAX);
    void *p = get(pool, 16, s);
    put(s, p, 16, 1);
    order(s, t);
    look(t, p, 16, 1);
    OK(galloc_record_stream(p, t));
    give(p, s);
    EXPECT_EQ(sim_calls("cuEventRecord"), 1);
    void *q = get(pool, 16, s);
    EXPECT(q != p);
    put(s, q, 16, 2);
    OK(cudaStreamSynchronize(t));
    void *r = get(pool, 16, s);
    EXPECT(r == p);
    put(s, r, 16, 3);
    give(q, s);
    give(r, s);
    stream_end(t);
    end(pool, s);
}

/* test_caching_allocator_record_stream_oom: 100 x 160 MiB recorded on a busy stream and freed do not run out. */
TEST(recorded_blocks_are_waited_for_when_memory_is_short)
{
    sim_options options = sim_defaults();
    options.pace = SIM_PACE_STILL;
    options.memory = GIB(1);
    begin_with(options);
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = torch_pool(SIZE_MAX);
    for (uint64_t i = 0; i < 100; i++) {
        void *p = get(pool, MIB(160), s);
        put(s, p, MIB(160), i);
        order(s, t);
        look(t, p, MIB(160), i);
        OK(galloc_record_stream(p, t));
        give(p, s);
    }
    EXPECT_EQ(galloc_pool_check(pool), 0);
    EXPECT_EQ(torch_of(pool).num_ooms, 0);
    EXPECT(torch_of(pool).num_sync_all_streams > 0);
    EXPECT(torch_of(pool).segment.all.peak <= 6);
    EXPECT_EQ(log_lines, 0);
    stream_end(t);
    end(pool, s);
}

/* A stream that is gone leaves its segments to whoever lacks memory next; one that lives does not. */
TEST(segments_of_a_stream_that_is_gone_are_taken_over)
{
    begin_still();
    cudaStream_t s = stream_new(), u = stream_new();
    galloc_pool *pool = torch_pool(SIZE_MAX);
    for (int i = 0; i < 20; i++) {
        cudaStream_t t = stream_new();
        void *p = get(pool, MIB(30), t), *q = get(pool, 512, t);
        put(t, p, MIB(30), (uint64_t)i);
        put(t, q, 512, (uint64_t)i);
        give(p, t);
        give(q, t);
        OK(galloc_stream_retire(t));
        stream_end(t);
        sim_run(-1);
        OK(galloc_pool_trim(pool, SIZE_MAX, NULL)); /* it is noticed */
        EXPECT_EQ(galloc_pool_check(pool), 0);
    }
    EXPECT_EQ(reserved(pool), MIB(32));
    void *p = get(pool, MIB(30), s), *q = get(pool, MIB(30), u);
    put(s, p, MIB(30), 7);
    put(u, q, MIB(30), 7);
    EXPECT_EQ(reserved(pool), MIB(62));
    give(p, s);
    give(q, u);
    stream_end(u);
    end(pool, s);
}

/* What is reserved is for the first stream that needs a segment of that kind. */
TEST(reserved_memory_is_for_the_first_who_needs_it)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = torch_pool(MIB(130));
    OK(galloc_pool_reserve(pool, MIB(100)));
    OK(galloc_pool_reserve(pool, MIB(90)));
    OK(galloc_pool_reserve(pool, KIB(4)));
    EXPECT_EQ(reserved(pool), MIB(102));
    EXPECT_EQ(galloc_pool_check(pool), 0);
    long calls = sim_calls("cuMemAlloc");
    void *p = get(pool, MIB(99), s), *q = get(pool, KIB(1), t);
    EXPECT_EQ(sim_calls("cuMemAlloc"), calls);
    EXPECT_EQ(galloc_pool_reserve(pool, MIB(40)), cudaErrorMemoryAllocation);
    EXPECT_EQ(galloc_pool_check(pool), 0);
    give(p, s);
    give(q, t);
    stream_end(t);
    end(pool, s);
}

/* ---- running out ------------------------------------------------------------------------------------------------- */

/* test_out_of_memory_retry: half of the memory, and again half, which fails; the first is freed, and it succeeds. */
TEST(what_was_freed_makes_room)
{
    sim_options options = sim_defaults();
    options.memory = MIB(1000);
    begin_with(options);
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = torch_pool(SIZE_MAX);
    void *p = get(pool, MIB(500), s);
    refused(pool, MIB(501), t);
    EXPECT_EQ(torch_of(pool).num_ooms, 1);
    EXPECT_EQ(torch_of(pool).num_alloc_retries, 1);
    give(p, s);
    p = get(pool, MIB(501), t);
    EXPECT_EQ(torch_of(pool).num_ooms, 1);
    EXPECT_EQ(torch_of(pool).num_alloc_retries, 2);
    EXPECT_EQ(torch_of(pool).num_device_alloc, 2);
    EXPECT_EQ(torch_of(pool).num_device_free, 1);
    give(p, t);
    stream_end(t);
    end(pool, s);
}

/* What other pools of the device keep is had at last, be it the device that is full or the limit that they share. */
TEST(other_pools_give_way)
{
    static const char *const others[] = {"expandable_segments:True", "expandable_segments:False", "like:pytorch",
                                         "backend:cudaMalloc", "backend:cudaMallocAsync"};
    for (int i = 0; i < 10; i++) {
        sim_options options = sim_defaults();
        options.memory = i < 5 ? MIB(64) : MIB(256);
        begin_with(options);
        galloc_pool *pool, *other;
        galloc_config config = torch_config();
        config.device_limit = i < 5 ? SIZE_MAX : MIB(64);
        pool = pool_new(&config);
        config = with(galloc_config_default(), others[i % 5]);
        other = pool_new(&config);
        cudaStream_t s = stream_new();
        void *p = get(other, MIB(40), s);
        put(s, p, MIB(40), 1);
        give(p, s);
        p = get(pool, MIB(40), s);
        put(s, p, MIB(40), 2);
        give(p, s);
        pool_end(pool);
        pool_end(other);
        stream_end(s);
        finish();
    }
}

/* test_set_per_process_memory_fraction: under half of the memory 0.499 of it is had, and half of it more is not. A
   segment is not made smaller for a limit. */
TEST(the_limit_counts_whole_segments)
{
    sim_options options = sim_defaults();
    options.memory = MIB(2000);
    begin_with(options);
    cudaStream_t s = stream_new();
    galloc_config config = with(torch_config(), "per_process_memory_fraction:0.5");
    galloc_pool *pool = pool_new(&config);
    void *p = get(pool, MIB(998), s);
    refused(pool, MIB(4), s);
    refused(pool, MIB(1000), s);
    give(p, s);
    refused(pool, MIB(1001), s);
    p = get(pool, MIB(1000), s);
    give(p, s);
    pool_end(pool);
    pool = torch_pool(MIB(19));
    refused(pool, MIB(2), s); /* its segment has 20 MiB */
    p = get(pool, MIB(18), s);
    refused(pool, KIB(1), s);
    give(p, s);
    end(pool, s);
}

/* test_raises_oom: 4 TiB, with and without max_split_size; later requests work. */
TEST(too_much_is_refused)
{
    for (int split = 0; split < 2; split++) {
        begin();
        cudaStream_t s = stream_new();
        galloc_config config = with(torch_config(), split ? "max_split_size_mb:20" : "max_split_size:none");
        galloc_pool *pool = pool_new(&config);
        refused(pool, GIB(4096), s);
        refused(pool, SIZE_MAX, s);
        EXPECT_EQ(torch_of(pool).num_ooms, 2); /* the second is more than there are addresses */
        void *p = get(pool, 512, s);
        give(p, s);
        end(pool, s);
    }
}

/* PyTorch issue 189504: what the wait brings home, in a segment that cannot be given back, is found. */
TEST(what_the_wait_brings_home_is_found)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = torch_pool(MIB(20));
    void *p = get(pool, MIB(9), s), *pin = get(pool, MIB(2), s);
    put(s, p, MIB(9), 1);
    order(s, t);
    look(t, p, MIB(9), 1);
    OK(galloc_record_stream(p, t));
    give(p, s);
    void *q = get(pool, MIB(9), s), *r = get(pool, MIB(9), s);
    EXPECT(q != p);
    EXPECT(r == p);
    EXPECT_EQ(torch_of(pool).num_alloc_retries, 0);
    EXPECT_EQ(torch_of(pool).num_sync_all_streams, 1);
    give(pin, s);
    give(q, s);
    give(r, s);
    stream_end(t);
    end(pool, s);
}

/* Whatever step fails, by the driver or for want of host memory, nothing is lost. */
TEST(failures_change_nothing)
{
    static const char *const functions[] = {"cuMemAlloc", "cuMemFree", "cuEventCreate", "cuEventRecord",
                                            "cuEventQuery"};
    for (int which = 0; which < 6; which++) {
        long failed = 0;
        for (long nth = 1; nth < 24; nth++) {
            begin();
            cudaStream_t s = stream_new(), t = stream_new();
            galloc_config config = with(torch_config(), "max_split_size_mb:20,gc_threshold:0.5");
            config.memory_limit = MIB(80);
            galloc_pool *pool = pool_new(&config);
            void *p[10] = {NULL};
            if (which < 5) sim_fail(functions[which], nth, 0, which < 1 ? 2 : 999);
            else sim_fail_malloc(nth, 0);
            for (int i = 0; i < 10; i++) {
                cudaStream_t stream = i % 2 ? s : t;
                (void)galloc_pool_malloc(pool, &p[i], i % 3 ? MIB(12) * (size_t)i : KIB(300), stream);
                EXPECT_EQ(galloc_pool_check(pool), 0);
                if (p[i]) OK(galloc_record_stream(p[i], i % 4 ? s : t));
                if (p[i]) give(p[i], stream);
                EXPECT_EQ(galloc_pool_check(pool), 0);
            }
            failed += sim_failed() + sim_failed_mallocs();
            sim_fail_clear();
            sim_fail_malloc(0, 0);
            empty(pool);
            EXPECT_EQ(reserved(pool), 0);
            stream_end(s);
            stream_end(t);
            pool_end(pool);
            finish();
        }
        EXPECT(failed > 0);
    }
}

/* Without host memory for a list of a stream's free segments a request fails, and the limit has its room again. */
TEST(a_list_of_segments_without_host_memory_takes_no_room)
{
    for (int small = 0; small < 2; small++) {
        for (int on = 0; on < 2; on++) {
            begin();
            cudaStream_t s = stream_new();
            size_t bytes = small ? MIB(1) : MIB(40), most = MIB(40);
            galloc_pool *pool = torch_pool(most);
            void *p = NULL;
            give(get(pool, small ? MIB(2) : KIB(512), s), s); /* the list of the other size, and descriptors */
            empty(pool);
            sim_fail_malloc(1, on);
            (void)galloc_pool_malloc(pool, &p, bytes, s);
            EXPECT(sim_failed_mallocs() > 0);
            if (on) EXPECT(!p);
            sim_fail_malloc(0, 0);
            EXPECT_EQ(galloc_pool_check(pool), 0);
            EXPECT_EQ(inside_headroom(pool), most - reserved(pool));
            if (!p) p = get(pool, bytes, s);
            give(p, s);
            empty(pool);
            EXPECT_EQ(inside_headroom(pool), most);
            end(pool, s);
        }
    }
}

/* A step that waits for the device, so that more can be given back, gives nothing back if the wait fails. */
TEST(a_step_whose_wait_fails_gives_nothing_back)
{
    static const char *const steps[] = {"max_split_size_mb:20,memory_limit:100M",
                                        "gc_threshold:0.5,memory_limit:100M"};
    for (int i = 0; i < 2; i++) {
        begin_still();
        cudaStream_t s = stream_new();
        galloc_config config = with(torch_config(), steps[i]);
        galloc_pool *pool = pool_new(&config);
        void *p = get_used(pool, MIB(40), s, 1), *q = NULL;
        give(p, s);
        inside_ask_for_event(pool, stream_id(s));
        p = get(pool, MIB(50), s);
        OK(cudaStreamSynchronize(s));
        OK(galloc_pool_trim(pool, SIZE_MAX, NULL)); /* notices that the first is done */
        put(s, p, MIB(50), 1);
        give(p, s);
        sim_fail("cuMemFreeHost", 1, 1, cudaErrorUnknown);
        EXPECT_EQ(galloc_pool_malloc(pool, &q, MIB(80), s), cudaErrorUnknown);
        EXPECT(q == NULL);
        sim_fail_clear();
        EXPECT_EQ(reserved(pool), MIB(90));
        EXPECT_EQ(galloc_pool_check(pool), 0);
        q = get_used(pool, MIB(80), s, 2);
        EXPECT_EQ(reserved(pool), MIB(80));
        give(q, s);
        end(pool, s);
    }
}

/* cudaDeviceReset takes the segments; what comes then gets new ones. */
TEST(a_reset_takes_the_segments)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = torch_pool(SIZE_MAX);
    void *p = get(pool, MIB(5), s), *q = get(pool, MIB(5), s);
    give(p, s);
    OK(cudaDeviceReset());
    s = stream_new();
    give(q, s);
    give(get(pool, MIB(5), s), s);
    OK(galloc_pool_trim(pool, SIZE_MAX, NULL));
    EXPECT_EQ(galloc_pool_check(pool), 0);
    EXPECT_EQ(reserved(pool), MIB(20));
    end(pool, s);
}

/* ---- max_split_size ---------------------------------------------------------------------------------------------- */

/* Blocks of that size are never cut, and are kept for requests of that size, which take one that is hardly larger. */
TEST(oversize_blocks_are_kept_whole)
{
    for (int like = 0; like < 2; like++) {
        begin();
        cudaStream_t s = stream_new();
        galloc_config config = with(like ? torch_config() : config_fixed(), "max_split_size_mb:30");
        galloc_pool *pool = pool_new(&config);
        void *big = get(pool, MIB(60), s);
        give(big, s);
        void *p = get(pool, MIB(25), s); /* below the size: not of that block */
        EXPECT_EQ(stats_of(pool).reserved.current, MIB(86));
        void *q = get(pool, MIB(40), s); /* the block is larger by 20 MiB: too much */
        EXPECT_EQ(stats_of(pool).reserved.current, MIB(126));
        void *r = get(pool, MIB(41), s); /* by 19 MiB: all of it */
        EXPECT(r == big);
        EXPECT_EQ(stats_of(pool).reserved.current, MIB(126));
        EXPECT_EQ(info_of(r).usable, MIB(60));
        EXPECT_EQ(info_of(r).requested, MIB(41));
        EXPECT_EQ(stats_of(pool).live.current, MIB(106));
        if (like) {
            EXPECT_EQ(torch_of(pool).oversize_segments.current, 2);
            EXPECT_EQ(torch_of(pool).oversize_allocations.current, 2);
        }
        give(p, s);
        give(q, s);
        give(r, s);
        p = get(pool, MIB(12), s); /* below the size, of a block below it: cut */
        EXPECT_EQ(info_of(p).usable, MIB(12));
        EXPECT_EQ(stats_of(pool).reserved.current, MIB(126));
        give(p, s);
        if (like) EXPECT_EQ(torch_of(pool).oversize_allocations.current, 0);
        end(pool, s);
    }
}

/* max_split_size itself belongs to what is never cut. */
TEST(a_block_of_the_size_that_is_never_cut_is_not_cut)
{
    for (int like = 0; like < 2; like++) {
        begin();
        cudaStream_t s = stream_new();
        galloc_config config = with(like ? torch_config() : config_fixed(), "max_split_size_mb:30");
        galloc_pool *pool = pool_new(&config);
        void *big = get(pool, MIB(30), s);
        if (like) EXPECT_EQ(torch_of(pool).oversize_segments.current, 1);
        give(big, s);
        void *p = get(pool, MIB(12), s);
        EXPECT_EQ(stats_of(pool).reserved.current, MIB(42));
        void *q = get(pool, MIB(30), s);
        EXPECT(q == big);
        OK(galloc_pool_stats_reset(pool));
        if (like) EXPECT_EQ(torch_of(pool).oversize_segments.total, 0);
        if (like) EXPECT_EQ(torch_of(pool).oversize_allocations.total, 0);
        if (like) EXPECT_EQ(torch_of(pool).oversize_segments.current, 1);
        give(p, s);
        give(q, s);
        end(pool, s);
    }
}

/* Bytes that a block grows by count as allocated, those that it is cut by as freed. */
TEST(resizes_count_in_the_totals)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = torch_config();
    galloc_pool *pool = pool_new(&config);
    void *p = get(pool, MIB(2), s);
    OK(galloc_resize(p, MIB(4), s));
    EXPECT_EQ(torch_of(pool).requested_bytes.all.total, MIB(4));
    EXPECT_EQ(torch_of(pool).allocated_bytes.all.total, stats_of(pool).allocated.total);
    OK(galloc_resize(p, MIB(3), s));
    EXPECT_EQ(torch_of(pool).requested_bytes.all.total, MIB(4));
    OK(galloc_resize(p, MIB(4), s));
    EXPECT_EQ(torch_of(pool).requested_bytes.all.total, MIB(5));
    give(p, s);
    end(pool, s);
}

/* A block that is resized counts by the size that it has now. */
TEST(a_block_that_shrinks_below_max_split_size_is_no_longer_oversize)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = with(torch_config(), "max_split_size_mb:32");
    galloc_pool *pool = pool_new(&config);
    void *p = get(pool, MIB(40), s);
    EXPECT_EQ(torch_of(pool).oversize_allocations.current, 1);
    OK(galloc_resize(p, MIB(32), s)); /* that size itself is one */
    EXPECT_EQ(torch_of(pool).oversize_allocations.current, 1);
    OK(galloc_resize(p, MIB(10), s));
    EXPECT_EQ(torch_of(pool).oversize_allocations.current, 0);
    EXPECT_EQ(torch_of(pool).oversize_segments.current, 1); /* the segment is as large as ever */
    EXPECT_EQ(torch_of(pool).oversize_allocations.total, 1);
    OK(galloc_resize(p, MIB(36), s));
    EXPECT_EQ(torch_of(pool).oversize_allocations.current, 1);
    EXPECT_EQ(torch_of(pool).oversize_allocations.total, 2); /* total - current: how many are no more */
    EXPECT_EQ(torch_of(pool).oversize_allocations.peak, 1);
    give(p, s);
    EXPECT_EQ(torch_of(pool).oversize_allocations.current, 0);
    end(pool, s);
}

/* A segment whose stream is gone goes to the first stream that it serves, not to one that may not have it. */
TEST(an_oversize_segment_without_a_stream_waits_for_its_like)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new(), u = stream_new();
    galloc_config config = with(torch_config(), "max_split_size_mb:30");
    galloc_pool *pool = pool_new(&config);
    void *big = get(pool, MIB(60), s);
    give(big, s);
    OK(galloc_stream_retire(s));
    stream_end(s);
    sim_run(-1);
    void *p = get(pool, MIB(12), t);
    EXPECT_EQ(reserved(pool), MIB(72));
    void *q = get(pool, MIB(60), u);
    EXPECT(q == big);
    EXPECT_EQ(reserved(pool), MIB(72));
    give(p, t);
    give(q, u);
    stream_end(t);
    end(pool, u);
}

/* A segment is collected, however many older parts of segments are free on its stream. */
TEST(free_parts_of_segments_do_not_hide_an_idle_one)
{
    enum { PARTS = 12 };
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_config config = with(torch_config(), "memory_limit:1600M,gc_threshold:0.2");
    galloc_pool *pool = pool_new(&config);
    void *p[PARTS][2];
    for (int i = 0; i < PARTS; i++)
        for (int k = 0; k < 2; k++) p[i][k] = get(pool, MIB(9), s); /* 2 MiB of the segment stay free */
    give(get_used(pool, MIB(300), s, 1), s);
    OK(cudaDeviceSynchronize());
    size_t before = reserved(pool);
    void *q = get(pool, MIB(30), t);
    EXPECT_EQ(reserved(pool), before - MIB(300) + MIB(30));
    give(q, t);
    for (int i = 0; i < PARTS; i++)
        for (int k = 0; k < 2; k++) give(p[i][k], s);
    stream_end(t);
    end(pool, s);
}

/* Oversize segments that together are smaller than the request do not make space for it: all that is free goes. */
TEST(a_request_beyond_its_streams_oversize_segments_empties_the_pool)
{
    for (size_t more = 0; more <= MIB(20); more += MIB(20)) { /* the second time they suffice */
        begin();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_config config = with(torch_config(), "memory_limit:300M,max_split_size_mb:30");
        galloc_pool *pool = pool_new(&config);
        void *used = get(pool, MIB(100) - more, t);
        void *first = get(pool, MIB(60) + more, s), *second = get(pool, MIB(50), s), *others = get(pool, MIB(60), t);
        give(first, s);
        give(second, s);
        give(others, t);
        void *p = get(pool, MIB(120), s);
        EXPECT_EQ(torch_of(pool).num_alloc_retries, !more);
        EXPECT_EQ(reserved(pool), more ? MIB(260) : MIB(220));
        give(p, s);
        give(used, t);
        stream_end(t);
        end(pool, s);
    }
}

/* Nor for an alignment: the request gets a segment of its own. */
TEST(an_oversize_block_is_not_cut_for_an_alignment)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = with(config_fixed(), "max_split_size_mb:30");
    galloc_pool *pool = pool_new(&config);
    void *some[2], *p = NULL;
    for (int i = 0; i < 2; i++) some[i] = get(pool, MIB(62), s); /* side by side: not both at a multiple of 16 MiB */
    void *big = some[(uintptr_t)some[0] % MIB(16) == 0], *other = big == some[0] ? some[1] : some[0];
    EXPECT((uintptr_t)big % MIB(16) != 0);
    give(big, s);
    galloc_request request = {.bytes = MIB(44), .alignment = MIB(16), .stream = s, .pool = pool};
    size_t held = stats_of(pool).reserved.current;
    OK(galloc_alloc(&p, &request));
    EXPECT_EQ((uintptr_t)p % MIB(16), 0);
    EXPECT((char *)p < (char *)big || (char *)p >= (char *)big + MIB(62));
    EXPECT(stats_of(pool).reserved.current > held);
    give(p, s);
    p = get(pool, MIB(62), s);
    EXPECT(p == big);
    give(p, s);
    give(other, s);
    end(pool, s);
}

/* A segment made for an alignment is cut at both ends: the request gets no more than its bytes, or max_bytes. */
TEST(a_new_oversize_segment_is_cut_for_its_alignment)
{
    for (size_t most = MIB(40); most <= MIB(48); most += MIB(8)) {
        begin();
        cudaStream_t s = stream_new();
        galloc_config config = with(config_fixed(), "max_split_size_mb:30");
        galloc_pool *pool = pool_new(&config);
        galloc_request request = {.bytes = MIB(40), .alignment = MIB(128), .stream = s, .pool = pool};
        request.max_bytes = most;
        void *other = get(pool, MIB(3), s), *p = NULL; /* so that the next segment begins at no multiple of 128 MiB */
        OK(galloc_alloc(&p, &request));
        EXPECT_EQ((uintptr_t)p % MIB(128), 0);
        EXPECT_EQ(info_of(p).usable, most);
        EXPECT_EQ(info_of(p).room, most);
        expect_healthy(pool, 1);
        give(p, s);
        give(other, s);
        end(pool, s);
    }
}

/* A new segment has room for an alignment that the driver's addresses do not have. */
TEST(segments_have_room_for_their_alignment)
{
    for (size_t alignment = MIB(4); alignment <= MIB(64); alignment *= 4) {
        begin();
        cudaStream_t s = stream_new();
        galloc_pool *pool = torch_pool(SIZE_MAX);
        void *p[3];
        for (uint64_t i = 0; i < 3; i++) {
            galloc_request request = {.bytes = MIB(12), .alignment = alignment, .stream = s, .pool = pool};
            OK(galloc_alloc(&p[i], &request));
            EXPECT_EQ((uintptr_t)p[i] % alignment, 0);
            put(s, p[i], MIB(12), i);
            EXPECT_EQ(galloc_pool_check(pool), 0);
        }
        for (uint64_t i = 0; i < 3; i++) look(s, p[i], MIB(12), i);
        for (int i = 0; i < 3; i++) give(p[i], s);
        end(pool, s);
    }
}

TEST(max_non_split_rounding_says_how_much_larger)
{
    for (int like = 0; like < 2; like++) {
        begin();
        cudaStream_t s = stream_new();
        galloc_config config = with(like ? torch_config() : config_fixed(),
                                    "max_split_size_mb:30,max_non_split_rounding_mb:40");
        galloc_pool *pool = pool_new(&config);
        give(get(pool, MIB(100), s), s);
        void *p = get(pool, MIB(60), s);
        EXPECT_EQ(stats_of(pool).reserved.current, MIB(160));
        void *q = get(pool, MIB(62), s);
        EXPECT_EQ(stats_of(pool).reserved.current, MIB(160));
        give(p, s);
        give(q, s);
        end(pool, s);
    }
}

TEST(without_max_non_split_rounding_a_block_may_be_larger_by_large_segment_size)
{
    for (int like = 0; like < 2; like++) {
        begin();
        cudaStream_t s = stream_new();
        galloc_config config = with(like ? torch_config() : config_fixed(),
                                    "max_split_size_mb:64,large_segment_size_mb:64");
        galloc_pool *pool = pool_new(&config);
        give(get(pool, MIB(128), s), s);
        void *p = get(pool, MIB(66), s);
        EXPECT_EQ(stats_of(pool).reserved.current, MIB(128));
        give(p, s);
        p = get(pool, MIB(64), s);
        EXPECT_EQ(stats_of(pool).reserved.current, MIB(192));
        give(p, s);
        end(pool, s);
    }
}

/* When memory is short oversize segments of the stream go first, and no more than is needed. */
TEST(oversize_segments_are_given_back_first)
{
    for (int reverse = 0; reverse < 2; reverse++) { /* the largest is freed first */
        begin();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_config config = with(torch_config(), "max_split_size_mb:30");
        config.memory_limit = MIB(200);
        galloc_pool *pool = pool_new(&config);
        void *p = get(pool, MIB(40), s), *q = get(pool, MIB(50), s), *r = get(pool, MIB(60), s);
        void *o = get(pool, MIB(50), t);
        give(reverse ? r : p, s);
        give(q, s);
        give(reverse ? p : r, s);
        give(o, t);
        sim_run(-1);
        OK(galloc_pool_trim(pool, SIZE_MAX, NULL));
        p = get(pool, MIB(20), s); /* the smallest that has the size: 40 MiB */
        EXPECT_EQ(reserved(pool), MIB(180));
        EXPECT_EQ(torch_of(pool).num_alloc_retries, 0);
        q = get(pool, MIB(100), s); /* from the largest down: 60 and 50 */
        EXPECT_EQ(reserved(pool), MIB(170));
        EXPECT_EQ(torch_of(pool).num_alloc_retries, 0);
        EXPECT_EQ(torch_of(pool).num_device_free, 3);
        give(p, s);
        give(q, s);
        stream_end(t);
        end(pool, s);
    }
}

/* But once the stream's work on them is waited for, memory that came back from another stream meanwhile is taken. */
TEST(oversize_segments_stay_if_the_wait_for_them_suffices)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_config config = with(torch_config(), "max_split_size_mb:30");
    config.memory_limit = MIB(100);
    galloc_pool *pool = pool_new(&config);
    void *p = get_used(pool, MIB(40), s, 1), *q = get_used(pool, MIB(60), s, 2);
    order(s, t);
    put(t, q, MIB(60), 3);
    give(p, s);
    give(q, t);
    q = get_used(pool, MIB(60), s, 4);
    EXPECT_EQ(torch_of(pool).num_device_free, 0);
    give(q, s);
    stream_end(t);
    end(pool, s);
}

/* One of exactly max_split_size is one of them, and goes before a larger one if it suffices. */
TEST(an_oversize_segment_of_just_that_size_goes_first)
{
    for (int both = 0; both < 2; both++) {
        begin();
        cudaStream_t s = stream_new();
        galloc_config config = with(torch_config(), both ? "max_split_size_mb:30,memory_limit:100M"
                                                         : "max_split_size_mb:30,memory_limit:40M");
        galloc_pool *pool = pool_new(&config);
        void *p = get(pool, MIB(30), s), *q = both ? get(pool, MIB(60), s) : NULL;
        give(p, s);
        if (q) give(q, s);
        OK(cudaDeviceSynchronize());
        OK(galloc_pool_trim(pool, SIZE_MAX, NULL));
        p = get(pool, MIB(20), s);
        EXPECT_EQ(reserved(pool), both ? MIB(80) : MIB(20));
        EXPECT_EQ(torch_of(pool).num_alloc_retries, 0);
        EXPECT_EQ(torch_of(pool).num_device_free, 1);
        give(p, s);
        end(pool, s);
    }
}

/* No single one suffices: then they go from the largest down, until there is room. */
TEST(the_largest_oversize_segments_go_first)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = with(torch_config(), "max_split_size_mb:40");
    config.memory_limit = MIB(300);
    galloc_pool *pool = pool_new(&config);
    static const size_t sizes[] = {MIB(50), MIB(60), MIB(100)};
    void *p[3];
    for (int i = 0; i < 3; i++) p[i] = get(pool, sizes[i], s);
    for (int i = 0; i < 3; i++) give(p[i], s);
    void *q = get(pool, MIB(150), s);
    EXPECT_EQ(reserved(pool), MIB(200)); /* 100 and 60 are gone */
    give(q, s);
    end(pool, s);
}

/* ---- collection -------------------------------------------------------------------------------------------------- */

/* test_garbage_collect_expandable, with plain segments: limit 120 MiB, threshold 0.5: 40 + 40 freed, 80 are had. The
   limit may be said as a fraction of 1000 MiB, too. */
TEST(collection_makes_room_under_a_limit)
{
    for (int fraction = 0; fraction < 2; fraction++) {
        sim_options options = sim_defaults();
        options.memory = MIB(1000);
        begin_with(options);
        cudaStream_t s = stream_new();
        const char *limit = fraction ? "per_process_memory_fraction:0.12" : "memory_limit:120M";
        galloc_config config = with(torch_config(), limit);
        config.gc_threshold = 0.5;
        galloc_pool *pool = pool_new(&config);
        void *p = get(pool, MIB(40), s), *q = get(pool, MIB(40), s);
        give(p, s);
        give(q, s);
        p = get(pool, MIB(80), s);
        EXPECT_EQ(torch_of(pool).num_alloc_retries, 0);
        EXPECT_EQ(reserved(pool), MIB(80));
        give(p, s);
        end(pool, s);
    }
}

/* A collection waits for the device. That makes a block with a recorded use usable: it serves the request, and no new
   segment is made. */
TEST(a_block_that_the_wait_of_a_collection_makes_usable_serves)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_config config = with(torch_config(), "gc_threshold:0.5,memory_limit:100M");
    galloc_pool *pool = pool_new(&config);
    void *young = get_used(pool, MIB(30), s, 1);
    give(young, s);
    void *old = get_used(pool, MIB(31), s, 2);
    order(s, t);
    look(t, old, MIB(31), 2);
    OK(galloc_record_stream(old, t));
    give(old, s);
    void *p = get_used(pool, MIB(31), s, 3);
    EXPECT(p == old);
    EXPECT_EQ(torch_of(pool).num_device_alloc, 2);
    EXPECT_EQ(torch_of(pool).num_alloc_retries, 0);
    give(p, s);
    stream_end(t);
    end(pool, s);
}

/* test_max_split_expandable, with plain segments: under 120 MiB there are three of 40, not a fourth; all freed, one of
   120 is had. */
TEST(the_limit_holds_three_of_a_third)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = with(torch_config(), "max_split_size_mb:40,memory_limit:120M");
    galloc_pool *pool = pool_new(&config);
    void *p[3];
    for (int i = 0; i < 3; i++) p[i] = get(pool, MIB(40), s);
    refused(pool, MIB(40), s);
    for (int i = 0; i < 3; i++) give(p[i], s);
    p[0] = get(pool, MIB(120), s);
    give(p[0], s);
    end(pool, s);
}

static galloc_pool *collecting_pool(void)
{
    galloc_config config = with(torch_config(), "garbage_collection_threshold:0.5,memory_limit:200M");
    return pool_new(&config);
}

/* Small segments go not, but count as held. */
static void count_small_segments(const char *limit)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = with(with(torch_config(), "garbage_collection_threshold:0.5"), limit);
    galloc_pool *pool = pool_new(&config);
    void *small[30];
    for (int i = 0; i < 30; i++) small[i] = get(pool, MIB(1), s);
    void *p = get(pool, MIB(20), s), *q = get(pool, MIB(60), s);
    give(q, s);
    EXPECT_EQ(reserved(pool), MIB(110));
    q = get(pool, MIB(70), s); /* more than half is held, by 10 MiB */
    EXPECT_EQ(reserved(pool), MIB(30 + 20 + 70));
    give(q, s);
    give(p, s);
    for (int i = 0; i < 30; i++) give(small[i], s);
    end(pool, s);
}

TEST(small_segments_count_for_the_threshold) { count_small_segments("memory_limit:200M"); }

TEST(the_threshold_is_of_a_device_limit_too) { count_small_segments("device_limit:200M"); }

/* What is as old as the mean or older goes first, and no more if that is enough. Age is counted in searches. */
TEST(collection_takes_the_old)
{
    for (int more = 0; more < 2; more++) {
        begin();
        cudaStream_t s = stream_new();
        galloc_pool *pool = collecting_pool();
        void *p = get(pool, MIB(24), s), *q = get(pool, MIB(22), s);
        give(p, s);
        for (int i = 0; i < 6; i++) give(get(pool, MIB(30), s), s);
        give(q, s);
        p = get(pool, more ? MIB(52) : MIB(42), s); /* 76 MiB are held: not more than half */
        EXPECT_EQ(reserved(pool), more ? MIB(128) : MIB(118));
        q = get(pool, MIB(46), s); /* 18 too much: the first; or 28: then the mean of the others is their age */
        EXPECT_EQ(reserved(pool), more ? MIB(128) - MIB(76) + MIB(46) : MIB(118) - MIB(24) + MIB(46));
        EXPECT_EQ(torch_of(pool).num_sync_all_streams, 0);
        give(p, s);
        give(q, s);
        end(pool, s);
    }
}

/* All that is as old as the mean, though less would do. Only searches for large blocks count; small segments stay, and
   so do those of which a part is used. */
TEST(collection_takes_what_is_equally_old)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = collecting_pool();
    give(get(pool, KIB(1), s), s);
    void *p = get(pool, MIB(24), s), *q = get(pool, MIB(22), s), *r = get(pool, MIB(20), s), *t = get(pool, MIB(34), s);
    void *part = get(pool, MIB(9), s);
    give(get(pool, MIB(9), s), s);
    give(p, s);
    for (int i = 0; i < 20; i++) give(get(pool, KIB(1), s), s);
    give(q, s);
    EXPECT_EQ(reserved(pool), MIB(122));
    void *u = get(pool, MIB(26), s);
    EXPECT_EQ(reserved(pool), MIB(122) - MIB(46) + MIB(26));
    give(r, s);
    give(t, s);
    give(u, s);
    give(part, s);
    end(pool, s);
}

/* A request is one search, however many steps it takes: p and q are older than the mean, r is not. */
TEST(a_request_counts_as_one_search)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = with(torch_config(), "memory_limit:200M,garbage_collection_threshold:0.55");
    galloc_pool *pool = pool_new(&config);
    void *p = get(pool, MIB(20), s), *q = get(pool, MIB(20), s), *r = get(pool, MIB(20), s);
    void *again = get(pool, MIB(12), s), *beside = get(pool, MIB(12), s), *grown, *large;
    give(p, s);
    grown = get(pool, MIB(30), s); /* needs a segment: more steps than those that find a free one */
    give(q, s);
    for (int i = 0; i < 2; i++) {
        give(again, s);
        again = get(pool, MIB(12), s);
    }
    give(r, s);
    EXPECT_EQ(reserved(pool), MIB(114));
    large = get(pool, MIB(40), s);
    EXPECT_EQ(reserved(pool), MIB(114) - MIB(20) - MIB(20) + MIB(40));
    give(again, s);
    give(beside, s);
    give(grown, s);
    give(large, s);
    end(pool, s);
}

/* Before its first use the age of a reserved segment counts from when it was made. */
TEST(a_reserved_segment_is_as_old_as_its_reservation)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = collecting_pool();
    void *p = get(pool, MIB(22), s), *q = get(pool, MIB(24), s), *again = get(pool, MIB(12), s), *large;
    give(p, s);
    give(q, s);
    for (int i = 0; i < 6; i++) {
        give(again, s);
        again = get(pool, MIB(12), s);
    }
    OK(galloc_pool_reserve(pool, MIB(48)));
    EXPECT_EQ(reserved(pool), MIB(106));
    large = get(pool, MIB(50), s); /* 6 too much: both that are older than the mean go */
    EXPECT_EQ(reserved(pool), MIB(106) - MIB(22) - MIB(24) + MIB(50));
    EXPECT_EQ(info_of(p).state, GALLOC_STATE_FOREIGN);
    EXPECT_EQ(info_of(q).state, GALLOC_STATE_FOREIGN);
    give(again, s);
    give(large, s);
    end(pool, s);
}

/* Segments of a graph stay, also when it is gone: only a request that is large enough takes them, or one that finds no
   memory has them returned. */
TEST(collection_leaves_segments_of_graphs)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = collecting_pool();
    cudaGraph_t graph = NULL;
    void *q = get(pool, MIB(22), s);
    OK(cudaStreamBeginCapture(t, cudaStreamCaptureModeRelaxed));
    void *p = get(pool, MIB(24), t), *wall;
    give(p, t);
    OK(cudaStreamEndCapture(t, &graph));
    OK(cudaGraphDestroy(graph));
    give(q, s);
    for (int i = 0; i < 6; i++) give(get(pool, MIB(30), s), s);
    wall = get(pool, MIB(40), s);
    EXPECT_EQ(reserved(pool), MIB(116));
    void *r = get(pool, MIB(46), s); /* 16 MiB are held too much: the older one of S goes */
    EXPECT_EQ(reserved(pool), MIB(116) - MIB(22) + MIB(46));
    EXPECT(info_of(p).state != GALLOC_STATE_FOREIGN);
    give(r, s);
    give(wall, s);
    stream_end(t);
    end(pool, s);
}

/* What graphs used that are gone serves later captures, and other streams, although no cudaFree is possible there. */
TEST(segments_of_graphs_that_are_gone_are_used_again)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_config config = with(torch_config(), "memory_limit:30M");
    galloc_pool *pool = pool_new(&config);
    for (int i = 0; i < 20; i++) {
        cudaGraph_t graph = NULL;
        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
        give(get(pool, MIB(9), s), s);
        OK(cudaStreamEndCapture(s, &graph));
        OK(cudaGraphDestroy(graph));
    }
    give(get(pool, MIB(9), t), t);
    EXPECT_EQ(reserved(pool), MIB(20));
    stream_end(t);
    end(pool, s);
}

/* What a graph has used is free once the graph is gone, and torch_stats says so if it is what is asked first. */
TEST(the_figures_are_those_without_graphs_that_are_gone)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = torch_pool(GIB(1));
    galloc_torch_stats first, again;
    cudaGraph_t graph = NULL;
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    order(s, t);
    void *p = get_used(pool, KIB(300), s, 1), *q = get(pool, KIB(300), s);
    OK(galloc_record_stream(q, t));
    give(q, s);
    give(p, s);
    order(t, s);
    OK(cudaStreamEndCapture(s, &graph));
    OK(cudaGraphDestroy(graph));
    OK(galloc_pool_torch_stats(pool, &first));
    (void)stats_of(pool);
    OK(galloc_pool_torch_stats(pool, &again));
    EXPECT_EQ(first.active_bytes.all.current, 0);
    EXPECT(!memcmp(&first, &again, sizeof first));
    stream_end(t);
    end(pool, s);
}

TEST(collection_needs_a_limit)
{
    sim_options options = sim_defaults();
    options.memory = MIB(200);
    begin_with(options);
    cudaStream_t s = stream_new();
    galloc_config config = with(torch_config(), "garbage_collection_threshold:0.1");
    galloc_pool *pool = pool_new(&config);
    void *p = get(pool, MIB(40), s), *q = get(pool, MIB(40), s);
    give(p, s);
    give(q, s);
    p = get(pool, MIB(60), s);
    EXPECT_EQ(reserved(pool), MIB(140));
    give(p, s);
    end(pool, s);
}

/* ---- graphs ------------------------------------------------------------------------------------------------------ */

static void capture_begin(cudaStream_t stream) { OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal)); }

static cudaGraphExec_t capture_ready(cudaStream_t stream)
{
    cudaGraphExec_t exec = NULL;
    cudaGraph_t graph = NULL;
    OK(cudaStreamEndCapture(stream, &graph));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    OK(cudaGraphDestroy(graph));
    return exec;
}

/* b = a.clone(), then five times b = b.clone() + 1. */
static void *chain(galloc_pool *pool, size_t bytes, cudaStream_t s)
{
    char *b = get(pool, bytes, s);
    put(s, b, bytes, 1);
    for (uint64_t i = 0; i < 5; i++) {
        char *clone = get(pool, bytes, s), *sum;
        look(s, b, bytes, i + 1);
        put(s, clone, bytes, i + 1);
        sum = get(pool, bytes, s);
        look(s, clone, bytes, i + 1);
        put(s, sum, bytes, i + 2);
        give(clone, s);
        give(b, s);
        b = sum;
    }
    return b;
}

/* test_graph_memory_stats_and_use_result_after_destroy_graph: segments and bytes that a capture adds, and what is left
   of them once the graph is gone and the cache is emptied, while its result is used. PyTorch's own two blocks for the
   seed of random numbers are not there. */
TEST(graphs_hold_what_they_hold_in_pytorch)
{
    static const struct {
        size_t bytes, segments, held, left;
    } cases[] = {{512, 1, MIB(2), MIB(2)},
                 {MIB(1), 2, MIB(4), MIB(2)},
                 {MIB(1) + 512, 1, MIB(20), MIB(20)},
                 {MIB(10) - 512, 2, MIB(40), MIB(20)},
                 {MIB(10) + 512, 3, MIB(36), MIB(12)}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        begin();
        cudaStream_t s = stream_new();
        galloc_pool *pool = torch_pool(SIZE_MAX);
        void *a = get(pool, cases[i].bytes, s);
        galloc_torch_stats before = torch_of(pool), after;
        capture_begin(s);
        void *b = chain(pool, cases[i].bytes, s);
        cudaGraphExec_t exec = capture_ready(s);
        after = torch_of(pool);
        EXPECT_EQ(after.segment.all.current - before.segment.all.current, cases[i].segments);
        EXPECT_EQ(after.reserved_bytes.all.current - before.reserved_bytes.all.current, cases[i].held);
        EXPECT_EQ(after.active.all.current - before.active.all.current, 1);
        EXPECT_EQ(after.active_bytes.all.current - before.active_bytes.all.current, cases[i].bytes);
        OK(cudaGraphLaunch(exec, s));
        look(s, b, cases[i].bytes, 6);
        OK(cudaStreamSynchronize(s));
        OK(cudaGraphExecDestroy(exec));
        empty(pool);
        after = torch_of(pool);
        EXPECT_EQ(after.reserved_bytes.all.current - before.reserved_bytes.all.current, cases[i].left);
        EXPECT_EQ(after.active_bytes.all.current - before.active_bytes.all.current, cases[i].bytes);
        look(s, b, cases[i].bytes, 6);
        give(a, s);
        give(b, s);
        empty(pool);
        EXPECT_EQ(reserved(pool), 0);
        end(pool, s);
    }
}

/* test_graph_two_successive: sharing saves what the second graph would hold, 2 MiB here. */
TEST(graphs_that_share_hold_what_one_holds)
{
    size_t held[2];
    for (int share = 0; share < 2; share++) {
        begin();
        cudaStream_t s = stream_new();
        galloc_pool *pool = torch_pool(SIZE_MAX);
        galloc_graph *group = NULL;
        cudaGraphExec_t exec[2];
        void *result[2];
        for (int i = 0; i < 2; i++) {
            if (share) OK(galloc_graph_begin(&group, pool, s));
            capture_begin(s);
            result[i] = chain(pool, 400, s);
            exec[i] = capture_ready(s);
            if (share) OK(galloc_graph_end(group));
            EXPECT_EQ(galloc_pool_check(pool), 0);
        }
        held[share] = reserved(pool);
        for (int i = 0; i < 2; i++) OK(cudaGraphLaunch(exec[i], s));
        for (int i = 0; i < 2; i++) look(s, result[i], 400, 6);
        OK(cudaStreamSynchronize(s));
        for (int i = 0; i < 2; i++) give(result[i], s);
        for (int i = 0; i < 2; i++) OK(cudaGraphExecDestroy(exec[i]));
        if (share) OK(galloc_graph_release(group, s));
        EXPECT_EQ(galloc_pool_check(pool), 0);
        empty(pool);
        EXPECT_EQ(reserved(pool), 0);
        end(pool, s);
    }
    EXPECT_EQ(held[0] - held[1], MIB(2));
}

/* What graphs share they share stream by stream. */
TEST(streams_of_a_group_keep_to_their_segments)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = torch_pool(SIZE_MAX);
    galloc_graph *group = NULL;
    cudaGraphExec_t exec[2];
    void *p[2];
    OK(galloc_graph_begin(&group, pool, s));
    for (int i = 0; i < 2; i++) {
        capture_begin(s);
        if (i) order(s, t);
        if (i) give(get(pool, MIB(4), t), t);
        if (i) order(t, s);
        EXPECT_EQ(reserved(pool), MIB(40) * (size_t)i); /* each stream has its own */
        p[i] = get(pool, MIB(4), s);
        put(s, p[i], MIB(4), 1);
        give(p[i], s);
        exec[i] = capture_ready(s);
    }
    OK(galloc_graph_end(group));
    EXPECT(p[0] == p[1]);
    EXPECT_EQ(galloc_pool_check(pool), 0);
    for (int i = 0; i < 2; i++) OK(cudaGraphExecDestroy(exec[i]));
    stream_end(t);
    end(pool, s);
}

/* Neither a graph's free memory nor its segments are anybody's while it may be launched. */
TEST(graphs_keep_their_segments)
{
    begin_still();
    cudaStream_t s = stream_new();
    galloc_pool *pool = torch_pool(MIB(40));
    capture_begin(s);
    give(chain(pool, MIB(4), s), s);
    cudaGraphExec_t exec = capture_ready(s);
    EXPECT_EQ(stats_of(pool).graph_bytes, MIB(12));
    void *p = get(pool, MIB(4), s);
    EXPECT_EQ(reserved(pool), MIB(40));
    refused(pool, MIB(18), s);
    empty(pool);
    EXPECT_EQ(reserved(pool), MIB(40));
    OK(cudaGraphLaunch(exec, s));
    OK(cudaGraphExecDestroy(exec));
    EXPECT_EQ(reserved(pool), MIB(40));
    void *q = get(pool, MIB(18), s); /* waits for the launch, and gives the graph's segment back */
    put(s, q, MIB(18), 9);
    give(p, s);
    give(q, s);
    end(pool, s);
}

/* ---- counters ---------------------------------------------------------------------------------------------------- */

/* test_memory_stats: 256 floats are 1024 active bytes, which are freed again; peaks can be reset. */
/* Graphs of one group share segments. One of them is gone: what it did says nothing of work on the legacy stream, which
   is not done with a result of another one. */
TEST(results_of_a_group_come_home_when_legacy_has_done)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = torch_pool(SIZE_MAX);
    galloc_graph *group = NULL;
    OK(galloc_graph_begin(&group, pool, s));
    capture_begin(s);
    void *result = get(pool, KIB(512), s), *kept, *other;
    put(s, result, KIB(512), 1);
    cudaGraphExec_t first = capture_ready(s), second;
    capture_begin(s);
    kept = get(pool, KIB(256), s);
    OK(cudaGraphExecDestroy(capture_ready(s)));
    OK(cudaGraphLaunch(first, t));
    order(t, cudaStreamLegacy);
    put(cudaStreamLegacy, result, KIB(512), 2);
    OK(galloc_pool_trim(pool, SIZE_MAX, NULL)); /* notices that a graph is gone */
    give(result, cudaStreamLegacy);
    EXPECT_EQ(galloc_pool_check(pool), 0);
    capture_begin(s);
    other = get(pool, KIB(512), s);
    EXPECT(other != result);
    put(s, other, KIB(512), 3);
    give(other, s);
    second = capture_ready(s);
    EXPECT_EQ(galloc_pool_check(pool), 0);
    OK(cudaGraphLaunch(second, t));
    EXPECT_EQ(sim_findings(SIM_RACE), 0);
    OK(galloc_graph_end(group));
    OK(cudaGraphExecDestroy(first));
    OK(cudaGraphExecDestroy(second));
    give(kept, t);
    sim_run(-1);
    stream_end(t);
    end(pool, s);
}

/* What another stream of a graph has freed comes home with the next graph of the group, which runs after it. */
TEST(memory_of_a_groups_other_stream_comes_home_with_the_next_graph)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = torch_pool(SIZE_MAX);
    galloc_graph *group = NULL;
    cudaGraphExec_t exec[2];
    void *p[2];
    OK(galloc_graph_begin(&group, pool, s));
    for (int i = 0; i < 2; i++) {
        capture_begin(s);
        order(s, t);
        p[i] = get_used(pool, MIB(4), s, 1);
        order(s, t);
        look(t, p[i], MIB(4), 1);
        give(p[i], t);
        EXPECT_EQ(galloc_pool_check(pool), 0);
        order(t, s);
        exec[i] = capture_ready(s);
    }
    EXPECT(p[0] == p[1]);
    EXPECT_EQ(reserved(pool), MIB(20));
    OK(galloc_graph_end(group));
    for (int i = 0; i < 4; i++) OK(cudaGraphLaunch(exec[i % 2], s));
    sim_run(-1);
    for (int i = 0; i < 2; i++) OK(cudaGraphExecDestroy(exec[i]));
    stream_end(t);
    end(pool, s);
}

/* What two graphs of a group have used is at home while one comes after both: not any more when that one is gone. */
TEST(block_pools_of_a_group_when_a_graph_is_gone)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = torch_pool(SIZE_MAX);
    galloc_graph *group = NULL;
    cudaGraphExec_t first, second;
    OK(galloc_graph_begin(&group, pool, s));
    capture_begin(s);
    void *result = get(pool, KIB(512), s), *kept;
    put(s, result, KIB(512), 1);
    first = capture_ready(s);
    capture_begin(s);
    OK(galloc_record_stream(result, s));
    second = capture_ready(s);
    give(result, t);
    sim_run(-1);
    capture_begin(s);
    kept = get(pool, KIB(256), s);
    OK(cudaGraphExecDestroy(capture_ready(s)));
    OK(galloc_pool_trim(pool, SIZE_MAX, NULL)); /* notices it */
    EXPECT_EQ(galloc_pool_check(pool), 0);
    OK(galloc_graph_end(group));
    OK(cudaGraphExecDestroy(first));
    OK(cudaGraphExecDestroy(second));
    give(kept, t);
    sim_run(-1);
    stream_end(t);
    end(pool, s);
}

/* As torch.cuda.empty_cache is: it waits for all streams. */
TEST(a_trim_that_waits_is_counted)
{
    begin_still();
    cudaStream_t s = stream_new();
    galloc_pool *pool = torch_pool(SIZE_MAX);
    void *p = get(pool, MIB(40), s);
    put(s, p, MIB(40), 1);
    give(p, s);
    EXPECT_EQ(torch_of(pool).num_sync_all_streams, 0);
    empty(pool);
    EXPECT_EQ(torch_of(pool).num_sync_all_streams, 1);
    EXPECT_EQ(torch_of(pool).num_device_free, 1);
    end(pool, s);
}

static void expect_reset(const galloc_stat *stat, uint64_t before)
{
    EXPECT_EQ(stat->current, before);
    EXPECT_EQ(stat->peak, before);
    EXPECT_EQ(stat->total, 0);
}

/* A reset is one of each counter: what is there is the peak, and nothing has come or gone. */
TEST(a_reset_is_of_all_counters)
{
    enum { COUNTERS = 9 };
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = with(torch_config(), "max_split_size_mb:30,throw_on_cudamalloc_oom:True");
    config.memory_limit = MIB(200);
    galloc_pool *pool = pool_new(&config);
    void *p[8], *q[8], *big[2];
    for (int i = 0; i < 8; i++) p[i] = get(pool, KIB(100) + 1, s);
    for (int i = 0; i < 8; i++) q[i] = get(pool, MIB(2) + 1, s);
    for (int i = 0; i < 2; i++) big[i] = get(pool, MIB(40), s);
    for (int i = 0; i < 8; i += 2) give(p[i], s);
    for (int i = 0; i < 8; i += 2) give(q[i], s);
    p[0] = get(pool, KIB(800), s); /* the peak of free pieces is past, too */
    p[2] = get(pool, KIB(100), s);
    q[0] = get(pool, MIB(2), s);
    give(big[0], s);
    empty(pool);
    refused(pool, MIB(250), s);
    galloc_torch_stats was = torch_of(pool), now;
    EXPECT(was.oversize_allocations.total > 0 && was.oversize_segments.total > 0 && was.num_ooms > 0);
    EXPECT(was.num_device_alloc > 0 && was.num_device_free > 0);
    OK(galloc_pool_stats_reset(pool));
    now = torch_of(pool);
    const galloc_torch_stat *before[COUNTERS] = {
        &was.allocation, &was.segment, &was.active, &was.inactive_split, &was.allocated_bytes, &was.reserved_bytes,
        &was.active_bytes, &was.inactive_split_bytes, &was.requested_bytes};
    const galloc_torch_stat *after[COUNTERS] = {
        &now.allocation, &now.segment, &now.active, &now.inactive_split, &now.allocated_bytes, &now.reserved_bytes,
        &now.active_bytes, &now.inactive_split_bytes, &now.requested_bytes};
    for (int i = 0; i < COUNTERS; i++) {
        EXPECT(before[i]->all.total > 0 && before[i]->all.peak > before[i]->all.current);
        EXPECT(before[i]->small_pool.total > 0 && before[i]->large_pool.total > 0);
        expect_reset(&after[i]->all, before[i]->all.current);
        expect_reset(&after[i]->small_pool, before[i]->small_pool.current);
        expect_reset(&after[i]->large_pool, before[i]->large_pool.current);
    }
    expect_reset(&now.oversize_allocations, 1);
    expect_reset(&now.oversize_segments, 1);
    EXPECT_EQ(now.num_alloc_retries + now.num_ooms + now.num_sync_all_streams, 0);
    EXPECT_EQ(now.num_device_alloc + now.num_device_free, 0);
    for (int i = 0; i < 3; i++) give(p[i], s);
    for (int i = 3; i < 8; i += 2) give(p[i], s);
    give(q[0], s);
    for (int i = 1; i < 8; i += 2) give(q[i], s);
    give(big[1], s);
    end(pool, s);
}

TEST(counters_come_and_go)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = torch_pool(SIZE_MAX);
    void *p = get(pool, 1024, s);
    EXPECT_EQ(torch_of(pool).active_bytes.all.current, 1024);
    EXPECT_EQ(torch_of(pool).active_bytes.small_pool.peak, 1024);
    EXPECT_EQ(torch_of(pool).inactive_split_bytes.all.current, MIB(2) - 1024);
    give(p, s);
    empty(pool);
    EXPECT_EQ(torch_of(pool).active_bytes.all.current, 0);
    EXPECT_EQ(torch_of(pool).active_bytes.all.total, 1024);
    EXPECT_EQ(torch_of(pool).active_bytes.all.peak, 1024);
    EXPECT_EQ(torch_of(pool).segment.all.total, 1);
    EXPECT_EQ(torch_of(pool).segment.all.current, 0);
    EXPECT_EQ(torch_of(pool).inactive_split.all.current, 0);
    OK(galloc_pool_stats_reset(pool));
    EXPECT_EQ(torch_of(pool).active_bytes.all.peak, 0);
    EXPECT_EQ(torch_of(pool).segment.small_pool.total, 0);
    EXPECT_EQ(torch_of(pool).num_device_alloc, 0);
    EXPECT_EQ(torch_of(pool).num_sync_all_streams, 0);
    end(pool, s);
}

/* A free that failed has left the block to be found by another way. */
TEST(counters_are_right_after_a_free_that_failed)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = torch_pool(SIZE_MAX);
    give(get(pool, KIB(64), t), t);
    for (int i = 0; i < 2; i++) give(get(pool, KIB(64), s), s);
    void *p = get(pool, KIB(64), s);
    sim_fail("cuStreamGetId", 1, 1, 0);
    EXPECT(galloc_free(p, t) != cudaSuccess);
    sim_fail_clear();
    give(p, s);
    EXPECT_EQ(galloc_pool_check(pool), 0);
    EXPECT_EQ(torch_of(pool).allocation.all.current, 0);
    stream_end(t);
    end(pool, s);
}

TEST(only_the_profile_has_these_counters)
{
    begin();
    galloc_torch_stats stats;
    galloc_config expandable = with(torch_config(), "expandable_segments:True"), fixed = config_fixed();
    galloc_pool *pool[3] = {pool_new(NULL), pool_new(&expandable), pool_new(&fixed)};
    for (int i = 0; i < 3; i++) {
        EXPECT_EQ(galloc_pool_torch_stats(pool[i], &stats), cudaErrorNotSupported);
        EXPECT_EQ(galloc_pool_torch_stats(pool[i], NULL), cudaErrorInvalidValue);
    }
    EXPECT_EQ(galloc_pool_torch_stats(NULL, &stats), cudaErrorInvalidValue);
    for (int i = 0; i < 3; i++) pool_end(pool[i]);
    finish();
}

/* What a text says that has no effect there is told. */
TEST(settings_without_an_effect_are_told)
{
    galloc_config config = galloc_config_default();
    char message[256];
    begin();
    OK(galloc_config_parse(&config, "like:pytorch,reuse:completed,stats:exact,overhead:0.1", message, sizeof message));
    EXPECT(strstr(message, "reuse, stats: no effect with like:pytorch") != NULL);
    EXPECT(strstr(message, "overhead: no effect unless expandable_segments is True") != NULL);
    config = galloc_config_default();
    OK(galloc_config_parse(&config, "like:pytorch,expandable_segments:True,reuse:completed", message, sizeof message));
    EXPECT_EQ(message[0], 0);
    config = galloc_config_default();
    OK(galloc_config_parse(&config, "like:pytorch,gc_threshold:0.5", message, sizeof message));
    EXPECT(strstr(message, "gc_threshold: no effect with like:pytorch unless there is a limit") != NULL);
    config = galloc_config_default();
    OK(galloc_config_parse(&config, "like:pytorch,gc_threshold:0.5,memory_limit:1G", message, sizeof message));
    EXPECT_EQ(message[0], 0);
    finish();
}

/* ---- at random --------------------------------------------------------------------------------------------------- */

/* test_allocator_fuzz: seed 123, 10000 times an allocation of 2 to 20 MiB, a free or an emptied cache (10 : 10 : 1),
   with 100 MiB live at most. What each block contains is looked at when it is freed. */
TEST(fuzz_as_pytorch_does)
{
    sim_options options = sim_defaults();
    options.pace = -1;
    options.seed = 123;
    begin_with(options);
    cudaStream_t s = stream_new();
    galloc_pool *pool = torch_pool(SIZE_MAX);
    dice d = {123};
    struct {
        void *ptr;
        size_t bytes;
        uint64_t tag;
    } held[64];
    size_t live = 0, n = 0;
    for (uint64_t i = 1; i <= 10000; i++) {
        uint32_t what = roll_below(&d, 21);
        size_t bytes = MIB(2) + roll(&d) % MIB(18);
        if (what < 10 && live + bytes <= MIB(100)) {
            held[n].ptr = get(pool, bytes, s);
            held[n].bytes = bytes;
            held[n].tag = i;
            put(s, held[n].ptr, bytes, i);
            live += bytes;
            n++;
        } else if (what < 20 && n) {
            size_t k = roll_below(&d, (uint32_t)n);
            look(s, held[k].ptr, held[k].bytes, held[k].tag);
            give(held[k].ptr, s);
            live -= held[k].bytes;
            held[k] = held[--n];
        } else if (what == 20) {
            empty(pool);
        }
        if (i % 1000 == 0) expect_healthy(pool, 1);
        EXPECT_EQ(stats_of(pool).live.current, live);
    }
    while (n) give(held[--n].ptr, s);
    end(pool, s);
}

typedef struct thing {
    char *ptr;
    size_t bytes;
    uint64_t tag;
    uint32_t home;
} thing;

/* Frees on its own stream, on another one after it, after both, or with a use of another one recorded. */
static void thing_free(thing *b, cudaStream_t *s, dice *d)
{
    uint32_t other = roll_below(d, 3), how = roll_below(d, 8);
    look(s[b->home], b->ptr, b->bytes, b->tag);
    if (how >= 4) order(s[b->home], s[other]);
    if (how >= 4) look(s[other], b->ptr, b->bytes, b->tag);
    if (how == 4) OK(galloc_record_stream(b->ptr, s[other]));
    if (how == 5) {
        cudaStream_t both[2] = {s[b->home], s[other]};
        OK(galloc_free_after(b->ptr, both, 2));
    } else {
        give(b->ptr, s[how > 5 ? other : b->home]);
    }
    b->ptr = NULL;
}

/* A graph that uses memory of its own, launched on another stream while the rest goes on. */
static void thing_capture(galloc_pool *pool, cudaStream_t captured, cudaStream_t *s, dice *d)
{
    size_t bytes = roll_bytes(d, MIB(12));
    void *p = NULL, *q = NULL;
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    capture_begin(captured);
    (void)galloc_pool_malloc(pool, &p, bytes, captured);
    if (p) put(captured, p, bytes, 3);
    if (p) give(p, captured);
    (void)galloc_pool_malloc(pool, &q, bytes / 2 + 1, captured);
    if (q) put(captured, q, bytes / 2 + 1, 4);
    OK(cudaStreamEndCapture(captured, &graph));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    OK(cudaGraphLaunch(exec, s[0]));
    if (q) look(s[0], q, bytes / 2 + 1, 4);
    if (q) give(q, s[0]);
    if (roll_below(d, 2)) OK(cudaGraphLaunch(exec, s[0]));
    OK(cudaGraphDestroy(graph));
    OK(cudaGraphExecDestroy(exec));
}

static void play_round(uint64_t seed)
{
    sim_options options = sim_defaults();
    dice d = {seed};
    cudaStream_t s[3], captured;
    thing held[MANY];
    options.seed = seed;
    options.memory = MIB(300);
    options.pace = (int)(seed % 3) - 1;
    begin_with(options);
    for (int i = 0; i < 3; i++) s[i] = stream_new();
    captured = stream_new();
    galloc_config config = torch_config();
    config.memory_limit = seed % 2 ? MIB(200) : SIZE_MAX;
    if (seed % 3 == 1) config.max_split_size = MIB(24);
    if (seed % 3 == 2) config.gc_threshold = 0.4;
    if (seed % 5 == 0) config = with(config, "roundup_power2_divisions:4");
    galloc_pool *pool = pool_new(&config);
    memset(held, 0, sizeof held);
    for (uint64_t n = 1; n <= 400; n++) {
        thing *b = &held[roll_below(&d, MANY)];
        uint32_t what = roll_below(&d, 100);
        if (what < 2) {
            empty(pool);
        } else if (what < 4) {
            thing_capture(pool, captured, s, &d);
        } else if (what < 6) {
            sim_run(-1);
        } else if (what < 10 && b->ptr) {
            cudaError_t err = galloc_resize(b->ptr, roll_bytes(&d, 2 * b->bytes), s[b->home]);
            EXPECT(err == cudaSuccess || err == cudaErrorNotSupported || err == cudaErrorMemoryAllocation);
            b->bytes = info_of(b->ptr).requested;
            b->tag = n;
            put(s[b->home], b->ptr, b->bytes, n);
        } else if (b->ptr) {
            thing_free(b, s, &d);
        } else {
            void *ptr = NULL;
            b->home = roll_below(&d, 3);
            b->bytes = roll_bytes(&d, MIB(30));
            b->tag = n;
            cudaError_t err = galloc_pool_malloc(pool, &ptr, b->bytes, s[b->home]);
            EXPECT(err == cudaSuccess || err == cudaErrorMemoryAllocation);
            b->ptr = ptr;
            if (ptr) put(s[b->home], ptr, b->bytes, n);
        }
        if (n % 20 == 0) EXPECT_EQ(galloc_pool_check(pool), 0);
    }
    expect_healthy(pool, 1);
    for (int i = 0; i < MANY; i++)
        if (held[i].ptr) thing_free(&held[i], s, &d);
    OK(cudaDeviceSynchronize());
    empty(pool);
    EXPECT_EQ(torch_of(pool).active.all.current, 0);
    EXPECT_EQ(reserved(pool), 0);
    for (int i = 0; i < 3; i++) stream_end(s[i]);
    end(pool, captured);
}

TEST(random_operations_like_pytorch)
{
    for (uint64_t i = 0; i < 60; i++) {
        long before = test_failures;
        play_round(test_seed() + i);
        if (test_failures > before) {
            printf("    first failure with GALLOC_SEED=%llu\n", (unsigned long long)(test_seed() + i));
            break;
        }
    }
}

/* Threads with a stream each, and one that all use. */
static galloc_pool *shared_pool;
static cudaStream_t shared_stream;

static void *run_thread(void *arg)
{
    dice d = {(uint64_t)(uintptr_t)arg};
    cudaStream_t own = stream_new();
    void *held[MANY] = {NULL};
    cudaStream_t on[MANY] = {NULL};
    for (int i = 0; i < 600; i++) {
        uint32_t k = roll_below(&d, MANY);
        if (held[k]) {
            if (roll_below(&d, 8) == 0) order(on[k], on[k] == own ? shared_stream : own);
            give(held[k], on[k]);
            held[k] = NULL;
        } else {
            on[k] = roll_below(&d, 3) ? own : shared_stream;
            held[k] = get(shared_pool, roll_bytes(&d, MIB(3)), on[k]);
        }
    }
    for (int k = 0; k < MANY; k++)
        if (held[k]) give(held[k], on[k]);
    OK(galloc_stream_retire(own));
    stream_end(own);
    return NULL;
}

TEST(threads_share_a_pool_like_pytorch)
{
    pthread_t thread[4];
    begin();
    shared_pool = torch_pool(SIZE_MAX);
    shared_stream = stream_new();
    for (uintptr_t i = 0; i < 4; i++) pthread_create(&thread[i], NULL, run_thread, (void *)(i + 1));
    for (int i = 0; i < 4; i++) pthread_join(thread[i], NULL);
    EXPECT_EQ(torch_of(shared_pool).allocation.all.current, 0);
    end(shared_pool, shared_stream);
}

/* Free memory that was a stream's which has been retired and forgotten is no graph's. */
TEST(memory_of_a_stream_that_is_gone_is_no_graphs)
{
    begin();
    galloc_config config = galloc_config_default();
    config.like = GALLOC_LIKE_PYTORCH;
    config.expandable_segments = 0;
    config.reuse = 0;
    config.memory_limit = MIB(64);
    config.throw_on_cudamalloc_oom = 1;
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_report report;
    void *p = NULL, *a = get(pool, MIB(12), s), *b = get(pool, MIB(12), s);
    OK(galloc_free(a, s));
    OK(galloc_free(b, s));
    a = get(pool, MIB(1) + 512, s);
    b = get(pool, 512, t);
    OK(galloc_free(a, t));
    OK(galloc_stream_retire(s));
    stream_end(s);
    for (int i = 0; i < 4; i++) (void)galloc_pool_trim(pool, SIZE_MAX, NULL);
    EXPECT(galloc_pool_malloc(pool, &p, MIB(63), t) != cudaSuccess);
    OK(galloc_oom_report(&report));
    EXPECT_EQ(report.graph_bytes, 0);
    OK(galloc_free(b, t));
    OK(galloc_stream_retire(t));
    stream_end(t);
    pool_end(pool);
    finish();
}

/* The setting reuse has no effect: galloc_resize does what it does without, and comes back. Both neighbours of the
   block that grows are busy or never used, in segments of which none is whole. */
TEST(reuse_has_no_effect)
{
    static const char *const settings[] = {"like:pytorch", "like:pytorch,reuse:wait",
                                           "like:pytorch,reuse:completed+followed+wait"};
    for (size_t k = 0; k < sizeof settings / sizeof *settings; k++) {
        begin();
        galloc_config config = galloc_config_default();
        OK(galloc_config_parse(&config, settings[k], NULL, 0));
        config.memory_limit = MIB(64);
        galloc_pool *pool = pool_new(&config);
        OK(galloc_pool_config(pool, &config));
        EXPECT_EQ(config.reuse, 0);
        cudaStream_t both[2] = {stream_new(), stream_new()};
        void *block[4], *large = NULL;
        for (int i = 0; i < 4; i++) block[i] = get(pool, 900000, both[0]);
        large = get(pool, 2000000, both[0]); /* a segment whose rest is more than theirs */
        for (int i = 1; i < 4; i += 2) {
            put(both[1], block[i], 512, 1);
            OK(galloc_free_after(block[i], both, 2));
        }
        EXPECT_EQ(galloc_resize(block[0], 1000000, both[0]), cudaErrorNotSupported);
        OK(galloc_free(large, both[0]));
        for (int i = 0; i < 4; i += 2) OK(galloc_free(block[i], both[0]));
        for (int i = 0; i < 2; i++) stream_end(both[i]);
        pool_end(pool);
        finish();
    }
}

/* A program that captures anew: the newest graph of a group is kept, the one before it destroyed. */
TEST(a_group_goes_on_when_earlier_graphs_are_gone)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = galloc_config_default();
    galloc_graph *group = NULL;
    cudaGraph_t before = NULL, graph = NULL;
    OK(galloc_config_parse(&config, "like:pytorch", NULL, 0));
    galloc_pool *pool = pool_new(&config);
    for (int i = 0; i < 30; i++) {
        OK(galloc_graph_begin(&group, pool, s));
        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
        void *p = get(pool, MIB(40), s);
        put(s, p, MIB(40), 1);
        OK(galloc_free(p, s));
        OK(cudaStreamEndCapture(s, &graph));
        OK(galloc_graph_end(group));
        if (before) OK(cudaGraphDestroy(before));
        before = graph;
        EXPECT(stats_of(pool).reserved.current <= MIB(80));
    }
    OK(cudaGraphDestroy(before));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* With throw_on_cudamalloc_oom, what a stream that is gone has left serves the next one: that waits for nothing. */
TEST(a_request_that_is_not_to_wait_adopts_a_segment)
{
    begin();
    galloc_config config = galloc_config_default();
    OK(galloc_config_parse(&config, "like:pytorch,throw_on_cudamalloc_oom:True,memory_limit:20M", NULL, 0));
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new(), t = stream_new();
    void *p = get(pool, MIB(4), s);
    OK(galloc_free(p, s));
    OK(cudaDeviceSynchronize());
    OK(galloc_stream_retire(s));
    stream_end(s);
    OK(galloc_pool_trim(pool, SIZE_MAX, NULL));
    void *q = get(pool, MIB(4), t);
    EXPECT(q == p);
    OK(galloc_free(q, t));
    pool_end(pool);
    finish();
}

/* A block that waits for another stream has been active since it was allocated: it counts once in the totals. */
TEST(a_block_that_waits_became_active_once)
{
    begin_still();
    galloc_config config = galloc_config_default();
    galloc_torch_stats now;
    OK(galloc_config_parse(&config, "like:pytorch", NULL, 0));
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s[2] = {stream_new(), stream_new()};
    void *p = get_used(pool, MIB(4), s[0], 1), *q = get_used(pool, 512, s[1], 2);
    OK(galloc_free_after(p, s, 2));
    OK(galloc_pool_torch_stats(pool, &now));
    EXPECT_EQ(now.active.all.current, 2);
    EXPECT_EQ(now.active.all.total, 2);
    EXPECT_EQ(now.active_bytes.all.total, now.allocated_bytes.all.total);
    OK(galloc_free(q, s[1]));
    pool_end(pool);
    finish();
}

/* With throw_on_cudamalloc_oom, memory whose work is complete serves: that waits for nothing either. */
TEST(a_request_that_is_not_to_wait_has_what_is_complete)
{
    begin();
    galloc_config config = galloc_config_default();
    OK(galloc_config_parse(&config, "like:pytorch,throw_on_cudamalloc_oom:True,memory_limit:20M", NULL, 0));
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s[2] = {stream_new(), stream_new()};
    void *p = get_used(pool, MIB(15), s[0], 1);
    OK(galloc_free_after(p, s, 2));
    OK(cudaDeviceSynchronize());
    void *q = get(pool, MIB(15), s[0]);
    EXPECT(q == p);
    OK(galloc_free(q, s[0]));
    pool_end(pool);
    finish();
}

/* A wait_limit_ms leaves out the steps that wait for the device. */
static void expect_no_wait(const char *text, size_t first, size_t second, int on_another_stream)
{
    begin_still();
    galloc_config config = galloc_config_default();
    OK(galloc_config_parse(&config, text, NULL, 0));
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new(), t = on_another_stream ? stream_new() : s;
    void *q = NULL;
    OK(galloc_free(get_used(pool, first, s, 1), s));
    long fences = sim_calls("cuMemHostAlloc"), blocking = sim_blocking_calls();
    (void)galloc_pool_malloc(pool, &q, second, t);
    EXPECT_EQ(sim_calls("cuMemHostAlloc"), fences);
    EXPECT_EQ(sim_blocking_calls(), blocking);
    if (q) OK(galloc_free(q, t));
    pool_end(pool);
    finish();
}

TEST(nothing_is_collected_for_a_limited_request)
{
    expect_no_wait("like:pytorch,memory_limit:100M,gc_threshold:0.5,wait_limit_ms:0", MIB(60), MIB(30), 1);
}

TEST(no_oversize_segment_is_returned_for_a_limited_request)
{
    expect_no_wait("like:pytorch,memory_limit:100M,max_split_size:40M,wait_limit_ms:0", MIB(60), MIB(70), 0);
}

/* What is reserved is for the first stream that needs it, also where other streams have segments of that kind. */
TEST(reserved_memory_is_no_other_streams)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = torch_pool(SIZE_MAX);
    void *p = get(pool, MIB(30), s), *q = get(pool, KIB(1), s);
    OK(galloc_pool_reserve(pool, MIB(90)));
    EXPECT_EQ(galloc_pool_check(pool), 0);
    long calls = sim_calls("cuMemAlloc");
    void *r = get(pool, MIB(90), t);
    EXPECT_EQ(sim_calls("cuMemAlloc"), calls);
    give(r, t);
    give(p, s);
    give(q, s);
    stream_end(t);
    end(pool, s);
}

/* What is reserved is not put beside what a graph has left that is gone, where nothing is collected. */
TEST(reserved_memory_is_collected_beside_what_a_graph_has_left)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_config config = with(torch_config(), "garbage_collection_threshold:0.5,memory_limit:200M");
    galloc_pool *pool = pool_new(&config);
    cudaGraph_t graph = NULL;
    OK(cudaStreamBeginCapture(t, cudaStreamCaptureModeRelaxed));
    void *result = get(pool, MIB(24), t);
    OK(cudaStreamEndCapture(t, &graph));
    OK(cudaGraphDestroy(graph));
    give(result, t);
    OK(cudaDeviceSynchronize());
    for (int i = 0; i < 3; i++) OK(galloc_pool_trim(pool, SIZE_MAX, NULL)); /* it is noticed */
    EXPECT_EQ(reserved(pool), MIB(24));
    OK(galloc_pool_reserve(pool, MIB(40)));
    void *p = get(pool, MIB(50), s);
    EXPECT_EQ(reserved(pool), MIB(114));
    void *q = get(pool, MIB(46), s); /* 14 MiB are held too much: the reserved ones go */
    EXPECT_EQ(reserved(pool), MIB(120));
    give(p, s);
    give(q, s);
    stream_end(t);
    end(pool, s);
}

/* Of several segments that a stream has left, the smallest in which a request fits is taken over. */
TEST(the_smallest_segment_that_fits_is_taken_over)
{
    for (int order_of = 0; order_of < 2; order_of++) {
        begin();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = torch_pool(SIZE_MAX);
        static const size_t sizes[2][3] = {{MIB(22), MIB(30), MIB(60)}, {MIB(60), MIB(30), MIB(22)}};
        void *p[3];
        for (int i = 0; i < 3; i++) p[i] = get(pool, sizes[order_of][i], s);
        for (int i = 0; i < 3; i++) give(p[i], s);
        OK(cudaDeviceSynchronize());
        OK(galloc_stream_retire(s));
        stream_end(s);
        OK(galloc_pool_trim(pool, SIZE_MAX, NULL));
        void *q = get(pool, MIB(30), t), *r = get(pool, MIB(22), t);
        EXPECT(q == p[1]);
        EXPECT(r == p[order_of ? 2 : 0]);
        EXPECT_EQ(reserved(pool), MIB(112));
        give(q, t);
        give(r, t);
        end(pool, t);
    }
}

/* A collection ends as soon as it has as much as is held too much, to the byte. */
TEST(a_collection_that_has_just_enough_takes_no_more)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = with(torch_config(), "garbage_collection_threshold:0.5,memory_limit:200M");
    galloc_pool *pool = pool_new(&config);
    give(get(pool, MIB(22), s), s);
    for (int i = 0; i < 6; i++) give(get(pool, MIB(30), s), s);
    void *wall = get(pool, MIB(70), s);
    EXPECT_EQ(reserved(pool), MIB(122));
    void *p = get(pool, MIB(46), s);
    EXPECT_EQ(reserved(pool), MIB(30 + 70 + 46));
    give(p, s);
    give(wall, s);
    end(pool, s);
}

static void run_before_the_wait(const char *function)
{
    if (!strcmp(function, "cuMemFreeHost")) sim_run(-1);
}

/* The wait of a step fails although the work is complete: the error is told, and no block is given out. */
TEST(a_step_whose_wait_fails_gives_no_block_out)
{
    static const char *const steps[] = {"memory_limit:100M", "gc_threshold:0.5,memory_limit:100M",
                                        "max_split_size_mb:20,memory_limit:100M"};
    for (int i = 0; i < 3; i++) {
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_config config = with(torch_config(), steps[i]);
        galloc_pool *pool = pool_new(&config);
        void *old = get_used(pool, MIB(60), s, 2), *young = get_used(pool, MIB(30), s, 1), *p = NULL;
        order(s, t);
        look(t, old, MIB(60), 2);
        OK(galloc_record_stream(old, t));
        give(young, s);
        give(old, s);
        sim_hook(run_before_the_wait, NULL);
        sim_fail("cuMemFreeHost", 1, 1, cudaErrorUnknown);
        EXPECT_EQ(galloc_pool_malloc(pool, &p, MIB(60), s), cudaErrorUnknown);
        sim_fail_clear();
        sim_hook(NULL, NULL);
        EXPECT(p == NULL);
        EXPECT_EQ(stats_of(pool).blocks.current, 0);
        EXPECT_EQ(galloc_pool_check(pool), 0);
        p = get_used(pool, MIB(60), s, 3);
        EXPECT_EQ(stats_of(pool).blocks.current, 1);
        give(p, s);
        stream_end(t);
        end(pool, s);
    }
}

/* An alignment of 2 MiB is had in a small segment, a greater one in a large one. */
TEST(small_segments_have_alignments_to_2_mib)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = torch_pool(SIZE_MAX);
    galloc_request request = {.bytes = 512, .alignment = MIB(2), .stream = s, .pool = pool};
    void *p = NULL, *q = NULL;
    OK(galloc_alloc(&p, &request));
    EXPECT_EQ(torch_of(pool).segment.small_pool.current, 1);
    EXPECT_EQ(torch_of(pool).segment.large_pool.current, 0);
    EXPECT_EQ((uintptr_t)p % MIB(2), 0);
    request.alignment = MIB(4);
    OK(galloc_alloc(&q, &request));
    EXPECT_EQ(torch_of(pool).segment.small_pool.current, 1);
    EXPECT_EQ(torch_of(pool).segment.large_pool.current, 1);
    EXPECT_EQ((uintptr_t)q % MIB(4), 0);
    give(p, s);
    give(q, s);
    end(pool, s);
}

/* Blocks and segments that are not oversize come and go without a change of the counters of those that are. */
TEST(only_oversize_segments_count_as_such)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = with(torch_config(), "max_split_size_mb:30");
    galloc_pool *pool = pool_new(&config);
    give(get(pool, MIB(40), s), s);
    give(get(pool, MIB(12), s), s);
    give(get(pool, 512, s), s);
    EXPECT_EQ(torch_of(pool).oversize_segments.current, 1);
    EXPECT_EQ(torch_of(pool).oversize_allocations.current, 0);
    EXPECT_EQ(torch_of(pool).oversize_allocations.total, 1);
    empty(pool);
    EXPECT_EQ(torch_of(pool).oversize_segments.current, 0);
    EXPECT_EQ(torch_of(pool).oversize_segments.peak, 1);
    EXPECT_EQ(torch_of(pool).oversize_segments.total, 1);
    end(pool, s);
}

/* A block that another stream still uses leaves the free blocks beside it alone: these serve meanwhile. */
TEST(free_blocks_beside_one_that_waits_serve)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = torch_pool(SIZE_MAX);
    void *p[10];
    for (int i = 0; i < 10; i++) p[i] = get_used(pool, MIB(2), s, (uint64_t)i);
    EXPECT_EQ(reserved(pool), MIB(20));
    order(s, t);
    look(t, p[4], MIB(2), 4);
    OK(galloc_record_stream(p[4], t));
    give(p[3], s);
    give(p[5], s);
    give(p[4], s);
    EXPECT_EQ(galloc_pool_check(pool), 0);
    EXPECT_EQ(torch_of(pool).inactive_split.all.current, 2);
    void *q = get_used(pool, MIB(2), s, 20), *r = get_used(pool, MIB(2), s, 21);
    EXPECT(q == p[3] && r == p[5]);
    EXPECT_EQ(reserved(pool), MIB(20));
    give(q, s);
    give(r, s);
    for (int i = 0; i < 10; i++)
        if (i < 3 || i > 5) give(p[i], s);
    stream_end(t);
    end(pool, s);
}

/* A step that gives segments back waits only for work that keeps it from giving more: not for work on small segments,
   on parts of segments, or, where it gives back its own stream's, on those of others. */
TEST(steps_wait_only_for_what_they_give_back)
{
    static const char *const steps[] = {"gc_threshold:0.5,memory_limit:200M", "max_split_size_mb:30,memory_limit:200M"};
    for (int i = 0; i < 2; i++) {
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_config config = with(torch_config(), steps[i]);
        galloc_pool *pool = pool_new(&config);
        give(get_used(pool, MIB(90), s, 1), s);
        inside_ask_for_event(pool, stream_id(s));
        void *pin = get(pool, MIB(2), t), *other = get(pool, 512, s);
        OK(cudaDeviceSynchronize());
        OK(galloc_pool_trim(pool, SIZE_MAX, NULL)); /* notices that S is done */
        give(get_used(pool, 512, t, 1), t);
        give(get_used(pool, MIB(4), t, 1), t);
        if (i) give(get_used(pool, MIB(40), t, 1), t);
        if (i) give(get_used(pool, MIB(12), s, 1), s);
        long fences = sim_calls("cuMemHostAlloc");
        void *p = get(pool, i ? MIB(60) : MIB(110), s); /* 90 MiB are too large for 60 (max_non_split_rounding) */
        EXPECT_EQ(sim_calls("cuMemHostAlloc"), fences);
        EXPECT_EQ(torch_of(pool).num_sync_all_streams, 0);
        give(p, s);
        give(other, s);
        give(pin, t);
        stream_end(t);
        end(pool, s);
    }
}

/* Small requests get small segments only, and large ones large ones: what is free in the others is no piece for them,
   though a request that does suit it would succeed. */
TEST(the_report_tells_which_free_memory_serves_other_sizes)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = torch_pool(MIB(24));
    galloc_report report;
    void *small[4], *large = get(pool, MIB(4), s);
    for (int i = 0; i < 4; i++) small[i] = get(pool, MIB(1), s);
    refused(pool, 1536, s);
    OK(galloc_oom_report(&report));
    EXPECT_EQ(report.usable, MIB(16));
    EXPECT_EQ(report.in_slots, MIB(16));
    EXPECT_EQ(report.largest_usable, 0);
    EXPECT_EQ(report.largest_possible, MIB(16));
    give(small[0], s);
    give(get(pool, KIB(512), s), s);
    refused(pool, MIB(18), s);
    OK(galloc_oom_report(&report));
    EXPECT_EQ(report.usable, MIB(17));
    EXPECT_EQ(report.in_slots, MIB(1));
    EXPECT_EQ(report.largest_usable, MIB(16));
    EXPECT_EQ(report.largest_possible, MIB(16));
    for (int i = 1; i < 4; i++) give(small[i], s);
    give(large, s);
    stream_end(s);
    pool_end(pool);
    finish();
}

/* In the report of a failure, free memory of the request's own stream is usable, and that of another is stranded. */
TEST(the_report_tells_whose_free_memory_is_usable)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = torch_pool(MIB(40));
    galloc_report report;
    void *p = get(pool, MIB(6), s), *q = get(pool, MIB(4), t);
    refused(pool, MIB(30), s);
    OK(galloc_oom_report(&report));
    EXPECT_EQ(report.usable, MIB(14));
    EXPECT_EQ(report.largest_usable, MIB(14));
    EXPECT_EQ(report.stranded, MIB(16));
    EXPECT_EQ(report.graph_bytes, 0);
    EXPECT_EQ(report.streams[0].bytes, MIB(16));
    EXPECT_EQ(report.streams[0].stream_id, stream_id(t));
    give(p, s);
    give(q, t);
    stream_end(t);
    end(pool, s);
}

static cudaStream_t within_stream;
static int unmaps_within, tells_within;

/* In on_unmap the program asks for more than there is. */
static void ask_in_on_unmap(galloc_pool *pool, void *addr, size_t bytes, void *user)
{
    void *p = NULL;
    (void)addr;
    (void)bytes;
    (void)user;
    if (tells_within++) return;
    unmaps_within = tells_within;
    EXPECT_EQ(galloc_pool_malloc(pool, &p, MIB(90), within_stream), cudaErrorMemoryAllocation);
    unmaps_within = tells_within - unmaps_within;
    EXPECT_EQ(galloc_pool_check(pool), 0);
}

/* While on_unmap runs, no step gives segments back. */
TEST(steps_give_nothing_back_within_on_unmap)
{
    static const char *const steps[] = {"gc_threshold:0.1,memory_limit:100M", "max_split_size_mb:20,memory_limit:100M"};
    for (int i = 0; i < 2; i++) {
        begin();
        within_stream = stream_new();
        galloc_config config = with(torch_config(), steps[i]);
        galloc_pool *pool = pool_new(&config);
        galloc_callbacks calls = {.on_unmap = ask_in_on_unmap};
        OK(galloc_pool_set_callbacks(pool, &calls));
        tells_within = unmaps_within = 0;
        void *p = get(pool, MIB(40), within_stream), *q = get(pool, MIB(30), within_stream);
        give(p, within_stream);
        OK(galloc_pool_trim(pool, MIB(60), NULL));
        EXPECT_EQ(tells_within, 1);
        EXPECT_EQ(unmaps_within, 0);
        tells_within = 0;
        p = get(pool, MIB(40), within_stream);
        void *other = get(pool, MIB(22), within_stream);
        give(p, within_stream);
        give(other, within_stream);
        OK(galloc_pool_trim(pool, MIB(60), NULL));
        EXPECT(tells_within > 0);
        EXPECT_EQ(unmaps_within, 0);
        OK(galloc_pool_set_callbacks(pool, NULL));
        give(q, within_stream);
        end(pool, within_stream);
    }
}

/* All that another stream of a graph has freed comes home with the next graph of the group, not one block only. */
TEST(all_memory_of_a_groups_other_stream_comes_home)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = torch_pool(SIZE_MAX);
    galloc_graph *group = NULL;
    cudaGraphExec_t exec[2];
    void *p[10];
    OK(galloc_graph_begin(&group, pool, s));
    for (int i = 0; i < 2; i++) {
        capture_begin(s);
        for (int k = 0; k < 10; k++) p[k] = get_used(pool, MIB(2), s, 1);
        order(s, t);
        for (int k = 0; k < 10; k++) look(t, p[k], MIB(2), 1);
        for (int k = 0; k < 10; k += 2) give(p[k], t);
        for (int k = 1; k < 10; k += 2) give(p[k], t);
        order(t, s);
        exec[i] = capture_ready(s);
        EXPECT_EQ(galloc_pool_check(pool), 0);
        EXPECT_EQ(reserved(pool), MIB(20));
    }
    OK(galloc_graph_end(group));
    for (int i = 0; i < 4; i++) OK(cudaGraphLaunch(exec[i % 2], s));
    sim_run(-1);
    for (int i = 0; i < 2; i++) OK(cudaGraphExecDestroy(exec[i]));
    stream_end(t);
    end(pool, s);
}

/* A segment that a stream has left is not taken over for a request whose alignment it does not fit. */
TEST(a_segment_that_the_alignment_does_not_fit_is_not_taken_over)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = torch_pool(SIZE_MAX);
    void *spare[8], *p = get(pool, MIB(22), s), *q;
    int n = 0;
    while (n < 8 && (uintptr_t)p % MIB(4) == 0) {
        spare[n++] = p;
        p = get(pool, MIB(22), s);
    }
    EXPECT((uintptr_t)p % MIB(4) != 0);
    q = get(pool, MIB(60), s);
    while (n > 0) give(spare[--n], s);
    OK(cudaDeviceSynchronize());
    empty(pool);
    give(p, s);
    give(q, s);
    OK(cudaDeviceSynchronize());
    OK(galloc_stream_retire(s));
    stream_end(s);
    OK(galloc_pool_trim(pool, SIZE_MAX, NULL));
    EXPECT_EQ(reserved(pool), MIB(82));
    galloc_request request = {.bytes = MIB(22), .alignment = MIB(4), .stream = t, .pool = pool};
    void *r = NULL;
    OK(galloc_alloc(&r, &request));
    EXPECT_EQ((uintptr_t)r % MIB(4), 0);
    EXPECT_EQ(reserved(pool), MIB(82));
    give(r, t);
    end(pool, t);
}

/* With throw_on_cudamalloc_oom the steps are left out that wait for the device or give usable memory back, and no
   others. */
TEST(a_rejected_request_takes_the_steps_that_neither_wait_nor_give_back)
{
    static const char *const taken[] = {"use memory whose work is complete", "use a segment of a stream that is gone",
                                        "create a segment"};
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = with(torch_config(), "throw_on_cudamalloc_oom:True,memory_limit:100M,gc_threshold:0.5,"
                                                "max_split_size_mb:30");
    galloc_pool *pool = pool_new(&config);
    galloc_report report;
    int left_out = 0, others = 0;
    void *p = get(pool, MIB(60), s);
    give(p, s);
    refused(pool, MIB(70), s);
    OK(galloc_oom_report(&report));
    EXPECT_EQ(report.rejected, 1);
    for (int i = 0; i < GALLOC_REPORT_STEPS && report.steps[i].name; i++) {
        int is_taken = 0;
        for (int k = 0; k < 3; k++) is_taken |= !strcmp(report.steps[i].name, taken[k]);
        if (is_taken) EXPECT(!report.steps[i].left_out);
        else EXPECT(report.steps[i].left_out && strstr(report.steps[i].left_out, "throw_on_cudamalloc_oom"));
        if (is_taken) others++;
        else left_out++;
    }
    EXPECT_EQ(others, 3);
    EXPECT_EQ(left_out, 6);
    EXPECT_EQ(reserved(pool), MIB(60));
    EXPECT_EQ(torch_of(pool).num_alloc_retries, 0);
    end(pool, s);
}

/* Where a request may not wait, the cached segments stay. */
TEST(no_cached_segment_is_returned_for_a_limited_request)
{
    begin_still();
    cudaStream_t s = stream_new();
    galloc_config config = with(torch_config(), "memory_limit:60M,wait_limit_ms:0");
    galloc_pool *pool = pool_new(&config);
    give(get_used(pool, MIB(40), s, 1), s);
    long blocking = sim_blocking_calls(), frees = sim_calls("cuMemFree");
    refused(pool, MIB(50), s);
    EXPECT_EQ(sim_blocking_calls(), blocking);
    EXPECT_EQ(sim_calls("cuMemFree"), frees);
    EXPECT_EQ(torch_of(pool).num_alloc_retries, 0);
    EXPECT_EQ(torch_of(pool).num_sync_all_streams, 0);
    EXPECT_EQ(reserved(pool), MIB(40));
    end(pool, s);
}

/* A reservation that the driver refuses leaves nothing behind. */
TEST(a_refused_reservation_leaves_no_block_pool)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = torch_pool(SIZE_MAX);
    size_t host = sim_malloc_live();
    for (int i = 0; i < 4; i++) {
        sim_fail("cuMemAlloc", 1, 1, CUDA_ERROR_OUT_OF_MEMORY);
        EXPECT_EQ(galloc_pool_reserve(pool, i % 2 ? KIB(1) : MIB(30)), cudaErrorMemoryAllocation);
        sim_fail_clear();
        EXPECT_EQ(galloc_pool_check(pool), 0);
        if (i < 2) host = sim_malloc_live();
    }
    EXPECT_EQ(sim_malloc_live(), host);
    EXPECT_EQ(reserved(pool), 0);
    end(pool, s);
}

/* A segment that the driver did not take back is tried again before a request is refused. */
TEST(a_segment_that_is_stuck_is_tried_again_by_a_request)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = with(torch_config(), "memory_limit:40M,throw_on_cudamalloc_oom:True");
    galloc_pool *pool = pool_new(&config);
    give(get(pool, MIB(30), s), s);
    OK(cudaDeviceSynchronize());
    sim_fail("cuMemFree", 1, 1, CUDA_ERROR_NOT_PERMITTED);
    (void)galloc_pool_trim(pool, 0, NULL);
    sim_fail_clear();
    EXPECT_EQ(stats_of(pool).quarantined, MIB(30));
    void *p = get(pool, MIB(36), s);
    EXPECT_EQ(stats_of(pool).quarantined, 0);
    EXPECT_EQ(stats_of(pool).reserved.current, MIB(36));
    give(p, s);
    end(pool, s);
}

TEST_MAIN()
