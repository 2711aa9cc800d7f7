/* galloc.hpp - galloc.h for C++11 and later: owners of blocks, pools and streams; and galloc where C++ libraries take
   an allocator. Copy it beside galloc.h. One file of the program still defines GALLOC_IMPLEMENTATION.

     galloc::unique_ptr<float>       owner of one block; freed on its stream     make_unique<float>(n, stream)
     galloc::growable<T>             an array that grows in place, up to a maximum
     galloc::pool, galloc::stream    owners of a pool and of a stream
     galloc::resource                a memory resource of CCCL (cuda::mr), before and after its release 3.1, and so of
                                     RMM 26.06 and later
     galloc::rmm_resource            of RMM before 26.06 (rmm::mr::device_memory_resource)
     galloc::thrust_allocator        for thrust::cuda::par_nosync(allocator).on(stream)
     galloc::CachingDeviceAllocator  with the interface of cub::CachingDeviceAllocator

   The parts that need a library's header are there when the compiler finds it, from C++17 on, unless GALLOC_HPP_ALONE
   is defined before. Failures throw galloc::out_of_memory (a std::bad_alloc; an rmm::out_of_memory where RMM is found)
   or galloc::error; CachingDeviceAllocator returns cudaError_t, as CUB's. Functions that free throw nothing: galloc
   logs why a free failed.

   Threads, streams, waits: as the C functions that are called. Whatever has no stream in its interface (resource's
   synchronous functions) says so below. */

#ifndef GALLOC_HPP
#define GALLOC_HPP

#include <atomic>
#include <cstddef>
#include <cstdio>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include <cuda.h>

#include "galloc.h"

/* Their headers need C++17. */
#if defined(__has_include) && __cplusplus >= 201703L && !defined(GALLOC_HPP_ALONE)
#if __has_include(<cuda/version>)
#include <cuda/version>
#elif __has_include(<cuda/std/version>)
#include <cuda/std/version>
#endif
/* CCCL before 3.1 offers memory resources only where this macro is defined. */
#if defined(CCCL_VERSION) && __has_include(<cuda/memory_resource>) && \
    (CCCL_VERSION >= 3001000 || defined(LIBCUDACXX_ENABLE_EXPERIMENTAL_MEMORY_RESOURCE))
#include <cuda/memory_resource>
#include <cuda/stream_ref>
#define GALLOC_HPP_CUDA_MR
#endif
#if __has_include(<rmm/error.hpp>)
#include <rmm/error.hpp>
#define GALLOC_HPP_RMM
#endif
#if __has_include(<rmm/mr/device_memory_resource.hpp>)
#include <rmm/mr/device_memory_resource.hpp>
#define GALLOC_HPP_RMM_BASE
#elif __has_include(<rmm/mr/device/device_memory_resource.hpp>)
#include <rmm/mr/device/device_memory_resource.hpp>
#define GALLOC_HPP_RMM_BASE
#endif
#endif

