/* preload_program.cu PART - a program that knows nothing of galloc; preload.sh runs it with and without
   examples/preload. It checks what it computes, and prints one line of JSON: a result that must not depend on who
   allocates, the memory of the device that was in use at most, beyond what was at the start, and the mean host time of
   an allocation with its free. */

#include <cuda.h>
#include <cuda_runtime.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

static uint64_t result = 14695981039346656037ull;
static int wrong;

static void add(uint64_t value) { result = (result ^ value) * 1099511628211ull; }

static void check(cudaError_t error, const char *call, int line)
{
    if (error == cudaSuccess) return;
    fprintf(stderr, "line %d: %s: %s\n", line, call, cudaGetErrorString(error));
    exit(2);
}
#define CHECK(call) check((call), #call, __LINE__)

static void expect(bool holds, const char *what, int line)
{
    if (!holds) fprintf(stderr, "line %d: %s\n", line, what), wrong++;
}
#define EXPECT(condition) expect((condition), #condition, __LINE__)

__global__ void fill(unsigned *p, size_t n, unsigned seed)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        p[i] = seed + (unsigned)i;
}

__global__ void differs(const unsigned *p, size_t n, unsigned seed, unsigned *count)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        if (p[i] != seed + (unsigned)i) atomicAdd(count, 1);
}

__global__ void spin(long long cycles)
{
    for (long long begin = clock64(); clock64() - begin < cycles;) continue;
}

static size_t used_at_first, used_at_most;

static size_t used()
{
    size_t left = 0, total = 0;
    CHECK(cudaMemGetInfo(&left, &total));
    return total - left;
}

static void sample()
{
    size_t now = used() - used_at_first;
    if (now < (size_t)1 << 60 && now > used_at_most) used_at_most = now;
}

static double seconds()
{
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

static double allocating;
static long pairs;

struct random_numbers {
    uint64_t state;
    unsigned operator()(unsigned below)
    {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        return (unsigned)(state >> 33) % below;
    }
};

struct block {
    unsigned *p;
    size_t n;
    unsigned seed;
};

static const int streams_of_a_part = 4;

/* Blocks of 4 bytes to 64 MiB come and go, written and read on streams that take turns. */
static void churn(bool ordered, int steps, uint64_t seed)
{
    random_numbers random = {seed};
    cudaStream_t stream[streams_of_a_part];
    std::vector<block> live(24, block{nullptr, 0, 0});
    std::vector<int> on(live.size());
    unsigned *count, errors = 0;
    double spent = 0;
    for (int i = 0; i < streams_of_a_part; i++) CHECK(cudaStreamCreateWithFlags(&stream[i], cudaStreamNonBlocking));
    CHECK(cudaMalloc(&count, sizeof *count));
    CHECK(cudaMemset(count, 0, sizeof *count));
    CHECK(cudaDeviceSynchronize());
    for (int step = 0; step < steps; step++) {
        unsigned at = random((unsigned)live.size());
        block *b = &live[at];
        int s = ordered ? on[at] : (int)random(streams_of_a_part);
        if (b->p) {
            if (!ordered) CHECK(cudaStreamSynchronize(stream[on[at]])); /* another stream reads it */
            differs<<<64, 256, 0, stream[s]>>>(b->p, b->n, b->seed, count);
            double begin = seconds();
            if (ordered) CHECK(cudaFreeAsync(b->p, stream[s]));
            else CHECK(cudaFree(b->p));
            spent += seconds() - begin;
            b->p = nullptr;
        } else {
            on[at] = s = (int)random(streams_of_a_part);
            b->n = (size_t)1 << random(25);
            b->n += random((unsigned)b->n);
            b->n = b->n < (size_t)1 << 24 ? b->n : (size_t)1 << 24;
            b->seed = random(1u << 30);
            double begin = seconds();
            if (ordered) CHECK(cudaMallocAsync(&b->p, b->n * 4, stream[s]));
            else CHECK(cudaMalloc(&b->p, b->n * 4));
            spent += seconds() - begin;
            fill<<<64, 256, 0, stream[s]>>>(b->p, b->n, b->seed);
        }
        if (step % 32 == 0) sample();
    }
    for (size_t i = 0; i < live.size(); i++) {
        if (!live[i].p) continue;
        CHECK(cudaStreamSynchronize(stream[on[i]]));
        differs<<<64, 256, 0, stream[on[i]]>>>(live[i].p, live[i].n, live[i].seed, count);
        if (ordered) CHECK(cudaStreamSynchronize(stream[on[i]])); /* cudaFree does not wait for such memory */
        CHECK(cudaFree(live[i].p));
    }
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(&errors, count, sizeof errors, cudaMemcpyDeviceToHost));
    EXPECT(errors == 0);
    CHECK(cudaFree(count));
    for (int i = 0; i < streams_of_a_part; i++) CHECK(cudaStreamDestroy(stream[i]));
    add(random.state);
    allocating += spent;
    pairs += steps / 2;
}

