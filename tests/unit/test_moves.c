/* test_moves.c - pages that move: free memory in pieces serves what no piece could, in stream order, with no copy, no
   wait and no new memory. The simulated device keeps the books: which physical bytes an access reaches through
   whatever address, what is mapped, what is held, and whether an address goes away too early. GALLOC_SEED chooses the
   numbers of the random tests, GALLOC_ROUNDS how long they are. */

#include "setup.h"

#include <math.h>

enum { COMPLETED = GALLOC_REUSE_COMPLETED, FOLLOWED = GALLOC_REUSE_FOLLOWED, WAIT = GALLOC_REUSE_WAIT };
enum { ALL = COMPLETED | FOLLOWED | WAIT, PAIRS = 8, PAGE = 2 << 20 };

/* ---- a heap with its free memory in pieces ----------------------------------------------------------------------- */

/* Blocks of a page each, every second one freed: PAIRS free pages, no two side by side. */
typedef struct heap {
    galloc_pool *pool;
    cudaStream_t s, t;
    void *wall[PAIRS];
    galloc_stats before; /* counters when all was set up */
    size_t mapped;
    long blocking, created;
} heap;

static galloc_config frugal(size_t limit, int reuse)
{
    galloc_config config = config_limit(limit);
    config.overhead = 0;
    config.reuse = reuse;
    return config;
}

static void note(heap *h)
{
    h->before = stats_of(h->pool);
    h->mapped = sim_mapped(0);
    h->blocking = sim_blocking_calls();
    h->created = sim_calls("cuMemCreate");
}

static size_t moves(const heap *h) { return (size_t)(stats_of(h->pool).moves - h->before.moves); }
static long waits(const heap *h) { return (long)(stats_of(h->pool).waits - h->before.waits); }
static long created(const heap *h) { return sim_calls("cuMemCreate") - h->created; }

/* The first wall is T's, so that the pool knows two streams and events are recorded for what is freed. */
static cudaStream_t wall_home(const heap *h, int i) { return i ? h->s : h->t; }

/* The pieces are freed by `give`, or on S. */
static void heap_open_by(heap *h, const galloc_config *config, void (*give)(heap *, void *))
{
    void *piece[PAIRS];
    h->s = stream_new();
    h->t = stream_new();
    h->pool = pool_new(config);
    for (int i = 0; i < PAIRS; i++) {
        piece[i] = get_used(h->pool, PAGE, h->s, 100 + (uint64_t)i);
        h->wall[i] = get_used(h->pool, PAGE, wall_home(h, i), 200 + (uint64_t)i);
    }
    for (int i = 0; i < PAIRS; i++) {
        if (give) give(h, piece[i]);
        else OK(galloc_free(piece[i], h->s));
    }
    note(h);
}

static void heap_open(heap *h, int reuse)
{
    galloc_config config = frugal(GIB(1), reuse);
    heap_open_by(h, &config, NULL);
}

static void expect_whole(const heap *h)
{
    expect_healthy(h->pool, 1);
    EXPECT_EQ(sim_mapped(0), sim_physical(0) + stats_of(h->pool).leaving);
}

static void heap_close(heap *h)
{
    expect_whole(h);
    for (int i = 0; i < PAIRS; i++) {
        look(wall_home(h, i), h->wall[i], PAGE, 200 + (uint64_t)i);
        OK(galloc_free(h->wall[i], wall_home(h, i)));
    }
    pool_end(h->pool);
    finish();
}

/* A call that looks what is complete and gives nothing back that is in use. */
static void nudge(galloc_pool *pool) { OK(galloc_pool_trim(pool, SIZE_MAX, NULL)); }

/* ---- what a move does -------------------------------------------------------------------------------------------- */

TEST(pieces_serve_a_large_request_with_no_new_memory)
{
    begin();
    heap h;
    heap_open(&h, ALL);
    size_t physical = sim_physical(0);
    void *p = get_used(h.pool, 6 * PAGE, h.s, 1);
    EXPECT_EQ(created(&h), 0);
    EXPECT_EQ(moves(&h), 6);
    EXPECT_EQ(stats_of(h.pool).moved_bytes - h.before.moved_bytes, 6 * PAGE);
    EXPECT_EQ(stats_of(h.pool).reserved.current, h.before.reserved.current);
    EXPECT_EQ(stats_of(h.pool).reserved.peak, h.before.reserved.peak);
    EXPECT_EQ(stats_of(h.pool).reserved.total, h.before.reserved.total);
    galloc_stats after = stats_of(h.pool);
    for (int i = 0; i < GALLOC_PAGE_SIZES; i++) {
        EXPECT_EQ(after.pages[i].count, h.before.pages[i].count);
        EXPECT_EQ(after.pages[i].bytes, h.before.pages[i].bytes);
    }
    EXPECT_EQ(stats_of(h.pool).grows, h.before.grows);
    EXPECT_EQ(stats_of(h.pool).hits, h.before.hits);
    EXPECT_EQ(stats_of(h.pool).waits, h.before.waits);
    EXPECT_EQ(sim_physical(0), physical);
    EXPECT_EQ(sim_physical_peak(0), physical);
    expect_whole(&h);
    for (int i = 0; i < PAIRS; i++) look(wall_home(&h, i), h.wall[i], PAGE, 200 + (uint64_t)i);
    look(h.s, p, 6 * PAGE, 1);
    void *q = get_used(h.pool, 2 * PAGE, h.s, 2); /* the rest of the pieces */
    EXPECT_EQ(created(&h), 0);
    EXPECT_EQ(moves(&h), 8);
    look(h.s, p, 6 * PAGE, 1);
    look(h.s, q, 2 * PAGE, 2);
    OK(galloc_free(p, h.s));
    OK(galloc_free(q, h.s));
    heap_close(&h);
}

/* Every byte, with memory behind the addresses. */
TEST(contents_are_where_they_belong)
{
    sim_options options = sim_defaults();
    options.mode = SIM_BACKED;
    options.memory = MIB(256);
    options.seed = test_seed();
    begin_with(options);
    heap h;
    heap_open(&h, ALL);
    for (uint64_t round = 1; round < 6; round++) {
        void *p = get_used(h.pool, 5 * PAGE, h.s, round), *q = get_used(h.pool, 3 * PAGE, h.s, 10 + round);
        for (int i = 0; i < PAIRS; i++) look(wall_home(&h, i), h.wall[i], PAGE, 200 + (uint64_t)i);
        look(h.s, p, 5 * PAGE, round);
        look(h.s, q, 3 * PAGE, 10 + round);
        OK(galloc_free(round % 2 ? p : q, h.s));
        OK(galloc_free(round % 2 ? q : p, h.s));
        EXPECT_EQ(created(&h), 0);
    }
    EXPECT(moves(&h) >= 8);
    heap_close(&h);
}

/* Nothing moves for a request that a free block fits, nor to fill what the peak of live bytes allows. */
TEST(nothing_moves_without_need)
{
    begin();
    heap h;
    heap_open(&h, ALL);
    void *p[PAIRS];
    for (int i = 0; i < PAIRS; i++) p[i] = get_used(h.pool, PAGE, h.s, 1);
    EXPECT_EQ(moves(&h), 0);
    void *q = get_used(h.pool, 8 * PAGE, h.s, 2);
    EXPECT_EQ(moves(&h), 0);
    EXPECT_EQ(stats_of(h.pool).reserved.current, h.before.reserved.current + 8 * PAGE);
    for (int i = 0; i < PAIRS; i++) OK(galloc_free(p[i], h.s));
    OK(galloc_free(q, h.s));
    heap_close(&h);
}

/* What pieces there are is used, only the rest is created. */
TEST(a_move_is_completed_by_new_pages)
{
    begin();
    heap h;
    heap_open(&h, ALL);
    void *p = get_used(h.pool, 12 * PAGE, h.s, 1);
    EXPECT(moves(&h) >= 7 && moves(&h) <= 8);
    EXPECT(created(&h) > 0 && stats_of(h.pool).reserved.current == 20 * PAGE);
    expect_whole(&h);
    OK(galloc_free(p, h.s));
    heap_close(&h);
}

/* ---- stream order ------------------------------------------------------------------------------------------------ */

/* The work that used the pieces has not begun when they move; it reaches them through their old addresses. */
TEST(own_pages_move_while_their_work_waits)
{
    begin_still();
    heap h;
    heap_open(&h, 0);
    long pending = sim_pending();
    void *p = get_used(h.pool, 8 * PAGE, h.s, 1);
    EXPECT_EQ(moves(&h), 8);
    EXPECT_EQ(waits(&h), 0);
    EXPECT_EQ(sim_calls("cuStreamWaitEvent"), 0);
    EXPECT_EQ(sim_blocking_calls(), 0);
    EXPECT_EQ(sim_pending(), pending + 1);
    look(h.s, p, 8 * PAGE, 1);
    OK(galloc_free(p, h.s));
    heap_close(&h);
}

TEST(pages_of_another_stream_move_once_they_are_done)
{
    for (int reuse = COMPLETED; reuse <= ALL; reuse += 2) {
        begin_still();
        heap h;
        heap_open(&h, reuse);
        sim_run(-1);
        void *p = get_used(h.pool, 8 * PAGE, h.t, 1);
        EXPECT_EQ(moves(&h), 8);
        EXPECT_EQ(waits(&h), 0);
        EXPECT_EQ(created(&h), 0);
        EXPECT_EQ(sim_blocking_calls(), 0);
        OK(galloc_free(p, h.t));
        heap_close(&h);
    }
}

TEST(pages_of_another_stream_move_by_a_queued_wait)
{
    for (int reuse = WAIT; reuse <= ALL; reuse++) {
        begin_still();
        heap h;
        heap_open(&h, reuse);
        void *p = get_used(h.pool, 8 * PAGE, h.t, 1);
        EXPECT_EQ(moves(&h), 8);
        EXPECT(waits(&h) >= 1);
        EXPECT_EQ(created(&h), 0);
        EXPECT_EQ(sim_blocking_calls(), 0);
        EXPECT(sim_pending() > 0);
        look(h.t, p, 8 * PAGE, 1);
        OK(galloc_free(p, h.t));
        heap_close(&h);
    }
}

/* Where waits are forbidden, memory that is not complete is left alone and new memory made, over the overhead. */
TEST(where_nobody_may_wait_memory_is_created)
{
    for (int reuse = 0; reuse < WAIT; reuse++) {
        begin_still();
        heap h;
        heap_open(&h, reuse);
        void *p = get_used(h.pool, 8 * PAGE, h.t, 1);
        EXPECT_EQ(moves(&h), 0);
        EXPECT_EQ(waits(&h), 0);
        EXPECT_EQ(sim_calls("cuStreamWaitEvent"), 0);
        EXPECT_EQ(sim_blocking_calls(), 0);
        EXPECT_EQ(stats_of(h.pool).reserved.current, h.before.reserved.current + 8 * PAGE);
        OK(galloc_free(p, h.t));
        heap_close(&h);
    }
}

/* Given to S in stream order, never used there, and freed on T, which is in no order to S: what S did with the pages
   before they moved still stands in T's way. */
TEST(marks_go_with_the_pages)
{
    for (int reuse = 0; reuse <= ALL; reuse++) {
        begin_still();
        heap h;
        heap_open(&h, reuse);
        void *p = get(h.pool, 8 * PAGE, h.s);
        EXPECT_EQ(moves(&h), 8);
        OK(galloc_free(p, h.t));
        EXPECT_EQ(galloc_pool_check(h.pool), 0);
        void *q = get_used(h.pool, 8 * PAGE, h.t, 1);
        if (reuse & WAIT) EXPECT(waits(&h) >= 1);
        else EXPECT(q != p);
        EXPECT_EQ(sim_blocking_calls(), 0);
        OK(galloc_free(q, h.t));
        heap_close(&h);
    }
}

/* Less is asked for than whole pages: the rest of them is free where they went, with its marks. */
TEST(the_rest_of_a_moved_page_keeps_its_marks)
{
    for (int reuse = 0; reuse <= ALL; reuse++) {
        begin_still();
        heap h;
        heap_open(&h, reuse);
        void *p = get_used(h.pool, 7 * PAGE + 512, h.s, 1), *q[4];
        EXPECT_EQ(moves(&h), 8);
        for (uint64_t i = 0; i < 4; i++) q[i] = get_used(h.pool, PAGE / 4, h.t, 2 + i);
        EXPECT_EQ(waits(&h) > 0, (reuse & WAIT) != 0);
        EXPECT_EQ(sim_blocking_calls(), 0);
        look(h.s, p, 7 * PAGE + 512, 1);
        OK(galloc_free(p, h.s));
        for (int i = 0; i < 4; i++) OK(galloc_free(q[i], h.t));
        heap_close(&h);
    }
}

static void give_recorded(heap *h, void *ptr)
{
    OK(galloc_record_stream(ptr, h->t));
    OK(galloc_free(ptr, h->s));
}

static void give_after_both(heap *h, void *ptr)
{
    cudaStream_t both[2] = {h->s, h->t};
    OK(galloc_free_after(ptr, both, 2));
}

/* T reads the piece, some time later. */
static void give_read_by_t(heap *h, void *ptr)
{
    sim_access access = {ptr, PAGE, SIM_READ, 0};
    order(h->s, h->t);
    sim_hold(h->t, 1);
    OK(sim_launch(h->t, &access, 1));
    give_recorded(h, ptr);
}

/* Neither S nor T has the pages before the other's work is done or waited for. */
TEST(pages_that_several_streams_used_move_behind_all_of_them)
{
    for (int reuse = 0; reuse <= ALL; reuse++) {
        for (int how = 0; how < 4; how++) {
            begin_still();
            heap h;
            galloc_config config = frugal(GIB(1), reuse);
            heap_open_by(&h, &config, how & 1 ? give_recorded : give_after_both);
            cudaStream_t taker = how & 2 ? h.t : h.s;
            void *p = get_used(h.pool, 8 * PAGE, taker, 1);
            EXPECT_EQ(moves(&h), reuse & WAIT ? 8 : 0);
            EXPECT_EQ(waits(&h) > 0, (reuse & WAIT) != 0);
            EXPECT_EQ(sim_blocking_calls(), 0);
            OK(galloc_free(p, taker));
            heap_close(&h);
        }
    }
}

TEST(pages_that_another_stream_reads_late_are_safe)
{
    for (int reuse = 0; reuse <= ALL; reuse += ALL) {
        begin_still();
        heap h;
        galloc_config config = frugal(GIB(1), reuse);
        heap_open_by(&h, &config, give_read_by_t);
        void *p = get_used(h.pool, 8 * PAGE, h.s, 1);
        sim_run(-1); /* S goes on if it may, T is held */
        EXPECT_EQ(moves(&h), reuse ? 8 : 0);
        EXPECT_EQ(sim_blocking_calls(), 0);
        sim_hold(h.t, 0);
        OK(galloc_free(p, h.s));
        heap_close(&h);
    }
}

