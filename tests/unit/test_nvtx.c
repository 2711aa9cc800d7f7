/* test_nvtx.c - GALLOC_NVTX: what a tool is told of segments and blocks. The tool here is a library as NVTX injects it,
   linked with the program. It keeps heaps and regions as compute-sanitizer does, and looks at them when a kernel runs:
   a program without mistakes accesses nothing but regions. */

#define _GNU_SOURCE
#include <stdio.h>

#if defined(__has_include)
#if __has_include(<nvtx3/nvToolsExtMem.h>)
#define HAS_NVTX
#endif
#endif

#ifndef HAS_NVTX
int main(void)
{
    puts("skipped: nvtx3/nvToolsExtMem.h is not found, which CUDA Toolkit 13.0 has");
    puts("0 passed, 0 failed");
    return 0;
}
#else

#define GALLOC_NVTX
#include "inside.c"

#include "setup.h"

/* ---- the tool ---------------------------------------------------------------------------------------------------- */

enum { HEAPS = 256, REGIONS = 4096 };

typedef struct heap {
    uintptr_t begin, end; /* 0: not registered */
    nvtxDomainHandle_t domain;
} heap;

typedef struct region {
    uintptr_t begin, end; /* 0: not registered */
    heap *of;
    char name[64];
} region;

static struct {
    pthread_mutex_t lock;
    heap heaps[HEAPS];
    region regions[REGIONS];
    int absent;         /* no tool attaches */
    int blind;          /* 1: a tool that does not handle the extension; 2: one that refuses each heap */
    long looks;         /* times that NVTX asked for a tool */
    long heaps_begun, heaps_ended, begun, ended, resized, dropped; /* dropped: regions that ended with their heap */
    long wrong;         /* calls that break NVTX's rules */
    long strays;        /* accesses outside of regions */
    galloc_pool *pool;  /* its locks are looked at */
    long locked;
    long frees;         /* cuMemFree and cuMemAddressFree calls before the last heap ended */
    long domains;
    void (*on_end)(uintptr_t addr); /* called before a region ends */
    void (*on_domain)(void);        /* called when galloc has looked for a tool, and not said so yet */
} tool = {.lock = PTHREAD_MUTEX_INITIALIZER};

static __thread void (*on_begin)(void); /* called before this thread's next region begins */

static void wrong(const char *text, uintptr_t addr)
{
    if (tool.wrong++ < 8) printf("    told wrongly: %s, %#lx\n", text, (unsigned long)addr);
}

static long frees(void) { return sim_calls("cuMemFree") + sim_calls("cuMemAddressFree"); }

static void look_at_locks(void)
{
    if (tool.pool && !inside_unlocked(tool.pool)) tool.locked++;
}

static region *region_at(uintptr_t addr)
{
    for (int i = 0; i < REGIONS; i++)
        if (tool.regions[i].begin && tool.regions[i].begin <= addr && addr < tool.regions[i].end)
            return &tool.regions[i];
    return NULL;
}

static region *region_of(const void *ptr)
{
    region *r = region_at((uintptr_t)ptr);
    return r && r->begin == (uintptr_t)ptr ? r : NULL;
}

/* May a region lie there? */
static int fits(const heap *of, const region *self, uintptr_t begin, uintptr_t end)
{
    for (int i = 0; i < REGIONS; i++)
        if (&tool.regions[i] != self && tool.regions[i].begin && tool.regions[i].begin < end &&
            begin < tool.regions[i].end) return 0;
    return of->begin && of->begin <= begin && begin < end && end <= of->end;
}

static nvtxMemHeapHandle_t heap_begin(nvtxDomainHandle_t domain, const nvtxMemHeapDesc_t *desc)
{
    const nvtxMemVirtualRangeDesc_t *range = desc->typeSpecificDesc;
    uintptr_t begin = (uintptr_t)range->ptr;
    heap *free_one = NULL;
    pthread_mutex_lock(&tool.lock);
    if (!domain || desc->extCompatID != NVTX_EXT_COMPATID_MEM || desc->structSize != sizeof *desc ||
        desc->usage != NVTX_MEM_HEAP_USAGE_TYPE_SUB_ALLOCATOR || desc->type != NVTX_MEM_TYPE_VIRTUAL_ADDRESS ||
        desc->typeSpecificDescSize != sizeof *range || strcmp(desc->message.ascii, "galloc"))
        wrong("a heap's description", begin);
    for (int i = 0; i < HEAPS; i++) {
        heap *h = &tool.heaps[i];
        if (!h->begin) free_one = h;
        else if (h->begin < begin + range->size && begin < h->end) wrong("a heap over another", begin);
    }
    free_one->begin = begin;
    free_one->end = begin + range->size;
    free_one->domain = domain;
    tool.heaps_begun++;
    pthread_mutex_unlock(&tool.lock);
    return (nvtxMemHeapHandle_t)free_one;
}

static nvtxMemHeapHandle_t heap_refused(nvtxDomainHandle_t domain, const nvtxMemHeapDesc_t *desc)
{
    (void)domain;
    (void)desc;
    return NVTX_MEM_HEAP_HANDLE_NO_TOOL;
}

static void heap_end(nvtxDomainHandle_t domain, nvtxMemHeapHandle_t handle)
{
    heap *h = (heap *)handle;
    long freed = frees();
    pthread_mutex_lock(&tool.lock);
    if (h < tool.heaps || h >= tool.heaps + HEAPS || !h->begin || h->domain != domain)
        wrong("the end of a heap", 0);
    for (int i = 0; i < REGIONS; i++) {
        if (!tool.regions[i].begin || tool.regions[i].of != h) continue;
        tool.regions[i].begin = 0;
        tool.dropped++;
    }
    h->begin = 0;
    tool.heaps_ended++;
    tool.frees = freed;
    pthread_mutex_unlock(&tool.lock);
}

