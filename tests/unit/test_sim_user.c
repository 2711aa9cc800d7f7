/* test_sim_user.c - what ordinary programs ask of the simulated device: kernels with a body, pitched and peer copies,
   properties, callbacks, contexts and pools of their own. galloc takes no part. */

#include "sim.h"
#include "sim_kernel.h"
#include "test.h"

#define PAGE ((size_t)2 << 20)
#define OK(call) EXPECT_EQ((call), 0)

/* ==== HELPERS ==================================================================================================== */

static void start_with(int mode, int devices, size_t bytes)
{
    sim_options options = sim_defaults();
    options.mode = mode;
    options.devices = devices;
    options.memory = bytes;
    OK(sim_start(&options));
    OK(cudaFree(NULL));
}

static void start(void) { start_with(SIM_BACKED, 1, (size_t)4 << 30); }

static cudaStream_t stream(void)
{
    cudaStream_t s = NULL;
    OK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    return s;
}

static void *memory(size_t bytes)
{
    void *p = NULL;
    OK(cudaMalloc(&p, bytes));
    return p;
}

static dim3 shape(unsigned x, unsigned y)
{
    dim3 d = {x, y, 1};
    return d;
}

static void finish_with(long findings)
{
    OK(cudaDeviceSynchronize());
    EXPECT_EQ(sim_findings(SIM_ANY), findings);
    if (findings != sim_findings(SIM_ANY))
        for (long i = 0; sim_finding(i); i++) printf("    found: %s\n", sim_finding(i));
    sim_stop();
}

static void finish(void) { finish_with(0); }

/* ==== KERNELS ==================================================================================================== */

SIM_KERNEL(fill, (int *, p), (int, from), (int, n))
{
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) p[i] = from + i;
}

SIM_KERNEL(add, (int *, p), (const int *, q), (int, n))
{
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) p[i] += q[i];
}

SIM_KERNEL(mark_threads, (int *, p), (char, small), (double, large))
{
    unsigned x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    p[y * gridDim.x * blockDim.x + x] += (int)large + small;
}

enum { COUNT = 1000 };

TEST(kernels_run_in_stream_order_with_the_arguments_of_their_launch)
{
    start();
    cudaStream_t s = stream();
    int *p = memory(COUNT * sizeof *p), *q = memory(COUNT * sizeof *q), host[COUNT], wrong = 0, from = 5;
    OK(fill_launch(shape(4, 1), shape(256, 1), 0, s, p, from, COUNT));
    from = 100;
    OK(fill_launch(shape(4, 1), shape(256, 1), 0, s, q, from, COUNT));
    from = 0;
    OK(add_launch(shape(4, 1), shape(256, 1), 0, s, p, q, COUNT));
    OK(cudaMemcpyAsync(host, p, sizeof host, cudaMemcpyDeviceToHost, s));
    OK(cudaStreamSynchronize(s));
    for (int i = 0; i < COUNT; i++) wrong += host[i] != 105 + 2 * i;
    EXPECT_EQ(wrong, 0);
    finish();
}

TEST(each_thread_of_a_grid_runs_once)
{
    start();
    int *p = memory(60 * sizeof *p), host[60], wrong = 0;
    OK(cudaMemset(p, 0, sizeof host));
    OK(mark_threads_launch(shape(2, 3), shape(5, 2), 0, 0, p, 3, 4.0));
    OK(cudaMemcpy(host, p, sizeof host, cudaMemcpyDeviceToHost));
    for (int i = 0; i < 60; i++) wrong += host[i] != 7;
    EXPECT_EQ(wrong, 0);
    finish();
}

