/* gpu_pdl.cu - programmatic dependent launch over pages that move.

   A kernel launched so may start before the one ahead of it in the stream has ended, so the stream orders the two less
   than it otherwise does. Here a kernel writes through an address, lets its successor start, and goes on writing; the
   memory is freed and given out again, which moves the pages; and a kernel launched as dependent reads and writes them
   through their new address. The manual asks for such a chain to end before what it uses is freed: then nothing may be
   wrong. What happens when it does not is reported, and nothing is expected.

   gpu_pdl [--runs N] */

#include "work.h"

#ifdef GALLOC_ON_SIM
#include "sim_kernel.h"
#endif

static int runs = 1000;

enum { HELD_NS = 500000 }; /* how long a writer goes on before it writes: longer than a move takes */

static const size_t piece = (size_t)4 << 20;

/* Two pieces of memory, whether next to each other or not. */
typedef struct pieces {
    uint32_t *a, *b;
} pieces;

/* What one run found, on the device. */
typedef struct tally {
    unsigned long long writer_ended, dependent_began; /* the device's clock, ns */
    unsigned long long wrong_reads, wrong_writes;     /* words */
} tally;

/* ---- work -------------------------------------------------------------------------------------------------------- */

#ifdef GALLOC_ON_SIM

/* Here a stream's work is in order whatever a launch says; but every access must be ordered through both addresses. */
static int device_can_do_this(void) { return 1; }

static void launch(cudaStream_t stream, pieces p, int how, uint32_t value)
{
    sim_access accesses[2] = {{p.a, piece, how, value}, {p.b, piece, how, value}};
    OK(sim_launch(stream, accesses, 2));
}

static void write_and_let_go(cudaStream_t stream, pieces p, uint32_t value, tally *)
{
    launch(stream, p, SIM_WRITE, value);
}

static void read_dependent(cudaStream_t stream, pieces p, uint32_t value, tally *)
{
    launch(stream, p, SIM_READ | SIM_CHECK, value);
}

static void touch_dependent(cudaStream_t stream, pieces p, uint32_t value, int, tally *)
{
    launch(stream, p, SIM_READ | SIM_CHECK, value);
    launch(stream, p, SIM_WRITE, value + 1);
}

static void check_plainly(cudaStream_t stream, pieces p, uint32_t value, tally *)
{
    launch(stream, p, SIM_READ | SIM_CHECK, value);
}

static void end_chain(cudaStream_t stream) { OK(sim_launch(stream, NULL, 0)); }

SIM_KERNEL(nothing, (int, unused)) { (void)unused; }

static void launch_early(cudaStream_t stream)
{
    int unused = 0;
    void *arguments[] = {&unused};
    cudaLaunchAttribute attribute = {};
    cudaLaunchConfig_t config = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim.x = config.gridDim.y = config.gridDim.z = 1;
    config.blockDim = config.gridDim;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    OK(cudaLaunchKernelExC(&config, (const void *)nothing, arguments));
}

#else

static __device__ void let_dependents_start(void)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

static __device__ void wait_for_dependency(void)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

static __device__ uint32_t *word_at(pieces p, size_t n, size_t i) { return i < n ? p.a + i : p.b + (i - n); }

static __global__ void write_words(pieces p, size_t n, uint32_t value, unsigned long long ns, tally *t)
{
    size_t first = blockIdx.x * (size_t)blockDim.x + threadIdx.x, step = (size_t)gridDim.x * blockDim.x;
    unsigned long long begin = nanoseconds();
    let_dependents_start();
    while (nanoseconds() - begin < ns) continue;
    for (size_t i = first; i < 2 * n; i += step) *word_at(p, n, i) = value;
    atomicMax(&t->writer_ended, nanoseconds());
}

static __device__ uint32_t look(const uint32_t *p)
{
    uint32_t word;
    asm volatile("ld.global.ca.u32 %0, [%1];" : "=r"(word) : "l"(p) : "memory");
    return word;
}

/* Reads each word and expects `value`; then writes value + 1 if it is to write. `early`: it also looks at every word
   before it has waited, so that the old contents are in the multiprocessor's cache. */
static __global__ void touch_words(pieces p, size_t n, uint32_t value, int writes, int early, tally *t)
{
    size_t first = blockIdx.x * (size_t)blockDim.x + threadIdx.x, step = (size_t)gridDim.x * blockDim.x;
    unsigned long long wrong = 0;
    if (first == 0 && writes) t->dependent_began = nanoseconds();
    for (size_t i = first; early && i < 2 * n; i += step) (void)look(word_at(p, n, i));
    wait_for_dependency();
    for (size_t i = first; i < 2 * n; i += step) {
        wrong += look(word_at(p, n, i)) != value;
        if (writes) *word_at(p, n, i) = value + 1;
    }
    if (wrong) atomicAdd(&t->wrong_reads, wrong);
}