static void regions_begin(nvtxDomainHandle_t domain, const nvtxMemRegionsRegisterBatch_t *batch)
{
    const nvtxMemVirtualRangeDesc_t *range = batch->regionDescElements;
    uintptr_t begin = (uintptr_t)range->ptr;
    heap *of = (heap *)batch->heap;
    void (*call)(void) = on_begin;
    int i = 0;
    on_begin = NULL;
    if (call) call();
    look_at_locks();
    pthread_mutex_lock(&tool.lock);
    if (of->domain != domain || batch->extCompatID != NVTX_EXT_COMPATID_MEM || batch->structSize != sizeof *batch ||
        batch->regionType != NVTX_MEM_TYPE_VIRTUAL_ADDRESS || batch->regionCount != 1 ||
        batch->regionDescElementSize != sizeof *range) wrong("a region's description", begin);
    if (!fits(of, NULL, begin, begin + range->size)) wrong("a region that does not fit", begin);
    while (tool.regions[i].begin) i++;
    tool.regions[i].begin = begin;
    tool.regions[i].end = begin + range->size;
    tool.regions[i].of = of;
    tool.regions[i].name[0] = 0;
    tool.begun++;
    pthread_mutex_unlock(&tool.lock);
}

static void regions_resize(nvtxDomainHandle_t domain, const nvtxMemRegionsResizeBatch_t *batch)
{
    const nvtxMemVirtualRangeDesc_t *range = batch->regionDescElements;
    uintptr_t begin = (uintptr_t)range->ptr;
    pthread_mutex_lock(&tool.lock);
    region *r = region_of(range->ptr);
    if (batch->extCompatID != NVTX_EXT_COMPATID_MEM || batch->structSize != sizeof *batch ||
        batch->regionType != NVTX_MEM_TYPE_VIRTUAL_ADDRESS || batch->regionDescCount != 1 ||
        batch->regionDescElementSize != sizeof *range) wrong("a region's new description", begin);
    if (!r || r->of->domain != domain || !fits(r->of, r, begin, begin + range->size))
        wrong("a region that cannot have this size", begin);
    else r->end = begin + range->size;
    tool.resized++;
    pthread_mutex_unlock(&tool.lock);
}

static void regions_end(nvtxDomainHandle_t domain, const nvtxMemRegionsUnregisterBatch_t *batch)
{
    look_at_locks();
    if (tool.on_end) tool.on_end((uintptr_t)batch->refElements->pointer);
    pthread_mutex_lock(&tool.lock);
    region *r = region_of(batch->refElements->pointer);
    if (batch->extCompatID != NVTX_EXT_COMPATID_MEM || batch->structSize != sizeof *batch ||
        batch->refType != NVTX_MEM_REGION_REF_TYPE_POINTER || batch->refCount != 1 ||
        batch->refElementSize != sizeof *batch->refElements || !r || r->of->domain != domain)
        wrong("the end of a region", (uintptr_t)batch->refElements->pointer);
    if (r) r->begin = 0;
    tool.ended++;
    pthread_mutex_unlock(&tool.lock);
}

static void regions_name(nvtxDomainHandle_t domain, const nvtxMemRegionsNameBatch_t *batch)
{
    const nvtxMemRegionNameDesc_t *name = batch->regionElements;
    size_t n = strlen(name->name.ascii);
    pthread_mutex_lock(&tool.lock);
    region *r = region_of(name->region.pointer);
    if (batch->extCompatID != NVTX_EXT_COMPATID_MEM || batch->structSize != sizeof *batch ||
        batch->regionCount != 1 || batch->regionElementSize != sizeof *name || !r || r->of->domain != domain ||
        n < 1 || n > 49 ||
        name->regionRefType != NVTX_MEM_REGION_REF_TYPE_POINTER || name->nameType != NVTX_MESSAGE_TYPE_ASCII)
        wrong("a name", (uintptr_t)name->region.pointer);
    else memcpy(r->name, name->name.ascii, n + 1);
    pthread_mutex_unlock(&tool.lock);
}

static int attach(nvtxExtModuleInfo_t *module)
{
    static const struct {
        int slot;
        void (*call)(void);
    } calls[] = {{NVTX3EXT_CBID_nvtxMemHeapRegister, (void (*)(void))heap_begin},
                 {NVTX3EXT_CBID_nvtxMemHeapUnregister, (void (*)(void))heap_end},
                 {NVTX3EXT_CBID_nvtxMemRegionsRegister, (void (*)(void))regions_begin},
                 {NVTX3EXT_CBID_nvtxMemRegionsResize, (void (*)(void))regions_resize},
                 {NVTX3EXT_CBID_nvtxMemRegionsUnregister, (void (*)(void))regions_end},
                 {NVTX3EXT_CBID_nvtxMemRegionsName, (void (*)(void))regions_name}};
    tool.looks++;
    if (tool.absent || module->moduleId != NVTX_EXT_MODULEID_MEM) return 0;
    if (tool.blind == 2) module->segments[0].functionSlots[calls[0].slot] = (intptr_t)heap_refused;
    for (size_t i = 0; !tool.blind && i < sizeof calls / sizeof *calls; i++)
        module->segments[0].functionSlots[calls[i].slot] = (intptr_t)calls[i].call;
    return 1;
}

static nvtxDomainHandle_t domain_begin(const char *name)
{
    nvtxDomainHandle_t domain = (nvtxDomainHandle_t)(uintptr_t)++tool.domains;
    void (*call)(void) = tool.on_domain;
    if (strcmp(name, "galloc")) wrong("the domain's name", 0);
    tool.on_domain = NULL;
    if (call) call();
    return domain;
}

static int attach_base(NvtxGetExportTableFunc_t tables)
{
    const NvtxExportTableCallbacks *callbacks = (const NvtxExportTableCallbacks *)tables(NVTX_ETID_CALLBACKS);
    NvtxFunctionTable functions = NULL;
    if (!callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &functions, NULL)) return 0;
    *functions[NVTX_CBID_CORE2_DomainCreateA] = (NvtxFunctionPointer)domain_begin;
    return 1;
}

