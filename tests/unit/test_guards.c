/* test_guards.c - debug: planted mistakes of a program are found, and named rightly; what is right is never reported,
   and nothing that a program gets changes. The simulated device finds guards and poison that are not in order. */

#include "setup.h"

#include <semaphore.h>

/* ---- pools ------------------------------------------------------------------------------------------------------- */

static void begin_backed(int pace)
{
    sim_options options = sim_defaults();
    options.mode = SIM_BACKED;
    options.memory = GIB(4);
    options.seed = test_seed();
    options.pace = pace;
    begin_with(options);
}

static galloc_pool *pool_debug(int debug)
{
    galloc_config config = galloc_config_default();
    config.debug = debug;
    return pool_new(&config);
}

#define GUARDS GALLOC_DEBUG_GUARDS
#define POISON GALLOC_DEBUG_POISON
#define QUARANTINE GALLOC_DEBUG_QUARANTINE

/* The program writes n bytes at an offset from the start of a block. */
static void write_at(void *ptr, ptrdiff_t offset, int value, size_t n, cudaStream_t stream)
{
    OK(cudaMemsetAsync((char *)ptr + offset, value, n, stream));
}

static int log_says(const char *text) { return strstr(log_text, text) != NULL; }

/* The last line of the log contains a text. */
static void expect_said(const char *text)
{
    if (!EXPECT(log_says(text))) printf("    \"%s\" is not in: %s\n", text, log_text);
}

/* Looks at all checks whose work is done. */
static void look_now(galloc_pool *pool)
{
    OK(cudaDeviceSynchronize());
    OK(galloc_pool_trim(pool, SIZE_MAX, NULL));
}

/* So many frees were checked, and so many not; none is damaged. */
static void expect_checks(galloc_pool *pool, uint64_t checks, uint64_t unchecked)
{
    galloc_stats stats = stats_of(pool);
    EXPECT_EQ(stats.damages, 0);
    EXPECT_EQ(stats.unchecked, unchecked);
    EXPECT_EQ(stats.checks, checks);
}

/* All freed blocks were checked, and none is damaged. */
static void expect_clean(galloc_pool *pool, uint64_t checks)
{
    expect_checks(pool, checks, 0);
    EXPECT_EQ(log_lines, 0);
}

/* ---- guards ------------------------------------------------------------------------------------------------------ */

TEST(a_write_behind_a_block_is_found_at_its_free)
{
    begin_backed(SIM_PACE_RANDOM);
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_debug(GUARDS);
    char at[64];
    void *p = get(pool, 1000, s), *q = get(pool, 1000, s);
    write_at(p, 0, 1, 1000, s);
    write_at(q, 0, 1, 1001, s); /* one byte too many */
    snprintf(at, sizeof at, "behind the block at %p of 1000 bytes", q);
    OK(galloc_free(p, s));
    OK(galloc_free(q, s));
    EXPECT_EQ(stats_of(pool).damages, 0); /* nothing has waited */
    look_now(pool);
    EXPECT_EQ(stats_of(pool).damages, 1);
    EXPECT_EQ(stats_of(pool).checks, 2);
    EXPECT_EQ(log_lines, 1);
    expect_said(at);
    expect_said("1 bytes, the first 0 behind its end");
    expect_said("0x01");
    pool_end(pool);
    stream_end(s);
    finish();
}

