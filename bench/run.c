#define _POSIX_C_SOURCE 200809L
#include "run.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "calls.h"
#include "crew.h"
#include "device.h"

#define PAGE ((size_t)2 << 20) /* what limits are tried in */
#define TIMELINE_ROWS 120      /* of a pass, at most */
#define STREAMS_OPEN 1024      /* at once; beyond, streams that the trace names no more are closed */

/* The calls that an allocator makes to get something done, beside those that only look at a stream. */
#define COUNTED_CALLS(X) GALLOC_DRIVER_CALLS(X) X(runtime_malloc, "cudaMalloc") X(runtime_free, "cudaFree")

typedef struct block {
    void *ptr;       /* NULL: none, or its allocation failed */
    uint64_t bytes;
    uint64_t tag;    /* of what was written into it */
    uint32_t stream; /* that it was allocated, or resized, for */
    uint32_t recorded; /* trace.more[recorded] names the streams that were recorded for it so far */
} block;

/* One replay: a device, a pool, some passes. */
typedef struct run {
    const trace *t;
    const run_options *o;
    size_t limit;
    bool stop_at_oom;
    cudaStream_t *stream;   /* NULL: not open */
    size_t *last_call;      /* of each stream, in a pass; NULL: all streams are open all the time */
    uint32_t open, close_at; /* streams that are open; how many there are when some are closed */
    block *block;
    uint64_t tags;          /* given out */
    size_t mallocs, frees;  /* that succeeded */
    size_t unfinished;      /* frees while queued work used the block */
    size_t oom;
    int64_t moves_seen, moves_busy, handovers, handovers_busy; /* -1: the device cannot tell */
    size_t peak;            /* held, where a limit is kept by taking allocations back; else 0 */
    double opened_ns;       /* when the pool was */
    crew *crew;             /* with o->threads */
    const trace_op *op;     /* under way, in one of these threads */
    double spent;           /* host time of the calls of this pass, where they are timed one by one */
    double held;            /* added up over so many looks */
    size_t looks;
    size_t live;            /* bytes now */
    size_t call;            /* of the timeline, and the most since its last row */
    size_t live_most, held_most;
} run;

static const char *progress_of = "";

void run_progress_of(const char *what)
{
    progress_of = what;
}

void run_progress(const char *format, ...)
{
    static int terminal = -1;
    va_list args;
    if (terminal < 0) terminal = isatty(STDERR_FILENO);
    if (!terminal) return;
    fputs("\r\033[K", stderr);
    if (!format) return;
    fputs(progress_of, stderr);
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fflush(stderr);
}

static double now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static uint64_t counted_calls(void)
{
    uint64_t n = 0;
#define ADD(name, function) n += account_calls(function);
    COUNTED_CALLS(ADD)
#undef ADD
    return n;
}

/* The model's unit is a nanosecond. */
static double us_since(double now, double before)
{
    return round((now - before) * 1000) / 1000 + 0.0; /* no negative zero */
}

static int failed(const run *r, const char *what, cudaError_t error)
{
    const char *message = r->o->allocator->message();
    run_progress(NULL);
    fprintf(stderr, "%s: %s failed with %d (%s)%s%s\n", r->t->name, what, (int)error, cudaGetErrorName(error),
            *message ? ": " : "", message);
    return RUN_FAILED;
}

/* ---- calls ------------------------------------------------------------------------------------------------------- */

static bool works(const run *r)
{
    return r->o->busy || r->o->verify;
}

/* Only the allocator's own calls are timed, since others stand between them. */
static bool timed_apart(const run *r)
{
    return works(r) || r->o->timeline || r->crew || r->last_call;
}

/* What galloc's log says of a call beyond the columns of all logs, if anything. */
static const trace_more *more_of(const run *r, const trace_op *op)
{
    return op->more ? &r->t->more[op->more] : NULL;
}

