/* torch_full_host.cpp [TEXT] - uses galloc_torch.cpp as PyTorch does: its counters, snapshots and history, and what it
   tells a profiler, on the simulated device. Built with the headers in torch_include. Runs the tests whose names
   contain TEXT. FIXED=1: galloc's memory is from cudaMalloc. */

#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include <atomic>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include "sim.h"
#include "test.h"

extern thread_local cudaStream_t current_stream; /* of c10_cuda.cpp */

using namespace c10::cuda::CUDACachingAllocator;
using c10::cuda::MempoolId_t;
typedef torch::cuda::CUDAPluggableAllocator::CUDAPluggableAllocator Pluggable;

extern "C" const char *galloc_torch_install(void);

#define OK(call) EXPECT_EQ((call), cudaSuccess)
static size_t MiB(size_t n) { return n << 20; }

/* ---- PyTorch's side ---------------------------------------------------------------------------------------------- */

static std::shared_ptr<CUDAAllocator> current;
void torch::cuda::CUDAPluggableAllocator::changeCurrentAllocator(const std::shared_ptr<CUDAAllocator> &allocator)
{
    if (current) throw c10::Error({"", "", 0}, "Can't swap an already initialized allocator");
    current = allocator;
}

/* What a profiler was told last, and how often. */
static struct {
    bool on;
    int uses, failures;
    void *ptr;
    int64_t size;
    size_t allocated, reserved;
    int device;
} profiler;

bool c10::memoryProfilingEnabled() { return profiler.on; }

void c10::reportMemoryUsageToProfiler(void *ptr, int64_t size, size_t allocated, size_t reserved, Device device)
{
    profiler.uses++;
    profiler.ptr = ptr, profiler.size = size;
    profiler.allocated = allocated, profiler.reserved = reserved, profiler.device = device.index;
}

void c10::reportOutOfMemoryToProfiler(int64_t size, size_t allocated, size_t reserved, Device device)
{
    profiler.failures++;
    profiler.size = size;
    profiler.allocated = allocated, profiler.reserved = reserved, profiler.device = device.index;
}

/* ---- another process ---------------------------------------------------------------------------------------------- */

/* Stand-ins, since the simulated device is of one process. A handle has the start of the allocation of cudaMalloc. */
static int is_fixed, opened;

extern "C" cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *p)
{
    CUdeviceptr start = 0;
    memset(handle, 7, sizeof *handle);
    if (!is_fixed) return cudaErrorInvalidValue;
    EXPECT_EQ(cuMemGetAddressRange(&start, nullptr, CUdeviceptr(p)), CUDA_SUCCESS);
    memcpy(handle->reserved, &start, sizeof start);
    return cudaSuccess;
}

extern "C" cudaError_t cudaIpcOpenMemHandle(void **p, cudaIpcMemHandle_t handle, unsigned flags)
{
    memcpy(p, handle.reserved, sizeof *p);
    if (flags != cudaIpcMemLazyEnablePeerAccess || handle.reserved[63] != 7) return cudaErrorInvalidValue;
    opened++;
    return cudaSuccess;
}

extern "C" cudaError_t cudaIpcCloseMemHandle(void *)
{
    int device = -1;
    OK(cudaGetDevice(&device));
    if (device == 1) opened--;
    return cudaSuccess;
}

/* ---- the tests --------------------------------------------------------------------------------------------------- */

static void begin()
{
    sim_options options = sim_defaults();
    options.devices = 3;
    options.pace = SIM_PACE_STILL;
    options.memory = MiB(1024);
    EXPECT_EQ(sim_start(&options), 0);
}

static void *get(size_t bytes, cudaStream_t stream = nullptr) { return current->raw_alloc_with_stream(bytes, stream); }
static void give(void *p) { current->raw_delete(p); }

static int fails(size_t bytes)
{
    try {
        (void)get(bytes);
    } catch (const c10::OutOfMemoryError &) {
        return 1;
    }
    return 0;
}

static int status_of(pid_t child)
{
    int status = -1;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    return status;
}

/* Comes first: a child of fork before the first tensor may use CUDA, and keeps what the program has set. */
TEST(a_child_of_fork_before_the_first_tensor_goes_on)
{
    current->recordHistory(true, nullptr, 10, RecordContext::NEVER, true, {});
    pid_t child = fork();
    if (!child) {
        (void)alarm(10);
        give(get(MiB(1)));
        _exit(current->snapshot({0, 0}, true).device_traces.at(0).size() != 3);
    }
    EXPECT_EQ(status_of(child), 0);
    current->recordHistory(false, nullptr, 0, RecordContext::NEVER, true, {});
}

TEST(it_is_installed_once)
{
    const char *message = galloc_torch_install();
    EXPECT(message && strstr(message, "already initialized"));
    EXPECT(current->name() == "galloc");
}

