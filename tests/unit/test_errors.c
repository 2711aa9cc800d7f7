/* test_errors.c - bad input and a world that fails: each gets an error that a CUDA programmer would expect and one line
   of log, and the heap is as it was. */

#include "setup.h"

/* The call fails with this error and one line of log. */
#define FAILS(call, error)                                                                                             \
    do {                                                                                                               \
        long lines_ = log_lines;                                                                                       \
        EXPECT_EQ((call), (error));                                                                                    \
        EXPECT_EQ(log_lines, lines_ + 1);                                                                              \
        EXPECT(galloc_last_message()[0] != 0);                                                                         \
    } while (0)

static galloc_request request_of(galloc_pool *pool, size_t bytes, cudaStream_t stream)
{
    galloc_request request = {0};
    request.bytes = bytes;
    request.stream = stream;
    request.pool = pool;
    return request;
}

/* What a failing call must leave alone. */
static void expect_same(const galloc_stats *a, const galloc_stats *b)
{
    EXPECT_EQ(a->live.current, b->live.current);
    EXPECT_EQ(a->allocated.current, b->allocated.current);
    EXPECT_EQ(a->reserved.current, b->reserved.current);
    EXPECT_EQ(a->blocks.current, b->blocks.current);
    EXPECT_EQ(a->live.total, b->live.total);
    EXPECT_EQ(a->live.peak, b->live.peak);
    EXPECT_EQ(a->allocated.total, b->allocated.total);
    EXPECT_EQ(a->allocated.peak, b->allocated.peak);
    EXPECT_EQ(a->blocks.total, b->blocks.total);
    EXPECT_EQ(a->blocks.peak, b->blocks.peak);
    EXPECT_EQ(a->mallocs, b->mallocs);
    EXPECT_EQ(a->frees, b->frees);
}

/* ---- forks around the first call --------------------------------------------------------------------------------- */

static struct {
    int holds; /* 1: the thread has the locks, or is in the call; 2: it may go on */
} meanwhile;

static void wait_for(int state)
{
    while (__atomic_load_n(&meanwhile.holds, __ATOMIC_ACQUIRE) < state) usleep(1000);
}

static void reach(int state) { __atomic_store_n(&meanwhile.holds, state, __ATOMIC_RELEASE); }

/* What the child returns: its status, or -1 if it had to be ended. */
static int status_of(pid_t child)
{
    int status = 0;
    for (int i = 0; i < 1000; i++) {
        if (waitpid(child, &status, WNOHANG) == child) return status;
        usleep(10000);
    }
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    return -1;
}

static void *name_and_hold_locks(void *unused)
{
    OK(galloc_tag_name(7, "weights"));
    inside_hold_global(1);
    inside_hold_names(1);
    reach(1);
    usleep(100000);
    inside_hold_names(0);
    wait_for(2);
    inside_hold_global(0);
    return unused;
}

/* Another thread is in galloc_tag_name or galloc_annotate while this one forks. */
static void fork_before_the_first_call(void)
{
    galloc_config config = galloc_config_default();
    pthread_t thread;
    reach(0);
    pthread_create(&thread, NULL, name_and_hold_locks, NULL);
    wait_for(1);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        void *p = NULL;
        test_failures = 0;
        OK(galloc_tag_name(7, "gradients"));
        OK(galloc_annotate("child"));
        FAILS(galloc_config_parse(&config, "no_such_key:1", NULL, 0), cudaErrorInvalidValue);
        OK(galloc_malloc(&p, 1000, NULL)); /* the simulated device works in it, too */
        OK(galloc_free(p, NULL));
        _exit(test_failures ? 1 : 0);
    }
    EXPECT_EQ(status_of(child), 0);
    reach(2);
    pthread_join(thread, NULL);
    OK(galloc_tag_name(7, NULL));
}

static int allocate_in_child(cudaError_t expected)
{
    void *p = NULL;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) _exit(galloc_malloc(&p, 1000, NULL) == expected ? 0 : 1);
    return status_of(child);
}

/* The parent has no driver that the child could not use. */
static void fork_after_a_first_call_that_failed(void)
{
    void *p = NULL;
    sim_fail("cuInit", 1, 1, cudaErrorNoDevice);
    FAILS(galloc_malloc(&p, 1000, NULL), cudaErrorNoDevice);
    sim_fail_clear();
    EXPECT_EQ(allocate_in_child(cudaSuccess), 0);
}

static void wait_in_the_first_call(const char *function)
{
    if (strcmp(function, "cuInit")) return;
    reach(1);
    wait_for(2);
}

static void *make_the_first_call(void *unused)
{
    void *p = NULL;
    OK(galloc_malloc(&p, 1000, NULL));
    OK(galloc_free(p, NULL));
    return unused;
}

static void fork_during_the_first_call(void)
{
    pthread_t thread;
    reach(0);
    sim_hook(wait_in_the_first_call, NULL);
    pthread_create(&thread, NULL, make_the_first_call, NULL);
    wait_for(1);
    EXPECT_EQ(allocate_in_child(cudaErrorInitializationError), 0);
    reach(2);
    pthread_join(thread, NULL);
    sim_hook(NULL, NULL);
}

/* This test comes first: the process has not called CUDA yet. */
TEST(a_child_is_refused_from_the_first_call_on)
{
    begin();
    fork_before_the_first_call();
    fork_after_a_first_call_that_failed();
    fork_during_the_first_call();
    finish();
}

/* ---- arguments --------------------------------------------------------------------------------------------------- */

TEST(null_arguments)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *p = get(pool, 1000, s), *out = &pool;
    galloc_request request = request_of(pool, 100, s);
    galloc_stats stats;
    FAILS(galloc_malloc(NULL, 100, s), cudaErrorInvalidValue);
    FAILS(galloc_malloc(NULL, 0, s), cudaErrorInvalidValue);
    FAILS(galloc_alloc(NULL, &request), cudaErrorInvalidValue);
    FAILS(galloc_alloc(&out, NULL), cudaErrorInvalidValue);
    EXPECT(out == NULL);
    out = &pool;
    FAILS(galloc_pool_malloc(NULL, &out, 100, s), cudaErrorInvalidValue);
    EXPECT(out == NULL);
    FAILS(galloc_pool_malloc(pool, NULL, 100, s), cudaErrorInvalidValue);
    FAILS(galloc_pool_malloc(NULL, NULL, 100, s), cudaErrorInvalidValue);
    FAILS(galloc_report_text(NULL, NULL, 100), cudaErrorInvalidValue);
    FAILS(galloc_report_text(&(galloc_report){.asked = 0}, NULL, 100), cudaErrorInvalidValue);
    FAILS(galloc_free_after(p, NULL, 1), cudaErrorInvalidValue);
    FAILS(galloc_free_after(p, &s, 0), cudaErrorInvalidValue);
    FAILS(galloc_free_after(p, &s, -1), cudaErrorInvalidValue);
    FAILS(galloc_pool_reserve(NULL, 100), cudaErrorInvalidValue);
    FAILS(galloc_pool_trim(NULL, 0, NULL), cudaErrorInvalidValue);
    FAILS(galloc_pool_stats(NULL, &stats), cudaErrorInvalidValue);
    FAILS(galloc_pool_stats(pool, NULL), cudaErrorInvalidValue);
    FAILS(galloc_pool_streams(NULL, NULL, 0, NULL), cudaErrorInvalidValue);
    FAILS(galloc_pool_stats_reset(NULL), cudaErrorInvalidValue);
    FAILS(galloc_pool_config(pool, NULL), cudaErrorInvalidValue);
    FAILS(galloc_pool_destroy(NULL), cudaErrorInvalidValue);
    FAILS(galloc_pool_create(NULL, NULL), cudaErrorInvalidValue);
    FAILS(galloc_pool_default(NULL, 0), cudaErrorInvalidValue);
    FAILS(galloc_pointer_info(p, NULL), cudaErrorInvalidValue);
    FAILS(galloc_record_stream(NULL, s), cudaErrorInvalidDevicePointer);
    FAILS(galloc_resize(NULL, 100, s), cudaErrorInvalidDevicePointer);
    FAILS(galloc_resize(p, 0, s), cudaErrorInvalidValue);
    EXPECT_EQ(galloc_pool_check(NULL), -1);
    EXPECT_EQ(info_of(p).requested, 1000);
    OK(galloc_free(p, s));
    pool_end(pool);
    finish();
}

/* The program may fill in a report as far as it goes. */
TEST(a_report_has_as_many_steps_as_it_takes)
{
    static struct {
        galloc_report report;
        galloc_step behind;
    } of;
    char text[GALLOC_REPORT_TEXT];
    int n = 0;
    begin();
    of.report.steps_taken = 1;
    of.behind.name = "a step of mine";
    for (int i = 0; i < GALLOC_REPORT_STEPS; i++) of.report.steps[i].name = of.behind.name;
    OK(galloc_report_text(&of.report, text, sizeof text));
    for (const char *at = text; (at = strstr(at, "a step of mine")) != NULL; at++) n++;
    EXPECT_EQ(n, GALLOC_REPORT_STEPS);
    finish();
}

TEST(sizes_near_the_end_of_numbers)
{
    static const size_t sizes[] = {
        SIZE_MAX,           SIZE_MAX - 1,     SIZE_MAX - 511, SIZE_MAX - 512,  SIZE_MAX - MIB(2),
        SIZE_MAX - MIB(20), SIZE_MAX / 2 + 1, SIZE_MAX / 2,   (size_t)1 << 62, (size_t)1 << 50,
        (size_t)1 << 48,    (size_t)1 << 47,  GIB(65)};
    for (int expandable = 0; expandable < 2; expandable++) {
        begin();
        galloc_pool *pool = pool_expandable(expandable);
        void *keep = get(pool, 1000, 0);
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            for (size_t alignment = 0; alignment <= MIB(64); alignment = alignment ? alignment * 4096 : 4096) {
                galloc_request request = request_of(pool, sizes[i], 0);
                galloc_stats before = stats_of(pool);
                void *p = &before;
                request.alignment = alignment;
                FAILS(galloc_alloc(&p, &request), cudaErrorMemoryAllocation);
                EXPECT(p == NULL);
                galloc_stats after = stats_of(pool);
                EXPECT_EQ(after.failures, before.failures + 1);
                expect_same(&before, &after);
            }
            EXPECT(galloc_resize(keep, sizes[i], 0) != cudaSuccess);
            EXPECT_EQ(info_of(keep).requested, 1000);
            FAILS(galloc_pool_reserve(pool, sizes[i]), cudaErrorMemoryAllocation);
            expect_healthy(pool, 1);
        }
        OK(galloc_free(keep, 0));
        pool_end(pool);
        finish();
    }
}

TEST(room_and_alignment_near_the_end_of_numbers)
{
    begin();
    galloc_pool *pool = pool_new(NULL);
    for (int bit = 40; bit <= 64; bit++) {
        size_t huge = bit < 64 ? (size_t)1 << bit : SIZE_MAX;
        galloc_request request = request_of(pool, 1000, 0);
        void *p = NULL;
        request.max_bytes = huge;
        if (galloc_alloc(&p, &request) == cudaSuccess) OK(galloc_free(p, 0));
        else EXPECT(p == NULL);
        request.max_bytes = 0;
        request.alignment = huge;
        if (bit > 55) FAILS(galloc_alloc(&p, &request), cudaErrorInvalidValue);
        else if (bit == 55) FAILS(galloc_alloc(&p, &request), cudaErrorMemoryAllocation);
        else if (galloc_alloc(&p, &request) == cudaSuccess) OK(galloc_free(p, 0));
        else EXPECT(p == NULL);
        expect_healthy(pool, 1);
    }
    pool_end(pool);
    finish();
}

/* The range of addresses is made for the alignment, of which a device of this size says nothing. */
TEST(an_alignment_beyond_the_devices_memory)
{
    for (int bit = 33; bit <= 42; bit++) {
        sim_options options = sim_defaults();
        options.memory = GIB(4);
        begin_with(options);
        galloc_pool *first = pool_new(NULL), *pool = pool_new(NULL);
        galloc_request request = request_of(pool, MIB(1), 0);
        void *p = NULL;
        OK(galloc_free(get(first, MIB(1), 0), 0)); /* the device's first addresses fit by chance */
        OK(galloc_pool_trim(first, 0, NULL));
        request.alignment = (size_t)1 << bit;
        request.max_bytes = bit % 2 ? MIB(8) : 0;
        OK(galloc_alloc(&p, &request));
        EXPECT_EQ((uintptr_t)p & (request.alignment - 1), 0);
        put(0, p, MIB(1), 1);
        expect_healthy(pool, 1);
        OK(galloc_free(p, 0));
        pool_end(pool);
        pool_end(first);
        finish();
    }
}

TEST(wrong_pointers_are_told_apart)
{
    for (int expandable = 0; expandable < 2; expandable++) {
        begin();
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_expandable(expandable);
        char *used = get(pool, 4096, s), *freed = get(pool, 8192, s), *wall = get(pool, 512, s);
        void *foreign = NULL;
        char message[4][544];
        OK(cudaMalloc(&foreign, 512));
        OK(galloc_free(freed, s));
        galloc_stats before = stats_of(pool);
        void *bad[4] = {foreign, used + 512, freed, &message};
        for (int i = 0; i < 4; i++) {
            FAILS(galloc_free(bad[i], s), cudaErrorInvalidDevicePointer);
            snprintf(message[i], sizeof message[i], "%s", galloc_last_message());
            FAILS(galloc_free_after(bad[i], &s, 1), cudaErrorInvalidDevicePointer);
            FAILS(galloc_record_stream(bad[i], s), cudaErrorInvalidDevicePointer);
            FAILS(galloc_resize(bad[i], 512, s), cudaErrorInvalidDevicePointer);
        }
        for (int i = 0; i < 3; i++)
            for (int k = 0; k < i; k++) EXPECT(strcmp(message[i], message[k]) != 0);
        FAILS(galloc_free(used + 1, s), cudaErrorInvalidDevicePointer);
        FAILS(galloc_free(freed + 512, s), cudaErrorInvalidDevicePointer);
        FAILS(galloc_free((void *)UINTPTR_MAX, s), cudaErrorInvalidDevicePointer);
        FAILS(galloc_free((void *)1, s), cudaErrorInvalidDevicePointer);
        galloc_stats after = stats_of(pool);
        expect_same(&before, &after);
        OK(galloc_free(used, s));
        OK(galloc_free(wall, s));
        FAILS(galloc_free(wall, s), cudaErrorInvalidDevicePointer); /* merged away */
        OK(galloc_pool_trim(pool, 0, NULL));
        FAILS(galloc_free(used, s), cudaErrorInvalidDevicePointer); /* unmapped */
        OK(cudaFree(foreign));
        expect_healthy(pool, 1);
        pool_end(pool);
        finish();
    }
}

