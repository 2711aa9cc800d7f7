/* test_snapshot.c - galloc_snapshot: both formats say the same, the sums are those of the counters, and errors leave
   nothing behind. */

#include "setup.h"
#include "value.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

static void (*before_rename)(void);
static int rename_fails;  /* with this errno; 0: it does what it should */
static char renamed[200]; /* the last file that got a new name */

int rename(const char *from, const char *to)
{
    int (*next)(const char *, const char *) = NULL;
    void (*call)(void) = before_rename;
    *(void **)(void *)&next = dlsym(RTLD_NEXT, "rename");
    before_rename = NULL;
    if (call) call();
    errno = rename_fails;
    snprintf(renamed, sizeof renamed, "%s", from);
    return rename_fails ? -1 : next(from, to);
}

/* The heaps of a process and its child are alike, and the child writes another file until it is whole. The first test,
   since galloc refuses the child of a process that has called it. */
TEST(processes_that_save_to_one_path_write_files_of_their_own)
{
    char folder[] = "/tmp/galloc_snapshot.XXXXXX", path[100], theirs[sizeof renamed] = "";
    int ends[2], status = 1;
    begin();
    EXPECT(mkdtemp(folder));
    EXPECT_EQ(pipe(ends), 0);
    snprintf(path, sizeof path, "%s/state.json", folder);
    fflush(NULL);
    pid_t child = fork(); /* before the first call of galloc */
    galloc_pool *pool = pool_limited(SIZE_MAX);
    OK(galloc_snapshot_save(pool, path));
    if (!child) _exit(test_failures || write(ends[1], renamed, sizeof renamed) != (ssize_t)sizeof renamed);
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    EXPECT_EQ(read(ends[0], theirs, sizeof theirs), (ssize_t)sizeof theirs);
    EXPECT(*theirs && strcmp(theirs, renamed));
    close(ends[0]);
    close(ends[1]);
    unlink(path);
    EXPECT_EQ(rmdir(folder), 0);
    pool_end(pool);
    finish();
}

static struct {
    galloc_pool *pool;
    const char *path;
} save_again;

static void *save_to_the_same_path(void *unused)
{
    OK(galloc_snapshot_save(save_again.pool, save_again.path));
    return unused;
}

static void let_another_thread_save(void)
{
    pthread_t thread;
    EXPECT_EQ(pthread_create(&thread, NULL, save_to_the_same_path, NULL), 0);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
}