/* Pages move beside free memory that a stream gave up later, with no event recorded since. What is waited for is what
   the pages need, not what their new neighbour does. */
TEST(a_move_waits_for_its_own_pages_only)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new(), both[2] = {stream_new(), stream_new()};
    galloc_config config = frugal(GIB(1), WAIT);
    galloc_pool *pool = pool_new(&config);
    void *piece[PAIRS], *wall[PAIRS], *small[8];
    for (int i = 0; i < PAIRS; i++) {
        piece[i] = get_used(pool, PAGE, s, 1);
        wall[i] = get_used(pool, PAGE, s, 2);
    }
    void *gap = get_used(pool, PAIRS * PAGE, s, 3);
    for (int i = 0; i < 8; i++) small[i] = get_used(pool, PAGE / 8, s, 4);
    OK(galloc_free(gap, s));
    OK(galloc_pool_trim(pool, (2 * PAIRS + 1) * PAGE, NULL)); /* the addresses before the small ones have no memory */
    void *rest = get_growable(pool, PAIRS * PAGE, 2 * PAIRS * PAGE, s); /* too long for them */
    for (int k = 0; k < 2; k++) order(s, both[k]);
    for (int i = 0; i < PAIRS; i++) {
        for (int k = 0; k < 2; k++) look(both[k], piece[i], PAGE, 1);
        OK(galloc_free_after(piece[i], both, 2));
    }
    for (int i = 0; i < 4; i++) OK(galloc_free_after(small[i], both, 2)); /* too little for an event */
    void *p = get_used(pool, PAIRS * PAGE, t, 5);
    EXPECT(p == gap);
    EXPECT_EQ(stats_of(pool).moves, PAIRS);
    EXPECT(stats_of(pool).waits >= 2);
    expect_healthy(pool, 1);
    OK(galloc_free(p, t));
    OK(galloc_free(rest, s));
    for (int i = 4; i < 8; i++) OK(galloc_free(small[i], s));
    for (int i = 0; i < PAIRS; i++) OK(galloc_free(wall[i], s));
    pool_end(pool);
    finish();
}

/* ---- old addresses ----------------------------------------------------------------------------------------------- */

/* Gives back so many pages and no more: nobody has to wait for them. */
static void give_back(heap *h, size_t pages)
{
    size_t held = stats_of(h->pool).reserved.current;
    OK(galloc_pool_trim(h->pool, held - pages * PAGE, NULL));
    EXPECT_EQ(stats_of(h->pool).reserved.current, held - pages * PAGE);
    expect_whole(h);
}

TEST(old_addresses_stay_mapped)
{
    begin_still();
    heap h;
    heap_open(&h, ALL);
    void *p = get_used(h.pool, 8 * PAGE, h.s, 1);
    for (int i = 0; i < 3; i++) {
        EXPECT_EQ(stats_of(h.pool).leaving, 8 * PAGE);
        EXPECT_EQ(sim_mapped(0), h.mapped + 8 * PAGE);
        nudge(h.pool);
        sim_run(i);
    }
    sim_run(-1);
    void *q = get_used(h.pool, PAGE, h.s, 2);
    nudge(h.pool);
    EXPECT_EQ(stats_of(h.pool).leaving, 8 * PAGE);
    EXPECT_EQ(sim_calls("cuMemUnmap"), 0);
    EXPECT_EQ(sim_blocking_calls(), 0);
    OK(galloc_free(p, h.s));
    OK(galloc_free(q, h.s));
    heap_close(&h);
}

/* Pages that are given back take their old addresses with them. A stream that is alone in its pool records nothing by
   itself; for old addresses it does, so that nobody has to wait for the device. */
TEST(old_addresses_go_with_their_pages)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = frugal(SIZE_MAX, ALL);
    galloc_pool *pool = pool_new(&config);
    void *p[8];
    for (int i = 0; i < 8; i++) p[i] = get_used(pool, PAGE, s, 1);
    EXPECT_EQ(event_calls(), 0);
    for (int i = 0; i < 8; i += 2) OK(galloc_free(p[i], s));
    void *q = get_used(pool, 4 * PAGE, s, 2);
    EXPECT_EQ(stats_of(pool).moves, 4);
    OK(galloc_free(q, s));
    void *mark = get_used(pool, 512, s, 3);
    OK(galloc_stream_retire(s));
    sim_run(-1);
    EXPECT_EQ(stats_of(pool).leaving, 4 * PAGE);
    OK(galloc_pool_trim(pool, 5 * PAGE, NULL));
    EXPECT_EQ(stats_of(pool).reserved.current, 5 * PAGE);
    EXPECT_EQ(stats_of(pool).leaving, PAGE); /* of the page that is still used */
    EXPECT_EQ(sim_mapped(0), 6 * PAGE);
    EXPECT_EQ(sim_blocking_calls(), 0);
    OK(galloc_free(mark, s));
    for (int i = 1; i < 8; i += 2) OK(galloc_free(p[i], s));
    pool_end(pool);
    finish();
}

/* A page is not given back, and none of its addresses unmapped, while work that used one of them goes on. */
TEST(old_addresses_go_each_in_its_time)
{
    begin_still();
    heap h;
    heap_open(&h, COMPLETED | FOLLOWED);
    void *piece[4], *wall[4];
    for (int i = 0; i < 4; i++) { /* T has some too, which runs on when S has ended */
        piece[i] = get_used(h.pool, PAGE, h.t, 1);
        wall[i] = get_used(h.pool, PAGE, h.t, 2);
    }
    for (int i = 0; i < 4; i++) OK(galloc_free(piece[i], h.t));
    void *p = get_used(h.pool, 8 * PAGE, h.s, 3);
    void *q = get_used(h.pool, 4 * PAGE, h.t, 4);
    EXPECT_EQ(stats_of(h.pool).leaving, 12 * PAGE);
    OK(galloc_free(p, h.s));
    OK(galloc_free(q, h.t));
    OK(galloc_stream_retire(h.s));
    OK(galloc_stream_retire(h.t));
    sim_hold(h.t, 1);
    sim_run(-1);
    give_back(&h, 8);
    EXPECT_EQ(stats_of(h.pool).leaving, 4 * PAGE);
    EXPECT_EQ(sim_blocking_calls(), 0);
    sim_hold(h.t, 0);
    sim_run(-1);
    give_back(&h, 4);
    EXPECT_EQ(stats_of(h.pool).leaving, 0);
    EXPECT_EQ(sim_blocking_calls(), 0);
    for (int i = 0; i < 4; i++) OK(galloc_free(wall[i], h.t));
    heap_close(&h);
}

/* A block that grows has old ranges in its way unmapped, but not before the work that used them is done. */
TEST(old_addresses_make_way_in_their_time)
{
    begin_still();
    heap h;
    heap_open(&h, ALL);
    void *p = get_used(h.pool, 8 * PAGE, h.s, 1);
    EXPECT_EQ(stats_of(h.pool).leaving, 8 * PAGE);
    EXPECT(galloc_resize(h.wall[0], 2 * PAGE, wall_home(&h, 0)) != cudaSuccess);
    EXPECT_EQ(sim_calls("cuMemUnmap"), 0);
    EXPECT_EQ(sim_blocking_calls(), 0);
    sim_run(-1);
    OK(galloc_resize(h.wall[0], 2 * PAGE, wall_home(&h, 0)));
    EXPECT_EQ(stats_of(h.pool).leaving, 7 * PAGE);
    EXPECT_EQ(sim_blocking_calls(), 0);
    OK(galloc_free(p, h.s));
    heap_close(&h);
}

/* Of eight pages every other one is freed, and moves into the block that is returned. */
static void *every_other_page(galloc_pool *pool, cudaStream_t s, void **p)
{
    for (int i = 0; i < 8; i++) p[i] = get_used(pool, PAGE, s, 1);
    for (int i = 0; i < 8; i += 2) OK(galloc_free(p[i], s));
    return get_used(pool, 4 * PAGE, s, 2);
}

/* A stream that is alone in its pool records nothing by itself; for old addresses it does. */
TEST(old_addresses_make_way_for_one_stream_alone)
{
    begin_still();
    cudaStream_t s = stream_new();
    galloc_config config = frugal(SIZE_MAX, ALL);
    galloc_pool *pool = pool_new(&config);
    void *p[8], *q = every_other_page(pool, s, p);
    EXPECT_EQ(stats_of(pool).leaving, 4 * PAGE);
    sim_run(-1);
    OK(galloc_resize(p[1], 2 * PAGE, s));
    EXPECT_EQ(stats_of(pool).leaving, 3 * PAGE);
    EXPECT_EQ(sim_blocking_calls(), 0);
    OK(galloc_free(q, s));
    for (int i = 1; i < 8; i += 2) OK(galloc_free(p[i], s));
    pool_end(pool);
    finish();
}

typedef struct told_of_all {
    void *grows;
    cudaStream_t stream;
    int calls;
    cudaError_t error;
} told_of_all;

static void *grow_meanwhile(void *arg)
{
    told_of_all *all = arg;
    all->error = galloc_resize(all->grows, 2 * PAGE, all->stream);
    return NULL;
}

static void grow_while_told(galloc_pool *pool, void *addr, size_t bytes, void *user)
{
    told_of_all *all = user;
    pthread_t other;
    (void)pool, (void)addr, (void)bytes;
    if (all->calls++) return;
    EXPECT_EQ(pthread_create(&other, NULL, grow_meanwhile, all), 0);
    pthread_join(other, NULL);
}

/* New callbacks are being told of all mappings: what is on that list stays, though growth needs the place. */
TEST(old_addresses_stay_while_callbacks_are_told_of_all)
{
    begin_still();
    cudaStream_t s = stream_new();
    galloc_config config = frugal(SIZE_MAX, ALL);
    galloc_pool *pool = pool_new(&config);
    void *p[8], *q = every_other_page(pool, s, p);
    galloc_callbacks calls = {.on_map = grow_while_told};
    told_of_all all = {p[1], s, 0, cudaSuccess};
    sim_run(-1);
    calls.user = &all;
    long unmaps = sim_calls("cuMemUnmap");
    OK(galloc_pool_set_callbacks(pool, &calls));
    EXPECT(all.calls > 1);
    EXPECT(all.error != cudaSuccess);
    EXPECT_EQ(sim_calls("cuMemUnmap"), unmaps);
    EXPECT_EQ(stats_of(pool).leaving, 4 * PAGE);
    OK(galloc_resize(p[1], 2 * PAGE, s));
    EXPECT_EQ(stats_of(pool).leaving, 3 * PAGE);
    OK(galloc_free(q, s));
    for (int i = 1; i < 8; i += 2) OK(galloc_free(p[i], s));
    pool_end(pool);
    finish();
}

/* No pointer into an old range is taken for memory of the program's. */
TEST(old_addresses_are_nobodys)
{
    begin_still();
    cudaStream_t s = stream_new();
    galloc_config config = frugal(SIZE_MAX, ALL);
    galloc_pool *pool = pool_new(&config);
    void *p[8], *q = every_other_page(pool, s, p);
    for (int i = 0; i < 8; i += 2) {
        EXPECT_EQ(info_of(p[i]).state, GALLOC_STATE_FOREIGN);
        EXPECT_EQ(galloc_free(p[i], s), cudaErrorInvalidDevicePointer);
    }
    OK(galloc_free(q, s));
    for (int i = 1; i < 8; i += 2) OK(galloc_free(p[i], s));
    pool_end(pool);
    finish();
}

/* Asks for more than the block and the addresses behind it: all its pages must move on. */
static void *move_on(heap *h, void *block, size_t bytes, void **wall, uint64_t tag)
{
    *wall = get_used(h->pool, PAGE, h->s, 60); /* stands behind the block */
    OK(galloc_free(block, h->s));
    void *p = get_used(h->pool, bytes, h->s, tag);
    look(h->s, p, bytes, tag);
    expect_whole(h);
    return p;
}

/* The same pages move two and three times before the first ranges that they left can be unmapped. */
static void *move_three_times(heap *h, void **wall)
{
    void *p = get_used(h->pool, 8 * PAGE, h->s, 1);
    EXPECT_EQ(moves(h), 8);
    for (int i = 0; i < 3; i++) {
        p = move_on(h, p, (size_t)(9 + i) * PAGE, &wall[i], (uint64_t)(2 + i));
        EXPECT_EQ(moves(h), 8 + 8 * (i + 1) + i * (i + 1) / 2);
        EXPECT_EQ(stats_of(h->pool).leaving, moves(h) * PAGE);
        EXPECT_EQ(sim_calls("cuMemUnmap"), 0);
        EXPECT_EQ(sim_blocking_calls(), 0);
    }
    return p;
}

TEST(pages_move_on_from_old_range_to_old_range)
{
    begin_still();
    heap h;
    void *wall[3];
    heap_open(&h, 0);
    void *p = move_three_times(&h, wall);
    size_t leaving = stats_of(h.pool).leaving;
    OK(galloc_free(p, h.s));
    OK(galloc_stream_retire(h.s));
    sim_run(-1);
    give_back(&h, 11); /* all that p had */
    EXPECT(stats_of(h.pool).leaving < leaving / 2);
    EXPECT_EQ(sim_blocking_calls(), 0);
    for (int i = 0; i < 3; i++) OK(galloc_free(wall[i], h.s));
    heap_close(&h);
}

/* Each two of the pages are joined once, at a place of their own. What they leave there stays below 8 times the memory
   held. */
