/* gpu_behaviour.cu - what galloc promises, on a real driver: blocks, pools, errors, streams, capture.

   Each test is about the driver's side of a promise; the simulated device tests the rest, and more thoroughly. A gate
   holds a stream back for as long as a test wants, so that nothing here depends on how fast the device is. */

#include "work.h"

#include <sys/wait.h>
#include <unistd.h>

enum { COMPLETED = GALLOC_REUSE_COMPLETED, NO_WAITS = COMPLETED | GALLOC_REUSE_FOLLOWED, ALL = REUSE_ALL };

#define NO_LIMIT SIZE_MAX

/* Bytes of the device that are in use, by anybody. */
static size_t device_held(void)
{
    size_t left = 0, total = 0;
    OK(cudaMemGetInfo(&left, &total));
    return total - left;
}

/* Is what the device holds `bytes` more than `before`, give or take what the driver keeps for itself? */
static int holds_more(size_t before, size_t bytes)
{
    size_t held = device_held(), slack = mib(24);
    if (held + slack >= before + bytes && held <= before + bytes + slack) return 1;
    printf("    the device holds %zu bytes; %zu before, %zu expected in between\n", held, before, bytes);
    return 0;
}

/* A stream that a pool knows of: from then on frees on other streams leave marks. */
static cudaStream_t stream_in_play(galloc_pool *pool)
{
    cudaStream_t stream = stream_new();
    OK(galloc_free(get(pool, 512, stream), stream));
    return stream;
}

/* ---- blocks ------------------------------------------------------------------------------------------------------ */

TEST(blocks_hold_what_is_written_to_them)
{
    static const size_t sizes[] = {1, 4, 511, 512, 513, 4096, 1 << 20, (1 << 20) + 1, 10 << 20, 20 << 20, 67121001};
    enum { SIZES = sizeof sizes / sizeof sizes[0] };
    for (int expandable = 0; expandable < 2; expandable++) {
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_new(expandable, NO_LIMIT, ALL);
        void *p[SIZES];
        for (int i = 0; i < SIZES; i++) {
            p[i] = get(pool, sizes[i], s);
            galloc_pointer info = info_of((char *)p[i] + sizes[i] - 1);
            EXPECT_EQ((uintptr_t)p[i] % 512, 0);
            EXPECT(info.base == p[i] && info.pool == pool && info.state == GALLOC_STATE_USED);
            EXPECT_EQ(info.requested, sizes[i]);
            EXPECT(info.usable >= sizes[i]);
            device_fill(s, p[i], sizes[i], (uint32_t)i);
        }
        for (int i = 0; i < SIZES; i++) device_check(s, p[i], sizes[i], (uint32_t)i);
        for (int i = 0; i < SIZES; i++) OK(galloc_free(p[i], s));
        pool_end(pool);
        OK(cudaStreamDestroy(s));
    }
    finish();
}

TEST(nothing_is_asked_for_and_nothing_is_freed)
{
    void *p = &p;
    OK(galloc_malloc(&p, 0, NULL));
    EXPECT(p == NULL);
    OK(galloc_free(NULL, NULL));
    finish();
}

TEST(the_default_pool_serves_the_default_streams)
{
    void *p = NULL, *q = NULL;
    OK(galloc_malloc(&p, mib(3), NULL));
    device_fill(NULL, p, mib(3), 1);
    device_check(NULL, p, mib(3), 1);
    OK(galloc_free(p, NULL));
    OK(galloc_malloc(&q, mib(3), cudaStreamPerThread));
    device_fill(cudaStreamPerThread, q, mib(3), 2);
    device_check(cudaStreamPerThread, q, mib(3), 2);
    OK(galloc_free(q, cudaStreamPerThread));
    finish();
}

TEST(alignments_up_to_64_mib)
{
    for (int expandable = 0; expandable < 2; expandable++) {
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_new(expandable, NO_LIMIT, ALL);
        std::vector<void *> blocks;
        for (size_t alignment = 1; alignment <= mib(64); alignment *= 4) {
            galloc_request request = {};
            void *p = NULL;
            request.bytes = 1000 + alignment / 2;
            request.alignment = alignment;
            request.stream = s;
            request.pool = pool;
            OK(galloc_alloc(&p, &request));
            EXPECT(p != NULL && (uintptr_t)p % alignment == 0);
            device_fill(s, p, request.bytes, (uint32_t)alignment);
            device_check(s, p, request.bytes, (uint32_t)alignment);
            blocks.push_back(p);
        }
        for (size_t i = 0; i < blocks.size(); i++) OK(galloc_free(blocks[i], s));
        pool_end(pool);
        OK(cudaStreamDestroy(s));
    }
    finish();
}

