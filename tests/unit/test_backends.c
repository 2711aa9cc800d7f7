/* test_backends.c - the other sources of memory (backend:cudaMalloc, backend:cudaMallocAsync): the same program sees
   the same under each of them, and what each promises of its own. */

#include "setup.h"

/* ---- settings ---------------------------------------------------------------------------------------------------- */

static galloc_config config_of(const char *text)
{
    galloc_config config = galloc_config_default();
    char message[512];
    if (!OK(galloc_config_parse(&config, text, message, sizeof message))) printf("    %s\n", message);
    return config;
}

static galloc_pool *pool_of(const char *text)
{
    galloc_config config = config_of(text);
    return pool_new(&config);
}

static const char *const settings[] = {"expandable_segments:True", "expandable_segments:False", "backend:cudaMalloc",
                                       "backend:cudaMallocAsync"};
#define SETTINGS ((int)(sizeof settings / sizeof settings[0]))

/* ---- the same under each ----------------------------------------------------------------------------------------- */

static void expect_counts(galloc_pool *pool, size_t live, size_t blocks)
{
    galloc_stats s = stats_of(pool);
    EXPECT_EQ(s.live.current, live);
    EXPECT_EQ(s.blocks.current, blocks);
    EXPECT(s.allocated.current >= live && s.allocated.current < live + blocks * 512 + 1);
    expect_healthy(pool, 0);
}

/* A pool whose settings the driver's pool does not take leaves nothing behind. */
TEST(a_pool_of_the_driver_that_refuses_a_setting_is_destroyed)
{
    for (int nth = 1; nth <= 4; nth++) {
        begin();
        galloc_config config = config_of("backend:cudaMallocAsync");
        galloc_pool *pool = NULL;
        sim_fail("cuMemPoolSetAttribute", nth, 0, cudaErrorNotSupported);
        EXPECT_EQ(galloc_pool_create(&pool, &config), cudaErrorNotSupported);
        EXPECT(pool == NULL);
        sim_fail_clear();
        EXPECT_EQ(sim_calls("cuMemPoolCreate"), 1);
        EXPECT_EQ(sim_calls("cuMemPoolDestroy"), 1);
        finish();
    }
}

static inside_driver driver_of_device;

static CUresult CUDAAPI attribute_without_pools(int *value, CUdevice_attribute attribute, CUdevice device)
{
    CUresult result = driver_of_device.DeviceGetAttribute(value, attribute, device);
    if (attribute == CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED) *value = 0;
    return result;
}

/* A device without pools of its own serves all other backends. */
TEST(a_device_without_pools_has_no_pool_of_the_driver)
{
    begin();
    galloc_config config = config_of("backend:cudaMallocAsync");
    galloc_pool *pool = NULL;
    cudaStream_t s = stream_new();
    pool_end(pool_new(NULL));
    driver_of_device = inside_driver_in_use();
    inside_driver without = driver_of_device;
    without.DeviceGetAttribute = attribute_without_pools;
    inside_driver_use(without);
    EXPECT_EQ(galloc_pool_create(&pool, &config), cudaErrorNotSupported);
    EXPECT(pool == NULL);
    EXPECT_EQ(sim_calls("cuMemPoolCreate"), 0);
    pool = pool_of("backend:cudaMalloc");
    OK(galloc_free(get(pool, MIB(2), s), s));
    inside_driver_use(driver_of_device);
    pool_end(pool);
    finish();
}

/* One of the devices lacks an attribute of the others, and three quarters of their memory. */
static struct {
    CUdevice_attribute attribute;
    CUdevice device;
} lacking;

static CUresult CUDAAPI attribute_of_unlike_devices(int *value, CUdevice_attribute attribute, CUdevice device)
{
    CUresult result = driver_of_device.DeviceGetAttribute(value, attribute, device);
    if (attribute == lacking.attribute && device == lacking.device) *value = 0;
    return result;
}

static CUresult CUDAAPI memory_of_unlike_devices(size_t *bytes, CUdevice device)
{
    CUresult result = driver_of_device.DeviceTotalMem(bytes, device);
    if (device == lacking.device) *bytes /= 4;
    return result;
}

/* On a machine with unlike devices a pool has the settings that its own device allows. */
TEST(a_pool_goes_by_its_own_device)
{
    for (lacking.device = 0; lacking.device < 2; lacking.device++) {
        int can = lacking.device != 1;
        begin_with_devices(2, SIM_PACE_PROMPT);
        galloc_config config = galloc_config_default(), in_use;
        galloc_pool *pool = pool_new(NULL); /* galloc has the driver's functions now */
        void *p = NULL;
        size_t bytes = 0;
        pool_end(pool);
        OK(cudaSetDevice(1));
        cudaStream_t s = stream_new();
        driver_of_device = inside_driver_in_use();
        inside_driver unlike = driver_of_device;
        unlike.DeviceGetAttribute = attribute_of_unlike_devices;
        unlike.DeviceTotalMem = memory_of_unlike_devices;
        inside_driver_use(unlike);
        config.device = 1;
        config.gpu_direct_rdma = 1;
        config.per_process_memory_fraction = 0.5;
        lacking.attribute = CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED;
        pool = pool_new(&config);
        OK(galloc_pool_config(pool, &in_use));
        EXPECT_EQ(in_use.gpu_direct_rdma, can);
        EXPECT_EQ(driver_of_device.DeviceTotalMem(&bytes, 1), CUDA_SUCCESS);
        EXPECT_EQ(galloc_pool_malloc(pool, &p, bytes / 4, s), can ? cudaSuccess : cudaErrorMemoryAllocation);
        if (p) OK(galloc_free(p, s));
        pool_end(pool);
        lacking.attribute = CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
        pool = pool_new(&config);
        OK(galloc_pool_config(pool, &in_use));
        EXPECT_EQ(in_use.expandable_segments, can);
        pool_end(pool);
        lacking.attribute = CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED;
        config.backend = GALLOC_BACKEND_CUDA_MALLOC_ASYNC;
        EXPECT_EQ(galloc_pool_create(&pool, &config), can ? cudaSuccess : cudaErrorNotSupported);
        if (can) pool_end(pool);
        inside_driver_use(driver_of_device);
        stream_end(s);
        OK(cudaSetDevice(0));
        finish();
    }
}

/* A pool is not made if the driver does not answer what the device can do. */
TEST(a_device_that_does_not_tell_has_no_pool_of_the_driver)
{
    int refused = 0;
    for (int nth = 1; nth < 4; nth++) {
        begin();
        galloc_config config = config_of("backend:cudaMallocAsync");
        galloc_pool *pool = NULL;
        sim_fail("cuDeviceGetAttribute", nth, 0, cudaErrorUnknown);
        cudaError_t error = galloc_pool_create(&pool, &config);
        sim_fail_clear();
        refused += error == cudaErrorUnknown;
        EXPECT_EQ(!error, pool != NULL);
        if (error) EXPECT_EQ(error, cudaErrorUnknown);
        if (error) EXPECT_EQ(sim_calls("cuMemPoolCreate"), 0);
        if (!error) pool_end(pool);
        finish();
    }
    EXPECT_EQ(refused, 2);
}

/* A trim leaves what it is to keep. */
TEST(a_trim_gives_back_no_more_blocks_than_asked)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_of("backend:cudaMalloc");
    void *p[4];
    size_t released = 0;
    for (int i = 0; i < 4; i++) p[i] = get(pool, MIB(4), s);
    for (int i = 0; i < 4; i++) OK(galloc_free(p[i], s));
    OK(cudaStreamSynchronize(s));
    OK(galloc_pool_trim(pool, MIB(12), &released));
    EXPECT_EQ(released, MIB(4));
    EXPECT_EQ(stats_of(pool).reserved.current, MIB(12));
    OK(galloc_pool_trim(pool, 0, &released));
    EXPECT_EQ(released, MIB(12));
    pool_end(pool);
    finish();
}

/* Allocates, uses, frees; looks at what can be seen from outside. */
static void use_pool(galloc_pool *pool)
{
    static const size_t sizes[] = {1, 512, 513, KIB(100), MIB(1), MIB(3) + 7, MIB(40)};
    enum { N = sizeof sizes / sizeof sizes[0] };
    cudaStream_t s = stream_new(), t = stream_new();
    void *p[N];
    size_t live = 0;
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < N; i++) {
            p[i] = get(pool, sizes[i], i % 2 ? s : t);
            live += sizes[i];
            EXPECT_EQ((uintptr_t)p[i] % 512, 0);
            put(i % 2 ? s : t, p[i], sizes[i], (uint64_t)(i + 1));
            galloc_pointer info = info_of((char *)p[i] + sizes[i] / 2);
            EXPECT(info.pool == pool && info.base == p[i] && info.requested == sizes[i]);
            EXPECT(info.usable >= sizes[i] && info.state == GALLOC_STATE_USED);
            EXPECT_EQ(info.stream_id, stream_id(i % 2 ? s : t));
        }
        expect_counts(pool, live, N);
        for (int i = 0; i < N; i++) look(i % 2 ? s : t, p[i], sizes[i], (uint64_t)(i + 1));
        for (int i = 0; i < N; i++) OK(galloc_free(p[i], i % 2 ? s : t));
        EXPECT_EQ(galloc_free(p[0], s), cudaErrorInvalidDevicePointer);
        live = 0;
        expect_counts(pool, 0, 0);
    }
    EXPECT_EQ(galloc_free((void *)&live, s), cudaErrorInvalidDevicePointer);
    EXPECT_EQ(info_of(&live).state, GALLOC_STATE_FOREIGN);
    OK(galloc_pool_trim(pool, 0, NULL));
    EXPECT_EQ(stats_of(pool).reserved.current, 0);
    EXPECT_EQ(sim_physical(0), 0);
    stream_end(s);
    stream_end(t);
}

TEST(programs_see_the_same_under_each_backend)
{
    for (int i = 0; i < SETTINGS; i++) {
        begin();
        galloc_pool *pool = pool_of(settings[i]);
        use_pool(pool);
        pool_end(pool);
        finish();
    }
}

/* What is asked for more than a pool may hold fails, and frees make room again. */
TEST(limits_hold_under_each_backend)
{
    for (int i = 0; i < SETTINGS; i++) {
        begin_still();
        char text[96];
        snprintf(text, sizeof text, "%s,memory_limit:64M", settings[i]);
        galloc_pool *pool = pool_of(text);
        cudaStream_t s = stream_new(), t = stream_new();
        void *p = get(pool, MIB(40), s), *q = NULL;
        put(s, p, MIB(40), 1);
        EXPECT_EQ(galloc_pool_malloc(pool, &q, MIB(40), t), cudaErrorMemoryAllocation);
        EXPECT(q == NULL && strstr(log_text, "out of memory"));
        EXPECT_EQ(stats_of(pool).failures, 1);
        OK(galloc_free(p, s));
        q = get(pool, MIB(40), t); /* s has not done its work: it is waited for */
        put(t, q, MIB(40), 2);
        EXPECT(stats_of(pool).reserved.peak <= MIB(64));
        EXPECT(sim_physical_peak(0) <= MIB(64));
        expect_healthy(pool, 0);
        OK(galloc_free(q, t));
        pool_end(pool);
        stream_end(s);
        stream_end(t);
        finish();
    }
}

