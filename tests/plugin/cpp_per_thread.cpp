/* cpp_per_thread.cpp - a file of cpp_host's that is compiled for per-thread default streams. */

#define CUDA_API_PER_THREAD_DEFAULT_STREAM 1

#include "galloc.hpp"

void *make_in_a_file_of_per_thread_streams(std::size_t bytes);

/* Makes a block on stream 0, which is this thread's default stream here, and frees it. Returns its address. */
void *make_in_a_file_of_per_thread_streams(std::size_t bytes)
{
    galloc::unique_ptr<char> block = galloc::make_unique<char>(bytes, nullptr);
    return block.get();
}
