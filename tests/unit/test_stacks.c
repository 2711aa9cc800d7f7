/* test_stacks.c - history_stacks: which calls of the program an event and a block name, what is kept of them, and what
   happens where they cannot be kept. The functions that allocate and free here are linked with -rdynamic, so that they
   have names. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <malloc.h>
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unwind.h>

#include "setup.h"

#include "events.h"

/* ---- the unwinder ------------------------------------------------------------------------------------------------ */

static struct {
    galloc_pool *pool; /* whose locks are looked at; NULL: nobody's */
    int missing;       /* there are no stacks */
    long calls, locked;
} backtraces;

static void count_backtrace(void)
{
    if (!backtraces.pool) return;
    backtraces.calls++;
    backtraces.locked += !inside_unlocked(backtraces.pool);
}

int backtrace(void **at, int n)
{
    int (*next)(void **, int) = NULL;
    *(void **)(void *)&next = dlsym(RTLD_NEXT, "backtrace");
    count_backtrace();
    return backtraces.missing ? 0 : next(at, n);
}

/* The unwinder, where galloc calls it itself: this one, if the others of its functions are there for all. */
__attribute__((constructor)) static void show_unwinder(void) { (void)dlopen("libgcc_s.so.1", RTLD_LAZY | RTLD_GLOBAL); }

_Unwind_Reason_Code _Unwind_Backtrace(_Unwind_Trace_Fn see, void *user)
{
    _Unwind_Reason_Code (*next)(_Unwind_Trace_Fn, void *) = NULL;
    *(void **)(void *)&next = dlsym(dlopen("libgcc_s.so.1", RTLD_LAZY), "_Unwind_Backtrace");
    count_backtrace();
    return next(see, user);
}

/* ---- calls with names -------------------------------------------------------------------------------------------- */

#define SITE __attribute__((noinline))
#define STAYS() __asm__ volatile("") /* the call before it is no tail call */

SITE void *site_malloc(galloc_pool *pool, size_t bytes, cudaStream_t stream);
SITE void *site_alloc(galloc_pool *pool, size_t bytes, cudaStream_t stream);
SITE void *site_tagged(galloc_pool *pool, uint32_t tag);
SITE void *site_growable(galloc_pool *pool, size_t bytes, cudaStream_t stream);
SITE void *site_default(galloc_pool *pool, size_t bytes, cudaStream_t stream);
SITE void site_free(void *ptr, cudaStream_t stream);
SITE void site_free_after(void *ptr, cudaStream_t stream);
SITE void site_resize(void *ptr, size_t bytes, cudaStream_t stream);
SITE void *site_deep(galloc_pool *pool, unsigned path, int depth);
SITE void site_told(galloc_pool *pool, void *addr, size_t bytes, void *user);

SITE void *site_malloc(galloc_pool *pool, size_t bytes, cudaStream_t stream)
{
    void *ptr = NULL;
    OK(galloc_pool_malloc(pool, &ptr, bytes, stream));
    STAYS();
    return ptr;
}

/* A function of the program with a name like galloc's. */
SITE void *galloc_site(galloc_pool *pool);
SITE void *galloc_site(galloc_pool *pool)
{
    void *ptr = site_malloc(pool, 5000, NULL);
    STAYS();
    return ptr;
}

SITE void *site_alloc(galloc_pool *pool, size_t bytes, cudaStream_t stream)
{
    galloc_request request = {.bytes = bytes, .stream = stream, .pool = pool};
    void *ptr = NULL;
    OK(galloc_alloc(&ptr, &request));
    STAYS();
    return ptr;
}

SITE void *site_tagged(galloc_pool *pool, uint32_t tag)
{
    galloc_request request = {.bytes = 5000, .pool = pool, .tag = tag};
    void *ptr = NULL;
    OK(galloc_alloc(&ptr, &request));
    STAYS();
    return ptr;
}

SITE void *site_growable(galloc_pool *pool, size_t bytes, cudaStream_t stream)
{
    void *ptr = NULL;
    (void)pool;
    OK(galloc_malloc_growable(&ptr, bytes, 2 * bytes, stream));
    STAYS();
    return ptr;
}

SITE void *site_default(galloc_pool *pool, size_t bytes, cudaStream_t stream)
{
    void *ptr = NULL;
    (void)pool;
    OK(galloc_malloc(&ptr, bytes, stream));
    STAYS();
    return ptr;
}

SITE void site_free(void *ptr, cudaStream_t stream)
{
    OK(galloc_free(ptr, stream));
    STAYS();
}

SITE void site_free_after(void *ptr, cudaStream_t stream)
{
    OK(galloc_free_after(ptr, &stream, 1));
    STAYS();
}

SITE void site_resize(void *ptr, size_t bytes, cudaStream_t stream)
{
    OK(galloc_resize(ptr, bytes, stream));
    STAYS();
}

/* 4^depth stacks: two bits of `path` a frame, the lowest in the outermost. */
SITE void *site_deep(galloc_pool *pool, unsigned path, int depth)
{
    void *ptr;
    if (depth == 0) return site_malloc(pool, 1000, NULL);
    switch (path & 3) {
    case 0: ptr = site_deep(pool, path >> 2, depth - 1); __asm__ volatile("# 0"); break;
    case 1: ptr = site_deep(pool, path >> 2, depth - 1); __asm__ volatile("# 1"); break;
    case 2: ptr = site_deep(pool, path >> 2, depth - 1); __asm__ volatile("# 2"); break;
    default: ptr = site_deep(pool, path >> 2, depth - 1); __asm__ volatile("# 3"); break;
    }
    return ptr;
}

/* ---- reading ----------------------------------------------------------------------------------------------------- */

static galloc_config config_stacks(const char *settings, int stacks)
{
    galloc_config config = galloc_config_default();
    OK(galloc_config_parse(&config, settings, NULL, 0));
    if (!config.history) config.history = 1000;
    config.history_stacks = (uint64_t)stacks;
    return config;
}

static const value *frames_of(const value *event) { return value_of(event, "frames"); }

static int first_is(const value *event, const char *name)
{
    const value *frames = frames_of(event);
    if (frames && frames->first && !strcmp(text_of(frames->first, "name"), name)) return 1;
    printf("    the first frame is '%s', not '%s'\n", frames ? text_of(frames->first, "name") : "", name);
    return 0;
}

/* The block of a snapshot that begins there. */
static const value *block_at(const value *v, const void *ptr)
{
    const value *segment, *block;
    for (segment = value_of(v, "segments")->first; segment; segment = segment->next)
        for (block = value_of(segment, "blocks")->first; block; block = block->next)
            if (number_of(block, "address") == (uintptr_t)ptr) return block;
    return NULL;
}

static const value *depot_of(const value *v) { return value_of(value_of(v, "galloc"), "stacks"); }

/* ---- what is noted ----------------------------------------------------------------------------------------------- */

