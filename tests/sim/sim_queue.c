/* sim_queue.c - streams, events, operations, and the scheduler that runs them.

   An operation is numbered in its stream; a point of a stream is the number of an operation, and complete once the
   stream has done so many. Everything that is queued is an operation, also a record and a wait. */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "sim_internal.h"

/* ---- stream handles -------------------------------------------------------------------------------------------- */

static bool is_blocking(const sm_stream *s) { return !s->legacy && !(s->flags & CU_STREAM_NON_BLOCKING); }

static void remember_blocking(sm_context *c, sm_stream *s) {
    size_t cap = (size_t)c->capblocking;
    c->blocking = sm_grow(c->blocking, (size_t)c->nblocking, &cap, sizeof *c->blocking);
    c->capblocking = (int)cap;
    c->blocking[c->nblocking++] = s;
}

sm_stream *sm_stream_new(sm_context *c, unsigned flags, int priority, bool legacy) {
    sm_stream *s = sm_alloc(sizeof *s);
    size_t cap = (size_t)sm.capstreams, host = cap, active = cap;
    sm.streams = sm_grow(sm.streams, (size_t)sm.nstreams, &cap, sizeof *sm.streams);
    sm.host = sm_grow(sm.host, (size_t)sm.nstreams, &host, sizeof *sm.host);
    sm.active = sm_grow(sm.active, (size_t)sm.nstreams, &active, sizeof *sm.active);
    sm.capstreams = (int)cap;
    s->index = (uint32_t)sm.nstreams;
    sm.host[sm.nstreams] = 0;
    sm.streams[sm.nstreams++] = s;
    s->id = ++sm.ids;
    s->context = c;
    s->context_id = c->id;
    s->green = c->green;
    s->flags = flags;
    s->priority = priority;
    s->legacy = legacy;
    s->active = -1;
    if (is_blocking(s)) remember_blocking(c, s);
    return s;
}

static sm_stream *default_stream(sm_context *c) {
    sm_thread *t = sm_self();
    for (size_t i = 0; i < t->nstreams; i++)
        if (t->streams[i].context_id == c->id) return t->streams[i].stream;
    t->streams = sm_grow(t->streams, t->nstreams, &t->capstreams, sizeof *t->streams);
    sm_stream *s = sm_stream_new(c, 0, 0, false);
    t->streams[t->nstreams++] = (sm_default_stream){c->id, s};
    return s;
}

/* The stream that a handle means now. */
static int stream_named(CUstream handle, sm_stream **out) {
    if (handle && handle != CU_STREAM_LEGACY && handle != CU_STREAM_PER_THREAD) {
        *out = handle->stream;
        if (*out) return 0;
        sm_find(SIM_DEAD_HANDLE, "stream %p was destroyed", (void *)handle);
        return E_HANDLE;
    }
    sm_context *c = sm_current();
    int error = sm_context_look(c);
    if (error) return error;
    *out = handle == CU_STREAM_PER_THREAD ? default_stream(c) : c->legacy;
    return 0;
}

/* The same for a call that CUDA refuses after an error of the stream's context. */
int sm_stream_find(CUstream handle, sm_stream **out) {
    int error = stream_named(handle, out);
    return error ? error : (*out)->context->sticky;
}

int sm_stream_open(CUstream *out, unsigned flags, int priority) {
    if (!out || flags > CU_STREAM_NON_BLOCKING) return E_VALUE;
    struct CUstream_st *h;
    if (sm.nfree_slots) h = sm.free_slots[--sm.nfree_slots];
    else {
        sm.slots = sm_grow(sm.slots, sm.nslots, &sm.capslots, sizeof *sm.slots);
        sm.slots[sm.nslots++] = h = sm_alloc(sizeof *h);
    }
    h->stream = sm_stream_new(sm_current(), flags, priority, false);
    h->stream->handle = h;
    *out = h;
    return 0;
}

/* The handle is dead from now on; what was queued still runs. */
void sm_stream_end(sm_stream *s) {
    s->dead = true;
    if (!s->handle) return;
    sm.free_slots = sm_grow(sm.free_slots, sm.nfree_slots, &sm.capfree_slots, sizeof *sm.free_slots);
    sm.free_slots[sm.nfree_slots++] = s->handle;
    s->handle->stream = NULL;
    s->handle = NULL;
}