/* So do two threads. */
TEST(threads_that_save_to_one_path_write_files_of_their_own)
{
    char folder[] = "/tmp/galloc_snapshot.XXXXXX", path[100];
    begin();
    EXPECT(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/state.json", folder);
    save_again.pool = pool_limited(SIZE_MAX);
    save_again.path = path;
    before_rename = let_another_thread_save;
    OK(galloc_snapshot_save(save_again.pool, path));
    EXPECT(!before_rename);
    unlink(path);
    EXPECT_EQ(rmdir(folder), 0);
    pool_end(save_again.pool);
    finish();
}

/* ---- reading what is written ------------------------------------------------------------------------------------- */

typedef struct text {
    char *data;
    size_t n, room;
    long parts, stop_at; /* stop_at: the part at which write refuses; 0: none */
} text;

static int keep(void *user, const void *data, size_t bytes)
{
    text *t = user;
    if (++t->parts == t->stop_at) return 1;
    if (t->n + bytes > t->room) {
        t->room = 2 * (t->n + bytes);
        t->data = realloc(t->data, t->room);
    }
    memcpy(t->data + t->n, data, bytes);
    t->n += bytes;
    return 0;
}

static value *snapshot(galloc_pool *pool, int format)
{
    text t = {NULL, 0, 0, 0, 0};
    value *v;
    OK(galloc_snapshot(pool, format, keep, &t));
    v = format == GALLOC_SNAPSHOT_JSON ? value_of_json(t.data, t.n) : value_of_pickle(t.data, t.n);
    EXPECT(v);
    free(t.data);
    return v;
}

/* Checks one segment. Adds to the sums. */
static void check_segment(const value *segment, uint64_t *total, uint64_t *requested, size_t *used)
{
    uint64_t at = number_of(segment, "address"), bytes = 0, allocated = 0, active = 0, of_blocks = 0;
    const value *block = value_of(segment, "blocks");
    EXPECT(value_count(block) > 0);
    for (block = block ? block->first : NULL; block; block = block->next) {
        const char *state = text_of(block, "state");
        int is_used = !strcmp(state, "active_allocated");
        EXPECT(is_used || !strcmp(state, "inactive") || !strcmp(state, "active_pending_free"));
        EXPECT_EQ(number_of(block, "address"), at); /* no gap */
        EXPECT(number_of(block, "requested_size") <= number_of(block, "size"));
        EXPECT(is_used || number_of(block, "requested_size") == 0);
        EXPECT_EQ(value_count(value_of(block, "frames")), 0);
        at += number_of(block, "size");
        bytes += number_of(block, "size");
        if (is_used) allocated += number_of(block, "size");
        if (strcmp(state, "inactive")) active += number_of(block, "size");
        of_blocks += number_of(block, "requested_size");
        *used += (size_t)is_used;
    }
    EXPECT_EQ(number_of(segment, "total_size"), bytes);
    EXPECT_EQ(number_of(segment, "allocated_size"), allocated);
    EXPECT_EQ(number_of(segment, "active_size"), active);
    EXPECT_EQ(number_of(segment, "requested_size"), of_blocks);
    *total += bytes;
    *requested += of_blocks;
}

/* The bytes of a page that lie in segments. */
static uint64_t in_segments(const value *json, uint64_t begin, uint64_t end)
{
    const value *segments = value_of(json, "segments"), *v;
    uint64_t bytes = 0;
    for (v = segments ? segments->first : NULL; v; v = v->next) {
        uint64_t at = number_of(v, "address"), until = at + number_of(v, "total_size");
        if (at < begin) at = begin;
        if (until > end) until = end;
        if (at < until) bytes += until - at;
    }
    return bytes;
}

/* Both formats are the same, and their sums are the counters. */
static void check_snapshot(galloc_pool *pool)
{
    value *json = snapshot(pool, GALLOC_SNAPSHOT_JSON), *pickle = snapshot(pool, GALLOC_SNAPSHOT_PICKLE);
    const value *v, *mine = value_of(value_of(json, "galloc"), "pools");
    galloc_stats stats = stats_of(pool);
    uint64_t total = 0, requested = 0, pages = 0;
    size_t used = 0;
    EXPECT(values_equal(json, pickle));
    v = value_of(json, "segments");
    for (v = v ? v->first : NULL; v; v = v->next) check_segment(v, &total, &requested, &used);
    EXPECT_EQ(value_count(mine), 1);
    mine = mine ? mine->first : NULL;
    v = value_of(mine, "pages");
    for (v = v ? v->first : NULL; v; v = v->next) {
        uint64_t at = v->first->number, bytes = v->first->next->number;
        EXPECT_EQ(in_segments(json, at, at + bytes), bytes);
        pages += bytes;
    }
    EXPECT_EQ(total + number_of(mine, "kept_by_driver"), stats.reserved.current);
    EXPECT_EQ(pages + number_of(mine, "kept_by_driver"), stats.reserved.current);
    EXPECT_EQ(requested, stats.live.current);
    EXPECT_EQ(used, stats.blocks.current);
    EXPECT_EQ(number_of(mine, "live"), stats.live.current);
    EXPECT_EQ(number_of(mine, "live_peak"), stats.live.peak);
    EXPECT_EQ(number_of(mine, "allocated"), stats.allocated.current);
    EXPECT_EQ(number_of(mine, "reserved"), stats.reserved.current);
    EXPECT_EQ(number_of(mine, "reserved_peak"), stats.reserved.peak);
    EXPECT_EQ(number_of(mine, "blocks"), stats.blocks.current);
    EXPECT_EQ(number_of(mine, "mallocs"), stats.mallocs);
    EXPECT_EQ(number_of(mine, "frees"), stats.frees);
    EXPECT_EQ(number_of(mine, "failures"), stats.failures);
    EXPECT_EQ(number_of(mine, "moves"), stats.moves);
    EXPECT_EQ(number_of(mine, "moved_bytes"), stats.moved_bytes);
    EXPECT_EQ(number_of(mine, "waits"), stats.waits);
    EXPECT_EQ(number_of(mine, "graph_bytes"), stats.graph_bytes);
    EXPECT_EQ(value_count(value_of(json, "device_traces")), 1);
    EXPECT_EQ(galloc_pool_check(pool), 0);
    value_free(json);
    value_free(pickle);
}

/* ---- what is in it ----------------------------------------------------------------------------------------------- */

TEST(an_empty_pool_has_no_segments)
{
    galloc_pool *pool;
    begin();
    pool = pool_limited(SIZE_MAX);
    check_snapshot(pool);
    OK(galloc_pool_destroy(pool));
    finish();
}

TEST(blocks_have_their_state_stream_and_tag)
{
    cudaStream_t stream;
    galloc_pool *pool;
    galloc_request request;
    void *p, *q;
    value *json;
    const value *block;
    begin_still();
    pool = pool_limited(SIZE_MAX);
    stream = stream_new();
    memset(&request, 0, sizeof request);
    request.bytes = 5000;
    request.stream = stream;
    request.pool = pool;
    request.tag = 7;
    OK(galloc_alloc(&p, &request));
    OK(galloc_pool_malloc(pool, &q, MIB(1), stream));
    put(stream, q, MIB(1), 1);
    OK(galloc_free(q, stream));
    json = snapshot(pool, GALLOC_SNAPSHOT_JSON);
    block = value_of(value_of(json, "segments")->first, "blocks")->first;
    EXPECT_EQ(value_count(value_of(json, "segments")), 1);
    EXPECT_EQ(number_of(block, "address"), (uintptr_t)p);
    EXPECT_EQ(number_of(block, "size"), 5120);
    EXPECT_EQ(number_of(block, "requested_size"), 5000);
    EXPECT_EQ(number_of(block, "tag"), 7);
    EXPECT_EQ(number_of(block, "stream"), stream_id(stream));
    EXPECT(!strcmp(text_of(block, "state"), "active_allocated"));
    EXPECT_EQ(number_of(block->next, "address"), (uintptr_t)q);
    EXPECT(!strcmp(text_of(block->next, "state"), "inactive")); /* in the stream's cache */
    EXPECT(!value_of(block->next, "tag"));
    EXPECT(strstr(text_of(value_of(value_of(json, "galloc"), "pools")->first, "settings"), "memory_limit:"));
    value_free(json);
    check_snapshot(pool);
    OK(galloc_free(p, stream));
    stream_end(stream);
    sim_run(-1);
    OK(galloc_pool_destroy(pool));
    finish();
}

TEST(memory_that_several_streams_used_is_pending)
{
    cudaStream_t streams[2];
    galloc_pool *pool;
    void *p;
    value *json;
    const value *block;
    begin_still();
    pool = pool_limited(SIZE_MAX);
    streams[0] = stream_new();
    streams[1] = stream_new();
    OK(galloc_pool_malloc(pool, &p, MIB(4), streams[0]));
    order(streams[0], streams[1]);
    put(streams[0], p, MIB(2), 1);
    put(streams[1], (char *)p + MIB(2), MIB(2), 1);
    OK(galloc_free_after(p, streams, 2));
    json = snapshot(pool, GALLOC_SNAPSHOT_PICKLE);
    block = value_of(value_of(json, "segments")->first, "blocks")->first;
    EXPECT(!strcmp(text_of(block, "state"), "active_pending_free"));
    value_free(json);
    check_snapshot(pool);
    sim_run(-1);
    OK(galloc_pool_trim(pool, SIZE_MAX, NULL));
    json = snapshot(pool, GALLOC_SNAPSHOT_PICKLE);
    block = value_of(value_of(json, "segments")->first, "blocks")->first;
    EXPECT(!strcmp(text_of(block, "state"), "inactive"));
    value_free(json);
    stream_end(streams[0]);
    stream_end(streams[1]);
    OK(galloc_pool_destroy(pool));
    finish();
}

TEST(memory_of_a_graph_names_its_capture)
{
    cudaStream_t stream;
    galloc_pool *pool;
    cudaGraph_t graph = NULL;
    unsigned long long id = 0;
    void *p;
    value *json;
    const value *block;
    begin();
    pool = pool_limited(SIZE_MAX);
    stream = stream_new();
    OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    OK(galloc_pool_malloc(pool, &p, MIB(4), stream));
    id = info_of(p).capture_id;
    EXPECT(id);
    put(stream, p, MIB(4), 1);
    OK(galloc_free(p, stream));
    OK(cudaStreamEndCapture(stream, &graph));
    json = snapshot(pool, GALLOC_SNAPSHOT_JSON);
    block = value_of(value_of(json, "segments")->first, "blocks")->first;
    EXPECT(!strcmp(text_of(block, "state"), "active_pending_free"));
    EXPECT_EQ(number_of(block, "capture"), id);
    EXPECT(number_of(value_of(value_of(json, "galloc"), "pools")->first, "graph_bytes") >= MIB(4));
    value_free(json);
    check_snapshot(pool);
    OK(cudaGraphDestroy(graph));
    stream_end(stream);
    OK(galloc_pool_destroy(pool));
    finish();
}

/* A graph that owns a block of 4 MiB. */
static cudaGraph_t graph_with_memory(galloc_pool *pool, cudaStream_t stream, void **p)
{
    cudaGraph_t graph = NULL;
    OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    *p = get_used(pool, MIB(4), stream, 1);
    OK(galloc_free(*p, stream));
    OK(cudaStreamEndCapture(stream, &graph));
    return graph;
}

/* A snapshot that is the first call after the end of a graph shows the memory of the graph as free. */
TEST(memory_of_a_graph_that_is_gone_is_free)
{
    begin();
    galloc_pool *pool = pool_limited(SIZE_MAX);
    cudaStream_t stream = stream_new();
    void *p;
    cudaGraph_t graph = graph_with_memory(pool, stream, &p);
    OK(cudaGraphDestroy(graph));
    value *json = snapshot(pool, GALLOC_SNAPSHOT_JSON);
    const value *block = value_of(value_of(json, "segments")->first, "blocks")->first;
    EXPECT_EQ(number_of(block, "address"), (uintptr_t)p);
    EXPECT(!strcmp(text_of(block, "state"), "inactive"));
    EXPECT(!value_of(block, "capture"));
    EXPECT_EQ(number_of(value_of(value_of(json, "galloc"), "pools")->first, "graph_bytes"), 0);
    value_free(json);
    check_snapshot(pool);
    stream_end(stream);
    pool_end(pool);
    finish();
}

TEST(an_address_is_not_of_a_graph_that_is_gone)
{
    begin();
    galloc_pool *pool = pool_limited(SIZE_MAX);
    cudaStream_t stream = stream_new();
    void *p;
    cudaGraph_t graph = graph_with_memory(pool, stream, &p);
    EXPECT(info_of(p).capture_id != 0);
    OK(cudaGraphDestroy(graph));
    EXPECT_EQ(info_of(p).capture_id, 0);
    stream_end(stream);
    pool_end(pool);
    finish();
}

static size_t graphs_of(galloc_pool *pool)
{
    galloc_stats stats;
    OK(galloc_pool_stats(pool, &stats));
    return stats.graphs;
}

/* A reset ends graphs, and nobody tells galloc. */
TEST(a_capture_is_not_counted_that_a_reset_has_ended)
{
    begin();
    galloc_pool *pool = pool_limited(SIZE_MAX);
    cudaStream_t stream = stream_new();
    void *p;
    cudaGraph_t graph = graph_with_memory(pool, stream, &p);
    EXPECT_EQ(graphs_of(pool), 1);
    OK(cudaDeviceReset());
    (void)galloc_pool_trim(pool, 0, NULL);
    EXPECT_EQ(graphs_of(pool), 0);
    (void)cudaGraphDestroy(graph);
    pool_end(pool);
    finish();
}

static struct {
    galloc_pool *pool;
    cudaStream_t stream;
    int retained, done;
} noting;

/* galloc knows a graph, and asks whether it is one of a group: the graph goes, and another call looks for such. */
static void end_the_graph_that_is_noted(const char *function)
{
    cudaGraph_t graph = NULL;
    noting.retained |= !strcmp(function, "cuGraphRetainUserObject");
    if (!noting.retained || noting.done || strcmp(function, "cuStreamGetCaptureInfo")) return;
    noting.done = 1;
    OK(cudaStreamEndCapture(noting.stream, &graph));
    OK(cudaGraphDestroy(graph));
    EXPECT_EQ(graphs_of(noting.pool), 0);
}

TEST(a_graph_is_not_counted_that_is_gone_while_it_is_noted)
{
    begin();
    galloc_pool *pool = pool_limited(SIZE_MAX);
    cudaStream_t stream = stream_new(), other = stream_new();
    galloc_graph *group = NULL;
    void *p = NULL;
    OK(galloc_graph_begin(&group, pool, other));
    OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    noting.pool = pool, noting.stream = stream, noting.retained = noting.done = 0;
    sim_hook(end_the_graph_that_is_noted, NULL);
    if (galloc_pool_malloc(pool, &p, MIB(4), stream) == cudaSuccess) OK(galloc_free(p, stream));
    sim_hook(NULL, NULL);
    EXPECT(noting.done);
    EXPECT_EQ(graphs_of(pool), 0);
    OK(galloc_graph_end(group));
    stream_end(stream);
    stream_end(other);
    pool_end(pool);
    finish();
}

/* All pools: the default ones are 0, those of the program are numbered. */
TEST(all_pools_of_the_process)
{
    galloc_pool *pool;
    cudaStream_t stream;
    void *p, *q;
    value *json;
    const value *segment;
    int own = 0, of_default = 0;
    begin();
    pool = pool_limited(GIB(1));
    stream = stream_new();
    OK(galloc_pool_malloc(pool, &p, MIB(4), stream));
    OK(galloc_malloc(&q, MIB(6), stream));
    json = snapshot(NULL, GALLOC_SNAPSHOT_JSON);
    EXPECT_EQ(value_count(value_of(value_of(json, "galloc"), "pools")), 2);
    for (segment = value_of(json, "segments")->first; segment; segment = segment->next) {
        const value *block = value_of(segment, "blocks")->first;
        uint64_t number = value_of(segment, "segment_pool_id")->first->next->number;
        if (number_of(block, "address") == (uintptr_t)p) own += number == 1;
        if (number_of(block, "address") == (uintptr_t)q) of_default += number == 0;
    }
    EXPECT_EQ(own, 1);
    EXPECT_EQ(of_default, 1);
    value_free(json);
    OK(galloc_free(p, stream));
    OK(galloc_free(q, stream));
    stream_end(stream);
    OK(galloc_pool_destroy(pool));
    finish();
}

/* The default pool is number 0. The others have numbers of their own from 1 on. */
TEST(each_pool_has_a_number_of_its_own)
{
    enum { POOLS = 4 };
    galloc_pool *pool[POOLS] = {NULL};
    void *p[POOLS];
    int seen[POOLS] = {0};
    begin();
    for (int i = 0; i < POOLS; i++) {
        if (i != 1) pool[i] = pool_new(NULL);
        if (pool[i]) p[i] = get(pool[i], MIB(1), NULL);
        else OK(galloc_malloc(&p[i], MIB(1), NULL));
    }
    value *json = snapshot(NULL, GALLOC_SNAPSHOT_JSON);
    EXPECT_EQ(value_count(value_of(json, "segments")), POOLS);
    for (const value *v = value_of(json, "segments")->first; v; v = v->next) {
        uint64_t number = value_of(v, "segment_pool_id")->first->next->number;
        if (EXPECT(number < POOLS)) seen[number]++;
        EXPECT_EQ(number == 0, number_of(value_of(v, "blocks")->first, "address") == (uintptr_t)p[1]);
    }
    for (int i = 0; i < POOLS; i++) EXPECT_EQ(seen[i], 1);
    value_free(json);
    for (int i = 0; i < POOLS; i++) {
        OK(galloc_free(p[i], NULL));
        if (pool[i]) pool_end(pool[i]);
    }
    finish();
}

/* A pickle has the number of each of many pools whole, as JSON does. */
TEST(more_than_255_pools_have_numbers_of_their_own)
{
    enum { POOLS = 257 };
    static galloc_pool *pool[POOLS];
    begin();
    for (int i = 0; i < POOLS; i++) pool[i] = pool_new(NULL);
    void *first = get(pool[0], MIB(1), NULL), *last = get(pool[POOLS - 1], MIB(1), NULL);
    value *json = snapshot(NULL, GALLOC_SNAPSHOT_JSON), *pickle = snapshot(NULL, GALLOC_SNAPSHOT_PICKLE);
    const value *segments = value_of(pickle, "segments");
    uint64_t most = 0;
    for (const value *v = segments->first; v; v = v->next) {
        uint64_t number = value_of(v, "segment_pool_id")->first->next->number;
        if (number > most) most = number;
    }
    EXPECT_EQ(value_count(segments), 2);
    EXPECT_EQ(most, POOLS);
    EXPECT(values_equal(value_of(json, "segments"), segments));
    value_free(json);
    value_free(pickle);
    OK(galloc_free(first, NULL));
    OK(galloc_free(last, NULL));
    for (int i = 0; i < POOLS; i++) pool_end(pool[i]);
    finish();
}

TEST(segments_name_their_device)
{
    galloc_pool *pools[2];
    cudaStream_t streams[2];
    void *blocks[2];
    value *json;
    const value *segment;
    uint64_t device;
    begin_with_devices(2, SIM_PACE_STILL);
    for (int i = 0; i < 2; i++) {
        OK(cudaSetDevice(i));
        pools[i] = pool_limited(GIB(1));
        streams[i] = stream_new();
        blocks[i] = get(pools[i], MIB(4), streams[i]);
    }
    json = snapshot(NULL, GALLOC_SNAPSHOT_JSON);
    EXPECT_EQ(value_count(value_of(json, "segments")), 2);
    for (segment = value_of(json, "segments")->first; segment; segment = segment->next) {
        device = number_of(segment, "device");
        if (EXPECT(device < 2)) EXPECT_EQ(number_of(segment, "address"), (uintptr_t)blocks[device]);
    }
    value_free(json);
    for (int i = 0; i < 2; i++) {
        OK(galloc_free(blocks[i], streams[i]));
        stream_end(streams[i]);
        pool_end(pools[i]);
    }
    OK(cudaSetDevice(0));
    finish();
}

/* So do pools, in whatever order they were made; a device without a pool has an empty history. */
TEST(pools_name_their_device)
{
    enum { POOLS = 3 };
    static const int devices[POOLS] = {2, 4, 1};
    galloc_config config = galloc_config_default();
    galloc_pool *pools[POOLS];
    const value *pool, *segment, *trace;
    int device = 0;
    begin_with_devices(6, SIM_PACE_STILL);
    config.history = 100;
    for (int i = 0; i < POOLS; i++) {
        OK(cudaSetDevice(devices[i]));
        config.device = devices[i];
        pools[i] = pool_new(&config);
        for (int k = 0; k < devices[i]; k++) OK(galloc_free(get(pools[i], MIB(devices[i]), NULL), NULL));
    }
    OK(cudaSetDevice(0));
    value *json = snapshot(NULL, GALLOC_SNAPSHOT_JSON);
    EXPECT_EQ(value_count(value_of(value_of(json, "galloc"), "pools")), POOLS);
    for (pool = value_of(value_of(json, "galloc"), "pools")->first; pool; pool = pool->next)
        EXPECT_EQ(number_of(pool, "mallocs"), number_of(pool, "device"));
    EXPECT_EQ(value_count(value_of(json, "segments")), POOLS);
    for (segment = value_of(json, "segments")->first; segment; segment = segment->next) {
        const value *of = value_of(segment, "segment_pool_id");
        for (pool = value_of(value_of(json, "galloc"), "pools")->first; pool; pool = pool->next)
            if (values_equal(value_of(pool, "segment_pool_id"), of))
                EXPECT_EQ(number_of(segment, "device"), number_of(pool, "device"));
    }
    EXPECT_EQ(value_count(value_of(json, "device_traces")), 5);
    for (trace = value_of(json, "device_traces")->first; trace; trace = trace->next, device++) {
        int allocations = 0;
        for (const value *e = trace->first; e; e = e->next) allocations += !strcmp(text_of(e, "action"), "alloc");
        EXPECT_EQ(allocations, device == 1 || device == 2 || device == 4 ? device : 0);
    }
    value_free(json);
    for (int i = 0; i < POOLS; i++) pool_end(pools[i]);
    finish();
}

/* ---- sums -------------------------------------------------------------------------------------------------------- */

/* Random calls under some settings; the sums hold after each few. */
static void random_program(const char *settings)
{
    galloc_config config = galloc_config_default();
    cudaStream_t streams[3];
    galloc_pool *pool;
    void *blocks[60] = {NULL};
    uint64_t random = test_seed();
    int i, k;
    begin();
    OK(galloc_config_parse(&config, settings, NULL, 0));
    pool = pool_new(&config);
    for (i = 0; i < 3; i++) streams[i] = stream_new();
    for (i = 0; i < 600; i++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        k = (int)(random >> 33) % 60;
        if (blocks[k]) {
            OK(galloc_free(blocks[k], streams[(random >> 40) % 3]));
            blocks[k] = NULL;
        } else if ((random >> 50) % 9 == 0) {
            galloc_request request;
            memset(&request, 0, sizeof request);
            request.bytes = MIB(1);
            request.max_bytes = MIB(64);
            request.stream = streams[(random >> 40) % 3];
            request.pool = pool;
            (void)galloc_alloc(&blocks[k], &request);
        } else {
            (void)galloc_pool_malloc(pool, &blocks[k], (size_t)(random >> 38) % ((random >> 60) ? KIB(900) : MIB(30)),
                                     streams[(random >> 40) % 3]);
        }
        if (i % 40 == 0) sim_run(-1);
        if (i % 100 == 77) OK(galloc_pool_trim(pool, stats_of(pool).reserved.current / 2, NULL));
        if (i % 25 == 0) check_snapshot(pool);
    }
    for (k = 0; k < 60; k++) OK(galloc_free(blocks[k], streams[0]));
    check_snapshot(pool);
    for (i = 0; i < 3; i++) stream_end(streams[i]);
    OK(galloc_pool_destroy(pool));
    finish();
}

/* A free that nobody has confirmed waits for a wait for the device that has failed. */
TEST(blocks_that_wait_for_the_device_are_free)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_limited(MIB(4));
    void *p = NULL, *wall = get(pool, MIB(1), t), *q = get(pool, KIB(64), s);
    OK(galloc_free(get(pool, KIB(32), s), s));
    OK(galloc_free(q, s));
    sim_fail("cuMemHostAlloc", 1, 1, 0);
    EXPECT_EQ(galloc_pool_malloc(pool, &p, MIB(4), t), cudaErrorMemoryAllocation);
    EXPECT(inside_stream_of(pool, stream_id(s)).fresh_blocks > 0);
    check_snapshot(pool);
    sim_fail_clear();
    OK(galloc_free(wall, t));
    check_snapshot(pool);
    pool_end(pool);
    finish();
}

