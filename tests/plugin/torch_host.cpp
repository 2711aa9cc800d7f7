/* torch_host.cpp LIBRARY [TEXT] - calls the hooks of libgalloc_torch.so as PyTorch does: through std::function, with
   its types, and with its exceptions, on the simulated device. Runs the tests whose names contain TEXT. */

#include <algorithm>
#include <atomic>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <functional>
#include <malloc.h>
#include <new>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <utility>

#include "c10_error.h"
#include "sim.h"
#include "test.h"

extern thread_local cudaStream_t current_stream; /* of c10_cuda.cpp: PyTorch's */

typedef std::pair<unsigned long long, unsigned long long> MempoolId;
typedef std::function<bool(cudaStream_t)> Filter;

#define OK(call) EXPECT_EQ((call), cudaSuccess)
static size_t MiB(size_t n) { return n << 20; }

/* A program may have its own operator new and operator delete: what the one did not make, the other must not get. */
static const size_t made_here = 0x67616c6c6f63;
static long strangers;

void *operator new(size_t bytes)
{
    size_t *p = static_cast<size_t *>(malloc(bytes + 16));
    if (!p) throw std::bad_alloc();
    p[0] = made_here;
    return p + 2;
}

void operator delete(void *p) noexcept
{
    size_t *start = static_cast<size_t *>(p) - 2;
    if (!p) return;
    if (start[0] == made_here) free(start);
    else strangers++;
}

void operator delete(void *p, size_t) noexcept { operator delete(p); }

/* What CUDAPluggableAllocator keeps. */
static std::function<void *(size_t, int, cudaStream_t)> torch_malloc, torch_segment;
static std::function<void(void *, size_t, int, cudaStream_t)> torch_free;
static std::function<void()> torch_reset;
static std::function<void(double, int)> torch_fraction;
static std::function<void *(void *, size_t *)> torch_base;
static std::function<void(void *, cudaStream_t)> torch_record;
static std::function<void(int, MempoolId, Filter)> torch_begin;
static std::function<void(int, MempoolId)> torch_end, torch_release;
static std::function<void(int, cudaStream_t, MempoolId)> torch_begin_2_1;
static std::function<void(int, cudaStream_t)> torch_end_2_1;
static std::function<void(int, unsigned long long, MempoolId)> torch_begin_2_0;
static std::function<void(int, unsigned long long)> torch_end_2_0;
static size_t (*stats_text)(int, char *, size_t);
struct Held {
    struct { size_t current, peak, allocated, freed; } bytes, pages;
    size_t largest_free;
};
static int (*held_of)(int, Held *);

static const char *library_path;
static void *library;
static int devices_there;

template <class Function> static void hook(std::function<Function> &to, const char *name)
{
    void *symbol = dlsym(library, name);
    if (!EXPECT(symbol)) printf("%s is missing\n", name);
    to = reinterpret_cast<Function *>(symbol);
}

/* A fresh library for each test: its pools go with it. */
static void begin(int devices, int pace, const char *conf)
{
    sim_options options = sim_defaults();
    options.devices = devices_there = devices;
    options.pace = pace;
    options.memory = MiB(1024);
    if (conf) setenv("GALLOC_CONF", conf, 1);
    else setenv("GALLOC_CONF", "log:off", 1);
    EXPECT_EQ(sim_start(&options), 0);
    library = dlopen(library_path, RTLD_NOW | RTLD_LOCAL);
    if (!library) puts(dlerror()), exit(2);
    hook(torch_malloc, "galloc_hook_malloc");
    hook(torch_segment, "galloc_hook_segment");
    hook(torch_free, "galloc_hook_free");
    hook(torch_reset, "galloc_hook_reset");
    hook(torch_fraction, "galloc_hook_memory_fraction");
    hook(torch_base, "galloc_hook_base_alloc");
    hook(torch_record, "galloc_hook_record_stream");
    hook(torch_begin, "galloc_hook_begin_allocate_to_pool");
    hook(torch_end, "galloc_hook_end_allocate_to_pool");
    hook(torch_release, "galloc_hook_release_pool");
    hook(torch_begin_2_1, "galloc_hook_begin_allocate_stream_to_pool");
    hook(torch_end_2_1, "galloc_hook_end_allocate_stream_to_pool");
    hook(torch_begin_2_0, "galloc_hook_capture_begin");
    hook(torch_end_2_0, "galloc_hook_capture_ended");
    stats_text = reinterpret_cast<size_t (*)(int, char *, size_t)>(dlsym(library, "galloc_hook_stats"));
    held_of = reinterpret_cast<int (*)(int, Held *)>(dlsym(library, "galloc_hook_held"));
}

static void finish()
{
    sim_run(-1);
    torch_reset();
    for (int device = 0; device < devices_there; device++) EXPECT_EQ(sim_physical(device), 0);
    for (long i = 0; sim_finding(i); i++) printf("    found: %s\n", sim_finding(i));
    EXPECT_EQ(sim_findings(SIM_ANY), 0);
    OK(cudaPeekAtLastError());
    dlclose(library);
    sim_stop();
}

static cudaStream_t stream_new()
{
    cudaStream_t stream = nullptr;
    OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
}

static size_t held(int device)
{
    Held now;
    (void)held_of(device, &now);
    return now.bytes.current;
}

static void put(cudaStream_t stream, void *p, size_t bytes, uint64_t tag)
{
    sim_access access = {p, bytes, SIM_WRITE, tag};
    OK(sim_launch(stream, &access, 1));
}

static void look(cudaStream_t stream, void *p, size_t bytes, uint64_t tag)
{
    sim_access access = {p, bytes, SIM_READ | SIM_CHECK, tag};
    OK(sim_launch(stream, &access, 1));
}

static void follow(cudaStream_t earlier, cudaStream_t later)
{
    cudaEvent_t event;
    OK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    OK(cudaEventRecord(event, earlier));
    OK(cudaStreamWaitEvent(later, event, 0));
    OK(cudaEventDestroy(event));
}

TEST(memory_that_a_second_stream_uses_is_not_reused_under_its_work)
{
    begin(1, SIM_PACE_STILL, nullptr);
    cudaStream_t a = stream_new(), b = stream_new();
    void *p = torch_malloc(MiB(4), 0, a), *q;
    put(a, p, MiB(4), 1);
    follow(a, b);
    look(b, p, MiB(4), 1);
    torch_record(p, b);
    torch_free(p, MiB(4), 0, a); /* PyTorch names the stream of the allocation */
    q = torch_malloc(MiB(4), 0, a);
    put(a, q, MiB(4), 2);
    EXPECT(q != p);
    torch_free(q, MiB(4), 0, a);
    finish();
}

