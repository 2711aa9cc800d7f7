/* setup.h - the common part of the behaviour tests: galloc with its log caught, the simulated device, helper functions,
   and the checks at the end of each test. Include it first. */

#ifndef SETUP_H
#define SETUP_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "inside.h"
#include "sim.h"
#include "test.h"

/* ---- galloc, with its log captured ------------------------------------------------------------------------------- */

static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
static long log_lines;
static char log_text[1024];    /* the latest line */
static void (*log_hook)(void); /* called after each line, if not NULL */

void inside_log(const char *text)
{
    pthread_mutex_lock(&log_lock);
    log_lines++;
    snprintf(log_text, sizeof log_text, "%s", text);
    pthread_mutex_unlock(&log_lock);
    if (log_hook) log_hook();
}

#define UNUSED __attribute__((unused))
#define KIB(n) ((size_t)(n) << 10)
#define MIB(n) ((size_t)(n) << 20)
#define GIB(n) ((size_t)(n) << 30)
#define OK(call) EXPECT_EQ((call), cudaSuccess)

static UNUSED size_t smaller(size_t a, size_t b) { return a < b ? a : b; }
static UNUSED size_t larger(size_t a, size_t b) { return a > b ? a : b; }
static UNUSED size_t whole(size_t bytes, size_t unit) { return bytes / unit * unit; } /* units */
static UNUSED size_t enough(size_t bytes, size_t unit) { return whole(bytes + unit - 1, unit); }

/* ---- begin and end of a test ------------------------------------------------------------------------------------- */

static UNUSED void begin_with(sim_options options)
{
    unsetenv("GALLOC_CONF");
    inside_log_level(GALLOC_LOG_DEBUG); /* logs each failure, including repeated ones */
    EXPECT_EQ(sim_start(&options), 0);
    log_lines = 0;
    log_text[0] = 0;
}

static UNUSED void begin(void)
{
    sim_options options = sim_defaults();
    options.seed = test_seed();
    begin_with(options);
}

/* Queued operations run only in calls that wait for them, and in sim_run. */
static UNUSED void begin_still(void)
{
    sim_options options = sim_defaults();
    options.pace = SIM_PACE_STILL;
    begin_with(options);
}

static UNUSED void begin_with_devices(int devices, int pace)
{
    sim_options options = sim_defaults();
    options.devices = devices;
    options.pace = pace;
    begin_with(options);
}

static UNUSED void print_findings(void)
{
    const char *text;
    for (long i = 0; (text = sim_finding(i)) != NULL; i++) printf("    found: %s\n", text);
}

/* A failed test may leave pools behind. This removes them before the next test. */
static UNUSED void abandon_pools(void)
{
    inside_forget_pools();
    (void)galloc_shutdown();
}

/* Checks at the end of a test: everything is freed, there are no findings, and CUDA's last error is clear. */
static UNUSED void finish(void)
{
    char text[512] = "";
    sim_run(-1);
    if (!OK(galloc_shutdown())) abandon_pools();
    OK(cudaPeekAtLastError());
    EXPECT(inside_rests());
    EXPECT_EQ(sim_leaks(text, sizeof text), 0);
    if (text[0]) printf("    leaked: %s\n", text);
    EXPECT_EQ(sim_malloc_live(), 0);
    for (int device = 0; device < 16; device++) EXPECT_EQ(sim_retained(device), 0);
    EXPECT_EQ(sim_findings(SIM_ANY), 0);
    print_findings();
    sim_stop();
}

/* ---- streams and work -------------------------------------------------------------------------------------------- */

static UNUSED cudaStream_t stream_new(void)
{
    cudaStream_t stream = NULL;
    OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
}

static UNUSED void stream_end(cudaStream_t stream) { OK(cudaStreamDestroy(stream)); }

static UNUSED unsigned long long stream_id(cudaStream_t stream)
{
    unsigned long long id = 0;
    OK(cudaStreamGetId(stream, &id));
    return id;
}

/* Launches a kernel that writes a tag into the bytes. */
static UNUSED void put(cudaStream_t stream, void *ptr, size_t bytes, uint64_t tag)
{
    sim_access access = {ptr, bytes, SIM_WRITE, tag};
    OK(sim_launch(stream, &access, 1));
}

/* Launches a kernel that expects the tag in the bytes. */
static UNUSED void look(cudaStream_t stream, const void *ptr, size_t bytes, uint64_t tag)
{
    sim_access access = {ptr, bytes, SIM_READ | SIM_CHECK, tag};
    OK(sim_launch(stream, &access, 1));
}

/* Makes later work on `later` wait for the work queued on `earlier` so far. */
static UNUSED void order(cudaStream_t earlier, cudaStream_t later)
{
    cudaEvent_t event = NULL;
    OK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    OK(cudaEventRecord(event, earlier));
    OK(cudaStreamWaitEvent(later, event, 0));
    OK(cudaEventDestroy(event));
}

