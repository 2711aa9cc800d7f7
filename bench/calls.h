/* calls.h - what an allocator calls in the driver while it is at work: how often, for how long, and whether it could
   have waited for the device. Not what it says of itself: functions that stand before the driver's count. */

#ifndef BENCH_CALLS_H
#define BENCH_CALLS_H

#include <stdbool.h>

/* Before the first call of CUDA. Without it nothing is looked at, and nothing costs time. */
void calls_watch(void);

/* What is called in between is counted, also over several rounds. For programs of one thread. */
void calls_begin(void);
void calls_end(void);

/* A table, or a line of JSON for each function that was called. */
void calls_print(bool json);

#endif