static cudaError_t alloc_as(const run *r, void **ptr, const trace_op *op)
{
    const trace_more *more = more_of(r, op);
    cudaStream_t stream = r->stream[op->stream];
    size_t room = !more || r->o->no_room ? 0 : more->room;
    if (!more || !r->o->allocator->request) return r->o->allocator->alloc(ptr, op->bytes, stream);
    return r->o->allocator->request(ptr, (galloc_request){
        .bytes = op->bytes, .max_bytes = room, .alignment = more->align, .tag = more->tag, .stream = stream,
        .lifetime = more->lasting ? GALLOC_LIFETIME_LONG : GALLOC_LIFETIME_ANY});
}

/* An allocator that keeps nothing knows no limit; what a call makes the driver hold is known only after it. */
static cudaError_t alloc_within(run *r, void **ptr, const trace_op *op, cudaStream_t stream)
{
    cudaError_t error = alloc_as(r, ptr, op);
    if (error || r->o->allocator->caching || r->limit == SIZE_MAX) return error;
    if (account_held() > r->limit) {
        error = r->o->allocator->free(*ptr, stream);
        *ptr = NULL;
        return error ? error : cudaErrorMemoryAllocation;
    }
    if (account_held() > r->peak) r->peak = account_held();
    return cudaSuccess;
}

/* What was done to get the block, as the device saw it. */
static void note_past(run *r, const block *b)
{
    device_past past;
    if (r->moves_seen < 0) return;
    if (!device_past_of(r->stream[b->stream], b->ptr, b->bytes, &past)) {
        r->moves_seen = r->moves_busy = r->handovers = r->handovers_busy = -1;
        return;
    }
    r->moves_seen += past.moved;
    r->moves_busy += past.moved_busy;
    r->handovers += past.handed_over;
    r->handovers_busy += past.handed_over_busy;
}

static int replay_alloc(run *r, const trace_op *op, double *spent)
{
    block *b = &r->block[op->slot];
    cudaStream_t stream = r->stream[op->stream];
    double start = timed_apart(r) ? now_ns() : 0;
    cudaError_t error = alloc_within(r, &b->ptr, op, stream);
    if (timed_apart(r)) *spent += now_ns() - start;
    b->bytes = op->bytes;
    b->stream = op->stream;
    b->recorded = 0;
    if (error == cudaErrorMemoryAllocation) {
        r->oom++;
        return RUN_OK;
    }
    if (error) return failed(r, "an allocation", error);
    r->mallocs++;
    r->live += b->bytes;
    b->tag = ++r->tags;
    if (works(r)) note_past(r, b);
    if (r->o->verify) error = device_write(stream, b->ptr, b->bytes, b->tag);
    else if (r->o->busy) error = device_use(stream, b->ptr, b->bytes);
    return error ? failed(r, "a launch", error) : RUN_OK;
}

/* The last work on a block. A program that frees on another stream has ordered the two. */
static cudaError_t last_use(const run *r, const block *b, uint32_t freeing)
{
    cudaStream_t stream = r->stream[freeing];
    cudaError_t error = freeing == b->stream ? cudaSuccess : device_order(r->stream[b->stream], stream);
    if (error) return error;
    return r->o->verify ? device_check(stream, b->ptr, b->bytes, b->tag) : device_use(stream, b->ptr, b->bytes);
}

/* Does a row say that the stream was recorded? */
static bool names_recorded(const run *r, const trace_more *more, uint32_t stream)
{
    uint32_t i = 0;
    while (i < more->recorded && r->t->named[more->named + more->after + i] != stream) i++;
    return i < more->recorded;
}

/* Records the streams that a row of galloc's log names and the row before about this block did not. */
static cudaError_t record_named(const run *r, block *b, const trace_op *op)
{
    const allocator *a = r->o->allocator;
    const trace_more *more = more_of(r, op);
    cudaError_t error = cudaSuccess;
    if (!more || !more->recorded || !a->free_after) return cudaSuccess;
    for (uint32_t i = more->recorded; i > 0 && !error; i--) {
        uint32_t stream = r->t->named[more->named + more->after + i - 1];
        if (!names_recorded(r, &r->t->more[b->recorded], stream)) error = a->record(b->ptr, r->stream[stream]);
    }
    b->recorded = op->more;
    return error;
}

