/* test_sweep.c - small scenarios in which the N-th CUDA call fails, or the N-th host malloc, for N = 1, 2, 3 ... until
   nothing is left to fail; that call alone, and all from there on. Whatever fails, every call returns success or an
   error, the heap stays whole, nothing leaks, and once the fault is over all goes on. */

#include "setup.h"

enum { HELD = 64 };

typedef struct world {
    galloc_pool *pool, *second; /* NULL: not made */
    cudaStream_t s[3];
    void *held[HELD];
    int home[HELD]; /* the stream that each was got on and is used on */
    int count;
    int device_fault, host_fault; /* which kind is armed */
    int stuck;                    /* and nothing that was done can be undone */
    int broken;                   /* the fault breaks the context: even sim_launch then fails */
    int failures;                 /* calls that returned an error */
    int backed;                   /* the simulated device has memory */
    int tells;                    /* on_map and on_unmap may be set */
    CUcontext context;            /* that was current before */
} world;

enum { SOURCE_PAGES, SOURCE_SEGMENTS, SOURCE_MALLOC, SOURCE_ASYNC, SOURCE_TORCH, SOURCE_CELLS,
       SOURCE_DEBUG /* pages, with guards */ };

typedef struct scenario {
    const char *name;
    void (*arrange)(world *w); /* before the faults */
    void (*act)(world *w);     /* under them */
    size_t limit;              /* of the pool; 0: none */
    int source;                /* SOURCE_... */
    const char *settings;      /* more of them, for galloc_config_parse; NULL: none */
} scenario;

/* ---- calls that are allowed to fail, and nothing else ------------------------------------------------------------ */

static int judge(world *w, cudaError_t err, long lines)
{
    EXPECT_EQ(log_lines - lines, err != cudaSuccess);
    if (err != cudaSuccess) {
        w->failures++;
        if (!EXPECT(w->device_fault || w->host_fault)) printf("    %s\n", galloc_last_message());
        if (w->host_fault && !w->stuck) EXPECT_EQ(err, cudaErrorMemoryAllocation);
    }
    if (!w->broken) OK(cudaPeekAtLastError());
    return err == cudaSuccess;
}

static void w_put(world *w, void *ptr, size_t bytes, int stream)
{
    if (w->backed && bytes > 4096) bytes = 4096; /* the device's memory is the host's then, and written to */
    if (!w->broken) put(w->s[stream], ptr, bytes, (uintptr_t)ptr);
}

static void hold(world *w, void *ptr, int stream)
{
    w->held[w->count] = ptr;
    w->home[w->count++] = stream;
}

static int index_of(const world *w, const void *ptr)
{
    int i = 0;
    while (i < w->count && w->held[i] != ptr) i++;
    return i;
}

static void let_go(world *w, const void *ptr)
{
    int i = index_of(w, ptr), last = w->count - 1;
    w->held[i] = w->held[last];
    w->home[i] = w->home[last];
    w->count = last;
}

static void *w_get_request(world *w, galloc_pool *pool, size_t bytes, size_t max_bytes, int stream)
{
    galloc_request request = {0};
    void *ptr = w;
    long lines = log_lines;
    galloc_stats before = stats_of(pool);
    int count = w->count;
    request.bytes = bytes;
    request.max_bytes = max_bytes;
    request.pool = pool;
    request.stream = w->s[stream];
    if (judge(w, galloc_alloc(&ptr, &request), lines)) {
        EXPECT(ptr != NULL && ptr != w);
        hold(w, ptr, stream);
        return ptr;
    }
    galloc_stats after = stats_of(pool);
    EXPECT(ptr == NULL);
    if (w->count != count) return NULL; /* on_oom has freed some */
    EXPECT_EQ(before.live.current, after.live.current);
    EXPECT_EQ(before.blocks.current, after.blocks.current);
    EXPECT_EQ(before.allocated.current, after.allocated.current);
    return NULL;
}

static void *w_get(world *w, size_t bytes, int stream)
{
    void *ptr = w_get_request(w, w->pool, bytes, 0, stream);
    if (ptr) w_put(w, ptr, bytes, stream);
    return ptr;
}

/* On any stream: for a block that was never used. Freeing needs no host memory. */
static void w_free_on(world *w, void *ptr, int stream)
{
    long lines = log_lines;
    if (!ptr) return;
    cudaError_t err = galloc_free(ptr, w->s[stream]);
    if (w->host_fault) OK(err);
    if (judge(w, err, lines)) let_go(w, ptr);
    else EXPECT_EQ(info_of(ptr).state, GALLOC_STATE_USED);
}

static void w_free(world *w, void *ptr)
{
    if (ptr) w_free_on(w, ptr, w->home[index_of(w, ptr)]);
}

static void w_free_after(world *w, void *ptr, int n)
{
    long lines = log_lines;
    if (!ptr) return;
    if (judge(w, galloc_free_after(ptr, w->s, n), lines)) let_go(w, ptr);
    else EXPECT_EQ(info_of(ptr).state, GALLOC_STATE_USED);
}

static void w_record(world *w, void *ptr, int stream)
{
    long lines = log_lines;
    if (ptr) judge(w, galloc_record_stream(ptr, w->s[stream]), lines);
}

static void w_resize(world *w, void *ptr, size_t bytes, int stream)
{
    long lines = log_lines;
    if (!ptr) return;
    galloc_pointer before = info_of(ptr);
    if (judge(w, galloc_resize(ptr, bytes, w->s[stream]), lines)) {
        EXPECT_EQ(info_of(ptr).requested, bytes);
        w_put(w, ptr, bytes, stream);
    } else {
        EXPECT_EQ(info_of(ptr).requested, before.requested);
    }
}

static void w_trim(world *w, size_t keep)
{
    long lines = log_lines;
    judge(w, galloc_pool_trim(w->pool, keep, NULL), lines);
}

