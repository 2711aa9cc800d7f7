/* test_history.c - galloc_pool_history: what a snapshot tells of the past fits what it tells of the present, in all
   kinds of programs; and what is noted of single calls. */

#include "setup.h"

#include "events.h"

/* ---- going back in time ------------------------------------------------------------------------------------------ */

/* What is there at a time: ranges with memory, and used blocks. Small enough for lists. */
typedef struct range {
    uint64_t addr, bytes;
    int freed; /* its free is complete, and not yet requested, when seen from behind */
} range;

typedef struct past {
    range runs[4000], blocks[4000];
    int n_runs, n_blocks;
    int wrong;
} past;

static int meets(const range *r, uint64_t addr, uint64_t bytes)
{
    return r->addr < addr + bytes && addr < r->addr + r->bytes;
}

static void say_wrong(past *p, const char *what, uint64_t addr, uint64_t bytes)
{
    if (!p->wrong++) printf("    %s at %#llx, %llu bytes\n", what, (unsigned long long)addr, (unsigned long long)bytes);
}

static void put_range(past *p, range *list, int *n, uint64_t addr, uint64_t bytes)
{
    range r = {addr, bytes, 0};
    if (*n < 4000) list[(*n)++] = r;
    else say_wrong(p, "too many ranges", addr, bytes);
}

static int block_at(const past *p, uint64_t addr)
{
    int i = 0;
    while (i < p->n_blocks && p->blocks[i].addr != addr) i++;
    return i;
}

/* Adds memory that has not been there. */
static void run_comes(past *p, uint64_t addr, uint64_t bytes)
{
    int i;
    for (i = 0; i < p->n_runs; i++)
        if (meets(&p->runs[i], addr, bytes)) say_wrong(p, "memory comes twice", addr, bytes);
    put_range(p, p->runs, &p->n_runs, addr, bytes);
}

/* Takes memory away, all of which must be there, and no block in it. */
static void run_goes(past *p, uint64_t addr, uint64_t bytes)
{
    uint64_t gone = 0;
    int i;
    for (i = 0; i < p->n_blocks; i++)
        if (meets(&p->blocks[i], addr, bytes)) say_wrong(p, "memory goes under a block", addr, bytes);
    for (i = 0; i < p->n_runs; i++) {
        range *r = &p->runs[i], whole = *r;
        uint64_t begin = whole.addr > addr ? whole.addr : addr;
        uint64_t end = whole.addr + whole.bytes < addr + bytes ? whole.addr + whole.bytes : addr + bytes;
        if (begin >= end) continue;
        gone += end - begin;
        r->bytes = begin - whole.addr;
        if (end < whole.addr + whole.bytes) put_range(p, p->runs, &p->n_runs, end, whole.addr + whole.bytes - end);
        if (!r->bytes) *r = p->runs[--p->n_runs], i--;
    }
    if (gone != bytes) say_wrong(p, "memory goes that is not there", addr, bytes);
}

/* Adds a block, all of whose bytes must have memory, and no other block in them. */
static void block_comes(past *p, uint64_t addr, uint64_t bytes)
{
    uint64_t there = 0;
    int i;
    for (i = 0; i < p->n_blocks; i++)
        if (meets(&p->blocks[i], addr, bytes)) say_wrong(p, "a block comes over another one", addr, bytes);
    for (i = 0; i < p->n_runs; i++) {
        uint64_t begin = larger(p->runs[i].addr, addr);
        uint64_t end = smaller(p->runs[i].addr + p->runs[i].bytes, addr + bytes);
        if (begin < end) there += end - begin;
    }
    if (there != bytes) say_wrong(p, "a block comes where there is no memory", addr, bytes);
    put_range(p, p->blocks, &p->n_blocks, addr, bytes);
    p->blocks[p->n_blocks - 1].freed = 1;
}

static void block_goes(past *p, uint64_t addr, uint64_t bytes)
{
    int i = block_at(p, addr);
    if (i == p->n_blocks || p->blocks[i].bytes != bytes || p->blocks[i].freed) {
        say_wrong(p, "an allocation of a block that is not there", addr, bytes);
        return;
    }
    p->blocks[i] = p->blocks[--p->n_blocks];
}

static void block_is_freed(past *p, uint64_t addr, uint64_t bytes)
{
    int i = block_at(p, addr);
    if (i == p->n_blocks || p->blocks[i].bytes != bytes || !p->blocks[i].freed)
        say_wrong(p, "a request to free a block that is not there", addr, bytes);
    else p->blocks[i].freed = 0;
}

static void undo(past *p, const value *e)
{
    const char *action = text_of(e, "action");
    uint64_t addr = value_of(e, "addr") ? number_of(e, "addr") : 0, bytes = number_of(e, "size");
    EXPECT(value_of(e, "stream") && value_of(e, "time_us") && value_of(e, "frames"));
    if (!strcmp(action, "alloc")) block_goes(p, addr, bytes);
    else if (!strcmp(action, "free_completed")) block_comes(p, addr, bytes);
    else if (!strcmp(action, "free_requested")) block_is_freed(p, addr, bytes);
    else if (!strcmp(action, "segment_map") || !strcmp(action, "segment_alloc")) run_goes(p, addr, bytes);
    else if (!strcmp(action, "segment_unmap") || !strcmp(action, "segment_free")) run_comes(p, addr, bytes);
    else EXPECT(!strcmp(action, "wait") || !strcmp(action, "oom") || !strcmp(action, "snapshot") ||
                !strcmp(action, "annotate"));
}

static past *now_of(const value *v)
{
    past *p = calloc(1, sizeof *p);
    const value *segment, *block;
    for (segment = value_of(v, "segments")->first; segment; segment = segment->next) {
        for (block = value_of(segment, "blocks")->first; block; block = block->next) {
            run_comes(p, number_of(block, "address"), number_of(block, "size"));
            EXPECT(strcmp(text_of(block, "state"), "active_pending_free")); /* PyTorch's viewer would miss its free */
            if (strcmp(text_of(block, "state"), "active_allocated")) continue;
            put_range(p, p->blocks, &p->n_blocks, number_of(block, "address"), number_of(block, "requested_size"));
        }
        EXPECT_EQ(number_of(segment, "stream"), 0);
    }
    return p;
}

/* Goes back over all events. Returns how many there are. complete: the history reaches back to the pool's beginning. */
static size_t check_history(galloc_pool *pool, int complete)
{
    value *v = snapshot(pool, GALLOC_SNAPSHOT_JSON);
    const value *e, **events;
    past *p = now_of(v);
    size_t n = value_count(events_of(v)), i = 0;
    uint64_t before = 0;
    events = malloc((n + 1) * sizeof *events);
    for (e = events_of(v)->first; e; e = e->next) {
        EXPECT(number_of(e, "time_us") >= before);
        before = number_of(e, "time_us");
        events[i++] = e;
    }
    while (i-- && !p->wrong) undo(p, events[i]);
    EXPECT_EQ(p->wrong, 0);
    if (complete) EXPECT_EQ(p->n_blocks + p->n_runs, 0);
    free(events);
    free(p);
    value_free(v);
    return n;
}

/* ---- random programs --------------------------------------------------------------------------------------------- */