TEST(memory_of_one_stream_is_reused_at_once)
{
    begin(1, SIM_PACE_STILL, nullptr);
    cudaStream_t a = stream_new();
    void *p = torch_malloc(5000, 0, a), *q;
    put(a, p, 5000, 1);
    torch_free(p, 5000, 0, a);
    q = torch_malloc(5000, 0, a);
    EXPECT(q == p);
    torch_free(q, 5000, 0, a);
    EXPECT(torch_malloc(0, 0, a) == nullptr);
    torch_free(nullptr, 0, 0, a);
    finish();
}

/* The page sizes of the adaptor's pool are its own, unless GALLOC_CONF names them. */
TEST(pages_are_of_2_mib_unless_the_environment_names_a_size)
{
    const struct { const char *conf; size_t pages; } cases[] = {
        {nullptr, 32}, {"log:off,memory_limit:512M", 32}, {"trace:/tmp/growth.bin,log:off", 32}, {"log:off,growth:8M", 8},
        {"log:off,growth_mb:16", 4}, {"log:off,growth:64M", 1}};
    for (const auto &each : cases) {
        begin(1, SIM_PACE_STILL, each.conf);
        Held now;
        void *p = torch_malloc(MiB(64), 0, nullptr);
        EXPECT(held_of(0, &now));
        EXPECT_EQ(now.bytes.current, MiB(64));
        EXPECT_EQ(now.pages.current, each.pages);
        torch_free(p, MiB(64), 0, nullptr);
        finish();
    }
    /* Other rules and kinds of memory keep theirs. */
    for (const char *conf : {"like:pytorch,log:off", "log:off,expandable_segments:False", "log:off,growth:auto",
                             "log:off,strategy:pooled", "log:off,backend:cudaMalloc"}) {
        begin(1, SIM_PACE_STILL, conf);
        void *p = torch_malloc(MiB(64), 0, nullptr);
        EXPECT(p);
        EXPECT(sim_calls("cuMemCreate") < 32);
        torch_free(p, MiB(64), 0, nullptr);
        finish();
    }
}

TEST(running_out_is_pytorchs_exception_with_the_report)
{
    begin(1, SIM_PACE_STILL, "memory_limit:64M,log:off");
    void *p = torch_malloc(MiB(40), 0, nullptr);
    int caught = 0;
    try {
        (void)torch_malloc(MiB(30), 0, nullptr);
    } catch (const c10::OutOfMemoryError &error) {
        std::string text = error.what();
        caught = 1;
        EXPECT(text.find("CUDA out of memory. Tried to allocate 30.00 MiB. GPU 0 has a total capacity of 1024.00 MiB "
                         "of which 98") == 0);
        EXPECT(text.find("memory_limit") != std::string::npos);
        EXPECT(text.size() > 500);
    }
    EXPECT(caught);
    EXPECT_EQ(strangers, 0);
    EXPECT(torch_segment(MiB(30), 0, nullptr) == nullptr); /* a MemPool is told by NULL */
    torch_free(p, MiB(40), 0, nullptr);
    p = torch_malloc(MiB(50), 0, nullptr);
    EXPECT(p);
    torch_free(p, MiB(50), 0, nullptr);
    finish();
}

TEST(other_failures_are_pytorchs_error)
{
    begin(1, SIM_PACE_STILL, nullptr);
    for (int n = 0; n < 6; n++) {
        int caught = 0, device = 500 * (n / 2) - 1;
        try {
            (void)(n % 2 ? torch_segment : torch_malloc)(100, device == 499 ? 1 : device, nullptr);
        } catch (const c10::OutOfMemoryError &) {
            caught = -1;
        } catch (const c10::Error &error) {
            caught = 1;
            EXPECT(std::string(error.what()).find("CUDA error: ") == 0);
            EXPECT_EQ(std::string(error.what()).find("galloc_") != std::string::npos, device == 499);
        }
        EXPECT_EQ(caught, 1);
    }
    finish();
}

TEST(each_device_has_its_pool_and_the_current_one_stays)
{
    begin(2, SIM_PACE_STILL, nullptr);
    int current = -1;
    void *p = torch_malloc(MiB(4), 1, nullptr), *q;
    EXPECT_EQ(held(0), 0);
    EXPECT(held(1) >= MiB(4));
    torch_record(p, nullptr); /* the default stream of device 1, though device 0 is current */
    OK(cudaGetDevice(&current));
    EXPECT_EQ(current, 0);
    OK(cudaSetDevice(1));
    put(nullptr, p, MiB(4), 1);
    OK(cudaSetDevice(0));
    torch_free(p, MiB(4), 1, nullptr);
    q = torch_malloc(MiB(4), 1, nullptr);
    OK(cudaSetDevice(1));
    put(nullptr, q, MiB(4), 2);
    OK(cudaSetDevice(0));
    torch_free(q, MiB(4), 1, nullptr);
    OK(cudaGetDevice(&current));
    EXPECT_EQ(current, 0);
    finish();
}

TEST(the_current_device_stays_when_another_runs_out)
{
    begin(2, SIM_PACE_STILL, nullptr);
    int current = -1, caught = 0;
    try {
        (void)torch_malloc(MiB(2048), 1, nullptr);
    } catch (const c10::OutOfMemoryError &) {
        caught = 1;
    }
    EXPECT(caught);
    OK(cudaGetDevice(&current));
    EXPECT_EQ(current, 0);
    finish();
}

TEST(a_default_stream_is_recorded_for_the_device_of_the_tensor)
{
    begin(2, SIM_PACE_STILL, nullptr);
    OK(cudaSetDevice(1));
    cudaStream_t stream = stream_new();
    void *p = torch_malloc(MiB(4), 1, stream), *q;
    put(stream, p, MiB(4), 1);
    follow(stream, nullptr);
    look(nullptr, p, MiB(4), 1);
    OK(cudaSetDevice(0));
    torch_record(p, nullptr); /* device 1's */
    torch_free(p, MiB(4), 1, stream);
    q = torch_malloc(MiB(4), 1, stream);
    OK(cudaSetDevice(1));
    put(stream, q, MiB(4), 2);
    OK(cudaSetDevice(0));
    EXPECT(q != p);
    torch_free(q, MiB(4), 1, stream);
    finish();
}

/* A context that another library made, as PyCUDA does, becomes current. */
static CUcontext context_new(int device)
{
    CUcontext context = nullptr;
    EXPECT_EQ(cuInit(0), CUDA_SUCCESS);
#if CUDART_VERSION >= 13000
    EXPECT_EQ(cuCtxCreate(&context, nullptr, 0, device), CUDA_SUCCESS);
#else
    EXPECT_EQ(cuCtxCreate(&context, 0, device), CUDA_SUCCESS);
#endif
    return context;
}

