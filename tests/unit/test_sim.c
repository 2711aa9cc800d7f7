/* test_sim.c - the tests of the simulated device: galloc takes no part.

   What the simulator is for is to see mistakes, so the greater part of this file makes them. A STORY is a short program
   for the device that follows a rule, or, when it is `broken`, does not; it is played under many schedules, and the
   broken one must be reported in every single one of them, the other in none. */

#define _GNU_SOURCE /* fork, pthread barriers */
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "sim.h"
#include "test.h"

#define PAGE ((size_t)2 << 20)
#define OK(call) EXPECT_EQ((call), 0)

/* ==== HELPERS ==================================================================================================== */

/* A device that reports what would crash a real one, so that a test can go on. */
static sim_options forgiving(void)
{
    sim_options options = sim_defaults();
    options.panic = 0;
    return options;
}

/* Starts the device, and makes it current as the runtime does at its first use. */
static void start_with(sim_options options)
{
    OK(sim_start(&options));
    OK(cudaFree(NULL));
}

static void start(void) { start_with(forgiving()); }

static void start_still(void)
{
    sim_options options = forgiving();
    options.pace = SIM_PACE_STILL;
    start_with(options);
}

static void start_backed(void)
{
    sim_options options = forgiving();
    options.mode = SIM_BACKED;
    options.memory = 32 * PAGE;
    start_with(options);
}

static void start_devices(int devices)
{
    sim_options options = forgiving();
    options.devices = devices;
    start_with(options);
}

static void start_seeded(uint64_t seed, int pace)
{
    sim_options options = forgiving();
    options.devices = 2;
    options.seed = seed;
    options.pace = pace;
    start_with(options);
}

static cudaStream_t stream(void)
{
    cudaStream_t s = NULL;
    OK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    return s;
}

static cudaStream_t blocking_stream(void)
{
    cudaStream_t s = NULL;
    OK(cudaStreamCreate(&s));
    return s;
}

static unsigned long long id_of(cudaStream_t s)
{
    unsigned long long id = 0;
    OK(cudaStreamGetId(s, &id));
    return id;
}

