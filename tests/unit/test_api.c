/* test_api.c - what each public function promises, on both kinds of segments. */

#include "setup.h"

#include <math.h>

/* Time is what calls cost by the device's own account: so the time of each call is known to the nanosecond. */
uint64_t inside_clock(void) { return sim_cost_of_ns(NULL); }

static const int both_kinds[] = {1, 0}; /* expandable_segments */

static galloc_pool *pool_of_kind(int expandable)
{
    galloc_config config = galloc_config_default();
    config.expandable_segments = expandable;
    return pool_new(&config);
}

static galloc_config config_of(galloc_pool *pool)
{
    galloc_config config;
    memset(&config, 0, sizeof config);
    OK(galloc_pool_config(pool, &config));
    return config;
}

#define FOR_BOTH_KINDS(kind) for (const int *kind = both_kinds; kind != both_kinds + 2; kind++)

/* ---- allocating and freeing -------------------------------------------------------------------------------------- */

TEST(version_macros_agree)
{
    char text[32];
    snprintf(text, sizeof text, "%d.%d.%d", GALLOC_VERSION_MAJOR, GALLOC_VERSION_MINOR, GALLOC_VERSION_PATCH);
    EXPECT(strcmp(text, GALLOC_VERSION_STRING) == 0);
    EXPECT_EQ(GALLOC_VERSION, GALLOC_VERSION_MAJOR * 10000 + GALLOC_VERSION_MINOR * 100 + GALLOC_VERSION_PATCH);
}

TEST(malloc_gives_memory_that_kernels_can_use)
{
    static const size_t sizes[] = {1, 511, 512, 513, 4096, MIB(1), MIB(2) + 1, MIB(20), MIB(300)};
    FOR_BOTH_KINDS (kind) {
        begin();
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_of_kind(*kind);
        void *p[9];
        for (int i = 0; i < 9; i++) {
            p[i] = get(pool, sizes[i], s);
            EXPECT_EQ((uintptr_t)p[i] % 512, 0);
            put(s, p[i], sizes[i], 100 + (uint64_t)i);
        }
        expect_healthy(pool, 1);
        for (int i = 0; i < 9; i++) {
            look(s, p[i], sizes[i], 100 + (uint64_t)i);
            OK(galloc_free(p[i], s));
        }
        EXPECT_EQ(stats_of(pool).live.current, 0);
        pool_end(pool);
        finish();
    }
}

TEST(malloc_without_bytes_gives_null)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_request request = {0};
    void *p = &request;
    OK(galloc_malloc(&p, 0, s));
    EXPECT(p == NULL);
    p = &request;
    OK(galloc_alloc(&p, &request));
    EXPECT(p == NULL);
    galloc_pool *pool = pool_new(NULL);
    p = &request;
    OK(galloc_pool_malloc(pool, &p, 0, s));
    EXPECT(p == NULL);
    EXPECT_EQ(stats_of(pool).blocks.current, 0);
    pool_end(pool);
    finish();
}

TEST(free_of_null_does_nothing)
{
    begin();
    cudaStream_t s = stream_new();
    OK(galloc_free(NULL, s));
    OK(galloc_free_after(NULL, &s, 1));
    EXPECT_EQ(log_lines, 0);
    finish();
}

TEST(malloc_serves_from_the_default_pool)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = NULL, *again = NULL;
    void *p = NULL, *q = NULL;
    OK(galloc_malloc(&p, 1000, s));
    OK(galloc_pool_default(&pool, 0));
    OK(galloc_pool_default(&again, -1));
    EXPECT(pool != NULL && pool == again);
    EXPECT(info_of(p).pool == pool);
    galloc_request request = {0};
    request.bytes = 1000;
    request.stream = s;
    OK(galloc_alloc(&q, &request));
    EXPECT(info_of(q).pool == pool);
    OK(galloc_free(p, s));
    OK(galloc_free(q, s));
    EXPECT_EQ(galloc_pool_destroy(pool), cudaErrorNotPermitted);
    finish();
}

TEST(each_device_has_a_default_pool)
{
    begin_with_devices(2, SIM_PACE_RANDOM);
    galloc_pool *pool[2] = {NULL, NULL};
    cudaStream_t s[2];
    void *p[2];
    for (int d = 0; d < 2; d++) {
        OK(cudaSetDevice(d));
        s[d] = stream_new();
    }
    OK(cudaSetDevice(0));
    for (int d = 0; d < 2; d++) { /* the stream decides, not the current device */
        OK(galloc_malloc(&p[d], MIB(4), s[d]));
        OK(galloc_pool_default(&pool[d], d));
        galloc_pointer info = info_of(p[d]);
        EXPECT(info.pool == pool[d]);
        EXPECT_EQ(info.device, d);
        EXPECT_EQ(sim_physical(d), stats_of(pool[d]).reserved.current);
        EXPECT(sim_physical(d) >= MIB(4));
    }
    EXPECT(pool[0] != pool[1]);
    OK(cudaSetDevice(1));
    void *q = NULL;
    OK(galloc_malloc(&q, 512, 0)); /* for the default streams, the current device */
    EXPECT_EQ(info_of(q).device, 1);
    galloc_pool *current = NULL;
    OK(galloc_pool_default(&current, -1));
    EXPECT(current == pool[1]);
    OK(galloc_free(q, 0));
    for (int d = 0; d < 2; d++) OK(galloc_free(p[d], s[d]));
    finish();
}

TEST(each_of_sixteen_devices_serves)
{
    enum { DEVICES = 16 };
    begin_with_devices(DEVICES, SIM_PACE_RANDOM);
    for (int d = 0; d < DEVICES; d++) {
        void *p = NULL;
        OK(cudaSetDevice(d));
        cudaStream_t s = stream_new();
        OK(galloc_malloc(&p, KIB(4), s));
        EXPECT_EQ(info_of(p).device, d);
        OK(galloc_free(p, s));
        stream_end(s);
    }
    OK(cudaSetDevice(0));
    finish();
}

/* Each has a pool of its own for what cudaMalloc returns, too, whichever device is current at the free. */
TEST(each_of_sixteen_devices_serves_cudaMalloc)
{
    enum { DEVICES = 16 };
    begin_with_devices(DEVICES, SIM_PACE_RANDOM);
    void *p[DEVICES];
    for (int how = GALLOC_OVERRIDE_DEVICE; how <= GALLOC_OVERRIDE_ORDERED; how++) {
        for (int d = 0; d < DEVICES; d++) {
            OK(cudaSetDevice(d));
            OK(galloc_override_malloc(&p[d], MIB(2)));
            EXPECT_EQ(info_of(p[d]).device, d);
            EXPECT_EQ(sim_physical(d), MIB(2));
            for (int i = 0; i < d; i++) EXPECT(info_of(p[i]).pool != info_of(p[d]).pool);
        }
        for (int d = 0; d < DEVICES; d++) {
            OK(cudaSetDevice((d + how + 1) % DEVICES));
            OK(galloc_override_free(p[d], NULL, how));
        }
    }
    OK(galloc_shutdown());
    for (int d = 0; d < DEVICES; d++) EXPECT_EQ(sim_physical(d), 0);
    OK(cudaSetDevice(0));
    finish();
}

static void make_it_meanwhile(const char *function)
{
    static int inside;
    galloc_pool *pool = NULL;
    if (inside || strcmp(function, "cuDeviceTotalMem")) return;
    inside = 1;
    OK(galloc_pool_default(&pool, 1));
    inside = 0;
}

/* A default pool that another call makes meanwhile is the one, and ends all that is held of the device. */
TEST(a_default_pool_of_a_device_is_made_twice)
{
    begin_with_devices(2, SIM_PACE_RANDOM);
    galloc_pool *pool = NULL, *again = NULL;
    sim_hook(make_it_meanwhile, NULL);
    OK(galloc_pool_default(&pool, 1));
    sim_hook(NULL, NULL);
    OK(galloc_pool_default(&again, 1));
    EXPECT(pool == again);
    EXPECT_EQ(sim_retained(0), 0);
    EXPECT_EQ(sim_retained(1), 1);
    finish();
}

TEST(alignment_up_to_64_mib)
{
    FOR_BOTH_KINDS (kind) {
        begin();
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_of_kind(*kind);
        void *p[27];
        for (int i = 0; i <= 26; i++) {
            galloc_request request = {0};
            request.bytes = 1000;
            request.alignment = (size_t)1 << i;
            request.stream = s;
            request.pool = pool;
            p[i] = NULL;
            OK(galloc_alloc(&p[i], &request));
            EXPECT(p[i] != NULL);
            EXPECT_EQ((uintptr_t)p[i] % request.alignment, 0);
            EXPECT_EQ((uintptr_t)p[i] % 512, 0);
            put(s, p[i], 1000, 1);
            expect_healthy(pool, 1);
        }
        for (int i = 0; i <= 26; i++) OK(galloc_free(p[i], s));
        expect_healthy(pool, 1);
        OK(galloc_pool_trim(pool, 0, NULL));
        EXPECT_EQ(sim_physical(0), 0);
        pool_end(pool);
        finish();
    }
}

TEST(alignment_must_be_a_power_of_two)
{
    static const size_t bad[] = {3, 511, 513, MIB(3), SIZE_MAX};
    begin();
    galloc_pool *pool = pool_new(NULL);
    for (int i = 0; i < 2; i++) OK(galloc_free(get(pool, 1000, NULL), NULL)); /* a cache has a block of that size */
    for (int i = 0; i < 5; i++) {
        galloc_request request = {0};
        void *p = &request;
        request.bytes = 1000;
        request.alignment = bad[i];
        request.pool = pool;
        EXPECT_EQ(galloc_alloc(&p, &request), cudaErrorInvalidValue);
        EXPECT(p == NULL);
        EXPECT_EQ(log_lines, i + 1);
    }
    pool_end(pool);
    finish();
}

TEST(tags_come_back)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *p[3];
    for (uint32_t i = 0; i < 3; i++) {
        galloc_request request = {0};
        request.bytes = 5000;
        request.stream = s;
        request.pool = pool;
        request.tag = UINT32_MAX - i;
        OK(galloc_alloc(&p[i], &request));
    }
    for (uint32_t i = 0; i < 3; i++) {
        EXPECT_EQ(info_of(p[i]).tag, UINT32_MAX - i);
        OK(galloc_free(p[i], s));
    }
    p[0] = get(pool, 5000, s); /* reused memory does not keep the tag of its last owner */
    EXPECT_EQ(info_of(p[0]).tag, 0);
    OK(galloc_free(p[0], s));
    pool_end(pool);
    finish();
}

TEST(long_lived_blocks_stand_apart)
{
    FOR_BOTH_KINDS (kind) {
        begin();
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_of_kind(*kind);
        galloc_request request = {0};
        request.stream = s;
        request.pool = pool;
        void *p[6];
        OK(galloc_pool_reserve(pool, MIB(64)));
        for (int i = 0; i < 6; i++) {
            request.bytes = MIB(1) + KIB(64) * (size_t)i;
            request.lifetime = i % 2 ? GALLOC_LIFETIME_LONG : GALLOC_LIFETIME_ANY;
            OK(galloc_alloc(&p[i], &request));
        }
        for (int i = 1; i < 6; i += 2)
            for (int k = 0; k < 6; k += 2) EXPECT((char *)p[i] > (char *)p[k] + MIB(8));
        for (int i = 0; i < 6; i++) OK(galloc_free(p[i], s));
        request.lifetime = 2;
        EXPECT_EQ(galloc_alloc(&p[0], &request), cudaErrorInvalidValue);
        pool_end(pool);
        finish();
    }
}

/* Where pages are missing, too: two gaps would do, and long-lived blocks have the high end of the addresses. */
TEST(long_lived_blocks_are_far_from_the_lowest_gap)
{
    for (int far = 0; far < 2; far++) {
        begin();
        cudaStream_t s = stream_new();
        galloc_config config = galloc_config_default();
        galloc_request request = {0};
        config.growth = MIB(2);
        galloc_pool *pool = pool_new(&config);
        void *p[16], *q = NULL, *low, *high;
        for (int i = 0; i < 16; i++) p[i] = get(pool, MIB(2), s);
        low = p[3];
        high = p[10];
        for (int i = 0; i < 16; i++)
            if (i == 3 || i == 4 || i == 10 || i == 11) OK(galloc_free(p[i], s));
        OK(galloc_pool_trim(pool, 0, NULL)); /* the gaps have no pages */
        request.bytes = MIB(4);
        request.stream = s;
        request.pool = pool;
        request.lifetime = far ? GALLOC_LIFETIME_LONG : GALLOC_LIFETIME_ANY;
        OK(galloc_alloc(&q, &request));
        EXPECT(high > low);
        EXPECT(far ? (char *)q >= (char *)high : q == low);
        OK(galloc_free(q, s));
        for (int i = 0; i < 16; i++)
            if (i != 3 && i != 4 && i != 10 && i != 11) OK(galloc_free(p[i], s));
        pool_end(pool);
        finish();
    }
}

/* ---- reuse, splitting, merging ----------------------------------------------------------------------------------- */

/* The far end of free memory is looked for within it, whatever the alignment and whoever has used some of it. */
TEST(long_lived_blocks_are_placed_within_free_memory)
{
    for (size_t alignment = 512; alignment <= MIB(64); alignment *= 2) {
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = pool_new(NULL);
        galloc_request request = {0};
        void *p[12], *far = NULL;
        for (int i = 0; i < 12; i++) {
            p[i] = get(pool, MIB(3), s);
            put(s, p[i], MIB(3), 100 + (uint64_t)i);
        }
        for (int i = 1; i < 12; i += 2) OK(galloc_free(p[i], s));
        request.bytes = MIB(1);
        request.alignment = alignment;
        request.lifetime = GALLOC_LIFETIME_LONG;
        request.pool = pool;
        for (int i = 0; i < 2; i++) {
            request.stream = i ? s : t;
            OK(galloc_alloc(&far, &request));
            put(request.stream, far, MIB(1), 1);
            EXPECT_EQ((uintptr_t)far % alignment, 0);
            expect_healthy(pool, 1);
            OK(galloc_free(far, request.stream));
        }
        for (int i = 0; i < 12; i += 2) {
            look(s, p[i], MIB(3), 100 + (uint64_t)i);
            OK(galloc_free(p[i], s));
        }
        sim_run(-1);
        pool_end(pool);
        finish();
    }
}

