/* test_worlds.c - random programs over several devices and contexts: streams of all of them, default streams too;
   resets, contexts and streams that end, announced or not; pools that come and go; calls of the driver that fail.
   (Captures and threads are in test_programs.c.)

   What a program may do, and these do nothing else:
     use       on any stream of the pool's device, in whatever context, after all earlier use that is in conflict
     free      on any stream of any device, behind all use, but for use that is said otherwise: by streams that are
               named as well (galloc_free_after), or that the block was recorded for
     context   of the program's own: something is allocated on one of its streams first
     end       a stream that blocks are recorded for is retired before; others as it comes
     reset     what was in cudaMalloc memory is gone: not used any more, and freed or not, as long as its address is not
               that of another block
   A call that fails, be it for want of memory or because a call of the driver's or for host memory was made to fail,
   has changed nothing.

   A shadow of what on_map and on_unmap have told must cover each block. By itself it runs the same programs each time.
   In the environment:
     FUZZ_SEED=n      one program, which is told
     FUZZ_SECONDS=n   programs from the seed FUZZ_FROM on (1) for so long
     GALLOC_ROUNDS=n  how many are run by itself */

#define _GNU_SOURCE
#include <stdarg.h>
#include <time.h>

#include "setup.h"

enum { DEVICES = 2, CONTEXTS = 5, STREAMS = 14, BLOCKS = 48, POOLS = 6, READS = 10, STEPS = 500, RANGES = 1 << 14 };

/* ---- the world as the program knows it --------------------------------------------------------------------------- */

typedef struct context {
    CUcontext handle;
    int device, there;
} context; /* the first DEVICES are the primary ones */

typedef struct stream {
    cudaStream_t handle;
    int context;
    long born; /* each has a number of its own; 0: there is none */
    int is_default;
} stream;

/* Something that a stream was given: an event behind it. */
typedef struct use {
    cudaEvent_t event; /* NULL: there is nothing to come after */
    int stream, context;
    long born;
} use;

typedef struct record {
    int stream;
    long born;
} record;

typedef struct block {
    char *ptr; /* NULL: there is none */
    size_t bytes;
    int pool;
    int lost; /* its memory went with a reset */
    int written;
    uint64_t tag;
    use given, write, reads[READS];
    int n_reads;
    record records[READS];
    int n_records;
} block;

typedef struct pool {
    galloc_pool *handle; /* NULL: there is none */
    int device, mortal, shadowed;
} pool;

typedef struct range {
    char *begin;
    size_t bytes;
    galloc_pool *pool;
} range;

static context contexts[CONTEXTS];
static stream streams[STREAMS];
static block blocks[BLOCKS];
static pool pools[POOLS];
static range ranges[RANGES];
static int n_ranges, faults, telling, failed;
static long births;
static uint64_t tags;
static dice chance;
static unsigned long long done_programs, done_mallocs, done_uses, done_frees, done_resets, done_refused;

static int below(int n) { return (int)roll_below(&chance, (uint32_t)n); }
static int one_in(int n) { return below(n) == 0; }

