/* test_limits.c - what a pool, and all pools of a device together, may hold: the limits are never passed, not for a
   moment and not by pools that grow at once; what is idle is given back by the settings' rules. The simulated device
   counts the bytes that are really taken. */

#include "setup.h"

/* Time is what the test says. */
static uint64_t now_ns;
static void (*in_the_clock)(void); /* what happens once while the time is asked for */

uint64_t inside_clock(void)
{
    void (*happens)(void) = __atomic_exchange_n(&in_the_clock, NULL, __ATOMIC_RELAXED);
    if (happens) happens();
    return __atomic_load_n(&now_ns, __ATOMIC_RELAXED);
}

enum { PAGE = 2 << 20 };

static const int both_kinds[] = {1, 0}; /* expandable_segments */
#define FOR_BOTH_KINDS(kind) for (const int *kind = both_kinds; kind != both_kinds + 2; kind++)

static galloc_config config_of_kind(int expandable)
{
    galloc_config config = galloc_config_default();
    config.expandable_segments = expandable;
    return config;
}

static void expect_no_memory(galloc_pool *pool, size_t bytes, cudaStream_t stream)
{
    void *ptr = pool;
    EXPECT_EQ(galloc_pool_malloc(pool, &ptr, bytes, stream), cudaErrorMemoryAllocation);
    EXPECT(ptr == NULL);
}

/* ---- the pool's own limits --------------------------------------------------------------------------------------- */

static void begin_small(size_t memory)
{
    sim_options options = sim_defaults();
    options.memory = memory;
    begin_with(options);
}

/* A request that the limit stops gives back what it lacks, and leaves the rest for others. */
TEST(no_more_is_given_back_than_a_limit_lacks)
{
    enum { SEGMENTS = 15 };
    sim_options options = sim_defaults();
    options.pace = SIM_PACE_PROMPT;
    begin_with(options);
    cudaStream_t s = stream_new();
    galloc_config config = config_of_kind(0);
    config.memory_limit = MIB(60);
    galloc_pool *pool = pool_new(&config);
    void *p[2 * SEGMENTS];
    for (int i = 0; i < 2 * SEGMENTS; i++) p[i] = get(pool, MIB(1), s);
    for (int i = 0; i < 2 * SEGMENTS; i++) OK(galloc_free(p[i], s));
    EXPECT_EQ(stats_of(pool).reserved.current, MIB(2) * SEGMENTS);
    void *q = get(pool, MIB(50), s); /* 20 MiB are missing */
    EXPECT(stats_of(pool).reserved.current >= MIB(56));
    OK(galloc_free(q, s));
    pool_end(pool);
    finish();
}

TEST(a_fraction_of_the_device_is_a_limit)
{
    FOR_BOTH_KINDS (kind) {
        begin_small(GIB(1));
        cudaStream_t s = stream_new();
        galloc_config config = config_of_kind(*kind);
        config.per_process_memory_fraction = 0.5;
        galloc_pool *pool = pool_new(&config);
        expect_no_memory(pool, GIB(1) / 2 + 1, s);
        EXPECT(strstr(galloc_last_message(), "per_process_memory_fraction") != NULL);
        void *p = get(pool, (size_t)(0.499 * (double)GIB(1)), s);
        expect_no_memory(pool, MIB(4), s);
        OK(galloc_free(p, s));
        p = get(pool, GIB(1) / 2, s);
        EXPECT_EQ(sim_physical_peak(0), GIB(1) / 2);
        OK(galloc_free(p, s));
        pool_end(pool);
        finish();
    }
}

TEST(a_limit_is_not_passed_by_rounding)
{
    static const size_t limits[] = {MIB(9) + 1, MIB(33) - 1, MIB(100) + 12345};
    FOR_BOTH_KINDS (kind) {
        for (int i = 0; i < 3; i++) {
            for (int how = 0; how < 3; how++) {
                begin_small(GIB(1));
                cudaStream_t s = stream_new();
                galloc_config config = config_of_kind(*kind);
                config.growth = MIB(64);
                if (how == 0) config.memory_limit = limits[i];
                if (how == 1) config.device_limit = limits[i];
                if (how == 2) config.per_process_memory_fraction = (double)limits[i] / (double)GIB(1);
                galloc_pool *pool = pool_new(&config);
                void *p[128];
                int n = 0;
                while (n < 128 && !galloc_pool_malloc(pool, &p[n], MIB(3) / 2, s)) n++;
                EXPECT(n >= (int)(limits[i] / MIB(2)) / 2);
                EXPECT(sim_physical_peak(0) <= limits[i]);
                EXPECT(sim_physical_peak(0) > limits[i] - MIB(4));
                expect_healthy(pool, 1);
                while (n-- > 0) OK(galloc_free(p[n], s));
                pool_end(pool);
                finish();
            }
        }
    }
}

TEST(the_lowest_limit_counts)
{
    begin_small(GIB(1));
    cudaStream_t s = stream_new();
    galloc_config config = config_limit(MIB(64));
    config.per_process_memory_fraction = 0.5;
    config.device_limit = MIB(32);
    galloc_pool *pool = pool_new(&config);
    expect_no_memory(pool, MIB(34), s);
    EXPECT(strstr(galloc_last_message(), "device_limit is 33554432") != NULL);
    expect_no_memory(pool, MIB(66), s); /* more than memory_limit too, which is not the lowest */
    EXPECT(strstr(galloc_last_message(), "device_limit is 33554432") != NULL);
    OK(galloc_free(get(pool, MIB(32), s), s));
    pool_end(pool);
    config.memory_limit = MIB(24);
    pool = pool_new(&config);
    galloc_pool *other = pool_new(&config);
    void *p = get(other, MIB(20), s);
    expect_no_memory(pool, MIB(20), s);
    EXPECT(strstr(galloc_last_message(), "device_limit is 33554432") != NULL);
    expect_no_memory(pool, MIB(26), s); /* that it could not have without the other either */
    EXPECT(strstr(galloc_last_message(), "memory_limit is 25165824") != NULL);
    OK(galloc_free(p, s));
    pool_end(other);
    pool_end(pool);
    finish();
}

/* In a fixed segment the request takes as much more as it is aligned to. */
TEST(the_limit_that_is_named_is_that_of_the_whole_segment)
{
    begin_small(GIB(1));
    cudaStream_t s = stream_new();
    galloc_config config = config_fixed();
    config.memory_limit = MIB(24);
    config.device_limit = MIB(32);
    galloc_pool *pool = pool_new(&config), *other = pool_new(&config);
    galloc_request request = {.bytes = MIB(20), .stream = s, .pool = pool};
    void *p = get(other, MIB(20), s), *q;
    EXPECT_EQ(galloc_alloc(&q, &request), cudaErrorMemoryAllocation);
    EXPECT(strstr(galloc_last_message(), "device_limit is 33554432") != NULL);
    request.alignment = MIB(8);
    EXPECT_EQ(galloc_alloc(&q, &request), cudaErrorMemoryAllocation);
    EXPECT(strstr(galloc_last_message(), "memory_limit is 25165824") != NULL);
    OK(galloc_free(p, s));
    pool_end(other);
    pool_end(pool);
    stream_end(s);
    finish();
}

TEST(a_limit_can_be_changed)
{
    FOR_BOTH_KINDS (kind) {
        begin_small(GIB(1));
        cudaStream_t s = stream_new();
        galloc_config config = config_of_kind(*kind);
        config.per_process_memory_fraction = 0.125;
        galloc_pool *pool = pool_new(&config);
        void *p = get(pool, MIB(100), s);
        expect_no_memory(pool, MIB(40), s);
        OK(galloc_pool_set_limit(pool, MIB(200)));
        OK(galloc_pool_config(pool, &config));
        EXPECT_EQ(config.memory_limit, MIB(200));
        EXPECT_EQ(config.per_process_memory_fraction, 1);
        void *q = get(pool, MIB(100), s);
        expect_no_memory(pool, MIB(4), s);
        EXPECT(strstr(galloc_last_message(), "memory_limit is 209715200") != NULL);
        OK(galloc_pool_set_limit(pool, SIZE_MAX));
        OK(galloc_free(get(pool, MIB(800), s), s));
        OK(galloc_free(p, s));
        OK(galloc_free(q, s));
        OK(galloc_pool_trim(pool, 0, NULL));
        OK(galloc_pool_set_limit(pool, 0));
        expect_no_memory(pool, 1, s);
        EXPECT_EQ(galloc_pool_set_limit(NULL, MIB(1)), cudaErrorInvalidValue);
        pool_end(pool);
        finish();
    }
}

/* A limit that is lowered takes nothing away: what is held serves requests, and goes when it is trimmed. */
TEST(a_lowered_limit_returns_nothing_by_force)
{
    FOR_BOTH_KINDS (kind) {
        begin_small(GIB(1));
        cudaStream_t s = stream_new();
        galloc_config config = config_of_kind(*kind);
        galloc_pool *pool = pool_new(&config);
        galloc_report report;
        void *p = get(pool, MIB(40), s), *q = get(pool, MIB(40), s);
        put(s, p, MIB(40), 1);
        put(s, q, MIB(40), 2);
        OK(galloc_pool_set_limit(pool, MIB(60)));
        EXPECT_EQ(sim_physical(0), MIB(80));
        expect_no_memory(pool, MIB(4), s);
        OK(galloc_oom_report(&report));
        EXPECT_EQ(report.limit, MIB(60));
        EXPECT_EQ(report.room, 0);
        EXPECT_EQ(report.held, MIB(80));
        look(s, p, MIB(40), 1);
        look(s, q, MIB(40), 2);
        OK(galloc_free(q, s));
        EXPECT_EQ(galloc_pool_check(pool), 0);
        q = get(pool, MIB(38), s);
        EXPECT_EQ(sim_physical(0), MIB(80));
        OK(galloc_free(q, s));
        OK(galloc_pool_trim(pool, MIB(60), NULL));
        EXPECT(sim_physical(0) <= MIB(60));
        look(s, p, MIB(40), 1);
        OK(galloc_free(p, s));
        OK(galloc_free(get(pool, MIB(60), s), s));
        EXPECT(sim_physical(0) <= MIB(60));
        pool_end(pool);
        finish();
    }
}

/* Also a request that exceeds the lowered limit: from a free block, from pages that a block with room has left, or from
   pages that move together. What exceeds all that is held is refused at once. So it is beside a limit of the device. */
TEST(what_is_held_above_a_lowered_limit_serves_any_request)
{
    for (int i = 0; i < 6; i++) {
        int how = i % 3;
        begin_small(GIB(1));
        galloc_config config = galloc_config_default();
        if (i >= 3) config.device_limit = MIB(200);
        galloc_pool *pool = pool_new(&config);
        cudaStream_t s = stream_new();
        void *p = how == 1 ? get_growable(pool, MIB(64), MIB(256), s) : get(pool, MIB(how ? 32 : 64), s);
        void *wall = how == 2 ? get(pool, MIB(2), s) : NULL, *q = how == 2 ? get(pool, MIB(32), s) : NULL;
        galloc_report report;
        OK(galloc_free(p, s));
        OK(galloc_free(q, s));
        size_t held = stats_of(pool).reserved.current;
        OK(galloc_pool_set_limit(pool, MIB(16)));
        p = get_used(pool, MIB(48), s, 1);
        EXPECT_EQ(stats_of(pool).reserved.current, held);
        EXPECT_EQ(stats_of(pool).moves > 0, how == 2);
        OK(galloc_free(p, s));
        expect_no_memory(pool, MIB(70), s);
        OK(galloc_oom_report(&report));
        EXPECT_EQ(report.steps_taken, 0);
        EXPECT_EQ(stats_of(pool).reserved.current, held);
        expect_healthy(pool, 1);
        OK(galloc_free(wall, s));
        pool_end(pool);
        finish();
    }
}

/* Where that is not enough, giving memory back would not help such a request: all that is held stays. */
TEST(what_no_memory_within_a_lowered_limit_could_serve_gives_nothing_back)
{
    FOR_BOTH_KINDS (kind) {
        begin_small(GIB(1));
        cudaStream_t s = stream_new();
        galloc_config config = config_of_kind(*kind);
        galloc_pool *pool = pool_new(&config);
        void *p = get(pool, MIB(32), s), *wall = get(pool, MIB(16), s), *q = get(pool, MIB(32), s);
        OK(galloc_free(p, s));
        OK(galloc_free(q, s));
        size_t held = stats_of(pool).reserved.current;
        OK(galloc_pool_set_limit(pool, MIB(20)));
        expect_no_memory(pool, MIB(72), s);
        EXPECT_EQ(stats_of(pool).reserved.current, held);
        OK(galloc_free(wall, s));
        pool_end(pool);
        finish();
    }
}

/* With another backend only the driver could serve it: it is refused at once. */
TEST(another_backend_keeps_to_a_lowered_limit)
{
    begin_small(GIB(1));
    galloc_config config = galloc_config_default();
    config.backend = GALLOC_BACKEND_CUDA_MALLOC;
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new();
    galloc_report report;
    void *p = get(pool, MIB(64), s);
    OK(galloc_pool_set_limit(pool, MIB(16)));
    expect_no_memory(pool, MIB(48), s);
    OK(galloc_oom_report(&report));
    EXPECT_EQ(report.steps_taken, 0);
    OK(galloc_free(p, s));
    pool_end(pool);
    finish();
}