TEST(kernels_are_captured_and_can_be_changed)
{
    start();
    cudaStream_t s = stream();
    int *p = memory(COUNT * sizeof *p), host[COUNT], n = COUNT, from = 50, *q = p;
    cudaGraph_t graph = NULL, built = NULL;
    cudaGraphExec_t exec = NULL;
    cudaGraphNode_t node = NULL;
    size_t nodes = 1;
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    OK(fill_launch(shape(4, 1), shape(256, 1), 0, s, p, 1, COUNT));
    OK(cudaStreamEndCapture(s, &graph));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    OK(cudaGraphGetNodes(graph, &node, &nodes));
    OK(cudaMemsetAsync(p, 0, sizeof host, s));
    OK(cudaGraphLaunch(exec, s));
    OK(cudaStreamSynchronize(s));
    EXPECT_EQ(p[7], 8);
    void *arguments[] = {&q, &from, &n};
    struct cudaKernelNodeParams params = {(void *)(uintptr_t)fill, shape(4, 1), shape(256, 1), 0, arguments, NULL};
    OK(cudaGraphExecKernelNodeSetParams(exec, node, &params));
    OK(cudaGraphLaunch(exec, s));
    OK(cudaStreamSynchronize(s));
    EXPECT_EQ(p[7], 57);
    from = 70;
    OK(cudaGraphCreate(&built, 0));
    OK(cudaGraphAddKernelNode(&node, built, NULL, 0, &params));
    from = 90;
    OK(cudaGraphKernelNodeSetParams(node, &params));
    OK(cudaGraphInstantiate(&exec, built, 0));
    OK(cudaGraphLaunch(exec, s));
    OK(cudaStreamSynchronize(s));
    EXPECT_EQ(p[7], 97);
    finish();
}

/* A reader beside a reader is none, anything beside a writer is one. */
TEST(pointer_arguments_of_kernels_are_seen_by_the_ledger)
{
    for (int mode = SIM_LEDGER; mode <= SIM_BACKED; mode++)
        for (int writes = 0; writes < 2; writes++) {
            start_with(mode, 1, 64 * PAGE);
            cudaStream_t s = stream(), t = stream();
            int *a = memory(4096), *b = memory(4096), *c = memory(4096);
            OK(cudaMemset(c, 0, 4096));
            OK(cudaDeviceSynchronize());
            OK(add_launch(shape(1, 1), shape(32, 1), 0, s, a, c, 32));
            if (writes) OK(fill_launch(shape(1, 1), shape(32, 1), 0, t, c, 0, 32));
            else OK(add_launch(shape(1, 1), shape(32, 1), 0, t, b, c, 32));
            EXPECT_EQ(sim_findings(SIM_RACE), writes);
            finish_with(writes);
        }
}

TEST(declared_accesses_of_a_kernel_are_all_that_count)
{
    start();
    cudaStream_t s = stream(), t = stream();
    int *p = memory(4096);
    SIM_WRITES(p, 128);
    OK(fill_launch(shape(1, 1), shape(32, 1), 0, s, p, 0, 32));
    SIM_WRITES(p + 32, 128);
    OK(fill_launch(shape(1, 1), shape(32, 1), 0, t, p + 32, 0, 32));
    SIM_READS(p + 64, 128);
    OK(fill_launch(shape(1, 1), shape(1, 1), 0, t, p, 0, 0));
    EXPECT_EQ(sim_findings(SIM_RACE), 0);
    SIM_WRITES(p + 31, 8);
    OK(fill_launch(shape(1, 1), shape(2, 1), 0, t, p + 31, 0, 2));
    EXPECT_EQ(sim_findings(SIM_RACE), 1);
    OK(fill_launch(shape(1, 1), shape(1, 1), 0, t, p, 0, 1)); /* declared for one launch */
    EXPECT_EQ(sim_findings(SIM_RACE), 2);
    finish_with(2);
}

static void not_a_kernel(void) {}

TEST(what_is_no_kernel_or_no_shape_is_refused)
{
    start();
    int *p = memory(4096), from = 0, n = 1;
    void *arguments[] = {&p, &from, &n};
    struct cudaFuncAttributes about;
    int blocks = 0;
    union {
        void (*function)(void);
        const void *pointer;
    } wrong = {not_a_kernel};
    dim3 one = shape(1, 1), large = shape(2048, 1), none = shape(0, 1);
    EXPECT_EQ(cudaLaunchKernel(wrong.pointer, one, one, arguments, 0, 0), cudaErrorInvalidDeviceFunction);
    EXPECT_EQ(cudaLaunchKernel(fill, one, large, arguments, 0, 0), cudaErrorInvalidConfiguration);
    EXPECT_EQ(cudaLaunchKernel(fill, none, one, arguments, 0, 0), cudaErrorInvalidConfiguration);
    EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidConfiguration);
    cudaLaunchConfig_t config;
    memset(&config, 0, sizeof config);
    config.gridDim = config.blockDim = shape(1, 1);
    OK(cudaLaunchKernelExC(&config, fill, arguments));
    OK(cudaFuncSetAttribute(fill, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536));
    OK(cudaFuncGetAttributes(&about, fill));
    EXPECT_EQ(about.maxThreadsPerBlock, 1024);
    OK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, fill, 256, 0));
    EXPECT_EQ(blocks, 8);
    finish();
}

