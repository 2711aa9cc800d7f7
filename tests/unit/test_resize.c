/* test_resize.c - blocks that grow and shrink where they stand: into free pieces, holes and rooms, with pages created
   or moved, in stream order, with nothing copied and no wait of the host. GALLOC_SEED chooses the numbers of the random
   tests, GALLOC_ROUNDS how long they are. */

#include "setup.h"

#include <pthread.h>

enum { COMPLETED = GALLOC_REUSE_COMPLETED, FOLLOWED = GALLOC_REUSE_FOLLOWED, WAIT = GALLOC_REUSE_WAIT };
enum { ALL = COMPLETED | FOLLOWED | WAIT, CELLS = 4, PIECES = 6, PAGE = 2 << 20, MOST = (2 + CELLS) * PAGE };

/* ---- a block, what follows it, and free memory elsewhere --------------------------------------------------------- */

/* P of two pages on S; CELLS cells of a page each, or as much room; a wall; then PIECES pages with walls between. */
typedef struct row {
    galloc_pool *pool;
    cudaStream_t s, t, u;
    char *p;
    void *cell[CELLS], *wall, *piece[PIECES], *pillar[PIECES];
    int room;
    galloc_stats before; /* counters when all was set up */
    size_t addresses;
    long blocking, created;
} row;

static galloc_config frugal(size_t limit, int reuse)
{
    galloc_config config = config_limit(limit);
    config.overhead = 0;
    config.reuse = reuse;
    return config;
}

static void note(row *r)
{
    r->before = stats_of(r->pool);
    r->blocking = sim_blocking_calls();
    r->created = sim_calls("cuMemCreate");
}

static long blocked(const row *r) { return sim_blocking_calls() - r->blocking; }
static long created(const row *r) { return sim_calls("cuMemCreate") - r->created; }
static long moved(const row *r) { return (long)(stats_of(r->pool).moves - r->before.moves); }
static long waited(const row *r) { return (long)(stats_of(r->pool).waits - r->before.waits); }

static void row_open(row *r, const galloc_config *config, int room)
{
    memset(r, 0, sizeof *r);
    r->s = stream_new();
    r->t = stream_new();
    r->u = stream_new();
    r->pool = pool_new(config);
    r->room = room;
    OK(galloc_free(get(r->pool, 512, r->t), r->t)); /* the pool knows two streams */
    OK(galloc_pool_trim(r->pool, 0, NULL));
    r->p = room ? get_growable(r->pool, 2 * PAGE, MOST, r->s) : get(r->pool, 2 * PAGE, r->s);
    put(r->s, r->p, 2 * PAGE, 1);
    for (int i = 0; i < CELLS && !room; i++) {
        r->cell[i] = get_used(r->pool, PAGE, r->s, 10 + (uint64_t)i);
        EXPECT(r->cell[i] == r->p + (2 + i) * PAGE);
    }
    r->wall = get_used(r->pool, PAGE, r->s, 2);
    EXPECT(r->wall == r->p + MOST);
    for (int i = 0; i < PIECES; i++) {
        r->piece[i] = get_used(r->pool, PAGE, r->s, 20 + (uint64_t)i);
        r->pillar[i] = get_used(r->pool, PAGE, r->s, 30 + (uint64_t)i);
    }
    note(r);
}

/* The cell's memory is free, or gone. */
static void cell_free(row *r, int i) { OK(galloc_free(r->cell[i], r->s)); }

static void cell_to_hole(row *r, int i)
{
    cell_free(r, i);
    sim_run(-1);
    OK(galloc_pool_trim(r->pool, stats_of(r->pool).reserved.current - PAGE, NULL));
    EXPECT_EQ(info_of(r->cell[i]).state, GALLOC_STATE_FOREIGN);
}

static void cells_to_holes(row *r)
{
    for (int i = 0; i < CELLS && !r->room; i++) cell_to_hole(r, i);
    inside_set_live_peak(r->pool, stats_of(r->pool).live.current); /* as if they had never been */
    note(r);
}

/* Free memory in pieces: of S, or handed to T and freed there. */
static void pieces_free(row *r, cudaStream_t stream)
{
    for (int i = 0; i < PIECES; i++) {
        if (stream != r->s) {
            order(r->s, stream);
            put(stream, r->piece[i], PAGE, 40);
        }
        OK(galloc_free(r->piece[i], stream));
        r->piece[i] = NULL;
    }
    note(r);
}

static void expect_as_it_was(const row *r, galloc_pointer info)
{
    galloc_pointer now = info_of(r->p);
    EXPECT(now.base == info.base && now.state == GALLOC_STATE_USED);
    EXPECT_EQ(now.requested, info.requested);
    EXPECT_EQ(now.usable, info.usable);
    EXPECT_EQ(now.room, info.room);
    EXPECT_EQ(stats_of(r->pool).live.current, r->before.live.current);
    EXPECT_EQ(stats_of(r->pool).allocated.current, r->before.allocated.current);
    expect_healthy(r->pool, 1);
    EXPECT_EQ(sim_mapped(0), sim_physical(0) + stats_of(r->pool).leaving);
}

/* P is so long now, and all others are where they were. */
static void expect_grown(row *r, size_t bytes, uint64_t tag)
{
    EXPECT_EQ(info_of(r->p).requested, bytes);
    expect_healthy(r->pool, 1);
    look(r->s, r->p, 2 * PAGE, 1);
    put(r->s, r->p + 2 * PAGE, bytes - 2 * PAGE, tag);
    look(r->s, r->p, 2 * PAGE, 1);
    look(r->s, r->wall, PAGE, 2);
    for (uint64_t i = 0; i < PIECES; i++) look(r->s, r->pillar[i], PAGE, 30 + i);
}

static void row_close(row *r)
{
    sim_fail_clear();
    OK(galloc_free(r->p, r->s));
    OK(galloc_free(r->wall, r->s));
    for (int i = 0; i < PIECES; i++) {
        OK(galloc_free(r->piece[i], r->s));
        OK(galloc_free(r->pillar[i], r->s));
    }
    expect_healthy(r->pool, 1);
    pool_end(r->pool);
    finish();
}

/* ---- growable blocks --------------------------------------------------------------------------------------------- */

TEST(growable_is_the_short_form_of_max_bytes)
{
    static const size_t sizes[][2] = {{1000, MIB(64)}, {MIB(3), MIB(3)}, {MIB(5), 1}, {MIB(2), MIB(2) + 1},
                                      {1, GIB(3)},     {MIB(4), 0}};
    begin();
    cudaStream_t s = stream_new();
    for (int i = 0; i < 6; i++) {
        void *p = &s, *q = NULL;
        galloc_request request = {0};
        request.bytes = sizes[i][0];
        request.max_bytes = sizes[i][1] ? sizes[i][1] : sizes[i][0];
        request.stream = s;
        OK(galloc_malloc_growable(&p, sizes[i][0], sizes[i][1], s));
        OK(galloc_alloc(&q, &request));
        galloc_pointer a = info_of(p), b = info_of(q);
        EXPECT_EQ(a.requested, b.requested);
        EXPECT_EQ(a.usable, b.usable);
        EXPECT_EQ(a.room, b.room);
        EXPECT_EQ(a.stream_id, b.stream_id);
        EXPECT(a.room >= sizes[i][0] && a.room >= sizes[i][1] && a.room % MIB(2) == 0);
        for (int k = 0; k < 2; k++) {
            OK(galloc_resize(k ? p : q, 1, s));
            void *other = NULL;
            OK(galloc_malloc(&other, MIB(1), s)); /* in nobody's room */
            OK(galloc_resize(k ? p : q, a.room < GIB(1) ? a.room : MIB(70), s));
            OK(galloc_free(other, s));
        }
        OK(galloc_free(p, s));
        OK(galloc_free(q, s));
    }
    void *p = &s;
    OK(galloc_malloc_growable(&p, 0, MIB(64), s));
    EXPECT(p == NULL);
    EXPECT_EQ(galloc_malloc_growable(NULL, 1, 1, s), cudaErrorInvalidValue);
    p = &s;
    EXPECT_EQ(galloc_malloc_growable(&p, 1, SIZE_MAX, s), cudaErrorMemoryAllocation);
    EXPECT(p == NULL);
    finish();
}

/* A block in a stream's cache, or in a bin, has no room. So it does not serve a request with max_bytes, even if that is
   no more than the request's bytes. */
TEST(max_bytes_of_no_more_than_the_request_is_room)
{
    for (int binned = 0; binned < 2; binned++) {
        for (size_t most = 1; most <= 1000; most += 999) {
            begin();
            cudaStream_t s = stream_new();
            galloc_pool *pool = pool_expandable(1);
            void *p = get(pool, 1000, s), *behind = get(pool, 1000, s);
            OK(galloc_free(p, s));
            if (binned) OK(galloc_free(get(pool, 5000, s), s)); /* the cache, which lacks that size, is emptied */
            p = get_growable(pool, 1000, most, s);
            EXPECT_EQ(info_of(p).room, MIB(2));
            OK(galloc_resize(p, MIB(2), s));
            OK(galloc_free(p, s));
            OK(galloc_free(behind, s));
            OK(galloc_pool_destroy(pool));
            stream_end(s);
            finish();
        }
    }
}