__attribute__((constructor)) static void inject(void)
{
    InitializeInjectionNvtx2_fnptr = attach_base;
    InitializeInjectionNvtxExtension_fnptr = attach;
}

static int regions_now(void)
{
    int n = 0;
    for (int i = 0; i < REGIONS; i++) n += tool.regions[i].begin != 0;
    return n;
}

static int heaps_now(void)
{
    int n = 0;
    for (int i = 0; i < HEAPS; i++) n += tool.heaps[i].begin != 0;
    return n;
}

/* ---- tests ------------------------------------------------------------------------------------------------------- */

/* As a new process, with a tool or without. */
static void attached(int absent, int blind, int pace)
{
    pthread_mutex_t lock = tool.lock;
    begin_with_devices(1, pace);
    memset(&tool, 0, sizeof tool);
    tool.lock = lock;
    tool.absent = absent;
    tool.blind = blind;
    memset(NVTX_EXT_MEM_VERSIONED_ID(nvtxExtMemSlots), 0, sizeof NVTX_EXT_MEM_VERSIONED_ID(nvtxExtMemSlots));
    inside_forget_tool();
    inside_nvtx_fixed = 1;
}

static void with_tool(void) { attached(0, 0, SIM_PACE_RANDOM); }

/* The end of a test: the tool has been told of each end, and of nothing wrong. */
static void finish_told(void)
{
    tool.pool = NULL;
    finish();
    EXPECT_EQ(heaps_now(), 0);
    EXPECT_EQ(regions_now(), 0);
    EXPECT_EQ(tool.heaps_begun, tool.heaps_ended);
    EXPECT_EQ(tool.begun, tool.ended + tool.dropped);
    EXPECT_EQ(tool.wrong, 0);
    EXPECT_EQ(tool.strays, 0);
}

static void expect_told(const void *ptr, size_t bytes, const char *name)
{
    const region *r = region_of(ptr);
    if (!EXPECT(r != NULL)) return;
    EXPECT_EQ(r->end - r->begin, bytes);
    if (!EXPECT(!strcmp(r->name, name))) printf("    named: %s\n", r->name);
}

/* Is each of these bytes in a region? */
static int is_told(uintptr_t at, size_t bytes)
{
    uintptr_t end = at + bytes;
    while (at < end) {
        const region *r = region_at(at);
        if (!r) return 0;
        at = r->end;
    }
    return 1;
}

typedef struct use {
    void *ptr;
    size_t bytes;
} use;

static void look_for_strays(void *arg)
{
    const use *u = arg;
    pthread_mutex_lock(&tool.lock);
    tool.strays += !is_told((uintptr_t)u->ptr, u->bytes);
    pthread_mutex_unlock(&tool.lock);
}

/* A kernel that writes the bytes. The tool sees it run, in each launch of a graph. */
static void touch(cudaStream_t stream, void *ptr, size_t bytes)
{
    static use uses[1 << 16];
    static size_t next;
    use *u = &uses[__atomic_fetch_add(&next, 1, __ATOMIC_RELAXED) % (sizeof uses / sizeof *uses)];
    sim_access access = {ptr, bytes, SIM_WRITE, 1};
    u->ptr = ptr;
    u->bytes = bytes;
    OK(sim_launch_call(stream, &access, 1, look_for_strays, u));
}

static void *get_tagged(galloc_pool *pool, size_t bytes, cudaStream_t stream, uint32_t tag)
{
    galloc_request request = {0};
    void *ptr = NULL;
    request.bytes = bytes;
    request.stream = stream;
    request.pool = pool;
    request.tag = tag;
    OK(galloc_alloc(&ptr, &request));
    return ptr;
}

TEST(no_tool_is_asked_for_once)
{
    for (int blind = 0; blind < 3; blind++) {
        attached(!blind, blind, SIM_PACE_RANDOM);
        cudaStream_t s = stream_new();
        galloc_config config;
        for (int round = 0; round < 2; round++) {
            galloc_pool *pool = pool_expandable(1);
            OK(galloc_pool_config(pool, &config));
            EXPECT_EQ(config.expandable_segments, 1);
            OK(galloc_free(get(pool, 1000, s), s));
            long reads = sim_calls("cuStreamSynchronize");
            for (int i = 0; i < 20; i++) {
                void *p = get(pool, 1000, s);
                touch(s, p, 1000);
                OK(galloc_free(p, s));
            }
            EXPECT_EQ(sim_calls("cuStreamSynchronize"), reads);
            EXPECT_EQ(stats_of(pool).driver.stream_synchronize, 0);
            OK(cudaStreamSynchronize(s));
            pool_end(pool);
        }
        EXPECT_EQ(tool.looks, 1);
        EXPECT_EQ(sim_calls("cuMemAlloc"), 1);
        EXPECT_EQ(tool.heaps_begun, 0);
        EXPECT_EQ(tool.begun + tool.ended + tool.resized, 0);
        tool.strays = 0; /* nobody is told of regions */
        finish_told();
    }
}