/* Frees after the streams that galloc's log names, in the order of the call: the last one is that of the row. */
static cudaError_t free_as(const run *r, block *b, const trace_op *op, cudaStream_t stream)
{
    const trace_more *more = op ? more_of(r, op) : NULL;
    const allocator *a = r->o->allocator;
    const uint32_t *named = more ? &r->t->named[more->named] : NULL;
    cudaStream_t streams[TRACE_NAMED_IN_A_ROW];
    cudaError_t error = op ? record_named(r, b, op) : cudaSuccess;
    if (error || !more || !a->free_after || !more->after) return error ? error : a->free(b->ptr, stream);
    for (uint32_t i = 0; i < more->after; i++) streams[i] = r->stream[named[more->after - 1 - i]];
    streams[more->after] = stream;
    return a->free_after(b->ptr, streams, (int)more->after + 1);
}

/* op: the row; NULL: there is none. */
static int replay_free(run *r, block *b, uint32_t freeing, const trace_op *op, double *spent)
{
    cudaError_t error = cudaSuccess;
    double start = 0;
    if (!b->ptr) return RUN_OK;
    if (works(r)) {
        error = last_use(r, b, freeing);
        if (error) return failed(r, "a launch", error);
        if (!device_idle(r->stream[freeing])) r->unfinished++;
    }
    if (timed_apart(r)) start = now_ns();
    error = free_as(r, b, op, r->stream[freeing]);
    if (timed_apart(r)) *spent += now_ns() - start;
    b->ptr = NULL;
    r->live -= b->bytes;
    r->frees++;
    return error ? failed(r, "a free", error) : RUN_OK;
}

/* Where a free goes: work on another stream would race with what is given the block next. */
static uint32_t freed_on(const run *r, const trace_op *op)
{
    return r->o->allocator->keeps_stream ? r->block[op->slot].stream : op->stream;
}

/* What cannot be resized in place is copied to a new block, as a program does; without memory the old one stays. */
static int replay_copy(run *r, const trace_op *op, double *spent)
{
    block *b = &r->block[op->slot], old = *b;
    int status = replay_alloc(r, op, spent);
    if (status) return status;
    if (b->ptr) return replay_free(r, &old, r->o->allocator->keeps_stream ? old.stream : op->stream, NULL, spent);
    *b = old;
    return RUN_OK;
}

/* Replays a resize. Where memory runs out, the block is freed and allocated anew. */
static int replay_resize(run *r, const trace_op *op, double *spent)
{
    block *b = &r->block[op->slot];
    cudaStream_t stream = r->stream[op->stream];
    cudaError_t error = cudaSuccess;
    double start;
    if (!b->ptr) return replay_alloc(r, op, spent);
    if (!r->o->allocator->resize) return replay_copy(r, op, spent);
    if (works(r)) error = last_use(r, b, op->stream);
    if (error) return failed(r, "a launch", error);
    start = timed_apart(r) ? now_ns() : 0;
    error = record_named(r, b, op);
    if (!error) error = r->o->allocator->resize(b->ptr, op->bytes, stream);
    if (timed_apart(r)) *spent += now_ns() - start;
    if (error == cudaErrorNotSupported) return replay_copy(r, op, spent);
    if (error == cudaErrorMemoryAllocation) {
        int status = replay_free(r, b, op->stream, NULL, spent);
        return status ? status : replay_alloc(r, op, spent);
    }
    if (error) return failed(r, "a resize", error);
    r->live += op->bytes - b->bytes;
    b->bytes = op->bytes;
    b->stream = op->stream; /* of its last work */
    b->tag = ++r->tags;
    if (r->o->verify) error = device_write(stream, b->ptr, b->bytes, b->tag);
    else if (r->o->busy) error = device_use(stream, b->ptr, b->bytes);
    return error ? failed(r, "a launch", error) : RUN_OK;
}

/* Replays a row. The first row of a resize has nothing to do. */
static int replay_op(run *r, const trace_op *op, double *spent)
{
    const trace_more *more = more_of(r, op);
    bool resizes = more && more->resize;
    if (op->bytes) return resizes ? replay_resize(r, op, spent) : replay_alloc(r, op, spent);
    return resizes ? RUN_OK : replay_free(r, &r->block[op->slot], freed_on(r, op), op, spent);
}

