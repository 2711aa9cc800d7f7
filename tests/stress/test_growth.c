/* test_growth.c - programs that do the same over and over, as servers and trainers do: each is a short random list of
   steps, which is run some thousand times, on streams that last and on streams of one round. Nothing that galloc holds
   for them may go on growing: memory of the device and of the host, events, states of streams.

   Environment:
     GALLOC_ROUNDS=n    n programs
     FUZZ_SEED=n        one program, and what it does
     FUZZ_SECONDS=n     programs from the seed FUZZ_FROM on (1) for so long */

#include "setup.h"

#include <time.h>

enum { STREAMS = 4, BLOCKS = 6, STEPS = 9, ROUNDS = 3600 };

/* What a step does; the first ones come often. */
enum kind {
    ALLOCATE, FREE, FREE_AFTER, RECORD, RESIZE, RETIRE, ALLOCATE_WITH_ROOM, FEW,
    ALLOCATE_LONG = FEW, USE, SYNCHRONISE, CAPTURE, GROUP, TRIM, SYNC_POINT, OTHER_POOL, LOOK, WORK, ORDER, KINDS
};

static const char *const names[KINDS] = {
    "allocate", "free", "free after all", "record", "resize", "retire", "allocate with room", "allocate for long",
    "use", "synchronise", "capture", "group", "trim", "sync point", "another pool", "look", "let work end", "order"};

static const char *const settings[] = {
    "", "like:pytorch", "strategy:pooled", "strategy:heuristic", "debug:guards", "debug:quarantine,quarantine_bytes:1M",
    "debug:guards,debug_sample:8", "expandable_segments:False", "backend:cudaMalloc", "backend:cudaMallocAsync",
    "reuse:none,memory_limit:64M", "reuse:completed", "wait_limit_ms:0", "throw_on_cudamalloc_oom:True", "gc_age:1ms",
    "memory_limit:96M,gc_threshold:0.3", "memory_limit:40M", "stats:exact", "overhead:0", "history:100",
    "like:pytorch,expandable_segments:True", "roundup_power2_divisions:4"};

typedef struct step {
    enum kind kind;
    int stream, block;
    size_t bytes;
} step;

typedef struct program {
    galloc_pool *pool;
    step steps[STEPS];
    int n, lasting; /* so many streams last */
    int retires;    /* the others are retired at the end of a round: 0 all, 1 half of them, 2 none */
    int keeps;      /* blocks of lasting streams may stay for the next round */
    cudaStream_t streams[STREAMS];
    int gone[STREAMS]; /* retired in this round */
    void *block[BLOCKS];
    int home[BLOCKS], roomy[BLOCKS];
} program;

/* The most that is held in a part of the rounds. */
typedef struct most {
    size_t things, host, states, bytes;
} most;

static void end_block(program *p, int b)
{
    if (p->block[b]) OK(galloc_free(p->block[b], p->streams[p->home[b]]));
    p->block[b] = NULL;
}

/* A pool with a limit may refuse. */
static void allocate(program *p, const step *s, int at)
{
    galloc_request request = {.bytes = s->bytes, .stream = p->streams[at], .pool = p->pool};
    if (s->kind == ALLOCATE_WITH_ROOM) request.max_bytes = s->bytes + MIB(8);
    if (s->kind == ALLOCATE_LONG) request.lifetime = GALLOC_LIFETIME_LONG;
    end_block(p, s->block);
    p->home[s->block] = at;
    p->roomy[s->block] = request.max_bytes != 0;
    if (!galloc_alloc(&p->block[s->block], &request)) put(p->streams[at], p->block[s->block], 8, 1);
}

static void free_after_all(program *p, int b)
{
    cudaStream_t named[STREAMS];
    int n = 0;
    for (int i = 0; i < STREAMS; i++)
        if (!p->gone[i]) named[n++] = p->streams[i];
    OK(galloc_free_after(p->block[b], named, n));
    p->block[b] = NULL;
}

static void capture(program *p, const step *s, cudaStream_t stream)
{
    cudaGraph_t graph = NULL;
    void *own;
    OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    if (!galloc_pool_malloc(p->pool, &own, s->bytes, stream)) {
        put(stream, own, 8, 1);
        OK(galloc_free(own, stream));
    }
    OK(cudaStreamEndCapture(stream, &graph));
    OK(cudaGraphDestroy(graph));
}

