/* CUDAPluggableAllocator.h - what galloc_torch.cpp uses of PyTorch's header of this name, in the form of 2.11: the class
   that calls the hooks, and what it counts and remembers. */

#ifndef TORCH_CUDA_PLUGGABLE_ALLOCATOR_H
#define TORCH_CUDA_PLUGGABLE_ALLOCATOR_H

#include <c10/core/Allocator.h>
#include <c10/util/ApproximateClock.h>

#include <cuda_runtime_api.h>
#include <array>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "c10_error.h"

#define C10_UNSUPPORTED(type, call) \
    virtual type call { throw c10::Error({"", "", 0}, #call " is not yet supported"); }

namespace c10::cuda {
using MempoolId_t = std::pair<unsigned long long, unsigned long long>;
}

namespace c10::cuda::CUDACachingAllocator {
struct Stat {
    int64_t current = 0, peak = 0, allocated = 0, freed = 0;
};
using StatArray = std::array<Stat, 3>; /* all, small, large */

struct DeviceStats {
    StatArray allocation, segment, active, allocated_bytes, reserved_bytes, active_bytes, requested_bytes;
    int64_t num_ooms = 0;
};

struct BlockInfo {
    size_t size = 0, requested_size = 0;
    bool allocated = false, active = false;
    std::shared_ptr<GatheredContext> context_when_allocated;
};

struct SegmentInfo {
    DeviceIndex device = 0;
    size_t address = 0, total_size = 0, requested_size = 0, allocated_size = 0, active_size = 0;
    cudaStream_t stream = nullptr;
    bool is_large = false, is_expandable = false;
    MempoolId_t owner_private_pool_id = {0, 0};
    std::vector<BlockInfo> blocks;
};

struct TraceEntry {
    enum Action { ALLOC, FREE_REQUESTED, FREE_COMPLETED, OOM };
    TraceEntry(Action action, DeviceIndex device, size_t addr, size_t size, cudaStream_t stream, MempoolId_t pool,
               approx_time_t time, std::shared_ptr<GatheredContext> context)
        : action_(action), device_(device), addr_(addr), context_(std::move(context)), stream_(stream), size_(size),
          mempool_(pool)
    {
        time_.approx_t_ = time;
    }
    Action action_;
    DeviceIndex device_;
    size_t addr_;
    std::shared_ptr<GatheredContext> context_;
    cudaStream_t stream_;
    size_t size_;
    MempoolId_t mempool_;
    union {
        c10::time_t t_;
        approx_time_t approx_t_;
    } time_{};
};

struct SnapshotInfo {
    std::vector<SegmentInfo> segments;
    std::vector<std::vector<TraceEntry>> device_traces;
};

struct ShareableHandle {
    ptrdiff_t offset;
    std::string handle;
};

enum class RecordContext { NEVER, STATE, ALLOC, ALL };
using CreateContextFn = std::shared_ptr<GatheredContext> (*)();
using OutOfMemoryObserver = std::function<void(int64_t, size_t, size_t, size_t)>;
using AllocatorTraceTracker = std::function<void(const TraceEntry &)>;

struct CUDAAllocator {
    virtual ~CUDAAllocator() = default;
    virtual void *raw_alloc_with_stream(size_t bytes, cudaStream_t stream) = 0;
    virtual void raw_delete(void *p) = 0;
    virtual void setMemoryFraction(double fraction, DeviceIndex device) = 0;
    virtual void beginAllocateToPool(DeviceIndex, MempoolId_t, std::function<bool(cudaStream_t)>) = 0;
    virtual void endAllocateToPool(DeviceIndex, MempoolId_t) = 0;
    virtual void releasePool(DeviceIndex, MempoolId_t) = 0;
    virtual cudaError_t memcpyAsync(void *, int, const void *, int, size_t, cudaStream_t, bool) = 0;
    C10_UNSUPPORTED(double, getMemoryFraction(DeviceIndex))
    C10_UNSUPPORTED(void, cacheInfo(DeviceIndex, size_t *))
    C10_UNSUPPORTED(DeviceStats, getDeviceStats(DeviceIndex))
    C10_UNSUPPORTED(void, resetAccumulatedStats(DeviceIndex))
    C10_UNSUPPORTED(void, resetPeakStats(DeviceIndex))
    C10_UNSUPPORTED(SnapshotInfo, snapshot(MempoolId_t, bool))
    C10_UNSUPPORTED(bool, checkPoolLiveAllocations(DeviceIndex, MempoolId_t, const std::unordered_set<void *> &))
    C10_UNSUPPORTED(bool, isHistoryEnabled())
    C10_UNSUPPORTED(void, recordHistory(bool, CreateContextFn, size_t, RecordContext, bool,
                                        const std::vector<std::string> &))
    C10_UNSUPPORTED(void, attachOutOfMemoryObserver(OutOfMemoryObserver))
    C10_UNSUPPORTED(void, attachAllocatorTraceTracker(AllocatorTraceTracker))
    C10_UNSUPPORTED(std::string, name())
    C10_UNSUPPORTED(ShareableHandle, shareIpcHandle(void *))
    C10_UNSUPPORTED(std::shared_ptr<void>, getIpcDevPtr(std::string))
};
} // namespace c10::cuda::CUDACachingAllocator

namespace torch::cuda::CUDAPluggableAllocator {
using c10::cuda::MempoolId_t;
using Filter = std::function<bool(cudaStream_t)>;

struct CUDAPluggableAllocator : c10::cuda::CUDACachingAllocator::CUDAAllocator {
    CUDAPluggableAllocator(std::function<void *(size_t, int, cudaStream_t)> malloc_hook,
                           std::function<void(void *, size_t, int, cudaStream_t)> free_hook)
        : malloc_(std::move(malloc_hook)), free_(std::move(free_hook))
    {
    }
    void set_reset_fn(std::function<void()> hook) { reset_ = std::move(hook); }
    void set_memory_fraction_fn(std::function<void(double, int)> hook) { fraction_ = std::move(hook); }
    void set_base_alloc_fn(std::function<void *(void *, size_t *)>) {}
    void set_record_stream_fn(std::function<void(void *, cudaStream_t)>) {}
    void set_begin_allocate_to_pool(std::function<void(int, MempoolId_t, Filter)> hook) { begin_ = std::move(hook); }
    void set_end_allocate_to_pool_fn(std::function<void(int, MempoolId_t)> hook) { end_ = std::move(hook); }
    void set_release_pool(std::function<void(int, MempoolId_t)> hook) { release_ = std::move(hook); }

    void *raw_alloc_with_stream(size_t bytes, cudaStream_t stream) override
    {
        int device = 0;
        (void)cudaGetDevice(&device);
        void *p = malloc_(bytes, device, stream);
        blocks_[p] = {bytes, device, stream};
        return p;
    }
    void raw_delete(void *p) override
    {
        Made made = blocks_.at(p);
        blocks_.erase(p);
        free_(p, made.bytes, made.device, made.stream);
    }
    void setMemoryFraction(double fraction, c10::DeviceIndex device) override { fraction_(fraction, device); }
    void beginAllocateToPool(c10::DeviceIndex device, MempoolId_t id, Filter filter) override
    {
        begin_(device, id, std::move(filter));
    }
    void endAllocateToPool(c10::DeviceIndex device, MempoolId_t id) override { end_(device, id); }
    void releasePool(c10::DeviceIndex device, MempoolId_t id) override { release_(device, id); }
    cudaError_t memcpyAsync(void *to, int, const void *from, int, size_t bytes, cudaStream_t stream, bool) override
    {
        return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
    }
    void emptyCache() { reset_(); }

private:
    struct Made {
        size_t bytes;
        int device;
        cudaStream_t stream;
    };
    std::unordered_map<void *, Made> blocks_;
    std::function<void *(size_t, int, cudaStream_t)> malloc_;
    std::function<void(void *, size_t, int, cudaStream_t)> free_;
    std::function<void()> reset_;
    std::function<void(double, int)> fraction_;
    std::function<void(int, MempoolId_t, Filter)> begin_;
    std::function<void(int, MempoolId_t)> end_, release_;
};

void changeCurrentAllocator(const std::shared_ptr<c10::cuda::CUDACachingAllocator::CUDAAllocator> &allocator);
} // namespace torch::cuda::CUDAPluggableAllocator

#endif