TEST(a_profiler_is_told_of_memory)
{
    profiler = {};
    void *p = get(1000), *q;
    EXPECT_EQ(profiler.uses, 0); /* it does not listen */
    profiler.on = true;
    q = get(5000);
    EXPECT_EQ(profiler.uses, 1);
    EXPECT(profiler.ptr == q);
    EXPECT_EQ(profiler.size, 5120);
    EXPECT_EQ(profiler.allocated, 6144);
    EXPECT(profiler.reserved >= 6144);
    EXPECT_EQ(profiler.device, 0);
    give(p);
    EXPECT_EQ(profiler.uses, 2);
    EXPECT(profiler.ptr == p);
    EXPECT_EQ(profiler.size, -1024);
    EXPECT_EQ(profiler.allocated, 5120);
    OK(cudaSetDevice(1));
    p = get(100);
    EXPECT_EQ(profiler.device, 1);
    EXPECT_EQ(profiler.allocated, 512);
    give(p);
    OK(cudaSetDevice(0));
    profiler.on = false;
    give(q);
    EXPECT_EQ(profiler.uses, 4);
    EXPECT_EQ(profiler.failures, 0);
}

TEST(a_profiler_is_told_of_running_out)
{
    profiler = {};
    EXPECT(fails(MiB(4000)));
    EXPECT_EQ(profiler.failures, 0);
    profiler.on = true;
    EXPECT(fails(MiB(4000)));
    EXPECT_EQ(profiler.failures, 1);
    EXPECT_EQ(profiler.uses, 0);
    EXPECT_EQ(profiler.size, MiB(4000));
    profiler.on = false;
    EXPECT_EQ(current->getDeviceStats(0).num_ooms, 2);
    current->resetAccumulatedStats(0);
}

TEST(the_memory_fraction_is_that_of_its_device)
{
    void *p = get(MiB(300));
    EXPECT_EQ(current->getMemoryFraction(0), 1);
    current->setMemoryFraction(0.25, 0);
    current->setMemoryFraction(0.5, 1);
    EXPECT_EQ(current->getMemoryFraction(0), 0.25);
    EXPECT_EQ(current->getMemoryFraction(1), 0.5);
    EXPECT(fails(MiB(100)));
    current->setMemoryFraction(1, 0);
    current->setMemoryFraction(1, 1);
    give(get(MiB(600)));
    give(p);
    current->resetAccumulatedStats(0);
}

TEST(counters_count)
{
    int64_t before = current->getDeviceStats(0).requested_bytes[0].allocated;
    void *p = get(1000), *q = get(MiB(2));
    DeviceStats stats = current->getDeviceStats(0);
    EXPECT_EQ(stats.allocated_bytes[0].current, 1024 + MiB(2));
    EXPECT_EQ(stats.allocated_bytes[1].current, 1024);
    EXPECT_EQ(stats.requested_bytes[0].allocated - before, 1000 + MiB(2));
    EXPECT(stats.reserved_bytes[0].current >= stats.allocated_bytes[0].current);
    give(p);
    give(q);
    EXPECT_EQ(current->getDeviceStats(0).active[0].current, 0);
    current->resetPeakStats(0);
    EXPECT_EQ(current->getDeviceStats(0).allocated_bytes[0].peak, 0);
}

static void expect_sound(const Stat &before, const Stat &stat)
{
    EXPECT(stat.peak >= stat.current);
    EXPECT_EQ(stat.allocated - before.allocated - (stat.freed - before.freed), stat.current - before.current);
}

static void expect_sound(const DeviceStats &before, const DeviceStats &stats)
{
    for (int k : {0, 2}) {
        expect_sound(before.segment[k], stats.segment[k]);
        expect_sound(before.reserved_bytes[k], stats.reserved_bytes[k]);
    }
}

TEST(segments_and_reserved_bytes_have_peaks_and_totals)
{
    static_cast<Pluggable &>(*current).emptyCache();
    current->resetPeakStats(0);
    DeviceStats before = current->getDeviceStats(0), stats;
    EXPECT_EQ(before.segment[0].current, 0);
    EXPECT_EQ(before.segment[0].peak, 0);
    void *p = get(MiB(20));
    stats = current->getDeviceStats(0);
    expect_sound(before, stats);
    EXPECT_EQ(stats.segment[0].current, 10);
    EXPECT_EQ(stats.segment[2].current, 10);
    EXPECT_EQ(stats.segment[0].allocated - before.segment[0].allocated, 10);
    EXPECT_EQ(stats.reserved_bytes[0].allocated - before.reserved_bytes[0].allocated, MiB(20));
    EXPECT_EQ(stats.reserved_bytes[0].freed, before.reserved_bytes[0].freed);
    give(p);
    static_cast<Pluggable &>(*current).emptyCache();
    stats = current->getDeviceStats(0);
    expect_sound(before, stats);
    EXPECT_EQ(stats.segment[0].peak, 10);
    EXPECT_EQ(stats.segment[0].freed - before.segment[0].freed, 10);
    EXPECT_EQ(stats.reserved_bytes[0].peak, MiB(20));
    EXPECT_EQ(stats.reserved_bytes[0].freed - before.reserved_bytes[0].freed, MiB(20));
}