static int replay_here(void *user)
{
    run *r = user;
    return replay_op(r, r->op, &r->spent);
}

/* Looks after a call; the last call of a pass always ends a row. */
static void note_timeline(run *r, size_t i)
{
    const allocator *a = r->o->allocator;
    size_t every = (r->t->n + TIMELINE_ROWS - 1) / TIMELINE_ROWS, held = a->held ? a->held() : account_held();
    r->call++;
    if (r->live > r->live_most) r->live_most = r->live;
    if (held > r->held_most) r->held_most = held;
    if ((i + 1) % every && i + 1 < r->t->n) return;
    fprintf(r->o->timeline, "%s,%s,", r->t->name, a->name);
    for (const char *c = allocator_settings(a, r->o->conf); *c; c++) fputc(*c == ',' ? ' ' : *c, r->o->timeline);
    fprintf(r->o->timeline, ",%zu,%zu,%zu\n", r->call, r->live_most, r->held_most);
    r->live_most = r->held_most = 0;
}

/* ---- streams ----------------------------------------------------------------------------------------------------- */

static bool is_legacy(const run *r, uint32_t i)
{
    return i + 1 == r->t->legacy;
}

static int stream_open(run *r, uint32_t i)
{
    if (is_legacy(r, i)) r->stream[i] = cudaStreamLegacy;
    if (r->stream[i]) return RUN_OK;
    cudaError_t error = device_stream_open(&r->stream[i]);
    if (error) return failed(r, "cudaStreamCreateWithFlags", error);
    r->open++;
    return RUN_OK;
}

static int streams_open(run *r)
{
    int status = RUN_OK;
    for (uint32_t i = 0; i < r->t->streams && i < STREAMS_OPEN && !status; i++) status = stream_open(r, i);
    r->close_at = STREAMS_OPEN;
    return status;
}

static int stream_close(run *r, uint32_t i)
{
    cudaError_t error = device_stream_close(r->stream[i]);
    if (error) return failed(r, "cudaStreamDestroy", error);
    r->stream[i] = NULL;
    r->open--;
    return RUN_OK;
}

static int streams_close(run *r)
{
    int status = RUN_OK;
    for (uint32_t i = 0; i < r->t->streams && !status; i++)
        if (r->stream[i] && !is_legacy(r, i)) status = stream_close(r, i);
    return status;
}

/* When a pass needs each stream for the last time: in a call that names it, or for a block that was its own. */
static bool streams_find_last(run *r)
{
    const trace *t = r->t;
    uint32_t *of_slot = calloc(t->slots, sizeof *of_slot); /* the stream of the block there + 1 */
    r->last_call = calloc(t->streams, sizeof *r->last_call);
    for (size_t i = 0; i < t->n && of_slot && r->last_call; i++) {
        const trace_op *op = &t->op[i];
        const trace_more *more = more_of(r, op);
        r->last_call[op->stream] = i;
        for (uint32_t k = 0; more && k < more->after + more->recorded; k++) r->last_call[t->named[more->named + k]] = i;
        if (of_slot[op->slot]) r->last_call[of_slot[op->slot] - 1] = i;
        if (op->bytes) of_slot[op->slot] = op->stream + 1;
        else if (!more || !more->resize) of_slot[op->slot] = 0;
    }
    for (uint32_t i = 0; i < t->slots && of_slot && r->last_call; i++)
        if (of_slot[i]) r->last_call[of_slot[i] - 1] = t->n; /* freed at the end of the pass */
    free(of_slot);
    return of_slot && r->last_call;
}

/* Closes streams that are not needed any more. Where hardly any is, the next look comes much later. */
static int streams_retire(run *r, size_t now)
{
    int status = RUN_OK;
    for (uint32_t i = 0; i < r->t->streams && !status; i++) {
        if (!r->stream[i] || is_legacy(r, i) || r->last_call[i] >= now) continue;
        cudaError_t error = r->o->allocator->retire(r->stream[i]);
        status = error ? failed(r, "galloc_stream_retire", error) : stream_close(r, i);
    }
    r->close_at = r->open > STREAMS_OPEN / 2 ? 2 * r->open : STREAMS_OPEN;
    return status;
}