static void part_malloc() { churn(false, 1500, 1); }
static void part_ordered() { churn(true, 1500, 2); }

static void part_threads()
{
    std::vector<std::thread> threads;
    for (int i = 0; i < 6; i++)
        threads.emplace_back([i] {
            random_numbers random = {(uint64_t)i + 9};
            cudaStream_t stream;
            CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
            for (int step = 0; step < 300; step++) {
                unsigned *p, *q, last = 0;
                size_t n = 1 + random(1 << 20);
                CHECK(cudaMalloc(&p, n * 4));
                CHECK(cudaMallocAsync(&q, n * 4, stream));
                fill<<<8, 256, 0, stream>>>(p, n, (unsigned)step);
                CHECK(cudaMemcpyAsync(q, p, n * 4, cudaMemcpyDeviceToDevice, stream));
                CHECK(cudaMemcpyAsync(&last, q + n - 1, 4, cudaMemcpyDeviceToHost, stream));
                CHECK(cudaFreeAsync(q, stream));
                CHECK(cudaStreamSynchronize(stream));
                EXPECT(last == (unsigned)step + (unsigned)(n - 1));
                CHECK(cudaFree(p));
            }
            CHECK(cudaStreamDestroy(stream));
        });
    for (auto &thread : threads) thread.join();
}

/* A captured graph: memory nodes inside, memory of cudaMalloc outside, and an allocation while it is captured. */
static void part_graph()
{
    const size_t n = 1 << 20;
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    unsigned *out, *inside, *beside, errors = 0, *count;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaMalloc(&out, n * 4));
    CHECK(cudaMalloc(&count, 4));
    CHECK(cudaMemset(count, 0, 4));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    CHECK(cudaMallocAsync(&inside, n * 4, stream));
    fill<<<64, 256, 0, stream>>>(inside, n, 5);
    CHECK(cudaMemcpyAsync(out, inside, n * 4, cudaMemcpyDeviceToDevice, stream));
    CHECK(cudaFreeAsync(inside, stream));
    CHECK(cudaMalloc(&beside, n));
    CHECK(cudaFree(beside));
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiateWithFlags(&exec, graph, 0));
    for (int i = 0; i < 20; i++) {
        CHECK(cudaMemsetAsync(out, 0, n * 4, stream));
        CHECK(cudaGraphLaunch(exec, stream));
        differs<<<64, 256, 0, stream>>>(out, n, 5, count);
    }
    CHECK(cudaMemcpyAsync(&errors, count, 4, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    EXPECT(errors == 0);
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaFree(out));
    CHECK(cudaFree(count));
    CHECK(cudaStreamDestroy(stream));
}

/* cudaFree waits for the device, on whatever stream the work is. */
static void part_free_waits()
{
    cudaStream_t stream;
    unsigned *p;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaMalloc(&p, 64 << 20));
    spin<<<1, 1, 0, stream>>>(1);
    CHECK(cudaDeviceSynchronize());
    spin<<<1, 1, 0, stream>>>(100 * 1000 * 1000); /* tens of milliseconds */
    CHECK(cudaFree(p));
    bool done = cudaStreamQuery(stream) == cudaSuccess;
    const char *mode = getenv("GALLOC_PRELOAD_FREE");
    EXPECT(done == !(mode && getenv("LD_PRELOAD") && !strcmp(mode, "async")));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaStreamDestroy(stream));
    (void)cudaGetLastError();
}