TEST(a_block_grows_into_its_room_and_keeps_its_contents)
{
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(1, NO_LIMIT, ALL);
    galloc_request request = {};
    void *p = NULL;
    request.bytes = mib(1);
    request.max_bytes = mib(64);
    request.stream = s;
    request.pool = pool;
    OK(galloc_alloc(&p, &request));
    EXPECT(stats_of(pool).reserved.current < mib(64));
    EXPECT(info_of(p).room >= mib(64));
    device_fill(s, p, mib(1), 1);
    void *neighbour = get(pool, mib(4), s);
    device_fill(s, neighbour, mib(4), 2);
    for (size_t bytes = mib(2); bytes <= mib(64); bytes *= 2) OK(galloc_resize(p, bytes, s));
    device_check(s, p, mib(1), 1);
    device_fill(s, p, mib(64), 3);
    device_check(s, p, mib(64), 3);
    cudaError_t beyond = galloc_resize(p, mib(64) + 1, s); /* as the addresses there happen to be */
    EXPECT(beyond == cudaSuccess || beyond == cudaErrorNotSupported);
    OK(galloc_resize(p, mib(16), s));
    device_check(s, neighbour, mib(4), 2);
    EXPECT_EQ(info_of(p).requested, mib(16));
    OK(galloc_free(p, s));
    OK(galloc_free(neighbour, s));
    pool_end(pool);
    OK(cudaStreamDestroy(s));
    finish();
}

TEST(a_block_shrinks_and_its_end_is_free)
{
    for (int expandable = 0; expandable < 2; expandable++) {
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_new(expandable, NO_LIMIT, ALL);
        void *p = get(pool, mib(32), s);
        device_fill(s, p, mib(8), 1);
        OK(galloc_resize(p, mib(8), s));
        size_t held = stats_of(pool).reserved.current;
        void *q = get(pool, mib(20), s);
        device_fill(s, q, mib(20), 2);
        device_check(s, p, mib(8), 1);
        device_check(s, q, mib(20), 2);
        EXPECT_EQ(stats_of(pool).reserved.current, held);
        OK(galloc_free(p, s));
        OK(galloc_free(q, s));
        pool_end(pool);
        OK(cudaStreamDestroy(s));
    }
    finish();
}

/* ---- memory of the device ---------------------------------------------------------------------------------------- */

TEST(counters_say_what_the_device_says)
{
    for (int expandable = 0; expandable < 2; expandable++) {
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_new(expandable, NO_LIMIT, ALL);
        void *p[16];
        OK(cudaDeviceSynchronize());
        size_t before = device_held();
        for (int i = 0; i < 16; i++) p[i] = get(pool, mib(64) + kib(600) * (size_t)i, s);
        galloc_stats stats = stats_of(pool);
        EXPECT(holds_more(before, stats.reserved.current));
        EXPECT(stats.live.current >= mib(1024) && stats.reserved.current >= stats.live.current);
        EXPECT_EQ(stats.blocks.current, 16);
        for (int i = 0; i < 16; i++) OK(galloc_free(p[i], s));
        EXPECT(holds_more(before, stats.reserved.current));
        OK(galloc_pool_trim(pool, 0, NULL));
        EXPECT_EQ(stats_of(pool).reserved.current, 0);
        EXPECT(holds_more(before, 0));
        pool_end(pool);
        OK(cudaStreamDestroy(s));
    }
    finish();
}

TEST(memory_goes_back_when_a_pool_ends)
{
    for (int expandable = 0; expandable < 2; expandable++) {
        cudaStream_t s = stream_new();
        size_t before = device_held();
        for (int i = 0; i < 3; i++) {
            galloc_pool *pool = pool_new(expandable, NO_LIMIT, ALL);
            void *p = get(pool, mib(300), s);
            device_fill(s, p, mib(300), 1);
            OK(galloc_free(p, s));
            pool_end(pool);
        }
        EXPECT(holds_more(before, 0));
        OK(cudaStreamDestroy(s));
    }
    finish();
}

TEST(trim_gives_back_what_lies_between_used_blocks)
{
    for (int expandable = 0; expandable < 2; expandable++) {
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_new(expandable, NO_LIMIT, ALL);
        size_t before = device_held();
        void *p[9];
        for (int i = 0; i < 9; i++) {
            p[i] = get(pool, mib(64), s);
            device_fill(s, p[i], mib(64), (uint32_t)i);
        }
        for (int i = 1; i < 9; i += 2) OK(galloc_free(p[i], s));
        size_t held = stats_of(pool).reserved.current;
        OK(galloc_pool_trim(pool, held - mib(60), NULL));
        EXPECT(stats_of(pool).reserved.current <= held - mib(60));
        EXPECT(stats_of(pool).reserved.current >= held - mib(128));
        OK(galloc_pool_trim(pool, 0, NULL));
        EXPECT(stats_of(pool).reserved.current < mib(64 * 6));
        EXPECT(holds_more(before, stats_of(pool).reserved.current));
        for (int i = 0; i < 9; i += 2) device_check(s, p[i], mib(64), (uint32_t)i);
        for (int i = 0; i < 9; i += 2) OK(galloc_free(p[i], s));
        pool_end(pool);
        OK(cudaStreamDestroy(s));
    }
    finish();
}