/* What is idle above a lowered limit goes when a request needs new memory. */
TEST(growth_returns_what_is_idle_above_a_lowered_limit)
{
    enum { IDLE = 20 };
    begin_small(GIB(1));
    cudaStream_t s = stream_new();
    galloc_config config = config_of_kind(0);
    galloc_pool *pool = pool_new(&config);
    void *p[IDLE];
    for (int i = 0; i < IDLE; i++) p[i] = get(pool, MIB(10), s);
    for (int i = 0; i < IDLE; i++) OK(galloc_free(p[i], s));
    OK(galloc_pool_set_limit(pool, MIB(30)));
    EXPECT_EQ(stats_of(pool).reserved.current, MIB(10) * IDLE);
    p[0] = get(pool, MIB(16), s);
    EXPECT(stats_of(pool).reserved.current <= MIB(30));
    OK(galloc_free(p[0], s));
    pool_end(pool);
    finish();
}

/* A request for all that the device has is refused by a limit below that, and one of more by the device. */
TEST(the_device_is_named_for_more_than_it_has)
{
    for (int device = 0; device < 2; device++) {
        galloc_config config = galloc_config_default();
        begin_small(GIB(1));
        if (device) config.device_limit = MIB(512);
        else config.memory_limit = MIB(512);
        galloc_pool *pool = pool_new(&config);
        expect_no_memory(pool, GIB(1), 0);
        EXPECT(strstr(galloc_last_message(), device ? "the device_limit is 536870912" : "the pool's memory_limit is"));
        expect_no_memory(pool, GIB(1) + 512, 0);
        EXPECT(strstr(galloc_last_message(), "the device has 1073741824") != NULL);
        pool_end(pool);
        finish();
    }
}

/* Of two limits that are equal the pool's own is named, unless other pools have taken something of the device's. */
TEST(of_equal_limits_the_one_that_refuses_is_named)
{
    galloc_config config = config_limit(MIB(64));
    begin();
    config.device_limit = MIB(64);
    galloc_pool *pool = pool_new(&config), *other = pool_new(&config);
    expect_no_memory(pool, MIB(66), 0);
    EXPECT(strstr(galloc_last_message(), "the pool's memory_limit is 67108864") != NULL);
    void *p = get(pool, MIB(32), 0);
    expect_no_memory(pool, MIB(64), 0);
    EXPECT(strstr(galloc_last_message(), "the pool's memory_limit is 67108864") != NULL);
    void *q = get(other, MIB(16), 0);
    expect_no_memory(pool, MIB(32), 0);
    EXPECT(strstr(galloc_last_message(), "the device_limit is 67108864, of which the device's pools hold 50331648"));
    OK(galloc_free(q, 0));
    OK(galloc_free(p, 0));
    pool_end(other);
    pool_end(pool);
    finish();
}

/* An alignment of the size of the device is not too large by itself: the segment that it would take is named. */
TEST(an_alignment_of_the_size_of_the_device_is_tried)
{
    galloc_config config = config_fixed();
    begin_small(GIB(1));
    galloc_request request = {.bytes = MIB(1), .alignment = GIB(1)};
    request.pool = pool_new(&config);
    void *p = NULL;
    EXPECT_EQ(galloc_alloc(&p, &request), cudaErrorMemoryAllocation);
    EXPECT(strstr(galloc_last_message(), "; the request needs a segment of 1075838976 with alignment") != NULL);
    request.alignment = GIB(2);
    EXPECT_EQ(galloc_alloc(&p, &request), cudaErrorMemoryAllocation);
    EXPECT(strstr(galloc_last_message(), "alignment 2147483648 needs a segment of that size here") != NULL);
    pool_end(request.pool);
    finish();
}

TEST(a_full_device_is_named)
{
    begin_small(GIB(1));
    cudaStream_t s = stream_new();
    galloc_config config = galloc_config_default();
    for (int i = 0; i < 3; i++) {
        config.memory_limit = i == 1 ? GIB(2) : SIZE_MAX;
        config.device_limit = i == 2 ? GIB(2) : SIZE_MAX;
        galloc_pool *pool = pool_new(&config);
        void *p = get(pool, GIB(1), s);
        expect_no_memory(pool, MIB(2), s);
        EXPECT(strstr(galloc_last_message(), "the device has 1073741824") != NULL);
        OK(galloc_free(p, s));
        pool_end(pool);
    }
    finish();
}

/* ---- the limit that pools share ---------------------------------------------------------------------------------- */

/* In whichever order the pools begin that name one. */
TEST(the_lowest_limit_of_a_devices_pools_counts)
{
    for (int first = 0; first < 2; first++) {
        begin_small(GIB(1));
        galloc_config config = galloc_config_default();
        galloc_pool *pool[2];
        for (int i = 0; i < 2; i++) {
            config.device_limit = i == first ? MIB(100) : MIB(200);
            pool[i] = pool_new(&config);
        }
        for (int i = 0; i < 2; i++) expect_no_memory(pool[i], MIB(150), 0);
        pool_end(pool[first]);
        OK(galloc_free(get(pool[1 - first], MIB(150), 0), 0));
        pool_end(pool[1 - first]);
        finish();
    }
}

TEST(pools_of_a_device_share_its_limit)
{
    FOR_BOTH_KINDS (kind) {
        begin_small(GIB(1));
        cudaStream_t s = stream_new();
        galloc_config config = config_of_kind(*kind);
        galloc_pool *free_pool = pool_new(&config);
        config.device_limit = MIB(64);
        galloc_pool *a = pool_new(&config);
        config.device_limit = MIB(96);
        galloc_pool *b = pool_new(&config);
        void *p = get(a, MIB(20), s), *q = get(b, MIB(24), s), *r = get(free_pool, MIB(20), s);
        EXPECT_EQ(sim_physical(0), MIB(64));
        expect_no_memory(a, MIB(2), s);
        expect_no_memory(b, MIB(2), s);
        expect_no_memory(free_pool, MIB(2), s);
        EXPECT(strstr(galloc_last_message(), "device_limit") != NULL);
        OK(galloc_free(p, s));
        pool_end(a); /* with the pool goes its limit */
        void *t = get(free_pool, MIB(50), s);
        expect_no_memory(b, MIB(4), s);
        EXPECT_EQ(galloc_pool_check(b), 0);
        OK(galloc_free(q, s));
        OK(galloc_free(r, s));
        OK(galloc_free(t, s));
        pool_end(b);
        pool_end(free_pool);
        finish();
    }
}

/* A size beyond all addresses, of a difference below zero perhaps, is refused as any other beyond the limit. */
TEST(sizes_beyond_all_addresses_are_rejected)
{
    static const size_t sizes[] = {(size_t)1 << 47, (size_t)1 << 55, ((size_t)1 << 55) + 1, (size_t)1 << 62,
                                   SIZE_MAX - 511, SIZE_MAX};
    static const char *const settings[] = {"", "expandable_segments:False", "backend:cudaMalloc", "debug:guards",
                                           "backend:cudaMallocAsync", "strategy:pooled", "throw_on_cudamalloc_oom:True",
                                           "roundup_power2_divisions:8"};
    for (size_t k = 0; k < sizeof settings / sizeof *settings; k++) {
        begin_small(GIB(1));
        galloc_config config = galloc_config_default();
        OK(galloc_config_parse(&config, settings[k], NULL, 0));
        galloc_pool *pool = pool_new(&config);
        galloc_report report;
        uint64_t rejections = 0;
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            for (int growable = 0; growable < 2; growable++) {
                galloc_request request = {.bytes = sizes[i], .pool = pool, .max_bytes = growable ? sizes[i] : 0};
                void *p = &p;
                EXPECT_EQ(galloc_alloc(&p, &request), cudaErrorMemoryAllocation);
                EXPECT(!p);
                OK(galloc_oom_report(&report));
                EXPECT_EQ(report.asked, sizes[i]);
                EXPECT(report.rounded >= sizes[i]);
                EXPECT(report.rejected && !report.steps_taken);
                EXPECT_EQ(stats_of(pool).rejections, ++rejections);
                EXPECT_EQ(stats_of(pool).failures, rejections);
            }
        }
        expect_healthy(pool, 1);
        pool_end(pool);
        finish();
    }
}

/* So is room that is memory. */
TEST(rooms_beyond_all_addresses_are_rejected_where_they_are_memory)
{
    static const size_t rooms[] = {(size_t)1 << 47, ((size_t)1 << 55) - 1, ((size_t)1 << 55) + 1, SIZE_MAX};
    static const char *const settings[] = {"expandable_segments:False", "backend:cudaMalloc", "backend:cudaMallocAsync",
                                           "expandable_segments:False,debug:guards"};
    for (size_t k = 0; k < sizeof settings / sizeof *settings; k++) {
        begin_small(GIB(1));
        galloc_config config = galloc_config_default();
        OK(galloc_config_parse(&config, settings[k], NULL, 0));
        galloc_pool *pool = pool_new(&config);
        galloc_report report;
        for (size_t i = 0; i < sizeof rooms / sizeof *rooms; i++) {
            galloc_request request = {.bytes = 4096, .pool = pool, .max_bytes = rooms[i]};
            void *p = &p;
            EXPECT_EQ(galloc_alloc(&p, &request), cudaErrorMemoryAllocation);
            EXPECT(!p);
            OK(galloc_oom_report(&report));
            EXPECT(report.rejected && report.room_is_memory);
            EXPECT_EQ(stats_of(pool).rejections, i + 1);
        }
        expect_healthy(pool, 1);
        pool_end(pool);
        finish();
    }
}

/* A reserve that fails for another reason leaves no report of an earlier failure. */
TEST(a_reserve_has_its_own_report)
{
    begin_small(GIB(1));
    galloc_pool *pool = pool_new(NULL), *each;
    galloc_config config = galloc_config_default();
    galloc_report report;
    config.backend = GALLOC_BACKEND_CUDA_MALLOC;
    each = pool_new(&config);
    expect_no_memory(pool, GIB(2), NULL);
    EXPECT_EQ(galloc_pool_reserve(pool, SIZE_MAX), cudaErrorMemoryAllocation);
    OK(galloc_oom_report(&report));
    EXPECT_EQ(report.asked, SIZE_MAX);
    EXPECT_EQ(galloc_pool_reserve(each, MIB(1)), cudaErrorNotSupported);
    EXPECT_EQ(galloc_oom_report(&report), cudaErrorNotReady);
    expect_no_memory(pool, GIB(2), NULL);
    EXPECT_EQ(galloc_pool_reserve(NULL, MIB(1)), cudaErrorInvalidValue);
    EXPECT_EQ(galloc_oom_report(&report), cudaErrorNotReady);
    pool_end(each);
    pool_end(pool);
    finish();
}

/* What exceeds the device_limit is refused at once, whatever the pool's own limit allows. */
TEST(nothing_is_tried_beyond_the_limit_of_the_device)
{
    FOR_BOTH_KINDS (kind) {
        begin_small(GIB(1));
        cudaStream_t s = stream_new();
        galloc_config config = config_of_kind(*kind);
        config.device_limit = MIB(64);
        galloc_pool *pool = pool_new(&config);
        galloc_report report;
        OK(galloc_free(get(pool, MIB(20), s), s));
        expect_no_memory(pool, MIB(66), s);
        OK(galloc_oom_report(&report));
        EXPECT_EQ(report.limit, MIB(64));
        EXPECT(report.rejected && !report.steps_taken);
        EXPECT_EQ(stats_of(pool).rejections, 1);
        EXPECT_EQ(stats_of(pool).reserved.current, MIB(20));
        pool_end(pool);
        finish();
    }
}

/* A limit beneath what is held takes nothing away, and lets nobody have more. */
TEST(a_limit_may_be_lower_than_what_is_held)
{
    begin_small(GIB(1));
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *p = get(pool, MIB(40), s), *q = get(pool, MIB(40), s);
    galloc_config config = galloc_config_default();
    config.device_limit = MIB(32);
    galloc_pool *strict = pool_new(&config);
    EXPECT_EQ(galloc_pool_check(pool), 0);
    expect_no_memory(strict, MIB(2), s);
    expect_no_memory(pool, MIB(4), s);
    put(s, p, MIB(40), 1);
    look(s, p, MIB(40), 1);
    OK(galloc_free(p, s));
    OK(galloc_free(q, s));
    OK(galloc_pool_trim(pool, 0, NULL));
    OK(galloc_free(get(strict, MIB(32), s), s));
    EXPECT_EQ(galloc_pool_check(pool), 0);
    pool_end(strict);
    pool_end(pool);
    finish();
}

TEST(devices_have_limits_of_their_own)
{
    begin_with_devices(2, SIM_PACE_RANDOM);
    cudaStream_t s = stream_new();
    galloc_config config = galloc_config_default();
    config.device = 0;
    config.device_limit = MIB(32);
    galloc_pool *a = pool_new(&config);
    config.device = 1;
    galloc_pool *b = pool_new(&config);
    void *p = get(a, MIB(32), s);
    OK(cudaSetDevice(1));
    cudaStream_t t = stream_new();
    void *q = get(b, MIB(32), t);
    EXPECT_EQ(galloc_pool_check(a) + galloc_pool_check(b), 0);
    OK(galloc_free(p, s));
    OK(galloc_free(q, t));
    pool_end(a);
    pool_end(b);
    finish();
}

