/* test_requests.c - each kind of request against each way in which it ends, with all kinds of settings: what the
   program is asked and told, the counters, the history, the log of the run, and the blocks that were there. */

#include "setup.h"

#include "events.h"

/* ---- kinds of requests ------------------------------------------------------------------------------------------- */

enum { BY_DEFAULT, FROM_A_POOL, ALIGNED, TAGGED, LONG_LIVED, ROOM, CAPTURED, RESERVE, GROWTH, KINDS };

static const char *const names[KINDS] = {"galloc_malloc", "galloc_pool_malloc", "galloc_alloc", "galloc_alloc",
                                         "galloc_alloc", "galloc_malloc_growable", "galloc_malloc",
                                         "galloc_pool_reserve", "galloc_resize"};

/* Settings of the default pool, and what they mean for requests. */
enum {
    ROOM_IS_MEMORY = 1, /* so a block with room has the memory to grow */
    OTHER_BACKEND = 2,
    NOT_ASKED = 4,      /* on_oom can ask for no attempt, and is not called */
    CONTENTS = 8,       /* guards and poison are compared, so the device has memory */
    NOT_REUSED = 16,    /* by captured streams */
    BOUNDED = 32,       /* host waits are: nobody waits for what has no event, or for work that does not go on */
    DRIVERS_POOL = 64   /* keeps the limit that it was made with, and passes it until the next call */
};

static const struct settings {
    const char *text;
    int how;
} all_settings[] = {
    {"", 0},
    {"expandable_segments:False", ROOM_IS_MEMORY},
    {"strategy:pooled", 0},
    {"strategy:heuristic", 0},
    {"like:pytorch", ROOM_IS_MEMORY | NOT_REUSED},
    {"like:pytorch,expandable_segments:True", NOT_REUSED},
    {"debug:guards+poison+quarantine,quarantine_bytes:64M", CONTENTS},
    {"debug:guards+quarantine,quarantine_bytes:64M,debug_sample:100", CONTENTS},
    {"stats:exact", 0},
    {"gc_threshold:0.5,gc_age:1ms", 0},
    {"reuse:none", NOT_REUSED},
    {"wait_limit_ms:0", BOUNDED},
    {"wait_limit_ms:10", BOUNDED},
    {"max_retries:0", NOT_ASKED},
    {"overhead:0,growth:2M,lane_bytes:0", 0},
    {"backend:cudaMalloc", ROOM_IS_MEMORY | OTHER_BACKEND | NOT_REUSED},
    {"backend:cudaMallocAsync", DRIVERS_POOL | ROOM_IS_MEMORY | OTHER_BACKEND | NOT_REUSED},
};

/* ---- a pool of 64 MiB, 36 of which are in use -------------------------------------------------------------------- */

enum { LIMIT = 64 << 20, HELD = 36 << 20, ASKED = 40 << 20 };

static const struct bound {
    const char *setting, *cause;
    size_t memory, outside; /* bytes of the device; those of them that the program has taken */
} bounds[] = {
    {"memory_limit:64M", "; the pool's memory_limit is 67108864", GIB(1), 0},
    {"per_process_memory_fraction:0.0625", "; per_process_memory_fraction leaves the pool 67108864", GIB(1), 0},
    {"device_limit:64M", "; the device_limit is 67108864, of which the device's pools hold ", GIB(1), 0},
    {"log:debug", "; the device has 67108864", LIMIT, 0},
    {"log:debug", ": out of memory", GIB(1), GIB(1) - LIMIT},
};

static int unrecorded; /* there is neither a history nor a log of the run */
static cudaStream_t *of_requests; /* a default stream that they name; NULL: each world has one of its own */

typedef struct world {
    const struct settings *settings;
    const struct bound *bound;
    galloc_pool *pool;
    cudaStream_t s, captured;
    void *held, *grows, *kept, *outside;
    size_t written; /* bytes of each block that work writes, at most */
    char folder[64], file[100], log[100];
    int oom, rejects;
    galloc_report last; /* of their arguments */
} world;

static int on_oom(const galloc_report *report, void *user)
{
    world *w = user;
    w->oom++;
    w->last = *report;
    expect_sums(report);
    EXPECT(inside_unlocked(w->pool));
    EXPECT_EQ(galloc_pool_check(w->pool), 0);
    EXPECT(!report->rejected);
    return 0;
}

static void on_reject(const galloc_report *report, void *user)
{
    world *w = user;
    w->rejects++;
    w->last = *report;
    expect_sums(report);
    EXPECT(inside_unlocked(w->pool));
    EXPECT(report->rejected);
}

/* The ranges of addresses with memory, as on_map and on_unmap tell of them. */
static struct {
    int on; /* they are told of */
    void (*within)(world *w); /* what on_map does besides */
    int n;
    struct {
        char *at;
        size_t bytes;
    } range[256];
} told;

static void on_map(galloc_pool *pool, void *addr, size_t bytes, void *user)
{
    char *at = addr;
    EXPECT(inside_unlocked(pool) && pool == ((world *)user)->pool);
    for (int i = 0; i < told.n; i++)
        EXPECT(at + bytes <= told.range[i].at || told.range[i].at + told.range[i].bytes <= at);
    if (!EXPECT(told.n < 256)) return;
    told.range[told.n].at = at;
    told.range[told.n++].bytes = bytes;
    if (told.within) told.within(user);
}

static void on_unmap(galloc_pool *pool, void *addr, size_t bytes, void *user)
{
    int i = 0;
    EXPECT(inside_unlocked(pool) && pool == ((world *)user)->pool);
    while (i < told.n && (told.range[i].at != addr || told.range[i].bytes != bytes)) i++;
    if (EXPECT(i < told.n)) told.range[i] = told.range[--told.n];
}

/* All bytes are in ranges that were told of. */
static void expect_told(const void *ptr, size_t bytes)
{
    const char *at = ptr, *end = at + bytes;
    for (int i = 0; at < end && i < told.n; i++) {
        if (at < told.range[i].at || at >= told.range[i].at + told.range[i].bytes) continue;
        at = told.range[i].at + told.range[i].bytes;
        i = -1;
    }
    EXPECT(at >= end);
}