typedef CUresult CUDAAPI range_function(CUdeviceptr *, size_t *, CUdeviceptr);
typedef CUresult CUDAAPI attribute_function(void *, CUpointer_attribute, CUdeviceptr);

template <class F> static F *driver_function(const char *name)
{
    void *function = nullptr;
    cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    CHECK(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found));
#else
    CHECK(cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &found));
#endif
    if (!function) fprintf(stderr, "no %s\n", name), exit(2);
    return (F *)function;
}

static void part_questions()
{
    char *p, *q;
    cudaPointerAttributes attributes;
    CUdeviceptr base = 0;
    size_t bytes = 0;
    unsigned long long id = 0, other = 0;
    CUcontext context = nullptr;
    CHECK(cudaMalloc(&p, 100 << 20));
    CHECK(cudaMalloc(&q, 1000));
    CHECK(cudaPointerGetAttributes(&attributes, p + (90 << 20)));
    EXPECT(attributes.type == cudaMemoryTypeDevice && attributes.device == 0);
    EXPECT(attributes.devicePointer == p + (90 << 20));
    range_function *range = driver_function<range_function>("cuMemGetAddressRange");
    EXPECT(range(&base, &bytes, (CUdeviceptr)p + (90 << 20)) == CUDA_SUCCESS);
    EXPECT(base == (CUdeviceptr)p && bytes == 100 << 20);
    EXPECT(range(&base, &bytes, (CUdeviceptr)q + 999) == CUDA_SUCCESS && base == (CUdeviceptr)q && bytes >= 1000);
    attribute_function *ask = driver_function<attribute_function>("cuPointerGetAttribute");
    EXPECT(ask(&base, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, (CUdeviceptr)p + 7) == CUDA_SUCCESS);
    EXPECT(base == (CUdeviceptr)p);
    EXPECT(ask(&bytes, CU_POINTER_ATTRIBUTE_RANGE_SIZE, (CUdeviceptr)p) == CUDA_SUCCESS && bytes == 100 << 20);
    EXPECT(ask(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, (CUdeviceptr)p) == CUDA_SUCCESS);
    EXPECT(ask(&other, CU_POINTER_ATTRIBUTE_BUFFER_ID, (CUdeviceptr)q) == CUDA_SUCCESS && id != other);
    EXPECT(ask(&context, CU_POINTER_ATTRIBUTE_CONTEXT, (CUdeviceptr)p) == CUDA_SUCCESS && context);
    size_t before = used();
    char *big;
    CHECK(cudaMalloc(&big, (size_t)1 << 30));
    EXPECT(used() >= before + ((size_t)1 << 30));
    CHECK(cudaFree(big));
    EXPECT(used() <= before + (64 << 20));
    CHECK(cudaFree(p));
    CHECK(cudaFree(q));
    EXPECT(cudaMalloc(&p, (size_t)1 << 50) == cudaErrorMemoryAllocation);
    EXPECT(cudaGetLastError() == cudaErrorMemoryAllocation);
    EXPECT(cudaFree((void *)0x1234567) != cudaSuccess);
    (void)cudaGetLastError();
}

