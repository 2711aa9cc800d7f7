/* sim_core.c - the state of the simulated device: start and stop, threads and contexts, accounts, faults, findings. */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <malloc.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "sim_internal.h"

sm_state sm;

#define SM_NAME(name, flags, ns) #name,
const char *const sm_names[] = {SM_FUNCTIONS(SM_NAME)};

#define SM_FLAGS(name, flags, ns) flags,
static const unsigned char function_flags[] = {SM_FUNCTIONS(SM_FLAGS)};

#define SM_COST(name, flags, ns) ns,
static const uint32_t function_ns[] = {SM_FUNCTIONS(SM_COST)};

/* ---- the lock, and host memory of the sim's own ---------------------------------------------------------------- */

static pthread_mutex_t mutex;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t thread_end;

static _Thread_local sm_thread *self;
static _Thread_local unsigned long long self_generation;

static void *need(void *p) {
    if (p) return p;
    fprintf(stderr, "sim: out of host memory\n");
    abort();
}

/* A thread that ends takes its per-thread default streams with it, as cudaStreamDestroy would: their work goes on. */
static void on_thread_end(void *unused) {
    (void)unused;
    sm_lock();
    if (self && self_generation == sm.generation) {
        for (size_t i = 0; i < self->nstreams; i++) sm_stream_end(self->streams[i].stream);
        self->nstreams = 0;
        sm.nthreads--;
    }
    self = NULL;
    sm_unlock();
}

/* Recursive, so that a host function that an operation calls may use the sim_ functions. */
static void make_mutex(void) {
    pthread_mutexattr_t attr;
    pthread_mutexattr_init(&attr);
    pthread_mutexattr_settype(&attr, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&mutex, &attr);
    pthread_mutexattr_destroy(&attr);
}

/* A fork waits until no other thread is inside a call. The child makes the lock anew: it could not release one that a
   thread of its parent took. As with a GPU, a device that the parent has started is of no use to the child. */
#ifndef __SANITIZE_THREAD__ /* which takes the child's new lock for the old one, and that for held */
static void before_fork(void) { pthread_mutex_lock(&mutex); }
static void after_fork(void) { pthread_mutex_unlock(&mutex); }
static void begin_child(void) {
    make_mutex();
    sm.forked = sm.used;
}
#define HEED_FORKS() pthread_atfork(before_fork, after_fork, begin_child)
#else
#define HEED_FORKS() 0
#endif

static void prepare(void) {
    make_mutex();
    pthread_key_create(&thread_end, on_thread_end);
    if (HEED_FORKS()) need(NULL);
}

/* CUDA does not promise that its calls order two threads of a program. So ThreadSanitizer sees neither the lock nor
   what it guards, but only that an object is made before its destructor runs. */
#ifdef __SANITIZE_THREAD__
void AnnotateIgnoreSyncBegin(const char *file, int line), AnnotateIgnoreSyncEnd(const char *file, int line);
void AnnotateIgnoreReadsBegin(const char *file, int line), AnnotateIgnoreReadsEnd(const char *file, int line);
void AnnotateIgnoreWritesBegin(const char *file, int line), AnnotateIgnoreWritesEnd(const char *file, int line);
void __tsan_release(void *place), __tsan_acquire(void *place);
#define UNSEEN(state) AnnotateIgnoreSync##state(__FILE__, __LINE__)
#define UNTOLD(state) (AnnotateIgnoreReads##state(__FILE__, __LINE__), AnnotateIgnoreWrites##state(__FILE__, __LINE__))
void sm_order_before(void *object) { __tsan_release(object); }
static void order_after(void *object) { __tsan_acquire(object); }
#else
#define UNSEEN(state) ((void)0)
#define UNTOLD(state) ((void)0)
void sm_order_before(void *object) { (void)object; }
static void order_after(void *object) { (void)object; }
#endif

void sm_lock(void) {
    pthread_once(&once, prepare);
    UNSEEN(Begin);
    pthread_mutex_lock(&mutex);
    UNSEEN(End);
    UNTOLD(Begin);
}