/* Sets them all, `asked` as on_oom. */
static void set_callbacks(world *w, int (*asked)(const galloc_report *report, void *user))
{
    galloc_callbacks callbacks = {asked, on_reject, told.on ? on_map : NULL, told.on ? on_unmap : NULL, w};
    told.n = 0;
    OK(galloc_pool_set_callbacks(w->pool, &callbacks));
}

static size_t texts_in(const char *name, const char *part)
{
    char *all = text_in(name);
    size_t n = 0;
    for (const char *at = all; (at = strstr(at, part)) != NULL; at++) n++;
    free(all);
    return n;
}

/* Rows of requests that failed, in the log of the run and in the history. */
static size_t failed_rows(const world *w)
{
    if (unrecorded) return 0;
    OK(galloc_annotate("now"));
    return texts_in(w->log, ",allocate failure,");
}

static size_t allocations(const world *w)
{
    if (unrecorded) return 0;
    OK(galloc_annotate("now"));
    return texts_in(w->log, ",allocate,0x");
}

static size_t events_of_kind(const world *w, const char *name)
{
    if (unrecorded) return 0;
    value *v = snapshot(w->pool, GALLOC_SNAPSHOT_JSON);
    size_t n = events_named(v, name);
    value_free(v);
    return n;
}

static size_t failed_events(const world *w) { return events_of_kind(w, "oom"); }

/* What the rows say of requests in the last column. */
static const char *const words[KINDS] = {"", "", "align=4194304", "tag=7", "long", "room=", "capture=", "", "resize"};

/* The id of the stream of requests; 0: there is none, or it is a legacy stream. */
static unsigned long long id_of(const world *w, int kind)
{
    return kind == RESERVE || !w->s || w->s == cudaStreamLegacy ? 0 : stream_id(w->s);
}

/* The last event of that name is of so many bytes on the stream of the kind's requests. */
static void expect_event(const world *w, const char *name, int kind, const void *ptr, size_t bytes)
{
    if (unrecorded) return;
    value *v = snapshot(w->pool, GALLOC_SNAPSHOT_JSON);
    const value *e = event_named(v, name);
    if (ptr) EXPECT_EQ(number_of(e, "addr"), (uintptr_t)ptr);
    EXPECT_EQ(number_of(e, "size"), bytes);
    if (kind != CAPTURED) EXPECT_EQ(number_of(e, "stream"), id_of(w, kind));
    if (ptr && kind == TAGGED) EXPECT_EQ(number_of(e, "tag"), 7);
    value_free(v);
}

/* The log of the run has a row of it, with its stream and these words. */
static void expect_row(const world *w, const char *action, int kind, const void *ptr, size_t bytes, const char *more)
{
    char row[200], address[20] = "0x0";
    char *all, *at, *end;
    int n, found = 0;
    if (unrecorded) return;
    if (ptr) snprintf(address, sizeof address, "%p", ptr);
    n = snprintf(row, sizeof row, ",%s,%s,%zu,", action, address, bytes);
    if (kind != CAPTURED) snprintf(row + n, sizeof row - (size_t)n, "%llu,1,", id_of(w, kind));
    OK(galloc_annotate("now"));
    all = text_in(w->log);
    for (at = all; (at = strstr(at, row)) != NULL; at = end + 1) {
        end = strchr(at, '\n');
        *end = 0;
        found += strstr(at, more) != NULL;
    }
    EXPECT(found);
    free(all);
}

static void world_begin(world *w, const struct settings *settings, const struct bound *bound, const char *more)
{
    char conf[500];
    sim_options options = sim_defaults();
    options.mode = settings->how & CONTENTS ? SIM_BACKED : SIM_LEDGER;
    options.memory = bound->memory;
    options.pace = SIM_PACE_STILL;
    begin_with(options);
    memset(w, 0, sizeof *w);
    w->settings = settings;
    w->bound = bound;
    strcpy(w->folder, "/tmp/galloc_requests.XXXXXX");
    EXPECT(mkdtemp(w->folder));
    snprintf(w->file, sizeof w->file, "%s/out.json", w->folder);
    snprintf(w->log, sizeof w->log, "%s/log.csv", w->folder);
    snprintf(conf, sizeof conf, "%s%s%s%s,snapshot_on_oom:%s%s%s", settings->text, *settings->text ? "," : "",
             bound->setting, more, w->file, unrecorded ? "" : ",history:1000,trace:", unrecorded ? "" : w->log);
    setenv("GALLOC_CONF", conf, 1);
    if (bound->outside) OK(cudaMalloc(&w->outside, bound->outside));
    OK(galloc_pool_default(&w->pool, -1));
    set_callbacks(w, on_oom);
    w->s = of_requests ? *of_requests : stream_new();
    w->captured = stream_new();
    w->written = settings->how & CONTENTS ? MIB(1) : HELD;
    w->held = get(w->pool, HELD, w->s);
    put(w->s, w->held, w->written, 1);
}

static void world_end(world *w)
{
    OK(galloc_free(w->held, w->s));
    sim_run(-1);
    expect_healthy(w->pool, 0);
    OK(galloc_shutdown());
    EXPECT_EQ(told.n, 0);
    if (w->outside) OK(cudaFree(w->outside));
    if (!of_requests) stream_end(w->s);
    stream_end(w->captured);
    unsetenv("GALLOC_CONF");
    unlink(w->file);
    unlink(w->log);
    EXPECT_EQ(rmdir(w->folder), 0);
    finish();
}

/* Makes the request; *p is what it leaves. */
static cudaError_t request(world *w, int kind, size_t bytes, void **p)
{
    galloc_request r = {0};
    r.bytes = bytes;
    r.stream = w->s;
    r.pool = w->pool;
    r.alignment = kind == ALIGNED ? MIB(4) : 0;
    r.tag = kind == TAGGED ? 7 : 0;
    r.lifetime = kind == LONG_LIVED ? GALLOC_LIFETIME_LONG : GALLOC_LIFETIME_ANY;
    switch (kind) {
    case BY_DEFAULT: return galloc_malloc(p, bytes, w->s);
    case FROM_A_POOL: return galloc_pool_malloc(w->pool, p, bytes, w->s);
    case ROOM: return galloc_malloc_growable(p, bytes, bytes + MIB(2), w->s);
    case RESERVE: return galloc_pool_reserve(w->pool, bytes);
    case GROWTH: return galloc_resize(w->grows, bytes, w->s);
    case CAPTURED: return galloc_malloc(p, bytes, w->captured);
    default: return galloc_alloc(p, &r);
    }
}

