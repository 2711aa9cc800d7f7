/* cpp_rmm.cpp - a program of two files, of which one finds RMM (-DFINDS_RMM; a stand-in): in each of them galloc.hpp
   throws what this file knows as galloc::out_of_memory. */

#if !defined(FINDS_RMM)
#define GALLOC_IMPLEMENTATION
#endif
#include "galloc.hpp"

#include "sim.h"
#include "test.h"

#include <cstring>
#include <string>

int runs_out_with_rmm();

static int runs_out()
{
    int caught = 0;
    try {
        galloc::make_unique<char>(std::size_t(1) << 40, nullptr);
    } catch (const galloc::out_of_memory &e) {
        galloc::out_of_memory copy = e;
        caught += strstr(copy.what(), "1099511627776") != nullptr;
    }
    try {
        galloc::check(cudaErrorMemoryAllocation);
    } catch (const std::bad_alloc &e) {
        caught += std::string(e.what()).find("out_of_memory: ") != std::string::npos;
    }
    return caught;
}

#if defined(FINDS_RMM)
#if !defined(GALLOC_HPP_RMM)
#error "the stand-in for RMM is not found"
#endif
int runs_out_with_rmm() { return runs_out(); }
#else
TEST(each_file_catches_what_it_knows)
{
    sim_options options = sim_defaults();
    galloc_set_log(NULL, NULL);
    EXPECT_EQ(sim_start(&options), 0);
    EXPECT_EQ(runs_out(), 2);
    EXPECT_EQ(runs_out_with_rmm(), 2);
    EXPECT_EQ(galloc_shutdown(), cudaSuccess);
    EXPECT_EQ(sim_findings(SIM_ANY), 0);
    sim_stop();
}

TEST_MAIN()
#endif