TEST(freed_memory_is_given_again_without_the_driver)
{
    static const size_t sizes[] = {512, 3000, MIB(1), MIB(7), MIB(40)};
    FOR_BOTH_KINDS (kind) {
        begin();
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_of_kind(*kind);
        for (int i = 0; i < 5; i++) {
            void *p = get(pool, sizes[i], s);
            put(s, p, sizes[i], 1);
            OK(galloc_free(p, s));
            long calls = memory_calls() + event_calls();
            uint64_t hits = stats_of(pool).hits;
            for (int n = 0; n < 20; n++) {
                void *q = get(pool, sizes[i], s);
                EXPECT(q == p);
                put(s, q, sizes[i], 2);
                OK(galloc_free(q, s));
            }
            EXPECT_EQ(memory_calls() + event_calls(), calls);
            EXPECT_EQ(stats_of(pool).hits, hits + 20);
        }
        pool_end(pool);
        finish();
    }
}

TEST(best_fit_takes_the_smallest_hole)
{
    FOR_BOTH_KINDS (kind) {
        begin();
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_of_kind(*kind);
        static const size_t sizes[] = {MIB(5), MIB(3), MIB(4), MIB(9), MIB(3) + KIB(256)};
        void *hole[5], *wall[5];
        OK(galloc_pool_reserve(pool, MIB(48)));
        for (int i = 0; i < 5; i++) {
            hole[i] = get(pool, sizes[i], s);
            wall[i] = get(pool, 512, s);
        }
        for (int i = 0; i < 5; i++) OK(galloc_free(hole[i], s));
        EXPECT_EQ(stats_of(pool).grows, 1);
        void *p = get(pool, MIB(3) + KIB(200), s);
        EXPECT(p == hole[4]);
        void *q = get(pool, MIB(3) - 512, s);
        EXPECT(q == hole[1]);
        void *r = get(pool, MIB(3) + KIB(260), s);
        EXPECT(r == hole[2]);
        EXPECT_EQ(stats_of(pool).grows, 1);
        OK(galloc_free(p, s));
        OK(galloc_free(q, s));
        OK(galloc_free(r, s));
        for (int i = 0; i < 5; i++) OK(galloc_free(wall[i], s));
        pool_end(pool);
        finish();
    }
}

/* Sizes that share a bin are told apart as well. */
TEST(best_fit_within_a_bin)
{
    static const size_t more[] = {KIB(48), KIB(8), KIB(32), KIB(60), KIB(16)};
    FOR_BOTH_KINDS (kind) {
        begin();
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_of_kind(*kind);
        void *hole[5], *wall[5], *whole = get(pool, MIB(32), s);
        OK(galloc_free(whole, s));
        for (int i = 0; i < 5; i++) {
            hole[i] = get(pool, MIB(3) + more[i], s);
            wall[i] = get(pool, 512, s);
        }
        for (int i = 0; i < 5; i++) OK(galloc_free(hole[i], s));
        static const int order_of_size[] = {1, 4, 2, 0, 3};
        void *p[5];
        for (int i = 0; i < 5; i++) {
            p[i] = get(pool, MIB(3) + 512, s);
            EXPECT(p[i] == hole[order_of_size[i]]);
        }
        for (int i = 0; i < 5; i++) OK(galloc_free(p[i], s));
        for (int i = 0; i < 5; i++) OK(galloc_free(wall[i], s));
        pool_end(pool);
        finish();
    }
}

/* Of equal holes the lowest is taken, whichever was freed last. */
TEST(best_fit_takes_the_lowest_of_equal_holes)
{
    for (int last = 0; last < 3; last++) {
        begin();
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_new(NULL);
        void *hole[3], *wall[3];
        OK(galloc_pool_reserve(pool, MIB(32)));
        for (int i = 0; i < 3; i++) {
            hole[i] = get(pool, MIB(3), s);
            wall[i] = get(pool, 512, s);
        }
        for (int i = 1; i <= 3; i++) OK(galloc_free(hole[(last + i) % 3], s));
        void *p = get(pool, MIB(3) - 512, s);
        EXPECT(p == hole[0]);
        OK(galloc_free(p, s));
        for (int i = 0; i < 3; i++) OK(galloc_free(wall[i], s));
        pool_end(pool);
        finish();
    }
}

/* A hole that is large enough may lie so that an aligned block does not fit. A larger hole serves it then. */
TEST(an_aligned_block_is_served_by_any_hole_that_it_fits_into)
{
    FOR_BOTH_KINDS (kind) {
        begin();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = pool_of_kind(*kind);
        galloc_request request = {.bytes = MIB(4), .alignment = MIB(2), .stream = s, .pool = pool};
        void *wall[4], *small, *large, *p;
        OK(galloc_pool_reserve(pool, MIB(32)));
        wall[0] = get(pool, 512, s);
        small = get(pool, MIB(5), s);
        wall[1] = get(pool, 512, s);
        large = get(pool, MIB(20), s);
        wall[2] = get(pool, 512, t);
        wall[3] = get(pool, stats_of(pool).largest_free, s);
        OK(galloc_free(small, s));
        OK(galloc_free(large, s));
        galloc_stats before = stats_of(pool);
        OK(galloc_alloc(&p, &request));
        EXPECT((char *)p > (char *)large && (char *)p < (char *)large + MIB(20));
        EXPECT_EQ(stats_of(pool).moves, before.moves);
        EXPECT_EQ(stats_of(pool).grows, before.grows);
        OK(galloc_free(p, s));
        for (int i = 0; i < 4; i++) OK(galloc_free(wall[i], i == 2 ? t : s));
        pool_end(pool);
        finish();
    }
}

/* Three neighbours freed in each of the six orders make one piece again. */
TEST(freed_neighbours_merge)
{
    static const int orders[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
    FOR_BOTH_KINDS (kind) {
        begin();
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_of_kind(*kind);
        void *whole = get(pool, MIB(24), s);
        OK(galloc_free(whole, s));
        for (int o = 0; o < 6; o++) {
            void *p[3];
            for (int i = 0; i < 3; i++) p[i] = get(pool, MIB(8), s);
            for (int i = 0; i < 3; i++) OK(galloc_free(p[orders[o][i]], s));
            void *q = get(pool, MIB(24), s);
            EXPECT(q == whole);
            OK(galloc_free(q, s));
            EXPECT_EQ(galloc_pool_check(pool), 0);
        }
        galloc_stats stats = stats_of(pool);
        EXPECT_EQ(stats.grows, 1);
        EXPECT(stats.splits >= 2 && stats.merges >= 2);
        EXPECT_EQ(stats.reserved.current, MIB(24));
        pool_end(pool);
        finish();
    }
}

TEST(hundred_thousand_blocks_merge_in_any_order)
{
    enum { N = 100000 };
    static void *p[N];
    FOR_BOTH_KINDS (kind) {
        begin();
        dice d = {test_seed()};
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_of_kind(*kind);
        void *whole = get(pool, (size_t)N * 512, s);
        size_t reserved = stats_of(pool).reserved.current;
        OK(galloc_free(whole, s));
        for (int i = 0; i < N; i++) p[i] = get(pool, 1 + roll_below(&d, 512), s);
        EXPECT_EQ(stats_of(pool).blocks.current, N);
        EXPECT_EQ(stats_of(pool).reserved.current, reserved);
        expect_healthy(pool, 1);
        for (uint32_t i = N; i > 1; i--) {
            uint32_t k = roll_below(&d, i);
            void *other = p[k];
            p[k] = p[i - 1];
            p[i - 1] = other;
        }
        for (int i = 0; i < N; i++) OK(galloc_free(p[i], s));
        expect_healthy(pool, 1);
        whole = get(pool, reserved, s);
        EXPECT_EQ(stats_of(pool).reserved.current, reserved);
        OK(galloc_free(whole, s));
        pool_end(pool);
        finish();
    }
}

TEST(fixed_segments_have_three_sizes)
{
    static const size_t request[] = {1, KIB(700), MIB(1), MIB(1) + 1, MIB(9), MIB(10), MIB(10) + 1, MIB(13)};
    static const size_t segment[] = {MIB(2), MIB(2), MIB(2), MIB(20), MIB(20), MIB(10), MIB(12), MIB(14)};
    for (int i = 0; i < 8; i++) {
        begin();
        galloc_pool *pool = pool_expandable(0);
        void *p = get(pool, request[i], 0);
        EXPECT_EQ(sim_physical(0), segment[i]);
        EXPECT_EQ(sim_calls("cuMemCreate") + sim_calls("cuMemAddressReserve"), 0);
        OK(galloc_free(p, 0));
        EXPECT_EQ(sim_physical(0), segment[i]);
        pool_end(pool);
        EXPECT_EQ(sim_physical(0), 0);
        finish();
    }
}

TEST(without_virtual_memory_segments_are_fixed)
{
    sim_options options = sim_defaults();
    options.vmm = 0;
    begin_with(options);
    galloc_pool *pool = pool_new(NULL);
    EXPECT_EQ(config_of(pool).expandable_segments, 0);
    void *p = get(pool, 1000, 0);
    EXPECT_EQ(sim_physical(0), MIB(2));
    OK(galloc_free(p, 0));
    pool_end(pool);
    finish();
}

/* ---- growing and shrinking in place ------------------------------------------------------------------------------ */

TEST(room_to_grow_stays_free)
{
    FOR_BOTH_KINDS (kind) {
        begin();
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_of_kind(*kind);
        char *p = get_growable(pool, MIB(1), MIB(64), s);
        void *other[80], **more = other + 40;
        EXPECT(info_of(p).room >= MIB(64));
        EXPECT_EQ(info_of(p).requested, MIB(1));
        put(s, p, MIB(1), 7);
        for (int i = 0; i < 40; i++) other[i] = get(pool, MIB(1), s);
        for (size_t size = MIB(2); size <= MIB(64); size *= 2) {
            OK(galloc_resize(p, size, s));
            EXPECT_EQ(info_of(p).requested, size);
            look(s, p, MIB(1), 7);
            put(s, p + MIB(1), size - MIB(1), 8);
            for (int i = 0; i < 6; i++) *more++ = get(pool, size / 8, s);
            expect_healthy(pool, 1);
        }
        while (more-- != other + 40) OK(galloc_free(*more, s));
        for (int i = 0; i < 40; i++) {
            EXPECT((char *)other[i] + MIB(1) <= p || (char *)other[i] >= p + MIB(64));
            OK(galloc_free(other[i], s));
        }
        OK(galloc_free(p, s));
        pool_end(pool);
        finish();
    }
}

TEST(room_costs_addresses_not_memory)
{
    begin();
    galloc_pool *pool = pool_new(NULL);
    void *p = get_growable(pool, MIB(2), GIB(4), 0);
    EXPECT(sim_physical(0) < MIB(100));
    OK(galloc_free(p, 0));
    void *q = get(pool, MIB(2), 0); /* once freed, the room is anybody's */
    EXPECT_EQ(stats_of(pool).blocks.current, 1);
    OK(galloc_free(q, 0));
    expect_healthy(pool, 1);
    pool_end(pool);
    finish();
}

TEST(resize_keeps_contents)
{
    FOR_BOTH_KINDS (kind) {
        sim_options options = sim_defaults();
        options.mode = SIM_BACKED;
        options.memory = MIB(256);
        begin_with(options);
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_of_kind(*kind);
        char *p = get_growable(pool, MIB(3), MIB(32), s);
        char in[64], out[64];
        memset(in, 'g', sizeof in);
        OK(cudaMemcpyAsync(p, in, sizeof in, cudaMemcpyHostToDevice, s));
        OK(cudaMemcpyAsync(p + MIB(3) - 64, in, sizeof in, cudaMemcpyHostToDevice, s));
        OK(cudaStreamSynchronize(s));
        OK(galloc_resize(p, MIB(32), s));
        put(s, p + MIB(3), MIB(29), 5);
        for (size_t at = 0; at <= MIB(3) - 64; at += MIB(3) - 64) {
            memset(out, 0, sizeof out);
            OK(cudaMemcpyAsync(out, p + at, sizeof out, cudaMemcpyDeviceToHost, s));
            OK(cudaStreamSynchronize(s));
            EXPECT(memcmp(in, out, sizeof in) == 0);
        }
        OK(galloc_resize(p, 64, s));
        OK(cudaMemcpyAsync(out, p, sizeof out, cudaMemcpyDeviceToHost, s));
        OK(cudaStreamSynchronize(s));
        EXPECT(memcmp(in, out, sizeof in) == 0);
        OK(galloc_free(p, s));
        pool_end(pool);
        finish();
    }
}

TEST(resize_shrinks_and_grows_again)
{
    FOR_BOTH_KINDS (kind) {
        begin();
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_of_kind(*kind);
        void *p = get(pool, MIB(16), s);
        size_t allocated = stats_of(pool).allocated.current;
        OK(galloc_resize(p, MIB(4), s));
        galloc_stats stats = stats_of(pool);
        EXPECT_EQ(stats.live.current, MIB(4));
        EXPECT_EQ(stats.allocated.current, allocated - MIB(12));
        void *q = get(pool, MIB(12), s); /* what was given up is free for all */
        EXPECT(q == (char *)p + MIB(4));
        EXPECT_EQ(stats_of(pool).grows, 1);
        put(s, p, MIB(4), 1);
        EXPECT_EQ(galloc_resize(p, MIB(5), s), cudaErrorNotSupported);
        EXPECT_EQ(info_of(p).requested, MIB(4));
        EXPECT_EQ(stats_of(pool).live.current, MIB(16));
        OK(galloc_free(q, s));
        OK(galloc_resize(p, MIB(16), s)); /* into free memory that follows */
        look(s, p, MIB(4), 1);
        EXPECT_EQ(stats_of(pool).allocated.current, allocated);
        OK(galloc_resize(p, MIB(16), s));
        expect_healthy(pool, 1);
        OK(galloc_free(p, s));
        pool_end(pool);
        finish();
    }
}

TEST(resize_within_the_rounding_changes_only_the_request)
{
    begin();
    galloc_pool *pool = pool_new(NULL);
    void *p = get(pool, 100, 0);
    OK(galloc_resize(p, 512, 0));
    EXPECT_EQ(info_of(p).requested, 512);
    EXPECT_EQ(stats_of(pool).live.current, 512);
    OK(galloc_resize(p, 1, 0));
    EXPECT_EQ(stats_of(pool).live.current, 1);
    EXPECT_EQ(stats_of(pool).allocated.current, 512);
    OK(galloc_free(p, 0));
    EXPECT_EQ(stats_of(pool).live.current, 0);
    pool_end(pool);
    finish();
}

TEST(resize_honours_the_limit)
{
    begin();
    galloc_pool *pool = pool_limited(MIB(16));
    void *p = get_growable(pool, MIB(2), MIB(64), 0);
    EXPECT_EQ(galloc_resize(p, MIB(64), 0), cudaErrorMemoryAllocation);
    EXPECT_EQ(info_of(p).requested, MIB(2));
    EXPECT(sim_physical(0) <= MIB(16));
    OK(galloc_resize(p, MIB(16), 0));
    OK(galloc_free(p, 0));
    expect_healthy(pool, 1);
    pool_end(pool);
    finish();
}

/* Memory that is cached elsewhere in the pool makes way for a block that grows into its room: under a limit, and on a
   device that has no more. */
TEST(resize_takes_what_is_cached)
{
    for (int full = 0; full < 2; full++) {
        sim_options options = sim_defaults();
        options.pace = SIM_PACE_PROMPT;
        if (full) options.memory = MIB(64);
        begin_with(options);
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = pool_limited(full ? SIZE_MAX : MIB(64));
        void *wall = get(pool, 512, t), *p = get_growable(pool, MIB(2), MIB(60), s), *q = get(pool, MIB(56), t);
        put(t, q, MIB(56), 1);
        OK(galloc_free(q, t));
        OK(galloc_resize(p, MIB(40), s));
        put(s, p, MIB(40), 2);
        expect_healthy(pool, 1);
        OK(galloc_free(p, s));
        OK(galloc_free(wall, t));
        pool_end(pool);
        finish();
    }
}

TEST(resize_counts_what_grew)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *p = get(pool, MIB(4), s);
    OK(galloc_resize(p, MIB(1), s));
    EXPECT_EQ(stats_of(pool).live.total, MIB(4));
    OK(galloc_free(get(pool, MIB(3), t), t));
    OK(galloc_stream_retire(t));
    OK(cudaStreamSynchronize(t));
    OK(galloc_resize(p, MIB(2), s));
    EXPECT_EQ(stats_of(pool).live.total, MIB(8));
    EXPECT_EQ(info_of(p).stream_id, stream_id(s)); /* not that of the bytes it grew into */
    OK(galloc_free(p, s));
    pool_end(pool);
    finish();
}

