/* test_programs.c - random programs that do with streams and graphs whatever the manual allows, and nothing else.

   What a program may do, which is the hard part, is this (ON STREAMS, ON GRAPHS, ON BACKENDS):
     use       on a stream that comes after where the block was given out, and after all earlier use of it that is in
               conflict. The program orders by an event recorded just behind the earlier use, so that no more is ordered
               than must be
     free      on a stream that comes after all use of the block, but for use that is said otherwise: by streams that
               are named as well (galloc_free_after), that were recorded for it and have lived on or been retired
               since, and by launches of graphs that the block was recorded for or is a result of
     captured  work on a captured stream is ordered by the capture's own events. A block from outside is recorded for
               the capture and stays until that has ended, or is freed in it; or it stays until the graph is gone. A
               result may be used after a launch, and freed at any time after the capture; freed in a capture a block
               may have been used by anybody before
     launch    after all use of what the graph may touch: what it was given in the capture and not freed there, what was
               recorded for it, each also after the program has freed it, and after other launches of its instances. Of
               a group: after the group's launch before, and after all use of the group's results, which it may write
     release   after all launches of the group, none of which is launched again
     retire    whatever was recorded for the stream is used by it no more, or recorded again
     destroy   not a stream of a capture, of a group that has begun, or recorded for a block that is still used, unless
               it was retired and not used since
     legacy    gets no work while a blocking stream is captured, and is in no call when such a capture begins
     stream_check:off  nothing is captured, and each stream is retired before it is destroyed
   Two threads take turns, and may be stopped inside galloc before each lock, exchange and call. What one of them is
   about the other leaves alone as far as the manual asks for it: see `conflict`.

   Every operation has numbers of its own, so that leaving one out changes little of the others: that is how a failure
   is made small. By itself it runs the same programs each time. In the environment:
     FUZZ_SEED=n      one program, which is told; with FUZZ_SHRINK=1 what is left of it when it has been made small
     FUZZ_SECONDS=n   programs from the seed FUZZ_FROM on (1) for so long; each that fails is made small, unless
                      FUZZ_NOSHRINK=1, and told, FUZZ_MOST of them (20) at most
     GALLOC_ROUNDS=n  how many are run by itself */

#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <sys/mman.h>
#include <fcntl.h>
#include <time.h>

static void point(void);
static int scheduled_yield(void);
#define sched_yield() scheduled_yield()
static int scheduled_lock(pthread_mutex_t *mutex);
static int scheduled_trylock(pthread_mutex_t *mutex) __attribute__((unused));
#define pthread_mutex_lock(mutex) scheduled_lock(mutex)
#define pthread_mutex_trylock(mutex) scheduled_trylock(mutex)
#define __atomic_exchange_n(...) (point(), __atomic_exchange_n(__VA_ARGS__))
#define __atomic_compare_exchange_n(...) (point(), __atomic_compare_exchange_n(__VA_ARGS__))
static uint64_t simulated_clock;
#define GALLOC_CLOCK() (simulated_clock += 20000)
#include "inside.c"
#undef pthread_mutex_lock
#undef pthread_mutex_trylock
#undef __atomic_exchange_n
#undef __atomic_compare_exchange_n
#undef sched_yield
#include "setup.h"

enum { STEPS = 400, STREAMS = 8, PLAIN = 3, POOLS = 3, USES = 12, GRAPHS = 48, ITEMS = 64, GROUPS = 12, HOLDS = 64 };

/* ---- the world as the program knows it --------------------------------------------------------------------------- */

/* An event, shared by the uses that it stands behind. */
typedef struct moment {
    cudaEvent_t event;
    int shares;
} moment;

typedef struct use {
    moment *at;
    long by;   /* which stream */
    int graph; /* by a launch of it; 0: none */
    int writes;
    int said;  /* a free need not come after it: recorded for a stream that was retired since, or no use at all, but
                  where the block was given out */
} use;

typedef struct uses {
    use list[USES];
    int n;
} uses;

typedef struct stream {
    cudaStream_t handle;
    long born; /* each has a number of its own; 0: there is none */
    int blocking;
    int graph; /* of the capture that it is in */
    int group; /* begun with it */
    int retired; /* and not used since */
} stream;

typedef struct record {
    long by;
    int graph; /* captured; 0: not */
    int over;  /* the stream was retired */
} record;

typedef struct block {
    char *ptr;
    size_t bytes;
    int there; /* the program's */
    int pool;
    int graph;     /* that was captured when it was given out; 0: none */
    int capturing; /* graph whose capture uses it */
    long only;     /* nobody can come after this stream yet, where it was given out; 0: all can */
    int pins;      /* graphs that use it and for which it was not recorded */
    uint64_t tag, captured_tag; /* 0: contents unknown */
    uses plain, captured;
    record recorded[USES];
    int records;
} block;

typedef struct item {
    int block;
    int writes, pinned;
    uint64_t tag; /* that it holds after a launch, */
    size_t bytes; /* so many of it */
} item;

enum state { UNUSED_GRAPH, CAPTURING, READY, GONE };

typedef struct graph {
    enum state state;
    cudaGraph_t handle;
    cudaGraphExec_t exec[2];
    item items[ITEMS];
    int n, origin, mode, thread, broken;
    int groups; /* bits: may be of these */
    int never;  /* to be launched */
    int launches, last_exec;
    moment *last;
} graph;

typedef struct group {
    galloc_graph *handle;
    int there, begun, pool;
    moment *last;
} group;

typedef enum grip { LIVES, USED_BY_CALL, CHANGES, ENDS } grip;

typedef struct hold {
    const void *what;
    grip how;
} hold;

static struct world {
    stream s[STREAMS];
    galloc_pool *pool[POOLS];
    uint32_t pools; /* that are used */
    int promised;   /* stream_check:off: nothing is captured, and each stream retired before it is destroyed */
    char text[POOLS][256];
    block b[STEPS + 1];
    graph g[GRAPHS];
    group group[GROUPS];
    int blocks, graphs, groups, born, broken;
    uint64_t tags;
} w;

/* ---- the two threads --------------------------------------------------------------------------------------------- */

static struct host {
    sem_t go;
    dice d;
    int busy, calling;
    hold holds[HOLDS];
    int n;
} slot[2];

static __thread int me;
static int running, next_step, steps, odds, calm, spins, telling, faults, quitting, closing, failing;
static unsigned char left_out[STEPS];
static uint64_t seed_now;

/* Programs of most seeds also look inside, change settings at run time, and have all settings. The others are those
   that older seeds stand for. */
static int is_wide(void) { return seed_now % 8 > 1; }
static unsigned long long done_steps, done_mallocs, done_captured, done_launches, done_points, done_refused;

__attribute__((format(printf, 1, 2))) static void tell(const char *format, ...)
{
    va_list arguments;
    if (!telling) return;
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
}

static void fail(const char *what)
{
    if (!failing) tell("    FAILS: %s: %s\n", what, galloc_last_message());
    failing = 1;
}

static uint32_t any(uint32_t n) { return roll_below(&slot[me].d, n); }

static void pass_to(int other)
{
    int self = me;
    spins = 0;
    (void)sem_post(&slot[other].go);
    while (sem_wait(&slot[self].go)) continue;
}

static void point(void)
{
    if (!running || !slot[me].calling || calm || !odds) return;
    if (++spins > 3000 ? !slot[1 - me].busy : any((uint32_t)odds)) return;
    done_points++;
    pass_to(1 - me);
}

static int scheduled_yield(void)
{
    if (running && slot[1 - me].busy) pass_to(1 - me);
    return 0;
}

static int scheduled_trylock(pthread_mutex_t *mutex)
{
    point();
    return pthread_mutex_trylock(mutex);
}

static int scheduled_lock(pthread_mutex_t *mutex)
{
    int tries = 0;
    if (!running || mutex == inside_map_lock()) return pthread_mutex_lock(mutex);
    point();
    while (pthread_mutex_trylock(mutex)) {
        if (!slot[1 - me].busy || tries++ > 10000) {
            printf("thread %d waits for a lock that nobody is going to open; FUZZ_SEED=%llu\n", me,
                   (unsigned long long)seed_now);
            fflush(stdout);
            abort();
        }
        pass_to(1 - me);
    }
    return 0;
}

