/* gpu_devices.cu - two devices in one process: their default pools, streams of both, frees across, pages that move on
   one while the other is current. Says "skipped: one device" where there is only one. */

#include "work.h"

/* Made on `device`, whichever is current. */
static cudaStream_t stream_on(int device)
{
    int current = -1;
    OK(cudaGetDevice(&current));
    OK(cudaSetDevice(device));
    cudaStream_t stream = stream_new();
    OK(cudaSetDevice(current));
    return stream;
}

/* A kernel is launched with the stream's device current. */
static void fill_on(int device, cudaStream_t stream, void *p, size_t bytes, uint32_t tag)
{
    OK(cudaSetDevice(device));
    device_fill(stream, p, bytes, tag);
}

static void check_on(int device, cudaStream_t stream, const void *p, size_t bytes, uint32_t tag)
{
    OK(cudaSetDevice(device));
    device_check(stream, p, bytes, tag);
}

/* Wrong words are counted on each device. */
static unsigned long long wrong_on_both(void)
{
    unsigned long long wrong = 0;
    for (int device = 1; device >= 0; device--) {
        OK(cudaSetDevice(device));
        wrong += device_wrong();
    }
    return wrong;
}

static void finish_both(void)
{
    EXPECT_EQ(wrong_on_both(), 0);
    finish();
}

static galloc_pool *pool_on(int device, size_t limit, double overhead)
{
    galloc_config config = galloc_config_default();
    galloc_pool *pool = NULL;
    config.device = device;
    config.memory_limit = limit;
    config.overhead = overhead;
    OK(galloc_pool_create(&pool, &config));
    return pool;
}

static void expect_current(int device)
{
    int current = -1;
    OK(cudaGetDevice(&current));
    EXPECT_EQ(current, device);
}

/* ---- pools ------------------------------------------------------------------------------------------------------- */

/* A stream's memory comes from its own device, whichever is current, and the current device stays what it was. */
TEST(default_pools_belong_to_the_streams_device)
{
    cudaStream_t s[2] = {stream_on(0), stream_on(1)};
    for (uint32_t i = 0; i < 40; i++) {
        int device = (int)(i & 1), current = (int)(i >> 1 & 1);
        void *p = NULL;
        galloc_pool *pool = NULL;
        OK(cudaSetDevice(current));
        OK(galloc_malloc(&p, mib(8) + kib(i), s[device]));
        expect_current(current);
        OK(galloc_pool_default(&pool, device));
        EXPECT(info_of(p).device == device && info_of(p).pool == pool);
        fill_on(device, s[device], p, mib(8), i);
        check_on(device, s[device], p, mib(8), i);
        OK(cudaSetDevice(current));
        OK(galloc_free(p, s[device]));
        expect_current(current);
    }
    for (int device = 0; device < 2; device++) {
        galloc_pool *pool = NULL;
        OK(galloc_pool_default(&pool, device));
        expect_healthy(pool);
        EXPECT(stats_of(pool).mallocs >= 20);
        OK(cudaStreamDestroy(s[device]));
    }
    finish_both();
}

/* Work on a block of one device that the other device's stream was made to wait for: the free names that stream. The
   gate shows that nobody has the memory before the work is done. */
TEST(freed_on_a_stream_of_the_other_device)
{
    for (int home = 0; home < 2; home++) {
        cudaStream_t own = stream_on(home), other = stream_on(1 - home);
        galloc_pool *pool = pool_on(home, SIZE_MAX, 0.02);
        OK(galloc_free(get(pool, 512, own), own));
        for (uint32_t i = 0; i < 10; i++) {
            void *p = get(pool, mib(16), own);
            fill_on(home, own, p, mib(16), i);
            gate g = gate_close(own);
            check_on(home, own, p, mib(16), i);
            order(own, other);
            OK(cudaSetDevice(1 - home));
            OK(galloc_free(p, other));
            void *q = get(pool, mib(16), own);
            EXPECT(!overlap(p, q, mib(16)));
            fill_on(home, own, q, mib(16), i + 100);
            gate_open(g);
            check_on(home, own, q, mib(16), i + 100);
            OK(galloc_free(q, own));
            EXPECT_EQ(wrong_on_both(), 0);
        }
        pool_end(pool);
        OK(cudaStreamDestroy(own));
        OK(cudaStreamDestroy(other));
    }
    finish_both();
}

/* Freed when both are past it, and recorded on the other one. */
TEST(used_by_streams_of_both_devices)
{
    cudaStream_t s = stream_on(0), t = stream_on(1), both[2] = {s, t};
    galloc_pool *pool = pool_on(0, SIZE_MAX, 0.02);
    for (uint32_t i = 0; i < 20; i++) {
        void *p = get(pool, mib(16), s);
        fill_on(0, s, p, mib(16), i);
        order(s, t);
        OK(cudaSetDevice(1));
        gate g = gate_close(t);
        OK(cudaSetDevice((int)(i & 1)));
        if (i % 4 < 2) {
            OK(galloc_free_after(p, both, 2));
        } else {
            OK(galloc_record_stream(p, t));
            OK(galloc_free(p, s));
        }
        void *q = NULL;
        OK(galloc_pool_malloc(pool, &q, mib(16), s));
        EXPECT(!overlap(p, q, mib(16)));
        gate_open(g);
        fill_on(0, s, q, mib(16), i + 100);
        check_on(0, s, q, mib(16), i + 100);
        OK(galloc_free(q, s));
        EXPECT_EQ(wrong_on_both(), 0);
    }
    pool_end(pool);
    OK(cudaStreamDestroy(s));
    OK(cudaStreamDestroy(t));
    finish_both();
}