static cudaEvent_t event(void)
{
    cudaEvent_t e = NULL;
    OK(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
    return e;
}

static cudaEvent_t record(cudaStream_t s)
{
    cudaEvent_t e = event();
    OK(cudaEventRecord(e, s));
    return e;
}

static void wait_for(cudaStream_t s, cudaEvent_t e) { OK(cudaStreamWaitEvent(s, e, 0)); }

/* Later work of `after` runs after what `before` holds now. */
static void order(cudaStream_t before, cudaStream_t after)
{
    cudaEvent_t e = record(before);
    wait_for(after, e);
    OK(cudaEventDestroy(e));
}

/* Asks until the event is complete, as a program does that never blocks. */
static void poll(cudaEvent_t e)
{
    while (cudaEventQuery(e) == cudaErrorNotReady) sim_run(1);
}

static CUmemAllocationProp on_device(int device)
{
    CUmemAllocationProp prop;
    memset(&prop, 0, sizeof prop);
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.location.id = device;
    return prop;
}

static CUmemGenericAllocationHandle page_of(int device, size_t bytes)
{
    CUmemAllocationProp prop = on_device(device);
    CUmemGenericAllocationHandle page = 0;
    OK(cuMemCreate(&page, bytes, &prop, 0));
    return page;
}

static CUmemGenericAllocationHandle page(void) { return page_of(0, PAGE); }

static char *addresses(size_t bytes)
{
    CUdeviceptr at = 0;
    OK(cuMemAddressReserve(&at, bytes, 0, 0, 0));
    return (char *)(uintptr_t)at;
}

static CUdeviceptr address_of(const void *p) { return (CUdeviceptr)(uintptr_t)p; }

static CUresult set_rights(void *at, size_t bytes, int device, CUmemAccess_flags rights)
{
    CUmemAccessDesc access;
    memset(&access, 0, sizeof access);
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = device;
    access.flags = rights;
    return cuMemSetAccess(address_of(at), bytes, &access, 1);
}

static CUresult set_access(void *at, size_t bytes, int device)
{
    return set_rights(at, bytes, device, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
}

static void map(void *at, CUmemGenericAllocationHandle handle)
{
    OK(cuMemMap(address_of(at), PAGE, 0, handle, 0));
    OK(set_access(at, PAGE, 0));
}

static void unmap(void *at, size_t bytes) { OK(cuMemUnmap(address_of(at), bytes)); }

/* So many pages side by side, mapped; their handles live as long as the mappings. */
static char *memory(int pages)
{
    char *p = addresses((size_t)pages * PAGE);
    for (int i = 0; i < pages; ++i) {
        CUmemGenericAllocationHandle handle = page();
        map(p + (size_t)i * PAGE, handle);
        OK(cuMemRelease(handle));
    }
    return p;
}

static cudaError_t use(cudaStream_t s, const void *p, size_t bytes, int how, uint64_t tag)
{
    sim_access a;
    a.ptr = p;
    a.bytes = bytes;
    a.how = how;
    a.tag = tag;
    return sim_launch(s, &a, 1);
}

static void write_tag(cudaStream_t s, const void *p, size_t bytes, uint64_t tag)
{
    OK(use(s, p, bytes, SIM_WRITE, tag));
}

static void write_on(cudaStream_t s, const void *p, size_t bytes) { write_tag(s, p, bytes, 1); }
static void read_on(cudaStream_t s, const void *p, size_t bytes) { OK(use(s, p, bytes, SIM_READ, 0)); }

static void check_on(cudaStream_t s, const void *p, size_t bytes, uint64_t tag)
{
    OK(use(s, p, bytes, SIM_READ | SIM_CHECK, tag));
}

/* Runs `work` in a thread of its own, which has no current context, and waits for it. */
static void elsewhere(void *(*work)(void *), void *arg)
{
    pthread_t thread;
    OK(pthread_create(&thread, NULL, work, arg));
    OK(pthread_join(thread, NULL));
}

/* 1 when the story was judged as it should be under this schedule. */
static int judged(sim_kind kind, void (*story)(int), int broken, uint64_t seed, int pace)
{
    start_seeded(seed, pace);
    story(broken);
    cudaDeviceSynchronize();
    long all = sim_findings(SIM_ANY), of_kind = sim_findings(kind);
    int right = broken ? of_kind > 0 && of_kind == all : all == 0;
    if (!right)
        printf("seed %llu, pace %d, %s: %ld findings, %ld of the kind; %s\n", (unsigned long long)seed, pace,
               broken ? "broken" : "kept", all, of_kind, all ? sim_finding(0) : "");
    return right;
}

static void expect_caught(sim_kind kind, void (*story)(int))
{
    static const int paces[] = {SIM_PACE_RANDOM, SIM_PACE_STILL, SIM_PACE_PROMPT};
    for (int broken = 0; broken < 2; ++broken)
        for (int pace = 0; pace < 3; ++pace)
            for (uint64_t i = 0; i < 20; ++i)
                if (!EXPECT(judged(kind, story, broken, test_seed() + i, paces[pace]))) return;
}

#define STORY(name, kind)                                                                                              \
    static void story_##name(int broken);                                                                              \
    TEST(name) { expect_caught(kind, story_##name); }                                                                  \
    static void story_##name(int broken)

/* ==== THE LEDGER ================================================================================================= */

STORY(two_writes_of_one_byte_must_be_ordered, SIM_RACE)
{
    char *p = memory(1);
    write_on(stream(), p, 1000);
    write_on(stream(), p + (broken ? 999 : 1000), 1000);
}

STORY(a_read_must_be_ordered_after_the_write, SIM_RACE)
{
    char *p = memory(1);
    cudaStream_t s = stream(), t = stream();
    write_on(s, p, PAGE);
    if (!broken) order(s, t);
    read_on(t, p + 4096, 1);
}

STORY(a_write_must_be_ordered_after_the_read, SIM_RACE)
{
    char *p = memory(1);
    cudaStream_t s = stream(), t = stream();
    read_on(s, p, PAGE);
    if (!broken) order(s, t);
    write_on(t, p, 1);
}

STORY(a_write_must_be_ordered_after_every_read, SIM_RACE)
{
    char *p = memory(1);
    cudaStream_t s = stream(), readers[4];
    write_on(s, p, PAGE);
    for (int i = 0; i < 4; ++i) {
        readers[i] = stream();
        order(s, readers[i]);
        read_on(readers[i], p, PAGE);
    }
    for (int i = 0; i < 4; ++i)
        if (!broken || i != 1) order(readers[i], s);
    write_on(s, p, PAGE);
}

STORY(one_operation_with_many_accesses_is_looked_at_whole, SIM_RACE)
{
    char *p = memory(2);
    sim_access both[2] = {{p, 64, SIM_READ, 0}, {p + PAGE, 64, SIM_WRITE, 7}};
    cudaStream_t s = stream(), t = stream();
    OK(sim_launch(s, both, 2));
    read_on(t, p, 64);
    if (!broken) order(s, t);
    read_on(t, p + PAGE, 64);
}

STORY(a_range_over_several_pages_is_looked_at_in_each, SIM_RACE)
{
    char *p = memory(3);
    cudaStream_t s = stream(), t = stream();
    write_on(s, p + PAGE / 2, 2 * PAGE);
    if (!broken) order(s, t);
    write_on(t, p + 2 * PAGE, 1);
}

STORY(copies_and_sets_are_operations_too, SIM_RACE)
{
    char *p = memory(2);
    cudaStream_t s = stream(), t = stream(), u = stream();
    OK(cudaMemsetAsync(p, 0, PAGE, s));
    order(s, t);
    OK(cudaMemcpyAsync(p + PAGE, p, PAGE, cudaMemcpyDeviceToDevice, t));
    order(broken ? s : t, u);
    write_on(u, p + PAGE + 5, 1);
}

STORY(a_copy_reads_where_it_copies_from, SIM_RACE)
{
    char *p = memory(2);
    cudaStream_t s = stream(), t = stream();
    OK(cudaMemcpyAsync(p + PAGE, p, PAGE, cudaMemcpyDeviceToDevice, s));
    if (!broken) order(s, t);
    OK(cudaMemsetAsync(p, 0, 1, t));
}

STORY(the_drivers_sets_are_operations, SIM_RACE)
{
    char *p = memory(1);
    cudaStream_t s = stream(), t = stream();
    OK(cuMemsetD8Async(address_of(p + 100), 7, 256, s));
    if (!broken) order(s, t);
    write_on(t, p + 355, 1);
}

STORY(the_drivers_copies_to_the_host_are_reads, SIM_RACE)
{
    char *p = memory(1);
    void *host = NULL;
    cudaStream_t s = stream(), t = stream();
    OK(cudaMallocHost(&host, 256));
    OK(cuMemcpyDtoHAsync(host, address_of(p + 100), 256, s));
    if (!broken) order(s, t);
    write_on(t, p + 355, 1);
    OK(cudaDeviceSynchronize());
    OK(cudaFreeHost(host));
}

STORY(an_operation_through_an_alias_is_an_operation_on_the_same_bytes, SIM_RACE)
{
    char *a = addresses(2 * PAGE), *b = a + PAGE;
    CUmemGenericAllocationHandle handle = page();
    map(a, handle);
    map(b, handle);
    cudaStream_t s = stream(), t = stream();
    write_on(s, a + 512, 512);
    if (!broken) order(s, t);
    write_on(t, b + 1023, 1);
}

STORY(a_page_may_be_mapped_elsewhere_while_work_runs_if_what_follows_is_ordered, SIM_RACE)
{
    char *a = addresses(2 * PAGE), *b = a + PAGE;
    CUmemGenericAllocationHandle handle = page();
    cudaStream_t s = stream(), t = stream();
    map(a, handle);
    for (int i = 0; i < 4; ++i) write_on(s, a, PAGE);
    map(b, handle);
    read_on(broken ? t : s, b, PAGE);
}

STORY(a_large_page_has_a_history_for_each_of_its_bytes, SIM_RACE)
{
    char *a = addresses(8 * PAGE), *b = a + 4 * PAGE;
    CUmemGenericAllocationHandle handle = page_of(0, 4 * PAGE);
    OK(cuMemMap(address_of(a), 4 * PAGE, 0, handle, 0));
    OK(cuMemMap(address_of(b), 4 * PAGE, 0, handle, 0));
    OK(set_access(a, 8 * PAGE, 0));
    write_on(stream(), a + PAGE, 2 * PAGE);
    write_on(stream(), b + 3 * PAGE - (broken ? 1 : 0), PAGE);
}

STORY(a_checked_read_knows_what_was_written_last, SIM_STALE)
{
    char *a = addresses(2 * PAGE), *b = a + PAGE;
    CUmemGenericAllocationHandle handle = page();
    cudaStream_t s = stream();
    map(a, handle);
    map(b, handle);
    write_tag(s, a, PAGE, 11);
    write_tag(s, b + 100, 1, 22);
    check_on(s, b, 100, 11);
    check_on(s, a + 100, 1, broken ? 11 : 22);
    check_on(s, a + 101, PAGE - 101, 11);
}

STORY(what_was_written_is_copied_along, SIM_STALE)
{
    char *p = memory(2), *q = p + PAGE;
    uint64_t host[1024], word = 44;
    cudaStream_t s = stream();
    write_tag(s, p, PAGE, 11);
    write_tag(s, p + 4096, 4096, 22);
    write_tag(s, q, PAGE, 33);
    OK(cudaMemcpyAsync(q, p, 6000, cudaMemcpyDeviceToDevice, s));
    OK(cudaMemcpyAsync(p, &word, sizeof word, cudaMemcpyHostToDevice, s));
    check_on(s, q, broken ? 4097 : 4096, 11);
    check_on(s, q + 4096, 6000 - 4096, 22);
    check_on(s, q + 6000, PAGE - 6000, 33);
    check_on(s, p, sizeof word, 44);
    OK(cudaMemcpyAsync(host, p, sizeof host, cudaMemcpyDeviceToHost, s));
    OK(cudaStreamSynchronize(s));
    EXPECT(host[0] == 44 && host[1] == 11 && host[511] == 11 && host[512] == 22 && host[1023] == 22);
}

STORY(new_memory_holds_nothing, SIM_STALE)
{
    char *p = memory(1);
    cudaStream_t s = stream();
    if (!broken) write_tag(s, p, PAGE, 0);
    check_on(s, p, PAGE, 0);
}

STORY(memory_given_back_and_taken_again_holds_nothing, SIM_STALE)
{
    cudaStream_t s = stream();
    char *p = addresses(PAGE);
    CUmemGenericAllocationHandle handle = page();
    map(p, handle);
    write_tag(s, p, PAGE, 5);
    OK(cudaStreamSynchronize(s));
    unmap(p, PAGE);
    if (broken) {
        OK(cuMemRelease(handle));
        handle = page();
    }
    map(p, handle);
    check_on(s, p, PAGE, 5);
}

STORY(an_address_without_memory_is_a_hole, SIM_HOLE)
{
    char *p = addresses(2 * PAGE);
    map(p, page());
    write_on(stream(), p + PAGE - 8, broken ? 9 : 8);
}

STORY(an_address_without_access_rights_is_a_hole, SIM_HOLE)
{
    char *p = addresses(PAGE);
    OK(cuMemMap(address_of(p), PAGE, 0, page(), 0));
    if (!broken) OK(set_access(p, PAGE, 0));
    write_on(stream(), p, 1);
}

STORY(memory_that_may_be_read_need_not_be_writable, SIM_HOLE)
{
    char *p = memory(1);
    cudaStream_t s = stream();
    OK(set_rights(p, PAGE, 0, CU_MEM_ACCESS_FLAGS_PROT_READ));
    read_on(s, p, PAGE);
    if (!broken) OK(set_access(p, PAGE, 0));
    write_on(s, p, PAGE);
}

STORY(small_blocks_end_where_they_end, SIM_HOLE)
{
    void *p = NULL;
    OK(cudaMalloc(&p, 512));
    write_on(stream(), p, broken ? 513 : 512);
}

STORY(what_was_freed_is_a_hole, SIM_HOLE)
{
    void *p = NULL;
    cudaStream_t s = stream();
    OK(cudaMalloc(&p, 4096));
    write_on(s, p, 4096);
    if (broken) OK(cudaFree(p));
    write_on(s, p, 4096);
    if (!broken) OK(cudaFree(p));
}

STORY(copies_and_sets_need_memory_too, SIM_HOLE)
{
    char *p = addresses(2 * PAGE);
    map(p, page());
    if (broken) EXPECT_EQ(cudaMemset(p + PAGE - 1, 0, 2), cudaErrorInvalidValue);
    else OK(cudaMemset(p + PAGE - 1, 0, 1));
}

/* Each stream adds pages of its own to the story; no two of them may be mixed up. */
STORY(many_streams_and_pages_are_told_apart, SIM_RACE)
{
    char *p = memory(16);
    cudaStream_t s[8];
    for (int i = 0; i < 8; ++i) s[i] = stream();
    for (int turn = 0; turn < 4; ++turn)
        for (int i = 0; i < 8; ++i) write_on(s[i], p + (size_t)(2 * i) * PAGE, 2 * PAGE);
    for (int i = 0; i + 1 < 8; ++i) order(s[i], s[i + 1]);
    write_on(s[broken ? 6 : 7], p, 16 * PAGE);
}

/* ==== A MODEL ==================================================================================================== */

/* The whole of happens-before, kept for each byte by itself: slow, and too simple to be wrong. */
enum { MODEL_STREAMS = 5, MODEL_BLOCKING = 2, MODEL_LEGACY = 4, MODEL_EVENTS = 3, MODEL_BYTES = 64 };

typedef struct model_clock {
    int of[MODEL_STREAMS]; /* operations of each stream */
} model_clock;

typedef struct model {
    model_clock stream[MODEL_STREAMS]; /* two non-blocking ones, two blocking ones, legacy */
    model_clock host;
    model_clock event[MODEL_EVENTS], use[2]; /* of each of the two addresses */
    int recorded[MODEL_EVENTS];
    struct {
        int writer, no; /* the no-th operation of that stream; 0: never written */
        uint64_t tag;
        model_clock reads; /* since then */
    } byte[MODEL_BYTES];
} model;

/* What plays against the model. */
typedef struct player {
    model m;
    uint64_t random;
    cudaStream_t stream[MODEL_STREAMS];
    cudaEvent_t event[MODEL_EVENTS];
    CUmemGenericAllocationHandle page;
    char *at[2]; /* where the page is mapped */
} player;

static uint64_t random_below(uint64_t *state, uint64_t n)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (*state >> 33) % n;
}

static int any(player *p, int n) { return (int)random_below(&p->random, (uint64_t)n); }

static void join(model_clock *to, const model_clock *from)
{
    for (int i = 0; i < MODEL_STREAMS; ++i)
        if (to->of[i] < from->of[i]) to->of[i] = from->of[i];
}

static int is_within(const model_clock *a, const model_clock *b)
{
    for (int i = 0; i < MODEL_STREAMS; ++i)
        if (a->of[i] > b->of[i]) return 0;
    return 1;
}

/* One more operation; the clock of its stream is then its own. */
static model_clock *model_operation(model *m, int stream)
{
    model_clock *now = &m->stream[stream];
    join(now, &m->host);
    for (int i = MODEL_BLOCKING; i < MODEL_LEGACY; ++i) {
        if (stream == MODEL_LEGACY) join(now, &m->stream[i]);
        if (stream == i) join(now, &m->stream[MODEL_LEGACY]);
    }
    ++now->of[stream];
    return now;
}

static void model_access(model *m, int stream, int from, int to, const sim_access *a, int *race, int *stale)
{
    const model_clock *now = model_operation(m, stream);
    *race = *stale = 0;
    for (int i = from; i < to; ++i) {
        *race |= m->byte[i].no > now->of[m->byte[i].writer];
        *stale |= (a->how & SIM_CHECK) && (!m->byte[i].no || m->byte[i].tag != a->tag);
        if (a->how & SIM_WRITE) {
            *race |= !is_within(&m->byte[i].reads, now);
            m->byte[i].writer = stream;
            m->byte[i].no = now->of[stream];
            m->byte[i].tag = a->tag;
            memset(&m->byte[i].reads, 0, sizeof m->byte[i].reads);
        } else {
            m->byte[i].reads.of[stream] = now->of[stream];
        }
    }
}

static void play_access(player *p)
{
    static const int hows[] = {SIM_READ, SIM_WRITE, SIM_READ | SIM_CHECK};
    int stream = any(p, MODEL_STREAMS), address = any(p, 2), race, stale;
    int from = any(p, MODEL_BYTES), to = from + 1 + any(p, MODEL_BYTES - from);
    sim_access a = {p->at[address] + from, (size_t)(to - from), hows[any(p, 3)], (uint64_t)any(p, 3)};
    model_access(&p->m, stream, from, to, &a, &race, &stale);
    p->m.use[address].of[stream] = p->m.stream[stream].of[stream];
    OK(sim_launch(p->stream[stream], &a, 1));
    EXPECT_EQ(sim_findings(SIM_RACE), race);
    EXPECT_EQ(sim_findings(SIM_STALE), stale);
    EXPECT_EQ(sim_findings(SIM_ANY), race + stale);
}

static void play_record(player *p)
{
    int stream = any(p, MODEL_STREAMS), e = any(p, MODEL_EVENTS);
    OK(cudaEventRecord(p->event[e], p->stream[stream]));
    p->m.event[e] = *model_operation(&p->m, stream);
    p->m.recorded[e] = 1;
}

static void play_wait(player *p)
{
    int stream = any(p, MODEL_STREAMS), e = any(p, MODEL_EVENTS);
    OK(cudaStreamWaitEvent(p->stream[stream], p->event[e], 0));
    if (p->m.recorded[e]) join(model_operation(&p->m, stream), &p->m.event[e]);
}

static void play_look(player *p)
{
    int stream = any(p, MODEL_STREAMS), e = any(p, MODEL_EVENTS);
    if (any(p, 4)) {
        if (cudaEventQuery(p->event[e]) == cudaSuccess) join(&p->m.host, &p->m.event[e]);
    } else {
        OK(cudaStreamSynchronize(p->stream[stream]));
        if (stream == MODEL_LEGACY) model_operation(&p->m, stream);
        join(&p->m.host, &p->m.stream[stream]);
    }
    EXPECT_EQ(sim_findings(SIM_ANY), 0);
}

static void play_remap(player *p)
{
    int address = any(p, 2);
    unmap(p->at[address], PAGE);
    map(p->at[address], p->page);
    EXPECT_EQ(sim_findings(SIM_UNMAP_IN_USE), !is_within(&p->m.use[address], &p->m.host));
    memset(&p->m.use[address], 0, sizeof p->m.use[address]);
}

static void play(player *p, int turns)
{
    static void (*const moves[])(player *) = {play_access, play_access, play_access, play_record,
                                              play_record, play_wait,   play_wait,   play_look, play_remap};
    for (int turn = 0; turn < turns; ++turn) {
        sim_findings_clear();
        moves[any(p, sizeof moves / sizeof *moves)](p);
    }
}

TEST(the_ledger_agrees_with_a_model_that_keeps_every_byte)
{
    player p;
    memset(&p, 0, sizeof p);
    p.random = test_seed();
    for (int round = 0; round < 100; ++round) {
        start_seeded(p.random, SIM_PACE_RANDOM);
        memset(&p.m, 0, sizeof p.m);
        p.at[0] = addresses(2 * PAGE);
        p.at[1] = p.at[0] + PAGE;
        p.page = page();
        for (int i = 0; i < 2; ++i) map(p.at[i], p.page);
        for (int i = 0; i < MODEL_EVENTS; ++i) p.event[i] = event();
        for (int i = 0; i < MODEL_BLOCKING; ++i) p.stream[i] = stream();
        p.stream[MODEL_BLOCKING] = blocking_stream();
        p.stream[MODEL_BLOCKING + 1] = cudaStreamPerThread;
        p.stream[MODEL_LEGACY] = cudaStreamLegacy;
        play(&p, 200);
    }
}

/* ==== UNMAPPING ================================================================================================== */

STORY(nothing_is_unmapped_before_the_host_has_seen_its_work_done, SIM_UNMAP_IN_USE)
{
    char *p = memory(1);
    cudaStream_t s = stream();
    write_on(s, p, PAGE);
    cudaEvent_t e = record(s);
    if (!broken) poll(e);
    unmap(p, PAGE);
}

STORY(the_completion_of_work_that_followed_counts, SIM_UNMAP_IN_USE)
{
    char *p = memory(1);
    cudaStream_t s = stream(), t = stream();
    write_on(s, p, PAGE);
    if (!broken) order(s, t);
    OK(cudaStreamSynchronize(t));
    unmap(p, PAGE);
}

STORY(every_stream_that_uses_an_address_counts, SIM_UNMAP_IN_USE)
{
    char *p = memory(1);
    cudaStream_t s[3];
    for (int i = 0; i < 3; ++i) read_on(s[i] = stream(), p, PAGE);
    for (int i = 0; i < 3; ++i)
        if (!broken || i != 1) OK(cudaStreamSynchronize(s[i]));
    unmap(p, PAGE);
}

STORY(to_wait_for_legacy_is_to_wait_for_the_blocking_streams, SIM_UNMAP_IN_USE)
{
    char *p = memory(1);
    write_on(broken ? stream() : blocking_stream(), p, PAGE);
    OK(cudaStreamSynchronize(cudaStreamLegacy));
    unmap(p, PAGE);
}

STORY(an_event_recorded_before_the_last_use_proves_nothing, SIM_UNMAP_IN_USE)
{
    char *p = memory(1);
    cudaStream_t s = stream();
    cudaEvent_t early = record(s);
    write_on(s, p, PAGE);
    cudaEvent_t late = record(s);
    OK(cudaEventSynchronize(broken ? early : late));
    unmap(p, PAGE);
}

STORY(a_look_from_outside_is_no_completion_that_the_host_has_seen, SIM_UNMAP_IN_USE)
{
    char *p = memory(1);
    cudaStream_t s = stream();
    write_on(s, p, PAGE);
    sim_run(-1);
    EXPECT_EQ(sim_stream_done(s), 1);
    if (!broken) OK(cudaStreamQuery(s));
    unmap(p, PAGE);
}

STORY(a_copy_to_the_host_that_returned_is_seen_complete, SIM_UNMAP_IN_USE)
{
    char *p = memory(2), host[64];
    write_on(broken ? stream() : blocking_stream(), p, PAGE);
    OK(cudaMemcpy(host, p + PAGE, sizeof host, cudaMemcpyDeviceToHost));
    unmap(p, PAGE);
}

STORY(a_set_that_returned_may_still_be_running, SIM_UNMAP_IN_USE)
{
    char *p = memory(1);
    OK(cudaMemset(p, 0, PAGE));
    if (!broken) OK(cudaStreamSynchronize(cudaStreamLegacy));
    unmap(p, PAGE);
}

STORY(a_free_waits_for_the_whole_device, SIM_UNMAP_IN_USE)
{
    char *p = memory(1);
    void *q = NULL;
    OK(cudaMalloc(&q, 4096));
    write_on(stream(), p, PAGE);
    if (!broken) OK(cudaFree(q));
    unmap(p, PAGE);
}

STORY(a_synchronising_call_waits_for_its_device_only, SIM_UNMAP_IN_USE)
{
    char *p = memory(1);
    OK(set_access(p, PAGE, 1));
    OK(cudaSetDevice(1));
    write_on(stream(), p, PAGE);
    if (broken) OK(cudaSetDevice(0));
    OK(cudaDeviceSynchronize());
    unmap(p, PAGE);
}

TEST(unmapping_in_use_is_reported_at_the_unmap)
{
    start_still();
    char *p = memory(1);
    write_on(stream(), p, PAGE);
    EXPECT_EQ(sim_findings(SIM_UNMAP_IN_USE), 0);
    cuMemUnmap(address_of(p), PAGE);
    EXPECT_EQ(sim_findings(SIM_UNMAP_IN_USE), 1);
    EXPECT(sim_finding(0) && strstr(sim_finding(0), "cuMemUnmap"));
}

TEST(unmapping_one_alias_under_work_through_the_other_is_legal_and_counted)
{
    start_still();
    char *a = addresses(2 * PAGE), *b = a + PAGE;
    CUmemGenericAllocationHandle handle = page();
    map(a, handle);
    map(b, handle);
    unmap(a, PAGE);
    EXPECT_EQ(sim_unmapped_under_work(), 0);
    map(a, handle);
    write_on(stream(), b, PAGE);
    unmap(a, PAGE);
    EXPECT_EQ(sim_unmapped_under_work(), PAGE);
    OK(cudaDeviceSynchronize());
    EXPECT_EQ(sim_findings(SIM_ANY), 0);
}

TEST(mapping_does_not_wait_and_freeing_does)
{
    start_still();
    char *p = memory(2);
    cudaStream_t s = stream();
    void *q = NULL;
    OK(cudaMalloc(&q, PAGE));
    write_on(s, p, PAGE);
    long before = sim_blocking_calls();
    unmap(p + PAGE, PAGE);
    map(p + PAGE, page());
    EXPECT_EQ(sim_blocking_calls(), before);
    EXPECT(sim_pending() > 0);
    OK(cudaFree(q));
    EXPECT(sim_blocking_calls() > before);
    EXPECT_EQ(sim_pending(), 0);
    EXPECT_EQ(sim_findings(SIM_ANY), 0);
}

/* ==== THE STREAM RULES =========================================================================================== */

/* Which stream: the context and the id, never the handle. */
STORY(a_handle_that_comes_back_is_another_stream, SIM_RACE)
{
    char *p = memory(1);
    cudaStream_t s = stream();
    write_on(s, p, PAGE);
    cudaEvent_t mark = record(s);
    OK(cudaStreamDestroy(s));
    cudaStream_t n = stream();
    EXPECT(n == s);
    if (!broken) wait_for(n, mark);
    write_on(n, p, PAGE);
}

STORY(an_event_on_the_new_stream_says_nothing_of_the_old_one, SIM_UNMAP_IN_USE)
{
    char *p = memory(1);
    cudaStream_t s = stream();
    write_on(s, p, PAGE);
    cudaEvent_t old = record(s);
    OK(cudaStreamDestroy(s));
    cudaStream_t n = stream();
    OK(cudaEventSynchronize(broken ? record(n) : old));
    unmap(p, PAGE);
}

/* 1: memory freed on a stream is reusable by later work of that stream, and of no other. */
STORY(only_the_freeing_stream_may_reuse_at_once, SIM_RACE)
{
    char *p = memory(1);
    cudaStream_t s = stream(), t = stream();
    write_on(s, p, PAGE);
    write_on(broken ? t : s, p, PAGE);
}

/* 2: order follows the free ... */
STORY(the_stream_named_in_the_free_must_be_the_one_that_worked_last, SIM_RACE)
{
    char *p = memory(1);
    cudaStream_t s = stream(), user = stream(), taker = stream();
    write_on(s, p, PAGE);
    order(s, user);
    write_on(user, p, PAGE);
    order(broken ? s : user, taker);
    write_on(taker, p, PAGE);
}

/* ... and use follows the malloc: a stream that was ordered after an earlier point is not ordered after it. */
STORY(use_on_another_stream_is_ordered_after_the_malloc, SIM_RACE)
{
    char *p = memory(1);
    cudaStream_t s = stream(), t = stream();
    if (broken) order(s, t);
    write_on(s, p, PAGE);
    if (!broken) order(s, t);
    write_on(t, p, PAGE);
}

STORY(a_plain_copy_right_after_the_malloc_is_a_race_on_a_nonblocking_stream, SIM_RACE)
{
    char *p = memory(1), host[64] = {0};
    cudaStream_t s = broken ? stream() : blocking_stream();
    write_on(s, p, PAGE);
    OK(cudaMemcpy(p, host, sizeof host, cudaMemcpyHostToDevice));
}

/* 3: a mark covers everything before it and nothing after it. */
STORY(a_mark_covers_everything_freed_before_it, SIM_RACE)
{
    char *p = memory(4);
    cudaStream_t s = stream(), t = stream();
    cudaEvent_t mark = NULL;
    for (int i = 0; i < 4; ++i) {
        if (broken && i == 3) mark = record(s);
        write_on(s, p + (size_t)i * PAGE, PAGE);
    }
    if (!broken) mark = record(s);
    wait_for(t, mark);
    write_on(t, p, 4 * PAGE);
}

/* S gives p back and then waits for a flag that T will set. A mark taken when T asks lies after that wait. */
STORY(a_mark_taken_late_can_deadlock, SIM_DEADLOCK)
{
    void *host = NULL, *flag = NULL;
    char *p = memory(1);
    cudaStream_t s = stream(), t = stream();
    OK(cudaHostAlloc(&host, 4096, cudaHostAllocMapped));
    OK(cudaHostGetDevicePointer(&flag, host, 0));
    *(uint32_t *)host = 0;
    write_on(s, p, PAGE);
    cudaEvent_t mark = broken ? NULL : record(s);
    OK(cuStreamWaitValue32(s, address_of(flag), 1, CU_STREAM_WAIT_VALUE_EQ));
    if (broken) mark = record(s);
    wait_for(t, mark);
    write_on(t, p, PAGE);
    OK(cuStreamWriteValue32(t, address_of(flag), 1, 0));
}

STORY(a_mark_is_never_recorded_on_a_dead_stream, SIM_DEAD_HANDLE)
{
    cudaStream_t s = stream();
    cudaEvent_t e = event();
    if (!broken) OK(cudaEventRecord(e, s));
    OK(cudaStreamDestroy(s));
    if (broken) EXPECT_EQ(cudaEventRecord(e, s), cudaErrorInvalidResourceHandle);
}

/* 4: another stream may take it (a) when the mark is complete, (b) when it already waits for a later one, (c) when it
   waits now. */
STORY(a_mark_that_is_complete_lets_anyone_take, SIM_RACE)
{
    char *p = memory(1);
    cudaStream_t s = stream();
    write_on(s, p, PAGE);
    cudaEvent_t mark = record(s);
    if (!broken) poll(mark);
    write_on(stream(), p, PAGE);
}

STORY(a_mark_before_one_that_is_waited_for_is_covered, SIM_RACE)
{
    char *p = memory(2);
    cudaStream_t s = stream(), t = stream();
    write_on(s, p, PAGE);
    cudaEvent_t first = record(s);
    write_on(s, p + PAGE, PAGE);
    cudaEvent_t second = record(s);
    wait_for(t, broken ? first : second);
    write_on(t, p, 2 * PAGE);
}

STORY(a_wait_orders_only_what_is_queued_after_it, SIM_RACE)
{
    char *p = memory(1);
    cudaStream_t s = stream(), t = stream();
    write_on(s, p, PAGE);
    cudaEvent_t mark = record(s);
    if (!broken) wait_for(t, mark);
    write_on(t, p, PAGE);
    if (broken) wait_for(t, mark);
}

STORY(waits_are_passed_on_only_by_what_comes_after_them, SIM_RACE)
{
    char *p = memory(1);
    cudaStream_t s = stream(), t = stream(), u = stream();
    write_on(s, p, PAGE);
    cudaEvent_t before = record(t);
    order(s, t);
    cudaEvent_t after = record(t);
    wait_for(u, broken ? before : after);
    write_on(u, p, PAGE);
}

/* 5: marks belong to byte ranges. */
STORY(a_merged_block_keeps_the_marks_of_both_sides, SIM_RACE)
{
    char *p = memory(1);
    cudaStream_t left = stream(), right = stream(), taker = stream();
    write_on(left, p, PAGE / 2);
    write_on(right, p + PAGE / 2, PAGE / 2);
    order(left, taker);
    if (!broken) order(right, taker);
    write_on(taker, p, PAGE);
}

STORY(a_request_honours_the_marks_of_the_bytes_that_it_takes_and_only_those, SIM_RACE)
{
    char *p = memory(1);
    cudaStream_t left = stream(), right = stream(), taker = stream();
    write_on(left, p, PAGE / 2);
    write_on(right, p + PAGE / 2, PAGE / 2);
    order(left, taker);
    write_on(taker, p, PAGE / 2 + (broken ? 1 : 0));
}

STORY(a_block_handed_on_is_ordered_by_the_taker_as_well, SIM_RACE)
{
    char *p = memory(1);
    cudaStream_t s = stream(), t = stream(), third = stream();
    write_on(s, p, PAGE);
    cudaEvent_t mark = record(s);
    wait_for(t, mark);
    write_on(t, p, PAGE);
    wait_for(third, mark);
    if (!broken) order(t, third);
    write_on(third, p, PAGE);
}

/* 6: a recorded stream counts until it is done, for the freeing stream too. */
STORY(even_the_freeing_stream_waits_for_a_recorded_one, SIM_RACE)
{
    char *p = memory(1);
    cudaStream_t s = stream(), t = stream();
    write_on(s, p, PAGE);
    order(s, t);
    read_on(t, p, PAGE);
    if (!broken) order(t, s);
    write_on(s, p, PAGE);
}

STORY(a_third_stream_waits_for_the_freeing_and_the_recorded_one, SIM_RACE)
{
    char *p = memory(1);
    cudaStream_t s = stream(), t = stream(), third = stream();
    order(s, t);
    read_on(s, p, PAGE);
    read_on(t, p, PAGE);
    order(s, third);
    if (!broken) order(t, third);
    write_on(third, p, PAGE);
}

/* 7: legacy is ordered with every blocking stream, both ways ... */
STORY(legacy_runs_after_what_blocking_streams_hold, SIM_RACE)
{
    char *p = memory(1);
    write_on(broken ? stream() : blocking_stream(), p, PAGE);
    write_on(cudaStreamLegacy, p, PAGE);
}

STORY(blocking_streams_run_after_what_legacy_holds, SIM_RACE)
{
    char *p = memory(1);
    cudaStream_t s = broken ? stream() : blocking_stream();
    write_on(cudaStreamLegacy, p, PAGE);
    write_on(s, p, PAGE);
}

STORY(a_blocking_stream_is_ordered_even_when_it_is_dead, SIM_RACE)
{
    char *p = memory(1);
    cudaStream_t s = broken ? stream() : blocking_stream();
    write_on(s, p, PAGE);
    OK(cudaStreamDestroy(s));
    write_on(cudaStreamLegacy, p, PAGE);
}

/* ... but blocking streams are not ordered with each other, unless something of legacy's lies between them: even an
   event, which is why galloc does not record there. */
STORY(blocking_streams_are_not_ordered_with_each_other, SIM_RACE)
{
    char *p = memory(1);
    cudaStream_t a = blocking_stream(), b = blocking_stream();
    write_on(a, p, PAGE);
    if (!broken) record(cudaStreamLegacy);
    write_on(b, p, PAGE);
}

STORY(legacy_work_that_came_first_does_not_order_blocking_streams, SIM_RACE)
{
    char *p = memory(2);
    cudaStream_t a = blocking_stream(), b = blocking_stream();
    if (broken) write_on(cudaStreamLegacy, p + PAGE, PAGE);
    write_on(a, p, PAGE);
    if (!broken) write_on(cudaStreamLegacy, p + PAGE, PAGE);
    write_on(b, p, PAGE);
}

STORY(the_default_handle_is_legacy, SIM_RACE)
{
    char *p = memory(1);
    write_on(NULL, p, PAGE);
    write_on(broken ? stream() : cudaStreamLegacy, p, PAGE);
}

static void *write_on_per_thread(void *p)
{
    write_on(cudaStreamPerThread, p, PAGE);
    return NULL;
}

STORY(each_thread_has_a_default_stream_of_its_own, SIM_RACE)
{
    char *p = memory(1);
    write_on_per_thread(p);
    if (broken) elsewhere(write_on_per_thread, p);
    else write_on_per_thread(p);
}

STORY(a_per_thread_stream_is_a_blocking_one, SIM_RACE)
{
    char *p = memory(1);
    write_on_per_thread(p);
    write_on(broken ? blocking_stream() : cudaStreamLegacy, p, PAGE);
}

/* 8: record, then publish; wait, then say so. */
STORY(an_event_published_before_it_was_recorded_orders_nothing, SIM_RACE)
{
    char *p = memory(1);
    cudaStream_t s = stream(), t = stream();
    cudaEvent_t mark = event();
    write_on(s, p, PAGE);
    if (!broken) OK(cudaEventRecord(mark, s));
    wait_for(t, mark);
    if (broken) OK(cudaEventRecord(mark, s));
    write_on(t, p, PAGE);
}

STORY(a_wait_published_before_it_was_queued_orders_nothing, SIM_RACE)
{
    char *p = memory(1);
    cudaStream_t s = stream(), t = stream(), third = stream();
    write_on(s, p, PAGE);
    cudaEvent_t mark = record(s);
    if (!broken) wait_for(t, mark);
    order(t, third);
    if (broken) wait_for(t, mark);
    write_on(third, p, PAGE);
}

/* ==== EVENTS ===================================================================================================== */

STORY(a_wait_keeps_the_generation_that_it_saw, SIM_RACE)
{
    char *p = memory(2);
    cudaStream_t s = stream(), t = stream();
    write_on(s, p, PAGE);
    cudaEvent_t e = record(s);
    wait_for(t, e);
    write_on(s, p + PAGE, PAGE);
    OK(cudaEventRecord(e, s));
    if (!broken) wait_for(t, e);
    write_on(t, p, 2 * PAGE);
}

STORY(a_query_answers_for_the_latest_generation_only, SIM_RACE)
{
    char *p = memory(1);
    cudaStream_t s = stream(), t = stream(), idle = stream();
    write_on(s, p, PAGE);
    cudaEvent_t e = record(s);
    if (broken) OK(cudaEventRecord(e, idle));
    OK(cudaEventSynchronize(e));
    write_on(t, p, PAGE);
}

STORY(a_wait_outlives_its_event, SIM_RACE)
{
    char *p = memory(1);
    cudaStream_t s = stream(), t = stream();
    write_on(s, p, PAGE);
    cudaEvent_t e = record(s);
    if (!broken) wait_for(t, e);
    OK(cudaEventDestroy(e));
    write_on(t, p, PAGE);
}

STORY(an_event_belongs_to_its_context, SIM_BAD_EVENT)
{
    CUcontext own = NULL, other = NULL;
    OK(cudaFree(NULL));
    OK(cuCtxGetCurrent(&own));
    cudaStream_t s = stream();
    OK(cuCtxCreate(&other, NULL, 0, 0));
    cudaEvent_t foreign = event();
    OK(cuCtxSetCurrent(own));
    cudaError_t error = cudaEventRecord(broken ? foreign : event(), s);
    EXPECT_EQ(error, broken ? cudaErrorInvalidResourceHandle : cudaSuccess);
}

TEST(an_event_that_was_never_recorded_is_complete)
{
    start();
    cudaEvent_t e = event();
    OK(cudaEventQuery(e));
    OK(cudaEventSynchronize(e));
    wait_for(stream(), e);
    OK(cudaDeviceSynchronize());
}

TEST(an_event_is_complete_when_the_work_before_it_is)
{
    start_still();
    char *p = memory(1);
    cudaStream_t s = stream();
    write_on(s, p, PAGE);
    cudaEvent_t e = record(s);
    EXPECT_EQ(cudaEventQuery(e), cudaErrorNotReady);
    EXPECT_EQ(cuEventQuery(e), CUDA_ERROR_NOT_READY);
    EXPECT_EQ(cudaStreamQuery(s), cudaErrorNotReady);
    sim_run(-1);
    OK(cudaEventQuery(e));
    OK(cudaStreamQuery(s));
}

TEST(events_come_and_go_by_the_thousand)
{
    start();
    char *p = memory(1);
    cudaStream_t s = stream(), t = stream();
    for (int i = 0; i < 4000; ++i) {
        write_on(i % 2 ? s : t, p, PAGE);
        order(i % 2 ? s : t, i % 2 ? t : s);
    }
    EXPECT_EQ(sim_leaks(NULL, 0), 2); /* the reservation and the mapping */
    OK(cudaDeviceSynchronize());
    EXPECT_EQ(sim_findings(SIM_ANY), 0);
}

TEST(time_passes_between_two_events)
{
    start();
    cudaEvent_t before = NULL, after = NULL;
    float ms = -1;
    cudaStream_t s = stream();
    char *p = memory(1);
    OK(cudaEventCreate(&before));
    OK(cudaEventCreate(&after));
    OK(cudaEventRecord(before, s));
    write_on(s, p, PAGE);
    OK(cudaEventRecord(after, s));
    OK(cudaEventSynchronize(after));
    OK(cudaEventElapsedTime(&ms, before, after));
    EXPECT(ms > 0);
    EXPECT_EQ(cudaEventElapsedTime(&ms, before, record(s)), cudaErrorInvalidResourceHandle);
}

/* ==== TIME ======================================================================================================= */

typedef struct diary {
    char text[64];
    int length;
} diary;

typedef struct entry {
    diary *to;
    char letter;
} entry;

static void write_entry(void *arg)
{
    entry *e = (entry *)arg;
    if (e->to->length < (int)sizeof e->to->text - 1) e->to->text[e->to->length++] = e->letter;
}

TEST(streams_run_in_any_order_that_the_seed_decides)
{
    int a_first = 0, b_first = 0, same = 0;
    for (uint64_t seed = 1; seed <= 40; ++seed) {
        diary d[2];
        memset(d, 0, sizeof d);
        for (int again = 0; again < 2; ++again) {
            entry a = {&d[again], 'a'}, b = {&d[again], 'b'};
            start_seeded(seed, SIM_PACE_RANDOM);
            cudaStream_t s = stream(), t = stream();
            OK(sim_launch_call(s, NULL, 0, write_entry, &a));
            OK(sim_launch_call(t, NULL, 0, write_entry, &b));
            OK(cudaDeviceSynchronize());
        }
        a_first += !strcmp(d[0].text, "ab");
        b_first += !strcmp(d[0].text, "ba");
        same += !strcmp(d[0].text, d[1].text);
    }
    EXPECT(a_first > 0 && b_first > 0);
    EXPECT_EQ(a_first + b_first, 40);
    EXPECT_EQ(same, 40);
}

TEST(a_stream_runs_in_its_order)
{
    for (uint64_t seed = 1; seed <= 20; ++seed) {
        diary d;
        entry a = {&d, 'a'}, b = {&d, 'b'}, c = {&d, 'c'}, e = {&d, 'd'};
        memset(&d, 0, sizeof d);
        start_seeded(seed, SIM_PACE_RANDOM);
        cudaStream_t s = stream(), t = stream();
        OK(sim_launch_call(s, NULL, 0, write_entry, &a));
        OK(cudaLaunchHostFunc(s, write_entry, &b));
        order(s, t);
        OK(sim_launch_call(t, NULL, 0, write_entry, &c));
        order(t, s);
        OK(cudaLaunchHostFunc(s, write_entry, &e));
        OK(cudaStreamSynchronize(s));
        EXPECT(!strcmp(d.text, "abcd"));
    }
}

TEST(legacy_and_blocking_streams_run_in_their_order)
{
    for (uint64_t seed = 1; seed <= 20; ++seed) {
        diary d;
        entry a = {&d, 'a'}, b = {&d, 'b'}, c = {&d, 'c'};
        memset(&d, 0, sizeof d);
        start_seeded(seed, SIM_PACE_RANDOM);
        cudaStream_t s = blocking_stream(), t = blocking_stream();
        OK(cudaLaunchHostFunc(s, write_entry, &a));
        OK(cudaLaunchHostFunc(cudaStreamLegacy, write_entry, &b));
        OK(cudaLaunchHostFunc(t, write_entry, &c));
        OK(cudaDeviceSynchronize());
        EXPECT(!strcmp(d.text, "abc"));
    }
}

/* Of two operations each has a begin and an end: after two steps either one is done, or both are half done. */
TEST(operations_of_several_streams_may_run_at_the_same_time)
{
    int together = 0, apart = 0;
    for (uint64_t seed = 1; seed <= 40; ++seed) {
        start_seeded(seed, SIM_PACE_STILL);
        OK(sim_launch(stream(), NULL, 0));
        OK(sim_launch(stream(), NULL, 0));
        sim_run(2);
        together += sim_pending() == 2;
        apart += sim_pending() == 1;
        sim_run(2);
        EXPECT_EQ(sim_pending(), 0);
    }
    EXPECT(together > 0 && apart > 0);
    EXPECT_EQ(together + apart, 40);
}

TEST(a_still_device_moves_only_when_it_is_told_to)
{
    start_still();
    char *p = memory(1);
    cudaStream_t s = stream();
    write_on(s, p, PAGE);
    for (int i = 0; i < 100; ++i) EXPECT_EQ(cudaStreamQuery(s), cudaErrorNotReady);
    EXPECT_EQ(sim_pending(), 1);
    EXPECT_EQ(sim_stream_done(s), 0);
    sim_run(-1);
    EXPECT_EQ(sim_pending(), 0);
    EXPECT_EQ(sim_stream_done(s), 1);
}

TEST(a_prompt_device_is_done_at_once)
{
    start_seeded(1, SIM_PACE_PROMPT);
    char *p = memory(1);
    cudaStream_t s = stream();
    write_on(s, p, PAGE);
    OK(cudaStreamQuery(s));
    EXPECT_EQ(sim_pending(), 0);
}

TEST(a_lagging_device_runs_well_behind_the_host)
{
    sim_options options = forgiving();
    options.lag = 10;
    options.pace = SIM_PACE_PROMPT;
    start_with(options);
    char *p = memory(1);
    cudaStream_t s = stream();
    write_on(s, p, PAGE);
    cudaEvent_t first = record(s);
    for (int i = 0; i < 5; ++i) write_on(s, p, PAGE);
    EXPECT_EQ(cudaEventQuery(first), cudaErrorNotReady);
    for (int i = 0; i < 20; ++i) write_on(s, p, PAGE);
    OK(cudaEventQuery(first));
    EXPECT(sim_pending() > 0);
    OK(cudaStreamSynchronize(s));
    EXPECT_EQ(sim_pending(), 0);
    EXPECT_EQ(sim_findings(SIM_ANY), 0);
}

static void call_from_host_function(void *error) { *(cudaError_t *)error = cudaStreamQuery(cudaStreamLegacy); }

TEST(a_host_function_may_not_call_cuda)
{
    start();
    cudaError_t error = cudaSuccess;
    cudaStream_t s = stream();
    OK(cudaLaunchHostFunc(s, call_from_host_function, &error));
    OK(cudaStreamSynchronize(s));
    EXPECT_EQ(error, cudaErrorNotPermitted);
}

/* ==== DEADLOCKS ================================================================================================== */

TEST(a_stalled_device_is_reported_and_does_not_hang)
{
    start();
    char *p = memory(2);
    cudaStream_t s = stream(), t = stream();
    sim_hold(s, 1);
    write_on(s, p, PAGE);
    write_on(t, p + PAGE, PAGE);
    OK(cudaStreamSynchronize(t));
    EXPECT_EQ(sim_findings(SIM_DEADLOCK), 0);
    EXPECT(cudaStreamSynchronize(s) != cudaSuccess);
    EXPECT_EQ(sim_findings(SIM_DEADLOCK), 1);
    sim_findings_clear();
    sim_hold(s, 0);
    OK(cudaStreamSynchronize(s));
    EXPECT_EQ(sim_findings(SIM_ANY), 0);
}

TEST(every_waiting_call_sees_the_stall)
{
    start();
    void *q = NULL;
    char *p = memory(1);
    cudaStream_t s = stream();
    OK(cudaMalloc(&q, 4096));
    sim_hold(s, 1);
    write_on(s, p, PAGE);
    cudaEvent_t e = record(s);
    EXPECT(cudaEventSynchronize(e) != cudaSuccess);
    EXPECT(cudaDeviceSynchronize() != cudaSuccess);
    EXPECT(cudaFree(q) != cudaSuccess);
    EXPECT_EQ(sim_findings(SIM_DEADLOCK), 3);
    sim_hold(s, 0);
}

STORY(waiting_for_a_flag_that_nobody_sets_is_a_deadlock, SIM_DEADLOCK)
{
    void *host = NULL, *flag = NULL;
    cudaStream_t s = stream();
    OK(cudaHostAlloc(&host, 4096, cudaHostAllocMapped));
    OK(cudaHostGetDevicePointer(&flag, host, 0));
    *(volatile uint32_t *)host = broken ? 4 : 5;
    OK(cuStreamWaitValue32(s, address_of(flag), 5, CU_STREAM_WAIT_VALUE_GEQ));
}

TEST(a_flag_is_compared_in_four_ways)
{
    static const struct {
        unsigned how;
        uint32_t wanted, too_early, enough;
    } ways[] = {{CU_STREAM_WAIT_VALUE_GEQ, 5, 4, 6},
                {CU_STREAM_WAIT_VALUE_EQ, 5, 6, 5},
                {CU_STREAM_WAIT_VALUE_AND, 5, 2, 4},
                {CU_STREAM_WAIT_VALUE_NOR, 0xfffffff0, 0xf, 0xe}};
    for (int i = 0; i < 4; ++i) {
        start_still();
        void *host = NULL;
        cudaStream_t s = stream();
        OK(cudaHostAlloc(&host, 4096, cudaHostAllocMapped));
        *(volatile uint32_t *)host = ways[i].too_early;
        OK(cuStreamWaitValue32(s, address_of(host), ways[i].wanted, ways[i].how));
        sim_run(-1);
        EXPECT_EQ(sim_stream_done(s), 0);
        *(volatile uint32_t *)host = ways[i].enough;
        sim_run(-1);
        EXPECT_EQ(sim_stream_done(s), 1);
    }
}

TEST(the_host_can_set_the_flag)
{
    start();
    void *host = NULL, *flag = NULL;
    cudaStream_t s = stream();
    OK(cudaHostAlloc(&host, 4096, cudaHostAllocMapped));
    OK(cudaHostGetDevicePointer(&flag, host, 0));
    *(volatile uint32_t *)host = 0;
    OK(cuStreamWaitValue32(s, address_of(flag), 1, CU_STREAM_WAIT_VALUE_EQ));
    cudaEvent_t e = record(s);
    sim_run(-1);
    EXPECT_EQ(cudaEventQuery(e), cudaErrorNotReady);
    *(volatile uint32_t *)host = 1;
    OK(cudaStreamSynchronize(s));
    OK(cudaFreeHost(host));
    EXPECT_EQ(sim_findings(SIM_ANY), 0);
}

typedef struct signaller {
    uint32_t *word;
    pthread_barrier_t *ready;
} signaller;

static void *raise_word_later(void *arg)
{
    signaller *s = (signaller *)arg;
    OK(cudaFree(NULL));
    pthread_barrier_wait(s->ready);
    usleep(3000);
    __atomic_store_n(s->word, 1, __ATOMIC_RELEASE);
    return NULL;
}

TEST(another_thread_can_set_the_flag_while_one_waits)
{
    start();
    void *host = NULL, *flag = NULL;
    cudaStream_t s = stream();
    pthread_t thread;
    pthread_barrier_t ready;
    OK(cudaHostAlloc(&host, 4096, cudaHostAllocMapped));
    OK(cudaHostGetDevicePointer(&flag, host, 0));
    signaller other = {(uint32_t *)host, &ready};
    *other.word = 0;
    OK(cuStreamWaitValue32(s, address_of(flag), 1, CU_STREAM_WAIT_VALUE_EQ));
    OK(pthread_barrier_init(&ready, NULL, 2));
    OK(pthread_create(&thread, NULL, raise_word_later, &other));
    pthread_barrier_wait(&ready);
    OK(cudaStreamSynchronize(s));
    OK(pthread_join(thread, NULL));
    OK(pthread_barrier_destroy(&ready));
    EXPECT_EQ(sim_findings(SIM_ANY), 0);
}

/* ==== HANDLES ==================================================================================================== */

TEST(a_destroyed_stream_still_does_its_work)
{
    start_still();
    char *p = memory(1);
    cudaStream_t s = stream();
    for (int i = 0; i < 20; ++i) write_tag(s, p, PAGE, 3);
    cudaEvent_t e = record(s);
    long before = sim_blocking_calls();
    OK(cudaStreamDestroy(s));
    EXPECT_EQ(sim_blocking_calls(), before);
    EXPECT(sim_pending() > 0);
    EXPECT_EQ(cudaEventQuery(e), cudaErrorNotReady);
    cudaStream_t n = stream();
    OK(cudaEventSynchronize(record(n)));
    EXPECT_EQ(cudaEventQuery(e), cudaErrorNotReady);
    OK(cudaEventSynchronize(e));
    check_on(n, p, PAGE, 3);
    OK(cudaDeviceSynchronize());
    EXPECT_EQ(sim_findings(SIM_ANY), 0);
}

TEST(handles_come_back_last_in_first_out_with_new_ids)
{
    start();
    cudaStream_t a = stream(), b = stream();
    unsigned long long id_a = id_of(a), id_b = id_of(b);
    EXPECT(id_a != id_b);
    OK(cudaStreamDestroy(a));
    OK(cudaStreamDestroy(b));
    cudaStream_t first = stream(), second = stream();
    EXPECT(first == b && second == a);
    EXPECT(id_of(first) != id_a && id_of(first) != id_b);
    EXPECT(id_of(second) != id_a && id_of(second) != id_b && id_of(second) != id_of(first));
}

typedef cudaError_t (*stream_call)(cudaStream_t);

static cudaError_t call_get_id(cudaStream_t s)
{
    unsigned long long id;
    return cudaStreamGetId(s, &id);
}
static cudaError_t call_get_id_driver(cudaStream_t s)
{
    unsigned long long id;
    return (cudaError_t)cuStreamGetId(s, &id);
}
static cudaError_t call_is_capturing(cudaStream_t s)
{
    enum cudaStreamCaptureStatus status;
    return cudaStreamIsCapturing(s, &status);
}
static cudaError_t call_is_capturing_driver(cudaStream_t s)
{
    CUstreamCaptureStatus status;
    return (cudaError_t)cuStreamIsCapturing(s, &status);
}
static cudaError_t call_get_flags(cudaStream_t s)
{
    unsigned flags;
    return cudaStreamGetFlags(s, &flags);
}
static cudaError_t call_get_flags_driver(cudaStream_t s)
{
    unsigned flags;
    return (cudaError_t)cuStreamGetFlags(s, &flags);
}
static cudaError_t call_get_context(cudaStream_t s)
{
    CUcontext context;
    return (cudaError_t)cuStreamGetCtx(s, &context);
}
static cudaError_t call_query(cudaStream_t s) { return cudaStreamQuery(s); }
static cudaError_t call_synchronize(cudaStream_t s) { return cudaStreamSynchronize(s); }
static cudaError_t call_record(cudaStream_t s) { return cudaEventRecord(event(), s); }
static cudaError_t call_record_driver(cudaStream_t s) { return (cudaError_t)cuEventRecord(event(), s); }
static cudaError_t call_wait(cudaStream_t s) { return cudaStreamWaitEvent(s, event(), 0); }
static cudaError_t call_launch(cudaStream_t s) { return sim_launch(s, NULL, 0); }
static cudaError_t call_destroy(cudaStream_t s) { return cudaStreamDestroy(s); }

static const stream_call stream_calls[] = {
    call_get_id, call_get_id_driver, call_get_flags, call_get_flags_driver, call_is_capturing, call_is_capturing_driver,
    call_query,  call_synchronize,   call_record,    call_record_driver,    call_get_context,  call_wait,
    call_launch, call_destroy};
enum { STREAM_CALLS = sizeof stream_calls / sizeof *stream_calls };

TEST(a_call_on_a_dead_stream_is_found)
{
    for (int i = 0; i < STREAM_CALLS; ++i) {
        start();
        cudaStream_t s = stream();
        OK(stream_calls[i](s));
        if (stream_calls[i] != call_destroy) OK(cudaStreamDestroy(s));
        EXPECT_EQ(sim_findings(SIM_ANY), 0);
        EXPECT_EQ(stream_calls[i](s), cudaErrorInvalidResourceHandle);
        EXPECT_EQ(sim_findings(SIM_DEAD_HANDLE), 1);
    }
}

TEST(a_call_on_a_dead_event_is_found)
{
    start();
    cudaStream_t s = stream();
    cudaEvent_t e = record(s);
    OK(cudaEventDestroy(e));
    EXPECT_EQ(cudaEventQuery(e), cudaErrorInvalidResourceHandle);
    EXPECT_EQ(cudaEventRecord(e, s), cudaErrorInvalidResourceHandle);
    EXPECT_EQ(cudaStreamWaitEvent(s, e, 0), cudaErrorInvalidResourceHandle);
    EXPECT_EQ(cudaEventDestroy(e), cudaErrorInvalidResourceHandle);
    EXPECT_EQ(sim_findings(SIM_DEAD_HANDLE), 4);
}

/* What `crash` does to a process with a device that panics: the signal that ended it, or 0. */
static int signal_of(void (*crash)(void))
{
    fflush(stdout);
    pid_t child = fork();
    if (!child) {
        sim_options options = sim_defaults();
        if (!freopen("/dev/null", "w", stderr) || sim_start(&options)) _exit(1);
        crash();
        _exit(0);
    }
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) != child) return -1;
    return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

static void use_a_live_handle(void) { call_query(stream()); }

static void use_a_dead_handle(void)
{
    cudaStream_t s = stream();
    cudaStreamDestroy(s);
    call_get_id(s);
}

static void poll_an_event_after_a_reset(void)
{
    cudaEvent_t e = record(stream());
    cudaDeviceReset();
    cudaFree(NULL);
    cuEventQuery(e);
}

TEST(a_call_on_a_dead_handle_aborts_a_program_that_panics)
{
    EXPECT_EQ(signal_of(use_a_live_handle), 0);
    EXPECT_EQ(signal_of(use_a_dead_handle), SIGABRT);
    EXPECT_EQ(signal_of(poll_an_event_after_a_reset), SIGABRT);
}

#define ALL_ERRORS(N)                                                                                                  \
    N(cudaSuccess) N(cudaErrorInvalidValue) N(cudaErrorMemoryAllocation) N(cudaErrorInitializationError)               \
    N(cudaErrorCudartUnloading) N(cudaErrorInvalidConfiguration) N(cudaErrorInvalidPitchValue)                         \
    N(cudaErrorInvalidSymbol) N(cudaErrorInvalidHostPointer) N(cudaErrorInvalidDevicePointer)                          \
    N(cudaErrorInvalidMemcpyDirection) N(cudaErrorStubLibrary) N(cudaErrorInsufficientDriver)                          \
    N(cudaErrorCallRequiresNewerDriver) N(cudaErrorDevicesUnavailable) N(cudaErrorIncompatibleDriverContext)           \
    N(cudaErrorInvalidDeviceFunction) N(cudaErrorNoDevice) N(cudaErrorInvalidDevice) N(cudaErrorStartupFailure)        \
    N(cudaErrorInvalidKernelImage) N(cudaErrorDeviceUninitialized) N(cudaErrorMapBufferObjectFailed)                   \
    N(cudaErrorUnmapBufferObjectFailed) N(cudaErrorArrayIsMapped) N(cudaErrorAlreadyMapped)                            \
    N(cudaErrorAlreadyAcquired) N(cudaErrorNotMapped) N(cudaErrorECCUncorrectable) N(cudaErrorUnsupportedLimit)        \
    N(cudaErrorDeviceAlreadyInUse) N(cudaErrorPeerAccessUnsupported) N(cudaErrorNvlinkUncorrectable)                   \
    N(cudaErrorOperatingSystem) N(cudaErrorInvalidResourceHandle)                                                      \
    N(cudaErrorIllegalState) N(cudaErrorSymbolNotFound) N(cudaErrorNotReady) N(cudaErrorIllegalAddress)                \
    N(cudaErrorLaunchOutOfResources) N(cudaErrorLaunchTimeout) N(cudaErrorPeerAccessAlreadyEnabled)                    \
    N(cudaErrorPeerAccessNotEnabled) N(cudaErrorSetOnActiveProcess) N(cudaErrorContextIsDestroyed)                     \
    N(cudaErrorAssert) N(cudaErrorTooManyPeers) N(cudaErrorHostMemoryAlreadyRegistered)                                \
    N(cudaErrorHostMemoryNotRegistered) N(cudaErrorHardwareStackError) N(cudaErrorIllegalInstruction)                  \
    N(cudaErrorMisalignedAddress) N(cudaErrorInvalidAddressSpace) N(cudaErrorInvalidPc)                                \
    N(cudaErrorLaunchFailure) N(cudaErrorNotPermitted) N(cudaErrorNotSupported)                                        \
    N(cudaErrorSystemNotReady) N(cudaErrorSystemDriverMismatch) N(cudaErrorCompatNotSupportedOnDevice)                 \
    N(cudaErrorMpsConnectionFailed) N(cudaErrorMpsRpcFailure) N(cudaErrorMpsServerNotReady)                            \
    N(cudaErrorMpsMaxClientsReached) N(cudaErrorMpsMaxConnectionsReached) N(cudaErrorMpsClientTerminated)              \
    N(cudaErrorStreamCaptureUnsupported) N(cudaErrorStreamCaptureInvalidated) N(cudaErrorStreamCaptureMerge)           \
    N(cudaErrorStreamCaptureUnmatched) N(cudaErrorStreamCaptureUnjoined) N(cudaErrorStreamCaptureIsolation)            \
    N(cudaErrorStreamCaptureImplicit) N(cudaErrorCapturedEvent) N(cudaErrorStreamCaptureWrongThread)                   \
    N(cudaErrorTimeout) N(cudaErrorGraphExecUpdateFailure) N(cudaErrorExternalDevice) N(cudaErrorUnknown)

TEST(each_error_has_a_name)
{
    static const struct {
        cudaError_t error;
        const char *name;
    } errors[] = {
#define N(name) {name, #name},
        ALL_ERRORS(N)
#undef N
    };
    start();
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) {
        const char *name = NULL, *text = NULL;
        EXPECT(!strcmp(cudaGetErrorName(errors[i].error), errors[i].name));
        EXPECT(strcmp(cudaGetErrorString(errors[i].error), "unrecognized error code"));
        EXPECT_EQ(cuGetErrorName((CUresult)errors[i].error, &name), 0);
        EXPECT_EQ(cuGetErrorString((CUresult)errors[i].error, &text), 0);
        EXPECT(name && text && !strcmp(text, cudaGetErrorString(errors[i].error)));
    }
    EXPECT(!strcmp(cudaGetErrorName((cudaError_t)9999), "unrecognized error code"));
}

static int inside_a_call; /* 1: a thread is inside; 2: it is about to leave */

static void stay(void *unused)
{
    (void)unused;
    __atomic_store_n(&inside_a_call, 1, __ATOMIC_RELEASE);
    usleep(100000);
    __atomic_store_n(&inside_a_call, 2, __ATOMIC_RELEASE);
}

static void *wait_for_stay(void *unused)
{
    cudaStream_t s = stream();
    OK(cudaLaunchHostFunc(s, stay, NULL));
    OK(cudaStreamSynchronize(s));
    return unused;
}

TEST(a_child_of_fork_may_call_whatever_other_threads_did)
{
    pthread_t thread;
    int status = -1;
    start();
    __atomic_store_n(&inside_a_call, 0, __ATOMIC_RELEASE);
    EXPECT_EQ(pthread_create(&thread, NULL, wait_for_stay, NULL), 0);
    while (!__atomic_load_n(&inside_a_call, __ATOMIC_ACQUIRE)) usleep(100);
    pid_t child = fork();
    if (child == 0) {
        alarm(10);
        int waited = __atomic_load_n(&inside_a_call, __ATOMIC_ACQUIRE) == 2;
        _exit(waited && cudaGetLastError() == cudaSuccess && !strcmp(cudaGetErrorName(cudaErrorUnknown),
                                                                     "cudaErrorUnknown") ? 0 : 1);
    }
    EXPECT(child > 0 && waitpid(child, &status, 0) == child);
    EXPECT_EQ(status, 0);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
    OK(cudaGetLastError()); /* the parent goes on */
}

/* The parent's device is of no use to a child: it neither runs work that was queued nor changes memory. */
TEST(a_child_of_fork_leaves_the_device_of_its_parent_alone)
{
    enum { BYTES = 4096 };
    int go[2], status = -1;
    char byte = 0, *p = NULL;
    sim_options options = sim_defaults();
    options.mode = SIM_BACKED;
    options.pace = SIM_PACE_STILL;
    EXPECT_EQ(sim_start(&options), 0);
    cudaStream_t s = stream();
    OK(cudaMalloc((void **)&p, BYTES));
    OK(cudaMemsetAsync(p, 1, BYTES, s));
    EXPECT_EQ(pipe(go), 0);
    pid_t child = fork();
    if (child == 0) {
        int failed = read(go[0], &byte, 1) != 1;
        failed |= cudaStreamSynchronize(s) != cudaErrorInitializationError;
        failed |= cudaFree(p) != cudaErrorInitializationError;
        failed |= cudaGetLastError() != cudaErrorInitializationError;
        sim_stop();
        _exit(failed || sim_start(&options) || cudaMalloc((void **)&p, BYTES)); /* a device of its own */
    }
    OK(cudaMemsetAsync(p, 2, BYTES, s));
    OK(cudaStreamSynchronize(s));
    EXPECT_EQ(write(go[1], "", 1), 1);
    EXPECT(child > 0 && waitpid(child, &status, 0) == child);
    EXPECT_EQ(status, 0);
    OK(cudaMemcpy(&byte, p, 1, cudaMemcpyDeviceToHost));
    EXPECT_EQ(byte, 2);
    EXPECT_EQ(sim_findings(SIM_ANY), 0);
    OK(cudaFree(p));
    close(go[0]);
    close(go[1]);
}

TEST(streams_say_what_they_are)
{
    start();
    unsigned flags = 9;
    OK(cudaStreamGetFlags(stream(), &flags));
    EXPECT_EQ(flags, cudaStreamNonBlocking);
    OK(cudaStreamGetFlags(blocking_stream(), &flags));
    EXPECT_EQ(flags, cudaStreamDefault);
    CUcontext current = NULL, of_stream = NULL;
    OK(cuCtxGetCurrent(&current));
    OK(cuStreamGetCtx(stream(), &of_stream));
    EXPECT(current && of_stream == current);
    cudaStream_t urgent = NULL;
    OK(cudaStreamCreateWithPriority(&urgent, cudaStreamNonBlocking, -1));
    OK(cudaStreamGetFlags(urgent, &flags));
    EXPECT_EQ(flags, cudaStreamNonBlocking);
    EXPECT_EQ(id_of(NULL), id_of(cudaStreamLegacy));
    EXPECT(id_of(cudaStreamLegacy) != id_of(cudaStreamPerThread));
}

static void *id_of_per_thread(void *id)
{
    OK(cudaFree(NULL));
    *(unsigned long long *)id = id_of(cudaStreamPerThread);
    return NULL;
}

TEST(per_thread_streams_have_ids_of_their_own)
{
    start();
    unsigned long long here = 0, there = 0;
    id_of_per_thread(&here);
    elsewhere(id_of_per_thread, &there);
    EXPECT(here != there);
    EXPECT_EQ(id_of(cudaStreamPerThread), here);
}

/* ==== CAPTURE ==================================================================================================== */

static struct {
    cudaStream_t captured, other;
    cudaEvent_t done; /* recorded on `other`, and complete */
    char *hole;       /* an address where a page can be mapped */
} scene;

static void set_scene(cudaStream_t captured)
{
    scene.captured = captured;
    scene.other = stream();
    scene.done = record(scene.other);
    scene.hole = addresses(PAGE);
    OK(cudaStreamSynchronize(scene.other));
}

static cudaError_t query_event(void) { return cudaEventQuery(scene.done); }
static cudaError_t query_event_driver(void) { return (cudaError_t)cuEventQuery(scene.done); }
static cudaError_t synchronize_event(void) { return cudaEventSynchronize(scene.done); }
static cudaError_t synchronize_event_driver(void) { return (cudaError_t)cuEventSynchronize(scene.done); }
static cudaError_t query_stream(void) { return cudaStreamQuery(scene.other); }
static cudaError_t synchronize_stream(void) { return cudaStreamSynchronize(scene.other); }
static cudaError_t synchronize_stream_driver(void) { return (cudaError_t)cuStreamSynchronize(scene.other); }
static cudaError_t malloc_and_free(void)
{
    void *p = NULL;
    cudaError_t error = cudaMalloc(&p, 4096);
    return error ? error : cudaFree(p);
}
static cudaError_t malloc_and_free_driver(void)
{
    CUdeviceptr p = 0;
    CUresult error = cuMemAlloc(&p, 4096);
    return (cudaError_t)(error ? error : cuMemFree(p));
}
static cudaError_t pin_and_free(void)
{
    void *p = NULL;
    cudaError_t error = cudaHostAlloc(&p, 4096, cudaHostAllocDefault);
    return error ? error : cudaFreeHost(p);
}
static cudaError_t pin_and_free_driver(void)
{
    void *p = NULL;
    CUresult error = cuMemHostAlloc(&p, 4096, CU_MEMHOSTALLOC_PORTABLE);
    return (cudaError_t)(error ? error : cuMemFreeHost(p));
}
static cudaError_t reserve_and_free(void)
{
    CUdeviceptr p = 0;
    CUresult error = cuMemAddressReserve(&p, 64 * PAGE, 0, 0, 0);
    return (cudaError_t)(error ? error : cuMemAddressFree(p, 64 * PAGE));
}
static cudaError_t move_a_page(void)
{
    CUmemAllocationProp prop = on_device(0);
    CUmemGenericAllocationHandle handle = 0;
    CUresult error = cuMemCreate(&handle, PAGE, &prop, 0);
    if (!error) error = cuMemMap(address_of(scene.hole), PAGE, 0, handle, 0);
    if (!error) error = set_access(scene.hole, PAGE, 0);
    if (!error) error = cuMemUnmap(address_of(scene.hole), PAGE);
    return (cudaError_t)(error ? error : cuMemRelease(handle));
}
static cudaError_t create_and_destroy_event(void)
{
    cudaEvent_t e = NULL;
    cudaError_t error = cudaEventCreateWithFlags(&e, cudaEventDisableTiming);
    return error ? error : cudaEventDestroy(e);
}
static cudaError_t record_elsewhere(void) { return cudaEventRecord(scene.done, scene.other); }
static cudaError_t wait_elsewhere(void) { return cudaStreamWaitEvent(scene.other, scene.done, 0); }
static cudaError_t ask_for_memory(void)
{
    size_t unused, total;
    return cudaMemGetInfo(&unused, &total);
}
static cudaError_t push_and_pop_context(void)
{
    CUcontext current = NULL;
    CUresult error = cuCtxGetCurrent(&current);
    if (!error) error = cuCtxPushCurrent(current);
    return (cudaError_t)(error ? error : cuCtxPopCurrent(&current));
}
static cudaError_t ask_context_for_id(void)
{
    CUcontext current = NULL;
    unsigned long long id;
    CUresult error = cuCtxGetCurrent(&current);
    return (cudaError_t)(error ? error : cuCtxGetId(current, &id));
}
static cudaError_t ask_for_capture(void) { return call_is_capturing(scene.captured); }
static cudaError_t ask_for_capture_driver(void) { return call_is_capturing_driver(scene.captured); }
static cudaError_t ask_for_context(void) { return call_get_context(scene.captured); }

typedef cudaError_t (*plain_call)(void);

static const struct {
    plain_call call;
    int unsafe; /* breaks a capture unless the thread is relaxed */
} capture_table[] = {{query_event, 1},
                     {query_event_driver, 1},
                     {synchronize_event, 1},
                     {synchronize_event_driver, 1},
                     {query_stream, 1},
                     {synchronize_stream, 1},
                     {synchronize_stream_driver, 1},
                     {malloc_and_free, 1},
                     {malloc_and_free_driver, 1},
                     {pin_and_free, 1},
                     {pin_and_free_driver, 1},
                     {reserve_and_free, 0},
                     {move_a_page, 0},
                     {create_and_destroy_event, 0},
                     {record_elsewhere, 0},
                     {wait_elsewhere, 0},
                     {ask_for_memory, 0},
                     {push_and_pop_context, 0},
                     {ask_context_for_id, 0},
                     {ask_for_capture, 0},
                     {ask_for_capture_driver, 0},
                     {ask_for_context, 0}};
enum { CAPTURE_ROWS = sizeof capture_table / sizeof *capture_table };

typedef struct attempt {
    plain_call call;
    enum cudaStreamCaptureMode mode; /* of the calling thread */
    cudaError_t result;
} attempt;

static void *make_attempt(void *arg)
{
    attempt *a = (attempt *)arg;
    enum cudaStreamCaptureMode mode = a->mode;
    OK(cudaSetDevice(0));
    OK(cudaThreadExchangeStreamCaptureMode(&mode));
    EXPECT_EQ(mode, cudaStreamCaptureModeGlobal);
    a->result = a->call();
    OK(cudaThreadExchangeStreamCaptureMode(&mode));
    EXPECT_EQ(mode, a->mode);
    return NULL;
}

static cudaError_t try_call(plain_call call, int other_thread, enum cudaStreamCaptureMode mode)
{
    attempt a = {call, mode, cudaSuccess};
    if (other_thread) elsewhere(make_attempt, &a);
    else make_attempt(&a);
    return a.result;
}

/* How a stream is captured, and how a call comes in between. */
typedef struct way {
    int count, blocking, mode, thread, other; /* `thread`: the mode of the one that calls */
} way;

/* Goes through all of them. */
static int next_way(way *w)
{
    int i = w->count++;
    w->blocking = i % 2;
    w->mode = i / 2 % 3;
    w->thread = i / 6 % 3;
    w->other = i / 18;
    return i < 36;
}

/* Ends the scene's capture: 1 when it was whole, 0 when somebody had broken it. */
static int capture_ends_whole(void)
{
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    cudaGraph_t graph = NULL;
    OK(cudaStreamIsCapturing(scene.captured, &status));
    cudaError_t error = cudaStreamEndCapture(scene.captured, &graph);
    EXPECT_EQ(error, graph ? cudaSuccess : cudaErrorStreamCaptureInvalidated);
    EXPECT_EQ(status, graph ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusInvalidated);
    EXPECT_EQ(sim_findings(SIM_CAPTURE_BROKEN), graph ? 0 : 1);
    EXPECT_EQ(sim_findings(SIM_ANY), sim_findings(SIM_CAPTURE_BROKEN));
    if (graph) OK(cudaGraphDestroy(graph));
    return graph != NULL;
}

static void check_call(const way *w, plain_call call, cudaError_t result, int whole)
{
    start();
    set_scene(w->blocking ? blocking_stream() : stream());
    OK(cudaStreamBeginCapture(scene.captured, (enum cudaStreamCaptureMode)w->mode));
    OK(sim_launch(scene.captured, NULL, 0));
    int right = try_call(call, w->other, (enum cudaStreamCaptureMode)w->thread) == result;
    right &= capture_ends_whole() == whole;
    if (!EXPECT(right)) printf("blocking %d mode %d thread %d other %d\n", w->blocking, w->mode, w->thread, w->other);
}

TEST(a_capture_is_broken_by_just_the_calls_that_break_it)
{
    for (way w = {0}; next_way(&w);)
        for (int row = 0; row < CAPTURE_ROWS; ++row) {
            int forbidden = capture_table[row].unsafe && w.thread != cudaStreamCaptureModeRelaxed;
            if (w.mode == cudaStreamCaptureModeRelaxed) forbidden = 0;
            if (w.other && (w.mode || w.thread)) forbidden = 0; /* only both in global mode meet across threads */
            check_call(&w, capture_table[row].call, forbidden ? cudaErrorStreamCaptureUnsupported : cudaSuccess,
                       !forbidden);
        }
}

static cudaError_t synchronize_device(void) { return cudaDeviceSynchronize(); }
static cudaError_t synchronize_context(void) { return (cudaError_t)cuCtxSynchronize(); }
static cudaError_t query_captured_stream(void) { return cudaStreamQuery(scene.captured); }
static cudaError_t synchronize_captured_stream(void) { return cudaStreamSynchronize(scene.captured); }
static cudaError_t ask_for_id(void) { return call_get_id(scene.captured); }
static cudaError_t ask_for_id_driver(void) { return call_get_id_driver(scene.captured); }
static cudaError_t ask_for_flags(void) { return call_get_flags(scene.captured); }
static cudaError_t ask_for_flags_driver(void) { return call_get_flags_driver(scene.captured); }

TEST(some_calls_break_a_capture_in_every_mode)
{
    static const plain_call calls[] = {
        synchronize_device, synchronize_context, query_captured_stream, synchronize_captured_stream,
        ask_for_id,         ask_for_id_driver,   ask_for_flags,         ask_for_flags_driver};
    for (way w = {0}; next_way(&w);)
        for (size_t i = 0; i < sizeof calls / sizeof *calls; ++i)
            check_call(&w, calls[i], cudaErrorStreamCaptureUnsupported, 0);
}

TEST(a_stream_drawn_into_a_capture_answers_for_it)
{
    for (int driver = 0; driver < 2; ++driver)
        for (int flags = 0; flags < 2; ++flags) {
            start();
            set_scene(stream());
            OK(cudaStreamBeginCapture(scene.captured, cudaStreamCaptureModeRelaxed));
            order(scene.captured, scene.other);
            cudaError_t error = flags ? (driver ? call_get_flags_driver : call_get_flags)(scene.other)
                                      : (driver ? call_get_id_driver : call_get_id)(scene.other);
            EXPECT_EQ(error, cudaErrorStreamCaptureUnsupported);
            EXPECT(!capture_ends_whole());
            OK(call_get_id(scene.other));
        }
}

TEST(a_context_without_captures_can_be_waited_for)
{
    start();
    CUcontext other = NULL;
    set_scene(stream());
    OK(cudaStreamBeginCapture(scene.captured, cudaStreamCaptureModeRelaxed));
    OK(cuCtxCreate(&other, NULL, 0, 0));
    OK(synchronize_context());
    OK(cuCtxPopCurrent(&other));
    EXPECT(capture_ends_whole());
    OK(synchronize_context());
    OK(synchronize_device());
    EXPECT_EQ(sim_findings(SIM_ANY), 0);
}

TEST(waiting_for_the_context_breaks_all_its_captures)
{
    start();
    set_scene(stream());
    cudaStream_t second = blocking_stream();
    cudaGraph_t graph = NULL;
    OK(cudaStreamBeginCapture(scene.captured, cudaStreamCaptureModeRelaxed));
    OK(cudaStreamBeginCapture(second, cudaStreamCaptureModeGlobal));
    EXPECT_EQ(synchronize_context(), cudaErrorStreamCaptureUnsupported);
    EXPECT_EQ(sim_findings(SIM_CAPTURE_BROKEN), 2);
    EXPECT_EQ(cudaStreamEndCapture(scene.captured, &graph), cudaErrorStreamCaptureInvalidated);
    EXPECT_EQ(cudaStreamEndCapture(second, &graph), cudaErrorStreamCaptureInvalidated);
}

/* Memory that is freed below while work runs; p[0] cudaMalloc's, p[1] pinned. */
static cudaError_t free_block(void *const *p) { return cudaFree(p[0]); }
static cudaError_t free_block_driver(void *const *p) { return (cudaError_t)cuMemFree((uintptr_t)p[0]); }
static cudaError_t free_pinned(void *const *p) { return cudaFreeHost(p[1]); }
static cudaError_t free_pinned_driver(void *const *p) { return (cudaError_t)cuMemFreeHost(p[1]); }

TEST(freeing_memory_waits_for_the_device_also_during_a_capture)
{
    static cudaError_t (*const calls[])(void *const *) = {free_block, free_block_driver, free_pinned,
                                                          free_pinned_driver};
    static const size_t sizes[] = {512, PAGE, 64 << 20};
    for (int i = 0; i < 12; ++i)
        for (int captured = 0; captured < 2; ++captured) {
            enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
            void *p[2] = {NULL, NULL};
            start_still();
            char *busy = memory(1);
            set_scene(blocking_stream());
            OK(cudaMalloc(&p[0], sizes[i / 4]));
            OK((cudaError_t)cuMemHostAlloc(&p[1], sizes[i / 4], CU_MEMHOSTALLOC_DEVICEMAP));
            write_on(scene.other, busy, PAGE);
            if (captured) OK(cudaStreamBeginCapture(scene.captured, cudaStreamCaptureModeGlobal));
            OK(cudaThreadExchangeStreamCaptureMode(&mode));
            long before = sim_blocking_calls();
            OK(calls[i % 4](p));
            EXPECT_EQ(sim_blocking_calls(), before + 1);
            EXPECT_EQ(sim_stream_done(scene.other), 1);
            OK(cudaThreadExchangeStreamCaptureMode(&mode));
            if (captured) EXPECT(capture_ends_whole());
            write_on(stream(), busy, PAGE); /* the host has seen the first write complete */
            EXPECT_EQ(sim_findings(SIM_ANY), 0);
        }
}

static cudaError_t record_on_legacy(void) { return cudaEventRecord(scene.done, cudaStreamLegacy); }
static cudaError_t wait_on_legacy(void) { return cudaStreamWaitEvent(cudaStreamLegacy, scene.done, 0); }
static cudaError_t query_legacy(void) { return cudaStreamQuery(cudaStreamLegacy); }
static cudaError_t launch_on_legacy(void) { return sim_launch(cudaStreamLegacy, NULL, 0); }
static cudaError_t synchronize_legacy(void) { return cudaStreamSynchronize(cudaStreamLegacy); }
static cudaError_t ask_legacy_for_capture(void) { return call_is_capturing(cudaStreamLegacy); }
static cudaError_t ask_legacy_for_capture_driver(void) { return call_is_capturing_driver(cudaStreamLegacy); }
static cudaError_t ask_legacy_for_context(void) { return call_get_context(cudaStreamLegacy); }
static cudaError_t ask_legacy_for_id(void) { return call_get_id(cudaStreamLegacy); }
static cudaError_t ask_legacy_for_id_driver(void) { return call_get_id_driver(cudaStreamLegacy); }
static cudaError_t ask_legacy_for_flags(void) { return call_get_flags(cudaStreamLegacy); }
static cudaError_t ask_legacy_for_flags_driver(void) { return call_get_flags_driver(cudaStreamLegacy); }
static cudaError_t ask_stream_zero_for_id(void) { return call_get_id(NULL); }
static cudaError_t record_on_context(void)
{
    CUcontext current = NULL;
    OK(cuCtxGetCurrent(&current));
    return (cudaError_t)cuCtxRecordEvent(current, scene.done);
}

static const struct {
    plain_call call;
    cudaError_t error;
    int harmless;
    int look; /* at the stream's work: that may break the capture of a non-blocking stream too */
} legacy_table[] = {{record_on_legacy, cudaErrorStreamCaptureImplicit, 0, 0},
                    {wait_on_legacy, cudaErrorStreamCaptureImplicit, 0, 0},
                    {query_legacy, cudaErrorStreamCaptureImplicit, 0, 1},
                    {synchronize_legacy, cudaErrorStreamCaptureImplicit, 0, 1},
                    {launch_on_legacy, cudaErrorStreamCaptureImplicit, 0, 0},
                    {ask_legacy_for_capture, cudaErrorStreamCaptureImplicit, 1, 0},
                    {ask_legacy_for_capture_driver, cudaErrorStreamCaptureImplicit, 1, 0},
                    {ask_legacy_for_context, cudaErrorStreamCaptureImplicit, 0, 0},
                    {ask_legacy_for_id, cudaErrorStreamCaptureImplicit, 0, 0},
                    {ask_legacy_for_id_driver, cudaErrorStreamCaptureImplicit, 0, 0},
                    {ask_legacy_for_flags, cudaErrorStreamCaptureImplicit, 0, 0},
                    {ask_legacy_for_flags_driver, cudaErrorStreamCaptureImplicit, 0, 0},
                    {ask_stream_zero_for_id, cudaErrorStreamCaptureImplicit, 0, 0},
                    {record_on_context, cudaErrorStreamCaptureUnsupported, 0, 1}};
enum { LEGACY_ROWS = sizeof legacy_table / sizeof *legacy_table };

TEST(a_blocking_stream_that_captures_puts_legacy_out_of_bounds)
{
    for (way w = {0}; next_way(&w);)
        for (int row = 0; w.blocking && row < LEGACY_ROWS; ++row) {
            check_call(&w, legacy_table[row].call, legacy_table[row].error, legacy_table[row].harmless);
            OK(legacy_table[row].call());
        }
}

TEST(a_nonblocking_stream_that_captures_leaves_legacy_alone)
{
    for (way w = {0}; next_way(&w);)
        for (int row = 0; !w.blocking && row < LEGACY_ROWS; ++row)
            if (!legacy_table[row].look) check_call(&w, legacy_table[row].call, cudaSuccess, 1);
}

static cudaError_t only_record_captured_event(void) { return cudaEventRecord(scene.done, scene.captured); }

TEST(one_call_can_break_several_captures)
{
    start();
    set_scene(stream());
    cudaStream_t second = stream();
    cudaGraph_t graph = NULL;
    OK(cudaStreamBeginCapture(scene.captured, cudaStreamCaptureModeGlobal));
    OK(cudaStreamBeginCapture(second, cudaStreamCaptureModeGlobal));
    EXPECT_EQ(query_event(), cudaErrorStreamCaptureUnsupported);
    EXPECT_EQ(sim_findings(SIM_CAPTURE_BROKEN), 2);
    EXPECT_EQ(cudaStreamEndCapture(scene.captured, &graph), cudaErrorStreamCaptureInvalidated);
    EXPECT_EQ(cudaStreamEndCapture(second, &graph), cudaErrorStreamCaptureInvalidated);
    EXPECT(!graph);
}

TEST(two_captures_cannot_be_merged)
{
    start();
    set_scene(stream());
    cudaGraph_t graph = NULL;
    OK(cudaStreamBeginCapture(scene.captured, cudaStreamCaptureModeRelaxed));
    OK(cudaStreamBeginCapture(scene.other, cudaStreamCaptureModeRelaxed));
    OK(only_record_captured_event());
    EXPECT_EQ(cudaStreamWaitEvent(scene.other, scene.done, 0), cudaErrorStreamCaptureMerge);
    EXPECT_EQ(cudaStreamEndCapture(scene.captured, &graph), cudaErrorStreamCaptureInvalidated);
    EXPECT_EQ(cudaStreamEndCapture(scene.other, &graph), cudaErrorStreamCaptureInvalidated);
}

TEST(an_event_from_outside_is_no_business_of_a_capture)
{
    for (int external = 0; external < 2; ++external) {
        start();
        set_scene(stream());
        OK(cudaStreamBeginCapture(scene.captured, cudaStreamCaptureModeRelaxed));
        cudaError_t error = cudaStreamWaitEvent(scene.captured, scene.done, external ? cudaEventWaitExternal : 0);
        EXPECT_EQ(error, external ? cudaSuccess : cudaErrorStreamCaptureIsolation);
        EXPECT_EQ(capture_ends_whole(), external);
    }
}

static cudaError_t query_captured_event(void)
{
    OK(cudaEventRecord(scene.done, scene.captured));
    return cudaEventQuery(scene.done);
}
static cudaError_t synchronize_captured_event(void)
{
    OK(cudaEventRecord(scene.done, scene.captured));
    return cudaEventSynchronize(scene.done);
}

TEST(an_event_of_a_capture_may_be_recorded_and_not_looked_at)
{
    static const plain_call calls[] = {query_captured_event, synchronize_captured_event, only_record_captured_event};
    for (int i = 0; i < 3; ++i) {
        start();
        set_scene(stream());
        OK(cudaStreamBeginCapture(scene.captured, cudaStreamCaptureModeGlobal));
        cudaError_t error = try_call(calls[i], 0, cudaStreamCaptureModeRelaxed);
        EXPECT_EQ(error, i == 2 ? cudaSuccess : cudaErrorCapturedEvent);
        EXPECT_EQ(capture_ends_whole(), i == 2);
    }
}

TEST(an_event_of_a_capture_stays_unusable_after_it)
{
    start();
    set_scene(stream());
    OK(cudaStreamBeginCapture(scene.captured, cudaStreamCaptureModeGlobal));
    OK(only_record_captured_event());
    EXPECT(capture_ends_whole());
    EXPECT_EQ(cudaEventQuery(scene.done), cudaErrorCapturedEvent);
    OK(cudaEventRecord(scene.done, scene.other));
    OK(cudaEventSynchronize(scene.done));
}

TEST(waiting_for_a_captured_event_draws_a_stream_into_the_capture)
{
    for (int join = 0; join < 2; ++join) {
        start();
        set_scene(stream());
        enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
        cudaGraph_t graph = NULL;
        OK(cudaStreamBeginCapture(scene.captured, cudaStreamCaptureModeGlobal));
        order(scene.captured, scene.other);
        OK(cudaStreamIsCapturing(scene.other, &status));
        EXPECT_EQ(status, cudaStreamCaptureStatusActive);
        OK(sim_launch(scene.other, NULL, 0));
        if (join) order(scene.other, scene.captured);
        cudaError_t error = cudaStreamEndCapture(scene.captured, &graph);
        EXPECT_EQ(error, join ? cudaSuccess : cudaErrorStreamCaptureUnjoined);
        EXPECT_EQ(graph != NULL, join);
        OK(cudaStreamIsCapturing(scene.other, &status));
        EXPECT_EQ(status, cudaStreamCaptureStatusNone);
    }
}

/* As on a GPU (driver 580): the capture does without a destroyed stream, if its work was joined. The new stream of the
   same handle is not captured. A capture ends with the stream that it began on. */
TEST(a_captured_stream_may_be_destroyed_once_it_is_joined)
{
    enum { JOINED, UNJOINED, ORIGIN };
    for (int what = JOINED; what <= ORIGIN; ++what) {
        start();
        cudaStream_t s = stream(), t = stream(), again;
        enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusActive;
        cudaGraph_t graph = NULL;
        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
        order(s, t);
        OK(sim_launch(t, NULL, 0));
        if (what != UNJOINED) order(t, s);
        OK(cudaStreamDestroy(what == ORIGIN ? s : t));
        OK(cudaStreamCreateWithFlags(&again, cudaStreamNonBlocking));
        EXPECT(again == (what == ORIGIN ? s : t));
        OK(cudaStreamIsCapturing(again, &status));
        EXPECT_EQ(status, cudaStreamCaptureStatusNone);
        OK(cudaStreamIsCapturing(what == ORIGIN ? t : s, &status));
        EXPECT_EQ(status, what == ORIGIN ? cudaStreamCaptureStatusNone : cudaStreamCaptureStatusActive);
        EXPECT_EQ(cudaStreamEndCapture(what == ORIGIN ? t : s, &graph),
                  what == JOINED     ? cudaSuccess
                  : what == UNJOINED ? cudaErrorStreamCaptureUnjoined
                                     : cudaErrorIllegalState);
        EXPECT_EQ(graph != NULL, what == JOINED);
        EXPECT_EQ(sim_findings(SIM_CAPTURE_BROKEN), what == ORIGIN);
        if (graph) OK(cudaGraphDestroy(graph));
    }
}

TEST(legacy_is_not_drawn_into_a_capture)
{
    start();
    set_scene(stream());
    OK(cudaStreamBeginCapture(scene.captured, cudaStreamCaptureModeRelaxed));
    OK(only_record_captured_event());
    EXPECT_EQ(wait_on_legacy(), cudaErrorStreamCaptureImplicit);
    EXPECT(!capture_ends_whole());
}

static cudaError_t end_capture(void)
{
    cudaGraph_t graph = NULL;
    return cudaStreamEndCapture(scene.captured, &graph);
}

TEST(a_capture_is_ended_by_the_thread_that_began_it)
{
    for (int relaxed = 0; relaxed < 2; ++relaxed) {
        start();
        set_scene(stream());
        OK(cudaStreamBeginCapture(scene.captured,
                                  relaxed ? cudaStreamCaptureModeRelaxed : cudaStreamCaptureModeGlobal));
        EXPECT_EQ(try_call(end_capture, 1, cudaStreamCaptureModeGlobal),
                  relaxed ? cudaSuccess : cudaErrorStreamCaptureWrongThread);
    }
}

TEST(a_capture_is_ended_on_the_stream_where_it_began)
{
    start();
    set_scene(stream());
    cudaGraph_t graph = NULL;
    OK(cudaStreamBeginCapture(scene.captured, cudaStreamCaptureModeGlobal));
    order(scene.captured, scene.other);
    EXPECT_EQ(cudaStreamEndCapture(scene.other, &graph), cudaErrorStreamCaptureUnmatched);
    EXPECT(!capture_ends_whole());
}

TEST(legacy_cannot_be_captured)
{
    start();
    EXPECT_EQ(cudaStreamBeginCapture(cudaStreamLegacy, cudaStreamCaptureModeRelaxed),
              cudaErrorStreamCaptureUnsupported);
    cudaGraph_t graph = NULL;
    EXPECT_EQ(cudaStreamEndCapture(stream(), &graph), cudaErrorIllegalState);
}

TEST(each_capture_has_an_id_and_a_graph)
{
    start();
    cudaStream_t s = stream();
    unsigned long long first = 0, second = 0;
    cudaGraph_t within = NULL, ended = NULL;
    enum cudaStreamCaptureStatus status;
    OK(cudaStreamGetCaptureInfo(s, &status, &first, NULL, NULL, NULL, NULL));
    EXPECT_EQ(status, cudaStreamCaptureStatusNone);
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    OK(cudaStreamGetCaptureInfo(s, &status, &first, &within, NULL, NULL, NULL));
    EXPECT_EQ(status, cudaStreamCaptureStatusActive);
    OK(cudaStreamEndCapture(s, &ended));
    EXPECT(within && ended == within);
    OK(cudaGraphDestroy(ended));
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    OK(cudaStreamGetCaptureInfo(s, &status, &second, NULL, NULL, NULL, NULL));
    EXPECT(first && second && first != second);
    OK(cudaStreamEndCapture(s, &ended));
    OK(cudaGraphDestroy(ended));
}

/* What `s` is given while it captures, made ready to be launched. */
static cudaGraphExec_t captured_write(cudaStream_t s, char *p, uint64_t tag)
{
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    write_tag(s, p, PAGE, tag);
    OK(cudaStreamEndCapture(s, &graph));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    OK(cudaGraphDestroy(graph));
    return exec;
}

STORY(captured_work_runs_when_its_graph_is_launched, SIM_STALE)
{
    char *p = memory(1);
    cudaStream_t s = stream();
    cudaGraphExec_t exec = captured_write(s, p, 9);
    if (!broken) OK(cudaGraphLaunch(exec, s));
    check_on(s, p, PAGE, 9);
}

STORY(a_launched_graph_is_ordered_where_it_is_launched, SIM_RACE)
{
    char *p = memory(1);
    cudaStream_t s = stream(), t = stream();
    cudaGraphExec_t exec = captured_write(s, p, 9);
    write_on(t, p, PAGE);
    OK(cudaGraphLaunch(exec, broken ? s : t));
    write_on(t, p, PAGE);
    OK(cudaGraphLaunch(exec, t));
}

STORY(launches_of_one_instance_follow_each_other, SIM_RACE)
{
    char *p = memory(1);
    cudaStream_t s = stream(), t = stream();
    cudaGraphExec_t first = captured_write(s, p, 9), second = captured_write(s, p, 9);
    OK(cudaGraphLaunch(first, s));
    OK(cudaGraphLaunch(broken ? second : first, t));
}

STORY(branches_of_a_graph_are_ordered_by_its_edges_alone, SIM_RACE)
{
    char *p = memory(1);
    cudaStream_t s = stream(), t = stream();
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    write_on(s, p, PAGE);
    order(s, t);
    if (broken) write_on(s, p, PAGE);
    write_on(t, p, PAGE);
    order(t, s);
    write_on(s, p, PAGE);
    OK(cudaStreamEndCapture(s, &graph));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    OK(cudaGraphLaunch(exec, s));
}

STORY(a_graph_keeps_using_its_addresses, SIM_HOLE)
{
    char *p = memory(1);
    cudaStream_t s = stream();
    cudaGraphExec_t exec = captured_write(s, p, 9);
    OK(cudaGraphLaunch(exec, s));
    OK(cudaStreamSynchronize(s));
    if (broken) unmap(p, PAGE);
    OK(cudaGraphLaunch(exec, s));
}

STORY(an_external_wait_is_waited_for_at_each_launch, SIM_RACE)
{
    char *p = memory(1);
    cudaStream_t s = stream(), t = stream();
    cudaEvent_t e = event();
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    OK(cudaStreamWaitEvent(s, e, cudaEventWaitExternal));
    write_on(s, p, PAGE);
    OK(cudaStreamEndCapture(s, &graph));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    OK(cudaGraphLaunch(exec, s));
    order(s, t);
    write_on(t, p, PAGE);
    if (!broken) OK(cudaEventRecord(e, t));
    OK(cudaGraphLaunch(exec, s));
}

STORY(an_external_record_is_made_at_each_launch, SIM_RACE)
{
    char *p = memory(1);
    cudaStream_t s = stream(), t = stream();
    cudaEvent_t e = event();
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    if (broken) OK(cudaEventRecordWithFlags(e, s, cudaEventRecordExternal));
    write_on(s, p, PAGE);
    if (!broken) OK(cudaEventRecordWithFlags(e, s, cudaEventRecordExternal));
    OK(cudaStreamEndCapture(s, &graph));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    OK(cudaGraphLaunch(exec, s));
    wait_for(t, e);
    write_on(t, p, PAGE);
}

TEST(a_captured_flag_is_waited_for_at_the_launch)
{
    start();
    void *host = NULL;
    cudaStream_t s = stream();
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    OK(cudaHostAlloc(&host, 4096, cudaHostAllocMapped));
    volatile uint32_t *words = (volatile uint32_t *)host;
    words[0] = words[1] = 0;
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    OK(cuStreamWaitValue32(s, address_of(host), 1, CU_STREAM_WAIT_VALUE_EQ));
    OK(cuStreamWriteValue32(s, address_of(host) + 4, 7, 0));
    OK(cudaStreamEndCapture(s, &graph));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    OK(cudaGraphLaunch(exec, s));
    sim_run(-1);
    EXPECT_EQ(sim_stream_done(s), 0);
    words[0] = 1;
    OK(cudaStreamSynchronize(s));
    EXPECT_EQ(words[1], 7);
}

static void raise_flag(void *flag) { ++*(int *)flag; }

TEST(a_user_object_lives_as_long_as_graph_instance_and_launch)
{
    start_still();
    char *p = memory(1);
    cudaStream_t s = stream();
    cudaUserObject_t object = NULL;
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    enum cudaStreamCaptureStatus status;
    int gone = 0;
    OK(cudaUserObjectCreate(&object, &gone, raise_flag, 1, cudaUserObjectNoDestructorSync));
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    OK(cudaStreamGetCaptureInfo(s, &status, NULL, &graph, NULL, NULL, NULL));
    OK(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove));
    write_on(s, p, PAGE);
    OK(cudaStreamEndCapture(s, &graph));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    OK(cudaGraphDestroy(graph));
    EXPECT_EQ(gone, 0);
    OK(cudaGraphLaunch(exec, s));
    OK(cudaGraphExecDestroy(exec));
    EXPECT_EQ(gone, 0);
    OK(cudaDeviceSynchronize());
    EXPECT_EQ(gone, 1);
}

