/* test_moments.c - what another thread does between two steps of a call that no function of the driver separates. This
   program has a galloc of its own, whose atomic loads, stores and exchanges, copies and locks tell of themselves. */

#define _GNU_SOURCE
#include <pthread.h>
#include <string.h>

static void loaded(const volatile void *at);
#define __atomic_load_n(at, order)                                                                                     \
    __extension__({                                                                                                    \
        __typeof__(__atomic_load_n(at, order)) value_ = __atomic_load_n(at, order);                                    \
        loaded(at);                                                                                                    \
        value_;                                                                                                        \
    })
static void stored(void);
#define __atomic_store_n(at, value, order) (__atomic_store_n(at, value, order), stored())
static void *copied(void *to);
static void *exchanged(void *at);
#define __atomic_compare_exchange_n(at, from, to, weak, order, else_order)                                             \
    __atomic_compare_exchange_n((__typeof__(at))exchanged(at), from, to, weak, order, else_order)
#define memcpy(to, from, bytes) copied((memcpy)(to, from, bytes))
static int lock_and_tell(pthread_mutex_t *mutex);
#define pthread_mutex_lock(mutex) lock_and_tell(mutex)
#include "inside.c"
#undef __atomic_load_n
#undef __atomic_store_n
#undef __atomic_compare_exchange_n
#undef memcpy
#undef pthread_mutex_lock

#include "setup.h"

/* ---- the moment after a load ------------------------------------------------------------------------------------- */

/* A call of one thread loads the users of the pool several times. After one of these loads another thread goes first,
   until it stops within a call of its own; after a later load, or once the first call is over, that call goes on. */
static struct {
    galloc_pool *pool; /* NULL: no thread is watched */
    pthread_t thread, other;
    void *(*run)(void *);
    int loads, first, then; /* the so many-th loads */
    int stopped, goes_on, done;
    void *p;
} moment;

static void say(int *what) { __atomic_store_n(what, 1, __ATOMIC_RELEASE); }

static void hear(const int *what)
{
    while (!__atomic_load_n(what, __ATOMIC_ACQUIRE)) usleep(100);
}

static void destroy_a_graph(const volatile void *at);

static void loaded(const volatile void *at)
{
    destroy_a_graph(at);
    if (!moment.pool || at != &moment.pool->users || !pthread_equal(pthread_self(), moment.thread)) return;
    if (++moment.loads == moment.first) {
        EXPECT_EQ(pthread_create(&moment.other, NULL, moment.run, moment.pool->handle), 0);
        hear(&moment.stopped);
    } else if (moment.loads == moment.then) {
        say(&moment.goes_on);
        hear(&moment.done);
    }
}

static void stop_here(void)
{
    say(&moment.stopped);
    hear(&moment.goes_on);
}

static void moment_begin(void *(*run)(void *), int first, int then)
{
    begin();
    memset(&moment, 0, sizeof moment);
    moment.run = run;
    moment.first = first;
    moment.then = then;
    moment.thread = pthread_self();
    moment.pool = inside_pool(pool_new(NULL));
}

static void moment_end(void)
{
    say(&moment.goes_on);
    if (EXPECT(moment.loads >= moment.first && moment.loads >= moment.then))
        EXPECT_EQ(pthread_join(moment.other, NULL), 0);
    moment.pool = NULL;
    sim_hook(NULL, NULL);
}

/* A pool whose users are counted wrongly may never end. */
static void stop_after_a_failure(void)
{
    if (test_failures) _exit(1);
}

/* ---- calls that come while a pool ends --------------------------------------------------------------------------- */

static void *destroy(void *pool)
{
    OK(galloc_pool_destroy(pool));
    return NULL;
}

/* The pool has ended but for its host memory. */
static void once_the_pool_is_empty(const char *function)
{
    if (!pthread_equal(pthread_self(), moment.thread) && !strcmp(function, "cuDevicePrimaryCtxRelease")) stop_here();
}

static galloc_pool *pool_that_ends(void)
{
    moment_begin(destroy, 1, 0);
    sim_hook(once_the_pool_is_empty, NULL);
    return moment.pool->handle;
}

TEST(a_request_that_has_seen_a_pool_before_its_end_is_refused)
{
    void *p = NULL;
    galloc_pool *pool = pool_that_ends();
    EXPECT_EQ(galloc_pool_malloc(pool, &p, KIB(4), NULL), cudaErrorInvalidResourceHandle);
    EXPECT(!p);
    moment_end();
    finish();
}

