/* test_pooled.c - strategy:pooled: classes, strips of cells that are never cut, when they are given back, and that the
   order of streams holds as without it. */

#include "setup.h"

static galloc_config pooled(size_t limit)
{
    galloc_config config = config_limit(limit);
    config.strategy = GALLOC_STRATEGY_POOLED;
    return config;
}

static galloc_pool *pooled_new(size_t limit)
{
    galloc_config config = pooled(limit);
    return pool_new(&config);
}

static size_t usable(galloc_pool *pool, size_t bytes, cudaStream_t s)
{
    void *ptr = get(pool, bytes, s);
    galloc_pointer info = info_of(ptr);
    EXPECT_EQ(info.requested, bytes);
    EXPECT_EQ(stats_of(pool).live.current, bytes);
    OK(galloc_free(ptr, s));
    return info.usable;
}

TEST(sizes_are_rounded_to_classes_and_live_bytes_are_exact)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pooled_new(GIB(1));
    EXPECT_EQ(usable(pool, 1, s), 512);
    EXPECT_EQ(usable(pool, 1025, s), 1536);
    EXPECT_EQ(usable(pool, KIB(4), s), KIB(4));
    EXPECT_EQ(usable(pool, KIB(4) + 1, s), KIB(4) + 512);
    EXPECT_EQ(usable(pool, KIB(8) + 1, s), KIB(9));
    EXPECT_EQ(usable(pool, KIB(512) + 1, s), KIB(576));
    EXPECT_EQ(usable(pool, MIB(1), s), MIB(1));
    EXPECT_EQ(usable(pool, MIB(1) + 1, s), MIB(1) + 512);
    expect_healthy(pool, 1);
    pool_end(pool);
    galloc_config config = pooled(GIB(1));
    config.roundup_power2_divisions[0] = 2;
    pool = pool_new(&config);
    EXPECT_EQ(usable(pool, KIB(8) + 1, s), KIB(12));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* What is freed waits for its class: no other size takes of it, and the next of its size gets it at once. */