TEST(one_site_is_one_stack_and_another_site_another)
{
    galloc_config config = config_stacks("memory_limit:1G", 8);
    galloc_pool *pool;
    const value *e, *first = NULL;
    value *v;
    void *p[6];
    int i;
    begin();
    pool = pool_new(&config);
    for (i = 0; i < 6; i++) {
        if (i < 4) p[i] = site_malloc(pool, 5000, NULL);
        else p[i] = site_alloc(pool, 5000, NULL);
    }
    for (i = 0; i < 6; i++) site_free(p[i], NULL);
    v = snapshot(pool, GALLOC_SNAPSHOT_JSON);
    for (e = events_of(v)->first, i = 0; e; e = e->next) {
        if (!strcmp(text_of(e, "action"), "alloc")) {
            EXPECT(first_is(e, i++ < 4 ? "site_malloc" : "site_alloc"));
            if (!first) first = frames_of(e);
            EXPECT_EQ(values_equal(first->first, frames_of(e)->first), i <= 4);
        } else if (!strcmp(text_of(e, "action"), "free_requested")) {
            EXPECT(first_is(e, "site_free"));
        } else {
            EXPECT(!frames_of(e)->first);
        }
    }
    EXPECT_EQ(i, 6);
    EXPECT_EQ(number_of(depot_of(v), "kept"), 3);
    EXPECT_EQ(number_of(depot_of(v), "lost"), 0);
    value_free(v);
    pool_end(pool);
    finish();
}

/* Stacks that begin alike and end alike differ by what is between. */
TEST(all_frames_of_a_stack_count)
{
    galloc_config config = config_stacks("memory_limit:1G", 32);
    galloc_pool *pool;
    value *v;
    unsigned path;
    begin();
    pool = pool_new(&config);
    for (path = 0; path < 2 * 64; path++) OK(galloc_free(site_deep(pool, path % 64, 3), NULL));
    v = snapshot(pool, GALLOC_SNAPSHOT_JSON);
    EXPECT_EQ(number_of(depot_of(v), "kept"), 64 + 1);
    value_free(v);
    pool_end(pool);
    finish();
}

/* A frame tells where addr2line finds the call: in which file, and how far from its beginning. */
TEST(a_frame_is_a_place_in_a_file)
{
    galloc_config config = config_stacks("memory_limit:1G", 8);
    galloc_pool *pool;
    const value *frame;
    value *v;
    Dl_info here;
    void *p;
    begin();
    pool = pool_new(&config);
    p = site_malloc(pool, 5000, NULL);
    v = snapshot(pool, GALLOC_SNAPSHOT_JSON);
    frame = frames_of(event_named(v, "alloc"))->first;
    EXPECT(dladdr((void *)(uintptr_t)site_malloc, &here));
    EXPECT(!strcmp(text_of(frame, "filename"), here.dli_fname));
    EXPECT_EQ(value_count(frame), 3);
    if (((const char *)here.dli_fbase)[16] == 3) { /* position-independent */
        size_t begins = (size_t)((char *)here.dli_saddr - (char *)here.dli_fbase);
        EXPECT(number_of(frame, "line") > begins && number_of(frame, "line") < begins + 1000);
    }
    EXPECT(values_equal(frame, frames_of(block_at(v, p))->first));
    value_free(v);
    OK(galloc_free(p, NULL));
    pool_end(pool);
    finish();
}

TEST(so_many_frames)
{
    static const int most[] = {1, 2, 8, 31, 32};
    for (size_t i = 0; i < sizeof most / sizeof *most; i++) {
        galloc_config config = config_stacks("memory_limit:1G", most[i]);
        galloc_pool *pool;
        value *v;
        void *p;
        begin();
        pool = pool_new(&config);
        p = site_deep(pool, 0, 50);
        v = snapshot(pool, GALLOC_SNAPSHOT_JSON);
        EXPECT(first_is(event_named(v, "alloc"), "site_malloc"));
        EXPECT(value_count(frames_of(event_named(v, "alloc"))) >= (size_t)most[i]);
        EXPECT(value_count(frames_of(event_named(v, "alloc"))) <= (size_t)most[i] + 1);
        value_free(v);
        OK(galloc_free(p, NULL));
        pool_end(pool);
        finish();
    }
}

/* More frames, or fewer, are asked for between two calls at one place. */
TEST(another_number_of_frames_is_asked_for_later)
{
    for (int fewer = 0; fewer < 2; fewer++) {
        galloc_config config = config_stacks("memory_limit:1G", fewer ? 12 : 2);
        galloc_pool *pool;
        begin();
        pool = pool_new(&config);
        for (int i = 0; i < 4; i++) {
            value *v;
            if (i == 2) OK(galloc_pool_history_stacks(pool, fewer ? 2 : 12));
            OK(galloc_free(site_deep(pool, 0, 20), NULL));
            v = snapshot(pool, GALLOC_SNAPSHOT_JSON);
            size_t frames = 0;
            for (const value *e = events_of(v)->first; e; e = e->next)
                if (!strcmp(text_of(e, "action"), "alloc")) frames = value_count(frames_of(e));
            EXPECT((i < 2) != fewer ? frames <= 3 : frames >= 12);
            value_free(v);
        }
        pool_end(pool);
        finish();
    }
}

static void expect_first(galloc_pool *pool, const char *action, const char *name)
{
    value *v = snapshot(pool, GALLOC_SNAPSHOT_PICKLE);
    EXPECT(first_is(event_named(v, action), name));
    value_free(v);
}

/* ---- stacks that are known --------------------------------------------------------------------------------------- */

enum { TURNS = 300, WINDINGS = 6 };

static struct {
    void *at[WINDINGS + 6]; /* what the C library says: frames of the test's and of sanitizers, then the callers */
    int n;
} truth[TURNS];

SITE void *site_checked(galloc_pool *pool, int turn);
SITE void *site_checked(galloc_pool *pool, int turn)
{
    void *ptr = NULL;
    truth[turn].n = backtrace(truth[turn].at, WINDINGS + 6);
    OK(galloc_pool_malloc(pool, &ptr, 5000, NULL));
    STAYS();
    return ptr;
}

typedef void *winding(galloc_pool *pool, int turn, unsigned path, int depth);
static winding *const windings[3];

/* Frames of three sizes; one of two places calls on. */
#define WINDING(name, bytes)                                                                                           \
    SITE winding name;                                                                                                 \
    SITE void *name(galloc_pool *pool, int turn, unsigned path, int depth)                                             \
    {                                                                                                                  \
        volatile char room[bytes];                                                                                     \
        winding *next = windings[path / 6 % 3];                                                                        \
        void *ptr;                                                                                                     \
        room[0] = room[sizeof room - 1] = 1;                                                                           \
        if (depth == 0) return site_checked(pool, turn);                                                               \
        if (path / 3 % 2) {                                                                                            \
            ptr = next(pool, turn, path / 6, depth - 1);                                                               \
            __asm__ volatile("# 0");                                                                                   \
        } else {                                                                                                       \
            ptr = next(pool, turn, path / 6, depth - 1);                                                               \
            __asm__ volatile("# 1");                                                                                   \
        }                                                                                                              \
        room[0] = 0;                                                                                                   \
        return ptr;                                                                                                    \
    }

WINDING(site_winding_16, 16)
WINDING(site_winding_64, 64)
WINDING(site_winding_112, 112)

static winding *const windings[3] = {site_winding_16, site_winding_64, site_winding_112};

static void *wind(galloc_pool *pool, int turn, unsigned path, int depth)
{
    return windings[path % 3](pool, turn, path, depth);
}