/* ==== COPIES, POINTERS, PROPERTIES =============================================================================== */

TEST(pitched_copies_move_rows)
{
    start();
    char host[6][10], back[6][4], *p = NULL;
    size_t pitch = 0;
    for (int i = 0; i < 60; i++) host[i / 10][i % 10] = (char)i;
    OK(cudaMallocPitch((void **)&p, &pitch, 4, 6));
    EXPECT(pitch >= 4 && pitch % 512 == 0);
    OK(cudaMemset2D(p, pitch, 9, 4, 6));
    OK(cudaMemcpy2D(p, pitch, host[1] + 2, 10, 4, 5, cudaMemcpyHostToDevice));
    OK(cudaMemcpy2DAsync(back, 4, p, pitch, 4, 6, cudaMemcpyDeviceToHost, 0));
    OK(cudaDeviceSynchronize());
    EXPECT(back[0][0] == 12 && back[4][3] == 55 && back[5][0] == 9);
    EXPECT_EQ(cudaMemcpy2D(p, 2, host, 10, 4, 5, cudaMemcpyHostToDevice), cudaErrorInvalidPitchValue);
    finish();
}

TEST(a_set_in_a_graph_may_be_of_words)
{
    start();
    short back[6] = {0};
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    cudaGraphNode_t two = NULL, four = NULL;
    char *p = memory(64);
    struct cudaMemsetParams set = {p, 0, 0x10203, 2, 6, 1};
    OK(cudaGraphCreate(&graph, 0));
    OK(cudaGraphAddMemsetNode(&two, graph, NULL, 0, &set));
    set.dst = p + 8;
    set.elementSize = 4;
    set.width = 1;
    OK(cudaGraphAddMemsetNode(&four, graph, &two, 1, &set));
    set.dst = p + 1;
    EXPECT_EQ(cudaGraphAddMemsetNode(&four, graph, &two, 1, &set), cudaErrorInvalidValue);
    OK(cudaGraphInstantiate(&exec, graph, 0));
    OK(cudaGraphLaunch(exec, 0));
    OK(cudaMemcpy(back, p, sizeof back, cudaMemcpyDeviceToHost));
    EXPECT(back[0] == 0x203 && back[3] == 0x203 && back[4] == 0x203 && back[5] == 1);
    (void)cudaGetLastError();
    finish();
}

TEST(copies_reach_the_memory_of_another_device)
{
    start_with(SIM_BACKED, 2, 64 * PAGE);
    int *here = memory(4096), *there, value = 77, back = 0;
    OK(cudaSetDevice(1));
    there = memory(4096);
    OK(cudaSetDevice(0));
    cudaStream_t s = stream();
    OK(cudaMemcpyAsync(here, &value, sizeof value, cudaMemcpyHostToDevice, s));
    OK(cudaMemcpyPeerAsync(there, 1, here, 0, sizeof value, s));
    OK(cudaMemcpyAsync(&back, there, sizeof back, cudaMemcpyDefault, s));
    OK(cudaStreamSynchronize(s));
    EXPECT_EQ(back, 77);
    EXPECT_EQ(cudaMemcpyPeerAsync(there, 2, here, 0, sizeof value, s), cudaErrorInvalidDevice);
    sim_access kernel = {there, 4, SIM_WRITE, 1};
    OK(sim_launch(s, &kernel, 1)); /* a kernel does not, unless it was allowed to */
    EXPECT_EQ(sim_findings(SIM_HOLE), 1);
    finish_with(1);
}