TEST(reserved_memory_needs_no_driver_any_more)
{
    for (int expandable = 0; expandable < 2; expandable++) {
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = pool_new(expandable, NO_LIMIT, ALL);
        OK(galloc_pool_reserve(pool, mib(512)));
        galloc_stats before = stats_of(pool);
        void *p = get(pool, mib(300), s), *q = get(pool, mib(200), t);
        galloc_stats after = stats_of(pool);
        EXPECT(before.reserved.current >= mib(512));
        EXPECT_EQ(after.reserved.current, before.reserved.current);
        EXPECT_EQ(after.driver.create + after.driver.mem_alloc, before.driver.create + before.driver.mem_alloc);
        EXPECT_EQ(after.hits, 2);
        device_fill(s, p, mib(300), 1);
        device_fill(t, q, mib(200), 2);
        device_check(s, p, mib(300), 1);
        device_check(t, q, mib(200), 2);
        OK(galloc_free(p, s));
        OK(galloc_free(q, t));
        pool_end(pool);
        OK(cudaStreamDestroy(s));
        OK(cudaStreamDestroy(t));
    }
    finish();
}

/* A stretch of pages is put together from free pieces: nothing is created for it, nothing is copied. Work that is still
   queued for the old addresses comes before work through the new ones, since both are on one stream. */
TEST(pages_move_to_where_memory_is_short)
{
    enum { BLOCKS = 32 };
    cudaStream_t s = stream_new();
    galloc_config config = galloc_config_default();
    galloc_pool *pool = NULL;
    config.overhead = 0;
    OK(galloc_pool_create(&pool, &config));
    void *p[BLOCKS];
    for (int round = 0; round < 4; round++) {
        for (int i = 0; i < BLOCKS; i++) p[i] = get(pool, mib(8), s);
        for (int i = 0; i < BLOCKS; i++) device_fill(s, p[i], mib(8), (uint32_t)i);
        gate g = gate_close(s);
        for (int i = 0; i < BLOCKS; i += 2) {
            device_fill(s, p[i], mib(8), 1000);
            OK(galloc_free(p[i], s));
        }
        galloc_stats before = stats_of(pool);
        void *q = get(pool, mib(100), s);
        galloc_stats after = stats_of(pool);
        if (round == 0) EXPECT(after.moves > 0);
        EXPECT(after.reserved.current <= before.reserved.current + mib(8));
        device_fill(s, q, mib(100), 2000);
        device_check(s, q, mib(100), 2000);
        EXPECT(is_busy(s));
        gate_open(g);
        for (int i = 1; i < BLOCKS; i += 2) device_check(s, p[i], mib(8), (uint32_t)i);
        device_check(s, q, mib(100), 2000);
        OK(galloc_free(q, s));
        for (int i = 1; i < BLOCKS; i += 2) OK(galloc_free(p[i], s));
        expect_healthy(pool);
    }
    OK(cudaStreamSynchronize(s));
    OK(galloc_pool_trim(pool, 0, NULL));
    EXPECT_EQ(stats_of(pool).leaving, 0);
    EXPECT_EQ(stats_of(pool).reserved.current, 0);
    pool_end(pool);
    OK(cudaStreamDestroy(s));
    finish();
}

/* ---- errors ------------------------------------------------------------------------------------------------------ */

TEST(a_limit_is_kept)
{
    for (int expandable = 0; expandable < 2; expandable++) {
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_new(expandable, mib(64), ALL);
        void *p = get(pool, mib(40), s), *q = &q;
        EXPECT_EQ(galloc_pool_malloc(pool, &q, mib(40), s), cudaErrorMemoryAllocation);
        EXPECT(q == NULL);
        EXPECT(strstr(galloc_last_message(), "limit") != NULL);
        EXPECT(stats_of(pool).reserved.peak <= mib(64));
        OK(galloc_free(p, s));
        OK(galloc_free(get(pool, mib(50), s), s));
        pool_end(pool);
        OK(cudaStreamDestroy(s));
    }
    finish();
}

/* More than there are addresses, more than the device has, and more than is left of it: the last one asks the driver
   for page after page until it has no more. */
