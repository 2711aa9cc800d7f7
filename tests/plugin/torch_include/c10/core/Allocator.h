/* Allocator.h - what galloc_torch.cpp uses of PyTorch's header of this name: devices, stacks, and the profiler. */

#ifndef C10_ALLOCATOR_H
#define C10_ALLOCATOR_H

#include <cstddef>
#include <cstdint>

namespace c10 {
using DeviceIndex = int8_t;
enum class DeviceType : int8_t { CPU, CUDA };

struct Device {
    Device(DeviceType t, DeviceIndex i) : type(t), index(i) {}
    DeviceType type;
    DeviceIndex index;
};

struct GatheredContext {
    virtual ~GatheredContext() = default;
};

bool memoryProfilingEnabled();
void reportMemoryUsageToProfiler(void *ptr, int64_t size, size_t allocated, size_t reserved, Device device);
void reportOutOfMemoryToProfiler(int64_t size, size_t allocated, size_t reserved, Device device);
} // namespace c10

#endif