TEST(pointers_tell_what_they_point_to)
{
    start_with(SIM_BACKED, 2, 64 * PAGE);
    struct cudaPointerAttributes a;
    static int own;
    void *pinned = NULL;
    OK(cudaMallocHost(&pinned, 64));
    OK(cudaSetDevice(1));
    char *p = memory(4096);
    OK(cudaPointerGetAttributes(&a, p + 100));
    EXPECT(a.type == cudaMemoryTypeDevice && a.device == 1 && a.devicePointer == p + 100 && !a.hostPointer);
    OK(cudaPointerGetAttributes(&a, pinned));
    EXPECT(a.type == cudaMemoryTypeHost && a.hostPointer == pinned);
    OK(cudaPointerGetAttributes(&a, &own));
    EXPECT(a.type == cudaMemoryTypeUnregistered);
    OK(cudaHostRegister(&own, sizeof own, 0));
    EXPECT_EQ(cudaHostRegister(&own, sizeof own, 0), cudaErrorHostMemoryAlreadyRegistered);
    OK(cudaPointerGetAttributes(&a, &own));
    EXPECT(a.type == cudaMemoryTypeHost);
    EXPECT_EQ(cudaFreeHost(&own), cudaErrorInvalidValue);
    OK(cudaHostUnregister(&own));
    EXPECT_EQ(cudaHostUnregister(&own), cudaErrorHostMemoryNotRegistered);
    OK(cudaFreeHost(pinned));
    finish();
}

/* Small blocks of cudaMalloc share a slab, and each has its own range. */
TEST(an_address_has_the_range_of_its_block)
{
    start();
    static const size_t sizes[] = {512, 4096, 4096, 3 << 20};
    char *p[4];
    CUdeviceptr base = 0;
    size_t bytes = 0;
    for (int i = 0; i < 4; i++) p[i] = memory(sizes[i]);
    for (int i = 0; i < 4; i++) {
        OK(cuMemGetAddressRange(&base, &bytes, (CUdeviceptr)(uintptr_t)(p[i] + sizes[i] - 1)));
        EXPECT(base == (CUdeviceptr)(uintptr_t)p[i] && bytes >= sizes[i] && bytes <= sizes[i] + ((size_t)2 << 20));
        OK(cuMemGetAddressRange(NULL, NULL, base));
    }
    for (int i = 0; i < 4; i++) OK(cudaFree(p[i]));
    EXPECT_EQ(cuMemGetAddressRange(&base, &bytes, (CUdeviceptr)(uintptr_t)p[3]), CUDA_ERROR_NOT_FOUND);
    finish();
}

TEST(a_device_has_properties)
{
    start();
    struct cudaDeviceProp p;
    size_t left = 0, total = 0;
    int least = 1, greatest = 1, threads = 0;
    OK(cudaGetDeviceProperties(&p, 0));
    OK(cudaMemGetInfo(&left, &total));
    EXPECT(p.name[0] && p.totalGlobalMem == total && total == (size_t)4 << 30);
    EXPECT_EQ(p.warpSize, 32);
    OK(cudaDeviceGetAttribute(&threads, cudaDevAttrMaxThreadsPerBlock, 0));
    EXPECT_EQ(p.maxThreadsPerBlock, threads);
    EXPECT_EQ(cudaGetDeviceProperties(&p, 1), cudaErrorInvalidDevice);
    OK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    EXPECT(least == 0 && greatest < 0);
    cudaStream_t s = NULL;
    OK(cudaStreamCreateWithPriority(&s, cudaStreamNonBlocking, greatest));
    OK(cudaStreamGetPriority(s, &least));
    EXPECT_EQ(least, greatest);
    finish();
}

static void CUDARTAPI note_stream(cudaStream_t s, cudaError_t status, void *to)
{
    if (!status) *(cudaStream_t *)to = s;
}

TEST(a_callback_runs_when_the_stream_comes_to_it)
{
    start();
    cudaStream_t s = stream(), seen = NULL;
    cudaEvent_t from = NULL, to = NULL;
    cudaGraph_t graph = NULL;
    float ms = -1;
    OK(cudaEventCreate(&from));
    OK(cudaEventCreate(&to));
    OK(cudaEventRecord(from, s));
    OK(cudaStreamAddCallback(s, note_stream, &seen, 0));
    OK(cudaEventRecord(to, s));
    OK(cudaEventSynchronize(to));
    EXPECT(seen == s);
    OK(cudaEventElapsedTime(&ms, from, to));
    EXPECT(ms > 0);
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    EXPECT_EQ(cudaStreamAddCallback(s, note_stream, &seen, 0), cudaErrorStreamCaptureUnsupported);
    OK(cudaStreamEndCapture(s, &graph));
    finish();
}

