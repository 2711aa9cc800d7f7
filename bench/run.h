/* run.h - replays a trace through an allocator and measures it. */

#ifndef BENCH_RUN_H
#define BENCH_RUN_H

#include <stdbool.h>
#include <stdio.h>

#include "allocator.h"
#include "trace.h"

/* A row is about the calls since the row before it: the number of the last one, counted through all passes, and the
   most bytes that were live and held after one of them. */
#define RUN_TIMELINE_HEAD "trace,allocator,settings,call,live_bytes,held_bytes"

typedef struct run_options {
    const allocator *allocator;
    const char *conf; /* settings of the allocator, or NULL */
    size_t limit;     /* bytes that the allocator may hold; SIZE_MAX: no limit */
    int repeat;       /* passes in one process and pool, at least 1 */
    bool fit;         /* also find the smallest limit */
    bool no_room;     /* blocks are allocated without the room that galloc's log names: what does not fit is copied */
    bool busy;        /* queued work, well behind the host, uses every block */
    bool verify;      /* queued work writes every block and checks it */
    FILE *timeline;   /* gets rows of live and held bytes over the calls (RUN_TIMELINE_HEAD); NULL: none */
    bool threads;     /* each thread of the trace is one, too; they take turns, in the order of the trace */
    const char *snapshot; /* galloc's state after the last row, of the last pass, goes to this file; NULL: to none */
    bool calls;       /* the driver's calls are watched (calls.h), while work runs that does not end meanwhile */
} run_options;

/* What does not apply is -1, or NAN. */
typedef struct run_result {
    size_t ops; /* of the trace, in one pass */
    size_t peak_live, peak_reserved;
    size_t fit_limit;       /* 0: not sought, or memory ran out without it */
    size_t oom;             /* allocations that failed for want of memory, all passes together */
    double ns_per_op;       /* host time of a call in the first pass */
    double ns_per_op_warm;  /* in the last one */
    double ns_per_op_own;   /* in the first, less the time in calls into the driver that do something: by galloc's own
                               measure (galloc_stats.driver_ns), so for galloc only. Looks at a stream are in it */
    int64_t driver_calls;   /* that make, move or give back memory, or order streams; looks at a stream are none */
    int64_t driver_calls_warm;
    double driver_us;       /* by the device's model, of all calls that are no looks; to the pool's end */
    double driver_us_warm;  /* in the last pass */
    int64_t looks;          /* at a stream or context; to the pool's end */
    double looks_us, looks_us_warm;
    double mean_reserved;   /* held over the calls of all passes, looked at now and then */
    int64_t moves, waits, collections;
    int64_t findings, races;
    double unfinished;      /* share of frees of blocks that queued work still used */
    int64_t moves_seen;     /* by the device: pages that a block was given at other addresses than they were used at */
    int64_t moves_busy;     /* of those, while queued work still used them */
    int64_t handovers;      /* allocations whose bytes another stream used last */
    int64_t handovers_busy; /* of those, before that stream's work was done */
} run_result;

enum {
    RUN_OK = 0,
    RUN_FAILED = 1,      /* a call failed for another reason than memory */
    RUN_MISMATCH = 3     /* galloc's counters are not what the device says */
};

/* Returns RUN_..., with a line on stderr when it is not RUN_OK. */
int run_trace(const trace *t, const run_options *options, run_result *result);

/* While work goes on, a line on stderr says which; only on a terminal. NULL clears it. */
void run_progress(const char *format, ...) __attribute__((format(printf, 1, 2)));
void run_progress_of(const char *what); /* stands before each such line from now on */

#endif