/* The capture is valid, and its graph goes at once. */
static void capture_end(cudaStream_t stream)
{
    cudaGraph_t graph = NULL;
    OK(cudaStreamEndCapture(stream, &graph));
    EXPECT(graph != NULL);
    OK(cudaGraphDestroy(graph));
}

static int applies(int kind, const struct settings *settings)
{
    if (kind == GROWTH) return !(settings->how & ROOM_IS_MEMORY);
    return kind != RESERVE || !(settings->how & OTHER_BACKEND);
}

/* The file has the state of the pool, and the shortage. */
static void expect_file(const world *w, size_t events)
{
    char *all = text_in(w->file);
    value *v = value_of_json(all, bytes_in(w->file));
    const value *pools = value_of(value_of(v, "galloc"), "pools");
    if (EXPECT(v && pools && pools->first)) {
        EXPECT_EQ(number_of(pools->first, "live"), stats_of(w->pool).live.current);
        if (!unrecorded) EXPECT_EQ(events_named(v, "oom"), events);
    }
    value_free(v);
    free(all);
}

/* Refuses it, and checks all that a program sees of that. `rejected`: at once. `asked`: so often on_oom is called. */
static void expect_refused_after(world *w, int kind, size_t bytes, const char *cause, int rejected, int asked)
{
    void *p = w;
    char said[100];
    galloc_report r;
    galloc_stats now, before;
    size_t rows, events;
    int counts = kind != RESERVE && kind != GROWTH; /* as an allocation */
    size_t asked_for = bytes - (kind == GROWTH ? 512 : 0);
    galloc_pointer as, is;
    w->grows = kind == GROWTH ? get_growable(w->pool, 512, bytes, w->s) : NULL;
    if (w->grows) put(w->s, w->grows, 512, 6);
    as = info_of(w->grows ? w->grows : w->held);
    w->oom = w->rejects = 0;
    rows = failed_rows(w);
    events = failed_events(w);
    before = stats_of(w->pool);
    if (kind == CAPTURED) OK(cudaStreamBeginCapture(w->captured, cudaStreamCaptureModeThreadLocal));
    EXPECT_EQ(request(w, kind, bytes, &p), cudaErrorMemoryAllocation);
    if (kind == CAPTURED) capture_end(w->captured);
    now = stats_of(w->pool);
    EXPECT(kind == RESERVE || kind == GROWTH ? p == w : !p);
    OK(cudaPeekAtLastError());
    EXPECT_EQ(w->oom, asked);
    EXPECT_EQ(w->rejects, rejected);
    EXPECT_EQ(now.live.current, before.live.current);
    EXPECT_EQ(now.live.peak, before.live.peak);
    EXPECT_EQ(now.blocks.current, before.blocks.current);
    EXPECT_EQ(now.mallocs, before.mallocs);
    EXPECT_EQ(now.frees, before.frees);
    EXPECT_EQ(now.failures - before.failures, counts);
    EXPECT_EQ(now.rejections - before.rejections, rejected && counts);
    EXPECT(now.reserved.peak <= LIMIT);
    EXPECT_EQ(failed_rows(w), rows + !unrecorded);
    EXPECT_EQ(failed_events(w), events + !unrecorded);
    expect_event(w, "oom", kind, NULL, asked_for);
    expect_row(w, "allocate failure", kind, NULL, asked_for, "");
    if (rejected) EXPECT_EQ(bytes_in(w->file), 0);
    else expect_file(w, events + !unrecorded);
    snprintf(said, sizeof said, "%s: out of memory: asked for %zu ", names[kind], asked_for);
    EXPECT(!strncmp(galloc_last_message(), said, strlen(said)));
    snprintf(said, sizeof said, "; live %zu, held %zu", now.live.current, now.reserved.current);
    EXPECT(strstr(galloc_last_message(), said));
    EXPECT(strstr(galloc_last_message(), cause));
    EXPECT(strstr(log_text, galloc_last_message()));
    OK(galloc_oom_report(&r));
    expect_sums(&r);
    EXPECT(strstr(galloc_last_message(), r.cause));
    EXPECT_EQ(r.rejected, rejected);
    EXPECT_EQ(r.captured, kind == CAPTURED);
    EXPECT_EQ(r.grows, kind == GROWTH);
    EXPECT_EQ(r.asked, asked_for);
    if (w->oom || w->rejects) EXPECT_EQ(w->last.asked, asked_for);
    EXPECT_EQ(galloc_pool_check(w->pool), 0);
    look(w->s, w->held, w->written, 1);
    is = info_of(as.base);
    EXPECT(!memcmp(&is, &as, sizeof is));
    OK(galloc_free(get_used(w->pool, 512, w->s, 2), w->s));
    if (w->grows) look(w->s, w->grows, 512, 6);
    if (w->grows) OK(galloc_free(w->grows, w->s));
}

static void expect_refused(world *w, int kind, size_t bytes, const char *cause, int rejected)
{
    expect_refused_after(w, kind, bytes, cause, rejected, !rejected && !(w->settings->how & NOT_ASKED));
}

/* Calls it for each kind of request with all settings, under each of the first n bounds; or, also where that takes
   long, under one of them. */
static void for_each_kind(void (*check)(world *w, int kind), size_t n, int one, const char *more)
{
    world w;
    for (size_t i = 0; i < sizeof all_settings / sizeof *all_settings * n; i++) {
        const struct settings *settings = &all_settings[i / n];
        const struct bound *bound = &bounds[i % n];
        for (int kind = 0; kind < KINDS; kind++) {
            long failures = test_failures;
            int chosen = (i / n + (size_t)kind) % n == i % n;
            if (!applies(kind, settings) || (!chosen && (one || settings->how & CONTENTS))) continue;
            if (told.on && settings->how & OTHER_BACKEND) continue;
            if (unrecorded && settings->how & CONTENTS) continue; /* closes the caches */
            world_begin(&w, settings, bound, more);
            check(&w, kind);
            world_end(&w);
            if (test_failures == failures) continue;
            printf("    %d: %s of \"%s\", \"%s\"\n    %s\n", kind, names[kind], settings->text, bound->setting,
                   galloc_last_message());
        }
    }
}

static void run_out(world *w, int kind) { expect_refused(w, kind, ASKED, w->bound->cause, 0); }
static void ask_for_too_much(world *w, int kind) { expect_refused(w, kind, LIMIT + MIB(2), w->bound->cause, 1); }