TEST(a_pool_with_used_blocks_is_not_destroyed)
{
    begin();
    galloc_pool *pool = pool_new(NULL);
    void *p = get(pool, 1000, 0);
    galloc_stats before = stats_of(pool);
    FAILS(galloc_pool_destroy(pool), cudaErrorNotPermitted);
    galloc_stats after = stats_of(pool);
    expect_same(&before, &after);
    OK(galloc_free(p, 0));
    pool_end(pool);
    finish();
}

/* ---- running out ------------------------------------------------------------------------------------------------- */

TEST(the_device_runs_out)
{
    for (int expandable = 0; expandable < 2; expandable++) {
        sim_options options = sim_defaults();
        options.memory = MIB(128);
        begin_with(options);
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_expandable(expandable);
        void *p[64] = {NULL};
        int n = 0;
        while (n < 64 && galloc_pool_malloc(pool, &p[n], MIB(12), s) == cudaSuccess) put(s, p[n++], MIB(12), 1);
        EXPECT(n >= 8 && n <= 10);
        EXPECT(p[n] == NULL);
        EXPECT_EQ(log_lines, 1);
        for (int i = 0; i < 3; i++) FAILS(galloc_pool_malloc(pool, &p[n], MIB(12), s), cudaErrorMemoryAllocation);
        EXPECT_EQ(stats_of(pool).failures, 4);
        EXPECT_EQ(stats_of(pool).live.current, MIB(12) * (size_t)n);
        OK(cudaPeekAtLastError());
        expect_healthy(pool, 1);
        OK(galloc_free(p[2], s));
        p[2] = get(pool, MIB(12), s);
        for (int i = 0; i < n; i++) OK(galloc_free(p[i], s));
        if (expandable) { /* pages serve any size: all of them together one large block */
            void *whole = get(pool, MIB(100), s);
            OK(galloc_free(whole, s));
        }
        expect_healthy(pool, 1);
        pool_end(pool);
        finish();
    }
}

/* Memory cached in the shape of other sizes is given back to the device rather than failing. */
TEST(cached_memory_is_no_reason_to_fail)
{
    for (int expandable = 0; expandable < 2; expandable++) {
        sim_options options = sim_defaults();
        options.memory = MIB(128);
        begin_with(options);
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_expandable(expandable);
        void *p[5];
        for (int i = 0; i < 5; i++) p[i] = get(pool, MIB(22), s);
        for (int i = 0; i < 5; i++) OK(galloc_free(p[i], s));
        void *whole = get(pool, MIB(120), s);
        put(s, whole, MIB(120), 1);
        OK(galloc_free(whole, s));
        expect_healthy(pool, 1);
        pool_end(pool);
        finish();
    }
}

TEST(the_limit_is_never_exceeded)
{
    for (int expandable = 0; expandable < 2; expandable++) {
        for (uint64_t seed = 0; seed < 6; seed++) {
            begin();
            dice d = {test_seed() + seed};
            cudaStream_t s[2] = {stream_new(), stream_new()};
            size_t limit = MIB(2) + KIB(700) * roll_below(&d, 50);
            galloc_config config = config_limit(limit);
            config.expandable_segments = expandable;
            galloc_pool *pool = pool_new(&config);
            void *p[16] = {NULL};
            int served = 0;
            for (int i = 0; i < 200; i++) {
                uint32_t k = roll_below(&d, 16);
                OK(galloc_free(p[k], s[k % 2]));
                cudaError_t err = galloc_pool_malloc(pool, &p[k], roll_bytes(&d, limit), s[k % 2]);
                EXPECT(err == cudaSuccess || (err == cudaErrorMemoryAllocation && !p[k]));
                served += err == cudaSuccess;
            }
            EXPECT(served > 50);
            EXPECT(sim_physical_peak(0) <= limit);
            for (int k = 0; k < 16; k++) OK(galloc_free(p[k], s[k % 2]));
            expect_healthy(pool, 1);
            pool_end(pool);
            finish();
        }
    }
}

/* A limit below the usual size of a segment still serves what fits into it. */
TEST(small_limits_serve_what_fits)
{
    for (int expandable = 0; expandable < 2; expandable++) {
        begin();
        galloc_config config = config_limit(MIB(6));
        config.expandable_segments = expandable;
        galloc_pool *pool = pool_new(&config);
        void *p = get(pool, MIB(5), 0);
        OK(galloc_free(p, 0));
        p = get(pool, MIB(6), 0);
        void *q = NULL;
        FAILS(galloc_pool_malloc(pool, &q, 1, 0), cudaErrorMemoryAllocation);
        OK(galloc_free(p, 0));
        pool_end(pool);
        finish();
    }
}

TEST(the_host_has_no_memory)
{
    for (int expandable = 0; expandable < 2; expandable++) {
        begin();
        cudaStream_t s[9];
        for (int i = 0; i < 9; i++) s[i] = stream_new();
        galloc_config config = galloc_config_default();
        config.expandable_segments = expandable;
        galloc_pool *pool = pool_new(&config), *second = (galloc_pool *)&config;
        void *p[64] = {NULL}, *large = get(pool, MIB(8), s[0]);
        for (int i = 0; i < 32; i++) p[i] = get(pool, 1000, s[0]);
        sim_fail_malloc(1, 1);
        FAILS(galloc_pool_create(&second, &config), cudaErrorMemoryAllocation);
        EXPECT(second == NULL);
        for (int i = 32; i < 64; i++) {
            cudaError_t err = galloc_pool_malloc(pool, &p[i], MIB(3), s[i % 9]);
            EXPECT(err == cudaErrorMemoryAllocation ? !p[i] : err == cudaSuccess);
        }
        cudaError_t err = galloc_free_after(large, s, 9);
        EXPECT(err == cudaErrorMemoryAllocation || err == cudaSuccess);
        EXPECT_EQ(info_of(large).state == GALLOC_STATE_USED, err != cudaSuccess);
        if (err != cudaSuccess) OK(galloc_free(large, s[0]));
        for (int i = 0; i < 64; i += 2) OK(galloc_free(p[i], s[i % 9])); /* frees need no memory */
        EXPECT(sim_failed_mallocs() > 0);
        sim_fail_clear();
        for (int i = 1; i < 64; i += 2) OK(galloc_free(p[i], s[i % 9]));
        expect_healthy(pool, 1);
        pool_end(pool);
        finish();
    }
}

/* Notes uses of blocks until the host has no memory for that. Returns how many were noted. */
static int record_until_refused(galloc_pool *pool, void **p, int most, cudaStream_t s, cudaStream_t t)
{
    int n = 0;
    OK(galloc_free(get(pool, 1000, t), t));
    for (n = 0; n < most; n++) p[n] = get(pool, 1000, s);
    sim_fail_malloc(1, 1);
    for (n = 0; n < most; n++)
        if (galloc_record_stream(p[n], t) != cudaSuccess) break;
    return n;
}

/* A call that there is no host memory for leaves the block the program's, and the streams that it named free to go. */
TEST(a_block_whose_use_cannot_be_noted_stays_the_programs)
{
    enum { BLOCKS = 3000 };
    static void *p[BLOCKS];
    begin();
    cudaStream_t s = stream_new(), t = stream_new(), some[17];
    galloc_pool *pool = pool_new(NULL);
    int n = record_until_refused(pool, p, BLOCKS, s, t), streams = 0;
    EXPECT(n < BLOCKS);
    EXPECT(strstr(galloc_last_message(), "no host memory") != NULL);
    EXPECT_EQ(info_of(p[n]).state, GALLOC_STATE_USED);
    for (int i = 0; i < 17; i++) some[i] = i % 2 ? s : t;
    FAILS(galloc_free_after(p[n], some, 2), cudaErrorMemoryAllocation);
    EXPECT_EQ(info_of(p[n]).state, GALLOC_STATE_USED);
    FAILS(galloc_record_stream(p[n], t), cudaErrorMemoryAllocation);
    OK(galloc_free(p[n], s));
    sim_fail_clear();
    for (int i = 0; i < BLOCKS; i++)
        if (i != n) OK(galloc_free(p[i], s));
    for (int i = 0; i < 2; i++) OK(galloc_stream_retire(some[i]));
    OK(cudaDeviceSynchronize());
    OK(galloc_pool_trim(pool, 0, NULL));
    OK(galloc_pool_trim(pool, 0, NULL));
    OK(galloc_pool_streams(pool, NULL, 0, &streams));
    EXPECT_EQ(streams, 0); /* no call holds on to them */
    expect_healthy(pool, 1);
    pool_end(pool);
    finish();
}

/* A free on a new stream for whose state there is no host memory waits for that stream. The recorded stream gets its
   event in that call all the same: the program may destroy it afterwards. */
TEST(a_free_without_host_memory_is_done_with_recorded_streams)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new(), u = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *p = get(pool, MIB(2), s);
    put(t, p, MIB(2), 1);
    OK(galloc_record_stream(p, t));
    long records = sim_calls("cuEventRecord");
    sim_fail_malloc(1, 0); /* the state of u */
    OK(galloc_free(p, u));
    EXPECT(sim_failed_mallocs() > 0);
    sim_fail_clear();
    EXPECT_EQ(sim_calls("cuEventRecord"), records + 2); /* on t, and for the wait */
    stream_end(t);
    OK(galloc_free(get_used(pool, MIB(2), s, 2), s));
    OK(galloc_free(get_used(pool, MIB(2), u, 3), u));
    sim_run(-1);
    expect_healthy(pool, 1);
    pool_end(pool);
    stream_end(s);
    stream_end(u);
    finish();
}

/* Where host memory does not suffice for all pages of a block at once, they go one after the other. */
TEST(a_trim_without_host_memory_gives_page_after_page)
{
    begin();
    galloc_config config = config_limit(GIB(1));
    config.growth = MIB(2);
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new();
    void *p = get(pool, MIB(2) * 64, s), *q = get(pool, 512, s);
    OK(galloc_free(p, s));
    OK(cudaStreamSynchronize(s));
    inside_drain_blocks(pool);
    sim_fail_malloc(1, 1);
    OK(galloc_pool_trim(pool, 0, NULL));
    EXPECT(sim_failed_mallocs() > 0);
    sim_fail_clear();
    EXPECT_EQ(stats_of(pool).reserved.current, MIB(2));
    OK(galloc_free(q, s));
    expect_healthy(pool, 1);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* Once there is host memory again, a trim that has given one page gives no more than the rest. */
TEST(a_trim_that_host_memory_delays_keeps_what_it_is_to_keep)
{
    begin();
    galloc_config config = config_limit(GIB(1));
    config.growth = MIB(2);
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new();
    size_t released = 0;
    void *p = get(pool, MIB(2) * 64, s), *q = get(pool, 512, s);
    OK(galloc_free(p, s));
    OK(cudaStreamSynchronize(s));
    inside_drain_blocks(pool);
    sim_fail_malloc(1, 0);
    OK(galloc_pool_trim(pool, MIB(32), &released));
    EXPECT_EQ(sim_failed_mallocs(), 1);
    sim_fail_clear();
    EXPECT_EQ(stats_of(pool).reserved.current, MIB(32));
    EXPECT_EQ(released, MIB(2) * 65 - MIB(32));
    OK(galloc_free(q, s));
    expect_healthy(pool, 1);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* What such a free finds after the wait may be no block: then it is refused as any other, and nothing has changed. */
TEST(a_free_without_host_memory_of_no_block_is_refused)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_new(NULL);
    char *p = get(pool, MIB(2), s);
    void *gone = get(pool, MIB(2), s);
    OK(galloc_free(gone, s));
    galloc_stats before = stats_of(pool);
    for (int i = 0; i < 2; i++) {
        sim_fail_malloc(1, 1); /* the state of t */
        FAILS(galloc_free(i ? gone : p + 512, t), cudaErrorInvalidDevicePointer);
        EXPECT(sim_failed_mallocs() > 0);
        sim_fail_clear();
    }
    galloc_stats after = stats_of(pool);
    expect_same(&after, &before);
    EXPECT_EQ(info_of(p).state, GALLOC_STATE_USED);
    OK(galloc_free(p, s));
    expect_healthy(pool, 1);
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* A free on a blocking stream comes after earlier work of the legacy stream, also where it is a wait. */
TEST(a_free_without_host_memory_waits_for_the_legacy_stream)
{
    for (int refused = 0; refused < 2; refused++) {
        begin_still();
        cudaStream_t s = stream_new(), blocking = NULL;
        galloc_pool *pool = pool_new(NULL);
        void *p = get_used(pool, MIB(2), cudaStreamLegacy, 1), *q;
        OK(cudaStreamCreate(&blocking));
        sim_fail_malloc(1, 0); /* the state of `blocking` */
        if (refused) sim_fail("cuEventCreate", 1, 0, cudaErrorMemoryAllocation);
        OK(galloc_free(p, blocking));
        EXPECT(sim_failed_mallocs() > 0);
        EXPECT_EQ(sim_failed(), refused);
        sim_fail_clear();
        q = get_used(pool, MIB(2), s, 2);
        EXPECT(q == p);
        OK(galloc_free(q, s));
        stream_end(blocking);
        stream_end(s);
        pool_end(pool);
        finish();
    }
}

/* Where not even that is possible, the free fails, and the block is still the program's. */
TEST(a_free_without_host_memory_and_without_a_wait_fails)
{
    static const char *const calls[] = {"cuEventRecord", "cuStreamSynchronize"};
    for (int i = 0; i < 2; i++) {
        begin_still();
        cudaStream_t s = stream_new(), blocking = NULL;
        galloc_pool *pool = pool_new(NULL);
        void *p = get_used(pool, MIB(2), cudaStreamLegacy, 1), *q;
        OK(cudaStreamCreate(&blocking));
        sim_fail_malloc(1, 0); /* the state of `blocking` */
        sim_fail(calls[i], 1, 0, cudaErrorUnknown);
        EXPECT_EQ(galloc_free(p, blocking), cudaErrorUnknown);
        EXPECT_EQ(sim_failed(), 1);
        sim_fail_clear();
        EXPECT_EQ(stats_of(pool).live.current, MIB(2));
        q = get_used(pool, MIB(2), s, 2);
        EXPECT(q != p);
        look(cudaStreamLegacy, p, MIB(2), 1);
        OK(galloc_free(q, s));
        OK(galloc_free(p, cudaStreamLegacy));
        stream_end(blocking);
        stream_end(s);
        pool_end(pool);
        finish();
    }
}

/* The legacy stream cannot be waited for while a blocking one is captured. */
TEST(a_free_without_host_memory_ends_no_capture)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new(), blocking = NULL;
    cudaGraph_t graph = NULL;
    galloc_pool *pool = pool_new(NULL);
    void *p = get(pool, MIB(2), s);
    OK(cudaStreamCreate(&blocking));
    OK(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeThreadLocal));
    sim_fail_malloc(1, 0); /* the state of t */
    sim_fail("cuEventCreate", 1, 0, cudaErrorMemoryAllocation);
    FAILS(galloc_free(p, t), cudaErrorStreamCaptureImplicit);
    sim_fail_clear();
    OK(cudaStreamEndCapture(blocking, &graph));
    OK(cudaGraphDestroy(graph));
    EXPECT_EQ(info_of(p).state, GALLOC_STATE_USED);
    OK(galloc_free(p, t));
    stream_end(blocking);
    stream_end(s);
    stream_end(t);
    pool_end(pool);
    finish();
}