static struct {
    galloc_pool *pool;
    int checks;
} leaves;

static void look_while_it_is_checked(const char *function)
{
    if (strcmp(function, "cuMemcpyDtoHAsync")) return;
    sim_hook(NULL, NULL);
    leaves.checks++;
    check_snapshot(leaves.pool);
}

/* So is a block that leaves the quarantine, also while its check is being queued. */
TEST(blocks_that_leave_the_quarantine_are_free)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = galloc_config_default();
    config.debug = GALLOC_DEBUG_QUARANTINE;
    config.quarantine_bytes = KIB(8);
    galloc_pool *pool = leaves.pool = pool_new(&config);
    leaves.checks = 0;
    void *live = get(pool, KIB(4), s);
    for (int i = 0; i < 8; i++) {
        void *p = get(pool, KIB(4), s);
        sim_hook(look_while_it_is_checked, NULL);
        OK(galloc_free(p, s));
        sim_hook(NULL, NULL);
    }
    EXPECT(leaves.checks > 0);
    OK(galloc_free(live, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

TEST(sums_hold_in_random_programs)
{
    static const char *const settings[] = {
        "memory_limit:2G", "memory_limit:256M", "overhead:0,memory_limit:2G", "memory_limit:2G,strategy:pooled",
        "expandable_segments:False,memory_limit:2G", "like:pytorch,memory_limit:2G",
        "backend:cudaMalloc,memory_limit:2G", "backend:cudaMallocAsync,memory_limit:2G", "memory_limit:1G,gc_age:1ms"};
    size_t i;
    for (i = 0; i < sizeof settings / sizeof *settings; i++) random_program(settings[i]);
}

/* A block that the program has not freed counts until then, and no more than that: not the rest of its segment. */
TEST(of_memory_that_a_reset_took_used_blocks_count)
{
    static const char *const settings[] = {"expandable_segments:False", "like:pytorch",
                                           "expandable_segments:False,strategy:pooled", "backend:cudaMalloc",
                                           "backend:cudaMallocAsync"};
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
        begin();
        galloc_config config = galloc_config_default();
        OK(galloc_config_parse(&config, settings[i], NULL, 0));
        galloc_pool *pool = pool_new(&config);
        void *p[4];
        for (int k = 0; k < 4; k++) p[k] = get(pool, MIB(4), NULL);
        OK(galloc_free(p[1], NULL));
        OK(cudaDeviceReset());
        OK(galloc_pool_trim(pool, 0, NULL)); /* here it is noticed */
        EXPECT_EQ(stats_of(pool).reserved.current, MIB(12));
        check_snapshot(pool);
        OK(galloc_free(p[2], NULL));
        check_snapshot(pool);
        void *q = get(pool, MIB(1), NULL); /* perhaps where the others were, which counts as freeing them */
        check_snapshot(pool);
        for (int k = 0; k < 4; k += 3)
            if (p[k] != q) (void)galloc_free(p[k], NULL);
        OK(galloc_free(q, NULL));
        check_snapshot(pool);
        OK(galloc_pool_destroy(pool));
        finish();
    }
}

TEST(pages_that_the_driver_refuses_to_take_back_count)
{
    galloc_pool *pool;
    void *p;
    begin();
    pool = pool_limited(SIZE_MAX);
    OK(galloc_pool_malloc(pool, &p, MIB(64), NULL));
    OK(galloc_free(p, NULL));
    sim_fail("cuMemUnmap", 1, 1, CUDA_ERROR_UNKNOWN);
    (void)galloc_pool_trim(pool, 0, NULL);
    (void)cudaGetLastError();
    sim_fail_clear();
    EXPECT(stats_of(pool).quarantined > 0);
    check_snapshot(pool);
    OK(galloc_pool_trim(pool, 0, NULL));
    EXPECT_EQ(stats_of(pool).quarantined, 0);
    OK(galloc_pool_destroy(pool));
    finish();
}

/* Two segments of cudaMalloc stay two where one ends at the beginning of the other, whichever was made first. */
TEST(segments_side_by_side_are_two)
{
    galloc_config config = config_fixed();
    galloc_pool *pool;
    value *v;
    void *p, *q, *low;
    begin();
    pool = pool_new(&config);
    p = get(pool, MIB(10), NULL);
    q = get(pool, MIB(10), NULL);
    low = p < q ? p : q;
    EXPECT_EQ(llabs((char *)p - (char *)q), MIB(10)); /* else nothing is tested */
    for (int i = 0; i < 2; i++) {
        v = snapshot(pool, GALLOC_SNAPSHOT_JSON);
        EXPECT_EQ(value_count(value_of(v, "segments")), 2);
        value_free(v);
        if (i) break;
        OK(galloc_free(low, NULL)); /* the other one is the older now */
        OK(galloc_pool_trim(pool, 0, NULL));
        EXPECT(get(pool, MIB(10), NULL) == low);
    }
    OK(galloc_free(p, NULL));
    OK(galloc_free(q, NULL));
    OK(galloc_pool_destroy(pool));
    finish();
}

/* Numbers of each length, around the borders of a pickle's codes. */
TEST(sizes_of_any_length)
{
    static const size_t sizes[] = {512, KIB(63), KIB(64), GIB(1), GIB(2), GIB(3), GIB(4), GIB(5)};
    galloc_pool *pool;
    void *p;
    size_t i;
    begin();
    pool = pool_limited(SIZE_MAX);
    for (i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        OK(galloc_pool_malloc(pool, &p, sizes[i], NULL));
        check_snapshot(pool);
        OK(galloc_free(p, NULL));
    }
    OK(galloc_pool_destroy(pool));
    finish();
}

/* A number is written in the bytes that it needs. */
TEST(numbers_at_the_bounds_of_their_codes)
{
    static const uint32_t tags[] = {1,     254,       255,         256,         257,        65534, 65535,
                                    65536, 65537,     (1u << 31) - 2, (1u << 31) - 1, 1u << 31, (1u << 31) + 1,
                                    UINT32_MAX};
    galloc_pool *pool;
    begin();
    pool = pool_limited(SIZE_MAX);
    for (size_t i = 0; i < sizeof tags / sizeof *tags; i++) {
        galloc_request request = {.bytes = 1000, .pool = pool, .tag = tags[i]};
        void *p;
        OK(galloc_alloc(&p, &request));
        for (int format = GALLOC_SNAPSHOT_JSON; format <= GALLOC_SNAPSHOT_PICKLE; format++) {
            value *v = snapshot(pool, format);
            const value *block = value_of(value_of(v, "segments")->first, "blocks")->first;
            while (block && strcmp(text_of(block, "state"), "active_allocated")) block = block->next;
            EXPECT(block && number_of(block, "tag") == tags[i]);
            value_free(v);
        }
        OK(galloc_free(p, NULL));
    }
    OK(galloc_pool_destroy(pool));
    finish();
}

/* ---- files and errors -------------------------------------------------------------------------------------------- */

static size_t file_size(const char *path)
{
    FILE *file = fopen(path, "rb");
    long n = -1;
    if (!file) return 0;
    if (!fseek(file, 0, SEEK_END)) n = ftell(file);
    fclose(file);
    return (size_t)n;
}

static value *read_file(const char *path, int pickle)
{
    size_t n = file_size(path);
    char *data = malloc(n + 1);
    FILE *file = fopen(path, "rb");
    value *v = NULL;
    if (EXPECT(file) && EXPECT_EQ(fread(data, 1, n, file), n))
        v = pickle ? value_of_pickle(data, n) : value_of_json(data, n);
    if (file) fclose(file);
    free(data);
    return v;
}

TEST(files_by_their_names)
{
    static const char *const names[] = {"state.json", "state.pickle", "state.pkl", "state"};
    char folder[] = "/tmp/galloc_snapshot.XXXXXX", path[100];
    struct rlimit limit;
    galloc_pool *pool;
    void *p;
    size_t i;
    value *v;
    begin();
    EXPECT(mkdtemp(folder));
    pool = pool_limited(SIZE_MAX);
    OK(galloc_pool_malloc(pool, &p, MIB(4), NULL));
    for (i = 0; i < 4; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        OK(galloc_snapshot_save(pool, path));
        v = read_file(path, i == 1 || i == 2);
        EXPECT_EQ(value_count(value_of(v, "segments")), 1);
        value_free(v);
        unlink(path);
    }
    snprintf(path, sizeof path, "%s/nowhere/state.json", folder);
    EXPECT_EQ(galloc_snapshot_save(pool, path), cudaErrorOperatingSystem);
    EXPECT(strstr(galloc_last_message(), "galloc_snapshot_save") && strstr(galloc_last_message(), path));
    EXPECT(strstr(galloc_last_message(), ": no such folder (errno ") != NULL);
    char *name = malloc(4001); /* too long for a message: the reason is there all the same */
    memset(name, 'x', 4000);
    name[4000] = 0;
    EXPECT_EQ(galloc_snapshot_save(pool, name), cudaErrorOperatingSystem);
    EXPECT(strstr(galloc_last_message(), "xxx... cannot be opened: ") && strstr(galloc_last_message(), "(errno "));
    free(name);
    EXPECT_EQ(galloc_snapshot_save(pool, NULL), cudaErrorInvalidValue);
    EXPECT_EQ(galloc_snapshot_save(pool, ""), cudaErrorInvalidValue);
    /* A file that cannot be written to its end is removed. */
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0) {
        struct rlimit little = {100, limit.rlim_max};
        void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
        snprintf(path, sizeof path, "%s/state.json", folder);
        EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &little), 0);
        EXPECT_EQ(galloc_snapshot_save(pool, path), cudaErrorOperatingSystem);
        EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
        signal(SIGXFSZ, handler);
        EXPECT(access(path, F_OK));
    }
    EXPECT_EQ(rmdir(folder), 0);
    OK(galloc_free(p, NULL));
    OK(galloc_pool_destroy(pool));
    finish();
}