TEST(memory_is_taken_from_the_host_only_where_it_is_written)
{
    start_with(SIM_BACKED, 1, (size_t)256 << 30);
    char *p = memory((size_t)200 << 30), back = 0;
    void *q = NULL;
    OK(cudaMemset(p + ((size_t)150 << 30), 5, 1));
    OK(cudaMemcpy(&back, p + ((size_t)150 << 30), 1, cudaMemcpyDeviceToHost));
    EXPECT_EQ(back, 5);
    EXPECT_EQ(cudaMalloc(&q, (size_t)100 << 30), cudaErrorMemoryAllocation);
    OK(cudaFree(p));
    OK(cudaMalloc(&q, (size_t)100 << 30));
    (void)cudaGetLastError();
    finish();
}

/* ==== POOLS AND CONTEXTS ========================================================================================= */

static CUmemoryPool pool_on(int device)
{
    CUmemPoolProps props;
    CUmemoryPool pool = NULL;
    memset(&props, 0, sizeof props);
    props.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    props.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    props.location.id = device;
    OK(cuMemPoolCreate(&pool, &props));
    return pool;
}

TEST(memory_of_a_pool_is_on_the_pools_device)
{
    start_with(SIM_LEDGER, 2, 64 * PAGE);
    CUmemoryPool pool = pool_on(1);
    cudaStream_t s = stream();
    CUdeviceptr p = 0, again = 0;
    OK(cuMemAllocFromPoolAsync(&p, PAGE, pool, s));
    EXPECT_EQ(sim_physical(0), 0);
    EXPECT_EQ(sim_physical(1), PAGE);
    OK(cuMemFreeAsync(p, s));
    OK(cudaSetDevice(1));
    cudaStream_t t = stream();
    OK(cudaStreamSynchronize(s));
    OK(cuMemAllocFromPoolAsync(&again, PAGE, pool, t));
    EXPECT_EQ(sim_physical(0), 0);
    EXPECT_EQ(sim_physical(1), PAGE);
    sim_access write = {(void *)(uintptr_t)again, PAGE, SIM_WRITE, 1};
    OK(sim_launch(t, &write, 1)); /* its own device may */
    EXPECT_EQ(sim_findings(SIM_ANY), 0);
    OK(cudaSetDevice(0));
    OK(cudaDeviceEnablePeerAccess(1, 0)); /* which is for cudaMalloc's memory */
    OK(sim_launch(s, &write, 1));
    EXPECT_EQ(sim_findings(SIM_HOLE), 1);
    OK(cudaSetDevice(1));
    OK(cuMemFreeAsync(again, t));
    finish_with(1);
}

TEST(memory_of_a_pool_outlives_the_context_where_it_was_asked_for)
{
    start_with(SIM_LEDGER, 1, 64 * PAGE);
    CUmemoryPool pool = pool_on(0);
    CUcontext own = NULL;
    CUdeviceptr p = 0, q = 0;
    CUstream s = NULL;
    OK(cuCtxCreate(&own, NULL, 0, 0));
    OK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
    OK(cuMemAllocFromPoolAsync(&p, PAGE, pool, s));
    OK(cuMemAllocAsync(&q, PAGE, s));
    OK(cuCtxDestroy(own));
    EXPECT_EQ(sim_physical(0), 2 * PAGE);
    OK(cudaSetDevice(0));
    cudaStream_t t = stream();
    OK(cuMemFreeAsync(p, t));
    OK(cuMemFree(q));
    finish();
}

