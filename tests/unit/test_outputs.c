/* test_outputs.c - what a call that fails leaves where it would have written a result: each public function with such
   an argument, for each way in which it can fail. All results lie in one struct, so that a call that writes to the
   wrong one, or beyond it, is seen as well. */

#include "setup.h"

typedef struct outputs {
    void *ptr;
    galloc_pool *pool;
    galloc_graph *graph;
    size_t released;
    int count;
    galloc_config config;
    galloc_decision decisions[2];
    galloc_stream_stats streams[2];
    galloc_stats stats;
    galloc_torch_stats torch;
    galloc_report report;
    galloc_pointer pointer;
    char text[GALLOC_REPORT_TEXT];
} outputs;

/* What a failure makes of them; the rest stays as it was. */
enum state {
    KEPT,     /* all of it stays */
    PTR,      /* NULL */
    POOL,     /* NULL */
    RELEASED, /* 0 */
    TEXT,     /* "" */
    MESSAGE   /* says something, up to its end */
};

/* Ways to fail that do not depend on the function. */
enum {
    ENDED = 1,    /* the pool or the group has ended */
    CHILD = 2,    /* in the child of a fork */
    GONE = 4,     /* the driver has shut down */
    HOST = 8,     /* the host has no memory */
    DRIVER = 16,  /* each call of the driver fails */
    FULL = 32,    /* the device is full */
    LIMIT = 64,   /* more is asked for than the device has */
    BROKEN = 128, /* the context has an error */
    INVALID = 256, /* the stream's capture was invalidated */
    SETTINGS = 512, /* GALLOC_CONF is not understood */
    FAULTS = 1024
};

typedef struct world {
    galloc_pool *pool, *other, *filler;
    galloc_graph *graph; /* has ended capturing */
    galloc_graph *gone;
    cudaStream_t stream;
    void *block, *fill[32];
    int fillers;
    size_t bytes;
    galloc_config config;
    CUcontext context;
} world;

static world *v; /* of the call under way, and its results */
static outputs *o;

static galloc_graph *given; /* the group that a call was given */

static cudaError_t graph_begin(galloc_graph *graph, galloc_pool *pool, cudaStream_t stream)
{
    o->graph = given = graph;
    return galloc_graph_begin(&o->graph, pool, stream);
}

/* ---- right arguments in a world that fails ----------------------------------------------------------------------- */

#define NEW_MEMORY (CHILD | GONE | HOST | DRIVER | FULL | LIMIT | BROKEN | INVALID)