TEST(a_block_is_a_region_of_its_bytes)
{
    with_tool();
    cudaStream_t s = stream_new();
    galloc_config config = galloc_config_default();
    config.debug = GALLOC_DEBUG_GUARDS;
    galloc_pool *pool = pool_new(&config);
    OK(galloc_pool_config(pool, &config));
    EXPECT_EQ(config.expandable_segments, 0);
    EXPECT_EQ(config.debug, 0);
    OK(galloc_tag_name(7, "kv cache"));
    tool.pool = pool;
    void *p = get_tagged(pool, 1000, s, 7), *q = get_tagged(pool, MIB(3), s, 4000000000u);
    expect_told(p, 1000, "kv cache");
    expect_told(q, MIB(3), "galloc tag 4000000000");
    EXPECT_EQ(heaps_now(), 2);
    EXPECT(!is_told((uintptr_t)p + 1000, 1));
    touch(s, p, 1000);
    touch(s, q, MIB(3));
    OK(galloc_free(p, s));
    OK(galloc_free(q, s));
    EXPECT_EQ(regions_now(), 0);
    for (int i = 0; i < 10; i++) { /* no cache serves a block untold */
        p = get(pool, 1000, s);
        expect_told(p, 1000, "galloc tag 0");
        OK(galloc_free(p, s));
        EXPECT_EQ(regions_now(), 0);
    }
    EXPECT_EQ(tool.locked, 0);
    EXPECT_EQ(galloc_pool_check(pool), 0);
    long before = frees();
    OK(galloc_pool_trim(pool, 0, NULL));
    EXPECT_EQ(heaps_now(), 0);
    EXPECT_EQ(tool.frees, before + 1); /* the second heap ended before the second cudaFree */
    EXPECT_EQ(frees(), before + 2);
    p = get(pool, 1000, s);
    EXPECT_EQ(galloc_shutdown(), cudaErrorNotPermitted);
    expect_told(p, 1000, "galloc tag 0"); /* a leak */
    OK(galloc_free(p, s));
    OK(galloc_tag_name(7, NULL));
    pool_end(pool);
    finish_told();
}

TEST(every_call_tells)
{
    with_tool();
    cudaStream_t s = stream_new(), t = stream_new(), both[2] = {s, t};
    galloc_pool *pool = pool_expandable(1);
    void *p = NULL;
    OK(galloc_malloc(&p, 100, s));
    expect_told(p, 100, "galloc tag 0");
    OK(galloc_free(p, t));
    p = get(pool, MIB(30), s);
    expect_told(p, MIB(30), "galloc tag 0");
    OK(galloc_free_after(p, both, 2));
    p = get(pool, 100, s);
    OK(galloc_record_stream(p, t));
    OK(galloc_free(p, s));
    p = get(pool, 100, s);
    EXPECT_EQ(galloc_free((char *)p + 1, s), cudaErrorInvalidDevicePointer);
    expect_told(p, 100, "galloc tag 0");
    OK(galloc_free(p, NULL));
    EXPECT_EQ(galloc_free(p, s), cudaErrorInvalidDevicePointer);
    EXPECT_EQ(regions_now(), 0);
    pool_end(pool);
    finish_told();
}

__attribute__((noinline)) void *site_one(galloc_pool *pool, size_t bytes);
__attribute__((noinline)) void *site_two(galloc_pool *pool, size_t bytes);
__attribute__((noinline)) void *site_three(galloc_pool *pool, size_t bytes);

void *site_one(galloc_pool *pool, size_t bytes) { return get_tagged(pool, bytes, NULL, 0); }
void *site_two(galloc_pool *pool, size_t bytes) { return get_tagged(pool, bytes, NULL, UINT32_MAX); }
void *site_three(galloc_pool *pool, size_t bytes) { return get(pool, bytes, NULL); }

/* A block that is told of still knows its own stack, and not that of another. */
TEST(blocks_with_regions_keep_their_stacks)
{
    static char said[GALLOC_REPORT_TEXT];
    void *p[3];
    with_tool();
    galloc_pool *pool = pool_limited(GIB(1));
    OK(galloc_pool_history(pool, 100));
    OK(galloc_pool_history_stacks(pool, 8));
    p[0] = site_one(pool, 3000);
    p[1] = site_two(pool, 2000);
    p[2] = site_three(pool, 1000);
    for (int i = 0; i < 3; i++) EXPECT(region_of(p[i]) != NULL);
    OK(galloc_live_text(pool, said, sizeof said));
    const char *one = strstr(said, "\n  3000 bytes in 1 blocks\n"), *two = strstr(said, "\n  2000 bytes in 1 blocks\n");
    const char *three = strstr(said, "\n  1000 bytes in 1 blocks\n");
    if (!EXPECT(one && two && three && one < two && two < three)) printf("%s", said);
    for (int i = 0; i < 3; i++) OK(galloc_free(p[i], NULL));
    pool_end(pool);
    finish_told();
}

/* The wait at a free meets an error that breaks the context: the pool refuses requests, as after any such call. */
TEST(an_error_of_the_wait_before_a_region_ends_closes_the_pool)
{
    static const int errors[] = {cudaErrorIllegalAddress, cudaErrorLaunchFailure};
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) {
        void *q = NULL;
        attached(0, 0, SIM_PACE_STILL);
        galloc_pool *pool = pool_limited(GIB(1));
        cudaStream_t s = stream_new();
        void *p = get_used(pool, 1000, s, 1);
        sim_fail("cuStreamSynchronize", 1, 0, errors[i]);
        OK(galloc_free(p, s));
        EXPECT_EQ(sim_failed(), 1);
        EXPECT_EQ(galloc_pool_malloc(pool, &q, 1000, s), errors[i]);
        EXPECT(strstr(galloc_last_message(), "refuses requests after") != NULL);
        OK(cudaDeviceReset());
        OK(galloc_pool_destroy(pool));
        finish_told();
    }
}

/* A kernel that runs late must still find its region: frees and resizes wait for it. */
TEST(a_region_outlasts_the_work_queued_before)
{
    attached(0, 0, SIM_PACE_STILL);
    cudaStream_t s = stream_new(), t = stream_new(), both[2] = {s, t};
    galloc_pool *pool = pool_expandable(1);
    for (int how = 0; how < 5; how++) {
        void *p = how == 4 ? get_growable(pool, MIB(8), MIB(8), s) : get(pool, MIB(8), s);
        touch(s, p, MIB(8));
        OK(cudaStreamSynchronize(s));
        if (how == 1) OK(galloc_record_stream(p, t));
        touch(how == 0 || how >= 3 ? s : t, p, MIB(8));
        if (how == 0) OK(galloc_free(p, s));
        if (how == 1) OK(galloc_free(p, s));
        if (how == 2) OK(galloc_free_after(p, both, 2));
        if (how >= 3) OK(galloc_resize(p, MIB(2), s));
        OK(cudaDeviceSynchronize()); /* runs what has not run yet */
        EXPECT_EQ(tool.strays, 0);
        if (how >= 3) expect_told(p, MIB(2), "galloc tag 0");
        if (how >= 3) OK(galloc_free(p, s));
    }
    pool_end(pool);
    finish_told();
}

