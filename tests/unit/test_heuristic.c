/* test_heuristic.c - strategy:heuristic: what it decides in clear cases, that it says why, how often it does, and that
   what it has found can be kept as a configuration. */

#include "setup.h"

#define BLOCKS 4096

static galloc_config heuristic(void)
{
    galloc_config config = galloc_config_default();
    config.strategy = GALLOC_STRATEGY_HEURISTIC;
    return config;
}

static galloc_config config_of(galloc_pool *pool)
{
    galloc_config config = galloc_config_default();
    OK(galloc_pool_config(pool, &config));
    return config;
}

static int decisions_of(galloc_pool *pool, galloc_decision *list)
{
    int count = -1;
    memset(list, 0, GALLOC_DECISIONS * sizeof *list);
    OK(galloc_pool_decisions(pool, list, GALLOC_DECISIONS, &count));
    EXPECT(count >= 0 && count <= GALLOC_DECISIONS);
    for (int i = 0; i < count; i++) EXPECT(list[i].reason && list[i].reason[0]);
    return count;
}

/* How many decisions give a reason with this text in it. */
static int decided(galloc_pool *pool, const char *text)
{
    galloc_decision list[GALLOC_DECISIONS];
    int count = decisions_of(pool, list), n = 0;
    for (int i = 0; i < count; i++) n += strstr(list[i].reason, text) != NULL;
    return n;
}

/* What is live and held at a decision lies between these bytes, but for the rest of a page that is held. */
static void expect_figures(galloc_pool *pool, int number, size_t least, size_t most)
{
    galloc_decision list[GALLOC_DECISIONS];
    if (!EXPECT(number < decisions_of(pool, list))) return;
    const galloc_decision *d = &list[number];
    EXPECT(d->live >= least && d->live <= d->held && d->held <= most + MIB(32));
    if (!EXPECT(d->live <= most)) printf("    %d: live %zu, held %zu\n", number, d->live, d->held);
}

/* Holds blocks until so much is live. */
static int load(galloc_pool *pool, void **block, size_t bytes, size_t all, cudaStream_t s)
{
    int n = 0;
    for (; n < BLOCKS && (size_t)n * bytes < all; n++) block[n] = get(pool, bytes, s);
    return n;
}

static void unload(void **block, int n, cudaStream_t s)
{
    for (int i = 0; i < n; i++)
        if (block[i]) OK(galloc_free(block[i], s));
}

/* Every second of n pages is freed, and blocks of two pages are wanted: with no overhead each takes two moves. */
static void shuffle(galloc_pool *pool, cudaStream_t s, int n)
{
    static void *block[BLOCKS], *pair[BLOCKS];
    for (int i = 0; i < n; i++) block[i] = get(pool, MIB(2), s);
    for (int i = 1; i < n; i += 2) {
        OK(galloc_free(block[i], s));
        block[i] = NULL;
    }
    for (int i = 0; i < n / 4; i++) pair[i] = get(pool, MIB(4), s);
    unload(pair, n / 4, s);
    unload(block, n, s);
}

TEST(a_program_that_only_grows_gets_larger_pages)
{
    static void *block[BLOCKS];
    galloc_config config = heuristic();
    galloc_decision list[GALLOC_DECISIONS];
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(&config), *plain;
    int n = load(pool, block, MIB(100), GIB(40), s);
    EXPECT_EQ(decisions_of(pool, list), 2);
    EXPECT_EQ(list[0].growth, MIB(128));
    EXPECT_EQ(list[1].growth, MIB(256));
    EXPECT(list[0].live >= GIB(12) && list[0].held >= list[0].live);
    EXPECT_EQ(decided(pool, "only grows"), 2);
    EXPECT_EQ(config_of(pool).growth, MIB(256));
    uint64_t created = stats_of(pool).driver.create;
    EXPECT(stats_of(pool).reserved.peak <= GIB(40) + GIB(40) / 50);
    unload(block, n, s);
    pool_end(pool);
    config.strategy = GALLOC_STRATEGY_CACHING;
    plain = pool_new(&config);
    n = load(plain, block, MIB(100), GIB(40), s);
    EXPECT(stats_of(plain).driver.create > created);
    EXPECT_EQ(decisions_of(plain, list), 0);
    unload(block, n, s);
    pool_end(plain);
    stream_end(s);
    finish();
}

