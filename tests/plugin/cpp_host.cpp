/* cpp_host.cpp [TEXT] - examples/cpp/galloc.hpp on the simulated device. Where CCCL's memory resources are found, they
   are tested as well. */

#define GALLOC_IMPLEMENTATION
#include "galloc.hpp"

#include "sim.h"
#include "test.h"

#include <atomic>
#include <cstdio>
#include <cstring>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#define OK(call) EXPECT_EQ((call), cudaSuccess)
static std::size_t MiB(std::size_t n) { return n << 20; }

static void no_log(int, const char *, void *) {}

static void begin(int devices = 1)
{
    sim_options options = sim_defaults();
    options.pace = SIM_PACE_STILL;
    options.devices = devices;
    options.memory = MiB(1024);
    setenv("GALLOC_CONF", "log:debug", 1); /* each line, also one that comes again */
    galloc_set_log(no_log, nullptr);
    galloc::detail::private_entries().clear(); /* each run of the simulated device gives out the same ids of contexts */
    EXPECT_EQ(sim_start(&options), 0);
}

static void finish()
{
    sim_run(-1);
    OK(galloc_shutdown());
    for (long i = 0; sim_finding(i); i++) printf("    found: %s\n", sim_finding(i));
    EXPECT_EQ(sim_findings(SIM_ANY), 0);
    OK(cudaPeekAtLastError());
    sim_stop();
}

static galloc_state state_of(const void *p)
{
    galloc_pointer info;
    OK(galloc_pointer_info(p, &info));
    return info.state;
}

static void put(cudaStream_t stream, void *p, std::size_t bytes, uint64_t tag)
{
    sim_access access = {p, bytes, SIM_WRITE, tag};
    OK(sim_launch(stream, &access, 1));
}

TEST(an_owner_frees_on_its_stream)
{
    begin();
    {
        galloc::stream stream, other;
        void *p;
        {
            galloc::unique_ptr<float> a = galloc::make_unique<float>(MiB(1), stream);
            galloc::unique_ptr<float> b = std::move(a);
            galloc::unique_ptr<const float> seen = galloc::make_unique<const float>(100, stream);
            EXPECT(!a && b);
            p = b.get();
            put(stream, p, MiB(4), 1);
        }
        EXPECT_EQ(state_of(p), GALLOC_STATE_FREE);
        galloc::unique_ptr<float> c = galloc::make_unique<float>(MiB(1), other);
        EXPECT(c.get() != p); /* the work of `stream` is not over */
        put(other, c.get(), MiB(4), 2);
        galloc::unique_ptr<float> d = galloc::make_unique<float>(MiB(1), stream);
        EXPECT(d.get() == p);
        EXPECT(galloc::make_unique<char>(0, stream).get() == nullptr);
    }
    finish();
}

/* On stream 0 an owner keeps its device, whichever is current when it grows or ends. */
TEST(an_owner_frees_on_the_default_stream_of_its_device)
{
    for (int kind = 0; kind < 4; kind++) {
        const cudaStream_t zero = kind % 2 ? cudaStreamPerThread : nullptr;
        begin(2);
        OK(cudaSetDevice(1));
        {
            galloc::stream other;
            galloc_pool *pool = nullptr;
            void *p;
            galloc::unique_ptr<char> a, assigned = galloc::make_unique<char>(MiB(4), other);
            OK(galloc_pool_default(&pool, 1));
            if (kind < 2) {
                a = galloc::make_unique<char>(MiB(4), zero);
                put(zero, p = a.get(), MiB(4), 1);
                OK(cudaSetDevice(0));
                a.reset();
            } else {
                galloc::growable<char> array(MiB(1), other);
                array = galloc::growable<char>(MiB(8), zero); /* the stream and the device come along */
                array.resize(MiB(4));
                put(zero, p = array.data(), MiB(4), 1);
                OK(cudaSetDevice(0));
                array.resize(MiB(1));
            }
            int device = -1;
            OK(cudaGetDevice(&device));
            EXPECT_EQ(device, 0);
            OK(cudaDeviceSynchronize());
            OK(galloc_pool_trim(pool, SIZE_MAX, nullptr)); /* looks how far the streams are */
            OK(cudaSetDevice(1));
            galloc::unique_ptr<char> b = galloc::make_unique<char>(MiB(4), other);
            put(other, b.get(), MiB(4), 2);
            assigned.get_deleter() = zero;
            EXPECT(assigned.get_deleter().context.context != nullptr);
        }
        finish();
    }
}

static CUcontext current()
{
    CUcontext context = nullptr;
    EXPECT_EQ(cuCtxGetCurrent(&context), CUDA_SUCCESS);
    return context;
}

static bool has_no_context()
{
    CUcontext context = nullptr;
    return cuCtxGetCurrent(&context) != CUDA_SUCCESS || !context; /* an error: before the first call of CUDA */
}

/* A context of the program's own stays current. A default stream is that of the context where the owner was made. */
TEST(owners_and_contexts_of_the_programs_own)
{
    for (int kind = 0; kind < 3; kind++) {
        for (int device = 0; device < 2; device++) {
            begin(2);
            CUcontext own = nullptr;
            OK(cudaSetDevice(device));
            {
                galloc::CachingDeviceAllocator cub;
                galloc::unique_ptr<char> a;
                std::unique_ptr<galloc::growable<char>> array;
                void *p = nullptr, *q = nullptr;
                if (kind == 0) a = galloc::make_unique<char>(MiB(4), nullptr), p = a.get();
                if (kind == 1) array.reset(new galloc::growable<char>(MiB(8), nullptr)), array->resize(MiB(4));
                if (kind == 1) p = array->data();
                if (kind == 2) OK(cub.DeviceAllocate(device, &p, MiB(4)));
                put(nullptr, p, MiB(4), 1);
                EXPECT_EQ(cuCtxCreate(&own, nullptr, 0, 0), CUDA_SUCCESS);
                a.reset();
                if (array) array->resize(MiB(3));
                EXPECT(current() == own);
                array.reset();
                if (kind == 2) OK(cub.DeviceFree(p));
                EXPECT(current() == own);
                if (kind == 2) OK(cub.DeviceAllocate(1, &q, 512));
                EXPECT(current() == own);
                if (kind == 2) OK(cub.DeviceFree(q));
                EXPECT(current() == own);
                if (!device) {
                    a = galloc::make_unique<char>(MiB(4), nullptr); /* on the own context's stream 0 */
                    put(nullptr, a.get(), MiB(4), 2);
                    a.reset();
                }
                OK(galloc_shutdown()); /* it waits */
                EXPECT_EQ(cuCtxDestroy(own), CUDA_SUCCESS);
                OK(cudaSetDevice(0));
            }
            finish();
        }
    }
}

static std::size_t live(int device)
{
    galloc_pool *pool = nullptr;
    galloc_stats stats = galloc_stats();
    OK(galloc_pool_default(&pool, device));
    OK(galloc_pool_stats(pool, &stats));
    return stats.live.current;
}

/* Makes an owner on stream 0 of device 1, where the nth call of `call` fails. Uses its memory, and ends the owner while
   device 0 is current. *block: the memory, if it was allocated. Returns whether a call failed. */
