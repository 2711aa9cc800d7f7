/* 09_raii.cpp - C++: device memory that is freed with its owner, in a program that never calls malloc or free itself.

   Shows    the owners of cpp/galloc.hpp, which call the C functions: temporaries as local variables, members,
            containers; owners that move, that grow, and that go when something throws.
   Gain     that of the C functions, since the owners add nothing to them. An owner over cudaMalloc would wait for the
            device at the end of each block of code.
   Look up  make_unique, growable and stream in cpp/galloc.hpp; galloc_record_stream, galloc_set_log in galloc.h */

#define GALLOC_IMPLEMENTATION
#include "galloc.h"

#include "example.h"

#include "cpp/galloc.hpp" /* after example.h, so that its calls are compared with those of other allocators */

#include <vector>

enum { STEPS = 50, WORDS = 1 << 10, LAYERS = 4 };

typedef galloc::unique_ptr<unsigned char> buffer;

/* A result twice as long as the input, by way of a temporary. Its memory is there for the next caller as soon as this
   returns, though the copies may still run: later work on the stream comes after them. */
static buffer doubled(const buffer &in, size_t n, cudaStream_t s)
{
    buffer temporary = galloc::make_unique<unsigned char>(n, s), out = galloc::make_unique<unsigned char>(2 * n, s);
    CHECK(cudaMemcpyAsync(temporary.get(), in.get(), n, cudaMemcpyDeviceToDevice, s));
    CHECK(cudaMemcpyAsync(out.get(), temporary.get(), n, cudaMemcpyDeviceToDevice, s));
    CHECK(cudaMemcpyAsync(out.get() + n, temporary.get(), n, cudaMemcpyDeviceToDevice, s));
    return out;
}

static void run_steps(void *state)
{
    const galloc::stream &s = *(galloc::stream *)state;
    std::vector<unsigned char> host(WORDS << LAYERS);
    size_t right = 0;
    for (int step = 0; step < STEPS; step++) {
        buffer a = galloc::make_unique<unsigned char>(WORDS, s);
        CHECK(cudaMemsetAsync(a.get(), step, WORDS, s));
        for (int i = 0; i < LAYERS; i++) a = doubled(a, (size_t)WORDS << i, s); /* frees what `a` had */
        if (step == STEPS - 1) CHECK(cudaMemcpyAsync(host.data(), a.get(), host.size(), cudaMemcpyDeviceToHost, s));
    }
    s.synchronize();
    for (unsigned char c : host) right += c == STEPS - 1;
    example_result(right == host.size());
}

/* Owners as members. A copy of a network would have to copy device memory; it moves instead. */
struct layer {
    galloc::unique_ptr<float> weights;
    galloc::growable<float> cache;
    layer(size_t n, size_t most, cudaStream_t s) : weights(galloc::make_unique<float>(n, s)), cache(most, s) {}
};

static void show_owners(const galloc::stream &s, const galloc::stream &other)
{
    std::vector<layer> layers;
    for (size_t i = 1; i <= 10; i++) layers.emplace_back(i * 1000, (size_t)1 << 24, s); /* they move as it grows */
    const float *before = layers[3].cache.data();
    layers[3].cache.resize(1 << 20);
    example_result(layers[3].cache.data() == before && layers[3].cache.size() == 1 << 20);

    /* Another stream uses the weights too: it is ordered after this one, and galloc is told. */
    CHECK(galloc_record_stream(layers[3].weights.get(), other));

    try {
        buffer small = galloc::make_unique<unsigned char>(1000, s);
        buffer large = galloc::make_unique<unsigned char>(SIZE_MAX / 2, s);
        example_result(0);
    } catch (const std::bad_alloc &) { /* also galloc::out_of_memory; the small one has been freed */
        example_result(1);
    }
}

int main()
{
    example_begin("09_raii");
    galloc_set_log([](int, const char *, void *) {}, nullptr); /* one request fails on purpose */
    try {
        galloc::stream s, other; /* retired and destroyed at the end of this block, after what is freed on them */
        show_owners(s, other);
        example_compare("step", STEPS, run_steps, &s);
    } catch (const std::exception &e) {
        fprintf(stderr, "%s\n", e.what());
        return 1;
    }
    galloc_pool *pool;
    galloc_stats stats;
    CHECK(galloc_pool_default(&pool, -1));
    CHECK(galloc_pool_stats(pool, &stats));
    printf("%d allocations, %d frees, %d blocks left\n", (int)stats.mallocs, (int)stats.frees,
           (int)stats.blocks.current);
    example_result(stats.blocks.current == 0 && stats.failures == 1);
    return example_end();
}