static void before_call(const char *function)
{
    (void)function;
    point();
}

static int at_query(void) { return running && any(3) == 0; }

static int conflict(grip a, grip b)
{
    if (a == ENDS || b == ENDS) return 1;
    if (a == LIVES || b == LIVES) return 0;
    return a == CHANGES || b == CHANGES;
}

/* 0: the other thread is about it. */
static int take(const void *what, grip how)
{
    const struct host *other = &slot[1 - me];
    struct host *own = &slot[me];
    for (int i = 0; other->busy && i < other->n; i++)
        if (other->holds[i].what == what && conflict(other->holds[i].how, how)) return 0;
    if (own->n == HOLDS) return 0;
    own->holds[own->n++] = (hold){what, how};
    return 1;
}

static cudaError_t called(cudaError_t error)
{
    slot[me].calling = 0;
    calm = 0;
    if (sim_failed() || sim_failed_mallocs()) {
        if (error) done_refused++;
        sim_fail_clear();
        return error ? cudaErrorUnknown : error; /* it may have failed for that */
    }
    sim_fail_clear();
    return error;
}

/* Now and then something that galloc calls fails, while the other thread is outside. */
static int calling(const char *what)
{
    static const char *const functions[] = {
        "cuMemCreate",        "cuMemMap",          "cuMemSetAccess", "cuMemUnmap",          "cuMemRelease",
        "cuMemAlloc",         "cuMemFree",         "cuEventCreate",  "cuEventRecord",       "cuEventQuery",
        "cuStreamWaitEvent",  "cuStreamGetId",     "cuCtxGetId",     "cuStreamIsCapturing", "cuMemAddressReserve",
        "cuEventSynchronize", "cuUserObjectCreate", "cuGraphRetainUserObject", "cuStreamGetCaptureInfo",
        "cuMemAllocFromPoolAsync", "cuMemFreeAsync", "cuMemPoolTrimTo"};
    uint32_t which = any(22);
    (void)what;
    if (faults && !slot[1 - me].busy && any(6) == 0) {
        calm = 1;
        if (any(3) == 0) sim_fail_malloc(1 + (long)any(4), any(2) != 0);
        else sim_fail(functions[which], 1 + (long)any(3), any(3) == 0, any(4) ? 0 : cudaErrorUnknown);
        tell("      (host memory or %s fails)\n", functions[which]);
    }
    return 1;
}

#define CALL(call) (calling(#call), slot[me].calling = 1, called(call))

/* Was it well, or is it what happens when something has been made to fail? */
static int went(cudaError_t error, const char *what)
{
    if (error == cudaSuccess) return 1;
    tell("      refused: %s\n", galloc_last_message());
    if (error != cudaErrorUnknown || !faults) fail(what);
    return 0;
}

/* ---- moments and uses -------------------------------------------------------------------------------------------- */

static moment *moment_now(const stream *s)
{
    moment *m = calloc(1, sizeof *m);
    m->shares = 1;
    OK(cudaEventCreateWithFlags(&m->event, cudaEventDisableTiming));
    OK(cudaEventRecord(m->event, s->handle));
    return m;
}

static moment *moment_share(moment *m)
{
    m->shares++;
    return m;
}

static void moment_drop(moment *m)
{
    if (!m || --m->shares) return;
    OK(cudaEventDestroy(m->event));
    free(m);
}

static void come_after(const stream *s, const moment *m)
{
    if (m) OK(cudaStreamWaitEvent(s->handle, m->event, 0));
}

static void uses_drop(uses *u)
{
    while (u->n) moment_drop(u->list[--u->n].at);
}

/* A stream that is to read, or to write, comes after what it must come after; the use is not noted yet. */
static void uses_wait(const uses *u, const stream *s, int writes)
{
    for (int i = 0; i < u->n; i++)
        if (u->list[i].by != s->born && (writes || u->list[i].writes || u->n == USES)) come_after(s, u->list[i].at);
}

static void uses_note(uses *u, const stream *s, moment *at, int writes, int of)
{
    if (u->n == USES) writes = 1; /* it came after all of them */
    if (writes) uses_drop(u);
    u->list[u->n++] = (use){moment_share(at), s->born, of, writes, 0};
}

/* ---- streams, what may be done with them ------------------------------------------------------------------------- */

static int blocking_captured(void)
{
    for (int i = 0; i < STREAMS; i++)
        if (w.s[i].graph && w.s[i].blocking) return 1;
    return 0;
}

static int is_legacy(const stream *s) { return s == &w.s[0]; }

static int may_be_called(const stream *s) { return s->born && (s - w.s < 1 || s - w.s > 2 || s - w.s == 1 + me); }

static int may_work(const stream *s) { return may_be_called(s) && !(is_legacy(s) && blocking_captured()); }

static int is_broken(const stream *s) { return s->graph && w.g[s->graph].broken; }

/* A stream at random; captured: 0 or 1, -1: either. NULL: the one that was picked will not do. */
static stream *some_stream(int captured)
{
    for (int i = 0; i < 8; i++) {
        stream *s = &w.s[any(STREAMS)];
        if (!may_be_called(s) || (captured >= 0 && captured != (s->graph != 0))) continue;
        if (!take(s, USED_BY_CALL)) return NULL;
        s->retired = 0;
        return s;
    }
    return NULL;
}

/* 1 in half of the cases where there is a captured one. */
static int maybe_captured(void)
{
    int captured = 0;
    for (int i = 0; i < STREAMS; i++) captured |= w.s[i].graph;
    return captured && any(2);
}

static block *some_block(void)
{
    for (int i = 0; i < 20 && w.blocks; i++) {
        block *b = &w.b[1 + any((uint32_t)w.blocks)];
        if (b->there) return take(b, CHANGES) ? b : NULL;
    }
    return NULL;
}

static graph *some_graph(enum state state)
{
    for (int i = 0; i < 10 && w.graphs; i++) {
        graph *g = &w.g[1 + any((uint32_t)w.graphs)];
        if (g->state == state) return take(g, CHANGES) ? g : NULL;
    }
    return NULL;
}

static int number_of(const graph *g) { return (int)(g - w.g); }

/* ---- what graphs touch ------------------------------------------------------------------------------------------- */

static item *graph_item(graph *g, block *b)
{
    int k = (int)(b - w.b);
    for (int i = 0; i < g->n; i++)
        if (g->items[i].block == k) return &g->items[i];
    if (g->n == ITEMS) return NULL;
    g->items[g->n] = (item){k, 0, 0, 0, 0};
    return &g->items[g->n++];
}

static int is_recorded_for(const block *b, int of)
{
    for (int i = 0; i < b->records; i++)
        if (b->recorded[i].graph == of) return 1;
    return 0;
}

static int is_recorded_by(const block *b, long by, int of)
{
    for (int i = 0; i < b->records; i++)
        if (b->recorded[i].by == by && b->recorded[i].graph == of && !b->recorded[i].over) return 1;
    return 0;
}

static void note_record(block *b, const stream *s)
{
    if (!is_recorded_by(b, s->born, s->graph)) b->recorded[b->records++] = (record){s->born, s->graph, 0};
}

/* What no capture that has ended says any more. */
static void capture_over(int of)
{
    for (int i = 1; i <= w.blocks; i++) {
        block *b = &w.b[i];
        if (b->capturing != of) continue;
        b->capturing = 0;
        b->captured_tag = 0;
        uses_drop(&b->captured);
    }
    for (int i = 0; i < STREAMS; i++)
        if (w.s[i].graph == of) w.s[i].graph = 0;
}

/* The graph is gone: what it used and was not recorded for is the program's alone again. */
static void graph_over(graph *g)
{
    g->state = GONE;
    for (int i = 0; i < g->n; i++)
        if (g->items[i].pinned) w.b[g->items[i].block].pins--;
    moment_drop(g->last);
    g->last = NULL;
}

/* ---- work -------------------------------------------------------------------------------------------------------- */