/* The totals go on after a reset of the peaks, and begin again with their own; the peaks the other way round. */
TEST(peaks_and_totals_of_segments_are_reset_apart)
{
    void *p = get(MiB(20));
    give(get(MiB(40)));
    static_cast<Pluggable &>(*current).emptyCache();
    EXPECT(fails(MiB(4000)));
    DeviceStats before = current->getDeviceStats(0), stats;
    current->resetPeakStats(0);
    stats = current->getDeviceStats(0);
    expect_sound(before, stats);
    EXPECT_EQ(stats.num_ooms, 1);
    EXPECT_EQ(stats.segment[0].peak, 10);
    EXPECT_EQ(stats.reserved_bytes[0].peak, MiB(20));
    EXPECT_EQ(stats.segment[0].freed, before.segment[0].freed);
    EXPECT_EQ(stats.reserved_bytes[0].freed, before.reserved_bytes[0].freed);
    give(get(MiB(40)));
    current->resetAccumulatedStats(0);
    stats = current->getDeviceStats(0);
    EXPECT_EQ(stats.num_ooms, 0);
    EXPECT_EQ(stats.segment[0].peak, stats.segment[0].current);
    EXPECT_EQ(stats.segment[0].allocated, 0);
    EXPECT_EQ(stats.segment[0].freed, 0);
    EXPECT_EQ(stats.reserved_bytes[0].allocated, 0);
    give(p);
    static_cast<Pluggable &>(*current).emptyCache();
    stats = current->getDeviceStats(0);
    EXPECT(stats.segment[0].freed > 10);
    EXPECT_EQ(stats.reserved_bytes[0].freed, stats.segment[0].freed * 2 << 20);
    EXPECT_EQ(stats.segment[0].peak, stats.segment[0].freed);
    current->resetAccumulatedStats(0);
}

static void *get_on(int device, size_t bytes)
{
    OK(cudaSetDevice(device));
    void *p = get(bytes);
    OK(cudaMemsetAsync(p, 1, bytes, nullptr));
    OK(cudaDeviceSynchronize());
    OK(cudaSetDevice(0));
    return p;
}

/* PyTorch says with each copy whether the device of the source may use the other one's memory. */
TEST(memory_is_copied_between_devices_with_and_without_peer_access)
{
    void *here = get_on(0, MiB(1)), *peer = get_on(1, MiB(1)), *apart;
    sim_fail("cudaDeviceCanAccessPeer", 1, 1, cudaErrorInvalidDevice);
    apart = get_on(2, MiB(1));
    sim_fail_clear();
    OK(current->memcpyAsync(peer, 1, here, 0, MiB(1), nullptr, true));
    OK(current->memcpyAsync(here, 0, peer, 1, MiB(1), nullptr, true));
    OK(current->memcpyAsync(apart, 2, here, 0, MiB(1), nullptr, false));
    OK(current->memcpyAsync(here, 0, apart, 2, MiB(1), nullptr, false));
    OK(current->memcpyAsync(static_cast<char *>(here) + MiB(1) / 2, 0, here, 0, MiB(1) / 2, nullptr, false));
    OK(cudaDeviceSynchronize());
    for (void *p : {here, peer, apart}) give(p);
}

TEST(a_driver_that_does_not_say_what_is_left_leaves_no_error_in_the_runtime)
{
    size_t largest = 1;
    sim_fail("cudaMemGetInfo", 1, 1, cudaErrorUnknown);
    EXPECT(fails(MiB(4096)));
    static_cast<Pluggable &>(*current).emptyCache();
    current->cacheInfo(0, &largest);
    EXPECT_EQ(largest, 0);
    OK(cudaPeekAtLastError());
    (void)cudaSetDevice(7); /* an error of the program */
    current->cacheInfo(0, &largest);
    EXPECT(cudaGetLastError() != cudaSuccess);
    sim_fail_clear();
}

static std::shared_ptr<c10::GatheredContext> stack() { return std::make_shared<c10::GatheredContext>(); }