TEST(a_look_that_has_seen_a_pool_before_its_end_is_refused)
{
    galloc_stats stats;
    galloc_pool *pool = pool_that_ends();
    EXPECT_EQ(galloc_pool_stats(pool, &stats), cudaErrorInvalidResourceHandle);
    moment_end();
    finish();
}

/* The other thread stops in the driver, in the pool, without a lock. */
static void once_in_the_pool(const char *function)
{
    if (!pthread_equal(pthread_self(), moment.thread)) {
        if (!moment.stopped && __atomic_load_n(&moment.pool->users, __ATOMIC_ACQUIRE) == 2) stop_here();
    } else if (!strcmp(function, "cuDevicePrimaryCtxRelease")) {
        say(&moment.goes_on);
        hear(&moment.done);
    }
}

static void *allocate(void *pool)
{
    sim_hook(once_in_the_pool, NULL);
    moment.p = get(pool, KIB(4), NULL);
    say(&moment.done);
    return NULL;
}

static void expect_no_end_while_in_use(void *(*run)(void *), int then)
{
    moment_begin(run, 2, then);
    galloc_pool *pool = moment.pool->handle;
    EXPECT_EQ(galloc_pool_destroy(pool), cudaErrorNotPermitted);
    moment_end();
    EXPECT_EQ(inside_pool(pool)->users, 0);
    stop_after_a_failure();
    OK(galloc_free(moment.p, NULL));
    pool_end(pool);
    finish();
}

TEST(a_call_that_comes_in_when_a_pool_begins_to_end_is_waited_for) { expect_no_end_while_in_use(allocate, 4); }

static void *allocate_and_free(void *pool)
{
    void *p = get(pool, KIB(4), cudaStreamPerThread);
    (void)allocate(pool);
    OK(galloc_free(p, cudaStreamPerThread));
    return NULL;
}

/* The end is refused since there is a block; a call that is in the pool then leaves it. */
TEST(a_call_that_leaves_a_pool_whose_end_is_refused_is_counted) { expect_no_end_while_in_use(allocate_and_free, 5); }

TEST(a_call_that_comes_in_when_another_one_leaves_is_counted)
{
    galloc_stats stats;
    moment_begin(allocate, 2, 0);
    galloc_pool *pool = moment.pool->handle;
    OK(galloc_pool_stats(pool, &stats));
    moment_end();
    OK(galloc_pool_stats(pool, &stats));
    stop_after_a_failure();
    OK(galloc_free(moment.p, NULL));
    pool_end(pool);
    finish();
}

/* ---- a free while the position of a captured stream is noted ----------------------------------------------------- */

static struct {
    int asked, copies; /* until the other thread goes first */
    cudaStream_t s;
    void *ptr;
} position;

static void before_the_nodes(const char *function)
{
    position.asked = position.ptr && !strcmp(function, "cuStreamGetCaptureInfo");
}

/* The copy of the nodes is the next one after galloc has asked for them. Then comes what another thread could do. */
static void *copied(void *to)
{
    void *ptr = position.ptr;
    if (!position.asked) return to;
    position.asked = 0;
    if (--position.copies > 0) return to;
    position.ptr = NULL;
    put(position.s, ptr, MIB(4), 3);
    OK(galloc_free(ptr, position.s));
    return to;
}

/* The stream that has forked before comes after the position, and not after what the other thread has freed since. 0:
   there are fewer copies. */
static int free_at_copy(int nth)
{
    begin();
    galloc_pool *pool = pool_new(NULL);
    cudaStream_t s = stream_new(), t = stream_new();
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    void *y = get_used(pool, MIB(4), s, 1), *p = get_used(pool, MIB(1), s, 2);
    order(s, t);
    memset(&position, 0, sizeof position);
    position.copies = nth;
    position.s = s;
    position.ptr = y;
    sim_hook(before_the_nodes, NULL);
    OK(galloc_free(p, s));
    sim_hook(NULL, NULL);
    int reached = !position.ptr;
    void *q = get_used(pool, MIB(4), t, 4);
    OK(galloc_free(q, t));
    order(t, s);
    if (!reached) OK(galloc_free(y, s));
    OK(cudaStreamEndCapture(s, &graph));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    OK(cudaGraphLaunch(exec, s));
    sim_run(-1);
    OK(cudaGraphExecDestroy(exec));
    OK(cudaGraphDestroy(graph));
    pool_end(pool);
    finish(); /* no finding: nothing in the graph uses memory at the same time */
    return reached;
}