static void work(block *b, const stream *s, int writes, uint64_t *tag)
{
    sim_access access = {b->ptr, b->bytes, SIM_READ, *tag};
    int part = any(4) == 0 && b->bytes > 8;
    if (part) {
        size_t at = (any((uint32_t)(b->bytes < 1u << 30 ? b->bytes : 1u << 30)) / 2) & ~(size_t)7;
        access.ptr = b->ptr + at;
        access.bytes = (b->bytes - at) / 2 ? (b->bytes - at) / 2 : 1;
    }
    if (writes) {
        access.how = SIM_WRITE;
        access.tag = ++w.tags;
        *tag = part ? 0 : access.tag;
    } else if (*tag) {
        access.how |= SIM_CHECK;
    }
    OK(sim_launch(s->handle, &access, 1));
}

/* May the program use the block outside of captures? */
static int may_use(const block *b)
{
    const graph *g = &w.g[b->graph];
    if (!b->there || b->capturing) return 0;
    return !b->graph || (g->state != CAPTURING && g->launches);
}

static void use_block(block *b, stream *s, int writes)
{
    moment *m;
    int first = b->only != 0;
    if (first && b->only != s->born) return;
    b->only = 0;
    uses_wait(&b->plain, s, writes || b->plain.n == USES);
    work(b, s, writes, &b->tag);
    m = moment_now(s);
    uses_note(&b->plain, s, m, writes || first, 0); /* where it was given out all others come after */
    moment_drop(m);
    tell("    %s block %d on stream %ld\n", writes ? "write" : "read", (int)(b - w.b), s->born);
}

/* May the captured stream use it? */
static int may_use_captured(const block *b, const stream *s)
{
    const graph *g = &w.g[b->graph];
    if (!b->there || (b->capturing && b->capturing != s->graph)) return 0;
    if (b->graph == s->graph) return 1;
    return !b->graph || (g->state != CAPTURING && g->launches);
}

static void use_captured(block *b, stream *s, int writes)
{
    graph *g = &w.g[s->graph];
    item *i = graph_item(g, b);
    moment *m;
    if (!i || b->only) return;
    if (b->graph != s->graph && !is_recorded_for(b, s->graph) && !i->pinned) {
        i->pinned = 1;
        b->pins++;
    }
    if (b->capturing != s->graph) b->captured_tag = 0;
    b->capturing = s->graph;
    uses_wait(&b->captured, s, writes || b->captured.n == USES);
    work(b, s, writes, &b->captured_tag);
    i->writes |= writes;
    i->tag = b->captured_tag;
    i->bytes = b->bytes;
    m = moment_now(s);
    uses_note(&b->captured, s, m, writes, 0);
    moment_drop(m);
    tell("    %s block %d in the capture of graph %d on stream %ld\n", writes ? "write" : "read", (int)(b - w.b),
         s->graph, s->born);
}

/* ---- operations on blocks ---------------------------------------------------------------------------------------- */

/* Others may use it from here on. */
static void given_out(uses *u, const stream *s)
{
    moment *m = moment_now(s);
    uses_note(u, s, m, 1, 0);
    u->list[u->n - 1].said = 1;
    moment_drop(m);
}

static void do_malloc(void)
{
    galloc_request request = {0};
    stream *s = some_stream(maybe_captured());
    uint32_t pool = any(w.pools), odd = any(16);
    void *ptr = NULL;
    cudaError_t error;
    block *b;
    if (!s || !take(&w.pool[pool], LIVES) || w.blocks == STEPS) return;
    if (!take(&w.g[s->graph], LIVES)) return;
    request.bytes = roll_bytes(&slot[me].d, any(3) ? MIB(2) : MIB(12));
    request.stream = s->handle;
    request.pool = w.pool[pool];
    request.lifetime = odd == 0;
    if (odd == 1) request.alignment = (size_t)1 << any(23);
    if (odd == 2) request.max_bytes = request.bytes + roll_bytes(&slot[me].d, MIB(8));
    b = &w.b[++w.blocks];
    memset(b, 0, sizeof *b);
    tell("    block %d = malloc %zu (alignment %zu, room %zu) of pool %u on stream %ld%s\n", w.blocks, request.bytes,
         request.alignment, request.max_bytes, pool, s->born, s->graph ? ", captured" : "");
    error = CALL(galloc_alloc(&ptr, &request));
    if (error) {
        if (ptr) fail("malloc gave a pointer and an error");
        if (error == cudaErrorStreamCaptureInvalidated && is_broken(s)) return;
        if (error != cudaErrorMemoryAllocation) (void)went(error, "malloc");
        return;
    }
    done_mallocs++;
    tell("      at %p\n", ptr);
    b->ptr = ptr;
    b->bytes = request.bytes;
    b->there = 1;
    b->pool = (int)pool;
    b->graph = s->graph;
    if (s->graph) {
        done_captured++;
        (void)graph_item(&w.g[s->graph], b);
        b->capturing = s->graph;
    }
    if (may_work(s) && !is_broken(s)) given_out(s->graph ? &b->captured : &b->plain, s);
    else b->only = s->born;
    if (any(8) == 0) return;
    if (s->graph && !is_broken(s)) use_captured(b, s, 1);
    else if (!s->graph && may_work(s)) use_block(b, s, 1);
}

static void do_use(void)
{
    block *b = some_block();
    stream *s = some_stream(maybe_captured());
    if (!b || !s) return;
    if (s->graph && may_use_captured(b, s) && !is_broken(s)) use_captured(b, s, any(2) != 0);
    if (!s->graph && may_use(b) && may_work(s)) use_block(b, s, any(2) != 0);
}

/* Need the free not come after this use? */
static int is_said(const block *b, const use *u, stream *const *at, int n)
{
    if (u->said) return 1;
    for (int i = 0; i < n; i++)
        if (at[i]->born == u->by && !at[i]->graph) return 1;
    if (u->graph) return u->graph == b->graph || is_recorded_for(b, u->graph);
    return is_recorded_by(b, u->by, 0);
}

/* Orders the streams after what they must come after before they free the block. 0: it may not be freed there. */
static int prepare_free(block *b, stream *const *at, int n)
{
    const stream *plain = NULL, *captured = NULL;
    int needs = 0;
    for (int i = 0; i < n; i++) {
        if (at[i]->graph && captured && captured->graph != at[i]->graph) return 0;
        if (at[i]->graph) captured = at[i];
        else if (!plain || may_work(at[i])) plain = at[i];
    }
    if (b->capturing && (!captured || captured->graph != b->capturing)) return 0;
    if (captured && b->graph == captured->graph && plain) return 0;
    for (int i = 0; i < b->plain.n; i++) needs |= !is_said(b, &b->plain.list[i], at, n);
    if (needs && plain && !may_work(plain)) return 0;
    for (int i = 0; plain && i < b->plain.n; i++)
        if (!is_said(b, &b->plain.list[i], at, n)) come_after(plain, b->plain.list[i].at);
    for (int i = 0; captured && !is_broken(captured) && i < b->captured.n; i++) {
        const use *u = &b->captured.list[i];
        int said = u->said || is_recorded_by(b, u->by, captured->graph);
        for (int k = 0; k < n; k++) said |= at[k]->born == u->by;
        if (!said) come_after(captured, u->at);
    }
    return 1;
}

/* May it be freed at all, now, but for the order? */
static int may_free(const block *b, int captured)
{
    if (b->pins > (captured && b->capturing == captured && b->pins == 1 && !is_recorded_for(b, captured) &&
                           b->graph != captured
                       ? 1
                       : 0))
        return 0;
    return 1;
}

static int take_recorded(const block *b)
{
    for (int i = 0; i < b->records; i++)
        for (int k = 0; k < STREAMS; k++)
            if (w.s[k].born == b->recorded[i].by && !take(&w.s[k], k ? LIVES : USED_BY_CALL)) return 0;
    return 1;
}