/* Nor does a block get less than its bytes. */
TEST(max_bytes_below_the_request_take_nothing_from_it)
{
    for (int expandable = 0; expandable < 2; expandable++) {
        begin();
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_expandable(expandable);
        char *p = get_growable(pool, MIB(8), MIB(2), s), *q = get_growable(pool, MIB(8), MIB(2), s);
        EXPECT(p + MIB(8) <= q || q + MIB(8) <= p);
        EXPECT_EQ(info_of(p).requested, MIB(8));
        EXPECT_EQ(info_of(p).usable, MIB(8));
        EXPECT_EQ(info_of(p).room, MIB(8));
        put(s, p, MIB(8), 1);
        put(s, q, MIB(8), 2);
        look(s, p, MIB(8), 1);
        expect_healthy(pool, 1);
        OK(galloc_free(p, s));
        OK(galloc_free(q, s));
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

/* In fixed segments the memory itself is kept. */
TEST(growable_works_in_fixed_segments)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_expandable(0);
    char *p = get_growable(pool, MIB(1), MIB(30), s), *q = get(pool, MIB(1), s);
    for (size_t bytes = MIB(2); bytes <= MIB(30); bytes += MIB(4)) {
        OK(galloc_resize(p, bytes, s));
        put(s, p, bytes, 1);
    }
    EXPECT_EQ(galloc_resize(p, MIB(64), s), cudaErrorNotSupported);
    expect_healthy(pool, 1);
    OK(galloc_free(p, s));
    OK(galloc_free(q, s));
    pool_end(pool);
    finish();
}

/* ---- ways to grow ------------------------------------------------------------------------------------------------ */

/* A cell is a hole where the mix has a bit, else free. */
static void cells_mix(row *r, int mix)
{
    for (int i = 0; i < CELLS; i++)
        if (mix >> i & 1) cell_to_hole(r, i);
    for (int i = 0; i < CELLS; i++)
        if (!(mix >> i & 1)) cell_free(r, i);
}

/* Every mix of free pieces and holes, to the end and to somewhere in the last. */
TEST(a_block_grows_into_any_mix_of_free_pieces_and_holes)
{
    for (int mix = 0; mix < 1 << CELLS; mix++) {
        for (int partly = 0; partly < 2; partly++) {
            begin_still();
            row r;
            galloc_config config = frugal(GIB(1), ALL);
            row_open(&r, &config, 0);
            cells_mix(&r, mix);
            note(&r);
            size_t bytes = MOST - (partly ? PAGE - 512 : 0), physical = sim_physical(0);
            int holes = mix == 15 ? 4 : (mix & 1) + (mix >> 1 & 1) + (mix >> 2 & 1) + (mix >> 3 & 1);
            OK(galloc_resize(r.p, bytes, r.s));
            EXPECT_EQ(sim_physical(0), physical + (size_t)holes * PAGE);
            EXPECT_EQ(blocked(&r), 0);
            EXPECT_EQ(waited(&r), 0);
            EXPECT_EQ(moved(&r), 0);
            EXPECT_EQ(stats_of(r.pool).live.current, r.before.live.current + bytes - 2 * PAGE);
            expect_grown(&r, bytes, 3);
            row_close(&r);
        }
    }
}

static galloc_pool *growing;
static size_t free_meanwhile;
static int mapped_meanwhile;

static void count_free(const char *function)
{
    if (strcmp(function, "cuMemMap")) return;
    mapped_meanwhile++;
    free_meanwhile = larger(free_meanwhile, stats_of(growing).largest_free);
}

/* The driver is called with the pool's lock released: what the block is to grow into is nobody else's meanwhile. */
TEST(no_other_call_gets_what_a_block_grows_into)
{
    begin_still();
    row r;
    galloc_config config = frugal(GIB(1), ALL);
    row_open(&r, &config, 0);
    cell_to_hole(&r, 1);
    cell_free(&r, 0);
    cell_free(&r, 2);
    note(&r);
    growing = r.pool;
    free_meanwhile = 0;
    mapped_meanwhile = 0;
    EXPECT(stats_of(r.pool).largest_free >= PAGE);
    sim_hook(count_free, NULL);
    OK(galloc_resize(r.p, 5 * PAGE, r.s));
    sim_hook(NULL, NULL);
    EXPECT(mapped_meanwhile > 0);
    EXPECT_EQ(free_meanwhile, 0);
    expect_grown(&r, 5 * PAGE, 3);
    OK(galloc_free(r.cell[3], r.s));
    row_close(&r);
}

/* However many holes there are. */
TEST(a_block_grows_over_many_holes)
{
    begin_still();
    cudaStream_t s = stream_new();
    galloc_config config = frugal(GIB(1), 0);
    galloc_pool *pool = pool_new(&config);
    void *cell[24];
    char *p = get_used(pool, PAGE, s, 1);
    for (int i = 0; i < 24; i++) cell[i] = get_used(pool, PAGE, s, 2);
    void *wall = get_used(pool, PAGE, s, 3);
    for (int i = 0; i < 24; i += 2) OK(galloc_free(cell[i], s));
    sim_run(-1);
    OK(galloc_pool_trim(pool, 0, NULL));
    for (int i = 1; i < 24; i += 2) OK(galloc_free(cell[i], s));
    OK(galloc_resize(p, 25 * PAGE, s));
    look(s, p, PAGE, 1);
    put(s, p, 25 * PAGE, 4);
    look(s, wall, PAGE, 3);
    expect_healthy(pool, 1);
    OK(galloc_free(p, s));
    OK(galloc_free(wall, s));
    pool_end(pool);
    finish();
}

/* Pages that are free elsewhere come before new ones: the stream's own, though nothing of its work is done. */
TEST(pages_move_to_a_block_that_grows)
{
    for (int room = 0; room < 2; room++) {
        begin_still();
        row r;
        galloc_config config = frugal(GIB(1), 0);
        row_open(&r, &config, room);
        cells_to_holes(&r);
        pieces_free(&r, r.s);
        OK(galloc_resize(r.p, MOST, r.s));
        EXPECT_EQ(moved(&r), CELLS);
        EXPECT_EQ(created(&r), 0);
        EXPECT_EQ(blocked(&r), 0);
        EXPECT_EQ(waited(&r), 0);
        expect_grown(&r, MOST, 3);
        row_close(&r);
    }
}

/* Those of another stream by waits queued under pressure; by new ones where waits are not allowed. */
TEST(pages_of_another_stream_move_to_a_block_that_grows)
{
    for (int room = 0; room < 2; room++) {
        for (int reuse = 0; reuse <= ALL; reuse++) {
            begin_still();
            row r;
            galloc_config config = frugal(GIB(1), reuse);
            row_open(&r, &config, room);
            cells_to_holes(&r);
            pieces_free(&r, r.t);
            OK(galloc_resize(r.p, MOST, r.s));
            EXPECT_EQ(moved(&r), reuse & WAIT ? CELLS : 0);
            EXPECT_EQ(created(&r) > 0, !(reuse & WAIT));
            EXPECT_EQ(waited(&r) > 0, (reuse & WAIT) != 0);
            EXPECT_EQ(blocked(&r), 0);
            expect_grown(&r, MOST, 3);
            row_close(&r);
        }
    }
}

/* Those of two streams after a wait for each page. Where one of the waits cannot be queued, nothing has happened. */
TEST(pages_of_several_streams_move_to_a_block_that_grows)
{
    for (int room = 0; room < 2; room++) {
        for (int failing = 0; failing <= 2; failing++) {
            begin_still();
            row r;
            galloc_config config = frugal(GIB(1), WAIT);
            row_open(&r, &config, room);
            cells_to_holes(&r);
            for (int i = 0; i < PIECES; i++) {
                cudaStream_t home = i % 2 ? r.t : r.u;
                order(r.s, home);
                put(home, r.piece[i], PAGE, 40);
                OK(galloc_free(r.piece[i], home));
                r.piece[i] = NULL;
            }
            note(&r);
            galloc_pointer info = info_of(r.p);
            if (failing) {
                sim_fail("cuStreamWaitEvent", failing, 0, cudaErrorUnknown);
                EXPECT_EQ(galloc_resize(r.p, MOST, r.s), cudaErrorUnknown);
                EXPECT_EQ(sim_failed(), 1);
                sim_fail_clear();
                EXPECT_EQ(moved(&r), 0);
                EXPECT_EQ(waited(&r), failing - 1);
                expect_as_it_was(&r, info);
            }
            OK(galloc_resize(r.p, MOST, r.s));
            EXPECT_EQ(moved(&r), CELLS);
            EXPECT_EQ(created(&r), 0);
            EXPECT_EQ(waited(&r), CELLS + (failing == 2)); /* each page was freed at a time of its own */
            EXPECT_EQ(blocked(&r), 0);
            expect_grown(&r, MOST, 3);
            row_close(&r);
        }
    }
}

/* With the limit reached: moved pages, and where nobody may wait a wait of the host in the end; never an error. */
TEST(what_is_cached_makes_way_under_a_limit)
{
    for (int room = 0; room < 2; room++) {
        for (int reuse = 0; reuse <= ALL; reuse++) {
            for (int mine = 0; mine < 2; mine++) {
                begin_still();
                row r;
                size_t held = (2 + 1 + 2 * PIECES) * PAGE;
                galloc_config config = frugal(held + (room ? 0 : CELLS * PAGE), reuse);
                row_open(&r, &config, room);
                cells_to_holes(&r);
                inside_set_memory_limit(r.pool, held);
                pieces_free(&r, mine ? r.s : r.t);
                OK(galloc_resize(r.p, MOST, r.s));
                EXPECT_EQ(blocked(&r) > 0, !mine && !(reuse & WAIT));
                EXPECT_EQ(stats_of(r.pool).reserved.current, held);
                expect_grown(&r, MOST, 3);
                row_close(&r);
            }
        }
    }
}

/* What is not free as a whole page cannot help; then there is an error, and nothing has happened. */
TEST(without_memory_the_block_is_as_it_was)
{
    for (int room = 0; room < 2; room++) {
        for (int how = 0; how < 2; how++) { /* a limit; a device that has no more */
            sim_options options = sim_defaults();
            row r;
            size_t held = (2 + 1 + 2 * PIECES) * PAGE;
            options.pace = SIM_PACE_STILL;
            if (how) options.memory = held + (room ? 0 : CELLS * PAGE);
            begin_with(options);
            galloc_config config = frugal(how ? GIB(1) : held + (room ? 0 : CELLS * PAGE), ALL);
            row_open(&r, &config, room);
            cells_to_holes(&r);
            if (!how) inside_set_memory_limit(r.pool, held);
            void *rest = !room && how ? get(r.pool, CELLS * PAGE, r.s) : NULL;
            note(&r);
            galloc_pointer info = info_of(r.p);
            EXPECT_EQ(galloc_resize(r.p, MOST, r.s), !room && how ? cudaErrorNotSupported : cudaErrorMemoryAllocation);
            expect_as_it_was(&r, info);
            OK(galloc_free(rest, r.s));
            if (!how) inside_set_memory_limit(r.pool, GIB(1));
            else OK(galloc_free(r.piece[0], r.s));
            if (how) r.piece[0] = NULL;
            OK(galloc_resize(r.p, 3 * PAGE, r.s));
            expect_grown(&r, 3 * PAGE, 3);
            row_close(&r);
        }
    }
}

/* A block may grow beyond its room like any other. */
TEST(a_block_grows_beyond_its_room)
{
    begin_still();
    row r;
    galloc_config config = frugal(GIB(1), ALL);
    row_open(&r, &config, 1);
    EXPECT_EQ(galloc_resize(r.p, MOST + 1, r.s), cudaErrorNotSupported);
    OK(galloc_free(r.wall, r.s));
    OK(galloc_resize(r.p, MOST + 512, r.s));
    put(r.s, r.p + 2 * PAGE, CELLS * PAGE + 512, 3);
    expect_healthy(r.pool, 1);
    OK(galloc_resize(r.p, PAGE, r.s));
    r.wall = get_used(r.pool, PAGE - 512, r.s, 2);
    EXPECT((char *)r.wall >= r.p + MOST + 512 || (char *)r.wall < r.p);
    OK(galloc_resize(r.p, MOST + 512, r.s));
    row_close(&r);
}

/* A room begins at a multiple of its alignment, also where its segment does not. */
TEST(a_room_has_its_alignment_in_any_segment)
{
    for (int odd = 0; odd < 4; odd++) {
        begin();
        cudaStream_t s = stream_new();
        galloc_request request = {0};
        CUdeviceptr before = 0;
        void *p = NULL;
        OK(cudaFree(NULL));
        if (odd) OK(cuMemAddressReserve(&before, (size_t)odd * PAGE, 0, 0, 0)); /* the segment comes behind it */
        request.pool = pool_new(NULL);
        OK(galloc_pool_reserve(request.pool, PAGE)); /* now there is a segment */
        request.bytes = PAGE;
        request.max_bytes = 4 * PAGE;
        request.alignment = 4 * PAGE;
        request.stream = s;
        OK(galloc_alloc(&p, &request));
        EXPECT_EQ((uintptr_t)p % (4 * PAGE), 0);
        EXPECT_EQ(info_of(p).room, 4 * PAGE);
        OK(galloc_resize(p, 4 * PAGE, s));
        OK(galloc_free(p, s));
        pool_end(request.pool);
        if (odd) OK(cuMemAddressFree(before, (size_t)odd * PAGE));
        finish();
    }
}

/* Of several places without pages a room takes the lowest. */
TEST(a_room_takes_the_lowest_of_equal_places)
{
    enum { ROOMS = 4 };
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    char *p[ROOMS], *q;
    for (int i = 0; i < ROOMS; i++) p[i] = get_growable(pool, PAGE, 4 * PAGE, s);
    for (int i = 0; i < ROOMS - 1; i++) EXPECT(p[i] < p[i + 1]);
    for (int i = 0; i < ROOMS; i += 2) { /* the higher place is the newer hole */
        OK(galloc_free(p[i], s));
        OK(cudaStreamSynchronize(s));
        OK(galloc_pool_trim(pool, 0, NULL));
    }
    q = get_growable(pool, PAGE, 4 * PAGE, s);
    EXPECT(q == p[0]);
    OK(galloc_free(q, s));
    for (int i = 1; i < ROOMS; i += 2) OK(galloc_free(p[i], s));
    pool_end(pool);
    finish();
}

/* Large pages that lie free serve a small growth only when there is nothing else; the block keeps all of them. */
TEST(a_large_page_serves_a_small_growth_when_nothing_else_does)
{
    for (int how = 0; how < 6; how++) {
        int room = how & 1, full = how >> 1; /* 1: of the pool's limit; 2: the device */
        begin_still();
        cudaStream_t s = stream_new();
        galloc_config config = galloc_config_default();
        config.reuse = 0;
        galloc_pool *pool = pool_new(&config);
        void *base = get_used(pool, GIB(2), s, 1);
        char *p = room ? get_growable(pool, PAGE, GIB(1), s) : NULL;
        void *big = get_used(pool, MIB(256), s, 2);
        if (full == 1) inside_set_memory_limit(pool, stats_of(pool).reserved.current);
        if (full == 2) sim_fail("cuMemCreate", 1, 1, 0);
        OK(galloc_free(big, s));
        if (!room) p = get_growable(pool, PAGE, GIB(1), s);
        EXPECT_EQ(info_of(p).room, GIB(1));
        OK(galloc_resize(p, 3 * PAGE, s));
        put(s, p, 3 * PAGE, 3);
        EXPECT_EQ(info_of(p).usable > 3 * PAGE, full != 0);
        EXPECT_EQ(sim_blocking_calls(), 0);
        sim_fail_clear();
        expect_healthy(pool, 1);
        void *other = get_used(pool, MIB(32), s, 4);
        EXPECT((char *)other >= p + GIB(1) || (char *)other + MIB(32) <= p);
        OK(galloc_free(other, s));
        OK(galloc_free(p, s));
        OK(galloc_free(base, s));
        pool_end(pool);
        finish();
    }
}

/* Where the limit leaves just what a growth needs, that is created, and the block has no more than it asked for. */
TEST(a_growth_up_to_the_limit_takes_no_large_page)
{
    for (int lacks = 0; lacks < 2; lacks++) {
        begin_still();
        cudaStream_t s = stream_new();
        galloc_config config = galloc_config_default();
        config.reuse = 0;
        galloc_pool *pool = pool_new(&config);
        void *base = get_used(pool, GIB(2), s, 1);
        char *p = get_growable(pool, PAGE, GIB(1), s);
        void *big = get_used(pool, MIB(256), s, 2);
        size_t limit = stats_of(pool).reserved.current + 2 * PAGE - (lacks ? PAGE : 0);
        inside_set_memory_limit(pool, limit);
        OK(galloc_free(big, s));
        OK(galloc_resize(p, 3 * PAGE, s));
        EXPECT_EQ(info_of(p).usable > 3 * PAGE, lacks);
        EXPECT(stats_of(pool).reserved.current <= limit);
        put(s, p, 3 * PAGE, 3);
        expect_healthy(pool, 1);
        OK(galloc_free(p, s));
        OK(galloc_free(base, s));
        pool_end(pool);
        finish();
    }
}

/* ---- what stands in the way -------------------------------------------------------------------------------------- */

TEST(a_used_neighbour_is_refused_without_a_call_to_the_driver)
{
    begin_still();
    row r;
    galloc_config config = frugal(GIB(1), ALL);
    row_open(&r, &config, 0);
    for (int i = 0; i < CELLS - 1; i++) cell_to_hole(&r, i);
    note(&r);
    galloc_pointer info = info_of(r.p);
    long calls = memory_calls() + event_calls();
    EXPECT_EQ(galloc_resize(r.p, MOST, r.s), cudaErrorNotSupported);
    EXPECT_EQ(galloc_resize(r.p, GIB(800), r.s), cudaErrorNotSupported);
    EXPECT_EQ(memory_calls() + event_calls(), calls);
    expect_as_it_was(&r, info);
    OK(galloc_resize(r.p, MOST - PAGE, r.s));
    cell_free(&r, CELLS - 1);
    row_close(&r);
}

/* A free neighbour of another stream: taken when that is done, by a wait under pressure, else not; the host does not
   wait for the sake of a place. */
TEST(a_neighbour_of_another_stream_is_taken_in_order)
{
    for (int reuse = 0; reuse <= ALL; reuse++) {
        for (int pressure = 0; pressure < 2; pressure++) {
            begin_still();
            row r;
            galloc_config config = frugal(pressure ? GIB(1) : SIZE_MAX, reuse);
            row_open(&r, &config, 0);
            for (int i = 0; i < CELLS; i++) {
                cudaStream_t home = i % 2 ? r.t : r.u;
                order(r.s, home);
                put(home, r.cell[i], PAGE, 5);
                OK(galloc_free(r.cell[i], home));
            }
            note(&r);
            galloc_pointer info = info_of(r.p);
            int can = pressure && (reuse & WAIT);
            EXPECT_EQ(galloc_resize(r.p, MOST, r.s), can ? cudaSuccess : cudaErrorNotSupported);
            EXPECT_EQ(waited(&r) > 0, can);
            EXPECT_EQ(blocked(&r), 0);
            if (!can) {
                expect_as_it_was(&r, info);
                sim_run(-1);
                EXPECT_EQ(galloc_resize(r.p, MOST, r.s), reuse & COMPLETED ? cudaSuccess : cudaErrorNotSupported);
                can = reuse & COMPLETED;
            }
            if (can) expect_grown(&r, MOST, 3);
            EXPECT_EQ(blocked(&r), 0);
            row_close(&r);
        }
    }
}

/* With reuse:followed off a wait serves the growth that it was queued for, and no later one. */
TEST(no_growth_follows_the_wait_of_another)
{
    for (int reuse = WAIT; reuse <= ALL; reuse++) {
        if (!(reuse & WAIT)) continue;
        begin_still();
        galloc_config config = frugal(GIB(1), reuse);
        galloc_pool *pool = pool_new(&config);
        cudaStream_t s = stream_new(), t = stream_new();
        OK(galloc_pool_reserve(pool, 8 * PAGE));
        char *p = get(pool, 2 * PAGE, s), *next = get(pool, 4 * PAGE, t), *wall = get(pool, PAGE, s);
        if (EXPECT(next == p + 2 * PAGE)) {
            put(t, next, 4 * PAGE, 1);
            OK(galloc_free(next, t));
            OK(galloc_resize(p, 3 * PAGE, s));
            put(s, p, 3 * PAGE, 2);
            EXPECT_EQ(sim_calls("cuStreamWaitEvent"), 1);
            OK(galloc_resize(p, 5 * PAGE, s));
            put(s, p, 5 * PAGE, 3);
            EXPECT_EQ(sim_calls("cuStreamWaitEvent"), reuse & FOLLOWED ? 1 : 2);
        }
        expect_healthy(pool, 1);
        OK(galloc_free(p, s));
        OK(galloc_free(wall, s));
        pool_end(pool);
        stream_end(s);
        stream_end(t);
        finish();
    }
}

/* Legacy is never made to wait, and waits would not be noticed by anybody. */
TEST(the_legacy_stream_does_not_wait_for_a_neighbour)
{
    begin_still();
    row r;
    galloc_config config = frugal(GIB(1), ALL);
    row_open(&r, &config, 0);
    order(r.s, r.t);
    put(r.t, r.cell[0], PAGE, 5);
    OK(galloc_free(r.cell[0], r.t));
    note(&r);
    EXPECT_EQ(galloc_resize(r.p, 3 * PAGE, 0), cudaErrorNotSupported);
    EXPECT_EQ(waited(&r), 0);
    EXPECT_EQ(blocked(&r), 0);
    for (int i = 1; i < CELLS; i++) cell_free(&r, i);
    row_close(&r);
}

/* Addresses that pages have left are not there until the work that used them is done. */
TEST(leaving_addresses_are_waited_for_by_nobody)
{
    begin_still();
    row r;
    galloc_config config = frugal(GIB(1), 0);
    row_open(&r, &config, 0);
    for (int i = 0; i < CELLS; i += 2) cell_free(&r, i);
    note(&r);
    void *q = get_used(r.pool, 2 * PAGE, r.s, 6);
    EXPECT_EQ(moved(&r), 2);
    note(&r);
    galloc_pointer info = info_of(r.p);
    EXPECT_EQ(galloc_resize(r.p, 3 * PAGE, r.s), cudaErrorNotSupported);
    EXPECT_EQ(blocked(&r), 0);
    expect_as_it_was(&r, info);
    sim_run(-1);
    OK(galloc_resize(r.p, 3 * PAGE, r.s));
    expect_grown(&r, 3 * PAGE, 3);
    OK(galloc_free(q, r.s));
    for (int i = 1; i < CELLS; i += 2) cell_free(&r, i);
    row_close(&r);
}

TEST(a_captured_stream_cannot_resize_and_is_unharmed)
{
    static const enum cudaStreamCaptureMode modes[] = {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal,
                                                       cudaStreamCaptureModeRelaxed};
    for (int mode = 0; mode < 3; mode++) {
        for (int room = 0; room < 2; room++) {
            begin_still();
            row r;
            galloc_config config = frugal(GIB(1), ALL);
            cudaGraph_t graph = NULL;
            row_open(&r, &config, room);
            cells_to_holes(&r);
            galloc_pointer info = info_of(r.p);
            cudaStream_t captured = stream_new();
            OK(cudaStreamBeginCapture(captured, modes[mode]));
            put(captured, r.wall, PAGE, 2);
            long lines = log_lines;
            EXPECT_EQ(galloc_resize(r.p, 3 * PAGE, captured), cudaErrorNotSupported);
            EXPECT_EQ(galloc_resize(r.p, PAGE, captured), cudaErrorNotSupported);
            EXPECT_EQ(log_lines, lines + 2);
            expect_as_it_was(&r, info);
            put(captured, r.wall, PAGE, 2);
            OK(galloc_resize(r.p, 3 * PAGE, r.s)); /* elsewhere all goes on */
            OK(cudaStreamEndCapture(captured, &graph));
            EXPECT(graph != NULL);
            OK(cudaGraphDestroy(graph));
            OK(galloc_resize(r.p, 4 * PAGE, captured));
            order(r.s, captured);
            put(captured, r.p, 4 * PAGE, 7);
            order(captured, r.s);
            row_close(&r);
        }
    }
}

/* ---- marks ------------------------------------------------------------------------------------------------------- */

/* Grown by S into what S (or T) still uses, not used there, freed on U, which is in order to neither of these uses. */
TEST(the_marks_of_what_it_grew_into_stay)
{
    for (int reuse = 0; reuse <= ALL; reuse++) {
        for (int how = 0; how < 6; how++) { /* cached, by pages moved to a hole, to a room; S's or T's */
            begin_still();
            row r;
            galloc_config config = frugal(GIB(1), reuse);
            row_open(&r, &config, how % 3 == 2);
            if (how % 3) cells_to_holes(&r);
            order(r.s, r.u); /* what P held before */
            if (how / 3) order(r.s, r.t);
            cudaStream_t user = how / 3 ? r.t : r.s;
            for (int i = 0; i < CELLS && how % 3 == 0; i++) {
                put(user, r.cell[i], PAGE, 5);
                OK(galloc_free(r.cell[i], user));
            }
            for (int i = 0; i < PIECES && how % 3; i++) {
                put(user, r.piece[i], PAGE, 5);
                OK(galloc_free(r.piece[i], user));
                r.piece[i] = NULL;
            }
            if (galloc_resize(r.p, MOST, r.s) == cudaSuccess) EXPECT_EQ(info_of(r.p).requested, MOST);
            else EXPECT(how == 3 && !(reuse & WAIT));
            OK(galloc_free(r.p, r.u));
            void *q = get_used(r.pool, MOST, r.u, 8);
            OK(galloc_free(q, r.u));
            r.p = get(r.pool, PAGE, r.s);
            row_close(&r);
        }
    }
}

/* What is cut off may still be in use: by the stream that is named, and by those that were recorded. Also where the
   block keeps it and grows again, for another stream. */
TEST(what_is_cut_off_is_marked)
{
    for (int reuse = 0; reuse <= ALL; reuse++) {
        for (int how = 0; how < 8; how++) { /* with room, recorded, to be had again by the same stream or another */
            begin_still();
            row r;
            galloc_config config = frugal(how & 4 ? GIB(1) : SIZE_MAX, reuse);
            row_open(&r, &config, how & 1);
            cells_to_holes(&r);
            OK(galloc_resize(r.p, MOST, r.s));
            put(r.s, r.p, MOST, 3);
            if (how & 2) {
                order(r.s, r.u);
                OK(galloc_record_stream(r.p, r.u));
                look(r.u, r.p + 2 * PAGE, CELLS * PAGE, 3);
            }
            note(&r);
            OK(galloc_resize(r.p, 2 * PAGE, r.s));
            cudaStream_t taker = how & 2 ? r.s : r.t;
            cudaError_t err = galloc_resize(r.p, MOST, taker);
            if (how & 1) OK(err);
            if (err == cudaSuccess) put(taker, r.p + 2 * PAGE, CELLS * PAGE, 4);
            else EXPECT(err == cudaErrorNotSupported);
            if (reuse & WAIT) EXPECT_EQ(blocked(&r), 0);
            order(taker, r.s);
            order(r.u, r.s);
            put(r.s, r.p, 2 * PAGE, 1);
            row_close(&r);
        }
    }
}

/* S cut off what it had used, grew again by a part of that, and cut off more. T frees the rest. U is given the end, but
   not before S's work there. */
TEST(a_second_cut_keeps_what_lies_beyond_it)
{
    begin_still();
    galloc_pool *pool = pool_limited(MIB(2));
    cudaStream_t s = stream_new(), t = stream_new(), u = stream_new();
    galloc_request request = {0};
    void *q = NULL;
    char *p = get_growable(pool, MIB(2), MIB(2), s);
    put(s, p + KIB(1792), KIB(256), 1);
    OK(galloc_resize(p, KIB(1536), s));
    OK(galloc_resize(p, KIB(1792), s));
    OK(galloc_resize(p, KIB(1024), s));
    OK(galloc_free(p, t));
    request.bytes = KIB(256);
    request.lifetime = GALLOC_LIFETIME_LONG; /* at the end */
    request.stream = u;
    request.pool = pool;
    OK(galloc_alloc(&q, &request));
    EXPECT(q == p + KIB(1792));
    put(u, q, KIB(256), 2);
    EXPECT_EQ(sim_findings(SIM_RACE), 0);
    OK(galloc_free(q, u));
    sim_run(-1);
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    stream_end(u);
    finish();
}

/* A block is never cut within a unit of 512 bytes, and with strategy:pooled within a slot. So after T has cut off what
   T's work still uses, and S has freed the rest, the block is as long as before. S does not get all of it yet. */
TEST(what_another_stream_cut_off_within_a_unit_is_not_the_owners)
{
    for (int pooled = 0; pooled < 2; pooled++) {
        begin_still();
        size_t bytes = pooled ? KIB(256) : 1000, rest = 520;
        galloc_config config = galloc_config_default();
        if (pooled) config.strategy = GALLOC_STRATEGY_POOLED;
        galloc_pool *pool = pool_new(&config);
        cudaStream_t s = stream_new(), t = stream_new();
        char *p = get(pool, bytes, s);
        order(s, t);
        put(t, p + rest, bytes - rest, 1);
        OK(galloc_resize(p, rest, t));
        put(s, p, rest, 2);
        OK(galloc_free(p, s));
        p = get_used(pool, bytes, s, 3);
        EXPECT_EQ(sim_findings(SIM_RACE), 0);
        OK(galloc_free(p, s));
        sim_run(-1);
        pool_end(pool);
        stream_end(s);
        stream_end(t);
        finish();
    }
}

/* A block of S's went to T's cache unused, T used it, and has it again. S, which may shrink it since then, knows
   nothing of what T did. So what S cuts off is not S's before T's work is done. */
TEST(a_block_that_went_to_another_cache_is_that_streams)
{
    begin_still();
    galloc_pool *pool = pool_new(NULL);
    cudaStream_t s = stream_new(), t = stream_new();
    void *own = get(pool, KIB(8), t), *p = get(pool, KIB(64), s);
    OK(galloc_free(p, t));
    EXPECT(get(pool, KIB(64), t) == p);
    put(t, p, KIB(64), 1);
    OK(galloc_free(p, t));
    EXPECT(get(pool, KIB(64), t) == p);
    OK(galloc_resize(p, KIB(4), s)); /* not used since: any stream may shrink it */
    void *q = get_used(pool, KIB(60), s, 2);
    EXPECT_EQ(sim_findings(SIM_RACE), 0);
    order(t, s);
    OK(galloc_free(p, s));
    OK(galloc_free(q, s));
    OK(galloc_free(own, t));
    sim_run(-1);
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* A room that is partly memory, which S still uses, and partly addresses: T gets both, in order, and the host waits for
   neither. */
TEST(a_room_is_had_in_order_and_to_the_end)
{
    for (int reuse = WAIT; reuse <= ALL; reuse++) {
        begin_still();
        row r;
        galloc_config config = frugal(SIZE_MAX, reuse);
        row_open(&r, &config, 1);
        void *idle = get_growable(r.pool, 8 * PAGE, 8 * PAGE, r.s); /* held and not live: no page comes for nothing */
        OK(galloc_resize(idle, 1, r.s));
        OK(galloc_resize(r.p, 4 * PAGE, r.s));
        put(r.s, r.p, 4 * PAGE, 3);
        OK(galloc_resize(r.p, PAGE, r.s));
        inside_set_live_peak(r.pool, 0);
        note(&r);
        OK(galloc_resize(r.p, MOST, r.t));
        put(r.t, r.p + PAGE, MOST - PAGE, 4);
        EXPECT(waited(&r) > 0);
        EXPECT(created(&r) > 0);
        EXPECT_EQ(blocked(&r), 0);
        expect_healthy(r.pool, 1);
        order(r.t, r.s);
        OK(galloc_free(idle, r.s));
        row_close(&r);
    }
}

/* The same stream has its own back at once. One event for each shrink, since the next stream may be another one; they
   are asked for now and then, so there are no more than a few. */
TEST(a_block_with_room_shrinks_and_grows_with_no_memory_call)
{
    begin_still();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    char *p = get_growable(pool, MIB(1), MIB(32), s);
    OK(galloc_resize(p, MIB(32), s));
    long calls = memory_calls();
    for (size_t i = 1; i < 1000; i++) {
        OK(galloc_resize(p, MIB(32) - KIB(30) * i, s));
        put(s, p, MIB(32) - KIB(30) * i, i);
        OK(galloc_resize(p, MIB(32), s));
        put(s, p, MIB(32), i);
        if (i % 50 == 0) sim_run(-1);
    }
    EXPECT_EQ(memory_calls(), calls);
    EXPECT(sim_calls("cuEventRecord") <= 999);
    EXPECT(sim_calls("cuEventCreate") <= 256);
    EXPECT_EQ(sim_calls("cuStreamWaitEvent"), 0);
    EXPECT_EQ(sim_blocking_calls(), 0);
    expect_healthy(pool, 1);
    OK(galloc_free(p, s));
    pool_end(pool);
    finish();
}

/* A stream that the pool has never seen grows a block of S's within its memory: after S has shrunk it, or has had it
   longer than it asked for from pages that S used before, or has set or checked a guard behind it. That is a wait of
   the stream and none of the host, whatever else forbids those. S may be the per-thread stream. */
TEST(a_block_with_room_grows_on_a_new_stream_without_the_host)
{
    static const char *const settings[] = {"", "wait_limit_ms:0", "throw_on_cudamalloc_oom:True"};
    for (int i = 0; i < 3; i++) {
        for (int k = 0; k < 28; k++) { /* shrunk; grown, given over used pages; guards: new, shrunk, not grown, gone */
            int how = k % 7, several = k / 7 % 2, per_thread = k / 14;
            begin_still();
            galloc_config config = frugal(GIB(1), ALL);
            if (how == 2) config.expandable_segments = 0;
            config.debug = how > 2 ? GALLOC_DEBUG_GUARDS : 0;
            OK(galloc_config_parse(&config, settings[i], NULL, 0));
            galloc_pool *pool = pool_new(&config);
            cudaStream_t s = per_thread ? cudaStreamPerThread : stream_new(), t = stream_new(), other = stream_new();
            if (several) OK(galloc_free(get(pool, 512, other), other));
            if (how == 2) OK(galloc_free(get_used(pool, 4 * PAGE, s, 1), s));
            char *p = get_growable(pool, how == 2 ? PAGE + KIB(8) : PAGE, how == 1 ? PAGE : 8 * PAGE, s);
            if (how == 1) OK(galloc_free(get_used(pool, PAGE, s, 1), s)); /* is behind it */
            put(s, p, PAGE, 2);
            if (how == 6) OK(galloc_record_stream(p, other)); /* so there is no next guard */
            if (how == 0 || how == 4) OK(galloc_resize(p, KIB(8), s));
            if (how == 1 || how == 6) OK(galloc_resize(p, PAGE + 1000, s));
            if (how == 5) EXPECT_EQ(galloc_resize(p, GIB(800), s), cudaErrorNotSupported);
            order(s, t);
            size_t bytes = how == 0 ? KIB(64) : how == 1 ? PAGE + KIB(1) : PAGE + KIB(64);
            long blocking = sim_blocking_calls();
            EXPECT(per_thread || !blocking); /* a default stream waits for its own guards */
            EXPECT(OK(galloc_resize(p, bytes, t)));
            EXPECT_EQ(sim_blocking_calls(), blocking);
            put(t, p, bytes, 3);
            expect_healthy(pool, 1);
            OK(galloc_free(p, t));
            sim_run(-1);
            pool_end(pool);
            if (!per_thread) stream_end(s);
            stream_end(t);
            stream_end(other);
            finish();
        }
    }
}

/* So may it be the legacy stream, while the pool knows no other one that its events would make wait. */
TEST(a_block_with_room_of_a_lone_legacy_stream_grows_on_a_new_one_without_the_host)
{
    for (int limited = 0; limited < 2; limited++) {
        begin_still();
        galloc_config config = frugal(GIB(1), ALL);
        if (limited) config.wait_limit_ms = 0;
        galloc_pool *pool = pool_new(&config);
        cudaStream_t t = stream_new();
        char *p = get_growable(pool, PAGE, 8 * PAGE, cudaStreamLegacy);
        put(cudaStreamLegacy, p, PAGE, 1);
        OK(galloc_resize(p, KIB(8), cudaStreamLegacy));
        order(cudaStreamLegacy, t);
        OK(galloc_resize(p, KIB(64), t));
        EXPECT_EQ(sim_blocking_calls(), 0);
        put(t, p, KIB(64), 2);
        expect_healthy(pool, 1);
        OK(galloc_free(p, t));
        sim_run(-1);
        pool_end(pool);
        stream_end(t);
        finish();
    }
}

/* Where no wait is allowed, such a growth is refused, but not as if memory had run out: on_oom is not called, and there
   is no report. */
TEST(a_growth_that_nobody_may_wait_for_lacks_no_memory)
{
    static const char *const settings[] = {"wait_limit_ms:0", "wait_limit_ms:1", "throw_on_cudamalloc_oom:True"};
    for (int i = 0; i < 3; i++) {
        begin_still();
        row r;
        galloc_config config = frugal(GIB(1), COMPLETED);
        OK(galloc_config_parse(&config, settings[i], NULL, 0));
        row_open(&r, &config, 1);
        OK(galloc_resize(r.p, KIB(8), r.s));
        order(r.s, r.t);
        note(&r);
        galloc_pointer info = info_of(r.p);
        EXPECT_EQ(galloc_resize(r.p, PAGE, r.t), cudaErrorNotSupported);
        EXPECT(strstr(galloc_last_message(), "no wait for that is allowed") != NULL);
        galloc_report report;
        EXPECT_EQ(galloc_oom_report(&report), cudaErrorNotReady);
        EXPECT_EQ(blocked(&r), 0);
        expect_as_it_was(&r, info);
        sim_run(-1);
        OK(galloc_resize(r.p, PAGE, r.t));
        put(r.t, r.p, PAGE, 3);
        EXPECT_EQ(blocked(&r), 0);
        order(r.t, r.s);
        row_close(&r);
    }
}

/* A block without room that another stream may still use within its last unit is refused. It can be copied: the host
   waits for no place. */
TEST(a_plain_block_grows_on_a_new_stream_or_not_at_once)
{
    for (int reuse = 0; reuse <= ALL; reuse++) {
        begin_still();
        galloc_config config = frugal(GIB(1), reuse);
        galloc_pool *pool = pool_new(&config);
        cudaStream_t s = stream_new(), t = stream_new();
        char *p = get_used(pool, KIB(1), s, 1);
        OK(galloc_free(p, s));
        EXPECT(get_used(pool, 1000, s, 2) == p);
        order(s, t);
        EXPECT_EQ(galloc_resize(p, KIB(1), t), cudaErrorNotSupported);
        EXPECT_EQ(sim_blocking_calls(), 0);
        OK(galloc_resize(p, KIB(1), s));
        OK(galloc_free(p, s));
        pool_end(pool);
        stream_end(s);
        stream_end(t);
        finish();
    }
}

/* Once an event is recorded behind the resize that cut bytes off, the block grows over them on another stream, which is
   made to wait. */
TEST(a_plain_block_grows_within_its_unit_behind_an_event)
{
    begin_still();
    galloc_pool *pool = pool_expandable(1);
    cudaStream_t s = stream_new(), t = stream_new();
    void *other = get(pool, 512, t), *p = get_used(pool, 1020, s, 1);
    OK(galloc_resize(p, 600, s));
    cudaError_t error = galloc_resize(p, 1020, t);
    if (error) EXPECT_EQ(error, cudaErrorNotSupported);
    for (int i = 0; i < 2; i++) OK(galloc_free(get(pool, 512, s), s));
    if (error) OK(galloc_resize(p, 1020, t));
    put(t, p, 1020, 2);
    EXPECT_EQ(sim_blocking_calls(), 0);
    sim_run(-1);
    OK(galloc_free(p, t));
    OK(galloc_free(other, t));
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* Freed memory behind the block, whose work may not be done, refuses the growth. The next call of its stream records
   the event that says when the work is done. From then on the legacy stream records events like any other stream. */
TEST(a_growth_that_is_refused_asks_for_the_event_that_lets_it_succeed)
{
    for (int legacy = 0; legacy < 2; legacy++) {
        begin_still();
        galloc_config config = frugal(GIB(1), COMPLETED);
        config.lane_bytes = 0;
        config.stats_exact = 1; /* what is freed is in no stream cache */
        galloc_pool *pool = pool_new(&config);
        cudaStream_t s = legacy ? cudaStreamLegacy : stream_new(), t = stream_new();
        void *known = get(pool, KIB(64), t), *p = get(pool, KIB(512), s), *q = get_used(pool, KIB(512), s, 1);
        void *wall = get(pool, KIB(64), s), *last = get(pool, KIB(4), s);
        OK(galloc_free(q, s));
        EXPECT_EQ(galloc_resize(p, KIB(768), t), cudaErrorNotSupported);
        OK(galloc_free(last, s));
        sim_run(-1);
        OK(galloc_resize(p, KIB(768), t));
        long records = sim_calls("cuEventRecord");
        OK(galloc_free(get_used(pool, MIB(4), s, 2), s));
        EXPECT(sim_calls("cuEventRecord") > records);
        OK(galloc_free(p, t));
        OK(galloc_free(wall, s));
        OK(galloc_free(known, t));
        pool_end(pool);
        finish();
    }
}

/* An event on the legacy stream would have all blocking streams wait for each other: so the host waits. */
TEST(a_block_that_shrinks_on_legacy_asks_for_no_event)
{
    for (int guards = 0; guards < 2; guards++) {
        begin_still();
        galloc_config config = galloc_config_default();
        config.debug = guards ? GALLOC_DEBUG_GUARDS : 0;
        galloc_pool *pool = pool_new(&config);
        cudaStream_t s = stream_new();
        void *own = get(pool, PAGE, s);
        long records = sim_calls("cuEventRecord");
        void *p = get_growable(pool, PAGE, 4 * PAGE, cudaStreamLegacy);
        put(cudaStreamLegacy, p, PAGE, 1);
        if (!guards) OK(galloc_resize(p, PAGE - KIB(8), cudaStreamLegacy));
        EXPECT_EQ(sim_calls("cuEventRecord"), records);
        OK(galloc_resize(p, PAGE + KIB(8) * guards, s));
        EXPECT_EQ(sim_blocking_calls(), 1);
        OK(galloc_free(p, s));
        OK(galloc_free(own, s));
        sim_run(-1);
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

/* ---- rooms where others were ------------------------------------------------------------------------------------- */

enum { SEQUENCES = 16 };

/* Sequences that grow in turn, page by page, to a length of their own, end, and begin again. */
typedef struct decoder {
    galloc_pool *pool;
    cudaStream_t s;
    dice d;
    size_t least, most, step;
    char *at[SEQUENCES];
    size_t bytes[SEQUENCES], end[SEQUENCES];
} decoder;

static void decoder_open(decoder *e, const galloc_config *config, size_t least, size_t most)
{
    memset(e, 0, sizeof *e);
    e->pool = pool_new(config);
    e->s = stream_new();
    e->d.state = 5;
    e->least = least;
    e->most = most;
    e->step = PAGE;
}

static void decoder_step(decoder *e, int i)
{
    if (e->at[i] && e->bytes[i] >= e->end[i]) {
        OK(galloc_free(e->at[i], e->s));
        e->at[i] = NULL;
    }
    if (!e->at[i]) {
        e->end[i] = e->least + e->step * roll_below(&e->d, (uint32_t)((e->most - e->least) / e->step) + 1);
        e->bytes[i] = e->step;
        e->at[i] = get_growable(e->pool, e->step, e->most, e->s);
    } else {
        e->bytes[i] += e->step;
        OK(galloc_resize(e->at[i], e->bytes[i], e->s));
    }
    put(e->s, e->at[i], e->bytes[i], (uint64_t)i);
}

static void decoder_run(decoder *e, int steps)
{
    for (int i = 0; i < steps; i++) decoder_step(e, i % SEQUENCES);
}

static void decoder_close(decoder *e)
{
    expect_healthy(e->pool, 1);
    for (int i = 0; i < SEQUENCES; i++)
        if (e->at[i]) OK(galloc_free(e->at[i], e->s));
    expect_healthy(e->pool, 1);
    pool_end(e->pool);
    stream_end(e->s);
    finish();
}

TEST(sequences_of_one_length_soon_grow_with_no_driver_call)
{
    static const size_t steps[] = {KIB(256), PAGE, 3 * PAGE};
    for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++) {
        begin();
        decoder e;
        decoder_open(&e, NULL, MIB(96), MIB(96));
        e.step = steps[i];
        int round = SEQUENCES * (int)(MIB(96) / e.step);
        decoder_run(&e, 3 * round);
        long before = memory_calls();
        decoder_run(&e, 3 * round);
        EXPECT_EQ(memory_calls(), before);
        decoder_close(&e);
    }
}

/* Each growth is by a page; without old mappings in rooms each of them maps one. */
TEST(sequences_of_any_length_map_a_page_in_one_of_three_steps)
{
    for (int limited = 0; limited < 2; limited++) {
        begin();
        decoder e;
        galloc_config config = config_limit(limited ? SEQUENCES * MIB(128) : SIZE_MAX);
        decoder_open(&e, &config, MIB(8), MIB(128));
        decoder_run(&e, 8000);
        long before = sim_calls("cuMemMap");
        decoder_run(&e, 8000);
        EXPECT(sim_calls("cuMemMap") - before < 8000 / 3);
        galloc_stats stats = stats_of(e.pool);
        EXPECT((double)stats.reserved.peak <= 1.03 * (double)stats.live.peak);
        decoder_close(&e);
    }
}

/* A freed block of `pages` with room, all of whose work is known to be done. */
static char *room_leave(galloc_pool *pool, cudaStream_t s, size_t pages, size_t room)
{
    char *p = get_growable(pool, pages * PAGE, room * PAGE, s);
    put(s, p, pages * PAGE, 1);
    OK(galloc_free(p, s));
    sim_run(-1);
    return p;
}

/* The pages that it needs last are lent first; its place is nobody's. */
TEST(a_room_lends_its_pages_and_grows_all_the_same)
{
    for (int pages = 1; pages < 16; pages++) {
        begin_still();
        galloc_config config = frugal(SIZE_MAX, ALL);
        galloc_pool *pool = pool_new(&config);
        cudaStream_t s = stream_new();
        char *p = room_leave(pool, s, 16, 16), *q = get_growable(pool, PAGE, 16 * PAGE, s);
        EXPECT(q == p);
        long made = sim_calls("cuMemCreate");
        char *other = get_used(pool, (size_t)pages * PAGE, s, 2);
        EXPECT_EQ(sim_calls("cuMemCreate"), made);
        EXPECT(other >= p + 16 * PAGE || other + pages * PAGE <= p);
        long calls = memory_calls();
        OK(galloc_resize(q, (size_t)(16 - pages) * PAGE, s));
        EXPECT_EQ(memory_calls(), calls);
        sim_run(-1);
        OK(galloc_resize(q, 16 * PAGE, s));
        EXPECT_EQ(sim_calls("cuMemCreate"), made + pages);
        put(s, q, 16 * PAGE, 3);
        look(s, other, (size_t)pages * PAGE, 2);
        expect_healthy(pool, 1);
        OK(galloc_free(other, s));
        OK(galloc_free(q, s));
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

TEST(the_place_with_most_pages_is_taken_for_a_room)
{
    for (int way = 0; way < 4; way++) { /* it may lie first or second, and be freed first or second */
        begin_still();
        galloc_pool *pool = pool_new(NULL);
        cudaStream_t s = stream_new();
        void *place[2];
        int many = way & 1, first = way >> 1;
        for (int i = 0; i < 2; i++) place[i] = get_growable(pool, i == many ? 8 * PAGE : PAGE, 8 * PAGE, s);
        void *other = get(pool, PAGE, s);
        OK(galloc_free(place[first], s));
        OK(galloc_free(place[!first], s));
        sim_run(-1);
        long calls = memory_calls();
        void *q = get_growable(pool, PAGE, 8 * PAGE, s);
        EXPECT(q == place[many]);
        OK(galloc_resize(q, 8 * PAGE, s));
        EXPECT_EQ(memory_calls(), calls);
        expect_healthy(pool, 1);
        OK(galloc_free(q, s));
        OK(galloc_free(other, s));
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

/* The pages of a block with room that was freed are kept at its place, but not from a block that grows over it. */
TEST(a_block_grows_over_the_place_of_a_room)
{
    for (int room = 0; room < 2; room++) {
        begin_still();
        galloc_config config = frugal(SIZE_MAX, ALL);
        galloc_pool *pool = pool_new(&config);
        cudaStream_t s = stream_new();
        char *p = room ? get_growable(pool, 4 * PAGE, 4 * PAGE, s) : get(pool, 4 * PAGE, s);
        char *q = room_leave(pool, s, 4, 4);
        EXPECT(q == p + 4 * PAGE);
        long calls = memory_calls();
        OK(galloc_resize(p, 7 * PAGE, s));
        EXPECT_EQ(memory_calls(), calls);
        put(s, p, 7 * PAGE, 3);
        expect_healthy(pool, 1);
        OK(galloc_free(p, s));
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

/* A page that is larger than the room is not moved into it, not even when nothing else is left. */
TEST(a_room_takes_in_no_page_larger_than_itself)
{
    begin_still();
    galloc_config config = config_limit(MIB(64));
    config.growth = MIB(64);
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new();
    void *big = get(pool, MIB(64), s);
    OK(galloc_free(big, s));
    void *p = get_growable(pool, PAGE, 4 * PAGE, s);
    EXPECT(info_of(p).usable <= 4 * PAGE);
    EXPECT_EQ(info_of(p).room, 4 * PAGE);
    OK(galloc_resize(p, 4 * PAGE, s));
    put(s, p, 4 * PAGE, 1);
    expect_healthy(pool, 1);
    OK(galloc_free(p, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* Nor does it give way to smaller ones with throw_on_cudamalloc_oom: these might be refused, and the memory be gone. */
TEST(a_request_that_fails_at_once_replaces_no_page)
{
    begin_still();
    galloc_config config = config_limit(MIB(32));
    config.growth = MIB(16);
    config.throw_on_cudamalloc_oom = 1;
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_request request = {.bytes = PAGE, .max_bytes = 4 * PAGE, .stream = s, .pool = pool};
    void *p = NULL, *of_t = get(pool, 512, t);
    OK(galloc_free(get_used(pool, MIB(16), s, 1), s));
    sim_run(-1);
    EXPECT_EQ(galloc_alloc(&p, &request), cudaErrorMemoryAllocation);
    EXPECT_EQ(stats_of(pool).reserved.current, MIB(32));
    expect_healthy(pool, 1);
    OK(galloc_free(of_t, t));
    pool_end(pool);
    stream_end(s), stream_end(t);
    finish();
}

/* A place whose pages lie free elsewhere gets them back with no driver call. */
TEST(pages_return_to_the_place_of_a_room)
{
    begin_still();
    galloc_config config = frugal(SIZE_MAX, ALL);
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new();
    void *live = get(pool, PAGE, s);
    char *p = room_leave(pool, s, 4, 4), *q = get_growable(pool, PAGE, 4 * PAGE, s);
    char *other = get_used(pool, 3 * PAGE, s, 2);
    EXPECT(q == p && (other >= p + 4 * PAGE || other + 3 * PAGE <= p));
    OK(galloc_free(q, s));
    OK(galloc_free(other, s));
    sim_run(-1);
    long calls = memory_calls();
    q = get_growable(pool, 4 * PAGE, 4 * PAGE, s);
    EXPECT(q == p);
    EXPECT_EQ(memory_calls(), calls);
    put(s, q, 4 * PAGE, 3);
    expect_healthy(pool, 1);
    OK(galloc_free(q, s));
    OK(galloc_free(live, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* Pages that lie free right behind the room do not come back into it: they are part of the answer there. */
TEST(a_block_grows_beyond_its_room_over_its_own_old_pages)
{
    begin_still();
    galloc_config config = frugal(SIZE_MAX, ALL);
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new();
    char *p = room_leave(pool, s, 4, 4), *q = get_growable(pool, PAGE, 4 * PAGE, s);
    EXPECT(q == p);
    char *other = get_used(pool, 3 * PAGE, s, 2);
    EXPECT(other == p + 4 * PAGE);
    OK(galloc_free(other, s));
    sim_run(-1);
    OK(galloc_resize(q, 7 * PAGE, s));
    put(s, q, 7 * PAGE, 3);
    expect_healthy(pool, 1);
    look(s, q, 7 * PAGE, 3);
    OK(galloc_free(q, s));
    expect_healthy(pool, 1);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* A room is to be had on every stream with no wait, so that it takes in nothing that other work may still touch. */
TEST(what_still_runs_is_in_no_room)
{
    for (int lent = 0; lent < 2; lent++) {
        begin_still();
        galloc_config config = frugal(SIZE_MAX, lent ? ALL : COMPLETED);
        galloc_pool *pool = pool_new(&config);
        cudaStream_t s = stream_new(), t = stream_new();
        char *p = get_growable(pool, 8 * PAGE, 8 * PAGE, s), *other = NULL;
        put(s, p, 8 * PAGE, 1);
        OK(galloc_free(p, s));
        if (lent) other = get_used(pool, 4 * PAGE, s, 2);
        char *q = get_growable(pool, PAGE, 8 * PAGE, s);
        long blocking = sim_blocking_calls(), waits = sim_calls("cuStreamWaitEvent");
        OK(galloc_resize(q, 8 * PAGE, t));
        EXPECT_EQ(sim_blocking_calls(), blocking);
        EXPECT_EQ(sim_calls("cuStreamWaitEvent"), waits);
        put(t, q + PAGE, 7 * PAGE, 3);
        expect_healthy(pool, 1);
        if (other) OK(galloc_free(other, s));
        OK(galloc_free(q, t));
        pool_end(pool);
        stream_end(s);
        stream_end(t);
        finish();
    }
}

/* Who asks for a little at a time does not get a large page for it. */
TEST(a_room_takes_in_no_page_larger_than_the_step)
{
    begin_still();
    galloc_config config = config_limit(SIZE_MAX);
    config.growth = MIB(16);
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new();
    void *p = get_growable(pool, PAGE, 32 * PAGE, s);
    OK(galloc_resize(p, 9 * PAGE, s)); /* by one page of 16 MiB */
    OK(galloc_free(p, s));
    sim_run(-1);
    void *q = get_growable(pool, PAGE, 32 * PAGE, s);
    OK(galloc_resize(q, 2 * PAGE, s));
    EXPECT(stats_of(pool).allocated.current < 9 * PAGE);
    EXPECT(stats_of(pool).reserved.current <= 9 * PAGE);
    expect_healthy(pool, 1);
    OK(galloc_free(q, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* The peak of live bytes, plus the overhead and a page. */
static size_t most_held(galloc_pool *pool, double overhead)
{
    return (size_t)((1 + overhead) * (double)stats_of(pool).live.peak) + PAGE;
}

enum { HEADS = 8, HEAD = 4 * PAGE };

/* Makes, by one of several ways, free memory in pages larger than a step of growth. */
static void large_pages_leave(galloc_pool *pool, int how, cudaStream_t s, cudaStream_t t)
{
    void *p[HEADS];
    for (int i = 0; i < HEADS; i++) {
        if (how == 0) p[i] = get_growable(pool, HEAD, HEAD, s);
        if (how == 1) p[i] = get_growable(pool, KIB(64), HEAD, s);
        if (how == 1) OK(galloc_resize(p[i], HEAD, s));
        if (how == 2) p[i] = get(pool, HEAD, s);
        if (how == 3) p[i] = get_growable(pool, HEAD, HEAD, i & 1 ? t : s);
        put(s, p[i], HEAD, 1);
    }
    sim_run(-1);
    for (int i = 0; i < HEADS; i++) OK(galloc_free(p[i], how == 3 && i & 1 ? t : s));
    sim_run(-1);
}

/* Blocks that grow by little take in no large page: smaller ones replace those that are free, so no more memory is held
   than before. The next such blocks find them in place. */
TEST(growth_by_little_replaces_large_pages)
{
    static const double overheads[] = {0.02, 0.1};
    for (int round = 0; round < 8; round++) {
        sim_options options = sim_defaults();
        options.pace = SIM_PACE_PROMPT;
        begin_with(options);
        galloc_config config = galloc_config_default();
        config.overhead = overheads[round & 1];
        galloc_pool *pool = pool_new(&config);
        cudaStream_t s = stream_new(), t = stream_new();
        char *p[HEADS];
        large_pages_leave(pool, round / 2, s, t);
        long calls = 0;
        for (int pass = 0; pass < 3; pass++) {
            if (pass == 2) calls = memory_calls();
            for (int i = 0; i < HEADS; i++) p[i] = get_growable(pool, KIB(64), HEAD, s);
            for (size_t bytes = KIB(512); bytes <= HEAD; bytes += KIB(512)) {
                for (int i = 0; i < HEADS; i++) {
                    OK(galloc_resize(p[i], bytes, s));
                    EXPECT(info_of(p[i]).usable < bytes + PAGE);
                    EXPECT(stats_of(pool).reserved.current <= most_held(pool, config.overhead));
                }
            }
            for (int i = 0; i < HEADS; i++) put(s, p[i], HEAD, 2);
            expect_healthy(pool, 1);
            for (int i = 0; i < HEADS; i++) OK(galloc_free(p[i], s));
            sim_run(-1);
        }
        EXPECT_EQ(memory_calls(), calls);
        EXPECT_EQ(sim_blocking_calls(), 0);
        pool_end(pool);
        stream_end(s);
        stream_end(t);
        finish();
    }
}

/* A page that the growing block is about to take is not given back for smaller ones in its room: that would
   have no end. */
TEST(a_growth_keeps_the_pages_behind_its_room)
{
    begin_still();
    galloc_config config = frugal(SIZE_MAX, COMPLETED);
    config.growth = 2 * PAGE;
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new(), t = stream_new();
    char *p = get_growable(pool, PAGE, 2 * PAGE, s), *behind = get(pool, 2 * PAGE, s);
    void *unfinished = get(pool, PAGE, t), *live = get(pool, PAGE, t);
    EXPECT(behind == p + 2 * PAGE);
    OK(galloc_free(behind, s));
    sim_run(-1);
    put(t, unfinished, PAGE, 1);
    OK(galloc_free(unfinished, t));
    OK(galloc_resize(p, 4 * PAGE, s));
    put(s, p, 4 * PAGE, 2);
    look(s, p, 4 * PAGE, 2);
    expect_healthy(pool, 1);
    OK(galloc_free(p, s));
    OK(galloc_free(live, t));
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

static int free_the_victim(const galloc_report *report, void *victim)
{
    (void)report;
    OK(galloc_free(victim, 0));
    return 1;
}

/* Another thread frees the block by its stream's cache, which takes no lock of the pool, while host memory is made for
   the block to grow. */
static struct {
    galloc_pool *pool;
    cudaStream_t stream;
    void *block;
    int warm, now, done, over;
} freed_in_growth;

static void *free_in_growth(void *arg)
{
    cudaStream_t s = freed_in_growth.stream;
    (void)arg;
    OK(cudaSetDevice(0));
    OK(galloc_free(get(freed_in_growth.pool, 512, s), s));
    __atomic_store_n(&freed_in_growth.warm, 1, __ATOMIC_RELEASE);
    while (!__atomic_load_n(&freed_in_growth.now, __ATOMIC_ACQUIRE)) usleep(100);
    if (!freed_in_growth.over) OK(galloc_free(freed_in_growth.block, s));
    __atomic_store_n(&freed_in_growth.done, 1, __ATOMIC_RELEASE);
    return NULL;
}

static void when_host_memory_is_made(size_t bytes)
{
    (void)bytes;
    if (freed_in_growth.now) return;
    __atomic_store_n(&freed_in_growth.now, 1, __ATOMIC_RELEASE);
    while (!__atomic_load_n(&freed_in_growth.done, __ATOMIC_ACQUIRE)) usleep(100);
}

TEST(a_block_that_another_thread_frees_while_it_grows_does_not_grow)
{
    pthread_t thread;
    begin();
    memset(&freed_in_growth, 0, sizeof freed_in_growth);
    cudaStream_t s = freed_in_growth.stream = stream_new();
    galloc_pool *pool = freed_in_growth.pool = pool_new(NULL);
    OK(galloc_pool_reserve(pool, MIB(2)));
    void *p = freed_in_growth.block = get(pool, 4096, s), *wall = get(pool, 512, s);
    OK(galloc_free(get(pool, 1024, s), s));
    EXPECT_EQ(pthread_create(&thread, NULL, free_in_growth, NULL), 0);
    while (!__atomic_load_n(&freed_in_growth.warm, __ATOMIC_ACQUIRE)) usleep(100);
    OK(galloc_free(wall, s));
    OK(galloc_resize(p, 4608, s)); /* what is cached makes way */
    inside_drain_blocks(pool);
    inside_on_malloc = when_host_memory_is_made;
    EXPECT_EQ(galloc_resize(p, 8192, s), cudaErrorInvalidDevicePointer);
    inside_on_malloc = NULL;
    freed_in_growth.over = !EXPECT(freed_in_growth.now);
    __atomic_store_n(&freed_in_growth.now, 1, __ATOMIC_RELEASE);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
    EXPECT_EQ(galloc_pool_check(pool), 0);
    EXPECT(get(pool, 4608, s) == p);
    OK(galloc_free(p, s));
    pool_end(pool);
    finish();
}

/* A cache must not evict the block that grows. If it does, the error says that the block is gone: its contents are not
   to be copied. */
TEST(a_block_freed_while_it_grows_is_no_block)
{
    begin();
    galloc_config config = config_limit(MIB(16));
    galloc_pool *pool = pool_new(&config);
    void *victim = get_growable(pool, MIB(2), MIB(32), 0), *other = get(pool, MIB(12), 0);
    galloc_callbacks callbacks = {0};
    callbacks.on_oom = free_the_victim;
    callbacks.user = victim;
    OK(galloc_pool_set_callbacks(pool, &callbacks));
    EXPECT_EQ(galloc_resize(victim, MIB(8), 0), cudaErrorInvalidDevicePointer);
    expect_healthy(pool, 1);
    EXPECT_EQ(stats_of(pool).live.current, MIB(12));
    OK(galloc_free(other, 0));
    pool_end(pool);
    finish();
}

static int free_on_its_stream(const galloc_report *report, void *user)
{
    (void)report;
    OK(galloc_free(freed_in_growth.block, freed_in_growth.stream));
    return user != NULL;
}

/* The same where the freed block stays in its stream's cache, as it was. */
TEST(a_block_cached_while_it_grows_is_no_block)
{
    begin();
    galloc_config config = config_limit(MIB(16));
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = freed_in_growth.stream = stream_new();
    void *other = get(pool, MIB(12), s), *victim = freed_in_growth.block = get(pool, MIB(4), s);
    galloc_callbacks callbacks = {0};
    callbacks.on_oom = free_on_its_stream;
    callbacks.user = pool;
    OK(galloc_pool_set_callbacks(pool, &callbacks));
    EXPECT_EQ(galloc_resize(victim, MIB(8), s), cudaErrorInvalidDevicePointer);
    EXPECT(strstr(galloc_last_message(), "was freed while it grew") != NULL);
    expect_healthy(pool, 1);
    EXPECT_EQ(stats_of(pool).live.current, MIB(12));
    OK(galloc_free(other, s));
    pool_end(pool);
    finish();
}

/* The memory that on_oom frees on the growth's own stream serves the next attempt, though the host may wait for
   nothing. */
TEST(a_growth_gets_what_on_oom_frees_on_its_stream)
{
    begin();
    galloc_config config = config_limit(MIB(8));
    config.lane_bytes = MIB(4);
    config.wait_limit_ms = 0;
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = freed_in_growth.stream = stream_new();
    void *grows = get_growable(pool, MIB(2), MIB(16), s);
    freed_in_growth.block = get(pool, MIB(2), s);
    void *other = get(pool, MIB(4), s);
    galloc_callbacks callbacks = {0};
    callbacks.on_oom = free_on_its_stream;
    callbacks.user = pool;
    OK(galloc_pool_set_callbacks(pool, &callbacks));
    OK(galloc_resize(grows, MIB(4), s));
    expect_healthy(pool, 1);
    EXPECT_EQ(stats_of(pool).live.current, MIB(8));
    OK(galloc_free(grows, s));
    OK(galloc_free(other, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* S may still write a block that t has waited for, and gets only its last bytes to cut off. What s wrote before, it
   still may: u gets nothing of it. */
TEST(a_cut_on_a_stream_keeps_its_earlier_mark)
{
    begin_still();
    galloc_config config = config_limit(MIB(6));
    config.growth = MIB(2);
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new(), t = stream_new(), u = stream_new();
    OK(galloc_free(get(pool, 1000, u), u));
    void *q = get(pool, 1000, t), *p = get_used(pool, MIB(4), s, 1);
    OK(galloc_free(p, s));
    p = get(pool, MIB(4), t);
    EXPECT_EQ(stats_of(pool).waits, 1);
    OK(galloc_resize(p, MIB(4) - 100, s));
    OK(galloc_free(p, u));
    p = get(pool, MIB(3), u);
    put(u, p, MIB(3), 2); /* a race unless u waits for s */
    OK(galloc_free(p, u));
    OK(galloc_free(q, t));
    pool_end(pool);
    finish();
}

/* The end that a resize cuts off was freed on the stream of the resize. */
TEST(what_a_resize_cuts_off_was_freed_on_its_stream)
{
    begin_still();
    galloc_pool *pool = pool_new(NULL);
    cudaStream_t s = stream_new(), t = stream_new();
    char *p = get(pool, MIB(8), s);
    OK(galloc_resize(p, MIB(2), t));
    EXPECT_EQ(info_of(p + MIB(5)).stream_id, stream_id(t));
    EXPECT_EQ(info_of(p).stream_id, stream_id(s));
    OK(galloc_free(p, s));
    pool_end(pool);
    finish();
}

/* Only a part of a large page is replaced at once, the rest by the next growth: so memory that was reserved stays. */
TEST(replaced_pages_stay_within_what_was_held)
{
    begin_still();
    galloc_config config = galloc_config_default();
    config.growth = MIB(16);
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new();
    OK(galloc_pool_reserve(pool, MIB(64)));
    void *p = get_growable(pool, PAGE, MIB(64), s);
    for (size_t bytes = 2 * PAGE; bytes <= MIB(64); bytes += PAGE) {
        OK(galloc_resize(p, bytes, s));
        EXPECT_EQ(info_of(p).usable, bytes);
        EXPECT(stats_of(pool).reserved.current <= MIB(64));
        EXPECT(stats_of(pool).reserved.current > MIB(64) - MIB(16));
    }
    EXPECT_EQ(sim_calls("cuMemRelease"), 4);
    OK(galloc_free(p, s));
    sim_run(-1);
    expect_healthy(pool, 1);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* After a trim nothing is created for a large page that growth gave back before it: so growth stays in the overhead. */
TEST(a_trim_ends_the_replacement_of_large_pages)
{
    begin_still();
    galloc_config config = galloc_config_default();
    config.growth = MIB(64);
    config.overhead = 0;
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new();
    OK(galloc_pool_reserve(pool, MIB(64)));
    void *p = get_growable(pool, PAGE, MIB(64), s);
    EXPECT_EQ(stats_of(pool).reserved.current, PAGE); /* the large page is replaced as far as it was needed */
    OK(galloc_free(p, s));
    sim_run(-1);
    OK(galloc_pool_trim(pool, 0, NULL));
    EXPECT_EQ(stats_of(pool).reserved.current, 0);

    void *before = get_growable(pool, PAGE, 8 * PAGE, s);
    OK(galloc_resize(before, 8 * PAGE, s));
    p = get_growable(pool, PAGE, 9 * PAGE, s);
    EXPECT_EQ(stats_of(pool).reserved.current, 9 * PAGE);
    OK(galloc_free(before, s));
    sim_run(-1);
    for (size_t pages = 2; pages <= 8; pages++) {
        OK(galloc_resize(p, pages * PAGE, s));
        EXPECT(stats_of(pool).reserved.current <= 9 * PAGE);
    }
    expect_healthy(pool, 1);
    OK(galloc_free(p, s));
    sim_run(-1);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* Growth, too, creates pages within the overhead before it moves any. */
TEST(growth_creates_within_the_overhead_before_it_moves)
{
    for (int how = 0; how < 2; how++) {
        begin_still();
        galloc_config config = frugal(GIB(1), ALL);
        config.overhead = how ? 100 : 0;
        galloc_pool *pool = pool_new(&config);
        cudaStream_t s = stream_new();
        void *before = get_used(pool, 8 * PAGE, s, 1), *p = get_growable(pool, PAGE, 8 * PAGE, s);
        OK(galloc_free(before, s));
        sim_run(-1);
        for (size_t pages = 2; pages <= 8; pages++) OK(galloc_resize(p, pages * PAGE, s));
        EXPECT_EQ(stats_of(pool).moves, how ? 0 : 7);
        EXPECT_EQ(stats_of(pool).reserved.current, (how ? 16 : 9) * PAGE);
        expect_healthy(pool, 1);
        OK(galloc_free(p, s));
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

/* A small growth costs the smallest of the pages that are too large. */
TEST(the_smallest_of_the_large_pages_is_replaced)
{
    begin_still();
    galloc_config config = galloc_config_default();
    config.growth = MIB(16);
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new();
    void *p = get_growable(pool, PAGE, 32 * PAGE, s);
    OK(galloc_resize(p, 9 * PAGE, s));
    OK(galloc_resize(p, 11 * PAGE, s));
    EXPECT_EQ(stats_of(pool).pages[1].count, 1);
    EXPECT_EQ(stats_of(pool).pages[3].count, 1);
    OK(galloc_free(p, s));
    sim_run(-1);
    void *q = get_growable(pool, PAGE, 32 * PAGE, s);
    OK(galloc_resize(q, 2 * PAGE, s));
    EXPECT_EQ(stats_of(pool).reserved.current, 10 * PAGE);
    EXPECT_EQ(stats_of(pool).pages[1].count, 0);
    expect_healthy(pool, 1);
    OK(galloc_free(q, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* A lone stream records no event by itself: it is asked for one when large pages wait for its work. */
TEST(large_pages_of_a_lone_stream_are_replaced)
{
    sim_options options = sim_defaults();
    options.pace = SIM_PACE_PROMPT;
    begin_with(options);
    galloc_config config = galloc_config_default();
    config.growth = MIB(16);
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new();
    OK(galloc_free(get_used(pool, MIB(64), s, 1), s));
    void *p = get_growable(pool, PAGE, MIB(64), s);
    for (size_t bytes = 2 * PAGE; bytes <= MIB(64); bytes += PAGE) {
        OK(galloc_resize(p, bytes, s));
        EXPECT(stats_of(pool).reserved.current <= MIB(64) + PAGE);
    }
    EXPECT_EQ(sim_blocking_calls(), 0);
    expect_healthy(pool, 1);
    OK(galloc_free(p, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* Pages that reach beyond what is asked for would leave free memory in the room, which others take. */
TEST(a_room_begins_with_no_page_that_it_shares)
{
    begin_still();
    galloc_config config = config_limit(SIZE_MAX);
    config.growth = 2 * PAGE;
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new();
    void *p = get_growable(pool, 2 * PAGE, 16 * PAGE, s), *q, *other;
    for (size_t pages = 4; pages <= 16; pages += 2) OK(galloc_resize(p, pages * PAGE, s)); /* by pages of 4 MiB */
    OK(galloc_free(p, s));
    sim_run(-1);
    q = get_growable(pool, 3 * PAGE, 16 * PAGE, s);
    other = get(pool, PAGE, s);
    OK(galloc_resize(q, 16 * PAGE, s));
    expect_healthy(pool, 1);
    OK(galloc_free(other, s));
    OK(galloc_free(q, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* An event on the legacy stream would have all blocking streams wait for each other: none is recorded there so that a
   place may be found again. */
TEST(a_room_that_legacy_frees_asks_for_no_event)
{
    begin_still();
    galloc_pool *pool = pool_new(NULL);
    cudaStream_t s = stream_new();
    void *own = get(pool, PAGE, s), *p = get_growable(pool, PAGE, 4 * PAGE, cudaStreamLegacy);
    put(cudaStreamLegacy, p, PAGE, 1);
    long records = sim_calls("cuEventRecord");
    OK(galloc_free(p, cudaStreamLegacy));
    OK(galloc_free(get(pool, KIB(64), cudaStreamLegacy), cudaStreamLegacy));
    EXPECT_EQ(sim_calls("cuEventRecord"), records);
    OK(galloc_free(own, s));
    sim_run(-1);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* Trim takes pages out of rooms too, and the blocks grow all the same. */
/* On the per-thread stream it does: the next room takes its pages over, with no more memory. */
TEST(a_room_that_a_per_thread_stream_frees_serves_the_next)
{
    begin();
    galloc_pool *pool = pool_new(NULL);
    cudaStream_t s = stream_new();
    void *large = get(pool, GIB(4), s), *p = get_growable(pool, MIB(8), MIB(64), cudaStreamPerThread);
    OK(galloc_free(p, cudaStreamPerThread));
    OK(cudaDeviceSynchronize());
    size_t held = stats_of(pool).reserved.current;
    p = get_growable(pool, MIB(8), MIB(64), s);
    EXPECT_EQ(stats_of(pool).reserved.current, held);
    OK(galloc_free(p, s));
    OK(galloc_free(large, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

TEST(trim_takes_the_pages_of_rooms)
{
    begin_still();
    galloc_config config = frugal(SIZE_MAX, ALL);
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new();
    char *p = room_leave(pool, s, 8, 8), *q = get_growable(pool, PAGE, 8 * PAGE, s);
    EXPECT(q == p);
    OK(galloc_pool_trim(pool, 0, NULL));
    EXPECT_EQ(stats_of(pool).reserved.current, PAGE);
    expect_healthy(pool, 1);
    OK(galloc_resize(q, 8 * PAGE, s));
    expect_healthy(pool, 1);
    OK(galloc_free(q, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* Growth by many pages at once, over pages that come back, old mappings whose pages are in use, and holes, beside
   blocks that lend and borrow. Nothing is limited, so nothing is refused. */
TEST(rooms_grow_by_any_steps_beside_other_blocks)
{
    static const int paces[] = {SIM_PACE_RANDOM, SIM_PACE_PROMPT, SIM_PACE_STILL};
    for (int round = 0; round < 12; round++) {
        sim_options options = sim_defaults();
        options.pace = paces[round % 3];
        options.seed = test_seed() + (uint64_t)round;
        begin_with(options);
        galloc_config config = frugal(SIZE_MAX, round & 1 ? ALL : COMPLETED);
        galloc_pool *pool = pool_new(&config);
        cudaStream_t s[2] = {stream_new(), stream_new()};
        dice d = {options.seed};
        char *at[16] = {NULL};
        size_t pages[16] = {0};
        for (int step = 0; step < 600; step++) {
            int i = (int)roll_below(&d, 16), growable = i < 8;
            cudaStream_t own = s[i % 2];
            if (at[i] && (!growable || pages[i] == 16 || !roll_below(&d, 8))) {
                look(own, at[i], pages[i] * PAGE, (uint64_t)i);
                OK(galloc_free(at[i], own));
                at[i] = NULL;
            } else {
                size_t most = growable ? 16 : 12;
                if (!at[i]) pages[i] = 0;
                pages[i] += 1 + roll_below(&d, (uint32_t)(most - pages[i]));
                if (at[i]) OK(galloc_resize(at[i], pages[i] * PAGE, own));
                else at[i] = growable ? get_growable(pool, pages[i] * PAGE, 16 * PAGE, own)
                                      : get(pool, pages[i] * PAGE, own);
                put(own, at[i], pages[i] * PAGE, (uint64_t)i);
            }
            if (!roll_below(&d, 100)) OK(galloc_pool_trim(pool, roll_below(&d, 64) * (size_t)PAGE, NULL));
            if (!roll_below(&d, 30)) sim_run(-1);
            if (!EXPECT_EQ(galloc_pool_check(pool), 0)) break;
        }
        for (int i = 0; i < 16; i++)
            if (at[i]) OK(galloc_free(at[i], s[i % 2]));
        pool_end(pool);
        stream_end(s[0]);
        stream_end(s[1]);
        finish();
    }
}

/* 1 while there was still something to fail. */
static int room_with_fault(int host, int nth, int on)
{
    sim_options options = sim_defaults();
    options.pace = SIM_PACE_PROMPT;
    begin_with(options);
    galloc_config config = frugal(GIB(1), ALL);
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new();
    char *p = get_growable(pool, 6 * PAGE, 8 * PAGE, s), *q = NULL, *other = NULL;
    galloc_request request = {0};
    request.bytes = PAGE;
    request.max_bytes = 8 * PAGE;
    request.stream = s;
    request.pool = pool;
    put(s, p, 6 * PAGE, 1);
    if (host) sim_fail_malloc(nth, on);
    OK(galloc_free(p, s));
    if (!host) sim_fail(NULL, nth, on, 0);
    cudaError_t got = galloc_alloc((void **)&q, &request);
    EXPECT_EQ(galloc_pool_check(pool), 0);
    if (!galloc_pool_malloc(pool, (void **)&other, 3 * PAGE, s)) put(s, other, 3 * PAGE, 2);
    EXPECT_EQ(galloc_pool_check(pool), 0);
    cudaError_t grown = q ? galloc_resize(q, 3 * PAGE, s) : got;
    EXPECT_EQ(galloc_pool_check(pool), 0);
    if (!grown) put(s, q, 3 * PAGE, 3);
    if (!grown && !galloc_resize(q, 8 * PAGE, s)) put(s, q, 8 * PAGE, 4);
    EXPECT_EQ(galloc_pool_check(pool), 0);
    int fired = (host ? sim_failed_mallocs() : sim_failed()) > 0;
    sim_fail_clear();
    sim_fail_malloc(0, 0);
    OK(galloc_pool_trim(pool, SIZE_MAX, NULL));
    if (q) OK(galloc_resize(q, 8 * PAGE, s));
    if (q) put(s, q, 8 * PAGE, 5);
    expect_healthy(pool, 1);
    if (other) OK(galloc_free(other, s));
    if (q) OK(galloc_free(q, s));
    pool_end(pool);
    stream_end(s);
    finish();
    return fired;
}

TEST(calls_of_rooms_where_others_were_fail)
{
    for (int way = 0; way < 4; way++) {
        long before = test_failures;
        int nth = 1;
        while (room_with_fault(way / 2, nth, way % 2) && test_failures == before) nth++;
        if (test_failures > before) printf("    call %d, way %d\n", nth, way);
        EXPECT(nth > 3);
    }
}

/* ---- contents ---------------------------------------------------------------------------------------------------- */

TEST(contents_stay_where_they_are)
{
    for (int room = 0; room < 2; room++) {
        sim_options options = sim_defaults();
        options.mode = SIM_BACKED;
        options.memory = MIB(128);
        options.seed = test_seed();
        begin_with(options);
        row r;
        galloc_config config = frugal(GIB(1), ALL);
        row_open(&r, &config, room);
        cells_to_holes(&r);
        pieces_free(&r, r.t);
        size_t bytes = 2 * PAGE;
        for (uint64_t n = 1; bytes < MOST; n++) {
            size_t more = bytes + KIB(700);
            if (more > MOST) more = MOST;
            OK(galloc_resize(r.p, more, r.s));
            look(r.s, r.p, 2 * PAGE, 1);
            if (bytes > 2 * PAGE) look(r.s, r.p + 2 * PAGE, bytes - 2 * PAGE, 100 + n - 1);
            put(r.s, r.p + 2 * PAGE, more - 2 * PAGE, 100 + n);
            bytes = more;
        }
        for (uint64_t n = 0; n < 6; n++) {
            OK(galloc_resize(r.p, bytes - KIB(512) * n, r.s));
            look(r.s, r.p, 2 * PAGE, 1);
        }
        EXPECT(moved(&r) > 0);
        row_close(&r);
    }
}

/* ---- when calls fail --------------------------------------------------------------------------------------------- */

/* The growth fails, and so does what should undo it: the room stays the block's, and is filled when the driver goes
   on. */
TEST(a_room_outlives_a_rollback_that_fails)
{
    static const char *const functions[] = {"cuMemMap", "cuMemSetAccess"};
    for (int how = 0; how < 8; how++) { /* which call, created or moved, tried again at once or later */
        begin_still();
        row r;
        galloc_config config = frugal(GIB(1), ALL);
        row_open(&r, &config, 1);
        if (how & 2) pieces_free(&r, r.s);
        galloc_pointer info = info_of(r.p);
        sim_fail(functions[how & 1], how & 1 ? 1 : 2, 1, cudaErrorUnknown);
        sim_fail("cuMemUnmap", 1, 1, 0);
        EXPECT_EQ(galloc_resize(r.p, MOST - PAGE, r.s), cudaErrorUnknown);
        EXPECT_EQ(info_of(r.p).requested, info.requested);
        EXPECT_EQ(info_of(r.p).room, info.room);
        EXPECT_EQ(galloc_pool_check(r.pool), 0);
        sim_fail_clear();
        sim_fail("cuMemUnmap", 1, 1, 0);
        EXPECT_EQ(galloc_resize(r.p, MOST, r.s), cudaErrorMemoryAllocation); /* there are addresses */
        EXPECT(strstr(galloc_last_message(), "the driver does not unmap the pages reserved behind the block"));
        void *q = get_used(r.pool, 5 * PAGE, r.s, 9);
        EXPECT((char *)q >= r.p + MOST || (char *)q + 5 * PAGE <= r.p);
        EXPECT_EQ(galloc_pool_check(r.pool), 0);
        sim_fail_clear();
        if (how & 4) OK(galloc_pool_trim(r.pool, SIZE_MAX, NULL));
        OK(galloc_resize(r.p, MOST, r.s));
        expect_grown(&r, MOST, 3);
        OK(galloc_free(q, r.s));
        row_close(&r);
    }
}

/* The block goes while the driver still holds on to a part of its room: that is anybody's when it lets go. */
TEST(a_stuck_room_is_freed_with_its_block)
{
    begin_still();
    row r;
    galloc_config config = frugal(GIB(1), ALL);
    row_open(&r, &config, 1);
    sim_fail("cuMemMap", 3, 1, cudaErrorUnknown);
    sim_fail("cuMemUnmap", 1, 1, 0);
    EXPECT_EQ(galloc_resize(r.p, MOST, r.s), cudaErrorUnknown);
    EXPECT_EQ(galloc_pool_check(r.pool), 0);
    OK(galloc_free(r.p, r.s));
    EXPECT_EQ(galloc_pool_check(r.pool), 0);
    sim_fail_clear();
    sim_run(-1);
    OK(galloc_pool_trim(r.pool, SIZE_MAX, NULL));
    void *p = get_used(r.pool, MOST, r.s, 4);
    EXPECT(p == r.p);
    row_close(&r);
}

/* A block that came out of a stream cache and is resized on another stream waits for what its first stream did until
   then, and not for what that stream does until the block is freed. */
TEST(a_resize_ends_what_the_first_stream_did)
{
    begin_still();
    galloc_config config = config_limit(PAGE);
    config.reuse = COMPLETED;
    config.wait_limit_ms = 0;
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new(), t = stream_new(), u = stream_new();
    void *base = get(pool, PAGE - KIB(192), s), *p = get(pool, KIB(64), t), *wall = get(pool, KIB(64), s);
    void *q = get(pool, KIB(64), t);
    OK(galloc_free(p, t));
    EXPECT(get(pool, KIB(64), t) == p); /* of the cache of T */
    put(t, p, KIB(64), 1);
    order(t, s);
    OK(galloc_resize(p, KIB(64) - 100, s));
    OK(galloc_stream_retire(t));
    sim_run(-1);
    sim_hold(t, 1);
    put(t, q, KIB(64), 2);
    OK(galloc_free(q, t));
    OK(galloc_free(p, s));
    OK(galloc_stream_retire(s));
    sim_run(-1);
    void *r = get(pool, KIB(64), u);
    EXPECT(r == p);
    put(u, r, KIB(64), 3);
    sim_hold(t, 0);
    OK(galloc_free(r, u));
    OK(galloc_free(base, s));
    OK(galloc_free(wall, s));
    pool_end(pool);
    finish();
}

enum { OF_HOLES, OF_ROOM, OF_BOTH, KINDS };

typedef struct trial {
    row r;
    int kind;
    size_t bytes; /* what P has */
    uint64_t tag; /* in all of it */
    int refused;
} trial;

/* Free pieces and holes behind P; a room; a room and free pieces behind that. */
static void trial_open(trial *t, int kind, int pace, int reuse, int limit)
{
    sim_options options = sim_defaults();
    galloc_config config = frugal(GIB(1), reuse);
    memset(t, 0, sizeof *t);
    options.pace = pace;
    options.seed = test_seed();
    begin_with(options);
    t->kind = kind;
    row_open(&t->r, &config, kind != OF_HOLES);
    if (kind == OF_HOLES) {
        cell_to_hole(&t->r, 1);
        cell_to_hole(&t->r, 3);
        order(t->r.s, t->r.t);
        put(t->r.t, t->r.cell[0], PAGE, 5);
        OK(galloc_free(t->r.cell[0], t->r.t));
        cell_free(&t->r, 2);
    }
    if (kind == OF_BOTH) {
        OK(galloc_free(t->r.wall, t->r.s));
        OK(galloc_free(t->r.piece[0], t->r.s));
        t->r.wall = t->r.piece[0] = NULL;
    }
    for (int i = 1; i < PIECES; i++) {
        cudaStream_t home = i % 2 ? t->r.s : t->r.t;
        order(t->r.s, home);
        put(home, t->r.piece[i], PAGE, 6);
        OK(galloc_free(t->r.piece[i], home));
        t->r.piece[i] = NULL;
    }
    if (limit) inside_set_memory_limit(t->r.pool, stats_of(t->r.pool).reserved.current);
    note(&t->r);
    t->bytes = 2 * PAGE;
    t->tag = 1;
}

static void try_resize(trial *t, size_t bytes)
{
    galloc_pointer before = info_of(t->r.p), after;
    galloc_stats stats = stats_of(t->r.pool);
    cudaError_t err = galloc_resize(t->r.p, bytes, t->r.s);
    after = info_of(t->r.p);
    EXPECT_EQ(galloc_pool_check(t->r.pool), 0);
    EXPECT(after.base == t->r.p);
    if (t->kind != OF_HOLES) EXPECT(after.room >= before.room);
    look(t->r.s, t->r.p, bytes < t->bytes && !err ? bytes : t->bytes, t->tag);
    if (err == cudaSuccess) {
        t->bytes = bytes;
        t->tag++;
        EXPECT_EQ(after.requested, bytes);
        put(t->r.s, t->r.p, bytes, t->tag);
        return;
    }
    t->refused++;
    EXPECT_EQ(after.requested, before.requested);
    EXPECT_EQ(stats_of(t->r.pool).live.current, stats.live.current);
    EXPECT_EQ(stats_of(t->r.pool).blocks.current, stats.blocks.current);
    EXPECT_EQ(stats_of(t->r.pool).allocated.current, stats.allocated.current);
    EXPECT_EQ(after.usable, before.usable);
}

static void act(trial *t)
{
    size_t most = MOST + (t->kind == OF_BOTH ? 2 * PAGE : 0);
    try_resize(t, 3 * PAGE + 5000);
    try_resize(t, most);
    try_resize(t, 3 * PAGE);
    try_resize(t, PAGE / 2);
    try_resize(t, most - 600);
}

/* The fault is over: P can have all of it. */
static void trial_close(trial *t)
{
    galloc_config config;
    OK(galloc_pool_config(t->r.pool, &config));
    sim_fail_clear();
    sim_fail_malloc(0, 0);
    sim_run(-1);
    OK(galloc_pool_trim(t->r.pool, SIZE_MAX, NULL));
    EXPECT_EQ(stats_of(t->r.pool).quarantined, 0);
    expect_healthy(t->r.pool, 1);
    int refused = t->refused;
    if (config.reuse & COMPLETED || t->kind == OF_ROOM) {
        try_resize(t, MOST);
        EXPECT_EQ(t->refused, refused);
    }
    EXPECT(sim_physical_peak(0) <= config.memory_limit || t->r.before.reserved.peak >= sim_physical_peak(0));
    row_close(&t->r);
}

/* 1 while there was still something to fail. */
static int run_with_fault(int which, int host, const char *function, int stuck, int nth, int on)
{
    static const int paces[] = {SIM_PACE_STILL, SIM_PACE_PROMPT, SIM_PACE_RANDOM};
    trial t;
    trial_open(&t, which % KINDS, paces[which / KINDS % 3], which / 9 % 2 ? COMPLETED : ALL, which / 18 % 2);
    if (stuck) sim_fail("cuMemUnmap", 1, 1, 0);
    long calls = fail_nth(host, function, nth, on);
    act(&t);
    int failed = has_failed(host, function, calls);
    trial_close(&t);
    return failed;
}

static void sweep(int host, const char *function, int stuck, int on)
{
    for (int which = 0; which < 36; which++) {
        long before = test_failures;
        int nth = 1;
        while (run_with_fault(which, host, function, stuck, nth, on) && test_failures == before && nth < 2000) nth++;
        EXPECT(nth < 2000);
        if (test_failures > before) printf("    call %d, case %d\n", nth, which);
    }
}

TEST(without_faults_nothing_is_refused)
{
    for (int which = 0; which < 36; which++) {
        trial t;
        trial_open(&t, which % KINDS, SIM_PACE_PROMPT, ALL, which / 18 % 2);
        act(&t);
        EXPECT_EQ(t.refused, 0);
        EXPECT_EQ(blocked(&t.r), 0);
        trial_close(&t);
    }
}

TEST(the_nth_cuda_call_of_a_resize_fails) { sweep(0, NULL, 0, 0); }

TEST(all_cuda_calls_from_the_nth_on_fail) { sweep(0, NULL, 0, 1); }

TEST(the_nth_host_malloc_of_a_resize_fails) { sweep(1, NULL, 0, 0); }

TEST(all_host_mallocs_from_the_nth_on_fail) { sweep(1, NULL, 0, 1); }

TEST(what_a_failed_growth_did_cannot_be_undone)
{
    sweep(0, "cuMemMap", 1, 0);
    sweep(0, "cuMemSetAccess", 1, 0);
    sweep(1, NULL, 1, 0);
}

/* Host memory for the description, when there is none at all. */
TEST(growing_needs_no_host_memory_late)
{
    for (int mix = 0; mix < 1 << CELLS; mix++) {
        begin_still();
        row r;
        galloc_config config = frugal(GIB(1), ALL);
        row_open(&r, &config, 0);
        cells_mix(&r, mix);
        note(&r);
        galloc_pointer info = info_of(r.p);
        inside_drain_blocks(r.pool);
        inside_drain_marks(r.pool);
        sim_fail_malloc(1, 1);
        EXPECT_EQ(galloc_resize(r.p, MOST - 512, r.s), cudaErrorMemoryAllocation);
        sim_fail_malloc(0, 0);
        expect_as_it_was(&r, info);
        OK(galloc_resize(r.p, MOST - 512, r.s));
        expect_grown(&r, MOST - 512, 3);
        row_close(&r);
    }
}

/* A block of a stream cache is resized on another stream: the use on the first one is a mark. Without host memory for
   it nothing changes. */
TEST(a_resize_on_another_stream_without_host_memory_changes_nothing)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_limited(MIB(2));
    void *wall = get(pool, MIB(1), t), *p = NULL, *q;
    for (int i = 0; i < 4; i++) {
        if (p) OK(galloc_free(p, s));
        p = get(pool, MIB(1), s);
        if (i < 3) put(s, p, MIB(1), 1);
    }
    inside_drain_all(pool);
    sim_fail_malloc(1, 1);
    EXPECT_EQ(galloc_resize(p, KIB(4), t), cudaErrorMemoryAllocation);
    EXPECT(sim_failed_mallocs() > 0);
    sim_fail_clear();
    EXPECT_EQ(info_of(p).requested, MIB(1));
    EXPECT_EQ(info_of(p).state, GALLOC_STATE_USED);
    OK(galloc_free(p, t));
    q = get_used(pool, MIB(1), t, 3); /* waits for the earlier use on s */
    EXPECT(q == p);
    OK(galloc_free(q, t));
    OK(galloc_free(wall, t));
    expect_healthy(pool, 1);
    pool_end(pool);
    finish();
}

/* A block that many streams use shrinks, or without host memory for the marks of all of them nothing changes. */
TEST(a_block_of_many_streams_shrinks_or_stays_without_host_memory)
{
    enum { USERS = 12 };
    int failures = 0, error = 1;
    for (size_t spare = 0; error && spare < 200; spare++) {
        begin_still();
        cudaStream_t s = stream_new(), t[USERS];
        galloc_pool *pool = pool_limited(MIB(2));
        void *p = get_used(pool, MIB(1), s, 1), *rest;
        for (int i = 0; i < USERS; i++) {
            t[i] = stream_new();
            order(i ? t[i - 1] : s, t[i]);
            put(t[i], p, MIB(1), 2);
            OK(galloc_record_stream(p, t[i]));
        }
        order(t[USERS - 1], s);
        EXPECT(inside_leave_marks(pool, spare));
        sim_fail_malloc(1, 1);
        error = galloc_resize(p, KIB(4), s);
        sim_fail_clear();
        failures += error != cudaSuccess;
        if (error) EXPECT_EQ(error, cudaErrorMemoryAllocation);
        EXPECT_EQ(info_of(p).requested, error ? MIB(1) : KIB(4));
        expect_healthy(pool, 1);
        if (error) OK(galloc_resize(p, KIB(4), s));
        rest = get_used(pool, MIB(1), t[0], 3);
        OK(galloc_free(rest, t[0]));
        OK(galloc_free(p, s));
        pool_end(pool);
        finish();
    }
    EXPECT(failures > 1 && !error);
}

/* Without host memory the pages of a freed room that cannot be kept for the next room are free memory. */
TEST(a_room_is_freed_without_host_memory)
{
    begin_still();
    galloc_config config = galloc_config_default();
    config.growth = PAGE;
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new();
    void *wall = get(pool, 512, s), *p = get_growable(pool, 16 * PAGE, 64 * PAGE, s);
    inside_drain_blocks(pool);
    inside_drain_marks(pool);
    sim_fail_malloc(1, 1);
    OK(galloc_free(p, s));
    EXPECT(sim_failed_mallocs() > 0);
    sim_fail_malloc(0, 0);
    EXPECT(inside_parked(pool) < 16 * PAGE);
    expect_healthy(pool, 1);
    long calls = memory_calls();
    p = get(pool, 8 * PAGE, s);
    EXPECT_EQ(memory_calls(), calls);
    OK(galloc_free(p, s));
    OK(galloc_free(wall, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* ---- vectors and caches at random -------------------------------------------------------------------------------- */

enum { STREAMS = 4, THINGS = 24 };

/* A vector grows where it stands or moves house; a cache has room for all that it may ever hold. */
typedef struct thing {
    char *ptr;
    size_t bytes, most; /* most: of a cache; 0: a vector */
    uint64_t tag;
    uint32_t home;
} thing;

typedef struct play {
    dice d;
    galloc_pool *pool;
    cudaStream_t s[STREAMS];
    thing thing[THINGS];
    size_t limit, memory; /* of the pool, of the device */
    uint64_t tag;
    unsigned long long grown, shrunk, refused, homeless, moved;
} play;

static void write_thing(play *p, thing *b, uint32_t stream)
{
    if (b->home != stream) order(p->s[b->home], p->s[stream]);
    b->home = stream;
    b->tag = ++p->tag;
    put(p->s[stream], b->ptr, b->bytes, b->tag);
}

static void thing_free(play *p, thing *b)
{
    uint32_t other = roll_below(&p->d, STREAMS);
    look(p->s[b->home], b->ptr, b->bytes, b->tag);
    if (roll_below(&p->d, 4) == 0) {
        order(p->s[b->home], p->s[other]);
        look(p->s[other], b->ptr, b->bytes, b->tag);
        if (roll_below(&p->d, 2)) {
            OK(galloc_record_stream(b->ptr, p->s[other]));
            other = b->home;
        }
        OK(galloc_free(b->ptr, p->s[other]));
    } else {
        OK(galloc_free(b->ptr, p->s[b->home]));
    }
    b->ptr = NULL;
}

static void thing_new(play *p, thing *b)
{
    void *ptr = NULL;
    galloc_request request = {0};
    b->home = roll_below(&p->d, STREAMS);
    b->bytes = roll_bytes(&p->d, MIB(6));
    b->most = roll_below(&p->d, 3) ? 0 : b->bytes + roll_bytes(&p->d, MIB(40));
    request.bytes = b->bytes;
    request.max_bytes = b->most;
    request.stream = p->s[b->home];
    request.pool = p->pool;
    if (galloc_alloc(&ptr, &request) != cudaSuccess) return;
    b->ptr = (char *)ptr;
    write_thing(p, b, b->home);
}

/* A vector that cannot grow where it is moves house, as programs do. */
static void thing_moves(play *p, thing *b, size_t bytes)
{
    thing to = *b;
    void *ptr = NULL;
    p->homeless++;
    if (galloc_pool_malloc(p->pool, &ptr, bytes, p->s[b->home]) != cudaSuccess) return;
    look(p->s[b->home], b->ptr, b->bytes, b->tag);
    to.ptr = (char *)ptr;
    to.bytes = bytes;
    OK(galloc_free(b->ptr, p->s[b->home]));
    *b = to;
    write_thing(p, b, b->home);
}

/* On its own stream, or on another, which then uses only what is new until it is ordered after the first. */
static void thing_resize(play *p, thing *b)
{
    uint32_t stream = roll_below(&p->d, 4) ? b->home : roll_below(&p->d, STREAMS);
    size_t bytes = roll_below(&p->d, 3) ? b->bytes + roll_bytes(&p->d, b->bytes + MIB(2)) : roll_bytes(&p->d, b->bytes);
    galloc_pointer info = info_of(b->ptr);
    if (b->most && bytes > b->most && roll_below(&p->d, 8)) bytes = b->most;
    if (bytes <= b->bytes) stream = b->home;
    cudaError_t err = galloc_resize(b->ptr, bytes, p->s[stream]);
    EXPECT(info_of(b->ptr).base == b->ptr);
    if (err == cudaSuccess) {
        EXPECT_EQ(info_of(b->ptr).requested, bytes);
        if (bytes > b->bytes && stream != b->home) put(p->s[stream], b->ptr + b->bytes, bytes - b->bytes, 9);
        if (stream != b->home) order(p->s[stream], p->s[b->home]);
        look(p->s[b->home], b->ptr, bytes < b->bytes ? bytes : b->bytes, b->tag);
        p->grown += bytes > b->bytes;
        p->shrunk += bytes < b->bytes;
        b->bytes = bytes;
        write_thing(p, b, b->home);
        return;
    }
    EXPECT(info_of(b->ptr).requested == b->bytes && info_of(b->ptr).room == info.room);
    p->refused++;
    if (err == cudaErrorNotSupported) {
        EXPECT(bytes > b->most);
        if (!b->most) thing_moves(p, b, bytes);
        return;
    }
    EXPECT_EQ(err, cudaErrorMemoryAllocation);
    if (bytes > b->most) return;
    size_t lacks = enough(bytes, PAGE) - info_of(b->ptr).usable, more = inside_headroom(p->pool);
    size_t moves = inside_free_pages(p->pool);
    more = whole(smaller(more, p->memory - sim_physical(0)), PAGE);
    if (!EXPECT(moves + more < lacks))
        printf("    refused %zu, could move %zu, limit allows %zu: %s\n", lacks, moves, more, log_text);
}

static void play_round(play *p, uint64_t seed)
{
    sim_options options = sim_defaults();
    memset(p, 0, sizeof *p);
    p->d.state = seed;
    p->limit = MIB(64) + MIB(32) * (size_t)(seed % 4);
    options.memory = p->memory = seed % 3 ? GIB(1) : p->limit + MIB(16);
    options.seed = seed;
    options.pace = (int)(seed % 4) == 3 ? -1 : (int)(seed % 4) - 1;
    options.lag = seed % 5 == 0 ? 30 : 0;
    begin_with(options);
    for (int i = 0; i < STREAMS; i++) p->s[i] = stream_new();
    galloc_config config = frugal(seed % 3 ? p->limit : SIZE_MAX, seed % 2 ? ALL : (int)(seed / 2 % 8));
    config.overhead = seed % 3 == 1 ? 0.02 : 0;
    p->pool = pool_new(&config);
    for (int n = 0; n < 300; n++) {
        thing *b = &p->thing[roll_below(&p->d, THINGS)];
        if (!b->ptr) thing_new(p, b);
        else if (roll_below(&p->d, 5)) thing_resize(p, b);
        else thing_free(p, b);
        expect_healthy(p->pool, 1);
    }
    EXPECT(sim_physical_peak(0) <= config.memory_limit);
    p->moved = stats_of(p->pool).moves;
    for (int i = 0; i < THINGS; i++)
        if (p->thing[i].ptr) thing_free(p, &p->thing[i]);
    pool_end(p->pool);
    finish();
}

TEST(growing_vectors_and_caches)
{
    static play p;
    const char *text = getenv("GALLOC_ROUNDS");
    int rounds = text && *text ? atoi(text) : 120;
    unsigned long long grown = 0, shrunk = 0, refused = 0, homeless = 0, moved = 0;
    for (int i = 0; i < rounds; i++) {
        long before = test_failures;
        play_round(&p, test_seed() + (uint64_t)i);
        grown += p.grown;
        shrunk += p.shrunk;
        refused += p.refused;
        homeless += p.homeless;
        moved += p.moved;
        if (test_failures > before) {
            printf("    first failure with GALLOC_SEED=%llu GALLOC_ROUNDS=1\n",
                   (unsigned long long)test_seed() + (unsigned long long)i);
            break;
        }
    }
    printf("    %llu times grown, %llu shrunk, %llu refused, %llu copied instead, %llu moves\n", grown, shrunk, refused,
           homeless, moved);
    EXPECT(grown > refused);
}

/* ---- on_map ------------------------------------------------------------------------------------------------------ */

static galloc_pool *mapped_pool;
static cudaStream_t other_stream;
static void *taken_in_map;
static size_t taken_bytes = MIB(8);

static void *allocates_meanwhile(void *user)
{
    (void)user;
    taken_in_map = get(mapped_pool, taken_bytes, other_stream);
    return NULL;
}

static void on_map_awaits_another_thread(galloc_pool *pool, void *addr, size_t bytes, void *user)
{
    pthread_t thread;
    (void)pool, (void)addr, (void)bytes, (void)user;
    if (taken_in_map) return;
    taken_in_map = &thread;
    EXPECT_EQ(pthread_create(&thread, NULL, allocates_meanwhile, NULL), 0);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
}

/* Another thread's call while on_map runs may take addresses of the room, which then is made elsewhere. */
TEST(a_room_is_whole_although_another_thread_allocates_in_on_map)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = galloc_config_default();
    galloc_callbacks callbacks = {0};
    galloc_request request = {0};
    galloc_pointer info;
    void *p;
    config.growth = MIB(2);
    OK(galloc_pool_create(&mapped_pool, &config));
    other_stream = stream_new();
    taken_in_map = NULL;
    callbacks.on_map = on_map_awaits_another_thread;
    OK(galloc_pool_set_callbacks(mapped_pool, &callbacks));
    request.bytes = MIB(4);
    request.max_bytes = MIB(64);
    request.stream = s;
    request.pool = mapped_pool;
    OK(galloc_alloc(&p, &request));
    OK(galloc_pointer_info(p, &info));
    EXPECT_EQ(info.room, MIB(64));
    OK(galloc_resize(p, MIB(64), s));
    OK(galloc_free(p, s));
    OK(galloc_free(taken_in_map, other_stream));
    pool_end(mapped_pool);
    stream_end(s);
    stream_end(other_stream);
    finish();
}

enum { PLACES = 200 };
static void *taken_places[PLACES];
static int places_taken;

/* Whatever is mapped, another thread's call takes the place of the room. */
static void on_map_takes_the_place(galloc_pool *pool, void *addr, size_t bytes, void *user)
{
    static int within;
    (void)addr, (void)bytes, (void)user;
    if (within++ == 0 && places_taken < PLACES) {
        pthread_t thread;
        mapped_pool = pool;
        EXPECT_EQ(pthread_create(&thread, NULL, allocates_meanwhile, NULL), 0);
        EXPECT_EQ(pthread_join(thread, NULL), 0);
        taken_places[places_taken++] = taken_in_map;
    }
    within--;
}

/* Other calls take each place that a room is made at. At last the request is refused: it does not go on for ever. */
TEST(a_room_that_others_take_again_and_again_is_given_up)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = galloc_config_default();
    galloc_callbacks callbacks = {0};
    galloc_request request = {0};
    void *p = NULL;
    config.growth = MIB(2);
    galloc_pool *pool = pool_new(&config);
    other_stream = stream_new();
    places_taken = 0;
    taken_bytes = MIB(64); /* what the rooms before it leave is smaller */
    callbacks.on_map = on_map_takes_the_place;
    OK(galloc_pool_set_callbacks(pool, &callbacks));
    request.bytes = MIB(4);
    request.max_bytes = MIB(64);
    request.stream = s;
    request.pool = pool;
    if (galloc_alloc(&p, &request)) EXPECT(p == NULL);
    taken_bytes = MIB(8);
    EXPECT(places_taken >= 8 && places_taken < PLACES);
    expect_healthy(pool, 1);
    OK(galloc_free(p, s));
    for (int i = 0; i < places_taken; i++) OK(galloc_free(taken_places[i], other_stream));
    pool_end(pool);
    stream_end(s);
    stream_end(other_stream);
    finish();
}

static void on_map_drains_the_host(galloc_pool *pool, void *addr, size_t bytes, void *user)
{
    (void)addr, (void)bytes, (void)user;
    inside_drain_blocks(pool);
    sim_fail_malloc(1, 1);
}

/* While on_map runs, other calls use up the host's memory: the request is refused, and its pages are free. */
TEST(a_request_that_on_map_leaves_no_host_memory_is_refused)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = galloc_config_default();
    galloc_callbacks callbacks = {0};
    void *p = NULL;
    config.growth = MIB(2);
    galloc_pool *pool = pool_new(&config);
    callbacks.on_map = on_map_drains_the_host;
    OK(galloc_pool_set_callbacks(pool, &callbacks));
    EXPECT_EQ(galloc_pool_malloc(pool, &p, MIB(1) + 512, s), cudaErrorMemoryAllocation);
    EXPECT(sim_failed_mallocs() > 0);
    sim_fail_malloc(0, 0);
    EXPECT(p == NULL);
    EXPECT_EQ(stats_of(pool).blocks.current, 0);
    expect_healthy(pool, 1);
    OK(galloc_pool_set_callbacks(pool, NULL));
    long calls = memory_calls();
    p = get(pool, MIB(1) + 512, s);
    EXPECT_EQ(memory_calls(), calls);
    OK(galloc_free(p, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* ---- what comes behind a block while it waits for memory --------------------------------------------------------- */

typedef struct interloper {
    galloc_pool *pool;
    cudaStream_t t;
    char *place; /* the free memory behind the block that grows */
    int came;
} interloper;

/* While another pool gives pages away: what was free behind the block is used by stream t, and free again. */
static void use_what_is_behind(galloc_pool *giver, void *addr, size_t bytes, void *user)
{
    interloper *i = user;
    (void)giver;
    (void)addr;
    (void)bytes;
    if (i->came++) return;
    void *x = get_used(i->pool, MIB(1), i->t, 5);
    EXPECT(x == i->place);
    OK(galloc_free(x, i->t));
}

/* A growth that lacks memory says so, also when another stream has come in its way meanwhile. */
TEST(a_growth_without_memory_is_out_of_memory_whoever_came_behind_it)
{
    begin_still();
    galloc_config config = galloc_config_default();
    config.device_limit = 4 * PAGE;
    config.stats_exact = 1; /* no stream cache */
    galloc_pool *pool = pool_new(&config), *other = pool_new(&config);
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_report report;
    char *p = get(pool, MIB(3), s);
    interloper i = {pool, t, p + MIB(3), 0};
    galloc_callbacks calls = {NULL, NULL, NULL, use_what_is_behind, &i};
    OK(galloc_pool_reserve(other, 2 * PAGE));
    OK(galloc_pool_set_callbacks(other, &calls));
    sim_fail("cuMemCreate", 1, 1, cudaErrorMemoryAllocation); /* others have what is given away first */
    EXPECT_EQ(galloc_resize(p, 4 * PAGE, s), cudaErrorMemoryAllocation);
    sim_fail_clear();
    EXPECT(i.came > 0);
    OK(galloc_oom_report(&report));
    OK(galloc_free(p, s));
    OK(galloc_pool_set_callbacks(other, NULL));
    sim_run(-1);
    pool_end(pool);
    pool_end(other);
    stream_end(s);
    stream_end(t);
    finish();
}

/* Aligned blocks with room that come again find their places, and the pages that are parked there. */
TEST(aligned_rooms_find_their_places_again)
{
    sim_options options = sim_defaults();
    options.memory = GIB(8);
    options.pace = SIM_PACE_PROMPT;
    begin_with(options);
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    galloc_request request = {0};
    void *p[4], *before[4] = {NULL, NULL, NULL, NULL};
    request.bytes = MIB(6);
    request.max_bytes = MIB(10);
    request.alignment = MIB(64);
    request.pool = pool;
    request.stream = s;
    for (int round = 0; round < 6; round++) {
        for (int i = 0; i < 4; i++) {
            OK(galloc_alloc(&p[i], &request));
            if (round) EXPECT(p[i] == before[0] || p[i] == before[1] || p[i] == before[2] || p[i] == before[3]);
        }
        memcpy(before, p, sizeof p);
        for (int i = 0; i < 4; i++) OK(galloc_free(p[i], s));
    }
    EXPECT_EQ(stats_of(pool).moves, 0);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* Where pages have at least 8 MiB, blocks grow by whole pages, in their room and beyond it. */
TEST(blocks_grow_on_a_device_of_large_pages)
{
    for (int room = 0; room < 2; room++) {
        sim_options options = sim_defaults();
        options.granularity = MIB(8);
        begin_with(options);
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_new(NULL);
        void *p = room ? get_growable(pool, MIB(2), MIB(20), s) : get(pool, MIB(8), s);
        OK(galloc_resize(p, MIB(12), s));
        OK(galloc_resize(p, room ? MIB(20) : MIB(33), s));
        put(s, p, MIB(20), 1);
        expect_healthy(pool, 1);
        OK(galloc_free(p, s));
        stream_end(s);
        pool_end(pool);
        finish();
    }
}

/* A block that changes its size within its memory needs no page, so another call may change pages meanwhile. */
TEST(a_resize_within_its_memory_waits_for_no_call_that_changes_pages)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *p = get_growable(pool, MIB(1), MIB(64), s), *q = get(pool, MIB(4), s);
    OK(galloc_free(q, s));
    alarm(20);
    inside_hold_paging(pool, 1);
    OK(galloc_resize(p, MIB(2), s));
    OK(galloc_resize(p, KIB(100), s));
    OK(galloc_resize(p, MIB(1), s));
    inside_hold_paging(pool, 0);
    alarm(0);
    OK(galloc_free(p, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

TEST_MAIN()