/* A free on a blocking stream comes after the legacy stream's work, and so does the end of the region. */
TEST(a_region_outlasts_the_legacy_streams_work)
{
    attached(0, 0, SIM_PACE_STILL);
    cudaStream_t blocking = NULL;
    galloc_pool *pool = pool_expandable(1);
    OK(cudaStreamCreate(&blocking));
    void *p = get(pool, MIB(8), cudaStreamLegacy);
    touch(cudaStreamLegacy, p, MIB(8));
    OK(galloc_free(p, blocking));
    OK(cudaDeviceSynchronize());
    EXPECT_EQ(tool.strays, 0);
    OK(cudaStreamDestroy(blocking));
    pool_end(pool);
    finish_told();
}

TEST(a_region_has_the_size_of_its_block)
{
    with_tool();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_expandable(1);
    void *p = get_growable(pool, MIB(1), MIB(8), s), *q = get(pool, 5000, s);
    OK(galloc_resize(p, MIB(5), s));
    expect_told(p, MIB(5), "galloc tag 0");
    touch(s, p, MIB(5));
    EXPECT_EQ(tool.resized, 1);
    EXPECT(galloc_resize(p, MIB(500), s) != cudaSuccess);
    expect_told(p, MIB(5), "galloc tag 0");
    OK(galloc_resize(p, 10, s));
    expect_told(p, 10, "galloc tag 0");
    OK(galloc_resize(q, 4000, s));
    expect_told(q, 4000, "galloc tag 0");
    void *r = get(pool, 600, s); /* in the end that q lost */
    EXPECT((char *)r == (char *)q + 4096);
    OK(galloc_resize(q, 4096, s));
    expect_told(q, 4096, "galloc tag 0");
    OK(galloc_free(r, s));
    OK(galloc_resize(q, 4700, s));
    expect_told(q, 4700, "galloc tag 0");
    OK(galloc_free(p, s));
    OK(galloc_free(q, s));
    pool_end(pool);
    finish_told();
}

/* Without host memory for a mark of its stream a free waits for the stream, and the region ends as well. */
TEST(a_region_ends_without_host_memory)
{
    with_tool();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_expandable(1);
    void *p = get(pool, 1000, s);
    touch(s, p, 1000);
    OK(cudaStreamSynchronize(s));
    sim_fail_malloc(1, 1);
    OK(galloc_free(p, t));
    EXPECT(sim_failed_mallocs() > 0);
    sim_fail_malloc(0, 0);
    EXPECT_EQ(regions_now(), 0);
    pool_end(pool);
    finish_told();
}

/* Without host memory for the rest of it, a block does not shrink. */
TEST(a_region_is_as_before_after_a_resize_that_failed)
{
    with_tool();
    size_t chunk = inside_chunk_bytes;
    inside_chunk_bytes = 0;
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_expandable(1);
    void *p = get(pool, MIB(5), s);
    sim_fail_malloc(1, 1);
    EXPECT_EQ(galloc_resize(p, 300, s), cudaErrorMemoryAllocation);
    sim_fail_malloc(0, 0);
    EXPECT(tool.resized > 0);
    expect_told(p, MIB(5), "galloc tag 0");
    OK(galloc_free(p, s));
    pool_end(pool);
    finish_told();
    inside_chunk_bytes = chunk;
}

/* ---- order ------------------------------------------------------------------------------------------------------- */

static struct {
    galloc_pool *pool;
    cudaStream_t stream;
    void *other; /* what was allocated meanwhile */
    uintptr_t at;
} meanwhile;

static void allocate_meanwhile(uintptr_t addr)
{
    tool.on_end = NULL;
    meanwhile.at = addr;
    meanwhile.other = get(meanwhile.pool, 1000, meanwhile.stream);
}

static void begin_meanwhile(void)
{
    meanwhile.pool = pool_expandable(1);
    meanwhile.other = get(meanwhile.pool, 1000, meanwhile.stream);
}

/* Two pools look for a tool at once. */
TEST(two_pools_find_the_tool)
{
    with_tool();
    meanwhile.stream = stream_new();
    tool.on_domain = begin_meanwhile;
    galloc_pool *pool = pool_expandable(1);
    void *p = get(pool, 1000, meanwhile.stream);
    EXPECT_EQ(tool.domains, 2);
    expect_told(p, 1000, "galloc tag 0");
    expect_told(meanwhile.other, 1000, "galloc tag 0");
    OK(galloc_free(p, meanwhile.stream));
    OK(galloc_free(meanwhile.other, meanwhile.stream));
    pool_end(meanwhile.pool);
    pool_end(pool);
    finish_told();
}

/* The question whether there is a tool needs a bit of device memory. A pool that finds none leaves it to the next. */
TEST(the_tool_is_found_by_the_pool_that_has_memory_to_ask)
{
    with_tool();
    cudaStream_t s = stream_new();
    sim_fail("cuMemAlloc", 1, 1, CUDA_ERROR_OUT_OF_MEMORY);
    galloc_pool *first = pool_new(NULL);
    EXPECT_EQ(sim_calls("cuMemAlloc"), 1);
    sim_fail_clear();
    galloc_pool *pool = pool_new(NULL);
    void *p = get(pool, 1000, s);
    expect_told(p, 1000, "galloc tag 0");
    OK(galloc_free(p, s));
    stream_end(s);
    pool_end(pool);
    pool_end(first);
    finish_told();
}