/* What the pools of one device hold leaves the limits of fifteen others as they are. */
TEST(each_of_sixteen_devices_has_its_own_limit)
{
    enum { DEVICES = 16 };
    begin_with_devices(DEVICES, SIM_PACE_PROMPT);
    galloc_pool *pool[DEVICES], *other[DEVICES];
    cudaStream_t s[DEVICES];
    void *p[DEVICES];
    galloc_config config = galloc_config_default();
    for (int d = 0; d < DEVICES; d++) {
        OK(cudaSetDevice(d));
        s[d] = stream_new();
        config.device = d;
        config.device_limit = SIZE_MAX;
        other[d] = pool_new(&config);
        config.device_limit = MIB(2) * (size_t)(DEVICES - d);
        pool[d] = pool_new(&config);
        p[d] = get(other[d], config.device_limit, s[d]);
    }
    for (int d = 0; d < DEVICES; d++) {
        galloc_report report;
        expect_no_memory(pool[d], 512, s[d]);
        OK(galloc_oom_report(&report));
        EXPECT_EQ(report.device, d);
        EXPECT_EQ(report.limit, MIB(2) * (size_t)(DEVICES - d));
        EXPECT_EQ(report.others_held, report.limit);
        pool_end(pool[d]);
        OK(galloc_free(get(other[d], MIB(2), s[d]), s[d])); /* the limit was that pool's */
        EXPECT_EQ(galloc_pool_check(other[d]), 0);
    }
    for (int d = 0; d < DEVICES; d++) {
        OK(galloc_free(p[d], s[d]));
        pool_end(other[d]);
    }
    OK(cudaSetDevice(0));
    finish();
}

/* What the driver refuses, and what it would not take back, is counted as what it is. */
TEST(a_failure_gives_back_what_it_took_of_the_limit)
{
    static const char *const calls[] = {"cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemAlloc"};
    for (int i = 0; i < 4; i++) {
        for (int how = 0; how < 2; how++) {
            begin_small(GIB(1));
            cudaStream_t s = stream_new();
            galloc_config config = config_of_kind(i < 3);
            config.device_limit = MIB(64);
            galloc_pool *pool = pool_new(&config), *other = pool_new(&config);
            void *ptr = NULL;
            sim_fail(calls[i], 1, 1, how ? 0 : (int)CUDA_ERROR_UNKNOWN);
            EXPECT(galloc_pool_malloc(pool, &ptr, MIB(64), s) != cudaSuccess);
            sim_fail_clear();
            EXPECT_EQ(galloc_pool_check(pool), 0);
            ptr = get(other, MIB(64), s);
            OK(galloc_free(ptr, s));
            pool_end(pool);
            pool_end(other);
            finish();
        }
    }
}

enum { GROWERS = 4 };

static int over; /* the device once held more than the limit */

static void watch(const char *function)
{
    (void)function;
    if (sim_physical(0) > MIB(64)) __atomic_store_n(&over, 1, __ATOMIC_RELAXED);
}

static void *grow_and_trim(void *arg)
{
    galloc_pool *pool = (galloc_pool *)arg;
    cudaStream_t s = stream_new();
    dice d = {(uint64_t)(uintptr_t)pool};
    for (int i = 0; i < 300; i++) {
        void *p[4];
        int n = 0;
        while (n < 4) {
            void *ptr = NULL;
            cudaError_t error = galloc_pool_malloc(pool, &ptr, MIB(2) * (1 + roll_below(&d, 10)), s);
            EXPECT(error == cudaSuccess || error == cudaErrorMemoryAllocation);
            if (error) break;
            p[n++] = ptr;
        }
        while (n-- > 0) OK(galloc_free(p[n], s));
        if (roll_below(&d, 8) == 0) OK(galloc_pool_trim(pool, 0, NULL));
        if (roll_below(&d, 8) == 0) EXPECT_EQ(galloc_pool_check(pool), 0);
    }
    return NULL;
}

TEST(pools_that_grow_at_once_keep_to_the_limit)
{
    FOR_BOTH_KINDS (kind) {
        begin_small(GIB(1));
        galloc_config config = config_of_kind(*kind);
        galloc_pool *pool[GROWERS];
        pthread_t thread[GROWERS];
        config.device_limit = MIB(64);
        over = 0;
        sim_hook(watch, NULL);
        for (int i = 0; i < GROWERS; i++) pool[i] = pool_new(&config);
        for (int i = 0; i < GROWERS; i++) EXPECT_EQ(pthread_create(&thread[i], NULL, grow_and_trim, pool[i]), 0);
        for (int i = 0; i < GROWERS; i++) EXPECT_EQ(pthread_join(thread[i], NULL), 0);
        EXPECT_EQ(over, 0);
        EXPECT(sim_physical_peak(0) <= MIB(64));
        EXPECT(sim_physical_peak(0) > MIB(40));
        for (int i = 0; i < GROWERS; i++) pool_end(pool[i]);
        finish();
    }
}

/* ---- what other pools of the device do not use ------------------------------------------------------------------- */

static void *change_limits(void *arg)
{
    galloc_pool *const *pool = (galloc_pool *const *)arg;
    dice d = {1};
    for (int i = 0; i < 2000; i++) {
        galloc_config config;
        size_t limit = MIB(2) * (1 + roll_below(&d, 8));
        OK(galloc_pool_set_limit(pool[i % GROWERS], limit));
        OK(galloc_pool_config(pool[i % GROWERS], &config));
        EXPECT_EQ(config.memory_limit, limit);
    }
    return NULL;
}

/* No pool is ever above the highest of its limits, 16 MiB. */
TEST(limits_change_while_pools_grow)
{
    FOR_BOTH_KINDS (kind) {
        begin_small(GIB(1));
        galloc_config config = config_of_kind(*kind);
        galloc_pool *pool[GROWERS];
        pthread_t thread[GROWERS], changer;
        config.memory_limit = MIB(16);
        over = 0;
        sim_hook(watch, NULL);
        for (int i = 0; i < GROWERS; i++) pool[i] = pool_new(&config);
        for (int i = 0; i < GROWERS; i++) EXPECT_EQ(pthread_create(&thread[i], NULL, grow_and_trim, pool[i]), 0);
        EXPECT_EQ(pthread_create(&changer, NULL, change_limits, pool), 0);
        for (int i = 0; i < GROWERS; i++) EXPECT_EQ(pthread_join(thread[i], NULL), 0);
        EXPECT_EQ(pthread_join(changer, NULL), 0);
        EXPECT_EQ(over, 0);
        EXPECT(sim_physical_peak(0) <= MIB(64));
        for (int i = 0; i < GROWERS; i++) pool_end(pool[i]);
        finish();
    }
}

static struct {
    galloc_pool *other;
    pthread_t thread, second;
    cudaStream_t s;
    void *p;
    int looks, when, begun, done; /* when: before the so many-th look at the limit */
} rival;

static void *take_the_rest(void *unused)
{
    OK(cudaSetDevice(0));
    (void)galloc_pool_malloc(rival.other, &rival.p, MIB(2), rival.s);
    __atomic_store_n(&rival.done, 1, __ATOMIC_RELEASE);
    return unused;
}

/* The other call may have to wait for this one. */
static void let_another_pool_grow(void)
{
    if (!pthread_equal(pthread_self(), rival.thread) || ++rival.looks != rival.when) return;
    rival.begun = 1;
    EXPECT_EQ(pthread_create(&rival.second, NULL, take_the_rest, NULL), 0);
    for (int i = 0; i < 100 && !__atomic_load_n(&rival.done, __ATOMIC_ACQUIRE); i++) usleep(1000);
}

/* Another pool takes the rest of the limit at any moment of a call that wants it: one of them gets it. */
TEST(pools_that_grow_at_once_share_a_limit)
{
    int served = 0, begun = 1;
    for (int when = 1; begun; when++) {
        begin();
        memset(&rival, 0, sizeof rival);
        galloc_config config = galloc_config_default();
        config.device_limit = MIB(2);
        config.growth = MIB(2);
        config.throw_on_cudamalloc_oom = 1;
        galloc_pool *pool = pool_new(&config);
        cudaStream_t s = stream_new();
        void *p = NULL;
        rival.other = pool_new(&config);
        rival.s = stream_new();
        rival.thread = pthread_self();
        rival.when = when;
        inside_on_budget = let_another_pool_grow;
        (void)galloc_pool_malloc(pool, &p, MIB(2), s);
        inside_on_budget = NULL;
        begun = rival.begun;
        if (begun) EXPECT_EQ(pthread_join(rival.second, NULL), 0);
        EXPECT(stats_of(pool).reserved.current + stats_of(rival.other).reserved.current <= MIB(2));
        EXPECT(!p || !rival.p);
        EXPECT(p || rival.p);
        served += rival.p != NULL;
        if (p) OK(galloc_free(p, s));
        if (rival.p) OK(galloc_free(rival.p, rival.s));
        pool_end(rival.other);
        pool_end(pool);
        stream_end(s);
        stream_end(rival.s);
        finish();
    }
    EXPECT(served > 0);
}

TEST(a_pool_that_the_shared_limit_stops_gets_what_others_do_not_use)
{
    FOR_BOTH_KINDS (kind) {
        begin_small(GIB(1));
        cudaStream_t s = stream_new();
        galloc_config config = config_of_kind(*kind);
        config.device_limit = MIB(64);
        galloc_pool *a = pool_new(&config), *b = pool_new(&config);
        void *kept = get(b, MIB(20), s), *idle = get(b, MIB(40), s);
        put(s, kept, MIB(20), 1);
        put(s, idle, MIB(40), 2);
        OK(galloc_free(idle, s));
        void *p = get(a, MIB(40), s);
        put(s, p, MIB(40), 3);
        EXPECT(sim_physical_peak(0) <= MIB(64));
        expect_no_memory(a, MIB(6), s);
        look(s, kept, MIB(20), 1);
        look(s, p, MIB(40), 3);
        OK(galloc_free(p, s));
        OK(galloc_free(kept, s));
        pool_end(a);
        pool_end(b);
        finish();
    }
}

/* The same where it is the device that has no more. */
TEST(a_pool_gets_what_others_do_not_use_of_a_full_device)
{
    begin_small(MIB(64));
    cudaStream_t s = stream_new();
    galloc_pool *a = pool_new(NULL), *b = pool_new(NULL);
    OK(galloc_free(get(b, MIB(60), s), s));
    OK(galloc_free(get(a, MIB(50), s), s));
    pool_end(a);
    pool_end(b);
    finish();
}

/* Another pool holds 104 MiB of 8 MiB blocks that are free. The limit of the device, the device or both lack memory,
   also for a segment that is larger than its request. */
static void gets_idle_memory_of_another(const char *settings, size_t bytes, size_t alignment, size_t limit, size_t left)
{
    begin_small(MIB(320));
    cudaStream_t s = stream_new();
    galloc_pool *other = pool_new(NULL), *pool;
    void *blocks[13], *p = NULL, *outside = NULL;
    for (int i = 0; i < 13; i++) blocks[i] = get(other, MIB(8), s);
    for (int i = 0; i < 13; i++) OK(galloc_free(blocks[i], s));
    galloc_config config = galloc_config_default();
    OK(galloc_config_parse(&config, settings, NULL, 0));
    config.device_limit = limit;
    pool = pool_new(&config);
    if (left != SIZE_MAX) OK(cudaMalloc(&outside, MIB(320) - (size_t)sim_physical(0) - left));
    galloc_request request = {0};
    request.bytes = bytes;
    request.alignment = alignment;
    request.pool = pool;
    request.stream = s;
    OK(galloc_alloc(&p, &request));
    OK(galloc_free(p, s));
    OK(cudaFree(outside));
    pool_end(pool);
    pool_end(other);
    finish();
}

TEST(a_pool_gets_as_much_from_others_as_it_needs)
{
    static const char *const settings[] = {"", "expandable_segments:False", "like:pytorch", "backend:cudaMalloc"};
    for (int i = 0; i < 4; i++) {
        gets_idle_memory_of_another(settings[i], 30000, 0, MIB(40), SIZE_MAX); /* the limit is passed already */
        gets_idle_memory_of_another(settings[i], MIB(32), 0, MIB(128), MIB(8));
        gets_idle_memory_of_another(settings[i], 30000, MIB(32), MIB(104), SIZE_MAX);
        gets_idle_memory_of_another(settings[i], 30000, MIB(32), SIZE_MAX, 0);
    }
}

