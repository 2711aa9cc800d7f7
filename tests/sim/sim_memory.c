/* sim_memory.c - addresses, physical handles, mappings, cudaMalloc. */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "sim_internal.h"

/* In ledger mode addresses are only numbers, from a part of the address space where Linux puts nothing. */
#define LOWEST_ADDRESS  0x120000000000u
#define FIRST_ADDRESS   0x400000000000u
#define HIGHEST_ADDRESS 0x540000000000u

/* ---- what calls cost, by size ---------------------------------------------------------------------------------- */

struct CUmemPoolHandle_st {
    struct CUmemPoolHandle_st *next;
    int device;
    size_t most, reserved, reserved_high;
    uint64_t threshold;
    int follows, opportunistic, internal;
};

typedef struct price {
    double mib, us;
} price;

static const price malloc_price[] = {{0.0625, 2.1}, {1, 36}, {20, 54}, {256, 128}, {1024, 109}};
static const price free_price[] = {{0.0625, 2.1}, {1, 28}, {20, 58}, {256, 158}, {1024, 601}};
static const price create_price[] = {{2, 8}, {20, 10}, {64, 27}, {256, 15}, {1024, 44}};
static const price release_price[] = {{2, 14}, {20, 36}, {256, 124}, {1024, 408}};
static const price access_price[] = {{2, 24.5}, {32, 24.5}, {64, 50}, {1024, 90}};
static const price unmap_price[] = {{2, 14}, {32, 17}, {1024, 25}};

/* Between two measured sizes the price lies between theirs; above the largest it goes on rising, if it rose. */
static double price_of(const price *p, int n, size_t bytes) {
    double mib = (double)bytes / 1048576;
    if (mib <= p[0].mib) return p[0].us;
    int i = 1;
    while (i < n - 1 && mib > p[i].mib) i++;
    double slope = (p[i].us - p[i - 1].us) / (p[i].mib - p[i - 1].mib);
    if (mib > p[i].mib && slope < 0) slope = 0;
    return p[i].us + (mib - p[i].mib) * slope;
}

#define CHARGE(table, bytes, times) sm_charge(price_of(table, sizeof table / sizeof *table, bytes) * (double)(times))

/* ---- addresses ------------------------------------------------------------------------------------------------- */

/* How many regions begin at or below the address. */
static size_t regions_upto(uint64_t address) {
    size_t low = 0, high = sm.nregions;
    while (low < high) {
        size_t mid = (low + high) / 2;
        if (sm.regions[mid]->address <= address) low = mid + 1;
        else high = mid;
    }
    return low;
}

sm_region *sm_region_at(uint64_t address) {
    size_t i = regions_upto(address);
    sm_region *r = i ? sm.regions[i - 1] : NULL;
    return r && address - r->address < r->size ? r : NULL;
}

static bool range_is_free(uint64_t address, size_t size) {
    size_t i = regions_upto(address + size - 1);
    sm_region *r = i ? sm.regions[i - 1] : NULL;
    bool fits = address >= LOWEST_ADDRESS && size <= HIGHEST_ADDRESS && address <= HIGHEST_ADDRESS - size;
    return fits && (!r || r->address + r->size <= address);
}

/* A range of that size that was lately given back: addresses come again, as they do on a real device. */
static uint64_t take_freed(size_t size, size_t alignment) {
    for (int i = sm.nfreed - 1; i >= 0; i--) {
        uint64_t address = sm.freed[i].address;
        if (sm.freed[i].size != size || address % alignment || !range_is_free(address, size)) continue;
        memmove(&sm.freed[i], &sm.freed[i + 1], (size_t)(sm.nfreed - i - 1) * sizeof sm.freed[0]);
        sm.nfreed--;
        return address;
    }
    return 0;
}

static uint64_t first_gap(size_t size, size_t alignment) {
    uint64_t at = LOWEST_ADDRESS;
    for (size_t i = 0; i <= sm.nregions; i++) {
        at = sm_round_up(at, alignment);
        uint64_t end = i < sm.nregions ? sm.regions[i]->address : HIGHEST_ADDRESS;
        if (end > at && end - at >= size) return at;
        if (i < sm.nregions) at = sm.regions[i]->address + sm.regions[i]->size;
    }
    return 0;
}

static uint64_t number_range(size_t size, size_t alignment) {
    uint64_t address = take_freed(size, alignment);
    if (address) return address;
    uint64_t at = sm_round_up(sm.next_address, alignment);
    if (at + size > HIGHEST_ADDRESS || !range_is_free(at, size)) return first_gap(size, alignment);
    sm.next_address = at + size;
    return at;
}

static void *host_map(void *at, size_t size, int protection, int flags, int fd, int64_t offset) {
    void *p = mmap(at, size, protection, flags, fd, offset);
    if (p != MAP_FAILED) return p;
    fprintf(stderr, "sim: mmap of %zu bytes: %s%s\n", size, strerror(errno), errno == ENOMEM || errno == EAGAIN ?
            "; the host has no more mappings (vm.max_map_count) or memory: use fewer or larger handles" : "");
    return NULL;
}