/* A block in several new pages is one from the start. */
TEST(new_pages_are_no_merges)
{
    begin();
    galloc_config config = galloc_config_default();
    config.growth = MIB(2);
    galloc_pool *pool = pool_new(&config);
    void *p = get(pool, MIB(8), 0);
    EXPECT_EQ(stats_of(pool).pages[0].count, 4);
    EXPECT_EQ(stats_of(pool).merges, 0);
    OK(galloc_free(p, 0));
    pool_end(pool);
    finish();
}

/* Marks that are promised to nobody would be missing in the end. */
TEST(the_check_counts_live_bytes)
{
    begin();
    galloc_pool *pool = pool_new(NULL);
    void *p = get(pool, 1000, 0);
    EXPECT_EQ(galloc_pool_check(pool), 0);
    inside_count_live(pool, -100);
    EXPECT_EQ(galloc_pool_check(pool), 1);
    inside_count_live(pool, 100);
    OK(galloc_free(p, 0));
    pool_end(pool);
    finish();
}

TEST(the_check_counts_promised_marks)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *p = get(pool, 1000, s);
    EXPECT_EQ(galloc_pool_check(pool), 0);
    inside_promise_mark(pool, 1);
    EXPECT_EQ(galloc_pool_check(pool), 1);
    inside_promise_mark(pool, 0);
    OK(galloc_free(p, s));
    pool_end(pool);
    finish();
}

/* A charge that no pool has taken keeps its bytes from all pools of the device. */
TEST(the_check_counts_what_limits_are_charged)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *p = get(pool, 1000, s);
    EXPECT_EQ(galloc_pool_check(pool), 0);
    inside_charge(pool, MIB(2), 1);
    EXPECT_EQ(galloc_pool_check(pool), 1);
    inside_charge(pool, MIB(2), 0);
    EXPECT_EQ(galloc_pool_check(pool), 0);
    OK(galloc_free(p, s));
    pool_end(pool);
    finish();
}

/* A limit that came below what is held lets that be, and nothing else once it has gone. */
TEST(the_check_sees_more_than_a_lowered_limit_lets_be)
{
    begin();
    galloc_config config = galloc_config_default();
    galloc_pool *a = pool_new(NULL);
    OK(galloc_free(get(a, MIB(64), 0), 0));
    config.device_limit = MIB(16);
    galloc_pool *b = pool_new(&config);
    EXPECT_EQ(galloc_pool_check(b), 0);
    OK(galloc_pool_trim(a, 0, NULL));
    inside_charge(b, MIB(16), 1);
    int broken = galloc_pool_check(b);
    inside_charge(b, MIB(16), 0);
    inside_charge(b, MIB(18), 1);
    EXPECT_EQ(galloc_pool_check(b), broken + 1);
    inside_charge(b, MIB(18), 0);
    pool_end(a);
    pool_end(b);
    finish();
}

/* Holes that are in no list are found by no request. */
TEST(the_check_counts_holes)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *p = get(pool, MIB(5), s);
    EXPECT_EQ(galloc_pool_check(pool), 0);
    EXPECT_EQ(inside_list_holes(pool, 0), 1);
    EXPECT_EQ(galloc_pool_check(pool), 1);
    (void)inside_list_holes(pool, 1);
    EXPECT_EQ(galloc_pool_check(pool), 0);
    OK(galloc_free(p, s));
    pool_end(pool);
    finish();
}

/* Behind a wrong end of the list by age, blocks that are freed would be lost to it. */
TEST(the_check_sees_where_the_list_by_age_ends)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *p[4];
    for (int i = 0; i < 4; i++) p[i] = get(pool, MIB(3), s);
    OK(galloc_free(p[0], s));
    OK(galloc_free(p[2], s));
    OK(galloc_pool_trim(pool, SIZE_MAX, NULL)); /* the stream's cache is emptied */
    EXPECT_EQ(galloc_pool_check(pool), 0);
    EXPECT(inside_list_newest(pool, 0));
    EXPECT_EQ(galloc_pool_check(pool), 1);
    EXPECT(inside_list_newest(pool, 1));
    EXPECT_EQ(galloc_pool_check(pool), 0);
    OK(galloc_free(p[1], s));
    OK(galloc_free(p[3], s));
    pool_end(pool);
    finish();
}

/* A mark that is empty, begins before its block, ends behind it, or covers bytes of another mark of its stream. */
TEST(the_check_sees_marks_out_of_bounds)
{
    const ptrdiff_t all = MIB(4);
    const ptrdiff_t by[][2] = {{0, 512}, {-512, 0}, {0, -all}, {0, -all - 512}};
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *p[3];
    OK(galloc_free(get(pool, 512, t), t));
    for (int i = 0; i < 3; i++) p[i] = get_used(pool, MIB(4), s, 1);
    for (int n = 0; n < 2; n++) { /* one mark, or two */
        OK(galloc_free(p[n], s));
        EXPECT_EQ(galloc_pool_check(pool), 0);
        EXPECT_EQ(inside_most_marks(pool), n + 1);
        for (size_t i = 0; i < sizeof by / sizeof *by; i++) {
            inside_move_mark(p[0], by[i][0], by[i][1]);
            EXPECT_EQ(galloc_pool_check(pool), 1);
            inside_move_mark(p[0], -by[i][0], -by[i][1]);
            EXPECT_EQ(galloc_pool_check(pool), 0);
        }
    }
    OK(galloc_free(p[2], s));
    pool_end(pool);
    finish();
}

/* A used block of a captured stream has a mark of it over all its bytes. */
TEST(the_check_sees_that_the_mark_of_a_captured_block_is_short)
{
    begin();
    cudaStream_t s = stream_new();
    cudaGraph_t graph;
    galloc_pool *pool = pool_limited(MIB(64));
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    void *p = get(pool, MIB(2), s);
    EXPECT_EQ(galloc_pool_check(pool), 0);
    inside_move_mark(p, 0, -512);
    EXPECT(galloc_pool_check(pool) > 0);
    inside_move_mark(p, 0, 512);
    OK(galloc_free(p, s));
    OK(cudaStreamEndCapture(s, &graph));
    OK(cudaGraphDestroy(graph));
    pool_end(pool);
    finish();
}

/* Three blocks with a page each, which no stream cache takes. */
static galloc_pool *pool_of_three_pages(void *p[3], cudaStream_t s)
{
    galloc_config config = config_limit(MIB(256));
    config.growth = MIB(2);
    config.lane_bytes = 0;
    galloc_pool *pool = pool_new(&config);
    for (int i = 0; i < 3; i++) p[i] = get(pool, MIB(2), s);
    return pool;
}

/* A parked page that is not in the list of them would be found by no request. */
TEST(the_check_sees_a_parked_page_that_is_not_listed)
{
    begin();
    cudaStream_t s = stream_new();
    void *p[3];
    galloc_pool *pool = pool_of_three_pages(p, s);
    for (int i = 0; i < 3; i++) OK(galloc_free(p[i], s));
    expect_the_check_sees_all(pool);
    if (EXPECT(inside_list_parked(pool, 0))) {
        EXPECT(galloc_pool_check(pool) > 0);
        (void)inside_list_parked(pool, 1);
        EXPECT_EQ(galloc_pool_check(pool), 0);
    }
    pool_end(pool);
    finish();
}

TEST(the_check_sees_each_word_beside_holes)
{
    begin();
    void *p[3];
    galloc_pool *pool = pool_of_three_pages(p, NULL);
    OK(galloc_free(p[1], NULL));
    OK(galloc_pool_trim(pool, 0, NULL)); /* leaves a hole between the others, and one behind them */
    expect_the_check_sees_all(pool);
    OK(galloc_free(p[0], NULL));
    OK(galloc_free(p[2], NULL));
    pool_end(pool);
    finish();
}

/* An epoch that is to come, and counts as done, freed in or handed on already. */
TEST(the_check_sees_epochs_that_run_ahead)
{
    begin_still();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    int which = 0;
    OK(galloc_free(get(pool, MIB(4), s), s));
    for (; inside_ahead(pool, stream_id(s), which, 1); which++) {
        EXPECT_EQ(galloc_pool_check(pool), 1);
        EXPECT_EQ(inside_ahead(pool, stream_id(s), which, 0), 1);
        EXPECT_EQ(galloc_pool_check(pool), 0);
    }
    EXPECT_EQ(which, 3);
    pool_end(pool);
    finish();
}

TEST(the_check_sees_each_word_of_a_pool)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new(), captured = stream_new();
    galloc_config config = galloc_config_default();
    config.history = 100;
    for (int history = 0; history < 2; history++) {
        galloc_pool *pool = pool_new(history ? &config : NULL);
        galloc_graph *group = NULL;
        void *p[8], *grown = get_growable(pool, MIB(4), MIB(64), s), *in_graph;
        cudaGraph_t graph;
        for (int i = 0; i < 8; i++) p[i] = get_used(pool, MIB(3), i % 2 ? t : s, 1);
        for (int i = 0; i < 6; i++) OK(galloc_free(p[i], i % 2 ? t : s));
        void *moved = get(pool, MIB(9), s), *small = get(pool, 1000, t);
        OK(galloc_free(small, t)); /* stays in the stream's cache */
        OK(galloc_resize(grown, MIB(8), s));
        OK(galloc_resize(grown, MIB(4), s)); /* parks pages */
        OK(galloc_graph_begin(&group, pool, captured));
        OK(cudaStreamBeginCapture(captured, cudaStreamCaptureModeRelaxed));
        in_graph = get_used(pool, MIB(1), captured, 2);
        OK(galloc_free(in_graph, captured));
        in_graph = get_used(pool, 5000, captured, 2);
        expect_the_check_sees_all(pool);
        OK(galloc_free(in_graph, captured));
        OK(cudaStreamEndCapture(captured, &graph));
        OK(galloc_graph_end(group));
        expect_the_check_sees_all(pool);
        OK(cudaGraphDestroy(graph));
        OK(galloc_graph_release(group, captured));
        OK(galloc_free(p[6], s));
        OK(galloc_free(p[7], t));
        OK(galloc_free(moved, t));
        OK(galloc_free(grown, s));
        pool_end(pool);
    }
    finish();
}

TEST(the_check_sees_each_word_of_caches_and_segments)
{
    for (int fixed = 0; fixed < 2; fixed++) {
        begin_still();
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_expandable(!fixed);
        void *p[8], *large = get(pool, MIB(30), s);
        for (int i = 0; i < 8; i++) p[i] = get(pool, i % 2 ? 1000 : 5000, s);
        for (int i = 0; i < 8; i++) OK(galloc_free(p[i], s));
        for (int i = 0; i < 2; i++) p[i] = get(pool, i % 2 ? 1000 : 5000, s);
        for (int i = 0; i < 2; i++) OK(galloc_free(p[i], s));
        EXPECT(inside_stream_of(pool, stream_id(s)).blocks > inside_stream_of(pool, stream_id(s)).fresh_blocks);
        expect_the_check_sees_all(pool);
        OK(galloc_free(large, s));
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

TEST(the_check_sees_each_word_of_a_wait)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_limited(MIB(16));
    void *p = get_used(pool, MIB(12), s, 1);
    OK(galloc_free(get(pool, 512, t), t));
    OK(galloc_free(p, s));
    p = get_used(pool, MIB(12), t, 2); /* its stream waits for the other one */
    EXPECT_EQ(stats_of(pool).waits, 1);
    expect_the_check_sees_all(pool);
    OK(galloc_free(p, t));
    pool_end(pool);
    finish();
}

/* A descriptor that is lost would be missing until the pool ends; one that is given back while it is in use would be
   used twice. */
TEST(the_check_counts_descriptors)
{
    static uint64_t one_too_many[1024];
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *p = get(pool, 1000, s), *descriptor;
    int kinds = 0;
    for (; (descriptor = inside_descriptor_take(pool, kinds)) != NULL; kinds++) {
        EXPECT_EQ(galloc_pool_check(pool), 1);
        inside_descriptor_give(pool, kinds, descriptor);
        EXPECT_EQ(galloc_pool_check(pool), 0);
        inside_descriptor_give(pool, kinds, one_too_many);
        EXPECT_EQ(galloc_pool_check(pool), 1);
        EXPECT(inside_descriptor_take(pool, kinds) == one_too_many);
        EXPECT_EQ(galloc_pool_check(pool), 0);
    }
    EXPECT_EQ(kinds, 7);
    OK(galloc_free(p, s));
    pool_end(pool);
    finish();
}

static struct {
    galloc_pool *pool;
    int checking, checks, broken;
} checked;

static void *check_now(void *unused)
{
    checked.broken += galloc_pool_check(checked.pool);
    return unused;
}

static void check_in_another_thread(const char *function)
{
    pthread_t thread;
    if (checked.checking || strcmp(function, "cuStreamGetId")) return;
    checked.checking = 1;
    pthread_create(&thread, NULL, check_now, NULL);
    pthread_join(thread, NULL);
    checked.checking = 0;
    checked.checks++;
}

/* Descriptors that a call of another thread is about to use are not lost. */
TEST(the_check_finds_nothing_beside_a_free_after_several_streams)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new(), both[] = {s, t};
    galloc_pool *pool = pool_new(NULL);
    void *p = get(pool, KIB(4), s), *q = get(pool, KIB(4), t);
    memset(&checked, 0, sizeof checked);
    checked.pool = pool;
    sim_hook(check_in_another_thread, NULL);
    OK(galloc_free_after(p, both, 2));
    sim_hook(NULL, NULL);
    EXPECT(checked.checks > 0);
    EXPECT_EQ(checked.broken, 0);
    OK(galloc_free(q, t));
    stream_end(s);
    stream_end(t);
    pool_end(pool);
    finish();
}