/* "state" keeps stacks of blocks in use only, "alloc" also of allocations in the history, "all" of frees too. */
TEST(the_history_has_the_stacks_that_were_asked_for)
{
    static const RecordContext kinds[] = {RecordContext::NEVER, RecordContext::STATE, RecordContext::ALLOC,
                                          RecordContext::ALL};
    for (int i = 0; i < 4; i++) {
        current->recordHistory(true, stack, 100, kinds[i], true, {});
        void *p = get(1000);
        SnapshotInfo info = current->snapshot({0, 0}, false);
        EXPECT_EQ(info.segments.size(), 1);
        EXPECT_EQ(info.segments[0].blocks[0].context_when_allocated != nullptr, i >= 1);
        give(p);
        info = current->snapshot({0, 0}, true);
        EXPECT_EQ(info.segments.size(), 0);
        EXPECT_EQ(info.device_traces[0].size(), 3);
        EXPECT_EQ(info.device_traces[0][0].action_, TraceEntry::ALLOC);
        EXPECT_EQ(info.device_traces[0][0].context_ != nullptr, i >= 2);
        EXPECT_EQ(info.device_traces[0][2].context_ != nullptr, i >= 3);
        current->recordHistory(false, nullptr, 0, RecordContext::NEVER, true, {});
    }
}

TEST(the_end_of_the_recording_clears_the_history)
{
    for (bool clear : {false, true}) {
        current->recordHistory(true, nullptr, 10, RecordContext::NEVER, true, {});
        give(get(MiB(1)));
        EXPECT(current->snapshot({0, 0}, true).device_traces.at(0).size() > 0);
        current->recordHistory(false, nullptr, 0, RecordContext::NEVER, clear, {});
        EXPECT_EQ(current->snapshot({0, 0}, true).device_traces.at(0).size(), 0);
    }
}

/* As PyTorch begins and ends a capture of a stream. Its filter belongs to a graph that may be gone. */
static void begin_pool(MempoolId_t id, cudaStream_t stream)
{
    current_stream = stream;
    current->beginAllocateToPool(0, id, [](cudaStream_t) -> bool { throw std::string("the filter was called"); });
}

static void end_pool(MempoolId_t id, cudaStream_t stream)
{
    current_stream = stream;
    current->endAllocateToPool(0, id);
    current_stream = nullptr;
}

TEST(blocks_belong_to_the_pool_of_their_graph)
{
    const MempoolId_t id = {0, 7}, none = {0, 8};
    cudaStream_t stream, other;
    cudaGraph_t graph;
    OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    OK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    begin_pool(id, stream);
    OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    void *p = get(1000, stream), *q = get(1000, other), *r = get(1000), *t = get(1000, stream);
    OK(cudaStreamEndCapture(stream, &graph));
    end_pool(id, stream);
    give(t);
    void *u = get(1000, stream); /* after the capture */
    EXPECT_EQ(current->snapshot({0, 0}, false).segments.size(), 4);
    SnapshotInfo info = current->snapshot(id, false);
    EXPECT_EQ(info.segments.size(), 1);
    EXPECT_EQ(info.segments[0].address, size_t(p));
    EXPECT(info.segments[0].owner_private_pool_id == id);
    EXPECT(current->checkPoolLiveAllocations(0, id, {p}));
    EXPECT(!current->checkPoolLiveAllocations(0, id, {}));
    EXPECT(!current->checkPoolLiveAllocations(0, id, {p, q}));
    EXPECT(!current->checkPoolLiveAllocations(0, id, {q}));
    EXPECT(!current->checkPoolLiveAllocations(1, id, {p}));
    EXPECT(current->checkPoolLiveAllocations(0, none, {}));
    for (void *block : {p, q, r, u}) give(block);
    EXPECT(current->checkPoolLiveAllocations(0, id, {}));
    OK(cudaGraphDestroy(graph));
    current->releasePool(0, id);
    OK(cudaStreamDestroy(stream));
    OK(cudaStreamDestroy(other));
}

static cudaStream_t new_stream()
{
    cudaStream_t stream;
    OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
}

/* A capture that fails. PyTorch does not end its pool. */
static void fail_a_capture(MempoolId_t id, cudaStream_t stream, size_t bytes)
{
    cudaStream_t forked = new_stream();
    cudaEvent_t event;
    cudaGraph_t graph;
    void *p = nullptr;
    OK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    begin_pool(id, stream);
    OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    if (bytes) {
        p = get(bytes, stream);
        EXPECT(current->checkPoolLiveAllocations(0, id, {p}));
    }
    OK(cudaEventRecord(event, stream));
    OK(cudaStreamWaitEvent(forked, event, 0));
    OK(sim_launch(forked, nullptr, 0)); /* not joined */
    EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureUnjoined);
    (void)cudaGetLastError();
    if (p) give(p);
    current_stream = nullptr;
    OK(cudaEventDestroy(event));
    OK(cudaStreamDestroy(forked));
}

/* Captures a graph that uses and frees `bytes`. Returns their address. A later capture, which the program itself makes,
   does not belong to the pool. */
