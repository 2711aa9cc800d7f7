/* fuzz_machine.h - shared by fuzz_ops.c and fuzz_snapshot.c: bytes that choose calls, sizes, streams, pools and faults.
   Whatever they say, the heap stays whole, no use of memory races with another, nothing leaks. */

#ifndef FUZZ_MACHINE_H
#define FUZZ_MACHINE_H

#include "setup.h"

enum { STREAMS = 3, POOLS = 2, BLOCKS = 32 };

typedef struct block {
    void *ptr;
    size_t bytes;
    uint32_t home;
} block;

typedef struct machine {
    const uint8_t *at, *end;
    galloc_pool *pool[POOLS];
    cudaStream_t s[STREAMS];
    block block[BLOCKS];
} machine;

static void require(int holds, const char *what)
{
    if (holds) return;
    fprintf(stderr, "%s\n", what);
    print_findings();
    abort();
}

static uint32_t next(machine *m) { return m->at < m->end ? *m->at++ : 0; }

/* An order of magnitude and a fraction: 1 byte .. 16 MiB, the sizes near powers of two within reach. */
static size_t next_bytes(machine *m)
{
    uint32_t a = next(m), b = next(m);
    size_t base = (size_t)1 << (a % 24);
    return base + base / 256 * b + (a >> 5);
}

/* Every address inside the block leads to it. */
static void check_addresses(const block *b)
{
    for (size_t at = 0; at < b->bytes; at += b->bytes / 9 + 1)
        require(info_of((char *)b->ptr + at).base == b->ptr, "an address inside a block does not lead to it");
}

static void do_malloc(machine *m, block *b)
{
    galloc_request request = {0};
    uint32_t how = next(m);
    b->home = how % STREAMS;
    request.stream = m->s[b->home];
    request.pool = m->pool[how / 4 % POOLS];
    request.bytes = next_bytes(m);
    if (how & 64) request.max_bytes = request.bytes + next_bytes(m);
    if (how & 128) request.alignment = (size_t)1 << (next(m) % 24);
    request.lifetime = how / 16 % 2;
    request.tag = how & 8 ? how : 0;
    b->bytes = request.bytes;
    cudaError_t err = galloc_alloc(&b->ptr, &request);
    require((err == cudaSuccess) == (b->ptr != NULL), "pointer and error disagree");
    if (!b->ptr) return;
    put(m->s[b->home], b->ptr, b->bytes, (uintptr_t)b->ptr);
    check_addresses(b);
}

/* On another stream that comes after it, after both, or with that stream's use recorded. */
static void do_free(machine *m, block *b)
{
    uint32_t how = next(m), other = how / 4 % STREAMS;
    cudaStream_t both[2] = {m->s[b->home], m->s[other]};
    cudaError_t err;
    check_addresses(b);
    order(m->s[b->home], m->s[other]);
    put(m->s[other], b->ptr, b->bytes, 7);
    if (how % 4 == 0) err = galloc_free_after(b->ptr, both, 2);
    else if (how % 4 == 1 && !galloc_record_stream(b->ptr, both[1])) err = galloc_free(b->ptr, both[0]);
    else err = galloc_free(b->ptr, both[1]);
    if (err == cudaSuccess) b->ptr = NULL;
    else order(m->s[other], m->s[b->home]);
}

static void do_resize(machine *m, block *b)
{
    size_t bytes = next_bytes(m);
    if (galloc_resize(b->ptr, bytes, m->s[b->home]) != cudaSuccess) return;
    b->bytes = bytes;
    put(m->s[b->home], b->ptr, bytes, 8);
}

static void new_stream(machine *m, uint32_t k)
{
    uint32_t heir = (k + 1) % STREAMS;
    order(m->s[k], m->s[heir]);
    for (int i = 0; i < BLOCKS; i++)
        if (m->block[i].home == k) m->block[i].home = heir;
    if (next(m) % 2) (void)galloc_stream_retire(m->s[k]);
    stream_end(m->s[k]);
    m->s[k] = stream_new();
}

/* Faults end; perhaps a new one of the host, or of the device, or both. */
static void set_fault(machine *m)
{
    static const char *const functions[] = {"cuMemCreate",   "cuMemMap",     "cuMemSetAccess", "cuMemUnmap",
                                            "cuMemRelease",  "cuMemAlloc",   "cuMemFree",      "cuEventCreate",
                                            "cuEventRecord", "cuEventQuery", "cuMemFreeHost",  "cuStreamWaitEvent",
                                            "cuStreamGetId", "cuCtxGetId",   "cuStreamIsCapturing",
                                            "cuMemAddressReserve"};
    uint32_t how = next(m), which = next(m);
    sim_fail_clear();
    if (how & 1) sim_fail_malloc(1 + (long)(how / 8 % 16), how & 4);
    if (how & 2) sim_fail(functions[which % 16], 1 + (long)(next(m) % 8), how & 128, which & 16 ? cudaErrorUnknown : 0);
}

static void step(machine *m)
{
    uint32_t op = next(m);
    block *b = &m->block[op % BLOCKS];
    switch (op / BLOCKS) {
    case 0: (void)galloc_pool_trim(m->pool[op % POOLS], next_bytes(m), NULL); break;
    case 1: (void)galloc_pool_reserve(m->pool[op % POOLS], next_bytes(m)); break;
    case 2: op % 4 ? sim_run((long)op % 8) : new_stream(m, op % STREAMS); break;
    case 3:
        if (op % 8 == 0) set_fault(m);
        else if (b->ptr) (void)galloc_free((char *)b->ptr + 256, m->s[0]);
        break;
    case 4:
        if (b->ptr) do_resize(m, b);
        break;
    default:
        if (b->ptr) do_free(m, b);
        else do_malloc(m, b);
    }
}

/* The first byte: how the device goes on. The pools have `config`, and a limit. */
static void machine_begin(machine *m, const uint8_t *data, size_t size, const galloc_config *config)
{
    sim_options options = sim_defaults();
    uint32_t how;
    *m = (machine){.at = data, .end = data + size};
    how = next(m);
    options.memory = MIB(96);
    options.seed = how;
    options.pace = (int)(how % 3) - 1;
    require(sim_start(&options) == 0, "no device");
    for (int i = 0; i < STREAMS; i++) m->s[i] = stream_new();
    for (int i = 0; i < POOLS; i++) {
        galloc_config own = *config;
        own.memory_limit = MIB(48);
        own.expandable_segments = i == 0;
        own.reuse = (int)(how / 4 % 8);
        own.overhead = how & 32 ? 0 : 0.1;
        m->pool[i] = pool_new(&own);
    }
}

static void machine_end(machine *m)
{
    char leaked[256] = "";
    sim_fail_clear();
    for (int i = 0; i < POOLS; i++) require(galloc_pool_check(m->pool[i]) == 0, "the heap is broken");
    for (int i = 0; i < BLOCKS; i++)
        require(galloc_free(m->block[i].ptr, m->s[m->block[i].home]) == cudaSuccess, "a block cannot be freed");
    for (int i = 0; i < POOLS; i++)
        require(galloc_pool_destroy(m->pool[i]) == cudaSuccess, "a pool cannot be destroyed");
    require(galloc_shutdown() == cudaSuccess, "no shutdown");
    sim_run(-1);
    require(sim_findings(SIM_ANY) == 0, "the device found something");
    require(test_failures == 0, "a check failed");
    require(sim_leaks(leaked, sizeof leaked) == 0, leaked);
    require(sim_malloc_live() == 0, "host memory leaked");
    sim_stop();
}

#endif