TEST(more_than_there_is_cannot_be_had)
{
    for (int expandable = 0; expandable < 2; expandable++) {
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_new(expandable, NO_LIMIT, ALL);
        void *p = get(pool, mib(10), s);
        device_fill(s, p, mib(10), 1);
        OK(cudaStreamSynchronize(s));
        size_t held = device_held(), left = 0, total = 0;
        OK(cudaMemGetInfo(&left, &total));
        const size_t sizes[] = {SIZE_MAX, SIZE_MAX / 2, (size_t)1 << 50, total + mib(1024), left + mib(256)};
        long lines = log_lines;
        for (int i = 0; i < 5; i++) {
            void *q = &q;
            EXPECT_EQ(galloc_pool_malloc(pool, &q, sizes[i], s), cudaErrorMemoryAllocation);
            EXPECT(q == NULL);
            EXPECT(galloc_last_message()[0] != 0);
            OK(cudaPeekAtLastError());
        }
        EXPECT_EQ(log_lines - lines, 5);
        EXPECT_EQ(stats_of(pool).failures, 5);
        EXPECT(holds_more(held, 0));
        expect_healthy(pool);
        device_check(s, p, mib(10), 1);
        OK(galloc_free(p, s));
        OK(galloc_free(get(pool, mib(100), s), s));
        pool_end(pool);
        OK(cudaStreamDestroy(s));
    }
    finish();
}

TEST(wrong_pointers_are_refused)
{
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(1, NO_LIMIT, ALL);
    char *p = (char *)get(pool, mib(4), s), on_host = 0;
    void *plain = NULL;
    OK(cudaMalloc(&plain, 4096));
    EXPECT_EQ(galloc_free(&on_host, s), cudaErrorInvalidDevicePointer);
    EXPECT_EQ(galloc_free(plain, s), cudaErrorInvalidDevicePointer);
    EXPECT_EQ(galloc_free(p + 512, s), cudaErrorInvalidDevicePointer);
    EXPECT_EQ(galloc_free(p + 1, s), cudaErrorInvalidDevicePointer);
    EXPECT_EQ(galloc_record_stream(p + 1, s), cudaErrorInvalidDevicePointer);
    EXPECT_EQ(galloc_resize(plain, 1, s), cudaErrorInvalidDevicePointer);
    EXPECT_EQ(info_of(plain).state, GALLOC_STATE_FOREIGN);
    EXPECT_EQ(info_of(&on_host).state, GALLOC_STATE_FOREIGN);
    EXPECT_EQ(galloc_pool_destroy(pool), cudaErrorNotPermitted);
    OK(galloc_free(p, s));
    EXPECT_EQ(info_of(p).state, GALLOC_STATE_FREE);
    EXPECT_EQ(galloc_free(p, s), cudaErrorInvalidDevicePointer);
    EXPECT(strstr(galloc_last_message(), "freed") != NULL);
    OK(cudaPeekAtLastError());
    OK(cudaFree(plain));
    pool_end(pool);
    OK(cudaStreamDestroy(s));
    finish();
}

TEST(the_programs_own_error_stays)
{
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(1, mib(64), ALL);
    EXPECT_EQ(cudaSetDevice(12345), cudaErrorInvalidDevice);
    void *p = get(pool, mib(8), s), *q = NULL;
    EXPECT_EQ(galloc_pool_malloc(pool, &q, mib(80), s), cudaErrorMemoryAllocation);
    EXPECT_EQ(galloc_free(&q, s), cudaErrorInvalidDevicePointer);
    OK(galloc_free(p, s));
    OK(galloc_pool_trim(pool, 0, NULL));
    EXPECT_EQ(cudaPeekAtLastError(), cudaErrorInvalidDevice);
    EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
    pool_end(pool);
    OK(cudaStreamDestroy(s));
    finish();
}

TEST(a_forked_child_is_refused)
{
    void *p = NULL;
    OK(galloc_malloc(&p, 1000, NULL));
    pid_t child = fork();
    if (child == 0) {
        void *q = NULL;
        cudaError_t a = galloc_malloc(&q, 1000, NULL), b = galloc_free(p, NULL);
        _exit(a == cudaErrorInitializationError && b == cudaErrorInitializationError && !q ? 0 : 1);
    }
    int status = -1;
    EXPECT(child > 0 && waitpid(child, &status, 0) == child);
    EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    OK(galloc_free(p, NULL));
    finish();
}

/* ---- streams ----------------------------------------------------------------------------------------------------- */

TEST(own_memory_is_reused_while_its_work_is_pending)
{
    for (int expandable = 0; expandable < 2; expandable++) {
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_new(expandable, mib(64), ALL);
        gate g = gate_close(s);
        for (uint32_t i = 0; i < 100; i++) {
            void *p = get(pool, mib(48), s);
            device_fill(s, p, mib(48), i);
            device_check(s, p, mib(48), i);
            OK(galloc_free(p, s));
        }
        EXPECT(is_busy(s));
        EXPECT_EQ(stats_of(pool).marks + stats_of(pool).waits, 0);
        EXPECT_EQ(stats_of(pool).grows, 1);
        gate_open(g);
        pool_end(pool);
        OK(cudaStreamDestroy(s));
    }
    finish();
}