/* Nobody can have the bytes before the tool knows that they are free. */
TEST(a_region_ends_before_the_bytes_are_given_out)
{
    with_tool();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_expandable(1);
    void *p = get(pool, 1000, s);
    meanwhile.pool = pool;
    meanwhile.stream = s;
    tool.on_end = allocate_meanwhile;
    OK(galloc_free(p, s));
    EXPECT(meanwhile.at == (uintptr_t)p);
    EXPECT(meanwhile.other != p);
    OK(galloc_free(meanwhile.other, s));
    pool_end(pool);
    finish_told();
}

static cudaStream_t captured;

static void capture_meanwhile(uintptr_t addr)
{
    (void)addr;
    tool.on_end = NULL;
    OK(cudaStreamBeginCapture(captured, cudaStreamCaptureModeRelaxed));
    meanwhile.other = get(meanwhile.pool, 700, captured);
}

/* ---- graphs ------------------------------------------------------------------------------------------------------ */

static cudaGraphExec_t capture_ready(cudaStream_t stream)
{
    cudaGraphExec_t exec = NULL;
    cudaGraph_t graph = NULL;
    OK(cudaStreamEndCapture(stream, &graph));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    OK(cudaGraphDestroy(graph));
    return exec;
}

/* Each launch accesses what was freed in the capture, and what had parts of it before and after. */
TEST(launches_access_what_the_graph_has_freed)
{
    with_tool();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_expandable(1);
    void *before = get(pool, 3000, t), *p, *q, *result;
    touch(t, before, 3000);
    long begun = tool.begun;
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    p = get(pool, 5000, s);
    EXPECT(tool.begun > begun && region_of(before)); /* a region anew would have no contents */
    touch(s, p, 5000);
    OK(galloc_free(p, s));
    p = get(pool, 600, s);
    touch(s, p, 600);
    q = get(pool, 4000, s);
    touch(s, q, 4000);
    OK(galloc_free(p, s));
    OK(galloc_free(q, s));
    result = get(pool, 9000, s);
    touch(s, result, 9000);
    cudaGraphExec_t exec = capture_ready(s);
    for (int i = 0; i < 3; i++) {
        OK(cudaGraphLaunch(exec, s));
        void *other = get(pool, 2000, t);
        touch(t, other, 2000);
        OK(galloc_free(other, t));
        touch(t, before, 3000);
    }
    OK(galloc_resize(result, 8000, s));
    OK(galloc_free(result, s));
    OK(cudaGraphLaunch(exec, s));
    OK(cudaStreamSynchronize(s));
    OK(galloc_free(before, t));
    OK(cudaGraphExecDestroy(exec));
    touch(s, p = get(pool, 7000, s), 7000);
    OK(galloc_free(p, s));
    pool_end(pool);
    finish_told();
}

/* So does a block that was freed outside the capture. */
TEST(launches_access_results_that_were_freed)
{
    with_tool();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_expandable(1);
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    void *result = get(pool, 9000, s);
    touch(s, result, 9000);
    cudaGraphExec_t exec = capture_ready(s);
    OK(cudaGraphLaunch(exec, s));
    OK(galloc_free(result, s));
    OK(cudaGraphLaunch(exec, s));
    OK(cudaStreamSynchronize(s));
    OK(cudaGraphExecDestroy(exec));
    pool_end(pool);
    finish_told();
}

/* A block from before the capture belongs to the graph once it is freed on a captured stream, or was recorded for one.
   */
TEST(inputs_that_a_graph_frees_stay_told)
{
    for (int how = 0; how < 3; how++) {
        with_tool();
        cudaStream_t s = stream_new(), t = stream_new(), both[2] = {s, t};
        galloc_pool *pool = pool_expandable(1);
        void *input = get(pool, 3000, t);
        OK(cudaStreamSynchronize(t));
        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
        touch(s, input, 3000);
        if (how == 0) OK(galloc_free(input, s));
        if (how == 1) OK(galloc_free_after(input, both, 2));
        if (how == 2) OK(galloc_record_stream(input, s));
        cudaGraphExec_t exec = capture_ready(s);
        if (how == 2) OK(galloc_free(input, t));
        OK(cudaGraphLaunch(exec, s));
        OK(cudaStreamSynchronize(s));
        OK(cudaGraphExecDestroy(exec));
        pool_end(pool);
        finish_told();
    }
}

/* A stream that was recorded before it is captured is not waited for: that would end the capture. */
TEST(a_free_waits_for_no_recorded_stream_that_is_captured_by_now)
{
    with_tool();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_expandable(1);
    void *p = get(pool, 3000, s);
    OK(cudaStreamSynchronize(s));
    touch(t, p, 3000);
    OK(galloc_record_stream(p, t));
    OK(cudaStreamSynchronize(t));
    OK(cudaStreamBeginCapture(t, cudaStreamCaptureModeRelaxed));
    OK(galloc_free(p, s));
    EXPECT_EQ(sim_findings(SIM_CAPTURE_BROKEN), 0);
    OK(cudaGraphExecDestroy(capture_ready(t)));
    pool_end(pool);
    finish_told();
}

/* A recorded stream that went with its context is not looked at, also where another context has that place. */
TEST(a_free_waits_for_no_recorded_stream_of_a_context_that_has_ended)
{
    with_tool();
    CUcontext own = NULL, other[3];
    cudaStream_t s = stream_new();
    OK(cuCtxGetCurrent(&own));
    galloc_pool *pool = pool_expandable(1);
    void *p = get(pool, 1000, s);
    OK(cuCtxCreate(&other[0], NULL, 0, 0));
    cudaStream_t gone = stream_new();
    OK(cuCtxSetCurrent(own));
    OK(galloc_record_stream(p, gone));
    touch(s, p, 1000);
    OK(cuCtxDestroy(other[0]));
    for (int i = 1; i < 3; i++) OK(cuCtxCreate(&other[i], NULL, 0, 0));
    OK(cuCtxSetCurrent(own));
    OK(galloc_free(p, s));
    for (int i = 1; i < 3; i++) OK(cuCtxDestroy(other[i]));
    pool_end(pool);
    finish_told();
}