namespace galloc {

/* ---- errors ------------------------------------------------------------------------------------------------------ */

namespace texts {

/* What to say of the call that has just failed with `code`: galloc's message, or CUDA's text. A call of the runtime
   that fails leaves its code as the runtime's last error, and galloc's calls leave that error as it was. If it was the
   same before, either call may have failed: then both are said. Static: with GALLOC_STATIC each file has a galloc. */
static inline std::string text_of(cudaError_t code)
{
    const std::string message = galloc_last_message(), text = cudaGetErrorString(code);
    if (message.empty()) return text;
    if (cudaPeekAtLastError() != code) return message;
    return text + "; the last error of galloc: " + message;
}

} // namespace texts

/* A call of galloc or CUDA that failed for another reason than memory. */
class error : public std::runtime_error {
public:
    explicit error(cudaError_t code) : std::runtime_error(texts::text_of(code)), code_(code) {}
    error(cudaError_t code, const char *message)
        : std::runtime_error(*message ? message : cudaGetErrorString(code)), code_(code)
    {
    }
    cudaError_t code() const noexcept { return code_; }

private:
    cudaError_t code_;
};

/* Device memory has run out, or no block can be that large; galloc_oom_report has the details of most. Files of one
   program that find RMM and files that do not have two classes, with two names. */
#if defined(GALLOC_HPP_RMM)
inline namespace with_rmm {
class out_of_memory : public rmm::out_of_memory {
public:
    out_of_memory() : out_of_memory(texts::text_of(cudaErrorMemoryAllocation).c_str()) {}
    explicit out_of_memory(const char *message) : rmm::out_of_memory(message) {}
};
} // namespace with_rmm
#else
class out_of_memory : public std::bad_alloc {
public:
    out_of_memory() : out_of_memory(texts::text_of(cudaErrorMemoryAllocation).c_str()) {}
    explicit out_of_memory(const char *message)
        : text_(new std::string(std::string("out_of_memory: ") + message))
    {
    }
    const char *what() const noexcept override { return text_->c_str(); }

private:
    /* Copying an exception must not throw. Not by make_shared: a library with its symbols would stay after dlclose. */
    std::shared_ptr<std::string> text_;
};
#endif

/* Files may be compiled with per-thread default streams or without. The rest has other names in each of them, since
   stream 0 means another stream there; and in each file with GALLOC_STATIC, which has a heap of its own: then a type of
   the program that has an owner as a member belongs in one file, not in a header. */
#if defined(GALLOC_STATIC)
namespace {
#elif defined(CUDA_API_PER_THREAD_DEFAULT_STREAM) || defined(__CUDA_API_PER_THREAD_DEFAULT_STREAM)
inline namespace per_thread_default {
#else
inline namespace legacy_default {
#endif
#if defined(GALLOC_HPP_RMM)
inline namespace with_rmm {
#endif

/* Throws unless the call of galloc, or of the CUDA runtime, succeeded. After a kernel launch pass it
   cudaPeekAtLastError(): cudaGetLastError() clears the error, by which the runtime's failures are known. */
inline void check(cudaError_t code)
{
    if (code == cudaErrorMemoryAllocation) throw out_of_memory(texts::text_of(code).c_str());
    if (code != cudaSuccess) throw error(code, texts::text_of(code).c_str());
}

namespace detail {

/* A call of the CUDA runtime. If it fails, the runtime's last error stays as it was; where there was one before, there
   is one after. */
template <class Call> cudaError_t quietly(Call call)
{
    const cudaError_t before = cudaPeekAtLastError(), code = call();
    if (code != cudaSuccess && before == cudaSuccess) (void)cudaGetLastError();
    return code;
}

/* The same in relaxed capture mode, in which waiting for a stream and making one end no capture of another stream. */
template <class Call> cudaError_t beside_captures(Call call)
{
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    const auto exchange = [&] { return cudaThreadExchangeStreamCaptureMode(&mode); };
    cudaError_t code = quietly(exchange);
    if (code != cudaSuccess) return code;
    code = quietly(call);
    (void)quietly(exchange);
    return code;
}

/* Throws unless a call of the runtime succeeded. It leaves no message. */
inline void check_cuda(cudaError_t code)
{
    if (code == cudaErrorMemoryAllocation) throw out_of_memory(cudaGetErrorString(code));
    if (code != cudaSuccess) throw error(code, "");
}

/* Holds a lock. In a child of fork the lock may be one that another thread held, and waits for ever: then this throws
   what galloc, which refuses there, returns. */
class guard {
public:
    explicit guard(std::mutex &mutex) : lock_(mutex, std::try_to_lock)
    {
        galloc_pointer info;
        if (lock_.owns_lock()) return;
        if (galloc_pointer_info(nullptr, &info) == cudaErrorInitializationError)
            throw error(cudaErrorInitializationError);
        lock_.lock();
    }

private:
    std::unique_lock<std::mutex> lock_;
};

inline cudaError_t wait_for(cudaStream_t stream)
{
    return beside_captures([=] { return cudaStreamSynchronize(stream); });
}

/* For owners that end, which can report nothing: a call that failed changed nothing, so it is made again. After a
   second failure the block stays used, and the log has named the cause twice. */
template <class Call> cudaError_t twice(Call call) noexcept
{
    return call() == cudaSuccess ? cudaSuccess : call();
}

inline void give(void *p, cudaStream_t stream) noexcept
{
    (void)twice([=] { return galloc_free(p, stream); });
}

/* A function of the driver, which the program need not link. */
template <class Function> Function *driver_function(const char *name)
{
    void *function = nullptr;
    enum cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    check_cuda(quietly([&] {
#if CUDART_VERSION >= 12050
        return cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found);
#else
        return cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &found);
#endif
    }));
    if (found != cudaDriverEntryPointSuccess || !function) throw error(cudaErrorInsufficientDriver, name);
    return reinterpret_cast<Function *>(function);
}

/* NULL: the thread has none, as before the first call of CUDA. */
inline CUcontext current_context()
{
    static auto *const get = driver_function<decltype(cuCtxGetCurrent)>("cuCtxGetCurrent");
    CUcontext context = nullptr;
    const CUresult result = get(&context);
    if (result != CUDA_ERROR_NOT_INITIALIZED) check_cuda(static_cast<cudaError_t>(result));
    return context;
}

/* A context. Its id tells whether it still exists, since another one may come to the same address. */
struct context_ref {
    CUcontext context;
    unsigned long long id;
};

inline CUresult id_of(CUcontext context, unsigned long long *id)
{
    static auto *const get = driver_function<decltype(cuCtxGetId)>("cuCtxGetId");
    return get(context, id);
}

inline bool is_end(CUresult result)
{
    return result == CUDA_ERROR_INVALID_CONTEXT || result == CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

inline bool is_alive(const context_ref &ref)
{
    unsigned long long id = 0;
    if (!ref.context) return false;
    CUresult result = id_of(ref.context, &id);
    return result == CUDA_SUCCESS ? id == ref.id : !is_end(result);
}

/* The context whose default stream a handle means now. A thread without a context gets that of its device, as from
   galloc. None: the handle is of another stream. */
inline context_ref context_of_default(cudaStream_t stream)
{
    context_ref ref = {nullptr, 0};
    if (stream && stream != cudaStreamLegacy && stream != cudaStreamPerThread) return ref;
    ref.context = current_context();
    CUresult result = ref.context ? id_of(ref.context, &ref.id) : CUDA_ERROR_INVALID_CONTEXT;
    if (is_end(result)) {
        int device = 0;
        check_cuda(quietly([&] { return cudaGetDevice(&device); }));
        check_cuda(quietly([=] { return cudaSetDevice(device); }));
        ref.context = current_context();
        result = id_of(ref.context, &ref.id);
    }
    check_cuda(static_cast<cudaError_t>(result));
    return ref;
}

/* The way back to the context of a thread, or to its device if it has no context. The end of this object goes back if
   leave() has not. A call that failed changed nothing, so it is made again. */
class way_back {
public:
    way_back() = default;
    ~way_back() { (void)go(); }
    way_back(const way_back &) = delete;
    way_back &operator=(const way_back &) = delete;

    /* device: -1: a thread without a context stays without. */
    void begin(CUcontext context, int device)
    {
        static auto *const set = driver_function<decltype(cuCtxSetCurrent)>("cuCtxSetCurrent");
        set_ = set;
        context_ = context;
        device_ = device;
    }
    void enter(CUcontext context) { check_cuda(static_cast<cudaError_t>(set_(context))); }
    /* Throws if another context stays current. */
    void leave() { check_cuda(go()); }

private:
    cudaError_t go() noexcept
    {
        if (!set_) return cudaSuccess;
        const cudaError_t code = twice([this]() -> cudaError_t {
            if (!context_ && device_ >= 0) return quietly([this] { return cudaSetDevice(device_); });
            CUresult result = set_(context_);
            if (is_end(result)) result = set_(nullptr); /* it has ended meanwhile */
            return static_cast<cudaError_t>(result);
        });
        if (code == cudaSuccess) set_ = nullptr;
        return code;
    }

    decltype(cuCtxSetCurrent) *set_ = nullptr; /* NULL: nothing was changed */
    CUcontext context_ = nullptr;
    int device_ = -1;
};

/* Makes a context current for the time of its life; none, or one that has ended: leaves the current one. */
class context_guard {
public:
    explicit context_guard(const context_ref &ref)
    {
        if (!ref.context) return;
        const CUcontext before = current_context();
        ended_ = !is_alive(ref);
        if (before == ref.context || ended_) return;
        back_.begin(before, -1);
        back_.enter(ref.context);
    }
    bool has_ended() const noexcept { return ended_; }
    void leave() { back_.leave(); }

private:
    way_back back_;
    bool ended_ = false;
};

/* Makes a device current for the time of its life; -1: leaves it. primary: and its primary context, where a context of
   the program's own may be current. Afterwards the thread has the context that it had. When the process ends and the
   runtime is gone, galloc knows what to do. */
class device_guard {
public:
    explicit device_guard(int device, bool primary = false)
    {
        int current = device;
        cudaError_t code = device < 0 ? cudaSuccess : quietly([&] { return cudaGetDevice(&current); });
        if (code == cudaErrorCudartUnloading) return;
        check_cuda(code);
        if (current == device && !primary) return;
        back_.begin(current_context(), current);
        check_cuda(quietly([=] { return cudaSetDevice(device); }));
    }
    void leave() { back_.leave(); }

private:
    way_back back_;
};

/* Frees on a stream of that context; none: of the current one. Work of a green context goes on after its end, so memory
   of a context that has ended is freed after a wait for the device. Of failures galloc does not know of, stderr gets a
   line. */
inline void give_in(const context_ref &ref, void *p, cudaStream_t stream) noexcept
{
    cudaError_t lost = cudaSuccess;
    (void)twice([&]() -> cudaError_t {
        bool freed = false;
        cudaError_t code = cudaErrorMemoryAllocation;
        lost = cudaSuccess;
        try {
            context_guard guard(ref);
            code = guard.has_ended() ? galloc_override_free(p, nullptr, GALLOC_OVERRIDE_DEVICE)
                                     : galloc_free(p, stream);
            freed = true;
            guard.leave();
            return code;
        } catch (const error &e) {
            lost = e.code();
        } catch (...) {
            lost = cudaErrorMemoryAllocation;
        }
        return freed ? code : lost;
    });
    if (lost != cudaSuccess)
        (void)std::fprintf(stderr, "galloc.hpp: a context cannot be made current as memory is freed: %s\n",
                           cudaGetErrorString(lost));
}

inline bool is_legacy(cudaStream_t stream) noexcept
{
#if defined(CUDA_API_PER_THREAD_DEFAULT_STREAM) || defined(__CUDA_API_PER_THREAD_DEFAULT_STREAM)
    return stream == cudaStreamLegacy;
#else
    return !stream || stream == cudaStreamLegacy;
#endif
}

inline bool is_per_thread(cudaStream_t stream) noexcept
{
    return stream == cudaStreamPerThread || (!stream && !is_legacy(stream));
}

/* A thread, as one library of the program names it: each library that hides its symbols has a counter of its own. Equal
   ones are one thread, since counters are never freed and no number comes again. */
struct thread_ref {
    const void *counter;
    unsigned long long number;
    bool operator!=(const thread_ref &other) const noexcept
    {
        return counter != other.counter || number != other.number;
    }
};

/* The calling thread. */
inline thread_ref this_thread()
{
    static std::atomic<unsigned long long> &counter = *new std::atomic<unsigned long long>{0};
    static thread_local const unsigned long long number = ++counter;
    return {&counter, number};
}

/* Frees a block as the libraries' own allocators do: a free on the legacy stream is work there, which comes after the
   earlier work of blocking streams and before their later work. While a blocking stream is captured, it fails. */
inline cudaError_t free_in_order(void *p, cudaStream_t stream) noexcept
{
    return is_legacy(stream) ? galloc_override_free(p, stream, GALLOC_OVERRIDE_ORDERED) : galloc_free(p, stream);
}

/* The same for owners that must not fail: while a blocking stream is captured, the free is one by galloc_free. */
inline void give_in_order(void *p, cudaStream_t stream) noexcept
{
    cudaStreamCaptureStatus status;
    const bool in_order =
        !is_legacy(stream) || quietly([&] { return cudaStreamIsCapturing(stream, &status); }) == cudaSuccess;
    if (!in_order || free_in_order(p, stream) != cudaSuccess) give(p, stream);
}

/* Of n elements; more than there are addresses, which galloc refuses, where the product would overflow. */
template <class T> std::size_t bytes_of(std::size_t n) noexcept
{
    return n > SIZE_MAX / sizeof(T) ? SIZE_MAX : n * sizeof(T);
}

} // namespace detail

/* ---- pools and streams ------------------------------------------------------------------------------------------- */

/* A pool of your own. Destroy it after its blocks: while blocks are used the pool stays, and galloc logs that. */
class pool {
public:
    /* galloc::pool p("memory_limit:20G"); settings as in GALLOC_CONF, for the current device or another one. */
    explicit pool(const char *settings = "", int device = -1)
    {
        char message[512];
        galloc_config config = galloc_config_default();
        if (galloc_config_parse(&config, settings, message, sizeof message) != cudaSuccess)
            throw error(cudaErrorInvalidValue, message);
        config.device = device;
        check(galloc_pool_create(&pool_, &config));
    }
    explicit pool(const galloc_config &config) { check(galloc_pool_create(&pool_, &config)); }
    pool(pool &&other) noexcept : pool_(other.pool_) { other.pool_ = nullptr; }
    pool &operator=(pool &&other) noexcept
    {
        std::swap(pool_, other.pool_);
        return *this;
    }
    ~pool()
    {
        if (pool_) (void)detail::twice([this] { return galloc_pool_destroy(pool_); });
    }

    galloc_pool *get() const noexcept { return pool_; }

private:
    galloc_pool *pool_ = nullptr;
};

/* A non-blocking stream that is retired before it is destroyed. */
class stream {
public:
    stream()
    {
        detail::check_cuda(
            detail::quietly([this] { return cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking); }));
    }
    stream(stream &&other) noexcept : stream_(other.stream_) { other.stream_ = nullptr; }
    stream &operator=(stream &&other) noexcept
    {
        std::swap(stream_, other.stream_);
        return *this;
    }
    ~stream()
    {
        if (!stream_) return;
        (void)detail::twice([this] { return galloc_stream_retire(stream_); });
        (void)detail::quietly([this] { return cudaStreamDestroy(stream_); });
    }

    cudaStream_t get() const noexcept { return stream_; }
    operator cudaStream_t() const noexcept { return stream_; }
    /* As cudaStreamSynchronize, but it ends no capture of another stream. */
    void synchronize() const { detail::check_cuda(detail::wait_for(stream_)); }

private:
    cudaStream_t stream_ = nullptr;
};

/* ---- blocks ------------------------------------------------------------------------------------------------------ */

/* Frees a block on a stream: work queued there before the end of the owner may still use it. If another stream uses the
   block, order that work before this stream's, or call galloc_record_stream. As galloc_free, the end of an owner on the
   legacy stream orders no blocking streams. A default stream is that of the context which was current when the deleter
   was made; if CUDA does not say which one that is, the constructor throws. The per-thread default stream is that of
   the thread that ends the owner. */
struct deleter {
    cudaStream_t stream = nullptr;
    detail::context_ref context = {nullptr, 0}; /* of a default stream; none: the current one */

    deleter() = default;
    deleter(cudaStream_t on) : stream(on), context(detail::context_of_default(on)) {}
    void operator()(const void *p) const noexcept { detail::give_in(context, const_cast<void *>(p), stream); }
};

/* get_deleter() = other; changes the stream that the block is freed on. */
template <class T> using unique_ptr = std::unique_ptr<T[], deleter>;

/* An array of n uninitialised elements, for `stream`; from a pool, or the default pool of the stream's device. */
template <class T> unique_ptr<T> make_unique(std::size_t n, cudaStream_t stream, galloc_pool *pool = nullptr)
{
    static_assert(std::is_trivially_destructible<T>::value, "device memory holds plain data");
    const deleter frees(stream);
    galloc_request request = galloc_request();
    void *p = nullptr;
    request.bytes = detail::bytes_of<T>(n);
    request.alignment = alignof(T) > 512 ? alignof(T) : 0;
    request.stream = stream;
    request.pool = pool;
    check(galloc_alloc(&p, &request));
    return unique_ptr<T>(static_cast<T *>(p), frees);
}

/* An array that grows in place: its address stays, nothing is copied. Addresses for `max` elements are reserved at the
   start; its memory is then one page (2 MiB). */
template <class T> class growable {
public:
    growable(std::size_t max, cudaStream_t stream, galloc_pool *pool = nullptr)
        : stream_(stream), context_(detail::context_of_default(stream)), max_(max)
    {
        static_assert(std::is_trivially_copyable<T>::value, "device memory holds plain data");
        galloc_request request = galloc_request();
        request.bytes = 1;
        request.max_bytes = detail::bytes_of<T>(max);
        request.alignment = alignof(T) > 512 ? alignof(T) : 0;
        request.stream = stream;
        request.pool = pool;
        check(galloc_alloc(&data_, &request));
    }
    growable(growable &&other) noexcept
        : data_(other.data_), stream_(other.stream_), context_(other.context_), size_(other.size_), max_(other.max_)
    {
        other.data_ = nullptr;
        other.size_ = other.max_ = 0; /* it can only be assigned to, or end */
    }
    growable &operator=(growable &&other) noexcept
    {
        std::swap(data_, other.data_);
        std::swap(stream_, other.stream_);
        std::swap(context_, other.context_);
        std::swap(size_, other.size_);
        std::swap(max_, other.max_);
        return *this;
    }
    ~growable() { detail::give_in(context_, data_, stream_); }

    /* New elements are uninitialised. Only growth beyond a multiple of 2 MiB enters the driver, if at all. If CUDA does
       not make the thread's context current again, it throws, and the array has its new size. */
    void resize(std::size_t n)
    {
        if (n > max_) throw out_of_memory("galloc::growable: more elements than its maximum");
        detail::context_guard guard(context_);
        check(galloc_resize(data_, n ? n * sizeof(T) : 1, stream_));
        size_ = n;
        guard.leave();
    }
    T *data() const noexcept { return static_cast<T *>(data_); }
    std::size_t size() const noexcept { return size_; }
    std::size_t max_size() const noexcept { return max_; }

private:
    void *data_ = nullptr;
    cudaStream_t stream_;
    detail::context_ref context_; /* of a default stream; else none */
    std::size_t size_ = 0, max_;
};

/* ---- interfaces of libraries ------------------------------------------------------------------------------------- */

namespace detail {

/* A stream and its context: cudaDeviceReset ends both, and no call may name the stream after that. */
struct private_entry {
    cudaStream_t stream;
    context_ref context;
};

/* Makes a non-blocking stream in a device's primary context. */
inline private_entry make_private_entry(int device)
{
    private_entry entry = private_entry();
    device_guard guard(device, true);
    entry.context = context_of_default(cudaStreamLegacy);
    check_cuda(beside_captures([&] { return cudaStreamCreateWithFlags(&entry.stream, cudaStreamNonBlocking); }));
    try {
        guard.leave();
    } catch (...) {
        (void)quietly([&] { return cudaStreamDestroy(entry.stream); });
        throw;
    }
    return entry;
}

/* By device. Never freed: static destructors may free memory. */
inline std::vector<private_entry> &private_entries()
{
    static std::vector<private_entry> *entries = new std::vector<private_entry>;
    return *entries;
}

/* The stream of callers that name none: one for each device, never destroyed; after cudaDeviceReset a new one. No work
   is queued on it, but waits that galloc queues: once they are over, memory that was allocated for it may be used on
   any stream. */
inline cudaStream_t private_stream(int device)
{
    static std::mutex mutex;
    std::vector<private_entry> &entries = private_entries();
    guard lock(mutex);
    if (device < 0) check_cuda(quietly([&] { return cudaGetDevice(&device); }));
    if (entries.size() <= std::size_t(device)) entries.resize(std::size_t(device) + 1);
    private_entry &entry = entries[std::size_t(device)];
    if (!entry.stream || !is_alive(entry.context)) entry = make_private_entry(device);
    return entry.stream;
}

inline void *allocate(galloc_pool *pool, std::size_t bytes, std::size_t alignment, cudaStream_t stream)
{
    galloc_request request = galloc_request();
    void *p = nullptr;
    request.bytes = bytes;
    request.alignment = alignment > 512 ? alignment : 0;
    request.stream = stream;
    request.pool = pool;
    check(galloc_alloc(&p, &request));
    return p;
}

/* Has the context failed for good? Then every call returns the error, and nothing runs any more. */
inline bool has_failed(cudaError_t error) noexcept
{
    std::size_t unused = 0, total = 0;
    return quietly([&] { return cudaMemGetInfo(&unused, &total); }) == error;
}

/* Memory that any stream may use at once. Waits for what is left of the work that used it before. In a context that has
   failed the block cannot be freed before the reset: the program gets it, and the error with its next call. */
inline void *allocate_sync(galloc_pool *pool, int device, std::size_t bytes, std::size_t alignment)
{
    cudaStream_t stream = private_stream(device);
    void *p = allocate(pool, bytes, alignment, stream);
    cudaError_t code = wait_for(stream);
    if (code != cudaSuccess) {
        cudaError_t left = twice([=] { return galloc_free(p, stream); });
        if (left == cudaSuccess || !has_failed(code)) check_cuda(code);
    }
    return p;
}

inline int device_of(galloc_pool *pool)
{
    galloc_config config;
    int device = -1;
    if (pool) {
        check(galloc_pool_config(pool, &config));
        return config.device;
    }
    check_cuda(quietly([&] { return cudaGetDevice(&device); }));
    return device;
}

} // namespace detail

#if defined(GALLOC_HPP_CUDA_MR)

/* A memory resource: of a pool, or (no argument) of the default pool of the current device. It does not own the pool.
   It has the functions of both generations of cuda::mr: before CCCL 3.1 allocate(bytes, alignment) is synchronous and
   allocate_async has the stream last; since then allocate has the stream first, and allocate_sync is synchronous.
   Memory that is freed on the legacy stream is ordered with blocking streams, by an event.

   Synchronous functions: memory may be used on any stream after allocation; the program has waited for its work before
   it deallocates. */
class resource {
public:
    resource() : device_(detail::device_of(nullptr)) { check(galloc_pool_default(&pool_, device_)); }
    explicit resource(galloc_pool *pool) : pool_(pool), device_(detail::device_of(pool)) {}

    void *allocate(::cuda::stream_ref stream, std::size_t bytes, std::size_t alignment = 256)
    {
        return detail::allocate(pool_, bytes, alignment, stream.get());
    }
    void deallocate(::cuda::stream_ref stream, void *p, std::size_t, std::size_t = 256) noexcept
    {
        detail::give_in_order(p, stream.get());
    }
    void *allocate_sync(std::size_t bytes, std::size_t alignment = 256)
    {
        return detail::allocate_sync(pool_, device_, bytes, alignment);
    }
    void deallocate_sync(void *p, std::size_t, std::size_t = 256) noexcept { free_sync(p); }

#if CCCL_VERSION < 3001000
    void *allocate(std::size_t bytes, std::size_t alignment = 256) { return allocate_sync(bytes, alignment); }
    void deallocate(void *p, std::size_t, std::size_t = 256) noexcept { free_sync(p); }
    void *allocate_async(std::size_t bytes, std::size_t alignment, ::cuda::stream_ref stream)
    {
        return allocate(stream, bytes, alignment);
    }
    void *allocate_async(std::size_t bytes, ::cuda::stream_ref stream) { return allocate(stream, bytes); }
    void deallocate_async(void *p, std::size_t bytes, std::size_t alignment, ::cuda::stream_ref stream) noexcept
    {
        deallocate(stream, p, bytes, alignment);
    }
    void deallocate_async(void *p, std::size_t bytes, ::cuda::stream_ref stream) noexcept
    {
        deallocate(stream, p, bytes);
    }
#endif

    galloc_pool *get() const noexcept { return pool_; }
    bool operator==(const resource &other) const noexcept { return pool_ == other.pool_; }
    bool operator!=(const resource &other) const noexcept { return pool_ != other.pool_; }
    friend constexpr void get_property(const resource &, ::cuda::mr::device_accessible) noexcept {}
#if CCCL_VERSION >= 3002000
    using default_queries = ::cuda::mr::properties_list<::cuda::mr::device_accessible>;
#endif

private:
    /* The private stream exists, unless the device was reset after the allocation. If none can be made, any other
       stream will do, since the program has waited: the legacy stream, which no thread captures. */
    void free_sync(void *p) noexcept
    {
        cudaStream_t stream = cudaStreamLegacy;
        try {
            stream = detail::private_stream(device_);
        } catch (...) {
        }
        detail::give(p, stream);
    }

    galloc_pool *pool_ = nullptr;
    int device_;
};

#endif /* GALLOC_HPP_CUDA_MR */

#if defined(GALLOC_HPP_RMM_BASE)

/* RMM before 26.06: galloc::rmm_resource mr; rmm::mr::set_current_device_resource(&mr); */
class rmm_resource final : public rmm::mr::device_memory_resource {
public:
    /* Of a pool, or the default pool of the stream's device. It does not own the pool. */
    explicit rmm_resource(galloc_pool *pool = nullptr) : pool_(pool) {}
    galloc_pool *get() const noexcept { return pool_; }

private:
    void *do_allocate(std::size_t bytes, rmm::cuda_stream_view stream) override
    {
        return detail::allocate(pool_, bytes, 0, stream.value());
    }
    /* noexcept where RMM demands it (since 25.10), which any release accepts. */
    void do_deallocate(void *p, std::size_t, rmm::cuda_stream_view stream) noexcept override
    {
        detail::give_in_order(p, stream.value());
    }
    bool do_is_equal(const rmm::mr::device_memory_resource &other) const noexcept override
    {
        auto const *mine = dynamic_cast<const rmm_resource *>(&other);
        return mine && mine->pool_ == pool_;
    }

    galloc_pool *pool_;
};

#endif /* GALLOC_HPP_RMM_BASE */

/* Temporaries of Thrust's algorithms: thrust::sort(thrust::cuda::par_nosync(allocator).on(stream), ...). */
class thrust_allocator {
public:
    using value_type = char;
    explicit thrust_allocator(cudaStream_t stream, galloc_pool *pool = nullptr) : stream_(stream), pool_(pool) {}
    char *allocate(std::ptrdiff_t bytes) /* a negative number becomes one that galloc refuses */
    {
        return static_cast<char *>(detail::allocate(pool_, std::size_t(bytes), 0, stream_));
    }
    void deallocate(char *p, std::size_t) noexcept { detail::give(p, stream_); }

private:
    cudaStream_t stream_;
    galloc_pool *pool_;
};

/* The constructors and member functions, but not the public data, of cub::CachingDeviceAllocator, which CCCL has
   deprecated. As there, DeviceFree names no stream: the block is freed on the stream of its allocation, which must
   still exist. Memory that this object has not allocated is freed after a wait for the device. Free what it has
   allocated with it alone: as in CUB, it would take memory that comes again at that address for its own. If the stream
   is the per-thread default stream of another thread, the block is freed on the legacy stream, which comes after it; so
   is one that was allocated on such a stream in another shared library whose symbols are hidden. On the legacy stream
   an event is recorded, which orders blocking streams; while one is captured, the free fails. If CUDA does not make the
   thread's context current again, DeviceAllocate fails; DeviceFree returns the error, though the block is free.
   Differences: bins do not exist, so their arguments have no effect, and neither has `debug`, which the first
   constructor of older releases of CUB has as a sixth; `max_cached_bytes` is applied by SetMaxCachedBytes and by frees,
   to the default pool of the device, and returns whole pages; the default constructor sets no such bound. The
   destructor trims the default pools, unless `skip_cleanup`: set that in an object that outlives galloc_shutdown, or
   galloc logs that a pool has been destroyed. */
class CachingDeviceAllocator {
public:
    static constexpr unsigned INVALID_BIN = unsigned(-1);
    static constexpr std::size_t INVALID_SIZE = std::size_t(-1);
    static constexpr int INVALID_DEVICE_ORDINAL = -1;

    CachingDeviceAllocator(unsigned /* bin_growth */, unsigned /* min_bin */ = 1, unsigned /* max_bin */ = INVALID_BIN,
                           std::size_t max_cached_bytes = INVALID_SIZE, bool skip_cleanup = false,
                           bool /* debug */ = false)
        : most_(max_cached_bytes), skip_cleanup_(skip_cleanup)
    {
    }
    CachingDeviceAllocator(bool skip_cleanup = false, bool /* debug */ = false)
        : most_(INVALID_SIZE), skip_cleanup_(skip_cleanup)
    {
    }
    CachingDeviceAllocator(const CachingDeviceAllocator &) = delete;
    CachingDeviceAllocator &operator=(const CachingDeviceAllocator &) = delete;
    virtual ~CachingDeviceAllocator()
    {
        if (!skip_cleanup_) (void)FreeAllCached();
    }

    cudaError_t SetMaxCachedBytes(std::size_t max_cached_bytes)
    {
        try {
            for (galloc_pool *pool : pools(&max_cached_bytes)) (void)trim(pool, max_cached_bytes);
            return cudaSuccess;
        } catch (const error &e) {
            return e.code();
        } catch (...) { /* no host memory */
            return cudaErrorMemoryAllocation;
        }
    }

    cudaError_t DeviceAllocate(int device, void **p, std::size_t bytes, cudaStream_t active_stream = nullptr)
    {
        block b = {active_stream, {nullptr, 0}, {nullptr, 0}, nullptr, 0};
        if (!p) return cudaErrorInvalidValue;
        *p = nullptr;
        try {
            detail::device_guard guard(device); /* the default streams are those of the current device */
            b.thread = detail::this_thread();
            b.context = detail::context_of_default(active_stream);
            cudaError_t code = galloc_pool_default(&b.pool, device < 0 ? -1 : device);
            /* CUB's algorithms ask for a size, and do no work, when the address of their temporaries is NULL. */
            if (code == cudaSuccess) code = galloc_pool_malloc(b.pool, p, bytes ? bytes : 1, active_stream);
            if (code != cudaSuccess) return code;
            guard.leave();
            remember(*p, b);
            return cudaSuccess;
        } catch (const error &e) {
            return withdraw(p, b, e.code());
        } catch (...) { /* no host memory */
            return withdraw(p, b, cudaErrorMemoryAllocation);
        }
    }
    cudaError_t DeviceAllocate(void **p, std::size_t bytes, cudaStream_t active_stream = nullptr)
    {
        return DeviceAllocate(-1, p, bytes, active_stream);
    }

    cudaError_t DeviceFree(int, void *p) { return DeviceFree(p); }
    cudaError_t DeviceFree(void *p)
    {
        block b;
        std::size_t most;
        try {
            if (!find(p, &b, &most)) return free_other(p);
            detail::context_guard guard(b.context);
            cudaError_t code = guard.has_ended() ? galloc_override_free(p, nullptr, GALLOC_OVERRIDE_DEVICE)
                                                 : detail::free_in_order(p, stream_of(b));
            if (code != cudaSuccess) return code; /* the stream is kept for another try */
            forget(p, b);
            guard.leave();
        } catch (const error &e) {
            return e.code();
        } catch (...) {
            return cudaErrorMemoryAllocation;
        }
        (void)trim(b.pool, most); /* the block is free in any case; the next free tries again */
        return cudaSuccess;
    }

    /* Returns unused memory of all devices that this object has used. Waits for the device. */
    cudaError_t FreeAllCached()
    {
        try {
            cudaError_t result = cudaSuccess;
            for (galloc_pool *pool : pools(nullptr)) {
                cudaError_t code = galloc_pool_trim(pool, 0, nullptr);
                if (code == cudaErrorInvalidResourceHandle) continue; /* galloc_shutdown has ended the pool */
                if (code != cudaSuccess) result = code;
            }
            return result;
        } catch (const error &e) {
            return e.code();
        } catch (...) { /* no host memory */
            return cudaErrorMemoryAllocation;
        }
    }

private:
    struct block {
        cudaStream_t stream;
        detail::thread_ref thread;
        detail::context_ref context; /* of a default stream; else none */
        galloc_pool *pool;
        unsigned long long number; /* of the allocation */
    };

    /* The per-thread default stream of another thread has no name here. The legacy stream comes after it. */
    static cudaStream_t stream_of(const block &b)
    {
        return detail::is_per_thread(b.stream) && b.thread != detail::this_thread() ? cudaStreamLegacy : b.stream;
    }

    static cudaError_t withdraw(void **p, const block &b, cudaError_t code)
    {
        if (*p) detail::give_in(b.context, *p, b.stream);
        *p = nullptr;
        return code;
    }

    /* No lock is held while galloc is called: its callbacks may use this object. */
    void remember(void *p, block b)
    {
        detail::guard lock(mutex_);
        bool known = false;
        for (galloc_pool *pool : pools_) known = known || pool == b.pool;
        if (!known) pools_.push_back(b.pool);
        b.number = ++allocations_;
        blocks_[p] = b;
    }

    bool find(void *p, block *b, std::size_t *most)
    {
        detail::guard lock(mutex_);
        auto found = blocks_.find(p);
        if (found == blocks_.end()) return false;
        *b = found->second;
        *most = most_;
        return true;
    }

    /* Another thread may have got the address since the free. */
    void forget(void *p, const block &b)
    {
        detail::guard lock(mutex_);
        auto found = blocks_.find(p);
        if (found != blocks_.end() && found->second.number == b.number) blocks_.erase(found);
    }

    /* As CUB, which calls cudaFree for what is not its own: after a wait for the device. */
    static cudaError_t free_other(void *p)
    {
        galloc_pointer info;
        const cudaError_t code = p ? galloc_pointer_info(p, &info) : galloc_free(p, nullptr);
        if (!p || code != cudaSuccess) return code;
        if (info.state != GALLOC_STATE_FOREIGN) return galloc_override_free(p, nullptr, GALLOC_OVERRIDE_DEVICE);
        return detail::quietly([=] { return cudaFree(p); });
    }

    /* The pools that this object has used. most: the new bound, or NULL. */
    std::vector<galloc_pool *> pools(const std::size_t *most)
    {
        detail::guard lock(mutex_);
        if (most) most_ = *most;
        return pools_;
    }

    static cudaError_t trim(galloc_pool *pool, std::size_t most)
    {
        galloc_stats stats;
        if (most == INVALID_SIZE) return cudaSuccess;
        cudaError_t code = galloc_pool_stats(pool, &stats);
        if (code != cudaSuccess || stats.cached.current <= most) return code;
        return galloc_pool_trim(pool, stats.allocated.current + most, nullptr);
    }

    std::mutex mutex_;
    std::size_t most_;
    const bool skip_cleanup_;
    unsigned long long allocations_ = 0;
    std::unordered_map<void *, block> blocks_;
    std::vector<galloc_pool *> pools_;
};

#if defined(GALLOC_HPP_RMM)
} // namespace with_rmm
#endif
} // inline or unnamed namespace
} // namespace galloc

#endif
