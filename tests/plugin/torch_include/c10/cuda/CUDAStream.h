/* CUDAStream.h - what galloc_torch.cpp uses of PyTorch's header of this name. */

#ifndef C10_CUDA_STREAM_H
#define C10_CUDA_STREAM_H

#include <cuda_runtime_api.h>

namespace c10::cuda {
class CUDAStream {
public:
    explicit CUDAStream(cudaStream_t stream) : stream_(stream) {}
    cudaStream_t stream() const { return stream_; }

private:
    cudaStream_t stream_;
};

CUDAStream getCurrentCUDAStream(signed char device);
} // namespace c10::cuda

#endif
