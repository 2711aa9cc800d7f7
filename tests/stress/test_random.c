/* test_random.c - operations at random over several pools and streams, beside a model of the blocks that are live: no
   two overlap, and each has what was last written into it when it is freed. GALLOC_SEED chooses the numbers,
   GALLOC_ROUNDS how many rounds. */

#include "setup.h"

enum { STREAMS = 5, POOLS = 3, BLOCKS = 96 };

typedef struct block {
    char *ptr; /* NULL: free slot */
    size_t bytes, room;
    uint64_t tag;
    uint32_t pool, home; /* the stream that its last write was queued on */
} block;

typedef struct play {
    dice d;
    galloc_pool *pool[POOLS];
    size_t limit[POOLS];
    cudaStream_t s[STREAMS];
    block block[BLOCKS];
    uint64_t tag;
    long served, refused;
} play;

static int may_refuse(cudaError_t err)
{
    return err == cudaSuccess || err == cudaErrorMemoryAllocation || err == cudaErrorNotSupported;
}

static void write_block(play *p, block *b, uint32_t stream)
{
    if (b->home != stream) order(p->s[b->home], p->s[stream]);
    b->home = stream;
    b->tag = ++p->tag;
    put(p->s[stream], b->ptr, b->bytes, b->tag);
}

static void expect_apart(const play *p, const block *b)
{
    for (int i = 0; i < BLOCKS; i++) {
        const block *o = &p->block[i];
        if (o->ptr && o != b) EXPECT(o->ptr + o->bytes <= b->ptr || b->ptr + b->bytes <= o->ptr);
    }
}

static void do_malloc(play *p, block *b)
{
    galloc_request request = {0};
    void *ptr = p;
    uint32_t stream = roll_below(&p->d, STREAMS), pool = roll_below(&p->d, POOLS), odd = roll_below(&p->d, 12);
    request.bytes = roll_bytes(&p->d, MIB(10));
    request.stream = p->s[stream];
    request.pool = p->pool[pool];
    request.tag = roll(&p->d);
    request.lifetime = odd == 0 ? GALLOC_LIFETIME_LONG : GALLOC_LIFETIME_ANY;
    if (odd == 1) request.alignment = (size_t)1 << roll_below(&p->d, 24);
    if (odd == 2) request.max_bytes = request.bytes + roll_bytes(&p->d, MIB(16));
    cudaError_t err = galloc_alloc(&ptr, &request);
    if (err != cudaSuccess) {
        EXPECT_EQ(err, cudaErrorMemoryAllocation);
        EXPECT(ptr == NULL);
        p->refused++;
        return;
    }
    p->served++;
    EXPECT_EQ((uintptr_t)ptr % (request.alignment > 512 ? request.alignment : 512), 0);
    b->ptr = ptr;
    b->bytes = request.bytes;
    b->room = request.max_bytes;
    b->pool = pool;
    b->home = stream;
    expect_apart(p, b);
    write_block(p, b, stream);
    galloc_pointer info = info_of(b->ptr + roll(&p->d) % b->bytes);
    EXPECT(info.pool == request.pool && info.base == ptr && info.tag == request.tag);
    EXPECT(info.requested == request.bytes && info.state == GALLOC_STATE_USED);
}

/* Freed on its stream, on another that comes after it, after several, or with a use on another stream recorded. */
static void do_free(play *p, block *b)
{
    uint32_t other = roll_below(&p->d, STREAMS), how = roll_below(&p->d, 8);
    cudaStream_t home = p->s[b->home], s = p->s[other];
    look(home, b->ptr, b->bytes, b->tag);
    if (how < 4) {
        OK(galloc_free(b->ptr, home));
    } else {
        order(home, s);
        look(s, b->ptr, b->bytes, b->tag);
        if (how == 4) {
            OK(galloc_record_stream(b->ptr, s));
            OK(galloc_free(b->ptr, home));
        } else if (how == 5) {
            cudaStream_t both[2] = {home, s};
            OK(galloc_free_after(b->ptr, both, 2));
        } else {
            OK(galloc_free(b->ptr, s));
        }
    }
    b->ptr = NULL;
}

static void do_resize(play *p, block *b)
{
    size_t bytes = b->room && roll_below(&p->d, 2) ? b->room : roll_bytes(&p->d, b->bytes * 2);
    cudaError_t err = galloc_resize(b->ptr, bytes, p->s[b->home]);
    EXPECT(may_refuse(err));
    if (err != cudaSuccess) return;
    look(p->s[b->home], b->ptr, bytes < b->bytes ? bytes : b->bytes, b->tag);
    b->bytes = bytes;
    expect_apart(p, b);
    write_block(p, b, b->home);
}

