/* enumerate.c - every short program, under every schedule of two host threads with few switches.

   A program is a sequence of operations on three streams in one pool:
     malloc      of two sizes, which together are more than the pool may hold; its memory is used (written by queued
                 work) on the stream at once, or never used, or handed on: the other stream waits by an event of the
                 program's, uses it, and is the one that frees it
     free        on the stream that used it last, which reads it just before; of unused memory on any stream
     record      galloc_record_stream for another stream, which waits and then reads the memory
     retire, destroy a stream; the next operation there creates one, whose handle is the dead one's
     trim        to half of what the pool may hold
     capture     in a scope of its own: one stream is captured, memory is allocated, used and freed in the capture, the
                 graph is launched on the others and destroyed. What a program has left is launched at its end, twice
   An operation costs what it queues or calls: malloc 1, use 1, wait 1, free 1, record 1, and so on; "8 operations" are
   those of all programs that cost up to 8. (The read before a free costs nothing.) Polling needs no operation: each
   malloc that finds nothing polls.

   All programs, but for these, which find nothing that the others do not:
   - Streams that nobody has used stand for each other, and so do the two threads, and names of blocks.
   - A program ends with a malloc whose memory is used. A race is found when queued work is not ordered after earlier
     work on the same bytes; all but the first use of a block come after its first.
   - Memory is used at the first moment and at the last, on the stream that it belongs to, and handed on at once. A
     wait of the program's that comes later, or one more, only adds to what is ordered, and galloc does not see it.
   - A thread is not stopped between an operation's queued work and its call of galloc, for the same reason.
   - Retiring a stream on which nothing was freed or recorded, destroying one that galloc was never given.
   No program has a race of its own or breaks what the manual asks for: see `independent` and the lists of options.

   Schedules: operations begin in the order of the program. One may begin while the other thread is inside another
   that it does not depend on. The threads change where an operation ends, at will, and inside a call of galloc before
   each lock, each atomic exchange, each CUDA call, and where a thread has seen that it owns a latch, at most
   `preemptions` times. A switch after a lock is let go or a call is made is one before the next lock or call, since in
   between a thread touches what is its own (the tests under TSan say so). Before calls that only look at what no
   operation changes there is none: it is a switch before the next call; `every` has them as well, to show that nothing
   is lost. Where a thread finds a lock taken, the other goes on. `threads` has every assignment of operations to
   threads, also where they do not overlap.

   The device: nothing that is queued runs by itself. galloc sees how far the device has come only by asking an event
   or by waiting, so a query of an unfinished event has two answers, and both are tried, `answers` times at most; when
   it says finished, just what the event stands for has run. Nothing else about the device's schedule matters: the
   ledger finds two accesses that are not ordered, whatever the order in which they happened to run (sim.h).

   Each run checks: no finding (race, stale byte, hole, dead handle, ...), no call refused but for want of memory, the
   heap's invariants, nothing leaked. After a failure what was wrong is told, and the run is made once more and told,
   whether it fails again or not. By itself it is quick; with ENUMERATE=full in the environment it goes as far as an
   hour allows (`make enumerate`), with SLICE in parts that several processors share; what that found stands in
   bench/results/sim-enumerate.txt. */

#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdio.h> /* before what it is compiled with changes */
#include <time.h>

/* galloc's locks, and this file's, go by way of the scheduler, and so do atomic operations that take something. */
static void point(const char *what);
static int scheduled_yield(void);
#define sched_yield() scheduled_yield()
static int scheduled_lock(pthread_mutex_t *mutex);
static int scheduled_trylock(pthread_mutex_t *mutex) __attribute__((unused));
#define pthread_mutex_lock(mutex) scheduled_lock(mutex)
#define pthread_mutex_trylock(mutex) scheduled_trylock(mutex)
#define __atomic_exchange_n(...) (point("an exchange"), __atomic_exchange_n(__VA_ARGS__))
#define __atomic_compare_exchange_n(...) (point("an exchange"), __atomic_compare_exchange_n(__VA_ARGS__))
#define GALLOC_CLOCK() 0 /* how long a call took must not decide what is an exchange */
#include "inside.c"
#undef pthread_mutex_lock
#undef pthread_mutex_trylock
#undef __atomic_exchange_n
#undef sched_yield
#undef __atomic_compare_exchange_n
#include "setup.h"

/* ---- what is enumerated ------------------------------------------------------------------------------------------ */

enum { STREAMS = 3, SLOTS = 2, BLOCKS = 12, SIZES = 3, CHOICES = 4096, OPTIONS = 96, TRACE = 8192, SPINS = 10000 };

enum { WITHOUT_UNUSED = 1, WITHOUT_HANDED = 2, WITHOUT_RECORD = 4, WITHOUT_DYING = 8, WITHOUT_TRIM = 16 };

enum start {
    ALL_FREE,   /* the heap is as large as it may be, and all of it free */
    ALL_EMPTY,  /* it has no memory */
    ALL_PENDING /* stream 0 has used and freed all of it, and is not done */
};