TEST(old_ranges_stay_below_a_multiple_of_the_heap)
{
    enum { PAGES = 14 };
    sim_options options = sim_defaults();
    options.pace = SIM_PACE_PROMPT;
    begin_with(options);
    galloc_config config = frugal(PAGES * PAGE, ALL);
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new();
    void *p[PAGES];
    size_t most = 0;
    for (int i = 0; i < PAGES; i++) p[i] = get(pool, PAGE, s);
    for (int step = 1; step < PAGES; step++) {
        for (int i = 0; i < PAGES; i++) {
            int other = (i + step) % PAGES;
            OK(galloc_free(p[i], s));
            OK(galloc_free(p[other], s));
            OK(galloc_free(get(pool, 2 * PAGE, s), s));
            p[i] = get(pool, PAGE, s);
            p[other] = get(pool, PAGE, s);
            most = larger(most, stats_of(pool).leaving);
        }
    }
    EXPECT(most >= 8 * PAGES * (size_t)PAGE);       /* the bound was reached */
    EXPECT(most <= (8 * PAGES + 2) * (size_t)PAGE); /* beyond it only what the last move left */
    for (int i = 0; i < PAGES; i++) OK(galloc_free(p[i], s));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* Trim gives back what it may: it waits for the device, then old ranges and pages go, and none before its time. */
TEST(trim_and_destroy_while_old_ranges_leave)
{
    for (int how = 0; how < 3; how++) {
        begin_still();
        heap h;
        void *wall[3];
        heap_open(&h, ALL);
        OK(galloc_free(move_three_times(&h, wall), h.s));
        for (int i = 0; i < 3; i++) OK(galloc_free(wall[i], h.s));
        EXPECT(stats_of(h.pool).leaving > 0);
        if (how == 1) OK(galloc_pool_trim(h.pool, 0, NULL));
        if (how == 1) EXPECT_EQ(sim_physical(0), PAIRS * PAGE);
        if (how == 2) OK(galloc_pool_trim(h.pool, sim_physical(0) - 11 * PAGE, NULL));
        if (how == 2) EXPECT(sim_calls("cuMemUnmap") > 11); /* the old addresses of these pages too */
        heap_close(&h);
    }
}

/* ---- overhead ---------------------------------------------------------------------------------------------------- */

TEST(overhead_chooses_between_moving_and_creating)
{
    static const double overheads[] = {0, 0.02, 0.24, 0.26, 0.6, 100};
    static const size_t moved[] = {8, 8, 4, 4, 0, 0}; /* of 8; 0.25 of 16 pages are 4 */
    for (int i = 0; i < 6; i++) {
        begin_still();
        heap h;
        galloc_config config = frugal(GIB(1), 0);
        config.overhead = overheads[i];
        heap_open_by(&h, &config, NULL);
        void *p = get_used(h.pool, 8 * PAGE, h.s, 1);
        size_t extra = stats_of(h.pool).reserved.current - h.before.reserved.current;
        if (i < 2 || i > 3) EXPECT_EQ(moves(&h), moved[i]);
        else EXPECT(moves(&h) >= moved[i] && moves(&h) < 8);
        EXPECT_EQ(extra, (8 - moves(&h)) * PAGE);
        EXPECT((double)extra <= overheads[i] * 16 * PAGE);
        OK(galloc_free(p, h.s));
        heap_close(&h);
    }
}

/* With a hundred times the peak allowed nothing ever moves. */
TEST(overhead_100_never_moves)
{
    begin();
    dice d = {test_seed()};
    cudaStream_t s[2] = {stream_new(), stream_new()};
    galloc_config config = galloc_config_default();
    config.overhead = 100;
    galloc_pool *pool = pool_new(&config);
    void *p[48] = {NULL};
    for (int i = 0; i < 2000; i++) {
        uint32_t k = roll_below(&d, 48);
        if (p[k]) OK(galloc_free(p[k], s[k % 2]));
        p[k] = get_used(pool, roll_bytes(&d, MIB(32)), s[k % 2], k);
    }
    EXPECT_EQ(stats_of(pool).moves, 0);
    EXPECT_EQ(stats_of(pool).leaving, 0);
    for (int k = 0; k < 48; k++) OK(galloc_free(p[k], s[k % 2]));
    pool_end(pool);
    finish();
}

/* The search leaves out places that cannot be better than what it has. Heaps of many gaps, of one to three streams:
   the plan is that of a search that leaves none out. */
TEST(the_plan_is_the_best_of_all_places)
{
    static const size_t sizes[] = {MIB(3), MIB(6) + 512, MIB(17), MIB(48)};
    for (uint32_t round = 0; round < 48; round++) {
        enum { BLOCKS = 40 };
        begin();
        dice d = {test_seed() + round};
        uint32_t streams = 1 + round % 3;
        cudaStream_t s[3] = {stream_new(), stream_new(), stream_new()};
        galloc_config config = frugal(GIB(2), round % 2 ? ALL : COMPLETED);
        config.growth = round & 4 ? PAGE : 0;
        galloc_pool *pool = pool_new(&config);
        void *p[BLOCKS] = {NULL};
        for (int i = 0; i < 600; i++) {
            uint32_t k = roll_below(&d, BLOCKS), on = k % streams;
            if (p[k]) OK(galloc_free(p[k], s[on]));
            p[k] = roll_below(&d, 3) ? get_used(pool, roll_bytes(&d, MIB(24)), s[on], k) : NULL;
            if (round >= 24 && !roll_below(&d, 16)) OK(galloc_pool_trim(pool, MIB(8), NULL)); /* makes holes */
            if (i % 4) continue;
            for (uint32_t n = 0; n < 16; n++) {
                unsigned long long id = stream_id(s[n % streams]);
                if (!EXPECT(inside_plan_is_best(pool, id, sizes[n / 4], n & 1, n >> 1 & 1))) return;
            }
        }
        EXPECT(stats_of(pool).moves > 0);
        for (uint32_t k = 0; k < BLOCKS; k++)
            if (p[k]) OK(galloc_free(p[k], s[k % streams]));
        pool_end(pool);
        finish();
    }
}

/* A pool begins in the host memory of the pool before, with plans of the same numbers. */
TEST(a_plan_has_nothing_of_a_former_pool)
{
    enum { BLOCKS = 40 };
    begin();
    cudaStream_t s[3] = {stream_new(), stream_new(), stream_new()};
    for (uint32_t round = 0; round < 60; round++) {
        dice d = {1 + round % 7}; /* these met one */
        uint32_t streams = 1 + round % 3;
        galloc_config config = frugal(GIB(2), round % 2 ? ALL : COMPLETED);
        galloc_pool *pool = pool_new(&config);
        void *p[BLOCKS] = {NULL};
        for (int i = 0; i < 300; i++) {
            static const size_t sizes[] = {MIB(3), MIB(6) + 512, MIB(17), MIB(48)};
            uint32_t k = roll_below(&d, BLOCKS), on = k % streams;
            if (p[k]) OK(galloc_free(p[k], s[on]));
            p[k] = roll_below(&d, 3) ? get_used(pool, roll_bytes(&d, MIB(24)), s[on], k) : NULL;
            for (uint32_t n = 0; n < 8 && i % 4 == 0; n++)
                if (!EXPECT(inside_plan_is_best(pool, stream_id(s[n % streams]), sizes[n % 4], 0, n >> 2 & 1))) return;
        }
        for (uint32_t k = 0; k < BLOCKS; k++)
            if (p[k]) OK(galloc_free(p[k], s[k % streams]));
        pool_end(pool);
    }
    finish();
}

TEST(values_of_overhead)
{
    static const double good[] = {0, 0.02, 1e-9, 1, 99.5, 100};
    const double bad[] = {-0.001, -1, 100.5, 1e300, (double)NAN, (double)INFINITY, -(double)INFINITY};
    begin();
    EXPECT(galloc_config_default().overhead == 0.02);
    for (int i = 0; i < 6; i++) {
        galloc_config config = galloc_config_default(), got = config;
        config.overhead = good[i];
        galloc_pool *pool = pool_new(&config);
        OK(galloc_pool_config(pool, &got));
        EXPECT(got.overhead == good[i]);
        pool_end(pool);
    }
    for (int i = 0; i < 7; i++) {
        galloc_config config = galloc_config_default();
        galloc_pool *pool = (galloc_pool *)&config;
        config.overhead = bad[i];
        EXPECT_EQ(galloc_pool_create(&pool, &config), cudaErrorInvalidValue);
        EXPECT(pool == NULL);
        EXPECT(strstr(galloc_last_message(), "overhead") != NULL);
    }
    finish();
}

TEST(overhead_in_words)
{
    static const struct {
        const char *text;
        double value;
    } good[] = {{"overhead:0", 0},     {"overhead:0.02", 0.02}, {"overhead:.5", 0.5},     {"overhead:1.", 1},
                {"overhead:100", 100}, {"overhead:100.0", 100}, {"overhead:00.25", 0.25}, {"overhead:0.125", 0.125}};
    static const char *const bad[] = {"",      ".",   "-1",  "-0",    "+1",  "1e-2",
                                      "nan",   "inf", "0x1", "100.1", "101", "1..2",
                                      "1.2.3", " 1",  "1 ",  "0,5",   "2%",  "9999999999999999999999"};
    char message[200];
    begin();
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        galloc_config config = galloc_config_default();
        config.overhead = 7;
        OK(galloc_config_parse(&config, good[i].text, message, sizeof message));
        if (!EXPECT(config.overhead > good[i].value - 1e-12 && config.overhead < good[i].value + 1e-12))
            printf("    %s: %g\n", good[i].text, config.overhead);
    }
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        char text[100];
        galloc_config config = galloc_config_default();
        snprintf(text, sizeof text, "memory_limit:1G,overhead:%s", bad[i]);
        message[0] = 0;
        if (!EXPECT_EQ(galloc_config_parse(&config, text, message, sizeof message), cudaErrorInvalidValue))
            printf("    %s\n", text);
        EXPECT(config.overhead == 0.02 && config.memory_limit == SIZE_MAX);
        EXPECT(strstr(message, "at 17") != NULL || strstr(message, "at 28") != NULL);
        if (!strchr(bad[i], ',')) EXPECT(strstr(message, "overhead") != NULL);
    }
    galloc_config config = galloc_config_default();
    EXPECT_EQ(galloc_config_parse(&config, "overhead:1,overhead:1", message, sizeof message), cudaErrorInvalidValue);
    EXPECT(strstr(message, "at 12") != NULL);
    EXPECT_EQ(galloc_config_parse(&config, "overhead", message, sizeof message), cudaErrorInvalidValue);
    EXPECT_EQ(galloc_config_parse(&config, "Overhead:1", message, sizeof message), cudaErrorInvalidValue);
    EXPECT(strstr(message, "overhead") != NULL);
    finish();
}

/* ---- under a limit ----------------------------------------------------------------------------------------------- */

/* Blocks that stand apart: each was given room behind it, which nobody else has taken. */
static void fill_apart(galloc_pool *pool, void **p, int n, cudaStream_t stream)
{
    for (int i = 0; i < n; i++) {
        p[i] = get_growable(pool, PAGE, 2 * PAGE, stream);
        put(stream, p[i], PAGE, (uint64_t)i);
    }
}

/* All is free, in pieces; nearly the whole limit is asked for in one. Nothing but moving can serve that without giving
   memory back. */
TEST(nearly_the_whole_limit_in_one_piece)
{
    for (int reuse = 0; reuse <= ALL; reuse++) {
        for (int taker = 0; taker < 2; taker++) {
            begin_still();
            enum { N = 32 };
            void *p[N];
            cudaStream_t s[2] = {stream_new(), stream_new()};
            galloc_config config = frugal(N * PAGE, reuse);
            galloc_pool *pool = pool_new(&config);
            fill_apart(pool, p, N - 1, s[0]);
            p[N - 1] = get_used(pool, PAGE, s[1], 1);
            for (int i = 0; i < N - 1; i++) OK(galloc_free(p[i], s[0]));
            EXPECT_EQ(stats_of(pool).reserved.current, N * PAGE);
            void *q = get_used(pool, (N - 1) * PAGE, s[taker], 2);
            EXPECT(sim_physical_peak(0) <= config.memory_limit);
            EXPECT(stats_of(pool).reserved.peak <= config.memory_limit);
            if (taker == 0) {
                EXPECT_EQ(stats_of(pool).moves, N - 1);
                EXPECT_EQ(stats_of(pool).waits, 0);
                EXPECT_EQ(sim_blocking_calls(), 0);
            }
            if (reuse & WAIT) EXPECT_EQ(sim_blocking_calls(), 0);
            expect_healthy(pool, 1);
            look(s[taker], q, (N - 1) * PAGE, 2);
            OK(galloc_free(q, s[taker]));
            OK(galloc_free(p[N - 1], s[1]));
            pool_end(pool);
            finish();
        }
    }
}

/* The limit holds after every step, whatever is asked for. */
TEST(the_limit_is_never_exceeded)
{
    static const double overheads[] = {0, 0.02, 1, 100};
    for (int i = 0; i < 8; i++) {
        sim_options options = sim_defaults();
        options.seed = test_seed() + (uint64_t)i;
        options.lag = i % 2 ? 20 : 0;
        begin_with(options);
        dice d = {options.seed};
        size_t limit = MIB(90);
        galloc_config config = frugal(limit, i < 4 ? ALL : 0);
        config.overhead = overheads[i % 4];
        galloc_pool *pool = pool_new(&config);
        cudaStream_t s[3] = {stream_new(), stream_new(), stream_new()};
        void *held[20] = {NULL};
        size_t bytes[20] = {0}, live = 0;
        for (int n = 0; n < 600; n++) {
            uint32_t k = roll_below(&d, 20);
            if (held[k]) {
                look(s[k % 3], held[k], bytes[k], k);
                OK(galloc_free(held[k], s[k % 3]));
                live -= bytes[k];
            }
            held[k] = NULL;
            bytes[k] = roll_bytes(&d, MIB(40));
            cudaError_t err = galloc_pool_malloc(pool, &held[k], bytes[k], s[k % 3]);
            if (err == cudaSuccess) put(s[k % 3], held[k], bytes[k], k);
            else EXPECT(err == cudaErrorMemoryAllocation && live + bytes[k] + 20 * PAGE > limit);
            live += held[k] ? bytes[k] : 0;
            if (!EXPECT(sim_physical(0) <= limit && sim_physical_peak(0) <= limit)) break;
            if (n % 20 == 0) expect_healthy(pool, 1);
        }
        EXPECT(stats_of(pool).moves > 0);
        for (int k = 0; k < 20; k++) OK(galloc_free(held[k], s[k % 3]));
        pool_end(pool);
        finish();
    }
}

/* ---- room to grow ------------------------------------------------------------------------------------------------ */

TEST(blocks_with_room_are_made_of_cached_pages)
{
    for (int other = 0; other < 2; other++) {
        begin_still();
        heap h;
        heap_open(&h, ALL);
        cudaStream_t stream = other ? h.t : h.s;
        void *p = get_growable(h.pool, 6 * PAGE, 64 * PAGE, stream);
        put(stream, p, 6 * PAGE, 1);
        EXPECT_EQ(moves(&h), 6);
        EXPECT_EQ(waits(&h) > 0, other);
        EXPECT_EQ(created(&h), 0);
        EXPECT_EQ(sim_blocking_calls(), 0);
        EXPECT_EQ(info_of(p).room, 64 * PAGE);
        expect_whole(&h);
        look(stream, p, 6 * PAGE, 1);
        OK(galloc_free(p, stream));
        heap_close(&h);
    }
}