/* For a process that ends, whose threads may be anywhere: 0, or -1 when the lock is not to be had in that time. */
int sm_lock_for(int seconds) {
    struct timespec until;
    pthread_once(&once, prepare);
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += seconds;
    UNSEEN(Begin);
    int error = pthread_mutex_timedlock(&mutex, &until);
    UNSEEN(End);
    if (error) return -1;
    UNTOLD(Begin);
    return 0;
}

void sm_unlock(void) {
    UNTOLD(End);
    UNSEEN(Begin);
    pthread_mutex_unlock(&mutex);
    UNSEEN(End);
}

void *sm_alloc(size_t bytes) { return need(calloc(1, bytes ? bytes : 1)); }

/* Room for one more than n elements. */
void *sm_grow(void *p, size_t n, size_t *cap, size_t each) {
    if (n < *cap) return p;
    *cap = *cap ? *cap * 2 : 8;
    return need(realloc(p, *cap * each));
}

/* ---- findings -------------------------------------------------------------------------------------------------- */

static const char *const kind_name[SIM_KINDS] = {
    "any", "race", "stale", "hole", "unmap in use", "deadlock", "dead handle", "capture broken", "bad event"};

void sm_find(sim_kind kind, const char *format, ...) {
    char text[400];
    int used = snprintf(text, sizeof text, "%s: in %s: ", kind_name[kind], sm_names[sm.fn]);
    va_list args;
    va_start(args, format);
    vsnprintf(text + used, sizeof text - (size_t)used, format, args);
    va_end(args);
    if (kind == SIM_DEAD_HANDLE && sm.opt.panic) {
        fprintf(stderr, "sim: %s%s\n", text, sm.user ? "; a real device crashes there: no call, nor one of galloc, may name it any more" : "");
        abort();
    }
    sm.findings[kind]++;
    sm.findings[SIM_ANY]++;
    if (sm.user && sm_user_found(text)) return;
    if (sm.nfindings == 100) return;
    sm.alike[sm.nfindings] = 1;
    sm.finding[sm.nfindings++] = need(strdup(text));
}

long sim_findings(sim_kind kind) {
    sm_lock();
    long n = sm.findings[kind];
    sm_unlock();
    return n;
}

const char *sim_finding(long i) {
    sm_lock();
    const char *text = i >= 0 && i < sm.nfindings ? sm.finding[i] : NULL;
    sm_unlock();
    return text;
}

static void clear_findings(void) {
    for (int i = 0; i < sm.nfindings; i++) free(sm.finding[i]);
    sm.nfindings = 0;
    memset(sm.findings, 0, sizeof sm.findings);
}

void sim_findings_clear(void) {
    sm_lock();
    clear_findings();
    sm_unlock();
}

size_t sim_leaks(char *text, size_t size) {
    sm_lock();
    if (size) text[0] = 0;
    size_t n = sm_memory_leaks(text, size), events = 0;
    for (size_t i = 0; i < sm.nevents; i++) events += sm.events[i]->live;
    size_t at = size ? strlen(text) : 0;
    if (events && size) snprintf(text + at, size - at, "%zu events\n", events);
    sm_unlock();
    return n + events;
}

/* ---- start and stop -------------------------------------------------------------------------------------------- */

sim_options sim_defaults(void) {
    sim_options o = {0};
    o.mode = SIM_LEDGER;
    o.devices = 1;
    o.memory = (size_t)64 << 30;
    o.vmm = 1;
    o.rdma = 1;
    o.granularity = (size_t)2 << 20;
    o.seed = 1;
    o.pace = SIM_PACE_RANDOM;
    o.panic = 1;
    o.driver_version = 13000;
    return o;
}

/* What the device has, with nothing left at "as all". */
static sim_unlike has_of(const sim_options *o, int device) {
    sim_unlike u = o->unlike[device];
    if (!u.memory) u.memory = o->memory;
    if (!u.granularity) u.granularity = o->granularity;
    u.no_vmm |= !o->vmm;
    u.no_rdma |= o->rdma != 1;
    return u;
}

static const char *wrong_option(const sim_options *o) {
    if (o->devices < 1 || o->devices > SM_DEVICES) return "devices must be 1 .. 16";
    for (int d = 0; d < o->devices; d++) {
        const sim_unlike u = has_of(o, d);
        if (u.granularity < 4096 || (u.granularity & (u.granularity - 1))) return "granularity must be a power of two";
        if (o->mode == SIM_BACKED && u.memory > (size_t)1 << 40) return "backed mode is for 1 TiB at most";
    }
    return NULL;
}