typedef struct scope {
    enum start start;
    int without; /* kinds of operations left out */
    int threads;
    int every;
    int known;           /* the pool has seen the streams before, in one order, which they are not told apart by */
    int default_streams; /* legacy, a blocking and a non-blocking stream, instead of three non-blocking ones */
    int fixed;           /* segments of cudaMalloc */
    int captures;        /* the last stream is used in captures, and for nothing else */
    size_t limit;        /* of the pool */
    size_t size[SIZES];
} scope;

typedef struct bounds {
    int operations, preemptions, answers;
} bounds;

enum kind { MALLOC, FREE, RECORD, RETIRE, DESTROY, TRIM, CAPTURE, READY, LAUNCH, GONE };
enum how { UNUSED_BLOCK, USED, HANDED };

/* MALLOC on a, used there, or handed to b; FREE of `block` on a; RECORD that a uses `block` */
typedef struct action {
    enum kind kind;
    int a, b, block, size;
    enum how how;
} action;

static const scope *now;
static bounds most;

/* ---- choices: depth first, by running again from the start ------------------------------------------------------- */

static struct choice {
    int taken, of;
} path[CHOICES];
static int path_length, path_at;

static int choose_among(int of)
{
    if (path_at == path_length) {
        if (path_length == CHOICES) {
            printf("more than %d choices\n", CHOICES);
            exit(1);
        }
        path[path_length++] = (struct choice){0, of};
    }
    if (path[path_at].of != of) {
        printf("choice %d was one of %d and is one of %d: no run can be repeated\n", path_at, path[path_at].of, of);
        exit(1);
    }
    return path[path_at++].taken;
}

static int choose(int of) { return of > 1 ? choose_among(of) : 0; }

/* SLICE=k/n in the environment leaves all to other processes but an n-th of the beginnings, each up to where the third
   operation begins: not every n-th, as what comes with every n-th choice may be what takes long. */
enum { SLICED = 3 };
static unsigned long slice, slices;
static uint64_t beginning;
static int taken_up, sliced; /* operations, and choices in a beginning */

static int is_ours(void) { return !slices || (beginning * 0x9E3779B97F4A7C15u >> 32) % slices == slice; }

static int next_path(void)
{
    if (!is_ours() && path_length > sliced) path_length = sliced;
    while (path_length && path[path_length - 1].taken + 1 == path[path_length - 1].of) path_length--;
    if (path_length) path[path_length - 1].taken++;
    beginning += path_length <= sliced;
    return path_length > 0;
}

/* ---- the world: what the program knows --------------------------------------------------------------------------- */

typedef struct known_stream {
    cudaStream_t handle; /* NULL: destroyed */
    int seen;            /* by galloc or the program: until then any of the unseen ones stands for all */
    int named;           /* to galloc, since it was made */
    int freed;           /* or recorded: something was, since it was made */
    int retired;         /* and not used since, nor by a call that was under way then */
} known_stream;

typedef struct known_block {
    void *ptr;
    size_t bytes;
    int there; /* allocated, and not yet being freed */
    int home;  /* the stream whose work so far covers all use but that of the takers; -1: never used */
    unsigned takers;
    int captured; /* used in the capture only */
} known_block;

typedef struct host {
    sem_t go;
    int busy, calling;
    action doing, assigned;
    int is_assigned;
} host;

static known_stream stream[STREAMS];
static known_block block[BLOCKS];
static host slot[SLOTS];
static galloc_pool *pool;
static int capturing, launchable; /* for the program: from the begin of what makes it so */
static cudaGraphExec_t exec;
static size_t kept; /* blocks of host memory that galloc had when the last run ended */
static int blocks, left, preempted, answered, unswitched, running, program_ended, refused;
static __thread int me;

typedef struct counts {
    unsigned long long programs, schedules, points, failed_mallocs;
} counts;

static counts count;

static int tracing;
static char trace_text[TRACE];
static size_t trace_length;

__attribute__((format(printf, 1, 2))) static void trace(const char *format, ...)
{
    va_list arguments;
    if (!tracing || trace_length >= TRACE - 1) return;
    va_start(arguments, format);
    trace_length += (size_t)vsnprintf(trace_text + trace_length, TRACE - trace_length, format, arguments);
    va_end(arguments);
}

static int cost_of(action a)
{
    if (a.kind == MALLOC) return a.how == USED ? 2 : a.how == HANDED ? 4 : 1;
    return a.kind == RECORD ? 3 : 1;
}

static size_t live_bytes(void)
{
    size_t bytes = 0;
    for (int i = 0; i < blocks; i++) bytes += block[i].there ? block[i].bytes : 0;
    for (int i = 0; i < SLOTS; i++)
        if (slot[i].busy && slot[i].doing.kind == MALLOC) bytes += now->size[slot[i].doing.size];
    return bytes;
}

/* ---- which operations may come next ------------------------------------------------------------------------------ */