static int free_on(block *b, stream *const *at, int n)
{
    cudaStream_t handles[4];
    int captured = 0;
    cudaError_t error;
    for (int i = 0; i < n; i++) captured = at[i]->graph ? at[i]->graph : captured;
    if (!may_free(b, captured) || !prepare_free(b, at, n) || !take_recorded(b)) return 0;
    if (!take(&w.pool[b->pool], LIVES)) return 0;
    tell("    free block %d on", (int)(b - w.b));
    for (int i = 0; i < n; i++) {
        handles[i] = at[i]->handle;
        tell(" stream %ld%s", at[i]->born, at[i]->graph ? " (captured)" : "");
    }
    tell("\n");
    error = n == 1 ? CALL(galloc_free(b->ptr, handles[0])) : CALL(galloc_free_after(b->ptr, handles, n));
    if (!went(error, "free")) return 0;
    b->there = 0;
    return 1;
}

static void do_free(void)
{
    block *b = some_block();
    stream *at[3];
    int n = any(5) ? 1 : 2 + (int)any(2), captured = b && b->capturing ? 1 : any(8) == 0 ? -1 : 0;
    if (!b) return;
    for (int i = 0; i < n; i++)
        if (!(at[i] = some_stream(n > 1 && captured ? -1 : captured))) return;
    (void)free_on(b, at, n);
}

static void do_record(void)
{
    block *b = some_block();
    stream *s = some_stream(maybe_captured());
    cudaError_t error;
    if (!b || !s || b->records == USES) return;
    if (!take(&w.pool[b->pool], LIVES)) return;
    if (!s->graph && b->graph && w.g[b->graph].state == CAPTURING) return;
    if (s->graph && b->graph && b->graph != s->graph && w.g[b->graph].state == CAPTURING) return;
    tell("    record block %d for stream %ld%s\n", (int)(b - w.b), s->born, s->graph ? ", captured" : "");
    error = CALL(galloc_record_stream(b->ptr, s->handle));
    if (error == cudaErrorStreamCaptureInvalidated && is_broken(s)) return;
    if (!went(error, "record")) return;
    note_record(b, s);
    if (!s->graph || is_broken(s)) return;
    item *i = graph_item(&w.g[s->graph], b);
    if (i && i->pinned) b->pins--;
    if (i) i->pinned = 0;
    if (b->capturing && b->capturing != s->graph) return;
    b->capturing = s->graph; /* it stays until the capture has ended */
}

static void do_resize(void)
{
    block *b = some_block();
    stream *s = some_stream(0);
    size_t bytes;
    cudaError_t error;
    if (!b || !s || b->capturing || b->pins || !may_work(s)) return;
    if (b->only && b->only != s->born) return;
    if (!take(&w.pool[b->pool], LIVES) || !take_recorded(b)) return;
    if (!prepare_free(b, &s, 1)) return;
    bytes = any(2) ? 1 + any((uint32_t)b->bytes) : b->bytes + roll_bytes(&slot[me].d, MIB(6));
    tell("    resize block %d from %zu to %zu on stream %ld\n", (int)(b - w.b), b->bytes, bytes, s->born);
    error = CALL(galloc_resize(b->ptr, bytes, s->handle));
    if (error == cudaErrorNotSupported || error == cudaErrorMemoryAllocation) return;
    if (!went(error, "resize")) return;
    if (bytes > b->bytes) b->tag = 0;
    b->bytes = bytes;
    if (may_use(b)) {
        use_block(b, s, 1);
    } else { /* the new bytes are the stream's first */
        moment *m;
        uses_wait(&b->plain, s, 1);
        m = moment_now(s);
        uses_note(&b->plain, s, m, 1, 0);
        moment_drop(m);
    }
}

/* ---- captures ---------------------------------------------------------------------------------------------------- */

static void join_groups(graph *g, const stream *s)
{
    if (s->group) g->groups |= 1 << s->group;
}

/* The legacy stream is of no use while a blocking one is captured. */
static int take_into_capture(stream *s) { return take(s, CHANGES) && (!s->blocking || take(&w.s[0], CHANGES)); }

static void do_begin(void)
{
    stream *s = &w.s[1 + any(STREAMS - 1)];
    graph *g = &w.g[w.graphs + 1];
    for (int i = 0; i < 6 && (!s->born || !s->group); i++) s = &w.s[1 + any(STREAMS - 1)];
    if (w.graphs + 1 == GRAPHS || !may_be_called(s) || s->graph || !take_into_capture(s)) return;
    memset(g, 0, sizeof *g);
    g->mode = (int)any(3);
    g->thread = me;
    g->origin = (int)(s - w.s);
    g->state = CAPTURING;
    OK(cudaStreamBeginCapture(s->handle, (enum cudaStreamCaptureMode)g->mode));
    s->graph = ++w.graphs;
    join_groups(g, s);
    tell("    capture stream %ld (mode %d) for graph %d\n", s->born, g->mode, s->graph);
}

/* Would the capture have streams of two groups of one pool? That is refused at the pool's first call in it. */
static int would_be_of_two_groups(const graph *g, const stream *s)
{
    const group *own = &w.group[s->group];
    int two = 0;
    for (int i = 1; s->group && i < GROUPS; i++)
        two |= i != s->group && g->groups >> i & 1 && w.group[i].begun && w.group[i].pool == own->pool;
    for (int i = 1; i <= w.blocks; i++) /* the first call was made before */
        if (w.b[i].graph == number_of(g) && w.b[i].pool == own->pool) return 0;
    return two;
}

/* Another stream comes after the captured one: it is drawn into the capture, or in it already. */
static void do_fork(void)
{
    stream *s = some_stream(1), *t = &w.s[1 + any(STREAMS - 1)];
    moment *m;
    if (!s || is_broken(s) || s == t || !may_be_called(t) || (t->graph && t->graph != s->graph)) return;
    if (!take_into_capture(t) || would_be_of_two_groups(&w.g[s->graph], t)) return;
    m = moment_now(s);
    come_after(t, m);
    moment_drop(m);
    t->graph = s->graph;
    join_groups(&w.g[s->graph], t);
    tell("    stream %ld comes after stream %ld in the capture of graph %d\n", t->born, s->born, s->graph);
}

/* Joins the forks, ends the capture and makes an instance; or it comes to nothing. */
static void end_capture(graph *g, int join, int keep)
{
    stream *s = &w.s[g->origin];
    int number = number_of(g);
    cudaError_t error;
    for (int i = 0; !g->broken && join && i < STREAMS; i++) {
        moment *m;
        if (w.s[i].graph != number || i == g->origin) continue;
        m = moment_now(&w.s[i]);
        come_after(s, m);
        moment_drop(m);
    }
    error = cudaStreamEndCapture(s->handle, &g->handle);
    (void)cudaGetLastError();
    tell("    end the capture of graph %d: %d\n", number, (int)error);
    if (error && join && !g->broken) fail("the end of a capture");
    capture_over(number);
    if (error) {
        graph_over(g);
        return;
    }
    g->state = READY;
    if (!keep) {
        OK(cudaGraphDestroy(g->handle));
        graph_over(g);
        return;
    }
    OK(cudaGraphInstantiate(&g->exec[0], g->handle, 0));
}

static int take_capture(const graph *g)
{
    for (int i = 0; i < STREAMS; i++)
        if (w.s[i].graph == number_of(g) && (!may_be_called(&w.s[i]) || !take(&w.s[i], CHANGES))) return 0;
    for (int i = 1; i <= w.blocks; i++)
        if (w.b[i].capturing == number_of(g) && !take(&w.b[i], CHANGES)) return 0;
    return 1;
}

static void do_end(void)
{
    graph *g = some_graph(CAPTURING);
    int how = (int)any(8);
    if (!g || !may_be_called(&w.s[g->origin]) || !take_capture(g) || g->thread != me) return;
    end_capture(g, how != 0, how != 1);
}

/* Somebody breaks the rules of a capture: it is lost. */
static void do_break(void)
{
    stream *s = some_stream(1);
    unsigned long long id = 0;
    if (!s || is_broken(s) || !take_capture(&w.g[s->graph])) return;
    w.g[s->graph].broken = 1;
    w.broken++;
    if (!cudaStreamGetId(s->handle, &id)) fail("a captured stream told its id");
    tell("    the capture of graph %d is lost\n", s->graph);
}