/* ---- what is known of an address --------------------------------------------------------------------------------- */

TEST(pointer_info_of_every_kind_of_address)
{
    FOR_BOTH_KINDS (kind) {
        begin();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = pool_of_kind(*kind);
        int local = 0;
        char *p = get(pool, 1000, s);
        for (int at = 0; at < 1024; at += 341) { /* the start, inside, in the rounding */
            galloc_pointer info = info_of(p + at);
            EXPECT_EQ(info.state, GALLOC_STATE_USED);
            EXPECT(info.pool == pool && info.base == p);
            EXPECT_EQ(info.requested, 1000);
            EXPECT_EQ(info.usable, 1024);
            EXPECT(info.room >= info.usable);
            EXPECT_EQ(info.stream_id, stream_id(s));
            EXPECT_EQ(info.device, 0);
        }
        EXPECT_EQ(info_of(&local).state, GALLOC_STATE_FOREIGN);
        EXPECT_EQ(info_of(NULL).state, GALLOC_STATE_FOREIGN);
        EXPECT_EQ(info_of((void *)UINTPTR_MAX).state, GALLOC_STATE_FOREIGN);
        void *foreign = NULL;
        OK(cudaMalloc(&foreign, 4096));
        EXPECT_EQ(info_of(foreign).state, GALLOC_STATE_FOREIGN);
        OK(cudaFree(foreign));
        OK(galloc_free(p, t));
        galloc_pointer info = info_of(p);
        EXPECT_EQ(info.state, GALLOC_STATE_FREE);
        EXPECT(info.pool == pool && (char *)info.base <= p);
        EXPECT_EQ(info.requested, 0);
        EXPECT_EQ(info.stream_id, stream_id(t));
        OK(galloc_pool_trim(pool, 0, NULL));
        EXPECT_EQ(info_of(p).state, GALLOC_STATE_FOREIGN); /* an address without memory */
        EXPECT_EQ(log_lines, 0);
        EXPECT_EQ(galloc_pointer_info(p, NULL), cudaErrorInvalidValue);
        pool_end(pool);
        finish();
    }
}

/* The first of roundup_power2_divisions holds for all sizes below 2 MiB, also if the others round nothing. */
TEST(the_first_division_rounds_small_sizes)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = galloc_config_default();
    config.roundup_power2_divisions[0] = 4;
    galloc_pool *pool = pool_new(&config);
    static const size_t sizes[][2] = {
        {700, 1024}, {2100, 2560}, {4100, 5120}, {KIB(513), KIB(640)}, {MIB(3) + 1, MIB(3) + 512}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        for (int again = 0; again < 3; again++) { /* also by the shorter ways */
            void *p = get(pool, sizes[i][0], s);
            EXPECT_EQ(info_of(p).usable, sizes[i][1]);
            OK(galloc_free(p, s));
        }
    }
    pool_end(pool);
    finish();
}

/* Steps between powers of two are at least 512 bytes, also where other sizes have fewer steps. */
TEST(no_division_makes_steps_below_512_bytes)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = galloc_config_default();
    config.roundup_power2_divisions[0] = 8;
    config.roundup_power2_divisions[1] = 2;
    galloc_pool *pool = pool_new(&config);
    static const size_t sizes[][2] = {
        {1100, 1536}, {2100, 2560}, {3000, 3072}, {4100, 4608}, {MIB(2) + 1, MIB(3)}, {MIB(4) + 1, MIB(4) + 512}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        void *p = get(pool, sizes[i][0], s);
        EXPECT_EQ(info_of(p).usable, sizes[i][1]);
        OK(galloc_free(p, s));
    }
    pool_end(pool);
    finish();
}

/* The last entry of roundup_power2_divisions is that of the largest sizes. */
TEST(the_last_division_rounds_the_largest_sizes)
{
    sim_options options = sim_defaults();
    options.memory = GIB(256);
    begin_with(options);
    cudaStream_t s = stream_new();
    galloc_config config = galloc_config_default();
    config.roundup_power2_divisions[GALLOC_DIVISIONS - 1] = 4;
    galloc_pool *pool = pool_new(&config);
    void *p = get(pool, GIB(33), s), *q = get(pool, GIB(17), s);
    EXPECT_EQ(info_of(p).usable, GIB(40));
    EXPECT_EQ(info_of(q).usable, GIB(17));
    OK(galloc_free(p, s));
    OK(galloc_free(q, s));
    pool_end(pool);
    finish();
}

/* Free memory that merges is that of the stream that freed a part of it last. */
TEST(free_memory_names_the_stream_of_the_last_free)
{
    FOR_BOTH_KINDS (kind) {
        for (int right_last = 0; right_last < 2; right_last++) {
            begin_still();
            cudaStream_t s = stream_new(), t = stream_new();
            galloc_config config = galloc_config_default();
            config.expandable_segments = *kind;
            config.stats_exact = 1;
            galloc_pool *pool = pool_new(&config);
            char *left = get(pool, MIB(2), s), *right = get(pool, MIB(2), s), *wall = get(pool, MIB(2), s);
            EXPECT(right == left + MIB(2) && wall == right + MIB(2));
            OK(galloc_free(right_last ? left : right, s));
            OK(galloc_free(right_last ? right : left, t));
            OK(galloc_pool_trim(pool, MIB(100), NULL));
            sim_run(-1);
            OK(galloc_stream_retire(s));
            OK(galloc_stream_retire(t));
            sim_run(-1);
            OK(galloc_pool_trim(pool, MIB(100), NULL)); /* the work of both is done */
            EXPECT(info_of(right).base == left);
            EXPECT_EQ(info_of(left).stream_id, stream_id(t));
            OK(galloc_free(wall, s));
            pool_end(pool);
            finish();
        }
    }
}

/* The second pool has the host memory of the first one, and none of what that knew. */
TEST(memory_that_nobody_has_freed_names_no_stream)
{
    FOR_BOTH_KINDS (kind) {
        begin();
        cudaStream_t s = stream_new();
        for (int i = 0; i < 3; i++) {
            galloc_pool *pool = pool_of_kind(*kind);
            char *p = get(pool, MIB(3), s), *q = get(pool, KIB(64), s);
            galloc_pointer rest = info_of(p + MIB(3));
            if (rest.state == GALLOC_STATE_FREE) EXPECT_EQ(rest.stream_id, 0);
            rest = info_of(q + KIB(64));
            if (rest.state == GALLOC_STATE_FREE) EXPECT_EQ(rest.stream_id, 0);
            OK(galloc_free(p, s));
            OK(galloc_free(q, s));
            pool_end(pool);
        }
        stream_end(s);
        finish();
    }
}

/* ---- counters ---------------------------------------------------------------------------------------------------- */

TEST(counters_follow_a_known_history)
{
    FOR_BOTH_KINDS (kind) {
        begin();
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_of_kind(*kind);
        EXPECT_EQ(stats_of(pool).reserved.current, 0);
        void *a = get(pool, 1000, s);
        void *b = get(pool, MIB(1), s);
        galloc_stats stats = stats_of(pool);
        EXPECT_EQ(stats.live.current, 1000 + MIB(1));
        EXPECT_EQ(stats.allocated.current, 1024 + MIB(1));
        EXPECT_EQ(stats.blocks.current, 2);
        OK(galloc_free(a, s));
        OK(galloc_free(b, s));
        a = get(pool, 600, s);
        stats = stats_of(pool);
        EXPECT_EQ(stats.live.current, 600);
        EXPECT_EQ(stats.live.peak, 1000 + MIB(1));
        EXPECT_EQ(stats.live.total, 1600 + MIB(1));
        EXPECT_EQ(stats.allocated.current, 1024);
        EXPECT_EQ(stats.allocated.peak, 1024 + MIB(1));
        EXPECT_EQ(stats.allocated.total, 2048 + MIB(1));
        EXPECT_EQ(stats.blocks.current, 1);
        EXPECT_EQ(stats.blocks.peak, 2);
        EXPECT_EQ(stats.blocks.total, 3);
        EXPECT_EQ(stats.reserved.peak, sim_physical_peak(0));
        EXPECT_EQ(stats.mallocs, 3);
        EXPECT_EQ(stats.frees, 2);
        EXPECT_EQ(stats.failures, 0);
        EXPECT_EQ(stats.hits + stats.grows, 3);
        EXPECT_EQ(stats.marks + stats.waits + stats.moves, 0);
        expect_healthy(pool, 1);

        OK(galloc_pool_stats_reset(pool));
        stats = stats_of(pool);
        EXPECT_EQ(stats.live.current, 600);
        EXPECT_EQ(stats.live.peak, 600);
        EXPECT_EQ(stats.live.total, 0);
        EXPECT_EQ(stats.reserved.current, sim_physical(0));
        EXPECT_EQ(stats.reserved.peak, sim_physical(0));
        EXPECT_EQ(stats.cached.peak, stats.cached.current);
        EXPECT_EQ(stats.blocks.total + stats.reserved.total + stats.cached.total, 0);
        EXPECT_EQ(stats.mallocs + stats.frees + stats.hits + stats.grows + stats.splits + stats.merges, 0);
        EXPECT_EQ(stats.driver.create + stats.driver.map + stats.driver.mem_alloc, 0);
        EXPECT_EQ(stats.driver_ns.create + stats.driver_ns.map + stats.driver_ns.mem_alloc, 0);
        EXPECT_EQ(stats.driver_longest_ns.create + stats.driver_longest_ns.mem_alloc, 0);
        expect_healthy(pool, 1);
        OK(galloc_free(a, s));
        pool_end(pool);
        finish();
    }
}

/* Memory that comes from the driver for a block was never cached. */
TEST(only_what_lies_idle_is_cached)
{
    FOR_BOTH_KINDS (kind) {
        begin();
        galloc_pool *pool = pool_of_kind(*kind);
        void *p = get(pool, GIB(1), 0);
        EXPECT(stats_of(pool).cached.peak < MIB(128));
        EXPECT(stats_of(pool).cached.total < MIB(128));
        OK(galloc_free(p, 0));
        EXPECT_EQ(stats_of(pool).cached.peak, stats_of(pool).reserved.current);
        pool_end(pool);
        finish();
    }
}