static void *capture(MempoolId_t id, cudaStream_t stream, size_t bytes, cudaGraph_t *graph)
{
    cudaGraph_t own;
    begin_pool(id, stream);
    OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    void *p = get(bytes, stream);
    EXPECT(current->checkPoolLiveAllocations(0, id, {p}));
    give(p);
    OK(cudaStreamEndCapture(stream, graph));
    end_pool(id, stream);
    OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    void *q = get(bytes, stream);
    EXPECT(current->checkPoolLiveAllocations(0, id, {}));
    give(q);
    OK(cudaStreamEndCapture(stream, &own));
    OK(cudaGraphDestroy(own));
    return p;
}

/* Graphs of one pool share memory after that, and those of two pools do not. */
static void captures_after_a_failed_one(int fails_on_other_stream, MempoolId_t failed, size_t bytes)
{
    const MempoolId_t id = {0, 21}, other = {0, 22};
    cudaStream_t stream = new_stream(), second = fails_on_other_stream ? new_stream() : stream;
    cudaGraph_t graphs[4];
    fail_a_capture(failed, second, bytes);
    fail_a_capture(failed, second, bytes);
    void *first = capture(id, stream, MiB(4), &graphs[0]);
    EXPECT(capture(id, stream, MiB(4), &graphs[1]) == first);
    EXPECT(capture(other, second, MiB(4), &graphs[2]) != first);
    (void)capture(id, stream, MiB(4), &graphs[3]);
    for (cudaGraph_t graph : graphs) OK(cudaGraphDestroy(graph));
    for (int i = 0; i < 2; i++) current->releasePool(0, failed);
    for (int i = 0; i < 3; i++) current->releasePool(0, id);
    current->releasePool(0, other);
    OK(cudaStreamDestroy(stream));
    if (second != stream) OK(cudaStreamDestroy(second));
}

TEST(a_capture_that_failed_changes_nothing_for_later_ones)
{
    for (int i = 0; i < 8; i++) captures_after_a_failed_one(i & 1, {0, i & 2 ? 21 : 20}, i & 4 ? 0 : 1000);
}

/* A capture that the program itself makes, of 4 MiB that are used and freed. */
static void *capture_alone(cudaStream_t stream, cudaGraph_t *graph)
{
    OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    void *p = get(MiB(4), stream);
    give(p);
    OK(cudaStreamEndCapture(stream, graph));
    return p;
}

TEST(the_programs_own_captures_share_nothing_after_one_that_failed)
{
    for (size_t bytes : {size_t(1000), size_t(0)}) {
        cudaStream_t stream = new_stream();
        cudaGraph_t graphs[2];
        fail_a_capture({0, 40}, stream, bytes);
        EXPECT(capture_alone(stream, &graphs[0]) != capture_alone(stream, &graphs[1]));
        for (cudaGraph_t graph : graphs) OK(cudaGraphDestroy(graph));
        current->releasePool(0, {0, 40});
        OK(cudaStreamDestroy(stream));
    }
}

static void come_after(cudaStream_t later, cudaStream_t earlier)
{
    cudaEvent_t event;
    OK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    OK(cudaEventRecord(event, earlier));
    OK(cudaStreamWaitEvent(later, event, 0));
    OK(cudaEventDestroy(event));
}

extern "C" void galloc_hook_record_stream(void *ptr, cudaStream_t stream);

/* A capture into one pool fails. Then another pool's capture begins on its side stream, or forks to its stream before
   the first tensor; before that, an older tensor may be freed, or its use recorded. */
TEST(another_pool_shares_nothing_with_a_capture_that_failed)
{
    enum { ON_ITS_SIDE, FORKS_TO_IT, FREES_FIRST, RECORDS_FIRST, WAYS };
    for (int way = 0; way < WAYS; way++) {
        const MempoolId_t failed = {0, 47}, id = {0, 48};
        cudaStream_t stream = new_stream(), side = new_stream();
        cudaGraph_t graphs[3];
        void *older = get(1000, side);
        (void)capture(id, side, MiB(4), &graphs[0]);
        void *p = capture(failed, stream, MiB(4), &graphs[1]);
        begin_pool(failed, stream);
        OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
        if (way != ON_ITS_SIDE) give(get(1000, stream));
        come_after(side, stream);
        give(get(1000, side));
        OK(sim_launch(side, nullptr, 0)); /* not joined */
        EXPECT_EQ(cudaStreamEndCapture(stream, &graphs[2]), cudaErrorStreamCaptureUnjoined);
        (void)cudaGetLastError();
        if (way < FREES_FIRST) begin_pool(id, side);
        OK(cudaStreamBeginCapture(side, cudaStreamCaptureModeRelaxed));
        if (way != ON_ITS_SIDE) come_after(stream, side);
        if (way == FREES_FIRST) give(older);
        if (way == RECORDS_FIRST) galloc_hook_record_stream(older, side);
        void *q = get(MiB(4), side);
        EXPECT(q != p);
        give(q);
        if (way != ON_ITS_SIDE) come_after(side, stream);
        OK(cudaStreamEndCapture(side, &graphs[2]));
        if (way < FREES_FIRST) end_pool(id, side);
        if (way != FREES_FIRST) give(older);
        for (cudaGraph_t graph : graphs) OK(cudaGraphDestroy(graph));
        for (int i = 0; i < 2; i++) current->releasePool(0, failed);
        for (int i = 0; i < 1 + (way < FREES_FIRST); i++) current->releasePool(0, id);
        OK(cudaStreamDestroy(stream));
        OK(cudaStreamDestroy(side));
    }
}

