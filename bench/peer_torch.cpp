/* peer_torch.cpp - PyTorch's CUDACachingAllocator, called from C++. A library of its own (bench/peer_torch.sh builds
   it), so that PyTorch and the CUDA runtime that it brings are in no process that does not measure it. Settings are
   in PYTORCH_CUDA_ALLOC_CONF when it is loaded. */

#include "allocator.h"

#include <c10/cuda/CUDACachingAllocator.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <string>

namespace torch_allocator = c10::cuda::CUDACachingAllocator;

static torch_allocator::CUDAAllocator *cache;
static bool limited;
static thread_local std::string message;

/* Calls something of PyTorch's. What it throws becomes an error code. */
template <class Call> static cudaError_t attempt(Call call)
{
    try {
        call();
        return cudaSuccess;
    } catch (const c10::OutOfMemoryError &e) {
        message = e.what_without_backtrace();
        return cudaErrorMemoryAllocation;
    } catch (const std::exception &e) {
        message = e.what();
        return cudaErrorUnknown;
    }
}

static cudaError_t torch_alloc(void **ptr, size_t bytes, cudaStream_t stream)
{
    *ptr = nullptr;
    return attempt([=] { *ptr = cache->raw_alloc_with_stream(bytes, stream); });
}

static cudaError_t torch_free(void *ptr, cudaStream_t)
{
    return attempt([=] { cache->raw_delete(ptr); });
}

static void set_limit(size_t limit)
{
    size_t left = 0, total = 0;
    if (limit == SIZE_MAX && !limited) return;
    C10_CUDA_CHECK(cudaMemGetInfo(&left, &total));
    cache->setMemoryFraction(limit < total ? (double)limit / (double)total : 1.0, 0);
    limited = limit != SIZE_MAX;
}

/* One block of each of its kinds, or the first pass would pay for what is made once in a process. */
static void warm_up()
{
    static const size_t sizes[] = {512, (size_t)2 << 20, (size_t)20 << 20};
    for (size_t bytes : sizes) cache->raw_delete(cache->raw_alloc_with_stream(bytes, nullptr));
    cache->emptyCache();
}

static void open_all(size_t limit)
{
    int devices = 0;
    C10_CUDA_CHECK(cudaGetDeviceCount(&devices));
    cache = torch_allocator::get();
    if (!cache->initialized()) cache->init(devices);
    warm_up();
    set_limit(limit);
    cache->resetPeakStats(0);
}

static int failed(const char *what, cudaError_t error)
{
    if (!error) return 0;
    fprintf(stderr, "PyTorch's allocator cannot be %s: %s\n", what, message.c_str());
    return -1;
}

static int torch_open(const char *, size_t limit)
{
    return failed("set up", attempt([=] { open_all(limit); }));
}

static int torch_close()
{
    return failed("emptied", attempt([] { cache->emptyCache(); }));
}

static size_t torch_peak()
{
    const size_t all = (size_t)c10::CachingAllocator::StatType::AGGREGATE;
    return (size_t)std::max<int64_t>(0, cache->getDeviceStats(0).reserved_bytes[all].peak);
}

static size_t torch_held()
{
    const size_t all = (size_t)c10::CachingAllocator::StatType::AGGREGATE;
    return (size_t)std::max<int64_t>(0, cache->getDeviceStats(0).reserved_bytes[all].current);
}

static const char *torch_message()
{
    return message.c_str();
}

static allocator made()
{
    allocator a = {};
    a.name = "torch";
    a.variable = "PYTORCH_CUDA_ALLOC_CONF";
    a.caching = true;
    a.keeps_stream = true;
    a.open = torch_open;
    a.alloc = torch_alloc;
    a.free = torch_free;
    a.close = torch_close;
    a.set_device = cudaSetDevice;
    a.peak = torch_peak;
    a.held = torch_held;
    a.message = torch_message;
    return a;
}

extern "C" const allocator allocator_torch;
const allocator allocator_torch = made();