/* What the graph may touch when it is launched, be it the program's or not. */
static int take_items(const graph *g)
{
    for (int i = 0; i < g->n; i++)
        if (!take(&w.b[g->items[i].block], CHANGES)) return 0;
    for (int i = 1; g->groups && i <= w.blocks; i++)
        if (w.g[w.b[i].graph].groups & g->groups && !take(&w.b[i], CHANGES)) return 0;
    return 1;
}

static int may_launch(const graph *g)
{
    return g->state == READY && !g->never;
}

/* Is or was a result of a later graph of its group, which a launch of this one may write to? Uses of it before it was
   freed count. */
static int may_spoil(const graph *g, const block *b)
{
    return b->graph > number_of(g) && w.g[b->graph].groups & g->groups;
}

static void do_launch(void)
{
    graph *g = some_graph(READY);
    stream *s = some_stream(0);
    moment *m;
    int x = (int)any(2);
    if (!g || !s || !may_launch(g) || !may_work(s) || !take_items(g)) return;
    for (int i = 1; i < GROUPS; i++)
        if (g->groups >> i & 1 && !take(&w.group[i], CHANGES)) return;
    if (!g->exec[x]) x = 0;
    if (!g->exec[x]) return;
    for (int i = 0; i < g->n; i++) {
        block *b = &w.b[g->items[i].block];
        uses_wait(&b->plain, s, g->items[i].writes || b->graph == number_of(g) || b->plain.n == USES);
    }
    for (int i = 1; i <= w.blocks; i++)
        if (may_spoil(g, &w.b[i])) uses_wait(&w.b[i].plain, s, 1);
    if (g->last_exec != x) come_after(s, g->last);
    for (int i = 1; i < GROUPS; i++)
        if (g->groups >> i & 1) come_after(s, w.group[i].last);
    tell("    launch instance %d of graph %d on stream %ld\n", x, number_of(g), s->born);
    if (!OK(cudaGraphLaunch(g->exec[x], s->handle))) fail("launch");
    done_launches++;
    m = moment_now(s);
    for (int i = 0; i < g->n; i++) {
        block *b = &w.b[g->items[i].block];
        int writes = g->items[i].writes || b->graph == number_of(g);
        uses_note(&b->plain, s, m, writes, number_of(g));
        if (writes) b->tag = b->bytes <= g->items[i].bytes ? g->items[i].tag : 0;
    }
    for (int i = 1; i <= w.blocks; i++) {
        if (!may_spoil(g, &w.b[i])) continue;
        uses_note(&w.b[i].plain, s, m, 1, number_of(g));
        w.b[i].tag = 0;
    }
    moment_drop(g->last);
    g->last = moment_share(m);
    g->last_exec = x;
    g->launches++;
    for (int i = 1; i < GROUPS; i++) {
        if (!(g->groups >> i & 1)) continue;
        moment_drop(w.group[i].last);
        w.group[i].last = moment_share(m);
    }
    moment_drop(m);
}

/* A second instance, of the graph or of a clone; or the handle goes, or an instance; with the last, all of it. */
static void do_graph(void)
{
    graph *g = some_graph(READY);
    int how = (int)any(5);
    if (!g || !take_items(g)) return;
    if (how == 0 && g->handle && !g->exec[1]) {
        cudaGraph_t from = g->handle;
        int clone = (int)any(2);
        if (clone) OK(cudaGraphClone(&from, g->handle));
        OK(cudaGraphInstantiate(&g->exec[1], from, 0));
        if (clone) OK(cudaGraphDestroy(from));
        return;
    }
    tell("    destroy %s of graph %d\n", how < 3 ? "the handle" : how == 3 ? "instance 0" : "instance 1", number_of(g));
    if (how < 3 && g->handle) {
        OK(cudaGraphDestroy(g->handle));
        g->handle = NULL;
    } else if (how >= 3 && g->exec[how - 3]) {
        OK(cudaGraphExecDestroy(g->exec[how - 3]));
        g->exec[how - 3] = NULL;
    }
    if (!g->handle && !g->exec[0] && !g->exec[1]) graph_over(g);
}

/* ---- groups ------------------------------------------------------------------------------------------------------ */

static void do_group_begin(void)
{
    int k = w.groups && any(3) == 0 ? 1 + (int)any((uint32_t)w.groups) : w.groups + 1;
    stream *s = some_stream(any(3) == 0);
    group *own = &w.group[k];
    cudaError_t error;
    if (k >= GROUPS || !s || is_legacy(s) || s->group || is_broken(s) || !take(own, CHANGES)) return;
    if (!take(s, CHANGES)) return;
    if (k <= w.groups && (!own->there || own->begun)) return;
    if (k > w.groups) {
        memset(own, 0, sizeof *own);
        own->pool = (int)any(w.pools);
    }
    if (!take(&w.pool[own->pool], LIVES)) return;
    for (int i = 1; i < GROUPS; i++) /* not a second one in a capture */
        if (s->graph && w.group[i].begun && w.g[s->graph].groups >> i & 1) return;
    if (s->graph && !take(&w.g[s->graph], CHANGES)) return;
    if (k > w.groups) w.groups = k;
    tell("    group %d begins for pool %d with stream %ld%s\n", k, own->pool, s->born, s->graph ? ", captured" : "");
    error = CALL(galloc_graph_begin(&own->handle, k <= w.groups && own->there ? NULL : w.pool[own->pool],
                                    s->handle));
    if (!went(error, "begin a group")) return;
    own->there = 1;
    own->begun = 1;
    s->group = k;
    if (s->graph) w.g[s->graph].groups |= 1 << k;
}

static int is_capturing_for(int k)
{
    for (int i = 1; i <= w.graphs; i++)
        if (w.g[i].state == CAPTURING && w.g[i].groups >> k & 1) return 1;
    return 0;
}

static void do_group_end(void)
{
    int k = w.groups ? 1 + (int)any((uint32_t)w.groups) : 0;
    group *own = &w.group[k];
    cudaError_t error;
    if (!k || !own->begun || is_capturing_for(k) || !take(own, CHANGES)) return;
    for (int i = 0; i < STREAMS; i++)
        if (w.s[i].group == k && !take(&w.s[i], CHANGES)) return;
    tell("    group %d ends\n", k);
    error = CALL(galloc_graph_end(own->handle));
    if (!went(error, "end a group")) return;
    own->begun = 0;
    for (int i = 0; i < STREAMS; i++)
        if (w.s[i].group == k) w.s[i].group = 0;
}

static void do_group_release(void)
{
    int k = w.groups ? 1 + (int)any((uint32_t)w.groups) : 0;
    group *own = &w.group[k];
    stream *s = some_stream(0);
    cudaError_t error;
    if (!k || !s || !own->there || own->begun || !take(own, CHANGES) || !may_work(s)) return;
    for (int i = 1; i <= w.graphs; i++)
        if (w.g[i].groups >> k & 1 && !take(&w.g[i], CHANGES)) return;
    come_after(s, own->last);
    tell("    release group %d on stream %ld\n", k, s->born);
    error = CALL(galloc_graph_release(own->handle, s->handle));
    if (!went(error, "release a group")) return;
    own->there = 0;
    own->handle = NULL;
    for (int i = 1; i <= w.graphs; i++)
        if (w.g[i].groups >> k & 1) w.g[i].never = 1;
}

/* ---- streams and pools ------------------------------------------------------------------------------------------- */

static int relaxed(void)
{
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    OK(cudaThreadExchangeStreamCaptureMode(&mode));
    return (int)mode;
}

static void restore(int before)
{
    enum cudaStreamCaptureMode mode = (enum cudaStreamCaptureMode)before;
    OK(cudaThreadExchangeStreamCaptureMode(&mode));
}

static void new_stream(stream *s)
{
    int mode = relaxed();
    memset(s, 0, sizeof *s);
    s->blocking = any(4) == 0;
    OK(cudaStreamCreateWithFlags(&s->handle, s->blocking ? cudaStreamDefault : cudaStreamNonBlocking));
    s->born = ++w.born;
    restore(mode);
    tell("    stream %ld is new%s\n", s->born, s->blocking ? ", blocking" : "");
}

