// override_typed.cpp - GALLOC_OVERRIDE_CUDA with the overloads for typed pointers, of galloc and of CUDA.

#define GALLOC_OVERRIDE_CUDA
#include "galloc.h"

#include <cuda_runtime.h>

#include "override.h"

// With a pool of CUDA's own the memory is CUDA's.
static bool pools_of_cuda()
{
    cudaMemPool_t pool = nullptr;
    galloc_pointer info;
    float *f = nullptr;
    void *v = nullptr;
    bool ok = cudaDeviceGetDefaultMemPool(&pool, 0) == cudaSuccess;
    ok = ok && cudaMallocAsync(&f, 800, pool, nullptr) == cudaSuccess && f;
    ok = ok && cudaMallocAsync(&v, 800, pool, nullptr) == cudaSuccess && v;
    ok = ok && galloc_pointer_info(f, &info) == cudaSuccess && info.state == GALLOC_STATE_FOREIGN;
    ok = ok && galloc_pointer_info(v, &info) == cudaSuccess && info.state == GALLOC_STATE_FOREIGN;
    return ok && cudaFreeAsync(f, nullptr) == cudaSuccess && cudaFreeAsync(v, nullptr) == cudaSuccess;
}

int override_use_typed()
{
    float *f = nullptr;
    double *d = nullptr;
    void *v = nullptr;
    bool ok = cudaMalloc(&f, 100 * sizeof(float)) == cudaSuccess && f;
    ok = ok && cudaMalloc(&v, 100) == cudaSuccess && v;
    ok = ok && cudaMallocAsync(&d, 800, nullptr) == cudaSuccess && d;
    ok = ok && ::cudaFree(f) == cudaSuccess && cudaFree(v) == cudaSuccess && cudaFreeAsync(d, nullptr) == cudaSuccess;
    ok = ok && cudaMalloc(&f, ~static_cast<size_t>(0)) == cudaErrorMemoryAllocation && !f;
    ok = ok && cudaMalloc(static_cast<float **>(nullptr), 1) == cudaErrorInvalidValue;
    return ok && pools_of_cuda() ? 0 : 1;
}