int sm_stream_close(CUstream handle) {
    if (!handle || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD) return E_HANDLE;
    sm_stream *s;
    int error = sm_stream_find(handle, &s);
    if (error) return error;
    if (s->capture) sm_capture_stream_ends(s);
    sm_stream_end(s);
    return 0;
}

/* ---- operations ------------------------------------------------------------------------------------------------ */

static sm_op *op_new(void) {
    sm_op *op = sm.spare_ops;
    if (!op) return sm_alloc(sizeof *op);
    sm.spare_ops = op->next;
    sm_dep *deps = op->deps;
    int cap = op->capdeps;
    memset(op, 0, sizeof *op);
    op->deps = deps;
    op->capdeps = cap;
    return op;
}

static void op_drop(sm_op *op) {
    if (op->action) sm_action_drop(op->action);
    if (op->graph) sm_graph_drop(op->graph);
    op->next = sm.spare_ops;
    sm.spare_ops = op;
}

static void op_needs(sm_op *op, sm_stream *s, uint64_t no) {
    if (s->done >= no) return;
    size_t cap = (size_t)op->capdeps;
    op->deps = sm_grow(op->deps, (size_t)op->ndeps, &cap, sizeof *op->deps);
    op->capdeps = (int)cap;
    op->deps[op->ndeps++] = (sm_dep){s, no};
}

/* The newest operation of `after` comes before op, which is the newest of s. */
static void order(sm_stream *s, sm_op *op, sm_stream *after) {
    sm_stamp stamp = {after, after->queued, after->clock};
    op_needs(op, after, after->queued);
    sm_join(s, &stamp);
}

/* The legacy stream's work and that of the blocking streams of its context are ordered, both ways. */
static void order_legacy(sm_stream *s, sm_op *op) {
    sm_context *c = s->context;
    if (is_blocking(s)) {
        if (c->legacy->queued > s->seen_legacy) order(s, op, c->legacy);
        s->seen_legacy = c->legacy->queued;
    }
    if (!s->legacy) return;
    int kept = 0;
    for (int i = 0; i < c->nblocking; i++) {
        sm_stream *b = c->blocking[i];
        if (b->queued > b->legacy_saw) order(s, op, b);
        b->legacy_saw = b->queued;
        if (!b->dead) c->blocking[kept++] = b;
    }
    c->nblocking = kept;
}

/* A new operation at the end of the stream. The caller fills in what it does before the lock is given back. */
sm_op *sm_queue(sm_stream *s, sm_op_kind kind) {
    sm_op *op = op_new();
    op->kind = kind;
    op->no = ++s->queued;
    op->serial = ++sm.operations;
    order_legacy(s, op);
    if (s->head) s->tail->next = op;
    else {
        s->head = op;
        s->active = sm.nactive;
        sm.active[sm.nactive++] = s;
    }
    s->tail = op;
    sm.pending++;
    return op;
}

/* May the program use the stream at all? */
int sm_usable(sm_stream *s) {
    if (s->legacy && s->context->captures) return sm_capture_break_blocking(s->context);
    return s->capture && sm_capture_lost(s->capture) ? E_CAPTURE_LOST : 0;
}

/* ---- the scheduler --------------------------------------------------------------------------------------------- */

static void op_call(sm_op *op, void (*what)(sm_action *)) {
    if (!op->action) return;
    sm_thread *t = sm_self();
    bool before = t->calling;
    t->calling = true;
    what(op->action);
    t->calling = before;
}

static void op_end(sm_stream *s, sm_op *op) {
    s->done = op->no;
    s->head = op->next;
    sm.pending--;
    if (!s->head) {
        sm.active[s->active] = sm.active[--sm.nactive];
        sm.active[s->active]->active = s->active;
        s->active = -1;
    }
    op_drop(op);
}

static bool value_there(const sm_op *op) {
    uint32_t now = __atomic_load_n(op->word, __ATOMIC_ACQUIRE);
    switch (op->flags & 3) {
    case CU_STREAM_WAIT_VALUE_GEQ: return (int32_t)(now - op->value) >= 0;
    case CU_STREAM_WAIT_VALUE_EQ: return now == op->value;
    case CU_STREAM_WAIT_VALUE_AND: return (now & op->value) != 0;
    default: return ~(now | op->value) != 0;
    }
}