/* The reason stands there in words, whichever part of the path it is. */
TEST(paths_that_cannot_be_say_why)
{
    static char path[400], name[300];
    char folder[] = "/tmp/galloc_snapshot.XXXXXX";
    begin();
    EXPECT(mkdtemp(folder));
    galloc_pool *pool = pool_limited(SIZE_MAX);
    snprintf(path, sizeof path, "%s/plain", folder);
    OK(galloc_snapshot_save(pool, path));
    snprintf(path, sizeof path, "%s/plain/state.json", folder);
    EXPECT_EQ(galloc_snapshot_save(pool, path), cudaErrorOperatingSystem);
    EXPECT(strstr(galloc_last_message(), "cannot be opened: a part of the path is no folder (errno ") != NULL);
    memset(name, 'n', sizeof name - 1);
    snprintf(path, sizeof path, "%s/%s", folder, name);
    EXPECT_EQ(galloc_snapshot_save(pool, path), cudaErrorOperatingSystem);
    EXPECT(strstr(galloc_last_message(), "cannot be opened: the name is too long (errno ") != NULL);
    snprintf(path, sizeof path, "%s/plain", folder);
    unlink(path);
    EXPECT_EQ(rmdir(folder), 0);
    pool_end(pool);
    finish();
}

/* Up to 300 bytes of a name are shown, and that there are more. */
TEST(a_long_path_is_shown_in_part)
{
    static char path[400];
    begin();
    galloc_pool *pool = pool_limited(SIZE_MAX);
    for (size_t n = 299; n <= 302; n++) {
        memset(path, '/', n);
        memcpy(path, "/dev", 4);
        memcpy(path + n - 4, "null", 5);
        EXPECT_EQ(galloc_snapshot_save(pool, path), cudaErrorOperatingSystem);
        EXPECT_EQ(strstr(galloc_last_message(), "... is no plain file") != NULL, n > 300);
        EXPECT_EQ(strstr(galloc_last_message(), "/null is no plain file") != NULL, n <= 300);
    }
    pool_end(pool);
    finish();
}

