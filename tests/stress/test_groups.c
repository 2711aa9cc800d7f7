/* test_groups.c - random groups of graphs: one capture or two at once, which belong to a group from their beginning,
   join one later or to none; forks and joins; blocks recorded for the other capture; launches, releases and other work
   in between. The ledger of the simulated device reports memory that is given to somebody else too early. */

#include "setup.h"

enum { GRAPHS = 8, HELD = 12, OWN = 6, GROUPS = 2, NONE = -1 };

typedef struct capture {
    cudaStream_t stream, fork;
    int group, later; /* a group or NONE; one to join on the way */
    int forked;
    void *ptr[OWN];
    size_t bytes[OWN];
} capture;

typedef struct world {
    galloc_pool *pool;
    dice d;
    cudaStream_t streams[4], forks[2], lines[GROUPS]; /* graphs of a group are launched on its line */
    galloc_graph *groups[GROUPS];
    cudaGraphExec_t graphs[GRAPHS];
    int group_of[GRAPHS], count;
    void *held[HELD];
    size_t bytes[HELD];
    int home[HELD];
} world;

static size_t roll_size(dice *d) { return 1 + (roll(d) >> (9 + roll_below(d, 14))); }

/* Gets a block and writes to it; NULL: memory has run out. */
static void *w_get(world *w, size_t bytes, cudaStream_t stream)
{
    void *ptr = NULL;
    if (!galloc_pool_malloc(w->pool, &ptr, bytes, stream)) put(stream, ptr, bytes, 1);
    return ptr;
}

static void w_give(void **ptr, size_t bytes, cudaStream_t stream)
{
    look(stream, *ptr, bytes, 1);
    OK(galloc_free(*ptr, stream));
    *ptr = NULL;
}

static void join_group(world *w, capture *c, int group)
{
    c->group = galloc_graph_begin(&w->groups[group], w->pool, c->stream) ? NONE : group;
    c->later = NONE;
}

static void fork_or_join(capture *c)
{
    if (c->forked) order(c->fork, c->stream);
    else order(c->stream, c->fork);
    c->forked = !c->forked;
}

static void capture_begins(world *w, capture *c, int i, int base, int avoided)
{
    int group = (int)roll_below(&w->d, GROUPS + 1) - 1;
    memset(c, 0, sizeof *c);
    c->stream = w->streams[base + i];
    c->fork = w->forks[i];
    c->group = c->later = NONE;
    if (group == avoided) group = NONE;
    if (group != NONE && roll_below(&w->d, 3)) join_group(w, c, group);
    else c->later = group;
}

static void capture_step(world *w, capture *c, cudaStream_t other)
{
    uint32_t i = roll_below(&w->d, OWN);
    if (roll_below(&w->d, 8) == 0) {
        fork_or_join(c);
    } else if (c->forked && roll_below(&w->d, 2)) {
        size_t bytes = roll_size(&w->d);
        void *ptr = w_get(w, bytes, c->fork);
        if (ptr) w_give(&ptr, bytes, c->fork);
    } else if (c->ptr[i]) {
        w_give(&c->ptr[i], c->bytes[i], c->stream);
    } else {
        c->bytes[i] = roll_size(&w->d);
        c->ptr[i] = w_get(w, c->bytes[i], c->stream);
        if (c->ptr[i] && other && roll_below(&w->d, 3) == 0) OK(galloc_record_stream(c->ptr[i], other));
        if (c->ptr[i] && roll_below(&w->d, 6) == 0)
            OK(galloc_record_stream(c->ptr[i], w->lines[roll_below(&w->d, GROUPS)]));
    }
}

static void capture_ends(world *w, capture *c)
{
    cudaGraph_t graph;
    for (int i = 0; i < OWN; i++)
        if (c->ptr[i]) w_give(&c->ptr[i], c->bytes[i], c->stream);
    if (c->forked) fork_or_join(c);
    OK(cudaStreamEndCapture(c->stream, &graph));
    if (c->group != NONE) OK(galloc_graph_end(w->groups[c->group]));
    OK(cudaGraphInstantiate(&w->graphs[w->count], graph, 0));
    OK(cudaGraphDestroy(graph));
    w->group_of[w->count++] = c->group;
}

