/* galloc_torch.cpp - the rest of PyTorch's allocator interface: torch.cuda.memory_stats, memory_summary, _snapshot,
   history, observers of running out and torch.profiler, over the hooks of galloc_torch.c. It depends on the C++
   interface of one release of PyTorch, so galloc_torch.install(full=True) compiles it on the user's machine; README.md
   has the releases that it was tried with.

   It derives from PyTorch's own CUDAPluggableAllocator, which calls the hooks, and replaces the functions that raise
   "does not yet support" there. A function has one overload for each form that it has had since 2.5.

   A snapshot shows each tensor's block as a segment of its own: galloc moves pages, so it has no segments that stay.
   It names the pool of the graph that a block was captured for.

   Tensors can be shared with other processes where galloc's memory is from cudaMalloc: pages have no handle.

   Not possible: CUDA graph trees (checkpoints of a private pool). */

#include <c10/core/Allocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/ApproximateClock.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <cuda_runtime_api.h>
#include <deque>
#include <exception>
#include <functional>
#include <new>
#include <pthread.h>
#include <stdexcept>
#include <type_traits>
#include <unordered_set>

extern "C" {
void *galloc_hook_malloc(size_t, int, cudaStream_t);
void galloc_hook_free(void *, size_t, int, cudaStream_t);
void galloc_hook_record_stream(void *, cudaStream_t);
void galloc_hook_reset(void);
void galloc_hook_memory_fraction(double, int);
void *galloc_hook_base_alloc(void *, size_t *);
struct galloc_pool_id {
    unsigned long long first, second;
};
void galloc_hook_begin_allocate_to_pool(int, galloc_pool_id, void *);
void galloc_hook_end_allocate_to_pool(int, galloc_pool_id);
void galloc_hook_release_pool(int, galloc_pool_id);
/* The pool of a stream's capture, or zeros. */
galloc_pool_id galloc_hook_pool_of_stream(int, cudaStream_t);
struct galloc_held_stat {
    size_t current, peak, allocated, freed;
};
struct galloc_held {
    galloc_held_stat bytes, pages;
    size_t largest_free;
};
/* What the device holds: zeros, if it has no pool yet. */
int galloc_hook_held(int device, galloc_held *held);
void galloc_hook_stats_reset(int device);
}

namespace {

using namespace c10::cuda::CUDACachingAllocator;
using c10::cuda::MempoolId_t;
using Pluggable = torch::cuda::CUDAPluggableAllocator::CUDAPluggableAllocator;
using Context = std::shared_ptr<c10::GatheredContext>;

size_t rounded(size_t bytes) { return (bytes + 511) & ~size_t(511); }

/* PyTorch has counters of small and large tensors apart. */
size_t kind(size_t bytes) { return bytes <= (1 << 20) ? 1 : 2; }

template <class Stat> void grow(Stat &stat, size_t n)
{
    stat.current += int64_t(n);
    stat.allocated += int64_t(n);
    if (stat.peak < stat.current) stat.peak = stat.current;
}

template <class Stat> void shrink(Stat &stat, size_t n)
{
    stat.current -= int64_t(n);
    stat.freed += int64_t(n);
}

template <class Stat> void reset_total(Stat &stat) { stat.allocated = stat.freed = 0; }
template <class Stat> void reset_peak(Stat &stat) { stat.peak = stat.current; }

/* One entry of the history; newer releases also take the memory pool. */
template <class Entry = TraceEntry>
Entry entry(typename Entry::Action action, int device, size_t address, size_t bytes, cudaStream_t stream,
            Context context, MempoolId_t pool)
{
    auto now = c10::getApproximateTime();
    auto index = c10::DeviceIndex(device);
    if constexpr (std::is_constructible_v<Entry, typename Entry::Action, c10::DeviceIndex, size_t, size_t, cudaStream_t,
                                          MempoolId_t, c10::approx_time_t, Context>)
        return Entry(action, index, address, bytes, stream, pool, now, std::move(context));
    else
        return Entry(action, index, address, bytes, stream, now, std::move(context));
}

struct Block {
    size_t bytes;
    int device;
    cudaStream_t stream;
    MempoolId_t pool; /* of a captured graph; else {0, 0} */
    Context context;
};

/* All that is counted and remembered, guarded by `mutex`. A tracker, which is called under it, may ask for the counters
   or allocate, as with PyTorch's own allocator. */
struct State {
    std::recursive_mutex mutex;
    std::unordered_map<void *, Block> blocks;
    std::vector<DeviceStats> devices; /* of reserved_bytes and segment only the totals at the last reset of totals */
    std::vector<std::deque<TraceEntry>> history;
    std::vector<OutOfMemoryObserver> observers;
    std::vector<AllocatorTraceTracker> trackers;
    std::unordered_map<int, double> fractions; /* by device */
    CreateContextFn context = nullptr;
    RecordContext when = RecordContext::NEVER;
    size_t most = 0; /* entries of the history of a device */
    bool recording = false;