/* What another pool has freed may be done though that pool has not looked since: it serves without a wait. */
TEST(a_pool_that_may_not_wait_gets_what_others_are_done_with)
{
    sim_options options = sim_defaults();
    options.pace = SIM_PACE_STILL;
    options.memory = MIB(32);
    begin_with(options);
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_config config = galloc_config_default();
    galloc_pool *other = pool_new(NULL);
    config.wait_limit_ms = 0;
    galloc_pool *pool = pool_new(&config);
    void *live = get(other, 512, t), *p[8];
    for (int i = 0; i < 8; i++) p[i] = get_used(other, MIB(2), s, 1);
    for (int i = 0; i < 8; i++) OK(galloc_free(p[i], s));
    sim_run(-1);
    long waits = sim_blocking_calls();
    void *q = get(pool, MIB(24), t);
    EXPECT_EQ(sim_blocking_calls(), waits);
    OK(galloc_free(q, t));
    OK(galloc_free(live, t));
    pool_end(pool);
    pool_end(other);
    finish();
}

/* Its own limit is no reason to empty others. */
TEST(others_keep_what_would_be_of_no_use)
{
    begin_small(GIB(1));
    cudaStream_t s = stream_new();
    galloc_config config = config_limit(MIB(16));
    galloc_pool *a = pool_new(&config), *b = pool_new(NULL);
    void *p = get(a, MIB(14), s);
    OK(galloc_free(get(b, MIB(60), s), s));
    expect_no_memory(a, MIB(8), s);
    EXPECT_EQ(stats_of(b).reserved.current, MIB(60));
    OK(galloc_free(p, s));
    pool_end(a);
    pool_end(b);
    finish();
}

static void *come_and_go(void *arg)
{
    cudaStream_t s = stream_new();
    (void)arg;
    for (int i = 0; i < 100; i++) {
        galloc_config config = galloc_config_default();
        void *p = NULL, *q = NULL;
        config.device_limit = MIB(64);
        galloc_pool *pool = pool_new(&config);
        (void)galloc_pool_malloc(pool, &p, MIB(40), s);
        OK(galloc_free(p, s));
        (void)galloc_pool_malloc(pool, &q, MIB(50), s);
        OK(galloc_free(q, s));
        OK(galloc_pool_destroy(pool));
    }
    return NULL;
}

/* A pool may end while others look for what it does not use. */
TEST(pools_come_and_go_beside_others_that_are_short)
{
    begin_small(GIB(1));
    pthread_t thread[GROWERS];
    over = 0;
    sim_hook(watch, NULL);
    for (int i = 0; i < GROWERS; i++) EXPECT_EQ(pthread_create(&thread[i], NULL, come_and_go, NULL), 0);
    for (int i = 0; i < GROWERS; i++) EXPECT_EQ(pthread_join(thread[i], NULL), 0);
    EXPECT_EQ(over, 0);
    finish();
}

static galloc_pool *asker;
static long told;

/* Whoever asks for what is idle here holds nothing of its own while the program is told. */
static void tell(galloc_pool *pool, void *addr, size_t bytes, void *user)
{
    (void)pool;
    (void)addr;
    (void)bytes;
    (void)user;
    __atomic_fetch_add(&told, 1, __ATOMIC_RELAXED);
    EXPECT_EQ(galloc_pool_check(asker), 0);
}

static void *set_callbacks(void *pool)
{
    galloc_callbacks calls = {NULL, NULL, NULL, tell, NULL};
    for (int i = 0; i < 500; i++) {
        (void)galloc_pool_set_callbacks((galloc_pool *)pool, i % 2 ? NULL : &calls);
        usleep(10);
    }
    return NULL;
}

TEST(callbacks_are_set_while_others_ask)
{
    begin_small(GIB(1));
    galloc_config config = galloc_config_default();
    pthread_t thread;
    cudaStream_t s = stream_new();
    config.device_limit = MIB(64);
    galloc_pool *pool = pool_new(&config);
    asker = pool_new(&config);
    told = 0;
    galloc_callbacks calls = {NULL, NULL, NULL, tell, NULL};
    OK(galloc_pool_set_callbacks(pool, &calls));
    OK(galloc_free(get(pool, MIB(40), s), s));
    OK(galloc_free(get(asker, MIB(40), s), s));
    EXPECT(told > 0);
    EXPECT_EQ(pthread_create(&thread, NULL, set_callbacks, pool), 0);
    for (int i = 0; i < 200; i++) {
        OK(galloc_free(get(pool, MIB(40), s), s));
        OK(cudaStreamSynchronize(s));
        OK(galloc_free(get(asker, MIB(40), s), s));
        OK(cudaStreamSynchronize(s));
    }
    EXPECT_EQ(pthread_join(thread, NULL), 0);
    OK(galloc_pool_set_callbacks(pool, NULL));
    pool_end(pool);
    pool_end(asker);
    stream_end(s);
    finish();
}

static int ended;

static void *end_pool(void *pool)
{
    OK(galloc_pool_destroy((galloc_pool *)pool));
    __atomic_store_n(&ended, 1, __ATOMIC_RELEASE);
    return NULL;
}

TEST(a_pool_does_not_end_under_a_visitor)
{
    begin();
    pthread_t thread;
    galloc_pool *pool = pool_new(NULL);
    inside_device *device = inside_device_of(pool);
    ended = 0;
    EXPECT(inside_visit(device, NULL) == pool);
    EXPECT_EQ(pthread_create(&thread, NULL, end_pool, pool), 0);
    usleep(100000);
    EXPECT_EQ(__atomic_load_n(&ended, __ATOMIC_ACQUIRE), 0);
    if (!__atomic_load_n(&ended, __ATOMIC_ACQUIRE)) EXPECT(inside_visit(device, pool) == NULL);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
    finish();
}

/* Memory of a pool that work has done with, as its events say: they are recorded once there is a second stream. */
static void leave_idle(galloc_pool *pool, size_t bytes)
{
    cudaStream_t s = stream_new(), t = stream_new();
    OK(galloc_free(get(pool, 512, t), t));
    OK(galloc_free(get(pool, bytes, s), s));
    OK(cudaDeviceSynchronize());
}

/* What a pool has itself and does not use goes before what others have. */
TEST(own_idle_memory_goes_before_that_of_others)
{
    begin_small(GIB(1));
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_config config = config_of_kind(1);
    config.device_limit = MIB(100);
    galloc_pool *other = pool_new(&config);
    config.expandable_segments = 0;
    galloc_pool *pool = pool_new(&config);
    leave_idle(other, MIB(28));
    OK(galloc_free(get(pool, 512, t), t));
    void *p = get(pool, MIB(30), s), *q = get(pool, MIB(30), s);
    OK(galloc_free(p, s));
    OK(galloc_free(q, s));
    OK(cudaDeviceSynchronize());
    size_t had = stats_of(other).reserved.current;
    p = get(pool, MIB(60), s);
    EXPECT_EQ(stats_of(other).reserved.current, had);
    EXPECT_EQ(stats_of(pool).reserved.current, MIB(62));
    OK(galloc_free(p, s));
    pool_end(pool);
    pool_end(other);
    finish();
}

/* What fits below the limit of the device is not asked of others. */
TEST(others_give_only_what_exceeds_the_limit)
{
    begin_small(GIB(1));
    cudaStream_t s = stream_new();
    galloc_config config = config_of_kind(1);
    config.device_limit = MIB(100);
    config.growth = MIB(2);
    galloc_pool *other = pool_new(&config), *pool = pool_new(&config);
    leave_idle(other, MIB(38));
    EXPECT_EQ(stats_of(other).reserved.current, MIB(40));
    void *p = get(pool, MIB(64), s); /* 4 MiB are lacking, and 2 more are asked for */
    EXPECT(stats_of(other).reserved.current >= MIB(34));
    OK(galloc_free(p, s));
    pool_end(pool);
    pool_end(other);
    finish();
}

/* When one pool has given enough the next one keeps what it has. */
TEST(others_give_no_more_than_is_lacking)
{
    begin_small(GIB(1));
    cudaStream_t s = stream_new();
    galloc_config config = config_of_kind(1);
    config.device_limit = MIB(136);
    config.growth = MIB(32);
    galloc_pool *a = pool_new(&config), *other[2] = {pool_new(&config), pool_new(&config)};
    for (int i = 0; i < 2; i++) leave_idle(other[i], MIB(60));
    EXPECT_EQ(stats_of(other[0]).reserved.current + stats_of(other[1]).reserved.current, MIB(128));
    void *p = get(a, MIB(20), s);
    EXPECT(stats_of(other[0]).reserved.current == MIB(64) || stats_of(other[1]).reserved.current == MIB(64));
    EXPECT(stats_of(other[0]).reserved.current + stats_of(other[1]).reserved.current >= MIB(96));
    OK(galloc_free(p, s));
    pool_end(a);
    for (int i = 0; i < 2; i++) pool_end(other[i]);
    finish();
}

static int times_told;

/* What is about to be unmapped in one pool, for another: both may be used. */
static void use_both(galloc_pool *pool, void *addr, size_t bytes, void *asking)
{
    (void)addr;
    (void)bytes;
    times_told++;
    EXPECT_EQ(galloc_pool_check(pool), 0);
    EXPECT_EQ(galloc_pool_check((galloc_pool *)asking), 0);
}

/* The program is told of what a pool gives to another with neither of them locked. */
TEST(others_tell_of_what_they_give_with_no_lock_held)
{
    begin_small(GIB(1));
    cudaStream_t s = stream_new();
    galloc_config config = config_of_kind(1);
    config.device_limit = MIB(64);
    galloc_pool *a = pool_new(&config), *b = pool_new(&config);
    galloc_callbacks calls = {NULL, NULL, NULL, use_both, a};
    OK(galloc_pool_set_callbacks(b, &calls));
    leave_idle(b, MIB(60));
    times_told = 0;
    alarm(20);
    void *p = get(a, MIB(40), s);
    alarm(0);
    EXPECT(times_told > 0);
    OK(galloc_free(p, s));
    OK(galloc_pool_set_callbacks(b, NULL));
    pool_end(a);
    pool_end(b);
    finish();
}

/* Another pool could not be looked into: a request fails for its own reasons all the same, and says these. */
TEST(what_keeps_others_from_giving_is_not_what_a_call_fails_for)
{
    int failed = 1;
    for (long nth = 1; failed; nth++) {
        begin_small(GIB(1));
        cudaStream_t s = stream_new();
        galloc_config config = config_of_kind(1);
        config.device_limit = MIB(64);
        galloc_pool *a = pool_new(&config), *b = pool_new(&config);
        void *p = get(b, MIB(30), s), *q = a;
        OK(galloc_free(get(b, MIB(10), s), s));
        sim_fail("cuThreadExchangeStreamCaptureMode", nth, 0, cudaErrorUnknown);
        cudaError_t error = galloc_pool_malloc(a, &q, MIB(60), s);
        failed = sim_failed() > 0;
        sim_fail_clear();
        EXPECT(error == cudaErrorMemoryAllocation || (failed && error == cudaErrorUnknown));
        if (error == cudaErrorMemoryAllocation) EXPECT(strstr(galloc_last_message(), "out of memory") != NULL);
        OK(galloc_free(p, s));
        pool_end(a);
        pool_end(b);
        finish();
    }
}

/* ---- the size of pages ------------------------------------------------------------------------------------------- */

TEST(growth_is_the_size_of_pages)
{
    static const size_t sizes[] = {MIB(2), MIB(16), MIB(256)};
    for (int i = 0; i < 3; i++) {
        begin();
        cudaStream_t s = stream_new();
        galloc_config config = galloc_config_default();
        config.growth = sizes[i];
        galloc_pool *pool = pool_new(&config);
        void *p = get(pool, MIB(1), s), *q = get(pool, MIB(300), s);
        size_t bytes = (MIB(301) + sizes[i] - 1) / sizes[i] * sizes[i], held = stats_of(pool).reserved.current;
        EXPECT(held >= bytes && held <= bytes + sizes[i]);
        EXPECT_EQ(sim_calls("cuMemCreate"), (long)(held / sizes[i]));
        expect_healthy(pool, 1);
        OK(galloc_free(p, s));
        OK(galloc_free(q, s));
        pool_end(pool);
        finish();
    }
}

/* However much overhead is allowed, no page is larger than 256 MiB. Only `growth` sets more. */
TEST(without_growth_pages_have_at_most_256_mib)
{
    enum { BLOCKS = 12 };
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = galloc_config_default();
    config.overhead = 10;
    galloc_pool *pool = pool_new(&config);
    void *p[BLOCKS];
    for (int i = 0; i < BLOCKS; i++) p[i] = get(pool, GIB(3), s);
    galloc_stats stats = stats_of(pool);
    EXPECT(stats.pages[7].bytes >= GIB(3));
    for (int i = 0; i < GALLOC_PAGE_SIZES; i++) EXPECT(stats.pages[i].bytes <= stats.pages[i].count * MIB(256));
    for (int i = 0; i < BLOCKS; i++) OK(galloc_free(p[i], s));
    pool_end(pool);
    finish();
}

/* Pages grow with the heap: up to a half of what may still be created within the overhead. */
TEST(a_large_heap_has_large_pages)
{
    enum { BLOCKS = 4096 };
    static void *p[BLOCKS];
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = galloc_config_default();
    config.overhead = 0.05;
    galloc_pool *pool = pool_new(&config);
    for (int i = 0; i < BLOCKS; i++) p[i] = get(pool, MIB(1), s);
    galloc_stats stats = stats_of(pool);
    size_t large = 0;
    for (int i = inside_page_class(MIB(64)); i < GALLOC_PAGE_SIZES; i++) large += stats.pages[i].bytes;
    EXPECT(large >= GIB(1));
    for (int i = 0; i < BLOCKS; i++) OK(galloc_free(p[i], s));
    pool_end(pool);
    finish();
}