TEST(the_default_pool_keeps_what_its_threshold_says)
{
    start_with(SIM_LEDGER, 2, 64 * PAGE);
    cudaStream_t s = stream();
    cudaMemPool_t pool = NULL, same = NULL, other = NULL;
    uint64_t threshold = UINT64_MAX, held = 0;
    void *p = NULL, *q = NULL;
    OK(cudaDeviceGetDefaultMemPool(&pool, 0));
    OK(cudaDeviceGetDefaultMemPool(&same, 0));
    OK(cudaDeviceGetDefaultMemPool(&other, 1));
    EXPECT(pool == same && pool != other);
    EXPECT_EQ(cudaDeviceGetDefaultMemPool(&other, 2), cudaErrorInvalidDevice);
    OK(cudaMallocAsync(&p, PAGE, s));
    OK(cudaFreeAsync(p, s));
    OK(cudaStreamSynchronize(s));
    EXPECT_EQ(sim_physical(0), 0); /* at first it keeps nothing that a synchronisation shows to be unused */
    OK(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold));
    OK(cudaMallocAsync(&p, PAGE, s));
    OK(cudaFreeAsync(p, s));
    OK(cudaStreamSynchronize(s));
    EXPECT_EQ(sim_physical(0), PAGE);
    OK(cudaMallocAsync(&q, PAGE, s));
    EXPECT(q == p);
    OK(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReservedMemCurrent, &held));
    EXPECT_EQ(held, PAGE);
    OK(cudaFreeAsync(q, s));
    EXPECT_EQ(cudaMallocFromPoolAsync(&q, PAGE, NULL, s), cudaErrorInvalidValue);
    OK(cudaMallocFromPoolAsync(&q, PAGE, pool, s));
    EXPECT(q == p);
    OK(cudaFreeAsync(q, s));
    OK(cudaStreamSynchronize(s));
    OK(cudaMemPoolTrimTo(pool, 0));
    EXPECT_EQ(sim_physical(0), 0);
    EXPECT_EQ(cuMemPoolDestroy(pool), CUDA_ERROR_INVALID_VALUE);
    finish();
}

static void count(void *n) { ++*(int *)n; }

TEST(contexts_of_one_device_live_apart)
{
    start_with(SIM_LEDGER, 1, 64 * PAGE);
    CUcontext first = NULL, second = NULL, now = NULL;
    unsigned long long ids[3] = {0, 0, 0};
    CUstream s = NULL;
    CUdeviceptr p = 0;
    CUevent e = NULL;
    int ran = 0;
    OK(cuCtxGetId(NULL, &ids[0]));
    OK(cuCtxCreate(&first, NULL, 0, 0));
    OK(cuCtxGetId(first, &ids[1]));
    OK(cuMemAlloc(&p, PAGE));
    OK(cuEventCreate(&e, 0));
    sim_access write = {(void *)(uintptr_t)p, PAGE, SIM_WRITE, 1};
    OK(sim_launch(CU_STREAM_LEGACY, &write, 1));
    OK(cuCtxCreate(&second, NULL, 0, 0));
    OK(cuCtxGetId(second, &ids[2]));
    EXPECT(ids[0] != ids[1] && ids[1] != ids[2] && ids[0] != ids[2]);
    OK(cuStreamCreate(&s, CU_STREAM_DEFAULT));
    OK(sim_launch(s, &write, 1)); /* each context has a legacy stream of its own, which orders only its streams */
    EXPECT_EQ(sim_findings(SIM_RACE), 1);
    EXPECT_EQ(cuEventRecord(e, s), CUDA_ERROR_INVALID_HANDLE);
    EXPECT_EQ(sim_findings(SIM_BAD_EVENT), 1);
    OK(cuLaunchHostFunc(s, count, &ran));
    OK(cuCtxDestroy(second)); /* its work is waited for */
    EXPECT_EQ(ran, 1);
    OK(cuCtxGetCurrent(&now));
    EXPECT(now == first);
    OK(cudaDeviceReset()); /* of the primary context */
    OK(cuCtxGetId(first, &ids[2]));
    EXPECT_EQ(ids[2], ids[1]);
    EXPECT_EQ(sim_physical(0), PAGE);
    OK(cuCtxDestroy(first));
    EXPECT_EQ(sim_physical(0), 0);
    EXPECT_EQ(cuCtxGetId(first, &ids[2]), CUDA_ERROR_CONTEXT_IS_DESTROYED);
    OK(cudaSetDevice(0));
    finish_with(2);
}

TEST_MAIN()
