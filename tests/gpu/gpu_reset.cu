/* gpu_reset.cu - cudaDeviceReset under galloc's feet. A program of its own, since it takes everything with it.

   Pages and their mappings outlive the reset, memory of cudaMalloc does not; streams and events are gone, and touching
   one of them would end the program. */

#include "work.h"

static void reset_with(int expandable)
{
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_new(expandable, mib(64), REUSE_ALL);
    void *p = get(pool, mib(12), s), *q = get(pool, mib(12), t), *kept = get(pool, mib(4), s);
    device_fill(s, p, mib(12), 1);
    device_fill(t, q, mib(12), 1);
    device_check(s, p, mib(12), 1);
    OK(galloc_record_stream(kept, t));
    OK(galloc_free(p, s));
    OK(galloc_free(q, t));
    EXPECT_EQ(device_wrong(), 0);
    OK(cudaDeviceReset());

    s = stream_new();
    t = stream_new();
    for (uint32_t i = 0; i < 3; i++) {
        p = get(pool, mib(12), s);
        q = get(pool, mib(12), t);
        device_fill(s, p, mib(12), 2 * i);
        device_fill(t, q, mib(12), 2 * i + 1);
        device_check(s, p, mib(12), 2 * i);
        device_check(t, q, mib(12), 2 * i + 1);
        OK(galloc_free(p, s));
        OK(galloc_free(q, t));
    }
    OK(galloc_free(kept, s));
    EXPECT_EQ(stats_of(pool).live.current, 0);
    pool_end(pool);
    OK(cudaStreamDestroy(s));
    OK(cudaStreamDestroy(t));
    finish();
}

TEST(expandable_segments_outlive_a_reset) { reset_with(1); }

TEST(fixed_segments_are_replaced_after_a_reset) { reset_with(0); }

/* The thread's context is still the one that the reset has ended. */
TEST(the_current_device_is_found_right_after_its_reset)
{
    galloc_pool *own = NULL, *pool = NULL, *again = NULL;
    OK(cudaDeviceReset());
    OK(galloc_pool_create(&own, NULL));
    OK(cudaDeviceReset());
    OK(galloc_pool_default(&pool, -1));
    OK(galloc_pool_default(&again, 0));
    EXPECT(pool == again);
    pool_end(own);
    OK(galloc_shutdown());
    finish();
}

int main(int argc, char **argv)
{
    int status = work_start();
    return status ? status : test_main(argc, argv);
}