/* The one limit that refuses is named, on_oom is asked, and the file is written. */
TEST(a_refusal_is_told_of_alike_for_each_kind_of_request) { for_each_kind(run_out, 5, 0, ""); }

/* on_reject hears of it, and there is no file. */
TEST(a_request_beyond_all_that_a_pool_may_hold_is_told_of_alike) { for_each_kind(ask_for_too_much, 4, 0, ""); }

static void fail_at_once(world *w, int kind)
{
    char cause[200];
    snprintf(cause, sizeof cause, "; refused at once: %s", w->bound->cause + 2);
    expect_refused(w, kind, ASKED, cause, 1);
}

/* Likewise with throw_on_cudamalloc_oom. */
TEST(a_request_that_fails_at_once_is_told_of_alike)
{
    for_each_kind(fail_at_once, 4, 0, ",throw_on_cudamalloc_oom:True");
}

/* ---- served ------------------------------------------------------------------------------------------------------ */

enum { PIECE = 20 << 20 }; /* two do not fit beside what is held */

/* What is free before a request for a piece, which so is served. */
enum way {
    NEW_PAGES,
    FREED,
    CUT_OFF,
    FREED_AND_DONE,
    FREED_ELSEWHERE,
    TWO_HALVES,
    OF_ANOTHER_POOL,
    FREED_BY_ON_OOM,
    LIMIT_RAISED
};

static void *to_free[2]; /* by on_oom, one at each call */

static int free_when_asked(const galloc_report *report, void *user)
{
    world *w = user;
    (void)on_oom(report, user);
    OK(galloc_free(to_free[w->oom - 1], w->s));
    return 1;
}

static int raise_limit_when_asked(const galloc_report *report, void *user)
{
    world *w = user;
    (void)on_oom(report, user);
    OK(galloc_pool_set_limit(w->pool, 2 * LIMIT));
    return 1;
}

static void *get_written(const world *w, galloc_pool *pool, size_t bytes, cudaStream_t stream)
{
    void *p = get(pool, bytes, stream);
    put(stream, p, smaller(bytes, w->written), 3);
    return p;
}

/* `t`: another stream that the pool knows. */
static void prepare(world *w, int way, cudaStream_t t, galloc_pool *other)
{
    cudaStream_t s = way == FREED_AND_DONE || way == FREED_ELSEWHERE ? t : w->s;
    galloc_pool *pool = way == OF_ANOTHER_POOL ? other : w->pool;
    if (way == FREED_BY_ON_OOM) set_callbacks(w, free_when_asked);
    if (way == LIMIT_RAISED) set_callbacks(w, raise_limit_when_asked);
    if (way == FREED_BY_ON_OOM || way == TWO_HALVES) {
        for (int i = 0; i < 2; i++) to_free[i] = get_written(w, pool, PIECE / 2, s);
        for (int i = 0; i < 2 && way == TWO_HALVES; i++) OK(galloc_free(to_free[i], s));
    } else if (way == CUT_OFF) {
        w->kept = get_written(w, pool, PIECE + MIB(2), s);
        OK(galloc_resize(w->kept, MIB(2), s));
    } else if (way == LIMIT_RAISED) {
        w->kept = get_written(w, pool, PIECE, s);
    } else if (way != NEW_PAGES) {
        OK(galloc_free(get_written(w, pool, PIECE, s), s));
    }
    if (way == FREED_AND_DONE) OK(cudaDeviceSynchronize());
}

/* What was reserved can be had on any stream without a call for memory. */
static void expect_ready(world *w, cudaStream_t stream)
{
    size_t bytes = PIECE - (w->settings->how & CONTENTS ? MIB(2) : 0); /* with a guard */
    long calls = memory_calls();
    void *p = get_written(w, w->pool, bytes, stream);
    EXPECT_EQ(memory_calls(), calls);
    OK(galloc_free(p, stream));
}

static void expect_served(world *w, int kind, int way)
{
    cudaStream_t t = stream_new(), on = kind == CAPTURED ? w->captured : w->s;
    galloc_pool *other = pool_new(NULL);
    galloc_report r;
    galloc_stats now, before;
    size_t rows, wait_events;
    char waits[40] = "";
    void *p = NULL;
    int is_block = kind != RESERVE && kind != GROWTH;
    w->grows = kind == GROWTH ? get_growable(w->pool, 512, PIECE, w->s) : NULL;
    OK(galloc_free(get(w->pool, 512, t), t));
    prepare(w, way, t, other);
    EXPECT_EQ(galloc_malloc(NULL, 512, w->s), cudaErrorInvalidValue); /* so there is no report of an earlier failure */
    rows = allocations(w);
    wait_events = events_of_kind(w, "wait");
    before = stats_of(w->pool);
    if (kind == CAPTURED) OK(cudaStreamBeginCapture(on, cudaStreamCaptureModeThreadLocal));
    OK(request(w, kind, PIECE, &p));
    now = stats_of(w->pool);
    OK(cudaPeekAtLastError());
    EXPECT_EQ(w->oom, way == FREED_BY_ON_OOM ? 2 : way == LIMIT_RAISED);
    EXPECT_EQ(w->rejects, 0);
    EXPECT_EQ(now.failures, before.failures);
    EXPECT_EQ(now.rejections, before.rejections);
    EXPECT_EQ(now.mallocs - before.mallocs, is_block);
    EXPECT_EQ(now.blocks.total - before.blocks.total, is_block);
    if (!(w->settings->how & DRIVERS_POOL)) EXPECT(now.reserved.peak <= (way == LIMIT_RAISED ? 2 : 1) * (size_t)LIMIT);
    EXPECT_EQ(now.live.peak, larger(before.live.peak, now.live.current));
    EXPECT_EQ(now.blocks.peak, larger(before.blocks.peak, now.blocks.current));
    EXPECT_EQ(failed_rows(w) + failed_events(w), 0);
    if (!unrecorded) EXPECT_EQ(events_of_kind(w, "wait") - wait_events, now.waits - before.waits);
    EXPECT_EQ(bytes_in(w->file), 0);
    EXPECT_EQ(galloc_oom_report(&r), cudaErrorNotReady);
    EXPECT_EQ(galloc_pool_check(w->pool), 0);
    if (kind == GROWTH) p = w->grows;
    if (p) {
        galloc_pointer info = info_of(p);
        EXPECT(info.base == p && info.pool == w->pool && info.state == GALLOC_STATE_USED);
        EXPECT_EQ(info.requested, PIECE);
        EXPECT(info.usable >= PIECE && info.room >= info.usable);
        EXPECT(kind != ROOM || info.room >= PIECE + MIB(2));
        EXPECT_EQ(info.tag, kind == TAGGED ? 7 : 0);
        EXPECT_EQ((uintptr_t)p % (kind == ALIGNED ? MIB(4) : 512), 0);
        EXPECT_EQ(info.capture_id != 0, kind == CAPTURED);
        EXPECT_EQ(allocations(w), rows + !unrecorded);
        if (now.waits > before.waits) snprintf(waits, sizeof waits, "waits=%d", (int)(now.waits - before.waits));
        expect_row(w, "allocate", kind, p, PIECE, words[kind]);
        if (is_block) expect_row(w, "allocate", kind, p, PIECE, waits);
        expect_event(w, "alloc", kind, p, PIECE);
        if (told.on) expect_told(p, info.usable);
        put(on, p, smaller(PIECE, w->written), 4);
        OK(galloc_free(p, on));
    }
    EXPECT_EQ(stats_of(w->pool).live.current, now.live.current - (p ? PIECE : 0));
    if (kind == RESERVE) expect_ready(w, t);
    if (kind == CAPTURED) capture_end(on);
    look(w->s, w->held, w->written, 1);
    OK(galloc_free(get_used(w->pool, 512, w->s, 2), w->s));
    if (w->kept) {
        if (way == CUT_OFF) EXPECT_EQ(info_of(w->kept).requested, MIB(2));
        look(w->s, w->kept, smaller(MIB(2), w->written), 3);
        OK(galloc_free(w->kept, w->s));
    }
    pool_end(other);
    stream_end(t);
}