static void w_reserve(world *w, size_t bytes)
{
    long lines = log_lines;
    judge(w, galloc_pool_reserve(w->pool, bytes), lines);
}

static void w_retire(world *w, int stream)
{
    long lines = log_lines;
    judge(w, galloc_stream_retire(w->s[stream]), lines);
}

/* ---- scenarios --------------------------------------------------------------------------------------------------- */

static void nothing(world *w) { (void)w; }

static void create_and_use(world *w)
{
    galloc_pool *pool = (galloc_pool *)w;
    long lines = log_lines;
    int made = judge(w, galloc_pool_create(&pool, NULL), lines);
    EXPECT(made ? pool != NULL : pool == NULL);
    w->second = pool;
    if (pool) w_free(w, w_get_request(w, pool, MIB(3), 0, 0));
    if (!pool) return;
    lines = log_lines;
    if (judge(w, galloc_pool_destroy(pool), lines)) w->second = NULL;
    else EXPECT_EQ(galloc_pool_check(pool), 0);
}

static void use_default(world *w)
{
    void *ptr = w;
    long lines = log_lines;
    if (!judge(w, galloc_malloc(&ptr, MIB(1), w->s[0]), lines)) {
        EXPECT(ptr == NULL);
        return;
    }
    hold(w, ptr, 0);
    w_put(w, ptr, MIB(1), 0);
    w_free(w, ptr);
}

static void first_block(world *w) { w_free(w, w_get(w, 1000, 0)); }

static void small_blocks(world *w)
{
    void *p[24];
    for (int i = 0; i < 24; i++) p[i] = w_get(w, (size_t)700 * (size_t)(i + 1), 0);
    for (int i = 0; i < 24; i += 2) w_free(w, p[i]);
    for (int i = 0; i < 24; i += 2) p[i] = w_get(w, 300, 0);
    for (int i = 0; i < 24; i++) w_free(w, p[i]);
}

static void growing_sizes(world *w)
{
    for (size_t bytes = MIB(1); bytes <= MIB(256); bytes *= 2) w_get(w, bytes, 0);
}

static void grow_and_merge(world *w)
{
    void *p[6];
    for (int i = 0; i < 6; i++) p[i] = w_get(w, MIB(5), 0);
    for (int i = 0; i < 6; i++) w_free(w, p[(i * 5) % 6]);
    w_get(w, MIB(30), 0);
}

static void two_streams(world *w)
{
    void *p[6];
    for (int i = 0; i < 6; i++) p[i] = w_get(w, MIB(3), i % 2);
    for (int i = 0; i < 6; i++) w_free(w, p[i]);
    sim_run(-1);
    for (int i = 0; i < 6; i++) w_get(w, MIB(3), 1 - i % 2);
}

static void fill(world *w)
{
    for (int i = 0; i < 4; i++) w_get(w, MIB(4), i % 2);
}

/* Under a limit, so that memory goes from stream to stream by waits. */
static void hand_on(world *w)
{
    for (int i = w->count - 1; i >= 0; i--) w_free(w, w->held[i]);
    w_free(w, w_get(w, MIB(16), 2));
    w_free(w, w_get(w, MIB(9), 1));
    w_get(w, MIB(14), 0);
}

static void free_elsewhere(world *w)
{
    w_free(w, w_get(w, MIB(8), 0));
    w_free_on(w, w_get_request(w, w->pool, MIB(8), 0, 0), 1);
    w_free_on(w, w_get_request(w, w->pool, MIB(8), 0, 1), 2);
    w_free(w, w_get(w, MIB(8), 2));
    w_free(w, w_get(w, MIB(8), 0));
}

static void free_after_all(world *w)
{
    void *p = w_get(w, MIB(8), 0), *q = w_get(w, 1000, 1);
    w_free_after(w, q, 2);
    w_free_after(w, p, 3);
    w_get(w, MIB(8), 1);
}

static void record(world *w)
{
    void *p = w_get(w, MIB(6), 0), *q = w_get(w, 1000, 0);
    for (int i = 0; i < 3; i++) w_record(w, p, i);
    w_record(w, q, 2);
    w_free(w, p);
    w_free(w, q);
    w_get(w, MIB(8), 1);
    w_get(w, MIB(6), 2);
}

static void grow_in_place(world *w)
{
    void *p = w_get_request(w, w->pool, MIB(2), MIB(40), 0);
    w_get(w, MIB(2), 1);
    w_resize(w, p, MIB(10), 0);
    w_resize(w, p, MIB(40), 0);
    w_resize(w, p, MIB(3), 0);
    w_get(w, MIB(4), 1);
    w_resize(w, p, MIB(20), 0);
}

static void reserve_and_use(world *w)
{
    w_reserve(w, MIB(48));
    for (int i = 0; i < 4; i++) w_get(w, MIB(7), i % 3);
    w_reserve(w, MIB(48));
}

static void arrange_holes(world *w)
{
    void *p[16];
    for (int i = 0; i < 16; i++) p[i] = w_get(w, MIB(2) + MIB(2) * (size_t)(i % 3), i % 2);
    for (int i = 0; i < 16; i++)
        if (i % 3) w_free(w, p[i]);
}

/* Free pages with a used one between each and the next. */
static void arrange_comb(world *w)
{
    void *p[25];
    for (int i = 0; i < 25; i++) p[i] = w_get(w, MIB(2), i % 2 ? i / 2 % 2 : 0);
    for (int i = 1; i < 25; i += 2) w_free(w, p[i]);
}

/* By pages that move: a stream's own, then those of another; and again while the old addresses are leaving. */
static void move(world *w)
{
    void *p = w_get(w, MIB(12), 0);
    w_get(w, MIB(11), 2);
    w_free(w, p);
    sim_run(-1);
    w_get(w, MIB(3), 1);
    w_get(w, MIB(8), 1);
    w_trim(w, 0);
}