/* Function, what a failure leaves, in which worlds it fails, call. */
#define IN_A_WORLD(X)                                                                                                  \
    X(galloc_malloc, PTR, NEW_MEMORY | SETTINGS, galloc_malloc(&o->ptr, v->bytes, v->stream))                          \
    X(galloc_malloc_growable, PTR, NEW_MEMORY | SETTINGS,                                                              \
      galloc_malloc_growable(&o->ptr, v->bytes, 2 * v->bytes, v->stream))                                              \
    X(galloc_alloc, PTR, NEW_MEMORY | SETTINGS, galloc_alloc(&o->ptr, &(galloc_request){.bytes = v->bytes,             \
                                                                                        .stream = v->stream}))         \
    X(galloc_alloc, PTR, NEW_MEMORY | ENDED, galloc_alloc(&o->ptr, &(galloc_request){.bytes = v->bytes,                \
                                                                                     .stream = v->stream,              \
                                                                                     .pool = v->pool}))                \
    X(galloc_pool_malloc, PTR, NEW_MEMORY | ENDED, galloc_pool_malloc(v->pool, &o->ptr, v->bytes, v->stream))          \
    X(galloc_override_malloc, PTR, CHILD | GONE | HOST | DRIVER | FULL | LIMIT | SETTINGS | BROKEN,                    \
      galloc_override_malloc(&o->ptr, v->bytes))                                                                       \
    X(galloc_graph_begin, KEPT, CHILD | GONE | HOST | DRIVER | INVALID | BROKEN | ENDED,                               \
      graph_begin(NULL, v->pool, v->stream))                                                                           \
    X(galloc_graph_begin, KEPT, CHILD | GONE | DRIVER | INVALID | BROKEN | ENDED,                                      \
      graph_begin(v->graph, NULL, v->stream))                                                                          \
    X(galloc_pool_create, POOL, CHILD | GONE | HOST | DRIVER | BROKEN, galloc_pool_create(&o->pool, NULL))             \
    X(galloc_pool_default, POOL, CHILD | GONE | HOST | DRIVER | SETTINGS | BROKEN, galloc_pool_default(&o->pool, -1))  \
    X(galloc_pool_trim, RELEASED, CHILD | DRIVER | BROKEN | ENDED, galloc_pool_trim(v->pool, 0, &o->released))         \
    X(galloc_pool_sync_point, RELEASED, CHILD | DRIVER | BROKEN | ENDED,                                               \
      galloc_pool_sync_point(v->pool, &o->released))                                                                   \
    X(galloc_pool_config, KEPT, CHILD | ENDED, galloc_pool_config(v->pool, &o->config))                                \
    X(galloc_pool_decisions, KEPT, CHILD | ENDED, galloc_pool_decisions(v->pool, o->decisions, 2, &o->count))          \
    X(galloc_pool_streams, KEPT, CHILD | ENDED, galloc_pool_streams(v->pool, o->streams, 2, &o->count))                \
    X(galloc_pool_stats, KEPT, CHILD | ENDED, galloc_pool_stats(v->pool, &o->stats))                                   \
    X(galloc_pool_torch_stats, KEPT, CHILD | ENDED, galloc_pool_torch_stats(v->other, &o->torch))                      \
    X(galloc_live_text, TEXT, CHILD | HOST | ENDED, galloc_live_text(v->pool, o->text, sizeof o->text))                \
    X(galloc_pointer_info, KEPT, CHILD, galloc_pointer_info(v->block, &o->pointer))                                    \
    X(galloc_config_parse, KEPT, 0, galloc_config_parse(&o->config, "", o->text, sizeof o->text))                      \
    X(galloc_config_print, TEXT, 0, galloc_config_print(&v->config, o->text, sizeof o->text))                          \
    X(galloc_oom_report, KEPT, ~0, galloc_oom_report(&o->report))                                                      \
    X(galloc_report_text, TEXT, 0, galloc_report_text(&(galloc_report){.asked = 0}, o->text, sizeof o->text))

/* ---- wrong arguments --------------------------------------------------------------------------------------------- */

#define INVALID_VALUE cudaErrorInvalidValue

static galloc_config *wrong_config(int device)
{
    static galloc_config config;
    config = galloc_config_default();
    if (device) config.device = device;
    else config.growth = 3;
    return &config;
}

static cudaError_t alloc_with(size_t alignment, int lifetime, size_t max_bytes)
{
    galloc_request request = {.bytes = 512, .stream = v->stream, .pool = v->pool};
    request.alignment = alignment;
    request.lifetime = lifetime;
    request.max_bytes = max_bytes;
    return galloc_alloc(&o->ptr, &request);
}

/* The group has begun already. */
static cudaError_t begin_again(void)
{
    cudaError_t error;
    OK(galloc_graph_begin(&v->graph, NULL, v->stream));
    error = graph_begin(v->graph, NULL, v->stream);
    OK(galloc_graph_end(v->graph));
    return error;
}

/* Another group has begun with this stream. */
static cudaError_t begin_besides(void)
{
    cudaError_t error;
    OK(galloc_graph_begin(&v->graph, NULL, v->stream));
    error = graph_begin(NULL, v->pool, v->stream);
    OK(galloc_graph_end(v->graph));
    return error;
}

static cudaError_t parse(galloc_config *config, const char *text)
{
    return galloc_config_parse(config, text, o->text, sizeof o->text);
}

/* The last failure was not one for lack of memory. */
static cudaError_t report_without_a_failure(void)
{
    (void)galloc_malloc(NULL, 512, v->stream);
    return galloc_oom_report(&o->report);
}