/* torch.cuda.use_mem_pool inside a capture: the capture goes on in its own pool. */
TEST(a_begin_inside_a_capture_changes_no_pool)
{
    const MempoolId_t inner = {0, 43};
    cudaStream_t stream = new_stream();
    cudaGraph_t graphs[2];
    void *blocks[2];
    for (int i = 0; i < 2; i++) {
        const MempoolId_t id = {0, 41 + i};
        begin_pool(id, stream);
        OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
        begin_pool(inner, stream);
        give(get(1000, stream));
        end_pool(inner, stream);
        blocks[i] = get(MiB(32), stream);
        EXPECT(current->checkPoolLiveAllocations(0, id, {blocks[i]}));
        give(blocks[i]);
        OK(cudaStreamEndCapture(stream, &graphs[i]));
        end_pool(id, stream);
    }
    EXPECT(blocks[0] != blocks[1]);
    for (cudaGraph_t graph : graphs) OK(cudaGraphDestroy(graph));
    for (int i = 0; i < 2; i++) current->releasePool(0, inner);
    for (int i = 0; i < 2; i++) current->releasePool(0, {0, 41 + i});
    OK(cudaStreamDestroy(stream));
}

/* The first tensor of a capture is on a stream that it forked to. */
TEST(a_forked_stream_belongs_to_the_pool_of_its_capture)
{
    const MempoolId_t id = {0, 44};
    cudaStream_t stream = new_stream(), forked = new_stream();
    cudaEvent_t event;
    cudaGraph_t graph;
    OK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    begin_pool(id, stream);
    OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    OK(cudaEventRecord(event, stream));
    OK(cudaStreamWaitEvent(forked, event, 0));
    void *p = get(1000, forked), *q = get(1000, stream);
    EXPECT(current->checkPoolLiveAllocations(0, id, {p, q}));
    give(p);
    give(q);
    OK(cudaEventRecord(event, forked));
    OK(cudaStreamWaitEvent(stream, event, 0));
    OK(cudaStreamEndCapture(stream, &graph));
    end_pool(id, stream);
    OK(cudaGraphDestroy(graph));
    current->releasePool(0, id);
    OK(cudaEventDestroy(event));
    OK(cudaStreamDestroy(stream));
    OK(cudaStreamDestroy(forked));
}

/* The release of a pool ends its captures: a later one on the stream is in no pool. */
TEST(a_released_pool_has_no_open_capture)
{
    const MempoolId_t id = {0, 46};
    cudaStream_t stream = new_stream();
    cudaGraph_t graph;
    fail_a_capture(id, stream, 0);
    current->releasePool(0, id);
    OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    void *p = get(1000, stream);
    EXPECT(current->checkPoolLiveAllocations(0, {0, 0}, {p}));
    give(p);
    OK(cudaStreamEndCapture(stream, &graph));
    OK(cudaGraphDestroy(graph));
    OK(cudaStreamDestroy(stream));
}

/* Another thread begins a capture into the same pool between the end of a capture and that of its pool. */
TEST(the_end_of_a_pool_is_that_of_its_stream)
{
    const MempoolId_t id = {0, 45};
    cudaStream_t stream = new_stream(), other = new_stream();
    cudaGraph_t graphs[2];
    begin_pool(id, stream);
    void *p = capture_alone(stream, &graphs[0]);
    begin_pool(id, other);
    end_pool(id, stream);
    EXPECT(capture_alone(other, &graphs[1]) == p);
    end_pool(id, other);
    for (cudaGraph_t graph : graphs) OK(cudaGraphDestroy(graph));
    for (int i = 0; i < 2; i++) current->releasePool(0, id);
    OK(cudaStreamDestroy(stream));
    OK(cudaStreamDestroy(other));
}