/* The place in its file of a return address, as a frame has it. */
static size_t line_of(const void *at)
{
    Dl_info place;
    size_t line = (size_t)at - 1;
    if (!EXPECT(dladdr(at, &place))) return 0;
    return ((const char *)place.dli_fbase)[16] == 2 ? line : line - (size_t)place.dli_fbase;
}

static void expect_truth(const value *event, int turn)
{
    const value *frame = frames_of(event)->first;
    int i = 0, compared = 0;
    Dl_info place;
    EXPECT(first_is(event, "site_checked"));
    while (i < truth[turn].n && dladdr(truth[turn].at[i], &place) && place.dli_saddr != (void *)(uintptr_t)site_checked)
        i++;
    for (i++, frame = frame->next; frame && i < truth[turn].n; i++, compared++, frame = frame->next)
        EXPECT_EQ(number_of(frame, "line"), line_of(truth[turn].at[i]));
    EXPECT(compared >= 1);
}

/* Calls come back from the same places and from others, with the frames between them larger and smaller, so that the
   same part of the stack belongs to one function now and to another then. */
TEST(a_stack_that_was_taken_before_is_that_of_the_call)
{
    dice d = {test_seed()};
    for (int round = 0; round < 60; round++) {
        galloc_config config = config_stacks("memory_limit:1G", round % 3 ? WINDINGS : 2);
        galloc_pool *pool;
        const value *e;
        value *v;
        int turn = 0;
        begin();
        pool = pool_new(&config);
        for (int i = 0; i < TURNS; i++) {
            int depth = (int)roll_below(&d, WINDINGS);
            void *p = wind(pool, i, roll_below(&d, round % 2 ? 6 : 1296), depth);
            if (i == TURNS / 2) OK(galloc_pool_history_stacks(pool, round % 3 ? 2 : WINDINGS));
            OK(galloc_free(p, NULL));
        }
        v = snapshot(pool, GALLOC_SNAPSHOT_JSON);
        for (e = events_of(v)->first; e; e = e->next)
            if (!strcmp(text_of(e, "action"), "alloc")) expect_truth(e, turn++);
        EXPECT_EQ(turn, TURNS);
        value_free(v);
        pool_end(pool);
        finish();
    }
}

static struct {
    ucontext_t back, there;
    galloc_pool *pool;
    size_t room;
} fiber;

enum { FIBER = 1 << 17 };

static void run_fiber(void)
{
    volatile char room[fiber.room];
    room[0] = room[fiber.room - 1] = 1;
    OK(galloc_free(site_malloc(fiber.pool, 5000, NULL), NULL));
    EXPECT_EQ(room[0], 1);
}

/* A call comes from a stack of the program's own; then from one that ends below the places of that stack, where nothing
   is mapped any more. */
TEST(stacks_of_the_programs_own_are_not_read_again)
{
    char *stack = mmap(NULL, FIBER, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    galloc_config config = config_stacks("memory_limit:1G", 8);
    begin();
    fiber.pool = pool_new(&config);
    for (int half = 0; half < 2; half++) {
        size_t bytes = half ? FIBER / 2 : FIBER;
        for (int i = 0; i < 3; i++) {
            fiber.room = FIBER / 4 + (half ? 0 : FIBER / 2);
            OK((cudaError_t)getcontext(&fiber.there));
            fiber.there.uc_stack.ss_sp = stack;
            fiber.there.uc_stack.ss_size = bytes;
            fiber.there.uc_link = &fiber.back;
            makecontext(&fiber.there, run_fiber, 0);
            OK((cudaError_t)swapcontext(&fiber.back, &fiber.there));
        }
        OK((cudaError_t)munmap(stack + (half ? 0 : FIBER / 2), FIBER / 2));
        expect_first(fiber.pool, "alloc", "site_malloc");
    }
    pool_end(fiber.pool);
    finish();
}

/* ---- all calls, in all kinds of pools ---------------------------------------------------------------------------- */

static const char *const settings[] = {
    "memory_limit:2G", "strategy:pooled", "strategy:heuristic", "expandable_segments:False", "like:pytorch",
    "like:pytorch,expandable_segments:True", "backend:cudaMalloc", "backend:cudaMallocAsync", "stats:exact",
    "stream_check:off"};

/* The first call on a stream, and one that finds its state; a block that is new, and one that was freed. */
static void each_call(galloc_pool *pool, void *(*site)(galloc_pool *, size_t, cudaStream_t), const char *name)
{
    cudaStream_t stream = stream_new();
    void *p;
    int i;
    for (i = 0; i < 4; i++) {
        p = site(pool, i < 3 ? 5000 : MIB(30), stream);
        expect_first(pool, "alloc", name);
        if (i % 2) site_free(p, stream);
        else site_free_after(p, stream);
        expect_first(pool, "free_requested", i % 2 ? "site_free" : "site_free_after");
    }
    sim_run(-1);
    stream_end(stream);
}

TEST(each_call_in_each_kind_of_pool)
{
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
        galloc_config config = config_stacks(settings[i], 6);
        galloc_pool *pool;
        void *p;
        begin();
        pool = pool_new(&config);
        each_call(pool, site_malloc, "site_malloc");
        each_call(pool, site_alloc, "site_alloc");
        p = get(pool, 5000, NULL);
        site_resize(p, 3000, NULL);
        expect_first(pool, "alloc", "site_resize");
        expect_first(pool, "free_requested", "site_resize");
        site_free(p, NULL);
        pool_end(pool);
        finish();
    }
}

/* galloc's own functions are left out where a stack begins, and nothing behind them. */
TEST(a_function_of_the_program_may_have_a_name_like_gallocs)
{
    galloc_config config = config_stacks("", 6);
    int seen = 0;
    begin();
    galloc_pool *pool = pool_new(&config);
    void *p = galloc_site(pool);
    value *v = snapshot(pool, GALLOC_SNAPSHOT_JSON);
    const value *frames = frames_of(block_at(v, p));
    EXPECT(frames && first_is(block_at(v, p), "site_malloc"));
    for (const value *frame = frames ? frames->first : NULL; frame; frame = frame->next)
        seen += !strcmp(text_of(frame, "name"), "galloc_site");
    EXPECT_EQ(seen, 1);
    value_free(v);
    OK(galloc_free(p, NULL));
    pool_end(pool);
    finish();
}

TEST(calls_of_the_default_pool)
{
    galloc_pool *pool;
    begin();
    OK(galloc_pool_default(&pool, 0));
    OK(galloc_pool_history_stacks(pool, 6));
    OK(galloc_pool_history(pool, 1000));
    each_call(pool, site_default, "site_default");
    each_call(pool, site_growable, "site_growable");
    finish();
}

/* A call in a callback has a stack of its own, and leaves that of the call outside. */
static void *told_block;

SITE void site_told(galloc_pool *pool, void *addr, size_t bytes, void *user)
{
    (void)addr, (void)bytes, (void)user;
    site_free(told_block, NULL);
    told_block = NULL;
    (void)pool;
}