/* How many streams are named decides where they are noted, and nothing else. A call that is refused keeps nothing. */
TEST(free_after_of_any_number_of_streams)
{
    begin();
    cudaStream_t s[40];
    for (int i = 0; i < 40; i++) s[i] = stream_new();
    galloc_pool *pool = pool_new(NULL);
    for (int n = 1; n <= 40; n++) {
        void *p = get(pool, MIB(2), s[0]);
        EXPECT_EQ(galloc_free_after((char *)p + 512, s, n), cudaErrorInvalidDevicePointer);
        OK(galloc_free_after(p, s, n));
        EXPECT(info_of(p).state != GALLOC_STATE_USED);
        p = get(pool, 1000, s[0]);
        sim_fail_malloc(1, 1);
        cudaError_t err = galloc_free_after(p, s, n);
        EXPECT_EQ(err != cudaSuccess, sim_failed_mallocs() > 0); /* what is there suffices, or nothing has happened */
        sim_fail_clear();
        if (err != cudaSuccess) OK(galloc_free(p, s[0]));
        EXPECT_EQ(galloc_pool_check(pool), 0);
    }
    pool_end(pool);
    finish();
}

/* The host's want is not the device's: nothing that is cached is given back for it. */
TEST(the_host_has_no_memory_and_the_device_has)
{
    for (int expandable = 0; expandable < 2; expandable++) {
        begin();
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_expandable(expandable);
        void *p = get(pool, MIB(512), s), *q = NULL;
        OK(galloc_free(p, s));
        OK(cudaStreamSynchronize(s));
        galloc_stats before = stats_of(pool);
        sim_fail_malloc(1, 1);
        if (galloc_pool_malloc(pool, &q, GIB(expandable ? 60 : 1), s) == cudaSuccess) OK(galloc_free(q, s));
        sim_fail_clear();
        EXPECT(stats_of(pool).reserved.current >= before.reserved.current);
        pool_end(pool);
        finish();
    }
}

static inside_driver real_driver;

static CUresult CUDAAPI alloc_askew(CUdeviceptr *ptr, size_t bytes)
{
    CUresult result = real_driver.MemAlloc(ptr, bytes + KIB(512));
    if (!result) *ptr += KIB(512);
    return result;
}

static CUresult CUDAAPI free_askew(CUdeviceptr ptr)
{
    return real_driver.MemFree(ptr % MIB(2) == KIB(512) ? ptr - KIB(512) : ptr);
}

static size_t most_addresses;

static CUresult CUDAAPI reserve_up_to(CUdeviceptr *ptr, size_t bytes, size_t alignment, CUdeviceptr at,
                                      unsigned long long flags)
{
    if (bytes > most_addresses) return CUDA_ERROR_OUT_OF_MEMORY;
    return real_driver.MemAddressReserve(ptr, bytes, alignment, at, flags);
}

/* A process that may have few addresses in one piece still gets what fits into them. */
TEST(a_request_of_nearly_all_addresses)
{
    for (size_t gib = 9; gib <= 15; gib++) {
        begin();
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_new(NULL);
        inside_driver mine = real_driver = inside_driver_in_use();
        mine.MemAddressReserve = reserve_up_to;
        inside_driver_use(mine);
        most_addresses = GIB(gib) + MIB(64);
        void *p = get(pool, GIB(gib), s);
        inside_driver_use(real_driver);
        put(s, p, GIB(gib), 1);
        OK(galloc_free(p, s));
        pool_end(pool);
        finish();
    }
}

/* CUDA promises 256 bytes of alignment: a device that gives no more is served, or refused, and breaks nothing. */
TEST(a_device_with_odd_addresses)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_expandable(0);
    void *p = NULL;
    inside_driver mine = real_driver = inside_driver_in_use();
    mine.MemAlloc = alloc_askew;
    mine.MemFree = free_askew;
    inside_driver_use(mine);
    cudaError_t err = galloc_pool_malloc(pool, &p, MIB(4), s);
    EXPECT(err == cudaSuccess || (err == cudaErrorNotSupported && !p));
    if (p) put(s, p, MIB(4), 1);
    OK(galloc_free(p, s));
    mine.MemAlloc = real_driver.MemAlloc;
    inside_driver_use(mine);
    p = get(pool, MIB(40), s);
    put(s, p, MIB(40), 2);
    OK(galloc_free(p, s));
    expect_healthy(pool, 0);
    pool_end(pool);
    inside_driver_use(real_driver);
    finish();
}

/* A stream that there is no host memory to note is waited for instead; but legacy is left alone while a blocking stream
   is captured, as that would end the capture. */
TEST(a_free_without_host_memory_leaves_captures_alone)
{
    begin();
    galloc_pool *pool = pool_new(NULL);
    cudaStream_t s = stream_new(), blocking = NULL;
    cudaGraph_t graph = NULL;
    void *p = get(pool, 1000, s);
    OK(cudaStreamCreate(&blocking));
    OK(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeGlobal));
    sim_fail_malloc(1, 1);
    FAILS(galloc_free(p, cudaStreamLegacy), cudaErrorMemoryAllocation);
    EXPECT(sim_failed_mallocs() > 0);
    sim_fail_clear();
    OK(cudaStreamEndCapture(blocking, &graph));
    OK(cudaGraphDestroy(graph));
    OK(galloc_free(p, cudaStreamLegacy));
    stream_end(blocking);
    pool_end(pool);
    finish();
}

/* ---- a context, a driver, a process that are gone ---------------------------------------------------------------- */

TEST(the_device_is_reset)
{
    for (int round = 0; round < 16; round++) { /* kind of segments, reuse */
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_config config = config_limit(MIB(64));
        config.expandable_segments = round / 8;
        config.reuse = round % 8;
        galloc_pool *pool = pool_new(&config);
        void *p = get(pool, MIB(12), s), *q = get(pool, MIB(12), t), *keep = get(pool, MIB(4), s);
        put(s, p, MIB(12), 1);
        put(t, q, MIB(12), 1);
        OK(galloc_record_stream(keep, t));
        OK(galloc_free(p, s));
        OK(galloc_free(q, t));
        OK(cudaDeviceReset());
        s = stream_new();
        t = stream_new();
        for (int i = 0; i < 3; i++) {
            p = get(pool, MIB(12), s);
            q = get(pool, MIB(12), t);
            put(s, p, MIB(12), 2);
            put(t, q, MIB(12), 2);
            OK(galloc_free(p, s));
            OK(galloc_free(q, t));
        }
        OK(galloc_free(keep, s));
        EXPECT_EQ(galloc_pool_check(pool), 0);
        EXPECT(sim_physical(0) <= MIB(64));
        expect_healthy(pool, 1);
        pool_end(pool);
        finish();
    }
}

static int context_is_active(int device)
{
    unsigned int flags = 0;
    int active = -1;
    OK(cuDevicePrimaryCtxGetState(device, &flags, &active));
    return active;
}

static void *make_a_pool(void *unused)
{
    galloc_pool *pool = NULL;
    void *p = NULL;
    (void)unused;
    sim_fail("cudaSetDevice", 1, 0, cudaErrorUnknown);
    FAILS(galloc_pool_create(&pool, NULL), cudaErrorUnknown);
    EXPECT(pool == NULL);
    sim_fail_clear();
    if (!OK(galloc_pool_create(&pool, NULL))) return NULL;
    OK(galloc_pool_malloc(pool, &p, 1000, cudaStreamPerThread));
    OK(galloc_free(p, cudaStreamPerThread));
    pool_end(pool);
    return NULL;
}

/* A pool of the current device needs a context in the thread that makes it. */
TEST(a_thread_that_gets_no_context_makes_no_pool)
{
    pthread_t thread;
    begin();
    OK(cudaFree(0));
    EXPECT_EQ(pthread_create(&thread, NULL, make_a_pool, NULL), 0);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
    finish();
}

static void *use_own_stream(void *unused)
{
    enum { KEYS = 4096 };
    static pthread_key_t keys[KEYS];
    int n = 0, value = 0;
    void *p = NULL;
    OK(cudaSetDevice(0));
    while (n < KEYS && pthread_key_create(&keys[n], NULL) == 0) EXPECT_EQ(pthread_setspecific(keys[n++], &value), 0);
    EXPECT(n > 0);
    OK(galloc_malloc(&p, MIB(2), cudaStreamPerThread));
    put(cudaStreamPerThread, p, MIB(2), 1);
    OK(galloc_free(p, cudaStreamPerThread));
    OK(galloc_malloc(&p, MIB(2), cudaStreamPerThread));
    OK(galloc_free(p, cudaStreamPerThread));
    for (int i = 0; i < n; i++) EXPECT(pthread_getspecific(keys[i]) == &value);
    while (n > 0) (void)pthread_key_delete(keys[--n]);
    return unused;
}

/* A process may have no key of threads left: then their ends are not seen, and the program's keys are its own. */
TEST(a_process_without_a_key_of_threads_uses_their_streams)
{
    pthread_t thread;
    void *p = NULL;
    begin();
    OK(galloc_malloc(&p, 1000, cudaStreamPerThread));
    OK(galloc_free(p, cudaStreamPerThread));
    OK(galloc_shutdown()); /* the key of before is the program's to have */
    EXPECT_EQ(pthread_create(&thread, NULL, use_own_stream, NULL), 0);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
    finish();
}

/* A pool that cannot be made, or whose context is a new one that the driver says nothing of, keeps no hold of it. */
TEST(a_context_is_let_go_by_who_fails)
{
    begin_with_devices(2, SIM_PACE_RANDOM);
    galloc_config config = galloc_config_default();
    galloc_pool *pool = NULL;
    OK(cudaSetDevice(0));
    config.device = 1;
    sim_fail("cuDeviceTotalMem", 1, 0, cudaErrorUnknown);
    FAILS(galloc_pool_create(&pool, &config), cudaErrorUnknown);
    EXPECT_EQ(context_is_active(1), 0);
    pool = pool_new(&config);
    EXPECT_EQ(context_is_active(1), 1);
    OK(cudaSetDevice(1));
    OK(cudaDeviceReset());
    OK(cudaSetDevice(0));
    sim_fail("cuCtxGetId", 2, 0, cudaErrorUnknown); /* the first says that the context is gone */
    FAILS(galloc_pool_trim(pool, 0, NULL), cudaErrorUnknown);
    EXPECT_EQ(context_is_active(1), 0);
    OK(galloc_pool_trim(pool, 0, NULL));
    EXPECT_EQ(context_is_active(1), 1);
    pool_end(pool);
    EXPECT_EQ(context_is_active(1), 0);
    finish();
}

/* The driver may tell that a context has ended by either of two errors. */
TEST(a_context_that_is_no_longer_valid_has_ended)
{
    static const int errors[] = {CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_CONTEXT_IS_DESTROYED};
    for (int i = 0; i < 2; i++) {
        begin_with_devices(2, SIM_PACE_RANDOM);
        galloc_config config = config_fixed();
        config.device = 1;
        galloc_pool *pool = pool_new(&config);
        OK(cudaSetDevice(1));
        OK(galloc_free(get(pool, MIB(4), NULL), NULL));
        OK(cudaDeviceReset());
        OK(cudaSetDevice(0));
        sim_fail("cuCtxGetId", 1, 0, errors[i]);
        OK(galloc_pool_trim(pool, 0, NULL));
        EXPECT_EQ(sim_failed(), 1);
        EXPECT_EQ(context_is_active(1), 1);
        EXPECT_EQ(stats_of(pool).reserved.current, 0);
        pool_end(pool);
        finish();
    }
}

static void expect_told(const char *of_device, int device)
{
    char text[100];
    snprintf(text, sizeof text, of_device, device);
    EXPECT(strstr(galloc_last_message(), text) != NULL);
}

/* A message names the device of the pool that it is about, whichever is current. */
TEST(messages_name_the_device_of_the_pool)
{
    for (int device = 0; device < 3; device++) {
        begin_with_devices(3, SIM_PACE_PROMPT);
        galloc_config config = galloc_config_default();
        cudaGraph_t graph = NULL;
        CUcontext context = NULL;
        void *p, *q = NULL;
        OK(cudaSetDevice(device));
        cudaStream_t s = stream_new();
        OK(cuCtxGetCurrent(&context));
        OK(cudaSetDevice((device + 1) % 3));
        config.device = device;
        galloc_pool *pool = pool_new(&config);
        p = get(pool, 1000, s);
        FAILS(galloc_pool_malloc(pool, &q, GIB(65), s), cudaErrorMemoryAllocation);
        expect_told("out of memory: asked for 69793218560 bytes on device %d;", device);
        FAILS(galloc_pool_destroy(pool), cudaErrorNotPermitted);
        expect_told("blocks of the pool of device %d are in use", device);
        OK(galloc_free(p, s));
        OK(galloc_pool_trim(pool, 0, NULL));
        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
        OK(galloc_free(get(pool, 1000, s), s));
        OK(cudaStreamEndCapture(s, &graph));
        FAILS(galloc_pool_destroy(pool), cudaErrorNotPermitted);
        expect_told("bytes of the pool of device %d: destroy", device);
        OK(cudaGraphDestroy(graph));
        p = get(pool, 1000, s);
        OK(galloc_free(p, s));
        sim_fail("cuMemUnmap", 1, 1, cudaErrorUnknown);
        FAILS(galloc_pool_destroy(pool), cudaErrorUnknown);
        expect_told("the pool of device %d still holds", device);
        sim_fail_clear();
        sim_context_fail(context, cudaErrorIllegalAddress);
        for (int i = 0; i < 2; i++) FAILS(galloc_pool_reserve(pool, MIB(20)), cudaErrorIllegalAddress);
        expect_told("the pool of device %d refuses requests after", device);
        OK(cudaSetDevice(device));
        OK(cudaDeviceReset());
        pool_end(pool);
        finish();
    }
}

