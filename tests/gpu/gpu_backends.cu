/* gpu_backends.cu - the same program with each source of memory: what is allocated is used, kept apart and given back.
   What the simulated device only supposes of the driver's pool is looked at here. */

#include "work.h"

static const char *const settings[] = {"expandable_segments:True", "expandable_segments:False", "backend:cudaMalloc",
                                       "backend:cudaMallocAsync"};

static galloc_pool *pool_of(const char *text, size_t limit)
{
    galloc_config config = galloc_config_default();
    galloc_pool *pool = NULL;
    char message[512];
    OK(galloc_config_parse(&config, text, message, sizeof message));
    config.memory_limit = limit;
    OK(galloc_pool_create(&pool, &config));
    return pool;
}

/* Blocks of several sizes on two streams; each is filled, looked at later, and freed on either. */
static void use_pool(galloc_pool *pool)
{
    static const size_t sizes[] = {4, 512, 100000, 1 << 20, (3 << 20) + 4, 20 << 20};
    const int n = (int)(sizeof sizes / sizeof sizes[0]);
    cudaStream_t s[2] = {stream_new(), stream_new()};
    void *p[16];
    for (uint32_t round = 0; round < 20; round++) {
        for (int i = 0; i < n; i++) {
            p[i] = get(pool, sizes[i], s[i % 2]);
            device_fill(s[i % 2], p[i], sizes[i], round * 16 + (uint32_t)i);
        }
        for (int i = 0; i < n; i++) device_check(s[i % 2], p[i], sizes[i], round * 16 + (uint32_t)i);
        for (int i = 0; i < n; i++) {
            if (i % 3 == 2) OK(galloc_record_stream(p[i], s[(i + 1) % 2]));
            if (i % 3 == 1) OK(galloc_free_after(p[i], s, 2));
            else OK(galloc_free(p[i], s[i % 2]));
        }
    }
    EXPECT_EQ(galloc_free(p[0], s[0]), cudaErrorInvalidDevicePointer);
    EXPECT_EQ(stats_of(pool).live.current, 0);
    OK(cudaStreamSynchronize(s[0]));
    OK(cudaStreamSynchronize(s[1]));
    EXPECT_EQ(device_wrong(), 0);
    OK(galloc_pool_trim(pool, 0, NULL));
    EXPECT_EQ(stats_of(pool).reserved.current, 0);
    OK(cudaStreamDestroy(s[0]));
    OK(cudaStreamDestroy(s[1]));
}

TEST(each_backend_keeps_contents)
{
    for (size_t i = 0; i < sizeof settings / sizeof settings[0]; i++) {
        galloc_pool *pool = pool_of(settings[i], SIZE_MAX);
        printf("    %s\n", settings[i]);
        use_pool(pool);
        pool_end(pool);
    }
    finish();
}

TEST(each_backend_keeps_its_limit)
{
    for (size_t i = 0; i < sizeof settings / sizeof settings[0]; i++) {
        galloc_pool *pool = pool_of(settings[i], mib(64));
        cudaStream_t s = stream_new(), t = stream_new();
        void *p = get(pool, mib(40), s), *q = NULL;
        device_fill(s, p, mib(40), 1);
        EXPECT_EQ(galloc_pool_malloc(pool, &q, mib(40), t), cudaErrorMemoryAllocation);
        device_check(s, p, mib(40), 1);
        OK(galloc_free(p, s));
        q = get(pool, mib(40), t);
        device_fill(t, q, mib(40), 2);
        device_check(t, q, mib(40), 2);
        EXPECT(stats_of(pool).reserved.current <= mib(64));
        OK(galloc_free(q, t));
        EXPECT_EQ(device_wrong(), 0);
        pool_end(pool);
        OK(cudaStreamDestroy(s));
        OK(cudaStreamDestroy(t));
    }
    finish();
}

/* What a graph allocates and leaves behind is freed after it has run. The graph can be launched again: nobody else has
   its memory. Nor does an allocation on the legacy stream break the capture of a blocking stream. */
TEST(each_backend_in_a_capture)
{
    for (size_t i = 0; i < sizeof settings / sizeof settings[0]; i++) {
        galloc_pool *pool = pool_of(settings[i], SIZE_MAX);
        cudaStream_t s = NULL;
        cudaGraph_t graph = NULL;
        cudaGraphExec_t exec = NULL;
        void *p, *q, *beside, *later;
        OK(cudaStreamCreate(&s));
        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
        p = get(pool, mib(4), s);
        beside = get(pool, mib(4), 0);
        q = get(pool, mib(4), s);
        device_fill(s, p, mib(4), 3);
        device_fill(s, q, mib(4), 4);
        device_check(s, p, mib(4), 3);
        OK(galloc_free(p, s));
        OK(cudaStreamEndCapture(s, &graph));
        OK(cudaGraphInstantiate(&exec, graph, 0));
        OK(cudaGraphLaunch(exec, s));
        device_check(s, q, mib(4), 4);
        OK(galloc_free(q, s));
        later = get(pool, mib(4), s);
        device_fill(s, later, mib(4), 5);
        device_fill(0, beside, mib(4), 6);
        OK(cudaGraphLaunch(exec, s));
        device_check(s, q, mib(4), 4);
        device_check(s, later, mib(4), 5);
        device_check(0, beside, mib(4), 6);
        OK(galloc_free(later, s));
        OK(galloc_free(beside, 0));
        OK(cudaStreamSynchronize(s));
        EXPECT_EQ(device_wrong(), 0);
        OK(cudaGraphExecDestroy(exec));
        OK(cudaGraphDestroy(graph));
        OK(galloc_pool_trim(pool, 0, NULL));
        pool_end(pool);
        OK(cudaStreamDestroy(s));
    }
    finish();
}

int main(int argc, char **argv)
{
    int status = work_start();
    return status ? status : test_main(argc, argv);
}