TEST(a_call_in_a_callback)
{
    galloc_config config = config_stacks("memory_limit:1G", 8);
    galloc_callbacks callbacks = {.on_map = site_told};
    galloc_pool *pool;
    value *v;
    void *p;
    begin();
    pool = pool_new(&config);
    told_block = get(pool, 5000, NULL);
    OK(galloc_pool_set_callbacks(pool, &callbacks));
    told_block = told_block ? told_block : get(pool, 5000, NULL);
    p = site_malloc(pool, MIB(64), NULL);
    EXPECT(!told_block);
    v = snapshot(pool, GALLOC_SNAPSHOT_JSON);
    EXPECT(first_is(event_named(v, "alloc"), "site_malloc"));
    EXPECT(first_is(event_named(v, "free_requested"), "site_free"));
    EXPECT(!strcmp(text_of(frames_of(event_named(v, "free_requested"))->first->next, "name"), "site_told"));
    EXPECT(first_is(block_at(v, p), "site_malloc"));
    value_free(v);
    OK(galloc_free(p, NULL));
    OK(galloc_pool_set_callbacks(pool, NULL));
    pool_end(pool);
    finish();
}

/* A call of another pool, which keeps no stacks, does not get the last one's; nor does a block whose memory a reset
   took. */
TEST(stacks_of_other_calls)
{
    galloc_config with = config_stacks("expandable_segments:False", 8), without = config_stacks("", 0);
    galloc_pool *pools[2];
    const value *e;
    value *v;
    void *p;
    begin();
    pools[0] = pool_new(&with);
    pools[1] = pool_new(&without);
    OK(galloc_free(get(pools[0], 5000, NULL), NULL));
    p = get(pools[1], 5000, NULL);
    v = snapshot(pools[1], GALLOC_SNAPSHOT_JSON);
    EXPECT_EQ(events_named(v, "alloc"), 1);
    EXPECT(!frames_of(event_named(v, "alloc"))->first);
    EXPECT(!frames_of(block_at(v, p))->first);
    value_free(v);
    OK(galloc_free(p, NULL));
    p = get(pools[0], MIB(20), NULL);
    OK(cudaDeviceReset());
    OK(galloc_pool_trim(pools[0], 0, NULL));
    OK(galloc_free(get(pools[0], MIB(20), NULL), NULL)); /* at the same addresses */
    v = snapshot(pools[0], GALLOC_SNAPSHOT_JSON);
    for (e = events_of(v)->first; e; e = e->next)
        if (!strcmp(text_of(e, "action"), "free_requested") && !frames_of(e)->first) break;
    EXPECT(e);
    value_free(v);
    pool_end(pools[0]);
    pool_end(pools[1]);
    finish();
}

/* Where other entries have a stack's number, an annotation has text. */
TEST(annotations_and_other_entries_have_none)
{
    galloc_config config = config_stacks("memory_limit:64M", 8);
    char note[48];
    galloc_pool *pool;
    const value *e;
    value *v;
    void *p;
    begin();
    pool = pool_new(&config);
    memset(note, 0, sizeof note);
    memset(note, 1, sizeof note - 1); /* each is a '?' */
    p = site_malloc(pool, MIB(40), NULL);
    OK(galloc_annotate(note));
    EXPECT_EQ(galloc_pool_malloc(pool, &(void *){NULL}, MIB(30), NULL), cudaErrorMemoryAllocation);
    v = snapshot(pool, GALLOC_SNAPSHOT_JSON);
    EXPECT_EQ(events_named(v, "annotate") + events_named(v, "oom"), 2);
    for (e = events_of(v)->first; e; e = e->next)
        EXPECT_EQ(frames_of(e)->first != NULL, !strcmp(text_of(e, "action"), "alloc"));
    value_free(v);
    OK(galloc_free(p, NULL));
    pool_end(pool);
    finish();
}

/* ---- blocks ------------------------------------------------------------------------------------------------------ */

/* What is still used says who allocated it, also when the entry is overwritten and the history has ended. */
TEST(blocks_remember_their_stack)
{
    galloc_config config = config_stacks("memory_limit:1G,history:5", 8);
    galloc_pool *pool;
    cudaStream_t stream;
    value *v;
    void *p, *q;
    int i;
    begin();
    pool = pool_new(&config);
    stream = stream_new();
    p = site_malloc(pool, 5000, stream);
    for (i = 0; i < 9; i++) OK(galloc_free(get(pool, 7000, stream), stream));
    v = snapshot(pool, GALLOC_SNAPSHOT_JSON);
    EXPECT(first_is(block_at(v, p), "site_malloc"));
    value_free(v);
    OK(galloc_pool_history(pool, 0));
    q = site_alloc(pool, 6000, stream);
    v = snapshot(pool, GALLOC_SNAPSHOT_PICKLE);
    EXPECT(first_is(block_at(v, p), "site_malloc"));
    EXPECT(!frames_of(block_at(v, q))->first);
    value_free(v);
    /* Freed and allocated again without a history, by the stream's cache: its stack is gone. */
    OK(galloc_free(p, stream));
    v = snapshot(pool, GALLOC_SNAPSHOT_PICKLE);
    EXPECT(!block_at(v, p) || !frames_of(block_at(v, p))->first);
    value_free(v);
    EXPECT(site_alloc(pool, 5000, stream) == p);
    v = snapshot(pool, GALLOC_SNAPSHOT_PICKLE);
    EXPECT(!frames_of(block_at(v, p))->first);
    value_free(v);
    OK(galloc_free(p, stream));
    OK(galloc_free(q, stream));
    stream_end(stream);
    pool_end(pool);
    finish();
}

/* Of several sizes, a block has the stack of the call that gave it the last one. */
TEST(a_resized_block_has_the_stack_of_its_last_resize)
{
    galloc_config config = config_stacks("memory_limit:1G", 8);
    galloc_pool *pool;
    value *v;
    void *p[3];
    int i;
    begin();
    pool = pool_new(&config);
    p[0] = site_malloc(pool, 5000, NULL);
    p[1] = site_alloc(pool, 5000, NULL);
    p[2] = get(pool, 5000, NULL);
    for (i = 0; i < 3; i++) site_resize(p[i], 3000, NULL);
    v = snapshot(pool, GALLOC_SNAPSHOT_JSON);
    for (i = 0; i < 3; i++) EXPECT(first_is(block_at(v, p[i]), "site_resize"));
    value_free(v);
    for (i = 0; i < 3; i++) OK(galloc_free(p[i], NULL));
    pool_end(pool);
    finish();
}