static bool may_begin(const sm_stream *s, const sm_op *op) {
    if (s->held) return false;
    if (op->serial + (uint64_t)sm.opt.lag > sm.operations && op->no > s->wanted) return false;
    for (int i = 0; i < op->ndeps; i++)
        if (op->deps[i].stream->done < op->deps[i].no) return false;
    return op->kind != OP_WAIT_VALUE || value_there(op);
}

/* One begin or end on the stream, if there can be one. Records, waits and writes begin and end at once. */
static bool advance(sm_stream *s) {
    sm_op *op = s->head;
    if (op->running) {
        op_call(op, sm_action_end);
        op_end(s, op);
        return true;
    }
    if (!may_begin(s, op)) return false;
    if (op->kind == OP_WRITE_VALUE) __atomic_store_n(op->word, op->value, __ATOMIC_RELEASE);
    op->running = op->kind == OP_WORK;
    if (op->running) op_call(op, sm_action_begin);
    else op_end(s, op);
    return true;
}

static bool step(void) {
    int n = sm.nactive;
    if (!n) return false;
    int first = n == 1 ? 0 : (int)(sm_random() % (uint64_t)n);
    for (int i = 0; i < n; i++)
        if (advance(sm.active[(first + i) % n])) return true;
    return false;
}

void sm_pace(void) {
    if (sm.opt.pace == SIM_PACE_PROMPT)
        while (step()) {}
    if (sm.opt.pace == SIM_PACE_RANDOM)
        for (uint64_t n = sm_random() & 3; n && step(); n--) {}
}

/* Somebody waits for the stream to do so much: lag holds none of what that needs. */
static void want(sm_stream *s, uint64_t no) {
    uint64_t before = s->wanted;
    if (no <= before) return;
    s->wanted = no;
    if (!sm.opt.lag) return;
    for (sm_op *op = s->head; op && op->no <= no; op = op->next)
        for (int i = 0; op->no > before && i < op->ndeps; i++) want(op->deps[i].stream, op->deps[i].no);
}

void sm_run_all(void) {
    while (step()) {}
}

/* Another thread may be about to set things going, if there is one. A program's own may take its time. */
static bool be_patient(int *tries) {
    if ((sm.nthreads < 2 && !sm.user) || ++*tries > (sm.user ? 5000 : 50)) return false;
    int fn = sm.fn;
    sm_unlock();
    usleep(1000);
    sm_lock();
    sm.fn = fn;
    return true;
}

static int run_to(sm_stream *s, uint64_t no) {
    int tries = 0;
    want(s, no);
    while (s->done < no) {
        if (step()) tries = 0;
        else if (!be_patient(&tries)) {
            sm_find(SIM_DEADLOCK, "stream %llu cannot reach operation %llu; %llu are done", s->id,
                    (unsigned long long)no, (unsigned long long)s->done);
            return E_UNKNOWN;
        }
    }
    return 0;
}

/* Does what the stream must have done to come so far, and nothing else; stops where something cannot run. */
static void run_just(sm_stream *s, uint64_t no) {
    while (s->done < no) {
        for (int i = 0; i < s->head->ndeps; i++) run_just(s->head->deps[i].stream, s->head->deps[i].no);
        if (!advance(s)) return;
    }
}

static bool host_has_seen(const sm_stamp *t) { return !t->stream || sm.host[t->stream->index] >= t->no; }

static int wait_quietly(const sm_stamp *t) {
    if (!t->stream) return 0;
    int error = run_to(t->stream, t->no);
    if (!error) sm_host_saw(t);
    return error;
}

int sm_wait(const sm_stamp *t) {
    sm.blocking += !host_has_seen(t);
    int error = wait_quietly(t);
    sm_trim_async();
    return error;
}

/* The primary context counts the work of its green contexts as its own, also of those that are destroyed. */
static bool waits_for(const sm_context *c, const sm_stream *s) {
    if (s->context == c && s->context_id == c->id) return true;
    return c->primary && s->green && s->context->device == c->device;
}

int sm_wait_context(sm_context *c) {
    bool blocked = false;
    int error = 0;
    for (int i = 0; i < sm.nstreams && !error; i++) {
        sm_stream *s = sm.streams[i];
        if (!waits_for(c, s) || sm.host[i] >= s->queued) continue;
        sm_stamp t = sm_stamp_of(s);
        blocked = true;
        error = wait_quietly(&t);
        sm_clock_drop(t.clock);
    }
    sm.blocking += blocked;
    sm_trim_async();
    return error;
}