/* A recorded stream that was retired may be destroyed by now: it is not waited for. */
TEST(a_free_waits_for_no_recorded_stream_that_was_retired)
{
    with_tool();
    cudaStream_t s = stream_new(), t = stream_new();
    galloc_pool *pool = pool_expandable(1);
    void *p = get(pool, 1000, s);
    touch(t, p, 1000);
    OK(galloc_record_stream(p, t));
    OK(galloc_stream_retire(t));
    OK(cudaStreamSynchronize(t));
    stream_end(t);
    OK(galloc_free(p, s));
    stream_end(s);
    pool_end(pool);
    finish_told();
}

/* A segment is opened by another call while a region in it ends. */
TEST(a_segment_may_be_opened_while_a_region_ends)
{
    with_tool();
    cudaStream_t s = stream_new();
    captured = stream_new();
    galloc_pool *pool = pool_expandable(1);
    void *p = get(pool, 1000, s);
    meanwhile.pool = pool;
    tool.on_end = capture_meanwhile;
    OK(galloc_free(p, s));
    EXPECT(is_told((uintptr_t)p, 1000));
    EXPECT(is_told((uintptr_t)meanwhile.other, 700));
    OK(galloc_free(meanwhile.other, captured));
    OK(cudaGraphExecDestroy(capture_ready(captured)));
    pool_end(pool);
    finish_told();
}

static void capture_before_the_wait(const char *function)
{
    if (strcmp(function, "cuStreamSynchronize")) return;
    sim_hook(NULL, NULL);
    capture_meanwhile(0);
}

/* Or while a block in it shrinks: the bytes that it loses are the segment's as all others. */
TEST(a_segment_may_be_opened_while_a_block_shrinks)
{
    with_tool();
    cudaStream_t s = stream_new();
    captured = stream_new();
    galloc_pool *pool = meanwhile.pool = pool_expandable(1);
    void *p = get(pool, 1000, s);
    touch(s, p, 1000);
    meanwhile.other = NULL;
    sim_hook(capture_before_the_wait, NULL);
    OK(galloc_resize(p, 300, s));
    EXPECT(meanwhile.other != NULL);
    EXPECT(is_told((uintptr_t)p, 1000));
    OK(galloc_free(meanwhile.other, captured));
    OK(cudaGraphExecDestroy(capture_ready(captured)));
    OK(galloc_free(p, s));
    pool_end(pool);
    finish_told();
}

static int region_begins, segment_is_open; /* relaxed: only galloc's locks bring the threads into an order */

static void wait_for_the_capture(void)
{
    __atomic_store_n(&region_begins, 1, __ATOMIC_RELAXED);
    while (!__atomic_load_n(&segment_is_open, __ATOMIC_RELAXED)) usleep(100);
}

static void *capture_when_a_region_begins(void *arg)
{
    OK(cudaSetDevice(0));
    while (!__atomic_load_n(&region_begins, __ATOMIC_RELAXED)) usleep(100);
    capture_meanwhile(0);
    __atomic_store_n(&segment_is_open, 1, __ATOMIC_RELAXED);
    return arg;
}

/* Or while a region in it begins. */
TEST(a_segment_may_be_opened_while_a_region_begins)
{
    with_tool();
    pthread_t thread;
    cudaStream_t s = stream_new();
    captured = stream_new();
    galloc_pool *pool = meanwhile.pool = pool_expandable(1);
    void *live = get(pool, 1000, s);
    region_begins = segment_is_open = 0;
    EXPECT_EQ(pthread_create(&thread, NULL, capture_when_a_region_begins, NULL), 0);
    on_begin = wait_for_the_capture;
    void *p = get_tagged(pool, 600, s, 7);
    EXPECT(region_begins);
    on_begin = NULL;
    wait_for_the_capture();
    EXPECT_EQ(pthread_join(thread, NULL), 0);
    EXPECT(is_told((uintptr_t)p, 600));
    EXPECT(is_told((uintptr_t)meanwhile.other, 700));
    OK(galloc_free(meanwhile.other, captured));
    OK(cudaGraphExecDestroy(capture_ready(captured)));
    OK(galloc_free(p, s));
    OK(galloc_free(live, s));
    pool_end(pool);
    finish_told();
}

/* ---- other pools and devices ------------------------------------------------------------------------------------- */

TEST(variants_are_told_of_but_backends)
{
    static const char *confs[] = {"like:pytorch", "strategy:pooled", "strategy:heuristic", "backend:cudaMalloc",
                                  "backend:cudaMallocAsync"};
    for (int i = 0; i < 5; i++) {
        with_tool();
        galloc_config config = galloc_config_default();
        cudaStream_t s = stream_new();
        OK(galloc_config_parse(&config, confs[i], NULL, 0));
        galloc_pool *pool = pool_new(&config);
        for (int n = 0; n < 3; n++) {
            void *p = get(pool, 1000, s), *q = get(pool, 1000, s);
            if (i < 3) expect_told(p, 1000, "galloc tag 0");
            EXPECT_EQ(regions_now(), i < 3 ? 2 : 0);
            OK(galloc_free(p, s));
            OK(galloc_free(q, s));
        }
        pool_end(pool);
        finish_told();
    }
}

/* 0: as pages are mapped. */
TEST(a_range_of_pages_can_be_a_heap)
{
    with_tool();
    inside_nvtx_fixed = 0;
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_expandable(1);
    void *p = get_growable(pool, MIB(2), MIB(64), s), *q = get(pool, 1000, s);
    expect_told(p, MIB(2), "galloc tag 0");
    OK(galloc_resize(p, MIB(40), s));
    expect_told(p, MIB(40), "galloc tag 0");
    touch(s, p, MIB(40));
    touch(s, q, 1000);
    OK(galloc_free(p, s));
    OK(galloc_free(q, s));
    EXPECT_EQ(heaps_now(), 1);
    long before = sim_calls("cuMemAddressFree");
    pool_end(pool);
    EXPECT_EQ(tool.frees, frees() - sim_calls("cuMemAddressFree") + before);
    finish_told();
}