static bool fail_while_an_owner_is_made(int kind, const char *call, int n, void **block)
{
    galloc::CachingDeviceAllocator cub(true);
    galloc::unique_ptr<char> a;
    std::unique_ptr<galloc::growable<char>> array;
    void *&p = *block;
    OK(cudaSetDevice(1));
    if (kind == 3) a = galloc::unique_ptr<char>(galloc::make_unique<char>(MiB(4), nullptr).release(), {});
    sim_fail(call, n, 0, cudaErrorUnknown);
    try {
        if (kind == 0) a = galloc::make_unique<char>(MiB(4), nullptr), p = a.get();
        if (kind == 1) array.reset(new galloc::growable<char>(MiB(4), nullptr)), p = array->data();
        if (kind == 2) (void)cub.DeviceAllocate(1, &p, MiB(4));
        if (kind == 3) a.get_deleter() = nullptr, p = a.get();
    } catch (const galloc::error &) {
    }
    const bool failed = sim_failed() > 0;
    sim_fail_clear();
    OK(cudaPeekAtLastError());
    if (array) array->resize(MiB(4));
    if (p) put(nullptr, p, MiB(4), 1);
    if (p) OK(cudaSetDevice(0));
    a.reset();
    array.reset();
    if (kind == 2 && p) OK(cub.DeviceFree(p));
    return failed;
}

/* An owner is not made while the context of its stream 0 is not known: it would free on that of another one. */
TEST(an_owner_on_stream_0_has_its_context_or_is_not_made)
{
    for (int kind = 0; kind < 4; kind++) {
        for (const char *call : {"cuCtxGetCurrent", "cuCtxGetId", "cudaGetDevice"}) {
            bool failed = true;
            for (int n = 1; failed && n < 20; n++) {
                begin(2);
                OK(cudaSetDevice(1));
                {
                    void *p = nullptr;
                    OK(galloc_free(galloc::make_unique<char>(1000, nullptr).release(), nullptr));
                    failed = fail_while_an_owner_is_made(kind, call, n, &p);
                    if (!EXPECT_EQ(live(1), 0)) printf("    kind %d, %s, call %d\n", kind, call, n);
                    OK(cudaSetDevice(1));
                    galloc::unique_ptr<char> b = galloc::make_unique<char>(MiB(4), nullptr);
                    if (!EXPECT(!p || b.get() == p)) printf("    kind %d, %s, call %d\n", kind, call, n);
                    put(nullptr, b.get(), MiB(4), 2);
                }
                finish();
            }
            EXPECT(!failed);
        }
    }
}

/* Stream 0 of a thread without a context is that of its device. */
TEST(an_owner_of_a_thread_without_a_context)
{
    for (int kind = 0; kind < 2; kind++) {
        begin(2);
        OK(cudaSetDevice(1));
        {
            galloc::stream other;
            void *p = nullptr;
            std::thread([&] {
                galloc::unique_ptr<char> a;
                std::unique_ptr<galloc::growable<char>> array;
                EXPECT(has_no_context());
                if (kind == 0) a = galloc::make_unique<char>(MiB(4), nullptr), p = a.get();
                if (kind == 1) array.reset(new galloc::growable<char>(MiB(8), nullptr)), array->resize(MiB(4));
                if (kind == 1) p = array->data();
                put(nullptr, p, MiB(4), 1);
                OK(cudaSetDevice(1));
            }).join();
            EXPECT_EQ(state_of(p), GALLOC_STATE_FREE);
            OK(cudaDeviceSynchronize());
            OK(cudaSetDevice(0));
            galloc::stream stream;
            galloc::unique_ptr<char> b = galloc::make_unique<char>(MiB(4), stream);
            put(stream, b.get(), MiB(4), 2);
        }
        finish();
    }
}

/* From the second such call on, `fails` calls fail: those by which a call of galloc.hpp goes back. */
static void fail_the_way_back(const char *call, int fails)
{
    sim_fail(call, 2, fails > 1, cudaErrorUnknown);
}

static int ends_the_fault()
{
    int device = -1;
    EXPECT(sim_failed() > 0);
    sim_fail_clear();
    OK(cudaPeekAtLastError());
    OK(cudaGetDevice(&device));
    return device;
}

/* What a call writes to stderr. */
template <class Call> std::string said_by(Call call)
{
    char text[1000];
    FILE *file = tmpfile();
    const int before = dup(STDERR_FILENO);
    EXPECT(file && dup2(fileno(file), STDERR_FILENO) >= 0);
    call();
    (void)dup2(before, STDERR_FILENO);
    (void)close(before);
    rewind(file);
    const std::size_t n = fread(text, 1, sizeof text, file);
    (void)fclose(file);
    return std::string(text, n);
}

/* One failure changes nothing, and the error of two comes from the call, whose work is done or undone. */
TEST(a_call_that_cannot_go_back_to_the_context_reports_it)
{
    for (int fails = 1; fails <= 2; fails++) {
        const bool back = fails == 1;
        begin(2);
        {
            galloc::CachingDeviceAllocator cub;
            void *p = nullptr;
            OK(cudaSetDevice(1));
            galloc::growable<char> array(MiB(4), nullptr);
            galloc::unique_ptr<char> owner = galloc::make_unique<char>(1000, nullptr);
            const std::size_t before = live(1);
            OK(cudaSetDevice(0));
            bool caught = false;

            fail_the_way_back("cuCtxSetCurrent", fails);
            try {
                array.resize(MiB(1));
            } catch (const galloc::error &e) {
                caught = e.code() == cudaErrorUnknown;
            }
            EXPECT_EQ(caught, !back);
            EXPECT_EQ(ends_the_fault(), back ? 0 : 1);
            EXPECT_EQ(array.size(), MiB(1));
            OK(cudaSetDevice(0));

            sim_fail("cuCtxSetCurrent", 1, fails > 1, cudaErrorUnknown); /* cudaSetDevice goes there */
            EXPECT_EQ(cub.DeviceAllocate(1, &p, 1000), back ? cudaSuccess : cudaErrorUnknown);
            EXPECT_EQ(p != nullptr, back);
            EXPECT_EQ(ends_the_fault(), back ? 0 : 1);
            OK(cudaSetDevice(0));
            if (p) OK(cub.DeviceFree(p));

            OK(cub.DeviceAllocate(1, &p, 1000));
            fail_the_way_back("cuCtxSetCurrent", fails);
            EXPECT_EQ(cub.DeviceFree(p), back ? cudaSuccess : cudaErrorUnknown);
            EXPECT_EQ(ends_the_fault(), back ? 0 : 1);
            EXPECT_EQ(state_of(p), GALLOC_STATE_FREE);
            OK(cudaSetDevice(0));

            fail_the_way_back("cuCtxSetCurrent", fails);
            const std::string said = said_by([&] { owner.reset(); });
            EXPECT_EQ(ends_the_fault(), back ? 0 : 1);
            EXPECT_EQ(said.find("galloc.hpp: a context cannot be made current") != std::string::npos, !back);
            EXPECT_EQ(live(1), before - 1000 + MiB(1) - 1);
            OK(cudaSetDevice(0));
        }
        finish();
    }
}