typedef struct program {
    galloc_pool *pool;
    cudaStream_t streams[3];
    void *blocks[40];
    cudaStream_t of[40]; /* the stream that uses the block */
    uint64_t random;
} program;

static size_t chance(program *p, size_t n)
{
    p->random = p->random * 6364136223846793005u + 1442695040888963407u;
    return (size_t)(p->random >> 33) % n;
}

static void step(program *p, int growable)
{
    size_t k = chance(p, 40);
    void **block = &p->blocks[k];
    cudaStream_t stream = *block ? p->of[k] : p->streams[chance(p, 3)];
    galloc_request request;
    memset(&request, 0, sizeof request);
    request.bytes = 1 + chance(p, chance(p, 3) ? KIB(900) : MIB(24));
    request.stream = stream;
    request.pool = p->pool;
    request.tag = (uint32_t)chance(p, 5);
    if (growable && chance(p, 7) == 0) request.max_bytes = MIB(64);
    if (*block && chance(p, 5) == 0) {
        (void)galloc_resize(*block, 1 + chance(p, MIB(8)), stream);
    } else if (*block && chance(p, 5) == 0) {
        OK(galloc_free_after(*block, p->streams, 3));
        *block = NULL;
    } else if (*block) {
        OK(galloc_free(*block, stream));
        *block = NULL;
    } else if (!galloc_alloc(block, &request)) {
        p->of[k] = stream;
        put(stream, *block, 1, 1);
    }
}

static void random_program(const char *settings, size_t entries, int complete)
{
    galloc_config config = galloc_config_default();
    program p;
    size_t most = 0;
    int i;
    begin();
    memset(&p, 0, sizeof p);
    p.random = test_seed();
    OK(galloc_config_parse(&config, settings, NULL, 0));
    config.history = entries;
    p.pool = pool_new(&config);
    for (i = 0; i < 3; i++) p.streams[i] = stream_new();
    for (i = 0; i < 500; i++) {
        step(&p, !config.backend);
        if (i % 40 == 0) sim_run(-1);
        if (i % 90 == 77) OK(galloc_pool_trim(p.pool, stats_of(p.pool).reserved.current / 2, NULL));
        if (i % 33 == 0) most = larger(most, check_history(p.pool, complete));
    }
    for (i = 0; i < 40; i++) OK(galloc_free(p.blocks[i], p.of[i]));
    most = larger(most, check_history(p.pool, complete));
    EXPECT(complete ? most > 500 : most >= entries && most <= 2 * entries); /* a free is two events */
    for (i = 0; i < 3; i++) stream_end(p.streams[i]);
    pool_end(p.pool);
    finish();
}

static const char *const settings[] = {
    "memory_limit:2G", "memory_limit:200M", "overhead:0,memory_limit:1G", "memory_limit:2G,strategy:pooled",
    "memory_limit:1G,strategy:heuristic", "expandable_segments:False,memory_limit:2G", "like:pytorch,memory_limit:2G",
    "backend:cudaMalloc,memory_limit:2G", "backend:cudaMallocAsync,memory_limit:2G", "memory_limit:1G,gc_age:1ms",
    "memory_limit:1G,stream_check:off", "memory_limit:500M,stats:exact"};

TEST(going_back_from_now_finds_each_block_and_page)
{
    size_t i;
    for (i = 0; i < sizeof settings / sizeof *settings; i++) random_program(settings[i], 20000, 1);
}

TEST(the_same_when_the_ring_has_lost_the_beginning)
{
    size_t i;
    for (i = 0; i < sizeof settings / sizeof *settings; i++) random_program(settings[i], i % 2 ? 64 : 1, 0);
}

/* ---- real programs ------------------------------------------------------------------------------------------- */

#define TRACE_BLOCKS 4096

typedef struct traced {
    unsigned long long key;
    void *block;
} traced;

static traced *traced_at(traced *list, unsigned long long key)
{
    size_t i = (size_t)(key >> 9) * 2654435761u % TRACE_BLOCKS;
    while (list[i].key && list[i].key != key) i = (i + 1) % TRACE_BLOCKS;
    return &list[i];
}

/* Replays a trace, looks after each so many calls, and gives memory back between. */
static void trace(const char *name, const char *conf, long each, int complete)
{
    char line[200], action[20];
    unsigned long long key, bytes, stream;
    galloc_config config = galloc_config_default();
    cudaStream_t streams[4];
    traced *list = calloc(TRACE_BLOCKS, sizeof *list);
    galloc_pool *pool;
    FILE *file;
    long n = 0;
    int i;
    begin();
    OK(galloc_config_parse(&config, conf, NULL, 0));
    pool = pool_new(&config);
    for (i = 0; i < 4; i++) streams[i] = stream_new();
    snprintf(line, sizeof line, "gzip -cd bench/traces/%s.csv.gz", name);
    file = popen(line, "r");
    while (EXPECT(file) && fgets(line, sizeof line, file)) {
        traced *at;
        if (sscanf(line, "%*u,%*f,%19[^,],%llx,%llu,%llu", action, &key, &bytes, &stream) != 4) continue;
        at = traced_at(list, key);
        if (!strcmp(action, "allocate")) {
            at->key = key;
            at->block = get(pool, bytes, streams[stream % 4]);
        } else {
            OK(galloc_free(at->block, streams[stream % 4]));
            at->block = NULL;
        }
        if (++n % each) continue;
        (void)check_history(pool, complete);
        if (n % (2 * each) == 0) OK(galloc_pool_trim(pool, 0, NULL));
    }
    EXPECT(n > 4000);
    if (file) pclose(file);
    for (i = 0; i < TRACE_BLOCKS; i++) OK(galloc_free(list[i].block, NULL));
    OK(galloc_pool_trim(pool, 0, NULL));
    EXPECT(check_history(pool, complete) >= (complete ? 5000 : 500) && stats_of(pool).moves > 0);
    for (i = 0; i < 4; i++) stream_end(streams[i]);
    pool_end(pool);
    free(list);
    finish();
}

TEST(traces_of_real_programs)
{
    trace("moe_multistream", "history:100000", 800, 1);
    trace("rnn_speech_varlen", "history:100000,overhead:0", 800, 1);
    trace("rnn_speech_varlen", "history:500,overhead:0", 100, 0);
}

/* The kind of memory is in the names of its events: a segment is freed as a whole, pages are unmapped. */
TEST(what_is_given_back_has_the_name_of_its_kind)
{
    for (int fixed = 0; fixed < 2; fixed++) {
        galloc_config config = galloc_config_default();
        begin();
        config.expandable_segments = !fixed;
        config.history = 100;
        galloc_pool *pool = pool_new(&config);
        OK(galloc_free(get(pool, MIB(4), NULL), NULL));
        OK(galloc_pool_trim(pool, 0, NULL));
        value *v = snapshot(pool, GALLOC_SNAPSHOT_JSON);
        EXPECT_EQ(events_named(v, "segment_alloc") > 0, fixed);
        EXPECT_EQ(events_named(v, "segment_free") > 0, fixed);
        EXPECT_EQ(events_named(v, "segment_map") > 0, !fixed);
        EXPECT_EQ(events_named(v, "segment_unmap") > 0, !fixed);
        value_free(v);
        pool_end(pool);
        finish();
    }
}