    DeviceStats &device(int i)
    {
        if (devices.size() <= size_t(i)) devices.resize(size_t(i) + 1), history.resize(size_t(i) + 1);
        return devices[size_t(i)];
    }

    /* Returns the first exception of a tracker. */
    std::exception_ptr note(TraceEntry e)
    {
        std::exception_ptr failure;
        if (when < RecordContext::ALLOC) e.context_ = nullptr; /* only blocks in use have stacks */
        if (recording && most) {
            (void)device(e.device_);
            auto &entries = history[size_t(e.device_)];
            if (entries.size() >= most) entries.pop_front();
            entries.push_back(e);
        }
        for (size_t i = 0; i < trackers.size(); i++) {
            AllocatorTraceTracker tracker = trackers[i]; /* it may attach another one */
            try {
                tracker(e);
            } catch (...) {
                if (!failure) failure = std::current_exception();
            }
        }
        return failure;
    }
};

/* Never destroyed: tensors may be freed after the end of main. */
State *current_state = new State;
std::atomic<bool> has_allocated{false};
State &state() { return *current_state; }

/* Another thread may have held the lock, and have been changing what it guards. After the first tensor CUDA does not
   work in the child, which then needs nothing of that. */
void forked_child()
{
    if (has_allocated) current_state = new State;
    else new (&current_state->mutex) std::recursive_mutex;
}

const int forks_are_watched = pthread_atfork(nullptr, nullptr, forked_child);

/* A free and a report of running out go on when something that PyTorch has given throws. */
template <class Call> void go_on(Call call)
{
    try {
        call();
    } catch (...) {
        (void)fputs("galloc_torch: a tracker, an observer, a stack's function or the profiler threw an exception\n",
                    stderr);
    }
}

void rethrow(std::exception_ptr failure)
{
    if (failure) std::rethrow_exception(failure);
}

/* `make` runs without the lock: it may wait for Python's. */
Context gather(RecordContext least)
{
    auto &s = state();
    CreateContextFn make;
    {
        std::lock_guard<std::recursive_mutex> guard(s.mutex);
        make = s.when >= least ? s.context : nullptr;
    }
    return make ? make() : nullptr;
}

template <class Change> void count(DeviceStats &stats, size_t bytes, Change change)
{
    for (size_t k : {size_t(0), kind(bytes)}) {
        change(stats.allocation[k], 1);
        change(stats.active[k], 1);
        change(stats.allocated_bytes[k], rounded(bytes));
        change(stats.active_bytes[k], rounded(bytes));
        change(stats.requested_bytes[k], bytes);
    }
}

galloc_held held_by(int device)
{
    galloc_held held;
    (void)galloc_hook_held(device, &held);
    return held;
}

/* Fills a counter whose totals are those at the last reset. */
template <class Stat> void set_held(Stat &stat, const galloc_held_stat &held)
{
    stat.current = int64_t(held.current);
    stat.peak = int64_t(held.peak);
    stat.allocated = int64_t(held.allocated) - stat.allocated;
    stat.freed = int64_t(held.freed) - stat.freed;
}

template <class Stat> void note_totals(Stat &stat, const galloc_held_stat &held)
{
    stat.allocated = int64_t(held.allocated);
    stat.freed = int64_t(held.freed);
}

/* Tells the profiler of this thread, if there is one (torch.profiler with profile_memory=True). A free is told before
   another thread can get the address. */
void tell_profiler(void *p, int64_t change, int device)
{
    auto &s = state();
    size_t allocated, held;
    if (!c10::memoryProfilingEnabled()) return;
    held = held_by(device).bytes.current;
    {
        std::lock_guard<std::recursive_mutex> guard(s.mutex);
        allocated = size_t(s.device(device).allocated_bytes[0].current);
    }
    c10::Device where(c10::DeviceType::CUDA, c10::DeviceIndex(device));
    if (p) c10::reportMemoryUsageToProfiler(p, change, allocated, held, where);
    else c10::reportOutOfMemoryToProfiler(change, allocated, held, where);
}

/* What the driver has left of a device, or 0. A failure leaves no error in the runtime. */
size_t left_by_driver(int device)
{
    c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
    size_t left = 0, total = 0;
    const cudaError_t before = cudaPeekAtLastError();
    if (cudaMemGetInfo(&left, &total) == cudaSuccess) return left;
    if (before == cudaSuccess) (void)cudaGetLastError();
    return 0;
}

void out_of_memory(size_t bytes, int device, cudaStream_t stream)
{
    auto &s = state();
    size_t free = left_by_driver(device), held = held_by(device).bytes.current;
    std::vector<OutOfMemoryObserver> observers;
    Context context;
    std::exception_ptr failure;
    go_on([&] { context = gather(RecordContext::STATE); });
    {
        std::lock_guard<std::recursive_mutex> guard(s.mutex);
        s.device(device).num_ooms++;
        failure = s.note(entry(TraceEntry::OOM, device, free, bytes, stream, context, {0, 0}));
        observers = s.observers;
    }
    go_on([&] { rethrow(failure); });
    go_on([&] { tell_profiler(nullptr, int64_t(bytes), device); });
    for (auto &observer : observers) go_on([&] { observer(device, bytes, held, free); });
}

/* Takes note of a new block. */
void remember(void *p, size_t bytes, int device, cudaStream_t stream)
{
    auto &s = state();
    Context context = gather(RecordContext::STATE);
    galloc_pool_id id = galloc_hook_pool_of_stream(device, stream);
    MempoolId_t pool = {id.first, id.second};
    std::lock_guard<std::recursive_mutex> guard(s.mutex);
    DeviceStats &stats = s.device(device);
    s.blocks[p] = Block{bytes, device, stream, pool, context};
    count(stats, bytes, [](auto &stat, size_t n) { grow(stat, n); });
    if (s.recording || !s.trackers.empty())
        rethrow(s.note(entry(TraceEntry::ALLOC, device, size_t(p), bytes, stream, std::move(context), pool)));
}

/* Takes a block that is about to be freed out of the counters. */
void uncount(void *p, size_t bytes, int device, cudaStream_t stream)
{
    auto &s = state();
    Context context;
    std::exception_ptr requested, completed;
    go_on([&] { context = gather(RecordContext::ALL); });
    {
        std::lock_guard<std::recursive_mutex> guard(s.mutex);
        auto block = s.blocks.find(p);
        if (block == s.blocks.end()) return; /* of the parent of this process, or never counted */
        MempoolId_t pool = block->second.pool;
        count(s.device(block->second.device), block->second.bytes, [](auto &stat, size_t n) { shrink(stat, n); });
        s.blocks.erase(block);
        if (s.recording || !s.trackers.empty()) {
            requested = s.note(entry(TraceEntry::FREE_REQUESTED, device, size_t(p), bytes, stream, context, pool));
            completed = s.note(entry(TraceEntry::FREE_COMPLETED, device, size_t(p), bytes, stream, context, pool));
        }
    }
    go_on([&] { rethrow(requested ? requested : completed); });
}

void *counted_malloc(size_t bytes, int device, cudaStream_t stream)
{
    void *p;
    if (!has_allocated) has_allocated = true;
    try {
        p = galloc_hook_malloc(bytes, device, stream);
    } catch (const c10::OutOfMemoryError &) {
        out_of_memory(bytes, device, stream);
        throw;
    }
    if (!p) return p;
    try {
        remember(p, bytes, device, stream);
        tell_profiler(p, int64_t(rounded(bytes)), device);
    } catch (...) { /* of what PyTorch has given: the stack's function, a tracker, the profiler */
        uncount(p, bytes, device, stream);
        galloc_hook_free(p, bytes, device, stream);
        throw;
    }
    return p;
}

void counted_free(void *p, size_t bytes, int device, cudaStream_t stream)
{
    if (p) {
        uncount(p, bytes, device, stream);
        go_on([&] { tell_profiler(p, -int64_t(rounded(bytes)), device); });
    }
    galloc_hook_free(p, bytes, device, stream);
}

/* PyTorch must not find the error again: it looks for one after each kernel. */
void throw_cuda(cudaError_t error, const std::string &text)
{
    (void)cudaGetLastError();
    throw std::runtime_error(text + ": " + cudaGetErrorString(error));
}

/* How far an address lies behind the start of its segment, an allocation of cudaMalloc. */
ptrdiff_t offset_in_segment(const void *p)
{
    int (*get_range)(unsigned long long *, size_t *, unsigned long long) = nullptr;
    void *symbol = nullptr;
    unsigned long long start = 0;
    size_t bytes = 0;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &symbol, 12000, cudaEnableDefault, &found);
#else
    cudaError_t error = cudaGetDriverEntryPoint("cuMemGetAddressRange", &symbol, cudaEnableDefault, &found);
#endif
    if (error) throw_cuda(error, "galloc: cuMemGetAddressRange, which a shared tensor needs, is not found");
    std::memcpy(&get_range, &symbol, sizeof get_range);
    if (found != cudaDriverEntryPointSuccess || get_range(&start, &bytes, uintptr_t(p)))
        throw std::runtime_error("galloc: cuMemGetAddressRange does not know a tensor that is to be shared");
    return ptrdiff_t(uintptr_t(p) - start);
}

