// typed.cpp - the overloads for typed pointers, against an implementation compiled as C or as C++.

#include "galloc.h"
#include "parts.h"

struct particle {
    float x, y, z, mass;
};

static bool is_of(const void *ptr, galloc_pool *pool, cudaStream_t stream, size_t bytes, size_t room)
{
    galloc_pointer info;
    unsigned long long id = 0;
    return ptr && cudaStreamGetId(stream, &id) == cudaSuccess && galloc_pointer_info(ptr, &info) == cudaSuccess &&
           info.pool == pool && info.stream_id == id && info.requested == bytes && (info.room >> 20) == (room >> 20);
}

/* Each overload hands on what it was given. */
static bool hands_all_on()
{
    const size_t mib = 1 << 20;
    galloc_pool *pool = nullptr, *own = nullptr;
    galloc_request request = galloc_request();
    cudaStream_t s = nullptr;
    double *p[4] = {nullptr, nullptr, nullptr, nullptr};
    bool ok = cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking) == cudaSuccess;
    ok = ok && galloc_pool_default(&pool, 0) == cudaSuccess && galloc_pool_create(&own, nullptr) == cudaSuccess;
    request.bytes = 3000;
    request.max_bytes = 96 * mib;
    request.stream = s;
    request.pool = own;
    ok = ok && galloc_malloc(&p[0], 2000, s) == cudaSuccess && is_of(p[0], pool, s, 2000, 2048);
    ok = ok && galloc_alloc(&p[1], &request) == cudaSuccess && is_of(p[1], own, s, 3000, 96 * mib);
    ok = ok && galloc_pool_malloc(own, &p[2], 4000, s) == cudaSuccess && is_of(p[2], own, s, 4000, 4096);
    ok = ok && galloc_malloc_growable(&p[3], 5000, 64 * mib, s) == cudaSuccess && is_of(p[3], pool, s, 5000, 64 * mib);
    for (int i = 0; i < 4; i++) ok = ok && galloc_free(p[i], s) == cudaSuccess;
    return ok && galloc_pool_destroy(own) == cudaSuccess && cudaStreamDestroy(s) == cudaSuccess;
}

/* Without a place for the address they fail as the untyped functions do, also for nothing. */
static bool wants_a_place(galloc_pool *pool, const galloc_request &request)
{
    float **none = nullptr;
    bool ok = true;
    for (size_t bytes = 0; bytes < 2; bytes++) {
        ok = ok && galloc_malloc(none, bytes, 0) == cudaErrorInvalidValue;
        ok = ok && galloc_malloc_growable(none, bytes, 2, 0) == cudaErrorInvalidValue;
        ok = ok && galloc_pool_malloc(pool, none, bytes, 0) == cudaErrorInvalidValue;
    }
    return ok && galloc_alloc(none, &request) == cudaErrorInvalidValue;
}

/* A request for nothing succeeds with NULL, whatever was there, and so for a pointer to constants. */
static bool gives_null_for_nothing(galloc_pool *pool, float *stale)
{
    galloc_request nothing = galloc_request();
    const float *c = stale;
    float *f[4] = {stale, stale, stale, stale};
    bool ok = galloc_malloc(&f[0], 0, 0) == cudaSuccess && galloc_malloc_growable(&f[1], 0, 4096, 0) == cudaSuccess;
    ok = ok && galloc_alloc(&f[2], &nothing) == cudaSuccess && galloc_pool_malloc(pool, &f[3], 0, 0) == cudaSuccess;
    for (int i = 0; i < 4; i++) ok = ok && !f[i] && galloc_free(f[i], 0) == cudaSuccess;
    return ok && galloc_malloc(&c, 0, 0) == cudaSuccess && !c;
}

int use_from_cpp()
{
    float *f = nullptr;
    particle *p = nullptr;
    void *v = nullptr;
    double *d = nullptr;
    float *g = nullptr;
    galloc_pool *pool = nullptr;
    galloc_request request = galloc_request();
    request.bytes = 64 * sizeof(particle);
    bool ok = hands_all_on() && galloc_pool_default(&pool, 0) == cudaSuccess;
    ok = ok && galloc_malloc(&f, 100 * sizeof(float), 0) == cudaSuccess && f;
    ok = ok && galloc_alloc(&p, &request) == cudaSuccess && p;
    ok = ok && galloc_malloc(&v, 100, 0) == cudaSuccess && v;
    ok = ok && galloc_pool_malloc(pool, &d, 800, 0) == cudaSuccess && d;
    ok = ok && galloc_malloc_growable(&g, 4, 64, 0) == cudaSuccess && g && galloc_free(g, 0) == cudaSuccess;
    ok = ok && galloc_free(f, 0) == cudaSuccess && galloc_free(p, 0) == cudaSuccess;
    ok = ok && galloc_free(v, 0) == cudaSuccess && galloc_free(d, 0) == cudaSuccess;
    const size_t too_much = ~static_cast<size_t>(0);
    float *stale = reinterpret_cast<float *>(&request);
    f = stale;
    ok = ok && galloc_malloc(&f, too_much, 0) == cudaErrorMemoryAllocation && !f;
    f = stale;
    ok = ok && galloc_malloc_growable(&f, 1, too_much, 0) != cudaSuccess && !f;
    f = stale;
    ok = ok && galloc_pool_malloc(pool, &f, too_much, 0) == cudaErrorMemoryAllocation && !f;
    f = stale;
    request.bytes = too_much;
    ok = ok && galloc_alloc(&f, &request) == cudaErrorMemoryAllocation && !f;
    f = stale;
    ok = ok && galloc_alloc(&f, nullptr) == cudaErrorInvalidValue && !f;
    f = stale;
    ok = ok && galloc_pool_malloc(nullptr, &f, 4, 0) == cudaErrorInvalidValue && !f;
    return ok && wants_a_place(pool, request) && gives_null_for_nothing(pool, stale) ? 0 : 1;
}