TEST(pending_memory_is_given_to_nobody_else)
{
    for (int expandable = 0; expandable < 2; expandable++) {
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_new(expandable, NO_LIMIT, NO_WAITS);
        cudaStream_t t = stream_in_play(pool);
        void *p = get(pool, mib(64), s);
        gate g = gate_close(s);
        device_fill(s, p, mib(64), 1);
        OK(galloc_free(p, s));
        void *q = get(pool, mib(64), t);
        EXPECT(!overlap(p, q, mib(64)));
        device_fill(t, q, mib(64), 2);
        OK(cudaStreamSynchronize(t));
        EXPECT(is_busy(s));
        gate_open(g);
        OK(cudaStreamSynchronize(s));
        device_check(t, q, mib(64), 2);
        OK(galloc_free(q, t));
        pool_end(pool);
        OK(cudaStreamDestroy(s));
        OK(cudaStreamDestroy(t));
    }
    finish();
}

TEST(completed_memory_is_given_to_others)
{
    for (int expandable = 0; expandable < 2; expandable++) {
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_new(expandable, mib(96), COMPLETED);
        cudaStream_t t = stream_in_play(pool);
        void *p = get(pool, mib(64), s);
        device_fill(s, p, mib(64), 1);
        OK(galloc_free(p, s));
        OK(cudaStreamSynchronize(s));
        void *q = get(pool, mib(64), t);
        EXPECT(overlap(p, q, mib(64)));
        EXPECT_EQ(stats_of(pool).waits, 0);
        EXPECT_EQ(stats_of(pool).driver.event_synchronize + stats_of(pool).driver.host_free, 0);
        device_fill(t, q, mib(64), 2);
        device_check(t, q, mib(64), 2);
        OK(galloc_free(q, t));
        pool_end(pool);
        OK(cudaStreamDestroy(s));
        OK(cudaStreamDestroy(t));
    }
    finish();
}

TEST(under_pressure_the_stream_waits_and_not_the_host)
{
    for (int expandable = 0; expandable < 2; expandable++) {
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_new(expandable, mib(96), ALL);
        cudaStream_t t = stream_in_play(pool);
        void *p = get(pool, mib(64), s);
        gate g = gate_close(s);
        device_fill(s, p, mib(64), 1);
        OK(galloc_free(p, s));
        void *q = get(pool, mib(64), t);
        EXPECT(overlap(p, q, mib(64)));
        EXPECT_EQ(stats_of(pool).waits, 1);
        device_fill(t, q, mib(64), 2);
        device_check(t, q, mib(64), 2);
        EXPECT(is_busy(s));
        EXPECT(is_busy(t));
        gate_open(g);
        OK(cudaStreamSynchronize(s));
        device_check(t, q, mib(64), 2);
        OK(galloc_free(q, t));
        pool_end(pool);
        OK(cudaStreamDestroy(s));
        OK(cudaStreamDestroy(t));
    }
    finish();
}

static void open_later(gate g, std::atomic<int> *started)
{
    int device = -1;
    OK(cudaGetDevice(&device)); /* makes the thread one that the device knows of */
    *started = 1;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    gate_open(g);
}

TEST(a_stream_that_may_not_wait_is_not_made_to)
{
    for (int expandable = 0; expandable < 2; expandable++) {
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_new(expandable, mib(96), COMPLETED);
        cudaStream_t t = stream_in_play(pool);
        void *p = get(pool, mib(64), s);
        gate g = gate_close(s);
        device_fill(s, p, mib(64), 1);
        OK(galloc_free(p, s));
        std::atomic<int> started(0);
        std::thread opener(open_later, g, &started);
        while (!started) std::this_thread::yield();
        void *q = get(pool, mib(64), t); /* the host waits, for just the one event */
        EXPECT(*g.open);
        opener.join();
        EXPECT_EQ(stats_of(pool).waits, 0);
        device_fill(t, q, mib(64), 2);
        OK(cudaStreamSynchronize(s));
        device_check(t, q, mib(64), 2);
        OK(galloc_free(q, t));
        pool_end(pool);
        OK(cudaStreamDestroy(s));
        OK(cudaStreamDestroy(t));
    }
    finish();
}