class Allocator final : public Pluggable {
public:
    Allocator() : Pluggable(counted_malloc, counted_free)
    {
        set_reset_fn(galloc_hook_reset);
        set_memory_fraction_fn([](double f, int device) {
            galloc_hook_memory_fraction(f, device);
            std::lock_guard<std::recursive_mutex> guard(state().mutex);
            state().fractions[device] = f;
        });
        set_base_alloc_fn(galloc_hook_base_alloc);
        set_record_stream_fn(galloc_hook_record_stream);
        /* The filter is not called: PyTorch does not end the pool of a capture that fails, and the filter uses the
           graph, which the program may have deleted. */
        set_begin_allocate_to_pool([](int device, MempoolId_t id, std::function<bool(cudaStream_t)>) {
            galloc_hook_begin_allocate_to_pool(device, {id.first, id.second}, nullptr);
        });
        set_end_allocate_to_pool_fn(
            [](int device, MempoolId_t id) { galloc_hook_end_allocate_to_pool(device, {id.first, id.second}); });
        set_release_pool([](int device, MempoolId_t id) { galloc_hook_release_pool(device, {id.first, id.second}); });
    }

    std::string name() override { return "galloc"; }
    double getMemoryFraction(c10::DeviceIndex device)
    {
        std::lock_guard<std::recursive_mutex> guard(state().mutex);
        auto &fractions = state().fractions;
        auto found = fractions.find(device);
        return found == fractions.end() ? 1 : found->second;
    }

