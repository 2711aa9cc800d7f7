/* inside.c - galloc for the tests, and what they may know of its private parts: see inside.h. */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "sim.h"

#include "inside.h"

/* ---- galloc ------------------------------------------------------------------------------------------------------ */

size_t inside_chunk_bytes = (size_t)32 << 10;

__attribute__((weak)) uint64_t inside_clock(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* `slab` is at hand by that name wherever galloc asks for the size. */
#define GAI_CHUNK_BYTES (inside_chunk_bytes ? inside_chunk_bytes : sizeof(void *) + GAI_CACHE_LINE + slab->size)
#if !defined(GALLOC_CLOCK) && !defined(INSIDE_COUNTER)
#define GALLOC_CLOCK() inside_clock()
#endif
void (*inside_on_malloc)(size_t bytes);

static void *inside_malloc(size_t bytes)
{
    if (inside_on_malloc) inside_on_malloc(bytes);
    return sim_malloc(bytes);
}

void (*inside_on_free)(void);

static void inside_free(void *p)
{
    if (inside_on_free) inside_on_free();
    sim_free(p);
}

#ifndef pthread_mutex_lock /* else the program has its own */
#include <pthread.h>
static int inside_lock(pthread_mutex_t *mutex), inside_try(pthread_mutex_t *mutex);
static int inside_unlock(pthread_mutex_t *mutex);
#define pthread_mutex_lock(mutex) inside_lock(mutex)
#define pthread_mutex_trylock(mutex) inside_try(mutex)
#define pthread_mutex_unlock(mutex) inside_unlock(mutex)
static int inside_key_new(pthread_key_t *key, void (*call)(void *));
#define pthread_key_create(key, call) inside_key_new(key, call)
#endif

int inside_nvtx_fixed = 1;
#define GAI_NVTX_FIXED inside_nvtx_fixed
#define GALLOC_MALLOC(bytes) inside_malloc(bytes)
#define GALLOC_FREE(p) inside_free(p)
#ifndef INSIDE_STDERR
#define GALLOC_LOG(text) inside_log(text)
#endif
#define GALLOC_ASSERT(c) ((c) ? (void)0 : (printf("not so: %s\n", #c), abort()))
#ifdef INSIDE_STRICT_C
#undef CLOCK_MONOTONIC /* <time.h> defines no such name then */
#endif
/* Checks that the caller of a function holds the locks that the comment above it names (held.awk). */
enum inside_locks {
    INSIDE_NO_LOCK = 0,
    INSIDE_LOCK = 1,
    INSIDE_PAGING = 2,
    INSIDE_GLOBAL_LOCK = 4,
    INSIDE_BUDGET_LOCK = 8,
    INSIDE_CONTEXT_LOCK = 16,
    INSIDE_TAGS_LOCK = 32,
    INSIDE_LOG_LOCK = 64,
    INSIDE_PAGING_AND_LOCK = INSIDE_PAGING | INSIDE_LOCK,
    INSIDE_PAGING_OR_LOCK = 128,
    INSIDE_CLOCK_LOCK = 256,
    INSIDE_LOCK_AND_LATCHES = INSIDE_LOCK
};
static void inside_holds(const char *function, const void *pool, int locks);
#define INSIDE_HOLDS(pool, locks) inside_holds(__func__, pool, locks)
/* The same for who reads or writes a member that a lock guards. */
static void inside_guards(const char *function, const char *member, const void *pool, int locks);
#define INSIDE_GUARDED(pool, locks, name, member) (*(inside_guards(__func__, name, pool, locks), &(member)))
/* Fills a descriptor that is given back to its slab (held.awk), but not what is read without a lock. */
static void __attribute__((unused)) inside_fill(void *descriptor, size_t from, size_t to)
{
    memset((char *)descriptor + from, 0xa5, to - from);
}
#define INSIDE_GIVEN_AS(type, first, descriptor)                     \
    (inside_fill(descriptor, first, offsetof(type, pool)),           \
     inside_fill(descriptor, offsetof(type, pool) + sizeof(void *), sizeof(type)))
#define INSIDE_GIVEN(slab, descriptor)                                                                          \
    ((slab)->size == sizeof(gai_block)     ? INSIDE_GIVEN_AS(gai_block, offsetof(gai_block, prev_bin), descriptor) \
     : (slab)->size == sizeof(gai_mapping) ? INSIDE_GIVEN_AS(gai_mapping, sizeof(void *), descriptor)           \
                                           : inside_fill(descriptor, sizeof(void *), (slab)->size))
#define GALLOC_IMPLEMENTATION
#include "galloc.h"

void (*inside_on_budget)(void);
void (*inside_on_map)(void);
void (*inside_on_step)(const char *function, int locks);

/* The locks that a thread holds. Any thread that breaks the order of the locks (see gai_locks) ends the program. */
#define INSIDE_HELD 8
static __thread struct {
    pthread_mutex_t *locks[INSIDE_HELD];
    int count;
} inside_held;

static void inside_lock_is(int right, const char *wrong)
{
    if (right) return;
    printf("not so with locks: %s\n", wrong);
    abort();
}

static int inside_lock_is_of_pool(const pthread_mutex_t *mutex, size_t member)
{
    const galloc_pool *at = (const galloc_pool *)gai_load_pointer(&gai_process.known_pools);
    while (at && (const char *)mutex != (const char *)at + member) at = (const galloc_pool *)at->known;
    return at != NULL;
}

static int inside_lock_is_last(const pthread_mutex_t *mutex)
{
    return mutex == &gai_locks.map || mutex == &gai_locks.budget || mutex == &gai_locks.log ||
           mutex == &gai_locks.context || mutex == &gai_locks.tags || mutex == &gai_locks.depot ||
           mutex == &gai_locks.trace || mutex == &gai_locks.clock;
}

static void inside_check_lock(const pthread_mutex_t *mutex)
{
    const size_t lock = offsetof(struct galloc_pool, lock), paging = offsetof(struct galloc_pool, paging);
    const size_t recording = offsetof(struct galloc_pool, recording);
    int i, last = inside_lock_is_last(mutex); /* then the list of pools is not read: another thread may free them */
    int pages = !last && inside_lock_is_of_pool(mutex, paging);
    int records = !last && inside_lock_is_of_pool(mutex, recording);
    inside_lock_is(inside_held.count < INSIDE_HELD, "few are held at a time");
    for (i = 0; i < inside_held.count; i++) {
        const pthread_mutex_t *held = inside_held.locks[i];
        inside_lock_is(held != mutex, "none is taken twice");
        inside_lock_is(!inside_lock_is_last(held), "none is taken after one of the last");
        inside_lock_is(mutex != &gai_locks.global, "the global one is the first");
        inside_lock_is(!(pages || records) || !inside_lock_is_of_pool(held, lock), "the pool's comes after the others");
        inside_lock_is(!pages || !inside_lock_is_of_pool(held, recording), "paging is not locked while recording is");
        inside_lock_is(!records || !inside_lock_is_of_pool(held, paging), "recording is not locked while paging is");
    }
}

static int inside_lock_is_short(const pthread_mutex_t *mutex)
{
    return inside_lock_is_last(mutex) || inside_lock_is_of_pool(mutex, offsetof(struct galloc_pool, lock));
}

static void inside_step(const char *function)
{
    /* Another thread may set it to NULL. */
    void (*on_step)(const char *, int) = __atomic_load_n(&inside_on_step, __ATOMIC_RELAXED);
    int i;
    if (!on_step) return;
    for (i = 0; i < inside_held.count; i++)
        if (inside_lock_is_short(inside_held.locks[i])) return;
    on_step(function, inside_held.count);
}

static int inside_held_lock(const pthread_mutex_t *mutex)
{
    int i;
    for (i = 0; i < inside_held.count; i++)
        if (inside_held.locks[i] == mutex) return 1;
    return 0;
}

static int inside_holds_all(const galloc_pool *pool, int locks)
{
    if (locks & INSIDE_LOCK && !inside_held_lock(&pool->lock)) return 0;
    if (locks & INSIDE_PAGING && !inside_held_lock(&pool->paging)) return 0;
    if (locks & INSIDE_GLOBAL_LOCK && !inside_held_lock(&gai_locks.global)) return 0;
    if (locks & INSIDE_BUDGET_LOCK && !inside_held_lock(&gai_locks.budget)) return 0;
    if (locks & INSIDE_CONTEXT_LOCK && !inside_held_lock(&gai_locks.context)) return 0;
    if (locks & INSIDE_TAGS_LOCK && !inside_held_lock(&gai_locks.tags)) return 0;
    if (locks & INSIDE_LOG_LOCK && !inside_held_lock(&gai_locks.log)) return 0;
    if (locks & INSIDE_CLOCK_LOCK && !inside_held_lock(&gai_locks.clock)) return 0;
    return !(locks & INSIDE_PAGING_OR_LOCK) || inside_held_lock(&pool->lock) || inside_held_lock(&pool->paging);
}

static void __attribute__((unused)) inside_holds(const char *function, const void *of, int locks)
{
    int i, right = inside_holds_all((const galloc_pool *)of, locks);
    for (i = 0; !locks && i < inside_held.count; i++) right &= !inside_lock_is_short(inside_held.locks[i]);
    if (right) return;
    printf("%s: ", function);
    inside_lock_is(0, "the caller holds the locks that its comment names");
}

static void __attribute__((unused)) inside_guards(const char *function, const char *member, const void *of, int locks)
{
    const galloc_pool *pool = (const galloc_pool *)of;
    static const char *const others[][2] = {/* who may do without */
        {"gai_job_find_addresses", "stats"}, /* these counters change with `paging` held */
        {"gai_job_return_larger", "stats"},
        {"gai_async_charged", "taken"},      /* the pool's own calls alone change it, with `lock` held */
        {"gai_pool_unlink", "pools"},        /* these take an address, and the lock later */
        {"gai_pool_collect", "collector"},
        {"gai_guards_press", "guards"},
        {"gai_guards_look", "guards"},
        {"gai_guards_end", "guards"},
        {"gai_block_look_at", "guards"},
        {"gai_graph_release", "graphs"},
        {"galloc_pool_stats_reset", "stats"},
        {"galloc_shutdown", "known_contexts"}, /* there is no pool, and no other thread is in a call */
        {"gai_await_endings", "unload_is_watched"}}; /* galloc is about to be unloaded */
    size_t i;
    if (inside_holds_all(pool, locks)) return;
    if (pool && gai_counted(&pool->users) & GAI_ENDED) return; /* the pool begins or ends */
    for (i = 0; i < sizeof others / sizeof *others; i++)
        if (!strcmp(others[i][0], function) && !strcmp(others[i][1], member)) return;
    printf("%s: %s: ", function, member);
    inside_lock_is(0, "who uses a guarded member holds its lock");
}

/* ThreadSanitizer does not see what the C library writes. */
static int __attribute__((unused)) inside_key_new(pthread_key_t *key, void (*call)(void *))
{
    pthread_key_t made = 0;
    int error;
    inside_step(NULL);
    error = (pthread_key_create)(&made, call);
    if (!error) *key = made;
    return error;
}

/* The simulated device tells of each call. The driver may block, so no lock of short calls is held meanwhile. */
void sim_called(const char *function)
{
    int i;
    for (i = 0; i < inside_held.count; i++) {
        if (!inside_lock_is_short(inside_held.locks[i])) continue;
        printf("%s: ", function);
        inside_lock_is(0, "no call of the driver under the pool's or one of the last");
    }
    inside_step(function);
}

static int __attribute__((unused)) inside_lock(pthread_mutex_t *mutex)
{
    if (inside_on_budget && mutex == &gai_locks.budget) inside_on_budget();
    if (inside_on_map && mutex == &gai_locks.map) inside_on_map();
    inside_step(NULL);
    inside_check_lock(mutex);
    inside_held.locks[inside_held.count++] = mutex;
    return (pthread_mutex_lock)(mutex);
}

static int __attribute__((unused)) inside_try(pthread_mutex_t *mutex)
{
    int result;
    inside_step(NULL);
    result = (pthread_mutex_trylock)(mutex);
    inside_lock_is(result || inside_held.count < INSIDE_HELD, "few are held at a time");
    if (!result) inside_held.locks[inside_held.count++] = mutex;
    return result;
}

static int __attribute__((unused)) inside_unlock(pthread_mutex_t *mutex)
{
    int i = 0, result;
    while (i < inside_held.count && inside_held.locks[i] != mutex) i++;
    inside_lock_is(i < inside_held.count, "one that is released is held by this thread");
    inside_held.locks[i] = inside_held.locks[--inside_held.count];
    result = (pthread_mutex_unlock)(mutex);
    inside_step(NULL);
    return result;
}

#define INSIDE_PUT(name, arguments) gai_cu.name = driver.name;
#define INSIDE_GET(name, arguments) driver.name = gai_cu.name;

inside_driver inside_driver_in_use(void)
{
    inside_driver driver;
    INSIDE_DRIVER(INSIDE_GET)
    return driver;
}

void inside_driver_use(inside_driver driver) { INSIDE_DRIVER(INSIDE_PUT) }

/* From the program's handle to the pool. */
static galloc_pool *inside_pool(const galloc_pool *handle)
{
    galloc_pool *at = (galloc_pool *)gai_load_pointer(&gai_process.known_pools);
    while (at && (uintptr_t)handle - (uintptr_t)at >= sizeof *at) at = (galloc_pool *)at->known;
    return at;
}

/* The test holds the lock, not galloc, which may call the driver meanwhile. */
static void inside_hold(gai_lock *lock, int on)
{
    if (on) (void)(pthread_mutex_lock)(lock);
    else (void)(pthread_mutex_unlock)(lock);
}

/* ---- the process ------------------------------------------------------------------------------------------------- */

void inside_log_level(int level)
{
    gai_process.log_is_read = 1;
    gai_process.log_level = level;
}

void inside_log_anew(void)
{
    gai_process.log_is_read = 0;
    memset(gai_process.log_repeats, 0, sizeof gai_process.log_repeats);
}

void inside_hold_budget(int on) { inside_hold(&gai_locks.budget, on); }

void inside_hold_log(int on) { inside_hold(&gai_locks.log, on); }
void inside_hold_names(int on) { inside_hold(&gai_locks.tags, on); }
void inside_hold_trace(void) { gai_latch_on(&((gai_trace *)gai_load_pointer(&gai_process.traces))->latch); }
void inside_hold_global(int on) { inside_hold(&gai_locks.global, on); }

size_t inside_message_size(void) { return sizeof gai_thread.message; }

void inside_forget_pools(void)
{
    gai_process.pools = NULL;
    memset(gai_process.default_pool, 0, sizeof gai_process.default_pool);
    memset(gai_process.budgets, 0, sizeof gai_process.budgets);
}

int inside_page_class(size_t bytes) { return gai_page_class(bytes); }
int inside_in_mapping(void) { return gai_thread.in_mapping; }

int inside_rests(void)
{
    return !gai_thread.in_mapping && !gai_thread.in_shortage && !gai_thread.in_log && !gai_thread.message_is_new &&
           !gai_thread.ran_out && !gai_thread.damaged && !inside_held.count;
}

void inside_forget_tool(void)
{
    gai_process.tool = 0;
    gai_process.nvtx_domain = NULL;
}

pthread_mutex_t *inside_map_lock(void) { return &gai_locks.map; }

void inside_latch(int on)
{
    static gai_latch latch;
    if (on) gai_latch_on(&latch);
    else gai_latch_off(&latch);
}

/* ---- a pool's locks ---------------------------------------------------------------------------------------------- */

void inside_hold_locks(galloc_pool *handle, int on)
{
    galloc_pool *pool = inside_pool(handle);
    gai_lock *locks[5] = {&gai_locks.global, &pool->paging, &pool->recording, &pool->lock, &gai_locks.map};
    for (int i = 0; i < 5; i++) inside_hold(locks[on ? i : 4 - i], on);
}

int inside_may_free(galloc_pool *pool)
{
    if (!gai_lock_try(&inside_pool(pool)->lock)) return 0;
    gai_lock_off(&inside_pool(pool)->lock);
    return 1;
}

void inside_hold_paging(galloc_pool *pool, int on) { inside_hold(&inside_pool(pool)->paging, on); }

int inside_unlocked(galloc_pool *handle)
{
    galloc_pool *pool = inside_pool(handle);
    gai_lock *locks[4] = {&gai_locks.global, &pool->paging, &pool->recording, &pool->lock};
    int n = 0;
    for (int i = 0; i < 4; i++) {
        if (!gai_lock_try(locks[i])) continue;
        gai_lock_off(locks[i]);
        n++;
    }
    return n == 4;
}

/* ---- what a pool keeps of its streams ---------------------------------------------------------------------------- */

static gai_stream *inside_find(galloc_pool *pool, unsigned long long id)
{
    gai_stream *lane = inside_pool(pool)->streams;
    while (lane && lane->stream_id != id) lane = lane->next;
    return lane;
}

static inside_stream inside_see(const gai_stream *lane)
{
    inside_stream stream = {0};
    if (!lane) return stream;
    stream.known = 1;
    stream.id = lane->stream_id;
    stream.blocks = lane->cache.blocks + lane->cache.unconfirmed_blocks;
    stream.bytes = lane->cache.bytes + lane->cache.unconfirmed_bytes;
    stream.fresh_blocks = lane->cache.unconfirmed_blocks;
    stream.fresh_bytes = lane->cache.unconfirmed_bytes;
    stream.unmarked = lane->unmarked;
    stream.mallocs = lane->cache.mallocs;
    stream.open = lane->cache.open != 0;
    return stream;
}

inside_stream inside_stream_of(galloc_pool *pool, unsigned long long id) { return inside_see(inside_find(pool, id)); }

inside_stream inside_stream_at(galloc_pool *pool, size_t i)
{
    const gai_stream *lane = inside_pool(pool)->streams;
    for (; lane && i > 0; i--) lane = lane->next;
    return inside_see(lane);
}

int inside_ahead(galloc_pool *pool, unsigned long long id, int which, int on)
{
    static uint64_t was;
    gai_stream *lane = inside_find(pool, id);
    uint64_t *const epochs[] = {&lane->done, &lane->freed, &lane->handed};
    if (which >= 3) return 0;
    if (on) was = *epochs[which];
    *epochs[which] = on ? lane->epoch + (which > 0) : was; /* nothing of this epoch can be done, before it ends */
    return 1;
}

/* The walk over the words to the one whose number `left` counts down. Tests of their own spoil epochs, live bytes,
   promised marks, what limits are charged, and the numbers of descriptors. */
typedef struct inside_words {
    int left;
    const char *name;
} inside_words;

static void inside_flip(void *word, size_t bytes, uint64_t bits)
{
    uint64_t value = 0;
    memcpy(&value, word, bytes);
    value ^= bits;
    memcpy(word, &value, bytes);
}

#define WORD(words, word, bits)                                                                                        \
    do {                                                                                                               \
        if ((words)->left-- != 0) break;                                                                               \
        inside_flip(&(word), sizeof(word), bits);                                                                      \
        (words)->name = #word;                                                                                         \
    } while (0)
#define FAR ((uint64_t)1 << 62) /* beyond all others */

static void inside_spoil_set(inside_words *words, gai_set *set)
{
    WORD(words, set->bytes, GAI_UNIT);
    WORD(words, set->rows, 1);
    WORD(words, set->columns[0], 1);
}

static void inside_spoil_blocks(inside_words *words, gai_segment *segment)
{
    gai_block *block;
    WORD(words, segment->bytes, GAI_UNIT);
    WORD(words, segment->addr, GAI_UNIT);
    WORD(words, segment->pool, 16);
    if (segment->next) WORD(words, segment->next->prev, 16);
    if (segment->first->kind == GAI_USED) WORD(words, segment->first->prev, 16);
    for (block = segment->first; block; block = block->next) {
        gai_mark *mark;
        /* The program has it; 16 is what `lent` of another is spoiled to. */
        if ((uintptr_t)gai_load_pointer(&block->lent) > 16) WORD(words, block->requested, 1);
        if (block->kind == GAI_USED && (!block->stream || block->stream == gai_load_pointer(&block->lent)))
            WORD(words, block->stream, (uintptr_t)gai_load_pointer(&block->lent)); /* NULL, and back */
        if (block->kind == GAI_USED && !segment->pool->variant.check_block) WORD(words, block->slot, 1);
        if (block->kind == GAI_FREE && segment->pool->config.strategy == GALLOC_STRATEGY_POOLED)
            WORD(words, block->slot, 1);
        if (gai_block_is_free(block)) WORD(words, block->room, GAI_UNIT);
        if (gai_block_is_free(block)) WORD(words, block->lent, 16);
        if (gai_block_is_free(block)) WORD(words, block->row, 1);
        if (gai_block_is_free(block)) WORD(words, block->column, 1);
        if (block->kind == GAI_USED && block->prev) WORD(words, block->prev, 16);
        if (block->kind == GAI_USED && block->stream && block->stream->capture) WORD(words, block->tag, GAI_SPECIAL);
        if (gai_block_is_free(block)) WORD(words, block->older, 16);
        if (gai_block_is_free(block) || block->kind == GAI_HOLE) WORD(words, block->prev_bin, 16);
        WORD(words, block->segment, 16);
        WORD(words, block->pool, 16);
        if (gai_block_is_mapped(block)) WORD(words, block->map_entry, sizeof *block->map_entry);
        for (mark = block->marks; mark; mark = mark->next) WORD(words, mark->begin, FAR);
        for (mark = block->marks; mark; mark = mark->next) WORD(words, mark->end, FAR);
    }
}

static void inside_spoil_mappings(inside_words *words, galloc_pool *pool)
{
    size_t rank;
    for (rank = 1; rank < pool->ranks.used; rank++) {
        gai_mapping *mapping = pool->ranks.at[rank];
        if (!mapping) continue;
        WORD(words, mapping->bytes, GAI_UNIT);
        WORD(words, mapping->rank, 1);
        WORD(words, mapping->addr, GAI_UNIT);
        if (!mapping->block) WORD(words, mapping->segment, 16);
        WORD(words, mapping->pool, 16);
        if (mapping->block) WORD(words, mapping->older, 16);
        if (mapping->block && mapping->page->current == mapping) WORD(words, mapping->older_parked, 16);
        if (rank + 1 < pool->ranks.used && pool->ranks.at[rank + 1]) WORD(words, mapping->number, FAR);
        WORD(words, mapping->page->mappings, 1);
        WORD(words, mapping->page->bytes, GAI_UNIT);
        WORD(words, mapping->page->taken, 1);
        if (mapping->block) WORD(words, mapping->block->room, (uint64_t)1 << 40);
        if (mapping->block) WORD(words, pool->ranks.aliases[rank / 64], gai_rank_bit(rank));
    }
}

static void inside_spoil_cached(inside_words *words, gai_block *block)
{
    for (; block; block = block->next_bin) {
        WORD(words, block->room, GAI_UNIT);
        WORD(words, block->lent, 16);
        WORD(words, block->life, FAR);
    }
}

static void inside_spoil_stream(inside_words *words, gai_stream *stream)
{
    gai_event *event;
    gai_wait *wait;
    gai_graph_position *position;
    gai_cache *cache = &stream->cache;
    size_t i;
    WORD(words, stream->events, 1);
    WORD(words, stream->newest, 16);
    WORD(words, stream->uses, 1);
    WORD(words, stream->kept, 16);
    WORD(words, stream->free.stream, 16);
    WORD(words, stream->capture_id, FAR);
    if (stream->cache.open) WORD(words, stream->key, 1);
    if (stream->cache.open) WORD(words, stream->asked, 1);
    if (stream->cache.open) WORD(words, stream->retired, 1);
    if (stream->cache.open) WORD(words, cache->open, FAR);
    if (stream->capture) WORD(words, stream->due, 1);
    if (stream->capture) WORD(words, stream->capture, 16);
    WORD(words, cache->blocks, 1);
    WORD(words, cache->bytes, GAI_UNIT);
    WORD(words, cache->unconfirmed_blocks, 1);
    WORD(words, cache->unconfirmed_bytes, GAI_UNIT);
    WORD(words, cache->alone, FAR);
    WORD(words, cache->seen, FAR);
    if (cache->mallocs) WORD(words, cache->serves, ~(uint64_t)0);
    if (!(cache->large & ~FAR)) WORD(words, cache->large, FAR);
    for (i = 0; i < GAI_CACHE_BINS; i += 9) WORD(words, cache->filled, (uint64_t)1 << i);
    inside_spoil_cached(words, cache->unconfirmed);
    for (i = 0; i < GAI_CACHE_BINS; i++)
        if (cache->filled >> i & 1) inside_spoil_cached(words, cache->bins[i].first);
    for (i = 0; i < GAI_CACHE_BINS; i++)
        if (cache->filled >> i & 1) WORD(words, cache->bins[i].bytes, GAI_UNIT);
    for (event = stream->recorded; event; event = event->next) WORD(words, event->epoch, FAR);
    for (wait = stream->waits; wait; wait = wait->next) WORD(words, wait->epoch, FAR);
    for (position = stream->positions; position; position = position->older) WORD(words, position->epoch, FAR);
    for (position = stream->positions; position; position = position->older) WORD(words, position->n, 128);
    inside_spoil_set(words, &stream->free);
}

#define TORCH_WORD(words, stat)                                                                                        \
    do {                                                                                                               \
        WORD(words, (stat).small_pool.current, 1);                                                                     \
        WORD(words, (stat).large_pool.current, 1);                                                                     \
    } while (0)

static void inside_spoil_torch(inside_words *words, galloc_pool *pool)
{
    galloc_torch_stats *stats = &pool->torch_stats;
    gai_block_pool *block_pool;
    for (block_pool = pool->block_pools; block_pool; block_pool = block_pool->next) {
        WORD(words, block_pool->streams, 1);
        WORD(words, block_pool->segments, 1);
    }
    if (!pool->block_pools) return;
    TORCH_WORD(words, stats->segment);
    TORCH_WORD(words, stats->reserved_bytes);
    TORCH_WORD(words, stats->allocation);
    TORCH_WORD(words, stats->allocated_bytes);
    TORCH_WORD(words, stats->requested_bytes);
    TORCH_WORD(words, stats->inactive_split);
    TORCH_WORD(words, stats->inactive_split_bytes);
    WORD(words, stats->active_bytes.all.current, 1);
}

static void inside_spoil_stats(inside_words *words, galloc_stats *stats)
{
    WORD(words, stats->allocated.current, GAI_UNIT);
    WORD(words, stats->blocks.current, 1);
    WORD(words, stats->reserved.current, GAI_UNIT);
    WORD(words, stats->addresses, GAI_UNIT);
    WORD(words, stats->leaving, GAI_UNIT);
    WORD(words, stats->quarantined, GAI_UNIT);
    WORD(words, stats->pages[0].count, 1);
    WORD(words, stats->pages[0].bytes, GAI_UNIT);
}

static void inside_spoil_pool(inside_words *words, galloc_pool *pool)
{
    galloc_graph *graph;
    size_t i;
    WORD(words, pool->stream_count, 1);
    WORD(words, pool->lost, 1);
    WORD(words, pool->outside, GAI_UNIT);
    WORD(words, pool->parked, GAI_UNIT);
    WORD(words, pool->stale, 1);
    WORD(words, pool->newest_alias, 16);
    WORD(words, pool->newest_parked, 16);
    WORD(words, pool->kept, GAI_UNIT);
    WORD(words, pool->taken, GAI_UNIT);
    WORD(words, pool->budget->most, ~(uint64_t)0);
    WORD(words, pool->config.device_limit, (uint64_t)1 << 63); /* below the limit, if that is SIZE_MAX */
    WORD(words, pool->tuning.decided, 1 << 20);
    WORD(words, pool->caches_off, 4);
    WORD(words, pool->caches_off, 8);
    WORD(words, pool->caches_off, 16);
    WORD(words, pool->special, GAI_ROUTE_HISTORY);
    WORD(words, pool->frames_taken, 1);
    if (!pool->history.ring) WORD(words, pool->history.size, FAR);
    if (pool->history.ring) WORD(words, pool->history.next, 1);
    WORD(words, pool->guards.kept, 1);
    WORD(words, pool->guards.kept_bytes, GAI_UNIT);
    WORD(words, pool->guards.kept_live, 1);
    WORD(words, pool->guards.pending, 1);
    if (pool->guards.kept > 1) WORD(words, pool->guards.newest, 16);
    for (i = 0; pool->guards.checks && i < GAI_CHECKS; i++)
        if (pool->guards.checks[i].stream) WORD(words, pool->guards.checks[i].epoch, (uint64_t)1 << 40);
    for (graph = pool->graphs; graph; graph = graph->next) WORD(words, graph->captures, 1);
}

const char *inside_spoil(galloc_pool *handle, int which)
{
    galloc_pool *pool = inside_pool(handle);
    gai_segment *segment;
    gai_stream *stream;
    inside_words words = {which, NULL};
    inside_spoil_pool(&words, pool);
    inside_spoil_stats(&words, &pool->stats);
    inside_spoil_set(&words, &pool->common);
    inside_spoil_set(&words, &pool->mixed);
    for (segment = pool->segments; segment; segment = segment->next) inside_spoil_blocks(&words, segment);
    inside_spoil_mappings(&words, pool);
    for (stream = pool->streams; stream; stream = stream->next) inside_spoil_stream(&words, stream);
    inside_spoil_torch(&words, pool);
    WORD(&words, pool->blocks.promised, FAR);
    WORD(&words, pool->marks.promised, FAR);
    WORD(&words, pool->pages.promised, FAR);
    WORD(&words, pool->mappings.promised, FAR);
    WORD(&words, pool->events.promised, FAR);
    WORD(&words, pool->waits.promised, FAR);
    WORD(&words, pool->positions.promised, FAR);
    return words.name;
}

int inside_cache_is_aligned(galloc_pool *pool)
{
    const gai_cache *cache = &inside_pool(pool)->streams->cache;
    return (uintptr_t)cache % GAI_CACHE_LINE == 0 && (uintptr_t)&cache->live_in % GAI_CACHE_LINE == 0;
}

void inside_hold_cache(galloc_pool *pool, unsigned long long id, int on)
{
    gai_stream *lane = inside_find(pool, id);
    if (on) gai_latch_on(&lane->cache.latch);
    else gai_latch_off(&lane->cache.latch);
}

static size_t inside_count(const gai_stream *lane)
{
    size_t n = 0;
    for (; lane; lane = lane->next) n++;
    return n;
}

size_t inside_streams(galloc_pool *pool) { return inside_count(inside_pool(pool)->streams); }
size_t inside_unused_streams(galloc_pool *pool) { return inside_count(inside_pool(pool)->unused_streams); }

void inside_ask_for_event(galloc_pool *handle, unsigned long long id)
{
    galloc_pool *pool = inside_pool(handle);
    gai_stream *lane = inside_find(pool, id);
    lane->asked = 0;
    gai_lock_on(&pool->lock);
    gai_stream_ask(lane);
    gai_lock_off(&pool->lock);
}

int inside_remembers(cudaStream_t stream, const galloc_pool *pool) { return gai_tcache_find(stream, pool) != NULL; }

size_t inside_most_blocks(void) { return GAI_CACHE_BLOCKS; }
size_t inside_most_fresh_blocks(void) { return GAI_UNCONFIRMED_BLOCKS; }
size_t inside_streams_kept(void) { return GAI_STREAMS_KEPT; }
size_t inside_most_old_mappings(void) { return GAI_STALE_MAX; }

/* ---- what else a pool has ---------------------------------------------------------------------------------------- */

void inside_leave_handles(galloc_pool *handle, size_t n)
{
    galloc_pool *pool = inside_pool(handle);
    pool->lives = sizeof *pool - n;
}

int inside_ended(galloc_pool *pool) { return (gai_load(&inside_pool(pool)->users) & GAI_ENDED) != 0; }
void inside_set_memory_limit(galloc_pool *pool, size_t bytes) { gai_budget_set_own(inside_pool(pool), bytes); }
void inside_set_live_peak(galloc_pool *pool, size_t bytes) { inside_pool(pool)->live_peak = bytes; }
void inside_never_look_for_idle(galloc_pool *pool) { inside_pool(pool)->collector.look = UINT64_MAX; }

void inside_count_all(galloc_pool *pool, uint64_t n)
{
    galloc_stats *s = &inside_pool(pool)->stats;
    uint64_t *const counters[] = {&s->mallocs, &s->frees, &s->failures, &s->rejections, &s->hits, &s->grows,
                                  &s->splits, &s->merges, &s->marks, &s->waits, &s->moves, &s->moved_bytes,
                                  &s->collections, &s->collected_bytes, &s->checks, &s->unchecked, &s->damages};
    for (size_t i = 0; i < sizeof counters / sizeof *counters; i++) *counters[i] += n;
}

void inside_count_live(galloc_pool *pool, long long bytes) { inside_pool(pool)->stats.live.current += bytes; }

void inside_charge(galloc_pool *pool, size_t bytes, int on)
{
    inside_pool(pool)->budget->held += on ? bytes : 0 - bytes;
}

CUmemoryPool inside_driver_pool(galloc_pool *pool) { return inside_pool(pool)->driver_pool; }
size_t inside_headroom(galloc_pool *pool) { return gai_pool_headroom(inside_pool(pool)); }
size_t inside_parked(galloc_pool *pool) { return inside_pool(pool)->parked; }
size_t inside_old_mappings(galloc_pool *pool) { return inside_pool(pool)->stale; }
uint64_t inside_plans(galloc_pool *pool) { return inside_pool(pool)->plans; }

/* A place alone, as if no other were better. */
static void inside_plan_at(galloc_pool *pool, gai_block *left, gai_block *first, const gai_page_filter *filter,
                           gai_plan *best)
{
    gai_window window;
    gai_plan plan;
    uintptr_t at = gai_up(left ? left->addr : first->addr, filter->params->alignment);
    memset(&window, 0, sizeof window);
    memset(&plan, 0, sizeof plan);
    window.left = left;
    window.first = first;
    if (at >= (left ? first->addr : first->addr + first->bytes)) return;
    gai_window_try(pool, &window, at, filter, &plan);
    gai_window_clear(&window);
    if (plan.first && gai_plan_is_better(filter, &plan, best)) *best = plan;
}

static void inside_plan_everywhere(galloc_pool *pool, const gai_page_filter *filter, gai_plan *best)
{
    memset(best, 0, sizeof *best);
    pool->plans++;
    gai_plan_note_pages(pool, filter);
    for (const gai_segment *segment = pool->segments; segment; segment = segment->next)
        for (gai_block *block = segment->first; block; block = block->next) {
            if (!gai_block_is_unused(block)) continue;
            inside_plan_at(pool, NULL, block, filter, best);
            if (gai_block_is_own(pool, block->prev, filter->params))
                inside_plan_at(pool, block->prev, block, filter, best);
        }
}

int inside_plan_is_best(galloc_pool *handle, unsigned long long id, size_t bytes, int far, int may_wait)
{
    galloc_pool *pool = inside_pool(handle);
    gai_params params;
    gai_page_filter filter;
    gai_plan plan, best;
    int is_best = 1;
    memset(&params, 0, sizeof params);
    params.bytes = params.requested = gai_up(bytes, GAI_UNIT);
    params.alignment = GAI_UNIT;
    params.stream = inside_find(handle, id);
    params.at_end = far;
    filter = gai_page_filter_for(&params);
    filter.may_wait = may_wait;
    gai_lock_on(&pool->lock);
    inside_plan_everywhere(pool, &filter, &best);
    for (int returns = 0; returns < 2; returns++) { /* both ways of the search */
        pool->plans_return = returns;
        (void)gai_plan_best(pool, &filter, &plan);
        is_best &= plan.first == best.first && plan.left == best.left && plan.right == best.right &&
                   plan.hole == best.hole && plan.at == best.at && plan.end == best.end && plan.alias == best.alias &&
                   plan.newest == best.newest;
    }
    gai_lock_off(&pool->lock);
    return is_best;
}

size_t inside_captures(galloc_pool *pool)
{
    size_t n = 0;
    for (const gai_capture *capture = inside_pool(pool)->captures; capture; capture = capture->next) n++;
    return n;
}

static size_t inside_free_pages_of(const gai_block *block)
{
    size_t bytes = 0;
    uintptr_t at = block->addr, end = block->addr + block->bytes;
    while (block->kind == GAI_FREE && at < end) {
        const gai_mapping *mapping = gai_page_at(at);
        if (mapping->addr >= block->addr && mapping->addr + mapping->bytes <= end) bytes += mapping->bytes;
        at = mapping->addr + mapping->bytes;
    }
    return bytes;
}

size_t inside_free_pages(galloc_pool *pool)
{
    size_t bytes = 0;
    for (const gai_segment *segment = inside_pool(pool)->segments; segment; segment = segment->next)
        for (const gai_block *block = segment->first; block; block = block->next) bytes += inside_free_pages_of(block);
    return bytes;
}

uint64_t inside_early_moves(galloc_pool *pool, uint64_t n)
{
    uint64_t early = 0;
    const gai_mapping *old = inside_pool(pool)->newest_alias;
    for (; n > 0 && old; n--, old = old->older) early += old->block->marks != NULL;
    return early;
}

static const gai_memo *inside_next_memo(galloc_pool *handle)
{
    galloc_pool *pool = inside_pool(handle);
    return &pool->memos[pool->plan_predictor.next % GAI_PLAN_KEYS];
}

uintptr_t inside_memo_first(galloc_pool *pool) { return inside_next_memo(pool)->first->addr; }
uintptr_t inside_memo_at(galloc_pool *pool) { return inside_next_memo(pool)->at; }

void inside_count_max(uint64_t *p, uint64_t n) { gai_count_max(p, n); }

void *inside_live_block(galloc_pool *pool)
{
    for (gai_segment *segment = inside_pool(pool)->segments; segment; segment = segment->next)
        for (gai_block *block = segment->first; block; block = block->next)
            if (gai_load_pointer(&block->lent)) return (void *)block->addr;
    return NULL;
}

int inside_has_default_pool(int device) { return gai_load_pointer(&gai_process.default_pool[device]) != NULL; }

uint32_t inside_stack_number(void *const *at, uint32_t n)
{
    uint32_t number;
    gai_lock_on(&gai_locks.depot);
    number = gai_depot_number(gai_process.depot, at, n);
    gai_lock_off(&gai_locks.depot);
    return number;
}

int inside_block_is_found(const void *ptr) { return gai_block_at((uintptr_t)ptr) != NULL; }

int inside_segment_is_lost(const void *ptr) { return gai_block_at((uintptr_t)ptr)->segment->lost; }

size_t inside_most_marks(galloc_pool *pool)
{
    size_t most = 0;
    for (gai_segment *segment = inside_pool(pool)->segments; segment; segment = segment->next)
        for (gai_block *block = segment->first; block; block = block->next)
            most = gai_max(most, gai_marks_count(block->marks));
    return most;
}

void inside_move_mark(void *ptr, ptrdiff_t begin, ptrdiff_t end)
{
    gai_mark *mark = gai_block_at((uintptr_t)ptr)->marks;
    mark->begin += (uintptr_t)begin;
    mark->end += (uintptr_t)end;
}

size_t inside_list_holes(galloc_pool *handle, int on)
{
    static gai_block *kept;
    galloc_pool *pool = inside_pool(handle);
    const gai_block *hole;
    size_t n = 0;
    for (hole = pool->holes; hole; hole = hole->next_bin) n++;
    if (!on) kept = pool->holes;
    pool->holes = on ? kept : NULL;
    return n;
}

int inside_list_newest(galloc_pool *pool, int on)
{
    static gai_block *kept;
    gai_set *set = &inside_pool(pool)->common;
    while (set && (!set->oldest || !set->oldest->newer)) set = set->next;
    if (!set) return 0;
    if (!on) kept = set->newest;
    set->newest = on ? kept : set->oldest;
    return 1;
}

int inside_list_parked(galloc_pool *handle, int on)
{
    static gai_mapping *kept;
    galloc_pool *pool = inside_pool(handle);
    if (!on && !pool->oldest_parked) return 0;
    if (!on) kept = pool->oldest_parked;
    pool->oldest_parked = on ? kept : kept->newer_parked;
    return 1;
}

/* What is taken stays in its chunk. */
static void inside_drain_to(gai_slab *slab, size_t spare)
{
    for (; slab->available > slab->promised + GAI_SLAB_KEPT + spare; slab->made--) (void)gai_slab_take(slab);
}

static void inside_drain(gai_slab *slab) { inside_drain_to(slab, 0); }

void inside_drain_blocks(galloc_pool *handle) { inside_drain(&inside_pool(handle)->blocks); }

void inside_drain_marks(galloc_pool *handle) { inside_drain(&inside_pool(handle)->marks); }

void inside_drain_all(galloc_pool *handle)
{
    galloc_pool *pool = inside_pool(handle);
    inside_drain_blocks(handle);
    inside_drain_marks(handle);
    inside_drain(&pool->pages);
    inside_drain(&pool->mappings);
    inside_drain(&pool->events);
    inside_drain(&pool->waits);
    inside_drain(&pool->positions);
}

int inside_leave_marks(galloc_pool *handle, size_t spare)
{
    galloc_pool *pool = inside_pool(handle);
    int has = gai_slab_need(&pool->marks, spare);
    inside_drain_to(&pool->marks, spare);
    return has;
}

static gai_slab *inside_slab(galloc_pool *handle, int which)
{
    galloc_pool *pool = inside_pool(handle);
    gai_slab *slabs[] = {&pool->blocks, &pool->marks,    &pool->pages, &pool->mappings, &pool->events,
                         &pool->waits,  &pool->positions};
    return which < (int)(sizeof slabs / sizeof *slabs) ? slabs[which] : NULL;
}

void *inside_descriptor_take(galloc_pool *handle, int which)
{
    gai_slab *slab = inside_slab(handle, which);
    return slab && gai_slab_has(slab, 1) ? gai_slab_take(slab) : NULL;
}

void inside_descriptor_give(galloc_pool *handle, int which, void *descriptor)
{
    gai_slab_give(inside_slab(handle, which), descriptor);
}

void inside_promise_mark(galloc_pool *pool, int on) { inside_pool(pool)->marks.promised += on ? 1 : (size_t)-1; }

inside_device *inside_device_of(galloc_pool *pool) { return (inside_device *)inside_pool(pool)->budget; }

galloc_pool *inside_visit(inside_device *device, galloc_pool *pool)
{
    galloc_pool *next = gai_pool_visit(pool ? inside_pool(pool) : NULL, (gai_budget *)device);
    return next ? next->handle : NULL;
}

/* ---- marks ------------------------------------------------------------------------------------------------------- */

struct inside_marks {
    galloc_pool *pool;
    gai_stream *lanes;
    int streams;
    gai_mark *list;
};

inside_marks *inside_marks_new(galloc_pool *handle, int streams)
{
    inside_marks *marks = (inside_marks *)calloc(1, sizeof *marks);
    marks->pool = inside_pool(handle);
    marks->lanes = (gai_stream *)calloc((size_t)streams, sizeof *marks->lanes);
    marks->streams = streams;
    gai_lock_on(&marks->pool->lock);
    return marks;
}

int inside_marks_begin(inside_marks *marks)
{
    marks->list = NULL;
    return gai_slab_has(&marks->pool->marks, 500);
}

void inside_marks_add(inside_marks *marks, inside_mark mark)
{
    gai_stream *lane = &marks->lanes[mark.stream];
    gai_marks_add(marks->pool, &marks->list,
                  gai_mark_new(marks->pool, lane, mark.epoch, mark.begin * GAI_UNIT, mark.end * GAI_UNIT));
}

void inside_marks_cut(inside_marks *marks, uint32_t at)
{
    gai_mark *right = gai_marks_cut(marks->pool, &marks->list, at * GAI_UNIT);
    marks->list = gai_marks_meet(marks->pool, marks->list, right);
}

void inside_marks_coarsen(inside_marks *marks) { gai_marks_coarsen(marks->pool, marks->list); }

int inside_marks_get(const inside_marks *marks, int i, inside_mark *mark)
{
    const gai_mark *at = marks->list;
    for (; at && i > 0; i--) at = at->next;
    if (!at) return 0;
    mark->stream = (int)(at->stream - marks->lanes);
    mark->epoch = at->epoch;
    mark->begin = (uint32_t)(at->begin / GAI_UNIT);
    mark->end = (uint32_t)(at->end / GAI_UNIT);
    return 1;
}

uint64_t inside_marks_clear(inside_marks *marks)
{
    uint64_t uses = 0;
    gai_marks_end(marks->pool, &marks->list);
    for (int i = 0; i < marks->streams; i++) uses += marks->lanes[i].uses;
    return uses;
}

void inside_marks_end(inside_marks *marks)
{
    gai_lock_off(&marks->pool->lock);
    free(marks->lanes);
    free(marks);
}

/* ---- descriptors and bins, for checks of the check --------------------------------------------------------------- */

static gai_mark *taken_marks[4096];
static size_t taken;

size_t inside_reserve(galloc_pool *pool) { return pool->marks.available; }

size_t inside_reserve_take(galloc_pool *pool)
{
    gai_slab *marks = &pool->marks;
    while (marks->available > marks->promised && taken < 4096) taken_marks[taken++] = gai_slab_take(marks);
    return taken;
}

void inside_reserve_give(galloc_pool *pool)
{
    while (taken) gai_slab_give(&pool->marks, taken_marks[--taken]);
}

void *inside_wait_take(galloc_pool *pool) { return gai_slab_has(&pool->waits, 1) ? gai_slab_take(&pool->waits) : NULL; }

void inside_wait_give(galloc_pool *pool, void *wait) { gai_slab_give(&pool->waits, wait); }

int inside_misfile(void *p, size_t bytes)
{
    gai_block *block = gai_block_at((uintptr_t)p);
    size_t own = block->bytes;
    if (!block->set) return 0;
    gai_bin_remove(block->set, block);
    if (bytes) block->bytes = bytes;
    gai_bin_insert(block->set, block);
    block->bytes = own;
    return 1;
}

int inside_swap_bins(void *p, void *q)
{
    gai_block *one = gai_block_at((uintptr_t)p), *two = gai_block_at((uintptr_t)q), *first, **a, **b;
    if (!one->set || !two->set || one->set == two->set || one->next_bin || two->next_bin) return 0;
    a = &one->set->bins[one->row][one->column];
    b = &two->set->bins[two->row][two->column];
    first = *a;
    *a = *b;
    *b = first;
    return 1;
}
