// typed.cpp - the overloads for typed pointers, against an implementation compiled as C or as C++.

#include "galloc.h"
#include "parts.h"

struct particle {
    float x, y, z, mass;
};

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
    bool ok = galloc_pool_default(&pool, 0) == cudaSuccess;
    ok = ok && galloc_malloc(&f, 100 * sizeof(float), 0) == cudaSuccess && f;
    ok = ok && galloc_alloc(&p, &request) == cudaSuccess && p;
    ok = ok && galloc_malloc(&v, 100, 0) == cudaSuccess && v;
    ok = ok && galloc_pool_malloc(pool, &d, 800, 0) == cudaSuccess && d;
    ok = ok && galloc_malloc_growable(&g, 4, 64, 0) == cudaSuccess && g && galloc_free(g, 0) == cudaSuccess;
    ok = ok && galloc_free(f, 0) == cudaSuccess && galloc_free(p, 0) == cudaSuccess;
    ok = ok && galloc_free(v, 0) == cudaSuccess && galloc_free(d, 0) == cudaSuccess;
    f = reinterpret_cast<float *>(&request);
    ok = ok && galloc_malloc(&f, ~static_cast<size_t>(0), 0) == cudaErrorMemoryAllocation && !f;
    ok = ok && galloc_malloc(static_cast<float **>(nullptr), 1, 0) == cudaErrorInvalidValue;
    ok = ok && galloc_malloc_growable(static_cast<float **>(nullptr), 1, 2, 0) == cudaErrorInvalidValue;
    ok = ok && galloc_alloc(static_cast<particle **>(nullptr), &request) == cudaErrorInvalidValue;
    return ok ? 0 : 1;
}
