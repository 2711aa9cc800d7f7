/* cpp_static.cpp - two files with a heap each (GALLOC_STATIC) that own blocks by galloc.hpp: each file's owners free in
   its own heap, and what is thrown tells of it. -DFIRST compiles one of them. */

#define GALLOC_STATIC
#define GALLOC_IMPLEMENTATION
#include "galloc.hpp"

#include "sim.h"
#include "test.h"

#include <cstdio>
#include <cstring>
#include <string>

#if defined(FIRST)
#define FILE_USES first_uses
#define LARGE (std::size_t(1) << 40)
#else
#define FILE_USES second_uses
#define LARGE (std::size_t(1) << 41)
#endif

/* The number of failures: each file has a count of its own. */
int first_uses(cudaStream_t stream);
int second_uses(cudaStream_t stream);

int FILE_USES(cudaStream_t stream)
{
    galloc_stats stats;
    galloc_pool *pool;
    {
        galloc::unique_ptr<float> a = galloc::make_unique<float>(1000, stream);
        galloc::growable<char> b(std::size_t(1) << 20, stream);
        b.resize(8192);
        EXPECT(a.get() != nullptr);
    }
    galloc::check(galloc_pool_default(&pool, 0));
    galloc::check(galloc_pool_stats(pool, &stats));
    EXPECT_EQ(stats.mallocs, 2);
    EXPECT_EQ(stats.frees, 2);
    try {
        galloc::make_unique<char>(LARGE, stream);
        EXPECT(!"thrown");
    } catch (const galloc::out_of_memory &e) {
        EXPECT(strstr(e.what(), std::to_string(LARGE).c_str()) != nullptr);
    }
    EXPECT_EQ(galloc_shutdown(), cudaSuccess);
    return test_failures;
}

#if defined(FIRST)
TEST(each_file_owns_blocks_of_its_own_heap)
{
    sim_options options = sim_defaults();
    galloc_set_log(NULL, NULL);
    EXPECT_EQ(sim_start(&options), 0);
    {
        galloc::stream stream;
        EXPECT_EQ(first_uses(stream.get()), 0);
        EXPECT_EQ(second_uses(stream.get()), 0);
    }
    EXPECT_EQ(sim_findings(SIM_ANY), 0);
    sim_stop();
}

TEST_MAIN()
#endif