static uint64_t host_range(size_t size, size_t alignment) {
    char *p = host_map(NULL, size + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (!p) return 0;
    size_t before = sm_round_up((uintptr_t)p, alignment) - (uintptr_t)p;
    if (before) munmap(p, before);
    if (alignment - before) munmap(p + before + size, alignment - before);
    return (uint64_t)(uintptr_t)(p + before);
}

static sm_region *region_new(uint64_t address, size_t size) {
    sm_region *r = sm_alloc(sizeof *r);
    r->address = address;
    r->size = size;
    sm.regions = sm_grow(sm.regions, sm.nregions, &sm.capregions, sizeof *sm.regions);
    size_t i = regions_upto(address);
    memmove(&sm.regions[i + 1], &sm.regions[i], (sm.nregions++ - i) * sizeof *sm.regions);
    sm.regions[i] = r;
    return r;
}

static sm_region *region_make(size_t size, size_t alignment) {
    uint64_t address = sm_backed() ? host_range(size, alignment) : number_range(size, alignment);
    return address ? region_new(address, size) : NULL;
}

static void region_drop(sm_region *r) {
    size_t i = regions_upto(r->address) - 1;
    memmove(&sm.regions[i], &sm.regions[i + 1], (--sm.nregions - i) * sizeof *sm.regions);
    if (sm_backed()) munmap((void *)(uintptr_t)r->address, r->size);
    else {
        enum { ROOM = sizeof sm.freed / sizeof sm.freed[0] };
        if (sm.nfreed == ROOM) memmove(sm.freed, sm.freed + 1, (size_t)--sm.nfreed * sizeof sm.freed[0]);
        sm.freed[sm.nfreed].address = r->address;
        sm.freed[sm.nfreed++].size = r->size;
    }
    sm_clock_drop(r->freed.clock);
    free(r->slot);
    free(r->slab);
    free(r);
}

/* ---- physical memory ------------------------------------------------------------------------------------------- */

static bool handle_back(sm_handle *h) {
    if (!sm_backed()) return true;
    sm_device *d = &sm.device[h->device];
    h->offset = d->offset;
    if (ftruncate(d->memfd, h->offset + (int64_t)h->size)) return false;
    h->view = host_map(NULL, h->size, PROT_READ | PROT_WRITE, MAP_SHARED, d->memfd, h->offset);
    if (!h->view) return false;
    d->offset += (int64_t)sm_round_up(h->size, SM_PAGE);
    return true;
}

static void handle_free(sm_handle *h) {
    if (h->view) {
        munmap(h->view, h->size);
        if (!sm.forked) /* else it is the parent's memory */
            fallocate(sm.device[h->device].memfd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, h->offset,
                      (off_t)h->size);
    }
    sm_pages_drop(h);
    free(h);
}

static void async_make_room(void);

static sm_handle *handle_new(int device, size_t size) {
    sm_device *d = &sm.device[device];
    if (size > d->has.memory - d->used) async_make_room();
    if (size > d->has.memory - d->used) return NULL;
    sm_handle *h = sm_alloc(sizeof *h);
    h->size = size;
    h->device = device;
    h->page = sm_alloc((size + SM_PAGE - 1) / SM_PAGE * sizeof *h->page);
    if (!handle_back(h)) {
        sm_pages_drop(h);
        free(h);
        return NULL;
    }
    h->held = h->counted = true;
    d->used += size;
    if (d->peak < d->used) d->peak = d->used;
    return h;
}

/* Physical memory is held until the last unmap and the release; the description also by operations. */
void sm_handle_settle(sm_handle *h) {
    if (h->held || h->maps) return;
    if (h->counted) sm.device[h->device].used -= h->size;
    if (h->counted && h->rdma) sm.device[h->device].rdma -= h->size;
    h->counted = false;
    if (!h->users) handle_free(h);
}

static sm_handle *handle_of(CUmemGenericAllocationHandle id) {
    size_t place = (size_t)(id & 0xffffffff);
    sm_handle *h = place && place <= sm.nhandles ? sm.handles[place - 1] : NULL;
    return h && h->id == id ? h : NULL;
}

static void handle_register(sm_handle *h) {
    size_t place;
    if (sm.nfree_handles) place = sm.free_handles[--sm.nfree_handles];
    else {
        sm.handles = sm_grow(sm.handles, sm.nhandles, &sm.caphandles, sizeof *sm.handles);
        place = sm.nhandles++;
    }
    sm.handles[place] = h;
    h->id = (uint64_t)++sm.handle_serial << 32 | (place + 1);
}

static void handle_unregister(sm_handle *h) {
    size_t place = (size_t)(h->id & 0xffffffff) - 1;
    sm.handles[place] = NULL;
    sm.free_handles = sm_grow(sm.free_handles, sm.nfree_handles, &sm.capfree_handles, sizeof *sm.free_handles);
    sm.free_handles[sm.nfree_handles++] = (uint32_t)place;
}

/* ---- mappings -------------------------------------------------------------------------------------------------- */

static sm_mapping *mapping_new(uint64_t address, sm_handle *h, int protection) {
    if (sm_backed() && !host_map((void *)(uintptr_t)address, h->size, protection, MAP_SHARED | MAP_FIXED,
                              sm.device[h->device].memfd, h->offset))
        return NULL;
    sm_mapping *m = sm_alloc(sizeof *m);
    m->address = address;
    m->handle = h;
    h->maps++;
    sm.device[h->device].mapped += h->size;
    return m;
}

/* Where the host has no mapping to spare for the hole, the page stays there, out of reach. */
static void host_unmap(void *at, size_t size) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    if (mmap(at, size, PROT_NONE, flags, -1, 0) == MAP_FAILED) mprotect(at, size, PROT_NONE);
}