/* A stream that the pool has not seen, and a driver that does not tell its context: that is the driver's error. */
TEST(a_context_that_is_not_told_is_an_error_of_the_driver)
{
    begin();
    galloc_pool *pool = pool_new(NULL);
    cudaStream_t s = stream_new();
    void *p = pool;
    sim_fail("cuCtxGetId", 1, 1, cudaErrorUnknown);
    FAILS(galloc_pool_malloc(pool, &p, 4096, s), cudaErrorUnknown);
    sim_fail_clear();
    EXPECT(!p);
    p = get(pool, 4096, s);
    OK(galloc_free(p, s));
    pool_end(pool);
    finish();
}

/* The driver gives addresses out again: a new segment may lie where a void one was. */
TEST(addresses_come_back_after_a_reset)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_expandable(0);
    void *a = get(pool, MIB(4), s), *b = get(pool, MIB(4), s);
    OK(galloc_free(a, s));
    OK(cudaDeviceReset());
    s = stream_new();
    void *p = get(pool, 512, s), *q = get(pool, MIB(19), s);
    EXPECT_EQ(galloc_pool_check(pool), 0);
    (void)galloc_free(b, s);
    void *r = get(pool, MIB(30), s);
    EXPECT_EQ(galloc_pool_check(pool), 0);
    put(s, p, 512, 1);
    put(s, q, MIB(19), 2);
    put(s, r, MIB(30), 3);
    look(s, p, 512, 1);
    look(s, q, MIB(19), 2);
    OK(galloc_free(p, s));
    OK(galloc_free(q, s));
    OK(galloc_free(r, s));
    expect_healthy(pool, 1);
    pool_end(pool);
    finish();
}

/* A block that a reset has taken gets shorter: what is cut off lies where a new one may be by now. */
TEST(what_is_cut_off_lost_memory_is_nobodys)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_expandable(0);
    void *first = get(pool, MIB(2), s), *lost = get(pool, MIB(6), s);
    OK(galloc_free(first, s));
    OK(cudaDeviceReset());
    s = stream_new();
    OK(galloc_pool_trim(pool, 0, NULL)); /* here it is noticed */
    char *below = get(pool, MIB(5), s), *p = get(pool, MIB(2), s);
    EXPECT(below == first && p == below + MIB(5)); /* the addresses that were lost */
    (void)galloc_resize(lost, MIB(3), s);
    put(s, p, MIB(2), 1);
    OK(galloc_free(p, s));
    OK(galloc_free(below, s));
    (void)galloc_free(lost, s);
    expect_healthy(pool, 1);
    pool_end(pool);
    finish();
}

/* The same before a new one is there: the rest is the program's still, and can be freed or given up. */
TEST(what_is_cut_off_lost_memory_leaves_the_rest)
{
    static const char *const kinds[] = {"expandable_segments:False", "like:pytorch",
                                        "expandable_segments:False,strategy:pooled", "backend:cudaMalloc",
                                        "backend:cudaMallocAsync"};
    for (size_t i = 0; i < 2 * sizeof kinds / sizeof kinds[0]; i++) {
        begin();
        cudaStream_t s = stream_new();
        galloc_config config = galloc_config_default();
        OK(galloc_config_parse(&config, kinds[i / 2], NULL, 0));
        galloc_pool *pool = pool_new(&config);
        void *large = get(pool, MIB(6), s), *small = get(pool, KIB(600), s);
        OK(galloc_record_stream(large, cudaStreamLegacy));
        OK(cudaDeviceReset());
        s = stream_new();
        OK(galloc_pool_trim(pool, 0, NULL));
        OK(galloc_resize(large, MIB(3), s));
        OK(galloc_resize(small, 1, s));
        EXPECT_EQ(galloc_pool_check(pool), 0);
        EXPECT_EQ(stats_of(pool).live.current, MIB(3) + 1);
        EXPECT_EQ(info_of(large).requested, MIB(3));
        if (i % 2) OK(galloc_free(large, s));
        void *p = get(pool, MIB(5), s);
        put(s, p, MIB(5), 1);
        EXPECT_EQ(galloc_pool_check(pool), 0);
        OK(galloc_free(p, s));
        if (i % 2 == 0) (void)galloc_free(large, s);
        (void)galloc_free(small, s);
        EXPECT_EQ(stats_of(pool).live.current, 0);
        expect_healthy(pool, 0);
        OK(galloc_pool_trim(pool, 0, NULL));
        EXPECT_EQ(stats_of(pool).reserved.current, 0);
        pool_end(pool);
        finish();
    }
}

TEST(a_pool_that_outlives_the_driver_leaves_no_addresses)
{
    begin();
    galloc_pool *pool = pool_new(NULL), *other = pool_new(NULL);
    void *p = get(pool, MIB(1), 0);
    sim_driver_exit();
    OK(galloc_pool_destroy(pool));
    EXPECT_EQ(info_of(p).state, GALLOC_STATE_FOREIGN);
    OK(galloc_pool_destroy(other));
    OK(galloc_shutdown());
    EXPECT_EQ(sim_malloc_live(), 0);
    sim_stop();
}

TEST(the_driver_is_gone)
{
    for (int expandable = 0; expandable < 2; expandable++) {
        begin();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = pool_expandable(expandable);
        void *p = get(pool, MIB(8), s), *q = get(pool, 1000, t), *r = get(pool, 1000, t);
        cudaStream_t both[2] = {s, t};
        sim_driver_exit();
        OK(galloc_free(p, s));
        OK(galloc_free(q, t));
        OK(galloc_free_after(r, both, 2));
        EXPECT_EQ(log_lines, 0);
        FAILS(galloc_pool_malloc(pool, &p, MIB(100), s), cudaErrorCudartUnloading);
        EXPECT(p == NULL);
        OK(galloc_pool_destroy(pool));
        OK(galloc_shutdown());
        EXPECT_EQ(sim_malloc_live(), 0);
        EXPECT_EQ(sim_findings(SIM_ANY), 0);
        sim_stop();
    }
}

/* What a call does once the driver has shut down. What gives something back succeeds and does nothing, since nothing is
   left to give back; what reads galloc's own state does so; what wants anything of the device is told why not. */
typedef struct survivor {
    galloc_pool *pool;
    galloc_graph *graph, *begun;
    void *block, *other;
    cudaStream_t stream;
    galloc_config config;
} survivor;

static const cudaError_t gone = cudaErrorCudartUnloading;
static void *got;
static galloc_pool *got_pool;
static size_t released;

static int drop(void *user, const void *data, size_t bytes)
{
    (void)user;
    (void)data;
    return bytes == 0;
}

/* Name, result, call. */
#define AFTER_THE_DRIVER(X)                                                                                            \
    X(galloc_malloc, gone, galloc_malloc(&got, 512, v->stream))                                                        \
    X(galloc_malloc_growable, gone, galloc_malloc_growable(&got, 512, MIB(4), v->stream))                              \
    X(galloc_alloc, gone, galloc_alloc(&got, &(galloc_request){.bytes = 512, .stream = v->stream}))                    \
    X(galloc_pool_malloc, gone, galloc_pool_malloc(v->pool, &got, MIB(100), v->stream))                                \
    X(galloc_override_malloc, gone, galloc_override_malloc(&got, 512))                                                 \
    X(galloc_resize, gone, galloc_resize(v->block, MIB(4), v->stream))                                                 \
    X(galloc_resize, gone, galloc_resize(v->block, 512, v->stream))                                                    \
    X(galloc_graph_begin, gone, galloc_graph_begin(&(galloc_graph *){NULL}, v->pool, v->stream))                       \
    X(galloc_pool_create, gone, galloc_pool_create(&got_pool, NULL))                                                   \
    X(galloc_pool_default, gone, galloc_pool_default(&got_pool, 1))                                                    \
    X(galloc_pool_default, gone, galloc_pool_default(&got_pool, -1))                                                   \
    X(galloc_pool_reserve, v->config.backend ? cudaErrorNotSupported : gone, galloc_pool_reserve(v->pool, 512))        \
    X(galloc_pool_set_callbacks, gone, galloc_pool_set_callbacks(v->pool, NULL))                                       \
    X(galloc_free, cudaSuccess, galloc_free(v->block, v->stream))                                                      \
    X(galloc_override_free, cudaSuccess, galloc_override_free(v->other, v->stream, GALLOC_OVERRIDE_DEVICE))            \
    X(galloc_override_free, cudaSuccess, galloc_override_free(v->other, v->stream, GALLOC_OVERRIDE_STREAM))            \
    X(galloc_override_free, cudaSuccess, galloc_override_free(v->other, v->stream, GALLOC_OVERRIDE_ORDERED))           \
    X(galloc_free, cudaSuccess, galloc_free(NULL, v->stream))                                                          \
    X(galloc_free_after, cudaSuccess, galloc_free_after(v->other, &v->stream, 1))                                      \
    X(galloc_record_stream, cudaSuccess, galloc_record_stream(v->block, v->stream))                                    \
    X(galloc_stream_retire, cudaSuccess, galloc_stream_retire(v->stream))                                              \
    X(galloc_graph_end, cudaSuccess, v->begun ? galloc_graph_end(v->begun) : cudaSuccess)                              \
    X(galloc_graph_release, cudaSuccess, v->graph ? galloc_graph_release(v->graph, v->stream) : cudaSuccess)           \
    X(galloc_pool_trim, cudaSuccess, galloc_pool_trim(v->pool, 0, &released))                                          \
    X(galloc_pool_sync_point, cudaSuccess, galloc_pool_sync_point(v->pool, &released))                                 \
    X(galloc_pool_set_limit, cudaSuccess, galloc_pool_set_limit(v->pool, SIZE_MAX))                                    \
    X(galloc_pool_config, cudaSuccess, galloc_pool_config(v->pool, &(galloc_config){.device = 0}))                     \
    X(galloc_pool_decisions, cudaSuccess, galloc_pool_decisions(v->pool, NULL, 0, NULL))                               \
    X(galloc_pool_freeze, cudaSuccess, galloc_pool_freeze(v->pool))                                                    \
    X(galloc_pool_stats, cudaSuccess, galloc_pool_stats(v->pool, &(galloc_stats){.mallocs = 0}))                       \
    X(galloc_pool_stats_reset, cudaSuccess, galloc_pool_stats_reset(v->pool))                                          \
    X(galloc_pool_streams, cudaSuccess, galloc_pool_streams(v->pool, NULL, 0, NULL))                                   \
    X(galloc_snapshot, cudaSuccess, galloc_snapshot(v->pool, GALLOC_SNAPSHOT_JSON, drop, NULL))                        \
    X(galloc_snapshot_save, cudaErrorOperatingSystem, galloc_snapshot_save(NULL, "/dev/null/none"))                    \
    X(galloc_live_text, cudaSuccess, galloc_live_text(v->pool, (char[9999]){0}, 9999))                                 \
    X(galloc_pool_history, cudaSuccess, galloc_pool_history(v->pool, 10))                                              \
    X(galloc_pool_history_stacks, cudaSuccess, galloc_pool_history_stacks(v->pool, 8))                                 \
    X(galloc_annotate, cudaSuccess, galloc_annotate("the end"))                                                        \
    X(galloc_tag_name, cudaSuccess, galloc_tag_name(1, NULL))                                                          \
    X(galloc_pool_check, cudaSuccess, (cudaError_t)galloc_pool_check(v->pool))                                         \
    X(galloc_pointer_info, cudaSuccess, galloc_pointer_info(v->block, &(galloc_pointer){.device = 0}))                 \
    X(galloc_config_parse, cudaSuccess, galloc_config_parse(&(galloc_config){.device = 0}, "", NULL, 0))               \
    X(galloc_config_print, cudaSuccess, galloc_config_print(&v->config, (char[GALLOC_CONFIG_TEXT]){0}, 2048))          \
    X(galloc_pool_torch_stats, v->config.like ? cudaSuccess : cudaErrorNotSupported,                                   \
      galloc_pool_torch_stats(v->pool, &(galloc_torch_stats){.num_ooms = 0}))                                          \
    X(galloc_oom_report, cudaErrorNotReady, galloc_oom_report(&(galloc_report){.asked = 0}))                           \
    X(galloc_report_text, cudaSuccess, galloc_report_text(&(galloc_report){.asked = 0}, (char[9999]){0}, 9999))        \
    X(galloc_pool_destroy, cudaSuccess, galloc_pool_destroy(v->pool))                                                  \
    X(galloc_shutdown, cudaSuccess, galloc_shutdown())

static void expect_after_the_driver(const char *name, cudaError_t expected, cudaError_t error)
{
    if (!EXPECT_EQ(error, expected)) printf("    %s: %s\n", name, galloc_last_message());
    EXPECT(!got && !got_pool && !released);
    EXPECT_EQ(log_lines, error != cudaSuccess);
    if (error == gone) EXPECT(strstr(galloc_last_message(), "the CUDA driver is shutting down") != NULL);
    log_lines = 0;
}

static void survive_the_driver(const char *settings)
{
    char said[200];
    begin_with_devices(2, SIM_PACE_RANDOM);
    galloc_config config = galloc_config_default();
    OK(galloc_config_parse(&config, settings, said, sizeof said));
    cudaStream_t s = stream_new();
    survivor held = {pool_new(&config), NULL, NULL, NULL, NULL, s, config}, *v = &held;
    if (config.backend != GALLOC_BACKEND_CUDA_MALLOC_ASYNC) {
        OK(galloc_graph_begin(&v->graph, v->pool, s));
        OK(galloc_graph_end(v->graph));
        OK(galloc_graph_begin(&v->begun, v->pool, s));
    }
    v->block = get(v->pool, MIB(2), s);
    v->other = get(v->pool, MIB(2), s);
    OK(galloc_free(get(v->pool, MIB(8), s), s));
    OK(galloc_malloc(&got, 512, s));
    OK(galloc_free(got, s));
    got = NULL;
    sim_driver_exit();
#define AFTER(name, expected, call) expect_after_the_driver(#name, expected, call);
    AFTER_THE_DRIVER(AFTER)
    EXPECT_EQ(sim_malloc_live(), 0);
    EXPECT_EQ(sim_findings(SIM_ANY), 0);
    sim_stop();
}