/* The work of a green context goes on after its end: memory of its default stream is freed after a wait. */
TEST(memory_of_an_ended_green_context_is_freed_after_its_work)
{
    for (int by_cub = 0; by_cub < 2; by_cub++) {
        begin(1);
        {
            galloc::CachingDeviceAllocator cub;
            galloc::unique_ptr<char> owner;
            CUcontext primary = nullptr, green = nullptr;
            void *p = nullptr;
            OK(cudaFree(nullptr));
            OK(cuCtxGetCurrent(&primary));
            OK(sim_green_create(&green, 0));
            OK(cuCtxSetCurrent(green));
            if (by_cub) OK(cub.DeviceAllocate(&p, MiB(1), nullptr));
            else owner = galloc::make_unique<char>(MiB(1), nullptr);
            for (int i = 0; i < 200; i++) OK(cudaMemsetAsync(by_cub ? p : owner.get(), 1, MiB(1), nullptr));
            OK(cuCtxSetCurrent(primary));
            OK(sim_green_destroy(green));
            EXPECT(sim_pending() > 0);
            if (by_cub) OK(cub.DeviceFree(p));
            owner.reset();
            EXPECT(sim_pending() <= 1); /* the event of the free */
        }
        finish();
    }
}

/* Another thread ends the context of this one during a call: the call succeeds, and the thread has that which is below
   on its stack of contexts. */
TEST(the_context_of_a_thread_ends_during_a_call)
{
    begin(1);
    {
        CUcontext below = nullptr, own = nullptr, now = nullptr;
        OK(cudaFree(nullptr));
        OK(cuCtxGetCurrent(&below));
        galloc::growable<char> array(MiB(4), nullptr);
        OK(cuCtxCreate(&own, nullptr, 0, 0));
        sim_fail("cuCtxSetCurrent", 2, 0, cudaErrorContextIsDestroyed);
        array.resize(MiB(1));
        EXPECT_EQ(sim_failed(), 1);
        sim_fail_clear();
        OK(cuCtxGetCurrent(&now));
        EXPECT(now == below);
        OK(cuCtxDestroy(own));
        OK(cudaSetDevice(0));
    }
    finish();
}

/* A thread without a context goes back to its device. */
TEST(a_thread_without_a_context_keeps_its_device)
{
    for (int fails = 0; fails <= 2; fails++) {
        begin(2);
        {
            galloc::CachingDeviceAllocator cub;
            void *p = nullptr;
            int device = -1;
            std::thread([&] {
                EXPECT(has_no_context());
                if (fails) fail_the_way_back("cudaSetDevice", fails);
                EXPECT_EQ(cub.DeviceAllocate(1, &p, 1000), fails == 2 ? cudaErrorUnknown : cudaSuccess);
                sim_fail_clear();
                OK(cudaGetDevice(&device));
                EXPECT_EQ(device, fails == 2);
                if (p) OK(cub.DeviceFree(p));
            }).join();
            EXPECT_EQ(live(1), 0);
        }
        finish();
    }
}

void *make_in_a_file_of_per_thread_streams(std::size_t bytes); /* cpp_per_thread.cpp */

/* Files compiled either way share the pools, and each has its own stream 0. */
TEST(stream_0_is_that_of_the_file)
{
    begin();
    {
        unsigned long long id = 0;
        galloc_pointer info;
        void *p;
        {
            galloc::unique_ptr<char> a = galloc::make_unique<char>(MiB(4), nullptr);
            p = a.get();
        }
        OK(galloc_pointer_info(p, &info));
        EXPECT_EQ(info.stream_id, 0);
        p = make_in_a_file_of_per_thread_streams(MiB(4));
        OK(galloc_pointer_info(p, &info));
        OK(cudaStreamGetId(cudaStreamPerThread, &id));
        EXPECT_EQ(info.stream_id, id);
    }
    finish();
}

TEST(an_array_that_was_moved_from_is_empty)
{
    begin();
    {
        galloc::stream stream;
        galloc::growable<char> a(MiB(4), stream), b(MiB(8), stream);
        a.resize(100);
        galloc::growable<char> c(std::move(a));
        EXPECT(!a.data() && !a.size() && !a.max_size());
        EXPECT(c.data() && c.size() == 100 && c.max_size() == MiB(4));
        a = std::move(b);
        EXPECT(a.data() && a.max_size() == MiB(8));
        a.resize(MiB(8));
    }
    finish();
}

TEST(an_array_grows_in_place)
{
    begin();
    {
        galloc::stream stream;
        galloc::growable<double> array(MiB(8), stream);
        double *p = array.data();
        for (std::size_t n = 1; n <= MiB(8); n *= 2) {
            array.resize(n);
            put(stream, array.data(), n * sizeof(double), n);
            EXPECT(array.data() == p);
            EXPECT_EQ(array.size(), n);
        }
        int caught = 0;
        try {
            array.resize(MiB(8) + 1);
        } catch (const galloc::out_of_memory &e) {
            caught = strstr(e.what(), "maximum") != nullptr;
        }
        EXPECT(caught);
        EXPECT_EQ(array.size(), MiB(8));
        array.resize(0);
        EXPECT_EQ(array.size(), 0);
        galloc::growable<double> moved(std::move(array));
        EXPECT(moved.data() == p && !array.data());
    }
    finish();
}

TEST(arrays_that_are_assigned_change_places)
{
    begin();
    {
        galloc::stream streams[2];
        galloc::growable<char> small(MiB(1), streams[0]), large(MiB(100), streams[1]);
        small.resize(100);
        large.resize(MiB(3));
        char *p = small.data(), *q = large.data();
        small = std::move(large);
        EXPECT(small.data() == q && large.data() == p);
        EXPECT_EQ(small.size(), MiB(3));
        EXPECT_EQ(small.max_size(), MiB(100));
        EXPECT_EQ(large.size(), 100);
        EXPECT_EQ(large.max_size(), MiB(1));
        small.resize(MiB(50));
        put(streams[1], small.data(), MiB(50), 1);
        int caught = 0;
        try {
            large.resize(MiB(50));
        } catch (const galloc::out_of_memory &e) {
            caught = strstr(e.what(), "maximum") != nullptr;
        }
        EXPECT(caught);
    }
    finish();
}

/* Rooms of pages begin at pages in any case, but those in segments of cudaMalloc anywhere. */
TEST(an_array_has_the_alignment_of_its_type)
{
    struct alignas(4096) wide {
        char bytes[4096];
    };
    begin();
    for (const char *settings : {"", "expandable_segments:False", "backend:cudaMalloc", "backend:cudaMallocAsync"}) {
        galloc::pool pool(settings);
        galloc::stream stream;
        for (std::size_t max = 1; max < 4; max++) {
            galloc::growable<char> odd(512 * max, stream, pool.get());
            galloc::growable<wide> array(max, stream, pool.get());
            EXPECT_EQ(reinterpret_cast<std::uintptr_t>(array.data()) % alignof(wide), 0);
        }
        sim_run(-1);
    }
    finish();
}