static void mapping_drop(sm_mapping *m) {
    sm_handle *h = m->handle;
    if (sm_backed()) host_unmap((void *)(uintptr_t)m->address, h->size);
    sm.device[h->device].mapped -= h->size;
    sm_front_drop(&m->uses);
    free(m);
    h->maps--;
    sm_handle_settle(h);
}

/* An address may be taken away only once the host has seen the end of all that uses it. */
static void check_unused(const sm_mapping *m) {
    if (sm_host_knows(&m->uses)) return;
    sm_epoch e = m->uses.last;
    sm_find(SIM_UNMAP_IN_USE, "%p goes away, and nobody has seen operation %llu of stream %llu complete, which uses it",
            (void *)(uintptr_t)m->address, (unsigned long long)e.no, sm.streams[e.stream]->id);
}

static sm_mapping *slab_mapping(const sm_region *r, uint64_t address, size_t *left) {
    size_t unit = (address - r->address) / SM_UNIT, end = unit;
    while (end < SM_UNITS && r->slab->taken[end] == r->slab->taken[unit]) end++;
    *left = r->address + end * SM_UNIT - address;
    return r->slab->taken[unit] ? r->whole : NULL;
}

/* What is mapped at the address, and for how many bytes from there the answer is the same. */
sm_mapping *sm_mapping_at(uint64_t address, size_t *left) {
    sm_region *r = sm_region_at(address);
    if (!r) {
        size_t next = regions_upto(address);
        *left = next < sm.nregions ? sm.regions[next]->address - address : SIZE_MAX - address;
        return NULL;
    }
    if (r->slab) return slab_mapping(r, address, left);
    size_t granule = (address - r->address) / sm.granule;
    sm_mapping *m = r->whole ? r->whole : r->slot[granule];
    *left = (m ? m->address + m->handle->size : r->address + (granule + 1) * sm.granule) - address;
    return m;
}

/* The block of cudaMalloc, or the mapping, that contains the address. */
int sm_address_range(CUdeviceptr *base, size_t *size, uint64_t address) {
    size_t left;
    sm_mapping *m = sm_mapping_at(address, &left);
    sm_region *r = sm_region_at(address);
    if (!m) return E_NOT_FOUND;
    uint64_t begin = m->address, bytes = m->handle->size;
    if (r->slab) {
        size_t unit = (address - r->address) / SM_UNIT;
        while (!r->slab->length[unit]) unit--;
        begin = r->address + unit * SM_UNIT;
        bytes = (uint64_t)r->slab->length[unit] * SM_UNIT;
    }
    if (base) *base = begin;
    if (size) *size = bytes;
    return 0;
}

/* ---- cuMem..., the functions ------------------------------------------------------------------------------------ */

static bool is_granular(size_t n) { return n && n % sm.granule == 0; }

static sm_region *reserved_at(uint64_t address, size_t size) {
    sm_region *r = sm_region_at(address);
    bool inside = r && r->slot && address + size > address && address + size <= r->address + r->size;
    return inside && address % sm.granule == 0 && is_granular(size) ? r : NULL;
}

static sm_mapping **slot_of(sm_region *r, uint64_t address) {
    return &r->slot[(address - r->address) / sm.granule];
}

int sm_reserve(CUdeviceptr *out, size_t size, size_t alignment, uint64_t hint) {
    if (!sm.opt.vmm) return E_NOT_SUPPORTED;
    if (!out || !is_granular(size) || (alignment & (alignment - 1))) return E_VALUE;
    if (alignment < sm.granule) alignment = sm.granule;
    sm_region *r = NULL;
    if (!sm_backed() && hint && hint % alignment == 0 && range_is_free(hint, size)) r = region_new(hint, size);
    else if (size < HIGHEST_ADDRESS) r = region_make(size, alignment);
    if (!r) return E_MEMORY;
    r->slot = sm_alloc(size / sm.granule * sizeof *r->slot);
    sm.addresses += size;
    *out = r->address;
    return 0;
}

int sm_unreserve(uint64_t address, size_t size) {
    if (!sm.opt.vmm) return E_NOT_SUPPORTED;
    sm_region *r = sm_region_at(address);
    if (!r || !r->slot || r->address != address || r->size != size || r->mapped) return E_VALUE;
    sm.addresses -= size;
    region_drop(r);
    return 0;
}