/* Gives back everything, in an order that lets each part still look at what it refers to. */
static void clear(void) {
    for (int i = 0; i < sm.nstreams; i++) sm_stream_abandon(sm.streams[i]);
    sm_captures_clear();
    sm_graphs_clear();
    for (size_t i = 0; i < sm.nevents; i++) {
        sm_clock_drop(sm.events[i]->stamp.clock);
        free(sm.events[i]);
    }
    sm_memory_clear();
    for (int i = 0; i < sm.nstreams; i++) {
        sm_clock_drop(sm.streams[i]->clock);
        free(sm.streams[i]);
    }
    for (size_t i = 0; i < sm.nslots; i++) free(sm.slots[i]);
    for (int d = 0; d < SM_DEVICES; d++) free(sm.device[d].primary.blocking);
    for (size_t i = 0; i < sm.ncontexts; i++) {
        free(sm.contexts[i]->blocking);
        free(sm.contexts[i]);
    }
    for (sm_op *op = sm.spare_ops, *next; op; op = next) next = op->next, free(op->deps), free(op);
    for (sm_thread *t = sm.threads, *next; t; t = next) {
        next = t->next;
        free(t->stack);
        free(t->streams);
        free(t->declared);
        free(t);
    }
    clear_findings();
    void *rest[] = {sm.streams, sm.host, sm.active, sm.slots, sm.free_slots, sm.events, sm.contexts, sm.callbacks};
    for (size_t i = 0; i < sizeof rest / sizeof *rest; i++) free(rest[i]);
    unsigned long long generation = sm.generation;
    memset(&sm, 0, sizeof sm);
    sm.generation = generation + 1;
}

int sm_start(const sim_options *options) {
    const char *wrong = wrong_option(options);
    if (wrong) {
        fprintf(stderr, "sim: %s\n", wrong);
        return -1;
    }
    clear();
    sm.opt = *options;
    sm.random = options->seed * 0x9E3779B97F4A7C15u + 0x1234567;
    sm.started = true;
    sm.granule = SIZE_MAX;
    for (int d = 0; d < SM_DEVICES; d++) {
        sm.device[d].has = has_of(options, d);
        if (d < options->devices && sm.granule > sm.device[d].has.granularity)
            sm.granule = sm.device[d].has.granularity;
        sm.device[d].memfd = -1;
        sm.device[d].primary.device = d;
        sm.device[d].primary.primary = true;
    }
    for (int i = 0; i < 8; i++) sm.fault[i].fn = SM_FUNCTION_COUNT;
    return sm_memory_start();
}

int sim_start(const sim_options *options) {
    sm_lock();
    int rc = sm_start(options);
    sm_unlock();
    return rc;
}

void sim_stop(void) {
    sm_lock();
    clear();
    sm_unlock();
}

void sim_driver_exit(void) {
    sm_lock();
    sm.exiting = true;
    sm_unlock();
}

/* ---- threads and contexts -------------------------------------------------------------------------------------- */

sm_thread *sm_self(void) {
    if (self && self_generation == sm.generation) return self;
    self = sm_alloc(sizeof *self);
    self_generation = sm.generation;
    self->next = sm.threads;
    sm.threads = self;
    sm.nthreads++;
    pthread_setspecific(thread_end, self);
    return self;
}

void sim_forget_context(void) {
    sm_lock();
    sm_thread *t = sm_self();
    t->depth = 0;
    t->device = 0;
    sm_unlock();
}

sm_context *sm_current(void) {
    sm_thread *t = sm_self();
    return t->depth ? t->stack[t->depth - 1] : NULL;
}

void sm_context_push(sm_thread *t, sm_context *c) {
    size_t cap = (size_t)t->cap;
    t->stack = sm_grow(t->stack, (size_t)t->depth, &cap, sizeof *t->stack);
    t->cap = (int)cap;
    t->stack[t->depth++] = c;
}

/* Replaces the top of the thread's stack of contexts; NULL takes it away. */
void sm_context_set(sm_thread *t, sm_context *c) {
    if (t->depth) t->depth--;
    if (c) sm_context_push(t, c);
}