/* Pages move under other blocks, and a capture ends: the stacks stay with their blocks. */
TEST(moves_and_captures)
{
    galloc_config config = config_stacks("memory_limit:128M", 8);
    galloc_pool *pool;
    cudaStream_t stream;
    cudaGraph_t graph = NULL;
    value *v;
    void *small[32], *large, *result;
    size_t i;
    begin();
    pool = pool_new(&config);
    stream = stream_new();
    for (i = 0; i < 32; i++) small[i] = i % 2 ? site_malloc(pool, MIB(4), NULL) : site_alloc(pool, MIB(4), NULL);
    for (i = 0; i < 32; i += 2) OK(galloc_free(small[i], NULL));
    sim_run(-1);
    large = site_alloc(pool, MIB(40), NULL);
    EXPECT(stats_of(pool).moves > 0);
    OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    result = site_malloc(pool, MIB(2), stream);
    site_free(site_alloc(pool, MIB(2), stream), stream);
    OK(cudaStreamEndCapture(stream, &graph));
    v = snapshot(pool, GALLOC_SNAPSHOT_JSON);
    for (i = 1; i < 32; i += 2) EXPECT(first_is(block_at(v, small[i]), "site_malloc"));
    EXPECT(first_is(block_at(v, large), "site_alloc"));
    EXPECT(first_is(block_at(v, result), "site_malloc"));
    EXPECT(first_is(event_named(v, "free_requested"), "site_free"));
    EXPECT(!frames_of(event_named(v, "segment_map"))->first);
    value_free(v);
    for (i = 1; i < 32; i += 2) OK(galloc_free(small[i], NULL));
    OK(galloc_free(large, NULL));
    OK(galloc_free(result, stream));
    OK(cudaGraphDestroy(graph));
    stream_end(stream);
    pool_end(pool);
    finish();
}

/* ---- formats ----------------------------------------------------------------------------------------------------- */

TEST(json_and_pickle_agree)
{
    galloc_config config = config_stacks("memory_limit:1G,history:10000", 16);
    galloc_pool *pool;
    galloc_request request = {.bytes = 5000, .tag = 7};
    const value *a, *b;
    value *json, *pickle;
    void *p[300], *tagged;
    int i;
    begin();
    pool = pool_new(&config);
    OK(galloc_tag_name(7, "weights"));
    request.pool = pool;
    OK(galloc_alloc(&tagged, &request));
    for (i = 0; i < 300; i++) p[i] = site_deep(pool, (unsigned)i, 5);
    for (i = 0; i < 300; i += 2) site_free(p[i], NULL);
    json = snapshot(pool, GALLOC_SNAPSHOT_JSON);
    pickle = snapshot(pool, GALLOC_SNAPSHOT_PICKLE);
    EXPECT(values_equal(value_of(json, "segments")->first, value_of(pickle, "segments")->first));
    for (a = events_of(json)->first, b = events_of(pickle)->first; a && b; a = a->next, b = b->next)
        EXPECT(values_equal(a->first, b->first));
    EXPECT(!a && b && !b->next); /* the pickle has the snapshot before */
    EXPECT_EQ(number_of(depot_of(pickle), "kept"), 1 + 300 + 1);
    EXPECT(first_is(block_at(json, tagged), "weights")); /* a tag's name is before the stack */
    EXPECT(frames_of(block_at(json, tagged))->first->next);
    value_free(json);
    value_free(pickle);
    OK(galloc_tag_name(7, NULL));
    for (i = 1; i < 300; i += 2) OK(galloc_free(p[i], NULL));
    OK(galloc_free(tagged, NULL));
    pool_end(pool);
    finish();
}

/* Blocks of one call whose tags have names, other names, and none: each names its own in a pickle, where lists of
   frames that were written before are not written again. */
TEST(a_name_is_not_that_of_another_block_with_the_same_stack)
{
    static const char *const names[] = {"weights", "gradients", "site_tagged"};
    galloc_config config = config_stacks("memory_limit:1G", 8);
    galloc_pool *pool;
    value *json, *pickle;
    void *p[9];
    uint32_t i;
    begin();
    pool = pool_new(&config);
    OK(galloc_tag_name(1, names[0]));
    OK(galloc_tag_name(2, names[1]));
    for (i = 0; i < 9; i++) p[i] = site_tagged(pool, i % 3 + 1);
    json = snapshot(pool, GALLOC_SNAPSHOT_JSON);
    pickle = snapshot(pool, GALLOC_SNAPSHOT_PICKLE);
    EXPECT(values_equal(value_of(json, "segments")->first, value_of(pickle, "segments")->first));
    for (i = 0; i < 9; i++) EXPECT(first_is(block_at(pickle, p[i]), names[i % 3]));
    value_free(json);
    value_free(pickle);
    for (i = 0; i < 9; i++) OK(galloc_free(p[i], NULL));
    OK(galloc_tag_name(1, NULL));
    OK(galloc_tag_name(2, NULL));
    pool_end(pool);
    finish();
}

TEST(what_is_live_by_stack)
{
    galloc_config config = config_stacks("memory_limit:1G", 8);
    char said[GALLOC_REPORT_TEXT], nameless[600];
    galloc_pool *pool;
    const char *one, *other;
    void *p[5];
    int i;
    begin();
    pool = pool_limited(GIB(1));
    p[0] = site_malloc(pool, MIB(1), NULL);
    OK(galloc_live_text(pool, said, sizeof said));
    EXPECT(!strstr(said, "most by stack"));
    OK(galloc_free(p[0], NULL));
    pool_end(pool);
    pool = pool_new(&config);
    for (i = 0; i < 3; i++) p[i] = site_malloc(pool, 1000 + (size_t)i, NULL);
    for (i = 3; i < 5; i++) p[i] = site_alloc(pool, 2000, NULL);
    OK(galloc_live_text(pool, said, sizeof said));
    EXPECT(strstr(said, "blocks in use: 5, of 7003 bytes\n  2 of 2000 bytes, stream 0\n  1 of 1002 bytes"));
    one = strstr(said, "most by stack:\n  4000 bytes in 2 blocks\n      site_alloc+0x");
    other = strstr(said, "\n  3003 bytes in 3 blocks\n      site_malloc+0x");
    if (!EXPECT(one && other && one < other)) printf("%s", said);
    snprintf(nameless, sizeof nameless, "(%s)\n      %s(+0x", program_invocation_short_name,
             program_invocation_short_name);
    EXPECT(one && strstr(one, nameless)); /* a static function has no name */
    for (i = 0; i < 5; i++) OK(galloc_free(p[i], NULL));
    pool_end(pool);
    finish();
}

TEST(what_is_live_by_stack_is_told_beside_more_without_a_stack)
{
    begin();
    galloc_pool *pool = pool_expandable(1);
    char told[GALLOC_REPORT_TEXT];
    void *p = get(pool, MIB(10), NULL);
    OK(galloc_pool_history(pool, 100));
    OK(galloc_pool_history_stacks(pool, 8));
    void *q = site_malloc(pool, MIB(1), NULL);
    OK(galloc_live_text(pool, told, sizeof told));
    EXPECT(strstr(told, "most by stack") && strstr(told, "1048576 bytes in 1 blocks\n"));
    OK(galloc_free(p, NULL));
    site_free(q, NULL);
    pool_end(pool);
    finish();
}

TEST(what_is_live_by_stack_has_the_frames_of_its_stack_alone)
{
    galloc_config config = config_stacks("memory_limit:1G", 1);
    char said[GALLOC_REPORT_TEXT];
    int frames = 0;
    begin();
    galloc_pool *pool = pool_new(&config);
    void *p = site_malloc(pool, 1000, NULL), *q = site_alloc(pool, 2000, NULL);
    OK(galloc_live_text(pool, said, sizeof said));
    for (const char *at = said; (at = strstr(at, "\n      ")) != NULL; at++) frames++;
    if (!EXPECT_EQ(frames, 2)) printf("%s", said);
    OK(galloc_free(p, NULL));
    OK(galloc_free(q, NULL));
    pool_end(pool);
    finish();
}