static void group(program *p, const step *s, cudaStream_t stream)
{
    galloc_graph *graphs = NULL;
    if (galloc_graph_begin(&graphs, p->pool, stream)) return; /* not with all settings */
    capture(p, s, stream);
    capture(p, s, stream);
    OK(galloc_graph_end(graphs));
    OK(galloc_graph_release(graphs, s->block % 2 ? GALLOC_NO_STREAM : stream));
}

static void retire(program *p, int at)
{
    for (int b = 0; b < BLOCKS; b++)
        if (p->home[b] == at) end_block(p, b);
    OK(galloc_stream_retire(p->streams[at]));
    stream_end(p->streams[at]);
    p->gone[at] = 1;
}

static void other_pool(const step *s, cudaStream_t stream)
{
    galloc_pool *pool = pool_new(NULL);
    OK(galloc_free(get(pool, s->bytes, stream), stream));
    OK(galloc_pool_destroy(pool));
}

static void take(program *p, const step *s)
{
    int at = p->gone[s->stream] ? 0 : s->stream, there = p->block[s->block] != NULL;
    cudaStream_t stream = p->streams[at], home = p->streams[p->home[s->block]];
    void *ptr = p->block[s->block];
    int n;
    switch (s->kind) {
    case ALLOCATE: case ALLOCATE_WITH_ROOM: case ALLOCATE_LONG: allocate(p, s, at); break;
    case FREE: end_block(p, s->block); break;
    case FREE_AFTER: if (there) free_after_all(p, s->block); break;
    case RECORD: if (there) OK(galloc_record_stream(ptr, stream)); break;
    case RESIZE: if (there) (void)galloc_resize(ptr, 1 + s->bytes % (p->roomy[s->block] ? MIB(8) : 256), home); break;
    case RETIRE: if (at >= p->lasting) retire(p, at); break;
    case USE: if (there) put(home, ptr, 8, 1); break;
    case SYNCHRONISE: OK(cudaStreamSynchronize(stream)); break;
    case CAPTURE: capture(p, s, stream); break;
    case GROUP: group(p, s, stream); break;
    case TRIM: OK(galloc_pool_trim(p->pool, MIB(8), NULL)); break;
    case SYNC_POINT: OK(galloc_pool_sync_point(p->pool, NULL)); break;
    case OTHER_POOL: other_pool(s, stream); break;
    case LOOK: OK(galloc_pool_streams(p->pool, NULL, 0, &n)); break;
    case WORK: sim_run(3); break;
    case ORDER: order(stream, p->streams[0]); break;
    default: break;
    }
}

static void play_round(program *p)
{
    for (int i = p->lasting; i < STREAMS; i++) p->streams[i] = stream_new(), p->gone[i] = 0;
    for (int i = 0; i < p->n; i++) take(p, &p->steps[i]);
    for (int b = 0; b < BLOCKS; b++)
        if (!p->keeps || p->home[b] >= p->lasting) end_block(p, b);
    for (int i = p->lasting; i < STREAMS; i++) {
        if (p->gone[i]) continue;
        if (p->retires == 0 || (p->retires == 1 && i % 2)) OK(galloc_stream_retire(p->streams[i]));
        stream_end(p->streams[i]);
    }
}

static void note_most(const program *p, most *m)
{
    size_t things = sim_leaks(NULL, 0), host = sim_malloc_live(), states = inside_streams(p->pool);
    size_t bytes = stats_of(p->pool).reserved.current;
    if (things > m->things) m->things = things;
    if (host > m->host) m->host = host;
    if (states > m->states) m->states = states;
    if (bytes > m->bytes) m->bytes = bytes;
}

static void roll_program(program *p, dice *d)
{
    memset(p, 0, sizeof *p);
    p->n = 2 + (int)roll_below(d, STEPS - 1);
    p->lasting = 1 + (int)roll_below(d, 2);
    p->retires = (int)roll_below(d, 3);
    p->keeps = (int)roll_below(d, 2);
    for (int i = 0; i < p->n; i++) {
        step *s = &p->steps[i];
        s->kind = (enum kind)(i == 0 ? ALLOCATE : roll_below(d, roll_below(d, 3) ? FEW : KINDS));
        s->stream = (int)roll_below(d, STREAMS);
        s->block = (int)roll_below(d, BLOCKS);
        s->bytes = roll_below(d, 3) ? 256 + roll_below(d, 5000) : KIB(64) + roll_below(d, (uint32_t)MIB(5));
    }
}