void sm_context_open(sm_context *c) {
    if (c->live) return;
    c->live = true;
    c->id = ++sm.context_ids;
    c->refs = 1;
    c->retained = 0;
    c->of_runtime = false;
    c->legacy = sm_stream_new(c, 0, 0, true);
}

/* The runtime uses a primary context, and keeps a reference to it until the device is reset. */
void sm_context_keep(sm_context *c) {
    if (c->live && !c->of_runtime) c->refs++;
    sm_context_open(c);
    c->of_runtime = true;
}

static void close_green(const sm_context *primary) {
    for (size_t i = 0; primary->primary && i < sm.ncontexts; i++)
        if (sm.contexts[i]->green && sm.contexts[i]->device == primary->device) sm_context_close(sm.contexts[i]);
}

/* Streams, events and cudaMalloc's blocks die with their context; cuMem's pages, mappings and reservations do not. The
   work of a green context goes on, and its cudaMalloc blocks stay. */
void sm_context_close(sm_context *c) {
    if (!c->live) return;
    if (!c->green) sm_wait_context(c);
    close_green(c);
    sm_capture_of_context_dies(c);
    for (int i = 0; i < sm.nstreams; i++) {
        sm_stream *s = sm.streams[i];
        if (s->context != c || s->dead) continue;
        if (!c->green) sm_stream_abandon(s);
        s->dead = true;
        if (s->handle) s->handle->stream = NULL;
    }
    sm_events_of_context_die(c);
    if (!c->green) sm_memory_of_context_dies(c);
    c->live = false;
    c->nblocking = 0;
    c->legacy = NULL;
    c->peers = 0;
    c->sticky = 0;
}

int sm_context_look(const sm_context *c) {
    if (!c) return E_CONTEXT;
    return c->live ? 0 : E_CONTEXT_DEAD;
}

int sm_context_use(const sm_context *c) {
    int error = sm_context_look(c);
    return error ? error : c->sticky;
}

void sim_context_fail(CUcontext context, int error) {
    sm_lock();
    context->sticky = error;
    sm_unlock();
}

/* The runtime gives a thread the primary context of its device, and wakes that up after a reset. */
static void bind_context(sm_thread *t) {
    if (!t->depth) sm_context_push(t, &sm.device[t->device].primary);
    sm_context *c = t->stack[t->depth - 1];
    if (c->primary) sm_context_keep(c);
}

int sm_device_reset(void) {
    sm_context *c = sm_current();
    int device = c ? c->device : sm_self()->device;
    sm_context_close(&sm.device[device].primary);
    return 0;
}

/* ---- faults ---------------------------------------------------------------------------------------------------- */

static int function_named(const char *name) {
    for (int i = 0; i < SM_FUNCTION_COUNT; i++)
        if (!strcmp(name, sm_names[i])) return i;
    fprintf(stderr, "sim: no function is called %s\n", name);
    abort();
}

static bool is_sticky(int error) {
    return error == 214 || error == 220 || error == 226 || error == 700 || error == 702 || error == 710 ||
           error == 911 || (error >= 714 && error <= 721 && error != 720);
}

void sim_fail(const char *function, long nth, int on, int error) {
    sm_lock();
    int i = 0;
    while (i < 8 && sm.fault[i].fn != SM_FUNCTION_COUNT) i++;
    if (i == 8) {
        fprintf(stderr, "sim: more than 8 faults\n");
        abort();
    }
    sm.fault[i] = (sm_fault){function ? function_named(function) : -1, nth, on != 0, error ? error : E_MEMORY};
    sm.nfaults++;
    sm_unlock();
}

/* The error that this call must give, or 0. Every fault that means the function counts the call. */
static int fault_of(int fn) {
    int error = 0;
    if (sm.fault_paused) return 0;
    for (int i = 0; i < 8; i++) {
        sm_fault *f = &sm.fault[i];
        if (f->fn != fn && (f->fn != -1 || (function_flags[fn] & F_SURE))) continue;
        if (f->nth > 1) {
            f->nth--;
            continue;
        }
        if (!error) error = f->error;
        if (f->on) continue;
        f->fn = SM_FUNCTION_COUNT;
        sm.nfaults--;
    }
    if (!error) return 0;
    sm.failed++;
    if (is_sticky(error) && sm_current()) sm_current()->sticky = error;
    return error;
}