TEST(running_out_throws_and_leaves_everything)
{
    begin();
    {
        galloc::pool pool("memory_limit:64M");
        galloc::stream stream;
        galloc::unique_ptr<char> a = galloc::make_unique<char>(MiB(40), stream, pool.get());
        int caught = 0;
        try {
            galloc::make_unique<char>(MiB(40), stream, pool.get());
        } catch (const std::bad_alloc &e) {
            std::string copy = e.what();
            caught = copy.find("out_of_memory") == 0 && copy.find("galloc_alloc") != std::string::npos;
        }
        EXPECT(caught);
        galloc::growable<char> g(MiB(100), stream, pool.get());
        g.resize(MiB(2));
        caught = 0;
        try {
            g.resize(MiB(60));
        } catch (const galloc::out_of_memory &) {
            caught = 1;
        }
        EXPECT(caught);
        EXPECT_EQ(g.size(), MiB(2));
        a.reset();
        g.resize(MiB(60));
        EXPECT_EQ(g.size(), MiB(60));
    }
    finish();
}

TEST(sizes_beyond_all_addresses_are_out_of_memory)
{
    begin();
    {
        galloc::stream stream;
        int caught = 0;
        for (int kind = 0; kind < 3; kind++) {
            try {
                if (kind == 0) galloc::make_unique<double>(SIZE_MAX / 4, stream);
                if (kind == 1) galloc::growable<double>(SIZE_MAX / 4, stream);
                if (kind == 2) galloc::thrust_allocator(stream).allocate(-1);
            } catch (const galloc::out_of_memory &e) {
                if (EXPECT(strstr(e.what(), kind == 1 ? "exceed the address space" : "out of memory: asked for")))
                    caught++;
            }
        }
        EXPECT_EQ(caught, 3);
    }
    finish();
}

TEST(settings_that_are_wrong_throw_with_the_remedy)
{
    begin();
    int caught = 0;
    try {
        galloc::pool pool("memory_limit:lots");
    } catch (const galloc::error &e) {
        caught = e.code() == cudaErrorInvalidValue && std::string(e.what()).find("memory_limit") != std::string::npos;
    }
    EXPECT(caught);
    finish();
}

static std::string text_of_check(cudaError_t code)
{
    try {
        galloc::check(code);
    } catch (const std::exception &e) {
        return e.what();
    }
    return "nothing was thrown";
}

static bool begins(const std::string &text, const std::string &with) { return text.find(with) == 0; }

/* Earlier errors of galloc do not give their text to a call of CUDA, nor does CUDA's last error to galloc. */
TEST(check_has_the_text_of_the_call_that_failed)
{
    const std::string out = "out_of_memory: ";
    begin();
    {
        galloc::pool pool("memory_limit:64M");
        void *p = nullptr;
        std::string text;
        std::thread([&] { text = text_of_check(cudaSetDevice(99)); }).join(); /* a thread without an error of galloc */
        EXPECT(text == cudaGetErrorString(cudaErrorInvalidDevice));
        EXPECT(galloc_pool_stats(pool.get(), nullptr) != cudaSuccess);
        EXPECT(begins(text_of_check(cudaSetDevice(99)), cudaGetErrorString(cudaErrorInvalidDevice)));
        text = text_of_check(galloc_pool_stats(pool.get(), nullptr));
        EXPECT(text == galloc_last_message());
        text = text_of_check(cudaMalloc(&p, SIZE_MAX / 2));
        EXPECT(begins(text, out + cudaGetErrorString(cudaErrorMemoryAllocation)));
        EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
        text = text_of_check(galloc_pool_malloc(pool.get(), &p, MiB(128), nullptr));
        EXPECT(text == out + galloc_last_message());
    }
    finish();
}

/* CUDA's last error has the code of galloc's failure, and either call may have failed: the text has both. */
TEST(check_has_both_texts_where_either_call_may_have_failed)
{
    begin();
    {
        galloc::pool pool("memory_limit:64M");
        void *p = nullptr;
        EXPECT_EQ(cudaMalloc(&p, SIZE_MAX / 2), cudaErrorMemoryAllocation);
        std::string text = text_of_check(galloc_pool_malloc(pool.get(), &p, MiB(128), nullptr));
        EXPECT(begins(text, std::string("out_of_memory: ") + cudaGetErrorString(cudaErrorMemoryAllocation)));
        EXPECT(text.find(galloc_last_message()) != std::string::npos);
        EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
    }
    finish();
}

TEST(cub_s_allocator_remembers_the_stream)
{
    begin(2);
    {
        galloc::CachingDeviceAllocator cub(8, 3, 7);
        galloc::stream a, b;
        void *p, *q, *r;
        OK(cub.DeviceAllocate(&p, MiB(8), a));
        put(a, p, MiB(8), 1);
        OK(cub.DeviceFree(p));
        OK(cub.DeviceAllocate(&q, MiB(8), b));
        EXPECT(q != p);
        put(b, q, MiB(8), 2);
        OK(cub.DeviceFree(0, q));
        EXPECT(cub.DeviceFree(q) == cudaErrorInvalidDevicePointer);
        OK(cub.DeviceFree(nullptr));
        OK(cub.DeviceAllocate(1, &r, MiB(8)));
        OK(cudaSetDevice(1));
        put(nullptr, r, MiB(8), 3);
        OK(cudaSetDevice(0));
        OK(cub.DeviceFree(1, r));
        OK(cub.DeviceAllocate(galloc::CachingDeviceAllocator::INVALID_DEVICE_ORDINAL, &p, 0));
        EXPECT(p); /* as CUB's: its algorithms do nothing but ask for a size when this is NULL */
        OK(cub.DeviceFree(p));
        EXPECT(cub.DeviceAllocate(nullptr, 1) == cudaErrorInvalidValue);
        EXPECT(cub.DeviceAllocate(7, &p, 1) != cudaSuccess && !p);
        sim_run(-1);
        OK(cub.FreeAllCached());
        EXPECT_EQ(sim_physical(0), 0);
        EXPECT_EQ(sim_physical(1), 0);
    }
    finish();
}

/* Memory of a thread's own stream is freed in another thread, where the handle means another stream. */
static galloc::CachingDeviceAllocator *in_callbacks;
static void *freed_in_a_callback;

static void free_in_the_log(int, const char *, void *)
{
    void *p = freed_in_a_callback;
    freed_in_a_callback = nullptr;
    if (p) OK(in_callbacks->DeviceFree(p));
}

static void free_in_on_unmap(galloc_pool *, void *, std::size_t, void *) { free_in_the_log(0, "", nullptr); }

/* galloc calls the program with no lock held, so the program may use the allocator there. */
TEST(cub_s_allocator_can_be_used_in_callbacks)
{
    for (int kind = 0; kind < 3; kind++) {
        begin();
        (void)alarm(30);
        {
            galloc::stream stream;
            galloc::CachingDeviceAllocator a;
            galloc_pool *pool = nullptr;
            void *p = nullptr;
            in_callbacks = &a;
            OK(a.DeviceAllocate(0, &p, MiB(64), stream));
            OK(a.DeviceAllocate(0, &freed_in_a_callback, 1000, stream));
            if (kind == 0) {
                galloc_set_log(free_in_the_log, nullptr);
                sim_fail("cuStreamGetId", 1, 0, 400);
                EXPECT(a.DeviceFree(p) != cudaSuccess);
                sim_fail_clear();
                galloc_set_log(no_log, nullptr);
                OK(a.DeviceFree(p));
            } else {
                galloc_callbacks callbacks = galloc_callbacks();
                callbacks.on_unmap = free_in_on_unmap;
                OK(galloc_pool_default(&pool, 0));
                OK(a.DeviceFree(p));
                OK(galloc_pool_set_callbacks(pool, &callbacks));
                OK(kind == 1 ? a.FreeAllCached() : a.SetMaxCachedBytes(MiB(1)));
            }
            EXPECT(freed_in_a_callback == nullptr);
        }
        (void)alarm(0);
        finish();
    }
}