/* Each device has three blocks that fill its pool; the outer two are freed, and one of their size is had by a move. */
TEST(pages_move_on_a_device_that_is_not_current)
{
    const size_t piece = mib(8);
    cudaStream_t s[2] = {stream_on(0), stream_on(1)};
    galloc_pool *pool[2] = {pool_on(0, 3 * piece, 0), pool_on(1, 3 * piece, 0)};
    for (uint32_t i = 0; i < 40; i++) {
        int device = (int)(i & 1);
        void *p[3];
        for (int k = 0; k < 3; k++) {
            p[k] = get(pool[device], piece, s[device]);
            fill_on(device, s[device], p[k], piece, 10 * i + (uint32_t)k);
        }
        check_on(device, s[device], p[0], piece, 10 * i);
        check_on(device, s[device], p[2], piece, 10 * i + 2);
        OK(cudaSetDevice(1 - device));
        OK(galloc_free(p[0], s[device]));
        OK(galloc_free(p[2], s[device]));
        void *q = get(pool[device], 2 * piece, s[device]);
        expect_current(1 - device);
        fill_on(device, s[device], q, 2 * piece, 10 * i + 3);
        check_on(device, s[device], p[1], piece, 10 * i + 1);
        check_on(device, s[device], q, 2 * piece, 10 * i + 3);
        OK(galloc_free(q, s[device]));
        OK(galloc_free(p[1], s[device]));
    }
    EXPECT_EQ(wrong_on_both(), 0);
    for (int device = 0; device < 2; device++) {
        EXPECT(stats_of(pool[device]).moves >= 20);
        EXPECT_EQ(stats_of(pool[device]).reserved.peak, 3 * piece);
        OK(cudaSetDevice(1 - device));
        pool_end(pool[device]);
        OK(cudaStreamDestroy(s[device]));
    }
    finish_both();
}

/* ---- copies ------------------------------------------------------------------------------------------------------ */

/* cudaMemcpyPeerAsync needs no access of one device to the pages of the other. */
TEST(blocks_are_copied_between_devices)
{
    cudaStream_t s[2] = {stream_on(0), stream_on(1)};
    void *p[2];
    for (int device = 0; device < 2; device++) {
        OK(cudaSetDevice(device));
        OK(galloc_malloc(&p[device], mib(5), s[device]));
    }
    for (int from = 0; from < 2; from++) {
        fill_on(from, s[from], p[from], mib(5), 7 + (uint32_t)from);
        OK(cudaMemcpyPeerAsync(p[1 - from], 1 - from, p[from], from, mib(5), s[from]));
        OK(cudaStreamSynchronize(s[from]));
        check_on(1 - from, s[1 - from], p[1 - from], mib(5), 7 + (uint32_t)from);
        OK(cudaStreamSynchronize(s[1 - from]));
    }
    for (int device = 0; device < 2; device++) {
        OK(cudaSetDevice(device));
        OK(galloc_free(p[device], s[device]));
        OK(galloc_stream_retire(s[device]));
        OK(cudaStreamDestroy(s[device]));
    }
    finish_both();
}

/* ---- threads ----------------------------------------------------------------------------------------------------- */

/* Takes memory of both devices in turn, under limits; the streams are its own. */
static void use_both(galloc_pool *const *pools, uint32_t seed)
{
    cudaStream_t s[2] = {stream_on(0), stream_on(1)};
    dice d = {seed};
    void *p[8] = {};
    size_t bytes[8] = {};
    for (int i = 0; i < 400; i++) {
        int k = (int)roll_below(&d, 8), device = k & 1;
        if (p[k]) {
            check_on(device, s[device], p[k], bytes[k], seed + (uint32_t)k);
            OK(galloc_free(p[k], s[device]));
        }
        bytes[k] = 1 + roll(&d) % (roll_below(&d, 4) ? kib(64) : mib(8));
        OK(cudaSetDevice((int)roll_below(&d, 2)));
        p[k] = get(pools[device], bytes[k], s[device]);
        fill_on(device, s[device], p[k], bytes[k], seed + (uint32_t)k);
    }
    for (int k = 0; k < 8; k++) OK(galloc_free(p[k], s[k & 1]));
    for (int device = 0; device < 2; device++) {
        OK(galloc_stream_retire(s[device]));
        OK(cudaStreamDestroy(s[device]));
    }
}

TEST(threads_use_both_devices)
{
    galloc_pool *pools[2] = {pool_on(0, mib(256), 0), pool_on(1, mib(256), 0)};
    std::vector<std::thread> threads;
    for (uint32_t i = 0; i < 4; i++) threads.push_back(std::thread(use_both, pools, 1000 * (i + 1)));
    for (size_t i = 0; i < threads.size(); i++) threads[i].join();
    EXPECT_EQ(wrong_on_both(), 0);
    EXPECT_EQ(stats_of(pools[0]).mallocs + stats_of(pools[1]).mallocs, 4 * 400);
    for (int device = 0; device < 2; device++) pool_end(pools[device]);
    finish_both();
}

int main(int argc, char **argv)
{
    int status = work_start(), devices = 0;
    if (status) return status;
    OK(cudaGetDeviceCount(&devices));
    if (devices >= 2) return test_main(argc, argv);
    printf("skipped: one device\n");
    return 0;
}