static int is_for_captures(int s) { return now->captures && s == STREAMS - 1; }

static int is_given(action a, int s) { return a.kind != TRIM && a.a == s; }

static int touches(action a, int s)
{
    if (a.kind == TRIM) return 0;
    if (is_given(a, s) || (a.kind == MALLOC && a.how == HANDED && a.b == s)) return 1;
    if (a.kind == RECORD && block[a.block].home == s) return 1;
    return a.kind == FREE && (block[a.block].takers >> s & 1) && !stream[s].retired;
}

/* Retiring says that a stream's use of the blocks recorded for it is over. */
static int ends_use(action a, action b) { return a.kind == RETIRE && b.kind == RECORD && a.a == b.a; }

static int concerns_a_graph(action a) { return a.kind >= CAPTURE || (a.kind != TRIM && is_for_captures(a.a)); }

/* May the two be under way at once? What is done to one block comes one after the other, and nobody touches a stream
   that is being destroyed. */
static int independent(action a, action b)
{
    if (ends_use(a, b) || ends_use(b, a)) return 0;
    if (concerns_a_graph(a) && concerns_a_graph(b)) return 0;
    if ((a.kind == FREE || a.kind == RECORD) && (b.kind == FREE || b.kind == RECORD) && a.block == b.block) return 0;
    if (a.kind == DESTROY && touches(b, a.a)) return 0;
    return !(b.kind == DESTROY && touches(a, b.a));
}

typedef struct options {
    action list[OPTIONS];
    int n;
} options;

static void offer(options *o, action a)
{
    for (int i = 0; i < SLOTS; i++)
        if (slot[i].busy && !independent(a, slot[i].doing)) return;
    if (o->n == OPTIONS) {
        printf("more than %d operations to choose from\n", OPTIONS);
        exit(1);
    }
    o->list[o->n++] = a;
}

/* Streams that nobody has seen are alike: the first stands for all. */
static int is_spare(int s, int other)
{
    if (now->default_streams || stream[s].seen || is_for_captures(s)) return 0;
    for (int i = 0; i < s; i++)
        if (!stream[i].seen && i != other) return 1;
    return 0;
}

/* A program ends with a malloc whose memory is used, as only that can find a race. What else costs more than leaves
   room for such an end is left out. */
static int leaves_an_end(int cost, size_t live)
{
    int end = live + now->size[0] <= now->limit ? 2 : 3;
    return left - cost >= end;
}

static void offer_mallocs(options *o, size_t live)
{
    for (int k = 0; k < SIZES && now->size[k]; k++) {
        size_t after = live + now->size[k];
        if (after > now->limit || blocks == BLOCKS) continue;
        for (int s = 0; s < STREAMS; s++) {
            action a = {MALLOC, s, 0, blocks, k, USED};
            if (is_spare(s, -1) || (is_for_captures(s) && !capturing)) continue;
            if (left >= 2) offer(o, a);
            if (is_for_captures(s)) continue;
            a.how = UNUSED_BLOCK;
            if (!(now->without & WITHOUT_UNUSED) && leaves_an_end(1, after)) offer(o, a);
            a.how = HANDED;
            if (now->without & WITHOUT_HANDED) continue;
            for (a.b = 0; a.b < STREAMS; a.b++)
                if (a.b != s && !is_spare(a.b, s) && leaves_an_end(4, after)) offer(o, a);
        }
    }
}

static void offer_for_block(options *o, int i, size_t live)
{
    for (int s = 0; s < STREAMS; s++) {
        action a = {FREE, s, 0, i, 0, USED};
        if (is_spare(s, -1) || is_for_captures(s) != block[i].captured) continue;
        if ((block[i].home < 0 || block[i].home == s) && leaves_an_end(1, live - block[i].bytes)) offer(o, a);
        a.kind = RECORD;
        if (now->without & WITHOUT_RECORD) continue;
        if (block[i].home < 0 || block[i].home == s || (block[i].takers >> s & 1)) continue;
        if (leaves_an_end(3, live)) offer(o, a);
    }
}

/* Destroying a stream that galloc does not know changes nothing, nor does retiring one that has nothing to mark. */
static void offer_for_stream(options *o, int s, size_t live)
{
    action a = {RETIRE, s, 0, 0, 0, USED};
    int needed = 0;
    if ((now->without & WITHOUT_DYING) || !stream[s].named || !leaves_an_end(1, live)) return;
    if (stream[s].freed && !stream[s].retired) offer(o, a);
    for (int i = 0; i < blocks; i++)
        if (block[i].there) needed |= block[i].home == s || ((block[i].takers >> s & 1) && !stream[s].retired);
    for (int i = 0; i < SLOTS; i++) needed |= slot[i].busy && touches(slot[i].doing, s);
    a.kind = DESTROY;
    if (!needed && stream[s].handle) offer(o, a);
}

/* The graph of a capture that has ended can be launched, once and again, until it is destroyed. All that was allocated
   in the capture is freed there. */