/* The hooks have left it current. Ends it. */
static void context_end(CUcontext context)
{
    CUcontext current = nullptr;
    EXPECT_EQ(cuCtxPopCurrent(&current), CUDA_SUCCESS);
    EXPECT(current == context);
    EXPECT_EQ(cuCtxDestroy(context), CUDA_SUCCESS);
}

TEST(a_context_of_the_program_stays_current)
{
    for (int device = 0; device < 2; device++) {
        begin(2, SIM_PACE_STILL, nullptr);
        CUcontext context = context_new(0), current = nullptr;
        void *p = torch_malloc(MiB(4), device, nullptr);
        EXPECT(held(device) >= MiB(4));
        torch_record(p, nullptr);
        torch_fraction(0.5, device);
        EXPECT_EQ(cuCtxGetCurrent(&current), CUDA_SUCCESS);
        EXPECT(current == context);
        torch_free(p, MiB(4), device, nullptr);
        context_end(context);
        finish();
    }
}

/* That stream's work uses a tensor that is freed, or recorded, while another context is current. */
TEST(a_default_stream_is_that_of_the_primary_context)
{
    for (int recorded = 0; recorded < 2; recorded++) {
        begin(1, SIM_PACE_STILL, nullptr);
        cudaStream_t stream = stream_new();
        void *p = torch_malloc(MiB(4), 0, recorded ? stream : nullptr), *q;
        put(nullptr, p, MiB(4), 1);
        CUcontext context = context_new(0);
        if (recorded) torch_record(p, nullptr);
        torch_free(p, MiB(4), 0, recorded ? stream : nullptr);
        OK(cudaStreamSynchronize(nullptr)); /* the stream of the other context */
        q = torch_malloc(MiB(4), 0, stream);
        context_end(context);
        put(stream, q, MiB(4), 2);
        torch_free(q, MiB(4), 0, stream);
        finish();
    }
}

/* It is the same stream whichever context is current, and memory comes back in its order. */
TEST(memory_of_a_default_stream_comes_back_under_another_context)
{
    begin(1, SIM_PACE_STILL, nullptr);
    void *p = torch_malloc(MiB(4), 0, nullptr);
    put(nullptr, p, MiB(4), 1);
    torch_free(p, MiB(4), 0, nullptr);
    CUcontext context = context_new(0);
    EXPECT(torch_malloc(MiB(4), 0, nullptr) == p);
    torch_free(p, MiB(4), 0, nullptr);
    context_end(context);
    finish();
}

TEST(a_thread_without_a_context_keeps_its_device)
{
    begin(2, SIM_PACE_STILL, nullptr);
    std::thread([] {
        int current = -1;
        torch_free(torch_malloc(MiB(4), 1, nullptr), MiB(4), 1, nullptr);
        OK(cudaGetDevice(&current));
        EXPECT_EQ(current, 0);
    }).join();
    finish();
}

/* PyTorch passes the address of each tensor on: NULL for an empty one, also memory that another library made. */
/* In the other thread the handle means another stream. */
TEST(memory_of_a_threads_own_stream_may_end_in_another_thread)
{
    begin(1, SIM_PACE_STILL, nullptr);
    const cudaStream_t own = cudaStreamPerThread;
    void *p = torch_malloc(MiB(4), 0, own), *q = torch_malloc(MiB(4), 0, own);
    put(own, p, MiB(4), 1);
    std::thread([&] {
        torch_free(p, MiB(4), 0, own);
        void *r = torch_malloc(MiB(4), 0, own);
        EXPECT(r != p); /* the work of the other thread is not over */
        put(own, r, MiB(4), 2);
        torch_free(r, MiB(4), 0, own);
        EXPECT(torch_malloc(MiB(4), 0, own) == r); /* at once */
        torch_free(r, MiB(4), 0, own);
    }).join();
    torch_free(q, MiB(4), 0, own);
    finish();
}

/* One failure changes nothing. Of two the caller hears, and no memory is lost. */
TEST(a_hook_that_cannot_go_back_to_the_context_says_so)
{
    for (int fails = 1; fails <= 2; fails++) {
        for (int kind = 0; kind < 4; kind++) {
            begin(2, SIM_PACE_STILL, nullptr);
            bool caught = false;
            int device = -1;
            void *p = nullptr, *first = torch_malloc(1000, 1, nullptr);
            OK(cudaSetDevice(0));
            sim_fail("cuCtxSetCurrent", 1, fails > 1, cudaErrorUnknown); /* the hook goes there by cudaSetDevice */
            try {
                if (kind == 0) p = torch_malloc(1000, 1, nullptr);
                if (kind == 1) torch_record(first, nullptr);
                if (kind == 2) torch_fraction(0.5, 1);
                if (kind == 3) torch_free(first, 1000, 1, nullptr);
            } catch (const c10::Error &e) {
                caught = strstr(e.what(), "current again") != nullptr;
            }
            EXPECT(sim_failed() > 0);
            sim_fail_clear();
            if (!EXPECT_EQ(caught, fails == 2 && kind < 3)) printf("    kind %d\n", kind);
            OK(cudaGetDevice(&device));
            EXPECT_EQ(device, fails == 2);
            EXPECT_EQ(p != nullptr, kind == 0 && fails == 1);
            OK(cudaSetDevice(0));
            if (p) torch_free(p, 1000, 1, nullptr);
            if (kind < 3) torch_free(first, 1000, 1, nullptr);
            finish();
        }
    }
}

TEST(a_stream_is_recorded_for_memory_of_galloc_only)
{
    begin(1, SIM_PACE_STILL, nullptr);
    cudaStream_t stream = stream_new();
    void *foreign = nullptr, *p = torch_malloc(MiB(4), 0, nullptr);
    int on_host = 0, caught = 0;
    OK(cudaMalloc(&foreign, 1000));
    for (cudaStream_t each : {stream, cudaStream_t(nullptr)})
        for (void *ptr : {torch_malloc(0, 0, nullptr), foreign, static_cast<void *>(&on_host)}) torch_record(ptr, each);
    torch_free(p, MiB(4), 0, nullptr);
    try {
        torch_record(p, stream); /* a mistake of the caller */
    } catch (const c10::Error &) {
        caught = 1;
    }
    EXPECT(caught);
    OK(cudaFree(foreign));
    finish();
}

/* As PyTorch copies a tensor to another device, and back. */
static cudaError_t copy(int source, void *to, const void *from, size_t bytes)
{
    OK(cudaSetDevice(source));
    cudaError_t err = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, nullptr);
    if (err) EXPECT_EQ(cudaGetLastError(), err);
    OK(cudaDeviceSynchronize());
    OK(cudaSetDevice(0));
    return err;
}