TEST(recorded_memory_is_kept_from_its_own_stream)
{
    for (int expandable = 0; expandable < 2; expandable++) {
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = pool_new(expandable, NO_LIMIT, NO_WAITS);
        void *p = get(pool, mib(32), s);
        device_fill(s, p, mib(32), 1);
        order(s, t);
        gate g = gate_close(t);
        device_check(t, p, mib(32), 1);
        OK(galloc_record_stream(p, t));
        OK(galloc_free(p, s));
        void *q = get(pool, mib(32), s);
        EXPECT(!overlap(p, q, mib(32)));
        device_fill(s, q, mib(32), 2);
        gate_open(g);
        OK(cudaStreamSynchronize(t));
        device_check(s, q, mib(32), 2);
        OK(galloc_free(q, s));
        OK(cudaDeviceSynchronize());
        size_t held = stats_of(pool).reserved.current;
        void *a = get(pool, mib(30), s), *b = get(pool, mib(30), t);
        EXPECT_EQ(stats_of(pool).reserved.current, held);
        OK(galloc_free(a, s));
        OK(galloc_free(b, t));
        pool_end(pool);
        OK(cudaStreamDestroy(s));
        OK(cudaStreamDestroy(t));
    }
    finish();
}

TEST(memory_of_several_streams_waits_for_all_of_them)
{
    for (int expandable = 0; expandable < 2; expandable++) {
        cudaStream_t s = stream_new(), t = stream_new(), both[2] = {s, t};
        galloc_pool *pool = pool_new(expandable, mib(96), ALL);
        void *p = get(pool, mib(64), s);
        device_fill(s, p, mib(64), 1);
        order(s, t);
        gate g = gate_close(t);
        device_check(t, p, mib(64), 1);
        OK(galloc_free_after(p, both, 2));
        void *q = get(pool, mib(64), s);
        EXPECT(overlap(p, q, mib(64)));
        EXPECT(stats_of(pool).waits >= 1);
        device_fill(s, q, mib(64), 2);
        EXPECT(is_busy(s));
        gate_open(g);
        device_check(s, q, mib(64), 2);
        OK(galloc_free(q, s));
        pool_end(pool);
        OK(cudaStreamDestroy(s));
        OK(cudaStreamDestroy(t));
    }
    finish();
}

/* A handle comes back for another stream while the first one's work still runs. `bytes` large: the free left a mark;
   small: it left none. */
static void recycle_a_handle(int expandable, size_t bytes, int retire)
{
    cudaStream_t s = stream_new(), first = s, others[8];
    galloc_pool *pool = pool_new(expandable, NO_LIMIT, NO_WAITS);
    cudaStream_t t = stream_in_play(pool);
    void *p = get(pool, bytes, s);
    gate g = gate_close(s);
    device_fill(s, p, bytes, 1);
    OK(galloc_free(p, s));
    if (retire) OK(galloc_stream_retire(s));
    OK(cudaStreamDestroy(s));
    int n = 0;
    do s = others[n++] = stream_new();
    while (s != first && n < 8);
    if (s != first) printf("    the handle did not come back; another new stream does as well\n");
    void *q = get(pool, bytes, s);
    EXPECT(!overlap(p, q, bytes));
    device_fill(s, q, bytes, 2);
    OK(cudaStreamSynchronize(s));
    gate_open(g);
    OK(cudaDeviceSynchronize());
    device_check(s, q, bytes, 2);
    OK(galloc_free(q, s));
    OK(galloc_free(get(pool, bytes, t), t));
    pool_end(pool);
    for (int i = 0; i < n; i++) OK(cudaStreamDestroy(others[i]));
    OK(cudaStreamDestroy(t));
}

TEST(a_recycled_handle_is_another_stream)
{
    for (int i = 0; i < 8; i++) recycle_a_handle(i & 1, i & 2 ? mib(32) : kib(64), i & 4);
    finish();
}

TEST(what_a_dead_stream_left_is_found_when_memory_runs_out)
{
    for (int expandable = 0; expandable < 2; expandable++) {
        galloc_pool *pool = pool_new(expandable, mib(22), ALL);
        cudaStream_t t = stream_in_play(pool), s = stream_new();
        void *p[10];
        for (int i = 0; i < 10; i++) {
            p[i] = get(pool, kib(100), s);
            device_fill(s, p[i], kib(100), (uint32_t)i);
        }
        for (int i = 0; i < 10; i++) OK(galloc_free(p[i], s));
        OK(cudaStreamDestroy(s));
        void *q = get(pool, mib(20), t);
        device_fill(t, q, mib(20), 1);
        device_check(t, q, mib(20), 1);
        OK(galloc_free(q, t));
        pool_end(pool);
        OK(cudaStreamDestroy(t));
    }
    finish();
}

/* CUDA orders work on legacy with that of blocking streams, but a free for legacy queues none. */
TEST(calls_for_legacy_order_no_blocking_streams)
{
    for (int expandable = 0; expandable < 2; expandable++) {
        cudaStream_t b = NULL, c = NULL;
        OK(cudaStreamCreate(&b));
        OK(cudaStreamCreate(&c));
        galloc_pool *pool = pool_new(expandable, NO_LIMIT, NO_WAITS);
        void *p = get(pool, mib(64), NULL);
        gate g = gate_close(b);
        device_fill(b, p, mib(64), 1);
        OK(galloc_free(p, NULL));
        void *q = get(pool, mib(64), c);
        EXPECT(!overlap(p, q, mib(64)));
        device_fill(c, q, mib(64), 2);
        device_check(c, q, mib(64), 2);
        OK(galloc_free(q, c));
        EXPECT(is_busy(b));
        gate_open(g);
        pool_end(pool);
        OK(cudaStreamDestroy(b));
        OK(cudaStreamDestroy(c));
    }
    finish();
}