/* The pages of a block with room are taken from one free block as well as from many. */
TEST(blocks_with_room_take_pages_of_a_whole_block)
{
    begin_still();
    cudaStream_t s = stream_new();
    galloc_config config = frugal(16 * PAGE, ALL);
    galloc_pool *pool = pool_new(&config);
    OK(galloc_free(get_used(pool, 16 * PAGE, s, 1), s));
    void *p = get_growable(pool, 4 * PAGE, 16 * PAGE, s);
    put(s, p, 4 * PAGE, 2);
    EXPECT(sim_physical_peak(0) <= config.memory_limit);
    EXPECT(stats_of(pool).moves >= 1);
    EXPECT_EQ(sim_blocking_calls(), 0);
    OK(galloc_free(p, s));
    pool_end(pool);
    finish();
}

TEST(blocks_grow_into_their_room_under_a_limit)
{
    begin();
    heap h;
    galloc_config config = frugal(2 * PAIRS * PAGE, ALL);
    heap_open_by(&h, &config, NULL);
    void *p = get_growable(h.pool, 2 * PAGE, 8 * PAGE, h.s);
    put(h.s, p, 2 * PAGE, 1);
    for (size_t n = 3; n <= 8; n++) {
        OK(galloc_resize(p, n * PAGE, h.s));
        look(h.s, p, (n - 1) * PAGE, n - 2);
        put(h.s, p, n * PAGE, n - 1);
        EXPECT(sim_physical_peak(0) <= config.memory_limit);
        expect_whole(&h);
    }
    EXPECT_EQ(galloc_resize(p, 9 * PAGE, h.s), cudaErrorMemoryAllocation); /* there are addresses */
    OK(galloc_free(p, h.s));
    heap_close(&h);
}

/* ---- when calls fail --------------------------------------------------------------------------------------------- */

enum { HELD = 16 };

typedef struct trial {
    heap h;
    struct {
        void *ptr;
        size_t bytes;
        uint64_t tag;
        cudaStream_t home;
    } held[HELD];
    int count, refused;
} trial;

/* The program's memory is as it was; pages may have moved before the call failed for another reason. */
static void expect_kept(const trial *t, galloc_stats before)
{
    galloc_stats after = stats_of(t->h.pool);
    EXPECT_EQ(after.live.current, before.live.current);
    EXPECT_EQ(after.allocated.current, before.allocated.current);
    EXPECT_EQ(after.blocks.current, before.blocks.current);
    EXPECT_EQ(after.mallocs, before.mallocs);
    EXPECT_EQ(after.reserved.current, after.allocated.current + after.cached.current);
}

static void try_get(trial *t, size_t bytes, size_t max_bytes, cudaStream_t stream)
{
    galloc_stats before = stats_of(t->h.pool);
    galloc_request request = {0};
    void *ptr = t;
    uint64_t tag = 300 + (uint64_t)t->count;
    request.bytes = bytes;
    request.max_bytes = max_bytes;
    request.pool = t->h.pool;
    request.stream = stream;
    cudaError_t err = galloc_alloc(&ptr, &request);
    expect_healthy(t->h.pool, 1);
    if (err != cudaSuccess) {
        EXPECT(ptr == NULL);
        t->refused++;
        expect_kept(t, before);
        return;
    }
    put(stream, ptr, bytes, tag);
    t->held[t->count].ptr = ptr;
    t->held[t->count].bytes = bytes;
    t->held[t->count].tag = tag;
    t->held[t->count++].home = stream;
}

/* The block last got; it stays when the call fails. */
static void try_free(trial *t)
{
    if (!t->count) return;
    int i = t->count - 1;
    look(t->held[i].home, t->held[i].ptr, t->held[i].bytes, t->held[i].tag);
    if (galloc_free(t->held[i].ptr, t->held[i].home) == cudaSuccess) t->count = i;
    expect_healthy(t->h.pool, 1);
}

/* Moves of every kind, one after the other: own pages, pages of another stream, with new ones, on and on. */
static void act(trial *t)
{
    try_get(t, 5 * PAGE, 0, t->h.s);
    try_get(t, 3 * PAGE, 0, t->h.t);
    try_free(t);
    try_get(t, 4 * PAGE, 6 * PAGE, t->h.s);
    try_get(t, 600, 0, t->h.t);
    try_free(t);
    sim_run(20);
    try_free(t);
    try_get(t, 7 * PAGE + 512, 0, t->h.s);
    try_free(t);
    try_free(t);
    try_get(t, 10 * PAGE, 0, t->h.t);
    (void)galloc_pool_trim(t->h.pool, 17 * PAGE, NULL);
    expect_healthy(t->h.pool, 1);
    try_get(t, 2 * PAGE, 0, t->h.s);
}

static void trial_open(trial *t, int pace, int reuse)
{
    sim_options options = sim_defaults();
    galloc_config config = frugal(24 * PAGE, reuse);
    memset(t, 0, sizeof *t);
    options.pace = pace;
    options.seed = test_seed();
    begin_with(options);
    heap_open_by(&t->h, &config, NULL);
}

/* The fault is over: everything is where it was, and all goes on. */
static void trial_close(trial *t)
{
    sim_fail_clear();
    sim_fail_malloc(0, 0);
    for (int i = 0; i < PAIRS; i++) look(wall_home(&t->h, i), t->h.wall[i], PAGE, 200 + (uint64_t)i);
    while (t->count) {
        int left = t->count;
        try_free(t);
        if (!EXPECT(t->count < left)) break;
    }
    nudge(t->h.pool);
    EXPECT_EQ(stats_of(t->h.pool).quarantined, 0);
    int refused = t->refused;
    try_get(t, 11 * PAGE, 0, t->h.s);
    EXPECT_EQ(t->refused, refused);
    EXPECT(sim_physical_peak(0) <= 24 * PAGE);
    try_free(t);
    heap_close(&t->h);
}

/* 1 while there was still something to fail. */
static int run_with_fault(int host, const char *function, int stuck, int nth, int on, int pace, int reuse)
{
    trial t;
    trial_open(&t, pace, reuse);
    if (stuck) sim_fail("cuMemUnmap", 1, 1, 0);
    long calls = fail_nth(host, function, nth, on);
    act(&t);
    int failed = has_failed(host, function, calls);
    trial_close(&t);
    return failed;
}

static void sweep(int host, const char *function, int stuck, int on)
{
    static const int paces[] = {SIM_PACE_STILL, SIM_PACE_PROMPT, SIM_PACE_RANDOM};
    for (int i = 0; i < 6; i++) {
        long before = test_failures;
        int nth = 1;
        while (run_with_fault(host, function, stuck, nth, on, paces[i % 3], i < 3 ? ALL : 0) &&
               test_failures == before && nth < 2000)
            nth++;
        EXPECT(nth > 1 && nth < 2000);
        if (test_failures > before) printf("    call %d, case %d\n", nth, i);
    }
}

TEST(without_faults_nothing_is_refused)
{
    trial t;
    trial_open(&t, SIM_PACE_STILL, ALL);
    act(&t);
    EXPECT_EQ(t.refused, 0);
    EXPECT(moves(&t.h) >= 12);
    trial_close(&t);
}

TEST(the_nth_cuda_call_around_a_move_fails) { sweep(0, NULL, 0, 0); }

TEST(all_cuda_calls_from_the_nth_on_fail) { sweep(0, NULL, 0, 1); }

TEST(the_nth_host_malloc_around_a_move_fails) { sweep(1, NULL, 0, 0); }

TEST(all_host_mallocs_from_the_nth_on_fail) { sweep(1, NULL, 0, 1); }

/* What could not be undone is in quarantine, and tried again later. */
TEST(what_a_failed_move_did_cannot_be_undone)
{
    sweep(0, "cuMemMap", 1, 0);
    sweep(0, "cuMemSetAccess", 1, 0);
    sweep(1, NULL, 1, 0);
}

/* The move fails when it is half done: nothing has happened. */
TEST(a_move_that_fails_leaves_the_pieces_as_they_were)
{
    static const char *const functions[] = {"cuMemMap", "cuMemSetAccess"};
    for (int stuck = 0; stuck < 2; stuck++) {
        for (int f = 0; f < 2; f++) {
            begin_still();
            heap h;
            void *p = &h, *piece[PAIRS];
            heap_open(&h, ALL);
            size_t mapped = sim_mapped(0), physical = sim_physical(0);
            sim_fail(functions[f], f ? 1 : 5, 1, cudaErrorUnknown);
            if (stuck) sim_fail("cuMemUnmap", 1, 1, 0);
            EXPECT(galloc_pool_malloc(h.pool, &p, 8 * PAGE, h.s) != cudaSuccess);
            EXPECT(p == NULL);
            EXPECT_EQ(moves(&h), 0);
            EXPECT_EQ(stats_of(h.pool).leaving, 0);
            EXPECT_EQ(stats_of(h.pool).reserved.current, h.before.reserved.current);
            EXPECT_EQ(stats_of(h.pool).cached.current, h.before.cached.current);
            EXPECT_EQ(sim_physical(0), physical);
            EXPECT_EQ(sim_mapped(0), mapped + (stuck ? (f ? 8 : 4) * PAGE : 0));
            EXPECT_EQ(galloc_pool_check(h.pool), 0);
            sim_fail_clear();
            for (int i = 0; i < PAIRS; i++) piece[i] = get_used(h.pool, PAGE, h.s, 1);
            EXPECT_EQ(stats_of(h.pool).reserved.current, h.before.reserved.current);
            for (int i = 0; i < PAIRS; i++) OK(galloc_free(piece[i], h.s));
            nudge(h.pool);
            EXPECT_EQ(sim_mapped(0), mapped);
            p = get_used(h.pool, 8 * PAGE, h.s, 2);
            EXPECT_EQ(moves(&h), 8);
            look(h.s, p, 8 * PAGE, 2);
            OK(galloc_free(p, h.s));
            heap_close(&h);
        }
    }
}

/* The driver does not let go of an address: the page behind it stays held until it does, wherever it has gone. */
/* Of pages of several sizes more are taken than needed, and some go back before the driver is asked; the rest follows
   when it refuses. */
TEST(a_move_that_took_too_much_fails)
{
    for (uint64_t round = 0; round < 16; round++) {
        sim_options options = sim_defaults();
        options.memory = GIB(256);
        begin_with(options);
        galloc_pool *pool = pool_new(NULL);
        cudaStream_t s = stream_new();
        dice d = {round};
        void *p[24] = {NULL};
        for (int i = 0; i < 100; i++) {
            void **q = &p[roll_below(&d, 24)];
            size_t bytes = PAGE * (size_t)(1 + roll_below(&d, roll_below(&d, 3) ? 40 : 2000));
            if (*q) {
                OK(galloc_free(*q, s));
                *q = NULL;
                continue;
            }
            sim_fail("cuMemMap", 1, 0, 0);
            (void)galloc_pool_malloc(pool, q, bytes, s);
            sim_fail_clear();
        }
        expect_healthy(pool, 1);
        for (int i = 0; i < 24; i++) OK(galloc_free(p[i], s));
        pool_end(pool);
        finish();
    }
}

/* A thousand pages of one block are wanted, and the host has no memory to describe them one by one. */
TEST(the_host_has_no_memory_for_the_pages_of_a_large_block)
{
    for (long nth = 1; nth < 8; nth++) {
        begin_still();
        galloc_pool *pool = pool_limited(GIB(2) + MIB(64));
        cudaStream_t s = stream_new(), t = stream_new();
        void *other = get(pool, 512, t), *p = get(pool, MIB(1900), s), *wall = get(pool, MIB(2), s);
        put(s, p, MIB(1900), 1);
        OK(galloc_free(p, s));
        sim_fail_malloc(nth, 1);
        if (galloc_pool_malloc(pool, &p, MIB(2000), s)) EXPECT(p == NULL);
        sim_fail_clear();
        expect_healthy(pool, 1);
        OK(galloc_free(p, s));
        OK(galloc_free(wall, s));
        OK(galloc_free(other, t));
        pool_end(pool);
        finish();
    }
}

/* All free pages have moved into one block, which is freed: each has an old address. */
static void heap_with_old_addresses(heap *h)
{
    heap_open(h, ALL);
    OK(galloc_free(get_used(h->pool, 8 * PAGE, h->s, 1), h->s));
    sim_run(-1);
}

TEST(a_page_with_an_old_address_is_not_given_back)
{
    begin();
    heap h;
    heap_with_old_addresses(&h);
    for (int n = 1; n <= 16; n++) {
        sim_fail("cuMemUnmap", n, 1, 0); /* from the nth on; there are two to a page */
        (void)galloc_pool_trim(h.pool, 0, NULL);
        EXPECT_EQ(stats_of(h.pool).reserved.current, sim_physical(0));
        EXPECT(sim_physical(0) >= 8 * PAGE);
        EXPECT_EQ(galloc_pool_check(h.pool), 0);
        sim_fail_clear();
    }
    OK(galloc_pool_trim(h.pool, 0, NULL));
    EXPECT_EQ(sim_physical(0), 8 * PAGE);
    EXPECT_EQ(sim_mapped(0), 8 * PAGE);
    EXPECT_EQ(stats_of(h.pool).quarantined, 0);
    heap_close(&h);
}

/* What is in quarantine is counted at each try to unmap it. */
TEST(pages_with_several_addresses_that_are_stuck_are_counted_each_time)
{
    begin();
    heap h;
    heap_with_old_addresses(&h);
    sim_fail("cuMemUnmap", 1, 1, 0);
    for (int i = 0; i < 3; i++) {
        (void)galloc_pool_trim(h.pool, 0, NULL);
        EXPECT(stats_of(h.pool).quarantined > 0);
        expect_healthy(h.pool, 0);
    }
    sim_fail_clear();
    OK(galloc_pool_trim(h.pool, 0, NULL));
    EXPECT_EQ(stats_of(h.pool).quarantined, 0);
    heap_close(&h);
}

/* Where the driver has kept an old address of a page, the page itself would be held on and be of no use. */
TEST(a_page_with_an_address_that_is_stuck_is_not_given_back)
{
    begin();
    heap h;
    heap_with_old_addresses(&h);
    sim_fail("cuMemUnmap", 1, 0, 0);
    EXPECT(galloc_resize(h.wall[0], 2 * PAGE, wall_home(&h, 0)) != cudaSuccess);
    sim_fail("cuMemUnmap", 1, 0, 0); /* that one again */
    OK(galloc_pool_trim(h.pool, 0, NULL));
    EXPECT_EQ(sim_physical(0), 9 * PAGE);
    EXPECT_EQ(stats_of(h.pool).reserved.current, 9 * PAGE);
    h.created = sim_calls("cuMemCreate");
    void *p = get_used(h.pool, PAGE, h.s, 1);
    EXPECT_EQ(created(&h), 0);
    OK(galloc_free(p, h.s));
    sim_run(-1);
    OK(galloc_pool_trim(h.pool, 0, NULL));
    EXPECT_EQ(sim_physical(0), 8 * PAGE);
    heap_close(&h);
}