/* Function, what is left, the error, call. */
#define WITH_A_MISTAKE(X)                                                                                              \
    X(galloc_malloc, PTR, cudaErrorMemoryAllocation, galloc_malloc(&o->ptr, SIZE_MAX, v->stream))                      \
    X(galloc_malloc_growable, PTR, cudaErrorMemoryAllocation,                                                          \
      galloc_malloc_growable(&o->ptr, 512, SIZE_MAX, v->stream))                                                       \
    X(galloc_alloc, PTR, INVALID_VALUE, galloc_alloc(&o->ptr, NULL))                                                   \
    X(galloc_alloc, PTR, INVALID_VALUE, alloc_with(3, 0, 0))                                                           \
    X(galloc_alloc, PTR, INVALID_VALUE, alloc_with((size_t)1 << 60, 0, 0))                                             \
    X(galloc_alloc, PTR, cudaErrorMemoryAllocation, alloc_with((size_t)1 << 50, 0, 0))                                 \
    X(galloc_alloc, PTR, INVALID_VALUE, alloc_with(0, 7, 0))                                                           \
    X(galloc_alloc, PTR, cudaErrorMemoryAllocation, alloc_with(0, 0, SIZE_MAX))                                        \
    X(galloc_pool_malloc, PTR, INVALID_VALUE, galloc_pool_malloc(NULL, &o->ptr, 512, v->stream))                       \
    X(galloc_pool_malloc, PTR, INVALID_VALUE, galloc_pool_malloc(NULL, &o->ptr, 0, v->stream))                         \
    X(galloc_pool_malloc, PTR, cudaErrorMemoryAllocation, galloc_pool_malloc(v->pool, &o->ptr, SIZE_MAX, v->stream))   \
    X(galloc_override_malloc, PTR, cudaErrorMemoryAllocation, galloc_override_malloc(&o->ptr, SIZE_MAX))               \
    X(galloc_graph_begin, KEPT, INVALID_VALUE, graph_begin(NULL, v->pool, NULL))                                       \
    X(galloc_graph_begin, KEPT, INVALID_VALUE, graph_begin(v->graph, v->pool, cudaStreamLegacy))                       \
    X(galloc_graph_begin, KEPT, INVALID_VALUE, graph_begin(v->graph, v->other, v->stream))                             \
    X(galloc_graph_begin, KEPT, cudaErrorInvalidResourceHandle, graph_begin(v->gone, v->pool, v->stream))              \
    X(galloc_graph_begin, KEPT, cudaErrorNotPermitted, begin_again())                                                  \
    X(galloc_graph_begin, KEPT, cudaErrorNotPermitted, begin_besides())                                                \
    X(galloc_config_parse, MESSAGE, INVALID_VALUE, parse(&o->config, NULL))                                            \
    X(galloc_config_parse, MESSAGE, INVALID_VALUE, parse(NULL, "growth:2M"))                                           \
    X(galloc_config_parse, MESSAGE, INVALID_VALUE, parse(&o->config, "memory_limit:1G,nonsense:1"))                    \
    X(galloc_config_parse, MESSAGE, INVALID_VALUE, parse(&o->config, "memory_limit:1G,growth:3"))                      \
    X(galloc_config_parse, MESSAGE, INVALID_VALUE, parse(&o->config, "like:pytorch,memory_limit"))                     \
    X(galloc_config_parse, KEPT, INVALID_VALUE, galloc_config_parse(&o->config, "growth:3", o->text, 0))               \
    X(galloc_config_print, TEXT, INVALID_VALUE, galloc_config_print(NULL, o->text, sizeof o->text))                    \
    X(galloc_config_print, TEXT, INVALID_VALUE, galloc_config_print(wrong_config(0), o->text, sizeof o->text))         \
    X(galloc_config_print, TEXT, INVALID_VALUE, galloc_config_print(&v->config, o->text, 20))                          \
    X(galloc_config_print, KEPT, INVALID_VALUE, galloc_config_print(&v->config, o->text, 0))                           \
    X(galloc_pool_create, POOL, INVALID_VALUE, galloc_pool_create(&o->pool, wrong_config(0)))                          \
    X(galloc_pool_create, POOL, cudaErrorInvalidDevice, galloc_pool_create(&o->pool, wrong_config(99)))                \
    X(galloc_pool_default, POOL, cudaErrorInvalidDevice, galloc_pool_default(&o->pool, 99))                            \
    X(galloc_pool_default, POOL, cudaErrorInvalidDevice, galloc_pool_default(&o->pool, -2))                            \
    X(galloc_pool_trim, RELEASED, INVALID_VALUE, galloc_pool_trim(NULL, 0, &o->released))                              \
    X(galloc_pool_sync_point, RELEASED, INVALID_VALUE, galloc_pool_sync_point(NULL, &o->released))                     \
    X(galloc_oom_report, KEPT, cudaErrorNotReady, report_without_a_failure())                                          \
    X(galloc_report_text, TEXT, INVALID_VALUE, galloc_report_text(NULL, o->text, sizeof o->text))                      \
    X(galloc_report_text, TEXT, INVALID_VALUE, galloc_report_text(&(galloc_report){.asked = 0}, o->text, 20))          \
    X(galloc_report_text, KEPT, INVALID_VALUE, galloc_report_text(&(galloc_report){.asked = 0}, o->text, 0))           \
    X(galloc_pool_config, KEPT, INVALID_VALUE, galloc_pool_config(NULL, &o->config))                                   \
    X(galloc_pool_decisions, KEPT, INVALID_VALUE, galloc_pool_decisions(NULL, o->decisions, 2, &o->count))             \
    X(galloc_pool_decisions, KEPT, INVALID_VALUE, galloc_pool_decisions(v->pool, o->decisions, -1, &o->count))         \
    X(galloc_pool_decisions, KEPT, INVALID_VALUE, galloc_pool_decisions(v->pool, NULL, 1, &o->count))                  \
    X(galloc_pool_streams, KEPT, INVALID_VALUE, galloc_pool_streams(NULL, o->streams, 2, &o->count))                   \
    X(galloc_pool_streams, KEPT, INVALID_VALUE, galloc_pool_streams(v->pool, o->streams, -1, &o->count))               \
    X(galloc_pool_streams, KEPT, INVALID_VALUE, galloc_pool_streams(v->pool, NULL, 1, &o->count))                      \
    X(galloc_pool_stats, KEPT, INVALID_VALUE, galloc_pool_stats(NULL, &o->stats))                                      \
    X(galloc_pool_torch_stats, KEPT, INVALID_VALUE, galloc_pool_torch_stats(NULL, &o->torch))                          \
    X(galloc_pool_torch_stats, KEPT, cudaErrorNotSupported, galloc_pool_torch_stats(v->pool, &o->torch))               \
    X(galloc_live_text, TEXT, INVALID_VALUE, galloc_live_text(v->pool, o->text, 20))                                   \
    X(galloc_live_text, KEPT, INVALID_VALUE, galloc_live_text(v->pool, o->text, 0))                                    \
    X(galloc_pointer_info, KEPT, INVALID_VALUE, galloc_pointer_info(v->block, NULL))