/* Opens the streams of a call. */
static int streams_for(run *r, size_t now)
{
    const trace_op *op = &r->t->op[now];
    const trace_more *more = more_of(r, op);
    int status = stream_open(r, op->stream);
    for (uint32_t k = 0; more && k < more->after + more->recorded && !status; k++)
        status = stream_open(r, r->t->named[more->named + k]);
    if (!status && r->open >= r->close_at && r->o->allocator->retire) status = streams_retire(r, now);
    return status;
}

/* ---- a pass ------------------------------------------------------------------------------------------------------ */

/* Replays the trace once, then frees what it left. ns: host time of the trace's calls. */
static int replay_pass(run *r, double *ns)
{
    const trace *t = r->t;
    double start = now_ns(), rest = 0;
    int status = RUN_OK;
    r->spent = 0;
    for (size_t i = 0; i < t->n && !status && !(r->oom && r->stop_at_oom); i++) {
        r->op = &t->op[i];
        if (r->last_call) status = streams_for(r, i);
        if (status) break;
        if (r->o->calls) device_sign();
        status = r->crew ? crew_do(r->crew, r->op->thread, replay_here, r) : replay_here(r);
        if (r->o->timeline) note_timeline(r, i);
        if (i % 64) continue;
        r->held += (double)account_held();
        r->looks++;
    }
    *ns = timed_apart(r) ? r->spent : now_ns() - start;
    if (r->o->snapshot && !status && galloc_snapshot_save(NULL, r->o->snapshot))
        status = failed(r, "galloc_snapshot_save", cudaErrorOperatingSystem);
    for (uint32_t i = 0; i < t->slots && !status; i++)
        status = replay_free(r, &r->block[i], r->block[i].stream, NULL, &rest);
    return status;
}

/* ---- galloc's counters against the device's account -------------------------------------------------------------- */

static int differ(const run *r, const char *what, uint64_t ours, uint64_t theirs)
{
    run_progress(NULL);
    fprintf(stderr, "%s: galloc counts %" PRIu64 " %s, but there were %" PRIu64 "\n", r->t->name, ours, what, theirs);
    return RUN_MISMATCH;
}

/* Host time in the driver is galloc's own measure; but no call is longer than the longest of its kind, and all
   together took no longer than the pool has existed. */
static int agree_on_time(const run *r, const galloc_stats *s)
{
    double spent = 0;
    int status = RUN_OK;
#define TIME_OF(name, function)                                                                                        \
    spent += (double)s->driver_ns.name;                                                                                \
    if (s->driver_longest_ns.name > s->driver_ns.name ||                                                               \
        s->driver_ns.name > s->driver_longest_ns.name * s->driver.name)                                                \
        status = differ(r, "ns in calls of " function ", not what the longest allows", s->driver_ns.name,              \
                        s->driver_longest_ns.name);
    GALLOC_DRIVER_CALLS(TIME_OF)
#undef TIME_OF
    if (spent > now_ns() - r->opened_ns)
        status = differ(r, "ns in the driver", (uint64_t)spent, (uint64_t)(now_ns() - r->opened_ns));
    return status;
}

/* All blocks are free at this moment. What a block of the driver's takes of the device only the driver knows. */
static int agree(const run *r, const galloc_stats *s, int backend)
{
    int status = agree_on_time(r, s), native = backend == GALLOC_BACKEND_NATIVE;
    size_t in_pages = 0;
    for (int i = 0; i < GALLOC_PAGE_SIZES; i++) in_pages += s->pages[i].bytes;
#define SAME(what, ours, theirs) \
    if ((uint64_t)(ours) != (uint64_t)(theirs)) status = differ(r, what, ours, theirs);
#define SAME_HELD(what, ours, theirs) if (native) SAME(what, ours, theirs)
#define SAME_CALLS(name, function) SAME("calls of " function, s->driver.name, account_calls(function))
    GALLOC_DRIVER_CALLS(SAME_CALLS)
    SAME_HELD("bytes held", s->reserved.current, account_held())
    SAME_HELD("bytes held at most", s->reserved.peak, account_peak())
    SAME_HELD("bytes in pages", in_pages, account_held())
    SAME_HELD("free bytes", s->free_bytes + s->quarantined, account_held())
    SAME("bytes live", s->live.current, 0)
    SAME("blocks", s->blocks.current, 0)
    SAME("allocations", s->mallocs, r->mallocs)
    SAME("frees", s->frees, r->frees)
    SAME("failures", s->failures, r->oom)
#undef SAME_CALLS
#undef SAME_HELD
#undef SAME
    return status;
}