static __global__ void check_words_plainly(pieces p, size_t n, uint32_t value, tally *t)
{
    size_t first = blockIdx.x * (size_t)blockDim.x + threadIdx.x, step = (size_t)gridDim.x * blockDim.x;
    unsigned long long wrong = 0;
    for (size_t i = first; i < 2 * n; i += step) wrong += *word_at(p, n, i) != value;
    if (wrong) atomicAdd(&t->wrong_writes, wrong);
}

static __global__ void nothing(void) {}

enum { BLOCKS = 64, THREADS = 256 }; /* few enough that a kernel and its successor fit on the device together */

static const size_t words = piece / sizeof(uint32_t);

static int device_can_do_this(void)
{
    int major = 0;
    OK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    return major >= 9;
}

static void launch_dependent(cudaStream_t stream, pieces p, uint32_t value, int writes, int early, tally *t)
{
    cudaLaunchAttribute attribute = {};
    cudaLaunchConfig_t config = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = BLOCKS;
    config.blockDim = THREADS;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    OK(cudaLaunchKernelEx(&config, touch_words, p, (size_t)words, value, writes, early, t));
}

static void write_and_let_go(cudaStream_t stream, pieces p, uint32_t value, tally *t)
{
    write_words<<<BLOCKS, THREADS, 0, stream>>>(p, words, value, HELD_NS, t);
}

static void read_dependent(cudaStream_t stream, pieces p, uint32_t value, tally *t)
{
    launch_dependent(stream, p, value, 0, 0, t);
}

static void touch_dependent(cudaStream_t stream, pieces p, uint32_t value, int early, tally *t)
{
    launch_dependent(stream, p, value, 1, early, t);
}

static void check_plainly(cudaStream_t stream, pieces p, uint32_t value, tally *t)
{
    check_words_plainly<<<BLOCKS, THREADS, 0, stream>>>(p, words, value, t);
}

/* A plain launch starts when all before it has ended. */
static void end_chain(cudaStream_t stream) { nothing<<<1, 1, 0, stream>>>(); }

static void launch_early(cudaStream_t stream)
{
    cudaLaunchAttribute attribute = {};
    cudaLaunchConfig_t config = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = 1;
    config.blockDim = 1;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    OK(cudaLaunchKernelEx(&config, nothing));
}

#endif

/* ---- runs -------------------------------------------------------------------------------------------------------- */

typedef struct way {
    const char *name;
    int moves; /* the memory is freed and given out again, so that its pages move; 0: the same address all along */
    int ended; /* the chain is ended before the free */
    int early; /* the dependent kernel looks at the memory before it waits */
} way;

typedef struct outcome {
    unsigned long long moves, overlapped, wrong_runs, wrong_reads, wrong_writes;
} outcome;

static pieces whole(void *q)
{
    pieces p = {(uint32_t *)q, (uint32_t *)((char *)q + piece)};
    return p;
}

/* Three blocks fill the pool. The outer two are freed, and one of their size together can only be had by a move. */
static void run_once(galloc_pool *pool, cudaStream_t s, const way *w, uint32_t value, tally *t)
{
    pieces p;
    p.a = (uint32_t *)get(pool, piece, s);
    void *between = get(pool, piece, s);
    p.b = (uint32_t *)get(pool, piece, s);
    write_and_let_go(s, p, value, t);
    if (w->ended) {
        read_dependent(s, p, value, t);
        end_chain(s);
    }
    pieces q = p;
    if (w->moves) {
        OK(galloc_free(p.a, s));
        OK(galloc_free(p.b, s));
        q = whole(get(pool, 2 * piece, s));
    }
    touch_dependent(s, q, value, w->early, t);
    check_plainly(s, q, value + 1, t);
    OK(galloc_free(q.a, s));
    if (!w->moves) OK(galloc_free(q.b, s));
    OK(galloc_free(between, s));
    OK(cudaStreamSynchronize(s));
}

static outcome run_many(const way *w)
{
    galloc_config config = galloc_config_default();
    galloc_pool *pool = NULL;
    cudaStream_t s = stream_new();
    tally *t = NULL, found;
    outcome sum = {};
    galloc_stats stats;
    config.memory_limit = 3 * piece;
    config.overhead = 0;
    OK(galloc_pool_create(&pool, &config));
    OK(cudaMalloc((void **)&t, sizeof *t));
    run_once(pool, s, w, 1, t); /* kernels are loaded at their first launch: not counted */
    stats = stats_of(pool);
    for (int i = 0; i < runs; i++) {
        OK(cudaMemset(t, 0, sizeof *t));
        OK(cudaDeviceSynchronize());
        run_once(pool, s, w, 1000 + 2 * (uint32_t)i, t);
        OK(cudaMemcpy(&found, t, sizeof found, cudaMemcpyDeviceToHost));
        sum.overlapped += found.dependent_began && found.dependent_began < found.writer_ended;
        sum.wrong_runs += found.wrong_reads || found.wrong_writes;
        sum.wrong_reads += found.wrong_reads;
        sum.wrong_writes += found.wrong_writes;
    }
    sum.moves = stats_of(pool).moves - stats.moves;
    OK(cudaFree(t));
    pool_end(pool);
    OK(cudaStreamDestroy(s));
    return sum;
}