/* A block with an alignment has a guard as any other. */
TEST(a_write_behind_an_aligned_block_is_found)
{
    begin_backed(SIM_PACE_PROMPT);
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_debug(GUARDS);
    galloc_request request = {0};
    void *p = NULL;
    request.bytes = 1000;
    request.alignment = KIB(4);
    request.stream = s;
    request.pool = pool;
    OK(galloc_alloc(&p, &request));
    write_at(p, 1000, 1, 8, s);
    OK(galloc_free(p, s));
    look_now(pool);
    EXPECT_EQ(stats_of(pool).checks, 1);
    EXPECT_EQ(stats_of(pool).damages, 1);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* A program that frees by galloc_free_after alone hears of damages before it allocates again. */
TEST(damages_are_told_by_frees_after_several_streams)
{
    enum { BLOCKS = 64 };
    begin_with_devices(1, SIM_PACE_PROMPT);
    cudaStream_t s = stream_new(), t = stream_new(), both[] = {s, t};
    galloc_pool *pool = pool_debug(GUARDS);
    void *p[BLOCKS], *of_t = get(pool, 512, t);
    for (int i = 0; i < BLOCKS; i++) p[i] = get(pool, KIB(4), s);
    for (int i = 0; i < BLOCKS; i++) write_at(p[i], KIB(4), 1, 16, s);
    for (int i = 0; i < BLOCKS; i++) OK(galloc_free_after(p[i], both, 2));
    EXPECT(stats_of(pool).damages > 0);
    OK(galloc_free(of_t, t));
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* The lines are alike but for their numbers, and each is about another mistake: none is left out. */
TEST(each_damaged_block_has_a_line)
{
    enum { BAD = 12 };
    begin_backed(SIM_PACE_RANDOM);
    inside_log_level(GALLOC_LOG_INFO);
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_debug(GUARDS);
    for (int i = 1; i <= BAD; i++) {
        char at[96];
        void *p = get(pool, 1000, s);
        write_at(p, 0, i, 1000 + (size_t)i, s);
        OK(galloc_free(p, s));
        look_now(pool);
        EXPECT_EQ(stats_of(pool).damages, i);
        EXPECT_EQ(log_lines, i);
        snprintf(at, sizeof at, "behind the block at %p of 1000 bytes, stream %llu: %d bytes", p, stream_id(s), i);
        expect_said(at);
        EXPECT(!log_says("similar lines"));
    }
    pool_end(pool);
    stream_end(s);
    finish();
}

TEST(a_write_before_a_block_is_found_behind_its_neighbour)
{
    begin_backed(SIM_PACE_RANDOM);
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_debug(GUARDS);
    char at[96];
    void *p = get(pool, 1000, s), *q = get(pool, 700, s);
    EXPECT_EQ((char *)q - (char *)p, 1536);
    write_at(q, -1, 7, 1, s);
    OK(galloc_free(p, s));
    look_now(pool);
    EXPECT_EQ(stats_of(pool).damages, 1);
    snprintf(at, sizeof at, "behind the block at %p of 1000 bytes", p);
    expect_said(at);
    snprintf(at, sizeof at, "the first 535 behind its end and 1 before the block at %p", q);
    expect_said(at);
    OK(galloc_free(q, s));
    pool_end(pool);
    EXPECT_EQ(log_lines, 1);
    stream_end(s);
    finish();
}

/* Each offset from a block's end, for sizes around the steps of rounding, is found as far as the guard reaches. */
/* A block that is free by now was not written before by the program: it is not named. */
TEST(a_neighbour_that_was_freed_is_not_named)
{
    for (int kept = 0; kept < 2; kept++) {
        begin_backed(SIM_PACE_PROMPT);
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_debug(kept ? GUARDS | QUARANTINE : GUARDS);
        char at[96];
        void *p = get(pool, 1000, s), *q = get(pool, 700, s), *r = get(pool, 700, s);
        EXPECT_EQ((char *)q - (char *)p, 1536);
        OK(galloc_free(q, s));
        write_at(p, 1000, 7, 1, s);
        OK(galloc_free(p, s));
        look_now(pool);
        snprintf(at, sizeof at, "behind the block at %p of 1000 bytes", p);
        expect_said(at);
        EXPECT(!log_says("before the block at"));
        OK(galloc_free(r, s));
        pool_end(pool);
        EXPECT_EQ(log_lines, 1);
        stream_end(s);
        finish();
    }
}

TEST(every_byte_of_a_guard_counts)
{
    static const size_t sizes[] = {1, 255, 256, 257, 511, 512, 513, 4096, 5000, 70000};
    begin_backed(SIM_PACE_PROMPT);
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_debug(GUARDS);
    uint64_t found = 0;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        for (size_t offset = 0; offset < 256; offset += offset < 4 ? 1 : 63) {
            void *p = get(pool, sizes[i], s);
            write_at(p, (ptrdiff_t)(sizes[i] + offset), 0, 1, s);
            OK(galloc_free(p, s));
            look_now(pool);
            EXPECT_EQ(stats_of(pool).damages, ++found);
        }
    }
    pool_end(pool);
    stream_end(s);
    finish();
}

TEST(a_damaged_block_has_its_tag_its_name_and_its_callers)
{
    begin_backed(SIM_PACE_PROMPT);
    cudaStream_t s = stream_new();
    galloc_config config = galloc_config_default();
    galloc_request request = {0};
    char at[64];
    config.debug = GUARDS;
    config.history = 100;
    config.history_stacks = 8;
    galloc_pool *pool = pool_new(&config);
    void *p = NULL;
    request.bytes = 64;
    request.pool = pool;
    request.stream = s;
    request.tag = UINT32_MAX;
    OK(galloc_tag_name(UINT32_MAX, "weights"));
    OK(galloc_alloc(&p, &request));
    write_at(p, 64, 9, 3, s);
    OK(galloc_free(p, s));
    look_now(pool);
    expect_said("tag 4294967295 (weights)");
    snprintf(at, sizeof at, "stream %llu: 3 bytes, the first 0 behind", stream_id(s));
    expect_said(at);
    const char *allocated = strstr(log_text, "; allocated by "), *freed = strstr(log_text, "; freed by ");
    if (EXPECT(allocated && freed && allocated < freed)) {
        int frames = 0; /* three of each stack */
        for (const char *less = allocated; (less = strstr(less, " < ")) != NULL; less++)
            frames += less < freed ? 1 : 10;
        EXPECT_EQ(frames, 22);
    }
    OK(galloc_tag_name(5, NULL));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* A static function has no name at run time: its program and the place in it are named, as addr2line takes them. */
static __attribute__((noinline)) void free_without_a_name(void *p, cudaStream_t s)
{
    OK(galloc_free(p, s));
    __asm__ volatile(""); /* the call is no tail call */
}

TEST(a_caller_without_a_name_is_a_place_in_its_program)
{
    begin_backed(SIM_PACE_PROMPT);
    cudaStream_t s = stream_new();
    galloc_config config = galloc_config_default();
    config.debug = GUARDS;
    config.history = 100;
    config.history_stacks = 8;
    galloc_pool *pool = pool_new(&config);
    void *p = get(pool, 64, s);
    write_at(p, 64, 9, 3, s);
    free_without_a_name(p, s);
    look_now(pool);
    expect_said("; freed by test_guards(+0x");
    pool_end(pool);
    stream_end(s);
    finish();
}

/* What the end of the process's last pool finds has its stacks, too. */
TEST(a_shutdown_tells_damage_with_its_callers)
{
    begin_backed(SIM_PACE_STILL);
    setenv("GALLOC_CONF", "debug:guards,history:10,history_stacks:4", 1);
    cudaStream_t s = stream_new();
    void *p = NULL;
    OK(galloc_malloc(&p, 100, s));
    write_at(p, 100, 9, 1, s);
    OK(galloc_free(p, s));
    OK(galloc_shutdown());
    EXPECT_EQ(log_lines, 1);
    expect_said("; allocated by ");
    expect_said("; freed by ");
    stream_end(s);
    finish();
}

/* The message of the last failure is not the damage that a later call found. */
TEST(a_damage_is_logged_and_is_not_the_error_of_a_call)
{
    begin_backed(SIM_PACE_PROMPT);
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_debug(GUARDS);
    void *p = get(pool, 10, s);
    EXPECT_EQ(galloc_free((char *)p + 1, s), cudaErrorInvalidDevicePointer);
    write_at(p, 10, 0, 1, s);
    OK(galloc_free(p, s));
    look_now(pool);
    EXPECT_EQ(log_lines, 2);
    expect_said("debug: the program wrote behind");
    EXPECT(strstr(galloc_last_message(), "lies inside the block") != NULL);
    EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* A call that fails and finds damage as well logs both, and its message is its own. */
TEST(a_call_that_fails_and_finds_damage_has_the_message_of_its_error)
{
    begin_backed(SIM_PACE_PROMPT);
    cudaStream_t s = stream_new();
    galloc_config config = config_limit(MIB(64));
    config.debug = GUARDS;
    galloc_pool *pool = pool_new(&config);
    void *p = get(pool, 10, s), *most = get(pool, MIB(40), s);
    write_at(p, 10, 0, 1, s);
    OK(galloc_free(p, s));
    OK(cudaDeviceSynchronize());
    EXPECT_EQ(log_lines, 0);
    EXPECT_EQ(galloc_pool_malloc(pool, &p, MIB(40), s), cudaErrorMemoryAllocation);
    EXPECT_EQ(stats_of(pool).damages, 1);
    EXPECT_EQ(log_lines, 2);
    EXPECT(strstr(galloc_last_message(), "the program wrote") == NULL);
    EXPECT(strstr(galloc_last_message(), "out of memory") != NULL);
    OK(galloc_free(most, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

static void fail_too(void)
{
    EXPECT_EQ(galloc_oom_report(NULL), cudaErrorInvalidValue);
    EXPECT(!strcmp(galloc_last_message(), "galloc_oom_report: report is NULL"));
}

TEST(a_call_that_fails_and_finds_damage_says_both_to_a_log_function_that_fails)
{
    begin_backed(SIM_PACE_PROMPT);
    cudaStream_t s = stream_new();
    galloc_config config = config_limit(MIB(64));
    config.debug = GUARDS;
    galloc_pool *pool = pool_new(&config);
    void *p = get(pool, 10, s), *most = get(pool, MIB(40), s);
    write_at(p, 10, 0, 1, s);
    OK(galloc_free(p, s));
    OK(cudaDeviceSynchronize());
    log_hook = fail_too;
    EXPECT_EQ(galloc_pool_malloc(pool, &p, MIB(40), s), cudaErrorMemoryAllocation);
    log_hook = NULL;
    EXPECT_EQ(stats_of(pool).damages, 1);
    EXPECT_EQ(log_lines, 2);
    expect_said("out of memory");
    EXPECT(strstr(galloc_last_message(), "out of memory") != NULL);
    OK(galloc_free(most, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

TEST(the_end_of_a_pool_waits_for_its_checks_and_reports_all)
{
    begin_backed(SIM_PACE_STILL);
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_debug(GUARDS);
    void *p[20];
    for (int i = 0; i < 20; i++) p[i] = get(pool, 1000, s);
    for (int i = 0; i < 20; i++) write_at(p[i], 1000, 0, 1, s);
    for (int i = 0; i < 20; i++) OK(galloc_free(p[i], s));
    EXPECT_EQ(log_lines, 0);
    pool_end(pool);
    EXPECT_EQ(log_lines, 9); /* eight of them, and how many more */
    expect_said("debug: and 12 more blocks");
    stream_end(s);
    finish();
}

/* Poison alone sets no guard: the program may use all bytes of the block. */
TEST(without_guards_a_block_is_usable_to_its_end)
{
    begin_backed(SIM_PACE_RANDOM);
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_debug(POISON);
    void *p = get(pool, 1000, s);
    EXPECT_EQ(info_of(p).usable, 1024);
    OK(galloc_free(p, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* Pointers, sizes and errors are those without debug. */
TEST(a_program_gets_the_same_with_guards)
{
    begin_backed(SIM_PACE_RANDOM);
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_debug(GUARDS | POISON);
    void *p = get(pool, 1000, s), *none = p;
    galloc_pointer info = info_of(p);
    EXPECT_EQ(info.requested, 1000);
    EXPECT_EQ(info.usable, 1000); /* what is behind is the guard */
    EXPECT_EQ((uintptr_t)p % 512, 0);
    EXPECT_EQ(stats_of(pool).live.current, 1000);
    galloc_request request = {0};
    request.pool = pool;
    request.stream = s;
    request.bytes = SIZE_MAX - 100;
    EXPECT_EQ(galloc_alloc(&none, &request), cudaErrorMemoryAllocation);
    EXPECT(strstr(galloc_last_message(), "asked for 18446744073709551515 bytes") != NULL);
    request.bytes = 1;
    request.max_bytes = SIZE_MAX;
    EXPECT_EQ(galloc_alloc(&none, &request), cudaErrorMemoryAllocation);
    request.max_bytes = 0;
    request.alignment = 3;
    EXPECT_EQ(galloc_alloc(&none, &request), cudaErrorInvalidValue);
    request.alignment = MIB(8);
    OK(galloc_alloc(&none, &request));
    EXPECT_EQ((uintptr_t)none % MIB(8), 0);
    OK(galloc_free(none, s));
    OK(galloc_free(p, s));
    EXPECT_EQ(galloc_free(p, s), cudaErrorInvalidDevicePointer);
    OK(cudaDeviceSynchronize());
    expect_healthy(pool, 1);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* ---- several streams --------------------------------------------------------------------------------------------- */

TEST(a_block_freed_on_another_stream_is_checked_once_the_guard_is_known_to_be_set)
{
    begin_backed(SIM_PACE_STILL);
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_debug(GUARDS | POISON);
    void *p = get(pool, 1000, s), *q = get(pool, 1000, s);
    OK(galloc_free(p, t)); /* it was never used, so t need not follow s: the guard is not set yet */
    EXPECT_EQ(stats_of(pool).unchecked, 1);
    void *r = get(pool, 1000, t);
    write_at(r, 0, 1, 1000, t);
    OK(galloc_free(r, t));
    void *u = get(pool, 1000, s);
    OK(galloc_free(u, s)); /* its event covers the guard of q */
    look_now(pool);
    write_at(q, 1000, 4, 1, t);
    OK(galloc_free(q, t));
    look_now(pool);
    EXPECT_EQ(stats_of(pool).damages, 1);
    EXPECT_EQ(stats_of(pool).unchecked, 1);
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* The guard of a block that another stream frees is a use of the first stream: the memory waits for it. */
TEST(nobody_gets_memory_whose_guard_is_still_to_be_set)
{
    begin_backed(SIM_PACE_STILL);
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_config config = galloc_config_default();
    config.debug = GUARDS;
    config.reuse = GALLOC_REUSE_COMPLETED;
    galloc_pool *pool = pool_new(&config);
    sim_hold(s, 1);
    void *p = get(pool, MIB(2) - 256, s);
    OK(galloc_free(p, t));
    for (int i = 0; i < 4; i++) {
        void *q = get(pool, MIB(2) - 256, t);
        write_at(q, 0, 5, MIB(2) - 256, t);
        OK(galloc_free(q, t));
    }
    sim_hold(s, 0);
    look_now(pool);
    EXPECT_EQ(stats_of(pool).damages, 0);
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

TEST(a_free_after_several_streams_is_checked_on_the_one_that_got_the_block)
{
    begin_backed(SIM_PACE_RANDOM);
    cudaStream_t s[3] = {stream_new(), stream_new(), stream_new()};
    galloc_pool *pool = pool_debug(GUARDS | POISON);
    void *p = get(pool, 3000, s[1]);
    write_at(p, 0, 1, 3001, s[1]);
    order(s[1], s[0]);
    order(s[1], s[2]);
    look(s[0], p, 3000, 0x0101010101010101u);
    look(s[2], p, 3000, 0x0101010101010101u); /* not poisoned: these still read it */
    OK(galloc_free_after(p, s, 3));
    look_now(pool);
    EXPECT_EQ(stats_of(pool).damages, 1);
    p = get(pool, 3000, s[0]);
    write_at(p, 0, 2, 3000, s[0]);
    OK(galloc_record_stream(p, s[1]));
    order(s[0], s[1]);
    look(s[1], p, 3000, 0x0202020202020202u);
    OK(galloc_free(p, s[0]));
    look_now(pool);
    EXPECT_EQ(stats_of(pool).damages, 1);
    EXPECT_EQ(stats_of(pool).checks, 2);
    pool_end(pool);
    for (int i = 0; i < 3; i++) stream_end(s[i]);
    finish();
}

/* One of several streams is captured: nothing can be queued there, and on another one nothing would be in order. */
TEST(a_free_after_a_captured_stream_and_others_is_unchecked)
{
    begin_backed(SIM_PACE_RANDOM);
    cudaStream_t s[2] = {stream_new(), stream_new()};
    galloc_pool *pool = pool_debug(GUARDS | POISON);
    cudaGraph_t graph = NULL;
    size_t nodes = 9;
    void *p = get(pool, 3000, s[0]);
    write_at(p, 0, 1, 3000, s[0]);
    OK(cudaStreamBeginCapture(s[1], cudaStreamCaptureModeGlobal));
    OK(galloc_free_after(p, s, 2));
    OK(cudaStreamEndCapture(s[1], &graph));
    OK(cudaGraphGetNodes(graph, NULL, &nodes));
    EXPECT_EQ(nodes, 0);
    EXPECT_EQ(stats_of(pool).unchecked, 1);
    EXPECT_EQ(stats_of(pool).driver.memset, 1); /* at the allocation */
    OK(cudaGraphDestroy(graph));
    expect_healthy(pool, 1);
    pool_end(pool);
    for (int i = 0; i < 2; i++) stream_end(s[i]);
    finish();
}

TEST(captured_streams_get_no_guards_and_a_graph_has_no_node_of_galloc)
{
    begin_backed(SIM_PACE_RANDOM);
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_debug(GUARDS | POISON);
    cudaGraph_t graph = NULL;
    void *before = get(pool, 1000, s), *p = NULL;
    size_t nodes = 9;
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    p = get(pool, 1000, s);
    EXPECT_EQ(info_of(p).requested, 1000);
    OK(galloc_free(p, s));
    OK(galloc_free(before, s));
    OK(cudaStreamEndCapture(s, &graph));
    OK(cudaGraphGetNodes(graph, NULL, &nodes));
    EXPECT_EQ(nodes, 0);
    EXPECT_EQ(stats_of(pool).unchecked, 2);
    OK(cudaGraphDestroy(graph));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* While a blocking stream is captured, nothing may be queued on the legacy stream. */
TEST(guards_do_not_break_another_streams_capture)
{
    begin_backed(SIM_PACE_RANDOM);
    cudaStream_t s = NULL, t = stream_new();
    galloc_pool *pool = pool_debug(GUARDS | POISON);
    cudaGraph_t graph = NULL;
    OK(cudaStreamCreate(&s));
    void *p = get(pool, 1000, NULL), *q = get(pool, 1000, t);
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    void *r = get(pool, 1000, NULL);
    OK(galloc_free(p, NULL));
    OK(galloc_free(r, NULL));
    OK(galloc_free(q, t));
    OK(cudaStreamEndCapture(s, &graph));
    EXPECT_EQ(stats_of(pool).unchecked, 2);
    look_now(pool);
    EXPECT_EQ(stats_of(pool).checks, 1);
    OK(cudaGraphDestroy(graph));
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* Nor is an event recorded there for the guard of a block that may grow on another stream. */
TEST(a_resize_does_not_break_another_streams_capture)
{
    begin_backed(SIM_PACE_RANDOM);
    cudaStream_t s = NULL;
    galloc_pool *pool = pool_debug(GUARDS);
    cudaGraph_t graph = NULL;
    OK(cudaStreamCreate(&s));
    void *p = get_growable(pool, 1000, MIB(8), NULL);
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    OK(galloc_resize(p, 3000, NULL));
    OK(galloc_resize(p, MIB(4), NULL));
    OK(cudaStreamEndCapture(s, &graph));
    OK(cudaGraphDestroy(graph));
    EXPECT_EQ(log_lines, 0);
    OK(galloc_free(p, NULL));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* ---- resize ------------------------------------------------------------------------------------------------------ */

TEST(a_resize_moves_the_guard)
{
    begin_backed(SIM_PACE_RANDOM);
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_debug(GUARDS);
    static const size_t sizes[] = {3000, MIB(2), MIB(5), 4000, MIB(4), 100};
    void *p = get_growable(pool, 1000, MIB(8), s);
    uint64_t checks = 0;
    for (size_t i = 0; i < 6; i++) {
        OK(galloc_resize(p, sizes[i], s));
        EXPECT_EQ(info_of(p).requested, sizes[i]);
        write_at(p, 0, (int)i, sizes[i], s);
        checks++;
    }
    OK(galloc_resize(p, MIB(8), s)); /* all of its room */
    write_at(p, 0, 9, MIB(8), s);
    EXPECT_EQ(info_of(p).usable, MIB(8));
    OK(galloc_free(get(pool, 100, s), s)); /* its event tells that the checks have been made */
    look_now(pool);
    expect_clean(pool, checks + 2);
    write_at(p, (ptrdiff_t)MIB(8), 1, 1, s);
    OK(galloc_free(p, s));
    look_now(pool);
    EXPECT_EQ(stats_of(pool).damages, 1);
    p = get(pool, 4000, s);
    OK(galloc_resize(p, 1000, s));
    write_at(p, 0, 1, 1001, s);
    OK(galloc_resize(p, 500, s)); /* the damage is found here */
    write_at(p, 0, 1, 500, s);
    look_now(pool);
    EXPECT_EQ(stats_of(pool).damages, 2);
    OK(galloc_free(p, s));
    look_now(pool);
    EXPECT_EQ(stats_of(pool).damages, 2);
    EXPECT_EQ(stats_of(pool).unchecked, 0);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* The guard of a block with room is long: it is checked at both ends. */
TEST(the_end_of_a_long_guard_counts)
{
    begin_backed(SIM_PACE_PROMPT);
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_debug(GUARDS);
    void *p = get_growable(pool, 1000, MIB(3), s);
    write_at(p, (ptrdiff_t)MIB(2) - 1, 1, 1, s);
    OK(galloc_free(p, s));
    look_now(pool);
    EXPECT_EQ(stats_of(pool).damages, 1);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* The guard of a block that shrinks lies where the block ends then, not in the memory that is freed. */
TEST(a_block_that_shrinks_keeps_a_guard)
{
    begin_backed(SIM_PACE_PROMPT);
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_debug(GUARDS);
    void *p = get(pool, 8192, s);
    OK(galloc_resize(p, 1024, s));
    write_at(p, 1024, 1, 1, s);
    OK(galloc_free(p, s));
    look_now(pool);
    EXPECT_EQ(stats_of(pool).damages, 1);
    EXPECT_EQ(stats_of(pool).unchecked, 0);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* The log function may call galloc, which may find more damage. */
static cudaStream_t hook_stream;
static galloc_pool *hook_pool;

static void damage_more(void)
{
    log_hook = NULL;
    for (int i = 0; i < 3; i++) {
        void *p = get(hook_pool, 77, hook_stream);
        write_at(p, 77, 0, 1, hook_stream);
        OK(galloc_free(p, hook_stream));
        look_now(hook_pool);
    }
}

TEST(what_is_found_within_the_log_function_is_told_later)
{
    begin_backed(SIM_PACE_STILL);
    cudaStream_t s = hook_stream = stream_new();
    galloc_pool *pool = hook_pool = pool_debug(GUARDS);
    void *p[2];
    for (int i = 0; i < 2; i++) p[i] = get(pool, 1000, s);
    for (int i = 0; i < 2; i++) write_at(p[i], 1000, 0, 1, s);
    for (int i = 0; i < 2; i++) OK(galloc_free(p[i], s));
    log_hook = damage_more;
    look_now(pool);
    EXPECT_EQ(log_lines, 2);
    expect_said("of 1000 bytes");
    look_now(pool);
    EXPECT_EQ(log_lines, 5);
    expect_said("of 77 bytes");
    EXPECT_EQ(stats_of(pool).damages, 5);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* A copy that was queued before the driver refused the rest still arrives: its place is not given to another check. */
TEST(a_check_that_failed_half_way_keeps_its_place)
{
    begin_backed(SIM_PACE_STILL);
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_debug(GUARDS | QUARANTINE);
    void *p = get(pool, 1000, s), *q = get(pool, 1000, t);
    write_at(p, 1000, 0, 20, s);
    sim_hold(s, 1);
    sim_fail("cuMemsetD8Async", 1, 0, cudaErrorUnknown);
    OK(galloc_free(p, s)); /* the copy of its guard is queued, the poison is not */
    EXPECT_EQ(stats_of(pool).unchecked, 1);
    OK(galloc_free(q, t));
    OK(cudaStreamSynchronize(t));
    sim_hold(s, 0);
    look_now(pool);
    EXPECT_EQ(stats_of(pool).damages, 0);
    pool_end(pool);
    EXPECT_EQ(log_lines, 0);
    stream_end(s);
    stream_end(t);
    finish();
}

/* A resize copies the guard on the stream that it names. Another stream may free the block without waiting for that,
   but nobody gets its memory before. */
TEST(a_free_on_another_stream_waits_for_the_copy_of_a_resize)
{
    begin_backed(SIM_PACE_STILL);
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_config config = config_fixed();
    config.debug = GUARDS;
    config.reuse = GALLOC_REUSE_COMPLETED;
    galloc_pool *pool = pool_new(&config);
    void *p = get(pool, MIB(1), s), *q = get(pool, 1000, s);
    OK(galloc_free(q, s));
    look_now(pool);
    sim_hold(s, 1);
    (void)galloc_resize(p, MIB(30), s);
    log_lines = 0;
    OK(galloc_free(p, t));
    for (int i = 0; i < 4; i++) {
        q = get(pool, MIB(1), t);
        write_at(q, 0, 5, MIB(1) + 256, t); /* also where the guard of p was */
        OK(galloc_free(q, t));
    }
    sim_hold(s, 0);
    look_now(pool);
    EXPECT_EQ(sim_findings(SIM_RACE), 0);
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

TEST(a_resize_that_fails_leaves_the_guard)
{
    begin_backed(SIM_PACE_RANDOM);
    cudaStream_t s = stream_new();
    galloc_config config = config_fixed();
    config.debug = GUARDS;
    galloc_pool *pool = pool_new(&config);
    void *p = get(pool, 1000, s), *q = get(pool, 1000, s);
    EXPECT_EQ(galloc_resize(p, MIB(1), s), cudaErrorNotSupported);
    log_lines = 0;
    write_at(p, 1000, 1, 1, s);
    OK(galloc_free(p, s));
    OK(galloc_free(q, s));
    look_now(pool);
    EXPECT_EQ(stats_of(pool).damages, 1);
    EXPECT_EQ(stats_of(pool).unchecked, 0);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* A stream that the block was not given to may resize it; what that stream does is not in order with the guard. */
TEST(a_resize_on_another_stream_leaves_the_block_without_a_guard)
{
    begin_backed(SIM_PACE_RANDOM);
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_debug(GUARDS);
    void *p = get(pool, 4000, s);
    OK(galloc_resize(p, 1000, t));
    EXPECT_EQ(stats_of(pool).unchecked, 1); /* the guard that it had */
    write_at(p, 0, 3, 1000, t);
    OK(galloc_free(p, t));
    look_now(pool);
    EXPECT_EQ(stats_of(pool).damages, 0);
    EXPECT_EQ(stats_of(pool).checks, 0);
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* The work of a recorded stream may still use the bytes that a block gives up: no guard is set there before that. */
TEST(a_guard_is_not_set_where_recorded_work_may_be)
{
    begin_backed(SIM_PACE_STILL);
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_debug(GUARDS);
    void *p = get_used(pool, 8192, s, 3);
    OK(galloc_record_stream(p, t));
    order(s, t);
    look(t, p, 8192, 3);
    OK(galloc_resize(p, 1000, s));
    OK(galloc_free(p, s));
    look_now(pool);
    EXPECT_EQ(stats_of(pool).damages, 0);
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* ---- poison ------------------------------------------------------------------------------------------------------ */

static void expect_bytes(const void *ptr, size_t n, int value)
{
    size_t i = 0;
    OK(cudaDeviceSynchronize());
    while (i < n && ((const unsigned char *)ptr)[i] == value) i++;
    if (!EXPECT(i == n)) printf("    byte %zu of %zu is 0x%02x\n", i, n, ((const unsigned char *)ptr)[i]);
}

TEST(memory_is_poisoned_when_it_is_freed)
{
    begin_backed(SIM_PACE_RANDOM);
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_debug(POISON);
    void *p = get(pool, 100000, s);
    write_at(p, 0, 1, 100000, s);
    look(s, p, 100000, 0x0101010101010101u); /* work before the free still sees its data */
    OK(galloc_free(p, s));
    void *q = get(pool, 100000, s);
    EXPECT(q == p);
    expect_bytes(q, 100000, 0xff); /* uninitialised memory is NaN */
    write_at(q, 0, 2, 100000, s);
    expect_bytes(q, 100000, 2);
    EXPECT_EQ(stats_of(pool).checks + stats_of(pool).unchecked, 0);
    OK(galloc_free(q, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

TEST(poison_waits_for_no_stream_and_passes_none)
{
    begin_backed(SIM_PACE_STILL);
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_debug(POISON);
    void *p = get(pool, 4096, s);
    put(s, p, 4096, 1);
    order(s, t);
    look(t, p, 4096, 1);
    OK(galloc_free(p, t)); /* in order by the program */
    look_now(pool);
    p = get(pool, 4096, s);
    put(s, p, 4096, 2);
    OK(galloc_record_stream(p, t));
    order(s, t);
    look(t, p, 4096, 2);
    OK(galloc_free(p, s)); /* t may still read it */
    look_now(pool);
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* A launch that is under way reads a block; its group is released, and the block is freed, or shrunk before. */
static void look_after_the_release(int shrinks)
{
    begin_backed(SIM_PACE_STILL);
    cudaStream_t s = stream_new(), t = stream_new(), u = stream_new();
    galloc_pool *pool = pool_debug(GUARDS | POISON);
    galloc_graph *group = NULL;
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    OK(galloc_graph_begin(&group, pool, s));
    void *input = get_used(pool, 8192, u, 9);
    OK(cudaStreamSynchronize(u));
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    look(s, input, 8192, 9);
    OK(galloc_record_stream(input, s));
    OK(cudaStreamEndCapture(s, &graph));
    OK(cudaGraphInstantiateWithFlags(&exec, graph, 0));
    OK(galloc_graph_end(group));
    OK(cudaGraphLaunch(exec, t));
    OK(galloc_graph_release(group, t));
    if (shrinks) OK(galloc_resize(input, 1000, u));
    OK(galloc_free(input, u));
    look_now(pool);
    EXPECT_EQ(stats_of(pool).damages, 0);
    OK(cudaGraphExecDestroy(exec));
    OK(cudaGraphDestroy(graph));
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    stream_end(u);
    finish();
}

/* A graph of a group reads a block that was allocated elsewhere. After the group's release a launch may still do so,
   and only a mark on the block tells. */
TEST(poison_waits_for_the_launches_of_a_released_group) { look_after_the_release(0); }

/* Where the new guard would lie, they may still read what the block had. */
TEST(a_guard_is_not_set_under_the_launches_of_a_released_group) { look_after_the_release(1); }

/* ---- quarantine -------------------------------------------------------------------------------------------------- */

static galloc_pool *pool_quarantine(size_t bytes)
{
    galloc_config config = galloc_config_default();
    config.debug = QUARANTINE;
    config.quarantine_bytes = bytes;
    return pool_new(&config);
}

/* Not static: it has a name at run time. */
void free_by_name(void *p, cudaStream_t s);
__attribute__((noinline)) void free_by_name(void *p, cudaStream_t s)
{
    OK(galloc_free(p, s));
    __asm__ volatile(""); /* the call is no tail call */
}

TEST(a_write_after_the_free_is_found_when_the_block_leaves_the_quarantine)
{
    begin_backed(SIM_PACE_RANDOM);
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_quarantine(KIB(20));
    char at[96];
    void *p = get(pool, 4000, s);
    OK(galloc_free(p, s));
    write_at(p, 7, 0x3c, 2, s);
    for (int i = 0; i < 10; i++) { /* the oldest of them leave it */
        void *q = get(pool, 4000, s);
        EXPECT(i > 2 || q != p);
        OK(galloc_free(q, s));
    }
    look_now(pool);
    EXPECT_EQ(stats_of(pool).damages, 1);
    EXPECT_EQ(stats_of(pool).unchecked, 0);
    snprintf(at, sizeof at, "the program wrote after its free into the block at %p of 4000 bytes", p);
    expect_said(at);
    expect_said(": 2 bytes, the first 7 from its start, 0x3c");
    expect_healthy(pool, 1);
    pool_end(pool);
    EXPECT_EQ(log_lines, 1);
    stream_end(s);
    finish();
}

/* Both callers are those of the block, whatever was called since, whether it leaves the quarantine or the pool ends. */
TEST(a_write_after_the_free_has_its_callers)
{
    for (int kind = 0; kind < 4; kind++) {
        begin_backed(SIM_PACE_PROMPT);
        cudaStream_t s = stream_new();
        galloc_config config = galloc_config_default();
        config.debug = QUARANTINE | (kind & 1 ? POISON : 0);
        config.history = 100;
        config.history_stacks = 8;
        galloc_pool *pool = pool_new(&config);
        void *p = get(pool, 4096, s), *q = get(pool, 4096, s);
        free_by_name(p, s);
        OK(galloc_free(q, s));
        write_at(p, 8, 1, 3, s);
        OK(cudaDeviceSynchronize());
        if (kind & 2) {
            OK(galloc_pool_trim(pool, 0, NULL));
            EXPECT_EQ(log_lines, 1);
        }
        pool_end(pool);
        EXPECT_EQ(log_lines, 1);
        expect_said("3 bytes, the first 8 from its start, 0x01");
        expect_said("; allocated by ");
        expect_said("; freed by free_by_name+0x");
        stream_end(s);
        finish();
    }
}

__attribute__((noinline)) static void free_another(void *p, cudaStream_t s)
{
    OK(galloc_free(p, s));
    __asm__ volatile("");
}

/* The free that pushes a block out of the quarantine is not the one that the line names. */
TEST(a_write_after_the_free_names_that_free)
{
    begin_backed(SIM_PACE_PROMPT);
    cudaStream_t s = stream_new();
    galloc_config config = galloc_config_default();
    config.debug = QUARANTINE | POISON;
    config.quarantine_bytes = KIB(64);
    config.history = 1000;
    config.history_stacks = 8;
    galloc_pool *pool = pool_new(&config);
    void *p = get(pool, KIB(40), s), *q = get(pool, KIB(40), s);
    free_by_name(p, s);
    write_at(p, 8, 1, 3, s);
    OK(cudaDeviceSynchronize());
    free_another(q, s);
    OK(cudaDeviceSynchronize());
    for (int i = 0; i < 50 && !log_lines; i++) free_another(get(pool, 1000, s), s);
    EXPECT_EQ(log_lines, 1);
    expect_said("; freed by free_by_name+0x");
    pool_end(pool);
    stream_end(s);
    finish();
}

TEST(a_write_after_the_free_is_found_at_the_end_of_the_pool)
{
    begin_backed(SIM_PACE_STILL);
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_quarantine(0);
    void *p = get(pool, 100000, s), *q = get(pool, 100000, s);
    OK(galloc_free(p, s));
    OK(galloc_free(q, s));
    EXPECT_EQ(info_of(p).state, GALLOC_STATE_FREE);
    EXPECT_EQ(galloc_free(p, s), cudaErrorInvalidDevicePointer);
    EXPECT_EQ(stats_of(pool).blocks.current, 0);
    EXPECT_EQ(stats_of(pool).live.current, 0);
    EXPECT_EQ(stats_of(pool).allocated.current, 0);
    EXPECT_EQ(stats_of(pool).frees, 2);
    EXPECT_EQ(stats_of(pool).driver.memset, 2);
    write_at(q, 99999, 1, 1, s);
    log_lines = 0;
    expect_healthy(pool, 1);
    pool_end(pool);
    EXPECT_EQ(log_lines, 1);
    expect_said("1 bytes, the first 99999 from its start, 0x01");
    stream_end(s);
    finish();
}

TEST(blocks_in_quarantine_are_not_reused_and_counted_as_free)
{
    begin_backed(SIM_PACE_RANDOM);
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_quarantine(MIB(1));
    void *p[8];
    for (int i = 0; i < 200; i++) {
        for (int k = 0; k < 8; k++) p[k] = get(pool, KIB(30) + (size_t)k * 512, k % 2 ? s : t);
        for (int k = 0; k < 8; k++) write_at(p[k], 0, k, KIB(30), k % 2 ? s : t);
        for (int k = 0; k < 8; k++) OK(galloc_free(p[k], k % 2 ? s : t));
        if (i % 20 == 0) expect_healthy(pool, 1);
    }
    galloc_stats stats = stats_of(pool);
    EXPECT_EQ(stats.blocks.current, 0);
    EXPECT_EQ(stats.frees, 1600);
    EXPECT_EQ(stats.mallocs, 1600);
    OK(galloc_pool_trim(pool, 0, NULL));
    EXPECT_EQ(stats_of(pool).reserved.current, 0);
    EXPECT_EQ(stats_of(pool).damages, 0);
    EXPECT_EQ(stats_of(pool).checks + stats_of(pool).unchecked, 1600);
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* The next block could be used twice as well: peaks are those of what the program has. */
TEST(peaks_are_without_what_is_in_quarantine)
{
    begin_backed(SIM_PACE_PROMPT);
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_quarantine(MIB(1));
    for (int i = 0; i < 8; i++) OK(galloc_free(get(pool, KIB(30), s), s));
    galloc_stats stats = stats_of(pool);
    EXPECT(stats.reserved.peak >= 8 * KIB(30));
    EXPECT_EQ(stats.live.peak, KIB(30));
    EXPECT_EQ(stats.blocks.peak, 1);
    EXPECT_EQ(stats.allocated.peak, KIB(30));
    EXPECT_EQ(stats.blocks.current + stats.live.current, 0);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* What follows a block that was written to after its free is no place that this could have come from. */
TEST(a_write_after_the_free_names_no_neighbour)
{
    begin_backed(SIM_PACE_RANDOM);
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_quarantine(0);
    void *p = get(pool, 4096, s), *next = get(pool, 4096, s);
    OK(galloc_free(p, s));
    write_at(p, 8, 1, 3, s);
    OK(cudaStreamSynchronize(s)); /* the check is not ordered after it otherwise */
    OK(galloc_pool_trim(pool, 0, NULL));
    EXPECT_EQ(log_lines, 1);
    expect_said("3 bytes, the first 8 from its start, 0x01");
    EXPECT(!log_says("before the block"));
    OK(galloc_free(next, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* Whatever a trim lacks for a check, the blocks leave the quarantine unchecked, and nobody has them too early. */
TEST(a_quarantine_that_cannot_be_checked_ends_unchecked)
{
    enum { WAIT, NO_STREAM, MARKS, WAYS };
    for (int way = 0; way < WAYS; way++) {
        begin_backed(SIM_PACE_STILL);
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = pool_quarantine(0);
        void *p[3];
        for (int i = 0; i < 3; i++) p[i] = get_used(pool, MIB(1), s, 1);
        for (int i = 0; i < 3; i++) OK(galloc_free(p[i], s));
        if (way == WAIT) sim_fail("cuMemFreeHost", 1, 1, cudaErrorUnknown);
        if (way == NO_STREAM) sim_fail("cuStreamCreate", 1, 1, cudaErrorUnknown);
        if (way == MARKS) inside_drain_marks(pool);
        if (way == MARKS) sim_fail_malloc(1, 1);
        (void)galloc_pool_trim(pool, 0, NULL);
        sim_fail_clear();
        sim_fail_malloc(0, 0);
        EXPECT_EQ(stats_of(pool).checks + stats_of(pool).unchecked, 3);
        EXPECT(stats_of(pool).unchecked > 0);
        EXPECT_EQ(galloc_pool_check(pool), 0);
        for (int i = 0; i < 3; i++) p[i] = get_used(pool, MIB(1), t, 2);
        for (int i = 0; i < 3; i++) OK(galloc_free(p[i], t));
        sim_run(-1);
        expect_healthy(pool, 1);
        pool_end(pool);
        stream_end(s);
        stream_end(t);
        finish();
    }
}

/* A block leaves the quarantine in a call on another stream: that may look at it only once the first one's work is
   known to be complete. */
TEST(a_block_leaves_the_quarantine_in_order)
{
    begin_backed(SIM_PACE_STILL);
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_quarantine(KIB(8));
    void *p = get(pool, 8000, s), *q;
    sim_hold(s, 1);
    write_at(p, 0, 1, 8000, s);
    OK(galloc_free(p, s));
    q = get(pool, 8000, t);
    OK(galloc_free(q, t)); /* p leaves, unchecked */
    EXPECT_EQ(stats_of(pool).unchecked, 1);
    sim_hold(s, 0);
    look_now(pool);
    EXPECT_EQ(sim_findings(SIM_RACE), 0);
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* A block that takes more than the quarantine may have does not enter it, and pushes nothing out of it. */
TEST(a_block_larger_than_the_quarantine_leaves_the_others_there)
{
    begin_backed(SIM_PACE_PROMPT);
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_quarantine(100000);
    void *p = get(pool, 50000, s), *q = get(pool, 99990, s); /* which takes 100352 */
    OK(galloc_free(p, s));
    OK(galloc_free(q, s));
    OK(cudaStreamSynchronize(s));
    void *other = get(pool, 50000, s);
    EXPECT(other != p);
    OK(galloc_free(other, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* The stream that looks at a block stays known until it has, also if it frees without a look of its own. */
TEST(a_stream_that_checks_what_leaves_the_quarantine_is_awaited)
{
    begin_backed(SIM_PACE_PROMPT);
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_config config = config_limit(MIB(64));
    config.debug = GUARDS | POISON | QUARANTINE;
    galloc_pool *pool = pool_new(&config);
    void *p[3];
    for (int i = 0; i < 3; i++) p[i] = get(pool, MIB(1), s);
    for (int i = 0; i < 3; i++) OK(galloc_free(p[i], s));
    for (int i = 0; i < 40; i++) OK(galloc_free(get(pool, 512, s), s)); /* the work of those before is complete */
    OK(galloc_pool_set_limit(pool, MIB(16))); /* and the quarantine has too much */
    OK(cudaStreamSynchronize(s));
    sim_hold(s, 1);
    void *q = get(pool, MIB(1), s); /* its guard is queued on s, so that t cannot look at it */
    OK(galloc_free(q, t));
    EXPECT_EQ(galloc_pool_check(pool), 0);
    sim_hold(s, 0);
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* The quarantine has its bound whichever call frees. */
TEST(the_quarantine_is_bounded_for_each_kind_of_free)
{
    for (int after = 0; after < 2; after++) {
        begin_backed(SIM_PACE_PROMPT);
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_quarantine(KIB(8));
        for (int i = 0; i < 20; i++) {
            void *p = get(pool, 8000, s);
            if (after) OK(galloc_free_after(p, &s, 1));
            else OK(galloc_free(p, s));
        }
        look_now(pool);
        EXPECT_EQ(stats_of(pool).checks, 19); /* one is there still */
        EXPECT_EQ(stats_of(pool).unchecked, 0);
        EXPECT(stats_of(pool).reserved.current <= MIB(2));
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

/* A large block takes the place of many small ones: as many leave as it needs. */
TEST(several_blocks_leave_the_quarantine_for_a_large_one)
{
    begin_backed(SIM_PACE_PROMPT);
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_quarantine(KIB(8));
    void *p[8], *large = get(pool, KIB(6), s);
    for (int i = 0; i < 8; i++) p[i] = get(pool, KIB(1), s);
    for (int i = 0; i < 8; i++) OK(galloc_free(p[i], s));
    look_now(pool);
    expect_checks(pool, 0, 0); /* they are just its most */
    OK(galloc_free(large, s));
    look_now(pool);
    expect_checks(pool, 6, 0);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* It is not reused before the stream that looks at it has done so. */
TEST(a_block_that_leaves_the_quarantine_waits_for_its_check)
{
    begin_backed(SIM_PACE_STILL);
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_config config = galloc_config_default();
    config.debug = QUARANTINE;
    config.quarantine_bytes = KIB(8);
    config.reuse = GALLOC_REUSE_COMPLETED;
    galloc_pool *pool = pool_new(&config);
    void *p = get(pool, 8000, s), *q = get(pool, 8000, t), *r[4];
    OK(galloc_free(p, s));
    look_now(pool);
    sim_hold(t, 1);
    OK(galloc_free(q, t)); /* p leaves, and t looks at it */
    EXPECT_EQ(stats_of(pool).unchecked, 0);
    for (int i = 0; i < 4; i++) {
        r[i] = get(pool, 8000, s);
        write_at(r[i], 0, 1, 8000, s);
    }
    sim_hold(t, 0);
    OK(cudaDeviceSynchronize());
    EXPECT_EQ(sim_findings(SIM_RACE), 0);
    for (int i = 0; i < 4; i++) OK(galloc_free(r[i], s));
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

static struct {
    cudaStream_t stream;
    void *block;
    sem_t first_is_out, second_is_out, first_is_back;
} two;

static __thread int leaves; /* 1: this thread's free is the first to take a block out; 2: the second one */

static void wait_for_the_other(const char *function)
{
    int which = leaves;
    if (!which || strcmp(function, "cuMemcpyDtoHAsync")) return;
    leaves = 0;
    sem_post(which == 1 ? &two.first_is_out : &two.second_is_out);
    sem_wait(which == 1 ? &two.second_is_out : &two.first_is_back);
}

static void *free_second(void *arg)
{
    (void)arg;
    sem_wait(&two.first_is_out);
    leaves = 2;
    OK(galloc_free(two.block, two.stream));
    sem_post(&two.second_is_out); /* also where it took nothing out */
    return NULL;
}

/* Two frees take a block out of the quarantine at once. The first of these blocks may be free while the other one is
   still being looked at. */
TEST(two_blocks_leave_the_quarantine_at_once)
{
    pthread_t thread;
    begin_backed(SIM_PACE_PROMPT);
    cudaStream_t s = stream_new(), t = two.stream = stream_new();
    galloc_pool *pool = pool_quarantine(KIB(8));
    void *p = get(pool, KIB(4), s), *q = get(pool, KIB(4), t), *r = get(pool, KIB(4), s);
    two.block = get(pool, KIB(4), t);
    OK(galloc_free(p, s));
    OK(galloc_free(q, t));
    look_now(pool);
    sem_init(&two.first_is_out, 0, 0);
    sem_init(&two.second_is_out, 0, 0);
    sem_init(&two.first_is_back, 0, 0);
    sim_hook(wait_for_the_other, NULL);
    EXPECT_EQ(pthread_create(&thread, NULL, free_second, NULL), 0);
    leaves = 1;
    OK(galloc_free(r, s));
    sem_post(&two.first_is_out);
    sem_post(&two.first_is_back);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
    sim_hook(NULL, NULL);
    EXPECT_EQ(galloc_pool_check(pool), 0);
    look_now(pool);
    expect_checks(pool, 2, 0);
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* Memory in quarantine is freed before a request is refused. */
TEST(the_quarantine_gives_way_to_requests)
{
    begin_backed(SIM_PACE_RANDOM);
    cudaStream_t s = stream_new();
    galloc_config config = config_limit(MIB(64));
    config.debug = QUARANTINE;
    config.quarantine_bytes = MIB(64);
    galloc_pool *pool = pool_new(&config);
    void *p = get(pool, MIB(40), s), *q;
    OK(galloc_free(p, s));
    q = get(pool, MIB(48), s);
    EXPECT_EQ(stats_of(pool).unchecked, 1);
    EXPECT_EQ(log_lines, 0);
    OK(galloc_free(q, s));
    expect_healthy(pool, 1);
    EXPECT_EQ(galloc_pool_malloc(pool, &p, MIB(65), s), cudaErrorMemoryAllocation);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* Also before any other: one that fails at once, of a reserve, with room, of a captured stream, of a growth. */
TEST(the_quarantine_gives_way_to_requests_of_all_kinds)
{
    enum { AT_ONCE, RESERVE, ROOM, CAPTURED, GROWTH, KINDS };
    for (int kind = 0; kind < KINDS; kind++) {
        begin_backed(SIM_PACE_RANDOM);
        cudaStream_t s = stream_new();
        cudaGraph_t graph = NULL;
        galloc_config config = config_limit(MIB(64));
        config.throw_on_cudamalloc_oom = kind == AT_ONCE;
        config.debug = QUARANTINE;
        config.quarantine_bytes = MIB(64);
        galloc_pool *pool = pool_new(&config);
        void *p = kind == GROWTH ? get_growable(pool, MIB(2), MIB(50), s) : NULL;
        OK(galloc_free(get(pool, MIB(40), s), s));
        if (kind == CAPTURED) {
            look_now(pool);
            OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
        }
        if (kind == GROWTH) OK(galloc_resize(p, MIB(50), s));
        else if (kind == RESERVE) OK(galloc_pool_reserve(pool, MIB(60)));
        else p = get_growable(pool, MIB(40), kind == ROOM ? MIB(60) : 0, s);
        if (p) OK(galloc_free(p, s));
        if (kind == CAPTURED) {
            OK(cudaStreamEndCapture(s, &graph));
            OK(cudaGraphDestroy(graph));
        }
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

typedef struct keeper {
    void *block;
    cudaStream_t s;
    int calls;
} keeper;

static int frees_what_it_kept(const galloc_report *report, void *user)
{
    keeper *k = user;
    (void)report;
    if (k->calls++) return 0;
    OK(galloc_free(k->block, k->s));
    return 1;
}

/* Also what the program has put there in on_oom. */
TEST(what_on_oom_frees_into_the_quarantine_serves_the_request)
{
    begin_backed(SIM_PACE_RANDOM);
    keeper k = {NULL, stream_new(), 0};
    galloc_callbacks calls = {.on_oom = frees_what_it_kept, .user = &k};
    galloc_config config = config_limit(MIB(64));
    config.debug = QUARANTINE;
    config.quarantine_bytes = MIB(64);
    galloc_pool *pool = pool_new(&config);
    OK(galloc_pool_set_callbacks(pool, &calls));
    void *live = get(pool, MIB(20), k.s);
    k.block = get(pool, MIB(40), k.s);
    void *p = get(pool, MIB(40), k.s);
    EXPECT_EQ(k.calls, 1);
    OK(galloc_free(p, k.s));
    OK(galloc_free(live, k.s));
    pool_end(pool);
    stream_end(k.s);
    finish();
}

/* Likewise before a request of another pool of the device is refused. */
TEST(the_quarantine_gives_way_to_other_pools)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_config config = galloc_config_default();
    config.device_limit = MIB(64);
    galloc_pool *kept = pool_quarantine(MIB(4)), *other = pool_new(&config);
    OK(galloc_free(get(kept, MIB(4), s), s));
    OK(galloc_free(get_used(kept, MIB(20), t, 1), t)); /* larger than the quarantine */
    OK(galloc_free(get(other, MIB(56), s), s)); /* there is enough beside the quarantine, after a wait */
    EXPECT_EQ(stats_of(kept).unchecked, 0);
    OK(galloc_free(get(other, MIB(62), s), s));
    EXPECT_EQ(stats_of(kept).reserved.current, 0);
    EXPECT_EQ(stats_of(kept).unchecked, 1);
    pool_end(kept);
    pool_end(other);
    stream_end(s);
    stream_end(t);
    finish();
}

/* Also to a request that may not wait for the device, if nothing has to be waited for. */
TEST(the_quarantine_gives_way_to_other_pools_without_a_wait)
{
    for (int way = 0; way < 4; way++) {
        int captured = way & 1, fixed = way >> 1; /* cudaFree would wait */
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new(), busy = stream_new();
        cudaGraph_t graph = NULL;
        galloc_config config = galloc_config_default();
        config.device_limit = MIB(64);
        if (!captured) config.wait_limit_ms = 0;
        galloc_config keeps = galloc_config_default();
        OK(galloc_config_parse(&keeps, fixed ? "debug:quarantine,quarantine_bytes:60M,expandable_segments:False"
                                             : "debug:quarantine,quarantine_bytes:60M", NULL, 0));
        galloc_pool *kept = pool_new(&keeps), *other = pool_new(&config);
        void *p[4], *q;
        for (int i = 0; i < 4; i++) p[i] = get_used(kept, MIB(10), t, 1);
        for (int i = 0; i < 4; i++) OK(galloc_free(p[i], t));
        OK(cudaStreamSynchronize(t));
        OK(galloc_free(get_used(kept, KIB(512), busy, 1), busy));
        if (captured) OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
        q = get(other, MIB(16), s); /* beside the quarantine */
        EXPECT_EQ(stats_of(kept).unchecked, 0);
        OK(galloc_free(q, s));
        long waits = sim_blocking_calls();
        q = NULL;
        EXPECT_EQ(galloc_pool_malloc(other, &q, MIB(40), s), fixed ? cudaErrorMemoryAllocation : cudaSuccess);
        EXPECT_EQ(sim_blocking_calls(), waits);
        EXPECT_EQ(stats_of(kept).unchecked, fixed ? 0 : 5);
        if (q) OK(galloc_free(q, s));
        if (captured) OK(cudaStreamEndCapture(s, &graph));
        if (captured) OK(cudaGraphDestroy(graph));
        pool_end(kept);
        pool_end(other);
        stream_end(s);
        stream_end(t);
        stream_end(busy);
        finish();
    }
}

TEST(the_quarantine_is_in_no_list_of_what_is_live)
{
    begin_backed(SIM_PACE_RANDOM);
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_quarantine(0);
    char text[GALLOC_REPORT_TEXT];
    OK(galloc_free(get(pool, 5000, s), s));
    void *p = get(pool, 300, s);
    OK(galloc_live_text(pool, text, sizeof text));
    EXPECT(strstr(text, "blocks in use: 1, of 300 bytes") != NULL);
    OK(galloc_free(p, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* A thread whose default stream is being captured ends the pool: then the last blocks cannot be checked. */
TEST(the_end_of_a_pool_does_not_disturb_the_threads_own_capture)
{
    begin_backed(SIM_PACE_RANDOM);
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_quarantine(0);
    cudaGraph_t graph = NULL;
    size_t nodes = 9;
    OK(galloc_free(get(pool, 5000, s), s));
    OK(cudaStreamBeginCapture(cudaStreamPerThread, cudaStreamCaptureModeRelaxed));
    pool_end(pool);
    OK(cudaStreamEndCapture(cudaStreamPerThread, &graph));
    OK(cudaGraphGetNodes(graph, NULL, &nodes));
    EXPECT_EQ(nodes, 0);
    OK(cudaGraphDestroy(graph));
    stream_end(s);
    finish();
}

/* Nothing can be checked: blocks leave the quarantine all the same, and no memory is lost to it. */
TEST(blocks_that_cannot_be_checked_leave_the_quarantine)
{
    static const char *const calls[] = {"cuMemHostAlloc", "cuMemcpyDtoHAsync"};
    for (int i = 0; i < 2; i++) {
        begin_backed(SIM_PACE_PROMPT);
        cudaStream_t s = stream_new();
        sim_fail(calls[i], 1, 1, cudaErrorUnknown);
        galloc_pool *pool = pool_quarantine(KIB(8));
        for (int k = 0; k < 20; k++) OK(galloc_free(get(pool, 8000, s), s));
        EXPECT_EQ(stats_of(pool).checks, 0);
        EXPECT_EQ(stats_of(pool).unchecked, 19); /* one is there still */
        EXPECT(stats_of(pool).reserved.current <= MIB(2));
        expect_healthy(pool, 1);
        if (i) sim_fail_clear(); /* the end of the pool checks the last one */
        pool_end(pool);
        EXPECT_EQ(log_lines, 0);
        sim_fail_clear();
        stream_end(s);
        finish();
    }
}

/* The last block cannot be looked at: its page goes with the pool nevertheless. */
TEST(a_pool_ends_though_its_last_block_cannot_be_looked_at)
{
    begin_backed(SIM_PACE_STILL);
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_quarantine(MIB(1));
    void *p = get(pool, 8000, s);
    OK(galloc_free(p, s));
    write_at(p, 0, 1, 1, s); /* is not found */
    OK(cudaStreamSynchronize(s));
    OK(galloc_pool_trim(pool, SIZE_MAX, NULL)); /* notices that the work is complete */
    sim_fail("cuMemcpyDtoHAsync", 1, 1, cudaErrorUnknown);
    uint64_t waits = stats_of(pool).driver.stream_synchronize;
    OK(galloc_pool_trim(pool, 0, NULL));
    EXPECT_EQ(sim_failed(), 1);
    EXPECT_EQ(stats_of(pool).driver.stream_synchronize, waits); /* there is no copy to wait for */
    EXPECT_EQ(stats_of(pool).unchecked, 1);
    EXPECT_EQ(stats_of(pool).reserved.current, 0);
    sim_fail_clear();
    pool_end(pool);
    EXPECT_EQ(log_lines, 0);
    stream_end(s);
    finish();
}

/* The host has no memory for the mark of a check: the block leaves the quarantine unchecked. */
TEST(a_block_leaves_the_quarantine_without_host_memory)
{
    begin_backed(SIM_PACE_STILL);
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_quarantine(KIB(8));
    void *p = get(pool, 8000, s), *q = get(pool, 8000, s);
    OK(galloc_free(p, s));
    inside_drain_marks(pool);
    sim_fail_malloc(1, 1);
    OK(galloc_free(q, s)); /* p leaves */
    EXPECT(sim_failed_mallocs() > 0);
    sim_fail_malloc(0, 0);
    EXPECT_EQ(stats_of(pool).unchecked, 1);
    EXPECT_EQ(stats_of(pool).driver.copy, 0);
    expect_healthy(pool, 1);
    pool_end(pool);
    stream_end(s);
    finish();
}

static struct {
    void *block;
    cudaStream_t stream;
    const char *function;
    int calls; /* of the function that come first */
} freed_between;

static void free_between(const char *function)
{
    void *block = freed_between.block;
    if (!block || strcmp(function, freed_between.function) || freed_between.calls-- > 0) return;
    freed_between.block = NULL;
    OK(galloc_free(block, freed_between.stream));
}

static void free_before(void *block, cudaStream_t stream, const char *function)
{
    freed_between.block = block;
    freed_between.stream = stream;
    freed_between.function = function;
    freed_between.calls = 0;
    sim_hook(free_between, NULL);
}

/* A resize reads the old guard, long after the block was got, and sets no new one. Another stream, which was ordered
   before that, frees the block: it gets the memory once it has been read. */
TEST(the_copy_of_a_resize_is_a_use_of_the_block)
{
    enum { BLOCKS = 4 };
    begin_backed(SIM_PACE_STILL);
    cudaStream_t s = stream_new(), t = stream_new(), u = stream_new();
    galloc_pool *pool = pool_debug(GUARDS);
    void *p = get_growable(pool, 5000, MIB(2), s), *of_t = get(pool, 512, t), *q[BLOCKS];
    inside_ask_for_event(pool, stream_id(s));
    OK(galloc_free(get_used(pool, 512, s, 1), s));
    OK(galloc_record_stream(p, u));
    order(s, t);
    sim_run(-1);
    OK(galloc_pool_trim(pool, SIZE_MAX, NULL)); /* notices that all work so far is complete */
    sim_hold(s, 1);
    OK(galloc_resize(p, 6000, s));
    OK(galloc_free(p, t));
    for (int i = 0; i < BLOCKS; i++) put(t, q[i] = get(pool, MIB(1), t), MIB(1), 2);
    sim_run(-1);
    sim_hold(s, 0);
    for (int i = 0; i < BLOCKS; i++) OK(galloc_free(q[i], t));
    OK(galloc_free(of_t, t));
    pool_end(pool);
    stream_end(s), stream_end(t), stream_end(u);
    finish();
}

static struct {
    galloc_pool *pool;
    size_t live, blocks;
    uint64_t frees;
    int looks;
} leaving;

static void look_while_it_leaves(const char *function)
{
    if (strcmp(function, "cuMemcpyDtoHAsync")) return;
    galloc_stats stats = stats_of(leaving.pool);
    EXPECT_EQ(stats.live.current, leaving.live);
    EXPECT_EQ(stats.blocks.current, leaving.blocks);
    EXPECT(stats.frees >= leaving.frees);
    EXPECT_EQ(stats.live.current + stats.free_bytes <= stats.reserved.current, 1);
    expect_healthy(leaving.pool, 1);
    leaving.looks++;
}

/* A block stays freed while it leaves the quarantine and is looked at: other threads do not count it as used again. */
TEST(a_block_that_leaves_the_quarantine_stays_freed)
{
    enum { BLOCKS = 8 };
    begin_backed(SIM_PACE_PROMPT);
    cudaStream_t s = stream_new();
    galloc_pool *pool = leaving.pool = pool_quarantine(KIB(24));
    void *p[BLOCKS], *used = get(pool, 5000, s);
    for (int i = 0; i < BLOCKS; i++) p[i] = get(pool, 8000, s);
    leaving.looks = 0;
    for (int i = 0; i < BLOCKS; i++) {
        leaving.live = 5000 + 8000 * (size_t)(BLOCKS - 1 - i);
        leaving.blocks = (size_t)(BLOCKS - i);
        leaving.frees = (uint64_t)i;
        sim_hook(look_while_it_leaves, NULL);
        OK(galloc_free(p[i], s));
        sim_hook(NULL, NULL);
    }
    EXPECT(leaving.looks >= BLOCKS - 4);
    OK(galloc_free(used, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

static size_t largest_meanwhile;

static void ask_for_the_largest(const char *function)
{
    if (!strcmp(function, "cuMemcpyDtoHAsync")) largest_meanwhile = stats_of(leaving.pool).largest_free;
}

/* While it is looked at, it is in no bin, and yet counts as free memory in one piece. */
TEST(the_largest_free_block_may_be_leaving_the_quarantine)
{
    begin_backed(SIM_PACE_PROMPT);
    cudaStream_t s = stream_new();
    galloc_pool *pool = leaving.pool = pool_quarantine(MIB(16));
    void *p = get(pool, MIB(14), s), *q = get(pool, MIB(4), s);
    OK(galloc_free(p, s));
    largest_meanwhile = 0;
    sim_hook(ask_for_the_largest, NULL);
    OK(galloc_free(q, s)); /* p leaves */
    sim_hook(NULL, NULL);
    EXPECT_EQ(largest_meanwhile, MIB(14));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* Blocks leave the quarantine one by one. A call on a stream of another context comes in between: it may check none. */
TEST(a_stream_of_another_context_checks_no_block_of_the_quarantine)
{
    begin_backed(SIM_PACE_STILL);
    CUcontext other = NULL;
    cudaStream_t s = stream_new(), t;
    galloc_pool *pool = pool_quarantine(KIB(24));
    void *p[4], *x;
    for (int i = 0; i < 3; i++) p[i] = get(pool, 8000, s);
    p[3] = get(pool, 16000, s);
    OK(sim_green_create(&other, 0));
    OK(cuCtxPushCurrent(other));
    t = stream_new();
    x = get(pool, 1000, t);
    OK(cuCtxPopCurrent(&other));
    for (int i = 0; i < 3; i++) OK(galloc_free(p[i], s));
    OK(cudaDeviceSynchronize());
    OK(galloc_pool_trim(pool, SIZE_MAX, NULL)); /* notices that the work is complete */
    free_before(x, t, "cuMemcpyDtoHAsync");
    OK(galloc_free(p[3], s)); /* the first two leave; the call on t comes while the first is looked at */
    sim_hook(NULL, NULL);
    EXPECT(freed_between.block == NULL);
    EXPECT_EQ(stats_of(pool).unchecked, 1);
    EXPECT_EQ(stats_of(pool).driver.copy, 2); /* of both ends of the first */
    expect_healthy(pool, 1);
    stream_end(t);
    OK(sim_green_destroy(other));
    pool_end(pool);
    EXPECT_EQ(log_lines, 0);
    stream_end(s);
    finish();
}

/* The kept blocks of like:pytorch would not be counted as PyTorch does: there are none. */
TEST(like_pytorch_has_no_quarantine)
{
    begin_backed(SIM_PACE_PROMPT);
    cudaStream_t s = stream_new();
    galloc_config config = galloc_config_default();
    OK(galloc_config_parse(&config, "like:pytorch,debug:quarantine", NULL, 0));
    galloc_pool *pool = pool_new(&config);
    void *p = get(pool, 1000, s);
    OK(galloc_free(p, s));
    void *q = get(pool, 1000, s);
    EXPECT(q == p);
    OK(galloc_free(q, s));
    EXPECT_EQ(stats_of(pool).live.current, 0);
    EXPECT_EQ(galloc_pool_check(pool), 0);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* ---- settings, sampling, cost ------------------------------------------------------------------------------------ */

/* A sparse sample poisons blocks of at most 1 MiB. */
TEST(a_sparse_sample_poisons_no_large_block)
{
    for (int large = 0; large < 2; large++) {
        begin();
        cudaStream_t s = stream_new();
        galloc_config config = galloc_config_default();
        OK(galloc_config_parse(&config, "debug:poison,debug_sample:64", NULL, 0));
        galloc_pool *pool = pool_new(&config);
        for (int i = 0; i < 1000; i++) OK(galloc_free(get(pool, MIB(1) + (large ? 512 : 0), s), s));
        EXPECT_EQ(stats_of(pool).driver.memset > 0, !large);
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

TEST(one_block_in_so_many_is_guarded)
{
    begin_backed(SIM_PACE_PROMPT);
    cudaStream_t s = stream_new();
    galloc_config config = galloc_config_default();
    OK(galloc_config_parse(&config, "debug:guards+poison,debug_sample:3", NULL, 0));
    EXPECT_EQ(config.debug, GUARDS | POISON);
    EXPECT_EQ(config.debug_sample, 3);
    galloc_pool *pool = pool_new(&config);
    int found = 0;
    for (int i = 0; i < 9; i++) {
        void *p = get(pool, 1000, s);
        write_at(p, 1000, 0, 1, s);
        OK(galloc_free(p, s));
        look_now(pool);
        found += i % 3 == 0;
        EXPECT_EQ(stats_of(pool).damages, found);
    }
    EXPECT_EQ(found, 3);
    EXPECT_EQ(stats_of(pool).driver.memset, 6);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* Of many allocations few get a guard. Stream caches and short paths serve the others, and these cost what they cost
   without debug. */
TEST(few_guarded_blocks_leave_the_others_to_the_caches)
{
    enum { SAMPLE = 100, PAIRS = 100 * SAMPLE };
    begin_backed(SIM_PACE_PROMPT);
    cudaStream_t s = stream_new();
    galloc_config config = galloc_config_default();
    OK(galloc_config_parse(&config, "debug:guards+poison,debug_sample:100", NULL, 0));
    galloc_pool *pool = pool_new(&config);
    for (int round = 0; round < 3; round++) {
        galloc_stats before = stats_of(pool);
        size_t kinds = round == 2 ? 40 : 1, served = 0;
        for (int i = 0; i < PAIRS; i++) {
            void *p = get(pool, 1000 * (1 + (size_t)i % kinds), s);
            if (round != 1) write_at(p, (ptrdiff_t)(1000 * (1 + (size_t)i % kinds)), 0, 1, s);
            OK(galloc_free(p, s));
            served += inside_stream_of(pool, stream_id(s)).open;
        }
        OK(galloc_pool_trim(pool, 0, NULL)); /* it waits for the device; no event tells of few checks */
        galloc_stats after = stats_of(pool);
        uint64_t checks = after.checks - before.checks, damages = after.damages - before.damages;
        EXPECT(checks >= PAIRS / SAMPLE / 2 && checks <= 2 * PAIRS / SAMPLE);
        EXPECT_EQ(damages, round == 1 ? 0 : checks);
        EXPECT(served > PAIRS - 2 * checks - 1);
        OK(galloc_pool_stats_reset(pool));
    }
    pool_end(pool);
    stream_end(s);
    finish();
}

/* Calls that flush the stream caches keep no allocation from its guard, however often a program makes them. */
TEST(flushes_of_the_caches_leave_the_sample_as_it_is)
{
    enum { SAMPLE = 64, PAIRS = 100 * SAMPLE };
    for (int kind = 0; kind < 6; kind++) {
        begin_backed(SIM_PACE_PROMPT);
        cudaStream_t s = stream_new();
        galloc_config config = galloc_config_default();
        OK(galloc_config_parse(&config, "debug:guards,debug_sample:64", NULL, 0));
        galloc_pool *pool = pool_new(&config);
        for (int i = 1; i <= PAIRS; i++) {
            void *p = get(pool, 1000, s);
            int due = i % (kind < 3 ? 20 : SAMPLE / 2) == 0;
            if (due && kind % 3 == 0) OK(galloc_resize(p, 1000, s));
            if (due && kind % 3 == 1) OK(galloc_pool_trim(pool, SIZE_MAX, NULL));
            OK(galloc_free(p, s));
            if (due && kind % 3 == 2) OK(galloc_pool_trim(pool, SIZE_MAX, NULL));
            if (due && kind % 3 == 2) OK(galloc_pool_stats_reset(pool));
        }
        OK(cudaStreamSynchronize(s));
        /* every guard is checked at the free, or just before it by the resize; the last few wait */
        long guards = sim_calls("cuMemsetD8Async");
        EXPECT(guards >= PAIRS / SAMPLE / 2 && guards <= 2 * PAIRS / SAMPLE);
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

/* So it is where sizes are rounded: blocks of many sizes, more than caches have, and each in so many has a guard. */
TEST(rounded_blocks_are_sampled_too)
{
    enum { SAMPLE = 50, N = 64, ROUNDS = 50 };
    static const char *const settings[] = {"debug:guards,debug_sample:50,roundup_power2_divisions:4",
                                           "debug:guards,debug_sample:50"};
    for (int k = 0; k < 2; k++) {
        begin();
        cudaStream_t s = stream_new();
        galloc_config config = galloc_config_default();
        OK(galloc_config_parse(&config, settings[k], NULL, 0));
        galloc_pool *pool = pool_new(&config);
        void *p[N];
        OK(galloc_free(get(pool, MIB(64), s), s));
        for (size_t i = 0; i < ROUNDS; i++) {
            for (size_t j = 0; j < N; j++) p[j] = get(pool, 5000 + 1000 * ((i * N + j) % 997), s);
            for (size_t j = 0; j < N; j++) OK(galloc_free(p[j], s));
        }
        look_now(pool);
        EXPECT(stats_of(pool).checks >= N * ROUNDS / SAMPLE - 2 && stats_of(pool).checks <= N * ROUNDS / SAMPLE + 2);
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

/* Where few blocks are guarded, their guards are the bytes that rounding leaves, so that no size changes. If all sizes
   are round, there are no guards. */
TEST(few_guards_change_no_size)
{
    enum { SAMPLE = 100, PAIRS = 40 * SAMPLE };
    static const struct {
        const char *debug;
        size_t bytes, most, least, guards;
    } cases[] = {{"guards", KIB(64) - 16, KIB(64), 34, 46},   {"guards", MIB(3) - 100, MIB(3), 34, 46},
                 {"guards", KIB(64), KIB(64), 0, 0},          {"guards", KIB(64) - 15, KIB(64), 0, 0},
                 {"guards", MIB(3), MIB(3), 0, 0},            {"guards+poison", MIB(3) - 100, MIB(3), 0, 0},
                 {"guards+poison", KIB(64) - 16, KIB(64), 34, 46}};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        begin_backed(SIM_PACE_PROMPT);
        cudaStream_t s = stream_new();
        galloc_config config = galloc_config_default();
        char text[64];
        snprintf(text, sizeof text, "debug:%s,debug_sample:%d", cases[k].debug, SAMPLE);
        OK(galloc_config_parse(&config, text, NULL, 0));
        galloc_pool *pool = pool_new(&config);
        for (int i = 0; i < PAIRS; i++) {
            void *p = get(pool, cases[k].bytes, s);
            write_at(p, (ptrdiff_t)cases[k].bytes, 0, 1, s);
            OK(galloc_free(p, s));
        }
        OK(galloc_pool_trim(pool, 0, NULL)); /* it waits for the device; no event tells of few checks */
        EXPECT(stats_of(pool).checks >= cases[k].least && stats_of(pool).checks <= cases[k].guards);
        EXPECT_EQ(stats_of(pool).damages, stats_of(pool).checks);
        EXPECT_EQ(stats_of(pool).allocated.peak, cases[k].most);
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

/* With guards alone a sample changes nothing but what it checks: a program gets the same places, from the same pages,
   as without debug, on one stream and on two, for sizes that come once and for sizes that stream caches serve. */
TEST(sampled_guards_leave_all_places_as_they_are)
{
    enum { OPS = 6000, LIVE = 50 };
    static uintptr_t places[OPS];
    for (int i = 0; i < 8; i++) {
        int few = i / 4, streams = 1 + i / 2 % 2, guarded = i % 2;
        unsigned state = 1;
        uintptr_t base = 0;
        static uint64_t pages, moves;
        begin_backed(SIM_PACE_PROMPT);
        cudaStream_t s[2] = {stream_new(), stream_new()};
        galloc_config config = galloc_config_default();
        if (guarded) OK(galloc_config_parse(&config, "debug:guards,debug_sample:100", NULL, 0));
        galloc_pool *pool = pool_new(&config);
        void *live[LIVE] = {NULL};
        int owner[LIVE] = {0};
        for (int k = 0; k < OPS; k++) {
            state = state * 1664525u + 1013904223u;
            size_t at = (state >> 8) % LIVE, bytes = 1 + (state >> 16) % (k % 3 ? KIB(4) : KIB(2000));
            if (few) bytes = (state >> 20) % 16 ? 512 * (1 + bytes % 3) : 300 * (1 + bytes % 3);
            if (live[at]) OK(galloc_free(live[at], s[owner[at]]));
            if (!few || k % 200 == 0) owner[at] = (int)(state >> 28) % streams;
            live[at] = get(pool, bytes, s[owner[at]]);
            if (!base) base = (uintptr_t)live[at];
            if (guarded) EXPECT_EQ((uintptr_t)live[at] - base, places[k]);
            else places[k] = (uintptr_t)live[at] - base;
        }
        if (guarded) EXPECT(stats_of(pool).grows == pages && stats_of(pool).moves == moves);
        pages = stats_of(pool).grows;
        moves = stats_of(pool).moves;
        for (int k = 0; k < LIVE; k++)
            if (live[k]) OK(galloc_free(live[k], s[owner[k]]));
        OK(galloc_pool_trim(pool, 0, NULL));
        EXPECT((stats_of(pool).checks >= OPS / 100 / (few ? 3U : 1U) - 10) == guarded);
        EXPECT_EQ(stats_of(pool).damages + stats_of(pool).unchecked, 0);
        EXPECT_EQ(galloc_pool_check(pool), 0);
        pool_end(pool);
        stream_end(s[0]);
        stream_end(s[1]);
        finish();
    }
}

/* A step has one request with a guard among many that have none. However long the step, that request is met. */
TEST(the_one_request_of_a_step_that_fits_is_sampled)
{
    static const int samples[] = {64, 64, 1000, 1000, 1000, 1000}, steps[] = {4, 5, 3, 21, 31, 62};
    for (int k = 0; k < 6; k++) {
        begin();
        cudaStream_t s = stream_new();
        galloc_config config = galloc_config_default();
        OK(galloc_config_parse(&config, "debug:guards", NULL, 0));
        config.debug_sample = (uint64_t)samples[k];
        galloc_pool *pool = pool_new(&config);
        void *live = get(pool, 512, s);
        for (int i = 0; i < 100 * samples[k]; i++) OK(galloc_free(get(pool, i % steps[k] ? 1024 : 1000, s), s));
        EXPECT(sim_calls("cuMemsetD8Async") > 10);
        OK(galloc_free(live, s));
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

/* However many streams share the work, one allocation in debug_sample has a guard, also where no cache is flushed. */
TEST(streams_do_not_thin_out_the_sample)
{
    enum { SAMPLE = 100, PAIRS = 400 * SAMPLE, STREAMS = 16 };
    for (int streams = 1; streams <= STREAMS; streams *= 4) {
        begin();
        cudaStream_t s[STREAMS];
        void *live[STREAMS];
        galloc_config config = galloc_config_default();
        OK(galloc_config_parse(&config, "debug:guards,debug_sample:100", NULL, 0));
        galloc_pool *pool = pool_new(&config);
        for (int i = 0; i < streams; i++) live[i] = get(pool, 512, s[i] = stream_new());
        for (int i = 0; i < PAIRS; i++) OK(galloc_free(get(pool, 1000, s[i % streams]), s[i % streams]));
        long guards = sim_calls("cuMemsetD8Async");
        EXPECT(guards > PAIRS / SAMPLE * 3 / 4 && guards < PAIRS / SAMPLE * 5 / 4);
        for (int i = 0; i < streams; i++) OK(galloc_free(live[i], s[i]));
        pool_end(pool);
        for (int i = 0; i < streams; i++) stream_end(s[i]);
        finish();
    }
}

/* A block that was freed on another stream than its own serves that one's cache, and may get a guard there. The guard
   is work of the stream that the block serves, so a third stream does not get the block before it is set. */
TEST(a_guard_is_work_of_the_stream_that_the_block_serves)
{
    int guarded = 0;
    for (int i = 0; i < 200; i++) {
        begin_backed(SIM_PACE_STILL);
        cudaStream_t a = stream_new(), b = stream_new(), c = stream_new();
        galloc_config config = galloc_config_default();
        OK(galloc_config_parse(&config, "debug:guards,debug_sample:64", NULL, 0));
        galloc_pool *pool = pool_new(&config);
        void *live[] = {get(pool, 512, a), get(pool, 512, b), get(pool, 512, c)};
        for (int k = 0; k < 6; k++) OK(galloc_free(get(pool, MIB(4), i % 2 ? b : a), i % 2 ? b : a)); /* is ahead */
        for (int k = 0; k < 6; k++) OK(galloc_free(get(pool, MIB(4), c), c));
        OK(cudaDeviceSynchronize());
        OK(galloc_pool_trim(pool, 0, NULL));
        for (int k = 0; k < i / 2; k++) OK(galloc_free(get(pool, 4000, b), b));
        void *p = get(pool, 1000, a);
        OK(cudaDeviceSynchronize());
        OK(galloc_free(p, b));
        for (int k = 0; k < 2; k++) OK(galloc_free(get(pool, 4000, b), b));
        OK(cudaDeviceSynchronize());
        sim_hold(b, 1);
        long before = sim_calls("cuMemsetD8Async");
        void *q = get(pool, 1000, b);
        guarded += q == p && sim_calls("cuMemsetD8Async") != before;
        OK(galloc_free(q, c));
        OK(cudaStreamSynchronize(c));
        q = get(pool, 1024, c);
        write_at(q, 0, 7, 1024, c);
        OK(cudaStreamSynchronize(c));
        sim_hold(b, 0);
        OK(cudaDeviceSynchronize());
        OK(galloc_free(q, c));
        OK(galloc_free(live[0], a));
        OK(galloc_free(live[1], b));
        OK(galloc_free(live[2], c));
        OK(galloc_pool_trim(pool, 0, NULL));
        EXPECT_EQ(stats_of(pool).damages, 0);
        pool_end(pool);
        stream_end(a);
        stream_end(b);
        stream_end(c);
        finish();
    }
    EXPECT(guarded > 0);
}

/* With several streams the bounds of a stream cache change at a sampled free, which does not flush it. */
TEST(streams_that_share_a_pool_have_their_samples)
{
    enum { SAMPLE = 64, PAIRS = 400 * SAMPLE };
    begin_backed(SIM_PACE_STILL);
    cudaStream_t s[2] = {stream_new(), stream_new()};
    galloc_config config = galloc_config_default();
    OK(galloc_config_parse(&config, "debug:guards,debug_sample:64", NULL, 0));
    galloc_pool *pool = pool_new(&config);
    for (int i = 0; i < PAIRS; i++) {
        cudaStream_t stream = s[i / 10 % 2];
        OK(galloc_free(get(pool, 1000 + (i % 90 ? 0 : KIB(100)), stream), stream));
        if (i % 16 == 0 || i < 6000) EXPECT_EQ(galloc_pool_check(pool), 0);
        if (i % 1000 == 0) OK(galloc_pool_trim(pool, SIZE_MAX, NULL));
    }
    long guards = sim_calls("cuMemsetD8Async");
    EXPECT(guards > PAIRS / SAMPLE * 3 / 4 && guards < PAIRS / SAMPLE * 9 / 8);
    pool_end(pool);
    stream_end(s[0]);
    stream_end(s[1]);
    finish();
}

/* Once the device has been waited for, memory of a default stream may be used on any stream at once. A check that is
   queued there does not read what the next block contains. */
TEST(sampled_checks_of_a_default_stream_race_with_nothing)
{
    cudaStream_t defaults[] = {0, cudaStreamLegacy, cudaStreamPerThread};
    for (int kind = 0; kind < 3; kind++) {
        begin_backed(SIM_PACE_RANDOM);
        cudaStream_t s = stream_new(), d = defaults[kind];
        galloc_config config = galloc_config_default();
        OK(galloc_config_parse(&config, "debug:guards,debug_sample:64", NULL, 0));
        galloc_pool *pool = pool_new(&config);
        for (int i = 0; i < 20 * 64; i++) {
            size_t bytes = i % 2 ? 1000 : 1024;
            void *p = get(pool, bytes, d);
            write_at(p, 0, i % 100, bytes, s);
            OK(cudaDeviceSynchronize());
            OK(galloc_free(p, d));
        }
        OK(galloc_pool_trim(pool, 0, NULL));
        EXPECT(stats_of(pool).checks > 10);
        EXPECT_EQ(stats_of(pool).damages, 0);
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

/* A program that makes the same allocations in each step, as many as debug_sample or a divisor of it, has each of them
   guarded in its turn, whether stream caches serve them or not. */
TEST(each_allocation_of_a_step_is_sampled)
{
    enum { SAMPLE = 64, STEPS = 1200 };
    static const char *const settings[] = {"debug:guards,debug_sample:64", "debug:guards,debug_sample:64,lane_bytes:0",
                                           "debug:guards+poison,debug_sample:64", "debug:guards,debug_sample:16"};
    for (int kind = 0; kind < 8; kind++) {
        int each = kind / 4 ? SAMPLE : SAMPLE / 4, guarded[SAMPLE] = {0}, all = 1;
        begin();
        cudaStream_t s = stream_new();
        galloc_config config = galloc_config_default();
        OK(galloc_config_parse(&config, settings[kind % 4], NULL, 0));
        galloc_pool *pool = pool_new(&config);
        for (int step = 0; step < STEPS; step++)
            for (int i = 0; i < each; i++) {
                long before = sim_calls("cuMemsetD8Async");
                void *p = get(pool, 1000, s);
                guarded[i] += sim_calls("cuMemsetD8Async") != before;
                OK(galloc_free(p, s));
            }
        int sum = 0, period = kind % 4 == 3 ? 16 : SAMPLE;
        for (int i = 0; i < each; sum += guarded[i++]) all = all && guarded[i];
        EXPECT(all);
        EXPECT(sum > STEPS * each / period * 7 / 8 && sum < STEPS * each / period * 9 / 8);
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

/* So it is where each step resets the statistics. */
TEST(a_reset_in_each_step_leaves_the_sample_even)
{
    enum { SAMPLE = 64, STEPS = 3000, EACH = 20 };
    int guarded[EACH] = {0}, sum = 0, few = 0;
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = galloc_config_default();
    OK(galloc_config_parse(&config, "debug:guards,debug_sample:64", NULL, 0));
    galloc_pool *pool = pool_new(&config);
    for (int step = 0; step < STEPS; step++) {
        OK(galloc_pool_stats_reset(pool));
        for (int i = 0; i < EACH; i++) {
            long before = sim_calls("cuMemsetD8Async");
            void *p = get(pool, 1000, s);
            guarded[i] += sim_calls("cuMemsetD8Async") != before;
            OK(galloc_free(p, s));
        }
    }
    for (int i = 0; i < EACH; sum += guarded[i++]) few += guarded[i] < STEPS / SAMPLE / 4;
    EXPECT_EQ(few, 0);
    EXPECT(sum > STEPS * EACH / SAMPLE * 7 / 8 && sum < STEPS * EACH / SAMPLE * 9 / 8);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* With a limit of waits nothing is checked on a default stream, and no guard is set there: the next block would be in
   use on another stream before. So would it be after a free for which there is no check left. */
TEST(guards_of_a_default_stream_race_with_nothing)
{
    enum { CHECKS = 1024 };
    for (int kind = 0; kind < 3; kind++) {
        begin_backed(SIM_PACE_RANDOM);
        cudaStream_t s = stream_new(), t = stream_new();
        void *held[CHECKS];
        galloc_config config = galloc_config_default();
        OK(galloc_config_parse(&config, kind == 1 ? "debug:guards,wait_limit_ms:1000" : "debug:guards", NULL, 0));
        galloc_pool *pool = pool_new(&config);
        for (int i = 0; kind == 2 && i < CHECKS; i++) held[i] = get(pool, 900, t);
        sim_hold(t, kind == 2);
        for (int i = 0; kind == 2 && i < CHECKS; i++) OK(galloc_free(held[i], t));
        for (int i = 0; i < 100; i++) {
            OK(galloc_free(get(pool, 900, cudaStreamLegacy), cudaStreamLegacy));
            void *p = get(pool, 1280, cudaStreamLegacy);
            write_at(p, 0, 1, 1280, s);
            OK(cudaStreamSynchronize(s));
            OK(galloc_free(p, cudaStreamLegacy));
        }
        sim_hold(t, 0);
        OK(galloc_pool_trim(pool, 0, NULL));
        EXPECT_EQ(stats_of(pool).checks + stats_of(pool).unchecked, 200 + (kind == 2) * CHECKS);
        if (kind == 1) EXPECT_EQ(sim_calls("cuStreamSynchronize"), 0);
        EXPECT_EQ(stats_of(pool).unchecked, kind ? 200 : 0);
        EXPECT_EQ(stats_of(pool).damages, 0);
        pool_end(pool);
        stream_end(s);
        stream_end(t);
        finish();
    }
}

/* Checks that wait for a stream that makes no more calls do not make each check of another stream record an event. */
TEST(checks_of_an_idle_stream_press_once)
{
    enum { LEFT = 64, SAMPLES = 32 * 64 };
    begin_backed(SIM_PACE_PROMPT);
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_config config = galloc_config_default();
    OK(galloc_config_parse(&config, "debug:guards,debug_sample:64", NULL, 0));
    galloc_pool *pool = pool_new(&config);
    while (sim_calls("cuMemcpyDtoHAsync") < LEFT) OK(galloc_free(get(pool, 1000, s), s));
    for (int i = 0; i < SAMPLES * 64; i++) OK(galloc_free(get(pool, 1000, t), t));
    EXPECT(stats_of(pool).driver.event_record < SAMPLES / 4);
    OK(galloc_pool_trim(pool, 0, NULL));
    EXPECT(stats_of(pool).checks > SAMPLES - 100);
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* On more streams than checks may wait, no check is left out. */
TEST(steps_on_many_streams_are_checked)
{
    enum { STREAMS = 128, SAMPLES = 6000 };
    begin_backed(SIM_PACE_PROMPT);
    cudaStream_t streams[STREAMS];
    galloc_config config = galloc_config_default();
    OK(galloc_config_parse(&config, "debug:guards,debug_sample:64", NULL, 0));
    galloc_pool *pool = pool_new(&config);
    for (int i = 0; i < STREAMS; i++) streams[i] = stream_new();
    for (int i = 0; sim_calls("cuMemsetD8Async") < SAMPLES; i++) {
        cudaStream_t s = streams[i / 32 % STREAMS];
        OK(galloc_free(get(pool, 1000, s), s));
    }
    EXPECT_EQ(stats_of(pool).unchecked, 0);
    EXPECT(stats_of(pool).checks + 600 > SAMPLES);
    pool_end(pool);
    for (int i = 0; i < STREAMS; i++) stream_end(streams[i]);
    finish();
}

/* A sampled block grows into what rounding leaves as any other. It has no guard then. */
TEST(a_sampled_block_grows_as_any_other)
{
    enum { N = 1000 };
    begin_backed(SIM_PACE_PROMPT);
    cudaStream_t s = stream_new();
    galloc_config config = galloc_config_default();
    OK(galloc_config_parse(&config, "debug:guards,debug_sample:64", NULL, 0));
    galloc_pool *pool = pool_new(&config);
    static void *p[N];
    for (int i = 0; i < N; i++) p[i] = get(pool, 900, s);
    size_t bytes = stats_of(pool).allocated.current;
    EXPECT(stats_of(pool).driver.memset >= N / 64 - 1);
    for (int i = 0; i < N; i++) OK(galloc_resize(p[i], 1024, s));
    EXPECT_EQ(stats_of(pool).allocated.current, bytes);
    for (int i = 0; i < N; i++) write_at(p[i], 1000, 0, 24, s);
    for (int i = 0; i < N; i++) OK(galloc_free(p[i], s));
    OK(galloc_pool_trim(pool, 0, NULL));
    EXPECT(stats_of(pool).checks >= N / 64 - 1);
    EXPECT_EQ(stats_of(pool).damages, 0);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* A request that is not fit for a guard leaves it to the next that is. */
TEST(requests_that_get_no_guard_leave_it_to_others)
{
    enum { SAMPLE = 100, PAIRS = 40 * SAMPLE / 2 };
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = galloc_config_default();
    OK(galloc_config_parse(&config, "debug:guards,debug_sample:100", NULL, 0));
    galloc_pool *pool = pool_new(&config);
    for (int i = 0; i < PAIRS; i++) {
        galloc_request request = {.bytes = KIB(64), .max_bytes = MIB(4), .stream = s, .pool = pool};
        void *p = NULL;
        OK(galloc_alloc(&p, &request)); /* such a call takes no short path, so it asks whether a guard is due */
        OK(galloc_free(p, s));
        OK(galloc_free(get(pool, 1000, s), s));
    }
    OK(galloc_pool_trim(pool, 0, NULL));
    EXPECT(stats_of(pool).checks >= 34 && stats_of(pool).checks <= 44); /* 40 on the average */
    pool_end(pool);
    stream_end(s);
    finish();
}

/* Where few blocks are guarded, up to 64 checks wait for events that the pool records anyway: another event, and a
   query, would change which memory is found complete. One more, and the next check asks its stream for an event. Where
   each block is guarded, each check asks. */
TEST(few_checks_record_no_events)
{
    for (int each = 0; each < 2; each++) {
        begin_backed(SIM_PACE_PROMPT);
        cudaStream_t s = stream_new();
        galloc_config config = galloc_config_default();
        OK(galloc_config_parse(&config, each ? "debug:guards" : "debug:guards,debug_sample:64", NULL, 0));
        galloc_pool *pool = pool_new(&config);
        for (int i = 0; i < 54 * 64; i++) {
            void *p = get(pool, 1000, s);
            write_at(p, 1000, 0, 1, s);
            OK(galloc_free(p, s));
        }
        EXPECT_EQ(stats_of(pool).driver.event_record != 0, each);
        EXPECT_EQ(stats_of(pool).damages != 0, each);
        for (int i = 0; i < 24 * 64; i++) OK(galloc_free(get(pool, 1000, s), s));
        EXPECT(stats_of(pool).driver.event_record != 0);
        EXPECT(stats_of(pool).damages >= 48);
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

TEST(without_debug_nothing_is_queued)
{
    begin_backed(SIM_PACE_RANDOM);
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_debug(0);
    for (int i = 0; i < 100; i++) OK(galloc_free(get(pool, 1000, s), s));
    EXPECT_EQ(sim_operations(), 0);
    EXPECT_EQ(stats_of(pool).driver.memset + stats_of(pool).driver.copy + stats_of(pool).driver.host_alloc, 0);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* Host memory that guards are copied to is allocated by the driver, and counted. */
TEST(the_memory_of_the_checks_is_counted_as_a_call_of_the_driver)
{
    begin_backed(SIM_PACE_PROMPT);
    galloc_pool *pool = pool_debug(GUARDS);
    OK(galloc_free(get(pool, 1000, 0), 0));
    EXPECT(sim_calls("cuMemHostAlloc") > 0);
    EXPECT_EQ(stats_of(pool).driver.host_alloc, sim_calls("cuMemHostAlloc"));
    pool_end(pool);
    finish();
}

/* One memset per allocation; one copy, one memset and one event per free; no wait. */
TEST(the_cost_of_a_pair)
{
    enum { PAIRS = 64 };
    begin_backed(SIM_PACE_PROMPT);
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_debug(GUARDS | POISON);
    OK(galloc_free(get(pool, 1000, s), s));
    galloc_stats before = stats_of(pool);
    long blocking = sim_blocking_calls();
    for (int i = 0; i < PAIRS; i++) OK(galloc_free(get(pool, 1000, s), s));
    galloc_stats after = stats_of(pool);
    EXPECT_EQ(after.driver.memset - before.driver.memset, 2 * PAIRS);
    EXPECT_EQ(after.driver.copy - before.driver.copy, PAIRS);
    EXPECT_EQ(after.driver.event_record - before.driver.event_record, PAIRS);
    EXPECT_EQ(after.driver.host_alloc - before.driver.host_alloc, 0);
    EXPECT_EQ(sim_blocking_calls(), blocking);
    pool_end(pool);
    galloc_config config = galloc_config_default();
    config.debug = GUARDS | QUARANTINE;
    config.quarantine_bytes = KIB(4);
    pool = pool_new(&config);
    for (int i = 0; i < 4; i++) OK(galloc_free(get(pool, 1000, s), s));
    before = stats_of(pool);
    blocking = sim_blocking_calls();
    for (int i = 0; i < PAIRS; i++) OK(galloc_free(get(pool, 1000, s), s)); /* each time another one leaves */
    after = stats_of(pool);
    EXPECT_EQ(after.driver.memset - before.driver.memset, 2 * PAIRS);
    EXPECT_EQ(after.driver.copy - before.driver.copy, 3 * PAIRS);
    EXPECT_EQ(after.driver.event_record - before.driver.event_record, PAIRS);
    EXPECT_EQ(sim_blocking_calls(), blocking);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* More checks than there is room for are left out, and no call waits. */
TEST(too_many_checks_are_left_out)
{
    enum { MANY = 1500 };
    begin_backed(SIM_PACE_STILL);
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_debug(GUARDS);
    void **p = calloc(MANY, sizeof *p);
    for (int i = 0; i < MANY; i++) p[i] = get(pool, 100, s);
    long blocking = sim_blocking_calls();
    for (int i = 0; i < MANY; i++) OK(galloc_free(p[i], s));
    EXPECT_EQ(sim_blocking_calls(), blocking);
    look_now(pool);
    EXPECT_EQ(stats_of(pool).checks + stats_of(pool).unchecked, MANY);
    EXPECT(stats_of(pool).unchecked > 0 && stats_of(pool).checks >= 1000);
    OK(galloc_free(get(pool, 100, s), s));
    look_now(pool);
    EXPECT_EQ(stats_of(pool).checks + stats_of(pool).unchecked, MANY + 1);
    free(p);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* The driver sets the first part of a guard and refuses the second one. What it has set is work on the block, which the
   program has not used and may free on any stream. */
TEST(a_guard_that_was_set_in_part_is_a_use_of_the_block)
{
    begin_backed(SIM_PACE_STILL);
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_config config = galloc_config_default();
    OK(galloc_config_parse(&config, "debug:guards,roundup_power2_divisions:2", NULL, 0)); /* makes guards long */
    galloc_pool *pool = pool_new(&config);
    void *wall = get(pool, 512, t);
    sim_fail("cuMemsetD8Async", 2, 0, 0);
    void *p = get(pool, MIB(5), s);
    EXPECT_EQ(sim_failed(), 1);
    sim_fail_clear();
    OK(galloc_free(p, t));
    OK(galloc_free(get_used(pool, MIB(5), t, 1), t));
    OK(galloc_free(wall, t));
    look_now(pool);
    EXPECT_EQ(stats_of(pool).damages, 0);
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* Another thread has an event recorded on the stream just before the copy of a guard is queued there: that event does
   not stand for the copy. */
static struct {
    galloc_pool *pool;
    cudaStream_t stream;
    void *block;
    pthread_t checks;
    int now, done;
} meanwhile;

static void *mark_meanwhile(void *arg)
{
    (void)arg;
    OK(cudaSetDevice(0));
    while (!__atomic_load_n(&meanwhile.now, __ATOMIC_ACQUIRE)) usleep(100);
    OK(galloc_free(meanwhile.block, meanwhile.stream));
    OK(cudaStreamSynchronize(meanwhile.stream));
    OK(galloc_pool_trim(meanwhile.pool, SIZE_MAX, NULL));
    __atomic_store_n(&meanwhile.done, 1, __ATOMIC_RELEASE);
    return NULL;
}

static void before_the_copy(const char *function)
{
    if (meanwhile.now || strcmp(function, "cuMemcpyDtoHAsync") || !pthread_equal(pthread_self(), meanwhile.checks))
        return;
    __atomic_store_n(&meanwhile.now, 1, __ATOMIC_RELEASE);
    while (!__atomic_load_n(&meanwhile.done, __ATOMIC_ACQUIRE)) usleep(100);
}

TEST(an_event_of_before_the_copy_does_not_stand_for_it)
{
    pthread_t thread;
    begin_backed(SIM_PACE_PROMPT);
    memset(&meanwhile, 0, sizeof meanwhile);
    cudaStream_t s = meanwhile.stream = stream_new(), t = stream_new();
    galloc_pool *pool = meanwhile.pool = pool_debug(GUARDS);
    meanwhile.checks = pthread_self();
    OK(galloc_free(get(pool, 512, t), t));
    void *p = get(pool, 1000, s);
    meanwhile.block = get(pool, MIB(4), s);
    look_now(pool);
    EXPECT_EQ(pthread_create(&thread, NULL, mark_meanwhile, NULL), 0);
    sim_hook(before_the_copy, NULL);
    OK(galloc_free(p, s));
    sim_hook(NULL, NULL);
    EXPECT(meanwhile.now);
    __atomic_store_n(&meanwhile.now, 1, __ATOMIC_RELEASE);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
    look_now(pool);
    expect_clean(pool, 3);
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* The state of a stream that is gone is another stream's before the last check on it was looked at. */
TEST(a_check_does_not_wait_for_the_stream_that_comes_after)
{
    begin_backed(SIM_PACE_STILL);
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_debug(GUARDS);
    for (int i = 0; i < 20; i++) OK(galloc_free(get(pool, 512, s), s));
    look_now(pool);
    uint64_t checks = stats_of(pool).checks;
    void *p = get(pool, 1000, s);
    OK(galloc_free(p, s));
    OK(galloc_stream_retire(s));
    OK(cudaStreamSynchronize(s));
    EXPECT_EQ(stats_of(pool).checks, checks);
    OK(galloc_pool_reserve(pool, MIB(64)));
    EXPECT_EQ(inside_unused_streams(pool), 1);
    p = get(pool, 1000, t);
    EXPECT_EQ(inside_unused_streams(pool), 0);
    EXPECT_EQ(stats_of(pool).checks, checks + 1);
    OK(galloc_free(p, t));
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* A block's guard was set on a stream whose cache gave it out and that galloc has forgotten since: its free elsewhere
   looks at the guard all the same. */
TEST(a_guard_is_checked_though_its_stream_is_forgotten)
{
    begin_backed(SIM_PACE_PROMPT);
    cudaStream_t s = stream_new(), t = stream_new(), u = stream_new();
    galloc_config config = galloc_config_default();
    OK(galloc_config_parse(&config, "debug:guards,debug_sample:64", NULL, 0));
    galloc_pool *pool = pool_new(&config);
    void *kept = get(pool, 5000, s), *p;
    int streams = 0, guarded = 0;
    OK(galloc_free(get(pool, 5000, t), t));
    OK(galloc_free(get(pool, 5000, u), u));
    OK(galloc_free(get(pool, 1000, s), t)); /* a block of s, now in the cache of t */
    do {
        p = get(pool, 1000, t);
        guarded = info_of(p).usable == 1000;
        if (!guarded) OK(galloc_free(p, t));
    } while (!guarded && stats_of(pool).mallocs < 1000);
    EXPECT(guarded);
    write_at(p, 1000, 1, 1, t);
    OK(cudaStreamSynchronize(t));
    OK(galloc_stream_retire(t));
    stream_end(t);
    look_now(pool);
    OK(galloc_pool_streams(pool, NULL, 0, &streams));
    EXPECT_EQ(streams, 2);
    OK(galloc_free(p, u));
    OK(galloc_pool_trim(pool, 0, NULL));
    EXPECT_EQ(stats_of(pool).damages, 1);
    OK(galloc_free(kept, s));
    pool_end(pool);
    stream_end(s);
    stream_end(u);
    finish();
}

static struct {
    galloc_pool *pool;
    cudaStream_t s;
    int pairs, armed;
} comes_after;

/* The legacy stream is forgotten, and S gets its state and uses it. */
static void let_another_stream_come(const char *function)
{
    if (!comes_after.armed || strcmp(function, "cuStreamIsCapturing")) return;
    comes_after.armed = 0;
    OK(galloc_stream_retire(cudaStreamLegacy));
    look_now(comes_after.pool);
    comes_after.s = stream_new();
    for (int i = 0; i < comes_after.pairs; i++)
        OK(galloc_free(get_used(comes_after.pool, 1000, comes_after.s, 1), comes_after.s));
}

/* A request looks at its stream as a guard is due. When it comes back, another stream has the state of that one: its
   cache is none of the request's, whether a guard is due there, too, or not. */
TEST(a_request_due_for_a_guard_takes_nothing_of_a_later_stream)
{
    for (int pairs = 1; pairs < 140; pairs++) {
        begin_still();
        galloc_config config = galloc_config_default();
        OK(galloc_config_parse(&config, "debug:guards,debug_sample:64", NULL, 0));
        galloc_pool *pool = comes_after.pool = pool_new(&config);
        void *p = NULL;
        comes_after.s = NULL;
        comes_after.pairs = pairs;
        sim_hook(let_another_stream_come, NULL);
        for (int i = 0; i < 200 && !comes_after.s; i++) {
            if (p) OK(galloc_free(p, cudaStreamLegacy));
            comes_after.armed = i > 10;
            p = get(pool, 1000, cudaStreamLegacy);
            comes_after.armed = 0;
        }
        sim_hook(NULL, NULL);
        EXPECT(comes_after.s);
        put(cudaStreamLegacy, p, 1000, 2);
        OK(galloc_free(p, cudaStreamLegacy));
        pool_end(pool);
        stream_end(comes_after.s);
        finish();
    }
}

/* Without host memory for the state of the stream a free waits for it, and looks at no guard; that is counted. */
TEST(a_free_without_host_memory_leaves_a_guard_unchecked)
{
    begin_backed(SIM_PACE_PROMPT);
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_debug(GUARDS);
    void *p = get(pool, 1000, s);
    sim_fail_malloc(1, 1);
    OK(galloc_free(p, t));
    EXPECT(sim_failed_mallocs() > 0);
    sim_fail_clear();
    look_now(pool);
    EXPECT_EQ(stats_of(pool).unchecked, 1);
    EXPECT_EQ(stats_of(pool).checks, 0);
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

TEST(the_counts_of_checks_begin_anew_with_the_others)
{
    begin_backed(SIM_PACE_PROMPT);
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_debug(GUARDS);
    cudaGraph_t graph = NULL;
    void *p = get(pool, 1000, s);
    write_at(p, 1000, 1, 1, s);
    OK(galloc_free(p, s));
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    OK(galloc_free(get(pool, 1000, s), s));
    OK(cudaStreamEndCapture(s, &graph));
    OK(cudaGraphDestroy(graph));
    look_now(pool);
    EXPECT(stats_of(pool).checks > 0 && stats_of(pool).unchecked > 0 && stats_of(pool).damages > 0);
    OK(galloc_pool_stats_reset(pool));
    EXPECT_EQ(stats_of(pool).checks + stats_of(pool).unchecked + stats_of(pool).damages, 0);
    pool_end(pool);
    stream_end(s);
    finish();
}

TEST(debug_needs_the_native_backend)
{
    begin_backed(SIM_PACE_RANDOM);
    galloc_config config = galloc_config_default();
    char message[256];
    OK(galloc_config_parse(&config, "backend:cudaMalloc,debug:guards", message, sizeof message));
    EXPECT(strstr(message, "debug: no effect unless backend is native") != NULL);
    galloc_pool *pool = pool_new(&config);
    OK(galloc_pool_config(pool, &config));
    EXPECT_EQ(config.debug, 0);
    pool_end(pool);
    EXPECT_EQ(galloc_config_parse(&config, "debug_sample:0", NULL, 0), cudaErrorInvalidValue);
    EXPECT_EQ(galloc_config_parse(&config, "debug:guard", NULL, 0), cudaErrorInvalidValue);
    finish();
}

/* ---- what can fail ----------------------------------------------------------------------------------------------- */

/* Whatever driver call fails, once or from then on, a call that succeeds without debug succeeds, and the heap is whole;
   a check may be lost, and no damage is made up. */
TEST(a_failed_driver_call_loses_a_check_only)
{
    static const char *const calls[] = {"cuMemsetD8Async", "cuMemcpyDtoHAsync", "cuMemHostAlloc", "cuCtxGetId",
                                        "cuCtxGetCurrent", "cuEventRecord", "cuEventCreate", "cuEventQuery", NULL};
    for (int i = 0; calls[i] || i == 8; i++) {
        for (int on = 0; on < 2; on++) {
            for (int nth = 1; nth < 12; nth++) {
                begin_backed(SIM_PACE_RANDOM);
                cudaStream_t s = stream_new();
                galloc_pool *pool = pool_debug(GUARDS | QUARANTINE);
                void *p[6];
                OK(galloc_pool_reserve(pool, MIB(2)));
                p[0] = get(pool, 100, s);
                if (calls[i]) sim_fail(calls[i], nth, on, cudaErrorUnknown);
                else sim_fail_malloc(nth, on);
                for (int k = 1; k < 6; k++) {
                    p[k] = NULL;
                    if (!galloc_pool_malloc(pool, &p[k], 1000, s)) EXPECT(p[k] != NULL);
                }
                for (int k = 0; k < 6; k++)
                    if (p[k] && galloc_free(p[k], s)) EXPECT_EQ(info_of(p[k]).state, GALLOC_STATE_USED);
                    else p[k] = NULL;
                sim_fail_clear();
                sim_fail_malloc(0, 0);
                for (int k = 0; k < 6; k++)
                    if (p[k]) OK(galloc_free(p[k], s));
                look_now(pool);
                EXPECT_EQ(stats_of(pool).damages, 0);
                expect_healthy(pool, 1);
                pool_end(pool);
                stream_end(s);
                finish();
            }
        }
        if (!calls[i]) break;
    }
}

/* Whatever call fails while the pool is created: either there is no pool, or it finds damage from its next free on. */
TEST(a_pool_that_has_no_memory_for_checks_at_first_checks_later)
{
    for (int host = 0; host < 2; host++) {
        int failed = 1, created = 0;
        for (int nth = 1; failed && EXPECT(nth < 1000); nth++) {
            begin_backed(SIM_PACE_PROMPT);
            cudaStream_t s = stream_new();
            galloc_config config = galloc_config_default();
            galloc_pool *pool = NULL;
            config.debug = GUARDS;
            fail_nth(host, NULL, nth, 0);
            (void)galloc_pool_create(&pool, &config);
            failed = has_failed(host, NULL, 0);
            sim_fail_clear();
            sim_fail_malloc(0, 0);
            if (pool) {
                void *p = get(pool, 1000, s);
                write_at(p, 1000, 1, 1, s);
                OK(galloc_free(p, s));
                look_now(pool);
                EXPECT_EQ(stats_of(pool).damages, 1);
                EXPECT_EQ(stats_of(pool).unchecked, 0);
                created += failed;
                pool_end(pool);
            }
            stream_end(s);
            finish();
        }
        EXPECT(created > 0);
    }
}

/* Created while the driver does not tell contexts, a pool leaves no memory of its checks behind. */
TEST(checks_of_a_pool_whose_context_is_unknown_leave_nothing_behind)
{
    for (int nth = 1; nth < 8; nth++) {
        begin();
        galloc_config config = galloc_config_default();
        galloc_pool *pool = NULL;
        config.debug = GUARDS;
        sim_fail("cuCtxGetId", nth, 1, cudaErrorUnknown);
        (void)galloc_pool_create(&pool, &config);
        sim_fail_clear();
        if (pool) pool_end(pool);
        finish();
    }
}

/* Two threads free at the same time while there is no memory for checks: one of them makes it. */
TEST(memory_for_checks_is_made_once)
{
    begin_backed(SIM_PACE_PROMPT);
    cudaStream_t s = stream_new();
    sim_fail("cuMemHostAlloc", 1, 0, cudaErrorMemoryAllocation);
    galloc_pool *pool = pool_debug(GUARDS);
    EXPECT_EQ(sim_failed(), 1);
    void *p = get(pool, 1000, s), *q = get(pool, 1000, s);
    long calls = sim_calls("cuMemHostAlloc");
    free_before(q, s, "cuMemHostAlloc");
    OK(galloc_free(p, s));
    sim_hook(NULL, NULL);
    EXPECT(freed_between.block == NULL);
    EXPECT_EQ(sim_calls("cuMemHostAlloc"), calls + 1);
    look_now(pool);
    EXPECT_EQ(stats_of(pool).checks, 1);
    EXPECT_EQ(stats_of(pool).unchecked, 1); /* the one in between */
    pool_end(pool);
    stream_end(s);
    finish();
}

/* With the legacy stream alone, an event on it costs nothing: the block then grows at once on another stream. */
TEST(a_guarded_room_of_the_only_stream_grows_on_another_one)
{
    begin_backed(SIM_PACE_STILL);
    galloc_pool *pool = pool_debug(GUARDS);
    char *p = get_growable(pool, MIB(1), MIB(8), 0);
    EXPECT_EQ(sim_calls("cuEventRecord"), 1);
    cudaStream_t s = stream_new();
    OK(galloc_resize(p, MIB(2), s));
    write_at(p, 0, 1, MIB(2), s);
    OK(galloc_free(p, s));
    look_now(pool);
    EXPECT_EQ(stats_of(pool).damages, 0);
    expect_healthy(pool, 1);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* A resize on another stream fails for want of host memory. It records no event that would stand for work of the stream
   that the block was given to. */
TEST(a_failed_resize_of_a_guarded_room_tells_nothing_of_the_blocks_stream)
{
    begin_backed(SIM_PACE_STILL);
    galloc_config config = config_limit(MIB(16));
    config.debug = GUARDS;
    galloc_pool *pool = pool_new(&config);
    cudaStream_t t = stream_new(), u = stream_new();
    OK(galloc_free(get(pool, 512, u), u));
    OK(galloc_free(get(pool, 512, t), t));
    void *p = get_growable(pool, MIB(1), MIB(8), cudaStreamLegacy), *q = get(pool, MIB(10), cudaStreamLegacy);
    order(cudaStreamLegacy, t);
    write_at(q, 0, 1, MIB(10), cudaStreamLegacy);
    sim_fail("cuEventRecord", 1, 1, cudaErrorUnknown); /* the free has no event yet */
    OK(galloc_free(q, cudaStreamLegacy));
    sim_fail_clear();
    inside_drain_marks(pool);
    sim_fail_malloc(1, 1);
    EXPECT_EQ(galloc_resize(p, MIB(1) / 2, t), cudaErrorMemoryAllocation);
    sim_fail_clear();
    void *r = get(pool, MIB(10), u);
    write_at(r, 0, 2, MIB(10), u);
    EXPECT_EQ(sim_findings(SIM_RACE), 0);
    OK(galloc_free(r, u));
    OK(galloc_free(p, t));
    pool_end(pool);
    stream_end(t);
    stream_end(u);
    finish();
}

/* A wrong write that a refused resize has found is not found again when the block is freed, and a later one is. A
   resize that is refused on another stream has no check, nor has one whose check the driver refuses: there the free
   finds it. */
TEST(damage_found_by_a_refused_resize_counts_once)
{
    for (int how = 0; how < 4; how++) {
        int again = how == 1, other = how == 2, refused = how == 3;
        begin_backed(SIM_PACE_PROMPT);
        galloc_config config = galloc_config_default();
        config.debug = GUARDS;
        galloc_pool *pool = pool_new(&config);
        cudaStream_t s = stream_new(), t = stream_new();
        void *p = get(pool, 1000, s), *wall = get(pool, 1000, s);
        write_at(p, 1000, 1, 4, s);
        if (refused) sim_fail("cuMemcpyDtoHAsync", 1, 1, cudaErrorUnknown);
        EXPECT_EQ(galloc_resize(p, MIB(1), other ? t : s), cudaErrorNotSupported);
        EXPECT_EQ(sim_failed(), refused);
        sim_fail_clear();
        if (again) write_at(p, 1000, 1, 4, s);
        OK(galloc_free(p, s));
        OK(galloc_free(wall, s));
        look_now(pool);
        EXPECT_EQ(stats_of(pool).damages, 1 + again);
        EXPECT_EQ(stats_of(pool).unchecked, other || refused);
        pool_end(pool);
        stream_end(s);
        stream_end(t);
        finish();
    }
}

static int free_the_victim(const galloc_report *report, void *victim)
{
    (void)report;
    return galloc_free(victim, 0) == cudaSuccess;
}

/* on_oom frees the very block that is to grow: then no guard is set again. */
TEST(a_guarded_block_that_is_freed_while_it_grows_has_no_guard)
{
    begin_backed(SIM_PACE_PROMPT);
    galloc_config config = config_limit(MIB(16));
    galloc_callbacks callbacks = {0};
    config.debug = GUARDS;
    galloc_pool *pool = pool_new(&config);
    void *p = get_growable(pool, MIB(2), MIB(32), 0), *other = get(pool, MIB(10), 0);
    callbacks.on_oom = free_the_victim;
    callbacks.user = p;
    OK(galloc_pool_set_callbacks(pool, &callbacks));
    EXPECT(galloc_resize(p, MIB(12), 0) != cudaSuccess);
    EXPECT(info_of(p).state != GALLOC_STATE_USED);
    OK(galloc_free(other, 0));
    look_now(pool);
    EXPECT_EQ(stats_of(pool).damages, 0);
    expect_healthy(pool, 1);
    pool_end(pool);
    finish();
}

/* The thread cannot enter the stream's context for the wait: the allocation succeeds, and the next one waits. */
TEST(a_default_stream_whose_context_cannot_be_entered_is_waited_for_later)
{
    begin_still();
    galloc_pool *pool = pool_debug(POISON);
    void *p = get(pool, MIB(1), cudaStreamPerThread), *wall = get(pool, KIB(1), cudaStreamPerThread), *q;
    OK(galloc_free(p, cudaStreamPerThread));
    long waits = sim_calls("cuStreamSynchronize");
    sim_fail("cuThreadExchangeStreamCaptureMode", 1, 1, cudaErrorUnknown);
    q = get(pool, KIB(1), cudaStreamPerThread);
    EXPECT(sim_failed() > 0);
    EXPECT_EQ(sim_calls("cuStreamSynchronize"), waits);
    sim_fail_clear();
    p = get(pool, KIB(1), cudaStreamPerThread);
    EXPECT_EQ(sim_calls("cuStreamSynchronize"), waits + 1);
    OK(galloc_free(p, cudaStreamPerThread));
    OK(galloc_free(q, cudaStreamPerThread));
    OK(galloc_free(wall, cudaStreamPerThread));
    pool_end(pool);
    finish();
}

/* The memory of the checks is the pool's context's: a reset takes it, and the streams of other contexts go on. The
   thread's context stays what it was. */
TEST(streams_of_other_contexts_get_no_guards)
{
    begin_backed(SIM_PACE_STILL);
    CUcontext other = NULL, before = NULL, after = NULL;
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_debug(GUARDS | POISON);
    OK(cuCtxGetCurrent(&before));
    OK(sim_green_create(&other, 0));
    OK(cuCtxPushCurrent(other));
    cudaStream_t t = stream_new();
    OK(cuCtxPopCurrent(&other));
    void *p = get(pool, 1000, t);
    OK(galloc_free(p, t));
    OK(cuCtxGetCurrent(&after));
    EXPECT(after == before);
    EXPECT_EQ(stats_of(pool).driver.memset + stats_of(pool).driver.copy, 0);
    EXPECT_EQ(stats_of(pool).unchecked, 1);
    OK(galloc_free(get(pool, 1000, s), s));
    look_now(pool);
    EXPECT_EQ(stats_of(pool).checks, 1);
    stream_end(t);
    OK(sim_green_destroy(other));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* A reset of the device takes the memory of the checks with it. */
TEST(checks_do_not_outlive_a_reset)
{
    for (int round = 0; round < 4; round++) {
        int expandable = round & 1;
        begin_backed(SIM_PACE_STILL);
        cudaStream_t s = stream_new();
        galloc_config config = galloc_config_default();
        config.debug = GUARDS | (expandable ? POISON : QUARANTINE);
        config.expandable_segments = expandable;
        galloc_pool *pool = pool_new(&config);
        void *p = get(pool, 1000, s), *q = get(pool, 1000, s);
        OK(galloc_free(p, s));
        if (round & 2) look_now(pool); /* then the guard of q is known to be set */
        OK(cudaDeviceReset());
        s = stream_new();
        OK(galloc_free(q, s));
        p = get(pool, 1000, s);
        write_at(p, 0, 1, 1000, s);
        OK(galloc_free(p, s));
        look_now(pool);
        EXPECT_EQ(stats_of(pool).damages, 0);
        EXPECT(stats_of(pool).unchecked >= 1);
        EXPECT(stats_of(pool).checks >= 1);
        if (expandable) EXPECT_EQ(stats_of(pool).checks + stats_of(pool).unchecked, 3); /* one for each free */
        expect_healthy(pool, 1);
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

/* Memory that survives a reset serves what comes after it, without a call that needs pages. One call is unchecked; the
   guards of the next blocks find damage again. */
TEST(one_call_after_a_reset_is_unchecked)
{
    for (int frees_first = 0; frees_first < 2; frees_first++) {
        begin_backed(SIM_PACE_STILL);
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_debug(GUARDS | POISON);
        void *old = get(pool, 1000, s), *p = get(pool, 1000, s);
        OK(galloc_free(p, s));
        look_now(pool); /* any stream may use the memory of p */
        OK(cudaDeviceReset());
        s = stream_new();
        long maps = sim_calls("cuMemMap");
        if (frees_first) {
            OK(galloc_free(old, s));
            old = NULL;
        } else {
            p = get(pool, 1000, s);
            OK(galloc_free(p, s));
        }
        uint64_t unchecked = stats_of(pool).unchecked;
        for (int i = 0; i < 3; i++) {
            p = get(pool, 1000, s);
            write_at(p, 1000, 1, 4, s);
            OK(galloc_free(p, s));
        }
        EXPECT_EQ(sim_calls("cuMemMap"), maps);
        look_now(pool);
        EXPECT_EQ(stats_of(pool).damages, 3);
        EXPECT_EQ(stats_of(pool).checks, 1 + 3);
        EXPECT_EQ(unchecked, 1);
        EXPECT_EQ(stats_of(pool).unchecked, unchecked);
        if (old) OK(galloc_free(old, s));
        expect_healthy(pool, 1);
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

/* Guards are set and compared whichever context is current, of the device or of another one. */
TEST(damage_is_found_whichever_context_is_current)
{
    for (int now = 0; now < 3; now++) {
        sim_options options = sim_defaults();
        options.mode = SIM_BACKED;
        options.memory = GIB(1);
        options.devices = 2;
        begin_with(options);
        CUcontext other = NULL;
        OK(cudaSetDevice(0));
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_debug(GUARDS | POISON);
        if (now == 0) OK(cudaSetDevice(1));
        else OK(cuCtxCreate(&other, NULL, 0, now - 1));
        for (int i = 0; i < 4; i++) {
            void *p = get(pool, 1000, s);
            if (i % 2) write_at(p, 1000, 1, 4, s);
            OK(galloc_free(p, s));
        }
        OK(cudaStreamSynchronize(s));
        OK(galloc_pool_trim(pool, SIZE_MAX, NULL));
        EXPECT_EQ(stats_of(pool).damages, 2);
        EXPECT_EQ(stats_of(pool).checks, 4);
        EXPECT_EQ(stats_of(pool).unchecked, 0);
        pool_end(pool);
        if (other) OK(cuCtxDestroy(other));
        OK(cudaSetDevice(0));
        stream_end(s);
        finish();
    }
}

/* What checks need outlives the context of another device or of the program's own that is current where the pool is
   made: later frees are checked and do not wait. */
TEST(checks_outlive_the_context_that_a_pool_is_made_in)
{
    for (int device = 0; device < 2; device++) {
        sim_options options = sim_defaults();
        options.devices = 2;
        options.pace = SIM_PACE_STILL;
        begin_with(options);
        CUcontext own = NULL;
        OK(cudaSetDevice(0));
        cudaStream_t s = stream_new();
        OK(cuCtxCreate(&own, NULL, 0, device));
        galloc_config config = galloc_config_default();
        config.debug = GUARDS;
        config.device = 0;
        galloc_pool *pool = pool_new(&config);
        OK(cuCtxDestroy(own));
        OK(cudaSetDevice(0));
        void *p = get_used(pool, 1000, s, 1);
        OK(galloc_free(p, s));
        EXPECT(!sim_stream_done(s));
        look_now(pool);
        expect_clean(pool, 1);
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

/* The last used blocks of lost memory are in quarantine: with them it ends, and the driver is not asked to free it. */
TEST(lost_memory_ends_with_the_quarantine)
{
    for (int trimmed = 0; trimmed < 2; trimmed++) {
        begin_backed(SIM_PACE_STILL);
        cudaStream_t s = stream_new();
        galloc_config config = galloc_config_default();
        config.debug = QUARANTINE;
        config.expandable_segments = 0;
        galloc_pool *pool = pool_new(&config);
        OK(galloc_free(get(pool, 1000, s), s));
        OK(cudaDeviceReset());
        long frees = sim_calls("cuMemFree") + sim_calls("cuMemAddressFree");
        if (trimmed) {
            OK(galloc_pool_trim(pool, 0, NULL));
            galloc_stats stats = stats_of(pool);
            EXPECT_EQ(stats.reserved.current, 0);
            EXPECT_EQ(stats.quarantined, 0);
            EXPECT_EQ(stats.pages[0].count, 0);
            expect_healthy(pool, 1);
        }
        pool_end(pool);
        EXPECT_EQ(sim_calls("cuMemFree") + sim_calls("cuMemAddressFree"), frees);
        finish();
    }
}

/* Two frees notice the reset at once. The slower one leaves alone the memory that the faster one has allocated since,
   and may go unchecked. Returns whether the slower one asks for the context that often. */
static int free_beside_a_free_after_a_reset(int calls)
{
    begin_backed(SIM_PACE_STILL);
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_debug(GUARDS);
    OK(galloc_free(get(pool, 1000, s), s));
    look_now(pool);
    OK(cudaDeviceReset());
    s = stream_new();
    void *p = get(pool, 1000, s), *q = get(pool, 1000, s);
    free_before(q, s, "cuCtxGetId");
    freed_between.calls = calls;
    OK(galloc_free(p, s));
    sim_hook(NULL, NULL);
    int reached = !freed_between.block;
    if (!reached) OK(galloc_free(q, s));
    look_now(pool);
    galloc_stats stats = stats_of(pool);
    EXPECT_EQ(stats.checks + stats.unchecked, 3);
    EXPECT(stats.unchecked <= 1);
    EXPECT_EQ(stats.damages, 0);
    expect_healthy(pool, 1);
    pool_end(pool);
    stream_end(s);
    finish(); /* which finds what is left of the memory of the checks */
    return reached;
}

TEST(two_frees_after_a_reset_allocate_for_checks_once)
{
    int calls = 0;
    while (calls < 50 && free_beside_a_free_after_a_reset(calls)) calls++;
    EXPECT(calls > 0 && calls < 50);
}

/* ---- threads ----------------------------------------------------------------------------------------------------- */

typedef struct worker {
    galloc_pool *pool;
    uint64_t seed;
    int damages; /* planted */
} worker;

static void *work(void *arg)
{
    worker *w = arg;
    dice d = {w->seed};
    cudaStream_t s = stream_new();
    void *held[8] = {0};
    for (int i = 0; i < 400; i++) {
        int k = (int)roll_below(&d, 8);
        if (held[k]) {
            OK(galloc_free(held[k], s));
            held[k] = NULL;
            continue;
        }
        size_t bytes = roll_bytes(&d, 20000);
        int bad = roll_below(&d, 50) == 0;
        held[k] = get(w->pool, bytes, s);
        write_at(held[k], 0, k, bytes + (size_t)bad, s);
        w->damages += bad;
    }
    for (int k = 0; k < 8; k++) OK(galloc_free(held[k], s));
    OK(cudaStreamSynchronize(s));
    OK(galloc_stream_retire(s));
    stream_end(s);
    return NULL;
}

TEST(several_threads_find_what_each_has_done)
{
    begin_backed(SIM_PACE_RANDOM);
    galloc_pool *pool = pool_debug(GUARDS | QUARANTINE);
    worker workers[4];
    pthread_t threads[4];
    int planted = 0;
    for (int i = 0; i < 4; i++) {
        workers[i] = (worker){pool, test_seed() * 5 + (uint64_t)i, 0};
        pthread_create(&threads[i], NULL, work, &workers[i]);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
        planted += workers[i].damages;
    }
    look_now(pool);
    EXPECT_EQ(stats_of(pool).damages, planted);
    EXPECT_EQ(stats_of(pool).unchecked, 0);
    expect_healthy(pool, 1);
    OK(galloc_pool_trim(pool, 0, NULL)); /* also the quarantine */
    EXPECT_EQ(stats_of(pool).damages, planted);
    EXPECT_EQ(stats_of(pool).unchecked, 0);
    pool_end(pool);
    finish();
}

/* Without a size of its own the quarantine has 1/16 of the limit, but no more than 256 MiB. */
TEST(the_quarantine_has_its_most)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = galloc_config_default();
    config.debug = GUARDS | POISON | QUARANTINE;
    galloc_pool *pool = pool_new(&config);
    void *p[300];
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < 300; i++) p[i] = get(pool, MIB(2) - 256, s);
        for (int i = 0; i < 300; i++) OK(galloc_free(p[i], s));
        OK(cudaStreamSynchronize(s));
    }
    EXPECT(stats_of(pool).reserved.current < MIB(1000)); /* the second round reuses what left the quarantine */
    stream_end(s);
    pool_end(pool);
    finish();
}

/* A device's limit is one, too. What is kept is held, and little more. */
TEST(the_quarantine_has_a_16th_of_any_limit)
{
    for (int of_device = 0; of_device < 2; of_device++) {
        begin();
        cudaStream_t s = stream_new();
        galloc_config config = galloc_config_default();
        config.debug = POISON | QUARANTINE;
        *(of_device ? &config.device_limit : &config.memory_limit) = MIB(512);
        galloc_pool *pool = pool_new(&config);
        for (int i = 0; i < 60; i++) OK(galloc_free(get(pool, MIB(2), s), s));
        EXPECT(stats_of(pool).reserved.current >= MIB(32) && stats_of(pool).reserved.current < MIB(48));
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

/* The end of the quarantine copies from each block, and a wait for the copy fails. Their pages stay until the device
   has been waited for; where that fails, too, the pool does. */
TEST(pages_stay_while_the_last_checks_read_them)
{
    for (int trims = 0; trims < 2; trims++) {
        for (int lasts = 0; lasts < 2; lasts++) {
            begin_backed(SIM_PACE_STILL);
            cudaStream_t s = stream_new();
            galloc_pool *pool = pool_debug(QUARANTINE);
            void *p = get(pool, MIB(3), s);
            write_at(p, 0, 0, 64, s);
            OK(galloc_free(p, s));
            OK(cudaStreamSynchronize(s));
            OK(galloc_pool_trim(pool, SIZE_MAX, NULL)); /* notices that the work is complete */
            sim_fail("cuStreamSynchronize", 1, lasts, 0);
            if (lasts) sim_fail("cuMemFreeHost", 1, 1, 0);
            cudaError_t error = trims ? galloc_pool_trim(pool, 0, NULL) : galloc_pool_destroy(pool);
            EXPECT(sim_failed() > 0);
            EXPECT_EQ(error != cudaSuccess, lasts);
            sim_fail_clear();
            if (trims || lasts) pool_end(pool);
            stream_end(s);
            finish();
        }
    }
}

/* Nor does anybody get that memory before the copy is known to have ended, after a trim that failed. */
TEST(memory_that_the_last_checks_read_is_nobodys)
{
    for (int larger = 0; larger < 2; larger++) {
        begin_backed(SIM_PACE_STILL);
        galloc_config config = config_limit(MIB(4));
        config.debug = QUARANTINE;
        config.quarantine_bytes = MIB(4);
        galloc_pool *pool = pool_new(&config);
        cudaStream_t s = stream_new();
        size_t bytes = larger ? MIB(4) : MIB(3);
        void *p = get(pool, MIB(3), s);
        OK(galloc_free(p, s));
        OK(cudaStreamSynchronize(s));
        OK(galloc_pool_trim(pool, SIZE_MAX, NULL)); /* notices that the work is complete */
        sim_fail("cuStreamSynchronize", 1, 0, 0);
        sim_fail("cuMemFreeHost", 1, 1, 0);
        EXPECT(galloc_pool_trim(pool, 0, NULL) != cudaSuccess);
        EXPECT(sim_pending() > 0); /* the copy */
        sim_fail_clear();
        p = get(pool, bytes, s);
        write_at(p, 0, 0, bytes, s);
        OK(galloc_free(p, s));
        sim_run(-1);
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

static struct {
    galloc_pool *pool;
    cudaStream_t stream;
    void *p;
} between;

static void allocate_between(const char *function)
{
    if (strcmp(function, "cuMemCreate") || between.p) return;
    between.p = get(between.pool, KIB(64), between.stream);
}

/* All allocations get a guard, also one that begins while another one is under way. */
TEST(allocations_that_overlap_have_guards_each)
{
    begin_backed(SIM_PACE_PROMPT);
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_debug(GUARDS);
    void *before = get(pool, KIB(64), t), *p = get(pool, KIB(64), t), *behind = get(pool, KIB(64), t);
    between.pool = pool;
    between.stream = t;
    between.p = NULL;
    OK(galloc_free(p, t)); /* at hand for the one in between, and of no use to the other */
    look_now(pool);
    sim_hook(allocate_between, NULL);
    p = get(pool, MIB(8), s);
    sim_hook(NULL, NULL);
    EXPECT(between.p != NULL);
    write_at(between.p, 0, 1, KIB(64) + 1, t);
    write_at(p, 0, 1, MIB(8) + 1, s);
    OK(galloc_free(between.p, t));
    OK(galloc_free(p, s));
    look_now(pool);
    EXPECT_EQ(stats_of(pool).damages, 2);
    EXPECT_EQ(stats_of(pool).unchecked, 0);
    OK(galloc_free(before, t));
    OK(galloc_free(behind, t));
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* Memory of stream 0 is used on another stream, and freed on stream 0 after a wait for the device. The next allocation
   there may have it: what debug has queued at the free must be done. */
TEST(a_default_stream_has_no_work_of_debug_left)
{
    static const char *const settings[] = {"debug:guards",
                                           "debug:poison",
                                           "debug:quarantine,quarantine_bytes:512K",
                                           "debug:guards+poison",
                                           "debug:guards+poison,debug_sample:64",
                                           "debug:guards+poison,debug_sample:64,lane_bytes:0"};
    for (size_t k = 0; k < sizeof settings / sizeof *settings; k++) {
        for (int i = 0; i < 4; i++) {
            cudaStream_t zero = i & 1 ? cudaStreamPerThread : cudaStreamLegacy;
            int limited = i & 2;
            begin_backed(SIM_PACE_STILL);
            cudaStream_t s = stream_new();
            galloc_config config = galloc_config_default();
            OK(galloc_config_parse(&config, settings[k], NULL, 0));
            if (limited) config.wait_limit_ms = 0; /* then nothing is queued, and no call waits */
            galloc_pool *pool = pool_new(&config);
            long waits = 0;
            for (int n = 0; n < 200; n++) {
                size_t bytes = (n % 2 ? KIB(512) : KIB(513)) - 100; /* a guard's place belongs to the next block */
                long before = sim_blocking_calls();
                void *p = get(pool, bytes, zero);
                waits += sim_blocking_calls() - before;
                sim_hold(zero, 1); /* the device may run s first */
                put(s, p, bytes, (uint64_t)n + 1);
                OK(cudaStreamSynchronize(s));
                sim_hold(zero, 0);
                OK(cudaDeviceSynchronize());
                OK(galloc_free(p, zero));
            }
            look_now(pool);
            EXPECT_EQ(stats_of(pool).damages, 0);
            if (limited) EXPECT_EQ(waits, 0);
            EXPECT_EQ(stats_of(pool).unchecked != 0, limited && config.debug & GALLOC_DEBUG_GUARDS);
            pool_end(pool);
            stream_end(s);
            finish();
        }
    }
}

/* The wait fails, and the one after it: the next allocation waits again, for the bytes that it gets are still to be
   poisoned. If the second wait succeeds, it does not. */
TEST(a_default_stream_is_waited_for_again_after_waits_that_failed)
{
    for (int i = 0; i < 4; i++) {
        cudaStream_t zero = i % 2 ? cudaStreamPerThread : cudaStreamLegacy;
        int both = i / 2;
        begin_still();
        cudaStream_t s = stream_new();
        galloc_config config = galloc_config_default();
        OK(galloc_config_parse(&config, "debug:poison", NULL, 0));
        galloc_pool *pool = pool_new(&config);
        void *p = get(pool, MIB(1), zero), *q;
        OK(cudaDeviceSynchronize());
        OK(galloc_free(p, zero));
        long calls = sim_calls("cuStreamSynchronize");
        sim_fail("cuStreamSynchronize", 1, both, cudaErrorUnknown);
        q = get(pool, KIB(1), zero);
        EXPECT_EQ(sim_failed(), 1 + both);
        sim_fail_clear();
        p = get(pool, KIB(1020), zero);
        EXPECT_EQ(sim_calls("cuStreamSynchronize"), calls + 2 + both);
        put(s, p, KIB(1020), 1); /* S may: the device was waited for before the free */
        OK(cudaStreamSynchronize(s));
        OK(galloc_free(p, zero));
        OK(galloc_free(q, zero));
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

/* One of them is settled while debug's work is on both: the other still waits for its own, at its next call. */
TEST(each_default_stream_waits_for_the_work_of_debug_on_it)
{
    for (int i = 0; i < 2; i++) {
        cudaStream_t first = i ? cudaStreamPerThread : cudaStreamLegacy;
        cudaStream_t second = i ? cudaStreamLegacy : cudaStreamPerThread;
        begin_backed(SIM_PACE_STILL);
        cudaStream_t s = stream_new();
        galloc_config config = galloc_config_default();
        OK(galloc_config_parse(&config, "debug:guards,debug_sample:64,lane_bytes:0", NULL, 0));
        galloc_pool *pool = pool_new(&config);
        void *p[2], *q;
        p[0] = get(pool, KIB(4) - 100, second); /* watched, as the next one that may be after 32 to 96 */
        for (int n = 0; n < 96; n++) {
            q = get(pool, KIB(64), first);
            OK(galloc_free(q, first));
        }
        p[1] = get(pool, KIB(8) - 100, first); /* watched */
        OK(cudaDeviceSynchronize());
        OK(galloc_free(p[1], first));
        OK(galloc_free(p[0], second));
        uint64_t waits = stats_of(pool).driver.stream_synchronize;
        q = get(pool, KIB(64), first);
        EXPECT_EQ(stats_of(pool).driver.stream_synchronize, waits + 1);
        p[0] = get(pool, KIB(4), second);
        EXPECT_EQ(stats_of(pool).driver.stream_synchronize, waits + 2);
        sim_hold(second, 1); /* the device may run s first */
        put(s, p[0], KIB(4), 1);
        OK(cudaStreamSynchronize(s));
        sim_hold(second, 0);
        OK(cudaDeviceSynchronize());
        look(s, p[0], KIB(4), 1);
        OK(cudaStreamSynchronize(s));
        OK(galloc_free(get(pool, KIB(64), first), first));
        OK(galloc_free(get(pool, KIB(64), second), second));
        EXPECT_EQ(stats_of(pool).driver.stream_synchronize, waits + 2); /* there is nothing more to wait for */
        OK(galloc_free(p[0], second));
        OK(galloc_free(q, first));
        look_now(pool);
        EXPECT_EQ(stats_of(pool).damages, 0);
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

/* A blocking stream is captured, so that nothing may be asked of the legacy stream, and a call of the driver fails: an
   allocation there waits for the poison all the same. */
TEST(the_legacy_stream_beside_a_capture_is_settled_though_a_call_fails)
{
    begin_still();
    cudaStream_t s = stream_new(), blocking = NULL;
    OK(cudaStreamCreate(&blocking));
    galloc_config config = galloc_config_default();
    OK(galloc_config_parse(&config, "debug:poison", NULL, 0));
    galloc_pool *pool = pool_new(&config);
    cudaGraph_t graph = NULL;
    void *p = get(pool, MIB(1), cudaStreamLegacy);
    OK(cudaDeviceSynchronize());
    OK(galloc_free(p, cudaStreamLegacy));
    OK(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeRelaxed));
    sim_fail("cuMemFreeHost", 1, 0, cudaErrorUnknown);
    p = get(pool, KIB(1020), cudaStreamLegacy);
    EXPECT_EQ(sim_failed(), 1);
    put(s, p, KIB(1020), 1); /* S may: the device was waited for before the free */
    OK(cudaStreamSynchronize(s));
    OK(cudaStreamEndCapture(blocking, &graph));
    OK(cudaGraphDestroy(graph));
    OK(galloc_free(p, cudaStreamLegacy));
    pool_end(pool);
    stream_end(blocking);
    stream_end(s);
    finish();
}

static struct {
    galloc_pool *pool;
    pthread_t thread;
    int begun, ended;
} trims;
static __thread int waits_that_fail;

static void *trim_meanwhile(void *unused)
{
    waits_that_fail = 2; /* a trim tries it twice */
    (void)galloc_pool_trim(trims.pool, 0, NULL); /* fails if it waits */
    __atomic_store_n(&trims.ended, 1, __ATOMIC_RELEASE);
    return unused;
}

/* While a thread begins to wait, another one waits if it can. */
static void trim_in_another_thread(const char *function)
{
    if (!strcmp(function, "cuMemFreeHost") && waits_that_fail > 0) {
        waits_that_fail--;
        sim_fail("cuMemFreeHost", 1, 0, cudaErrorUnknown);
    }
    if (trims.begun || strcmp(function, "cuMemHostAlloc")) return;
    trims.begun = 1;
    pthread_create(&trims.thread, NULL, trim_meanwhile, NULL);
    for (int i = 0; i < 200 && !__atomic_load_n(&trims.ended, __ATOMIC_ACQUIRE); i++) usleep(1000);
}

/* An allocation waits for poison while another thread is about to wait for memory. A wait that fails leaves memory of
   the host, which the next one frees. */
TEST(failed_waits_for_poison_and_for_memory_leave_nothing)
{
    begin_still();
    cudaStream_t s = stream_new(), blocking = NULL;
    OK(cudaStreamCreate(&blocking));
    galloc_config config = galloc_config_default();
    OK(galloc_config_parse(&config, "debug:poison", NULL, 0));
    galloc_pool *pool = pool_new(&config);
    cudaGraph_t graph = NULL;
    OK(galloc_free(get(pool, MIB(1), cudaStreamLegacy), cudaStreamLegacy));
    OK(galloc_free(get_used(pool, MIB(4), s, 1), s));
    OK(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeRelaxed));
    memset(&trims, 0, sizeof trims);
    waits_that_fail = 1;
    trims.pool = pool;
    sim_hook(trim_in_another_thread, NULL);
    void *p = get(pool, KIB(4), cudaStreamLegacy);
    if (EXPECT(trims.begun)) pthread_join(trims.thread, NULL);
    sim_hook(NULL, NULL);
    EXPECT(sim_failed() > 0);
    OK(cudaStreamEndCapture(blocking, &graph));
    OK(cudaGraphDestroy(graph));
    OK(galloc_free(p, cudaStreamLegacy));
    pool_end(pool);
    stream_end(blocking);
    stream_end(s);
    finish();
}

static cudaStream_t unmap_stream;
static void serves_itself_in_on_unmap(galloc_pool *pool, void *addr, size_t bytes, void *user)
{
    void *p;
    (void)addr, (void)bytes, (void)user;
    for (int i = 0; i < 200; i++)
        if (galloc_pool_malloc(pool, &p, 1000 + 512 * (size_t)i, unmap_stream) == cudaSuccess)
            OK(galloc_free(p, unmap_stream));
}

/* What on_unmap frees while the pool ends enters the quarantine, and the pool ends all the same. */
TEST(a_pool_with_a_quarantine_ends_though_on_unmap_frees)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = galloc_config_default();
    galloc_callbacks callbacks = {0};
    galloc_pool *pool;
    OK(galloc_config_parse(&config, "debug:quarantine,debug_sample:64", NULL, 0));
    OK(galloc_pool_create(&pool, &config));
    unmap_stream = stream_new();
    callbacks.on_unmap = serves_itself_in_on_unmap;
    OK(galloc_pool_set_callbacks(pool, &callbacks));
    void *p = get(pool, MIB(8), s), *q = get(pool, MIB(8), unmap_stream);
    for (int i = 0; i < 50; i++) put(unmap_stream, q, MIB(8), 1);
    OK(galloc_free(p, s));
    OK(cudaStreamSynchronize(s));
    OK(galloc_free(q, unmap_stream));
    OK(galloc_pool_destroy(pool));
    stream_end(unmap_stream);
    stream_end(s);
    finish();
}

#define NEXT_BUFFERS 4
static struct { void *buffer[NEXT_BUFFERS]; cudaStream_t stream; int freed; } next;
static void frees_the_next_in_on_unmap(galloc_pool *pool, void *addr, size_t bytes, void *user)
{
    (void)pool, (void)addr, (void)bytes, (void)user;
    if (next.freed < NEXT_BUFFERS) OK(galloc_free(next.buffer[next.freed++], next.stream));
}

/* Each block that on_unmap frees enters the quarantine and keeps its page. A shutdown releases all of them. */
TEST(a_shutdown_takes_what_on_unmap_frees_out_of_the_quarantine)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_callbacks callbacks = {0};
    setenv("GALLOC_CONF", "debug:quarantine", 1);
    galloc_pool *pool;
    OK(galloc_pool_default(&pool, 0));
    unsetenv("GALLOC_CONF");
    callbacks.on_unmap = frees_the_next_in_on_unmap;
    OK(galloc_pool_set_callbacks(pool, &callbacks));
    next.stream = s;
    next.freed = 0;
    void *p = get(pool, MIB(2), s);
    for (int i = 0; i < NEXT_BUFFERS; i++) next.buffer[i] = get(pool, MIB(2), s);
    OK(galloc_free(p, s));
    OK(galloc_shutdown());
    EXPECT_EQ(next.freed, NEXT_BUFFERS);
    stream_end(s);
    finish();
}

/* The guard behind a block comes on top of the bytes that its room is for. */
TEST(a_guarded_block_grows_to_all_of_its_room)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_debug(GUARDS);
    galloc_request request = {0};
    void *p[8];
    request.bytes = MIB(2) - 4096;
    request.max_bytes = MIB(10);
    request.pool = pool;
    request.stream = s;
    for (int i = 0; i < 8; i++) OK(galloc_alloc(&p[i], &request));
    for (int i = 0; i < 8; i++) OK(galloc_resize(p[i], MIB(10), s));
    for (int i = 0; i < 8; i++) OK(galloc_free(p[i], s));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* galloc_pool_sync_point never waits, not for blocks in the quarantine either. */
TEST(a_sync_point_does_not_wait_for_the_quarantine)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_config config = galloc_config_default();
    size_t released;
    OK(galloc_config_parse(&config, "debug:quarantine,release_threshold:0", NULL, 0));
    galloc_pool *pool = pool_new(&config);
    void *p = get(pool, MIB(4), s), *q = get(pool, KIB(4), t);
    put(s, p, MIB(4), 1);
    OK(galloc_free(p, s));
    put(t, q, KIB(4), 1);
    long waits = sim_blocking_calls(), streams = sim_calls("cuStreamCreate");
    OK(galloc_pool_sync_point(pool, &released));
    EXPECT_EQ(sim_blocking_calls(), waits);
    EXPECT_EQ(sim_calls("cuStreamCreate"), streams);
    EXPECT(!sim_stream_done(t));
    EXPECT_EQ(stats_of(pool).unchecked, 0); /* the first of them stays, too */
    OK(cudaStreamSynchronize(s));
    OK(galloc_pool_sync_point(pool, &released));
    EXPECT_EQ(stats_of(pool).unchecked, 0);
    EXPECT_EQ(stats_of(pool).checks, 1);
    OK(galloc_free(q, t));
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* The blocks that the program has waited for leave, checked. */
TEST(a_sync_point_gives_back_what_is_in_the_quarantine)
{
    begin_backed(SIM_PACE_STILL);
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_config config = galloc_config_default();
    size_t released;
    OK(galloc_config_parse(&config, "debug:quarantine,release_threshold:0,growth:2M", NULL, 0));
    galloc_pool *pool = pool_new(&config);
    void *p = get(pool, MIB(4), s), *q = get(pool, MIB(4), s), *busy = get(pool, MIB(2), t);
    OK(galloc_free(p, s));
    OK(cudaMemsetAsync(p, 1, 100, s));
    OK(cudaStreamSynchronize(s));
    put(t, busy, MIB(2), 1);
    OK(galloc_free(q, s)); /* the program does not wait for this one */
    long waits = sim_blocking_calls();
    OK(galloc_pool_sync_point(pool, &released));
    EXPECT_EQ(sim_blocking_calls(), waits + 1); /* for the copy */
    EXPECT_EQ(released, MIB(4));
    EXPECT_EQ(stats_of(pool).damages, 1);
    EXPECT_EQ(stats_of(pool).unchecked, 0);
    OK(cudaStreamSynchronize(s));
    OK(galloc_pool_sync_point(pool, &released));
    EXPECT_EQ(released, MIB(4));
    EXPECT_EQ(stats_of(pool).unchecked, 0);
    OK(galloc_free(busy, t));
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* The checks wait for copies. No work of the program comes before those. */
TEST(a_sync_point_waits_for_no_default_stream)
{
    begin_backed(SIM_PACE_STILL);
    cudaStream_t s = stream_new(), t = stream_new(), own = cudaStreamPerThread;
    galloc_config config = galloc_config_default();
    OK(galloc_config_parse(&config, "debug:quarantine,release_threshold:0", NULL, 0));
    galloc_pool *pool = pool_new(&config);
    void *p = get(pool, MIB(3), s), *q = get(pool, MIB(3), own), *r = get(pool, MIB(3), t), *others;
    OK(cudaMalloc(&others, 512));
    OK(galloc_free(r, t));
    OK(galloc_free(p, s));
    OK(cudaStreamSynchronize(s));
    OK(cudaStreamSynchronize(t));
    put(own, q, MIB(3), 7);
    OK(galloc_free(q, own));
    OK(cudaMemsetAsync(others, 1, 512, cudaStreamLegacy));
    sim_hold(own, 1);
    sim_hold(cudaStreamLegacy, 1);
    long made = sim_calls("cuStreamCreate"), ended = sim_calls("cuStreamDestroy");
    OK(galloc_pool_sync_point(pool, NULL));
    sim_hold(own, 0);
    sim_hold(cudaStreamLegacy, 0);
    EXPECT_EQ(stats_of(pool).checks, 2); /* those before q; so it is with work of the program that has no event */
    EXPECT_EQ(sim_calls("cuStreamCreate") - made, 1);
    EXPECT_EQ(sim_calls("cuStreamDestroy") - ended, 1);
    OK(cudaStreamSynchronize(own));
    OK(galloc_pool_sync_point(pool, NULL));
    EXPECT_EQ(stats_of(pool).reserved.current, 0);
    EXPECT_EQ(stats_of(pool).checks, 3);
    OK(cudaFree(others));
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* Memory known to be unused goes first; the quarantine and the wait are for what that lacks. */
TEST(a_trim_waits_for_the_quarantine_only_if_need_be)
{
    begin_still();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_config config = galloc_config_default();
    size_t released;
    OK(galloc_config_parse(&config, "debug:quarantine,quarantine_bytes:1M,growth:2M", NULL, 0));
    galloc_pool *pool = pool_new(&config);
    void *busy = get(pool, MIB(2), t), *k;
    OK(galloc_free(get_used(pool, MIB(64), s, 1), s)); /* more than the quarantine takes */
    k = get(pool, MIB(1), s);
    OK(galloc_free(k, s)); /* stays there */
    OK(cudaStreamSynchronize(s));
    put(t, busy, MIB(2), 1);
    long waits = sim_blocking_calls();
    size_t held = stats_of(pool).reserved.current;
    for (int pages = 0; pages < 3; pages += 2) {
        OK(galloc_pool_trim(pool, held - MIB(pages), &released));
        EXPECT_EQ(released, MIB(pages));
    }
    EXPECT_EQ(sim_blocking_calls(), waits);
    EXPECT(!sim_stream_done(t));
    void *again = get(pool, MIB(1), s);
    EXPECT(again != k);
    OK(galloc_pool_trim(pool, 0, &released));
    EXPECT(sim_stream_done(t));
    OK(galloc_free(again, s));
    OK(galloc_free(busy, t));
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* After a reset the guard of a block whose memory is gone is not read: other memory may be there by now. */
TEST(guards_of_lost_blocks_are_not_read)
{
    begin();
    galloc_config config = config_fixed();
    config.debug = GALLOC_DEBUG_GUARDS;
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new();
    void *p = get(pool, 1000, s);
    OK(cudaDeviceReset());
    OK(cudaSetDevice(0));
    OK(cudaFree(0));
    s = stream_new();
    void *q = get(pool, MIB(30), s); /* the pool notices the reset */
    long copies = sim_calls("cuMemcpyDtoHAsync");
    galloc_stats before = stats_of(pool);
    OK(galloc_free(p, s));
    EXPECT_EQ(sim_calls("cuMemcpyDtoHAsync"), copies);
    EXPECT_EQ(stats_of(pool).unchecked, before.unchecked + 1);
    OK(galloc_free(q, s));
    OK(cudaStreamSynchronize(s));
    EXPECT_EQ(stats_of(pool).damages, 0);
    pool_end(pool);
    finish();
}

/* Growth on a default stream waits for the poison that frees have queued there, as an allocation does. */
TEST(growth_on_a_default_stream_waits_for_poison)
{
    begin_still();
    galloc_config config = galloc_config_default();
    config.debug = GALLOC_DEBUG_POISON;
    galloc_pool *pool = pool_new(&config);
    cudaStream_t t = stream_new();
    char *p = get(pool, 512, NULL), *behind = get(pool, 4096, NULL);
    EXPECT(behind == p + 512);
    OK(cudaDeviceSynchronize());
    OK(galloc_free(behind, NULL));
    OK(galloc_resize(p, 4096, NULL));
    put(t, p, 4096, 1); /* nothing but galloc's own work could be in the way */
    OK(cudaStreamSynchronize(t));
    OK(galloc_free(p, NULL));
    pool_end(pool);
    finish();
}

/* Growth that fails gives the program no memory, and so waits for no poison. */
TEST(growth_that_fails_on_a_default_stream_waits_for_no_poison)
{
    begin_still();
    galloc_config config = config_fixed();
    config.debug = GALLOC_DEBUG_POISON;
    galloc_pool *pool = pool_new(&config);
    char *p = get(pool, 512, NULL), *behind = get(pool, 4096, NULL), *other = get(pool, 4096, NULL);
    EXPECT(behind == p + 512);
    OK(cudaDeviceSynchronize());
    OK(galloc_free(other, NULL));
    long waits = sim_blocking_calls();
    EXPECT(galloc_resize(p, MIB(4), NULL) != cudaSuccess);
    EXPECT_EQ(sim_blocking_calls(), waits);
    EXPECT(!sim_stream_done(cudaStreamLegacy)); /* the poison */
    other = get(pool, 4096, NULL);
    EXPECT(sim_stream_done(cudaStreamLegacy));
    OK(galloc_free(other, NULL));
    OK(galloc_free(behind, NULL));
    OK(galloc_free(p, NULL));
    pool_end(pool);
    finish();
}

/* And so do requests of rounded sizes, with a sample: those that get no guard, too. */
TEST(rounded_requests_on_a_default_stream_wait_for_poison)
{
    enum { BLOCKS = 64 };
    static const char *const settings[] = {"debug:poison,debug_sample:3,roundup_power2_divisions:4",
                                           "debug:poison,debug_sample:3,strategy:pooled"};
    for (int k = 0; k < 2; k++) {
        begin_still();
        galloc_config config = galloc_config_default();
        OK(galloc_config_parse(&config, settings[k], NULL, 0));
        galloc_pool *pool = pool_new(&config);
        cudaStream_t t = stream_new();
        void *p[BLOCKS], *q;
        int poisoned = 0;
        for (int i = 0; i < BLOCKS; i++) p[i] = get(pool, 70000, NULL);
        OK(cudaDeviceSynchronize());
        for (int i = 0; i < BLOCKS; i++) {
            OK(galloc_free(p[i], NULL));
            poisoned += !sim_stream_done(cudaStreamLegacy);
            q = get(pool, 70000, NULL);
            put(t, q, 70000, 1); /* nothing but galloc's own work could be in the way */
            OK(cudaStreamSynchronize(t));
            OK(cudaDeviceSynchronize());
            p[i] = q;
        }
        EXPECT(poisoned > 0);
        for (int i = 0; i < BLOCKS; i++) OK(galloc_free(p[i], NULL));
        pool_end(pool);
        stream_end(t);
        finish();
    }
}

/* The next allocation on a default stream would wait for a check, on another stream it would not. */
TEST(with_a_limit_of_waits_other_streams_are_checked)
{
    begin_backed(SIM_PACE_STILL);
    cudaStream_t s = stream_new();
    galloc_config config = galloc_config_default();
    config.debug = GUARDS;
    config.wait_limit_ms = 1000;
    galloc_pool *pool = pool_new(&config);
    void *p = get(pool, 1000, s);
    write_at(p, 1000, 1, 1, s);
    OK(galloc_free(p, s));
    look_now(pool);
    EXPECT_EQ(stats_of(pool).checks, 1);
    EXPECT_EQ(stats_of(pool).unchecked, 0);
    EXPECT_EQ(stats_of(pool).damages, 1);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* Nothing is queued on a default stream then, so no allocation there waits: also not for a block of another stream that
   was freed there. */
TEST(with_a_limit_of_waits_no_allocation_waits_for_debug)
{
    for (int i = 0; i < 8; i++) {
        begin_backed(SIM_PACE_STILL);
        cudaStream_t s = stream_new(), first = i & 1 ? cudaStreamLegacy : cudaStreamPerThread;
        galloc_config config = galloc_config_default();
        config.debug = i & 4 ? GUARDS | POISON | QUARANTINE : GUARDS;
        config.wait_limit_ms = i & 2 ? 1000 : 0;
        galloc_pool *pool = pool_new(&config);
        void *p = get(pool, 1000, s);
        put(s, p, 1000, 1);
        order(s, first);
        OK(galloc_free(p, first));
        long waits = sim_blocking_calls();
        p = get(pool, 1000, first);
        EXPECT_EQ(sim_blocking_calls(), waits);
        OK(galloc_free(p, first));
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

/* Some checks have ended, and those begun before and after them have not, when a reset takes all. */
TEST(each_check_that_a_reset_takes_counts_once)
{
    enum { BLOCKS = 12 };
    begin_backed(SIM_PACE_STILL);
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_debug(GUARDS);
    void *first = get(pool, 1000, t), *p[BLOCKS], *later = get(pool, 1000, t);
    for (int i = 0; i < BLOCKS; i++) p[i] = get(pool, 1000, s);
    sim_hold(t, 1);
    OK(galloc_free(first, t));
    for (int i = 0; i < BLOCKS; i++) {
        OK(galloc_free(p[i], s));
        OK(cudaStreamSynchronize(s));
    }
    uint64_t ended = stats_of(pool).checks;
    EXPECT(ended > 1 && ended < BLOCKS);
    sim_hold(t, 0);
    OK(cudaDeviceReset());
    s = stream_new();
    OK(galloc_free(later, s));
    look_now(pool);
    EXPECT_EQ(stats_of(pool).checks + stats_of(pool).unchecked, BLOCKS + 2);
    EXPECT(stats_of(pool).unchecked >= 1 + BLOCKS - ended);
    for (int i = 0; i < 2; i++) OK(galloc_free(get(pool, 1000, s), s));
    look_now(pool);
    EXPECT_EQ(stats_of(pool).checks + stats_of(pool).unchecked, BLOCKS + 4);
    EXPECT_EQ(stats_of(pool).damages, 0);
    expect_healthy(pool, 1);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* What a memset of too many bytes leaves: each byte of the guard is wrong, and all are alike. */
TEST(a_guard_that_was_overwritten_as_a_whole_is_damaged)
{
    begin_backed(SIM_PACE_STILL);
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_debug(GUARDS);
    void *p = get(pool, 1000, s);
    write_at(p, 0, 0, 1536, s);
    OK(galloc_free(p, s));
    look_now(pool);
    EXPECT_EQ(stats_of(pool).damages, 1);
    expect_said("536 bytes");
    pool_end(pool);
    stream_end(s);
    finish();
}

/* The first call after a reset is no free: it does not read the host memory that the reset has taken. */
TEST(checks_end_with_a_reset_that_another_call_notices)
{
    begin_backed(SIM_PACE_STILL);
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_debug(GUARDS);
    void *p = get(pool, 1000, s), *q;
    OK(galloc_free(p, s));
    OK(cudaDeviceReset());
    look_now(pool);
    expect_checks(pool, 0, 1);
    s = stream_new();
    q = get(pool, 1000, s);
    OK(galloc_free(q, s)); /* with new host memory */
    look_now(pool);
    expect_checks(pool, 1, 1);
    OK(cudaDeviceReset());
    s = stream_new();
    q = get(pool, 1000, s);
    OK(galloc_free(q, s)); /* nothing was under way; this free notices the reset, and is checked itself */
    look_now(pool);
    expect_checks(pool, 2, 1);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* Work of debug meets a sticky error: what was called goes well, and the pool refuses requests from then on. */
TEST(a_sticky_error_that_debug_meets_is_noted)
{
    enum { SET, COPY, POISONED, KEPT, WAYS };
    for (int way = 0; way < WAYS; way++) {
        begin_backed(SIM_PACE_STILL);
        cudaStream_t s = stream_new();
        galloc_config config = galloc_config_default();
        config.debug = way == KEPT ? QUARANTINE : way == POISONED ? POISON : GUARDS;
        config.quarantine_bytes = KIB(8);
        galloc_pool *pool = pool_new(&config);
        void *p = get(pool, 6000, s), *q = get(pool, 6000, s), *r = NULL;
        if (way == KEPT) OK(galloc_free(q, s));
        sim_fail(way == COPY || way == KEPT ? "cuMemcpyDtoHAsync" : "cuMemsetD8Async", 1, 0, cudaErrorIllegalAddress);
        if (way == SET) OK(galloc_pool_malloc(pool, &r, 6000, s));
        else OK(galloc_free(p, s));
        EXPECT_EQ(sim_failed(), 1);
        sim_fail_clear();
        void *refused = NULL;
        EXPECT_EQ(galloc_pool_malloc(pool, &refused, 6000, s), cudaErrorIllegalAddress);
        EXPECT(strstr(galloc_last_message(), "refuses requests") != NULL);
        EXPECT_EQ(stats_of(pool).damages, 0);
        OK(cudaDeviceReset());
        (void)cudaGetLastError();
        s = stream_new();
        if (way == SET) OK(galloc_free(p, s));
        if (way != KEPT) OK(galloc_free(q, s));
        if (r) OK(galloc_free(r, s));
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

/* The copy of a block in quarantine fails, and the wait after it would not: nothing was read. */
TEST(a_kept_block_that_could_not_be_copied_is_unchecked)
{
    begin_backed(SIM_PACE_STILL);
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_quarantine(0);
    OK(galloc_free(get(pool, 1000, s), s));
    sim_fail("cuMemcpyDtoHAsync", 1, 1, cudaErrorUnknown);
    (void)galloc_pool_trim(pool, 0, NULL);
    EXPECT(sim_failed() > 0);
    sim_fail_clear();
    expect_checks(pool, 0, 1);
    expect_healthy(pool, 1);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* The driver refuses the first part of a long guard, and would set the second one: neither is compared. */
TEST(a_guard_without_its_first_part_is_unchecked)
{
    begin_backed(SIM_PACE_STILL);
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_debug(GUARDS);
    sim_fail("cuMemsetD8Async", 1, 0, 0);
    void *p = get_growable(pool, 1000, MIB(3), s);
    EXPECT_EQ(sim_failed(), 1);
    sim_fail_clear();
    OK(galloc_free(p, s));
    look_now(pool);
    expect_checks(pool, 0, 1);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* Of a long guard both ends are compared. Each first and last byte of them is found, and named as what it is. */
TEST(damage_at_the_edges_of_both_ends_is_named_by_its_place)
{
    enum { FIRST = 512, LAST = 256 };
    const size_t at[] = {1000, 1000 + FIRST - 1, MIB(2) - LAST, MIB(2) - 1};
    for (int k = 0; k < 4; k++) {
        begin_backed(SIM_PACE_STILL);
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_debug(GUARDS);
        void *p = get_growable(pool, 1000, MIB(3), s);
        char text[64];
        write_at(p, (ptrdiff_t)at[k], 1, 1, s);
        OK(galloc_free(p, s));
        look_now(pool);
        EXPECT_EQ(stats_of(pool).damages, 1);
        snprintf(text, sizeof text, ": 1 bytes, the first %zu behind its end, 0x01", at[k] - 1000);
        expect_said(text);
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

/* Checks that are under way, and blocks in quarantine. */
TEST(the_check_sees_each_word_of_guards)
{
    begin_still();
    cudaStream_t s = stream_new();
    galloc_config config = galloc_config_default();
    config.debug = GUARDS | QUARANTINE;
    config.quarantine_bytes = KIB(64);
    galloc_pool *pool = pool_new(&config);
    for (int i = 0; i < 3; i++) OK(galloc_free(get_used(pool, 1000, s, 1), s));
    expect_the_check_sees_all(pool);
    sim_run(-1);
    pool_end(pool);
    stream_end(s);
    finish();
}

static struct {
    void *block;
    int waits; /* the call has waited */
} poisoned_late;

static void *free_on_the_default_stream(void *block)
{
    OK(galloc_free(block, NULL));
    return NULL;
}

static void free_once_it_has_waited(const char *function)
{
    void *block = poisoned_late.block;
    pthread_t thread;
    if (!strcmp(function, "cuStreamSynchronize")) poisoned_late.waits = 1;
    else if (poisoned_late.waits && block) {
        poisoned_late.block = NULL;
        EXPECT_EQ(pthread_create(&thread, NULL, free_on_the_default_stream, block), 0);
        pthread_join(thread, NULL);
    }
}

/* A request on the default stream waits for poison. What another thread poisons meanwhile is not waited for. */
TEST(poison_that_is_queued_during_a_wait_is_waited_for_later)
{
    begin_still();
    galloc_config config = galloc_config_default();
    config.debug = POISON;
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new();
    void *p = get(pool, MIB(1), NULL), *q = get(pool, MIB(3), NULL), *again;
    OK(cudaDeviceSynchronize());
    OK(galloc_free(p, NULL));
    memset(&poisoned_late, 0, sizeof poisoned_late);
    poisoned_late.block = q;
    sim_hook(free_once_it_has_waited, NULL);
    p = get(pool, MIB(1), NULL);
    sim_hook(NULL, NULL);
    EXPECT(!poisoned_late.block);
    again = get(pool, MIB(3), NULL);
    EXPECT(again == q);
    put(s, again, MIB(3), 1); /* the default stream's work was waited for */
    OK(cudaDeviceSynchronize());
    OK(galloc_free(p, NULL));
    OK(galloc_free(again, s));
    OK(cudaDeviceSynchronize());
    pool_end(pool);
    stream_end(s);
    finish();
}

TEST_MAIN()
