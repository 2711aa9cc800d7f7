/* test_per_thread.c - a file compiled for per-thread default streams: its stream 0 is the per-thread stream, though the
   file with the implementation of galloc is compiled for the legacy one. */

#define CUDA_API_PER_THREAD_DEFAULT_STREAM
#define GALLOC_OVERRIDE_CUDA
#include "setup.h"

/* Memory that is freed on stream 0 stays that of the per-thread stream: the legacy stream does not get it. */
TEST(stream_0_of_this_file_frees_on_the_per_thread_stream)
{
    for (int after = 0; after < 2; after++) {
        begin_still();
        galloc_config config = config_limit(MIB(64));
        config.reuse = 0;
        galloc_pool *pool = pool_new(&config);
        cudaStream_t zero = 0;
        void *p = NULL;
        OK(galloc_pool_malloc(pool, &p, MIB(3), 0));
        EXPECT_EQ(info_of(p).stream_id, stream_id(cudaStreamPerThread));
        put(cudaStreamPerThread, p, MIB(3), 1);
        if (after) OK(galloc_free_after(p, &zero, 1));
        else OK(galloc_free(p, 0));
        void *q = get_used(pool, MIB(3), cudaStreamLegacy, 2);
        EXPECT(q != p);
        OK(galloc_free(q, cudaStreamLegacy));
        EXPECT(get(pool, MIB(3), cudaStreamPerThread) == p);
        OK(galloc_free(p, cudaStreamPerThread));
        pool_end(pool);
        finish();
    }
}

/* So does cudaFreeAsync. A capture of that stream has both calls. */
TEST(calls_in_place_of_cudas_take_stream_0_for_the_per_thread_stream)
{
    begin();
    cudaGraph_t graph = NULL;
    void *p = NULL;
    OK(cudaStreamBeginCapture(cudaStreamPerThread, cudaStreamCaptureModeThreadLocal));
    OK(cudaMallocAsync(&p, MIB(3), 0));
    OK(cudaFreeAsync(p, 0));
    OK(cudaStreamEndCapture(cudaStreamPerThread, &graph));
    OK(cudaGraphDestroy(graph));
    finish();
}

TEST_MAIN()