static void trim_in_steps(world *w)
{
    w_trim(w, MIB(40));
    w_trim(w, 0);
    w_get(w, MIB(24), 0);
    w_trim(w, 0);
}

static void trim_and_grow(world *w)
{
    w_trim(w, 0);
    for (int i = 0; i < 5; i++) w_get(w, MIB(2) * (size_t)(i + 1), i % 3);
}

static void retire_all(world *w)
{
    for (int i = 0; i < 3; i++) w_free(w, w_get(w, KIB(600), i));
    for (int i = 0; i < 3; i++) w_retire(w, i);
    w_get(w, KIB(1600), 1);
}

/* Memory that is cached in other shapes must go before the device can serve: the whole ladder. */
static void squeeze(world *w)
{
    for (int i = w->count - 1; i > 0; i--) w_free(w, w->held[i]);
    w_get(w, MIB(70), 2);
    w_get(w, MIB(12), 1);
}

static void destroy_pool(world *w)
{
    long lines = log_lines;
    while (w->count) {
        int before = w->count;
        w_free(w, w->held[0]);
        if (w->count == before) return;
    }
    if (judge(w, galloc_pool_destroy(w->pool), lines)) w->pool = NULL;
}

static void shut_down(world *w)
{
    void *ptr = NULL;
    long lines = log_lines;
    destroy_pool(w);
    lines = log_lines;
    if (judge(w, galloc_malloc(&ptr, MIB(6), w->s[1]), lines)) {
        hold(w, ptr, 1);
        w_free(w, ptr);
    }
    if (w->pool || w->count) return;
    lines = log_lines;
    judge(w, galloc_shutdown(), lines);
}

/* A stream of the second device, while the first one is current. */
static void arrange_elsewhere(world *w)
{
    OK(cudaStreamDestroy(w->s[2]));
    OK(cudaSetDevice(1));
    w->s[2] = stream_new();
    OK(cudaSetDevice(0));
}

/* Pools of two devices; each stream's work on blocks of both. */
static void elsewhere(world *w)
{
    galloc_config config = galloc_config_default();
    void *p = w, *q;
    long lines = log_lines;
    if (judge(w, galloc_malloc(&p, MIB(1), w->s[2]), lines)) {
        hold(w, p, 2);
        w_free(w, p);
    }
    config.device = 1;
    lines = log_lines;
    if (!judge(w, galloc_pool_create(&w->second, &config), lines)) return;
    p = w_get_request(w, w->second, MIB(6), 0, 2);
    q = w_get_request(w, w->second, 1000, 0, 2);
    w_record(w, p, 0);
    w_free_on(w, q, 1);
    w_free_after(w, p, 3);
    w_retire(w, 2);
    lines = log_lines;
    judge(w, galloc_pool_trim(w->second, 0, NULL), lines);
    w_free(w, w_get(w, MIB(3), 0));
}

static void told(galloc_pool *pool, void *addr, size_t bytes, void *user)
{
    EXPECT(pool && addr && bytes && user);
}

static void arrange_told(world *w)
{
    galloc_callbacks call = {0};
    call.on_map = call.on_unmap = told;
    call.user = &call;
    arrange_comb(w);
    OK(galloc_pool_set_callbacks(w->pool, &call));
}

/* Another pool of the device holds most of what both may hold, and uses none of it. */
static void arrange_neighbour(world *w)
{
    galloc_config config = galloc_config_default();
    config.device_limit = MIB(40);
    w->second = pool_new(&config);
    void *p = get(w->second, MIB(24), w->s[1]);
    OK(galloc_free(p, w->s[1]));
}

static void ask_the_neighbour(world *w)
{
    w_get(w, MIB(20), 0);
    w_get(w, MIB(18), 1);
}

/* Calls of the program alone: no fault meets them. */
#define PROGRAM(calls) do { sim_fail_pause(1); calls; sim_fail_pause(0); } while (0)
/* A call of CUDA by the program. */
#define CUDA(call) PROGRAM(cudaError_t error_ = (call); EXPECT(error_ == cudaSuccess || w->broken))

static void streams_anew(world *w)
{
    OK(cudaDeviceReset());
    OK(cudaFree(NULL));
    for (int i = 0; i < 3; i++) w->s[i] = stream_new();
}

/* Used, freed and recorded blocks of three streams, whose work may not have run. */
static void mixture(world *w)
{
    void *p[9];
    for (int i = 0; i < 9; i++) p[i] = w_get(w, i % 2 ? KIB(300) : MIB(3), i % 3);
    w_record(w, p[0], 1);
    w_record(w, p[1], 2);
    for (int i = 3; i < 9; i++) w_free(w, p[i]);
}

static void arrange_reset(world *w)
{
    mixture(w);
    streams_anew(w);
}

/* Blocks from before the reset end, and new ones come. */
static void go_on(world *w)
{
    for (int i = 0; i < 3; i++) w_free(w, w_get(w, i % 2 ? KIB(300) : MIB(3), i));
    if (w->count > 2) w_record(w, w->held[1], 2);
    if (w->count > 1) w_free_after(w, w->held[0], 2);
    if (w->count > 1) w_free_on(w, w->held[1], 2);
    w_get(w, MIB(5), 1);
    w_trim(w, 0);
    w_free(w, w_get(w, 700, 2));
    w_retire(w, 2);
}

/* The program frees what a reset has taken before the driver gives the addresses out again. */
static void free_first(world *w)
{
    for (int i = w->count - 1; i >= 0; i--) {
        void *ptr = w->held[i];
        w_free(w, ptr);
        if (index_of(w, ptr) < w->count) PROGRAM(w_free(w, ptr));
    }
    go_on(w);
}