static outcome report(const way *w)
{
    outcome sum = run_many(w);
    printf("%-56s %5d runs, %5llu pages moved, %5llu times both were running\n", w->name, runs, sum.moves,
           sum.overlapped);
    printf("    %llu runs with wrong words: %llu read, %llu left behind\n", sum.wrong_runs, sum.wrong_reads,
           sum.wrong_writes);
    if (w->moves) EXPECT(sum.moves >= (unsigned long long)runs);
    else EXPECT_EQ(sum.moves, 0);
    return sum;
}

TEST(chains_that_end_before_the_free)
{
    static const way ways[] = {{"ended before the free, then moved", 1, 1, 0},
                               {"the same, and the new user looks before it waits", 1, 1, 1}};
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        outcome sum = report(&ways[i]);
        EXPECT_EQ(sum.wrong_runs, 0);
    }
    finish();
}

/* Outside what the manual allows, and of no other interest than what becomes of it on this device. */
TEST(chains_left_open_are_reported)
{
    static const way ways[] = {{"left open, moved", 1, 0, 0},
                               {"left open, moved; it looks before it waits", 1, 0, 1},
                               {"left open, the same address", 0, 0, 0},
                               {"left open, the same address; it looks before it waits", 0, 0, 1}};
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) (void)report(&ways[i]);
    finish();
}

/* ---- captures ---------------------------------------------------------------------------------------------------- */

#if CUDART_VERSION >= 13000
#define PLAIN_EDGES NULL,
#else
#define PLAIN_EDGES
#endif

static void *pass(galloc_pool *pool, cudaStream_t s)
{
    void *p = get(pool, piece, s);
    OK(galloc_free(p, s));
    return p;
}

/* Programmatic launches in a capture; the node that the stream's next work comes after. */
static cudaGraphNode_t capture_chain(cudaStream_t s)
{
    enum cudaStreamCaptureStatus status;
    const cudaGraphNode_t *end = NULL;
    size_t n = 0;
    for (int i = 0; i < 3; i++) launch_early(s);
#if CUDART_VERSION >= 13000
    OK(cudaStreamGetCaptureInfo(s, &status, NULL, NULL, &end, NULL, &n));
#else
    OK(cudaStreamGetCaptureInfo_v2(s, &status, NULL, NULL, &end, &n));
#endif
    EXPECT_EQ(n, 1);
    return n ? *end : NULL;
}

/* The driver tells of the edges behind a programmatic launch only by the long forms of its functions. */
TEST(a_captured_stream_behind_programmatic_launches)
{
    galloc_config config = galloc_config_default();
    galloc_pool *pool = NULL;
    cudaStream_t s = stream_new();
    cudaGraph_t graph = NULL;
    config.memory_limit = 4 * piece;
    OK(galloc_pool_create(&pool, &config));
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    void *before = pass(pool, s);
    cudaGraphNode_t fork = capture_chain(s);
    EXPECT(pass(pool, s) == before);
    (void)capture_chain(s);
    void *first = get(pool, piece, s);
    EXPECT(first == before);
    end_chain(s);
    OK(galloc_free(first, s));
    OK(cudaStreamUpdateCaptureDependencies(s, &fork, PLAIN_EDGES 1, cudaStreamSetCaptureDependencies));
    void *second = get(pool, piece, s); /* another branch */
    EXPECT(second != first);
    end_chain(s);
    OK(galloc_free(second, s));
    OK(cudaStreamEndCapture(s, &graph));
    OK(cudaGraphDestroy(graph));
    pool_end(pool);
    OK(cudaStreamDestroy(s));
    finish();
}

int main(int argc, char **argv)
{
    if (argc == 3 && !strcmp(argv[1], "--runs")) runs = atoi(argv[2]);
    else if (argc != 1) return fprintf(stderr, "%s [--runs N]\n", argv[0]), 1;
    int status = work_start();
    if (status) return status;
    if (device_can_do_this()) return test_main(1, argv);
    printf("skipped: programmatic dependent launch needs a device of compute capability 9.0\n");
    return 0;
}
