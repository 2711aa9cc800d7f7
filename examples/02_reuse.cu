/* 02_reuse.cu - a pipeline of kernels that allocates its temporaries as it goes.

   Shows what that costs with cudaMalloc, with cudaMallocAsync, with galloc, and with no allocation at all (buffers made
   beforehand, large enough for every step). Each step has another size, needs six temporaries and gives each back as
   soon as the kernel that reads it is queued; nothing waits for the device in between, except cudaFree. Every result is
   compared with one computed on the host.

   Run       make examples, then build/examples/02_reuse-cuda (needs a GPU)
   Expected  a table with a line for each: galloc close to no allocation at all, the others behind. The status is 0 when
             all results are right, whatever the times, and 2 without a GPU. */

#define GALLOC_IMPLEMENTATION
#include "galloc.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(call)                                                                                                    \
    do {                                                                                                               \
        cudaError_t check_error = (call);                                                                              \
        if (check_error == cudaSuccess) break;                                                                         \
        fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(check_error));                \
        exit(1);                                                                                                       \
    } while (0)

enum { STEPS = 1000, ROUNDS = 5, TEMPORARIES = 6, LONGEST = 1 << 20, THREADS = 256 };

/* ---- allocators -------------------------------------------------------------------------------------------------- */

struct allocator {
    const char *name;
    cudaError_t (*take)(void **ptr, size_t bytes, cudaStream_t stream);
    cudaError_t (*give)(void *ptr, cudaStream_t stream);
};

static cudaError_t plain_malloc(void **ptr, size_t bytes, cudaStream_t) { return cudaMalloc(ptr, bytes); }
static cudaError_t plain_free(void *ptr, cudaStream_t) { return cudaFree(ptr); }
static cudaError_t async_malloc(void **ptr, size_t bytes, cudaStream_t s) { return cudaMallocAsync(ptr, bytes, s); }
static cudaError_t async_free(void *ptr, cudaStream_t stream) { return cudaFreeAsync(ptr, stream); }

static void *kept[TEMPORARIES];
static cudaError_t kept_malloc(void **ptr, size_t, cudaStream_t)
{
    static int next;
    *ptr = kept[next++ % TEMPORARIES];
    return cudaSuccess;
}
static cudaError_t kept_free(void *, cudaStream_t) { return cudaSuccess; }

static const allocator allocators[] = {
    {"cudaMalloc", plain_malloc, plain_free},
    {"cudaMallocAsync", async_malloc, async_free},
    {"galloc", galloc_malloc, galloc_free},
    {"no allocation", kept_malloc, kept_free},
};
enum { GALLOC = 2, ALLOCATORS = 4 };

/* ---- the pipeline ------------------------------------------------------------------------------------------------ */