/* What a block has been cut off is of its segment and of its stream; a guard takes more. */
static int can_be_cut_off(int kind, int how)
{
    if (how & OTHER_BACKEND) return 0;
    if (kind == ALIGNED || kind == ROOM || kind == RESERVE) return !(how & ROOM_IS_MEMORY);
    return kind != GROWTH || !(how & CONTENTS);
}

static int the_way;
static void serve(world *w, int kind)
{
    int pages = the_way == NEW_PAGES || the_way == LIMIT_RAISED;
    int usable = pages || (the_way == FREED_AND_DONE && !(w->settings->how & NOT_REUSED));
    if (kind == CAPTURED && !usable) return;
    int host_waits = the_way == OF_ANOTHER_POOL || (kind == RESERVE && !pages && the_way != FREED_AND_DONE) ||
                     (!w->s && the_way == FREED_ELSEWHERE);
    if (host_waits && w->settings->how & BOUNDED) return;
    if (the_way >= FREED_BY_ON_OOM && w->settings->how & NOT_ASKED) return;
    if (the_way == LIMIT_RAISED && w->settings->how & DRIVERS_POOL) return;
    if (the_way == CUT_OFF && !can_be_cut_off(kind, w->settings->how)) return;
    expect_served(w, kind, the_way);
}

/* A request that is served leaves no trace of a shortage, and nothing that was there changes. */
static void serve_all(int way)
{
    the_way = way;
    for_each_kind(serve, way == LIMIT_RAISED ? 2 : 5, 1, "");
}

TEST(a_request_gets_new_pages) { serve_all(NEW_PAGES); }
TEST(a_request_gets_what_its_stream_has_freed) { serve_all(FREED); }
TEST(a_request_gets_what_was_cut_off_a_block) { serve_all(CUT_OFF); }
TEST(a_request_gets_what_another_stream_is_done_with) { serve_all(FREED_AND_DONE); }
TEST(a_request_waits_for_another_stream) { serve_all(FREED_ELSEWHERE); }
TEST(a_request_gets_two_pieces_as_one) { serve_all(TWO_HALVES); }
TEST(a_request_gets_what_another_pool_does_not_use) { serve_all(OF_ANOTHER_POOL); }
TEST(a_request_gets_what_on_oom_allows) { serve_all(LIMIT_RAISED); }
TEST(a_request_gets_what_on_oom_frees_twice) { serve_all(FREED_BY_ON_OOM); }

/* The last page within a limit is had; one byte more is refused, and changes nothing. */
static void fill_up(world *w, int kind)
{
    size_t left = LIMIT - HELD;
    void *p = NULL;
    int more = w->settings->how & ROOM_IS_MEMORY && (kind == ALIGNED || kind == ROOM);
    if (more || w->settings->how & CONTENTS) return; /* they take more than is asked for */
    expect_refused(w, kind, left + 1, w->bound->cause, 0);
    OK(galloc_pool_trim(w->pool, 0, NULL));
    w->oom = 0;
    w->grows = kind == GROWTH ? get_growable(w->pool, 512, left, w->s) : NULL;
    if (kind == CAPTURED) OK(cudaStreamBeginCapture(w->captured, cudaStreamCaptureModeThreadLocal));
    OK(request(w, kind, left, &p));
    if (kind == GROWTH) p = w->grows;
    if (kind == RESERVE) p = get(w->pool, left, w->s);
    EXPECT_EQ(w->oom, 0);
    EXPECT_EQ(stats_of(w->pool).reserved.current, LIMIT);
    OK(galloc_free(p, kind == CAPTURED ? w->captured : w->s));
    if (kind == CAPTURED) capture_end(w->captured);
}

TEST(each_kind_of_request_gets_the_last_page_of_a_limit) { for_each_kind(fill_up, 4, 1, ""); }

/* ---- callbacks --------------------------------------------------------------------------------------------------- */

static int ask_again(const galloc_report *report, void *user)
{
    world *w = user;
    EXPECT_EQ(report->rounds, w->oom);
    (void)on_oom(report, user);
    return 1;
}

/* on_oom asks for as many attempts as max_retries says, and the refusal is told of once. */
static void ask_in_turn(world *w, int kind)
{
    galloc_config config;
    galloc_report r;
    OK(galloc_pool_config(w->pool, &config));
    set_callbacks(w, ask_again);
    expect_refused_after(w, kind, ASKED, w->bound->cause, 0, (int)config.max_retries);
    OK(galloc_oom_report(&r));
    EXPECT_EQ(r.rounds, config.max_retries);
}