static int retire(stream *s)
{
    tell("    retire stream %ld\n", s->born);
    if (!went(CALL(galloc_stream_retire(s->handle)), "retire")) return 0;
    for (int i = 1; i <= w.blocks; i++) {
        block *b = &w.b[i];
        for (int k = 0; b->there && is_recorded_by(b, s->born, 0) && k < b->plain.n; k++)
            if (b->plain.list[k].by == s->born && !b->plain.list[k].graph) b->plain.list[k].said = 1;
        for (int k = 0; k < b->records; k++)
            b->recorded[k].over |= b->recorded[k].by == s->born && !b->recorded[k].graph;
    }
    s->retired = 1;
    return 1;
}

static void do_retire(void)
{
    stream *s = some_stream(0);
    if (s && !s->group && take(s, CHANGES) && may_work(s)) (void)retire(s);
}

static void do_destroy(void)
{
    stream *s = &w.s[PLAIN + any(STREAMS - PLAIN)];
    int mode;
    if (s->graph || s->group) return;
    if (s->born) {
        if (!take(s, ENDS)) return;
        for (int i = 1; i <= w.blocks && !s->retired; i++)
            for (int k = 0; w.b[i].there && k < w.b[i].records; k++)
                if (w.b[i].recorded[k].by == s->born && !w.b[i].recorded[k].graph) return;
        if (w.promised && (!may_work(s) || !retire(s))) return;
        tell("    destroy stream %ld\n", s->born);
        mode = relaxed();
        OK(cudaStreamDestroy(s->handle));
        restore(mode);
        s->born = 0;
    }
    if (any(4)) new_stream(s);
}

static void do_order(void)
{
    stream *s = some_stream(0), *t = some_stream(0);
    moment *m;
    if (!s || !t || !may_work(s) || !may_work(t)) return;
    m = moment_now(s);
    come_after(t, m);
    moment_drop(m);
    tell("    stream %ld comes after stream %ld\n", t->born, s->born);
}

static void random_text(char *text) /* 256 bytes */
{
    static const char *const heads[] = {"", "", "", "like:pytorch,", "backend:cudaMalloc,", "backend:cudaMallocAsync,",
                                        "strategy:pooled,", "strategy:heuristic,", "expandable_segments:False,",
                                        "like:pytorch,expandable_segments:True,"};
    static const char *const limits[] = {"", "", "memory_limit:24M,", "memory_limit:48M,", "memory_limit:8M,",
                                         "per_process_memory_fraction:0.3,", "device_limit:64M,"};
    static const char *const others[] = {"overhead:0",
                                         "overhead:0.2",
                                         "overhead:1",
                                         "reuse:completed",
                                         "reuse:completed+followed",
                                         "reuse:followed+wait",
                                         "reuse:wait",
                                         "reuse:completed+wait",
                                         "gc_threshold:0.3",
                                         "garbage_collection_threshold:0.6",
                                         "gc_age:1ms",
                                         "stats:exact",
                                         "wait_limit_ms:0",
                                         "wait_limit_ms:2",
                                         "release_threshold:4M",
                                         "growth:2M",
                                         "growth:16M",
                                         "throw_on_cudamalloc_oom:True",
                                         "max_split_size:24M",
                                         "roundup_power2_divisions:4",
                                         "roundup_power2_divisions:2",
                                         "debug:guards",
                                         "debug:poison",
                                         "debug:guards+quarantine,quarantine_bytes:1M",
                                         "debug:guards+poison+quarantine,debug_sample:3",
                                         "debug:guards,debug_sample:70",
                                         "history:64",
                                         "history:5,history_stacks:3",
                                         "lane_bytes:0",
                                         "lane_bytes:64M",
                                         "large_segment_size:12M",
                                         "max_retries:1",
                                         "growth:32M",
                                         "overhead:0.01",
                                         "gc_age:0ms",
                                         "gc_threshold:0.9",
                                         "reuse:none",
                                         "release_threshold:0",
                                         "gpu_direct_rdma:True",
                                         "stats:fast"};
    uint32_t most = is_wide() ? sizeof others / sizeof *others : 20; /* narrow programs know the first 20 only */
    int n = snprintf(text, 256, "%s%s", heads[any(10)], limits[any(7)]);
    for (uint32_t i = any(is_wide() ? 5 : 4); i > 0; i--)
        n += snprintf(text + n, 256 - (size_t)n, "%s,", others[any(most)]);
    if (w.promised) n += snprintf(text + n, 256 - (size_t)n, "stream_check:off,");
    while (n && text[n - 1] == ',') text[--n] = 0;
}

static void new_pool(int k)
{
    galloc_config config;
    char message[512];
    for (;;) {
        config = galloc_config_default();
        random_text(w.text[k]);
        if (galloc_config_parse(&config, w.text[k], message, sizeof message) == cudaSuccess) break;
    }
    if (seed_now % 16 == 5) { /* all that these programs do is right, so nothing is found */
        config.debug = GALLOC_DEBUG_GUARDS | GALLOC_DEBUG_POISON | GALLOC_DEBUG_QUARANTINE;
        config.quarantine_bytes = MIB(1);
    }
    tell("    pool %d: %s%s\n", k, w.text[k], config.debug ? ", debug" : "");
    w.pool[k] = NULL;
    if (galloc_pool_create(&w.pool[k], &config)) fail("no pool");
}

/* A pool that nothing belongs to any more ends, and another begins. */
static void do_pool(void)
{
    int k = (int)any(w.pools), mine = 0;
    cudaError_t error;
    if (!take(&w.pool[k], ENDS)) return;
    for (int i = 1; i < GROUPS; i++)
        if (w.group[i].there && w.group[i].pool == k) return;
    for (int i = 1; i <= w.blocks; i++) mine |= w.b[i].there && w.b[i].pool == k;
    for (int i = 1; i <= w.graphs; i++)
        if (w.g[i].state == CAPTURING) return; /* its device may not be waited for */
    if (mine && any(8)) return;
    tell("    destroy pool %d\n", k);
    calm = 1;
    error = galloc_pool_destroy(w.pool[k]);
    calm = 0;
    if (error == cudaErrorNotPermitted) {
        tell("      not permitted\n");
        return;
    }
    if (mine) {
        if (!error) fail("a pool that is used was destroyed");
        return;
    }
    if (went(error, "destroy a pool")) new_pool(k);
}

static void do_upkeep(void)
{
    int k = (int)any(w.pools);
    galloc_stats stats;
    galloc_stream_stats streams[4];
    cudaError_t error = cudaSuccess;
    if (!take(&w.pool[k], LIVES)) return;
    switch (any(7)) {
    case 0: error = CALL(galloc_pool_trim(w.pool[k], roll_bytes(&slot[me].d, MIB(32)), NULL)); break;
    case 1: error = CALL(galloc_pool_trim(w.pool[k], 0, NULL)); break;
    case 2: error = CALL(galloc_pool_sync_point(w.pool[k], NULL)); break;
    case 3: error = CALL(galloc_pool_reserve(w.pool[k], roll_bytes(&slot[me].d, MIB(16)))); break;
    case 4: error = CALL(galloc_pool_stats(w.pool[k], &stats)); break;
    case 5: error = CALL(galloc_pool_streams(w.pool[k], streams, 4, NULL)); break;
    default: error = CALL(galloc_pool_trim(w.pool[k], SIZE_MAX, NULL)); break;
    }
    tell("    trim, sync_point, reserve or look at pool %d\n", k);
    if (error == cudaErrorMemoryAllocation || error == cudaErrorNotSupported) return;
    if (error) tell("      %d %s\n", (int)error, galloc_last_message());
}

/* Callbacks that call galloc themselves, but not from within a call of their own. */
static __thread int in_callback;

static int when_memory_runs_out(const galloc_report *report, void *user)
{
    static __thread char text[GALLOC_REPORT_TEXT];
    galloc_stats stats;
    (void)user;
    if (report->live + report->rounding + report->cached != report->held) fail("sums of a report");
    if (galloc_report_text(report, text, sizeof text)) fail("no text of a report");
    if (in_callback) return 0;
    in_callback = 1;
    switch (any(5)) {
    case 0: (void)galloc_pool_trim(report->pool, 0, NULL); break;
    case 1: (void)galloc_pool_sync_point(report->pool, NULL); break;
    case 2: (void)galloc_pool_set_limit(report->pool, SIZE_MAX); break;
    case 3: (void)galloc_pool_stats(report->pool, &stats); break;
    default: break;
    }
    in_callback = 0;
    return (int)any(2);
}

