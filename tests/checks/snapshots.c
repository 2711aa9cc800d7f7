/* snapshots.c - snapshots for check_viewer.sh: `snapshots FOLDER` writes each as NAME.json and NAME.pickle, and prints
   a line of the counters of all pools: NAME live reserved blocks graph_bytes. */

#include <stdio.h>
#include <string.h>

#include "sim.h"

#define GALLOC_STATIC
#define GALLOC_IMPLEMENTATION
#include "galloc.h"

#define MIB(n) ((size_t)(n) << 20)
enum { STREAMS = 4, POOLS = 3, BLOCKS = 700 };

static int failed;
static void ok(cudaError_t error)
{
    if (error) printf("FAILED %s\n", galloc_last_message());
    if (error) failed = 1;
}

static unsigned next_random(void)
{
    static unsigned long long state = 7;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)(state >> 33);
}

static void save(const char *folder, const char *name, galloc_pool *const *pools, int n)
{
    size_t live = 0, reserved = 0, blocks = 0, graphs = 0;
    char path[400];
    int i;
    for (i = 0; i < n; i++) {
        galloc_stats stats;
        ok(galloc_pool_stats(pools[i], &stats));
        live += stats.live.current;
        reserved += stats.reserved.current;
        blocks += stats.blocks.current;
        graphs += stats.graph_bytes;
    }
    snprintf(path, sizeof path, "%s/%s.json", folder, name);
    ok(galloc_snapshot_save(NULL, path));
    snprintf(path, sizeof path, "%s/%s.pickle", folder, name);
    ok(galloc_snapshot_save(NULL, path));
    printf("%s %zu %zu %zu %zu\n", name, live, reserved, blocks, graphs);
}

static galloc_pool *pool_of(const char *settings)
{
    galloc_config config = galloc_config_default();
    galloc_pool *pool = NULL;
    ok(galloc_config_parse(&config, settings, NULL, 0));
    ok(galloc_pool_create(&pool, &config));
    return pool;
}

/* Sizes as programs have them: most are small, a few are most of the bytes. */
static size_t some_size(void)
{
    unsigned kind = next_random() % 100;
    if (kind < 60) return 64 + next_random() % 60000;
    return kind < 95 ? 60000 + next_random() % MIB(3) : MIB(4) + next_random() % MIB(60);
}

/* Memory that a graph owns: allocated and freed in a capture. */
static cudaGraph_t graph_of(galloc_pool *pool, cudaStream_t stream)
{
    cudaGraph_t graph = NULL;
    void *p;
    ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    ok(galloc_pool_malloc(pool, &p, MIB(12), stream));
    ok(galloc_free(p, stream));
    ok(cudaStreamEndCapture(stream, &graph));
    return graph;
}

/* Memory that two streams' work may still use. */
static void leave_pending(galloc_pool *pool, cudaStream_t *streams)
{
    sim_access access = {NULL, MIB(4), SIM_WRITE, 1};
    void *p;
    ok(galloc_pool_malloc(pool, &p, MIB(9), streams[0]));
    ok(cudaStreamSynchronize(streams[0]));
    access.ptr = p;
    if (sim_launch(streams[0], &access, 1)) failed = 1;
    access.ptr = (char *)p + MIB(4);
    if (sim_launch(streams[1], &access, 1)) failed = 1;
    ok(galloc_free_after(p, streams, 2));
}

static void step(galloc_pool *const *pools, cudaStream_t *streams, void **block)
{
    galloc_request request;
    ok(galloc_free(*block, streams[next_random() % STREAMS]));
    *block = NULL;
    if (next_random() % 2) return;
    memset(&request, 0, sizeof request);
    request.bytes = some_size();
    request.stream = streams[next_random() % STREAMS];
    request.pool = pools[next_random() % POOLS];
    request.tag = next_random() % 5;
    ok(galloc_alloc(block, &request));
}

/* From here on there is a history, which ends where memory runs out. */
static void go_on(galloc_pool *const *pools, cudaStream_t *streams, void **blocks)
{
    galloc_stats stats;
    char text[40];
    void *p;
    int i;
    for (i = 0; i < POOLS; i++) ok(galloc_pool_history(pools[i], 100000));
    ok(galloc_tag_name(3, "<img src=x> weights"));
    for (i = 0; i < 2000; i++) {
        snprintf(text, sizeof text, "step %d </script>", i / 200);
        if (i % 200 == 0) ok(galloc_annotate(text));
        step(pools, streams, &blocks[next_random() % BLOCKS]);
    }
    ok(galloc_pool_stats(pools[0], &stats));
    if (galloc_pool_malloc(pools[0], &p, (size_t)8200 * MIB(1) - stats.live.current, streams[0]) !=
        cudaErrorMemoryAllocation)
        failed = 1;
}

int main(int argc, char **argv)
{
    static const char *const settings[POOLS] = {
        "memory_limit:8G", "backend:cudaMalloc,memory_limit:2G",
        "like:pytorch,expandable_segments:False,memory_limit:4G"};
    sim_options options = sim_defaults();
    cudaStream_t streams[STREAMS];
    galloc_pool *pools[POOLS];
    static void *blocks[BLOCKS];
    cudaGraph_t graph;
    int i;
    options.pace = SIM_PACE_STILL;
    if (argc != 2 || sim_start(&options)) return 2;
    save(argv[1], "none", pools, 0);
    for (i = 0; i < STREAMS; i++) ok(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking));
    for (i = 0; i < POOLS; i++) pools[i] = pool_of(settings[i]);
    save(argv[1], "empty", pools, POOLS);
    ok(galloc_pool_malloc(pools[0], &blocks[0], 5000, streams[0]));
    save(argv[1], "one", pools, POOLS);
    ok(galloc_free(blocks[0], streams[0]));
    for (i = 0; i < BLOCKS; i++) {
        galloc_request request;
        memset(&request, 0, sizeof request);
        request.bytes = some_size();
        request.stream = streams[next_random() % 9 * STREAMS / 12];
        request.pool = pools[next_random() % 8 ? 0 : 1 + next_random() % 2];
        request.tag = next_random() % 14 * (next_random() % 3 != 0);
        ok(galloc_alloc(&blocks[i], &request));
    }
    for (i = 0; i < BLOCKS; i++) {
        if (next_random() % 5 > 1) continue;
        ok(galloc_free(blocks[i], streams[next_random() % STREAMS]));
        blocks[i] = NULL;
    }
    graph = graph_of(pools[0], streams[3]);
    leave_pending(pools[0], streams);
    save(argv[1], "many", pools, POOLS);
    go_on(pools, streams, blocks);
    save(argv[1], "past", pools, POOLS);
    for (i = 0; i < BLOCKS; i++) ok(galloc_free(blocks[i], streams[0]));
    ok(cudaGraphDestroy(graph));
    sim_run(-1);
    for (i = 0; i < POOLS; i++) ok(galloc_pool_destroy(pools[i]));
    sim_stop();
    return failed;
}