    /* Whether the blocks of a graph's pool that are in use are the expected ones. */
    bool checkPoolLiveAllocations(c10::DeviceIndex device, MempoolId_t id, const std::unordered_set<void *> &expected)
    {
        size_t n = 0;
        std::lock_guard<std::recursive_mutex> guard(state().mutex);
        for (auto &[p, block] : state().blocks) {
            if (block.device != device || block.pool != id) continue;
            if (!expected.count(p)) return false;
            n++;
        }
        return n == expected.size();
    }

    void cacheInfo(c10::DeviceIndex device, size_t *largest) override
    {
        *largest = std::max(held_by(device).largest_free, left_by_driver(device));
    }

    DeviceStats getDeviceStats(c10::DeviceIndex device) override
    {
        galloc_held held = held_by(device);
        std::lock_guard<std::recursive_mutex> guard(state().mutex);
        DeviceStats stats = state().device(device);
        set_held(stats.reserved_bytes[0], held.bytes);
        set_held(stats.segment[0], held.pages);
        stats.reserved_bytes[2] = stats.reserved_bytes[0]; /* a page holds tensors of any size */
        stats.segment[2] = stats.segment[0];
        return stats;
    }

    /* Where a device cannot use the memory of the other one, only a copy that names both devices reaches it. */
    cudaError_t memcpyAsync(void *to, int to_device, const void *from, int from_device, size_t bytes,
                            cudaStream_t stream, bool has_peer_access) override
    {
        if (has_peer_access) return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
        return cudaMemcpyPeerAsync(to, to_device, from, from_device, bytes, stream);
    }