TEST(a_free_while_a_position_is_noted_is_not_covered)
{
    int copies = 0;
    while (copies < 20 && free_at_copy(copies + 1)) copies++;
    EXPECT(copies > 0 && copies < 20);
}

/* ---- the end of a group while its stream is asked for its capture ------------------------------------------------ */

static struct {
    int calls; /* of cuStreamGetCaptureInfo, until the other thread goes first */
    int goes, waits, done;
    pthread_t other;
    galloc_graph *group;
    cudaStream_t s;
} ending;

static void (*at_lock)(pthread_mutex_t *mutex);

/* The other thread says that it has to wait for a lock. */
static int lock_and_tell(pthread_mutex_t *mutex)
{
    if (at_lock) at_lock(mutex);
    if (ending.goes && pthread_equal(pthread_self(), ending.other)) {
        if (!pthread_mutex_trylock(mutex)) return 0;
        say(&ending.waits);
    }
    return pthread_mutex_lock(mutex);
}

static void *end_group_and_stream(void *unused)
{
    (void)unused;
    ending.other = pthread_self();
    ending.goes = 1;
    OK(galloc_graph_end(ending.group));
    OK(cudaStreamDestroy(ending.s));
    say(&ending.done);
    return NULL;
}

/* The other thread goes until it is done, or has to wait for this one. */
static void before_the_question(const char *function)
{
    pthread_t thread;
    if (!ending.calls || strcmp(function, "cuStreamGetCaptureInfo") || --ending.calls) return;
    EXPECT_EQ(pthread_create(&thread, NULL, end_group_and_stream, NULL), 0);
    while (!__atomic_load_n(&ending.waits, __ATOMIC_ACQUIRE) && !__atomic_load_n(&ending.done, __ATOMIC_ACQUIRE))
        usleep(100);
}

/* A capture of t allocates for the first time. 0: it asks fewer times. */
static int end_at_question(int nth)
{
    sim_options options = sim_defaults();
    options.panic = 0;
    begin_with(options);
    galloc_pool *pool = pool_new(NULL);
    cudaStream_t t = stream_new();
    cudaGraph_t graph = NULL;
    memset(&ending, 0, sizeof ending);
    ending.s = stream_new();
    ending.calls = nth;
    OK(galloc_graph_begin(&ending.group, pool, ending.s));
    OK(cudaStreamBeginCapture(t, cudaStreamCaptureModeRelaxed));
    sim_hook(before_the_question, NULL);
    void *p = get(pool, MIB(1), t);
    sim_hook(NULL, NULL);
    int reached = !ending.calls;
    if (reached) EXPECT_EQ(pthread_join(ending.other, NULL), 0);
    ending.goes = 0;
    OK(galloc_free(p, t));
    OK(cudaStreamEndCapture(t, &graph));
    OK(cudaGraphDestroy(graph));
    pool_end(pool);
    finish(); /* no finding: nobody asked a stream that has ended */
    return reached;
}

TEST(a_group_does_not_end_while_its_stream_is_asked)
{
    int calls = 0;
    while (calls < 20 && end_at_question(calls + 1)) calls++;
    EXPECT(calls > 0 && calls < 20);
}

/* ---- the end of a graph while a pool looks for such ends --------------------------------------------------------- */

static struct {
    galloc_pool *pool;
    const void *before, *after; /* the owners of a capture: before they change, and after they are loaded */
    cudaGraph_t graph;
} graph_end;

/* The pool has looked for graphs that are gone when the capture gives up its share. */
static void *exchanged(void *at)
{
    if (at != graph_end.before) return at;
    graph_end.before = NULL;
    (void)stats_of(graph_end.pool);
    return at;
}

/* The graph is gone as soon as the pool has seen that it was there. */
static void destroy_a_graph(const volatile void *at)
{
    if (!at || at != graph_end.after) return;
    graph_end.after = NULL;
    OK(cudaGraphDestroy(graph_end.graph));
}

/* Captures memory of the pool, and returns the owners of that capture. */
static const void *capture_a_block(cudaStream_t s, cudaGraph_t *graph)
{
    const void *owners;
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    OK(galloc_free(get(graph_end.pool, MIB(1), s), s));
    owners = &inside_pool(graph_end.pool)->captures->owners;
    OK(cudaStreamEndCapture(s, graph));
    return owners;
}