/* ---- coming back ------------------------------------------------------------------------------------------------- */

/* A program: the same requests each time, sizes and streams without order, at the end nothing is live. */
static void program(galloc_pool *pool, cudaStream_t *s, int streams, uint64_t seed)
{
    dice d = {seed};
    struct {
        void *ptr;
        int home;
    } b[48] = {{NULL, 0}};
    for (int i = 0; i < 1500; i++) {
        uint32_t k = roll_below(&d, 48), size = roll_below(&d, 6);
        if (b[k].ptr) OK(galloc_free(b[k].ptr, s[b[k].home]));
        b[k].home = (int)roll_below(&d, (uint32_t)streams);
        b[k].ptr = get_used(pool, roll_bytes(&d, MIB(1) << size), s[b[k].home], (uint64_t)i);
    }
    for (int k = 0; k < 48; k++)
        if (b[k].ptr) OK(galloc_free(b[k].ptr, s[b[k].home]));
}

TEST(a_program_that_repeats_itself_needs_the_driver_no_more)
{
    static const double overheads[] = {0, 0.02, 0.2};
    for (int i = 0; i < 12; i++) {
        begin();
        cudaStream_t s[1] = {stream_new()};
        galloc_config config = frugal(SIZE_MAX, ALL);
        config.overhead = overheads[i % 3];
        galloc_pool *pool = pool_new(&config);
        long calls = 0;
        for (int pass = 0; pass < 12; pass++) {
            if (pass == 4) calls = memory_calls();
            program(pool, s, 1, test_seed() + (uint64_t)i);
            expect_healthy(pool, 1);
            if (pass >= 4 && pass < 8) EXPECT_EQ(memory_calls(), calls);
        }
        EXPECT(stats_of(pool).moves > 0 || i % 3 == 2);
        pool_end(pool);
        finish();
    }
}

/* Ten times the same, one of the blocks freed before the end, and then something else. For so many passes nothing is
   mapped that it looks settled each time; the pool learns to wait for longer before it takes it for that. */
TEST(a_program_that_does_something_else_once_in_a_while_settles_too)
{
    enum { USUAL = 10, BLOCKS = 6, OTHERS = 2 };
    static const size_t sizes[BLOCKS] = {3, 14, 1, 11, 16, 19}, others[OTHERS] = {1, 7}; /* times 512 KiB */
    begin_with_devices(1, SIM_PACE_PROMPT);
    cudaStream_t s = stream_new();
    galloc_config config = galloc_config_default();
    void *p[BLOCKS];
    long maps = 0;
    config.growth = PAGE;
    galloc_pool *pool = pool_new(&config);
    for (int round = 0; round < 180; round++) {
        if (round == 100) maps = sim_calls("cuMemMap");
        for (int pass = 0; pass < USUAL; pass++) {
            for (int i = 0; i < BLOCKS; i++) {
                p[i] = get(pool, sizes[i] * KIB(512), s);
                if (i == BLOCKS / 2) OK(galloc_free(p[1], s));
            }
            for (int i = 0; i < BLOCKS; i++)
                if (i != 1) OK(galloc_free(p[i], s));
        }
        for (int i = 0; i < OTHERS; i++) p[i] = get(pool, others[i] * KIB(512), s);
        for (int i = 0; i < OTHERS; i++) OK(galloc_free(p[i], s));
    }
    EXPECT(stats_of(pool).moves > 0);
    EXPECT_EQ(sim_calls("cuMemMap"), maps);
    pool_end(pool);
    finish();
}

/* Three pages are to return where they were, next to a free one, and the host has no memory to take them from where
   they are now. The next time it has. */
TEST(pages_return_after_a_return_that_the_host_had_no_memory_for)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = frugal(SIZE_MAX, ALL);
    config.growth = PAGE;
    galloc_pool *pool = pool_new(&config);
    void *three = get(pool, 3 * PAGE, s), *beside = get(pool, PAGE, s), *wall = get(pool, PAGE, s), *p = NULL;
    OK(galloc_free(three, s));
    void *five = get(pool, 5 * PAGE, s);
    EXPECT_EQ(stats_of(pool).moves, 3);
    OK(galloc_free(beside, s));
    OK(galloc_free(five, s));
    void *moved = get(pool, 3 * PAGE, s), *rest = get(pool, 2 * PAGE, s);
    EXPECT(moved == five);
    OK(galloc_free(moved, s));
    long maps = sim_calls("cuMemMap");
    inside_drain_all(pool);
    sim_fail_malloc(1, 1);
    EXPECT_EQ(galloc_pool_malloc(pool, &p, 4 * PAGE, s), cudaErrorMemoryAllocation);
    EXPECT(sim_failed_mallocs() > 0);
    sim_fail_clear();
    p = get(pool, 4 * PAGE, s);
    EXPECT(p == three);
    EXPECT_EQ(sim_calls("cuMemMap"), maps);
    expect_healthy(pool, 1);
    OK(galloc_free(p, s));
    OK(galloc_free(rest, s));
    OK(galloc_free(wall, s));
    pool_end(pool);
    finish();
}

/* A page is to return from the middle of free memory where no block has begun so far, and the host lacks memory. */
TEST(a_page_from_where_no_block_began_returns_as_the_host_has_memory)
{
    int failed = 1;
    for (int nth = 1; failed; nth++) {
        begin();
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_limited(7 * PAGE);
        void *first = get(pool, 2 * PAGE, s), *second = get(pool, 3 * PAGE / 2, s), *p = NULL;
        OK(galloc_free(first, s));
        void *third = get(pool, 3 * PAGE, s), *wall = get(pool, PAGE + KIB(48), s);
        OK(galloc_free(third, s));
        void *before = get(pool, PAGE + KIB(24), s);
        OK(galloc_free(second, s));
        uint64_t moves = stats_of(pool).moves;
        sim_fail_malloc(nth, 0);
        if (galloc_pool_malloc(pool, &p, 2 * PAGE, s)) p = NULL;
        failed = sim_failed_mallocs() > 0;
        sim_fail_malloc(0, 0);
        expect_healthy(pool, 1);
        if (!p) p = get(pool, 2 * PAGE, s);
        EXPECT(stats_of(pool).moves > moves);
        put(s, p, 2 * PAGE, 1);
        expect_healthy(pool, 1);
        OK(galloc_free(p, s));
        OK(galloc_free(before, s));
        OK(galloc_free(wall, s));
        pool_end(pool);
        finish();
    }
}

/* The same where a block has begun at each page before: only descriptors are missing, of blocks or of marks. */
TEST(pages_return_after_a_return_that_lacked_descriptors)
{
    enum { MANY = 40 };
    for (int marks = 0; marks < 2; marks++) {
        begin_still();
        cudaStream_t s = stream_new();
        galloc_config config = frugal(SIZE_MAX, ALL);
        config.growth = PAGE;
        galloc_pool *pool = pool_new(&config);
        void *first = get(pool, PAGE, s), *p = NULL, *one[MANY + 2];
        for (int i = 0; i < MANY + 2; i++) one[i] = get(pool, PAGE, s);
        for (int i = 0; i < MANY + 2; i++) OK(galloc_free(one[i], s));
        void *many = get(pool, MANY * PAGE, s), *beside = get(pool, PAGE, s), *wall = get(pool, PAGE, s);
        EXPECT(many == one[0] && wall == one[MANY + 1]);
        OK(galloc_free(many, s));
        void *more = get(pool, (MANY + 2) * PAGE, s);
        EXPECT_EQ(stats_of(pool).moves, MANY);
        OK(galloc_free(beside, s));
        OK(galloc_free(more, s));
        for (int i = 0; i < MANY + 2; i++) one[i] = get(pool, PAGE, s);
        for (int i = 0; i < MANY + 2; i++) OK(galloc_free(one[i], s));
        void *moved = get(pool, MANY * PAGE, s), *rest = get(pool, 2 * PAGE, s);
        EXPECT(moved == more);
        OK(galloc_free(moved, s));
        if (marks) inside_drain_marks(pool);
        else inside_drain_blocks(pool);
        sim_fail_malloc(1, 1);
        EXPECT_EQ(galloc_pool_malloc(pool, &p, (MANY + 1) * PAGE, s), cudaErrorMemoryAllocation);
        EXPECT(sim_failed_mallocs() > 0);
        sim_fail_clear();
        sim_fail_malloc(0, 0);
        expect_healthy(pool, 1);
        p = get(pool, (MANY + 1) * PAGE, s);
        EXPECT(p == many);
        expect_healthy(pool, 1);
        OK(galloc_free(p, s));
        OK(galloc_free(rest, s));
        OK(galloc_free(wall, s));
        OK(galloc_free(first, s));
        pool_end(pool);
        finish();
    }
}

/* More pages were taken than are needed. One goes back, for which the host may have no memory: then it moves. */
TEST(a_page_that_is_not_needed_moves_where_the_host_has_no_memory)
{
    for (int small_first = 0; small_first < 2; small_first++) {
        long failed = 1, served = 0;
        for (int nth = 1; failed && EXPECT(nth < 100); nth++) {
            begin();
            cudaStream_t s = stream_new();
            galloc_config config = frugal(SIZE_MAX, ALL);
            galloc_pool *pool = pool_new(&config);
            /* Free memory: a page of 8 MiB and one of 2 MiB side by side, then another one of 8 MiB, `eight`. */
            void *first = get(pool, PAGE, s), *small = get(pool, PAGE, s), *wall = get(pool, PAGE, s);
            if (small_first) OK(galloc_free(small, s)); /* its page moves to the start of p */
            void *p = get(pool, GIB(8) + PAGE, s), *behind = get(pool, PAGE, s);
            void *eight = get(pool, MIB(8), s), *last = get(pool, PAGE, s);
            OK(galloc_free(p, s));
            void *part = get(pool, small_first ? MIB(8) + PAGE : GIB(8) - MIB(8), s), *rest = NULL;
            EXPECT(part == p);
            p = NULL;
            if (small_first) {
                rest = get(pool, GIB(8) - MIB(8), s);
                OK(galloc_free(part, s));
            }
            OK(galloc_free(eight, s));
            size_t held = stats_of(pool).reserved.current;
            uint64_t moved = stats_of(pool).moved_bytes;
            sim_fail_malloc(nth, 0);
            cudaError_t error = galloc_pool_malloc(pool, &p, MIB(12), s);
            failed = sim_failed_mallocs();
            sim_fail_malloc(0, 0);
            EXPECT_EQ(p == NULL, error != cudaSuccess);
            served += failed && !error;
            EXPECT_EQ(stats_of(pool).reserved.current, held);
            expect_healthy(pool, 1);
            if (!failed) EXPECT_EQ(stats_of(pool).moved_bytes - moved, MIB(16));
            OK(galloc_free(p, s));
            expect_healthy(pool, 1);
            void *used[] = {small_first ? rest : part, small_first ? NULL : small, first, wall, behind, last};
            for (int i = 0; i < 6; i++) OK(galloc_free(used[i], s));
            pool_end(pool);
            finish();
        }
        EXPECT(served > 0);
    }
}

/* Blocks of a page; then, again and again, every second one is freed, and half of memory is asked for in blocks twice
   as large. At the end nothing is live. */
static void halving(galloc_pool *pool, cudaStream_t s, int pages, int rounds)
{
    void **block = (void **)calloc((size_t)pages, sizeof *block);
    int n = 0;
    for (int round = 0; round < rounds; round++) {
        int kept = 0, more = round ? pages / 2 >> round : pages;
        for (int i = 0; i < n; i++) {
            if (i % 2) OK(galloc_free(block[i], s));
            else block[kept++] = block[i];
        }
        for (n = kept; n < kept + more; n++) block[n] = get(pool, (size_t)PAGE << round, s);
    }
    for (int i = 0; i < n; i++) OK(galloc_free(block[i], s));
    free(block);
}

TEST(a_heap_of_many_pages_repeats_itself_too)
{
    enum { PAGES = 2560 };
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = frugal(SIZE_MAX, ALL);
    config.growth = PAGE;
    galloc_pool *pool = pool_new(&config);
    long calls = 0;
    for (int pass = 0; pass < 3; pass++) {
        if (pass == 2) calls = memory_calls();
        halving(pool, s, PAGES, 4);
    }
    EXPECT_EQ(memory_calls(), calls);
    EXPECT(stats_of(pool).moves > PAGES);
    EXPECT(inside_old_mappings(pool) > inside_most_old_mappings());
    EXPECT_EQ(galloc_pool_check(pool), 0);
    pool_end(pool);
    finish();
}

/* Pieces of one stream become larger blocks of another, and so on, each time the same. */
static void round_of(galloc_pool *pool, cudaStream_t s, cudaStream_t t)
{
    void *p[4];
    for (int i = 0; i < 4; i++) p[i] = get_used(pool, PAGE, s, (uint64_t)i);
    if (t != s) order(s, t);
    for (int i = 0; i < 4; i += 2) {
        if (t != s) put(t, p[i], PAGE, 9);
        OK(galloc_free(p[i], t));
    }
    void *q = get_used(pool, 2 * PAGE, s, 10);
    for (int i = 1; i < 4; i += 2) OK(galloc_free(p[i], s));
    void *r = get_used(pool, 3 * PAGE, s, 11);
    OK(galloc_free(q, s));
    OK(galloc_free(r, s));
}

/* Pages come whole. Those that the last one makes superfluous stay where they are. */
TEST(no_page_moves_that_is_not_needed)
{
    enum { PAGES = 5 };
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = frugal(PAGES * MIB(4) + PAGE, ALL);
    config.growth = MIB(4);
    galloc_pool *pool = pool_new(&config);
    void *p[PAGES], *small, *last, *q;
    OK(galloc_pool_reserve(pool, PAGES * MIB(4) + PAGE)); /* the last page is a small one */
    for (int i = 0; i < PAGES; i++) p[i] = get(pool, MIB(4), s);
    small = get(pool, PAGE, s);
    inside_set_memory_limit(pool, PAGES * MIB(4) + PAGE + MIB(4));
    last = get(pool, MIB(4), s); /* behind it */
    EXPECT_EQ(stats_of(pool).pages[inside_page_class(PAGE)].count, 1);
    OK(galloc_free(small, s)); /* the oldest */
    OK(galloc_free(p[1], s));
    OK(galloc_free(p[3], s));
    q = get(pool, MIB(8), s);
    EXPECT_EQ(stats_of(pool).moves, 2);
    EXPECT(get(pool, PAGE, s) == small);
    OK(galloc_free(small, s));
    OK(galloc_free(last, s));
    OK(galloc_free(q, s));
    for (int i = 0; i < PAGES; i += 2) OK(galloc_free(p[i], s));
    pool_end(pool);
    finish();
}