/* Each has words of its own; of others the number tells, and nothing is left behind. */
TEST(reasons_of_the_system_are_told_in_words)
{
    static const struct {
        int code;
        const char *words;
    } reasons[] = {
        {EACCES, "permission denied"},
        {EEXIST, "it is no plain file"},
        {EPERM, "operation not permitted"},
        {ENOENT, "no such folder"},
        {ENOTDIR, "a part of the path is no folder"},
        {ENOSPC, "no space is left"},
        {EFBIG, "the file is too large"},
        {EROFS, "the file system is read-only"},
        {ENAMETOOLONG, "the name is too long"},
        {EMFILE, "the process has too many open files"},
        {ENFILE, "the system has too many open files"},
        {ENOMEM, "no host memory"},
        {EIO, "input or output error"},
        {EXDEV, "unknown reason"},
    };
    char folder[] = "/tmp/galloc_snapshot.XXXXXX", path[100], said[200];
    begin();
    EXPECT(mkdtemp(folder));
    galloc_pool *pool = pool_limited(SIZE_MAX);
    snprintf(path, sizeof path, "%s/state.json", folder);
    for (size_t i = 0; i < sizeof reasons / sizeof *reasons; i++) {
        rename_fails = reasons[i].code;
        EXPECT_EQ(galloc_snapshot_save(pool, path), cudaErrorOperatingSystem);
        snprintf(said, sizeof said, "cannot be renamed: %s (errno %d)", reasons[i].words, reasons[i].code);
        if (!EXPECT(strstr(galloc_last_message(), said))) printf("    %s\n", galloc_last_message());
    }
    rename_fails = 0;
    EXPECT_EQ(rmdir(folder), 0);
    pool_end(pool);
    finish();
}