/* ---- pools and blocks -------------------------------------------------------------------------------------------- */

static UNUSED galloc_config config_limit(size_t limit)
{
    galloc_config config = galloc_config_default();
    config.memory_limit = limit;
    return config;
}

static UNUSED galloc_config config_fixed(void)
{
    galloc_config config = galloc_config_default();
    config.expandable_segments = 0;
    return config;
}

static UNUSED galloc_pool *pool_new(const galloc_config *config)
{
    galloc_pool *pool = NULL;
    OK(galloc_pool_create(&pool, config));
    return pool;
}

static UNUSED galloc_pool *pool_limited(size_t limit)
{
    galloc_config config = config_limit(limit);
    return pool_new(&config);
}

static UNUSED galloc_pool *pool_expandable(int expandable) /* 0: with fixed segments */
{
    galloc_config config = galloc_config_default();
    config.expandable_segments = expandable;
    return pool_new(&config);
}

static UNUSED galloc_stats stats_of(galloc_pool *pool)
{
    galloc_stats stats;
    memset(&stats, 0, sizeof stats);
    OK(galloc_pool_stats(pool, &stats));
    return stats;
}

static UNUSED galloc_pointer info_of(const void *ptr)
{
    galloc_pointer info;
    memset(&info, 0, sizeof info);
    OK(galloc_pointer_info(ptr, &info));
    return info;
}

static UNUSED void *get(galloc_pool *pool, size_t bytes, cudaStream_t stream)
{
    void *ptr = NULL;
    OK(galloc_pool_malloc(pool, &ptr, bytes, stream));
    EXPECT(ptr != NULL);
    return ptr;
}

/* Gets memory on a stream and writes it by queued work. */
static UNUSED void *get_used(galloc_pool *pool, size_t bytes, cudaStream_t stream, uint64_t tag)
{
    void *ptr = get(pool, bytes, stream);
    put(stream, ptr, bytes, tag);
    return ptr;
}

static UNUSED void *get_growable(galloc_pool *pool, size_t bytes, size_t max_bytes, cudaStream_t stream)
{
    galloc_request request = {0};
    void *ptr = NULL;
    request.bytes = bytes;
    request.max_bytes = max_bytes;
    request.stream = stream;
    request.pool = pool;
    OK(galloc_alloc(&ptr, &request));
    EXPECT(ptr != NULL);
    return ptr;
}

/* Requests that the pool has no memory for, of each kind. */
enum { RUN_OUT, RUN_OUT_WITH_ROOM, RUN_OUT_IN_A_CAPTURE, RUN_OUT_IN_A_RESERVE, RUN_OUT_IN_A_GROWTH, RUN_OUT_KINDS };
static UNUSED void ask_in_vain(galloc_pool *pool, int kind, size_t bytes, cudaStream_t stream)
{
    galloc_request request = {0};
    void *p = NULL, *grows = kind == RUN_OUT_IN_A_GROWTH ? get_growable(pool, 512, bytes, stream) : NULL;
    cudaGraph_t graph = NULL;
    cudaError_t error;
    request.bytes = bytes;
    request.max_bytes = kind == RUN_OUT_WITH_ROOM ? bytes + MIB(2) : 0;
    request.stream = stream;
    request.pool = pool;
    if (kind == RUN_OUT_IN_A_CAPTURE) OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    if (grows) error = galloc_resize(grows, bytes, stream);
    else error = kind == RUN_OUT_IN_A_RESERVE ? galloc_pool_reserve(pool, bytes) : galloc_alloc(&p, &request);
    EXPECT_EQ(error, cudaErrorMemoryAllocation);
    if (kind == RUN_OUT_IN_A_CAPTURE) {
        OK(cudaStreamEndCapture(stream, &graph));
        OK(cudaGraphDestroy(graph));
    }
    if (grows) OK(galloc_free(grows, stream));
}

/* Checks the heap and the relations between its statistics. `alone`: no other user of the device exists, so the
   statistics must equal those of the device. */
static UNUSED void expect_healthy(galloc_pool *pool, int alone)
{
    galloc_stats s = stats_of(pool);
    size_t held = 0;
    EXPECT_EQ(galloc_pool_check(pool), 0);
    EXPECT(s.live.current <= s.allocated.current);
    EXPECT_EQ(s.allocated.current + s.cached.current, s.reserved.current);
    EXPECT(s.live.current <= s.live.peak && s.reserved.current <= s.reserved.peak);
    EXPECT_EQ(s.free_bytes + s.quarantined, s.cached.current);
    EXPECT(s.largest_free <= s.free_bytes && s.external_fragmentation >= 0 && s.external_fragmentation < 1);
    EXPECT(s.internal_fragmentation >= 1);
    for (int i = 0; i < GALLOC_PAGE_SIZES; i++) held += s.pages[i].bytes;
    EXPECT_EQ(held, s.reserved.current);
    if (alone) EXPECT_EQ(s.reserved.current, sim_physical(0));
}