/* But not beyond a sixteenth of the heap, however much may be created: more would be held than a program needs. */
TEST(no_page_is_larger_than_a_sixteenth_of_the_heap)
{
    enum { BLOCKS = 3000 };
    static void *p[BLOCKS];
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = galloc_config_default();
    config.overhead = 0.3;
    galloc_pool *pool = pool_new(&config);
    size_t held = 0, most = 0;
    for (int i = 0; i < BLOCKS; i++) {
        p[i] = get(pool, MIB(1), s);
        size_t now = stats_of(pool).reserved.current;
        EXPECT(now - held <= larger(MIB(8), now / 16));
        most = larger(most, now - held);
        held = now;
    }
    EXPECT(most >= MIB(64));
    for (int i = 0; i < BLOCKS; i++) OK(galloc_free(p[i], s));
    pool_end(pool);
    finish();
}

/* galloc_pool_reserve makes pages as large as an allocation of its size does. */
TEST(what_is_reserved_at_once_has_large_pages)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *reserved = pool_new(NULL), *allocated = pool_new(NULL);
    OK(galloc_pool_reserve(reserved, GIB(8)));
    void *p = get(allocated, GIB(8), s);
    EXPECT(stats_of(reserved).driver.create <= 2 * stats_of(allocated).driver.create);
    OK(galloc_free(p, s));
    pool_end(reserved);
    pool_end(allocated);
    stream_end(s);
    finish();
}

/* Under a limit every page counts: a heap of much less than 4 GiB has none above 2 MiB. */
TEST(under_a_limit_pages_are_small)
{
    enum { BLOCKS = 60 };
    for (int limited = 0; limited < 3; limited++) {
        begin();
        cudaStream_t s = stream_new();
        galloc_config config = galloc_config_default();
        if (limited) *(limited == 2 ? &config.device_limit : &config.memory_limit) = GIB(1);
        galloc_pool *pool = pool_new(&config);
        void *p[BLOCKS];
        for (int i = 0; i < BLOCKS; i++) p[i] = get(pool, MIB(5), s);
        galloc_stats stats = stats_of(pool);
        EXPECT_EQ(stats.pages[0].bytes == stats.reserved.current, limited > 0);
        for (int i = 0; i < BLOCKS; i++) OK(galloc_free(p[i], s));
        pool_end(pool);
        finish();
    }
}

TEST(growth_has_bounds)
{
    static const size_t bad[] = {1, MIB(1), MIB(3), GIB(2), SIZE_MAX};
    begin();
    for (int i = 0; i < 5; i++) {
        galloc_config config = galloc_config_default();
        galloc_pool *pool = NULL;
        config.growth = bad[i];
        EXPECT_EQ(galloc_pool_create(&pool, &config), cudaErrorInvalidValue);
    }
    finish();
}

/* Where the limit leaves less than a page, what is left is used all the same. */
TEST(growth_does_not_stand_in_the_way_of_the_limit)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = config_limit(MIB(100));
    config.growth = MIB(64);
    galloc_pool *pool = pool_new(&config);
    void *p = get(pool, MIB(60), s), *q = get(pool, MIB(30), s), *r = get(pool, MIB(8), s);
    EXPECT(sim_physical_peak(0) <= MIB(100));
    OK(galloc_free(p, s));
    OK(galloc_free(q, s));
    OK(galloc_free(r, s));
    pool_end(pool);
    finish();
}

/* Where the limit leaves just a page, that is created whole. */
TEST(the_last_page_of_a_limit_is_whole)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = config_limit(MIB(128));
    config.growth = MIB(64);
    galloc_pool *pool = pool_new(&config);
    void *p = get(pool, MIB(40), s);
    EXPECT_EQ(stats_of(pool).reserved.current, MIB(64));
    void *q = get(pool, MIB(40), s);
    EXPECT_EQ(stats_of(pool).reserved.current, MIB(128));
    EXPECT_EQ(sim_calls("cuMemCreate"), 2);
    void *r = get(pool, MIB(48), s);
    OK(galloc_free(p, s));
    OK(galloc_free(q, s));
    OK(galloc_free(r, s));
    expect_healthy(pool, 1);
    pool_end(pool);
    finish();
}

/* And so where just a page fits between two others. */
TEST(a_hole_of_one_page_is_filled_with_one_page)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = galloc_config_default();
    config.growth = MIB(64);
    galloc_pool *pool = pool_new(&config);
    void *p[3];
    for (int i = 0; i < 3; i++) p[i] = get(pool, MIB(64), s);
    EXPECT(p[2] == (char *)p[0] + MIB(128));
    OK(galloc_free(p[1], s));
    OK(galloc_pool_trim(pool, 0, NULL));
    EXPECT_EQ(stats_of(pool).reserved.current, MIB(128));
    void *q = get(pool, MIB(40), s);
    EXPECT(q == p[1]);
    EXPECT_EQ(stats_of(pool).reserved.current, MIB(192));
    EXPECT_EQ(sim_calls("cuMemCreate"), 4);
    OK(galloc_free(p[0], s));
    OK(galloc_free(p[2], s));
    OK(galloc_free(q, s));
    expect_healthy(pool, 1);
    pool_end(pool);
    finish();
}

static galloc_pool *lowered;

static void lower_the_limit(const char *function)
{
    if (!strcmp(function, "cuMemAlloc")) inside_set_memory_limit(lowered, MIB(20));
}

/* The driver refuses a segment of the usual size while the limit is lowered: a smaller one would exceed the limit. */
TEST(a_smaller_segment_is_within_the_limit_that_was_lowered_meanwhile)
{
    begin();
    galloc_config config = config_of_kind(0);
    config.memory_limit = MIB(64);
    galloc_pool *pool = lowered = pool_new(&config);
    cudaStream_t s = stream_new();
    void *p = get(pool, MIB(20), s);
    sim_fail("cuMemAlloc", 1, 0, 0);
    sim_hook(lower_the_limit, NULL);
    expect_no_memory(pool, MIB(4), s);
    sim_hook(NULL, NULL);
    EXPECT_EQ(sim_failed(), 1);
    EXPECT_EQ(sim_physical(0), MIB(20));
    expect_healthy(pool, 1);
    sim_fail_clear();
    OK(galloc_free(p, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* ---- collection -------------------------------------------------------------------------------------------------- */

/* Calls that wait, or that hold up a stream. */
static long waiting_calls(void)
{
    return sim_blocking_calls() + sim_calls("cuEventSynchronize") + sim_calls("cuMemHostAlloc") +
           sim_calls("cuMemFreeHost") + sim_calls("cuStreamSynchronize") + sim_calls("cuStreamWaitEvent") +
           sim_calls("cuMemFree");
}

static galloc_pool *pool_collecting(size_t limit, double threshold, unsigned long long age)
{
    galloc_config config = config_limit(limit);
    config.gc_threshold = threshold;
    config.gc_age = age;
    config.growth = MIB(2);
    config.reuse = GALLOC_REUSE_COMPLETED | GALLOC_REUSE_FOLLOWED; /* no waits but a collection's, if it made any */
    now_ns = 1000000000;
    return pool_new(&config);
}

/* Frees that come to the pool, so many, on a stream of their own. */
static void pass_frees(galloc_pool *pool, int n, cudaStream_t stream)
{
    for (int i = 0; i < n; i++) {
        void *p = get(pool, MIB(2), stream), *q = get(pool, MIB(2) + 512, stream);
        OK(galloc_free(q, stream));
        OK(galloc_free(p, stream));
    }
}

enum { BLOCKS = 24 };

static size_t held(galloc_pool *pool) { return stats_of(pool).reserved.current; }

TEST(a_collection_begins_above_the_threshold_and_ends_a_little_below)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_collecting(MIB(64), 0.5, UINT64_MAX);
    void *p[BLOCKS];
    long waits;
    for (int i = 0; i < 16; i++) p[i] = get(pool, MIB(2), s);
    for (int i = 0; i < 16; i++) OK(galloc_free(p[i], s));
    EXPECT_EQ(held(pool), MIB(32)); /* the threshold itself is not above it */
    EXPECT_EQ(stats_of(pool).collections, 0);
    for (int i = 0; i < BLOCKS; i++) p[i] = get(pool, MIB(2), s);
    OK(galloc_free(get(pool, MIB(2), t), t)); /* two streams: events tell what is done */
    for (int i = 0; i < BLOCKS; i++) OK(galloc_free(p[i], s));
    OK(cudaDeviceSynchronize());
    waits = waiting_calls();
    pass_frees(pool, 64, t);
    EXPECT_EQ(held(pool), MIB(30));
    EXPECT(stats_of(pool).collections >= 1);
    EXPECT(stats_of(pool).collected_bytes >= MIB(18));
    EXPECT_EQ(waiting_calls(), waits);
    expect_healthy(pool, 1);
    pool_end(pool);
    finish();
}

TEST(nothing_is_collected_unless_it_is_asked_for)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_collecting(MIB(64), 0, UINT64_MAX);
    OK(galloc_free(get(pool, MIB(60), s), s));
    now_ns += 1000000000000;
    pass_frees(pool, 300, s);
    EXPECT_EQ(held(pool), MIB(60));
    EXPECT_EQ(stats_of(pool).collections, 0);
    pool_end(pool);
    finish();
}

/* The heap of like:pytorch is galloc's own with expandable_segments: what is idle goes by its age there, too. */
TEST(idle_memory_goes_whatever_the_profile)
{
    static const char *const profiles[] = {"gc_age:1s", "like:pytorch,expandable_segments:True,gc_age:1s"};
    for (int i = 0; i < 2; i++) {
        begin();
        cudaStream_t s = stream_new();
        galloc_config config = galloc_config_default();
        char message[256];
        OK(galloc_config_parse(&config, profiles[i], message, sizeof message));
        galloc_pool *pool = pool_new(&config);
        OK(galloc_free(get(pool, MIB(64), s), s));
        for (int k = 0; k < 100; k++) {
            now_ns += 1200000000;
            pass_frees(pool, 1, s);
            OK(cudaStreamSynchronize(s));
        }
        EXPECT(held(pool) < MIB(64));
        EXPECT(stats_of(pool).collections > 0);
        pool_end(pool);
        finish();
    }
}

/* Memory that goes by its age is not more than the threshold demands: what was freed later stays, if that is enough. */
TEST(what_has_gone_by_its_age_counts_for_the_threshold)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_collecting(MIB(256), 0.5, 1000000000);
    void *p[BLOCKS];
    for (int i = 0; i < BLOCKS; i++) p[i] = get(pool, MIB(4), i < 10 ? s : t);
    pass_frees(pool, 1, t); /* has memory of its own */
    for (int i = 0; i < 10; i++) OK(galloc_free(p[i], s));
    for (int i = 0; i < 8; i++) {
        now_ns += 100000000;
        pass_frees(pool, 16, t);
    }
    for (int i = 10; i < BLOCKS; i++) OK(galloc_free(p[i], t));
    OK(cudaDeviceSynchronize());
    EXPECT_EQ(stats_of(pool).collections, 0);
    size_t before = held(pool);
    now_ns += 500000000; /* what was freed first is old now */
    OK(galloc_pool_set_limit(pool, MIB(128)));
    for (int i = 0; i < 64 && held(pool) == before; i++) pass_frees(pool, 1, t);
    EXPECT_EQ(held(pool), before - MIB(40));
    EXPECT(held(pool) <= MIB(64));
    pool_end(pool);
    finish();
}

/* With throw_on_cudamalloc_oom a request returns no memory, though a lower limit has left more than the threshold. */
TEST(a_request_that_may_return_no_memory_collects_nothing)
{
    for (int may = 0; may < 2; may++) {
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_config config = config_limit(MIB(256));
        config.gc_threshold = 0.5;
        config.throw_on_cudamalloc_oom = !may;
        galloc_pool *pool = pool_new(&config);
        void *p[12], *other = get(pool, MIB(4), t); /* two streams: events tell what is done */
        for (int i = 0; i < 12; i++) p[i] = get_used(pool, MIB(4), s, 1);
        for (int i = 0; i < 12; i += 2) OK(galloc_free(p[i], s));
        OK(cudaDeviceSynchronize());
        OK(galloc_pool_set_limit(pool, MIB(64)));
        size_t before = held(pool);
        void *q = get(pool, MIB(8), t); /* no free block has so much */
        EXPECT_EQ(held(pool) < before, may);
        EXPECT_EQ(stats_of(pool).collections, may);
        OK(galloc_free(q, t));
        OK(galloc_free(other, t));
        for (int i = 1; i < 12; i += 2) OK(galloc_free(p[i], s));
        pool_end(pool);
        finish();
    }
}

/* Pages inside larger blocks, in blocks of small sizes, and those that are parked count alike: what was not used for
   longest goes first, whatever has merged with it since. */