/* CUDA calls that run out of memory throw out_of_memory, which is no error: frees report that, or try again. */
TEST(frees_throw_nothing_when_cuda_runs_out_of_memory)
{
    for (const char *call : {"cuCtxSetCurrent", "cuCtxGetCurrent", "cuCtxGetId", "cudaGetDevice", "cudaSetDevice"}) {
        begin(2);
        {
            galloc::CachingDeviceAllocator cub;
            void *p = nullptr;
            {
                galloc::unique_ptr<char> a = galloc::make_unique<char>(MiB(1), nullptr);
                galloc::growable<char> array(MiB(4), nullptr);
                OK(cub.DeviceAllocate(0, &p, MiB(1)));
                OK(cudaSetDevice(1));
                sim_fail(call, 1, 0, cudaErrorMemoryAllocation);
                a.reset();
                sim_fail(call, 1, 0, cudaErrorMemoryAllocation);
            }
            sim_fail(call, 1, 0, cudaErrorMemoryAllocation);
            if (cub.DeviceFree(p) != cudaSuccess) {
                sim_fail_clear();
                OK(cub.DeviceFree(p));
            }
            sim_fail_clear();
            (void)cudaGetLastError();
            OK(cudaSetDevice(0));
        }
        finish();
    }
}

/* As with CUB, whose DeviceFree calls cudaFree for what is not its own. */
TEST(cub_s_allocator_frees_what_others_allocated_after_a_wait)
{
    begin();
    {
        galloc::stream stream;
        galloc::CachingDeviceAllocator a, b;
        void *p = nullptr, *q = nullptr;
        OK(cudaMalloc(&q, 100));
        OK(a.DeviceFree(q));
        EXPECT(cudaFree(q) != cudaSuccess); /* it is free */
        (void)cudaGetLastError();
        OK(a.DeviceAllocate(0, &p, MiB(4), stream));
        put(stream, p, MiB(4), 1);
        OK(b.DeviceFree(p));
        EXPECT_EQ(cudaStreamQuery(stream), cudaSuccess); /* it has waited */
        EXPECT_EQ(state_of(p), GALLOC_STATE_FREE);
        OK(a.DeviceFree(nullptr));
    }
    finish();
}

TEST(cub_s_allocator_frees_memory_of_a_threads_own_stream_in_another_thread)
{
    begin(2);
    {
        galloc::CachingDeviceAllocator cub;
        galloc::stream stream;
        void *p = nullptr, *q = nullptr, *r = nullptr, *later[3];
        std::thread([&] {
            OK(cudaSetDevice(1));
            OK(cub.DeviceAllocate(&p, MiB(4), cudaStreamPerThread));
            put(cudaStreamPerThread, p, MiB(4), 1);
            OK(cub.DeviceAllocate(&q, MiB(4), cudaStreamPerThread));
            OK(cub.DeviceFree(q));
            OK(cub.DeviceAllocate(&r, MiB(4), cudaStreamPerThread));
            EXPECT(r == q); /* at once */
            OK(cub.DeviceFree(r));
        }).join();
        OK(cub.DeviceFree(p));
        OK(cudaSetDevice(1));
        for (void *&block : later) {
            OK(cub.DeviceAllocate(&block, MiB(4), cudaStreamPerThread));
            put(cudaStreamPerThread, block, MiB(4), 2);
        }
        OK(cudaSetDevice(0));
        for (void *block : later) OK(cub.DeviceFree(block));
    }
    finish();
}

/* cpp_library.cpp, in two shared libraries with hidden symbols */
extern "C" cudaError_t allocate_in_one(galloc::CachingDeviceAllocator *cub, void **p, std::size_t bytes);
extern "C" cudaError_t free_in_one(galloc::CachingDeviceAllocator *cub, void *p);
extern "C" cudaError_t allocate_in_two(galloc::CachingDeviceAllocator *cub, void **p, std::size_t bytes);
extern "C" cudaError_t free_in_two(galloc::CachingDeviceAllocator *cub, void *p);

/* Each library numbers the threads on its own: the first one that it sees is another one in each of them. */
TEST(cub_s_allocator_frees_memory_of_another_library_s_thread)
{
    begin();
    {
        galloc::CachingDeviceAllocator cub;
        void *p = nullptr, *q = nullptr;
        OK(allocate_in_one(&cub, &p, MiB(4)));
        put(cudaStreamPerThread, p, MiB(4), 1);
        std::thread([&] {
            OK(cudaSetDevice(0));
            OK(free_in_two(&cub, p));
            OK(allocate_in_two(&cub, &q, MiB(4)));
            EXPECT(q != p); /* the work of the other thread is not over */
            put(cudaStreamPerThread, q, MiB(4), 2);
            OK(free_in_two(&cub, q));
            OK(allocate_in_two(&cub, &p, MiB(4)));
            EXPECT(p == q); /* at once */
            OK(free_in_two(&cub, p));
        }).join();
    }
    finish();
}

/* Gets memory on stream 0, which a blocking stream uses, frees it, gets it again for another one, and frees that. CUDA
   orders the two if the free is work on the legacy stream. */
template <class Get, class Free> static void use_on_blocking_streams(Get get, Free free)
{
    cudaStream_t a, b;
    OK(cudaStreamCreate(&a));
    OK(cudaStreamCreate(&b));
    void *p = get(), *q;
    put(a, p, MiB(4), 1);
    free(p);
    q = get();
    EXPECT(q == p); /* at once */
    put(b, q, MiB(4), 2);
    free(q);
    OK(cudaStreamDestroy(a));
    OK(cudaStreamDestroy(b));
}

TEST(cub_s_allocator_orders_blocking_streams_by_stream_0)
{
    begin(2);
    {
        galloc::CachingDeviceAllocator cub;
        for (cudaStream_t stream : {cudaStream_t(nullptr), cudaStreamLegacy})
            use_on_blocking_streams(
                [&] {
                    void *p = nullptr;
                    OK(cub.DeviceAllocate(&p, MiB(4), stream));
                    return p;
                },
                [&](void *p) {
                    OK(cudaSetDevice(1)); /* the legacy stream is that of the memory's device */
                    OK(cub.DeviceFree(p));
                    OK(cudaSetDevice(0));
                });
        sim_run(-1);
    }
    finish();
}

TEST(cub_s_allocator_records_no_event_on_other_streams)
{
    begin();
    {
        galloc::CachingDeviceAllocator cub;
        galloc::stream stream;
        void *p;
        OK(cub.DeviceAllocate(&p, MiB(4), stream));
        put(stream, p, MiB(4), 1);
        OK(cub.DeviceFree(p));
        EXPECT_EQ(sim_calls("cuEventRecord"), 0);
        sim_run(-1);
    }
    finish();
}