TEST(each_kind_of_request_is_asked_about_as_often_as_the_setting_says) { for_each_kind(ask_in_turn, 5, 1, ""); }

static int nested; /* the kind of the requests within a callback */

static int request_within(const galloc_report *report, void *user)
{
    world *w = user;
    void *p = w;
    (void)on_oom(report, user);
    for (int beyond = 0; beyond < 2; beyond++)
        EXPECT_EQ(request(w, nested, beyond ? LIMIT + MIB(2) : ASKED, &p), cudaErrorMemoryAllocation);
    return 0;
}

/* Requests of any kind that fail within on_oom ask and tell nobody, but they are counted and have their rows. */
TEST(requests_within_on_oom_fail_without_a_callback)
{
    for (int kind = 0; kind < KINDS; kind++) {
        for (nested = 0; nested < KINDS; nested++) {
            world w;
            void *p;
            if (nested == CAPTURED || nested == GROWTH) continue;
            world_begin(&w, &all_settings[0], &bounds[0], "");
            w.grows = get_growable(w.pool, 512, ASKED, w.s);
            set_callbacks(&w, request_within);
            if (kind == CAPTURED) OK(cudaStreamBeginCapture(w.captured, cudaStreamCaptureModeRelaxed));
            EXPECT_EQ(request(&w, kind, ASKED, &p), cudaErrorMemoryAllocation);
            if (kind == CAPTURED) capture_end(w.captured);
            EXPECT_EQ(w.oom, 1);
            EXPECT_EQ(w.rejects, 0);
            EXPECT_EQ(failed_rows(&w), 3);
            EXPECT_EQ(failed_events(&w), 3);
            EXPECT_EQ(stats_of(w.pool).failures, (kind != RESERVE && kind != GROWTH) + 2 * (nested != RESERVE));
            EXPECT_EQ(stats_of(w.pool).rejections, nested != RESERVE);
            EXPECT(bytes_in(w.file) > 1000);
            EXPECT(!strncmp(galloc_last_message(), names[kind], strlen(names[kind])));
            OK(galloc_free(w.grows, w.s));
            world_end(&w);
        }
    }
}

/* ---- graphs ------------------------------------------------------------------------------------------------------ */

/* A capture of a group gets what the one before it has freed: there is no place for two. The release of the group
   leaves it to all. */
static void capture_twice(world *w, int kind)
{
    galloc_graph *group = NULL;
    cudaGraph_t graphs[2];
    size_t held[2];
    if (kind != CAPTURED || w->settings->how & OTHER_BACKEND) return;
    OK(galloc_graph_begin(&group, w->pool, w->captured));
    for (int i = 0; i < 2; i++) {
        void *p = NULL, *q = NULL;
        OK(cudaStreamBeginCapture(w->captured, cudaStreamCaptureModeThreadLocal));
        OK(request(w, kind, PIECE, &p));
        put(w->captured, p, smaller(PIECE, w->written), 4);
        EXPECT_EQ(request(w, kind, PIECE, &q), cudaErrorMemoryAllocation);
        EXPECT(!q);
        OK(galloc_free(p, w->captured));
        OK(cudaStreamEndCapture(w->captured, &graphs[i]));
        held[i] = stats_of(w->pool).reserved.current;
        EXPECT(stats_of(w->pool).graph_bytes >= PIECE);
    }
    EXPECT_EQ(held[0], held[1]);
    EXPECT_EQ(w->oom, 2 * !(w->settings->how & NOT_ASKED));
    OK(galloc_graph_end(group));
    OK(galloc_graph_release(group, w->s));
    EXPECT_EQ(stats_of(w->pool).graph_bytes, 0);
    OK(galloc_free(get_written(w, w->pool, PIECE, w->s), w->s));
    for (int i = 0; i < 2; i++) OK(cudaGraphDestroy(graphs[i]));
}

TEST(captures_of_a_group_share_memory_with_all_settings) { for_each_kind(capture_twice, 4, 0, ""); }

/* ---- other errors ------------------------------------------------------------------------------------------------ */

/* What the driver makes memory with. */
static const char *const functions[] = {"cuMemCreate", "cuMemAlloc", "cuMemAllocFromPoolAsync"};

/* Of a refusal, which is not read any more once an allocation has failed otherwise. */
static void leave_a_report(world *w)
{
    galloc_report r;
    void *p;
    EXPECT_EQ(galloc_pool_malloc(w->pool, &p, LIMIT + 1, w->s), cudaErrorMemoryAllocation);
    OK(galloc_oom_report(&r));
    w->rejects = 0;
}

static size_t rows_and_events(const world *w) { return allocations(w) + failed_rows(w) + failed_events(w); }

/* Without host memory, or by an error of the driver. */
static void fail_otherwise(world *w, int kind, int host)
{
    void *p = w;
    galloc_report r;
    galloc_stats now, before;
    size_t rows, left = LIMIT - HELD - MIB(4);
    long lines;
    w->grows = kind == GROWTH ? get_growable(w->pool, 512, left, w->s) : NULL;
    leave_a_report(w);
    rows = rows_and_events(w);
    before = stats_of(w->pool);
    lines = log_lines;
    if (kind == CAPTURED) OK(cudaStreamBeginCapture(w->captured, cudaStreamCaptureModeThreadLocal));
    if (host) sim_fail_malloc(1, 1);
    for (int i = 0; i < 3 && !host; i++) sim_fail(functions[i], 1, 1, cudaErrorOperatingSystem);
    EXPECT_EQ(request(w, kind, left, &p), host ? cudaErrorMemoryAllocation : cudaErrorOperatingSystem);
    sim_fail_malloc(0, 0);
    sim_fail_clear();
    if (kind == CAPTURED) capture_end(w->captured);
    now = stats_of(w->pool);
    EXPECT(kind == RESERVE || kind == GROWTH ? p == w : !p);
    OK(cudaPeekAtLastError());
    EXPECT_EQ(log_lines, lines + 1);
    EXPECT(!strncmp(galloc_last_message(), names[kind], strlen(names[kind])));
    EXPECT(strstr(galloc_last_message(), host ? "no host memory" : cudaGetErrorString(cudaErrorOperatingSystem)));
    EXPECT_EQ(galloc_oom_report(&r), cudaErrorNotReady);
    EXPECT_EQ(w->oom + w->rejects, 0);
    EXPECT(!memcmp(&now.live, &before.live, sizeof now.live));
    EXPECT(!memcmp(&now.blocks, &before.blocks, sizeof now.blocks));
    EXPECT_EQ(now.mallocs, before.mallocs);
    EXPECT_EQ(now.rejections, before.rejections);
    EXPECT_EQ(now.failures - before.failures, kind != RESERVE && kind != GROWTH);
    EXPECT_EQ(now.reserved.current, before.reserved.current);
    EXPECT_EQ(rows_and_events(w), rows);
    EXPECT_EQ(bytes_in(w->file), 0);
    EXPECT_EQ(galloc_pool_check(w->pool), 0);
    look(w->s, w->held, w->written, 1);
    OK(galloc_free(get_used(w->pool, 512, w->s, 2), w->s));
    if (w->grows) OK(galloc_free(w->grows, w->s));
}