/* A program that the shell finds along PATH has no folder in its name. */
TEST(a_program_without_a_folder_has_its_name)
{
    char path[4096];
    ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);
    int status = -1;
    pid_t child;
    if (!EXPECT(n > 0)) return;
    path[n] = 0;
    fflush(stdout);
    child = fork();
    if (child == 0) {
        char *name = strrchr(path, '/');
        *name++ = 0;
        if (setenv("PATH", path, 1) || !freopen("/dev/null", "w", stdout)) _exit(3);
        (void)execlp(name, name, "what_is_live_by_stack", (char *)NULL);
        _exit(3);
    }
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* Only the stacks that hold most are named, whichever was taken first. */
TEST(the_stacks_that_hold_most_are_named)
{
    galloc_config config = config_stacks("memory_limit:1G", 8);
    char said[GALLOC_REPORT_TEXT];
    void *p[64];
    int named = 0;
    begin();
    galloc_pool *pool = pool_new(&config);
    for (unsigned i = 0; i < 64; i++) p[i] = site_deep(pool, i * 7 % 16, 4);
    OK(galloc_live_text(pool, said, sizeof said));
    for (const char *at = said; (at = strstr(at, "4000 bytes in 4 blocks")) != NULL; at++) named++;
    EXPECT_EQ(named, 3);
    for (int i = 0; i < 64; i++) OK(galloc_free(p[i], NULL));
    pool_end(pool);
    finish();
}

/* The name is as long as the text shows names. Each of three paths has another stack. */
#define SITE_LONG                                                                                                      \
    site_whose_name_is_as_long_as_those_that_compilers_make_of_templates_within_templates_within_name_spaces

SITE void *SITE_LONG(const galloc_request *request, int path, int depth);
SITE void *SITE_LONG(const galloc_request *request, int path, int depth)
{
    void *ptr = NULL;
    if (depth == 0) {
        OK(galloc_alloc(&ptr, request));
        STAYS();
        return ptr;
    }
    switch (path) {
    case 0: ptr = SITE_LONG(request, path, depth - 1); __asm__ volatile("# 0"); break;
    case 1: ptr = SITE_LONG(request, path, depth - 1); __asm__ volatile("# 1"); break;
    default: ptr = SITE_LONG(request, path, depth - 1); __asm__ volatile("# 2"); break;
    }
    return ptr;
}

/* More kinds, more stacks and more frames than the text shows, all with long names. */
TEST(a_text_of_long_names_fits)
{
    enum { KINDS = 20, FIRST_TAG = 2000000000 };
    galloc_config config = config_stacks("", 32);
    char said[GALLOC_REPORT_TEXT];
    void *p[KINDS];
    begin();
    galloc_pool *pool = pool_new(&config);
    for (uint32_t i = 0; i < KINDS; i++) {
        galloc_request request = {.bytes = MIB(1) + i, .pool = pool, .tag = FIRST_TAG + i};
        OK(galloc_tag_name(request.tag, "a name of a tag, as long as such a name can be."));
        p[i] = SITE_LONG(&request, (int)i % 3, 8 + (int)i % 2);
    }
    OK(galloc_live_text(pool, said, sizeof said));
    EXPECT(strstr(said, "and others, of 4 kinds\n"));
    EXPECT(strlen(said) > 4096);
    for (uint32_t i = 0; i < KINDS; i++) OK(galloc_tag_name(FIRST_TAG + i, NULL));
    for (int i = 0; i < KINDS; i++) OK(galloc_free(p[i], NULL));
    pool_end(pool);
    finish();
}

static jmp_buf back;

SITE __attribute__((noreturn)) void site_leaving(galloc_pool *pool, void **ptr);
SITE __attribute__((noreturn)) void site_left(galloc_pool *pool, void **ptr);
SITE void site_behind(void);

SITE void site_leaving(galloc_pool *pool, void **ptr)
{
    *ptr = site_malloc(pool, 1000, NULL);
    longjmp(back, 1);
}

SITE void site_left(galloc_pool *pool, void **ptr) { site_leaving(pool, ptr); }
SITE void site_behind(void) { STAYS(); }

/* Nothing follows the call in its function: where it would return to is no part of it. */
TEST(a_caller_that_ends_with_its_call_has_its_name)
{
    galloc_config config = config_stacks("memory_limit:1G", 8);
    static char said[GALLOC_REPORT_TEXT];
    static void *p;
    begin();
    galloc_pool *pool = pool_new(&config);
    site_behind();
    if (!setjmp(back)) site_left(pool, &p);
    OK(galloc_live_text(pool, said, sizeof said));
    if (!EXPECT(strstr(said, "site_leaving+0x") && strstr(said, "site_left+0x"))) printf("%s", said);
    OK(galloc_free(p, NULL));
    pool_end(pool);
    finish();
}

/* With one stack, the number of frames is that of its event, and of galloc's own, which are kept and not shown. */
TEST(frames_are_counted)
{
    galloc_config config = config_stacks("memory_limit:1G", 8);
    begin();
    galloc_pool *pool = pool_new(&config);
    void *p = site_malloc(pool, 5000, NULL);
    value *v = snapshot(pool, GALLOC_SNAPSHOT_JSON);
    const value *frame = frames_of(event_named(v, "alloc"))->first;
    uint64_t frames = 0;
    for (; frame; frame = frame->next) frames++;
    EXPECT(frames > 1);
    EXPECT_EQ(number_of(depot_of(v), "kept"), 1);
    EXPECT(number_of(depot_of(v), "frames") >= frames && number_of(depot_of(v), "frames") <= frames + 24);
    value_free(v);
    OK(galloc_free(p, NULL));
    pool_end(pool);
    finish();
}

/* ---- limits ------------------------------------------------------------------------------------------------------ */

/* A stack that is the beginning of others has a number of its own, however full the depot is of those. */
TEST(each_stack_has_its_own_number)
{
    enum { FRAMES = 32, MANY = 30000 };
    begin();
    galloc_pool *pool = pool_new(NULL);
    OK(galloc_pool_history_stacks(pool, FRAMES));
    void *at[FRAMES];
    uint32_t first = 0, number;
    for (uintptr_t i = 0; i < FRAMES; i++) at[i] = (void *)(4096 + 16 * i);
    for (uintptr_t i = 0; i < MANY; i++) {
        at[FRAMES - 1] = (void *)(1 << 20 | 16 * i);
        number = inside_stack_number(at, FRAMES);
        if (!i) first = number;
        EXPECT_EQ(number, first + i);
    }
    for (uint32_t n = 1; n < FRAMES; n++) EXPECT_EQ(inside_stack_number(at, n), first + MANY + n - 1);
    EXPECT_EQ(inside_stack_number(at, FRAMES), first + MANY - 1);
    pool_end(pool);
    finish();
}

