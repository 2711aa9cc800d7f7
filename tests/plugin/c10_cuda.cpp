/* c10_cuda.cpp - the part of PyTorch's libc10_cuda.so that galloc_torch.c looks up by name: its exceptions, and its
   current stream. */

#include <cuda_runtime_api.h>

#include "c10_error.h"

thread_local cudaStream_t current_stream; /* set by the tests */

namespace c10::cuda {
class CUDAStream {
public:
    cudaStream_t stream() const;
    short device; /* its type and its number */
    long id;
};

cudaStream_t __attribute__((noinline)) CUDAStream::stream() const { return reinterpret_cast<cudaStream_t>(id); }

CUDAStream getCurrentCUDAStream(signed char device);
CUDAStream getCurrentCUDAStream(signed char device)
{
    return {short(1 + 256 * device), reinterpret_cast<long>(current_stream)};
}
} // namespace c10::cuda

namespace c10 {
Error::Error(SourceLocation where, std::string text) : message(std::move(text)), line(where.line) {}
Error::~Error() = default;
const char *Error::what() const noexcept { return message.c_str(); }
} // namespace c10

/* Makes the compiler write the table and the type of the derived class here, as in PyTorch. */
extern "C" void c10_throw_one() { throw c10::OutOfMemoryError({"", "", 0}, ""); }