static void when_pages_change(galloc_pool *pool, void *addr, size_t bytes, void *user)
{
    galloc_stats stats;
    (void)addr;
    (void)bytes;
    (void)user;
    if (in_callback) return;
    in_callback = 1;
    if (!any(8)) (void)galloc_pool_trim(pool, 0, NULL);
    if (!any(8)) (void)galloc_pool_stats(pool, &stats);
    in_callback = 0;
}

static int some_of_it(void *user, const void *data, size_t bytes)
{
    (void)user;
    (void)data;
    (void)bytes;
    return !any(40); /* now and then it stops the snapshot */
}

/* Looks inside, and changes what can be changed at run time. */
static void do_inside(void)
{
    static char text[GALLOC_REPORT_TEXT];
    int k = (int)any(w.pools), n;
    galloc_pool *pool = w.pool[k];
    galloc_callbacks call = {0};
    galloc_decision decisions[3];
    cudaError_t error = cudaSuccess;
    if (!take(&w.pool[k], LIVES)) return;
    uint32_t what = any(10);
    switch (what) {
    case 0: error = CALL(galloc_pool_history(pool, any(2) ? any(200) : 0)); break;
    case 1: error = CALL(galloc_pool_history_stacks(pool, any(6))); break;
    case 2: error = CALL(galloc_snapshot(pool, (int)any(2), some_of_it, NULL)); break;
    case 3: error = CALL(galloc_pool_stats_reset(pool)); break;
    case 4: error = CALL(galloc_pool_set_limit(pool, any(3) ? any(96 << 20) : SIZE_MAX)); break;
    case 5: error = CALL(galloc_pool_freeze(pool)); break;
    case 6: error = CALL(galloc_live_text(pool, text, sizeof text)); break;
    case 7: error = CALL(galloc_annotate("a step")); break;
    case 8: error = CALL(galloc_pool_decisions(pool, decisions, 3, &n)); break;
    default:
        if (any(2)) call.on_oom = when_memory_runs_out;
        if (!any(3)) call.on_map = call.on_unmap = when_pages_change;
        error = CALL(galloc_pool_set_callbacks(pool, &call));
        break;
    }
    tell("    inside of pool %d: %u\n", k, what);
    if (error) tell("      %d %s\n", (int)error, galloc_last_message());
}

static void do_device(void)
{
    int captured = 0;
    for (int i = 0; i < STREAMS; i++) captured |= w.s[i].graph;
    if (any(3)) sim_run((long)any(12));
    else if (any(2)) sim_run(-1);
    else if (!captured) OK(cudaDeviceSynchronize());
}

/* ---- a program --------------------------------------------------------------------------------------------------- */

typedef struct kind {
    void (*run)(void);
    uint32_t weight;
} kind;

static const kind kinds[] = {
    {do_malloc, 24},  {do_use, 12},    {do_free, 22},       {do_record, 7},    {do_resize, 4},
    {do_begin, 8},    {do_fork, 7},    {do_end, 7},         {do_launch, 16},   {do_graph, 3},
    {do_destroy, 3},  {do_retire, 3},  {do_order, 2},       {do_upkeep, 3},    {do_device, 5},
    {do_break, 1},    {do_pool, 1},    {do_group_begin, 4}, {do_group_end, 4}, {do_group_release, 5},
    {do_inside, 4}};
enum { KINDS = sizeof kinds / sizeof *kinds };

/* Each program likes some operations more than others, so that they meet more often. */
static uint32_t weights[KINDS];

static void choose_weights(void)
{
    static const uint32_t times[] = {0, 1, 1, 1, 3, 6};
    for (int k = 0; k < KINDS; k++)
        weights[k] = kinds[k].run != do_inside || is_wide() ? kinds[k].weight * times[any(6)] : 0;
    for (int k = 0; k < 3; k++) weights[k] += kinds[k].weight;
    for (int k = 0; w.promised && k < KINDS; k++)
        if (kinds[k].run == do_begin || kinds[k].run == do_group_begin) weights[k] = 0;
}

static void check_pools(void)
{
    for (int k = 0; k < POOLS; k++) {
        int broken = 0;
        if (!slot[1 - me].busy) broken = galloc_pool_check(w.pool[k]);
        if (broken) tell("    pool %d: %d invariants broken\n", k, broken);
        if (broken) fail("an invariant");
        if (!slot[1 - me].busy && stats_of(w.pool[k]).damages) fail("memory that debug takes for damaged");
    }
}

static void step(int n)
{
    uint32_t all = 0, at, i = 0;
    struct host *self = &slot[me];
    self->d.state = (seed_now * 1000003u + (uint64_t)n) * 0x9e3779b97f4a7c15u;
    (void)roll(&self->d);
    (void)roll(&self->d);
    for (int k = 0; k < KINDS; k++) all += weights[k];
    at = any(all);
    while (at >= weights[i]) at -= weights[i++];
    self->n = 0;
    self->busy = 1;
    tell("%d (thread %d):\n", n, me);
    kinds[i].run();
    self->busy = 0;
    done_steps++;
    if (n % 8 == 0) check_pools();
    if (sim_findings(SIM_ANY) != w.broken || test_failures) fail("a finding");
}

static void drive(void)
{
    while (next_step < steps && !failing) {
        int n = next_step++;
        if (!left_out[n]) step(n);
        if (odds && any(6) == 0) pass_to(1 - me);
    }
}

static void round_begin(void)
{
    sim_options o = sim_defaults();
    memset(&w, 0, sizeof w);
    slot[0].d.state = seed_now * 77 + 5;
    slot[0].n = slot[1].n = 0;
    (void)roll(&slot[0].d);
    (void)roll(&slot[0].d);
    o.seed = seed_now;
    o.memory = MIB(64) << any(3);
    o.pace = (int)any(3) - 1;
    o.lag = any(5) ? 0 : 30;
    o.panic = 0;
    o.vmm = any(12) != 0;
    begin_with(o);
    steps = 40 + (int)any(160);
    odds = any(2) ? 0 : 1 << (2 + any(6));
    faults = any(4) == 0;
    w.pools = 1 + any(POOLS);
    w.promised = any(8) == 0;
    choose_weights();
    failing = 0;
    w.born = 3;
    w.s[0] = (stream){cudaStreamLegacy, 1, 0, 0, 0, 0};
    w.s[1] = (stream){cudaStreamPerThread, 2, 1, 0, 0, 0};
    w.s[2] = (stream){cudaStreamPerThread, 3, 1, 0, 0, 0};
    w.g[0].state = GONE;
    tell("memory %zu MiB, pace %d, vmm %d, %d steps, odds %d, faults %d\n", o.memory >> 20, o.pace, o.vmm, steps, odds,
         faults);
    if (any(4) == 0) w.s[0].born = 0; /* no default streams */
    for (int k = PLAIN; k < PLAIN + 1 + (int)any(4); k++) new_stream(&w.s[k]);
    for (int k = 0; k < POOLS; k++) new_pool(k);
    next_step = 0;
    sim_hook(before_call, any(2) ? at_query : NULL);
    running = 1;
}

/* A capture is ended by the thread that began it, and comes to nothing if the other's default stream is in it. */
static void end_own_captures(void)
{
    for (int i = 1; i <= w.graphs; i++) {
        graph *g = &w.g[i];
        int join = 1;
        if (g->state != CAPTURING || g->thread != me) continue;
        for (int k = 0; k < STREAMS; k++)
            if (w.s[k].graph == i && !may_be_called(&w.s[k])) join = 0;
        end_capture(g, join, 1);
    }
}

static void *second_thread(void *arg)
{
    me = 1;
    for (;;) {
        while (sem_wait(&slot[1].go)) continue;
        if (quitting) return arg;
        drive();
        if (closing) end_own_captures();
        (void)sem_post(&slot[0].go);
    }
}