static void replace_stream(play *p, uint32_t k)
{
    uint32_t heir = (k + 1) % STREAMS;
    for (int i = 0; i < BLOCKS; i++) {
        block *b = &p->block[i];
        if (b->ptr && b->home == k) write_block(p, b, heir);
    }
    if (roll_below(&p->d, 3)) OK(galloc_stream_retire(p->s[k]));
    stream_end(p->s[k]);
    p->s[k] = stream_new();
}

static void expect_counters(play *p)
{
    size_t physical = 0;
    for (int i = 0; i < BLOCKS; i++) {
        const block *b = &p->block[i];
        size_t step = b->bytes / 9 + 1;
        for (size_t at = 0; b->ptr && at < b->bytes; at += step) EXPECT(info_of(b->ptr + at).base == b->ptr);
    }
    for (uint32_t k = 0; k < POOLS; k++) {
        galloc_stats stats = stats_of(p->pool[k]);
        size_t live = 0, blocks = 0;
        EXPECT_EQ(stats.damages, 0);
        for (int i = 0; i < BLOCKS; i++) {
            const block *b = &p->block[i];
            if (!b->ptr || b->pool != k) continue;
            live += b->bytes;
            blocks++;
        }
        expect_healthy(p->pool[k], 0);
        EXPECT_EQ(stats.live.current, live);
        EXPECT_EQ(stats.blocks.current, blocks);
        EXPECT(stats.reserved.peak <= p->limit[k]);
        physical += stats.reserved.current;
    }
    EXPECT_EQ(physical, sim_physical(0));
}

static void step(play *p)
{
    uint32_t k = roll_below(&p->d, BLOCKS), dice_roll = roll_below(&p->d, 200);
    block *b = &p->block[k];
    if (dice_roll < 2) {
        (void)galloc_pool_trim(p->pool[dice_roll], roll_bytes(&p->d, MIB(64)), NULL);
    } else if (dice_roll < 4) {
        EXPECT(may_refuse(galloc_pool_reserve(p->pool[dice_roll - 2], roll_bytes(&p->d, MIB(32)))));
    } else if (dice_roll < 6) {
        replace_stream(p, roll_below(&p->d, STREAMS));
    } else if (dice_roll < 8) {
        sim_run(-1);
    } else if (!b->ptr) {
        do_malloc(p, b);
    } else if (dice_roll < 30) {
        do_resize(p, b);
    } else if (dice_roll < 60) {
        write_block(p, b, roll_below(&p->d, STREAMS));
    } else {
        do_free(p, b);
    }
}

static void play_round(uint64_t seed)
{
    static play all;
    play *p = &all;
    sim_options options = sim_defaults();
    memset(p, 0, sizeof *p);
    p->d.state = seed;
    options.seed = seed;
    options.memory = MIB(192);
    options.pace = (int)(seed % 4) == 3 ? -1 : (int)(seed % 4) - 1;
    options.lag = seed % 5 == 0 ? 30 : 0;
    begin_with(options);
    for (int i = 0; i < STREAMS; i++) p->s[i] = stream_new();
    for (int i = 0; i < POOLS; i++) {
        galloc_config config = config_limit(p->limit[i] = MIB(48) + MIB(16) * (size_t)i);
        config.expandable_segments = i != 1;
        config.reuse = i == 0 ? (int)(seed % 8) : 7;
        config.overhead = i == 2 ? 0 : 0.1 * (double)(seed % 3);
        if (i == 0 && seed % 3 == 0) config.strategy = GALLOC_STRATEGY_POOLED;
        if (seed % 6 == 5) config.debug = i ? GALLOC_DEBUG_GUARDS | GALLOC_DEBUG_POISON : GALLOC_DEBUG_QUARANTINE;
        p->pool[i] = pool_new(&config);
    }
    for (int i = 0; i < 500; i++) {
        step(p);
        if (i % 50 == 49) expect_counters(p);
    }
    for (int i = 0; i < BLOCKS; i++)
        if (p->block[i].ptr) do_free(p, &p->block[i]);
    expect_counters(p);
    EXPECT(p->served > 0);
    for (int i = 0; i < POOLS; i++) pool_end(p->pool[i]);
    finish();
}

static int rounds(void)
{
    const char *text = getenv("GALLOC_ROUNDS");
    return text && *text ? atoi(text) : 400;
}