typedef struct row {
    const char *name; /* NULL: there is no such row */
    enum state state;
    int why; /* in which worlds it fails; or the error of a mistake */
} row;

/* The row n of a table, or without a place for it: its call. */
#define ROW(name, state, why, call)                                                                                    \
    if (n-- == 0) {                                                                                                    \
        if (!r) return call;                                                                                           \
        *r = (row){#name, state, why};                                                                                 \
        return cudaSuccess;                                                                                            \
    }

static cudaError_t row_in_a_world(int n, row *r)
{
    IN_A_WORLD(ROW)
    if (r) r->name = NULL;
    return cudaSuccess;
}

static cudaError_t row_with_a_mistake(int n, row *r)
{
    WITH_A_MISTAKE(ROW)
    if (r) r->name = NULL;
    return cudaSuccess;
}

/* ---- comparison -------------------------------------------------------------------------------------------------- */

static void expect_left(const row *r, const outputs *before)
{
    static outputs expected;
    long failures = test_failures;
    expected = *before;
    if (!strcmp(r->name, "galloc_graph_begin")) expected.graph = given;
    if (r->state == PTR) expected.ptr = NULL;
    if (r->state == POOL) expected.pool = NULL;
    if (r->state == RELEASED) expected.released = 0;
    if (r->state == TEXT || r->state == MESSAGE) {
        EXPECT(memchr(o->text, 0, sizeof o->text) != NULL);
        EXPECT((o->text[0] != 0) == (r->state == MESSAGE));
        memcpy(expected.text, o->text, sizeof o->text);
    }
    EXPECT(!memcmp(&expected, o, sizeof *o));
    if (test_failures > failures) printf("    after %s: %s\n", r->name, galloc_last_message());
}

static void use_outputs(outputs *now, outputs *before)
{
    memset(now, 0xa5, sizeof *now);
    *before = *now;
    o = now;
}

/* ---- worlds ------------------------------------------------------------------------------------------------------ */

static void enter(world *w)
{
    sim_options options = sim_defaults();
    options.memory = MIB(64);
    options.pace = SIM_PACE_PROMPT;
    begin_with(options);
    memset(w, 0, sizeof *w);
    v = w;
    w->stream = stream_new();
    OK((cudaError_t)cuCtxGetCurrent(&w->context));
    w->config = galloc_config_default();
    w->config.release_threshold = 0;
    w->pool = pool_new(&w->config);
    galloc_config like = galloc_config_default();
    OK(galloc_config_parse(&like, "like:pytorch", NULL, 0));
    w->other = pool_new(&like);
    w->bytes = MIB(8);
    w->block = get(w->pool, MIB(2), w->stream);
    OK(galloc_graph_begin(&w->gone, w->pool, w->stream));
    OK(galloc_graph_end(w->gone));
    OK(galloc_graph_release(w->gone, w->stream));
    OK(galloc_graph_begin(&w->graph, w->pool, w->stream));
    OK(galloc_graph_end(w->graph));
    OK(galloc_free(get(w->pool, MIB(6), w->stream), w->stream)); /* what a trim can give back */
    (void)galloc_alloc(NULL, NULL); /* there is no report */
}

static void end_pools(world *w)
{
    OK(galloc_graph_release(w->graph, w->stream));
    OK(galloc_free(w->block, w->stream));
    OK(galloc_pool_destroy(w->pool));
    OK(galloc_pool_destroy(w->other));
}

static void invalidate(world *w)
{
    OK(cudaStreamBeginCapture(w->stream, cudaStreamCaptureModeRelaxed));
    (void)cudaStreamSynchronize(w->stream);
    (void)cudaGetLastError();
    sim_findings_clear();
}

static void arrange(world *w, int fault)
{
    void *ptr = NULL;
    if (fault == ENDED) end_pools(w);
    if (fault == GONE) sim_driver_exit();
    if (fault == HOST) {
        w->stream = stream_new(); /* one that the pool does not know */
        inside_drain_all(w->pool);
        sim_fail_malloc(1, 1);
    }
    if (fault == DRIVER) sim_fail(NULL, 1, 1, 0);
    if (fault == FULL) {
        w->filler = pool_new(NULL);
        while (w->fillers < 32 && galloc_pool_malloc(w->filler, &ptr, MIB(2), w->stream) == cudaSuccess)
            w->fill[w->fillers++] = ptr;
        (void)galloc_alloc(NULL, NULL);
    }
    if (fault == FULL || fault == LIMIT) w->bytes = MIB(60);
    if (fault == LIMIT) w->bytes = GIB(2);
    if (fault == BROKEN) sim_context_fail(w->context, cudaErrorIllegalAddress);
    if (fault == INVALID) invalidate(w);
    if (fault == SETTINGS) setenv("GALLOC_CONF", "nonsense:1", 1);
}

static void mend(world *w, int fault)
{
    cudaGraph_t graph = NULL;
    sim_fail_clear();
    unsetenv("GALLOC_CONF");
    if (fault == BROKEN) {
        OK(cudaDeviceReset());
        w->stream = stream_new();
    }
    if (fault == INVALID) EXPECT_EQ(cudaStreamEndCapture(w->stream, &graph), cudaErrorStreamCaptureInvalidated);
    (void)cudaGetLastError();
}

/* What a call that succeeded has given. */
static void give_back(const row *r)
{
    if (r->state == PTR) OK(galloc_free(o->ptr, v->stream));
    if (!strcmp(r->name, "galloc_pool_create")) pool_end(o->pool);
    if (strcmp(r->name, "galloc_graph_begin")) return;
    OK(galloc_graph_end(o->graph));
    if (o->graph != v->graph) OK(galloc_graph_release(o->graph, v->stream));
}

static void leave(world *w, int fault)
{
    if (fault != ENDED) end_pools(w);
    if (w->filler) {
        for (int i = 0; i < w->fillers; i++) OK(galloc_free(w->fill[i], w->stream));
        pool_end(w->filler);
    }
    if (fault != GONE) {
        finish();
        return;
    }
    OK(galloc_shutdown());
    EXPECT_EQ(sim_malloc_live(), 0);
    sim_stop();
}

static cudaError_t expect_in_world(const row *r, int n, int fault)
{
    static outputs now, before;
    use_outputs(&now, &before);
    cudaError_t error = row_in_a_world(n, NULL);
    if (!EXPECT_EQ(error != cudaSuccess, (r->why & fault) != 0))
        printf("    %s, world %d: %s\n", r->name, fault, galloc_last_message());
    if (error != cudaSuccess) expect_left(r, &before);
    return error;
}

static void run_in_world(const row *r, int n, int fault)
{
    world w;
    enter(&w);
    arrange(&w, fault);
    cudaError_t error = expect_in_world(r, n, fault);
    mend(&w, fault);
    if (error == cudaSuccess) give_back(r);
    leave(&w, fault);
}

static void run_in_child(const row *r, int n)
{
    world w;
    int status = -1;
    enter(&w);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        test_failures = 0;
        (void)expect_in_world(r, n, CHILD);
        fflush(stdout);
        _exit(test_failures ? 1 : 0);
    }
    EXPECT(child > 0 && waitpid(child, &status, 0) == child);
    EXPECT_EQ(status, 0);
    leave(&w, 0);
}