long sim_failed(void) {
    sm_lock();
    long n = sm.failed;
    sm_unlock();
    return n;
}

void sim_fail_clear(void) {
    sm_lock();
    for (int i = 0; i < 8; i++) sm.fault[i].fn = SM_FUNCTION_COUNT;
    sm.nfaults = 0;
    sm.failed = 0;
    sm.malloc_nth = sm.malloc_failed = 0;
    sm.malloc_on = sm.fault_paused = false;
    sm_unlock();
}

void sim_fail_pause(int on) {
    sm_lock();
    sm.fault_paused = on != 0;
    sm_unlock();
}

static bool malloc_fails(void) {
    if (!sm.malloc_nth || sm.fault_paused) return false;
    if (sm.malloc_nth > 1) {
        sm.malloc_nth--;
        return false;
    }
    if (!sm.malloc_on) sm.malloc_nth = 0;
    sm.malloc_failed++;
    return true;
}

enum { FILLED = 1 << 20 };

/* Who reads memory too early or too late finds neither zeros nor a pointer. */
static void *fill(void *p, size_t bytes) { return p ? memset(p, 0xa5, bytes < FILLED ? bytes : FILLED) : NULL; }

void *sim_malloc(size_t bytes) {
    sm_lock();
    void *p = malloc_fails() ? NULL : malloc(bytes);
    if (p) sm.malloc_live++;
    sm_unlock();
    return fill(p, bytes);
}

void sim_free(void *p) {
    if (!p) return;
    sm_lock();
    if (sm.malloc_live) sm.malloc_live--;
    sm_unlock();
    free(fill(p, malloc_usable_size(p)));
}

void sim_fail_malloc(long nth, int on) {
    sm_lock();
    sm.malloc_nth = nth;
    sm.malloc_on = on != 0;
    sm.malloc_failed = 0;
    sm_unlock();
}

long sim_failed_mallocs(void) {
    sm_lock();
    long n = sm.malloc_failed;
    sm_unlock();
    return n;
}

size_t sim_malloc_live(void) {
    sm_lock();
    size_t n = sm.malloc_live;
    sm_unlock();
    return n;
}

/* ---- each call ------------------------------------------------------------------------------------------------- */

static bool is_runtime(int fn) { return sm_names[fn][2] == 'd' || (function_flags[fn] & F_WORK); }

/* Prevents anything the call in the current context? */
static int use_current(int fn) {
    const sm_context *c = sm_current();
    return function_flags[fn] & F_ALWAYS ? sm_context_look(c) : sm_context_use(c);
}

static int begin_runtime(int fn) {
    sm.initialised = true;
    if (!(function_flags[fn] & F_CTX)) return 0;
    sm.used = true;
    sm_thread *t = sm_self();
    bind_context(t);
    return use_current(fn);
}

static int begin_driver(int fn) {
    if (fn == FN_cuInit) sm.initialised = sm.used = true;
    if (!sm.initialised && !(function_flags[fn] & F_EARLY)) return E_NOT_INITIALIZED;
    return function_flags[fn] & F_CTX ? use_current(fn) : 0;
}

__attribute__((weak)) void sim_called(const char *function) { (void)function; }

void sim_hook(void (*before)(const char *function), int (*at_query)(void)) {
    sm_lock();
    __atomic_store_n(&sm.before, before, __ATOMIC_RELAXED);
    sm.at_query = at_query;
    sm_unlock();
}

/* Takes the lock. An error means that the function must do nothing; sm_end is due in any case. */
/* To the account of the call under way. */
static void charge_ns(uint64_t ns) {
    sm.ns += ns;
    sm.spent[sm.fn] += ns;
}