/* A part of a free block is given away; the rest is still what the same stream freed. */
TEST(the_rest_of_a_free_block_names_the_stream_of_its_free)
{
    FOR_BOTH_KINDS (kind) {
        begin();
        cudaStream_t s = stream_new();
        galloc_config config = galloc_config_default();
        galloc_request request = {0};
        config.expandable_segments = *kind;
        config.lane_bytes = 0;
        galloc_pool *pool = pool_new(&config);
        char *p = get(pool, MIB(8), s);
        void *part = NULL;
        OK(galloc_free(p, s));
        request.bytes = MIB(1);
        request.alignment = 4096;
        request.stream = s;
        request.pool = pool;
        OK(galloc_alloc(&part, &request));
        EXPECT(part == p);
        EXPECT_EQ(info_of(p + MIB(4)).stream_id, stream_id(s));
        OK(galloc_free(part, s));
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

/* Nobody has read the counters while the peaks lasted. */
TEST(peaks_are_known_that_nobody_saw)
{
    FOR_BOTH_KINDS (kind) {
        begin();
        galloc_pool *pool = pool_of_kind(*kind);
        void *p = get(pool, MIB(3), 0), *q = get(pool, 1000, 0);
        OK(galloc_free(p, 0));
        OK(galloc_free(q, 0));
        OK(galloc_free(get(pool, KIB(8), 0), 0));
        galloc_stats stats = stats_of(pool);
        EXPECT_EQ(stats.live.current + stats.allocated.current + stats.blocks.current, 0);
        EXPECT_EQ(stats.live.peak, MIB(3) + 1000);
        EXPECT_EQ(stats.allocated.peak, MIB(3) + 1024);
        EXPECT_EQ(stats.blocks.peak, 2);
        pool_end(pool);
        finish();
    }
}

/* The total grows by what becomes cached, not by what already is. */
TEST(what_becomes_cached_adds_up)
{
    for (int exact = 0; exact < 2; exact++) {
        FOR_BOTH_KINDS (kind) {
            begin();
            galloc_config config = galloc_config_default();
            config.expandable_segments = *kind;
            config.stats_exact = exact;
            galloc_pool *pool = pool_new(&config);
            cudaStream_t s = stream_new();
            void *p[3];
            for (int i = 0; i < 3; i++) p[i] = get(pool, KIB(512), s);
            OK(galloc_pool_stats_reset(pool));
            for (int i = 0; i < 3; i++) {
                OK(galloc_free(p[i], s));
                EXPECT_EQ(stats_of(pool).cached.total, (i + 1) * KIB(512));
            }
            OK(galloc_free(get(pool, KIB(512), s), s)); /* in use in between */
            EXPECT_EQ(stats_of(pool).cached.total, 4 * KIB(512));
            pool_end(pool);
            stream_end(s);
            finish();
        }
    }
}

#define EXPECT_SAME_COUNT(name, function) EXPECT_EQ(stats.driver.name - before.driver.name, sim_calls(function) - name);
#define COUNT_NOW(name, function) long name = sim_calls(function);

TEST(driver_calls_are_counted_as_the_device_counts_them)
{
    FOR_BOTH_KINDS (kind) {
        begin();
        dice d = {test_seed()};
        cudaStream_t s[3] = {stream_new(), stream_new(), stream_new()};
        galloc_config config = config_limit(MIB(64));
        config.expandable_segments = *kind;
        galloc_pool *pool = pool_new(&config);
        galloc_stats before = stats_of(pool);
        GALLOC_DRIVER_CALLS(COUNT_NOW)
        void *p[16] = {NULL};
        for (int i = 0; i < 300; i++) {
            uint32_t k = roll_below(&d, 16), stream = k % 3;
            if (p[k]) {
                OK(galloc_free(p[k], s[stream]));
                p[k] = NULL;
            } else {
                size_t bytes = roll_bytes(&d, MIB(12));
                if (galloc_pool_malloc(pool, &p[k], bytes, s[stream]) == cudaSuccess) put(s[stream], p[k], bytes, k);
            }
            if (i % 60 == 59) OK(galloc_pool_trim(pool, MIB(8), NULL));
        }
        for (int k = 0; k < 16; k++) OK(galloc_free(p[k], s[k % 3]));
        OK(galloc_pool_trim(pool, 0, NULL));
        galloc_stats stats = stats_of(pool);
        GALLOC_DRIVER_CALLS(EXPECT_SAME_COUNT)
        EXPECT_EQ(stats.waits, stats.driver.stream_wait);
        EXPECT_EQ(stats.marks, stats.driver.event_record);
        pool_end(pool);
        finish();
    }
}

#define COST_NOW(name, function) uint64_t name = sim_cost_of_ns(function);
#define EXPECT_SAME_TIME(name, function) EXPECT_EQ(stats.driver_ns.name, sim_cost_of_ns(function) - name);
#define EXPECT_LONGEST(name, function)                                                                                 \
    EXPECT(stats.driver_longest_ns.name <= stats.driver_ns.name);                                                      \
    EXPECT(stats.driver_ns.name <= stats.driver_longest_ns.name * stats.driver.name);

TEST(driver_time_is_what_the_device_says)
{
    FOR_BOTH_KINDS (kind) {
        begin();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = pool_of_kind(*kind);
        OK(galloc_pool_stats_reset(pool));
        GALLOC_DRIVER_CALLS(COST_NOW)
        for (int i = 1; i <= 8; i++) {
            void *p = get(pool, MIB(1) << i, s), *q = get(pool, MIB(3) * (size_t)i, t);
            put(s, p, MIB(1) << i, 1);
            OK(galloc_free(p, s));
            OK(galloc_free(q, t));
            OK(galloc_pool_trim(pool, MIB(64), NULL));
        }
        OK(galloc_pool_trim(pool, 0, NULL));
        galloc_stats stats = stats_of(pool);
        GALLOC_DRIVER_CALLS(EXPECT_SAME_TIME)
        GALLOC_DRIVER_CALLS(EXPECT_LONGEST)
        EXPECT(*kind ? stats.driver_ns.set_access : stats.driver_ns.mem_alloc);
        pool_end(pool);
        finish();
    }
}

TEST(the_longest_call_stays_until_the_reset)
{
    begin();
    galloc_pool *pool = pool_expandable(0);
    void *large = get(pool, GIB(1), 0);
    uint64_t longest = stats_of(pool).driver_longest_ns.mem_alloc;
    void *small = get(pool, KIB(1), 0);
    galloc_stats stats = stats_of(pool);
    EXPECT_EQ(stats.driver.mem_alloc, 2);
    EXPECT_EQ(stats.driver_longest_ns.mem_alloc, longest);
    EXPECT(stats.driver_ns.mem_alloc > longest && stats.driver_ns.mem_alloc < 2 * longest);
    OK(galloc_pool_stats_reset(pool));
    void *again = get(pool, MIB(2), 0);
    stats = stats_of(pool);
    EXPECT(stats.driver_longest_ns.mem_alloc < longest);
    EXPECT_EQ(stats.driver_longest_ns.mem_alloc, stats.driver_ns.mem_alloc);
    OK(galloc_free(large, 0));
    OK(galloc_free(small, 0));
    OK(galloc_free(again, 0));
    pool_end(pool);
    finish();
}

/* The one wait for a stream: when the host cannot even note it. */
TEST(a_wait_for_want_of_host_memory_is_counted)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *p = get(pool, MIB(1), s);
    sim_fail_malloc(1, 1);
    OK(galloc_free(p, t));
    sim_fail_clear();
    galloc_stats stats = stats_of(pool);
    EXPECT_EQ(stats.driver.stream_synchronize, 1);
    EXPECT_EQ(stats.driver.stream_synchronize, sim_calls("cuStreamSynchronize"));
    EXPECT_EQ(stats.driver_ns.stream_synchronize, sim_cost_of_ns("cuStreamSynchronize"));
    pool_end(pool);
    finish();
}

/* Fixed segments have known sizes: 2, 20 and 34 MiB here. */
TEST(pages_are_counted_by_size)
{
    begin();
    galloc_pool *pool = pool_expandable(0);
    static const size_t bytes[] = {MIB(1), MIB(1), KIB(1), MIB(5), MIB(33)};
    void *p[5];
    for (int i = 0; i < 5; i++) p[i] = get(pool, bytes[i], 0);
    galloc_stats stats = stats_of(pool);
    EXPECT_EQ(stats.pages[0].count, 2);
    EXPECT_EQ(stats.pages[0].bytes, MIB(4));
    EXPECT_EQ(stats.pages[3].count, 1);
    EXPECT_EQ(stats.pages[3].bytes, MIB(20));
    EXPECT_EQ(stats.pages[4].count, 1);
    EXPECT_EQ(stats.pages[4].bytes, MIB(34));
    expect_healthy(pool, 1);
    for (int i = 0; i < 5; i++) OK(galloc_free(p[i], 0));
    EXPECT_EQ(stats_of(pool).pages[4].count, 1);
    OK(galloc_pool_stats_reset(pool));
    EXPECT_EQ(stats_of(pool).pages[4].count, 1);
    OK(galloc_pool_trim(pool, 0, NULL));
    stats = stats_of(pool);
    for (int i = 0; i < GALLOC_PAGE_SIZES; i++) EXPECT_EQ(stats.pages[i].count + stats.pages[i].bytes, 0);
    pool_end(pool);
    finish();
}

TEST(pages_are_as_many_as_the_device_has_given)
{
    begin();
    galloc_pool *pool = pool_new(NULL);
    void *p[10];
    for (int i = 0; i < 10; i++) p[i] = get(pool, MIB(1) << i, 0);
    for (int i = 0; i < 10; i += 2) OK(galloc_free(p[i], 0));
    OK(galloc_pool_trim(pool, 0, NULL));
    galloc_stats stats = stats_of(pool);
    size_t count = 0;
    for (int i = 0; i < GALLOC_PAGE_SIZES; i++) {
        count += stats.pages[i].count;
        EXPECT(stats.pages[i].bytes >= stats.pages[i].count * (MIB(2) << i));
        EXPECT(stats.pages[i].bytes <= stats.pages[i].count * (MIB(4) << i));
    }
    EXPECT_EQ(count, sim_calls("cuMemCreate") - sim_calls("cuMemRelease"));
    EXPECT(sim_calls("cuMemRelease") > 0);
    expect_healthy(pool, 1);
    for (int i = 1; i < 10; i += 2) OK(galloc_free(p[i], 0));
    pool_end(pool);
    finish();
}

TEST(a_page_of_any_size_has_a_place)
{
    EXPECT_EQ(inside_page_class(MIB(2)), 0);
    EXPECT_EQ(inside_page_class(MIB(4) - 1), 0);
    EXPECT_EQ(inside_page_class(MIB(4)), 1);
    EXPECT_EQ(inside_page_class(GIB(64)), GALLOC_PAGE_SIZES - 1);
    EXPECT_EQ(inside_page_class((size_t)1 << 56), GALLOC_PAGE_SIZES - 1);
}

/* Five blocks of 4 MiB, of which three in a row are freed one by one, and behind them a free block of 512 bytes. */
TEST(fragmentation_of_a_known_heap)
{
    FOR_BOTH_KINDS (kind) {
        begin();
        galloc_config config = galloc_config_default();
        config.expandable_segments = *kind;
        config.stats_exact = 1; /* what caches hold does not merge */
        galloc_pool *pool = pool_new(&config);
        galloc_stats stats = stats_of(pool);
        EXPECT_EQ(stats.free_bytes + stats.largest_free, 0);
        EXPECT(stats.external_fragmentation == 0 && stats.internal_fragmentation == 1);
        OK(galloc_pool_reserve(pool, MIB(20)));
        void *p[7];
        for (int i = 0; i < 7; i++) p[i] = get(pool, i < 5 ? MIB(4) : 512, 0);
        OK(galloc_pool_trim(pool, 0, NULL));
        OK(galloc_free(p[5], 0));
        size_t rest = stats_of(pool).free_bytes;
        EXPECT(rest >= 512 && rest < MIB(4));
        OK(galloc_free(p[1], 0));
        OK(galloc_free(p[3], 0));
        stats = stats_of(pool);
        EXPECT_EQ(stats.free_bytes, rest + MIB(8));
        EXPECT_EQ(stats.largest_free, MIB(4));
        EXPECT(stats.external_fragmentation == 1 - (double)MIB(4) / (double)(rest + MIB(8)));
        EXPECT(stats.internal_fragmentation == 1);
        expect_healthy(pool, 1);
        OK(galloc_free(p[2], 0));
        stats = stats_of(pool);
        EXPECT_EQ(stats.largest_free, MIB(12));
        EXPECT(stats.external_fragmentation == 1 - (double)MIB(12) / (double)(rest + MIB(12)));
        p[1] = get(pool, 100, 0);
        stats = stats_of(pool);
        EXPECT(stats.internal_fragmentation == (double)(MIB(8) + 1024) / (double)(MIB(8) + 612));
        OK(galloc_free(p[0], 0));
        OK(galloc_free(p[1], 0));
        OK(galloc_free(p[4], 0));
        OK(galloc_free(p[6], 0));
        pool_end(pool);
        finish();
    }
}

/* A row of pages counts as a whole that a pool keeps for the next block, when nothing is live or in the room of a block
   that is freed. */
TEST(the_largest_free_block_may_be_parked_pages)
{
    begin();
    galloc_config config = galloc_config_default();
    config.stats_exact = 1;
    config.growth = MIB(2);
    galloc_pool *pool = pool_new(&config);
    void *p[8];
    for (int i = 0; i < 8; i++) p[i] = get(pool, MIB(2), 0);
    for (int i = 0; i < 8; i++) OK(galloc_free(p[i], 0));
    EXPECT_EQ(inside_parked(pool), MIB(16));
    galloc_stats stats = stats_of(pool);
    EXPECT_EQ(stats.free_bytes, MIB(16));
    EXPECT_EQ(stats.largest_free, MIB(16));
    EXPECT(stats.external_fragmentation == 0);
    p[0] = get(pool, MIB(6), 0);
    EXPECT_EQ(stats_of(pool).largest_free, MIB(10));
    OK(galloc_free(p[0], 0));
    expect_healthy(pool, 1);
    pool_end(pool);
    finish();
}

TEST(the_longest_row_of_parked_pages_counts)
{
    for (int last = 0; last < 3; last++) {
        begin();
        galloc_config config = galloc_config_default();
        config.stats_exact = 1;
        config.growth = MIB(2);
        galloc_pool *pool = pool_new(&config);
        void *p[3], *live = get(pool, MIB(2), 0);
        for (int i = 0; i < 3; i++) p[i] = get_growable(pool, MIB(4) + MIB(4) * (size_t)(i % 2), MIB(64), 0);
        for (int i = 1; i <= 3; i++) OK(galloc_free(p[(last + i) % 3], 0));
        EXPECT_EQ(inside_parked(pool), MIB(16));
        galloc_stats stats = stats_of(pool);
        EXPECT_EQ(stats.free_bytes, MIB(16));
        EXPECT_EQ(stats.largest_free, MIB(8));
        EXPECT(stats.external_fragmentation == 0.5);
        expect_healthy(pool, 1);
        OK(galloc_free(live, 0));
        pool_end(pool);
        finish();
    }
}

/* A stream's own free blocks count, and those of a whole bin are not gone through. */
TEST(the_largest_free_block_may_be_a_streams_own)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *wall = get_used(pool, KIB(1), t, 1), *p[100];
    for (int i = 0; i < 100; i++) p[i] = get_used(pool, MIB(2) + KIB(40) + 512 * (size_t)i, i % 2 ? t : s, 1);
    void *end = get_used(pool, KIB(1), t, 1);
    OK(galloc_pool_trim(pool, 0, NULL));
    size_t rest = stats_of(pool).largest_free;
    EXPECT(rest < MIB(2));
    for (int i = 0; i < 100; i += 2) OK(galloc_free(p[i], s));
    galloc_stats stats = stats_of(pool);
    EXPECT(stats.largest_free >= MIB(2) + KIB(40));
    EXPECT(stats.largest_free <= MIB(2) + KIB(40) + 512 * 98);
    EXPECT_EQ(stats.free_bytes, stats.cached.current);
    expect_healthy(pool, 1);
    for (int i = 1; i < 100; i += 2) OK(galloc_free(p[i], t));
    OK(galloc_free(wall, t));
    OK(galloc_free(end, t));
    pool_end(pool);
    finish();
}

/* ---- streams as a pool knows them -------------------------------------------------------------------------------- */

static galloc_stream_stats known(galloc_pool *pool, unsigned long long id)
{
    galloc_stream_stats all[8], none;
    int n = -1;
    memset(&none, 0, sizeof none);
    OK(galloc_pool_streams(pool, all, 8, &n));
    for (int i = 0; i < n; i++)
        if (all[i].stream_id == id) return all[i];
    EXPECT(!"the stream is known");
    return none;
}

static size_t stranded(galloc_pool *pool, cudaStream_t stream) { return known(pool, stream_id(stream)).stranded; }

/* Looks what is complete, and gives nothing back. */
static void notice(galloc_pool *pool) { OK(galloc_pool_trim(pool, SIZE_MAX, NULL)); }

TEST(streams_say_what_is_stranded_and_unmarked)
{
    FOR_BOTH_KINDS (kind) {
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = pool_of_kind(*kind);
        void *a = get_used(pool, MIB(4), s, 1), *b = get_used(pool, KIB(700), t, 1), *c = get_used(pool, 512, t, 1);
        EXPECT_EQ(stranded(pool, s) + stranded(pool, t), 0);
        OK(galloc_free(a, s));
        OK(galloc_free(b, t));
        EXPECT_EQ(stranded(pool, s), MIB(4));
        EXPECT_EQ(known(pool, stream_id(s)).unmarked, 0);
        EXPECT_EQ(stranded(pool, t), KIB(700));
        EXPECT_EQ(known(pool, stream_id(t)).unmarked, KIB(700));
        sim_run(-1);
        EXPECT_EQ(stranded(pool, s), MIB(4));
        notice(pool);
        EXPECT_EQ(stranded(pool, s), 0);
        EXPECT_EQ(stranded(pool, t), KIB(700));
        OK(galloc_stream_retire(t));
        EXPECT_EQ(known(pool, stream_id(t)).unmarked, 0);
        expect_healthy(pool, 1);
        OK(galloc_free(c, t));
        pool_end(pool);
        finish();
    }
}

