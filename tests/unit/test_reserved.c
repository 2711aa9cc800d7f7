/* test_reserved.c - host memory is made sure of before anything changes. Each chunk holds one descriptor or two, and
   before each call all that nobody was promised is taken away: a step that takes more than it has made sure of finds an
   empty slab. GALLOC_SEED chooses the numbers, GALLOC_ROUNDS how many programs there are. */

#include "setup.h"

enum { STREAMS = 12, BLOCKS = 96, PAGE = 2 << 20, STEPS = 1500 };

__attribute__((constructor)) static void have_small_chunks(void) { inside_chunk_bytes = 0; }

typedef struct party {
    galloc_pool *pool;
    cudaStream_t s[STREAMS];
    dice d;
    size_t unit; /* sizes are up to 16 of these */
    char *at[BLOCKS];
    size_t bytes[BLOCKS], room[BLOCKS];
    int home[BLOCKS];
} party;

static void take_one(party *p, int i)
{
    galloc_request request = {0};
    request.bytes = p->bytes[i] = p->unit * (1 + roll_below(&p->d, 16));
    request.pool = p->pool;
    request.stream = p->s[p->home[i]];
    if (!roll_below(&p->d, 6)) request.max_bytes = p->room[i] = 16 * PAGE;
    else p->room[i] = 0;
    if (!roll_below(&p->d, 10)) request.alignment = KIB(64);
    if (request.max_bytes && request.bytes > request.max_bytes) request.bytes = p->bytes[i] = request.max_bytes;
    inside_drain_all(p->pool);
    cudaError_t err = galloc_alloc((void **)&p->at[i], &request);
    if (err != cudaErrorMemoryAllocation) OK(err);
    if (!err) put(request.stream, p->at[i], p->bytes[i], (uint64_t)i);
}

static void change_one(party *p, int i)
{
    size_t bytes = p->unit * (1 + roll_below(&p->d, 16));
    if (p->room[i] && bytes > p->room[i]) bytes = p->room[i];
    inside_drain_all(p->pool);
    cudaError_t err = galloc_resize(p->at[i], bytes, p->s[p->home[i]]);
    if (err != cudaErrorNotSupported && err != cudaErrorMemoryAllocation) OK(err);
    if (err) return;
    p->bytes[i] = bytes;
    put(p->s[p->home[i]], p->at[i], bytes, (uint64_t)i);
}

static void free_one(party *p, int i)
{
    cudaStream_t after[STREAMS];
    int n = roll_below(&p->d, 3) ? 1 : STREAMS; /* each mark is of all bytes, so that every cut doubles it */
    after[0] = p->s[p->home[i]];
    for (int k = 1; k < n; k++) after[k] = p->s[roll_below(&p->d, STREAMS)];
    if (!roll_below(&p->d, 8)) {
        inside_drain_all(p->pool);
        OK(galloc_record_stream(p->at[i], p->s[roll_below(&p->d, STREAMS)]));
    }
    inside_drain_all(p->pool);
    if (n == 1) OK(galloc_free(p->at[i], after[0]));
    else OK(galloc_free_after(p->at[i], after, n));
    p->at[i] = NULL;
}

static void party_step(party *p)
{
    int i = (int)roll_below(&p->d, BLOCKS), what = (int)roll_below(&p->d, 16);
    if (p->at[i] && what < 3) {
        change_one(p, i);
    } else if (p->at[i]) {
        free_one(p, i);
    } else {
        p->home[i] = (int)roll_below(&p->d, STREAMS);
        take_one(p, i);
    }
    if (!roll_below(&p->d, 60)) sim_run(-1);
    if (!roll_below(&p->d, 200)) {
        inside_drain_all(p->pool);
        OK(galloc_pool_trim(p->pool, MIB(roll_below(&p->d, 64)), NULL));
    }
}

static void have_party(uint64_t seed, size_t unit, double overhead, int strategy)
{
    sim_options options = sim_defaults();
    options.seed = seed;
    options.pace = seed % 2 ? SIM_PACE_RANDOM : SIM_PACE_STILL;
    begin_with(options);
    party p;
    galloc_config config = galloc_config_default();
    memset(&p, 0, sizeof p);
    config.overhead = overhead;
    config.memory_limit = enough(unit * 16 * BLOCKS / 6, PAGE); /* so that streams wait for each other */
    config.strategy = strategy;
    p.pool = pool_new(&config);
    p.d.state = seed;
    p.unit = unit;
    for (int i = 0; i < STREAMS; i++) p.s[i] = stream_new();
    for (int step = 0; step < STEPS; step++) party_step(&p);
    EXPECT_EQ(galloc_pool_check(p.pool), 0);
    for (int i = 0; i < BLOCKS; i++)
        if (p.at[i]) free_one(&p, i);
    inside_drain_all(p.pool);
    pool_end(p.pool);
    for (int i = 0; i < STREAMS; i++) stream_end(p.s[i]);
    finish();
}