/* Also after galloc_shutdown, which finds the driver gone. */
TEST(frees_after_the_driver_and_galloc_succeed)
{
    begin();
    cudaStream_t s = stream_new();
    void *p[6];
    for (int i = 0; i < 6; i++) OK(i < 3 ? galloc_malloc(&p[i], 512, s) : galloc_override_malloc(&p[i], 512));
    sim_driver_exit();
    OK(galloc_shutdown());
    OK(galloc_free(p[0], s));
    OK(galloc_free_after(p[1], &s, 1));
    OK(galloc_override_free(p[2], s, GALLOC_OVERRIDE_ORDERED));
    OK(galloc_override_free(p[3], s, GALLOC_OVERRIDE_DEVICE));
    OK(galloc_override_free(p[4], s, GALLOC_OVERRIDE_STREAM));
    OK(galloc_override_free(p[5], s, GALLOC_OVERRIDE_ORDERED));
    OK(galloc_stream_retire(s));
    EXPECT_EQ(log_lines, 0);
    EXPECT_EQ(sim_malloc_live(), 0);
    sim_stop();
}

/* In a child made by fork all of them fail, but those that need neither driver nor pool. */
static int needs_no_driver(const char *name)
{
    static const char *const names[] = {"galloc_config_parse", "galloc_config_print", "galloc_oom_report",
                                        "galloc_report_text"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!strcmp(names[i], name)) return 1;
    return 0;
}

static void expect_in_a_child(const char *name, cudaError_t expected, cudaError_t error)
{
    if (!strcmp(name, "galloc_pool_check")) expected = (cudaError_t)-1;
    else if (!needs_no_driver(name) && expected != cudaErrorOperatingSystem) /* a file that cannot be opened */
        expected = cudaErrorInitializationError;
    if (!EXPECT_EQ(error, expected)) printf("    %s: %s\n", name, galloc_last_message());
}

TEST(every_call_of_a_forked_child_is_refused_or_needs_no_driver)
{
    begin();
    cudaStream_t s = stream_new();
    survivor held = {pool_new(NULL), NULL, NULL, NULL, NULL, s, galloc_config_default()}, *v = &held;
    OK(galloc_graph_begin(&v->graph, v->pool, s));
    OK(galloc_graph_end(v->graph));
    OK(galloc_graph_begin(&v->begun, v->pool, s));
    v->block = get(v->pool, MIB(2), s);
    v->other = get(v->pool, MIB(2), s);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        long calls = sim_calls(NULL);
        test_failures = 0;
#define CHILD(name, expected, call) expect_in_a_child(#name, expected, call);
        AFTER_THE_DRIVER(CHILD)
        EXPECT_EQ(sim_calls(NULL), calls);
        fflush(stdout);
        _exit(test_failures ? 1 : 0);
    }
    int status = -1;
    EXPECT(child > 0 && waitpid(child, &status, 0) == child);
    EXPECT_EQ(status, 0);
    OK(galloc_graph_end(v->begun));
    OK(galloc_graph_release(v->begun, s));
    OK(galloc_graph_release(v->graph, s));
    OK(galloc_free(v->block, s));
    OK(galloc_free(v->other, s));
    pool_end(v->pool);
    finish();
}

/* The table has every function that returns an error. */
static int is_in_the_table(const char *name)
{
#define NAME(name, expected, call) #name,
    static const char *const names[] = {AFTER_THE_DRIVER(NAME)};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!strcmp(names[i], name)) return 1;
    return 0;
}

TEST(every_call_is_in_the_table)
{
    char line[256], name[128] = "galloc_";
    FILE *header = fopen("galloc.h", "r");
    int n = 0;
    if (!EXPECT(header != NULL)) return;
    while (fgets(line, sizeof line, header)) {
        if (sscanf(line, "GALLOC_API cudaError_t galloc_%100[a-z_](", name + 7) != 1) continue;
        if (!EXPECT(is_in_the_table(name))) printf("    %s\n", name);
        n++;
    }
    EXPECT(n > 30);
    fclose(header);
}

/* A static destructor may be the first to call galloc. */
TEST(the_first_call_comes_after_the_driver)
{
    begin();
    cudaStream_t s = stream_new();
    sim_driver_exit();
    OK(galloc_free(NULL, s));
    OK(galloc_stream_retire(s));
    OK(galloc_shutdown());
    EXPECT_EQ(log_lines, 0);
    FAILS(galloc_malloc(&got, 512, s), gone);
    FAILS(galloc_pool_create(&got_pool, NULL), gone);
    EXPECT_EQ(sim_malloc_live(), 0);
    sim_stop();
}

/* The driver goes while a call records an event: that call succeeds, and no stream cache serves a request after it. */
static void exit_before_the_record(const char *function)
{
    if (!strcmp(function, "cuEventRecord")) sim_driver_exit();
}

TEST(the_driver_goes_in_the_middle_of_a_free)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_config config = galloc_config_default();
    config.stream_check = 0;
    galloc_pool *pool = pool_new(&config);
    void *p[8], *q = get(pool, 512, t), *none = NULL;
    for (int i = 0; i < 8; i++) p[i] = get(pool, 4096, s);
    inside_ask_for_event(pool, stream_id(s));
    sim_hook(exit_before_the_record, NULL);
    OK(galloc_free(p[0], s));
    sim_hook(NULL, NULL);
    for (int i = 1; i < 8; i++) OK(galloc_free(p[i], s));
    OK(galloc_free(q, t));
    FAILS(galloc_pool_malloc(pool, &none, 512, t), gone);
    FAILS(galloc_pool_malloc(pool, &none, 4096, s), gone);
    EXPECT(none == NULL);
    EXPECT_EQ(galloc_pool_check(pool), 0);
    OK(galloc_pool_destroy(pool));
    OK(galloc_shutdown());
    EXPECT_EQ(sim_malloc_live(), 0);
    sim_stop();
}

/* Also where the context had an error before: the pool then names the end of the driver as the cause. */
TEST(the_driver_goes_in_the_middle_of_a_free_after_an_error)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    CUcontext context = NULL;
    void *p = get(pool, MIB(8), s), *q = get(pool, MIB(8), s), *none = NULL;
    EXPECT_EQ(cuCtxGetCurrent(&context), CUDA_SUCCESS);
    sim_context_fail(context, cudaErrorIllegalAddress);
    FAILS(galloc_pool_reserve(pool, MIB(100)), cudaErrorIllegalAddress);
    sim_context_fail(context, 0); /* what the pool knows remains */
    OK(galloc_free(p, s));
    FAILS(galloc_pool_malloc(pool, &none, MIB(100), s), cudaErrorIllegalAddress);
    inside_ask_for_event(pool, stream_id(s));
    sim_hook(exit_before_the_record, NULL);
    OK(galloc_free(q, s));
    sim_hook(NULL, NULL);
    FAILS(galloc_pool_reserve(pool, MIB(100)), cudaErrorCudartUnloading);
    FAILS(galloc_pool_malloc(pool, &none, MIB(100), s), cudaErrorCudartUnloading);
    OK(galloc_pool_destroy(pool));
    OK(galloc_shutdown());
    EXPECT_EQ(sim_malloc_live(), 0);
    sim_stop();
}

TEST(every_call_once_the_driver_is_gone)
{
    static const char *const settings[] = {"expandable_segments:True", "expandable_segments:False", "like:pytorch",
                                           "backend:cudaMalloc", "backend:cudaMallocAsync", "strategy:pooled",
                                           "strategy:heuristic", "gc_age:1ms", "stats:exact"};
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
        long before = test_failures;
        survive_the_driver(settings[i]);
        if (test_failures > before) printf("    %s\n", settings[i]);
    }
}

static void use_in_child(galloc_pool *pool, void *held, cudaStream_t s)
{
    galloc_stats stats;
    galloc_config config;
    galloc_pointer info;
    galloc_pool *other = (galloc_pool *)&stats;
    void *p = &stats;
    long calls = sim_calls(NULL);
    FAILS(galloc_malloc(&p, 1000, s), cudaErrorInitializationError);
    EXPECT(p == NULL);
    p = &stats;
    FAILS(galloc_pool_malloc(pool, &p, 1000, s), cudaErrorInitializationError);
    EXPECT(p == NULL);
    FAILS(galloc_free(held, s), cudaErrorInitializationError);
    FAILS(galloc_record_stream(held, s), cudaErrorInitializationError);
    FAILS(galloc_resize(held, 10, s), cudaErrorInitializationError);
    FAILS(galloc_pool_trim(pool, 0, NULL), cudaErrorInitializationError);
    FAILS(galloc_pool_reserve(pool, 1000), cudaErrorInitializationError);
    FAILS(galloc_pool_create(&other, NULL), cudaErrorInitializationError);
    EXPECT(other == NULL);
    FAILS(galloc_pool_destroy(pool), cudaErrorInitializationError);
    FAILS(galloc_shutdown(), cudaErrorInitializationError);
    FAILS(galloc_pool_stats(pool, &stats), cudaErrorInitializationError);
    FAILS(galloc_pool_stats_reset(pool), cudaErrorInitializationError);
    FAILS(galloc_pool_streams(pool, NULL, 0, NULL), cudaErrorInitializationError);
    FAILS(galloc_snapshot(pool, GALLOC_SNAPSHOT_JSON, drop, NULL), cudaErrorInitializationError);
    FAILS(galloc_snapshot(NULL, GALLOC_SNAPSHOT_JSON, drop, NULL), cudaErrorInitializationError);
    FAILS(galloc_pool_config(pool, &config), cudaErrorInitializationError);
    FAILS(galloc_pointer_info(held, &info), cudaErrorInitializationError);
    FAILS(galloc_stream_retire(s), cudaErrorInitializationError);
    EXPECT_EQ(galloc_pool_check(pool), -1);
    EXPECT(!strncmp(galloc_last_message(), "galloc_pool_check: ", 19));
    EXPECT_EQ(galloc_config_parse(&config, "growth:x", NULL, 0), cudaErrorInvalidValue);
    EXPECT(!strncmp(galloc_last_message(), "galloc_config_parse: ", 21)); /* each call has its own message */
    EXPECT_EQ(sim_calls(NULL), calls);
}

TEST(a_forked_child_is_refused)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *p = get(pool, MIB(8), s);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        test_failures = 0;
        use_in_child(pool, p, s);
        _exit(test_failures ? 1 : 0);
    }
    int status = -1;
    EXPECT(child > 0 && waitpid(child, &status, 0) == child);
    EXPECT_EQ(status, 0);
    OK(galloc_free(p, s)); /* the parent goes on */
    pool_end(pool);
    finish();
}

/* A program may fork after these, since CUDA has not been called. */
TEST(names_and_annotations_make_no_call_of_cuda)
{
    begin();
    long calls = sim_calls(NULL);
    galloc_config config = galloc_config_default();
    char text[GALLOC_CONFIG_TEXT];
    OK(galloc_tag_name(7, "weights"));
    OK(galloc_annotate("begin"));
    FAILS(galloc_annotate(NULL), cudaErrorInvalidValue);
    OK(galloc_config_parse(&config, "growth:64M", NULL, 0));
    OK(galloc_config_print(&config, text, sizeof text));
    galloc_set_log(NULL, NULL);
    EXPECT_EQ(sim_calls(NULL), calls);
    OK(galloc_tag_name(7, NULL));
    finish();
}

/* ---- errors that stay -------------------------------------------------------------------------------------------- */

/* A trim whose wait for the streams' work fails has given nothing back, and says so: a wait for all devices, since the
   last free may have been another stream's that has this one's handle; and one for a context. */
TEST(a_trim_that_cannot_wait_fails)
{
    for (int checked = 0; checked < 2; checked++) {
        begin_still();
        cudaStream_t s = stream_new();
        galloc_config config = galloc_config_default();
        config.stream_check = checked;
        galloc_pool *pool = pool_new(&config);
        size_t given = 1;
        OK(galloc_free(get_used(pool, MIB(4), s, 1), s));
        sim_fail("cuMemHostAlloc", 1, 0, cudaErrorUnknown);
        EXPECT_EQ(galloc_pool_trim(pool, 0, &given), cudaErrorUnknown);
        sim_fail_clear();
        EXPECT_EQ(given, 0);
        EXPECT_EQ(stats_of(pool).reserved.current, MIB(4));
        OK(galloc_pool_trim(pool, 0, &given));
        EXPECT_EQ(given, MIB(4));
        pool_end(pool);
        finish();
    }
}

/* So does a request that waits for the device when nothing else is left: with the driver's error, and the memory is
   still there. */
TEST(a_request_that_cannot_wait_for_the_device_has_the_drivers_error)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_limited(MIB(8));
    void *p = NULL;
    OK(galloc_free(get_used(pool, MIB(8), s, 1), s));
    sim_fail("cuMemHostAlloc", 1, 0, cudaErrorUnknown);
    FAILS(galloc_pool_malloc(pool, &p, MIB(8), t), cudaErrorUnknown);
    sim_fail_clear();
    EXPECT(strstr(galloc_last_message(), "cuMemFreeHost"));
    EXPECT(!p);
    OK(galloc_free(get_used(pool, MIB(8), t, 2), t));
    pool_end(pool);
    finish();
}

/* The wait for the launches of graphs fails, and the one after it does not. */
TEST(a_trim_that_cannot_wait_for_graphs_fails)
{
    begin_still();
    cudaStream_t s = stream_new(), of_graph = stream_new();
    cudaGraph_t graph = NULL;
    galloc_pool *pool = pool_new(NULL);
    OK(cudaStreamBeginCapture(of_graph, cudaStreamCaptureModeThreadLocal));
    OK(galloc_free(get_used(pool, MIB(4), of_graph, 1), of_graph));
    OK(cudaStreamEndCapture(of_graph, &graph));
    for (int i = 0; i < 3; i++) OK(galloc_free(get_used(pool, 4096, s, 2), s)); /* in the cache, not looked at */
    sim_fail("cuMemHostAlloc", 1, 0, cudaErrorUnknown);
    FAILS(galloc_pool_trim(pool, 0, NULL), cudaErrorUnknown);
    EXPECT_EQ(sim_failed(), 1);
    OK(galloc_pool_trim(pool, 0, NULL));
    OK(cudaGraphDestroy(graph));
    pool_end(pool);
    finish();
}

