/* CUDAGuard.h - what galloc_torch.cpp uses of PyTorch's header of this name. */

#ifndef C10_CUDA_GUARD_H
#define C10_CUDA_GUARD_H

#include <cuda_runtime_api.h>

namespace c10::cuda {
class CUDAGuard {
public:
    explicit CUDAGuard(int device)
    {
        (void)cudaGetDevice(&before);
        (void)cudaSetDevice(device);
    }
    ~CUDAGuard() { (void)cudaSetDevice(before); }

private:
    int before = 0;
};
} // namespace c10::cuda

#endif