/* Pages move: blocks of one size are replaced by blocks of another. */
TEST(moves_are_an_unmapping_and_a_mapping)
{
    galloc_config config = config_limit(MIB(128));
    galloc_pool *pool;
    void *small[32], *large;
    value *v;
    size_t i, moves;
    begin();
    config.history = 1000;
    pool = pool_new(&config);
    for (i = 0; i < 32; i++) small[i] = get(pool, MIB(4), NULL);
    for (i = 0; i < 32; i += 2) OK(galloc_free(small[i], NULL));
    sim_run(-1);
    large = get(pool, MIB(60), NULL);
    moves = stats_of(pool).moves;
    EXPECT(moves > 0);
    (void)check_history(pool, 1);
    v = snapshot(pool, GALLOC_SNAPSHOT_JSON);
    EXPECT(value_of(event_named(v, "segment_unmap"), "moved"));
    EXPECT(value_of(event_named(v, "segment_map"), "moved"));
    EXPECT_EQ(events_named(v, "segment_unmap"), moves);
    value_free(v);
    OK(galloc_free(large, NULL));
    for (i = 1; i < 32; i += 2) OK(galloc_free(small[i], NULL));
    OK(galloc_pool_trim(pool, 0, NULL));
    (void)check_history(pool, 1);
    pool_end(pool);
    finish();
}

/* Pages that the driver fails to unmap, or whose memory it fails to take back, are gone in the history and now. */
TEST(pages_that_the_driver_fails_to_take_back)
{
    static const char *const calls[] = {"cuMemUnmap", "cuMemRelease", "cuMemFree"};
    for (int i = 0; i < 3; i++) {
        begin();
        galloc_config config = galloc_config_default();
        config.history = 1000;
        config.expandable_segments = i < 2;
        galloc_pool *pool = pool_new(&config);
        void *p = get(pool, MIB(64), NULL);
        OK(galloc_free(p, NULL));
        sim_fail(calls[i], 1, 1, CUDA_ERROR_UNKNOWN);
        (void)galloc_pool_trim(pool, 0, NULL);
        (void)cudaGetLastError();
        sim_fail_clear();
        EXPECT(stats_of(pool).quarantined > 0);
        check_history(pool, 1);
        p = get(pool, MIB(8), NULL);
        check_history(pool, 1);
        OK(galloc_free(p, NULL));
        OK(galloc_pool_trim(pool, 0, NULL));
        EXPECT_EQ(stats_of(pool).quarantined, 0);
        check_history(pool, 1);
        pool_end(pool);
        finish();
    }
}

TEST(captures)
{
    galloc_config config = config_limit(GIB(1));
    galloc_pool *pool;
    cudaStream_t stream;
    cudaGraph_t graph = NULL;
    void *p, *q, *before;
    begin();
    config.history = 1000;
    pool = pool_new(&config);
    stream = stream_new();
    before = get(pool, MIB(3), stream);
    OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    p = get_used(pool, MIB(4), stream, 1);
    OK(galloc_free(p, stream));
    q = get_used(pool, MIB(2), stream, 2);
    OK(galloc_free(before, stream));
    OK(cudaStreamEndCapture(stream, &graph));
    (void)check_history(pool, 1);
    OK(galloc_free(q, stream));
    OK(cudaGraphDestroy(graph));
    (void)check_history(pool, 1);
    OK(galloc_pool_trim(pool, 0, NULL));
    (void)check_history(pool, 1);
    stream_end(stream);
    pool_end(pool);
    finish();
}

TEST(memory_that_a_reset_took)
{
    galloc_config config = config_fixed();
    galloc_pool *pool;
    void *p, *q;
    begin();
    config.history = 1000;
    pool = pool_new(&config);
    p = get(pool, MIB(4), NULL);
    q = get(pool, MIB(3), NULL);
    OK(cudaDeviceReset());
    OK(galloc_pool_trim(pool, 0, NULL));
    (void)check_history(pool, 1);
    OK(galloc_free(p, NULL));
    (void)check_history(pool, 1);
    OK(galloc_free(q, NULL));
    (void)check_history(pool, 1);
    pool_end(pool);
    finish();
}

/* Blocks in quarantine go with the memory that a reset took, before its addresses come back: the segment is gone in the
   history, too, and counts no more. */
TEST(memory_of_a_quarantine_that_a_reset_took)
{
    galloc_config config = config_fixed();
    OK(galloc_config_parse(&config, "history:1000,debug:quarantine", NULL, 0));
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(&config);
    void *used = get(pool, MIB(64), s);
    char *p = get(pool, 3000000, s), *q;
    OK(galloc_free(p, s));
    OK(cudaDeviceReset());
    s = stream_new();
    q = get(pool, 3000000, s);
    EXPECT_EQ(stats_of(pool).unchecked, 1);
    (void)check_history(pool, 1);
    OK(galloc_free(q, s));
    OK(galloc_free(get(pool, MIB(32), s), s));
    EXPECT_EQ(stats_of(pool).unchecked, 1); /* memory that is there stays in quarantine */
    OK(galloc_free(used, s));
    OK(galloc_free(get(pool, MIB(128), s), s));
    EXPECT_EQ(stats_of(pool).reserved.current, sim_physical(0));
    OK(galloc_pool_trim(pool, 0, NULL));
    (void)check_history(pool, 1);
    stream_end(s);
    pool_end(pool);
    finish();
}

/* ---- single entries ---------------------------------------------------------------------------------------------- */

TEST(an_allocation_and_its_free)
{
    galloc_config config = config_limit(GIB(1));
    galloc_pool *pool;
    cudaStream_t streams[2];
    galloc_request request;
    const value *e;
    value *v;
    void *p;
    begin();
    config.history = 1000;
    pool = pool_new(&config);
    streams[0] = stream_new();
    streams[1] = stream_new();
    memset(&request, 0, sizeof request);
    request.bytes = 5000;
    request.stream = streams[0];
    request.pool = pool;
    request.tag = 7;
    OK(galloc_alloc(&p, &request));
    OK(galloc_free(p, streams[1]));
    v = snapshot(pool, GALLOC_SNAPSHOT_PICKLE);
    e = event_named(v, "alloc");
    EXPECT_EQ(number_of(e, "addr"), (uintptr_t)p);
    EXPECT_EQ(number_of(e, "size"), 5000);
    EXPECT_EQ(number_of(e, "tag"), 7);
    EXPECT_EQ(number_of(e, "stream"), stream_id(streams[0]));
    EXPECT_EQ(number_of(e->next, "addr"), (uintptr_t)p);
    EXPECT_EQ(number_of(e->next, "size"), 5000);
    EXPECT_EQ(number_of(e->next, "tag"), 7);
    EXPECT_EQ(number_of(e->next, "stream"), stream_id(streams[1]));
    EXPECT(!strcmp(text_of(e->next, "action"), "free_requested"));
    EXPECT(!strcmp(text_of(e->next->next, "action"), "free_completed"));
    EXPECT(!strcmp(text_of(e->next->next->next, "action"), "snapshot"));
    EXPECT(!strcmp(text_of(events_of(v)->first, "action"), "segment_map"));
    value_free(v);
    stream_end(streams[0]);
    stream_end(streams[1]);
    pool_end(pool);
    finish();
}