static void tell(const program *p, const char *conf)
{
    printf("    '%s', %d streams last, the others %s\n", conf, p->lasting,
           p->retires == 0 ? "are retired" : p->retires == 1 ? "are partly retired" : "are not retired");
    for (int i = 0; i < p->n; i++)
        printf("    %s: stream %d, block %d, %zu bytes\n", names[p->steps[i].kind], p->steps[i].stream,
               p->steps[i].block, p->steps[i].bytes);
}

/* What is held in the second half of the rounds is compared with what was held in the first. */
static int play(uint64_t seed, int telling)
{
    dice d = {seed * 0x9e3779b97f4a7c15u};
    sim_options options = sim_defaults();
    galloc_config config = galloc_config_default();
    const char *conf = settings[roll_below(&d, sizeof settings / sizeof *settings)];
    program p;
    most m[2] = {{0}, {0}};
    void *ballast = NULL;
    size_t states;
    long before = test_failures;
    options.pace = (int)roll_below(&d, 3) - 1;
    options.seed = seed;
    options.memory = GIB(4);
    roll_program(&p, &d);
    if (strstr(conf, "wait_limit_ms")) p.retires = 0; /* other streams are not forgotten then */
    if (p.retires) p.keeps = 0; /* a stream recorded for a block lives until its free, or is retired */
    begin_with(options);
    inside_log_level(GALLOC_LOG_OFF);
    OK(galloc_config_parse(&config, conf, NULL, 0));
    p.pool = pool_new(&config);
    for (int i = 0; i < p.lasting; i++) p.streams[i] = stream_new();
    if (!galloc_pool_malloc(p.pool, &ballast, MIB(16), p.streams[0])) OK(galloc_free(ballast, p.streams[0]));
    for (int i = 0; i < ROUNDS; i++) {
        play_round(&p);
        if (options.pace == SIM_PACE_STILL) sim_run(-1); /* a device that has come no further may hold all */
        if (i % 16 == 0) note_most(&p, &m[i >= ROUNDS / 2]);
    }
    for (int b = 0; b < BLOCKS; b++) end_block(&p, b);
    states = m[1].states > m[0].states ? m[1].states - m[0].states : 0;
    EXPECT(m[1].states < 1200); /* those of streams that were not retired are forgotten together */
    /* Where the device falls behind, each stream has a few more events with each doubling of what it has freed. */
    EXPECT(m[1].things <= m[0].things + m[0].things / 8 + 128 * STREAMS + 4 * states);
    /* The simulated cudaMalloc gives out ever new addresses; the map from these to blocks has nodes for them all. */
    if (config.expandable_segments && !config.backend)
        EXPECT(m[1].host <= m[0].host + m[0].host / 8 + 512 + 4 * states);
    EXPECT(m[1].bytes <= m[0].bytes + m[0].bytes / 8 + MIB(8));
    for (int i = 0; i < p.lasting; i++) stream_end(p.streams[i]);
    pool_end(p.pool);
    finish();
    if (telling || test_failures != before) {
        printf("    FUZZ_SEED=%llu\n", (unsigned long long)seed);
        for (int i = 0; i < 2; i++)
            printf("    at most %zu things of the device, %zu blocks of the host, %zu states, %zu bytes\n", m[i].things,
                   m[i].host, m[i].states, m[i].bytes);
        tell(&p, conf);
    }
    return test_failures == before;
}

static int number(const char *name, uint64_t *n)
{
    const char *text = getenv(name);
    if (text && *text) *n = strtoull(text, NULL, 10);
    return text && *text;
}

TEST(programs_that_repeat_themselves_stop_growing)
{
    uint64_t rounds = 12, from = 55; /* some that have found something */
    (void)number("GALLOC_ROUNDS", &rounds);
    for (uint64_t seed = from; seed < from + rounds; seed++) (void)play(seed, 0);
}

int main(int argc, char **argv)
{
    uint64_t n, seed = 1, failed = 0;
    time_t end = time(NULL);
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (number("FUZZ_SEED", &n)) return !play(n, 1);
    if (!number("FUZZ_SECONDS", &n)) return test_main(argc, argv);
    (void)number("FUZZ_FROM", &seed);
    for (end += (time_t)n; time(NULL) < end; seed++) failed += !play(seed, 0);
    printf("to seed %llu, %llu failed\n", (unsigned long long)seed, (unsigned long long)failed);
    return failed != 0;
}