/* An event on the legacy stream would end the capture. */
TEST(cub_s_allocator_keeps_memory_of_stream_0_while_a_blocking_stream_is_captured)
{
    begin();
    {
        galloc::CachingDeviceAllocator cub;
        galloc::stream apart;
        cudaStream_t blocking;
        cudaGraph_t graph = nullptr;
        void *p, *q;
        OK(cudaStreamCreate(&blocking));
        OK(cub.DeviceAllocate(&p, MiB(4)));
        OK(cub.DeviceAllocate(&q, MiB(4)));
        OK(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeThreadLocal));
        EXPECT(cub.DeviceFree(p) != cudaSuccess);
        EXPECT_EQ(state_of(p), GALLOC_STATE_USED);
        OK(cudaStreamEndCapture(blocking, &graph));
        OK(cudaGraphDestroy(graph));
        OK(cub.DeviceFree(p));
        OK(cudaStreamBeginCapture(apart, cudaStreamCaptureModeGlobal));
        OK(cub.DeviceFree(q));
        OK(cudaStreamEndCapture(apart, &graph));
        OK(cudaGraphDestroy(graph));
        OK(cudaStreamDestroy(blocking));
    }
    finish();
}

/* The arguments of CUB's constructors; older releases have a sixth, `debug`. */
static void cache_8_mib(galloc::CachingDeviceAllocator &cub)
{
    void *p;
    OK(cub.DeviceAllocate(&p, MiB(8)));
    OK(cub.DeviceFree(p));
}

TEST(cub_s_allocator_returns_its_memory_unless_told_not_to)
{
    begin();
    {
        galloc::CachingDeviceAllocator five(8, 3, 7, MiB(64), true), six(8, 3, 7, MiB(64), true, false);
        galloc::CachingDeviceAllocator two(true, false), list = {8, 3, 7, MiB(64), true};
        for (galloc::CachingDeviceAllocator *cub : {&five, &six, &two, &list}) cache_8_mib(*cub);
    }
    EXPECT(sim_physical(0) >= MiB(8));
    {
        galloc::CachingDeviceAllocator five(8, 3, 7, MiB(64), false);
        cache_8_mib(five);
    }
    EXPECT_EQ(sim_physical(0), 0);
    finish();
}

/* A free that fails can be repeated, and is in order of the same stream. */
TEST(cub_s_allocator_keeps_the_stream_of_a_free_that_fails)
{
    const unsigned no_bin = galloc::CachingDeviceAllocator::INVALID_BIN;
    begin(2);
    {
        galloc::CachingDeviceAllocator cub(8, 3, no_bin);
        galloc::stream stream;
        for (int is_default = 0; is_default < 2; is_default++) {
            const char *call = is_default ? "cuCtxSetCurrent" : "cuStreamGetId";
            const cudaStream_t on = is_default ? cudaStreamPerThread : stream.get();
            void *p, *q;
            OK(cub.DeviceAllocate(0, &p, MiB(8), on));
            put(on, p, MiB(8), 1);
            OK(cudaSetDevice(1));
            sim_fail(call, 1, 1, cudaErrorUnknown);
            EXPECT_EQ(cub.DeviceFree(p), cudaErrorUnknown);
            sim_fail_clear();
            (void)cudaGetLastError();
            OK(cudaSetDevice(0));
            EXPECT_EQ(state_of(p), GALLOC_STATE_USED);
            OK(cub.DeviceFree(p));
            OK(cub.DeviceAllocate(0, &q, MiB(8)));
            EXPECT(q != p); /* the stream may still write it */
            put(nullptr, q, MiB(8), 2);
            OK(cub.DeviceFree(q));
            sim_run(-1);
        }
    }
    finish();
}

TEST(cub_s_allocator_keeps_its_bound)
{
    begin();
    {
        galloc::CachingDeviceAllocator cub;
        void *blocks[8];
        galloc_pool *pool;
        galloc_stats stats;
        for (auto &p : blocks) OK(cub.DeviceAllocate(&p, MiB(16)));
        OK(galloc_pool_default(&pool, 0));
        for (int i = 0; i < 4; i++) OK(cub.DeviceFree(blocks[i]));
        OK(galloc_pool_stats(pool, &stats));
        EXPECT(stats.cached.current >= MiB(64));
        OK(cub.SetMaxCachedBytes(MiB(32)));
        OK(galloc_pool_stats(pool, &stats));
        EXPECT(stats.cached.current <= MiB(32));
        for (int i = 4; i < 8; i++) OK(cub.DeviceFree(blocks[i]));
        OK(galloc_pool_stats(pool, &stats));
        EXPECT(stats.cached.current <= MiB(32));
    }
    finish();
}

TEST(thrust_s_temporaries)
{
    begin();
    {
        galloc::stream stream;
        galloc::thrust_allocator allocator(stream);
        char *p = allocator.allocate(5000);
        put(stream, p, 5000, 1);
        allocator.deallocate(p, 5000);
        EXPECT(allocator.allocate(5000) == p); /* in order of the stream */
        allocator.deallocate(p, 5000);
        int caught = 0;
        try {
            allocator.allocate(-1);
        } catch (const std::bad_alloc &) {
            caught = 1;
        }
        EXPECT(caught);
    }
    finish();
}

#if defined(GALLOC_HPP_CUDA_MR)

/* The concepts, of both generations. */
#if CCCL_VERSION < 3001000
static_assert(cuda::mr::async_resource_with<galloc::resource, cuda::mr::device_accessible>, "");
static_assert(cuda::mr::resource_with<galloc::resource, cuda::mr::device_accessible>, "");
#else
static_assert(cuda::mr::resource_with<galloc::resource, cuda::mr::device_accessible>, "");
static_assert(cuda::mr::synchronous_resource_with<galloc::resource, cuda::mr::device_accessible>, "");
#endif

TEST(a_memory_resource_in_stream_order)
{
    begin();
    {
        galloc::stream a, b;
        galloc::resource resource, same;
        EXPECT(resource == same);
        void *p = resource.allocate(cuda::stream_ref(a.get()), MiB(4), 256), *q;
        put(a, p, MiB(4), 1);
        resource.deallocate(cuda::stream_ref(a.get()), p, MiB(4), 256);
        q = resource.allocate(cuda::stream_ref(b.get()), MiB(4), 256);
        EXPECT(q != p);
        put(b, q, MiB(4), 2);
        resource.deallocate(cuda::stream_ref(b.get()), q, MiB(4), 256);
        q = resource.allocate(cuda::stream_ref(b.get()), 100, 4096);
        EXPECT_EQ(reinterpret_cast<uintptr_t>(q) % 4096, 0);
        resource.deallocate(cuda::stream_ref(b.get()), q, 100, 4096);
    }
    finish();
}

TEST(a_memory_resource_orders_blocking_streams_by_stream_0)
{
    begin();
    {
        galloc::resource resource;
        cuda::stream_ref stream{cudaStream_t(nullptr)};
        use_on_blocking_streams([&] { return resource.allocate(stream, MiB(4), 256); },
                                [&](void *p) { resource.deallocate(stream, p, MiB(4), 256); });
    }
    finish();
}