/* Where pages move, as many are created as are missing, however large new pages are to be. */
TEST(beside_pages_that_move_few_are_created)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = frugal(SIZE_MAX, ALL);
    galloc_pool *pool = NULL;
    void *p[4], *q;
    config.growth = MIB(32);
    config.overhead = 0.1;
    pool = pool_new(&config);
    OK(galloc_pool_reserve(pool, MIB(128)));
    for (int i = 0; i < 4; i++) p[i] = get(pool, MIB(32), s);
    OK(galloc_free(p[0], s));
    OK(galloc_free(p[2], s));
    q = get(pool, MIB(70), s); /* 12 MiB may be created */
    EXPECT(stats_of(pool).moves > 0);
    EXPECT(stats_of(pool).reserved.current <= MIB(128) + MIB(12));
    OK(galloc_free(q, s));
    OK(galloc_free(p[1], s));
    OK(galloc_free(p[3], s));
    pool_end(pool);
    finish();
}

/* Below the peak a part of the overhead is spared. A page within that part is created, however large new pages are to
   be, before the stream waits for the memory of another one. */
TEST(a_page_within_the_spared_overhead_needs_no_wait)
{
    begin_still();
    galloc_config config = galloc_config_default();
    config.growth = MIB(64);
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new(), t = stream_new();
    void *most = get(pool, GIB(2) - config.growth, s), *busy = get_used(pool, config.growth, t, 1), *p;
    OK(galloc_free(busy, t));
    galloc_stats before = stats_of(pool);
    p = get(pool, MIB(8), s);
    galloc_stats after = stats_of(pool);
    EXPECT_EQ(after.waits, before.waits);
    EXPECT_EQ(after.moves, before.moves);
    EXPECT_EQ(after.reserved.current, before.reserved.current + config.growth);
    OK(galloc_free(p, s));
    OK(galloc_free(most, s));
    pool_end(pool);
    finish();
}

/* What a program did so far says where pages go next, but not that they can be had. */
TEST(what_was_always_so_may_be_otherwise)
{
    for (int often = 1; often < 24; often++) {
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_config config = frugal(SIZE_MAX, GALLOC_REUSE_COMPLETED);
        galloc_pool *pool = pool_new(&config);
        void *t_own = get_used(pool, PAGE, t, 20);
        for (int i = 0; i < often; i++) round_of(pool, s, s);
        round_of(pool, s, t);
        round_of(pool, s, s);
        EXPECT_EQ(sim_findings(SIM_RACE), 0);
        EXPECT_EQ(galloc_pool_check(pool), 0);
        OK(galloc_free(t_own, t));
        pool_end(pool);
        finish();
    }
}

/* Nor that the free block before the gap reaches as far down as it did, or is still free: in part or as a whole it may
   be in use. */
TEST(what_began_in_a_free_block_begins_where_that_is_free)
{
    for (size_t part = KIB(512); part <= MIB(1); part += KIB(512)) {
        begin();
        cudaStream_t s = stream_new();
        galloc_config config = frugal(SIZE_MAX, ALL);
        config.growth = PAGE;
        config.lane_bytes = 0;
        galloc_pool *pool = pool_new(&config);
        char *a, *b = NULL, *c;
        for (int pass = 0; pass < 8; pass++) {
            a = get(pool, MIB(1), s);
            b = get(pool, MIB(3), s);
            EXPECT(b == a + MIB(1));
            OK(galloc_free(b, s));
            OK(galloc_free(a, s));
        }
        a = get(pool, MIB(1), s);
        EXPECT_EQ(inside_memo_at(pool), (uintptr_t)b); /* is expected next */
        c = get(pool, part, s);
        EXPECT(c == a + MIB(1));
        put(s, c, part, 1);
        b = get_used(pool, MIB(3), s, 2);
        EXPECT(b >= c + part || b + MIB(3) <= a);
        look(s, c, part, 1);
        EXPECT_EQ(galloc_pool_check(pool), 0);
        OK(galloc_free(a, s));
        OK(galloc_free(b, s));
        OK(galloc_free(c, s));
        pool_end(pool);
        finish();
    }
}

/* Nor that the next request has the same alignment. */
TEST(what_is_expected_has_the_alignment_that_is_asked_for)
{
    enum { PAGES = 8 };
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = frugal(SIZE_MAX, ALL);
    config.growth = PAGE;
    galloc_pool *pool = pool_new(&config);
    galloc_request request = {0};
    void *p[PAGES + 1] = {NULL};
    int n = 0;
    for (int pass = 0; pass < 4; pass++) {
        for (int i = 0; i < PAGES; i++) p[i] = get(pool, PAGE, s);
        for (int i = 0; i < PAGES; i++) OK(galloc_free(p[i], s));
    }
    do p[n++] = get(pool, PAGE, s);
    while (n < PAGES && inside_memo_at(pool) % (2 * PAGE) == 0);
    EXPECT(n < PAGES);
    request.bytes = PAGE;
    request.alignment = 2 * PAGE;
    request.stream = s;
    request.pool = pool;
    OK(galloc_alloc(&p[n], &request));
    EXPECT_EQ((uintptr_t)p[n++] % (2 * PAGE), 0);
    while (n > 0) OK(galloc_free(p[--n], s));
    pool_end(pool);
    finish();
}

/* Nor that a mapping is still where it was: given back, its descriptor is another one's. */
TEST(the_place_of_another_mapping_is_not_expected)
{
    enum { PAGES = 8, KEPT = 4, MORE = PAGES - KEPT };
    begin();
    galloc_config config = galloc_config_default();
    config.growth = PAGE;
    config.overhead = 100;
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new();
    galloc_request request = {0};
    void *p[PAGES], *q = NULL;
    for (int pass = 0; pass < 3; pass++) {
        for (int i = 0; i < PAGES; i++) p[i] = get(pool, PAGE, s);
        for (int i = 0; i < PAGES; i++) OK(galloc_free(p[i], s));
    }
    for (int i = 0; i <= KEPT; i++) p[i] = get(pool, PAGE, s); /* expected next: the page behind */
    OK(galloc_free(p[KEPT], s));
    OK(galloc_pool_trim(pool, 0, NULL));
    for (int i = KEPT; i < PAGES; i++) p[i] = get(pool, PAGE - 512, s); /* not what is expected */
    for (int i = KEPT; i < PAGES; i++) OK(galloc_free(p[i], s));
    OK(galloc_pool_trim(pool, 0, NULL)); /* descriptors come back, the last one first */
    request.bytes = PAGE;
    request.max_bytes = MORE * PAGE;
    request.stream = s;
    request.pool = pool;
    OK(galloc_alloc(&q, &request));
    OK(galloc_resize(q, MORE * PAGE, s));
    EXPECT_EQ(inside_memo_first(pool), (uintptr_t)q);
    EXPECT_EQ(inside_memo_at(pool), (uintptr_t)q + PAGE);
    OK(galloc_free(q, s)); /* its pages wait where they are */
    long calls = memory_calls();
    EXPECT(get(pool, PAGE, s) == q);
    EXPECT(get(pool, (MORE - 1) * PAGE, s) == (char *)q + PAGE);
    EXPECT_EQ(memory_calls(), calls);
    OK(galloc_free(q, s));
    OK(galloc_free((char *)q + PAGE, s));
    for (int i = 0; i < KEPT; i++) OK(galloc_free(p[i], s));
    pool_end(pool);
    finish();
}

/* What is done so that a program may repeat itself ends when it is seen to bring nothing. */
TEST(a_pair_alone_is_served_without_a_plan)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = galloc_config_default();
    config.stats_exact = 1; /* no stream cache serves the pair */
    galloc_pool *pool = pool_new(&config);
    for (int i = 0; i < 64; i++) OK(galloc_free(get_used(pool, MIB(3), s, 1), s));
    uint64_t plans = inside_plans(pool);
    for (int i = 0; i < 64; i++) OK(galloc_free(get_used(pool, MIB(3), s, 1), s));
    EXPECT_EQ(inside_plans(pool), plans);
    EXPECT_EQ(stats_of(pool).grows, 1);
    pool_end(pool);
    finish();
}

/* Parking ends after passes that mapped nothing, in a row; passes that mapped pages do not count, however many. */
TEST(passes_that_map_pages_do_not_end_parking)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = galloc_config_default();
    config.stats_exact = 1; /* no stream cache serves the blocks */
    galloc_pool *pool = pool_new(&config);
    for (int i = 1; i <= 16; i++) {
        OK(galloc_free(get_used(pool, (size_t)i * MIB(4), s, 1), s));
        EXPECT_EQ(stats_of(pool).grows, i);
    }
    for (int quiet = 0; quiet < 4; quiet++) {
        EXPECT_EQ(inside_parked(pool), stats_of(pool).reserved.current);
        OK(galloc_free(get_used(pool, MIB(4), s, 1), s));
    }
    for (int quiet = 0; quiet < 20; quiet++) OK(galloc_free(get_used(pool, MIB(4), s, 1), s));
    EXPECT(inside_parked(pool) < stats_of(pool).reserved.current);
    pool_end(pool);
    finish();
}

static void get_pages(galloc_pool *pool, void **p, int n, cudaStream_t stream)
{
    for (int i = 0; i < n; i++) p[i] = get_used(pool, PAGE, stream, 1);
}

/* Blocks of a page: those of 2 and 3 move away, the first of them then to 1, right before where it was. From there it
   returns, as the other one does. */
TEST(a_page_returns_from_the_block_before_its_place)
{
    enum { BLOCKS = 11 };
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = frugal(GIB(1), ALL);
    void *p[BLOCKS], *first[3], *second[2], *large, *other;
    config.growth = PAGE;
    galloc_pool *pool = pool_new(&config);
    get_pages(pool, p, BLOCKS, s);
    OK(galloc_free(p[1], s));
    OK(galloc_pool_trim(pool, 0, NULL)); /* no memory is at 1 */
    inside_set_live_peak(pool, 0); /* nor is any to be created for what was in use */
    OK(galloc_free(p[2], s));
    OK(galloc_free(p[5], s));
    OK(galloc_free(p[7], s));
    large = get_used(pool, 3 * PAGE, s, 2);
    OK(galloc_free(p[3], s));
    OK(galloc_free(p[9], s));
    other = get_used(pool, 2 * PAGE, s, 3);
    EXPECT_EQ(stats_of(pool).moves, 5);
    OK(galloc_free(large, s));
    get_pages(pool, first, 3, s);
    OK(galloc_free(first[0], s));
    OK(galloc_free(p[0], s));
    large = get_used(pool, 2 * PAGE, s, 4);
    EXPECT(large == p[0]);
    OK(galloc_free(other, s));
    get_pages(pool, second, 2, s);
    OK(galloc_free(large, s));
    get_pages(pool, p, 1, s);
    OK(galloc_free(second[0], s));
    long calls = memory_calls();
    large = get_used(pool, 2 * PAGE, s, 5);
    EXPECT(large == p[2]);
    EXPECT_EQ(memory_calls(), calls);
    OK(galloc_free(large, s));
    OK(galloc_free(first[1], s));
    OK(galloc_free(first[2], s));
    OK(galloc_free(second[1], s));
    for (int i = 0; i < BLOCKS; i += i ? 2 : 4) OK(galloc_free(p[i], s));
    pool_end(pool);
    finish();
}

/* Memory that waits to be taken up again is free memory like any other: it is seen, counted, had by parts and given
   back. */
TEST(parked_memory_is_free_memory)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_config config = frugal(8 * PAGE, COMPLETED);
    config.stats_exact = 1; /* every free is the pool's to see */
    galloc_pool *pool = pool_new(&config);
    void *p = get_used(pool, 8 * PAGE, s, 1);
    OK(galloc_free(p, s));
    EXPECT_EQ(inside_parked(pool), 8 * PAGE);
    EXPECT_EQ(stats_of(pool).cached.current, 8 * PAGE);
    EXPECT_EQ(info_of(p).state, GALLOC_STATE_FREE);
    EXPECT_EQ(galloc_free(p, s), cudaErrorInvalidDevicePointer);
    sim_run(-1);
    void *q = get_used(pool, 512, t, 2), *r = get_used(pool, 8 * PAGE - 512, t, 3); /* to the last byte */
    OK(galloc_free(q, t));
    OK(galloc_free(r, t));
    EXPECT_EQ(inside_parked(pool), 8 * PAGE);
    OK(galloc_stream_retire(t));
    sim_run(-1);
    OK(galloc_pool_trim(pool, 3 * PAGE, NULL));
    EXPECT_EQ(sim_physical(0), 3 * PAGE);
    EXPECT_EQ(sim_mapped(0), 3 * PAGE);
    EXPECT_EQ(inside_parked(pool), 3 * PAGE);
    pool_end(pool);
    finish();
}

/* When nothing is in use any more the whole pages behind a graph's memory wait to be taken up again, as others do. */
TEST(pages_behind_the_memory_of_a_graph_are_parked)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_config config = frugal(8 * PAGE, COMPLETED);
    cudaGraph_t graph = NULL;
    config.stats_exact = 1; /* every free is the pool's to see */
    galloc_pool *pool = pool_new(&config);
    OK(cudaStreamBeginCapture(t, cudaStreamCaptureModeThreadLocal));
    char *p = get_used(pool, MIB(1), t, 1), *q;
    OK(galloc_free(p, t));
    OK(cudaStreamEndCapture(t, &graph));
    q = get_used(pool, 3 * PAGE, s, 1);
    EXPECT(q == p + MIB(1));
    OK(galloc_free(q, s));
    EXPECT_EQ(inside_parked(pool), 3 * PAGE);
    OK(cudaGraphDestroy(graph));
    pool_end(pool);
    finish();
}

/* Two streams that share a page get parts of it though the page as a whole is nobody's. */
TEST(a_parked_page_is_shared_by_parts)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_config config = frugal(PAGE, COMPLETED);
    config.stats_exact = 1;
    galloc_pool *pool = pool_new(&config);
    void *p = get_used(pool, KIB(64), s, 1), *q = get_used(pool, KIB(64), t, 2);
    OK(galloc_free(p, s));
    OK(galloc_free(q, t));
    EXPECT_EQ(inside_parked(pool), PAGE);
    p = get_used(pool, MIB(1), s, 3);
    q = get_used(pool, KIB(64), t, 4);
    EXPECT_EQ(sim_blocking_calls(), 0);
    OK(galloc_free(p, s));
    OK(galloc_free(q, t));
    pool_end(pool);
    finish();
}