/* The equations above galloc_report. */
static UNUSED void expect_sums(const galloc_report *r)
{
    size_t streams = r->more_stranded;
    for (int i = 0; i < GALLOC_REPORT_STREAMS; i++) {
        streams += r->streams[i].bytes;
        if (i) EXPECT(r->streams[i].bytes <= r->streams[i - 1].bytes);
    }
    EXPECT_EQ(r->live + r->rounding + r->cached, r->held);
    EXPECT_EQ(r->usable + r->stranded + r->graph_bytes + r->quarantined + r->busy, r->cached);
    EXPECT_EQ(streams, r->stranded);
    EXPECT(r->usable_in_pages <= r->usable && r->in_slots <= r->usable && r->largest_usable <= r->usable - r->in_slots);
    EXPECT(r->held + r->room == r->limit || (r->held > r->limit && !r->room));
    EXPECT(r->largest_possible >= r->largest_usable);
    if (r->device_known && r->outside)
        EXPECT_EQ(r->held + r->others_held + r->outside + r->device_free, r->device_total);
}

/* Spoils each word in turn that the check compares: it says so, and nothing any more once the word is right again. */
static UNUSED void expect_the_check_sees_all(galloc_pool *pool)
{
    const char *name;
    int which = 0;
    EXPECT_EQ(galloc_pool_check(pool), 0);
    for (; (name = inside_spoil(pool, which)) != NULL; which++) {
        if (!EXPECT(galloc_pool_check(pool) > 0)) printf("  %s\n", name);
        (void)inside_spoil(pool, which);
        if (!EXPECT_EQ(galloc_pool_check(pool), 0)) printf("  %s\n", name);
    }
    EXPECT(which > 50);
}

static UNUSED void pool_end(galloc_pool *pool)
{
    EXPECT_EQ(galloc_pool_check(pool), 0);
    if (!OK(galloc_pool_destroy(pool))) printf("    %s\n", galloc_last_message());
}

/* Driver calls that allocate or free memory. */
#define MEMORY_CALLS(X)                                                                                                \
    X("cuMemAddressReserve")                                                                                           \
    X("cuMemAddressFree")                                                                                              \
    X("cuMemCreate") X("cuMemRelease") X("cuMemMap") X("cuMemUnmap") X("cuMemSetAccess") X("cuMemAlloc")               \
        X("cuMemFree") X("cudaMalloc") X("cudaFree")
#define ADD_CALLS(name) +sim_calls(name)

static UNUSED long memory_calls(void) { return 0 MEMORY_CALLS(ADD_CALLS); }

/* Driver calls that create, record, query or wait for events. */
static UNUSED long event_calls(void)
{
    return sim_calls("cuEventCreate") + sim_calls("cuEventRecord") + sim_calls("cuEventQuery") +
           sim_calls("cuEventSynchronize") + sim_calls("cuStreamWaitEvent");
}

/* The nth call of the host's malloc fails, or of a function of CUDA, or with NULL of any; once, or from then on. */
static UNUSED long fail_nth(int host, const char *function, int nth, int on)
{
    long calls = function ? sim_calls(function) + nth : 0;
    if (host) sim_fail_malloc(nth, on);
    else sim_fail(function, nth, on, 0);
    return calls; /* for has_failed */
}

static UNUSED int has_failed(int host, const char *function, long calls)
{
    return host ? sim_failed_mallocs() > 0 : function ? sim_calls(function) >= calls : sim_failed() > 0;
}

/* ---- files ------------------------------------------------------------------------------------------------------- */

static UNUSED size_t bytes_in(const char *name)
{
    struct stat is;
    return stat(name, &is) ? 0 : (size_t)is.st_size;
}

/* What is in the file; the caller frees it. */
static UNUSED char *text_in(const char *name)
{
    size_t n = bytes_in(name);
    char *text = calloc(1, n + 1);
    FILE *file = fopen(name, "rb");
    if (file) {
        EXPECT_EQ(fread(text, 1, n, file), n);
        fclose(file);
    }
    return text;
}

/* ---- random numbers, equal on every machine ---------------------------------------------------------------------- */

typedef struct dice {
    uint64_t state;
} dice;

static UNUSED uint32_t roll(dice *d)
{
    d->state = d->state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(d->state >> 33);
}

static UNUSED uint32_t roll_below(dice *d, uint32_t n) { return roll(d) % n; }

/* Returns 1 .. max bytes; all orders of magnitude are about equally likely. */
static UNUSED size_t roll_bytes(dice *d, size_t max)
{
    size_t top = max;
    for (uint32_t n = roll_below(d, 12); n > 0 && top > 512; n--) top /= 2;
    return 1 + (size_t)(((uint64_t)roll(d) << 20 ^ roll(d)) % top);
}

#endif /* SETUP_H */