TEST(a_user_object_lives_as_long_as_a_clone)
{
    start_still();
    char *p = memory(1);
    cudaStream_t s = stream();
    cudaUserObject_t object = NULL;
    cudaGraph_t graph = NULL, clone = NULL;
    cudaGraphExec_t exec = NULL;
    int gone = 0;
    OK(cudaUserObjectCreate(&object, &gone, raise_flag, 1, cudaUserObjectNoDestructorSync));
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    write_tag(s, p, PAGE, 9);
    OK(cudaStreamEndCapture(s, &graph));
    OK(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove));
    OK(cudaGraphClone(&clone, graph));
    OK(cudaGraphDestroy(graph));
    OK(cudaGraphInstantiate(&exec, clone, 0));
    OK(cudaGraphDestroy(clone));
    OK(cudaGraphLaunch(exec, s));
    OK(cudaGraphExecDestroy(exec));
    EXPECT_EQ(gone, 0);
    check_on(s, p, PAGE, 9);
    OK(cudaDeviceSynchronize());
    EXPECT_EQ(gone, 1);
    EXPECT_EQ(sim_findings(SIM_ANY), 0);
}

TEST(a_user_object_goes_when_its_capture_is_broken)
{
    start();
    set_scene(stream());
    cudaUserObject_t object = NULL;
    cudaGraph_t graph = NULL;
    enum cudaStreamCaptureStatus status;
    int gone = 0;
    OK(cudaUserObjectCreate(&object, &gone, raise_flag, 1, cudaUserObjectNoDestructorSync));
    OK(cudaStreamBeginCapture(scene.captured, cudaStreamCaptureModeGlobal));
    OK(cudaStreamGetCaptureInfo(scene.captured, &status, NULL, &graph, NULL, NULL, NULL));
    OK(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove));
    EXPECT_EQ(query_event(), cudaErrorStreamCaptureUnsupported);
    EXPECT(!capture_ends_whole());
    OK(cudaDeviceSynchronize());
    EXPECT_EQ(gone, 1);
}