TEST(what_a_call_leaves_in_a_world_that_fails)
{
    row r;
    for (int n = 0; (void)row_in_a_world(n, &r), r.name; n++)
        for (int fault = 1; fault < FAULTS; fault *= 2)
            if (fault != CHILD) run_in_world(&r, n, fault);
}

TEST(what_a_call_leaves_in_a_forked_child)
{
    row r;
    for (int n = 0; (void)row_in_a_world(n, &r), r.name; n++) run_in_child(&r, n);
}

TEST(what_a_call_with_a_mistake_leaves)
{
    row r;
    world w;
    static outputs now, before;
    enter(&w);
    for (int n = 0; (void)row_with_a_mistake(n, &r), r.name; n++) {
        use_outputs(&now, &before);
        EXPECT_EQ(row_with_a_mistake(n, NULL), r.why);
        expect_left(&r, &before);
        EXPECT_EQ(galloc_pool_check(w.pool), 0);
    }
    leave(&w, 0);
}

/* ---- nothing is forgotten ---------------------------------------------------------------------------------------- */

static int is_in_a_table(const char *name)
{
    row r;
    int in = 0;
    for (int n = 0; (void)row_in_a_world(n, &r), r.name; n++) in |= !strcmp(r.name, name);
    for (int n = 0; in && ((void)row_with_a_mistake(n, &r), r.name); n++)
        if (!strcmp(r.name, name)) return 1;
    return 0;
}