static __host__ __device__ uint32_t mix(uint32_t x)
{
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

static __device__ size_t index() { return blockIdx.x * (size_t)blockDim.x + threadIdx.x; }

static __global__ void spread(const uint32_t *in, uint32_t step, size_t n, uint32_t *a, uint32_t *weight)
{
    size_t i = index();
    if (i >= n) return;
    a[i] = mix(in[i] + step);
    weight[i] = mix(a[i]) & 3;
}

static __global__ void smooth(const uint32_t *a, const uint32_t *weight, size_t n, uint32_t *b)
{
    size_t i = index();
    if (i < n) b[i] = a[i] + weight[i] * a[(i + 1) % n];
}

static __global__ void fold(const uint32_t *b, size_t n, uint32_t *c)
{
    size_t i = index();
    if (i < n / 2) c[i] = b[i] ^ b[n - 1 - i];
}

static __global__ void count_and_add(const uint32_t *c, size_t n, uint32_t *histogram, uint32_t *sums)
{
    size_t i = index();
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

static uint32_t input_at(size_t i) { return mix((uint32_t)i); }

/* 1 KiB to 256 KiB for each temporary, now and then 4 MiB. */
static size_t length_of(int step) { return step % 32 == 31 ? (size_t)LONGEST : 256 + mix((uint32_t)step) % 65280; }

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

/* ---- a run ------------------------------------------------------------------------------------------------------- */

static double now_us()
{
    using namespace std::chrono;
    return duration<double, std::micro>(steady_clock::now().time_since_epoch()).count();
}

struct run {
    const allocator *with;
    cudaStream_t stream;
    double us; /* spent in malloc and free */
};

static uint32_t *take(run *r, size_t words)
{
    void *ptr;
    double begin = now_us();
    CHECK(r->with->take(&ptr, words * sizeof(uint32_t), r->stream));
    r->us += now_us() - begin;
    return static_cast<uint32_t *>(ptr);
}

static void give(run *r, uint32_t *ptr)
{
    double begin = now_us();
    CHECK(r->with->give(ptr, r->stream));
    r->us += now_us() - begin;
}

static void queue_step(run *r, const uint32_t *in, int step, uint32_t *result)
{
    size_t n = length_of(step), half = n / 2, chunks = (half + THREADS - 1) / THREADS;
    unsigned blocks = (unsigned)((n + THREADS - 1) / THREADS);
    cudaStream_t s = r->stream;

    uint32_t *a = take(r, n), *weight = take(r, n);
    spread<<<blocks, THREADS, 0, s>>>(in, (uint32_t)step, n, a, weight);
    uint32_t *b = take(r, n);
    smooth<<<blocks, THREADS, 0, s>>>(a, weight, n, b);
    give(r, a);
    give(r, weight);
    uint32_t *c = take(r, half);
    fold<<<blocks, THREADS, 0, s>>>(b, n, c);
    give(r, b);
    uint32_t *histogram = take(r, 256), *sums = take(r, chunks);
    CHECK(cudaMemsetAsync(histogram, 0, 256 * sizeof *histogram, s));
    CHECK(cudaMemsetAsync(sums, 0, chunks * sizeof *sums, s));
    count_and_add<<<blocks, THREADS, 0, s>>>(c, half, histogram, sums);
    give(r, c);
    digest<<<1, THREADS, 0, s>>>(histogram, sums, chunks, result);
    give(r, histogram);
    give(r, sums);
}

/* What a round took for each step, in all and of that in the allocator. */
struct timing {
    double step, allocator;
};

static timing time_round(const allocator *with, cudaStream_t stream, const uint32_t *in, uint32_t *results, int *wrong,
                         const std::vector<uint32_t> &right)
{
    run r = {with, stream, 0};
    std::vector<uint32_t> found(STEPS);
    CHECK(cudaMemsetAsync(results, 0, STEPS * sizeof *results, stream));
    CHECK(cudaStreamSynchronize(stream));
    double begin = now_us();
    for (int step = 0; step < STEPS; step++) queue_step(&r, in, step, results + step);
    CHECK(cudaStreamSynchronize(stream));
    double us = now_us() - begin;
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(found.data(), results, STEPS * sizeof *results, cudaMemcpyDeviceToHost));
    for (int step = 0; step < STEPS; step++) *wrong += found[step] != right[step];
    timing t = {us / STEPS, r.us / STEPS};
    return t;
}

static bool is_shorter(const timing &a, const timing &b) { return a.step < b.step; }

static void prepare(uint32_t **in, uint32_t **results)
{
    std::vector<uint32_t> input(LONGEST);
    cudaMemPool_t pool;
    uint64_t everything = UINT64_MAX;
    int device;
    for (size_t i = 0; i < input.size(); i++) input[i] = input_at(i);
    CHECK(cudaMalloc(in, LONGEST * sizeof **in));
    CHECK(cudaMalloc(results, STEPS * sizeof **results));
    CHECK(cudaMemcpy(*in, input.data(), LONGEST * sizeof **in, cudaMemcpyHostToDevice));
    for (int i = 0; i < TEMPORARIES; i++) CHECK(cudaMalloc(&kept[i], LONGEST * sizeof(uint32_t)));
    CHECK(cudaGetDevice(&device)); /* cudaMallocAsync at its best: nothing is given back at a synchronisation */
    CHECK(cudaDeviceGetDefaultMemPool(&pool, device));
    CHECK(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &everything));
}

int main()
{
    int devices = 0, wrong = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        fprintf(stderr, "02_reuse: no GPU\n");
        return 2;
    }
    uint32_t *in, *results;
    cudaStream_t stream;
    prepare(&in, &results);
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    std::vector<uint32_t> right(STEPS);
    for (int step = 0; step < STEPS; step++) right[step] = result_on_host(step);

    /* The first round fills caches and loads kernels. The allocators take turns: a slow moment hits them alike. */
    std::vector<timing> rounds[ALLOCATORS];
    for (int round = 0; round <= ROUNDS; round++) {
        for (int i = 0; i < ALLOCATORS; i++) {
            timing t = time_round(&allocators[i], stream, in, results, &wrong, right);
            if (round > 0) rounds[i].push_back(t);
        }
    }

    timing median[ALLOCATORS];
    for (int i = 0; i < ALLOCATORS; i++) {
        std::sort(rounds[i].begin(), rounds[i].end(), is_shorter);
        median[i] = rounds[i][ROUNDS / 2];
    }
    printf("%d steps, %d temporaries each; median of %d rounds\n", STEPS, TEMPORARIES, ROUNDS);
    printf("%-16s %12s %22s %14s\n", "", "us per step", "of that in malloc/free", "galloc's gain");
    for (int i = 0; i < ALLOCATORS; i++) {
        printf("%-16s %12.2f %22.2f", allocators[i].name, median[i].step, median[i].allocator);
        if (i < GALLOC) printf(" %8.2f times", median[i].step / median[GALLOC].step);
        printf("\n");
    }
    printf("%d results, %d wrong\n", STEPS * (ROUNDS + 1) * ALLOCATORS, wrong);
    CHECK(cudaStreamDestroy(stream));
    CHECK(galloc_shutdown());
    return wrong != 0;
}