TEST(a_user_object_goes_when_its_device_is_reset)
{
    start();
    cudaStream_t s = stream();
    cudaUserObject_t object = NULL;
    cudaGraph_t graph = NULL;
    enum cudaStreamCaptureStatus status;
    int gone = 0;
    OK(cudaUserObjectCreate(&object, &gone, raise_flag, 1, cudaUserObjectNoDestructorSync));
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    OK(cudaStreamGetCaptureInfo(s, &status, NULL, &graph, NULL, NULL, NULL));
    OK(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove));
    OK(cudaDeviceReset());
    EXPECT_EQ(gone, 1);
    OK(query_legacy());
}

TEST(a_user_object_may_not_call_cuda_when_it_goes)
{
    start();
    cudaUserObject_t object = NULL;
    cudaError_t error = cudaSuccess;
    OK(cudaUserObjectCreate(&object, &error, call_from_host_function, 1, cudaUserObjectNoDestructorSync));
    OK(cudaUserObjectRelease(object, 1));
    EXPECT_EQ(error, cudaErrorNotPermitted);
}

TEST(a_user_object_goes_with_its_last_reference)
{
    start();
    cudaUserObject_t object = NULL;
    int gone = 0;
    OK(cudaUserObjectCreate(&object, &gone, raise_flag, 1, cudaUserObjectNoDestructorSync));
    OK(cudaUserObjectRetain(object, 2));
    OK(cudaUserObjectRelease(object, 2));
    EXPECT_EQ(gone, 0);
    OK(cudaUserObjectRelease(object, 1));
    EXPECT_EQ(gone, 1);
}