/* Does a declaration have a parameter that a call writes to? A block, a pool, a group and a function's own argument are
   none. */
static int has_an_output(const char *declaration)
{
    const char *at = strchr(declaration, '(');
    static const char *const inputs[] = {"void *ptr", "galloc_pool *pool", "galloc_graph *graph", "void *user"};
    for (; at && *at != ')'; at += strcspn(at, ",)")) {
        size_t length;
        at += strspn(at, "(, ");
        length = strcspn(at, ",)");
        if (!memchr(at, '*', length) || !strncmp(at, "const ", 6)) continue;
        int input = 0;
        for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++)
            input |= strlen(inputs[i]) == length && !strncmp(at, inputs[i], length);
        if (!input) return 1;
    }
    return 0;
}

TEST(every_output_is_in_the_tables)
{
    char line[256], name[128] = "galloc_";
    FILE *header = fopen("galloc.h", "r");
    int n = 0;
    if (!EXPECT(header != NULL)) return;
    while (fgets(line, sizeof line, header)) {
        if (sscanf(line, "GALLOC_API cudaError_t galloc_%100[a-z_](", name + 7) != 1 || !has_an_output(line)) continue;
        if (!EXPECT(is_in_a_table(name))) printf("    %s\n", name);
        n++;
    }
    EXPECT(n > 30);
    fclose(header);
}

TEST_MAIN()