TEST(what_was_not_used_for_longest_goes_first)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_collecting(MIB(64), 0.5, UINT64_MAX);
    void *p[BLOCKS], *own = get(pool, MIB(6), t), *wall = get(pool, MIB(2), s);
    OK(galloc_free(own, t));
    for (int i = 0; i < BLOCKS; i++) p[i] = get(pool, MIB(2), s);
    for (int i = 2; i < BLOCKS; i++) { /* one free block, the oldest at its beginning */
        put(s, p[i], MIB(2), 1);
        OK(galloc_free(p[i], s));
    }
    EXPECT_EQ(held(pool), MIB(56));
    OK(cudaDeviceSynchronize());
    pass_frees(pool, 64, t);
    EXPECT_EQ(held(pool), MIB(30));
    for (int i = 2; i < BLOCKS; i++)
        EXPECT_EQ(info_of(p[i]).state, i < 15 ? GALLOC_STATE_FOREIGN : GALLOC_STATE_FREE);
    OK(galloc_free(p[0], s));
    OK(galloc_free(p[1], s));
    OK(galloc_free(wall, s));
    pool_end(pool);
    finish();
}

/* About 7 MiB are due. One free block has an old page of 2 MiB and behind it two younger ones of 4 MiB. Rows of pages
   are taken from the high end. Still only the last page and the old one go. */
TEST(a_collection_gives_back_no_more_than_is_due)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_config config = config_limit(MIB(24));
    config.gc_threshold = 0.5;
    config.growth = MIB(4);
    galloc_pool *pool = pool_new(&config);
    void *own = get(pool, MIB(8), t), *keep = get(pool, MIB(16), s);
    OK(galloc_pool_set_limit(pool, MIB(26))); /* leaves no room for a page of 4 MiB */
    char *old = get_used(pool, MIB(2), s, 1);
    OK(galloc_pool_set_limit(pool, MIB(56)));
    char *young = get_used(pool, MIB(8), s, 1);
    EXPECT(young == old + MIB(2));
    EXPECT_EQ(held(pool), MIB(34));
    OK(galloc_free(own, t));
    OK(galloc_free(old, s));
    OK(galloc_free(young, s));
    OK(cudaDeviceSynchronize());
    pass_frees(pool, 64, t);
    EXPECT_EQ(held(pool), MIB(28)); /* the threshold */
    EXPECT_EQ(info_of(old).state, GALLOC_STATE_FOREIGN);
    EXPECT_EQ(info_of(young).state, GALLOC_STATE_FREE);
    EXPECT_EQ(info_of(young + MIB(4)).state, GALLOC_STATE_FOREIGN);
    OK(galloc_free(keep, s));
    pool_end(pool);
    finish();
}

/* The threshold is a fraction of the lower limit, the device's included. */
TEST(the_threshold_goes_by_the_limit_of_the_device)
{
    for (int own = 0; own < 2; own++) {
        begin_still();
        cudaStream_t s = stream_new();
        galloc_config config = config_limit(own ? MIB(64) : SIZE_MAX);
        if (!own) config.device_limit = MIB(64);
        config.gc_threshold = 0.5;
        config.growth = MIB(2);
        config.lane_bytes = 0;
        galloc_pool *pool = pool_new(&config);
        void *p[24];
        for (int i = 0; i < 24; i++) p[i] = get(pool, MIB(2), s);
        for (int i = 0; i < 24; i++) OK(galloc_free(p[i], s));
        for (int i = 0; i < 400; i++) {
            OK(cudaDeviceSynchronize());
            OK(galloc_free(get(pool, KIB(4) * (size_t)(i % 5 + 1), s), s));
        }
        EXPECT(held(pool) <= MIB(32));
        EXPECT(stats_of(pool).collections > 0);
        pool_end(pool);
        finish();
    }
}

/* A page that is larger than what is due goes too. Otherwise a pool with large pages would stay above the threshold. */
TEST(a_page_larger_than_what_is_due_is_collected)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_config config = config_limit(MIB(250));
    config.gc_threshold = 0.5;
    config.growth = MIB(64);
    galloc_pool *pool = pool_new(&config);
    void *p[2], *keep = get(pool, MIB(3), t);
    for (int i = 0; i < 2; i++) p[i] = get(pool, MIB(60), s);
    for (int i = 0; i < 2; i++) OK(galloc_free(p[i], s));
    EXPECT(held(pool) > MIB(125));
    OK(cudaDeviceSynchronize());
    pass_frees(pool, 200, s);
    EXPECT(held(pool) <= MIB(125));
    OK(galloc_free(keep, t));
    pool_end(pool);
    finish();
}

/* Memory that was just created is young, though it was never used, and no free came since the last sample of time. */
TEST(what_was_just_reserved_is_no_idle_memory)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_collecting(GIB(1), 0, 30000000000);
    void *keep = get(pool, MIB(2), t);
    for (int i = 0; i < 12; i++) { /* one free for each sample */
        void *p = get(pool, MIB(2), s);
        now_ns += 5000000000;
        OK(galloc_free(p, s));
    }
    for (int i = 1; i <= 3; i++) {
        size_t before = held(pool);
        now_ns += 29000000000;
        OK(galloc_pool_reserve(pool, MIB(64) * (size_t)i));
        size_t made = held(pool) - before;
        now_ns += 2000000000;
        EXPECT(made >= MIB(32));
        pass_frees(pool, 20, s);
        EXPECT(held(pool) >= made);
    }
    OK(galloc_free(keep, t));
    pool_end(pool);
    finish();
}

/* An event on the legacy stream makes all blocking streams wait for each other. So a collection, which needs events,
   gets one there only if there is no other stream. */
TEST(a_collection_gets_an_event_of_the_legacy_stream_when_it_is_alone)
{
    for (int alone = 0; alone < 2; alone++) {
        begin_still();
        cudaStream_t s = alone ? cudaStreamLegacy : stream_new();
        galloc_pool *pool = pool_collecting(GIB(1), 0, 30000000000);
        void *keep = get(pool, MIB(2), s), *last = get(pool, MIB(2), cudaStreamLegacy);
        long records = sim_calls("cuEventRecord");
        pass_frees(pool, 20, s);
        OK(galloc_free(get(pool, MIB(40), cudaStreamLegacy), cudaStreamLegacy));
        for (int i = 0; i < 3; i++) {
            pass_frees(pool, 20, s);
            now_ns += 40000000000;
        }
        if (!alone) records = sim_calls("cuEventRecord");
        OK(galloc_free(last, cudaStreamLegacy));
        EXPECT_EQ(sim_calls("cuEventRecord") > records, alone);
        OK(galloc_free(keep, s));
        sim_run(-1);
        pool_end(pool);
        if (!alone) stream_end(s);
        finish();
    }
}

/* One of the per-thread stream it gets beside others, too. */
TEST(a_collection_gets_an_event_of_a_per_thread_stream)
{
    begin();
    cudaStream_t s = stream_new(), t = cudaStreamPerThread;
    galloc_pool *pool = pool_collecting(GIB(16), 0, 20000000);
    void *large = get(pool, GIB(4), s), *q = get(pool, MIB(3), s), *kept = get(pool, 512, t), *p = get(pool, MIB(8), t);
    OK(galloc_free(q, s));
    OK(galloc_free(p, t));
    OK(cudaDeviceSynchronize());
    for (int i = 0; i < 200; i++) {
        OK(galloc_free(get(pool, MIB(3), s), s));
        if (i % 40 == 39) OK(galloc_free(get(pool, 512, t), t));
        now_ns += 2000000;
    }
    EXPECT(held(pool) <= GIB(4) + MIB(8));
    OK(galloc_free(kept, t));
    OK(galloc_free(large, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

TEST(idle_memory_goes_by_its_age)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_collecting(GIB(1), 0, 30000000000);
    void *p = get(pool, MIB(40), s), *q = get(pool, MIB(20), s), *keep = get(pool, MIB(2), s);
    long waits;
    pass_frees(pool, 1, t);
    OK(galloc_free(p, s));
    for (int i = 0; i < 20; i++) {
        now_ns += 1000000000;
        pass_frees(pool, 2, t);
    }
    OK(galloc_free(q, s));
    OK(cudaDeviceSynchronize());
    waits = waiting_calls();
    EXPECT(held(pool) >= MIB(62));
    now_ns += 8000000000; /* 28 s */
    pass_frees(pool, 10, t);
    EXPECT(held(pool) >= MIB(62));
    EXPECT_EQ(stats_of(pool).collections, 0);
    now_ns += 10000000000; /* 38 s, but only 18 s since the second one was freed */
    pass_frees(pool, 10, t);
    EXPECT(held(pool) <= MIB(62) - MIB(40) + MIB(6));
    EXPECT(stats_of(pool).collections >= 1);
    EXPECT(stats_of(pool).collected_bytes >= MIB(40) - MIB(6));
    EXPECT(held(pool) >= MIB(22));
    for (int i = 0; i < 20; i++) {
        now_ns += 1000000000;
        pass_frees(pool, 2, t);
    }
    EXPECT(held(pool) <= MIB(10));
    EXPECT_EQ(waiting_calls(), waits);
    OK(galloc_free(keep, s));
    pool_end(pool);
    finish();
}

/* Threads read the clock before they take turns: one that comes late is not taken for one from far ahead. */
TEST(a_clock_that_goes_back_makes_nothing_old)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_collecting(GIB(1), 0, 30000000000);
    void *keep = get(pool, MIB(2), s);
    now_ns += 100000000000;
    pass_frees(pool, 10, t);
    OK(galloc_free(get(pool, MIB(40), s), s));
    OK(cudaDeviceSynchronize());
    now_ns += 5000000000;
    pass_frees(pool, 10, t);
    size_t before = held(pool);
    now_ns -= 1000;
    pass_frees(pool, 50, t);
    EXPECT_EQ(stats_of(pool).collections, 0);
    EXPECT_EQ(held(pool), before);
    OK(galloc_free(keep, s));
    pool_end(pool);
    finish();
}

/* The call that is to give back what is idle meets a sticky error before: the driver would refuse to take it back. */
TEST(nothing_goes_by_its_age_after_a_sticky_error)
{
    enum { FREES = 40 };
    for (int n = 0; n < FREES; n++) {
        begin();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = pool_collecting(GIB(1), 0, 30000000000);
        void *some[FREES];
        for (int i = 0; i < FREES; i++) some[i] = get(pool, MIB(2), t);
        OK(galloc_free(get(pool, MIB(40), s), s));
        OK(cudaDeviceSynchronize());
        for (int i = 0; i < 20; i++) {
            now_ns += 1000000000;
            pass_frees(pool, 2, t);
        }
        now_ns += 40000000000;
        for (int i = 0; i < n; i++) OK(galloc_free(some[i], t));
        long calls = memory_calls();
        inside_ask_for_event(pool, stream_id(t));
        sim_fail("cuEventRecord", 1, 0, cudaErrorIllegalAddress);
        OK(galloc_free(some[n], t));
        EXPECT_EQ(sim_failed(), 1);
        sim_fail_clear();
        EXPECT_EQ(memory_calls(), calls);
        EXPECT_EQ(stats_of(pool).quarantined, 0);
        OK(cudaDeviceReset());
        (void)cudaGetLastError();
        for (int i = n + 1; i < FREES; i++) OK(galloc_free(some[i], 0));
        pool_end(pool);
        finish();
    }
}

static galloc_pool *ends;

static void *end_and_reset(void *unused)
{
    OK(galloc_pool_destroy(ends));
    OK(cudaDeviceReset());
    return unused;
}

static void end_meanwhile(void)
{
    pthread_t thread;
    EXPECT_EQ(pthread_create(&thread, NULL, end_and_reset, NULL), 0);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
    ends = NULL;
}

/* Before the last free looks for what is due, another thread ends the pool and resets the device: nothing is collected
   then, and no context is retained. */
TEST(a_pool_that_ends_meanwhile_collects_nothing)
{
    enum { MOST = 24 };
    int times = 0;
    for (int n = 1; n < MOST; n++) {
        begin_still();
        cudaStream_t s = stream_new();
        galloc_config config = galloc_config_default();
        void *p[MOST];
        config.gc_age = 1000000000;
        config.lane_bytes = 0;
        ends = pool_new(&config);
        for (int i = 0; i <= n; i++) p[i] = get(ends, MIB(1), s);
        for (int i = 0; i < n; i++) {
            OK(galloc_free(p[i], s));
            if (i < 4) now_ns += 200000000;
        }
        now_ns += 10000000000;
        in_the_clock = end_meanwhile;
        OK(galloc_free(p[n], s));
        in_the_clock = NULL;
        times += !ends;
        if (ends) pool_end(ends);
        finish();
    }
    EXPECT(times > 0);
}

/* What has gone by its age is not due again: later frees make no more calls than before. */
TEST(nothing_is_due_for_its_age_twice)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = galloc_config_default();
    config.gc_age = 1000000000;
    config.lane_bytes = 0;
    galloc_pool *pool = pool_new(&config);
    void *p = get(pool, MIB(20), s), *keep = get(pool, MIB(3), s);
    long calls[2];
    OK(galloc_free(p, s));
    for (int part = 0; part < 2; part++) { /* before it is old, and after it has gone */
        calls[part] = sim_calls(NULL);
        for (int i = 0; i < 1600; i++) OK(galloc_free(get(pool, 1000, s), s));
        calls[part] = sim_calls(NULL) - calls[part];
        for (int i = 0; i < 40; i++) {
            now_ns += 200000000;
            OK(galloc_free(get(pool, 1000, s), s));
        }
    }
    EXPECT_EQ(stats_of(pool).collections, 1);
    EXPECT(calls[1] <= calls[0] + 100);
    OK(galloc_free(keep, s));
    pool_end(pool);
    finish();
}