/* There is no work on the legacy stream then, and the free must not fail. */
TEST(a_memory_resource_frees_while_a_blocking_stream_is_captured)
{
    begin();
    {
        galloc::resource resource;
        cuda::stream_ref stream{cudaStream_t(nullptr)};
        cudaStream_t blocking;
        cudaGraph_t graph = nullptr;
        OK(cudaStreamCreate(&blocking));
        void *p = resource.allocate(stream, MiB(4), 256);
        OK(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeThreadLocal));
        resource.deallocate(stream, p, MiB(4), 256);
        EXPECT_EQ(state_of(p), GALLOC_STATE_FREE);
        OK(cudaStreamEndCapture(blocking, &graph));
        OK(cudaGraphDestroy(graph));
        OK(cudaStreamDestroy(blocking));
    }
    finish();
}

/* Whatever stream used the memory before, any stream may use it after a synchronous allocation. */
TEST(a_memory_resource_without_streams)
{
    begin();
    {
        galloc::pool pool("memory_limit:16M");
        galloc::stream a, b;
        galloc::resource resource(pool.get());
        void *p = resource.allocate(cuda::stream_ref(a.get()), MiB(12), 256);
        put(a, p, MiB(12), 1);
        resource.deallocate(cuda::stream_ref(a.get()), p, MiB(12), 256);
        p = resource.allocate_sync(MiB(12), 256); /* only a's memory is there: it waits for a's work */
        put(b, p, MiB(12), 2);
        b.synchronize();
        resource.deallocate_sync(p, MiB(12), 256);
        p = resource.allocate_sync(MiB(12), 256);
        put(a, p, MiB(12), 3);
        a.synchronize();
        resource.deallocate_sync(p, MiB(12), 256);
        int caught = 0;
        try {
            resource.allocate_sync(MiB(20), 256);
        } catch (const std::bad_alloc &) {
            caught = 1;
        }
        EXPECT(caught);
    }
    finish();
}

/* An earlier kernel's error comes to light while an allocation waits. Nothing can be freed then, so the block is the
   program's, which frees it after the reset. */
TEST(a_synchronous_allocation_in_a_context_that_fails_is_not_lost)
{
    begin();
    {
        galloc_stats stats = galloc_stats();
        galloc::pool pool;
        galloc::resource resource(pool.get());
        resource.deallocate_sync(resource.allocate_sync(MiB(1), 256), MiB(1), 256);
        sim_fail("cudaStreamSynchronize", 1, 0, cudaErrorIllegalAddress);
        void *p = resource.allocate_sync(MiB(1), 256);
        sim_fail_clear();
        EXPECT_EQ(cudaDeviceReset(), cudaSuccess);
        EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
        resource.deallocate_sync(p, MiB(1), 256);
        OK(galloc_pool_stats(pool.get(), &stats));
        EXPECT_EQ(stats.blocks.current, 0u);
        sim_fail("cudaStreamSynchronize", 1, 0, cudaErrorUnknown);
        int caught = 0;
        try {
            resource.allocate_sync(MiB(1), 256);
        } catch (const std::exception &) {
            caught = 1;
        }
        EXPECT(caught);
        sim_fail_clear();
        OK(galloc_pool_stats(pool.get(), &stats));
        EXPECT_EQ(stats.blocks.current, 0u);
    }
    (void)cudaGetLastError();
    finish();
}

/* A reset ends the stream that synchronous functions use: the next call has a new one, in an old resource as in a new
   one, and so has a call that frees memory of before the reset. */
TEST(a_memory_resource_outlives_a_reset_of_the_device)
{
    begin();
    {
        galloc::resource before;
        void *p = before.allocate_sync(MiB(4), 256), *q = before.allocate_sync(MiB(4), 256);
        before.deallocate_sync(q, MiB(4), 256);
        for (int round = 0; round < 3; round++) {
            OK(cudaDeviceReset());
            OK(cudaSetDevice(0));
            before.deallocate_sync(p, MiB(4), 256);
            EXPECT_EQ(state_of(p), GALLOC_STATE_FREE);
            galloc::resource after;
            galloc::stream stream;
            p = after.allocate_sync(MiB(4), 256);
            put(stream, p, MiB(4), 1);
            stream.synchronize();
            after.deallocate_sync(p, MiB(4), 256);
            p = before.allocate_sync(MiB(8), 256);
        }
        before.deallocate_sync(p, MiB(8), 256);
    }
    finish();
}

/* Without a stream of its own the block is freed on another one, and work elsewhere may use the memory again. */
TEST(a_memory_resource_frees_without_its_private_stream)
{
    for (const char *function : {"cudaGetDevice", "cudaSetDevice", "cudaStreamCreateWithFlags"}) {
        begin(2);
        {
            galloc::pool pool("memory_limit:4M", 1);
            galloc::resource resource(pool.get());
            for (int round = 0; round < 2; round++) {
                OK(cudaSetDevice(1));
                galloc::stream stream;
                void *p = resource.allocate_sync(MiB(4), 256);
                put(stream, p, MiB(4), 1);
                stream.synchronize();
                galloc::detail::private_entries().clear();
                OK(cudaSetDevice(0));
                sim_fail(function, 1, 100, cudaErrorUnknown);
                resource.deallocate_sync(p, MiB(4), 256);
                EXPECT(sim_failed() > 0);
                sim_fail_clear();
                EXPECT_EQ(state_of(p), GALLOC_STATE_FREE);
            }
        }
        finish();
    }
}

/* Only a reset of the stream's own device replaces it. */
TEST(each_device_keeps_its_private_stream_while_it_is_not_reset)
{
    begin(2);
    OK(cudaSetDevice(0));
    cudaStream_t first = galloc::detail::private_stream(0), second = galloc::detail::private_stream(1);
    EXPECT(first != second);
    OK(cudaSetDevice(1));
    OK(cudaDeviceReset());
    OK(cudaSetDevice(0));
    EXPECT(galloc::detail::private_stream(0) == first);
    second = galloc::detail::private_stream(1);
    EXPECT(galloc::detail::private_stream(1) == second);
    OK(cudaStreamQuery(second));
    finish();
}
#endif

/* One use of each class on its own. Those that throw leave nothing behind. */
static const std::size_t kinds = 7;
static void use(std::size_t kind, const galloc::stream &stream)
{
    if (kind == 0) galloc::make_unique<char>(MiB(40), stream);
    if (kind == 1) galloc::growable<char>(MiB(64), stream).resize(MiB(5));
    if (kind == 2) {
        galloc::thrust_allocator allocator(stream);
        char *p = allocator.allocate(MiB(3));
        allocator.deallocate(p, MiB(3));
    }
    if (kind == 3) {
        galloc::CachingDeviceAllocator cub;
        void *p = nullptr;
        cudaError_t code = cub.DeviceAllocate(0, &p, MiB(6), stream);
        if (code != cudaSuccess) throw galloc::error(code, "DeviceAllocate");
        for (int turn = 0; code = cub.DeviceFree(p), code != cudaSuccess && turn < 2; turn++) continue;
        EXPECT_EQ(code, cudaSuccess); /* a free that failed may be tried again */
    }
    if (kind == 4) {
        galloc::pool pool("memory_limit:64M");
        galloc::make_unique<char>(MiB(9), stream, pool.get());
    }
#if defined(GALLOC_HPP_CUDA_MR)
    galloc::resource resource;
    if (kind == 5) resource.deallocate_sync(resource.allocate_sync(MiB(7), 256), MiB(7), 256);
    if (kind == 6) {
        void *p = resource.allocate(::cuda::stream_ref(stream.get()), MiB(4), 256);
        resource.deallocate(::cuda::stream_ref(stream.get()), p, MiB(4), 256);
    }
#endif
}