static void free_what_is_left(void)
{
    stream *at = NULL;
    for (int k = PLAIN; k < STREAMS; k++)
        if (w.s[k].born) at = &w.s[k];
    if (!at) new_stream(at = &w.s[PLAIN]);
    for (int i = 1; i <= w.graphs; i++) {
        graph *g = &w.g[i];
        if (g->state != READY) continue;
        if (g->handle) OK(cudaGraphDestroy(g->handle));
        for (int x = 0; x < 2; x++)
            if (g->exec[x]) OK(cudaGraphExecDestroy(g->exec[x]));
        graph_over(g);
    }
    for (int i = 1; i <= w.blocks; i++) {
        block *b = &w.b[i];
        slot[0].n = 0;
        if (b->there && !free_on(b, &at, 1)) fail("a block cannot be freed");
        uses_drop(&b->plain);
        uses_drop(&b->captured);
    }
}

/* 1: all was well. */
static int round_end(void)
{
    int well;
    running = 0;
    sim_hook(NULL, NULL);
    sim_fail_clear();
    if (failing) return 0;
    faults = 0;
    free_what_is_left();
    for (int i = 1; i < GROUPS; i++) moment_drop(w.group[i].last);
    check_pools();
    for (int k = PLAIN; k < STREAMS; k++)
        if (w.s[k].born) OK(cudaStreamDestroy(w.s[k].handle));
    OK(cudaDeviceSynchronize());
    for (int k = 0; k < POOLS; k++)
        if (galloc_pool_destroy(w.pool[k])) fail("a pool does not end");
    sim_run(-1);
    if (sim_findings(SIM_ANY) != w.broken) fail("a finding at the end");
    well = !failing && !test_failures;
    if (!well) return 0;
    if (galloc_shutdown()) fail("no shutdown");
    sim_run(-1);
    char text[256] = "";
    if (sim_leaks(text, sizeof text) || sim_malloc_live()) fail("a leak");
    if (text[0]) tell("    leaked: %s\n", text);
    if (sim_findings(SIM_ANY) != w.broken) fail("a finding at the end");
    sim_stop();
    return !failing && !test_failures;
}

static int play(uint64_t seed)
{
    seed_now = seed;
    me = 0;
    round_begin();
    drive();
    while (slot[1].busy) pass_to(1);
    running = 0;
    sim_hook(NULL, NULL);
    slot[0].n = slot[1].n = 0;
    if (!failing) {
        faults = 0;
        end_own_captures();
        closing = 1;
        pass_to(1);
        closing = 0;
    }
    return round_end();
}

static pthread_t second;

static void play_begin(void)
{
    cpu_set_t here;
    quitting = 0;
    for (int i = 0; i < 2; i++) EXPECT_EQ(sem_init(&slot[i].go, 0, 0), 0);
    CPU_ZERO(&here);
    CPU_SET(sched_getcpu(), &here);
    (void)sched_setaffinity(0, sizeof here, &here); /* the two never run at once */
    EXPECT_EQ(pthread_create(&second, NULL, second_thread, NULL), 0);
}

static void play_end(void)
{
    quitting = 1;
    (void)sem_post(&slot[1].go);
    EXPECT_EQ(pthread_join(second, NULL), 0);
}

/* ---- what failed is made small ----------------------------------------------------------------------------------- */

static struct shared {
    unsigned char left_out[STEPS];
    uint64_t seed;
    unsigned long long programs, steps, mallocs, captured, launches, points, refused;
} *shared;

/* Runs programs from a seed on in a process of their own. 1: all were well. */
static int well_in_a_child(uint64_t from, uint64_t n, int tells)
{
    int status = 0;
    pid_t child;
    fflush(stdout);
    child = fork();
    if (!child) {
        memcpy(left_out, shared->left_out, sizeof left_out);
        telling = tells;
        play_begin();
        for (uint64_t i = 0; i < n; i++) {
            shared->seed = from + i;
            alarm(20);
            if (!play(from + i)) {
                if (tells) print_findings();
                fflush(stdout);
                _exit(1);
            }
            shared->programs++;
            shared->steps += done_steps, shared->mallocs += done_mallocs, shared->captured += done_captured;
            shared->launches += done_launches, shared->points += done_points, shared->refused += done_refused;
            done_steps = done_mallocs = done_captured = done_launches = done_points = done_refused = 0;
        }
        _exit(0);
    }
    if (child < 0 || waitpid(child, &status, 0) != child) return 0;
    return WIFEXITED(status) && !WEXITSTATUS(status);
}

static void shrink(uint64_t seed)
{
    int before, now = STEPS, null = open("/dev/null", O_WRONLY), out = dup(1);
    fflush(stdout);
    (void)dup2(null, 1);
    memset(shared->left_out, 0, sizeof shared->left_out);
    do {
        before = now;
        for (int size = 64; size; size /= 2)
            for (int at = 0; at < STEPS; at += size) {
                unsigned char kept[STEPS];
                memcpy(kept, shared->left_out, sizeof kept);
                memset(shared->left_out + at, 1, (size_t)(at + size < STEPS ? size : STEPS - at));
                if (memcmp(kept, shared->left_out, sizeof kept) && well_in_a_child(seed, 1, 0))
                    memcpy(shared->left_out, kept, sizeof kept);
            }
        now = 0;
        for (int i = 0; i < STEPS; i++) now += !shared->left_out[i];
    } while (now < before);
    fflush(stdout);
    (void)dup2(out, 1);
    (void)well_in_a_child(seed, 1, 1);
    memset(shared->left_out, 0, sizeof shared->left_out);
}

static int number(const char *name, uint64_t *n)
{
    const char *text = getenv(name);
    if (text && *text) *n = strtoull(text, NULL, 10);
    return text && *text;
}

/* For so many seconds; each failure is made small and told, and what comes after it goes on. */
static int play_long(uint64_t seconds)
{
    uint64_t from = 1, most = 20, found = 0;
    time_t end = time(NULL) + (time_t)seconds;
    (void)number("FUZZ_FROM", &from);
    (void)number("FUZZ_MOST", &most);
    while (time(NULL) < end && found < most) {
        if (well_in_a_child(from, 200, 0)) {
            from += 200;
            continue;
        }
        from = shared->seed + 1;
        found++;
        printf("---- FUZZ_SEED=%llu fails\n", (unsigned long long)(from - 1));
        if (!getenv("FUZZ_NOSHRINK")) shrink(from - 1);
    }
    printf("%llu programs to seed %llu, %llu steps, %llu mallocs (%llu captured), %llu launches, %llu switches, %llu "
           "refused for a failing call, %llu failed\n",
           shared->programs, (unsigned long long)from, shared->steps, shared->mallocs, shared->captured,
           shared->launches, shared->points, shared->refused, (unsigned long long)found);
    return found != 0;
}

TEST(random_programs)
{
    uint64_t seed = 1, rounds = 2000;
    (void)number("GALLOC_ROUNDS", &rounds);
    play_begin();
    for (uint64_t i = 0; i < rounds; i++) {
        if (EXPECT(play(seed + i))) continue;
        printf("    FUZZ_SEED=%llu\n", (unsigned long long)(seed + i));
        print_findings();
        return;
    }
    play_end();
}

/* Programs of other seeds in which two threads record positions of one captured stream at once. */
TEST(programs_that_broke_an_invariant)
{
    static const uint64_t seeds[] = {2526, 8413, 36194};
    play_begin();
    for (size_t i = 0; i < sizeof seeds / sizeof *seeds; i++) {
        if (EXPECT(play(seeds[i]))) continue;
        print_findings();
        return;
    }
    play_end();
}

int main(int argc, char **argv)
{
    uint64_t n;
    setvbuf(stdout, NULL, _IOLBF, 0);
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) return 1;
    if (number("FUZZ_SECONDS", &n)) return play_long(n);
    if (!number("FUZZ_SEED", &n)) return test_main(argc, argv);
    if (!getenv("FUZZ_SHRINK")) return !well_in_a_child(n, 1, 1);
    shrink(n);
    return 1;
}
