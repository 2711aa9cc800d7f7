/* 02_reuse.cu - a pipeline of kernels that allocates its temporaries as it goes.

   Shows    reuse within a stream: each temporary is freed as soon as the kernel that reads it last is queued, and
            the next one takes its memory. Nothing waits for the device in between, except cudaFree.
   Gain     a step takes hardly longer than with buffers that were made beforehand, and 20 % less time than with
            cudaMallocAsync; with cudaMalloc it takes three times as long.
   Look up  galloc_malloc, galloc_free, ON STREAMS in galloc.h */

#define GALLOC_IMPLEMENTATION
#include "galloc.h"

#include "example.h"

#include <vector>

enum { TEMPORARIES = 6, THREADS = 256 };

static __host__ __device__ uint32_t mix(uint32_t x)
{
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

static __device__ size_t thread() { return blockIdx.x * (size_t)blockDim.x + threadIdx.x; }

static __global__ void spread(const uint32_t *in, uint32_t step, size_t n, uint32_t *a, uint32_t *weight)
{
    size_t i = thread();
    if (i >= n) return;
    a[i] = mix(in[i] + step);
    weight[i] = mix(a[i]) & 3;
}

static __global__ void smooth(const uint32_t *a, const uint32_t *weight, size_t n, uint32_t *b)
{
    size_t i = thread();
    if (i < n) b[i] = a[i] + weight[i] * a[(i + 1) % n];
}

static __global__ void fold(const uint32_t *b, size_t n, uint32_t *c)
{
    size_t i = thread();
    if (i < n / 2) c[i] = b[i] ^ b[n - 1 - i];
}

static __global__ void count_and_add(const uint32_t *c, size_t n, uint32_t *histogram, uint32_t *sums)
{
    size_t i = thread();
    if (i >= n) return;
    atomicAdd(&histogram[c[i] & 255], 1u);
    atomicAdd(&sums[i / THREADS], c[i]);
}

static __global__ void digest(const uint32_t *histogram, const uint32_t *sums, size_t n, uint32_t *result)
{
    uint32_t sum = histogram[threadIdx.x] * threadIdx.x;
    for (size_t i = threadIdx.x; i < n; i += THREADS) sum += sums[i];
    atomicAdd(result, sum);
}

/* ---- a step ------------------------------------------------------------------------------------------------------ */

static size_t longest; /* words of a temporary */

static uint32_t input_at(size_t i) { return mix((uint32_t)i); }

/* Mostly up to 256 KiB, now and then 4 MiB; on the simulated device a thirty-second of that. */
static size_t length_of(int step) { return step % 32 == 31 ? longest : longest / 4096 + mix(step) % (longest / 16); }

/* Takes a temporary of so many words. */
static uint32_t *take(size_t words, cudaStream_t s)
{
    uint32_t *p;
    CHECK(galloc_malloc(&p, words * sizeof *p, s));
    return p;
}

static void queue_step(const uint32_t *in, int step, uint32_t *result, cudaStream_t s)
{
    size_t n = length_of(step), half = n / 2, chunks = (half + THREADS - 1) / THREADS;
    unsigned blocks = (unsigned)((n + THREADS - 1) / THREADS);

    uint32_t *a = take(n, s), *weight = take(n, s);
    spread<<<blocks, THREADS, 0, s>>>(in, (uint32_t)step, n, a, weight);
    uint32_t *b = take(n, s);
    smooth<<<blocks, THREADS, 0, s>>>(a, weight, n, b);
    CHECK(galloc_free(a, s)); /* smooth may still run: what reuses the memory on this stream comes after it */
    CHECK(galloc_free(weight, s));
    uint32_t *c = take(half, s);
    fold<<<blocks, THREADS, 0, s>>>(b, n, c);
    CHECK(galloc_free(b, s));
    uint32_t *histogram = take(256, s), *sums = take(chunks, s);
    CHECK(cudaMemsetAsync(histogram, 0, 256 * sizeof *histogram, s));
    CHECK(cudaMemsetAsync(sums, 0, chunks * sizeof *sums, s));
    count_and_add<<<blocks, THREADS, 0, s>>>(c, half, histogram, sums);
    CHECK(galloc_free(c, s));
    digest<<<1, THREADS, 0, s>>>(histogram, sums, chunks, result);
    CHECK(galloc_free(histogram, s));
    CHECK(galloc_free(sums, s));
    CHECK(cudaGetLastError());
}

static uint32_t result_on_host(int step)
{
    size_t n = length_of(step);
    std::vector<uint32_t> a(n), b(n);
    uint32_t sum = 0;
    for (size_t i = 0; i < n; i++) a[i] = mix(input_at(i) + (uint32_t)step);
    for (size_t i = 0; i < n; i++) b[i] = a[i] + (mix(a[i]) & 3) * a[i + 1 < n ? i + 1 : 0];
    for (size_t i = 0; i < n / 2; i++) sum += (b[i] ^ b[n - 1 - i]) + ((b[i] ^ b[n - 1 - i]) & 255);
    return sum;
}

/* ---- the comparison ---------------------------------------------------------------------------------------------- */

struct pipeline {
    cudaStream_t stream;
    uint32_t *in, *results;
    std::vector<uint32_t> right;
};

static void run_steps(void *state)
{
    pipeline *p = (pipeline *)state;
    int steps = (int)p->right.size();
    std::vector<uint32_t> found(steps);
    CHECK(cudaMemsetAsync(p->results, 0, steps * sizeof(uint32_t), p->stream));
    for (int step = 0; step < steps; step++) queue_step(p->in, step, p->results + step, p->stream);
    CHECK(cudaMemcpyAsync(found.data(), p->results, steps * sizeof(uint32_t), cudaMemcpyDeviceToHost, p->stream));
    CHECK(cudaStreamSynchronize(p->stream));
    for (int step = 0; step < steps; step++) example_result(found[step] == p->right[step]);
}

int main()
{
    example_begin("02_reuse");
    pipeline p = {};
    int steps = example_is_simulated() ? 64 : 1000;
    longest = (size_t)1 << (example_is_simulated() ? 15 : 20);
    printf("%d steps, %d temporaries each, of up to %zu KiB\n", steps, TEMPORARIES, longest * sizeof(uint32_t) / 1024);

    for (int step = 0; step < steps; step++) p.right.push_back(result_on_host(step));
    std::vector<uint32_t> input(longest);
    for (size_t i = 0; i < longest; i++) input[i] = input_at(i);
    CHECK(cudaStreamCreateWithFlags(&p.stream, cudaStreamNonBlocking));
    CHECK(galloc_malloc(&p.in, longest * sizeof *p.in, p.stream));
    CHECK(galloc_malloc(&p.results, steps * sizeof *p.results, p.stream));
    CHECK(cudaMemcpyAsync(p.in, input.data(), longest * sizeof *p.in, cudaMemcpyHostToDevice, p.stream));
    CHECK(cudaStreamSynchronize(p.stream));

    example_keep(TEMPORARIES, longest * sizeof(uint32_t));
    example_compare("step", steps, run_steps, &p);

    CHECK(galloc_free(p.in, p.stream));
    CHECK(galloc_free(p.results, p.stream));
    CHECK(galloc_stream_retire(p.stream));
    CHECK(cudaStreamDestroy(p.stream));
    return example_end();
}
