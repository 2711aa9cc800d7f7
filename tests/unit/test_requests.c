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
    NO_RESERVE = 2,
    NOT_ASKED = 4, /* on_oom can ask for no attempt, and is not called */
    CONTENTS = 8   /* guards and poison are compared, so the device has memory */
};

static const struct settings {
    const char *text;
    int how;
} all_settings[] = {
    {"", 0},
    {"expandable_segments:False", ROOM_IS_MEMORY},
    {"strategy:pooled", 0},
    {"strategy:heuristic", 0},
    {"like:pytorch", ROOM_IS_MEMORY},
    {"like:pytorch,expandable_segments:True", 0},
    {"debug:guards", CONTENTS},
    {"debug:guards+poison+quarantine", CONTENTS},
    {"debug:guards+quarantine,debug_sample:100", CONTENTS},
    {"stats:exact", 0},
    {"gc_threshold:0.5,gc_age:1ms", 0},
    {"reuse:none", 0},
    {"wait_limit_ms:0", 0},
    {"wait_limit_ms:10", 0},
    {"max_retries:0", NOT_ASKED},
    {"overhead:0,growth:2M,lane_bytes:0", 0},
    {"backend:cudaMalloc", ROOM_IS_MEMORY | NO_RESERVE},
    {"backend:cudaMallocAsync", ROOM_IS_MEMORY | NO_RESERVE},
};

/* ---- a pool of 64 MiB, 40 of which are in use -------------------------------------------------------------------- */

enum { LIMIT = 64 << 20, HELD = 40 << 20, ASKED = 40 << 20 };

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

typedef struct world {
    const struct settings *settings;
    const struct bound *bound;
    galloc_pool *pool;
    cudaStream_t s, captured;
    void *held, *grows, *outside;
    size_t written; /* of what is held */
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
    OK(galloc_annotate("now"));
    return texts_in(w->log, ",allocate failure,");
}

static size_t failed_events(const world *w)
{
    value *v = snapshot(w->pool, GALLOC_SNAPSHOT_JSON);
    size_t n = events_named(v, "oom");
    value_free(v);
    return n;
}

static void world_begin(world *w, const struct settings *settings, const struct bound *bound, const char *more)
{
    char conf[500];
    galloc_callbacks callbacks = {on_oom, on_reject, NULL, NULL, w};
    sim_options options = sim_defaults();
    options.mode = settings->how & CONTENTS ? SIM_BACKED : SIM_LEDGER;
    options.memory = bound->memory;
    options.seed = test_seed();
    begin_with(options);
    memset(w, 0, sizeof *w);
    w->settings = settings;
    w->bound = bound;
    strcpy(w->folder, "/tmp/galloc_requests.XXXXXX");
    EXPECT(mkdtemp(w->folder));
    snprintf(w->file, sizeof w->file, "%s/out.json", w->folder);
    snprintf(w->log, sizeof w->log, "%s/log.csv", w->folder);
    snprintf(conf, sizeof conf, "%s%s%s%s,history:1000,trace:%s,snapshot_on_oom:%s", settings->text,
             *settings->text ? "," : "", bound->setting, more, w->log, w->file);
    setenv("GALLOC_CONF", conf, 1);
    if (bound->outside) OK(cudaMalloc(&w->outside, bound->outside));
    OK(galloc_pool_default(&w->pool, -1));
    OK(galloc_pool_set_callbacks(w->pool, &callbacks));
    w->s = stream_new();
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
    if (w->outside) OK(cudaFree(w->outside));
    stream_end(w->s);
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
    cudaGraph_t graph = NULL;
    cudaError_t error;
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
    case CAPTURED:
        OK(cudaStreamBeginCapture(w->captured, cudaStreamCaptureModeThreadLocal));
        error = galloc_malloc(p, bytes, w->captured);
        OK(cudaStreamEndCapture(w->captured, &graph));
        EXPECT(graph != NULL);
        OK(cudaGraphDestroy(graph));
        return error;
    default: return galloc_alloc(p, &r);
    }
}

static int applies(int kind, const struct settings *settings)
{
    if (kind == GROWTH) return !(settings->how & ROOM_IS_MEMORY);
    return kind != RESERVE || !(settings->how & NO_RESERVE);
}