/* ==== ERRORS ===================================================================================================== */

TEST(a_runtime_call_that_fails_overwrites_the_last_error)
{
    start();
    void *p = &p;
    OK(cudaFree(NULL));
    EXPECT_EQ(cudaMalloc(&p, (size_t)1 << 50), cudaErrorMemoryAllocation);
    EXPECT_EQ(cudaPeekAtLastError(), cudaErrorMemoryAllocation);
    EXPECT_EQ(cudaSetDevice(77), cudaErrorInvalidDevice);
    EXPECT_EQ(cudaPeekAtLastError(), cudaErrorInvalidDevice);
    OK(cudaFree(NULL));
    EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST(a_driver_call_that_fails_leaves_the_last_error_alone)
{
    start();
    CUmemAllocationProp prop = on_device(0);
    CUmemGenericAllocationHandle handle = 0;
    CUdeviceptr p = 0;
    EXPECT_EQ(cudaSetDevice(77), cudaErrorInvalidDevice);
    EXPECT_EQ(cuMemCreate(&handle, (size_t)1 << 50, &prop, 0), CUDA_ERROR_OUT_OF_MEMORY);
    EXPECT_EQ(cudaPeekAtLastError(), cudaErrorInvalidDevice);
    EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
    EXPECT_EQ(cuMemAlloc(&p, (size_t)1 << 50), CUDA_ERROR_OUT_OF_MEMORY);
    EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
}

static void *see_last_error(void *error)
{
    *(cudaError_t *)error = cudaPeekAtLastError();
    return NULL;
}

TEST(the_last_error_belongs_to_the_thread)
{
    start();
    cudaError_t there = cudaErrorUnknown;
    EXPECT_EQ(cudaSetDevice(77), cudaErrorInvalidDevice);
    elsewhere(see_last_error, &there);
    EXPECT_EQ(there, cudaSuccess);
    EXPECT_EQ(cudaPeekAtLastError(), cudaErrorInvalidDevice);
}

TEST(a_sticky_error_stays_until_the_reset)
{
    start();
    cudaStream_t s = stream();
    cudaEvent_t e = event();
    sim_fail("cudaStreamSynchronize", 1, 0, cudaErrorIllegalAddress);
    EXPECT_EQ(cudaStreamSynchronize(s), cudaErrorIllegalAddress);
    EXPECT_EQ(cudaGetLastError(), cudaErrorIllegalAddress);
    void *p = NULL;
    for (int i = 0; i < 2; ++i) EXPECT_EQ(cudaMalloc(&p, 4096), cudaErrorIllegalAddress);
    EXPECT_EQ(cuEventQuery(e), CUDA_ERROR_ILLEGAL_ADDRESS);
    EXPECT_EQ(cudaStreamQuery(s), cudaErrorIllegalAddress);
    OK(cudaDeviceReset());
    OK(cudaMalloc(&p, 4096));
}

TEST(errors_have_names)
{
    start();
    const char *text = NULL;
    EXPECT(!strcmp(cudaGetErrorName(cudaErrorMemoryAllocation), "cudaErrorMemoryAllocation"));
    EXPECT(cudaGetErrorString(cudaErrorMemoryAllocation)[0] != 0);
    OK(cuGetErrorName(CUDA_ERROR_OUT_OF_MEMORY, &text));
    EXPECT(text && !strcmp(text, "CUDA_ERROR_OUT_OF_MEMORY"));
    OK(cuGetErrorString(CUDA_ERROR_OUT_OF_MEMORY, &text));
    EXPECT(text && *text);
}

/* ==== CONTEXTS, DEVICES, PEERS =================================================================================== */

/* A sticky error belongs to one context: calls that name the context, its streams or its events return it, in whatever
   context they are made. */
static void meet_an_error(CUcontext failed, CUcontext healthy)
{
    CUcontext current = NULL;
    unsigned long long id = 0;
    OK(cuCtxSetCurrent(failed));
    cudaStream_t theirs = stream();
    cudaEvent_t after = event();
    void *block = NULL, *host = NULL;
    OK(cudaMalloc(&block, PAGE));
    OK(cudaMallocHost(&host, 4096));
    OK(sim_launch(theirs, NULL, 0));
    OK(cudaEventRecord(after, theirs));
    OK(cuCtxSetCurrent(healthy));
    cudaStream_t own = stream();
    OK(cudaStreamWaitEvent(own, after, 0));
    sim_context_fail(failed, cudaErrorIllegalAddress);
    EXPECT_EQ(cuEventQuery(after), CUDA_ERROR_ILLEGAL_ADDRESS);
    EXPECT_EQ(cuEventSynchronize(after), CUDA_ERROR_ILLEGAL_ADDRESS);
    EXPECT_EQ(cuStreamWaitEvent(own, after, 0), CUDA_ERROR_ILLEGAL_ADDRESS);
    EXPECT_EQ(call_get_id(theirs), cudaErrorIllegalAddress);
    EXPECT_EQ(sim_launch(theirs, NULL, 0), cudaErrorIllegalAddress);
    EXPECT_EQ(cuMemFree((CUdeviceptr)(uintptr_t)block), CUDA_ERROR_ILLEGAL_ADDRESS);
    EXPECT_EQ(cuMemFreeHost(host), CUDA_ERROR_ILLEGAL_ADDRESS);
    OK(cuCtxGetId(failed, &id));
    EXPECT_EQ(cudaPeekAtLastError(), cudaErrorIllegalAddress); /* of the launch */
    (void)cudaGetLastError();
    OK(cudaMalloc(&block, PAGE));
    OK(sim_launch(own, NULL, 0));
    OK(cudaStreamSynchronize(own));
    OK(cudaFree(block));
    OK(cuCtxPushCurrent(failed));
    EXPECT_EQ(cudaMalloc(&block, PAGE), cudaErrorIllegalAddress);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
    (void)cudaGetLastError();
    EXPECT_EQ(cudaGetLastError(), cudaErrorIllegalAddress);
    OK(cuCtxPopCurrent(&current));
    EXPECT(current == failed);
    OK(cudaGetLastError());
    OK(cudaDeviceSynchronize());
}

TEST(a_sticky_error_is_one_contexts)
{
    for (int device = 0; device < 2; device++) {
        start_devices(2);
        CUcontext own = NULL, other = NULL;
        void *block = NULL;
        OK(cuCtxGetCurrent(&own));
        OK(cuCtxCreate(&other, NULL, 0, device));
        meet_an_error(other, own);
        OK(cuCtxDestroy(other)); /* it takes the error along, and all that nobody could free */
        EXPECT_EQ(sim_physical(device), 0);
        EXPECT_EQ(sim_pending(), 0);
        CUcontext next = NULL;
        OK(cuCtxCreate(&next, NULL, 0, device));
        EXPECT(next == other);
        OK(cudaMalloc(&block, PAGE));
        OK(cuCtxDestroy(next));
    }
}

TEST(a_sticky_error_of_one_device_leaves_the_others_alone)
{
    start_devices(2);
    CUcontext first = NULL, second = NULL;
    void *p = NULL;
    OK(cuCtxGetCurrent(&first));
    OK(cudaSetDevice(1));
    OK(cuCtxGetCurrent(&second));
    meet_an_error(first, second);
    OK(cudaSetDevice(0));
    EXPECT_EQ(cudaFree(NULL), cudaErrorIllegalAddress);
    OK(cudaSetDevice(1));
    OK(cudaDeviceReset());
    OK(cudaMalloc(&p, PAGE));
    OK(cudaSetDevice(0));
    EXPECT_EQ(cudaFree(NULL), cudaErrorIllegalAddress); /* the other device's reset is no cure */
    OK(cudaDeviceReset());
    OK(cudaMalloc(&p, PAGE));
    EXPECT_EQ(cudaGetLastError(), cudaErrorIllegalAddress); /* of the calls that failed */
    OK(cudaGetLastError());
}

typedef struct newcomer {
    CUcontext before, after;
    CUresult without; /* what the driver says to a thread that has no context */
} newcomer;

static void *meet_the_driver(void *arg)
{
    newcomer *n = (newcomer *)arg;
    CUdeviceptr p = 0;
    OK(cuCtxGetCurrent(&n->before));
    n->without = cuMemAlloc(&p, 4096);
    OK(cudaFree(NULL));
    OK(cuCtxGetCurrent(&n->after));
    OK(cuMemAlloc(&p, 4096));
    OK(cuMemFree(p));
    return NULL;
}

TEST(a_thread_has_no_context_until_it_calls_the_runtime)
{
    start();
    newcomer here, there;
    elsewhere(meet_the_driver, &there);
    sim_forget_context();
    meet_the_driver(&here);
    EXPECT(!here.before && !there.before);
    EXPECT_EQ(here.without, CUDA_ERROR_INVALID_CONTEXT);
    EXPECT_EQ(there.without, CUDA_ERROR_INVALID_CONTEXT);
    EXPECT(here.after && here.after == there.after);
}

TEST(contexts_are_a_stack_in_each_thread)
{
    start_devices(2);
    CUcontext first = NULL, second = NULL, seen = NULL;
    CUdevice device = -1;
    unsigned long long id = 0, id_second = 0;
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&first, 0));
    OK(cuDevicePrimaryCtxRetain(&second, 1));
    OK(cuCtxSetCurrent(first));
    OK(cuCtxPushCurrent(second));
    OK(cuCtxGetDevice(&device));
    EXPECT_EQ(device, 1);
    OK(cuCtxPopCurrent(&seen));
    EXPECT(seen == second);
    OK(cuCtxGetCurrent(&seen));
    EXPECT(seen == first);
    OK(cuCtxGetId(first, &id));
    OK(cuCtxGetId(second, &id_second));
    EXPECT(id != id_second);
    OK(cuDevicePrimaryCtxRelease(0));
    OK(cuDevicePrimaryCtxRelease(1));
}