static void lack_host_memory(world *w, int kind) { fail_otherwise(w, kind, 1); }
static void meet_an_error(world *w, int kind) { fail_otherwise(w, kind, 0); }

/* Nobody is asked or told of an error that is not for want of device memory, and no row tells of it. */
TEST(an_error_is_no_shortage_for_any_kind_of_request)
{
    for_each_kind(lack_host_memory, 4, 1, "");
    for_each_kind(meet_an_error, 4, 1, "");
    for_each_kind(meet_an_error, 4, 1, ",throw_on_cudamalloc_oom:True");
}

/* After an error that ends the context no kind of request is served, also from memory that is there; after the reset
   each is. */
static void meet_a_broken_context(world *w, int kind)
{
    CUcontext context = NULL;
    galloc_stats before, now;
    galloc_report r;
    size_t rows;
    void *p = w;
    if (kind == CAPTURED || (kind == RESERVE && w->settings->how & BOUNDED)) return; /* no call would tell of it */
    w->grows = kind == GROWTH ? get_growable(w->pool, 512, PIECE, w->s) : NULL;
    OK(galloc_free(get(w->pool, PIECE, w->s), w->s));
    leave_a_report(w);
    rows = rows_and_events(w);
    before = stats_of(w->pool);
    OK(cuCtxGetCurrent(&context));
    sim_context_fail(context, cudaErrorIllegalAddress);
    EXPECT_EQ(request(w, kind, PIECE, &p), cudaErrorIllegalAddress);
    EXPECT(kind == RESERVE || kind == GROWTH ? p == w : !p);
    EXPECT(!strncmp(galloc_last_message(), names[kind], strlen(names[kind])));
    EXPECT_EQ(galloc_oom_report(&r), cudaErrorNotReady);
    now = stats_of(w->pool);
    EXPECT_EQ(w->oom + w->rejects, 0);
    EXPECT(!memcmp(&now.live, &before.live, sizeof now.live));
    EXPECT(!memcmp(&now.blocks, &before.blocks, sizeof now.blocks));
    EXPECT_EQ(now.rejections, before.rejections);
    EXPECT_EQ(rows_and_events(w) + bytes_in(w->file), rows);
    EXPECT_EQ(galloc_pool_check(w->pool), 0);
    OK(cudaDeviceReset());
    (void)cudaGetLastError();
    w->s = stream_new();
    w->captured = stream_new();
    OK(request(w, kind, PIECE, &p));
    if (kind == GROWTH) p = w->grows;
    if (p != w) put(w->s, p, smaller(PIECE, w->written), 5);
    if (p != w) OK(galloc_free(p, w->s));
    EXPECT_EQ(w->oom + w->rejects, 0);
}

TEST(a_broken_context_serves_no_kind_of_request) { for_each_kind(meet_a_broken_context, 4, 1, ""); }

/* On a stream whose capture has been invalidated nothing is served, also of what is free. */
static void meet_a_failed_capture(world *w, int kind)
{
    cudaStream_t s = w->s;
    cudaGraph_t graph = NULL;
    galloc_stats before, now;
    galloc_report r;
    size_t rows;
    void *p = w;
    if (kind == RESERVE || kind == CAPTURED) return; /* without a stream; the others are captured */
    w->grows = kind == GROWTH ? get_growable(w->pool, 512, PIECE, s) : NULL;
    OK(galloc_free(get(w->pool, PIECE, s), s));
    leave_a_report(w);
    rows = rows_and_events(w);
    before = stats_of(w->pool);
    OK(cudaStreamBeginCapture(w->captured, cudaStreamCaptureModeRelaxed));
    EXPECT(cudaStreamSynchronize(w->captured) != cudaSuccess);
    (void)cudaGetLastError();
    sim_findings_clear();
    w->s = w->captured;
    EXPECT_EQ(request(w, kind, PIECE, &p), kind == GROWTH ? cudaErrorNotSupported : cudaErrorStreamCaptureInvalidated);
    w->s = s;
    OK(cudaPeekAtLastError());
    EXPECT(kind == GROWTH ? p == w : !p);
    EXPECT(!strncmp(galloc_last_message(), names[kind], strlen(names[kind])));
    EXPECT_EQ(galloc_oom_report(&r), cudaErrorNotReady);
    now = stats_of(w->pool);
    EXPECT_EQ(w->oom + w->rejects, 0);
    EXPECT(!memcmp(&now.live, &before.live, sizeof now.live));
    EXPECT(!memcmp(&now.blocks, &before.blocks, sizeof now.blocks));
    EXPECT_EQ(now.failures - before.failures, kind != GROWTH);
    EXPECT_EQ(rows_and_events(w) + bytes_in(w->file), rows);
    EXPECT_EQ(galloc_pool_check(w->pool), 0);
    EXPECT_EQ(cudaStreamEndCapture(w->captured, &graph), cudaErrorStreamCaptureInvalidated);
    (void)cudaGetLastError();
    OK(request(w, kind, PIECE, &p));
    OK(galloc_free(kind == GROWTH ? w->grows : p, s));
}

TEST(a_failed_capture_serves_no_kind_of_request) { for_each_kind(meet_a_failed_capture, 4, 1, ""); }

/* ---- without a record -------------------------------------------------------------------------------------------- */