/* A graph that ends while another thread looks is found by the next look, at whatever moment that was. */
TEST(a_graph_that_ends_beside_a_look_is_found_by_the_next_one)
{
    for (int beside = 0; beside < 2; beside++) {
        begin();
        memset(&graph_end, 0, sizeof graph_end);
        graph_end.pool = pool_new(NULL);
        cudaStream_t s = stream_new();
        cudaGraph_t first = NULL;
        const void *owners = capture_a_block(s, &graph_end.graph);
        (void)capture_a_block(s, &first);
        if (beside) {
            OK(cudaGraphDestroy(first)); /* so that the pool has something to look for */
            graph_end.after = owners;
            (void)stats_of(graph_end.pool);
        } else {
            (void)stats_of(graph_end.pool);
            graph_end.before = owners;
            OK(cudaGraphDestroy(graph_end.graph));
        }
        EXPECT(!graph_end.after && !graph_end.before);
        EXPECT_EQ(stats_of(graph_end.pool).graphs, beside ? 0 : 1);
        if (!beside) OK(cudaGraphDestroy(first));
        stream_end(s);
        pool_end(graph_end.pool);
        finish();
    }
}

/* ---- after a store ----------------------------------------------------------------------------------------------- */

static void *shown; /* a block that other threads look for, without a lock */
static long looks;

static pthread_t publisher;
static int publishes; /* the thread makes the default pool, which no other has found yet */

static void *find_the_default_pool(void *unused)
{
    galloc_pool *pool;
    OK(galloc_pool_default(&pool, 0));
    return unused;
}

/* Once the default pool can be found, another thread finds it. */
static void look_for_the_default_pool(void)
{
    pthread_t thread;
    if (!publishes || !pthread_equal(pthread_self(), publisher) || !inside_has_default_pool(0)) return;
    publishes = 0;
    EXPECT_EQ(pthread_create(&thread, NULL, find_the_default_pool, NULL), 0);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
}

static void stored(void)
{
    look_for_the_default_pool();
    if (!shown) return;
    EXPECT(inside_block_is_found(shown));
    looks++;
}

TEST(a_default_pool_that_is_found_is_one)
{
    galloc_pool *pool;
    begin();
    publisher = pthread_self();
    publishes = 1;
    OK(galloc_pool_default(&pool, 0));
    EXPECT(!publishes);
    finish();
}

/* A block is alone in its 64 KiB until its rest is free: then the map of blocks has a leaf for both. */
TEST(a_block_is_found_while_its_leaf_is_made)
{
    begin();
    galloc_pool *pool = pool_new(NULL);
    void *first = get(pool, KIB(64), NULL), *second = get(pool, KIB(64), NULL); /* leaves came with the page */
    void *p = get(pool, KIB(128), NULL);
    EXPECT_EQ((uintptr_t)p % KIB(64), 0);
    shown = p;
    OK(galloc_resize(p, KIB(4), NULL));
    shown = NULL;
    EXPECT(looks > 0);
    OK(galloc_free(p, NULL));
    OK(galloc_free(first, NULL));
    OK(galloc_free(second, NULL));
    pool_end(pool);
    finish();
}

/* ---- before a lock is taken -------------------------------------------------------------------------------------- */

static struct {
    galloc_pool *pool, *handle;
    size_t before, n;
} reserve;

/* Once a call has used some of its marks, others take what it has reserved, and the host has no more memory. */
static void take_the_reserve(pthread_mutex_t *mutex)
{
    if (mutex != &reserve.pool->lock || reserve.n || inside_reserve(reserve.pool) + 2 > reserve.before) return;
    reserve.n = inside_reserve_take(reserve.pool);
    sim_fail_malloc(1, 1);
}

/* The block is still used after the refusal, and its next free succeeds. */
TEST(a_free_that_loses_its_reserve_leaves_the_block_as_it_was)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new(), both[] = {t, s};
    galloc_pool *pool = pool_new(NULL);
    cudaGraph_t graph = NULL;
    void *p = get(pool, 1000, s), *q = get(pool, 1000, t);
    OK(cudaStreamBeginCapture(t, cudaStreamCaptureModeRelaxed));
    OK(galloc_record_stream(q, t));
    reserve.pool = inside_pool(pool);
    reserve.before = inside_reserve(reserve.pool);
    at_lock = take_the_reserve;
    EXPECT_EQ(galloc_free_after(p, both, 2), cudaErrorMemoryAllocation);
    at_lock = NULL;
    EXPECT(reserve.n > 0);
    inside_reserve_give(reserve.pool);
    sim_fail_malloc(0, 0);
    OK(galloc_free_after(p, both, 2));
    OK(cudaStreamEndCapture(t, &graph));
    OK(cudaGraphDestroy(graph));
    OK(galloc_free(q, t));
    pool_end(pool);
    finish();
}