TEST(a_resize_is_a_free_and_an_allocation)
{
    galloc_config config = config_limit(GIB(1));
    galloc_pool *pool;
    const value *e;
    value *v;
    void *p;
    begin();
    config.history = 1000;
    pool = pool_new(&config);
    p = get(pool, MIB(4), NULL);
    OK(galloc_resize(p, MIB(1), NULL));
    v = snapshot(pool, GALLOC_SNAPSHOT_JSON);
    e = event_named(v, "free_requested");
    EXPECT_EQ(number_of(e, "size"), MIB(4));
    EXPECT_EQ(number_of(event_named(v, "alloc"), "size"), MIB(1));
    EXPECT_EQ(number_of(event_named(v, "alloc"), "addr"), (uintptr_t)p);
    value_free(v);
    OK(galloc_free(p, NULL));
    pool_end(pool);
    finish();
}

/* Every call is seen, also those that stream caches serve otherwise, on all paths. */
TEST(each_call_is_noted_until_the_history_ends)
{
    galloc_pool *pool;
    cudaStream_t stream;
    value *v;
    void *p;
    int i;
    begin();
    pool = pool_limited(GIB(1));
    stream = stream_new();
    for (i = 0; i < 20; i++) OK(galloc_free(get(pool, 5000, stream), stream));
    OK(galloc_pool_history(pool, 1000));
    EXPECT(!inside_stream_of(pool, stream_id(stream)).open);
    for (i = 0; i < 20; i++) OK(galloc_free(get(pool, 5000 + (size_t)i * KIB(100), stream), stream));
    v = snapshot(pool, GALLOC_SNAPSHOT_JSON);
    EXPECT_EQ(events_named(v, "alloc"), 20);
    EXPECT_EQ(events_named(v, "free_requested"), 20);
    EXPECT_EQ(events_named(v, "free_completed"), 20);
    value_free(v);
    (void)check_history(pool, 0);
    OK(galloc_pool_history(pool, 0));
    for (i = 0; i < 20; i++) OK(galloc_free(get(pool, 5000, stream), stream));
    EXPECT(inside_stream_of(pool, stream_id(stream)).open);
    v = snapshot(pool, GALLOC_SNAPSHOT_JSON);
    EXPECT_EQ(value_count(events_of(v)), 0);
    value_free(v);
    /* Of several streams each one's cache is shut, and opened again. */
    cudaStream_t more[3];
    for (int k = 0; k < 3; k++) more[k] = stream_new();
    for (int on = 0; on < 3; on++) {
        OK(galloc_pool_history(pool, on % 2 ? 1000 : 0));
        for (i = 0; i < 60; i++) OK(galloc_free(get(pool, 5000, more[i % 3]), more[i % 3]));
        for (int k = 0; k < 3; k++) EXPECT_EQ(inside_stream_of(pool, stream_id(more[k])).open, on % 2 == 0);
        v = snapshot(pool, GALLOC_SNAPSHOT_JSON);
        EXPECT_EQ(events_named(v, "alloc"), on % 2 ? 60 : 0);
        EXPECT_EQ(events_named(v, "free_requested"), on % 2 ? 60 : 0);
        value_free(v);
    }
    for (int k = 0; k < 3; k++) stream_end(more[k]);
    /* Again, beside a block from before. */
    p = get(pool, 777, stream);
    OK(galloc_pool_history(pool, 1000));
    OK(galloc_free(p, stream));
    (void)check_history(pool, 0);
    stream_end(stream);
    pool_end(pool);
    finish();
}

/* Neither a history that is off nor one that has exactly as many entries as it has room for has overwritten any. */
TEST(a_full_history_has_not_overflowed)
{
    enum { SIZE = 10, N = SIZE / 2 + 1 };
    void *p[N];
    begin();
    galloc_pool *pool = pool_limited(GIB(1));
    value *v = snapshot(pool, GALLOC_SNAPSHOT_JSON);
    EXPECT_EQ(value_of(value_of(v, "allocator_settings"), "trace_alloc_overflowed")->type, 'f');
    value_free(v);
    OK(galloc_free(get(pool, 5000, NULL), NULL)); /* creates the page */
    OK(galloc_pool_history(pool, SIZE));
    for (int i = 0; i < N; i++) { /* the allocation and the snapshot are two more entries */
        p[i] = get(pool, 5000, NULL);
        v = snapshot(pool, GALLOC_SNAPSHOT_JSON);
        const value *mine = value_of(value_of(value_of(v, "galloc"), "pools")->first, "history");
        EXPECT_EQ(number_of(mine, "entries"), i + 1 < N ? 2 * (i + 1) : SIZE);
        EXPECT_EQ(number_of(mine, "overwritten"), i + 1 < N ? 0 : 2);
        EXPECT_EQ(value_of(value_of(v, "allocator_settings"), "trace_alloc_overflowed")->type, i + 1 < N ? 'f' : 't');
        value_free(v);
    }
    for (int i = 0; i < N; i++) OK(galloc_free(p[i], NULL));
    pool_end(pool);
    finish();
}

/* Of several pools any may have: the entries of all are one list. */
TEST(any_history_of_a_snapshot_may_have_overflowed)
{
    for (int which = 0; which < 3; which++) {
        galloc_pool *pool[2];
        begin();
        for (int i = 0; i < 2; i++) pool[i] = pool_limited(GIB(1));
        for (int i = 0; i < 2; i++) OK(galloc_pool_history(pool[i], i == which ? 10 : 100));
        for (int i = 0; i < 20; i++)
            for (int k = 0; k < 2; k++) OK(galloc_free(get(pool[k], 5000, NULL), NULL));
        value *v = snapshot(NULL, GALLOC_SNAPSHOT_JSON);
        EXPECT_EQ(value_of(value_of(v, "allocator_settings"), "trace_alloc_overflowed")->type, which < 2 ? 't' : 'f');
        value_free(v);
        for (int i = 0; i < 2; i++) pool_end(pool[i]);
        finish();
    }
}

TEST(what_is_overwritten_is_counted)
{
    galloc_pool *pool;
    const value *mine;
    value *v;
    int i;
    begin();
    pool = pool_limited(GIB(1));
    OK(galloc_pool_history(pool, 10));
    v = snapshot(pool, GALLOC_SNAPSHOT_JSON);
    EXPECT_EQ(value_of(value_of(v, "allocator_settings"), "trace_alloc_overflowed")->type, 'f');
    EXPECT_EQ(number_of(value_of(v, "allocator_settings"), "trace_alloc_max_entries"), 10);
    value_free(v);
    for (i = 0; i < 30; i++) OK(galloc_free(get(pool, 5000, NULL), NULL));
    v = snapshot(pool, GALLOC_SNAPSHOT_JSON);
    mine = value_of(value_of(value_of(v, "galloc"), "pools")->first, "history");
    EXPECT_EQ(number_of(mine, "entries"), 10);
    EXPECT_EQ(number_of(mine, "overwritten"), 1 + 1 + 60 + 1 - 10); /* snapshots, a page, allocations and frees */
    EXPECT_EQ(value_of(value_of(v, "allocator_settings"), "trace_alloc_overflowed")->type, 't');
    EXPECT(!strcmp(text_of(events_of(v)->last, "action"), "snapshot"));
    value_free(v);
    pool_end(pool);
    finish();
}

static galloc_pool *late_pool; /* whose history begins in the middle of another thread's call */