/* A kernel of the device writes the memory. */
static void write_from(int device, void *p, size_t bytes)
{
    OK(cudaSetDevice(device));
    put(nullptr, p, bytes, 3);
    OK(cudaDeviceSynchronize());
    OK(cudaSetDevice(0));
}

TEST(devices_use_each_others_memory)
{
    begin(3, SIM_PACE_STILL, nullptr);
    void *blocks[6];
    for (int i = 0; i < 6; i++) blocks[i] = torch_malloc(MiB(30), i % 3, nullptr); /* before and after the others */
    for (int i = 0; i < 6; i++)
        for (int user = 0; user < 3; user++) write_from(user, blocks[i], MiB(30));
    for (int i = 0; i < 3; i++)
        for (int j = 0; j < 6; j++)
            if (i != j) OK(copy(i, blocks[j], blocks[i], MiB(30)));
    for (int i = 0; i < 6; i++) torch_free(blocks[i], MiB(30), i % 3, nullptr);
    finish();
}

static long calls_of_one_device(int devices, const char *call)
{
    begin(devices, SIM_PACE_STILL, nullptr);
    void *p = torch_malloc(MiB(100), devices - 1, nullptr);
    long calls = sim_calls(call);
    torch_free(p, MiB(100), devices - 1, nullptr);
    finish();
    return calls;
}

/* One process for each device, which sees them all. */
TEST(a_process_that_uses_one_device_pays_nothing_for_the_others)
{
    EXPECT_EQ(calls_of_one_device(8, "cudaDeviceCanAccessPeer"), 0);
    EXPECT_EQ(calls_of_one_device(8, "cuMemSetAccess"), calls_of_one_device(1, "cuMemSetAccess"));
}

TEST(devices_that_cannot_be_peers_have_their_memory)
{
    begin(2, SIM_PACE_STILL, nullptr);
    sim_fail("cudaDeviceCanAccessPeer", 1, 1, cudaErrorInvalidDevice);
    void *p = torch_malloc(MiB(30), 0, nullptr), *q = torch_malloc(MiB(30), 1, nullptr);
    sim_fail_clear();
    OK(cudaPeekAtLastError());
    write_from(0, p, MiB(30));
    write_from(1, q, MiB(30));
    EXPECT_EQ(copy(0, q, p, MiB(30)), cudaErrorInvalidValue); /* as README.md of the adaptor says */
    torch_free(p, MiB(30), 0, nullptr);
    torch_free(q, MiB(30), 1, nullptr);
    finish();
}

static bool has(const std::string &text, const char *part) { return text.find(part) != std::string::npos; }

/* The adaptor says it once in a process, so that a child says it. */
TEST(a_device_that_another_one_cannot_use_is_named)
{
    char words[200] = "";
    int ends[2], status = -1;
    EXPECT_EQ(pipe(ends), 0);
    pid_t child = fork();
    if (!child) {
        (void)dup2(ends[1], STDOUT_FILENO);
        (void)dup2(ends[1], STDERR_FILENO);
        execl("/proc/self/exe", "torch_host", library_path, "devices_that_cannot_be_peers", nullptr);
        _exit(2);
    }
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    EXPECT(read(ends[0], words, sizeof words - 1) > 0);
    close(ends[0]);
    close(ends[1]);
    EXPECT(has(words, "device 1 gets no access to some memory of device 0"));
}

TEST(a_refusal_of_access_loses_no_allocation)
{
    for (long nth = 1; nth < 40; nth++) {
        begin(2, SIM_PACE_STILL, nullptr);
        void *p = torch_malloc(MiB(30), 0, nullptr), *q = nullptr;
        sim_fail("cuMemSetAccess", nth, 0, cudaErrorNotSupported);
        try {
            q = torch_segment(MiB(30), 1, nullptr);
        } catch (const c10::Error &) {
            EXPECT(!q);
        }
        sim_fail_clear();
        if (nth <= 15) EXPECT(q); /* for the pages of device 0 */
        if (q) write_from(1, q, MiB(30));
        write_from(0, p, MiB(30));
        torch_free(p, MiB(30), 0, nullptr);
        if (q) torch_free(q, MiB(30), 1, nullptr);
        finish();
    }
}

/* Memory of cudaMalloc follows the driver's own peer access, which PyTorch enables. */
TEST(devices_use_each_others_memory_of_cuda_malloc)
{
    for (const char *conf : {"expandable_segments:False,log:off", "backend:cudaMalloc,log:off"}) {
        begin(2, SIM_PACE_STILL, conf);
        void *p = torch_malloc(MiB(30), 0, nullptr), *q = torch_malloc(MiB(30), 1, nullptr);
        OK(cudaDeviceEnablePeerAccess(1, 0));
        write_from(0, p, MiB(30));
        OK(copy(0, q, p, MiB(30)));
        EXPECT_EQ(sim_calls("cuMemSetAccess"), 0);
        torch_free(p, MiB(30), 0, nullptr);
        torch_free(q, MiB(30), 1, nullptr);
        finish();
    }
}

/* A further device is used while another thread maps pages. */
TEST(devices_are_added_while_pages_are_mapped)
{
    for (int round = 0; round < 20; round++) {
        begin(3, SIM_PACE_STILL, nullptr);
        std::atomic<int> state(0);
        void *blocks[3] = {nullptr, torch_malloc(MiB(4), 1, nullptr), nullptr};
        std::thread mapper([&] {
            while (state < 2) {
                blocks[0] = torch_malloc(MiB(100), 0, nullptr);
                if (state == 0) state = 1;
                if (state == 1) torch_free(blocks[0], MiB(100), 0, nullptr), torch_reset();
                else break;
                blocks[0] = nullptr;
            }
        });
        while (state == 0) std::this_thread::yield();
        blocks[2] = torch_malloc(MiB(4), 2, nullptr);
        state = 2;
        mapper.join();
        if (!blocks[0]) blocks[0] = torch_malloc(MiB(100), 0, nullptr);
        for (int user = 0; user < 3; user++) write_from(user, blocks[0], MiB(100));
        torch_free(blocks[0], MiB(100), 0, nullptr);
        torch_free(blocks[1], MiB(4), 1, nullptr);
        torch_free(blocks[2], MiB(4), 2, nullptr);
        finish();
    }
}

/* The text of the exception with which an allocation on device 0 fails. */
static std::string failure(size_t bytes)
{
    try {
        (void)torch_malloc(bytes, 0, nullptr);
    } catch (const c10::OutOfMemoryError &error) {
        return error.what();
    }
    return "";
}