static struct {
    galloc_pool *pool, *other;
    pthread_mutex_t *mutex;
    pthread_t thread;
    int ends, stopped, gone;
} last;

static void wait_for_the_end_of_a_pool(pthread_mutex_t *mutex)
{
    if (mutex != last.mutex || !pthread_equal(pthread_self(), last.thread)) return;
    if (!__atomic_load_n(&last.ends, __ATOMIC_ACQUIRE) || last.stopped) return;
    say(&last.stopped);
    for (int i = 0; i < 200 && !__atomic_load_n(&last.gone, __ATOMIC_ACQUIRE); i++) usleep(1000);
}

static void *use_and_end(void *unused)
{
    last.thread = pthread_self();
    OK(cudaSetDevice(0));
    OK(galloc_free(get(last.other, 1000, cudaStreamPerThread), cudaStreamPerThread));
    say(&last.ends);
    return unused;
}

/* A thread ends while another one destroys a pool. The caches of its default stream in all other pools are emptied. */
TEST(a_thread_that_ends_beside_a_pool_leaves_nothing_in_others)
{
    pthread_t thread;
    begin();
    last.other = pool_new(NULL);
    last.pool = pool_new(NULL); /* the first of the list */
    last.mutex = &inside_pool(last.pool)->lock;
    cudaStream_t s = stream_new();
    OK(galloc_free(get(last.pool, 1000, s), s));
    at_lock = wait_for_the_end_of_a_pool;
    EXPECT_EQ(pthread_create(&thread, NULL, use_and_end, NULL), 0);
    hear(&last.stopped);
    pool_end(last.pool);
    say(&last.gone);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
    at_lock = NULL;
    EXPECT_EQ(inside_stream_at(last.other, 0).blocks, 0);
    pool_end(last.other);
    finish();
}

/* ---- what galloc_pool_check finds -------------------------------------------------------------------------------- */

TEST(a_descriptor_that_is_lost_is_found)
{
    begin();
    galloc_pool *handle = pool_new(NULL), *pool = inside_pool(handle);
    void *wait = inside_wait_take(pool);
    EXPECT_EQ(galloc_pool_check(handle), 1);
    inside_wait_give(pool, wait);
    EXPECT_EQ(galloc_pool_check(handle), 0);
    pool_end(handle);
    finish();
}

TEST(bins_that_have_each_others_block_are_found)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_config config = galloc_config_default();
    config.lane_bytes = 0;
    galloc_pool *pool = pool_new(&config);
    void *p = get_used(pool, MIB(1) / 2, s, 1), *a = get(pool, 1000, s);
    void *q = get_used(pool, MIB(1) / 2, t, 1), *b = get(pool, 1000, t);
    OK(galloc_free(p, s));
    OK(galloc_free(q, t));
    EXPECT_EQ(galloc_pool_check(pool), 0);
    if (!EXPECT(inside_swap_bins(p, q))) return;
    EXPECT(galloc_pool_check(pool) > 0);
    EXPECT(inside_swap_bins(p, q));
    EXPECT_EQ(galloc_pool_check(pool), 0);
    OK(galloc_free(a, s));
    OK(galloc_free(b, t));
    pool_end(pool);
    finish();
}

/* Blocks of twice the size are in another row, those of the next sizes in another column. */
TEST(a_block_in_the_bin_of_another_size_is_found)
{
    static const size_t others[] = {KIB(256), KIB(576)};
    begin_still();
    cudaStream_t s = stream_new();
    galloc_config config = galloc_config_default();
    config.lane_bytes = 0;
    galloc_pool *pool = pool_new(&config);
    void *p = get(pool, KIB(512), s), *a = get(pool, 1000, s), *larger = get(pool, MIB(1), s), *b = get(pool, 1000, s);
    OK(galloc_free(p, s));
    OK(galloc_free(larger, s));
    EXPECT_EQ(galloc_pool_check(pool), 0);
    for (int i = 0; i < 2; i++) {
        EXPECT(inside_misfile(p, others[i]));
        EXPECT(galloc_pool_check(pool) > 0);
        EXPECT(inside_misfile(p, 0));
        EXPECT_EQ(galloc_pool_check(pool), 0);
    }
    OK(galloc_free(a, s));
    OK(galloc_free(b, s));
    pool_end(pool);
    finish();
}

TEST_MAIN()
