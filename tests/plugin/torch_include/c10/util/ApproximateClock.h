/* ApproximateClock.h - what galloc_torch.cpp uses of PyTorch's header of this name: a clock that counts its readings. */

#ifndef C10_APPROXIMATE_CLOCK_H
#define C10_APPROXIMATE_CLOCK_H

#include <cstdint>
#include <functional>

namespace c10 {
using time_t = int64_t;
using approx_time_t = uint64_t;

inline approx_time_t getApproximateTime()
{
    static approx_time_t now;
    return ++now;
}

struct ApproximateClockToUnixTimeConverter {
    std::function<time_t(approx_time_t)> makeConverter()
    {
        return [](approx_time_t t) { return time_t(t) * 1000; };
    }
};
} // namespace c10

#endif