/* What goes by its age and what gc_threshold demands go in one collection. */
TEST(a_collection_for_two_reasons_is_one)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_config config = config_limit(MIB(100));
    config.gc_age = 1000000000;
    config.gc_threshold = 0.6;
    config.lane_bytes = 0;
    galloc_pool *pool = pool_new(&config);
    void *keep = get(pool, MIB(28) - KIB(64), s); /* what is small finds room behind it */
    void *p = get(pool, MIB(4), s), *wall = get(pool, MIB(2), t), *q = get(pool, MIB(20), s);
    OK(galloc_free(p, s));
    for (int i = 0; i < 9; i++) {
        now_ns += 100000000;
        for (int j = 0; j < 200; j++) OK(galloc_free(get(pool, 1000, s), s));
    }
    OK(galloc_free(q, s));
    for (int j = 0; j < 200; j++) OK(galloc_free(get(pool, 1000, s), s));
    sim_run(-1);
    OK(galloc_pool_trim(pool, SIZE_MAX, NULL)); /* which events are complete is known now */
    EXPECT_EQ(stats_of(pool).collections, 0);
    now_ns += 500000000; /* p is old, and q is not */
    OK(galloc_pool_set_limit(pool, MIB(80)));
    for (int i = 0; i < 1000 && !stats_of(pool).collections; i++) OK(galloc_free(get(pool, 1000, s), s));
    EXPECT_EQ(stats_of(pool).collections, 1);
    EXPECT(stats_of(pool).collected_bytes > MIB(4));
    OK(galloc_free(keep, s));
    OK(galloc_free(wall, t));
    pool_end(pool);
    finish();
}

/* Steady work looks at the clock all the time, and what it does not use goes by its age, soon after that. */
TEST(idle_memory_goes_beside_steady_small_work)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_collecting(GIB(1), 0, 30000000000);
    pass_frees(pool, 1, t);
    OK(galloc_free(get(pool, MIB(40), s), s));
    OK(cudaDeviceSynchronize());
    for (int i = 0; i < 3000; i++) { /* 300 s */
        pass_frees(pool, 4, t);
        if (i < 290) EXPECT(held(pool) >= MIB(40));
        if (i > 360) EXPECT(held(pool) <= MIB(10));
        now_ns += 100000000;
    }
    EXPECT(stats_of(pool).collected_bytes >= MIB(38));
    EXPECT(stats_of(pool).collections <= 8);
    pool_end(pool);
    finish();
}

/* One stream alone records no events, but for a collection. */
TEST(one_stream_alone_is_collected_too)
{
    for (int how = 0; how < 4; how++) {
        begin();
        cudaStream_t s = how & 1 ? stream_new() : cudaStreamLegacy;
        galloc_pool *pool;
        if (how & 2) pool = pool_collecting(GIB(1), 0, 1000000000);
        else pool = pool_collecting(MIB(256), 0.25, UINT64_MAX);
        long waits = waiting_calls();
        OK(galloc_free(get(pool, MIB(200), s), s));
        for (int i = 0; i < 60; i++) {
            void *p = get(pool, MIB(24), s), *q = get(pool, MIB(30), s);
            now_ns += 100000000;
            OK(galloc_free(p, s));
            OK(galloc_free(q, s));
        }
        EXPECT(held(pool) <= MIB(64));
        EXPECT(stats_of(pool).marks < 60);
        EXPECT_EQ(waiting_calls(), waits);
        pool_end(pool);
        finish();
    }
}

/* A block that comes and goes at the edge of a large free one does not make that young. */
TEST(use_beside_an_idle_page_does_not_keep_it)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_collecting(GIB(1), 0, 1000000000);
    OK(galloc_free(get(pool, MIB(4), t), t));
    OK(galloc_free(get(pool, MIB(200), s), s));
    OK(cudaDeviceSynchronize());
    for (int i = 0; i < 40; i++) {
        now_ns += 100000000;
        pass_frees(pool, 2, s);
    }
    EXPECT(held(pool) <= MIB(12));
    pool_end(pool);
    finish();
}

/* Nothing is created again of what is collected: then collections come as often as before. */
TEST(collections_of_what_is_not_created_again_stay_frequent)
{
    enum { KEPT = 24 };
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_collecting(MIB(64), 0.25, UINT64_MAX);
    void *p[KEPT];
    for (int i = 0; i < KEPT; i++) p[i] = get(pool, MIB(2), s);
    pass_frees(pool, 1, t);
    for (int i = 0; i < KEPT; i++) {
        OK(galloc_free(p[i], s));
        OK(cudaDeviceSynchronize());
        pass_frees(pool, 60, t);
    }
    EXPECT(held(pool) <= MIB(16));
    pool_end(pool);
    finish();
}

/* A hundred times all blocks come and go, with a rest before each collection. Returns the number of collections. */
static long breathe(galloc_pool *pool, cudaStream_t s, cudaStream_t t, uint64_t rest_ns)
{
    long before = (long)stats_of(pool).collections;
    for (int breath = 0; breath < 100; breath++) {
        void *p[BLOCKS];
        for (int i = 0; i < BLOCKS; i++) p[i] = get(pool, MIB(2), s);
        for (int i = 0; i < BLOCKS; i++) OK(galloc_free(p[i], s));
        OK(cudaDeviceSynchronize());
        now_ns += rest_ns;
        pass_frees(pool, 40, t);
    }
    return (long)stats_of(pool).collections - before;
}

/* What is collected and at once created again is collected less and less often. */
TEST(a_program_that_breathes_is_let_breathe)
{
    long collections[2];
    for (int slow = 0; slow < 2; slow++) {
        begin();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = pool_collecting(MIB(64), 0.5, UINT64_MAX);
        collections[slow] = breathe(pool, s, t, slow ? 60000000000 : 0);
        pool_end(pool);
        finish();
    }
    EXPECT(collections[0] >= 2 && collections[0] < 20);
    EXPECT(collections[1] > 60);
}

/* Once the program breathes slowly, the rests become shorter again. */
TEST(collections_come_often_again_after_fast_breaths)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_collecting(MIB(64), 0.5, UINT64_MAX);
    EXPECT(breathe(pool, s, t, 0) < 20);
    (void)breathe(pool, s, t, 60000000000); /* begins within a long rest */
    EXPECT(breathe(pool, s, t, 60000000000) > 60);
    pool_end(pool);
    finish();
}

/* Work that is not done, and what a graph owns, is no collection's. */
TEST(what_is_not_done_with_is_not_collected)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_collecting(MIB(64), 0.25, 1000000000);
    long waits = waiting_calls();
    OK(galloc_free(get(pool, MIB(2), t), t));
    void *p = get(pool, MIB(40), s);
    put(s, p, MIB(40), 1);
    OK(galloc_free(p, s));
    now_ns += 10000000000;
    pass_frees(pool, 100, t);
    now_ns += 10000000000;
    pass_frees(pool, 100, t);
    EXPECT(held(pool) >= MIB(40));
    EXPECT_EQ(sim_pending() > 0, 1);
    EXPECT_EQ(waiting_calls(), waits);
    sim_run(-1);
    pass_frees(pool, 100, t);
    EXPECT(held(pool) <= MIB(16));
    EXPECT_EQ(waiting_calls(), waits);
    pool_end(pool);
    finish();
}

TEST(graphs_keep_their_memory_from_collections)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_collecting(MIB(64), 0.25, 1000000000);
    cudaGraph_t graph = NULL;
    void *p;
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    p = get(pool, MIB(40), s);
    put(s, p, MIB(40), 1);
    OK(galloc_free(p, s));
    pass_frees(pool, 100, t); /* a collection beside it does not break the capture */
    OK(cudaStreamEndCapture(s, &graph));
    now_ns += 10000000000;
    pass_frees(pool, 100, t);
    EXPECT(held(pool) >= MIB(40));
    OK(cudaGraphDestroy(graph));
    pass_frees(pool, 100, t);
    now_ns += 10000000000;
    pass_frees(pool, 100, t);
    EXPECT(held(pool) <= MIB(16));
    EXPECT_EQ(sim_findings(SIM_CAPTURE_BROKEN), 0);
    pool_end(pool);
    finish();
}

/* Above the threshold pages move to where they are wanted rather than that new ones come. */
TEST(above_the_threshold_pages_move)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = config_limit(MIB(100));
    config.overhead = 1;
    config.gc_threshold = 0.5;
    config.growth = MIB(2);
    galloc_pool *pool = pool_new(&config);
    void *p[26];
    for (int i = 0; i < 26; i++) p[i] = get(pool, MIB(2), s);
    for (int i = 0; i < 26; i += 2) OK(galloc_free(p[i], s));
    void *q = get(pool, MIB(20), s);
    EXPECT_EQ(held(pool), MIB(52));
    EXPECT(stats_of(pool).moves >= 9);
    OK(galloc_free(q, s));
    for (int i = 1; i < 26; i += 2) OK(galloc_free(p[i], s));
    pool_end(pool);
    finish();
}

/* What a request that misses can use is not given back before it. */
TEST(a_collection_leaves_what_is_asked_for)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_collecting(MIB(130), 0.5, UINT64_MAX);
    void *p[34];
    inside_never_look_for_idle(pool);
    OK(galloc_free(get(pool, MIB(2), t), t));
    for (int i = 0; i < 34; i++) p[i] = get(pool, MIB(2), s);
    for (int i = 0; i < 34; i += 2) OK(galloc_free(p[i], s));
    OK(cudaDeviceSynchronize());
    long created = sim_calls("cuMemCreate");
    void *q = get(pool, MIB(32), s);
    EXPECT_EQ(sim_calls("cuMemCreate"), created);
    EXPECT_EQ(held(pool), MIB(68));
    EXPECT_EQ(stats_of(pool).collected_bytes, MIB(2));
    OK(galloc_free(q, s));
    for (int i = 1; i < 34; i += 2) OK(galloc_free(p[i], s));
    pool_end(pool);
    finish();
}

/* PyTorch's test_garbage_collect_expandable. */
TEST(collection_and_pages_go_together)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_config config = config_limit(MIB(120)), fixed = config_fixed();
    config.gc_threshold = 0.5;
    fixed.memory_limit = MIB(120);
    fixed.gc_threshold = 0.5;
    galloc_pool *pool = pool_new(&config), *plain = pool_new(&fixed);
    void *p = get(pool, MIB(40), s), *q = get(pool, MIB(40), t), *r = get(plain, MIB(40), s), *u;
    OK(galloc_free(p, s));
    OK(galloc_free(q, t));
    OK(galloc_free(r, s));
    u = get(pool, MIB(80), s);
    put(s, u, MIB(80), 1);
    OK(galloc_free(u, s));
    OK(galloc_free(get(plain, MIB(80), s), s));
    pool_end(pool);
    pool_end(plain);
    finish();
}

/* One block at a time, each of another size: every free goes to the stream's cache, and the next allocation, which the
   cache cannot serve, is where idle pages are found. */
TEST(a_stream_with_one_block_at_a_time_collects_too)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_collecting(SIZE_MAX, 0.9, 100000000);
    OK(galloc_free(get(pool, MIB(200), s), s));
    OK(cudaDeviceSynchronize());
    for (size_t i = 0; i < 300; i++) {
        now_ns += 1000000;
        OK(galloc_free(get(pool, KIB(64) + i * 512, s), s));
    }
    EXPECT(held(pool) <= MIB(4));
    EXPECT(stats_of(pool).collections >= 1);
    pool_end(pool);
    finish();
}

TEST(fixed_segments_are_not_collected)
{
    begin();
    cudaStream_t s = stream_new();
    char message[256];
    galloc_config config = config_fixed();
    config.memory_limit = MIB(100);
    config.gc_threshold = 0.25;
    config.gc_age = 1000000000;
    galloc_pool *pool = pool_new(&config);
    OK(galloc_free(get(pool, MIB(80), s), s));
    now_ns += 100000000000;
    pass_frees(pool, 200, s);
    EXPECT_EQ(sim_calls("cuMemFree"), 0);
    EXPECT_EQ(stats_of(pool).collections, 0);
    pool_end(pool);
    OK(galloc_config_parse(&config, "expandable_segments:False,gc_threshold:0.5,gc_age:5s", message, sizeof message));
    EXPECT(strstr(message, "gc_threshold") && strstr(message, "gc_age"));
    OK(galloc_config_parse(&config, "expandable_segments:True,gc_threshold:0.5,gc_age:5s", message, sizeof message));
    EXPECT_EQ(message[0], 0);
    finish();
}