/* Each capture is known by its stream, so that several can be under way. */
TEST(captures_under_way_at_once_belong_to_their_own_pools)
{
    const MempoolId_t id = {0, 30}, other = {0, 31};
    cudaStream_t stream = new_stream(), second = new_stream(), third = new_stream();
    cudaGraph_t graph;
    void *blocks[3];
    for (int round = 0; round < 2; round++) {
        begin_pool(id, stream);
        begin_pool(other, second);
        begin_pool(id, third);
        for (cudaStream_t s : {third, second, stream}) OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
        blocks[0] = get(MiB(1), second);
        blocks[1] = get(MiB(1), stream);
        blocks[2] = get(MiB(1), third);
        EXPECT(current->checkPoolLiveAllocations(0, other, {blocks[0]}));
        EXPECT(current->checkPoolLiveAllocations(0, id, {blocks[1], blocks[2]}));
        OK(cudaStreamEndCapture(stream, &graph));
        end_pool(id, stream);
        OK(cudaGraphDestroy(graph));
        void *p = get(1000, third);
        EXPECT(current->checkPoolLiveAllocations(0, id, {blocks[1], blocks[2], p}));
        give(p);
        for (void *block : blocks) give(block);
        OK(cudaStreamEndCapture(second, &graph));
        end_pool(other, second);
        OK(cudaGraphDestroy(graph));
        OK(cudaStreamEndCapture(third, &graph));
        end_pool(id, third);
        OK(cudaGraphDestroy(graph));
    }
    for (int i = 0; i < 4; i++) current->releasePool(0, id);
    for (int i = 0; i < 2; i++) current->releasePool(0, other);
    for (cudaStream_t s : {stream, second, third}) OK(cudaStreamDestroy(s));
}

static int throws(cudaStream_t stream)
{
    try {
        (void)get(MiB(5), stream);
    } catch (const std::string &) {
        return 1;
    }
    return 0;
}

static bool refuses;
static std::shared_ptr<c10::GatheredContext> no_stack()
{
    if (refuses) throw std::string("no stack");
    return nullptr;
}

/* What an allocation or a free calls throws. Nobody has the memory then, and each ALLOC has its FREE. */
/* A tracker runs under the allocator's lock, and may call the allocator. */
TEST(a_tracker_may_ask_the_allocator)
{
    static bool asks = false;
    static int asked = 0;
    cudaStream_t stream;
    OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    current->attachAllocatorTraceTracker([](const TraceEntry &) {
        if (!asks) return;
        EXPECT(current->getDeviceStats(0).allocated_bytes[0].current >= 0);
        (void)current->snapshot({0, 0}, true);
        asked++;
    });
    asks = true;
    give(get(MiB(1), stream));
    asks = false;
    EXPECT_EQ(asked, 3);
    OK(cudaStreamDestroy(stream));
}

TEST(memory_is_freed_when_a_callback_throws)
{
    cudaStream_t stream;
    OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    static_cast<Pluggable &>(*current).emptyCache();
    const size_t before = sim_physical(0);
    current->recordHistory(true, no_stack, 10, RecordContext::STATE, true, {});
    refuses = true;
    EXPECT(throws(stream));
    refuses = false;
    current->recordHistory(false, nullptr, 0, RecordContext::NEVER, true, {});
    current->attachAllocatorTraceTracker([](const TraceEntry &) {
        if (refuses) throw std::string("no");
    });
    current->recordHistory(true, nullptr, 10, RecordContext::NEVER, true, {});
    refuses = true;
    EXPECT(throws(stream));
    refuses = false;
    SnapshotInfo info = current->snapshot({0, 0}, true);
    EXPECT_EQ(info.device_traces.at(0).size(), 3);
    EXPECT_EQ(info.device_traces[0][0].action_, TraceEntry::ALLOC);
    EXPECT_EQ(info.device_traces[0][2].action_, TraceEntry::FREE_COMPLETED);
    current->recordHistory(true, no_stack, 10, RecordContext::ALL, true, {});
    void *p = get(MiB(5), stream);
    refuses = true;
    give(p); /* PyTorch forgets the address in any case */
    refuses = false;
    current->recordHistory(false, nullptr, 0, RecordContext::NEVER, true, {});
    static_cast<Pluggable &>(*current).emptyCache();
    EXPECT_EQ(sim_physical(0), before);
    EXPECT_EQ(current->getDeviceStats(0).allocated_bytes[0].current, 0);
    EXPECT_EQ(current->getDeviceStats(0).allocation[2].current, 0);
    EXPECT_EQ(current->snapshot({0, 0}, false).segments.size(), 0);
    OK(cudaStreamDestroy(stream));
}