TEST(each_device_has_its_memory_and_its_streams)
{
    start_devices(3);
    int count = 0, device = -1;
    CUdevice of_stream = -1;
    void *p = NULL;
    OK(cudaGetDeviceCount(&count));
    EXPECT_EQ(count, 3);
    OK(cudaSetDevice(2));
    OK(cudaGetDevice(&device));
    EXPECT_EQ(device, 2);
    OK(cudaMalloc(&p, PAGE));
    EXPECT_EQ(sim_physical(0), 0);
    EXPECT_EQ(sim_physical(2), PAGE);
    OK(cuStreamGetDevice(stream(), &of_stream));
    EXPECT_EQ(of_stream, 2);
    OK(cuStreamGetDevice(CU_STREAM_LEGACY, &of_stream));
    EXPECT_EQ(of_stream, 2);
    EXPECT_EQ(cudaSetDevice(3), cudaErrorInvalidDevice);
}

TEST(a_context_takes_its_streams_and_blocks_along)
{
    start_devices(2);
    CUcontext own = NULL, other = NULL, seen = NULL;
    CUdeviceptr block = 0;
    CUdevice device = -1;
    unsigned long long id = 0, current = 0;
    OK(cuCtxGetCurrent(&own));
    OK(cuCtxCreate(&other, NULL, 0, 1));
    OK(cuCtxGetDevice(&device));
    EXPECT_EQ(device, 1);
    OK(cuCtxGetId(other, &id));
    OK(cuCtxGetId(NULL, &current));
    EXPECT_EQ(id, current);
    cudaStream_t s = stream();
    OK(cuMemAlloc(&block, PAGE));
    EXPECT_EQ(sim_physical(1), PAGE);
    OK(sim_launch(s, NULL, 0));
    OK(cuCtxDestroy(other));
    OK(cuCtxGetCurrent(&seen));
    EXPECT(seen == own);
    EXPECT_EQ(sim_pending(), 0);
    EXPECT_EQ(sim_physical(1), 0);
    EXPECT_EQ(call_get_id(s), cudaErrorInvalidResourceHandle);
}

/* The work of a green context outlives it. A wait in the primary context covers it, one in a context that has come to
   the same address does not. */
TEST(a_green_context_leaves_its_work)
{
    for (int again = 0; again < 2; again++) {
        start_still();
        CUcontext own = NULL, green = NULL, next = NULL;
        unsigned long long id = 0;
        OK(cudaFree(NULL));
        OK(cuCtxGetCurrent(&own));
        OK(sim_green_create(&green, 0));
        OK(cuCtxSetCurrent(green));
        cudaStream_t s = stream();
        OK(sim_launch(s, NULL, 0));
        OK(cuCtxSetCurrent(own));
        OK(sim_green_destroy(green));
        EXPECT_EQ(cuCtxGetId(green, &id), CUDA_ERROR_CONTEXT_IS_DESTROYED);
        EXPECT_EQ(sim_pending(), 1);
        if (again) {
            OK(sim_green_create(&next, 0));
            EXPECT(next == green);
            OK(cuCtxSetCurrent(next));
            OK(cuCtxSynchronize());
            EXPECT_EQ(sim_pending(), 1);
            OK(cuCtxSetCurrent(own));
            OK(sim_green_destroy(next));
        }
        OK(cudaDeviceSynchronize());
        EXPECT_EQ(sim_pending(), 0);
    }
}

STORY(legacy_streams_of_two_contexts_have_nothing_to_do_with_each_other, SIM_RACE)
{
    CUcontext own = NULL, other = NULL;
    char *p = memory(1);
    OK(cudaFree(NULL));
    OK(cuCtxGetCurrent(&own));
    write_on(cudaStreamLegacy, p, PAGE);
    OK(cuCtxCreate(&other, NULL, 0, 0));
    if (!broken) OK(cuCtxSetCurrent(own));
    write_on(cudaStreamLegacy, p, PAGE);
    OK(cuCtxSetCurrent(other));
    cudaDeviceSynchronize();
    OK(cuCtxSetCurrent(own));
}

TEST(a_reset_leaves_pages_and_mappings_and_nothing_else)
{
    start();
    CUcontext before = NULL, after = NULL;
    unsigned long long id_before = 0, id_after = 0;
    char *p = memory(1);
    void *block = NULL;
    OK(cudaMalloc(&block, PAGE));
    cudaStream_t s = stream();
    write_tag(s, p, PAGE, 4);
    cudaEvent_t e = record(s);
    OK(cuCtxGetCurrent(&before));
    OK(cuCtxGetId(before, &id_before));
    OK(cudaDeviceReset());
    OK(cudaFree(NULL));
    OK(cuCtxGetCurrent(&after));
    OK(cuCtxGetId(after, &id_after));
    EXPECT(after == before);
    EXPECT(id_after != id_before);
    EXPECT_EQ(sim_physical(0), PAGE);
    EXPECT_EQ(sim_mapped(0), PAGE);
    EXPECT_EQ(call_get_id(s), cudaErrorInvalidResourceHandle);
    EXPECT_EQ(cuEventQuery(e), CUDA_ERROR_INVALID_HANDLE);
    EXPECT_EQ(sim_findings(SIM_DEAD_HANDLE), 2);
    check_on(stream(), p, PAGE, 4);
    OK(cudaDeviceSynchronize());
    unmap(p, PAGE);
    EXPECT_EQ(sim_findings(SIM_ANY), 2);
}

TEST(after_the_driver_is_gone_every_call_says_so)
{
    start();
    CUmemAllocationProp prop = on_device(0);
    CUmemGenericAllocationHandle handle = 0;
    char *p = memory(1);
    cudaStream_t s = stream();
    cudaEvent_t e = record(s);
    sim_driver_exit();
    EXPECT_EQ(cuEventQuery(e), CUDA_ERROR_DEINITIALIZED);
    EXPECT_EQ(cuMemCreate(&handle, PAGE, &prop, 0), CUDA_ERROR_DEINITIALIZED);
    EXPECT_EQ(cuMemUnmap(address_of(p), PAGE), CUDA_ERROR_DEINITIALIZED);
    EXPECT_EQ(call_get_id(s), cudaErrorCudartUnloading);
    EXPECT_EQ(cudaFree(NULL), cudaErrorCudartUnloading);
    EXPECT_EQ(cudaStreamQuery(s), cudaErrorCudartUnloading);
    EXPECT_EQ(sim_findings(SIM_ANY), 0);
}

STORY(a_peer_needs_an_access_right_of_its_own, SIM_HOLE)
{
    char *p = addresses(PAGE);
    CUmemGenericAllocationHandle handle = page_of(1, PAGE);
    OK(cuMemMap(address_of(p), PAGE, 0, handle, 0));
    OK(set_access(p, PAGE, 1));
    int can = 0;
    OK(cudaDeviceCanAccessPeer(&can, 0, 1));
    EXPECT_EQ(can, 1);
    OK(cudaSetDevice(0));
    OK(cudaDeviceEnablePeerAccess(1, 0)); /* has no effect on mapped memory */
    if (!broken) OK(set_access(p, PAGE, 0));
    write_on(stream(), p, PAGE);
}

STORY(an_event_orders_streams_of_two_devices, SIM_RACE)
{
    char *p = memory(1);
    OK(set_access(p, PAGE, 1));
    cudaStream_t s = stream();
    write_on(s, p, PAGE);
    cudaEvent_t mark = record(s);
    OK(cudaSetDevice(1));
    cudaStream_t t = stream();
    if (!broken) wait_for(t, mark);
    write_on(t, p, PAGE);
    cudaDeviceSynchronize();
    OK(cudaSetDevice(0));
}

TEST(pages_of_two_devices_lie_side_by_side)
{
    start_devices(2);
    char *p = addresses(2 * PAGE);
    OK(cuMemMap(address_of(p), PAGE, 0, page_of(0, PAGE), 0));
    OK(cuMemMap(address_of(p + PAGE), PAGE, 0, page_of(1, PAGE), 0));
    OK(set_access(p, 2 * PAGE, 0));
    write_on(stream(), p, 2 * PAGE);
    OK(cudaDeviceSynchronize());
    EXPECT_EQ(sim_findings(SIM_ANY), 0);
    EXPECT_EQ(sim_physical(0), PAGE);
    EXPECT_EQ(sim_physical(1), PAGE);
    EXPECT_EQ(sim_mapped(1), PAGE);
}

/* cudaMemcpyPeer reaches both; other copies only what the stream's device may access. */
TEST(peer_copies_reach_pages_of_both_devices)
{
    start_devices(2);
    char *p = addresses(2 * PAGE);
    OK(cuMemMap(address_of(p), PAGE, 0, page_of(0, PAGE), 0));
    OK(cuMemMap(address_of(p + PAGE), PAGE, 0, page_of(1, PAGE), 0));
    OK(set_access(p, PAGE, 0));
    OK(set_access(p + PAGE, PAGE, 1));
    cudaStream_t s = stream();
    write_on(s, p, PAGE);
    OK(cudaMemcpyPeerAsync(p + PAGE, 1, p, 0, PAGE, s));
    OK(cudaMemcpyPeerAsync(p, 0, p + PAGE, 1, PAGE, s));
    OK(cudaDeviceSynchronize());
    EXPECT_EQ(sim_findings(SIM_ANY), 0);
    EXPECT_EQ(cudaMemcpyAsync(p + PAGE, p, PAGE, cudaMemcpyDeviceToDevice, s), cudaErrorInvalidValue);
}

/* The runtime keeps the primary context that a driver call has opened, until the device is reset. */
TEST(the_runtime_keeps_the_primary_context)
{
    CUcontext context = NULL;
    cudaStream_t s = NULL;
    start_devices(1);
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cudaStreamCreate(&s));
    OK(cuDevicePrimaryCtxRelease(0));
    OK(cudaStreamSynchronize(s));
    OK(cudaStreamDestroy(s));
    OK(cudaDeviceReset());
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuDevicePrimaryCtxRelease(0));
    EXPECT_EQ(cuDevicePrimaryCtxRelease(0), CUDA_ERROR_INVALID_CONTEXT);
}

/* As tests/gpu/probe_copies.cu saw it: the current device decides for pages, not the stream's. */
TEST(copies_reach_pages_by_the_access_of_the_current_device)
{
    start_devices(2);
    char *p = addresses(2 * PAGE), host[64] = {0}, *plain = NULL;
    for (int i = 0; i < 2; i++) {
        OK(cuMemMap(address_of(p + i * PAGE), PAGE, 0, page_of(1, PAGE), 0));
        OK(set_access(p + i * PAGE, PAGE, 1));
    }
    cudaStream_t s0 = stream();
    OK(cudaSetDevice(1));
    cudaStream_t s1 = stream();
    OK(cudaMalloc((void **)&plain, PAGE));
    write_on(s1, p, PAGE);
    write_on(s1, plain, PAGE);
    OK(cudaMemcpyAsync(p + PAGE, p, PAGE, cudaMemcpyDeviceToDevice, s1));
    OK(cudaDeviceSynchronize());
    OK(cudaSetDevice(0));
    cudaStream_t with[] = {s0, s1};
    for (int i = 0; i < 2; i++) {
        EXPECT_EQ(cudaMemcpyAsync(p + PAGE, p, PAGE, cudaMemcpyDefault, with[i]), cudaErrorInvalidValue);
        EXPECT_EQ(cudaMemcpyAsync(p, host, sizeof host, cudaMemcpyDefault, with[i]), cudaErrorInvalidValue);
        EXPECT_EQ(cudaMemcpyAsync(host, p, sizeof host, cudaMemcpyDefault, with[i]), cudaErrorInvalidValue);
        EXPECT_EQ(cudaMemcpyAsync(p, plain, PAGE, cudaMemcpyDeviceToDevice, with[i]), cudaErrorInvalidValue);
        EXPECT_EQ(cudaMemcpy2DAsync(p, 512, p + PAGE, 512, 100, 4, cudaMemcpyDefault, with[i]), cudaErrorInvalidValue);
        EXPECT_EQ(cudaMemsetAsync(p, 0, PAGE, with[i]), i ? cudaSuccess : cudaErrorInvalidValue);
        OK(cudaMemcpyAsync(plain, host, sizeof host, cudaMemcpyDefault, with[i]));
        OK(cudaMemcpyPeerAsync(p + PAGE, 1, p, 1, PAGE, with[i]));
        OK(cudaStreamSynchronize(with[i]));
    }
    EXPECT_EQ(sim_findings(SIM_ANY), 0);
}

/* The same with memory of a pool, which has the access rights of its pool. */
TEST(copies_reach_a_pools_memory_by_the_access_of_the_current_device)
{
    start_devices(2);
    char *p = NULL, host[64] = {0};
    OK(cudaSetDevice(1));
    cudaStream_t s1 = stream();
    OK(cudaMallocAsync((void **)&p, PAGE, s1));
    OK(cudaMemcpyAsync(p, host, sizeof host, cudaMemcpyDefault, s1));
    OK(cudaStreamSynchronize(s1));
    OK(cudaSetDevice(0));
    cudaStream_t with[] = {NULL, s1};
    for (int i = 0; i < 2; i++) {
        EXPECT_EQ(cudaMemcpyAsync(p, host, sizeof host, cudaMemcpyDefault, with[i]), cudaErrorInvalidValue);
        EXPECT_EQ(cudaMemcpyAsync(host, p, sizeof host, cudaMemcpyDefault, with[i]), cudaErrorInvalidValue);
        EXPECT_EQ(cudaMemsetAsync(p, 0, PAGE, with[i]), i ? cudaSuccess : cudaErrorInvalidValue);
        OK(cudaMemcpyPeerAsync(p + PAGE / 2, 1, p, 1, PAGE / 2, with[i]));
        OK(cudaStreamSynchronize(with[i]));
    }
    OK(cudaFreeAsync(p, s1));
    EXPECT_EQ(sim_findings(SIM_ANY), 0);
}

/* ==== PAGES ====================================================================================================== */

TEST(a_page_is_held_until_its_last_mapping_and_its_handle_are_gone)
{
    for (int release_first = 0; release_first < 2; ++release_first) {
        start();
        char *p = addresses(2 * PAGE);
        size_t unused = 0, unused_now = 0, total = 0;
        OK(cudaMemGetInfo(&unused, &total));
        CUmemGenericAllocationHandle handle = page();
        map(p, handle);
        map(p + PAGE, handle);
        EXPECT_EQ(sim_mapped(0), 2 * PAGE);
        if (release_first) OK(cuMemRelease(handle));
        unmap(p, PAGE);
        EXPECT_EQ(sim_physical(0), PAGE);
        OK(cudaMemGetInfo(&unused_now, &total));
        EXPECT_EQ(unused - unused_now, PAGE);
        unmap(p + PAGE, PAGE);
        EXPECT_EQ(sim_mapped(0), 0);
        EXPECT_EQ(sim_physical(0), release_first ? 0 : PAGE);
        if (!release_first) OK(cuMemRelease(handle));
        EXPECT_EQ(cuMemRelease(handle), CUDA_ERROR_INVALID_VALUE);
        EXPECT_EQ(sim_physical(0), 0);
        EXPECT_EQ(sim_physical_peak(0), PAGE);
        sim_physical_peak_reset(0);
        EXPECT_EQ(sim_physical_peak(0), 0);
        OK(cuMemAddressFree(address_of(p), 2 * PAGE));
        EXPECT_EQ(sim_addresses(), 0);
    }
}