TEST(a_sticky_error_closes_the_pool)
{
    static const int codes[] = {cudaErrorECCUncorrectable,   cudaErrorNvlinkUncorrectable, cudaErrorIllegalAddress,
                                cudaErrorLaunchTimeout,      cudaErrorAssert,              cudaErrorHardwareStackError,
                                cudaErrorIllegalInstruction, cudaErrorMisalignedAddress,   cudaErrorInvalidAddressSpace,
                                cudaErrorInvalidPc,          cudaErrorLaunchFailure,       cudaErrorExternalDevice,
                                226, 721}; /* these are not in the headers of each CUDA: contained, tensor memory */
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++) {
        begin();
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_new(NULL);
        void *p = get(pool, MIB(8), s), *q = &pool, *r = get(pool, 512, s);
        OK(galloc_resize(p, MIB(4), s));
        sim_fail("cuMemCreate", 1, 0, codes[i]);
        FAILS(galloc_pool_malloc(pool, &q, MIB(800), s), codes[i]);
        EXPECT(q == NULL);
        sim_fail_clear();
        for (int k = 0; k < 3; k++) {
            long calls = memory_calls();
            q = &pool;
            FAILS(galloc_pool_malloc(pool, &q, 512, s), codes[i]);
            EXPECT(q == NULL);
            FAILS(galloc_resize(p, MIB(8), s), codes[i]);
            FAILS(galloc_pool_reserve(pool, 512), codes[i]); /* which is there */
            EXPECT_EQ(memory_calls(), calls);
        }
        EXPECT_EQ(galloc_pool_check(pool), 0);
        OK(cudaDeviceReset()); /* the only cure; pages survive it */
        (void)cudaGetLastError();
        s = stream_new();
        q = get(pool, MIB(800), s);
        put(s, q, MIB(800), 1);
        OK(galloc_free(q, s));
        OK(galloc_free(p, s));
        OK(galloc_free(r, s));
        expect_healthy(pool, 1);
        pool_end(pool);
        finish();
    }
}

/* The pool has memory for the next request, which asks nothing of the driver. */
TEST(a_sticky_error_of_a_call_that_gives_memory_back_closes_the_pool)
{
    for (int expandable = 0; expandable < 2; expandable++) {
        begin();
        cudaStream_t s = stream_new();
        galloc_config config = galloc_config_default();
        config.stream_check = 0;
        config.expandable_segments = expandable;
        galloc_pool *pool = pool_new(&config);
        void *p = get(pool, 512, s), *q = &pool;
        OK(galloc_free(get(pool, MIB(30), s), s));
        sim_fail(expandable ? "cuMemUnmap" : "cuMemFree", 1, 0, cudaErrorIllegalAddress);
        OK(galloc_pool_trim(pool, 0, NULL));
        EXPECT_EQ(sim_failed(), 1);
        FAILS(galloc_pool_malloc(pool, &q, 512, s), cudaErrorIllegalAddress);
        EXPECT(q == NULL);
        OK(cudaDeviceReset());
        (void)cudaGetLastError();
        OK(galloc_free(p, NULL));
        pool_end(pool);
        finish();
    }
}

/* T shrank the block, and S is to wait for T before it grows again: that the wait failed is known to a stream whose
   cache serves it, too. */
TEST(a_sticky_error_of_the_wait_for_a_growth_closes_the_pool)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new(), u = stream_new();
    galloc_config config = galloc_config_default();
    config.stream_check = 0;
    galloc_pool *pool = pool_new(&config);
    for (int i = 0; i < 5; i++) OK(galloc_free(get(pool, 4096, u), u));
    void *p = get_growable(pool, MIB(6), MIB(16), s), *q = get(pool, KIB(100), t), *r;
    OK(galloc_free(get(pool, MIB(8), s), s));
    put(t, p, MIB(6), 1);
    OK(galloc_resize(p, MIB(2), t));
    r = get(pool, KIB(100), t); /* an event of T is recorded */
    sim_fail("cuStreamWaitEvent", 1, 0, cudaErrorIllegalAddress);
    FAILS(galloc_resize(p, MIB(6), s), cudaErrorIllegalAddress);
    EXPECT_EQ(sim_failed(), 1);
    void *refused = NULL;
    FAILS(galloc_pool_malloc(pool, &refused, 4096, u), cudaErrorIllegalAddress);
    EXPECT(strstr(galloc_last_message(), "refuses requests after") != NULL);
    OK(cudaDeviceReset());
    (void)cudaGetLastError();
    OK(galloc_free(p, NULL));
    OK(galloc_free(q, NULL));
    OK(galloc_free(r, NULL));
    pool_end(pool);
    finish();
}

/* The same where a request is to have what T freed. */
TEST(a_sticky_error_of_the_wait_for_a_request_closes_the_pool)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new(), u = stream_new();
    galloc_config config = config_limit(MIB(8));
    config.stream_check = 0;
    galloc_pool *pool = pool_new(&config);
    for (int i = 0; i < 5; i++) OK(galloc_free(get(pool, 4096, u), u));
    void *q = get(pool, KIB(100), t), *p = get_used(pool, MIB(6), t, 1), *refused = NULL;
    OK(galloc_free(p, t));
    OK(galloc_free(q, t)); /* an event of T is recorded */
    sim_fail("cuStreamWaitEvent", 1, 0, cudaErrorIllegalAddress);
    FAILS(galloc_pool_malloc(pool, &p, MIB(6), s), cudaErrorIllegalAddress);
    EXPECT_EQ(sim_failed(), 1);
    FAILS(galloc_pool_malloc(pool, &refused, 4096, u), cudaErrorIllegalAddress);
    EXPECT(strstr(galloc_last_message(), "refuses requests after") != NULL);
    OK(cudaDeviceReset());
    (void)cudaGetLastError();
    pool_end(pool);
    finish();
}

/* The end of the driver is known also to a pool whose context had an error before. */
TEST(the_driver_goes_after_an_error)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_new(NULL);
    CUcontext context = NULL;
    void *p = get(pool, MIB(8), s), *q = get(pool, MIB(8), s), *none = NULL;
    OK(galloc_free(get(pool, 512, t), t));
    inside_ask_for_event(pool, stream_id(s));
    EXPECT_EQ(cuCtxGetCurrent(&context), CUDA_SUCCESS);
    sim_context_fail(context, cudaErrorIllegalAddress);
    FAILS(galloc_pool_reserve(pool, MIB(100)), cudaErrorIllegalAddress);
    FAILS(galloc_pool_malloc(pool, &none, MIB(100), s), cudaErrorIllegalAddress);
    sim_driver_exit();
    log_lines = 0;
    OK(galloc_free(p, s));
    OK(galloc_free(q, s));
    FAILS(galloc_pool_malloc(pool, &none, MIB(100), s), cudaErrorCudartUnloading);
    FAILS(galloc_pool_reserve(pool, MIB(100)), cudaErrorCudartUnloading);
    OK(galloc_pool_destroy(pool));
    OK(galloc_shutdown());
    EXPECT_EQ(sim_malloc_live(), 0);
    sim_stop();
}

static CUcontext refusing; /* returns `refused_with` from the next cuMemCreate on */
static int refused_with;

static void break_at_create(const char *function)
{
    if (!strcmp(function, "cuMemCreate")) sim_context_fail(refusing, refused_with);
}

static const int sticky[] = {214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911};

static int is_sticky(int code)
{
    for (size_t i = 0; i < sizeof sticky / sizeof *sticky; i++)
        if (sticky[i] == code) return 1;
    return 0;
}

/* Of all errors of a context these close its pool for good. After any other the pool goes on. */
TEST(each_sticky_error_closes_the_pool_and_no_other_does)
{
    static const int others[] = {1, 100, 205, 213, 215, 221, 304, 701, 703, 704, 708, 711, 712, 713, 720, 801, 999};
    const size_t n = sizeof sticky / sizeof *sticky, all = n + sizeof others / sizeof *others;
    for (size_t i = 0; i < all; i++) {
        int code = i < n ? sticky[i] : others[i - n];
        begin();
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_new(NULL);
        void *p = get(pool, MIB(8), s), *q = NULL;
        OK((cudaError_t)cuCtxGetCurrent(&refusing));
        refused_with = code;
        sim_hook(break_at_create, NULL);
        FAILS(galloc_pool_malloc(pool, &q, MIB(800), s), code);
        sim_hook(NULL, NULL);
        sim_context_fail(refusing, 0); /* what the pool knows remains */
        if (is_sticky(code)) FAILS(galloc_pool_malloc(pool, &q, 512, s), code);
        else OK(galloc_free(get(pool, 512, s), s));
        if (is_sticky(code)) OK(cudaDeviceReset());
        if (is_sticky(code)) s = stream_new();
        OK(galloc_free(get(pool, 512, s), s));
        OK(galloc_free(p, s));
        (void)cudaGetLastError();
        pool_end(pool);
        finish();
    }
}

/* Memory that the driver has given goes back at once when galloc cannot keep it. */
TEST(memory_without_host_memory_for_it_goes_back)
{
    int returned = 0;
    for (int nth = 1, failed = 1; failed; nth++) {
        begin();
        cudaStream_t s = stream_new();
        galloc_config config = config_fixed();
        galloc_pool *pool = pool_new(&config);
        void *p = NULL;
        sim_fail_malloc(nth, 1);
        cudaError_t error = galloc_pool_malloc(pool, &p, MIB(40), s);
        failed = sim_failed_mallocs() > 0;
        sim_fail_malloc(0, 0);
        EXPECT_EQ(sim_physical(0), stats_of(pool).reserved.current);
        EXPECT_EQ(stats_of(pool).quarantined, 0);
        returned += sim_calls("cuMemFree") > 0;
        if (!error) OK(galloc_free(p, s));
        (void)cudaGetLastError();
        pool_end(pool);
        finish();
    }
    EXPECT(returned > 0);
}

/* The driver's function that refused is named, whatever settings decide which one that is. */
TEST(a_refusal_names_the_drivers_function)
{
    static const struct {
        const char *settings, *function;
        int legacy;
    } cases[] = {{"", "cuMemAddressReserve", 0},
                 {"", "cuMemCreate", 0},
                 {"", "cuMemMap", 0},
                 {"", "cuMemSetAccess", 0},
                 {"expandable_segments:False", "cuMemAlloc", 0},
                 {"strategy:pooled", "cuMemCreate", 0},
                 {"expandable_segments:False,strategy:pooled", "cuMemAlloc", 0},
                 {"like:pytorch,expandable_segments:False", "cuMemAlloc", 0},
                 {"backend:cudaMalloc", "cuMemAlloc", 0},
                 {"backend:cudaMallocAsync", "cuMemAllocFromPoolAsync", 0},
                 {"backend:cudaMallocAsync", "cuMemAllocFromPoolAsync", 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char expected[80];
        void *p = NULL;
        begin();
        cudaStream_t s = cases[i].legacy ? cudaStreamLegacy : stream_new();
        galloc_config config = galloc_config_default();
        OK(galloc_config_parse(&config, cases[i].settings, NULL, 0));
        galloc_pool *pool = pool_new(&config);
        snprintf(expected, sizeof expected, "galloc_pool_malloc: %s: ", cases[i].function);
        sim_fail(cases[i].function, 1, 1, cudaErrorUnknown);
        FAILS(galloc_pool_malloc(pool, &p, MIB(8), s), cudaErrorUnknown);
        if (!EXPECT(!strncmp(galloc_last_message(), expected, strlen(expected))))
            printf("    %s: %s\n", cases[i].settings, galloc_last_message());
        sim_fail_clear();
        OK(galloc_free(get(pool, MIB(8), s), s));
        pool_end(pool);
        finish();
    }
}

/* A block with room needs addresses of its own. Where none are left, it is out of memory; any other error of the
   driver is the result. */
TEST(a_room_without_addresses_has_the_drivers_error)
{
    static const struct {
        int error;
        cudaError_t expected;
    } cases[] = {{0, cudaErrorMemoryAllocation}, {cudaErrorUnknown, cudaErrorUnknown}};
    for (int i = 0; i < 2; i++) {
        begin();
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_new(NULL);
        galloc_request request = request_of(pool, MIB(2), s);
        void *p = NULL, *first = get(pool, MIB(2), s);
        request.max_bytes = GIB(200);
        galloc_stats before = stats_of(pool);
        sim_fail("cuMemAddressReserve", 1, 1, cases[i].error);
        FAILS(galloc_alloc(&p, &request), cases[i].expected);
        const char *text = i ? "cuMemAddressReserve: " : "no address range of 214748364800 bytes is left";
        if (!EXPECT(strstr(galloc_last_message(), text) != NULL)) printf("    %s\n", galloc_last_message());
        sim_fail_clear();
        galloc_stats after = stats_of(pool);
        expect_same(&before, &after);
        EXPECT_EQ(galloc_pool_check(pool), 0);
        OK(galloc_alloc(&p, &request));
        OK(galloc_free(p, s));
        OK(galloc_free(first, s));
        pool_end(pool);
        finish();
    }
}

/* A call may return such an error though the pool's context has none. */
TEST(an_error_of_no_context_closes_nothing)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *p = &pool;
    sim_fail("cuMemCreate", 1, 0, cudaErrorContextIsDestroyed);
    FAILS(galloc_pool_malloc(pool, &p, MIB(8), s), cudaErrorContextIsDestroyed);
    EXPECT(p == NULL);
    sim_fail_clear();
    p = get(pool, MIB(8), s);
    OK(galloc_free(p, s));
    pool_end(pool);
    finish();
}

/* Having no memory is not a broken context. */
TEST(running_out_is_not_sticky)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *p = NULL;
    sim_fail("cuMemCreate", 1, 1, 0);
    FAILS(galloc_pool_malloc(pool, &p, MIB(8), s), cudaErrorMemoryAllocation);
    sim_fail_clear();
    p = get(pool, MIB(8), s);
    OK(galloc_free(p, s));
    pool_end(pool);
    finish();
}

/* A block that was taken and must go back, since the wait for it cannot be queued, leaves no trace. */
TEST(a_wait_that_fails_is_undone)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_limited(MIB(10));
    void *p = get(pool, MIB(8), s), *q = &pool, *rest = get(pool, 512, t);
    sim_hold(s, 1);
    sim_access access = {p, MIB(8), SIM_WRITE, 1};
    OK(sim_launch(s, &access, 1));
    OK(galloc_free(p, s));
    galloc_stats before = stats_of(pool);
    sim_fail("cuStreamWaitEvent", 1, 0, cudaErrorUnknown);
    FAILS(galloc_pool_malloc(pool, &q, MIB(8), t), cudaErrorUnknown);
    EXPECT(q == NULL);
    galloc_stats after = stats_of(pool);
    expect_same(&before, &after);
    EXPECT_EQ(after.failures, before.failures + 1);
    EXPECT_EQ(after.waits, before.waits);
    q = get(pool, MIB(8), t);
    EXPECT(q == p);
    EXPECT_EQ(stats_of(pool).waits, before.waits + 1);
    put(t, q, MIB(8), 2);
    sim_hold(s, 0);
    OK(galloc_free(q, t));
    OK(galloc_free(rest, t));
    pool_end(pool);
    finish();
}