static int rounds(void)
{
    const char *text = getenv("GALLOC_ROUNDS");
    return text ? atoi(text) : 4;
}

TEST(every_step_makes_sure_of_what_it_takes)
{
    static const size_t units[] = {512, KIB(40), KIB(700), PAGE};
    for (int round = 0; round < rounds(); round++) {
        for (size_t i = 0; i < sizeof units / sizeof units[0]; i++) {
            uint64_t seed = test_seed() + (uint64_t)round;
            have_party(seed, units[i], 0, GALLOC_STRATEGY_CACHING);
            have_party(seed, units[i], 0.2, GALLOC_STRATEGY_CACHING);
            have_party(seed, units[i], 0.02, GALLOC_STRATEGY_POOLED);
        }
    }
}

/* Host memory that is lacking is missed before the driver is asked for anything, not when the answer is cut. */
TEST(who_lacks_host_memory_asks_the_driver_for_nothing)
{
    static const size_t sizes[] = {1000, KIB(40), KIB(700), MIB(3), MIB(31), MIB(32), MIB(70), GIB(1), GIB(1) + 512};
    for (size_t i = 0; i < 2 * sizeof sizes / sizeof sizes[0]; i++) {
        size_t bytes = sizes[i / 2], spare = i % 2; /* so that what is made sure of ends with a chunk in one of them */
        for (int nth = 1, fired = 1; fired && nth < 100; nth++) {
            begin_still();
            galloc_pool *pool = pool_new(NULL);
            cudaStream_t s = stream_new();
            void *first = get(pool, PAGE, s), *p;
            inside_drain_all(pool);
            EXPECT(inside_leave_marks(pool, spare));
            long created = sim_calls("cuMemCreate");
            sim_fail_malloc(nth, 1);
            cudaError_t err = galloc_pool_malloc(pool, &p, bytes, s);
            fired = sim_failed_mallocs() > 0;
            sim_fail_malloc(0, 0);
            if (err && !EXPECT_EQ(sim_calls("cuMemCreate"), created))
                printf("    %zu bytes, malloc %d\n", bytes, nth);
            else OK(galloc_free(p, s));
            EXPECT_EQ(fired, err != cudaSuccess);
            OK(galloc_free(first, s));
            pool_end(pool);
            stream_end(s);
            finish();
        }
    }
}

/* A request takes the middle of a free block that twelve streams may still use: both ends have marks of all of them. */
TEST(a_cut_makes_sure_of_twice_the_marks)
{
    cudaStream_t s[STREAMS];
    galloc_request request = {0};
    void *p, *pad, *part;
    begin_still();
    galloc_pool *pool = pool_limited(24 * PAGE);
    for (int i = 0; i < STREAMS; i++) s[i] = stream_new();
    pad = get(pool, PAGE, s[0]);
    p = get(pool, 16 * PAGE, s[0]);
    for (int i = 0; i < STREAMS; i++) OK(sim_launch(s[i], NULL, 0));
    OK(galloc_free_after(p, s, STREAMS));
    request.bytes = 8 * PAGE;
    request.alignment = 2 * ((uintptr_t)p & (0 - (uintptr_t)p));
    request.stream = s[0];
    request.pool = pool;
    EXPECT(request.alignment <= 4 * PAGE);
    inside_drain_all(pool);
    OK(galloc_alloc(&part, &request)); /* s[0] waits for the others */
    EXPECT((char *)part > (char *)p && (char *)part + 8 * PAGE < (char *)p + 16 * PAGE);
    EXPECT_EQ(galloc_pool_check(pool), 0);
    OK(galloc_free(part, s[0]));
    OK(galloc_free(pad, s[0]));
    pool_end(pool);
    for (int i = 0; i < STREAMS; i++) stream_end(s[i]);
    finish();
}

