/* test_limits.c - what a pool, and all pools of a device together, may hold: the limits are never passed, not for a
   moment and not by pools that grow at once; what is idle is given back by the settings' rules. The simulated device
   counts the bytes that are really taken. */

/* Time is what the test says. */
#define GALLOC_CLOCK() __atomic_load_n(&now_ns, __ATOMIC_RELAXED)
static unsigned long long now_ns;

#include "setup.h"

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
    OK(galloc_free(get(pool, MIB(32), s), s));
    pool_end(pool);
    finish();
}

/* ---- the limit that pools share ---------------------------------------------------------------------------------- */

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
    sim_options options = sim_defaults();
    options.devices = 2;
    begin_with(options);
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

TEST_MAIN()