static int read_pool(const run *r, run_result *result)
{
    galloc_stats stats;
    galloc_config config;
    galloc_pool *pool = r->o->allocator->pool ? r->o->allocator->pool() : NULL;
    if (!pool) return RUN_OK;
    cudaError_t error = galloc_pool_stats(pool, &stats);
    if (!error) error = galloc_pool_config(pool, &config);
    if (error) return failed(r, "galloc_pool_stats", error);
    result->moves = (int64_t)stats.moves;
    result->waits = (int64_t)stats.waits;
    result->collections = (int64_t)stats.collections;
    if (galloc_pool_check(pool)) return differ(r, "broken invariants", (uint64_t)galloc_pool_check(pool), 0);
    return agree(r, &stats, config.backend);
}

/* ---- a replay with its device ------------------------------------------------------------------------------------ */

/* Host time that galloc's pool has spent in the driver so far; NAN for other allocators. */
static double driver_ns(const run *r)
{
    galloc_stats stats;
    galloc_pool *pool = r->o->allocator->pool ? r->o->allocator->pool() : NULL;
    double spent = 0;
    if (!pool || galloc_pool_stats(pool, &stats)) return NAN;
#define TIME_OF(name, function) spent += (double)stats.driver_ns.name;
    GALLOC_DRIVER_CALLS(TIME_OF)
#undef TIME_OF
    return spent;
}

static int replay_passes(run *r, run_result *result)
{
    int status = RUN_OK;
    for (int pass = 0; pass < r->o->repeat && !status && !(r->oom && r->stop_at_oom); pass++) {
        double ns = 0;
        uint64_t calls = counted_calls();
        double driver_us = account_us(), looks_us = account_looks_us();
        if (r->limit == r->o->limit) run_progress("%s: pass %d of %d", r->t->name, pass + 1, r->o->repeat);
        else run_progress("%s: within %zu MiB?", r->t->name, r->limit >> 20);
        status = replay_pass(r, &ns);
        if (pass == 0) {
            result->ns_per_op = ns / (double)r->t->n;
            result->ns_per_op_own = (ns - driver_ns(r)) / (double)r->t->n;
            continue;
        }
        result->ns_per_op_warm = ns / (double)r->t->n;
        result->driver_calls_warm = (int64_t)(counted_calls() - calls);
        result->driver_us_warm = us_since(account_us(), driver_us);
        result->looks_us_warm = us_since(account_looks_us(), looks_us);
    }
    return status ? status : read_pool(r, result);
}

/* Opening and closing may wait, so they are left out. */
static int replay_watched(run *r, run_result *result)
{
    if (!r->o->calls) return replay_passes(r, result);
    if (device_hold()) return RUN_FAILED;
    calls_begin();
    int status = replay_passes(r, result);
    calls_end();
    device_let_go();
    return status;
}

/* From opening the allocator to closing it: what the account is about. */
static int replay_accounted(run *r, run_result *result)
{
    account_reset();
    r->opened_ns = now_ns();
    if (r->o->allocator->open(r->o->conf, r->limit)) return RUN_FAILED;
    int status = replay_watched(r, result);
    if (status) return status;
    size_t own_peak = r->o->allocator->peak ? r->o->allocator->peak() : r->peak;
    if (r->o->allocator->close()) return RUN_FAILED;
    result->peak_reserved = own_peak ? own_peak : account_peak();
    result->driver_calls = (int64_t)counted_calls();
    result->driver_us = account_us();
    result->looks = account_looks();
    result->looks_us = account_looks_us();
    if (!account_held()) return RUN_OK;
    fprintf(stderr, "%s: %zu bytes are still held when all is given back\n", r->t->name, account_held());
    return RUN_MISMATCH;
}