/* As a program asks for it: not allowed while anything of the context is captured. */
int sm_synchronize(sm_context *c) {
    int looked = sm_capture_look(), error = sm_capture_break_context(c);
    if (!error) error = looked;
    return error ? error : sm_wait_context(c);
}

/* Its context is gone: what is pending never runs, and counts as complete. */
void sm_stream_abandon(sm_stream *s) {
    for (sm_op *op = s->head, *next; op; op = next) {
        next = op->next;
        op_end(s, op);
    }
    s->done = s->queued;
    sm.host[s->index] = s->queued;
}

/* ---- waiting for streams, and making them wait ------------------------------------------------------------------ */

sm_stamp sm_stamp_of(sm_stream *s) {
    if (s->clock) s->clock->refs++;
    return (sm_stamp){s, s->queued, s->clock};
}

void sm_stamp_set(sm_stamp *to, sm_stamp from) {
    sm_clock_drop(to->clock);
    *to = from;
}

/* The next operation of s comes after the stamp. */
void sm_after(sm_stream *s, const sm_stamp *stamp) {
    sm_op *op = sm_queue(s, OP_MARK);
    if (!stamp->stream) return;
    op_needs(op, stamp->stream, stamp->no);
    sm_join(s, stamp);
}

/* A look at a stream, or a wait for it. Neither is allowed where it would concern a capture. */
static int look_at(CUstream handle, sm_stream **s) {
    int error = sm_stream_find(handle, s);
    if (error) return error;
    error = sm_capture_touched(*s);
    return error ? error : sm_capture_look();
}

int sm_stream_query(CUstream handle) {
    sm_stream *s;
    int error = look_at(handle, &s);
    if (error) return error;
    if (s->done < s->queued) return E_NOT_READY;
    sm_stamp t = {s, s->queued, s->clock};
    sm_host_saw(&t);
    return 0;
}

/* To wait for the legacy stream is to wait for the blocking streams too, as an operation on it would. */
int sm_stream_wait(CUstream handle) {
    sm_stream *s;
    int error = look_at(handle, &s);
    if (error) return error;
    if (s->legacy) sm_queue(s, OP_MARK);
    sm_stamp t = sm_stamp_of(s);
    error = sm_wait(&t);
    sm_clock_drop(t.clock);
    return error;
}

void sm_value_queue(sm_stream *s, uint32_t *word, uint32_t value, unsigned flags, bool write) {
    sm_op *op = sm_queue(s, write ? OP_WRITE_VALUE : OP_WAIT_VALUE);
    op->word = word;
    op->value = value;
    op->flags = flags;
}

int sm_value(CUstream handle, CUdeviceptr address, uint32_t value, unsigned flags, bool write) {
    sm_stream *s;
    int error = sm_stream_find(handle, &s);
    if (!error) error = sm_usable(s);
    if (error) return error;
    uint32_t *word = (uint32_t *)(uintptr_t)address;
    if (address % 4 || !sm_is_pinned(word, 4)) return E_VALUE;
    if (s->capture) sm_capture_value(s, word, value, flags, write);
    else sm_value_queue(s, word, value, flags, write);
    return 0;
}

/* ---- events ---------------------------------------------------------------------------------------------------- */

enum { DEAD_EVENTS = 1024 }; /* so many rest before one is given out again, so that the use of a dead one is noticed */

static sm_event *event_place(void) {
    if (sm.dead_events <= DEAD_EVENTS) {
        sm.events = sm_grow(sm.events, sm.nevents, &sm.capevents, sizeof *sm.events);
        return sm.events[sm.nevents++] = sm_alloc(sizeof(sm_event));
    }
    sm_event *e = sm.oldest_dead;
    sm.oldest_dead = e->next;
    sm.dead_events--;
    memset(e, 0, sizeof *e);
    return e;
}

static void event_kill(sm_event *e) {
    sm_stamp_set(&e->stamp, (sm_stamp){NULL, 0, NULL});
    e->live = false;
}

int sm_event_open(CUevent *out, unsigned flags) {
    if (!out) return E_VALUE;
    sm_event *e = event_place();
    e->live = true;
    e->flags = flags;
    e->birth = ++sm.births;
    e->context = sm_current();
    *out = e;
    return 0;
}