/* More stacks than the depot takes, by their number and by their frames: the rest is counted, and nothing fails. */
static void overflow(int frames, int depth, unsigned paths, uint64_t least, uint64_t most)
{
    galloc_config config = config_stacks("memory_limit:1G", frames);
    galloc_pool *pool;
    value *v;
    unsigned path;
    void *p;
    begin();
    pool = pool_new(&config);
    p = site_malloc(pool, 5000, NULL);
    for (path = 0; path < paths; path++) OK(galloc_free(site_deep(pool, path, depth), NULL));
    EXPECT_EQ(log_lines, 1);
    EXPECT(strstr(log_text, "no room for more stacks: "));
    v = snapshot(pool, GALLOC_SNAPSHOT_PICKLE);
    EXPECT(number_of(depot_of(v), "kept") >= least && number_of(depot_of(v), "kept") <= most);
    EXPECT(number_of(depot_of(v), "frames") <= 1 << 20);
    EXPECT_EQ(number_of(depot_of(v), "kept") + number_of(depot_of(v), "lost"), paths + 2); /* `p`, and the free */
    EXPECT(!frames_of(event_named(v, "alloc"))->first);
    EXPECT(frames_of(event_named(v, "free_requested"))->first);
    EXPECT(first_is(block_at(v, p), "site_malloc"));
    value_free(v);
    OK(galloc_free(p, NULL));
    pool_end(pool);
    finish();
}

TEST(more_stacks_than_there_is_room_for) { overflow(12, 9, 1 << 17, 65535, 65535); }
TEST(more_frames_than_there_is_room_for) { overflow(32, 28, 1 << 16, 30000, 40000); }

TEST(without_host_memory)
{
    galloc_config config = config_stacks("memory_limit:1G", 8);
    galloc_pool *pool = NULL;
    cudaError_t error = cudaErrorMemoryAllocation;
    text t = {NULL, 0, 0};
    value *v;
    void *p, *q;
    long nth;
    begin();
    for (nth = 1; error && nth < 40; nth++) {
        sim_fail_malloc(nth, 0);
        error = galloc_pool_create(&pool, &config);
        sim_fail_malloc(0, 0);
        EXPECT(!error || error == cudaErrorMemoryAllocation);
        if (error) OK(galloc_shutdown()); /* the driver's table and the depot, which are asked for once */
    }
    EXPECT(pool);
    /* Calls take stacks without host memory. */
    p = site_malloc(pool, 5000, NULL);
    q = get(pool, 5000, NULL);
    sim_fail_malloc(1, 1);
    site_free(q, NULL);
    sim_fail_malloc(0, 0);
    for (nth = 1, error = cudaErrorMemoryAllocation; error && nth < 10; nth++) {
        size_t live = sim_malloc_live();
        sim_fail_malloc(nth, 0);
        error = galloc_snapshot(pool, GALLOC_SNAPSHOT_JSON, keep, &t);
        sim_fail_malloc(0, 0);
        EXPECT_EQ(sim_malloc_live(), live);
    }
    EXPECT_EQ(nth, 6); /* the state, its entries, its items, and the frames */
    free(t.data);
    v = snapshot(pool, GALLOC_SNAPSHOT_JSON);
    EXPECT(first_is(block_at(v, p), "site_malloc"));
    EXPECT(first_is(event_named(v, "free_requested"), "site_free"));
    value_free(v);
    OK(galloc_free(p, NULL));
    pool_end(pool);
    finish();
    /* Nor is the setting changed without. */
    begin();
    pool = pool_limited(GIB(1));
    OK(galloc_pool_history(pool, 10));
    sim_fail_malloc(1, 0);
    EXPECT_EQ(galloc_pool_history_stacks(pool, 8), cudaErrorMemoryAllocation);
    sim_fail_malloc(0, 0);
    OK(galloc_pool_config(pool, &config));
    EXPECT_EQ(config.history_stacks, 0);
    OK(galloc_free(get(pool, 5000, NULL), NULL));
    pool_end(pool);
    finish();
}

/* ---- at run time ------------------------------------------------------------------------------------------------- */

static int stop_at_once(void *user, const void *data, size_t bytes)
{
    (void)data, (void)bytes;
    return user == NULL;
}

TEST(a_snapshot_that_is_stopped_leaves_no_host_memory_behind)
{
    begin();
    galloc_config config = config_stacks("memory_limit:1G", 8);
    galloc_pool *pool = pool_new(&config);
    void *p = site_malloc(pool, 5000, NULL);
    EXPECT_EQ(galloc_snapshot(pool, GALLOC_SNAPSHOT_PICKLE, stop_at_once, NULL), cudaErrorOperatingSystem);
    site_free(p, NULL);
    pool_end(pool);
    finish();
}

TEST(stacks_begin_and_end_at_run_time)
{
    galloc_config config = config_limit(GIB(1));
    galloc_pool *pool;
    const value *e;
    value *v;
    int i;
    begin();
    config.history = 1000;
    pool = pool_new(&config);
    for (i = 0; i < 3; i++) {
        OK(galloc_pool_history_stacks(pool, i == 1 ? 8 : 0));
        OK(galloc_pool_config(pool, &config));
        EXPECT_EQ(config.history_stacks, i == 1 ? 8 : 0);
        OK(galloc_free(site_malloc(pool, 5000, NULL), NULL));
    }
    v = snapshot(pool, GALLOC_SNAPSHOT_JSON);
    for (e = events_of(v)->first, i = 0; e; e = e->next)
        if (!strcmp(text_of(e, "action"), "alloc")) EXPECT_EQ(frames_of(e)->first != NULL, i++ == 1);
    EXPECT_EQ(i, 3);
    value_free(v);
    EXPECT_EQ(galloc_pool_history_stacks(pool, 33), cudaErrorInvalidValue);
    EXPECT_EQ(galloc_pool_history_stacks(pool, SIZE_MAX), cudaErrorInvalidValue);
    EXPECT_EQ(galloc_pool_history_stacks(NULL, 1), cudaErrorInvalidValue);
    OK(galloc_pool_history_stacks(pool, 32));
    /* A new history keeps the setting; without one, calls keep no stacks. */
    OK(galloc_pool_history(pool, 100));
    OK(galloc_free(site_alloc(pool, 5000, NULL), NULL));
    expect_first(pool, "alloc", "site_alloc");
    v = snapshot(pool, GALLOC_SNAPSHOT_JSON);
    i = (int)number_of(depot_of(v), "kept");
    value_free(v);
    OK(galloc_pool_history(pool, 0));
    EXPECT_EQ(galloc_pool_check(pool), 0);
    OK(galloc_free(site_growable(pool, MIB(5), NULL), NULL));
    OK(galloc_free(site_deep(pool, 0, 5), NULL));
    v = snapshot(pool, GALLOC_SNAPSHOT_JSON);
    EXPECT_EQ(number_of(depot_of(v), "kept"), i);
    value_free(v);
    OK(galloc_pool_history(pool, 100));
    OK(galloc_free(site_malloc(pool, 5000, NULL), NULL));
    expect_first(pool, "alloc", "site_malloc");
    pool_end(pool);
    EXPECT_EQ(galloc_pool_history_stacks(pool, 1), cudaErrorInvalidResourceHandle);
    finish();
}