/* Twelve streams use a block. A shrink within a unit marks for all of them what it cuts off, and what it leaves. */
TEST(a_shrink_makes_sure_of_twice_the_uses)
{
    cudaStream_t s[STREAMS];
    begin_still();
    galloc_pool *pool = pool_limited(24 * PAGE);
    for (int i = 0; i < STREAMS; i++) s[i] = stream_new();
    void *p = get(pool, PAGE + 300, s[0]);
    for (int i = 1; i < STREAMS; i++) OK(galloc_record_stream(p, s[i]));
    inside_drain_all(pool);
    OK(galloc_resize(p, PAGE / 2 + 100, s[0]));
    EXPECT_EQ(galloc_pool_check(pool), 0);
    OK(galloc_free(p, s[0]));
    pool_end(pool);
    for (int i = 0; i < STREAMS; i++) stream_end(s[i]);
    finish();
}

enum { BEFORE, BEHIND, GROWTH, PLACES };

/* A free block before or behind a hole, freed in eight parts, each with an event of its own; then a request that takes
   it and the hole, or a block that grows over both, while the nth call of malloc and all later ones fail. Returns
   whether one failed. */
static int take_beside_a_hole(int place, int nth)
{
    enum { PARTS = 8 };
    int right = place == BEHIND;
    begin_still();
    galloc_config config = galloc_config_default();
    config.overhead = 0;
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new(), t = stream_new();
    OK(galloc_free(get(pool, 512, t), t)); /* the pool knows two streams */
    OK(galloc_pool_trim(pool, 0, NULL));
    void *wall = get(pool, PAGE, place == GROWTH ? s : t), *hole = right ? get(pool, 2 * PAGE, s) : NULL;
    void *part[PARTS], *p = NULL;
    for (int i = 0; i < PARTS; i++) part[i] = get(pool, PAGE, s);
    void *end = right ? get(pool, PAGE, t) : NULL;
    if (right) OK(galloc_free(hole, s));
    sim_run(-1);
    if (right) OK(galloc_pool_trim(pool, stats_of(pool).reserved.current - 2 * PAGE, NULL));
    for (int i = 0; i < PARTS; i++) {
        OK(sim_launch(s, NULL, 0));
        OK(galloc_free(part[i], s));
    }
    EXPECT(stats_of(pool).marks >= PARTS);
    inside_drain_all(pool);
    long created = sim_calls("cuMemCreate");
    sim_fail_malloc(nth, 1);
    cudaError_t err = place == GROWTH ? galloc_resize(wall, (2 + PARTS) * PAGE - 512, s)
                                      : galloc_pool_malloc(pool, &p, (2 + PARTS) * PAGE - 512, s);
    int fired = sim_failed_mallocs() > 0;
    sim_fail_malloc(0, 0);
    if (err) EXPECT_EQ(sim_calls("cuMemCreate"), created);
    else if (place != GROWTH) EXPECT(p == (right ? hole : part[0]));
    OK(galloc_free(p, s));
    OK(galloc_free(wall, place == GROWTH ? s : t));
    if (end) OK(galloc_free(end, t));
    pool_end(pool);
    finish();
    return fired;
}

TEST(the_marks_beside_a_hole_are_made_sure_of)
{
    for (int place = 0; place < PLACES; place++)
        for (int nth = 1; take_beside_a_hole(place, nth) && nth < 200;) nth++;
}

static galloc_pool *drained;

static void no_more_blocks(const char *function)
{
    if (strcmp(function, "cuMemSetAccess")) return;
    inside_drain_blocks(drained);
    sim_fail_malloc(1, 1);
}

/* Other threads have used up the descriptors with which a room would have been cut off: it ends where the hole does,
   and all of it is given back. */
TEST(a_room_that_cannot_be_cut_off_is_longer)
{
    begin_still();
    galloc_pool *pool = drained = pool_new(NULL);
    cudaStream_t s = stream_new();
    void *p = NULL, *q;
    galloc_request request = {.bytes = PAGE, .max_bytes = 16 * PAGE, .pool = pool, .stream = s};
    inside_drain_all(pool);
    sim_hook(no_more_blocks, NULL);
    OK(galloc_alloc(&p, &request));
    sim_hook(NULL, NULL);
    sim_fail_malloc(0, 0);
    EXPECT(info_of(p).room > 16 * PAGE);
    EXPECT_EQ(galloc_pool_check(pool), 0);
    OK(galloc_resize(p, 16 * PAGE, s));
    EXPECT_EQ(galloc_pool_check(pool), 0);
    OK(galloc_free(p, s));
    q = get(pool, GIB(50), s); /* the addresses are there again */
    EXPECT_EQ(sim_calls("cuMemAddressReserve"), 1);
    OK(galloc_free(q, s));
    EXPECT_EQ(galloc_pool_check(pool), 0);
    pool_end(pool);
    stream_end(s);
    finish();
}

TEST_MAIN()