static void offer_captures(options *o, size_t live)
{
    action a = {CAPTURE, STREAMS - 1, 0, 0, 0, USED};
    int there = 0;
    if (!now->captures || !leaves_an_end(1, live)) return;
    for (int i = 0; i < blocks; i++) there |= block[i].there && block[i].captured;
    if (!capturing && !launchable) offer(o, a);
    a.kind = READY;
    if (capturing && !there) offer(o, a);
    a.kind = GONE;
    if (launchable) offer(o, a);
    a.kind = LAUNCH;
    for (a.a = 0; launchable && a.a < STREAMS - 1; a.a++)
        if (!is_spare(a.a, -1)) offer(o, a);
}

static void list_options(options *o)
{
    size_t live = live_bytes();
    action trim = {TRIM, 0, 0, 0, 0, USED};
    o->n = 0;
    offer_mallocs(o, live);
    for (int i = 0; i < blocks; i++)
        if (block[i].there) offer_for_block(o, i, live);
    for (int s = 0; s < STREAMS; s++) offer_for_stream(o, s, live);
    offer_captures(o, live);
    if (!(now->without & WITHOUT_TRIM) && blocks && live < now->limit && leaves_an_end(1, live)) offer(o, trim);
}

/* ---- switching --------------------------------------------------------------------------------------------------- */

/* Most of a run is one made before, in which nothing of what could be chosen here was. */
static int goes_on_as_before(void)
{
    if (path_at == path_length || path[path_at].taken) return 0;
    path_at++;
    return 1;
}

static void pass_to(int other)
{
    int self = me;
    unswitched = 0;
    (void)sem_post(&slot[other].go);
    while (sem_wait(&slot[self].go)) continue;
}

/* A place where the other thread may come in between. A thread that passes very many of them is waiting for the other
   in a way that is not seen here, and lets it go on. */
static void point(const char *what)
{
    options o;
    int other = 1 - me, k;
    if (!running || !slot[me].calling) return;
    count.points++;
    if (++unswitched > SPINS && slot[other].busy) pass_to(other);
    if (preempted == most.preemptions || goes_on_as_before()) return;
    o.n = 1;
    if (!slot[other].busy) list_options(&o);
    k = choose_among(1 + o.n);
    if (!k) return;
    preempted++;
    trace("  thread %d stops before %s\n", me, what);
    slot[other].is_assigned = !slot[other].busy;
    if (slot[other].is_assigned) slot[other].assigned = o.list[k - 1];
    pass_to(other);
}

/* A latch that the other thread holds. */
static int scheduled_yield(void)
{
    if (running && slot[me].calling && slot[1 - me].busy) pass_to(1 - me);
    return 0;
}

static int scheduled_trylock(pthread_mutex_t *mutex)
{
    point("a lock");
    return pthread_mutex_trylock(mutex);
}

/* Not one of what all runs share, which is held for a few steps of its own: the first run would have more of them. */
static int scheduled_lock(pthread_mutex_t *mutex)
{
    int tries = 0;
    if (!running || mutex == inside_map_lock()) return pthread_mutex_lock(mutex);
    point("a lock");
    while (pthread_mutex_trylock(mutex)) {
        if (!slot[1 - me].busy || tries++ > 1000) {
            printf("thread %d waits for a lock that nobody is going to open\n", me);
            fflush(stdout);
            abort();
        }
        pass_to(1 - me);
    }
    return 0;
}

/* Calls that only look at what no other operation of a program changes: to switch before one of them is to switch
   before what follows it. */
static int names_a_look(const char *function)
{
    static const char *const looks[] = {"cuCtxGetCurrent",     "cuCtxPushCurrent",
                                        "cuCtxPopCurrent",     "cuCtxGetId",
                                        "cuCtxGetDevice",      "cuStreamGetCtx",
                                        "cuStreamGetId",       "cuStreamGetFlags",
                                        "cuStreamIsCapturing", "cuThreadExchangeStreamCaptureMode",
                                        "cuEventCreate",       "cudaPeekAtLastError",
                                        "cudaGetLastError",    "cudaGetErrorString",
                                        "cudaGetDevice"};
    for (size_t i = 0; i < sizeof looks / sizeof *looks; i++)
        if (!strcmp(function, looks[i])) return 1;
    return 0;
}

/* A function's name comes from the same place each time. */
static int is_a_look(const char *function)
{
    enum { PLACES = 1024 };
    static struct {
        const char *name;
        int answer;
    } known[PLACES];
    size_t at = (uintptr_t)function % PLACES;
    if (known[at].name != function) {
        known[at].name = function;
        known[at].answer = names_a_look(function);
    }
    return known[at].answer;
}

static void before_call(const char *function)
{
    if (running && (now->every || !is_a_look(function))) point(function);
}

static int at_query(void)
{
    if (!running || answered == most.answers || !choose(2)) return 0;
    answered++;
    trace("  an event is found finished\n");
    return 1;
}