TEST(sizes_and_addresses_keep_to_the_granularity)
{
    start();
    CUmemAllocationProp prop = on_device(0);
    CUmemGenericAllocationHandle handle = 0;
    size_t granularity = 0;
    OK(cuMemGetAllocationGranularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    EXPECT_EQ(granularity, PAGE);
    OK(cuMemGetAllocationGranularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
    EXPECT_EQ(granularity, PAGE);
    EXPECT_EQ(cuMemCreate(&handle, PAGE + 512, &prop, 0), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(cuMemCreate(&handle, 0, &prop, 0), CUDA_ERROR_INVALID_VALUE);
    prop.location.id = 1;
    EXPECT_EQ(cuMemCreate(&handle, PAGE, &prop, 0), CUDA_ERROR_INVALID_DEVICE);
    CUdeviceptr at = 0;
    EXPECT_EQ(cuMemAddressReserve(&at, PAGE - 1, 0, 0, 0), CUDA_ERROR_INVALID_VALUE);
    char *p = addresses(4 * PAGE);
    EXPECT_EQ((uintptr_t)p % PAGE, 0);
    handle = page();
    EXPECT_EQ(cuMemMap(address_of(p) + 512, PAGE, 0, handle, 0), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(sim_mapped(0), 0);
    map(p, handle);
    EXPECT(cuMemMap(address_of(p), PAGE, 0, handle, 0) != CUDA_SUCCESS);
    EXPECT(cuMemUnmap(address_of(p + PAGE), PAGE) != CUDA_SUCCESS);
    EXPECT(set_access(p, 2 * PAGE, 0) != CUDA_SUCCESS);
    EXPECT(cuMemAddressFree(address_of(p), 4 * PAGE) != CUDA_SUCCESS);
    EXPECT_EQ(sim_mapped(0), PAGE);
}

TEST(a_device_may_have_another_granularity)
{
    sim_options options = forgiving();
    options.granularity = 4 * PAGE;
    start_with(options);
    CUmemAllocationProp prop = on_device(0);
    CUmemGenericAllocationHandle handle = 0;
    size_t granularity = 0;
    OK(cuMemGetAllocationGranularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    EXPECT_EQ(granularity, 4 * PAGE);
    EXPECT_EQ(cuMemCreate(&handle, PAGE, &prop, 0), CUDA_ERROR_INVALID_VALUE);
    OK(cuMemCreate(&handle, 8 * PAGE, &prop, 0));
}

/* What one device lacks does not limit the others, and pages lie at multiples of their device's granularity. */
TEST(devices_may_be_unlike)
{
    sim_options options = forgiving();
    options.devices = 3;
    options.unlike[1] = (sim_unlike){.memory = 8 * PAGE, .granularity = 4 * PAGE, .no_rdma = 1, .no_pools = 1};
    options.unlike[2] = (sim_unlike){.no_vmm = 1};
    start_with(options);
    CUmemoryPool pool = NULL;
    CUmemPoolProps of = {0};
    of.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    of.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    for (int device = 0; device < 3; device++) {
        int unlike = device == 1, vmm = -1, rdma = -1, pools = -1;
        size_t memory = unlike ? 8 * PAGE : options.memory, left = 0, total = 0, granularity = 0;
        CUmemAllocationProp prop = on_device(device);
        CUmemGenericAllocationHandle handle = 0;
        void *p = NULL;
        OK(cudaSetDevice(device));
        OK(cuDeviceTotalMem(&total, device));
        EXPECT_EQ(total, memory);
        OK(cudaMemGetInfo(&left, &total));
        EXPECT_EQ(left, memory);
        EXPECT_EQ(total, memory);
        OK(cuDeviceGetAttribute(&vmm, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device));
        OK(cuDeviceGetAttribute(&rdma, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, device));
        OK(cuDeviceGetAttribute(&pools, CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, device));
        EXPECT_EQ(vmm, device != 2);
        EXPECT_EQ(rdma, !unlike);
        EXPECT_EQ(pools, !unlike);
        EXPECT_EQ(cudaMalloc(&p, 9 * PAGE), unlike ? cudaErrorMemoryAllocation : cudaSuccess);
        if (p) OK(cudaFree(p));
        of.location.id = device;
        EXPECT_EQ(cuMemPoolCreate(&pool, &of), unlike ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS);
        if (!unlike) OK(cuMemPoolDestroy(pool));
        EXPECT_EQ(cudaDeviceGetDefaultMemPool(&pool, device), unlike ? cudaErrorNotSupported : cudaSuccess);
        EXPECT_EQ(cudaMallocAsync(&p, PAGE, 0), unlike ? cudaErrorNotSupported : cudaSuccess);
        if (!unlike) OK(cudaFreeAsync(p, 0));
        CUresult result = cuMemGetAllocationGranularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
        EXPECT_EQ(result, vmm ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED);
        if (!vmm) continue;
        EXPECT_EQ(granularity, unlike ? 4 * PAGE : PAGE);
        EXPECT_EQ(cuMemCreate(&handle, PAGE, &prop, 0), unlike ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS);
        if (!unlike) OK(cuMemRelease(handle));
        prop.allocFlags.gpuDirectRDMACapable = 1;
        EXPECT_EQ(cuMemCreate(&handle, 4 * PAGE, &prop, 0), unlike ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS);
        if (!unlike) OK(cuMemRelease(handle));
    }
    char *p = addresses(16 * PAGE);
    p += 4 * PAGE - (uintptr_t)p % (4 * PAGE);
    CUmemGenericAllocationHandle handle = page_of(1, 4 * PAGE);
    EXPECT_EQ(cuMemMap(address_of(p) + PAGE, 4 * PAGE, 0, handle, 0), CUDA_ERROR_INVALID_VALUE);
    OK(cuMemMap(address_of(p), 4 * PAGE, 0, handle, 0));
}

TEST(part_of_a_handle_cannot_be_mapped)
{
    start();
    CUmemGenericAllocationHandle handle = page_of(0, 4 * PAGE);
    char *p = addresses(8 * PAGE);
    EXPECT_EQ(cuMemMap(address_of(p), PAGE, 0, handle, 0), CUDA_ERROR_NOT_SUPPORTED);
    EXPECT_EQ(cuMemMap(address_of(p), PAGE, PAGE, handle, 0), CUDA_ERROR_NOT_SUPPORTED);
    OK(cuMemMap(address_of(p), 4 * PAGE, 0, handle, 0));
    EXPECT(cuMemUnmap(address_of(p), PAGE) != CUDA_SUCCESS);
    OK(cuMemUnmap(address_of(p), 4 * PAGE));
}

TEST(several_handles_are_unmapped_by_one_call)
{
    start();
    char *p = memory(4);
    unmap(p + PAGE, 2 * PAGE);
    EXPECT_EQ(sim_mapped(0), 2 * PAGE);
    EXPECT_EQ(sim_physical(0), 2 * PAGE);
    write_on(stream(), p, PAGE);
    write_on(stream(), p + 3 * PAGE, PAGE);
    OK(cudaDeviceSynchronize());
    EXPECT_EQ(sim_findings(SIM_ANY), 0);
}

TEST(addresses_cost_no_memory_and_may_be_many)
{
    start();
    char *p = addresses((size_t)4 << 40);
    EXPECT_EQ(sim_addresses(), (size_t)4 << 40);
    EXPECT_EQ(sim_physical(0), 0);
    EXPECT_EQ(sim_mapped(0), 0);
    OK(cuMemAddressFree(address_of(p), (size_t)4 << 40));
}

enum { RANGES = 64 };

typedef struct range {
    uintptr_t at;
    size_t bytes;
} range;

static int is_apart(const range *ranges, range r)
{
    for (int i = 0; i < RANGES; ++i)
        if (ranges[i].bytes && ranges[i].at < r.at + r.bytes && r.at < ranges[i].at + ranges[i].bytes) return 0;
    return 1;
}

TEST(reservations_never_overlap)
{
    start();
    uint64_t random = test_seed();
    range ranges[RANGES];
    memset(ranges, 0, sizeof ranges);
    for (int turn = 0; turn < 1000; ++turn) {
        range *r = &ranges[random_below(&random, RANGES)];
        if (r->bytes) {
            OK(cuMemAddressFree(r->at, r->bytes));
            r->bytes = 0;
        } else {
            range one = {0, (1 + random_below(&random, 20)) * PAGE};
            one.at = (uintptr_t)addresses(one.bytes);
            EXPECT(one.at % PAGE == 0 && is_apart(ranges, one));
            *r = one;
        }
    }
}

TEST(small_blocks_never_overlap_and_share_pages)
{
    start();
    uint64_t random = test_seed();
    range ranges[RANGES];
    memset(ranges, 0, sizeof ranges);
    for (int turn = 0; turn < 1000; ++turn) {
        range *r = &ranges[random_below(&random, RANGES)];
        if (r->bytes) {
            OK(cudaFree((void *)r->at));
            r->bytes = 0;
        } else {
            void *p = NULL;
            range one = {0, 1 + random_below(&random, 9000)};
            OK(cudaMalloc(&p, one.bytes));
            one.at = (uintptr_t)p;
            EXPECT(one.at % 256 == 0 && is_apart(ranges, one));
            *r = one;
        }
        EXPECT(sim_physical(0) <= PAGE);
    }
    for (int i = 0; i < RANGES; ++i)
        if (ranges[i].bytes) OK(cudaFree((void *)ranges[i].at));
    EXPECT_EQ(sim_physical(0), 0);
    EXPECT_EQ(cudaFree((void *)ranges[0].at), cudaErrorInvalidValue);
}

TEST(memory_can_run_out)
{
    sim_options options = forgiving();
    options.memory = 4 * PAGE;
    start_with(options);
    CUmemAllocationProp prop = on_device(0);
    CUmemGenericAllocationHandle handles[4], one_more = 0;
    size_t unused = 1, total = 0;
    void *p = NULL;
    OK(cudaMemGetInfo(&unused, &total));
    EXPECT_EQ(unused, 4 * PAGE);
    EXPECT_EQ(total, 4 * PAGE);
    for (int i = 0; i < 4; ++i) OK(cuMemCreate(&handles[i], PAGE, &prop, 0));
    EXPECT_EQ(cuMemCreate(&one_more, PAGE, &prop, 0), CUDA_ERROR_OUT_OF_MEMORY);
    EXPECT_EQ(cudaMalloc(&p, 512), cudaErrorMemoryAllocation);
    OK(cuMemRelease(handles[2]));
    OK(cudaMalloc(&p, PAGE));
    EXPECT_EQ(cuMemCreate(&one_more, PAGE, &prop, 0), CUDA_ERROR_OUT_OF_MEMORY);
    OK(cudaFree(p));
    OK(cuMemCreate(&one_more, PAGE, &prop, 0));
    EXPECT_EQ(sim_physical(0), 4 * PAGE);
}

TEST(a_device_may_do_without_virtual_memory_management)
{
    sim_options options = forgiving();
    options.vmm = 0;
    start_with(options);
    CUmemAllocationProp prop = on_device(0);
    CUmemGenericAllocationHandle handle = 0;
    int can = -1;
    void *p = NULL;
    OK(cuInit(0));
    OK(cuDeviceGetAttribute(&can, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 0));
    EXPECT_EQ(can, 0);
    OK(cudaMalloc(&p, PAGE));
    EXPECT_EQ(cuMemCreate(&handle, PAGE, &prop, 0), CUDA_ERROR_NOT_SUPPORTED);
    start();
    OK(cuInit(0));
    OK(cuDeviceGetAttribute(&can, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 0));
    EXPECT_EQ(can, 1);
}

STORY(stream_ordered_memory_is_freed_in_the_order_of_its_stream, SIM_RACE)
{
    void *p = NULL, *q = NULL;
    cudaStream_t s = stream(), t = stream();
    OK(cudaMallocAsync(&p, 4096, s));
    order(s, t);
    write_on(t, p, 4096);
    if (!broken) order(t, s);
    OK(cudaFreeAsync(p, s));
    OK(cudaMallocAsync(&q, 4096, s));
    EXPECT(q == p);
    write_on(s, q, 4096);
    OK(cudaFreeAsync(q, s));
}

STORY(stream_ordered_memory_ends_with_its_free, SIM_HOLE)
{
    void *p = NULL;
    cudaStream_t s = stream();
    OK(cudaMallocAsync(&p, 4096, s));
    if (broken) OK(cudaFreeAsync(p, s));
    write_on(s, p, 4096);
    if (!broken) OK(cudaFreeAsync(p, s));
}

TEST(what_lives_is_a_leak)
{
    start();
    char text[512] = "";
    EXPECT_EQ(sim_leaks(NULL, 0), 0);
    CUmemGenericAllocationHandle handle = page();
    EXPECT_EQ(sim_leaks(text, sizeof text), 1);
    EXPECT(text[0] != 0);
    char *p = addresses(PAGE);
    map(p, handle);
    cudaEvent_t e = event();
    void *q = NULL;
    OK(cudaMalloc(&q, 4096));
    EXPECT_EQ(sim_leaks(text, sizeof text), 5);
    OK(cudaFree(q));
    OK(cudaEventDestroy(e));
    unmap(p, PAGE);
    OK(cuMemRelease(handle));
    OK(cuMemAddressFree(address_of(p), PAGE));
    EXPECT_EQ(sim_leaks(text, sizeof text), 0);
}

/* ==== BACKED MODE ================================================================================================ */

TEST(backed_contents_are_moved_and_aliases_show_the_same_bytes)
{
    start_backed();
    char *a = addresses(2 * PAGE), *b = a + PAGE, out[256], in[256];
    CUmemGenericAllocationHandle handle = page();
    cudaStream_t s = stream();
    for (int i = 0; i < 256; ++i) in[i] = (char)(i * 7);
    map(a, handle);
    map(b, handle);
    OK(cudaMemcpyAsync(a + 1000, in, sizeof in, cudaMemcpyHostToDevice, s));
    OK(cudaMemcpyAsync(a + 5000, b + 1000, sizeof in, cudaMemcpyDeviceToDevice, s));
    OK(cudaMemcpyAsync(out, b + 5000, sizeof out, cudaMemcpyDeviceToHost, s));
    OK(cudaStreamSynchronize(s));
    EXPECT(!memcmp(in, out, sizeof in));
    EXPECT(!memcmp(a + 5000, in, sizeof in));
    EXPECT(!memcmp(b + 5000, in, sizeof in));
    OK(cudaMemset(a + 5000, 0x5a, 256));
    OK(cudaDeviceSynchronize());
    EXPECT(b[5000] == 0x5a && b[5255] == 0x5a);
    EXPECT_EQ(sim_findings(SIM_ANY), 0);
}

TEST(a_backed_page_keeps_its_bytes_when_it_moves)
{
    start_backed();
    char *p = addresses(4 * PAGE);
    CUmemGenericAllocationHandle handle = page();
    cudaStream_t s = stream();
    map(p, handle);
    write_tag(s, p, PAGE, 0x1122334455667788);
    OK(cudaStreamSynchronize(s));
    uint64_t word = 0;
    memcpy(&word, p, 8);
    EXPECT_EQ(word, 0x1122334455667788);
    memcpy(&word, p + PAGE - 8, 8);
    EXPECT_EQ(word, 0x1122334455667788);
    unmap(p, PAGE);
    map(p + 2 * PAGE, handle);
    memcpy(&word, p + 2 * PAGE, 8);
    EXPECT_EQ(word, 0x1122334455667788);
    check_on(s, p + 2 * PAGE, PAGE, 0x1122334455667788);
    OK(cudaDeviceSynchronize());
    EXPECT_EQ(sim_findings(SIM_ANY), 0);
}

TEST(backed_pages_are_copied_across_their_borders)
{
    enum { N = 5000000 };
    start_backed();
    char *p = memory(4), *q = memory(4), *in = (char *)malloc(N), *out = (char *)malloc(N);
    cudaStream_t s = stream();
    if (!EXPECT(in && out)) return;
    for (int i = 0; i < N; ++i) in[i] = (char)(i * 31 + (i >> 12));
    OK(cudaMemcpyAsync(p + 100, in, N, cudaMemcpyHostToDevice, s));
    OK(cudaMemcpyAsync(q + 4001, p + 100, N, cudaMemcpyDeviceToDevice, s));
    OK(cudaMemcpyAsync(out, q + 4001, N, cudaMemcpyDeviceToHost, s));
    EXPECT(!memcmp(in, out, N));
    char *end = p + 3 * PAGE + 20;
    write_tag(s, p + 3, (size_t)(end - p - 3), 0x0102030405060708);
    check_on(s, p + 3, (size_t)(end - p - 3), 0x0102030405060708);
    write_tag(s, p + 1, 2, 0x0909);
    OK(cudaStreamSynchronize(s));
    uint64_t word = 0;
    memcpy(&word, p + 3, 8);
    EXPECT_EQ(word, 0x0102030405060708);
    memcpy(&word, end - 8, 8);
    EXPECT_EQ(word, 0x0102030405060708);
    EXPECT(p[1] == 9 && p[2] == 9);
    EXPECT_EQ(sim_findings(SIM_ANY), 0);
    free(in);
    free(out);
}

TEST(a_backed_copy_takes_pageable_bytes_as_they_were)
{
    sim_options options = forgiving();
    options.mode = SIM_BACKED;
    options.memory = 4 * PAGE;
    options.pace = SIM_PACE_STILL;
    start_with(options);
    char *p = memory(1), pageable = 1;
    void *pinned = NULL;
    cudaStream_t s = stream();
    OK(cudaMallocHost(&pinned, 1));
    *(char *)pinned = 1;
    OK(cudaMemcpyAsync(p, &pageable, 1, cudaMemcpyHostToDevice, s));
    OK(cudaMemcpyAsync(p + 1, pinned, 1, cudaMemcpyHostToDevice, s));
    pageable = *(char *)pinned = 2;
    OK(cudaStreamSynchronize(s));
    EXPECT(p[0] == 1 && p[1] == 2);
    OK(cudaFreeHost(pinned));
}

typedef struct host_range {
    char *p;
    size_t bytes;
    int sum;
} host_range;

static void add_up(void *arg)
{
    host_range *r = (host_range *)arg;
    for (size_t i = 0; i < r->bytes; ++i) r->sum += r->p[i];
}

TEST(a_backed_operation_may_touch_device_memory)
{
    start_backed();
    void *p = NULL;
    OK(cudaMalloc(&p, 4096));
    cudaStream_t s = stream();
    host_range bytes = {(char *)p, 4096, 0};
    sim_access read = {p, 4096, SIM_READ, 0};
    OK(cudaMemsetAsync(p, 3, 4096, s));
    OK(sim_launch_call(s, &read, 1, add_up, &bytes));
    OK(cudaStreamSynchronize(s));
    EXPECT_EQ(bytes.sum, 3 * 4096);
    OK(cudaFree(p));
}

TEST(the_drivers_sets_and_copies_move_bytes)
{
    start_backed();
    void *p = NULL, *host = NULL;
    OK(cudaMalloc(&p, 4096));
    OK(cudaMallocHost(&host, 300));
    cudaStream_t s = stream();
    sim_hold(s, 1);
    OK(cuMemsetD8Async(address_of(p), 3, 4096, s));
    OK(cuMemsetD8Async(address_of(p) + 299, 4, 1, s));
    OK(cuMemcpyDtoHAsync(host, address_of(p), 300, s));
    EXPECT_EQ(((unsigned char *)host)[0], 0); /* pinned memory: the call has not waited */
    sim_hold(s, 0);
    OK(cudaStreamSynchronize(s));
    EXPECT_EQ(((unsigned char *)host)[0], 3);
    EXPECT_EQ(((unsigned char *)host)[298], 3);
    EXPECT_EQ(((unsigned char *)host)[299], 4);
    OK(cudaFreeHost(host));
    OK(cudaFree(p));
}

TEST(backed_mode_sees_races_as_well)
{
    start_backed();
    char *a = addresses(2 * PAGE), *b = a + PAGE;
    CUmemGenericAllocationHandle handle = page();
    map(a, handle);
    map(b, handle);
    write_on(stream(), a, PAGE);
    write_on(stream(), b, PAGE);
    OK(cudaDeviceSynchronize());
    EXPECT(sim_findings(SIM_RACE) > 0);
}

TEST(backed_memory_that_something_else_overwrote_is_stale)
{
    start_backed();
    char *p = memory(1);
    cudaStream_t s = stream();
    write_tag(s, p, PAGE, 6);
    OK(cudaStreamSynchronize(s));
    p[0] = 1;
    check_on(s, p, PAGE, 6);
    OK(cudaStreamSynchronize(s));
    EXPECT(sim_findings(SIM_STALE) > 0);
}

TEST(backed_memory_is_at_most_a_tebibyte)
{
    sim_options options = sim_defaults();
    options.mode = SIM_BACKED;
    options.memory = (size_t)2 << 40;
    fflush(stderr);
    int saved = dup(2);
    EXPECT(saved >= 0 && freopen("/dev/null", "w", stderr));
    EXPECT_EQ(sim_start(&options), -1);
    fflush(stderr);
    dup2(saved, 2);
    close(saved);
    start();
}

/* ==== FAULTS AND ACCOUNTS ======================================================================================== */

TEST(the_nth_call_of_a_function_fails_once)
{
    start();
    CUmemAllocationProp prop = on_device(0);
    CUmemGenericAllocationHandle handle = 0;
    sim_fail("cuMemCreate", 2, 0, 0);
    OK(cuMemCreate(&handle, PAGE, &prop, 0));
    char *p = addresses(PAGE);
    EXPECT_EQ(cuMemCreate(&handle, PAGE, &prop, 0), CUDA_ERROR_OUT_OF_MEMORY);
    EXPECT_EQ(sim_physical(0), PAGE);
    EXPECT_EQ(sim_failed(), 1);
    OK(cuMemCreate(&handle, PAGE, &prop, 0));
    EXPECT_EQ(sim_failed(), 1);
    map(p, handle);
}

TEST(a_function_can_fail_from_then_on)
{
    start();
    char *p = addresses(PAGE);
    CUmemGenericAllocationHandle handle = page();
    sim_fail("cuMemMap", 1, 1, CUDA_ERROR_UNKNOWN);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(cuMemMap(address_of(p), PAGE, 0, handle, 0), CUDA_ERROR_UNKNOWN);
    EXPECT_EQ(sim_failed(), 3);
    EXPECT_EQ(sim_mapped(0), 0);
    sim_fail_clear();
    EXPECT_EQ(sim_failed(), 0);
    map(p, handle);
}

TEST(any_function_can_be_the_one_that_fails)
{
    start();
    sim_fail(NULL, 2, 0, CUDA_ERROR_NOT_PERMITTED);
    char *p = addresses(PAGE);
    CUmemAllocationProp prop = on_device(0);
    CUmemGenericAllocationHandle handle = 0;
    EXPECT_EQ(cuMemCreate(&handle, PAGE, &prop, 0), CUDA_ERROR_NOT_PERMITTED);
    EXPECT_EQ(sim_physical(0), 0);
    OK(cuMemCreate(&handle, PAGE, &prop, 0));
    map(p, handle);
}

TEST(several_faults_can_be_armed)
{
    start();
    void *p = NULL;
    cudaEvent_t e = NULL;
    sim_fail("cudaMalloc", 1, 0, 0);
    sim_fail("cudaMalloc", 3, 0, cudaErrorUnknown);
    sim_fail("cudaEventCreateWithFlags", 1, 0, 0);
    EXPECT_EQ(cudaMalloc(&p, 4096), cudaErrorMemoryAllocation);
    EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
    EXPECT_EQ(cudaEventCreateWithFlags(&e, cudaEventDisableTiming), cudaErrorMemoryAllocation);
    OK(cudaMalloc(&p, 4096));
    EXPECT_EQ(cudaMalloc(&p, 4096), cudaErrorUnknown);
    OK(cudaMalloc(&p, 4096));
    EXPECT_EQ(sim_failed(), 3);
}

TEST(host_memory_can_fail_too)
{
    start();
    void *kept = sim_malloc(10), *p;
    EXPECT(kept != NULL);
    EXPECT_EQ(sim_malloc_live(), 1);
    sim_fail_malloc(2, 0);
    EXPECT((p = sim_malloc(10)) != NULL);
    sim_free(p);
    EXPECT(sim_malloc(10) == NULL);
    EXPECT((p = sim_malloc(10)) != NULL);
    sim_free(p);
    EXPECT_EQ(sim_failed_mallocs(), 1);
    sim_fail_malloc(1, 1);
    for (int i = 0; i < 3; ++i) EXPECT(sim_malloc(10) == NULL);
    EXPECT_EQ(sim_failed_mallocs(), 3);
    sim_fail_clear();
    EXPECT((p = sim_malloc(10)) != NULL);
    sim_free(p);
    EXPECT_EQ(sim_malloc_live(), 1);
    sim_free(kept);
    sim_free(NULL);
    EXPECT_EQ(sim_malloc_live(), 0);
}

TEST(every_call_is_counted)
{
    start();
    long before = sim_calls(NULL);
    char *p = memory(3);
    EXPECT_EQ(sim_calls("cuMemMap"), 3);
    EXPECT_EQ(sim_calls("cuMemSetAccess"), 3);
    EXPECT_EQ(sim_calls("cuMemRelease"), 3);
    EXPECT_EQ(sim_calls("cuMemAddressReserve"), 1);
    EXPECT_EQ(sim_calls("cuMemUnmap"), 0);
    EXPECT_EQ(sim_calls(NULL) - before, 13);
    unmap(p, 3 * PAGE);
    EXPECT_EQ(sim_calls("cuMemUnmap"), 1);
}

TEST(every_operation_is_counted)
{
    start();
    cudaStream_t s = stream();
    unsigned long long before = sim_operations();
    long calls = sim_calls(NULL);
    OK(sim_launch(s, NULL, 0));
    OK(sim_launch(s, NULL, 0));
    EXPECT_EQ(sim_operations() - before, 2);
    EXPECT_EQ(sim_calls(NULL), calls);
}

TEST(calls_that_wait_are_counted_apart)
{
    start_still();
    cudaStream_t s = stream();
    cudaEvent_t e = record(s);
    long before = sim_blocking_calls();
    cudaEventQuery(e);
    cudaStreamQuery(s);
    order(s, stream());
    EXPECT_EQ(sim_blocking_calls(), before);
    OK(cudaEventSynchronize(e));
    EXPECT_EQ(sim_blocking_calls(), before + 1);
    OK(sim_launch(s, NULL, 0));
    OK(cudaStreamSynchronize(s));
    OK(sim_launch(s, NULL, 0));
    OK(cudaDeviceSynchronize());
    OK(sim_launch(s, NULL, 0));
    OK(cuCtxSynchronize());
    EXPECT_EQ(sim_blocking_calls(), before + 4);
}

static double cost_of_last(void)
{
    double cost = sim_cost_us();
    EXPECT_EQ(sim_cost_of_ns(NULL), (uint64_t)(cost * 1000 + 0.5));
    sim_cost_reset();
    return cost;
}

TEST(every_call_costs_what_it_was_measured_to_cost)
{
    start();
    char *p = addresses(64 * PAGE);
    cost_of_last();
    CUmemGenericAllocationHandle small = page_of(0, PAGE);
    EXPECT_EQ(sim_cost_of_ns("cuMemCreate"), sim_cost_of_ns(NULL));
    EXPECT_EQ(sim_cost_of_ns("cuMemMap"), 0);
    double create_small = cost_of_last();
    CUmemGenericAllocationHandle large = page_of(0, 32 * PAGE);
    double create_large = cost_of_last();
    OK(cuMemMap(address_of(p), PAGE, 0, small, 0));
    OK(cuMemMap(address_of(p + PAGE), PAGE, 0, page_of(0, PAGE), 0));
    cost_of_last();
    OK(set_access(p, 2 * PAGE, 0));
    double access_two = cost_of_last();
    OK(cuMemUnmap(address_of(p), 2 * PAGE));
    double unmap_two = cost_of_last();
    OK(cuMemMap(address_of(p), 32 * PAGE, 0, large, 0));
    double map_large = cost_of_last();
    EXPECT(create_small >= 7 && create_small <= 9);
    EXPECT(create_large >= 24 && create_large <= 30);
    EXPECT(access_two >= 44 && access_two <= 54);
    EXPECT(unmap_two >= 28 && unmap_two <= 50);
    EXPECT(map_large >= 0.6 && map_large <= 1.6);
    OK(cuMemRelease(small));
    double release_small = cost_of_last();
    EXPECT(release_small >= 13 && release_small <= 15);
}

TEST(costs_are_told_by_function)
{
    start();
    CUmemGenericAllocationHandle handle = page();
    sim_cost_reset();
    CUcontext context;
    OK(cuCtxGetCurrent(&context));
    double look = sim_cost_us();
    OK(cuMemRelease(handle));
    EXPECT(look > 0);
    EXPECT(sim_cost_us_of("cuCtxGetCurrent") == look);
    EXPECT(sim_cost_us_of("cuMemRelease") >= 13);
    EXPECT(sim_cost_us_of("cuMemCreate") == 0);
    EXPECT(look + sim_cost_us_of("cuMemRelease") == sim_cost_us());
}

/* ==== WHAT BYTES HAVE SEEN ======================================================================================= */

static void expect_past(cudaStream_t s, const void *p, size_t bytes, sim_past wanted)
{
    sim_past past = sim_past_of(s, p, bytes);
    EXPECT_EQ(past.moved, wanted.moved);
    EXPECT_EQ(past.moved_busy, wanted.moved_busy);
    EXPECT_EQ(past.handed_over, wanted.handed_over);
    EXPECT_EQ(past.handed_over_busy, wanted.handed_over_busy);
}

TEST(bytes_know_which_stream_used_them_last)
{
    start_still();
    char *p = memory(2);
    cudaStream_t s = stream(), t = stream();
    expect_past(s, p, 2 * PAGE, (sim_past){0, 0, 0, 0});
    write_on(s, p + 1024, PAGE);
    expect_past(s, p, 2 * PAGE, (sim_past){0, 0, 0, 0});
    expect_past(t, p, 1024, (sim_past){0, 0, 0, 0});
    expect_past(t, p, 1025, (sim_past){0, 0, 1, 1});
    expect_past(t, p + PAGE + 1024, 512, (sim_past){0, 0, 0, 0});
    sim_run(-1);
    expect_past(t, p + PAGE + 1023, 512, (sim_past){0, 0, 1, 0});
    order(s, t);
    write_on(t, p, 2 * PAGE);
    expect_past(t, p, 2 * PAGE, (sim_past){0, 0, 0, 0});
    expect_past(s, p, 2 * PAGE, (sim_past){0, 0, 1, 1});
}

TEST(bytes_know_every_stream_that_read_them_last)
{
    start_still();
    char *p = memory(1);
    cudaStream_t s = stream(), t = stream(), u = stream();
    write_on(s, p, PAGE);
    order(s, t);
    order(s, u);
    read_on(t, p, 64);
    expect_past(t, p, 64, (sim_past){0, 0, 0, 0});
    read_on(u, p, 64);
    expect_past(t, p, 64, (sim_past){0, 0, 1, 1});
    expect_past(u, p, 64, (sim_past){0, 0, 1, 1});
}

TEST(handles_know_at_which_address_they_were_used_last)
{
    start_still();
    CUmemGenericAllocationHandle used = page(), unused = page();
    char *old = addresses(2 * PAGE), *now = addresses(2 * PAGE);
    cudaStream_t s = stream();
    map(old, used);
    map(old + PAGE, unused);
    write_on(s, old, 64);
    map(now, used);
    map(now + PAGE, unused);
    expect_past(s, old, 2 * PAGE, (sim_past){0, 0, 0, 0});
    expect_past(s, now + 4096, 2 * PAGE - 4096, (sim_past){1, 1, 0, 0}); /* though only other bytes of it were used */
    OK(cudaStreamSynchronize(s));
    unmap(old, 2 * PAGE);
    expect_past(s, now, 2 * PAGE, (sim_past){1, 0, 0, 0});
    write_on(s, now, 1);
    expect_past(s, now + 4096, 512, (sim_past){0, 0, 0, 0});
}

TEST(a_look_at_a_default_stream_costs_more)
{
    start();
    CUstreamCaptureStatus status;
    cudaStream_t s = stream();
    cudaEvent_t e = event();
    cost_of_last();
    OK(cuStreamIsCapturing(s, &status));
    double own = cost_of_last();
    OK(cuStreamIsCapturing(CU_STREAM_LEGACY, &status));
    double legacy = cost_of_last();
    OK(cuEventRecord(e, s));
    double mark = cost_of_last();
    EXPECT(own > 0.014 && own < 0.016);
    EXPECT(legacy > 0.035 && legacy < 0.042);
    EXPECT(mark > 0.18 && mark < 0.19);
}

TEST(the_cost_of_a_block_depends_on_its_size)
{
    static const struct {
        size_t bytes;
        double malloc_us, free_us;
    } measured[] = {{(size_t)64 << 10, 2.1, 2.1}, {(size_t)1 << 20, 36, 28}, {(size_t)20 << 20, 54, 58},
                    {(size_t)256 << 20, 128, 158}, {(size_t)1 << 30, 109, 601}};
    start();
    for (int i = 0; i < 5; ++i) {
        void *p = NULL;
        cost_of_last();
        OK(cudaMalloc(&p, measured[i].bytes));
        double cost = cost_of_last();
        EXPECT(cost >= 0.9 * measured[i].malloc_us && cost <= 1.1 * measured[i].malloc_us);
        OK(cudaFree(p));
        cost = cost_of_last();
        EXPECT(cost >= 0.9 * measured[i].free_us && cost <= 1.1 * measured[i].free_us);
    }
}

TEST(pinned_memory_costs_much_and_little_to_free)
{
    start();
    void *p = NULL;
    for (int driver = 0; driver < 2; ++driver) {
        cost_of_last();
        if (driver) OK(cuMemHostAlloc(&p, 4096, CU_MEMHOSTALLOC_DEVICEMAP));
        else OK(cudaHostAlloc(&p, 4096, cudaHostAllocMapped));
        double cost = cost_of_last();
        EXPECT(cost >= 540 && cost <= 660);
        if (driver) OK(cuMemFreeHost(p));
        else OK(cudaFreeHost(p));
        cost = cost_of_last();
        EXPECT(cost >= 9 && cost <= 11);
    }
    EXPECT_EQ(cuMemFreeHost(p), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(cuMemHostAlloc(&p, 0, 0), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(cuMemHostAlloc(&p, 4096, 8), CUDA_ERROR_INVALID_VALUE);
}

TEST(access_for_two_devices_costs_twice)
{
    start_devices(2);
    CUmemAccessDesc both[2];
    char *p = memory(1);
    memset(both, 0, sizeof both);
    for (int i = 0; i < 2; ++i) {
        both[i].location = on_device(i).location;
        both[i].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    }
    cost_of_last();
    OK(cuMemSetAccess(address_of(p), PAGE, both, 2));
    double cost = cost_of_last();
    EXPECT(cost >= 45 && cost <= 55);
}

/* ==== ENTRY POINTS, VERSIONS, THREADS ============================================================================ */

typedef CUresult (*get_id_fn)(CUstream, unsigned long long *);

static void *entry_point(const char *name, unsigned version, unsigned long long flags)
{
    void *function = &function;
    enum cudaDriverEntryPointQueryResult found;
    OK(cudaGetDriverEntryPointByVersion(name, &function, version, flags, &found));
    EXPECT_EQ(found == cudaDriverEntryPointSuccess, function != NULL);
    return function;
}

TEST(entry_points_know_which_stream_zero_is)
{
    start();
    get_id_fn legacy, per_thread;
    void *function = entry_point("cuStreamGetId", 12000, cudaEnableLegacyStream);
    memcpy(&legacy, &function, sizeof legacy);
    function = entry_point("cuStreamGetId", 12000, cudaEnablePerThreadDefaultStream);
    memcpy(&per_thread, &function, sizeof per_thread);
    if (!EXPECT(legacy && per_thread)) return;
    unsigned long long id = 0;
    OK(legacy(NULL, &id));
    EXPECT_EQ(id, id_of(cudaStreamLegacy));
    OK(per_thread(NULL, &id));
    EXPECT_EQ(id, id_of(cudaStreamPerThread));
    OK(per_thread(CU_STREAM_LEGACY, &id));
    EXPECT_EQ(id, id_of(cudaStreamLegacy));
}

/* What a file compiled with CUDA_API_PER_THREAD_DEFAULT_STREAM calls under the plain names. */
extern cudaError_t CUDARTAPI cudaStreamGetId_ptsz(cudaStream_t, unsigned long long *);
extern CUresult CUDAAPI cuStreamGetId_ptsz(CUstream, unsigned long long *);

TEST(programs_compiled_for_per_thread_streams_have_another_stream_zero)
{
    start();
    unsigned long long id = 0;
    OK(cudaStreamGetId_ptsz(NULL, &id));
    EXPECT_EQ(id, id_of(cudaStreamPerThread));
    OK(cuStreamGetId_ptsz(NULL, &id));
    EXPECT_EQ(id, id_of(cudaStreamPerThread));
    OK(cudaStreamGetId_ptsz(cudaStreamLegacy, &id));
    EXPECT_EQ(id, id_of(cudaStreamLegacy));
}

TEST(an_old_driver_has_fewer_entry_points)
{
    sim_options options = forgiving();
    options.driver_version = 12000;
    start_with(options);
    int version = 0;
    OK(cuDriverGetVersion(&version));
    EXPECT_EQ(version, 12000);
    OK(cudaDriverGetVersion(&version));
    EXPECT_EQ(version, 12000);
    EXPECT(entry_point("cuMemMap", 12000, cudaEnableLegacyStream) != NULL);
    EXPECT(entry_point("cuMemHostAlloc", 12000, cudaEnableLegacyStream) != NULL);
    EXPECT(entry_point("cuMemFreeHost", 12000, cudaEnableLegacyStream) != NULL);
    EXPECT(entry_point("cuStreamGetDevice", 13000, cudaEnableLegacyStream) == NULL);
    EXPECT(entry_point("cuNoSuchFunction", 12000, cudaEnableLegacyStream) == NULL);
    start();
    EXPECT(entry_point("cuStreamGetDevice", 13000, cudaEnableLegacyStream) != NULL);
    OK(cudaRuntimeGetVersion(&version));
    EXPECT_EQ(version, CUDART_VERSION);
}

TEST(the_driver_has_streams_and_events_too)
{
    start();
    CUstream s = NULL, t = NULL;
    CUevent e = NULL;
    unsigned flags = 9;
    int raised = 0;
    unsigned long long id = 0;
    OK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
    OK(cuStreamCreate(&t, CU_STREAM_DEFAULT));
    OK(cuStreamGetFlags(s, &flags));
    EXPECT_EQ(flags, CU_STREAM_NON_BLOCKING);
    OK(cuStreamGetId(s, &id));
    EXPECT_EQ(id, id_of(s));
    OK(cuEventCreate(&e, CU_EVENT_DISABLE_TIMING));
    sim_hold(s, 1);
    OK(cuLaunchHostFunc(s, raise_flag, &raised));
    OK(cuEventRecordWithFlags(e, s, CU_EVENT_RECORD_DEFAULT));
    OK(cuStreamWaitEvent(t, e, CU_EVENT_WAIT_DEFAULT));
    EXPECT_EQ(cuStreamQuery(t), CUDA_ERROR_NOT_READY);
    sim_hold(s, 0);
    OK(cuStreamSynchronize(t));
    EXPECT_EQ(raised, 1);
    OK(cuEventDestroy(e));
    OK(cuStreamDestroy(s));
    OK(cuStreamDestroy(t));
    EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
}

TEST(the_driver_captures_too)
{
    start();
    cudaStream_t s = stream();
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    CUuserObject object = NULL;
    CUgraph graph = NULL, ended = NULL;
    cuuint64_t id = 0;
    int gone = 0;
    OK(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_GLOBAL));
    OK(cuStreamGetCaptureInfo(s, &status, &id, &graph, NULL, NULL, NULL));
    EXPECT(status == CU_STREAM_CAPTURE_STATUS_ACTIVE && id && graph);
    OK(cuThreadExchangeStreamCaptureMode(&mode));
    EXPECT_EQ(mode, CU_STREAM_CAPTURE_MODE_GLOBAL);
    OK(cuStreamQuery(stream()));
    OK(cuThreadExchangeStreamCaptureMode(&mode));
    EXPECT_EQ(mode, CU_STREAM_CAPTURE_MODE_RELAXED);
    OK(cuUserObjectCreate(&object, &gone, raise_flag, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC));
    OK(cuUserObjectRetain(object, 1));
    OK(cuGraphRetainUserObject(graph, object, 1, 0));
    OK(cuUserObjectRelease(object, 2));
    OK(cuStreamEndCapture(s, &ended));
    EXPECT(ended == graph);
    EXPECT_EQ(gone, 0);
    OK(cuGraphDestroy(graph));
    EXPECT_EQ(gone, 1);
}

TEST(the_driver_has_stream_ordered_memory_too)
{
    start();
    cudaStream_t s = stream();
    CUdeviceptr p = 0;
    OK(cuMemAllocAsync(&p, 4096, s));
    write_on(s, (void *)(uintptr_t)p, 4096);
    OK(cuMemFreeAsync(p, s));
    EXPECT_EQ(sim_findings(SIM_ANY), 0);
    write_on(s, (void *)(uintptr_t)p, 4096);
    EXPECT_EQ(sim_findings(SIM_HOLE), 1);
}

TEST(the_driver_knows_its_devices)
{
    start_devices(2);
    size_t bytes = 0, unused = 0, total = 0;
    int count = 0, can = -1, active = -1;
    unsigned flags;
    CUdevice device = -1;
    OK(cuDeviceGetCount(&count));
    EXPECT_EQ(count, 2);
    OK(cuDeviceGet(&device, 1));
    EXPECT_EQ(device, 1);
    OK(cuDeviceTotalMem(&bytes, 1));
    EXPECT_EQ(bytes, sim_defaults().memory);
    OK(cuMemGetInfo(&unused, &total));
    EXPECT(unused == bytes && total == bytes);
    OK(cuDeviceCanAccessPeer(&can, 0, 1));
    EXPECT_EQ(can, 1);
    OK(cuDeviceCanAccessPeer(&can, 1, 1));
    EXPECT_EQ(can, 0);
    OK(cuDevicePrimaryCtxGetState(0, &flags, &active));
    EXPECT_EQ(active, 1);
    OK(cuDevicePrimaryCtxGetState(1, &flags, &active));
    EXPECT_EQ(active, 0);
    EXPECT_EQ(cuDeviceGet(&device, 2), CUDA_ERROR_INVALID_DEVICE);
}

enum { THREADS = 4, TURNS = 200 };

typedef struct worker {
    char *own;
    pthread_barrier_t *together;
} worker;

static void *work_alone(void *arg)
{
    worker *w = (worker *)arg;
    cudaStream_t s = stream();
    pthread_barrier_wait(w->together);
    for (int i = 0; i < TURNS; ++i) {
        write_tag(s, w->own, PAGE, (uint64_t)i);
        cudaEvent_t e = record(s);
        check_on(s, w->own, PAGE, (uint64_t)i);
        if (i % 50 == 49) OK(cudaEventSynchronize(e));
        OK(cudaEventDestroy(e));
    }
    OK(cudaStreamSynchronize(s));
    OK(cudaStreamDestroy(s));
    return NULL;
}

TEST(threads_may_call_at_the_same_time)
{
    start();
    char *p = memory(THREADS);
    pthread_t threads[THREADS];
    pthread_barrier_t together;
    worker workers[THREADS];
    OK(pthread_barrier_init(&together, NULL, THREADS));
    for (int i = 0; i < THREADS; ++i) {
        workers[i].own = p + (size_t)i * PAGE;
        workers[i].together = &together;
        OK(pthread_create(&threads[i], NULL, work_alone, &workers[i]));
    }
    for (int i = 0; i < THREADS; ++i) OK(pthread_join(threads[i], NULL));
    OK(pthread_barrier_destroy(&together));
    EXPECT_EQ(sim_findings(SIM_ANY), 0);
    EXPECT_EQ(sim_calls("cudaEventRecord"), THREADS * TURNS);
    EXPECT_EQ(sim_pending(), 0);
}

static char seen[64];
static int answers;

static void note_call(const char *function) { snprintf(seen, sizeof seen, "%s", function); }

static int say_finished(void)
{
    answers++;
    return 1;
}

TEST(a_test_may_decide_what_a_query_answers)
{
    start_still();
    char *p = memory(1);
    cudaStream_t s = stream(), t = stream(), other = stream();
    write_on(s, p, PAGE / 2);
    order(s, t);
    read_on(t, p, PAGE / 2);
    write_on(other, p + PAGE / 2, PAGE / 2);
    cudaEvent_t e = record(t);
    read_on(t, p, PAGE / 2);
    EXPECT_EQ(cudaEventQuery(e), cudaErrorNotReady);
    sim_hook(note_call, say_finished);
    EXPECT_EQ(cudaEventQuery(e), cudaSuccess);
    EXPECT(!strcmp(seen, "cudaEventQuery"));
    EXPECT_EQ(cudaEventQuery(e), cudaSuccess); /* there is nothing to decide any more */
    EXPECT_EQ(answers, 1);
    EXPECT(sim_stream_done(s) && !sim_stream_done(t) && !sim_stream_done(other));
    sim_hook(NULL, NULL);
    EXPECT_EQ(cudaEventQuery(e), cudaSuccess);
    OK(cudaEventDestroy(e));
    EXPECT(!strcmp(seen, "cudaEventQuery"));
    EXPECT_EQ(sim_findings(SIM_ANY), 0);
}

TEST(a_start_forgets_everything)
{
    start();
    char *p = memory(1);
    cudaStream_t s = stream();
    write_on(s, p, PAGE);
    cuMemUnmap(address_of(p), PAGE);
    EXPECT(sim_findings(SIM_ANY) > 0);
    EXPECT(sim_finding(0) && sim_finding(0)[0]);
    sim_fail("cuMemCreate", 1, 1, 0);
    sim_options options = forgiving();
    OK(sim_start(&options));
    EXPECT_EQ(sim_findings(SIM_ANY), 0);
    EXPECT(sim_finding(0) == NULL);
    EXPECT_EQ(sim_calls(NULL), 0);
    EXPECT_EQ(sim_pending(), 0);
    EXPECT_EQ(sim_physical(0), 0);
    EXPECT_EQ(sim_addresses(), 0);
    EXPECT(sim_cost_us() == 0);
    CUcontext current = NULL;
    EXPECT_EQ(cuMemAddressFree(0, PAGE), CUDA_ERROR_NOT_INITIALIZED);
    OK(cuInit(0));
    OK(cuCtxGetCurrent(&current));
    EXPECT(!current);
    memory(1);
    sim_stop();
    OK(cudaFree(NULL)); /* starts a device by itself */
    memory(1);
}

TEST_MAIN()
