/* 04_growing.cu - a vector and a key/value cache that grow where they stand: addresses stay, nothing is copied.

   Shows    blocks with room: addresses up to max_bytes, memory as it is needed. What a growth costs in driver calls:
            first, once finished caches have left their room to the next ones, and when memory was reserved ahead.
   Gain     no copies, and the memory of what is in use; doubling by copies holds up to three times as much.
   Look up  galloc_malloc_growable, galloc_resize, galloc_pool_stats, galloc_pool_trim, ON MEMORY in galloc.h */

#define GALLOC_IMPLEMENTATION
#include "galloc.h"

#include "example.h"

#define MIB ((size_t)1 << 20)

enum { THREADS = 256, SEQUENCES = 8, TOKEN = 65536 }; /* bytes of keys and values for each token */

static unsigned blocks; /* of a launch */
static size_t sparse;   /* so many words one is written: 1; more on the simulated device, which is slow */

/* Writes the words [from, to) of an array. */
static __global__ void fill(uint32_t *p, size_t from, size_t to, size_t every)
{
    size_t threads = gridDim.x * (size_t)blockDim.x, thread = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    for (size_t i = from + every * thread; i < to; i += every * threads) p[i] = (uint32_t)i * 2654435761u;
}

static __global__ void count_wrong(const uint32_t *p, size_t n, size_t every, unsigned *wrong)
{
    size_t threads = gridDim.x * (size_t)blockDim.x, thread = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    for (size_t i = every * thread; i < n; i += every * threads)
        if (p[i] != (uint32_t)i * 2654435761u) atomicAdd(wrong, 1u);
}

/* ---- an array that grows ----------------------------------------------------------------------------------------- */

struct array {
    uint32_t *data;
    size_t bytes, capacity;
    int copies; /* times that it had to move */
};

static void array_new(array *a, size_t bytes, size_t max_bytes, cudaStream_t s)
{
    *a = array();
    a->bytes = a->capacity = bytes;
    CHECK(galloc_malloc_growable(&a->data, bytes, max_bytes, s));
    fill<<<blocks, THREADS, 0, s>>>(a->data, 0, bytes / sizeof(uint32_t), sparse);
}

/* Appends words: in place if that can be, else in a copy of twice the size, in stream order. */
static void array_append(array *a, size_t bytes, cudaStream_t s)
{
    size_t needed = a->bytes + bytes;
    if (needed > a->capacity) {
        cudaError_t error = galloc_resize(a->data, needed, s);
        if (error == cudaErrorNotSupported) { /* no room behind the block; with the other allocators always */
            uint32_t *to;
            CHECK(galloc_malloc(&to, 2 * needed, s));
            CHECK(cudaMemcpyAsync(to, a->data, a->bytes, cudaMemcpyDeviceToDevice, s));
            CHECK(galloc_free(a->data, s));
            a->data = to;
            a->capacity = 2 * needed;
            a->copies++;
        } else {
            CHECK(error);
            a->capacity = needed;
        }
    }
    fill<<<blocks, THREADS, 0, s>>>(a->data, a->bytes / sizeof(uint32_t), needed / sizeof(uint32_t), sparse);
    a->bytes = needed;
}

/* ---- the two programs -------------------------------------------------------------------------------------------- */

struct setup {
    cudaStream_t stream;
    unsigned *wrong;          /* words that were not what was written; on the device */
    int pushes, most, copies; /* of the vector; tokens of a sequence, at most; made with galloc */
};

static void array_end(array *a, setup *s)
{
    count_wrong<<<blocks, THREADS, 0, s->stream>>>(a->data, a->bytes / sizeof(uint32_t), sparse, s->wrong);
    CHECK(cudaGetLastError());
    CHECK(galloc_free(a->data, s->stream));
    if (example_with == GALLOC) s->copies += a->copies;
    *a = array();
}

static void expect_right(setup *s)
{
    unsigned wrong;
    CHECK(cudaMemcpyAsync(&wrong, s->wrong, sizeof wrong, cudaMemcpyDeviceToHost, s->stream));
    CHECK(cudaStreamSynchronize(s->stream));
    example_result(wrong == 0);
}

static void run_vector(void *state)
{
    setup *s = (setup *)state;
    array v;
    array_new(&v, TOKEN, s->pushes * (size_t)TOKEN, s->stream);
    for (int i = 1; i < s->pushes; i++) array_append(&v, TOKEN, s->stream);
    array_end(&v, s);
    expect_right(s);
}