/* ---- doing it ---------------------------------------------------------------------------------------------------- */

static cudaError_t called(cudaError_t error)
{
    slot[me].calling = 0;
    return error;
}

#define CALL(call) (slot[me].calling = 1, called(call))

static void expect_call(cudaError_t error, const char *what)
{
    if (error == cudaSuccess) return;
    refused = 1;
    trace("  %s: %s\n", what, galloc_last_message());
}

static cudaStream_t stream_at(int s)
{
    static const unsigned kinds[] = {cudaStreamNonBlocking, cudaStreamDefault, cudaStreamNonBlocking};
    if (now->default_streams && !s) return cudaStreamLegacy;
    if (!stream[s].handle)
        OK(cudaStreamCreateWithFlags(&stream[s].handle, now->default_streams ? kinds[s] : cudaStreamNonBlocking));
    return stream[s].handle;
}

static void do_malloc(action a, cudaStream_t at)
{
    known_block *b = &block[a.block];
    uint64_t tag = (uint64_t)a.block + 1;
    void *ptr = NULL;
    cudaError_t error = CALL(galloc_pool_malloc(pool, &ptr, b->bytes, at));
    if (error == cudaErrorMemoryAllocation && strstr(galloc_last_message(), ": out of memory")) {
        count.failed_mallocs++;
        trace("  no memory: %s\n", galloc_last_message());
        return;
    }
    expect_call(error, "malloc");
    if (error) return;
    b->ptr = ptr;
    b->there = 1;
    b->home = a.how == UNUSED_BLOCK ? -1 : a.how == HANDED ? a.b : a.a;
    if (a.how != UNUSED_BLOCK) put(at, ptr, b->bytes, tag);
    if (a.how != HANDED) return;
    order(at, stream_at(a.b));
    look(stream_at(a.b), ptr, b->bytes, tag);
}

static void do_record(action a, cudaStream_t at)
{
    known_block *b = &block[a.block];
    expect_call(CALL(galloc_record_stream(b->ptr, at)), "record_stream");
    order(stream_at(b->home), at);
    look(at, b->ptr, b->bytes, (uint64_t)a.block + 1);
}

static void do_destroy(action a)
{
    stream_end(stream[a.a].handle);
    stream[a.a].handle = NULL;
}

static void end_capture(cudaStream_t at)
{
    cudaGraph_t graph = NULL;
    OK(cudaStreamEndCapture(at, &graph));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    OK(cudaGraphDestroy(graph));
}

static void end_graph(void)
{
    OK(cudaGraphExecDestroy(exec));
    exec = NULL;
}

static void perform(action a)
{
    known_block *b = &block[a.block];
    cudaStream_t at = a.kind == TRIM || a.kind == DESTROY ? NULL : stream_at(a.a);
    switch (a.kind) {
    case MALLOC: do_malloc(a, at); break;
    case FREE:
        if (b->home >= 0) look(at, b->ptr, b->bytes, (uint64_t)a.block + 1);
        expect_call(CALL(galloc_free(b->ptr, at)), "free");
        break;
    case RECORD: do_record(a, at); break;
    case RETIRE: expect_call(CALL(galloc_stream_retire(at)), "retire"); break;
    case DESTROY: do_destroy(a); break;
    case TRIM: expect_call(CALL(galloc_pool_trim(pool, now->limit / 2, NULL)), "trim"); break;
    case CAPTURE: OK(cudaStreamBeginCapture(at, cudaStreamCaptureModeRelaxed)); break;
    case READY: end_capture(at); break;
    case LAUNCH: OK(cudaGraphLaunch(exec, at)); break;
    case GONE: end_graph(); break;
    }
}

static void trace_action(action a)
{
    static const char *const hows[] = {"", ", use it", ", use it, wait and use it on"};
    int n = a.block;
    if (a.kind == MALLOC) {
        trace("thread %d: block %d = malloc %zu KiB on stream %d%s", me, n, now->size[a.size] >> 10, a.a, hows[a.how]);
        if (a.how == HANDED) trace(" stream %d", a.b);
        trace("\n");
    }
    if (a.kind == FREE) trace("thread %d: free block %d on stream %d\n", me, n, a.a);
    if (a.kind == RECORD) trace("thread %d: record that stream %d uses block %d, wait and use it\n", me, a.a, n);
    if (a.kind == RETIRE) trace("thread %d: retire stream %d\n", me, a.a);
    if (a.kind == DESTROY) trace("thread %d: destroy stream %d\n", me, a.a);
    if (a.kind == TRIM) trace("thread %d: trim\n", me);
    if (a.kind == CAPTURE) trace("thread %d: begin a capture of stream %d\n", me, a.a);
    if (a.kind == READY) trace("thread %d: end the capture, make the graph ready\n", me);
    if (a.kind == LAUNCH) trace("thread %d: launch the graph on stream %d\n", me, a.a);
    if (a.kind == GONE) trace("thread %d: destroy the graph\n", me);
}