/* Nor does the driver's pool pass a limit that is no multiple of what it grows by. */
TEST(no_limit_is_passed_by_rounding)
{
    for (int i = 0; i < SETTINGS; i++) {
        begin_still();
        char text[96];
        snprintf(text, sizeof text, "%s,memory_limit:9M", settings[i]);
        galloc_pool *pool = pool_of(text);
        cudaStream_t s = stream_new();
        void *p = get(pool, MIB(8), s);
        put(s, p, MIB(8), 1);
        OK(galloc_free(p, s));
        (void)galloc_pool_malloc(pool, &p, MIB(8) + KIB(512), s);
        if (i != 2) EXPECT(p == NULL);
        if (i != 2) EXPECT(sim_physical_peak(0) <= MIB(9)); /* cudaMalloc shares 2 MiB with others */
        EXPECT(stats_of(pool).reserved.peak <= MIB(9));
        expect_healthy(pool, 0);
        OK(galloc_free(p, s));
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

/* The driver's pool keeps the limit that it was made with. */
TEST(a_backends_limit_can_be_changed)
{
    static const char *const kinds[] = {"backend:cudaMalloc", "backend:cudaMallocAsync",
                                        "backend:cudaMallocAsync,memory_limit:32M"};
    for (int i = 0; i < 3; i++) {
        begin();
        galloc_pool *pool = pool_of(kinds[i]);
        cudaStream_t s = stream_new();
        OK(galloc_pool_set_limit(pool, MIB(16)));
        void *p = get(pool, MIB(14), s), *q = pool;
        EXPECT_EQ(galloc_pool_malloc(pool, &q, MIB(4), s), cudaErrorMemoryAllocation);
        OK(galloc_pool_set_limit(pool, MIB(64)));
        EXPECT_EQ(galloc_pool_malloc(pool, &q, MIB(40), s), i == 2 ? cudaErrorMemoryAllocation : cudaSuccess);
        expect_healthy(pool, 0);
        OK(galloc_free(p, s));
        OK(galloc_free(q, s));
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

/* What graphs allocated counts beside what the driver's pool holds. */
TEST(graphs_and_the_drivers_pool_share_a_limit)
{
    begin_with_devices(1, SIM_PACE_PROMPT); /* what is refused goes back at once, not when the launch is over */
    galloc_pool *pool = pool_of("backend:cudaMallocAsync,memory_limit:33M");
    cudaStream_t s = stream_new();
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    void *p = get(pool, MIB(32), s), *q = pool;
    OK(cudaStreamEndCapture(s, &graph));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    OK(cudaGraphLaunch(exec, s));
    EXPECT_EQ(galloc_pool_malloc(pool, &q, 1000, s), cudaErrorMemoryAllocation); /* the driver takes 2 MiB for it */
    EXPECT(q == NULL);
    EXPECT_EQ(stats_of(pool).reserved.peak, MIB(32));
    expect_healthy(pool, 0);
    OK(galloc_free(p, s));
    OK(cudaStreamSynchronize(s));
    OK(cudaGraphExecDestroy(exec));
    OK(cudaGraphDestroy(graph));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* A driver that does not tell what its pool holds: what graphs hold counts once all the same. */
TEST(graphs_count_once_when_the_driver_does_not_tell)
{
    begin();
    galloc_pool *pool = pool_of("backend:cudaMallocAsync,memory_limit:32M");
    cudaStream_t s = stream_new();
    cudaGraph_t graph = NULL;
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    void *p = get(pool, MIB(12), s);
    OK(cudaStreamEndCapture(s, &graph));
    sim_fail("cuMemPoolGetAttribute", 1, 1, 0);
    void *q = get(pool, MIB(12), s);
    sim_fail_clear();
    OK(galloc_free(q, s));
    OK(galloc_free(p, s));
    OK(cudaGraphDestroy(graph));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* What the pools of a device hold together counts what each kind of pool holds, and what the driver keeps for one. */
TEST(pools_of_all_kinds_share_a_limit)
{
    begin();
    galloc_pool *pool[SETTINGS];
    cudaStream_t s = stream_new();
    for (int i = 0; i < SETTINGS; i++) {
        char text[96];
        snprintf(text, sizeof text, "%s,device_limit:64M", settings[i]);
        pool[i] = pool_of(text);
    }
    for (int i = 0; i < SETTINGS; i++) {
        void *p = get(pool[i], MIB(40), s), *q = NULL;
        put(s, p, MIB(40), 1);
        for (int k = 0; k < SETTINGS; k++) EXPECT_EQ(galloc_pool_malloc(pool[k], &q, MIB(40), s), 2);
        EXPECT(sim_physical_peak(0) <= MIB(80));
        OK(galloc_free(p, s));
        if (i == 3) OK(galloc_free(get(pool[2], MIB(40), s), s)); /* the driver's pool gives it up for that */
        for (int k = 0; k < SETTINGS; k++) OK(galloc_pool_trim(pool[k], 0, NULL));
        for (int k = 0; k < SETTINGS; k++) expect_healthy(pool[k], 0);
    }
    for (int i = 0; i < SETTINGS; i++) pool_end(pool[i]);
    stream_end(s);
    finish();
}

/* A block goes nowhere before all that use it have done so, whoever they are and on whichever stream it is freed. */
TEST(all_users_are_waited_for_under_each_backend)
{
    for (int i = 0; i < SETTINGS; i++) {
        begin_still();
        galloc_pool *pool = pool_of(settings[i]);
        cudaStream_t s = stream_new(), t = stream_new(), both[] = {s, t};
        for (int round = 0; round < 4; round++) {
            void *p = get(pool, MIB(4), s), *q = get(pool, MIB(4), s), *r = get(pool, MIB(4), s);
            order(s, t);
            put(t, p, MIB(4), 1);
            put(t, q, MIB(4), 2);
            put(s, r, MIB(4), 3);
            OK(galloc_record_stream(p, t));
            OK(galloc_free(p, s));
            OK(galloc_free_after(q, both, 2));
            order(s, t);
            OK(galloc_free(r, t));
            void *next = get(pool, MIB(4), round % 2 ? s : t); /* gives back what is known to be done */
            put(round % 2 ? s : t, next, MIB(4), 4);
            OK(galloc_free(next, round % 2 ? s : t));
            sim_run(20);
            expect_healthy(pool, 0);
        }
        OK(galloc_pool_trim(pool, 0, NULL));
        EXPECT_EQ(stats_of(pool).reserved.current, 0);
        pool_end(pool);
        stream_end(s);
        stream_end(t);
        finish();
    }
}

/* Larger alignments, sizes that change, room to grow. */
TEST(requests_under_other_backends)
{
    for (int i = 2; i < SETTINGS; i++) {
        begin();
        galloc_pool *pool = pool_of(settings[i]);
        cudaStream_t s = stream_new();
        galloc_request request = {.bytes = 1000, .alignment = KIB(64), .stream = s, .pool = pool, .tag = 7};
        void *p = NULL, *q = get(pool, 1000, s), *r = NULL;
        OK(galloc_alloc(&p, &request));
        EXPECT_EQ((uintptr_t)p % KIB(64), 0);
        EXPECT_EQ(info_of(p).tag, 7);
        EXPECT_EQ(info_of(q).usable, 1000);
        EXPECT_EQ(info_of(q).room, 1000);
        EXPECT_EQ(galloc_resize(q, 1001, s), cudaErrorNotSupported);
        OK(galloc_resize(q, 10, s));
        EXPECT_EQ(stats_of(pool).live.current, 1010);
        OK(galloc_resize(q, 1000, s));
        request = (galloc_request){.bytes = 1000, .max_bytes = MIB(4), .stream = s, .pool = pool};
        OK(galloc_alloc(&r, &request));
        EXPECT_EQ(info_of(r).room, MIB(4));
        OK(galloc_resize(r, MIB(4), s));
        put(s, r, MIB(4), 5);
        EXPECT_EQ(galloc_resize(r, MIB(4) + 1, s), cudaErrorNotSupported);
        OK(galloc_free(r, s));
        request = (galloc_request){.bytes = 1000, .max_bytes = 1010, .stream = s, .pool = pool}; /* both are 1024 */
        OK(galloc_alloc(&r, &request));
        EXPECT_EQ(info_of(r).room, 1024);
        OK(galloc_resize(r, 1010, s));
        put(s, r, 1010, 5);
        expect_healthy(pool, 0);
        EXPECT_EQ(galloc_free((char *)p + 512, s), cudaErrorInvalidDevicePointer);
        EXPECT(strstr(log_text, "lies inside the block"));
        EXPECT_EQ(galloc_pool_reserve(pool, MIB(2)), cudaErrorNotSupported);
        OK(galloc_free(p, s));
        OK(galloc_free(q, s));
        OK(galloc_free(r, s));
        OK(galloc_pool_trim(pool, 0, NULL));
        EXPECT_EQ(sim_physical(0), 0);
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

/* Rounding to steps would hide from a memory checker where a block ends. */
TEST(only_the_bytes_asked_for)
{
    for (int i = 2; i < SETTINGS; i++) {
        begin();
        char text[96], message[512];
        snprintf(text, sizeof text, "%s,roundup_power2_divisions:4", settings[i]);
        galloc_config config = galloc_config_default();
        OK(galloc_config_parse(&config, text, message, sizeof message));
        EXPECT(strstr(message, "roundup_power2_divisions"));
        galloc_pool *pool = pool_new(&config);
        cudaStream_t s = stream_new();
        void *p = get(pool, 5000000, s);
        EXPECT_EQ(info_of(p).usable, 5000000);
        EXPECT_EQ(stats_of(pool).allocated.current, 5000192);
        OK(galloc_free(p, s));
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

/* debug does nothing: blocks are as large as without it, and no work is queued for them. */
TEST(no_backend_of_the_driver_has_guards)
{
    for (int i = 2; i < SETTINGS; i++) {
        begin();
        char text[96], message[512];
        snprintf(text, sizeof text, "%s,debug:guards+poison+quarantine", settings[i]);
        galloc_config config = galloc_config_default(), in_effect;
        OK(galloc_config_parse(&config, text, message, sizeof message));
        EXPECT(strstr(message, "debug"));
        galloc_pool *pool = pool_new(&config);
        cudaStream_t s = stream_new();
        OK(galloc_pool_config(pool, &in_effect));
        EXPECT_EQ(in_effect.debug, 0);
        void *p = get(pool, 1000, s);
        EXPECT_EQ(info_of(p).usable, 1000);
        EXPECT_EQ(stats_of(pool).allocated.current, 1024);
        OK(galloc_free(p, s));
        OK(cudaStreamSynchronize(s));
        EXPECT_EQ(sim_calls("cuMemsetD8Async") + sim_calls("cuMemcpyDtoHAsync"), 0);
        EXPECT_EQ(stats_of(pool).quarantined, 0);
        EXPECT_EQ(stats_of(pool).checks + stats_of(pool).unchecked, 0);
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

/* Which pool an address belongs to is found out also where two of them share a page. */
TEST(pools_side_by_side)
{
    begin();
    galloc_pool *a = pool_of("backend:cudaMalloc"), *b = pool_of("backend:cudaMalloc"), *c = pool_of("overhead:0");
    cudaStream_t s = stream_new();
    void *p = get(a, 3000, s), *q = get(b, 3000, s), *r = get(c, 3000, s);
    EXPECT_EQ((uintptr_t)p / MIB(2), (uintptr_t)q / MIB(2));
    EXPECT(info_of((char *)p + 2999).pool == a && info_of((char *)q + 2999).pool == b);
    EXPECT(info_of((char *)r + 2999).pool == c);
    EXPECT_EQ(info_of((char *)q + MIB(1)).state, GALLOC_STATE_FOREIGN);
    OK(galloc_free(q, s));
    EXPECT_EQ(stats_of(a).blocks.current, 1);
    OK(galloc_free(p, s));
    OK(galloc_free(r, s));
    pool_end(a);
    pool_end(b);
    EXPECT_EQ(info_of(p).state, GALLOC_STATE_FOREIGN);
    pool_end(c);
    stream_end(s);
    finish();
}

TEST(default_pools_of_other_backends)
{
    for (int i = 2; i < SETTINGS; i++) {
        begin();
        setenv("GALLOC_CONF", settings[i], 1);
        void *p = NULL, *q = NULL;
        cudaStream_t s = stream_new();
        OK(galloc_malloc(&p, 1000, s));
        OK(galloc_malloc(&q, 1000, 0)); /* the legacy stream */
        put(s, p, 1000, 1);
        put(0, q, 1000, 2);
        OK(galloc_free(p, s));
        OK(galloc_free(q, 0));
        OK(galloc_malloc(&p, 1000, cudaStreamPerThread));
        OK(galloc_free(p, cudaStreamPerThread));
        OK(galloc_stream_retire(s));
        stream_end(s);
        unsetenv("GALLOC_CONF");
        finish();
    }
}

/* ---- threads ----------------------------------------------------------------------------------------------------- */

typedef struct crowd {
    galloc_pool *pool;
    cudaStream_t shared;
    uint64_t seed;
} crowd;

/* Blocks of a stream of one's own and of one that all share, freed on either. */
static void *play_in_crowd(void *arg)
{
    crowd *c = arg;
    dice d = {c->seed};
    OK(cudaSetDevice(0));
    cudaStream_t own = stream_new();
    for (int i = 0; i < 200; i++) {
        cudaStream_t s = roll_below(&d, 3) ? own : c->shared;
        void *p = NULL;
        size_t bytes = roll_bytes(&d, MIB(2));
        OK(galloc_pool_malloc(c->pool, &p, bytes, s));
        put(s, p, bytes, c->seed);
        if (!roll_below(&d, 4)) OK(galloc_record_stream(p, s == own ? c->shared : own));
        EXPECT(info_of(p).pool == c->pool);
        OK(galloc_free(p, s));
        if (!roll_below(&d, 50)) OK(galloc_pool_trim(c->pool, 0, NULL));
        if (!roll_below(&d, 50)) (void)stats_of(c->pool);
    }
    OK(galloc_stream_retire(own));
    stream_end(own);
    return NULL;
}

TEST(threads_under_each_backend)
{
    enum { THREADS = 4 };
    for (int i = 2; i < SETTINGS; i++) {
        begin();
        pthread_t threads[THREADS];
        crowd crowds[THREADS];
        galloc_pool *pool = pool_of(settings[i]);
        cudaStream_t shared = stream_new();
        for (int k = 0; k < THREADS; k++) {
            crowds[k] = (crowd){pool, shared, test_seed() + (uint64_t)k};
            EXPECT_EQ(pthread_create(&threads[k], NULL, play_in_crowd, &crowds[k]), 0);
        }
        for (int k = 0; k < THREADS; k++) pthread_join(threads[k], NULL);
        galloc_stats s = stats_of(pool);
        EXPECT_EQ(s.mallocs, 200 * THREADS);
        EXPECT_EQ(s.frees, 200 * THREADS);
        EXPECT_EQ(s.live.current, 0);
        expect_healthy(pool, 0);
        OK(galloc_pool_trim(pool, 0, NULL));
        EXPECT_EQ(stats_of(pool).reserved.current, 0);
        EXPECT_EQ(sim_physical(0), 0);
        pool_end(pool);
        stream_end(shared);
        finish();
    }
}

/* What other threads read while memory that the driver's pool keeps becomes a block. */
static struct {
    galloc_pool *pool;
    int stop, wrong;
} reads;

static void read_once(const char *function)
{
    galloc_stats stats = stats_of(reads.pool);
    int wrong = stats.reserved.current != MIB(4) || stats.reserved.total || stats.reserved.peak != MIB(4) ||
                stats.cached.current != MIB(4) - stats.allocated.current;
    (void)function;
    if (wrong) __atomic_store_n(&reads.wrong, 1, __ATOMIC_RELEASE);
}

static void *read_on(void *arg)
{
    while (!__atomic_load_n(&reads.stop, __ATOMIC_ACQUIRE)) read_once(NULL);
    return arg;
}

TEST(what_is_held_does_not_seem_to_change_while_a_block_is_made)
{
    begin_with_devices(1, SIM_PACE_PROMPT);
    enum { READERS = 4 };
    pthread_t reader[READERS];
    cudaStream_t s = stream_new();
    memset(&reads, 0, sizeof reads);
    reads.pool = pool_of("backend:cudaMallocAsync");
    OK(galloc_free(get(reads.pool, MIB(4), s), s));
    OK(galloc_pool_stats_reset(reads.pool));
    for (int i = 0; i < READERS; i++) EXPECT_EQ(pthread_create(&reader[i], NULL, read_on, NULL), 0);
    for (int i = 0; i < 20000 && !__atomic_load_n(&reads.wrong, __ATOMIC_ACQUIRE); i++)
        OK(galloc_free(get(reads.pool, MIB(4), s), s));
    sim_hook(read_once, NULL); /* and during each call of the driver */
    OK(galloc_free(get(reads.pool, MIB(4), s), s));
    sim_hook(NULL, NULL);
    __atomic_store_n(&reads.stop, 1, __ATOMIC_RELEASE);
    for (int i = 0; i < READERS; i++) EXPECT_EQ(pthread_join(reader[i], NULL), 0);
    EXPECT_EQ(reads.wrong, 0);
    pool_end(reads.pool);
    stream_end(s);
    finish();
}

static void *capture_and_drop(void *pool)
{
    cudaStream_t s = stream_new();
    for (int i = 0; i < 600; i++) {
        cudaGraph_t graph;
        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
        OK(galloc_free(get(pool, KIB(64), s), s));
        OK(cudaStreamEndCapture(s, &graph));
        OK(cudaGraphDestroy(graph));
    }
    stream_end(s);
    return NULL;
}

/* The driver's pool grows in one thread while graphs take and return memory in another. */
TEST(graphs_come_and_go_beside_allocations)
{
    begin();
    pthread_t thread;
    galloc_pool *pool = pool_of("backend:cudaMallocAsync");
    cudaStream_t s = stream_new();
    EXPECT_EQ(pthread_create(&thread, NULL, capture_and_drop, pool), 0);
    for (int i = 0; i < 600; i++) OK(galloc_free(get(pool, KIB(64), s), s));
    pthread_join(thread, NULL);
    expect_healthy(pool, 0);
    pool_end(pool);
    stream_end(s);
    finish();
}

static struct {
    galloc_pool *pool;
    void *p;
    int left; /* so many nodes before that */
} beside;

static void *allocate_beside(void *arg)
{
    beside.p = get(beside.pool, 1000, cudaStreamPerThread);
    return arg;
}

static void let_allocate_beside(void)
{
    pthread_t thread;
    if (beside.left-- != 0) return;
    EXPECT_EQ(pthread_create(&thread, NULL, allocate_beside, NULL), 0);
    pthread_join(thread, NULL);
}

/* A thread has seen that the maps lack a node, and before it makes the node another thread makes the same one and
   enters a block there. */
TEST(two_threads_that_lack_one_node_of_the_maps_make_it_once)
{
    int between = 1;
    for (int nth = 0; between; nth++) {
        begin();
        galloc_pool *pool = pool_of("backend:cudaMalloc");
        cudaStream_t s = stream_new();
        beside.pool = pool_of("backend:cudaMalloc");
        beside.p = NULL;
        beside.left = nth;
        inside_on_map = let_allocate_beside;
        void *p = get(pool, 1000, s);
        inside_on_map = NULL;
        between = beside.p != NULL;
        if (!between) EXPECT(nth > 1); /* else nothing is tested */
        OK(galloc_free(p, s));
        if (between) {
            EXPECT_EQ((uintptr_t)beside.p >> 16, (uintptr_t)p >> 16);
            EXPECT(info_of(beside.p).pool == beside.pool);
            OK(galloc_free(beside.p, s));
        }
        pool_end(beside.pool);
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

static cudaStream_t retired_meanwhile;

static void *retire_it(void *arg)
{
    OK(galloc_stream_retire(retired_meanwhile));
    retired_meanwhile = NULL;
    return arg;
}

static void retire_during_free(const char *function)
{
    pthread_t thread;
    if (!retired_meanwhile || strcmp(function, "cuMemFreeAsync") != 0) return;
    EXPECT_EQ(pthread_create(&thread, NULL, retire_it, NULL), 0);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
}

/* What another thread retires while the driver frees on it is forgotten as other retired streams are. */
TEST(a_stream_that_is_retired_during_a_free_is_forgotten)
{
    begin();
    galloc_pool *pool = pool_of("backend:cudaMallocAsync");
    cudaStream_t s = stream_new(), t = stream_new();
    void *p = get_used(pool, MIB(2), s, 1), *q = get_used(pool, MIB(2), s, 1), *r = get_used(pool, MIB(2), t, 1);
    galloc_stream_stats all[4];
    int n = 0;
    OK(galloc_free(q, s));
    retired_meanwhile = s;
    sim_hook(retire_during_free, NULL);
    OK(galloc_free(p, s));
    sim_hook(NULL, NULL);
    EXPECT(!retired_meanwhile);
    stream_end(s);
    sim_run(-1);
    OK(galloc_free(r, t));
    for (int i = 0; i < 300; i++) OK(galloc_free(get(pool, KIB(4), t), t));
    OK(galloc_pool_streams(pool, all, 4, &n));
    EXPECT_EQ(n, 1);
    expect_healthy(pool, 1);
    pool_end(pool);
    stream_end(t);
    finish();
}

/* ---- cudaMalloc -------------------------------------------------------------------------------------------------- */

/* No block is used again before the driver has had it back, which it has when the work is known to be done. */
TEST(each_allocation_is_one_of_the_drivers)
{
    begin_still();
    galloc_pool *pool = pool_of("backend:cudaMalloc");
    cudaStream_t s = stream_new();
    void *p = get(pool, MIB(4), s), *q;
    put(s, p, MIB(4), 1);
    OK(galloc_free(p, s));
    EXPECT_EQ(sim_calls("cuMemFree"), 0); /* nor has anybody waited */
    EXPECT_EQ(sim_calls("cuEventRecord"), 1);
    q = get(pool, MIB(4), s);
    EXPECT(q != p);
    EXPECT_EQ(sim_calls("cuMemAlloc"), 2);
    EXPECT_EQ(sim_calls("cuMemFree"), 0);
    sim_run(-1);
    p = get(pool, 1, s);
    EXPECT_EQ(sim_calls("cuMemFree"), 1);
    EXPECT_EQ(stats_of(pool).reserved.current, MIB(4) + 512);
    EXPECT_EQ(stats_of(pool).hits, 0);
    OK(galloc_free(p, s));
    OK(galloc_free(q, s));
    pool_end(pool);
    EXPECT_EQ(sim_calls("cuMemAlloc"), 3);
    EXPECT_EQ(sim_calls("cuMemFree"), 3);
    stream_end(s);
    finish();
}

/* What is captured gets memory of its own, and keeps it until the graph is gone. */
TEST(captures_keep_what_cudaMalloc_gave)
{
    static const char *const kinds[] = {"backend:cudaMalloc", "backend:cudaMallocAsync"};
    for (int i = 0; i < 2; i++) {
        begin();
        galloc_pool *pool = pool_of(kinds[i]);
        cudaStream_t s = stream_new();
        cudaGraph_t graph = NULL;
        cudaGraphExec_t exec = NULL;
        void *early = get(pool, MIB(2), s), *p, *q;
        OK(galloc_free(early, s));
        OK(cudaStreamSynchronize(s));
        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
        p = get(pool, MIB(4), s);
        put(s, p, MIB(4), 1);
        OK(galloc_free(p, s));
        q = get(pool, MIB(4), s);
        EXPECT(q != p);
        EXPECT_EQ(sim_calls("cuMemFree"), 0); /* that waits */
        OK(cudaStreamEndCapture(s, &graph));
        OK(cudaGraphInstantiate(&exec, graph, 0));
        OK(galloc_free(q, s));
        q = get(pool, MIB(8), s);
        OK(cudaGraphLaunch(exec, s));
        put(s, q, MIB(8), 2);
        OK(cudaStreamSynchronize(s));
        EXPECT_EQ(info_of(p).state, GALLOC_STATE_FREE);
        EXPECT_EQ(stats_of(pool).graph_bytes, MIB(8));
        OK(galloc_free(q, s));
        EXPECT_EQ(galloc_pool_destroy(pool), cudaErrorNotPermitted);
        OK(cudaGraphExecDestroy(exec));
        OK(cudaGraphDestroy(graph));
        expect_healthy(pool, 0);
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

/* ---- cudaMallocAsync --------------------------------------------------------------------------------------------- */

/* The stream that freed memory has it again at once, another one when it may; nothing is recorded or waited for. */
TEST(the_driver_reuses_in_stream_order)
{
    begin_still();
    galloc_pool *pool = pool_of("backend:cudaMallocAsync");
    cudaStream_t s = stream_new(), t = stream_new();
    void *p = get(pool, MIB(4), s), *q;
    put(s, p, MIB(4), 1);
    OK(galloc_free(p, s));
    q = get(pool, MIB(4), s);
    EXPECT(q == p);
    put(s, q, MIB(4), 2);
    OK(galloc_free(q, s));
    q = get(pool, MIB(4), t);
    EXPECT(q != p);
    galloc_stats stats = stats_of(pool);
    EXPECT_EQ(stats.reserved.current, MIB(8));
    EXPECT_EQ(stats.reserved.peak, MIB(8));
    EXPECT_EQ(stats.reserved.total, MIB(8));
    EXPECT_EQ(stats.cached.current, MIB(4));
    EXPECT_EQ(stats.cached.peak, MIB(4));
    EXPECT_EQ(stats.free_bytes, MIB(4));
    EXPECT_EQ(stats.driver.pool_free, 2);
    OK(galloc_free(q, t));
    EXPECT_EQ(event_calls(), 0);
    size_t released = 0;
    OK(galloc_pool_trim(pool, MIB(4), &released));
    EXPECT_EQ(released, MIB(4));
    OK(galloc_pool_trim(pool, 0, &released));
    EXPECT_EQ(released, MIB(4));
    EXPECT_EQ(sim_physical(0), 0);
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* The driver's pool gives memory back by itself when the program waits: a trim does not count that as its own. */
TEST(what_was_gone_before_a_trim_does_not_count)
{
    begin_still();
    galloc_pool *pool = pool_of("backend:cudaMallocAsync,release_threshold:0");
    cudaStream_t s = stream_new();
    size_t released = 1;
    OK(galloc_free(get_used(pool, MIB(64), s, 1), s));
    OK(cudaStreamSynchronize(s));
    EXPECT_EQ(sim_physical(0), 0);
    EXPECT_EQ(stats_of(pool).reserved.current, MIB(64));
    OK(galloc_pool_trim(pool, 0, &released));
    EXPECT_EQ(released, 0);
    EXPECT_EQ(stats_of(pool).reserved.current, 0);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* The driver gives a stream memory that its own earlier work still uses. A block of such memory that others free, who
   have not used it, waits for that work. */
TEST(what_others_free_waits_for_the_stream_that_it_was_allocated_on)
{
    for (int n = 1; n < 4; n++) {
        begin_still();
        galloc_pool *pool = pool_of("backend:cudaMallocAsync,reuse:completed");
        cudaStream_t s = stream_new(), others[3] = {stream_new(), stream_new(), stream_new()};
        void *p = get_used(pool, MIB(4), s, 1), *q;
        OK(galloc_free(p, s));
        q = get(pool, MIB(4), s);
        EXPECT(q == p);
        OK(galloc_free_after(q, others, n));
        for (int i = 0; i < n; i++) OK(cudaStreamSynchronize(others[i]));
        q = get_used(pool, MIB(4), others[0], 2);
        look(others[0], q, MIB(4), 2);
        OK(galloc_free(q, others[0]));
        OK(cudaDeviceSynchronize());
        expect_healthy(pool, 0);
        pool_end(pool);
        stream_end(s);
        for (int i = 0; i < 3; i++) stream_end(others[i]);
        finish();
    }
}

/* A shrink on another stream leaves a mark at the end of the block: the driver does not get the whole back on the
   stream that allocated it, before the other one has done with the end. */
TEST(what_another_stream_cut_off_is_not_given_to_the_driver_in_stream_order)
{
    for (int completed = 0; completed < 2; completed++) {
        begin_still();
        galloc_pool *pool = pool_of("backend:cudaMallocAsync,reuse:none");
        cudaStream_t s = stream_new(), t = stream_new();
        char *p = get_used(pool, MIB(4), s, 1), *q;
        order(s, t);
        put(t, p + MIB(2), MIB(2), 2);
        OK(galloc_resize(p, MIB(2), t));
        if (completed) OK(cudaStreamSynchronize(t));
        OK(galloc_free(p, s));
        q = get_used(pool, MIB(4), s, 3);
        EXPECT(completed || q != p);
        look(s, q, MIB(4), 3);
        OK(cudaDeviceSynchronize());
        OK(galloc_free(q, s));
        OK(galloc_pool_trim(pool, 0, NULL));
        EXPECT_EQ(stats_of(pool).reserved.current, 0);
        pool_end(pool);
        stream_end(s);
        stream_end(t);
        finish();
    }
}

/* Which device is current matters neither to allocations, uses and frees, nor to what ends. */
TEST(another_device_may_be_current)
{
    for (int i = 2; i < SETTINGS; i++) {
        begin_with_devices(2, SIM_PACE_RANDOM);
        OK(cudaSetDevice(0));
        galloc_pool *pool = pool_of(settings[i]);
        cudaStream_t s = stream_new(), own = NULL;
        OK(cudaSetDevice(1));
        own = stream_new();
        for (int round = 0; round < 4; round++) {
            void *p = get(pool, MIB(4), s), *q = get(pool, MIB(4), s), *aligned = NULL;
            galloc_request request = {.bytes = 1000, .alignment = KIB(64), .stream = s, .pool = pool};
            OK(galloc_alloc(&aligned, &request));
            OK(cudaMemsetAsync(p, 1, MIB(4), s));
            OK(cudaMemcpyPeerAsync(q, 0, p, 0, MIB(4), s));
            OK(cudaStreamSynchronize(s));
            OK(galloc_free(p, s));
            OK(galloc_free(aligned, s));
            OK(galloc_free(q, own));
            if (round % 2) OK(galloc_pool_trim(pool, 0, NULL));
            if (round % 2) EXPECT_EQ(stats_of(pool).reserved.current, 0);
            expect_healthy(pool, 0);
            EXPECT_EQ(sim_physical(1), 0);
            int device = -1;
            OK(cudaGetDevice(&device));
            EXPECT_EQ(device, 1);
        }
        pool_end(pool);
        EXPECT_EQ(sim_physical(0), 0);
        stream_end(s);
        stream_end(own);
        finish();
    }
}

/* The settings are said in the driver's terms. */
TEST(reuse_is_what_the_driver_is_told)
{
    static const struct { const char *text; int follow, any, wait; } cases[] = {
        {"backend:cudaMallocAsync,reuse:none", 0, 0, 0}, {"backend:cudaMallocAsync,reuse:completed", 0, 1, 0},
        {"backend:cudaMallocAsync,reuse:followed", 1, 0, 0}, {"backend:cudaMallocAsync,reuse:wait", 0, 0, 1},
        {"backend:cudaMallocAsync", 1, 1, 1}};
    for (int i = 0; i < 5; i++) {
        begin_still();
        galloc_pool *pool = pool_of(cases[i].text);
        int waits = -1; /* the simulated device keeps this one, and never waits */
        EXPECT_EQ(cuMemPoolGetAttribute(inside_driver_pool(pool),
                                        CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES, &waits), CUDA_SUCCESS);
        EXPECT_EQ(waits, cases[i].wait);
        cudaStream_t s = stream_new(), t = stream_new();
        void *p = get(pool, MIB(4), s), *q;
        put(s, p, MIB(4), 1);
        OK(galloc_free(p, s));
        order(s, t);
        q = get(pool, MIB(4), t);
        EXPECT_EQ(q == p, cases[i].follow);
        OK(galloc_free(q, t));
        p = get(pool, MIB(8), s);
        OK(galloc_free(p, s));
        sim_run(-1);
        q = get(pool, MIB(8), t);
        EXPECT_EQ(q == p, cases[i].any);
        OK(galloc_free(q, t));
        pool_end(pool);
        stream_end(s);
        stream_end(t);
        finish();
    }
}

/* At its limit a pool counts what the driver's pool keeps for it: that serves, and is not given back first. */
TEST(what_the_drivers_pool_keeps_serves_at_the_limit)
{
    for (int thrown = 0; thrown < 2; thrown++) {
        begin_with_devices(1, SIM_PACE_PROMPT);
        galloc_config config = galloc_config_default();
        OK(galloc_config_parse(&config, thrown ? "backend:cudaMallocAsync,throw_on_cudamalloc_oom:True"
                                               : "backend:cudaMallocAsync", NULL, 0));
        config.memory_limit = MIB(64);
        galloc_pool *pool = pool_new(&config);
        cudaStream_t s = stream_new();
        for (int i = 0; i < 5; i++) OK(galloc_free(get(pool, MIB(48), s), s));
        EXPECT_EQ(sim_calls("cuMemPoolTrimTo"), 0);
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

/* What the driver made for a request that a limit then refuses goes back at once. The sizes differ, so that the
   simulated driver's pool serves none from what it keeps. */
TEST(a_request_that_a_limit_refuses_leaves_the_drivers_pool_as_it_was)
{
    begin_with_devices(1, SIM_PACE_PROMPT);
    galloc_pool *pool = pool_of("backend:cudaMallocAsync,device_limit:64M,throw_on_cudamalloc_oom:True");
    galloc_pool *other = pool_of("backend:cudaMallocAsync");
    cudaStream_t s = stream_new();
    void *p = NULL;
    OK(galloc_free(get(pool, MIB(40), s), s));
    for (size_t i = 1; i < 6; i++) {
        EXPECT_EQ(galloc_pool_malloc(pool, &p, MIB(40 + 2 * i), s), cudaErrorMemoryAllocation);
        EXPECT(strstr(log_text, "the device_limit is") != NULL);
        EXPECT_EQ(sim_physical(0), MIB(40));
        EXPECT_EQ(stats_of(pool).reserved.current, MIB(40));
        expect_healthy(pool, 1);
    }
    EXPECT_EQ(sim_calls("cuMemPoolTrimTo"), 5);
    p = get(other, MIB(24), s);
    OK(galloc_free(p, s));
    EXPECT_EQ(stats_of(pool).reserved.peak, MIB(40));
    OK(galloc_free(get(pool, MIB(40), s), s));
    EXPECT_EQ(sim_physical(0), MIB(64));
    pool_end(pool);
    pool_end(other);
    stream_end(s);
    finish();
}

/* While the stream's work keeps it from going back, it counts as held, and the driver is asked for no more. */
TEST(what_a_limit_refused_and_work_keeps_counts_as_held)
{
    begin_still();
    galloc_pool *pool = pool_of("backend:cudaMallocAsync,device_limit:64M,throw_on_cudamalloc_oom:True");
    cudaStream_t s = stream_new(), t = stream_new();
    void *p = get_used(pool, MIB(40), s, 1);
    OK(galloc_free(p, s));
    EXPECT_EQ(galloc_pool_malloc(pool, &p, MIB(42), s), cudaErrorMemoryAllocation);
    EXPECT_EQ(stats_of(pool).reserved.current, sim_physical(0));
    expect_healthy(pool, 0);
    for (size_t i = 0; i < 4; i++) {
        EXPECT_EQ(galloc_pool_malloc(pool, &p, MIB(4 + 2 * i), i % 2 ? s : t), cudaErrorMemoryAllocation);
        EXPECT_EQ(sim_physical(0), MIB(82));
    }
    sim_run(-1); /* now it goes with the next request */
    OK(galloc_free(get(pool, MIB(40), s), s));
    EXPECT(sim_physical(0) <= MIB(64));
    EXPECT_EQ(sim_physical_peak(0), MIB(82));
    expect_healthy(pool, 0);
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* A limit that is lowered below what the pool holds gives nothing out before so much is given back. */
TEST(what_the_drivers_pool_keeps_above_a_lowered_limit_is_given_back)
{
    for (int thrown = 0; thrown < 2; thrown++) {
        begin_with_devices(1, SIM_PACE_PROMPT);
        galloc_pool *pool = pool_of(thrown ? "backend:cudaMallocAsync,throw_on_cudamalloc_oom:True"
                                           : "backend:cudaMallocAsync"), *other = NULL;
        cudaStream_t s = stream_new();
        void *p = get(pool, MIB(16), s), *q;
        OK(galloc_free(get(pool, MIB(40), s), s));
        if (thrown) other = pool_of("device_limit:32M");
        else OK(galloc_pool_set_limit(pool, MIB(32)));
        q = get(pool, MIB(8), s);
        EXPECT_EQ(sim_physical(0), MIB(24));
        expect_healthy(pool, 1);
        OK(galloc_free(p, s));
        OK(galloc_free(q, s));
        if (other) pool_end(other);
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

static galloc_pool *lowered;

static void lower_the_limit(const char *function)
{
    if (!strcmp(function, "cuMemAllocFromPoolAsync")) inside_set_memory_limit(lowered, MIB(16));
}

/* The same when that happens during a request, which the driver's pool has served from what it keeps. */
TEST(a_limit_lowered_during_a_request_holds_for_it)
{
    begin_with_devices(1, SIM_PACE_PROMPT);
    galloc_pool *pool = lowered = pool_of("backend:cudaMallocAsync,throw_on_cudamalloc_oom:True");
    cudaStream_t s = stream_new();
    void *p = get(pool, MIB(32), s), *q = NULL;
    OK(galloc_free(get(pool, MIB(8), s), s));
    sim_hook(lower_the_limit, NULL);
    EXPECT_EQ(galloc_pool_malloc(pool, &q, MIB(8), s), cudaErrorMemoryAllocation);
    sim_hook(NULL, NULL);
    EXPECT(strstr(log_text, "the pool's memory_limit is") != NULL);
    EXPECT_EQ(stats_of(pool).reserved.current, MIB(40));
    expect_healthy(pool, 1);
    OK(galloc_free(p, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* Memory that could not go back in the order of its stream stays away from others until the stream's work is done: the
   driver had given it to a stream that was still using it. */
TEST(what_the_driver_does_not_take_back_in_stream_order_waits_for_its_stream)
{
    for (int way = 0; way < 3; way++) {
        begin_still();
        galloc_pool *pool = lowered = pool_of("backend:cudaMallocAsync,throw_on_cudamalloc_oom:True,reuse:none");
        cudaStream_t s = stream_new(), t = stream_new();
        void *p = get(pool, MIB(32), s), *q = get_used(pool, MIB(8), s, 1), *r = NULL;
        size_t released = 0;
        OK(galloc_free(q, s));
        sim_hook(lower_the_limit, NULL);
        sim_fail("cuMemFreeAsync", 1, 0, cudaErrorInvalidValue);
        EXPECT_EQ(galloc_pool_malloc(pool, &r, MIB(8), s), cudaErrorMemoryAllocation);
        sim_fail_clear();
        sim_hook(NULL, NULL);
        EXPECT_EQ(stats_of(pool).quarantined, MIB(8));
        EXPECT_EQ(stats_of(pool).reserved.current, MIB(40));
        expect_healthy(pool, 1);
        OK(galloc_pool_set_limit(pool, MIB(128)));
        if (way == 0) OK(galloc_free(get_used(pool, MIB(8), t, 2), t));
        if (way == 1) OK(galloc_pool_trim(pool, 0, &released));
        if (way == 1) EXPECT_EQ(released, MIB(8));
        expect_healthy(pool, 1);
        if (way == 2) OK(galloc_stream_retire(s));
        OK(galloc_free(p, way == 2 ? t : s));
        if (way == 0) EXPECT_EQ(stats_of(pool).quarantined, MIB(8));
        pool_end(pool);
        EXPECT_EQ(sim_physical(0), 0);
        stream_end(s);
        stream_end(t);
        finish();
    }
}

/* A block cannot be made for lack of host memory, its memory cannot go back, and the driver does not tell what its pool
   holds: the limit counts what is held all the same. */
TEST(what_does_not_go_back_counts_though_the_driver_tells_nothing)
{
    int held = 0, failed = 1;
    for (int nth = 1; failed; nth++) {
        begin();
        galloc_pool *pool = pool_of("backend:cudaMallocAsync,memory_limit:64M");
        cudaStream_t s = stream_new();
        void *p = NULL;
        sim_fail("cuMemFreeAsync", 1, 0, cudaErrorUnknown);
        sim_fail("cuMemPoolGetAttribute", 1, 1, cudaErrorUnknown);
        sim_fail_malloc(nth, 0);
        cudaError_t error = galloc_pool_malloc(pool, &p, MIB(1), s);
        failed = sim_failed_mallocs() != 0;
        held += error && stats_of(pool).reserved.current;
        EXPECT_EQ(galloc_pool_check(pool), 0);
        sim_fail_clear();
        if (!error) OK(galloc_free(p, s));
        pool_end(pool);
        stream_end(s);
        finish();
        if (!EXPECT(nth < 100)) break;
    }
    EXPECT(held > 0);
}

/* A driver that runs out of memory gives up what its pools keep before it refuses: that is not held any more. */
TEST(what_a_driver_gives_up_before_it_refuses_is_not_held)
{
    sim_options options = sim_defaults();
    options.memory = MIB(128);
    options.pace = SIM_PACE_PROMPT;
    begin_with(options);
    galloc_pool *pool = pool_of("backend:cudaMallocAsync,throw_on_cudamalloc_oom:True");
    cudaStream_t s = stream_new();
    void *others = NULL, *p = NULL;
    OK(cudaMalloc(&others, MIB(64)));
    OK(galloc_free(get(pool, MIB(16), s), s));
    EXPECT_EQ(stats_of(pool).reserved.current, MIB(16));
    EXPECT_EQ(galloc_pool_malloc(pool, &p, MIB(80), s), cudaErrorMemoryAllocation);
    EXPECT_EQ(sim_physical(0), MIB(64));
    EXPECT_EQ(stats_of(pool).reserved.current, 0);
    EXPECT_EQ(inside_headroom(pool), MIB(128));
    expect_healthy(pool, 0);
    OK(cudaFree(others));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* What the driver's pool keeps makes room for a graph, whose memory is not of that pool. */
TEST(what_the_drivers_pool_keeps_makes_room_for_a_graph)
{
    for (int thrown = 0; thrown < 2; thrown++) {
        begin_with_devices(1, SIM_PACE_PROMPT);
        galloc_pool *pool = pool_of(thrown ? "backend:cudaMallocAsync,device_limit:64M,throw_on_cudamalloc_oom:True"
                                           : "backend:cudaMallocAsync,device_limit:64M");
        cudaStream_t s = stream_new();
        cudaGraph_t graph = NULL;
        void *p = NULL;
        OK(galloc_free(get(pool, MIB(48), s), s));
        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
        EXPECT_EQ(galloc_pool_malloc(pool, &p, MIB(48), s), thrown ? cudaErrorMemoryAllocation : cudaSuccess);
        EXPECT_EQ(stats_of(pool).reserved.current, MIB(48));
        EXPECT_EQ(sim_calls("cuMemPoolTrimTo"), thrown ? 0 : 1);
        if (p) OK(galloc_free(p, s));
        OK(cudaStreamEndCapture(s, &graph));
        expect_healthy(pool, 0);
        OK(cudaGraphDestroy(graph));
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

/* What the driver's pool keeps of other sizes gives way once its work is done, even where what a limit refused first is
   not known to be free yet. */
TEST(what_the_drivers_pool_keeps_gives_way_after_a_wait)
{
    begin_still();
    galloc_pool *pool = pool_of("backend:cudaMallocAsync,device_limit:64M");
    cudaStream_t s = stream_new(), t = stream_new();
    for (size_t i = 0; i < 4; i++) {
        cudaStream_t at = i % 2 ? t : s;
        OK(galloc_free(get_used(pool, MIB(40 + 2 * i), at, i), at));
        EXPECT(stats_of(pool).reserved.current <= MIB(64));
        expect_healthy(pool, 1);
    }
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* A trim of the driver's pool does not wait, so a limit of waits does not forbid it. */
TEST(what_the_drivers_pool_keeps_is_replaced_within_a_limit_of_waits)
{
    begin_with_devices(1, SIM_PACE_PROMPT);
    galloc_pool *pool = pool_of("backend:cudaMallocAsync,device_limit:64M,wait_limit_ms:0");
    cudaStream_t s = stream_new();
    OK(galloc_free(get(pool, MIB(40), s), s));
    OK(galloc_free(get(pool, MIB(42), s), s));
    EXPECT(sim_physical(0) <= MIB(64));
    expect_healthy(pool, 1);
    galloc_pool *other = pool_of("wait_limit_ms:0"); /* it has what the first one keeps */
    OK(galloc_free(get(other, MIB(40), s), s));
    EXPECT(sim_physical(0) <= MIB(64));
    EXPECT_EQ(sim_blocking_calls(), 0);
    pool_end(other);
    pool_end(pool);
    stream_end(s);
    finish();
}

TEST(release_threshold_is_the_drivers)
{
    begin();
    galloc_pool *pool = pool_of("backend:cudaMallocAsync,release_threshold:0");
    cudaStream_t s = stream_new();
    OK(galloc_free(get(pool, MIB(8), s), s));
    EXPECT_EQ(sim_physical(0), MIB(8));
    OK(cudaStreamSynchronize(s));
    EXPECT_EQ(sim_physical(0), 0);
    OK(galloc_free(get(pool, MIB(2), s), s));
    EXPECT_EQ(stats_of(pool).reserved.current, MIB(2));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* With a backend each block is one allocation, with like:pytorch, too: no segment as large as PyTorch's is needed. */
TEST(a_refusal_of_a_backend_like_pytorch_names_no_segment)
{
    begin_still();
    galloc_pool *pool = pool_of("like:pytorch,backend:cudaMalloc,memory_limit:64M");
    cudaStream_t s = stream_new();
    void *p = get(pool, MIB(60), s), *q = NULL;
    galloc_report report;
    EXPECT_EQ(galloc_pool_malloc(pool, &q, MIB(6), s), cudaErrorMemoryAllocation);
    OK(galloc_oom_report(&report));
    EXPECT(strstr(report.cause, "needs a segment") == NULL);
    EXPECT_EQ(report.largest_possible, MIB(4));
    q = get(pool, MIB(4), s);
    OK(galloc_free(q, s));
    OK(galloc_free(p, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* A capture that comes to nothing allocates nothing; its blocks are freed like others, wherever. */
TEST(captures_that_come_to_nothing)
{
    begin();
    galloc_pool *pool = pool_of("backend:cudaMallocAsync");
    cudaStream_t s = stream_new(), t = stream_new();
    cudaGraph_t graph = NULL;
    void *p[4];
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    for (int i = 0; i < 4; i++) p[i] = get(pool, MIB(2), s);
    OK(galloc_record_stream(p[2], t));
    EXPECT_EQ(cudaEventQuery(NULL) != cudaSuccess, 1);
    (void)cudaGetLastError();
    sim_findings_clear();
    OK(galloc_free(p[0], s)); /* the capture has been lost */
    EXPECT_EQ(cudaStreamEndCapture(s, &graph), cudaErrorStreamCaptureInvalidated);
    (void)cudaGetLastError();
    OK(galloc_free(p[1], s));
    OK(galloc_free(p[2], t));
    OK(galloc_free(p[3], t));
    EXPECT_EQ(stats_of(pool).live.current, 0);
    OK(galloc_pool_trim(pool, 0, NULL));
    EXPECT_EQ(stats_of(pool).reserved.current, 0);
    expect_healthy(pool, 0);
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* The driver lets a stream have memory that others are not done with, and that the stream comes after. If it is retired
   before it has done anything with that, the free on a third stream must wait for it all the same. */
TEST(memory_of_a_retired_stream_waits_for_what_that_came_after)
{
    begin_still();
    galloc_pool *pool = pool_of("backend:cudaMallocAsync");
    cudaStream_t s = stream_new(), t = stream_new(), u = stream_new();
    void *p = get(pool, MIB(2), s), *q;
    put(s, p, MIB(2), 1);
    OK(galloc_free(p, s));
    order(s, t);
    q = get(pool, MIB(2), t);
    EXPECT(q == p);
    OK(galloc_stream_retire(t));
    OK(galloc_free(q, u));
    p = get(pool, MIB(2), u);
    EXPECT(p != q);
    put(u, p, MIB(2), 2);
    EXPECT_EQ(sim_findings(SIM_ANY), 0);
    OK(galloc_free(p, u));
    sim_run(-1);
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    stream_end(u);
    finish();
}

/* Once galloc has noticed the reset: the program may have other memory there. */
TEST(what_a_reset_took_is_not_usable)
{
    begin();
    galloc_config config = galloc_config_default();
    config.backend = GALLOC_BACKEND_CUDA_MALLOC;
    galloc_pool *pool = pool_new(&config);
    void *p = get(pool, MIB(4), cudaStreamLegacy);
    EXPECT_EQ(info_of(p).usable, MIB(4));
    OK(cudaDeviceReset());
    void *q = get(pool, MIB(6), cudaStreamLegacy);
    EXPECT(q != p);
    EXPECT_EQ(info_of(p).usable, 0);
    EXPECT_EQ(info_of(q).usable, MIB(6));
    OK(galloc_free(p, cudaStreamLegacy));
    OK(galloc_free(q, cudaStreamLegacy));
    pool_end(pool);
    finish();
}

/* Memory that a graph allocated goes with a reset like all else, and is not counted as a graph's any more. */
TEST(a_reset_takes_what_graphs_have_left)
{
    begin();
    galloc_pool *pool = pool_of("backend:cudaMallocAsync");
    cudaStream_t s = stream_new();
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    void *p = get(pool, MIB(2), s);
    OK(cudaStreamEndCapture(s, &graph));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    OK(cudaGraphLaunch(exec, s));
    OK(cudaStreamSynchronize(s));
    EXPECT_EQ(stats_of(pool).reserved.current, MIB(2));
    OK(cudaDeviceReset());
    OK(cudaSetDevice(0));
    OK(galloc_pool_trim(pool, 0, NULL)); /* here it is noticed */
    EXPECT_EQ(galloc_pool_check(pool), 0);
    s = stream_new();
    OK(galloc_free(p, s));
    OK(cudaGraphExecDestroy(exec));
    OK(cudaGraphDestroy(graph));
    OK(galloc_pool_trim(pool, 0, NULL));
    EXPECT_EQ(stats_of(pool).reserved.current, 0);
    EXPECT_EQ(galloc_pool_check(pool), 0);
    pool_end(pool);
    finish();
}

/* An address inside a block tells the block, in the pool that has it and in no other, before and after a reset. */
TEST(an_address_inside_a_block_tells_its_pool)
{
    static const char *const backends[] = {"backend:cudaMalloc", "backend:cudaMallocAsync"};
    for (int i = 0; i < 2; i++) {
        begin();
        galloc_pool *pool[2] = {pool_of(backends[i]), pool_of(backends[i])};
        cudaStream_t s = stream_new();
        char *p[2];
        for (int k = 0; k < 2; k++) p[k] = get(pool[k], MIB(2), s);
        for (int round = 0; round < 2; round++) {
            for (int k = 0; k < 2; k++) {
                for (int at = 0; at < 2; at++) {
                    galloc_pointer info = info_of(p[k] + at * KIB(4));
                    EXPECT(info.pool == pool[k]);
                    EXPECT(info.base == p[k]);
                    EXPECT_EQ(info.state, GALLOC_STATE_USED);
                }
                EXPECT_EQ(galloc_free(p[k] + KIB(4), s), cudaErrorInvalidDevicePointer);
                EXPECT(strstr(galloc_last_message(), "lies inside the block of 2097152 bytes"));
            }
            if (round) continue;
            OK(cudaDeviceReset());
            s = stream_new();
            for (int k = 0; k < 2; k++) OK(galloc_pool_trim(pool[k], 0, NULL));
        }
        for (int k = 0; k < 2; k++) OK(galloc_free(p[k], s));
        for (int k = 0; k < 2; k++) pool_end(pool[k]);
        finish();
    }
}

/* After a reset the driver's pool is a new one. What keeps it from being made is the error of the allocation. */
TEST(a_driver_pool_that_is_not_made_again_after_a_reset_is_an_error)
{
    begin();
    galloc_pool *pool = pool_of("backend:cudaMallocAsync");
    cudaStream_t s = stream_new();
    void *p = NULL;
    OK(galloc_free(get(pool, MIB(2), s), s));
    OK(cudaDeviceReset());
    s = stream_new();
    sim_fail("cuMemPoolCreate", 1, 1, cudaErrorNotPermitted);
    EXPECT_EQ(galloc_pool_malloc(pool, &p, MIB(2), s), cudaErrorNotPermitted);
    EXPECT(p == NULL);
    sim_fail_clear();
    EXPECT_EQ(galloc_pool_check(pool), 0);
    OK(galloc_free(get_used(pool, MIB(2), s, 1), s));
    expect_healthy(pool, 0);
    pool_end(pool);
    finish();
}

/* A result may be freed once, at any time; the graph can be launched again, also afterwards. So may aligned blocks. */
TEST(graphs_whose_results_were_freed_can_be_launched)
{
    static const char *const kinds[] = {"backend:cudaMalloc", "backend:cudaMallocAsync"};
    for (int i = 0; i < 4; i++) {
        begin();
        galloc_pool *pool = pool_of(kinds[i % 2]);
        cudaStream_t s = stream_new();
        cudaGraph_t graph = NULL;
        cudaGraphExec_t exec = NULL;
        galloc_request request = {.bytes = MIB(1), .alignment = i / 2 ? KIB(64) : 512, .stream = s, .pool = pool};
        void *p = NULL, *q;
        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
        OK(galloc_alloc(&p, &request));
        put(s, p, MIB(1), 1);
        OK(cudaStreamEndCapture(s, &graph));
        OK(cudaGraphInstantiate(&exec, graph, 0));
        for (int launch = 0; launch < 3; launch++) {
            OK(cudaGraphLaunch(exec, s));
            look(s, p, MIB(1), 1);
            if (launch) continue;
            OK(galloc_free(p, s));
            q = get(pool, MIB(1), s);
            EXPECT(q != p);
            put(s, q, MIB(1), 2);
        }
        look(s, q, MIB(1), 2);
        OK(galloc_free(q, s));
        EXPECT(stats_of(pool).graph_bytes >= MIB(1));
        OK(cudaStreamSynchronize(s));
        OK(cudaGraphExecDestroy(exec));
        OK(cudaGraphDestroy(graph));
        OK(galloc_pool_trim(pool, 0, NULL));
        EXPECT_EQ(stats_of(pool).reserved.current, 0);
        EXPECT_EQ(sim_physical(0), 0);
        expect_healthy(pool, 0);
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

/* The block of a failed capture is the program's until it frees it, whatever came between. */
TEST(memory_of_a_failed_capture_is_freed_late)
{
    begin();
    galloc_pool *pool = pool_of("backend:cudaMallocAsync");
    cudaStream_t s = stream_new(), t = stream_new();
    cudaGraph_t graph = NULL;
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    void *p = get(pool, MIB(2), s), *q;
    EXPECT_EQ(cudaStreamSynchronize(s), cudaErrorStreamCaptureUnsupported);
    sim_findings_clear();
    EXPECT_EQ(cudaStreamEndCapture(s, &graph), cudaErrorStreamCaptureInvalidated);
    (void)cudaGetLastError();
    q = get(pool, MIB(2), t);
    EXPECT(q != p);
    OK(galloc_free(p, s));
    EXPECT_EQ(info_of(q).state, GALLOC_STATE_USED);
    OK(galloc_free(q, t));
    OK(galloc_pool_trim(pool, 0, NULL));
    EXPECT_EQ(stats_of(pool).reserved.current, 0);
    EXPECT_EQ(sim_physical(0), 0);
    expect_healthy(pool, 0);
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* No call breaks a capture: the driver's pool cannot serve the legacy stream without that, cudaMalloc can. */
TEST(legacy_while_a_stream_is_captured)
{
    begin();
    galloc_pool *pool = pool_of("backend:cudaMallocAsync");
    cudaStream_t s = NULL, t = stream_new();
    cudaGraph_t graph = NULL;
    void *p = get(pool, MIB(2), 0), *left, *q;
    OK(cudaStreamCreate(&s));
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    left = get(pool, MIB(2), s);
    put(s, left, MIB(2), 1);
    q = get(pool, MIB(2), 0);
    OK(galloc_free(p, 0));
    OK(galloc_free(left, 0));
    OK(galloc_free(q, 0));
    expect_healthy(pool, 0);
    OK(cudaStreamEndCapture(s, &graph));
    OK(cudaGraphDestroy(graph));
    OK(cudaDeviceSynchronize());
    OK(galloc_pool_trim(pool, 0, NULL));
    EXPECT_EQ(stats_of(pool).reserved.current, 0);
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* A graph used so many bytes of the pool, and is gone. */
static void graph_comes_and_goes(galloc_pool *pool, size_t bytes, cudaStream_t stream)
{
    cudaGraph_t graph = NULL;
    OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    OK(galloc_free(get(pool, bytes, stream), stream));
    OK(cudaStreamEndCapture(stream, &graph));
    OK(cudaGraphDestroy(graph));
}

/* cudaFree waits for the device. So captured memory whose graph is gone stays where a call may not wait. */
TEST(captured_memory_stays_where_no_call_may_wait)
{
    static const char *const limits[] = {"wait_limit_ms:0", "throw_on_cudamalloc_oom:True"};
    for (int i = 0; i < 2; i++) {
        begin_still();
        char text[96];
        snprintf(text, sizeof text, "backend:cudaMallocAsync,memory_limit:64M,%s", limits[i]);
        galloc_pool *pool = pool_of(text);
        cudaStream_t s = stream_new(), t = stream_new();
        void *busy = get(pool, MIB(2), t), *p = pool;
        graph_comes_and_goes(pool, MIB(32), s);
        put(t, busy, MIB(2), 1);
        long waits = sim_blocking_calls();
        OK(galloc_free(get(pool, MIB(2), s), s));
        EXPECT_EQ(galloc_pool_malloc(pool, &p, MIB(40), s), cudaErrorMemoryAllocation);
        EXPECT_EQ(sim_blocking_calls(), waits);
        EXPECT(!sim_stream_done(t) && stats_of(pool).reserved.current >= MIB(32));
        OK(galloc_pool_trim(pool, 0, NULL));
        EXPECT_EQ(stats_of(pool).reserved.current, MIB(2));
        OK(galloc_free(busy, t));
        pool_end(pool);
        stream_end(s);
        stream_end(t);
        finish();
    }
}

/* Nor does another pool take it in a capture; later it may. */
TEST(captured_memory_is_borrowed_where_a_call_may_wait)
{
    begin_still();
    galloc_pool *pool = pool_of("backend:cudaMallocAsync,device_limit:64M"), *other = pool_of("");
    cudaStream_t s = stream_new(), t = stream_new();
    cudaGraph_t graph = NULL;
    void *busy = get(other, MIB(2), t), *p = NULL;
    graph_comes_and_goes(pool, MIB(40), s);
    put(t, busy, MIB(2), 1);
    long waits = sim_blocking_calls();
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    EXPECT_EQ(galloc_pool_malloc(other, &p, MIB(40), s), cudaErrorMemoryAllocation);
    EXPECT_EQ(sim_blocking_calls(), waits);
    OK(cudaStreamEndCapture(s, &graph));
    OK(cudaGraphDestroy(graph));
    p = get(other, MIB(40), s);
    EXPECT_EQ(stats_of(pool).reserved.current, 0);
    OK(galloc_free(p, s));
    OK(galloc_free(busy, t));
    pool_end(pool);
    pool_end(other);
    stream_end(s);
    stream_end(t);
    finish();
}

/* What the legacy stream gets while a blocking stream is captured is cudaMalloc's, also later: it counts against the
   limit before the call, the message names the call, and its free is not the driver's in stream order. */
TEST(legacy_memory_of_a_capture_is_cudaMallocs_later_too)
{
    begin();
    galloc_pool *pool = pool_of("backend:cudaMallocAsync,memory_limit:8M");
    cudaStream_t s = NULL;
    cudaGraph_t graph = NULL;
    void *p, *q = pool;
    OK(cudaStreamCreate(&s));
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    p = get(pool, MIB(4), 0);
    long calls = sim_calls("cuMemAlloc");
    EXPECT_EQ(galloc_pool_malloc(pool, &q, MIB(6), 0), cudaErrorMemoryAllocation);
    EXPECT_EQ(sim_calls("cuMemAlloc"), calls);
    sim_fail("cuMemAlloc", 1, 0, cudaErrorUnknown);
    EXPECT_EQ(galloc_pool_malloc(pool, &q, MIB(2), 0), cudaErrorUnknown);
    EXPECT(strstr(galloc_last_message(), "cuMemAlloc:") != NULL);
    OK(cudaStreamEndCapture(s, &graph));
    OK(cudaGraphDestroy(graph));
    put(0, p, MIB(4), 1);
    OK(galloc_free(p, 0));
    EXPECT_EQ(sim_calls("cuMemFreeAsync"), 0);
    OK(cudaDeviceSynchronize());
    OK(galloc_pool_trim(pool, 0, NULL));
    EXPECT_EQ(stats_of(pool).reserved.current, 0);
    EXPECT_EQ(sim_physical(0), 0);
    expect_healthy(pool, 0);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* Each call takes the pool's lock there, so that all peaks are exact, and the settings in effect say so. */
TEST(the_counters_of_other_backends_are_exact)
{
    for (size_t i = 0; i < sizeof settings / sizeof settings[0]; i++) {
        begin();
        galloc_config config = galloc_config_default();
        galloc_pool *pool = pool_of(settings[i]);
        cudaStream_t s = stream_new();
        int other = strstr(settings[i], "backend") != NULL;
        OK(galloc_pool_config(pool, &config));
        EXPECT_EQ(config.stats_exact, other);
        EXPECT_EQ(config.backend != 0, other);
        for (int round = 0; other && round < 3; round++) { /* sizes that a cache would serve */
            void *p = get(pool, KIB(4), s), *q = get(pool, KIB(4), s);
            EXPECT_EQ(stats_of(pool).live.peak, KIB(8));
            OK(galloc_free(p, s));
            OK(galloc_free(q, s));
        }
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

/* What a setting would do that has no effect there is no advice. */
static struct {
    inside_driver real;
    CUdeviceptr end; /* of the bytes that cuMemAlloc was last asked for */
} asked_for;

static CUresult CUDAAPI note_what_is_asked_for(CUdeviceptr *addr, size_t bytes)
{
    CUresult result = asked_for.real.MemAlloc(addr, bytes);
    asked_for.end = *addr + bytes;
    return result;
}

/* A block has no more than what the driver was asked for, also where its alignment moves it on in that. */
TEST(aligned_blocks_of_cudaMalloc_end_with_what_was_asked_for)
{
    enum { BLOCKS = 16 };
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_of("backend:cudaMalloc");
    galloc_request request = {.bytes = 1000, .alignment = KIB(4), .stream = s, .pool = pool};
    void *p[BLOCKS], *between[BLOCKS];
    asked_for.real = inside_driver_in_use();
    inside_driver mine = asked_for.real;
    mine.MemAlloc = note_what_is_asked_for;
    inside_driver_use(mine);
    for (int i = 0; i < BLOCKS; i++) {
        between[i] = get(pool, 512, s); /* moves the next address on */
        OK(galloc_alloc(&p[i], &request));
        EXPECT(info_of(p[i]).usable >= 1000);
        EXPECT((CUdeviceptr)(uintptr_t)p[i] + info_of(p[i]).usable <= asked_for.end);
    }
    inside_driver_use(asked_for.real);
    for (int i = 0; i < BLOCKS; i++) {
        OK(galloc_free(p[i], s));
        OK(galloc_free(between[i], s));
    }
    pool_end(pool);
    stream_end(s);
    finish();
}

static int ask_nothing(const galloc_report *report, void *user)
{
    (void)report;
    (void)user;
    return 0;
}

static void hear_of_pages(galloc_pool *pool, void *addr, size_t bytes, void *user)
{
    (void)pool;
    (void)addr;
    (void)bytes;
    (void)user;
}

/* They map no pages: each callback that would tell of them is refused, others are not. */
TEST(other_backends_refuse_the_callbacks_about_pages)
{
    static const int backends[] = {GALLOC_BACKEND_CUDA_MALLOC, GALLOC_BACKEND_CUDA_MALLOC_ASYNC};
    for (int i = 0; i < 2; i++) {
        begin();
        galloc_config config = galloc_config_default();
        config.backend = backends[i];
        galloc_pool *pool = pool_new(&config);
        galloc_callbacks oom = {.on_oom = ask_nothing}, map = {.on_map = hear_of_pages};
        galloc_callbacks unmap = {.on_unmap = hear_of_pages};
        EXPECT_EQ(galloc_pool_set_callbacks(pool, &map), cudaErrorNotSupported);
        EXPECT_EQ(galloc_pool_set_callbacks(pool, &unmap), cudaErrorNotSupported);
        OK(galloc_pool_set_callbacks(pool, &oom));
        pool_end(pool);
        finish();
    }
}

TEST(advice_leaves_out_what_other_backends_ignore)
{
    static char text[GALLOC_REPORT_TEXT];
    galloc_config config = config_of("backend:cudaMalloc,reuse:none,wait_limit_ms:0,memory_limit:64M");
    galloc_report report;
    void *p = NULL;
    begin_still();
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new(), t = stream_new();
    void *busy = get(pool, MIB(48), s);
    put(s, busy, MIB(48), 1);
    OK(galloc_free(busy, s));
    EXPECT_EQ(galloc_pool_malloc(pool, &p, MIB(48), t), cudaErrorMemoryAllocation);
    OK(galloc_oom_report(&report));
    OK(galloc_report_text(&report, text, sizeof text));
    EXPECT(report.stranded >= MIB(48));
    EXPECT(strstr(text, "- wait_limit_ms is 0") != NULL);
    EXPECT(strstr(text, "- reuse:wait is off") == NULL);
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* What the driver keeps beside the blocks, because it rounds, is no piece for a request that it has refused. */
TEST(a_refused_size_is_not_the_largest_possible_one)
{
    galloc_report report = {0};
    void *p[20];
    int n = 0;
    sim_options options = sim_defaults();
    options.memory = MIB(64);
    begin_with(options);
    galloc_pool *pool = pool_of("backend:cudaMallocAsync");
    while (n < 20 && !galloc_pool_malloc(pool, &p[n], MIB(5), 0)) n++;
    OK(galloc_oom_report(&report));
    EXPECT(n > 5 && report.usable >= MIB(5));
    EXPECT(report.largest_usable < MIB(5));
    EXPECT(report.largest_possible < MIB(5) && report.largest_possible >= report.largest_usable);
    while (n) OK(galloc_free(p[--n], 0));
    pool_end(pool);
    finish();
}

/* What the driver's pool keeps is free for the stream, not on its way to somebody. */
TEST(what_the_drivers_pool_keeps_is_reported_as_usable)
{
    static char text[GALLOC_REPORT_TEXT];
    galloc_config config = config_of("backend:cudaMallocAsync,memory_limit:64M,throw_on_cudamalloc_oom:True");
    galloc_report report;
    void *p = NULL;
    begin();
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new();
    void *large = get(pool, MIB(32), s), *small = get(pool, MIB(8), s);
    OK(galloc_free(large, s));
    OK(cudaDeviceSynchronize());
    OK(galloc_free(get(pool, KIB(4), s), s));
    size_t kept = stats_of(pool).cached.current;
    EXPECT(kept >= MIB(32));
    EXPECT_EQ(galloc_pool_malloc(pool, &p, MIB(60), s), cudaErrorMemoryAllocation);
    OK(galloc_oom_report(&report));
    EXPECT_EQ(report.cached, kept);
    EXPECT_EQ(report.usable, kept);
    EXPECT_EQ(report.largest_usable, kept); /* at most: only the driver knows */
    EXPECT_EQ(report.busy, 0);
    EXPECT_EQ(report.live + report.rounding + report.cached, report.held);
    OK(galloc_report_text(&report, text, sizeof text));
    EXPECT(strstr(text, "on the way") == NULL);
    OK(galloc_free(small, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* Captured memory is charged to the limits before it is made: without host memory for it the charge is undone. */
TEST(captured_memory_without_host_memory_costs_no_limit)
{
    begin();
    galloc_pool *pool = pool_of("backend:cudaMallocAsync,memory_limit:64M");
    cudaStream_t s = stream_new();
    cudaGraph_t graph = NULL;
    int refused = 0;
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    void *first = get(pool, MIB(2), s);
    for (int nth = 1; nth <= 8; nth++) {
        void *p = NULL;
        sim_fail_malloc(nth, 1);
        cudaError_t error = galloc_pool_malloc(pool, &p, MIB(4), s);
        sim_fail_clear();
        if (error) EXPECT_EQ(error, cudaErrorMemoryAllocation);
        else OK(galloc_free(p, s));
        refused += error != cudaSuccess;
        EXPECT_EQ(galloc_pool_check(pool), 0);
    }
    EXPECT(refused > 0);
    OK(galloc_free(first, s));
    OK(cudaStreamEndCapture(s, &graph));
    OK(cudaGraphDestroy(graph));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* What such a capture gives back is counted as the function that frees it, cuMemFree. */
TEST(captured_memory_that_is_given_back_counts_by_its_function)
{
    long freed = 0;
    for (int nth = 1; nth <= 8; nth++) {
        begin();
        galloc_pool *pool = pool_of("backend:cudaMallocAsync");
        cudaStream_t s = stream_new();
        cudaGraph_t graph = NULL;
        void *other = get(pool, MIB(2), s), *p = NULL;
        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
        sim_fail_malloc(nth, 0);
        cudaError_t error = galloc_pool_malloc(pool, &p, MIB(4), s);
        sim_fail_clear();
        if (error) EXPECT_EQ(error, cudaErrorMemoryAllocation);
        else OK(galloc_free(p, s));
        freed += sim_calls("cuMemFree");
        EXPECT_EQ(stats_of(pool).driver.mem_free, sim_calls("cuMemFree"));
        EXPECT_EQ(stats_of(pool).driver.pool_free, sim_calls("cuMemFreeAsync"));
        OK(cudaStreamEndCapture(s, &graph));
        OK(cudaGraphDestroy(graph));
        OK(galloc_free(other, s));
        pool_end(pool);
        stream_end(s);
        finish();
    }
    EXPECT(freed > 0); /* else nothing is tested */
}

/* The same in a capture, and cudaFree fails: the memory is stuck, and counts outside the driver's pool till it goes. */
TEST(captured_memory_that_is_stuck_counts_outside_the_drivers_pool)
{
    size_t stuck = 0;
    for (int nth = 1; nth <= 16; nth++) {
        int fails = nth % 2;
        begin();
        galloc_pool *pool = pool_of("backend:cudaMallocAsync");
        cudaStream_t s = stream_new();
        cudaGraph_t graph = NULL;
        void *other = get(pool, MIB(2), s), *p = NULL;
        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
        sim_fail_malloc((nth + 1) / 2, 0);
        if (fails) sim_fail("cuMemFree", 1, 0, cudaErrorInvalidValue);
        cudaError_t error = galloc_pool_malloc(pool, &p, MIB(4), s);
        sim_fail_clear();
        sim_fail_malloc(0, 0);
        if (error) EXPECT_EQ(error, cudaErrorMemoryAllocation);
        else OK(galloc_free(p, s));
        stuck += stats_of(pool).quarantined;
        if (!fails) EXPECT_EQ(stats_of(pool).quarantined, 0);
        EXPECT_EQ(galloc_pool_check(pool), 0);
        OK(cudaStreamEndCapture(s, &graph));
        OK(cudaGraphDestroy(graph));
        OK(galloc_pool_trim(pool, 0, NULL));
        EXPECT_EQ(stats_of(pool).quarantined, 0);
        EXPECT_EQ(stats_of(pool).reserved.current, MIB(2));
        OK(galloc_free(get(pool, MIB(4), s), s));
        expect_healthy(pool, 0);
        OK(galloc_free(other, s));
        pool_end(pool);
        stream_end(s);
        finish();
    }
    EXPECT(stuck > 0); /* else nothing is tested */
}

/* Such memory is stuck when a reset takes it: it counts no more, neither once nor twice. */
TEST(captured_memory_that_was_stuck_is_lost_once)
{
    begin();
    galloc_pool *pool = pool_of("backend:cudaMallocAsync");
    cudaStream_t s = stream_new();
    cudaGraph_t graph = NULL;
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    OK(galloc_free(get_used(pool, MIB(9), s, 1), s));
    OK(cudaStreamEndCapture(s, &graph));
    OK(cudaGraphDestroy(graph));
    sim_fail("cuMemFree", 1, 1, cudaErrorUnknown);
    (void)galloc_pool_trim(pool, 0, NULL);
    EXPECT_EQ(stats_of(pool).quarantined, MIB(9));
    sim_fail_clear();
    OK(cudaDeviceReset());
    s = stream_new();
    void *p = get(pool, MIB(4), s);
    EXPECT_EQ(stats_of(pool).reserved.current, MIB(4));
    EXPECT_EQ(galloc_pool_check(pool), 0);
    OK(galloc_free(p, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* The driver gives memory in the order of a stream, whose earlier work may still use it. When there is no host memory
   to take it, it is kept, and goes nowhere else before that work is done. */
TEST(what_there_was_no_host_memory_to_take_waits_for_its_stream)
{
    begin_still();
    enum { N = 3000 };
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_config config = config_of("backend:cudaMallocAsync");
    galloc_pool *pool = pool_new(&config);
    static void *kept[N];
    int refused = 0;
    for (int i = 0; i < N; i++) { /* so that descriptors of each kind run out some time */
        void *q = NULL;
        void *p = get(pool, MIB(2), s);
        put(s, p, MIB(2), (uint64_t)i);
        OK(galloc_free(p, s));
        kept[i] = get(pool, 512, s);
        sim_fail_malloc(1 + i % 5, 1);
        if (galloc_pool_malloc(pool, &q, MIB(2), s)) refused++;
        sim_fail_clear();
        if (q) OK(galloc_free(q, s));
        p = get(pool, MIB(2), t);
        put(t, p, MIB(2), (uint64_t)i);
        OK(galloc_free(p, t));
    }
    EXPECT(refused > 0);
    EXPECT_EQ(galloc_pool_check(pool), 0);
    for (int i = 0; i < N; i++) OK(galloc_free(kept[i], s));
    pool_end(pool);
    finish();
}

/* The same where the next stream would have that very memory. */
TEST(what_could_not_be_taken_is_not_the_next_streams)
{
    int refused = 0;
    for (int nth = 1; nth <= 4; nth++) {
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new();
        galloc_pool *pool = pool_of("backend:cudaMallocAsync");
        void *p = NULL, *q[2];
        OK(galloc_free(get_used(pool, MIB(2), s, 1), s));
        EXPECT(inside_leave_marks(pool, 2));
        sim_fail_malloc(nth, 1);
        if (galloc_pool_malloc(pool, &p, MIB(2), s)) refused++;
        sim_fail_clear();
        for (int i = 0; i < 2; i++) q[i] = get_used(pool, MIB(2), t, 2);
        for (int i = 0; i < 2; i++) OK(galloc_free(q[i], t));
        OK(galloc_free(p, s));
        pool_end(pool);
        finish();
    }
    EXPECT(refused > 1);
}

/* What a captured request could not take is cudaMalloc's, and no graph's: it goes back while the graph lives. */
TEST(what_a_captured_request_could_not_take_is_no_graphs)
{
    int refused = 0;
    for (int nth = 1; nth <= 4; nth++) {
        begin_still();
        cudaStream_t s = stream_new();
        cudaGraph_t graph = NULL;
        galloc_pool *pool = pool_of("backend:cudaMallocAsync");
        void *p = NULL;
        OK(galloc_free(get_used(pool, MIB(2), s, 1), s));
        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
        OK(galloc_free(get(pool, 512, s), s)); /* the graph has memory, and the pool knows the captured stream */
        size_t graphs = stats_of(pool).graph_bytes;
        EXPECT(inside_leave_marks(pool, 2));
        sim_fail_malloc(nth, 1);
        if (galloc_pool_malloc(pool, &p, MIB(2), s)) refused++;
        sim_fail_clear();
        OK(galloc_free(p, s));
        OK(cudaStreamEndCapture(s, &graph));
        EXPECT_EQ(stats_of(pool).graph_bytes, graphs + (p ? MIB(2) : 0));
        OK(galloc_pool_trim(pool, 0, NULL));
        EXPECT_EQ(stats_of(pool).reserved.current, graphs + (p ? MIB(2) : 0));
        OK(cudaGraphDestroy(graph));
        pool_end(pool);
        finish();
    }
    EXPECT(refused > 1);
}

/* ---- addresses that the driver gives out again --------------------------------------------------------------- */

static struct {
    galloc_pool *pool;
    cudaStream_t stream;
    pthread_t frees;
    void *(*run)(void *); /* in another thread, once the driver has the block */
    void *block;
    int broken, went, done;
} again;

static void *take_again(void *arg)
{
    (void)arg;
    OK(cudaSetDevice(0));
    again.block = get(again.pool, MIB(2), again.stream);
    again.broken = galloc_pool_check(again.pool);
    EXPECT_EQ(info_of(again.block).state, GALLOC_STATE_USED);
    return NULL;
}

/* The first call of the thread's after the driver has taken the block. */
static void after_the_free(const char *function)
{
    pthread_t thread;
    if (again.done || !pthread_equal(pthread_self(), again.frees)) return;
    if (again.went) {
        again.done = 1;
        EXPECT_EQ(pthread_create(&thread, NULL, again.run, NULL), 0);
        EXPECT_EQ(pthread_join(thread, NULL), 0);
    }
    again.went = !strcmp(function, "cuMemFreeAsync");
}

static void *reset_and_notice(void *unused)
{
    OK(cudaSetDevice(0));
    OK(cudaDeviceReset());
    OK(galloc_pool_trim(again.pool, 0, NULL));
    return unused;
}

/* A reset takes the block while it is on its way. What the driver has had back before is not taken off twice. */
TEST(a_reset_beside_a_free_that_the_driver_does)
{
    begin();
    memset(&again, 0, sizeof again);
    again.run = reset_and_notice;
    again.pool = pool_of("backend:cudaMallocAsync");
    again.frees = pthread_self();
    galloc_request request = {.bytes = MIB(1), .alignment = KIB(4), .pool = again.pool}; /* it leaves a rest */
    void *p = NULL;
    OK(galloc_alloc(&p, &request));
    sim_hook(after_the_free, NULL);
    OK(galloc_free(p, NULL));
    sim_hook(NULL, NULL);
    EXPECT(again.done);
    EXPECT_EQ(galloc_pool_check(again.pool), 0);
    expect_healthy(again.pool, 0);
    EXPECT_EQ(stats_of(again.pool).reserved.current, 0);
    pool_end(again.pool);
    finish();
}

/* The heap is healthy while the block that had the address is not gone yet; and what has been lost to a reset before is
   no reason to take that for another one. */
static void take_what_goes(int after_a_reset)
{
    begin();
    galloc_config config = galloc_config_default();
    void *p, *q, *lost = NULL;
    config.backend = GALLOC_BACKEND_CUDA_MALLOC_ASYNC;
    memset(&again, 0, sizeof again);
    again.run = take_again;
    again.pool = pool_new(&config);
    if (after_a_reset) lost = get(again.pool, MIB(20), stream_new());
    if (after_a_reset) OK(cudaDeviceReset());
    again.stream = stream_new();
    again.frees = pthread_self();
    p = get(again.pool, MIB(2), again.stream);
    q = get(again.pool, MIB(4), again.stream);
    sim_hook(after_the_free, NULL);
    OK(galloc_free(p, again.stream));
    sim_hook(NULL, NULL);
    EXPECT(again.done);
    EXPECT(again.block == p);
    EXPECT_EQ(again.broken, 0);
    expect_healthy(again.pool, 0);
    EXPECT_EQ(info_of(q).usable, MIB(4));
    OK(galloc_free(q, again.stream));
    OK(galloc_free(again.block, again.stream));
    if (lost) OK(galloc_free(lost, again.stream));
    pool_end(again.pool);
    finish();
}

TEST(an_address_comes_back_while_its_block_goes)
{
    for (int after_a_reset = 0; after_a_reset < 2; after_a_reset++) take_what_goes(after_a_reset);
}

/* ---- an address that goes to another pool ------------------------------------------------------------------------ */

static struct elsewhere {
    inside_driver real;
    galloc_pool *pool;
    cudaStream_t stream;
    void *block, *base;
    int frees, broken;
} elsewhere;

/* With the second free the driver gets a whole slab back, and gives it to the other pool at once. */
static CUresult CUDAAPI free_and_take(CUdeviceptr addr)
{
    CUresult result = elsewhere.real.MemFree(addr);
    if (++elsewhere.frees != 2) return result;
    elsewhere.block = get(elsewhere.pool, MIB(1), elsewhere.stream);
    elsewhere.base = info_of((char *)elsewhere.block + KIB(700)).base;
    elsewhere.broken = galloc_pool_check(elsewhere.pool);
    return result;
}

TEST(an_address_comes_to_another_pool_while_its_block_goes)
{
    begin();
    galloc_pool *from = pool_of("backend:cudaMalloc");
    memset(&elsewhere, 0, sizeof elsewhere);
    elsewhere.pool = pool_of("expandable_segments:False");
    elsewhere.stream = stream_new();
    void *p = get(from, KIB(64), elsewhere.stream), *q = get(from, KIB(64), elsewhere.stream);
    OK(galloc_free(p, elsewhere.stream));
    OK(galloc_free(q, elsewhere.stream));
    OK(cudaDeviceSynchronize());
    elsewhere.real = inside_driver_in_use();
    inside_driver mine = elsewhere.real;
    mine.MemFree = free_and_take;
    inside_driver_use(mine);
    OK(galloc_pool_trim(from, 0, NULL));
    inside_driver_use(elsewhere.real);
    EXPECT(elsewhere.block <= p && (char *)q < (char *)elsewhere.block + MIB(1)); /* else nothing is tested */
    EXPECT(elsewhere.base == elsewhere.block);
    EXPECT_EQ(elsewhere.broken, 0);
    OK(galloc_free(elsewhere.block, elsewhere.stream));
    pool_end(elsewhere.pool);
    pool_end(from);
    finish();
}

/* The report says why a step was left out: the driver gives out freed memory, not galloc. */
TEST(the_report_says_that_the_driver_decides_who_gets_memory)
{
    begin();
    galloc_config config = galloc_config_default();
    galloc_report report;
    int found = 0;
    OK(galloc_config_parse(&config, "backend:cudaMalloc,memory_limit:4M,log:off", NULL, 0));
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new(), t = stream_new();
    void *p = get(pool, MIB(3), s), *q = NULL;
    EXPECT_EQ(galloc_pool_malloc(pool, &q, MIB(3), t), cudaErrorMemoryAllocation);
    OK(galloc_oom_report(&report));
    for (int i = 0; i < GALLOC_REPORT_STEPS; i++)
        if (report.steps[i].left_out) {
            EXPECT(!strstr(report.steps[i].left_out, "legacy"));
            found += strstr(report.steps[i].left_out, "the driver's") != NULL;
        }
    EXPECT(found > 0);
    OK(galloc_free(p, s));
    pool_end(pool);
    stream_end(s);
    stream_end(t);
    finish();
}

/* A pool whose driver's pool could not be destroyed says so and still has it, and the next attempt destroys it. */
TEST(the_drivers_pool_goes_with_the_next_attempt)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_config config = galloc_config_default();
    config.backend = GALLOC_BACKEND_CUDA_MALLOC_ASYNC;
    galloc_pool *pool = pool_new(&config);
    OK(galloc_free(get(pool, 1000, s), s));
    OK(cudaStreamSynchronize(s));
    sim_fail("cuMemPoolDestroy", 1, 0, cudaErrorUnknown);
    EXPECT_EQ(galloc_pool_destroy(pool), cudaErrorUnknown);
    EXPECT(strstr(galloc_last_message(), "cuMemPoolDestroy") != NULL);
    sim_fail_clear();
    OK(galloc_free(get(pool, 1000, s), s));
    OK(cudaStreamSynchronize(s));
    pool_end(pool);
    EXPECT_EQ(sim_calls("cuMemPoolDestroy"), sim_calls("cuMemPoolCreate") + 1);
    finish();
}

TEST(the_check_sees_each_word_of_other_pools)
{
    begin_still();
    const char *texts[] = {"like:pytorch", "strategy:pooled", "debug:guards+poison+quarantine",
                           "expandable_segments:False", "backend:cudaMallocAsync"};
    cudaStream_t s = stream_new(), t = stream_new();
    for (size_t n = 0; n < sizeof texts / sizeof *texts; n++) {
        galloc_config config = galloc_config_default();
        void *p[8];
        OK(galloc_config_parse(&config, texts[n], NULL, 0));
        galloc_pool *pool = pool_new(&config);
        for (int i = 0; i < 8; i++) p[i] = get_used(pool, i < 4 ? MIB(3) : KIB(3), i % 2 ? t : s, 1);
        for (int i = 0; i < 6; i++) OK(galloc_free(p[i], i % 2 ? t : s));
        expect_the_check_sees_all(pool);
        OK(galloc_free(p[6], s));
        OK(galloc_free(p[7], t));
        pool_end(pool);
    }
    finish();
}

/* The driver does not tell what its pool holds: the limit holds nevertheless, and what it allows is had. */
TEST(a_limit_holds_when_the_driver_does_not_tell)
{
    begin();
    galloc_pool *pool = pool_of("backend:cudaMallocAsync,memory_limit:16M");
    cudaStream_t s = stream_new();
    void *p[3], *q = NULL;
    sim_fail("cuMemPoolGetAttribute", 1, 1, CUDA_ERROR_NOT_SUPPORTED);
    for (int i = 0; i < 3; i++) p[i] = get(pool, MIB(4), s);
    EXPECT_EQ(stats_of(pool).reserved.current, MIB(12));
    EXPECT_EQ(galloc_pool_malloc(pool, &q, MIB(6), s), cudaErrorMemoryAllocation);
    EXPECT(q == NULL);
    EXPECT_EQ(galloc_pool_check(pool), 0);
    sim_fail_clear();
    for (int i = 0; i < 3; i++) OK(galloc_free(p[i], s));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* What the driver's pool gives up by itself comes off what is held, not off the total that there has been. */
TEST(the_total_held_does_not_shrink_with_the_drivers_pool)
{
    begin();
    galloc_pool *pool = pool_of("backend:cudaMallocAsync,release_threshold:0");
    cudaStream_t s = stream_new();
    OK(galloc_free(get(pool, MIB(64), s), s));
    OK(cudaStreamSynchronize(s));
    EXPECT_EQ(sim_physical(0), 0); /* the driver has given it up */
    EXPECT_EQ(stats_of(pool).reserved.total, MIB(64));
    void *p = get(pool, MIB(4), s);
    EXPECT_EQ(stats_of(pool).reserved.current, sim_physical(0));
    uint64_t total = stats_of(pool).reserved.total;
    EXPECT(total >= MIB(64) && total <= MIB(128));
    EXPECT_EQ(stats_of(pool).reserved.peak, MIB(64));
    OK(galloc_free(p, s));
    OK(galloc_pool_trim(pool, 0, NULL));
    EXPECT_EQ(stats_of(pool).reserved.total, total);
    pool_end(pool);
    stream_end(s);
    finish();
}

/* The lack of host memory for one mark is told, though a later attempt would have some. */
TEST(a_lack_of_host_memory_for_a_mark_is_told)
{
    static const char *const backends[] = {"backend:cudaMalloc", "backend:cudaMallocAsync"};
    for (int i = 0; i < 2; i++) {
        begin();
        galloc_pool *pool = pool_of(backends[i]);
        cudaStream_t s = stream_new();
        void *p = get(pool, MIB(2), s), *q = NULL;
        inside_drain_marks(pool);
        sim_fail_malloc(1, 1);
        EXPECT_EQ(galloc_pool_malloc(pool, &q, MIB(4), s), cudaErrorMemoryAllocation);
        sim_fail_clear();
        EXPECT(q == NULL);
        EXPECT(strstr(galloc_last_message(), "no host memory") != NULL);
        EXPECT_EQ(galloc_pool_check(pool), 0);
        OK(galloc_free(p, s));
        pool_end(pool);
        stream_end(s);
        finish();
    }
}

/* What the driver's pool grows by, in its own steps, counts beside what other pools of the device hold. */
TEST(the_drivers_steps_count_beside_other_pools)
{
    begin();
    galloc_config config = config_of("backend:cudaMallocAsync"), fixed = config_of("backend:cudaMalloc");
    config.device_limit = fixed.device_limit = MIB(2) + KIB(512);
    galloc_pool *pool = pool_new(&config), *other = pool_new(&fixed);
    cudaStream_t s = stream_new();
    void *p = get(other, MIB(1), s), *q = NULL;
    EXPECT_EQ(galloc_pool_malloc(pool, &q, KIB(512), s), cudaErrorMemoryAllocation);
    EXPECT(q == NULL);
    EXPECT_EQ(galloc_pool_check(pool), 0);
    OK(cudaStreamSynchronize(s));
    EXPECT(sim_physical(0) <= MIB(2) + KIB(512));
    OK(galloc_free(p, s));
    OK(galloc_pool_trim(other, 0, NULL));
    q = get(pool, KIB(512), s);
    OK(galloc_free(q, s));
    pool_end(pool);
    pool_end(other);
    stream_end(s);
    finish();
}

/* What captures have had of cudaMalloc counts beside what the driver's pool holds and keeps. */
TEST(captured_memory_counts_beside_what_the_drivers_pool_keeps)
{
    begin();
    galloc_pool *pool = pool_of("backend:cudaMallocAsync");
    cudaStream_t s = stream_new();
    cudaGraph_t graph = NULL;
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    void *p = get(pool, MIB(12), s), *q, *r;
    OK(cudaStreamEndCapture(s, &graph));
    q = get(pool, MIB(8), s);
    r = get(pool, MIB(6), s);
    EXPECT_EQ(stats_of(pool).reserved.current, MIB(26));
    OK(galloc_free(q, s));
    OK(galloc_free(r, s));
    EXPECT_EQ(stats_of(pool).reserved.current, MIB(26));
    q = get(pool, MIB(8), s);
    EXPECT_EQ(stats_of(pool).reserved.current, MIB(26));
    EXPECT_EQ(stats_of(pool).reserved.peak, MIB(26));
    OK(galloc_free(q, s));
    OK(galloc_pool_trim(pool, 0, NULL));
    EXPECT_EQ(stats_of(pool).reserved.current, MIB(12));
    OK(galloc_free(p, s));
    OK(cudaGraphDestroy(graph));
    pool_end(pool);
    stream_end(s);
    finish();
}

TEST_MAIN()