    void resetAccumulatedStats(c10::DeviceIndex device) override
    {
        each(device, [](auto &stat) { reset_total(stat); });
        galloc_held held = held_by(device);
        std::lock_guard<std::recursive_mutex> guard(state().mutex);
        DeviceStats &stats = state().device(device);
        stats.num_ooms = 0;
        note_totals(stats.reserved_bytes[0], held.bytes);
        note_totals(stats.segment[0], held.pages);
    }

    void resetPeakStats(c10::DeviceIndex device) override
    {
        each(device, [](auto &stat) { reset_peak(stat); });
        galloc_hook_stats_reset(device);
    }

    /* PyTorch's own allocator takes a bare handle, too. */
    ShareableHandle shareIpcHandle(void *p) override
    {
        cudaIpcMemHandle_t handle;
        cudaError_t error = cudaIpcGetMemHandle(&handle, p);
        if (error)
            throw_cuda(error, "galloc: a tensor in galloc's pages cannot be shared with another process; it can if "
                              "GALLOC_CONF=expandable_segments:False is set");
        return {offset_in_segment(p), std::string(handle.reserved, sizeof handle)};
    }

    /* Opens another process's segment. CUDA counts how often, and the last close ends the mapping. */
    std::shared_ptr<void> getIpcDevPtr(std::string text) override
    {
        cudaIpcMemHandle_t handle;
        void *segment = nullptr;
        int device = 0;
        bool headed = text.size() == sizeof handle + 2 && text[1] == 'c'; /* from PyTorch's own: version and kind */
        if (text.size() != sizeof handle && !headed)
            throw std::runtime_error("galloc: this handle of another process is not of an allocation of cudaMalloc");
        std::memcpy(&handle, text.data() + (headed ? 2 : 0), sizeof handle);
        cudaError_t error = cudaGetDevice(&device);
        if (!error) error = cudaIpcOpenMemHandle(&segment, handle, cudaIpcMemLazyEnablePeerAccess);
        if (error) throw_cuda(error, "galloc: a tensor of another process cannot be opened");
        return std::shared_ptr<void>(segment, [device](void *p) {
            go_on([&] { /* at the end of the process CUDA may be gone */
                c10::cuda::CUDAGuard guard{c10::DeviceIndex(device)};
                if (cudaIpcCloseMemHandle(p)) (void)cudaGetLastError();
            });
        });
    }