/* Threads, or processes that run out together, may save to one path: no call touches what another one is writing. */
TEST(a_file_that_another_call_is_writing_is_left_alone)
{
    char folder[] = "/tmp/galloc_snapshot.XXXXXX", path[100], other[120];
    galloc_pool *pool;
    FILE *file;
    begin();
    EXPECT(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/state.json", folder);
    snprintf(other, sizeof other, "%s.partial", path);
    file = fopen(other, "wb");
    if (EXPECT(file)) {
        fputs("part", file);
        fclose(file);
    }
    pool = pool_limited(SIZE_MAX);
    OK(galloc_snapshot_save(pool, path));
    EXPECT_EQ(file_size(other), 4);
    EXPECT(file_size(path) > 4);
    unlink(other);
    unlink(path);
    EXPECT_EQ(rmdir(folder), 0); /* nothing else is left */
    OK(galloc_pool_destroy(pool));
    finish();
}

/* The message has the reason also when the file fails before its end. */
TEST(a_device_that_is_full)
{
    galloc_pool *pool;
    void *blocks[100];
    char folder[] = "/tmp/galloc_snapshot.XXXXXX", path[100];
    struct rlimit limit, little;
    int i;
    begin();
    EXPECT(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/state.json", folder);
    pool = pool_limited(SIZE_MAX);
    for (i = 0; i < 100; i++) OK(galloc_pool_malloc(pool, &blocks[i], 1000, NULL));
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0) {
        void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
        little = limit;
        little.rlim_cur = 5000; /* more than one part */
        EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &little), 0);
        EXPECT_EQ(galloc_snapshot_save(pool, path), cudaErrorOperatingSystem);
        EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
        signal(SIGXFSZ, handler);
        EXPECT(strstr(galloc_last_message(), path) && strstr(galloc_last_message(), "cannot be written: "));
        EXPECT(strstr(galloc_last_message(), ": the file is too large (errno ") != NULL);
    }
    EXPECT_EQ(rmdir(folder), 0);
    for (i = 0; i < 100; i++) OK(galloc_free(blocks[i], NULL));
    OK(galloc_pool_destroy(pool));
    finish();
}

TEST(wrong_arguments_and_a_write_that_stops)
{
    galloc_pool *pool;
    text t = {NULL, 0, 0, 0, 0};
    void *blocks[200];
    long parts, i;
    begin();
    pool = pool_limited(SIZE_MAX);
    for (i = 0; i < 200; i++) OK(galloc_pool_malloc(pool, &blocks[i], 1000, NULL));
    EXPECT_EQ(galloc_snapshot(pool, 2, keep, &t), cudaErrorInvalidValue);
    EXPECT_EQ(galloc_snapshot(pool, -1, keep, &t), cudaErrorInvalidValue);
    EXPECT_EQ(galloc_snapshot(pool, 0, NULL, &t), cudaErrorInvalidValue);
    EXPECT_EQ(t.parts, 0);
    OK(galloc_snapshot(pool, 0, keep, &t));
    parts = t.parts;
    EXPECT(parts > 3);
    for (i = 1; i <= parts; i++) {
        t.n = 0;
        t.parts = 0;
        t.stop_at = i;
        EXPECT_EQ(galloc_snapshot(pool, 0, keep, &t), cudaErrorOperatingSystem);
        EXPECT_EQ(t.parts, i); /* it is not called again */
    }
    free(t.data);
    for (i = 0; i < 200; i++) OK(galloc_free(blocks[i], NULL));
    OK(galloc_pool_destroy(pool));
    EXPECT_EQ(galloc_snapshot(pool, 0, keep, &t), cudaErrorInvalidResourceHandle);
    finish();
}

TEST(without_host_memory_nothing_is_written)
{
    galloc_pool *pool;
    text t = {NULL, 0, 0, 0, 0};
    void *p;
    long nth;
    cudaError_t error = cudaErrorMemoryAllocation;
    begin();
    pool = pool_limited(SIZE_MAX);
    OK(galloc_pool_malloc(pool, &p, 1000, NULL));
    for (int all = 0; all < 2; all++) {
        t.parts = 0;
        error = cudaErrorMemoryAllocation;
        for (nth = 1; error && nth < 10; nth++) {
            size_t live = sim_malloc_live();
            sim_fail_malloc(nth, 0);
            error = galloc_snapshot(all ? NULL : pool, 0, keep, &t);
            EXPECT_EQ(error, sim_failed_mallocs() ? cudaErrorMemoryAllocation : cudaSuccess);
            sim_fail_malloc(0, 0);
            EXPECT(!error || t.parts == 0);
            EXPECT_EQ(sim_malloc_live(), live);
        }
        EXPECT(nth > 2 && nth < 10);
    }
    free(t.data);
    OK(galloc_free(p, NULL));
    OK(galloc_pool_destroy(pool));
    finish();
}

