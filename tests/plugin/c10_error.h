/* c10_error.h - c10::Error and c10::OutOfMemoryError with PyTorch's names, bases and constructor, not its members. */

#ifndef C10_ERROR_H
#define C10_ERROR_H

#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#define SHARED __attribute__((visibility("default")))

namespace c10 {
struct SourceLocation {
    const char *function, *file;
    uint32_t line;
};

class SHARED Error : public std::exception {
public:
    Error(SourceLocation where, std::string text);
    ~Error() override;
    const char *what() const noexcept override;
    const char *what_without_backtrace() const noexcept { return what(); }

private:
    std::string message;
    std::vector<std::string> context;
    uint32_t line;
};

class SHARED OutOfMemoryError : public Error {
public:
    using Error::Error;
};
} // namespace c10

#endif