/* ---- many moves -------------------------------------------------------------------------------------------------- */

static long rounds(long otherwise)
{
    const char *text = getenv("GALLOC_ROUNDS");
    return text && *text ? atol(text) : otherwise;
}

/* 1 .. max, every order of magnitude as likely as the others, to the bit. */
static size_t roll_log(dice *d, size_t min, size_t max)
{
    uint32_t octaves = 0;
    while (min << octaves < max) octaves++;
    size_t low = min << roll_below(d, octaves);
    return low + (size_t)(((uint64_t)roll(d) << 31 ^ roll(d)) % low);
}

enum { STREAMS = 8, SLOTS = 512 };

typedef struct slot {
    char *ptr;
    size_t bytes;
    uint64_t tag;
    uint32_t home;
} slot;

typedef struct play {
    dice d;
    galloc_pool *pool;
    cudaStream_t s[STREAMS];
    slot slot[SLOTS];
    uint32_t used;
    size_t live, most;
    uint64_t tag;
    unsigned long long ops, refused, moves, early; /* early: moved before the work that used the page was known done */
} play;

static void count_moves(play *p)
{
    uint64_t n = stats_of(p->pool).moves - p->moves;
    p->moves += n;
    p->early += inside_early_moves(p->pool, n);
}

static void play_free(play *p, uint32_t k)
{
    slot *b = &p->slot[k];
    uint32_t home = b->home, other = roll_below(&p->d, STREAMS), how = roll_below(&p->d, 16);
    look(p->s[home], b->ptr, b->bytes, b->tag);
    if (how < 3) {
        order(p->s[home], p->s[other]);
        look(p->s[other], b->ptr, b->bytes, b->tag);
    }
    if (how == 0) {
        cudaStream_t both[2] = {p->s[home], p->s[other]};
        OK(galloc_free_after(b->ptr, both, 2));
    } else {
        if (how == 1) OK(galloc_record_stream(b->ptr, p->s[other]));
        OK(galloc_free(b->ptr, p->s[how == 2 ? other : home]));
    }
    p->live -= b->bytes;
    *b = p->slot[--p->used];
    p->ops++;
}

static void play_get(play *p)
{
    slot b;
    b.bytes = roll_log(&p->d, 512, MIB(64));
    b.home = roll_below(&p->d, STREAMS);
    b.tag = ++p->tag;
    while (p->used && (p->live + b.bytes > p->most || p->used == SLOTS)) play_free(p, roll_below(&p->d, p->used));
    void *ptr = NULL;
    cudaError_t err = galloc_pool_malloc(p->pool, &ptr, b.bytes, p->s[b.home]);
    p->ops++;
    count_moves(p);
    if (err != cudaSuccess) {
        EXPECT_EQ(err, cudaErrorMemoryAllocation);
        size_t moves = inside_free_pages(p->pool), more = whole(inside_headroom(p->pool), PAGE);
        if (!EXPECT(moves + more < enough(b.bytes, PAGE)))
            printf("    refused %zu, could move %zu, limit allows %zu\n", b.bytes, moves, more);
        p->refused++;
        return;
    }
    b.ptr = (char *)ptr;
    put(p->s[b.home], ptr, b.bytes, b.tag);
    p->slot[p->used++] = b;
    p->live += b.bytes;
}

static void play_open(play *p, uint64_t seed)
{
    sim_options options = sim_defaults();
    memset(p, 0, sizeof *p);
    p->d.state = seed;
    p->most = MIB(256) + MIB(256) * (size_t)(seed % 4);
    options.memory = GIB(4);
    options.seed = seed;
    options.lag = 30 + (int)(seed % 3) * 60;
    begin_with(options);
    galloc_config config = frugal(p->most + p->most / 20, ALL);
    config.overhead = seed % 2 ? 0.02 : 0;
    for (int i = 0; i < STREAMS; i++) p->s[i] = stream_new();
    p->pool = pool_new(&config);
}

/* On streams that run behind, close to a limit, with sizes of every order: moves of pages whose work is not done, again
   and again. The ledger sees every access. */
TEST(many_moves_on_many_streams)
{
    static play p;
    unsigned long long ops = 0, refused = 0, moved = 0, early = 0;
    for (long i = 0; i < rounds(24); i++) {
        long before = test_failures;
        play_open(&p, test_seed() + (uint64_t)i);
        size_t limit = p.most + p.most / 20;
        for (int n = 1; n <= 4000; n++) {
            play_get(&p);
            if (n % 100 == 0) expect_whole(&(heap){.pool = p.pool});
        }
        EXPECT(sim_physical_peak(0) <= limit);
        EXPECT_EQ(stats_of(p.pool).live.current, p.live);
        while (p.used) play_free(&p, 0);
        pool_end(p.pool);
        finish();
        ops += p.ops;
        refused += p.refused;
        moved += p.moves;
        early += p.early;
        if (test_failures > before) {
            printf("    first failure with GALLOC_SEED=%llu GALLOC_ROUNDS=1\n",
                   (unsigned long long)test_seed() + (unsigned long long)i);
            break;
        }
    }
    printf("    %llu operations, %llu moves, %llu of them while work was incomplete, %llu refused\n", ops, moved, early,
           refused);
    EXPECT(moved > 0 && early > moved / 3);
    EXPECT(refused < ops / 10);
}

/* ---- streams that are kept apart --------------------------------------------------------------------------------- */

/* A program whose host runs a whole step ahead of the device. Each layer uses on one stream what was fetched for it on
   another one, and nothing is complete before the end of the step. */
typedef struct ahead {
    galloc_pool *pool;
    cudaStream_t computes, fetches;
    size_t live, most; /* of the stream that computes, in all steps so far */
    uint64_t tag;
} ahead;

static void *ahead_get(ahead *a, size_t bytes)
{
    a->live += bytes;
    a->most = larger(a->most, a->live);
    return get_used(a->pool, bytes, a->computes, ++a->tag);
}

static void ahead_free(ahead *a, void *ptr, size_t bytes)
{
    a->live -= bytes;
    OK(galloc_free(ptr, a->computes));
}

#define AHEAD_LAYERS 12
#define AHEAD_FETCHED MIB(72)

static void ahead_step(ahead *a, size_t bytes)
{
    size_t part = bytes / 4;
    void *fetched, *next = get_used(a->pool, AHEAD_FETCHED, a->fetches, ++a->tag), *x = ahead_get(a, part);
    for (int layer = 0; layer < AHEAD_LAYERS; layer++) {
        void *p, *q, *y, *z;
        fetched = next;
        if (layer + 1 < AHEAD_LAYERS) next = get_used(a->pool, AHEAD_FETCHED, a->fetches, ++a->tag);
        order(a->fetches, a->computes);
        p = ahead_get(a, bytes);
        q = ahead_get(a, bytes);
        ahead_free(a, p, bytes);
        y = ahead_get(a, part);
        ahead_free(a, q, bytes);
        z = ahead_get(a, part);
        ahead_free(a, y, part);
        ahead_free(a, x, part);
        x = z;
        put(a->computes, fetched, AHEAD_FETCHED, ++a->tag);
        OK(galloc_record_stream(fetched, a->computes));
        OK(galloc_free(fetched, a->fetches));
    }
    ahead_free(a, x, part);
    OK(cudaDeviceSynchronize());
}

/* Runs such a program and adds up what its two streams need each, and what is held. */
static void run_ahead(uint64_t seed, size_t *need, size_t *held)
{
    enum { STEPS = 40, KEPT = 12 };
    galloc_config config = galloc_config_default();
    dice d = {seed};
    ahead a;
    void *kept[KEPT];
    memset(&a, 0, sizeof a);
    begin_still();
    config.reuse = COMPLETED | FOLLOWED; /* no stream is made to wait */
    a.pool = pool_new(&config);
    a.computes = stream_new();
    a.fetches = stream_new();
    for (int i = 0; i < KEPT; i++) kept[i] = ahead_get(&a, MIB(9));
    for (int i = 0; i < STEPS; i++) ahead_step(&a, MIB(5) + roll_below(&d, 85) * MIB(1));
    expect_healthy(a.pool, 1);
    *need += a.most + AHEAD_LAYERS * AHEAD_FETCHED;
    *held += stats_of(a.pool).reserved.peak;
    for (int i = 0; i < KEPT; i++) ahead_free(&a, kept[i], MIB(9));
    pool_end(a.pool);
    finish();
}

/* The heap is hardly larger than what the two streams need each. */
TEST(streams_that_run_ahead_leave_memory_to_each_other)
{
    size_t need = 0, held = 0;
    for (uint64_t seed = 1; seed <= 6; seed++) run_ahead(seed, &need, &held);
    printf("    %.3f times what is needed\n", (double)held / (double)need);
    EXPECT(held <= need + need / 12);
}

enum { FETCHED = 16, PENDING = 4, OWN_PIECES = 12 };

/* A pool whose memory two streams have used and are done with; the first one has pieces of it again. */
static galloc_pool *pool_in_pieces(cudaStream_t *s, cudaStream_t *t, void **piece, double overhead)
{
    begin_still();
    galloc_config config = galloc_config_default();
    config.overhead = overhead;
    config.reuse = COMPLETED | FOLLOWED; /* no stream is made to wait */
    config.growth = PAGE;
    galloc_pool *pool = pool_new(&config);
    *s = stream_new();
    *t = stream_new();
    for (int i = 0; i < PENDING; i++) {
        void *fetched = get_used(pool, FETCHED * PAGE, *t, 1);
        OK(galloc_record_stream(fetched, *s));
        OK(galloc_free(fetched, *t));
    }
    OK(cudaDeviceSynchronize());
    for (int i = 0; i < OWN_PIECES; i++) piece[i] = get_used(pool, PAGE, *s, 2);
    return pool;
}

/* A large request gets the stream's own pages, which lie in pieces, and leaves complete memory to the other stream. */
static void move_own_pages(double overhead)
{
    enum { LARGE = 5 };
    cudaStream_t s, t;
    void *piece[OWN_PIECES], *large, *rest;
    galloc_pool *pool = pool_in_pieces(&s, &t, piece, overhead);
    for (int i = 0; i < OWN_PIECES; i += 2) OK(galloc_free(piece[i], s));
    galloc_stats before = stats_of(pool);
    EXPECT_EQ(before.reserved.current, PENDING * FETCHED * PAGE);
    large = get_used(pool, LARGE * PAGE, s, 3);
    EXPECT_EQ(stats_of(pool).moves - before.moves, LARGE);
    rest = get_used(pool, (PENDING * FETCHED - OWN_PIECES) * PAGE, t, 4);
    EXPECT_EQ(stats_of(pool).reserved.current, before.reserved.current);
    expect_healthy(pool, 1);
    look(s, large, LARGE * PAGE, 3);
    look(t, rest, (PENDING * FETCHED - OWN_PIECES) * PAGE, 4);
    for (int i = 1; i < OWN_PIECES; i += 2) look(s, piece[i], PAGE, 2);
    for (int i = 1; i < OWN_PIECES; i += 2) OK(galloc_free(piece[i], s));
    OK(galloc_free(large, s));
    OK(galloc_free(rest, t));
    pool_end(pool);
    finish();
}

TEST(own_pages_move_before_complete_memory_is_taken) { move_own_pages(galloc_config_default().overhead); }

TEST(own_pages_move_where_the_overhead_allows_new_ones) { move_own_pages(10); }

/* The same where each piece is three pages that were freed one after the other, with events between. */
TEST(own_pages_move_whenever_they_were_freed)
{
    enum { LARGE = 7 };
    cudaStream_t s, t;
    void *piece[OWN_PIECES], *large, *rest;
    galloc_pool *pool = pool_in_pieces(&s, &t, piece, galloc_config_default().overhead);
    for (int k = 0; k < 3; k++) {
        for (int i = k; i < OWN_PIECES; i += 4) OK(galloc_free(piece[i], s));
        inside_ask_for_event(pool, stream_id(s));
        OK(galloc_free(get(pool, 512, s), s));
    }
    galloc_stats before = stats_of(pool);
    large = get_used(pool, LARGE * PAGE, s, 3);
    rest = get_used(pool, (PENDING * FETCHED - OWN_PIECES - 1) * PAGE, t, 4);
    EXPECT_EQ(stats_of(pool).reserved.current, before.reserved.current);
    look(s, large, LARGE * PAGE, 3);
    for (int i = 3; i < OWN_PIECES; i += 4) OK(galloc_free(piece[i], s));
    OK(galloc_free(large, s));
    OK(galloc_free(rest, t));
    pool_end(pool);
    finish();
}

static void give_back_all(galloc_pool *pool, void **p, int n, cudaStream_t stream)
{
    for (int i = 0; i < n; i++) OK(galloc_free(p[i], stream));
    pool_end(pool);
}

static galloc_config apart(void)
{
    galloc_config config = galloc_config_default();
    config.lane_bytes = 0;
    config.growth = PAGE;
    config.reuse = COMPLETED | FOLLOWED;
    return config;
}

static int done_when_asked(void) { return 1; }

/* More blocks than a search looks at stand between the newest work of s and memory that is done, which has the size of
   the request. */
static void request_beside_memory_that_is_done(int rounded)
{
    enum { SMALL = 12 };
    begin_still();
    galloc_config config = apart();
    for (int i = 0; rounded && i < GALLOC_DIVISIONS; i++) config.roundup_power2_divisions[i] = 32;
    cudaStream_t s = stream_new(), t = stream_new();
    void *p[8 + SMALL], *small[SMALL];
    int n = 0;
    galloc_pool *pool = pool_new(&config);
    OK(galloc_pool_reserve(pool, MIB(14)));
    p[n++] = get(pool, PAGE / 4, s);
    void *done = get_used(pool, PAGE, s, 1), *own = get(pool, PAGE, s);
    for (int i = 0; i < SMALL; i++) {
        p[n++] = get(pool, 512, s);
        small[i] = get(pool, 512, s);
    }
    p[n++] = get(pool, 512, s);
    void *large = get(pool, MIB(8), s), *of_t = get(pool, 512, t);
    OK(galloc_free(done, s));
    p[n++] = get(pool, 512, s); /* the event is recorded */
    sim_run(-1);
    for (int i = 0; i < SMALL; i++) put(s, small[i], 512, 2);
    put(s, own, PAGE, 3);
    put(s, large, MIB(8), 4);
    for (int i = 0; i < SMALL; i++) OK(galloc_free(small[i], s));
    OK(galloc_free(own, s));
    OK(galloc_free(large, s));
    p[n++] = get(pool, 512, s);
    void *fetched = get(pool, MIB(8), t); /* of new pages: from here on the streams are kept apart */
    galloc_stats before = stats_of(pool);
    p[n++] = get(pool, PAGE, s);
    EXPECT(p[n - 1] != done);
    EXPECT_EQ(stats_of(pool).moves, before.moves + 1);
    OK(galloc_free(of_t, t));
    OK(galloc_free(fetched, t));
    give_back_all(pool, p, n, s);
    finish();
}