static void take_on_default_stream(galloc_pool *pool, const void *avoid)
{
    void *q = get(pool, mib(32), cudaStreamPerThread);
    EXPECT(!overlap(avoid, q, mib(32)));
    device_fill(cudaStreamPerThread, q, mib(32), 2);
    device_check(cudaStreamPerThread, q, mib(32), 2);
    OK(galloc_free(q, cudaStreamPerThread));
    OK(cudaStreamSynchronize(cudaStreamPerThread));
}

TEST(each_thread_has_a_default_stream_of_its_own)
{
    for (int expandable = 0; expandable < 2; expandable++) {
        galloc_pool *pool = pool_new(expandable, NO_LIMIT, NO_WAITS);
        void *p = get(pool, mib(32), cudaStreamPerThread);
        gate g = gate_close(cudaStreamPerThread);
        device_fill(cudaStreamPerThread, p, mib(32), 1);
        OK(galloc_free(p, cudaStreamPerThread));
        std::thread other(take_on_default_stream, pool, p);
        other.join();
        EXPECT(is_busy(cudaStreamPerThread));
        gate_open(g);
        pool_end(pool);
    }
    finish();
}

/* ---- capture ----------------------------------------------------------------------------------------------------- */

static const cudaStreamCaptureMode modes[] = {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal,
                                              cudaStreamCaptureModeRelaxed};

/* A capture of a fill of `bytes` at p. */
typedef struct capture {
    cudaStream_t stream;
    void *p;
    size_t bytes;
    uint32_t tag;
} capture;

static void capture_begin(const capture *c, cudaStreamCaptureMode mode)
{
    OK(cudaStreamBeginCapture(c->stream, mode));
    device_fill(c->stream, c->p, c->bytes, c->tag);
}

/* Ends it, launches the graph and looks at what it did. */
static void capture_end(const capture *c)
{
    cudaGraph_t graph = NULL;
    cudaGraphExec_t instance = NULL;
    device_fill(c->stream, c->p, c->bytes, c->tag + 1);
    if (!OK(cudaStreamEndCapture(c->stream, &graph))) {
        (void)cudaGetLastError();
        return;
    }
    OK(cudaGraphInstantiate(&instance, graph, 0));
    OK(cudaGraphLaunch(instance, c->stream));
    device_check(c->stream, c->p, c->bytes, c->tag + 1);
    OK(cudaStreamSynchronize(c->stream));
    OK(cudaGraphExecDestroy(instance));
    OK(cudaGraphDestroy(graph));
}

/* In every mode; what has no meaning for a graph is refused, and the capture is not harmed. */
TEST(a_captured_stream_is_served_and_unharmed)
{
    for (int round = 0; round < 6; round++) {
        cudaStream_t s = NULL, t = stream_new();
        OK(cudaStreamCreateWithFlags(&s, round / 3 ? cudaStreamDefault : cudaStreamNonBlocking));
        cudaStream_t both[2] = {t, s};
        galloc_pool *pool = pool_new(1, NO_LIMIT, ALL);
        void *p = get(pool, mib(8), s), *q[4] = {};
        galloc_request request = {};
        request.bytes = 1000;
        request.stream = s;
        request.pool = pool;
        capture c = {s, p, mib(8), 7};
        long lines = log_lines;
        capture_begin(&c, modes[round % 3]);
        OK(galloc_malloc((void **)&q[0], 1000, s));
        OK(galloc_alloc((void **)&q[1], &request));
        OK(galloc_pool_malloc(pool, (void **)&q[2], mib(3), s));
        OK(galloc_malloc_growable((void **)&q[3], mib(2), mib(8), s));
        device_fill(s, q[2], mib(3), 3);
        device_check(s, q[2], mib(3), 3);
        OK(galloc_free(q[2], s));
        OK(galloc_free_after(q[1], both, 2));
        OK(galloc_record_stream(p, s));
        EXPECT_EQ(log_lines - lines, 0);
        EXPECT_EQ(galloc_resize(p, mib(4), s), cudaErrorNotSupported);
        EXPECT_EQ(galloc_stream_retire(s), cudaErrorStreamCaptureUnsupported);
        EXPECT_EQ(log_lines - lines, 2);
        OK(cudaPeekAtLastError());
        capture_end(&c);
        EXPECT_EQ(info_of(p).requested, mib(8));
        OK(galloc_free(p, s));
        OK(galloc_free(q[0], s));
        OK(galloc_free(q[3], s));
        pool_end(pool);
        OK(cudaStreamDestroy(s));
        OK(cudaStreamDestroy(t));
    }
    finish();
}