TEST(a_wait_that_fails_gives_the_room_back)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_limited(MIB(10));
    void *p = get(pool, MIB(8), s), *q = &pool, *rest = get(pool, 512, t);
    put(s, p, MIB(8), 1);
    OK(galloc_free(p, s));
    galloc_request request = request_of(pool, MIB(4), t);
    request.max_bytes = MIB(64);
    sim_fail("cuStreamWaitEvent", 1, 0, cudaErrorUnknown);
    FAILS(galloc_alloc(&q, &request), cudaErrorUnknown);
    EXPECT(q == NULL);
    expect_healthy(pool, 1);
    OK(galloc_alloc(&q, &request));
    put(t, q, MIB(4), 2);
    OK(galloc_resize(q, MIB(8), t));
    OK(galloc_free(q, t));
    OK(galloc_free(rest, t));
    pool_end(pool);
    finish();
}

/* Two free neighbours of two streams, of which the first waits for the second already, are to give up their pages to a
   move that fails. Afterwards every address inside a block leads to that block. */
TEST(a_move_that_fails_leaves_no_address_behind)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_limited(MIB(10));
    void *a = get(pool, MIB(2), s), *b = get(pool, MIB(2), t), *wall = get(pool, MIB(2), s), *c = get(pool, MIB(4), t);
    put(s, a, MIB(2), 1);
    put(t, b, MIB(2), 2);
    put(t, c, MIB(4), 3);
    OK(galloc_free(b, t));
    OK(galloc_free(c, t));
    c = get(pool, MIB(4), s);
    EXPECT_EQ(stats_of(pool).waits, 1);
    OK(galloc_free(a, s));
    sim_fail("cuMemMap", 1, 0, cudaErrorUnknown);
    void *p = &pool;
    FAILS(galloc_pool_malloc(pool, &p, MIB(4), s), cudaErrorUnknown);
    EXPECT(p == NULL);
    sim_fail_clear();
    expect_healthy(pool, 1);
    p = get(pool, MIB(4), s);
    for (size_t at = 0; at < MIB(4); at += KIB(512)) EXPECT(info_of((char *)p + at).base == p);
    EXPECT_EQ(galloc_free((char *)p + MIB(2), s), cudaErrorInvalidDevicePointer);
    put(s, p, MIB(4), 4);
    OK(galloc_free(p, s));
    OK(galloc_free(c, s));
    OK(galloc_free(wall, s));
    pool_end(pool);
    finish();
}

static void fail_once_more(void)
{
    log_hook = NULL;
    EXPECT_EQ(galloc_pool_trim(NULL, 0, NULL), cudaErrorInvalidValue);
}

/* The host memory of a wait that was given back at the second try may be the program's by the next wait. */
TEST(what_was_freed_at_the_second_try_is_not_freed_again)
{
    begin_still();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    sim_fail("cuMemFreeHost", 1, 0, cudaErrorUnknown);
    for (int round = 0; round < 3; round++) {
        long made = sim_calls("cuMemHostAlloc"), freed = sim_calls("cuMemFreeHost");
        OK(galloc_free(get_used(pool, MIB(4), s, 1), s));
        EXPECT_EQ(galloc_pool_trim(pool, 0, NULL), round ? cudaSuccess : cudaErrorUnknown);
        made = sim_calls("cuMemHostAlloc") - made;
        EXPECT(made > 0);
        EXPECT_EQ(sim_calls("cuMemFreeHost") - freed, made + (round == 1)); /* at the second try */
    }
    sim_fail_clear();
    pool_end(pool);
    finish();
}

/* A page is unmapped, and then the driver keeps its memory: the addresses serve the next page. */
TEST(addresses_of_a_page_that_is_not_released_serve_again)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *wall = get(pool, MIB(2), s), *p = get(pool, MIB(4), s);
    OK(galloc_free(p, s));
    OK(cudaStreamSynchronize(s));
    sim_fail("cuMemRelease", 1, 1, 0);
    (void)galloc_pool_trim(pool, 0, NULL);
    size_t stuck = stats_of(pool).quarantined;
    EXPECT(stuck >= MIB(4));
    void *q = get(pool, MIB(4), s);
    EXPECT(q == p);
    EXPECT_EQ(stats_of(pool).quarantined, stuck);
    expect_healthy(pool, 1);
    sim_fail_clear();
    OK(galloc_free(q, s));
    OK(galloc_free(wall, s));
    pool_end(pool);
    finish();
}

/* A wait for one device that fails leaves something behind, and that proves nothing about another device. */
TEST(a_wait_that_fails_proves_nothing_of_another_device)
{
    begin_with_devices(2, SIM_PACE_STILL);
    cudaStream_t s = stream_new(), u = stream_new();
    galloc_config config = config_limit(MIB(2));
    config.device = 0;
    config.reuse = 0;
    galloc_pool *pool = pool_new(&config);
    OK(cudaSetDevice(1));
    cudaStream_t t = stream_new();
    void *p = get(pool, MIB(1), t), *q = get(pool, MIB(1), u);
    OK(galloc_free(p, t));
    sim_fail("cuMemFreeHost", 2, 0, cudaErrorUnknown); /* of the second device */
    EXPECT(galloc_pool_malloc(pool, &p, MIB(1), s) != cudaSuccess);
    EXPECT_EQ(sim_failed(), 1);
    OK(cudaSetDevice(0));
    put(u, q, MIB(1), 1);
    OK(galloc_free(q, u));
    p = get(pool, MIB(1), s);
    q = get(pool, MIB(1), s);
    put(s, p, MIB(1), 2);
    put(s, q, MIB(1), 2);
    OK(galloc_free(p, s));
    OK(galloc_free(q, s));
    pool_end(pool);
    finish();
}

/* What has been waited for is complete: a driver that does not answer when it is asked once more changes nothing. */
TEST(an_event_that_was_waited_for_is_complete)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_config config = config_limit(MIB(6));
    config.reuse = 0;
    galloc_pool *pool = pool_new(&config);
    void *p = get(pool, MIB(4), s), *q = get(pool, 512, t);
    put(s, p, MIB(4), 1);
    OK(galloc_free(p, s));
    sim_fail("cuEventQuery", 1, 1, cudaErrorUnknown);
    p = get(pool, MIB(4), t);
    sim_fail_clear();
    put(t, p, MIB(4), 2);
    OK(galloc_free(p, t));
    OK(galloc_free(q, t));
    pool_end(pool);
    finish();
}

/* A segment that the driver would not take back, and that a reset then made void, leaves no trace. */
TEST(a_refused_segment_goes_with_the_reset)
{
    for (int trim = 0; trim < 2; trim++) { /* who notices */
        begin();
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_expandable(0);
        OK(galloc_free(get(pool, MIB(30), s), s));
        sim_fail("cuMemFree", 1, 0, cudaErrorUnknown);
        OK(galloc_pool_trim(pool, 0, NULL));
        EXPECT_EQ(stats_of(pool).quarantined, MIB(30));
        galloc_report report;
        void *none = NULL;
        EXPECT_EQ(galloc_pool_malloc(pool, &none, (size_t)1 << 50, s), cudaErrorMemoryAllocation);
        OK(galloc_oom_report(&report));
        EXPECT_EQ(report.quarantined, MIB(30));
        EXPECT_EQ(report.usable + report.busy, 0);
        OK(cudaDeviceReset());
        s = stream_new();
        if (trim) OK(galloc_pool_trim(pool, 0, NULL));
        if (trim) EXPECT_EQ(stats_of(pool).reserved.current, 0);
        OK(galloc_free(get(pool, MIB(30), s), s));
        expect_healthy(pool, 1);
        pool_end(pool);
        finish();
    }
}

/* The driver has given a segment for which the host has no memory, and does not take it back. It goes with a reset, or
   once the driver is gone with the pool. */
TEST(a_segment_that_could_not_be_described_goes_with_the_context)
{
    for (int exits = 0; exits < 2; exits++) {
        cudaError_t error = cudaErrorMemoryAllocation;
        size_t bytes = GIB(25 + 5 * exits); /* addresses of which nothing is known yet */
        for (int nth = 1; error && EXPECT(nth < 100); nth++) {
            begin();
            cudaStream_t s = stream_new();
            galloc_pool *pool = pool_expandable(0);
            void *p = NULL;
            sim_fail_malloc(nth, 1);
            sim_fail("cuMemFree", 1, 1, cudaErrorUnknown);
            error = galloc_pool_malloc(pool, &p, bytes, s);
            sim_fail_malloc(0, 0);
            sim_fail_clear();
            EXPECT_EQ(p == NULL, error != cudaSuccess);
            OK(galloc_free(p, s));
            EXPECT_EQ(galloc_pool_check(pool), 0);
            if (exits) {
                sim_driver_exit();
                OK(galloc_pool_destroy(pool));
                OK(galloc_shutdown());
                EXPECT_EQ(sim_malloc_live(), 0);
                sim_stop();
                continue;
            }
            OK(cudaDeviceReset());
            s = stream_new();
            OK(galloc_free(get(pool, MIB(30), s), s));
            OK(galloc_pool_trim(pool, 0, NULL));
            EXPECT_EQ(stats_of(pool).reserved.current, 0);
            expect_healthy(pool, 1);
            pool_end(pool);
            finish();
        }
    }
}

/* What can never be had is refused at once. */
TEST(nobody_waits_for_more_than_there_is)
{
    for (int i = 0; i < 4; i++) { /* the limit or the device; kind of segments */
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_config config = config_limit(i % 2 ? GIB(1) : SIZE_MAX);
        config.expandable_segments = i / 2;
        galloc_pool *pool = pool_new(&config);
        void *p = get(pool, MIB(500), s), *q = get(pool, 512, t);
        put(s, p, MIB(500), 1);
        OK(galloc_free(p, s));
        galloc_stats before = stats_of(pool), after;
        long blocking = sim_blocking_calls();
        FAILS(galloc_pool_malloc(pool, &p, i % 2 ? GIB(2) : GIB(100), t), cudaErrorMemoryAllocation);
        after = stats_of(pool);
        expect_same(&before, &after);
        EXPECT_EQ(sim_blocking_calls(), blocking);
        OK(galloc_free(q, t));
        pool_end(pool);
        finish();
    }
}

/* Giving everything back would not help: nothing is given back, and nobody waits. */
TEST(a_room_for_which_there_are_no_addresses)
{
    begin_still();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *p = get(pool, MIB(100), s);
    put(s, p, MIB(100), 1);
    OK(galloc_free(p, s));
    galloc_request request = request_of(pool, MIB(200), s);
    request.max_bytes = (size_t)1 << 54;
    galloc_stats before = stats_of(pool), after;
    long blocking = sim_blocking_calls();
    FAILS(galloc_alloc(&p, &request), cudaErrorMemoryAllocation);
    EXPECT(strstr(log_text, "no address range") != NULL);
    after = stats_of(pool);
    expect_same(&before, &after);
    EXPECT_EQ(sim_blocking_calls(), blocking);
    pool_end(pool);
    finish();
}

static int count_asked(const galloc_report *report, void *user)
{
    EXPECT(report->rejected);
    ++*(int *)user;
    return 1;
}

static void count_rejected(const galloc_report *report, void *user)
{
    EXPECT(report->rejected && !report->steps_taken);
    ++*(int *)user;
}

/* Where the alignment costs memory, it may be what runs out: the message says so. Elsewhere it costs none. */
TEST(an_alignment_that_exceeds_a_limit_is_named)
{
    static const struct {
        const char *settings;
        size_t segment;
    } cases[] = {{"expandable_segments:False", GIB(1) + MIB(4)}, {"like:pytorch", GIB(1) + MIB(4)},
                 {"backend:cudaMalloc", GIB(1) + MIB(3) - 512}, {"backend:cudaMallocAsync", GIB(1) + MIB(3) - 512}};
    for (int i = 0; i < 4; i++) {
        for (int shared = 0; shared < 2; shared++) {
            begin_still();
            galloc_config config = galloc_config_default();
            OK(galloc_config_parse(&config, cases[i].settings, NULL, 0));
            *(shared ? &config.device_limit : &config.memory_limit) = MIB(512);
            galloc_pool *pool = pool_new(&config);
            galloc_request request = request_of(pool, MIB(3), 0);
            char says[200];
            void *p = NULL;
            request.alignment = GIB(1);
            FAILS(galloc_alloc(&p, &request), cudaErrorMemoryAllocation);
            snprintf(says, sizeof says, "%s 536870912%s; the request needs a segment of %zu with alignment 1073741824",
                     shared ? "device_limit is" : "memory_limit is",
                     shared ? ", of which the device's pools hold 0" : "", cases[i].segment);
            if (!EXPECT(strstr(log_text, says) != NULL)) printf("    %s: %s\n", cases[i].settings, log_text);
            FAILS(galloc_pool_malloc(pool, &p, MIB(600), 0), cudaErrorMemoryAllocation);
            EXPECT(strstr(log_text, "alignment") == NULL);
            pool_end(pool);
            finish();
        }
    }
}

/* On a large device the sentence has its full length. */
TEST(the_cause_of_a_refusal_is_not_cut_off)
{
    sim_options options = sim_defaults();
    galloc_config config = galloc_config_default();
    options.memory = GIB(192);
    options.pace = SIM_PACE_STILL;
    begin_with(options);
    OK(galloc_config_parse(&config, "backend:cudaMalloc,device_limit:160G,throw_on_cudamalloc_oom:True", NULL, 0));
    galloc_pool *pool = pool_new(&config), *other = pool_limited(GIB(150));
    galloc_request request = request_of(pool, GIB(101), 0);
    galloc_report report;
    void *p, *q = NULL;
    OK(galloc_pool_malloc(other, &p, GIB(120), 0));
    request.alignment = GIB(128);
    FAILS(galloc_alloc(&q, &request), cudaErrorMemoryAllocation);
    EXPECT_EQ(galloc_oom_report(&report), cudaSuccess);
    if (!EXPECT(strstr(report.cause, " with alignment 137438953472") != NULL)) printf("    %s\n", report.cause);
    OK(galloc_free(p, 0));
    pool_end(other);
    pool_end(pool);
    finish();
}