/* Refuses it, and checks all that a program sees of that. `rejected`: at once. */
static void expect_refused(world *w, int kind, size_t bytes, const char *cause, int rejected)
{
    void *p = w;
    char said[100];
    galloc_report r;
    galloc_stats now, before;
    size_t rows, events;
    int counts = kind != RESERVE && kind != GROWTH; /* as an allocation */
    w->grows = kind == GROWTH ? get_growable(w->pool, 512, bytes, w->s) : NULL;
    w->oom = w->rejects = 0;
    rows = failed_rows(w);
    events = failed_events(w);
    before = stats_of(w->pool);
    EXPECT_EQ(request(w, kind, bytes, &p), cudaErrorMemoryAllocation);
    now = stats_of(w->pool);
    EXPECT(kind == RESERVE || kind == GROWTH ? p == w : !p);
    OK(cudaPeekAtLastError());
    EXPECT_EQ(w->oom, !rejected && !(w->settings->how & NOT_ASKED));
    EXPECT_EQ(w->rejects, rejected);
    EXPECT_EQ(now.live.current, before.live.current);
    EXPECT_EQ(now.live.peak, before.live.peak);
    EXPECT_EQ(now.blocks.current, before.blocks.current);
    EXPECT_EQ(now.mallocs, before.mallocs);
    EXPECT_EQ(now.frees, before.frees);
    EXPECT_EQ(now.failures - before.failures, counts);
    EXPECT_EQ(now.rejections - before.rejections, rejected && counts);
    EXPECT(now.reserved.peak <= LIMIT);
    EXPECT_EQ(failed_rows(w), rows + 1);
    EXPECT_EQ(failed_events(w), events + 1);
    EXPECT_EQ(bytes_in(w->file) > 1000, !rejected);
    snprintf(said, sizeof said, "%s: out of memory: asked for %zu ", names[kind], bytes - (kind == GROWTH ? 512 : 0));
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
    if (w->oom || w->rejects) EXPECT_EQ(r.asked, w->last.asked);
    EXPECT_EQ(galloc_pool_check(w->pool), 0);
    look(w->s, w->held, w->written, 1);
    OK(galloc_free(get_used(w->pool, 512, w->s, 2), w->s));
    if (w->grows) OK(galloc_free(w->grows, w->s));
}

/* Calls it for each kind of request with all settings, under each of the first n bounds. */
static void for_each_kind(void (*check)(world *w, int kind), size_t n, const char *more)
{
    world w;
    for (size_t i = 0; i < sizeof all_settings / sizeof *all_settings * n; i++) {
        for (int kind = 0; kind < KINDS; kind++) {
            const struct settings *settings = &all_settings[i / n];
            long failures = test_failures;
            if (!applies(kind, settings)) continue;
            world_begin(&w, settings, &bounds[i % n], more);
            check(&w, kind);
            world_end(&w);
            if (test_failures == failures) continue;
            printf("    %s of \"%s\", \"%s\"\n    %s\n", names[kind], settings->text, bounds[i % n].setting,
                   galloc_last_message());
        }
    }
}

static void run_out(world *w, int kind) { expect_refused(w, kind, ASKED, w->bound->cause, 0); }
static void ask_for_too_much(world *w, int kind)
{
    if (kind != GROWTH) expect_refused(w, kind, LIMIT + MIB(2), w->bound->cause, 1);
}

/* The one limit that refuses is named, on_oom is asked, and the file is written. */
TEST(a_refusal_is_told_of_alike_for_each_kind_of_request) { for_each_kind(run_out, 5, ""); }

/* on_reject hears of it, and there is no file. */
TEST(a_request_beyond_all_that_a_pool_may_hold_is_told_of_alike) { for_each_kind(ask_for_too_much, 4, ""); }

static void fail_at_once(world *w, int kind)
{
    char cause[200];
    snprintf(cause, sizeof cause, "; refused at once: %s", w->bound->cause + 2);
    expect_refused(w, kind, ASKED, cause, 1);
}

/* Likewise with throw_on_cudamalloc_oom. */
TEST(a_request_that_fails_at_once_is_told_of_alike) { for_each_kind(fail_at_once, 4, ",throw_on_cudamalloc_oom:True"); }

TEST_MAIN()