static void reset_amid(world *w)
{
    mixture(w);
    PROGRAM(streams_anew(w));
    go_on(w);
}

static void reset_amid_and_free(world *w)
{
    mixture(w);
    PROGRAM(streams_anew(w));
    free_first(w);
}

static void reserve_first(world *w)
{
    w_reserve(w, MIB(12));
    go_on(w);
}

/* A stream's capture, whose graph is launched and ends: what it freed, a result, an input that was recorded. */
static void capture(world *w)
{
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    void *input = w_get(w, KIB(900), 1), *p, *result;
    CUDA(cudaStreamSynchronize(w->s[1]));
    CUDA(cudaStreamBeginCapture(w->s[0], cudaStreamCaptureModeRelaxed));
    w_record(w, input, 0);
    p = w_get(w, MIB(3), 0);
    w_free(w, p);
    result = w_get(w, MIB(2), 0);
    w_free(w, w_get(w, 1000, 0));
    CUDA(cudaStreamEndCapture(w->s[0], &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    w_free(w, w_get(w, MIB(3), 1));
    CUDA(cudaGraphLaunch(exec, w->s[0]));
    w_free(w, result);
    CUDA(cudaStreamSynchronize(w->s[0]));
    w_free(w, input);
    CUDA(cudaGraphExecDestroy(exec));
    CUDA(cudaGraphDestroy(graph));
    w_free(w, w_get(w, MIB(4), 2));
    w_trim(w, 0);
}

/* Two captures of a group, one after the other. */
static void group(world *w)
{
    cudaGraph_t graph[2] = {NULL, NULL};
    galloc_graph *group = NULL;
    long lines = log_lines;
    if (!judge(w, galloc_graph_begin(&group, w->pool, w->s[0]), lines)) EXPECT(group == NULL);
    for (int i = 0; i < 2; i++) {
        CUDA(cudaStreamBeginCapture(w->s[0], cudaStreamCaptureModeRelaxed));
        w_free(w, w_get(w, MIB(3), 0));
        w_get(w, KIB(100), 0);
        CUDA(cudaStreamEndCapture(w->s[0], &graph[i]));
    }
    lines = log_lines;
    if (group) PROGRAM(OK(galloc_graph_end(group)));
    for (int i = w->count - 1; i >= 0; i--) w_free_on(w, w->held[i], 1);
    lines = log_lines;
    if (group && !judge(w, galloc_graph_release(group, w->s[1]), lines))
        PROGRAM(OK(galloc_graph_release(group, w->s[1])));
    for (int i = 0; i < 2; i++) CUDA(cudaGraphDestroy(graph[i]));
    w_free(w, w_get(w, MIB(4), 2));
}

/* The default streams in place of two of the program's own. */
static void arrange_default_streams(world *w)
{
    stream_end(w->s[0]);
    stream_end(w->s[1]);
    w->s[0] = cudaStreamLegacy;
    w->s[1] = cudaStreamPerThread;
}

static void arrange_default_streams_reset(world *w)
{
    arrange_default_streams(w);
    mixture(w);
    streams_anew(w);
    arrange_default_streams(w);
}

/* Blocks with room that grow and shrink after a reset, while other streams use some of them. */
static void grow_after_a_reset(world *w)
{
    void *p = w_get_request(w, w->pool, MIB(2), MIB(20), 0), *q = w_get_request(w, w->pool, KIB(40), MIB(8), 1);
    w_resize(w, p, MIB(7), 0);
    w_record(w, p, 2);
    PROGRAM(streams_anew(w));
    w_resize(w, p, MIB(3), 0);
    w_resize(w, q, MIB(5), 1);
    w_get(w, MIB(5), 2);
    w_resize(w, p, MIB(12), 0);
    w_free_after(w, p, 3);
    w_free(w, q);
    w_trim(w, MIB(4));
    w_get(w, MIB(9), 0);
}

/* The neighbour's memory ends, or stays, with a reset; then it is asked for. */
static void neighbour_after_a_reset(world *w)
{
    w_get(w, MIB(4), 0);
    PROGRAM(streams_anew(w));
    w_get(w, MIB(20), 0);
    w_free(w, w_get_request(w, w->second, MIB(3), 0, 1));
    w_get(w, MIB(12), 1);
}

/* One of two devices is reset, and streams of the other one use its memory. */
static void reset_of_a_neighbour(world *w)
{
    galloc_config config = galloc_config_default();
    void *p, *q, *r;
    long lines = log_lines;
    config.device = 1;
    if (!judge(w, galloc_pool_create(&w->second, &config), lines)) return;
    p = w_get_request(w, w->second, MIB(6), 0, 2);
    q = w_get_request(w, w->second, 1000, 0, 0);
    r = w_get_request(w, w->pool, MIB(3), 0, 2);
    w_record(w, p, 0);
    w_free_on(w, w_get_request(w, w->second, MIB(3), 0, 2), 0);
    CUDA(cudaSetDevice(1));
    CUDA(cudaDeviceReset());
    PROGRAM(w->s[2] = stream_new());
    CUDA(cudaSetDevice(0));
    w_free_on(w, r, 2);
    w_free_on(w, p, 1);
    w_get_request(w, w->second, MIB(3), 0, 2);
    w_free_on(w, q, 2);
    w_get(w, MIB(4), 0);
    w_get_request(w, w->pool, MIB(2), 0, 2);
    lines = log_lines;
    judge(w, galloc_pool_trim(w->second, 0, NULL), lines);
}

static int frees_when_short(const galloc_report *report, void *user)
{
    world *w = (world *)user;
    long lines = log_lines;
    int before = w->count;
    EXPECT(report != NULL);
    if (before) w_free(w, w->held[0]);
    log_lines = lines; /* those of the call that ran short are counted */
    return w->count < before;
}

/* The program frees blocks when memory runs out; memory comes and goes under a limit that moves. */
static void short_of_memory(world *w)
{
    galloc_callbacks call = {0};
    long lines = log_lines;
    if (w->tells) call.on_map = call.on_unmap = told;
    call.on_oom = frees_when_short;
    call.user = w;
    judge(w, galloc_pool_set_callbacks(w->pool, &call), lines);
    for (int i = 0; i < 5; i++) w_get(w, MIB(5), i % 3);
    lines = log_lines;
    judge(w, galloc_pool_set_limit(w->pool, w->tells ? MIB(14) : MIB(45)), lines);
    for (int i = 0; i < 3; i++) w_get(w, MIB(5), i % 3);
    lines = log_lines;
    memset(&call, 0, sizeof call);
    judge(w, galloc_pool_set_callbacks(w->pool, &call), lines);
}

static int take_part(void *user, const void *part, size_t bytes)
{
    EXPECT(part != NULL);
    *(size_t *)user += bytes;
    return 0;
}

/* Views of the heap, while memory moves. */
static void look_at_all(world *w)
{
    static char text[GALLOC_REPORT_TEXT];
    galloc_stream_stats streams[4];
    size_t bytes = 0;
    int n;
    long lines = log_lines;
    judge(w, galloc_pool_history(w->pool, 100), lines);
    move(w);
    lines = log_lines;
    judge(w, galloc_snapshot(w->pool, GALLOC_SNAPSHOT_JSON, take_part, &bytes), lines);
    lines = log_lines;
    judge(w, galloc_snapshot(NULL, GALLOC_SNAPSHOT_PICKLE, take_part, &bytes), lines);
    lines = log_lines;
    judge(w, galloc_live_text(w->pool, text, sizeof text), lines);
    lines = log_lines;
    judge(w, galloc_pool_streams(w->pool, streams, 4, &n), lines);
    lines = log_lines;
    judge(w, galloc_pool_sync_point(w->pool, NULL), lines);
}

static const scenario scenarios[] = {
    {"default_streams", arrange_default_streams, mixture, 0, 0, NULL},
    {"default_streams_hand_on", arrange_default_streams, hand_on, MIB(20), 0, NULL},
    {"default_streams_reset", arrange_default_streams_reset, go_on, 0, 0, NULL},
    {"default_streams_torch", arrange_default_streams, record, MIB(40), SOURCE_TORCH, NULL},
    {"default_streams_async", arrange_default_streams, mixture, 0, SOURCE_ASYNC, NULL},
    {"grow_after_a_reset", nothing, grow_after_a_reset, 0, 0, NULL},
    {"grow_after_a_reset_under_a_limit", nothing, grow_after_a_reset, MIB(36), 0, NULL},
    {"neighbour_after_a_reset", arrange_neighbour, neighbour_after_a_reset, 0, 0, NULL},
    {"elsewhere_reset", arrange_elsewhere, reset_of_a_neighbour, 0, 0, NULL},
    {"elsewhere_reset_under_a_limit", arrange_elsewhere, reset_of_a_neighbour, MIB(10), 0, NULL},
    {"short_of_memory", nothing, short_of_memory, MIB(20), 0, NULL},
    {"short_of_memory_fixed", nothing, short_of_memory, MIB(40), SOURCE_SEGMENTS, NULL},
    {"short_of_memory_torch", nothing, short_of_memory, MIB(60), SOURCE_TORCH, NULL},
    {"short_of_memory_given", nothing, short_of_memory, MIB(20), SOURCE_MALLOC, NULL},
    {"short_of_memory_async", nothing, short_of_memory, MIB(20), SOURCE_ASYNC, NULL},
    {"hand_on_in_a_millisecond", fill, hand_on, MIB(40), 0, "wait_limit_ms:1"},
    {"two_streams_in_no_time", nothing, two_streams, 0, 0, "wait_limit_ms:0"},
    {"two_streams_throwing", nothing, two_streams, 0, 0, "throw_on_cudamalloc_oom:True"},
    {"trim_in_steps_collecting", arrange_holes, trim_in_steps, MIB(80), 0, "gc_threshold:0.3,gc_age:1ms"},
    {"collecting_torch", arrange_holes, two_streams, MIB(80), SOURCE_TORCH, "garbage_collection_threshold:0.2"},
    {"small_blocks_kept", nothing, small_blocks, 0, SOURCE_DEBUG, "debug:poison+quarantine"},
    {"reset_kept", arrange_reset, go_on, 0, SOURCE_DEBUG, "debug:guards+quarantine"},
    {"reset", arrange_reset, go_on, 0, 0, NULL},
    {"reset_cells", arrange_reset, go_on, 0, SOURCE_CELLS, NULL},
    {"reset_debug", arrange_reset, go_on, 0, SOURCE_DEBUG, NULL},
    {"reset_under_a_limit", arrange_reset, go_on, MIB(20), 0, NULL},
    {"reset_reserve_first", arrange_reset, reserve_first, 0, 0, NULL},
    {"reset_free_first", arrange_reset, free_first, 0, 0, NULL},
    {"reset_fixed", arrange_reset, free_first, 0, SOURCE_SEGMENTS, NULL},
    {"reset_fixed_under_a_limit", arrange_reset, free_first, MIB(40), SOURCE_SEGMENTS, NULL},
    {"reset_given", arrange_reset, free_first, 0, SOURCE_MALLOC, NULL},
    {"reset_async", arrange_reset, free_first, 0, SOURCE_ASYNC, NULL},
    {"reset_torch", arrange_reset, free_first, 0, SOURCE_TORCH, NULL},
    {"reset_free_first_debug", arrange_reset, free_first, 0, SOURCE_DEBUG, NULL},
    {"reset_amid", nothing, reset_amid, 0, 0, NULL},
    {"reset_amid_debug", nothing, reset_amid, 0, SOURCE_DEBUG, NULL},
    {"reset_amid_fixed", nothing, reset_amid_and_free, 0, SOURCE_SEGMENTS, NULL},
    {"reset_amid_given", nothing, reset_amid_and_free, 0, SOURCE_MALLOC, NULL},
    {"reset_amid_async", nothing, reset_amid_and_free, 0, SOURCE_ASYNC, NULL},
    {"reset_amid_torch", nothing, reset_amid_and_free, 0, SOURCE_TORCH, NULL},
    {"small_blocks_debug", nothing, small_blocks, 0, SOURCE_DEBUG, NULL},
    {"free_after_all_debug", nothing, free_after_all, MIB(20), SOURCE_DEBUG, NULL},
    {"record_debug", nothing, record, MIB(20), SOURCE_DEBUG, NULL},
    {"grow_in_place_debug", nothing, grow_in_place, 0, SOURCE_DEBUG, NULL},
    {"capture", nothing, capture, 0, 0, NULL},
    {"capture_under_a_limit", nothing, capture, MIB(12), 0, NULL},
    {"capture_fixed", nothing, capture, 0, SOURCE_SEGMENTS, NULL},
    {"capture_torch", nothing, capture, 0, SOURCE_TORCH, NULL},
    {"capture_cells", nothing, capture, 0, SOURCE_CELLS, NULL},
    {"capture_debug", nothing, capture, 0, SOURCE_DEBUG, NULL},
    {"capture_given", nothing, capture, 0, SOURCE_MALLOC, NULL},
    {"group", nothing, group, 0, 0, NULL},
    {"group_fixed", nothing, group, 0, SOURCE_SEGMENTS, NULL},
    {"group_torch", nothing, group, 0, SOURCE_TORCH, NULL},
    {"group_cells", nothing, group, 0, SOURCE_CELLS, NULL},
    {"group_debug", nothing, group, 0, SOURCE_DEBUG, NULL},
    {"views", arrange_comb, look_at_all, 0, 0, NULL},
    {"views_fixed", arrange_holes, look_at_all, 0, SOURCE_SEGMENTS, NULL},
    {"views_torch", arrange_holes, look_at_all, 0, SOURCE_TORCH, NULL},
    {"elsewhere", arrange_elsewhere, elsewhere, 0, 0, NULL},
    {"move_told", arrange_told, move, 0, 0, NULL},
    {"ask_the_neighbour", arrange_neighbour, ask_the_neighbour, 0, 0, NULL},
    {"ask_the_neighbour_fixed", arrange_neighbour, ask_the_neighbour, 0, 1, NULL},
    {"small_blocks_in_cells", nothing, small_blocks, 0, SOURCE_CELLS, NULL},
    {"two_streams_in_cells", nothing, two_streams, 0, SOURCE_CELLS, NULL},
    {"two_streams_torch", nothing, two_streams, 0, SOURCE_TORCH, NULL},
    {"hand_on_torch", fill, hand_on, MIB(40), SOURCE_TORCH, NULL},
    {"record_torch", nothing, record, MIB(40), SOURCE_TORCH, NULL},
    {"trim_in_steps_torch", arrange_holes, trim_in_steps, 0, SOURCE_TORCH, NULL},
    {"create_and_use", nothing, create_and_use, 0, 0, NULL},
    {"use_default", nothing, use_default, 0, 0, NULL},
    {"first_block", nothing, first_block, 0, 0, NULL},
    {"first_block_fixed", nothing, first_block, 0, 1, NULL},
    {"small_blocks", nothing, small_blocks, 0, 0, NULL},
    {"growing_sizes", nothing, growing_sizes, 0, 0, NULL},
    {"growing_sizes_fixed", nothing, growing_sizes, 0, 1, NULL},
    {"grow_and_merge", nothing, grow_and_merge, 0, 0, NULL},
    {"two_streams", nothing, two_streams, 0, 0, NULL},
    {"two_streams_fixed", nothing, two_streams, 0, 1, NULL},
    {"hand_on", fill, hand_on, MIB(16), 0, NULL},
    {"hand_on_fixed", fill, hand_on, MIB(20), 1, NULL},
    {"free_elsewhere", nothing, free_elsewhere, MIB(8), 0, NULL},
    {"free_after_all", nothing, free_after_all, MIB(16), 0, NULL},
    {"record", nothing, record, MIB(16), 0, NULL},
    {"record_fixed", nothing, record, MIB(20), 1, NULL},
    {"grow_in_place", nothing, grow_in_place, 0, 0, NULL},
    {"reserve_and_use", nothing, reserve_and_use, 0, 0, NULL},
    {"reserve_and_use_fixed", nothing, reserve_and_use, 0, 1, NULL},
    {"trim_in_steps", arrange_holes, trim_in_steps, 0, 0, NULL},
    {"trim_in_steps_fixed", arrange_holes, trim_in_steps, 0, 1, NULL},
    {"trim_and_grow", arrange_holes, trim_and_grow, 0, 0, NULL},
    {"move", arrange_comb, move, MIB(50), 0, NULL},
    {"move_without_limit", arrange_comb, move, 0, 0, NULL},
    {"retire_all", nothing, retire_all, MIB(2), 0, NULL},
    {"squeeze", arrange_holes, squeeze, 0, 0, NULL},
    {"squeeze_fixed", arrange_holes, squeeze, 0, 1, NULL},
    {"destroy_pool", arrange_holes, destroy_pool, 0, 0, NULL},
    {"destroy_pool_fixed", arrange_holes, destroy_pool, 0, 1, NULL},
    {"shut_down", arrange_holes, shut_down, 0, 0, NULL},
    {"first_block_given", nothing, first_block, 0, SOURCE_MALLOC, NULL},
    {"growing_sizes_given", nothing, growing_sizes, 0, SOURCE_MALLOC, NULL},
    {"hand_on_given", fill, hand_on, MIB(16), SOURCE_MALLOC, NULL},
    {"free_elsewhere_given", nothing, free_elsewhere, MIB(8), SOURCE_MALLOC, NULL},
    {"free_after_all_given", nothing, free_after_all, MIB(16), SOURCE_MALLOC, NULL},
    {"record_given", nothing, record, MIB(16), SOURCE_MALLOC, NULL},
    {"trim_in_steps_given", arrange_holes, trim_in_steps, 0, SOURCE_MALLOC, NULL},
    {"squeeze_given", arrange_holes, squeeze, 0, SOURCE_MALLOC, NULL},
    {"destroy_pool_given", arrange_holes, destroy_pool, 0, SOURCE_MALLOC, NULL},
    {"first_block_async", nothing, first_block, 0, SOURCE_ASYNC, NULL},
    {"growing_sizes_async", nothing, growing_sizes, 0, SOURCE_ASYNC, NULL},
    {"hand_on_async", fill, hand_on, MIB(16), SOURCE_ASYNC, NULL},
    {"free_elsewhere_async", nothing, free_elsewhere, MIB(8), SOURCE_ASYNC, NULL},
    {"free_after_all_async", nothing, free_after_all, MIB(16), SOURCE_ASYNC, NULL},
    {"record_async", nothing, record, MIB(16), SOURCE_ASYNC, NULL},
    {"trim_in_steps_async", arrange_holes, trim_in_steps, 0, SOURCE_ASYNC, NULL},
    {"squeeze_async", arrange_holes, squeeze, 0, SOURCE_ASYNC, NULL},
    {"destroy_pool_async", arrange_holes, destroy_pool, 0, SOURCE_ASYNC, NULL},
};
enum { SCENARIOS = sizeof scenarios / sizeof *scenarios };

/* ---- the loop ---------------------------------------------------------------------------------------------------- */

static void open_world(world *w, const scenario *sc, int n)
{
    sim_options options = sim_defaults();
    galloc_config config = galloc_config_default();
    memset(w, 0, sizeof *w);
    options.memory = strncmp(sc->name, "squeeze", 7) ? GIB(2) : MIB(112);
    options.seed = test_seed() + (uint64_t)n;
    options.pace = n % 3 - 1;
    if (!strncmp(sc->name, "elsewhere", 9)) options.devices = 2;
    if (sc->source == SOURCE_DEBUG) options.mode = SIM_BACKED;
    begin_with(options);
    for (int i = 0; i < 3; i++) w->s[i] = stream_new();
    if (sc->source == SOURCE_DEBUG) config.debug = GALLOC_DEBUG_GUARDS;
    config.expandable_segments = sc->source != SOURCE_SEGMENTS && sc->source != SOURCE_TORCH;
    if (sc->source == SOURCE_TORCH) config.like = GALLOC_LIKE_PYTORCH;
    if (sc->source == SOURCE_CELLS) config.strategy = GALLOC_STRATEGY_POOLED;
    if (sc->source == SOURCE_MALLOC) config.backend = GALLOC_BACKEND_CUDA_MALLOC;
    if (sc->source == SOURCE_ASYNC) config.backend = GALLOC_BACKEND_CUDA_MALLOC_ASYNC;
    if (sc->limit) config.memory_limit = sc->limit;
    if (sc->settings) OK(galloc_config_parse(&config, sc->settings, NULL, 0));
    w->backed = sc->source == SOURCE_DEBUG;
    w->tells = sc->source == SOURCE_PAGES || sc->source == SOURCE_SEGMENTS;
    w->pool = pool_new(&config);
    sc->arrange(w);
    EXPECT_EQ(cuCtxGetCurrent(&w->context), CUDA_SUCCESS);
}

/* The first call that fails. */
static const char *failed_call;

static void note_call(const char *function)
{
    if (!sim_failed()) failed_call = function;
}

/* The thread is left as it was, unless what would have restored it failed itself. */
static void expect_thread_unchanged(const world *w)
{
    CUcontext now = NULL;
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
    EXPECT_EQ(cuCtxGetCurrent(&now), CUDA_SUCCESS);
    if (strcmp(failed_call, "cuCtxPopCurrent")) EXPECT(now == w->context);
    OK(cudaThreadExchangeStreamCaptureMode(&mode));
    if (!strstr(failed_call, "ThreadExchangeStreamCaptureMode")) EXPECT_EQ(mode, cudaStreamCaptureModeGlobal);
    mode = cudaStreamCaptureModeGlobal;
    OK(cudaThreadExchangeStreamCaptureMode(&mode));
}

/* Once the fault is over everything works, and can be given back. */
static void close_world(world *w)
{
    w->device_fault = w->host_fault = 0;
    if (w->pool) EXPECT_EQ(galloc_pool_check(w->pool), 0);
    if (w->pool) EXPECT_EQ(stats_of(w->pool).damages, 0);
    for (int i = w->count - 1; i >= 0; i--) w_free(w, w->held[i]);
    EXPECT_EQ(w->count, 0);
    if (w->pool) {
        OK(galloc_pool_trim(w->pool, 0, NULL));
        galloc_stats stats = stats_of(w->pool);
        EXPECT_EQ(stats.live.current + stats.allocated.current + stats.blocks.current, 0);
        EXPECT_EQ(stats.reserved.current + stats.quarantined, 0);
        w_free(w, w_get(w, MIB(2), 1));
        pool_end(w->pool);
    }
    if (w->second) pool_end(w->second);
    finish();
}

/* Runs a scenario with one fault, of a function or if it is NULL of any; returns how often it fired. */
static long run_with_fault_of(const char *function, const scenario *sc, int host, int nth, int on, int error)
{
    world w;
    open_world(&w, sc, nth);
    w.device_fault = !host;
    w.host_fault = host;
    if (host) sim_fail_malloc(nth, on);
    else sim_fail(function, nth, on, error);
    failed_call = "";
    sim_hook(note_call, NULL);
    sc->act(&w);
    long fired = host ? sim_failed_mallocs() : sim_failed();
    sim_hook(NULL, NULL);
    sim_fail_clear();
    if (!on) expect_thread_unchanged(&w);
    if (!fired) EXPECT_EQ(w.failures, 0);
    close_world(&w);
    return fired;
}

static long run_with_fault(const scenario *sc, int host, int nth, int on, int error)
{
    return run_with_fault_of(NULL, sc, host, nth, on, error);
}

static void sweep(int host, int on, int error)
{
    for (int i = 0; i < SCENARIOS; i++) {
        long fired = 1, before = test_failures;
        int nth = 0;
        while (fired && nth < 5000 && test_failures == before)
            fired = run_with_fault(&scenarios[i], host, ++nth, on, error);
        EXPECT(nth < 5000); /* it ended because nothing was left to fail */
        if (test_failures > before) printf("    scenario %s, call %d\n", scenarios[i].name, nth);
    }
}

TEST(without_faults_nothing_fails)
{
    for (int i = 0; i < SCENARIOS; i++) {
        long before = test_failures;
        EXPECT_EQ(run_with_fault(&scenarios[i], 0, 1000000, 0, 0), 0);
        if (test_failures > before) printf("    scenario %s\n", scenarios[i].name);
    }
}

TEST(the_nth_cuda_call_fails_once) { sweep(0, 0, 0); }

TEST(every_cuda_call_from_the_nth_on_fails) { sweep(0, 1, 0); }

TEST(the_nth_cuda_call_fails_with_an_odd_error) { sweep(0, 0, cudaErrorUnknown); }

TEST(the_nth_host_malloc_fails_once) { sweep(1, 0, 0); }

TEST(every_host_malloc_from_the_nth_on_fails) { sweep(1, 1, 0); }

/* Calls that a fault of any function leaves alone. The thread's context is not always that of the pool. */
TEST(what_hardly_ever_fails_fails_once)
{
    static const char *const functions[] = {"cuCtxGetCurrent", "cuThreadExchangeStreamCaptureMode"};
    for (int i = 0; i < SCENARIOS; i++) {
        long before = test_failures;
        for (int f = 0; f < 2; f++)
            for (int nth = 1; run_with_fault_of(functions[f], &scenarios[i], 0, nth, 0, cudaErrorUnknown); nth++)
                if (test_failures > before || !EXPECT(nth < 5000)) break;
        if (test_failures > before) printf("    scenario %s\n", scenarios[i].name);
    }
}

/* The driver takes nothing back. */
static void get_stuck(world *w)
{
    w->stuck = 1;
    sim_fail("cuMemUnmap", 1, 1, 0);
    sim_fail("cuMemRelease", 1, 1, 0);
    sim_fail("cuMemFree", 1, 1, 0);
}

static long run_stuck_without_host_memory(const scenario *sc, int nth)
{
    world w;
    open_world(&w, sc, nth);
    w.host_fault = 1;
    get_stuck(&w);
    sim_fail_malloc(nth, 0);
    sc->act(&w);
    long fired = sim_failed_mallocs();
    sim_fail_clear();
    close_world(&w);
    return fired;
}

static long run_stuck_without(const scenario *sc, const char *function, int nth)
{
    world w;
    open_world(&w, sc, nth);
    w.device_fault = 1;
    get_stuck(&w);
    long calls = sim_calls(function);
    sim_fail(function, nth, 0, 0);
    sc->act(&w);
    calls = sim_calls(function) - calls;
    sim_fail_clear();
    close_world(&w);
    return calls >= nth;
}

/* What cannot be undone is kept in quarantine and given back later. */
TEST(rollbacks_fail_as_well)
{
    static const char *const functions[] = {"cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemAlloc"};
    for (int i = 0; i < SCENARIOS; i++) {
        long before = test_failures;
        int nth = 1;
        while (run_stuck_without_host_memory(&scenarios[i], nth) && test_failures == before) nth++;
        for (int f = 0; f < 4; f++)
            for (nth = 1; run_stuck_without(&scenarios[i], functions[f], nth) && test_failures == before;) nth++;
        if (test_failures > before) printf("    scenario %s\n", scenarios[i].name);
    }
}

/* The error is in the context that was current in the failed call: of any device. */
static void reset_devices(void)
{
    int devices = 0;
    OK(cudaGetDeviceCount(&devices));
    while (devices-- > 0) {
        OK(cudaSetDevice(devices));
        OK(cudaDeviceReset());
    }
    OK(cudaFree(NULL));
    (void)cudaGetLastError();
}

/* A broken context ends the pool's work until the device is reset; nothing crashes, hangs or is lost. */
static long run_with_broken_context(const scenario *sc, int nth)
{
    world w;
    open_world(&w, sc, nth);
    w.device_fault = w.broken = 1;
    sim_fail(NULL, nth, 0, cudaErrorIllegalAddress);
    sc->act(&w);
    long fired = sim_failed();
    sim_fail_clear();
    reset_devices();
    for (int k = 0; k < 3; k++) w.s[k] = stream_new();
    close_world(&w);
    return fired;
}

TEST(the_nth_cuda_call_breaks_the_context)
{
    for (int i = 0; i < SCENARIOS; i++) {
        long fired = 1, before = test_failures;
        int nth = 0;
        if (scenarios[i].act == capture || scenarios[i].act == group) continue; /* graphs could not be destroyed */
        while (fired && nth < 5000 && test_failures == before) fired = run_with_broken_context(&scenarios[i], ++nth);
        if (test_failures > before) printf("    scenario %s, call %d\n", scenarios[i].name, nth);
    }
}

TEST_MAIN()