TEST(a_slot_is_kept_for_its_class)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pooled_new(GIB(1));
    void *large = get(pool, KIB(64), s), *keep = get(pool, KIB(64), s);
    char *small[64];
    OK(galloc_free(large, s));
    for (int i = 0; i < 64; i++) {
        small[i] = (char *)get(pool, KIB(1), s);
        EXPECT(small[i] + KIB(1) <= (char *)large || small[i] >= (char *)large + KIB(64));
    }
    EXPECT_EQ(get(pool, KIB(64) - 100, s), large);
    expect_healthy(pool, 1);
    for (int i = 0; i < 64; i++) OK(galloc_free(small[i], s));
    OK(galloc_free(large, s));
    OK(galloc_free(keep, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* The largest free block is a slot where nothing else is free, whatever its class. */
TEST(a_slot_is_the_largest_free_block_of_a_full_pool)
{
    for (size_t bytes = 512; bytes <= KIB(16); bytes += bytes < KIB(4) ? 512 : KIB(2)) {
        begin_still();
        cudaStream_t s = stream_new();
        galloc_config config = pooled(MIB(2));
        config.lane_bytes = 0;
        galloc_pool *pool = pool_new(&config);
        void *slot = get(pool, bytes, s), *used[5000];
        int n = 0;
        for (size_t size = bytes; size; size = (size_t)stats_of(pool).largest_free)
            while (n < 5000 && !galloc_pool_malloc(pool, &used[n], size, s)) n++;
        EXPECT_EQ(stats_of(pool).free_bytes, 0);
        OK(galloc_free(slot, s));
        EXPECT_EQ(stats_of(pool).largest_free, bytes);
        while (n > 0) OK(galloc_free(used[--n], s));
        pool_end(pool);
        finish();
    }
}

/* Cells of one class lie side by side, and those that are free are all served again without any new memory. */
TEST(a_class_does_not_fragment)
{
    enum { N = 4096 };
    static void *block[N];
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pooled_new(GIB(1));
    for (int i = 0; i < N; i++) block[i] = get(pool, i % 2 ? KIB(3) : KIB(40), s);
    size_t held = stats_of(pool).reserved.current;
    for (int round = 0; round < 4; round++) {
        for (int i = round % 2; i < N; i += 3) OK(galloc_free(block[i], s));
        long calls = memory_calls();
        for (int i = round % 2; i < N; i += 3) block[i] = get(pool, i % 2 ? KIB(3) : KIB(40), s);
        EXPECT_EQ(memory_calls(), calls);
        EXPECT_EQ(galloc_pool_check(pool), 0);
    }
    EXPECT_EQ(stats_of(pool).reserved.current, held);
    for (int i = 0; i < N; i++) OK(galloc_free(block[i], s));
    expect_healthy(pool, 1);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* Fills a pool with small blocks up to its limit. */
static int fill(galloc_pool *pool, void **block, int most, size_t bytes, cudaStream_t s)
{
    int n = 0;
    while (n < most && galloc_pool_malloc(pool, &block[n], bytes, s) == cudaSuccess) n++;
    return n;
}

TEST(runs_that_are_free_serve_a_large_request_under_a_limit)
{
    enum { N = 8192 };
    static void *block[N];
    for (int fixed = 0; fixed < 2; fixed++) {
        begin();
        cudaStream_t s = stream_new();
        galloc_config config = pooled(MIB(32));
        config.expandable_segments = !fixed;
        galloc_pool *pool = pool_new(&config);
        int n = fill(pool, block, N, KIB(24), s);
        EXPECT(n > 1000 && n < N);
        for (int i = 0; i < n; i++) OK(galloc_free(block[i], s));
        void *large = get(pool, MIB(30), s);
        expect_healthy(pool, 1);
        OK(galloc_free(large, s));
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

/* Of a size that has gone, another size has the memory. */
/* A slot of a run was freed on a stream that has been destroyed since, so that only a wait for the device completes the
   run. Then it serves a request of another size for which nothing else is left. */
TEST(a_run_that_a_wait_completes_serves_under_a_limit)
{
    enum { SMALL = 64 };
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pooled_new(MIB(4));
    void *small[SMALL], *rest[64], *p = get(pool, KIB(512), s), *q = get(pool, KIB(512), t);
    int n = 0;
    EXPECT((char *)q == (char *)p + KIB(512));
    for (int i = 0; i < SMALL; i++) small[i] = get(pool, 512, s);
    for (size_t bytes = MIB(1); bytes >= KIB(64); bytes /= 2)
        while (n < 64 && !galloc_pool_malloc(pool, &rest[n], bytes, s)) n++;
    put(t, q, KIB(512), 1);
    OK(galloc_free(p, s));
    OK(galloc_free(q, t));
    OK(cudaStreamDestroy(t));
    p = get(pool, MIB(1), s);
    OK(galloc_free(p, s));
    while (n) OK(galloc_free(rest[--n], s));
    for (int i = 0; i < SMALL; i++) OK(galloc_free(small[i], s));
    pool_end(pool);
    stream_end(s);
    finish();
}

TEST(runs_of_one_class_serve_another)
{
    enum { N = 8192 };
    static void *block[N];
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pooled_new(MIB(32));
    int n = fill(pool, block, N, KIB(24), s), m;
    for (int i = 0; i < n; i++) OK(galloc_free(block[i], s));
    m = fill(pool, block, N, KIB(48), s);
    EXPECT(m >= n / 2 - 16);
    for (int i = 0; i < m; i++) OK(galloc_free(block[i], s));
    pool_end(pool);
    stream_end(s);
    finish();
}

TEST(trim_gives_free_runs_back)
{
    enum { N = 1024 };
    static void *block[N];
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pooled_new(GIB(1));
    for (int i = 0; i < N; i++) block[i] = get(pool, KIB(32), s);
    void *last = get(pool, 512, s);
    for (int i = 0; i < N; i++) OK(galloc_free(block[i], s));
    OK(cudaStreamSynchronize(s));
    OK(galloc_pool_trim(pool, 0, NULL));
    EXPECT(stats_of(pool).reserved.current <= MIB(4));
    expect_healthy(pool, 1);
    OK(galloc_free(last, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* Another stream has a cell only when the stream that freed it has done. */
TEST(other_streams_have_slots_as_the_marks_allow)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pooled_new(GIB(1));
    void *one[40], *own[20], *p;
    int again = 0;
    for (int i = 0; i < 40; i++) put(s, one[i] = get(pool, KIB(100), s), KIB(100), 1);
    for (int i = 0; i < 40; i++) OK(galloc_free(one[i], s));
    for (int i = 0; i < 40; i++) {
        put(t, p = get(pool, KIB(100), t), KIB(100), 2);
        for (int k = 0; k < 40; k++) EXPECT(p != one[k]);
        OK(galloc_free(p, t));
    }
    for (int i = 0; i < 20; i++) {
        put(s, own[i] = get(pool, KIB(100), s), KIB(100), 3);
        for (int k = 0; k < 40; k++) again |= own[i] == one[k];
    }
    EXPECT(again); /* s has its own at once, beside those that nobody has used yet */
    for (int i = 0; i < 20; i++) OK(galloc_free(own[i], s));
    sim_run(-1);
    OK(galloc_pool_trim(pool, SIZE_MAX, NULL)); /* it is noticed that s has done */
    long calls = memory_calls();
    for (int i = again = 0; i < 20; i++) {
        put(t, own[i] = get(pool, KIB(100), t), KIB(100), 4);
        for (int k = 0; k < 40; k++) again |= own[i] == one[k];
    }
    EXPECT(again); /* and now t has them */
    EXPECT_EQ(memory_calls(), calls);
    for (int i = 0; i < 20; i++) OK(galloc_free(own[i], t));
    expect_healthy(pool, 1);
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* Blocking streams are in no order to each other. */
TEST(blocking_streams_do_not_share_slots)
{
    begin_still();
    cudaStream_t s[2];
    galloc_config config = galloc_config_default();
    void *kept[64];
    int kepts = 0;
    config.strategy = GALLOC_STRATEGY_POOLED;
    galloc_pool *pool = pool_new(&config);
    for (int i = 0; i < 2; i++) OK(cudaStreamCreate(&s[i]));
    for (int i = 0; i < 8; i++) {
        void *p[64]; /* more than the cells that nobody has used yet; of each strip one stays */
        for (int k = 0; k < 64; k++) {
            p[k] = get(pool, 1000, s[i % 2]);
            put(s[i % 2], p[k], 1000, 1);
        }
        for (int k = 0; k < 64; k++) {
            if (k % 8) OK(galloc_free(p[k], s[i % 2]));
            else kept[kepts++] = p[k];
        }
        OK(galloc_free(get(pool, MIB(2), s[i % 2]), s[i % 2])); /* the cache is emptied */
    }
    for (int i = 0; i < kepts; i++) OK(galloc_free(kept[i], s[i / 8 % 2]));
    sim_run(-1);
    pool_end(pool);
    finish();
}

/* Slots of streams that are not captured are not in order with a capture. */
TEST(a_captured_stream_takes_no_slots_of_others)
{
    enum { SLOTS = 64 };
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pooled_new(GIB(1));
    void *p[SLOTS], *kept = NULL;
    for (int i = 0; i < SLOTS; i++) p[i] = get_used(pool, 1000, s, 1);
    kept = p[0];
    for (int i = 1; i < SLOTS; i++) OK(galloc_free(p[i], s));
    OK(galloc_free(get(pool, MIB(2), s), s)); /* the cache is emptied */
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    OK(cudaStreamBeginCapture(t, cudaStreamCaptureModeGlobal));
    for (int i = 0; i < SLOTS; i++) {
        void *q = get(pool, 1000, t);
        for (int k = 1; k < SLOTS; k++) EXPECT(q != p[k]);
        put(t, q, 1000, 2);
        OK(galloc_free(q, t));
    }
    OK(cudaStreamEndCapture(t, &graph));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    OK(cudaGraphLaunch(exec, t));
    OK(galloc_free(kept, s));
    OK(cudaGraphExecDestroy(exec));
    OK(cudaGraphDestroy(graph));
    sim_run(-1);
    pool_end(pool);
    finish();
}

/* Resizing within a class changes nothing else; out of it, the block is a cell no more, or stays as it is. */
TEST(resize_growable_and_aligned)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pooled_new(GIB(1));
    void *p = get(pool, KIB(60), s), *q = get(pool, KIB(60), s);
    galloc_request request = {0};
    OK(galloc_resize(p, KIB(10), s));
    EXPECT_EQ(info_of(p).usable, KIB(60));
    EXPECT_EQ(info_of(p).requested, KIB(10));
    OK(galloc_resize(p, KIB(60), s));
    EXPECT_EQ(galloc_resize(p, KIB(100), s), cudaErrorNotSupported);
    OK(galloc_free(q, s));
    EXPECT_EQ(galloc_pool_check(pool), 0);
    request.bytes = KIB(3);
    request.alignment = KIB(64);
    request.stream = s;
    request.pool = pool;
    OK(galloc_alloc(&q, &request));
    EXPECT_EQ((uintptr_t)q % KIB(64), 0);
    OK(galloc_free(q, s));
    request.alignment = 0;
    request.max_bytes = MIB(20);
    OK(galloc_alloc(&q, &request));
    OK(galloc_resize(q, MIB(20), s));
    OK(galloc_free(q, s));
    OK(galloc_free(p, s));
    expect_healthy(pool, 1);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* Slots of the size are free, but none of them lies at a multiple of the alignment. */
TEST(an_aligned_block_is_no_slot)
{
    enum { N = 15 };
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = pooled(GIB(1));
    config.stats_exact = 1; /* each free files its slot */
    galloc_pool *pool = pool_new(&config);
    void *slot[N + 1], *p = NULL;
    galloc_request request = {.bytes = KIB(4), .alignment = KIB(64), .stream = s, .pool = pool};
    for (int i = 0; i <= N; i++) slot[i] = get(pool, KIB(4), s);
    EXPECT_EQ((uintptr_t)slot[0] % KIB(64), 0);
    for (int i = 1; i <= N; i++) OK(galloc_free(slot[i], s));
    OK(galloc_alloc(&p, &request));
    EXPECT_EQ((uintptr_t)p % KIB(64), 0);
    OK(galloc_free(p, s));
    OK(galloc_free(slot[0], s));
    expect_healthy(pool, 1);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* However many divisions are asked for, a slot has at least the bytes that it is given out for. */
TEST(many_divisions_make_no_slot_too_small)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = pooled(GIB(1));
    for (int i = 0; i < GALLOC_DIVISIONS; i++) config.roundup_power2_divisions[i] = 256;
    config.stats_exact = 1; /* each free files its slot */
    galloc_pool *pool = pool_new(&config);
    for (size_t bytes = KIB(16); bytes <= KIB(256); bytes += 512) {
        void *p = get(pool, bytes, s);
        EXPECT(info_of(p).usable >= bytes);
        put(s, p, bytes, bytes);
        OK(galloc_free(p, s));
    }
    expect_healthy(pool, 1);
    pool_end(pool);
    finish();
}

/* The last slot of a run can grow. Its bytes are no class's then, and merge with others when it is freed. */
TEST(a_slot_that_has_grown_is_none_any_more)
{
    enum { SLOTS = 16 };
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pooled_new(GIB(1));
    char *p[SLOTS];
    for (int i = 0; i < SLOTS; i++) p[i] = get(pool, KIB(64), s);
    EXPECT(p[SLOTS - 1] == p[0] + (SLOTS - 1) * KIB(64));
    OK(galloc_resize(p[SLOTS - 1], KIB(100), s));
    EXPECT_EQ(galloc_pool_check(pool), 0);
    for (int i = 0; i < SLOTS; i++) OK(galloc_free(p[i], s));
    expect_healthy(pool, 1);
    void *whole_page = get(pool, MIB(2), s);
    EXPECT_EQ(stats_of(pool).reserved.current, MIB(2));
    expect_healthy(pool, 1);
    OK(galloc_free(whole_page, s));
    pool_end(pool);
    finish();
}

/* A graph's cells are nobody else's while it can be launched. */
TEST(slots_of_a_graph_are_its_own)
{
    begin();
    cudaStream_t s = stream_new(), other = stream_new();
    galloc_pool *pool = pooled_new(GIB(1));
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    void *own[8], *p, *kept[64];
    int n = 0, again = 0;
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    for (int i = 0; i < 8; i++) put(s, own[i] = get(pool, KIB(20), s), KIB(20), 7);
    for (int i = 0; i < 8; i++) OK(galloc_free(own[i], s));
    p = get(pool, KIB(20), s);
    for (int i = 0; i < 8; i++) again |= p == own[i];
    EXPECT(again);
    OK(galloc_free(p, s));
    OK(cudaStreamEndCapture(s, &graph));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    for (int i = 0; i < 64; i++) {
        OK(cudaGraphLaunch(exec, s));
        put(other, p = get(pool, KIB(20), other), KIB(20), 8);
        for (int k = 0; k < 8; k++) EXPECT(p != own[k]);
        if (i % 3) OK(galloc_free(p, other));
        else kept[n++] = p;
    }
    EXPECT_EQ(galloc_pool_check(pool), 0);
    OK(cudaGraphExecDestroy(exec));
    OK(cudaGraphDestroy(graph));
    while (n > 0) OK(galloc_free(kept[--n], other));
    pool_end(pool);
    stream_end(s);
    stream_end(other);
    finish();
}

/* The captures of a group take what earlier ones have freed, also from among many cells of other sizes: none needs
   memory beyond the first one's. Results of the first are in each run of cells, so no run becomes whole. */
TEST(slots_of_a_group_serve_its_next_capture)
{
    enum { SIZES = 2, SLOTS = 640, EACH = 16, GRAPHS = 3 };
    static void *p[SIZES][SLOTS];
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pooled_new(GIB(1));
    galloc_graph *group = NULL;
    cudaGraph_t graphs[GRAPHS];
    size_t held = 0;
    OK(galloc_graph_begin(&group, pool, s));
    for (int g = 0; g < GRAPHS; g++) {
        int from = g ? SIZES - 1 : 0; /* later ones have the last size only, and no results */
        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
        for (int z = from; z < SIZES; z++)
            for (int i = 0; i < SLOTS; i++)
                if (!g || i % EACH) p[z][i] = get(pool, KIB(32 - 4 * z), s);
        for (int z = from; z < SIZES; z++)
            for (int i = 0; i < SLOTS; i++)
                if (i % EACH) OK(galloc_free(p[z][i], s));
        OK(cudaStreamEndCapture(s, &graphs[g]));
        if (!g) held = stats_of(pool).reserved.current;
        EXPECT_EQ(stats_of(pool).reserved.current, held);
        expect_healthy(pool, 1);
    }
    OK(galloc_graph_end(group));
    OK(galloc_graph_release(group, s));
    for (int z = 0; z < SIZES; z++)
        for (int i = 0; i < SLOTS; i += EACH) OK(galloc_free(p[z][i], s));
    for (int g = 0; g < GRAPHS; g++) OK(cudaGraphDestroy(graphs[g]));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* Captures of a group: the last one asks for the slot that the one before it has freed, once with an older one that has
   other sizes. Returns how many calls of CUDA that takes. */
static long calls_of_the_last_capture(int older)
{
    enum { GRAPHS = 3, STAY = 2 };
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pooled_new(GIB(1));
    galloc_graph *group = NULL;
    cudaGraph_t graph[GRAPHS];
    void *p[GRAPHS], *stays[GRAPHS][STAY];
    long calls = 0;
    for (int g = !older; g < GRAPHS; g++) {
        size_t bytes = g ? KIB(300) : KIB(100);
        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
        OK(galloc_graph_begin(&group, pool, s));
        calls = sim_calls(NULL);
        p[g] = get(pool, bytes, s);
        calls = sim_calls(NULL) - calls;
        for (int i = 0; i < STAY && g < 2; i++) stays[g][i] = get(pool, bytes, s);
        OK(galloc_free(p[g], s));
        OK(galloc_graph_end(group));
        OK(cudaStreamEndCapture(s, &graph[g]));
    }
    EXPECT(p[2] == p[1]);
    for (int g = !older; g < GRAPHS; g++) {
        for (int i = 0; i < STAY && g < 2; i++) OK(galloc_free(stays[g][i], s));
        OK(cudaGraphDestroy(graph[g]));
    }
    OK(galloc_graph_release(group, s));
    pool_end(pool);
    stream_end(s);
    finish();
    return calls;
}

/* A slot of the capture before is as easy to find behind an older one without such slots. */
TEST(slots_of_any_capture_of_a_group_serve_the_next)
{
    EXPECT_EQ(calls_of_the_last_capture(1), calls_of_the_last_capture(0));
}

/* A few sizes on three streams at random: the ledger finds any race. */
TEST(streams_at_random)
{
    enum { N = 400, STREAMS = 3 };
    static struct { void *ptr; size_t bytes; int home; uint64_t tag; } block[N];
    for (uint64_t seed = 1; seed <= 12; seed++) {
        sim_options options = sim_defaults();
        dice d = {seed};
        cudaStream_t s[STREAMS];
        options.seed = seed;
        options.pace = seed % 2 ? 0 : -1;
        begin_with(options);
        for (int i = 0; i < STREAMS; i++) s[i] = stream_new();
        galloc_pool *pool = pooled_new(MIB(24));
        for (uint64_t step = 1; step < 6000; step++) {
            uint32_t i = roll_below(&d, N), t = roll_below(&d, STREAMS);
            if (block[i].ptr) {
                look(s[block[i].home], block[i].ptr, block[i].bytes, block[i].tag);
                OK(galloc_free(block[i].ptr, s[block[i].home]));
                block[i].ptr = NULL;
            } else if (!galloc_pool_malloc(pool, &block[i].ptr, block[i].bytes = KIB(1) << roll_below(&d, 9), s[t])) {
                block[i].home = (int)t;
                put(s[t], block[i].ptr, block[i].bytes, block[i].tag = step);
            }
            if (step % 1000 == 0) EXPECT_EQ(galloc_pool_check(pool), 0);
        }
        for (int i = 0; i < N; i++)
            if (block[i].ptr) OK(galloc_free(block[i].ptr, s[block[i].home]));
        memset(block, 0, sizeof block);
        pool_end(pool);
        finish();
    }
}

/* Memory runs out while free slots of other sizes hold plenty. The report names them, and promises none of it. */
TEST(the_report_knows_slots_of_other_sizes)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = pooled(MIB(16));
    config.expandable_segments = 0;
    galloc_pool *pool = pool_new(&config);
    static void *slot[1000];
    static char text[GALLOC_REPORT_TEXT];
    galloc_report report;
    void *p = NULL;
    int n = 0;
    while (n < 1000 && galloc_pool_malloc(pool, &slot[n], KIB(64), s) == cudaSuccess) n++;
    if (!EXPECT(n > 40 && n < 1000)) return;
    for (int i = 0; i < n; i++) /* one slot of each run stays in use */
        if (i % 2) OK(galloc_free(slot[i], s));
    EXPECT_EQ(galloc_pool_malloc(pool, &p, KIB(10), s), cudaErrorMemoryAllocation);
    OK(galloc_oom_report(&report));
    EXPECT(report.in_slots > MIB(4) && report.in_slots <= report.usable);
    EXPECT(report.largest_usable < KIB(10) && report.largest_possible < KIB(10));
    OK(galloc_report_text(&report, text, sizeof text));
    EXPECT(strstr(text, "in slots of other sizes"));
    EXPECT(strstr(text, "strategy:caching does not"));
    OK(galloc_pool_malloc(pool, &p, KIB(64), s)); /* the size that they serve */
    OK(galloc_free(p, s));
    for (int i = 0; i < n; i += 2) OK(galloc_free(slot[i], s));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* There is host memory for one slot, not for the marks of a run: the request gets the slot, and no run is begun. */
TEST(a_run_without_host_memory_for_its_marks_is_one_slot)
{
    int served = 0;
    for (size_t spare = 0; spare < 40; spare++) {
        begin_still();
        cudaStream_t s = stream_new();
        galloc_config config = pooled(GIB(1));
        config.lane_bytes = 0;
        galloc_pool *pool = pool_new(&config);
        void *keep = get(pool, KIB(512), s), *p = NULL;
        OK(galloc_free(get_used(pool, MIB(2), s, 1), s));
        EXPECT(inside_leave_marks(pool, spare));
        sim_fail_malloc(1, 1);
        cudaError_t error = galloc_pool_malloc(pool, &p, KIB(1), s);
        sim_fail_malloc(0, 0);
        if (error) EXPECT_EQ(error, cudaErrorMemoryAllocation);
        EXPECT_EQ(galloc_pool_check(pool), 0);
        served += !error;
        if (p) {
            put(s, p, KIB(1), 2);
            OK(galloc_free(p, s));
        }
        OK(galloc_free(keep, s));
        pool_end(pool);
        stream_end(s);
        finish();
    }
    EXPECT(served > 0 && served < 40);
}

/* Nor does a run take marks that are promised, where many streams have used the memory: it is cut from the middle. */
TEST(a_run_of_memory_that_many_streams_used_takes_no_promised_marks)
{
    enum { STREAMS = 12, MARKS = 8 * STREAMS };
    for (size_t spare = 0; spare < MARKS; spare++) {
        begin_still();
        cudaStream_t s = stream_new(), users[STREAMS + 1];
        galloc_config config = pooled(MIB(6));
        config.lane_bytes = 0;
        galloc_pool *pool = pool_new(&config);
        char *before = get_used(pool, KIB(1536), s, 1), *shared = get_used(pool, MIB(4), s, 1);
        void *rest = get(pool, KIB(512), s);
        EXPECT(shared == before + KIB(1536));
        for (int i = 0; i <= STREAMS; i++) {
            users[i] = stream_new();
            order(s, users[i]);
            look(users[i], i < STREAMS ? shared : before, KIB(512), 1);
        }
        OK(galloc_free_after(before, users, STREAMS + 1));
        OK(galloc_free_after(shared, users, STREAMS));
        EXPECT(inside_leave_marks(pool, spare));
        void *p = get(pool, KIB(512), s);
        EXPECT(p == shared);
        EXPECT_EQ(galloc_pool_check(pool), 0);
        OK(galloc_free(p, s));
        OK(galloc_free(rest, s));
        sim_run(-1);
        pool_end(pool);
        finish();
    }
}

/* Idle memory in slots is memory above gc_threshold, too. */
TEST(idle_slots_are_collected)
{
    enum { COUNT = 900 };
    static void *p[COUNT];
    sim_options options = sim_defaults();
    options.pace = SIM_PACE_PROMPT;
    begin_with(options);
    cudaStream_t s[2] = {stream_new(), stream_new()};
    galloc_config config = config_limit(MIB(64));
    config.strategy = GALLOC_STRATEGY_POOLED;
    config.gc_threshold = 0.5;
    galloc_pool *pool = pool_new(&config);
    void *keep[2] = {get(pool, KIB(64), s[0]), get(pool, KIB(64), s[1])};
    for (int i = 0; i < COUNT; i++) p[i] = get_used(pool, KIB(64), s[0], 1);
    EXPECT(stats_of(pool).reserved.current > MIB(50));
    for (int i = 0; i < COUNT; i++) OK(galloc_free(p[i], s[0]));
    for (int i = 0; i < 2000; i++) {
        void *q = get_used(pool, KIB(64), s[i % 2], 1), *r = get_used(pool, KIB(48), s[i % 2], 1);
        OK(galloc_free(q, s[i % 2]));
        OK(galloc_free(r, s[i % 2]));
    }
    EXPECT(stats_of(pool).reserved.current <= MIB(32));
    for (int i = 0; i < 2; i++) {
        OK(galloc_free(keep[i], s[i]));
        stream_end(s[i]);
    }
    pool_end(pool);
    finish();
}

/* Slots in use and free ones, in the stream's cache and not, and free memory beside them. */
TEST(the_check_sees_each_word_of_slots)
{
    begin_still();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pooled_new(GIB(1));
    void *p[8];
    for (int i = 0; i < 8; i++) p[i] = get(pool, i % 2 ? 1000 : 5000, s);
    for (int i = 2; i < 8; i++) OK(galloc_free(p[i], s));
    expect_the_check_sees_all(pool);
    for (int i = 0; i < 2; i++) OK(galloc_free(p[i], s));
    pool_end(pool);
    stream_end(s);
    finish();
}

TEST_MAIN()