/* With caches and the shortest ways. */
TEST(requests_without_a_record_end_alike)
{
    unrecorded = 1;
    for_each_kind(run_out, 5, 1, "");
    for_each_kind(ask_for_too_much, 4, 1, "");
    for_each_kind(ask_in_turn, 5, 1, "");
    for (int way = FREED; way <= LIMIT_RAISED; way++) serve_all(way);
    unrecorded = 0;
}

/* ---- default streams --------------------------------------------------------------------------------------------- */

/* The legacy stream has the id 0; no stream is made to wait for others there, but the host waits. */
TEST(requests_on_default_streams_are_told_of_alike)
{
    cudaStream_t streams[] = {NULL, cudaStreamPerThread};
    for (of_requests = streams; of_requests < streams + 2; of_requests++) {
        for_each_kind(run_out, 5, 1, "");
        serve_all(FREED_ELSEWHERE);
        serve_all(FREED_BY_ON_OOM);
    }
    of_requests = NULL;
}

/* A block lies in memory that on_map was told of; what on_unmap is told of was told to on_map, as a whole. */
TEST(the_program_knows_of_the_memory_of_each_request)
{
    told.on = 1;
    for (int way = TWO_HALVES; way <= FREED_BY_ON_OOM; way++) serve_all(way);
    for_each_kind(run_out, 5, 1, "");
    told.on = 0;
}

static int kind_within;
static size_t bytes_within;

/* Within on_map no page is mapped: what is free serves, and for more there is no memory. */
static void request_within_on_map(world *w)
{
    void *p = w;
    long calls = memory_calls();
    int fits = bytes_within < MIB(1);
    cudaStream_t on = kind_within == CAPTURED ? w->captured : w->s;
    told.within = NULL;
    if (kind_within == CAPTURED) OK(cudaStreamBeginCapture(on, cudaStreamCaptureModeThreadLocal));
    EXPECT_EQ(request(w, kind_within, bytes_within, &p), fits ? cudaSuccess : cudaErrorMemoryAllocation);
    EXPECT_EQ(memory_calls(), calls);
    if (!fits) EXPECT(kind_within == RESERVE || kind_within == GROWTH ? p == w : !p);
    if (!fits) EXPECT(strstr(galloc_last_message(), "no page can be mapped while on_map or on_unmap is running"));
    if (fits && p != w) put(on, p, bytes_within, 4);
    if (fits && p != w) OK(galloc_free(p, on));
    if (kind_within == CAPTURED) capture_end(on);
    EXPECT_EQ(w->oom + w->rejects, 0);
}

/* A free part of a page does not move, so it is there when other pages are mapped. */
static void request_in_on_map(world *w, int kind)
{
    for (int fits = 0; fits < 2; fits++) {
        int own = kind == RESERVE && w->settings->how & (BOUNDED | NOT_REUSED); /* what is free is a stream's own */
        if (fits && (kind == ALIGNED || kind == CAPTURED || kind == ROOM || kind == GROWTH || own)) continue;
        void *p = get(w->pool, MIB(1) - 512, w->s), *beside = get(w->pool, 512, w->s);
        w->grows = kind == GROWTH ? get_growable(w->pool, 512, PIECE, w->s) : NULL;
        OK(galloc_free(p, w->s));
        kind_within = kind;
        bytes_within = fits ? MIB(1) - 512 : PIECE;
        told.within = request_within_on_map;
        OK(galloc_free(get_written(w, w->pool, MIB(12), w->s), w->s));
        EXPECT(!told.within);
        EXPECT_EQ(galloc_pool_check(w->pool), 0);
        if (w->grows) OK(galloc_free(w->grows, w->s));
        OK(galloc_free(beside, w->s));
        OK(galloc_pool_trim(w->pool, 0, NULL));
    }
    look(w->s, w->held, w->written, 1);
}

TEST(within_on_map_each_kind_of_request_gets_what_is_there)
{
    told.on = 1;
    for_each_kind(request_in_on_map, 4, 1, "");
    told.on = 0;
}

/* ---- growth without addresses ------------------------------------------------------------------------------------ */

/* That is no shortage: nobody is asked, and no row tells of it. A captured stream cannot grow any block. */
TEST(a_block_that_cannot_grow_is_as_before)
{
    for (int captured = 0; captured < 2; captured++) {
        for (size_t i = 0; i < sizeof all_settings / sizeof *all_settings; i++) {
            world w;
            galloc_report r;
            world_begin(&w, &all_settings[i], &bounds[0], "");
            void *p = get(w.pool, MIB(1), w.s), *q = get(w.pool, MIB(1), w.s), *low = p < q ? p : q;
            put(w.s, low, MIB(1), 3);
            EXPECT_EQ(galloc_malloc(NULL, 512, w.s), cudaErrorInvalidValue);
            size_t rows = allocations(&w);
            galloc_stats before = stats_of(w.pool);
            galloc_pointer as = info_of(low), is;
            if (captured) OK(cudaStreamBeginCapture(w.captured, cudaStreamCaptureModeThreadLocal));
            EXPECT_EQ(galloc_resize(low, MIB(4), captured ? w.captured : w.s), cudaErrorNotSupported);
            if (captured) capture_end(w.captured);
            galloc_stats now = stats_of(w.pool);
            OK(cudaPeekAtLastError());
            EXPECT(!strncmp(galloc_last_message(), "galloc_resize: ", 15));
            EXPECT(strstr(log_text, galloc_last_message()));
            EXPECT_EQ(w.oom + w.rejects, 0);
            EXPECT_EQ(galloc_oom_report(&r), cudaErrorNotReady);
            EXPECT(!memcmp(&now.live, &before.live, sizeof now.live));
            EXPECT(!memcmp(&now.blocks, &before.blocks, sizeof now.blocks));
            EXPECT_EQ(now.reserved.current, before.reserved.current);
            EXPECT_EQ(now.mallocs + now.frees + now.failures, before.mallocs + before.frees + before.failures);
            EXPECT_EQ(allocations(&w), rows);
            EXPECT_EQ(failed_rows(&w) + failed_events(&w) + bytes_in(w.file), 0);
            is = info_of(low);
            EXPECT(!memcmp(&is, &as, sizeof is));
            look(w.s, low, MIB(1), 3);
            look(w.s, w.held, w.written, 1);
            OK(galloc_free(p, w.s));
            OK(galloc_free(q, w.s));
            world_end(&w);
        }
    }
}

TEST_MAIN()
