/* test_random.c - operations at random over several pools and streams, beside a model of the blocks that are live: no
   two overlap, and each has what was last written into it when it is freed; and beside accounts of what each pool's
   counters should be. GALLOC_SEED chooses the numbers, GALLOC_ROUNDS how many rounds. */

#include "setup.h"

enum { STREAMS = 5, POOLS = 3, BLOCKS = 96 };

typedef struct block {
    char *ptr; /* NULL: free slot */
    size_t bytes, room;
    uint64_t tag;
    uint32_t pool, home; /* the stream that its last write was queued on */
} block;

/* What the test knows of a pool by itself. Peaks, totals and counts: since the last reset. */
typedef struct account {
    size_t live, blocks;
    size_t live_peak, blocks_peak;
    size_t live_total;
    uint64_t mallocs, frees, failures, rejections, no_memory, whole_ladders;
    galloc_stats told; /* the last time; its peaks are the highest current values that were told */
    uint64_t hits, served, pages_made; /* when they were told the last time */
    size_t reserved_most;              /* of all peaks, those before resets among them */
    galloc_driver calls;               /* before the last reset */
    galloc_torch_stats torch;          /* as `told` */
    size_t reserved_added, cached_added, allocated_added; /* increases from one time to the next */
} account;

typedef struct play {
    dice d;
    galloc_pool *pool[POOLS];
    account account[POOLS];
    galloc_config config[POOLS]; /* as asked for */
    int faults;                  /* calls of the driver may fail */
    int giants;                  /* some requests are for more than a pool may hold */
    int scarce;                  /* the device has less than the pools may hold */
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

/* One of the next calls of the driver for memory, or for order, fails. Those that ask about the stream do not: then the
   call would not reach the pool. */
static void begin_faults(play *p)
{
    static const char *const functions[] = {"cuMemCreate",   "cuMemMap",      "cuMemSetAccess", "cuMemUnmap",
                                            "cuMemRelease",  "cuMemAlloc",    "cuMemFree",      "cuEventCreate",
                                            "cuEventRecord", "cuStreamWaitEvent"};
    if (!p->faults || roll_below(&p->d, 2)) return;
    sim_fail(functions[roll_below(&p->d, sizeof functions / sizeof *functions)], 1 + roll_below(&p->d, 3), 0, 0);
}

static void end_faults(play *p)
{
    if (p->faults) sim_fail_clear();
}

/* ---- accounts ---------------------------------------------------------------------------------------------------- */

static void account_of_live(account *a, size_t before, size_t now, long blocks)
{
    a->live += now - before;
    a->blocks += (size_t)blocks;
    if (now > before) a->live_total += now - before;
    a->live_peak = larger(a->live_peak, a->live);
    a->blocks_peak = larger(a->blocks_peak, a->blocks);
}

static void account_of_malloc(account *a, size_t bytes)
{
    account_of_live(a, 0, bytes, 1);
    a->mallocs++;
}

static void account_of_free(account *a, size_t bytes)
{
    account_of_live(a, bytes, 0, -1);
    a->frees++;
}

/* An allocation failed, or what is no allocation: the growth of a block, a reservation. */
static void account_of_failure(account *a, int allocation)
{
    galloc_report report;
    a->failures += (uint64_t)allocation;
    if (galloc_oom_report(&report) != cudaSuccess) return;
    a->rejections += (uint64_t)(allocation && report.rejected);
    a->whole_ladders += (uint64_t)!report.rejected;
    a->no_memory++;
}

static void account_of_reset(account *a)
{
    size_t live = a->live, blocks = a->blocks, most = a->reserved_most;
    galloc_driver calls = a->calls;
    galloc_stats told = a->told;
    memset(a, 0, sizeof *a);
    a->reserved_most = most;
    a->calls = calls;
    a->live = a->live_peak = live;
    a->blocks = a->blocks_peak = blocks;
    a->told.reserved.peak = a->told.reserved.current = told.reserved.current;
    a->told.cached.peak = a->told.cached.current = told.cached.current;
    a->told.allocated.peak = a->told.allocated.current = told.allocated.current;
}

/* Every change of the pool has been told. */
static int is_exact(const play *p, int pool)
{
    const galloc_config *config = &p->config[pool];
    return config->stats_exact || config->backend || config->like || config->history || config->lane_bytes == 0;
}

/* Returns by how much it has grown. */
static size_t note_told(galloc_stat *told, const galloc_stat *now)
{
    size_t more = now->current > told->current ? now->current - told->current : 0;
    told->current = now->current;
    told->peak = larger(told->peak, now->current);
    return more;
}

/* The one allocation since the last time, if there was one, is a hit if it neither created nor moved pages. */
static void expect_hit(const account *a, const galloc_stats *s)
{
    if (s->mallocs != a->served + 1) EXPECT_EQ(s->hits, a->hits);
    else EXPECT_EQ(s->hits, a->hits + (s->grows + s->moves == a->pages_made));
}

/* Compares all counters of the pool with its account. often: this is done after each call. */
static void expect_account(play *p, int pool, int often)
{
    account *a = &p->account[pool];
    galloc_stats s = stats_of(p->pool[pool]);
    const galloc_stats *told = &a->told;
    int exact = often || is_exact(p, pool);
    EXPECT_EQ(s.live.current, a->live);
    EXPECT_EQ(s.blocks.current, a->blocks);
    EXPECT_EQ(s.live.total, a->live_total);
    EXPECT_EQ(s.blocks.total, a->mallocs);
    EXPECT_EQ(s.mallocs, a->mallocs);
    EXPECT_EQ(s.frees, a->frees);
    EXPECT_EQ(s.failures, a->failures);
    EXPECT_EQ(s.rejections, a->rejections);
    if (exact) EXPECT_EQ(s.live.peak, a->live_peak);
    if (exact) EXPECT_EQ(s.blocks.peak, a->blocks_peak);
    EXPECT(s.live.peak <= a->live_peak && s.live.peak >= s.live.current);
    EXPECT(s.blocks.peak <= a->blocks_peak && s.blocks.peak >= s.blocks.current);
    a->reserved_added += note_told(&a->told.reserved, &s.reserved);
    a->cached_added += note_told(&a->told.cached, &s.cached);
    a->allocated_added += note_told(&a->told.allocated, &s.allocated);
    EXPECT(s.reserved.peak >= told->reserved.peak && s.reserved.total >= a->reserved_added);
    EXPECT(s.cached.peak >= told->cached.peak && s.cached.total >= a->cached_added);
    EXPECT(s.cached.peak <= s.reserved.peak);
    EXPECT(s.allocated.peak >= told->allocated.peak && s.allocated.peak <= s.reserved.peak);
    if (often) EXPECT_EQ(s.allocated.peak, told->allocated.peak);
    if (often) EXPECT_EQ(s.allocated.total, a->allocated_added);
    EXPECT(s.allocated.total >= a->allocated_added && s.hits <= s.mallocs);
    EXPECT_EQ(s.graph_bytes + s.graphs, 0);
    EXPECT_EQ(s.moves == 0, s.moved_bytes == 0);
    EXPECT_EQ(s.collections == 0, s.collected_bytes == 0);
    EXPECT(s.moved_bytes >= s.moves * MIB(2) && s.collected_bytes >= s.collections * MIB(2));
    if (!p->faults) EXPECT_EQ(s.quarantined, 0);
    a->reserved_most = larger(a->reserved_most, s.reserved.peak);
    if (often) expect_hit(a, &s);
    a->hits = s.hits;
    a->served = s.mallocs;
    a->pages_made = s.grows + s.moves;
}

/* ---- the reports, beside the counters ---------------------------------------------------------------------------- */

typedef struct report {
    char text[1 << 18];
    size_t length;
} report;

static int keep(void *user, const void *data, size_t bytes)
{
    report *r = (report *)user;
    if (r->length + bytes >= sizeof r->text) return 1;
    memcpy(r->text + r->length, data, bytes);
    r->text[r->length += bytes] = 0;
    return 0;
}

/* Adds up the numbers behind `key` in the parts of a snapshot that have `state` close behind. */
static size_t sum_of(const report *r, const char *key, const char *state)
{
    size_t sum = 0, length = strlen(key);
    for (const char *at = r->text; (at = strstr(at, key)) != NULL;) {
        at += length;
        const char *end = strchr(at, '}'), *found = state ? strstr(at, state) : at;
        if (found && end && found < end) sum += strtoull(at, NULL, 10);
    }
    return sum;
}

/* The snapshot and the list of what is live say what the counters say. */
static void expect_reports(play *p, int pool)
{
    static report r;
    char text[GALLOC_REPORT_TEXT];
    unsigned long long blocks = 0, bytes = 0;
    galloc_stats s = stats_of(p->pool[pool]);
    r.length = 0;
    OK(galloc_snapshot(p->pool[pool], GALLOC_SNAPSHOT_JSON, keep, &r));
    EXPECT_EQ(sum_of(&r, "\"total_size\":", NULL) + sum_of(&r, "\"kept_by_driver\":", NULL), s.reserved.current);
    EXPECT_EQ(sum_of(&r, "\"size\":", "\"active_allocated\""), s.allocated.current);
    EXPECT_EQ(sum_of(&r, "\"allocated_size\":", NULL), s.allocated.current);
    EXPECT_EQ(sum_of(&r, "\"requested_size\":", "\"active_allocated\""), s.live.current);
    EXPECT_EQ(sum_of(&r, "\"live\":", NULL), s.live.current);
    EXPECT_EQ(sum_of(&r, "\"live_peak\":", NULL), s.live.peak);
    EXPECT_EQ(sum_of(&r, "\"reserved_peak\":", NULL), s.reserved.peak);
    EXPECT_EQ(sum_of(&r, "\"mallocs\":", NULL), s.mallocs);
    EXPECT_EQ(sum_of(&r, "\"frees\":", NULL), s.frees);
    EXPECT_EQ(sum_of(&r, "\"failures\":", NULL), s.failures);
    OK(galloc_live_text(p->pool[pool], text, sizeof text));
    if (!s.blocks.current) return;
    EXPECT_EQ(sscanf(text, "blocks in use: %llu, of %llu", &blocks, &bytes), 2);
    EXPECT_EQ(blocks, s.blocks.current);
}

static void expect_streams(play *p, int pool)
{
    galloc_stream_stats streams[64];
    galloc_stats s = stats_of(p->pool[pool]);
    int n = 0;
    OK(galloc_pool_streams(p->pool[pool], streams, 64, &n));
    for (int i = 0; i < n && i < 64; i++) EXPECT(streams[i].stranded <= s.free_bytes);
}

/* Peaks are not below what was told before, and numbers of small and of large blocks add up. */
static void expect_torch_stat(galloc_torch_stat *told, const galloc_torch_stat *stat)
{
    (void)note_told(&told->all, &stat->all);
    (void)note_told(&told->small_pool, &stat->small_pool);
    (void)note_told(&told->large_pool, &stat->large_pool);
    EXPECT(stat->all.peak >= told->all.peak && stat->small_pool.peak >= told->small_pool.peak);
    EXPECT(stat->large_pool.peak >= told->large_pool.peak);
    EXPECT_EQ(stat->all.current, stat->small_pool.current + stat->large_pool.current);
    EXPECT_EQ(stat->all.total, stat->small_pool.total + stat->large_pool.total);
    EXPECT(stat->all.peak <= stat->small_pool.peak + stat->large_pool.peak);
    EXPECT(stat->all.peak >= larger(stat->small_pool.peak, stat->large_pool.peak));
}

/* What the pools counted together is what the device has seen. */
static void expect_device(play *p)
{
    uint64_t created = 0, released = 0, mapped = 0, unmapped = 0, allocated = 0, freed = 0;
    size_t addresses = 0, most = 0;
    for (int k = 0; k < POOLS; k++) {
        const account *a = &p->account[k];
        galloc_stats s = stats_of(p->pool[k]);
        created += a->calls.create + s.driver.create;
        released += a->calls.release + s.driver.release;
        mapped += a->calls.map + s.driver.map;
        unmapped += a->calls.unmap + s.driver.unmap;
        allocated += a->calls.mem_alloc + s.driver.mem_alloc;
        freed += a->calls.mem_free + s.driver.mem_free;
        addresses += s.addresses;
        most += larger(a->reserved_most, s.reserved.peak);
        if (p->config[k].backend) most += MIB(256);
    }
    EXPECT_EQ(created, sim_calls("cuMemCreate"));
    EXPECT_EQ(released, sim_calls("cuMemRelease"));
    EXPECT_EQ(mapped, sim_calls("cuMemMap"));
    EXPECT_EQ(unmapped, sim_calls("cuMemUnmap"));
    EXPECT_EQ(allocated, sim_calls("cuMemAlloc"));
    EXPECT_EQ(freed, sim_calls("cuMemFree"));
    EXPECT_EQ(addresses, sim_addresses());
    /* Pages that were created for a request, and the next of which was refused, were in no counter. */
    if (!p->faults && !p->scarce) EXPECT(most >= sim_physical_peak(0));
}

/* PyTorch's counters, beside galloc's and the account. */
static void expect_torch(play *p, int pool)
{
    account *a = &p->account[pool];
    galloc_stats s = stats_of(p->pool[pool]);
    galloc_torch_stats t;
    size_t segments = 0;
    OK(galloc_pool_torch_stats(p->pool[pool], &t));
    for (int i = 0; i < GALLOC_PAGE_SIZES; i++) segments += s.pages[i].count;
    EXPECT_EQ(t.allocation.all.current, a->blocks);
    EXPECT_EQ(t.allocation.all.peak, a->blocks_peak);
    EXPECT_EQ(t.allocation.all.total, a->mallocs);
    EXPECT_EQ(t.requested_bytes.all.current, a->live);
    EXPECT_EQ(t.requested_bytes.all.peak, a->live_peak);
    EXPECT_EQ(t.requested_bytes.all.total, a->live_total);
    EXPECT_EQ(t.allocated_bytes.all.current, s.allocated.current);
    EXPECT_EQ(t.allocated_bytes.all.peak, s.allocated.peak);
    EXPECT_EQ(t.allocated_bytes.all.total, s.allocated.total);
    EXPECT_EQ(t.reserved_bytes.all.current, s.reserved.current);
    EXPECT_EQ(t.reserved_bytes.all.peak, s.reserved.peak);
    EXPECT_EQ(t.reserved_bytes.all.total, s.reserved.total);
    EXPECT_EQ(t.segment.all.current, segments);
    EXPECT_EQ(t.segment.all.total, t.num_device_alloc);
    EXPECT_EQ(t.num_ooms, a->no_memory);
    EXPECT(t.num_alloc_retries >= a->whole_ladders && t.num_sync_all_streams >= a->whole_ladders);
    expect_torch_stat(&a->torch.allocation, &t.allocation);
    expect_torch_stat(&a->torch.segment, &t.segment);
    expect_torch_stat(&a->torch.active, &t.active);
    expect_torch_stat(&a->torch.inactive_split, &t.inactive_split);
    expect_torch_stat(&a->torch.allocated_bytes, &t.allocated_bytes);
    expect_torch_stat(&a->torch.reserved_bytes, &t.reserved_bytes);
    expect_torch_stat(&a->torch.active_bytes, &t.active_bytes);
    expect_torch_stat(&a->torch.inactive_split_bytes, &t.inactive_split_bytes);
    expect_torch_stat(&a->torch.requested_bytes, &t.requested_bytes);
    EXPECT(t.active.all.current >= t.allocation.all.current);
    EXPECT(t.oversize_allocations.current <= t.allocation.all.current);
    EXPECT(t.oversize_segments.current <= t.segment.all.current);
}

/* ---- operations -------------------------------------------------------------------------------------------------- */

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
    if (odd == 3 && p->giants) request.bytes += MIB(90);
    begin_faults(p);
    cudaError_t err = galloc_alloc(&ptr, &request);
    end_faults(p);
    if (err != cudaSuccess) {
        EXPECT_EQ(err, cudaErrorMemoryAllocation);
        EXPECT(ptr == NULL);
        account_of_failure(&p->account[pool], 1);
        p->refused++;
        return;
    }
    p->served++;
    account_of_malloc(&p->account[pool], request.bytes);
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
    account_of_free(&p->account[b->pool], b->bytes);
}