/* The program counts an operation as done when it begins it; what must not come before its end is held up by
   `independent`. */
static void note(action a)
{
    known_stream *s = &stream[a.a];
    left -= cost_of(a);
    if (a.kind == TRIM) return;
    s->seen = 1;
    if (a.kind >= CAPTURE) {
        capturing = a.kind == CAPTURE;
        launchable = a.kind == READY || a.kind == LAUNCH;
        return;
    }
    if (a.kind == RETIRE) {
        s->retired = !slot[1 - me].busy || !is_given(slot[1 - me].doing, a.a);
    } else if (a.kind == DESTROY) {
        s->named = s->freed = s->retired = 0;
    } else {
        s->retired = 0;
        s->named = 1;
        s->freed |= a.kind != MALLOC;
    }
    if (a.kind == MALLOC) {
        block[blocks] = (known_block){NULL, now->size[a.size], 0, -1, 0, is_for_captures(a.a)};
        blocks++;
        if (a.how == HANDED) stream[a.b].seen = 1;
    }
    if (a.kind == FREE) block[a.block].there = 0;
    if (a.kind == RECORD) block[a.block].takers |= 1u << a.a;
}

static void take_up(action a)
{
    if (++taken_up == SLICED) sliced = path_at;
    note(a);
    trace_action(a);
    slot[me].doing = a;
    slot[me].busy = 1;
    perform(a);
    slot[me].busy = 0;
}

/* What a thread does whose operation is over and whose turn it is: the next operation, or let the other go on. */
static void drive(void)
{
    int self = me, other = 1 - self;
    while (!program_ended) {
        options o;
        int k;
        if (slot[self].is_assigned) {
            slot[self].is_assigned = 0;
            take_up(slot[self].assigned);
            continue;
        }
        list_options(&o);
        if (slot[other].busy) {
            k = choose(1 + o.n);
            if (k) take_up(o.list[k - 1]);
            else pass_to(other);
            continue;
        }
        if (!o.n) break;
        k = choose(now->threads && blocks ? 2 * o.n : o.n);
        if (k < o.n) {
            take_up(o.list[k]);
            continue;
        }
        slot[other].assigned = o.list[k - o.n];
        slot[other].is_assigned = 1;
        pass_to(other);
    }
    program_ended = 1;
}

static void *second_thread(void *arg)
{
    me = 1;
    for (;;) {
        while (sem_wait(&slot[1].go)) continue;
        if (!now) return arg;
        drive();
        if (!now) return arg;
        (void)sem_post(&slot[0].go);
    }
}

/* ---- one run ----------------------------------------------------------------------------------------------------- */

static void prepare_heap(void)
{
    void *ptr;
    if (now->known) {
        for (int i = 0; i < STREAMS; i++) OK(galloc_free(get(pool, 512, stream_at(i)), stream_at(i)));
        OK(galloc_pool_trim(pool, 0, NULL));
    }
    if (now->start != ALL_EMPTY) OK(galloc_pool_reserve(pool, now->limit));
    if (now->start != ALL_PENDING) return;
    ptr = get(pool, now->limit, stream_at(0));
    put(stream_at(0), ptr, now->limit, BLOCKS + 1);
    OK(galloc_free(ptr, stream_at(0)));
    stream[0].seen = stream[0].named = stream[0].freed = 1;
}

static void run_begin(void)
{
    sim_options o = sim_defaults();
    galloc_config config;
    o.pace = SIM_PACE_STILL;
    o.panic = 0;
    o.memory = 8 * now->limit;
    inside_chunk_bytes = 4096; /* of descriptors, which are made for each run, and of which it needs few */
    begin_with(o);
    memset(stream, 0, sizeof stream);
    for (int i = 0; i < STREAMS; i++) (void)stream_at(i);
    config = config_limit(now->limit);
    config.expandable_segments = !now->fixed;
    pool = pool_new(&config);
    prepare_heap();
    for (int i = 0; i < SLOTS; i++) slot[i].busy = slot[i].calling = slot[i].is_assigned = 0;
    blocks = preempted = answered = unswitched = program_ended = refused = 0;
    capturing = launchable = 0;
    left = most.operations;
    path_at = taken_up = 0;
    sliced = CHOICES;
    trace_length = 0;
    sim_hook(before_call, at_query);
    running = 1;
}

/* Galloc is not shut down after each run: nine tenths of that would be looking for the driver's functions and making
   the maps of addresses anew. The maps' nodes stay, which looks like a leak of the run that made them: where nothing
   but host memory is left the run is made once more, and if some is left again, from the beginning and with a shutdown.
   Anything else is a failure, whether it comes again or not. */
enum verdict { WELL, KEPT_MEMORY, WRONG };

static int is_shut_down(int thoroughly)
{
    if (!thoroughly) return 1;
    if (!galloc_shutdown()) return 1;
    abandon_pools();
    return 0;
}