TEST(stacks_are_taken_with_no_lock_held)
{
    galloc_config config = config_limit(GIB(1));
    cudaStream_t stream;
    void *p;
    begin();
    backtraces.calls = backtraces.locked = 0;
    backtraces.pool = pool_new(&config);
    stream = stream_new();
    OK(galloc_pool_history(backtraces.pool, 100));
    p = site_malloc(backtraces.pool, 5000, NULL);
    EXPECT_EQ(backtraces.calls, 0);
    OK(galloc_pool_history_stacks(backtraces.pool, 8)); /* the first call may load a library */
    EXPECT_EQ(backtraces.calls, 1);
    site_free(p, NULL);
    site_free_after(site_malloc(backtraces.pool, 5000, stream), stream);
    site_free(site_alloc(backtraces.pool, MIB(64), stream), NULL);
    p = site_alloc(backtraces.pool, 5000, NULL);
    site_resize(p, 4000, NULL);
    site_free(p, NULL);
    EXPECT(backtraces.calls > 8);
    EXPECT_EQ(backtraces.locked, 0);
    sim_run(-1);
    stream_end(stream);
    pool_end(backtraces.pool);
    backtraces.pool = NULL;
    finish();
}

TEST(where_there_are_no_stacks_the_setting_is_refused)
{
    galloc_config config = config_stacks("memory_limit:1G", 8);
    galloc_pool *pool = NULL;
    begin();
    backtraces.missing = 1;
    EXPECT_EQ(galloc_pool_create(&pool, &config), cudaErrorNotSupported);
    EXPECT(!pool && strstr(galloc_last_message(), "history_stacks: this system gives no stacks of calls"));
    pool = pool_limited(GIB(1));
    EXPECT_EQ(galloc_pool_history_stacks(pool, 8), cudaErrorNotSupported);
    OK(galloc_pool_history_stacks(pool, 0));
    OK(galloc_pool_history(pool, 10));
    OK(galloc_free(get(pool, 5000, NULL), NULL));
    backtraces.missing = 0;
    pool_end(pool);
    finish();
}

static int stop;

static void *churn(void *pool)
{
    cudaStream_t stream = stream_new();
    unsigned i;
    for (i = 0; !__atomic_load_n(&stop, __ATOMIC_RELAXED); i++) {
        OK(galloc_free(site_deep(pool, i % 64, 3), NULL));
        site_free(site_malloc(pool, 5000, stream), stream);
    }
    sim_run(-1);
    stream_end(stream);
    return NULL;
}

TEST(stacks_beside_threads)
{
    galloc_pool *pool;
    pthread_t threads[3];
    const value *e;
    value *v;
    int i;
    begin();
    pool = pool_limited(GIB(2));
    stop = 0;
    for (i = 0; i < 3; i++) pthread_create(&threads[i], NULL, churn, pool);
    for (i = 0; i < 20; i++) {
        OK(galloc_pool_history_stacks(pool, 12));
        OK(galloc_pool_history(pool, 500));
        usleep(1000);
        v = snapshot(pool, i % 2 ? GALLOC_SNAPSHOT_JSON : GALLOC_SNAPSHOT_PICKLE);
        for (e = events_of(v)->first; e; e = e->next) {
            const value *frames = frames_of(e);
            if (!frames->first || strcmp(text_of(e, "action"), "alloc")) continue;
            EXPECT(first_is(e, "site_malloc"));
            if (number_of(e, "size") == 1000)
                EXPECT(!strcmp(text_of(frames->first->next, "name"), "site_deep"));
        }
        EXPECT(number_of(depot_of(v), "kept") <= 64 + 3); /* of three threads, which run the same */
        value_free(v);
        if (i % 2) OK(galloc_pool_history_stacks(pool, 0));
        if (i % 4 == 3) OK(galloc_pool_history(pool, 0));
        usleep(200);
    }
    __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
    for (i = 0; i < 3; i++) pthread_join(threads[i], NULL);
    pool_end(pool);
    finish();
}

static void *take_stacks(void *pool)
{
    site_free(site_malloc(pool, 5000, NULL), NULL);
    return NULL;
}

/* Bytes that the C library has given out and that stay when so many threads have ended. */
static size_t left_by_threads(galloc_pool *pool)
{
    size_t before = mallinfo2().uordblks;
    pthread_t thread;
    for (int i = 0; i < 100; i++) {
        pthread_create(&thread, NULL, take_stacks, pool);
        pthread_join(thread, NULL);
    }
    return mallinfo2().uordblks - before;
}

/* The simulated device keeps something of each thread, with stacks or without. */
TEST(threads_that_took_stacks_leave_no_host_memory_behind)
{
    begin();
    mallopt(M_ARENA_MAX, 1);
    galloc_pool *pool = pool_limited(GIB(1));
    OK(galloc_pool_history(pool, 100));
    (void)left_by_threads(pool);
    size_t without = left_by_threads(pool);
    OK(galloc_pool_history_stacks(pool, 8));
    (void)left_by_threads(pool);
    size_t with = left_by_threads(pool);
    if (!EXPECT(with < without + 100 * 32)) printf("    %zu bytes, and %zu with stacks\n", without, with);
    pool_end(pool);
    finish();
}

static galloc_pool *asks_too;

static void ask_too(size_t bytes)
{
    galloc_pool *pool = asks_too;
    if (bytes < MIB(8) || !pool) return;
    asks_too = NULL;
    OK(galloc_pool_history_stacks(pool, 8));
}

/* While a pool allocates what keeps the stacks, another one is faster. */
TEST(two_pools_that_first_ask_for_stacks_share_them)
{
    begin();
    galloc_pool *pool = pool_new(NULL), *other = asks_too = pool_new(NULL);
    inside_on_malloc = ask_too;
    OK(galloc_pool_history_stacks(pool, 8));
    inside_on_malloc = NULL;
    EXPECT(!asks_too);
    pool_end(pool);
    pool_end(other);
    finish();
}

#if defined(__x86_64__)
/* Code that belongs to no library, as a compiler makes at run time. */
TEST(a_call_from_code_of_no_library_has_no_name)
{
    /* push rbp; mov rbp, rsp; mov rax, the function; call rax; pop rbp; ret */
    static const unsigned char head[] = {0x55, 0x48, 0x89, 0xe5, 0x48, 0xb8}, tail[] = {0xff, 0xd0, 0x5d, 0xc3};
    cudaError_t (*function)(galloc_pool *, void **, size_t, cudaStream_t) = galloc_pool_malloc, (*made)(
        galloc_pool *, void **, size_t, cudaStream_t);
    char list[4096];
    begin();
    galloc_pool *pool = pool_new(NULL);
    void *p = NULL;
    char *code = mmap(NULL, 4096, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (!EXPECT(code != MAP_FAILED)) return;
    memcpy(code, head, sizeof head);
    memcpy(code + sizeof head, &function, sizeof function);
    memcpy(code + sizeof head + sizeof function, tail, sizeof tail);
    *(void **)(void *)&made = code;
    OK(galloc_pool_history(pool, 100));
    OK(galloc_pool_history_stacks(pool, 8));
    OK(made(pool, &p, 1000, NULL));
    OK(galloc_live_text(pool, list, sizeof list));
    EXPECT(strstr(list, "??" "(+0x") != NULL);
    OK(galloc_free(p, NULL));
    pool_end(pool);
    EXPECT_EQ(munmap(code, 4096), 0);
    finish();
}
#endif

TEST_MAIN()
