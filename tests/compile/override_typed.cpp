// override_typed.cpp - GALLOC_OVERRIDE_CUDA with the overloads for typed pointers, of galloc and of CUDA.

#define GALLOC_OVERRIDE_CUDA
#include "galloc.h"

#include <cuda_runtime.h>

#include "override.h"

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
    return ok ? 0 : 1;
}
