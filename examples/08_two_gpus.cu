/* 08_two_gpus.cu - two devices that exchange halves of their data in every step.

   Shows    one program, two devices: the stream says on which device a block is. Each device has a pool of its own,
            with its own counters, and galloc never changes the current device.
   Gain     as on one device; with cudaMalloc each cudaFree waits for all work of its device.
   Look up  galloc_malloc, galloc_free, galloc_pool_default, galloc_pool_stats, galloc_pointer_info */

#define GALLOC_IMPLEMENTATION
#include "galloc.h"

#include "example.h"

#include <vector>

enum { DEVICES = 2, THREADS = 256 };

static __global__ void fill(uint32_t *p, uint32_t seed, size_t n)
{
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i < n) p[i] = (uint32_t)i * 2654435761u + seed;
}

static __global__ void add_products(const uint32_t *a, const uint32_t *b, size_t n, uint32_t *sum)
{
    uint32_t s = 0;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (size_t)blockDim.x)
        s += a[i] * b[i];
    atomicAdd(sum, s);
}

struct device {
    cudaStream_t stream;
    cudaEvent_t sent, taken; /* its outgoing words are in host memory; it has taken those of the other device */
    uint32_t *outgoing;      /* pinned host memory, which works between any two devices */
    uint32_t *sums;          /* of each step */
    uint32_t *words;         /* of this step */
};

struct pair {
    device at[DEVICES];
    int devices, steps;
    size_t n; /* words of a device */
    std::vector<uint32_t> right;
};

/* Launches on a stream need its device to be the current one; galloc's calls do not. */
static device *use(pair *p, int d)
{
    CHECK(cudaSetDevice(d));
    return &p->at[d];
}

static uint32_t seed_of(int step, int d) { return (uint32_t)(step * DEVICES + d) * 977u; }

static void send(pair *p, int d, int step)
{
    device *here = use(p, d), *there = &p->at[(d + 1) % p->devices];
    CHECK(galloc_malloc(&here->words, p->n * sizeof(uint32_t), here->stream)); /* on the stream's device */
    fill<<<(unsigned)((p->n + THREADS - 1) / THREADS), THREADS, 0, here->stream>>>(here->words, seed_of(step, d), p->n);
    if (step) CHECK(cudaStreamWaitEvent(here->stream, there->taken, 0));
    CHECK(cudaMemcpyAsync(here->outgoing, here->words, p->n / 2 * sizeof(uint32_t), cudaMemcpyDeviceToHost,
                          here->stream));
    CHECK(cudaEventRecord(here->sent, here->stream));
}

/* Takes the other device's half and adds the products with this one's. */
static void receive(pair *p, int d, int step)
{
    device *here = use(p, d), *there = &p->at[(d + 1) % p->devices];
    uint32_t *incoming;
    CHECK(galloc_malloc(&incoming, p->n / 2 * sizeof(uint32_t), here->stream));
    CHECK(cudaStreamWaitEvent(here->stream, there->sent, 0));
    CHECK(cudaMemcpyAsync(incoming, there->outgoing, p->n / 2 * sizeof(uint32_t), cudaMemcpyHostToDevice,
                          here->stream));
    CHECK(cudaEventRecord(here->taken, here->stream));
    add_products<<<8, THREADS, 0, here->stream>>>(here->words, incoming, p->n / 2, here->sums + step);
    CHECK(cudaGetLastError());
    CHECK(galloc_free(incoming, here->stream));
    CHECK(galloc_free(here->words, here->stream));
}

static void run_steps(void *state)
{
    pair *p = (pair *)state;
    std::vector<uint32_t> sums(p->steps);
    for (int d = 0; d < p->devices; d++)
        CHECK(cudaMemsetAsync(use(p, d)->sums, 0, p->steps * sizeof(uint32_t), p->at[d].stream));
    for (int step = 0; step < p->steps; step++) {
        for (int d = 0; d < p->devices; d++) send(p, d, step);
        for (int d = 0; d < p->devices; d++) receive(p, d, step);
    }
    for (int d = 0; d < p->devices; d++) {
        device *here = use(p, d);
        CHECK(cudaMemcpyAsync(sums.data(), here->sums, p->steps * sizeof(uint32_t), cudaMemcpyDeviceToHost,
                              here->stream));
        CHECK(cudaStreamSynchronize(here->stream));
        for (int step = 0; step < p->steps; step++) example_result(sums[step] == p->right[step * p->devices + d]);
    }
}

static uint32_t sum_on_host(const pair *p, int step, int d)
{
    uint32_t sum = 0, mine = seed_of(step, d), theirs = seed_of(step, (d + 1) % p->devices);
    for (size_t i = 0; i < p->n / 2; i++)
        sum += ((uint32_t)i * 2654435761u + mine) * ((uint32_t)i * 2654435761u + theirs);
    return sum;
}

static void open_device(pair *p, int d)
{
    device *here = use(p, d);
    galloc_pointer info;
    CHECK(cudaStreamCreateWithFlags(&here->stream, cudaStreamNonBlocking));
    CHECK(cudaEventCreateWithFlags(&here->sent, cudaEventDisableTiming));
    CHECK(cudaEventCreateWithFlags(&here->taken, cudaEventDisableTiming));
    CHECK(cudaMallocHost((void **)&here->outgoing, p->n / 2 * sizeof(uint32_t)));
    use(p, 0);
    CHECK(galloc_malloc(&here->sums, p->steps * sizeof(uint32_t), here->stream)); /* whichever device is current */
    CHECK(galloc_pointer_info(here->sums, &info));
    example_result(info.device == d);
}

static void close_device(pair *p, int d)
{
    device *here = use(p, d);
    galloc_pool *pool;
    galloc_stats stats;
    CHECK(galloc_pool_default(&pool, d));
    CHECK(galloc_pool_stats(pool, &stats));
    printf("device %d: its pool served %d requests and holds %zu KiB\n", d, (int)stats.mallocs,
           stats.reserved.current / 1024);
    CHECK(galloc_free(here->sums, here->stream));
    CHECK(cudaFreeHost(here->outgoing));
    CHECK(cudaEventDestroy(here->sent));
    CHECK(cudaEventDestroy(here->taken));
    CHECK(galloc_stream_retire(here->stream));
    CHECK(cudaStreamDestroy(here->stream));
}

int main()
{
    if (example_is_simulated()) setenv("SIM_DEVICES", "2", 0);
    example_begin("08_two_gpus");
    pair p = {};
    CHECK(cudaGetDeviceCount(&p.devices));
    if (p.devices > DEVICES) p.devices = DEVICES;
    if (p.devices < DEVICES) printf("this needs two devices: the only one exchanges with itself\n");
    p.steps = example_is_simulated() ? 30 : 200;
    p.n = (size_t)1 << (example_is_simulated() ? 12 : 18);
    printf("%d steps, %zu KiB for each device\n", p.steps, p.n * sizeof(uint32_t) / 1024);
    for (int d = 0; d < p.devices; d++) open_device(&p, d);
    for (int step = 0; step < p.steps; step++)
        for (int d = 0; d < p.devices; d++) p.right.push_back(sum_on_host(&p, step, d));

    example_compare("step", p.steps, run_steps, &p);

    for (int d = 0; d < p.devices; d++) close_device(&p, d);
    use(&p, 0);
    return example_end();
}