/* A file, and the text of what is live, fail as a whole and leave nothing behind. */
TEST(without_host_memory_no_file_is_written)
{
    char folder[] = "/tmp/galloc_snapshot.XXXXXX", path[100], said[GALLOC_REPORT_TEXT];
    cudaError_t error = cudaErrorMemoryAllocation;
    long nth;
    begin();
    galloc_pool *pool = pool_limited(SIZE_MAX);
    void *p = get(pool, 1000, NULL);
    EXPECT(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/state.json", folder);
    for (nth = 1; error && nth < 10; nth++) {
        size_t live = sim_malloc_live();
        sim_fail_malloc(nth, 0);
        error = galloc_snapshot_save(pool, path);
        sim_fail_malloc(0, 0);
        EXPECT(!error || error == cudaErrorMemoryAllocation);
        EXPECT_EQ(access(path, F_OK) == 0, !error);
        EXPECT_EQ(sim_malloc_live(), live);
    }
    EXPECT(nth > 2 && nth < 10);
    error = cudaErrorMemoryAllocation;
    for (nth = 1; error && nth < 10; nth++) {
        size_t live = sim_malloc_live();
        sim_fail_malloc(nth, 0);
        error = galloc_live_text(pool, said, sizeof said);
        sim_fail_malloc(0, 0);
        EXPECT(!error || error == cudaErrorMemoryAllocation);
        EXPECT(!error == !!strstr(said, "blocks in use: 1, of 1000 bytes"));
        EXPECT_EQ(sim_malloc_live(), live);
    }
    EXPECT(nth > 2 && nth < 10);
    EXPECT_EQ(unlink(path), 0);
    EXPECT_EQ(rmdir(folder), 0);
    OK(galloc_free(p, NULL));
    OK(galloc_pool_destroy(pool));
    finish();
}

/* A process without pools has a state as well. */
TEST(a_process_without_pools_has_no_settings)
{
    for (int format = 0; format < 2; format++) {
        begin();
        OK(cudaFree(0));
        value *v = snapshot(NULL, format);
        EXPECT_EQ(value_count(value_of(v, "segments")), 0);
        EXPECT(value_of(v, "allocator_settings"));
        EXPECT_EQ(value_count(value_of(v, "allocator_settings")), 0);
        value_free(v);
        finish();
    }
}

static int count_empty_parts(void *user, const void *data, size_t bytes)
{
    size_t *sums = (size_t *)user;
    (void)data;
    sums[0] += bytes;
    sums[1] += bytes == 0;
    return 0;
}

/* Fills the history with notes of so many bytes in all. Returns the bytes of a snapshot. */
static size_t bytes_with_notes(galloc_pool *pool, size_t bytes, size_t *empty)
{
    enum { NOTES = 200, LONGEST = 40 };
    size_t sums[2] = {0, 0};
    char note[LONGEST + 1];
    for (int i = 0; i < NOTES; i++) {
        size_t n = smaller(bytes, LONGEST);
        memset(note, 'x', n);
        note[n] = 0;
        OK(galloc_annotate(note));
        bytes -= n;
    }
    OK(galloc_snapshot(pool, GALLOC_SNAPSHOT_JSON, count_empty_parts, sums));
    *empty = sums[1];
    return sums[0];
}

/* A snapshot whose last part is full has no empty one after it. */
TEST(no_part_of_a_snapshot_is_empty)
{
    enum { PART = 4096 };
    galloc_config config = galloc_config_default();
    size_t empty = 0, bytes = 0, all, tries = 0;
    begin();
    config.history = 200;
    galloc_pool *pool = pool_new(&config);
    while ((all = bytes_with_notes(pool, bytes, &empty)) % PART && tries++ < 10)
        bytes = (bytes + PART - all % PART) % PART;
    EXPECT_EQ(all % PART, 0);
    EXPECT_EQ(empty, 0);
    OK(galloc_pool_destroy(pool));
    finish();
}

/* The host's allocator may take long, and lets other threads in: the state is copied all the same, of one time. */
static struct {
    galloc_pool *pool;
    void *blocks[600];
    int n, each, free, locked; /* `each`: blocks that other threads allocate during each call of the allocator */
} slow;

static void slow_malloc(size_t bytes)
{
    int i;
    (void)bytes;
    inside_on_malloc = NULL;
    if (inside_unlocked(slow.pool)) slow.free++;
    else slow.locked++;
    for (i = 0; i < slow.each && inside_unlocked(slow.pool); i++)
        OK(galloc_pool_malloc(slow.pool, &slow.blocks[slow.n++], 1000, NULL));
    inside_on_malloc = slow_malloc;
}

TEST(host_memory_for_a_snapshot_is_asked_for_without_locks)
{
    static const int each[] = {0, 3, 90}; /* fewer than are allowed for, or more each time */
    for (int i = 0; i < 3; i++) {
        text t = {NULL, 0, 0, 0, 0};
        value *v;
        void *first[40];
        int k;
        begin();
        memset(&slow, 0, sizeof slow);
        slow.pool = pool_limited(SIZE_MAX);
        slow.each = each[i];
        for (k = 0; k < 40; k++) OK(galloc_pool_malloc(slow.pool, &first[k], 1000, NULL));
        inside_on_malloc = slow_malloc;
        OK(galloc_snapshot(slow.pool, GALLOC_SNAPSHOT_PICKLE, keep, &t));
        inside_on_malloc = NULL;
        EXPECT_EQ(slow.locked, i == 2);
        EXPECT(slow.free >= 2 && slow.free < 8);
        v = value_of_pickle(t.data, t.n);
        EXPECT_EQ(number_of(value_of(value_of(v, "galloc"), "pools")->first, "blocks"), (uint64_t)(40 + slow.n));
        EXPECT_EQ(number_of(value_of(value_of(v, "galloc"), "pools")->first, "live"), (uint64_t)(40 + slow.n) * 1000);
        value_free(v);
        free(t.data);
        for (k = 0; k < 40; k++) OK(galloc_free(first[k], NULL));
        for (k = 0; k < slow.n; k++) OK(galloc_free(slow.blocks[k], NULL));
        OK(galloc_pool_destroy(slow.pool));
        finish();
    }
}

/* It may be called where memory has run out, and its write may call galloc. */
static value *when_out;

static int write_and_allocate(void *user, const void *data, size_t bytes)
{
    void *p;
    OK(galloc_malloc(&p, 100, NULL));
    OK(galloc_free(p, NULL));
    return keep(user, data, bytes);
}

static int snapshot_on_oom(const galloc_report *report, void *user)
{
    text t = {NULL, 0, 0, 0, 0};
    (void)report;
    OK(galloc_snapshot(user, GALLOC_SNAPSHOT_PICKLE, write_and_allocate, &t));
    when_out = value_of_pickle(t.data, t.n);
    free(t.data);
    return 0;
}

TEST(a_snapshot_when_memory_has_run_out)
{
    galloc_callbacks callbacks;
    galloc_pool *pool;
    void *p, *q;
    begin();
    pool = pool_limited(MIB(64));
    memset(&callbacks, 0, sizeof callbacks);
    callbacks.on_oom = snapshot_on_oom;
    callbacks.user = pool;
    OK(galloc_pool_set_callbacks(pool, &callbacks));
    OK(galloc_pool_malloc(pool, &p, MIB(40), NULL));
    EXPECT_EQ(galloc_pool_malloc(pool, &q, MIB(30), NULL), cudaErrorMemoryAllocation);
    EXPECT_EQ(number_of(value_of(value_of(when_out, "galloc"), "pools")->first, "live"), MIB(40));
    value_free(when_out);
    OK(galloc_free(p, NULL));
    OK(galloc_pool_destroy(pool));
    finish();
}

/* What has the name and is no plain file must stay: a link here, devices elsewhere. */
TEST(what_is_no_plain_file_is_not_replaced)
{
    char folder[] = "/tmp/galloc_snapshot.XXXXXX", path[100], target[100], found[100];
    galloc_pool *pool;
    begin();
    EXPECT(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/link.json", folder);
    snprintf(target, sizeof target, "%s/target.json", folder);
    pool = pool_limited(SIZE_MAX);
    OK(galloc_snapshot_save(pool, target));
    EXPECT_EQ(symlink(target, path), 0);
    EXPECT_EQ(galloc_snapshot_save(pool, path), cudaErrorOperatingSystem);
    EXPECT(strstr(galloc_last_message(), "no plain file"));
    EXPECT(readlink(path, found, sizeof found) > 0);
    EXPECT_EQ(galloc_snapshot_save(pool, folder), cudaErrorOperatingSystem);
    OK(galloc_snapshot_save(pool, target));
    unlink(path);
    unlink(target);
    EXPECT_EQ(rmdir(folder), 0);
    OK(galloc_pool_destroy(pool));
    finish();
}

/* ---- snapshot_on_oom --------------------------------------------------------------------------------------------- */

/* A pool runs out under this setting; %s stands for a folder. Returns the bytes of the file NAME there. */
static size_t file_when_out(const char *setting, const char *name, int device, int times)
{
    galloc_config config = config_limit(MIB(64));
    char folder[] = "/tmp/galloc_snapshot.XXXXXX", conf[400], path[400];
    galloc_pool *pool;
    void *p, *q;
    size_t n;
    EXPECT(mkdtemp(folder));
    snprintf(conf, sizeof conf, setting, folder);
    setenv("GALLOC_CONF", conf, 1);
    config.device = device;
    pool = pool_new(&config);
    OK(galloc_pool_malloc(pool, &p, MIB(40), NULL));
    snprintf(path, sizeof path, "%s/%s", folder, name);
    EXPECT_EQ(galloc_pool_malloc(pool, &q, GIB(1), NULL), cudaErrorMemoryAllocation); /* more than the pool may hold */
    EXPECT_EQ(file_size(path), 0);
    while (times--) {
        EXPECT_EQ(galloc_pool_malloc(pool, &q, MIB(30), NULL), cudaErrorMemoryAllocation);
        EXPECT(strstr(galloc_last_message(), "galloc_pool_malloc: out of memory"));
        n = file_size(path);
        unlink(path);
    }
    EXPECT_EQ(rmdir(folder), 0);
    OK(galloc_free(p, NULL));
    OK(galloc_pool_destroy(pool));
    return n;
}

static int files_told;

static void count_files_told(void)
{
    const char *path = strstr(log_text, "memory has run out: the state is in /tmp/galloc_snapshot.");
    if (path) files_told += strstr(path, "/out.json") != NULL;
}

TEST(a_file_when_memory_runs_out)
{
    char name[50];
    begin_with_devices(2, sim_defaults().pace);
    files_told = 0;
    log_hook = count_files_told;
    EXPECT(file_when_out("snapshot_on_oom:%s/out.json", "out.json", 0, 1) > 1000);
    log_hook = NULL;
    EXPECT_EQ(files_told, 1);
    EXPECT(file_when_out("overhead:0,snapshot_on_oom:%s/out.pickle,log:info", "out.pickle", 0, 1) > 500);
    snprintf(name, sizeof name, "%ld-%%-1.json", (long)getpid());
    OK(cudaSetDevice(1));
    EXPECT(file_when_out("snapshot_on_oom:%s/%%p-%%%%-%%d.json", name, 1, 1) > 1000);
    OK(cudaSetDevice(0));
    /* One file for each pool. */
    EXPECT_EQ(file_when_out("snapshot_on_oom:%s/out.json", "out.json", 0, 2), 0);
    /* No value, no file; the setting is refused where settings are checked. */
    EXPECT_EQ(file_when_out("snapshot_on_oom:%s/%%n.json", "out.json", 0, 1), 0);
    EXPECT_EQ(file_when_out("snapshot_on_oom:%s/out.json%%", "out.json", 0, 1), 0);
    EXPECT_EQ(file_when_out("snapshot_on_oom:%s/nowhere/out.json", "out.json", 0, 1), 0);
    EXPECT(strstr(log_text, "out of memory"));
    unsetenv("GALLOC_CONF");
    finish();
}

static int allocate_in_vain(const galloc_report *report, void *user)
{
    void *p;
    EXPECT_EQ(galloc_pool_malloc(user, &p, report->asked, NULL), cudaErrorMemoryAllocation);
    return 0;
}

/* Also in a growth, in galloc_pool_reserve, and by default pools; a callback's own failures leave it to the call
   outside. */
TEST(each_call_that_runs_out_writes_the_file)
{
    char folder[] = "/tmp/galloc_snapshot.XXXXXX", conf[200], path[100];
    galloc_callbacks callbacks;
    galloc_pool *pool;
    void *p;
    value *v;
    int i;
    begin();
    EXPECT(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/out.json", folder);
    snprintf(conf, sizeof conf, "memory_limit:64M,history:100,snapshot_on_oom:%s", path);
    setenv("GALLOC_CONF", conf, 1);
    memset(&callbacks, 0, sizeof callbacks);
    callbacks.on_oom = allocate_in_vain;
    for (i = 0; i < 4; i++) {
        pool = pool_limited(MIB(64));
        callbacks.user = pool;
        if (i == 1) OK(galloc_pool_set_callbacks(pool, &callbacks));
        OK(galloc_malloc_growable(&p, MIB(2), MIB(128), NULL));
        if (i == 0) EXPECT_EQ(galloc_pool_reserve(pool, MIB(64) + 1), cudaErrorMemoryAllocation);
        EXPECT_EQ(file_size(path), 0); /* that was more than it may hold */
        OK(galloc_free(p, NULL));
        p = get_growable(pool, MIB(40), MIB(128), NULL);
        if (i == 0) EXPECT_EQ(galloc_pool_reserve(pool, MIB(30)), cudaErrorMemoryAllocation);
        if (i == 1) EXPECT_EQ(galloc_pool_malloc(pool, &(void *){NULL}, MIB(30), NULL), cudaErrorMemoryAllocation);
        if (i == 2) {
            void *q = get(pool, MIB(20), NULL);
            EXPECT_EQ(galloc_resize(p, MIB(60), NULL), cudaErrorMemoryAllocation);
            OK(galloc_free(q, NULL));
        }
        if (i == 3) {
            void *q;
            OK(galloc_malloc(&q, MIB(40), NULL));
            EXPECT_EQ(galloc_malloc(&(void *){NULL}, MIB(30), NULL), cudaErrorMemoryAllocation);
            OK(galloc_free(q, NULL));
        }
        EXPECT(file_size(path) > 1000);
        v = read_file(path, 0);
        EXPECT_EQ(value_count(value_of(value_of(v, "galloc"), "pools")), 2); /* all pools */
        value_free(v);
        unlink(path);
        OK(galloc_free(p, NULL));
        OK(galloc_pool_destroy(pool));
    }
    EXPECT_EQ(rmdir(folder), 0);
    unsetenv("GALLOC_CONF");
    finish();
}

/* Frees a block, after an allocation of another pool that fails. */
static struct {
    galloc_pool *other;
    void *block;
} shortage;

static int fail_elsewhere(const galloc_report *report, void *user)
{
    void *p;
    (void)report;
    (void)user;
    EXPECT_EQ(galloc_pool_malloc(shortage.other, &p, MIB(60), NULL), cudaErrorMemoryAllocation);
    OK(galloc_free(shortage.block, NULL));
    return 1;
}

/* A pool that did not run out leaves no file: its call failed for another reason, later, or within a callback of a call
   that was served in the end. */
TEST(no_file_of_a_shortage_that_is_over_or_another_calls)
{
    char folder[] = "/tmp/galloc_snapshot.XXXXXX", conf[200], path[100];
    galloc_request request = {.bytes = 1, .alignment = 3};
    galloc_callbacks callbacks = {.on_oom = fail_elsewhere};
    galloc_pool *pool;
    void *p, *other;
    begin();
    EXPECT(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/out.json", folder);
    snprintf(conf, sizeof conf, "snapshot_on_oom:%s", path);
    pool = pool_limited(MIB(64));
    shortage.other = pool_limited(MIB(64));
    shortage.block = get(pool, MIB(40), NULL);
    other = get(shortage.other, MIB(40), NULL);
    setenv("GALLOC_CONF", conf, 1);
    OK(galloc_pool_set_callbacks(pool, &callbacks));
    p = get(pool, MIB(50), NULL);
    EXPECT_EQ(file_size(path), 0);
    EXPECT_EQ(galloc_pool_malloc(shortage.other, &(void *){NULL}, MIB(60), NULL), cudaErrorMemoryAllocation);
    EXPECT(file_size(path) > 500);
    unlink(path);
    request.pool = pool;
    EXPECT_EQ(galloc_alloc(&(void *){NULL}, &request), cudaErrorInvalidValue);
    EXPECT_EQ(file_size(path), 0);
    unlink(path);
    EXPECT_EQ(rmdir(folder), 0);
    OK(galloc_free(p, NULL));
    OK(galloc_free(other, NULL));
    OK(galloc_pool_destroy(pool));
    OK(galloc_pool_destroy(shortage.other));
    unsetenv("GALLOC_CONF");
    finish();
}

/* Another thread allocates and frees meanwhile: each snapshot is of one time. */
static int stop;

static void *churn(void *pool)
{
    cudaStream_t stream = stream_new();
    void *blocks[20] = {NULL}, *hot;
    int i, k;
    for (i = 0; !__atomic_load_n(&stop, __ATOMIC_RELAXED); i++) {
        OK(galloc_free(blocks[i % 20], stream));
        OK(galloc_pool_malloc(pool, &blocks[i % 20], (size_t)(i * 7919) % MIB(3) + 1, stream));
        for (k = 0; k < 200; k++) {
            OK(galloc_pool_malloc(pool, &hot, 5000, stream)); /* by the stream's cache, without the pool's lock */
            OK(galloc_free(hot, stream));
        }
    }
    for (i = 0; i < 20; i++) OK(galloc_free(blocks[i], stream));
    stream_end(stream);
    return NULL;
}

TEST(snapshots_beside_threads_are_of_one_time)
{
    galloc_pool *pool;
    pthread_t threads[2];
    int i;
    begin();
    pool = pool_limited(SIZE_MAX);
    stop = 0;
    for (i = 0; i < 2; i++) pthread_create(&threads[i], NULL, churn, pool);
    for (i = 0; i < 100; i++) {
        value *v = snapshot(pool, i % 2), *segment;
        const value *mine = value_of(value_of(v, "galloc"), "pools")->first;
        uint64_t total = 0, requested = 0;
        size_t used = 0;
        for (segment = value_of(v, "segments")->first; segment; segment = segment->next)
            check_segment(segment, &total, &requested, &used);
        EXPECT_EQ(total, number_of(mine, "reserved"));
        EXPECT_EQ(requested, number_of(mine, "live"));
        EXPECT_EQ(used, number_of(mine, "blocks"));
        value_free(v);
    }
    __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
    for (i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    OK(galloc_pool_destroy(pool));
    finish();
}

static int write_nothing(void *user, const void *data, size_t bytes)
{
    (void)user, (void)data, (void)bytes;
    return 0;
}

/* A snapshot of all pools that finds no host memory for one of them holds none of the others. */
TEST(a_snapshot_that_fails_lets_all_pools_go)
{
    begin();
    galloc_pool *pools[3];
    for (int i = 0; i < 3; i++) pools[i] = pool_new(NULL);
    for (int nth = 1; nth < 8; nth++) {
        sim_fail_malloc(nth, 0);
        (void)galloc_snapshot(NULL, GALLOC_SNAPSHOT_JSON, write_nothing, NULL);
        sim_fail_malloc(0, 0);
    }
    alarm(20); /* the end of a pool waits for calls that are in it */
    for (int i = 0; i < 3; i++) pool_end(pools[i]);
    alarm(0);
    finish();
}

TEST_MAIN()