/* Where a segment must hold the alignment as memory, none will ever do: nothing is given back, and nobody is asked. */
TEST(an_alignment_that_no_segment_can_have)
{
    const char *settings[] = {"expandable_segments:False", "like:pytorch,expandable_segments:False",
                              "backend:cudaMalloc", "backend:cudaMallocAsync"};
    for (int i = 0; i < 4; i++) {
        begin_still();
        cudaStream_t s = stream_new();
        int asked = 0, rejected = 0;
        galloc_config config = galloc_config_default();
        OK(galloc_config_parse(&config, settings[i], NULL, 0));
        galloc_pool *pool = pool_new(&config);
        galloc_callbacks calls = {.on_oom = count_asked, .user = &asked};
        OK(galloc_pool_set_callbacks(pool, &calls));
        void *p = get(pool, MIB(30), s);
        put(s, p, MIB(30), 1);
        OK(galloc_free(p, s));
        galloc_request request = request_of(pool, 1, s);
        request.alignment = (size_t)1 << 50;
        galloc_stats before = stats_of(pool), after;
        long blocking = sim_blocking_calls();
        FAILS(galloc_alloc(&p, &request), cudaErrorMemoryAllocation);
        EXPECT(strstr(log_text, "alignment") != NULL && strstr(log_text, "memory_limit") == NULL);
        after = stats_of(pool);
        expect_same(&before, &after);
        EXPECT_EQ(sim_blocking_calls(), blocking);
        EXPECT_EQ(asked, 0);
        calls = (galloc_callbacks){.on_reject = count_rejected, .user = &rejected};
        OK(galloc_pool_set_callbacks(pool, &calls));
        FAILS(galloc_alloc(&p, &request), cudaErrorMemoryAllocation);
        EXPECT_EQ(rejected, 1);
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

TEST(the_log_may_call_galloc)
{
    void *p = NULL;
    begin();
    log_hook = fail_once_more;
    EXPECT_EQ(galloc_free(&log_hook, 0), cudaErrorInvalidDevicePointer);
    EXPECT(!log_hook); /* it was called, and what failed there is not logged in turn */
    EXPECT_EQ(log_lines, 1);
    EXPECT(!strncmp(log_text, "galloc_free: ", 13));
    EXPECT(!strcmp(log_text, galloc_last_message()));
    OK(galloc_malloc(&p, 1, 0));
    EXPECT_EQ(galloc_pool_trim(NULL, 0, NULL), cudaErrorInvalidValue); /* the next line is logged again */
    EXPECT_EQ(log_lines, 2);
    OK(galloc_free(p, 0));
    finish();
}

/* ---- what is the program's own ----------------------------------------------------------------------------------- */

static void call_everything(galloc_pool *pool, cudaStream_t s, cudaStream_t t)
{
    galloc_pool *other = NULL;
    galloc_config config;
    void *p = NULL, *q = NULL, *r = NULL;
    (void)galloc_pool_malloc(pool, &p, MIB(8), s);
    (void)galloc_pool_malloc(pool, &q, MIB(4), t);
    (void)galloc_pool_malloc(pool, &r, GIB(900), t);
    (void)galloc_record_stream(p, t);
    (void)galloc_resize(p, MIB(3), s);
    (void)galloc_resize(p, GIB(900), s);
    (void)galloc_free(p, s);
    (void)galloc_free(p, s);
    (void)galloc_free_after(q, &s, 1);
    (void)galloc_malloc(&p, 100, s);
    (void)galloc_free(p, t);
    (void)galloc_pool_reserve(pool, MIB(30));
    (void)galloc_pool_reserve(pool, SIZE_MAX);
    (void)galloc_pool_trim(pool, 0, NULL);
    (void)galloc_stream_retire(t);
    (void)galloc_pool_config(pool, &config);
    (void)galloc_pool_create(&other, NULL);
    (void)galloc_pool_destroy(other);
    (void)galloc_pool_create(NULL, NULL);
    (void)galloc_pointer_info(&p, NULL);
    (void)galloc_shutdown();
}

TEST(the_programs_last_error_is_left_alone)
{
    for (int round = 0; round < 4; round++) {
        sim_options options = sim_defaults();
        options.memory = MIB(64);
        begin_with(options);
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_config config = galloc_config_default();
        config.expandable_segments = round % 2;
        galloc_pool *pool = pool_new(&config);
        if (round / 2) EXPECT_EQ(cudaSetDevice(77), cudaErrorInvalidDevice);
        call_everything(pool, s, t);
        EXPECT_EQ(cudaPeekAtLastError(), round / 2 ? cudaErrorInvalidDevice : cudaSuccess);
        (void)cudaGetLastError();
        pool_end(pool);
        finish();
    }
}

/* Where a call of galloc's fails in the runtime the program still learns that there was an error of its own. */
TEST(an_error_that_the_program_has_not_seen_stays_one)
{
    begin();
    void *p = NULL;
    EXPECT_EQ(cudaSetDevice(77), cudaErrorInvalidDevice);
    sim_fail("cudaGetDriverEntryPointByVersion", 1, 0, cudaErrorUnknown);
    FAILS(galloc_malloc(&p, 1000, 0), cudaErrorUnknown);
    EXPECT(cudaGetLastError() != cudaSuccess);
    sim_fail("cudaGetDriverEntryPointByVersion", 1, 0, cudaErrorUnknown);
    FAILS(galloc_malloc(&p, 1000, 0), cudaErrorUnknown);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    finish();
}

TEST(the_current_device_is_left_alone)
{
    for (int round = 0; round < 4; round++) {
        begin_with_devices(3, SIM_PACE_RANDOM);
        OK(cudaSetDevice(0));
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_config config = galloc_config_default();
        config.expandable_segments = round % 2;
        config.device = 0;
        int device = -1, now = round / 2 + 1;
        OK(cudaSetDevice(now)); /* has been chosen, and has no context of its own yet */
        CUcontext before = NULL, after = NULL;
        EXPECT_EQ(cuCtxGetCurrent(&before), CUDA_SUCCESS);
        galloc_pool *pool = pool_new(&config);
        call_everything(pool, s, t);
        pool_end(pool);
        EXPECT_EQ(cuCtxGetCurrent(&after), CUDA_SUCCESS);
        EXPECT(before == after);
        OK(cudaGetDevice(&device));
        EXPECT_EQ(device, now);
        enum cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
        OK(cudaThreadExchangeStreamCaptureMode(&mode)); /* nor is the thread's mode of capture */
        EXPECT_EQ(mode, cudaStreamCaptureModeGlobal);
        finish();
    }
}

/* The mode of capture is switched last, when the pool's context is already the current one. */
TEST(the_current_device_is_left_alone_when_a_device_cannot_be_entered)
{
    begin_with_devices(2, SIM_PACE_RANDOM);
    CUcontext before = NULL, after = NULL;
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    void *p = get(pool, MIB(8), s), *q = NULL;
    OK(cudaSetDevice(1));
    OK((cudaError_t)cuCtxGetCurrent(&before));
    long calls = memory_calls();
    sim_fail("cuThreadExchangeStreamCaptureMode", 1, 1, cudaErrorUnknown);
    FAILS(galloc_pool_malloc(pool, &q, GIB(1), s), cudaErrorUnknown);
    FAILS(galloc_pool_trim(pool, 0, NULL), cudaErrorUnknown);
    sim_fail_clear();
    EXPECT(q == NULL);
    EXPECT_EQ(memory_calls(), calls);
    OK((cudaError_t)cuCtxGetCurrent(&after));
    EXPECT(before == after);
    OK(galloc_free(get(pool, GIB(1), s), s));
    OK(galloc_free(p, s));
    OK(cudaSetDevice(0));
    pool_end(pool);
    stream_end(s);
    finish();
}

static void *allocate_without_context(void *stream)
{
    void *p = NULL, *q = NULL;
    OK(galloc_malloc(&p, MIB(4), stream));
    OK(galloc_free(p, stream));
    OK(galloc_malloc(&q, MIB(4), 0));
    OK(galloc_free(q, 0));
    return NULL;
}

TEST(a_thread_needs_no_context)
{
    begin();
    pthread_t thread;
    cudaStream_t s = stream_new();
    galloc_pool *pool = NULL;
    sim_forget_context();
    EXPECT_EQ(pthread_create(&thread, NULL, allocate_without_context, s), 0);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
    sim_forget_context();
    allocate_without_context(s);
    sim_forget_context();
    OK(galloc_pool_create(&pool, NULL));
    sim_forget_context();
    void *p = get(pool, MIB(8), s);
    sim_forget_context();
    OK(galloc_free(p, s));
    sim_forget_context();
    OK(galloc_pool_trim(pool, 0, NULL));
    sim_forget_context();
    pool_end(pool);
    finish();
}

/* A thread has no context, and the runtime does not give it one: the call fails with the runtime's error. */
TEST(a_thread_that_gets_no_context_is_told_so)
{
    static const char *const calls[] = {"cudaGetDevice", "cudaSetDevice"};
    for (int i = 0; i < 2; i++) {
        begin();
        galloc_pool *pool = pool_new(NULL);
        void *p = NULL;
        sim_forget_context();
        sim_fail(calls[i], 1, 0, cudaErrorDevicesUnavailable);
        FAILS(galloc_pool_malloc(pool, &p, 512, 0), cudaErrorDevicesUnavailable);
        EXPECT_EQ(sim_failed(), 1);
        EXPECT(p == NULL);
        EXPECT(strstr(log_text, "no CUDA context for this thread") != NULL);
        sim_fail_clear();
        p = get(pool, 512, 0);
        OK(galloc_free(p, 0));
        pool_end(pool);
        finish();
    }
}

/* A driver that is too old, or that cannot begin, is named. */
TEST(a_driver_that_cannot_serve_is_named)
{
    sim_options options = sim_defaults();
    galloc_pool *pool = NULL;
    options.driver_version = 11080;
    begin_with(options);
    FAILS(galloc_pool_create(&pool, NULL), cudaErrorInsufficientDriver);
    EXPECT(strstr(log_text, "it must be 12.0 or later") != NULL);
    EXPECT_EQ(sim_malloc_live(), 0);
    sim_stop();
    begin();
    sim_fail("cuInit", 1, 0, cudaErrorNoDevice);
    FAILS(galloc_pool_create(&pool, NULL), cudaErrorNoDevice);
    EXPECT(strstr(log_text, "cuInit") != NULL);
    sim_fail_clear();
    pool = pool_new(NULL);
    pool_end(pool);
    finish();
}

/* The first call of a program may be galloc's. */
TEST(galloc_may_come_first)
{
    begin();
    void *p = NULL;
    OK(galloc_malloc(&p, 1000, 0));
    put(0, p, 1000, 1);
    OK(galloc_free(p, 0));
    finish();
    begin();
    galloc_pool *pool = pool_new(NULL);
    pool_end(pool);
    OK(galloc_stream_retire(0));
    EXPECT_EQ(info_of(&p).state, GALLOC_STATE_FOREIGN);
    finish();
}

static size_t host_bytes;
static void count_host_bytes(size_t bytes) { host_bytes += bytes; }

/* An event that the driver refuses costs no host memory that stays. */
TEST(refused_events_cost_nothing)
{
    begin();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_new(NULL);
    OK(galloc_free(get(pool, MIB(4), t), t));
    for (int i = 0; i < 20000; i++) {
        if (i == 100) {
            host_bytes = 0;
            inside_on_malloc = count_host_bytes;
            sim_fail("cuEventCreate", 1, 1, 0);
        }
        OK(galloc_free(get(pool, MIB(4), s), s));
    }
    inside_on_malloc = NULL;
    EXPECT(sim_failed() > 100);
    sim_fail_clear();
    EXPECT(host_bytes < KIB(100));
    stream_end(s);
    stream_end(t);
    pool_end(pool);
    finish();
}

static struct {
    pthread_barrier_t meets;
    pid_t child;
} forking;

static void *fork_and_end(void *unused)
{
    void *p = NULL;
    OK(galloc_malloc(&p, 512, cudaStreamPerThread));
    OK(galloc_free(p, cudaStreamPerThread));
    pthread_barrier_wait(&forking.meets);
    pthread_barrier_wait(&forking.meets); /* the locks are held now */
    pid_t child = fork();
    if (child) __atomic_store_n(&forking.child, child, __ATOMIC_RELEASE);
    return unused; /* in the child, this ends its only thread */
}

/* A thread forks while another one holds all locks. The copy of the thread ends in the child. */
TEST(a_thread_of_a_child_ends)
{
    begin();
    galloc_pool *pool = pool_new(NULL);
    pthread_t thread;
    pid_t child = 0, ended = 0;
    int status = 0;
    forking.child = 0;
    pthread_barrier_init(&forking.meets, NULL, 2);
    pthread_create(&thread, NULL, fork_and_end, NULL);
    pthread_barrier_wait(&forking.meets);
    inside_hold_locks(pool, 1);
    pthread_barrier_wait(&forking.meets);
    while (!(child = __atomic_load_n(&forking.child, __ATOMIC_ACQUIRE))) usleep(1000);
    for (int i = 0; i < 2000 && !ended; i++) {
        ended = waitpid(child, &status, WNOHANG);
        if (!ended) usleep(10000);
    }
    inside_hold_locks(pool, 0);
    pthread_join(thread, NULL);
    EXPECT_EQ(ended, child);
    if (!ended) {
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
    }
    pool_end(pool);
    finish();
}

static void *use_and_end(void *unused)
{
    void *p = NULL;
    OK(galloc_malloc(&p, 512, cudaStreamPerThread));
    OK(galloc_free(p, cudaStreamPerThread));
    reach(1);
    wait_for(2);
    return unused;
}

/* The exit of a child does not wait for a thread that was about to end in its parent: the child has no such thread. */
TEST(the_exit_of_a_child_waits_for_no_thread_of_its_parent)
{
    begin();
    pthread_t thread;
    uint64_t least = UINT64_MAX;
    reach(0);
    pthread_create(&thread, NULL, use_and_end, NULL);
    wait_for(1);
    inside_hold_global(1); /* the end of the thread waits for this lock */
    reach(2);
    usleep(100000);
    for (int i = 0; i < 3 && least > 1000000000; i++) {
        fflush(stdout);
        uint64_t from = inside_clock();
        pid_t child = fork();
        if (child == 0) exit(0);
        int status = -1;
        EXPECT(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status));
        least = smaller(least, inside_clock() - from);
    }
    EXPECT(least < 1000000000);
    inside_hold_global(0);
    pthread_join(thread, NULL);
    finish();
}

TEST_MAIN()