static void capture_some(world *w)
{
    capture c[2];
    int n = 1 + (roll_below(&w->d, 3) == 0), base = 2 * (int)roll_below(&w->d, 2);
    if (w->count + n > GRAPHS) return;
    capture_begins(w, &c[0], 0, base, NONE);
    if (n > 1) capture_begins(w, &c[1], 1, base, c[0].group != NONE ? c[0].group : c[0].later);
    for (int i = 0; i < n; i++) OK(cudaStreamBeginCapture(c[i].stream, cudaStreamCaptureModeRelaxed));
    for (int k = 0; k < 30; k++) {
        int i = (int)roll_below(&w->d, (uint32_t)n);
        if (k > 12 && c[i].later != NONE) join_group(w, &c[i], c[i].later);
        capture_step(w, &c[i], n > 1 ? c[!i].stream : NULL);
    }
    for (int i = 0; i < n; i++) capture_ends(w, &c[i]);
}

static void graph_ends(world *w, int i)
{
    OK(cudaGraphExecDestroy(w->graphs[i]));
    w->graphs[i] = w->graphs[--w->count];
    w->group_of[i] = w->group_of[w->count];
}

static void group_ends(world *w, int group)
{
    if (!w->groups[group]) return;
    OK(galloc_graph_release(w->groups[group], w->lines[group]));
    w->groups[group] = NULL;
    for (int i = w->count; i-- > 0;)
        if (w->group_of[i] == group) graph_ends(w, i);
}

static void launch(world *w)
{
    int i = (int)roll_below(&w->d, (uint32_t)w->count), group = w->group_of[i];
    cudaStream_t stream = group == NONE ? w->streams[roll_below(&w->d, 4)] : w->lines[group];
    OK(cudaGraphLaunch(w->graphs[i], stream));
    if (group == NONE) OK(cudaStreamSynchronize(stream)); /* no two launches of one graph at once */
}

static void work(world *w)
{
    for (int k = 0; k < 6; k++) {
        uint32_t i = roll_below(&w->d, HELD);
        if (w->held[i]) {
            w_give(&w->held[i], w->bytes[i], w->streams[w->home[i]]);
            continue;
        }
        w->home[i] = (int)roll_below(&w->d, 4);
        w->bytes[i] = roll_size(&w->d);
        w->held[i] = w_get(w, w->bytes[i], w->streams[w->home[i]]);
    }
}

static void step(world *w)
{
    uint32_t what = roll_below(&w->d, 10);
    if (what < 4) capture_some(w);
    else if (what < 6 && w->count) launch(w);
    else if (what == 6 && roll_below(&w->d, 3)) group_ends(w, (int)roll_below(&w->d, GROUPS));
    else if (what == 6 && w->count) graph_ends(w, (int)roll_below(&w->d, (uint32_t)w->count));
    else work(w);
    EXPECT_EQ(galloc_pool_check(w->pool), 0);
}

static void play(const char *settings, uint64_t seed)
{
    galloc_config config = galloc_config_default();
    sim_options options = sim_defaults();
    world w;
    memset(&w, 0, sizeof w);
    w.d = (dice){(uint32_t)seed};
    options.seed = seed;
    if (seed % 2) options.pace = SIM_PACE_STILL;
    begin_with(options);
    OK(galloc_config_parse(&config, settings, NULL, 0));
    w.pool = pool_new(&config);
    for (int i = 0; i < 4; i++) w.streams[i] = stream_new();
    for (int i = 0; i < 2; i++) w.forks[i] = stream_new();
    for (int i = 0; i < GROUPS; i++) w.lines[i] = stream_new();
    for (int i = 0; i < 60; i++) step(&w);
    for (int i = 0; i < HELD; i++)
        if (w.held[i]) w_give(&w.held[i], w.bytes[i], w.streams[w.home[i]]);
    for (int i = 0; i < GROUPS; i++) group_ends(&w, i);
    while (w.count) graph_ends(&w, 0);
    pool_end(w.pool);
    for (int i = 0; i < 4; i++) stream_end(w.streams[i]);
    for (int i = 0; i < 2; i++) stream_end(w.forks[i]);
    for (int i = 0; i < GROUPS; i++) stream_end(w.lines[i]);
    finish();
}

TEST(random_groups)
{
    static const char *const settings[] = {"memory_limit:40M", "memory_limit:16M",
                                           "strategy:pooled,memory_limit:40M", "like:pytorch,memory_limit:300M",
                                           "like:pytorch,expandable_segments:False,memory_limit:300M",
                                           "expandable_segments:False,memory_limit:100M,history:100"};
    for (uint64_t i = 0; i < 180; i++) play(settings[i % 6], 1000 * test_seed() + i);
}

TEST_MAIN()
