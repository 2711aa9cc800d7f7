/* 09_raii.cpp - C++: a class that owns device memory, in a program that never calls malloc or free itself.

   Shows    RAII over the C functions: memory that is freed with its owner, on the stream that it belongs to; owners
            that move, grow and throw. No nvcc: any compiler of C++ does, since kernels are elsewhere.
   Gain     that of the C functions: the class adds nothing to them, so that temporaries may be local variables.
   Look up  galloc_malloc, galloc_free, galloc_malloc_growable, galloc_resize, galloc_record_stream */

#define GALLOC_IMPLEMENTATION
#include "galloc.h"

#include "example.h"

#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

/* ---- the classes: copy these ------------------------------------------------------------------------------------- */

/* Throws std::bad_alloc where memory ran out, and the message of galloc or CUDA otherwise. */
static void expect(cudaError_t error)
{
    if (error == cudaSuccess) return;
    if (error == cudaErrorMemoryAllocation) throw std::bad_alloc();
    throw std::runtime_error(std::string(cudaGetErrorString(error)) + ": " + galloc_last_message());
}

/* A non-blocking stream. It must outlive the memory that is freed on it. */
class device_stream {
    cudaStream_t stream = nullptr;

  public:
    device_stream() { expect(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)); }
    device_stream(const device_stream &) = delete;
    device_stream &operator=(const device_stream &) = delete;
    ~device_stream()
    {
        (void)galloc_stream_retire(stream);
        (void)cudaStreamDestroy(stream);
    }
    operator cudaStream_t() const { return stream; }
};

/* `size` objects of type T on the device, for work on a stream. Freed there: work that is queued may still use them. */
template <class T> class device_array {
    T *first = nullptr;
    size_t count = 0;
    cudaStream_t stream = nullptr;

  public:
    device_array() = default;
    device_array(size_t n, cudaStream_t s) : count(n), stream(s) { expect(galloc_malloc(&first, n * sizeof(T), s)); }
    device_array(size_t n, size_t most, cudaStream_t s) : count(n), stream(s)
    {
        expect(galloc_malloc_growable(&first, n * sizeof(T), most * sizeof(T), s));
    }
    device_array(device_array &&other) noexcept { swap(other); }
    device_array &operator=(device_array &&other) noexcept
    {
        device_array(std::move(other)).swap(*this); /* what this had is freed here */
        return *this;
    }
    ~device_array() { (void)galloc_free(first, stream); } /* NULL does nothing */

    void swap(device_array &other) noexcept
    {
        std::swap(first, other.first);
        std::swap(count, other.count);
        std::swap(stream, other.stream);
    }
    /* Another stream uses it too; it must be ordered after what this stream has done so far. */
    void also_used_on(cudaStream_t other) { expect(galloc_record_stream(first, other)); }
    /* In place, for an array that was made with `most`. Addresses stay. */
    void resize(size_t n)
    {
        expect(galloc_resize(first, n * sizeof(T), stream));
        count = n;
    }
    T *data() const { return first; }
    size_t size() const { return count; }
    size_t bytes() const { return count * sizeof(T); }
};

/* ---- a program that uses them ------------------------------------------------------------------------------------ */

/* Made of a temporary and a result; the temporary's memory is there for the next caller. */
static device_array<unsigned char> doubled(const device_array<unsigned char> &in, cudaStream_t s)
{
    device_array<unsigned char> temporary(in.size(), s), out(2 * in.size(), s);
    expect(cudaMemcpyAsync(temporary.data(), in.data(), in.bytes(), cudaMemcpyDeviceToDevice, s));
    expect(cudaMemcpyAsync(out.data(), temporary.data(), in.bytes(), cudaMemcpyDeviceToDevice, s));
    expect(cudaMemcpyAsync(out.data() + in.size(), temporary.data(), in.bytes(), cudaMemcpyDeviceToDevice, s));
    return out;
}

static void run_steps(void *state)
{
    cudaStream_t s = *(device_stream *)state;
    std::vector<unsigned char> host(8 << 10);
    for (int step = 0; step < 50; step++) {
        device_array<unsigned char> a(1 << 10, s);
        expect(cudaMemsetAsync(a.data(), step, a.bytes(), s));
        for (int i = 0; i < 3; i++) a = doubled(a, s);
        if (step == 49) expect(cudaMemcpyAsync(host.data(), a.data(), a.bytes(), cudaMemcpyDeviceToHost, s));
    }
    expect(cudaStreamSynchronize(s));
    int right = 0;
    for (unsigned char c : host) right += c == 49;
    example_result(right == 8 << 10);
}

/* Owners in containers, by pointer, and in a function that throws. */
static void show_owners(cudaStream_t s, cudaStream_t other)
{
    std::vector<device_array<float>> layers;
    for (size_t i = 1; i <= 10; i++) layers.emplace_back(i * 1000, s); /* moves them as it grows */
    std::unique_ptr<device_array<float>> one(new device_array<float>(std::move(layers[3])));
    example_result(one->size() == 4000 && layers[3].data() == nullptr);
    one->also_used_on(other);

    device_array<int> cache(1000, 10000000, s);
    const int *before = cache.data();
    cache.resize(5000000);
    example_result(cache.data() == before && cache.bytes() == 20000000);

    try {
        device_array<float> small(1000, s), large(SIZE_MAX / 8, s);
        example_result(0);
    } catch (const std::bad_alloc &) {
        example_result(1); /* the small one has been freed */
    }
}

int main()
{
    example_begin("09_raii");
    galloc_set_log([](int, const char *, void *) {}, nullptr); /* one request fails on purpose */
    try {
        device_stream s, other;
        show_owners(s, other);
        example_compare("step", 50, run_steps, &s);

        galloc_pool *pool;
        galloc_stats stats;
        expect(galloc_pool_default(&pool, -1));
        expect(galloc_pool_stats(pool, &stats));
        example_result(stats.blocks.current == 0 && stats.failures == 1);
        printf("%d allocations, %d frees, %d blocks left\n", (int)stats.mallocs, (int)stats.frees,
               (int)stats.blocks.current);
    } catch (const std::exception &e) {
        fprintf(stderr, "%s\n", e.what());
        return 1;
    }
    return example_end();
}