/* Waits: for a stream, and for what is left of the work that used memory before. */
static void wait_twice(const galloc::stream &stream)
{
    galloc::unique_ptr<char> p = galloc::make_unique<char>(MiB(4), stream);
    put(stream, p.get(), MiB(4), 1);
    stream.synchronize();
    void *q = galloc::detail::allocate_sync(nullptr, 0, MiB(4), 256);
    EXPECT_EQ(galloc_free(q, galloc::detail::private_stream(0)), cudaSuccess);
}

TEST(a_capture_of_another_thread_goes_on)
{
    for (cudaStreamCaptureMode mode :
         {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeRelaxed}) {
        begin();
        {
            galloc::stream captured, stream;
            cudaGraph_t graph = nullptr;
            OK(cudaStreamBeginCapture(captured, mode));
            std::thread([&] {
                try {
                    for (std::size_t kind = 0; kind < 2 * kinds; kind++) use(kind % kinds, stream);
                    wait_twice(stream);
                    galloc::stream of_the_thread;
                } catch (const std::exception &e) {
                    if (!EXPECT(!"an exception")) printf("    %s\n", e.what());
                }
            }).join();
            OK(cudaStreamEndCapture(captured, &graph));
            OK(cudaGraphDestroy(graph));
        }
        finish();
    }
}

/* Memory on stream 0 of another device than the current one must not go to that of the current one. */
TEST(cub_s_allocator_does_not_allocate_while_the_device_is_not_known)
{
    begin(2);
    {
        galloc::CachingDeviceAllocator cub;
        void *p = nullptr;
        sim_fail("cudaGetDevice", 1, 0, cudaErrorUnknown);
        EXPECT(cub.DeviceAllocate(1, &p, MiB(4)) != cudaSuccess);
        EXPECT(!p);
        sim_fail_clear();
    }
    finish();
}

/* The runtime goes before the owners when the process ends. */
TEST(cub_s_allocator_leaves_a_free_at_the_end_of_the_process_to_galloc)
{
    begin();
    {
        galloc::CachingDeviceAllocator cub;
        void *p;
        OK(cub.DeviceAllocate(&p, MiB(4)));
        sim_fail("cudaGetDevice", 1, 1, cudaErrorCudartUnloading);
        OK(cub.DeviceFree(p));
        sim_fail_clear();
    }
    finish();
}

static std::atomic<int> pausing; /* 1: a thread is in a call of CUDA; 2: it may go on */
static const char *pausing_call;

static void pause_in_call(const char *function)
{
    if (std::strcmp(function, pausing_call) || pausing) return;
    pausing = 1;
    while (pausing == 1) std::this_thread::yield();
}

/* The status of a child of fork, made while another thread of the parent is in a call of CUDA by `call`. */
template <class Call, class Child> static int fork_during(const char *function, Call call, Child of_child)
{
    int status = -1;
    pausing = 0;
    pausing_call = function;
    sim_hook(pause_in_call, nullptr);
    std::thread other(call);
    while (!pausing) std::this_thread::yield();
    pid_t child = fork();
    if (!child) {
        (void)alarm(10);
        _exit(of_child() ? 0 : 1);
    }
    EXPECT_EQ(waitpid(child, &status, 0), child);
    pausing = 2;
    other.join();
    sim_hook(nullptr, nullptr);
    return status;
}

TEST(cub_s_allocator_is_refused_in_a_child_of_fork)
{
    begin();
    {
        galloc::CachingDeviceAllocator cub(true);
        void *p, *q;
        OK(cub.DeviceAllocate(&p, MiB(4)));
        OK(cub.DeviceAllocate(&q, MiB(4)));
        int status = fork_during("cuCtxGetCurrent", [&] { OK(cub.DeviceFree(p)); }, [&] {
            return cub.DeviceFree(q) == cudaErrorInitializationError &&
                cub.FreeAllCached() == cudaErrorInitializationError;
        });
        EXPECT_EQ(status, 0);
        OK(cub.DeviceFree(q));
    }
    finish();
}

#if defined(GALLOC_HPP_CUDA_MR)
TEST(a_memory_resource_without_streams_is_refused_in_a_child_of_fork)
{
    begin();
    {
        galloc::resource resource;
        void *p = resource.allocate_sync(MiB(4), 256);
        galloc::detail::private_entries().clear();
        int status = fork_during("cudaStreamCreateWithFlags", [] { (void)galloc::detail::private_stream(0); }, [&] {
            resource.deallocate_sync(p, MiB(4), 256);
            try {
                return !resource.allocate_sync(MiB(4), 256);
            } catch (const galloc::error &e) {
                return e.code() == cudaErrorInitializationError;
            }
        });
        EXPECT_EQ(status, 0);
        resource.deallocate_sync(p, MiB(4), 256);
    }
    finish();
}
#endif

/* Each call of the runtime and of the driver fails in turn: a class works or throws, the next use works, and no block is
   lost. The runtime's last error stays, or is another one. */
static void fail_in_turn(cudaError_t last_error)
{
    long exceptions = 0, calls = 0;
    for (std::size_t kind = 0; kind < kinds; kind++) {
        long n, failed = 1;
        for (n = 1; failed && n < 400; n++) {
            begin();
            if (last_error) (void)cudaSetDevice(7);
            EXPECT_EQ(cudaPeekAtLastError(), last_error);
            {
                galloc::stream stream;
                if (n % 2) use(kind, stream); /* what is there already, and from nothing */
                sim_fail(nullptr, n, 0, cudaErrorUnknown);
                try {
                    use(kind, stream);
                } catch (const std::exception &) {
                    exceptions++;
                }
                failed = sim_failed();
                sim_fail_clear();
                if (!EXPECT_EQ(cudaPeekAtLastError() != cudaSuccess, last_error != cudaSuccess))
                    printf("    kind %zu, call %ld\n", kind, n);
                (void)cudaGetLastError();
                use(kind, stream);
                galloc_pool *pool = nullptr;
                galloc_stats stats;
                OK(galloc_pool_default(&pool, 0));
                OK(galloc_pool_stats(pool, &stats));
                if (!EXPECT_EQ(stats.live.current, 0)) printf("    kind %zu, call %ld\n", kind, n);
            }
            finish();
        }
        EXPECT(n < 400);
        calls += n;
    }
    printf("%ld calls failed in turn, %ld exceptions\n", calls, exceptions);
    EXPECT(calls > 60 && exceptions > 30);
}

TEST(every_failing_call_is_an_exception_or_nothing) { fail_in_turn(cudaSuccess); }
TEST(every_failing_call_leaves_an_error_of_the_program) { fail_in_turn(cudaErrorInvalidDevice); }

TEST_MAIN()
