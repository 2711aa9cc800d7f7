/* cpp_library.cpp - a shared library with hidden symbols that uses the CachingDeviceAllocator of the program. LIBRARY:
   the ending of its functions' names. */

#include "galloc.hpp"

#define PASTE(a, b) a##b
#define NAME(a, b) PASTE(a, b)
#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT cudaError_t NAME(allocate_in_, LIBRARY)(galloc::CachingDeviceAllocator *cub, void **p, std::size_t bytes)
{
    return cub->DeviceAllocate(0, p, bytes, cudaStreamPerThread);
}

EXPORT cudaError_t NAME(free_in_, LIBRARY)(galloc::CachingDeviceAllocator *cub, void *p) { return cub->DeviceFree(p); }