static int check_prop(const CUmemAllocationProp *prop) {
    if (!sm.opt.vmm) return E_NOT_SUPPORTED;
    if (!prop || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED || prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return E_VALUE;
    if (prop->location.id < 0 || prop->location.id >= sm.opt.devices) return E_DEVICE;
    const sim_unlike *has = &sm.device[prop->location.id].has;
    return has->no_vmm || (prop->allocFlags.gpuDirectRDMACapable && has->no_rdma) ? E_NOT_SUPPORTED : 0;
}

int sm_granularity(size_t *out, const CUmemAllocationProp *prop) {
    int error = check_prop(prop);
    if (error || !out) return error ? error : E_VALUE;
    *out = sm.device[prop->location.id].has.granularity;
    return 0;
}

int sm_create(CUmemGenericAllocationHandle *out, size_t size, const CUmemAllocationProp *prop) {
    int error = check_prop(prop);
    if (error) return error;
    if (!out || !size || size % sm.device[prop->location.id].has.granularity) return E_VALUE;
    sm_handle *h = handle_new(prop->location.id, size);
    if (!h) return E_MEMORY;
    handle_register(h);
    h->rdma = prop->allocFlags.gpuDirectRDMACapable != 0;
    if (h->rdma) sm.device[h->device].rdma += size;
    CHARGE(create_price, size, 1);
    *out = h->id;
    return 0;
}

int sm_release(CUmemGenericAllocationHandle id) {
    if (!sm.opt.vmm) return E_NOT_SUPPORTED;
    sm_handle *h = handle_of(id);
    if (!h) return E_VALUE;
    CHARGE(release_price, h->size, 1);
    handle_unregister(h);
    h->held = false;
    sm_handle_settle(h);
    return 0;
}

int sm_map(uint64_t address, size_t size, size_t offset, CUmemGenericAllocationHandle id) {
    if (!sm.opt.vmm) return E_NOT_SUPPORTED;
    sm_handle *h = handle_of(id);
    sm_region *r = reserved_at(address, size);
    if (!h || !r) return E_VALUE;
    if (offset || size != h->size) return E_NOT_SUPPORTED;
    if (address % sm.device[h->device].has.granularity) return E_VALUE;
    for (uint64_t a = address; a < address + size; a += sm.granule)
        if (*slot_of(r, a)) return E_VALUE;
    sm_mapping *m = mapping_new(address, h, PROT_NONE);
    if (!m) return E_MEMORY;
    for (uint64_t a = address; a < address + size; a += sm.granule) *slot_of(r, a) = m;
    r->mapped++;
    return 0;
}

/* The reservation, if the range is filled by whole mappings without a gap. */
static sm_region *whole_mappings(uint64_t address, size_t size) {
    sm_region *r = reserved_at(address, size);
    for (uint64_t a = address; r && a < address + size;) {
        sm_mapping *m = *slot_of(r, a);
        if (!m || m->address != a || a + m->handle->size > address + size) return NULL;
        a += m->handle->size;
    }
    return r;
}

int sm_unmap(uint64_t address, size_t size) {
    if (!sm.opt.vmm) return E_NOT_SUPPORTED;
    sm_region *r = whole_mappings(address, size);
    if (!r) return E_VALUE;
    if (sm.pending) sm.unmapped_under_work += size;
    for (uint64_t a = address, next; a < address + size; a = next) {
        sm_mapping *m = *slot_of(r, a);
        next = a + m->handle->size;
        check_unused(m);
        CHARGE(unmap_price, m->handle->size, 1);
        for (uint64_t b = a; b < next; b += sm.granule) *slot_of(r, b) = NULL;
        r->mapped--;
        mapping_drop(m);
    }
    return 0;
}

static int check_desc(const CUmemAccessDesc *desc, size_t count) {
    if (!desc || !count) return E_VALUE;
    for (size_t i = 0; i < count; i++) {
        if (desc[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE) return E_VALUE;
        if (desc[i].location.id < 0 || desc[i].location.id >= sm.opt.devices) return E_DEVICE;
    }
    return 0;
}

static void mapping_open(sm_mapping *m, const CUmemAccessDesc *desc, size_t count) {
    for (size_t i = 0; i < count; i++) {
        unsigned bit = 1u << desc[i].location.id, flags = (unsigned)desc[i].flags;
        m->read = flags & 1 ? m->read | bit : m->read & ~bit;
        m->write = flags & 2 ? m->write | bit : m->write & ~bit;
    }
    if (!sm_backed()) return;
    int protection = (m->read ? PROT_READ : 0) | (m->write ? PROT_WRITE : 0);
    mprotect((void *)(uintptr_t)m->address, m->handle->size, protection);
}

int sm_set_access(uint64_t address, size_t size, const CUmemAccessDesc *desc, size_t count) {
    if (!sm.opt.vmm) return E_NOT_SUPPORTED;
    sm_region *r = whole_mappings(address, size);
    int error = check_desc(desc, count);
    if (!r || error) return r ? error : E_VALUE;
    for (uint64_t a = address; a < address + size;) {
        sm_mapping *m = *slot_of(r, a);
        CHARGE(access_price, m->handle->size, count);
        mapping_open(m, desc, count);
        a += m->handle->size;
    }
    return 0;
}

/* ---- cudaMalloc ------------------------------------------------------------------------------------------------- */

/* A region that is wholly mapped to a handle of its own. */
static sm_region *region_filled(sm_context *c, size_t size) {
    sm_handle *h = handle_new(c->device, size);
    if (!h) return NULL;
    h->held = false; /* only the mapping holds it */
    sm_region *r = region_make(size, SM_PAGE);
    sm_mapping *m = r ? mapping_new(r->address, h, PROT_READ | PROT_WRITE) : NULL;
    if (!m) {
        if (r) region_drop(r);
        sm_handle_settle(h);
        return NULL;
    }
    m->read = m->write = 1u << c->device;
    m->plain = true;
    r->whole = m;
    r->context = c;
    return r;
}

static void remove_region(sm_region **list, size_t *n, sm_region *r) {
    size_t i = 0;
    while (list[i] != r) i++;
    memmove(&list[i], &list[i + 1], (--*n - i) * sizeof *list);
}

static void region_empty(sm_region *r) {
    if (r->slab) remove_region(sm.slabs, &sm.nslabs, r);
    if (r->pool) r->pool->reserved -= r->size;
    sm.ngraph_regions -= r->graph != NULL;
    if (r->freed.stream) remove_region(sm.async, &sm.nasync, r);
    mapping_drop(r->whole);
    region_drop(r);
}

/* The first run of free units that is long enough, or -1. */
static int slab_room(const sm_slab *s, int units) {
    for (int i = 0, run = 0; i < SM_UNITS; i++) {
        run = s->taken[i] ? 0 : run + 1;
        if (run == units) return i + 1 - units;
    }
    return -1;
}

static uint64_t slab_take(sm_region *r, int at, int units) {
    memset(&r->slab->taken[at], 1, (size_t)units);
    r->slab->length[at] = (uint16_t)units;
    r->slab->blocks++;
    return r->address + (uint64_t)at * SM_UNIT;
}

static int malloc_small(sm_context *c, uint64_t *out, size_t bytes) {
    int units = (int)((bytes + SM_UNIT - 1) / SM_UNIT);
    for (size_t i = 0; i < sm.nslabs; i++) {
        if (sm.slabs[i]->context != c || SM_UNITS - units < sm.slabs[i]->slab->blocks) continue;
        int at = slab_room(sm.slabs[i]->slab, units);
        if (at < 0) continue;
        *out = slab_take(sm.slabs[i], at, units);
        return 0;
    }
    sm_region *r = region_filled(c, SM_PAGE);
    if (!r) return E_MEMORY;
    r->slab = sm_alloc(sizeof *r->slab);
    sm.slabs = sm_grow(sm.slabs, sm.nslabs, &sm.capslabs, sizeof *sm.slabs);
    sm.slabs[sm.nslabs++] = r;
    *out = slab_take(r, 0, units);
    return 0;
}

int sm_malloc_block(uint64_t *out, size_t bytes) {
    if (!out || !bytes) return E_VALUE;
    sm_context *c = sm_current();
    if (bytes > sm.device[c->device].has.memory) return E_MEMORY;
    if (bytes < (size_t)1 << 20) {
        int error = malloc_small(c, out, bytes);
        if (!error) CHARGE(malloc_price, bytes, 1);
        return error;
    }
    sm_region *r = region_filled(c, sm_round_up(bytes, SM_PAGE));
    if (!r) return E_MEMORY;
    CHARGE(malloc_price, bytes, 1);
    *out = r->address;
    return 0;
}

static int free_now(sm_region *r);

/* Memory of a context with a sticky error goes with the context. */
static int wait_for_free(sm_context *c) { return c->sticky ? c->sticky : sm_wait_context(c); }

/* Waits for the device, as the real one does; not for what was allocated in stream order, which nobody may use then. */
int sm_free_block(uint64_t address) {
    if (!address) return 0;
    sm_region *r = sm_region_at(address);
    if (!r || r->slot || r->freed.stream) return E_VALUE;
    if ((r->pool || r->graph) && address == r->address) return free_now(r);
    size_t unit = (address - r->address) / SM_UNIT;
    bool begins = r->slab ? address % SM_UNIT == 0 && r->slab->length[unit] : address == r->address;
    if (!begins) return E_VALUE;
    int error = wait_for_free(r->context);
    if (error) return error;
    CHARGE(free_price, r->slab ? r->slab->length[unit] * (size_t)SM_UNIT : r->size, 1);
    if (r->slab) {
        memset(&r->slab->taken[unit], 0, r->slab->length[unit]);
        r->slab->length[unit] = 0;
        if (--r->slab->blocks) return 0;
    }
    region_empty(r);
    return 0;
}

/* ---- cudaMallocAsync: whole regions, kept from a free to the next synchronising call ----------------------------- */

/* A pool's memory is on the pool's device, whoever asks for it; else it is on the stream's. No context but the primary
   one of the device owns it. */
static int async_device(const sm_stream *s, const struct CUmemPoolHandle_st *pool) {
    return pool ? pool->device : s->context->device;
}

static sm_region *async_reuse(sm_stream *s, size_t size, const struct CUmemPoolHandle_st *pool) {
    int device = async_device(s, pool);
    for (size_t i = sm.nasync; i-- > 0;) {
        sm_region *r = sm.async[i];
        sm_stream *by = r->freed.stream;
        bool before = sm_before(s, (sm_epoch){by->index, r->freed.no}), done = by->done >= r->freed.no;
        if (pool && by != s) before = before && pool->follows;
        if (pool && by != s) done = done && pool->opportunistic;
        if (r->size != size || r->whole->handle->device != device || r->pool != pool || !(before || done)) continue;
        if (r->freed.no) sm_after(s, &r->freed);
        remove_region(sm.async, &sm.nasync, r);
        sm_stamp_set(&r->freed, (sm_stamp){NULL, 0, NULL});
        r->whole->read = r->whole->write = 1u << device;
        return r;
    }
    return NULL;
}

static int async_stream(CUstream handle, sm_stream **s) {
    int error = sm_stream_find(handle, s);
    return error ? error : sm_usable(*s);
}

/* Gives back what a pool keeps and nothing that runs may use. */
static void pool_empty(const struct CUmemPoolHandle_st *pool, size_t keep) {
    for (size_t i = sm.nasync; i-- > 0;) {
        sm_region *r = sm.async[i];
        if (r->pool == pool && pool->reserved > keep && r->freed.no <= r->freed.stream->done) region_empty(r);
    }
}

static sm_region *async_new(sm_stream *s, size_t size, struct CUmemPoolHandle_st *pool) {
    if (pool && pool->most && pool->reserved + size > pool->most) pool_empty(pool, 0);
    if (pool && pool->most && pool->reserved + size > pool->most) return NULL;
    sm_region *r = region_filled(&sm.device[async_device(s, pool)].primary, size);
    if (r) r->whole->plain = false; /* cudaDeviceEnablePeerAccess does not open it */
    if (!r || !pool) return r;
    r->pool = pool;
    pool->reserved += size;
    if (pool->reserved_high < pool->reserved) pool->reserved_high = pool->reserved;
    return r;
}

/* A node of the graph allocates it when that is launched. Here it is there from now on until the graph goes. */
static int malloc_in_capture(uint64_t *out, size_t size, sm_stream *s) {
    sm_region *r = sm_capture_lost(s->capture) ? NULL : region_filled(s->context, size);
    if (!r) return sm_capture_lost(s->capture) ? E_CAPTURE_LOST : E_MEMORY;
    r->graph = sm_capture_graph(s->capture);
    sm.ngraph_regions++;
    *out = r->address;
    return 0;
}

int sm_malloc_async(uint64_t *out, size_t bytes, CUmemoryPool pool, CUstream stream) {
    sm_stream *s;
    size_t size = sm_round_up(bytes, SM_PAGE);
    int error = async_stream(stream, &s);
    if (error || !out || !bytes) return error ? error : E_VALUE;
    const sim_unlike *has = &sm.device[async_device(s, pool)].has;
    if (has->no_pools) return E_NOT_SUPPORTED;
    if (bytes > has->memory) return E_MEMORY;
    if (s->capture) return malloc_in_capture(out, size, s);
    if (!pool) pool = sm.device[s->context->device].pool;
    sm_region *r = async_reuse(s, size, pool);
    if (!r) r = async_new(s, size, pool);
    if (!r) return E_MEMORY;
    *out = r->address;
    return 0;
}

/* The program frees what a node of a graph has allocated. */
static int free_of_graph(sm_region *r) {
    if (!r->ran || r->node_frees || r->away) return E_VALUE;
    r->away = true;
    return 0;
}

static void async_add(sm_region *r, sm_stamp freed) {
    r->freed = freed;
    r->whole->read = r->whole->write = 0;
    sm.async = sm_grow(sm.async, sm.nasync, &sm.capasync, sizeof *sm.async);
    sm.async[sm.nasync++] = r;
}

static int free_async(sm_region *r, sm_stream *s) {
    if (r->graph) return free_of_graph(r);
    sm_queue(s, OP_MARK);
    async_add(r, sm_stamp_of(s));
    return 0;
}

/* By cuMemFree: anybody may have it at once. */
static int free_now(sm_region *r) {
    check_unused(r->whole);
    if (r->graph) return free_of_graph(r);
    async_add(r, (sm_stamp){sm_current()->legacy, 0, NULL});
    return 0;
}

/* A captured free is of what was allocated in the same capture. */
static int free_in_capture(sm_region *r, const sm_stream *s) {
    if (sm_capture_lost(s->capture)) return E_CAPTURE_LOST;
    if (r->graph != sm_capture_graph(s->capture) || r->node_frees) return E_VALUE;
    r->node_frees = true;
    return 0;
}

int sm_free_async(uint64_t address, CUstream stream) {
    sm_stream *s;
    int error = async_stream(stream, &s);
    if (error) return error;
    sm_region *r = sm_region_at(address);
    if (!r || r->slot || r->freed.stream) return E_VALUE;
    if (r->slab) return s->capture ? E_VALUE : sm_free_block(address); /* no graph allocated it */
    return s->capture ? free_in_capture(r, s) : free_async(r, s);
}

/* A synchronising call gives back what was freed before what it waited for. */
void sm_trim_async(void) {
    for (size_t i = sm.nasync; i-- > 0;) {
        sm_region *r = sm.async[i];
        if (r->freed.no > sm.host[r->freed.stream->index]) continue;
        if (r->pool && r->pool->reserved <= r->pool->threshold) continue;
        check_unused(r->whole);
        region_empty(r);
    }
}

/* Out of memory: the driver gives back what it knows to be free, though the program may not know it. */
static void async_make_room(void) {
    for (size_t i = sm.nasync; i-- > 0;)
        if (sm.async[i]->freed.no <= sm.async[i]->freed.stream->done) region_empty(sm.async[i]);
}

/* What an instance that is launched allocates must not be there yet. */
int sm_graph_memory_launch(const sm_graph *g) {
    for (size_t i = 0; sm.ngraph_regions && i < sm.nregions; i++) {
        const sm_region *r = sm.regions[i];
        if (r->graph == g && r->ran && !r->node_frees && !r->away) return E_VALUE;
    }
    for (size_t i = 0; sm.ngraph_regions && i < sm.nregions; i++) {
        sm_region *r = sm.regions[i];
        if (r->graph != g) continue;
        r->ran = true;
        r->away = false;
    }
    return 0;
}

/* What it allocated and nobody has freed stays until somebody does. */
void sm_graph_memory_drop(const sm_graph *g) {
    for (size_t i = sm.nregions; sm.ngraph_regions && i-- > 0;) {
        sm_region *r = sm.regions[i];
        if (r->graph != g) continue;
        if (!r->ran || r->node_frees || r->away) {
            region_empty(r);
        } else {
            r->graph = NULL;
            sm.ngraph_regions--;
        }
    }
}

/* ---- pools of the program's own ---------------------------------------------------------------------------------- */

static bool is_pool(const struct CUmemPoolHandle_st *pool) {
    const struct CUmemPoolHandle_st *p = sm.pools;
    while (p && p != pool) p = p->next;
    return p && pool;
}

static struct CUmemPoolHandle_st *pool_new(int device) {
    struct CUmemPoolHandle_st *pool = sm_alloc(sizeof *pool);
    pool->follows = pool->opportunistic = pool->internal = 1;
    pool->device = device;
    pool->next = sm.pools;
    return sm.pools = pool;
}

int sm_pool_create(CUmemoryPool *out, const CUmemPoolProps *props) {
    if (!out || !props || props->allocType != CU_MEM_ALLOCATION_TYPE_PINNED ||
        props->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return E_VALUE;
    if (props->location.id < 0 || props->location.id >= sm.opt.devices) return E_DEVICE;
    if (sm.device[props->location.id].has.no_pools) return E_NOT_SUPPORTED;
    *out = pool_new(props->location.id);
#if CUDA_VERSION >= 12020
    (*out)->most = props->maxSize;
#endif
    return 0;
}

/* What cudaMallocAsync took before the first call of this stays outside the pool's figures. */
int sm_pool_default(CUmemoryPool *out, int device) {
    if (!out) return E_VALUE;
    if (device < 0 || device >= sm.opt.devices) return E_DEVICE;
    if (sm.device[device].has.no_pools) return E_NOT_SUPPORTED;
    if (!sm.device[device].pool) sm.device[device].pool = pool_new(device);
    *out = sm.device[device].pool;
    return 0;
}

/* What is still in use, or may be, is the device's own from then on. */
int sm_pool_destroy(CUmemoryPool pool) {
    if (!is_pool(pool) || pool == sm.device[pool->device].pool) return E_VALUE;
    pool_empty(pool, 0);
    for (size_t i = 0; i < sm.nregions; i++)
        if (sm.regions[i]->pool == pool) sm.regions[i]->pool = NULL;
    struct CUmemPoolHandle_st **at = &sm.pools;
    while (*at != pool) at = &(*at)->next;
    *at = pool->next;
    free(pool);
    return 0;
}

int sm_pool_set(CUmemoryPool pool, int attribute, const void *value) {
    if (!is_pool(pool) || !value) return E_VALUE;
    switch (attribute) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES: pool->follows = *(const int *)value; break;
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC: pool->opportunistic = *(const int *)value; break;
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES: pool->internal = *(const int *)value; break;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: pool->threshold = *(const uint64_t *)value; break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH: pool->reserved_high = pool->reserved; break;
    default: return E_VALUE;
    }
    return 0;
}

int sm_pool_get(CUmemoryPool pool, int attribute, void *value) {
    if (!is_pool(pool) || !value) return E_VALUE;
    switch (attribute) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES: *(int *)value = pool->follows; break;
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC: *(int *)value = pool->opportunistic; break;
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES: *(int *)value = pool->internal; break;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: *(uint64_t *)value = pool->threshold; break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT: *(uint64_t *)value = pool->reserved; break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH: *(uint64_t *)value = pool->reserved_high; break;
    default: return E_VALUE;
    }
    return 0;
}

int sm_pool_trim(CUmemoryPool pool, size_t keep) {
    if (!is_pool(pool)) return E_VALUE;
    pool_empty(pool, keep);
    return 0;
}

/* ---- host memory ------------------------------------------------------------------------------------------------ */

int sm_host_malloc(void **out, size_t bytes) {
    if (!out || !bytes) return E_VALUE;
    void *p;
    if (posix_memalign(&p, 4096, bytes)) return E_MEMORY;
    memset(p, 0, bytes);
    sm.pinned = sm_grow(sm.pinned, sm.npinned, &sm.cappinned, sizeof *sm.pinned);
    sm.pinned[sm.npinned++] = (struct sm_pinned){p, bytes, sm_current(), false};
    *out = p;
    return 0;
}

/* Memory of the program's own counts as pinned until it is taken back. */
int sm_host_register(void *p, size_t bytes) {
    if (!p || !bytes) return E_VALUE;
    if (sm_is_pinned(p, 1)) return E_REGISTERED;
    sm.pinned = sm_grow(sm.pinned, sm.npinned, &sm.cappinned, sizeof *sm.pinned);
    sm.pinned[sm.npinned++] = (struct sm_pinned){p, bytes, sm_current(), true};
    return 0;
}

static size_t pinned_at(const void *p) {
    size_t i = 0;
    while (i < sm.npinned && sm.pinned[i].p != p) i++;
    return i;
}

/* Waits for the device, as sm_free_block does. The lock may be given back meanwhile. */
int sm_host_free(void *p) {
    if (!p) return 0;
    size_t i = pinned_at(p);
    if (i == sm.npinned || sm.pinned[i].theirs) return E_VALUE;
    int error = wait_for_free(sm.pinned[i].context);
    if (error) return error;
    i = pinned_at(p);
    if (i == sm.npinned || sm.pinned[i].theirs) return E_VALUE;
    free(p);
    sm.pinned[i] = sm.pinned[--sm.npinned];
    return 0;
}

int sm_host_unregister(void *p) {
    size_t i = pinned_at(p);
    if (i == sm.npinned || !sm.pinned[i].theirs) return E_NOT_REGISTERED;
    int error = wait_for_free(sm.pinned[i].context);
    if (error) return error;
    i = pinned_at(p);
    if (i < sm.npinned) sm.pinned[i] = sm.pinned[--sm.npinned];
    return 0;
}

bool sm_is_pinned(const void *p, size_t bytes) {
    uintptr_t at = (uintptr_t)p;
    for (size_t i = 0; i < sm.npinned; i++) {
        uintptr_t begin = (uintptr_t)sm.pinned[i].p;
        if (at >= begin && at - begin + bytes <= sm.pinned[i].size) return true;
    }
    return false;
}

int sm_mem_info(size_t *left, size_t *total) {
    if (!left || !total) return E_VALUE;
    const sm_device *d = &sm.device[sm_current()->device];
    *total = d->has.memory;
    *left = d->has.memory - d->used;
    return 0;
}

/* ---- start, end, and what was left ------------------------------------------------------------------------------- */

int sm_memory_start(void) {
    sm.next_address = FIRST_ADDRESS;
    for (int d = 0; sm_backed() && d < sm.opt.devices; d++) {
        sm.device[d].memfd = memfd_create("simulated device", MFD_CLOEXEC);
        if (sm.device[d].memfd < 0) {
            perror("sim: memfd_create");
            return -1;
        }
    }
    return 0;
}

void sm_memory_of_context_dies(sm_context *c) {
    for (size_t i = sm.nregions; i-- > 0;)
        if (sm.regions[i]->context == c) region_empty(sm.regions[i]);
    for (size_t i = sm.npinned; i-- > 0;) {
        if (sm.pinned[i].context != c) continue;
        if (!sm.pinned[i].theirs) free(sm.pinned[i].p);
        sm.pinned[i] = sm.pinned[--sm.npinned];
    }
}

static void region_clear(sm_region *r) {
    for (uint64_t a = r->address; r->slot && r->mapped && a < r->address + r->size;) {
        sm_mapping *m = *slot_of(r, a);
        a += m ? m->handle->size : sm.granule;
        if (!m) continue;
        r->mapped--;
        mapping_drop(m);
    }
    if (r->slot) region_drop(r);
    else region_empty(r);
}

void sm_memory_clear(void) {
    for (int d = 0; d < sm.opt.devices; d++) sm.device[d].pool = NULL;
    for (struct CUmemPoolHandle_st *p = sm.pools, *next; p; p = next) next = p->next, sm_pool_destroy(p);
    while (sm.nregions) region_clear(sm.regions[sm.nregions - 1]);
    for (size_t i = 0; i < sm.nhandles; i++)
        if (sm.handles[i]) handle_free(sm.handles[i]);
    for (size_t i = 0; i < sm.npinned; i++)
        if (!sm.pinned[i].theirs) free(sm.pinned[i].p);
    for (int d = 0; sm_backed() && d < sm.opt.devices; d++) close(sm.device[d].memfd);
    void *rest[] = {sm.regions, sm.slabs, sm.async, sm.handles, sm.free_handles, sm.pinned};
    for (size_t i = 0; i < sizeof rest / sizeof *rest; i++) free(rest[i]);
}

size_t sm_memory_leaks(char *text, size_t size) {
    size_t handles = 0, mappings = 0, reservations = 0, blocks = 0, pinned = 0;
    for (size_t i = 0; i < sm.nhandles; i++) handles += sm.handles[i] != NULL;
    for (size_t i = 0; i < sm.nregions; i++) {
        const sm_region *r = sm.regions[i];
        reservations += r->slot != NULL;
        mappings += (size_t)r->mapped;
        blocks += r->slab ? (size_t)r->slab->blocks : r->whole && !r->freed.stream && !(r->graph && !r->ran);
    }
    for (size_t i = 0; i < sm.npinned; i++) pinned += !sm.pinned[i].theirs && sm.pinned[i].context->live;
    size_t all = handles + mappings + reservations + blocks + pinned;
    if (all && size)
        snprintf(text, size, "%zu handles, %zu mappings, %zu reservations, %zu cudaMalloc blocks, %zu pinned\n",
                 handles, mappings, reservations, blocks, pinned);
    return all;
}
