/* c10_cuda.cpp - the part of PyTorch's libc10_cuda.so that galloc_torch.c looks up by name: its exceptions. */

#include "c10_error.h"

namespace c10 {
Error::Error(SourceLocation where, std::string text) : message(std::move(text)), line(where.line) {}
Error::~Error() = default;
const char *Error::what() const noexcept { return message.c_str(); }
} // namespace c10

/* Makes the compiler write the table and the type of the derived class here, as in PyTorch. */
extern "C" void c10_throw_one() { throw c10::OutOfMemoryError({"", "", 0}, ""); }