TEST(free_bytes_beside_stranded_ones_are_not_stranded)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_new(NULL);
    OK(galloc_pool_reserve(pool, MIB(64)));
    void *b = get_used(pool, KIB(1), t, 1), *a = get_used(pool, MIB(3), s, 1);
    OK(galloc_free(a, s));
    galloc_stats stats = stats_of(pool);
    EXPECT(stats.largest_free > MIB(16));
    EXPECT_EQ(stranded(pool, s), MIB(3));
    OK(galloc_free(b, t));
    pool_end(pool);
    finish();
}

TEST(bytes_that_were_freed_twice_are_stranded_once)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *other = get_used(pool, KIB(1), t, 1), *a = get_used(pool, MIB(8), s, 1);
    OK(galloc_free(a, s));
    a = get_used(pool, MIB(4), s, 1);
    EXPECT_EQ(stranded(pool, s), MIB(4));
    OK(galloc_free(a, s));
    EXPECT_EQ(stranded(pool, s), MIB(8));
    OK(galloc_free(other, t));
    pool_end(pool);
    finish();
}

TEST(bytes_of_several_streams_are_stranded_for_each)
{
    begin_still();
    cudaStream_t s[] = {stream_new(), stream_new()}, t = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *other = get_used(pool, KIB(1), t, 1), *a = get_used(pool, MIB(5), s[0], 1);
    order(s[0], s[1]);
    put(s[1], a, MIB(5), 2);
    OK(galloc_free_after(a, s, 2));
    EXPECT_EQ(stranded(pool, s[0]), MIB(5));
    EXPECT_EQ(stranded(pool, s[1]), MIB(5));
    EXPECT_EQ(stranded(pool, t), 0);
    OK(galloc_free(other, t));
    pool_end(pool);
    finish();
}

TEST(legacy_streams_are_told_apart_by_their_contexts)
{
    begin_with_devices(2, SIM_PACE_RANDOM);
    galloc_pool *pool = pool_new(NULL);
    void *p = get(pool, 1, 0), *q;
    OK(cudaSetDevice(1));
    q = get(pool, 1, 0);
    galloc_stream_stats all[2];
    int n = 0;
    OK(galloc_pool_streams(pool, all, 2, &n));
    EXPECT_EQ(n, 2);
    EXPECT_EQ(all[0].stream_id + all[1].stream_id, 0);
    EXPECT(all[0].context_id != all[1].context_id);
    OK(galloc_free(p, 0));
    OK(galloc_free(q, 0));
    pool_end(pool);
    finish();
}

/* What is being captured, or was, is no stream of the list. */
TEST(captures_are_not_listed_as_streams)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_new(NULL);
    galloc_stream_stats all[4];
    cudaGraph_t graph = NULL;
    void *p = get(pool, KIB(4), t);
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    OK(galloc_free(get(pool, KIB(4), s), s));
    for (int ended = 0; ended < 2; ended++) {
        int n = 0;
        if (ended) OK(cudaStreamEndCapture(s, &graph));
        OK(galloc_pool_streams(pool, all, 4, &n));
        EXPECT_EQ(n, 1);
        EXPECT_EQ(all[0].stream_id, stream_id(t));
    }
    OK(cudaGraphDestroy(graph));
    OK(galloc_free(p, t));
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* By the bytes that the program asked for. */
TEST(a_refused_end_says_how_much_is_in_use)
{
    begin();
    galloc_pool *pool = pool_new(NULL);
    void *p = get(pool, 1000, 0), *q = get(pool, 3, 0);
    EXPECT_EQ(galloc_pool_destroy(pool), cudaErrorNotPermitted);
    EXPECT(strstr(galloc_last_message(), "in use: 2, of 1003 bytes") != NULL);
    OK(galloc_free(p, 0));
    OK(galloc_free(q, 0));
    pool_end(pool);
    finish();
}

TEST(streams_fit_the_array_they_are_given)
{
    begin();
    cudaStream_t s[3] = {stream_new(), stream_new(), stream_new()};
    galloc_pool *pool = pool_new(NULL);
    galloc_stream_stats all[4], untouched;
    int n = -1;
    OK(galloc_pool_streams(pool, NULL, 0, &n));
    EXPECT_EQ(n, 0);
    for (int i = 0; i < 3; i++) OK(galloc_free(get(pool, 1, s[i]), s[i]));
    memset(all, 0x5a, sizeof all);
    untouched = all[3];
    OK(galloc_pool_streams(pool, NULL, 0, &n));
    EXPECT_EQ(n, 3);
    OK(galloc_pool_streams(pool, all, 2, &n));
    EXPECT_EQ(n, 3);
    EXPECT(!memcmp(&all[2], &untouched, sizeof untouched));
    OK(galloc_pool_streams(pool, all, 4, NULL));
    EXPECT(!memcmp(&all[3], &untouched, sizeof untouched));
    EXPECT_EQ(all[0].stream_id + all[1].stream_id + all[2].stream_id,
              stream_id(s[0]) + stream_id(s[1]) + stream_id(s[2]));
    EXPECT_EQ(log_lines, 0);
    EXPECT_EQ(galloc_pool_streams(NULL, all, 4, &n), cudaErrorInvalidValue);
    EXPECT_EQ(galloc_pool_streams(pool, NULL, 1, &n), cudaErrorInvalidValue);
    EXPECT_EQ(galloc_pool_streams(pool, all, -1, &n), cudaErrorInvalidValue);
    EXPECT_EQ(log_lines, 3);
    pool_end(pool);
    finish();
}

/* ---- reserving and trimming -------------------------------------------------------------------------------------- */

TEST(reserve_makes_memory_ready)
{
    static const size_t piece[] = {MIB(64), MIB(16), MIB(1) + 512 * 3, KIB(512), 512};
    static void *p[MIB(64) / 512];
    FOR_BOTH_KINDS (kind) {
        for (int i = 0; i < 5; i++) {
            begin();
            cudaStream_t s[2] = {stream_new(), stream_new()};
            galloc_pool *pool = pool_of_kind(*kind);
            OK(galloc_pool_reserve(pool, MIB(64)));
            EXPECT(sim_physical(0) >= MIB(64));
            EXPECT_EQ(stats_of(pool).cached.current, sim_physical(0));
            EXPECT_EQ(stats_of(pool).blocks.current, 0);
            long calls = memory_calls();
            size_t n = MIB(64) / piece[i];
            for (size_t k = 0; k < n; k++) p[k] = get(pool, piece[i], s[k % 2]);
            EXPECT_EQ(memory_calls(), calls);
            expect_healthy(pool, 1);
            for (size_t k = 0; k < n; k++) OK(galloc_free(p[k], s[k % 2]));
            pool_end(pool);
            finish();
        }
    }
}

TEST(reserve_counts_what_is_there_already)
{
    FOR_BOTH_KINDS (kind) {
        begin();
        galloc_pool *pool = pool_of_kind(*kind);
        OK(galloc_pool_reserve(pool, MIB(32)));
        long calls = memory_calls();
        OK(galloc_pool_reserve(pool, MIB(32)));
        OK(galloc_pool_reserve(pool, 0));
        OK(galloc_pool_reserve(pool, MIB(7)));
        EXPECT_EQ(memory_calls(), calls);
        expect_healthy(pool, 1);
        pool_end(pool);
        finish();
    }
}

TEST(reserve_counts_what_is_never_cut)
{
    FOR_BOTH_KINDS (kind) {
        begin();
        galloc_config config = galloc_config_default();
        config.expandable_segments = *kind;
        config.max_split_size = MIB(24);
        galloc_pool *pool = pool_new(&config);
        OK(galloc_pool_reserve(pool, MIB(64)));
        OK(galloc_pool_reserve(pool, MIB(3)));
        long calls = memory_calls();
        OK(galloc_pool_reserve(pool, MIB(64)));
        OK(galloc_pool_reserve(pool, MIB(3)));
        EXPECT_EQ(memory_calls(), calls);
        EXPECT_EQ(stats_of(pool).blocks.current, 0);
        OK(galloc_free(get(pool, MIB(64), 0), 0));
        EXPECT_EQ(memory_calls(), calls);
        expect_healthy(pool, 1);
        pool_end(pool);
        finish();
    }
}

TEST(reserve_honours_the_limit)
{
    FOR_BOTH_KINDS (kind) {
        begin();
        galloc_config config = config_limit(MIB(32));
        config.expandable_segments = *kind;
        galloc_pool *pool = pool_new(&config);
        EXPECT_EQ(galloc_pool_reserve(pool, MIB(33)), cudaErrorMemoryAllocation);
        EXPECT_EQ(galloc_pool_reserve(pool, SIZE_MAX), cudaErrorMemoryAllocation);
        EXPECT(sim_physical(0) <= MIB(32));
        EXPECT_EQ(log_lines, 2);
        OK(galloc_pool_reserve(pool, MIB(32)));
        expect_healthy(pool, 1);
        pool_end(pool);
        finish();
    }
}

TEST(trim_gives_everything_back)
{
    FOR_BOTH_KINDS (kind) {
        begin();
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_of_kind(*kind);
        void *p[20];
        for (int i = 0; i < 20; i++) p[i] = get(pool, MIB(1) * (size_t)(i + 1), s);
        for (int i = 0; i < 20; i++) OK(galloc_free(p[(i * 7) % 20], s));
        EXPECT(sim_physical(0) >= MIB(210));
        OK(galloc_pool_trim(pool, SIZE_MAX, NULL));
        EXPECT(sim_physical(0) >= MIB(210));
        OK(galloc_pool_trim(pool, 0, NULL));
        EXPECT_EQ(sim_physical(0), 0);
        EXPECT_EQ(sim_mapped(0), 0);
        expect_healthy(pool, 1);
        void *q = get(pool, MIB(3), s);
        put(s, q, MIB(3), 1);
        OK(galloc_free(q, s));
        pool_end(pool);
        finish();
    }
}

/* Pages leave one by one, out of the middle of a segment that holds used blocks, down to the bytes asked for. */
TEST(trim_releases_pages_inside_a_segment)
{
    enum { N = 64 };
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    char *p[N];
    for (int i = 0; i < N; i++) {
        p[i] = get(pool, MIB(2), s);
        put(s, p[i], MIB(2), (uint64_t)i);
    }
    size_t full = sim_physical(0);
    EXPECT(full >= MIB(128));
    for (int i = 8; i < N; i++)
        if (i % 16 >= 4) OK(galloc_free(p[i], s)); /* used: 0..7, and 4 of each 16 */
    size_t used = stats_of(pool).allocated.current;
    for (size_t keep = full - MIB(2); keep >= used + MIB(32); keep -= MIB(10)) {
        OK(galloc_pool_trim(pool, keep, NULL));
        EXPECT(sim_physical(0) <= keep);
        EXPECT(sim_physical(0) + MIB(64) > keep); /* and not much more than was asked for */
        expect_healthy(pool, 1);
    }
    OK(galloc_pool_trim(pool, 0, NULL));
    EXPECT(sim_physical(0) >= used && sim_physical(0) < full - MIB(32));
    EXPECT_EQ(sim_physical(0), sim_mapped(0));
    for (int i = 0; i < N; i++) {
        if (i >= 8 && i % 16 >= 4) continue;
        look(s, p[i], MIB(2), (uint64_t)i);
        OK(galloc_free(p[i], s));
    }
    void *q = get(pool, full, s);
    put(s, q, full, 1);
    OK(galloc_free(q, s));
    expect_healthy(pool, 1);
    pool_end(pool);
    finish();
}

TEST(trim_lets_the_longest_unused_pages_go_first)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    char *p[4], *wall[4];
    for (int i = 0; i < 4; i++) {
        p[i] = get(pool, MIB(32), s);
        wall[i] = get(pool, MIB(2), s);
    }
    static const int when[4] = {2, 0, 3, 1}; /* in this order they are freed */
    for (int i = 0; i < 4; i++) OK(galloc_free(p[when[i]], s));
    size_t full = sim_physical(0);
    for (int i = 0; i < 3; i++) {
        OK(galloc_pool_trim(pool, full - MIB(32) * (size_t)(i + 1), NULL));
        EXPECT_EQ(info_of(p[when[i]] + MIB(16)).state, GALLOC_STATE_FOREIGN);
        for (int k = i + 1; k < 4; k++) EXPECT_EQ(info_of(p[when[k]] + MIB(16)).state, GALLOC_STATE_FREE);
    }
    for (int i = 0; i < 4; i++) OK(galloc_free(wall[i], s));
    pool_end(pool);
    finish();
}

/* Two streams freed these blocks in turn. What a stream freed after a block that is still there is there too. */
static void expect_first_freed_gone(void *const *p, int n)
{
    for (int i = 2; i < n; i++)
        if (info_of(p[i - 2]).state == GALLOC_STATE_FREE) EXPECT_EQ(info_of(p[i]).state, GALLOC_STATE_FREE);
}

/* The same of each of two streams. Their blocks become common memory once their work is known to be complete. */
TEST(trim_lets_the_longest_unused_pages_of_each_stream_go_first)
{
    enum { BLOCKS = 20, PAGE = 2 << 20 };
    begin();
    cudaStream_t s[2] = {stream_new(), stream_new()};
    galloc_config config = galloc_config_default();
    config.lane_bytes = 0;
    config.growth = PAGE;
    galloc_pool *pool = pool_new(&config);
    void *p[BLOCKS], *wall[BLOCKS], *small[4];
    for (int i = 0; i < BLOCKS; i++) {
        p[i] = get(pool, PAGE, s[i % 2]);
        wall[i] = get(pool, PAGE, s[i % 2]);
    }
    for (int i = 0; i < 2; i++) small[i] = get(pool, 512, s[i]);
    for (int i = 0; i < BLOCKS; i++) OK(galloc_free(p[i], s[i % 2]));
    for (int i = 2; i < 4; i++) small[i] = get(pool, 512, s[i % 2]); /* the events are recorded */
    sim_run(-1);
    OK(galloc_pool_trim(pool, SIZE_MAX, NULL));
    for (int i = 0; i < BLOCKS; i++) {
        size_t held = stats_of(pool).reserved.current;
        OK(galloc_pool_trim(pool, held - PAGE, NULL));
        EXPECT_EQ(stats_of(pool).reserved.current, held - PAGE);
        expect_first_freed_gone(p, BLOCKS);
    }
    for (int i = 0; i < BLOCKS; i++) EXPECT_EQ(info_of(p[i]).state, GALLOC_STATE_FOREIGN);
    for (int i = 0; i < BLOCKS; i++) OK(galloc_free(wall[i], s[i % 2]));
    for (int i = 0; i < 4; i++) OK(galloc_free(small[i], s[i % 2]));
    pool_end(pool);
    finish();
}