/* The graph runs on either stream, after all that the program did. */
static void launch_what_is_left(void)
{
    if (capturing) end_capture(stream_at(STREAMS - 1));
    for (int s = 0; exec && s < STREAMS - 1; s++) OK(cudaGraphLaunch(exec, stream_at(s)));
    if (exec) end_graph();
}

/* What is left is given back, and all must be well. */
static enum verdict run_end(int thoroughly)
{
    int broken, well;
    char text[512] = "";
    running = 0;
    sim_hook(NULL, NULL);
    for (int i = 0; i < blocks; i++) {
        if (!block[i].there) continue;
        if (block[i].home >= 0) look(stream_at(block[i].home), block[i].ptr, block[i].bytes, (uint64_t)i + 1);
        if (galloc_free(block[i].ptr, stream[block[i].home < 0 ? 0 : block[i].home].handle)) refused = 1;
    }
    launch_what_is_left();
    broken = galloc_pool_check(pool);
    well = !galloc_pool_destroy(pool);
    if (!is_shut_down(thoroughly)) well = 0;
    sim_run(-1);
    well = well && !refused && !broken && !sim_leaks(text, sizeof text) && !sim_findings(SIM_ANY);
    kept = sim_malloc_live();
    if (!well) {
        printf("    found wrong: %d calls refused, %d invariants broken, leaked: %s\n", refused, broken,
               text[0] ? text : "nothing");
        print_findings();
    }
    sim_stop();
    return !well ? WRONG : kept ? KEPT_MEMORY : WELL;
}

static enum verdict run(int thoroughly)
{
    run_begin();
    me = 0;
    drive();
    return run_end(thoroughly);
}

static int run_once(void)
{
    enum verdict said = run(0);
    count.schedules++;
    if (said == KEPT_MEMORY) said = run(0);
    if (said == KEPT_MEMORY) {
        abandon_pools();
        said = run(1);
        if (said == KEPT_MEMORY) printf("    %zu blocks of host memory stay after galloc_shutdown\n", kept);
    }
    count.programs += !preempted && !answered;
    return said == WELL;
}

static void say_what_failed(void)
{
    enum verdict said;
    abandon_pools();
    tracing = 1;
    said = run(1);
    tracing = 0;
    if (said == WELL) printf("    made once more, from the beginning, all was well: it depends on what ran before\n");
    printf("%s", trace_text);
}

/* The threads of this program never run at once: on one processor one wakes the other in a tenth of the time. Where we
   wake up from a short sleep is where there is time for us. */
static void stay_on_one_processor(const cpu_set_t *all)
{
    struct timespec moment = {0, 2000000};
    cpu_set_t here;
    int at;
    (void)sched_setaffinity(0, sizeof *all, all);
    (void)nanosleep(&moment, NULL);
    at = sched_getcpu();
    if (at < 0) return;
    CPU_ZERO(&here);
    CPU_SET(at, &here);
    (void)sched_setaffinity(0, sizeof here, &here);
}

/* All programs and schedules within the bounds; 0 when one of them failed, which ends it. */
static int explore(bounds within)
{
    clock_t begun = clock();
    int well;
    memset(&count, 0, sizeof count);
    path_length = 0;
    beginning = 0;
    most = within;
    do {
        counts before = count;
        well = run_once();
        if (!is_ours()) count = before;
    } while (well && next_path());
    if (!well) say_what_failed();
    printf("    %2d operations, %d preemptions, %d answers: %llu programs, %llu schedules, %llu points, %llu mallocs "
           "had no memory, %.0f s of a processor\n",
           most.operations, most.preemptions, most.answers, count.programs, count.schedules, count.points,
           count.failed_mallocs, (double)(clock() - begun) / CLOCKS_PER_SEC);
    (void)fflush(stdout);
    return well;
}

static void enumerate(const char *what, scope where, const bounds *quick, const bounds *full)
{
    const char *text = getenv("ENUMERATE"), *part = getenv("SLICE");
    const bounds *list = text && !strcmp(text, "full") ? full : quick;
    pthread_t second;
    cpu_set_t all;
    if (part && (sscanf(part, "%lu/%lu", &slice, &slices) != 2 || slice >= slices)) {
        printf("SLICE=%s: say which of how many, from 0/4 to 3/4, say\n", part);
        exit(2);
    }
    printf("%s\n", what);
    now = &where;
    if (!sched_getaffinity(0, sizeof all, &all)) stay_on_one_processor(&all);
    for (int i = 0; i < SLOTS; i++) EXPECT_EQ(sem_init(&slot[i].go, 0, 0), 0);
    EXPECT_EQ(pthread_create(&second, NULL, second_thread, NULL), 0);
    while (list->operations && EXPECT(explore(*list))) list++;
    now = NULL;
    program_ended = 1;
    (void)sem_post(&slot[1].go);
    EXPECT_EQ(pthread_join(second, NULL), 0);
    (void)sched_setaffinity(0, sizeof all, &all);
    OK(galloc_shutdown());
}