/* However much the program holds, the strategy decides for pages of at most 256 MiB. */
TEST(pages_grow_to_at_most_256_mib)
{
    static void *block[BLOCKS];
    sim_options options = sim_defaults();
    options.memory = GIB(400);
    galloc_config config = heuristic();
    galloc_decision list[GALLOC_DECISIONS];
    begin_with(options);
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(&config);
    int n = load(pool, block, GIB(1) + MIB(3), GIB(150), s), count = decisions_of(pool, list);
    EXPECT(count > 0);
    for (int i = 0; i < count; i++) EXPECT(list[i].growth <= MIB(256));
    EXPECT_EQ(config_of(pool).growth, MIB(256));
    galloc_stats stats = stats_of(pool);
    for (int i = 0; i < GALLOC_PAGE_SIZES; i++) EXPECT(stats.pages[i].bytes <= stats.pages[i].count * MIB(256));
    unload(block, n, s);
    pool_end(pool);
    stream_end(s);
    finish();
}

TEST(pages_are_small_again_once_blocks_come_and_go)
{
    static void *block[BLOCKS];
    galloc_config config = heuristic();
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(&config);
    int n = load(pool, block, MIB(100), GIB(16), s);
    EXPECT_EQ(config_of(pool).growth, MIB(128));
    for (int i = 0; i + 2 < n; i += 4) {
        OK(galloc_free(block[i], s));
        OK(galloc_free(block[i + 2], s));
        block[i] = get(pool, MIB(200), s);
        block[i + 2] = NULL;
    }
    EXPECT_EQ(decided(pool, "come and go"), 1);
    EXPECT_EQ(config_of(pool).growth, 0);
    unload(block, n, s);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* Also where the program frees from its start, before it grows. */
TEST(pages_stay_small_where_blocks_have_come_and_gone_before)
{
    static void *block[BLOCKS];
    galloc_config config = heuristic();
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(&config);
    for (int i = 0; i < 100; i++) OK(galloc_free(get(pool, MIB(10 + i % 7 * 6), s), s));
    int n = load(pool, block, MIB(100), GIB(40), s);
    EXPECT_EQ(decided(pool, "only grows"), 0);
    EXPECT_EQ(config_of(pool).growth, 0);
    unload(block, n, s);
    pool_end(pool);
    stream_end(s);
    finish();
}

TEST(moves_that_go_on_buy_overhead)
{
    galloc_config config = heuristic();
    galloc_decision list[GALLOC_DECISIONS];
    begin();
    cudaStream_t s = stream_new();
    config.overhead = 0;
    galloc_pool *pool = pool_new(&config);
    shuffle(pool, s, 2048);
    int count = decisions_of(pool, list);
    EXPECT(count >= 1);
    EXPECT_EQ(decided(pool, "moves have cost"), count);
    for (int i = 1; i < count; i++) EXPECT(list[i].overhead > list[i - 1].overhead);
    EXPECT(config_of(pool).overhead > 0 && config_of(pool).overhead <= 1);
    EXPECT_EQ(log_lines, count);
    EXPECT(strstr(log_text, "heuristic: overhead") && strstr(log_text, "moves have cost"));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* What is held beyond the peak has been paid for, here 12 % that T still uses: one more is bought. */
TEST(overhead_is_bought_on_top_of_what_is_held)
{
    galloc_config config = heuristic();
    galloc_decision list[GALLOC_DECISIONS];
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    config.overhead = 0;
    config.reuse = GALLOC_REUSE_COMPLETED;
    galloc_pool *pool = pool_new(&config);
    OK(galloc_free(get_used(pool, MIB(512), t, 1), t));
    shuffle(pool, s, 2048);
    EXPECT(decisions_of(pool, list) >= 1);
    EXPECT_EQ(list[0].held, GIB(4) + MIB(512));
    EXPECT(list[0].overhead == 0.13);
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* A decision about the overhead leaves alone how pages grow. */
TEST(overhead_is_bought_without_another_growth)
{
    galloc_config config = heuristic();
    galloc_decision list[GALLOC_DECISIONS];
    begin();
    cudaStream_t s = stream_new();
    config.overhead = 0;
    config.growth = MIB(2);
    galloc_pool *pool = pool_new(&config);
    shuffle(pool, s, 2048);
    int count = decisions_of(pool, list), bought = decided(pool, "moves have cost");
    EXPECT(bought >= 1);
    EXPECT_EQ(count, bought);
    for (int i = 0; i < count; i++) EXPECT_EQ(list[i].growth, MIB(2));
    EXPECT_EQ(config_of(pool).growth, MIB(2));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* Under a limit that would soon put an end to it, no overhead is bought: live are 5/6 of the limit. */
TEST(no_overhead_is_bought_where_a_limit_leaves_no_room)
{
    for (int of_device = 0; of_device < 2; of_device++) {
        galloc_config config = heuristic();
        begin();
        cudaStream_t s = stream_new();
        config.overhead = 0;
        *(of_device ? &config.device_limit : &config.memory_limit) = MIB(4915);
        galloc_pool *pool = pool_new(&config);
        shuffle(pool, s, 2048);
        EXPECT(stats_of(pool).moves > 0);
        EXPECT_EQ(decided(pool, "moves have cost"), 0);
        EXPECT(config_of(pool).overhead == 0);
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

TEST(few_moves_decide_nothing)
{
    galloc_config config = heuristic();
    galloc_decision list[GALLOC_DECISIONS];
    begin();
    cudaStream_t s = stream_new();
    config.overhead = 0;
    galloc_pool *pool = pool_new(&config);
    shuffle(pool, s, 256);
    EXPECT(stats_of(pool).moves > 0);
    EXPECT_EQ(decisions_of(pool, list), 0);
    EXPECT_EQ(log_lines, 0);
    pool_end(pool);
    stream_end(s);
    finish();
}

TEST(near_the_limit_nothing_is_spared_and_the_limit_holds)
{
    static void *block[BLOCKS];
    for (int kind = 0; kind < 3; kind++) {
        galloc_config config = heuristic();
        int sized = kind == 1;
        begin();
        cudaStream_t s = stream_new();
        *(kind == 2 ? &config.device_limit : &config.memory_limit) = MIB(512);
        if (sized) config.growth = MIB(4);
        galloc_pool *pool = pool_new(&config);
        int n = load(pool, block, MIB(10), MIB(500), s);
        EXPECT_EQ(decided(pool, "nearly used up"), 1);
        EXPECT(config_of(pool).overhead == 0);
        EXPECT_EQ(config_of(pool).growth, 0);
        EXPECT(sim_physical(0) <= MIB(512));
        unload(block, n, s);
        OK(galloc_pool_trim(pool, 0, NULL));
        n = load(pool, block, MIB(10), sized ? MIB(40) : MIB(100), s); /* 40: before "blocks come and go" */
        EXPECT_EQ(decided(pool, "memory again"), 1);
        expect_figures(pool, 0, MIB(400), MIB(500)); /* what is live and held at the decision, not at any other time */
        expect_figures(pool, 1, MIB(10), sized ? MIB(40) : MIB(100));
        EXPECT(config_of(pool).overhead == 0.02);
        EXPECT_EQ(config_of(pool).growth, config.growth);
        EXPECT(stats_of(pool).reserved.peak <= MIB(512));
        unload(block, n, s);
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

TEST(a_device_that_refuses_is_pressure)
{
    galloc_config config = heuristic();
    void *ptr = NULL;
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(&config);
    void *small = get(pool, MIB(8), s);
    sim_fail("cuMemCreate", 1, 1, CUDA_ERROR_OUT_OF_MEMORY);
    EXPECT_EQ(galloc_pool_malloc(pool, &ptr, MIB(64), s), cudaErrorMemoryAllocation);
    sim_fail_clear();
    EXPECT_EQ(decided(pool, "no more memory"), 1);
    EXPECT_EQ(log_lines, 1); /* of the failure */
    OK(galloc_free(small, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* A device that refuses again is no device that has memory again, however little of it the pool holds. */
TEST(a_device_that_refuses_twice_stays_under_pressure)
{
    galloc_config config = heuristic();
    galloc_decision list[GALLOC_DECISIONS];
    void *ptr = NULL;
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(&config);
    void *small = get(pool, MIB(8), s);
    sim_fail("cuMemCreate", 1, 1, CUDA_ERROR_OUT_OF_MEMORY);
    for (int i = 0; i < 3; i++) {
        EXPECT_EQ(galloc_pool_malloc(pool, &ptr, MIB(64), s), cudaErrorMemoryAllocation);
        EXPECT_EQ(decisions_of(pool, list), 1);
        EXPECT(config_of(pool).overhead == 0);
    }
    sim_fail_clear();
    OK(galloc_free(small, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* The device refuses, and what the quarantine keeps serves: the call that had to shrink it ends with memory enough. */
TEST(a_quarantine_that_gives_way_ends_the_pressure)
{
    galloc_config config = heuristic();
    galloc_decision list[GALLOC_DECISIONS];
    sim_options options = sim_defaults();
    void *outside = NULL;
    options.memory = MIB(64);
    begin_with(options);
    OK(galloc_config_parse(&config, "debug:quarantine,quarantine_bytes:32M", NULL, 0));
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(&config);
    OK(cudaMalloc(&outside, MIB(40)));
    void *p = get(pool, MIB(16), s), *live = get(pool, 512, s);
    OK(galloc_free(p, s));
    p = get(pool, MIB(16), s);
    int count = decisions_of(pool, list);
    EXPECT_EQ(count, 2);
    EXPECT_EQ(decided(pool, "no more memory"), 1);
    EXPECT_EQ(decided(pool, "there is memory again"), 1);
    EXPECT(count > 0 && list[count - 1].overhead > 0);
    OK(galloc_free(p, s));
    OK(galloc_free(live, s));
    OK(cudaFree(outside));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* A call that fails and decides something tells of the failure. */
TEST(an_error_is_told_rather_than_a_decision)
{
    galloc_config config = heuristic(), other = galloc_config_default();
    void *p = NULL;
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(&config);
    void *most = get(pool, MIB(124), s);
    other.device_limit = MIB(128); /* from now on memory is nearly used up */
    galloc_pool *lower = pool_new(&other);
    sim_fail("cuMemCreate", 1, 1, cudaErrorUnknown);
    EXPECT_EQ(galloc_pool_malloc(pool, &p, MIB(3), s), cudaErrorUnknown);
    sim_fail_clear();
    EXPECT_EQ(decided(pool, "nearly used up"), 1);
    EXPECT(strstr(galloc_last_message(), "cuMemCreate"));
    EXPECT(strstr(log_text, "cuMemCreate"));
    OK(galloc_free(most, s));
    pool_end(lower);
    pool_end(pool);
    finish();
}

static void *spare;
static int asked;

static int give_spare(const galloc_report *report, void *user)
{
    (void)report;
    asked++;
    OK(galloc_pool_trim(user, SIZE_MAX, NULL));
    if (spare) OK(galloc_free(spare, cudaStreamLegacy));
    spare = NULL;
    return 1;
}

static long told;

static void count_told(void) { told += strstr(log_text, "heuristic:") != NULL; }

/* Decided before the program is asked for memory, told when the call ends, whatever the program calls meanwhile. */
TEST(a_decision_is_told_once)
{
    galloc_config config = heuristic();
    galloc_callbacks calls = {.on_oom = give_spare};
    begin();
    galloc_pool *pool = pool_new(&config);
    calls.user = pool;
    OK(galloc_pool_set_callbacks(pool, &calls));
    spare = get(pool, MIB(24), 0);
    void *rest = get(pool, MIB(24), 0);
    asked = 0;
    told = 0;
    log_hook = count_told;
    sim_fail("cuMemCreate", 1, 1, CUDA_ERROR_OUT_OF_MEMORY);
    void *p = get(pool, MIB(20), 0);
    sim_fail_clear();
    log_hook = NULL;
    EXPECT_EQ(asked, 1);
    EXPECT_EQ(decided(pool, "no more memory"), 1);
    EXPECT_EQ(told, 1);
    OK(galloc_free(p, 0));
    OK(galloc_free(rest, 0));
    pool_end(pool);
    finish();
}

/* A heap that is given back and made again. */
static void remake(galloc_pool *pool, cudaStream_t s, size_t all, int times)
{
    static void *block[BLOCKS];
    for (int i = 0; i < times; i++) {
        unload(block, load(pool, block, MIB(1), all, s), s);
        OK(galloc_pool_trim(pool, 0, NULL));
    }
}

TEST(creations_that_go_on_buy_overhead)
{
    galloc_config config = heuristic();
    galloc_decision list[GALLOC_DECISIONS];
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(&config);
    remake(pool, s, MIB(1000), 1);
    EXPECT_EQ(decisions_of(pool, list), 0);
    remake(pool, s, MIB(1100), 1);
    EXPECT_EQ(decisions_of(pool, list), 1);
    EXPECT_EQ(decided(pool, "pages are created for more"), 1);
    EXPECT(list[0].overhead == 0.025);
    EXPECT_EQ(list[0].growth, 0);
    remake(pool, s, MIB(1100), 40);
    int count = decisions_of(pool, list);
    EXPECT_EQ(decided(pool, "pages are created for more"), count);
    EXPECT(config_of(pool).overhead == 0.05);
    EXPECT(list[count - 2].overhead < 0.05);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* Small heaps create what they must; where pages do not follow the overhead, more of it would spare nothing. */
TEST(creations_that_overhead_would_not_spare_decide_nothing)
{
    for (int i = 0; i < 5; i++) {
        galloc_config config = heuristic();
        galloc_decision list[GALLOC_DECISIONS];
        begin();
        cudaStream_t s = stream_new();
        if (i == 1) config.growth = MIB(2);
        if (i == 2) config.memory_limit = GIB(4);
        if (i == 3) config.overhead = 0;
        if (i == 4) config.device_limit = GIB(4);
        galloc_pool *pool = pool_new(&config);
        remake(pool, s, i ? MIB(1100) : MIB(1000), 6);
        EXPECT_EQ(decisions_of(pool, list), 0);
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

TEST(decisions_are_bounded)
{
    static void *block[BLOCKS];
    galloc_config config = heuristic();
    galloc_decision list[GALLOC_DECISIONS];
    begin();
    cudaStream_t s = stream_new();
    config.memory_limit = MIB(64);
    galloc_pool *pool = pool_new(&config);
    for (int round = 0; round < GALLOC_DECISIONS; round++) {
        int n = load(pool, block, MIB(4), MIB(64), s);
        unload(block, n, s);
        OK(galloc_pool_trim(pool, 0, NULL));
        OK(galloc_free(get(pool, MIB(4), s), s));
    }
    EXPECT_EQ(decisions_of(pool, list), GALLOC_DECISIONS);
    EXPECT_EQ(log_lines, GALLOC_DECISIONS);
    EXPECT_EQ(galloc_pool_check(pool), 0);
    pool_end(pool);
    stream_end(s);
    finish();
}

TEST(decisions_fill_no_more_of_the_array_than_there_is_and_than_there_are)
{
    static void *block[BLOCKS];
    galloc_config config = heuristic();
    galloc_decision all[GALLOC_DECISIONS], list[GALLOC_DECISIONS], blank[GALLOC_DECISIONS];
    begin();
    cudaStream_t s = stream_new();
    config.memory_limit = MIB(64);
    galloc_pool *pool = pool_new(&config);
    for (int round = 0; round < 4; round++) {
        unload(block, load(pool, block, MIB(4), MIB(64), s), s);
        OK(galloc_pool_trim(pool, 0, NULL));
        OK(galloc_free(get(pool, MIB(4), s), s));
    }
    int count = decisions_of(pool, all), found;
    EXPECT(count >= 2 && count < GALLOC_DECISIONS);
    memset(blank, 0x5a, sizeof blank);
    for (int n = 0; n <= GALLOC_DECISIONS; n++) {
        int filled = n < count ? n : count;
        memset(list, 0x5a, sizeof list);
        found = -1;
        OK(galloc_pool_decisions(pool, list, n, n % 2 ? NULL : &found));
        EXPECT_EQ(found, n % 2 ? -1 : count);
        EXPECT_EQ(memcmp(list, all, (size_t)filled * sizeof *list), 0);
        EXPECT_EQ(memcmp(list + filled, blank, (size_t)(GALLOC_DECISIONS - filled) * sizeof *list), 0);
    }
    pool_end(pool);
    stream_end(s);
    finish();
}

/* What a pool of these settings holds at most, and how often it calls the driver. */
static void measure(const galloc_config *config, cudaStream_t s, size_t *peak, long *calls)
{
    galloc_pool *pool = pool_new(config);
    long before = memory_calls();
    shuffle(pool, s, 1024);
    *calls = memory_calls() - before;
    *peak = stats_of(pool).reserved.peak;
    pool_end(pool);
}

TEST(what_is_frozen_can_be_printed_and_read_back)
{
    galloc_config config = heuristic(), found, read = galloc_config_default();
    char text[GALLOC_CONFIG_TEXT], message[300];
    size_t peak[2];
    long calls[2];
    galloc_decision list[GALLOC_DECISIONS];
    begin();
    cudaStream_t s = stream_new();
    config.overhead = 0;
    galloc_pool *pool = pool_new(&config);
    shuffle(pool, s, 2048);
    int count = decisions_of(pool, list);
    EXPECT(count > 0);
    EXPECT_EQ(config_of(pool).strategy, GALLOC_STRATEGY_HEURISTIC);
    OK(galloc_pool_freeze(pool));
    found = config_of(pool);
    EXPECT_EQ(found.strategy, GALLOC_STRATEGY_CACHING);
    EXPECT(found.overhead == list[count - 1].overhead && found.growth == list[count - 1].growth);
    shuffle(pool, s, 2048);
    EXPECT_EQ(decisions_of(pool, list), count);
    pool_end(pool);
    OK(galloc_config_print(&found, text, sizeof text));
    OK(galloc_config_parse(&read, text, message, sizeof message));
    EXPECT(read.overhead == found.overhead && read.growth == found.growth && read.strategy == found.strategy);
    measure(&found, s, &peak[0], &calls[0]);
    measure(&read, s, &peak[1], &calls[1]);
    EXPECT_EQ(peak[0], peak[1]);
    EXPECT_EQ(calls[0], calls[1]);
    stream_end(s);
    finish();
}

/* A pool that is frozen before it has decided anything runs as one with strategy:caching. */
TEST(a_frozen_pool_does_as_its_configuration)
{
    galloc_config config = heuristic(), found;
    size_t peak = 0;
    long calls = 0;
    begin();
    cudaStream_t s = stream_new();
    config.overhead = 0;
    galloc_pool *pool = pool_new(&config);
    OK(galloc_pool_freeze(pool));
    found = config_of(pool);
    long before = memory_calls();
    shuffle(pool, s, 1024);
    long frozen = memory_calls() - before;
    size_t held = stats_of(pool).reserved.peak;
    EXPECT_EQ(decided(pool, ""), 0);
    pool_end(pool);
    measure(&found, s, &peak, &calls);
    EXPECT_EQ(held, peak);
    EXPECT_EQ(frozen, calls);
    stream_end(s);
    finish();
}

TEST(freeze_leaves_another_strategy_alone)
{
    begin();
    galloc_config config = galloc_config_default();
    config.strategy = GALLOC_STRATEGY_POOLED;
    galloc_pool *pool = pool_new(&config);
    OK(galloc_pool_freeze(pool));
    EXPECT_EQ(config_of(pool).strategy, GALLOC_STRATEGY_POOLED);
    pool_end(pool);
    finish();
}

TEST(other_strategies_and_segments_decide_nothing)
{
    galloc_config config = galloc_config_default();
    begin();
    cudaStream_t s = stream_new();
    for (int fixed = 0; fixed < 2; fixed++) {
        config.overhead = 0;
        config.strategy = fixed ? GALLOC_STRATEGY_HEURISTIC : GALLOC_STRATEGY_CACHING;
        config.expandable_segments = !fixed;
        galloc_pool *pool = pool_new(&config);
        shuffle(pool, s, 1024);
        EXPECT_EQ(decided(pool, ""), 0);
        EXPECT(config_of(pool).overhead == 0);
        pool_end(pool);
    }
    stream_end(s);
    finish();
}

TEST(bad_arguments_are_refused)
{
    galloc_decision one;
    int count = 0;
    begin();
    galloc_pool *pool = pool_new(NULL);
    EXPECT_EQ(galloc_pool_decisions(NULL, &one, 1, &count), cudaErrorInvalidValue);
    EXPECT_EQ(galloc_pool_decisions(pool, NULL, 1, &count), cudaErrorInvalidValue);
    EXPECT_EQ(galloc_pool_decisions(pool, &one, -1, &count), cudaErrorInvalidValue);
    EXPECT_EQ(galloc_pool_freeze(NULL), cudaErrorInvalidValue);
    EXPECT_EQ(log_lines, 4);
    OK(galloc_pool_decisions(pool, NULL, 0, NULL));
    OK(galloc_pool_freeze(pool));
    EXPECT_EQ(config_of(pool).strategy, GALLOC_STRATEGY_CACHING);
    pool_end(pool);
    finish();
}

/* A decision tells what the program uses, without what the quarantine keeps. */
TEST(a_decision_leaves_out_what_is_in_quarantine)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = heuristic();
    galloc_decision list[GALLOC_DECISIONS];
    OK(galloc_config_parse(&config, "debug:quarantine,quarantine_bytes:100M,memory_limit:200M", NULL, 0));
    galloc_pool *pool = pool_new(&config);
    void *p[2];
    OK(galloc_free(get(pool, MIB(60), s), s));
    for (int i = 0; i < 2; i++) p[i] = get(pool, MIB(66), s);
    OK(galloc_free(get(pool, MIB(6), s), s));
    if (EXPECT(decisions_of(pool, list) > 0)) {
        EXPECT_EQ(list[0].live, MIB(132));
        EXPECT(list[0].held >= MIB(192));
    }
    for (int i = 0; i < 2; i++) OK(galloc_free(p[i], s));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* Ten percent are bought when the moves have cost ten times as much as one percent does. */
TEST(a_large_rise_takes_many_moves)
{
    galloc_config config = heuristic();
    begin();
    cudaStream_t s = stream_new();
    config.overhead = 0.1;
    config.growth = MIB(2);
    galloc_pool *pool = pool_new(&config);
    shuffle(pool, s, 2048);
    EXPECT(stats_of(pool).moves > 300 && stats_of(pool).moves < 2000);
    EXPECT_EQ(decided(pool, "moves have cost"), 0);
    EXPECT(config_of(pool).overhead == 0.1);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* An overhead below 1 % says that memory matters most: neither do pages grow nor does it rise to save creations. From
   1 % on both happen. */
TEST(a_frugal_pool_spares_no_driver_calls)
{
    static void *block[BLOCKS];
    for (int frugal = 0; frugal < 2; frugal++) {
        galloc_config config = heuristic();
        begin();
        cudaStream_t s = stream_new();
        config.overhead = frugal ? 0.009 : 0.01;
        galloc_pool *pool = pool_new(&config);
        int n = load(pool, block, MIB(100), GIB(40), s);
        EXPECT_EQ(decided(pool, "only grows"), frugal ? 0 : 1);
        unload(block, n, s);
        pool_end(pool);
        pool = pool_new(&config);
        remake(pool, s, MIB(1100), 6);
        EXPECT_EQ(decided(pool, "pages are created for more") > 0, !frugal);
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

/* With fixed segments there is nothing to decide, also near the limit. */
TEST(fixed_segments_near_the_limit_decide_nothing)
{
    static void *block[BLOCKS];
    galloc_config config = heuristic();
    galloc_decision list[GALLOC_DECISIONS];
    begin();
    cudaStream_t s = stream_new();
    config.expandable_segments = 0;
    config.memory_limit = MIB(512);
    galloc_pool *pool = pool_new(&config);
    int n = load(pool, block, MIB(10), MIB(500), s);
    EXPECT_EQ(decisions_of(pool, list), 0);
    EXPECT_EQ(log_lines, 0);
    unload(block, n, s);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* The 32nd decision fills the list. If it is the one after a shortage, its call makes no other one. */
TEST(the_list_of_decisions_ends_with_memory_again)
{
    sim_options options = sim_defaults();
    options.memory = GIB(140);
    begin_with(options);
    cudaStream_t s = stream_new();
    galloc_config config = galloc_config_default();
    galloc_pool *pool;
    config.strategy = GALLOC_STRATEGY_HEURISTIC;
    config.overhead = 0.5;
    pool = pool_new(&config);
    void *p[200];
    galloc_decision d[64];
    int n = 0, count = 0;
    OK(galloc_pool_set_limit(pool, MIB(10)));
    p[n++] = get(pool, MIB(10), s);
    for (int i = 0; i < 60; i++) {
        OK(galloc_pool_set_limit(pool, stats_of(pool).reserved.current + MIB(12)));
        p[n++] = get(pool, MIB(4), s);
        OK(galloc_pool_set_limit(pool, GIB(100)));
        p[n++] = get(pool, i ? MIB(4) : GIB(3), s);
        OK(galloc_pool_decisions(pool, d, 0, &count));
        if (count >= 32) break;
    }
    OK(galloc_pool_decisions(pool, d, 32, &count));
    EXPECT_EQ(count, 32);
    EXPECT_EQ(galloc_pool_check(pool), 0);
    for (int i = 0; i < n; i++) OK(galloc_free(p[i], s));
    sim_run(-1);
    stream_end(s);
    pool_end(pool);
    finish();
}

/* What is held may be any multiple of what is live (an undefined conversion of numbers, which UBSan finds). */
TEST(hardly_anything_is_live_in_a_large_pool)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = galloc_config_default();
    config.strategy = GALLOC_STRATEGY_HEURISTIC;
    galloc_pool *pool = pool_new(&config);
    void *p = get(pool, 100, s);
    OK(galloc_pool_reserve(pool, GIB(20)));
    EXPECT_EQ(galloc_pool_check(pool), 0);
    OK(galloc_free(p, s));
    stream_end(s);
    pool_end(pool);
    finish();
}

TEST_MAIN()