static void *begin_late(void *pool)
{
    OK(galloc_pool_history(pool, 1000));
    return NULL;
}

static void begin_beside(const char *function)
{
    galloc_pool *pool = late_pool;
    pthread_t thread;
    if (!pool || strcmp(function, "cuStreamGetId")) return;
    late_pool = NULL;
    EXPECT_EQ(pthread_create(&thread, NULL, begin_late, pool), 0);
    pthread_join(thread, NULL);
}

/* The history begins when a free has passed the stream caches, which are open. */
TEST(a_free_under_way_when_the_history_begins_is_noted)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    value *v;
    OK(galloc_free(get(pool, 4096, s), s));
    void *p = get(pool, MIB(8), s), *q = get(pool, MIB(9), s);
    late_pool = pool;
    sim_hook(begin_beside, NULL);
    OK(galloc_free(p, s));
    sim_hook(NULL, NULL);
    EXPECT(!late_pool);
    v = snapshot(pool, GALLOC_SNAPSHOT_JSON);
    EXPECT_EQ(events_named(v, "free_requested"), 1);
    value_free(v);
    OK(galloc_free(q, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* ---- the driver has a freed block before the pool is locked again ------------------------------------------------ */

static struct {
    galloc_pool *pool;
    cudaStream_t stream;
    void *block;
    int freed;
} async;

static void *get_meanwhile(void *none)
{
    async.block = get(async.pool, 4096, async.stream);
    return none;
}

/* The first call after the driver has the block: another thread gets its address before the free goes on. */
static void meet_async(const char *function)
{
    pthread_t thread;
    int freed = async.freed;
    async.freed = freed || !strcmp(function, "cuMemFreeAsync");
    if (!freed) return;
    sim_hook(NULL, NULL);
    EXPECT_EQ(pthread_create(&thread, NULL, get_meanwhile, NULL), 0);
    pthread_join(thread, NULL);
}

TEST(an_address_that_the_driver_gives_to_another_thread_was_freed_before)
{
    begin();
    galloc_config config = galloc_config_default();
    config.backend = GALLOC_BACKEND_CUDA_MALLOC_ASYNC;
    config.history = 1000;
    async.pool = pool_new(&config);
    async.stream = stream_new();
    void *p = get(async.pool, 4096, async.stream);
    sim_hook(meet_async, NULL);
    OK(galloc_free(p, async.stream));
    sim_hook(NULL, NULL);
    EXPECT_EQ(async.block, p);
    (void)check_history(async.pool, 1);
    OK(galloc_free(async.block, async.stream));
    (void)check_history(async.pool, 1);
    stream_end(async.stream);
    pool_end(async.pool);
    finish();
}

/* The pool frees it then, and may give it out again. */
TEST(a_block_that_the_driver_refuses_to_free_is_freed_all_the_same)
{
    begin();
    galloc_config config = galloc_config_default();
    config.backend = GALLOC_BACKEND_CUDA_MALLOC_ASYNC;
    config.history = 1000;
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new();
    void *p = get(pool, 4096, s);
    sim_fail("cuMemFreeAsync", 1, 0, cudaErrorInvalidValue);
    OK(galloc_free(p, s));
    sim_fail_clear();
    EXPECT_EQ(info_of(p).state, GALLOC_STATE_FREE);
    (void)check_history(pool, 1);
    EXPECT_EQ(get(pool, 4096, s), p);
    (void)check_history(pool, 1);
    OK(galloc_free(p, s));
    (void)check_history(pool, 1);
    stream_end(s);
    pool_end(pool);
    finish();
}

TEST(a_wait_names_both_streams)
{
    galloc_config config = config_limit(MIB(64));
    galloc_pool *pool;
    cudaStream_t streams[2];
    const value *e;
    value *v;
    void *p, *q;
    begin_still();
    config.history = 1000;
    pool = pool_new(&config);
    streams[0] = stream_new();
    streams[1] = stream_new();
    OK(galloc_free(get(pool, MIB(1), streams[1]), streams[1]));
    p = get_used(pool, MIB(60), streams[0], 1);
    OK(galloc_free(p, streams[0]));
    OK(galloc_free(get(pool, MIB(1), streams[0]), streams[0]));
    q = get(pool, MIB(60), streams[1]);
    EXPECT_EQ(stats_of(pool).waits, 1);
    v = snapshot(pool, GALLOC_SNAPSHOT_JSON);
    EXPECT_EQ(events_named(v, "wait"), 1);
    e = event_named(v, "wait");
    EXPECT_EQ(number_of(e, "stream"), stream_id(streams[1]));
    EXPECT_EQ(number_of(e, "on_stream"), stream_id(streams[0]));
    EXPECT(number_of(e, "size") >= MIB(1));
    value_free(v);
    (void)check_history(pool, 1);
    OK(galloc_free(q, streams[1]));
    sim_run(-1);
    stream_end(streams[0]);
    stream_end(streams[1]);
    pool_end(pool);
    finish();
}

TEST(running_out)
{
    galloc_config config = config_limit(MIB(64));
    galloc_pool *pool;
    const value *e;
    value *v;
    void *p;
    begin();
    config.history = 1000;
    pool = pool_new(&config);
    p = get(pool, MIB(40), NULL);
    EXPECT_EQ(galloc_pool_malloc(pool, &(void *){NULL}, MIB(30) + 1, NULL), cudaErrorMemoryAllocation);
    v = snapshot(pool, GALLOC_SNAPSHOT_JSON);
    e = event_named(v, "oom");
    EXPECT_EQ(number_of(e, "size"), MIB(30) + 1); /* as asked for, not as rounded */
    EXPECT(number_of(e, "device_free") > MIB(64));
    EXPECT(!value_of(e, "addr"));
    value_free(v);
    OK(galloc_free(p, NULL));
    pool_end(pool);
    finish();
}

TEST(running_out_of_any_kind)
{
    galloc_config config = config_limit(MIB(64));
    begin();
    config.history = 1000;
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new();
    void *p = get(pool, MIB(40), s);
    for (int kind = 0; kind < RUN_OUT_KINDS; kind++) {
        ask_in_vain(pool, kind, MIB(40), s);
        value *v = snapshot(pool, GALLOC_SNAPSHOT_JSON);
        EXPECT_EQ(events_named(v, "oom"), kind + 1);
        value_free(v);
    }
    OK(galloc_free(p, s));
    stream_end(s);
    pool_end(pool);
    finish();
}

TEST(annotations_are_bounded_and_escaped)
{
    char text_in[200], json[400];
    galloc_config config = config_limit(GIB(1));
    galloc_pool *pool, *other;
    const value *e;
    value *v;
    text t = {NULL, 0, 0};
    begin();
    config.history = 10;
    OK(galloc_annotate("without a pool"));
    pool = pool_new(&config);
    other = pool_limited(GIB(1));
    OK(galloc_annotate("step \"1\"\n\\\xff"));
    v = snapshot(pool, GALLOC_SNAPSHOT_JSON);
    e = event_named(v, "annotate");
    EXPECT(!strcmp(text_of(e, "user_metadata"), "step \"1\"?\\?"));
    EXPECT_EQ(number_of(e, "size") + number_of(e, "addr") + number_of(e, "stream"), 0);
    value_free(v);
    memset(text_in, 'x', sizeof text_in);
    text_in[199] = 0;
    OK(galloc_annotate(text_in));
    OK(galloc_annotate(""));
    v = snapshot(pool, GALLOC_SNAPSHOT_PICKLE);
    EXPECT_EQ(events_named(v, "annotate"), 3);
    e = event_named(v, "annotate");
    EXPECT_EQ(strlen(text_of(e, "user_metadata")), 0);
    value_free(v);
    OK(galloc_snapshot(pool, GALLOC_SNAPSHOT_JSON, keep, &t));
    keep(&t, "", 1);
    snprintf(json, sizeof json, "\"%.47s\"", text_in);
    EXPECT(strstr(t.data, json));
    free(t.data);
    EXPECT_EQ(galloc_annotate(NULL), cudaErrorInvalidValue);
    v = snapshot(other, GALLOC_SNAPSHOT_JSON);
    EXPECT_EQ(value_count(events_of(v)), 0);
    value_free(v);
    pool_end(pool);
    pool_end(other);
    finish();
}

/* An annotation in the place of a block's entry has nothing of that: neither its tag nor its size. */
TEST(an_annotation_has_nothing_of_what_it_overwrites)
{
    galloc_config config = config_limit(GIB(1));
    config.history = 4;
    begin();
    galloc_pool *pool = pool_new(&config);
    for (int i = 0; i < 4; i++) {
        galloc_request request = {.bytes = 1000, .tag = 77, .pool = pool};
        void *p = NULL;
        OK(galloc_alloc(&p, &request));
        OK(galloc_free(p, NULL));
    }
    value *v = snapshot(pool, GALLOC_SNAPSHOT_JSON);
    EXPECT_EQ(number_of(event_named(v, "alloc"), "tag"), 77);
    value_free(v);
    for (int i = 0; i < 4; i++) OK(galloc_annotate("step"));
    v = snapshot(pool, GALLOC_SNAPSHOT_JSON);
    EXPECT_EQ(events_named(v, "annotate"), 3); /* the snapshot is an entry too */
    for (const value *e = events_of(v)->first; e; e = e->next) {
        EXPECT(!value_of(e, "tag"));
        EXPECT_EQ(number_of(e, "size"), 0);
    }
    value_free(v);
    pool_end(pool);
    finish();
}

/* The pools of a device share one trace, in the order of their times. */
TEST(pools_of_a_device_have_one_trace)
{
    galloc_config config = config_limit(GIB(1));
    galloc_pool *pools[2];
    const value *e;
    value *v, *pickle;
    uint64_t before = 0;
    int i;
    begin();
    config.history = 100;
    pools[0] = pool_new(&config);
    pools[1] = pool_new(&config);
    for (i = 0; i < 20; i++) OK(galloc_free(get(pools[i % 2], 5000, NULL), NULL));
    v = snapshot(NULL, GALLOC_SNAPSHOT_JSON);
    EXPECT_EQ(value_count(value_of(v, "device_traces")), 1);
    EXPECT_EQ(events_named(v, "alloc"), 20);
    for (e = events_of(v)->first; e; e = e->next) {
        EXPECT(number_of(e, "time_us") >= before);
        before = number_of(e, "time_us");
    }
    pickle = snapshot(NULL, GALLOC_SNAPSHOT_PICKLE);
    EXPECT(values_equal(value_of(v, "segments")->first, value_of(pickle, "segments")->first));
    EXPECT_EQ(value_count(events_of(pickle)), value_count(events_of(v)) + 2); /* of each pool, that of this snapshot */
    value_free(pickle);
    value_free(v);
    pool_end(pools[0]);
    pool_end(pools[1]);
    finish();
}

/* And only those of that device. */
TEST(each_device_has_its_own_trace)
{
    galloc_config config = config_limit(GIB(1));
    galloc_pool *pools[2];
    const value *trace;
    value *v;
    begin_with_devices(2, SIM_PACE_STILL);
    config.history = 100;
    cudaStream_t s = stream_new();
    for (config.device = 0; config.device < 2; config.device++) pools[config.device] = pool_new(&config);
    for (int i = 0; i < 4; i++) OK(galloc_free(get(pools[i == 3], 5000, s), s));
    v = snapshot(NULL, GALLOC_SNAPSHOT_JSON);
    EXPECT_EQ(value_count(value_of(v, "device_traces")), 2);
    trace = value_of(v, "device_traces")->first;
    for (int device = 0; device < 2; device++, trace = trace->next) {
        int allocs = 0;
        for (const value *e = trace->first; e; e = e->next) allocs += !strcmp(text_of(e, "action"), "alloc");
        EXPECT_EQ(allocs, device ? 1 : 3);
    }
    value_free(v);
    for (int device = 0; device < 2; device++) pool_end(pools[device]);
    finish();
}

TEST(tags_have_names)
{
    galloc_config config = config_limit(GIB(1));
    galloc_pool *pool;
    galloc_request request;
    const value *frame;
    value *v;
    void *p;
    uint32_t tag;
    begin();
    config.history = 10;
    pool = pool_new(&config);
    memset(&request, 0, sizeof request);
    request.bytes = 5000;
    request.pool = pool;
    request.tag = 7;
    OK(galloc_tag_name(7, "weights"));
    OK(galloc_tag_name(7, "kv \"cache\"\x01, of which more is said than a\x7fname can hold"));
    OK(galloc_alloc(&p, &request));
    v = snapshot(pool, GALLOC_SNAPSHOT_PICKLE);
    frame = value_of(event_named(v, "alloc"), "frames")->first;
    EXPECT_EQ(number_of(frame, "line"), 7);
    EXPECT(!strcmp(text_of(frame, "filename"), "galloc"));
    EXPECT(!strcmp(text_of(frame, "name"), "kv \"cache\"?, of which more is said than a?name "));
    frame = value_of(value_of(value_of(v, "segments")->first, "blocks")->first, "frames")->first;
    EXPECT_EQ(number_of(frame, "line"), 7);
    value_free(v);
    /* Names are bounded in number; a name can be replaced and taken away. */
    for (tag = 8; tag < 8 + 63; tag++) OK(galloc_tag_name(tag, "x"));
    EXPECT_EQ(galloc_tag_name(100, "x"), cudaErrorMemoryAllocation);
    OK(galloc_tag_name(70, "y"));
    OK(galloc_tag_name(100, NULL));
    OK(galloc_tag_name(100, ""));
    OK(galloc_tag_name(7, ""));
    OK(galloc_tag_name(100, "x"));
    v = snapshot(pool, GALLOC_SNAPSHOT_JSON);
    EXPECT(!value_of(event_named(v, "alloc"), "frames")->first);
    value_free(v);
    for (tag = 8; tag <= 100; tag++) OK(galloc_tag_name(tag, NULL));
    /* The first and the last of all printable characters are copied. */
    OK(galloc_tag_name(7, "~ a ~b~"));
    v = snapshot(pool, GALLOC_SNAPSHOT_PICKLE);
    frame = value_of(event_named(v, "alloc"), "frames")->first;
    EXPECT(frame && !strcmp(text_of(frame, "name"), "~ a ~b~"));
    value_free(v);
    OK(galloc_tag_name(7, NULL));
    OK(galloc_free(p, NULL));
    pool_end(pool);
    finish();
}

/* ---- what is live ------------------------------------------------------------------------------------------------ */

TEST(what_is_live_by_tag_size_and_stream)
{
    char text_out[GALLOC_REPORT_TEXT], expected[1000];
    galloc_pool *pool;
    cudaStream_t streams[2];
    galloc_request request;
    void *blocks[40];
    unsigned long long ids[2];
    int i;
    begin();
    pool = pool_limited(GIB(1));
    for (i = 0; i < 2; i++) streams[i] = stream_new();
    for (i = 0; i < 2; i++) ids[i] = stream_id(streams[i]);
    OK(galloc_live_text(pool, text_out, sizeof text_out));
    EXPECT(!strcmp(text_out, "blocks in use: 0, of 0 bytes\n"));
    OK(galloc_tag_name(UINT32_MAX, "kv cache"));
    memset(&request, 0, sizeof request);
    request.pool = pool;
    for (i = 0; i < 6; i++) {
        request.bytes = i < 5 ? 1000 : 2001;
        request.tag = i < 4 ? UINT32_MAX : 0;
        request.stream = streams[i == 2];
        OK(galloc_alloc(&blocks[i], &request));
    }
    OK(galloc_free(get(pool, MIB(1), streams[0]), streams[0])); /* in the cache of the stream, not live */
    snprintf(expected, sizeof expected,
             "blocks in use: 6, of 7001 bytes\n  3 of 1000 bytes, tag 4294967295 (kv cache), stream %llu\n"
             "  1 of 2001 bytes, stream %llu\n  1 of 1000 bytes, stream %llu\n"
             "  1 of 1000 bytes, tag 4294967295 (kv cache), stream %llu\n", ids[0], ids[0], ids[0], ids[1]);
    OK(galloc_live_text(pool, text_out, sizeof text_out));
    if (!EXPECT(!strcmp(text_out, expected))) printf("%s", text_out);
    OK(galloc_live_text(NULL, text_out, sizeof text_out));
    EXPECT(!strcmp(text_out, expected));
    snprintf(expected, sizeof expected,
             "free them first; most: 3 of 1000 bytes, tag 4294967295 (kv cache), stream %llu", ids[0]);
    EXPECT_EQ(galloc_pool_destroy(pool), cudaErrorNotPermitted);
    EXPECT(strstr(galloc_last_message(), expected));
    EXPECT_EQ(galloc_shutdown(), cudaErrorNotPermitted);
    EXPECT(strstr(galloc_last_message(), expected + strlen("free them first; most: ")));
    EXPECT(strstr(galloc_last_message(), "; most in all pools: 3 of "));
    for (i = 6; i < 40; i++) blocks[i] = get(pool, (size_t)i, streams[0]);
    OK(galloc_live_text(pool, text_out, sizeof text_out));
    EXPECT(strstr(text_out, "\n  1 of 28 bytes, stream ") && !strstr(text_out, "of 27 bytes"));
    EXPECT(strstr(text_out, "\n  and others, of 22 kinds\n"));
    EXPECT_EQ(galloc_live_text(pool, text_out, strlen(text_out)), cudaErrorInvalidValue);
    EXPECT_EQ(text_out[0], 0);
    EXPECT_EQ(galloc_live_text(pool, NULL, 10), cudaErrorInvalidValue);
    EXPECT_EQ(galloc_live_text(pool, text_out, 0), cudaErrorInvalidValue);
    OK(galloc_tag_name(7, NULL));
    for (i = 0; i < 40; i++) OK(galloc_free(blocks[i], streams[i == 2]));
    for (i = 0; i < 2; i++) stream_end(streams[i]);
    pool_end(pool);
    finish();
}

/* ---- settings and errors ----------------------------------------------------------------------------------------- */

TEST(the_setting_in_effect_and_its_bounds)
{
    galloc_config config = config_limit(GIB(1));
    galloc_pool *pool;
    begin();
    config.history = 33;
    pool = pool_new(&config);
    OK(galloc_pool_config(pool, &config));
    EXPECT_EQ(config.history, 33);
    OK(galloc_pool_history(pool, 44));
    OK(galloc_pool_config(pool, &config));
    EXPECT_EQ(config.history, 44);
    cudaError_t most = galloc_pool_history(pool, (size_t)1 << 24); /* takes 1 GiB of host addresses, if there are any */
    EXPECT(most == cudaSuccess || most == cudaErrorMemoryAllocation);
    OK(galloc_pool_history(pool, 44));
    EXPECT_EQ(galloc_pool_history(pool, ((size_t)1 << 24) + 1), cudaErrorInvalidValue);
    EXPECT_EQ(galloc_pool_history(pool, SIZE_MAX), cudaErrorInvalidValue);
    EXPECT_EQ(galloc_pool_history(NULL, 1), cudaErrorInvalidValue);
    OK(galloc_pool_config(pool, &config));
    EXPECT_EQ(config.history, 44);
    pool_end(pool);
    EXPECT_EQ(galloc_pool_history(pool, 1), cudaErrorInvalidResourceHandle);
    finish();
}

TEST(a_pool_that_gets_no_context_leaves_no_history_behind)
{
    begin();
    galloc_config config = config_limit(GIB(1));
    galloc_pool *pool = NULL;
    config.history = 100;
    sim_fail("cuDevicePrimaryCtxRetain", 1, 0, cudaErrorUnknown);
    EXPECT_EQ(galloc_pool_create(&pool, &config), cudaErrorUnknown);
    EXPECT(pool == NULL);
    finish();
}

TEST(without_host_memory_all_stays_as_it_was)
{
    galloc_config config = config_limit(GIB(1));
    galloc_pool *pool = NULL;
    text t = {NULL, 0, 0};
    cudaError_t error = cudaErrorMemoryAllocation;
    long nth;
    begin();
    config.history = 50;
    for (nth = 1; error && nth < 40; nth++) {
        sim_fail_malloc(nth, 0);
        error = galloc_pool_create(&pool, &config);
        sim_fail_malloc(0, 0);
        EXPECT(!error || error == cudaErrorMemoryAllocation);
        if (nth == 1) OK(galloc_shutdown()); /* the driver's table, and memory that is kept for the next pool */
    }
    OK(galloc_annotate("here"));
    sim_fail_malloc(1, 0);
    EXPECT_EQ(galloc_pool_history(pool, 60), cudaErrorMemoryAllocation);
    sim_fail_malloc(0, 0);
    OK(galloc_pool_config(pool, &config));
    EXPECT_EQ(config.history, 50);
    for (nth = 1, error = cudaErrorMemoryAllocation; error && nth < 10; nth++) {
        size_t live = sim_malloc_live();
        sim_fail_malloc(nth, 0);
        error = galloc_snapshot(pool, 0, keep, &t);
        sim_fail_malloc(0, 0);
        EXPECT_EQ(sim_malloc_live(), live);
    }
    EXPECT_EQ(nth, 5); /* the state, its entries and its items */
    free(t.data);
    pool_end(pool);
    finish();
}

static galloc_pool *told_pool;
static size_t told_events = 1;

static void tell(galloc_pool *pool, void *addr, size_t bytes, void *user)
{
    value *v = snapshot(told_pool, GALLOC_SNAPSHOT_JSON);
    (void)pool, (void)addr, (void)bytes, (void)user;
    told_events = value_count(events_of(v));
    value_free(v);
}

/* Pages are on their way then: the history would not fit. */
TEST(a_snapshot_in_on_map_has_no_history)
{
    galloc_config config = config_limit(GIB(1));
    galloc_callbacks callbacks;
    void *p;
    begin();
    config.history = 50;
    told_pool = pool_new(&config);
    memset(&callbacks, 0, sizeof callbacks);
    callbacks.on_map = tell;
    OK(galloc_pool_set_callbacks(told_pool, &callbacks));
    p = get(told_pool, MIB(4), NULL);
    EXPECT_EQ(told_events, 0);
    OK(galloc_free(p, NULL));
    (void)check_history(told_pool, 1);
    OK(galloc_pool_set_callbacks(told_pool, NULL));
    pool_end(told_pool);
    finish();
}

/* The history is given more or fewer entries while a snapshot asks for host memory, with no lock held. */
static struct {
    galloc_pool *pool;
    size_t entries;
    int skip; /* requests for memory before */
} other;

static void resize_history(size_t bytes)
{
    (void)bytes;
    if (other.skip-- != 1 || !inside_unlocked(other.pool)) return;
    OK(galloc_pool_history(other.pool, other.entries));
    for (int i = 0; i < 300; i++) OK(galloc_free(get(other.pool, 5000, NULL), NULL));
}

TEST(the_history_changes_while_it_is_copied)
{
    static const size_t entries[] = {1000, 5, 0};
    for (int i = 0; i < 3; i++) {
        const value *mine;
        value *v;
        begin();
        other.pool = pool_limited(GIB(1));
        other.entries = entries[i];
        other.skip = 2; /* the copy itself, then what it has of items */
        OK(galloc_pool_history(other.pool, 20));
        OK(galloc_free(get(other.pool, 5000, NULL), NULL));
        inside_on_malloc = resize_history;
        v = snapshot(other.pool, GALLOC_SNAPSHOT_JSON);
        inside_on_malloc = NULL;
        EXPECT(other.skip < 1);
        mine = value_of(value_of(value_of(v, "galloc"), "pools")->first, "history");
        if (i < 2) EXPECT_EQ(number_of(mine, "entries"), i == 0 ? 600 + 1 : entries[i]); /* and the snapshot */
        else EXPECT_EQ(value_count(events_of(v)), 0);
        value_free(v);
        pool_end(other.pool);
        finish();
    }
}

/* A history begins and ends while other threads allocate and free by their caches. */
static int stop;

static void *churn(void *pool)
{
    cudaStream_t stream = stream_new();
    void *blocks[20] = {NULL};
    int i;
    for (i = 0; !__atomic_load_n(&stop, __ATOMIC_RELAXED); i++) {
        OK(galloc_free(blocks[i % 20], stream));
        OK(galloc_pool_malloc(pool, &blocks[i % 20], i % 3 ? 5000 : (size_t)i * 7919 % MIB(3) + 1, stream));
    }
    for (i = 0; i < 20; i++) OK(galloc_free(blocks[i], stream));
    stream_end(stream);
    return NULL;
}

TEST(histories_beside_threads)
{
    galloc_pool *pool;
    pthread_t threads[2];
    int i;
    begin();
    pool = pool_limited(GIB(2));
    stop = 0;
    for (i = 0; i < 2; i++) pthread_create(&threads[i], NULL, churn, pool);
    for (i = 0; i < 30; i++) {
        OK(galloc_pool_history(pool, 500));
        OK(galloc_annotate("now"));
        usleep(500);
        (void)check_history(pool, 0);
        OK(galloc_pool_history(pool, 0));
        usleep(200);
    }
    __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
    for (i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    pool_end(pool);
    finish();
}

/* With a history, blocks that wait for other streams are not active in PyTorch's words, nor are their bytes. */
TEST(active_bytes_are_those_of_active_blocks)
{
    begin_still();
    galloc_config config = config_limit(MIB(64));
    config.history = 10;
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s[2] = {stream_new(), stream_new()};
    void *p = get_used(pool, MIB(2), s[0], 1), *q = get(pool, MIB(2), s[1]);
    OK(galloc_free_after(p, s, 2));
    value *v = snapshot(pool, GALLOC_SNAPSHOT_JSON);
    for (const value *g = value_of(v, "segments")->first; g; g = g->next) {
        uint64_t active = 0;
        for (const value *b = value_of(g, "blocks")->first; b; b = b->next)
            if (!strncmp(text_of(b, "state"), "active", 6)) active += number_of(b, "size");
        EXPECT_EQ(number_of(g, "active_size"), active);
    }
    value_free(v);
    OK(galloc_free(q, s[1]));
    pool_end(pool);
    finish();
}

TEST(a_backslash_is_the_same_in_both_formats)
{
    begin();
    galloc_config config = config_limit(MIB(64));
    config.history = 10;
    galloc_pool *pool = pool_new(&config);
    OK(galloc_annotate("a\\b\\"));
    for (int format = 0; format < 2; format++) {
        value *v = snapshot(pool, format);
        const value *e = v ? event_named(v, "annotate") : NULL;
        EXPECT(e && !strcmp(text_of(e, "user_metadata"), "a\\b\\"));
        if (v) value_free(v);
    }
    pool_end(pool);
    finish();
}

/* A snapshot says how many entries the history may have, however few there are. */
TEST(a_snapshot_has_the_size_of_the_history)
{
    begin();
    galloc_config config = config_limit(MIB(64));
    config.history = 1000;
    galloc_pool *pool = pool_new(&config);
    OK(galloc_free(get(pool, 1000, NULL), NULL));
    value *v = snapshot(pool, GALLOC_SNAPSHOT_JSON);
    EXPECT_EQ(number_of(value_of(v, "allocator_settings"), "trace_alloc_max_entries"), 1000);
    value_free(v);
    pool_end(pool);
    finish();
}

/* Sixteen kinds of blocks have lines of their own in the text of what is live; the others are counted. */
TEST(sixteen_kinds_of_live_blocks_are_named)
{
    begin();
    galloc_pool *pool = pool_limited(MIB(64));
    for (int n = 16; n <= 18; n += 2) {
        void *p[18];
        char lines_of[GALLOC_REPORT_TEXT];
        int lines = 0;
        for (int i = 0; i < n; i++) p[i] = get(pool, 1000 + 10 * (size_t)i, NULL);
        OK(galloc_live_text(pool, lines_of, sizeof lines_of));
        for (const char *at = lines_of; (at = strstr(at, "\n  1 of ")) != NULL; at++) lines++;
        EXPECT_EQ(lines, 16);
        EXPECT_EQ(strstr(lines_of, "others, of 2 kinds") != NULL, n == 18);
        for (int i = 0; i < n; i++) OK(galloc_free(p[i], NULL));
    }
    pool_end(pool);
    finish();
}

TEST(a_snapshot_has_the_limit_of_splits)
{
    begin();
    galloc_config config = config_fixed();
    config.max_split_size = MIB(256);
    galloc_pool *pool = pool_new(&config);
    value *v = snapshot(pool, GALLOC_SNAPSHOT_JSON);
    EXPECT_EQ(number_of(value_of(v, "allocator_settings"), "max_split_size"), MIB(256));
    value_free(v);
    pool_end(pool);
    finish();
}

TEST_MAIN()