static int event_check(const sm_event *e) {
    if (!e) return E_HANDLE;
    if (e->live) return e->context->sticky;
    sm_find(SIM_DEAD_HANDLE, "event %p was destroyed", (const void *)e);
    return E_HANDLE;
}

int sm_event_close(CUevent e) {
    int error = event_check(e);
    if (error) return error;
    event_kill(e);
    if (sm.dead_events++) sm.newest_dead->next = e;
    else sm.oldest_dead = e;
    sm.newest_dead = e;
    e->next = NULL;
    return 0;
}

void sm_events_of_context_die(sm_context *c) {
    for (size_t i = 0; i < sm.nevents; i++)
        if (sm.events[i]->live && sm.events[i]->context == c) event_kill(sm.events[i]);
}

/* A record is an operation, so on the legacy stream it couples the blocking ones. */
void sm_event_mark(CUevent e, sm_stream *s) {
    sm_queue(s, OP_MARK);
    sm_stamp_set(&e->stamp, sm_stamp_of(s));
    e->capture = 0;
    e->time = sm.operations;
}

int sm_event_record(CUevent e, CUstream handle, unsigned flags) {
    sm_stream *s;
    int error = event_check(e);
    if (!error) error = sm_stream_find(handle, &s);
    if (!error) error = sm_usable(s);
    if (error) return error;
    if (e->context != s->context) {
        sm_find(SIM_BAD_EVENT, "event %p is of another context than stream %llu", (void *)e, s->id);
        return E_HANDLE;
    }
    if (s->capture) return sm_capture_record(s, e, flags & 1);
    sm_event_mark(e, s);
    return 0;
}

int sm_event_query(CUevent e) {
    int error = event_check(e);
    if (!error) error = sm_capture_event_touched(e);
    if (error || !e->stamp.stream) return error;
    if (sm.at_query && e->stamp.stream->done < e->stamp.no && sm.at_query()) run_just(e->stamp.stream, e->stamp.no);
    if (e->stamp.stream->done < e->stamp.no) return E_NOT_READY;
    sm_host_saw(&e->stamp);
    return 0;
}

int sm_event_wait(CUevent e) {
    int error = event_check(e);
    if (!error) error = sm_capture_event_touched(e);
    if (error) return error;
    sm_stamp t = e->stamp;
    if (t.clock) t.clock->refs++;
    error = sm_wait(&t);
    sm_clock_drop(t.clock);
    return error;
}

/* A microsecond for each operation that was queued in between. */
int sm_event_time(float *ms, CUevent a, CUevent b) {
    int error = event_check(a);
    if (!error) error = event_check(b);
    if (error) return error;
    bool timed = a->stamp.stream && b->stamp.stream && !((a->flags | b->flags) & CU_EVENT_DISABLE_TIMING);
    if (!ms || !timed) return E_HANDLE;
    if (a->stamp.stream->done < a->stamp.no || b->stamp.stream->done < b->stamp.no) return E_NOT_READY;
    *ms = (float)((double)b->time - (double)a->time) / 1000;
    return 0;
}

/* cudaStreamWaitEvent: for what the event means now; an event never recorded means nothing. */
int sm_stream_after(CUstream handle, CUevent e, unsigned flags) {
    sm_stream *s;
    int error = event_check(e);
    if (!error) error = sm_stream_find(handle, &s);
    if (!error) error = sm_usable(s);
    if (error) return error;
    if (s->capture || e->capture) return sm_capture_wait(s, e, flags & 1);
    if (e->stamp.stream) sm_after(s, &e->stamp);
    return 0;
}

/* ---- what tests ask -------------------------------------------------------------------------------------------- */

void sim_run(long steps) {
    sm_lock();
    if (sm_self()->calling) steps = 0;
    while (steps-- && step()) {}
    sm_end(0);
}

void sim_hold(cudaStream_t stream, int on) {
    sm_lock();
    sm_stream *s;
    if (!stream_named(stream, &s)) s->held = on != 0;
    sm_unlock();
}

long sim_pending(void) {
    sm_lock();
    long n = sm.pending;
    sm_unlock();
    return n;
}

int sim_stream_done(cudaStream_t stream) {
    sm_lock();
    sm_stream *s;
    int done = stream_named(stream, &s) ? 0 : !s->head;
    sm_unlock();
    return done;
}