#define BOUNDS(...) ((const bounds[]){__VA_ARGS__, {0, 0, 0}})

/* ---- what is run ------------------------------------------------------------------------------------------------- */

#define PAGES .limit = MIB(4), .size = {MIB(2), MIB(4)} /* every free is marked; halves move and merge */
#define PARTS .limit = MIB(2), .size = {MIB(1), MIB(2)} /* a free leaves an unmarked rest; blocks split and merge */

enum { ALL = 99, MALLOC_AND_FREE = WITHOUT_HANDED | WITHOUT_RECORD | WITHOUT_DYING | WITHOUT_TRIM };

TEST(whole_pages)
{
    enumerate("whole pages", (scope){PAGES}, BOUNDS({8, 0, 0}, {7, 0, ALL}, {6, 1, 0}, {4, 2, 0}, {5, 1, ALL}),
              BOUNDS({8, 1, 0}, {9, 0, 0}, {8, 0, ALL}, {7, 1, ALL}, {7, 2, 0}, {5, 3, 0}));
}

TEST(parts_of_a_page)
{
    enumerate("parts of a page", (scope){PARTS}, BOUNDS({6, 0, ALL}, {6, 1, 0}),
              BOUNDS({8, 1, 0}, {8, 0, ALL}, {7, 1, ALL}, {6, 2, 0}));
}

TEST(pending_memory_handed_on)
{
    enumerate("pending memory handed on", (scope){PAGES, .start = ALL_PENDING, .known = 1, .without = MALLOC_AND_FREE},
              BOUNDS({6, 0, ALL}, {5, 1, 0}), BOUNDS({8, 0, ALL}, {8, 1, 0}, {6, 2, 0}));
}

TEST(streams_that_die)
{
    enumerate(
        "streams that die",
        (scope){
            .limit = MIB(4), .size = {MIB(2)}, .known = 1, .without = WITHOUT_HANDED | WITHOUT_UNUSED | WITHOUT_TRIM},
        BOUNDS({11, 0, ALL}, {10, 1, 0}), BOUNDS({13, 0, ALL}, {12, 1, 0}, {10, 2, 0}));
}

TEST(three_sizes)
{
    enumerate("three sizes", (scope){.limit = MIB(4), .size = {MIB(1), MIB(2), MIB(4)}}, BOUNDS({6, 0, ALL}),
              BOUNDS({8, 0, 0}, {7, 0, ALL}, {7, 1, 0}, {5, 2, 0}, {8, 1, 0}));
}

TEST(fixed_segments)
{
    enumerate("fixed segments", (scope){.fixed = 1, .limit = MIB(20), .size = {MIB(8), MIB(16)}},
              BOUNDS({6, 0, ALL}, {5, 1, 0}), BOUNDS({8, 0, 0}, {8, 1, 0}, {6, 2, 0}));
}

TEST(default_and_blocking_streams)
{
    enumerate("default and blocking streams", (scope){PAGES, .default_streams = 1}, BOUNDS({6, 0, ALL}, {5, 1, 0}),
              BOUNDS({8, 0, 0}, {7, 0, ALL}, {7, 1, 0}, {5, 2, 0}, {8, 1, 0}));
}

TEST(a_heap_that_grows)
{
    enumerate("a heap that grows", (scope){PAGES, .start = ALL_EMPTY}, BOUNDS({6, 0, ALL}, {5, 1, 0}),
              BOUNDS({8, 1, 0}, {8, 0, ALL}, {6, 2, 0}));
}

TEST(either_thread)
{
    enumerate("either thread", (scope){PAGES, .threads = 1}, BOUNDS({6, 0, 0}, {4, 2, 0}),
              BOUNDS({8, 0, 0}, {7, 1, 0}, {5, 2, 0}));
}

TEST(switches_before_every_call)
{
    enumerate("switches before every call", (scope){PAGES, .every = 1}, BOUNDS({5, 1, 0}, {4, 2, 0}),
              BOUNDS({7, 1, 0}, {5, 2, 0}));
}

TEST(captures)
{
    enumerate("captures",
              (scope){PAGES, .captures = 1, .known = 1, .without = WITHOUT_HANDED | WITHOUT_RECORD | WITHOUT_DYING},
              BOUNDS({7, 0, ALL}, {6, 1, 0}), BOUNDS({9, 0, ALL}, {8, 1, 0}, {6, 2, 0}));
}

TEST(captures_beside_pending_work)
{
    enumerate("captures beside pending work",
              (scope){PARTS, .captures = 1, .known = 1, .start = ALL_PENDING,
                      .without = WITHOUT_HANDED | WITHOUT_RECORD | WITHOUT_DYING | WITHOUT_UNUSED},
              BOUNDS({8, 0, ALL}, {6, 1, 0}), BOUNDS({9, 0, ALL}, {9, 1, 0}, {7, 2, 0}));
}

TEST_MAIN()