TEST(sizes_in_the_text_are_written_as_pytorch_writes_them)
{
    static const struct { size_t bytes; const char *text; } sizes[] = {
        {100, "Tried to allocate 100 bytes. GPU 0 has"},
        {5000, "Tried to allocate 4.88 KiB. GPU 0 has"},
        {size_t(3) << 30, "Tried to allocate 3.00 GiB. GPU 0 has"},
        {size_t(1) << 60, "Tried to allocate more than 1EB memory. GPU 0 has"}};
    begin(1, SIM_PACE_STILL, "memory_limit:0,log:off");
    for (auto &size : sizes) EXPECT(failure(size.bytes).find(size.text) != std::string::npos);
    finish();
}

TEST(the_memory_fraction_can_be_set_at_any_time)
{
    begin(2, SIM_PACE_STILL, nullptr);
    torch_fraction(0.25, 0);
    void *p = torch_malloc(MiB(200), 0, nullptr), *q;
    EXPECT(torch_segment(MiB(100), 0, nullptr) == nullptr);
    q = torch_malloc(MiB(500), 1, nullptr);
    torch_fraction(0.5, 0);
    void *r = torch_malloc(MiB(300), 0, nullptr);
    EXPECT(failure(MiB(100)) != "");
    torch_fraction(0, 0); /* what is there stays */
    EXPECT(failure(MiB(2)) != "");
    torch_free(r, MiB(300), 0, nullptr);
    torch_reset();
    torch_fraction(1, 0);
    r = torch_malloc(MiB(800), 0, nullptr);
    torch_free(r, MiB(800), 0, nullptr);
    torch_free(p, MiB(200), 0, nullptr);
    torch_free(q, MiB(500), 1, nullptr);
    for (int device : {-1, 2, 64}) {
        int caught = 0;
        try {
            torch_fraction(0.5, device);
        } catch (const c10::Error &) {
            caught = 1;
        }
        EXPECT(caught);
    }
    finish();
}

TEST(a_limit_of_the_settings_counts_beside_the_memory_fraction)
{
    begin(1, SIM_PACE_STILL, "memory_limit:64M,per_process_memory_fraction:0.03125,log:off");
    EXPECT(failure(MiB(40)) != "");
    torch_fraction(1, 0); /* replaces the fraction */
    torch_free(torch_malloc(MiB(40), 0, nullptr), MiB(40), 0, nullptr);
    EXPECT(failure(MiB(70)) != "");
    torch_fraction(0.03125, 0);
    torch_free(torch_malloc(MiB(40), 0, nullptr), MiB(40), 0, nullptr); /* of what is held already */
    torch_reset();
    EXPECT(failure(MiB(40)) != "");
    torch_fraction(0.5, 0);
    EXPECT(failure(MiB(70)) != "");
    finish();
}

TEST(empty_cache_returns_unused_memory)
{
    begin(1, SIM_PACE_STILL, nullptr);
    void *p = torch_malloc(MiB(100), 0, nullptr), *q = torch_malloc(MiB(10), 0, nullptr);
    torch_free(p, MiB(100), 0, nullptr);
    EXPECT(held(0) >= MiB(110));
    torch_reset();
    EXPECT(held(0) < MiB(20));
    torch_free(q, MiB(10), 0, nullptr);
    finish();
}

TEST(base_and_size_of_a_tensor)
{
    begin(1, SIM_PACE_STILL, nullptr);
    char *p = static_cast<char *>(torch_malloc(5000, 0, nullptr));
    size_t size = 0;
    int caught = 0;
    EXPECT(torch_base(p + 4000, &size) == p);
    EXPECT_EQ(size, 5120);
    try {
        (void)torch_base(&size, &size);
    } catch (const c10::Error &) {
        caught = 1;
    }
    EXPECT(caught);
    torch_free(p, 5000, 0, nullptr);
    finish();
}

TEST(counters_are_json)
{
    begin(1, SIM_PACE_STILL, nullptr);
    char text[4096];
    EXPECT_EQ(stats_text(0, text, sizeof text), 0); /* nothing allocated */
    EXPECT_EQ(stats_text(-1, text, sizeof text), 0);
    EXPECT_EQ(stats_text(64, text, sizeof text), 0);
    void *p = torch_malloc(1000, 0, nullptr);
    size_t bytes = stats_text(0, text, sizeof text);
    EXPECT_EQ(bytes, strlen(text));
    EXPECT(strstr(text, "\"requested_bytes.all.current\": 1000,"));
    EXPECT(strstr(text, "\"allocated_bytes.all.current\": 1024,"));
    EXPECT(text[0] == '{' && text[strlen(text) - 1] == '}');
    EXPECT_EQ(stats_text(0, text, 100), 0);
    torch_free(p, 1000, 0, nullptr);
    finish();
}

/* A counter of galloc_torch.memory_stats() */
static long counter(const char *name)
{
    char text[4096];
    std::string key = std::string("\"") + name + "\": ";
    if (!EXPECT(stats_text(0, text, sizeof text))) return -1;
    const char *at = strstr(text, key.c_str());
    return EXPECT(at) ? atol(at + key.size()) : -1;
}

TEST(a_reset_of_the_peaks_leaves_the_counts)
{
    begin(1, SIM_PACE_STILL, "log:off,memory_limit:64M");
    auto reset = reinterpret_cast<void (*)(int)>(dlsym(library, "galloc_hook_stats_reset"));
    for (int device : {-1, 0, 64}) reset(device); /* nothing allocated */
    torch_free(torch_malloc(MiB(40), 0, nullptr), MiB(40), 0, nullptr);
    for (int i = 1; i <= 3; i++) {
        EXPECT(torch_segment(MiB(100), 0, nullptr) == nullptr);
        reset(0);
        EXPECT_EQ(counter("num_ooms"), i);
        EXPECT_EQ(counter("requested_bytes.all.peak"), 0);
    }
    finish();
}

TEST(a_reset_of_the_peaks_leaves_the_sums_of_what_was_held)
{
    begin(1, SIM_PACE_STILL, nullptr);
    auto reset = reinterpret_cast<void (*)(int)>(dlsym(library, "galloc_hook_stats_reset"));
    Held now;
    for (int i = 1; i <= 3; i++) {
        torch_free(torch_malloc(MiB(100), 0, nullptr), MiB(100), 0, nullptr);
        torch_reset();
        for (int k = 0; k < 2; k++) {
            EXPECT(held_of(0, &now));
            EXPECT_EQ(now.bytes.current, 0);
            EXPECT_EQ(now.bytes.allocated, i * MiB(100));
            EXPECT_EQ(now.bytes.freed, i * MiB(100));
            EXPECT_EQ(now.pages.allocated, i * 50);
            EXPECT_EQ(now.pages.freed, i * 50);
            reset(0);
        }
    }
    finish();
}