int sm_begin(int fn) {
    void (*before)(const char *) = __atomic_load_n(&sm.before, __ATOMIC_RELAXED);
    sim_called(sm_names[fn]);
    if (before) before(sm_names[fn]);
    sm_lock();
    if (!sm.started) sm_user_start();
    unsigned flags = function_flags[fn];
    sm.fn = fn;
    sm.calls[fn]++;
    charge_ns(function_ns[fn]);
    if (sm_self()->calling) return E_NOT_PERMITTED;
    if (sm.exiting) return E_EXITING;
    if (sm.forked && ~flags & (F_SURE | F_ALWAYS)) return E_NOT_INITIALIZED;
    if (sm.nfaults && !(flags & F_WORK)) {
        int error = fault_of(fn);
        if (error) return error;
    }
    if (sm_current() && sm_current()->sticky && !(flags & F_ALWAYS)) return sm_current()->sticky;
    if (sm.nactive) sm_pace();
    int error = is_runtime(fn) ? begin_runtime(fn) : begin_driver(fn);
    if (!error && (flags & F_LOOK)) error = sm_capture_look();
    return error;
}

/* Destructors of user objects run without the lock: they may wait for a thread that is about to call CUDA. */
int sm_end(int error) {
    sm_callback *list = NULL;
    int n = 0;
    if (sm.ncallbacks && !self->calling) {
        list = sm.callbacks;
        n = sm.ncallbacks;
        sm.callbacks = NULL;
        sm.ncallbacks = 0;
    }
    sm_unlock();
    for (int i = 0; i < n; i++) {
        UNTOLD(Begin);
        sm_callback now = list[i];
        UNTOLD(End);
        order_after(now.arg);
        self->calling = true;
        now.call(now.arg);
        self->calling = false;
    }
    free(list);
    return error;
}

void sm_count(int fn) {
    sm_begin(fn);
    sm_end(0);
}

int sm_end_runtime(int error) {
    if (error) sm_self()->last = error;
    return sm_end(error);
}

void sm_later(void (*call)(void *), void *arg) {
    sm.callbacks = need(realloc(sm.callbacks, (size_t)(sm.ncallbacks + 1) * sizeof *sm.callbacks));
    sm.callbacks[sm.ncallbacks++] = (sm_callback){call, arg};
}

void sm_charge(double us) { charge_ns((uint64_t)(us * 1000)); }

uint64_t sm_random(void) {
    uint64_t x = sm.random += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

/* ---- accounts -------------------------------------------------------------------------------------------------- */

long sim_calls(const char *function) {
    sm_lock();
    long n = 0;
    if (function) n = sm.calls[function_named(function)];
    else
        for (int i = 0; i < SM_FUNCTION_COUNT; i++) n += function_flags[i] & F_WORK ? 0 : sm.calls[i];
    sm_unlock();
    return n;
}

long sim_blocking_calls(void) {
    sm_lock();
    long n = sm.blocking;
    sm_unlock();
    return n;
}

uint64_t sim_cost_of_ns(const char *function) {
    sm_lock();
    uint64_t ns = function ? sm.spent[function_named(function)] : sm.ns;
    sm_unlock();
    return ns;
}

double sim_cost_us(void) { return (double)sim_cost_of_ns(NULL) / 1000; }

double sim_cost_us_of(const char *function) { return (double)sim_cost_of_ns(function) / 1000; }

void sim_cost_reset(void) {
    sm_lock();
    sm.ns = 0;
    memset(sm.spent, 0, sizeof sm.spent);
    sm_unlock();
}

static size_t account(const size_t *of) {
    sm_lock();
    size_t n = *of;
    sm_unlock();
    return n;
}

size_t sim_physical(int device) { return account(&sm.device[device].used); }
size_t sim_physical_peak(int device) { return account(&sm.device[device].peak); }
size_t sim_rdma(int device) { return account(&sm.device[device].rdma); }

int sim_retained(int device) {
    sm_lock();
    const sm_context *c = &sm.device[device].primary;
    int n = c->live && !sm.exiting ? c->retained : 0;
    sm_unlock();
    return n;
}

size_t sim_mapped(int device) { return account(&sm.device[device].mapped); }
size_t sim_addresses(void) { return account(&sm.addresses); }
size_t sim_unmapped_under_work(void) { return account(&sm.unmapped_under_work); }

void sim_physical_peak_reset(int device) {
    sm_lock();
    sm.device[device].peak = sm.device[device].used;
    sm_unlock();
}

unsigned long long sim_operations(void) {
    sm_lock();
    unsigned long long n = sm.operations;
    sm_unlock();
    return n;
}
