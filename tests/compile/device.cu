// device.cu - the header and its implementation in a file of CUDA C++, beside a kernel.

#define GALLOC_IMPLEMENTATION
#include "galloc.h"

__global__ void fill(float *data, int n, float value)
{
    int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) data[i] = value;
}

cudaError_t fill_some(cudaStream_t stream, int n)
{
    float *data = nullptr;
    cudaError_t err = galloc_malloc(&data, static_cast<size_t>(n) * sizeof *data, stream);
    if (err != cudaSuccess) return err;
    fill<<<(n + 255) / 256, 256, 0, stream>>>(data, n, 1.0f);
    return galloc_free(data, stream);
}