static int replay_device(run *r, run_result *result)
{
    if (device_start(r->o->busy)) return RUN_FAILED;
    int status = streams_open(r);
    if (!status) status = replay_accounted(r, result);
    if (!status && device_finish()) status = failed(r, "cudaDeviceSynchronize", cudaPeekAtLastError());
    run_progress(NULL);
    result->findings = device_findings(stderr);
    result->races = device_races();
    if (!status) status = streams_close(r);
    device_stop();
    return status;
}

static int replay(const trace *t, const run_options *o, size_t limit, bool stop_at_oom, run_result *result)
{
    run r = {.t = t, .o = o, .limit = limit, .stop_at_oom = stop_at_oom};
    if (!works(&r)) r.moves_seen = r.moves_busy = r.handovers = r.handovers_busy = -1;
    int status = RUN_FAILED;
    *result = (run_result){.ops = t->n, .peak_live = t->peak_live, .ns_per_op = NAN, .ns_per_op_warm = NAN,
                           .ns_per_op_own = NAN, .driver_calls_warm = -1, .driver_us_warm = NAN, .looks_us_warm = NAN,
                           .moves = -1, .waits = -1, .collections = -1, .mean_reserved = NAN, .unfinished = NAN};
    r.stream = calloc(t->streams, sizeof *r.stream);
    r.block = calloc(t->slots, sizeof *r.block);
    r.crew = o->threads ? crew_start(t->threads) : NULL;
    if (o->threads && !r.crew) fprintf(stderr, "%s: %u threads cannot be had\n", t->name, t->threads);
    else if (r.stream && r.block && (t->streams <= STREAMS_OPEN || streams_find_last(&r)))
        status = replay_device(&r, result);
    else fprintf(stderr, "%s: the host has no memory to replay it\n", t->name);
    crew_end(r.crew);
    free(r.stream);
    free(r.last_call);
    free(r.block);
    result->oom = r.oom;
    result->moves_seen = r.moves_seen;
    result->moves_busy = r.moves_busy;
    result->handovers = r.handovers;
    result->handovers_busy = r.handovers_busy;
    if (r.looks && !o->allocator->peak) result->mean_reserved = r.held / (double)r.looks;
    if (o->busy && r.frees) result->unfinished = (double)r.unfinished / (double)r.frees;
    return status;
}

/* ---- the smallest limit ------------------------------------------------------------------------------------------ */

static int fits(const trace *t, const run_options *o, size_t pages, bool *yes)
{
    run_result result;
    run_options once = *o;
    once.repeat = 1;
    int status = replay(t, &once, pages * PAGE, true, &result);
    *yes = !result.oom;
    if (!status && result.findings) status = RUN_FAILED;
    return status;
}

/* Between live bytes, below which nothing fits, and a limit that is known or found to suffice. */
static int find_fit(const trace *t, const run_options *o, size_t enough, size_t *limit)
{
    size_t low = (t->peak_live - 1) / PAGE, high = (enough + PAGE - 1) / PAGE;
    bool yes = false;
    int status = fits(t, o, high, &yes);
    while (!status && !yes && high * PAGE < 8 * enough) {
        low = high;
        high += high / 16 + 1;
        status = fits(t, o, high, &yes);
    }
    if (!status && !yes) {
        fprintf(stderr, "%s: runs out of memory within %zu MiB, yet not without a limit\n", t->name,
                high * PAGE >> 20);
        return RUN_FAILED;
    }
    while (!status && high - low > 1) {
        size_t middle = low + (high - low) / 2;
        status = fits(t, o, middle, &yes);
        if (yes) high = middle;
        else low = middle;
    }
    *limit = high * PAGE;
    return status;
}

int run_trace(const trace *t, const run_options *options, run_result *result)
{
    int status = replay(t, options, options->limit, false, result);
    if (!status && options->fit && !result->oom)
        status = find_fit(t, options, result->peak_reserved, &result->fit_limit);
    run_progress(NULL);
    return status;
}