/* One of each call, on streams that are not captured, with work pending: growing, polling, waiting, trimming. What
   needs to wait for the device may refuse; the capture must stand either way. */
typedef struct busy_pool {
    galloc_pool *pool, *other;
    cudaStream_t s, t;
    void *legacy; /* got on the legacy stream and not freed on it: that may be out of bounds */
} busy_pool;

static void call_everything(busy_pool *w)
{
    w->other = pool_new(1, NO_LIMIT, ALL);
    void *p = get(w->pool, mib(40), w->s), *q = get(w->pool, mib(20), w->t), *r = NULL;
    device_fill(w->s, p, mib(40), 1);
    device_fill(w->t, q, mib(20), 2);
    order(w->s, w->t);
    OK(galloc_record_stream(p, w->t));
    OK(galloc_resize(p, mib(30), w->s));
    OK(galloc_free(p, w->s));
    OK(galloc_free(q, w->t));
    if (galloc_pool_malloc(w->pool, &r, mib(70), w->t) == cudaSuccess) { /* more than is left: has to be waited for */
        device_fill(w->t, r, mib(70), 3);
        OK(galloc_free_after(r, &w->t, 1));
    }
    if (galloc_pool_malloc(w->pool, &w->legacy, kib(64), NULL) == cudaSuccess)
        if (galloc_free(w->legacy, NULL) == cudaSuccess) w->legacy = NULL;
    (void)galloc_pool_reserve(w->pool, mib(90));
    (void)galloc_pool_trim(w->pool, 0, NULL);
    OK(galloc_stream_retire(w->s));
    OK(galloc_free(get(w->other, mib(64), w->s), w->s));
    expect_healthy(w->pool);
    if (galloc_pool_destroy(w->other) == cudaSuccess) w->other = NULL;
    OK(cudaPeekAtLastError());
}

TEST(no_call_breaks_a_capture)
{
    for (int round = 0; round < 24; round++) { /* mode, kind of stream, which thread calls, kind of pool */
        cudaStream_t captured = NULL;
        OK(cudaStreamCreateWithFlags(&captured, round / 3 % 2 ? cudaStreamDefault : cudaStreamNonBlocking));
        busy_pool w = {pool_new(round / 12, mib(100), ALL), NULL, stream_new(), stream_new(), NULL};
        capture c = {captured, get(w.pool, mib(2), captured), mib(2), 11};
        capture_begin(&c, modes[round % 3]);
        if (round / 6 % 2) {
            call_everything(&w);
        } else {
            std::thread other(call_everything, &w);
            other.join();
        }
        capture_end(&c);
        OK(galloc_free(c.p, captured));
        OK(galloc_free(w.legacy, NULL));
        if (w.other) pool_end(w.other);
        pool_end(w.pool);
        OK(cudaStreamDestroy(captured));
        OK(cudaStreamDestroy(w.s));
        OK(cudaStreamDestroy(w.t));
    }
    finish();
}

/* ---- threads ----------------------------------------------------------------------------------------------------- */

static void allocate_much(galloc_pool *pool, uint32_t seed)
{
    cudaStream_t s = stream_new();
    dice d = {seed};
    void *p[8] = {};
    size_t bytes[8] = {};
    for (int i = 0; i < 400; i++) {
        uint32_t k = roll_below(&d, 8);
        if (p[k]) {
            device_check(s, p[k], bytes[k], seed + k);
            OK(galloc_free(p[k], s));
        }
        bytes[k] = 1 + roll(&d) % (roll_below(&d, 4) ? kib(64) : mib(8));
        p[k] = get(pool, bytes[k], s);
        device_fill(s, p[k], bytes[k], seed + k);
    }
    for (int k = 0; k < 8; k++) OK(galloc_free(p[k], s));
    OK(galloc_stream_retire(s));
    OK(cudaStreamDestroy(s));
}

TEST(threads_share_a_pool)
{
    for (int expandable = 0; expandable < 2; expandable++) {
        galloc_pool *pool = pool_new(expandable, NO_LIMIT, ALL);
        std::vector<std::thread> threads;
        for (uint32_t i = 0; i < 8; i++) threads.push_back(std::thread(allocate_much, pool, 1000 * (i + 1)));
        for (size_t i = 0; i < threads.size(); i++) threads[i].join();
        EXPECT_EQ(stats_of(pool).live.current, 0);
        EXPECT_EQ(stats_of(pool).mallocs, 8 * 400);
        pool_end(pool);
    }
    finish();
}

int main(int argc, char **argv)
{
    int status = work_start();
    return status ? status : test_main(argc, argv);
}