/* Each call of the driver and the runtime fails in turn: PyTorch gets its memory or an exception, and goes on. */
TEST(every_failing_call_is_an_exception_or_nothing)
{
    const MempoolId_t id = {0, 9};
    long n, failed = 1, exceptions = 0;
    cudaStream_t stream;
    OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (n = 1; failed && n < 600; n++) {
        void *blocks[4] = {};
        if (n % 2) static_cast<Pluggable &>(*current).emptyCache();
        sim_fail(nullptr, n, 0, n % 3 ? cudaErrorUnknown : cudaErrorMemoryAllocation);
        for (int i = 0; i < 4; i++) {
            try {
                if (i == 2) current->beginAllocateToPool(0, id, [=](cudaStream_t s) { return s == stream; });
                blocks[i] = get(MiB(size_t(1 + 30 * i)), i % 2 ? stream : nullptr);
                if (i == 3) current->endAllocateToPool(0, id);
            } catch (const c10::Error &) {
                exceptions++;
            }
        }
        try {
            (void)current->getDeviceStats(0);
            (void)current->snapshot({0, 0}, true);
        } catch (const c10::Error &) {
            exceptions++;
        }
        for (void *block : blocks) {
            try {
                if (block) give(block);
            } catch (const c10::Error &) {
                give(block);
            }
        }
        failed = sim_failed();
        sim_fail_clear();
        try {
            current->endAllocateToPool(0, id);
        } catch (const c10::Error &) { /* it had ended */
        }
        try {
            current->releasePool(0, id);
        } catch (const c10::Error &) { /* it had not begun */
        }
        (void)cudaGetLastError();
        void *p = get(MiB(8), stream);
        give(p);
        if (!EXPECT_EQ(current->getDeviceStats(0).allocated_bytes[0].current, 0)) printf("    call %ld\n", n);
    }
    EXPECT(n > 40 && n < 600);
    EXPECT(exceptions > 0);
    OK(cudaStreamDestroy(stream));
}

/* Tensors of the parent end in a child of fork, while another thread of the parent allocates. */
TEST(a_child_of_fork_frees_without_a_wait)
{
    void *p = get(MiB(1));
    cudaStream_t stream = nullptr;
    static std::atomic<int> pausing{0}; /* 1: the thread allocates; 2: it may go on. A tracker stays */
    OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    current->attachAllocatorTraceTracker([](const TraceEntry &) {
        if (!pausing) pausing = 1;
        while (pausing == 1) std::this_thread::yield();
    });
    std::thread other([&] { give(get(MiB(1), stream)); });
    while (!pausing) std::this_thread::yield();
    pid_t child = fork();
    if (!child) {
        (void)alarm(10);
        give(p);
        _exit(current->getDeviceStats(0).allocated_bytes[0].current != 0);
    }
    EXPECT_EQ(status_of(child), 0);
    pausing = 2;
    other.join();
    give(p);
    OK(cudaStreamDestroy(stream));
}

static std::string refusal_of(std::function<void()> call)
{
    try {
        call();
    } catch (const std::exception &e) {
        return e.what();
    }
    return "";
}

/* Pages have no handle: the error says what to do. With memory of cudaMalloc the other process finds the tensor behind
   the start of its segment, and a handle is closed as often as it was opened, on its device. */
TEST(tensors_are_shared_with_another_process)
{
    OK(cudaSetDevice(1));
    void *before = get(3000), *p = get(5000);
    if (!is_fixed) {
        std::string text = refusal_of([&] { (void)current->shareIpcHandle(p); });
        EXPECT(text.find("GALLOC_CONF=expandable_segments:False") != std::string::npos);
    } else {
        ShareableHandle shared = current->shareIpcHandle(p), first = current->shareIpcHandle(before);
        EXPECT(shared.handle == first.handle);
        EXPECT_EQ(shared.offset - first.offset, (char *)p - (char *)before);
        std::shared_ptr<void> segment = current->getIpcDevPtr(shared.handle), again = segment;
        EXPECT((char *)segment.get() + shared.offset == p);
        std::shared_ptr<void> theirs = current->getIpcDevPtr(std::string("\2c") + first.handle);
        EXPECT((char *)theirs.get() + first.offset == before);
        EXPECT_EQ(opened, 2);
        OK(cudaSetDevice(0));
        theirs.reset();
        segment.reset();
        EXPECT_EQ(opened, 1);
        again.reset();
        EXPECT_EQ(opened, 0);
        OK(cudaSetDevice(1));
        shared.handle[63] = 0;
        EXPECT(refusal_of([&] { (void)current->getIpcDevPtr(shared.handle); }).find("cannot be opened") < 100);
    }
    EXPECT(refusal_of([&] { (void)current->getIpcDevPtr("\2e and something else"); }).find("cudaMalloc") < 100);
    EXPECT(refusal_of([&] { (void)current->getIpcDevPtr(""); }) != "");
    give(before);
    give(p);
    OK(cudaSetDevice(0));
}

TEST(nothing_is_left)
{
    sim_run(-1);
    static_cast<Pluggable &>(*current).emptyCache();
    for (int device = 0; device < 3; device++) EXPECT_EQ(sim_physical(device), 0);
    for (long i = 0; sim_finding(i); i++) printf("    found: %s\n", sim_finding(i));
    EXPECT_EQ(sim_findings(SIM_ANY), 0);
    OK(cudaPeekAtLastError());
}

int main(int argc, char **argv)
{
    is_fixed = getenv("FIXED") != nullptr;
    setenv("GALLOC_CONF", is_fixed ? "log:off,expandable_segments:False" : "log:off", 1);
    begin();
    if (galloc_torch_install()) return 2;
    return test_main(argc, argv);
}