/* Two streams whose memory is short: waits are queued, pages move. */
TEST(a_reset_of_the_peaks_leaves_the_counts_of_moves_and_waits)
{
    begin(1, SIM_PACE_STILL, "log:off,memory_limit:64M");
    auto reset = reinterpret_cast<void (*)(int)>(dlsym(library, "galloc_hook_stats_reset"));
    cudaStream_t a = stream_new(), b = stream_new();
    void *blocks[8];
    for (void *&block : blocks) block = torch_malloc(MiB(8), 0, a), put(a, block, MiB(8), 1);
    torch_free(blocks[1], MiB(8), 0, a);
    blocks[1] = torch_malloc(MiB(8), 0, b);
    for (int i = 0; i < 8; i += 2) torch_free(blocks[i], MiB(8), 0, a);
    void *large = torch_malloc(MiB(32), 0, b);
    for (int i = 0; i < 2; i++) {
        EXPECT_EQ(counter("galloc.moves"), 16);
        EXPECT_EQ(counter("galloc.moved_bytes"), MiB(32));
        EXPECT_EQ(counter("galloc.waits"), 1);
        reset(0);
    }
    torch_free(large, MiB(32), 0, b);
    for (int i = 1; i < 8; i += 2) torch_free(blocks[i], MiB(8), 0, i == 1 ? b : a);
    finish();
}

/* Captures work with a temporary of 64 MiB and a result. */
static cudaGraphExec_t capture(cudaStream_t stream, void **result)
{
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    void *temporary = torch_malloc(MiB(64), 0, stream);
    put(stream, temporary, MiB(64), 7);
    *result = torch_malloc(MiB(2), 0, stream);
    put(stream, *result, MiB(2), 8);
    torch_free(temporary, MiB(64), 0, stream);
    OK(cudaStreamEndCapture(stream, &graph));
    OK(cudaGraphInstantiateWithFlags(&exec, graph, 0));
    OK(cudaGraphDestroy(graph));
    return exec;
}

/* Begins a capture into a pool; `release` selects the hooks of 2.3, 2.1 or 2.0. Returns the capture's id. */
static unsigned long long begin_capture(int release, cudaStream_t stream, MempoolId id)
{
    unsigned long long capture_id = 0;
    cudaStreamCaptureStatus status;
    if (release > 23) current_stream = stream; /* 24: PyTorch's current stream is found */
    if (release >= 23) torch_begin(0, id, [](cudaStream_t) { return true; });
    if (release == 21) torch_begin_2_1(0, stream, id);
    OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    OK(cudaStreamGetCaptureInfo(stream, &status, &capture_id));
    if (release == 20) torch_begin_2_0(0, capture_id, id);
    return capture_id;
}

/* Captures twice into one pool or two, replays, and destroys. */
static size_t captured_twice(cudaStream_t stream, MempoolId first, MempoolId second, int release)
{
    cudaGraphExec_t execs[2];
    void *results[2];
    size_t most;
    for (int i = 0; i < 2; i++) {
        MempoolId id = i ? second : first;
        unsigned long long capture_id = begin_capture(release, stream, id);
        execs[i] = capture(stream, &results[i]);
        if (release >= 23) torch_end(0, id);
        current_stream = nullptr;
        if (release == 21) torch_end_2_1(0, stream);
        if (release == 20) torch_end_2_0(0, capture_id);
    }
    most = held(0);
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 2; i++) {
            OK(cudaGraphLaunch(execs[i], stream));
            look(stream, results[i], MiB(2), 8);
        }
    }
    OK(cudaStreamSynchronize(stream));
    for (int i = 0; i < 2; i++) {
        torch_release(0, i ? second : first);
        OK(cudaGraphExecDestroy(execs[i]));
        torch_free(results[i], MiB(2), 0, stream);
    }
    OK(cudaStreamSynchronize(stream));
    return most;
}

TEST(graphs_of_one_pool_share_memory)
{
    static const int releases[] = {24, 23, 21, 20};
    for (int release : releases) {
        begin(1, SIM_PACE_STILL, nullptr);
        size_t shared = captured_twice(stream_new(), {0, 1}, {0, 1}, release);
        finish();
        begin(1, SIM_PACE_STILL, nullptr);
        size_t apart = captured_twice(stream_new(), {0, 1}, {0, 2}, release);
        finish();
        EXPECT(shared < MiB(80));
        EXPECT(apart >= MiB(128));
    }
}

/* A capture fails, and PyTorch 2.3 and later then name no end of its pool. The program captures again. */
static void captures_after_a_failed_one(int release, MempoolId failed, bool allocates)
{
    begin(1, SIM_PACE_STILL, nullptr);
    cudaStream_t stream = stream_new(), forked = stream_new();
    cudaGraph_t graph = nullptr;
    (void)begin_capture(release, stream, failed);
    void *lost = allocates ? torch_malloc(MiB(4), 0, stream) : nullptr;
    follow(stream, forked);
    if (lost) put(forked, lost, MiB(4), 9); /* and this work is not joined */
    else OK(sim_launch(forked, nullptr, 0));
    EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureUnjoined);
    (void)cudaGetLastError();
    current_stream = nullptr;
    if (lost) torch_free(lost, MiB(4), 0, stream);
    EXPECT(captured_twice(stream, {0, 1}, {0, 2}, release) >= MiB(128));
    torch_reset();
    EXPECT(captured_twice(stream, {0, 3}, {0, 3}, release) < MiB(80));
    torch_release(0, failed);
    finish();
}

TEST(later_graphs_share_nothing_through_a_capture_that_failed)
{
    for (int release = 23; release <= 24; release++) {
        captures_after_a_failed_one(release, {0, 1}, true);
        captures_after_a_failed_one(release, {0, 9}, true);
        captures_after_a_failed_one(release, {0, 1}, false);
    }
    captures_after_a_failed_one(24, {0, 9}, false);
}

/* Which of two pools a capture belongs to cannot be told, so it belongs to neither: a later graph of one of them shares
   nothing with it, and may run at the same time. */
static void two_pools_at_once(MempoolId later)
{
    begin(1, SIM_PACE_STILL, nullptr);
    cudaStream_t streams[3] = {stream_new(), stream_new(), stream_new()};
    void *results[3];
    cudaGraphExec_t execs[3];
    torch_begin(0, {0, 1}, Filter());
    torch_begin(0, {0, 2}, Filter());
    OK(cudaStreamBeginCapture(streams[0], cudaStreamCaptureModeRelaxed));
    OK(cudaStreamBeginCapture(streams[1], cudaStreamCaptureModeRelaxed));
    for (int i = 0; i < 2; i++) execs[i] = capture(streams[i], &results[i]);
    torch_end(0, {0, 2});
    torch_end(0, {0, 1});
    torch_end(0, {0, 1}); /* one too many does nothing */
    torch_begin(0, later, Filter());
    OK(cudaStreamBeginCapture(streams[2], cudaStreamCaptureModeRelaxed));
    execs[2] = capture(streams[2], &results[2]);
    torch_end(0, later);
    for (int i = 0; i < 3; i++) OK(cudaGraphLaunch(execs[i], streams[i]));
    sim_run(-1);
    for (int i = 0; i < 3; i++) {
        OK(cudaGraphExecDestroy(execs[i]));
        torch_free(results[i], MiB(2), 0, streams[i]);
    }
    torch_release(0, {0, 1});
    torch_release(0, {0, 2});
    torch_release(0, later);
    torch_release(0, later);
    finish();
}

