/* 03_two_streams.cu - one stream produces, another one consumes, and memory goes from hand to hand.

   Shows    three ways to end a block that two streams use: free it on the one that uses it last, or name both at
            the free, or before it.
            Later steps take the memory once the work on it is complete; no stream waits for that.
   Gain     cudaFree waits for both streams at each step, so that they never run at the same time.
   Look up  galloc_free, galloc_free_after, galloc_record_stream, ON STREAMS in galloc.h */

#define GALLOC_IMPLEMENTATION
#include "galloc.h"

#include "example.h"

#include <vector>

enum { THREADS = 256 };

static __host__ __device__ uint32_t mix(uint32_t x)
{
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

static __global__ void fill(uint32_t *p, uint32_t seed, size_t n)
{
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i < n) p[i] = mix((uint32_t)i + seed);
}

/* Each thread adds some products to the result. */
static __global__ void add_products(const uint32_t *a, const uint32_t *b, size_t n, uint32_t *result)
{
    uint32_t sum = 0;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (size_t)blockDim.x)
        sum += a[i] * b[i];
    atomicAdd(result, sum);
}

struct exchange {
    cudaStream_t producer, consumer;
    cudaEvent_t produced;
    uint32_t *results; /* two for each step */
    size_t n;          /* words of a chunk */
    std::vector<uint32_t> right;
};

/* Frees a block that both streams have used, in no order to each other. cudaMallocAsync has no such call: there the
   program must order one stream after the other, which costs it their independence. */
static void free_after_both(exchange *e, void *p)
{
    const cudaStream_t both[] = {e->producer, e->consumer};
    if (example_with == GALLOC) {
        CHECK(galloc_free_after(p, both, 2));
        return;
    }
    if (example_with == CUDA_MALLOC_ASYNC) {
        CHECK(cudaEventRecord(e->produced, e->producer));
        CHECK(cudaStreamWaitEvent(e->consumer, e->produced, 0));
    }
    CHECK(galloc_free(p, e->consumer));
}

static void queue_step(exchange *e, uint32_t step)
{
    unsigned blocks = (unsigned)((e->n + THREADS - 1) / THREADS), few = (blocks + 15) / 16;
    uint32_t *chunk, *weights;
    CHECK(galloc_malloc(&chunk, e->n * sizeof *chunk, e->producer)); /* for the stream that uses it first */
    CHECK(galloc_malloc(&weights, e->n * sizeof *weights, e->producer));
    fill<<<blocks, THREADS, 0, e->producer>>>(chunk, step, e->n);
    fill<<<blocks, THREADS, 0, e->producer>>>(weights, ~step, e->n);
    CHECK(cudaEventRecord(e->produced, e->producer));

    /* The hand-over: whoever uses memory on another stream orders that stream after the first. */
    CHECK(cudaStreamWaitEvent(e->consumer, e->produced, 0));
    add_products<<<few, THREADS, 0, e->consumer>>>(chunk, weights, e->n, e->results + 2 * step);
    CHECK(galloc_free(chunk, e->consumer)); /* on the stream that used it last */

    /* Meanwhile the producer goes on with the weights: two streams use them, and neither is the last. */
    add_products<<<few, THREADS, 0, e->producer>>>(weights, weights, e->n, e->results + 2 * step + 1);
    free_after_both(e, weights);
    CHECK(cudaGetLastError());
}

static void run_steps(void *state)
{
    exchange *e = (exchange *)state;
    size_t results = e->right.size();
    std::vector<uint32_t> found(results);
    CHECK(cudaMemsetAsync(e->results, 0, results * sizeof(uint32_t), e->producer));
    for (uint32_t step = 0; step < results / 2; step++) queue_step(e, step);
    CHECK(cudaStreamSynchronize(e->producer));
    CHECK(cudaMemcpyAsync(found.data(), e->results, results * sizeof(uint32_t), cudaMemcpyDeviceToHost, e->consumer));
    CHECK(cudaStreamSynchronize(e->consumer));
    for (size_t i = 0; i < results; i++) example_result(found[i] == e->right[i]);
}

/* What the streams' results should be. */
static void compute_on_host(exchange *e, uint32_t step)
{
    uint32_t produced = 0, consumed = 0;
    for (size_t i = 0; i < e->n; i++) {
        uint32_t weight = mix((uint32_t)i + ~step);
        consumed += mix((uint32_t)i + step) * weight;
        produced += weight * weight;
    }
    e->right.push_back(consumed);
    e->right.push_back(produced);
}

static void end_stream(cudaStream_t stream)
{
    CHECK(galloc_stream_retire(stream));
    CHECK(cudaStreamDestroy(stream));
}

int main()
{
    example_begin("03_two_streams");
    exchange e = {};
    uint32_t steps = example_is_simulated() ? 40 : 200;
    e.n = (size_t)1 << (example_is_simulated() ? 13 : 20);
    printf("%u steps, two blocks of %zu KiB each\n", steps, e.n * sizeof(uint32_t) / 1024);
    CHECK(cudaStreamCreateWithFlags(&e.producer, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&e.consumer, cudaStreamNonBlocking));
    CHECK(cudaEventCreateWithFlags(&e.produced, cudaEventDisableTiming));
    CHECK(galloc_malloc(&e.results, 2 * steps * sizeof(uint32_t), e.producer));
    CHECK(galloc_record_stream(e.results, e.consumer)); /* known beforehand: this stream will use it too */
    for (uint32_t step = 0; step < steps; step++) compute_on_host(&e, step);

    example_compare("step", (int)steps, run_steps, &e);

    galloc_pool *pool;
    galloc_stats stats;
    CHECK(galloc_pool_default(&pool, -1));
    CHECK(galloc_pool_stats(pool, &stats));
    printf("galloc held %zu KiB at most, and queued %d waits\n", stats.reserved.peak / 1024, (int)stats.waits);

    CHECK(galloc_free(e.results, e.producer)); /* and after the consumer's work, as recorded */
    CHECK(cudaEventDestroy(e.produced));
    end_stream(e.producer);
    end_stream(e.consumer);
    return example_end();
}