/* Free memory that merged is as old as the latest of its frees. */
TEST(trim_counts_the_latest_free_of_memory_that_merged)
{
    enum { BLOCKS = 8, PAGE = 2 << 20 };
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = galloc_config_default();
    config.lane_bytes = 0;
    config.growth = PAGE;
    galloc_pool *pool = pool_new(&config);
    static const int when[] = {0, 3, 5, 1}; /* in this order they are freed; 1 lies behind 0 */
    void *p[BLOCKS];
    for (int i = 0; i < BLOCKS; i++) p[i] = get(pool, PAGE, s);
    EXPECT((char *)p[1] == (char *)p[0] + PAGE);
    for (int i = 0; i < 4; i++) OK(galloc_free(p[when[i]], s));
    OK(galloc_pool_trim(pool, stats_of(pool).reserved.current - 2 * PAGE, NULL));
    for (int i = 0; i < 2; i++) EXPECT_EQ(info_of(p[i]).state, GALLOC_STATE_FREE);
    for (int i = 3; i < 6; i += 2) EXPECT_EQ(info_of(p[i]).state, GALLOC_STATE_FOREIGN);
    for (int i = 0; i < BLOCKS; i++)
        if (i != 0 && i != 1 && i != 3 && i != 5) OK(galloc_free(p[i], s));
    pool_end(pool);
    finish();
}

TEST(trim_waits_for_work_that_may_use_the_pages)
{
    FOR_BOTH_KINDS (kind) {
        begin_still();
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_of_kind(*kind);
        void *p = get(pool, MIB(8), s);
        put(s, p, MIB(8), 1);
        OK(galloc_free(p, s));
        OK(galloc_pool_trim(pool, 0, NULL));
        EXPECT_EQ(sim_physical(0), 0);
        EXPECT_EQ(sim_pending(), 0);
        EXPECT_EQ(sim_findings(SIM_UNMAP_IN_USE), 0);
        pool_end(pool);
        finish();
    }
}

/* ---- settings ---------------------------------------------------------------------------------------------------- */

TEST(default_settings)
{
    galloc_config config = galloc_config_default();
    EXPECT_EQ(config.device, -1);
    EXPECT_EQ(config.expandable_segments, 1);
    EXPECT_EQ(config.reuse, GALLOC_REUSE_COMPLETED | GALLOC_REUSE_FOLLOWED | GALLOC_REUSE_WAIT);
    EXPECT_EQ(config.memory_limit, SIZE_MAX);
    EXPECT(config.overhead == 0.02);
}

TEST(settings_can_be_read_back)
{
    begin_with_devices(2, SIM_PACE_RANDOM);
    galloc_config config = galloc_config_default(), back;
    config.expandable_segments = 0;
    config.reuse = 0;
    config.memory_limit = 12345678;
    config.overhead = 0.5;
    OK(cudaSetDevice(1));
    galloc_pool *pool = pool_new(&config);
    back = config_of(pool);
    EXPECT_EQ(back.device, 1);
    EXPECT_EQ(back.expandable_segments, 0);
    EXPECT_EQ(back.reuse, 0);
    EXPECT_EQ(back.memory_limit, 12345678);
    EXPECT(back.overhead == 0.5);
    pool_end(pool);
    config.device = 0;
    pool = pool_new(&config);
    EXPECT_EQ(config_of(pool).device, 0);
    EXPECT_EQ(galloc_pool_config(pool, NULL), cudaErrorInvalidValue);
    EXPECT_EQ(galloc_pool_config(NULL, &back), cudaErrorInvalidValue);
    pool_end(pool);
    finish();
}

TEST(settings_out_of_range_are_refused)
{
    begin();
    galloc_config config = galloc_config_default();
    galloc_pool *pool = (galloc_pool *)&config;
    config.device = 1;
    EXPECT_EQ(galloc_pool_create(&pool, &config), cudaErrorInvalidDevice);
    EXPECT(pool == NULL);
    EXPECT(strstr(log_text, "device 1 does not exist: must be -1 or below 1, the number of devices") != NULL);
    config.device = -2;
    EXPECT_EQ(galloc_pool_create(&pool, &config), cudaErrorInvalidDevice);
    EXPECT(strstr(log_text, "device -2 does not exist: must be -1 or below 1, the number of devices") != NULL);
    config = galloc_config_default();
    config.reuse = 8;
    EXPECT_EQ(galloc_pool_create(&pool, &config), cudaErrorInvalidValue);
    config = galloc_config_default();
    config.expandable_segments = 2;
    EXPECT_EQ(galloc_pool_create(&pool, &config), cudaErrorInvalidValue);
    EXPECT_EQ(galloc_pool_create(NULL, NULL), cudaErrorInvalidValue);
    EXPECT_EQ(log_lines, 5);
    static const double bad[] = {-0.01, 100.01, HUGE_VAL, -HUGE_VAL, NAN};
    for (int i = 0; i < 5; i++) {
        config = galloc_config_default();
        config.overhead = bad[i];
        EXPECT_EQ(galloc_pool_create(&pool, &config), cudaErrorInvalidValue);
    }
    EXPECT_EQ(galloc_pool_default(&pool, 1), cudaErrorInvalidDevice);
    EXPECT(strstr(galloc_last_message(), "galloc_pool_default: device 1 does not exist") != NULL);
    EXPECT_EQ(galloc_pool_default(&pool, -2), cudaErrorInvalidDevice);
    EXPECT(strstr(galloc_last_message(), "galloc_pool_default: device -2 does not exist") != NULL);
    EXPECT(strstr(galloc_last_message(), "must be") == NULL); /* it was not even looked up */
    EXPECT_EQ(galloc_pool_default(NULL, 0), cudaErrorInvalidValue);
    finish();
}

TEST(a_limit_of_nothing_gives_nothing)
{
    begin();
    galloc_config config = config_limit(0);
    galloc_pool *pool = pool_new(&config);
    void *p = &config;
    EXPECT_EQ(galloc_pool_malloc(pool, &p, 1, 0), cudaErrorMemoryAllocation);
    EXPECT(p == NULL);
    EXPECT_EQ(stats_of(pool).failures, 1);
    EXPECT_EQ(sim_physical_peak(0), 0);
    pool_end(pool);
    finish();
}

typedef struct parse_case {
    const char *text;
    int expandable, reuse;
    size_t limit;
    double overhead; /* 0: the default */
} parse_case;

TEST(config_parse_reads_the_language)
{
    enum { ALL = GALLOC_REUSE_COMPLETED | GALLOC_REUSE_FOLLOWED | GALLOC_REUSE_WAIT };
    static const parse_case cases[] = {
        {"", 1, ALL, SIZE_MAX, 0},
        {"expandable_segments:False", 0, ALL, SIZE_MAX, 0},
        {"expandable_segments:True", 1, ALL, SIZE_MAX, 0},
        {"memory_limit:0", 1, ALL, 0, 0},
        {"memory_limit:1", 1, ALL, 1, 0},
        {"memory_limit:512K", 1, ALL, KIB(512), 0},
        {"memory_limit:20M", 1, ALL, MIB(20), 0},
        {"memory_limit:3G", 1, ALL, GIB(3), 0},
        {"memory_limit:18446744073709551615", 1, ALL, SIZE_MAX, 0},
        {"reuse:none", 1, 0, SIZE_MAX, 0},
        {"reuse:completed", 1, GALLOC_REUSE_COMPLETED, SIZE_MAX, 0},
        {"reuse:wait+completed", 1, GALLOC_REUSE_COMPLETED | GALLOC_REUSE_WAIT, SIZE_MAX, 0},
        {"reuse:completed+followed+wait", 1, ALL, SIZE_MAX, 0},
        {"overhead:0.5", 1, ALL, SIZE_MAX, 0.5},
        {"overhead:100", 1, ALL, SIZE_MAX, 100},
        {"overhead:0.125,memory_limit:1G", 1, ALL, GIB(1), 0.125},
        {"memory_limit:7M,reuse:followed,expandable_segments:False", 0, GALLOC_REUSE_FOLLOWED, MIB(7), 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        galloc_config config = galloc_config_default();
        char message[200] = "x";
        OK(galloc_config_parse(&config, cases[i].text, message, sizeof message));
        OK(galloc_config_parse(&config, cases[i].text, NULL, 0));
        EXPECT_EQ(config.device, -1);
        EXPECT_EQ(config.expandable_segments, cases[i].expandable);
        EXPECT_EQ(config.reuse, cases[i].reuse);
        EXPECT_EQ(config.memory_limit, cases[i].limit);
        EXPECT(config.overhead == (cases[i].overhead > 0 ? cases[i].overhead : 0.02));
    }
}

static const char *const bad_texts[] = {
    "expandable_segments",
    "expandable_segments:",
    "expandable_segments:true",
    "expandable_segments:1",
    "expandable_segments:Truely",
    "expandable_segments:Tru",
    "Expandable_segments:True",
    "expandable_segments=True",
    "expandable:True",
    ":True",
    ":",
    ",",
    "memory_limit:1M,",
    ",memory_limit:1M",
    "memory_limit:1M,,reuse:none",
    "memory_limit",
    "memory_limit:",
    "memory_limit:M",
    "memory_limit:-1",
    "memory_limit:+1",
    "memory_limit: 1",
    "memory_limit:1 M",
    "memory_limit:1MB",
    "memory_limit:1m",
    "memory_limit:1.5G",
    "memory_limit:0x10",
    "memory_limit:1T",
    "memory_limit:18446744073709551616",
    "memory_limit:99999999999999999999999",
    "memory_limit:17179869184G",
    "memory_limit:18014398509481985K",
    "reuse",
    "reuse:",
    "reuse:None",
    "reuse:all",
    "reuse:none+wait",
    "reuse:wait+none",
    "reuse:wait+",
    "reuse:+wait",
    "reuse:wait++completed",
    "reuse:waits",
    "reuse:wait|completed",
    "overhead",
    "overhead:",
    "overhead:-1",
    "overhead:-0.5",
    "overhead:+1",
    "overhead:101",
    "overhead:100.5",
    "overhead:nan",
    "overhead:inf",
    "overhead:1e400",
    "overhead:0x1",
    "overhead:0,02",
    "overhead:0.02x",
    "overhead: 0.02",
    "overhead:2%",
    "overhead:.",
    "garbage_collection:True",
    "memory_limit:1M;reuse:none",
    " memory_limit:1M",
    "memory_limit:1M ",
    "memory_limit:1M, reuse:none",
    "memory_limit:1M\n",
    "memory_limit:1M,reuse:oops",
    "expandable_segments:False,memory_limit:x",
    "reuse:none,unknown:1",
};

TEST(config_parse_is_strict_and_changes_nothing_on_error)
{
    for (size_t i = 0; i < sizeof bad_texts / sizeof *bad_texts; i++) {
        galloc_config config = galloc_config_default(), before = config;
        char message[256] = "";
        cudaError_t err = galloc_config_parse(&config, bad_texts[i], message, sizeof message);
        if (err != cudaErrorInvalidValue || !message[0]) printf("    accepted: \"%s\"\n", bad_texts[i]);
        EXPECT_EQ(err, cudaErrorInvalidValue);
        EXPECT(message[0] != 0);
        EXPECT(config.device == before.device && config.expandable_segments == before.expandable_segments &&
               config.reuse == before.reuse && config.memory_limit == before.memory_limit &&
               config.overhead == before.overhead);
    }
}

TEST(config_parse_message_fits_its_buffer)
{
    char whole[256] = "";
    galloc_config config = galloc_config_default();
    EXPECT_EQ(galloc_config_parse(&config, "reuse:sometimes", whole, sizeof whole), cudaErrorInvalidValue);
    for (size_t size = 0; size <= strlen(whole) + 2; size++) {
        char message[300];
        memset(message, '#', sizeof message);
        EXPECT_EQ(galloc_config_parse(&config, "reuse:sometimes", message, size), cudaErrorInvalidValue);
        EXPECT_EQ(message[size], '#');
        if (size > 0) {
            EXPECT(memchr(message, 0, size) != NULL);
            EXPECT(strncmp(message, whole, size - 1) == 0);
        }
    }
    EXPECT_EQ(galloc_config_parse(&config, "reuse:sometimes", NULL, 0), cudaErrorInvalidValue);
    EXPECT_EQ(galloc_config_parse(NULL, "reuse:none", NULL, 0), cudaErrorInvalidValue);
    EXPECT_EQ(galloc_config_parse(&config, NULL, NULL, 0), cudaErrorInvalidValue);
}

TEST(default_pools_obey_the_environment)
{
    begin();
    galloc_pool *pool = NULL;
    void *p = NULL;
    setenv("GALLOC_CONF", "memory_limit:64M,reuse:none,expandable_segments:False", 1);
    OK(galloc_malloc(&p, 1000, 0));
    OK(galloc_pool_default(&pool, 0));
    galloc_config config = config_of(pool);
    EXPECT_EQ(config.memory_limit, MIB(64));
    EXPECT_EQ(config.reuse, 0);
    EXPECT_EQ(config.expandable_segments, 0);
    OK(galloc_free(p, 0));
    pool = pool_new(NULL); /* a pool of one's own does not look at the environment */
    EXPECT_EQ(config_of(pool).memory_limit, SIZE_MAX);
    pool_end(pool);
    finish();
    unsetenv("GALLOC_CONF");
}

TEST(bad_environment_is_an_error_until_it_is_mended)
{
    begin();
    galloc_pool *pool = (galloc_pool *)&log_lines;
    void *p = &pool;
    setenv("GALLOC_CONF", "memory_limit:lots", 1);
    EXPECT_EQ(galloc_malloc(&p, 1000, 0), cudaErrorInvalidValue);
    EXPECT(p == NULL);
    EXPECT_EQ(log_lines, 1);
    EXPECT(strstr(galloc_last_message(), "memory_limit") != NULL);
    EXPECT_EQ(galloc_pool_default(&pool, 0), cudaErrorInvalidValue);
    EXPECT(pool == NULL);
    setenv("GALLOC_CONF", "", 1);
    OK(galloc_malloc(&p, 1000, 0));
    OK(galloc_free(p, 0));
    finish();
    unsetenv("GALLOC_CONF");
}

/* ---- ends -------------------------------------------------------------------------------------------------------- */

TEST(messages_belong_to_threads_and_last)
{
    begin();
    EXPECT_EQ(galloc_malloc(NULL, 1, 0), cudaErrorInvalidValue);
    char first[inside_message_size()];
    snprintf(first, sizeof first, "%s", galloc_last_message());
    EXPECT(first[0] != 0);
    EXPECT(strstr(log_text, first) != NULL);
    void *p = NULL;
    OK(galloc_malloc(&p, 1, 0));
    OK(galloc_free(p, 0));
    EXPECT(strcmp(galloc_last_message(), first) == 0); /* a success leaves it */
    EXPECT_EQ(galloc_free(&p, 0), cudaErrorInvalidDevicePointer);
    EXPECT(strcmp(galloc_last_message(), first) != 0);
    finish();
}

static void *message_of_new_thread(void *out)
{
    *(int *)out = galloc_last_message()[0] == 0;
    return NULL;
}

TEST(a_thread_without_errors_has_no_message)
{
    begin();
    pthread_t thread;
    int empty = 0;
    EXPECT_EQ(galloc_malloc(NULL, 1, 0), cudaErrorInvalidValue);
    EXPECT_EQ(pthread_create(&thread, NULL, message_of_new_thread, &empty), 0);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
    EXPECT(empty);
    finish();
}

TEST(destroying_a_pool_with_used_blocks_is_refused)
{
    FOR_BOTH_KINDS (kind) {
        begin();
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_of_kind(*kind);
        void *p = get(pool, MIB(3), s), *q = get(pool, MIB(3), s);
        put(s, p, MIB(3), 9);
        OK(galloc_free(q, s));
        EXPECT_EQ(galloc_pool_destroy(pool), cudaErrorNotPermitted);
        EXPECT_EQ(log_lines, 1);
        look(s, p, MIB(3), 9);
        q = get(pool, MIB(3), s);
        OK(galloc_free(q, s));
        OK(galloc_free(p, s));
        expect_healthy(pool, 1);
        EXPECT_EQ(galloc_pool_destroy(NULL), cudaErrorInvalidValue);
        pool_end(pool);
        EXPECT_EQ(sim_physical(0) + sim_addresses(), 0);
        finish();
    }
}

TEST(shutdown_refuses_while_something_is_used)
{
    begin();
    galloc_pool *pool = pool_new(NULL);
    void *p = NULL;
    EXPECT_EQ(galloc_shutdown(), cudaErrorNotPermitted); /* a pool of one's own */
    pool_end(pool);
    OK(galloc_malloc(&p, MIB(4), 0));
    void *q = NULL;
    OK(galloc_malloc(&q, MIB(64), 0));
    OK(galloc_free(q, 0));
    EXPECT_EQ(galloc_shutdown(), cudaErrorNotPermitted); /* a used block; what is unused is given back */
    EXPECT(sim_physical(0) < MIB(64));
    put(0, p, MIB(4), 1);
    OK(galloc_free(p, 0));
    OK(galloc_shutdown());
    EXPECT_EQ(sim_physical(0) + sim_addresses() + sim_malloc_live(), 0);
    OK(galloc_shutdown());
    OK(galloc_malloc(&p, MIB(4), 0)); /* and from the beginning */
    OK(galloc_free(p, 0));
    finish();
}

static size_t told_of; /* bytes that on_unmap was called with */

static void count_unmapped(galloc_pool *pool, void *addr, size_t bytes, void *user)
{
    (void)pool, (void)addr, (void)user;
    told_of += bytes;
}

/* A used block, or memory that a graph owns, stays, and with it its pool. */
static void refused_shutdown(int graphs)
{
    galloc_callbacks calls = {.on_unmap = count_unmapped};
    galloc_pool *pool = NULL;
    cudaGraph_t graph = NULL;
    void *p = NULL, *q = NULL;
    begin();
    cudaStream_t s = stream_new();
    told_of = 0;
    OK(galloc_pool_default(&pool, 0));
    OK(galloc_pool_set_callbacks(pool, &calls));
    if (graphs) OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    OK(galloc_malloc(&p, MIB(4), s));
    if (graphs) OK(galloc_free(p, s));
    if (graphs) OK(cudaStreamEndCapture(s, &graph));
    OK(galloc_malloc(&q, MIB(64), s));
    OK(galloc_free(q, s));
    size_t before = sim_physical(0);
    EXPECT(before >= MIB(64));
    EXPECT_EQ(galloc_shutdown(), cudaErrorNotPermitted);
    EXPECT(sim_physical(0) > 0 && sim_physical(0) < MIB(64));
    EXPECT_EQ(told_of, before - sim_physical(0));
    if (graphs) OK(cudaGraphDestroy(graph));
    else OK(galloc_free(p, s));
    OK(galloc_shutdown());
    EXPECT_EQ(told_of, before);
    stream_end(s);
    finish();
}

TEST(a_shutdown_that_a_used_block_prevents_gives_back_the_rest_and_tells_of_it) { refused_shutdown(0); }
TEST(a_shutdown_that_a_graph_prevents_gives_back_the_rest_and_tells_of_it) { refused_shutdown(1); }

TEST(callbacks_that_host_memory_is_missing_for_leave_those_of_before)
{
    galloc_callbacks before = {.on_unmap = count_unmapped}, calls = {.on_map = count_unmapped};
    begin();
    told_of = 0;
    galloc_pool *pool = pool_new(NULL);
    OK(galloc_pool_set_callbacks(pool, &before));
    OK(galloc_free(get(pool, MIB(4), 0), 0));
    sim_fail_malloc(1, 0);
    EXPECT_EQ(galloc_pool_set_callbacks(pool, &calls), cudaErrorMemoryAllocation);
    sim_fail_malloc(0, 0);
    OK(galloc_free(get(pool, MIB(128), 0), 0)); /* on_map is not called */
    EXPECT_EQ(told_of, 0);
    size_t held = sim_physical(0);
    OK(galloc_pool_trim(pool, 0, NULL));
    EXPECT_EQ(told_of, held);
    pool_end(pool);
    finish();
}

TEST(pools_do_not_share_memory)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = config_limit(MIB(8));
    galloc_pool *a = pool_new(&config), *b = pool_new(&config);
    void *p = get(a, MIB(8), s), *q = get(b, MIB(8), s), *r = NULL;
    EXPECT_EQ(sim_physical(0), MIB(16));
    EXPECT_EQ(galloc_pool_malloc(a, &r, 512, s), cudaErrorMemoryAllocation);
    OK(galloc_free(q, s));
    EXPECT_EQ(galloc_pool_malloc(a, &r, 512, s), cudaErrorMemoryAllocation);
    OK(galloc_free(p, s));
    pool_end(a);
    expect_healthy(b, 1);
    pool_end(b);
    finish();
}