TEST(captures_of_two_pools_at_once_share_nothing)
{
    two_pools_at_once({0, 1});
    two_pools_at_once({0, 2});
}

TEST(a_pool_without_a_capture_is_the_heap)
{
    begin(1, SIM_PACE_STILL, nullptr);
    cudaStream_t stream = stream_new();
    torch_begin(0, {1, 0}, Filter());
    void *p = torch_malloc(MiB(4), 0, stream), *q = torch_malloc(MiB(4), 0, nullptr);
    EXPECT(p && q);
    torch_free(p, MiB(4), 0, stream);
    torch_free(q, MiB(4), 0, nullptr);
    torch_end(0, {1, 0});
    torch_release(0, {1, 0});
    finish();
}

/* Each call of the driver fails in turn: the host program gets an exception or its memory, and can go on. */
TEST(every_failing_driver_call_is_an_exception_or_nothing)
{
    long n, failed = 1, exceptions = 0;
    for (n = 1; failed && n < 400; n++) {
        begin(1, SIM_PACE_STILL, nullptr);
        cudaStream_t stream = stream_new();
        sim_fail(nullptr, n, 0, cudaErrorMemoryAllocation);
        for (int i = 0; i < 3; i++) {
            void *p = nullptr;
            try {
                p = torch_malloc(MiB(size_t(1 + 30 * i)), 0, i == 1 ? nullptr : stream);
                EXPECT(p);
            } catch (const c10::Error &) {
                exceptions++;
            }
            if (p) torch_free(p, MiB(size_t(1 + 30 * i)), 0, i == 1 ? nullptr : stream);
        }
        failed = sim_failed();
        sim_fail_clear();
        void *p = torch_malloc(MiB(8), 0, stream);
        EXPECT(p);
        torch_free(p, MiB(8), 0, stream);
        finish();
    }
    EXPECT(n > 10 && n < 400);
    EXPECT(exceptions > 0);
}

/* The same while a further device gets its pool: both devices have their memory afterwards. */
TEST(a_device_is_added_while_driver_calls_fail)
{
    long n, failed = 1;
    for (n = 1; failed && n < 400; n++) {
        begin(2, SIM_PACE_STILL, nullptr);
        void *p = torch_malloc(MiB(8), 0, nullptr), *q = nullptr;
        OK(cudaSetDevice(1));
        cudaStream_t stream = stream_new();
        OK(cudaSetDevice(0));
        sim_fail(nullptr, n, 0, cudaErrorUnknown);
        try {
            q = torch_malloc(MiB(8), 1, stream);
        } catch (const c10::Error &) {
            EXPECT(!q);
        }
        failed = sim_failed();
        sim_fail_clear();
        if (!q) q = torch_malloc(MiB(8), 1, stream);
        write_from(0, p, MiB(8));
        write_from(1, q, MiB(8));
        torch_free(p, MiB(8), 0, nullptr);
        torch_free(q, MiB(8), 1, stream);
        finish();
    }
    EXPECT(n > 10 && n < 400);
}

/* A free on a default stream comes after that stream's work, or it is made later. */
TEST(a_free_is_made_later_if_its_device_cannot_be_made_current)
{
    for (const char *call : {"cudaGetDevice", "cudaSetDevice"}) {
        begin(2, SIM_PACE_STILL, nullptr);
        OK(cudaSetDevice(1));
        cudaStream_t stream = stream_new();
        void *p = torch_malloc(MiB(4), 1, nullptr), *q;
        put(nullptr, p, MiB(4), 1);
        OK(cudaSetDevice(0));
        sim_fail(call, 1, 0, cudaErrorUnknown);
        torch_free(p, MiB(4), 1, nullptr);
        EXPECT_EQ(sim_failed(), 1);
        q = torch_malloc(MiB(4), 1, stream);
        EXPECT(q != p);
        torch_free(q, MiB(4), 1, stream);
        finish();
    }
}

TEST(a_free_is_made_when_memory_runs_out)
{
    for (int i = 0; i < 2; i++) {
        begin(2, SIM_PACE_STILL, "memory_limit:64M,log:off");
        void *p = torch_malloc(MiB(40), 1, nullptr), *q;
        sim_fail("cudaGetDevice", 1, 0, cudaErrorUnknown);
        torch_free(p, MiB(40), 1, nullptr);
        EXPECT_EQ(sim_failed(), 1);
        q = (i ? torch_segment : torch_malloc)(MiB(40), 1, nullptr);
        EXPECT(q == p);
        if (q) torch_free(q, MiB(40), 1, nullptr);
        finish();
    }
}

/* The text of the exception of a call; "": there is none. */
template <class Call> static std::string thrown(Call call)
{
    try {
        call();
    } catch (const c10::Error &error) {
        return error.what();
    }
    return "";
}

/* Not those of an earlier call, nor those of a free that is made again when memory runs out. */
TEST(an_exception_has_the_words_of_its_own_error)
{
    const char *not_current = "The device cannot be made current.", *end = "CUDA error: unknown error. ";
    begin(2, SIM_PACE_STILL, "memory_limit:64M,log:off");
    void *p = torch_malloc(MiB(4), 1, nullptr), *q = torch_malloc(MiB(4), 0, nullptr);
    sim_fail("cudaSetDevice", 1, 1, cudaErrorUnknown);
    EXPECT(has(thrown([&] { torch_malloc(MiB(4), 1, nullptr); }), not_current));
    EXPECT(has(thrown([&] { torch_record(p, nullptr); }), not_current));
    EXPECT(has(thrown([&] { torch_fraction(0.5, 1); }), not_current));
    torch_free(p, MiB(4), 1, nullptr);
    std::string text = thrown([&] { torch_malloc(MiB(128), 0, nullptr); });
    EXPECT(has(text, "CUDA out of memory") && has(text, "galloc_pool_malloc: ") && !has(text, not_current));
    text = thrown([&] { torch_malloc(MiB(4), 5, nullptr); });
    EXPECT(has(text, "galloc_pool_default: ") && !has(text, not_current));
    text = thrown([&] { torch_malloc(MiB(4), 99, nullptr); });
    EXPECT(text.size() > 2 && text.substr(text.size() - 2) == ". ");
    sim_fail_clear();
    sim_fail("cudaMemGetInfo", 1, 1, cudaErrorUnknown);
    EXPECT(has(thrown([&] { torch_fraction(0.5, 0); }), (end + std::string("The device does not say")).c_str()));
    sim_fail_clear();
    cudaStream_t stream = stream_new();
    sim_fail("cuStreamGetId", 1, 1, cudaErrorUnknown);
    torch_free(q, MiB(4), 0, stream);
    text = thrown([&] { torch_malloc(MiB(128), 0, nullptr); });
    EXPECT(has(text, "galloc_pool_malloc: ") && !has(text, "galloc_free: "));
    EXPECT(sim_failed() > 0);
    sim_fail_clear();
    torch_reset();
    finish();
}