static void do_resize(play *p, block *b)
{
    size_t bytes = b->room && roll_below(&p->d, 2) ? b->room : roll_bytes(&p->d, b->bytes * 2);
    begin_faults(p);
    cudaError_t err = galloc_resize(b->ptr, bytes, p->s[b->home]);
    end_faults(p);
    EXPECT(may_refuse(err));
    if (err != cudaSuccess) {
        account_of_failure(&p->account[b->pool], 0);
        return;
    }
    account_of_live(&p->account[b->pool], b->bytes, bytes, 0);
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
    int exact = 1;
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
        if (p->config[k].backend != GALLOC_BACKEND_CUDA_MALLOC_ASYNC) EXPECT(stats.reserved.peak <= p->limit[k]);
        expect_account(p, (int)k, 0);
        physical += stats.reserved.current;
        exact &= !p->config[k].backend; /* the device rounds what these ask for */
    }
    if (exact) EXPECT_EQ(physical, sim_physical(0));
}

static void step(play *p)
{
    uint32_t k = roll_below(&p->d, BLOCKS), dice_roll = roll_below(&p->d, 200);
    block *b = &p->block[k];
    if (dice_roll < 2) {
        (void)galloc_pool_trim(p->pool[dice_roll], roll_bytes(&p->d, MIB(64)), NULL);
    } else if (dice_roll < 4) {
        cudaError_t err = galloc_pool_reserve(p->pool[dice_roll - 2], roll_bytes(&p->d, MIB(32)));
        EXPECT(may_refuse(err));
        if (err != cudaSuccess) account_of_failure(&p->account[dice_roll - 2], 0);
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
        p->config[i] = config;
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

/* ---- with all kinds of settings, the counters compared after each step ------------------------------------------- */

static const char *const kinds[] = {
    "", "stats:exact", "lane_bytes:0", "lane_bytes:4M", "expandable_segments:False",
    "expandable_segments:False,stats:exact", "strategy:pooled", "strategy:pooled,stats:exact", "strategy:heuristic",
    "strategy:heuristic,stats:exact", "like:pytorch", "like:pytorch,max_split_size:24M",
    "like:pytorch,gc_threshold:0.5,roundup_power2_divisions:4", "like:pytorch,expandable_segments:True",
    "backend:cudaMalloc", "backend:cudaMallocAsync", "history:50", "gc_age:1ms", "gc_threshold:0.4",
    "debug:guards+poison", "debug:quarantine", "roundup_power2_divisions:4", "throw_on_cudamalloc_oom:True",
    "wait_limit_ms:0", "reuse:none", "overhead:0", "growth:16M", "expandable_segments:False,max_split_size:24M"};

enum { KINDS = sizeof kinds / sizeof *kinds };

static int is_torch(const galloc_config *config) { return config->like && !config->expandable_segments; }

/* `often`: after each step. Otherwise counters that are told only now and then keep more to themselves. */
static void expect_counted(play *p, int i, int often)
{
    for (int k = 0; k < POOLS; k++) {
        if (often || i % 20 == 19) expect_account(p, k, often);
        if ((often || i % 20 == 19) && is_torch(&p->config[k])) expect_torch(p, k);
        if (i % 100 == 99) expect_reports(p, k);
        if (i % 100 == 99) expect_streams(p, k);
    }
}

static void reset_counters(play *p)
{
    int k = (int)roll_below(&p->d, POOLS);
    account *a = &p->account[k];
    galloc_stats before = stats_of(p->pool[k]);
#define ADD(name, function) a->calls.name += before.driver.name;
    GALLOC_DRIVER_CALLS(ADD)
    a->reserved_most = larger(a->reserved_most, before.reserved.peak);
    OK(galloc_pool_stats_reset(p->pool[k]));
    a->told = stats_of(p->pool[k]);
    account_of_reset(a);
    EXPECT_EQ(stats_of(p->pool[k]).live.peak, a->live);
    EXPECT_EQ(stats_of(p->pool[k]).reserved.peak, a->told.reserved.current);
    EXPECT_EQ(stats_of(p->pool[k]).reserved.total + stats_of(p->pool[k]).cached.total, 0);
    expect_account(p, k, 0);
}

static void play_counted(uint64_t seed)
{
    static play all;
    play *p = &all;
    sim_options options = sim_defaults();
    int often = seed % 2 == 0;
    memset(p, 0, sizeof *p);
    p->d.state = options.seed = seed;
    p->faults = seed % 5 == 4;
    p->giants = 1;
    p->scarce = seed % 4 < 2;
    options.memory = p->scarce ? MIB(160) : MIB(256);
    options.pace = (int)(seed % 3) - 1;
    begin_with(options);
    for (int i = 0; i < STREAMS; i++) p->s[i] = stream_new();
    for (int i = 0; i < POOLS; i++) {
        galloc_config config = galloc_config_default();
        OK(galloc_config_parse(&config, kinds[(seed / 2 + (uint64_t)i * 9) % KINDS], NULL, 0));
        config.memory_limit = p->limit[i] = MIB(48) + MIB(16) * (size_t)i;
        p->pool[i] = pool_new(&config);
        OK(galloc_pool_config(p->pool[i], &p->config[i]));
    }
    for (int i = 0; i < 400; i++) {
        if (roll_below(&p->d, 80)) step(p);
        else reset_counters(p);
        expect_counted(p, i, often);
        if (i % 100 == 99) expect_counters(p);
        if (i % 100 == 99) expect_device(p);
    }
    for (int i = 0; i < BLOCKS; i++)
        if (p->block[i].ptr) do_free(p, &p->block[i]);
    expect_counters(p);
    for (int i = 0; i < POOLS; i++) pool_end(p->pool[i]);
    finish();
}

TEST(counters_agree_with_an_account)
{
    int most = (rounds() + 1) / 2;
    for (int i = 0; i < most; i++) {
        long before = test_failures;
        play_counted(test_seed() + (uint64_t)i);
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

/* What each unit must wait for, of each stream state. */
typedef struct demand {
    uint64_t epoch[LANES][UNITS];
} demand;

static void demand_mark(demand *d, uint32_t lane, uint32_t begin, uint32_t end, uint64_t epoch)
{
    for (uint32_t i = begin; i < end; i++)
        if (d->epoch[lane][i] < epoch) d->epoch[lane][i] = epoch;
}

/* The list asks for all of the demand; of a stream state one mark at most is about a unit, and says something. */
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