/* A call that fails says why it failed itself, not why a collection could not be made by the way. */
TEST(a_collection_that_fails_is_not_what_a_call_fails_for)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_collecting(MIB(64), 0.5, UINT64_MAX);
    void *p = get(pool, MIB(48), s);
    sim_fail("cuCtxGetCurrent", 1, 1, cudaErrorUnknown);
    log_lines = 0;
    EXPECT_EQ(galloc_free((char *)p + 512, s), cudaErrorInvalidDevicePointer);
    EXPECT(sim_failed() > 0);
    sim_fail_clear();
    EXPECT_EQ(log_lines, 1);
    EXPECT(strstr(galloc_last_message(), "inside the block") != NULL);
    OK(galloc_free(p, s));
    pool_end(pool);
    finish();
}

/* ---- giving back by hand ----------------------------------------------------------------------------------------- */

/* Bytes of memory at so many addresses from ptr on. */
static size_t mapped(char *ptr, size_t bytes)
{
    size_t there = 0;
    for (size_t at = 0; at < bytes; at += MIB(2))
        there += info_of(ptr + at).state == GALLOC_STATE_FOREIGN ? 0 : MIB(2);
    return there;
}

/* A part from the middle of a free block: what is left of it on both sides is as old as before. A trim takes older
   blocks first. */
TEST(the_rest_of_a_block_is_as_old_as_it_was)
{
    enum { MANY = 100 };
    static const int middles[] = {1, 12, 50, 95};
    for (int k = 0; k < 4; k++) {
        int middle = middles[k], gone = middle > 10 ? 10 : 1;
        begin();
        galloc_config config = galloc_config_default();
        config.growth = MIB(2);
        galloc_pool *pool = pool_new(&config);
        cudaStream_t s = stream_new();
        char *p[MANY], *part;
        void *wall[MANY];
        galloc_request request = {.bytes = MIB(9), .alignment = MIB(8), .stream = s, .pool = pool};
        for (int i = 0; i < MANY; i++) {
            p[i] = get(pool, i == middle ? MIB(24) : MIB(4), s);
            wall[i] = get(pool, MIB(2), s);
        }
        for (int i = 0; i < MANY; i++) OK(galloc_free(p[i], s));
        OK(galloc_pool_trim(pool, held(pool) - MIB(2), NULL)); /* from now on the work is known to be complete */
        EXPECT_EQ(mapped(p[0], MIB(4)), MIB(2));
        OK(galloc_alloc((void **)&part, &request));
        EXPECT(part >= p[middle] && part + MIB(9) <= p[middle] + MIB(24));
        OK(galloc_pool_trim(pool, held(pool) - (size_t)gone * MIB(4) + MIB(2), NULL));
        for (int i = 0; i < gone; i++) EXPECT_EQ(mapped(p[i], MIB(4)), 0);
        EXPECT_EQ(mapped(p[middle], MIB(24)), MIB(24));
        OK(galloc_free(part, s));
        for (int i = 0; i < MANY; i++) OK(galloc_free(wall[i], s));
        pool_end(pool);
        finish();
    }
}

TEST(a_sync_point_leaves_the_release_threshold)
{
    FOR_BOTH_KINDS (kind) {
        begin();
        cudaStream_t s = stream_new();
        galloc_config config = config_of_kind(*kind);
        size_t gone = 1;
        config.growth = *kind ? MIB(2) : 0;
        config.release_threshold = MIB(60);
        galloc_pool *pool = pool_new(&config);
        void *p = get(pool, MIB(20), s), *q = get(pool, MIB(20), s), *r = get(pool, MIB(60), s);
        OK(galloc_pool_sync_point(pool, &gone));
        EXPECT_EQ(gone, 0);
        OK(galloc_free(p, s));
        OK(galloc_free(q, s));
        OK(cudaStreamSynchronize(s));
        long blocking = sim_blocking_calls();
        OK(galloc_pool_sync_point(pool, &gone));
        EXPECT_EQ(gone, MIB(40));
        EXPECT_EQ(held(pool), MIB(60));
        EXPECT_EQ(sim_blocking_calls(), blocking);
        OK(galloc_free(r, s));
        OK(galloc_pool_sync_point(pool, NULL));
        EXPECT_EQ(held(pool), MIB(60));
        pool_end(pool);
        finish();
    }
}

TEST(a_sync_point_keeps_all_by_default)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    size_t gone = 1;
    OK(galloc_free(get(pool, MIB(60), s), s));
    OK(cudaStreamSynchronize(s));
    OK(galloc_pool_sync_point(pool, &gone));
    EXPECT_EQ(gone, 0);
    EXPECT_EQ(held(pool), MIB(60));
    EXPECT_EQ(galloc_pool_sync_point(NULL, &gone), cudaErrorInvalidValue);
    pool_end(pool);
    finish();
}

/* What an event says is not done is not waited for, though the program says that it has synchronised. */
TEST(a_sync_point_does_not_wait_for_known_work)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_config config = galloc_config_default();
    config.release_threshold = 0;
    galloc_pool *pool = pool_new(&config);
    size_t gone = 0;
    OK(galloc_free(get(pool, MIB(2), t), t));
    void *p = get(pool, MIB(40), s), *q = get(pool, MIB(20), t);
    put(s, p, MIB(40), 1);
    put(t, q, MIB(20), 1);
    OK(galloc_free(p, s));
    OK(galloc_free(q, t));
    sim_hold(s, 1);
    OK(cudaStreamSynchronize(t));
    long blocking = sim_blocking_calls();
    OK(galloc_pool_sync_point(pool, &gone));
    EXPECT(gone >= MIB(20) && held(pool) >= MIB(40));
    EXPECT_EQ(sim_blocking_calls(), blocking);
    EXPECT(sim_pending() > 0);
    sim_hold(s, 0);
    OK(cudaStreamSynchronize(s));
    OK(galloc_pool_sync_point(pool, &gone));
    EXPECT_EQ(held(pool), 0);
    pool_end(pool);
    finish();
}

TEST(trim_says_how_much_went)
{
    FOR_BOTH_KINDS (kind) {
        begin();
        cudaStream_t s = stream_new();
        galloc_config config = config_of_kind(*kind);
        size_t gone = 1;
        galloc_pool *pool = pool_new(&config);
        void *p = get(pool, MIB(20), s), *q = get(pool, MIB(20), s);
        put(s, q, MIB(20), 1);
        OK(galloc_pool_trim(pool, 0, &gone));
        EXPECT_EQ(gone, 0);
        OK(galloc_free(q, s));
        OK(galloc_pool_trim(pool, MIB(40), &gone));
        EXPECT_EQ(gone, 0);
        OK(galloc_pool_trim(pool, 0, &gone));
        EXPECT_EQ(gone, MIB(20));
        EXPECT_EQ(galloc_pool_trim(NULL, 0, &gone), cudaErrorInvalidValue);
        EXPECT_EQ(gone, 0);
        OK(galloc_free(p, s));
        gone = 0;
        sim_fail(*kind ? "cuMemRelease" : "cuMemFree", 1, 0, (int)CUDA_ERROR_UNKNOWN);
        (void)galloc_pool_trim(pool, 0, &gone);
        sim_fail_clear();
        EXPECT_EQ(gone + held(pool), MIB(20));
        pool_end(pool);
        finish();
    }
}

/* So does a trim for what the driver would not take before. */
TEST(trim_says_what_the_driver_takes_at_last)
{
    FOR_BOTH_KINDS (kind) {
        begin();
        cudaStream_t s = stream_new();
        galloc_config config = config_of_kind(*kind);
        size_t gone = 0;
        galloc_pool *pool = pool_new(&config);
        OK(galloc_free(get(pool, MIB(20), s), s));
        sim_fail(*kind ? "cuMemRelease" : "cuMemFree", 1, 1, (int)CUDA_ERROR_UNKNOWN);
        (void)galloc_pool_trim(pool, 0, &gone);
        sim_fail_clear();
        EXPECT_EQ(gone, 0);
        EXPECT_EQ(held(pool), MIB(20));
        OK(galloc_pool_trim(pool, 0, &gone));
        EXPECT_EQ(gone, MIB(20));
        pool_end(pool);
        finish();
    }
}

/* Just as much as is done with may go: nobody waits for the rest. */
TEST(trim_does_not_wait_once_enough_has_gone)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_config config = galloc_config_default();
    size_t gone = 0;
    config.growth = MIB(2);
    galloc_pool *pool = pool_new(&config);
    void *p = get(pool, MIB(8), s), *q = get(pool, MIB(8), t);
    put(s, p, MIB(8), 1);
    OK(galloc_free(p, s));
    OK(galloc_free(q, t));
    OK(cudaStreamSynchronize(t));
    size_t held = stats_of(pool).reserved.current;
    long waits = sim_blocking_calls();
    OK(galloc_pool_trim(pool, held - MIB(8), &gone));
    EXPECT_EQ(gone, MIB(8));
    EXPECT_EQ(sim_blocking_calls(), waits);
    EXPECT(sim_pending() > 0);
    OK(galloc_pool_trim(pool, 0, NULL));
    EXPECT_EQ(sim_pending(), 0);
    pool_end(pool);
    finish();
}

/* Idle memory of other pools is given back for what the request lacks, and not for that again from each pool. */
TEST(several_pools_give_together_what_one_request_lacks)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = config_limit(SIZE_MAX);
    config.device_limit = MIB(128);
    config.growth = MIB(2);
    galloc_pool *asks = pool_new(&config), *large = pool_new(&config), *small = pool_new(&config);
    OK(galloc_pool_reserve(small, MIB(16)));
    OK(galloc_pool_reserve(large, MIB(64)));
    void *p = get(asks, MIB(48), s), *q = get(asks, MIB(32), s);
    size_t left = stats_of(small).reserved.current + stats_of(large).reserved.current;
    EXPECT(left <= MIB(48) && left >= MIB(44));
    OK(galloc_free(p, s));
    OK(galloc_free(q, s));
    pool_end(small);
    pool_end(large);
    pool_end(asks);
    finish();
}

/* A collection that fails after a free has succeeded says nothing to the program. */
TEST(a_collection_that_fails_leaves_the_last_message)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_collecting(GIB(1), 0, 1000000);
    enum { N = 40 };
    void *p[N];
    for (int i = 0; i < N; i++) p[i] = get(pool, MIB(3), s);
    EXPECT_EQ(galloc_malloc(NULL, 1, s), cudaErrorInvalidValue);
    for (int i = 0; i < N; i++) {
        now_ns += 10000000;
        sim_fail("cuCtxGetId", 1, 1, cudaErrorUnknown);
        OK(galloc_free(p[i], s));
        sim_fail_clear();
        EXPECT(!strncmp(galloc_last_message(), "galloc_malloc: ptr", 18));
    }
    pool_end(pool);
    finish();
}

/* Nor does it hide why a growth has failed, whichever look at the context it is that fails. */
TEST(a_collection_that_fails_hides_no_error)
{
    enum { N = 40 };
    long failed = 0;
    for (long call = 1; call < 40; call++) {
        begin();
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_collecting(MIB(64), 0, 1000000);
        void *p = get_growable(pool, MIB(4), MIB(128), s), *held = get(pool, MIB(4), s), *some[N];
        for (int i = 0; i < 100; i++) {
            OK(galloc_free(get(pool, MIB(3), s), s));
            now_ns += 10000000;
        }
        now_ns += 1000000000;
        for (int i = 0; i < N; i++) some[i] = get(pool, 512 * (size_t)(1 + i % 8), s);
        for (int i = 0; i < N; i++) OK(galloc_free(some[i], s));
        now_ns += 1000000000;
        EXPECT_EQ(galloc_malloc(NULL, 1, s), cudaErrorInvalidValue);
        sim_fail("cuCtxGetId", call, 1, cudaErrorUnknown);
        EXPECT(galloc_resize(p, MIB(62), s) != cudaSuccess);
        EXPECT(!strncmp(galloc_last_message(), "galloc_resize: ", 15));
        failed += sim_failed();
        sim_fail_clear();
        OK(galloc_free(p, s));
        OK(galloc_free(held, s));
        stream_end(s);
        pool_end(pool);
        finish();
    }
    EXPECT(failed > 3);
}

/* A free that finds the pages in the hands of another call leaves what is due to later frees, and waits for nobody. */
TEST(a_free_beside_a_call_that_changes_pages_collects_nothing)
{
    enum { FREES = 40 };
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_collecting(GIB(1), 0, 30000000000);
    void *some[2 * FREES];
    for (int i = 0; i < 2 * FREES; i++) some[i] = get(pool, MIB(2), t);
    OK(galloc_free(get(pool, MIB(40), s), s));
    OK(cudaDeviceSynchronize());
    for (int i = 0; i < 20; i++) {
        now_ns += 1000000000;
        pass_frees(pool, 2, t);
    }
    now_ns += 40000000000;
    long calls = memory_calls();
    inside_hold_paging(pool, 1);
    for (int i = 0; i < FREES; i++) OK(galloc_free(some[i], t));
    EXPECT_EQ(memory_calls(), calls);
    EXPECT(!inside_unlocked(pool));
    inside_hold_paging(pool, 0);
    EXPECT_EQ(stats_of(pool).collections, 0);
    OK(cudaDeviceSynchronize());
    for (int i = FREES; i < 2 * FREES; i++) OK(galloc_free(some[i], t));
    EXPECT(stats_of(pool).collections > 0);
    pool_end(pool);
    finish();
}

TEST_MAIN()