/* A program that captures anew now and then, with a pool of its own each time. */
TEST(a_pool_of_graphs_that_are_gone_leaves_no_host_memory)
{
    begin(1, SIM_PACE_STILL, nullptr);
    cudaStream_t stream = stream_new();
    size_t before = 0;
    for (unsigned long long i = 0; i < 2000; i++) {
        cudaGraph_t graph = nullptr;
        torch_begin(0, {1, i}, Filter());
        OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
        torch_free(torch_malloc(MiB(4), 0, stream), MiB(4), 0, stream);
        OK(cudaStreamEndCapture(stream, &graph));
        torch_end(0, {1, i});
        torch_release(0, {1, i});
        OK(cudaGraphDestroy(graph));
        if (i == 999) before = mallinfo2().uordblks;
    }
    long grown = long(mallinfo2().uordblks - before);
    if (!EXPECT(grown < 1000 * 16)) printf("    %ld bytes\n", grown);
    finish();
}

static std::atomic<int> pausing; /* 1: a thread is between two calls of CUDA; 2: it may go on */

static void pause_for_peers(const char *function)
{
    if (strcmp(function, "cudaDeviceCanAccessPeer") || pausing) return;
    pausing = 1;
    while (pausing == 1) std::this_thread::yield();
}

/* Tensors of the parent end in a child of fork, while another thread of the parent makes a device's pool. */
TEST(a_child_of_fork_frees_without_a_wait)
{
    begin(2, SIM_PACE_STILL, nullptr);
    void *p = torch_malloc(MiB(4), 0, nullptr);
    int status = -1;
    pausing = 0;
    sim_hook(pause_for_peers, nullptr);
    std::thread other([] { torch_free(torch_malloc(MiB(4), 1, nullptr), MiB(4), 1, nullptr); });
    while (!pausing) std::this_thread::yield();
    pid_t child = fork();
    if (!child) {
        char text[4096];
        int out[2];
        (void)alarm(10);
        if (pipe(out)) _exit(2);
        (void)dup2(out[1], 2);
        for (const char *call : {"cuCtxGetCurrent", "cudaGetDevice"})
            sim_fail(call, 1, 1, cudaErrorInitializationError);
        for (int i = 0; i < 3; i++) torch_free(p, MiB(4), 0, nullptr);
        (void)!write(out[1], ".", 1);
        if (std::count(text, text + read(out[0], text, sizeof text), '\n') > 1) _exit(3); /* galloc's own line */
        _exit(stats_text(0, text, sizeof text) != 0);
    }
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    pausing = 2;
    other.join();
    sim_hook(nullptr, nullptr);
    torch_free(p, MiB(4), 0, nullptr);
    finish();
}

/* The runtime goes before the tensors when the process ends. */
TEST(a_free_at_the_end_of_the_process_is_left_to_galloc)
{
    begin(1, SIM_PACE_STILL, nullptr);
    void *p = torch_malloc(MiB(4), 0, nullptr);
    sim_fail("cuCtxGetCurrent", 1, 0, cudaErrorCudartUnloading);
    sim_fail("cudaGetDevice", 1, 0, cudaErrorCudartUnloading);
    torch_free(p, MiB(4), 0, nullptr);
    EXPECT(sim_failed() > 0);
    EXPECT(torch_malloc(MiB(4), 0, nullptr) == p);
    torch_free(p, MiB(4), 0, nullptr);
    sim_fail_clear();
    finish();
}

template <class Call> static void attempt(Call call)
{
    try {
        call();
    } catch (const c10::Error &) {
    }
}

/* One use of each hook, most of them for another device than the current one. */
static void use_hooks(cudaStream_t captured)
{
    void *p = nullptr;
    attempt([&] { torch_fraction(1, 1); });
    attempt([&] { p = torch_malloc(MiB(4), 1, nullptr); });
    attempt([&] { torch_record(p, nullptr); });
    torch_free(p, MiB(4), 1, nullptr);
    attempt([&] { torch_malloc(MiB(4096), 1, nullptr); });
    torch_begin(0, {1, 0}, Filter());
    attempt([&] { torch_free(torch_malloc(MiB(4), 0, captured), MiB(4), 0, captured); });
    torch_end(0, {1, 0});
    torch_release(0, {1, 0});
    torch_reset();
}

/* A thread captures a stream, and another one calls the hooks. */
static void use_hooks_beside_a_capture(cudaStreamCaptureMode mode, long nth, cudaError_t last, long *failed)
{
    begin(2, SIM_PACE_STILL, nullptr);
    cudaStream_t captured = stream_new();
    cudaGraph_t graph = nullptr;
    OK(cudaStreamBeginCapture(captured, mode));
    std::thread([&] {
        if (last) (void)cudaSetDevice(7);
        if (nth) sim_fail(nullptr, nth, 0, cudaErrorUnknown);
        use_hooks(captured);
        *failed = sim_failed();
        sim_fail_clear();
        if (!EXPECT_EQ(cudaPeekAtLastError() != cudaSuccess, last != cudaSuccess)) printf("    call %ld\n", nth);
    }).join();
    OK(cudaStreamEndCapture(captured, &graph));
    OK(cudaGraphDestroy(graph));
    finish();
}

/* Each call fails in turn. The runtime's last error stays, or is another one. */
TEST(every_failing_call_leaves_the_last_error_of_the_runtime)
{
    for (cudaError_t last : {cudaSuccess, cudaErrorInvalidDevice}) {
        long n, failed = 1;
        for (n = 1; failed && n < 400; n++)
            use_hooks_beside_a_capture(cudaStreamCaptureModeGlobal, n, last, &failed);
        EXPECT(n > 30 && n < 400);
    }
}

TEST(a_capture_of_another_thread_goes_on)
{
    long failed;
    for (cudaStreamCaptureMode mode :
         {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeRelaxed})
        use_hooks_beside_a_capture(mode, 0, cudaSuccess, &failed);
}

int main(int argc, char **argv)
{
    if (argc < 2) return 2;
    library_path = argv[1];
    argv[1] = argv[0];
    return test_main(argc - 1, argv + 1);
}