/* The driver does not take memory back at once: its heap has ended by then, and ends once. */
TEST(memory_that_is_given_back_late_is_told_of_once)
{
    for (int fixed = 0; fixed < 2; fixed++) {
        with_tool();
        inside_nvtx_fixed = fixed;
        cudaStream_t s = stream_new();
        galloc_pool *pool = pool_expandable(1);
        OK(galloc_free(get(pool, MIB(4), s), s));
        sim_fail(fixed ? "cuMemFree" : "cuMemAddressFree", 1, 0, cudaErrorUnknown);
        if (fixed) (void)galloc_pool_trim(pool, 0, NULL);
        else EXPECT_EQ(galloc_pool_destroy(pool), cudaErrorUnknown);
        EXPECT_EQ(sim_failed(), 1);
        sim_fail_clear();
        if (fixed) OK(galloc_pool_trim(pool, 0, NULL));
        pool_end(pool);
        finish_told();
    }
}

/* A reset takes the memory: the heaps end, at the latest when the addresses come back. */
TEST(lost_memory_is_told_of_once)
{
    with_tool();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_expandable(1);
    void *held = get(pool, 1000, s);
    void *freed = get(pool, MIB(4), s);
    OK(galloc_free(freed, s));
    OK(cudaDeviceReset());
    s = stream_new();
    for (int i = 0; i < 4; i++) {
        void *p = get(pool, MIB(4), s);
        expect_told(p, MIB(4), "galloc tag 0");
        touch(s, p, MIB(4));
        if (i) OK(galloc_free(p, s));
        else freed = p;
    }
    (void)galloc_free(held, s); /* counts as freed if its address was given out again */
    OK(galloc_free(freed, s));
    pool_end(pool);
    finish_told();
}

/* ---- threads ----------------------------------------------------------------------------------------------------- */

enum { THREADS = 4, ROUNDS = 400, HELD = 12 };

static galloc_pool *shared;

static void *play(void *arg)
{
    dice d = {test_seed() + (uintptr_t)arg};
    cudaStream_t s = stream_new(), t = stream_new(), both[2] = {s, t};
    void *held[HELD] = {NULL};
    size_t bytes[HELD] = {0};
    cudaGraphExec_t exec = NULL;
    for (int i = 0; i < ROUNDS; i++) {
        uint32_t at = roll_below(&d, HELD), what = roll_below(&d, 16);
        if (held[at] && what < 4) {
            size_t now = roll_bytes(&d, bytes[at]);
            touch(s, held[at], bytes[at]);
            if (!galloc_resize(held[at], now, s)) bytes[at] = now;
            touch(s, held[at], bytes[at]);
        } else if (held[at]) {
            touch(s, held[at], bytes[at]);
            if (what < 6) order(s, t);
            if (what < 6) touch(t, held[at], bytes[at]);
            if (what == 4) OK(galloc_record_stream(held[at], t));
            OK(what == 5 ? galloc_free_after(held[at], both, 2) : galloc_free(held[at], s));
            held[at] = NULL;
        } else if (what == 0) {
            cudaGraphExec_t before = exec;
            OK(cudaStreamBeginCapture(t, cudaStreamCaptureModeThreadLocal));
            for (int n = 0; n < 3; n++) {
                size_t size = roll_bytes(&d, MIB(1));
                void *p = get(shared, size, t);
                touch(t, p, size);
                OK(galloc_free(p, t));
            }
            exec = capture_ready(t);
            OK(cudaGraphLaunch(exec, t));
            if (before) OK(cudaGraphExecDestroy(before));
        } else if (what == 1) {
            OK(galloc_pool_trim(shared, 0, NULL));
        } else {
            bytes[at] = roll_bytes(&d, MIB(3));
            held[at] = what < 5 ? get_growable(shared, bytes[at], MIB(6), s) : get(shared, bytes[at], s);
            pthread_mutex_lock(&tool.lock);
            tool.strays += !is_told((uintptr_t)held[at], bytes[at]);
            pthread_mutex_unlock(&tool.lock);
            touch(s, held[at], bytes[at]);
        }
    }
    for (int i = 0; i < HELD; i++) OK(galloc_free(held[i], s));
    OK(cudaStreamSynchronize(t));
    if (exec) OK(cudaGraphExecDestroy(exec));
    OK(galloc_stream_retire(s));
    OK(galloc_stream_retire(t));
    stream_end(s);
    stream_end(t);
    return NULL;
}

TEST(threads)
{
    for (int fixed = 0; fixed < 2; fixed++) {
        with_tool();
        inside_nvtx_fixed = fixed;
        pthread_t thread[THREADS];
        shared = pool_expandable(1);
        for (uintptr_t i = 0; i < THREADS; i++) pthread_create(&thread[i], NULL, play, (void *)i);
        for (int i = 0; i < THREADS; i++) pthread_join(thread[i], NULL);
        pool_end(shared);
        finish_told();
    }
}

static void *use_one_stream(void *s)
{
    for (int i = 0; i < 300; i++) OK(galloc_free(get(shared, 1000, (cudaStream_t)s), (cudaStream_t)s));
    return NULL;
}

/* Each free waits for the stream, which other threads use meanwhile. */
TEST(threads_share_a_stream)
{
    with_tool();
    pthread_t thread[THREADS];
    shared = pool_expandable(1);
    cudaStream_t s = stream_new();
    for (int i = 0; i < THREADS; i++) pthread_create(&thread[i], NULL, use_one_stream, s);
    for (int i = 0; i < THREADS; i++) pthread_join(thread[i], NULL);
    EXPECT_EQ(galloc_pool_check(shared), 0);
    stream_end(s);
    pool_end(shared);
    finish_told();
}

TEST_MAIN()
#endif