/* Several sequences get a token in turn. One that has its length ends, and the next step begins another one. */
static void run_cache(void *state)
{
    setup *s = (setup *)state;
    array cache[SEQUENCES] = {};
    size_t room = s->most * (size_t)TOKEN; /* the same for all, so that each can have the room of another */
    int length[SEQUENCES], begun = 0;
    for (int step = 0; step < 3 * s->most; step++) {
        for (int i = 0; i < SEQUENCES; i++) {
            if (!cache[i].data) {
                array_new(&cache[i], TOKEN, room, s->stream);
                length[i] = s->most / 4 + begun++ * 37 % (s->most * 3 / 4);
            } else {
                array_append(&cache[i], TOKEN, s->stream);
            }
            if ((int)(cache[i].bytes / TOKEN) >= length[i] || step == 3 * s->most - 1)
                array_end(&cache[i], s);
        }
        CHECK(cudaStreamSynchronize(s->stream)); /* a program reads its tokens back here */
    }
    expect_right(s);
}

/* ---- driver calls ------------------------------------------------------------------------------------------------ */

struct driver_calls {
    int memory, events;
};

static driver_calls count_driver_calls(galloc_pool *pool)
{
    galloc_stats stats;
    CHECK(galloc_pool_stats(pool, &stats));
    const galloc_driver *d = &stats.driver;
    return {(int)(d->create + d->map + d->set_access + d->unmap), (int)(d->event_record + d->event_query)};
}

static driver_calls say_driver_calls(const char *when, galloc_pool *pool, setup *s)
{
    driver_calls before = count_driver_calls(pool);
    run_cache(s);
    driver_calls after = count_driver_calls(pool), n = {after.memory - before.memory, after.events - before.events};
    printf("%-28s %4d calls for memory, %3d for events\n", when, n.memory, n.events);
    return n;
}

/* Lets each sequence grow to its whole room once, in the steps of 2 MiB in which caches grow. Freed, the blocks leave
   rooms that have all their memory. */
static void reserve_ahead(setup *s)
{
    void *p[SEQUENCES];
    size_t room = s->most * (size_t)TOKEN;
    for (int i = 0; i < SEQUENCES; i++) {
        CHECK(galloc_malloc_growable(&p[i], 2 * MIB, room, s->stream));
        for (size_t bytes = 4 * MIB; bytes <= room; bytes += 2 * MIB) CHECK(galloc_resize(p[i], bytes, s->stream));
    }
    for (int i = 0; i < SEQUENCES; i++) CHECK(galloc_free(p[i], s->stream));
    CHECK(cudaStreamSynchronize(s->stream));
}

int main()
{
    example_begin("04_growing");
    setup s = {};
    galloc_pool *pool;
    blocks = example_is_simulated() ? 1 : 16;
    sparse = example_is_simulated() ? 64 : 1;
    s.pushes = example_is_simulated() ? 128 : 4096;
    s.most = example_is_simulated() ? 96 : 512;
    CHECK(cudaStreamCreateWithFlags(&s.stream, cudaStreamNonBlocking));
    CHECK(cudaMalloc(&s.wrong, sizeof *s.wrong));
    CHECK(cudaMemsetAsync(s.wrong, 0, sizeof *s.wrong, s.stream));
    CHECK(galloc_pool_default(&pool, -1));

    printf("%d sequences in a cache, up to %zu MiB each, %d tokens:\n", SEQUENCES, s.most * TOKEN / MIB,
           SEQUENCES * 3 * s.most);
    say_driver_calls("the first time", pool, &s);
    say_driver_calls("again, in the same rooms", pool, &s);
    CHECK(galloc_pool_trim(pool, 0, NULL));
    reserve_ahead(&s);
    example_result_by_default(say_driver_calls("with memory reserved ahead", pool, &s).memory == 0);

    example_compare("token", SEQUENCES * 3 * s.most, run_cache, &s);
    printf("a vector of %zu MiB, pushed by %d KiB\n", s.pushes * TOKEN / MIB, TOKEN / 1024);
    example_compare("push", s.pushes, run_vector, &s);
    example_result_by_default(s.copies == 0);

    CHECK(cudaFree(s.wrong));
    CHECK(galloc_stream_retire(s.stream));
    CHECK(cudaStreamDestroy(s.stream));
    return example_end();
}