    SnapshotInfo snapshot() { return take({0, 0}, true); }
    SnapshotInfo snapshot(MempoolId_t id) { return take(id, true); }
    SnapshotInfo snapshot(MempoolId_t id, bool traces) { return take(id, traces); }

    bool isHistoryEnabled()
    {
        std::lock_guard<std::recursive_mutex> guard(state().mutex);
        return state().recording;
    }

    void recordHistory(bool on, CreateContextFn context, size_t most, RecordContext when)
    {
        record(on, context, most, when, true);
    }
    void recordHistory(bool on, CreateContextFn context, size_t most, RecordContext when, bool clear)
    {
        record(on, context, most, when, clear);
    }
    void recordHistory(bool on, CreateContextFn context, size_t most, RecordContext when, bool clear,
                       const std::vector<std::string> &)
    {
        record(on, context, most, when, clear);
    }

    void attachOutOfMemoryObserver(OutOfMemoryObserver observer) override
    {
        std::lock_guard<std::recursive_mutex> guard(state().mutex);
        state().observers.push_back(std::move(observer));
    }

    void attachAllocatorTraceTracker(AllocatorTraceTracker tracker) override
    {
        std::lock_guard<std::recursive_mutex> guard(state().mutex);
        state().trackers.push_back(std::move(tracker));
    }

private:
    template <class Change> void each(c10::DeviceIndex device, Change change)
    {
        std::lock_guard<std::recursive_mutex> guard(state().mutex);
        DeviceStats &d = state().device(device);
        for (auto *array : {&d.allocation, &d.active, &d.allocated_bytes, &d.active_bytes, &d.requested_bytes})
            for (auto &stat : *array) change(stat);
    }

    void record(bool on, CreateContextFn context, size_t most, RecordContext when, bool clear)
    {
        auto &s = state();
        std::lock_guard<std::recursive_mutex> guard(s.mutex);
        s.recording = on;
        s.context = on ? context : nullptr;
        s.when = on ? when : RecordContext::NEVER;
        s.most = most;
        if (clear || !on)
            for (auto &entries : s.history) entries.clear();
    }

    static SegmentInfo segment_of(void *p, const Block &block)
    {
        SegmentInfo segment;
        BlockInfo inside;
        segment.device = c10::DeviceIndex(block.device);
        segment.address = size_t(p);
        segment.stream = block.stream;
        segment.is_expandable = true;
        segment.is_large = kind(block.bytes) == 2;
        segment.owner_private_pool_id = block.pool;
        segment.total_size = segment.allocated_size = segment.active_size = inside.size = rounded(block.bytes);
        segment.requested_size = inside.requested_size = block.bytes;
        inside.allocated = inside.active = true;
        inside.context_when_allocated = block.context;
        segment.blocks.push_back(std::move(inside));
        return segment;
    }

    /* The blocks of a pool, or of all with {0, 0}. */
    SnapshotInfo take(MempoolId_t id, bool traces)
    {
        auto &s = state();
        SnapshotInfo info{};
        c10::ApproximateClockToUnixTimeConverter clock;
        auto unix_time = clock.makeConverter();
        std::lock_guard<std::recursive_mutex> guard(s.mutex);
        for (auto &[p, block] : s.blocks)
            if (id == MempoolId_t{0, 0} || block.pool == id) info.segments.push_back(segment_of(p, block));
        for (auto &entries : s.history) {
            info.device_traces.emplace_back();
            if (!traces) continue;
            for (TraceEntry e : entries) {
                e.time_.t_ = unix_time(e.time_.approx_t_) / 1000;
                info.device_traces.back().push_back(std::move(e));
            }
        }
        return info;
    }
};

} // namespace

/* Makes it PyTorch's allocator. Returns NULL, or what is wrong. */
extern "C" const char *galloc_torch_install(void)
{
    static std::string message;
    try {
        torch::cuda::CUDAPluggableAllocator::changeCurrentAllocator(std::make_shared<Allocator>());
        return nullptr;
    } catch (const c10::Error &e) {
        message = e.what_without_backtrace();
        return message.c_str();
    }
}