/* Streams kept apart: memory whose work has ended is for all, also while nobody has looked at it. So the stream's own
   pages move to a request, though a block of such memory has its size. */
TEST(memory_that_is_done_and_not_looked_at_is_not_the_streams_own) { request_beside_memory_that_is_done(0); }

/* The same with roundup_power2_divisions. */
TEST(memory_that_is_done_is_not_the_own_of_rounded_requests) { request_beside_memory_that_is_done(1); }

/* The same streams: the driver refuses to move the stream's own pages. The request gets other memory, of which there is
   enough under the limit. */
TEST(own_pages_that_cannot_move_leave_other_memory_to_the_request)
{
    enum { PIECES = 4 };
    begin_still();
    galloc_config config = apart();
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new(), t = stream_new();
    void *of_t[2], *piece[PIECES], *p[PIECES + 1];
    of_t[0] = get(pool, PAGE, t);
    for (int i = 0; i < PIECES; i++) {
        piece[i] = get_used(pool, PAGE, s, 1);
        p[i] = get(pool, PAGE, s);
    }
    for (int i = 0; i < PIECES; i++) OK(galloc_free(piece[i], s));
    of_t[1] = get(pool, 3 * PAGE, t); /* of new pages: from here on the streams are kept apart */
    galloc_stats before = stats_of(pool);
    OK(galloc_pool_set_limit(pool, before.reserved.current));
    sim_hook(NULL, done_when_asked);
    sim_fail("cuMemMap", 1, 0, 0);
    sim_fail("cuMemMap", 2, 0, 0);
    p[PIECES] = get(pool, 2 * PAGE, s);
    EXPECT_EQ(sim_failed(), 2);
    EXPECT_EQ(stats_of(pool).reserved.current, before.reserved.current);
    sim_fail_clear();
    sim_hook(NULL, NULL);
    for (int i = 0; i < 2; i++) OK(galloc_free(of_t[i], t));
    give_back_all(pool, p, PIECES + 1, s);
    finish();
}

/* The same streams: memory that is made ready is for no stream, so what is common already counts. */
TEST(reserve_finds_common_memory_while_streams_are_kept_apart)
{
    begin_still();
    galloc_config config = apart();
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new(), t = stream_new();
    void *of_t[2] = {get(pool, 512, t)};
    OK(galloc_free(get_used(pool, MIB(8), s, 1), s));
    void *p = get(pool, 512, s);    /* the event is recorded */
    of_t[1] = get(pool, MIB(6), t); /* of new pages: from here on the streams are kept apart */
    OK(galloc_pool_reserve(pool, MIB(4)));
    galloc_stats before = stats_of(pool);
    OK(galloc_pool_reserve(pool, MIB(4)));
    EXPECT_EQ(stats_of(pool).reserved.current, before.reserved.current);
    EXPECT_EQ(stats_of(pool).moves, before.moves);
    for (int i = 0; i < 2; i++) OK(galloc_free(of_t[i], t));
    give_back_all(pool, &p, 1, s);
    finish();
}

/* The same streams: pages of which a part is common memory are not the stream's own, and stay where they are. */
TEST(pages_that_are_common_in_part_do_not_move)
{
    enum { PIECES = 8 };
    begin_still();
    galloc_config config = apart();
    cudaStream_t s = stream_new(), t = stream_new();
    void *p[8], *piece[PIECES], *of_t[3];
    int n = 0;
    galloc_pool *pool = pool_new(&config);
    OK(galloc_pool_reserve(pool, MIB(12)));
    p[n++] = get(pool, PAGE / 4, s);
    void *common = get_used(pool, PAGE, s, 1);
    p[n++] = get(pool, 512, s);
    for (int i = 0; i < PIECES; i++) piece[i] = get_used(pool, i % 2 ? KIB(768) : KIB(1280), s, 2);
    p[n++] = get(pool, 512, s);
    of_t[0] = get(pool, 512, t);
    OK(galloc_free(common, s));
    for (int i = 0; i < PIECES; i += 2) OK(galloc_free(piece[i], s));
    p[n++] = get(pool, 512, s); /* the event is recorded */
    sim_run(-1);
    of_t[1] = get(pool, MIB(3), t); /* looks: what was freed is common memory */
    for (int i = 1; i < PIECES; i += 2) {
        put(s, piece[i], KIB(768), 3);
        OK(galloc_free(piece[i], s));
    }
    p[n++] = get(pool, 512, s);
    of_t[2] = get(pool, MIB(8), t); /* of new pages: from here on the streams are kept apart */
    galloc_stats before = stats_of(pool);
    p[n++] = get(pool, PAGE, s);
    EXPECT_EQ(stats_of(pool).moves, before.moves);
    EXPECT_EQ(stats_of(pool).reserved.current, before.reserved.current);
    for (int i = 0; i < 3; i++) OK(galloc_free(of_t[i], t));
    give_back_all(pool, p, n, s);
    finish();
}

/* A churn of sizes, now small ones, now large ones, moves pages from place to place. The addresses that this takes are
   used again: no more than a dozen times the memory is kept, however long it goes on. */
static void churn(play *p, long operations)
{
    size_t held = 0;
    while ((long)p->ops < operations) {
        size_t max = p->ops / 200 % 2 ? MIB(1) : MIB(32), bytes = roll_log(&p->d, KIB(128), max);
        while (p->used && (p->live + bytes > p->most || p->used == SLOTS)) play_free(p, roll_below(&p->d, p->used));
        slot *b = &p->slot[p->used];
        b->bytes = bytes;
        b->home = roll_below(&p->d, 2);
        b->tag = ++p->tag;
        b->ptr = (char *)get_used(p->pool, bytes, p->s[b->home], b->tag);
        p->used++;
        p->ops++;
        p->live += bytes;
        held = stats_of(p->pool).reserved.peak;
    }
    galloc_stats stats = stats_of(p->pool);
    printf("    %llu operations, %llu moves, %zu MiB of addresses, %zu in use, %zu leaving\n", p->ops,
           (unsigned long long)stats.moves, stats.addresses >> 20, stats.reserved.current >> 20, stats.leaving >> 20);
    EXPECT(stats.moves > p->ops / 1000);
    EXPECT(stats.addresses <= 12 * held + GIB(1)); /* 1 GiB is reserved at a time */
    EXPECT(stats.leaving <= 9 * held); /* what is not done yet stays */
    EXPECT_EQ(stats.addresses, sim_addresses());
}

/* Free blocks of two streams alternate, and a reset has completed the work of both: pages of the first one move, and
   what is left of it merges with the next ones. */
TEST(pages_move_from_blocks_that_merge_meanwhile)
{
    begin_still();
    cudaStream_t s[2] = {stream_new(), stream_new()};
    galloc_config config = config_limit(MIB(64));
    config.growth = MIB(2);
    config.reuse = 0;
    galloc_pool *pool = pool_new(&config);
    void *p[12], *stays = get(pool, 1000, s[0]);
    for (int i = 0; i < 12; i++) p[i] = get_used(pool, MIB(5), s[i % 2], 1);
    for (int i = 0; i < 12; i++) OK(galloc_free(p[i], s[i % 2]));
    OK(cudaDeviceReset());
    cudaStream_t u = stream_new();
    void *q = get_used(pool, MIB(30), u, 2);
    expect_healthy(pool, 1);
    OK(galloc_free(q, u));
    OK(galloc_free(stays, u));
    pool_end(pool);
    stream_end(u);
    finish();
}

/* A room takes all of a reserved range, in which pages have left their addresses. These are unmapped before more are
   reserved. */
TEST(old_addresses_make_way_before_more_are_reserved)
{
    sim_options options = sim_defaults();
    options.pace = SIM_PACE_PROMPT;
    options.memory = MIB(512); /* 1 GiB of addresses is reserved at a time */
    begin_with(options);
    galloc_config config = config_limit(MIB(64));
    config.overhead = 0;
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new();
    void *keep = get(pool, MIB(2), s); /* so that no two rooms in a row have one place */
    long reserved = 0;
    for (int i = 0; i < 10; i++) {
        void *kept = keep;
        OK(galloc_free(get_growable(pool, MIB(62), GIB(1), s), s));
        if (i == 1) reserved = sim_calls("cuMemAddressReserve");
        keep = get(pool, MIB(2), s);
        OK(galloc_free(kept, s));
    }
    EXPECT(stats_of(pool).moves > 200);
    EXPECT_EQ(sim_calls("cuMemAddressReserve"), reserved);
    OK(galloc_free(keep, s));
    expect_healthy(pool, 1);
    pool_end(pool);
    stream_end(s);
    finish();
}

TEST(addresses_are_used_again)
{
    static const struct {
        int reuse, pace, lag;
    } cases[] = {
        {ALL, SIM_PACE_PROMPT, 0}, {ALL, SIM_PACE_RANDOM, 100}, {0, SIM_PACE_PROMPT, 0}, {WAIT, SIM_PACE_PROMPT, 0}};
    static play p;
    for (int i = 0; i < 4; i++) {
        sim_options options = sim_defaults();
        memset(&p, 0, sizeof p);
        p.d.state = test_seed();
        p.most = MIB(192);
        options.memory = MIB(512);
        options.seed = test_seed();
        options.lag = cases[i].lag;
        options.pace = cases[i].pace;
        begin_with(options);
        galloc_config config = frugal(SIZE_MAX, cases[i].reuse);
        for (int k = 0; k < STREAMS; k++) p.s[k] = stream_new();
        p.pool = pool_new(&config);
        churn(&p, rounds(300) * 250);
        while (p.used) play_free(&p, 0);
        pool_end(p.pool);
        finish();
    }
}

/* Pages go back to an address where they were before, by no call of the driver. The allocation is no hit: it needed
   more than free blocks. */
TEST(a_page_that_goes_back_is_no_hit)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = galloc_config_default();
    config.overhead = 0;
    config.growth = MIB(2);
    galloc_pool *pool = pool_new(&config);
    void *a[8], *kept, *r;
    for (int i = 0; i < 8; i++) a[i] = get(pool, MIB(2), s);
    kept = get(pool, MIB(2), s);
    for (int i = 1; i < 8; i += 2) OK(galloc_free(a[i], s));
    OK(galloc_free(get(pool, MIB(8), s), s)); /* of four pages, which move */
    EXPECT(stats_of(pool).moves > 0);
    r = get(pool, MIB(4), s);
    for (int i = 0; i < 8; i += 2) OK(galloc_free(a[i], s));
    galloc_stats before = stats_of(pool);
    long calls = memory_calls();
    void *x = get(pool, MIB(6), s);
    galloc_stats after = stats_of(pool);
    EXPECT(after.moves > before.moves);
    EXPECT_EQ(memory_calls(), calls);
    EXPECT_EQ(after.hits, before.hits);
    OK(galloc_free(x, s));
    OK(galloc_free(r, s));
    OK(galloc_free(kept, s));
    stream_end(s);
    pool_end(pool);
    finish();
}

/* Pages are as large as the device's, however small `growth` is. */
TEST(growth_below_the_granularity_is_the_granularity)
{
    sim_options options = sim_defaults();
    options.granularity = MIB(8);
    begin_with(options);
    cudaStream_t s = stream_new();
    galloc_config config = galloc_config_default();
    config.growth = MIB(2);
    galloc_pool *pool = pool_new(&config);
    void *p = get_used(pool, MIB(30), s, 1), *q = get_used(pool, MIB(3), s, 2);
    expect_healthy(pool, 1);
    OK(galloc_free(p, s));
    OK(galloc_free(q, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

TEST(moved_bytes_begin_anew_with_the_other_counters)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_limited(MIB(16));
    void *p[8];
    for (int i = 0; i < 8; i++) p[i] = get(pool, MIB(2), s);
    for (int i = 0; i < 8; i += 2) OK(galloc_free(p[i], s));
    void *q = get(pool, MIB(8), s);
    EXPECT(stats_of(pool).moves > 0 && stats_of(pool).moved_bytes > 0);
    OK(galloc_pool_stats_reset(pool));
    EXPECT_EQ(stats_of(pool).moves, 0);
    EXPECT_EQ(stats_of(pool).moved_bytes, 0);
    OK(galloc_free(q, s));
    for (int i = 1; i < 8; i += 2) OK(galloc_free(p[i], s));
    pool_end(pool);
    finish();
}

/* A device may have smaller pages than the 2 MiB that galloc uses at least, and addresses that fit only those. */
TEST(a_heap_of_a_device_with_small_pages_is_sound)
{
    static const size_t granularity[] = {KIB(64), MIB(1), MIB(2), MIB(4), MIB(16)};
    for (size_t g = 0; g < sizeof granularity / sizeof *granularity; g++) {
        dice d = {test_seed()};
        sim_options options = sim_defaults();
        options.granularity = granularity[g];
        options.memory = GIB(1);
        begin_with(options);
        cudaStream_t s = stream_new();
        CUdeviceptr own = 0; /* of the program */
        EXPECT_EQ(cuMemAddressReserve(&own, granularity[g], 0, 0, 0), CUDA_SUCCESS);
        galloc_pool *pool[2] = {pool_new(NULL), pool_new(NULL)};
        void *block[64];
        int n = 0;
        for (int i = 0; i < 2; i++) {
            void *first = get(pool[i], MIB(2), s);
            if (!EXPECT_EQ((uintptr_t)first % larger(MIB(2), granularity[g]), 0)) return;
            OK(galloc_free(first, s));
        }
        for (int i = 0; i < 2000; i++) {
            galloc_pool *p = pool[i % 2];
            if (n < 64 && roll_below(&d, 2)) {
                size_t bytes = (size_t)1 << roll_below(&d, 24);
                if (!galloc_pool_malloc(p, &block[n], bytes, s)) put(s, block[n++], bytes, 1);
            } else if (n) {
                int k = (int)roll_below(&d, (uint32_t)n);
                OK(galloc_free(block[k], s));
                block[k] = block[--n];
            }
            if (!EXPECT_EQ(galloc_pool_check(p), 0)) return;
        }
        while (n) OK(galloc_free(block[--n], s));
        for (int i = 0; i < 2; i++) pool_end(pool[i]);
        EXPECT_EQ(cuMemAddressFree(own, granularity[g]), CUDA_SUCCESS);
        stream_end(s);
        finish();
    }
}

TEST_MAIN()