static void tell(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void tell(const char *format, ...)
{
    va_list arguments;
    if (!telling) return;
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    putchar('\n');
}

static void wrong(const char *what, int error)
{
    if (!failed) printf("    %s: %d (%s)\n", what, error, galloc_last_message());
    failed = 1;
}

#define MUST(call) must((int)(call), #call)
static void must(int error, const char *what)
{
    if (error) wrong(what, error);
}

/* ---- calls of galloc, some of which are made to fail ------------------------------------------------------------- */

static const char *const may_fail[] = {
    "cuMemMap", "cuMemCreate", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease", "cuMemAddressReserve", "cuMemAlloc",
    "cuMemFree", "cuMemHostAlloc", "cuMemFreeHost", "cuEventRecord", "cuEventCreate", "cuEventQuery",
    "cuEventSynchronize", "cuStreamWaitEvent", "cuStreamGetId", "cuStreamIsCapturing", "cuStreamGetFlags",
    "cuStreamGetCtx", "cuCtxGetId", "cuCtxGetCurrent", "cuCtxPushCurrent", "cuDevicePrimaryCtxRetain",
    "cuMemAllocFromPoolAsync", "cuMemFreeAsync", "cuMemPoolCreate", NULL};

static void arm(void)
{
    if (!faults || !one_in(8)) return;
    if (one_in(3)) {
        sim_fail_malloc(1 + below(6), below(2));
        return;
    }
    for (int n = 1 + below(2); n > 0; n--)
        sim_fail(may_fail[below(sizeof may_fail / sizeof *may_fail)], 1 + below(4), one_in(3), one_in(3) ? 999 : 0);
}

static cudaError_t judged(cudaError_t error, const char *what, int may_refuse)
{
    int armed = faults && (sim_failed() || sim_failed_mallocs());
    sim_fail_clear();
    if (error) tell("  %s: %d", what, error);
    if (error) done_refused += (unsigned long long)armed;
    if (error && !armed && !may_refuse) wrong(what, error);
    return error;
}

/* `refusals`: errors that the call may return by itself. */
#define CALL(call, refusals) (arm(), last_error = (call), judged(last_error, #call, refusals))
static cudaError_t last_error;

/* ---- contexts and streams ---------------------------------------------------------------------------------------- */

static void enter(int c) { MUST(cuCtxSetCurrent(contexts[c].handle)); }

static int any_context(void)
{
    int c;
    do c = below(CONTEXTS);
    while (!contexts[c].there);
    return c;
}

/* A call on a default stream is made in its context, others wherever the thread happens to be. */
static void enter_for(const stream *s) { enter(s->is_default ? s->context : any_context()); }

static int device_of(const stream *s) { return contexts[s->context].device; }

/* Some stream that is there, of the device or (-1) of any; NULL: none was found. */
static stream *any_stream(int device)
{
    for (int tries = 0; tries < 200; tries++) {
        stream *s = &streams[below(STREAMS)];
        if (s->born && (device < 0 || device_of(s) == device)) return s;
    }
    return NULL;
}

static int index_of(const stream *s) { return (int)(s - streams); }

static int stream_is_taken(cudaStream_t handle, int c)
{
    for (int i = 0; i < STREAMS; i++)
        if (streams[i].born && streams[i].context == c && streams[i].handle == handle) return 1;
    return 0;
}

static void do_stream(void)
{
    stream *s = &streams[below(STREAMS)], made = {NULL, any_context(), 0, 0};
    int kind = below(8);
    if (s->born) return;
    enter(made.context);
    made.is_default = kind >= 6;
    if (kind == 6) made.handle = cudaStreamLegacy;
    else if (kind == 7) made.handle = cudaStreamPerThread;
    else MUST(cudaStreamCreateWithFlags(&made.handle, kind % 2 ? cudaStreamNonBlocking : cudaStreamDefault));
    if (made.is_default && stream_is_taken(made.handle, made.context)) return;
    made.born = ++births;
    *s = made;
    tell("stream %d: %p of context %d", index_of(s), (void *)s->handle, s->context);
}

static int is_recorded_for(const block *b, int s, long born)
{
    for (int i = 0; i < b->n_records; i++)
        if (b->records[i].stream == s && b->records[i].born == born) return 1;
    return 0;
}

static int is_recorded(const stream *s)
{
    for (int i = 0; i < BLOCKS; i++)
        if (blocks[i].ptr && is_recorded_for(&blocks[i], index_of(s), s->born)) return 1;
    return 0;
}

static void do_stream_end(void)
{
    stream *s = any_stream(-1);
    if (!s || s->is_default) return;
    if (is_recorded(s) || one_in(2)) {
        enter_for(s);
        tell("retire stream %d", index_of(s));
        if (CALL(galloc_stream_retire(s->handle), 0)) return;
    }
    tell("end stream %d", index_of(s));
    enter(s->context);
    MUST(cudaStreamDestroy(s->handle));
    s->born = 0;
}

/* ---- use --------------------------------------------------------------------------------------------------------- */

static void use_end(use *u)
{
    if (u->event) MUST(cudaEventDestroy(u->event));
    u->event = NULL;
}

static use use_by(const stream *s)
{
    use u = {NULL, index_of(s), s->context, s->born};
    enter(s->context);
    MUST(cudaEventCreateWithFlags(&u.event, cudaEventDisableTiming));
    MUST(cudaEventRecord(u.event, s->handle));
    return u;
}

/* What the stream is given from now on comes after the use. */
static void after(const stream *s, const use *u)
{
    if (!u->event || u->born == s->born) return;
    enter(s->context);
    MUST(cudaStreamWaitEvent(s->handle, u->event, 0));
}

static void after_all(const stream *s, const block *b)
{
    after(s, &b->given);
    after(s, &b->write);
    for (int i = 0; i < b->n_reads; i++) after(s, &b->reads[i]);
}

static void reads_end(block *b)
{
    while (b->n_reads > 0) use_end(&b->reads[--b->n_reads]);
}

static void block_forget(block *b)
{
    use_end(&b->given);
    use_end(&b->write);
    reads_end(b);
    memset(b, 0, sizeof *b);
}

static void use_block(block *b, const stream *s, int writes)
{
    sim_access access = {b->ptr, b->bytes, SIM_READ | SIM_CHECK, b->tag};
    writes |= !b->written;
    if (b->lost || (!writes && b->n_reads == READS)) return;
    tell("%s block %d on stream %d", writes ? "write" : "read", (int)(b - blocks), index_of(s));
    if (writes) after_all(s, b);
    else after(s, &b->write);
    if (writes) access.how = SIM_WRITE, access.tag = b->tag = ++tags;
    enter(s->context);
    MUST(sim_launch(s->handle, &access, 1));
    done_uses++;
    if (!writes) {
        b->reads[b->n_reads++] = use_by(s);
        return;
    }
    reads_end(b);
    use_end(&b->write);
    b->write = use_by(s);
    b->written = 1;
}

static block *any_block(void)
{
    for (int tries = 0; tries < 100; tries++) {
        block *b = &blocks[below(BLOCKS)];
        if (b->ptr) return b;
    }
    return NULL;
}

static int device_of_block(const block *b) { return pools[b->pool].device; }

static void do_use(void)
{
    block *b = any_block();
    const stream *s = b ? any_stream(device_of_block(b)) : NULL;
    if (s) use_block(b, s, below(2));
}

static void do_record(void)
{
    block *b = any_block();
    const stream *s = b && !b->lost ? any_stream(device_of_block(b)) : NULL;
    if (!s || b->n_records == READS || is_recorded_for(b, index_of(s), s->born)) return;
    tell("record block %d for stream %d", (int)(b - blocks), index_of(s));
    enter_for(s);
    if (CALL(galloc_record_stream(b->ptr, s->handle), 0)) return;
    b->records[b->n_records].stream = index_of(s);
    b->records[b->n_records++].born = s->born;
    use_block(b, s, below(2));
}

/* ---- the shadow of what is mapped -------------------------------------------------------------------------------- */

static void on_map(galloc_pool *handle, void *addr, size_t bytes, void *user)
{
    char *begin = addr;
    (void)user;
    for (int i = 0; i < n_ranges; i++)
        if (ranges[i].begin < begin + bytes && begin < ranges[i].begin + ranges[i].bytes) wrong("mapped twice", 0);
    if (n_ranges == RANGES) wrong("too many ranges", 0);
    else ranges[n_ranges++] = (range){begin, bytes, handle};
}

static void on_unmap(galloc_pool *handle, void *addr, size_t bytes, void *user)
{
    int i = 0;
    (void)user;
    while (i < n_ranges && (ranges[i].begin != addr || ranges[i].bytes != bytes || ranges[i].pool != handle)) i++;
    if (i == n_ranges) wrong("unmapped what was not mapped", 0);
    else ranges[i] = ranges[--n_ranges];
}

static void expect_mapped(const block *b)
{
    const char *at = b->ptr, *end = b->ptr + b->bytes;
    while (pools[b->pool].shadowed && at < end) {
        int i = 0;
        while (i < n_ranges && (ranges[i].begin > at || ranges[i].begin + ranges[i].bytes <= at)) i++;
        if (i == n_ranges) wrong("a block is not mapped, for all that was told", 0);
        at = i == n_ranges ? end : ranges[i].begin + ranges[i].bytes;
    }
}

/* ---- allocate and free ------------------------------------------------------------------------------------------- */

static int overlaps(const block *a, const block *b)
{
    return a->ptr < b->ptr + b->bytes && b->ptr < a->ptr + a->bytes;
}

/* Addresses that are given out are nobody else's; what was lost there is forgotten. */
static void block_arrives(block *new)
{
    for (int i = 0; i < BLOCKS; i++) {
        block *b = &blocks[i];
        if (b == new || !b->ptr || !overlaps(b, new)) continue;
        if (!b->lost) wrong("two blocks overlap", 0);
        block_forget(b);
    }
}

static size_t any_bytes(void)
{
    switch (below(5)) {
    case 0: return 1 + (size_t)below(2000);
    case 1: return 1 + (size_t)below(300000);
    case 2: return 1 + (size_t)below(3000000);
    case 3: return (size_t)(1 + below(16)) * KIB(64);
    default: return 1 + (size_t)below(24 << 20);
    }
}

/* Mostly of the stream's device. */
static int any_pool_for(const stream *s)
{
    for (int tries = 0; tries < 20; tries++) {
        const pool *p = &pools[below(POOLS)];
        if (!p->handle || (p->device != device_of(s) && !one_in(6))) continue;
        return (int)(p - pools);
    }
    return -1;
}

static galloc_request any_request(galloc_pool *handle, const stream *s)
{
    galloc_request request = {.bytes = any_bytes(), .stream = s->handle, .pool = handle};
    if (one_in(12)) request.max_bytes = request.bytes + (size_t)below(8 << 20);
    if (one_in(16)) request.alignment = (size_t)1 << below(24);
    if (one_in(10)) request.lifetime = GALLOC_LIFETIME_LONG;
    return request;
}

static void do_malloc(void)
{
    block *b = &blocks[below(BLOCKS)];
    const stream *s = any_stream(-1);
    int k = s ? any_pool_for(s) : -1;
    void *ptr = NULL;
    cudaError_t error;
    if (k < 0 || b->ptr) return;
    galloc_request request = any_request(pools[k].handle, s);
    enter_for(s);
    tell("block %d: %zu bytes of pool %d for stream %d", (int)(b - blocks), request.bytes, k, index_of(s));
    if (one_in(3)) error = CALL(galloc_alloc(&ptr, &request), last_error == cudaErrorMemoryAllocation);
    else error = CALL(galloc_pool_malloc(request.pool, &ptr, request.bytes, s->handle),
                      last_error == cudaErrorMemoryAllocation);
    done_mallocs++;
    if (error && ptr) wrong("a failure gave an address", error);
    if (error) return;
    b->ptr = ptr;
    b->bytes = request.bytes;
    b->pool = k;
    b->given = use_by(s);
    block_arrives(b);
    expect_mapped(b);
    tell("  %p", ptr);
}

static int is_said(const block *b, const use *u)
{
    return is_recorded_for(b, u->stream, u->born);
}

static int is_there(const use *u) { return u->event && streams[u->stream].born == u->born; }

/* The stream comes after all use but what was recorded, and but what streams in `named` did. */
static void after_unsaid(const stream *s, const block *b, const cudaStream_t *named, int n)
{
    const use *all[READS + 2] = {b->written ? &b->write : &b->given};
    int n_all = 1;
    for (int i = 0; i < b->n_reads; i++) all[n_all++] = &b->reads[i];
    for (int i = 0; i < n_all; i++) {
        int k = 0;
        while (k < n && !(is_there(all[i]) && streams[all[i]->stream].handle == named[k])) k++;
        if (k == n && !is_said(b, all[i])) after(s, all[i]);
    }
}

/* Streams that used the block, besides `s`, which comes first. Default streams are their context's: they are not
   named. */
static int name_users(const stream *s, const block *b, cudaStream_t *named)
{
    int n = 1;
    named[0] = s->handle;
    for (int i = -1; i < b->n_reads; i++) {
        const use *u = i < 0 ? &b->write : &b->reads[i];
        if (is_there(u) && !streams[u->stream].is_default) named[n++] = streams[u->stream].handle;
    }
    return n;
}

/* What was lost may be refused, since its address may be in memory of another pool by now. */
static int is_elsewhere(const block *b, cudaError_t error)
{
    return b->lost && error == cudaErrorInvalidDevicePointer;
}

static void free_block(block *b)
{
    cudaStream_t named[READS + 2];
    const stream *s = any_stream(b->lost ? -1 : one_in(4) ? -1 : device_of_block(b));
    int n = 1;
    cudaError_t error;
    if (!s) s = any_stream(-1);
    if (!s) return;
    expect_mapped(b);
    if (one_in(4)) n = name_users(s, b, named);
    after_unsaid(s, b, named + 1, n - 1);
    enter_for(s);
    tell("free block %d on stream %d, %d named", (int)(b - blocks), index_of(s), n);
    if (n > 1) error = CALL(galloc_free_after(b->ptr, named, n), is_elsewhere(b, last_error));
    else error = CALL(galloc_free(b->ptr, s->handle), is_elsewhere(b, last_error));
    if (error && !is_elsewhere(b, error)) return;
    done_frees++;
    block_forget(b);
}

static void do_free(void)
{
    block *b = any_block();
    if (b) free_block(b);
}

static void do_resize(void)
{
    block *b = any_block();
    const stream *s = b && !b->lost ? any_stream(device_of_block(b)) : NULL;
    cudaError_t error;
    size_t bytes;
    if (!s) return;
    bytes = 1 + (size_t)below((int)(2 * b->bytes + 1));
    after_all(s, b);
    enter_for(s);
    tell("resize block %d from %zu to %zu on stream %d", (int)(b - blocks), b->bytes, bytes, index_of(s));
    error = CALL(galloc_resize(b->ptr, bytes, s->handle),
                 last_error == cudaErrorNotSupported || last_error == cudaErrorMemoryAllocation);
    if (error) return;
    b->bytes = bytes;
    block_arrives(b);
    expect_mapped(b);
    reads_end(b);
    use_end(&b->write);
    use_end(&b->given);
    b->given = use_by(s);
    b->written = 0;
}

/* ---- pools ------------------------------------------------------------------------------------------------------- */

static galloc_config any_config(int device)
{
    static const char *const kinds[] = {"", "", "", "expandable_segments:False", "like:pytorch", "strategy:pooled",
                                        "strategy:heuristic", "backend:cudaMalloc", "backend:cudaMallocAsync",
                                        "like:pytorch,expandable_segments:True"};
    static const char *const limits[] = {"", "memory_limit:24M", "memory_limit:48M", "device_limit:60M",
                                         "memory_limit:96M"};
    static const char *const others[] = {"", "overhead:0", "overhead:0.5", "reuse:completed", "gc_age:1ms",
                                         "gc_threshold:0.3", "wait_limit_ms:1", "stats:exact", "lane_bytes:0",
                                         "growth:2M"};
    const char *texts[] = {kinds[below(10)], limits[below(5)], others[below(10)]};
    galloc_config config = galloc_config_default();
    char said[200];
    for (int i = 0; i < 3; i++) {
        tell("  %s", texts[i]);
        if (*texts[i]) MUST(galloc_config_parse(&config, texts[i], said, sizeof said));
    }
    config.device = device;
    return config;
}

static void pool_note(pool *p, galloc_pool *handle, int device)
{
    galloc_callbacks calls = {.on_map = on_map, .on_unmap = on_unmap};
    galloc_config config = galloc_config_default();
    MUST(galloc_pool_config(handle, &config));
    *p = (pool){handle, device, !config.expandable_segments, 0};
    if (p->mortal || one_in(2)) return;
    MUST(galloc_pool_set_callbacks(handle, &calls));
    p->shadowed = 1;
}

static void pool_end_at(pool *p)
{
    for (int i = 0; i < BLOCKS; i++)
        if (blocks[i].ptr && blocks[i].pool == p - pools) free_block(&blocks[i]);
    for (int i = 0; i < BLOCKS; i++)
        if (blocks[i].ptr && blocks[i].pool == p - pools) return;
    enter(any_context());
    tell("end pool %d", (int)(p - pools));
    if (CALL(galloc_pool_destroy(p->handle), 0)) return;
    for (int i = 0; i < n_ranges; i++)
        if (ranges[i].pool == p->handle) wrong("the pool is gone, and a range of it is not", 0);
    p->handle = NULL;
}

static void do_pool(void)
{
    pool *p = &pools[below(POOLS)];
    galloc_pool *handle = NULL;
    int device = below(DEVICES);
    if (p->handle && (p < pools + DEVICES || !one_in(6))) return; /* the default ones stay */
    if (p->handle) {
        pool_end_at(p);
        return;
    }
    tell("pool %d of device %d", (int)(p - pools), device);
    galloc_config config = any_config(device);
    enter(any_context());
    if (!CALL(galloc_pool_create(&handle, &config), 0)) pool_note(p, handle, device);
}

static void expect_equations(galloc_pool *handle)
{
    galloc_stats stats;
    if (CALL(galloc_pool_stats(handle, &stats), 0)) return;
    if (stats.allocated.current + stats.cached.current != stats.reserved.current) wrong("the counters are wrong", 0);
}

static void do_upkeep(void)
{
    const pool *p = &pools[below(POOLS)];
    int refused;
    if (!p->handle) return;
    enter(any_context());
    tell("upkeep of pool %d", (int)(p - pools));
    switch (below(6)) {
    case 0: (void)CALL(galloc_pool_trim(p->handle, (size_t)below(32 << 20), NULL), 0); break;
    case 1: (void)CALL(galloc_pool_sync_point(p->handle, NULL), 0); break;
    case 2:
        (void)CALL(galloc_pool_reserve(p->handle, 1 + (size_t)below(8 << 20)),
                   last_error == cudaErrorMemoryAllocation || last_error == cudaErrorNotSupported);
        break;
    case 3:
        refused = galloc_pool_check(p->handle);
        if (refused) wrong("galloc_pool_check", refused);
        break;
    case 4: expect_equations(p->handle); break;
    default: sim_run(below(50));
    }
}

/* ---- contexts that end ------------------------------------------------------------------------------------------- */

/* What was queued there is over, and its streams and events are gone. */
static void use_ends_with(use *u, int c)
{
    if (u->event && u->context == c) u->event = NULL;
}

static void forget_context(int c)
{
    for (int i = 0; i < BLOCKS; i++) {
        block *b = &blocks[i];
        use_ends_with(&b->given, c);
        use_ends_with(&b->write, c);
        for (int k = 0; k < b->n_reads; k++) use_ends_with(&b->reads[k], c);
    }
    for (int i = 0; i < STREAMS; i++)
        if (streams[i].context == c) streams[i].born = 0;
}

static void do_reset(void)
{
    int device = below(DEVICES);
    if (!one_in(8)) return;
    tell("reset device %d", device);
    for (int i = 0; i < BLOCKS; i++)
        if (blocks[i].ptr && pools[blocks[i].pool].mortal && device_of_block(&blocks[i]) == device) blocks[i].lost = 1;
    enter(device);
    MUST(cudaDeviceReset());
    forget_context(device);
    MUST(cudaSetDevice(device));
    MUST(cudaFree(NULL));
    MUST(cuCtxGetCurrent(&contexts[device].handle));
    done_resets++;
}

/* galloc learns of a context by an allocation on one of its streams. */
static void context_introduce(void)
{
    void *ptr = NULL;
    cudaError_t error = galloc_malloc(&ptr, 1, cudaStreamLegacy);
    if (error && error != cudaErrorMemoryAllocation) wrong("galloc_malloc in a new context", error);
    if (ptr) MUST(galloc_free(ptr, cudaStreamLegacy));
}

static void do_context(void)
{
    int c = DEVICES + below(CONTEXTS - DEVICES);
    context *own = &contexts[c];
    if (!one_in(4)) return;
    if (own->there) {
        tell("end context %d", c);
        for (int i = 0; i < STREAMS; i++)
            if (streams[i].born && streams[i].context == c && !streams[i].is_default && one_in(2))
                (void)CALL(galloc_stream_retire(streams[i].handle), 0);
        enter(0);
        MUST(cuCtxDestroy(own->handle));
        own->there = 0;
        forget_context(c);
        return;
    }
    own->device = below(DEVICES);
    tell("context %d of device %d", c, own->device);
    MUST(cuCtxCreate(&own->handle, NULL, 0, own->device));
    own->there = 1;
    context_introduce();
}

/* ---- a program --------------------------------------------------------------------------------------------------- */

/* What the second device has that the first has not, by the program's number. */
static const sim_unlike second[] = {{.memory = 0}, {.memory = MIB(96), .granularity = MIB(8)},
                                    {.memory = MIB(320), .granularity = MIB(4), .no_rdma = 1}, {.no_vmm = 1}};

static void world_begin(uint64_t seed)
{
    sim_options options = sim_defaults();
    chance.state = seed * 0x9e3779b97f4a7c15u;
    (void)roll(&chance);
    memset(contexts, 0, sizeof contexts);
    memset(streams, 0, sizeof streams);
    memset(blocks, 0, sizeof blocks);
    memset(pools, 0, sizeof pools);
    n_ranges = failed = 0;
    births = 0;
    faults = seed % 3 == 2;
    options.devices = DEVICES;
    options.memory = MIB(160);
    options.unlike[1] = second[seed / 3 % 4];
    options.seed = seed;
    options.pace = below(3) - 1;
    options.lag = one_in(3) ? below(40) : 0;
    options.panic = 0;
    begin_with(options);
    for (int d = 0; d < DEVICES; d++) {
        galloc_pool *handle = NULL;
        MUST(cudaSetDevice(d));
        MUST(cudaFree(NULL));
        MUST(cuCtxGetCurrent(&contexts[d].handle));
        contexts[d].device = d;
        contexts[d].there = 1;
        MUST(galloc_pool_default(&handle, d));
        pool_note(&pools[d], handle, d);
    }
    for (int i = 0; i < 6; i++) do_stream();
}

static void do_something(void)
{
    switch (below(24)) {
    case 0: case 1: do_stream(); break;
    case 2: do_stream_end(); break;
    case 3: do_pool(); break;
    case 4: do_reset(); break;
    case 5: do_context(); break;
    case 6: do_upkeep(); break;
    case 7: do_record(); break;
    case 8: do_resize(); break;
    case 9: case 10: case 11: case 12: case 13: case 14: do_malloc(); break;
    case 15: case 16: case 17: case 18: do_free(); break;
    default: do_use();
    }
}

/* All is given back: what galloc holds then would be a leak. */
static void world_end(void)
{
    char text[512] = "";
    faults = 0;
    while (!any_stream(-1)) do_stream();
    for (int tries = 0; tries < 3; tries++)
        for (int i = 0; i < BLOCKS; i++)
            if (blocks[i].ptr) free_block(&blocks[i]);
    for (int k = 0; k < POOLS; k++)
        if (pools[k].handle && galloc_pool_check(pools[k].handle)) wrong("galloc_pool_check at the end", k);
    for (int k = DEVICES; k < POOLS; k++)
        if (pools[k].handle) pool_end_at(&pools[k]);
    for (int i = 0; i < STREAMS; i++) {
        if (!streams[i].born || streams[i].is_default) continue;
        enter(streams[i].context);
        MUST(cudaStreamDestroy(streams[i].handle));
    }
    enter(0);
    for (int c = DEVICES; c < CONTEXTS; c++)
        if (contexts[c].there) MUST(cuCtxDestroy(contexts[c].handle));
    MUST(galloc_shutdown());
    sim_run(-1);
    if (sim_leaks(text, sizeof text)) wrong(text, 0);
    if (sim_malloc_live()) wrong("host memory leaks", 0);
}

/* 1: all was well. */
static int play(uint64_t seed)
{
    world_begin(seed);
    for (int i = 0; i < STEPS && !failed && !sim_findings(SIM_ANY); i++) do_something();
    if (!failed && !sim_findings(SIM_ANY)) world_end();
    if (sim_findings(SIM_ANY)) wrong("something was found", 0);
    if (failed) print_findings();
    if (failed) abandon_pools();
    sim_stop();
    done_programs++;
    return !failed;
}

static void say_what_was_done(void)
{
    printf("    %llu programs, %llu mallocs, %llu uses, %llu frees, %llu resets, %llu refused for a failing call\n",
           done_programs, done_mallocs, done_uses, done_frees, done_resets, done_refused);
}

static int number(const char *name, uint64_t *n)
{
    const char *text = getenv(name);
    if (text && *text) *n = strtoull(text, NULL, 10);
    return text && *text;
}

static int play_long(uint64_t seconds)
{
    uint64_t seed = 1;
    int bad = 0;
    time_t end = time(NULL) + (time_t)seconds;
    (void)number("FUZZ_FROM", &seed);
    for (; time(NULL) < end && bad < 20; seed++) {
        if (play(seed)) continue;
        printf("---- FUZZ_SEED=%llu fails\n", (unsigned long long)seed);
        bad++;
    }
    printf("to seed %llu, %d failed\n", (unsigned long long)seed, bad);
    say_what_was_done();
    return bad != 0;
}

TEST(random_worlds)
{
    uint64_t rounds = 2000;
    (void)number("GALLOC_ROUNDS", &rounds);
    for (uint64_t seed = 1; seed <= rounds; seed++) {
        if (EXPECT(play(seed))) continue;
        printf("    FUZZ_SEED=%llu\n", (unsigned long long)seed);
        return;
    }
}

int main(int argc, char **argv)
{
    uint64_t n;
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (number("FUZZ_SECONDS", &n)) return play_long(n);
    if (!number("FUZZ_SEED", &n)) return test_main(argc, argv);
    telling = 1;
    return !play(n);
}