TEST(random_operations)
{
    printf("GALLOC_SEED=%llu\n", (unsigned long long)test_seed());
    for (int i = 0; i < rounds(); i++) {
        long before = test_failures;
        play_round(test_seed() + (uint64_t)i);
        if (test_failures > before) {
            printf("    first failure with GALLOC_SEED=%llu GALLOC_ROUNDS=1\n",
                   (unsigned long long)(test_seed() + (uint64_t)i));
            break;
        }
    }
}

/* The same in a device that is far too small for it: most of the time is spent on the ladder. */
TEST(random_operations_with_real_contents)
{
    for (int i = 0; i < (rounds() + 39) / 40; i++) {
        sim_options options = sim_defaults();
        options.mode = SIM_BACKED;
        options.memory = MIB(64);
        options.seed = test_seed() + (uint64_t)i;
        begin_with(options);
        dice d = {options.seed};
        cudaStream_t s[3] = {stream_new(), stream_new(), stream_new()};
        galloc_pool *pool = pool_new(NULL);
        block held[24] = {{0}};
        for (uint64_t n = 1; n <= 300; n++) {
            block *b = &held[roll_below(&d, 24)];
            if (b->ptr) {
                look(s[b->home], b->ptr, b->bytes, b->tag);
                OK(galloc_free(b->ptr, s[b->home]));
            }
            void *ptr = NULL;
            b->home = roll_below(&d, 3);
            b->bytes = roll_bytes(&d, MIB(8));
            b->tag = n;
            if (galloc_pool_malloc(pool, &ptr, b->bytes, s[b->home]) == cudaSuccess) put(s[b->home], ptr, b->bytes, n);
            b->ptr = ptr;
        }
        for (int k = 0; k < 24; k++) OK(galloc_free(held[k].ptr, s[held[k].home]));
        pool_end(pool);
        finish();
    }
}

/* ---- marks, beside a model --------------------------------------------------------------------------------------- */

enum { LANES = 3, UNITS = 24 };

/* What each unit must wait for, of each lane. */
typedef struct demand {
    uint64_t epoch[LANES][UNITS];
} demand;

static void demand_mark(demand *d, uint32_t lane, uint32_t begin, uint32_t end, uint64_t epoch)
{
    for (uint32_t i = begin; i < end; i++)
        if (d->epoch[lane][i] < epoch) d->epoch[lane][i] = epoch;
}

/* The list asks for all of the demand; of a lane one mark at most is about a unit, and says something. */
static void expect_met(const demand *d, const inside_marks *list)
{
    inside_mark mark;
    for (int lane = 0; lane < LANES; lane++) {
        for (uint32_t i = 0; i < UNITS; i++) {
            uint64_t asked = 0;
            int marks = 0;
            for (int n = 0; inside_marks_get(list, n, &mark); n++) {
                if (mark.stream != lane || mark.begin > i || mark.end <= i) continue;
                asked = mark.epoch;
                marks++;
            }
            EXPECT(asked >= d->epoch[lane][i] && marks <= 1);
        }
    }
    for (int n = 0; inside_marks_get(list, n, &mark); n++) EXPECT(mark.begin < mark.end);
}

static void roll_mark(dice *r, demand *d, inside_marks *list)
{
    uint32_t lane = roll_below(r, LANES), begin = roll_below(r, UNITS);
    uint32_t end = begin + 1 + roll_below(r, UNITS - begin);
    uint64_t epoch = 1 + roll_below(r, 6);
    demand_mark(d, lane, begin, end, epoch);
    inside_marks_add(list, (inside_mark){(int)lane, epoch, begin, end});
}

/* Marks are added, cut in two, joined again and made coarser: more may be asked for than is needed, never less. */
TEST(marks_never_ask_for_less)
{
    begin();
    galloc_pool *pool = pool_new(NULL);
    inside_marks *list = inside_marks_new(pool, LANES);
    dice r = {test_seed()};
    for (int round = 0; round < 3000; round++) {
        demand d;
        memset(&d, 0, sizeof d);
        EXPECT(inside_marks_begin(list));
        for (int n = 1 + (int)roll_below(&r, 12); n > 0; n--) {
            roll_mark(&r, &d, list);
            expect_met(&d, list);
        }
        inside_marks_cut(list, roll_below(&r, UNITS + 1));
        expect_met(&d, list);
        inside_marks_coarsen(list);
        expect_met(&d, list);
        EXPECT_EQ(inside_marks_clear(list), 0);
    }
    inside_marks_end(list);
    pool_end(pool);
    finish();
}

TEST_MAIN()