/* Steps that each use again what the one before has freed. The caches are open again at once. */
TEST(the_peaks_after_a_reset_are_those_since)
{
    static const size_t sizes[] = {512, KIB(64), MIB(1), MIB(20), GIB(1)};
    for (int check = 0; check < 2; check++) {
        begin();
        cudaStream_t s = stream_new();
        galloc_config config = galloc_config_default();
        config.stream_check = check;
        galloc_pool *pool = pool_new(&config);
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            for (int step = 0; step < 4; step++) {
                OK(galloc_pool_stats_reset(pool));
                for (int pair = 0; pair < 3; pair++) OK(galloc_free(get(pool, sizes[i], s), s));
                EXPECT_EQ(stats_of(pool).live.peak, sizes[i]);
                EXPECT_EQ(stats_of(pool).allocated.peak, sizes[i]);
                EXPECT_EQ(stats_of(pool).blocks.peak, 1);
                EXPECT(inside_stream_of(pool, stream_id(s)).open);
            }
        }
        stream_end(s);
        pool_end(pool);
        finish();
    }
}

/* What lies in the cache of another stream is not in use. A hit there confirms the frees before it. */
TEST(peaks_leave_out_what_another_stream_has_freed)
{
    static const size_t sizes[] = {1000, KIB(64), MIB(3), MIB(20)};
    for (size_t k = 0; k < 8; k++) {
        begin();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = pool_new(NULL);
        size_t bytes = sizes[k / 2], blocks = 0, live = 0;
        void *p[6], *q[2] = {get(pool, bytes, t), get(pool, bytes, t)};
        OK(galloc_free(get(pool, 512, s), s));
        OK(galloc_free(q[0], t));
        OK(galloc_free(q[1], t));
        if (k & 1) {
            q[0] = get(pool, bytes, t);
            blocks = 1;
            live = bytes;
        }
        for (size_t i = 0; i < 6; i++) {
            p[i] = get(pool, bytes + 5120 * (i + 1), s);
            live += bytes + 5120 * (i + 1);
        }
        galloc_stats stats = stats_of(pool);
        EXPECT_EQ(stats.blocks.peak, blocks + 6);
        EXPECT_EQ(stats.live.peak, live);
        EXPECT_EQ(stats.allocated.peak, stats.allocated.current);
        for (size_t i = 0; i < 6; i++) OK(galloc_free(p[i], s));
        if (blocks) OK(galloc_free(q[0], t));
        pool_end(pool);
        finish();
    }
}

/* More blocks, but fewer bytes than before. */
/* A reset leaves no counter of what happened, and all that there is. */
TEST(a_reset_ends_each_count)
{
    begin();
    galloc_pool *pool = pool_new(NULL);
    void *p = get(pool, MIB(3), 0);
    inside_count_all(pool, 1000);
    galloc_stats full = stats_of(pool);
    EXPECT_EQ(full.mallocs, 1001);
    EXPECT(full.damages == 1000 && full.waits == 1000 && full.collected_bytes == 1000);
    OK(galloc_pool_stats_reset(pool));
    galloc_stats s = stats_of(pool);
    EXPECT_EQ(s.mallocs + s.frees + s.failures + s.rejections + s.hits + s.grows, 0);
    EXPECT_EQ(s.splits + s.merges + s.marks + s.waits + s.moves + s.moved_bytes, 0);
    EXPECT_EQ(s.collections + s.collected_bytes + s.checks + s.unchecked + s.damages, 0);
    EXPECT_EQ(s.live.current, MIB(3));
    EXPECT_EQ(s.blocks.current, 1);
    EXPECT_EQ(s.reserved.current, full.reserved.current);
    EXPECT_EQ(s.addresses, full.addresses);
    OK(galloc_free(p, 0));
    s = stats_of(pool);
    EXPECT_EQ(s.frees, 1);
    EXPECT_EQ(s.mallocs, 0);
    pool_end(pool);
    finish();
}

TEST(the_peak_of_blocks_is_their_own)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = galloc_config_default();
    config.stats_exact = 1;
    galloc_pool *pool = pool_new(&config);
    void *p[100];
    OK(galloc_free(get(pool, MIB(1), s), s));
    for (int i = 0; i < 100; i++) p[i] = get(pool, 512, s);
    for (int i = 0; i < 100; i++) OK(galloc_free(p[i], s));
    EXPECT_EQ(stats_of(pool).blocks.peak, 100);
    stream_end(s);
    pool_end(pool);
    finish();
}

TEST(a_trim_that_fails_says_what_it_returned)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_new(NULL);
    size_t released = 0;
    void *p = get_used(pool, MIB(20), s, 1), *q = get_used(pool, MIB(20), t, 2);
    OK(galloc_free(p, s));
    sim_hold(t, 1);
    OK(galloc_free(q, t));
    OK(cudaStreamSynchronize(s));
    size_t before = sim_physical(0);
    sim_fail("cuMemHostAlloc", 1, 0, 0); /* a wait for the device needs some */
    EXPECT(galloc_pool_trim(pool, 0, &released) != cudaSuccess);
    sim_fail_clear();
    sim_hold(t, 0);
    EXPECT(before > sim_physical(0));
    EXPECT_EQ(released, before - sim_physical(0));
    stream_end(s);
    stream_end(t);
    pool_end(pool);
    finish();
}

TEST(a_text_without_room_is_not_written)
{
    galloc_config config = galloc_config_default();
    char text[2] = "x";
    EXPECT_EQ(galloc_config_print(&config, text, 0), cudaErrorInvalidValue);
    EXPECT_EQ(text[0], 'x');
}

/* A stream whose block another stream has freed holds nothing when it is retired. */
TEST(an_idle_stream_that_is_retired_is_forgotten)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_new(NULL);
    int n = -1;
    OK(galloc_free(get(pool, 512, s), t));
    OK(galloc_stream_retire(s));
    stream_end(s);
    OK(galloc_pool_trim(pool, 0, NULL));
    OK(galloc_pool_streams(pool, NULL, 0, &n));
    EXPECT(n <= 1);
    OK(galloc_stream_retire(t));
    stream_end(t);
    pool_end(pool);
    finish();
}

/* The totals and peaks that a program reads have what the stream caches have done. */
TEST(totals_have_what_caches_serve)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    galloc_stats stats = stats_of(pool);
    size_t peak = 0;
    for (int i = 0; i < 100; i++) {
        OK(galloc_free(get(pool, 5120, s), s));
        galloc_stats before = stats;
        stats = stats_of(pool);
        EXPECT_EQ(stats.blocks.total, (uint64_t)i + 1);
        EXPECT_EQ(stats.live.total, 5120 * ((uint64_t)i + 1));
        EXPECT_EQ(stats.allocated.total, 5120 * ((uint64_t)i + 1));
        if (i) EXPECT_EQ(stats.cached.total - before.cached.total, 5120); /* what a free gives back */
        EXPECT(stats.cached.peak >= peak);
        EXPECT(stats.cached.peak >= stats.cached.current);
        peak = stats.cached.peak;
    }
    void *p = get(pool, MIB(1), s);
    EXPECT(stats_of(pool).cached.peak >= peak);
    OK(galloc_free(p, s));
    stream_end(s);
    pool_end(pool);
    finish();
}

static size_t marks_bytes;
static void count_marks(size_t bytes) { marks_bytes += bytes; }

/* A free that is refused costs no host memory that stays. */
TEST(refused_frees_after_several_streams_cost_nothing)
{
    begin();
    cudaStream_t both[2] = {stream_new(), stream_new()};
    galloc_pool *pool = pool_new(NULL);
    void *p = get(pool, MIB(1), both[0]), *kept = get(pool, MIB(1), both[1]);
    OK(galloc_free_after(p, both, 2));
    inside_on_malloc = count_marks;
    marks_bytes = 0;
    for (int i = 0; i < 20000; i++) EXPECT(galloc_free_after(p, both, 2) != cudaSuccess);
    inside_on_malloc = NULL;
    EXPECT(marks_bytes < KIB(64));
    OK(galloc_free(kept, both[1]));
    for (int i = 0; i < 2; i++) stream_end(both[i]);
    pool_end(pool);
    finish();
}

/* A group is not given a pool that is not its own, which may end afterwards. */
TEST(a_group_of_another_pool_holds_neither)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL), *other = pool_new(NULL);
    galloc_graph *graph = NULL;
    OK(galloc_graph_begin(&graph, pool, s));
    OK(galloc_graph_end(graph));
    EXPECT_EQ(galloc_graph_begin(&graph, other, s), cudaErrorInvalidValue);
    alarm(20); /* the end of a pool waits for calls that are in it */
    pool_end(other);
    alarm(0);
    OK(galloc_graph_release(graph, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

TEST_MAIN()