/* Copies of all kinds, rows, arrays, managed and pinned memory. */
static void part_copies()
{
    const int width = 1000, height = 300;
    std::vector<unsigned> host(width * height), back(width * height);
    for (size_t i = 0; i < host.size(); i++) host[i] = (unsigned)i * 2654435761u;
    unsigned *rows, *flat, *managed, *pinned;
    cudaArray_t array;
    cudaChannelFormatDesc format = cudaCreateChannelDesc<unsigned>();
    size_t pitch = 0, line = width * sizeof(unsigned);
    CHECK(cudaMallocPitch(&rows, &pitch, line, height));
    EXPECT(pitch >= line && pitch % 512 == 0);
    CHECK(cudaMemcpy2D(rows, pitch, host.data(), line, line, height, cudaMemcpyHostToDevice));
    CHECK(cudaMallocArray(&array, &format, width, height));
    CHECK(cudaMemcpy2DToArray(array, 0, 0, rows, pitch, line, height, cudaMemcpyDeviceToDevice));
    CHECK(cudaMalloc(&flat, line * height));
    CHECK(cudaMemcpy2DFromArray(flat, line, array, 0, 0, line, height, cudaMemcpyDeviceToDevice));
    CHECK(cudaMallocManaged(&managed, line * height));
    CHECK(cudaMemcpy(managed, flat, line * height, cudaMemcpyDefault));
    CHECK(cudaMallocHost(&pinned, line * height));
    CHECK(cudaMemcpyAsync(pinned, managed, line * height, cudaMemcpyDefault, 0));
    CHECK(cudaDeviceSynchronize());
    EXPECT(!memcmp(pinned, host.data(), line * height));
    CHECK(cudaMemcpy(back.data(), flat, line * height, cudaMemcpyDeviceToHost));
    EXPECT(back == host);
    for (unsigned value : back) add(value);
    cudaExtent extent = make_cudaExtent(line, 10, 30);
    cudaPitchedPtr volume;
    CHECK(cudaMalloc3D(&volume, extent));
    CHECK(cudaMemset3D(volume, 7, extent));
    CHECK(cudaFree(volume.ptr));
    CHECK(cudaFree(rows));
    CHECK(cudaFree(flat));
    CHECK(cudaFree(managed));
    CHECK(cudaFreeArray(array));
    CHECK(cudaFreeHost(pinned));
}

static void part_pools()
{
    cudaMemPool_t standard, own;
    cudaMemPoolProps properties;
    cudaStream_t stream;
    void *p, *q;
    memset(&properties, 0, sizeof properties);
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location.type = cudaMemLocationTypeDevice;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaDeviceGetDefaultMemPool(&standard, 0));
    CHECK(cudaMemPoolCreate(&own, &properties));
    CHECK(cudaMallocFromPoolAsync(&p, 10 << 20, standard, stream));
    CHECK(cudaMallocFromPoolAsync(&q, 10 << 20, own, stream));
    uint64_t in_use = 0;
    CHECK(cudaMemPoolGetAttribute(standard, cudaMemPoolAttrUsedMemCurrent, &in_use));
    EXPECT(in_use >= 10 << 20);
    CHECK(cudaFreeAsync(q, stream));
    CHECK(cudaFreeAsync(p, stream));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaMemPoolTrimTo(standard, 0));
    CHECK(cudaMemPoolDestroy(own));
    CHECK(cudaStreamDestroy(stream));
}

static void part_reset()
{
    unsigned *p, last = 0;
    for (int i = 0; i < 2; i++) {
        CHECK(cudaMalloc(&p, 32 << 20));
        fill<<<64, 256>>>(p, 8 << 20, 3);
        CHECK(cudaMemcpy(&last, p + (8 << 20) - 1, 4, cudaMemcpyDeviceToHost));
        EXPECT(last == 3 + (8 << 20) - 1);
        CHECK(cudaFree(p));
        CHECK(cudaDeviceReset());
    }
    used_at_first = used();
}

static const struct {
    const char *name;
    void (*run)();
} parts[] = {{"malloc", part_malloc},       {"ordered", part_ordered}, {"threads", part_threads},
             {"graph", part_graph},         {"free_waits", part_free_waits}, {"questions", part_questions},
             {"copies", part_copies},       {"pools", part_pools},     {"reset", part_reset}};

int main(int argc, char **argv)
{
    CHECK(cudaFree(0));
    fill<<<1, 1>>>(nullptr, 0, 0); /* loads the kernels */
    differs<<<1, 1>>>(nullptr, 0, 0, nullptr);
    CHECK(cudaDeviceSynchronize());
    used_at_first = used();
    for (auto &part : parts) {
        if (argc > 1 && strcmp(argv[1], part.name)) continue;
        part.run();
        if (argc > 1) break;
    }
    printf("{\"result\": \"%016llx, %d wrong\", \"held\": %zu, \"us\": %.3f}\n", (unsigned long long)result, wrong,
           used_at_most, pairs ? 1e6 * allocating / (double)pairs : 0.0);
    return wrong != 0;
}
